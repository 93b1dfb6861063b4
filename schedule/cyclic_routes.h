// cyclic_routes.h: how sums of gradients and new parameters travel in Cyclic Data Parallelism
// (cyclic.h): which rank sends what to which other rank in which slot, and what a rank stores
// (state/policy.h: P2p; state/table.h: P2pStorage).
//
// Sums       A micro-batch's gradient of a storage is computed in full, then added to the sum of
//            those before: ((g_1 + g_2) + g_3) + ... This order is part of the definition, so all
//            modes give the same bits.
// Modes      single  one rank runs all micro-batches, interleaved
//            model   rank j runs stage j of all micro-batches: a pipeline without bubbles. With N
//                    (N + 1) / 2 ranks, stage j has N - j ranks that take turns, and each holds the
//                    activations of only one micro-batch. One of them is the stage's owner: it sums
//                    what the others send, updates, and sends each the new version before its first
//                    use. Which rank runs which micro-batch then depends on the step.
//            data    rank i runs micro-batch i, all stages. Rank N - 1 - j owns stage j: it is the
//                    first rank that uses what it updates. All others send it their gradients,
//                    and it adds them, updates, and sends the new parameters to all others at
//                    once. So with even stages no rank sends or receives more than another. What a
//                    unit completes is sent in the unit's part of the slot. The lists are valid if
//                    every message is posted and waited for in order. Where the transport permits,
//                    store operations are deferred instead of waiting (state/p2p.h), which only
//                    removes constraints.
//            zero    as data, but only the owner of a stage keeps its parameters. It sends them to
//                    the next user of the stage one slot before the use. So each rank sends at most
//                    one stage's parameters and one stage's gradient in a slot, and receives as
//                    much.
#ifndef CYCLIC_ROUTES_H
#define CYCLIC_ROUTES_H

#include "base/base.h"
#include "cyclic.h"
#include "model/gpt.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/table.h"

// -------------------------------------------------------------------------------------------------
// The way of new parameters

// A message that carries a version of a stage's parameters from one rank to another at the end of a
// slot. The slot counts from the beginning of the step that makes the version (then version = 1);
// in mode zero, from the beginning of the step that uses it (then version = 0 or -1).
typedef struct {
    int stage, from, to, slot;
    bool head;         // only wte, for the head
    int phase, phases; // only for steps whose number is `phase` modulo `phases`
    int version, use;  // use: mode zero: which use of the step; else -1
} ParamsMessage;
typedef struct {
    int count;
    ParamsMessage *message; // [count] sorted by slot
} ParamsMessages;

