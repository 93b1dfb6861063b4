// equations.h: the planner of the DAPPLE paper (arXiv 2007.01045, section 4): equations 1 to 3, and
// the plan that is best by them.
//
// Every plan is in reach: any number of stages, every cut, every number of replicas, and for each
// stage each of the paper's placement policies. The paper's dynamic program (equations 4 and 5)
// keeps one plan for the first units on some ranks, the one that is best with a single stage behind
// it; that is not always a part of the best plan. Here all beginnings of a plan are kept, but for
// those that another one on the same ranks beats whatever comes behind, and those whose lower bound
// is no better than the best plan so far. So the best plan is found, unless a list of beginnings,
// of those that have as many units and ranks, grows too long: then those with the least bounds stay
// (EquationSearch.cut says so).
#ifndef EQUATIONS_H
#define EQUATIONS_H

#include "plan.h" // plans and what their stages cost

// -------------------------------------------------------------------------------------------------
// The equations, to the letter: stages of computation and the links between them are all stages

// The pivot: the stage with the least bubbles, which sets the pace. forward[], backward[]: seconds
// of a micro-batch, by stage.
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
// Seconds of a step: warm-up, steady phase at the pace of the pivot, and the end, in which
// all-reduces hide behind what still drains.
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
// Data parallelism, whose all-reduce overlaps with the last backward, has no stages to place.
static inline double plan_by_equations(const PlanCosts *c) {
    if (c->stages > 1) { return plan_equations(c); }
    return c->micro_batches * (c->forward[0] + c->backward[0]) + c->reduce_late[0];
}

// -------------------------------------------------------------------------------------------------
// Beginnings of a plan

// What the stages so far mean for the latency of any plan that begins with them: three numbers,
// each of them the better the less it is. Which stage is the pivot is guessed; with C = F + B and M
// micro-batches the guess Q holds where
//   before Q:  (M - 1) C_s <= (M - 1) C_Q + sum of C between s and Q, for each s,
//   behind Q:  going back from the last stage, no pivot until then holds out against Q.
// The latter is (M - 1) C_Q > W, where W of the stages from s on is (M - 1) C_s if that is more
// than W of those behind s, else C_s more than that. So the most that W of the rest may be is known
// stage by stage, from Q on.
//   pivot to come:  sum of F;  latest end of an all-reduce, counted from the first backward of the
//                   last of these stages;  max of (M - 1) C_s - sum of C behind s
//   pivot chosen:   latency with these stages alone;  the same without all-reduces, less what
//                   drains
//                   behind the pivot;  minus the most that W of the rest may be
typedef struct {
    bool pivoted;
    double cost[3];
} EquationState;
typedef struct {
    double forward, backward, reduce;
} EquationStage;

static inline EquationState equation_begin(void) {
    EquationState state = {false, {0, 0, -INFINITY}};
    return state;
}
static inline EquationState equation_before(EquationState a, const EquationStage *s,
                                            double others) {
    const double time = s->forward + s->backward;
    a.cost[0] += s->forward;
    a.cost[1] = fmax(a.cost[1], s->reduce) + s->backward;
    a.cost[2] = fmax(a.cost[2] - time, others * time);
    return a;
}
// False where it cannot be the pivot, or where there cannot be a stage behind the pivot (others: M
// - 1).
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
// The states after another link (NULL: none) and stage, one for each guess; returns how many.
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
// Seconds that no plan with this beginning is better than, where the slowest stage of the rest
// takes at least `slowest` for a micro-batch.
static inline double equation_bound(const EquationState *a, double slowest, double others) {
    if (a->pivoted) { return others * slowest >= -a->cost[2] ? INFINITY : a->cost[0]; }
    return a->cost[0] + a->cost[1] + fmax(a->cost[2], others * slowest);
}

typedef struct {
    EquationState state;
    double bound;
    uint64_t place;       // checksum: which ranks its stages have, and which of them the last one
    int parent, first;    // what it continues, in the list of that unit: the last stage's first one
    int stages, replicas; // of the last stage
    int used;             // ranks of all
    int next;             // in the bucket of its place
    unsigned char policy;
} EquationBeginning;
// Those of the units before one, on about the same number of ranks.
typedef struct {
    EquationBeginning *at;
    int count, capacity;
    int *bucket;  // [capacity] the first one's index, or -1
    double limit; // worse ones did not stay
} EquationList;

