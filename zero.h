// zero.h: how the states of a storage travel between the ranks that hold it, and when they travel
// (lowering of schedules). store.h says where the states are stored.
//
// All functions take a step or a version: prefetch/acquire/release(storage, version),
// gradient/reduce(storage, step), norm(step), update(storage, step). The code above this header
// gets parameters and gradients through them only, and does not know whether these are whole,
// sharded, quantized or offloaded.
//
// ZeRO    arXiv 1910.02054. At every stage a rank owns one slice of each storage, sums the slice's
//         gradient over the ranks, and updates the slice. The stages differ in what else a rank
//         keeps, and so in messages:
//         stage  a rank keeps                            messages
//         0      everything whole                        reduce-scatter once a step, all-gather
//                                                        after the update
//         1      slices of master and moments            the same
//         2      also slices of gradients; whole         reduce-scatter in each micro-step,
//                gradients exist for a unit at a time    all-gather after the update
//         3      also slices of parameters; whole ones   two all-gathers and a reduce-scatter in
//                are gathered just before their use      each micro-step
//         A storage that several pipeline stages use travels once a step at every ZeRO stage
//         (layout.h: tied).
// ZeRO++  arXiv 2306.10209, in addition:
//   qwZ   A gather sends INT8 records (ops.h), which the owner makes once, after its update.
//   hpZ   The first gather of a step leaves 1/partition of each storage on every rank: the
//         secondary copy. Until the update, later gathers need only the ranks of one partition
//         (inside a node).
//   qgZ   A reduction is two exchanges of INT4 or INT8 records, inside nodes and then between them.
//         Sums are in fp32, and no value is quantized more than twice (section 3.3 of the paper).
//         The records of a bucket of storages travel together, in this order: for each receiver
//         [for each storage of the bucket [for each node [records of its slice]]].
// Norms   are canonical: fp64 sums of squares over chunks of NORM_CHUNK elements of each storage,
//         added exactly, so they do not depend on the layout.
#ifndef ZERO_H
#define ZERO_H

#include "state/p2p.h"       // states sent from rank to rank
#include "state/host.h"      // states on the host
#include "engine/schedule.h" // actions, for lowering

// -------------------------------------------------------------------------------------------------
// Parameters

// The collective of a gather: PREFETCH starts it, predictions count it.
typedef struct {
    CommKind kind;
    const Group *group;
    const int64_t *bounds; // of the parts that are sent
    size_t element_bytes;
} ZeroMessage;
static inline bool store_gathers_records(const Store *s, bool near) {
    return s->policy.quantized_weights && !near;
}
static inline ZeroMessage store_gather_message(const Store *s, int storage, bool near) {
    bool coded = store_gathers_records(s, near);
    const SliceKind slices = near ? SLICES_NEAR : coded ? SLICES_WEIGHTS : SLICES_WHOLE;
    const ProcessGroup *process_group = store_process_group(s, storage);
    ZeroMessage m = {COMM_ALL_GATHER, near ? &process_group->near : &process_group->all,
                     layout_slices(&s->layout, slices, storage), coded ? 1 : dtype_size(s->dtype)};
    return m;
}
// Lists the collectives of a reduction and returns how many there are. Those of a bucket are
// counted with its last storage.
static inline int store_reduce_messages(const Store *s, int storage, ZeroMessage m[2]) {
    const ProcessGroup *process_group = store_process_group(s, storage);
    ZeroMessage plain = {COMM_REDUCE_SCATTER, &process_group->all, store_slices(s, storage),
                         dtype_size(s->wire)};
    m[0] = plain;
    if (s->bucket_of[storage] < 0) { return 1; }
    const Bucket *b = &s->buckets[s->bucket_of[storage]];
    ZeroMessage inside = {COMM_ALL_TO_ALL, &process_group->node, b->to_node, 1},
                between = {COMM_ALL_TO_ALL, &process_group->across, b->to_nodes, 1};
    m[0] = inside;
    m[1] = between;
    return storage > b->last ? 0 : process_group->across.n > 1 ? 2 : 1;
}

// Returns the bytes of memory traffic that a gather or reduction causes apart from its messages:
// records are written by the ranks that quantize, and read by those that add.
static inline double store_coding_bytes(const Store *s, int storage, bool reduces, bool near) {
    double elements = (double)gpt_storage_elements(s->model, storage),
           size = (double)dtype_size(s->dtype);
    const int64_t *records =
        layout_slices(&s->layout, reduces ? SLICES_GRADIENTS : SLICES_WEIGHTS, storage);
    double coded = (double)records[store_process_group(s, storage)->all.n];
    // written, summed inside the node, written again, summed; the second part is small
    if (reduces) { return s->bucket_of[storage] < 0 ? 0 : elements * 4 + 3 * coded; }
    double kept = store_has_secondary(s, storage) && !near
                      ? elements * 2 * size / store_process_group(s, storage)->near.n
                      : 0;
    return kept + (store_gathers_records(s, near) ? coded + elements * size : 0);
}

