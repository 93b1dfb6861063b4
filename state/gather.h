// gather.h: how the parameters of a storage get from the ranks that own it to their uses, by
// collectives. p2p.h has the messages between two ranks.
//
// Gathers  Each owner sends its slice to all others. With hpZ, the gathers after a step's first one
//          need only the ranks of a partition. With qwZ, records travel (quantize.h). All owners
//          must call each function, with storages in the same order.
// Host     Parameters on the host are copied to the device for each use: this rank's slice, to its
//          position in one of the slots that blocks share, by copies of that slot (param_link).
//          Other ranks' slices arrive by the gather of stage 3.
#ifndef GATHER_H
#define GATHER_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "model/gpt.h"
#include "ops/cpu/update_cpu.h"
#include "ops/ops.h"
#include "state/disk.h"
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
    const ProcessGroup *process_group = s->rows[storage].owners;
    ZeroMessage m = {COMM_ALL_GATHER, secondary ? &process_group->partition : &process_group->all,
                     s->rows[storage].slices[slices], coded ? 1 : dtype_size(s->dtype)};
    return m;
}
// Returns the exchange of a storage's directions: home, or (back) to their slices.
static inline ZeroMessage store_matrix_message(const StatePlan *s, int storage, bool back) {
    const MatrixExchange *e = &s->rows[storage].exchange;
    const ZeroMessage m = {COMM_ALL_TO_ALL, &s->rows[storage].owners->all, back ? e->from : e->to,
                           sizeof(float)};
    return m;
}
// Lists the collectives of a reduction and returns how many there are. Those of a bucket are
// counted with its last storage.
static inline int store_reduce_messages(const StatePlan *s, int storage, ZeroMessage m[2]) {
    const ProcessGroup *process_group = s->rows[storage].owners;
    ZeroMessage plain = {COMM_REDUCE_SCATTER, &process_group->all, store_slices(s, storage),
                         dtype_size(s->wire)};
    m[0] = plain;
    const Bucket *b = s->rows[storage].exchange_bucket;
    if (!b) { return 1; }
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
    const int64_t *records = s->rows[storage].slices[reduces ? SLICES_GRADIENTS : SLICES_WEIGHTS];
    double coded = records[s->rows[storage].owners->all.n];
    // written, summed inside the node, written again, summed; the second part is small
    if (reduces) { return s->rows[storage].exchange_bucket ? elements * 4 + 3 * coded : 0; }
    double kept = store_place(s, STATE_SECONDARY, storage) == PLACE_DEVICE && !secondary
                      ? elements * 2 * size / s->rows[storage].owners->partition.n
                      : 0;
    return kept + (store_gathers_records(s, secondary) ? coded + elements * size : 0);
}