static inline ParamsMessage params_message(int stage, int from, int to, int slot) {
    const ParamsMessage message = {.stage = stage,
                                   .from = from,
                                   .to = to,
                                   .slot = slot,
                                   .head = false,
                                   .phase = 0,
                                   .phases = 1,
                                   .version = 1,
                                   .use = -1};
    return message;
}
// A rank sends nothing to itself.
static inline void params_message_add(ParamsMessages *h, ParamsMessage message) {
    if (message.from != message.to) { h->message[h->count++] = message; }
}
static inline bool params_message_in_step(const ParamsMessage *h, int64_t step) {
    return cyclic_turn(step - h->phase, h->phases) == 0;
}
static inline int params_message_compare(const void *a, const void *b) {
    const ParamsMessage *x = (const ParamsMessage *)a, *y = (const ParamsMessage *)b;
    if (x->slot != y->slot) { return x->slot - y->slot; }
    if (x->stage != y->stage) { return y->stage - x->stage; }
    return x->to != y->to ? x->to - y->to : x->head - y->head;
}
// Mode zero: the uses of a step are numbered in a rank's order. Each stage forward, then each but
// the last backward.
static inline int cyclic_use(const CyclicPlan *p, int stage, bool backward) {
    return backward ? 2 * p->N - 2 - stage : stage;
}
static inline bool cyclic_use_is_backward(const CyclicPlan *p, int use) { return use >= p->N; }
// Mode zero: a message for each use, early enough to have a slot to travel, into a slot of the
// borrowed parameters that is free by then; and one more with wte for the head.
static inline void cyclic_route_uses(const CyclicPlan *p, ParamsMessages *h) {
    const int N = p->N;
    for (int k = 0; k < N * 2 * N; k++) {
        const int to = k / (2 * N), use = k % (2 * N);
        // the last use is the head's
        const bool head = use == 2 * N - 1, backward = !head && cyclic_use_is_backward(p, use);
        const int at = head ? N - 1 : backward ? 2 * N - 2 - use : use, stage = head ? 0 : at;
        const int version = -!cyclic_fresh(p, to, stage),
                  made = cyclic_update_slot(p, stage) + 2 * N * (version - 1),
                  used = backward ? cyclic_backward_slot(p, 0, to, at)
                                  : cyclic_forward_slot(p, 0, to, at);
        ParamsMessage message = params_message(stage, cyclic_owner(p, stage), to,
                                               max_i64(max_i64(used - BORROWED_SLOTS, made), -2));
        message.head = head;
        message.version = version;
        message.use = backward ? use : at;
        params_message_add(h, message);
    }
}
// Where the ranks of a stage take turns: cyclic_first_turn returns the slot in which a rank first
// uses the version that a step makes; cyclic_route_turns adds the owner's messages to the others.
static inline int cyclic_first_turn(const CyclicPlan *p, int64_t step, int rank, int stage) {
    int first = INT_MAX;
    for (int piece = 0; piece < cyclic_step_pieces(p); piece++) {
        const int later = cyclic_fresh(p, cyclic_micro(p, piece), stage) ? 1 : 2;
        const bool mine =
            cyclic_rank(p, (step + later) * cyclic_step_pieces(p) + piece, stage) == rank;
        if (mine) { first = min_i64(first, cyclic_forward_slot(p, later, piece, stage)); }
    }
    return first;
}
static inline void cyclic_route_turns(const CyclicPlan *p, ParamsMessages *h) {
    for (int stage = 0; stage < p->N; stage++) {
        const int width = cyclic_width(p, stage), phases = cyclic_phases(p, stage),
                  first = cyclic_first_rank(p, stage), owner = cyclic_owner(p, stage);
        for (int k = 0; k < width * phases; k++) {
            const int to = first + k % width, phase = k / width;
            ParamsMessage message = params_message(
                stage, owner, to,
                max_i64(cyclic_update_slot(p, stage), cyclic_first_turn(p, phase, to, stage) - 3));
            message.phase = phase;
            message.phases = phases;
            params_message_add(h, message);
        }
    }
}
// Mode data: the owner sends each new version to all others at once. They may need it much later,
// but a link that is free now is lost if it stays idle.
static inline void cyclic_route_data(const CyclicPlan *p, ParamsMessages *h) {
    for (int k = 0; k < p->N * p->N; k++) {
        const int stage = k / p->N;
        params_message_add(h, params_message(stage, cyclic_owner(p, stage), k % p->N,
                                             cyclic_update_slot(p, stage)));
    }
}
// Returns all messages of parameters, sorted by slot; the caller frees .message.
static inline ParamsMessages cyclic_route(const CyclicPlan *p) {
    const int N = p->N;
    // a stage has at most as many phases as ranks
    const size_t most = (N * N) * (size_t)(cyclic_turns(p) ? N : 3);
    ParamsMessages h = {0, new_array(ParamsMessage, most, "routes")};
    if (p->mode == CYCLIC_MODEL && !p->untied) {
        ParamsMessage wte =
            params_message(0, cyclic_owner(p, 0), p->ranks - 1, cyclic_update_slot(p, 0));
        wte.head = true;
        params_message_add(&h, wte);
    }
    if (p->mode == CYCLIC_ZERO) { cyclic_route_uses(p, &h); }
    if (cyclic_turns(p)) { cyclic_route_turns(p, &h); }
    if (p->mode == CYCLIC_DATA) { cyclic_route_data(p, &h); }
    qsort(h.message, h.count, sizeof(ParamsMessage), params_message_compare);
    return h;
}
// Returns how many versions of a stage's parameters a rank keeps. Two, if a new one arrives before
// the last use of the previous one, or before the previous one is sent on. head: versions of wte on
// the rank of the last stage, if that is not the first stage's.
static inline int cyclic_places(const CyclicPlan *p, const ParamsMessages *h, int rank, int stage,
                                bool head) {
    const int at = head ? p->N - 1 : stage, phases = cyclic_phases(p, at); // the stage that uses it
    int places = 0;
    // the other ranks borrow parameters
    if (p->mode == CYCLIC_ZERO) {
        return rank == cyclic_owner(p, stage) ? 1 + !cyclic_fresh(p, 0, stage) : 0;
    }
    for (int phase = 0; phase < phases; phase++) {
        int comes = cyclic_update_slot(p, stage), leaves = INT_MIN; // the last one that is sent on
        for (int k = 0; k < h->count; k++) {
            const ParamsMessage *m = &h->message[k];
            if (m->stage != stage || m->head != head) { continue; }
            if (m->to == rank && params_message_in_step(m, phase)) { comes = m->slot; }
            if (m->from == rank) { leaves = m->slot; }
        }
        for (int piece = 0; piece < cyclic_step_pieces(p); piece++) {
            const bool delayed = !cyclic_fresh(p, cyclic_micro(p, piece), stage);
            const int64_t number = cyclic_step_pieces(p) * (int64_t)(phase + delayed) + piece;
            if (cyclic_rank(p, number, at) != rank) { continue; }
            // mode data sends early
            const bool two = (delayed && (p->pauses || p->mode == CYCLIC_DATA)) ||
                             comes < cyclic_backward_slot(p, delayed, piece, at);
            places = max_i64(places, 1 + two);
        }
        // sent on after the next one has arrived
        if (leaves >= comes + cyclic_period(p)) { places = 2; }
    }
    return places;
}

