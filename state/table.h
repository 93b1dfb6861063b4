// table.h: the table of states. Each state of each storage is one record (State): its kind, its
// place, its versions, and its position in the buffer of its kind and place. planned.h fills the
// table from the policies; store.h finds states in it; predictions add up its buffers.
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
    int versions, slot; // slot: p2p, where states take turns (store_plan_versions)
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

// A storage: what is decided about it, its states, and how they move.
typedef struct {
    StorageRule rule;
    const ProcessGroup *owners;
    P2pStorage p2p;   // its messages between two ranks; all zero: it has none
    bool borrowed;    // p2p: this rank has the parameters only during a use, in a slot
    bool cpu_updates; // the CPU updates this rank's slice from a gradient on the host
    State states[STATE_KINDS];
    MatrixExchange exchange; // of an optimizer that needs whole matrices
    int bucket; // index of its bucket; -1: this rank exchanges no quantized gradients of it
    // pieces in which offloaded states move for their update; 0: nothing of it is offloaded
    int pieces;
    // pieces that are updated before its own, the first time and the second (store_in_parts)
    int first_piece[2];
    int first_stored;            // pieces on disk of all earlier storages
    int64_t disk_at, disk_bytes; // its pieces in the file: their offset and their bytes
} StorageRow;

// What the device memory of each kind counts as, and what it is called when it is allocated.
#define STATE_USE(NAME, MEMORY, WHAT) {MEMORY, WHAT},
static const struct {
    MemoryKind memory;
    const char *what;
} state_uses[] = {STATE_TABLE(STATE_USE)};

// What a buffer holds: whole arrays; slices; slices, and slots for whole arrays.
typedef enum { BUFFER_NONE, BUFFER_FULL, BUFFER_SLICES, BUFFER_SLOTS } BufferLayout;
typedef struct {
    BufferLayout layout;
    SliceKind cut;
    size_t size;             // bytes of an element
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
static inline int64_t buffer_full_bytes(const Layout *l, const StateBuffer *b, int storage) {
    const int n = layout_process_group(l, storage)->slices[b->cut].n;
    return layout_slices(l, b->cut, storage)[n] * (int64_t)b->size;
}
static inline int64_t buffer_slice_bytes(const Layout *l, const StateBuffer *b, int storage) {
    const int64_t *bounds = layout_slices(l, b->cut, storage);
    return slice_length(bounds, layout_me(l, b->cut, storage)) * (int64_t)b->size;
}
// The same with the padding.
static inline int64_t buffer_full_padded(const Layout *l, const StateBuffer *b, int storage) {
    return b->travels ? layout_padded(l, b->cut, storage) * (int64_t)b->size
                      : buffer_full_bytes(l, b, storage);
}
static inline int64_t buffer_slice_padded(const Layout *l, const StateBuffer *b, int storage) {
    return b->travels ? layout_slices(l, b->cut, storage)[1] * (int64_t)b->size
                      : buffer_slice_bytes(l, b, storage);
}
static inline int state_slot(const Layout *l, const State *x, int storage) {
    return shared_slot(&l->owners, storage, x->apart, x->place == PLACE_HOST);
}
// Is the whole array always on the device?
static inline bool state_stays_full(const Layout *l, const StateBuffer *b, const State *x,
                                    int storage) {
    return x->place == PLACE_DEVICE &&
           (b->layout == BUFFER_FULL ||
            (b->layout == BUFFER_SLOTS && !x->apart && state_slot(l, x, storage) < 0));
}

// Places the slots behind all slices, those that blocks share first.
static inline void buffer_plan_slots(StateBuffer *b, StorageRow *rows, StateKind kind,
                                     const Layout *l, int64_t at) {
    for (int slot = 0; slot <= SHARED_SLOTS; slot++) {
        int64_t place = -1; // offset of the shared slot
        for (int i = 0; i < l->model->storages; i++) {
            State *x = &rows[i].states[kind];
            if (!layout_holds(l, i) || x->whole >= 0) { continue; }
            const int shared = state_slot(l, x, i);
            if (slot < SHARED_SLOTS && shared != slot) { continue; }
            if (slot == SHARED_SLOTS || place < 0) {
                place = round_up(at, 64);
                at = place + buffer_full_padded(l, b, i);
            }
            x->whole = place;
        }
    }
    b->slot_bytes = (size_t)at - b->held;
}
// Gives the records of a kind that are in a buffer's place their positions in it. On the device,
// what travels and is on the host has a slot.
static inline void buffer_plan(StateBuffer *b, StorageRow *rows, StateKind kind, const Layout *l) {
    int64_t at = 0;
    if (b->layout == BUFFER_NONE) { return; }
    for (int i = 0; i < l->model->storages; i++) {
        State *x = &rows[i].states[kind];
        if (!layout_holds(l, i) || x->place != (b->on_host ? PLACE_HOST : PLACE_DEVICE)) {
            continue;
        }
        const int64_t begin =
            layout_slices(l, b->cut, i)[layout_me(l, b->cut, i)] * (int64_t)b->size;
        const bool full = !b->on_host && state_stays_full(l, b, x, i);
        x->slice = full ? at + begin : at;
        if (full) { x->whole = at; }
        at += full ? buffer_full_padded(l, b, i) : buffer_slice_padded(l, b, i);
        b->held += (size_t)(b->layout == BUFFER_FULL ? buffer_full_bytes(l, b, i)
                                                     : buffer_slice_bytes(l, b, i));
    }
    b->slot_bytes = at - b->held;
    if (b->travels) { buffer_plan_slots(b, rows, kind, l, at); }
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
