// touches.h: what an action does with which resources of its rank: one paragraph for each kind of
// action (action_touches). touch_check.h proves programs with it.
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
#ifndef TOUCHES_H
#define TOUCHES_H

#include "base/base.h"
#include "cyclic.h"
#include "dp.h"
#include "model/gpt.h"
#include "schedule/actions.h"
#include "schedule/cyclic_routes.h"
#include "schedule/schedule.h"
#include "state/policy.h"

// ROW(name, must be empty at the end, what it is called)
#define RESOURCE_TABLE(ROW)                                                                        \
    ROW(HELD, true, "acquired parameters")             /* storage */                               \
    ROW(PARAMETERS, false, "parameters")               /* slot, or storage and version's place */  \
    ROW(GATHERED, true, "a slot of parameters")        /* slot */                                  \
    ROW(NEWEST, false, "the newest version")           /* storage: the slice of this rank */       \
    ROW(COPIES, false, "secondary copies")             /* storage: hpZ */                          \
    ROW(BORROWED, false, "borrowed parameters")        /* slot, storage */                         \
    ROW(BORROWED_FOR, false, "the use of a slot")      /* slot */                                  \
    ROW(INPUT, false, "the input of a unit")           /* unit, place */                           \
    ROW(ACTIVATIONS, true, "activations")              /* unit, place */                           \
    ROW(OUTPUT_GRADIENT, false, "the gradient of its output") /* unit above, place */              \
    ROW(WORK, true, "what the weight part needs")      /* unit, micro-batch */                     \
    ROW(WORKS, true, "places of weight parts")         /* pool */                                  \
    ROW(RECOMPUTED, false, "recomputed activations")                                               \
    ROW(STASH, false, "a slot of stashed activations") /* slot */                                  \
    ROW(STASHED, false, "activations on the host")     /* unit, place */                           \
    ROW(NORMS, false, "norms of samples")              /* unit, or 0: of all; place */             \
    ROW(CROSSING, false, "the head's part of norms")   /* place */                                 \
    ROW(FAR_NORMS, false, "norms of another stage")    /* its last unit, place */                  \
    ROW(FACTORS, false, "factors of samples")          /* place */                                 \
    ROW(FAR_FACTORS, false, "received factors")        /* last unit of the stage, place */         \
    ROW(LOSS, false, "losses")                         /* step modulo 2, micro-batch */            \
    ROW(GRADIENT, true, "a gradient")                  /* kind of buffer, number */                \
    ROW(GRADIENT_SLOT, false, "a slot of gradients")   /* slot */                                  \
    ROW(BUCKET, true, "a bucket")                                                                  \
    ROW(SUM, true, "the sum of a gradient")            /* storage, buffer */                       \
    ROW(HOST_SUM, false, "the sum on the host")        /* storage */                               \
    ROW(COMING, true, "a received gradient")           /* storage */                               \
    ROW(NORM, false, "the norm of the gradient")                                                   \
    ROW(SQUARES, false, "the square of a gradient")    /* step modulo 2, storage */                \
    ROW(STATS_IN, true, "received statistics")                                                     \
    ROW(STATS_OUT, false, "statistics")                                                            \
    ROW(COUNT, false, "the number of pieces")          /* CountedPieces, storage */                \
    ROW(PIECE, true, "a piece of states")              /* storage, piece */                        \
    ROW(MOVING, true, "slots of pieces")               /* pool */                                  \
    ROW(DISK_PIECE, true, "a piece from the disk")     /* storage, piece */                        \
    ROW(READING, true, "buffers of the disk")          /* pool */                                  \
    ROW(DIRECTIONS, true, "directions of matrices")    /* storage */                               \
    ROW(MATRICES, true, "orthogonal matrices")         /* storage */                               \
    ROW(SAMPLES, false, "samples")                     /* unit; one place for all ranks */
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
    bool part, any, absent, carry, once;
} Touch;

