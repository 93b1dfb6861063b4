// offload.h: granular offloading (Lin et al., M6-10T, arXiv 2110.03888; docs/offload.md): which
// states are stored on the host or on disk, chosen for each storage and kind (policy.h: Offload).
// state/host.h moves and updates them.
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

#include "options.h"       // --offload
#include "state/planned.h" // bytes that a store needs

// Returns the bytes that the device holds of a state if it is not offloaded.
static inline int64_t offload_bytes(const Store *s, int storage, StateKind kind) {
    const bool none =
        !store_holds(s, storage) ||
        (kind == STATE_MASTER ? s->dtype == DTYPE_FP32 : !optimizer_keeps(s->optimizer, kind));
    const int64_t elements =
        s->policy.stage ? store_own_elements(s, storage) : gpt_storage_elements(s->model, storage);
    return none ? 0 : elements * (int64_t)sizeof(float);
}
// Would offloading the parameters of a storage free device memory?
static inline bool offload_has_parameters(const Store *s, int storage) {
    return store_holds(s, storage) && s->layout.owners.turns[storage] &&
           !zero_param_apart(&s->policy);
}
// Would offloading its gradient? Not if a whole gradient must stay on the device anyway.
static inline bool offload_has_gradient(const Store *s, const Offload *o, int storage) {
    const Owners *h = &s->layout.owners;
    return o->gradients && store_holds(s, storage) && !h->tied[storage] &&
           (h->turns[storage] || holders_of(h, storage) > 1);
}
// What this rank may offload.
typedef struct {
    const Store *store;           // planned with all states on the device
    bool parameters, activations; // allowed in addition to optimizer states
    // bytes of one block's offloaded activations; micro-batches in flight
    int64_t block_bytes, in_flight;
    int first, end; // units of this rank: [first, end)
} OffloadScope;

// -------------------------------------------------------------------------------------------------
// Bytes freed
// Totals are updated as states leave and return, storage by storage: planning everything again for
// each change would take too long.

// A buffer with slots for whole arrays: of parameters or of gradients.
typedef struct {
    StateKind kind;
    StateBuffer buffer;
    State *states; // [storages]
    int gone;      // number of storages whose slices are on the host
    BufferSum sum;
} GatheredBuffer;
static inline GatheredBuffer gathered_make(const Store *s, const Offload *o, StateKind kind) {
    const size_t n = (size_t)s->model->storages;
    GatheredBuffer g;
    memset(&g, 0, sizeof g);
    g.kind = kind;
    g.states = new_array(State, n, "offload");
    g.buffer = store_fill_kind(s, o, kind, g.states);
    g.sum = buffer_sum(&s->layout, &g.buffer, g.states);
    for (size_t i = 0; i < n; i++) { g.gone += g.states[i].place == PLACE_HOST; }
    return g;
}
static inline void gathered_free(GatheredBuffer *g) {
    free(g->states);
    buffer_sum_free(&g->sum);
}
static inline int64_t gathered_bytes(const GatheredBuffer *g, const Store *s) {
    return buffer_sum_bytes(&g->sum, &s->layout, &g->buffer);
}
// Updates the records after the placement of a storage has changed.
static inline void gathered_follow(GatheredBuffer *g, const Store *s, const Offload *o,
                                   int storage) {
    State *x = &g->states[storage];
    const bool on_host = offload_has(o, storage, g->kind);
    if (on_host == (x->place == PLACE_HOST)) { return; }
    g->gone += on_host ? 1 : -1;
    // the first storage to leave, or the last to return, may change the records of all others
    if (g->gone == on_host) {
        const StateKind kind = g->kind;
        gathered_free(g);
        *g = gathered_make(s, o, kind);
        return;
    }
    buffer_sum_add(&g->sum, &s->layout, &g->buffer, x, storage, -1);
    store_fill_record(s, o, g->kind, g->buffer.layout, storage, x);
    buffer_sum_add(&g->sum, &s->layout, &g->buffer, x, storage, 1);
}

typedef struct {
    const OffloadScope *scope;
    const Offload *placed;
    // true: counts host memory that states on disk free; false: device memory that states on the
    // host free
    bool stored;
    int64_t bytes; // of offloaded optimizer states
    Largest piece; // bytes of each storage's longest piece in a buffer
    // of the device
    int *blocks;     // [storages] blocks of this rank that use it
    int64_t stashed; // number of these blocks whose activations are offloaded
    GatheredBuffer params, gradients;
    int64_t gathered; // bytes of both buffers with all states on the device
} OffloadTotals;

