// planned.h: the plan of the store: which states of a storage a rank has, where they will be
// stored, and how many bytes that takes. It allocates nothing. Predictions and offload.h use it;
// store.h allocates the memory and finds states in it.
//
// Buffers    One StateBuffer for each kind of state (owners and slices: layout.h):
//              params             working parameters; with --dtype fp32 also the masters
//              master, m, v       fp32 states
//              grads              fp32 sums
//              secondary          slices of hpZ's secondary copies
//              codes              records of qwZ
//              errors             errors of qgZ, fed back
//            and with p2p parameters (p2p.h):
//              making             gradients of micro-batches
//              coming             sums from other ranks
//              piece_sums         gradients of micro-batches that are computed in pieces
#ifndef STORE_PLANNED_H
#define STORE_PLANNED_H

#include "comm/comm.h"       // groups, messages
#include "engine/schedule.h" // how many pieces move
#include "state/disk.h"      // states on a disk
#include "state/layout.h"    // owners, slices, buffers

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

// Storages whose quantized gradients travel together: first, first - 1, ..., last. They are reduced
// in this order.
typedef struct {
    const ProcessGroup *process_group; // owners of the storages
    int first, last;
    // bounds in bytes of the records sent to and received from each member of this rank's node, and
    // sent to and received from each node
    int64_t *to_node, *from_node, *to_nodes, *from_nodes;
} Bucket;
// The exchange of a bucket in flight.
typedef struct {
    const Bucket *bucket; // NULL: none
    int hop;              // 0: being filled; 1: exchange inside the node; 2: between nodes
    bool add;             // the slices hold sums of earlier micro-steps
    int64_t step;
    CommRequest request;
    // records sent to and received from members of the node, then other nodes
    char *sent, *received, *onward, *arrived;
} BucketExchange;

// Messages that use a buffer. The buffer may be written again when they are complete.
typedef struct {
    CommRequest *open; // [REQUEST_USES * ranks]
    int count;
} PendingRequests;

// Buffer of a piece that moves between host and device. If the device updates, it is on the device
// and receives states. If the CPU updates, it is on the host and has a gradient and new parameters.
typedef struct {
    char *at;
    Stream link; // runs the copies of this buffer in order
} OffloadBuffer;
// A piece of a gradient that is copied to the host and added to the sum there.
typedef struct {
    float *at, *sum;
    int64_t count; // 0: none
} SumBuffer;

