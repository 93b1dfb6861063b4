// proof.h: proves a cyclic schedule before it runs. Windows of steps that overlap become one long
// program (cyclic_unroll). It is replayed with the two ends of each message as one event
// (schedule.h: the walk): a program that ends there cannot wait for ever. The rules of compute
// actions are in engine/validator.h; the rules here are those of states that are sent from rank to
// rank.
//
// Versions    A use acquires a version that is stored here, one of the newest `places`. Forward and
//             backward of a unit use the same version. The buffer of an acquired version is not
//             overwritten. Each version arrives once, in order, from a rank that has it. At the end
//             every rank that uses a storage has its last version.
// Borrowed    Parameters that are received for a use (mode zero) arrive once, of the version that
//             the rule requires, in a slot of which nothing is acquired, and are acquired for their
//             use alone.
// Sums        A piece's gradient is made in a free buffer, and added to those of exactly the
//             earlier pieces of its micro-batch. When the micro-batch's gradient is complete, it is
//             added to the sum of exactly the earlier micro-batches. A sum is sent once, by a rank
//             that has it, to a free buffer. An update has the sum of its whole step, and follows
//             what it must wait for.
// Activations Micro-batch m uses buffer m modulo their number in each unit. The buffer of a
//             boundary before a unit is in use from the forward that writes it on. Gradients of
//             boundaries are read before they are overwritten.
// Statistics  Each rank adds to the statistics once a step, when its losses and gradients are
//             complete. What waits for the norm follows the sum over all ranks.
// Deferred    Where ranks defer store operations, the same rules are proved in other orders too.
//             deferred.h argues why no order makes all ranks wait.
#ifndef PROOF_H
#define PROOF_H

#include "cyclic.h"           // schedules of windows
#include "engine/deferred_proof.h" // orders in which ranks may run them
#include "engine/validator.h" // rules of compute actions

typedef struct {
    // owner of the buffer's gradient: the last piece in it, counted through the steps; -1: the
    // buffer is free
    int micro;
    int storage;     // storage of the gradient
    int first, last; // the gradient is the sum of these micro-batches of its step, in order
    bool whole;      // REDUCE has run: the gradient of its piece, or its micro-batch, is complete
    bool part;       // the head's part of wte's gradient has been received
} Made;
typedef struct {
    int64_t step; // -1: none yet
    int count;    // ranks that have added to the statistics
} StatsMark;

typedef struct {
    Validator v; // must be first: rules of compute actions take a Validator
    const CyclicPlan *plan;
    const GptModel *model;
    P2p *p2p; // [ranks]
    Pieces pieces;
    int64_t *places;        // [units] buffers of activations
    bool *cut;              // [units] its gradient has a buffer of its own (activations.h: cut)
    int64_t *newest, *held; // [rank][storage] newest version; version acquired, -1: none
    int64_t *borrowed;      // [rank][slot][storage] version received; -1: none
    // [rank][slot] use whose parameters are in the slot, counted through the steps; -1: none yet
    int64_t *slot_use;
    int *slot_of; // [rank][storage] slot from which it is acquired
    // [rank][buffer] gradients being made; [rank][storage] sums received; [rank][storage][2] sums
    // that stay, or are added from parts
    Made *made, *coming, *summed;
    int makings;   // number of a rank's buffers in `made`
    int64_t *used; // [rank][unit][micro][2] versions that its forward used
    // [rank][2 * units] unit and micro-batch whose input gradient is in the buffer, or -1
    int64_t *gradient;
    StatsMark *stats_in, *stats_out; // [rank]
    Made sent;                       // what the current SEND sends, for its RECV
    StatsMark sent_stats;
} Proof;

