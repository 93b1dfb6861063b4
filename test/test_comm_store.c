// test_comm_store.c: the store on several ranks, by placement. Run as `mpirun -np N
// build/test_comm_store`, N = 1 to 4.
//
// For every placement of a small model's units on the ranks (one stage, several, of unequal width,
// in any order of ranks), every ZeRO stage and pipeline schedule, the lowered action lists are run
// without a model: a sample adds small integers to the gradients of the unit that computes it, so
// sums are exact in any order, and what one rank with plain arrays computes must come out bit for
// bit: parameters at each use, norm, master parameters, moments. So must the predicted bytes of
// messages and of memory. States saved under one placement, and exported models, are read back into
// the others. Architecture and depth of the model are drawn; model files need GPT-2's.
//
// TEST_ALL=1: every combination, and every architecture; else some of each, TEST_SEED=N: which.
// Last line "N passed, N failed" counts the groups of cases; exit code 1 if any failed.
#include "zero.h"
#include "counts.h" // report; before what needs GNU's extensions
#include "ops/cpu/ops_cpu.h"

#include "checkpoint/checkpoint.h"
#include "pipeline.h"
#include "plan/state_plan.h"
#include "schedule/validator.h"
#include "state/sums.h"
#include "policies.h" // OFFLOAD

enum {
    MAX_RANKS = 4,
    STAGING = 1 << 18,
    STEPS = 2,
    SAMPLES = 7,
    MICRO = 2,
    LAYERS = 4,
    // at most: a block more, each with experts, the embedding's, lnf and the head's
    STORAGES = 2 * (LAYERS + 1) + 3,
    STAGES = 4
};
static const OptimizerStep optimizer = {0.01f, 0.9f,      0.95f, 1e-8f,        0.1f,
                                        0.0f,  1.0f / 64, 0,     {false, 0, 0}};

static Stream stream;
static GptModel model;
static char folder[64]; // of all ranks
static bool everything; // TEST_ALL=1: every combination; else some of each

// A placement: of each stage the units (of LAYERS blocks; the last stage has those of a longer
// model), and its ranks in the order of their rows.
typedef struct {
    int ranks, stages, units[STAGES], replicas[STAGES], of[STAGES][MAX_RANKS];
} Case;
static const Case cases[] = {
    {1, 1, {6}, {1}, {{0}}},
    {2, 1, {6}, {2}, {{0, 1}}},
    {2, 2, {3, 3}, {1, 1}, {{0}, {1}}},
    {2, 2, {1, 5}, {1, 1}, {{1}, {0}}},
    {3, 1, {6}, {3}, {{0, 1, 2}}},
    {3, 2, {3, 3}, {2, 1}, {{0, 1}, {2}}},
    {3, 2, {4, 2}, {1, 2}, {{1}, {2, 0}}},
    {3, 3, {2, 2, 2}, {1, 1, 1}, {{2}, {0}, {1}}},
    {4, 1, {6}, {4}, {{0, 1, 2, 3}}},
    {4, 2, {3, 3}, {2, 2}, {{0, 1}, {2, 3}}},
    {4, 2, {5, 1}, {3, 1}, {{3, 1, 0}, {2}}},
    {4, 3, {1, 4, 1}, {1, 2, 1}, {{3}, {0, 2}, {1}}},
    {4, 4, {1, 2, 2, 1}, {1, 1, 1, 1}, {{0}, {1}, {2}, {3}}},
};
enum { CASES = sizeof cases / sizeof cases[0] };

// What a run is like.
typedef struct {
    ZeroPolicy zero;
    DType dtype, wire;
    PipelineKind kind;
    bool exact; // no message is quantized
} Setting;

static void check(bool good, const char *what, const Case *c, const Setting *setting, int storage) {
    passed += good;
    failed += !good;
    if (good || failed > 20) { return; }
    fprintf(stderr, "FAILED on rank %d: %s, case %d, ZeRO %d, partition %d, kind %d, storage %d\n",
            comm.rank, what, (int)(c - cases), setting->zero.stage, setting->zero.partition,
            (int)setting->kind, storage);
}

