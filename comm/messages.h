// messages.h: messages between two ranks by MPI, independent of the collectives and of each other.
//
// They are in a ring. Message t is complete if t <= settled, or if its request is MPI_REQUEST_NULL.
// A message that is not complete holds back `settled` only, not the messages behind it.
#ifndef COMM_MESSAGES_H
#define COMM_MESSAGES_H

#include "base/base.h"
#include "comm/mpi.h"
#include "comm/records.h"
#include "comm/watchdog.h"

// Returns whether a message is known to be complete, without a call of MPI.
static inline bool comm_message_noted(const Comm *c, int64_t t) {
    return t <= c->settled || c->message_request[t % COMM_MESSAGES] == MPI_REQUEST_NULL;
}
// Returns whether a message is complete.
static inline bool comm_message_done(Comm *c, int64_t t) {
    const int64_t at = t % COMM_MESSAGES;
    int done = 1;
    if (comm_message_noted(c, t)) { return true; }
    comm_check(c, MPI_Test(&c->message_request[at], &done, MPI_STATUS_IGNORE), c->message[at].peer);
    if (done) { c->last_progress = c->clock; }
    return done;
}
static inline void comm_advance_messages(Comm *c) {
    while (c->settled < c->posted && comm_message_done(c, c->settled + 1)) { c->settled++; }
}
// Records which messages are complete, with one MPI call, or two around the end of the ring.
static inline void comm_note_messages(Comm *c) {
    int indices[COMM_MESSAGES];
    for (int64_t t = c->settled + 1; t <= c->posted;) {
        const int64_t at = t % COMM_MESSAGES, n = min_i64(c->posted + 1 - t, COMM_MESSAGES - at);
        int done = 0;
        comm_check(
            c, MPI_Testsome((int)n, &c->message_request[at], &done, indices, MPI_STATUSES_IGNORE),
            -1);
        if (done > 0) { c->last_progress = c->clock; } // MPI_UNDEFINED is negative
        t += n;
    }
}
// Posts a message. The ring must have space for it. Returns its number.
static inline int64_t comm_post_message(Comm *c, const CommOp *op) {
    const int64_t at = ++c->posted % COMM_MESSAGES;
    const CommMessage message = {op->label, op->send, op->peer};
    c->message[at] = message;
    comm_post_part(c, op->send, op->out, op->element_bytes, op->peer, TAG_MESSAGE + op->channel,
                   &c->message_request[at]);
    return c->posted;
}

#endif
