// offload.h: granular offloading (Lin et al., M6-10T, arXiv 2110.03888; docs/offload.md): which
// states are stored on the host or on disk, chosen for each storage and kind (policy.h: Offload).
// state/update.h moves and updates them.
//
// Order       States whose offloading costs least go first, in bytes moved for each byte freed:
//             optimizer states move once a step, gradients in each micro-batch, parameters for each
//             use. Among these the storages whose backward pass is first (the last blocks).
//             Optimizer states go kind by kind if the device updates, all kinds of a storage
//             together if the CPU does, which needs them all anyway. Activations follow, those of
//             the first blocks first, because they wait longest (with recomputation, the inputs of
//             blocks). This continues until the device's budget holds. Then states that still fit
//             return, the last to go first.
// Gradients   are offloaded where the device then needs less memory. Those of private runs and of
//             quantized reductions stay.
// Parameters  of blocks that share slots are offloaded. Those that several stages use stay, and so
//             do quantized ones, whose records are on the device.
// Budgets     The device's budget counts all kinds of memory of report.h. The host's counts what
//             the process takes, and these states. Optimizer states that exceed the host's budget
//             go to disk (state/disk.h), in the same order, kind by kind. With a disk and no host
//             budget, all of them go to disk.
// Ranks       run one schedule, so the ranks of a storage offload the same kinds of it.
#ifndef OFFLOAD_H
#define OFFLOAD_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "model/gpt.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "state/layout.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/table.h"
#include "zero.h"

// Fills what is decided here: which states are on the host and on the disk, as was chosen, where
// the sums of gradients are, and in how many pieces states move.
static inline void offload_fill(StatePlan *s) {
    const Offload *o = s->policy.offload;
    for (int i = 0; i < s->model->storages; i++) {
        StorageRow *row = &s->rows[i];
        const int n = row->owners->all.n;
        row->host = o ? o->host[i] : 0;
        row->disk = o && o->disk ? o->disk[i] : 0;
        row->sum = !row_offloads(row, STATE_GRADIENT) ? SUM_STAYS
                   : n == 1 && row->turns             ? SUM_COMES_BACK
                                                      : SUM_IS_ADDED;
        const int64_t longest =
            store_slice(gpt_storage_elements(s->model, i), n, zero_grain(&s->policy));
        row->pieces =
            row_offloads_states(row) ? (int)ceil_div(longest, offload_piece(s->model)) : 0;
        row->cpu_updates = row->pieces && o->cpu_update;
    }
}

// Would offloading a state of the optimizer free device memory?
static inline bool offload_has_state(const StatePlan *s, int storage, StateKind kind) {
    const StateBuffer *b = &s->device[kind];
    const StorageRow *row = &s->rows[storage];
    return store_holds(s, storage) && b->held && store_place(s, kind, storage) == PLACE_DEVICE &&
           (b->layout == BUFFER_FULL || buffer_slice_bytes(b, row));
}
// Would offloading the parameters of a storage free device memory?
static inline bool offload_has_parameters(const StatePlan *s, int storage) {
    return store_holds(s, storage) && s->rows[storage].turns &&
           !s->rows[storage].states[STATE_PARAMETERS].apart;
}
// Would offloading its gradient? Not if a whole gradient must stay on the device anyway.
static inline bool offload_has_gradient(const StatePlan *s, const Offload *o, int storage) {
    const StorageRow *row = &s->rows[storage];
    return o->gradients && store_holds(s, storage) && !row->tied &&
           (row->turns || row->owners->all.n > 1);
}
// What this rank may offload.
typedef struct {
    const StatePlan *store;       // planned with all states on the device
    bool parameters, activations; // allowed in addition to optimizer states
    // bytes of one block's offloaded activations; micro-batches in flight
    int64_t block_bytes, in_flight;
    RankUnits units; // of this rank
    bool inputs;     // the activations are the inputs of blocks
} OffloadScope;
// May the activations of a block leave the device? An input that the rank has received may not.
static inline bool offload_has_activations(const OffloadScope *f, int unit) {
    return units_have(&f->units, unit) && !(f->inputs && units_receiver(&f->units, unit) >= 0);
}

