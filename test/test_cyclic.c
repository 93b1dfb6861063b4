// test_cyclic.c: proves cyclic.h. That its windows, one after another, are the paper's time tables,
// keep its invariants and use the versions of its rule; that new parameters are there in time and
// nobody sends more than others; that owners' states travel as often as ZeRO-3's at most, one
// message at a time, and take the room that they should; that every one of these programs is valid,
// also in orders in which ranks put work aside, and damaged ones are refused for the right reason.
// That a run is what its rule says is in test_reference.py.
#include "ops/cpu/ops_cpu.h"
#include "pipeline.h"
#include "zero.h"
#include "mutations.h"
#include "orders.h"
#include "simulated_times.h"
#include "policies.h" // ZERO_POLICY

#include "harness.h"

enum { MOST = 32 }; // stages that the tests go up to

// -------------------------------------------------------------------------------------------------
// Plans and programs, as train_gpt.c makes them

static GptModel model_of(int units) { return gpt_model(dense_config_of(0, units - 2)); }
// Models of all architectures in turn, with the plan of theirs.
static GptModel next_model(CyclicPlan *plan, int units) {
    static int models;
    const GptModel m = gpt_model(dense_config_of(models++, units - 2));
    plan->untied = !gpt_is_tied(&m);
    return m;
}
// Stages of a unit each, or of `units` in all.
static CyclicPlan plan_of(CyclicRule rule, CyclicMode mode, int N, int slack, int units) {
    CyclicPlan p;
    memset(&p, 0, sizeof p);
    p.rule = rule;
    p.mode = mode;
    p.N = N;
    p.slack = slack;
    p.pieces = 1;
    p.ranks = mode == CYCLIC_SINGLE ? 1 : N;
    p.cut = placement_even(units, N);
    return p;
}
// The same of N (N + 1) / 2 ranks, which take turns.
static CyclicPlan triangle_of(CyclicRule rule, int N, int slack, int units, int pieces) {
    CyclicPlan p = plan_of(rule, CYCLIC_MODEL, N, slack, units);
    p.ranks = N * (N + 1) / 2;
    p.pieces = pieces;
    return p;
}
static CyclicPlan plan_of_units(CyclicRule rule, CyclicMode mode, int N, int slack) {
    return plan_of(rule, mode, N, slack, (int)max_i64(N, 3));
}
// training: the window of a step; else a pass that does not train, over the same samples.
static Program program_of_model(const CyclicPlan *plan, const GptModel *m, int64_t samples,
                                bool training) {
    Placement placement = plan->mode == CYCLIC_MODEL
                              ? cyclic_placement(plan)
                              : pipeline_placement("1", m->units, plan->ranks);
    ZeroPolicy policy = ZERO_POLICY(0, 1, false, false, false, plan, NULL);
    Program p;
    memset(&p, 0, sizeof p);
    p.map = test_unit_map(m, &policy, &placement, false);
    p.ranks = plan->ranks;
    p.rank = (Schedule *)calloc((size_t)p.ranks, sizeof(Schedule));
    if (training) {
        schedule_cyclic(&p, plan, samples, 0);
    } else {
        schedule_sequential(&p, samples, 2, false);
        zero_lower(&p, false);
    }
    placement_free(&placement);
    return p;
}
static Program window_of_model(const CyclicPlan *plan, const GptModel *m, int64_t samples) {
    return program_of_model(plan, m, samples, true);
}
static Program window_of(const CyclicPlan *plan, int64_t samples) {
    const Stage *last = &plan->cut.stage[plan->N - 1];
    const GptModel m = model_of(last->first_unit + last->units);
    return window_of_model(plan, &m, samples);
}

// -------------------------------------------------------------------------------------------------
// Slots, read off the lists of a rank for each micro-batch: a rank begins in slot 2 r, and works on
// one stage in each slot

typedef struct {
    int stage, step; // -1: nothing
    bool backward;
} Cell;
enum { STEPS = 4, SLOTS = 2 * MOST * STEPS + 2 * MOST };
typedef struct {
    int N, slots;
    Cell at[SLOTS][MOST];           // [slot][rank]
    int updated[SLOTS][2];          // stage, version; stage -1: none
    int version[STEPS][MOST][MOST]; // [step][micro][stage] that its forward uses; -1: none yet
    // forward and backward use the same, all storages of a stage alike, and nothing goes wrong
    // otherwise
    bool good;
} Table;
static void table_compute(Table *t, const CyclicPlan *plan, int rank, const Action *a, int *slot) {
    const Cell cell = {cyclic_stage_of_unit(plan, a->unit), (int)a->step, a->kind != ACT_FORWARD};
    Cell *now = *slot < 0 ? NULL : &t->at[*slot][rank];
    if (!now || now->stage != cell.stage || now->step != cell.step ||
        now->backward != cell.backward) {
        *slot = *slot < 0 ? 2 * rank : *slot + 1;
        t->at[*slot][rank] = cell;
        t->slots = (int)max_i64(t->slots, *slot + 1);
    }
    t->good = t->good && a->micro == (int)a->step * plan->N + rank;
}
// The stage of a storage is that of the first unit that uses it.
static int stage_of_storage(const CyclicPlan *plan, const UnitMap *map, int storage) {
    return cyclic_stage_of_unit(plan, cyclic_unit_of_storage(map, storage));
}
static void table_acquire(Table *t, const CyclicPlan *plan, const UnitMap *map, int rank,
                          const Action *a) {
    int *version = &t->version[a->step][rank][stage_of_storage(plan, map, a->storage)];
    t->good = t->good && (*version < 0 || *version == a->version);
    *version = (int)a->version;
}
static Table *table_of(const CyclicPlan *plan, int steps) {
    Table *t = (Table *)checked_malloc(sizeof *t, "table");
    memset(t, -1, sizeof *t); // nothing anywhere
    t->N = plan->N;
    t->slots = 0;
    t->good = true;
    Program window = window_of(plan, plan->N), p = cyclic_unroll(&window, plan, steps, steps);
    for (int r = 0; r < p.ranks; r++) {
        int slot = -1;
        for (int i = 0; i < p.rank[r].count; i++) {
            const Action *a = &p.rank[r].actions[i];
            if (action_computes(a->kind)) { table_compute(t, plan, r, a, &slot); }
            if (a->kind == ACT_ACQUIRE) { table_acquire(t, plan, &p.map, r, a); }
            if (a->kind == ACT_UPDATE) {
                t->updated[slot][0] = stage_of_storage(plan, &p.map, a->storage);
                t->updated[slot][1] = (int)a->step + 1;
            }
        }
    }
    cyclic_window_free(&p);
    program_free(&window);
    return t;
}
// A row: what each rank does, in the paper's words, and the update after it.
static void table_row(const Table *t, int slot, char *row, size_t bytes) {
    size_t n = 0;
    for (int r = 0; r < t->N; r++) {
        const Cell *c = &t->at[slot][r];
        if (c->stage < 0) {
            n += (size_t)snprintf(row + n, bytes - n, "- ");
        } else {
            n += (size_t)snprintf(row + n, bytes - n, "%c%d.%d ", c->backward ? 'B' : 'F',
                                  c->stage + 1, c->step);
        }
    }
    if (t->updated[slot][0] >= 0) {
        snprintf(row + n, bytes - n, "%d=%d", t->updated[slot][0] + 1, t->updated[slot][1]);
    }
}

// Of three and of four stages; "3=1": stage 3 gets version 1.
static const char *const rows_of_three[] = {
    "F1.0 - - ",          "F2.0 - - ",          "F3.0 F1.0 - ",    "B3.0 F2.0 - ",
    "B2.0 F3.0 F1.0 ",    "B1.0 B3.0 F2.0 ",    "F1.1 B2.0 F3.0 ", "F2.1 B1.0 B3.0 3=1",
    "F3.1 F1.1 B2.0 2=1", "B3.1 F2.1 B1.0 1=1", "B2.1 F3.1 F1.1 ", "B1.1 B3.1 F2.1 ",
    "F1.2 B2.1 F3.1 ",    "F2.2 B1.1 B3.1 3=2",
};
static const char *const rows_of_four[] = {
    "F1.0 - - - ",
    "F2.0 - - - ",
    "F3.0 F1.0 - - ",
    "F4.0 F2.0 - - ",
    "B4.0 F3.0 F1.0 - ",
    "B3.0 F4.0 F2.0 - ",
    "B2.0 B4.0 F3.0 F1.0 ",
    "B1.0 B3.0 F4.0 F2.0 ",
    "F1.1 B2.0 B4.0 F3.0 ",
    "F2.1 B1.0 B3.0 F4.0 ",
    "F3.1 F1.1 B2.0 B4.0 4=1",
    "F4.1 F2.1 B1.0 B3.0 3=1",
    "B4.1 F3.1 F1.1 B2.0 2=1",
    "B3.1 F4.1 F2.1 B1.0 1=1",
    "B2.1 B4.1 F3.1 F1.1 ",
    "B1.1 B3.1 F4.1 F2.1 ",
    "F1.2 B2.1 B4.1 F3.1 ",
    "F2.2 B1.1 B3.1 F4.1 ",
    "F3.2 F1.2 B2.1 B4.1 4=2",
};
static void check_rows(int N, const char *const *rows, int count) {
    // whoever updates, it is in the same slot; of v1 an owner may wait
    for (int kind = 0; kind < 3; kind++) {
        CyclicPlan plan =
            plan_of_units(kind ? CYCLIC_V2 : CYCLIC_V1, kind < 2 ? CYCLIC_DATA : CYCLIC_ZERO, N, 0);
        Table *t = table_of(&plan, STEPS);
        for (int slot = 0; slot < count; slot++) {
            char row[200];
            table_row(t, slot, row, sizeof row);
            assert_string_equal(row, rows[slot]);
        }
        free(t);
        cyclic_free(&plan);
    }
}
static void test_tables(void **state) {
    (void)state;
    check_rows(3, rows_of_three, sizeof rows_of_three / sizeof *rows_of_three);
    check_rows(4, rows_of_four, sizeof rows_of_four / sizeof *rows_of_four);
}

