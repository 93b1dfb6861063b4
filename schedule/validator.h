// validator.h: proves a program before it runs. It plays the program (walk.h), and
// checks what each action finds and leaves behind.
//
// Steps that overlap are proved by touch_check.h.
//
// schedule_validate proves that, on every rank:
//   messages    every SEND meets its RECV with the same unit, micro-batch and rows, and nothing
//               deadlocks even if messages are rendezvous. A SEND sends rows that are computed.
//               Each row is received once, before its use.
//   passes      a unit's forward follows its complete input (several messages may bring it). Its
//               backward input follows its forward and the next unit's backward input. Its backward
//               weight follows its backward input. Each unit computes each sample of the step once.
//   clipping    weight parts follow their micro-batch's CLIP, where there is one. CLIP follows all
//               backward inputs of the rank, and the NORM messages of other stages that have a part
//               in it. What is scaled on another stage follows all its FACTOR messages, which
//               follow CLIP.
//   parameters  are acquired while they are used. Where they are gathered (UnitMap: gathers), a
//               PREFETCH is under way by then, into a slot that nothing uses. Also in a pass that
//               does not train, which has forwards alone.
//   gradients   REDUCE(storage) follows all contributions of the step, or of its micro-batch. Until
//               then no other storage writes into the slot. Storages of a bucket are reduced one
//               directly after another.
//   updates     UPDATE follows REDUCE and NORM, and precedes every acquire of the version it makes.
//   offloading  pieces of states on the host move in order, at most MOVING_PIECES at once. Each is
//               updated while it is where the update runs, and returns. Sums on the host leave
//               their slot before another gradient, or the next micro-batch's, is made there; sums
//               that are added to on the device return before that. Delayed updates precede the
//               new sum, and their parameters are fetched when nothing uses them.
//   capacity    live activations and received messages fit the rank's limits.
//   order       all ranks start the collectives that they share in the same order, and nothing
//               deadlocks even if each start waits for all members of the collective.
#ifndef VALIDATOR_H
#define VALIDATOR_H

#include "base/base.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "schedule/validator_rules.h"
#include "schedule/walk.h"