typedef struct {
    const GptModel *model;
    ZeroPolicy policy;
    Comm *comm;
    Stream *stream;
    const Group *ranks;         // all ranks
    const Placement *placement; // of units on the ranks
    DType dtype, wire;          // of working parameters; of gradient messages
    bool adam;                  // there are two moments; otherwise one
    // layout
    Layout layout;
    ProcessGroup world; // all ranks
    Bucket *buckets;
    int *bucket_of; // [storages] -1: this rank does not exchange quantized gradients of it
    int bucket_count;
    size_t exchange_bytes, unpacked_bytes;
    StateBuffer params, master, m, v, grads, secondary, codes, errors;
    StateBuffer host[HOST_KINDS]; // [kinds] states on the host
    // [storages] pieces in which offloaded states move for their update; 0: nothing is offloaded
    int *pieces;
    int *first_piece;            // [storages] pieces of all earlier storages
    size_t offload_buffer_bytes; // of an OffloadBuffer
    int *first_stored;           // [storages] pieces on disk of all earlier storages
    // [storages + 1] offset of its pieces in the file; the last one is the file's size
    int64_t *disk_at;
    size_t disk_buffer_bytes; // of a DiskBuffer
    size_t sum_bytes;         // of a SumBuffer
    // p2p: gradients of micro-batches, if sums stay; received sums
    StateBuffer making, coming;
    // p2p, in pieces: each micro-batch's gradient so far, if sums stay; otherwise the gradients of
    // pieces, in slots that blocks share unless their storages alternate (--share AxB)
    StateBuffer piece_sums;
    int64_t slot_elements; // p2p: elements of a slot for borrowed parameters
    // memory
    // parameters in compute precision, if it differs from storage precision; bucket exchanges
    char *unpacked, *exchange_base;
    StateBuffer offload_buffers, sum_buffers;
    OffloadBuffer offload_buffer[MOVING_PIECES];
    SumBuffer adding[MOVING_PIECES];
    StateBuffer disk_buffers;
    Disk *disk; // NULL: nothing is on a disk
    // file of the disk. The caller sets it before store_allocate(), and frees it
    DiskFile *file;
    // copies of parameters from the host into each shared slot
    Stream param_link[SHARED_SLOTS];
    ExactSum *squares;      // of the gradient's norm, on the device
    ExactSum *squares_read; // copy of squares in host memory, which the device writes
    ExactSum *sums;         // [ranks] squares of each rank
    // progress of a step; arrays are [storages] unless they say otherwise
    bool *first_write; // the gradient has no contribution since its last reduction
    int pieces_added;  // pieces of gradients added so far to sums on the host
    bool *summed;      // the slice holds sums of earlier micro-steps
    // the reduction in flight leaves its sum in the slot; it must be added to the slice
    bool *adds_to_shard;
    bool *near_valid; // the secondary slice has the newest version
    int *arriving;    // GatherKind of the gather in flight or arrived; ACQUIRE reads it
    CommRequest *reducing, *gathering;
    int64_t moved[2];   // bytes copied from the host; to the host
    int64_t stored[2];  // bytes that steps read from the disk; wrote to it
    int64_t *updates;   // updates so far, which is the newest version
    int64_t *restarted; // version at which the moments began; updates - restarted counts theirs
    // p2p: newest version that is stored here or posted. It counts steps, also those without an
    // update
    int64_t *version;
    bool knows_previous;        // p2p: the version before the newest was loaded, too
    PendingRequests *requests;  // p2p: [storages][REQUEST_KINDS]
    bool in_deferred;           // a deferred operation is running (p2p.h)
    bool *head_begun;           // p2p: [heads] a gradient of wte has begun in this buffer
    CommRequest *head_coming;   // p2p: [heads] receives the head's part of it
    int occupant[SHARED_SLOTS]; // storage whose gradient last used the shared slot
    BucketExchange exchange[EXCHANGES];
    int64_t exchanges;                  // exchanges started so far
    size_t unpacked_used, *unpacked_at; // bytes in use; [storages] offset of an acquired storage
    int held;                           // number of acquired storages
    StoreNoise noise;
    bool *noised;    // [storages] this step's gradient has its noise, and is not used yet
    bool pending;    // delayed updates: the host has the gradient of the previous step
    bool stochastic; // stochastic rounding of bf16 parameters
    uint64_t seed;   // of stochastic rounding. The caller sets both before it fills the masters
} Store;

static inline bool store_param_far(const Store *s, int storage) {
    return zero_param_far(&s->policy, storage);
}
static inline SumPlace store_sum_place(const Store *s, int storage) {
    return zero_sum_place(s->policy.offload, &s->layout.owners, storage);
}
static inline bool store_converts(DType dtype) { return dtype_size(dtype) != ops_real_bytes(); }
static inline bool store_holds(const Store *s, int storage) {
    return layout_holds(&s->layout, storage);
}
static inline bool store_is_borrowed(const Store *s, int storage) {
    return s->policy.p2p && s->policy.p2p->borrows && !store_holds(s, storage);
}
static inline const ProcessGroup *store_process_group(const Store *s, int storage) {
    return layout_process_group(&s->layout, storage);
}
static inline bool store_gathers_for_use(const Store *s, int storage) {
    return zero_gathers(&s->policy, &s->layout.owners, storage);
}
static inline bool store_has_secondary(const Store *s, int storage) {
    return s->policy.partition > 1 && store_gathers_for_use(s, storage);
}
// Returns the bounds of a storage's slices among its owners.
static inline const int64_t *store_slices(const Store *s, int storage) {
    return layout_slices(&s->layout, SLICES_WHOLE, storage);
}
// Returns the elements of this rank's slice, and their offset in the storage; both are 0 if the
// rank does not own the storage.
static inline int64_t store_own(const Store *s, int storage, int64_t *begin) {
    const Group *all = &store_process_group(s, storage)->all;
    const int64_t *bounds = store_slices(s, storage);
    *begin = all->me < 0 ? 0 : bounds[all->me];
    return all->me < 0 ? 0 : slice_length(bounds, all->me);
}
static inline int64_t store_own_elements(const Store *s, int storage) {
    int64_t begin;
    return store_own(s, storage, &begin);
}