static inline int proof_at(const Proof *p, int rank, int storage) {
    return rank * p->v.program->map.storages + storage;
}
static inline int proof_step(const Proof *p, int piece) {
    return piece / pieces_of_step(&p->pieces);
}
// number of a piece within its step
static inline int proof_piece(const Proof *p, int piece) {
    return piece % pieces_of_step(&p->pieces);
}
// micro-batch of a piece within its step
static inline int proof_in_step(const Proof *p, int piece) {
    return piece_micro(&p->pieces, proof_piece(p, piece));
}
// the last piece of the previous micro-batch, given that of a micro-batch
static inline int proof_before(const Proof *p, int piece) {
    return piece - (p->pieces.in_turns ? 1 : p->pieces.pieces);
}
static inline int proof_end_of_step(const Proof *p, int step) {
    return (step + 1) * pieces_of_step(&p->pieces) - 1;
}
static inline SumWay proof_way(const Proof *p, int storage) {
    return p->plan->way ? p->plan->way[storage] : SUM_CHAIN;
}
static inline bool proof_borrows(const Proof *p, int rank, int storage) {
    return p->p2p[rank].borrows && p->p2p[rank].owner[storage] != rank;
}
// Returns the buffer in which a piece's gradient of a storage is made. If sums stay, or a
// micro-batch has several pieces, blocks share one buffer, unless their storages alternate, and wte
// has several. Gradients that are sent to their owners have one each, in a slot. proof_whole
// returns the buffer of the whole micro-batch's gradient.
static inline Made *proof_made(const Proof *p, int rank, int storage, int micro) {
    const P2p *r = &p->p2p[rank];
    const int heads = r->heads, own_place = heads + STORAGE_CLASSES + p->model->storages + storage,
              class_place = heads + (int)gpt_storage_class(p->model, storage);
    const int piece_place = share_alternates(p->model->share) ? own_place : class_place;
    const int place = r->borrows || (!r->stays && !r->joins_pieces) ? storage
                      : storage                                     ? piece_place
                                                                    : micro % heads;
    return &p->made[rank * p->makings + place];
}
static inline Made *proof_whole(const Proof *p, int rank, int storage, int micro) {
    if (!p->p2p[rank].joins_pieces) { return proof_made(p, rank, storage, micro); }
    return &p->made[rank * p->makings + p->p2p[rank].heads + STORAGE_CLASSES + storage];
}
// Returns the sum that stays on its owner, or the sum of the parts that the owner has received.
static inline Made *proof_summed(const Proof *p, int rank, int storage, int64_t step) {
    return &p->summed[2 * proof_at(p, rank, storage) + step % p->p2p[rank].sums];
}
static inline bool made_is(const Made *m, int storage, int micro, int first, int last) {
    return m->micro == micro && m->storage == storage && m->first == first && m->last == last;
}
static inline Made made_sum(int storage, int micro, int first, int last) {
    const Made m = {micro, storage, first, last, true, false};
    return m;
}
static inline void made_free(Made *m) { m->micro = -1; }

// -------------------------------------------------------------------------------------------------
// Rules

