// planner.h: chooses which ranks compute which units (DAPPLE, arXiv 2007.01045, section 4):
// partition, replicas, placement, micro-batch, recomputation and warm-up of a pipeline. It also
// computes what other planners would choose, for comparison, and prints --plan.
//
// Decision   schedule_simulate() decides, on the program that schedule_pipeline() makes of a plan,
//            with one rank for each stage, transfers and all-reduces included. A stage's all-reduce
//            begins with the first gradients of its last micro-batch, as in a real run.
// Bound      Each plan has a time that no schedule of it beats (plan_bound: what equations 1 to 3
//            of the paper count, and the limits of what is in flight). Plans with the smallest
//            bound are simulated first; plans whose bound is no better than the worst of the beam
//            are not simulated.
// Search     A beam search. It starts from even stages, from all pairs of stages, and from what the
//            other planners choose. It splits stages (the paper's transition, equation 5), merges
//            them and moves units and replicas between them. The best plans are kept in the beam,
//            and each is changed in every way until none gets better.
#ifndef PLANNER_H
#define PLANNER_H

#include "engine/plan_costs.h" // what a plan costs
#include "engine/equations.h"  // what DAPPLE's planner would choose

// -------------------------------------------------------------------------------------------------
// Search
// Plans that the beam keeps at most; of them with the same number of stages and micro-batch.
enum { PLAN_BEAM = 32, PLAN_ALIKE = 2 };
// maximum of stages x micro-batches: half a GiB of actions to replay
enum { PLAN_STAGE_BATCHES = 1 << 20 };
typedef struct {
    Plan plan;
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
    int pooled, pool_capacity;
    // [seen_capacity] hash table (open addressing) of checksums of the costs of plans seen
    uint64_t *seen;
    size_t seen_count, seen_capacity;
    int64_t bounded, simulated;
} Planner;

static inline Planner planner_make(const PlanTask *t) {
    Planner p;
    memset(&p, 0, sizeof p);
    p.task = t;
    p.seen_capacity = 1 << 12;
    p.keep = t->model->units * task_ranks(t) <= 4096 ? PLAN_BEAM : PLAN_BEAM / 4;
    p.ranks = (int *)checked_malloc((size_t)task_ranks(t) * sizeof(int), "planner");
    p.scratch = (int *)checked_malloc(2 * (size_t)t->cluster.nodes * sizeof(int), "planner");
    p.seen = (uint64_t *)checked_calloc(p.seen_capacity, sizeof(uint64_t), "planner");
    p.divisors = (int64_t *)checked_malloc(
        2 * ((size_t)sqrt((double)t->samples) + 1) * sizeof(int64_t), "planner");
    for (int64_t b = 1; b * b <= t->samples; b++) {
        if (t->samples % b == 0) { p.divisors[p.divisor_count++] = b; }
    }
    for (int i = p.divisor_count - 1; i >= 0; i--) {
        int64_t large = t->samples / p.divisors[i];
        if (large != p.divisors[i]) { p.divisors[p.divisor_count++] = large; }
    }
    return p;
}
static inline void planner_free(Planner *p) {
    free(p->ranks);
    free(p->scratch);
    free(p->divisors);
    free(p->pool);
    free(p->seen);
    memset(p, 0, sizeof *p);
}