// Makes an action the one that is played. Returns whether its fields are in range.
static inline bool validator_begin(Validator *v, int rank, const Action *a) {
    const Program *p = v->program;
    v->rank = rank;
    v->action = a;
    const bool of_unit = action_is(a->kind, COMPUTES | OF_ROWS | OF_STASH),
               of_storage = action_is(a->kind, OF_STORAGE),
               good_storage = a->storage >= 0 && a->storage < p->map.storages,
               of_micro =
                   of_unit || action_is(a->kind, OF_MICRO) ||
                   (a->kind == ACT_REDUCE && good_storage && p->map.rule[a->storage].reduces_often);
    const bool good_unit = a->unit >= 0 && a->unit < p->map.units && a->rows >= 0 &&
                           a->first_row >= 0 && a->rows <= p->samples &&
                           a->first_row <= p->samples - a->rows,
               good_micro = a->micro >= 0 && a->micro < p->micro_batches;
    const bool bad =
        (of_unit && !good_unit) || (of_micro && !good_micro) || (of_storage && !good_storage);
    if (refuse(v, bad, "a field is out of range")) { return false; }
    if (of_unit) { v->unit = unit_run(v, a->unit, a->micro); }
    if (of_micro) { v->micro = micro_run(v, a->micro); }
    if (of_storage) { v->storage = storage_run(v, a->storage); }
    return true;
}
static inline void validate_compute(Validator *v, const Action *a) {
    const UnitMap *map = v->map;
    const UnitRun *me = v->unit;
    const int makes = action_makes_stash(map, a);
    if (action_reads_parameters(a->kind)) { validate_parameters(v, a); }
    refuse(v,
           a->kind != ACT_FORWARD && (me->done & DONE_FORWARD) &&
               (me->first_row != a->first_row || me->rows != a->rows),
           "rows differ from its forward's");
    refuse(v, action_reads_stash(map, a) >= 0 && !validator_has_stash(v, a),
           "its activations are not there");
    if (makes >= 0) { validator_enter(v, a, makes); }
    for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
        const int storage = map->of_unit[a->unit][k];
        if (action_contributes(map, a, storage)) { validate_contribution(v, a, storage); }
    }
    switch (a->kind) {
    case ACT_FORWARD: validate_forward(v, a); break;
    case ACT_BACKWARD_INPUT: validate_backward_input(v, a); break;
    case ACT_BACKWARD_WEIGHT: validate_backward_weight(v, a); break;
    case ACT_RECOMPUTE: validate_recompute(v); break;
    case ACT_TIED: validate_tied(v, a); break;
    default: validate_clip(v, a);
    }
}
static inline void validator_visit(void *context, int rank, const Action *a, int peer) {
    (void)peer;
    Validator *v = (Validator *)context;
    if (*v->error || !validator_begin(v, rank, a)) { return; }
    switch (a->kind) {
    case ACT_SEND_FORWARD:
    case ACT_SEND_BACKWARD: validate_send(v, a); break;
    case ACT_RECV_FORWARD:
    case ACT_RECV_BACKWARD: validate_receive(v, a); break;
    case ACT_SEND_NORM:
    case ACT_RECV_NORM:
    case ACT_SEND_FACTOR:
    case ACT_RECV_FACTOR: validate_norm_message(v, a); break;
    case ACT_PREFETCH: validate_gather(v, a); break;
    case ACT_ACQUIRE: validate_acquire(v, a); break;
    case ACT_RELEASE: validate_release(v, a); break;
    case ACT_REDUCE: validate_reduce(v, a); break;
    case ACT_UPDATE: validate_update(v, a); break;
    case ACT_DIRECT: validate_direct(v, a); break;
    case ACT_ORTHOGONALISE: validate_orthogonalise(v); break;
    case ACT_FETCH:
    case ACT_EVICT: validate_piece(v, a); break;
    case ACT_FETCH_STASH:
    case ACT_EVICT_STASH: validate_stash(v, a); break;
    case ACT_FETCH_SUM:
    case ACT_EVICT_SUM: validate_sum(v, a); break;
    case ACT_READ:
    case ACT_WRITE: validate_stored(v, a); break;
    case ACT_NORM: validate_norm(v); break;
    default: validate_compute(v, a);
    }
}

// -------------------------------------------------------------------------------------------------
// Order of collectives. They are matched by their order, so two ranks must start those in which
// both take part in the same order. A rank takes part in the collectives of the storages to which
// it contributes, or which its units use in a pass that does not train.