// Returns how many elements of a part of a tensor are in this rank's slice, and their offset in the
// storage.
static inline int64_t store_own_part(const Store *s, int storage, const TensorPart *part,
                                     int64_t *begin) {
    int64_t first, own = store_own(s, storage, &first);
    *begin = max_i64(first, part->offset);
    return max_i64(0, min_i64(first + own, part->offset + part->elements) - *begin);
}

// Returns the bytes for compute-precision copies: of the largest unit that this rank computes, or
// of the head and a block, since wte may stay acquired (UnitMap: lent). In evaluations the
// embedding may follow the head while wte stays. The copies form a stack, so the space of lnf below
// wte is then unused.
static inline size_t store_unpacked_bytes(const Layout *l, DType dtype, const ZeroPolicy *policy) {
    const GptModel *m = l->model;
    size_t most = 0,
           block =
               (size_t)round_up(m->class_elements[STORAGE_BLOCK] * (int64_t)ops_real_bytes(), 64);
    for (int unit = 0; store_converts(dtype) && unit < m->units; unit++) {
        int storages[2], n = gpt_unit_storages(m, unit, storages);
        size_t bytes = 0;
        bool mine = true; // this rank holds all of the unit, so it computes it
        for (int i = 0; i < n; i++) {
            mine = mine &&
                   (policy->p2p ? policy->p2p->adds[storages[i]] : layout_holds(l, storages[i]));
            bytes += (size_t)round_up(
                gpt_storage_elements(m, storages[i]) * (int64_t)ops_real_bytes(), 64);
        }
        if (unit == m->units - 1 && policy->keeps_gathered) { bytes += block; }
        if (unit == 0) {
            bytes += (size_t)round_up(m->class_elements[gpt_unit_spec(m, UNIT_HEAD)->storages[0]] *
                                          (int64_t)ops_real_bytes(),
                                      64);
        }
        if (mine && bytes > most) { most = bytes; }
    }
    return most;
}

