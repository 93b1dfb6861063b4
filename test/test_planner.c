// test_planner.c: models of links and stages against numbers worked out by hand; profiles of any
// form, good and bad; plans against the paper's and against brute force; times of planning.
#include "ops/cpu/ops_cpu.h"
#include "plan/rates.h"
#include "planner/plan_answer.h"

#include "harness.h"

#define PROFILES "test/golden/dapple_profiles.json"
static const char *const config_a = "2x8,intra=25,inter=3,gather=1",
                         *const config_b = "16x1,inter=3,gather=1",
                         *const config_c = "16x1,inter=1.2";

static bool close_to(double x, double y) { return fabs(x - y) <= 1e-9 * fmax(fabs(x), fabs(y)); }
static PlanTask task_of(const PlanModel *m, const char *cluster, int64_t samples) {
    PlanTask t = {
        .model = m, .cluster = cluster_parse(cluster), .samples = samples, .memory = INFINITY};
    task_set_states(&t, &optimizers[0], DTYPE_FP32, 0); // 16 bytes a parameter
    return t;
}
// "units:replicas ..." with a policy's letter (append, fresh, scatter) or none.
static StagePlan plan_of(const char *text, int64_t micro_batch) {
    StagePlan p;
    memset(&p, 0, sizeof p);
    p.micro_batch = micro_batch;
    p.kind = PIPELINE_DAPPLE;
    p.warmup = WARMUP_A;
    for (int used = 0;
         sscanf(text, " %d:%d%n", &p.units[p.stages], &p.replicas[p.stages], &used) == 2;
         p.stages++, text += used + (text[used] > ' ')) {
        // append, fresh, scatter, spread, last
        const char *letters = "afspl", *letter = strchr(letters, text[used] ? text[used] : 'a');
        p.policy[p.stages] = (unsigned char)(letter ? letter - letters : 0);
    }
    return p;
}
static bool look_at(const PlanTask *t, const StagePlan *p, PlanCosts *c, int *ranks) {
    int scratch[64];
    plan_place(t, p, ranks, scratch);
    return plan_costs(t, p, ranks, c);
}
static double speedup(const PlanTask *t, double step_s) {
    return plan_units_seconds(t->model, 0, t->model->units, (double)t->samples) / step_s;
}

static uint64_t random_state;
static int below(int n) { return (int)(mix64(random_state++) >> 33) % n; }
static double between(double low, double high) {
    return low * pow(high / low, below(1 << 20) / (double)(1 << 20));
}
static PlanModel random_model(int units) {
    PlanModel m = plan_model_make(units);
    double parameters = between(1e5, 1e8), activations = between(1e4, 1e7);
    for (int u = 0; u < units; u++) {
        plan_model_add(&m, u, between(1e-3, 1e-2), between(1e-3, 3e-2),
                       activations * between(0.3, 3), below(4) ? parameters * between(0.1, 10) : 0);
        const double forward_s = below(2) * between(1e-4, 1e-2),
                     backward_s = below(2) * between(1e-4, 1e-2);
        plan_model_pass(&m, u, forward_s, backward_s, below(3) * 0.5 * backward_s);
        // none, half or all of it
        plan_model_split(&m, u, below(3) * 0.5 * (m.backward.row[u + 1] - m.backward.row[u]),
                         activations * between(0.1, 2));
        m.cut[u] = u ? activations * between(0.1, 3) : 0;
    }
    return m;
}

// -------------------------------------------------------------------------------------------------
// By hand

static void test_links(void **state) {
    (void)state;
    Cluster c = cluster_parse("2x4,intra=10,inter=2,gather=1,latency=5");
    const double latency = 5e-6, GB = 1e9;
    const int ranks[] = {0, 1, 2, 3, 4, 5, 6, 7};
    PlanRanks node0 = plan_ranks(&c, ranks, 4), node1 = plan_ranks(&c, ranks + 4, 4),
              one = plan_ranks(&c, ranks + 7, 1), both = plan_ranks(&c, ranks + 2, 4),
              half = plan_ranks(&c, ranks, 2), three = plan_ranks(&c, ranks, 3),
              all = plan_ranks(&c, ranks, 8), uneven = plan_ranks(&c, ranks + 3, 5);
    assert_true(plan_all_reduce_s(&c, &one, false, GB) == 0 &&
                plan_all_reduce_s(&c, &node0, false, 0) == 0);
    // two pairs at once
    assert_true(close_to(plan_all_reduce_s(&c, &node0, false, GB), 1.5 / 20 + 2 * latency));
    assert_true(close_to(plan_all_reduce_s(&c, &three, false, GB), 4.0 / 3 / 10 + 2 * latency));
    assert_true(close_to(plan_all_reduce_s(&c, &all, false, GB), 1.75 / 2 + 2 * latency));
    // This program's: in a node every rank sends at its own rate, and between nodes at a fourth of
    // its node's. Of two nodes each rank sends half of its fourth of the node's sum, twice. The one
    // rank of a node exchanges 4/5 with four others, twice.
    assert_true(close_to(plan_all_reduce_s(&c, &node0, true, GB), 1.5 / 10 + 2 * latency));
    // Where it passes inside nodes and between them, each has its latency.
    assert_true(close_to(plan_all_reduce_s(&c, &all, true, GB), 1.5 / 10 + 1 / 2.0 + 4 * latency));
    assert_true(
        close_to(plan_all_reduce_s(&c, &uneven, true, GB), 1.5 / 10 + 8.0 / 5 / 0.5 + 2 * latency));
    const int apart[] = {0, 4, 5, 6}; // the second node's ranks follow the first of the first's
    const PlanRanks scattered = plan_ranks(&c, apart, 4);
    assert_true(close_to(plan_all_reduce_s(&c, &scattered, true, GB),
                         4.0 / 3 / 10 + 2 * 3 / 4.0 / 0.5 + 2 * latency));
    assert_true(plan_transfer_s(&c, &node0, &node1, false, 0) == 0);
    assert_true(
        close_to(plan_transfer_s(&c, &half, &node0, false, GB), 0.1 + latency)); // inside a node
    // many into one node
    assert_true(close_to(plan_transfer_s(&c, &node0, &node1, false, GB), 1 + latency));
    // half of them are there
    assert_true(close_to(plan_transfer_s(&c, &both, &node1, false, GB), 0.5 + latency));
    assert_true(close_to(plan_transfer_s(&c, &one, &half, false, GB), 0.5 + latency)); // one sender
    // to several nodes
    assert_true(close_to(plan_transfer_s(&c, &node0, &both, false, GB), 0.5 + latency));
    // this program's: each sender its part, from node to node at a fourth of the node's rate
    assert_true(close_to(plan_transfer_s(&c, &half, &node0, true, GB), 0.05 + 2 * latency));
    assert_true(close_to(plan_transfer_s(&c, &node0, &node1, true, GB), 0.5 + latency));
    // Ranks of two stages: 2 on each node; 1 and 2, of which the one exchanges 2/3; 5 on a node.
    const PlanRanks last = plan_ranks(&c, ranks + 6, 2), even = plan_ranks_of_both(&half, &last),
                    stages = plan_ranks_of_both(&one, &half),
                    node = plan_ranks_of_both(&three, &half);
    assert_true(close_to(plan_all_reduce_s(&c, &even, true, GB),
                         2.0 / 2 / 10 + 2.0 / 4 / 0.5 + 4 * latency));
    assert_true(close_to(plan_all_reduce_s(&c, &stages, true, GB),
                         2.0 / 2 / 10 + 2 * 2 / 3.0 / 0.5 + 2 * latency));
    assert_true(close_to(plan_all_reduce_s(&c, &node, true, GB), 2 * 4 / 5.0 / 10 + 2 * latency));
    c = cluster_parse("1x4,intra=10");
    node0 = plan_ranks(&c, ranks, 4);
    assert_true(plan_all_reduce_s(&c, &node0, false, GB) > 0);
}

