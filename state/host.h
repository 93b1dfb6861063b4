// host.h: offloaded states of the store (layout.h: Offload; offload.h says which): how they reach
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

#include "ops/cpu/update_cpu.h" // rounding
#include "state/store.h"        // states

static inline OffloadBuffer *store_piece_buffer(Store *s, int storage, int piece) {
    return &s->offload_buffer[(s->first_piece[storage] + piece) % MOVING_PIECES];
}
// Returns the elements of a piece of this rank's slice, and where in the slice they begin. The last
// pieces of a shorter slice may be empty.
static inline int64_t store_piece(const Store *s, int storage, int piece, int64_t *begin) {
    const int64_t own = store_own_elements(s, storage),
                  most = s->pieces[storage] ? offload_piece(s->model) : own;
    *begin = min_i64(own, piece * most);
    return min_i64(most, own - *begin);
}
// Returns where the host has a state of a piece: in the states on the host, or in the buffer that
// it was read into from the disk.
static inline DiskBuffer *store_disk_buffer(Store *s, int storage, int piece) {
    return &s->disk->buffer[(s->first_stored[storage] + piece) % DISK_PIECES];
}
static inline float *store_piece_state(Store *s, StateKind kind, int storage, int piece) {
    int64_t begin, n = store_piece(s, storage, piece, &begin);
    if (!store_on_disk(s, kind, storage)) {
        float *state = store_has_state(s, kind) ? store_state(s, kind, storage) : NULL;
        return state ? state + begin : NULL;
    }
    const int64_t first = store_place_on_disk(s, STATE_MASTER, storage, piece, n),
                  place = store_place_on_disk(s, kind, storage, piece, n);
    return (float *)(void *)(store_disk_buffer(s, storage, piece)->at + (place - first));
}
// Starts to read what is on disk of a piece into its buffer, or to write it. The transfer is
// complete after store_await_stored.
static inline void store_move_stored(Store *s, int storage, int piece, bool writes) {
    int64_t begin, n = store_piece(s, storage, piece, &begin);
    if (!n) { return; }
    const int64_t bytes = store_stored_bytes(s->policy.offload, storage, n);
    disk_start(store_disk_buffer(s, storage, piece),
               store_place_on_disk(s, STATE_MASTER, storage, piece, n), bytes, writes);
    s->stored[writes] += bytes;
}
static inline void store_read_piece(Store *s, int storage, int piece) {
    store_move_stored(s, storage, piece, false);
}
static inline void store_write_piece(Store *s, int storage, int piece) {
    // first the states that the device has updated must arrive on the host
    if (!s->policy.offload->cpu_update) { ops_wait(&store_piece_buffer(s, storage, piece)->link); }
    store_move_stored(s, storage, piece, true);
}
static inline void store_await_stored(Store *s, int storage, int piece) {
    if (offload_stored(s->policy.offload, storage)) {
        disk_wait(store_disk_buffer(s, storage, piece));
    }
}

