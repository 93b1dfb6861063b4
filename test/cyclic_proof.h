// cyclic_proof.h: proves a cyclic schedule. Windows of steps that overlap become one long
// program (cyclic_unroll). It is replayed with the two ends of each message as one event
// (schedule.h: the walk): a program that ends there cannot wait for ever. The rules of compute
// actions are in schedule/validator.h; the rules here are those of states that are sent from rank to
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
#ifndef CYCLIC_PROOF_H
#define CYCLIC_PROOF_H

#include "schedule/cyclic_windows.h" // schedules
#include "deferred_proof.h"          // orders in which ranks may run them

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

// Of a rank and storage.
typedef struct {
    int64_t newest, held; // newest version; version acquired, -1: none
    int slot;             // slot of borrowed parameters from which it is acquired
    Made coming;          // sum received
    Made summed[2];       // sums that stay, or are added from parts
} ProofStorage;
// Of a rank.
typedef struct {
    // use whose parameters are in each slot, counted through the steps; -1: none yet
    int64_t slot_use[BORROWED_SLOTS];
    int64_t *borrowed[BORROWED_SLOTS]; // [storages] version received in a slot; -1: none
    Made *made;                        // [buffers] gradients being made
    // [2 * units] unit and micro-batch whose input gradient is in the buffer, or -1
    int64_t *gradient;
    StatsMark stats_in, stats_out;
} ProofRank;
typedef struct {
    Validator v; // must be first: rules of compute actions take a Validator
    const CyclicPlan *plan;
    const GptModel *model;
    Pieces pieces;
    int64_t *places; // [units] buffers of activations
    bool *cut;       // [units] its gradient has a buffer of its own (activations.h: cut)
    P2p *p2p;        // [ranks]
    ProofRank *ranks;
    ProofStorage *storages; // [rank][storage]
    int64_t *used;          // [rank][unit][micro][2] versions that its forward used
    Made sent;              // what the current SEND sends, for its RECV
    StatsMark sent_stats;
} Proof;

