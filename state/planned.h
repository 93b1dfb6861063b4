// planned.h: the plan of the store: which states of a storage a rank has, where they will be
// stored, and how many bytes that takes. The policies (policy.h) fill the table of states (table.h)
// here. It allocates nothing but tables. Predictions and offload.h use it; store.h allocates the
// memory and finds states in it.
#ifndef STORE_PLANNED_H
#define STORE_PLANNED_H

#include "base/base.h"
#include "comm/group.h"
#include "comm/records.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "state/disk.h"
#include "state/layout.h"
#include "state/matrices.h"
#include "state/optimizer.h"
#include "state/policy.h"
#include "state/table.h"

enum { EXCHANGES = 2 }; // quantized reductions in flight: one in each of the two exchanges
#ifndef BUCKET_ELEMENTS // tests make it small
// Storages below this size wait for the next ones, and share a bucket with them.
#define BUCKET_ELEMENTS (1 << 20)
#endif
// Bytes of states that are copied at once: few enough to stay in the CPU's cache.
#ifndef STATE_PIECE // tests make it small
#define STATE_PIECE (1 << 20)
#endif

// -------------------------------------------------------------------------------------------------
// The store

// What makes a sum of clipped gradients private: noise, which the owner of a slice adds once, and
// the division by the expected batch.
typedef struct {
    bool on;
    float deviation, scale; // of a sum's elements: x = scale (x + deviation z)
    uint32_t key[8];
} StoreNoise;

// An exchange of records among the ranks of a group.
typedef struct {
    const Group *group;
    int64_t *to, *from; // [group->n + 1] bounds in bytes of what each rank gets; of what each sends
} RecordExchange;
// Storages whose quantized gradients travel together: first, first - 1, ..., last. They are reduced
// in this order, one directly after another (storage_rules), by two exchanges: inside nodes, then
// between them.
enum { HOPS = 2 };
typedef struct {
    const ProcessGroup *process_group; // owners of the storages
    int first, last;
    RecordExchange hop[HOPS];
} Bucket;

// What is planned: which states a rank has, where each will be, and how they travel. It is made
// once (store_plan); a run may change only its last four fields.
typedef struct {
    const GptModel *model;
    ZeroPolicy policy;
    // steps overlap (cyclic.h): states travel by messages between two ranks (p2p), and versions of
    // parameters count steps, also those without an update; else they count updates
    bool steps_overlap;
    const Group *ranks;         // all ranks
    const Placement *placement; // of units on the ranks
    DType dtype, wire;          // of working parameters; of gradient messages
    const Optimizer *optimizer;
    // layout
    Layout layout;
    ProcessGroup world; // all ranks
    Bucket *buckets;
    int bucket_count;
    size_t exchange_bytes;
    // the table (table.h), and the buffers of each kind on the device and on the host
    StorageRow *rows; // [storages]
    StateBuffer device[STATE_KINDS], host[STATE_KINDS];
    StateBuffer offload_buffers, sum_buffers, disk_buffers; // all OffloadBuffers; SumBuffers; ...
    size_t offload_buffer_bytes;                            // of an OffloadBuffer
    size_t sum_bytes;                                       // of a SumBuffer
    size_t disk_buffer_bytes;                               // of a DiskBuffer
    Matrices matrices;                                      // of an optimizer that needs them
    StoreNoise noise;                                       // of a private run
    bool stochastic;         // stochastic rounding of bf16 parameters
    uint64_t seed;           // of stochastic rounding
    float rates[RATE_KINDS]; // learning rates of tensors, as factors
} StatePlan;

// Bytes copied between host and device.
typedef struct {
    int64_t to_device, to_host;
} HostTraffic;