// Copies `slice`, this member's part of the message, to its position in the whole array, and starts
// the gather. slice NULL: the part is copied from the host.
static inline void store_gather(Store *s, int storage, ZeroMessage m, char *whole,
                                const char *slice, int64_t step) {
    char *place = whole + m.bounds[m.group->me] * (int64_t)m.element_bytes;
    if (!slice) {
        store_bring_parameters(s, storage, place);
        if (m.group->n > 1) { ops_follow(s->stream, store_param_link(s, storage)); }
    } else if (place != slice) {
        ops_copy(s->stream, place, slice,
                 (size_t)slice_length(m.bounds, m.group->me) * m.element_bytes);
    }
    const CommLabel label = {"parameters", storage, step};
    s->gathering[storage] =
        comm_all_gather_begin(s->comm, label, m.group, whole, m.bounds, m.element_bytes);
}
// Starts to gather the parameters of a storage at this version. near: from the hpZ secondary
// copies, if they are of this version. All members must call it, in the same order among all
// collectives. Neither the storage, nor another one in the same slot, may be acquired.
static inline void store_prefetch(Store *s, int storage, int64_t version, bool near, int64_t step) {
    assert(version == s->updates[storage]);
    (void)version;
    near = near && s->near_valid[storage];
    bool coded = store_gathers_records(s, near);
    const StateBuffer *from = near ? &s->secondary : coded ? &s->codes : &s->params;
    const char *slice = !near && store_param_far(s, storage) ? NULL : buffer_slice(from, storage);
    store_gather(s, storage, store_gather_message(s, storage, near),
                 buffer_full(coded ? from : &s->params, storage), slice, step);
    s->arriving[storage] = near ? GATHER_NEAR : GATHER_PRIMARY;
}
// Makes gathered data ready for use: turns records into parameters, and copies this rank's part of
// them to the hpZ secondary copy.
static inline void store_unpack_arrived(Store *s, int storage) {
    char *whole = buffer_full(&s->params, storage);
    if (s->policy.quantized_weights) {
        ops_dequantize(s->stream, whole, s->dtype, buffer_full(&s->codes, storage),
                       gpt_storage_elements(s->model, storage), s->policy.weights);
    }
    if (!store_has_secondary(s, storage)) { return; }
    const int64_t *bounds = layout_slices(&s->layout, SLICES_NEAR, storage),
                  me = store_process_group(s, storage)->near.me,
                  size = (int64_t)dtype_size(s->dtype);
    ops_copy(s->stream, buffer_slice(&s->secondary, storage), whole + bounds[me] * size,
             (size_t)(slice_length(bounds, (int)me) * size));
    s->near_valid[storage] = true;
}

// Returns parameters that are stored here, in compute precision. Unpacked copies are allocated like
// a stack.
static inline const Real *store_lend(Store *s, int storage, const void *stored) {
    const int64_t elements = gpt_storage_elements(s->model, storage);
    s->held++;
    if (!store_converts(s->dtype)) { return (const Real *)stored; }
    Real *copy = (Real *)(void *)(s->unpacked + s->unpacked_used);
    s->unpacked_at[storage] = s->unpacked_used;
    s->unpacked_used += (size_t)round_up(elements * (int64_t)ops_real_bytes(), 64);
    assert(s->unpacked_used <= s->unpacked_bytes);
    ops_unpack(s->stream, copy, stored, s->dtype, elements);
    return copy;
}
// Returns borrowed parameters, when they have arrived.
static inline const Real *store_acquire_borrowed(Store *s, int storage, int slot) {
    requests_wait(s, store_requests(s, storage, (RequestKind)(REQUEST_RECV + slot)));
    return store_lend(s, storage, store_borrowed(s, storage, slot));
}
// Returns the parameters of a storage in compute precision, valid until store_release. version: the
// number of updates that they must include.
static inline const Real *store_acquire(Store *s, int storage, int64_t version) {
    assert(s->policy.p2p || (version == s->updates[storage] &&
                             (!store_gathers_for_use(s, storage) || s->arriving[storage])));
    comm_wait(s->comm, &s->gathering[storage]);
    if (store_param_far(s, storage)) { ops_follow(s->stream, store_param_link(s, storage)); }
    if (s->policy.p2p) { store_await_version(s, storage, version); }
    if (s->arriving[storage] == GATHER_PRIMARY) { store_unpack_arrived(s, storage); }
    s->arriving[storage] = GATHER_NONE;
    return store_lend(s, storage,
                      s->policy.p2p ? store_parameters(s, storage, version)
                                    : buffer_full(&s->params, storage));
}
// Ends the use of parameters. The newest unpacked copy is freed at once, others with the last one.
static inline void store_release(Store *s, int storage) {
    if (--s->held == 0) { s->unpacked_used = 0; }
    if (s->unpacked_at[storage] +
            (size_t)round_up(gpt_storage_elements(s->model, storage) * (int64_t)ops_real_bytes(),
                             64) ==
        s->unpacked_used) {
        s->unpacked_used = s->unpacked_at[storage];
    }
}

// Waits until all states are complete, before they are read other than by store_acquire. All
// members call it.
static inline void store_wait_all(Store *s) {
    for (int i = 0; i < s->model->storages; i++) { comm_wait(s->comm, &s->gathering[i]); }
    for (int i = 0; i < MOVING_PIECES && s->policy.offload; i++) {
        ops_wait(&s->offload_buffer[i].link);
    }
    for (int i = 0; i < SHARED_SLOTS && s->policy.offload; i++) { ops_wait(&s->param_link[i]); }
    if (s->disk) { disk_wait_all(s->disk); }
    ops_wait(s->stream);
}
// Must be called when this rank's slice of the parameters has changed: invalidates the hpZ
// secondary copy, and quantizes again.
static inline void store_slice_changed(Store *s, int storage) {
    s->near_valid[storage] = false;
    if (s->policy.quantized_weights) {
        ops_quantize(s->stream, buffer_slice(&s->codes, storage), buffer_slice(&s->params, storage),
                     s->dtype, store_own_elements(s, storage), s->policy.weights);
    }
}
// Must be called after masters were written from outside (initial values, a loaded file): updates
// the working parameters. All members call it.
static inline void store_masters_changed(Store *s) {
    for (int i = 0; i < s->model->storages; i++) {
        int64_t begin, n = store_own(s, i, &begin);
        if (!store_holds(s, i)) { continue; }
        if (s->dtype != DTYPE_FP32 || store_delays(s)) {
            if (store_on_host(s, STATE_MASTER, i) || store_param_far(s, i)) {
                store_round_far(s, i);
            } else {
                ops_convert_float(s->stream, store_newest(s, i), store_state(s, STATE_MASTER, i),
                                  s->dtype, n, store_rounding(s, i, begin));
            }
        }
        store_slice_changed(s, i);
        if (!s->policy.p2p && !store_gathers_for_use(s, i)) {
            store_prefetch(s, i, s->updates[i], false, s->comm->step);
        }
    }
    if (s->policy.p2p) { store_send_all(s); }
}
static inline void store_initialise(Store *s, uint64_t seed) {
    for (int i = 0; i < s->model->storages; i++) {
        int64_t begin, n = store_own(s, i, &begin);
        for (int64_t at = 0, count; at < n; at += count, keep_alive()) {
            count = min_i64(STATE_PIECE_FLOATS, n - at);
            gpt_initialise(s->model, i, seed, begin + at, begin + at + count, state_piece.floats);
            store_write_state(s, STATE_MASTER, i, at, count, state_piece.floats);
        }
    }
    store_masters_changed(s);
}