// Stages in use, activations that are held, and gradients that are complete, slot by slot, for all
// numbers of stages.
static void check_invariants(const Table *t) {
    // from when on all ranks work, until the first one's last slot, which has its later updates,
    // too
    const int N = t->N, steady = 2 * N - 2, end = 2 * N * STEPS - 1;
    int held[MOST] = {0};
    assert_true(t->good);
    for (int slot = 0; slot < end; slot++) {
        int users[MOST] = {0}, live = 0;
        for (int r = 0; r < N; r++) {
            const Cell *c = &t->at[slot][r];
            if (c->stage < 0) { continue; }
            users[c->stage]++;
            held[c->stage] += !c->backward;
        }
        for (int j = 0; j < N; j++) {
            assert_true(users[j] <= 1);
            live += held[j];
            if (slot >= steady) {
                assert_int_equal(users[j], 1);
                assert_int_equal(held[j], N - j);
            }
        }
        if (slot >= steady) { assert_int_equal(live, N * (N + 1) / 2); }
        for (int r = 0; r < N; r++) {
            const Cell *c = &t->at[slot][r];
            if (c->stage >= 0 && c->backward) { held[c->stage]--; }
        }
        // with the last rank's backward of a stage its gradient is complete
        const Cell *last = &t->at[slot][N - 1];
        const bool complete = last->stage >= 0 && last->backward;
        assert_int_equal(t->updated[slot][0], complete ? last->stage : -1);
        if (complete) {
            assert_int_equal((slot - steady) % (2 * N), N + N - 1 - last->stage);
            assert_int_equal(t->updated[slot][1], last->step + 1);
        }
    }
}
static void test_invariants(void **state) {
    (void)state;
    for (int N = 1; N <= MOST; N++) {
        CyclicPlan plan = plan_of(N % 2 ? CYCLIC_V1 : CYCLIC_V2, CYCLIC_DATA, N, 0, N + 2);
        Table *t = table_of(&plan, STEPS);
        check_invariants(t);
        free(t);
        cyclic_free(&plan);
    }
}
// One rank runs the same: in each slot what the ranks do there, backward first, slot by slot.
static void test_single_is_all_of_data(void **state) {
    (void)state;
    for (int N = 1; N <= 12; N++) {
        CyclicPlan plan = plan_of_units(CYCLIC_V2, CYCLIC_SINGLE, N, 0);
        Program window = window_of(&plan, N), p = cyclic_unroll(&window, &plan, STEPS, STEPS);
        int before = 0, forwards = 0;
        bool went_forward = false;
        for (int i = 0; i < p.rank[0].count; i++) {
            const Action *a = &p.rank[0].actions[i];
            if (!action_computes(a->kind)) { continue; }
            const int stage = cyclic_stage_of_unit(&plan, a->unit), micro = a->micro % N;
            const bool forward = a->kind == ACT_FORWARD;
            const int slot =
                2 * N * (int)a->step + 2 * micro + (forward ? stage : 2 * N - 1 - stage);
            assert_true(slot >= before);
            assert_true(slot > before || forward || !went_forward);
            went_forward = forward;
            before = slot;
            forwards += forward;
        }
        assert_int_equal(forwards, STEPS * N * window.map.units);
        cyclic_window_free(&p);
        program_free(&window);
        cyclic_free(&plan);
    }
}

// Who takes turns: what the ranks of a triangle do, one after another, as step.micro-batch from 0.1
// on, for as long as it does not repeat itself.
typedef struct {
    int N, steps;
    const char *ranks[10];
} Turns;
static const Turns turns[] = {
    {2, 1, {"F0.1 B0.1", "F0.2 B0.2", "F0.1 B0.1 F0.2 B0.2"}},
    {3,
     2,
     {"F0.1 B0.1 F1.1 B1.1", "F0.2 B0.2 F1.2 B1.2", "F0.3 B0.3 F1.3 B1.3",
      "F0.1 B0.1 F0.3 B0.3 F1.2 B1.2", "F0.2 B0.2 F1.1 B1.1 F1.3 B1.3",
      "F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3"}},
    {4,
     3,
     {"F0.1 B0.1 F1.1 B1.1 F2.1 B2.1", "F0.2 B0.2 F1.2 B1.2 F2.2 B2.2",
      "F0.3 B0.3 F1.3 B1.3 F2.3 B2.3", "F0.4 B0.4 F1.4 B1.4 F2.4 B2.4",
      "F0.1 B0.1 F0.4 B0.4 F1.3 B1.3 F2.2 B2.2", "F0.2 B0.2 F1.1 B1.1 F1.4 B1.4 F2.3 B2.3",
      "F0.3 B0.3 F1.2 B1.2 F2.1 B2.1 F2.4 B2.4",
      "F0.1 B0.1 F0.3 B0.3 F1.1 B1.1 F1.3 B1.3 F2.1 B2.1 F2.3 B2.3",
      "F0.2 B0.2 F0.4 B0.4 F1.2 B1.2 F1.4 B1.4 F2.2 B2.2 F2.4 B2.4",
      "F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 F0.4 B0.4 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F1.4 B1.4 F2.1 B2.1 "
      "F2.2 B2.2 F2.3 B2.3 F2.4 B2.4"}},
};
static int period_of(const CyclicPlan *plan) {
    int steps = 1;
    while (!cyclic_alike(plan, steps, 0)) { steps++; }
    return steps;
}
// What a rank does in a slot: -1 nothing, or the number of its micro-batch. Backward: of the last
// unit of its stage, the first action there.
static int turn_slot(const CyclicPlan *plan, const Action *a) {
    const Stage *units = &plan->cut.stage[cyclic_stage_of_unit(plan, a->unit)];
    const bool forward = a->kind == ACT_FORWARD && a->unit == units->first_unit;
    const bool backward =
        a->kind == ACT_BACKWARD_WEIGHT && a->unit == units->first_unit + units->units - 1;
    const int stage = cyclic_stage_of_unit(plan, a->unit),
              piece = a->micro % cyclic_step_pieces(plan);
    return forward    ? cyclic_forward_slot(plan, (int)a->step, piece, stage)
           : backward ? cyclic_backward_slot(plan, (int)a->step, piece, stage)
                      : -1;
}
static void test_turns(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof turns / sizeof *turns; k++) {
        const Turns *t = &turns[k];
        CyclicPlan plan = triangle_of(CYCLIC_V2, t->N, 0, 6, 1);
        Program window = window_of(&plan, t->N),
                p = cyclic_unroll(&window, &plan, t->steps, t->steps);
        assert_int_equal(period_of(&plan), t->steps);
        for (int r = 0; r < p.ranks; r++) {
            char found[1000] = "";
            size_t n = 0;
            for (int i = 0; i < p.rank[r].count; i++) {
                const Action *a = &p.rank[r].actions[i];
                if (turn_slot(&plan, a) < 0) { continue; }
                n += (size_t)snprintf(found + n, sizeof found - n, "%s%c%d.%d", n ? " " : "",
                                      a->kind == ACT_FORWARD ? 'F' : 'B', (int)a->step,
                                      (int)(a->micro % t->N) + 1);
            }
            assert_string_equal(found, t->ranks[r]);
        }
        cyclic_window_free(&p);
        program_free(&window);
        cyclic_free(&plan);
    }
}
// Each rank holds one piece's activations, always from its first forward on; in each slot one rank
// of each stage works.
static void test_triangles(void **state) {
    (void)state;
    for (int N = 2; N <= 8; N++) {
        CyclicPlan plan = triangle_of(CYCLIC_V2, N, 0, N + 2, 1 + N % 3);
        const int steps = period_of(&plan) + 2;
        const int all = cyclic_step_pieces(&plan);
        Program window = window_of(&plan, all), p = cyclic_unroll(&window, &plan, steps, steps);
        // [slot][stage]
        int *busy = (int *)checked_calloc((size_t)(2 * all * (steps + 2) * N), sizeof(int), "test");
        for (int r = 0; r < p.ranks; r++) {
            int ended = -1, holds = -1;
            for (int i = 0; i < p.rank[r].count; i++) {
                const Action *a = &p.rank[r].actions[i];
                const int slot = turn_slot(&plan, a);
                if (slot < 0) { continue; }
                assert_int_equal(cyclic_stage_of_unit(&plan, a->unit),
                                 cyclic_stage_of_rank(&plan, r));
                busy[slot * N + cyclic_stage_of_rank(&plan, r)]++;
                if (a->kind == ACT_FORWARD) {
                    assert_int_equal(holds, -1);
                    assert_true(ended < 0 || slot == ended + 1);
                    holds = a->micro;
                } else {
                    assert_int_equal(holds, a->micro);
                    holds = -1;
                    ended = slot;
                }
            }
        }
        for (int k = (2 * N - 2) * N; k < 2 * all * steps * N; k++) {
            assert_int_equal(busy[k], 1);
        }
        free(busy);
        cyclic_window_free(&p);
        program_free(&window);
        cyclic_free(&plan);
    }
}
// What a rank keeps, sends and receives: a stage's parameters once or twice; over a period each
// piece's gradient goes to the owner, unless it is made there, and each version to all others.
static void test_triangles_send(void **state) {
    (void)state;
    for (int N = 2; N <= 6; N++) {
        CyclicPlan plan = triangle_of(N % 2 ? CYCLIC_V1 : CYCLIC_V2, N, 0, N + 2, 1 + N % 3);
        const GptModel m = model_of(N + 2);
        const int period = period_of(&plan);
        Program window = window_of(&plan, cyclic_step_pieces(&plan));
        int *sums = (int *)checked_calloc(2 * (size_t)m.storages, sizeof(int), "test"),
            *versions = sums + m.storages;
        for (int step = 0; step < period; step++) {
            Program p = cyclic_window(&window, &plan, step);
            for (int r = 0; r < p.ranks; r++) {
                for (int i = 0; i < p.rank[r].count; i++) {
                    const Action *a = &p.rank[r].actions[i];
                    const int owner =
                        a->storage < 0
                            ? -1
                            : cyclic_owner(&plan, stage_of_storage(&plan, &p.map, a->storage));
                    if (a->kind == ACT_SEND_SUM) {
                        sums[a->storage]++;
                        assert_int_equal(a->peer, owner);
                    }
                    if (a->kind == ACT_SEND_PARAMETERS) {
                        versions[a->storage]++;
                        assert_int_equal(r, owner);
                    }
                }
            }
            cyclic_window_free(&p);
        }
        for (int s = 0; s < m.storages; s++) {
            const int width = N - stage_of_storage(&plan, &window.map, s);
            assert_int_equal(sums[s] * width, period * cyclic_step_pieces(&plan) * (width - 1));
            // and of wte one to the head's
            assert_int_equal(versions[s], period * (width - 1 + (s == 0)));
        }
        for (int r = 0; r < plan.ranks; r++) {
            for (int s = 0; s < m.storages; s++) {
                const int stage = stage_of_storage(&plan, &window.map, s);
                const bool takes =
                    stage == cyclic_stage_of_rank(&plan, r) || (s == 0 && r == plan.ranks - 1);
                const P2pStorage *p2p = &window.map.rows[s].p2p;
                assert_int_equal(p2p->places[r] > 0, takes);
                assert_true(p2p->places[r] <= 2);
                assert_int_equal(p2p->several, stage < N - 1);
            }
        }
        free(sums);
        program_free(&window);
        cyclic_free(&plan);
    }
}