// Returns the record of a state: of the kind whose memory it is.
static inline State *store_record(const StatePlan *s, StateKind kind, int storage) {
    State *states = s->rows[storage].states;
    return &states[states[kind].copy_of];
}
static inline Place store_place(const StatePlan *s, StateKind kind, int storage) {
    return store_record(s, kind, storage)->place;
}
static inline bool store_on_host(const StatePlan *s, StateKind kind, int storage) {
    return store_place(s, kind, storage) == PLACE_HOST;
}
static inline bool store_holds(const StatePlan *s, int storage) {
    return layout_holds(&s->layout, storage);
}
// Returns the bounds of a storage's slices among its owners.
static inline const int64_t *store_slices(const StatePlan *s, int storage) {
    return layout_slices(&s->layout, SLICES_WHOLE, storage);
}
// Returns the elements of this rank's slice, and their offset in the storage; both are 0 if the
// rank does not own the storage.
static inline int64_t store_own(const StatePlan *s, int storage, int64_t *begin) {
    const Group *all = &s->rows[storage].owners->all;
    const int64_t *bounds = store_slices(s, storage);
    *begin = all->me < 0 ? 0 : bounds[all->me];
    return all->me < 0 ? 0 : slice_length(bounds, all->me);
}
static inline int64_t store_own_elements(const StatePlan *s, int storage) {
    int64_t begin;
    return store_own(s, storage, &begin);
}

// Returns how many elements of a part of a tensor are in this rank's slice, and their offset in the
// storage.
static inline int64_t store_own_part(const StatePlan *s, int storage, const TensorPart *part,
                                     int64_t *begin) {
    int64_t first, own = store_own(s, storage, &first);
    *begin = max_i64(first, part->offset);
    return max_i64(0, min_i64(first + own, part->offset + part->elements) - *begin);
}

