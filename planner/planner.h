// planner.h: chooses which ranks compute which units (DAPPLE, arXiv 2007.01045, section 4):
// partition, replicas, placement, micro-batch, recomputation and warm-up of a pipeline.
//
// Decision   schedule_simulate() decides, on the program that schedule_pipeline() makes of a plan,
//            with one rank for each stage, transfers and all-reduces included. A stage's all-reduce
//            begins with the first gradients of its last micro-batch, as in a real run.
// Bound      Each plan has a time that no schedule of it beats (plan_bound). Plans with the
//            smallest bound are simulated first; plans whose bound is no better than the worst of
//            the beam are not simulated.
// Search     A beam search. It starts from even stages, from all pairs of stages, and from the
//            stages that are balanced together with their replicas and links (balanced_stages.h).
//            It splits stages (the paper's transition, equation 5), merges them and moves units and
//            replicas between them. The best plans are kept in the beam, and each is changed in
//            every way until none gets better.
#ifndef PLANNER_H
#define PLANNER_H

#include "base/base.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "planner/balanced_stages.h"
#include "planner/plan_costs.h"
#include "planner/plan_task.h"
#include "planner/planner_model.h"

// -------------------------------------------------------------------------------------------------
// Search
// Plans that the beam keeps at most; of them with the same number of stages and micro-batch.
enum { PLAN_BEAM = 32, PLAN_ALIKE = 2 };
// maximum of stages x micro-batches: half a GiB of actions to replay
enum { PLAN_STAGE_BATCHES = 1 << 20 };
typedef struct {
    StagePlan plan;
    double bound, step_s;
    // its neighbours have been tried; all of its micro-batches were replayed
    bool tried, replayed;
} Candidate;
typedef struct {
    const PlanTask *task;
    bool zero_bubble;     // zero-bubble schedules are among the choices
    int *ranks, *scratch; // buffers of plan_place()
    PlanCosts costs;      // costs of the plan that is examined
    int64_t *divisors;    // [divisor_count] of the samples, ascending: sizes of micro-batches
    int divisor_count;
    Candidate beam[PLAN_BEAM]; // the best plans so far, the fastest first
    // plans in the beam; maximum (smaller for large tasks, whose plans take longer to examine)
    int found, keep;
    Candidate *pool; // plans to be simulated
    int pooled;
    int64_t pool_capacity;
    // [seen_capacity] hash table (open addressing) of checksums of the costs of plans seen
    uint64_t *seen;
    size_t seen_count, seen_capacity;
    int64_t bounded, simulated, work; // work: stages x micro-batches replayed
} Planner;

static inline Planner planner_make(const PlanTask *t) {
    const size_t seen = 1 << 12;
    Planner p = {.task = t,
                 .ranks = new_array(int, task_ranks(t), "planner"),
                 .scratch = new_array(int, 2 * t->cluster.nodes, "planner"),
                 .keep = t->model->units * task_ranks(t) <= 4096 ? PLAN_BEAM : PLAN_BEAM / 4,
                 .seen = new_array(uint64_t, seen, "planner"),
                 .seen_capacity = seen};
    int64_t capacity = 0;
    for (int64_t b = 1; b <= t->samples; b++) {
        if (t->samples % b) { continue; }
        p.divisors = grow_array(int64_t, p.divisors, p.divisor_count, &capacity, "planner");
        p.divisors[p.divisor_count++] = b;
    }
    return p;
}
static inline void planner_free(Planner *p) {
    free_all(p->ranks, p->scratch, p->divisors, p->pool, p->seen);
    memset(p, 0, sizeof *p);
}