// -------------------------------------------------------------------------------------------------
// What a rank stores and exchanges

// Returns what a rank stores and exchanges.
static inline P2p cyclic_p2p(const CyclicPlan *p, int rank) {
    P2p r = {
        .rank = rank,
        .stays = cyclic_stays(p, rank),
        .waits = p->waits,
        .sums = p->waits ? 2 : 1,
        .heads = p->untied ? 1 : cyclic_wte_gradients(p, rank),
        .pieces = cyclic_pieces(p),
        .grad_slots = p->mode == CYCLIC_DATA ? p->N : 2,
        .borrows = p->mode == CYCLIC_ZERO,
        .stages = p->N,
        .uses = 2 * p->N - 1,
        .deferred = p->mode == CYCLIC_DATA,
        .notice = (cyclic_by_micro(p) ? 2 : 1) + cyclic_reports_later(p),
    };
    r.joins_pieces = p->pieces > 1 && (r.stays || !cyclic_turns(p));
    r.made = r.stays ? STATE_MADE : r.joins_pieces ? STATE_PIECES : STATE_GRADIENT;
    r.whole = !r.stays ? STATE_GRADIENT : r.joins_pieces ? STATE_PIECES : STATE_MADE;
    return r;
}
// Fills how the states of each storage travel: before the owners of storages are found.
static inline void cyclic_fill_routes(StatePlan *s) {
    const CyclicPlan *p = s->policy.cyclic;
    const int N = p->N, ranks = p->ranks;
    ParamsMessages h = cyclic_route(p);
    int *places = new_array(int, (N + 1) * ranks, "p2p states"); // of wte, then of each stage
    for (int k = 0; k < (N + 1) * ranks; k++) {
        const int stage = (int)max_i64(0, k / ranks - 1);
        places[k] = cyclic_places(p, &h, k % ranks, stage, false);
    }
    // the head uses wte, too; in mode zero it borrows it
    const bool head = cyclic_rank(p, 0, N - 1) != cyclic_rank(p, 0, 0);
    for (int q = 0; q < ranks && !p->untied && p->mode != CYCLIC_ZERO; q++) {
        const int more = cyclic_places(p, &h, q, head ? 0 : N - 1, head);
        places[q] = (int)max_i64(places[q], more);
    }
    free(h.message);
    for (int i = 0; i < s->model->storages; i++) {
        const int stage = cyclic_stage_of_unit(p, i ? gpt_unit_of_storage(s->model, i) : 0),
                  owner = cyclic_owner(p, stage);
        const P2pStorage x = {
            .owner = owner,
            .keeper = cyclic_fresh(p, 0, stage) ? -1
                      : p->mode == CYCLIC_ZERO  ? owner
                                                : cyclic_rank(p, 0, stage),
            .stage = stage,
            .grad_slot = p->mode == CYCLIC_DATA ? stage : stage % 2,
            .several = cyclic_by_micro(p) || cyclic_width(p, stage) > 1,
            .places = places + (i ? stage + 1 : 0) * ranks,
        };
        s->rows[i].p2p = x;
        s->rows[i].places = x.places[s->ranks->me];
    }
    s->p2p = cyclic_p2p(p, s->ranks->me);
}
// Returns the slot of borrowed parameters that a pass without training brings a storage into. The
// two storages of a unit have different slots, since both must be there before the unit computes.
static inline int borrowed_slot(const GptModel *m, int storage) {
    return storage == m->classifier ? 0 : storage >= m->first_after ? 1 : storage % BORROWED_SLOTS;
}
// Fills how many versions of its p2p states a rank keeps, of the storages that it owns or computes
// with, and in which slots. Owners keep their parameters, and send or lend them.
static inline void cyclic_fill(StatePlan *s) {
    const P2p *r = &s->p2p;
    for (int i = 0; i < s->model->storages; i++) {
        StorageRow *row = &s->rows[i];
        State *x = row->states;
        const bool owns = row_holds(row), adds = r->borrows || row->places > 0;
        // made: if sums stay, gradients of micro-batches; otherwise, on the owner, the sum of the
        // gradients before its own, which the first rank has none of
        const bool before = !r->stays && owns && r->rank > 0;
        const int made = r->stays && adds ? (i ? 1 : r->heads) : before,
                  class_slot = r->borrows ? 0 : (int)gpt_storage_class(s->model, i);
        row->gathers = r->borrows;
        row->param_slot = r->borrows ? borrowed_slot(s->model, i) : -1;
        row->grad_slot = r->borrows && i ? row->p2p.grad_slot : -1;
        row->reduces_often = true;
        row->wave = -1;
        row->borrowed = r->borrows && !owns;
        x[STATE_MADE].place = x[STATE_RECEIVED].place = x[STATE_PIECES].place = PLACE_DEVICE;
        x[STATE_PARAMETERS].versions = row->places;
        x[STATE_GRADIENT].versions = owns ? r->sums : !r->stays && adds;
        // the gradient of a borrowed wte exists from the head's part to the embedding's
        x[STATE_MADE].versions = r->borrows ? !i : made;
        x[STATE_RECEIVED].versions = owns && (r->borrows || row->p2p.several);
        x[STATE_PIECES].versions = !r->borrows && r->joins_pieces && adds && (!r->stays || owns);
        x[STATE_PARAMETERS].slot = x[STATE_GRADIENT].slot = 0;
        x[STATE_MADE].slot = x[STATE_PIECES].slot = class_slot;
        x[STATE_RECEIVED].slot = r->borrows ? 0 : row->p2p.grad_slot;
    }
}

#endif
