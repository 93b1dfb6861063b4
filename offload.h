// offload.h: granular offloading (Lin et al., M6-10T, arXiv 2110.03888, section 4 of our notes in docs/offload.md): which states lie in the host's memory,
// storage by storage and kind by kind (layout.h: Offload; how they move and are updated: store/host.h).
//
// Order      What costs least goes first, bytes moved per byte that is freed: optimizer states move once a step, gradients in each micro-batch, parameters
//            for each use. Among them the storages whose backward pass comes first (the last blocks); of the optimizer kind by kind where the device
//            updates, all kinds of a storage where the host does, which has them in its hands anyway. Then activations, of the first blocks first, which
//            wait longest. That goes on until the device's budget holds; what still has room then comes back, from what went last.
// Gradients  where the device needs less for them, then: not those of private runs, of quantized reductions, or of layers that are measured apart.
// Parameters of blocks, which take turns in rooms; not those that several stages use, nor quantized ones, whose records stay on the device.
// Budgets    of the device: all kinds of memory of report.h together. Of the host: what the process takes there, and these states. Of the optimizer's what the
//            host has no room for lies on disk (store/disk.h), in the same order, kind by kind; where the host has no budget, and a disk is given, all of it.
// Ranks      have one schedule for all, so what one puts on the host its partners of that storage do, too.
#ifndef OFFLOAD_H
#define OFFLOAD_H

#include "options.h"       // --offload
#include "store/planned.h" // what a store takes

// Bytes that the device holds of a state if it is there.
static inline int64_t offload_bytes(const Store *s, int storage, StateKind kind) {
    const bool none = !store_holds(s, storage) || (kind == STATE_MASTER ? s->dtype == DTYPE_FP32 : kind == STATE_V && !s->adam);
    const int64_t elements = s->policy.stage ? store_own_elements(s, storage) : gpt_storage_elements(s->model, storage);
    return none ? 0 : elements * (int64_t)sizeof(float);
}
// Would the device have room for something else if the parameters of a storage lay on the host?
static inline bool offload_has_parameters(const Store *s, int storage) {
    return store_holds(s, storage) && s->layout.holders.turns[storage] && !zero_param_apart(&s->policy);
}
// The same of its gradient: there is less to hold of one that comes and goes.
static inline bool offload_has_gradient(const Store *s, const Offload *o, int storage) {
    const Holders *h = &s->layout.holders;
    return o->gradients && store_holds(s, storage) && !h->tied[storage] && (h->turns[storage] || holders_of(h, storage) > 1);
}
// What may go to the host, of this rank.
typedef struct {
    const Store *store;           // planned with all states on the device
    bool parameters, activations; // besides the optimizer's states
    int64_t block_bytes, slots;   // of a block's activations; micro-batches whose activations are there at once
    int first, end;               // units
} OffloadScope;
// Blocks of this rank whose activations lie on the host (o), or that use a storage (o: NULL).
static inline int64_t offload_blocks(const OffloadScope *f, const Offload *o, int storage) {
    const GptModel *m = f->store->model;
    int64_t blocks = 0;
    for (int u = (int)max_i64(f->first, 1); u < min_i64(f->end, m->units - 1); u++) {
        int used[2];
        gpt_unit_storages(m, u, used), blocks += o ? offload_has(o, used[0], STATE_ACTIVATIONS) : used[0] == storage;
    }
    return blocks;
}
// How much less the device holds with a placement than with all states there.
static inline int64_t offload_frees(const OffloadScope *f, const Offload *o) {
    const Store *s = f->store;
    int64_t bytes = o->by_host ? 0 : -MOVING_PIECES * (int64_t)store_room_bytes(s, o);
    for (int i = 0; i < s->model->storages; i++) {
        for (int kind = STATE_MASTER; kind <= STATE_V; kind++) { bytes += offload_has(o, i, (StateKind)kind) ? offload_bytes(s, i, (StateKind)kind) : 0; }
    }
    for (int gradients = 0; gradients < 2; gradients++) {
        const StateKind kind = gradients ? STATE_GRADIENT : STATE_PARAMETERS;
        Shelf without = store_plan_lent(s, NULL, kind), with = store_plan_lent(s, o, kind);
        bytes += (int64_t)(without.held + without.rooms) - (int64_t)(with.held + with.rooms);
        shelf_free(&without), shelf_free(&with);
    }
    const int64_t stashed = f->slots * offload_blocks(f, o, -1);
    return bytes + (stashed ? (stashed - STASH_ROOMS) * f->block_bytes : 0);
}

