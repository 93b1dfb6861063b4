// deferred.h: a queue of store operations that wait for messages, while the rank computes on.
//
// Rules      An operation is ready when all that must precede it (schedule/order.h) is done: what
//            was deferred has run, and its messages are complete. One that sends is not ready while
//            an earlier message to the same rank is under way. An operation that is ready waits for
//            nothing. The rank runs what is ready between actions and whenever it waits. Before
//            each action of its list it waits for what must precede that action.
// No circle  Each of these waits is for something of this rank that stands EARLIER in its list: an
//            operation, or a message of which one end is an operation here. Consider the order in
//            which the validator plays the lists, with both ends of a message as one event: all
//            that an event waits for precedes it there, at both ends. So if ranks wait, the first
//            event in that order that has not happened can happen. This supposes that a message can
//            always be posted (overlap_open), and that both ends of a channel are posted in the
//            same order: a channel belongs to the parameters, or the sums, of one storage.
// Interface  deferred_open lets operations wait. Before it and after deferred_close, each operation
//            runs at once. deferred_push adds one, deferred_run_ready runs what is ready,
//            deferred_wait_before waits until an action of the list may run, deferred_finish until
//            all operations have run.
#ifndef DEFERRED_H
#define DEFERRED_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/messages.h"
#include "comm/records.h"
#include "schedule/actions.h"
#include "schedule/order.h"
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
    ListPlace place;
    int64_t number; // counts deferred operations
} DeferredOp;
// A message of an operation that has run, maybe still under way.
typedef struct {
    ListPlace place;
    int64_t number; // of its operation
    int peer;
    bool sends;
    CommRequest request;
} DeferredMessage;
typedef struct {
    DeferredOp *ops; // [DEFERRED_OPS] in order; NULL: nothing is deferred
    int count;
    int64_t pushed;            // operations so far
    DeferredMessage *messages; // [messages_count] in order
    int messages_count;
    int64_t capacity; // of messages
    Order order;
    OpenActions open; // a deferred operation, or its message, is not done
    Store *store;
    void (*run)(void *context, const DeferredOp *op);
    void *context;
} DeferredQueue;