// Counts this rank's blocks that use each storage.
static inline int *offload_blocks(const OffloadScope *f) {
    const GptModel *m = f->store->model;
    int *blocks = new_array(int, m->storages, "offload");
    for (int u = (int)max_i64(f->first, 1); u < min_i64(f->end, m->units - 1); u++) {
        int used[2];
        gpt_unit_storages(m, u, used);
        blocks[used[0]]++;
    }
    return blocks;
}
// Adds what is offloaded of a storage to the totals (times 1), or subtracts it (-1).
static inline void totals_count(OffloadTotals *t, int storage, int times) {
    const Store *s = t->scope->store;
    if (t->stored) {
        t->bytes += times * offload_stored(t->placed, storage) * store_own_elements(s, storage) *
                    (int64_t)sizeof(float);
        return;
    }
    for (int kind = STATE_MASTER; kind < OPTIMIZER_KINDS; kind++) {
        if (offload_has(t->placed, storage, (StateKind)kind)) {
            t->bytes += times * offload_bytes(s, storage, (StateKind)kind);
        }
    }
    if (offload_has(t->placed, storage, STATE_ACTIVATIONS)) {
        t->stashed += times * t->blocks[storage];
    }
}
static inline void totals_count_piece(OffloadTotals *t, int storage) {
    int64_t longest = store_piece_bytes(t->scope->store, t->placed, storage);
    if (t->stored) { store_all_stored_bytes(t->scope->store, t->placed, storage, &longest); }
    largest_set(&t->piece, storage, longest);
}
static inline OffloadTotals totals_make(const OffloadScope *f, const Offload *o, bool stored) {
    const Store *s = f->store;
    OffloadTotals t;
    memset(&t, 0, sizeof t);
    t.scope = f;
    t.placed = o;
    t.stored = stored;
    t.piece = largest_make(s->model->storages);
    t.blocks = offload_blocks(f);
    for (int i = 0; i < s->model->storages; i++) {
        totals_count(&t, i, 1);
        totals_count_piece(&t, i);
    }
    t.params = gathered_make(s, NULL, STATE_PARAMETERS);
    t.gradients = gathered_make(s, NULL, STATE_GRADIENT);
    t.gathered = gathered_bytes(&t.params, s) + gathered_bytes(&t.gradients, s);
    gathered_free(&t.params);
    gathered_free(&t.gradients);
    t.params = gathered_make(s, o, STATE_PARAMETERS);
    t.gradients = gathered_make(s, o, STATE_GRADIENT);
    return t;
}
static inline void totals_free(OffloadTotals *t) {
    free(t->piece.node);
    free(t->blocks);
    gathered_free(&t->params);
    gathered_free(&t->gradients);
}
// Sets which states of a storage are offloaded. gone: [storages] the table of the placement.
static inline void totals_set(OffloadTotals *t, unsigned char *gone, int storage,
                              unsigned char bits) {
    if (gone[storage] == bits) { return; }
    totals_count(t, storage, -1);
    gone[storage] = bits;
    totals_count(t, storage, 1);
    totals_count_piece(t, storage);
    gathered_follow(&t->params, t->scope->store, t->placed, storage);
    gathered_follow(&t->gradients, t->scope->store, t->placed, storage);
}
// Returns how many bytes fewer are needed than with all states in place.
static inline int64_t totals_freed(const OffloadTotals *t) {
    const OffloadScope *f = t->scope;
    const int64_t longest = largest_of(&t->piece),
                  slot_bytes = t->placed->cpu_update ? 0 : MOVING_PIECES * round_up(longest, 64);
    if (t->stored) { return t->bytes - (int64_t)store_disk_buffers_bytes((size_t)longest); }
    const int64_t gathered = t->gathered - gathered_bytes(&t->params, f->store) -
                             gathered_bytes(&t->gradients, f->store),
                  stashed = f->in_flight * t->stashed;
    return t->bytes + gathered - slot_bytes +
           (stashed ? (stashed - STASH_SLOTS) * f->block_bytes : 0);
}

// -------------------------------------------------------------------------------------------------
// What is offloaded, and in which order