// Return the bytes of the records of one member's slice, and of the slices of the members with one
// local index on all nodes.
static inline int64_t store_records(const StatePlan *s, int storage, int node, int local) {
    return slice_length(layout_slices(&s->layout, SLICES_GRADIENTS, storage),
                        group_at(&s->rows[storage].owners->all, node, local));
}
static inline int64_t store_column(const StatePlan *s, int storage, int local) {
    int64_t bytes = 0;
    for (int n = 0; n < s->rows[storage].owners->all.nodes; n++) {
        bytes += store_records(s, storage, n, local);
    }
    return bytes;
}
// Plans the two exchanges of a bucket. The first sends to each member of the node the records of
// the slices of all owners with its local index. The second sends to each node the sums for its
// owner with this rank's local index.
static inline Bucket store_plan_bucket(const StatePlan *s, int first, int last) {
    const ProcessGroup *owners = s->rows[first].owners;
    const Group *all = &owners->all;
    const int node = group_node(all, all->me), local = group_local(all, all->me);
    Bucket b = {.process_group = owners, .first = first, .last = last};
    for (int h = 0; h < HOPS; h++) {
        RecordExchange *x = &b.hop[h];
        const int n = h ? all->nodes : all->locals;
        x->group = h ? &owners->across : &owners->node;
        x->to = new_array(int64_t, n + 1, "buckets");
        x->from = new_array(int64_t, n + 1, "buckets");
        for (int i = 0; i < n; i++) {
            x->to[i + 1] = x->to[i];
            x->from[i + 1] = x->from[i];
            for (int k = last; k <= first; k++) {
                x->to[i + 1] += h ? store_records(s, k, i, local) : store_column(s, k, i);
                x->from[i + 1] += h ? store_records(s, k, node, local) : store_column(s, k, local);
            }
        }
    }
    return b;
}
// Returns how many exchanges a bucket has: 1 if all owners are on one node.
static inline int bucket_hops(const Bucket *b) { return b->hop[1].group->n > 1 ? HOPS : 1; }
// Returns the bytes of the records that are sent, or received, in an exchange.
static inline int64_t exchange_bytes(const RecordExchange *x, const int64_t *bounds) {
    return round_up(bounds[x->group->n], 64);
}
// Returns the rules of all storages. The storages of a bucket are neighbours, have the same owners,
// and are always reduced one directly after another. So tied ones, which are reduced at the end of
// the step, are apart from the others; and so is the head's own table, whose gradient the head's
// input part makes: in a zero-bubble schedule the head's other gradients follow micro-batches
// later.
static inline StorageRule *storage_rules(const GptModel *m, const ZeroPolicy *z, const Owners *h) {
    StorageRule *rules = new_array(StorageRule, m->storages, "rules of storages");
    int64_t elements = 0;
    for (int i = m->storages - 1; i >= 0; i--) {
        const StorageOwners *x = &h->storage[i];
        StorageRule *r = &rules[i];
        const bool alike = i + 1 < m->storages && x->list == x[1].list && x->tied == x[1].tied &&
                           i + 1 != m->classifier,
                   joins = alike && elements < BUCKET_ELEMENTS;
        elements = gpt_storage_elements(m, i) + (joins ? elements : 0);
        r->bucket = !z->quantized_gradients || owner_count(h, i) == 1 ? -1
                    : joins                                           ? r[1].bucket
                                                                      : i;
        r->grad_slot = zero_grad_slot(z, h, i);
        r->tied = x->tied;
        r->turns = x->turns;
        r->sum = zero_sum_place(z->offload, h, i);
        r->pieces = offload_pieces(m, z, h, i);
        r->on_disk = offload_kinds_on_disk(z->offload, i) > 0;
        if (z->p2p) { // owners keep their parameters, and send or lend them
            r->gathers = z->p2p->borrows;
            r->param_slot = r->gathers ? borrowed_slot(m, i) : -1;
            r->reduces_often = true;
            r->wave = -1;
        } else {
            r->gathers = zero_gathers(z, h, i);
            r->param_slot =
                r->gathers ? shared_slot(h, i, zero_param_apart(z), zero_param_on_host(z, i)) : -1;
            r->reduces_often = zero_reduces_often(z, h, i);
            r->wave = zero_wave(m, z, h, i);
        }
    }
    return rules;
}
// Plans the buckets of the storages that this rank owns.
static inline void store_plan_buckets(StatePlan *s) {
    for (int last = s->model->storages - 1; last >= 0; last--) {
        const int first = s->rows[last].rule.bucket;
        const bool mine = first >= 0 && store_holds(s, last);
        s->rows[last].bucket = mine ? s->bucket_count : -1;
        if (!mine || (last && s->rows[last - 1].rule.bucket == first)) { continue; }
        Bucket *b = &s->buckets[s->bucket_count++];
        *b = store_plan_bucket(s, first, last);
        int64_t bytes = 0;
        for (int h = 0; h < bucket_hops(b); h++) {
            bytes += exchange_bytes(&b->hop[h], b->hop[h].to) +
                     exchange_bytes(&b->hop[h], b->hop[h].from);
        }
        s->exchange_bytes = max_i64(s->exchange_bytes, bytes);
    }
}

// Returns whether updates are delayed: the device computes with parameters that are one update
// older than the masters, so fp32 masters are stored apart from the parameters, too.
static inline bool store_delays(const StatePlan *s) {
    return s->policy.offload && s->policy.offload->delays;
}

// -------------------------------------------------------------------------------------------------
// The table, filled from the policies