// Return whether a plan with the same costs has been seen, and note it: by checksum, by plan.
static inline bool planner_saw_key(Planner *p, uint64_t key) {
    size_t i = key & (p->seen_capacity - 1);
    for (; p->seen[i]; i = (i + 1) & (p->seen_capacity - 1)) {
        if (p->seen[i] == key) { return true; }
    }
    p->seen[i] = key;
    p->seen_count++;
    return false;
}
static inline bool planner_saw(Planner *p, const StagePlan *plan) {
    const PlanCosts *c = &p->costs;
    const double *const parts[] = {c->forward, c->backward,  c->weight,
                                   c->send,    c->send_back, c->reduce_late};
    Checksum sum = checksum_begin();
    checksum_add(&sum, &c->micro_batches, sizeof c->micro_batches);
    checksum_add(&sum, &plan->kind, sizeof plan->kind);
    checksum_add(&sum, c->live, c->stages * sizeof(int));
    checksum_add(&sum, plan->replicas, c->stages * sizeof(int));
    for (int i = 0; i < 6; i++) { checksum_add(&sum, parts[i], c->stages * sizeof(double)); }
    if (2 * p->seen_count > p->seen_capacity) {
        uint64_t *old = p->seen;
        size_t capacity = p->seen_capacity;
        p->seen_capacity *= 2;
        p->seen_count = 0;
        p->seen = new_array(uint64_t, p->seen_capacity, "planner");
        for (size_t i = 0; i < capacity; i++) {
            if (old[i]) { planner_saw_key(p, old[i]); }
        }
        free(old);
    }
    return planner_saw_key(p, checksum_end(&sum) | 1);
}
// Returns the position in the beam that a plan would take: that of the worst plan alike (as many
// stages, same micro-batch) if PLAN_ALIKE of those are kept, else the end or, if the beam is full,
// that of the worst.
static inline int planner_worst(const Planner *p, const StagePlan *plan) {
    int alike = 0, worst = p->found;
    for (int i = 0; i < p->found; i++) {
        const StagePlan *q = &p->beam[i].plan;
        if (q->stages == plan->stages && q->micro_batch == plan->micro_batch) {
            alike++;
            worst = i;
        }
    }
    return alike >= PLAN_ALIKE ? worst : min_i64(p->found, p->keep - 1);
}
// Returns the time that a plan must beat: that of the plan it would replace, and 1.1 times the
// best.
static inline double planner_limit(const Planner *p, const StagePlan *plan) {
    const double near_best = 1.1;
    int worst = planner_worst(p, plan);
    double limit = p->found ? near_best * p->beam[0].step_s : INFINITY;
    return worst < p->found ? min_f64(limit, p->beam[worst].step_s) : limit;
}

// Computes a plan's ranks and costs. Returns false if it does not fit the memory, or the experts.
static inline bool planner_look(Planner *p, const StagePlan *plan) {
    if (!plan_divides_experts(p->task->model, plan)) { return false; }
    plan_place(p->task, plan, p->ranks, p->scratch);
    return plan_costs(p->task, plan, p->ranks, &p->costs);
}
// Returns whether a plan fits the memory, is short enough to replay, and may be better than the
// worst of the beam, wherever its ranks are.
static inline bool planner_may_add(Planner *p, const StagePlan *plan) {
    const bool replayable =
        plan->stages * (p->task->samples / plan->micro_batch) <= PLAN_STAGE_BATCHES;
    p->bounded++;
    return replayable && plan_is_short(p->task, plan) &&
           plan_costs_anywhere(p->task, plan, &p->costs) &&
           plan_bound(&p->costs) < planner_limit(p, plan);
}
// Puts such a plan into the pool if it is new, and may be better than the worst of the beam.
static inline void planner_add_here(Planner *p, const StagePlan *plan) {
    planner_look(p, plan);
    if (planner_saw(p, plan)) { return; }
    double bound = plan_bound(&p->costs);
    if (bound >= planner_limit(p, plan)) { return; }
    const Candidate c = {.plan = *plan, .bound = bound};
    p->pool = grow_array(Candidate, p->pool, p->pooled, &p->pool_capacity, "plans");
    p->pool[p->pooled++] = c;
}
static inline void planner_add(Planner *p, const StagePlan *plan) {
    if (planner_may_add(p, plan)) { planner_add_here(p, plan); }
}
static inline int candidate_order(const void *a, const void *b) {
    double x = ((const Candidate *)a)->bound, y = ((const Candidate *)b)->bound;
    return (x > y) - (x < y);
}
static inline void planner_keep(Planner *p, const Candidate *c) {
    if (c->step_s >= planner_limit(p, &c->plan)) { return; }
    int at = planner_worst(p, &c->plan);
    if (at == p->found) { p->found++; }
    for (; at > 0 && p->beam[at - 1].step_s > c->step_s; at--) { p->beam[at] = p->beam[at - 1]; }
    p->beam[at] = *c;
}
// Has the search replayed as much as it may? It always has one plan, if any fits.
static inline bool planner_is_spent(const Planner *p) {
    return p->found && p->task->most_work && p->work >= p->task->most_work;
}
// Simulates the pool, the most promising plans first, and keeps the best in the beam.
static inline void planner_run(Planner *p) {
    if (p->pooled) { qsort(p->pool, p->pooled, sizeof(Candidate), candidate_order); }
    for (int i = 0; i < p->pooled && !planner_is_spent(p); i++) {
        Candidate *c = &p->pool[i];
        if (c->bound >= planner_limit(p, &c->plan)) { continue; }
        planner_look(p, &c->plan);
        keep_alive(); // other ranks may be waiting
        c->step_s = plan_simulate(&c->plan, &p->costs);
        p->simulated++;
        p->work += plan_simulated_batches(&c->plan, p->costs.micro_batches) * c->plan.stages;
        planner_keep(p, c);
    }
    p->pooled = 0;
}