// The bytes of this program's sums are those that its collectives count (comm_bytes_sent): what a
// rank sends inside its node where all nodes have equally many ranks, and what it sends to others.
static void test_sums_as_counted(void **state) {
    (void)state;
    static const struct {
        const char *cluster;
        int first, n;
    } rows[] = {{"2x4", 0, 8}, {"4x2", 0, 8},     {"3x3", 3, 6},     {"1x5", 0, 5},
                {"8x1", 2, 3}, {"1x3+1x5", 0, 8}, {"1x3+1x5", 2, 3}, {"2x4", 3, 5}};
    for (size_t i = 0; i < LENGTH_OF(rows); i++) {
        enum { SLICE = 64 };
        char text[100];
        snprintf(text, sizeof text, "%s,intra=1,inter=1", rows[i].cluster);
        const Cluster c = cluster_parse(text);
        const int n = rows[i].n;
        int members[16];
        int64_t bounds[17] = {0}, inside = 0, most = 0;
        for (int k = 0; k < n; k++) {
            members[k] = rows[i].first + k;
            bounds[k + 1] = bounds[k] + SLICE;
        }
        Group all = cluster_group(&c);
        all.me = rows[i].first;
        Group g = group_part(&all, members, n);
        for (int k = 0; k < n; k++) {
            int64_t sent[LINK_KINDS] = {0};
            comm_bytes_sent(COMM_ALL_REDUCE, &g, k, bounds, 1, sent);
            inside = max_i64(inside, sent[LINK_INTRA]);
            most = max_i64(most, sent[LINK_INTER]);
        }
        const PlanRanks ranks = plan_ranks(&c, members, n);
        const double bytes = (double)(n * SLICE);
        assert_true(close_to(ranks.sent * bytes, (double)most) || !most);
        if (g.nodes > 1 || !most) {
            assert_true(close_to(2 * (ranks.most - 1.0) / ranks.most * bytes, (double)inside));
        }
        group_free(&g);
        group_free(&all);
    }
}

static void expect_ranks(const char *cluster, const char *stages, const char *wanted) {
    char text[300] = "";
    int ranks[64], scratch[64], at = 0;
    PlanTask t = task_of(NULL, cluster, 1);
    StagePlan p = plan_of(stages, 1);
    plan_place(&t, &p, ranks, scratch);
    for (int s = 0; s < p.stages; s++) {
        for (int i = 0; i < p.replicas[s]; i++) {
            sprintf(text + strlen(text), "%s%d", i ? "," : s ? " " : "", ranks[at++]);
        }
    }
    assert_string_equal(text, wanted);
}
static void test_placement(void **state) {
    (void)state;
    const char *const cluster = "3x4,intra=10,inter=1";
    expect_ranks(cluster, "1:2a 1:4a 1:6a", "0,1 2,3,4,5 6,7,8,9,10,11");
    expect_ranks(cluster, "1:2a 1:4f 1:6a", "0,1 4,5,6,7 2,3,8,9,10,11");
    expect_ranks(cluster, "1:2f 1:2f 1:2f 1:6f", "0,1 4,5 8,9 2,3,6,7,10,11");
    expect_ranks(cluster, "1:3s 1:2a 1:7s", "0,4,8 9,10 1,2,3,5,6,7,11");
    expect_ranks("2x2+1x1,intra=10,inter=1", "1:1l 1:2l 1:2a", "4 2,3 0,1");
    expect_ranks(cluster, "1:2a 1:3p 1:7a", "0,1 4,5,8 2,3,6,7,9,10,11");
    // no room where somebody is: anywhere
    expect_ranks(cluster, "1:4a 1:4s 1:4s", "0,1,2,3 4,5,8,9 6,7,10,11");
}

