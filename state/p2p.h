// p2p.h: messages between two ranks (policy.h: P2p; cyclic.h says when they are sent). Versions of
// parameters go from their owner to the ranks that use them; sums.h has the gradients, which go to
// the owner.
//
// Versions  count steps. A rank keeps one or two versions of a storage: version v in buffer v
//           modulo their number. A buffer is written again when all requests that use it are
//           complete (PendingRequests).
// Callers   Both ends of a message must call its function, in the order of the schedule. Functions
//           without a message are called by the rank that holds the data.
// Deferred  Store operations that would wait for messages may be deferred (executor/deferred.h).
//           Each storage has channels of its own, so that both ends may post messages in different
//           orders. A transport with a single channel has no deferred operations.
#ifndef P2P_H
#define P2P_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/records.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"

static inline PendingRequests *store_requests(const Store *s, int storage, RequestKind kind) {
    return &s->flight.progress[storage].requests[kind];
}
static inline PendingRequests *store_version_requests(const Store *s, int storage, int64_t version,
                                                      RequestKind kind) {
    return store_requests(s, storage, kind) + version % s->plan.rows[storage].p2p.places;
}
static inline void requests_wait(Store *s, PendingRequests *m) {
    for (int i = 0; i < m->count; i++) {
        // a deferred operation must not wait: all messages that it needs precede it (order.h)
        assert(!s->flight.in_deferred || comm_known_complete(s->memory.comm, m->open[i]));
        comm_wait(s->memory.comm, &m->open[i]);
    }
    m->count = 0;
}
// Posts a message of a storage's whole parameters or gradient (kind), to or from `peer`.
static inline void requests_post(Store *s, PendingRequests *m, bool send, StateKind kind,
                                 int storage, int64_t step, int peer, int channel, void *data) {
    const CommLabel label = {kind == STATE_GRADIENT ? "gradient" : "parameters", storage, step};
    m->open[m->count++] = comm_message_begin(s->memory.comm, label, send, peer, channel, data,
                                             store_full_bytes(&s->plan, kind, storage));
}
static inline int parameters_channel(int storage) { return 1 + 2 * storage; }
static inline int sum_channel(int storage) { return 2 + 2 * storage; }
// Waits until a version that is stored here, or whose message is posted, has arrived.
static inline void store_await_version(Store *s, int storage, int64_t version) {
    assert(s->plan.rows[storage].p2p.places && version <= s->flight.progress[storage].version &&
           version + s->plan.rows[storage].p2p.places > s->flight.progress[storage].version);
    requests_wait(s, store_version_requests(s, storage, version, REQUEST_RECV));
}
// Prepares the buffer of the next version to be written: waits until the messages of its old
// content are complete.
static inline void store_open_version(Store *s, int storage, int64_t version) {
    assert(version == s->flight.progress[storage].version + 1);
    requests_wait(s, store_version_requests(s, storage, version, REQUEST_RECV));
    requests_wait(s, store_version_requests(s, storage, version, REQUEST_SEND));
    s->flight.progress[storage].version = version;
}
// Sends a version to a rank that keeps it, too, or receives it.
static inline void store_pass_parameters(Store *s, bool send, int storage, int64_t version,
                                         int peer, int64_t step) {
    if (send) {
        store_await_version(s, storage, version);
    } else {
        store_open_version(s, storage, version);
    }
    PendingRequests *requests =
        store_version_requests(s, storage, version, send ? REQUEST_SEND : REQUEST_RECV);
    requests_post(s, requests, send, STATE_PARAMETERS, storage, step, peer,
                  parameters_channel(storage), store_at(s, STATE_PARAMETERS, storage, version));
}
// Sends a version from its owner to a rank that uses it next, or receives it into a slot, whose
// last use has ended.
static inline void store_pass_borrowed(Store *s, bool send, int storage, int64_t version, int slot,
                                       int peer, int64_t step) {
    PendingRequests *requests =
        send ? store_version_requests(s, storage, version, REQUEST_SEND)
             : store_requests(s, storage, (RequestKind)(REQUEST_RECV + slot));
    assert(send == store_holds(&s->plan, storage));
    if (!send) { requests_wait(s, requests); }
    requests_post(s, requests, send, STATE_PARAMETERS, storage, step, peer, 0,
                  store_at(s, STATE_PARAMETERS, storage, send ? version : slot));
}
// Sends the newest version to all ranks, for a pass that does not train. All ranks call it, in the
// same order.
static inline void store_broadcast(Store *s, int storage, int slot, int64_t step) {
    const int owner = s->plan.rows[storage].p2p.owner;
    const int64_t version = s->flight.progress[storage].version;
    if (owner != s->memory.comm->rank) {
        store_pass_borrowed(s, false, storage, version, slot, owner, step);
        return;
    }
    requests_wait(s, store_version_requests(s, storage, version, REQUEST_SEND));
    for (int to = 0; to < s->memory.comm->ranks; to++) {
        if (to != owner) { store_pass_borrowed(s, true, storage, version, slot, to, step); }
    }
}
// Sends the parameters from their owners to the ranks that compute with them, after masters were
// written from outside. The previous version becomes a copy where it is not known. All ranks call
// it.
static inline void store_send_all(Store *s) {
    const int me = s->memory.comm->rank;
    for (int i = 0; i < s->plan.model->storages; i++) {
        const P2pStorage *p = &s->plan.rows[i].p2p;
        const size_t bytes = store_full_bytes(&s->plan, STATE_PARAMETERS, i);
        for (int to = 0; p->taken && to < s->memory.comm->ranks; to++) {
            const bool sends = p->owner == me;
            if (to == p->owner || (!sends && to != me) || !p->taken[to]) { continue; }
            const CommLabel label = {"parameters", i, s->memory.comm->step};
            CommRequest request = comm_message_begin(
                s->memory.comm, label, sends, sends ? to : p->owner, 0, store_newest(s, i), bytes);
            comm_wait(s->memory.comm, &request);
        }
        if (!p->places) { continue; }
        char *other = store_at(s, STATE_PREVIOUS, i, s->flight.progress[i].version + 1);
        if (other != store_newest(s, i) && !s->flight.knows_previous) {
            ops_copy(s->memory.stream, other, store_newest(s, i), bytes);
        }
    }
}

#endif