// What goes to the host together: kinds (bits) of a storage.
typedef struct {
    int storage;
    unsigned char kinds;
} OffloadTurn;
enum { OFFLOAD_TURNS = 6 }; // of a storage, at most
// All of its states.
static inline unsigned char offload_optimizer(const Store *s, int storage) {
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
    for (int i = s->model->storages - 1; i >= 0; i--) { n = offload_add_turn(turns, n, i, (unsigned char)(offload_has_gradient(s, o, i) << STATE_GRADIENT)); }
    for (int i = s->model->storages - 1; i >= 0 && f->parameters; i--) {
        n = offload_add_turn(turns, n, i, (unsigned char)(offload_has_parameters(s, i) << STATE_PARAMETERS));
    }
    for (int i = 0; i < s->model->storages && f->activations; i++) { // those that wait longest
        n = offload_add_turn(turns, n, i, (unsigned char)((offload_blocks(f, NULL, i) > 0) << STATE_ACTIVATIONS));
    }
    return n;
}
static inline OffloadTurn *offload_turns_make(const OffloadScope *f, const Offload *o, int *count) {
    OffloadTurn *turns = (OffloadTurn *)checked_malloc((size_t)(OFFLOAD_TURNS * f->store->model->storages + 1) * sizeof(OffloadTurn), "offload");
    *count = offload_turns(f, o, turns);
    return turns;
}

// Of the host: how much less it holds with states on disk than with all of these there.
static inline int64_t offload_disk_frees(const OffloadScope *f, const Offload *o) {
    const Store *s = f->store;
    int64_t bytes = -(int64_t)store_disk_rooms_bytes(store_disk_room_bytes(s, o));
    for (int i = 0; i < s->model->storages; i++) { bytes += offload_stored(o, i) * store_own_elements(s, i) * (int64_t)sizeof(float); }
    return bytes;
}
// What goes on from there to the disk, kind by kind.
static inline OffloadTurn *offload_disk_turns_make(const Store *s, const Offload *o, int *count) {
    OffloadTurn *turns = (OffloadTurn *)checked_malloc((size_t)(OFFLOAD_TURNS * s->model->storages + 1) * sizeof(OffloadTurn), "offload");
    *count = 0;
    for (int i = s->model->storages - 1; i >= 0; i--) {
        const unsigned char all = store_own_elements(s, i) ? o->host[i] : 0;
        for (int kind = STATE_MASTER; kind <= STATE_V; kind++) { *count = offload_add_turn(turns, *count, i, all & (unsigned char)(1 << kind)); }
    }
    return turns;
}