// -------------------------------------------------------------------------------------------------
// Gradients

// Waits for the reduction of a storage's gradient. Its slot is free afterwards.
static inline void store_finish_reduce(Store *s, int storage) {
    comm_wait(s->comm, &s->reducing[storage]);
    if (!s->adds_to_shard[storage]) { return; }
    int64_t begin, n = store_own(s, storage, &begin);
    ops_accumulate(s->stream, (float *)(void *)buffer_slice(&s->grads, storage),
                   (const float *)(void *)buffer_full(&s->grads, storage) + begin, n);
    s->adds_to_shard[storage] = false;
}
// Returns the buffer for contributions to a storage's gradient of this step. *accumulate: true if
// it holds contributions already, and more must be added.
static inline float *store_gradient(Store *s, int storage, bool *accumulate) {
    int slot = zero_grad_slot(&s->policy, &s->layout.owners, storage);
    int before = slot < 0 ? storage : s->occupant[slot];
    if (s->first_write[storage] && before >= 0 && store_sum_place(s, before)) {
        store_free_slot(s);
    }
    if (s->first_write[storage] && before >= 0) { store_finish_reduce(s, before); }
    if (slot >= 0) { s->occupant[slot] = storage; }
    *accumulate = !s->first_write[storage];
    s->first_write[storage] = false;
    return (float *)(void *)buffer_full(&s->grads, storage);
}

// Starts the second exchange of a bucket: quantizes the sums of this node and sends them to their
// owners on the other nodes.
static inline void exchange_send_on(Store *s, BucketExchange *p) {
    const Bucket *b = p->bucket;
    if (p->hop != 1 || b->process_group->across.n == 1) { return; }
    const Group *all = &b->process_group->all;
    const int local = group_local(all, all->me);
    const char *in = p->received;
    comm_wait(s->comm, &p->request);
    for (int storage = b->first; storage >= b->last; storage--) {
        for (int n = 0; n < all->nodes; n++) {
            int64_t before = 0,
                    elements = slice_length(store_slices(s, storage), group_at(all, n, local));
            for (int q = b->first; q > storage; q--) { before += store_record(s, q, n, local); }
            ops_requantize_sum(s->stream, p->onward + b->to_nodes[n] + before, in, b->from_node[1],
                               all->locals, elements, s->policy.gradients);
            in += store_record(s, storage, n, local);
        }
    }
    const CommLabel label = {"gradient", b->last, p->step};
    p->request = comm_all_to_all_begin(s->comm, label, &b->process_group->across, p->onward,
                                       b->to_nodes, p->arrived, b->from_nodes, 1);
    p->hop = 2;
}
// Ends a bucket's exchanges: adds what arrived last to this rank's slices.
static inline void exchange_finish(Store *s, BucketExchange *p) {
    if (!p->hop) { return; }
    const Group *all = &p->bucket->process_group->all,
                *senders = p->hop == 2 ? &p->bucket->process_group->across
                                       : &p->bucket->process_group->node;
    const int64_t stride = p->hop == 2 ? p->bucket->from_nodes[1] : p->bucket->from_node[1];
    const char *in = p->hop == 2 ? p->arrived : p->received;
    comm_wait(s->comm, &p->request);
    for (int storage = p->bucket->first; storage >= p->bucket->last; storage--) {
        float *slice = (float *)(void *)buffer_slice(&s->grads, storage);
        ops_dequantize_sum(s->stream, slice, p->add, in, stride, senders->n,
                           store_own_elements(s, storage), s->policy.gradients);
        in += store_record(s, storage, group_node(all, all->me), group_local(all, all->me));
    }
    p->hop = 0;
}
// Returns the exchange that was opened last.
static inline BucketExchange *exchange_newest(Store *s) {
    return &s->exchange[(s->exchanges + EXCHANGES - 1) % EXCHANGES];
}
// Begins the exchange of a bucket. Older exchanges advance by one message, so all members must
// begin exchanges in the same order.
static inline BucketExchange *exchange_open(Store *s, const Bucket *b, bool add, int64_t step) {
    const Group *all = &b->process_group->all;
    int index = (int)(s->exchanges++ % EXCHANGES);
    BucketExchange *p = &s->exchange[index];
    exchange_finish(s, p);
    exchange_send_on(s, &s->exchange[1 - index]);
    p->bucket = b;
    p->add = add;
    p->step = step;
    p->sent = s->exchange_base + (size_t)index * s->exchange_bytes;
    p->received = p->sent + round_up(b->to_node[all->locals], 64);
    p->onward = p->received + round_up(b->from_node[all->locals], 64);
    p->arrived = p->onward + round_up(b->to_nodes[all->nodes], 64);
    return p;
}
// Quantizes some elements of this rank's contribution to a gradient.
static inline void store_quantize(Store *s, char *out, int storage, int64_t begin,
                                  int64_t elements) {
    const float *grad = (const float *)(void *)buffer_full(&s->grads, storage) + begin;
    if (!s->errors.base) {
        ops_quantize(s->stream, out, grad, DTYPE_FP32, elements, s->policy.gradients);
        return;
    }
    uint16_t *error = (uint16_t *)(void *)buffer_full(&s->errors, storage) + begin;
    ops_quantize_feedback(s->stream, out, grad, error, ERROR_WEIGHT, elements, s->policy.gradients);
}
// Writes this rank's contribution into the message of its bucket, and sends the message when it is
// full.
static inline void store_reduce_coded(Store *s, int storage, bool add, int64_t step) {
    const Bucket *b = &s->buckets[s->bucket_of[storage]];
    const Group *all = &b->process_group->all;
    BucketExchange *p = storage == b->first ? exchange_open(s, b, add, step) : exchange_newest(s);
    for (int l = 0; l < all->locals; l++) {
        char *out = p->sent + b->to_node[l];
        for (int q = b->first; q > storage; q--) { out += store_column(s, q, l); }
        for (int n = 0; n < all->nodes; n++) {
            int64_t begin = store_slices(s, storage)[group_at(all, n, l)];
            store_quantize(s, out, storage, begin,
                           slice_length(store_slices(s, storage), group_at(all, n, l)));
            out += store_record(s, storage, n, l);
        }
    }
    if (storage > b->last) { return; }
    const CommLabel label = {"gradient", storage, step};
    p->request = comm_all_to_all_begin(s->comm, label, &b->process_group->node, p->sent, b->to_node,
                                       p->received, b->from_node, 1);
    p->hop = 1;
}