// Return the bytes of the records of one member's slice, and of the slices of the members with one
// local index on all nodes.
static inline int64_t store_record(const Store *s, int storage, int node, int local) {
    return slice_length(layout_slices(&s->layout, SLICES_GRADIENTS, storage),
                        group_at(&store_process_group(s, storage)->all, node, local));
}
static inline int64_t store_column(const Store *s, int storage, int local) {
    int64_t bytes = 0;
    for (int n = 0; n < store_process_group(s, storage)->all.nodes; n++) {
        bytes += store_record(s, storage, n, local);
    }
    return bytes;
}
// Plans the two exchanges of a bucket. The first sends to each member of the node the records of
// the slices of all owners with its local index. The second sends to each node the sums for its
// owner with this rank's local index.
static inline Bucket store_plan_bucket(const Store *s, int first, int last) {
    const Group *all = &store_process_group(s, first)->all;
    const int node = group_node(all, all->me), local = group_local(all, all->me),
              sizes[] = {all->locals, all->locals, all->nodes, all->nodes};
    int64_t *bounds[4];
    for (int k = 0; k < 4; k++) {
        bounds[k] = (int64_t *)checked_calloc((size_t)sizes[k] + 1, sizeof(int64_t), "buckets");
    }
    Bucket b = {
        store_process_group(s, first), first, last, bounds[0], bounds[1], bounds[2], bounds[3]};
    for (int storage = first; storage >= last; storage--) {
        for (int l = 0; l < all->locals; l++) {
            b.to_node[l + 1] += store_column(s, storage, l);
            b.from_node[l + 1] += store_column(s, storage, local);
        }
        for (int n = 0; n < all->nodes; n++) {
            b.to_nodes[n + 1] += store_record(s, storage, n, local);
            b.from_nodes[n + 1] += store_record(s, storage, node, local);
        }
    }
    for (int k = 0; k < 4; k++) {
        for (int i = 0; i < sizes[k]; i++) { bounds[k][i + 1] += bounds[k][i]; }
    }
    return b;
}
// Returns the bytes of the records that an exchange of the bucket sends and receives.
static inline int64_t bucket_bytes(const Bucket *b) {
    const Group *all = &b->process_group->all;
    int64_t inside =
        round_up(b->to_node[all->locals], 64) + round_up(b->from_node[all->locals], 64);
    int64_t between =
        round_up(b->to_nodes[all->nodes], 64) + round_up(b->from_nodes[all->nodes], 64);
    return inside + (b->process_group->across.n > 1 ? between : 0);
}
// Plans the buckets. The storages of a bucket are neighbours and have the same process group.
static inline void store_plan_buckets(Store *s) {
    int64_t elements = 0;
    for (int storage = s->model->storages - 1, first = storage; storage >= 0; storage--) {
        const ProcessGroup *process_group = store_process_group(s, storage);
        s->bucket_of[storage] = -1;
        if (!s->policy.quantized_gradients || process_group->all.me < 0 ||
            process_group->all.n == 1) {
            continue;
        }
        if (!elements) { first = storage; }
        elements += gpt_storage_elements(s->model, storage);
        s->bucket_of[storage] = s->bucket_count;
        if (elements < BUCKET_ELEMENTS && storage &&
            store_process_group(s, storage - 1) == process_group) {
            continue;
        }
        Bucket *b = &s->buckets[s->bucket_count++];
        *b = store_plan_bucket(s, first, storage);
        s->exchange_bytes = (size_t)max_i64((int64_t)s->exchange_bytes, bucket_bytes(b));
        elements = 0;
    }
}

