// balanced_stages.h: stages that take about equally long: the cuts for given replicas, and cuts and
// replicas together. The search for a pipeline's stages begins with them.
#ifndef BALANCED_STAGES_H
#define BALANCED_STAGES_H

#include "base/base.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "planner/plan_costs.h"
#include "planner/plan_task.h"
#include "planner/planner_model.h"
#include "planner/stage_memory.h"

// -------------------------------------------------------------------------------------------------
// Cuts for given replicas

// Writes the slowness of each stage's slowest rank.
static inline void plan_slowness(const PlanTask *t, const StagePlan *p, double *slowness) {
    for (int s = 0; s < p->stages; s++) { slowness[s] = 1; }
    if (cluster_is_alike(&t->cluster)) { return; }
    int *ranks = new_array(int, task_ranks(t), "planner"),
        *scratch = new_array(int, 2 * t->cluster.nodes, "planner");
    plan_place(t, p, ranks, scratch);
    for (int s = 0, at = 0; s < p->stages; at += p->replicas[s++]) {
        slowness[s] = plan_ranks(&t->cluster, ranks + at, p->replicas[s]).slowness;
    }
    free_all(ranks, scratch);
}
// These functions move the cuts between stages so that the busiest stage has as little to
// do as possible, with the plan's replicas and micro-batch, such that one micro-batch in flight
// fits the memory. These two return whether a stage takes at most `most` seconds, and whether it
// fits.
static inline bool stage_is_fast(const PlanTask *t, const StagePlan *p, int s, int first, int end,
                                 double most) {
    const StageSeconds seconds = plan_stage_seconds(t, p, first, end, p->replicas[s], 1);
    return seconds.forward + seconds.backward <= most;
}
static inline bool stage_fits(const PlanTask *t, const StagePlan *p, int s, int first, int end,
                              double unused) {
    const PlanStage stage = plan_stage_alone(first, end, p->replicas[s]);
    double bytes;
    (void)unused;
    return plan_stage_memory(t, p, &stage, 0, t->memory, &bytes) >= 1;
}
// Returns the last end from `low` to `high` for which a stage is good; `low` if there is none.
typedef bool (*StageGood)(const PlanTask *t, const StagePlan *p, int s, int first, int end,
                          double most);