// Starts a copy between host and device memory. in: to the device.
static inline void store_move(Store *s, OffloadBuffer *buffer, void *host, void *device,
                              int64_t bytes, bool in) {
    if (in) {
        ops_from_host(&buffer->link, device, host, (size_t)bytes);
    } else {
        ops_to_host_later(&buffer->link, host, device, (size_t)bytes);
    }
    s->moved[!in] += bytes;
}
// Copies a piece that the device updates. Its buffer holds the states, kind after kind; the
// gradient, which does not return; then parameters that belong on the host. These are copied to the
// device only if they are their own masters.
static inline void store_move_states(Store *s, int storage, int piece, OffloadBuffer *buffer,
                                     int64_t step, bool in) {
    int64_t begin, n = store_piece(s, storage, piece, &begin);
    float *place = (float *)(void *)buffer->at;
    if (in) { store_await_stored(s, storage, piece); }
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) {
        if (!offload_has(s->policy.offload, storage, (StateKind)kind)) { continue; }
        store_move(s, buffer, store_piece_state(s, (StateKind)kind, storage, piece), place,
                   n * (int64_t)sizeof(float), in);
        place += n;
    }
    if (store_sum_place(s, storage)) {
        if (in) {
            store_move(s, buffer, store_sum(s, storage, step) + begin, place,
                       n * (int64_t)sizeof(float), true);
        }
        place += n;
    }
    if (!store_param_far(s, storage) || (in && s->dtype != DTYPE_FP32)) { return; }
    const int64_t size = (int64_t)dtype_size(s->dtype);
    store_move(s, buffer, store_newest(s, storage) + begin * size, place, n * size, in);
}
// Copies a piece that the CPU updates. out: its gradient, then fp32 parameters, to the buffer; in:
// the new parameters from there. Neither is copied if it is on the host anyway.
static inline void store_move_update(Store *s, int storage, OffloadBuffer *buffer, int64_t begin,
                                     int64_t n, int64_t step, bool in) {
    const int64_t size = (int64_t)dtype_size(s->dtype),
                  gradient = store_sum_place(s, storage) ? 0 : n * (int64_t)sizeof(float);
    if (!in && gradient) {
        store_move(s, buffer, buffer->at, store_sum(s, storage, step) + begin, gradient, false);
    }
    if (store_param_far(s, storage)) { return; }
    if (in || s->dtype == DTYPE_FP32) {
        store_move(s, buffer, buffer->at + gradient, store_newest(s, storage) + begin * size,
                   n * size, in);
    }
}
// Copies to the device parameters that were updated on the host alone, made from their masters.
static inline void store_move_masters(Store *s, int storage, OffloadBuffer *buffer, int64_t begin,
                                      int64_t n) {
    const int64_t size = (int64_t)dtype_size(s->dtype);
    float *master = store_state(s, STATE_MASTER, storage) + begin;
    ops_follow(&buffer->link, s->stream);
    if (s->dtype != DTYPE_FP32) {
        int64_t first;
        store_own(s, storage, &first);
        ops_wait(&buffer->link);
        ops_round_host(s->stream, (uint16_t *)(void *)buffer->at, master, n,
                       store_rounding(s, storage, first + begin));
    }
    store_move(s, buffer, s->dtype == DTYPE_FP32 ? (void *)master : (void *)buffer->at,
               store_newest(s, storage) + begin * size, n * size, true);
}
// Moves a piece to the device (in) or to the host. Copies out follow the device's work so far;
// later device work sees what the CPU has made.
static inline void store_move_piece(Store *s, int storage, int piece, int64_t step, bool in) {
    OffloadBuffer *buffer = store_piece_buffer(s, storage, piece);
    int64_t begin, n = store_piece(s, storage, piece, &begin);
    if (!n) { return; }
    if (!in) { ops_follow(&buffer->link, s->stream); }
    if (s->policy.offload->cpu_update) {
        if (store_delays(s)) {
            store_move_masters(s, storage, buffer, begin, n);
        } else {
            store_move_update(s, storage, buffer, begin, n, step, in);
        }
        if (in) { ops_follow(s->stream, &buffer->link); }
    } else {
        store_move_states(s, storage, piece, buffer, step, in);
    }
}