static Placement placement_of(const Case *c) {
    Placement p = placement_make(c->stages);
    for (int s = 0, unit = 0; s < c->stages; unit += c->units[s++]) {
        Stage *stage = &p.stage[s];
        stage->first_unit = unit;
        stage->units = s + 1 < c->stages ? c->units[s] : model.units - unit;
        stage->replicas = c->replicas[s];
        stage->ranks = (int *)checked_malloc(sizeof c->of[s], "ranks");
        memcpy(stage->ranks, c->of[s], (size_t)c->replicas[s] * sizeof(int));
    }
    return p;
}
static Program program_of(const StatePlan *states, const Setting *setting, bool training) {
    const PipelinePlan plan = {
        *states->placement, setting->kind, WARMUP_A,     MICRO, (int)ceil_div(SAMPLES, MICRO),
        INT64_MAX,          false,         CLIPS_NOTHING};
    Program p;
    char error[400];
    memset(&p, 0, sizeof p);
    p.map = unit_map(states, false);
    p.ranks = comm.ranks;
    p.rank = (Schedule *)checked_calloc((size_t)p.ranks, sizeof(Schedule), "schedules");
    schedule_pipeline(&p, &plan, SAMPLES, training);
    zero_lower(&p, training);
    if (training && !schedule_validate(&p, error, sizeof error)) {
        die(EXIT_INPUT, NULL, "invalid schedule: %s", error);
    }
    return p;
}

// -------------------------------------------------------------------------------------------------
// The same with plain arrays

// What a sample adds to an element of the gradient of a storage in a unit that uses it: -3 .. 3.
static float contribution(int step, int unit, int64_t sample, int64_t element) {
    uint32_t h = (uint32_t)element * 2654435761u ^
                 (uint32_t)(sample * 40503 + unit * 9973 + step * 7919) * 2246822519u;
    return (float)((h >> 16) % 7) - 3.0f;
}
typedef struct {
    float *state[FILE_KINDS][STORAGES]; // after all steps
    float *master[STEPS + 1][STORAGES]; // after so many
    double norm[STEPS + 1];
} Reference;
static Reference expected;

static void reference_update(int storage, float *grad, int64_t step) {
    TensorPart parts[MOST_TENSORS];
    for (int i = gpt_storage_parts(&model, storage, parts) - 1; i >= 0; i--) {
        OptimizerStep o = optimizer;
        if (parts[i].rate == RATE_BALANCE) { continue; } // which no optimizer updates
        const int64_t at = parts[i].offset;
        o.step = step + 1;
        o.weight_decay = parts[i].decays ? o.weight_decay : 0.0f;
        float *master = expected.state[STATE_MASTER][storage] + at;
        const UpdateSlice u = {
            .master = master,
            .moment = {expected.state[STATE_MOMENT][storage] + at,
                       expected.state[STATE_MOMENT + 1][storage] + at},
            .grad = grad + at,
            .param = master,
            .dtype = DTYPE_FP32,
            .n = parts[i].elements,
        };
        ops_adamw(&stream, u, o);
    }
}
static void make_reference(void) {
    for (int s = 0; s < model.storages; s++) {
        const size_t n = (size_t)gpt_storage_elements(&model, s);
        for (int k = 0; k < STATE_PREVIOUS; k++) {
            expected.state[k][s] = (float *)checked_calloc(n, sizeof(float), "reference");
        }
        for (int k = 0; k <= STEPS; k++) {
            expected.master[k][s] = (float *)checked_calloc(n, sizeof(float), "reference");
        }
        gpt_initialise(&model, s, 11, 0, (int64_t)n, expected.state[STATE_MASTER][s]);
        memcpy(expected.master[0][s], expected.state[STATE_MASTER][s], n * sizeof(float));
    }
    for (int step = 0; step < STEPS; step++) {
        double squares = 0; // of integers: exact
        for (int s = 0; s < model.storages; s++) {
            const int64_t n = gpt_storage_elements(&model, s);
            float *grad = (float *)checked_calloc((size_t)n, sizeof(float), "reference");
            for (int unit = 0; unit < model.units; unit++) {
                int used[2], count = gpt_unit_storages(&model, unit, used);
                if (used[0] != s && (count < 2 || used[1] != s)) { continue; }
                for (int64_t i = 0; i < SAMPLES * n; i++) {
                    grad[i % n] += contribution(step, unit, i / n, i % n);
                }
            }
            for (int64_t i = 0; i < n; i++) { squares += (double)grad[i] * (double)grad[i]; }
            reference_update(s, grad, step);
            memcpy(expected.master[step + 1][s], expected.state[STATE_MASTER][s],
                   (size_t)n * sizeof(float));
            free(grad);
        }
        expected.norm[step] = sqrt(squares);
    }
}
static void free_reference(void) {
    for (int s = 0; s < model.storages; s++) {
        for (int k = 0; k < STATE_PREVIOUS; k++) { free(expected.state[k][s]); }
        for (int k = 0; k <= STEPS; k++) { free(expected.master[k][s]); }
    }
}