// -------------------------------------------------------------------------------------------------
// Versions, and how much time there is between an update and the first use of what it makes

// Which micro-batch uses which version of which stage, row by row: n new (theta_t), o old
// (theta_(t-1)).
typedef struct {
    CyclicRule rule;
    int N, slack;
    const char *versions;
} Versions;
static const Versions versions[] = {
    {CYCLIC_V2, 1, 0, "n"},
    {CYCLIC_V1, 1, 0, "o"},
    {CYCLIC_V2, 3, 0, "oon onn nnn"},
    {CYCLIC_V2, 4, 0, "ooon oonn onnn nnnn"},
    {CYCLIC_V2, 3, 1, "ooo oon onn"},
    {CYCLIC_V2, 4, 1, "oooo ooon oonn onnn"},
    {CYCLIC_V2, 4, 2, "oooo oooo ooon oonn"},
    {CYCLIC_V2, 4, 4, "oooo oooo oooo oooo"},
    {CYCLIC_V1, 3, 0, "ooo ooo ooo"},
    {CYCLIC_V1, 4, 0, "oooo oooo oooo oooo"},
};
static void test_versions(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof versions / sizeof *versions; k++) {
        const Versions *v = &versions[k];
        CyclicPlan plan = plan_of_units(v->rule, CYCLIC_DATA, v->N, v->slack);
        Table *t = table_of(&plan, STEPS);
        assert_true(t->good);
        for (int step = 0; step < STEPS; step++) {
            for (int i = 0; i < v->N; i++) {
                for (int j = 0; j < v->N; j++) {
                    const bool fresh = v->versions[i * (v->N + 1) + j] == 'n';
                    assert_int_equal(t->version[step][i][j], max_i64(0, step - !fresh));
                }
            }
        }
        free(t);
        cyclic_free(&plan);
    }
}
// Of v2, as a formula: fresh are those whose version is there when their forward begins, and all of
// them.
static void test_fresh_are_those_that_can_be(void **state) {
    (void)state;
    for (int N = 1; N <= MOST; N++) {
        CyclicPlan plan = plan_of_units(CYCLIC_V2, CYCLIC_DATA, N, 0);
        int fresh = 0;
        for (int k = 0; k < N * N; k++) {
            const int i = k / N, j = k % N;
            assert_int_equal(cyclic_fresh(&plan, i, j),
                             cyclic_forward_slot(&plan, 1, i, j) > cyclic_update_slot(&plan, j));
            fresh += cyclic_fresh(&plan, i, j);
        }
        assert_int_equal(fresh, N * (N + 1) / 2);
        cyclic_free(&plan);
    }
}
// Idle slots between the update and the forward that uses it first, row by row; -1: of the other
// kind.
static const int slack_of_three[3][9] = {{2, 4, 6, 4, 6, 8, 6, 8, 10},
                                         {-1, -1, 0, -1, 0, 2, 0, 2, 4},
                                         {2, 4, -1, 4, -1, -1, -1, -1, -1}};
static const int slack_of_four[3][16] = {
    {2, 4, 6, 8, 4, 6, 8, 10, 6, 8, 10, 12, 8, 10, 12, 14},
    {-1, -1, -1, 0, -1, -1, 0, 2, -1, 0, 2, 4, 0, 2, 4, 6},
    {2, 4, 6, -1, 4, 6, -1, -1, 6, -1, -1, -1, -1, -1, -1, -1}};
static void check_slack(CyclicRule rule, bool fresh, int N, const int *expected) {
    CyclicPlan plan = plan_of_units(rule, CYCLIC_DATA, N, 0);
    Table *t = table_of(&plan, STEPS);
    for (int k = 0; k < N * N; k++) {
        const int i = k / N, j = k % N;
        int made = -1, used = -1;
        for (int slot = 0; slot < t->slots; slot++) {
            const Cell *c = &t->at[slot][i];
            if (made < 0 && t->updated[slot][0] == j) { made = slot; }
            if (used < 0 && c->stage == j && !c->backward && t->version[c->step][i][j] == 1) {
                used = slot;
            }
        }
        const bool delayed = t->version[2][i][j] == 1;
        assert_int_equal(delayed == fresh ? -1 : used - made - 1, expected[k]);
    }
    free(t);
    cyclic_free(&plan);
}
static void test_slack(void **state) {
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        const CyclicRule rule = kind ? CYCLIC_V2 : CYCLIC_V1;
        check_slack(rule, kind == 1, 3, slack_of_three[kind]);
        check_slack(rule, kind == 1, 4, slack_of_four[kind]);
    }
}

// -------------------------------------------------------------------------------------------------
// The way of new parameters

// Returns the slot in which a micro-batch first uses, in a stage, the version that step 0 makes.
static int first_use(const CyclicPlan *p, int micro, int stage) {
    return cyclic_forward_slot(p, cyclic_fresh(p, micro, stage) ? 1 : 2,
                               cyclic_first_piece(p, micro), stage);
}
static void check_route(const CyclicPlan *plan) {
    const int N = plan->N;
    ParamsMessages h = cyclic_route(plan);
    bool *comes = (bool *)checked_calloc((size_t)(N * N), sizeof(bool), "test");
    for (int k = 0; k < h.count; k++) {
        const ParamsMessage *m = &h.message[k];
        assert_true(m->to >= 0 && m->to < N && m->from != m->to);
        assert_true(k == 0 || h.message[k - 1].slot <= m->slot);
        // once, from its owner, when it is made, in time
        assert_int_equal(m->from, cyclic_owner(plan, m->stage));
        assert_int_equal(m->slot, cyclic_update_slot(plan, m->stage));
        assert_true(m->slot < first_use(plan, m->to, m->stage));
        assert_false(comes[m->to * N + m->stage]);
        comes[m->to * N + m->stage] = true;
    }
    assert_int_equal(h.count, N * (N - 1));
    free(comes);
    free(h.message);
}
static void test_routes(void **state) {
    (void)state;
    for (int N = 2; N <= MOST; N++) {
        for (int kind = 0; kind < 5; kind++) { // v1, v1 that waits, v2, with slack
            CyclicPlan plan = plan_of_units(kind < 2 ? CYCLIC_V1 : CYCLIC_V2, CYCLIC_DATA, N,
                                            kind == 3   ? 1
                                            : kind == 4 ? N / 2
                                                        : 0);
            plan.waits = kind == 1;
            check_route(&plan);
            cyclic_free(&plan);
        }
    }
}

// A rank sends the parameters of its stage to N - 1 others, and to each of them a gradient. It
// receives as much.
static void test_bytes(void **state) {
    (void)state;
    for (int N = 2; N <= 12; N++) {
        const GptModel m = model_of(3 * N);
        CyclicPlan plan = plan_of(CYCLIC_V2, CYCLIC_DATA, N, 0, 3 * N);
        Program p = window_of(&plan, N);
        for (int r = 0; r < N; r++) {
            int64_t expected = 0, sent = 0, received = 0;
            for (int s = 0; s < m.storages; s++) {
                const bool owns = cyclic_owner(&plan, stage_of_storage(&plan, &p.map, s)) == r;
                expected += (owns ? N - 1 : 1) * gpt_storage_elements(&m, s);
            }
            for (int i = 0; i < p.rank[r].count; i++) {
                const Action *a = &p.rank[r].actions[i];
                if (a->storage < 0 || !action_is_message(a->kind)) { continue; }
                *(action_sends(a->kind) ? &sent : &received) +=
                    gpt_storage_elements(&m, a->storage);
            }
            assert_int_equal(sent, expected);
            assert_int_equal(received, expected);
        }
        program_free(&p);
        cyclic_free(&plan);
    }
}

// -------------------------------------------------------------------------------------------------
// Parameters that come for each use