// A version is about to be written.
static inline void prove_open(Proof *p, int rank, const Action *a, int64_t version) {
    const int at = proof_at(p, rank, a->storage), places = p->p2p[rank].places[a->storage];
    if (!places) { validator_fail(&p->v, rank, a, "the rank keeps no version"); }
    if (version != p->newest[at] + 1) {
        validator_fail(&p->v, rank, a, "version %" PRId64 " does not follow %" PRId64, version,
                       p->newest[at]);
    }
    if (p->held[at] >= 0 && p->held[at] <= version - places) {
        validator_fail(&p->v, rank, a, "version %" PRId64 " in its place is in use", p->held[at]);
    }
    p->newest[at] = version;
}
static inline bool proof_has(const Proof *p, int rank, int storage, int64_t version) {
    const int64_t newest = p->newest[proof_at(p, rank, storage)];
    return version >= 0 && version <= newest && version > newest - p->p2p[rank].places[storage];
}
// Slots of borrowed parameters: the use of an action, its slot, and what the slot has of a storage.
static inline int64_t proof_use(const Proof *p, int rank, const Action *a) {
    return a->step * p->p2p[rank].uses + a->use;
}
static inline int proof_slot(const Proof *p, int rank, const Action *a) {
    return rank * BORROWED_SLOTS + p2p_slot(&p->p2p[rank], a->use, a->step);
}
static inline int64_t *proof_came(const Proof *p, int slot, int storage) {
    return &p->borrowed[(int64_t)slot * p->v.program->map.storages + storage];
}
static inline void prove_borrowed(Proof *p, int rank, const Action *a) {
    const int slot = proof_slot(p, rank, a);
    const int64_t use = proof_use(p, rank, a);
    for (int s = 0; s < p->v.program->map.storages; s++) {
        const int at = proof_at(p, rank, s);
        if (proof_borrows(p, rank, s) && p->held[at] >= 0 && p->slot_of[at] == slot) {
            validator_fail(&p->v, rank, a, "storage %d in its slot is in use", s);
        }
        if (p->slot_use[slot] != use) { *proof_came(p, slot, s) = -1; }
    }
    if (p->slot_use[slot] > use) {
        validator_fail(&p->v, rank, a, "its slot has the parameters of a later use");
    }
    if (*proof_came(p, slot, a->storage) >= 0) {
        validator_fail(&p->v, rank, a, "has come already");
    }
    p->slot_use[slot] = use;
    *proof_came(p, slot, a->storage) = a->version;
}
static inline bool proof_has_borrowed(const Proof *p, int rank, const Action *a) {
    const int slot = proof_slot(p, rank, a);
    return p->slot_use[slot] == proof_use(p, rank, a) &&
           *proof_came(p, slot, a->storage) == a->version;
}
static inline void prove_acquire(Proof *p, int rank, const Action *a) {
    const int at = proof_at(p, rank, a->storage);
    const bool borrowed = proof_borrows(p, rank, a->storage);
    if (p->held[at] >= 0) { validator_fail(&p->v, rank, a, "is acquired already"); }
    if (borrowed && !proof_has_borrowed(p, rank, a)) {
        validator_fail(&p->v, rank, a, "version %" PRId64 " is not in its slot", a->version);
    }
    if (borrowed) { p->slot_of[at] = proof_slot(p, rank, a); }
    if (!borrowed && !proof_has(p, rank, a->storage, a->version)) {
        validator_fail(&p->v, rank, a, "version %" PRId64 " is not here: the newest is %" PRId64,
                       a->version, p->newest[at]);
    }
    p->held[at] = a->version;
    p->v.acquired[at] = 1;
}
static inline void prove_release(Proof *p, int rank, const Action *a) {
    const int at = proof_at(p, rank, a->storage);
    if (p->held[at] < 0) { validator_fail(&p->v, rank, a, "is not acquired"); }
    p->held[at] = -1;
    p->v.acquired[at] = 0;
}
static inline void prove_parameters(Proof *p, int rank, const Action *a, bool sends) {
    if (sends && !proof_has(p, rank, a->storage, a->version)) {
        validator_fail(&p->v, rank, a, "version %" PRId64 " is not here to be sent", a->version);
    }
    if (!sends && p->p2p[rank].borrows) {
        prove_borrowed(p, rank, a);
    } else if (!sends) {
        prove_open(p, rank, a, a->version);
    }
}
// Gradients on their way to owners: stages share slots.
static inline void prove_gradient_slot(Proof *p, int rank, const Action *a, int storage) {
    const P2p *r = &p->p2p[rank];
    for (int s = 1; s < p->v.program->map.storages; s++) {
        const bool other =
            r->stage[s] != r->stage[storage] && r->grad_slot[s] == r->grad_slot[storage];
        if (other && p->made[rank * p->makings + s].micro >= 0) {
            validator_fail(&p->v, rank, a, "its slot holds the gradient of storage %d", s);
        }
    }
}