// Returns how many placement policies to try: one if all choices are the same, because the nodes do
// not matter, and where neighbours share experts; all but the last if all nodes are alike.
static inline int planner_policies(const Planner *p) {
    const Cluster *c = &p->task->cluster;
    const bool even = cluster_is_even(c) && cluster_is_alike(c);
    if (c->nodes == 1 || (even && c->ranks == 1) || p->task->model->expert_ranks) { return 1; }
    return even ? PLACE_LAST : PLACE_POLICIES;
}
// Adds a plan with each placement policy of stage s. The ranks of s and of later stages follow from
// it.
static inline void planner_add_placed(Planner *p, StagePlan plan, int s) {
    const int policies = planner_may_add(p, &plan) ? planner_policies(p) : 0;
    for (int policy = 0; policy < policies; policy++) {
        plan.policy[s] = (unsigned char)policy;
        planner_add_here(p, &plan);
    }
}
// The same, with the plan's cuts and with balanced ones.
static inline void planner_add_both(Planner *p, StagePlan plan, int s) {
    planner_add_placed(p, plan, s);
    plan_balance(p->task, &plan);
    planner_add_placed(p, plan, s);
}
// Splits stage s in two. The first gets `units` of its units and `replicas` of its replicas.
static inline StagePlan plan_split(const StagePlan *p, int s, int units, int replicas) {
    StagePlan q = *p;
    q.stages++;
    for (int i = q.stages - 1; i > s; i--) {
        q.units[i] = p->units[i - 1];
        q.replicas[i] = p->replicas[i - 1];
        q.policy[i] = p->policy[i - 1];
    }
    q.units[s] = units;
    q.replicas[s] = replicas;
    q.units[s + 1] -= units;
    q.replicas[s + 1] -= replicas;
    return q;
}
// Merges stage s with the next one.
static inline StagePlan plan_merge(const StagePlan *p, int s) {
    StagePlan q = *p;
    q.stages--;
    q.units[s] += p->units[s + 1];
    q.replicas[s] += p->replicas[s + 1];
    for (int i = s + 1; i < q.stages; i++) {
        q.units[i] = p->units[i + 1];
        q.replicas[i] = p->replicas[i + 1];
        q.policy[i] = p->policy[i + 1];
    }
    // one stage has nothing to fill with weight parts
    if (q.stages == 1 && q.kind == PIPELINE_ZERO_BUBBLE) { q.kind = PIPELINE_DAPPLE; }
    return q;
}
// Adds splits of a stage. A stage of few units is cut everywhere; one of many units near the cut
// that balances the two parts by their replicas, and at some others.
static inline void planner_add_splits(Planner *p, const StagePlan *plan, int s) {
    enum { MANY = 48, NEAR = 3 };
    const PlanModel *m = p->task->model;
    int first = 0;
    for (int i = 0; i < s; i++) { first += plan->units[i]; }
    const int stride = ceil_div(plan->units[s], MANY), end = first + plan->units[s];
    const double rows = plan_rows(plan->micro_batch, plan->replicas[s]),
                 time_s = plan_units_seconds(m, first, end, rows);
    for (int i = 0, r; plan->stages < PLAN_STAGES &&
                       (r = split_choice(plan->replicas[s], p->task->cluster.ranks, i));
         i++) {
        int balanced = 1;
        while (first + balanced + 1 < end && plan_units_seconds(m, first, first + balanced, rows) <
                                                 time_s * r / plan->replicas[s]) {
            balanced++;
        }
        for (int units = 1; units < plan->units[s]; units++) {
            if (units % stride && abs(units - balanced) > NEAR) { continue; }
            StagePlan q = plan_split(plan, s, units, r);
            const int policies = planner_may_add(p, &q) ? planner_policies(p) : 0;
            for (int policy = 0; policy < policies; policy++) {
                q.policy[s] = q.policy[s + 1] = (unsigned char)policy;
                planner_add_here(p, &q);
            }
        }
    }
}
// Adds plans that move units or replicas from stage s to another. Units move to the next stage, or
// to the one after it, past the units in between.
static inline void planner_add_moves(Planner *p, const StagePlan *plan, int s) {
    static const int shifts[] = {1, 2, 4, 8, -1, -2, -4, -8};
    for (int k = 0; k < 16; k++) {
        int to = s + 1 + k / 8, by = shifts[k % 8];
        if (to >= plan->stages || plan->units[s] <= by || plan->units[to] <= -by) { continue; }
        StagePlan q = *plan;
        q.units[s] -= by;
        q.units[to] += by;
        planner_add(p, &q);
    }
    for (int to = 0; to < plan->stages; to++) {
        bool close = plan->stages <= 8 || to == s + 1 || to + 1 == s;
        for (int by = 1; to != s && close && by < plan->replicas[s];
             by = 2 * by + (by == 1 ? p->task->cluster.ranks - 2 : 0)) {
            StagePlan q = *plan;
            q.replicas[s] -= by;
            q.replicas[to] += by;
            planner_add_both(p, q, s);
            if (p->task->cluster.ranks < 2) { break; }
        }
    }
}
static inline bool planner_allows_micro_batch(const Planner *p, int64_t micro_batch) {
    return !p->task->micro_batch || micro_batch == p->task->micro_batch;
}
// The settings of all stages of a plan. planner_add_settings adds a plan with each micro-batch and
// setting; balanced_too: also with balanced cuts.
typedef struct {
    PipelineKind kind;
    Warmup warmup;
    bool recompute;
} PlanSetting;
enum { PLAN_SETTINGS = 5 };
static const PlanSetting plan_settings[PLAN_SETTINGS] = {{PIPELINE_DAPPLE, WARMUP_A, false},
                                                         {PIPELINE_DAPPLE, WARMUP_B, false},
                                                         {PIPELINE_DAPPLE, WARMUP_A, true},
                                                         {PIPELINE_DAPPLE, WARMUP_B, true},
                                                         {PIPELINE_ZERO_BUBBLE, WARMUP_A, false}};