// Does the run keep this moment of the optimizer?
static inline bool store_keeps_moment(const StatePlan *s, StateKind kind) {
    return optimizer_keeps(s->optimizer, kind) && !s->policy.forward_only;
}
// Fills the states of a kind, with these on the host. Returns its buffer on the device, in which
// none has its position yet. rows: [storages]
static inline StateBuffer store_fill_kind(const StatePlan *s, const Offload *o, StateKind kind,
                                          StorageRow *rows) {
    const Owners *h = &s->layout.owners;
    const size_t size = dtype_size(s->dtype);
    ZeroPolicy z = s->policy;
    z.offload = o;
    StateBuffer b = {.layout = z.stage >= 1 ? BUFFER_SLICES : BUFFER_FULL, .size = sizeof(float)};
    bool here = true;
    switch (kind) {
    case STATE_MASTER: here = s->dtype != DTYPE_FP32 || store_delays(s); break;
    case STATE_PARAMETERS:
        b.layout = z.stage >= 3 ? BUFFER_SLOTS : BUFFER_FULL;
        b.size = size;
        b.travels = true;
        break;
    case STATE_GRADIENT:
        here = b.travels = !z.forward_only;
        b.layout = zero_gradient_stage(&z) >= 2 ? BUFFER_SLOTS : BUFFER_FULL;
        break;
    case STATE_SECONDARY:
        here = z.partition > 1;
        b.layout = BUFFER_SLICES;
        b.cut = SLICES_SECONDARY;
        b.size = size;
        break;
    case STATE_RECORDS:
        here = b.travels = z.quantized_weights;
        b.layout = BUFFER_SLOTS;
        b.cut = SLICES_WEIGHTS;
        b.size = 1;
        break;
    case STATE_ERRORS:
        here = z.feedback && s->bucket_count > 0;
        b.layout = BUFFER_FULL;
        b.size = sizeof(uint16_t);
        break;
    case STATE_MADE:
    case STATE_RECEIVED:
    case STATE_PIECES: here = z.p2p; break;
    default: here = store_keeps_moment(s, kind);
    }
    for (int i = 0; i < s->model->storages; i++) {
        // storages that several stages use are not gathered for each use
        const bool exists = here && !(kind == STATE_SECONDARY && h->storage[i].tied);
        const bool own = kind != STATE_PREVIOUS && (exists || kind != STATE_MASTER),
                   divided = kind == STATE_GRADIENT && z.accumulates && b.layout == BUFFER_SLOTS &&
                             zero_divides(&z, h, i);
        const Place away = kind < OPTIMIZER_KINDS && offload_on_disk(o, i, kind) ? PLACE_DISK
                           : kind < HOST_KINDS && offload_has(o, i, kind)        ? PLACE_HOST
                                                                                 : PLACE_DEVICE;
        const State state = {.place = exists ? away : PLACE_NONE,
                             .copy_of = own ? kind : STATE_PARAMETERS,
                             .apart = divided || (kind == STATE_PARAMETERS && zero_param_apart(&z)),
                             .versions = 1,
                             .whole = -1};
        rows[i].states[kind] = state;
    }
    return b;
}

