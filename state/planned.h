// planned.h: the plan of the store: which states of a storage a rank has, where they will be
// stored, and how many bytes that takes. A plan is made in three parts (plan/state_plan.h):
// store_plan and store_find_owners begin the rows of storages (table.h); the policies fill them;
// store_set_positions gives every state its position. It allocates nothing but tables. Predictions
// and offload.h use it; store.h allocates the memory and finds states in it.
#ifndef STORE_PLANNED_H
#define STORE_PLANNED_H

#include "base/base.h"
#include "comm/group.h"
#include "comm/records.h"
#include "model/architecture.h"
#include "model/config.h"
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
// in this order, one directly after another (zero.h), by two exchanges: inside nodes, then
// between them.
enum { HOPS = 2 };
typedef struct Bucket {
    const ProcessGroup *process_group; // owners of the storages
    int first, last;
    RecordExchange hop[HOPS];
} Bucket;

// In which type a run keeps its working parameters, and sums its gradients over ranks.
typedef struct {
    DType parameters, reduction;
} MixedPrecision;

// What is planned: which states a rank has, where each will be, and how they travel. It is made
// once; a run may change only its last four fields.
typedef struct {
    const GptModel *model;
    ZeroPolicy policy;
    // steps overlap (cyclic.h): states travel by messages between two ranks (p2p), and versions of
    // parameters count steps, also those without an update; else they count updates
    bool steps_overlap;
    P2p p2p;
    const Group *ranks;         // all ranks
    const Placement *placement; // of units on the ranks
    DType dtype, wire;          // of working parameters; of gradient messages
    const Optimizer *optimizer;
    ProcessGroup *groups; // [group_count] owners of storages; those of several may be the same
    int group_count;
    ProcessGroup world;        // all ranks
    ProcessGroup expert_ranks; // that exchange rows of experts; no ranks: none do
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
    float rates[RATE_KINDS]; // learning rates of tensors, as factors; of biases that balance: all
} StatePlan;

// Bytes copied between host and device.
typedef struct {
    int64_t to_device, to_host;
} HostTraffic;