enum { EQUATION_RANKS = 64 }; // of more, only some numbers of replicas are tried
typedef struct {
    const PlanTask *task; // its micro-batch is what is searched
    double others;        // M - 1
    int policies;         // to choose from
    EquationList *list;   // [units][bins] by the unit behind a beginning, and by its ranks
    int bins;
    int width;    // most beginnings of a list that are continued
    bool cut;     // there were more
    int64_t work; // about how many ends of stages were looked at
    Plan best;    // so far; 0 stages: none
    double best_s;
    PlanCosts costs;         // of a plan that is looked at
    int *scratch, *ranks;    // of plan_place()
    int *used, *take, *then; // [nodes] ranks of the nodes: in use, of the next stage, of both
    // [ranks] of the last stage, the next one, and one with all that is left
    int *here, *next, *rest;
} EquationSearch;

static inline EquationSearch equation_search_make(const PlanTask *t, int policies) {
    EquationSearch e;
    memset(&e, 0, sizeof e);
    const size_t nodes = (size_t)t->cluster.nodes, ranks = (size_t)task_ranks(t);
    e.task = t;
    e.others = (double)(t->samples / t->micro_batch - 1);
    e.policies = policies;
    e.best_s = INFINITY;
    e.bins = (int)min_i64(task_ranks(t), EQUATION_RANKS);
    const size_t lists = (size_t)t->model->units * (size_t)e.bins;
    e.list = (EquationList *)checked_calloc(lists, sizeof *e.list, "equations");
    e.scratch = (int *)checked_calloc(5 * nodes + 4 * ranks, sizeof(int), "equations");
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
    const int lists = e->task->model->units * e->bins;
    for (int i = 0; i < lists; i++) {
        free(e->list[i].at);
        free(e->list[i].bucket);
    }
    memset(e->list, 0, (size_t)lists * sizeof *e->list);
}
static inline void equation_search_free(EquationSearch *e) {
    equation_lists_free(e);
    free(e->list);
    free(e->scratch);
}

