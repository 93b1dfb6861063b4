// equations.h: the planner of the DAPPLE paper (arXiv 2007.01045, section 4): equations 1 to 3, and
// the plan that is best by them.
//
// Plans      Every plan is considered: any number of stages, every cut, every number of replicas,
//            and for each stage each of the paper's placement policies.
// Search     The paper's dynamic program (equations 4 and 5) keeps one plan for the first units on
//            some ranks: the one that is best with a single stage behind it. That is not always a
//            part of the best plan. Here all beginnings of a plan are kept, except those that
//            another beginning on the same ranks beats whatever follows, and those whose lower
//            bound is no better than the best plan so far. So the best plan is found, unless a list
//            of beginnings (with the same numbers of units and ranks) grows too long. Then those
//            with the least bounds are kept, and EquationSearch.cut is set.
#ifndef EQUATIONS_H
#define EQUATIONS_H

#include "base/base.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "planner/plan_costs.h"
#include "planner/planner_model.h"

// -------------------------------------------------------------------------------------------------
// The equations, to the letter: computing stages and the links between them all count as stages

// Returns the pivot: the stage with the least bubbles, which sets the pace. forward, backward:
// [stages] seconds of a micro-batch.
static inline int equation_pivot(int stages, const double *forward, const double *backward,
                                 int micro_batches) {
    int pivot = stages - 1;
    double between = 0; // time of the stages between s and the pivot
    for (int s = stages - 2; s >= 0; s--) {
        double steady = (micro_batches - 1) * (forward[pivot] + backward[pivot]);
        if ((micro_batches - 1) * (forward[s] + backward[s]) > steady + between) {
            pivot = s;
            between = 0;
        } else {
            between += forward[s] + backward[s];
        }
    }
    return pivot;
}
// Returns the seconds of a step: the warm-up, the steady phase at the pace of the pivot, and the
// end, in which all-reduces hide behind the backward passes that remain.
static inline double equation_latency(int stages, const double *forward, const double *backward,
                                      const double *reduce, int micro_batches) {
    int pivot = equation_pivot(stages, forward, backward, micro_batches);
    double warm = 0, end = -INFINITY, drain = 0;
    for (int s = 0; s <= pivot; s++) { warm += forward[s]; }
    for (int s = pivot; s >= 0; s--) {
        drain += backward[s];
        end = fmax(end, reduce[s] + drain);
    }
    drain = backward[pivot];
    for (int s = pivot + 1; s < stages; s++) {
        drain += backward[s];
        end = fmax(end, reduce[s] - drain);
    }
    return warm + (micro_batches - 1) * (forward[pivot] + backward[pivot]) + end;
}
static inline double plan_equations(const PlanCosts *c) {
    double forward[2 * PLAN_STAGES], backward[2 * PLAN_STAGES], reduce[2 * PLAN_STAGES];
    for (int s = 0; s < c->stages; s++) {
        forward[2 * s] = c->forward[s];
        backward[2 * s] = c->backward[s];
        reduce[2 * s] = c->reduce[s];
        forward[2 * s + 1] = c->send[s];
        backward[2 * s + 1] = c->send_back[s];
        reduce[2 * s + 1] = 0;
    }
    return equation_latency(2 * c->stages - 1, forward, backward, reduce, c->micro_batches);
}
// The same, but in data parallelism (one stage) the all-reduce overlaps with the last backward
// pass.
static inline double plan_by_equations(const PlanCosts *c) {
    if (c->stages > 1) { return plan_equations(c); }
    return c->micro_batches * (c->forward[0] + c->backward[0]) + c->reduce_late[0];
}

// -------------------------------------------------------------------------------------------------
// Beginnings of a plan