// Three units: 1, 2, 3 ms forward, twice that backward; 10, 20, 30 MB of activations and gradients;
// 4 and 8 MB cross the borders.
static PlanModel small_model(void) {
    PlanModel m = plan_model_make(3);
    for (int u = 0; u < 3; u++) {
        plan_model_add(&m, u, 1e-3 * (u + 1), 2e-3 * (u + 1), 1e7 * (u + 1), 1e7 * (u + 1));
    }
    m.cut[1] = 4e6;
    m.cut[2] = 8e6;
    return m;
}
static void test_costs(void **state) {
    (void)state;
    PlanModel m = small_model();
    PlanTask t = task_of(&m, "2x2,intra=10,inter=1", 12);
    PlanCosts c;
    int ranks[4];
    StagePlan p = plan_of("1:1 2:3", 4);
    assert_true(look_at(&t, &p, &c, ranks));
    assert_int_equal(c.micro_batches, 3);
    assert_true(close_to(c.forward[0], 4e-3) && close_to(c.backward[0], 8e-3));
    // of 4 samples the busiest of 3 has 2
    assert_true(close_to(c.forward[1], 2 * 5e-3) && close_to(c.backward[1], 2 * 10e-3));
    // two of three send from outside
    assert_true(close_to(c.send[0], 16e6 / 1e9) && close_to(c.send_back[0], 16e6 * 2 / 3 / 1e9));
    assert_true(c.reduce[0] == 0 && close_to(c.reduce[1], 4.0 / 3 * 5e7 / 1e9));
    // Of stage 1, unit 2's all-reduce (40 ms) begins 12 ms into the last backward, unit 1's (26.7
    // ms) follows it; the backward takes 20 ms.
    assert_true(close_to(c.reduce_late[1], 12e-3 + 40e-3 + 4.0 / 3 * 20e6 / 1e9 - 20e-3));
    assert_true(close_to(c.memory[0], 4 * 1e7 + 2 * 4 * 1e7) &&
                close_to(c.memory[1], 4 * 5e7 + 2 * (4e6 + 5e7)));
    p.recompute = true; // inputs of two micro-batches in flight, one whole one
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.memory[0], 4 * 1e7 + 4 * 1e7) &&
                close_to(c.memory[1], 4 * 5e7 + 2 * 4e6 + 2 * 5e7));
    assert_true(close_to(c.backward[0], 12e-3) && close_to(c.backward[1], 30e-3));
    p.recompute = false;
    // one micro-batch in flight fits stage 0; stage 1 does not fit
    t.memory = 1e8;
    assert_false(look_at(&t, &p, &c, ranks));
    p = plan_of("2:2 1:2", 2);
    t.memory = 160e6; // states 120 MB, each in flight 30
    assert_true(look_at(&t, &p, &c, ranks));
    assert_int_equal(c.depth, 1);
    plan_model_free(&m);
}
// States by ZeRO stage: of 5e7 bytes of gradients on three ranks, where all of them take four times
// as much; bf16 has masters. What the first and the last unit share is held once. In a model of a
// run each unit keeps its input, and recomputation makes one block's activations at a time.
static void test_memory(void **state) {
    (void)state;
    PlanModel m = small_model();
    PlanTask t = task_of(&m, "2x2,intra=10,inter=1", 12);
    StagePlan p = plan_of("1:1 2:3", 4);
    PlanCosts c;
    int ranks[4];
    const double elements = 5e7 / 4, live = 2 * (4e6 + 5e7);
    const double fp32[4] = {16, 4 + 4 + 8.0 / 3, 4 + 12.0 / 3, 16.0 / 3},
                 bf16[4] = {18, 2 + 4 + 12.0 / 3, 2 + 16.0 / 3, 18.0 / 3};
    for (int zero = 0; zero < 4; zero++) {
        task_set_states(&t, &optimizers[0], DTYPE_FP32, zero);
        assert_true(look_at(&t, &p, &c, ranks));
        assert_true(close_to(c.memory[1], elements * fp32[zero] + live));
        task_set_states(&t, &optimizers[0], DTYPE_BF16, zero);
        assert_true(look_at(&t, &p, &c, ranks));
        assert_true(close_to(c.memory[1], elements * bf16[zero] + live));
    }
    task_set_states(&t, &optimizers[optimizer_named("sgd")], DTYPE_FP32, 0);
    assert_true(look_at(&t, &p, &c, ranks) && close_to(c.memory[1], elements * 12 + live));
    StagePlan one = plan_of("3:4", 4);
    m.tied = 1e6;
    assert_true(look_at(&t, &one, &c, ranks));
    assert_true(close_to(c.memory[0], (6e7 / 4 - 1e6) * 12 + 6e7));
    for (int u = 1; u < 3; u++) { m.inputs[u + 1] = 1e6 * u; }
    m.kept[3] = 3e7; // of the last unit all is kept
    m.again = 2e7;
    assert_true(look_at(&t, &p, &c, ranks) && close_to(c.memory[1], elements * 12 + live + 2e6));
    p.recompute = true;
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.memory[1], elements * 12 + 2 * 2e7 + 2 * (4e6 + 1e6 + 3e7)));
    // four ranks have the table that both ends share
    const double before = c.memory[1], first = c.memory[0];
    task_set_states(&t, &optimizers[0], DTYPE_FP32, 1);
    const double divided = before + elements * (8 - 12 + 8.0 / 3) - 1e6 / 4 * 8.0 / 3;
    assert_true(look_at(&t, &p, &c, ranks) && close_to(c.memory[1], divided));
    // what 4 samples, or 2, send to the stage beside it and receive ahead; buffers
    task_set_states(&t, &optimizers[optimizer_named("sgd")], DTYPE_FP32, 0);
    m.boundary = 1e5;
    for (int i = 0; i < PLAN_ROWS; i++) { m.buffers[i] = 5e6 + 1e6 * (1 << i); }
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.memory[0], first + 4 * 4e5 + 9e6) &&
                close_to(c.memory[1], before + 2 * 3e5 + 7e6));
    // the last stage has one block, whose matrices are three ranks'
    const double first_bytes = c.memory[0], last_bytes = c.memory[1];
    m.matrices = (PlanMatrices){
        .count = 4, .block = 9e6, .of_matrices = 6e6, .largest = 2e6, .scratch = 1e6};
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.memory[0], first_bytes) &&
                close_to(c.memory[1], last_bytes + 1e6 + 9e6 / 3 + 6e6 / 3 + 2e6));
    m.matrices.count = 0;
    p.micro_batch = 12; // between two powers: 4 samples on each of 3 ranks, 12 on the first
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.memory[0], 12 * 1e7 / 4 + 12 * (1e7 + 4e5) + 17e6));
    plan_model_free(&m);
}
// Slots hold whole storages: two blocks' and all others, but for what ranks own of these anyway.
static void test_slots(void **state) {
    (void)state;
    PlanModel m = plan_model_make(6);
    for (int u = 0; u < 6; u++) { plan_model_add(&m, u, 1, 2, 0, u % 5 ? 8e6 : 4e6); }
    m.tied = 5e5;
    PlanTask t = task_of(&m, "1x4,intra=10", 4);
    const PlanStage all = plan_stage_alone(0, 6, 4), first = {0, 3, 1, 1, {1, 3}},
                    last = {3, 6, 3, 0, {1, 3}}, middle = {2, 5, 2, 1, {1, 1}};
    assert_true(plan_slots(&t, &all) == 0);
    for (int zero = 0; zero < 4; zero++) {
        task_set_run(&t, &optimizers[0], DTYPE_BF16, DTYPE_FP32, zero);
        const double bytes = zero < 2 ? 0 : zero == 2 ? 4 : 4 + 2;
        assert_true(close_to(plan_slots(&t, &all), bytes * (1e6 * 3 / 4 + 4e6 + 5e5 * 3 / 4)));
        assert_true(close_to(plan_slots(&t, &first), bytes * 5e5 * 3 / 4));
        assert_true(close_to(plan_slots(&t, &last), bytes * (4.5e6 * 2 / 3 + 5e5 * 3 / 4)));
        assert_true(close_to(plan_slots(&t, &middle), bytes * 4e6));
    }
    plan_model_free(&m);
}
// Where weight parts are delayed, as many wait as the schedule says; and as many micro-batches are
// in flight as there is memory for.
static void test_waiting_memory(void **state) {
    (void)state;
    for (int i = 0; i < 300; i++) {
        const int stages = 2 + below(6);
        StagePlan p = {.stages = stages, .micro_batch = 1, .kind = PIPELINE_ZERO_BUBBLE};
        int units = 0;
        for (int s = 0; s < stages; s++, units += p.units[s - 1]) {
            p.units[s] = 1 + below(2);
            p.replicas[s] = 1;
        }
        PlanModel m = random_model(units);
        m.turns = m.waiting[1] * between(0.1, 1);
        PlanTask t = task_of(&m, "1x8,intra=10,inter=1", 1 + below(12));
        t.cluster.ranks = t.cluster.all_ranks = stages;
        PlanCosts c;
        int ranks[8];
        assert_true(look_at(&t, &p, &c, ranks));
        assert_int_equal(c.live[stages - 1], min_i64(stages, t.samples));
        if (below(2)) { t.memory = c.memory[below(stages)] * between(0.5, 1); }
        const bool fits = look_at(&t, &p, &c, ranks);
        Program program = stages_program(&p, &c, c.micro_batches);
        for (int s = 0, first = 0; s < stages && fits; first += p.units[s++]) {
            const int end = first + p.units[s];
            const bool one = p.units[s] == 1;
            const PlanStage stage = plan_stage(&p, s, first);
            const int64_t waiting = program.limits[s].works / (s ? 1 : 2);
            double none, bytes;
            plan_stage_memory(&t, &p, &stage, 0, INFINITY, &none);
            const double of_waiting = m.waiting[end] - m.waiting[first],
                         each = m.activations[end] - m.activations[first] + m.cut[first],
                         before = none - (one ? 0 : of_waiting - m.turns);
            assert_true(
                close_to(c.memory[s],
                         before + c.live[s] * each +
                             (one && waiting == 1 ? 0 : (double)waiting * of_waiting - m.turns)));
            for (int more = 0; more < 2; more++) {
                const double limit = c.memory[s] * (more ? 1 + 1e-9 : 1 - 1e-9);
                assert_int_equal(plan_stage_memory(&t, &p, &stage, 0, limit, &bytes),
                                 c.live[s] - 1 + more);
            }
        }
        program_free(&program);
        plan_model_free(&m);
    }
}
// Where a plan of the run takes more than the search has counted, the search begins again, until
// what it finds fits.
static void count_more(const PlanTask *t, const StagePlan *p, const int *ranks, int depth,
                       double *bytes) {
    (void)ranks, (void)depth;
    ++*(int *)t->run;
    for (int s = 0; s < p->stages; s++) { bytes[s] *= 1.25; }
}
// Ten times as much of plans with another number of stages.
static void count_more_of_others(const PlanTask *t, const StagePlan *p, const int *ranks, int depth,
                                 double *bytes) {
    (void)ranks, (void)depth;
    for (int s = 0; s < p->stages && p->stages != *(const int *)t->run; s++) { bytes[s] *= 10; }
}
static void test_counted_memory(void **state) {
    (void)state;
    PlanModel m = small_model();
    PlanTask t = task_of(&m, "2x2,intra=10,inter=1", 12);
    Options o;
    int counted = 0;
    PlanAnswer *a = (PlanAnswer *)calloc(1, sizeof *a);
    memset(&o, 0, sizeof o);
    o.pipeline = "auto";
    t.device = t.memory = 3e8;
    answer_find(a, &t, &o);
    const double free_s = a->best.step_s;
    assert_true(plan_most_memory(&a->best.plan, a->memory) > 3e8 / 1.25);
    t.count = count_more;
    t.run = &counted;
    answer_find(a, &t, &o);
    assert_true(counted > 1 && t.memory < t.device && a->best.step_s >= free_s);
    assert_true(a->best.plan.stages && plan_most_memory(&a->best.plan, a->memory) <= 3e8);
    // the other plans are counted, too, and those that do not fit are left out
    a->others = 1;
    a->other[0] = a->best;
    answer_count_others(a, &t);
    const double most = plan_most_memory(&a->other[0].plan, a->memory_of_other[0]);
    assert_true(a->others == 1 && most == plan_most_memory(&a->best.plan, a->memory));
    t.device = 0.99 * most;
    answer_count_others(a, &t);
    assert_int_equal(a->others, 0);
    t.device = t.memory = INFINITY;
    answer_find(a, &t, &o);
    assert_true(a->best.plan.stages && isinf(t.memory));
    // where with less memory nothing is found, another plan of the search before fits
    int stages = 0;
    t.count = NULL;
    t.device = t.memory = 3e8;
    answer_find(a, &t, &o);
    for (int i = 0; i < a->others && !stages; i++) {
        if (a->other[i].plan.stages != a->best.plan.stages) { stages = a->other[i].plan.stages; }
    }
    assert_true(stages > 0);
    t.count = count_more_of_others;
    t.run = &stages;
    answer_find(a, &t, &o);
    assert_int_equal(a->best.plan.stages, stages);
    assert_true(t.memory == 3e8 && plan_most_memory(&a->best.plan, a->memory) <= 3e8);
    free(a);
    plan_model_free(&m);
}
// What a step of this program has besides: a message slows the computing of both ends, where
// overlap= is 0.5 by a quarter each; and a rank updates its part of the parameters.
static void test_own_costs(void **state) {
    (void)state;
    PlanModel m = small_model();
    PlanTask t = task_of(&m, "2x1,inter=1,memory=100", 12);
    PlanCosts c;
    int ranks[2];
    StagePlan p = plan_of("1:1 2:1", 4), one = plan_of("3:2", 4);
    assert_true(t.cluster.gather == 1 && cluster_parse("2x1,inter=3,gather=2").gather == 2);
    t.own_messages = true;
    assert_true(look_at(&t, &one, &c, ranks));
    const double late = c.reduce_late[0];
    assert_true(c.reduce[0] > late && late > 0);
    t.update_bytes = 16;
    t.cluster.overlap = 0.5;
    assert_true(look_at(&t, &one, &c, ranks));
    assert_true(
        close_to(c.reduce_late[0], late + 0.5 * (c.reduce[0] - late) + 6e7 / 4 / 2 * 16 / 100e9));
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.send[0], 16e-3) && close_to(c.send_back[0], 16e-3));
    assert_true(close_to(c.forward[0], 4e-3) && close_to(c.forward[1], 20e-3));
    assert_true(close_to(c.backward[0], 8e-3) && close_to(c.backward[1], 40e-3));
    assert_true(c.slows == 0.25);
    const double slow = plan_simulate(&p, &c);
    c.slows = 0; // stage 1 computes beside two messages, and waits for the others
    assert_true(close_to(slow, plan_simulate(&p, &c) + 2 * 0.25 * 16e-3));
    assert_true(close_to(c.reduce_late[0], 1e7 / 4 * 16 / 100e9));
    // of 3 samples, a rank of two sends and computes 2
    PlanTask odd = task_of(&m, "1x4,intra=1", 3);
    StagePlan twice = plan_of("1:2 2:2", 3);
    int four[4];
    odd.own_messages = true;
    assert_true(look_at(&odd, &twice, &c, four));
    assert_true(close_to(c.send[0], 2 * 4e-3) && close_to(c.send_back[0], 2 * 4e-3));
    // A table of the first and the last unit: both ranks sum it, and then gather it.
    t.update_bytes = 0;
    t.cluster.overlap = 1;
    m.tied = 1e6;
    t.sum_share = 0.5;
    t.gather_share = 0.25;
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.reduce_late[0], 0.75 * 4e6 / 1e9) && c.reduce_late[1] == 0);
    assert_true(close_to(c.reduce[0], c.reduce_late[0]) && c.reduce[1] == 0);
    // The matrices of the only block: two ranks send half of their halves, there and back, or what
    // the home of the largest matrix lacks. One rank has the largest alone.
    t.sum_share = t.gather_share = 0;
    m.matrices = (PlanMatrices){
        .count = 4, .of_matrices = 6e6, .block = 9e6, .block_s = 0.5, .longest_s = 0.2};
    assert_true(look_at(&t, &one, &c, ranks));
    assert_true(close_to(c.reduce_late[0], 0.5 / 2 + 2 * 6e6 / 2 / 2 / 1e9));
    m.matrices.longest_s = 0.3;
    assert_true(look_at(&t, &one, &c, ranks));
    assert_true(close_to(c.reduce_late[0], 0.3 + 2 * 6e6 / 2 / 2 / 1e9));
    m.matrices.largest = 5e6;
    assert_true(look_at(&t, &one, &c, ranks));
    assert_true(close_to(c.reduce_late[0], 0.3 + 2 * (5e6 - 3e6) / 1e9));
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(c.reduce_late[0] == 0 && close_to(c.reduce_late[1], 0.5));
    plan_model_free(&m);
}
// Seconds of a pass, beside those of its samples: once a micro-batch, on the slowest rank as much
// longer, and again where the forward pass is.
static void test_pass_seconds(void **state) {
    (void)state;
    PlanModel m = plan_model_make(2);
    for (int u = 0; u < 2; u++) {
        plan_model_add(&m, u, 1, 3, 0, 0);
        plan_model_split(&m, u, 2, 0);
        plan_model_pass(&m, u, 10 * (u + 1), 30 * (u + 1), 20 * (u + 1));
    }
    assert_true(m.alike[1] == 1); // they differ in their passes alone
    const PlanTask t = task_of(&m, "1x2,intra=1", 8);
    StagePlan p = plan_of("2:2", 4);
    StageSeconds s = plan_stage_seconds(&t, &p, 0, 2, 2, 3);
    assert_true(close_to(s.forward, 3 * (2 * 2 + 30)) && close_to(s.backward, 3 * (6 * 2 + 90)));
    assert_true(s.weight == 0);
    p.recompute = true;
    p.kind = PIPELINE_ZERO_BUBBLE;
    s = plan_stage_seconds(&t, &p, 1, 2, 2, 1);
    assert_true(close_to(s.forward, 2 + 20) && close_to(s.backward, 8 + 80));
    assert_true(close_to(s.weight, 4 + 40));
    plan_model_free(&m);
}
// The second of two nodes has half of the speed: all that it computes takes twice the time, a stage
// on both waits for it, and the planner gives it half as many units.
static void test_unequal_speeds(void **state) {
    (void)state;
    PlanModel m = plan_model_make(6);
    for (int u = 0; u < 6; u++) { plan_model_add(&m, u, 1, 2, 0, 0); }
    PlanTask t = task_of(&m, "1x1+1x1*0.5,inter=1", 64);
    PlanCosts c;
    int ranks[2];
    StagePlan p = plan_of("3:1 3:1", 1), both = plan_of("6:2", 4);
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.forward[0], 3) && close_to(c.forward[1], 6));
    assert_true(close_to(c.backward[0], 6) && close_to(c.backward[1], 12));
    assert_true(look_at(&t, &both, &c, ranks) && close_to(c.forward[0], 2 * 2 * 6));
    plan_balance(&t, &p);
    assert_int_equal(p.units[0], 4);
    Planner planner = planner_make(&t);
    planner_search(&planner, NULL, 0);
    const StagePlan *best = &planner.beam[0].plan;
    assert_true(best->stages == 2 && best->units[0] == 4 && best->units[1] == 2);
    planner_free(&planner);
    t.cluster = cluster_parse("1x1*0.5+1x1,inter=1");
    plan_balance(&t, &p);
    assert_int_equal(p.units[0], 2);
    assert_true(look_at(&t, &both, &c, ranks) && close_to(c.forward[0], 2 * 2 * 6));
    plan_model_free(&m);
}
// A step by pencil: two stages of one rank, F = 1, B = 2, messages for nothing; M = 3: 3 x 3 and
// the way there and back.
static void test_replay(void **state) {
    (void)state;
    PlanModel m = plan_model_make(2);
    for (int u = 0; u < 2; u++) { plan_model_add(&m, u, 1, 2, 0, 0); }
    PlanTask t = task_of(&m, "1x2,intra=1", 3);
    PlanCosts c;
    int ranks[2];
    StagePlan p = plan_of("1:1 1:1", 1);
    assert_true(look_at(&t, &p, &c, ranks));
    double step = plan_simulate(&p, &c);
    assert_true(close_to(step, 12) && close_to(plan_bound(&c), 12) &&
                close_to(plan_bubble(&p, &c, step), 0.25));
    // a micro-batch and its messages, there and back
    t.samples = 1;
    assert_true(look_at(&t, &p, &c, ranks));
    c.send[0] = 0.5;
    c.send_back[0] = 0.25;
    assert_true(close_to(plan_simulate(&p, &c), 6.75) && close_to(plan_bound(&c), 6.75));
    t.samples = 3;
    // weight parts take half of the backward pass: (S - 1) / (3 M + S - 1) is idle
    p.kind = PIPELINE_ZERO_BUBBLE;
    assert_true(look_at(&t, &p, &c, ranks));
    step = plan_simulate(&p, &c);
    assert_true(close_to(step, 10) && plan_bound(&c) <= 10 &&
                close_to(plan_bubble(&p, &c, step), 0.1));
    plan_model_split(&m, 0, 0, 0);
    plan_model_split(&m, 1, 0, 0); // nothing may wait: as before
    assert_true(look_at(&t, &p, &c, ranks) && close_to(plan_simulate(&p, &c), 12));
    plan_model_free(&m);
}
// Many micro-batches are extrapolated from shorter replays: the same time, for each schedule.
static void test_many_micro_batches(void **state) {
    (void)state;
    PlanModel m = small_model();
    PlanTask t = task_of(&m, "3x1,inter=1", 600);
    PlanCosts c;
    int ranks[3];
    for (int k = 0; k < 4; k++) {
        StagePlan p = plan_of("1:1 1:1 1:1", 1);
        p.kind = k == 3 ? PIPELINE_ZERO_BUBBLE : k == 2 ? PIPELINE_GPIPE : PIPELINE_DAPPLE;
        p.warmup = k == 1 ? WARMUP_B : WARMUP_A;
        assert_true(look_at(&t, &p, &c, ranks));
        assert_true(plan_simulated_batches(&p, c.micro_batches) < c.micro_batches);
        assert_true(close_to(plan_simulate(&p, &c), plan_replay(&p, &c, c.micro_batches)));
    }
    plan_model_free(&m);
}
// From ZeRO stage 2 on a micro-batch sums gradients, and at stage 3 gathers parameters, while a unit
// computes; what is longer counts. A message takes half of its time from computing where overlap= is
// 0.5.
static void test_messages_of_a_micro_batch(void **state) {
    (void)state;
    PlanModel m = small_model();
    PlanTask t = task_of(&m, "2x1,inter=1", 12), odd = task_of(&m, "1x2,intra=1", 21);
    PlanCosts c;
    int ranks[4];
    StagePlan p = plan_of("3:2", 4), single = plan_of("3:2", 3), two = plan_of("1:2 2:2", 4);
    t.own_messages = odd.own_messages = true;
    t.sum_share = 0.5; // of 10, 20 and 30 ms
    t.gather_share = 0.25;
    t.zero = 2;
    // forwards take 2, 4 and 6 ms, backwards twice as long
    assert_true(look_at(&t, &p, &c, ranks));
    const PlanRanks both = plan_ranks(&t.cluster, ranks, 2);
    const double gathers = plan_exposed_s(&t, &p, 0, 3, &both, true, 0.25);
    assert_true(close_to(c.forward[0], 12e-3) && close_to(c.backward[0], 12e-3 + 15e-3 + 10e-3));
    assert_true(gathers > 0 && close_to(c.reduce_late[0], 5e-3 + gathers));
    assert_true(close_to(c.reduce[0], 5e-3 + 15e-3));
    t.cluster.overlap = 0.5;
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.forward[0], 12e-3 + 2.5e-3));
    assert_true(close_to(c.backward[0], 12e-3 + (8e-3 + 7.5e-3) + 10e-3));
    t.samples = 4; // no micro-batch follows
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.forward[0], 12e-3));
    t.cluster.overlap = 1;
    t.samples = 12;
    t.zero = 3;
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.forward[0], 7.5e-3 + 5e-3 + 2.5e-3));
    assert_true(close_to(c.backward[0], 12e-3 + (15e-3 + 5e-3) + (10e-3 + 2.5e-3)));
    assert_true(close_to(c.reduce[0], 5e-3) && close_to(c.reduce_late[0], 5e-3));
    p.kind = PIPELINE_ZERO_BUBBLE; // weight parts take 2, 4 and 6 ms, and sum
    assert_true(look_at(&t, &p, &c, ranks));
    assert_true(close_to(c.weight[0], 6e-3 + 15e-3 + 10e-3));
    assert_true(close_to(c.backward[0], c.weight[0] + 7.5e-3 + 5e-3 + 2.5e-3));
    // 4 of the 10 MB of the first unit are a table of both ends, which travels once a step
    PlanTask ends = task_of(&m, "1x4,intra=1", 12);
    m.tied = 1e6;
    ends.own_messages = true;
    ends.sum_share = 0.5;
    ends.zero = 2;
    assert_true(look_at(&ends, &two, &c, ranks));
    assert_true(close_to(c.forward[0], 3e-3) && close_to(c.backward[0], 4e-3));
    assert_true(close_to(c.backward[1], 12e-3 + 13e-3)); // and those of the last unit
    ends.zero = 0;                                       // one stage has it once
    StagePlan whole = plan_of("3:4", 4);
    assert_true(look_at(&ends, &whole, &c, ranks));
    assert_true(close_to(c.reduce[0], 0.5 * (60e6 - 4e6) * 1.5e-9));
    // ranks of a single stage divide the step, not each micro-batch: of 21 samples one has 11, two
    // at a time
    odd.sum_share = 0;
    assert_true(look_at(&odd, &single, &c, ranks));
    assert_int_equal(c.micro_batches, 6);
    assert_true(close_to(c.micro_batches * c.forward[0], 11 * 6e-3));
    plan_model_free(&m);
}
// What is left of a stage's messages is what two clocks show that play all units, whether units
// that are alike are counted together or one by one.
static void test_alike_units(void **state) {
    (void)state;
    random_state = test_seed(4);
    for (int i = 0; i < 200; i++) {
        PlanModel m = plan_model_make(12);
        double time = 1, bytes = 1e9;
        for (int u = 0; u < 12; u++) {
            if (!below(4)) {
                time = between(0.1, 10);
                bytes = below(3) ? between(1e8, 1e10) : 0;
            }
            plan_model_add(&m, u, time, 2 * time, 0, bytes);
        }
        PlanTask t = task_of(&m, "2x2,intra=10,inter=1,latency=1000", 4);
        const int order[] = {0, 1, 2, 3}, first = below(6), end = first + 1 + below(6);
        const PlanRanks ranks = plan_ranks(&t.cluster, order, 2 + below(3));
        StagePlan p = plan_of("12:4", 1 + below(3));
        p.recompute = i % 2;
        const bool gather = i / 2 % 2;
        const double together = plan_exposed_s(&t, &p, first, end, &ranks, gather, 0.5);
        for (int u = 0; u < 12; u++) { m.alike[u] = u; }
        const double apart = plan_exposed_s(&t, &p, first, end, &ranks, gather, 0.5);
        double computed = 0, sent = 0, all = 0;
        for (int i = 0, u; i < end - first; i++) {
            u = gather ? first + i : end - 1 - i;
            const StageSeconds unit = plan_stage_seconds(&t, &p, u, u + 1, ranks.n, 1);
            const double bytes = m.parameters[u + 1] - m.parameters[u],
                         one = gather ? unit.forward : unit.backward,
                         message =
                             bytes > 0 ? plan_all_reduce_s(&t.cluster, &ranks, false, bytes) : 0;
            if (gather) {
                sent += message / 2;
                computed = fmax(computed, sent) + one;
            } else {
                computed += one;
                sent = message > 0 ? fmax(sent, computed) + message / 2 : sent;
            }
            all += one;
        }
        const double exposed = fmax(0, (gather ? computed : sent) - all);
        assert_true(fabs(together - exposed) <= 1e-9 * fmax(1, sent + all));
        assert_true(fabs(together - apart) <= 1e-9 * fmax(1, apart));
        plan_model_free(&m);
    }
}
// Returns the seconds of a step's slowest part, or the way through all stages (INFINITY if a part
// takes longer than `most`), of stages on ranks in order.
static double paces(const PlanTask *t, const StagePlan *p, double most) {
    static const int order[] = {0, 1, 2, 3, 4, 5};
    const PlanModel *m = t->model;
    const bool way = isfinite(most);
    double slowest = 0, sum = 0;
    for (int s = 0, unit = 0, rank = 0; s < p->stages; s++) {
        const int end = unit + p->units[s];
        const PlanRanks ranks = plan_ranks(&t->cluster, order + rank, p->replicas[s]);
        const double rows = plan_rows(p->micro_batch, p->replicas[s]),
                     link = rank ? pace_of_link(t, p->micro_batch, unit, rank) : 0,
                     time = plan_units_seconds(m, unit, end, rows),
                     reduce = plan_all_reduce_s(&t->cluster, &ranks, t->own_messages,
                                                m->parameters[end] - m->parameters[unit]);
        sum += time + link;
        slowest = fmax(fmax(slowest, link), time + reduce * p->micro_batch / t->samples);
        unit = end;
        rank += p->replicas[s];
    }
    return !way ? slowest : slowest <= most ? sum : (double)INFINITY;
}
static double paces_brute(const PlanTask *t, StagePlan *p, int units, int ranks, double most) {
    double best = !units && !ranks ? paces(t, p, most) : (double)INFINITY;
    for (int i = 0; i < units * ranks; i++) {
        p->units[p->stages] = 1 + i / ranks;
        p->replicas[p->stages++] = 1 + i % ranks;
        best = fmin(best, paces_brute(t, p, units - 1 - i / ranks, ranks - 1 - i % ranks, most));
        p->stages--;
    }
    return best;
}
// Stages, replicas and links that are balanced together: no others are better.
static void test_balanced_together(void **state) {
    (void)state;
    random_state = test_seed(5);
    for (int i = 0; i < 100; i++) {
        static const char *const shapes[] = {"1x4", "4x1", "2x2", "2x3", "1x2+1x3"};
        char cluster[100];
        PlanModel m = random_model(2 + below(5));
        snprintf(cluster, sizeof cluster, "%s,intra=%g,inter=%g", shapes[below(5)], between(1, 100),
                 between(0.01, 10));
        PlanTask t = task_of(&m, cluster, 12);
        StagePlan p = plan_of("", 1 + below(4)), q = p;
        PaceSearch search = pace_search_make(&t);
        const double least = pace_search(&search, &p, INFINITY), most = between(1, 4) * least;
        assert_true(close_to(least, paces_brute(&t, &q, m.units, task_ranks(&t), INFINITY)));
        assert_true(close_to(least, paces(&t, &p, INFINITY)));
        const double way = pace_search(&search, &p, most);
        assert_true(close_to(way, paces_brute(&t, &q, m.units, task_ranks(&t), most)));
        assert_true(close_to(way, paces(&t, &p, most)));
        pace_search_free(&search);
        plan_model_free(&m);
    }
}
// Many units and samples, whose messages cost nothing: the best are the smallest micro-batches, of
// which a rank's schedule takes only so many.
static void test_short_schedules(void **state) {
    (void)state;
    PlanModel m = plan_model_make(60);
    for (int u = 0; u < 60; u++) { plan_model_add(&m, u, 1e-3, 2e-3, 0, 1e13); }
    PlanTask t = task_of(&m, "1x2,intra=100", 1 << 14);
    PlanAnswer *a = (PlanAnswer *)calloc(1, sizeof *a);
    *a = planner_answer(&t);
    assert_int_equal(a->best.plan.stages, 2);
    // 4096 x 30 units x 24 actions are 2.9 million; twice as many are too many
    assert_int_equal(a->best.plan.micro_batch, 4);
    for (int k = 0; k < a->others; k++) { assert_true(plan_is_short(&t, &a->other[k].plan)); }
    t.micro_batch = 1;
    *a = planner_answer(&t);
    assert_int_equal(a->best.plan.stages, 0);
    free(a);
    plan_model_free(&m);
}