// Must be called when this rank's slice of the parameters has changed: invalidates the hpZ
// secondary copy, and quantizes again.
static inline void store_slice_changed(Store *s, int storage) {
    s->flight.progress[storage].secondary_valid = false;
    if (s->plan.policy.quantized_weights) {
        ops_quantize(s->memory.stream, store_at(s, STATE_RECORDS, storage, 0),
                     store_at(s, STATE_PARAMETERS, storage, 0), s->plan.dtype,
                     store_own_elements(&s->plan, storage), s->plan.policy.weights);
    }
}
// Returns the link that copies parameters on the host to their slot on the device.
static inline Stream *store_param_link(Store *s, int storage) {
    const int slot = s->plan.rows[storage].param_slot;
    assert(slot >= 0); // these blocks share slots
    return &s->memory.param_link[slot];
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
         *place = whole + m.bounds[m.group->me] * m.element_bytes,
         *slice = store_at(s, from, storage, 0);
    const size_t bytes = slice_length(m.bounds, m.group->me) * m.element_bytes;
    if (from == STATE_PARAMETERS && store_on_host(&s->plan, from, storage)) {
        // the copy follows what was last written to the slot, and what updates the slice
        Stream *link = store_param_link(s, storage);
        ops_follow(link, s->memory.stream);
        for (int i = 0; i < MOVING_PIECES; i++) {
            ops_follow(link, &s->memory.offload_buffer[i].link);
        }
        store_move(s, link, slice, place, (int64_t)bytes, true);
        if (m.group->n > 1) { ops_follow(s->memory.stream, link); }
    } else if (place != slice) {
        ops_copy(s->memory.stream, place, slice, bytes);
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
    const int64_t *bounds = s->plan.rows[storage].slices[SLICES_SECONDARY],
                  me = s->plan.rows[storage].owners->partition.me, size = dtype_size(s->plan.dtype);
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
    const StorageRow *row = &s->plan.rows[storage];
    const bool by_messages = row->places > 0;
    assert(by_messages || (version == p->updates && (!row->gathers || p->arriving)));
    comm_wait(s->memory.comm, &p->gathering);
    if (store_on_host(&s->plan, STATE_PARAMETERS, storage)) {
        ops_follow(s->memory.stream, store_param_link(s, storage));
    }
    if (by_messages) { store_await_version(s, storage, version); }
    if (p->arriving == GATHER_PRIMARY) { store_unpack_arrived(s, storage); }
    p->arriving = GATHER_NONE;
    return (const Real *)(by_messages ? store_at(s, STATE_PARAMETERS, storage, version)
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
    for (int i = 0; i < ALL_SLOTS && s->plan.policy.offload; i++) {
        ops_wait(&s->memory.param_link[i]);
    }
    if (s->memory.disk) { disk_wait_all(s->memory.disk); }
    ops_wait(s->memory.stream);
}

// -------------------------------------------------------------------------------------------------
// Parameters from outside

// Updates the working parameters after masters were written from outside, if either is on the host.
// Uses state_piece for what is not in host memory.
static inline void store_round_on_host(Store *s, int storage) {
    const bool masters = store_on_host(&s->plan, STATE_MASTER, storage),
               parameters = store_on_host(&s->plan, STATE_PARAMETERS, storage);
    const int64_t most = STATE_PIECE_FLOATS / 2;
    int64_t begin, own = store_own(&s->plan, storage, &begin);
    if (s->plan.dtype == DTYPE_FP32) { // delayed updates: both exist
        ops_from_host(s->memory.stream, store_newest(s, storage),
                      store_at(s, STATE_MASTER, storage, 0),
                      (size_t)store_bytes(&s->plan, STATE_MASTER, own));
        ops_wait(s->memory.stream); // the next operation may update these masters
        return;
    }
    for (int64_t at = 0, n; at < own; at += n) {
        n = min_i64(most, own - at);
        uint16_t *out = (uint16_t *)store_newest(s, storage) + at,
                 *halves = parameters ? out : (uint16_t *)(void *)(state_piece.floats + most);
        if (!masters) { store_read_state(s, STATE_MASTER, storage, at, n, state_piece.floats); }
        round_part(halves,
                   masters ? store_floats(s, STATE_MASTER, storage, 0) + at : state_piece.floats, 0,
                   n, store_rounding(s, storage, begin + at));
        if (!parameters) { ops_from_host(s->memory.stream, out, halves, n * sizeof(uint16_t)); }
    }
}

// Must be called after masters were written from outside (initial values, a loaded file): updates
// the working parameters. All members call it.
static inline void store_masters_changed(Store *s) {
    for (int i = 0; i < s->plan.model->storages; i++) {
        int64_t begin, n = store_own(&s->plan, i, &begin);
        if (!store_holds(&s->plan, i)) { continue; }
        if (s->plan.dtype != DTYPE_FP32 || store_delays(&s->plan)) {
            if (store_place(&s->plan, STATE_MASTER, i) == PLACE_DEVICE &&
                store_place(&s->plan, STATE_PARAMETERS, i) == PLACE_DEVICE) {
                ops_convert_float(s->memory.stream, store_newest(s, i),
                                  store_floats(s, STATE_MASTER, i, 0), s->plan.dtype, n,
                                  store_rounding(s, i, begin));
            } else {
                store_round_on_host(s, i);
            }
        }
        store_slice_changed(s, i);
        if (!s->plan.rows[i].places && !s->plan.rows[i].gathers) {
            store_prefetch(s, i, s->flight.progress[i].updates, false, s->memory.comm->step);
        }
    }
    store_send_all(s);
}
static inline void store_initialise(Store *s, uint64_t seed) {
    for (int i = 0; i < s->plan.model->storages; i++) {
        int64_t begin, n = store_own(&s->plan, i, &begin);
        for (int64_t at = 0, count; at < n; at += count, keep_alive()) {
            count = min_i64(STATE_PIECE_FLOATS, n - at);
            gpt_initialise(s->plan.model, i, seed, begin + at, begin + at + count,
                           state_piece.floats);
            store_write_state(s, STATE_MASTER, i, at, count, state_piece.floats);
        }
    }
    store_masters_changed(s);
}

#endif