// Returns the message that an operation which sends has to wait for: one to the same rank which is
// under way, and earlier in the list. So messages have the link one after another, and the first
// ones arrive early, where all would arrive late. (A later one is not waited for: its receiver may
// need this one first.) number 0: none.
static inline CommRequest deferred_awaits_link(const DeferredQueue *q, const DeferredOp *op) {
    CommRequest open = {.number = 0};
    for (int i = 0; i < q->messages_count && action_sends(op->action.kind); i++) {
        const DeferredMessage *m = &q->messages[i];
        const bool before = m->sends && m->peer == op->action.peer && m->number < op->number;
        if (before) { open = m->request; }
    }
    return open;
}
// Forgets messages that are known to be complete: what must follow them may run.
static inline void deferred_note_messages(DeferredQueue *q) {
    int left = 0;
    for (int i = 0; i < q->messages_count; i++) {
        if (comm_known_complete(q->store->memory.comm, q->messages[i].request)) {
            open_end(&q->open, q->messages[i].place);
        } else {
            q->messages[left++] = q->messages[i];
        }
    }
    q->messages_count = left;
}
// Returns where the messages of a storage's parameters, or of its sum, are noted.
static inline RequestKind deferred_messages(const StatePlan *s, const Action *a) {
    const bool sends = action_sends(a->kind);
    if (!action_is(a->kind, ON_PARAMETERS)) { return sends ? REQUEST_SEND_SUM : REQUEST_RECV_SUM; }
    return (RequestKind)((sends ? REQUEST_SEND : REQUEST_RECV) +
                         (int)(a->version % s->rows[a->storage].places));
}
// Runs an operation. It is done then, or when the message that it has posted is complete.
static inline void deferred_run(DeferredQueue *q, const DeferredOp *op) {
    const Action *a = &op->action;
    q->run(q->context, op);
    if (!action_is_message(a->kind)) {
        open_end(&q->open, op->place);
        return;
    }
    const PendingRequests *posted =
        store_requests(q->store, a->storage, deferred_messages(&q->store->plan, a));
    const DeferredMessage m = {.place = op->place,
                               .number = op->number,
                               .peer = a->peer,
                               .sends = action_sends(a->kind),
                               .request = posted->open[posted->count - 1]};
    q->messages =
        grow_array(DeferredMessage, q->messages, q->messages_count, &q->capacity, "messages");
    q->messages[q->messages_count++] = m;
}
// Runs each operation that is ready. Also called while this rank waits (records.h: idle_callback).
static inline void deferred_run_ready(void *queue) {
    DeferredQueue *q = (DeferredQueue *)queue;
    ListPlace before;
    int left = 0;
    if ((!q->count && !q->messages_count) || q->store->flight.in_deferred) { return; }
    q->store->flight.in_deferred = true;
    comm_note_messages(q->store->memory.comm);
    deferred_note_messages(q);
    for (int i = 0; i < q->count; i++) {
        const DeferredOp op = q->ops[i];
        if (DEFERRED_HOOK(&op) && !open_before(&q->open, op.place, 1, &before) &&
            !deferred_awaits_link(q, &op).number) {
            deferred_run(q, &op);
        } else {
            q->ops[left++] = op;
        }
    }
    q->count = left;
    q->store->flight.in_deferred = false;
}
// Advances an operation that is needed now: waits for the message that it, or the first operation
// in its way, waits for.
static inline void deferred_advance(DeferredQueue *q, ListPlace p) {
    CommRequest request = {.number = 0};
    while (open_before(&q->open, p, 1, &p)) {}
    for (int i = 0; i < q->count; i++) {
        if (list_place_equal(q->ops[i].place, p)) { request = deferred_awaits_link(q, &q->ops[i]); }
    }
    for (int i = 0; i < q->messages_count; i++) {
        if (list_place_equal(q->messages[i].place, p)) { request = q->messages[i].request; }
    }
    comm_wait(q->store->memory.comm, &request);
    deferred_run_ready(q);
}
// Waits until an action may run that the list has reached.
static inline void deferred_wait_before(DeferredQueue *q, ListPlace p) {
    ListPlace before;
    while (q->ops && open_before(&q->open, p, 0, &before)) { deferred_advance(q, before); }
}
// Waits until all operations have run.
static inline void deferred_finish(DeferredQueue *q) {
    while (q->count) { deferred_advance(q, q->ops[0].place); }
}
// Adds an operation. Runs it at once if nothing is deferred; waits for another one if the queue is
// full, or if the same one of an earlier window is not done.
static inline void deferred_push(DeferredQueue *q, const DeferredOp *op) {
    if (!q->ops) {
        q->run(q->context, op);
        return;
    }
    const int64_t *open = open_place(&q->open, op->place);
    while (q->count == DEFERRED_OPS) { deferred_advance(q, q->ops[0].place); }
    while (*open) { deferred_advance(q, open_occupant(&q->open, op->place)); }
    open_begin(&q->open, op->place);
    q->ops[q->count] = *op;
    q->ops[q->count++].number = q->pushed++;
}
// Lets operations be deferred from now on, which are then also run while this rank waits. The order
// belongs to the queue.
static inline void deferred_open(DeferredQueue *q, Order order) {
    q->order = order;
    q->open = open_actions(&q->order);
    q->ops = new_array(DeferredOp, DEFERRED_OPS, "deferred operations");
    q->store->memory.comm->idle_callback = deferred_run_ready;
    q->store->memory.comm->idle_context = q;
}
static inline void deferred_close(DeferredQueue *q) {
    if (q->ops) { q->store->memory.comm->idle_callback = NULL; }
    order_free(&q->order);
    free_all(q->ops, q->messages, q->open.window);
    memset(q, 0, sizeof *q);
}

#endif