// The memory that an update works on: `count` elements of a storage from `first` on, on the device
// or on the host.
typedef struct {
    float *state[STATE_V + 1]; // [kinds]
    const float *gradient;
    char *parameters;
    int64_t first, count;
    bool cpu_update;
} UpdatePlaces;
// Points into the buffer of a piece that has arrived.
static inline void store_find_arrived(Store *s, int storage, int piece, UpdatePlaces *p) {
    OffloadBuffer *buffer = store_piece_buffer(s, storage, piece);
    float *place = (float *)(void *)buffer->at;
    p->cpu_update = s->policy.offload->cpu_update;
    const bool far = store_sum_place(s, storage);
    if (p->cpu_update) {
        ops_wait(&buffer->link);
        store_await_stored(s, storage, piece);
        if (!far) {
            p->gradient = place;
            place += p->count;
        }
        if (!store_param_far(s, storage)) { p->parameters = (char *)place; }
        return;
    }
    ops_follow(s->stream, &buffer->link);
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) {
        if (offload_has(s->policy.offload, storage, (StateKind)kind)) {
            p->state[kind] = place;
            place += p->count;
        }
    }
    if (far) {
        p->gradient = place;
        place += p->count;
    }
    if (store_param_far(s, storage)) { p->parameters = (char *)place; }
}
// Returns the memory of a delayed update: this rank's whole slice, all of it on the host, because
// the device's parameters are of another version.
static inline UpdatePlaces store_delayed_places(const Store *s, int storage, int64_t step) {
    UpdatePlaces p;
    memset(&p, 0, sizeof p);
    p.count = store_own(s, storage, &p.first);
    p.gradient = store_sum(s, storage, step);
    p.cpu_update = true;
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) {
        p.state[kind] =
            store_has_state(s, (StateKind)kind) ? store_state(s, (StateKind)kind, storage) : NULL;
    }
    return p;
}
static inline UpdatePlaces store_update_places(Store *s, int storage, int64_t step, int piece) {
    UpdatePlaces p;
    int64_t begin, first;
    memset(&p, 0, sizeof p);
    p.count = store_piece(s, storage, piece, &begin);
    store_own(s, storage, &first);
    p.first = first + begin;
    p.gradient = store_sum(s, storage, step) + begin;
    p.parameters = store_newest(s, storage) + begin * (int64_t)dtype_size(s->dtype);
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) {
        p.state[kind] = store_piece_state(s, (StateKind)kind, storage, piece);
    }
    if (s->pieces[storage]) { store_find_arrived(s, storage, piece, &p); }
    // parameters are their own masters
    if (s->dtype == DTYPE_FP32) { p.state[STATE_MASTER] = (float *)(void *)p.parameters; }
    return p;
}
// Updates n elements, from element `at` of the piece on.
static inline void store_update_elements(Store *s, const UpdatePlaces *p, int64_t at, int64_t n,
                                         OptimizerStep o) {
    float *master = p->state[STATE_MASTER] + at, *m = p->state[STATE_M] + at;
    const DType dtype = p->parameters ? s->dtype : DTYPE_FP32; // otherwise only masters are updated
    void *parameters =
        p->parameters ? p->parameters + at * (int64_t)dtype_size(dtype) : (char *)(void *)master;
    if (s->adam && p->cpu_update) {
        ops_adamw_host(s->stream, master, parameters, dtype, m, p->state[STATE_V] + at,
                       p->gradient + at, n, o);
    } else if (s->adam) {
        ops_adamw(s->stream, master, parameters, dtype, m, p->state[STATE_V] + at, p->gradient + at,
                  n, o);
    } else if (p->cpu_update) {
        ops_sgd_host(s->stream, master, parameters, dtype, m, p->gradient + at, n, o);
    } else {
        ops_sgd(s->stream, master, parameters, dtype, m, p->gradient + at, n, o);
    }
}