// Returns the bytes of n elements of a state.
static inline int64_t store_bytes(const StatePlan *s, StateKind kind, int64_t n) {
    return state_bytes(kind, s->dtype, n);
}
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
    return row_holds(&s->rows[storage]);
}
// Returns the bounds of a storage's slices among its owners.
static inline const int64_t *store_slices(const StatePlan *s, int storage) {
    return s->rows[storage].slices[SLICES_WHOLE];
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
    return slice_length(s->rows[storage].slices[SLICES_GRADIENTS],
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
// Plans the buckets of the storages that this rank owns.
static inline void store_plan_buckets(StatePlan *s) {
    for (int last = s->model->storages - 1; last >= 0; last--) {
        StorageRow *row = &s->rows[last];
        if (row->bucket < 0 || !row_holds(row)) { continue; }
        Bucket *b = &s->buckets[s->bucket_count];
        row->exchange_bucket = b;
        if (last && row[-1].bucket == row->bucket) { continue; }
        *b = store_plan_bucket(s, row->bucket, last);
        s->bucket_count++;
        int64_t bytes = 0;
        for (int h = 0; h < bucket_hops(b); h++) {
            bytes += exchange_bytes(&b->hop[h], b->hop[h].to) +
                     exchange_bytes(&b->hop[h], b->hop[h].from);
        }
        s->exchange_bytes = max_i64(s->exchange_bytes, bytes);
    }
}

// Returns the process group of these ranks. Storages with equal lists of ranks share one.
static inline ProcessGroup *store_group_of(StatePlan *s, const int *ranks, int n) {
    int k = 0;
    while (k < s->group_count &&
           (s->groups[k].all.n != n || memcmp(s->groups[k].all.ranks, ranks, n * sizeof(int)))) {
        k++;
    }
    if (k == s->group_count) {
        s->groups[s->group_count++] = process_group_make(s->ranks, ranks, n, s->policy.partition);
        process_group_slice(&s->groups[k], s->model, &s->policy);
    }
    return &s->groups[k];
}
// Finds the ranks that exchange rows of experts with this one, itself among them.
static inline void store_find_expert_ranks(StatePlan *s) {
    const Placement *p = s->placement;
    const int divided = (int)gpt_expert_ranks(&s->model->config);
    int place;
    const Stage *stage = &p->stage[placement_find_rank(p, s->ranks->me, &place)];
    if (divided == 1) { return; }
    for (int i = 0; i < p->stages; i++) {
        if (p->stage[i].replicas % divided == 0) { continue; }
        die(EXIT_INPUT, "give a number that divides them",
            "--expert-parallel %d: a stage has %d ranks", divided, p->stage[i].replicas);
    }
    int *ranks = new_array(int, divided, "ranks of experts");
    for (int i = 0; i < divided; i++) { ranks[i] = stage->ranks[place - place % divided + i]; }
    s->expert_ranks = process_group_make(s->ranks, ranks, divided, 1);
    free(ranks);
}
// Finds the ranks that own each storage: those of all stages that use it, or, of experts, those
// that have the same ones as this rank; neighbours have different ones. Where steps overlap, a
// storage has one owner (cyclic_routes.h).
static inline void store_find_owners(StatePlan *s) {
    const GptModel *m = s->model;
    const Placement *p = s->placement;
    const int divided = (int)gpt_expert_ranks(&m->config);
    int place;
    placement_find_rank(p, s->ranks->me, &place);
    bool *uses = placement_uses(m, p);
    int *ranks = new_array(int, s->ranks->n, "owners");
    ProcessGroup *owners = NULL; // of the storage before, until others are found
    s->groups = new_array(ProcessGroup, m->storages, "owners");
    for (int i = 0; i < m->storages; i++) {
        StorageRow *row = &s->rows[i];
        const bool *used = uses + i * p->stages, block = gpt_storage_is_block(m, i);
        int stages = 0;
        for (int k = 0; k < p->stages; k++) { stages += used[k]; }
        row->tied = stages > 1 || (share_alternates(m->share) && block);
        row->turns = block && !row->tied;
        ranks[0] = row->p2p.owner;
        row->experts = gpt_storage_class(m, i) == STORAGE_EXPERTS;
        const int step = row->experts ? divided : 1;
        const bool same = i && !s->steps_overlap && row->experts == row[-1].experts &&
                          !memcmp(used, used - p->stages, p->stages * sizeof *used);
        if (!same) {
            const int n =
                s->steps_overlap ? 1 : placement_list_ranks(p, used, place % step, step, ranks);
            owners = store_group_of(s, ranks, n);
        }
        owners->blocks[row->experts] += row->turns;
        row->owners = owners;
        for (int k = 0; k < SLICE_KINDS; k++) {
            row->slices[k] = owners->slices[k].of_class[gpt_storage_class(m, i)];
        }
    }
    free_all(uses, ranks);
}
// Begins a plan: what it is made from, and rows that nothing is decided about. ranks has all ranks,
// as the rank of this store sees them. ranks and placement must outlive the store.
static inline StatePlan store_plan(const GptModel *m, const Group *ranks,
                                   const Placement *placement, const ZeroPolicy *policy,
                                   MixedPrecision precision, const Optimizer *optimizer) {
    StatePlan s = {
        .model = m,
        .policy = *policy,
        .steps_overlap = policy->cyclic != NULL,
        .ranks = ranks,
        .placement = placement,
        .dtype = precision.parameters,
        .wire = precision.reduction,
        .optimizer = optimizer,
        .world = process_group_of_all(ranks),
        .buckets = new_array(Bucket, m->storages, "buckets"),
        .rows = new_array(StorageRow, m->storages, "states"),
    };
    for (int k = 0; k < RATE_KINDS; k++) { s.rates[k] = k != RATE_BALANCE; }
    return s;
}

// Does the run keep this moment of the optimizer?
static inline bool store_keeps_moment(const StatePlan *s, StateKind kind) {
    return optimizer_keeps(s->optimizer, kind) && !s->policy.forward_only;
}
// Returns whether updates are delayed: the device computes with parameters that are one update
// older than the masters, so fp32 masters are stored apart from the parameters, too.
static inline bool store_delays(const StatePlan *s) {
    return s->policy.offload && s->policy.offload->delays;
}

// -------------------------------------------------------------------------------------------------
// Positions of states

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
            x->stride = store_bytes(s, kind, gpt_storage_elements(s->model, i));
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
    const int stages = s->p2p.stages, storages = s->model->storages;
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
            at += store_bytes(s, kind, gpt_storage_elements(s->model, i));
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
    const P2p *r = &s->p2p;
    const GptModel *m = s->model;
    StateBuffer *b = s->device;
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
// Plans the buffers on the device and on the host.
static inline void store_plan_states(StatePlan *s) {
    for (int kind = 0; kind < STATE_KINDS; kind++) {
        const bool by_p2p =
            kind == STATE_PARAMETERS || kind == STATE_GRADIENT || kind >= STATE_MADE;
        s->host[kind].layout = kind < HOST_KINDS ? BUFFER_SLICES : BUFFER_NONE;
        s->host[kind].size = s->device[kind].size;
        s->host[kind].cut = s->device[kind].cut;
        s->host[kind].on_host = true;
        if (!s->steps_overlap || !by_p2p) {
            buffer_plan(&s->device[kind], s->rows, s->model->storages, kind);
        }
        buffer_plan(&s->host[kind], s->rows, s->model->storages, kind);
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
    bool in, out;
} PiecePart;
enum { PIECE_PARTS = OPTIMIZER_KINDS + 2 };
// Is a storage updated in two parts, with its matrices between them? Then each piece comes twice:
// for its moments and its gradient, and (second) for its parameters. Piece p comes for the second
// time as piece p + pieces.
static inline bool store_in_parts(const StatePlan *s, int storage) {
    return s->rows[storage].wave >= 0;
}
static inline bool store_piece_takes(const StatePlan *s, int storage, StateKind kind, bool second) {
    const bool first = kind == STATE_GRADIENT || optimizer_keeps(s->optimizer, kind);
    return !store_in_parts(s, storage) || first != second;
}
static inline int store_piece_parts(const StatePlan *s, int storage, bool second,
                                    PiecePart parts[PIECE_PARTS]) {
    const StorageRow *row = &s->rows[storage];
    const Offload *o = s->policy.offload;
    const bool masters = s->dtype == DTYPE_FP32; // parameters are their own masters
    const bool cpu = o && o->cpu_update;
    int n = 0;
    if (!row_offloads_states(row)) { return 0; }
    for (int kind = STATE_MASTER; kind < OPTIMIZER_KINDS && !cpu; kind++) {
        const PiecePart part = {.kind = kind, .in = true, .out = true};
        if (row_offloads(row, kind)) { parts[n++] = part; }
    }
    const PiecePart gradient = {.kind = STATE_GRADIENT, .in = !cpu, .out = cpu},
                    parameters = {.kind = STATE_PARAMETERS,
                                  .in = cpu || masters,
                                  .out = !cpu || (masters && !o->delays)};
    if (row_offloads(row, STATE_GRADIENT) != cpu) { parts[n++] = gradient; }
    if (row_offloads(row, STATE_PARAMETERS) != cpu) { parts[n++] = parameters; }
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
// Returns the bytes that the longest piece of a storage needs in an OffloadBuffer.
static inline int64_t store_piece_bytes(const StatePlan *s, int storage) {
    PiecePart parts[PIECE_PARTS];
    int64_t most = 0;
    for (int second = 0; second < 2; second++) {
        int64_t bytes = 0;
        for (int k = store_piece_parts(s, storage, second, parts) - 1; k >= 0; k--) {
            bytes += store_bytes(s, parts[k].kind, store_longest_piece(s, storage));
        }
        most = max_i64(most, bytes);
    }
    return most;
}
// Returns the bytes of an OffloadBuffer.
static inline size_t store_offload_buffer_bytes(const StatePlan *s) {
    int64_t most = 0;
    for (int i = 0; i < s->model->storages; i++) { most = max_i64(most, store_piece_bytes(s, i)); }
    return round_up(most, 64);
}
// Returns the bytes of a SumBuffer; 0 if no gradient is added to a sum on the host.
static inline size_t store_sum_bytes(const StatePlan *s) {
    int64_t most = 0;
    for (int i = 0; i < s->model->storages && s->policy.accumulates; i++) {
        const bool adds = s->rows[i].sum == SUM_IS_ADDED && s->rows[i].reduces_often;
        most = max_i64(most, adds ? store_longest_piece(s, i) : 0);
    }
    return round_up(store_bytes(s, STATE_GRADIENT, most), 64);
}
// Returns the bytes of the first kinds, up to `end`, of a piece in the file and in a DiskBuffer:
// its states one after another, each rounded up to DISK_GRAIN.
static inline int64_t store_stored_before(const StatePlan *s, int storage, int64_t elements,
                                          StateKind end) {
    int64_t bytes = 0;
    for (int kind = 0; kind < end; kind++) {
        bytes += (s->rows[storage].disk >> kind & 1) *
                 round_up(store_bytes(s, kind, elements), DISK_GRAIN);
    }
    return bytes;
}
// Returns the bytes of all of them.
static inline int64_t store_stored_bytes(const StatePlan *s, int storage, int64_t elements) {
    return store_stored_before(s, storage, elements, OPTIMIZER_KINDS);
}
// Returns the bytes of all pieces of this rank's slice.
static inline int64_t store_all_stored_bytes(const StatePlan *s, int storage) {
    const int64_t own = store_own_elements(s, storage), piece = store_longest_piece(s, storage);
    return piece ? own / piece * store_stored_bytes(s, storage, piece) +
                       store_stored_bytes(s, storage, own % piece)
                 : 0;
}
// Returns the bytes of a DiskBuffer.
static inline size_t store_disk_buffer_bytes(const StatePlan *s) {
    int64_t most = 0;
    for (int i = 0; i < s->model->storages; i++) {
        most = max_i64(most, store_stored_bytes(s, i, store_longest_piece(s, i)));
    }
    return most;
}
// Returns the bytes of all DiskBuffers, with space to align the first one.
static inline size_t store_disk_buffers_bytes(size_t slot) {
    return slot ? DISK_PIECES * slot + DISK_GRAIN : 0;
}
static inline void store_plan_disk(StatePlan *s) {
    int pieces = 0;
    int64_t at = 0;
    for (int i = 0; i < s->model->storages; i++) {
        StorageRow *row = &s->rows[i];
        row->first_stored = pieces;
        row->disk_at = at;
        row->disk_bytes = store_all_stored_bytes(s, i);
        pieces += row->disk && row_holds(row) ? row->pieces : 0;
        at += row->disk_bytes;
    }
    s->disk_buffer_bytes = store_disk_buffer_bytes(s);
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
        const int wave = s->rows[i].wave;
        last = wave < 0 ? i : wave;
        for (int second = 0; second < (wave < 0 ? 1 : 2); second++) {
            for (int k = i; k <= last; k++) {
                s->rows[k].first_piece[second] = number;
                number += row_holds(&s->rows[k]) ? s->rows[k].pieces : 0;
            }
        }
    }
}
// Plans the pieces of offloaded states, and the buffers through which they move.
static inline void store_plan_pieces(StatePlan *s) {
    const Offload *o = s->policy.offload;
    store_number_pieces(s);
    s->offload_buffer_bytes = store_offload_buffer_bytes(s);
    s->offload_buffers.on_host = o && o->cpu_update;
    *(s->offload_buffers.on_host ? &s->offload_buffers.held : &s->offload_buffers.slot_bytes) =
        MOVING_PIECES * s->offload_buffer_bytes;
    s->sum_bytes = store_sum_bytes(s);
    s->sum_buffers.on_host = true;
    s->sum_buffers.held = MOVING_PIECES * s->sum_bytes;
    store_plan_disk(s);
}

// Gives every state its position, after the policies have filled the rows.
static inline void store_set_positions(StatePlan *s) {
    store_plan_buckets(s);
    store_plan_states(s);
    store_plan_pieces(s);
    if (s->policy.matrices) {
        s->matrices = matrices_plan(s->model, s->rows, s->ranks->n, s->dtype);
    }
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
    for (int i = 0; i < s->group_count; i++) { process_group_free(&s->groups[i]); }
    free_all(s->groups, s->rows[0].p2p.places); // (cyclic_routes.h: the first row has all of them)
    free_all(s->buckets, s->rows);
    process_group_free(&s->world);
    process_group_free(&s->expert_ranks);
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
// Returns the elements of the longest collective over a storage, with padding.
static inline int64_t store_most_elements(const StatePlan *s) {
    int64_t most = 0;
    for (int i = 0; i < s->model->storages; i++) {
        most = max_i64(most, store_padded(gpt_storage_elements(s->model, i),
                                          s->rows[i].owners->all.n, zero_grain(&s->policy)));
    }
    return most;
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
