// sums.h: how the contributions of micro-batches to a gradient become its sum. update.h makes an
// update of the sum.
//
// Collectives  Each micro-batch adds to the gradient on the device (store_gradient). A reduction
//              sums it over the ranks that own the storage: a reduce-scatter, or, with qgZ, two
//              exchanges of records, inside nodes and then between them. The records of a bucket of
//              storages travel together, in this order: for each receiver [for each storage of the
//              bucket [for each node [records of its slice]]]. All owners must call each function,
//              with storages in the same order.
// On the host  (SumPlace) a sum leaves its slot when it is complete over the ranks of the storage.
//              If one rank holds the storage, the sum returns to the slot before the next
//              micro-batch, which adds to it as it computes. Otherwise the CPU adds to the sum on
//              the host, piece by piece, and as late as when the piece after next arrives. So sums
//              have the same bits as on the device, and at the update they are where the CPU needs
//              them.
#ifndef SUMS_H
#define SUMS_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "state/layout.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"
#include "state/table.h"

// -------------------------------------------------------------------------------------------------
// Collectives: on the device

// Waits for the reduction of a storage's gradient. Its slot is free afterwards.
static inline void store_finish_reduce(Store *s, int storage) {
    StorageProgress *p = &s->flight.progress[storage];
    comm_wait(s->memory.comm, &p->reducing);
    if (!p->adds_to_shard) { return; }
    int64_t begin, n = store_own(&s->plan, storage, &begin);
    ops_accumulate(s->memory.stream, store_floats(s, STATE_GRADIENT, storage, 0),
                   store_full_gradient(s, storage) + begin, n);
    p->adds_to_shard = false;
}
// Returns the buffer for contributions to a storage's gradient of this step. *accumulate: true if
// it holds contributions already, and more must be added.
static inline float *store_gradient(Store *s, int storage, bool *accumulate) {
    const int slot = s->plan.rows[storage].grad_slot,
              before = slot < 0 ? storage : s->flight.occupant[slot];
    bool *first = &s->flight.progress[storage].empty;
    if (*first && before >= 0) {
        // the device waits until the old content of the slot has been copied out
        for (int i = 0; store_on_host(&s->plan, STATE_GRADIENT, before) && i < MOVING_PIECES; i++) {
            ops_follow(s->memory.stream, &s->memory.offload_buffer[i].link);
        }
        store_finish_reduce(s, before);
    }
    if (slot >= 0) { s->flight.occupant[slot] = storage; }
    *accumulate = !*first;
    *first = false;
    return store_full_gradient(s, storage);
}