// Returns the link of the slot that a storage's gradient uses. Its copies run in order.
static inline Stream *store_sum_link(Store *s, int storage) {
    return &s->offload_buffer[storage % SHARED_SLOTS].link;
}
// Waits for a piece that was copied to the host, and adds it to the sum there.
static inline void store_finish_adding(Store *s, int slot) {
    SumBuffer *r = &s->adding[slot];
    if (!r->count) { return; }
    ops_wait(&s->offload_buffer[slot].link);
    ops_accumulate_host(s->stream, r->sum, r->at, r->count);
    r->count = 0;
}
static inline void store_add_on_host(Store *s, float *sum, const float *slice, int64_t n) {
    const int64_t most = (int64_t)(s->sum_bytes / sizeof(float));
    for (int64_t at = 0, count; at < n; at += count) {
        const int slot = s->pieces_added++ % MOVING_PIECES;
        SumBuffer *r = &s->adding[slot];
        store_finish_adding(s, slot);
        count = min_i64(most, n - at);
        ops_follow(&s->offload_buffer[slot].link, s->stream);
        ops_to_host_later(&s->offload_buffer[slot].link, r->at, slice + at,
                          (size_t)count * sizeof(float));
        r->sum = sum + at;
        r->count = count;
    }
}
// Moves the sum of a storage's gradient from its slot to the host, or adds it to this step's sum
// there.
static inline void store_evict_sum(Store *s, int storage, int64_t step) {
    const bool adds = s->summed[storage] && store_sum_place(s, storage) == SUM_IS_ADDED;
    int64_t begin, n = store_own(s, storage, &begin);
    float *sum = store_sum(s, storage, step);
    const float *slice = (const float *)(const void *)buffer_full(&s->grads, storage) + begin;
    comm_wait(s->comm, &s->reducing[storage]);
    s->summed[storage] = true;
    if (!n) { return; }
    if (adds) {
        ops_wait(store_sum_link(s, storage)); // the first part must have arrived
        store_add_on_host(s, sum, slice, n);
    } else {
        ops_follow(store_sum_link(s, storage), s->stream);
        ops_to_host_later(store_sum_link(s, storage), sum, slice, (size_t)n * sizeof(float));
    }
    s->moved[1] += n * (int64_t)sizeof(float);
}
// Copies the sum back into its slot, to be added to.
static inline void store_fetch_sum(Store *s, int storage, int64_t step) {
    const int64_t n = store_own_elements(s, storage);
    Stream *link = store_sum_link(s, storage);
    ops_follow(link, s->stream);
    ops_from_host(link, buffer_full(&s->grads, storage), store_sum(s, storage, step),
                  (size_t)n * sizeof(float));
    ops_follow(s->stream, link);
    const int slot = zero_grad_slot(&s->policy, &s->layout.owners, storage);
    if (slot >= 0) { s->occupant[slot] = storage; }
    s->first_write[storage] = false;
    s->moved[0] += n * (int64_t)sizeof(float);
}
// Makes the device wait until the old content of gradient slots has been copied out.
static inline void store_free_slot(Store *s) {
    for (int i = 0; i < MOVING_PIECES && s->offload_buffer_bytes; i++) {
        ops_follow(s->stream, &s->offload_buffer[i].link);
    }
}
// Waits until all sums on the host are complete.
static inline void store_finish_sums(Store *s) {
    for (int i = 0; i < MOVING_PIECES && s->offload_buffer_bytes; i++) {
        store_finish_adding(s, i);
        ops_wait(&s->offload_buffer[i].link);
    }
}

// Updates the working parameters after masters were written from outside, if either is on the host.
// Uses state_piece for what is not on the host.
static inline void store_round_far(Store *s, int storage) {
    const bool masters = store_on_host(s, STATE_MASTER, storage) &&
                         !store_on_disk(s, STATE_MASTER, storage),
               parameters = store_param_far(s, storage);
    const int64_t most = STATE_PIECE_FLOATS / 2;
    int64_t begin, own = store_own(s, storage, &begin);
    if (s->dtype == DTYPE_FP32) { // delayed updates: both exist
        ops_from_host(s->stream, store_newest(s, storage), store_state(s, STATE_MASTER, storage),
                      (size_t)own * sizeof(float));
        ops_wait(s->stream); // the next operation may update these masters
        return;
    }
    for (int64_t at = 0, n; at < own; at += n) {
        n = min_i64(most, own - at);
        uint16_t *out = (uint16_t *)(void *)store_newest(s, storage) + at,
                 *halves = parameters ? out : (uint16_t *)(void *)(state_piece.floats + most);
        if (!masters) { store_read_state(s, STATE_MASTER, storage, at, n, state_piece.floats); }
        round_part(halves,
                   masters ? store_state(s, STATE_MASTER, storage) + at : state_piece.floats, 0, n,
                   store_rounding(s, storage, begin + at));
        if (!parameters) { ops_from_host(s->stream, out, halves, (size_t)n * sizeof(uint16_t)); }
    }
}

// Copies this rank's slice of parameters from the host to `place`, in a slot that is no longer in
// use, after what was last written there.
static inline Stream *store_param_link(Store *s, int storage) {
    return &s->param_link[zero_param_slot(s->model, &s->policy, &s->layout.owners, storage)];
}
static inline void store_bring_parameters(Store *s, int storage, char *place) {
    const size_t bytes = (size_t)store_own_elements(s, storage) * dtype_size(s->dtype);
    Stream *link = store_param_link(s, storage);
    ops_follow(link, s->stream);
    for (int i = 0; i < MOVING_PIECES; i++) { ops_follow(link, &s->offload_buffer[i].link); }
    ops_from_host(link, place, store_newest(s, storage), bytes);
    s->moved[0] += (int64_t)bytes;
}

#endif