static inline void prove_contribution(Proof *p, int rank, const Action *a, int storage) {
    Made *m = proof_made(p, rank, storage, a->micro);
    if (p->p2p[rank].borrows && storage) { prove_gradient_slot(p, rank, a, storage); }
    const bool mine = m->micro == a->micro && m->storage == storage && !m->whole;
    if (m->micro >= 0 && !mine) {
        validator_fail(&p->v, rank, a,
                       "the place of storage %d's gradient holds storage %d's of micro-batch %d",
                       storage, m->storage, m->micro);
    }
    const Made begun = {
        a->micro, storage,        proof_in_step(p, a->micro), proof_in_step(p, a->micro),
        false,    mine && m->part};
    *m = begun;
}
// A piece is added to those of its micro-batch.
static inline void prove_add_piece(Proof *p, int rank, const Action *a, Made *piece, Made *whole) {
    const int in = proof_in_step(p, a->micro),
              within = piece_within(&p->pieces, proof_piece(p, a->micro));
    const int before = a->micro - (p->pieces.in_turns ? p->pieces.micros : 1);
    if (within ? !made_is(whole, a->storage, before, in, in) : whole->micro >= 0) {
        validator_fail(&p->v, rank, a, "the pieces before it are not here");
    }
    *whole = *piece;
    made_free(piece);
}
// A piece's gradient is complete.
static inline void prove_piece(Proof *p, int rank, const Action *a) {
    const int in = proof_in_step(p, a->micro), head = p->v.program->map.units - 1;
    Made *m = proof_made(p, rank, a->storage, a->micro),
         *whole = proof_whole(p, rank, a->storage, a->micro);
    const bool missing =
        a->storage == 0 && !m->part && !(*validator_done(&p->v, rank, head, a->micro) & DONE_INPUT);
    validate_reduce(&p->v, rank, a);
    if (!made_is(m, a->storage, a->micro, in, in) || m->whole) {
        validator_fail(&p->v, rank, a, "its gradient is not here");
    }
    if (missing) { validator_fail(&p->v, rank, a, "the head's part is missing"); }
    m->whole = true;
    if (whole != m) { prove_add_piece(p, rank, a, m, whole); }
}
// With its last piece a micro-batch's gradient is complete. The sum of earlier micro-batches is
// added to it, on the rank that adds this storage.
static inline void prove_join(Proof *p, int rank, const Action *a) {
    const P2p *r = &p->p2p[rank];
    const int in = proof_in_step(p, a->micro), step = proof_step(p, a->micro);
    Made *m = proof_whole(p, rank, a->storage, a->micro),
         *coming = &p->coming[proof_at(p, rank, a->storage)],
         *sum = proof_summed(p, rank, a->storage, step);
    // not complete, or sent to its owner as it is
    if (!piece_is_last(&p->pieces, proof_piece(p, a->micro)) ||
        proof_borrows(p, rank, a->storage)) {
        return;
    }
    if (r->stays) {
        if (in ? !made_is(sum, a->storage, proof_before(p, a->micro), 0, in - 1)
               : sum->micro >= 0) {
            validator_fail(&p->v, rank, a, "the sum is not of those before it");
        }
        *sum = made_sum(a->storage, a->micro, 0, in);
        made_free(m);
        return;
    }
    const SumWay way = proof_way(p, a->storage);
    if (way == SUM_CHAIN ? in == 0 : r->owner[a->storage] != rank) { return; }
    Made *before = way == SUM_OWNER ? sum : coming;
    if (!made_is(before, a->storage, proof_before(p, a->micro), 0, in - 1)) {
        validator_fail(&p->v, rank, a, "the sum that came is not of those before it");
    }
    m->first = 0;
    made_free(before);
}
// A received part is added to a sum. Where sums stay, a received piece is added to those of its
// micro-batch, and with the last piece the micro-batch's gradient to the sum.
static inline void prove_add(Proof *p, int rank, const Action *a) {
    const int in = proof_in_step(p, a->micro);
    const bool owner = p->p2p[rank].borrows || proof_way(p, a->storage) == SUM_OWNER,
               joins_pieces = p->p2p[rank].stays && p->p2p[rank].joins_pieces;
    Made *coming = &p->coming[proof_at(p, rank, a->storage)],
         *whole = proof_whole(p, rank, a->storage, a->micro);
    Made *sum = owner ? proof_summed(p, rank, a->storage, proof_step(p, a->micro)) : whole;
    if (!made_is(coming, a->storage, a->micro, in, in)) {
        validator_fail(&p->v, rank, a, "the part is not here");
    }
    if (joins_pieces) { prove_add_piece(p, rank, a, coming, whole); }
    if (joins_pieces && !piece_is_last(&p->pieces, proof_piece(p, a->micro))) { return; }
    if (in ? !made_is(sum, a->storage, proof_before(p, a->micro), 0, in - 1) || !sum->whole
           : sum->micro >= 0) {
        validator_fail(&p->v, rank, a, "the sum is not of those before it");
    }
    *sum = made_sum(a->storage, a->micro, 0, in);
    made_free(joins_pieces ? whole : coming);
}
static inline void prove_sum(Proof *p, int rank, const Action *a, bool sends) {
    Made *m = sends ? proof_whole(p, rank, a->storage, a->micro)
                    : &p->coming[proof_at(p, rank, a->storage)];
    if (sends) {
        const P2p *r = &p->p2p[rank];
        const bool good = m->micro == a->micro && m->storage == a->storage && m->whole &&
                          (m->last < p->plan->N - 1 || r->owner[a->storage] != rank);
        if (!good || (r->stays && !r->borrows)) {
            validator_fail(&p->v, rank, a, "has no such sum to send");
        }
        p->sent = *m;
        made_free(m);
        return;
    }
    if (!p->p2p[rank].comes[a->storage]) {
        validator_fail(&p->v, rank, a, "there is no place for what comes");
    }
    if (m->micro >= 0) {
        validator_fail(&p->v, rank, a, "the sum that came before has not been added");
    }
    *m = p->sent;
}
static inline void prove_part(Proof *p, int rank, const Action *a, bool sends) {
    Made *m = proof_made(p, rank, a->storage, a->micro);
    const int in = proof_in_step(p, a->micro);
    if (sends) {
        if (m->micro != a->micro || m->storage != a->storage || m->whole) {
            validator_fail(&p->v, rank, a, "has no such part to send");
        }
        made_free(m);
        return;
    }
    if (m->micro >= 0) {
        validator_fail(&p->v, rank, a, "its place holds micro-batch %d's", m->micro);
    }
    const Made came = {a->micro, a->storage, in, in, false, true};
    *m = came;
}
static inline void prove_update(Proof *p, int rank, const Action *a) {
    const P2p *r = &p->p2p[rank];
    const int last = p->plan->N - 1, micro = proof_end_of_step(p, (int)a->step);
    Made *sum = r->stays ? proof_summed(p, rank, a->storage, a->step)
                         : proof_whole(p, rank, a->storage, micro);
    if (r->owner[a->storage] != rank) { validator_fail(&p->v, rank, a, "is not the owner"); }
    if (!made_is(sum, a->storage, micro, 0, last) || !sum->whole) {
        validator_fail(&p->v, rank, a, "has not the sum of all");
    }
    if (r->waits &&
        (p->stats_out[rank].step != a->step || p->stats_out[rank].count != p->v.program->ranks)) {
        validator_fail(&p->v, rank, a, "the norm is not known");
    }
    prove_open(p, rank, a, a->step + 1);
    made_free(sum);
}