// -------------------------------------------------------------------------------------------------
// Bytes freed

// Returns the bytes of the device's buffer of a kind, with its slots.
static inline int64_t offload_leaves(const StatePlan *s, StateKind kind) {
    StateBuffer b = zero_fill_kind(s, kind);
    buffer_plan(&b, s->rows, s->model->storages, kind);
    return b.held + b.slot_bytes;
}
// Returns how many bytes fewer the device needs than with all states in place. tried: the plan,
// with rows of its own, which are filled as they would be.
static inline int64_t offload_device_frees(const OffloadScope *f, const StatePlan *tried) {
    const GptModel *m = tried->model;
    int64_t bytes = tried->policy.offload->cpu_update
                        ? 0
                        : -MOVING_PIECES * (int64_t)store_offload_buffer_bytes(tried);
    int64_t stashed = 0;
    for (int u = 1; u < m->units - 1; u++) {
        const int storage = gpt_storage_of_layer(m, u - 1);
        stashed += offload_has_activations(f, u) * f->in_flight *
                   row_offloads(&tried->rows[storage], STATE_ACTIVATIONS);
    }
    for (int kind = STATE_MASTER; kind <= STATE_PARAMETERS; kind++) {
        const StateBuffer *all = &f->store->device[kind];
        bytes += (int64_t)(all->held + all->slot_bytes) - offload_leaves(tried, kind);
    }
    return bytes + (stashed ? (stashed - STASH_SLOTS) * f->block_bytes : 0);
}
// Returns the bytes by which states on disk reduce the host's memory.
static inline int64_t offload_disk_frees(const StatePlan *s) {
    int64_t bytes = -(int64_t)store_disk_buffers_bytes(store_disk_buffer_bytes(s));
    for (int i = 0; i < s->model->storages; i++) {
        for (int kind = 0; kind < OPTIMIZER_KINDS; kind++) {
            bytes += (s->rows[i].disk >> kind & 1) * store_bytes(s, kind, store_own_elements(s, i));
        }
    }
    return bytes;
}

// -------------------------------------------------------------------------------------------------
// What is offloaded, and in which order

