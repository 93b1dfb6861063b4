// table.h: the one table that is indexed by storage. A row has what is decided about a storage, and
// a record of each of its states (State): its kind, its place, its versions, and its position in
// the buffer of its kind and place. The policies fill rows (plan/state_plan.h), planned.h sets
// positions; schedules read rows, store.h finds states in them, predictions add up the buffers.
//
//   kind               on the device            cut      what it is
//   master, moments    as long as used          slices   fp32 states; fp32 parameters are their
//                                                        own masters, and have no others
//   previous           p2p                      whole    other version of the parameters
//   gradient           slices, slots or whole   slices   fp32 sums
//   parameters         slices, slots or whole   slices   in storage precision
//   secondary          hpZ                      parts    a partition's copy of the parameters
//   records            qwZ: slices, slots       records  parameters in 8 bits
//   errors             qgZ with feedback        whole    bf16
//   made, received,    p2p                      whole    gradients and sums of micro-batches
//   pieces
//
// Buffers    One StateBuffer, one allocation, for each kind and place, with the storages one after
//            another. A buffer of slices from which whole arrays are needed has slots for them:
//            blocks share a few slots and use them in turn, every other storage has its own. In a
//            slot of its own a storage's slice is stored in place, unless what is gathered or
//            summed there must not overwrite it.
#ifndef TABLE_H
#define TABLE_H

#include "base/base.h"
#include "comm/group.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "state/layout.h"
#include "state/policy.h"

typedef enum { PLACE_NONE, PLACE_DEVICE, PLACE_HOST, PLACE_DISK } Place;
// A state of a storage. Offsets and strides are in bytes.
typedef struct {
    Place place;       // of this rank's slice
    StateKind copy_of; // the kind whose memory it is: its own, or the parameters
    // the slice is stored outside the slot in which whole arrays are gathered or summed
    bool apart;
    // version v is stored at `slice` + (v modulo versions) * stride
    // slot: that storages share and use in turn; p2p: see store_plan_versions. -1: it has its own
    int versions, slot;
    int64_t stride;
    int64_t slice; // offset of this rank's slice in the buffer of its place
    int64_t whole; // offset of the whole array, or of its slot, on the device; -1: it has none
} State;

// The exchange of a storage's directions.
typedef struct {
    int home[MOST_PARTS]; // member of the owners; -1: no matrix
    // [owners + 1] bounds in elements of what each home gets of this rank's slice; of what this
    // home gets from each slice. NULL: this rank is no owner
    int64_t *to, *from;
    int64_t directions, gathered; // where they begin in Matrices.directions, and .gathered
} MatrixExchange;

// How the states of a storage travel by p2p messages (cyclic.h). It has one owner, which updates
// it. Other ranks compute with copies of its parameters, and send it their gradients.
typedef struct {
    int owner;
    int keeper;    // saves the version before the newest; -1: no micro-batch uses one
    int stage;     // that it belongs to; wte belongs to the first, and the last uses it, too
    int grad_slot; // that receives its sums
    bool several;  // other ranks send the owner their gradients
    int *places;   // [ranks] versions of its parameters that each rank keeps: 0, 1 or 2
} P2pStorage;

// A storage: who uses it, which ranks own it, how it is cut, what the policies decide about it, its
// states, and how they move. zero.h, offload.h and schedule/cyclic_routes.h fill what follows from
// their policy (plan/state_plan.h), planned.h the rest. Schedules use what is alike on all ranks.
typedef struct {
    bool tied;  // several stages use it, or blocks that alternate with others: reduced last
    bool turns; // it is a block that may share slots with others; tied storages do not
    bool experts;
    const ProcessGroup *owners;
    const int64_t *slices[SLICE_KINDS]; // [owners + 1] their bounds among its owners
    // zero.h
    int param_slot, grad_slot; // slot of the gathered parameters, of the gradient; -1: its own
    bool gathers;              // parameters need a PREFETCH before each use; else they stay
    bool reduces_often;        // REDUCE runs in each micro-batch; else once in a step
    int bucket; // first storage of the bucket in which its gradient travels; -1: it travels alone
    // last storage of the wave in which its matrices are made orthogonal, which is in sequence
    // (matrices.h); -1: none. Its pieces come twice: for DIRECT, and for UPDATE
    int wave;
    // offload.h
    unsigned char host, disk; // bits of the kinds of its states that are on the host, on the disk
    SumPlace sum;             // place of the gradient's sum between micro-batches
    int pieces;               // in which states on the host are updated; 0: none are there
    bool cpu_updates;         // the CPU updates them, from a gradient on the host
    // schedule/cyclic_routes.h
    P2pStorage p2p; // all zero: it has no messages between two ranks
    int places;     // versions of its parameters that this rank keeps
    bool borrowed;  // this rank has the parameters only during a use, in a slot
    State states[STATE_KINDS];
    // of this rank
    MatrixExchange exchange; // of an optimizer that needs whole matrices
    // in which its quantized gradients travel (planned.h); NULL: this rank exchanges none of it
    const struct Bucket *exchange_bucket;
    // pieces that are updated before its own, the first time and the second (store_in_parts)
    int first_piece[2];
    int first_stored;            // pieces on disk of all earlier storages
    int64_t disk_at, disk_bytes; // its pieces in the file: their offset and their bytes
} StorageRow;
// Is a state on the host?
static inline bool row_offloads(const StorageRow *row, StateKind kind) {
    return row->host >> kind & 1;
}
static inline bool row_offloads_states(const StorageRow *row) {
    return row->host & ((1 << HOST_KINDS) - 1);
}
static inline bool row_holds(const StorageRow *row) { return row->owners->all.me >= 0; }
// Returns the elements, or bytes of records, of an array of a storage with its padding. The same
// array receives parameters from all owners and from those of a partition.
static inline int64_t row_padded(const StorageRow *row, SliceKind kind) {
    const int64_t all = bounds_padded(row->slices[kind], row->owners->all.n),
                  part = bounds_padded(row->slices[SLICES_SECONDARY], row->owners->partition.n);
    return kind == SLICES_WHOLE ? max_i64(all, part) : all;
}
// Returns this rank's index among those slices.
static inline int row_me(const StorageRow *row, SliceKind kind) {
    return kind == SLICES_SECONDARY ? row->owners->partition.me : row->owners->all.me;
}

