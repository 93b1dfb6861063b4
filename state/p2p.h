// p2p.h: messages between two ranks (policy.h: P2p; cyclic.h says when they are sent). Gradients of
// micro-batches go to the owner of a storage, which adds them up; versions of its parameters go to
// the ranks that use them. update.h makes an update of a sum.
//
// Sums      ((g_1 + g_2) + g_3) + ... over a step's micro-batches, always in this order, so every
//           execution gives the same bits. A gradient is made in a buffer of its own. Where sums do
//           not stay, the owner adds the gradients before its own apart, then this sum to its own
//           gradient, then the others. The gradients of pieces are complete before they are added
//           to those of earlier pieces of their micro-batch.
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
#include "state/table.h"

static inline PendingRequests *store_requests(const Store *s, int storage, RequestKind kind) {
    return &s->flight.progress[storage].requests[kind];
}
static inline PendingRequests *store_version_requests(const Store *s, int storage, int64_t version,
                                                      RequestKind kind) {
    return store_requests(s, storage, kind) + version % s->plan.rows[storage].places;
}
static inline void requests_wait(Store *s, PendingRequests *m) {
    for (int i = 0; i < m->count; i++) {
        // a deferred operation must not wait: all messages that it needs precede it (order.h)
        assert(!s->flight.in_deferred || comm_known_complete(s->memory.comm, m->open[i]));
        comm_wait(s->memory.comm, &m->open[i]);
    }
    m->count = 0;
}
// A message of the whole parameters or the whole gradient of a storage.
typedef struct {
    bool send; // to the peer, or received from it
    int storage, peer;
    int64_t step; // to which it belongs
} StateMessage;
static inline void requests_post(Store *s, PendingRequests *requests, const StateMessage *m,
                                 StateKind kind, int channel, void *data) {
    const CommLabel label = {kind == STATE_GRADIENT ? "gradient" : "parameters", m->storage,
                             m->step};
    requests->open[requests->count++] =
        comm_message_begin(s->memory.comm, label, m->send, m->peer, channel, data,
                           store_full_bytes(&s->plan, kind, m->storage));
}
static inline int parameters_channel(int storage) { return 1 + 2 * storage; }
static inline int sum_channel(int storage) { return 2 + 2 * storage; }

// -------------------------------------------------------------------------------------------------
// Gradients