static inline void planner_add_settings(Planner *p, const StagePlan *plan, bool balanced_too) {
    for (int i = 0; i < PLAN_SETTINGS * p->divisor_count; i++) {
        const PlanSetting *setting = &plan_settings[i % PLAN_SETTINGS];
        StagePlan q = *plan;
        q.micro_batch = p->divisors[i / PLAN_SETTINGS];
        q.warmup = setting->warmup;
        q.recompute = setting->recompute;
        if (q.kind != PIPELINE_GPIPE) { q.kind = setting->kind; }
        bool wanted = setting->kind != PIPELINE_ZERO_BUBBLE ||
                      (p->zero_bubble && q.stages > 1 && q.kind == setting->kind);
        if (!wanted || !planner_allows_micro_batch(p, q.micro_batch) ||
            (q.recompute && isinf(p->task->memory))) {
            continue;
        }
        planner_add(p, &q);
        if (balanced_too) {
            plan_balance(p->task, &q);
            planner_add(p, &q);
        }
    }
}
static inline void planner_add_neighbours(Planner *p, const StagePlan *plan) {
    for (int s = 0; s < plan->stages; s++) {
        planner_add_splits(p, plan, s);
        planner_add_moves(p, plan, s);
        if (s + 1 < plan->stages) { planner_add_both(p, plan_merge(plan, s), s); }
        planner_add_placed(p, *plan, s);
    }
    for (int policy = 0; policy < planner_policies(p); policy++) {
        StagePlan q = *plan;
        memset(q.policy, policy, sizeof q.policy);
        planner_add(p, &q);
    }
    planner_add_settings(p, plan, true);
}
static inline int task_most_stages(const PlanTask *t) {
    return min_i64(min_i64(t->model->units, task_ranks(t)), PLAN_STAGES);
}

