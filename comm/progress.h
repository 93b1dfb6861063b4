// progress.h: how operations by MPI begin, advance and are waited for.
//
// The head of the queue of collectives, and all messages between two ranks, advance whenever
// comm_progress() is called (operations call it between tiles) or this rank waits.
#ifndef COMM_PROGRESS_H
#define COMM_PROGRESS_H

#include "base/base.h"
#include "comm/collectives.h"
#include "comm/group.h"
#include "comm/messages.h"
#include "comm/records.h"
#include "comm/watchdog.h"
#include <sched.h> // sched_yield

static Comm *comm_running; // for comm_progress(), which takes no argument

// Advances everything in flight. Cheap when nothing is.
static inline void comm_advance(Comm *c) {
    if (c->transport.poll) { c->transport.poll(c); }
    comm_advance_messages(c);
    comm_advance_collectives(c);
}
// Advances everything in flight and answers questions. Operations call it between tiles, also
// through keep_alive().
static void comm_progress(void) {
    Comm *c = comm_running;
    if (!c || c->ranks == 1) { return; }
    comm_advance(c);
    double now = seconds_now();
    if (c->transport.waits) { // the device waits, whatever the host does
        if (now - c->looked > WATCH_EVERY_S) { comm_watch(c); }
    } else if (now - c->answered > 0.05) {
        c->answered = now;
        comm_listen(c, true);
    }
}

// One turn of waiting: first polls, then yields, then sleeps, since ranks may share a core.
static inline void comm_idle(Comm *c, int64_t turn) {
    if (turn > 200 || c->oversubscribed) { sched_yield(); }
    if (turn > 2000) { usleep(50); }
    // by the clock, not by turns: on a busy machine a sleep takes long
    bool look = turn > 2000 || turn % 64 == 63;
    if (look && seconds_now() - c->looked > WATCH_EVERY_S) { comm_watch(c); }
}
static inline bool comm_done_by_mpi(Comm *c, CommRequest r) {
    return r.message ? comm_message_done(c, r.number) : c->first >= r.number;
}
// Waits until the message, or the collective and all collectives begun before it, are complete.
static inline void comm_wait_by_mpi(Comm *c, CommRequest r) {
    if (comm_done_by_mpi(c, r)) { return; }
    double start = seconds_now();
    if (r.message) { c->awaited = r.number; }
    c->looked = start;
    c->last_progress = c->clock;
    comm_advance(c);
    for (int64_t turn = 0; !comm_done_by_mpi(c, r); turn++) {
        double before = c->last_progress;
        comm_idle(c, turn);
        comm_advance(c);
        if (c->idle_callback) { c->idle_callback(c->idle_context); }
        if (c->last_progress != before) { turn = 0; }
    }
    c->waited_s += seconds_now() - start;
    if (r.message) { c->awaited = 0; }
}
// Begins an operation over host memory. With no free place it waits for the oldest of its kind.
static inline CommRequest comm_begin_by_mpi(Comm *c, const CommOp *op) {
    CommRequest r = {.message = op->kind == COMM_SEND};
    if (r.message) {
        while (c->posted - c->settled == COMM_MESSAGES) {
            const CommRequest oldest = {true, c->settled + 1};
            comm_wait_by_mpi(c, oldest);
            comm_advance_messages(c);
        }
        r.number = comm_post_message(c, op);
    } else if (op->group->n > 1) {
        const CommRequest oldest = {false, c->first + 1};
        if (c->started - c->first == COMM_QUEUE) { comm_wait_by_mpi(c, oldest); }
        c->queue[c->started++ % COMM_QUEUE] = *op;
        comm_advance(c);
        r.number = c->started;
    } else { // no messages
        const CommPart mine = comm_sent(op, 0);
        if (mine.data != op->slice) { memcpy(op->slice, mine.data, (size_t)mine.bytes); }
    }
    return r;
}

#endif
