// order.h: which actions a rank must have done before it begins another, where store operations are
// deferred (executor/deferred.h).
//
// A rank reaches the actions of its list in order. So an action has to wait only for those before
// it that may be deferred, and of these for the ones that touch the same resource (touches.h), if
// either of the two changes it. Windows of steps that overlap are alike, so what precedes an action
// is noted once, relative to its window.
#ifndef ORDER_H
#define ORDER_H

#include "base/base.h"
#include "cyclic.h"
#include "model/gpt.h"
#include "schedule/actions.h"
#include "schedule/cyclic_windows.h"
#include "schedule/schedule.h"
#include "schedule/touch.h"
#include "schedule/touch_plan.h"
#include "schedule/touches.h"

// An action of the list of a window.
typedef struct {
    int64_t window;
    int at;
} ListPlace;
static inline bool list_place_equal(ListPlace a, ListPlace b) {
    return a.window == b.window && a.at == b.at;
}
// An action before another: its index in the list of a window, which is `back` windows before.
typedef struct {
    int at, back;
} Before;
// What an action waits for when the list reaches it (part 0), and what the part of it that may be
// deferred waits for (part 1).
typedef struct {
    Before *before;
    int count;
    int64_t capacity;
} Predecessors;
typedef struct {
    Predecessors *part[2]; // [actions] of the window's list
    int actions, windows;  // most windows from an action to one before it, and one
} Order;

static inline bool action_may_be_deferred(const Action *a) {
    return action_is(a->kind, ON_PARAMETERS | ON_SUM);
}

// A touch of a rank's list. Those of a resource since it was last changed are linked.
typedef struct {
    ListPlace place;
    int next; // the one before; -1: none
    bool changes, deferred;
} OrderTouch;
typedef struct {
    Order *order;
    TouchPlan plan;
    ResourceNumbers resources;
    int *newest;       // [resources] its newest touch; -1: none
    OrderTouch *touch; // [touches]
    int touches;
    int64_t newest_capacity, touch_capacity;
} OrderBuilder;

// Points to the newest touch of the resource that a touch names.
static inline int *order_newest(OrderBuilder *b, int rank, const Touch *t) {
    const int known = b->resources.count, at = resource_number(&b->resources, rank, t);
    if (at == known) {
        b->newest = grow_array(int, b->newest, at, &b->newest_capacity, "the order of actions");
        b->newest[at] = -1;
    }
    return &b->newest[at];
}
static inline void order_add(Order *o, Predecessors *of, int at, int back) {
    for (int i = 0; i < of->count; i++) {
        if (of->before[i].at == at && of->before[i].back == back) { return; }
    }
    of->before = grow_array(Before, of->before, of->count, &of->capacity, "the order of actions");
    of->before[of->count].at = at;
    of->before[of->count++].back = back;
    o->windows = (int)max_i64(o->windows, back + 1);
}
// Notes what an action of a list touches, and what it must follow.
static inline void order_visit(OrderBuilder *b, int rank, const Action *a, ListPlace place) {
    const bool may = action_may_be_deferred(a);
    action_touches(&b->plan, rank, a);
    for (int i = 0; i < b->plan.count; i++) {
        const Touch *t = &b->plan.touch[i];
        const bool changes = t->use != TOUCH_READ, deferred = may && !t->at_once;
        if (t->of == RES_SAMPLES) { continue; } // only the validator counts them
        int *newest = order_newest(b, rank, t);
        for (int k = *newest; k >= 0; k = b->touch[k].next) {
            const OrderTouch *before = &b->touch[k];
            if (before->deferred && (before->changes || changes) &&
                !list_place_equal(before->place, place)) {
                order_add(b->order, &b->order->part[deferred][place.at], before->place.at,
                          (int)(place.window - before->place.window));
            }
        }
        b->touch = grow_array(OrderTouch, b->touch, b->touches, &b->touch_capacity, "touches");
        const OrderTouch mine = {.place = place,
                                 .next = changes ? -1 : *newest,
                                 .changes = changes,
                                 .deferred = deferred};
        *newest = b->touches;
        b->touch[b->touches++] = mine;
    }
}
// Returns the places in the lists of windows of a rank's unrolled actions (cyclic_unroll, with the
// same steps and pause). Windows count on to a pause, and begin anew after it. The caller frees
// them.
static inline ListPlace *order_places(const Schedule *window, int count, int steps, int pause) {
    ListPlace *places = new_array(ListPlace, max_i64(count, 1), "the order of actions");
    int n = 0;
    for (int first = 0; first < steps; first += pause) {
        const int end = min_i64(first + pause, steps);
        for (int64_t step = first - 1; step < end + DRAINS; step++) {
            for (int i = 0; i < window->count; i++) {
                const int64_t of_step = step + window->actions[i].step;
                if (of_step < first || of_step >= end) { continue; }
                places[n].window = step;
                places[n++].at = i;
            }
        }
    }
    assert(n == count);
    return places;
}
// Plays the list of a rank in steps of which every `pause`-th drains. At a pause all is done.
static inline void order_play(Order *o, const Program *window, const CyclicPlan *cyclic,
                              const GptModel *model, int rank, int pause) {
    const int steps = cyclic_steps_to_check(cyclic);
    Program all = cyclic_unroll(window, cyclic, steps, pause);
    const Schedule *list = &all.rank[rank];
    ListPlace *places = order_places(&window->rank[rank], list->count, steps, pause);
    OrderBuilder b = {.order = o, .plan = touch_plan(&all, cyclic, model)};
    for (int i = 0; i < list->count; i++) {
        if (i && places[i].window < places[i - 1].window) { // after a pause
            for (int k = 0; k < b.resources.count; k++) { b.newest[k] = -1; }
            b.touches = 0;
        }
        order_visit(&b, rank, &list->actions[i], places[i]);
    }
    touch_plan_free(&b.plan);
    free_all(b.resources.slot, b.newest, b.touch, places);
    cyclic_window_free(&all);
}
// Returns the order of a rank's window, where all windows are alike (mode data). It holds for steps
// of any number of samples: here each piece has one. order_free() frees it.
static inline Order window_order(const Program *window, const CyclicPlan *cyclic,
                                 const GptModel *model, int rank) {
    Program full = *window;
    full.samples = cyclic_step_pieces(cyclic);
    full = cyclic_window(&full, cyclic, 0);
    Order o = {.actions = full.rank[rank].count, .windows = 1};
    for (int k = 0; k < 2; k++) {
        o.part[k] = new_array(Predecessors, max_i64(o.actions, 1), "the order of actions");
    }
    order_play(&o, &full, cyclic, model, rank, cyclic_steps_to_check(cyclic));
    if (cyclic->pauses) { order_play(&o, &full, cyclic, model, rank, 2); }
    cyclic_window_free(&full);
    return o;
}
static inline void order_free(Order *o) {
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < o->actions && o->part[k]; i++) { free(o->part[k][i].before); }
        free(o->part[k]);
    }
    memset(o, 0, sizeof *o);
}