static inline bool validator_share(const Validator *v, int q, int r, int storage) {
    const int storages = v->map->storages;
    return v->storages[q * storages + storage].member && v->storages[r * storages + storage].member;
}
// Returns the first action from *i on that both ranks take part in, and moves *i to it; NULL at the
// end.
static inline const Action *validator_next_shared(const Validator *v, int rank, int other, int *i) {
    const Schedule *s = &v->program->rank[rank];
    for (; *i < s->count; ++*i) {
        const Action *a = &s->actions[*i];
        if (action_is(a->kind, COLLECTIVE) && validator_share(v, rank, other, a->storage)) {
            return a;
        }
    }
    return NULL;
}
static inline void validate_order(Validator *v, int q, int r) {
    const Action *x, *y;
    int i = 0, j = 0;
    do {
        x = validator_next_shared(v, q, r, &i);
        y = validator_next_shared(v, r, q, &j);
        const bool same = x && y && x->kind == y->kind && x->storage == y->storage &&
                          x->secondary == y->secondary;
        if (!same && (x || y)) {
            validator_fail(v, "rank %d: %s of storage %d where rank %d has %s of storage %d", r,
                           y ? action_name(y->kind) : "nothing", y ? y->storage : -1, q,
                           x ? action_name(x->kind) : "nothing", x ? x->storage : -1);
        }
        i++;
        j++;
    } while ((x || y) && !*v->error);
}
// A rank that takes part in the same collectives as the rank before it is compared with that rank
// only, and other ranks with the first of such a row, if they take part in any common collective.
static inline void validate_orders(Validator *v) {
    const Program *p = v->program;
    int *first = new_array(int, p->ranks, "validator"), rows = 0;
    for (int r = 0; r < p->ranks; r++) {
        bool alike = r > 0;
        for (int s = 0; s < p->map.storages && alike; s++) {
            const StorageRun *me = &v->storages[r * p->map.storages + s];
            alike = me->member == (me - p->map.storages)->member;
        }
        if (alike) { validate_order(v, r - 1, r); }
        for (int i = 0; i < rows && !alike; i++) {
            int s = 0;
            while (s < p->map.storages && !validator_share(v, first[i], r, s)) { s++; }
            if (s < p->map.storages) { validate_order(v, first[i], r); }
        }
        if (!alike) { first[rows++] = r; }
    }
    free(first);
}
// Notes that a rank is stuck, if one is.
static inline void validate_not_stuck(Validator *v, int stuck, int at, const char *where) {
    if (stuck < 0) { return; }
    v->rank = stuck;
    v->action = &v->program->rank[stuck].actions[at];
    refuse(v, true, "deadlock%s: action %d waits for ever (peer %d)", where, at, v->action->peer);
}

// -------------------------------------------------------------------------------------------------
// The end

// By the end every forward needs its backward weight, every received input its forward, and every
// unit must have computed every sample.
static inline void validate_end_of_work(Validator *v) {
    const Program *p = v->program;
    for (v->rank = 0; v->rank < p->ranks; v->rank++) {
        const RankRun *rank = rank_run(v);
        for (int u = rank->first; u < rank->end; u++) {
            for (int m = 0; m < p->micro_batches; m++) {
                const unsigned char d = unit_run(v, u, m)->done;
                const bool tied = !program_ties(p) || u < p->map.units - 1 || (d & DONE_TIED);
                const bool trained = (d & DONE_WEIGHT) || p->forward_only;
                const char *wrong =
                    (d & DONE_FORWARD) && !trained            ? "a forward but no backward weight"
                    : (d & DONE_FORWARD) && !tied             ? "a forward but no TIED"
                    : (d & HAVE_INPUT) && !(d & DONE_FORWARD) ? "an input but no forward"
                                                              : NULL;
                if (wrong) {
                    validator_fail(v, "rank %d: unit %d micro-batch %d has %s", v->rank, u, m,
                                   wrong);
                }
            }
        }
    }
    for (int64_t i = 0; i < p->map.units * p->samples; i++) {
        if (!(v->sample[i] & SAMPLE_COMPUTED)) {
            validator_fail(v, "unit %" PRId64 " computes sample %" PRId64 " nowhere",
                           i / p->samples, i % p->samples);
        }
    }
}
// By the end every storage must be updated, and nothing may still be held.
static inline void validate_end(Validator *v) {
    const Program *p = v->program;
    int at;
    validate_end_of_work(v);
    for (int i = 0; i < p->ranks * p->map.storages; i++) {
        const StorageRun *s = &v->storages[i];
        const bool trained = s->updated || !s->member || p->forward_only;
        if (!trained || s->acquired || s->flying || s->begun != s->ended || s->read != s->written) {
            validator_fail(v, "rank %d: storage %d is not updated, or still held, at the end",
                           i / p->map.storages, i % p->map.storages);
        }
    }
    if (!*v->error) { validate_orders(v); }
    // A start of a collective may wait for its other members. Then none of them may wait for a
    // message that this rank sends later.
    if (!*v->error) {
        const int stuck = schedule_walk_collectives(p, &at);
        validate_not_stuck(v, stuck, at, " where collectives wait for their members");
    }
}