// Plans the slots of borrowed parameters, and of gradients that are sent to their owners. The
// gradient of wte has a buffer of its own, because it exists from the head's part to the
// embedding's. Each owned storage has a buffer for received parts of its sum.
static inline void store_plan_borrowed(Store *s) {
    const P2p *r = s->policy.p2p;
    const GptModel *m = s->model;
    const size_t n = (size_t)m->storages;
    bool *here = (bool *)checked_calloc(n, sizeof(bool), "p2p states");
    int *copies = (int *)checked_calloc(n, sizeof(int), "p2p states");
    for (int i = 0; i < m->storages; i++) {
        here[i] = !layout_holds(&s->layout, i);
        copies[i] = !here[i];
    }
    s->slot_elements =
        buffer_add_stages(&s->params, m, r, here, BORROWED_SLOTS, dtype_size(s->dtype));
    s->coming = buffer_plan_copies(m, copies, sizeof(float));
    for (int i = 0; i < m->storages; i++) {
        here[i] = i > 0;
        copies[i] = !i;
    }
    s->making = buffer_plan_copies(m, copies, sizeof(float));
    const int64_t slot = buffer_add_stages(&s->making, m, r, here, r->grad_slots, sizeof(float));
    for (int i = 1; i < m->storages; i++) {
        s->making.slice[i] += r->grad_slot[i] * slot * (int64_t)sizeof(float);
    }
    s->making.slot_bytes += s->making.held;
    s->making.held = 0;
    s->coming.slot_bytes += s->coming.held;
    s->coming.held = 0;
    free(here);
    free(copies);
}
// Plans the p2p buffers: versions of parameters, gradients, and received sums, of the storages that
// this rank owns or computes with.
static inline void store_plan_p2p(Store *s) {
    const P2p *r = s->policy.p2p;
    const GptModel *m = s->model;
    int *copies = (int *)checked_calloc((size_t)m->storages, sizeof(int), "p2p states");
    unsigned char *slot = (unsigned char *)checked_calloc((size_t)m->storages, 1, "p2p states");
    buffer_free(&s->params);
    buffer_free(&s->grads);
    for (int i = 0; i < m->storages; i++) {
        copies[i] = r->places[i];
        slot[i] = (unsigned char)gpt_storage_class(m, i);
    }
    s->params = buffer_plan_copies(m, copies, dtype_size(s->dtype));
    for (int i = 0; i < m->storages; i++) {
        copies[i] = (r->stays ? layout_holds(&s->layout, i) : r->adds[i]) ? r->sums : 0;
    }
    s->grads = buffer_plan_copies(m, copies, sizeof(float));
    if (r->borrows) {
        store_plan_borrowed(s);
        free(copies);
        free(slot);
        return;
    }
    // `making` has gradients of micro-batches, if sums stay; with SUM_OWNER, the owner's sum of the
    // other ranks' gradients, to which its own is added last
    for (int i = 0; i < m->storages; i++) {
        const bool kept = r->way && r->way[i] == SUM_OWNER && layout_holds(&s->layout, i);
        copies[i] = r->stays && r->adds[i] ? i ? 1 : r->heads : kept;
    }
    s->making = buffer_plan_shared(m, copies, slot, STORAGE_CLASSES, sizeof(float), r->stays);
    for (int i = 0; i < m->storages; i++) { copies[i] = r->comes[i]; }
    s->coming = buffer_plan_shared(m, copies, r->grad_slot, r->grad_slots, sizeof(float), false);
    for (int i = 0; i < m->storages; i++) {
        copies[i] = r->joins_pieces && r->adds[i] && (!r->stays || layout_holds(&s->layout, i));
    }
    // a piece's gradient of one storage is added up before that of the next storage begins
    const bool in_turns = !r->stays && !share_alternates(m->share);
    s->piece_sums = buffer_plan_shared(m, copies, slot, STORAGE_CLASSES, sizeof(float), in_turns);
    free(copies);
    free(slot);
}