// How often parameters of a storage travel in a step, to one rank that does not own them: to each
// forward and backward pass, which in the last stage follow each other; the embedding's backward
// pass needs none, and wte is wanted by the head, too.
static int borrowed_uses(const CyclicPlan *plan, const UnitMap *map, int storage) {
    const int stage = stage_of_storage(plan, map, storage);
    return storage == 0 ? 2 : storage == 1 || stage == plan->N - 1 ? 1 : 2;
}
// Between two slots of computing a rank sends the parameters of one stage at most (and wte to the
// head), and the gradient of one, and receives as much.
typedef struct {
    // of parameters that go, that come, or -1; whose stage's gradient goes
    int use[2], peer[2], owner;
} Gap;
static void check_gap(Gap *gap, const Action *a, const CyclicPlan *plan, const UnitMap *map) {
    const bool send = action_sends(a->kind), head = a->kind <= ACT_RECV_PARAMETERS &&
                                                    a->kind >= ACT_SEND_PARAMETERS && !a->storage &&
                                                    a->use == plan->N - 1;
    int *use = &gap->use[send], *peer = &gap->peer[send];
    if (a->kind == ACT_SEND_SUM) {
        const int stage = stage_of_storage(plan, map, a->storage);
        assert_true(gap->owner < 0 || gap->owner == stage);
        gap->owner = stage;
    }
    if ((a->kind != ACT_SEND_PARAMETERS && a->kind != ACT_RECV_PARAMETERS) || head) { return; }
    assert_true(*use < 0 || (*use == a->use && (*peer == a->peer || !send)));
    *use = a->use;
    *peer = a->peer;
}
static void check_volume(const CyclicPlan *plan, const GptModel *m) {
    Program p = window_of(plan, plan->N);
    int64_t parameters = 0, gradients = 0, expected = 0, zero3 = 0;
    for (int r = 0; r < p.ranks; r++) {
        Gap gap = {{-1, -1}, {-1, -1}, -1};
        for (int i = 0; i < p.rank[r].count; i++) {
            const Action *a = &p.rank[r].actions[i];
            if (action_computes(a->kind)) { gap = (Gap){{-1, -1}, {-1, -1}, -1}; }
            check_gap(&gap, a, plan, &p.map);
            parameters += a->kind == ACT_SEND_PARAMETERS ? gpt_storage_elements(m, a->storage) : 0;
            gradients += a->kind == ACT_SEND_SUM ? gpt_storage_elements(m, a->storage) : 0;
        }
    }
    for (int s = 0; s < m->storages; s++) {
        const int64_t each = (plan->N - 1) * gpt_storage_elements(m, s);
        expected += borrowed_uses(plan, &p.map, s) * each;
        zero3 += 2 * each;
    }
    assert_int_equal(parameters, expected);
    assert_int_equal(gradients, (plan->N - 1) * m->parameters);
    assert_true(parameters <= zero3); // which gathers everything twice
    program_free(&p);
}
// A rank's bytes: its stage, in as many versions as are in use; two rooms of the longest stage that
// others own, and what its gradients take on their way.
static void check_memory(const CyclicPlan *plan, const GptModel *m, int rank) {
    const Group ranks = group_cluster(1, plan->N), seen = group_seen_from(&ranks, rank);
    Placement placement = pipeline_placement("1", m->units, plan->N);
    ZeroPolicy policy = ZERO_POLICY(0, 1, false, false, false, plan, NULL);
    const MixedPrecision precision = {DTYPE_BF16, DTYPE_FP32};
    StatePlan store = state_plan(m, &seen, &placement, &policy, precision, &optimizers[0]);
    Program window = window_of(plan, plan->N);
    int64_t own = 0, borrowed = 0, making = 0;
    bool old = false;
    for (int stage = 0; stage < plan->N; stage++) {
        int64_t comes = 0, made = 0;
        for (int s = 0; s < m->storages; s++) {
            const int of = stage_of_storage(plan, &window.map, s);
            const bool mine = of == plan->N - 1 - rank,
                       here = of == stage || (s == 0 && stage == plan->N - 1);
            comes += here && !mine ? gpt_storage_elements(m, s) : 0;
            made += here && s ? gpt_storage_elements(m, s) : 0;
            own += mine && of == stage ? gpt_storage_elements(m, s) : 0;
        }
        borrowed = max_i64(borrowed, comes);
        making = max_i64(making, made);
        for (int i = 0; i < plan->N; i++) {
            old |= stage == plan->N - 1 - rank && !cyclic_fresh(plan, i, stage);
        }
    }
    assert_int_equal(store.device[STATE_PARAMETERS].held, own * 2 * (1 + old));
    assert_int_equal(store.device[STATE_PARAMETERS].slot_bytes, 2 * borrowed * 2);
    assert_int_equal(store.device[STATE_GRADIENT].held, own * 4 * (plan->waits ? 2 : 1));
    size_t optimizer = 0;
    for (int kind = 0; kind < OPTIMIZER_KINDS; kind++) { optimizer += store.device[kind].held; }
    assert_int_equal(optimizer, own * 12);
    assert_int_equal(store.device[STATE_MADE].slot_bytes,
                     4 * (gpt_storage_elements(m, 0) + 2 * making));
    assert_int_equal(store.device[STATE_RECEIVED].slot_bytes, own * 4);
    store_plan_free(&store);
    program_free(&window);
    placement_free(&placement);
    Group all[] = {ranks, seen};
    group_free(&all[0]);
    group_free(&all[1]);
}
static void test_owners(void **state) {
    (void)state;
    for (int N = 1; N <= 9; N++) {
        for (int kind = 0; kind < 4; kind++) { // v1, v1 that waits, v2, with slack
            const int units = 3 * N - kind % 2;
            CyclicPlan plan =
                plan_of(kind < 2 ? CYCLIC_V1 : CYCLIC_V2, CYCLIC_ZERO, N, kind == 3, units);
            const GptModel m = model_of(units);
            plan.waits = kind == 1;
            check_volume(&plan, &m);
            for (int r = 0; r < N; r++) { check_memory(&plan, &m, r); }
            cyclic_free(&plan);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Proof

// A pass that does not train. (In mode model it is a pipeline's: test_pipeline.c.)
static void check_evaluation(const CyclicPlan *plan, const GptModel *m, int64_t samples) {
    char error[900];
    if (plan->mode == CYCLIC_MODEL) { return; }
    Program p = program_of_model(plan, m, samples, false);
    if (!schedule_validate(&p, error, sizeof error)) {
        fail_msg("%s of %d units, mode %d N %d, evaluated: %s", m->arch->name, m->units, plan->mode,
                 plan->N, error);
    }
    program_free(&p);
}
// The validator accepts steps, of which every pause-th drains.
static void check_steps(const Program *window, const CyclicPlan *plan, const GptModel *m, int steps,
                        int pause) {
    char error[400];
    Program program = cyclic_unroll(window, plan, steps, pause);
    if (!validate_unrolled(&program, plan, m, error, sizeof error)) {
        fail_msg(
            "%s rule %d mode %d N %d ranks %d slack %d pieces %d waits %d pauses %d (%d of %d) "
            "recompute %d: %s",
            m->arch->name, plan->rule, plan->mode, plan->N, plan->ranks, plan->slack, plan->pieces,
            plan->waits, plan->pauses, pause, steps, plan->recompute, error);
    }
    cyclic_window_free(&program);
}
static void check_valid(CyclicPlan *plan, int units, int steps, int pause) {
    const GptModel m = next_model(plan, units);
    // some have no samples
    const int64_t samples = plan->recompute ? 1 + plan->N / 2 : plan->N * plan->pieces + 1;
    Program window = window_of_model(plan, &m, samples);
    check_evaluation(plan, &m, samples);
    check_steps(&window, plan, &m, steps, pause);
    program_free(&window);
}
// Rules, slacks, ways of sums, with and without updates that wait and steps that drain.
static void test_all_are_valid(void **state) {
    (void)state;
    const CyclicMode modes[] = {CYCLIC_SINGLE, CYCLIC_DATA, CYCLIC_MODEL, CYCLIC_ZERO};
    for (int N = 1; N <= MOST; N += N < 8 || all_tests() ? 1 : 8) {
        for (int kind = 0; kind < 4 * 5 * 2; kind++) { // v1, v1 that waits, v2, with slack
            if (N > 8 && (kind / 4 + N / 8) % 2 && !all_tests()) { continue; }
            const int rule = kind / 4 % 5, units = (int)max_i64(N, 3) + N % 3;
            CyclicPlan plan = plan_of(rule < 2 ? CYCLIC_V1 : CYCLIC_V2, modes[kind % 4], N,
                                      rule == 3   ? 1
                                      : rule == 4 ? N / 2
                                                  : 0,
                                      units);
            plan.waits = rule == 1;
            plan.pauses = kind / 20;
            plan.recompute = N % 2;
            plan.pieces = N < 8 && plan.mode != CYCLIC_ZERO ? 1 + kind / 4 % 4 : 1;
            check_valid(&plan, units, plan.pauses ? 5 : 4, plan.pauses ? 1 + kind % 3 : 4);
            cyclic_free(&plan);
        }
    }
}

// Mode data in orders in which ranks defer store operations, drawn by lot: nobody waits for ever,
// and the parameters at the end are made of the same values as in the order of the lists.
static void check_orders(const Program *window, const CyclicPlan *plan, const GptModel *m,
                         int pause, int orders) {
    Program all = cyclic_unroll(window, plan, 5, pause);
    const uint64_t expected = values_at_end(&all, plan, m);
    for (int order = 0; order < orders; order++) {
        const uint64_t seed = test_seed(1) + (uint64_t)order,
                       found = orders_values(window, plan, m, pause, seed, -1);
        if (found != expected) {
            fail_msg(
                "%s share %d x %d rule %d N %d slack %d pieces %d waits %d pause %d seed %" PRIu64
                ": %s",
                m->arch->name, (int)m->share.run, (int)m->share.cycle, plan->rule, plan->N,
                plan->slack, plan->pieces, plan->waits, pause, seed,
                found ? "other parameters than in the order of the lists" : "ranks wait for ever");
        }
    }
    cyclic_window_free(&all);
}
static void check_late(CyclicPlan *plan, int units, int pause, int orders) {
    const GptModel m = next_model(plan, units);
    Program window = window_of_model(plan, &m, plan->N * plan->pieces + 1);
    check_orders(&window, plan, &m, pause, orders);
    program_free(&window);
}
static void test_all_are_valid_late(void **state) {
    (void)state;
    const bool all = all_tests();
    for (int N = 1; N <= MOST; N += N < 8 || all ? 1 : 8) {
        for (int kind = 0; kind < 5 * 2; kind++) {
            const int rule = kind % 5, units = (int)max_i64(N, 3) + N % 3;
            CyclicPlan plan = plan_of(rule < 2 ? CYCLIC_V1 : CYCLIC_V2, CYCLIC_DATA, N,
                                      rule == 3   ? 1
                                      : rule == 4 ? N / 2
                                                  : 0,
                                      units);
            plan.waits = rule == 1;
            plan.pauses = kind / 5;
            plan.recompute = N % 2;
            plan.pieces = N < 8 ? 1 + kind % 3 : 1;
            // of many ranks some rules
            const int orders = all ? 64 : N < 8 ? 2 : (kind + N / 8) % 5 == 0;
            check_late(&plan, units, plan.pauses ? 1 + kind % 3 : 5, orders);
            cyclic_free(&plan);
        }
    }
}

// Mode data, of 6 blocks that share: those that follow each other, and those that alternate with
// others, so that gradients of several storages are in the making; in pieces, and with work put
// aside.
static void check_shared(const CyclicPlan *plan, const GptModel *m, int pause) {
    Program window = window_of_model(plan, m, plan->N * plan->pieces + 1);
    check_steps(&window, plan, m, 5, pause);
    check_orders(&window, plan, m, pause, 2);
    program_free(&window);
}
static void test_shared_blocks_are_valid(void **state) {
    (void)state;
    const GptShare shares[] = {gpt_share(6, 6, 2), gpt_share(6, 6, 3), gpt_share(6, 2, 0),
                               gpt_share(6, 4, 0), gpt_share(6, 6, 0)};
    const uint64_t drawn = test_seed(0) % 4; // one in four, or all
    for (int i = 0; i < 5 * 5 * 3 * 4 * 2; i++) {
        if ((uint64_t)(i + i / 75) % 4 != drawn && !all_tests()) { continue; }
        const int N = 1 + i / 5 % 5, rule = i / 75 % 4; // v1, v1 that waits, v2, with slack
        const GptModel m = gpt_model_shared(dense_config_of(i / 3, 6), shares[i % 5]);
        CyclicPlan plan =
            plan_of(rule < 2 ? CYCLIC_V1 : CYCLIC_V2, CYCLIC_DATA, N, rule == 3, m.units);
        plan.untied = !gpt_is_tied(&m);
        plan.waits = rule == 1;
        plan.pauses = i / 300;
        plan.pieces = 1 + i / 25 % 3;
        check_shared(&plan, &m, plan.pauses ? 1 + i % 3 : 5);
        cyclic_free(&plan);
    }
}

// The same of triangles: all steps that differ, of more than 5 stages by one rule in turn.
static void test_triangles_are_valid(void **state) {
    (void)state;
    for (int N = 1; N <= 8; N++) {
        for (int kind = 0; kind < 5 * 2; kind++) {
            const int rule = kind % 5, units = (int)max_i64(N, 3) + N % 3;
            CyclicPlan plan = triangle_of(rule < 2 ? CYCLIC_V1 : CYCLIC_V2, N,
                                          rule == 3   ? 1
                                          : rule == 4 ? N / 2
                                                      : 0,
                                          units, 1 + kind % 3);
            const int steps =
                all_tests() ? period_of(&plan) + 3 : (int)min_i64(period_of(&plan) + 3, 15);
            plan.waits = rule == 1;
            plan.pauses = kind / 5;
            plan.recompute = N % 2;
            if (N < 6 || kind == N || all_tests()) {
                check_valid(&plan, units, steps, plan.pauses ? 1 + kind % 3 : steps);
            }
            cyclic_free(&plan);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Layouts as flags give them (cyclic_plan), drawn at random: what the program does not prove before
// a run. With TEST_ALL=1 very many of them.

typedef struct {
    uint64_t seed, draws;
} Draw;
static int draw(Draw *d, int low, int high) {
    return low + (int)(random_u64(d->seed, 77, d->draws++) % (uint64_t)(high - low + 1));
}
// Blocks that share: in mode data in all ways, else those that follow each other, in one stage.
static GptShare draw_share(Draw *d, CyclicMode mode, int layers, int *run) {
    *run = 1;
    if (draw(d, 0, 2)) { return GPT_SHARE_NONE; }
    const int number = draw(d, 1, layers);
    if (mode == CYCLIC_DATA && draw(d, 0, 1)) {
        return layers % number ? GPT_SHARE_NONE : gpt_share(layers, layers, number);
    }
    *run = number;
    return gpt_share(layers, number, 0);
}
// Cuts the units into stages, between blocks that do not share.
static bool draw_cut(Draw *d, int units, int stages, int run, char *text, size_t bytes) {
    int borders[MOST + 2], count = 0, first = 0;
    size_t n = 0;
    for (int u = 1; u < units; u++) {
        if (u == 1 || u == units - 1 || (u - 1) % run == 0) { borders[count++] = u; }
    }
    if (stages - 1 > count) { return false; }
    for (int left = stages - 1, k = 0; left; k++) {
        if (draw(d, 1, count - k) > left) { continue; }
        n += (size_t)snprintf(text + n, bytes - n, "%d,", borders[k] - first);
        first = borders[k];
        left--;
    }
    snprintf(text + n, bytes - n, "%d", units - first);
    return true;
}
static void check_layout(uint64_t seed, bool large) {
    const CyclicMode modes[] = {CYCLIC_SINGLE, CYCLIC_DATA, CYCLIC_ZERO, CYCLIC_MODEL};
    Draw d = {seed, 0};
    const CyclicMode mode = modes[draw(&d, 0, 3)];
    const int units = draw(&d, 3, large ? 20 : 9), N = draw(&d, 1, (int)min_i64(units, 12));
    const bool triangle = mode == CYCLIC_MODEL && N < 6 && draw(&d, 0, 1);
    const int ranks = mode == CYCLIC_SINGLE ? 1 : triangle ? N * (N + 1) / 2 : N;
    char cut[200] = "", error[400];
    int run;
    const GptShare share = draw_share(&d, mode, units - 2, &run);
    const bool cuts = draw(&d, 0, 1) || share_is(share);
    if (ranks == 1 && mode != CYCLIC_SINGLE) { return; } // as single
    if (cuts && !draw_cut(&d, units, N, run, cut, sizeof cut)) { return; }
    const int width = 4 << draw(&d, 0, 2), vocab = 128 << draw(&d, 0, 3);
    const int arch = draw(&d, 0, ARCHITECTURES - 1); // blocks with experts are refused
    const GptConfig config = {
        units - 2, 1, width, vocab, vocab, 8, architectures[arch].experts ? 0 : arch};
    const GptModel m = gpt_model_shared(config, share);
    Options o;
    memset(&o, 0, sizeof o);
    o.cyclic = draw(&d, CYCLIC_V1, CYCLIC_V2);
    o.cyclic_mode = mode;
    o.cyclic_stages = N;
    o.cyclic_slack = o.cyclic == CYCLIC_V2 && draw(&d, 0, 1) ? draw(&d, 0, N + 1) : 0;
    o.cyclic_cut = cut;
    o.share = "";
    o.out = "";
    o.val_every = draw(&d, 0, 1);
    o.grad_clip = o.cyclic == CYCLIC_V1 && draw(&d, 0, 1);
    o.recompute = draw(&d, 0, 1) ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
    const int64_t pieces = mode == CYCLIC_ZERO ? 1 : draw(&d, 1, large ? 5 : 3),
                  micro = draw(&d, 1, 3), samples = max_i64(1, draw(&d, 1, N) * pieces * micro);
    CyclicPlan plan = cyclic_plan(&o, &m, ranks, samples, mode == CYCLIC_ZERO ? samples : micro);
    Program window = window_of_model(&plan, &m, samples);
    check_evaluation(&plan, &m, samples);
    if (!schedule_validate_steps(&window, &plan, &m, error, sizeof error)) {
        fail_msg("seed %" PRIu64 " large %d: %s mode %d rule %d N %d ranks %d slack %d pieces %d "
                 "waits %d pauses %d recompute %d share %d x %d cut %s samples %d of %d units, "
                 "width %d, "
                 "vocab %d: %s",
                 seed, large, m.arch->name, plan.mode, plan.rule, plan.N, plan.ranks, plan.slack,
                 plan.pieces, plan.waits, plan.pauses, plan.recompute, (int)share.run,
                 (int)share.cycle, cut, (int)samples, units, width, vocab, error);
    }
    program_free(&window);
    cyclic_free(&plan);
}
static void test_random_layouts_are_valid(void **state) {
    (void)state;
    const uint64_t seed = test_seed(1) << 32;
    const int small = all_tests() ? 60000 : 600, large = all_tests() ? 3000 : 30;
    // two that were once refused: blocks of distant stages share
    check_layout(UINT64_C(12884902152), false);
    check_layout(UINT64_C(17179869579), false);
    for (int i = 0; i < small; i++) { check_layout(seed + (uint64_t)i, false); }
    for (int i = 0; i < large; i++) { check_layout(seed + (uint64_t)i, true); }
}

// -------------------------------------------------------------------------------------------------
// Refused: one change each to the window, of the first action of this rank, kind, unit or storage,
// micro-batch, and step behind or ahead.

typedef enum {
    SINGLE,
    DATA,
    MODEL,
    ZERO,
    TRIANGLE,
    WAITS,
    DRAWN,
    RECOMPUTES,
    PIECES,
    PIECES_DATA,
    PIECES_TRIANGLE,
    BASES
} Base; // data: 4 ranks, sums by all ways;
        // triangle: 6 ranks; waits: v1 of 3 ranks; drawn: data, samples are drawn; pieces: 2
typedef enum {
    DROP,
    REPEAT,
    UP,
    DOWN,         // by `value` places
    DROP_MESSAGE, // both ends
    REPEAT_MESSAGE,
    MESSAGE_VERSION, // = value, at both ends
    VERSION,
    STORAGE,
    MICRO,
    PEER,
    USE,         // = value
    MESSAGE_USE, // = value, at both ends
    KIND,        // = value
    ROWS,
    STEP // = value
} Change;
typedef struct {
    const char *name;
    Base base;
    int rank;
    ActionKind kind;
    int where, micro, step; // -1: any; step: as it is
    Change change;
    int value;
    const char *expected;
} Damage;
enum { ANY = -1 };
static const Damage damages[] = {
    // versions
    {"not acquired", SINGLE, 0, ACT_ACQUIRE, 2, ANY, 0, DROP, 0,
     "FORWARD unit 1 storage -1 micro-batch 2: not there, or not complete: acquired parameters (2, "
     "0)"},
    {"acquired twice", SINGLE, 0, ACT_ACQUIRE, 2, ANY, 0, REPEAT, 0,
     "ACQUIRE unit -1 storage 2 micro-batch -1: the place is taken: acquired parameters (2, 0)"},
    {"released twice", SINGLE, 0, ACT_RELEASE, 2, ANY, 0, REPEAT, 0,
     "RELEASE unit -1 storage 2 micro-batch -1: not there, or not complete: acquired parameters "
     "(2, 0)"},
    {"the version after next", SINGLE, 0, ACT_ACQUIRE, 2, ANY, 0, VERSION, 1,
     "ACQUIRE unit -1 storage 2 micro-batch -1: not there, or not complete: parameters (2, 1)"},
    {"a version that is gone", DATA, 0, ACT_ACQUIRE, 2, ANY, 1, VERSION, -3,
     "FORWARD unit 1 storage -1 micro-batch 8: not there, or not complete: acquired parameters (2, "
     "0)"},
    {"another version backward", SINGLE, 0, ACT_ACQUIRE, 2, ANY, 0, VERSION, -1,
     "FORWARD unit 1 storage -1 micro-batch 5: not there, or not complete: acquired parameters (2, "
     "0)"},
    {"updated twice", SINGLE, 0, ACT_UPDATE, 2, ANY, 0, REPEAT, 0,
     "UPDATE unit -1 storage 2 micro-batch -1: not there, or not complete: the sum of a gradient "
     "(2, 0)"},
    {"not updated", SINGLE, 0, ACT_UPDATE, 2, ANY, 0, DROP, 0,
     "STATS unit -1 storage -1 micro-batch -1: not there, or not complete: the square of a "
     "gradient (0, 2)"},
    {"updated before the last sum", SINGLE, 0, ACT_UPDATE, 2, ANY, 0, UP, 1,
     "UPDATE unit -1 storage 2 micro-batch -1: not there, or not complete: the sum of a gradient "
     "(2, 0)"},
    {"updated while it is used", SINGLE, 0, ACT_RELEASE, 2, ANY, 0, DROP, 0,
     "ACQUIRE unit -1 storage 2 micro-batch -1: the place is taken: acquired parameters (2, 0)"},
    {"updated by another", DATA, 3, ACT_UPDATE, 2, ANY, 0, KIND, ACT_RELEASE,
     "RELEASE unit -1 storage 2 micro-batch -1: not there, or not complete: acquired parameters "
     "(2, 0)"},
    {"updated before the norm", WAITS, 2, ACT_STATS, ANY, ANY, 0, DOWN, 1,
     "UPDATE unit -1 storage 0 micro-batch -1: not there, or not complete: statistics (0, 0)"},
    // parameters that travel
    {"parameters not sent", DATA, 3, ACT_SEND_PARAMETERS, 2, ANY, 0, DROP_MESSAGE, 0,
     "ACQUIRE unit -1 storage 2 micro-batch -1: not there, or not complete: parameters (2, 1)"},
    {"parameters sent twice", DATA, 3, ACT_SEND_PARAMETERS, 2, ANY, 0, REPEAT_MESSAGE, 0,
     "RECV_PARAMETERS unit -1 storage 2 micro-batch -1: not there, or not complete: the newest "
     "version (2, 0)"},
    {"parameters of another version", DATA, 3, ACT_SEND_PARAMETERS, 2, ANY, 0, MESSAGE_VERSION, 2,
     "SEND_PARAMETERS unit -1 storage 2 micro-batch -1: not there, or not complete: parameters (2, "
     "0)"},
    {"one end of another version", DATA, 3, ACT_SEND_PARAMETERS, 2, ANY, 0, VERSION, 0, "deadlock"},
    {"parameters to nobody", DATA, 3, ACT_SEND_PARAMETERS, 2, ANY, 0, PEER, 3, "deadlock"},
    {"one end missing", DATA, 3, ACT_SEND_PARAMETERS, 2, ANY, 0, DROP, 0, "deadlock"},
    // parameters that come for each use: of three ranks rank 0 owns storages 5 and 6, rank 1
    // storages 3 and 4
    {"a use without parameters", ZERO, 1, ACT_SEND_PARAMETERS, 3, ANY, 0, DROP_MESSAGE, 0,
     "ACQUIRE unit -1 storage 3 micro-batch -1: not there, or not complete: borrowed parameters "
     "(1, 3)"},
    {"parameters for one use twice", ZERO, 1, ACT_SEND_PARAMETERS, 3, ANY, 0, REPEAT_MESSAGE, 0,
     "RECV_PARAMETERS unit -1 storage 3 micro-batch -1: came already: borrowed parameters"},
    {"parameters of the other version", ZERO, 1, ACT_SEND_PARAMETERS, 3, ANY, 0, MESSAGE_VERSION,
     -1,
     "ACQUIRE unit -1 storage 3 micro-batch -1: not there, or not complete: borrowed parameters "
     "(0, 3)"},
    {"parameters for another use", ZERO, 1, ACT_SEND_PARAMETERS, 3, ANY, 0, MESSAGE_USE, 2,
     "ACQUIRE unit -1 storage 3 micro-batch -1: not there, or not complete: borrowed parameters "
     "(1, 3)"},
    {"parameters in the room of another use", ZERO, 0, ACT_ACQUIRE, 3, ANY, 0, USE, 2,
     "ACQUIRE unit -1 storage 3 micro-batch -1: not there, or not complete: the use of a slot (0, "
     "0)"},
    {"a room that is still used", ZERO, 0, ACT_RELEASE, 3, ANY, 0, DROP, 0,
     "ACQUIRE unit -1 storage 3 micro-batch -1: the place is taken: acquired parameters (3, 0)"},
    {"parameters sent by another", ZERO, 2, ACT_SEND_PARAMETERS, 2, ANY, 0, STORAGE, 3,
     "is not here to be sent|deadlock"},
    {"an owner that does not add", ZERO, 1, ACT_ADD, ANY, 0, 0, DROP, 0,
     "REDUCE unit -1 storage 4 micro-batch 1: not there, or not complete: the sum of a gradient "
     "(4, 0)"},
    {"an owner that updates before the last gradient", ZERO, 1, ACT_UPDATE, 3, ANY, 0, UP, 1,
     "UPDATE unit -1 storage 3 micro-batch -1: not there, or not complete: the sum of a gradient "
     "(3, 0)"},
    {"a gradient that is not sent", ZERO, 0, ACT_SEND_SUM, 3, ANY, 0, DROP_MESSAGE, 0,
     "ADD unit -1 storage 3 micro-batch 0: not there, or not complete: a received gradient (3, 0)"},
    // sums
    {"not reduced", SINGLE, 0, ACT_REDUCE, 2, 1, 0, DROP, 0,
     "REDUCE unit -1 storage 2 micro-batch 2: not there, or not complete: the sum of a gradient "
     "(2, 0)"},
    {"reduced twice", SINGLE, 0, ACT_REDUCE, 2, 1, 0, REPEAT, 0,
     "REDUCE unit -1 storage 2 micro-batch 1: not there, or not complete: a gradient (1, 2)"},
    {"reduced before its gradient", SINGLE, 0, ACT_REDUCE, 2, 1, 0, UP, 1,
     "REDUCE unit -1 storage 2 micro-batch 1: not there, or not complete: a gradient (1, 2)"},
    {"reduced as another micro-batch", SINGLE, 0, ACT_REDUCE, 2, 1, 0, MICRO, 2,
     "REDUCE unit -1 storage 2 micro-batch 2: not there, or not complete: a gradient (1, 2)"},
    {"a sum not sent", DATA, 1, ACT_SEND_SUM, ANY, ANY, 0, DROP_MESSAGE, 0,
     "ADD unit -1 storage 6 micro-batch 1: not there, or not complete: a received gradient (6, 0)"},
    {"a sum sent twice", DATA, 1, ACT_SEND_SUM, ANY, ANY, 0, REPEAT_MESSAGE, 0,
     "SEND_SUM unit -1 storage 6 micro-batch 1: not there, or not complete: a gradient (0, 6)"},
    {"a sum of another storage", DATA, 1, ACT_SEND_SUM, ANY, ANY, 0, STORAGE, 0, "deadlock"},
    {"a sum of another micro-batch", DATA, 1, ACT_SEND_SUM, ANY, ANY, 0, MICRO, 2, "deadlock"},
    {"a part not added", DATA, 0, ACT_ADD, ANY, 1, 0, DROP, 0,
     "RECV_SUM unit -1 storage 6 micro-batch 2: the place is taken: a received gradient (6, 0)"},
    {"a part added twice", DATA, 0, ACT_ADD, ANY, 1, 0, REPEAT, 0,
     "ADD unit -1 storage 6 micro-batch 1: not there, or not complete: a received gradient (6, 0)"},
    {"a part added before its turn", DATA, 0, ACT_ADD, ANY, 1, 0, MICRO, 2,
     "ADD unit -1 storage 6 micro-batch 2: not there, or not complete: a received gradient (6, 0)"},
    {"a piece not added", PIECES, 0, ACT_REDUCE, 2, 0, 0, DROP, 0,
     "REDUCE unit -1 storage 2 micro-batch 1: not there, or not complete: a gradient (3, 2)"},
    {"a piece added twice", PIECES, 0, ACT_REDUCE, 2, 0, 0, REPEAT, 0,
     "REDUCE unit -1 storage 2 micro-batch 0: not there, or not complete: a gradient (1, 2)"},
    {"a piece added as another", PIECES_DATA, 1, ACT_REDUCE, 2, 1, 0, MICRO, 5,
     "REDUCE unit -1 storage 2 micro-batch 5: not there, or not complete: a gradient (1, 2)"},
    {"a sum sent before its last piece", PIECES_DATA, 1, ACT_REDUCE, 2, 5, 0, DROP, 0,
     "SEND_SUM unit -1 storage 2 micro-batch 5: not there, or not complete: a gradient (3, 2)"},
    {"updated before the last piece", PIECES, 0, ACT_UPDATE, 2, ANY, 0, UP, 1,
     "UPDATE unit -1 storage 2 micro-batch -1: not there, or not complete: the sum of a gradient "
     "(2, 0)"},
    {"a part not added by the owner", DATA, 3, ACT_ADD, ANY, 1, 0, DROP, 0,
     "RECV_SUM unit -1 storage 2 micro-batch 2: the place is taken: a received gradient (2, 0)"},
    // compute and places
    {"a forward twice", SINGLE, 0, ACT_FORWARD, 2, ANY, 1, REPEAT, 0,
     "FORWARD unit 2 storage -1 micro-batch 0: the place is taken: activations (2, 0)"},
    {"no forward", SINGLE, 0, ACT_FORWARD, 2, ANY, 1, DROP, 0,
     "FORWARD unit 3 storage -1 micro-batch 0: not there, or not complete: the input of a unit (3, "
     "0)"},
    {"no weight part", SINGLE, 0, ACT_BACKWARD_WEIGHT, 2, ANY, 0, DROP, 0,
     "REDUCE unit -1 storage 3 micro-batch 0: not there, or not complete: a gradient (1, 2)"},
    {"no input part", SINGLE, 0, ACT_BACKWARD_INPUT, 2, ANY, 0, DROP, 0,
     "BACKWARD_WEIGHT unit 2 storage -1 micro-batch 0: none is taken: places of weight parts"},
    {"of other rows", SINGLE, 0, ACT_BACKWARD_INPUT, 2, ANY, 0, ROWS, 0,
     "BACKWARD_WEIGHT unit 2 storage -1 micro-batch 0: none is taken: places of weight parts"},
    {"not computed again", RECOMPUTES, 0, ACT_RECOMPUTE, 2, ANY, 0, DROP, 0,
     "BACKWARD_INPUT unit 2 storage -1 micro-batch 0: not there, or not complete: recomputed "
     "activations (0, 0)"},
    // messages of stages
    {"activations not sent", MODEL, 0, ACT_SEND_FORWARD, ANY, ANY, 0, DROP_MESSAGE, 0,
     "FORWARD unit 2 storage -1 micro-batch 2: not there, or not complete: the input of a unit (2, "
     "0)"},
    {"activations sent twice", MODEL, 0, ACT_SEND_FORWARD, ANY, ANY, 0, REPEAT_MESSAGE, 0,
     "FORWARD unit 2 storage -1 micro-batch 2: not there, or not complete: the input of a unit (2, "
     "0)"},
    {"gradients not sent", MODEL, 1, ACT_SEND_BACKWARD, ANY, ANY, 0, DROP_MESSAGE, 0,
     "BACKWARD_INPUT unit 1 storage -1 micro-batch 0: not there, or not complete: the gradient of "
     "its output (2, 0)"},
    {"the head's part not sent", MODEL, 2, ACT_SEND_PART, 0, ANY, 0, DROP_MESSAGE, 0,
     "REDUCE unit -1 storage 0 micro-batch 1: not there, or not complete: a gradient (2, 1)"},
    {"the head's part sent twice", MODEL, 2, ACT_SEND_PART, 0, ANY, 0, REPEAT_MESSAGE, 0,
     "SEND_PART unit -1 storage 0 micro-batch 1: not there, or not complete: a gradient (2, 0)"},
    // triangles, in which stage 1 is of ranks 3 and 4, and has storages 3 and 4. A change is of the
    // windows of even steps
    {"of another's turn", TRIANGLE, 3, ACT_FORWARD, 2, ANY, 0, DROP, 0,
     "FORWARD unit 3 storage -1 micro-batch 2: not there, or not complete: the input of a unit (3, "
     "0)"},
    {"a turn's gradient not sent", TRIANGLE, 4, ACT_SEND_SUM, ANY, ANY, 0, DROP_MESSAGE, 0,
     "ADD unit -1 storage 4 micro-batch 1: not there, or not complete: a received gradient (4, 0)"},
    {"a turn's gradient sent twice", TRIANGLE, 4, ACT_SEND_SUM, ANY, ANY, 0, REPEAT_MESSAGE, 0,
     "SEND_SUM unit -1 storage 4 micro-batch 1: not there, or not complete: a gradient (0, 4)"},
    {"a turn's gradient not added", TRIANGLE, 3, ACT_ADD, ANY, ANY, 0, DROP, 0,
     "REDUCE unit -1 storage 4 micro-batch 2: not there, or not complete: the sum of a gradient "
     "(4, 0)"},
    {"a turn without the new version", TRIANGLE, 3, ACT_SEND_PARAMETERS, ANY, ANY, 0, DROP_MESSAGE,
     0, "ACQUIRE unit -1 storage 3 micro-batch -1: not there, or not complete: parameters (3, 1)"},
    {"a turn's version twice", TRIANGLE, 3, ACT_SEND_PARAMETERS, ANY, ANY, 0, REPEAT_MESSAGE, 0,
     "RECV_PARAMETERS unit -1 storage 3 micro-batch -1: not there, or not complete: the newest "
     "version (3, 0)"},
    {"a stage that is not updated", TRIANGLE, 3, ACT_UPDATE, ANY, ANY, 0, DROP, 0,
     "STATS unit -1 storage -1 micro-batch -1: not there, or not complete: the square of a "
     "gradient (0, 4)"},
    {"the head's part to another's turn", TRIANGLE, 5, ACT_SEND_PART, 0, ANY, 0, PEER, 3,
     "deadlock"},
    {"a turn's piece not added", PIECES_TRIANGLE, 4, ACT_ADD, ANY, ANY, 0, DROP, 0,
     "REDUCE unit -1 storage 4 micro-batch 1: not there, or not complete: a gradient (3, 4)"},
    {"a turn's piece not sent", PIECES_TRIANGLE, 3, ACT_SEND_SUM, ANY, ANY, 0, DROP_MESSAGE, 0,
     "ADD unit -1 storage 4 micro-batch 0: not there, or not complete: a received gradient (4, 0)"},
    // the tally
    {"a rank does not add", DATA, 1, ACT_STATS, ANY, ANY, -1, DROP, 0,
     "SEND_STATS unit -1 storage -1 micro-batch -1: not there, or not complete: statistics (0, 0)"},
    {"a rank adds twice", DATA, 1, ACT_STATS, ANY, ANY, -1, REPEAT, 0,
     "STATS unit -1 storage -1 micro-batch -1: not there, or not complete: received statistics (0, "
     "0)"},
    {"a rank adds before it is done", DRAWN, 3, ACT_STATS, ANY, ANY, 0, UP, 30,
     "STATS unit -1 storage -1 micro-batch -1: not there, or not complete: the square of a "
     "gradient (0, 0)"},
    {"a rank adds a step that is under way", DATA, 0, ACT_STATS, ANY, ANY, -1, STEP, 0,
     "SEND_STATS unit -1 storage -1 micro-batch -1: not there, or not complete: statistics (0, 0)"},
    {"a rank adds when its losses are gone", DATA, 3, ACT_STATS, ANY, ANY, -1, STEP, -2,
     "SEND_STATS unit -1 storage -1 micro-batch -1: not there, or not complete: statistics (0, 0)"},
    {"a tally not sent", DATA, 1, ACT_SEND_STATS, ANY, ANY, -1, DROP_MESSAGE, 0,
     "STATS unit -1 storage -1 micro-batch -1: not there, or not complete: received statistics (0, "
     "0)"},
    {"a collective", SINGLE, 0, ACT_REDUCE, 2, ANY, 0, KIND, ACT_PREFETCH,
     "is no part of these schedules"},
};
static CyclicPlan base_plan(Base base) {
    const bool data = base == DATA || base == DRAWN || base == PIECES_DATA;
    const int N = data ? 4 : 3;
    const CyclicMode mode = data || base == WAITS ? CYCLIC_DATA
                            : base == MODEL       ? CYCLIC_MODEL
                            : base == ZERO        ? CYCLIC_ZERO
                                                  : CYCLIC_SINGLE;
    if (base == TRIANGLE || base == PIECES_TRIANGLE) {
        return triangle_of(CYCLIC_V2, 3, 0, 6, base == TRIANGLE ? 1 : 2);
    }
    CyclicPlan p = plan_of(base == WAITS ? CYCLIC_V1 : CYCLIC_V2, mode, N, 0, 6);
    p.waits = base == WAITS;
    p.drawn = base == DRAWN;
    p.recompute = base == RECOMPUTES;
    p.pieces = base == PIECES || base == PIECES_DATA ? 2 : 1;
    return p;
}
static int find_action(const Schedule *s, const Damage *d) {
    for (int i = 0; i < s->count; i++) {
        const Action *a = &s->actions[i];
        const bool place = d->where < 0 || a->unit == d->where || a->storage == d->where;
        if (a->kind == d->kind && place && (d->micro < 0 || a->micro == d->micro) &&
            a->step == d->step) {
            return i;
        }
    }
    fail_msg("%s: there is no such action", d->name);
    return -1;
}
static void move_action(Schedule *s, int from, int to) {
    const Action a = s->actions[from];
    for (int i = from; i != to; i += to > from ? 1 : -1) {
        s->actions[i] = s->actions[to > from ? i + 1 : i - 1];
    }
    s->actions[to] = a;
}
static void drop_action(Schedule *s, int i) {
    move_action(s, i, s->count - 1);
    s->count--;
}
static void repeat_action(Schedule *s, int i) {
    schedule_add(s, s->actions[i]);
    move_action(s, s->count - 1, i);
}
static void damage(Program *p, const Damage *d) {
    Schedule *s = &p->rank[d->rank], *t = s;
    const int i = find_action(s, d);
    Action *a = &s->actions[i];
    int j = 0;
    if (action_sends(a->kind)) { // where it is received
        t = &p->rank[a->peer];
        while (!actions_match(a, d->rank, &t->actions[j], a->peer)) { j++; }
    }
    switch (d->change) {
    case DROP: drop_action(s, i); break;
    case REPEAT: repeat_action(s, i); break;
    case UP: move_action(s, i, i - d->value); break;
    case DOWN: move_action(s, i, i + d->value); break;
    case DROP_MESSAGE: drop_action(s, i), drop_action(t, j); break;
    case REPEAT_MESSAGE: repeat_action(s, i), repeat_action(t, j); break;
    case MESSAGE_VERSION: a->version = t->actions[j].version = d->value; break;
    case VERSION: a->version = d->value; break;
    case STORAGE: a->storage = d->value; break;
    case MICRO: a->micro = d->value; break;
    case PEER: a->peer = d->value; break;
    case USE: a->use = d->value; break;
    case MESSAGE_USE: a->use = t->actions[j].use = d->value; break;
    case KIND: a->kind = (ActionKind)d->value; break;
    case ROWS: a->rows = d->value; break;
    case STEP: a->step = d->value; break;
    }
}
// Is one of the texts, which bars divide, in the error?
static bool says(const char *error, const char *texts) {
    char all[300];
    bool found = false;
    snprintf(all, sizeof all, "%s", texts);
    for (char *save, *text = strtok_r(all, "|", &save); text; text = strtok_r(NULL, "|", &save)) {
        found = found || strstr(error, text);
    }
    return found;
}
static void test_damage_is_refused(void **state) {
    (void)state;
    int wrong = 0;
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        const Damage *d = &damages[i];
        CyclicPlan plan = base_plan(d->base);
        const GptModel m = model_of(6);
        Program window = window_of(&plan, plan.N * plan.pieces);
        char error[400];
        assert_true(schedule_validate_steps(&window, &plan, &m, error, sizeof error));
        damage(&window, d);
        const bool valid = schedule_validate_steps(&window, &plan, &m, error, sizeof error);
        if (valid || !says(error, d->expected)) {
            print_error("%s: expected \"%s\", found %s\"%s\"\n", d->name, d->expected,
                        valid ? "VALID " : "", error);
            wrong++;
        }
        program_free(&window);
        cyclic_free(&plan);
    }
    assert_int_equal(wrong, 0);
}

// Random single mutations of windows: of each base, and of plans with other rules.
static void test_mutations_are_refused_or_harmless(void **state) {
    (void)state;
    static const char *const names[] = {
        "single v2",         "data v2",         "model v2",           "zero v2",
        "triangle v2",       "data v1, waits",  "data v2, drawn",     "single v2, recompute",
        "single v2, pieces", "data v2, pieces", "triangle v2, pieces"};
    const uint64_t seed = test_seed(1) << 20;
    const int each = all_tests() ? 2000 : 100;
    for (int base = 0; base < BASES; base++) {
        Verdicts sum = {.all = 0};
        for (int i = 0; i < 5; i++) { // v2 and v1, a tied table and one of the head's own, slack
            CyclicPlan plan = base_plan((Base)base);
            GptModel m = gpt_model(dense_config_of(i, 4));
            plan.untied = !gpt_is_tied(&m);
            plan.rule = i == 1 || base == WAITS ? CYCLIC_V1 : CYCLIC_V2;
            plan.slack = i == 2;
            Program window = window_of_model(&plan, &m, plan.N * plan.pieces + i % 2);
            const MutationCase of = {.cyclic = &plan, .model = &m, .steps = 4};
            Program steps = cyclic_unroll(&window, &plan, 4, 4);
            assert_times_follow_touches(names[base], &steps, &plan, &m, seed + i);
            cyclic_window_free(&steps);
            mutate_program(&window, &of, names[base], each, seed + i, &sum);
            program_free(&window);
            cyclic_free(&plan);
        }
        mutations_print(names[base], &sum);
    }
}

// Each predecessor that is forgotten lets some order compute something else, or wait for ever, or it
// changes nothing.
static void test_predecessors_are_needed(void **state) {
    (void)state;
    int needed = 0, all = 0;
    CyclicPlan plan = plan_of(CYCLIC_V2, CYCLIC_DATA, 3, 0, 5);
    const GptModel m = next_model(&plan, 5);
    Program window = window_of_model(&plan, &m, 4), program = cyclic_unroll(&window, &plan, 5, 5);
    const uint64_t expected = values_at_end(&program, &plan, &m);
    for (int i = 0; i < window.rank[0].count; i++) {
        Order order = window_order(&window, &plan, &m, 0);
        const bool has = order.part[1][i].count > 0;
        order_free(&order);
        for (uint64_t seed = 0; seed < 8 && has; seed++) {
            if (orders_values(&window, &plan, &m, 5, seed, i) != expected) {
                needed++;
                break;
            }
        }
        all += has;
    }
    assert_true(all > 10);
    assert_true(2 * needed > all);
    cyclic_window_free(&program);
    program_free(&window);
    cyclic_free(&plan);
}

// -------------------------------------------------------------------------------------------------
// Stability: the limit of steps on a quadratic. A stage of curvature 1, whose gradient for a
// micro-batch is the version that this has: the share f of fresh ones makes theta -= a (f theta +
// (1 - f) before), which has roots of z^2 - (1 - a f) z + a (1 - f): a is below 1 / (1 - f), and
// below 2 / (2 f - 1) where f > 1 / 2. So 1 for v1, 2 for plain training.
static double after_steps(const CyclicPlan *p, int stage, double rate) {
    float theta[2] = {1, 1}, momentum = 0; // of even and odd steps
    Stream s;
    memset(&s, 0, sizeof s);
    s.threads = 1;
    OptimizerStep o;
    memset(&o, 0, sizeof o);
    o.lr = (float)rate;
    o.grad_scale = 1;
    for (int step = 0; step < 4000; step++) {
        double sum = 0;
        for (int micro = 0; micro < p->N; micro++) {
            sum += (double)theta[(step + !cyclic_fresh(p, micro, stage)) & 1];
        }
        const float mean = (float)(sum / p->N);
        theta[(step + 1) & 1] = theta[step & 1];
        const UpdateSlice u = {
            .master = &theta[(step + 1) & 1],
            .moment = {&momentum},
            .grad = &mean,
            .param = NULL,
            .dtype = DTYPE_FP32,
            .n = 1,
        };
        ops_sgd(&s, u, o);
        if (!(fabs((double)theta[0]) + fabs((double)theta[1]) < 1e6)) { return INFINITY; }
    }
    return fabs((double)theta[0]) + fabs((double)theta[1]);
}
static void test_stability(void **state) {
    (void)state;
    for (int N = 1; N <= 8; N++) {
        for (int slack = -1; slack <= N; slack++) { // -1: v1
            CyclicPlan p = plan_of(slack < 0 ? CYCLIC_V1 : CYCLIC_V2, CYCLIC_SINGLE, N,
                                   (int)max_i64(slack, 0), N);
            for (int stage = 0; stage < N; stage++) {
                double f = 0;
                for (int micro = 0; micro < N; micro++) {
                    f += (double)cyclic_fresh(&p, micro, stage) / N;
                }
                const double limit =
                    fmin(f < 1 ? 1 / (1 - f) : INFINITY, f > 0.5 ? 2 / (2 * f - 1) : INFINITY);
                if (slack < 0) { assert_true(limit == 1); }
                assert_true(after_steps(&p, stage, 0.98 * limit) < 1e-3);
                assert_true(after_steps(&p, stage, 1.02 * limit) > 1e3);
            }
            cyclic_free(&p);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_invariants),
        cmocka_unit_test(test_single_is_all_of_data),
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_triangles),
        cmocka_unit_test(test_triangles_send),
        cmocka_unit_test(test_versions),
        cmocka_unit_test(test_fresh_are_those_that_can_be),
        cmocka_unit_test(test_slack),
        cmocka_unit_test(test_routes),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_owners),
        cmocka_unit_test(test_all_are_valid),
        cmocka_unit_test(test_all_are_valid_late),
        cmocka_unit_test(test_shared_blocks_are_valid),
        cmocka_unit_test(test_triangles_are_valid),
        cmocka_unit_test(test_random_layouts_are_valid),
        cmocka_unit_test(test_damage_is_refused),
        cmocka_unit_test(test_mutations_are_refused_or_harmless),
        cmocka_unit_test(test_predecessors_are_needed),
        cmocka_unit_test(test_stability),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