// What the first stages of a plan mean for its latency, as three numbers; the lower each of them,
// the better. The pivot is not known yet, so it is guessed. With C = F + B and M micro-batches, the
// guess Q is right if
//   before Q:  (M - 1) C_s <= (M - 1) C_Q + sum of C between s and Q, for each stage s;
//   behind Q:  going back from the last stage, no candidate found on the way remains the pivot.
// The latter means (M - 1) C_Q > W. Here W of the stages from s on is (M - 1) C_s if that exceeds
// W of the stages behind s, and otherwise C_s + W of the stages behind s. So the greatest W that
// the remaining stages may have is known stage by stage, from Q on. cost[] is:
//   pivot to come   0: sum of F
//                   1: latest end of an all-reduce, from the first backward of the last of them
//                   2: maximum of (M - 1) C_s - sum of C behind s
//   pivot chosen    0: latency with these stages alone
//                   1: the same without all-reduces, less the backwards that remain after the
//                      pivot's
//                   2: minus the greatest W that the remaining stages may have
typedef struct {
    bool pivoted;
    double cost[3];
} EquationState;
typedef struct {
    double forward, backward, reduce;
} EquationStage;

static const EquationState equation_begin = {false, {0, 0, -INFINITY}};
static inline EquationState equation_before(EquationState a, const EquationStage *s,
                                            double others) {
    const double time = s->forward + s->backward;
    a.cost[0] += s->forward;
    a.cost[1] = fmax(a.cost[1], s->reduce) + s->backward;
    a.cost[2] = fmax(a.cost[2] - time, others * time);
    return a;
}
// equation_choose returns false if the stage cannot be the pivot; equation_behind, if there cannot
// be such a stage behind the pivot. others: M - 1.
static inline bool equation_choose(EquationState *a, const EquationStage *s, double others) {
    const double time = s->forward + s->backward;
    if (a->cost[2] > others * time) { return false; }
    double begin = a->cost[0] + s->forward + others * time;
    EquationState chosen = {true, {0, begin - s->backward, -others * time}};
    chosen.cost[0] = begin + fmax(a->cost[1], s->reduce) + s->backward;
    *a = chosen;
    return true;
}
static inline bool equation_behind(EquationState *a, const EquationStage *s, double others) {
    const double time = s->forward + s->backward, most = -a->cost[2];
    if (others * time >= most) { return false; }
    a->cost[1] -= s->backward;
    a->cost[0] = fmax(a->cost[0], a->cost[1] + s->reduce);
    a->cost[2] = -fmax(others * time, most - time);
    return true;
}
// Writes the states after another link (NULL: none) and stage to `to`, one for each guess of the
// pivot. Returns how many: at most EQUATION_GUESSES.
enum { EQUATION_GUESSES = 3 };
static inline int equation_append(const EquationState *from, const EquationStage *link,
                                  const EquationStage *stage, double others, EquationState *to) {
    int n = 0;
    if (from->pivoted) {
        to[0] = *from;
        return equation_behind(&to[0], link, others) && equation_behind(&to[0], stage, others);
    }
    EquationState next = link ? equation_before(*from, link, others) : *from;
    to[n++] = equation_before(next, stage, others);
    to[n] = next;
    n += equation_choose(&to[n], stage, others);
    if (link) {
        to[n] = *from;
        n += equation_choose(&to[n], link, others) && equation_behind(&to[n], stage, others);
    }
    return n;
}
// Returns a time that no plan with this beginning beats, if the slowest of the remaining stages
// takes at least `slowest` seconds for a micro-batch.
static inline double equation_bound(const EquationState *a, double slowest, double others) {
    if (a->pivoted) { return others * slowest >= -a->cost[2] ? INFINITY : a->cost[0]; }
    return a->cost[0] + a->cost[1] + fmax(a->cost[2], others * slowest);
}

typedef struct {
    EquationState state;
    double bound;
    uint64_t place; // checksum of the ranks that its stages use, and of the last stage's ranks
    // beginning that it continues, as an index in the list of `first`; first unit of the last stage
    int parent, first;
    int stages, replicas; // number of stages; replicas of the last stage
    int used;             // ranks of all stages
    int next;             // next index in its hash bucket, or -1
    unsigned char policy;
} EquationBeginning;
// The beginnings that end before a certain unit, on about the same number of ranks.
typedef struct {
    EquationBeginning *at;
    int count, capacity;
    int *bucket;  // [capacity] index of the bucket's first beginning, or -1
    double limit; // worse bounds were not kept; 0: no limit
} EquationList;