// Kinds (bits) of a storage that are offloaded together.
typedef struct {
    int storage;
    unsigned char kinds;
} OffloadTurn;
enum { OFFLOAD_TURNS = 6 }; // of a storage, at most
// Returns the bits of a storage's optimizer states.
static inline unsigned char offload_optimizer(const Store *s, int storage) {
    unsigned char all = 0;
    for (int kind = STATE_MASTER; kind < OPTIMIZER_KINDS; kind++) {
        all |= (unsigned char)((offload_bytes(s, storage, (StateKind)kind) > 0) << kind);
    }
    return all;
}
static inline int offload_add_turn(OffloadTurn *turns, int n, int storage, unsigned char kinds) {
    turns[n].storage = storage;
    turns[n].kinds = kinds;
    return n + (kinds != 0);
}
// Lists all turns in order and returns how many there are. blocks: [storages] number of users of
// each.
static inline int offload_turns(const OffloadScope *f, const Offload *o, const int *blocks,
                                OffloadTurn *turns) {
    const Store *s = f->store;
    int n = 0;
    for (int i = s->model->storages - 1; i >= 0; i--) {
        const unsigned char all = offload_optimizer(s, i);
        if (o->cpu_update) { n = offload_add_turn(turns, n, i, all); }
        for (int kind = STATE_MASTER; kind < OPTIMIZER_KINDS && !o->cpu_update; kind++) {
            n = offload_add_turn(turns, n, i, all & (unsigned char)(1 << kind));
        }
    }
    for (int i = s->model->storages - 1; i >= 0; i--) {
        n = offload_add_turn(turns, n, i,
                             (unsigned char)(offload_has_gradient(s, o, i) << STATE_GRADIENT));
    }
    for (int i = s->model->storages - 1; i >= 0 && f->parameters; i--) {
        n = offload_add_turn(turns, n, i,
                             (unsigned char)(offload_has_parameters(s, i) << STATE_PARAMETERS));
    }
    for (int i = 0; i < s->model->storages && f->activations; i++) { // those that wait longest
        n = offload_add_turn(turns, n, i, (unsigned char)((blocks[i] > 0) << STATE_ACTIVATIONS));
    }
    return n;
}
// Lists what moves on from the host to the disk, kind by kind.
static inline int offload_disk_turns(const Store *s, const Offload *o, OffloadTurn *turns) {
    int n = 0;
    for (int i = s->model->storages - 1; i >= 0; i--) {
        const unsigned char all = store_own_elements(s, i) ? o->host[i] : 0;
        for (int kind = STATE_MASTER; kind < OPTIMIZER_KINDS; kind++) {
            n = offload_add_turn(turns, n, i, all & (unsigned char)(1 << kind));
        }
    }
    return n;
}

