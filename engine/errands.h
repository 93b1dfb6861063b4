// errands.h: plays a schedule as ranks do that put store work aside (relay.h: errands), in an order drawn by lot.
//
// Rule       A rank's list is run in its order. An action that is an errand is only noted there. It is done later: when those before it in its storage's
//            lane are done, and the messages of its errand_mails() are complete. The list waits, and meanwhile errands are done,
//                before a gradient is made, or made whole (REDUCE)   for errands_before_gradient() of its storage, and until what left its place has left
//                before ACQUIRE                                      for errands_before_use(), until the version is posted; and until that has come
//                before TALLY                                        for errands_before_tally() of its step, and for the two tallies posted before
//                before a step that follows a pause                  for all errands; and where there is no room to note another, for the first
//            A message is complete some time after both of its ends are posted, as if each waited for its receiver (rendezvous).
// Argument   Each of these waits is for something of this rank that stands EARLIER in its list: an errand noted before, or a message whose own end is one.
//            So take the order in which the walk (schedule.h) plays the same lists, where a message's two ends are played as one: in it all that an
//            event waits for comes before it, at both ends. Hence those waits have no circle. If ranks wait, take the first event in that order that has
//            not come: all that it waits for has, so it can come, whatever was put off. No order of messages and of errands makes all ranks wait.
//            Two things are supposed: nobody waits for anything else, so an errand that is begun waits for nothing (store.on_errand, an assertion of
//            mail_wait()), and a message can always be posted (executor_put_aside). And both ends of a channel are posted in one order: a
//            channel is of one storage's lane.
//            What an event waits for is the same in every order, so one order that ends shows that all end. That no errand writes what a message still
//            reads or writes is not: so that, and the rules of proof.h, are looked at in many orders, messages of some taking as long as they can.
#ifndef ERRANDS_H
#define ERRANDS_H

#include "engine/validator.h" // the walk's visits
#include "store/relay.h"      // which actions are errands, what they wait for

typedef struct {
    int rank, at; // in its list
} End;
typedef struct {
    End *end; // [room] posted, not matched
    int count, room;
} Posted;
typedef struct {
    Validator *v; // first error
    const Program *program;
    const Relay *relay;           // [ranks]
    ScheduleVisit at_once, later; // what the list does of an action when it comes to it; of an errand, when it is done, and of messages, when complete
    void *context;
    int pause; // steps
    uint64_t seed, draws;
    int share[2];            // of 256 moves: of lists, and of errands; the rest are of messages
    bool newest;             // the message that met last is complete first, so that others take as long as they can; else any
    int *at, *group;         // [ranks] in its list; which steps between two pauses it is in
    int **noted, *count;     // [ranks][count] errands that are not done, in their order
    Posted *sends, *recvs;   // [channels]
    End (*met)[2];           // [meetings] sender and receiver
    int meetings, room;      //
    int *open;               // [rank][storage][MAIL_KINDS] messages that are not complete
    int *telling, *told;     // [rank] tallies that are not complete
    int64_t *posted_version; // [rank][storage] the newest, here or on its way
} ErrandWalk;

static inline const Action *errand_walk_action(const ErrandWalk *w, End e) { return &w->program->rank[e.rank].actions[e.at]; }
static inline int *errand_walk_open(const ErrandWalk *w, int rank, int storage, int mail) {
    return &w->open[(rank * w->program->map.storages + storage) * MAIL_KINDS + mail];
}
static inline int64_t *errand_walk_version(const ErrandWalk *w, int rank, int storage) { return &w->posted_version[rank * w->program->map.storages + storage]; }
// What a message's end keeps open.
static inline int *errand_walk_mail(const ErrandWalk *w, End e) {
    const Action *a = errand_walk_action(w, e);
    const bool sends = action_sends(a->kind);
    if (a->storage < 0) { return sends ? &w->telling[e.rank] : &w->told[e.rank]; }
    const bool sum = errand_lanes(a->kind) == LANE_SUM;
    const int place = sum ? 0 : (int)(a->version % w->relay[e.rank].places[a->storage]);
    return errand_walk_open(w, e.rank, a->storage, sum ? (sends ? MAIL_GOING_SUM : MAIL_COMING_SUM) : (sends ? MAIL_GOING : MAIL_COMING) + place);
}
static inline void errand_walk_fail(ErrandWalk *w, End e, const char *what) {
    const Action *a = errand_walk_action(w, e);
    validator_fail(w->v, e.rank, a, "%s", what);
}