// What the device memory of each kind counts as, and what it is called when it is allocated.
#define STATE_USE(NAME, MEMORY, BYTES, WHAT) {MEMORY, WHAT},
static const struct {
    MemoryKind memory;
    const char *what;
} state_uses[] = {STATE_TABLE(STATE_USE)};

// What a buffer holds: whole arrays; slices; slices, and slots for whole arrays.
typedef enum { BUFFER_NONE, BUFFER_FULL, BUFFER_SLICES, BUFFER_SLOTS } BufferLayout;
typedef struct {
    BufferLayout layout;
    SliceKind cut;
    size_t size;             // bytes of an element, of those that the cut counts
    bool travels;            // collectives work on its arrays and slices, which have padding
    bool on_host;            // (offload.h)
    size_t held, slot_bytes; // bytes of the states themselves, and of the slots
} StateBuffer;
// The memory of a buffer.
typedef struct {
    char *base;  // NULL: none
    bool pinned; // on the host: copies run beside the host's work
} BufferMemory;

// Return the bytes of a storage's whole array, and of this rank's slice of it.
static inline int64_t buffer_full_bytes(const StateBuffer *b, const StorageRow *row) {
    return row->slices[b->cut][row->owners->slices[b->cut].n] * (int64_t)b->size;
}
static inline int64_t buffer_slice_bytes(const StateBuffer *b, const StorageRow *row) {
    return slice_length(row->slices[b->cut], row_me(row, b->cut)) * (int64_t)b->size;
}
// The same with the padding.
static inline int64_t buffer_full_padded(const StateBuffer *b, const StorageRow *row) {
    return b->travels ? row_padded(row, b->cut) * (int64_t)b->size : buffer_full_bytes(b, row);
}
static inline int64_t buffer_slice_padded(const StateBuffer *b, const StorageRow *row) {
    return b->travels ? row->slices[b->cut][1] * (int64_t)b->size : buffer_slice_bytes(b, row);
}
// Is the whole array always on the device?
static inline bool state_stays_full(const StateBuffer *b, const State *x) {
    return x->place == PLACE_DEVICE &&
           (b->layout == BUFFER_FULL || (b->layout == BUFFER_SLOTS && !x->apart && x->slot < 0));
}

// Places the slots behind all slices, those that blocks share first. rows: [storages]
static inline void buffer_plan_slots(StateBuffer *b, StorageRow *rows, int storages, StateKind kind,
                                     int64_t at) {
    for (int slot = 0; slot <= ALL_SLOTS; slot++) {
        int64_t place = -1; // offset of the shared slot
        for (int i = 0; i < storages; i++) {
            State *x = &rows[i].states[kind];
            if (!row_holds(&rows[i]) || x->whole >= 0) { continue; }
            if (slot < ALL_SLOTS && x->slot != slot) { continue; }
            if (slot == ALL_SLOTS || place < 0) {
                place = round_up(at, 64);
                at = place + buffer_full_padded(b, &rows[i]);
            }
            x->whole = place;
        }
    }
    b->slot_bytes = (size_t)at - b->held;
}
// Gives the records of a kind that are in a buffer's place their positions in it. On the device,
// what travels and is on the host has a slot.
static inline void buffer_plan(StateBuffer *b, StorageRow *rows, int storages, StateKind kind) {
    int64_t at = 0;
    if (b->layout == BUFFER_NONE) { return; }
    for (int i = 0; i < storages; i++) {
        const StorageRow *row = &rows[i];
        State *x = &rows[i].states[kind];
        if (!row_holds(row) || x->place != (b->on_host ? PLACE_HOST : PLACE_DEVICE)) { continue; }
        const int64_t begin = row->slices[b->cut][row_me(row, b->cut)] * (int64_t)b->size;
        const bool full = !b->on_host && state_stays_full(b, x);
        x->slice = full ? at + begin : at;
        if (full) { x->whole = at; }
        at += full ? buffer_full_padded(b, row) : buffer_slice_padded(b, row);
        b->held += (size_t)(b->layout == BUFFER_FULL ? buffer_full_bytes(b, row)
                                                     : buffer_slice_bytes(b, row));
    }
    b->slot_bytes = at - b->held;
    if (b->travels) { buffer_plan_slots(b, rows, storages, kind, at); }
}

static inline BufferMemory buffer_allocate(const StateBuffer *b, MemoryKind kind,
                                           const char *what) {
    BufferMemory m = {};
    if (!(b->held + b->slot_bytes)) { return m; }
    m.base = (char *)(b->on_host ? memory_take_far(b->held, what, &m.pinned)
                                 : memory_take_with_slots(kind, b->held, b->slot_bytes, what));
    return m;
}
static inline void buffer_free(const StateBuffer *b, BufferMemory *m) {
    if (b->on_host) {
        ops_free_far(m->base, m->pinned);
    } else {
        ops_free(m->base);
    }
    m->base = NULL;
}

#endif