static inline ProofRank *proof_rank(const Proof *p) { return &p->ranks[p->v.rank]; }
static inline const P2p *proof_p2p(const Proof *p) { return &p->p2p[p->v.rank]; }
static inline ProofStorage *proof_storage(const Proof *p, int storage) {
    return &p->storages[p->v.rank * p->v.program->map.storages + storage];
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
static inline bool proof_ends(const Proof *p, int piece) {
    return piece_is_last(&p->pieces, proof_piece(p, piece));
}
// the last piece of the previous micro-batch, given that of a micro-batch
static inline int proof_before(const Proof *p, int piece) {
    return piece - (p->pieces.in_turns ? 1 : p->pieces.pieces);
}
static inline int proof_end_of_step(const Proof *p, int64_t step) {
    return ((int)step + 1) * pieces_of_step(&p->pieces) - 1;
}
static inline bool proof_owns(const Proof *p, int storage) {
    return proof_p2p(p)->storage[storage].owner == p->v.rank;
}
static inline bool proof_borrows(const Proof *p, int storage) {
    return proof_p2p(p)->borrows && !proof_owns(p, storage);
}
// Returns the buffer in which a piece's gradient of a storage is made. If sums stay, or a
// micro-batch has several pieces, blocks share one buffer, unless their storages alternate, and wte
// has several. Gradients that are sent to their owners have one each, in a slot. proof_whole
// returns the buffer of the whole micro-batch's gradient. The owner's becomes the sum, and there are
// two of them if updates wait for the norm.
static inline Made *proof_whole_of_step(const Proof *p, int storage, int micro) {
    const P2p *r = proof_p2p(p);
    const bool second = proof_owns(p, storage) && proof_step(p, micro) % r->sums;
    const int places = r->heads + STORAGE_CLASSES + p->model->storages;
    return &proof_rank(p)->made[second            ? places + p->model->storages + storage
                                : r->joins_pieces ? r->heads + STORAGE_CLASSES + storage
                                                  : storage];
}
static inline Made *proof_made(const Proof *p, int storage, int micro) {
    const P2p *r = proof_p2p(p);
    if (!r->borrows && !r->stays && !r->joins_pieces) {
        return proof_whole_of_step(p, storage, micro);
    }
    const int heads = r->heads, own_place = heads + STORAGE_CLASSES + p->model->storages + storage,
              class_place = heads + (int)gpt_storage_class(p->model, storage);
    const int piece_place = share_alternates(p->model->share) ? own_place : class_place;
    return &proof_rank(p)->made[r->borrows ? storage : storage ? piece_place : micro % heads];
}
static inline Made *proof_whole(const Proof *p, int storage, int micro) {
    const P2p *r = proof_p2p(p);
    return !r->joins_pieces ? proof_made(p, storage, micro)
           : r->stays       ? &proof_rank(p)->made[r->heads + STORAGE_CLASSES + storage]
                            : proof_whole_of_step(p, storage, micro);
}
// Returns the sum that stays on its owner, or the sum of the parts that the owner has received.
static inline Made *proof_summed(const Proof *p, int storage, int64_t step) {
    return &proof_storage(p, storage)->summed[proof_p2p(p)->stays ? step % proof_p2p(p)->sums : 0];
}
static inline bool made_is(const Made *m, int storage, int micro, int first, int last) {
    return m->micro == micro && m->storage == storage && m->first == first && m->last == last;
}
// Returns whether a buffer has the sum of exactly the micro-batches before that of a piece: none
// (an empty buffer) before the first one.
static inline bool proof_sums_before(const Proof *p, const Made *m, const Action *a) {
    const int in = proof_in_step(p, a->micro);
    return in ? made_is(m, a->storage, proof_before(p, a->micro), 0, in - 1) : m->micro < 0;
}
static inline Made made_of(int storage, int micro, int first, int last) {
    const Made m = {.micro = micro, .storage = storage, .first = first, .last = last};
    return m;
}
static inline Made made_sum(int storage, int micro, int last) {
    Made m = made_of(storage, micro, 0, last);
    m.whole = true;
    return m;
}
static inline void made_free(Made *m) { m->micro = -1; }

// -------------------------------------------------------------------------------------------------
// Versions of parameters

// A version is about to be written.
static inline void prove_open(Proof *p, int storage, int64_t version) {
    ProofStorage *me = proof_storage(p, storage);
    const int places = proof_p2p(p)->storage[storage].places;
    refuse(&p->v, !places, "the rank keeps no version");
    refuse(&p->v, version != me->newest + 1, "version %" PRId64 " does not follow %" PRId64,
           version, me->newest);
    refuse(&p->v, me->held >= 0 && me->held <= version - places,
           "version %" PRId64 " in its place is in use", me->held);
    me->newest = version;
}
static inline bool proof_has(const Proof *p, int storage, int64_t version) {
    const int64_t newest = proof_storage(p, storage)->newest;
    return version >= 0 && version <= newest &&
           version > newest - proof_p2p(p)->storage[storage].places;
}
// Slots of borrowed parameters: the use of an action, and its slot.
static inline int64_t proof_use(const Proof *p, const Action *a) {
    return a->step * proof_p2p(p)->uses + a->use;
}
static inline int proof_slot(const Proof *p, const Action *a) {
    return p2p_slot(proof_p2p(p), a->use, a->step);
}
static inline void prove_borrowed(Proof *p, const Action *a) {
    ProofRank *r = proof_rank(p);
    const int slot = proof_slot(p, a);
    const int64_t use = proof_use(p, a);
    for (int s = 0; s < p->v.program->map.storages; s++) {
        const ProofStorage *other = proof_storage(p, s);
        refuse(&p->v, proof_borrows(p, s) && other->held >= 0 && other->slot == slot,
               "storage %d in its slot is in use", s);
        if (r->slot_use[slot] != use) { r->borrowed[slot][s] = -1; }
    }
    refuse(&p->v, r->slot_use[slot] > use, "its slot has the parameters of a later use");
    refuse(&p->v, r->borrowed[slot][a->storage] >= 0, "has come already");
    r->slot_use[slot] = use;
    r->borrowed[slot][a->storage] = a->version;
}
static inline void prove_acquire(Proof *p, const Action *a) {
    const ProofRank *r = proof_rank(p);
    ProofStorage *me = proof_storage(p, a->storage);
    refuse(&p->v, me->held >= 0, "is acquired already");
    if (proof_borrows(p, a->storage)) {
        me->slot = proof_slot(p, a);
        refuse(&p->v,
               r->slot_use[me->slot] != proof_use(p, a) ||
                   r->borrowed[me->slot][a->storage] != a->version,
               "version %" PRId64 " is not in its slot", a->version);
    } else {
        refuse(&p->v, !proof_has(p, a->storage, a->version),
               "version %" PRId64 " is not here: the newest is %" PRId64, a->version, me->newest);
    }
    me->held = a->version;
    storage_run(&p->v, a->storage)->acquired = true;
}
static inline void prove_release(Proof *p, const Action *a) {
    ProofStorage *me = proof_storage(p, a->storage);
    refuse(&p->v, me->held < 0, "is not acquired");
    me->held = -1;
    storage_run(&p->v, a->storage)->acquired = false;
}
static inline void prove_parameters(Proof *p, const Action *a) {
    if (action_sends(a->kind)) {
        refuse(&p->v, !proof_has(p, a->storage, a->version),
               "version %" PRId64 " is not here to be sent", a->version);
    } else if (proof_p2p(p)->borrows) {
        prove_borrowed(p, a);
    } else {
        prove_open(p, a->storage, a->version);
    }
}

// -------------------------------------------------------------------------------------------------
// Gradients and their sums

// A gradient on its way to its owner shares a slot with those of other stages.
static inline void prove_gradient_slot(Proof *p, int storage) {
    const P2p *r = proof_p2p(p);
    for (int s = 1; s < p->v.program->map.storages; s++) {
        refuse(&p->v,
               r->storage[s].stage != r->storage[storage].stage &&
                   r->storage[s].grad_slot == r->storage[storage].grad_slot &&
                   proof_rank(p)->made[s].micro >= 0,
               "its slot holds the gradient of storage %d", s);
    }
}
static inline void prove_contribution(Proof *p, const Action *a, int storage) {
    const int in = proof_in_step(p, a->micro);
    Made *m = proof_made(p, storage, a->micro);
    if (proof_p2p(p)->borrows && storage) { prove_gradient_slot(p, storage); }
    const bool mine = m->micro == a->micro && m->storage == storage && !m->whole;
    refuse(&p->v, m->micro >= 0 && !mine,
           "the place of storage %d's gradient holds storage %d's of micro-batch %d", storage,
           m->storage, m->micro);
    const bool part = mine && m->part;
    *m = made_of(storage, a->micro, in, in);
    m->part = part;
}
// A piece is added to those of its micro-batch.
static inline void prove_add_piece(Proof *p, const Action *a, Made *piece, Made *whole) {
    const int in = proof_in_step(p, a->micro),
              before = a->micro - (p->pieces.in_turns ? p->pieces.micros : 1);
    refuse(&p->v,
           piece_within(&p->pieces, proof_piece(p, a->micro))
               ? !made_is(whole, a->storage, before, in, in)
               : whole->micro >= 0,
           "the pieces before it are not here");
    *whole = *piece;
    made_free(piece);
}
// A piece's gradient is complete.
static inline void prove_piece(Proof *p, const Action *a) {
    const int in = proof_in_step(p, a->micro);
    Made *m = proof_made(p, a->storage, a->micro), *whole = proof_whole(p, a->storage, a->micro);
    const UnitRun *head = unit_run(&p->v, p->v.program->map.units - 1, a->micro);
    validate_reduce(&p->v, a);
    refuse(&p->v, !made_is(m, a->storage, a->micro, in, in) || m->whole,
           "its gradient is not here");
    const bool tied = p->v.map->classifier == 0;
    refuse(&p->v, tied && a->storage == 0 && !m->part && !(head->done & DONE_INPUT),
           "the head's part is missing");
    m->whole = true;
    if (whole != m) { prove_add_piece(p, a, m, whole); }
}
// With its last piece a micro-batch's gradient is complete. The sum of earlier micro-batches is
// added to it, on the storage's owner.
static inline void prove_join(Proof *p, const Action *a) {
    const int in = proof_in_step(p, a->micro);
    Made *m = proof_whole(p, a->storage, a->micro),
         *sum = proof_summed(p, a->storage, proof_step(p, a->micro));
    // not complete, or sent to its owner as it is
    if (!proof_ends(p, a->micro) || !proof_owns(p, a->storage)) { return; }
    refuse(&p->v, !proof_sums_before(p, sum, a), "the sum is not of those before it");
    if (proof_p2p(p)->stays) {
        *sum = made_sum(a->storage, a->micro, in);
        made_free(m);
        return;
    }
    m->first = 0;
    made_free(sum);
}
// A received part is added to a sum. Where sums stay, a received piece is added to those of its
// micro-batch, and with the last piece the micro-batch's gradient to the sum.
static inline void prove_add(Proof *p, const Action *a) {
    const P2p *r = proof_p2p(p);
    const int in = proof_in_step(p, a->micro);
    const bool joins_pieces = r->stays && r->joins_pieces, apart = r->stays || in < p->v.rank;
    Made *coming = &proof_storage(p, a->storage)->coming,
         *whole = proof_whole(p, a->storage, a->micro),
         *sum = apart ? proof_summed(p, a->storage, proof_step(p, a->micro)) : whole;
    refuse(&p->v, !made_is(coming, a->storage, a->micro, in, in), "the part is not here");
    if (joins_pieces) {
        prove_add_piece(p, a, coming, whole);
        if (!proof_ends(p, a->micro)) { return; }
    }
    refuse(&p->v, !proof_sums_before(p, sum, a) || (in && !sum->whole),
           "the sum is not of those before it");
    *sum = made_sum(a->storage, a->micro, in);
    made_free(joins_pieces ? whole : coming);
}
static inline void prove_sum(Proof *p, const Action *a) {
    const P2p *r = proof_p2p(p);
    Made *coming = &proof_storage(p, a->storage)->coming, *m = proof_whole(p, a->storage, a->micro);
    if (!action_sends(a->kind)) {
        refuse(&p->v, !r->storage[a->storage].comes, "there is no place for what comes");
        refuse(&p->v, coming->micro >= 0, "the sum that came before has not been added");
        *coming = p->sent;
        return;
    }
    refuse(&p->v,
           m->micro != a->micro || m->storage != a->storage || !m->whole ||
               (m->last == p->plan->N - 1 && proof_owns(p, a->storage)) ||
               (r->stays && !r->borrows),
           "has no such sum to send");
    p->sent = *m;
    made_free(m);
}
static inline void prove_part(Proof *p, const Action *a) {
    Made *m = proof_made(p, a->storage, a->micro);
    const int in = proof_in_step(p, a->micro);
    if (action_sends(a->kind)) {
        refuse(&p->v, m->micro != a->micro || m->storage != a->storage || m->whole,
               "has no such part to send");
        made_free(m);
        return;
    }
    refuse(&p->v, m->micro >= 0, "its place holds micro-batch %d's", m->micro);
    *m = made_of(a->storage, a->micro, in, in);
    m->part = true;
}
static inline void prove_update(Proof *p, const Action *a) {
    const P2p *r = proof_p2p(p);
    const StatsMark *norm = &proof_rank(p)->stats_out;
    const int micro = proof_end_of_step(p, a->step);
    Made *sum = r->stays ? proof_summed(p, a->storage, a->step) : proof_whole(p, a->storage, micro);
    refuse(&p->v, !proof_owns(p, a->storage), "is not the owner");
    refuse(&p->v, !made_is(sum, a->storage, micro, 0, p->plan->N - 1) || !sum->whole,
           "has not the sum of all");
    refuse(&p->v, r->waits && (norm->step != a->step || norm->count != p->v.program->ranks),
           "the norm is not known");
    prove_open(p, a->storage, a->step + 1);
    made_free(sum);
}

// -------------------------------------------------------------------------------------------------
// Statistics

// What a rank adds to a step's statistics must be complete: the losses of all that it computes, and
// the gradients that it owns, or their updates. There is room for those of two steps.
static inline void prove_own_stats(Proof *p, const Action *a) {
    const P2p *r = proof_p2p(p);
    const int head = p->v.program->map.units - 1, all = pieces_of_step(&p->pieces);
    for (int i = 0; i < all; i++) {
        const unsigned char done = unit_run(&p->v, head, (int)a->step * all + i)->done;
        refuse(&p->v, (done & DONE_FORWARD) && !(done & DONE_INPUT),
               "a loss of piece %d is not there", i);
        const int64_t after = (a->step + 2) * all + i;
        refuse(&p->v,
               after < p->v.program->micro_batches &&
                   (unit_run(&p->v, head, (int)after)->done & DONE_INPUT),
               "a loss of piece %d is written over", i);
    }
    for (int s = 0; s < p->v.program->map.storages; s++) {
        const Made *sum = r->stays ? proof_summed(p, s, a->step)
                                   : proof_whole(p, s, proof_end_of_step(p, a->step));
        const bool there = r->waits
                               ? made_is(sum, s, proof_end_of_step(p, a->step), 0, p->plan->N - 1)
                               : proof_storage(p, s)->newest > a->step;
        refuse(&p->v, proof_owns(p, s) && !there, "the gradient of storage %d is not whole", s);
        refuse(&p->v, proof_owns(p, s) && proof_storage(p, s)->newest > a->step + 2,
               "the square of storage %d is with those of a later step", s);
    }
}
static inline void prove_stats(Proof *p, const Action *a) {
    StatsMark *in = &proof_rank(p)->stats_in, *out = &proof_rank(p)->stats_out;
    const bool whole = a->version != 0, came = in->step == a->step;
    refuse(&p->v, whole && (!came || in->count != p->v.program->ranks),
           "has not heard of all ranks");
    refuse(&p->v, !whole && out->step >= a->step, "has added already");
    if (!whole) { prove_own_stats(p, a); }
    out->step = a->step;
    out->count = (came ? in->count : 0) + !whole;
    in->step = -1;
}
static inline void prove_send_stats(Proof *p, const Action *a) {
    StatsMark *in = &proof_rank(p)->stats_in, *out = &proof_rank(p)->stats_out;
    if (action_sends(a->kind)) {
        refuse(&p->v, out->step != a->step, "has no statistics of this step to send");
        p->sent_stats = *out;
        return;
    }
    refuse(&p->v, in->step >= 0, "what came before has not been heard");
    *in = p->sent_stats;
}

// -------------------------------------------------------------------------------------------------
// Compute actions

// Buffers of activations, and of gradients of boundaries. The activations of `unit`, which this
// action writes, must not be in use.
static inline void prove_place(Proof *p, const Action *a, int unit) {
    bool began = false;
    // earlier users of the buffer were checked when the latest one began
    for (int m = a->micro - (int)p->places[unit]; m >= 0 && !began; m -= (int)p->places[unit]) {
        began = unit_run(&p->v, a->unit, m)->done & DONE_FORWARD;
        refuse(&p->v, began && !(unit_run(&p->v, unit, m)->done & DONE_WEIGHT),
               "the place of unit %d's activations holds micro-batch %d", unit, m);
    }
}
static inline int64_t *proof_gradient(const Proof *p, int unit) {
    const bool own = p->plan->mode == CYCLIC_SINGLE && p->cut[unit];
    return &proof_rank(p)->gradient[own ? p->v.program->map.units + unit : unit % 2];
}
static inline void prove_compute(Proof *p, const Action *a) {
    const UnitMap *map = &p->v.program->map;
    const bool forward = a->kind == ACT_FORWARD,
               backward = a->kind == ACT_BACKWARD_INPUT || a->kind == ACT_BACKWARD_WEIGHT;
    const int next = a->unit + 1;
    const int64_t above = (int64_t)next * p->v.program->micro_batches + a->micro;
    const bool here =
        next < map->units &&
        cyclic_rank(p->plan, a->micro, cyclic_stage_of_unit(p->plan, next)) == p->v.rank;
    int64_t *used = &p->used[2 * (unit_run(&p->v, a->unit, a->micro) - p->v.units)];
    for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
        const int storage = map->of_unit[a->unit][k];
        const int64_t version = proof_storage(p, storage)->held;
        if (action_contributes(map, a, storage)) { prove_contribution(p, a, storage); }
        refuse(&p->v, !forward && action_reads_parameters(a->kind) && version != used[k],
               "version %" PRId64 " of storage %d, its forward had %" PRId64, version, storage,
               used[k]);
        if (forward) { used[k] = version; }
    }
    if (forward) { prove_place(p, a, a->unit); }
    if (forward && here) { prove_place(p, a, next); }
    refuse(&p->v, backward && here && *proof_gradient(p, next) != above,
           "the gradient of its output was written over");
    if (a->kind == ACT_BACKWARD_INPUT) {
        *proof_gradient(p, a->unit) = above - p->v.program->micro_batches;
    }
    validate_compute(&p->v, a);
}