// Posts a message. If its other end is posted, it can be complete from now on.
static inline void errand_walk_post(ErrandWalk *w, End e) {
    const Action *a = errand_walk_action(w, e);
    const bool sends = action_sends(a->kind);
    const int ranks = w->program->ranks, tags = 2 * w->program->map.storages + 3, from = sends ? e.rank : a->peer, to = sends ? a->peer : e.rank;
    const int tag = a->storage < 0 ? 0 : errand_lanes(a->kind) == LANE_SUM ? sum_channel(a->storage) : parameters_channel(a->storage);
    const int channel = (from * ranks + to) * tags + tag;
    Posted *mine = &(sends ? w->sends : w->recvs)[channel], *others = &(sends ? w->recvs : w->sends)[channel];
    ++*errand_walk_mail(w, e);
    if (!others->count) {
        if (mine->count == mine->room) {
            mine->room = mine->room ? 2 * mine->room : 4, mine->end = (End *)realloc(mine->end, (size_t)mine->room * sizeof(End));
        }
        mine->end[mine->count++] = e;
        return;
    }
    const End other = others->end[0], sender = sends ? e : other, receiver = sends ? other : e;
    memmove(others->end, others->end + 1, (size_t)--others->count * sizeof(End));
    if (!actions_match(errand_walk_action(w, sender), from, errand_walk_action(w, receiver), to)) { errand_walk_fail(w, sender, "meets another message"); }
    if (w->meetings == w->room) { w->room = w->room ? 2 * w->room : 64, w->met = (End(*)[2])realloc(w->met, (size_t)w->room * sizeof *w->met); }
    w->met[w->meetings][0] = sender, w->met[w->meetings++][1] = receiver;
}
// A message is complete: what it brings is there, and its places are free. Parameters were looked at when they were posted.
static inline void errand_walk_complete(ErrandWalk *w, int meeting) {
    const End sender = w->met[meeting][0], receiver = w->met[meeting][1];
    const Action *a = errand_walk_action(w, sender);
    w->met[meeting][0] = w->met[w->meetings - 1][0], w->met[meeting][1] = w->met[w->meetings - 1][1], w->meetings--;
    --*errand_walk_mail(w, sender), --*errand_walk_mail(w, receiver);
    if (a->kind == ACT_SEND_PARAMETERS) { return; }
    w->later(w->context, sender.rank, a, receiver.rank);
    w->later(w->context, receiver.rank, errand_walk_action(w, receiver), sender.rank);
}
// Whatever errand_mails() says: what an errand reads has come, and what it writes nobody sends or receives.
static inline void errand_walk_check(ErrandWalk *w, End e) {
    const Action *a = errand_walk_action(w, e);
    const bool makes = errands_before_use() & errand_bit(a->kind), sum = a->kind == ACT_RECV_SUM;
    if (!(errand_lanes(a->kind) & LANE_PARAMETERS) && !sum) { return; }
    const int64_t version = a->kind == ACT_UPDATE ? a->step + 1 : a->version;
    const int place = sum ? 0 : (int)(version % w->relay[e.rank].places[a->storage]);
    const int coming = *errand_walk_open(w, e.rank, a->storage, sum ? MAIL_COMING_SUM : MAIL_COMING + place);
    if (coming || (makes && *errand_walk_open(w, e.rank, a->storage, MAIL_GOING + place))) { errand_walk_fail(w, e, "a message of its place is under way"); }
    if (makes) { *errand_walk_version(w, e.rank, a->storage) = version; }
}
// Does the errand that was noted i-th of those of a rank, if it can be done.
static inline bool errand_walk_do(ErrandWalk *w, int rank, int i) {
    const End e = {rank, w->noted[rank][i]};
    const Action *a = errand_walk_action(w, e);
    Action of = *a;
    int mails[2];
    of.micro %= pieces_of_step(&w->relay[rank].pieces); // it counts through the steps here
    const int n = errand_mails(&w->relay[rank], &of, mails);
    for (int k = 0; k < i; k++) {
        if (errands_conflict(&w->program->rank[rank].actions[w->noted[rank][k]], a)) { return false; }
    }
    for (int k = 0; k < n; k++) {
        if (*errand_walk_open(w, rank, a->storage, mails[k])) { return false; }
    }
    memmove(&w->noted[rank][i], &w->noted[rank][i + 1], (size_t)(--w->count[rank] - i) * sizeof(int));
    errand_walk_check(w, e);
    const bool sum = a->kind == ACT_SEND_SUM || a->kind == ACT_RECV_SUM; // looked at when they are complete
    if (!sum) { w->later(w->context, rank, a, a->peer); }
    if (action_is_message(a->kind)) { errand_walk_post(w, e); }
    return true;
}