// Sets how many versions of its p2p states a rank keeps, of the storages that it owns or computes
// with, and in which slots.
static inline void store_fill_versions(StatePlan *s) {
    const P2p *r = s->policy.p2p;
    for (int i = 0; i < s->model->storages; i++) {
        const P2pStorage *p = &s->rows[i].p2p;
        State *x = s->rows[i].states;
        const bool owns = layout_holds(&s->layout, i);
        // made: if sums stay, gradients of micro-batches; otherwise, on the owner, the sum of the
        // gradients before its own, which the first rank has none of
        const bool before = !r->stays && owns && r->rank > 0;
        const int made = r->stays && p->adds ? (i ? 1 : r->heads) : before;
        x[STATE_PARAMETERS].versions = p->places;
        x[STATE_GRADIENT].versions = owns ? r->sums : !r->stays && p->adds;
        // the gradient of a borrowed wte exists from the head's part to the embedding's
        x[STATE_MADE].versions = r->borrows ? !i : made;
        x[STATE_RECEIVED].versions = r->borrows ? owns : p->comes;
        x[STATE_PIECES].versions = !r->borrows && r->joins_pieces && p->adds && (!r->stays || owns);
        if (r->borrows) { continue; }
        x[STATE_MADE].slot = x[STATE_PIECES].slot = gpt_storage_class(s->model, i);
        x[STATE_RECEIVED].slot = p->grad_slot;
    }
}
// Plans the versions of each storage in slots (State.slot): of storages that are in use at the same
// time one after another, otherwise in the same place. Storages with 0 versions have none.
static inline void store_plan_versions(StatePlan *s, StateKind kind, bool one_at_a_time) {
    const int storages = s->model->storages;
    StateBuffer *b = &s->device[kind];
    int slots = 0;
    for (int i = 0; i < storages; i++) {
        slots = (int)max_i64(slots, s->rows[i].states[kind].slot + 1);
    }
    for (int k = 0; k < slots; k++) {
        int64_t used = 0;
        for (int i = 0; i < storages; i++) {
            State *x = &s->rows[i].states[kind];
            if (!x->versions || x->slot != k) { continue; }
            x->stride = gpt_storage_elements(s->model, i) * (int64_t)b->size;
            x->slice = x->whole = b->held + (one_at_a_time ? 0 : used);
            const int64_t bytes = x->versions * x->stride;
            used = one_at_a_time ? max_i64(used, bytes) : used + bytes;
        }
        b->held += used;
    }
}
// Adds slots for the stages of p2p parameters behind what the buffer holds. In a slot the storages
// of a stage that have no version yet are stored one after another, and stages use the same slots.
// wte has the same offset in the first and in the last stage. The slots are the versions of these
// storages, as far apart as the longest stage is long.
static inline void store_plan_stages(StatePlan *s, StateKind kind, int slots) {
    const int stages = s->policy.p2p->stages, storages = s->model->storages;
    StateBuffer *b = &s->device[kind];
    int64_t most = 0;
    for (int stage = 0; stage < stages; stage++) {
        int64_t at = 0;
        for (int i = 0; i < storages; i++) {
            State *x = &s->rows[i].states[kind];
            if (x->versions || (s->rows[i].p2p.stage != stage && (i || stage != stages - 1))) {
                continue;
            }
            x->slice = x->whole = (int64_t)b->held + at;
            at += gpt_storage_elements(s->model, i) * (int64_t)b->size;
        }
        most = max_i64(most, at);
    }
    for (int i = 0; i < storages; i++) {
        State *x = &s->rows[i].states[kind];
        if (x->versions) { continue; }
        x->versions = slots;
        x->stride = most;
    }
    b->slot_bytes += slots * most;
}
// Plans the p2p buffers: versions of parameters, gradients, and received sums.
static inline void store_plan_p2p(StatePlan *s) {
    const P2p *r = s->policy.p2p;
    const GptModel *m = s->model;
    StateBuffer *b = s->device;
    store_fill_versions(s);
    store_plan_versions(s, STATE_PARAMETERS, false);
    store_plan_versions(s, STATE_GRADIENT, false);
    if (r->borrows) {
        // slots of borrowed parameters, and of gradients that are sent to their owners
        store_plan_stages(s, STATE_PARAMETERS, BORROWED_SLOTS);
        store_plan_versions(s, STATE_RECEIVED, false);
        store_plan_versions(s, STATE_MADE, false);
        store_plan_stages(s, STATE_MADE, r->grad_slots);
        for (int i = 1; i < m->storages; i++) {
            State *x = &s->rows[i].states[STATE_MADE];
            x->slice += s->rows[i].p2p.grad_slot * x->stride;
            x->versions = 1;
        }
    } else {
        store_plan_versions(s, STATE_MADE, r->stays);
        store_plan_versions(s, STATE_RECEIVED, false);
        // a piece's gradient of one storage is added up before that of the next storage begins
        store_plan_versions(s, STATE_PIECES, !r->stays && !share_alternates(m->share));
    }
    for (int kind = STATE_MADE; kind <= STATE_PIECES; kind++) { // they count as buffers
        b[kind].slot_bytes += b[kind].held;
        b[kind].held = 0;
    }
}
// Fills the table, and plans its buffers on the device and on the host.
static inline void store_plan_states(StatePlan *s) {
    for (int k = 0; k < STATE_KINDS; k++) {
        const StateKind kind = k;
        const bool by_p2p =
            kind == STATE_PARAMETERS || kind == STATE_GRADIENT || kind >= STATE_MADE;
        s->device[k] = store_fill_kind(s, s->policy.offload, kind, s->rows);
        s->host[k].layout = kind < HOST_KINDS ? BUFFER_SLICES : BUFFER_NONE;
        s->host[k].size = s->device[k].size;
        s->host[k].on_host = true;
        if (!s->steps_overlap || !by_p2p) { buffer_plan(&s->device[k], s->rows, kind, &s->layout); }
        buffer_plan(&s->host[k], s->rows, kind, &s->layout);
    }
    if (s->steps_overlap) { store_plan_p2p(s); }
}

