// walk.h: plays a program with rendezvous messages, in an order that a real run could have. The
// validator proves programs with it, the simulator times them.
//
// A visit has SEND and RECV together: first the sender with peer = the receiver's rank, then the
// receiver with peer = the sender's rank. For other actions peer is -1. A rank that becomes able to
// move is woken by the rank that made this possible. So a walk takes time in proportion to the
// actions, however many ranks wait.
#ifndef WALK_H
#define WALK_H

#include "base/base.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"

typedef void (*ScheduleVisit)(void *context, int rank, const Action *action, int peer);

static inline bool actions_match(const Action *send, int sender, const Action *recv, int receiver) {
    const bool kinds = action_sends(send->kind) && (int)recv->kind == (int)send->kind + 1;
    return kinds && send->peer == receiver && recv->peer == sender && send->unit == recv->unit &&
           send->storage == recv->storage && send->micro == recv->micro &&
           send->step == recv->step && send->version == recv->version && send->use == recv->use &&
           send->first_row == recv->first_row && send->rows == recv->rows;
}

typedef struct {
    int at;             // index of the next action
    int norm;           // index of its NORM, where all ranks meet
    bool listed, met;   // is in Walk.awake; has reached its NORM
    bool waits, begins; // waits for other members of a collective; all of them have come
    int after;          // the member that is listed after this one, or -1
} WalkRank;
typedef struct {
    int members, reached; // ranks that take part in its collectives; that have reached the next one
    int first;            // first of these, or -1
} WalkStorage;
typedef struct {
    const Program *program;
    ScheduleVisit visit;
    void *context;
    WalkRank *rank;
    int *awake, count;    // [count] ranks that may be able to move
    int meeting;          // ranks that have reached their NORM
    WalkStorage *storage; // if the start of a collective waits for all members, else NULL
} Walk;

// Returns the next action of a rank, or NULL.
static inline const Action *walk_next(const Walk *w, int r) {
    const Program *p = w->program;
    const bool has = r >= 0 && r < p->ranks && w->rank[r].at < p->rank[r].count;
    return has ? &p->rank[r].actions[w->rank[r].at] : NULL;
}
static inline void walk_wake(Walk *w, int r) {
    if (!w->rank[r].listed) { w->awake[w->count++] = r; }
    w->rank[r].listed = true;
}
// Rank r has reached a NORM. Of several, the last one is where all ranks meet. Returns whether the
// rank may continue.
static inline bool walk_meet(Walk *w, int r) {
    const int ranks = w->program->ranks;
    WalkRank *me = &w->rank[r];
    if (me->at != me->norm) { return false; }
    if (!me->met && ++w->meeting == ranks) {
        for (int q = 0; q < ranks; q++) { walk_wake(w, q); }
    }
    me->met = true;
    return w->meeting == ranks;
}
// Returns the storage whose members start a collective with this action, or -1.
static inline int walk_collective(const Walk *w, const Action *a) {
    return action_is(a->kind, COLLECTIVE) && a->storage < w->program->map.storages ? a->storage
                                                                                   : -1;
}
// Rank r has reached a collective of a storage. Returns whether all its members have.
static inline bool walk_join(Walk *w, int r, WalkStorage *storage) {
    WalkRank *me = &w->rank[r];
    const bool begins = me->begins;
    me->begins = false;
    if (begins || me->waits) { return begins; }
    if (++storage->reached < storage->members) {
        me->waits = true;
        me->after = storage->first;
        storage->first = r;
        return false;
    }
    for (int q = storage->first; q >= 0; q = w->rank[q].after) {
        w->rank[q].waits = false;
        w->rank[q].begins = true;
        walk_wake(w, q);
    }
    storage->reached = 0;
    storage->first = -1;
    return true;
}
// Returns whether the next action of rank r sends what the next action of rank q receives.
static inline bool walk_matches(const Walk *w, int r, int q) {
    const Action *send = walk_next(w, r), *receive = walk_next(w, q);
    return send && receive && actions_match(send, r, receive, q);
}
// Rank r has reached a SEND. If its peer waits for this message, both continue.
static inline bool walk_send(Walk *w, int r, const Action *a) {
    const int q = a->peer;
    if (!walk_matches(w, r, q)) { return false; }
    w->visit(w->context, r, a, q);
    w->visit(w->context, q, walk_next(w, q), r);
    w->rank[q].at++;
    walk_wake(w, q);
    return true;
}
// Moves rank r as far as it can.
static inline void walk_rank(Walk *w, int r) {
    for (const Action *a; (a = walk_next(w, r)); w->rank[r].at++) {
        if (action_is(a->kind, RECEIVES)) { // the sender moves both
            if (walk_matches(w, a->peer, r)) { walk_wake(w, a->peer); }
            return;
        }
        if (action_sends(a->kind)) {
            if (!walk_send(w, r, a)) { return; }
            continue;
        }
        const int storage = w->storage ? walk_collective(w, a) : -1;
        if (a->kind == ACT_NORM && !walk_meet(w, r)) { return; }
        if (storage >= 0 && !walk_join(w, r, &w->storage[storage])) { return; }
        w->visit(w->context, r, a, -1);
    }
}

// Makes starts of collectives wait: counts the members of each storage's collectives.
static inline void walk_count_members(Walk *w) {
    const Program *p = w->program;
    w->storage = new_array(WalkStorage, p->map.storages, "walk");
    for (int s = 0; s < p->map.storages; s++) { w->storage[s].first = -1; }
    for (int r = 0; r < p->ranks; r++) {
        for (int i = 0; i < p->rank[r].count; i++) {
            const int storage = walk_collective(w, &p->rank[r].actions[i]);
            // `first` is the last rank that was counted, until the walk begins
            if (storage < 0 || w->storage[storage].first == r) { continue; }
            w->storage[storage].first = r;
            w->storage[storage].members++;
        }
    }
    for (int s = 0; s < p->map.storages; s++) { w->storage[s].first = -1; }
}
// Walks through the program. Returns -1, or the first rank that is stuck for ever; *at: the index
// of the action that this rank has reached. collectives_wait: a rank that starts a collective waits
// there for all members. Transports may make it wait: they hold a limited number of collectives
// (staged messages: two), and the next one waits until the oldest is complete.
static inline int walk_program(const Program *p, int *at, bool collectives_wait,
                               ScheduleVisit visit, void *context) {
    Walk w = {.program = p,
              .visit = visit,
              .context = context,
              .rank = new_array(WalkRank, p->ranks, "walk"),
              .awake = new_array(int, p->ranks, "walk")};
    int stuck = -1;
    if (collectives_wait) { walk_count_members(&w); }
    for (int r = p->ranks - 1; r >= 0; r--) {
        w.rank[r].norm = schedule_last(&p->rank[r], ACT_NORM);
        walk_wake(&w, r);
    }
    while (w.count) {
        int r = w.awake[--w.count];
        w.rank[r].listed = false;
        walk_rank(&w, r);
    }
    for (int r = p->ranks - 1; r >= 0; r--) { stuck = walk_next(&w, r) ? r : stuck; }
    *at = stuck < 0 ? 0 : w.rank[stuck].at;
    free_all(w.rank, w.awake, w.storage);
    return stuck;
}

#endif