enum { EQUATION_RANKS = 64 }; // with more ranks, only some numbers of replicas are tried
typedef struct {
    const PlanTask *task; // the search is for its micro-batch
    const PlanModel *model;
    double others;      // M - 1
    int policies;       // number of placement policies to try
    EquationList *list; // [units][bins] by the unit behind a beginning, and by its number of ranks
    int bins;
    int width;      // maximum of beginnings of a list that are continued
    bool cut;       // some list had more
    int64_t work;   // about how many ends of stages have been examined
    StagePlan best; // best plan so far; 0 stages: none
    double best_s;
    PlanCosts costs;         // costs of the plan that is examined
    int *scratch, *ranks;    // buffers of plan_place()
    int *used, *take, *then; // [nodes] ranks of each node: in use, taken by the next stage, both
    // [ranks] of the last stage, of the next one, of one with all that is left
    int *here, *next, *rest;
} EquationSearch;

static inline EquationSearch equation_search_make(const PlanTask *t, int policies) {
    EquationSearch e = {};
    const size_t nodes = t->cluster.nodes, ranks = task_ranks(t);
    e.task = t;
    e.model = t->model;
    e.others = t->samples / t->micro_batch - 1;
    e.policies = policies;
    e.best_s = INFINITY;
    e.bins = min_i64(task_ranks(t), EQUATION_RANKS);
    const size_t lists = t->model->units * (size_t)e.bins;
    e.list = new_array(EquationList, lists, "equations");
    e.scratch = new_array(int, 5 * nodes + 4 * ranks, "equations");
    e.used = e.scratch + 2 * nodes;
    e.take = e.used + nodes;
    e.then = e.take + nodes;
    e.ranks = e.then + nodes;
    e.here = e.ranks + ranks;
    e.next = e.here + ranks;
    e.rest = e.next + ranks;
    return e;
}
static inline void equation_lists_free(EquationSearch *e) {
    const int lists = e->model->units * e->bins;
    for (int i = 0; i < lists; i++) { free_all(e->list[i].at, e->list[i].bucket); }
    memset(e->list, 0, lists * sizeof *e->list);
}
static inline void equation_search_free(EquationSearch *e) {
    equation_lists_free(e);
    free_all(e->list, e->scratch);
}

// Returns the list of the beginnings that end before this unit and use this number of ranks.
static inline EquationList *equation_list(const EquationSearch *e, int unit, int used) {
    return &e->list[unit * e->bins + (int)((int64_t)(used - 1) * e->bins / task_ranks(e->task))];
}
// Keeps a plan if it is the best so far.
static inline void equation_offer(EquationSearch *e, const StagePlan *plan) {
    plan_place(e->task, plan, e->ranks, e->scratch);
    if (!plan_costs(e->task, plan, e->ranks, &e->costs)) { return; }
    double step_s = plan_by_equations(&e->costs);
    if (step_s >= e->best_s) { return; }
    e->best = *plan;
    e->best_s = step_s;
}

// -------------------------------------------------------------------------------------------------
// Lists