// Returns whether updates are delayed: the device computes with parameters that are one update
// older than the masters, so fp32 masters are stored apart from the parameters, too.
static inline bool store_delays(const Store *s) {
    return s->policy.offload && s->policy.offload->delays;
}
// Returns the bytes that the longest piece of a storage needs in an OffloadBuffer, with these
// states on the host. If the device updates, these are the states, gradient and parameters on the
// host; if the CPU updates, the gradient and parameters that are not on the host.
static inline int64_t store_piece_bytes(const Store *s, const Offload *o, int storage) {
    const int64_t elements = min_i64(offload_piece(s->model), store_own_elements(s, storage)),
                  size = (int64_t)dtype_size(s->dtype);
    const bool parameters = offload_has(o, storage, STATE_PARAMETERS) != o->cpu_update,
               gradient = offload_has(o, storage, STATE_GRADIENT) != o->cpu_update;
    const int64_t floats = (o->cpu_update ? 0 : offload_states(o, storage)) + gradient;
    return offload_has_states(o, storage)
               ? elements * (floats * (int64_t)sizeof(float) + (parameters ? size : 0))
               : 0;
}
// Returns the bytes of an OffloadBuffer, with these states on the host.
static inline size_t store_offload_buffer_bytes(const Store *s, const Offload *o) {
    int64_t most = 0;
    for (int i = 0; i < s->model->storages; i++) {
        most = max_i64(most, store_piece_bytes(s, o, i));
    }
    return (size_t)round_up(most, 64);
}
// Returns the bytes of a SumBuffer; 0 if no gradient is added to a sum on the host.
static inline size_t store_sum_bytes(const Store *s, const Offload *o) {
    int64_t most = 0;
    for (int i = 0; i < s->model->storages && s->policy.accumulates; i++) {
        const bool adds = zero_sum_place(o, &s->layout.owners, i) == SUM_IS_ADDED &&
                          zero_reduces_often(&s->policy, &s->layout.owners, i);
        most = max_i64(most, adds ? min_i64(offload_piece(s->model), store_own_elements(s, i)) : 0);
    }
    return (size_t)round_up(most * (int64_t)sizeof(float), 64);
}
// Returns whether the slice of a storage is stored outside its slot.
static inline bool store_lent_apart(const ZeroPolicy *z, const Owners *h, const BufferPlan *plan,
                                    StateKind kind, int storage) {
    return kind == STATE_GRADIENT
               ? z->accumulates && plan->layout == BUFFER_SLOTS && zero_divides(z, h, storage)
               : zero_param_apart(z);
}
// Returns the plan of the buffer of parameters or of gradients, with these states on the host.
// Fills apart and far ([storages] each), which the plan points to.
static inline BufferPlan store_lent_plan(const Store *s, const Offload *o, StateKind kind,
                                         bool *apart, bool *far) {
    const bool gradients = kind == STATE_GRADIENT;
    ZeroPolicy policy = s->policy;
    policy.offload = o;
    const bool slots = gradients ? zero_gradient_stage(&policy) >= 2 : policy.stage >= 3;
    const size_t size = gradients ? sizeof(float) : dtype_size(s->dtype);
    const BufferPlan plan = {
        .layout = slots ? BUFFER_SLOTS : BUFFER_FULL,
        .slices = SLICES_WHOLE,
        .size = size,
        .apart = apart,
        .there = NULL,
        .far = far,
        .travels = true,
    };
    for (int i = 0; i < s->model->storages; i++) {
        apart[i] = store_lent_apart(&policy, &s->layout.owners, &plan, kind, i);
        far[i] = offload_has(o, i, kind);
    }
    return plan;
}
static inline StateBuffer store_plan_lent(const Store *s, const Offload *o, StateKind kind) {
    const size_t storages = (size_t)s->model->storages;
    bool *apart = (bool *)checked_calloc(storages, 2 * sizeof(bool), "layout");
    const StateBuffer buffer =
        buffer_plan(&s->layout, store_lent_plan(s, o, kind, apart, apart + storages));
    free(apart);
    return buffer;
}
// Returns the bytes of a piece in the file and in a DiskBuffer: its states one after another, each
// rounded up to DISK_GRAIN.
static inline int64_t store_stored_bytes(const Offload *o, int storage, int64_t elements) {
    return offload_stored(o, storage) * round_up(elements * (int64_t)sizeof(float), DISK_GRAIN);
}
// Returns the bytes of all pieces of this rank's slice. *longest: bytes of the longest piece.
static inline int64_t store_all_stored_bytes(const Store *s, const Offload *o, int storage,
                                             int64_t *longest) {
    const int64_t own = store_own_elements(s, storage),
                  piece = min_i64(own, offload_piece(s->model));
    *longest = store_stored_bytes(o, storage, piece);
    return piece ? own / piece * *longest + store_stored_bytes(o, storage, own % piece) : 0;
}
// Returns the bytes of a DiskBuffer, with these states on disk.
static inline size_t store_disk_buffer_bytes(const Store *s, const Offload *o) {
    int64_t most = 0, longest;
    for (int i = 0; i < s->model->storages; i++) {
        store_all_stored_bytes(s, o, i, &longest);
        most = max_i64(most, longest);
    }
    return (size_t)most;
}
// Returns the bytes of all DiskBuffers, with space to align the first one.
static inline size_t store_disk_buffers_bytes(size_t slot) {
    return slot ? DISK_PIECES * slot + DISK_GRAIN : 0;
}
static inline void store_plan_disk(Store *s) {
    const Offload *o = s->policy.offload;
    const size_t n = (size_t)s->model->storages;
    int64_t longest;
    s->first_stored = (int *)checked_calloc(n + 1, sizeof(int), "layout");
    s->disk_at = (int64_t *)checked_calloc(n + 1, sizeof(int64_t), "layout");
    for (int i = 0; i < s->model->storages; i++) {
        s->first_stored[i + 1] = s->first_stored[i] + (offload_stored(o, i) ? s->pieces[i] : 0);
        s->disk_at[i + 1] = s->disk_at[i] + store_all_stored_bytes(s, o, i, &longest);
    }
    s->disk_buffer_bytes = store_disk_buffer_bytes(s, o);
    s->disk_buffers.far = true;
    s->disk_buffers.held = store_disk_buffers_bytes(s->disk_buffer_bytes);
}
// Returns the bytes of the file. A step reads and writes as many.
static inline int64_t store_disk_bytes(const Store *s) { return s->disk_at[s->model->storages]; }

