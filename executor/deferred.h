// deferred.h: a queue of store operations that wait for messages, while the rank computes on.
//
// Rules      An operation is ready when the messages that it would wait for (deferred_requests) are
//            complete, and no earlier operation in the queue is on the same parameters, or the same
//            sums, of its storage. One that sends is not ready while an earlier message to the same
//            rank is under way. An operation that is ready waits for nothing. The rank runs what
//            is ready between actions and whenever it waits; where an action needs the result of an
//            operation it waits until that has run. test/deferred_proof.h proves that no rank
//            waits for ever.
// Interface  deferred_open lets operations wait. Before it and after deferred_close, each operation
//            runs at once. deferred_push adds one, deferred_run_ready runs what is ready,
//            deferred_finish waits until certain operations have run, or all of them.
#ifndef DEFERRED_H
#define DEFERRED_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/messages.h"
#include "comm/records.h"
#include "schedule/actions.h"
#include "state/p2p.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"

#ifndef DEFERRED_HOOK // tests delay operations here: true if this one may run now
#define DEFERRED_HOOK(op) true
#endif

// most deferred operations of a rank at a time: those of two steps
enum { DEFERRED_OPS = 4096 };
typedef struct {
    Action action; // with absolute step and version
    int64_t micro; // counts through all steps
    int64_t place; // in the lists of all steps
} DeferredOp;
// A message that was sent, maybe still under way.
typedef struct {
    int peer;
    int64_t place; // of its operation
    CommRequest request;
} DeferredSend;
typedef struct {
    DeferredOp *ops; // [DEFERRED_OPS] in order; NULL: nothing is deferred
    int count;
    int64_t pushed;      // operations so far
    DeferredSend *sends; // [sending]
    int sending;
    int64_t capacity; // of sends
    Store *store;
    void (*run)(void *context, const DeferredOp *op);
    void *context;
} DeferredQueue;

// Returns whether the second of two operations must wait for the first one.
static inline bool deferred_conflict(const Action *a, const Action *b) {
    const unsigned on = ON_PARAMETERS | ON_SUM;
    return a->storage == b->storage &&
           (action_table[a->kind].is & action_table[b->kind].is & on) != 0;
}
// Returns what must not be deferred (BEFORE_ bits) when a step's statistics are added.
static inline unsigned deferred_before_stats(const P2p *r) {
    return r->waits ? BEFORE_NORM : BEFORE_STATISTICS;
}
// Returns where the messages of an operation's parameters, or of its sum, are noted: those that are
// sent, or those that are received.
static inline RequestKind deferred_messages(const P2p *r, const Action *a, bool sent) {
    if (!action_is(a->kind, ON_PARAMETERS)) { return sent ? REQUEST_SEND_SUM : REQUEST_RECV_SUM; }
    const int64_t version = a->kind == ACT_UPDATE ? a->step + 1 : a->version;
    return (RequestKind)((sent ? REQUEST_SEND : REQUEST_RECV) +
                         (int)(version % r->storage[a->storage].places));
}
// Lists the RequestKinds of its storage that an operation waits for, once all before it are done.
// Returns how many there are.
static inline int deferred_requests(const P2p *r, const Action *a, RequestKind kinds[2]) {
    kinds[0] = deferred_messages(r, a, false);
    kinds[1] = deferred_messages(r, a, true);
    switch (a->kind) {
    case ACT_SEND_PARAMETERS:
    case ACT_ADD: return 1;
    // a version may have arrived that was never used
    case ACT_RECV_PARAMETERS:
    case ACT_UPDATE: return 2;
    default: return 0;
    }
}
// Returns the message that an operation which sends has to wait for: one to the same rank which is
// under way, and earlier in the list. So messages have the link one after another, and the first
// ones arrive early, where all would arrive late. (A later one is not waited for: its receiver may
// need this one first.) number 0: none.
static inline CommRequest deferred_awaits_link(DeferredQueue *q, const DeferredOp *op) {
    CommRequest open = {.number = 0};
    int left = 0;
    if (!action_sends(op->action.kind)) { return open; }
    for (int i = 0; i < q->sending; i++) {
        const DeferredSend *send = &q->sends[i];
        if (comm_known_complete(q->store->memory.comm, send->request)) { continue; }
        const bool before = send->peer == op->action.peer && send->place < op->place;
        if (before) { open = send->request; }
        q->sends[left++] = *send;
    }
    q->sending = left;
    return open;
}
// Notes the message that an operation has sent.
static inline void deferred_note_send(DeferredQueue *q, const DeferredOp *op) {
    const Action *a = &op->action;
    if (!action_sends(a->kind)) { return; }
    const RequestKind kind = deferred_messages(q->store->plan.policy.p2p, a, true);
    const PendingRequests *m = store_requests(q->store, a->storage, kind);
    const DeferredSend send = {a->peer, op->place, m->open[m->count - 1]};
    q->sends = grow_array(DeferredSend, q->sends, q->sending, &q->capacity, "messages");
    q->sends[q->sending++] = send;
}
// Returns the first message that an operation would have to wait for now; number 0: none.
static inline CommRequest deferred_awaits(DeferredQueue *q, const DeferredOp *op) {
    Store *s = q->store;
    RequestKind kinds[2];
    const int n = deferred_requests(s->plan.policy.p2p, &op->action, kinds);
    CommRequest open = {.number = 0};
    for (int i = 0; i < n && !open.number; i++) {
        open = requests_open(s, store_requests(s, op->action.storage, kinds[i]));
    }
    return open.number ? open : deferred_awaits_link(q, op);
}

