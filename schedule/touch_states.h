// touch_states.h: what the actions of states touch (touches.h): parameters, gradients and their
// sums, the norm, updates, pieces of states, statistics.
#ifndef TOUCH_STATES_H
#define TOUCH_STATES_H

#include "base/base.h"
#include "cyclic.h"
#include "model/gpt.h"
#include "schedule/actions.h"
#include "schedule/cyclic_routes.h"
#include "schedule/schedule.h"
#include "schedule/touch.h"
#include "state/policy.h"
#include "state/table.h"

// -------------------------------------------------------------------------------------------------
// Parameters

static inline uint64_t touch_version_name(int storage, int64_t version) {
    return touch_name(RES_PARAMETERS, storage, version);
}
// Reads a version where steps overlap: stored here, or borrowed for a use.
static inline void touch_version(TouchPlan *p, int rank, int storage, int64_t version, int use,
                                 int64_t step) {
    const P2p *r = &p->p2p[rank];
    if (!r->borrows || touch_p2p(p, storage)->owner == rank) {
        touch_add(p, TOUCH_READ, RES_PARAMETERS, storage,
                  touch_place(version, touch_p2p(p, storage)->places[rank]),
                  touch_version_name(storage, version));
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
            version =
                max_i64(0, step - !cyclic_fresh(c, cyclic_micro(c, at), map->rows[s].p2p.stage));
            touch_version(p, rank, s, version,
                          cyclic_use(c, cyclic_stage_of_unit(c, x->unit), x->kind != ACT_FORWARD),
                          step);
        }
        touch_add(p, TOUCH_READ, RES_HELD, s, 0, touch_version_name(s, version));
    }
}
// A pass that does not train gathers from the slices until an earlier pass has made the copies.
static inline void touch_gather(TouchPlan *p, const Action *x) {
    const UnitMap *map = &p->program->map;
    const uint64_t version = touch_version_name(x->storage, x->version);
    const bool slices = !x->secondary || p->program->forward_only;
    if (x->secondary) { touch_add(p, TOUCH_READ, RES_COPIES, x->storage, 0, version); }
    if (slices) { touch_add(p, TOUCH_READ, RES_NEWEST, x->storage, 0, version); }
    if (!map->rows[x->storage].gathers) { // it stays whole, and follows the update
        touch_add(p, TOUCH_TAKE, RES_PARAMETERS, -1 - x->storage, 0, version);
        return;
    }
    touch_unused(p, RES_HELD, x->storage);
    touch_add(p, TOUCH_TAKE, RES_GATHERED, touch_slot(map->rows[x->storage].param_slot, x->storage),
              0, version);
    if (map->copies && slices) { touch_add(p, TOUCH_WRITE, RES_COPIES, x->storage, 0, version); }
}
// ACQUIRE and RELEASE.
static inline void touch_hold(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    const bool acquires = x->kind == ACT_ACQUIRE, gathers = map->rows[x->storage].gathers;
    const uint64_t version = touch_version_name(x->storage, x->version);
    touch_add(p, acquires ? TOUCH_TAKE : TOUCH_FREE, RES_HELD, x->storage, 0, version);
    if (p->cyclic) {
        if (acquires) { touch_version(p, rank, x->storage, x->version, x->use, x->step); }
    } else if (gathers) {
        touch_add(p, acquires ? TOUCH_READ : TOUCH_FREE, RES_GATHERED,
                  touch_slot(map->rows[x->storage].param_slot, x->storage), 0, version);
    } else if (acquires) {
        touch_add(p, TOUCH_READ, RES_PARAMETERS, -1 - x->storage, 0, version);
    }
}
// Messages of a storage's parameters, or of its sums, from one rank to another arrive in the order
// in which both ends post them (state/p2p.h).
static inline void touch_channel(TouchPlan *p, const Action *x) {
    touch_add(p, TOUCH_WRITE, RES_CHANNEL, (int64_t)x->kind * p->program->ranks + x->peer,
              x->storage, 1);
}
// A version is sent, or received and stored, where steps overlap.
static inline void touch_pass_parameters(TouchPlan *p, int rank, const Action *x) {
    const P2p *r = &p->p2p[rank];
    touch_channel(p, x);
    const uint64_t version = touch_version_name(x->storage, x->version);
    const int64_t place = touch_place(x->version, touch_p2p(p, x->storage)->places[rank]);
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
    const int span = p->cyclic || (map->rows[storage].reduces_often && micro > 0) ? micro : 0;
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

// Where steps overlap: the buffer of a piece's gradient, and of its whole micro-batch's
// (state/p2p.h: store_piece_gradient).
typedef struct {
    int64_t a, b;
} Buffer;
enum {
    BUFFER_OF_STORAGE,
    BUFFER_OF_CLASS,
    BUFFER_OF_HEAD,
    BUFFER_OF_PIECES,
    BUFFER_SECOND
}; // Buffer.a of a GRADIENT
static inline Buffer touch_buffer(int64_t a, int64_t b) {
    const Buffer buffer = {a, b};
    return buffer;
}
static inline Buffer touch_whole_of_step(const TouchPlan *p, int rank, int s, int64_t step) {
    const P2p *r = &p->p2p[rank];
    const bool second = touch_p2p(p, s)->owner == rank && step % r->sums;
    return touch_buffer(second            ? BUFFER_SECOND
                        : r->joins_pieces ? BUFFER_OF_PIECES
                                          : BUFFER_OF_STORAGE,
                        s);
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
// The sum of the micro-batches before `in` must be in a buffer, to which the gradient of this one
// is added. Sums stay in one of `sums` buffers, or are made in the owner's gradient.
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
    touch_amounts(
        touch_add(p, use, stays ? RES_SUM : RES_GRADIENT, at.a, at.b, touch_name(RES_SUM, s, step)),
        touch_sum(p, step, p->pieces.micros - 1, s));
}
// REDUCE where steps overlap: the gradient of a piece is complete; it is added to those of earlier
// pieces, and with the last piece, on the owner, to the sum of earlier micro-batches.
static inline void touch_end_piece(TouchPlan *p, int rank, const Action *x) {
    const P2p *r = &p->p2p[rank];
    const int s = x->storage, in = piece_micro(&p->pieces, x->micro % p->spans);
    const bool ends = piece_is_last(&p->pieces, x->micro % p->spans),
               owns = touch_p2p(p, s)->owner == rank;
    const Buffer making = touch_making(p, rank, s, x->micro),
                 at = touch_whole(p, rank, s, x->micro);
    const uint64_t pieces = touch_name(NAME_PIECES, s, x->step * p->spans + in);
    if (r->borrows && s && p->whole[touch_span(p, rank, s, x->micro)]) {
        touch_any(touch_add(p, TOUCH_READ, RES_GRADIENT_SLOT, touch_p2p(p, s)->grad_slot, 0,
                            touch_name(RES_GRADIENT_SLOT, touch_p2p(p, s)->stage, x->micro)));
    }
    touch_gradient(p, TOUCH_FREE, making, touch_name(RES_GRADIENT, s, x->micro),
                   p->whole[touch_span(p, rank, s, x->micro)])
        ->at_once = true;
    uint64_t amount = p->whole[touch_span(p, rank, s, x->micro)] + TOUCH_REDUCED;
    if (r->joins_pieces) {
        Touch *add = touch_gradient(p, TOUCH_ADD, at, pieces, amount);
        add->order = x->micro;
        add->at_once = true;
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
    touch_join(p, apart ? RES_SUM : RES_GRADIENT, apart ? touch_staying_sum(p, rank, x) : at, x,
               in);
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
    touch_channel(p, x);
    if (!sends) {
        const P2pStorage *of = touch_p2p(p, x->storage);
        touch_carry(touch_add(p, TOUCH_TAKE, RES_COMING, x->storage,
                              of->owner == rank && of->several ? 0 : -1, what));
        return;
    }
    if (r->borrows && x->storage && p->whole[touch_span(p, rank, x->storage, x->micro)]) {
        touch_any(
            touch_add(p, TOUCH_READ, RES_GRADIENT_SLOT, touch_p2p(p, x->storage)->grad_slot, 0,
                      touch_name(RES_GRADIENT_SLOT, touch_p2p(p, x->storage)->stage, x->micro)));
    }
    const int in = piece_micro(&p->pieces, x->micro % p->spans);
    touch_gradient(p, TOUCH_FREE, touch_whole(p, rank, x->storage, x->micro), what,
                   r->joins_pieces
                       ? touch_sum(p, x->step, in, x->storage) -
                             touch_sum(p, x->step, in - 1, x->storage)
                       : p->whole[touch_span(p, rank, x->storage, x->micro)] + TOUCH_REDUCED);
}
// A compute action adds to the gradients that it makes.
static inline void touch_contributions(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    for (int k = 0; k < map->of_unit_count[x->unit]; k++) {
        const int s = map->of_unit[x->unit][k];
        const P2p *r = p->cyclic ? &p->p2p[rank] : NULL;
        if (!action_contributes(map, x, s)) { continue; }
        const bool by_step =
            !r && (!map->rows[s].reduces_often || map->rows[s].sum == SUM_COMES_BACK);
        const Buffer at = r ? touch_making(p, rank, s, x->micro)
                            : touch_buffer(touch_slot(map->rows[s].grad_slot, s), 0);
        Touch *t = touch_rows(p, TOUCH_ADD, RES_GRADIENT, at.a, at.b,
                              touch_name(RES_GRADIENT, s, by_step ? 0 : x->micro), x);
        t->scale = touch_contribution(x->unit, s);
        t->order = x->micro;
        if (r && r->borrows && s) {
            touch_add(p, TOUCH_WRITE, RES_GRADIENT_SLOT, touch_p2p(p, s)->grad_slot, 0,
                      touch_name(RES_GRADIENT_SLOT, touch_p2p(p, s)->stage, x->micro));
        }
    }
}
// REDUCE. The storages of a bucket follow each other. A sum on the host is reduced in its slot.
static inline void touch_reduce(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    const int s = x->storage, bucket = map->rows[s].bucket;
    const SumPlace place = map->rows[s].sum;
    const int64_t span = touch_span(p, rank, s, x->micro);
    const bool by_step = !map->rows[s].reduces_often || place == SUM_COMES_BACK;
    const uint64_t what = touch_name(RES_GRADIENT, s, by_step ? 0 : x->micro);
    const int64_t slot = touch_slot(map->rows[s].grad_slot, s);
    if (bucket >= 0 && s != bucket) {
        touch_add(p, TOUCH_FREE, RES_BUCKET, 0, 0, touch_name(RES_BUCKET, s, x->micro));
    }
    if (bucket >= 0 && s && map->rows[s - 1].bucket == bucket) {
        touch_add(p, TOUCH_TAKE, RES_BUCKET, 0, 0, touch_name(RES_BUCKET, s - 1, x->micro));
    }
    touch_amounts(touch_add(p, TOUCH_FREE, RES_GRADIENT, slot, 0, what),
                  place == SUM_COMES_BACK ? p->before[span] - TOUCH_REDUCED : p->whole[span]);
    Touch *t =
        place == SUM_STAYS
            ? touch_add(p, TOUCH_ADD, RES_SUM, s, 0, touch_name(RES_SUM, s, 0))
            : touch_add(p, TOUCH_TAKE, RES_GRADIENT, slot, 0, touch_name(NAME_REDUCED, s, 0));
    touch_carry(t)->order = x->micro;
    t->scale = TOUCH_REDUCED;
}
// EVICT_SUM, FETCH_SUM.
static inline void touch_move_sum(TouchPlan *p, const Action *x) {
    const UnitMap *map = &p->program->map;
    const int s = x->storage;
    const bool comes_back = map->rows[s].sum == SUM_COMES_BACK;
    const int64_t slot = touch_slot(map->rows[s].grad_slot, s);
    const uint64_t sum = touch_name(RES_SUM, s, 0);
    if (x->kind == ACT_FETCH_SUM) {
        touch_any(touch_add(p, TOUCH_READ, RES_HOST_SUM, s, 0, sum));
        touch_carry(
            touch_add(p, TOUCH_TAKE, RES_GRADIENT, slot, 0, touch_name(RES_GRADIENT, s, 0)));
        return;
    }
    touch_any(touch_add(p, TOUCH_FREE, RES_GRADIENT, slot, 0, touch_name(NAME_REDUCED, s, 0)));
    touch_carry(touch_add(p, comes_back ? TOUCH_WRITE : TOUCH_ADD, RES_HOST_SUM, s, 0, sum));
}
// The complete sum of a storage, before NORM or an update.
static inline void touch_whole_sum(TouchPlan *p, TouchUse use, int rank, int s) {
    const UnitMap *map = &p->program->map;
    const bool on_host = map->rows[s].sum != SUM_STAYS;
    touch_amounts(
        touch_add(p, use, on_host ? RES_HOST_SUM : RES_SUM, s, 0, touch_name(RES_SUM, s, 0)),
        touch_step_sum(p, rank, s));
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
    if (!p->program->map.rows[s].gathers) {
        touch_add(p, TOUCH_FREE, RES_PARAMETERS, -1 - s, 0, touch_version_name(s, 0));
    }
}
typedef enum { PIECES_READ, PIECES_BEGUN, PIECES_MADE, PIECES_ENDED, PIECES_WRITTEN } CountedPieces;
// Pieces come in order. Returns whether this is the last one of the step.
static inline int touch_pieces(const TouchPlan *p, int s) {
    const UnitMap *map = &p->program->map;
    return map->rows[s].pieces * (map_has_matrices(map, s) ? 2 : 1);
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
    const bool begins = (x->kind == ACT_EVICT) == map->cpu_update,
               on_disk = map->rows[x->storage].disk;
    const SumPlace sums = map->rows[x->storage].sum;
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
    if (map->cpu_update) { // parameters may be their own masters; a piece of new ones comes back
        touch_add(p, TOUCH_READ, RES_NEWEST, x->storage, 0, touch_version_name(x->storage, 0));
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
static inline void touch_moments(TouchPlan *p, int s) {
    touch_add(p, TOUCH_WRITE, RES_MOMENTS, s, 0, touch_name(RES_MOMENTS, s, 0));
}
// UPDATE and DIRECT of a piece, or of all if there are none; where updates are delayed, of the sum
// of the step before.
static inline void touch_update(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    const int s = x->storage, pieces = touch_pieces(p, s);
    const bool directs = x->kind == ACT_DIRECT, matrices = map_has_matrices(map, s);
    if (directs || !matrices) { touch_moments(p, s); }
    if (map->delays) {
        touch_add(p, TOUCH_FREE, RES_HOST_SUM, s, 0, touch_name(RES_SUM, s, -1));
        touch_add(p, TOUCH_TAKE, RES_PIECE, s, 0, touch_name(RES_PIECE, s, PIECE_MADE));
        return;
    }
    touch_add(p, TOUCH_READ, RES_NORM, 0, 0, touch_norm_name());
    touch_whole_sum(p, TOUCH_READ, rank, s);
    if (pieces) {
        touch_add(p, TOUCH_READ, RES_NEWEST, s, 0, touch_version_name(s, 0)); // updates a part
        touch_piece(p, RES_PIECE, x, PIECE_COMES, PIECE_MADE);
        if (map->rows[s].disk) {
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
        touch_add(p, last ? TOUCH_FREE : TOUCH_READ, RES_ORTHOGONAL, s, 0,
                  touch_name(RES_ORTHOGONAL, s, 0));
    }
    if (last && !(pieces && map->cpu_update)) { touch_updated(p, rank, s); }
}
static inline void touch_orthogonalise(TouchPlan *p, const Action *x) {
    touch_add(p, TOUCH_FREE, RES_DIRECTIONS, x->storage, 0,
              touch_name(RES_DIRECTIONS, x->storage, 0));
    touch_add(p, TOUCH_TAKE, RES_ORTHOGONAL, x->storage, 0,
              touch_name(RES_ORTHOGONAL, x->storage, 0));
}
static inline uint64_t touch_stats_name(int64_t step) { return touch_name(RES_STATS_OUT, step, 0); }
// UPDATE where steps overlap: the owner makes the version of the next step.
static inline void touch_make_version(TouchPlan *p, int rank, const Action *x) {
    const P2p *r = &p->p2p[rank];
    const int s = x->storage;
    const int64_t version = x->step + 1;
    touch_complete(p, TOUCH_FREE, rank, s, x->step);
    touch_moments(p, s);
    if (r->waits) {
        touch_amounts(touch_add(p, TOUCH_READ, RES_STATS_OUT, 0, 0, touch_stats_name(x->step)),
                      p->program->ranks);
    } else {
        touch_add(p, TOUCH_WRITE, RES_SQUARES, x->step % 2, s, touch_name(RES_SQUARES, x->step, s));
    }
    touch_amounts(
        touch_add(p, TOUCH_READ, RES_NEWEST, s, touch_p2p(p, s)->owner == rank ? 0 : -1, 1),
        x->step);
    touch_amounts(touch_add(p, TOUCH_WRITE, RES_NEWEST, s, 0, 1), version);
    touch_add(p, TOUCH_WRITE, RES_PARAMETERS, s,
              touch_place(version, touch_p2p(p, s)->places[rank]), touch_version_name(s, version));
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
        if (touch_p2p(p, s)->owner != rank) { continue; }
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

#endif