// -------------------------------------------------------------------------------------------------
// The paper's plans

typedef struct {
    const char *model;
    int64_t samples;      // of a step
    const char *table[3]; // table 4 on A, B, C; "": data parallel, "straight", or stages
} Paper;
static const Paper papers[] = {
    {"vgg-19", 2048, {"", "", "22:15 4:1"}},
    {"gnmt-16", 1024, {"39:8 57:8", "39:8 57:8", "straight"}},
    {"bert-48", 64, {"27:8 26:8", "straight", "straight"}},
    {"xlnet-36", 128, {"24:8 19:8", "24:8 19:8", "straight"}},
    {"amoebanet-36", 128, {"31:8 13:8", "33:11 11:5", "33:11 11:5"}},
};
enum { PAPERS = (int)(sizeof papers / sizeof papers[0]) };

static PlanModel paper_model(const Paper *p) {
    char text[100];
    snprintf(text, sizeof text, PROFILES ":%s", p->model);
    return profile_load(text);
}
static StagePlan paper_plan(const PlanTask *t, const char *stages) {
    StagePlan p = plan_of(stages, 1);
    return *stages && strcmp(stages, "straight") ? p : plan_even(t, *stages ? task_ranks(t) : 1, 1);
}
// Unrestricted, nothing is slower than what table 4 has, or than any baseline.
static void test_paper_plans_are_beaten(void **state) {
    (void)state;
    const char *const clusters[] = {config_a, config_b, config_c};
    const int drawn = (int)(test_seed(1) % 3); // a sample has each model on one cluster
    for (int i = 0; i < 3 * PAPERS; i++) {
        const Paper *p = &papers[i / 3];
        if ((i / 3 + i) % 3 != drawn && !all_tests()) { continue; }
        PlanModel m = paper_model(p);
        PlanTask t = task_of(&m, clusters[i % 3], p->samples);
        PlanAnswer *a = (PlanAnswer *)calloc(1, sizeof *a);
        double begin = (double)clock() / CLOCKS_PER_SEC;
        *a = planner_answer(&t);
        StagePlan plan = paper_plan(&t, p->table[i % 3]);
        Candidate theirs = plan_best_setting(&t, &plan);
        print_message("%-12s %c %6.2f s: %5.2f in %d stages, micro-batch %d; table 4 %5.2f",
                      p->model, "ABC"[i % 3], (double)clock() / CLOCKS_PER_SEC - begin,
                      speedup(&t, a->best.step_s), a->best.plan.stages,
                      (int)a->best.plan.micro_batch, speedup(&t, theirs.step_s));
        assert_true(a->best.step_s <= theirs.step_s * (1 + 1e-12));
        for (int k = 0; k < a->others; k++) {
            print_message("; %s %.2f", a->name[k], speedup(&t, a->other[k].step_s));
            assert_true(a->best.step_s <= a->other[k].step_s * (1 + 1e-12));
        }
        print_message("\n");
        free(a);
        plan_model_free(&m);
    }
}

