// deferred_proof.h: replays the schedules of a program as ranks run them that defer store
// operations (executor/deferred.h), in a random order, and checks that nothing goes wrong.
//
// Rule       A rank runs its list in order. A deferrable action is only noted then. It is done
//            later: when the earlier operations in its storage's lane are done, the messages that
//            deferred_requests() names are complete, and, if it sends, no message to the same
//            rank is under way that stands earlier in the list. The list waits, while deferred
//            operations continue,
//                - before a gradient is made or completed (REDUCE): for the operations of
//                  BEFORE_GRADIENT of its storage, and until the last sum has left its
//                  buffer
//                - before ACQUIRE: for those of BEFORE_USE, until the version is posted,
//                  and until it has arrived
//                - before STATS: for those of deferred_before_stats() of its step, and for the two
//                  messages of statistics posted before
//                - before a step that follows a pause: for all deferred operations
//                - if the list of deferred operations is full: for the first of them
//            A message is complete some time after both ends are posted, as if every send waited
//            for its receiver (rendezvous).
// Argument   No order of messages and deferred operations makes all ranks wait for ever. Each wait
//            above is for something of this rank that stands EARLIER in its list: a deferred
//            operation, or a message whose end on this rank is one. Consider the order in which the
//            walk (schedule.h) plays the same lists, with both ends of a message played as one
//            event. In that order everything that an event waits for precedes it, at both ends. So
//            the waits form no cycle: if ranks wait, the first event in that order that has not
//            happened can happen.
//            This supposes that ranks wait for nothing else: a deferred operation, once begun,
//            waits for nothing (store.in_deferred, an assertion in requests_wait()), a message can
//            always be posted (executor_put_aside), and both ends of a channel are posted in the
//            same order, because a channel belongs to one storage's lane.
//            Which earlier messages a send waits for depends on the order, but they are always
//            earlier. The argument does not show that no operation writes what a message still
//            reads or writes. Therefore that, and the rules of cyclic_proof.h, are checked in many
//            orders, in some of which messages take as long as they can.
#ifndef DEFERRED_PROOF_H
#define DEFERRED_PROOF_H

#include "executor/deferred.h"  // which actions can be deferred, and what they wait for
#include "schedule/validator.h" // the walk's visits

typedef struct {
    int rank, at; // index in the rank's list
} End;
typedef struct {
    End sender, receiver;
} Meeting;
// Messages of a channel: posted ends whose other end is not posted yet. Either all send or all
// receive.
typedef struct {
    End *end; // [capacity]
    int count;
    int64_t capacity;
} Posted;
// Of a rank.
typedef struct {
    int at;                  // index in the list
    int group;               // number of the pause interval that the list is in
    int *noted, count;       // [count] deferred operations that are not done, in order
    int stats_out, stats_in; // messages of statistics that are not complete
    int *sent, sending;      // [sending] messages of states that it sends, not complete
} DeferredRank;
// Of a rank and storage.
typedef struct {
    int open[REQUEST_KINDS]; // messages that are not complete
    int64_t version;         // newest version, stored or posted
} DeferredStorage;
typedef struct {
    Validator *v; // records the first error
    const Program *program;
    const P2p *p2p; // [ranks]
    // called for an action when the list reaches it; for a deferred operation when it is done; for
    // a message when it is complete
    ScheduleVisit at_once, later;
    void *context;
    int pause; // steps between two pauses
    uint64_t seed, draws;
    int share[2]; // of 256 moves: < [0] advance a list, < [1] do an operation, else end a message
    // true: the newest message completes first, so that others take as long as they can; false: a
    // random one
    bool newest;
    DeferredRank *ranks;
    DeferredStorage *storages; // [rank][storage]
    Posted *posted;            // [from][to][tag] channels
    Meeting *met;              // [meetings] messages that can complete
    int meetings;
    int64_t capacity; // of met
} DeferredWalk;