// Is an errand of these kinds (bits) noted, of a storage (-1: of any), of a step (-1)?
static inline bool errand_walk_noted(const ErrandWalk *w, int rank, unsigned kinds, int storage, int64_t step) {
    for (int i = 0; i < w->count[rank]; i++) {
        const Action *a = &w->program->rank[rank].actions[w->noted[rank][i]];
        if ((kinds & errand_bit(a->kind)) && (storage < 0 || a->storage == storage) && (step < 0 || a->step == step)) { return true; }
    }
    return false;
}
static inline bool errand_walk_place_is_free(const ErrandWalk *w, int rank, int storage) {
    return !errand_walk_noted(w, rank, errands_before_gradient(), storage, -1) && !*errand_walk_open(w, rank, storage, MAIL_GOING_SUM);
}
// Does a rank's list wait at this action?
static inline bool errand_walk_waits(const ErrandWalk *w, int rank, const Action *a) {
    const UnitMap *map = &w->program->map;
    const Relay *r = &w->relay[rank];
    if (a->step / w->pause > w->group[rank] && w->count[rank]) { return true; }
    switch (a->kind) {
    case ACT_REDUCE: return !errand_walk_place_is_free(w, rank, a->storage);
    case ACT_ACQUIRE:
        if (*errand_walk_version(w, rank, a->storage) < a->version && errand_walk_noted(w, rank, errands_before_use(), a->storage, -1)) { return true; }
        return *errand_walk_open(w, rank, a->storage, MAIL_COMING + (int)(a->version % r->places[a->storage]));
    case ACT_TALLY: return w->telling[rank] || w->told[rank] || (a->version == 0 && errand_walk_noted(w, rank, errands_before_tally(r), -1, a->step));
    case ACT_SEND_TALLY: return w->telling[rank];
    default: break;
    }
    for (int k = 0; action_computes(a->kind) && k < map->of_unit_count[a->unit]; k++) {
        const int storage = map->of_unit[a->unit][k];
        if (action_contributes(map, a, storage) && !errand_walk_place_is_free(w, rank, storage)) { return true; }
    }
    return false;
}
static inline bool errand_walk_list(ErrandWalk *w, int rank) {
    const Schedule *s = &w->program->rank[rank];
    const End e = {rank, w->at[rank]};
    if (e.at == s->count) { return false; }
    const Action *a = &s->actions[e.at];
    if (errand_walk_waits(w, rank, a)) { return false; }
    w->group[rank] = (int)max_i64(w->group[rank], a->step / w->pause), w->at[rank]++;
    if (errand_lanes(a->kind)) { w->noted[rank][w->count[rank]++] = e.at; }
    if (a->kind == ACT_SEND_TALLY || a->kind == ACT_RECV_TALLY) {
        errand_walk_post(w, e);
    } else {
        w->at_once(w->context, rank, a, -1);
    }
    return true;
}