// Starts the next exchange of a bucket. step: of the gradient.
static inline void exchange_begin(Store *s, BucketExchange *p, int storage) {
    const RecordExchange *x = &p->bucket->hop[p->hop];
    const CommLabel label = {"gradient", storage, p->step};
    p->request = comm_all_to_all_begin(s->memory.comm, label, x->group, p->sent[p->hop], x->to,
                                       p->received[p->hop], x->from, 1);
    p->hop++;
}
// Starts the second exchange of a bucket: quantizes the sums of this node and sends them to their
// owners on the other nodes.
static inline void exchange_send_on(Store *s, BucketExchange *p) {
    const Bucket *b = p->bucket;
    if (p->hop != 1 || bucket_hops(b) == 1) { return; }
    const Group *all = &b->process_group->all;
    const int local = group_local(all, all->me);
    const char *in = p->received[0];
    comm_wait(s->memory.comm, &p->request);
    for (int storage = b->first; storage >= b->last; storage--) {
        for (int n = 0; n < all->nodes; n++) {
            int64_t before = 0, elements = slice_length(store_slices(&s->plan, storage),
                                                        group_at(all, n, local));
            for (int q = b->first; q > storage; q--) {
                before += store_records(&s->plan, q, n, local);
            }
            ops_requantize_sum(s->memory.stream, p->sent[1] + b->hop[1].to[n] + before, in,
                               b->hop[0].from[1], all->locals, elements, s->plan.policy.gradients);
            in += store_records(&s->plan, storage, n, local);
        }
    }
    exchange_begin(s, p, b->last);
}
// Ends a bucket's exchanges: adds what arrived last to this rank's slices.
static inline void exchange_finish(Store *s, BucketExchange *p) {
    if (!p->hop) { return; }
    const Group *all = &p->bucket->process_group->all;
    const RecordExchange *x = &p->bucket->hop[p->hop - 1];
    const char *in = p->received[p->hop - 1];
    comm_wait(s->memory.comm, &p->request);
    for (int storage = p->bucket->first; storage >= p->bucket->last; storage--) {
        float *slice = store_floats(s, STATE_GRADIENT, storage, 0);
        ops_dequantize_sum(s->memory.stream, slice, p->add, in, x->from[1], x->group->n,
                           store_own_elements(&s->plan, storage), s->plan.policy.gradients);
        in += store_records(&s->plan, storage, group_node(all, all->me), group_local(all, all->me));
    }
    p->hop = 0;
}
// Returns the exchange that was opened last.
static inline BucketExchange *exchange_newest(Store *s) {
    return &s->flight.exchange[(s->flight.exchanges + EXCHANGES - 1) % EXCHANGES];
}
// Begins the exchange of a bucket. Older exchanges advance by one message, so all members must
// begin exchanges in the same order.
static inline BucketExchange *exchange_open(Store *s, const Bucket *b, bool add, int64_t step) {
    int index = (int)(s->flight.exchanges++ % EXCHANGES);
    BucketExchange *p = &s->flight.exchange[index];
    exchange_finish(s, p);
    exchange_send_on(s, &s->flight.exchange[1 - index]);
    p->bucket = b;
    p->next = b->first;
    p->add = add;
    p->step = step;
    char *at = s->memory.exchange_base + index * s->plan.exchange_bytes;
    for (int h = 0; h < HOPS; h++) {
        p->sent[h] = at;
        p->received[h] = at + exchange_bytes(&b->hop[h], b->hop[h].to);
        at = p->received[h] + exchange_bytes(&b->hop[h], b->hop[h].from);
    }
    return p;
}
// Quantizes some elements of this rank's contribution to a gradient.
static inline void store_quantize(Store *s, char *out, int storage, int64_t begin,
                                  int64_t elements) {
    const float *grad = store_full_gradient(s, storage) + begin;
    if (!s->memory.device[STATE_ERRORS].base) {
        ops_quantize(s->memory.stream, out, grad, DTYPE_FP32, elements, s->plan.policy.gradients);
        return;
    }
    uint16_t *error = (uint16_t *)(void *)store_full(s, STATE_ERRORS, storage) + begin;
    ops_quantize_feedback(s->memory.stream, out, grad, error, ERROR_WEIGHT, elements,
                          s->plan.policy.gradients);
}
// Writes this rank's contribution into the message of its bucket, and sends the message when it is
// full.
static inline void store_reduce_coded(Store *s, int storage, bool add, int64_t step) {
    const Bucket *b = s->plan.rows[storage].exchange_bucket;
    const Group *all = &b->process_group->all;
    BucketExchange *p = storage == b->first ? exchange_open(s, b, add, step) : exchange_newest(s);
    assert(p->bucket == b && p->next == storage); // the validator proves it
    p->next--;
    for (int l = 0; l < all->locals; l++) {
        char *out = p->sent[0] + b->hop[0].to[l];
        for (int q = b->first; q > storage; q--) { out += store_column(&s->plan, q, l); }
        for (int n = 0; n < all->nodes; n++) {
            int64_t begin = store_slices(&s->plan, storage)[group_at(all, n, l)];
            store_quantize(s, out, storage, begin,
                           slice_length(store_slices(&s->plan, storage), group_at(all, n, l)));
            out += store_records(&s->plan, storage, n, l);
        }
    }
    if (storage == b->last) { exchange_begin(s, p, storage); }
}

// Starts the sum of a storage's gradient over the ranks that hold it, after this rank's last
// contribution. All of them must call it, with storages in the same order.
static inline void store_reduce(Store *s, int storage, int64_t step) {
    StorageProgress *p = &s->flight.progress[storage];
    const bool on_host = store_on_host(&s->plan, STATE_GRADIENT, storage),
               add = p->summed && !on_host;
    bool accumulate;
    if (p->empty) {
        ops_zero(s->memory.stream, store_gradient(s, storage, &accumulate),
                 store_full_bytes(&s->plan, STATE_GRADIENT, storage));
    }
    p->empty = true;
    p->summed |= !on_host;
    if (s->plan.rows[storage].exchange_bucket) {
        store_reduce_coded(s, storage, add, step);
        return;
    }
    int64_t begin;
    store_own(&s->plan, storage, &begin);
    float *grad = store_full_gradient(s, storage),
          *slice = store_floats(s, STATE_GRADIENT, storage, 0);
    p->adds_to_shard = add;
    const CommLabel label = {"gradient", storage, step};
    // if `add` is set or the sum is on the host, it stays in the slot
    p->reducing = comm_reduce_scatter_begin(
        s->memory.comm, label, &s->plan.rows[storage].owners->all, grad,
        add || on_host ? grad + begin : slice, store_slices(&s->plan, storage), s->plan.wire);
}

