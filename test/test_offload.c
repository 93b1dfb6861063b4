// test_offload.c: what offload.h puts on the host and on disk, against the plain way: a plan of
// everything at each turn. Random models, layouts, policies, budgets, and placements to begin with.
#include "ops/cpu/ops_cpu.h"
#include "pipeline.h"
#include "plan/state_plan.h"
#include "state/store.h" // store_free
#include "policies.h"    // config_with

#include "harness.h"

static uint64_t seed, drawn;
static int draw(int below) { return (int)(random_u64(seed, 1, drawn++) % (uint64_t)below); }
static bool toss(void) { return draw(2); }

// -------------------------------------------------------------------------------------------------
// The plain way

// Plans everything from the beginning.
static StatePlan plan_with(const StatePlan *s, const Offload *o) {
    ZeroPolicy policy = s->policy;
    policy.offload = o;
    return state_plan_as(s, s->ranks, &policy);
}
static int64_t buffer_bytes(const StatePlan *s, StateKind kind) {
    return (int64_t)(s->device[kind].held + s->device[kind].slot_bytes);
}
static int64_t device_frees(const OffloadScope *f, const Offload *o) {
    StatePlan without = plan_with(f->store, NULL), with = plan_with(f->store, o);
    const GptModel *m = with.model;
    int64_t bytes = o->cpu_update ? 0 : -(int64_t)with.offload_buffers.slot_bytes, stashed = 0;
    // with recomputation the first block of a stage has received its input
    const int first = f->units.stage[0].first + f->inputs;
    for (int u = (int)max_i64(first, 1); u < min_i64(f->units.stage[0].end, m->units - 1); u++) {
        int used[2];
        gpt_unit_storages(m, u, used);
        stashed += f->in_flight * (o->host[used[0]] >> STATE_ACTIVATIONS & 1);
    }
    for (StateKind kind = STATE_MASTER; kind <= STATE_PARAMETERS; kind++) {
        bytes += buffer_bytes(&without, kind) - buffer_bytes(&with, kind);
    }
    store_plan_free(&without);
    store_plan_free(&with);
    return bytes + (stashed ? (stashed - STASH_SLOTS) * f->block_bytes : 0);
}
static int64_t host_frees(const OffloadScope *f, const Offload *o) {
    StatePlan with = plan_with(f->store, o);
    int64_t bytes = -(int64_t)with.disk_buffers.held;
    for (int i = 0; i < with.model->storages; i++) {
        bytes +=
            __builtin_popcount(o->disk[i]) * store_own_elements(&with, i) * (int64_t)sizeof(float);
    }
    store_plan_free(&with);
    return bytes;
}
typedef int64_t (*Frees)(const OffloadScope *f, const Offload *o);
// offload_until. gone: [storages] what has left, of o.
static int64_t plain_fill(const OffloadTier *tier, unsigned char *gone, const Offload *o,
                          const OffloadScope *f, Frees frees, double excess) {
    const size_t n = (size_t)f->store->model->storages;
    unsigned char *best = malloc(2 * n), *fixed = best + n;
    memcpy(best, gone, n);
    memcpy(fixed, gone, n);
    int64_t most = frees(f, o);
    for (int k = 0; k < tier->count && (double)frees(f, o) < excess; k++) {
        gone[tier->turns[k].storage] |= tier->turns[k].kinds;
        if (frees(f, o) > most) {
            most = frees(f, o);
            memcpy(best, gone, n);
        }
    }
    memcpy(gone, best, n);
    for (int k = tier->count - 1; k >= 0 && (double)most >= excess; k--) {
        unsigned char *bits = &gone[tier->turns[k].storage];
        const unsigned char before = *bits;
        *bits &= (unsigned char)~(tier->turns[k].kinds & ~fixed[tier->turns[k].storage]);
        const bool apart =
            o->cpu_update && (*bits & ((1 << HOST_KINDS) - 1)) && !(*bits & OPTIMIZER_STATES);
        if (apart || (double)frees(f, o) < excess) { *bits = before; }
    }
    free(best);
    return most;
}

// -------------------------------------------------------------------------------------------------
// Random cases