// What a rank adds to a step's statistics must be complete: the losses of all that it computes, and
// the gradients that it owns, or their updates.
static inline void prove_stats(Proof *p, int rank, const Action *a) {
    const int N = p->plan->N, head = p->v.program->map.units - 1;
    StatsMark *stats_in = &p->stats_in[rank], *stats_out = &p->stats_out[rank];
    const bool whole = a->version != 0, came = stats_in->step == a->step;
    if (whole && (!came || stats_in->count != p->v.program->ranks)) {
        validator_fail(&p->v, rank, a, "has not heard of all ranks");
    }
    if (!whole && stats_out->step >= a->step) {
        validator_fail(&p->v, rank, a, "has added already");
    }
    for (int i = 0; i < pieces_of_step(&p->pieces) && !whole; i++) {
        const unsigned char done =
            *validator_done(&p->v, rank, head, (int)a->step * pieces_of_step(&p->pieces) + i);
        if ((done & DONE_FORWARD) && !(done & DONE_INPUT)) {
            validator_fail(&p->v, rank, a, "a loss of piece %d is not there", i);
        }
    }
    for (int s = 0; s < p->v.program->map.storages && !whole; s++) {
        const P2p *r = &p->p2p[rank];
        const Made *sum = r->stays ? proof_summed(p, rank, s, a->step) : proof_whole(p, rank, s, 0);
        const bool there = r->waits ? made_is(sum, s, proof_end_of_step(p, (int)a->step), 0, N - 1)
                                    : p->newest[proof_at(p, rank, s)] > a->step;
        if (r->owner[s] == rank && !there) {
            validator_fail(&p->v, rank, a, "the gradient of storage %d is not whole", s);
        }
    }
    stats_out->step = a->step;
    stats_out->count = (came ? stats_in->count : 0) + !whole;
    stats_in->step = -1;
}
static inline void prove_send_stats(Proof *p, int rank, const Action *a, bool sends) {
    if (sends && p->stats_out[rank].step != a->step) {
        validator_fail(&p->v, rank, a, "has no statistics of this step to send");
    }
    if (sends) { p->sent_stats = p->stats_out[rank]; }
    if (!sends && p->stats_in[rank].step >= 0) {
        validator_fail(&p->v, rank, a, "what came before has not been heard");
    }
    if (!sends) { p->stats_in[rank] = p->sent_stats; }
}

