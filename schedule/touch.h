// touch.h: resources of ranks, and how an action touches them. touches.h lists the touches of an
// action.
//
// Resource   a place on a rank that holds one content at a time: a row of RESOURCE_TABLE and up to
//            two numbers. A slot that several storages use is one place.
// Content    what: whose data it is, a hash of names such as (storage, step), (unit, micro-batch).
//            amount: how much of it, a sum of hashes: each row of a micro-batch has one, each
//            unit's contribution to a gradient is scaled by its own. So what several messages bring
//            adds up to the amount of all rows, and a sum of gradients to that of all samples.
// Touch      READ   the content must be this one, and complete. With `part`, rows of it suffice.
//            WRITE  replaces what was there.
//            ADD    adds to the same content, in the order of the micro-batches; replaces another.
//            TAKE   the place must be empty, or a pool have one more place (limit).
//            FREE   as READ, and empties the place.
//            carry: the amount is that of the touch before, here or at the message's sender.
// What an action reads is made by others that read what they need in the same way. So a read that
// finds its content proves the whole history of that content.
#ifndef TOUCH_H
#define TOUCH_H

#include "base/base.h"
#include "cyclic.h"
#include "dp.h"
#include "model/gpt.h"
#include "schedule/actions.h"
#include "schedule/cyclic_routes.h"
#include "schedule/schedule.h"
#include "state/policy.h"
#include "state/table.h"

// ROW(name, must be empty at the end, what it is called), and the numbers of a place
// clang-format off
#define RESOURCE_TABLE(ROW)                                                                        \
    ROW(HELD,            true,  "acquired parameters")          /* storage */                      \
    ROW(PARAMETERS,      false, "parameters")                   /* storage, place of version */    \
    ROW(GATHERED,        true,  "a slot of parameters")         /* slot */                         \
    ROW(NEWEST,          false, "the newest version")           /* storage: slice of the rank */   \
    ROW(MOMENTS,         false, "moments")                      /* storage: of the rank's slice */ \
    ROW(COPIES,          false, "secondary copies")             /* storage: hpZ */                 \
    ROW(BORROWED,        false, "borrowed parameters")          /* slot, storage */                \
    ROW(BORROWED_FOR,    false, "the use of a slot")            /* slot */                         \
    ROW(INPUT,           false, "the input of a unit")          /* unit, place */                  \
    ROW(ACTIVATIONS,     true,  "activations")                  /* unit, place */                  \
    ROW(OUTPUT_GRADIENT, false, "the gradient of its output")   /* unit above, place */            \
    ROW(CROSSES,         true,  "what crosses parts")           /* unit, part and way */           \
    ROW(WORK,            true,  "what the weight part needs")   /* unit, micro-batch */            \
    ROW(WORKS,           true,  "places of weight parts")       /* pool */                         \
    ROW(RECOMPUTED,      false, "recomputed activations")                                          \
    ROW(STASH,           false, "a slot of the stash")          /* slot */                         \
    ROW(STASHED,         false, "activations on the host")      /* unit, place */                  \
    ROW(NORMS,           false, "norms of samples")             /* unit, or 0: of all; place */    \
    ROW(CROSSING,        false, "the head's part of norms")     /* place */                        \
    ROW(FAR_NORMS,       false, "norms of another stage")       /* its last unit, place */         \
    ROW(FACTORS,         false, "factors of samples")           /* place */                        \
    ROW(FAR_FACTORS,     false, "received factors")             /* its last unit, place */         \
    ROW(LOSS,            false, "losses")                       /* step modulo 2, micro-batch */   \
    ROW(GRADIENT,        true,  "a gradient")                   /* kind of buffer, number */       \
    ROW(GRADIENT_SLOT,   false, "a slot of gradients")          /* slot */                         \
    ROW(BUCKET,          true,  "a bucket")                                                        \
    ROW(SUM,             true,  "the sum of a gradient")        /* storage, buffer */              \
    ROW(HOST_SUM,        false, "the sum on the host")          /* storage */                      \
    ROW(COMING,          true,  "a received gradient")          /* storage */                      \
    ROW(NORM,            false, "the norm of the gradient")                                        \
    ROW(SQUARES,         false, "the square of a gradient")     /* step modulo 2, storage */       \
    ROW(STATS_IN,        true,  "received statistics")                                             \
    ROW(STATS_OUT,       false, "statistics")                                                      \
    ROW(COUNT,           false, "the number of pieces")         /* CountedPieces, storage */       \
    ROW(PIECE,           true,  "a piece of states")            /* storage, piece */               \
    ROW(MOVING,          true,  "slots of pieces")              /* pool */                         \
    ROW(DISK_PIECE,      true,  "a piece from the disk")        /* storage, piece */               \
    ROW(READING,         true,  "buffers of the disk")          /* pool */                         \
    ROW(DIRECTIONS,      true,  "directions of matrices")       /* storage */                      \
    ROW(ORTHOGONAL,      true,  "orthogonal matrices")          /* storage */                      \
    ROW(CHANNEL,         false, "a channel of messages")        /* way and peer, storage */        \
    ROW(SAMPLES,         false, "samples")                      /* unit; one place for all ranks */