// -------------------------------------------------------------------------------------------------
// Brute force

typedef struct {
    const PlanTask *task;
    StagePlan plan;
    int ranks[16], used[16];
    double best;
    int64_t plans;
} Brute;
// All that holds for all stages; each replay takes at least as long as the bound says.
static void brute_settings(Brute *b) {
    static PlanCosts c;
    for (int64_t micro = 1; micro <= b->task->samples; micro++) {
        for (int k = 0; k < 5 && b->task->samples % micro == 0; k++) { // the last one: zero bubble
            b->plan.micro_batch = micro;
            b->plan.warmup = k & 1 ? WARMUP_B : WARMUP_A;
            b->plan.recompute = k & 2;
            b->plan.kind = k == 4 ? PIPELINE_ZERO_BUBBLE : PIPELINE_DAPPLE;
            if (k == 4 && b->plan.stages == 1) { continue; }
            if (!plan_costs(b->task, &b->plan, b->ranks, &c) ||
                (b->plan.recompute && isinf(b->task->memory))) {
                continue;
            }
            double step = plan_simulate(&b->plan, &c);
            assert_true(plan_bound(&c) <= step * (1 + 1e-9));
            b->best = fmin(b->best, step);
            b->plans++;
        }
    }
}
// All partitions from this unit on, with all numbers of ranks of each node, on those from `placed`
// on.
static void brute(Brute *b, int first, int placed) {
    const Cluster *c = &b->task->cluster;
    const int s = b->plan.stages, all = task_ranks(b->task);
    if (first == b->task->model->units) {
        if (placed == all) { brute_settings(b); }
        return;
    }
    for (int units = 1; first + units <= b->task->model->units; units++) {
        int take[16] = {0};
        for (bool more = true; more;) {
            int node = 0, n = placed;
            // counts up, node by node
            while (node < c->nodes && b->used[node] + ++take[node] > cluster_node_ranks(c, node)) {
                take[node++] = 0;
            }
            more = node < c->nodes;
            if (!more) { break; }
            for (int k = 0; k < c->nodes; k++) {
                const int free_one = cluster_first_rank(c, k) + b->used[k];
                for (int i = 0; i < take[k]; i++) { b->ranks[n++] = free_one + i; }
            }
            for (int k = 0; k < c->nodes; k++) { b->used[k] += take[k]; }
            b->plan.units[s] = units;
            b->plan.replicas[s] = n - placed;
            b->plan.stages = s + 1;
            brute(b, first + units, n);
            b->plan.stages = s;
            for (int k = 0; k < c->nodes; k++) { b->used[k] -= take[k]; }
        }
    }
}
static void test_brute_force(void **state) {
    (void)state;
    static const char *const shapes[] = {"1x2",     "2x1",     "1x3",         "3x1",        "1x4",
                                         "2x2",     "2x2",     "2x2",         "4x1",        "2x3",
                                         "1x2+1x1", "1x1+1x2", "1x1+1x1*0.5", "1x1*0.4+1x2"};
    enum { SHAPES = (int)(sizeof shapes / sizeof shapes[0]) };
    const int instances = all_tests() ? 2000 : 100;
    random_state = test_seed(1);
    double worst = 0, begin = (double)clock() / CLOCKS_PER_SEC;
    int exact = 0, done = 0, limited = 0, zero_bubbles = 0;
    int64_t plans = 0;
    for (; done < instances; random_state += 1000) {
        static const int samples[] = {2, 4, 6, 8, 12};
        const char *shape = shapes[below(SHAPES)];
        PlanModel m = random_model(shape[2] == '3' && shape[0] == '2' ? 3 : 2 + below(4));
        char cluster[200];
        snprintf(cluster, sizeof cluster, "%s,intra=%g,inter=%g,gather=%g,latency=%g", shape,
                 between(1, 100), between(0.1, 10), between(0.05, 10),
                 below(2) ? between(1, 1e3) : 0);
        PlanTask t = task_of(&m, cluster, samples[below(5)]);
        if (below(2)) {
            t.memory = (4 * m.parameters[m.units] + (double)t.samples * m.activations[m.units]) /
                       between(1, 8);
        }
        Brute b;
        memset(&b, 0, sizeof b);
        b.task = &t;
        b.best = INFINITY;
        b.plan.kind = PIPELINE_DAPPLE;
        brute(&b, 0, 0);
        PlanAnswer *a = (PlanAnswer *)calloc(1, sizeof *a);
        *a = planner_answer(&t);
        assert_int_equal(isinf(b.best), a->best.plan.stages == 0);
        if (isfinite(b.best)) {
            double over = a->best.step_s / b.best - 1;
            if (over > 1e-3) {
                print_message("%s, %d units, %d samples: %.3f %% over\n", cluster, m.units,
                              (int)t.samples, 100 * over);
            }
            for (int k = 0; k < a->others; k++) {
                assert_true(a->other[k].plan.kind == PIPELINE_GPIPE ||
                            a->best.step_s <= a->other[k].step_s * (1 + 1e-12));
            }
            assert_true(over > -1e-9);
            worst = fmax(worst, over);
            exact += over < 1e-9;
            plans += b.plans;
            done++;
            limited += isfinite(t.memory);
            zero_bubbles += a->best.plan.kind == PIPELINE_ZERO_BUBBLE;
        }
        free(a);
        plan_model_free(&m);
    }
    print_message(
        "%d instances (%d with a limit of memory), %" PRId64
        " plans: %d times the very best, %.3f %% slower at worst; %d of zero bubble; %.1f s\n",
        done, limited, plans, exact, 100 * worst, zero_bubbles,
        (double)clock() / CLOCKS_PER_SEC - begin);
    assert_true(worst < 0.01 && zero_bubbles > 0);
}