static inline int errand_walk_draw(ErrandWalk *w, int n) { return (int)(random_u64(w->seed, 0, w->draws++) % (uint64_t)n); }
static inline bool errand_walk_message(ErrandWalk *w) {
    if (!w->meetings) { return false; }
    errand_walk_complete(w, w->newest ? w->meetings - 1 : errand_walk_draw(w, w->meetings));
    return true;
}
// A move drawn by lot; false: it cannot be made.
static inline bool errand_walk_move(ErrandWalk *w) {
    const int rank = errand_walk_draw(w, w->program->ranks), kind = errand_walk_draw(w, 256);
    if (kind < w->share[0]) { return errand_walk_list(w, rank); }
    if (kind < w->share[1]) { return w->count[rank] && errand_walk_do(w, rank, errand_walk_draw(w, w->count[rank])); }
    return errand_walk_message(w);
}
// Any that can be made, messages last; false: there is none.
static inline bool errand_walk_any(ErrandWalk *w) {
    bool moved = false;
    for (int r = 0; r < w->program->ranks; r++) {
        moved = errand_walk_list(w, r) || moved;
        for (int i = 0; i < w->count[r]; i++) { moved = errand_walk_do(w, r, i) || moved; }
    }
    return moved || errand_walk_message(w);
}
static inline void errand_walk_start(ErrandWalk *w) {
    const size_t ranks = (size_t)w->program->ranks, storages = (size_t)w->program->map.storages, channels = ranks * ranks * (2 * storages + 3);
    w->at = (int *)checked_calloc(5 * ranks, sizeof(int), "errands"), w->group = w->at + ranks, w->count = w->group + ranks;
    w->telling = w->count + ranks, w->told = w->telling + ranks;
    w->noted = (int **)checked_calloc(ranks, sizeof(int *), "errands");
    for (size_t r = 0; r < ranks; r++) { w->noted[r] = (int *)checked_malloc((size_t)w->program->rank[r].count * sizeof(int), "errands"); }
    w->sends = (Posted *)checked_calloc(2 * channels, sizeof(Posted), "errands"), w->recvs = w->sends + channels;
    w->open = (int *)checked_calloc(ranks * storages * MAIL_KINDS, sizeof(int), "errands");
    w->posted_version = (int64_t *)checked_calloc(ranks * storages, sizeof(int64_t), "errands");
    w->share[0] = 1 + errand_walk_draw(w, 250), w->share[1] = w->share[0] + 1 + errand_walk_draw(w, 254 - w->share[0]);
    w->newest = errand_walk_draw(w, 2);
}
static inline void errand_walk_stop(ErrandWalk *w) {
    const size_t ranks = (size_t)w->program->ranks, channels = ranks * ranks * (2 * (size_t)w->program->map.storages + 3);
    for (size_t i = 0; i < 2 * channels; i++) { free(w->sends[i].end); }
    for (size_t r = 0; r < ranks; r++) { free(w->noted[r]); }
    free(w->at), free(w->noted), free(w->sends), free(w->met), free(w->open), free(w->posted_version);
}
// Plays the lists of mode data in an order that `seed` draws, of which every pause-th step drains. Who waits for ever, and who writes where a message is
// under way, is a violation.
static inline void errands_walk(Validator *v, const Relay *relay, int pause, uint64_t seed, ScheduleVisit at_once, ScheduleVisit later, void *context) {
    ErrandWalk w;
    memset(&w, 0, sizeof w);
    w.v = v, w.program = v->program, w.relay = relay, w.at_once = at_once, w.later = later, w.context = context, w.pause = pause, w.seed = seed;
    errand_walk_start(&w);
    for (int failed = 0; !*v->error; failed++) {
        if (errand_walk_move(&w)) { failed = 0; }
        if (failed > 64 && !errand_walk_any(&w)) { break; }
    }
    for (int r = 0; r < w.program->ranks; r++) {
        const End e = {r, w.count[r] ? w.noted[r][0] : w.at[r]};
        if (e.at < w.program->rank[r].count) { errand_walk_fail(&w, e, "deadlock: waits for ever, some work being put aside"); }
    }
    errand_walk_stop(&w);
}

#endif