static inline int equation_order(const void *a, const void *b) {
    const EquationBeginning *x = (const EquationBeginning *)a, *y = (const EquationBeginning *)b;
    if (x->bound != y->bound) { return x->bound < y->bound ? -1 : 1; }
    return x->place < y->place ? -1 : x->place > y->place;
}
static inline int *equation_bucket(EquationList *l, const EquationBeginning *b) {
    return &l->bucket[(b->place ^ b->state.pivoted) & (uint64_t)(l->capacity - 1)];
}
// Rebuilds the hash table, with at least twice as many buckets as beginnings.
static inline void equation_list_index(EquationList *l) {
    while (l->capacity < 2 * l->count || !l->capacity) {
        l->capacity = l->capacity ? 2 * l->capacity : 64;
        l->at = resize_array(EquationBeginning, l->at, l->capacity, "plans");
        l->bucket = resize_array(int, l->bucket, l->capacity, "plans");
    }
    for (int i = 0; i < l->capacity; i++) { l->bucket[i] = -1; }
    for (int i = 0; i < l->count; i++) {
        int *bucket = equation_bucket(l, &l->at[i]);
        l->at[i].next = *bucket;
        *bucket = i;
    }
}
// Sorts the list by bounds, and drops those beginnings that the best plan so far, or another
// beginning, beats, and those beyond the width of the search.
static inline void equation_list_sort(EquationSearch *e, EquationList *l) {
    if (l->count) { qsort(l->at, l->count, sizeof *l->at, equation_order); }
    while (l->count && l->at[l->count - 1].bound >= e->best_s) { l->count--; }
    if (l->count <= e->width) { return; }
    l->count = e->width;
    l->limit = l->at[l->count - 1].bound;
    e->cut = true;
}
static inline bool equation_beats(const EquationState *a, const EquationState *b) {
    return a->cost[0] <= b->cost[0] && a->cost[1] <= b->cost[1] && a->cost[2] <= b->cost[2];
}
static inline void equation_add(EquationSearch *e, int unit, const EquationBeginning *b) {
    EquationList *l = equation_list(e, unit, b->used);
    if (b->bound >= e->best_s || (l->limit > 0 && b->bound >= l->limit)) { return; }
    if (2 * (l->count + 1) > l->capacity) {
        if (l->count > 2 * e->width) { equation_list_sort(e, l); }
        equation_list_index(l);
    }
    int *bucket = equation_bucket(l, b), *link = bucket;
    while (*link >= 0) {
        EquationBeginning *other = &l->at[*link];
        bool alike = other->place == b->place && other->state.pivoted == b->state.pivoted;
        // move it to the front: it may beat others
        if (alike && equation_beats(&other->state, &b->state)) {
            const int index = *link;
            *link = other->next;
            other->next = *bucket;
            *bucket = index;
            return;
        }
        if (alike && equation_beats(&b->state, &other->state)) {
            other->bound = INFINITY;
            *link = other->next;
        } else {
            link = &other->next;
        }
    }
    l->at[l->count] = *b;
    l->at[l->count].next = *bucket;
    *bucket = l->count++;
}

// -------------------------------------------------------------------------------------------------
// The search

// Returns the stages of a beginning that ends before this unit.
static inline StagePlan equation_plan(const EquationSearch *e, const EquationBeginning *b,
                                      int unit) {
    StagePlan p = {
        .stages = b->stages, .micro_batch = e->task->micro_batch, .kind = PIPELINE_DAPPLE};
    for (int s = p.stages - 1; s >= 0; s--) {
        p.units[s] = unit - b->first;
        p.replicas[s] = b->replicas;
        p.policy[s] = b->policy;
        unit = b->first;
        if (s) { b = &equation_list(e, unit, b->used - b->replicas)->at[b->parent]; }
    }
    return p;
}
static inline StagePlan plan_append(const StagePlan *p, int units, int replicas, int policy) {
    StagePlan q = *p;
    q.units[q.stages] = units;
    q.replicas[q.stages] = replicas;
    q.policy[q.stages++] = (unsigned char)policy;
    return q;
}

// Seconds of a byte, forward and back, and of a message.
typedef struct {
    double per_byte, per_byte_back, latency;
} EquationLink;
static inline EquationLink equation_link(const Cluster *c, const PlanRanks *from,
                                         const PlanRanks *to) {
    EquationLink l = {0, 0, 1e-6 * c->latency};
    l.per_byte = plan_transfer_s(c, from, to, 1) - l.latency;
    l.per_byte_back = plan_transfer_s(c, to, from, 1) - l.latency;
    return l;
}
static inline EquationStage equation_message(const EquationSearch *e, const EquationLink *l,
                                             int unit) {
    const double bytes = e->task->micro_batch * e->model->cut[unit];
    EquationStage s = {0, 0, 0};
    if (bytes > 0) {
        s.forward = l->per_byte * bytes + l->latency;
        s.backward = l->per_byte_back * bytes + l->latency;
    }
    return s;
}
// Returns the seconds of a micro-batch in these units on one rank.
static inline double equation_seconds(const EquationSearch *e, int first, int end) {
    const PlanModel *m = e->model;
    double sample_s = m->forward[end] - m->forward[first] + m->backward[end] - m->backward[first];
    return e->task->micro_batch * sample_s;
}
static inline EquationStage equation_stage(const EquationSearch *e, const PlanRanks *r, int first,
                                           int end) {
    const PlanModel *m = e->model;
    const double rows = (double)e->task->micro_batch / r->n;
    const EquationStage s = {.forward = rows * (m->forward[end] - m->forward[first]),
                             .backward = rows * (m->backward[end] - m->backward[first]),
                             .reduce =
                                 plan_all_reduce_s(&e->task->cluster, r, e->task->own_sums,
                                                   m->parameters[end] - m->parameters[first])};
    return s;
}
static inline bool equation_fits(const EquationSearch *e, const StagePlan *p, int n, int first,
                                 int end) {
    const double rows = plan_held_rows(e->task->micro_batch, n);
    double bytes;
    return plan_stage_memory(e->task, p, first, end, rows, 0, e->task->memory, &bytes) >= 1;
}

