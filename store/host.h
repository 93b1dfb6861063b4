// host.h: the store's verbs where states lie in the host's memory (layout.h: Offload; offload.h says which): how they come to their update, and parameters
// to their uses.
//
// Pieces     of at most offload_piece() elements of this rank's slice, so that what is on its way is small whatever the model is.
// Rooms      two. The pieces of all storages take them in turns, each always the same one, whose copies follow each other (its link): so a piece is
//            there before its update, gone before the next one comes, and one room's piece comes while the other's goes.
// Updates    by the device: states come, are updated by the same operation as ever, and go back: 8 bytes for each one of 4, and no bit differs.
//            By the host: the gradient goes there (and parameters that are their own masters), and new parameters come back.
// Parameters that lie there  come for each use, my slice into its place of one of the rooms that blocks share, in copies of that room (param_link), and the
//            others' by the gather of stage 3. New ones are where they belong where the host updates; else they go there with the states.
#ifndef STORE_HOST_H
#define STORE_HOST_H

#include "kernels/update_cpu.h" // rounding
#include "store/store.h"        // states

static inline OffloadRoom *store_piece_room(Store *s, int storage, int piece) { return &s->room[(s->first_piece[storage] + piece) % MOVING_PIECES]; }
// Elements of a piece of my slice, and where in it they begin. The last pieces of a shorter slice may be empty.
static inline int64_t store_piece(const Store *s, int storage, int piece, int64_t *begin) {
    const int64_t own = store_own_elements(s, storage), most = s->pieces[storage] ? offload_piece(s->model) : own;
    *begin = min_i64(own, piece * most);
    return min_i64(most, own - *begin);
}
// Where the host has a state of a piece: where it lies, or in the room that it came to from the disk.
static inline DiskRoom *store_disk_room(Store *s, int storage, int piece) { return &s->disk->room[(s->first_stored[storage] + piece) % DISK_PIECES]; }
static inline float *store_piece_state(Store *s, StateKind kind, int storage, int piece) {
    int64_t begin, n = store_piece(s, storage, piece, &begin);
    if (!store_on_disk(s, kind, storage)) {
        float *state = store_has_state(s, kind) ? store_state(s, kind, storage) : NULL;
        return state ? state + begin : NULL;
    }
    const int64_t first = store_place_on_disk(s, STATE_MASTER, storage, piece, n), place = store_place_on_disk(s, kind, storage, piece, n);
    return (float *)(void *)(store_disk_room(s, storage, piece)->at + (place - first));
}
// What lies on disk of a piece comes to its room, or goes back: asked for now, there when the room is waited for.
static inline void store_move_stored(Store *s, int storage, int piece, bool writes) {
    int64_t begin, n = store_piece(s, storage, piece, &begin);
    if (!n) { return; }
    const int64_t bytes = store_stored_bytes(s->policy.offload, storage, n);
    disk_start(store_disk_room(s, storage, piece), store_place_on_disk(s, STATE_MASTER, storage, piece, n), bytes, writes);
    s->stored[writes] += bytes;
}
static inline void store_read_piece(Store *s, int storage, int piece) { store_move_stored(s, storage, piece, false); }
static inline void store_write_piece(Store *s, int storage, int piece) {
    if (!s->policy.offload->by_host) { ops_wait(&store_piece_room(s, storage, piece)->link); } // what the device has updated is on the host
    store_move_stored(s, storage, piece, true);
}
static inline void store_await_stored(Store *s, int storage, int piece) {
    if (offload_stored(s->policy.offload, storage)) { disk_wait(store_disk_room(s, storage, piece)); }
}

// Starts a copy between a place of the host and one of the device.
static inline void store_move(Store *s, OffloadRoom *room, void *host, void *device, int64_t bytes, bool in) {
    if (in) {
        ops_from_host(&room->link, device, host, (size_t)bytes);
    } else {
        ops_to_host_later(&room->link, host, device, (size_t)bytes);
    }
    s->moved[!in] += bytes;
}
// Of a piece that the device updates: its states, in the room one kind after another, then parameters that lie on the host: new ones, and old ones that are
// their own masters.
static inline void store_move_states(Store *s, int storage, int piece, OffloadRoom *room, bool in) {
    int64_t begin, n = store_piece(s, storage, piece, &begin);
    float *place = (float *)(void *)room->at;
    if (in) { store_await_stored(s, storage, piece); }
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) {
        if (!offload_has(s->policy.offload, storage, (StateKind)kind)) { continue; }
        store_move(s, room, store_piece_state(s, (StateKind)kind, storage, piece), place, n * (int64_t)sizeof(float), in);
        place += n;
    }
    if (!store_param_far(s, storage) || (in && s->dtype != DTYPE_FP32)) { return; }
    const int64_t size = (int64_t)dtype_size(s->dtype);
    store_move(s, room, store_newest(s, storage) + begin * size, place, n * size, in);
}
// Of one that the host updates: its gradient, to the room, and its parameters behind it; or these, from there. Not parameters that lie there.
static inline void store_move_update(Store *s, int storage, OffloadRoom *room, int64_t begin, int64_t n, int64_t step, bool in) {
    const int64_t size = (int64_t)dtype_size(s->dtype), gradient = n * (int64_t)sizeof(float);
    if (!in) { store_move(s, room, room->at, store_sum(s, storage, step) + begin, gradient, false); }
    if (store_param_far(s, storage)) { return; }
    if (in || s->dtype == DTYPE_FP32) { store_move(s, room, room->at + gradient, store_newest(s, storage) + begin * size, n * size, in); }
}
// A piece comes from the host, or goes there, after what the device works on now; what the device does later finds what the host has made.
static inline void store_move_piece(Store *s, int storage, int piece, int64_t step, bool in) {
    OffloadRoom *room = store_piece_room(s, storage, piece);
    int64_t begin, n = store_piece(s, storage, piece, &begin);
    if (!n) { return; }
    if (!in) { ops_follow(&room->link, s->stream); }
    if (s->policy.offload->by_host) {
        store_move_update(s, storage, room, begin, n, step, in);
        if (in) { ops_follow(s->stream, &room->link); }
    } else {
        store_move_states(s, storage, piece, room, in);
    }
}