// Buffers of activations, and of gradients of boundaries. The activations of `unit`, which this
// action writes, must not be in use.
static inline void prove_place(Proof *p, int rank, const Action *a, int unit) {
    bool began = false;
    // earlier users of the buffer were checked when the latest one began
    for (int m = a->micro - (int)p->places[unit]; m >= 0 && !began; m -= (int)p->places[unit]) {
        began = *validator_done(&p->v, rank, a->unit, m) & DONE_FORWARD;
        const bool ended = *validator_done(&p->v, rank, unit, m) & DONE_WEIGHT;
        if (began && !ended) {
            validator_fail(&p->v, rank, a,
                           "the place of unit %d's activations holds micro-batch %d", unit, m);
        }
    }
}
static inline int64_t *proof_gradient(const Proof *p, int rank, int unit) {
    const int units = p->v.program->map.units;
    return &p->gradient[rank * 2 * units +
                        (p->plan->mode == CYCLIC_SINGLE && p->cut[unit] ? units + unit : unit % 2)];
}
static inline bool proof_here(const Proof *p, int rank, int unit, int micro) {
    return cyclic_rank(p->plan, micro, cyclic_stage_of_unit(p->plan, unit)) == rank;
}
static inline void prove_compute(Proof *p, int rank, const Action *a) {
    const UnitMap *map = &p->v.program->map;
    const bool forward = a->kind == ACT_FORWARD,
               backward = a->kind == ACT_BACKWARD_INPUT || a->kind == ACT_BACKWARD_WEIGHT;
    const int64_t above = (int64_t)(a->unit + 1) * p->v.program->micro_batches + a->micro;
    int64_t *used = &p->used[2 * validator_index(&p->v, rank, a->unit, a->micro)];
    for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
        const int storage = map->of_unit[a->unit][k];
        const int64_t version = p->held[proof_at(p, rank, storage)];
        if (action_contributes(map, a, storage)) { prove_contribution(p, rank, a, storage); }
        if (!forward && action_reads_parameters(a->kind) && version != used[k]) {
            validator_fail(&p->v, rank, a,
                           "version %" PRId64 " of storage %d, its forward had %" PRId64, version,
                           storage, used[k]);
        }
        if (forward) { used[k] = version; }
    }
    if (forward) { prove_place(p, rank, a, a->unit); }
    if (forward && a->unit + 1 < map->units && proof_here(p, rank, a->unit + 1, a->micro)) {
        prove_place(p, rank, a, a->unit + 1);
    }
    if (backward && a->unit + 1 < map->units && proof_here(p, rank, a->unit + 1, a->micro) &&
        *proof_gradient(p, rank, a->unit + 1) != above) {
        validator_fail(&p->v, rank, a, "the gradient of its output was written over");
    }
    if (a->kind == ACT_BACKWARD_INPUT) {
        *proof_gradient(p, rank, a->unit) = above - p->v.program->micro_batches;
    }
    validate_compute(&p->v, rank, a);
}