// -------------------------------------------------------------------------------------------------
// Pieces of offloaded states (update.h)

// What an OffloadBuffer has of each element of a piece, in this order, and whether it is copied to
// the device (in) and to the host (out). If the device updates, these are the states on the host:
// the gradient does not return, and parameters in storage precision are written anew. If the CPU
// updates, these are the gradient and the parameters on the device.
typedef struct {
    StateKind kind;
    int64_t size; // bytes of an element
    bool in, out;
} PiecePart;
enum { PIECE_PARTS = OPTIMIZER_KINDS + 2 };
// Is a storage updated in two parts, with its matrices between them? Then each piece comes twice:
// for its moments and its gradient, and (second) for its parameters. Piece p comes for the second
// time as piece p + pieces.
static inline bool store_in_parts(const StatePlan *s, int storage) {
    return s->rows[storage].rule.wave >= 0;
}
static inline bool store_piece_takes(const StatePlan *s, int storage, StateKind kind, bool second) {
    const bool first = kind == STATE_GRADIENT || optimizer_keeps(s->optimizer, kind);
    return !store_in_parts(s, storage) || first != second;
}
static inline int store_piece_parts(const StatePlan *s, const Offload *o, int storage, bool second,
                                    PiecePart parts[PIECE_PARTS]) {
    const int64_t word = sizeof(float), size = dtype_size(s->dtype);
    const bool masters = s->dtype == DTYPE_FP32; // parameters are their own masters
    const bool cpu = o && o->cpu_update;
    int n = 0;
    if (!offload_has_states(o, storage)) { return 0; }
    for (int kind = STATE_MASTER; kind < OPTIMIZER_KINDS && !cpu; kind++) {
        const PiecePart part = {.kind = kind, .size = word, .in = true, .out = true};
        if (offload_has(o, storage, part.kind)) { parts[n++] = part; }
    }
    const PiecePart gradient = {.kind = STATE_GRADIENT, .size = word, .in = !cpu, .out = cpu},
                    parameters = {.kind = STATE_PARAMETERS,
                                  .size = size,
                                  .in = cpu || masters,
                                  .out = !cpu || (masters && !o->delays)};
    if (offload_has(o, storage, STATE_GRADIENT) != cpu) { parts[n++] = gradient; }
    if (offload_has(o, storage, STATE_PARAMETERS) != cpu) { parts[n++] = parameters; }
    int taken = 0;
    for (int k = 0; k < n; k++) {
        if (store_piece_takes(s, storage, parts[k].kind, second)) { parts[taken++] = parts[k]; }
    }
    return taken;
}
// Returns the elements of the longest piece of this rank's slice.
static inline int64_t store_longest_piece(const StatePlan *s, int storage) {
    return min_i64(offload_piece(s->model), store_own_elements(s, storage));
}
// Returns the bytes that the longest piece of a storage needs in an OffloadBuffer, with these
// states on the host.
static inline int64_t store_piece_bytes(const StatePlan *s, const Offload *o, int storage) {
    PiecePart parts[PIECE_PARTS];
    int64_t most = 0;
    for (int second = 0; second < 2; second++) {
        int64_t bytes = 0;
        for (int k = store_piece_parts(s, o, storage, second, parts) - 1; k >= 0; k--) {
            bytes += parts[k].size;
        }
        most = max_i64(most, bytes);
    }
    return most * store_longest_piece(s, storage);
}
// Returns the bytes of an OffloadBuffer, with these states on the host.
static inline size_t store_offload_buffer_bytes(const StatePlan *s, const Offload *o) {
    int64_t most = 0;
    for (int i = 0; i < s->model->storages; i++) {
        most = max_i64(most, store_piece_bytes(s, o, i));
    }
    return round_up(most, 64);
}
// Returns the bytes of a SumBuffer; 0 if no gradient is added to a sum on the host.
static inline size_t store_sum_bytes(const StatePlan *s, const Offload *o) {
    int64_t most = 0;
    for (int i = 0; i < s->model->storages && s->policy.accumulates; i++) {
        const bool adds = zero_sum_place(o, &s->layout.owners, i) == SUM_IS_ADDED &&
                          zero_reduces_often(&s->policy, &s->layout.owners, i);
        most = max_i64(most, adds ? store_longest_piece(s, i) : 0);
    }
    return round_up(most * (int64_t)sizeof(float), 64);
}
// Returns the bytes of a piece in the file and in a DiskBuffer: its states one after another, each
// rounded up to DISK_GRAIN.
static inline int64_t store_stored_bytes(const Offload *o, int storage, int64_t elements) {
    return offload_kinds_on_disk(o, storage) *
           round_up(elements * (int64_t)sizeof(float), DISK_GRAIN);
}
// Returns the bytes of all pieces of this rank's slice.
static inline int64_t store_all_stored_bytes(const StatePlan *s, const Offload *o, int storage) {
    const int64_t own = store_own_elements(s, storage), piece = store_longest_piece(s, storage);
    return piece ? own / piece * store_stored_bytes(o, storage, piece) +
                       store_stored_bytes(o, storage, own % piece)
                 : 0;
}
// Returns the bytes of a DiskBuffer, with these states on disk.
static inline size_t store_disk_buffer_bytes(const StatePlan *s, const Offload *o) {
    int64_t most = 0;
    for (int i = 0; i < s->model->storages; i++) {
        most = max_i64(most, store_stored_bytes(o, i, store_longest_piece(s, i)));
    }
    return most;
}
// Returns the bytes of all DiskBuffers, with space to align the first one.
static inline size_t store_disk_buffers_bytes(size_t slot) {
    return slot ? DISK_PIECES * slot + DISK_GRAIN : 0;
}
static inline void store_plan_disk(StatePlan *s) {
    const Offload *o = s->policy.offload;
    int pieces = 0;
    int64_t at = 0;
    for (int i = 0; i < s->model->storages; i++) {
        StorageRow *row = &s->rows[i];
        row->first_stored = pieces;
        row->disk_at = at;
        row->disk_bytes = store_all_stored_bytes(s, o, i);
        pieces += offload_kinds_on_disk(o, i) ? row->pieces : 0;
        at += row->disk_bytes;
    }
    s->disk_buffer_bytes = store_disk_buffer_bytes(s, o);
    s->disk_buffers.on_host = true;
    s->disk_buffers.held = store_disk_buffers_bytes(s->disk_buffer_bytes);
}
// Returns the bytes of the file. A step reads and writes as many.
static inline int64_t store_disk_bytes(const StatePlan *s) {
    const StorageRow *last = &s->rows[s->model->storages - 1];
    return last->disk_at + last->disk_bytes;
}