// -------------------------------------------------------------------------------------------------
// A store at work
typedef struct {
    const Case *c;
    Setting setting;
    Placement placement;
    Program program;
    Store store;
    int64_t version;
} Rig;

static void rig_make(Rig *r, const Case *c, const Setting *setting) {
    size_t predicted[MEMORY_KINDS] = {0}, before[MEMORY_KINDS];
    r->c = c;
    r->setting = *setting;
    r->placement = placement_of(c);
    r->version = 0;
    ops_open(&stream, 0, setting->dtype);
    const MixedPrecision precision = {setting->dtype, setting->wire};
    r->store = store_of_plan(state_plan(&model, &comm.everyone, &r->placement, &setting->zero,
                                        precision, &optimizers[0]));
    r->program = program_of(&r->store.plan, setting, true);
    store_join(&r->store.plan, &comm);
    store_predict(&r->store.plan, predicted);
    memcpy(before, memory_taken, sizeof before);
    store_allocate(&r->store, &comm, &stream);
    for (int k = 0; k < MEMORY_KINDS; k++) {
        check(memory_taken[k] - before[k] == predicted[k], "predicted memory", c, setting, -1);
    }
}
static void rig_free(Rig *r) {
    store_wait_all(&r->store);
    store_free(&r->store);
    program_free(&r->program);
    placement_free(&r->placement);
}