static inline void proof_visit(void *context, int rank, const Action *a, int peer) {
    Proof *p = (Proof *)context;
    (void)peer;
    if (*p->v.error || !validator_begin(&p->v, rank, a)) { return; }
    switch (a->kind) {
    case ACT_SEND_FORWARD:
    case ACT_SEND_BACKWARD: validate_send(&p->v, a); break;
    case ACT_RECV_FORWARD:
    case ACT_RECV_BACKWARD: validate_receive(&p->v, a); break;
    case ACT_SEND_SUM:
    case ACT_RECV_SUM: prove_sum(p, a); break;
    case ACT_SEND_PARAMETERS:
    case ACT_RECV_PARAMETERS: prove_parameters(p, a); break;
    case ACT_SEND_PART:
    case ACT_RECV_PART: prove_part(p, a); break;
    case ACT_SEND_STATS:
    case ACT_RECV_STATS: prove_send_stats(p, a); break;
    case ACT_ACQUIRE: prove_acquire(p, a); break;
    case ACT_RELEASE: prove_release(p, a); break;
    case ACT_REDUCE:
        prove_piece(p, a);
        prove_join(p, a);
        break;
    case ACT_ADD: prove_add(p, a); break;
    case ACT_UPDATE: prove_update(p, a); break;
    case ACT_STATS: prove_stats(p, a); break;
    case ACT_PREFETCH:
    case ACT_NORM: refuse(&p->v, true, "is no part of these schedules"); break;
    default: prove_compute(p, a);
    }
}

