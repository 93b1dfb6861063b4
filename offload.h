// offload.h: granular offloading (Lin et al., M6-10T, arXiv 2110.03888, section 4 of our notes in docs/offload.md): which states lie in the host's memory,
// storage by storage and kind by kind (layout.h: Offload; how they move and are updated: store/host.h).
//
// Order      What costs least goes first, bytes moved per byte that is freed: optimizer states move once a step, parameters for each use. Among them the
//            storages whose backward pass comes first (the last blocks); of the optimizer kind by kind where the device updates, all kinds of a storage
//            where the host does, which has them in its hands anyway. Then activations, of the first blocks first, which wait longest. That goes on until the device's budget holds; what still has room then comes back,
//            from what went last.
// Parameters of blocks, which take turns in rooms; not those that several stages use, nor quantized ones, whose records stay on the device.
// Budgets    of the device: all kinds of memory of report.h together. Of the host: what the process takes there, and these states.
// Ranks      have one schedule for all, so what one puts on the host its partners of that storage do, too.
#ifndef OFFLOAD_H
#define OFFLOAD_H

#include "options.h"     // --offload
#include "store/store.h" // what a store takes

// Bytes that the device holds of a state if it is there.
static inline int64_t offload_bytes(const Store *s, int storage, StateKind kind) {
    const bool none = !store_holds(s, storage) || (kind == STATE_MASTER ? s->dtype == DTYPE_FP32 : kind == STATE_V && !s->adam);
    const int64_t elements = s->policy.stage ? store_own_elements(s, storage) : gpt_storage_elements(s->model, storage);
    return none ? 0 : elements * (int64_t)sizeof(float);
}
// Would the device have room for something else if the parameters of a storage lay on the host?
static inline bool offload_has_parameters(const Store *s, int storage) {
    return store_holds(s, storage) && holders_in_turns(s->model, &s->layout.holders, storage) && !zero_param_apart(&s->policy);
}
// What may go to the host, of this rank.
typedef struct {
    const Store *store;           // planned with all states on the device
    bool parameters, activations; // besides the optimizer's states
    int64_t block_bytes, slots;   // of a block's activations; micro-batches whose activations are there at once
    int first, end;               // units
} OffloadScope;
// Of a storage: blocks of this rank that use it.
static inline int offload_users(const OffloadScope *f, int storage) {
    const GptModel *m = f->store->model;
    int users = 0;
    for (int u = (int)max_i64(f->first, 1); u < min_i64(f->end, m->units - 1); u++) {
        int used[2];
        gpt_unit_storages(m, u, used), users += used[0] == storage;
    }
    return users;
}
// How much less the device holds with a placement than with all states there.
static inline int64_t offload_frees(const OffloadScope *f, const Offload *o) {
    const Store *s = f->store;
    int64_t stashed = 0, bytes = o->by_host ? 0 : -MOVING_PIECES * (int64_t)store_room_bytes(s, o);
    for (int i = 0; i < s->model->storages; i++) {
        for (int kind = STATE_MASTER; kind <= STATE_V; kind++) { bytes += offload_has(o, i, (StateKind)kind) ? offload_bytes(s, i, (StateKind)kind) : 0; }
    }
    Shelf without = store_plan_params(s, NULL), with = store_plan_params(s, o);
    bytes += (int64_t)(without.held + without.rooms) - (int64_t)(with.held + with.rooms);
    shelf_free(&without), shelf_free(&with);
    for (int i = 0; i < s->model->storages; i++) { stashed += offload_has(o, i, STATE_ACTIVATIONS) ? f->slots * offload_users(f, i) : 0; }
    return bytes + (stashed ? (stashed - STASH_ROOMS) * f->block_bytes : 0);
}

// What goes to the host together: kinds (bits) of a storage.
typedef struct {
    int storage;
    unsigned char kinds;
} OffloadTurn;
enum { OFFLOAD_TURNS = 5 };                                                  // of a storage, at most
static inline unsigned char offload_optimizer(const Store *s, int storage) { // all of its states
    unsigned char all = 0;
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) { all |= (unsigned char)((offload_bytes(s, storage, (StateKind)kind) > 0) << kind); }
    return all;
}
static inline int offload_add_turn(OffloadTurn *turns, int n, int storage, unsigned char kinds) {
    turns[n].storage = storage, turns[n].kinds = kinds;
    return n + (kinds != 0);
}
// In their order; returns how many.
static inline int offload_turns(const OffloadScope *f, const Offload *o, OffloadTurn *turns) {
    const Store *s = f->store;
    int n = 0;
    for (int i = s->model->storages - 1; i >= 0; i--) {
        const unsigned char all = offload_optimizer(s, i);
        if (o->by_host) { n = offload_add_turn(turns, n, i, all); }
        for (int kind = STATE_MASTER; kind <= STATE_V && !o->by_host; kind++) { n = offload_add_turn(turns, n, i, all & (unsigned char)(1 << kind)); }
    }
    for (int i = s->model->storages - 1; i >= 0 && f->parameters; i--) {
        n = offload_add_turn(turns, n, i, (unsigned char)(offload_has_parameters(s, i) << STATE_PARAMETERS));
    }
    for (int i = 0; i < s->model->storages && f->activations; i++) { // those that wait longest
        n = offload_add_turn(turns, n, i, (unsigned char)((offload_users(f, i) > 0) << STATE_ACTIVATIONS));
    }
    return n;
}
static inline OffloadTurn *offload_turns_make(const OffloadScope *f, const Offload *o, int *count) {
    OffloadTurn *turns = (OffloadTurn *)checked_malloc((size_t)(OFFLOAD_TURNS * f->store->model->storages + 1) * sizeof(OffloadTurn), "offload");
    *count = offload_turns(f, o, turns);
    return turns;
}

