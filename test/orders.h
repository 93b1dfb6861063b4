// orders.h: runs programs of overlapping steps as ranks do that defer store operations
// (executor/deferred.h), in an order drawn by lot, and returns what the parameters at the end are
// made of (mutations.h: values). It must be what the order of the lists gives.
//
// A rank reaches the actions of its list in order. It only notes an operation that may be deferred,
// which runs when all that must precede it is done. A message is read at its sender and written at
// its receiver as late as possible, some time after both ends are posted, and done then. At a pause
// a rank waits for all its operations.
#ifndef ORDERS_H
#define ORDERS_H

#include "schedule/order.h"

#include "mutations.h"

typedef struct {
    int at; // next action of the unrolled list
    Order order;
    ListPlace *places; // [actions]
    OpenActions open;
    int *noted, *posted; // [noted_count], [posted_count] indices in the unrolled list
    int noted_count, posted_count;
} OrdersRank;
typedef struct {
    const Program *program;
    OrdersRank *rank;
    Values values;
    MutationDraw draw;
    bool newest; // newest operations and messages first, so that others take as long as they can
} Orders;

static inline const Action *orders_action(const Orders *o, int rank, int i) {
    return &o->program->rank[rank].actions[i];
}
static inline void orders_remove(int *list, int *count, int i) {
    memmove(&list[i], &list[i + 1], (size_t)(--*count - i) * sizeof *list);
}
// Returns the index below n at which a search begins: a drawn one, or the last.
static inline int orders_pick(Orders *o, int n) {
    return o->newest && mutation_draw(&o->draw, 4) ? n - 1 : mutation_draw(&o->draw, n);
}
// Runs a noted operation of a rank, if one may run. A message is posted.
static inline bool orders_run(Orders *o, int r) {
    OrdersRank *me = &o->rank[r];
    const int n = me->noted_count, from = n ? orders_pick(o, n) : 0;
    for (int t = 0; t < n; t++) {
        const int k = (from + n - t) % n, i = me->noted[k];
        const Action *a = orders_action(o, r, i);
        ListPlace before;
        if (open_before(&me->open, me->places[i], 1, &before)) { continue; }
        orders_remove(me->noted, &me->noted_count, k);
        if (action_is_message(a->kind)) {
            me->posted[me->posted_count++] = i;
        } else {
            values_part(&o->values, r, a, 1);
            open_end(&me->open, me->places[i]);
        }
        return true;
    }
    return false;
}
// Do two messages use the same channel (state/p2p.h), at the same end or at its two ends?
static inline bool orders_channel(const Action *a, int r, const Action *b, int q) {
    const bool same_end = a->kind == b->kind && a->peer == b->peer && r == q,
               two_ends = (int)b->kind == (int)a->kind + 1 && a->peer == q && b->peer == r;
    return (same_end || two_ends) && a->storage == b->storage;
}
// Returns the message that a rank posted first in the channel of a message, or -1: messages match
// in the order in which they are posted.
static inline int orders_first_in_channel(const Orders *o, int r, const Action *send, int q) {
    for (int k = 0; k < o->rank[q].posted_count; k++) {
        if (orders_channel(send, r, orders_action(o, q, o->rank[q].posted[k]), q)) { return k; }
    }
    return -1;
}
// Completes a message that a rank sends, if both ends of one are posted.
static inline bool orders_complete(Orders *o, int r) {
    OrdersRank *me = &o->rank[r];
    const int n = me->posted_count, from = n ? orders_pick(o, n) : 0;
    for (int t = 0; t < n; t++) {
        const int k = (from + n - t) % n, i = me->posted[k];
        const Action *send = orders_action(o, r, i);
        const bool next = action_sends(send->kind) && orders_first_in_channel(o, r, send, r) == k;
        const int there = next ? orders_first_in_channel(o, r, send, send->peer) : -1;
        if (there < 0) { continue; }
        OrdersRank *other = &o->rank[send->peer];
        const int j = other->posted[there];
        values_visit(&o->values, r, send, send->peer);
        values_visit(&o->values, send->peer, orders_action(o, send->peer, j), r);
        open_end(&me->open, me->places[i]);
        open_end(&other->open, other->places[j]);
        orders_remove(me->posted, &me->posted_count, k);
        orders_remove(other->posted, &other->posted_count, there);
        return true;
    }
    return false;
}
// Returns whether the list of a rank may reach its next action.
static inline bool orders_may_reach(const Orders *o, int r) {
    const OrdersRank *me = &o->rank[r];
    const ListPlace *p = &me->places[me->at];
    ListPlace before;
    if (me->at == o->program->rank[r].count) { return false; }
    const bool paused = me->at && p->window < p[-1].window;
    if (paused && (me->noted_count || me->posted_count)) { return false; }
    // the same operation of an earlier window has the same place
    return !*open_place(&me->open, *p) && !open_before(&me->open, *p, 0, &before);
}
// Moves the list of a rank to the next action. Messages that are not deferred meet in the lists.
static inline bool orders_reach(Orders *o, int r) {
    OrdersRank *me = &o->rank[r];
    if (!orders_may_reach(o, r)) { return false; }
    const Action *a = orders_action(o, r, me->at);
    if (action_may_be_deferred(a)) {
        open_begin(&me->open, me->places[me->at]);
        values_part(&o->values, r, a, 0);
        me->noted[me->noted_count++] = me->at++;
        return true;
    }
    if (!action_is_message(a->kind)) {
        values_visit(&o->values, r, a, -1);
        me->at++;
        return true;
    }
    const int q = a->peer;
    const bool sends = action_sends(a->kind) && orders_may_reach(o, q);
    if (!sends || !actions_match(a, r, orders_action(o, q, o->rank[q].at), q)) { return false; }
    values_visit(&o->values, r, a, q);
    values_visit(&o->values, q, orders_action(o, q, o->rank[q].at++), r);
    me->at++;
    return true;
}
static inline bool orders_ended(const Orders *o) {
    for (int r = 0; r < o->program->ranks; r++) {
        const OrdersRank *me = &o->rank[r];
        if (me->at < o->program->rank[r].count || me->noted_count || me->posted_count) {
            return false;
        }
    }
    return true;
}
// Returns a hash of all parameters at the end; 0 if the ranks wait for ever. without: index of an
// action of rank 0 whose predecessors are forgotten, to see that they are needed; -1: none.
static inline uint64_t orders_values(const Program *window, const CyclicPlan *cyclic,
                                     const GptModel *model, int pause, uint64_t seed, int without) {
    enum { STEPS = 5 };
    Program all = cyclic_unroll(window, cyclic, STEPS, pause);
    Orders o = {.program = &all, .draw = {seed, 0}, .newest = seed % 2};
    o.values = values_new(&all, cyclic, model);
    o.rank = new_array(OrdersRank, all.ranks, "orders");
    for (int r = 0; r < all.ranks; r++) {
        OrdersRank *me = &o.rank[r];
        const int count = all.rank[r].count;
        me->order = window_order(window, cyclic, model, r);
        if (without >= 0 && !r) { me->order.part[1][without].count = 0; }
        me->places = order_places(&window->rank[r], count, STEPS, pause);
        me->open = open_actions(&me->order);
        me->noted = new_array(int, count + 1, "orders");
        me->posted = new_array(int, count + 1, "orders");
    }
    const int share = 1 + mutation_draw(&o.draw, 30); // of 32 moves: lists advance
    int idle = 0;
    while (!orders_ended(&o) && idle < 100000) {
        const int r = mutation_draw(&o.draw, all.ranks), move = mutation_draw(&o.draw, 32);
        const bool moved = move < share ? orders_reach(&o, r)
                           : move % 2   ? orders_run(&o, r)
                                        : orders_complete(&o, r);
        idle = moved ? 0 : idle + 1;
    }
    const uint64_t value = orders_ended(&o) ? values_of_parameters(&o.values) : 0;
    for (int r = 0; r < all.ranks; r++) {
        OrdersRank *me = &o.rank[r];
        order_free(&me->order);
        free_all(me->places, me->open.window, me->noted, me->posted);
    }
    values_free(&o.values);
    free(o.rank);
    cyclic_window_free(&all);
    return value;
}

#endif