// Runs each operation that is ready. Also called while this rank waits (records.h: idle_callback).
static inline void deferred_run_ready(void *queue) {
    DeferredQueue *q = (DeferredQueue *)queue;
    int left = 0;
    if (!q->count || q->store->flight.in_deferred) { return; }
    q->store->flight.in_deferred = true;
    comm_note_messages(q->store->memory.comm);
    for (int i = 0; i < q->count; i++) {
        const DeferredOp op = q->ops[i];
        bool can = DEFERRED_HOOK(&op);
        for (int k = 0; k < left && can; k++) {
            can = !deferred_conflict(&q->ops[k].action, &op.action);
        }
        if (can && !deferred_awaits(q, &op).number) {
            q->run(q->context, &op);
            deferred_note_send(q, &op);
        } else {
            q->ops[left++] = op;
        }
    }
    q->count = left;
    q->store->flight.in_deferred = false;
}
// Advances an operation that is needed now: waits for the first message that blocks it, or that
// blocks an earlier operation in its way.
static inline void deferred_await(DeferredQueue *q, int at) {
    for (int i = at - 1; i >= 0; i--) {
        at = deferred_conflict(&q->ops[i].action, &q->ops[at].action) ? i : at;
    }
    CommRequest request = deferred_awaits(q, &q->ops[at]);
    comm_wait(q->store->memory.comm, &request);
    deferred_run_ready(q);
}
// Returns the index of the first operation that is any of these (bits), of a storage (-1: any) and
// of a step (-1: any); -1 if none exists.
static inline int deferred_find(const DeferredQueue *q, unsigned any, int storage, int64_t step) {
    for (int i = 0; i < q->count; i++) {
        const Action *a = &q->ops[i].action;
        if (action_is(a->kind, any) && (storage < 0 || a->storage == storage) &&
            (step < 0 || a->step == step)) {
            return i;
        }
    }
    return -1;
}
// Waits until all such operations have run.
static inline void deferred_finish(DeferredQueue *q, unsigned any, int storage, int64_t step) {
    for (int at = 0; (at = deferred_find(q, any, storage, step)) >= 0;) { deferred_await(q, at); }
}
// Waits, before a version of the parameters is read, until it is stored here or its message is
// posted.
static inline void deferred_expect_version(DeferredQueue *q, int storage, int64_t version) {
    for (int at = 0; (at = deferred_find(q, BEFORE_USE, storage, -1)) >= 0 &&
                     store_now(q->store, storage) < version;) {
        deferred_await(q, at);
    }
}
// Adds an operation. Runs it at once if nothing is deferred; waits for another one if the queue is
// full.
static inline void deferred_push(DeferredQueue *q, const DeferredOp *op) {
    if (!q->ops) {
        q->run(q->context, op);
        return;
    }
    if (q->count == DEFERRED_OPS) { deferred_await(q, 0); }
    q->ops[q->count] = *op;
    q->ops[q->count++].place = q->pushed++;
}
// Lets operations be deferred from now on, which are then also run while this rank waits.
static inline void deferred_open(DeferredQueue *q) {
    q->ops = new_array(DeferredOp, DEFERRED_OPS, "deferred operations");
    q->store->memory.comm->idle_callback = deferred_run_ready;
    q->store->memory.comm->idle_context = q;
}
static inline void deferred_close(DeferredQueue *q) {
    if (q->ops) { q->store->memory.comm->idle_callback = NULL; }
    free_all(q->ops, q->sends);
    memset(q, 0, sizeof *q);
}

#endif