// Numbers the pieces in the order of their updates: those of a wave, then those of its second part.
static inline void store_number_pieces(StatePlan *s) {
    const int storages = s->model->storages;
    int number = 0;
    for (int i = 0, last; i < storages; i = last + 1) {
        const int wave = s->rows[i].rule.wave;
        last = wave < 0 ? i : wave;
        for (int k = i; k <= last; k++) {
            s->rows[k].first_piece[0] = number;
            number += s->rows[k].pieces;
        }
        for (int k = i; k <= last && wave >= 0; k++) {
            s->rows[k].first_piece[1] = number;
            number += s->rows[k].pieces;
        }
    }
}
// Plans the pieces of offloaded states, and the buffers through which they move.
static inline void store_plan_pieces(StatePlan *s) {
    const Offload *o = s->policy.offload;
    for (int i = 0; i < s->model->storages; i++) {
        s->rows[i].pieces = store_holds(s, i) ? s->rows[i].rule.pieces : 0;
        s->rows[i].cpu_updates = s->rows[i].pieces && o->cpu_update;
    }
    store_number_pieces(s);
    s->offload_buffer_bytes = o ? store_offload_buffer_bytes(s, o) : 0;
    s->offload_buffers.on_host = o && o->cpu_update;
    *(s->offload_buffers.on_host ? &s->offload_buffers.held : &s->offload_buffers.slot_bytes) =
        MOVING_PIECES * s->offload_buffer_bytes;
    s->sum_bytes = o ? store_sum_bytes(s, o) : 0;
    s->sum_buffers.on_host = true;
    s->sum_buffers.held = MOVING_PIECES * s->sum_bytes;
    store_plan_disk(s);
}

