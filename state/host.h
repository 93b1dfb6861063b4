// host.h: offloaded states of the store (policy.h: Offload; offload.h says which): how they reach
// their update, and parameters their uses.
//
// Pieces      A slice moves in pieces of at most offload_piece() elements, so the buffers on the
//             way are small for any model.
// Buffers     Two (OffloadBuffer). The pieces of all storages use them in turns, a piece always the
//             same one. The copies of a buffer run in order (its link). So a piece has arrived
//             before its update, has left before the next one arrives, and one buffer is filled
//             while the other is emptied.
// Updates     By the device: states are copied to it, updated by the usual operation, and copied
//             back: 8 bytes for each state of 4, with identical results. By the CPU: the gradient
//             is copied to the host (with fp32 parameters, which are their own masters), and new
//             parameters are copied back.
// Sums        of gradients on the host (SumPlace). A sum leaves its slot when it is complete over
//             the ranks of the storage. If one rank holds the storage, the sum returns to the slot
//             before the next micro-batch, which adds to it as it computes. Otherwise the CPU adds
//             to the sum on the host, piece by piece, and as late as when the piece after next
//             arrives. So sums have the same bits as on the device, and at the update they are
//             where the CPU needs them.
// Parameters  on the host are copied to the device for each use: this rank's slice, to its position
//             in one of the slots that blocks share, by copies of that slot (param_link); other
//             ranks' slices arrive by the gather of stage 3. After an update by the CPU new
//             parameters are already where they belong; otherwise they return with the states.
#ifndef STORE_HOST_H
#define STORE_HOST_H

#include "base/base.h"
#include "comm/comm.h"
#include "ops/cpu/update_cpu.h"
#include "ops/ops.h"
#include "state/disk.h"
#include "state/layout.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"
#include "state/table.h"

// Does a piece come for the second part of its update (store_in_parts)? Then its number is so much
// larger than the first time.
static inline bool piece_is_second_pass(const StatePlan *s, int storage, int piece) {
    return s->rows[storage].pieces && piece >= s->rows[storage].pieces;
}
static inline OffloadBuffer *store_piece_buffer(Store *s, int storage, int piece) {
    const bool second = piece_is_second_pass(&s->plan, storage, piece);
    const int number = s->plan.rows[storage].first_piece[second] +
                       (second ? piece - s->plan.rows[storage].pieces : piece);
    return &s->memory.offload_buffer[number % MOVING_PIECES];
}
// Returns the elements of a piece of this rank's slice, and where in the slice they begin. The last
// pieces of a shorter slice may be empty.
static inline int64_t store_piece(const StatePlan *s, int storage, int piece, int64_t *begin) {
    const int64_t own = store_own_elements(s, storage),
                  most = s->rows[storage].pieces ? offload_piece(s->model) : own;
    if (piece_is_second_pass(s, storage, piece)) { piece -= s->rows[storage].pieces; }
    *begin = min_i64(own, piece * most);
    return min_i64(most, own - *begin);
}
static inline DiskBuffer *store_disk_buffer(Store *s, int storage, int piece) {
    return &s->memory.disk->buffer[(s->plan.rows[storage].first_stored + piece) % DISK_PIECES];
}
// Returns where a state of a piece is, apart from its OffloadBuffer: on the device, on the host, or
// in the buffer that it was read into from the disk; NULL: nowhere. step: of a gradient.
static inline char *store_piece_at(Store *s, StateKind kind, int storage, int piece, int64_t step) {
    const State *x = store_record(&s->plan, kind, storage);
    int64_t begin, n = store_piece(&s->plan, storage, piece, &begin);
    if (x->place == PLACE_DISK) {
        const int64_t first = store_place_on_disk(&s->plan, STATE_MASTER, storage, piece, n),
                      place = store_place_on_disk(&s->plan, kind, storage, piece, n);
        return store_disk_buffer(s, storage, piece)->at + (place - first);
    }
    char *state =
        x->place == PLACE_NONE
            ? NULL
            : store_at(s, kind, storage, kind == STATE_GRADIENT ? step : store_now(s, storage));
    return state ? state + begin * (int64_t)s->plan.device[x->copy_of].size : NULL;
}
// Starts to read what is on disk of a piece into its buffer, or to write it. The transfer is
// complete after store_await_stored.
static inline void store_move_stored(Store *s, int storage, int piece, bool writes) {
    int64_t begin, n = store_piece(&s->plan, storage, piece, &begin);
    if (!n) { return; }
    const int64_t bytes = store_stored_bytes(s->plan.policy.offload, storage, n);
    disk_start(store_disk_buffer(s, storage, piece),
               store_place_on_disk(&s->plan, STATE_MASTER, storage, piece, n), bytes, writes);
    *(writes ? &s->flight.disk_written : &s->flight.disk_read) += bytes;
}
static inline void store_read_piece(Store *s, int storage, int piece) {
    store_move_stored(s, storage, piece, false);
}
static inline void store_write_piece(Store *s, int storage, int piece) {
    // first the states that the device has updated must arrive on the host
    if (!s->plan.policy.offload->cpu_update) {
        ops_wait(&store_piece_buffer(s, storage, piece)->link);
    }
    store_move_stored(s, storage, piece, true);
}
static inline void store_await_stored(Store *s, int storage, int piece) {
    if (offload_kinds_on_disk(s->plan.policy.offload, storage)) {
        disk_wait(store_disk_buffer(s, storage, piece));
    }
}