// -------------------------------------------------------------------------------------------------
// Profiles

static char profile_path[] = "/tmp/test_planner_XXXXXX";
static void write_profile(const char *text, size_t bytes) {
    FILE *f = fopen(profile_path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, bytes, f), bytes);
    fclose(f);
}
static void load_profile(const void *name) {
    PlanModel m = profile_load((const char *)name);
    for (int u = 0; u <= m.units; u++) { // every number is one
        if (!(m.forward.row[u] >= 0 && m.backward.row[u] >= 0 && m.activations[u] >= 0 &&
              m.parameters[u] >= 0 && m.cut[u] >= 0)) {
            abort();
        }
    }
    plan_model_free(&m);
}
#define NODE(id, name, fwd, bwd, act, param)                                                       \
    "{\"id\":" id ",\"name\":\"" name "\",\"fwd_ms\":" fwd ",\"bwd_ms\":" bwd                      \
    ",\"act_bytes\":" act ",\"param_bytes\":" param "}"
#define MODEL(nodes, edges)                                                                        \
    "{\"models\":{\"m\":{\"profile_batch_size\":2,\"nodes\":[" nodes "],\"edges\":[" edges "]}}}"
#define GOOD NODE("1", "a", "1", "2", "100", "10")
static void test_profile(void **state) {
    (void)state;
    // Not in the order of ids: the file's counts where edges go forward in it. Input* costs
    // nothing. What two need crosses once.
    const char *text = MODEL(
        NODE("9", "Input9", "5", "5", "500", "5") "," NODE(
            "3", "a", "2", "4", "[100,60]",
            "10") "," NODE("1", "b", "4", "6", "40", "20") "," NODE("2", "c", "6", "8", "20", "0"),
        "[9,3],[3,1],[3,2],[1,2]");
    write_profile(text, strlen(text));
    PlanModel m = profile_load(profile_path);
    assert_int_equal(m.units, 4);
    assert_true(m.forward.row[1] == 0 && m.cut[1] == 0 && m.parameters[1] == 0 &&
                close_to(m.forward.row[2], 1e-3) && close_to(m.backward.row[4], 9e-3));
    assert_true(close_to(m.cut[2], 80) && close_to(m.cut[3], 100) && m.cut[4] == 0 &&
                close_to(m.activations[4], 110) && m.parameters[4] == 30);
    plan_model_free(&m);
    // An edge goes back: by id, as far as inputs allow.
    text = MODEL(NODE("5", "a", "1", "0", "0", "0") "," NODE("7", "b", "2", "0", "0", "0") "," NODE(
                     "6", "c", "4", "0", "0", "0"),
                 "[5,7],[6,5]");
    write_profile(text, strlen(text));
    m = profile_load(profile_path);
    assert_true(close_to(m.forward.row[1], 2e-3) && close_to(m.forward.row[2], 2.5e-3) &&
                close_to(m.forward.row[3], 3.5e-3));
    plan_model_free(&m);
    m = profile_load(PROFILES ":gnmt-16"); // Input1 is in front of it in neither order
    assert_int_equal(m.units, 96);
    plan_model_free(&m);
}
static void test_bad_profiles(void **state) {
    (void)state;
    static const char *const texts[][2] = {
        {"", "no JSON"},
        {"{", "no JSON"},
        {"[1,2", "no JSON"},
        {"{\"a\":01}", "no JSON"},
        {"{\"a\":NaN}", "no JSON"},
        {"{\"a\":1e999}", "too large"},
        {"\"abc", "does not end"},
        {"{} x", "the end was expected"},
        {"{}", "no \"models\""},
        {"{\"models\":{}}", "no \"models\""},
        {"{\"models\":{\"a\":1}}", "no object"},
        {"{\"models\":{\"a\":{},\"b\":{}}}", "which model"},
        {"{\"models\":{\"a\":{}}}", "profile_batch_size"},
        {"{\"models\":{\"a\":{\"profile_batch_size\":0}}}", "from 1 to"},
        {"{\"models\":{\"a\":{\"profile_batch_size\":1}}}", "\"nodes\" are expected, found 0"},
        {MODEL("7", ""), "is no object"},
        {MODEL("{\"id\":1}", ""), "\"name\""},
        {MODEL(GOOD "," GOOD, ""), "the id 1"},
        {MODEL(NODE("-1", "a", "1", "1", "1", "1"), ""), "\"id\" must be"},
        {MODEL(NODE("1", "a", "-1", "1", "1", "1"), ""), "\"fwd_ms\" must be"},
        {MODEL(NODE("1", "a", "1e300", "1", "1", "1"), ""), "\"fwd_ms\" must be"},
        {MODEL(NODE("1", "a", "1", "null", "1", "1"), ""), "\"bwd_ms\" is missing"},
        {MODEL(NODE("1", "a", "1", "1", "[1,-2]", "1"), ""), "\"act_bytes\" must be"},
        {MODEL(NODE("1", "a", "1", "1", "\"x\"", "1"), ""), "\"act_bytes\" is missing"},
        {MODEL(NODE("1", "a", "1", "1", "1", "1e16"), ""), "\"param_bytes\" must be"},
        {MODEL(NODE("1", "a", "0", "0", "1", "1"), ""), "no node takes any time"},
        {MODEL(GOOD, "[1,1]"), "cycle"},
        {MODEL(GOOD "," NODE("2", "b", "1", "1", "1", "1"), "[1,2],[2,1]"), "cycle"},
        {MODEL(GOOD, "[1,3]"), "no pair of ids"},
        {MODEL(GOOD, "[1]"), "no pair of ids"},
        {MODEL(GOOD, "7"), "no pair of ids"},
        {"{\"models\":{\"m\":{\"profile_batch_size\":2,\"nodes\":[" GOOD "]}}}",
         "\"edges\" is expected"},
    };
    char message[3000], deep[400];
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        write_profile(texts[i][0], strlen(texts[i][0]));
        int code = run_child(load_profile, profile_path, message, sizeof message);
        if (code != EXIT_INPUT || !strstr(message, texts[i][1])) {
            fail_msg("%s: exit code %d: %s", texts[i][0], code, message);
        }
    }
    memset(deep, '[', sizeof deep);
    write_profile(deep, sizeof deep);
    assert_int_equal(run_child(load_profile, profile_path, message, sizeof message), EXIT_INPUT);
    assert_non_null(strstr(message, "too deeply"));
    assert_int_equal(run_child(load_profile, "/nowhere:m", message, sizeof message), EXIT_INPUT);
    assert_int_equal(run_child(load_profile, PROFILES ":m", message, sizeof message), EXIT_INPUT);
    assert_non_null(strstr(message, "gnmt-16"));
}
// Damaged files: they load, or end the program with the exit code of bad input.
static void test_fuzz(void **state) {
    (void)state;
    static char text[1 << 16];
    FILE *f = fopen(PROFILES, "rb");
    const size_t bytes = fread(text, 1, sizeof text, f);
    fclose(f);
    random_state = test_seed(2);
    static const char *const pieces[] = {"-",  "1e999", "null", "[", "]",   "{",    "}",        ",",
                                         "\"", "\\",    ":",    "0", "NaN", "1e15", "\"id\":1", ""};
    int loaded = 0, refused = 0;
    for (int i = 0; i < (all_tests() ? 5000 : 150); i++) {
        static char damaged[1 << 17];
        char message[3000];
        size_t length = bytes;
        memcpy(damaged, text, bytes);
        for (int k = below(4); k >= 0; k--) {
            const char *piece = pieces[below(16)];
            size_t at = (size_t)below((int)length), gone = (size_t)below(8), n = strlen(piece);
            if (below(20) == 0) { gone = length; }
            gone = gone < length - at ? gone : length - at;
            memmove(damaged + at + n, damaged + at + gone, length - at - gone);
            memcpy(damaged + at, piece, n);
            length += n - gone;
        }
        write_profile(damaged, length);
        char name[100];
        snprintf(name, sizeof name, "%s:gnmt-16", profile_path);
        int code = run_child(load_profile, name, message, sizeof message);
        if (code != EXIT_INPUT && code != EXIT_DONE) {
            fail_msg("seed %llu: exit code %d: %s", (unsigned long long)random_state, code,
                     message);
        }
        loaded += code == EXIT_DONE;
        refused += code == EXIT_INPUT;
    }
    print_message("%d damaged profiles refused, %d harmless\n", refused, loaded);
    assert_true(refused > 20);
}
static int make_profile_file(void **state) {
    (void)state;
    int file = mkstemp(profile_path);
    return file < 0 || close(file);
}
static int remove_profile_file(void **state) {
    (void)state;
    return unlink(profile_path);
}