// True once a piece has a contribution to the gradient. `micro` counts pieces through all steps.
static inline bool *store_gradient_begun(Store *s, int storage, int64_t micro) {
    return storage ? &s->flight.progress[storage].summed
                   : &s->flight.head_begun[micro % s->plan.p2p.heads];
}
// Returns a buffer of the gradient of a micro-batch, or of one of its pieces (P2p.made, whole). If
// sums do not stay, the owner's whole gradient becomes the sum of its step.
static inline float *store_piece_gradient(const Store *s, StateKind kind, int storage,
                                          int64_t micro) {
    const int64_t step = micro / pieces_of_step(&s->plan.p2p.pieces);
    return store_floats(s, kind, storage, kind == STATE_GRADIENT ? step : micro);
}
// Waits until the messages that send from a storage's gradient buffer are complete, including those
// of other storages that share its slot.
static inline void wait_gradient_buffer_free(Store *s, int storage) {
    const P2p *r = &s->plan.p2p;
    requests_wait(s, store_requests(s, storage, REQUEST_SEND_SUM));
    for (int i = 1; r->borrows && storage && i < s->plan.model->storages; i++) {
        if (s->plan.rows[i].p2p.grad_slot == s->plan.rows[storage].p2p.grad_slot) {
            requests_wait(s, store_requests(s, i, REQUEST_SEND_SUM));
        }
    }
}
// Returns the buffer for contributions to the gradient of a micro-batch, or of one of its pieces.
// *accumulate: it holds contributions already, and more must be added.
static inline float *store_own_gradient(Store *s, int storage, int64_t micro, bool *accumulate) {
    bool *begun = store_gradient_begun(s, storage, micro);
    if (!*begun) { wait_gradient_buffer_free(s, storage); }
    if (!storage) { comm_wait(s->memory.comm, &s->flight.head_coming[micro % s->plan.p2p.heads]); }
    *accumulate = *begun;
    *begun = true;
    return store_piece_gradient(s, s->plan.p2p.made, storage, micro);
}
// Adds a gradient to the sum of those before it, or copies the first one.
static inline void store_join_gradients(Store *s, int storage, float *sum, const float *gradient,
                                        bool first) {
    const int64_t elements = gpt_storage_elements(s->plan.model, storage);
    if (first) {
        ops_copy(s->memory.stream, sum, gradient, (size_t)elements * sizeof(float));
    } else {
        ops_accumulate(s->memory.stream, sum, gradient, elements);
    }
}
// Ends a piece's gradient, and with the last piece that of its micro-batch. micro: number of the
// piece through all steps; piece: number within the step.
static inline void store_end_piece(Store *s, int storage, int64_t micro, int piece) {
    const P2p *r = &s->plan.p2p;
    const int64_t elements = gpt_storage_elements(s->plan.model, storage);
    bool accumulate, *begun = store_gradient_begun(s, storage, micro);
    // the piece has no samples
    if (!*begun) {
        ops_zero(s->memory.stream, store_own_gradient(s, storage, micro, &accumulate),
                 (size_t)elements * sizeof(float));
    }
    *begun = false;
    // the head's part may be on its way still: a piece without samples has not waited for it
    if (!storage) { comm_wait(s->memory.comm, &s->flight.head_coming[micro % r->heads]); }
    float *sum = store_piece_gradient(s, s->plan.p2p.made, storage, micro),
          *made = store_piece_gradient(s, s->plan.p2p.whole, storage, micro);
    if (made != sum) {
        store_join_gradients(s, storage, made, sum, piece_within(&r->pieces, piece) == 0);
    }
}
// Adds the sum of earlier micro-batches of the step to a micro-batch's gradient, if this rank owns
// the storage.
static inline void store_add_sum(Store *s, int storage, int64_t micro, int piece, int64_t step) {
    const P2p *r = &s->plan.p2p;
    const int in_step = piece_micro(&r->pieces, piece);
    float *made = store_piece_gradient(s, s->plan.p2p.whole, storage, micro);
    if (!piece_is_last(&r->pieces, piece)) { return; }
    // the gradient of another rank's storage is sent to its owner as it is
    if (!store_holds(&s->plan, storage)) { return; }
    if (r->stays) {
        store_join_gradients(s, storage, store_floats(s, STATE_GRADIENT, storage, step), made,
                             in_step == 0);
    } else if (in_step > 0) {
        ops_accumulate(s->memory.stream, made, store_floats(s, STATE_MADE, storage, 0),
                       gpt_storage_elements(s->plan.model, storage));
    }
}
// Adds a part of a sum that was received: another rank's gradient, or its piece.
static inline void store_add_part(Store *s, int storage, int piece, int64_t step) {
    const P2p *r = &s->plan.p2p;
    // the gradients before this rank's own one are added up apart from it
    const bool apart = !r->stays && piece_micro(&r->pieces, piece) < r->rank;
    float *part = store_floats(s, STATE_RECEIVED, storage, 0);
    requests_wait(s, store_requests(s, storage, REQUEST_RECV_SUM));
    if (r->stays && r->joins_pieces) {
        float *whole = store_piece_gradient(s, s->plan.p2p.whole, storage, 0);
        store_join_gradients(s, storage, whole, part, piece_within(&r->pieces, piece) == 0);
        if (!piece_is_last(&r->pieces, piece)) { return; }
        part = whole;
    }
    float *sum = store_floats(s, apart ? STATE_MADE : STATE_GRADIENT, storage, apart ? 0 : step);
    store_join_gradients(s, storage, sum, part, piece_micro(&r->pieces, piece) == 0);
}
// Sends the head's part of a micro-batch's gradient of wte to the rank with the embedding, which
// adds its own part.
static inline void store_pass_part(Store *s, const StateMessage *m, int64_t micro) {
    const int storage = m->storage;
    const size_t bytes = store_full_bytes(&s->plan, STATE_GRADIENT, storage);
    PendingRequests *requests = store_requests(s, storage, REQUEST_SEND_SUM);
    bool accumulate, *begun = store_gradient_begun(s, storage, micro);
    float *made = store_piece_gradient(s, s->plan.p2p.made, storage, micro);
    if (!m->send) {
        const CommLabel label = {"gradient", storage, m->step};
        assert(!storage && !*begun);
        requests_wait(s, requests);
        s->flight.head_coming[micro % s->plan.p2p.heads] =
            comm_receive_begin(s->memory.comm, label, m->peer, made, bytes);
        *begun = true;
        return;
    }
    // the piece has no samples
    if (!*begun) {
        ops_zero(s->memory.stream, store_own_gradient(s, storage, micro, &accumulate), bytes);
    }
    *begun = false;
    requests_post(s, requests, m, STATE_GRADIENT, 0, made);
}
// Sends the gradient of a micro-batch to the owner of the storage, or receives it there.
static inline void store_pass_sum(Store *s, const StateMessage *m) {
    float *gradient = m->send ? store_piece_gradient(s, s->plan.p2p.whole, m->storage, 0)
                              : store_floats(s, STATE_RECEIVED, m->storage, 0);
    requests_post(s, store_requests(s, m->storage, m->send ? REQUEST_SEND_SUM : REQUEST_RECV_SUM),
                  m, STATE_GRADIENT, sum_channel(m->storage), gradient);
}

