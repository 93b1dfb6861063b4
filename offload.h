// offload.h: granular offloading (Lin et al., M6-10T, arXiv 2110.03888, section 4 of our notes in docs/offload.md): which states lie in
// the host's memory, storage by storage and kind by kind (layout.h: Offload; how they move and are updated: store/host.h).
//
// Order      What costs least goes first, bytes moved per byte that is freed: optimizer states move once a step. Among them the storages whose backward
//            pass comes first (the last blocks), kind by kind where the device updates; all kinds of a storage where the host does, which has them in its
//            hands anyway. Then gradients, which move in each micro-batch. That goes on until the device's budget holds; what still has room then comes back,
//            from what went last.
// Budgets    of the device: all kinds of memory of report.h together. Of the host: what the process takes there, and these states.
// Ranks      have one schedule for all, so what one puts on the host its partners of that storage do, too.
#ifndef OFFLOAD_H
#define OFFLOAD_H

#include "options.h"     // --offload
#include "store/store.h" // what a store takes

// Bytes that the device holds of one of the optimizer's states if it is there.
static inline int64_t offload_bytes(const Store *s, int storage, StateKind kind) {
    const bool none = !store_holds(s, storage) || (kind == STATE_MASTER ? s->dtype == DTYPE_FP32 : kind == STATE_V && !s->adam);
    const int64_t elements = s->policy.stage ? store_own_elements(s, storage) : gpt_storage_elements(s->model, storage);
    return none ? 0 : elements * (int64_t)sizeof(float);
}
// What gradients take of the device, with their rooms.
static inline int64_t offload_gradient_bytes(const Store *s, const Offload *o) {
    ZeroPolicy policy = s->policy;
    policy.offload = o;
    Shelf shelf = store_plan_gradients(s, &policy);
    const int64_t bytes = (int64_t)(shelf.held + shelf.rooms);
    shelf_free(&shelf);
    return bytes;
}
// How much less the device holds with a placement than with all states there.
static inline int64_t offload_frees(const Store *s, const Offload *o) {
    int64_t bytes = o->by_host ? 0 : -MOVING_PIECES * (int64_t)store_room_bytes(s, o);
    for (int i = 0; i < s->model->storages; i++) {
        for (int kind = STATE_MASTER; kind <= STATE_V; kind++) { bytes += offload_has(o, i, (StateKind)kind) ? offload_bytes(s, i, (StateKind)kind) : 0; }
    }
    if (offload_has_any(o, STATE_GRADIENT)) { bytes += offload_gradient_bytes(s, NULL) - offload_gradient_bytes(s, o); }
    return bytes;
}
// The kinds of a storage that go together, the number `turn` of them in a round; 0: there are no more. Rounds follow each other: the optimizer's states of
// all storages, then gradients.
enum { OFFLOAD_ROUNDS = 2, OFFLOAD_TURNS = STATE_V + 1 };
static inline unsigned char offload_turn(const Store *s, const Offload *o, int storage, int round, int turn) {
    unsigned char all = 0;
    if (round) { return turn == 0 && o->gradients && store_holds(s, storage) ? 1 << STATE_GRADIENT : 0; }
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) { all |= (unsigned char)((offload_bytes(s, storage, (StateKind)kind) > 0) << kind); }
    if (o->by_host) { return turn ? 0 : all; }
    return all & (unsigned char)(1 << turn);
}

// Brings back what there is room for, from what went last. most: bytes that are free. fixed: what lies on the host anyway. Where the host updates a
// gradient there, it has the states as well.
static inline void offload_bring_back(Offload *o, const Store *s, double excess, const unsigned char *fixed) {
    for (int round = OFFLOAD_ROUNDS - 1; round >= 0; round--) {
        for (int i = 0; i < s->model->storages; i++) {
            for (int turn = OFFLOAD_TURNS - 1; turn >= 0; turn--) {
                const unsigned char before = o->host[i], back = offload_turn(s, o, i, round, turn) & (unsigned char)~fixed[i];
                if (!round && o->by_host && offload_has(o, i, STATE_GRADIENT)) { continue; }
                o->host[i] &= (unsigned char)~back;
                if ((double)offload_frees(s, o) < excess) { o->host[i] = before; }
            }
        }
    }
}
// Moves states to the host until `excess` bytes of the device are free that would be missing with all states on it, or nothing is left. o: what lies there
// anyway. Returns how many are free at best; o is that placement.
static inline int64_t offload_fill(Offload *o, const Store *s, double excess) {
    const size_t n = (size_t)s->model->storages;
    unsigned char *best = (unsigned char *)checked_malloc(2 * n, "offload"), *fixed = best + n;
    memcpy(best, o->host, n), memcpy(fixed, o->host, n);
    int64_t most = offload_frees(s, o), frees = most;
    for (int round = 0; round < OFFLOAD_ROUNDS; round++) {
        for (int i = (int)n - 1; i >= 0; i--) {
            for (int turn = 0; turn < OFFLOAD_TURNS && (double)frees < excess; turn++) {
                o->host[i] |= offload_turn(s, o, i, round, turn), frees = offload_frees(s, o);
                if (frees > most) { most = frees, memcpy(best, o->host, n); }
            }
        }
    }
    memcpy(o->host, best, n);
    if ((double)most >= excess) { offload_bring_back(o, s, excess, fixed); }
    free(best);
    return most;
}
static inline void offload_all(Offload *o, const Store *s) { // of the optimizer; where updates are delayed, gradients as well, and all masters
    for (int i = 0; i < s->model->storages; i++) {
        for (int turn = 0; turn < OFFLOAD_TURNS; turn++) { o->host[i] |= offload_turn(s, o, i, 0, turn); }
        if (o->delays && store_holds(s, i)) { o->host[i] |= 1 << STATE_MASTER | 1 << STATE_GRADIENT; }
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

// Bytes that move to the device (in) or to the host for an update, for each element of a storage.
static inline int64_t offload_element_bytes(const Store *s, int storage, bool in) {
    const Offload *o = s->policy.offload;
    const int64_t size = (int64_t)dtype_size(s->dtype), word = (int64_t)sizeof(float), gradient = offload_has(o, storage, STATE_GRADIENT) ? word : 0;
    const int64_t states = o ? __builtin_popcount(o->host[storage] & STATES_UPDATED) * word : 0;
    if (!states || !o->by_host) { return states + (in ? gradient : 0); }
    return in ? size : word - gradient + (s->dtype == DTYPE_FP32 && !o->delays ? size : 0); // parameters; gradients, and parameters that are their own masters
}
static inline void offload_moves(const Store *s, const Schedule *schedule, int64_t moved[2]) { // in, out, in a step
    for (int way = 0; way < 2; way++) {
        moved[way] = 0;
        for (int i = 0; i < s->model->storages; i++) { moved[way] += store_own_elements(s, i) * offload_element_bytes(s, i, !way); }
    }
    for (int i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        const bool sum = a->kind == ACT_FETCH_SUM || a->kind == ACT_EVICT_SUM;
        if (sum) { moved[a->kind == ACT_EVICT_SUM] += store_own_elements(s, a->storage) * (int64_t)sizeof(float); }
    }
}

#endif