static inline void proof_visit(void *context, int rank, const Action *a, int peer) {
    Proof *p = (Proof *)context;
    (void)peer;
    if (*p->v.error || !validate_ranges(&p->v, rank, a)) { return; }
    switch (a->kind) {
    case ACT_SEND_FORWARD:
    case ACT_SEND_BACKWARD: validate_send(&p->v, rank, a); break;
    case ACT_RECV_FORWARD:
    case ACT_RECV_BACKWARD: validate_receive(&p->v, rank, a); break;
    case ACT_SEND_SUM:
    case ACT_RECV_SUM: prove_sum(p, rank, a, action_sends(a->kind)); break;
    case ACT_SEND_PARAMETERS:
    case ACT_RECV_PARAMETERS: prove_parameters(p, rank, a, action_sends(a->kind)); break;
    case ACT_SEND_PART:
    case ACT_RECV_PART: prove_part(p, rank, a, action_sends(a->kind)); break;
    case ACT_SEND_STATS:
    case ACT_RECV_STATS: prove_send_stats(p, rank, a, action_sends(a->kind)); break;
    case ACT_ACQUIRE: prove_acquire(p, rank, a); break;
    case ACT_RELEASE: prove_release(p, rank, a); break;
    case ACT_REDUCE: prove_piece(p, rank, a), prove_join(p, rank, a); break;
    case ACT_ADD: prove_add(p, rank, a); break;
    case ACT_UPDATE: prove_update(p, rank, a); break;
    case ACT_STATS: prove_stats(p, rank, a); break;
    case ACT_PREFETCH:
    case ACT_NORM: validator_fail(&p->v, rank, a, "is no part of these schedules"); break;
    default: prove_compute(p, rank, a);
    }
}

// With deferred operations, REDUCE is in two parts: the piece's gradient is complete at once, and
// the sum of earlier micro-batches is added later. So are the other actions at once or later.
static inline void proof_visit_at_once(void *context, int rank, const Action *a, int peer) {
    if (a->kind == ACT_REDUCE) {
        prove_piece((Proof *)context, rank, a);
    } else if (!action_is(a->kind, ON_PARAMETERS | ON_SUM)) {
        proof_visit(context, rank, a, peer);
    }
}
static inline void proof_visit_late(void *context, int rank, const Action *a, int peer) {
    if (a->kind == ACT_REDUCE) {
        prove_join((Proof *)context, rank, a);
    } else {
        proof_visit(context, rank, a, peer);
    }
}

// -------------------------------------------------------------------------------------------------
// The proof

static inline void proof_end(Proof *p, int steps) {
    const Action none = action_make(ACT_STATS, -1, -1, -1);
    validate_end_of_work(&p->v);
    for (int r = 0; r < p->v.program->ranks; r++) {
        for (int s = 0; s < p->v.program->map.storages; s++) {
            const int at = proof_at(p, r, s);
            if (p->p2p[r].places[s] && p->newest[at] != steps) {
                validator_fail(&p->v, r, &none, "storage %d has version %" PRId64 " at the end", s,
                               p->newest[at]);
            }
            if (p->held[at] >= 0) {
                validator_fail(&p->v, r, &none, "storage %d is held at the end", s);
            }
        }
        if (p->stats_out[r].step != steps - 1) {
            validator_fail(&p->v, r, &none, "the last step was not reported");
        }
    }
}
static inline void proof_start(Proof *p, const Program *program, const CyclicPlan *plan,
                               const GptModel *m) {
    const size_t ranks = (size_t)program->ranks, storages = (size_t)m->storages,
                 units = (size_t)m->units;
    memset(p, 0, sizeof *p);
    validator_start(&p->v, program);
    p->plan = plan;
    p->model = m;
    p->pieces = cyclic_pieces(plan);
    p->p2p = (P2p *)checked_calloc(ranks, sizeof(P2p), "proof");
    p->places = (int64_t *)checked_calloc(units, sizeof(int64_t), "proof");
    p->cut = (bool *)checked_calloc(units, sizeof(bool), "proof");
    cyclic_activations(plan, m->units, p->places, p->cut);
    p->makings = 2 * m->storages + STORAGE_CLASSES + plan->N;
    const size_t made = ranks * (size_t)p->makings, at = ranks * storages;
    p->made = (Made *)checked_calloc(made + 3 * at, sizeof(Made), "proof");
    p->coming = p->made + made;
    p->summed = p->coming + at;
    p->newest = (int64_t *)checked_calloc(2 * at, sizeof(int64_t), "proof");
    p->held = p->newest + at;
    p->used = (int64_t *)checked_calloc(2 * ranks * units * (size_t)program->micro_batches,
                                        sizeof(int64_t), "proof");
    p->gradient = (int64_t *)checked_calloc(2 * ranks * units, sizeof(int64_t), "proof");
    const size_t slots = ranks * BORROWED_SLOTS;
    p->borrowed = (int64_t *)checked_malloc(slots * storages * sizeof(int64_t), "proof");
    p->slot_use = (int64_t *)checked_malloc(slots * sizeof(int64_t), "proof");
    p->slot_of = (int *)checked_calloc(at, sizeof(int), "proof");
    for (size_t i = 0; i < slots * storages; i++) { p->borrowed[i] = -1; }
    for (size_t i = 0; i < slots; i++) { p->slot_use[i] = -1; }
    p->stats_in = (StatsMark *)checked_calloc(2 * ranks, sizeof(StatsMark), "proof");
    p->stats_out = p->stats_in + ranks;
    for (size_t i = 0; i < made + 3 * at; i++) { p->made[i].micro = -1; }
    for (size_t i = 0; i < at; i++) { p->held[i] = -1; }
    for (size_t i = 0; i < 2 * ranks; i++) { p->stats_in[i].step = -1; }
    for (int r = 0; r < program->ranks; r++) {
        p->p2p[r] = cyclic_p2p(plan, m, r);
        const int stage = plan->mode == CYCLIC_MODEL ? cyclic_stage_of_rank(plan, r) : 0;
        program->limits[r] =
            plan->mode == CYCLIC_MODEL ? cyclic_limits(plan, stage) : limits_of_one();
        program->limits[r].in_flight = cyclic_live(plan, stage);
    }
}
static inline void proof_stop(Proof *p) {
    for (int r = 0; r < p->v.program->ranks; r++) { p2p_free(&p->p2p[r], p->model->storages); }
    free(p->p2p);
    free(p->places);
    free(p->cut);
    free(p->made);
    free(p->newest);
    free(p->used);
    free(p->gradient);
    free(p->stats_in);
    free(p->borrowed);
    free(p->slot_use);
    free(p->slot_of);
    validator_stop(&p->v);
}