static GptModel draw_model(void) {
    const int layers = 1 + draw(9), heads = 1 + draw(2);
    const GptConfig config = {layers,         heads, heads * (4 + 4 * draw(8)),
                              50 + draw(300), 0,     8 << draw(4)};
    GptConfig padded = config_with(config, draw(ARCHITECTURES));
    padded.padded_vocab = round_up(config.vocab, 1 + draw(128));
    if (toss()) { return gpt_model(padded); }
    const int run = 1 + draw(layers);
    return gpt_model_shared(padded,
                            toss() ? gpt_share(layers, run, 0) : gpt_share(layers, layers, run));
}
// Stages of random lengths, with random numbers of ranks.
static Placement draw_placement(const GptModel *m, int *ranks) {
    const int stages = 1 + draw(toss() ? 1 : (int)min_i64(4, m->units));
    char text[200] = "";
    *ranks = 0;
    for (int s = 0, unit = 0; s < stages; s++) {
        const int left = m->units - unit - (stages - 1 - s),
                  units = s == stages - 1 ? left : 1 + draw(left), replicas = 1 + draw(5);
        sprintf(text + strlen(text), "%s%d:%d", s ? "," : "", units, replicas);
        unit += units;
        *ranks += replicas;
    }
    if (stages == 1) { sprintf(text, "1"); }
    return pipeline_placement(text, m->units, *ranks);
}
static ZeroPolicy draw_policy(void) {
    ZeroPolicy z;
    memset(&z, 0, sizeof z);
    z.stage = draw(4);
    z.partition = 1;
    z.accumulates = toss();
    z.quantized_weights = z.stage == 3 && !draw(4);
    z.weights.bits = z.gradients.bits = 8;
    z.weights.block = z.gradients.block = 64 << draw(3);
    return z;
}
static Offload draw_offload(const GptModel *m) {
    Offload o;
    memset(&o, 0, sizeof o);
    o.host = calloc(2 * (size_t)m->storages, 1);
    o.disk = o.host + m->storages;
    o.cpu_update = toss();
    o.gradients = toss();
    return o;
}
// Something has left already: what other ranks ask for, or --offload.
static void draw_turns(const OffloadTier *tier, unsigned char *gone) {
    const int of = 1 + draw(12);
    for (int k = 0; toss() && k < tier->count; k++) {
        gone[tier->turns[k].storage] |= draw(of) ? 0 : tier->turns[k].kinds;
    }
}
// Fills a tier both ways, from the same placement.
static void fill_both_ways(Offload *o, const OffloadScope *f, bool stored) {
    const size_t n = (size_t)f->store->model->storages;
    const Frees frees = stored ? host_frees : device_frees;
    unsigned char *gone = stored ? o->disk : o->host, *first = malloc(2 * n), *plain = first + n;
    OffloadTier turns = offload_tier(o, f, stored);
    draw_turns(&turns, gone);
    memcpy(first, gone, n);
    for (int k = 0; k < turns.count; k++) { gone[turns.turns[k].storage] |= turns.turns[k].kinds; }
    const double excess = ((double)frees(f, o) + 1000) * (draw(12) - 1) / 9;
    memcpy(gone, first, n);
    const int64_t most = plain_fill(&turns, gone, o, f, frees, excess);
    tier_free(&turns);
    memcpy(plain, gone, n);
    memcpy(gone, first, n);
    assert_int_equal(offload_until(offload_tier(o, f, stored), excess), most);
    assert_memory_equal(gone, plain, n);
    free(first);
}
static void test_fill(void **state) {
    (void)state;
    const bool all = all_tests();
    for (int i = 0; i < (all ? 20000 : 1000); i++) {
        const GptModel m = draw_model();
        int ranks;
        Placement placement = draw_placement(&m, &ranks);
        Group cluster = group_cluster(1, ranks), seen = group_seen_from(&cluster, draw(ranks));
        const ZeroPolicy policy = draw_policy();
        const MixedPrecision precision = {toss() ? DTYPE_FP32 : DTYPE_BF16, DTYPE_FP32};
        StatePlan store =
            state_plan(&m, &seen, &placement, &policy, precision, &optimizers[toss()]);
        Offload o = draw_offload(&m);
        const OffloadScope f = {.store = &store,
                                .parameters = toss(),
                                .activations = toss(),
                                .block_bytes = 100 + draw(100000),
                                .in_flight = 1 + draw(3),
                                .units = placement_units_of_rank(&placement, seen.me),
                                .inputs = toss()};
        fill_both_ways(&o, &f, false);
        fill_both_ways(&o, &f, true);
        store_plan_free(&store);
        placement_free(&placement);
        group_free(&seen);
        group_free(&cluster);
        free(o.host);
    }
}

int main(void) {
    seed = test_seed((uint64_t)time(NULL));
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_fill)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