// Moves states to the host until `excess` bytes of the device are free that would be missing with all states on it, or nothing is left. o: what lies there
// anyway. Returns how many are free at best; o is that placement.
static inline int64_t offload_fill(Offload *o, const OffloadScope *f, double excess) {
    const size_t n = (size_t)f->store->model->storages;
    unsigned char *best = (unsigned char *)checked_malloc(2 * n, "offload"), *fixed = best + n;
    int count;
    OffloadTurn *turns = offload_turns_make(f, o, &count);
    memcpy(best, o->host, n), memcpy(fixed, o->host, n);
    int64_t most = offload_frees(f, o), frees = most;
    for (int k = 0; k < count && (double)frees < excess; k++) {
        o->host[turns[k].storage] |= turns[k].kinds, frees = offload_frees(f, o);
        if (frees > most) { most = frees, memcpy(best, o->host, n); }
    }
    memcpy(o->host, best, n);
    for (int k = count - 1; k >= 0 && (double)most >= excess; k--) {
        unsigned char *host = &o->host[turns[k].storage];
        const unsigned char before = *host;
        *host &= (unsigned char)~(turns[k].kinds & ~fixed[turns[k].storage]);
        const bool apart = o->by_host && *host >> STATE_PARAMETERS & 1 && !(*host & OPTIMIZER_STATES); // the host updates them where it has the rest
        if (apart || (double)offload_frees(f, o) < excess) { *host = before; }
    }
    free(best), free(turns);
    return most;
}
static inline void offload_all(Offload *o, const OffloadScope *f) {
    int count;
    OffloadTurn *turns = offload_turns_make(f, o, &count);
    for (int k = 0; k < count; k++) { o->host[turns[k].storage] |= turns[k].kinds; }
    free(turns);
}
// What any rank puts on the host lies there on all. Returns whether that is more than this rank asked for, on any. All ranks call it.
static inline bool offload_agree(Offload *o, Comm *comm, int storages) {
    const size_t n = (size_t)storages;
    unsigned char *all = (unsigned char *)checked_calloc((size_t)comm->ranks, n, "offload");
    int more = 0;
    comm_all_gather_small(comm, o->host, all, n);
    for (size_t i = 0; i < n; i++) {
        for (int r = 0; r < comm->ranks; r++) { more |= all[(size_t)r * n + i] & ~o->host[i], o->host[i] |= all[(size_t)r * n + i]; }
    }
    free(all);
    return comm_agree_max(comm, more != 0);
}

// Bytes that move to the device (in) or to the host for an update, for each element of a storage.
static inline int64_t offload_element_bytes(const Store *s, int storage, bool in) {
    const Offload *o = s->policy.offload;
    const int64_t size = (int64_t)dtype_size(s->dtype), word = (int64_t)sizeof(float);
    const bool far = store_param_far(s, storage), masters = s->dtype == DTYPE_FP32; // parameters are their own
    if (!offload_shelved(o, storage)) { return 0; }
    if (!o->by_host) { return offload_states(o, storage) * word + (far && (!in || masters) ? size : 0); }
    return far ? (in ? 0 : word) : in ? size : word + (masters ? size : 0); // parameters; gradients, and parameters that are their own masters
}
// Does it bring parameters from the host? (hpZ: from the copies it does not.)
static inline bool offload_brings(const Store *s, const Action *a) { return a->kind == ACT_PREFETCH && !a->near && store_param_far(s, a->storage); }
// block_bytes: of a block's activations. moved: in, out.
static inline void offload_moves(const Store *s, const Schedule *step, size_t block_bytes, int64_t moved[2]) {
    for (int way = 0; way < 2; way++) {
        moved[way] = 0;
        for (int i = 0; i < s->model->storages; i++) { moved[way] += store_own_elements(s, i) * offload_element_bytes(s, i, !way); }
    }
    for (int i = 0; i < step->count; i++) {
        const Action *a = &step->actions[i];
        if (offload_brings(s, a)) { moved[0] += store_own_elements(s, a->storage) * (int64_t)dtype_size(s->dtype); }
        if (action_of_stash(a->kind)) { moved[a->kind == ACT_EVICT_STASH] += (int64_t)block_bytes; }
    }
}

#endif