// clang-format on
#define RESOURCE_KIND(name, empty, text) RES_##name,
typedef enum { RESOURCE_TABLE(RESOURCE_KIND) RESOURCES } Resource;
#undef RESOURCE_KIND

typedef enum { TOUCH_READ, TOUCH_WRITE, TOUCH_ADD, TOUCH_TAKE, TOUCH_FREE } TouchUse;
typedef struct {
    Resource of;
    int64_t a, b; // numbers of the place; a negative b: there is no such place
    TouchUse use;
    uint64_t what, scale; // the amount is scale times the hash of the rows; without rows, scale
    int64_t first, rows;
    int64_t order; // of ADD: number of the micro-batch
    int64_t limit; // of TAKE and FREE: the places of a pool; 0: not a pool
    // see above; any: the amount does not matter; absent: or nothing is there
    // once: WRITE of a content that is not there yet
    // at_once: done when the list reaches the action, though the rest of it may be deferred
    bool part, any, absent, carry, once, at_once;
} Touch;

// What a program needs so that its touches can be listed. touch_plan_free() frees it.
typedef struct {
    const Program *program;
    const CyclicPlan *cyclic; // of steps that overlap, else NULL
    const GptModel *model;    // the same
    P2p *p2p;                 // [ranks] the same
    Pieces pieces;
    uint64_t *rows;      // [samples + 1] sum of the hashes of all samples before
    bool *computes;      // [rank][unit]
    int *units;          // [rank] how many it computes
    bool *uses, *member; // [rank][storage] the rank computes with it; contributes to its gradient
    int spans;
    // contributions that a gradient needs, and their sum with those of earlier spans: of a rank,
    // span and storage; where steps overlap, of a piece and storage
    uint64_t *whole, *before;
    int64_t *row; // [micro-batch][2] where steps overlap: its rows
    int *head_rank;
    Touch *touch; // [count] result of action_touches
    int count;
    int64_t capacity;
} TouchPlan;

// Returns how the states of a storage travel, where steps overlap.
static inline const P2pStorage *touch_p2p(const TouchPlan *p, int storage) {
    return &p->program->map.rows[storage].p2p;
}
static inline uint64_t touch_name(uint64_t kind, int64_t a, int64_t b) {
    return mix64(mix64(mix64(kind + 1) ^ (uint64_t)a) ^ (uint64_t)b) | 1;
}
// Numbers resources of ranks from 0, as they are first asked for. Who knows something of each keeps
// it in an array.
typedef struct {
    uint64_t key; // 0: unused
    int number;
} ResourceSlot;
typedef struct {
    ResourceSlot *slot; // [slots] a hash table, a power of 2 long
    int64_t slots;
    int count;
} ResourceNumbers;
static inline ResourceSlot *resource_slot(const ResourceNumbers *n, uint64_t key) {
    int64_t i = (int64_t)(key & (uint64_t)(n->slots - 1));
    while (n->slot[i].key && n->slot[i].key != key) { i = (i + 1) & (n->slots - 1); }
    return &n->slot[i];
}
static inline void resource_numbers_grow(ResourceNumbers *n) {
    const ResourceNumbers old = *n;
    n->slots = max_i64(1024, 2 * old.slots);
    n->slot = new_array(ResourceSlot, n->slots, "resources");
    for (int64_t i = 0; i < old.slots; i++) {
        if (old.slot[i].key) { *resource_slot(n, old.slot[i].key) = old.slot[i]; }
    }
    free(old.slot);
}
// Returns the number of the resource that a touch of a rank names; n->count before: it is new.
static inline int resource_number(ResourceNumbers *n, int rank, const Touch *t) {
    const int64_t owner = t->of == RES_SAMPLES ? 0 : rank;
    const uint64_t key = touch_name((uint64_t)(owner * RESOURCES + t->of), t->a, t->b);
    if (2 * n->count >= n->slots) { resource_numbers_grow(n); }
    ResourceSlot *slot = resource_slot(n, key);
    if (!slot->key) {
        slot->key = key;
        slot->number = n->count++;
    }
    return slot->number;
}