// Starts the sum of a storage's gradient over the ranks that hold it, after this rank's last
// contribution. All of them must call it, with storages in the same order.
static inline void store_reduce(Store *s, int storage, int64_t step) {
    bool accumulate, add = s->summed[storage] && !store_sum_place(s, storage);
    if (s->first_write[storage]) {
        ops_zero(s->stream, store_gradient(s, storage, &accumulate),
                 (size_t)gpt_storage_elements(s->model, storage) * sizeof(float));
    }
    s->first_write[storage] = true;
    s->summed[storage] |= !store_sum_place(s, storage);
    if (s->bucket_of[storage] >= 0) {
        store_reduce_coded(s, storage, add, step);
        return;
    }
    int64_t begin;
    store_own(s, storage, &begin);
    float *grad = (float *)(void *)buffer_full(&s->grads, storage),
          *slice = (float *)(void *)buffer_slice(&s->grads, storage);
    // true: the slice of the sum stays in the slot
    const bool there = add || store_sum_place(s, storage);
    s->adds_to_shard[storage] = add;
    const CommLabel label = {"gradient", storage, step};
    s->reducing[storage] =
        comm_reduce_scatter_begin(s->comm, label, &store_process_group(s, storage)->all, grad,
                                  there ? grad + begin : slice, store_slices(s, storage), s->wire);
}

// Adds the noise of a step to this rank's slice of a gradient whose reduction has ended. Noise is a
// function of key, step and element alone. The padding of the vocabulary is no parameter: it has
// neither gradient nor noise.
static inline void store_add_noise(Store *s, int storage, int64_t step) {
    int64_t begin, n = store_own(s, storage, &begin);
    const int64_t real = gpt_storage_real_elements(s->model, storage);
    NoiseStream noise;
    memcpy(noise.key, s->noise.key, sizeof noise.key);
    noise.domain = NOISE_GRADIENT;
    noise.part = (uint32_t)storage;
    noise.step = (uint64_t)step;
    assert(!s->noised[storage]);
    s->noised[storage] = true;
    n = max_i64(0, min_i64(n, real - begin));
    ops_add_noise(s->stream, store_sum(s, storage, step), begin, n, noise, s->noise.deviation,
                  s->noise.scale);
    noise_wipe(&noise, sizeof noise);
}
static inline void store_add_all_noise(Store *s, int64_t step) {
    for (int i = 0; s->noise.on && i < s->model->storages; i++) {
        if (store_holds(s, i)) { store_add_noise(s, i, step); }
    }
}
// After store_norm: this step makes no update.
static inline void store_skip_updates(Store *s) {
    memset(s->noised, 0, (size_t)s->model->storages * sizeof *s->noised);
}

// Returns the factor that turns a storage's gradient, the sum over the layers that share it, into
// their mean.
static inline double store_mean(const Store *s, int storage) {
    return 1 / (double)gpt_storage_shared_by(s->model, storage);
}
// Adds the squares of the elements of this rank's slices, for the storages [first, end) and a
// step's gradient, to *sum.
static inline void store_measure(Store *s, int first, int end, int64_t step, ExactSum *sum) {
    ops_zero(s->stream, s->squares, sizeof *s->squares);
    for (int i = first; i < end; i++) {
        const int64_t n = store_own_elements(s, i);
        const double mean = store_mean(s, i);
        if (!n) { continue; }
        if (store_sum_place(s, i)) {
            ops_square_sum_host(s->stream, sum, store_sum(s, i, step), n, NORM_CHUNK, mean * mean);
        } else {
            ops_square_sum(s->stream, s->squares, store_sum(s, i, step), n, NORM_CHUNK,
                           mean * mean);
        }
    }
    ops_to_host_later(s->stream, s->squares_read, s->squares, sizeof *s->squares);
    ops_wait(s->stream);
    exact_join(sum, s->squares_read);
}
// Waits for all reductions, adds noise if the run is private, and returns the norm of the whole
// gradient; each storage counts once. All ranks must call it, whatever they hold.
static inline double store_norm(Store *s, int64_t step) {
    BucketExchange *newest = exchange_newest(s), *older = &s->exchange[s->exchanges % EXCHANGES];
    ExactSum sum;
    memset(&sum, 0, sizeof sum);
    exchange_send_on(s, newest);
    exchange_finish(s, older);
    exchange_finish(s, newest);
    for (int i = s->model->storages - 1; i >= 0; i--) {
        store_finish_reduce(s, i);
        s->summed[i] = false;
    }
    store_finish_sums(s);
    store_add_all_noise(s, step);
    store_measure(s, 0, s->model->storages, step, &sum);
    comm_all_gather_small(s->comm, &sum, s->sums, sizeof sum);
    for (int r = 0; r < s->comm->ranks; r++) {
        if (r != s->comm->rank) { exact_join(&sum, &s->sums[r]); }
    }
    return sqrt(exact_value(sum));
}
// Resets the fed back errors of a storage: after each ERROR_STEPS updates, and with each
// checkpoint, since checkpoints do not hold them.
static inline void store_forget_errors(Store *s, int storage) {
    if (s->errors.base && store_holds(s, storage)) {
        ops_zero(s->stream, buffer_full(&s->errors, storage),
                 (size_t)gpt_storage_elements(s->model, storage) * sizeof(uint16_t));
    }
}