// -------------------------------------------------------------------------------------------------
// Time

static void expect_time(int layers, const char *cluster, int64_t samples, double memory,
                        double limit_s) {
    // about a GPT of 1024 channels and 1024 tokens on fast devices, bf16
    PlanModel m = plan_model_make(layers + 2);
    plan_model_add(&m, 0, 1e-5, 1e-5, 2e6, 100e6);
    for (int u = 1; u <= layers; u++) { plan_model_add(&m, u, 1e-3, 2e-3, 60e6, 25e6); }
    plan_model_add(&m, layers + 1, 2e-3, 4e-3, 200e6, 100e6);
    for (int u = 1; u < layers + 2; u++) { m.cut[u] = 2e6; }
    PlanTask t = task_of(&m, cluster, samples);
    t.memory = memory;
    PlanAnswer *a = (PlanAnswer *)calloc(1, sizeof *a);
    double begin = (double)clock() / CLOCKS_PER_SEC;
    *a = planner_answer(&t);
    double took = (double)clock() / CLOCKS_PER_SEC - begin;
    print_message("%d units, %s, %d samples: %.2f s; %.1f in %d stages, micro-batch %d", m.units,
                  cluster, (int)samples, took, speedup(&t, a->best.step_s), a->best.plan.stages,
                  (int)a->best.plan.micro_batch);
    for (int k = 0; k < a->others; k++) {
        print_message("; %s %.1f", a->name[k], speedup(&t, a->other[k].step_s));
    }
    print_message("\n");
    assert_true(a->best.plan.stages > 0);
    // processor time on a machine that others use; alone it is under limit_s
    assert_true(took < 4 * limit_s);
    free(a);
    plan_model_free(&m);
}
// A sample has one of the three of 64 ranks.
static void test_time(void **state) {
    (void)state;
    static const struct {
        const char *cluster;
        int samples;
        double memory, limit_s;
    } rows[] = {
        {"8x8,intra=100,inter=10,latency=10", 512, .memory = INFINITY, .limit_s = 2},
        {"8x8,intra=100,inter=10,latency=10", 512, .memory = 8e9, .limit_s = 2},
        {"64x1,inter=3,latency=10", 512, .memory = INFINITY, .limit_s = 2},
        {"128x8,intra=100,inter=10,latency=10", 4096, .memory = INFINITY, .limit_s = 10},
        {"128x8,intra=100,inter=10,latency=10", 4096, .memory = 8e9, .limit_s = 10},
    };
    const uint64_t drawn = test_seed(1) % 3;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (i == drawn || all_tests()) {
            expect_time(128, rows[i].cluster, rows[i].samples, rows[i].memory, rows[i].limit_s);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_links),
        cmocka_unit_test(test_sums_as_counted),
        cmocka_unit_test(test_placement),
        cmocka_unit_test(test_costs),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_waiting_memory),
        cmocka_unit_test(test_counted_memory),
        cmocka_unit_test(test_own_costs),
        cmocka_unit_test(test_pass_seconds),
        cmocka_unit_test(test_unequal_speeds),
        cmocka_unit_test(test_replay),
        cmocka_unit_test(test_many_micro_batches),
        cmocka_unit_test(test_messages_of_a_micro_batch),
        cmocka_unit_test(test_alike_units),
        cmocka_unit_test(test_balanced_together),
        cmocka_unit_test(test_brute_force),
        cmocka_unit_test(test_paper_plans_are_beaten),
        cmocka_unit_test(test_profile),
        cmocka_unit_test(test_bad_profiles),
        cmocka_unit_test(test_fuzz),
        cmocka_unit_test(test_time),
        cmocka_unit_test(test_short_schedules),
    };
    if (getenv("PLANNER_TESTS")) { cmocka_set_test_filter(getenv("PLANNER_TESTS")); }
    return cmocka_run_group_tests(tests, make_profile_file, remove_profile_file);
}