// Return whether a plan with the same costs has been seen, and note it: by checksum, by plan.
static inline bool planner_saw_key(Planner *p, uint64_t key) {
    size_t i = (size_t)key & (p->seen_capacity - 1);
    for (; p->seen[i]; i = (i + 1) & (p->seen_capacity - 1)) {
        if (p->seen[i] == key) { return true; }
    }
    p->seen[i] = key;
    p->seen_count++;
    return false;
}
static inline bool planner_saw(Planner *p, const Plan *plan) {
    const PlanCosts *c = &p->costs;
    const double *const parts[] = {c->forward, c->backward,  c->weight,
                                   c->send,    c->send_back, c->reduce_late};
    Checksum sum = checksum_begin();
    checksum_add(&sum, &c->micro_batches, sizeof c->micro_batches);
    checksum_add(&sum, &plan->kind, sizeof plan->kind);
    checksum_add(&sum, c->live, (size_t)c->stages * sizeof(int));
    checksum_add(&sum, plan->replicas, (size_t)c->stages * sizeof(int));
    for (int i = 0; i < 6; i++) {
        checksum_add(&sum, parts[i], (size_t)c->stages * sizeof(double));
    }
    if (2 * p->seen_count > p->seen_capacity) {
        uint64_t *old = p->seen;
        size_t capacity = p->seen_capacity;
        p->seen_capacity *= 2;
        p->seen_count = 0;
        p->seen = (uint64_t *)checked_calloc(p->seen_capacity, sizeof(uint64_t), "planner");
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
static inline int planner_worst(const Planner *p, const Plan *plan) {
    int alike = 0, worst = p->found;
    for (int i = 0; i < p->found; i++) {
        const Plan *q = &p->beam[i].plan;
        if (q->stages == plan->stages && q->micro_batch == plan->micro_batch) {
            alike++;
            worst = i;
        }
    }
    return alike >= PLAN_ALIKE ? worst : (int)min_i64(p->found, p->keep - 1);
}
// Returns the time that a plan must beat: that of the plan it would replace, and 1.1 times the
// best.
static inline double planner_limit(const Planner *p, const Plan *plan) {
    const double near_best = 1.1;
    int worst = planner_worst(p, plan);
    double limit = p->found ? near_best * p->beam[0].step_s : INFINITY;
    return worst < p->found ? fmin(limit, p->beam[worst].step_s) : limit;
}

// Computes a plan's ranks and costs. Returns false if it does not fit the memory.
static inline bool planner_look(Planner *p, const Plan *plan) {
    plan_place(p->task, plan, p->ranks, p->scratch);
    return plan_costs(p->task, plan, p->ranks, &p->costs);
}
// Puts a plan into the pool if it fits the memory, is short enough to replay, is new, and may be
// better than the worst of the beam.
static inline void planner_add(Planner *p, const Plan *plan) {
    p->bounded++;
    bool replayable = plan->stages * (p->task->samples / plan->micro_batch) <= PLAN_STAGE_BATCHES;
    if (!replayable || !plan_is_short(p->task, plan) || !planner_look(p, plan) ||
        planner_saw(p, plan)) {
        return;
    }
    double bound = plan_bound(&p->costs);
    if (bound >= planner_limit(p, plan)) { return; }
    if (p->pooled == p->pool_capacity) {
        p->pool_capacity = p->pool_capacity ? 2 * p->pool_capacity : 64;
        p->pool = (Candidate *)realloc(p->pool, (size_t)p->pool_capacity * sizeof(Candidate));
        if (!p->pool) { die(EXIT_RESOURCES, NULL, "cannot hold %d plans", p->pool_capacity); }
    }
    Candidate *c = &p->pool[p->pooled++];
    c->plan = *plan;
    c->bound = bound;
    c->step_s = 0;
    c->tried = c->replayed = false;
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
// Simulates the pool, the most promising plans first, and keeps the best in the beam.
static inline void planner_run(Planner *p) {
    if (p->pooled) { qsort(p->pool, (size_t)p->pooled, sizeof(Candidate), candidate_order); }
    for (int i = 0; i < p->pooled; i++) {
        Candidate *c = &p->pool[i];
        if (c->bound >= planner_limit(p, &c->plan)) { continue; }
        planner_look(p, &c->plan);
        keep_alive(); // other ranks may be waiting
        c->step_s = plan_simulate(&c->plan, &p->costs);
        p->simulated++;
        planner_keep(p, c);
    }
    p->pooled = 0;
}

// The next three functions move the cuts between stages so that the busiest stage has as little to
// do as possible, with the plan's replicas and micro-batch, such that one micro-batch in flight
// fits the memory. stage_fits returns whether a stage takes at most `most` seconds and fits.
static inline bool stage_fits(const PlanTask *t, const Plan *p, int s, int first, int end,
                              double most) {
    const PlanModel *m = t->model;
    const double held = plan_held_rows(p->micro_batch, p->replicas[s]);
    double rows = plan_rows(t, p, s), bytes;
    return rows * (m->forward[end] + m->backward[end] - m->forward[first] - m->backward[first]) <=
               most &&
           plan_stage_memory(t, p, first, end, held, 0, t->memory, &bytes) >= 1;
}
// Gives each stage in order as many units as `most` seconds allow. Returns whether all fit.
static inline bool plan_fill(const PlanTask *t, Plan *p, double most) {
    bool good = true;
    for (int s = 0, first = 0; s < p->stages; first += p->units[s++]) {
        // each later stage needs a unit
        int high = t->model->units - (p->stages - 1 - s),
            low = s + 1 < p->stages ? first + 1 : high;
        while (low < high) {
            int middle = (low + high + 1) / 2;
            if (stage_fits(t, p, s, first, middle, most)) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        p->units[s] = low - first;
        good = good && stage_fits(t, p, s, first, low, most);
    }
    return good;
}
static inline void plan_balance(const PlanTask *t, Plan *p) {
    double low = 0, high = (double)p->micro_batch * (t->model->forward[t->model->units] +
                                                     t->model->backward[t->model->units]);
    for (int i = 0; i < 24; i++) {
        double middle = (low + high) / 2;
        if (plan_fill(t, p, middle)) {
            high = middle;
        } else {
            low = middle;
        }
    }
    plan_fill(t, p, high);
}

// Returns how many placement policies to try: one if all choices are the same, because the nodes do
// not matter; else `most`.
static inline int task_policies(const PlanTask *t, int most) {
    return t->cluster.nodes > 1 && t->cluster.ranks > 1 ? most : 1;
}
static inline int planner_policies(const Planner *p) {
    return task_policies(p->task, PLACE_POLICIES);
}
// Adds a plan with each placement policy of stage s. The ranks of s and of later stages follow from
// it.
static inline void planner_add_placed(Planner *p, Plan plan, int s) {
    for (int policy = 0; policy < planner_policies(p); policy++) {
        plan.policy[s] = (unsigned char)policy;
        planner_add(p, &plan);
    }
}
// The same, with the plan's cuts and with balanced ones.
static inline void planner_add_both(Planner *p, Plan plan, int s) {
    planner_add_placed(p, plan, s);
    plan_balance(p->task, &plan);
    planner_add_placed(p, plan, s);
}
// Splits stage s in two. The first gets `units` of its units and `replicas` of its replicas.
static inline Plan plan_split(const Plan *p, int s, int units, int replicas) {
    Plan q = *p;
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
static inline Plan plan_merge(const Plan *p, int s) {
    Plan q = *p;
    q.stages--;
    q.units[s] += p->units[s + 1];
    q.replicas[s] += p->replicas[s + 1];
    for (int i = s + 1; i < q.stages; i++) {
        q.units[i] = p->units[i + 1];
        q.replicas[i] = p->replicas[i + 1];
        q.policy[i] = p->policy[i + 1];
    }
    return q;
}
// Adds splits of a stage. A stage of few units is cut everywhere; one of many units near the cut
// that balances the two parts by their replicas, and at some others.
static inline void planner_add_splits(Planner *p, const Plan *plan, int s) {
    enum { MANY = 48, NEAR = 3 };
    const PlanModel *m = p->task->model;
    int first = 0;
    for (int i = 0; i < s; i++) { first += plan->units[i]; }
    const int stride = (int)ceil_div(plan->units[s], MANY), end = first + plan->units[s];
    const double begin_s = m->forward[first] + m->backward[first],
                 time_s = m->forward[end] + m->backward[end] - begin_s;
    for (int i = 0, r; plan->stages < PLAN_STAGES &&
                       (r = split_choice(plan->replicas[s], p->task->cluster.ranks, i));
         i++) {
        int balanced = 1;
        while (first + balanced + 1 < end &&
               m->forward[first + balanced] + m->backward[first + balanced] - begin_s <
                   time_s * r / plan->replicas[s]) {
            balanced++;
        }
        for (int units = 1; units < plan->units[s]; units++) {
            if (units % stride && abs(units - balanced) > NEAR) { continue; }
            Plan q = plan_split(plan, s, units, r);
            for (int policy = 0; policy < planner_policies(p); policy++) {
                q.policy[s] = q.policy[s + 1] = (unsigned char)policy;
                planner_add(p, &q);
            }
        }
    }
}
// Adds plans that move units or replicas from stage s to another. Units move to the next stage, or
// to the one after it, past the units in between.
static inline void planner_add_moves(Planner *p, const Plan *plan, int s) {
    static const int shifts[] = {1, 2, 4, 8, -1, -2, -4, -8};
    for (int k = 0; k < 16; k++) {
        int to = s + 1 + k / 8, by = shifts[k % 8];
        if (to >= plan->stages || plan->units[s] <= by || plan->units[to] <= -by) { continue; }
        Plan q = *plan;
        q.units[s] -= by;
        q.units[to] += by;
        planner_add(p, &q);
    }
    for (int to = 0; to < plan->stages; to++) {
        bool close = plan->stages <= 8 || to == s + 1 || to + 1 == s;
        for (int by = 1; to != s && close && by < plan->replicas[s];
             by = 2 * by + (by == 1 ? p->task->cluster.ranks - 2 : 0)) {
            Plan q = *plan;
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
static inline void planner_add_settings(Planner *p, const Plan *plan, bool balanced_too) {
    for (int i = 0; i < PLAN_SETTINGS * p->divisor_count; i++) {
        const PlanSetting *setting = &plan_settings[i % PLAN_SETTINGS];
        Plan q = *plan;
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
static inline void planner_add_neighbours(Planner *p, const Plan *plan) {
    for (int s = 0; s < plan->stages; s++) {
        planner_add_splits(p, plan, s);
        planner_add_moves(p, plan, s);
        if (s + 1 < plan->stages) { planner_add_both(p, plan_merge(plan, s), s); }
        planner_add_placed(p, *plan, s);
    }
    for (int policy = 0; policy < planner_policies(p); policy++) {
        Plan q = *plan;
        memset(q.policy, policy, sizeof q.policy);
        planner_add(p, &q);
    }
    planner_add_settings(p, plan, true);
}
// Returns a balanced plan of `stages` stages with the same number of replicas each; the first
// stages have one more if ranks remain.
static inline Plan plan_even(const PlanTask *t, int stages, int64_t micro_batch) {
    Plan q;
    memset(&q, 0, sizeof q);
    q.stages = stages;
    q.micro_batch = micro_batch;
    q.kind = PIPELINE_DAPPLE;
    q.warmup = WARMUP_A;
    for (int s = 0; s < stages; s++) {
        q.replicas[s] = task_ranks(t) / stages + (s < task_ranks(t) % stages);
    }
    plan_balance(t, &q);
    return q;
}
static inline int task_most_stages(const PlanTask *t) {
    return (int)min_i64(min_i64(t->model->units, task_ranks(t)), PLAN_STAGES);
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
// Returns the best plan with these stages and any micro-batch, recomputation and warm-up that the
// task permits. It has 0 stages if nothing fits.
static inline Candidate plan_best_setting(const PlanTask *t, const Plan *plan) {
    Candidate best;
    memset(&best, 0, sizeof best);
    Planner p = planner_make(t);
    if (plan->stages) { planner_add_settings(&p, plan, false); }
    planner_run(&p);
    planner_finish(&p);
    if (p.found) { best = p.beam[0]; }
    planner_free(&p);
    return best;
}

// Adds all partitions, replicas and policies from this unit and rank on (recursive).
static inline void planner_add_all(Planner *p, Plan *plan, int unit, int rank) {
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
// Finds the best plans and leaves them in p->beam[0 .. found - 1]; found is 0 if none fits the
// memory. The `known` plans are among those from which the search begins.
static inline void planner_search(Planner *p, const Candidate *known, int count) {
    p->zero_bubble = true;
    for (int i = 0; i < count; i++) {
        if (known[i].plan.stages) { planner_add(p, &known[i].plan); }
    }
    for (int stages = 1; stages <= task_most_stages(p->task); stages++) {
        Plan q = plan_even(p->task, stages, 1);
        planner_add_settings(p, &q, true);
    }
    for (int i = 0; i < p->divisor_count; i++) {
        Plan q = plan_even(p->task, 1, p->divisors[i]);
        if (planner_allows_micro_batch(p, q.micro_batch)) { planner_add_splits(p, &q, 0); }
    }
    Plan any = plan_even(p->task, 1, 1);
    any.stages = 0;
    // for small tasks: some thousand plans
    if (p->task->model->units * task_ranks(p->task) <= 24) { planner_add_all(p, &any, 0, 0); }
    planner_run(p);
    for (int i = 0; i < p->found;) {
        if (p->beam[i].tried) {
            i++;
            continue;
        }
        Plan plan = p->beam[i].plan;
        p->beam[i].tried = true;
        planner_add_neighbours(p, &plan);
        planner_run(p);
        i = 0;
    }
    planner_finish(p);
}

// -------------------------------------------------------------------------------------------------
// Baselines: what other planners would choose. A plan of 0 stages means that none fits.

// What equations 1 to 3 of DAPPLE choose among all plans. The micro-batch is the task's; without
// one it is 1, as in the paper's code, whose slices may be fractions of a sample. Data parallelism
// may use any micro-batch, because its all-reduce overlaps with a micro-batch's backward pass. Each
// stage must have memory for at least one micro-batch. complete: no plan is better by these
// equations.
typedef struct {
    Plan plan; // 0 stages if none fits
    double step_s;
    bool complete;
} EquationChoice;
static inline EquationChoice planner_by_equations(const PlanTask *t) {
    PlanTask paper = *t;
    paper.even_slices = true;
    paper.micro_batch = t->micro_batch ? t->micro_batch : 1;
    EquationSearch e = equation_search_make(&paper, task_policies(t, PLACE_PAPER));
    Plan whole = plan_even(&paper, 1, 1);
    for (int64_t b = 1; b <= t->samples; b++) {
        whole.micro_batch = b;
        if (t->micro_batch ? b == t->micro_batch : t->samples % b == 0) {
            equation_offer(&e, &whole);
        }
    }
    Plan straight = plan_even(&paper, task_most_stages(t), paper.micro_batch);
    equation_offer(&e, &straight);
    equation_search(&e);
    EquationChoice choice = {e.best, e.best_s, !e.cut};
    equation_search_free(&e);
    return choice;
}

// Returns the best GPipe plan (arXiv 1811.06965): all forwards, then all backwards; stages of equal
// numbers of units, each on the same number of ranks.
static inline Candidate planner_gpipe(const PlanTask *t) {
    Candidate best;
    memset(&best, 0, sizeof best);
    Planner p = planner_make(t);
    for (int stages = 2; stages <= task_most_stages(t); stages++) {
        Plan q = plan_even(t, stages, 1);
        q.kind = PIPELINE_GPIPE;
        for (int s = 0; s < stages; s++) {
            q.units[s] = t->model->units / stages + (s < t->model->units % stages);
        }
        if (task_ranks(t) % stages == 0) { planner_add_settings(&p, &q, false); }
    }
    planner_run(&p);
    planner_finish(&p);
    if (p.found) { best = p.beam[0]; }
    planner_free(&p);
    return best;
}

// PipeDream's planner (SOSP 2019, section 3.1), as in the paper. It works level by level, first
// inside a node, then between nodes:
//   A(i..j, m) = min over s, m' of max{ A(i..s, m - m'), 2 a_s / bandwidth, T(s..j, m') }
//   T(i..j, m) = max{ A of the level below, 2 (m - 1) w / bandwidth } / m
// Level 0 is the time of a profiled batch. A is the least time of the slowest stage. On large
// levels m counts groups of ranks.
enum { PIPEDREAM_UNITS = 160, PIPEDREAM_GROUPS = 16 };
typedef struct {
    const PlanModel *model;
    // [units + 1][units + 1] A of the level below for units i..j; NULL: level 0
    const double *below;
    int groups, of; // number of groups; members of each
    double bytes_per_s;
    double *best;      // [units + 1][groups + 1] A for units first..j on m groups
    int *split, *take; // unit at which the last stage begins (-1: it is the only one); its groups
} PipeDream;
static inline double pipedream_stage(const PipeDream *d, int i, int j, int m) {
    const PlanModel *model = d->model;
    double time = d->below ? d->below[i * (model->units + 1) + j]
                           : model->batch * (model->forward[j] + model->backward[j] -
                                             model->forward[i] - model->backward[i]);
    int members = m * d->of;
    return fmax(time, 2.0 * (members - 1) * (model->parameters[j] - model->parameters[i]) /
                          d->bytes_per_s) /
           members;
}
static inline void pipedream_solve(PipeDream *d, int first) {
    const int units = d->model->units, width = d->groups + 1;
    for (int j = first + 1; j <= units; j++) {
        for (int m = 1; m <= d->groups; m++) {
            int at = j * width + m;
            d->best[at] = pipedream_stage(d, first, j, m);
            d->split[at] = -1;
            d->take[at] = m;
            for (int s = first + 1; s < j; s++) {
                double link = 2 * d->model->batch * d->model->cut[s] / d->bytes_per_s;
                for (int k = 1; k < m && link < d->best[at]; k++) {
                    double slowest =
                        fmax(fmax(d->best[s * width + m - k], link), pipedream_stage(d, s, j, k));
                    if (slowest < d->best[at]) {
                        d->best[at] = slowest;
                        d->split[at] = s;
                        d->take[at] = k;
                    }
                }
            }
        }
    }
}
static inline PipeDream pipedream_make(const PlanModel *m, const double *below, int members,
                                       double rate) {
    int of = (int)ceil_div(members, PIPEDREAM_GROUPS);
    while (members % of) { of++; }
    size_t n = ((size_t)m->units + 1) * ((size_t)(members / of) + 1);
    PipeDream d = {m, below, members / of, of, rate * 1e9, NULL, NULL, NULL};
    d.best = (double *)checked_calloc(n, sizeof(double), "PipeDream");
    d.split = (int *)checked_calloc(2 * n, sizeof(int), "PipeDream");
    d.take = d.split + n;
    return d;
}
static inline void pipedream_free(PipeDream *d) {
    free(d->best);
    free(d->split);
}
typedef struct {
    int first, end, members;
} PipeDreamStage;
// Writes the stages of units first..end, as solved, the last one first. Returns how many.
static inline int pipedream_stages(const PipeDream *d, int first, int end, PipeDreamStage *out) {
    int n = 0;
    for (int m = d->groups; end > first; n++) {
        int at = end * (d->groups + 1) + m;
        PipeDreamStage stage = {d->split[at] < 0 ? first : d->split[at], end, d->take[at] * d->of};
        out[n] = stage;
        m -= d->take[at];
        end = stage.first;
    }
    return n;
}
// Returns the stages that PipeDream chooses (none: too many units). The caller chooses the
// micro-batch, which is 1 here.
static inline Plan planner_pipedream(const PlanTask *t) {
    const PlanModel *m = t->model;
    const int units = m->units;
    PipeDreamStage machines[PIPEDREAM_UNITS], stages[PIPEDREAM_UNITS];
    Plan p;
    memset(&p, 0, sizeof p);
    if (units > PIPEDREAM_UNITS) { return p; }
    double *below = (double *)checked_calloc((size_t)(units + 1) * (size_t)(units + 1),
                                             sizeof(double), "PipeDream");
    PipeDream inner = pipedream_make(m, NULL, t->cluster.ranks, t->cluster.intra),
              outer = pipedream_make(m, below, t->cluster.nodes, t->cluster.inter);
    for (int i = 0; i < units; i++) {
        pipedream_solve(&inner, i);
        for (int j = i + 1; j <= units; j++) {
            below[i * (units + 1) + j] = inner.best[j * (inner.groups + 1) + inner.groups];
        }
    }
    pipedream_solve(&outer, 0);
    p.kind = PIPELINE_DAPPLE;
    p.micro_batch = 1;
    // machines are listed from the last to the first: visit them in the order of units
    for (int k = pipedream_stages(&outer, 0, units, machines) - 1; k >= 0; k--) {
        pipedream_solve(&inner, machines[k].first);
        int n = pipedream_stages(&inner, machines[k].first, machines[k].end, stages);
        for (int i = n - 1; i >= 0; i--, p.stages++) {
            p.units[p.stages] = stages[i].end - stages[i].first;
            p.replicas[p.stages] = stages[i].members * machines[k].members;
            // the stages of a group of machines are replicated on each of them
            p.policy[p.stages] =
                n > 1 && machines[k].members == t->cluster.nodes ? PLACE_SCATTER : PLACE_APPEND;
        }
    }
    pipedream_free(&inner);
    pipedream_free(&outer);
    free(below);
    return p;
}

// -------------------------------------------------------------------------------------------------
// The answer to a task
enum { PLAN_OTHERS = 8 };
typedef struct {
    Candidate best;                // 0 stages if nothing fits the memory
    Candidate other[PLAN_OTHERS];  // baselines, then runners-up
    const char *name[PLAN_OTHERS]; // what the others are
    int others;
    EquationChoice equations; // what equations 1 to 3 choose, and the time they predict for it
} PlanAnswer;

static inline void answer_add(PlanAnswer *a, const char *name, const Candidate *c) {
    if (!c->plan.stages || a->others == PLAN_OTHERS) { return; }
    a->other[a->others] = *c;
    a->name[a->others++] = name;
}
// Returns whether two plans differ in nothing but cuts and settings.
static inline bool plans_alike(const Plan *a, const Plan *b) {
    return a->stages == b->stages && a->micro_batch == b->micro_batch &&
           !memcmp(a->replicas, b->replicas, (size_t)a->stages * sizeof(int));
}
// Adds the best plans of the beam that differ from all before them.
static inline void answer_add_runners(PlanAnswer *a, const Planner *p) {
    for (int i = 1; i < p->found; i++) {
        bool known = plans_alike(&p->beam[i].plan, &a->best.plan);
        for (int k = 0; k < a->others; k++) {
            known = known || plans_alike(&p->beam[i].plan, &a->other[k].plan);
        }
        if (!known) { answer_add(a, "runner-up", &p->beam[i]); }
    }
}
// Returns the best plan for a task, and those of the other planners, from which the search begins.
static inline PlanAnswer planner_answer(const PlanTask *t) {
    PlanAnswer a;
    memset(&a, 0, sizeof a);
    Plan whole = plan_even(t, 1, 1), pipedream = planner_pipedream(t);
    a.equations = planner_by_equations(t);
    Candidate others[] = {plan_best_setting(t, &whole), planner_gpipe(t),
                          plan_best_setting(t, &pipedream),
                          plan_best_setting(t, &a.equations.plan)};
    static const char *const names[] = {"data parallel", "GPipe, even split", "PipeDream's planner",
                                        "equations 1 to 3"};
    for (int i = 0; i < 4; i++) { answer_add(&a, names[i], &others[i]); }
    Planner p = planner_make(t);
    planner_search(&p, others, 4);
    if (p.found) {
        a.best = p.beam[0];
        answer_add_runners(&a, &p);
    }
    planner_free(&p);
    return a;
}

// -------------------------------------------------------------------------------------------------
// --plan

static inline void print_number_list(FILE *to, const int *numbers, int n) {
    for (int i = 0; i < n; i++) { fprintf(to, "%s%d", i ? "," : "", numbers[i]); }
}
// Prints ascending ranks as ranges: 0-3,8.
static inline void print_ranges(FILE *to, const int *ranks, int n) {
    for (int i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && ranks[end] == ranks[end - 1] + 1;) { end++; }
        fprintf(to, end > i + 1 ? "%s%d-%d" : "%s%d", i ? "," : "", ranks[i], ranks[end - 1]);
    }
}
// Prints the members of a plan's JSON object, without the braces.
static inline void print_plan_json(FILE *to, Planner *p, const Candidate *c) {
    const Plan *plan = &c->plan;
    planner_look(p, plan);
    fprintf(to, "\"stages\":[");
    for (int s = 0, rank = 0; s < plan->stages; rank += plan->replicas[s++]) {
        fprintf(to, "%s{\"units\":%d,\"replicas\":%d,\"ranks\":[", s ? "," : "", plan->units[s],
                plan->replicas[s]);
        print_number_list(to, p->ranks + rank, plan->replicas[s]);
        fprintf(to, "]}");
    }
    fprintf(to,
            "],\"micro_batch\":%" PRId64
            ",\"micro_batches\":%d,\"recompute\":%s,\"warmup\":\"%c\",\"schedule\":\"%s\","
            "\"predicted\":{\"step_ms\":%.17g,\"memory\":[",
            plan->micro_batch, p->costs.micro_batches, plan->recompute ? "true" : "false",
            "ab"[plan->warmup], pipeline_kind_names[plan->kind], 1e3 * c -> step_s);
    for (int s = 0; s < plan->stages; s++) {
        fprintf(to, "%s%.0f", s ? "," : "", p->costs.memory[s]);
    }
    fprintf(to, "],\"bubble\":%.17g}", plan_bubble(plan, &p->costs, c->step_s));
}
static inline void print_answer_json(FILE *to, Planner *p, const PlanAnswer *a, double one_rank_s) {
    fprintf(to, "{");
    print_plan_json(to, p, &a->best);
    fprintf(to, ",\"alternatives\":[");
    for (int i = 0; i < a->others; i++) {
        fprintf(to, "%s{\"name\":\"%s\",", i ? "," : "", a->name[i]);
        print_plan_json(to, p, &a->other[i]);
        fprintf(to, "}");
    }
    fprintf(to, "],\"one_rank_ms\":%.17g", 1e3 * one_rank_s);
    if (a->equations.plan.stages) {
        fprintf(to,
                ",\"equations\":{\"micro_batch\":%" PRId64 ",\"step_ms\":%.17g,\"complete\":%s}",
                a->equations.plan.micro_batch, 1e3 * a->equations.step_s,
                a->equations.complete ? "true" : "false");
    }
    fprintf(to, "}\n");
}
static inline void print_plan_line(FILE *to, Planner *p, const char *name, const Candidate *c,
                                   double one_rank_s) {
    const Plan *plan = &c->plan;
    planner_look(p, plan);
    fprintf(to, "%-18s %10.2f ms %8.2fx %5.1f %% idle, %d x %" PRId64 " samples%s, %s", name,
            1e3 * c->step_s, one_rank_s / c->step_s, 100 * plan_bubble(plan, &p->costs, c->step_s),
            p->costs.micro_batches, plan->micro_batch, plan->recompute ? ", recomputed" : "",
            plan->kind != PIPELINE_DAPPLE ? pipeline_kind_names[plan->kind]
            : plan->warmup == WARMUP_B    ? "warm-up b"
                                          : "warm-up a");
    for (int s = 0; s < plan->stages; s++) {
        fprintf(to, "%s%d:%d", s ? "," : "  ", plan->units[s], plan->replicas[s]);
    }
    fprintf(to, "\n");
}
static inline void print_answer(FILE *to, Planner *p, const PlanAnswer *a, double one_rank_s) {
    const Plan *plan = &a->best.plan;
    fprintf(to, "                        step against 1 rank             micro-batches          "
                "units:replicas of the stages\n");
    print_plan_line(to, p, "plan", &a->best, one_rank_s);
    for (int i = 0; i < a->others; i++) {
        print_plan_line(to, p, a->name[i], &a->other[i], one_rank_s);
    }
    planner_look(p, plan);
    fprintf(to, "\nstage   units   forward ms  backward ms   to next ms  all-reduce ms   memory "
                "MiB  ranks\n");
    for (int s = 0, first = 0, rank = 0; s < plan->stages;
         first += plan->units[s], rank += plan->replicas[s++]) {
        fprintf(to, "%5d %4d-%-4d %9.3f %12.3f %12.3f %14.3f %12.1f  ", s, first,
                first + plan->units[s] - 1, 1e3 * p->costs.forward[s], 1e3 * p->costs.backward[s],
                1e3 * p->costs.send[s], 1e3 * p->costs.reduce[s], p->costs.memory[s] / 1048576);
        print_ranges(to, p->ranks + rank, plan->replicas[s]);
        fprintf(to, "\n");
    }
}

// Returns the answer for the stages that --pipeline gives, with the best micro-batch, or
// --micro-batch if it is given.
static inline PlanAnswer planner_given(PlanTask *t, const Options *o) {
    Placement placement = pipeline_placement(o->pipeline, t->model->units, task_ranks(t));
    PlanAnswer a;
    Planner p = planner_make(t);
    Plan q = plan_even(t, (int)min_i64(placement.stages, PLAN_STAGES), 1);
    memset(&a, 0, sizeof a);
    if (placement.stages > PLAN_STAGES) {
        die(EXIT_INPUT, NULL, "--plan takes at most %d stages", PLAN_STAGES);
    }
    for (int s = 0; s < placement.stages; s++) {
        q.units[s] = placement.stage[s].units;
        q.replicas[s] = placement.stage[s].replicas;
    }
    q.kind = (PipelineKind)o->pipeline_schedule;
    q.warmup = (Warmup)o->pipeline_warmup;
    q.recompute = o->recompute == RECOMPUTE_BLOCK;
    for (int i = 0; i < p.divisor_count; i++) {
        q.micro_batch = p.divisors[i];
        if (planner_allows_micro_batch(&p, q.micro_batch)) { planner_add(&p, &q); }
    }
    planner_run(&p);
    planner_finish(&p);
    if (p.found) { a.best = p.beam[0]; }
    planner_free(&p);
    placement_free(&placement);
    return a;
}
// Returns what to plan for, as the flags say, for this model on this cluster. Ends the program
// (EXIT_INPUT) if a step is not a whole number of samples and micro-batches.
static inline PlanTask planner_task(const PlanModel *model, const Cluster *cluster,
                                    const Options *o, const OptionsGiven *given) {
    PlanTask t = {model,
                  *cluster,
                  0,
                  option_size("device-memory", o->device_memory),
                  given->at[OPTION_INDEX_micro_batch] ? o->micro_batch : 0,
                  false};
    int64_t micro_batches = o->micro_batches ? o->micro_batches : task_ranks(&t),
            tokens =
                o->batch_tokens ? o->batch_tokens : o->micro_batch * o->seq_len * micro_batches;
    t.samples = tokens / o->seq_len;
    if (tokens % o->seq_len || t.samples > SCHEDULE_MAX / 16) {
        die(EXIT_INPUT, "a step is whole samples, not too many",
            "--batch-tokens %" PRId64 " of --seq-len %" PRId64 ": that cannot be planned", tokens,
            o->seq_len);
    }
    if (t.micro_batch && t.samples % t.micro_batch) {
        die(EXIT_INPUT, "a step is whole micro-batches",
            "%" PRId64 " samples are no multiple of --micro-batch %" PRId64, t.samples,
            t.micro_batch);
    }
    return t;
}
// Returns the best plan, or the plan of the stages that --pipeline gives. Prints the answer to `to`
// (NULL: not) as a table or as JSON. Ends the program (EXIT_RESOURCES) if no plan fits.
static inline Plan planner_report(FILE *to, const PlanTask *task, const Options *o) {
    PlanTask t = *task;
    const PlanModel *model = t.model;
    PlanAnswer *a = (PlanAnswer *)checked_malloc(sizeof *a, "plans");
    *a = options_gives_stages(o) ? planner_given(&t, o) : planner_answer(&t);
    if (!a->best.plan.stages) {
        die(EXIT_RESOURCES, "give more ranks, a larger --device-memory or --micro-batch",
            "no plan fits into %.0f bytes of memory and %d actions of a rank", t.memory,
            SCHEDULE_MAX);
    }
    Planner p = planner_make(&t);
    double one_rank_s =
        (double)t.samples * (model->forward[model->units] + model->backward[model->units]);
    if (to && o->json) {
        print_answer_json(to, &p, a, one_rank_s);
    } else if (to) {
        print_answer(to, &p, a, one_rank_s);
    }
    Plan best = a->best.plan;
    planner_free(&p);
    free(a);
    return best;
}
// Runs --plan for the model of --profile on --cluster.
static inline void planner_main(FILE *to, const Options *o, const OptionsGiven *given) {
    PlanModel model = profile_load(o->profile);
    Cluster cluster = cluster_parse(o->cluster);
    PlanTask t = planner_task(&model, &cluster, o, given);
    planner_report(to, &t, o);
    plan_model_free(&model);
}
// Returns D: how many micro-batches' activations fit the memory, on the stage with the least space;
// INT64_MAX: no limit.
static inline int64_t plan_depth(const PlanTask *t, const Plan *p) {
    Planner planner = planner_make(t);
    planner_look(&planner, p);
    const int64_t depth = planner.costs.depth;
    planner_free(&planner);
    return depth < INT32_MAX ? depth : INT64_MAX;
}
// Returns the units and ranks of a plan's stages. The caller calls placement_free().
static inline Placement plan_placement(const PlanTask *t, const Plan *p) {
    Placement placement = placement_make(p->stages);
    int *ranks = (int *)checked_malloc((size_t)task_ranks(t) * sizeof(int), "placement"), at = 0,
        unit = 0;
    int *scratch = (int *)checked_malloc(2 * (size_t)t->cluster.nodes * sizeof(int), "placement");
    plan_place(t, p, ranks, scratch);
    for (int s = 0; s < p->stages; s++) {
        Stage *stage = &placement.stage[s];
        stage->first_unit = unit;
        stage->units = p->units[s];
        stage->replicas = p->replicas[s];
        stage->ranks = (int *)checked_malloc((size_t)stage->replicas * sizeof(int), "placement");
        memcpy(stage->ranks, ranks + at, (size_t)stage->replicas * sizeof(int));
        unit += stage->units;
        at += stage->replicas;
    }
    free(ranks);
    free(scratch);
    return placement;
}

#endif