// Begins the update of a storage, before its first piece: counts it.
static inline void store_begin_update(Store *s, int storage, int64_t step) {
    // a gradient is clipped, reduced, given its noise and then used, in this order
    assert(store_holds(s, storage) && s->noised[storage] == s->noise.on);
    if (s->policy.p2p) { store_begin_version(s, storage, step + 1); }
    s->noised[storage] = false;
    if (++s->updates[storage] % ERROR_STEPS == 0) { store_forget_errors(s, storage); }
}
// Updates the elements of `p`, with `version` as the optimizer's step number. Weight decay applies
// to 2-D tensors only.
static inline void store_update_parts(Store *s, int storage, const UpdatePlaces *p, int64_t version,
                                      OptimizerStep o) {
    TensorPart parts[MOST_TENSORS];
    const float decay = o.weight_decay;
    o.step = version - s->restarted[storage];
    o.grad_scale *= (float)store_mean(s, storage);
    for (int i = 0, n = gpt_storage_parts(s->model, storage, parts); i < n; i++) {
        const int64_t begin = max_i64(p->first, parts[i].offset),
                      count =
                          min_i64(p->first + p->count, parts[i].offset + parts[i].elements) - begin;
        if (count <= 0) { continue; }
        o.weight_decay = parts[i].decays ? decay : 0.0f;
        o.rounding = store_rounding(s, storage, begin);
        store_update_elements(s, p, begin - p->first, count, o);
    }
}
// Makes one optimizer update of this rank's slice of a storage, or of one of its pieces
// (state/host.h), with the gradient of a step. All members call it.
static inline void store_update(Store *s, int storage, int64_t step, OptimizerStep o, int piece) {
    if (piece == 0) { store_begin_update(s, storage, step); }
    const UpdatePlaces p = store_update_places(s, storage, step, piece);
    store_update_parts(s, storage, &p, s->updates[storage], o);
    if (!p.cpu_update && piece + 1 >= s->pieces[storage]) { store_slice_changed(s, storage); }
}
// Updates masters and moments on the host with the pending gradient, while the device computes with
// the version before. The new version is used from the moment when it is fetched.
static inline void store_update_delayed(Store *s, int storage, int64_t step, OptimizerStep o) {
    if (!s->pending) { return; }
    // copies of fp32 masters that the previous step began may still read them
    for (int i = 0; i < MOVING_PIECES; i++) { ops_wait(&s->offload_buffer[i].link); }
    const UpdatePlaces p = store_delayed_places(s, storage, step);
    store_update_parts(s, storage, &p, s->updates[storage] + 1, o);
}
// Moves a piece of offloaded states: FETCH to the device, EVICT to the host. If the device updates,
// the piece is fetched before its update and evicted after it. If the CPU updates, the gradient is
// evicted before the update, and the new parameters are fetched after it.
static inline void store_fetch(Store *s, int storage, int piece, int64_t step) {
    if (store_delays(s) && piece == 0) { s->updates[storage] += s->pending; }
    store_move_piece(s, storage, piece, step, true);
    if (s->policy.offload->cpu_update && piece + 1 == s->pieces[storage]) {
        store_slice_changed(s, storage);
    }
}
static inline void store_evict(Store *s, int storage, int piece, int64_t step) {
    store_move_piece(s, storage, piece, step, false);
}

// -------------------------------------------------------------------------------------------------
// Lowering: adds the store's actions to a schedule

// Makes the UnitMap of a model: which storages a unit uses, and where these are, which share slots.
// clips: samples are clipped. program_free frees its tables.
static inline UnitMap unit_map(const GptModel *m, const ZeroPolicy *policy,
                               const Placement *placement, bool clips) {
    UnitMap map;
    const size_t storages = (size_t)m->storages;
    memset(&map, 0, sizeof map);
    map.units = m->units;
    map.storages = m->storages;
    map.of_unit = (int(*)[2])checked_calloc((size_t)m->units, sizeof *map.of_unit, "unit map");
    map.of_unit_count = (int *)checked_calloc((size_t)m->units, sizeof(int), "unit map");
    map.made = (unsigned char(*)[2])checked_calloc((size_t)m->units, sizeof *map.made, "unit map");
    map.param_slot = (int *)checked_calloc(storages, sizeof(int), "unit map");
    map.grad_slot = (int *)checked_calloc(storages, sizeof(int), "unit map");
    map.gathers = (bool *)checked_calloc(storages, sizeof(bool), "unit map");
    map.reduces_often = (bool *)checked_calloc(storages, sizeof(bool), "unit map");
    map.tied = (bool *)checked_calloc(storages, sizeof(bool), "unit map");
    map.pieces = (int *)checked_calloc(storages, sizeof(int), "unit map");
    map.on_disk = (bool *)checked_calloc(storages, sizeof(bool), "unit map");
    map.sums = (SumPlace *)checked_calloc(storages, sizeof(SumPlace), "unit map");
    map.cpu_update = policy->offload && policy->offload->cpu_update;
    map.delays = policy->offload && policy->offload->delays;
    if (policy->offload) {
        map.stash = (bool *)checked_calloc((size_t)m->units, sizeof(bool), "unit map");
    }
    for (int u = 1; u < m->units - 1 && map.stash; u++) {
        int used[2];
        gpt_unit_storages(m, u, used);
        map.stash[u] = offload_has(policy->offload, used[0], STATE_ACTIVATIONS);
    }
    for (int u = 0; u < m->units; u++) {
        map.of_unit_count[u] = gpt_unit_storages(m, u, map.of_unit[u]);
    }
    Owners owners = owners_make(m, placement);
    // the head's part of the gradient of wte
    map.made[m->units - 1][1] = !clips           ? MADE_BY_INPUT_PART
                                : owners.tied[0] ? MADE_BY_TIED
                                                 : MADE_ELSEWHERE;
    for (int s = 0; s < m->storages; s++) {
        map.reduces_often[s] = policy->p2p != NULL;
        map.param_slot[s] = zero_param_slot(m, policy, &owners, s);
        map.grad_slot[s] = zero_grad_slot(policy, &owners, s);
        map.sums[s] = zero_sum_place(policy->offload, &owners, s);
        map.pieces[s] = offload_pieces(m, policy, &owners, s);
        map.on_disk[s] = offload_stored(policy->offload, s) > 0;
        map.gathers[s] = zero_gathers(policy, &owners, s);
        map.reduces_often[s] |= zero_reduces_often(policy, &owners, s);
        map.tied[s] = owners.tied[s];
    }
    if (clips && placement->stages > 1) {
        map.stage = (int *)checked_calloc((size_t)m->units, sizeof(int), "unit map");
    }
    for (int u = 0; map.stage && u < m->units; u++) {
        map.stage[u] = placement_stage_of_unit(placement, u);
    }
    map.lent = policy->keeps_gathered && !owners.tied[0] ? 0 : -1;
    owners_free(&owners);
    return map;
}
// With recomputation a block's input is offloaded instead of the activations inside. A stage's
// first block has received its input in a message, which stays.
static inline void unit_map_recomputes(UnitMap *map, const Placement *placement) {
    map->stash_inputs = map->stash != NULL;
    for (int s = 0; map->stash && s < placement->stages; s++) {
        map->stash[placement->stage[s].first_unit] = false;
    }
}