// Starts a copy between host and device memory. in: to the device.
static inline void store_move(Store *s, Stream *link, void *host, void *device, int64_t bytes,
                              bool in) {
    if (in) {
        ops_from_host(link, device, host, bytes);
        s->flight.copied.to_device += bytes;
    } else {
        ops_to_host_later(link, host, device, (size_t)bytes);
        s->flight.copied.to_host += bytes;
    }
}
// Delayed updates: returns the parameters of a piece as the masters are now. They are rounded into
// the buffer unless they are masters themselves.
static inline char *store_round_delayed(Store *s, int storage, int piece, OffloadBuffer *buffer) {
    char *master = store_piece_at(s, STATE_MASTER, storage, piece, 0);
    int64_t first, begin, n = store_piece(&s->plan, storage, piece, &begin);
    if (s->plan.dtype == DTYPE_FP32) { return master; }
    store_own(&s->plan, storage, &first);
    ops_wait(&buffer->link);
    ops_round_host(s->memory.stream, (uint16_t *)buffer->at, (const float *)(const void *)master, n,
                   store_rounding(s, storage, first + begin));
    return buffer->at;
}
// Moves a piece to the device (in) or to the host: what PiecePart says. Copies out follow the
// device's work so far; later device work sees what the CPU has made.
static inline void store_move_piece(Store *s, int storage, int piece, int64_t step, bool in) {
    OffloadBuffer *buffer = store_piece_buffer(s, storage, piece);
    const bool cpu = s->plan.policy.offload->cpu_update, delays = store_delays(&s->plan);
    PiecePart parts[PIECE_PARTS];
    const bool second = piece_is_second_pass(&s->plan, storage, piece);
    const int count = store_piece_parts(&s->plan, s->plan.policy.offload, storage, second, parts);
    int64_t begin, n = store_piece(&s->plan, storage, piece, &begin);
    if (!n) { return; }
    if (!in || delays) { ops_follow(&buffer->link, s->memory.stream); }
    if (in && !cpu) { store_await_stored(s, storage, piece); }
    char *at = delays ? store_round_delayed(s, storage, piece, buffer) : buffer->at;
    for (int k = 0; k < count; k++) {
        const int64_t bytes = n * parts[k].size;
        if (in ? parts[k].in : parts[k].out) {
            char *there = store_piece_at(s, parts[k].kind, storage, piece, step);
            store_move(s, &buffer->link, cpu ? at : there, cpu ? there : at, bytes, in);
        }
        at += bytes;
    }
    if (in && cpu) { ops_follow(s->memory.stream, &buffer->link); }
}

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
static inline void store_add_on_host(Store *s, float *sum, float *slice, int64_t n) {
    const int64_t most = s->plan.sum_bytes / sizeof(float);
    for (int64_t at = 0, count; at < n; at += count) {
        const int slot = s->flight.pieces_added++ % MOVING_PIECES;
        SumBuffer *r = &s->flight.adding[slot];
        store_finish_adding(s, slot);
        count = min_i64(most, n - at);
        ops_follow(&s->memory.offload_buffer[slot].link, s->memory.stream);
        store_move(s, &s->memory.offload_buffer[slot].link, r->at, slice + at,
                   count * (int64_t)sizeof(float), false);
        r->sum = sum + at;
        r->count = count;
    }
}
// Moves the sum of a storage's gradient from its slot to the host, or adds it to this step's sum
// there.
static inline void store_evict_sum(Store *s, int storage, int64_t step) {
    StorageProgress *p = &s->flight.progress[storage];
    const bool adds = p->summed && s->plan.rows[storage].rule.sum == SUM_IS_ADDED;
    int64_t begin, n = store_own(&s->plan, storage, &begin);
    float *sum = store_floats(s, STATE_GRADIENT, storage, step);
    float *slice = store_full_gradient(s, storage) + begin;
    comm_wait(s->memory.comm, &p->reducing);
    p->summed = true;
    if (!n) { return; }
    if (adds) {
        ops_wait(store_sum_link(s, storage)); // the first part must have arrived
        store_add_on_host(s, sum, slice, n);
    } else {
        ops_follow(store_sum_link(s, storage), s->memory.stream);
        store_move(s, store_sum_link(s, storage), sum, slice, n * (int64_t)sizeof(float), false);
    }
}
// Copies the sum back into its slot, to be added to.
static inline void store_fetch_sum(Store *s, int storage, int64_t step) {
    const int64_t n = store_own_elements(&s->plan, storage);
    Stream *link = store_sum_link(s, storage);
    ops_follow(link, s->memory.stream);
    store_move(s, link, store_at(s, STATE_GRADIENT, storage, step),
               store_full(s, STATE_GRADIENT, storage), n * (int64_t)sizeof(float), true);
    ops_follow(s->memory.stream, link);
    const int slot = s->plan.rows[storage].rule.grad_slot;
    if (slot >= 0) { s->flight.occupant[slot] = storage; }
    s->flight.progress[storage].first_write = false;
}
// Makes the device wait until the old content of gradient slots has been copied out.
static inline void store_free_slot(Store *s) {
    for (int i = 0; i < MOVING_PIECES && s->plan.offload_buffer_bytes; i++) {
        ops_follow(s->memory.stream, &s->memory.offload_buffer[i].link);
    }
}
// Waits until all sums on the host are complete.
static inline void store_finish_sums(Store *s) {
    for (int i = 0; i < MOVING_PIECES && s->plan.offload_buffer_bytes; i++) {
        store_finish_adding(s, i);
        ops_wait(&s->memory.offload_buffer[i].link);
    }
}

