// messages.h: messages between two ranks by MPI, independent of the collectives and of each other.
//
// They are in a ring. Message t is complete if t <= settled, or if its request is MPI_REQUEST_NULL.
// A message that is not complete holds back `settled` only, not the messages behind it.
#ifndef COMM_MESSAGES_H
#define COMM_MESSAGES_H

#include "comm/watchdog.h" // errors of MPI

static inline CommMessage *comm_message(Comm *c, int64_t t) {
    return &c->message[t % COMM_MESSAGES];
}
// Returns whether a message is known to be complete, without a call of MPI.
static inline bool comm_message_noted(Comm *c, int64_t t) {
    return t <= c->settled || comm_message(c, t)->request == MPI_REQUEST_NULL;
}
// Returns whether a message is complete.
static inline bool comm_message_done(Comm *c, int64_t t) {
    CommMessage *m = comm_message(c, t);
    int done = 1;
    if (comm_message_noted(c, t)) { return true; }
    comm_check(c, MPI_Test(&m->request, &done, MPI_STATUS_IGNORE), m->peer);
    if (done) { c->fresh = c->clock; }
    return done;
}
static inline void comm_settle_messages(Comm *c) {
    while (c->settled < c->posted && comm_message_done(c, c->settled + 1)) { c->settled++; }
}
// Records which messages are complete, with a single MPI call.
static inline void comm_note_messages(Comm *c) {
    MPI_Request open[COMM_MESSAGES];
    int64_t of[COMM_MESSAGES];
    int n = 0, done = 0, which[COMM_MESSAGES];
    for (int64_t t = c->settled + 1; t <= c->posted; t++) {
        if (comm_message_noted(c, t)) { continue; }
        of[n] = t;
        open[n++] = comm_message(c, t)->request;
    }
    if (!n) { return; }
    comm_check(c, MPI_Testsome(n, open, &done, which, MPI_STATUSES_IGNORE), -1);
    for (int i = 0; i < done; i++) {
        comm_message(c, of[which[i]])->request = MPI_REQUEST_NULL;
        c->fresh = c->clock;
    }
}
// Posts a message. The ring must have space for it. Returns its number.
static inline int64_t comm_post_message(Comm *c, const CommOp *op) {
    CommMessage *m = comm_message(c, ++c->posted);
    m->label = op->label;
    m->send = op->send;
    m->peer = op->peer;
    const int n = (int)op->element_bytes, tag = TAG_MESSAGE + op->channel;
    comm_check(c,
               op->send ? MPI_Isend(op->out, n, MPI_BYTE, op->peer, tag, c->world, &m->request)
                        : MPI_Irecv(op->out, n, MPI_BYTE, op->peer, tag, c->world, &m->request),
               op->peer);
    return c->posted;
}

#endif
