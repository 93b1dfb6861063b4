// store.h: the store in memory. It allocates what was planned (planned.h), finds a state in it
// (store_at), and reads and writes states wherever they are. sums.h, update.h, and gather.h and
// p2p.h, follow a gradient through a step: to its sum, to new parameters, to their next uses.
#ifndef STORE_H
#define STORE_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "state/disk.h"
#include "state/layout.h"
#include "state/matrices.h"
#include "state/optimizer.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/table.h"

#ifndef ERROR_STEPS // tests make it small
#define ERROR_STEPS 1024
#endif
// Fed back errors are reset after so many updates. They are a moving average, of which this is the
// weight of the newest (arXiv 2407.04480).
static const float ERROR_WEIGHT = 0.8f;

// -------------------------------------------------------------------------------------------------
// Memory, and what is in flight

// The exchange of a bucket in flight.
typedef struct {
    const Bucket *bucket; // NULL: none
    int hop;              // 0: being filled; 1: exchange inside the node; 2: between nodes
    int next;             // storage that is reduced next
    bool add;             // the slices hold sums of earlier micro-steps
    int64_t step;
    CommRequest request;
    char *sent[HOPS], *received[HOPS]; // records
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

typedef enum {
    REQUEST_RECV,
    REQUEST_SEND = BORROWED_SLOTS,
    REQUEST_RECV_SUM = REQUEST_SEND + 2,
    REQUEST_SEND_SUM,
    REQUEST_KINDS
} RequestKind; // REQUEST_RECV, REQUEST_SEND: parameters, one kind for each version buffer or slot
// most messages of a version to one other rank: of the first version, for two uses in each of two
// steps
enum { REQUEST_USES = 4 };

// How far a storage is: its parameters, the gradient of a step, its updates.
typedef struct {
    bool empty;  // the gradient has no contribution since its last reduction
    bool summed; // the slice holds sums of earlier micro-steps
    // the reduction in flight leaves its sum in the slot; it must be added to the slice
    bool adds_to_shard;
    bool noised;          // this step's gradient has its noise, and is not used yet
    bool secondary_valid; // the secondary slice has the newest version
    int arriving;         // GatherKind of the gather in flight or arrived; ACQUIRE reads it
    CommRequest reducing, gathering, exchanging; // exchanging: directions
    int64_t updates;                             // updates so far, which is the newest version
    int64_t restarted; // version at which the moments began; updates - restarted counts theirs
    // p2p: newest version that is stored here or posted. It counts steps, also those without an
    // update
    int64_t version;
    bool knows_previous;                     // p2p: the version before the newest was loaded, too
    PendingRequests requests[REQUEST_KINDS]; // p2p
} StorageProgress;

// The memory that was planned (store_allocate), and what states are copied and sent by.
typedef struct {
    Comm *comm;
    Stream *stream;
    BufferMemory device[STATE_KINDS], host[STATE_KINDS];
    BufferMemory offload_buffers, sum_buffers, disk_buffers;
    char *exchange_base; // of bucket exchanges
    char *matrices;      // arrays of the optimizer's matrices
    OffloadBuffer offload_buffer[MOVING_PIECES];
    Disk *disk; // NULL: nothing is on a disk
    // file of the disk. The caller sets it before store_allocate(), and frees it
    DiskFile *file;
    Stream param_link[ALL_SLOTS]; // copies parameters from the host into each shared slot
    ExactSum *squares;            // of the gradient's norm, on the device
    ExactSum *squares_read;       // copy of squares in host memory, which the device writes
    ExactSum *sums;               // [ranks] squares of each rank
} StateMemory;

// What is in flight: how far each storage is, the messages and copies that have begun, and counts.
typedef struct {
    StorageProgress *progress; // [storages]
    SumBuffer adding[MOVING_PIECES];
    int pieces_added; // pieces of gradients added so far to sums on the host
    HostTraffic copied;
    int64_t disk_read, disk_written; // bytes, by training steps
    bool in_deferred;                // a deferred operation is running (p2p.h)
    bool *head_begun;                // p2p: [heads] a gradient of wte has begun in this buffer
    CommRequest *head_coming;        // p2p: [heads] receives the head's part of it
    int occupant[ALL_SLOTS];         // storage whose gradient last used the shared slot
    BucketExchange exchange[EXCHANGES];
    int64_t exchanges; // exchanges started so far
    bool pending;      // delayed updates: the host has the gradient of the previous step
} StateFlight;

// The states of a rank. A function takes the part that it needs.
typedef struct {
    StatePlan plan;
    StateMemory memory;
    StateFlight flight;
} Store;

// Returns a store that has this plan, and no memory yet. It frees the plan's tables with its own.
static inline Store store_of_plan(StatePlan plan) {
    Store s = {};
    s.plan = plan;
    return s;
}

// Buffer for states that are copied between host and device, or read and written outside the
// training step.
enum { STATE_PIECE_FLOATS = STATE_PIECE / 4 };
static union {
    char bytes[STATE_PIECE];
    float floats[STATE_PIECE_FLOATS];
} state_piece;

// -------------------------------------------------------------------------------------------------
// Where states are

typedef enum { GATHER_NONE, GATHER_PRIMARY, GATHER_SECONDARY } GatherKind;
// Returns where this rank has its slice of a version of a state, on the device or on the host; NULL
// if its buffer is not allocated. A state on disk has no address. Of states that have no versions,
// any number names the only one; versions of gradients count steps.
static inline char *store_at(const Store *s, StateKind kind, int storage, int64_t version) {
    const State *x = store_record(&s->plan, kind, storage);
    assert(x->place != PLACE_DISK);
    const int own = x->copy_of;
    const char *base = (x->place == PLACE_HOST ? s->memory.host : s->memory.device)[own].base;
    const int64_t number = x->versions > 1 ? version % x->versions : 0;
    return base ? (char *)(uintptr_t)base + x->slice + number * x->stride : NULL;
}
static inline float *store_floats(const Store *s, StateKind kind, int storage, int64_t version) {
    return (float *)(void *)store_at(s, kind, storage, version);
}
// Returns the whole array of a state on the device, or the slot for it.
static inline char *store_full(const Store *s, StateKind kind, int storage) {
    return s->memory.device[kind].base + store_record(&s->plan, kind, storage)->whole;
}
static inline float *store_full_gradient(const Store *s, int storage) {
    return (float *)(void *)store_full(s, STATE_GRADIENT, storage);
}
// Returns the bytes of a version of a storage's whole array.
static inline size_t store_full_bytes(const StatePlan *s, StateKind kind, int storage) {
    return (size_t)store_bytes(s, kind, gpt_storage_elements(s->model, storage));
}
// Returns the newest version of the parameters that is stored here or posted.
static inline int64_t store_now(const Store *s, int storage) {
    const StorageProgress *p = &s->flight.progress[storage];
    return s->plan.steps_overlap ? p->version : p->updates;
}
static inline char *store_newest(const Store *s, int storage) {
    return store_at(s, STATE_PARAMETERS, storage, store_now(s, storage));
}

// -------------------------------------------------------------------------------------------------
// Memory

// Prepares the collectives of a process group. All ranks call it.
static inline void process_group_join(Comm *comm, ProcessGroup *p) {
    comm_join(comm, &p->all);
    comm_join(comm, &p->partition);
    comm_join(comm, &p->node);
    comm_join(comm, &p->across);
}
// Prepares the collectives of a planned store; those among all ranks are prepared already. All
// ranks call it.
static inline void store_join(StatePlan *s, Comm *comm) {
    process_group_join(comm, &s->world);
    for (int i = 0; i < s->group_count; i++) { process_group_join(comm, &s->groups[i]); }
    comm_join(comm, &s->expert_ranks.all);
}

// Allocates the memory of offloaded states. Copies from and to memory that is not pinned make the
// host wait.
static inline void store_allocate_offload(Store *s) {
    bool pinned = true;
    for (int kind = 0; kind < HOST_KINDS; kind++) {
        s->memory.host[kind] =
            buffer_allocate(&s->plan.host[kind], MEMORY_OPTIMIZER, "states on the host");
        pinned = pinned && (s->memory.host[kind].pinned || !s->memory.host[kind].base);
    }
    s->memory.offload_buffers =
        buffer_allocate(&s->plan.offload_buffers, MEMORY_BUFFERS, "slots of offloaded states");
    s->memory.sum_buffers =
        buffer_allocate(&s->plan.sum_buffers, MEMORY_BUFFERS, "sums of gradients");
    for (int i = 0; i < MOVING_PIECES && s->plan.sum_bytes; i++) {
        s->flight.adding[i].at =
            (float *)(void *)(s->memory.sum_buffers.base + i * s->plan.sum_bytes);
    }
    for (int i = 0; i < MOVING_PIECES && s->plan.policy.offload; i++) {
        s->memory.offload_buffer[i].at =
            s->memory.offload_buffers.base + (size_t)i * s->plan.offload_buffer_bytes;
        ops_link_open(&s->memory.offload_buffer[i].link, s->memory.stream);
    }
    for (int i = 0; i < ALL_SLOTS && s->plan.policy.offload; i++) {
        ops_link_open(&s->memory.param_link[i], s->memory.stream);
    }
    if (store_disk_bytes(&s->plan)) {
        s->memory.disk_buffers =
            buffer_allocate(&s->plan.disk_buffers, MEMORY_BUFFERS, "slots of states on disk");
        s->memory.disk = new_array(Disk, 1, "disk");
        disk_take_file(s->memory.file, s->plan.policy.offload->folder, store_disk_bytes(&s->plan));
        disk_open(s->memory.disk, s->memory.file, store_disk_bytes(&s->plan),
                  disk_align(s->memory.disk_buffers.base), s->plan.disk_buffer_bytes);
        if (!s->memory.file->direct) {
            fprintf(stderr,
                    "note: rank %d: the file system of --offload-dir has no direct transfers; the "
                    "page cache is between\n",
                    s->memory.comm->rank);
        }
    }
    if (!pinned) {
        fprintf(stderr,
                "warning: rank %d: the system pins no more memory (ulimit -l): what goes between "
                "host and device is slower\n",
                s->memory.comm->rank);
    }
}

// Allocates the memory of a planned store, after store_join. comm and stream must outlive the
// store. All ranks call it, in the same order among their collectives.
static inline void store_allocate(Store *s, Comm *comm, Stream *stream) {
    size_t n = s->plan.model->storages;
    s->memory.comm = comm;
    s->memory.stream = stream;
    for (int kind = 0; kind < STATE_KINDS; kind++) {
        s->memory.device[kind] =
            buffer_allocate(&s->plan.device[kind], state_uses[kind].memory, state_uses[kind].what);
    }
    store_allocate_offload(s);
    for (int i = 0; i < s->plan.group_count; i++) {
        const Group *all = &s->plan.groups[i].all;
        if (all->me < 0) { continue; }
        const StateBuffer *params = &s->plan.device[STATE_PARAMETERS],
                          *grads = &s->plan.device[STATE_GRADIENT];
        comm_share(comm, all, s->memory.device[STATE_PARAMETERS].base,
                   params->held + params->slot_bytes);
        comm_share(comm, all, s->memory.device[STATE_GRADIENT].base,
                   grads->held + grads->slot_bytes);
    }
    s->memory.exchange_base =
        s->plan.exchange_bytes
            ? (char *)memory_take(MEMORY_BUFFERS, EXCHANGES * s->plan.exchange_bytes,
                                  "quantized gradients")
            : NULL;
    if (s->plan.matrices.scratch) {
        s->memory.matrices = (char *)memory_take(
            MEMORY_BUFFERS, (size_t)matrices_bytes(&s->plan.matrices), "matrices of the optimizer");
    }
    s->flight.progress = new_array(StorageProgress, n, "store");
    s->memory.sums = new_array(ExactSum, comm->ranks, "store");
    for (int i = 0; i < s->plan.model->storages; i++) { s->flight.progress[i].empty = true; }
    s->memory.squares =
        (ExactSum *)memory_take(MEMORY_BUFFERS, sizeof *s->memory.squares, "the gradient's norm");
    s->memory.squares_read =
        (ExactSum *)memory_take_host(sizeof *s->memory.squares_read, "the gradient's norm");
    for (int k = 0; k < ALL_SLOTS; k++) { s->flight.occupant[k] = -1; }
    if (!s->plan.steps_overlap) { return; }
    s->flight.head_begun = new_array(bool, s->plan.p2p.heads, "store");
    s->flight.head_coming = new_array(CommRequest, s->plan.p2p.heads, "store");
    for (size_t i = 0; i < n * REQUEST_KINDS; i++) {
        s->flight.progress[i / REQUEST_KINDS].requests[i % REQUEST_KINDS].open =
            (CommRequest *)checked_malloc(REQUEST_USES * (size_t)comm->ranks * sizeof(CommRequest),
                                          "store");
    }
}

// Frees what is on the device; the rest of the store stays.
static inline void store_free_device(Store *s) {
    for (int kind = 0; kind < STATE_KINDS; kind++) {
        buffer_free(&s->plan.device[kind], &s->memory.device[kind]);
    }
    buffer_free(&s->plan.offload_buffers, &s->memory.offload_buffers);
    buffer_free(&s->plan.sum_buffers, &s->memory.sum_buffers);
    ops_free(s->memory.exchange_base);
    ops_free(s->memory.matrices);
    ops_free(s->memory.squares);
    s->memory.exchange_base = s->memory.matrices = NULL;
    s->memory.squares = NULL;
}
// Frees everything but the optimizer's states on the host and on disk, and fp32 parameters on the
// host, which are their own masters.
static inline void store_leave_states(Store *s) {
    store_free_device(s);
    for (int kind = OPTIMIZER_KINDS; kind < HOST_KINDS; kind++) {
        if (kind != STATE_PARAMETERS || s->plan.dtype != DTYPE_FP32) {
            buffer_free(&s->plan.host[kind], &s->memory.host[kind]);
        }
    }
}
static inline void store_free(Store *s) {
    StateMemory *m = &s->memory;
    store_free_device(s);
    for (int kind = 0; kind < HOST_KINDS; kind++) {
        buffer_free(&s->plan.host[kind], &m->host[kind]);
    }
    for (int i = 0; i < MOVING_PIECES; i++) { ops_link_close(&m->offload_buffer[i].link); }
    for (int i = 0; i < ALL_SLOTS; i++) { ops_link_close(&m->param_link[i]); }
    if (m->disk) { disk_close(m->disk); }
    buffer_free(&s->plan.disk_buffers, &m->disk_buffers);
    ops_free_host(m->squares_read);
    for (int i = 0; s->flight.progress && i < s->plan.model->storages * REQUEST_KINDS; i++) {
        free(s->flight.progress[i / REQUEST_KINDS].requests[i % REQUEST_KINDS].open);
    }
    free_all(m->disk, m->sums, s->flight.head_begun, s->flight.head_coming, s->flight.progress);
    store_plan_free(&s->plan);
    memset(s, 0, sizeof *s);
}

// Returns the number of updates that this rank's parameters include. Storages that the rank does
// not hold do not count updates.
static inline int64_t store_version(const Store *s) {
    int64_t most = 0;
    for (int i = 0; i < s->plan.model->storages; i++) {
        most = max_i64(most, s->flight.progress[i].updates);
    }
    return most;
}

// States by kind: this rank's slice of a storage, in fp32, on the device, on the host or on disk. A
// slice can be empty, and a kind can be missing from a run. The previous parameters are those of
// the whole storage, on ranks that keep two versions.
static inline const char *state_name(StateKind kind) {
    return kind == STATE_MASTER     ? "parameters"
           : kind < OPTIMIZER_KINDS ? moment_names[kind - STATE_MOMENT]
           : kind == STATE_GRADIENT ? "gradient"
                                    : state_uses[kind].what;
}
// Do the checkpoints of a run have this kind of state?
static inline bool store_plan_has_state(const StatePlan *s, StateKind kind) {
    return kind == STATE_PREVIOUS ? s->steps_overlap
                                  : kind == STATE_MASTER || optimizer_keeps(s->optimizer, kind);
}
static inline bool store_has_state(const Store *s, StateKind kind) {
    return kind == STATE_GRADIENT ? s->flight.pending : store_plan_has_state(&s->plan, kind);
}
static inline bool store_keeps_previous(const StatePlan *s, int storage) {
    return s->rows[storage].places > 1;
}
// Returns the offset in the file of one kind of state of a piece. elements: size of the piece; only
// the last piece of a storage is shorter than the others.
static inline int64_t store_place_on_disk(const StatePlan *s, StateKind kind, int storage,
                                          int piece, int64_t elements) {
    const StorageRow *row = &s->rows[storage];
    const int64_t longest = store_longest_piece(s, storage);
    return row->disk_at + piece * store_stored_bytes(s, storage, longest) +
           store_stored_before(s, storage, elements, kind);
}
// A range of a state: n elements of a storage's slice, from element `at` on.
typedef struct {
    StateKind kind;
    int storage;
    int64_t at, n;
} StateRange;
// Reads or writes a range of a state on disk, across pieces. Must follow store_wait_all.
static inline void store_access_disk(const Store *s, const StateRange *r, char *memory,
                                     bool writes) {
    const int64_t own = store_own_elements(&s->plan, r->storage),
                  most = offload_piece(s->plan.model), end = r->at + r->n;
    for (int64_t from = r->at, count; from < end; from += count) {
        const int64_t piece = from / most, within = from % most,
                      elements = min_i64(most, own - piece * most);
        count = min_i64(end - from, elements - within);
        const int64_t place =
            store_place_on_disk(&s->plan, r->kind, r->storage, (int)piece, elements) +
            store_bytes(&s->plan, r->kind, within);
        disk_access(s->memory.disk, place, store_bytes(&s->plan, r->kind, count),
                    memory + store_bytes(&s->plan, r->kind, from - r->at),
                    s->plan.disk_buffer_bytes, writes);
    }
}
// Reads or writes a range of a state, in the precision it is stored in, wherever it is. memory: on
// the host. Must follow store_wait_all.
static inline void store_access(const Store *s, const StateRange *r, void *memory, bool writes) {
    const State *x = store_record(&s->plan, r->kind, r->storage);
    const int64_t version = store_now(s, r->storage) + (r->kind == STATE_PREVIOUS);
    if (x->place == PLACE_DISK) {
        store_access_disk(s, r, (char *)memory, writes);
        return;
    }
    char *state = store_at(s, r->kind, r->storage, version) + store_bytes(&s->plan, r->kind, r->at);
    const size_t bytes = (size_t)store_bytes(&s->plan, r->kind, r->n);
    if (x->place == PLACE_HOST) {
        memcpy(writes ? state : memory, writes ? memory : state, bytes);
    } else if (writes) {
        ops_from_host(s->memory.stream, state, memory, bytes);
    } else {
        ops_to_host(s->memory.stream, memory, state, bytes);
    }
}
static inline void store_read_state(const Store *s, StateKind kind, int storage, int64_t at,
                                    int64_t n, void *out) {
    const StateRange r = {kind, storage, at, n};
    store_access(s, &r, out, false);
}
static inline void store_write_state(const Store *s, StateKind kind, int storage, int64_t at,
                                     int64_t n, const void *in) {
    const StateRange r = {kind, storage, at, n};
    store_access(s, &r, (void *)(uintptr_t)in, true);
}
// Are the parameters of this rank's slices neither NaN nor infinite? Must follow store_wait_all.
static inline bool store_is_finite(const Store *s) {
    bool finite = true;
    for (int i = 0; finite && i < s->plan.model->storages; i++) {
        const int64_t own = store_holds(&s->plan, i) ? store_own_elements(&s->plan, i) : 0;
        for (int64_t at = 0, n; finite && at < own; at += n, keep_alive()) {
            n = min_i64(STATE_PIECE_FLOATS, own - at);
            store_read_state(s, STATE_MASTER, i, at, n, state_piece.floats);
            finite = first_not_finite(state_piece.floats, n) == n;
        }
    }
    return finite;
}
// Sets the moments of the blocks' storages to zero.
static inline void store_reset_blocks(const Store *s) {
    memset(state_piece.bytes, 0, sizeof state_piece.bytes);
    for (int i = s->plan.model->first_block; i < s->plan.model->first_after; i++) {
        const int64_t own = store_own_elements(&s->plan, i);
        for (int k = 0; k < s->plan.optimizer->moments; k++) {
            if (!store_keeps_moment(&s->plan, STATE_MOMENT + k)) { continue; }
            for (int64_t at = 0; at < own; at += STATE_PIECE_FLOATS) {
                store_write_state(s, STATE_MOMENT + k, i, at, min_i64(STATE_PIECE_FLOATS, own - at),
                                  state_piece.floats);
            }
        }
    }
}

// Starts a copy between host and device memory. in: to the device.
static inline void store_move(Store *s, Stream *link, void *host, void *device, int64_t bytes,
                              bool in) {
    if (in) {
        ops_from_host(link, device, host, bytes);
        s->flight.copied.to_device += bytes;
    } else {
        ops_to_host_later(link, host, device, (size_t)bytes);
        s->flight.copied.to_host += bytes;
    }
}
// Returns how the parameters of a storage are rounded after its newest update, from an element on.
// Rounding the same masters again, after a resume or on another number of ranks, gives the same
// bits.
static inline Rounding store_rounding(const Store *s, int storage, int64_t element) {
    if (!s->plan.stochastic) { return round_to_nearest(); }
    return rounding_stochastic(s->plan.seed, s->flight.progress[storage].updates, storage, element);
}

#endif