// Prints which actions of a rank's list are deferred, and what must precede each action: its number
// in the list, after the number of windows before.
static inline void order_print(FILE *to, const Order *o, const Schedule *list, int rank) {
    fprintf(to, "rank %d: order of deferred operations\n", rank);
    for (int i = 0; i < o->actions; i++) {
        for (int part = 0; part < 2; part++) {
            const Predecessors *all = &o->part[part][i];
            const bool deferred = part && action_may_be_deferred(&list->actions[i]);
            if (!all->count && !deferred) { continue; }
            fprintf(to, "  %5d %s", i, part ? "is deferred, after" : "waits for");
            for (int k = 0; k < all->count; k++) {
                fprintf(to, " %d:%d", all->before[k].back, all->before[k].at);
            }
            fprintf(to, "\n");
        }
    }
}

// What is not done yet, of the newest windows. The place of an action is free again when it is
// done: the same action of a later window needs it.
typedef struct {
    const Order *order;
    // [windows][actions] 2 more than the number of the window, which is at least -1; 0: free
    int64_t *window;
} OpenActions;
static inline OpenActions open_actions(const Order *o) {
    const OpenActions open = {o, new_array(int64_t, (int64_t)o->windows * max_i64(o->actions, 1),
                                           "the order of actions")};
    return open;
}
static inline int64_t *open_place(const OpenActions *open, ListPlace p) {
    const int64_t rows = open->order->windows, row = (p.window % rows + rows) % rows;
    return &open->window[row * open->order->actions + p.at];
}
// Returns the action in a place that is not free: the same one of an earlier window.
static inline ListPlace open_occupant(const OpenActions *open, ListPlace p) {
    const ListPlace occupant = {*open_place(open, p) - 2, p.at};
    return occupant;
}
static inline bool is_open(const OpenActions *open, ListPlace p) {
    return p.window >= -1 && *open_place(open, p) == p.window + 2;
}
static inline void open_begin(OpenActions *open, ListPlace p) {
    assert(!*open_place(open, p));
    *open_place(open, p) = p.window + 2;
}
static inline void open_end(OpenActions *open, ListPlace p) {
    assert(is_open(open, p));
    *open_place(open, p) = 0;
}
// Finds an action that must precede a part of another and is not done. Returns false, and leaves
// *found as it is, if there is none.
static inline bool open_before(const OpenActions *open, ListPlace p, int part, ListPlace *found) {
    const Predecessors *all = &open->order->part[part][p.at];
    for (int i = 0; i < all->count; i++) {
        const ListPlace before = {p.window - all->before[i].back, all->before[i].at};
        if (!is_open(open, before)) { continue; }
        *found = before;
        return true;
    }
    return false;
}

#endif