// -------------------------------------------------------------------------------------------------
// Versions of parameters

// Waits until a version that is stored here, or whose message is posted, has arrived.
static inline void store_await_version(Store *s, int storage, int64_t version) {
    assert(s->plan.rows[storage].places && version <= s->flight.progress[storage].version &&
           version + s->plan.rows[storage].places > s->flight.progress[storage].version);
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
// Begins a new version on its owner. If fp32 parameters are their own masters, and the previous
// version stays, the new one begins as its copy.
static inline void store_begin_version(Store *s, int storage, int64_t version) {
    const char *before = store_newest(s, storage);
    store_open_version(s, storage, version);
    if (before != store_newest(s, storage) && s->plan.dtype == DTYPE_FP32) {
        ops_copy(s->memory.stream, store_newest(s, storage), before,
                 store_full_bytes(&s->plan, STATE_GRADIENT, storage));
    }
}
// Makes a version that equals the previous one, because this step does not update the storage.
static inline void store_skip_version(Store *s, int storage, int64_t version) {
    const char *before = store_newest(s, storage);
    store_begin_version(s, storage, version);
    s->flight.progress[storage].noised = false;
    if (before == store_newest(s, storage) || s->plan.dtype == DTYPE_FP32) { return; }
    ops_copy(s->memory.stream, store_newest(s, storage), before,
             store_full_bytes(&s->plan, STATE_PARAMETERS, storage));
}
// Sends a version to a rank that keeps it, too, or receives it.
static inline void store_pass_parameters(Store *s, const StateMessage *m, int64_t version) {
    const int storage = m->storage;
    if (m->send) {
        store_await_version(s, storage, version);
    } else {
        store_open_version(s, storage, version);
    }
    PendingRequests *requests =
        store_version_requests(s, storage, version, m->send ? REQUEST_SEND : REQUEST_RECV);
    requests_post(s, requests, m, STATE_PARAMETERS, parameters_channel(storage),
                  store_at(s, STATE_PARAMETERS, storage, version));
}
// Sends a version from its owner to a rank that uses it next, or receives it into a slot, whose
// last use has ended.
static inline void store_pass_borrowed(Store *s, const StateMessage *m, int64_t version, int slot) {
    PendingRequests *requests =
        m->send ? store_version_requests(s, m->storage, version, REQUEST_SEND)
                : store_requests(s, m->storage, (RequestKind)(REQUEST_RECV + slot));
    assert(m->send == store_holds(&s->plan, m->storage));
    if (!m->send) { requests_wait(s, requests); }
    requests_post(s, requests, m, STATE_PARAMETERS, 0,
                  store_at(s, STATE_PARAMETERS, m->storage, m->send ? version : slot));
}
// Sends the newest version to all ranks, for a pass that does not train. All ranks call it, in the
// same order.
static inline void store_broadcast(Store *s, int storage, int slot, int64_t step) {
    const int owner = s->plan.rows[storage].p2p.owner;
    const int64_t version = s->flight.progress[storage].version;
    StateMessage m = {owner == s->memory.comm->rank, storage, owner, step};
    if (!m.send) {
        store_pass_borrowed(s, &m, version, slot);
        return;
    }
    requests_wait(s, store_version_requests(s, storage, version, REQUEST_SEND));
    for (m.peer = 0; m.peer < s->memory.comm->ranks; m.peer++) {
        if (m.peer != owner) { store_pass_borrowed(s, &m, version, slot); }
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
        for (int to = 0; p->places && to < s->memory.comm->ranks; to++) {
            const bool sends = p->owner == me;
            if (to == p->owner || (!sends && to != me) || !p->places[to]) { continue; }
            const CommLabel label = {"parameters", i, s->memory.comm->step};
            CommRequest request = comm_message_begin(
                s->memory.comm, label, sends, sends ? to : p->owner, 0, store_newest(s, i), bytes);
            comm_wait(s->memory.comm, &request);
        }
        if (!s->plan.rows[i].places) { continue; }
        char *other = store_at(s, STATE_PREVIOUS, i, s->flight.progress[i].version + 1);
        if (other != store_newest(s, i) && !s->flight.progress[i].knows_previous) {
            ops_copy(s->memory.stream, other, store_newest(s, i), bytes);
        }
    }
}

#endif
