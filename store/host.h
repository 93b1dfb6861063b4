// host.h: the store's verbs where states lie in the host's memory (layout.h: Offload; offload.h
// says which): how they come to their update, and parameters to their uses.
//
// Pieces     of at most offload_piece() elements of this rank's slice, so that what is on its way
//            is small whatever the model is.
// Rooms      two. The pieces of all storages take them in turns, each always the same one, whose
//            copies follow each other (its link): so a piece is there before its update, gone
//            before the next one comes, and one room's piece comes while the other's goes.
// Updates    by the device: states come, are updated by the same operation as ever, and go back: 8
//            bytes for each one of 4, and no bit differs. By the host: the gradient goes there (and
//            parameters that are their own masters), and new parameters come back.
// Sums       of gradients that lie on the host (SumPlace). A sum leaves when those of the storage's
//            ranks are added up in the room. Where one rank holds the storage it comes back into
//            the room before the next micro-batch, which adds to it as it computes; else the host
//            adds, piece by piece, and not at once: when the piece after next comes. So sums have
//            the bits that they have on the device, and at the update they are where the host wants
//            them.
// Parameters that lie there  come for each use, my slice into its place of one of the rooms that
//                            blocks share, in copies of that room (param_link), and the
//            others' by the gather of stage 3. New ones are where they belong where the host
//            updates; else they go there with the states.
#ifndef STORE_HOST_H
#define STORE_HOST_H

#include "kernels/update_cpu.h" // rounding
#include "store/store.h"        // states

static inline OffloadBuffer *store_piece_buffer(Store *s, int storage, int piece) {
    return &s->offload_buffer[(s->first_piece[storage] + piece) % MOVING_PIECES];
}
// Elements of a piece of my slice, and where in it they begin. The last pieces of a shorter slice
// may be empty.
static inline int64_t store_piece(const Store *s, int storage, int piece, int64_t *begin) {
    const int64_t own = store_own_elements(s, storage),
                  most = s->pieces[storage] ? offload_piece(s->model) : own;
    *begin = min_i64(own, piece * most);
    return min_i64(most, own - *begin);
}
// Where the host has a state of a piece: where it lies, or in the room that it came to from the
// disk.
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
// What lies on disk of a piece comes to its room, or goes back: asked for now, there when the room
// is waited for.
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
    // what the device has updated is on the host
    if (!s->policy.offload->cpu_update) { ops_wait(&store_piece_buffer(s, storage, piece)->link); }
    store_move_stored(s, storage, piece, true);
}
static inline void store_await_stored(Store *s, int storage, int piece) {
    if (offload_stored(s->policy.offload, storage)) {
        disk_wait(store_disk_buffer(s, storage, piece));
    }
}

// Starts a copy between a place of the host and one of the device.
static inline void store_move(Store *s, OffloadBuffer *buffer, void *host, void *device,
                              int64_t bytes, bool in) {
    if (in) {
        ops_from_host(&buffer->link, device, host, (size_t)bytes);
    } else {
        ops_to_host_later(&buffer->link, host, device, (size_t)bytes);
    }
    s->moved[!in] += bytes;
}
// Of a piece that the device updates: its states, in the room one kind after another, its gradient,
// which does not go back, then parameters that lie on the host: new ones, and old ones that are
// their own masters.
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
// Of one that the host updates: its gradient, to the room, and its parameters behind it; or these,
// from there. Neither where it lies there.
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
// Of parameters that were updated without the device: from their masters.
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
// A piece comes from the host, or goes there, after what the device works on now; what the device
// does later finds what the host has made.
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

// What an update works on: `count` elements of a storage from `first` on, in the device's memory or
// the host's.
typedef struct {
    float *state[STATE_V + 1]; // [kinds]
    const float *gradient;
    char *parameters;
    int64_t first, count;
    bool cpu_update;
} UpdatePlaces;
// Of a piece that came into its room.
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
// Of my whole slice, where the host has all that it takes: the device's parameters are another
// version.
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
    // their own masters
    if (s->dtype == DTYPE_FP32) { p.state[STATE_MASTER] = (float *)(void *)p.parameters; }
    return p;
}
// Some of them, from element `at` of the piece on.
static inline void store_update_elements(Store *s, const UpdatePlaces *p, int64_t at, int64_t n,
                                         OptimizerStep o) {
    float *master = p->state[STATE_MASTER] + at, *m = p->state[STATE_M] + at;
    const DType dtype = p->parameters ? s->dtype : DTYPE_FP32; // else masters alone
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

// The link of what shares a room with a storage's gradient: its copies follow each other.
static inline Stream *store_sum_link(Store *s, int storage) {
    return &s->offload_buffer[storage % SHARED_SLOTS].link;
}
// What came to be added to a sum on the host is.
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
// The sum of a storage's gradient, which is in its room, goes to the host, or is added to what is
// there of this step.
static inline void store_evict_sum(Store *s, int storage, int64_t step) {
    const bool adds = s->summed[storage] && store_sum_place(s, storage) == SUM_IS_ADDED;
    int64_t begin, n = store_own(s, storage, &begin);
    float *sum = store_sum(s, storage, step);
    const float *slice = (const float *)(const void *)buffer_full(&s->grads, storage) + begin;
    comm_wait(s->comm, s->reducing[storage]);
    s->summed[storage] = true;
    if (!n) { return; }
    if (adds) {
        ops_wait(store_sum_link(s, storage)); // what was there first
        store_add_on_host(s, sum, slice, n);
    } else {
        ops_follow(store_sum_link(s, storage), s->stream);
        ops_to_host_later(store_sum_link(s, storage), sum, slice, (size_t)n * sizeof(float));
    }
    s->moved[1] += n * (int64_t)sizeof(float);
}
// It comes back to be added to.
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
// A gradient's room is written anew: what was in it has left.
static inline void store_free_slot(Store *s) {
    for (int i = 0; i < MOVING_PIECES && s->offload_buffer_bytes; i++) {
        ops_follow(s->stream, &s->offload_buffer[i].link);
    }
}
// All sums on the host are whole.
static inline void store_finish_sums(Store *s) {
    for (int i = 0; i < MOVING_PIECES && s->offload_buffer_bytes; i++) {
        store_finish_adding(s, i);
        ops_wait(&s->offload_buffer[i].link);
    }
}

// Masters were written from outside, and working parameters follow, of which one or both lie on the
// host. (state_piece is used, by what does not.)
static inline void store_round_far(Store *s, int storage) {
    const bool masters = store_on_host(s, STATE_MASTER, storage) &&
                         !store_on_disk(s, STATE_MASTER, storage),
               parameters = store_param_far(s, storage);
    const int64_t most = STATE_PIECE_FLOATS / 2;
    int64_t begin, own = store_own(s, storage, &begin);
    if (s->dtype == DTYPE_FP32) { // of delayed updates: there are both
        ops_from_host(s->stream, store_newest(s, storage), store_state(s, STATE_MASTER, storage),
                      (size_t)own * sizeof(float));
        ops_wait(s->stream); // an update of these may be the next that is done
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

// Parameters that lie on the host come to the device: my slice into `place`, of a room that nobody
// uses any more, after what was written there last.
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