static void contribute(Rig *r, const Action *a, int step) {
    const UnitMap *map = &r->program.map;
    for (int k = 0; k < map->of_unit_count[a->unit] && a->rows; k++) {
        const int storage = map->of_unit[a->unit][k];
        if (!action_contributes(map, a, storage)) { continue; }
        bool accumulate;
        const int64_t n = gpt_storage_elements(&model, storage);
        float *grad = store_gradient(&r->store, storage, &accumulate);
        if (!accumulate) { memset(grad, 0, (size_t)n * sizeof(float)); }
        for (int64_t row = a->first_row; row < a->first_row + a->rows; row++) {
            for (int64_t i = 0; i < n; i++) { grad[i] += contribution(step, a->unit, row, i); }
        }
    }
}
static void check_acquired(const Rig *r, const Real *found, int storage) {
    const float *master = expected.master[r->version][storage];
    bool good = true;
    for (int64_t i = 0; i < gpt_storage_elements(&model, storage) && r->setting.exact; i++) {
        const uint16_t rounded = float_to_bf16(master[i]);
        const bool bf16 = r->setting.dtype == DTYPE_BF16;
        good = good && !memcmp(bf16 ? (const void *)&rounded : master + i, real_at_const(found, i),
                               dtype_size(r->setting.dtype));
    }
    check(good, "parameters", r->c, &r->setting, storage);
}
// The actions of a step, or of a pass that does not train.
static void run(Rig *r, const Schedule *schedule, int step) {
    Store *s = &r->store;
    double norm;
    r->version = store_version(s);
    for (int i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        if (i % 16 == comm.rank) { comm_progress(); }
        switch (a->kind) {
        case ACT_PREFETCH:
            store_prefetch(s, a->storage, r->version + a->version, a->secondary, step);
            break;
        case ACT_ACQUIRE:
            check_acquired(r, store_acquire(s, a->storage, r->version + a->version), a->storage);
            break;
        case ACT_RELEASE: break;
        case ACT_REDUCE: store_reduce(s, a->storage, step); break;
        case ACT_UPDATE: store_update(s, a->storage, step, optimizer, a->use); break;
        case ACT_FETCH: store_fetch(s, a->storage, a->use, step); break;
        case ACT_EVICT: store_evict(s, a->storage, a->use, step); break;
        case ACT_FETCH_SUM: store_fetch_sum(s, a->storage, step); break;
        case ACT_EVICT_SUM: store_evict_sum(s, a->storage, step); break;
        case ACT_READ: store_read_piece(s, a->storage, a->use); break;
        case ACT_WRITE: store_write_piece(s, a->storage, a->use); break;
        case ACT_NORM:
            store_finish_sums(s);
            norm = store_norm(s, step);
            check(r->setting.exact ? norm == expected.norm[step]
                                   : fabs(norm / expected.norm[step] - 1) < 0.1,
                  "norm", r->c, &r->setting, -1);
            break;
        case ACT_BACKWARD_INPUT:
        case ACT_BACKWARD_WEIGHT: contribute(r, a, step); break;
        default: break;
        }
    }
}
static void check_states(const Rig *r, const char *what, int64_t steps) {
    for (int kind = 0; kind < STATE_PREVIOUS; kind++) {
        for (int storage = 0; storage < model.storages; storage++) {
            int64_t begin, n = store_own(&r->store.plan, storage, &begin);
            const float *all =
                steps == STEPS ? expected.state[kind][storage] : expected.master[steps][storage];
            if (!n || (kind != STATE_MASTER && steps != STEPS)) { continue; }
            check(!memcmp(store_floats(&r->store, (StateKind)kind, storage, 0), all + begin,
                          (size_t)n * sizeof(float)),
                  what, r->c, &r->setting, storage);
        }
    }
}
static void check_traffic(const Rig *r) {
    int64_t predicted[COMM_KINDS][LINK_KINDS];
    memset(predicted, 0, sizeof predicted);
    const Schedule *schedule = &r->program.rank[comm.rank];
    for (int i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        ZeroMessage m[2];
        int n = 0;
        if (a->kind == ACT_REDUCE) { n = store_reduce_messages(&r->store.plan, a->storage, m); }
        if (a->kind == ACT_PREFETCH) {
            m[n++] = store_gather_message(&r->store.plan, a->storage, a->secondary);
        }
        while (n--) {
            comm_bytes_sent(m[n].kind, m[n].group, m[n].group->me, m[n].bounds, m[n].element_bytes,
                            predicted[m[n].kind]);
        }
    }
    for (int k = 0; k < COMM_KINDS; k++) {
        for (int l = 0; l < LINK_KINDS; l++) {
            check(comm.bytes[k][l] == STEPS * predicted[k][l], "predicted traffic", r->c,
                  &r->setting, k);
        }
    }
}
// Does a unit of this rank use a storage?
static bool computes_with(const Rig *r, int storage) {
    const Stage *stage = &r->placement.stage[placement_stage_of_rank(&r->placement, comm.rank)];
    bool uses = false;
    for (int u = stage->first_unit; u < stage->first_unit + stage->units; u++) {
        int used[2], n = gpt_unit_storages(&model, u, used);
        uses = uses || used[0] == storage || (n > 1 && used[1] == storage);
    }
    return uses;
}
// Nobody has anything of what its units do not use, and all have together what one has.
static void check_holdings(const Rig *r) {
    for (int storage = 0; storage < model.storages; storage++) {
        const bool uses = computes_with(r, storage);
        check(store_holds(&r->store.plan, storage) == uses &&
                  (uses || !store_own_elements(&r->store.plan, storage)),
              "holds what it uses", r->c, &r->setting, storage);
        int64_t mine = store_own_elements(&r->store.plan, storage), all[MAX_RANKS], sum = 0;
        comm_all_gather_small(&comm, &mine, all, sizeof mine);
        for (int k = 0; k < comm.ranks; k++) { sum += all[k]; }
        check(sum == gpt_storage_elements(&model, storage), "every element has one owner", r->c,
              &r->setting, storage);
    }
}
static void train_rig(Rig *r) {
    store_initialise(&r->store, 11);
    store_wait_all(&r->store);
    check_states(r, "initial states", 0);
    comm_reset_counters(&comm);
    for (int step = 0; step < STEPS; step++) { run(r, &r->program.rank[comm.rank], step); }
    store_wait_all(&r->store);
    check_traffic(r);
    if (r->setting.exact) { check_states(r, "states", STEPS); }
    comm_reset_counters(&comm);
}
static void test_setting(const Case *c, const Setting *setting) {
    Rig r;
    rig_make(&r, c, setting);
    check_holdings(&r);
    train_rig(&r);
    // the last versions, with and without gathers
    Program evaluation = program_of(&r.store.plan, setting, false);
    run(&r, &evaluation.rank[comm.rank], STEPS);
    program_free(&evaluation);
    rig_free(&r);
}

