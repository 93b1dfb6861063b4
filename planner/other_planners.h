// other_planners.h: what other planners would choose, for comparison, and as plans from which the
// search begins: equations 1 to 3 of DAPPLE, GPipe's even split, PipeDream's planner. A plan of 0
// stages means that none fits.
#ifndef OTHER_PLANNERS_H
#define OTHER_PLANNERS_H

#include "base/base.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "planner/equations.h"
#include "planner/plan_costs.h"
#include "planner/planner.h"
#include "planner/planner_model.h"

// What equations 1 to 3 of DAPPLE choose among all plans. The micro-batch is the task's; without
// one it is 1, as in the paper's code, whose slices may be fractions of a sample. Data parallelism
// may use any micro-batch, because its all-reduce overlaps with a micro-batch's backward pass. Each
// stage must have memory for at least one micro-batch. complete: no plan is better by these
// equations.
typedef struct {
    StagePlan plan; // 0 stages if none fits
    double step_s;
    bool complete;
} EquationChoice;
static inline EquationChoice planner_by_equations(const PlanTask *t) {
    PlanTask paper = *t;
    paper.even_slices = true;
    paper.micro_batch = t->micro_batch ? t->micro_batch : 1;
    EquationSearch e = equation_search_make(&paper, task_policies(t, PLACE_PAPER));
    StagePlan whole = plan_even(&paper, 1, 1);
    for (int64_t b = 1; b <= t->samples; b++) {
        whole.micro_batch = b;
        if (t->micro_batch ? b == t->micro_batch : t->samples % b == 0) {
            equation_offer(&e, &whole);
        }
    }
    StagePlan straight = plan_even(&paper, task_most_stages(t), paper.micro_batch);
    equation_offer(&e, &straight);
    equation_search(&e);
    EquationChoice choice = {e.best, e.best_s, !e.cut};
    equation_search_free(&e);
    return choice;
}

// Returns the best GPipe plan (arXiv 1811.06965): all forwards, then all backwards; stages of equal
// numbers of units, each on the same number of ranks.
static inline Candidate planner_gpipe(const PlanTask *t) {
    Planner p = planner_make(t);
    for (int stages = 2; stages <= task_most_stages(t); stages++) {
        StagePlan q = plan_even(t, stages, 1);
        q.kind = PIPELINE_GPIPE;
        for (int s = 0; s < stages; s++) {
            q.units[s] = t->model->units / stages + (s < t->model->units % stages);
        }
        if (task_ranks(t) % stages == 0) { planner_add_settings(&p, &q, false); }
    }
    return planner_best(&p);
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
    int of = ceil_div(members, PIPEDREAM_GROUPS);
    while (members % of) { of++; }
    size_t n = ((size_t)m->units + 1) * ((size_t)(members / of) + 1);
    int *split = new_array(int, 2 * n, "PipeDream");
    const PipeDream d = {.model = m,
                         .below = below,
                         .groups = members / of,
                         .of = of,
                         .bytes_per_s = rate * 1e9,
                         .best = new_array(double, n, "PipeDream"),
                         .split = split,
                         .take = split + n};
    return d;
}
static inline void pipedream_free(PipeDream *d) { free_all(d->best, d->split); }
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
// Returns the stages that PipeDream chooses (none: too many units, or nodes of different sizes).
// The caller chooses the micro-batch, which is 1 here.
static inline StagePlan planner_pipedream(const PlanTask *t) {
    const PlanModel *m = t->model;
    const int units = m->units;
    PipeDreamStage machines[PIPEDREAM_UNITS], stages[PIPEDREAM_UNITS];
    StagePlan p = {};
    if (units > PIPEDREAM_UNITS || !cluster_is_even(&t->cluster)) { return p; }
    double *below = new_array(double, (units + 1) * (size_t)(units + 1), "PipeDream");
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

#endif