// Decides where every state is stored. It allocates only tables, so predictions use it, too. ranks
// has all ranks, as the rank of this store sees them. ranks and placement must outlive the store.
static inline StatePlan store_plan(const GptModel *m, const Group *ranks,
                                   const Placement *placement, ZeroPolicy policy, DType dtype,
                                   DType wire, const Optimizer *optimizer) {
    StatePlan s = {};
    s.model = m;
    s.policy = policy;
    s.dtype = dtype;
    s.wire = wire;
    s.optimizer = optimizer;
    s.steps_overlap = policy.p2p != NULL;
    s.ranks = ranks;
    s.placement = placement;
    for (int k = 0; k < RATE_KINDS; k++) { s.rates[k] = 1; }
    s.layout = layout_make(m, ranks, placement, &policy);
    s.world = process_group_of_all(ranks);
    s.buckets = new_array(Bucket, m->storages, "buckets");
    s.rows = new_array(StorageRow, m->storages, "states");
    StorageRule *rules = storage_rules(m, &s.policy, &s.layout.owners);
    for (int i = 0; i < m->storages; i++) {
        StorageRow *row = &s.rows[i];
        row->rule = rules[i];
        row->owners = layout_process_group(&s.layout, i);
        if (policy.p2p) { row->p2p = policy.p2p->storage[i]; }
        row->borrowed = policy.p2p && policy.p2p->borrows && row->owners->all.me < 0;
    }
    free(rules);
    store_plan_buckets(&s);
    store_plan_states(&s);
    store_plan_pieces(&s);
    if (policy.matrices) { s.matrices = matrices_plan(&s.layout, s.rows, ranks->n, dtype); }
    return s;
}

static inline void store_plan_free(StatePlan *s) {
    for (int i = 0; i < s->bucket_count; i++) {
        for (int h = 0; h < HOPS; h++) {
            free_all(s->buckets[i].hop[h].to, s->buckets[i].hop[h].from);
        }
    }
    for (int i = 0; i < s->model->storages; i++) {
        free_all(s->rows[i].exchange.to, s->rows[i].exchange.from);
    }
    free_all(s->buckets, s->rows);
    layout_free(&s->layout);
    process_group_free(&s->world);
    memset(s, 0, sizeof *s);
}

// -------------------------------------------------------------------------------------------------
// Predictions

// Adds the device memory of a planned store to each kind's bytes.
static inline void store_predict(const StatePlan *s, size_t memory[MEMORY_KINDS]) {
    for (int kind = 0; kind < STATE_KINDS; kind++) {
        memory[state_uses[kind].memory] += s->device[kind].held;
        memory[MEMORY_BUFFERS] += s->device[kind].slot_bytes;
    }
    memory[MEMORY_BUFFERS] += sizeof(ExactSum) + EXCHANGES * s->exchange_bytes +
                              s->offload_buffers.slot_bytes + (size_t)matrices_bytes(&s->matrices);
}
// Returns the bytes of state_piece (host memory) that the store uses.
static inline size_t store_scratch_bytes(const StatePlan *s) {
    int64_t longest = 0;
    for (int i = 0; i < s->model->storages; i++) {
        longest = max_i64(longest, store_own_elements(s, i));
    }
    return min_i64(STATE_PIECE, longest * (int64_t)sizeof(float));
}
// Returns the bytes of host memory for offloaded states and the buffers through which they move.
static inline size_t store_host_bytes(const StatePlan *s) {
    size_t bytes = s->offload_buffers.held + s->disk_buffers.held + s->sum_buffers.held;
    for (int kind = 0; kind < STATE_KINDS; kind++) { bytes += s->host[kind].held; }
    return bytes;
}

#endif