// Replays the best plan of the beam with all its micro-batches, until the best one has been
// replayed.
static inline void planner_finish(Planner *p) {
    while (p->found && !p->beam[0].replayed) {
        Candidate first = p->beam[0];
        planner_look(p, &first.plan);
        first.step_s = plan_replay(&first.plan, &p->costs, p->costs.micro_batches);
        first.replayed = true;
        memmove(p->beam, p->beam + 1, (size_t)--p->found * sizeof(Candidate));
        planner_keep(p, &first);
    }
}
// Returns the best of the plans that were added, with 0 stages if nothing fits. Frees the planner.
static inline Candidate planner_best(Planner *p) {
    Candidate best = {};
    planner_run(p);
    planner_finish(p);
    if (p->found) { best = p->beam[0]; }
    planner_free(p);
    return best;
}
// Returns the best plan with these stages and any micro-batch, recomputation and warm-up that the
// task permits. It has 0 stages if nothing fits.
static inline Candidate plan_best_setting(const PlanTask *t, const StagePlan *plan) {
    Planner p = planner_make(t);
    if (plan->stages) { planner_add_settings(&p, plan, false); }
    return planner_best(&p);
}

// Adds all partitions, replicas and policies from this unit and rank on (recursive).
static inline void planner_add_all(Planner *p, StagePlan *plan, int unit, int rank) {
    const int s = plan->stages, units = p->task->model->units - unit,
              ranks = task_ranks(p->task) - rank;
    if (!units && !ranks) { planner_add_settings(p, plan, false); }
    for (int u = 1; u <= units; u++) {
        for (int r = 1; r <= ranks; r++) {
            for (int policy = 0; policy < planner_policies(p); policy++) {
                plan->stages = s + 1;
                plan->units[s] = u;
                plan->replicas[s] = r;
                plan->policy[s] = (unsigned char)policy;
                planner_add_all(p, plan, unit + u, rank + r);
            }
        }
    }
    plan->stages = s;
}
// Adds what balances stages, replicas and links: for each micro-batch the plan whose slowest part
// takes least, and plans with a shorter way through all stages whose slowest part takes longer.
static inline void planner_add_paced(Planner *p) {
    static const double longer[] = {1, 1.1, 1.25, 1.5, 2, 3, 5, 10};
    const int policies = p->keep == PLAN_BEAM ? planner_policies(p) : 1;
    PaceSearch search = pace_search_make(p->task);
    for (int i = 0; i < p->divisor_count; i++) {
        StagePlan q = {.micro_batch = p->divisors[i], .kind = PIPELINE_DAPPLE};
        if (!planner_allows_micro_batch(p, q.micro_batch)) { continue; }
        double least = pace_search(&search, &q, INFINITY);
        if (isinf(least)) {
            q.recompute = true;
            least = pace_search(&search, &q, INFINITY);
        }
        if (isinf(least)) { continue; }
        planner_add_settings(p, &q, false);
        for (size_t k = 0; k < LENGTH_OF(longer); k++) {
            const double most = longer[k] * least * (1 + 1e-9);
            if (isinf(pace_search(&search, &q, most))) { continue; }
            for (int policy = 0; policy < policies; policy++) {
                memset(q.policy, policy, sizeof q.policy);
                planner_add_settings(p, &q, false);
            }
        }
    }
    pace_search_free(&search);
}
// Finds the best plans and leaves them in p->beam[0 .. found - 1]; found is 0 if none fits the
// memory. The `known` plans are among those from which the search begins.
static inline void planner_search(Planner *p, const Candidate *known, int count) {
    p->zero_bubble = true;
    for (int i = 0; i < count; i++) {
        if (known[i].plan.stages) { planner_add(p, &known[i].plan); }
    }
    for (int stages = 1; stages <= task_most_stages(p->task); stages++) {
        StagePlan q = plan_even(p->task, stages, 1);
        planner_add_settings(p, &q, true);
    }
    for (int i = 0; i < p->divisor_count; i++) {
        StagePlan q = plan_even(p->task, 1, p->divisors[i]);
        if (planner_allows_micro_batch(p, q.micro_batch)) { planner_add_splits(p, &q, 0); }
    }
    planner_add_paced(p);
    StagePlan any = plan_even(p->task, 1, 1);
    any.stages = 0;
    // for small tasks: some thousand plans
    if (p->task->model->units * task_ranks(p->task) <= 24) { planner_add_all(p, &any, 0, 0); }
    planner_run(p);
    for (int i = 0; i < p->found && !planner_is_spent(p);) {
        if (p->beam[i].tried) {
            i++;
            continue;
        }
        StagePlan plan = p->beam[i].plan;
        p->beam[i].tried = true;
        planner_add_neighbours(p, &plan);
        planner_run(p);
        i = 0;
    }
    planner_finish(p);
}

#endif