// What a program needs so that its touches can be listed. touch_plan_free() frees it.
typedef struct {
    const Program *program;
    const CyclicPlan *cyclic; // of steps that overlap, else NULL
    const GptModel *model;    // the same
    P2p *p2p;                 // [ranks] the same
    Pieces pieces;
    uint64_t *rows;           // [samples + 1] sum of the hashes of all samples before
    bool *computes;           // [rank][unit]
    bool *uses, *member; // [rank][storage] the rank computes with it; contributes to its gradient
    int *first, *end;         // [rank] its units
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

static inline uint64_t touch_name(uint64_t kind, int64_t a, int64_t b) {
    return mix64(mix64(mix64(kind + 1) ^ (uint64_t)a) ^ (uint64_t)b) | 1;
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
    return unit < p->program->map.units && p->computes[rank * p->program->map.units + unit];
}
// How many micro-batches' activations of a unit a rank holds.
static inline int64_t touch_live(const TouchPlan *p, int rank, int unit) {
    return p->cyclic ? cyclic_live(p->cyclic, cyclic_stage_of_unit(p->cyclic, unit))
                     : p->program->limits[rank].in_flight;
}
// Inputs of a unit: of the first one of a stage they are received, after the last one sent.
static inline int64_t touch_input_place(const TouchPlan *p, int rank, int unit, int micro) {
    if (!touch_computes(p, rank, unit)) { return micro % SEND_BUFFERS; }
    const bool received = unit == p->first[rank];
    return touch_place(micro, received ? p->program->limits[rank].inputs
                                       : touch_live(p, rank, unit));
}
// Touches the gradient of a unit's input.
static inline Touch *touch_input_gradient(TouchPlan *p, TouchUse use, int rank, int unit,
                                        const Action *x) {
    const Limits *limits = &p->program->limits[rank];
    const int64_t sets = program_waits(p->program)
                             ? limits->in_flight
                             : max_i64(1, limits->works / (p->end[rank] - p->first[rank]));
    const bool received = unit == p->end[rank], sent = unit == p->first[rank],
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
static inline int64_t touch_crossing_place(const TouchPlan *p, int rank, int micro) {
    return touch_place(micro, p->program->limits[rank].clips);
}
static inline int64_t touch_clip_place(const TouchPlan *p, int rank, int micro) {
    return max_i64(0, touch_crossing_place(p, rank, micro));
}
static inline uint64_t touch_input_name(int unit, int micro) {
    return touch_name(RES_INPUT, unit, micro);
}
static inline uint64_t touch_contribution(int unit, int storage) {
    return touch_name(NAME_CONTRIBUTION, unit, storage);
}
static inline int64_t touch_slot(const int *slots, int storage) {
    return slots && slots[storage] >= 0 ? slots[storage] : -1 - storage;
}

// -------------------------------------------------------------------------------------------------
// Parameters

static inline uint64_t touch_version_name(int storage, int64_t version) {
    return touch_name(RES_PARAMETERS, storage, version);
}
// Reads a version where steps overlap: stored here, or borrowed for a use.
static inline void touch_version(TouchPlan *p, int rank, int storage, int64_t version, int use,
                                 int64_t step) {
    const P2p *r = &p->p2p[rank];
    if (!r->borrows || r->owner[storage] == rank) {
        touch_add(p, TOUCH_READ, RES_PARAMETERS, storage,
                  touch_place(version, r->places[storage]), touch_version_name(storage, version));
        return;
    }
    const int slot = p2p_slot(r, use, step);
    const uint64_t user = touch_name(RES_BORROWED_FOR, step * r->uses + use, 0);
    touch_add(p, TOUCH_READ, RES_BORROWED_FOR, slot, 0, user);
    touch_add(p, TOUCH_READ, RES_BORROWED, slot, storage,
              user * touch_version_name(storage, version));
}
// The parameters that a compute action reads, in the version that its micro-batch must use.
static inline void touch_parameters(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    for (int k = 0; k < map->of_unit_count[x->unit]; k++) {
        const int s = map->of_unit[x->unit][k];
        int64_t version = 0;
        if (p->cyclic) {
            const CyclicPlan *c = p->cyclic;
            const int all = pieces_of_step(&p->pieces), at = x->micro % all;
            const int64_t step = x->micro / all;
            version = max_i64(0, step - !cyclic_fresh(c, cyclic_micro(c, at),
                                                      cyclic_stage_of_storage(c, map, s)));
            touch_version(p, rank, s, version,
                          cyclic_use(c, cyclic_stage_of_unit(c, x->unit), x->kind != ACT_FORWARD),
                          step);
        }
        touch_add(p, TOUCH_READ, RES_HELD, s, 0, touch_version_name(s, version));
    }
}
static inline void touch_gather(TouchPlan *p, const Action *x) {
    const UnitMap *map = &p->program->map;
    const uint64_t version = touch_version_name(x->storage, x->version);
    touch_add(p, TOUCH_READ, x->near ? RES_COPIES : RES_NEWEST, x->storage, 0, version);
    if (!map->gathers[x->storage]) { // it stays whole, and follows the update
        touch_add(p, TOUCH_TAKE, RES_PARAMETERS, -1 - x->storage, 0, version);
        return;
    }
    touch_unused(p, RES_HELD, x->storage);
    touch_add(p, TOUCH_TAKE, RES_GATHERED, touch_slot(map->param_slot, x->storage), 0, version);
    if (map->copies && !x->near) { touch_add(p, TOUCH_WRITE, RES_COPIES, x->storage, 0, version); }
}
// ACQUIRE and RELEASE.
static inline void touch_hold(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    const bool acquires = x->kind == ACT_ACQUIRE, gathers = map->gathers[x->storage];
    const uint64_t version = touch_version_name(x->storage, x->version);
    touch_add(p, acquires ? TOUCH_TAKE : TOUCH_FREE, RES_HELD, x->storage, 0, version);
    if (p->cyclic) {
        if (acquires) { touch_version(p, rank, x->storage, x->version, x->use, x->step); }
    } else if (gathers) {
        touch_add(p, acquires ? TOUCH_READ : TOUCH_FREE, RES_GATHERED,
                  touch_slot(map->param_slot, x->storage), 0, version);
    } else if (acquires) {
        touch_add(p, TOUCH_READ, RES_PARAMETERS, -1 - x->storage, 0, version);
    }
}
// A version is sent, or received and stored, where steps overlap.
static inline void touch_pass_parameters(TouchPlan *p, int rank, const Action *x) {
    const P2p *r = &p->p2p[rank];
    const uint64_t version = touch_version_name(x->storage, x->version);
    const int64_t place = touch_place(x->version, r->places[x->storage]);
    if (action_sends(x->kind)) {
        touch_add(p, TOUCH_READ, RES_PARAMETERS, x->storage, place, version);
    } else if (r->borrows) {
        const int slot = p2p_slot(r, x->use, x->step);
        const uint64_t user = touch_name(RES_BORROWED_FOR, x->step * r->uses + x->use, 0);
        touch_add(p, TOUCH_WRITE, RES_BORROWED_FOR, slot, 0, user);
        touch_add(p, TOUCH_WRITE, RES_BORROWED, slot, x->storage, user * version)->once = true;
    } else {
        touch_amounts(touch_add(p, TOUCH_READ, RES_NEWEST, x->storage, 0, 1), x->version - 1);
        touch_amounts(touch_add(p, TOUCH_WRITE, RES_NEWEST, x->storage, 0, 1), x->version);
        touch_add(p, TOUCH_WRITE, RES_PARAMETERS, x->storage, place, version);
    }
}

// -------------------------------------------------------------------------------------------------
// Gradients and their sums

// The amounts that a gradient needs: of a span, and with the earlier spans of its step.
static inline int64_t touch_span(const TouchPlan *p, int rank, int storage, int micro) {
    const UnitMap *map = &p->program->map;
    const int span = p->cyclic || (map->reduces_often[storage] && micro > 0) ? micro : 0;
    return (p->cyclic ? span : rank * p->spans + (int64_t)span) * map->storages + storage;
}
// The amount of the gradient of a storage of the micro-batches 0 .. k of a step.
static inline uint64_t touch_sum(const TouchPlan *p, int64_t step, int k, int storage) {
    const int all = pieces_of_step(&p->pieces);
    if (k < 0) { return 0; }
    const int64_t piece = step * all + cyclic_last_piece(p->cyclic, k);
    return p->before[piece * p->program->map.storages + storage];
}
static inline uint64_t touch_step_sum(const TouchPlan *p, int rank, int storage) {
    return p->before[touch_span(p, rank, storage, p->spans - 1)];
}

// Where steps overlap: the buffer of a piece's gradient, and of its whole micro-batch's (state/p2p.h:
// store_making, store_whole).
typedef struct {
    int64_t a, b;
} Buffer;
enum { BUFFER_OF_STORAGE, BUFFER_OF_CLASS, BUFFER_OF_HEAD, BUFFER_OF_PIECES, BUFFER_SECOND }; // Buffer.a of a GRADIENT
static inline Buffer touch_buffer(int64_t a, int64_t b) {
    const Buffer buffer = {a, b};
    return buffer;
}
static inline Buffer touch_whole_of_step(const TouchPlan *p, int rank, int s, int64_t step) {
    const P2p *r = &p->p2p[rank];
    const bool second = r->owner[s] == rank && step % r->sums;
    return touch_buffer(second ? BUFFER_SECOND : r->joins_pieces ? BUFFER_OF_PIECES : BUFFER_OF_STORAGE, s);
}
static inline Buffer touch_making(const TouchPlan *p, int rank, int s, int micro) {
    const P2p *r = &p->p2p[rank];
    if (r->borrows) { return touch_buffer(BUFFER_OF_STORAGE, s); }
    if (!r->stays && !r->joins_pieces) {
        return touch_whole_of_step(p, rank, s, micro / pieces_of_step(&p->pieces));
    }
    if (!s) { return touch_buffer(BUFFER_OF_HEAD, micro % r->heads); }
    return share_alternates(p->model->share)
               ? touch_buffer(BUFFER_OF_STORAGE, s)
               : touch_buffer(BUFFER_OF_CLASS, (int)gpt_storage_class(p->model, s));
}
static inline Buffer touch_whole(const TouchPlan *p, int rank, int s, int micro) {
    const P2p *r = &p->p2p[rank];
    return !r->joins_pieces ? touch_making(p, rank, s, micro)
           : r->stays       ? touch_buffer(BUFFER_OF_PIECES, s)
                      : touch_whole_of_step(p, rank, s, micro / pieces_of_step(&p->pieces));
}
static inline Touch *touch_gradient(TouchPlan *p, TouchUse use, Buffer at, uint64_t what,
                                    uint64_t amount) {
    return touch_amounts(touch_add(p, use, RES_GRADIENT, at.a, at.b, what), amount);
}
// The sum of the micro-batches before `in` must be in a buffer, to which the gradient of this one is
// added. Sums stay in one of `sums` buffers, or are made in the owner's gradient.
static inline void touch_join(TouchPlan *p, Resource of, Buffer at, const Action *x, int in) {
    const uint64_t sum = touch_name(RES_SUM, x->storage, x->step);
    touch_amounts(touch_add(p, in ? TOUCH_FREE : TOUCH_READ, of, at.a, at.b, sum),
                  touch_sum(p, x->step, in - 1, x->storage));
    touch_amounts(touch_add(p, TOUCH_WRITE, of, at.a, at.b, sum),
                  touch_sum(p, x->step, in, x->storage));
}
static inline Buffer touch_staying_sum(const TouchPlan *p, int rank, const Action *x) {
    return touch_buffer(x->storage, p->p2p[rank].stays ? x->step % p->p2p[rank].sums : 0);
}
// The gradient of a storage, of the last micro-batch of a step: the complete sum.
static inline void touch_complete(TouchPlan *p, TouchUse use, int rank, int s, int64_t step) {
    const Action of = {.storage = s, .step = step};
    const bool stays = p->p2p[rank].stays;
    const Buffer at = stays ? touch_staying_sum(p, rank, &of)
                            : touch_whole(p, rank, s, (int)(step + 1) * p->spans - 1);
    touch_amounts(touch_add(p, use, stays ? RES_SUM : RES_GRADIENT, at.a, at.b,
                            touch_name(RES_SUM, s, step)),
                  touch_sum(p, step, p->pieces.micros - 1, s));
}
// REDUCE where steps overlap: the gradient of a piece is complete; it is added to those of earlier
// pieces, and with the last piece, on the owner, to the sum of earlier micro-batches.
static inline void touch_end_piece(TouchPlan *p, int rank, const Action *x) {
    const P2p *r = &p->p2p[rank];
    const int s = x->storage, in = piece_micro(&p->pieces, x->micro % p->spans);
    const bool ends = piece_is_last(&p->pieces, x->micro % p->spans), owns = r->owner[s] == rank;
    const Buffer making = touch_making(p, rank, s, x->micro), at = touch_whole(p, rank, s, x->micro);
    const uint64_t pieces = touch_name(NAME_PIECES, s, x->step * p->spans + in);
    if (r->borrows && s && p->whole[touch_span(p, rank, s, x->micro)]) {
        touch_any(touch_add(p, TOUCH_READ, RES_GRADIENT_SLOT, r->grad_slot[s], 0,
                            touch_name(RES_GRADIENT_SLOT, r->stage[s], x->micro)));
    }
    touch_gradient(p, TOUCH_FREE, making, touch_name(RES_GRADIENT, s, x->micro),
                   p->whole[touch_span(p, rank, s, x->micro)]);
    uint64_t amount = p->whole[touch_span(p, rank, s, x->micro)] + TOUCH_REDUCED;
    if (r->joins_pieces) {
        touch_gradient(p, TOUCH_ADD, at, pieces, amount)->order = x->micro;
        if (!ends) { return; }
        amount = touch_sum(p, x->step, in, s) - touch_sum(p, x->step, in - 1, s);
        touch_gradient(p, TOUCH_FREE, at, pieces, amount);
    }
    if (!owns) { // it is sent to the owner as it is
        touch_gradient(p, TOUCH_WRITE, at, touch_name(NAME_COMPLETE, s, x->micro), amount);
    } else if (r->stays) {
        touch_join(p, RES_SUM, touch_staying_sum(p, rank, x), x, in);
    } else {
        const uint64_t sum = touch_name(RES_SUM, s, x->step);
        touch_amounts(touch_add(p, TOUCH_FREE, RES_SUM, s, 0, sum),
                      touch_sum(p, x->step, in - 1, s));
        touch_gradient(p, TOUCH_WRITE, at, sum, touch_sum(p, x->step, in, s));
    }
}
// A received gradient is added: on a rank that has a micro-batch of its own, those before it apart.
static inline void touch_add_part(TouchPlan *p, int rank, const Action *x) {
    const P2p *r = &p->p2p[rank];
    const int s = x->storage, in = piece_micro(&p->pieces, x->micro % p->spans);
    const bool apart = r->stays || in < rank;
    const Buffer at = touch_whole(p, rank, s, x->micro);
    const uint64_t pieces = touch_name(NAME_PIECES, s, x->step * p->spans + in);
    touch_any(touch_add(p, TOUCH_FREE, RES_COMING, s, 0, touch_name(NAME_COMPLETE, s, x->micro)));
    if (r->stays && r->joins_pieces) {
        touch_carry(touch_gradient(p, TOUCH_ADD, at, pieces, 0))->order = x->micro;
        if (!piece_is_last(&p->pieces, x->micro % p->spans)) { return; }
        touch_gradient(p, TOUCH_FREE, at, pieces,
                       touch_sum(p, x->step, in, s) - touch_sum(p, x->step, in - 1, s));
    }
    touch_join(p, apart ? RES_SUM : RES_GRADIENT, apart ? touch_staying_sum(p, rank, x) : at, x, in);
}
// SEND_SUM, RECV_SUM: a gradient to its owner. SEND_PART, RECV_PART: the head's part of wte's.
static inline void touch_pass_gradient(TouchPlan *p, int rank, const Action *x) {
    const P2p *r = &p->p2p[rank];
    const bool sends = action_sends(x->kind);
    if (x->kind == ACT_SEND_PART || x->kind == ACT_RECV_PART) {
        const int head = p->program->map.units - 1;
        const int64_t *row = &p->row[2 * x->micro];
        Touch *t = touch_gradient(p, sends ? TOUCH_FREE : TOUCH_TAKE,
                                  touch_making(p, rank, x->storage, x->micro),
                                  touch_name(RES_GRADIENT, x->storage, x->micro),
                                  row[1] ? touch_contribution(head, x->storage) : 0);
        t->first = row[0];
        t->rows = row[1];
        return;
    }
    const uint64_t what = touch_name(NAME_COMPLETE, x->storage, x->micro);
    if (!sends) {
        touch_carry(touch_add(p, TOUCH_TAKE, RES_COMING, x->storage,
                              r->comes[x->storage] ? 0 : -1, what));
        return;
    }
    if (r->borrows && x->storage && p->whole[touch_span(p, rank, x->storage, x->micro)]) {
        touch_any(touch_add(p, TOUCH_READ, RES_GRADIENT_SLOT, r->grad_slot[x->storage], 0,
                            touch_name(RES_GRADIENT_SLOT, r->stage[x->storage], x->micro)));
    }
    const int in = piece_micro(&p->pieces, x->micro % p->spans);
    touch_gradient(p, TOUCH_FREE, touch_whole(p, rank, x->storage, x->micro), what,
                   r->joins_pieces ? touch_sum(p, x->step, in, x->storage) -
                                         touch_sum(p, x->step, in - 1, x->storage)
                                   : p->whole[touch_span(p, rank, x->storage, x->micro)] +
                                         TOUCH_REDUCED);
}
// A compute action adds to the gradients that it makes.
static inline void touch_contributions(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    for (int k = 0; k < map->of_unit_count[x->unit]; k++) {
        const int s = map->of_unit[x->unit][k];
        const P2p *r = p->cyclic ? &p->p2p[rank] : NULL;
        if (!action_contributes(map, x, s)) { continue; }
        const bool by_step = !r && (!map->reduces_often[s] ||
                                    (map->sums && map->sums[s] == SUM_COMES_BACK));
        const Buffer at = r ? touch_making(p, rank, s, x->micro)
                            : touch_buffer(touch_slot(map->grad_slot, s), 0);
        Touch *t = touch_rows(p, TOUCH_ADD, RES_GRADIENT, at.a, at.b,
                              touch_name(RES_GRADIENT, s, by_step ? 0 : x->micro), x);
        t->scale = touch_contribution(x->unit, s);
        t->order = x->micro;
        if (r && r->borrows && s) {
            touch_add(p, TOUCH_WRITE, RES_GRADIENT_SLOT, r->grad_slot[s], 0,
                      touch_name(RES_GRADIENT_SLOT, r->stage[s], x->micro));
        }
    }
}
// REDUCE. The storages of a bucket follow each other. A sum on the host is reduced in its slot.
static inline void touch_reduce(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    const int s = x->storage, *bucket = map->bucket;
    const SumPlace place = map->sums ? map->sums[s] : SUM_STAYS;
    const int64_t span = touch_span(p, rank, s, x->micro);
    const bool by_step = !map->reduces_often[s] || place == SUM_COMES_BACK;
    const uint64_t what = touch_name(RES_GRADIENT, s, by_step ? 0 : x->micro);
    const int64_t slot = touch_slot(map->grad_slot, s);
    if (bucket && bucket[s] >= 0 && s != bucket[s]) {
        touch_add(p, TOUCH_FREE, RES_BUCKET, 0, 0, touch_name(RES_BUCKET, s, x->micro));
    }
    if (bucket && bucket[s] >= 0 && s && bucket[s - 1] == bucket[s]) {
        touch_add(p, TOUCH_TAKE, RES_BUCKET, 0, 0, touch_name(RES_BUCKET, s - 1, x->micro));
    }
    touch_amounts(touch_add(p, TOUCH_FREE, RES_GRADIENT, slot, 0, what),
                  place == SUM_COMES_BACK ? p->before[span] - TOUCH_REDUCED : p->whole[span]);
    Touch *t = place == SUM_STAYS
                   ? touch_add(p, TOUCH_ADD, RES_SUM, s, 0, touch_name(RES_SUM, s, 0))
                   : touch_add(p, TOUCH_TAKE, RES_GRADIENT, slot, 0, touch_name(NAME_REDUCED, s, 0));
    touch_carry(t)->order = x->micro;
    t->scale = TOUCH_REDUCED;
}
// EVICT_SUM, FETCH_SUM.
static inline void touch_move_sum(TouchPlan *p, const Action *x) {
    const UnitMap *map = &p->program->map;
    const int s = x->storage;
    const bool comes_back = map->sums && map->sums[s] == SUM_COMES_BACK;
    const int64_t slot = touch_slot(map->grad_slot, s);
    const uint64_t sum = touch_name(RES_SUM, s, 0);
    if (x->kind == ACT_FETCH_SUM) {
        touch_any(touch_add(p, TOUCH_READ, RES_HOST_SUM, s, 0, sum));
        touch_carry(touch_add(p, TOUCH_TAKE, RES_GRADIENT, slot, 0, touch_name(RES_GRADIENT, s, 0)));
        return;
    }
    touch_any(touch_add(p, TOUCH_FREE, RES_GRADIENT, slot, 0, touch_name(NAME_REDUCED, s, 0)));
    touch_carry(touch_add(p, comes_back ? TOUCH_WRITE : TOUCH_ADD, RES_HOST_SUM, s, 0, sum));
}
// The complete sum of a storage, before NORM or an update.
static inline void touch_whole_sum(TouchPlan *p, TouchUse use, int rank, int s) {
    const UnitMap *map = &p->program->map;
    const bool on_host = map->sums && map->sums[s] != SUM_STAYS;
    touch_amounts(
        touch_add(p, use, on_host ? RES_HOST_SUM : RES_SUM, s, 0, touch_name(RES_SUM, s, 0)),
        touch_step_sum(p, rank, s));
}

// -------------------------------------------------------------------------------------------------
// Passes and clipping

// Activations in a slot between the host and the device.
static inline void touch_stash(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    const int64_t place = touch_place(x->micro, p->program->limits[rank].in_flight);
    const uint64_t what = touch_name(RES_STASH, x->unit, x->micro);
    const int made = action_makes_stash(map, x);
    if (action_of_stash(x->kind)) {
        const bool leaves = x->kind == ACT_EVICT_STASH;
        touch_rows(p, TOUCH_READ, leaves ? RES_STASH : RES_STASHED,
                   leaves ? stash_slot(x->unit) : x->unit, leaves ? 0 : place, what, x);
        touch_rows(p, TOUCH_WRITE, leaves ? RES_STASHED : RES_STASH,
                   leaves ? x->unit : stash_slot(x->unit), leaves ? place : 0, what, x);
        return;
    }
    if (action_reads_stash(map, x) >= 0) {
        touch_rows(p, TOUCH_READ, RES_STASH, stash_slot(x->unit), 0, what, x);
    }
    if (made >= 0) {
        touch_rows(p, TOUCH_WRITE, RES_STASH, stash_slot(made), 0,
                   touch_name(RES_STASH, made, x->micro), x);
    }
}
static inline void touch_forward(TouchPlan *p, int rank, const Action *x) {
    const int units = p->program->map.units;
    const bool trains = !p->program->forward_only;
    if (x->unit) {
        touch_rows(p, TOUCH_READ, RES_INPUT, x->unit, touch_input_place(p, rank, x->unit, x->micro),
                   touch_input_name(x->unit, x->micro), x);
    }
    if (trains) {
        touch_rows(p, TOUCH_TAKE, RES_ACTIVATIONS, x->unit,
                   touch_place(x->micro, touch_live(p, rank, x->unit)),
                   touch_name(RES_ACTIVATIONS, x->unit, x->micro), x);
    }
    if (x->unit + 1 < units) {
        touch_rows(p, TOUCH_WRITE, RES_INPUT, x->unit + 1,
                   touch_input_place(p, rank, x->unit + 1, x->micro),
                   touch_input_name(x->unit + 1, x->micro), x);
    }
    touch_add(p, TOUCH_WRITE, RES_RECOMPUTED, 0, 0, 1);
    touch_rows(p, TOUCH_ADD, RES_SAMPLES, x->unit, 0, touch_name(RES_SAMPLES, x->unit, 0), x);
}
static inline uint64_t touch_recomputed(const Action *x) {
    return touch_name(RES_RECOMPUTED, x->unit, x->micro);
}
// What each backward action reads: its activations, its input, the gradient of its output, and
// recomputed activations of blocks.
static inline void touch_saved(TouchPlan *p, int rank, const Action *x) {
    const int head = p->program->map.units - 1;
    touch_rows(p, TOUCH_READ, RES_ACTIVATIONS, x->unit,
               touch_place(x->micro, touch_live(p, rank, x->unit)),
               touch_name(RES_ACTIVATIONS, x->unit, x->micro), x);
    if (x->unit) {
        touch_rows(p, TOUCH_READ, RES_INPUT, x->unit, touch_input_place(p, rank, x->unit, x->micro),
                   touch_input_name(x->unit, x->micro), x);
    }
    if (x->unit < head && x->kind != ACT_RECOMPUTE) {
        touch_input_gradient(p, TOUCH_READ, rank, x->unit + 1, x);
    }
    if (p->program->recompute && x->unit && x->unit < head && x->kind != ACT_RECOMPUTE) {
        touch_rows(p, TOUCH_READ, RES_RECOMPUTED, 0, 0, touch_recomputed(x), x);
    }
}
// The norms of the units of a rank, which a clipping group of several units adds up; `until`: the
// last of these units.
static inline uint64_t touch_norms(const TouchPlan *p, int rank, int until) {
    uint64_t all = 0;
    for (int u = max_i64(1, p->first[rank]); u <= until; u++) {
        all += touch_name(NAME_NORM, u, 0);
    }
    return all;
}
static inline void touch_backward_input(TouchPlan *p, int rank, const Action *x) {
    const Program *of = p->program;
    const int head = of->map.units - 1;
    const int64_t place = touch_clip_place(p, rank, x->micro);
    touch_saved(p, rank, x);
    touch_add(p, TOUCH_TAKE, RES_WORKS, 0, 0, 1)->limit = max_i64(1, of->limits[rank].works);
    touch_rows(p, TOUCH_TAKE, RES_WORK, x->unit, x->micro, touch_name(RES_WORK, x->unit, x->micro),
               x);
    if (of->limits[rank].works < 1) { p->touch[p->count - 1].b = -1; }
    touch_input_gradient(p, TOUCH_WRITE, rank, x->unit, x);
    if (program_waits(of)) {
        Touch *t = touch_rows(p, TOUCH_ADD, RES_NORMS, 0, place, touch_name(RES_NORMS, 0, x->micro),
                              x);
        t->scale = touch_name(NAME_NORM, x->unit, 0);
        touch_rows(p, TOUCH_WRITE, RES_NORMS, x->unit, place,
                   touch_name(RES_NORMS, x->unit, x->micro), x);
    }
    if (x->unit != head) { return; }
    if (program_crosses(of)) {
        touch_rows(p, TOUCH_WRITE, RES_CROSSING, 0, touch_crossing_place(p, rank, x->micro), touch_name(RES_CROSSING, 0, x->micro), x);
    }
    touch_add(p, TOUCH_WRITE, RES_LOSS, p->cyclic ? x->micro % (2 * p->spans) : x->micro, 0,
              touch_name(RES_LOSS, x->micro, 0));
}
static inline int touch_last_of_stage(const TouchPlan *p, int unit) {
    const UnitMap *map = &p->program->map;
    while (unit + 1 < map->units && map->stage[unit + 1] == map->stage[unit]) { unit++; }
    return unit;
}
static inline void touch_backward_weight(TouchPlan *p, int rank, const Action *x) {
    const Program *of = p->program;
    const UnitMap *map = &of->map;
    const bool crosses = program_crosses(of),
               far = crosses && of->clips == CLIPS_ALL && map->stage[x->unit] > 0,
               scaled = far || program_waits(of) || (crosses && x->unit == 0);
    const int last = far ? touch_last_of_stage(p, x->unit) : -1;
    touch_saved(p, rank, x);
    if (x->unit) {
        touch_add(p, TOUCH_FREE, RES_WORKS, 0, 0, 1)->limit = 1;
        touch_rows(p, TOUCH_FREE, RES_WORK, x->unit, x->micro,
                   touch_name(RES_WORK, x->unit, x->micro), x);
    }
    if (x->unit && program_waits(of)) {
        touch_rows(p, TOUCH_READ, RES_NORMS, x->unit, touch_clip_place(p, rank, x->micro),
                   touch_name(RES_NORMS, x->unit, x->micro), x);
    }
    if (scaled) {
        touch_rows(p, TOUCH_READ, far ? RES_FAR_FACTORS : RES_FACTORS, far ? last : 0,
                   touch_clip_place(p, rank, x->micro),
                   touch_name(RES_FACTORS, far ? last : 0, x->micro), x);
    }
    if (x->unit == 0 && map->kept_gathered >= 0 && !p->cyclic) {
        touch_add(p, TOUCH_READ, RES_HELD, map->kept_gathered, 0,
                  touch_version_name(map->kept_gathered, 0));
    }
    touch_rows(p, TOUCH_FREE, RES_ACTIVATIONS, x->unit,
               touch_place(x->micro, touch_live(p, rank, x->unit)),
               touch_name(RES_ACTIVATIONS, x->unit, x->micro), x);
}
// CLIP: norms of the units of this rank, and of other stages, become factors.
static inline void touch_clip(TouchPlan *p, int rank, const Action *x) {
    const Program *of = p->program;
    const int64_t place = touch_clip_place(p, rank, x->micro);
    const uint64_t norms = touch_norms(p, rank, p->end[rank] - 1);
    if (program_waits(of) && norms) {
        touch_rows(p, TOUCH_READ, RES_NORMS, 0, place, touch_name(RES_NORMS, 0, x->micro), x)
            ->scale = norms;
    }
    const bool embeds = x->unit == 0;
    if (embeds) { touch_input_gradient(p, TOUCH_READ, rank, 1, x); }
    for (int u = 0; embeds && u < of->map.units; u++) {
        if (!program_sends_norms(of, u)) { continue; }
        touch_rows(p, TOUCH_READ, RES_FAR_NORMS, u, touch_crossing_place(p, rank, x->micro),
                   touch_name(RES_FAR_NORMS, u, x->micro),
                   x);
    }
    touch_rows(p, TOUCH_TAKE, RES_SAMPLES, -1 - rank, x->micro,
               touch_name(RES_FACTORS, 0, x->micro), x); // once
    touch_rows(p, TOUCH_WRITE, RES_FACTORS, 0, place, touch_name(RES_FACTORS, 0, x->micro), x);
}
// TIED: the classifier's part of wte, scaled by the factors of the first stage.
static inline void touch_tied(TouchPlan *p, int rank, const Action *x) {
    const int64_t place = touch_clip_place(p, rank, x->micro);
    touch_rows(p, TOUCH_READ, RES_CROSSING, 0, place, touch_name(RES_CROSSING, 0, x->micro), x);
    touch_rows(p, TOUCH_READ, RES_FAR_FACTORS, x->unit, place,
               touch_name(RES_FACTORS, x->unit, x->micro), x);
}
static inline void touch_compute(TouchPlan *p, int rank, const Action *x) {
    touch_stash(p, rank, x);
    if (action_reads_parameters(x->kind)) { touch_parameters(p, rank, x); }
    switch (x->kind) {
    case ACT_FORWARD: touch_forward(p, rank, x); break;
    case ACT_BACKWARD_INPUT: touch_backward_input(p, rank, x); break;
    case ACT_BACKWARD_WEIGHT: touch_backward_weight(p, rank, x); break;
    case ACT_RECOMPUTE:
        touch_saved(p, rank, x);
        touch_rows(p, TOUCH_WRITE, RES_RECOMPUTED, 0, 0, touch_recomputed(x), x);
        break;
    case ACT_CLIP: touch_clip(p, rank, x); break;
    default: touch_tied(p, rank, x);
    }
    touch_contributions(p, rank, x);
}
// Messages of rows. What is sent must be here; what comes adds up from several messages.
static inline void touch_message(TouchPlan *p, int rank, const Action *x) {
    const Program *of = p->program;
    const int64_t place = touch_crossing_place(p, rank, x->micro);
    const bool all = of->clips == CLIPS_ALL;
    switch (x->kind) {
    case ACT_SEND_FORWARD:
    case ACT_RECV_FORWARD:
        touch_rows(p, action_sends(x->kind) ? TOUCH_READ : TOUCH_ADD, RES_INPUT, x->unit + 1,
                   touch_input_place(p, rank, x->unit + 1, x->micro),
                   touch_input_name(x->unit + 1, x->micro), x)
            ->part = true;
        break;
    case ACT_SEND_BACKWARD:
        touch_input_gradient(p, TOUCH_READ, rank, x->unit, x)->part = true;
        break;
    case ACT_RECV_BACKWARD: touch_input_gradient(p, TOUCH_ADD, rank, x->unit, x); break;
    case ACT_SEND_NORM:
        touch_part(p, all ? RES_NORMS : RES_CROSSING, 0, place,
                   touch_name(all ? RES_NORMS : RES_CROSSING, 0, x->micro), x);
        if (all) { p->touch[p->count - 1].scale = touch_norms(p, rank, x->unit); }
        break;
    case ACT_RECV_NORM:
        touch_rows(p, TOUCH_ADD, RES_FAR_NORMS, x->unit, place,
                   touch_name(RES_FAR_NORMS, x->unit, x->micro), x);
        break;
    case ACT_SEND_FACTOR:
        touch_part(p, RES_FACTORS, 0, place, touch_name(RES_FACTORS, 0, x->micro), x);
        break;
    default:
        touch_rows(p, TOUCH_ADD, RES_FAR_FACTORS, x->unit, place,
                   touch_name(RES_FACTORS, x->unit, x->micro), x);
    }
}

// -------------------------------------------------------------------------------------------------
// Norm, updates, pieces of states, statistics

static inline uint64_t touch_norm_name(void) { return touch_name(RES_NORM, 0, 0); }
static inline void touch_norm(TouchPlan *p, int rank) {
    for (int s = 0; s < p->program->map.storages; s++) {
        if (p->member[rank * p->program->map.storages + s]) {
            touch_whole_sum(p, TOUCH_READ, rank, s);
        }
    }
    touch_add(p, TOUCH_WRITE, RES_NORM, 0, 0, touch_norm_name());
}
// Version 1 exists on this rank. What stays whole is gathered next.
static inline void touch_updated(TouchPlan *p, int rank, int s) {
    touch_unused(p, RES_HELD, s);
    if (!p->program->map.delays) { touch_whole_sum(p, TOUCH_FREE, rank, s); }
    touch_add(p, TOUCH_READ, RES_NEWEST, s, 0, touch_version_name(s, 0));
    touch_add(p, TOUCH_WRITE, RES_NEWEST, s, 0, touch_version_name(s, 1));
    if (!p->program->map.gathers[s]) {
        touch_add(p, TOUCH_FREE, RES_PARAMETERS, -1 - s, 0, touch_version_name(s, 0));
    }
}
typedef enum { PIECES_READ, PIECES_BEGUN, PIECES_MADE, PIECES_ENDED, PIECES_WRITTEN } CountedPieces;
// Pieces come in order. Returns whether this is the last one of the step.
static inline int touch_pieces(const TouchPlan *p, int s) {
    const UnitMap *map = &p->program->map;
    return map->pieces ? map->pieces[s] * (map_has_matrices(map, s) ? 2 : 1) : 0;
}
static inline bool touch_count(TouchPlan *p, CountedPieces counted, const Action *x) {
    touch_amounts(touch_add(p, TOUCH_READ, RES_COUNT, counted, x->storage, 1), x->use);
    touch_amounts(touch_add(p, TOUCH_WRITE, RES_COUNT, counted, x->storage, 1), x->use + 1);
    return x->use + 1 == touch_pieces(p, x->storage);
}
// A piece goes from one state to the next: on its way to the update, updated, back.
enum { PIECE_COMES = 1, PIECE_MADE = 2, PIECE_BACK = 3 };
static inline void touch_piece(TouchPlan *p, Resource of, const Action *x, int from, int to) {
    if (from) {
        touch_add(p, TOUCH_FREE, of, x->storage, x->use, touch_name(of, x->storage, from));
    }
    if (to) { touch_add(p, TOUCH_TAKE, of, x->storage, x->use, touch_name(of, x->storage, to)); }
}
// FETCH and EVICT: to the update, which takes a slot, or back.
static inline void touch_move(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    const bool begins = (x->kind == ACT_EVICT) == map->cpu_update, on_disk = map->on_disk[x->storage];
    const SumPlace sums = map->sums ? map->sums[x->storage] : SUM_STAYS;
    const bool last = touch_count(p, begins ? PIECES_BEGUN : PIECES_ENDED, x);
    if (map->delays) { // updated as a whole
        const uint64_t made = touch_name(RES_PIECE, x->storage, PIECE_MADE);
        touch_unused(p, RES_HELD, x->storage);
        touch_add(p, last ? TOUCH_FREE : TOUCH_READ, RES_PIECE, x->storage, 0, made);
        if (last) { touch_updated(p, rank, x->storage); }
        return;
    }
    if (begins && (map->cpu_update || sums)) {
        touch_add(p, TOUCH_READ, RES_NORM, 0, 0, touch_norm_name());
        touch_whole_sum(p, TOUCH_READ, rank, x->storage);
    }
    if (begins && on_disk && !map->cpu_update) {
        touch_add(p, TOUCH_READ, RES_DISK_PIECE, x->storage, x->use,
                  touch_name(RES_DISK_PIECE, x->storage, PIECE_COMES));
    }
    touch_piece(p, RES_PIECE, x, begins ? 0 : PIECE_MADE, begins ? PIECE_COMES : 0);
    touch_add(p, begins ? TOUCH_TAKE : TOUCH_FREE, RES_MOVING, 0, 0, 1)->limit = MOVING_PIECES;
    if (!begins && on_disk) { touch_piece(p, RES_DISK_PIECE, x, PIECE_COMES, PIECE_BACK); }
    if (!begins && last && map->cpu_update) { touch_updated(p, rank, x->storage); }
}
// READ and WRITE.
static inline void touch_disk(TouchPlan *p, const Action *x) {
    const bool reads = x->kind == ACT_READ;
    touch_count(p, reads ? PIECES_READ : PIECES_WRITTEN, x);
    touch_piece(p, RES_DISK_PIECE, x, reads ? 0 : PIECE_BACK, reads ? PIECE_COMES : 0);
    touch_add(p, reads ? TOUCH_TAKE : TOUCH_FREE, RES_READING, 0, 0, 1)->limit = DISK_PIECES;
}
// UPDATE and DIRECT of a piece, or of all if there are none; where updates are delayed, of the sum
// of the step before.
static inline void touch_update(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    const int s = x->storage, pieces = touch_pieces(p, s);
    const bool directs = x->kind == ACT_DIRECT, matrices = map_has_matrices(map, s);
    if (map->delays) {
        touch_add(p, TOUCH_FREE, RES_HOST_SUM, s, 0, touch_name(RES_SUM, s, -1));
        touch_add(p, TOUCH_TAKE, RES_PIECE, s, 0, touch_name(RES_PIECE, s, PIECE_MADE));
        return;
    }
    touch_add(p, TOUCH_READ, RES_NORM, 0, 0, touch_norm_name());
    touch_whole_sum(p, TOUCH_READ, rank, s);
    if (pieces) {
        touch_piece(p, RES_PIECE, x, PIECE_COMES, PIECE_MADE);
        if (map->on_disk[s]) {
            touch_add(p, TOUCH_READ, RES_DISK_PIECE, s, x->use,
                      touch_name(RES_DISK_PIECE, s, PIECE_COMES));
        }
    }
    const bool last = !pieces || touch_count(p, PIECES_MADE, x);
    if (directs) {
        const bool ready = !pieces || 2 * (x->use + 1) == pieces;
        if (ready) {
            touch_add(p, TOUCH_TAKE, RES_DIRECTIONS, s, 0, touch_name(RES_DIRECTIONS, s, 0));
        }
        return;
    }
    if (matrices) {
        touch_add(p, last ? TOUCH_FREE : TOUCH_READ, RES_MATRICES, s, 0,
                  touch_name(RES_MATRICES, s, 0));
    }
    if (last && !(pieces && map->cpu_update)) { touch_updated(p, rank, s); }
}
static inline void touch_orthogonalise(TouchPlan *p, const Action *x) {
    touch_add(p, TOUCH_FREE, RES_DIRECTIONS, x->storage, 0, touch_name(RES_DIRECTIONS, x->storage, 0));
    touch_add(p, TOUCH_TAKE, RES_MATRICES, x->storage, 0, touch_name(RES_MATRICES, x->storage, 0));
}
static inline uint64_t touch_stats_name(int64_t step) { return touch_name(RES_STATS_OUT, step, 0); }
// UPDATE where steps overlap: the owner makes the version of the next step.
static inline void touch_make_version(TouchPlan *p, int rank, const Action *x) {
    const P2p *r = &p->p2p[rank];
    const int s = x->storage;
    const int64_t version = x->step + 1;
    touch_complete(p, TOUCH_FREE, rank, s, x->step);
    if (r->waits) {
        touch_amounts(touch_add(p, TOUCH_READ, RES_STATS_OUT, 0, 0, touch_stats_name(x->step)),
                      p->program->ranks);
    } else {
        touch_add(p, TOUCH_WRITE, RES_SQUARES, x->step % 2, s, touch_name(RES_SQUARES, x->step, s));
    }
    touch_amounts(touch_add(p, TOUCH_READ, RES_NEWEST, s, r->owner[s] == rank ? 0 : -1, 1), x->step);
    touch_amounts(touch_add(p, TOUCH_WRITE, RES_NEWEST, s, 0, 1), version);
    touch_add(p, TOUCH_WRITE, RES_PARAMETERS, s, touch_place(version, r->places[s]),
              touch_version_name(s, version));
}
// STATS: version 0 adds what this rank knows of a step to what it has received; 1 has heard of all.
static inline void touch_stats(TouchPlan *p, int rank, const Action *x) {
    const P2p *r = &p->p2p[rank];
    const bool whole = x->version != 0;
    const uint64_t name = touch_stats_name(x->step);
    for (int i = 0; !whole && i < p->spans; i++) {
        const int64_t micro = x->step * p->spans + i;
        if (p->head_rank[micro] == rank) {
            touch_add(p, TOUCH_READ, RES_LOSS, micro % (2 * p->spans), 0,
                      touch_name(RES_LOSS, micro, 0));
        }
    }
    for (int s = 0; !whole && s < p->program->map.storages; s++) {
        if (r->owner[s] != rank) { continue; }
        if (r->waits) {
            touch_complete(p, TOUCH_READ, rank, s, x->step);
        } else {
            touch_add(p, TOUCH_READ, RES_SQUARES, x->step % 2, s,
                      touch_name(RES_SQUARES, x->step, s));
        }
    }
    // Every rank but the first of the chain has received what those before it have added.
    Touch *in = touch_add(p, TOUCH_FREE, RES_STATS_IN, 0, 0, name);
    in->any = in->absent = !whole;
    in->scale = whole ? (uint64_t)p->program->ranks : 0;
    Touch *out = touch_carry(touch_add(p, TOUCH_WRITE, RES_STATS_OUT, 0, 0, name));
    out->scale = !whole;
}
static inline void touch_pass_stats(TouchPlan *p, const Action *x) {
    const uint64_t name = touch_stats_name(x->step);
    if (action_sends(x->kind)) {
        touch_any(touch_add(p, TOUCH_READ, RES_STATS_OUT, 0, 0, name));
    } else {
        touch_carry(touch_add(p, TOUCH_TAKE, RES_STATS_IN, 0, 0, name));
    }
}

// -------------------------------------------------------------------------------------------------
// The table

// Lists what an action of a rank does: touch[0 .. count - 1] of p, in this order. Actions without
// rows do nothing. The action's fields must be in range.
static inline void action_touches(TouchPlan *p, int rank, const Action *x) {
    const bool of_rows = action_is(x->kind, COMPUTES | OF_ROWS | OF_STASH);
    p->count = 0;
    if (of_rows && !x->rows) { return; }
    switch (x->kind) {
    case ACT_FORWARD:
    case ACT_BACKWARD_INPUT:
    case ACT_BACKWARD_WEIGHT:
    case ACT_RECOMPUTE:
    case ACT_CLIP:
    case ACT_TIED: touch_compute(p, rank, x); break;
    case ACT_FETCH_STASH:
    case ACT_EVICT_STASH: touch_stash(p, rank, x); break;
    case ACT_SEND_FORWARD:
    case ACT_RECV_FORWARD:
    case ACT_SEND_BACKWARD:
    case ACT_RECV_BACKWARD:
    case ACT_SEND_NORM:
    case ACT_RECV_NORM:
    case ACT_SEND_FACTOR:
    case ACT_RECV_FACTOR: touch_message(p, rank, x); break;
    case ACT_SEND_SUM:
    case ACT_RECV_SUM:
    case ACT_SEND_PART:
    case ACT_RECV_PART: touch_pass_gradient(p, rank, x); break;
    case ACT_SEND_PARAMETERS:
    case ACT_RECV_PARAMETERS: touch_pass_parameters(p, rank, x); break;
    case ACT_SEND_STATS:
    case ACT_RECV_STATS: touch_pass_stats(p, x); break;
    case ACT_PREFETCH: touch_gather(p, x); break;
    case ACT_ACQUIRE:
    case ACT_RELEASE: touch_hold(p, rank, x); break;
    case ACT_REDUCE: (p->cyclic ? touch_end_piece : touch_reduce)(p, rank, x); break;
    case ACT_ADD: touch_add_part(p, rank, x); break;
    case ACT_NORM: touch_norm(p, rank); break;
    case ACT_DIRECT: touch_update(p, rank, x); break;
    case ACT_UPDATE: (p->cyclic ? touch_make_version : touch_update)(p, rank, x); break;
    case ACT_ORTHOGONALISE: touch_orthogonalise(p, x); break;
    case ACT_STATS: touch_stats(p, rank, x); break;
    case ACT_FETCH:
    case ACT_EVICT: touch_move(p, rank, x); break;
    case ACT_READ:
    case ACT_WRITE: touch_disk(p, x); break;
    default: touch_move_sum(p, x); // FETCH_SUM, EVICT_SUM
    }
}

#endif