// Does the next action in this direction read the storage? Messages between are skipped: the ranks
// of a stage have different ones, and must gather alike. So are weight parts, because neighbours
// may share a storage.
static inline bool lower_neighbour_reads(const UnitMap *map, const Schedule *s, int i,
                                         int direction, int storage) {
    do {
        i += direction;
    } while (i >= 0 && i < s->count &&
             (action_is_message(s->actions[i].kind) || s->actions[i].kind == ACT_BACKWARD_WEIGHT));
    if (i < 0 || i >= s->count || !action_reads_parameters(s->actions[i].kind)) { return false; }
    const int *of = map->of_unit[s->actions[i].unit];
    return of[0] == storage || (map->of_unit_count[s->actions[i].unit] > 1 && of[1] == storage);
}
// Adds ACQUIRE before and RELEASE after each action that reads parameters. Neighbours that read the
// same storage need neither between them.
static inline void lower_uses(const UnitMap *map, Schedule *in) {
    Schedule out = {NULL, 0, 0};
    for (int i = 0; i < in->count; i++) {
        Action a = in->actions[i];
        bool reads = action_reads_parameters(a.kind);
        for (int k = 0; reads && k < map->of_unit_count[a.unit]; k++) {
            const bool held = lower_neighbour_reads(map, in, i, -1, map->of_unit[a.unit][k]);
            if (!held) {
                schedule_add(&out, action_make(ACT_ACQUIRE, -1, map->of_unit[a.unit][k], -1));
            }
        }
        schedule_add(&out, a);
        for (int k = 0; reads && k < map->of_unit_count[a.unit]; k++) {
            const bool lent = a.kind == ACT_BACKWARD_INPUT && map->of_unit[a.unit][k] == map->lent;
            if (!lent && !lower_neighbour_reads(map, in, i, 1, map->of_unit[a.unit][k])) {
                schedule_add(&out, action_make(ACT_RELEASE, -1, map->of_unit[a.unit][k], -1));
            }
        }
        if (a.kind == ACT_BACKWARD_WEIGHT && a.unit == 0 && map->lent >= 0) {
            schedule_add(&out, action_make(ACT_RELEASE, -1, map->lent, -1));
        }
    }
    schedule_free(in);
    *in = out;
}

// Adds PREFETCHes, in the order of the uses: each as early as its storage, and the others in its
// slot, are released, but at most 2 SHARED_SLOTS storages ahead. A gather uses the hpZ secondary
// copies (near) if an earlier gather of the step has made them. A pass that does not train uses
// them if they exist. Parameters that stay whole are not gathered for their uses.
static inline void lower_gathers(const UnitMap *map, const ZeroPolicy *policy, Schedule *in,
                                 bool training) {
    Schedule out = {NULL, 0, 0};
    // [storages] gathered, and not yet released
    bool *busy = (bool *)checked_calloc((size_t)map->storages, sizeof(bool), "lowering");
    bool *seen = (bool *)checked_calloc((size_t)map->storages, sizeof(bool), "lowering"),
         taken[SHARED_SLOTS] = {false};
    int ahead = 0; // gathers whose ACQUIRE is still to come
    for (int i = 0, next = 0; i < in->count; i++) {
        for (; next < in->count && ahead < 2 * SHARED_SLOTS; next++) {
            Action a = in->actions[next];
            if (a.kind != ACT_ACQUIRE || !map->gathers[a.storage]) { continue; }
            int slot = map->param_slot[a.storage];
            if (busy[a.storage] || (slot >= 0 && taken[slot])) { break; }
            a.kind = ACT_PREFETCH;
            a.near = policy->partition > 1 && (seen[a.storage] || !training);
            busy[a.storage] = seen[a.storage] = true;
            ahead++;
            if (slot >= 0) { taken[slot] = true; }
            schedule_add(&out, a);
        }
        Action a = in->actions[i];
        schedule_add(&out, a);
        ahead -= a.kind == ACT_ACQUIRE && map->gathers[a.storage];
        if (a.kind != ACT_RELEASE) { continue; }
        busy[a.storage] = false;
        if (map->param_slot[a.storage] >= 0) { taken[map->param_slot[a.storage]] = false; }
    }
    free(busy);
    free(seen);
    schedule_free(in);
    *in = out;
}

