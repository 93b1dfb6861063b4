// gather.h: how the states of a storage travel between the ranks that own it: gathers of
// parameters before their use, reductions of gradients. p2p.h has the messages between two ranks.
//
// Gathers     Each owner sends its slice to all others. With hpZ, the gathers after a step's first
//             one need only the ranks of a partition. With qwZ, records travel (quantize.h).
// Reductions  are reduce-scatters, or, with qgZ, two exchanges of records: inside nodes and then
//             between them. The records of a bucket of storages travel together, in this order:
//             for each receiver [for each storage of the bucket [for each node [records of its
//             slice]]].
// Order       All owners must call each function here, with storages in the same order.
#ifndef GATHER_H
#define GATHER_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "state/disk.h"
#include "state/host.h"
#include "state/layout.h"
#include "state/matrices.h"
#include "state/p2p.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"
#include "state/table.h"

// -------------------------------------------------------------------------------------------------
// Parameters

// The collective of a gather: PREFETCH starts it, predictions count it.
typedef struct {
    CommKind kind;
    const Group *group;
    const int64_t *bounds; // of the parts that are sent
    size_t element_bytes;
} ZeroMessage;
static inline bool store_gathers_records(const StatePlan *s, bool secondary) {
    return s->policy.quantized_weights && !secondary;
}
static inline ZeroMessage store_gather_message(const StatePlan *s, int storage, bool secondary) {
    bool coded = store_gathers_records(s, secondary);
    const SliceKind slices = secondary ? SLICES_SECONDARY : coded ? SLICES_WEIGHTS : SLICES_WHOLE;
    const ProcessGroup *process_group = store_process_group(s, storage);
    ZeroMessage m = {COMM_ALL_GATHER, secondary ? &process_group->partition : &process_group->all,
                     layout_slices(&s->layout, slices, storage), coded ? 1 : dtype_size(s->dtype)};
    return m;
}
// Returns the exchange of a storage's directions: home, or (back) to their slices.
static inline ZeroMessage store_matrix_message(const StatePlan *s, int storage, bool back) {
    const MatrixExchange *e = &s->matrices.of[storage];
    const ZeroMessage m = {COMM_ALL_TO_ALL, &store_process_group(s, storage)->all,
                           back ? e->from : e->to, sizeof(float)};
    return m;
}
// Lists the collectives of a reduction and returns how many there are. Those of a bucket are
// counted with its last storage.
static inline int store_reduce_messages(const StatePlan *s, int storage, ZeroMessage m[2]) {
    const ProcessGroup *process_group = store_process_group(s, storage);
    ZeroMessage plain = {COMM_REDUCE_SCATTER, &process_group->all, store_slices(s, storage),
                         dtype_size(s->wire)};
    m[0] = plain;
    if (s->rows[storage].bucket < 0) { return 1; }
    const Bucket *b = &s->buckets[s->rows[storage].bucket];
    const int hops = storage > b->last ? 0 : bucket_hops(b);
    for (int h = 0; h < hops; h++) {
        const ZeroMessage hop = {COMM_ALL_TO_ALL, b->hop[h].group, b->hop[h].to, 1};
        m[h] = hop;
    }
    return hops;
}

// Returns the bytes of memory traffic that a gather or reduction causes apart from its messages:
// records are written by the ranks that quantize, and read by those that add.
static inline double quantization_traffic(const StatePlan *s, int storage, bool reduces,
                                          bool secondary) {
    double elements = gpt_storage_elements(s->model, storage), size = dtype_size(s->dtype);
    const int64_t *records =
        layout_slices(&s->layout, reduces ? SLICES_GRADIENTS : SLICES_WEIGHTS, storage);
    double coded = records[store_process_group(s, storage)->all.n];
    // written, summed inside the node, written again, summed; the second part is small
    if (reduces) { return s->rows[storage].bucket < 0 ? 0 : elements * 4 + 3 * coded; }
    double kept = store_place(s, STATE_SECONDARY, storage) == PLACE_DEVICE && !secondary
                      ? elements * 2 * size / store_process_group(s, storage)->partition.n
                      : 0;
    return kept + (store_gathers_records(s, secondary) ? coded + elements * size : 0);
}