static Setting setting_of(int zero, PipelineKind kind) {
    Setting s;
    memset(&s, 0, sizeof s);
    s.zero.stage = zero;
    s.zero.partition = 1;
    s.zero.accumulates = true;
    s.kind = kind;
    s.exact = true;
    s.zero.weights.bits = 8;
    s.zero.gradients.bits = 8;
    s.zero.weights.block = s.zero.gradients.block = 64;
    return s;
}
static int narrowest(const Case *c) { // stage
    int n = MAX_RANKS;
    for (int s = 0; s < c->stages; s++) { n = (int)min_i64(n, c->replicas[s]); }
    return n;
}
static void test_stages(void) {
    for (int i = 0; i < CASES; i++) {
        for (int k = 0; k < 12 && cases[i].ranks == comm.ranks; k++) {
            Setting s = setting_of(k / 3, (PipelineKind)(k % 3));
            const bool chosen = k % 3 == (i + k / 3) % 3; // of the schedules
            if (everything || chosen) { test_setting(&cases[i], &s); }
            s.dtype = DTYPE_BF16;
            s.wire = DTYPE_BF16; // sums are small integers
            if (everything || (chosen && (i + k / 3) % 2)) { test_setting(&cases[i], &s); }
        }
    }
    report("ZeRO 0 to 3 under every placement and schedule");
}
// States on the host, drawn storage by storage: the host has all of the optimizer's of one, or
// none.
static void test_offload(void) {
    enum {
        FIRST = 1 << STATE_MOMENT,
        SECOND = FIRST << 1,
        BOTH = FIRST | SECOND,
        SUM = 1 << STATE_GRADIENT
    };
    static const unsigned char cpu_update[] = {0, BOTH, BOTH | SUM, BOTH | SUM},
                               by_device[] = {SUM, SECOND, FIRST | SUM, BOTH | SUM};
    for (int i = 0; i < CASES; i++) {
        for (int k = 0; k < 24 && cases[i].ranks == comm.ranks; k++) {
            unsigned char host[STORAGES];
            Setting s = setting_of(k / 6, (PipelineKind)(k % 3));
            const Offload o = OFFLOAD(host, k / 3 % 2 == 1, NULL, true, false);
            for (int storage = 0; storage < model.storages; storage++) {
                const int draw =
                    (int)(random_u64(7, (uint64_t)(i * 24 + k), (uint64_t)storage) % 4);
                host[storage] = o.cpu_update ? cpu_update[draw] : by_device[draw];
            }
            s.zero.offload = &o;
            if (everything || k % 3 == (i + k / 3) % 3) { test_setting(&cases[i], &s); }
        }
    }
    report("states on the host under every placement and schedule");
}
static void test_plus_plus(void) {
    for (int i = 0; i < CASES; i++) {
        for (int k = 1; k < 8 && cases[i].ranks == comm.ranks; k++) {
            Setting s =
                setting_of(k & 4 || k == 2 ? (k & 3 ? 3 : 2) : 3, (PipelineKind)((i + k) % 3));
            s.zero.quantized_weights = k & 1;
            s.zero.partition = k & 2 && narrowest(&cases[i]) > 1 ? 2 : 1;
            s.zero.quantized_gradients = s.zero.feedback = (k & 4) != 0;
            s.exact = !s.zero.quantized_weights && !s.zero.quantized_gradients;
            if (s.zero.stage < 3) {
                s.zero.quantized_weights = false;
                s.zero.partition = 1;
            }
            test_setting(&cases[i], &s);
        }
    }
    report("ZeRO++ under every placement");
}

