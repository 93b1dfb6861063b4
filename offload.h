// offload.h: granular offloading (Lin et al., M6-10T, arXiv 2110.03888, section 4 of our notes in docs/offload.md): which states of the optimizer lie in
// the host's memory, storage by storage and kind by kind (layout.h: Offload; how they move and are updated: store/host.h).
//
// Order      What costs least goes first, bytes moved per byte that is freed: optimizer states move once a step. Among them the storages whose backward
//            pass comes first (the last blocks), kind by kind where the device updates; all kinds of a storage where the host does, which has them in its
//            hands anyway. That goes on until the device's budget holds; what still has room then comes back, from what went last.
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

// Moves states to the host until `excess` bytes of the device are free that would be missing with all states on it, or nothing is left. o: what lies there
// anyway. Returns how many are free at best; o is that placement.
static inline int64_t offload_fill(Offload *o, const Store *s, double excess) {
    const size_t n = (size_t)s->model->storages;
    unsigned char *best = (unsigned char *)checked_malloc(2 * n, "offload"), *fixed = best + n;
    memcpy(best, o->host, n), memcpy(fixed, o->host, n);
    int64_t most = offload_frees(s, o), frees = most;
    for (int i = (int)n - 1; i >= 0; i--) {
        for (int turn = 0; turn <= STATE_V && (double)frees < excess; turn++) {
            o->host[i] |= offload_turn(s, o, i, turn), frees = offload_frees(s, o);
            if (frees > most) { most = frees, memcpy(best, o->host, n); }
        }
    }
    memcpy(o->host, best, n);
    for (int i = 0; i < (int)n && (double)most >= excess; i++) {
        for (int turn = STATE_V; turn >= 0; turn--) {
            const unsigned char before = o->host[i], back = offload_turn(s, o, i, turn) & (unsigned char)~fixed[i];
            o->host[i] &= (unsigned char)~back;
            if ((double)offload_frees(s, o) < excess) { o->host[i] = before; }
        }
    }
    free(best);
    return most;
}
static inline void offload_all(Offload *o, const Store *s) {
    for (int i = 0; i < s->model->storages; i++) {
        for (int turn = 0; turn <= STATE_V; turn++) { o->host[i] |= offload_turn(s, o, i, turn); }
    }
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