// Updates the working parameters after masters were written from outside, if either is on the host.
// Uses state_piece for what is not in host memory.
static inline void store_round_on_host(Store *s, int storage) {
    const bool masters = store_on_host(&s->plan, STATE_MASTER, storage),
               parameters = store_on_host(&s->plan, STATE_PARAMETERS, storage);
    const int64_t most = STATE_PIECE_FLOATS / 2;
    int64_t begin, own = store_own(&s->plan, storage, &begin);
    if (s->plan.dtype == DTYPE_FP32) { // delayed updates: both exist
        ops_from_host(s->memory.stream, store_newest(s, storage),
                      store_at(s, STATE_MASTER, storage, 0), own * sizeof(float));
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

// Copies this rank's slice of parameters from the host to `place`, in a slot that is no longer in
// use, after what was last written there.
static inline Stream *store_param_link(Store *s, int storage) {
    const int slot = s->plan.rows[storage].rule.param_slot;
    assert(slot >= 0); // these blocks share slots
    return &s->memory.param_link[slot];
}
static inline void store_bring_parameters(Store *s, int storage, char *place) {
    const int64_t bytes =
        store_own_elements(&s->plan, storage) * (int64_t)dtype_size(s->plan.dtype);
    Stream *link = store_param_link(s, storage);
    ops_follow(link, s->memory.stream);
    for (int i = 0; i < MOVING_PIECES; i++) { ops_follow(link, &s->memory.offload_buffer[i].link); }
    store_move(s, link, store_newest(s, storage), place, bytes, true);
}

#endif