// -------------------------------------------------------------------------------------------------
// Saved under one placement, read under another
static void load_everywhere(int saved, const char *path, const char *exported) {
    for (int i = 0; i < CASES; i++) {
        for (int zero = 0; zero < 4 && cases[i].ranks == comm.ranks; zero++) {
            Setting s = setting_of(zero, PIPELINE_DAPPLE);
            if (!everything && zero != (i + saved + 1) % 4) { continue; }
            Rig r;
            Progress p;
            Text why = {""};
            rig_make(&r, &cases[i], &s);
            bool good = checkpoint_load(path, &r.store, r.store.plan.model, &p, &why);
            check(good && p.step == 5, why.at, r.c, &s, -1);
            check_states(&r, "states of a checkpoint", STEPS);
            store_initialise(&r.store, 12);
            if (exported) { model_file_load(exported, &r.store, DTYPE_FP32); }
            for (int storage = 0; exported && storage < model.storages; storage++) {
                int64_t begin, n = store_own(&r.store.plan, storage, &begin);
                if (!n) { continue; }
                check(!memcmp(store_floats(&r.store, STATE_MASTER, storage, 0),
                              expected.state[STATE_MASTER][storage] + begin,
                              (size_t)n * sizeof(float)),
                      "parameters of a model file", r.c, &s, storage);
            }
            rig_free(&r);
        }
    }
}
static void test_files(void) {
    const bool is_gpt2 = !model.config.arch; // which model files can hold
    for (int i = 0; i < CASES; i++) {
        if (cases[i].ranks != comm.ranks) { continue; }
        Setting s = setting_of(i % 4, PIPELINE_DAPPLE);
        Rig r;
        Progress p;
        char exported[1200];
        Text path;
        memset(&p, 0, sizeof p);
        p.step = p.position = p.updates = 5;
        rig_make(&r, &cases[i], &s);
        train_rig(&r);
        check(checkpoint_save(folder, &r.store, &p, "--steps 5", &path), "saves", r.c, &s, -1);
        snprintf(exported, sizeof exported, "%s/model.bin", folder);
        if (is_gpt2) { check(!model_file_write(exported, &r.store), "exports", r.c, &s, -1); }
        comm_barrier(&comm);
        rig_free(&r);
        load_everywhere(i, path.at, is_gpt2 ? exported : NULL);
        comm_barrier(&comm);
    }
    report("checkpoints and model files from each placement to each");
}

static void test_model(int arch, int layers, bool only_files) {
    const GptConfig config = {layers, 1, 16, 50, 128, 8};
    model = gpt_model(config_with(config, arch));
    if (comm.rank == 0) {
        printf("%s%s, %d layers\n", model.arch->name,
               architecture_is_tied(model.arch) ? "" : ", untied", layers);
    }
    make_reference();
    if (!only_files) {
        test_stages();
        test_offload();
        if (!model.arch->experts) { test_plus_plus(); }
    }
    // llm.c's files have no experts
    if (!model.arch->experts || strcmp(model.arch->name, "gpt2")) { test_files(); }
    free_reference();
}

int main(int argc, char **argv) {
    comm_start(&comm, &argc, &argv);
    if (comm.ranks > MAX_RANKS) {
        die(EXIT_INPUT, "", "test_comm_store runs on at most %d ranks, not %d", MAX_RANKS,
            comm.ranks);
    }
    comm_place(&comm, comm.ranks == 4 ? 2 : 0); // two levels
    comm_allocate(&comm, checked_malloc(STAGING, "staging"), STAGING);
    comm.timeout_s = 120;
    stream.threads = 1;
    stream.progress = comm_progress;
    everything = getenv("TEST_ALL") && atoi(getenv("TEST_ALL"));
    snprintf(folder, sizeof folder, "/tmp/test_comm_store.XXXXXX");
    if (comm.rank == 0 && !mkdtemp(folder)) { die(EXIT_RESOURCES, NULL, "cannot make %s", folder); }
    comm_broadcast(&comm, folder, sizeof folder, 0);
    const char *seed = getenv("TEST_SEED");
    const uint64_t draw = mix64(seed ? strtoull(seed, NULL, 10) : 1);
    const int drawn = (int)(draw / 2 % ARCHITECTURES);
    if (drawn && !everything) { test_model(0, LAYERS, true); }
    for (int arch = 0; arch < ARCHITECTURES; arch++) {
        const int longer = (int)((draw + (uint64_t)arch) % 2);
        if (arch == drawn || everything) { test_model(arch, LAYERS + longer, false); }
    }
    if (comm.rank == 0) {
        folder_remove(checkpoint_folder(folder, 5, "").at);
        folder_remove(folder);
        printf("%d passed, %d failed\n", groups - red_groups, red_groups);
    }
    comm_end(&comm);
    return red_groups ? 1 : 0;
}