static inline int stage_end(const PlanTask *t, const StagePlan *p, int s, int first, int low,
                            int high, double most, StageGood good) {
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (good(t, p, s, first, middle, most)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}
// Gives each stage in order as many units as `most` seconds and the memory allow. Returns whether
// all fit. tries: the stages after one that does not are left as they are.
static inline bool plan_fill(const PlanTask *t, StagePlan *p, const double *slowness, double most,
                             bool tries) {
    bool good = true;
    for (int s = 0, first = 0; s < p->stages && (good || !tries); first += p->units[s++]) {
        const double own = most / slowness[s];
        // each later stage needs a unit
        const int high = t->model->units - (p->stages - 1 - s),
                  low = s + 1 < p->stages ? first + 1 : high;
        int end = stage_end(t, p, s, first, low, high, own, stage_is_fast);
        bool fits = stage_fits(t, p, s, first, end, own);
        if (!fits && end > low) {
            end = stage_end(t, p, s, first, low, end, own, stage_fits);
            fits = stage_fits(t, p, s, first, end, own);
        }
        p->units[s] = end - first;
        good = good && fits && stage_is_fast(t, p, s, first, end, own);
    }
    return good;
}
// Balances the plan's cuts.
static inline void plan_balance(const PlanTask *t, StagePlan *p) {
    // recomputation takes at most as long again
    double low = 0,
           high = 2 * plan_units_seconds(t->model, 0, t->model->units, (double)p->micro_batch);
    double slowness[PLAN_STAGES];
    plan_slowness(t, p, slowness);
    high *= cluster_most_slowness(&t->cluster);
    for (int i = 0; i < 24; i++) {
        double middle = (low + high) / 2;
        if (plan_fill(t, p, slowness, middle, true)) {
            high = middle;
        } else {
            low = middle;
        }
    }
    plan_fill(t, p, slowness, high, false);
}
// Returns a balanced plan of `stages` stages with the same number of replicas each; the first
// stages have one more if ranks remain.
static inline StagePlan plan_even(const PlanTask *t, int stages, int64_t micro_batch) {
    StagePlan q = {.stages = stages, .micro_batch = micro_batch, .kind = PIPELINE_DAPPLE};
    for (int s = 0; s < stages; s++) {
        q.replicas[s] = task_ranks(t) / stages + (s < task_ranks(t) % stages);
    }
    plan_balance(t, &q);
    return q;
}

// -------------------------------------------------------------------------------------------------
// Cuts and replicas together, with the links between stages

// Stages take units and ranks in order, in groups where there are many. A stage's pace is the time
// of a micro-batch in it, with that micro-batch's part of the all-reduce; a link's pace is the time
// of a micro-batch's messages, there and back.
enum { PACE_UNITS = 128, PACE_RANKS = 32 }; // numbers of groups, at most
typedef struct {
    const PlanTask *task;
    int units, ranks;      // numbers of groups
    int of_unit, of_rank;  // members of a group; the last may have fewer
    PlanRanks *stage;      // [ranks + 1][ranks + 1] of a stage on k groups that ends before m
    double *reduce;        // the same: seconds of an all-reduced byte
    double *value;         // [units + 1][ranks + 1] of the best beginning on m groups of ranks
    int *first, *replicas; // of its last stage, in groups
    int *all;              // ranks in order
} PaceSearch;
static inline int pace_unit(const PaceSearch *s, int group) {
    return (int)min_i64((int64_t)group * s->of_unit, s->task->model->units);
}
static inline int pace_rank(const PaceSearch *s, int group) {
    return (int)min_i64((int64_t)group * s->of_rank, task_ranks(s->task));
}
static inline PaceSearch pace_search_make(const PlanTask *t) {
    PaceSearch s = {.task = t,
                    .of_unit = (int)ceil_div(t->model->units, PACE_UNITS),
                    .of_rank = (int)round_up(ceil_div(task_ranks(t), PACE_RANKS),
                                             max_i64(1, t->model->expert_ranks))};
    s.units = (int)ceil_div(t->model->units, s.of_unit);
    s.ranks = (int)ceil_div(task_ranks(t), s.of_rank);
    const size_t width = (size_t)s.ranks + 1, n = ((size_t)s.units + 1) * width;
    s.stage = new_array(PlanRanks, width * width, "planner");
    s.reduce = new_array(double, width *width, "planner");
    s.value = new_array(double, n, "planner");
    s.first = new_array(int, n, "planner");
    s.replicas = new_array(int, n, "planner");
    s.all = new_array(int, task_ranks(t), "planner");
    for (int i = 0; i < task_ranks(t); i++) { s.all[i] = i; }
    for (int m = 1; m <= s.ranks; m++) {
        for (int k = 1; k <= m; k++) {
            const size_t at = m * width + k;
            const int begin = pace_rank(&s, m - k);
            s.stage[at] = plan_ranks(&t->cluster, s.all + begin, pace_rank(&s, m) - begin);
            s.reduce[at] = 1e-9 * plan_sums_s(t, &s.stage[at], 1e9);
        }
    }
    return s;
}
static inline void pace_search_free(PaceSearch *s) {
    free_all(s->stage, s->reduce, s->value, s->first, s->replicas, s->all);
}
// Returns the pace of the link before this unit, to the ranks from this one on.
static inline double pace_of_link(const PlanTask *t, int64_t micro_batch, int unit, int rank) {
    const Cluster *c = &t->cluster;
    const bool inside = cluster_node_of(c, rank) == cluster_node_of(c, rank - 1);
    const double bytes = micro_batch * t->model->cut[unit];
    return 2 * (1e-9 * bytes / (inside ? c->intra : c->inter) + 1e-6 * c->latency);
}
// Finds the best last stage of the beginnings that have so many groups of units, on m groups of
// ranks, k of them in that stage. most: see pace_search().
static inline void pace_last_stage(PaceSearch *s, const StagePlan *p, int units, int m, int k,
                                   double most) {
    const PlanTask *t = s->task;
    const PlanModel *model = t->model;
    const int width = s->ranks + 1, at = units * width + m, end = pace_unit(s, units);
    const PlanRanks *ranks = &s->stage[m * width + k];
    const double of_step = (double)p->micro_batch / t->samples,
                 reduce = of_step * s->reduce[m * width + k];
    const bool least = isinf(most);
    for (int f = units - 1; f >= (m > k ? 1 : 0); f--) {
        const int first = pace_unit(s, f);
        const PlanStage stage = plan_stage_alone(first, end, ranks->n);
        const StageSeconds seconds =
            plan_stage_seconds(t, p, first, end, ranks->n, ranks->slowness);
        const double time = seconds.forward + seconds.backward,
                     pace = time + reduce * plan_summed_bytes(model, first, end, ranks->n);
        double bytes, value = least ? pace : time;
        if (pace > most || (least && pace >= s->value[at]) ||
            (isfinite(t->memory) && plan_stage_memory(t, p, &stage, 0, t->memory, &bytes) < 1)) {
            return;
        }
        if (m > k) {
            const double before = s->value[f * width + m - k],
                         link = pace_of_link(t, p->micro_batch, first, pace_rank(s, m - k));
            if (link > most) { continue; }
            value = least ? max_f64(value, max_f64(before, link)) : value + before + link;
        } else if (f) {
            continue;
        }
        if (value < s->value[at]) {
            s->value[at] = value;
            s->first[at] = f;
            s->replicas[at] = k;
        }
    }
}
// Writes the stages of the best plan. Returns false if they are too many.
static inline bool pace_stages(const PaceSearch *s, StagePlan *p) {
    const int width = s->ranks + 1;
    p->stages = 0;
    for (int f = s->units, m = s->ranks; f > 0; p->stages++) {
        const int at = f * width + m;
        if (p->stages == PLAN_STAGES) { return false; }
        memmove(p->units + 1, p->units, p->stages * sizeof(int));
        memmove(p->replicas + 1, p->replicas, p->stages * sizeof(int));
        p->units[0] = pace_unit(s, f) - pace_unit(s, s->first[at]);
        p->replicas[0] = pace_rank(s, m) - pace_rank(s, m - s->replicas[at]);
        f = s->first[at];
        m -= s->replicas[at];
    }
    return true;
}
// Finds the stages for the plan's micro-batch and recomputation: those whose slowest part takes
// least, or, if `most` is finite, those with the shortest way through them whose parts take at most
// `most` seconds. Returns the seconds of the slowest part, or of the way. It returns INFINITY if
// nothing fits.
static inline double pace_search(PaceSearch *s, StagePlan *p, double most) {
    const int width = s->ranks + 1;
    for (int units = 1; units <= s->units; units++) {
        for (int m = 1; m <= s->ranks; m++) {
            s->value[units * width + m] = INFINITY;
            for (int k = 1; k <= m; k++) { pace_last_stage(s, p, units, m, k, most); }
        }
    }
    const double found = s->value[s->units * width + s->ranks];
    return isfinite(found) && pace_stages(s, p) ? found : (double)INFINITY;
}

#endif