// -------------------------------------------------------------------------------------------------
// On the host

// Returns the link of the slot that a storage's gradient uses. Its copies run in order.
static inline Stream *store_sum_link(Store *s, int storage) {
    return &s->memory.offload_buffer[storage % SHARED_SLOTS].link;
}
// Waits for a piece that was copied to the host, and adds it to the sum there.
static inline void store_finish_adding(Store *s, int slot) {
    SumBuffer *r = &s->flight.adding[slot];
    if (!r->count) { return; }
    ops_wait(&s->memory.offload_buffer[slot].link);
    ops_accumulate_host(s->memory.stream, r->sum, r->at, r->count);
    r->count = 0;
}
// Moves the sum of a storage's gradient from its slot to the host, or adds it to this step's sum
// there.
static inline void store_evict_sum(Store *s, int storage, int64_t step) {
    StorageProgress *p = &s->flight.progress[storage];
    const bool adds = p->summed && s->plan.rows[storage].sum == SUM_IS_ADDED;
    int64_t begin, n = store_own(&s->plan, storage, &begin);
    float *sum = store_floats(s, STATE_GRADIENT, storage, step);
    float *slice = store_full_gradient(s, storage) + begin;
    comm_wait(s->memory.comm, &p->reducing);
    p->summed = true;
    if (!n) { return; }
    if (adds) {
        ops_wait(store_sum_link(s, storage)); // the first part must have arrived
        const int64_t most = s->plan.sum_bytes / sizeof(float);
        for (int64_t at = 0, count; at < n; at += count) {
            const int slot = s->flight.pieces_added++ % MOVING_PIECES;
            Stream *link = &s->memory.offload_buffer[slot].link;
            SumBuffer *r = &s->flight.adding[slot];
            store_finish_adding(s, slot);
            count = min_i64(most, n - at);
            ops_follow(link, s->memory.stream);
            store_move(s, link, r->at, slice + at, store_bytes(&s->plan, STATE_GRADIENT, count),
                       false);
            r->sum = sum + at;
            r->count = count;
        }
    } else {
        ops_follow(store_sum_link(s, storage), s->memory.stream);
        store_move(s, store_sum_link(s, storage), sum, slice,
                   store_bytes(&s->plan, STATE_GRADIENT, n), false);
    }
}
// Copies the sum back into its slot, to be added to.
static inline void store_fetch_sum(Store *s, int storage, int64_t step) {
    const int64_t n = store_own_elements(&s->plan, storage);
    Stream *link = store_sum_link(s, storage);
    ops_follow(link, s->memory.stream);
    store_move(s, link, store_at(s, STATE_GRADIENT, storage, step),
               store_full(s, STATE_GRADIENT, storage), store_bytes(&s->plan, STATE_GRADIENT, n),
               true);
    ops_follow(s->memory.stream, link);
    const int slot = s->plan.rows[storage].grad_slot;
    if (slot >= 0) { s->flight.occupant[slot] = storage; }
    s->flight.progress[storage].empty = false;
}

// -------------------------------------------------------------------------------------------------
// The end of all sums

// Waits until the sums of all gradients are complete, before the update. All ranks call it.
static inline void store_finish_sums(Store *s) {
    BucketExchange *newest = exchange_newest(s),
                   *older = &s->flight.exchange[s->flight.exchanges % EXCHANGES];
    exchange_send_on(s, newest);
    exchange_finish(s, older);
    exchange_finish(s, newest);
    for (int i = s->plan.model->storages - 1; i >= 0; i--) {
        store_finish_reduce(s, i);
        s->flight.progress[i].summed = false;
    }
    for (int i = 0; i < MOVING_PIECES && s->plan.offload_buffer_bytes; i++) {
        store_finish_adding(s, i);
        ops_wait(&s->memory.offload_buffer[i].link);
    }
}

#endif