// Plans the states on the host and on disk, those of the optimizer on the device, and the buffers
// through which states move.
static inline void store_plan_offload(Store *s) {
    const Offload *o = s->policy.offload;
    const size_t storages = (size_t)s->model->storages;
    const BufferLayout whole = s->policy.stage >= 1 ? BUFFER_SLICES : BUFFER_FULL;
    StateBuffer *const device[] = {&s->master, &s->m, &s->v};
    bool *there = (bool *)checked_calloc(storages, sizeof(bool), "layout");
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) {
        const bool none = kind == STATE_MASTER ? s->dtype == DTYPE_FP32 && !store_delays(s)
                                               : kind == STATE_V && !s->adam;
        BufferPlan plan = {
            none ? BUFFER_NONE : whole, SLICES_WHOLE, sizeof(float), NULL, there, NULL, false};
        for (size_t i = 0; i < storages; i++) {
            there[i] = !offload_has(o, (int)i, (StateKind)kind);
        }
        *device[kind] = buffer_plan(&s->layout, plan);
        for (size_t i = 0; i < storages; i++) {
            there[i] = !there[i] && !offload_on_disk(o, (int)i, (StateKind)kind);
        }
        plan.layout = none || !o ? BUFFER_NONE : BUFFER_SLICES;
        s->host[kind] = buffer_plan(&s->layout, plan);
        s->host[kind].far = true;
    }
    for (int kind = STATE_GRADIENT; kind < HOST_KINDS; kind++) {
        const size_t size = kind == STATE_GRADIENT ? sizeof(float) : dtype_size(s->dtype);
        const BufferPlan plan = {
            o ? BUFFER_SLICES : BUFFER_NONE, SLICES_WHOLE, size, NULL, there, NULL, false};
        for (size_t i = 0; i < storages; i++) {
            there[i] = offload_has(o, (int)i, (StateKind)kind);
        }
        s->host[kind] = buffer_plan(&s->layout, plan);
        s->host[kind].far = true;
    }
    free(there);
    s->pieces = (int *)checked_calloc(2 * storages + 1, sizeof(int), "layout");
    s->first_piece = s->pieces + storages;
    for (int i = 0; i < s->model->storages; i++) {
        s->pieces[i] =
            store_holds(s, i) ? offload_pieces(s->model, &s->policy, &s->layout.owners, i) : 0;
        s->first_piece[i + 1] = s->first_piece[i] + s->pieces[i];
    }
    s->offload_buffer_bytes = o ? store_offload_buffer_bytes(s, o) : 0;
    s->offload_buffers.far = o && o->cpu_update;
    *(s->offload_buffers.far ? &s->offload_buffers.held : &s->offload_buffers.slot_bytes) =
        MOVING_PIECES * s->offload_buffer_bytes;
    s->sum_bytes = o ? store_sum_bytes(s, o) : 0;
    s->sum_buffers.far = true;
    s->sum_buffers.held = MOVING_PIECES * s->sum_bytes;
    store_plan_disk(s);
}