// A beginning that is continued, and the stage that continues it.
typedef struct {
    const EquationBeginning *from;
    StagePlan plan;  // plan of the beginning
    int unit, index; // unit before which it ends; index in that list
    int left;        // ranks that remain after the next stage
    PlanRanks here, next, rest;
    EquationLink link, last; // to the next stage; from that to a stage with all remaining ranks
    uint64_t place;
    int policy;
} EquationStep;

// Examines the next stage with its end before `end`. Together with one stage of all that is left it
// is a plan, which is offered; and it is a new beginning, which is added to its list.
static inline void equation_continue(EquationSearch *e, const EquationStep *step, int end) {
    const int units = e->model->units;
    EquationState states[EQUATION_GUESSES], ends[EQUATION_GUESSES];
    e->work++;
    EquationStage link = equation_message(e, &step->link, step->unit),
                  stage = equation_stage(e, &step->next, step->unit, end),
                  last_link = equation_message(e, &step->last, end),
                  last = equation_stage(e, &step->rest, end, units);
    const int n =
        equation_append(&step->from->state, step->unit ? &link : NULL, &stage, e->others, states);
    const double slowest = equation_seconds(e, end, units) / step->left;
    const bool rest_fits = equation_fits(e, &step->plan, step->left, end, units);
    for (int i = 0; i < n; i++) {
        const EquationBeginning b = {.state = states[i],
                                     .bound = equation_bound(&states[i], slowest, e->others),
                                     .place = step->place,
                                     .parent = step->index,
                                     .first = step->unit,
                                     .stages = step->plan.stages + 1,
                                     .replicas = step->next.n,
                                     .used = step->from->used + step->next.n,
                                     .policy = (unsigned char)step->policy};
        if (b.bound >= e->best_s) { continue; }
        int closed = 0;
        if (rest_fits) { closed = equation_append(&states[i], &last_link, &last, e->others, ends); }
        for (int k = 0; k < closed; k++) {
            if (!ends[k].pivoted || ends[k].cost[0] >= e->best_s) { continue; }
            StagePlan p = plan_append(&step->plan, end - step->unit, step->next.n, step->policy);
            p = plan_append(&p, units - end, step->left, step->policy);
            equation_offer(e, &p);
        }
        if (step->left > 1 && end + 1 < units && b.stages + 2 <= PLAN_STAGES) {
            equation_add(e, end, &b);
        }
    }
}
// Returns the first unit before which the next stage may end. With an earlier end the remaining
// units would take so long that no plan is better than the best so far. *most receives the seconds
// that M - 1 micro-batches may take in a stage.
static inline int equation_low(const EquationSearch *e, const EquationStep *step, double *most) {
    const EquationState *a = &step->from->state;
    *most = a->pivoted ? -a->cost[2] : e->best_s - a->cost[0] - a->cost[1];
    int end = step->unit + 1;
    while (end < e->model->units &&
           e->others * equation_seconds(e, end, e->model->units) / step->left >= *most) {
        end++;
    }
    return end;
}
static inline int equation_ranks(const Cluster *c, const int *used, const int *take, int *ranks) {
    int n = 0;
    for (int k = 0; k < c->nodes; k++) {
        const int of_node = take ? take[k] : cluster_node_ranks(c, k) - used[k];
        const int first = cluster_first_rank(c, k) + used[k];
        for (int i = 0; i < of_node; i++) { ranks[n++] = first + i; }
    }
    return n;
}
// Examines the next stage with this number of replicas, by each policy. last: the node on which the
// stage before ends.
static inline void equation_place(EquationSearch *e, EquationStep *step, int replicas, int last) {
    const Cluster *c = &e->task->cluster;
    uint64_t seen[PLACE_POLICIES];
    step->left = task_ranks(e->task) - step->from->used - replicas;
    double most;
    const int low = equation_low(e, step, &most);
    bool possible =
        low < e->model->units && e->others * equation_seconds(e, step->unit, low) / replicas < most;
    for (int policy = 0; policy < e->policies && possible; policy++) {
        e->work += ceil_div(task_ranks(e->task), EQUATION_RANKS);
        int end_node = place_stage(c, (PlacePolicy)policy, e->used, last, replicas, e->take);
        for (int k = 0; k < c->nodes; k++) { e->then[k] = e->used[k] + e->take[k]; }
        Checksum sum = checksum_begin();
        checksum_add(&sum, e->then, c->nodes * sizeof(int));
        checksum_add(&sum, e->take, c->nodes * sizeof(int));
        checksum_add(&sum, &end_node, sizeof end_node);
        step->place = seen[policy] = checksum_end(&sum);
        step->policy = policy;
        bool again = false;
        for (int i = 0; i < policy; i++) { again = again || seen[i] == seen[policy]; }
        if (again) { continue; }
        step->next = plan_ranks(c, e->next, equation_ranks(c, e->used, e->take, e->next));
        step->rest = plan_ranks(c, e->rest, equation_ranks(c, e->then, NULL, e->rest));
        if (step->unit) { step->link = equation_link(c, &step->here, &step->next); }
        step->last = equation_link(c, &step->next, &step->rest);
        for (int end = low; end < e->model->units; end++) {
            double time = e->others * equation_seconds(e, step->unit, end) / replicas;
            if (time >= most || !equation_fits(e, &step->plan, replicas, step->unit, end)) {
                break;
            }
            equation_continue(e, step, end);
        }
    }
}
// Returns the i-th number of replicas to try, 0 for none: all numbers if there are at most
// EQUATION_RANKS ranks.
static inline int equation_choice(const PlanTask *t, int n, int i) {
    if (task_ranks(t) > EQUATION_RANKS) { return split_choice(n, t->cluster.ranks, i); }
    return i + 1 < n ? i + 1 : 0;
}
static inline void equation_expand(EquationSearch *e, const EquationBeginning *from, int unit,
                                   int index) {
    const PlanTask *t = e->task;
    EquationStep step = {
        .from = from, .plan = equation_plan(e, from, unit), .unit = unit, .index = index};
    memset(e->used, 0, t->cluster.nodes * sizeof(int));
    int last = 0;
    for (int s = 0; s < step.plan.stages; s++) {
        last = place_stage(&t->cluster, (PlacePolicy)step.plan.policy[s], e->used, last,
                           step.plan.replicas[s], e->take);
        const int n = equation_ranks(&t->cluster, e->used, e->take, e->here);
        step.here = plan_ranks(&t->cluster, e->here, n);
        for (int k = 0; k < t->cluster.nodes; k++) { e->used[k] += e->take[k]; }
    }
    const int left = task_ranks(t) - step.from->used;
    for (int i = 0, r; (r = equation_choice(t, left, i)); i++) {
        equation_place(e, &step, r, last);
    }
}
// Examines all plans of two stages or more, but continues at most `width` beginnings of each list.
static inline void equation_search_width(EquationSearch *e, int width) {
    e->width = width;
    e->cut = false;
    const EquationBeginning none = {.state = equation_begin};
    equation_expand(e, &none, 0, 0);
    for (int i = e->bins; i < (e->model->units - 1) * e->bins; i++) {
        EquationList *l = &e->list[i];
        equation_list_sort(e, l);
        for (int k = 0; k < l->count; k++) {
            if (l->at[k].bound < e->best_s) { equation_expand(e, &l->at[k], i / e->bins, k); }
        }
        keep_alive(); // other ranks may wait
    }
    equation_lists_free(e);
}
// Finds the best plan of two stages or more, unless a better one was offered before: with lists of
// one beginning, then with longer ones, until none was too short or the work has taken about as
// long as a planner may take.
static inline void equation_search(EquationSearch *e) {
    const int64_t enough = 4000000; // about a second
    e->cut = true;
    for (int width = 1; e->cut && e->work < enough; width *= 4) { equation_search_width(e, width); }
}

#endif