// With deferred operations, REDUCE is in two parts: the piece's gradient is complete at once, and
// the sum of earlier micro-batches is added later. So are the other actions at once or later.
static inline void proof_visit_at_once(void *context, int rank, const Action *a, int peer) {
    Proof *p = (Proof *)context;
    if (a->kind == ACT_REDUCE) {
        validator_begin(&p->v, rank, a);
        prove_piece(p, a);
    } else if (!action_is(a->kind, ON_PARAMETERS | ON_SUM)) {
        proof_visit(context, rank, a, peer);
    }
}
static inline void proof_visit_late(void *context, int rank, const Action *a, int peer) {
    Proof *p = (Proof *)context;
    if (a->kind == ACT_REDUCE) {
        validator_begin(&p->v, rank, a);
        prove_join(p, a);
    } else {
        proof_visit(context, rank, a, peer);
    }
}

// -------------------------------------------------------------------------------------------------
// The proof

static inline void proof_end(Proof *p, int steps) {
    const Action none = action_make(ACT_STATS, -1, -1, -1);
    validate_end_of_work(&p->v);
    p->v.action = &none;
    for (p->v.rank = 0; p->v.rank < p->v.program->ranks; p->v.rank++) {
        for (int s = 0; s < p->v.program->map.storages; s++) {
            const ProofStorage *me = proof_storage(p, s);
            refuse(&p->v, proof_p2p(p)->storage[s].places && me->newest != steps,
                   "storage %d has version %" PRId64 " at the end", s, me->newest);
            refuse(&p->v, me->held >= 0, "storage %d is held at the end", s);
        }
        refuse(&p->v, proof_rank(p)->stats_out.step != steps - 1, "the last step was not reported");
    }
}
static inline void proof_start_rank(Proof *p, ProofRank *r, int rank) {
    const size_t storages = (size_t)p->model->storages, units = (size_t)p->model->units,
                 made = 3 * storages + STORAGE_CLASSES + (size_t)p->plan->N;
    p->p2p[rank] = cyclic_p2p(p->plan, p->model, rank);
    r->made = new_array(Made, made, "proof");
    for (size_t i = 0; i < made; i++) { made_free(&r->made[i]); }
    r->gradient = new_array(int64_t, 2 * units, "proof");
    r->borrowed[0] = new_array(int64_t, BORROWED_SLOTS * storages, "proof");
    memset(r->borrowed[0], 0xff, BORROWED_SLOTS * storages * sizeof(int64_t)); // -1
    for (int i = 0; i < BORROWED_SLOTS; i++) {
        r->borrowed[i] = r->borrowed[0] + i * p->model->storages;
        r->slot_use[i] = -1;
    }
    r->stats_in.step = r->stats_out.step = -1;
}
static inline void proof_start(Proof *p, const Program *program, const CyclicPlan *plan,
                               const GptModel *m) {
    const size_t ranks = (size_t)program->ranks, storages = ranks * (size_t)m->storages,
                 units = (size_t)m->units;
    memset(p, 0, sizeof *p);
    validator_start(&p->v, program);
    p->plan = plan;
    p->model = m;
    p->pieces = cyclic_pieces(plan);
    p->places = new_array(int64_t, units, "proof");
    p->cut = new_array(bool, units, "proof");
    cyclic_activations(plan, m->units, p->places, p->cut);
    p->p2p = new_array(P2p, ranks, "proof");
    p->ranks = new_array(ProofRank, ranks, "proof");
    for (int r = 0; r < program->ranks; r++) { proof_start_rank(p, &p->ranks[r], r); }
    p->storages = new_array(ProofStorage, storages, "proof");
    for (size_t i = 0; i < storages; i++) {
        ProofStorage *s = &p->storages[i];
        s->held = -1;
        s->coming.micro = s->summed[0].micro = s->summed[1].micro = -1;
    }
    p->used = new_array(int64_t, 2 * ranks * units * (size_t)program->micro_batches, "proof");
}
static inline void proof_stop(Proof *p) {
    for (int r = 0; r < p->v.program->ranks; r++) {
        p2p_free(&p->p2p[r], p->model->storages);
        free(p->ranks[r].made);
        free(p->ranks[r].gradient);
        free(p->ranks[r].borrowed[0]);
    }
    free(p->places);
    free(p->cut);
    free(p->p2p);
    free(p->ranks);
    free(p->storages);
    free(p->used);
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

// Proves windows one after another; also steps that drain, if the run will have any; also with
// deferred operations, in one random order. Describes the first violation in error.
static inline bool cyclic_prove_all(const Program *window, const CyclicPlan *plan,
                                    const GptModel *m, char *error, size_t error_bytes) {
    // enough steps for all different windows of up to 5 stages that take turns
    const int steps = cyclic_turns(plan) ? 4 + (int)min_i64(plan->N * plan->N, 12) : 4;
    const int orders = plan->mode == CYCLIC_DATA ? 2 : 1;
    for (int pause = steps; pause > 1; pause = pause > 2 ? 2 : 0) {
        if (pause < steps && !plan->pauses) { continue; }
        for (int late = 0; late < orders; late++) {
            if (!cyclic_prove_in_order(window, plan, m, steps, pause, late, 0, error,
                                       error_bytes)) {
                return false;
            }
        }
    }
    return true;
}

#endif