static inline const Action *deferred_walk_action(const DeferredWalk *w, End e) {
    return &w->program->rank[e.rank].actions[e.at];
}
static inline DeferredStorage *deferred_walk_storage(const DeferredWalk *w, int rank, int storage) {
    return &w->storages[rank * w->program->map.storages + storage];
}
// Points to the count of open messages to which a message's end belongs.
static inline int *deferred_walk_open(const DeferredWalk *w, End e) {
    const Action *a = deferred_walk_action(w, e);
    const bool sends = action_sends(a->kind);
    if (a->storage < 0) { return sends ? &w->ranks[e.rank].stats_out : &w->ranks[e.rank].stats_in; }
    int kind = sends ? REQUEST_SEND_SUM : REQUEST_RECV_SUM; // apart from deferred_messages()
    if (action_is(a->kind, ON_PARAMETERS)) {
        kind = (sends ? REQUEST_SEND : REQUEST_RECV) +
               (int)(a->version % w->p2p[e.rank].storage[a->storage].places);
    }
    return &deferred_walk_storage(w, e.rank, a->storage)->open[kind];
}
static inline void deferred_walk_refuse(DeferredWalk *w, End e, bool bad, const char *what) {
    w->v->rank = e.rank;
    w->v->action = deferred_walk_action(w, e);
    refuse(w->v, bad, "%s", what);
}
static inline size_t deferred_walk_channels(const Program *p) {
    return (size_t)(p->ranks * p->ranks) * (size_t)(2 * p->map.storages + 3);
}

// Posts one end of a message. If its other end is posted, the message can complete from now on.
static inline void deferred_walk_post(DeferredWalk *w, End e) {
    const Action *a = deferred_walk_action(w, e);
    const bool sends = action_sends(a->kind);
    const int ranks = w->program->ranks, tags = 2 * w->program->map.storages + 3,
              from = sends ? e.rank : a->peer, to = sends ? a->peer : e.rank;
    const int tag = a->storage < 0                      ? 0
                    : action_is(a->kind, ON_PARAMETERS) ? parameters_channel(a->storage)
                                                        : sum_channel(a->storage);
    Posted *posted = &w->posted[(from * ranks + to) * tags + tag];
    DeferredRank *me = &w->ranks[e.rank];
    ++*deferred_walk_open(w, e);
    if (sends && a->storage >= 0) { me->sent[me->sending++] = e.at; }
    if (!posted->count || action_sends(deferred_walk_action(w, posted->end[0])->kind) == sends) {
        posted->end = grow_array(End, posted->end, posted->count, &posted->capacity, "messages");
        posted->end[posted->count++] = e;
        return;
    }
    const End other = posted->end[0], sender = sends ? e : other, receiver = sends ? other : e;
    memmove(posted->end, posted->end + 1, --posted->count * sizeof(End));
    deferred_walk_refuse(w, sender,
                         !actions_match(deferred_walk_action(w, sender), from,
                                        deferred_walk_action(w, receiver), to),
                         "meets another message");
    const Meeting meeting = {sender, receiver};
    w->met = grow_array(Meeting, w->met, w->meetings, &w->capacity, "messages");
    w->met[w->meetings++] = meeting;
}
// Completes a message: its data have arrived, and its buffers are free. Parameters were reported to
// `later` when they were posted.
static inline void deferred_walk_complete(DeferredWalk *w, int meeting) {
    const End sender = w->met[meeting].sender, receiver = w->met[meeting].receiver;
    const Action *a = deferred_walk_action(w, sender);
    w->met[meeting] = w->met[--w->meetings];
    --*deferred_walk_open(w, sender);
    --*deferred_walk_open(w, receiver);
    DeferredRank *from = &w->ranks[sender.rank];
    for (int i = 0; a->storage >= 0 && i < from->sending; i++) {
        if (from->sent[i] == sender.at) { from->sent[i--] = from->sent[--from->sending]; }
    }
    if (a->kind == ACT_SEND_PARAMETERS) { return; }
    w->later(w->context, sender.rank, a, receiver.rank);
    w->later(w->context, receiver.rank, deferred_walk_action(w, receiver), sender.rank);
}
// Checks, independently of deferred_requests(), that what an operation reads has arrived, and that
// what it writes is in no message.
static inline void deferred_walk_check(DeferredWalk *w, End e) {
    const Action *a = deferred_walk_action(w, e);
    const bool makes = action_is(a->kind, BEFORE_USE), sum = a->kind == ACT_RECV_SUM;
    if (!action_is(a->kind, ON_PARAMETERS) && !sum) { return; }
    DeferredStorage *s = deferred_walk_storage(w, e.rank, a->storage);
    const int64_t version = a->kind == ACT_UPDATE ? a->step + 1 : a->version;
    const int place = sum ? 0 : (int)(version % w->p2p[e.rank].storage[a->storage].places);
    deferred_walk_refuse(w, e,
                         s->open[sum ? REQUEST_RECV_SUM : REQUEST_RECV + place] ||
                             (makes && s->open[REQUEST_SEND + place]),
                         "a message of its place is under way");
    if (makes) { s->version = version; }
}
// Is a message under way to the receiver of this one that stands earlier in the list?
static inline bool deferred_walk_link_is_taken(const DeferredWalk *w, End e) {
    const DeferredRank *r = &w->ranks[e.rank];
    const Action *a = deferred_walk_action(w, e);
    bool taken = false;
    for (int i = 0; action_sends(a->kind) && i < r->sending; i++) {
        const Action *other = &w->program->rank[e.rank].actions[r->sent[i]];
        taken = taken || (r->sent[i] < e.at && other->peer == a->peer);
    }
    return taken;
}
// Does the i-th deferred operation of a rank, if it can be done now. Returns whether it was.
static inline bool deferred_walk_do(DeferredWalk *w, int rank, int i) {
    DeferredRank *r = &w->ranks[rank];
    const End e = {rank, r->noted[i]};
    const Action *a = deferred_walk_action(w, e);
    RequestKind kinds[2];
    const int n = deferred_requests(&w->p2p[rank], a, kinds);
    for (int k = 0; k < i; k++) {
        if (deferred_conflict(&w->program->rank[rank].actions[r->noted[k]], a)) { return false; }
    }
    for (int k = 0; k < n; k++) {
        if (deferred_walk_storage(w, rank, a->storage)->open[kinds[k]]) { return false; }
    }
    if (deferred_walk_link_is_taken(w, e)) { return false; }
    memmove(&r->noted[i], &r->noted[i + 1], (--r->count - i) * sizeof(int));
    deferred_walk_check(w, e);
    // sums are reported when they are complete
    const bool sum = a->kind == ACT_SEND_SUM || a->kind == ACT_RECV_SUM;
    if (!sum) { w->later(w->context, rank, a, a->peer); }
    if (action_is_message(a->kind)) { deferred_walk_post(w, e); }
    return true;
}