// Kinds (bits) of a storage that are offloaded together.
typedef struct {
    int storage;
    unsigned char kinds;
} OffloadTurn;
enum { OFFLOAD_TURNS = 6 }; // of a storage, at most
// A level of memory that has too little space: the device or the host.
typedef struct {
    const OffloadScope *scope;
    StatePlan tried;     // the plan of the scope, with rows of its own
    unsigned char *gone; // [storages] bits of kinds that have left the level
    OffloadTurn *turns;  // [count] what may leave it, in order
    int count;
} OffloadTier;
static inline void tier_add(OffloadTier *t, int storage, int kinds) {
    const OffloadTurn turn = {storage, (unsigned char)kinds};
    if (kinds) { t->turns[t->count++] = turn; }
}
// Lists what may leave the device.
static inline void tier_list_device(OffloadTier *t) {
    const OffloadScope *f = t->scope;
    const StatePlan *s = f->store;
    const Offload *o = t->tried.policy.offload;
    const int storages = s->model->storages;
    bool *used = new_array(bool, storages, "offload"); // by a block of this rank
    for (int u = 1; u < s->model->units - 1; u++) {
        used[gpt_storage_of_layer(s->model, u - 1)] |= offload_has_activations(f, u);
    }
    for (int i = storages - 1; i >= 0; i--) {
        int all = 0;
        for (int kind = STATE_MASTER; kind < OPTIMIZER_KINDS; kind++) {
            const int bit = offload_has_state(s, i, kind) << kind;
            all |= bit;
            if (!o->cpu_update) { tier_add(t, i, bit); }
        }
        if (o->cpu_update) { tier_add(t, i, all); }
    }
    for (int i = storages - 1; i >= 0; i--) {
        tier_add(t, i, offload_has_gradient(s, o, i) << STATE_GRADIENT);
    }
    for (int i = storages - 1; i >= 0 && f->parameters; i--) {
        tier_add(t, i, offload_has_parameters(s, i) << STATE_PARAMETERS);
    }
    for (int i = 0; i < storages && f->activations; i++) { // those that wait longest
        tier_add(t, i, used[i] << STATE_ACTIVATIONS);
    }
    free(used);
}
// Lists what moves on from the host to the disk, kind by kind.
static inline void tier_list_host(OffloadTier *t) {
    const StatePlan *s = t->scope->store;
    for (int i = s->model->storages - 1; i >= 0; i--) {
        const int all = store_own_elements(s, i) ? t->tried.policy.offload->host[i] : 0;
        for (int kind = STATE_MASTER; kind < OPTIMIZER_KINDS; kind++) {
            tier_add(t, i, all & 1 << kind);
        }
    }
}
// Makes the list of a level: of the host (stored), or of the device. tier_free frees it.
static inline OffloadTier offload_tier(Offload *o, const OffloadScope *f, bool stored) {
    const int most = OFFLOAD_TURNS * f->store->model->storages;
    OffloadTier tier = {.scope = f,
                        .tried = *f->store,
                        .gone = stored ? o->disk : o->host,
                        .turns = new_array(OffloadTurn, most, "offload")};
    const size_t n = f->store->model->storages;
    tier.tried.rows = new_array(StorageRow, n, "offload");
    memcpy(tier.tried.rows, f->store->rows, n * sizeof(StorageRow));
    tier.tried.policy.offload = o;
    (stored ? tier_list_host : tier_list_device)(&tier);
    return tier;
}
static inline void tier_free(OffloadTier *t) { free_all(t->tried.rows, t->turns); }
// Returns the bytes that are free in the level because of what has left it.
static inline int64_t tier_frees(OffloadTier *t) {
    const Offload *o = t->tried.policy.offload;
    offload_fill(&t->tried);
    return t->gone == o->disk ? offload_disk_frees(&t->tried)
                              : offload_device_frees(t->scope, &t->tried);
}
// Returns states that still fit, the last offloaded first, except for `fixed` ones. If the CPU
// updates, other states of a storage may be offloaded only together with its optimizer states.
static inline void tier_return_some(OffloadTier *t, const unsigned char *fixed, double excess) {
    for (int k = t->count - 1; k >= 0; k--) {
        const int storage = t->turns[k].storage;
        unsigned char *gone = &t->gone[storage];
        const unsigned char before = *gone;
        *gone &= ~t->turns[k].kinds | fixed[storage];
        if (*gone == before) { continue; }
        const bool apart = t->tried.policy.offload->cpu_update && *gone & ((1 << HOST_KINDS) - 1) &&
                           !(*gone & OPTIMIZER_STATES);
        if (apart || tier_frees(t) < excess) { *gone = before; }
    }
}
// Offloads states from this level until `excess` bytes, by which the budget would be exceeded with
// all of them in place, are free, or nothing is left to offload. Returns the largest number of
// bytes freed; the placement is the one that frees them. Frees the list.
static inline int64_t offload_until(OffloadTier tier, double excess) {
    const size_t n = tier.scope->store->model->storages;
    unsigned char *fixed = new_array(unsigned char, 2 * n, "offload"), *best = fixed + n;
    int64_t frees = tier_frees(&tier), most = frees;
    memcpy(fixed, tier.gone, n); // offloaded in any case
    memcpy(best, tier.gone, n);
    for (int k = 0; k < tier.count && frees < excess; k++) {
        unsigned char *gone = &tier.gone[tier.turns[k].storage];
        if (!(tier.turns[k].kinds & ~*gone)) { continue; }
        *gone |= tier.turns[k].kinds;
        frees = tier_frees(&tier);
        if (frees <= most) { continue; }
        most = frees;
        memcpy(best, tier.gone, n);
    }
    memcpy(tier.gone, best, n);
    if (most >= excess) { tier_return_some(&tier, fixed, excess); }
    free(fixed);
    tier_free(&tier);
    return most;
}
// With delayed updates, offloads all masters and gradients: updates must not touch the parameters
// in use.
static inline void offload_keep_gradients(Offload *o, const StatePlan *s) {
    for (int i = 0; i < s->model->storages; i++) {
        if (o->delays && store_holds(s, i)) {
            o->host[i] |= 1 << STATE_MASTER | 1 << STATE_GRADIENT;
        }
    }
}
static inline void offload_all(OffloadTier tier) {
    for (int k = 0; k < tier.count; k++) {
        tier.gone[tier.turns[k].storage] |= tier.turns[k].kinds;
    }
    tier_free(&tier);
}
// Offloads on all ranks what any rank offloads. Returns true if that is more than some rank had
// chosen. All ranks call it. comm NULL: a rank plans alone.
static inline bool offload_agree(unsigned char *gone, Comm *comm, int storages) {
    if (!comm) { return false; }
    const size_t n = storages;
    unsigned char *all = (unsigned char *)checked_calloc(comm->ranks, n, "offload");
    int more = 0;
    comm_all_gather_small(comm, gone, all, n);
    for (size_t i = 0; i < n; i++) {
        for (int r = 0; r < comm->ranks; r++) {
            more |= all[r * n + i] & ~gone[i];
            gone[i] |= all[r * n + i];
        }
    }
    free(all);
    return comm_agree_max(comm, more != 0);
}