// Decides where every state is stored. It allocates only tables, so predictions use it, too. ranks
// has all ranks, as the rank of this store sees them. ranks and placement must outlive the store.
static inline Store store_plan(const GptModel *m, const Group *ranks, const Placement *placement,
                               ZeroPolicy policy, DType dtype, DType wire, bool adam) {
    Store s;
    memset(&s, 0, sizeof s);
    s.model = m;
    s.policy = policy;
    s.dtype = dtype;
    s.wire = wire;
    s.adam = adam;
    s.ranks = ranks;
    s.placement = placement;
    s.layout = layout_make(m, ranks, placement, &policy);
    s.world = process_group_of_all(ranks);
    s.buckets = (Bucket *)checked_calloc((size_t)m->storages, sizeof(Bucket), "buckets");
    s.bucket_of = (int *)checked_calloc((size_t)m->storages, sizeof(int), "buckets");
    store_plan_buckets(&s);
    const bool feedback = policy.feedback && s.bucket_count > 0;
    store_plan_offload(&s);
    const BufferPlan secondary = {policy.partition > 1 ? BUFFER_SLICES : BUFFER_NONE,
                                  SLICES_NEAR,
                                  dtype_size(dtype),
                                  NULL,
                                  NULL,
                                  NULL,
                                  false};
    const BufferPlan codes = {policy.quantized_weights ? BUFFER_SLOTS : BUFFER_NONE,
                              SLICES_WEIGHTS,
                              1,
                              NULL,
                              NULL,
                              NULL,
                              true};
    const BufferPlan errors = {feedback ? BUFFER_FULL : BUFFER_NONE,
                               SLICES_WHOLE,
                               sizeof(uint16_t),
                               NULL,
                               NULL,
                               NULL,
                               false};
    s.params = store_plan_lent(&s, policy.offload, STATE_PARAMETERS);
    s.grads = store_plan_lent(&s, policy.offload, STATE_GRADIENT);
    s.secondary = buffer_plan(&s.layout, secondary);
    s.codes = buffer_plan(&s.layout, codes);
    s.errors = buffer_plan(&s.layout, errors);
    if (policy.p2p) { store_plan_p2p(&s); }
    s.unpacked_bytes = store_unpacked_bytes(&s.layout, dtype, &policy);
    return s;
}
// Adds the device memory of a planned store to each kind's bytes.
static inline void store_predict(const Store *s, size_t memory[MEMORY_KINDS]) {
    memory[MEMORY_PARAMETERS] += s->params.held + s->secondary.held;
    memory[MEMORY_GRADIENTS] += s->grads.held;
    memory[MEMORY_OPTIMIZER] += s->master.held + s->m.held + s->v.held;
    memory[MEMORY_BUFFERS] += s->params.slot_bytes + s->grads.slot_bytes + s->making.slot_bytes +
                              s->coming.slot_bytes + s->piece_sums.slot_bytes + s->codes.held +
                              s->codes.slot_bytes + s->errors.held + sizeof(ExactSum) +
                              EXCHANGES * s->exchange_bytes + s->unpacked_bytes +
                              s->offload_buffers.slot_bytes;
}
// Returns the bytes of state_piece (host memory) that the store uses.
static inline size_t store_scratch_bytes(const Store *s) {
    int64_t longest = 0;
    for (int i = 0; i < s->model->storages; i++) {
        longest = max_i64(longest, store_own_elements(s, i));
    }
    return (size_t)min_i64(STATE_PIECE, longest * (int64_t)sizeof(float));
}
// Returns the bytes of host memory for offloaded states and the buffers through which they move.
static inline size_t store_host_bytes(const Store *s) {
    size_t bytes = s->offload_buffers.held + s->disk_buffers.held + s->sum_buffers.held;
    for (int kind = 0; kind < HOST_KINDS; kind++) { bytes += s->host[kind].held; }
    return bytes;
}

#endif