// Starts to gather the parameters of a storage at this version: copies this member's part of the
// message to its position in the whole array, and sends it. secondary: from the hpZ secondary
// copies, if they are of this version. All members must call it, in the same order among all
// collectives. Neither the storage, nor another one in the same slot, may be acquired.
static inline void store_prefetch(Store *s, int storage, int64_t version, bool secondary,
                                  int64_t step) {
    StorageProgress *p = &s->flight.progress[storage];
    assert(version == p->updates);
    (void)version;
    secondary = secondary && p->secondary_valid;
    const bool coded = store_gathers_records(&s->plan, secondary);
    const StateKind from = secondary ? STATE_SECONDARY : coded ? STATE_RECORDS : STATE_PARAMETERS;
    const ZeroMessage m = store_gather_message(&s->plan, storage, secondary);
    char *whole = store_full(s, coded ? from : STATE_PARAMETERS, storage),
         *place = whole + m.bounds[m.group->me] * m.element_bytes;
    if (from == STATE_PARAMETERS && store_on_host(&s->plan, from, storage)) {
        store_bring_parameters(s, storage, place);
        if (m.group->n > 1) { ops_follow(s->memory.stream, store_param_link(s, storage)); }
    } else {
        const char *slice = store_at(s, from, storage, 0);
        const size_t bytes = slice_length(m.bounds, m.group->me) * m.element_bytes;
        if (place != slice) { ops_copy(s->memory.stream, place, slice, bytes); }
    }
    const CommLabel label = {"parameters", storage, step};
    p->gathering =
        comm_all_gather_begin(s->memory.comm, label, m.group, whole, m.bounds, m.element_bytes);
    p->arriving = secondary ? GATHER_SECONDARY : GATHER_PRIMARY;
}
// Makes gathered data ready for use: turns records into parameters, and copies this rank's part of
// them to the hpZ secondary copy.
static inline void store_unpack_arrived(Store *s, int storage) {
    char *whole = store_full(s, STATE_PARAMETERS, storage);
    if (s->plan.policy.quantized_weights) {
        ops_dequantize(s->memory.stream, whole, s->plan.dtype,
                       store_full(s, STATE_RECORDS, storage),
                       gpt_storage_elements(s->plan.model, storage), s->plan.policy.weights);
    }
    if (store_place(&s->plan, STATE_SECONDARY, storage) != PLACE_DEVICE) { return; }
    const int64_t *bounds = layout_slices(&s->plan.layout, SLICES_SECONDARY, storage),
                  me = store_process_group(&s->plan, storage)->partition.me,
                  size = dtype_size(s->plan.dtype);
    ops_copy(s->memory.stream, store_at(s, STATE_SECONDARY, storage, 0), whole + bounds[me] * size,
             (size_t)(slice_length(bounds, (int)me) * size));
    s->flight.progress[storage].secondary_valid = true;
}

// Returns borrowed parameters, when they have arrived.
static inline const Real *store_acquire_borrowed(Store *s, int storage, int slot) {
    requests_wait(s, store_requests(s, storage, (RequestKind)(REQUEST_RECV + slot)));
    return (const Real *)store_at(s, STATE_PARAMETERS, storage, slot);
}
// Returns the parameters of a storage, valid until the schedule releases them. version: the
// number of updates that they must include.
static inline const Real *store_acquire(Store *s, int storage, int64_t version) {
    StorageProgress *p = &s->flight.progress[storage];
    const bool p2p = s->plan.policy.p2p;
    assert(p2p || (version == p->updates && (!s->plan.rows[storage].rule.gathers || p->arriving)));
    comm_wait(s->memory.comm, &p->gathering);
    if (store_on_host(&s->plan, STATE_PARAMETERS, storage)) {
        ops_follow(s->memory.stream, store_param_link(s, storage));
    }
    if (p2p) { store_await_version(s, storage, version); }
    if (p->arriving == GATHER_PRIMARY) { store_unpack_arrived(s, storage); }
    p->arriving = GATHER_NONE;
    return (const Real *)(p2p ? store_at(s, STATE_PARAMETERS, storage, version)
                              : store_full(s, STATE_PARAMETERS, storage));
}
// Waits until all states are complete, before they are read other than by store_acquire. All
// members call it.
static inline void store_wait_all(Store *s) {
    for (int i = 0; i < s->plan.model->storages; i++) {
        comm_wait(s->memory.comm, &s->flight.progress[i].gathering);
    }
    for (int i = 0; i < MOVING_PIECES && s->plan.policy.offload; i++) {
        ops_wait(&s->memory.offload_buffer[i].link);
    }
    for (int i = 0; i < SHARED_SLOTS && s->plan.policy.offload; i++) {
        ops_wait(&s->memory.param_link[i]);
    }
    if (s->memory.disk) { disk_wait_all(s->memory.disk); }
    ops_wait(s->memory.stream);
}

// -------------------------------------------------------------------------------------------------
// Gradients

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
    const int slot = s->plan.rows[storage].rule.grad_slot,
              before = slot < 0 ? storage : s->flight.occupant[slot];
    bool *first = &s->flight.progress[storage].first_write;
    if (*first && before >= 0) {
        if (store_on_host(&s->plan, STATE_GRADIENT, before)) { store_free_slot(s); }
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
    const Bucket *b = &s->plan.buckets[s->plan.rows[storage].bucket];
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
    if (p->first_write) {
        ops_zero(s->memory.stream, store_gradient(s, storage, &accumulate),
                 store_full_bytes(&s->plan, STATE_GRADIENT, storage));
    }
    p->first_write = true;
    p->summed |= !on_host;
    if (s->plan.rows[storage].bucket >= 0) {
        store_reduce_coded(s, storage, add, step);
        return;
    }
    int64_t begin;
    store_own(&s->plan, storage, &begin);
    float *grad = store_full_gradient(s, storage),
          *slice = store_floats(s, STATE_GRADIENT, storage, 0);
    p->adds_to_shard = add;
    const CommLabel label = {"gradient", storage, step};
    // with the first two, the slice of the sum stays in the slot
    p->reducing = comm_reduce_scatter_begin(
        s->memory.comm, label, &store_process_group(&s->plan, storage)->all, grad,
        add || on_host ? grad + begin : slice, store_slices(&s->plan, storage), s->plan.wire);
}

#endif