// Is an operation of these kinds (bits) deferred, of a storage (-1: any) and of a step (-1: any)?
static inline bool deferred_walk_noted(const DeferredWalk *w, int rank, unsigned any, int storage,
                                       int64_t step) {
    for (int i = 0; i < w->ranks[rank].count; i++) {
        const Action *a = &w->program->rank[rank].actions[w->ranks[rank].noted[i]];
        if (action_is(a->kind, any) && (storage < 0 || a->storage == storage) &&
            (step < 0 || a->step == step)) {
            return true;
        }
    }
    return false;
}
static inline bool deferred_walk_place_is_free(const DeferredWalk *w, int rank, int storage) {
    return !deferred_walk_noted(w, rank, BEFORE_GRADIENT, storage, -1) &&
           !deferred_walk_storage(w, rank, storage)->open[REQUEST_SEND_SUM];
}
// Must a rank's list wait at this action?
static inline bool deferred_walk_waits(const DeferredWalk *w, int rank, const Action *a) {
    const UnitMap *map = &w->program->map;
    const DeferredRank *r = &w->ranks[rank];
    const P2p *p2p = &w->p2p[rank];
    if (a->step / w->pause > r->group && r->count) { return true; }
    if (a->kind == ACT_REDUCE) { return !deferred_walk_place_is_free(w, rank, a->storage); }
    if (a->kind == ACT_ACQUIRE) {
        const DeferredStorage *s = deferred_walk_storage(w, rank, a->storage);
        return (s->version < a->version &&
                deferred_walk_noted(w, rank, BEFORE_USE, a->storage, -1)) ||
               s->open[REQUEST_RECV + (int)(a->version % p2p->storage[a->storage].places)];
    }
    if (a->kind == ACT_STATS) {
        return r->stats_out || r->stats_in ||
               (a->version == 0 &&
                deferred_walk_noted(w, rank, deferred_before_stats(p2p), -1, a->step));
    }
    if (a->kind == ACT_SEND_STATS) { return r->stats_out; }
    for (int k = 0; action_computes(a->kind) && k < map->of_unit_count[a->unit]; k++) {
        const int storage = map->of_unit[a->unit][k];
        if (action_contributes(map, a, storage) && !deferred_walk_place_is_free(w, rank, storage)) {
            return true;
        }
    }
    return false;
}
static inline bool deferred_walk_list(DeferredWalk *w, int rank) {
    DeferredRank *r = &w->ranks[rank];
    const End e = {rank, r->at};
    if (e.at == w->program->rank[rank].count) { return false; }
    const Action *a = deferred_walk_action(w, e);
    if (deferred_walk_waits(w, rank, a)) { return false; }
    r->group = (int)max_i64(r->group, a->step / w->pause);
    r->at++;
    if (action_is(a->kind, ON_PARAMETERS | ON_SUM)) { r->noted[r->count++] = e.at; }
    if (a->kind == ACT_SEND_STATS || a->kind == ACT_RECV_STATS) {
        deferred_walk_post(w, e);
    } else {
        w->at_once(w->context, rank, a, -1);
    }
    return true;
}

