// offload.h: granular offloading (Lin et al., M6-10T, arXiv 2110.03888, section 4 of our notes in docs/offload.md): which states of the optimizer lie in
// the host's memory, storage by storage and kind by kind (layout.h: Offload; how they move and are updated: store/host.h).
//
// Order      What costs least goes first, bytes moved per byte that is freed: optimizer states move once a step. Among them the storages whose backward
//            pass comes first (the last blocks), kind by kind where the device updates; all kinds of a storage where the host does, which has them in its
//            hands anyway. That goes on until the device's budget holds; what still has room then comes back, from what went last.
// Budgets    of the device: all kinds of memory of report.h together. Of the host: what the process takes there, and these states. What the host has no room
//            for lies on disk (store/disk.h), in the same order, kind by kind; where the host has no budget, and a disk is given, all of it.
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
// How much less the device holds with a placement than with all states there.
static inline int64_t offload_frees(const Store *s, const Offload *o) {
    int64_t bytes = o->by_host ? 0 : -MOVING_PIECES * (int64_t)store_room_bytes(s, o);
    for (int i = 0; i < s->model->storages; i++) {
        for (int kind = STATE_MASTER; kind <= STATE_V; kind++) { bytes += offload_has(o, i, (StateKind)kind) ? offload_bytes(s, i, (StateKind)kind) : 0; }
    }
    return bytes;
}
// The kinds of a storage that go together, the number `turn` of them; 0: there are no more.
static inline unsigned char offload_turn(const Store *s, const Offload *o, int storage, int turn) {
    unsigned char all = 0;
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) { all |= (unsigned char)((offload_bytes(s, storage, (StateKind)kind) > 0) << kind); }
    if (o->by_host) { return turn ? 0 : all; }
    return turn <= STATE_V ? all & (unsigned char)(1 << turn) : 0;
}

// Of the host: how much less it holds with states on disk than with all of these there; and the kinds of a storage that go there, one in a turn.
static inline int64_t offload_disk_frees(const Store *s, const Offload *o) {
    int64_t bytes = -(int64_t)store_disk_rooms_bytes(store_disk_room_bytes(s, o));
    for (int i = 0; i < s->model->storages; i++) { bytes += offload_stored(o, i) * store_own_elements(s, i) * (int64_t)sizeof(float); }
    return bytes;
}
static inline unsigned char offload_disk_turn(const Store *s, const Offload *o, int storage, int turn) {
    return store_own_elements(s, storage) ? o->host[storage] & (unsigned char)(1 << turn) : 0;
}
// A place that has too little room, and the next one, which takes what goes.
typedef struct {
    unsigned char *gone; // [storages] bits of what has
    int64_t (*frees)(const Store *s, const Offload *o);
    unsigned char (*turn)(const Store *s, const Offload *o, int storage, int turn);
} OffloadTier;

// Moves states to the next place until `excess` bytes are free that would be missing with all of them here, or nothing is left. o: what lies there anyway.
// Returns how many are free at best; o is that placement.
static inline int64_t offload_relieve(const OffloadTier *tier, const Offload *o, const Store *s, double excess) {
    const size_t n = (size_t)s->model->storages;
    unsigned char *best = (unsigned char *)checked_malloc(2 * n, "offload"), *fixed = best + n;
    memcpy(best, tier->gone, n), memcpy(fixed, tier->gone, n);
    int64_t most = tier->frees(s, o), frees = most;
    for (int i = (int)n - 1; i >= 0; i--) {
        for (int turn = 0; turn <= STATE_V && (double)frees < excess; turn++) {
            tier->gone[i] |= tier->turn(s, o, i, turn), frees = tier->frees(s, o);
            if (frees > most) { most = frees, memcpy(best, tier->gone, n); }
        }
    }
    memcpy(tier->gone, best, n);
    for (int i = 0; i < (int)n && (double)most >= excess; i++) {
        for (int turn = STATE_V; turn >= 0; turn--) {
            const unsigned char before = tier->gone[i], back = tier->turn(s, o, i, turn) & (unsigned char)~fixed[i];
            tier->gone[i] &= (unsigned char)~back;
            if ((double)tier->frees(s, o) < excess) { tier->gone[i] = before; }
        }
    }
    free(best);
    return most;
}
static inline int64_t offload_fill(Offload *o, const Store *s, double excess) {
    const OffloadTier device = {o->host, offload_frees, offload_turn};
    return offload_relieve(&device, o, s, excess);
}
static inline int64_t offload_fill_disk(Offload *o, const Store *s, double excess) {
    const OffloadTier host = {o->disk, offload_disk_frees, offload_disk_turn};
    return offload_relieve(&host, o, s, excess);
}
static inline void offload_all(Offload *o, const Store *s) {
    for (int i = 0; i < s->model->storages; i++) {
        for (int turn = 0; turn <= STATE_V; turn++) { o->host[i] |= offload_turn(s, o, i, turn); }
    }
}
static inline void offload_all_to_disk(Offload *o, const Store *s) {
    for (int i = 0; i < s->model->storages; i++) {
        for (int turn = 0; turn <= STATE_V; turn++) { o->disk[i] |= offload_disk_turn(s, o, i, turn); }
    }
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

// Bytes that move to the device (in) or to the host in a step, for each element of a storage.
static inline int64_t offload_element_bytes(const Store *s, int storage, bool in) {
    const Offload *o = s->policy.offload;
    const int64_t states = o ? __builtin_popcount(o->host[storage]) : 0, size = (int64_t)dtype_size(s->dtype), word = (int64_t)sizeof(float);
    if (!states || !o->by_host) { return states * word; }
    return in ? size : word + (s->dtype == DTYPE_FP32 ? size : 0); // parameters; gradients, and parameters that are their own masters
}
static inline void offload_moves(const Store *s, int64_t moved[2]) { // in, out
    for (int way = 0; way < 2; way++) {
        moved[way] = 0;
        for (int i = 0; i < s->model->storages; i++) { moved[way] += store_own_elements(s, i) * offload_element_bytes(s, i, !way); }
    }
}

#endif