// A level of memory that has too little space: the device or the host.
typedef struct {
    unsigned char *gone; // [storages] bits of kinds that have left it
    OffloadTotals totals;
    OffloadTurn *turns; // [count] what may leave it, in order
    int count;
} OffloadTier;
static inline OffloadTier offload_tier(Offload *o, const OffloadScope *f, bool stored) {
    const size_t most = OFFLOAD_TURNS * (size_t)f->store->model->storages + 1;
    OffloadTier tier = {stored ? o->disk : o->host, totals_make(f, o, stored),
                        (OffloadTurn *)checked_malloc(most * sizeof(OffloadTurn), "offload"), 0};
    tier.count = stored ? offload_disk_turns(f->store, o, tier.turns)
                        : offload_turns(f, o, tier.totals.blocks, tier.turns);
    return tier;
}
static inline OffloadTier offload_device(Offload *o, const OffloadScope *f) {
    return offload_tier(o, f, false);
}
static inline OffloadTier offload_host(Offload *o, const OffloadScope *f) {
    return offload_tier(o, f, true);
}
static inline void offload_tier_free(OffloadTier *tier) {
    totals_free(&tier->totals);
    free(tier->turns);
}
// Returns the bytes by which states on disk reduce the host's memory.
static inline int64_t offload_disk_frees(const OffloadScope *f, const Offload *o) {
    OffloadTotals t = totals_make(f, o, true);
    const int64_t bytes = totals_freed(&t);
    totals_free(&t);
    return bytes;
}
// Offloads the states of a turn. offload_return undoes it, except for `fixed` states.
static inline void offload_leave(OffloadTier *tier, int turn) {
    const OffloadTurn *t = &tier->turns[turn];
    totals_set(&tier->totals, tier->gone, t->storage, tier->gone[t->storage] | t->kinds);
}
static inline void offload_return(OffloadTier *tier, int turn, const unsigned char *fixed) {
    const OffloadTurn *t = &tier->turns[turn];
    totals_set(&tier->totals, tier->gone, t->storage,
               tier->gone[t->storage] & (unsigned char)~(t->kinds & ~fixed[t->storage]));
}
// Returns states that still fit, the last offloaded first. If the CPU updates, other states of a
// storage may be offloaded only together with its optimizer states.
static inline void offload_return_some(OffloadTier *tier, const unsigned char *fixed,
                                       double excess) {
    for (int k = tier->count - 1; k >= 0; k--) {
        const int storage = tier->turns[k].storage;
        const unsigned char before = tier->gone[storage];
        offload_return(tier, k, fixed);
        const bool offloaded = tier->gone[storage] & ((1 << HOST_KINDS) - 1);
        const bool apart = tier->totals.placed->cpu_update && offloaded &&
                           !(tier->gone[storage] & OPTIMIZER_STATES);
        if (apart || (double)totals_freed(&tier->totals) < excess) {
            totals_set(&tier->totals, tier->gone, storage, before);
        }
    }
}
// Offloads states from this level until `excess` bytes, by which the budget would be exceeded with
// all of them in place, are free, or nothing is left to offload. Returns the largest number of
// bytes freed; the placement is the one that frees them. Frees the tier.
static inline int64_t offload_fill(OffloadTier tier, double excess) {
    const size_t n = (size_t)tier.totals.scope->store->model->storages;
    unsigned char *fixed = (unsigned char *)checked_malloc(n, "offload"); // offloaded in any case
    memcpy(fixed, tier.gone, n);
    int64_t most = totals_freed(&tier.totals), frees = most;
    int best = 0, turn = 0; // number of turns that frees most
    while (turn < tier.count && (double)frees < excess) {
        offload_leave(&tier, turn++);
        frees = totals_freed(&tier.totals);
        if (frees > most) {
            most = frees;
            best = turn;
        }
    }
    while (turn > best) { offload_return(&tier, --turn, fixed); }
    if ((double)most >= excess) { offload_return_some(&tier, fixed, excess); }
    free(fixed);
    offload_tier_free(&tier);
    return most;
}
// With delayed updates, offloads all masters and gradients: updates must not touch the parameters
// in use.
static inline void offload_keep_gradients(Offload *o, const Store *s) {
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
    offload_tier_free(&tier);
}
// Offloads on all ranks what any rank offloads. Returns true if that is more than some rank had
// chosen. All ranks call it.
static inline bool offload_agree(unsigned char *gone, Comm *comm, int storages) {
    const size_t n = (size_t)storages;
    unsigned char *all = (unsigned char *)checked_calloc((size_t)comm->ranks, n, "offload");
    int more = 0;
    comm_all_gather_small(comm, gone, all, n);
    for (size_t i = 0; i < n; i++) {
        for (int r = 0; r < comm->ranks; r++) {
            more |= all[(size_t)r * n + i] & ~gone[i];
            gone[i] |= all[(size_t)r * n + i];
        }
    }
    free(all);
    return comm_agree_max(comm, more != 0);
}

// Returns the bytes that an update moves to the device (in) or to the host, for each element of a
// storage.
static inline int64_t offload_element_bytes(const Store *s, int storage, bool in) {
    PiecePart parts[PIECE_PARTS];
    int64_t bytes = 0;
    for (int k = store_piece_parts(s, s->policy.offload, storage, parts) - 1; k >= 0; k--) {
        bytes += (in ? parts[k].in : parts[k].out) ? parts[k].size : 0;
    }
    return bytes;
}
// Does the action copy parameters from the host? A gather from hpZ secondary copies does not.
static inline bool offload_brings(const Store *s, const Action *a) {
    return a->kind == ACT_PREFETCH && !a->near &&
           store_place(s, STATE_PARAMETERS, a->storage) == PLACE_HOST;
}
// Counts the bytes that a step moves: moved[0] to the device, moved[1] to the host. block_bytes: of
// one block's offloaded activations.
static inline void offload_moves(const Store *s, const Schedule *step, size_t block_bytes,
                                 int64_t moved[2]) {
    for (int way = 0; way < 2; way++) {
        moved[way] = 0;
        for (int i = 0; i < s->model->storages; i++) {
            moved[way] += store_own_elements(s, i) * offload_element_bytes(s, i, !way);
        }
    }
    for (int i = 0; i < step->count; i++) {
        const Action *a = &step->actions[i];
        const bool sum = a->kind == ACT_FETCH_SUM || a->kind == ACT_EVICT_SUM;
        if (sum) {
            moved[a->kind == ACT_EVICT_SUM] +=
                store_own_elements(s, a->storage) * (int64_t)sizeof(float);
        }
        if (offload_brings(s, a)) {
            moved[0] += store_own_elements(s, a->storage) * (int64_t)dtype_size(s->dtype);
        }
        if (action_of_stash(a->kind)) { moved[a->kind == ACT_EVICT_STASH] += (int64_t)block_bytes; }
    }
}

#endif