// What an update works on: `count` elements of a storage from `first` on, in the device's memory or the host's.
typedef struct {
    float *state[STATE_V + 1]; // [kinds]
    const float *gradient;
    char *parameters;
    int64_t first, count;
    bool by_host;
} UpdatePlaces;
// Of a piece that came into its room.
static inline void store_find_arrived(Store *s, int storage, int piece, UpdatePlaces *p) {
    OffloadRoom *room = store_piece_room(s, storage, piece);
    float *place = (float *)(void *)room->at;
    p->by_host = s->policy.offload->by_host;
    if (p->by_host) {
        ops_wait(&room->link), store_await_stored(s, storage, piece);
        p->gradient = place, p->parameters = store_param_far(s, storage) ? p->parameters : (char *)(place + p->count);
        return;
    }
    ops_follow(s->stream, &room->link);
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) {
        if (offload_has(s->policy.offload, storage, (StateKind)kind)) { p->state[kind] = place, place += p->count; }
    }
    if (store_param_far(s, storage)) { p->parameters = (char *)place; }
}
static inline UpdatePlaces store_update_places(Store *s, int storage, int64_t step, int piece) {
    UpdatePlaces p;
    int64_t begin, first;
    memset(&p, 0, sizeof p);
    p.count = store_piece(s, storage, piece, &begin);
    store_own(s, storage, &first);
    p.first = first + begin, p.gradient = store_sum(s, storage, step) + begin;
    p.parameters = store_newest(s, storage) + begin * (int64_t)dtype_size(s->dtype);
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) { p.state[kind] = store_piece_state(s, (StateKind)kind, storage, piece); }
    if (s->pieces[storage]) { store_find_arrived(s, storage, piece, &p); }
    if (s->dtype == DTYPE_FP32) { p.state[STATE_MASTER] = (float *)(void *)p.parameters; } // their own masters
    return p;
}
// Some of them, from element `at` of the piece on.
static inline void store_update_elements(Store *s, const UpdatePlaces *p, int64_t at, int64_t n, OptimizerStep o) {
    float *master = p->state[STATE_MASTER] + at, *m = p->state[STATE_M] + at;
    void *parameters = p->parameters + at * (int64_t)dtype_size(s->dtype);
    if (s->adam) {
        (p->by_host ? ops_adamw_host : ops_adamw)(s->stream, master, parameters, s->dtype, m, p->state[STATE_V] + at, p->gradient + at, n, o);
    } else {
        (p->by_host ? ops_sgd_host : ops_sgd)(s->stream, master, parameters, s->dtype, m, p->gradient + at, n, o);
    }
}

// Masters were written from outside, and working parameters follow, of which one or both lie on the host. (state_piece is used, by what does not.)
static inline void store_round_far(Store *s, int storage) {
    const bool masters = store_on_host(s, STATE_MASTER, storage) && !store_on_disk(s, STATE_MASTER, storage), parameters = store_param_far(s, storage);
    const int64_t most = STATE_PIECE_FLOATS / 2;
    int64_t begin, own = store_own(s, storage, &begin);
    for (int64_t at = 0, n; at < own; at += n) {
        n = min_i64(most, own - at);
        uint16_t *out = (uint16_t *)(void *)store_newest(s, storage) + at, *halves = parameters ? out : (uint16_t *)(void *)(state_piece.floats + most);
        if (!masters) { store_read_state(s, STATE_MASTER, storage, at, n, state_piece.floats); }
        round_part(halves, masters ? store_state(s, STATE_MASTER, storage) + at : state_piece.floats, 0, n, store_rounding(s, storage, begin + at));
        if (!parameters) { ops_from_host(s->stream, out, halves, (size_t)n * sizeof(uint16_t)); }
    }
}

// Parameters that lie on the host come to the device: my slice into `place`, of a room that nobody uses any more, after what was written there last.
static inline Stream *store_param_link(Store *s, int storage) { return &s->param_link[zero_param_room(s->model, &s->policy, &s->layout.holders, storage)]; }
static inline void store_bring_parameters(Store *s, int storage, char *place) {
    const size_t bytes = (size_t)store_own_elements(s, storage) * dtype_size(s->dtype);
    Stream *link = store_param_link(s, storage);
    ops_follow(link, s->stream);
    for (int i = 0; i < MOVING_PIECES; i++) { ops_follow(link, &s->room[i].link); }
    ops_from_host(link, place, store_newest(s, storage), bytes);
    s->moved[0] += (int64_t)bytes;
}

#endif