// Where beginnings that end before this unit and use so many ranks are.
static inline EquationList *equation_list(const EquationSearch *e, int unit, int used) {
    return &e->list[unit * e->bins + (int)((int64_t)(used - 1) * e->bins / task_ranks(e->task))];
}
// Takes a plan where it is the best so far.
static inline void equation_offer(EquationSearch *e, const Plan *plan) {
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
// Fills the buckets anew, with place for twice as many.
static inline void equation_list_index(EquationList *l) {
    while (l->capacity < 2 * l->count || !l->capacity) {
        l->capacity = l->capacity ? 2 * l->capacity : 64;
        size_t bytes = (size_t)l->capacity * sizeof *l->at;
        l->at = (EquationBeginning *)realloc(l->at, bytes);
        l->bucket = (int *)realloc(l->bucket, (size_t)l->capacity * sizeof(int));
        if (!l->at || !l->bucket) {
            die(EXIT_RESOURCES, NULL, "cannot hold %d plans", l->capacity);
        }
    }
    for (int i = 0; i < l->capacity; i++) { l->bucket[i] = -1; }
    for (int i = 0; i < l->count; i++) {
        int *bucket = equation_bucket(l, &l->at[i]);
        l->at[i].next = *bucket;
        *bucket = i;
    }
}
// The list in the order of bounds, without those that the best plan so far, or another, beats, and
// with no more than may be continued.
static inline void equation_list_sort(EquationSearch *e, EquationList *l) {
    if (l->count) { qsort(l->at, (size_t)l->count, sizeof *l->at, equation_order); }
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
        if (alike && equation_beats(&other->state, &b->state)) { // to the front: it may beat more
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

// Stages of a beginning, the last one of which ends before this unit.
static inline Plan equation_plan(const EquationSearch *e, const EquationBeginning *b, int unit) {
    Plan p;
    memset(&p, 0, sizeof p);
    p.micro_batch = e->task->micro_batch;
    p.kind = PIPELINE_DAPPLE;
    p.warmup = WARMUP_A;
    p.stages = b->stages;
    for (int s = p.stages - 1; s >= 0; s--) {
        p.units[s] = unit - b->first;
        p.replicas[s] = b->replicas;
        p.policy[s] = b->policy;
        unit = b->first;
        if (s) { b = &equation_list(e, unit, b->used - b->replicas)->at[b->parent]; }
    }
    return p;
}
static inline Plan plan_append(const Plan *p, int units, int replicas, int policy) {
    Plan q = *p;
    q.units[q.stages] = units;
    q.replicas[q.stages] = replicas;
    q.policy[q.stages++] = (unsigned char)policy;
    return q;
}

// Seconds to a byte and of a message, there and back.
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
    const double bytes = (double)e->task->micro_batch * e->task->model->cut[unit];
    EquationStage s = {0, 0, 0};
    if (bytes > 0) {
        s.forward = l->per_byte * bytes + l->latency;
        s.backward = l->per_byte_back * bytes + l->latency;
    }
    return s;
}
static inline double equation_seconds(const EquationSearch *e, int first, int end) { // on one rank
    const PlanModel *m = e->task->model;
    double sample_s = m->forward[end] - m->forward[first] + m->backward[end] - m->backward[first];
    return (double)e->task->micro_batch * sample_s;
}
static inline EquationStage equation_stage(const EquationSearch *e, const PlanRanks *r, int first,
                                           int end) {
    const PlanModel *m = e->task->model;
    const double rows = (double)e->task->micro_batch / r->n;
    EquationStage s;
    s.forward = rows * (m->forward[end] - m->forward[first]);
    s.backward = rows * (m->backward[end] - m->backward[first]);
    s.reduce = plan_all_reduce_s(&e->task->cluster, r->n, r->first_node != r->last_node,
                                 m->parameters[end] - m->parameters[first]);
    return s;
}
static inline bool equation_fits(const EquationSearch *e, const Plan *p, int n, int first,
                                 int end) {
    const double rows = plan_held_rows(e->task->micro_batch, n);
    double bytes;
    return plan_stage_memory(e->task, p, first, end, rows, 0, e->task->memory, &bytes) >= 1;
}

// A beginning that is continued, and by what.
typedef struct {
    const EquationBeginning *from;
    Plan plan;       // of it
    int unit, index; // where it is: in which list, and there
    int left;        // ranks that the next stage leaves
    PlanRanks here, next, rest;
    EquationLink link, last; // to the next stage; to one with all that is left
    uint64_t place;
    int policy;
} EquationStep;

// The next stage ends before `end`: with all that is left behind it that is a plan; and it is the
// beginning of others.
static inline void equation_continue(EquationSearch *e, const EquationStep *step, int end) {
    const int units = e->task->model->units;
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
        EquationBeginning b = {states[i],    INFINITY,
                               step->place,  step->index,
                               step->unit,   step->plan.stages + 1,
                               step->next.n, step->from->used + step->next.n,
                               -1,           (unsigned char)step->policy};
        b.bound = equation_bound(&states[i], slowest, e->others);
        if (b.bound >= e->best_s) { continue; }
        int closed = 0;
        if (rest_fits) { closed = equation_append(&states[i], &last_link, &last, e->others, ends); }
        for (int k = 0; k < closed; k++) {
            if (!ends[k].pivoted || ends[k].cost[0] >= e->best_s) { continue; }
            Plan p = plan_append(&step->plan, end - step->unit, step->next.n, step->policy);
            p = plan_append(&p, units - end, step->left, step->policy);
            equation_offer(e, &p);
        }
        if (step->left > 1 && end + 1 < units && b.stages + 2 <= PLAN_STAGES) {
            equation_add(e, end, &b);
        }
    }
}
// The first unit from `low` to `units` before which a stage may end, so that those behind it take
// less than `most` on `ranks`.
static inline int equation_first_end(const EquationSearch *e, int low, int ranks, double most) {
    const int units = e->task->model->units;
    int high = units;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (e->others * equation_seconds(e, middle, units) / ranks < most) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}
// Where the next stage may end: *low <= end. Behind each earlier one is a stage that takes so long
// that no plan is better than the best so far. *most: so long may the micro-batches but one take in
// a stage.
static inline int equation_low(const EquationSearch *e, const EquationStep *step, double *most) {
    const EquationState *a = &step->from->state;
    *most = a->pivoted ? -a->cost[2] : e->best_s - a->cost[0] - a->cost[1];
    return equation_first_end(e, step->unit + 1, step->left, *most);
}
static inline int equation_ranks(const Cluster *c, const int *used, const int *take, int *ranks) {
    int n = 0;
    for (int k = 0; k < c->nodes; k++) {
        const int of_node = take ? take[k] : c->ranks - used[k];
        for (int i = 0; i < of_node; i++) { ranks[n++] = k * c->ranks + used[k] + i; }
    }
    return n;
}
// The next stage gets so many ranks by each policy. `last`: the node on which the stage before
// ends.
static inline void equation_place(EquationSearch *e, EquationStep *step, int replicas, int last) {
    const Cluster *c = &e->task->cluster;
    uint64_t seen[PLACE_POLICIES];
    step->left = task_ranks(e->task) - step->from->used - replicas;
    double most;
    const int low = equation_low(e, step, &most);
    bool possible = low < e->task->model->units &&
                    e->others * equation_seconds(e, step->unit, low) / replicas < most;
    for (int policy = 0; policy < e->policies && possible; policy++) {
        e->work += ceil_div(task_ranks(e->task), EQUATION_RANKS);
        int end_node = place_stage(c, (PlacePolicy)policy, e->used, last, replicas, e->take);
        for (int k = 0; k < c->nodes; k++) { e->then[k] = e->used[k] + e->take[k]; }
        Checksum sum = checksum_begin();
        checksum_add(&sum, e->then, (size_t)c->nodes * sizeof(int));
        checksum_add(&sum, e->take, (size_t)c->nodes * sizeof(int));
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
        for (int end = low; end < e->task->model->units; end++) {
            double time = e->others * equation_seconds(e, step->unit, end) / replicas;
            if (time >= most || !equation_fits(e, &step->plan, replicas, step->unit, end)) {
                break;
            }
            equation_continue(e, step, end);
        }
    }
}
// Numbers of replicas that are tried: all, where there are not more ranks than EQUATION_RANKS.
static inline int equation_choice(const PlanTask *t, int n, int i) {
    if (task_ranks(t) > EQUATION_RANKS) { return split_choice(n, t->cluster.ranks, i); }
    return i + 1 < n ? i + 1 : 0;
}
static inline void equation_expand(EquationSearch *e, const EquationBeginning *from, int unit,
                                   int index) {
    const PlanTask *t = e->task;
    EquationStep step;
    memset(&step, 0, sizeof step);
    step.from = from;
    step.plan = equation_plan(e, from, unit);
    step.unit = unit;
    step.index = index;
    memset(e->used, 0, (size_t)t->cluster.nodes * sizeof(int));
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
// All plans of two stages or more, continuing at most so many beginnings of a list.
static inline void equation_search_width(EquationSearch *e, int width) {
    e->width = width;
    e->cut = false;
    EquationBeginning none;
    memset(&none, 0, sizeof none);
    none.state = equation_begin();
    equation_expand(e, &none, 0, 0);
    for (int i = e->bins; i < (e->task->model->units - 1) * e->bins; i++) {
        EquationList *l = &e->list[i];
        equation_list_sort(e, l);
        for (int k = 0; k < l->count; k++) {
            if (l->at[k].bound < e->best_s) { equation_expand(e, &l->at[k], i / e->bins, k); }
        }
        keep_alive(); // other ranks may wait
    }
    equation_lists_free(e);
}
// The best plan of two stages or more, where no better one was offered: with lists of one
// beginning, then longer ones, until none was too short or the work is as much as a planner may
// take.
static inline void equation_search(EquationSearch *e) {
    const int64_t enough = 4000000; // about a second
    e->cut = true;
    for (int width = 1; e->cut && e->work < enough; width *= 4) { equation_search_width(e, width); }
}

#endif