// -------------------------------------------------------------------------------------------------
// The proof

// Counts the contributions of an action, and extends its rank's range of units. Messages set flags
// at a neighbouring unit.
static inline void validator_count_action(Validator *v, const Action *a) {
    const UnitMap *map = v->map;
    RankRun *rank = rank_run(v);
    if (a->unit < 0) { return; }
    rank->first = max_i64(0, min_i64(rank->first, a->unit - 1));
    rank->end = min_i64(map->units, max_i64(rank->end, (int64_t)a->unit + 2));
    const bool good = action_computes(a->kind) && a->unit < map->units && a->micro >= 0 &&
                      a->micro < v->program->micro_batches;
    if (good && a->kind == ACT_FORWARD) { micro_run(v, a->micro)->all++; }
    for (int k = 0; good && k < map->of_unit_count[a->unit]; k++) {
        const int storage = map->of_unit[a->unit][k];
        const bool adds = action_contributes(map, a, storage);
        span_run(v, a->micro, storage)->missing += adds;
        storage_run(v, storage)->member |= adds || v->program->forward_only;
    }
}
static inline void validator_start(Validator *v, const Program *p) {
    const size_t ranks = p->ranks, micros = ranks * max_i64(p->micro_batches, 1),
                 storages = ranks * p->map.storages, units = p->map.units;
    memset(v, 0, sizeof *v);
    v->program = p;
    v->map = &p->map;
    v->spans = 1;
    for (int s = 0; s < p->map.storages; s++) {
        v->spans = p->map.rule[s].reduces_often ? max_i64(p->micro_batches, 1) : v->spans;
    }
    v->ranks = new_array(RankRun, ranks, "validator");
    v->units = new_array(UnitRun, micros * units, "validator");
    v->micros = new_array(MicroRun, micros, "validator");
    v->storages = new_array(StorageRun, storages, "validator");
    v->span = new_array(SpanRun, storages * v->spans, "validator");
    v->sample = new_array(unsigned char, p->map.units * p->samples, "validator");
    for (size_t i = 0; i < storages; i++) {
        v->storages[i].in_params = v->storages[i].in_grads = -1;
    }
    for (v->rank = 0; v->rank < p->ranks; v->rank++) {
        rank_run(v)->first = p->map.units;
        for (int i = 0; i < p->rank[v->rank].count; i++) {
            validator_count_action(v, &p->rank[v->rank].actions[i]);
        }
    }
}
static inline void validator_stop(Validator *v) {
    free_all(v->ranks, v->units, v->micros, v->storages, v->span, v->sample);
}
// Plays the program. A rank that waits for ever is a violation.
static inline void validator_walk(Validator *v, ScheduleVisit visit, void *context) {
    int at;
    const int stuck = schedule_walk(v->program, &at, visit, context);
    validate_not_stuck(v, stuck, at, "");
}

// Proves the invariants in the head comment. Returns false on a violation, and describes the first
// one in error. Pure, apart from that text.
static inline bool schedule_validate(const Program *p, char *error, size_t error_bytes) {
    Validator v;
    validator_start(&v, p);
    v.error = error;
    v.error_bytes = error_bytes;
    *error = 0;
    validator_walk(&v, validator_visit, &v);
    if (!*error) { validate_end(&v); }
    validator_stop(&v);
    return !*error;
}

// Ends the program (EXIT_INPUT): an invalid schedule is a defect of train_gpt.
__attribute__((noreturn)) static inline void schedule_refuse(const char *error) {
    die(EXIT_INPUT, "this is a defect of train_gpt; please report it", "invalid schedule: %s",
        error);
}
static inline void schedule_check(const Program *p) {
    char error[400];
    if (!schedule_validate(p, error, sizeof error)) { schedule_refuse(error); }
}

#endif