// A place that has too little room.
typedef struct {
    unsigned char *gone; // [storages] bits of what has left it
    int64_t (*frees)(const OffloadScope *f, const Offload *o);
    OffloadTurn *turns; // [count] what may leave it, in this order
    int count;
} OffloadTier;
static inline OffloadTier offload_device(Offload *o, const OffloadScope *f) {
    OffloadTier tier = {o->host, offload_frees, NULL, 0};
    tier.turns = offload_turns_make(f, o, &tier.count);
    return tier;
}
static inline OffloadTier offload_host(Offload *o, const OffloadScope *f) {
    OffloadTier tier = {o->disk, offload_disk_frees, NULL, 0};
    tier.turns = offload_disk_turns_make(f->store, o, &tier.count);
    return tier;
}
// Moves states from there until `excess` bytes are free that would be missing with all of them in it, or nothing is left. o: what has left anyway. Returns
// how many are free at best; o is that placement.
static inline int64_t offload_fill(OffloadTier tier, const Offload *o, const OffloadScope *f, double excess) {
    const size_t n = (size_t)f->store->model->storages;
    unsigned char *best = (unsigned char *)checked_malloc(2 * n, "offload"), *fixed = best + n;
    memcpy(best, tier.gone, n), memcpy(fixed, tier.gone, n);
    int64_t most = tier.frees(f, o), frees = most;
    for (int k = 0; k < tier.count && (double)frees < excess; k++) {
        tier.gone[tier.turns[k].storage] |= tier.turns[k].kinds, frees = tier.frees(f, o);
        if (frees > most) { most = frees, memcpy(best, tier.gone, n); }
    }
    memcpy(tier.gone, best, n);
    for (int k = tier.count - 1; k >= 0 && (double)most >= excess; k--) {
        unsigned char *gone = &tier.gone[tier.turns[k].storage];
        const unsigned char before = *gone;
        *gone &= (unsigned char)~(tier.turns[k].kinds & ~fixed[tier.turns[k].storage]);
        const bool shelved = *gone & ((1 << HOST_KINDS) - 1); // the host updates what it has where it has the rest
        const bool apart = o->by_host && shelved && !(*gone & OPTIMIZER_STATES);
        if (apart || (double)tier.frees(f, o) < excess) { *gone = before; }
    }
    free(best), free(tier.turns);
    return most;
}
// Where updates are apart from the parameters in use, gradients as well, and all masters.
static inline void offload_keep_gradients(Offload *o, const Store *s) {
    for (int i = 0; i < s->model->storages; i++) {
        if (o->when != UPDATES_LAST && store_holds(s, i)) { o->host[i] |= 1 << STATE_MASTER | 1 << STATE_GRADIENT; }
    }
}
static inline void offload_all(OffloadTier tier) {
    for (int k = 0; k < tier.count; k++) { tier.gone[tier.turns[k].storage] |= tier.turns[k].kinds; }
    free(tier.turns);
}
// What any rank puts on the host, or on disk, lies there on all. Returns whether that is more than this rank asked for, on any. All ranks call it.
static inline bool offload_agree(unsigned char *gone, Comm *comm, int storages) {
    const size_t n = (size_t)storages;
    unsigned char *all = (unsigned char *)checked_calloc((size_t)comm->ranks, n, "offload");
    int more = 0;
    comm_all_gather_small(comm, gone, all, n);
    for (size_t i = 0; i < n; i++) {
        for (int r = 0; r < comm->ranks; r++) { more |= all[(size_t)r * n + i] & ~gone[i], gone[i] |= all[(size_t)r * n + i]; }
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
    const int64_t gradient = offload_has(o, storage, STATE_GRADIENT) ? word : 0;
    if (!o->by_host) { return offload_states(o, storage) * word + (in ? gradient : 0) + (far && (!in || masters) ? size : 0); }
    if (in) { return far ? 0 : size; }
    return word - gradient + (!far && masters && o->when == UPDATES_LAST ? size : 0); // gradients, and parameters that are their own masters
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
        const bool sum = a->kind == ACT_FETCH_SUM || a->kind == ACT_EVICT_SUM;
        if (sum) { moved[a->kind == ACT_EVICT_SUM] += store_own_elements(s, a->storage) * (int64_t)sizeof(float); }
        if (offload_brings(s, a)) { moved[0] += store_own_elements(s, a->storage) * (int64_t)dtype_size(s->dtype); }
        if (action_of_stash(a->kind)) { moved[a->kind == ACT_EVICT_STASH] += (int64_t)block_bytes; }
    }
}

#endif