// Proves `steps` steps of windows (schedule_cyclic; `window` is step 0's), of which every pause-th
// drains: in the order of the lists, or, if `late`, in an order drawn from `seed`, of ranks that
// defer store operations. Returns false on a violation, and describes the first one in error.
static inline bool cyclic_prove_in_order(const Program *window, const CyclicPlan *plan,
                                         const GptModel *m, int steps, int pause, bool late,
                                         uint64_t seed, char *error, size_t error_bytes) {
    Program program = cyclic_unroll(window, plan, steps, pause);
    Proof p;
    proof_start(&p, &program, plan, m);
    *error = 0;
    p.v.error = error;
    p.v.error_bytes = error_bytes;
    if (late) {
        deferred_walk(&p.v, p.p2p, pause, seed, proof_visit_at_once, proof_visit_late, &p);
    } else {
        validator_walk(&p.v, proof_visit, &p);
    }
    if (!*error) { proof_end(&p, steps); }
    proof_stop(&p);
    cyclic_window_free(&program);
    return !*error;
}
static inline bool cyclic_prove(const Program *window, const CyclicPlan *plan, const GptModel *m,
                                int steps, int pause, char *error, size_t error_bytes) {
    return cyclic_prove_in_order(window, plan, m, steps, pause, false, 0, error, error_bytes);
}

// Proves a program before it runs: windows one after another; also steps that drain, if the run
// will have any; also with deferred operations, in one random order. Ends the program on a
// violation.
static inline void cyclic_check(const Program *window, const CyclicPlan *plan, const GptModel *m) {
    char error[400];
    // enough steps for all different windows of up to 5 stages that take turns
    const int steps = cyclic_turns(plan) ? 4 + (int)min_i64(plan->N * plan->N, 12) : 4;
    const int orders = plan->mode == CYCLIC_DATA ? 2 : 1;
    for (int pause = steps; pause > 1; pause = pause > 2 ? 2 : 0) {
        if (pause < steps && !plan->pauses) { continue; }
        for (int late = 0; late < orders; late++) {
            if (!cyclic_prove_in_order(window, plan, m, steps, pause, late, 0, error,
                                       sizeof error)) {
                schedule_refuse(error);
            }
        }
    }
}

#endif