// Does the action copy parameters from the host? A gather from hpZ secondary copies does not.
static inline bool offload_brings(const StatePlan *s, const Action *a) {
    return a->kind == ACT_PREFETCH && !a->secondary &&
           store_on_host(s, STATE_PARAMETERS, a->storage);
}
// Returns the bytes that an update copies for n elements of a storage. second: with the second part
// of the update (state/matrices.h).
static inline HostTraffic offload_update_bytes(const StatePlan *s, int storage, int64_t n,
                                               bool second) {
    PiecePart parts[PIECE_PARTS];
    HostTraffic bytes = {0, 0};
    for (int k = store_piece_parts(s, storage, second, parts) - 1; k >= 0; k--) {
        bytes.to_device += parts[k].in ? store_bytes(s, parts[k].kind, n) : 0;
        bytes.to_host += parts[k].out ? store_bytes(s, parts[k].kind, n) : 0;
    }
    return bytes;
}
// Returns the bytes that the updates of a step copy.
static inline HostTraffic offload_update_traffic(const StatePlan *s) {
    HostTraffic t = {0, 0};
    for (int i = 0; i < s->model->storages; i++) {
        for (int second = 0; second < (store_in_parts(s, i) ? 2 : 1); second++) {
            const HostTraffic all = offload_update_bytes(s, i, store_own_elements(s, i), second);
            t.to_device += all.to_device;
            t.to_host += all.to_host;
        }
    }
    return t;
}
// Adds the bytes that a schedule copies beside these. block_bytes: of one block's offloaded
// activations.
static inline void offload_add_traffic(const StatePlan *s, const Schedule *schedule,
                                       size_t block_bytes, HostTraffic *sum) {
    HostTraffic t = *sum;
    for (int i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        const int64_t own = a->storage >= 0 ? store_own_elements(s, a->storage) : 0;
        t.to_device += a->kind == ACT_FETCH_SUM     ? store_bytes(s, STATE_GRADIENT, own)
                       : offload_brings(s, a)       ? store_bytes(s, STATE_PARAMETERS, own)
                       : a->kind == ACT_FETCH_STASH ? (int64_t)block_bytes
                                                    : 0;
        t.to_host += a->kind == ACT_EVICT_SUM     ? store_bytes(s, STATE_GRADIENT, own)
                     : a->kind == ACT_EVICT_STASH ? (int64_t)block_bytes
                                                  : 0;
    }
    *sum = t;
}

#endif