// names of contents; those of a resource alone are touch_name(resource, ...)
enum {
    // A REDUCE counts, too: an amount that it adds to its gradient.
    TOUCH_REDUCED = 1
};
enum { NAME_REDUCED = RESOURCES, NAME_COMPLETE, NAME_PIECES, NAME_CONTRIBUTION, NAME_NORM };
static inline uint64_t touch_amount(const TouchPlan *p, const Touch *t) {
    return t->rows ? t->scale * (p->rows[t->first + t->rows] - p->rows[t->first]) : t->scale;
}
static inline Touch *touch_add(TouchPlan *p, TouchUse use, Resource of, int64_t a, int64_t b,
                               uint64_t what) {
    p->touch = grow_array(Touch, p->touch, p->count, &p->capacity, "touches");
    Touch *t = &p->touch[p->count++];
    memset(t, 0, sizeof *t);
    t->use = use;
    t->of = of;
    t->a = a;
    t->b = b;
    t->what = what;
    t->scale = what;
    return t;
}
// Touches the rows of an action in a content.
static inline Touch *touch_rows(TouchPlan *p, TouchUse use, Resource of, int64_t a, int64_t b,
                                uint64_t what, const Action *x) {
    Touch *t = touch_add(p, use, of, a, b, what);
    t->first = x->first_row;
    t->rows = x->rows;
    return t;
}
// The same of some of the rows that are there, for a message.
static inline void touch_part(TouchPlan *p, Resource of, int64_t a, int64_t b, uint64_t what,
                              const Action *x) {
    touch_rows(p, TOUCH_READ, of, a, b, what, x)->part = true;
}
static inline Touch *touch_amounts(Touch *t, uint64_t amount) {
    t->scale = amount;
    return t;
}
static inline Touch *touch_any(Touch *t) {
    t->any = true;
    return t;
}
// Passes the amount that the touch before has found on to another place.
static inline Touch *touch_carry(Touch *t) {
    t->carry = true;
    t->scale = 0;
    return t;
}
// Refuses the action if a place is in use; leaves it empty.
static inline void touch_unused(TouchPlan *p, Resource of, int64_t a) {
    touch_add(p, TOUCH_TAKE, of, a, 0, 1);
    touch_add(p, TOUCH_FREE, of, a, 0, 1);
}
static inline int64_t touch_place(int64_t micro, int64_t places) {
    return places > 0 ? micro % places : -1;
}

// -------------------------------------------------------------------------------------------------
// Places (activations.h: the buffers that a micro-batch uses)

static inline bool touch_computes(const TouchPlan *p, int rank, int unit) {
    const int units = p->program->map.units;
    return unit >= 0 && unit < units && p->computes[rank * units + unit];
}
// How many micro-batches' activations of a unit a rank holds.
static inline int64_t touch_live(const TouchPlan *p, int rank, int unit) {
    return p->cyclic ? cyclic_live(p->cyclic, cyclic_stage_of_unit(p->cyclic, unit))
                     : p->program->limits[rank].in_flight;
}
// Inputs of a unit: of the first one of a stage they are received, after the last one sent.
static inline int64_t touch_input_place(const TouchPlan *p, int rank, int unit, int64_t micro) {
    if (!touch_computes(p, rank, unit)) { return micro % SEND_BUFFERS; }
    const bool received = !touch_computes(p, rank, unit - 1);
    return touch_place(micro,
                       received ? p->program->limits[rank].inputs : touch_live(p, rank, unit));
}
// Touches the gradient of a unit's input.
static inline Touch *touch_input_gradient(TouchPlan *p, TouchUse use, int rank, int unit,
                                          const Action *x) {
    const Limits *limits = &p->program->limits[rank];
    const int64_t sets = program_waits(p->program)
                             ? limits->in_flight
                             : max_i64(1, limits->works / max_i64(1, p->units[rank]));
    const bool received = !touch_computes(p, rank, unit), sent = !touch_computes(p, rank, unit - 1),
               own = p->cyclic && p->cyclic->mode == CYCLIC_SINGLE &&
                     p->cyclic->cut.stage[cyclic_stage_of_unit(p->cyclic, unit)].first_unit == unit,
               turns = !received && !sent && !own && limits->works == 1;
    const int64_t place = received ? touch_place(x->micro, limits->gradients)
                          : sent   ? x->micro % SEND_BUFFERS
                                   : touch_place(x->micro, sets);
    return touch_rows(p, use, RES_OUTPUT_GRADIENT, turns ? -1 - unit % 2 : unit, place,
                      touch_name(RES_OUTPUT_GRADIENT, unit, x->micro), x);
}
// Norms and factors of a micro-batch: those that cross stages, those inside a stage.
static inline int64_t touch_crossing_place(const TouchPlan *p, int rank, int64_t micro) {
    return touch_place(micro, p->program->limits[rank].clips);
}
static inline int64_t touch_clip_place(const TouchPlan *p, int rank, int64_t micro) {
    return max_i64(0, touch_crossing_place(p, rank, micro));
}
static inline uint64_t touch_input_name(int unit, int64_t micro) {
    return touch_name(RES_INPUT, unit, micro);
}
static inline uint64_t touch_contribution(int unit, int storage) {
    return touch_name(NAME_CONTRIBUTION, unit, storage);
}
static inline int64_t touch_slot(int slot, int storage) { return slot >= 0 ? slot : -1 - storage; }

#endif