static inline int deferred_walk_draw(DeferredWalk *w, int n) {
    return (int)(random_u64(w->seed, 0, w->draws++) % (uint64_t)n);
}
static inline bool deferred_walk_message(DeferredWalk *w) {
    if (!w->meetings) { return false; }
    deferred_walk_complete(w, w->newest ? w->meetings - 1 : deferred_walk_draw(w, w->meetings));
    return true;
}
// Makes a random move. Returns false if that move is not possible now.
static inline bool deferred_walk_move(DeferredWalk *w) {
    const int rank = deferred_walk_draw(w, w->program->ranks), kind = deferred_walk_draw(w, 256),
              count = w->ranks[rank].count;
    if (kind < w->share[0]) { return deferred_walk_list(w, rank); }
    if (kind >= w->share[1]) { return deferred_walk_message(w); }
    return count && deferred_walk_do(w, rank, deferred_walk_draw(w, count));
}
// Makes every possible move, messages last. Returns false if none was possible.
static inline bool deferred_walk_any(DeferredWalk *w) {
    bool moved = false;
    for (int r = 0; r < w->program->ranks; r++) {
        moved = deferred_walk_list(w, r) || moved;
        for (int i = 0; i < w->ranks[r].count; i++) { moved = deferred_walk_do(w, r, i) || moved; }
    }
    return moved || deferred_walk_message(w);
}
static inline void deferred_walk_start(DeferredWalk *w) {
    static const char what[] = "deferred operations";
    const Program *p = w->program;
    const size_t ranks = (size_t)p->ranks;
    w->ranks = new_array(DeferredRank, ranks, what);
    for (size_t r = 0; r < ranks; r++) {
        w->ranks[r].noted = new_array(int, p->rank[r].count, what);
        w->ranks[r].sent = new_array(int, p->rank[r].count, what);
    }
    w->storages = new_array(DeferredStorage, ranks * (size_t)p->map.storages, what);
    w->posted = new_array(Posted, deferred_walk_channels(p), what);
    w->share[0] = 1 + deferred_walk_draw(w, 250);
    w->share[1] = w->share[0] + 1 + deferred_walk_draw(w, 254 - w->share[0]);
    w->newest = deferred_walk_draw(w, 2);
}
static inline void deferred_walk_stop(DeferredWalk *w) {
    for (size_t i = 0; i < deferred_walk_channels(w->program); i++) { free(w->posted[i].end); }
    for (int r = 0; r < w->program->ranks; r++) { free_all(w->ranks[r].noted, w->ranks[r].sent); }
    free(w->ranks);
    free(w->storages);
    free(w->posted);
    free(w->met);
}
// Replays the lists of cyclic mode `data` in an order drawn from `seed`; every pause-th step
// drains. A rank that waits for ever, and an operation that touches a buffer of an open message,
// are violations.
static inline void deferred_walk(Validator *v, const P2p *p2p, int pause, uint64_t seed,
                                 ScheduleVisit at_once, ScheduleVisit later, void *context) {
    DeferredWalk w;
    memset(&w, 0, sizeof w);
    w.v = v;
    w.program = v->program;
    w.p2p = p2p;
    w.at_once = at_once;
    w.later = later;
    w.context = context;
    w.pause = pause;
    w.seed = seed;
    deferred_walk_start(&w);
    for (int failed = 0; !*v->error; failed++) {
        if (deferred_walk_move(&w)) { failed = 0; }
        if (failed > 64 && !deferred_walk_any(&w)) { break; }
    }
    for (int r = 0; r < w.program->ranks; r++) {
        const DeferredRank *rank = &w.ranks[r];
        const End e = {r, rank->count ? rank->noted[0] : rank->at};
        if (e.at < w.program->rank[r].count) {
            deferred_walk_refuse(&w, e, true,
                                 "deadlock: waits for ever, some work being put aside");
        }
    }
    deferred_walk_stop(&w);
}

#endif