// Adds REDUCE right after a storage's last contribution, of the step or of each micro-batch. The
// order is the same on all ranks of a stage; in sequential schedules lnf, blocks from the last to
// the first, then wpe and wte. Storages that several stages use are reduced last in the step, after
// the rank's last message too. So every rank reduces what it shares with few ranks before what it
// shares with more: no cycle of ranks waits for each other. And neither a reduction nor a message
// waits behind a sum for which other stages must first finish their step.
static inline void lower_reductions(const UnitMap *map, Schedule *in, int micro_batches) {
    Schedule out = {NULL, 0, 0};
    // [micro-batches][storages]
    int *last = (int *)checked_malloc((size_t)map->storages * (size_t)micro_batches * sizeof(int),
                                      "lowering");
    for (int i = 0; i < micro_batches * map->storages; i++) { last[i] = -1; }
    for (int i = 0; i < in->count; i++) {
        const Action *a = &in->actions[i];
        for (int k = 0; action_computes(a->kind) && k < map->of_unit_count[a->unit]; k++) {
            int storage = map->of_unit[a->unit][k],
                span = map->reduces_often[storage] ? a->micro : 0;
            if (action_contributes(map, a, storage)) { last[span * map->storages + storage] = i; }
        }
    }
    for (int i = 0; i < in->count; i++) {
        Action a = in->actions[i];
        schedule_add(&out, a);
        // a unit's storages, from the last to the first
        for (int k = 1; action_computes(a.kind) && k >= 0; k--) {
            int storage = k < map->of_unit_count[a.unit] ? map->of_unit[a.unit][k] : -1;
            bool often = storage >= 0 && map->reduces_often[storage];
            bool due = storage >= 0 && !map->tied[storage] &&
                       last[(often ? a.micro : 0) * map->storages + storage] == i;
            if (due) {
                schedule_add(&out, action_make(ACT_REDUCE, -1, storage, often ? a.micro : -1));
            }
        }
    }
    for (int storage = map->storages - 1; storage >= 0; storage--) {
        if (map->tied[storage] && last[storage] >= 0) {
            schedule_add(&out, action_make(ACT_REDUCE, -1, storage, -1));
        }
    }
    free(last);
    schedule_free(in);
    *in = out;
}

// Returns the storage to whose gradient an action contributes, if it is this one or another in its
// slot; else -1.
static inline int lower_slot_user(const UnitMap *map, const Action *a, int storage) {
    for (int k = 0; action_computes(a->kind) && k < map->of_unit_count[a->unit]; k++) {
        const int other = map->of_unit[a->unit][k];
        const bool shares = other == storage || (map->grad_slot[storage] >= 0 &&
                                                 map->grad_slot[other] == map->grad_slot[storage]);
        if (shares && action_contributes(map, a, other)) { return other; }
    }
    return -1;
}
// Returns the next storage to use this one's gradient slot, from action i on; -1: none.
static inline int lower_next_in_slot(const UnitMap *map, const Schedule *s, int i, int storage) {
    int next = -1;
    for (; i < s->count && next < 0; i++) { next = lower_slot_user(map, &s->actions[i], storage); }
    return next;
}
// Adds EVICT_SUM after the REDUCE of gradients on the host. If one rank has the storage, at once,
// followed by FETCH_SUM of the next storage in the slot, if its sum was evicted before. Otherwise
// after the next unit, during whose work the sum travels between ranks, or when its slot is needed.
// Sums of several stages are evicted last: they wait for other stages, which may wait for messages
// of this rank.
static inline void lower_sums(const UnitMap *map, Schedule *in) {
    Schedule out = {NULL, 0, 0};
    bool *left = (bool *)checked_calloc((size_t)map->storages, sizeof(bool), "lowering");
    int waits = -1;
    for (int i = 0; i < in->count; i++) {
        const Action a = in->actions[i];
        const bool far = a.kind == ACT_REDUCE && map->sums[a.storage];
        if (waits >= 0 && (a.kind == ACT_REDUCE || lower_slot_user(map, &a, waits) >= 0)) {
            schedule_add(&out, action_make(ACT_EVICT_SUM, -1, waits, -1));
            waits = -1;
        }
        schedule_add(&out, a);
        if (far && map->sums[a.storage] == SUM_IS_ADDED && !map->tied[a.storage]) {
            waits = a.storage;
        }
        if (!far || map->sums[a.storage] != SUM_COMES_BACK) { continue; }
        left[a.storage] = true;
        schedule_add(&out, action_make(ACT_EVICT_SUM, -1, a.storage, -1));
        const int next = lower_next_in_slot(map, in, i, a.storage);
        if (next >= 0 && left[next]) {
            schedule_add(&out, action_make(ACT_FETCH_SUM, -1, next, -1));
        }
    }
    if (waits >= 0) { schedule_add(&out, action_make(ACT_EVICT_SUM, -1, waits, -1)); }
    for (int i = 0; i < in->count; i++) {
        const Action a = in->actions[i];
        if (a.kind == ACT_REDUCE && map->sums[a.storage] && map->tied[a.storage]) {
            schedule_add(&out, action_make(ACT_EVICT_SUM, -1, a.storage, -1));
        }
    }
    free(left);
    schedule_free(in);
    *in = out;
}

