// simulated_times.h: checks that no action of a simulated program begins before what it touches is
// ready.
#ifndef SIMULATED_TIMES_H
#define SIMULATED_TIMES_H

#include "schedule/simulator.h"
#include "schedule/validator.h"

#include "harness.h"
#include "mutations.h"

typedef struct {
    uint64_t seed;
    bool overlap; // of steps: a REDUCE sends nothing
} DrawnCosts;
// Costs drawn by lot: an action computes, moves data beside that, or does both.
static inline ActionCost drawn_cost(const void *context, int rank, const Action *a) {
    const DrawnCosts *c = (const DrawnCosts *)context;
    const uint64_t drawn =
        touch_name(c->seed ^ touch_name((uint64_t)a->kind, a->unit, a->storage), rank, a->micro);
    const bool sends = !c->overlap || a->kind != ACT_REDUCE,
               beside = action_is(a->kind, SENDS | RECEIVES | COLLECTIVE | MOVES | ON_DISK),
               computes = action_is(a->kind, COMPUTES | COLLECTIVE) || a->kind == ACT_UPDATE;
    const ActionCost cost = {computes ? (double)(drawn >> 8 & 7) : 0,
                             beside && sends ? (double)(drawn >> 16 & 31) : 0,
                             (double)(drawn >> 24 & 3) / 3};
    return cost;
}
// What one knows of a resource: when its content is complete, when the last one has read it.
typedef struct {
    double changed, read;
    const Action *by;
} ResourceTimes;
// Does each action of a rank begin after all that it must follow?
static inline void assert_times_of_rank(const char *name, TouchPlan *p, int rank,
                                        const ActionTime *times) {
    const Schedule *list = &p->program->rank[rank];
    ResourceNumbers numbers = {.count = 0};
    ResourceTimes *known = NULL;
    int64_t capacity = 0;
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->actions[i];
        action_touches(p, rank, a);
        for (int k = 0; k < p->count; k++) {
            const Touch *t = &p->touch[k];
            if (is_bookkeeping(t->of) && t->of != RES_GRADIENT_SLOT) { continue; }
            const int before = numbers.count, at = resource_number(&numbers, rank, t);
            if (at == before) {
                const ResourceTimes none = {-INFINITY, -INFINITY, NULL};
                known = grow_array(ResourceTimes, known, at, &capacity, "times");
                known[at] = none;
            }
            ResourceTimes *r = &known[at];
            const bool reads = t->use == TOUCH_READ;
            const double begin = times[i].begin_s, end = times[i].end_s;
            const ActionKind by = r->by ? r->by->kind : ACTION_KINDS;
            // Rows of several messages come into one buffer; the directions of a piece travel on.
            // The simulator does not know how many buffers the head's part of wte's gradient has.
            const bool apart = (action_is(a->kind, RECEIVES) && by == a->kind) ||
                               (t->of == RES_PIECE && by == ACT_DIRECT) || by == ACT_SEND_PART ||
                               a->kind == ACT_RECV_PART;
            if (r->by != a && !apart &&
                begin < (reads ? r->changed : fmax(r->changed, r->read)) - 1e-9) {
                fail_msg("%s, rank %d: %s of unit %d, storage %d, micro-batch %d begins at %g, %s "
                         "at %g: %s",
                         name, rank, action_name(a->kind), a->unit, a->storage, (int)a->micro,
                         begin, r->by ? action_name(r->by->kind) : "", fmax(r->changed, r->read),
                         resource_text(t->of));
            }
            if (reads) {
                r->read = fmax(r->read, end);
            } else {
                r->changed = end;
            }
            r->by = a;
        }
    }
    free_all(numbers.slot, known);
}
// Simulates a program with drawn costs. cyclic, model: of unrolled steps that overlap, else NULL.
static inline void assert_times_follow_touches(const char *name, const Program *p,
                                               const CyclicPlan *cyclic, const GptModel *model,
                                               uint64_t seed) {
    ActionTime **times = schedule_times(p);
    TouchPlan touches = touch_plan(p, cyclic, model);
    const DrawnCosts costs = {seed, cyclic != NULL};
    schedule_simulate_times(p, drawn_cost, &costs, NULL, times);
    for (int r = 0; r < p->ranks; r++) { assert_times_of_rank(name, &touches, r, times[r]); }
    touch_plan_free(&touches);
    schedule_times_free(p, times);
}

#endif