// Adds the action that brings the next piece, in the order of updates, to where it is updated:
// FETCH of the states, or, if the CPU updates, EVICT of the gradient. *at: storage and piece, which
// it advances.
static inline void lower_next_piece(const UnitMap *map, const bool *used, Schedule *s, int at[2]) {
    while (at[0] < map->storages && (!used[at[0]] || at[1] >= map->pieces[at[0]])) {
        at[0]++;
        at[1] = 0;
    }
    if (at[0] == map->storages) { return; }
    Action a = action_make(map->cpu_update ? ACT_EVICT : ACT_FETCH, -1, at[0], -1);
    a.use = at[1]++;
    schedule_add(s, a);
}
// Adds READ of the next piece on disk. *at as above.
static inline void lower_next_read(const UnitMap *map, const bool *used, Schedule *s, int at[2]) {
    while (at[0] < map->storages &&
           (!used[at[0]] || !map->on_disk[at[0]] || at[1] >= map->pieces[at[0]])) {
        at[0]++;
        at[1] = 0;
    }
    if (at[0] == map->storages) { return; }
    Action a = action_make(ACT_READ, -1, at[0], -1);
    a.use = at[1]++;
    schedule_add(s, a);
}
// Adds UPDATE of a storage, piece by piece if states are on the host. Each piece returns after its
// update, which frees a buffer for the next piece but one. A piece on disk is also written there,
// which frees its buffer on the host.
static inline void lower_update(const UnitMap *map, const bool *used, Schedule *s, int storage,
                                int at[2], int read[2]) {
    Action write = action_make(ACT_WRITE, -1, storage, -1),
           update = action_make(ACT_UPDATE, -1, storage, -1),
           back = action_make(map->cpu_update ? ACT_FETCH : ACT_EVICT, -1, storage, -1);
    if (!map->pieces[storage]) { schedule_add(s, update); }
    for (int piece = 0; piece < map->pieces[storage]; piece++) {
        update.use = back.use = write.use = piece;
        schedule_add(s, update);
        schedule_add(s, back);
        if (map->on_disk[storage]) {
            schedule_add(s, write);
            lower_next_read(map, used, s, read);
        }
        lower_next_piece(map, used, s, at);
    }
}
// Adds the FETCHes of the parameters of a storage, whose delayed update was made during the step.
static inline void lower_fetches(const UnitMap *map, Schedule *s, int storage) {
    Action fetch = action_make(ACT_FETCH, -1, storage, -1);
    for (; fetch.use < map->pieces[storage]; fetch.use++) { schedule_add(s, fetch); }
}
// Adds delayed UPDATEs, one after each forward action of the step's first micro-batches, in the
// order in which the gradients that they need are overwritten.
static inline void lower_delayed_updates(const UnitMap *map, Schedule *in) {
    Schedule out = {NULL, 0, 0};
    bool *left = (bool *)checked_calloc((size_t)map->storages, sizeof(bool), "lowering");
    for (int i = 0; i < in->count; i++) {
        left[max_i64(0, in->actions[i].storage)] |= in->actions[i].kind == ACT_EVICT_SUM;
    }
    for (int i = 0; i < in->count; i++) {
        const Action a = in->actions[i];
        int next = map->storages - 1;
        while (next >= 0 && !left[next]) { next--; }
        if (a.kind == ACT_EVICT_SUM && left[a.storage]) {
            schedule_add(&out, action_make(ACT_UPDATE, -1, a.storage, -1));
            left[a.storage] = false;
        }
        schedule_add(&out, a);
        if (a.kind == ACT_FORWARD && next >= 0) {
            schedule_add(&out, action_make(ACT_UPDATE, -1, next, -1));
            left[next] = false;
        }
    }
    free(left);
    schedule_free(in);
    *in = out;
}
// Adds READs of the first pieces on disk at the beginning, so that they run during the step.
static inline void lower_first_reads(const UnitMap *map, const bool *used, Schedule *in,
                                     int read[2]) {
    Schedule out = {NULL, 0, 0};
    for (int i = 0; i < DISK_PIECES; i++) { lower_next_read(map, used, &out, read); }
    for (int i = 0; i < in->count; i++) { schedule_add(&out, in->actions[i]); }
    schedule_free(in);
    *in = out;
}
// Adds NORM, then UPDATEs in the order in which the next forward pass needs the parameters;
// parameters that stay whole are gathered at once. States that the device updates are fetched
// before NORM, unless gradients are on the host, whose sums are complete only then.
static inline void lower_updates(const UnitMap *map, Schedule *s) {
    bool *used = (bool *)checked_calloc((size_t)map->storages, sizeof(bool), "lowering");
    bool waits = map->cpu_update;
    for (int i = 0; i < s->count; i++) {
        if (s->actions[i].kind == ACT_REDUCE) { used[s->actions[i].storage] = true; }
        waits |= s->actions[i].kind == ACT_EVICT_SUM;
    }
    int at[2] = {map->delays ? map->storages : 0, 0}, read[2] = {0, 0};
    lower_first_reads(map, used, s, read);
    for (int i = 0; i < MOVING_PIECES && !waits; i++) { lower_next_piece(map, used, s, at); }
    schedule_add(s, action_make(ACT_NORM, -1, -1, -1));
    for (int i = 0; i < MOVING_PIECES && waits; i++) { lower_next_piece(map, used, s, at); }
    for (int storage = 0; storage < map->storages; storage++) {
        Action gather = action_make(ACT_PREFETCH, -1, storage, -1);
        gather.version = 1;
        if (used[storage] && map->delays) { lower_fetches(map, s, storage); }
        if (used[storage] && !map->delays) { lower_update(map, used, s, storage, at, read); }
        if (used[storage] && !map->gathers[storage]) { schedule_add(s, gather); }
    }
    free(used);
}

// Adds all of these actions to every rank's schedule. A rank reduces and gathers what its own
// compute actions use.
static inline void zero_lower(Program *p, const ZeroPolicy *policy, bool training) {
    for (int r = 0; r < p->ranks; r++) {
        lower_uses(&p->map, &p->rank[r]);
        lower_gathers(&p->map, policy, &p->rank[r], training);
        if (!training) { continue; }
        lower_reductions(&p->map, &p->rank[r], p->micro_batches);
        lower_sums(&p->map, &p->rank[r]);
        if (p->map.delays) { lower_delayed_updates(&p->map, &p->rank[r]); }
        lower_updates(&p->map, &p->rank[r]);
    }
}

#endif
