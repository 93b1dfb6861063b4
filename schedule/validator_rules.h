// validator_rules.h: what each action must find, and what it leaves behind. validator.h says what
// these rules prove together, and calls them.
//
// A rule looks at the state of one rank, that of the action which is played (Validator.rank), and
// refuses the action if the state is not as it must be. Then it changes the state.
#ifndef VALIDATOR_RULES_H
#define VALIDATOR_RULES_H

#include "base/base.h"
#include "dp.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "state/policy.h"

// Flags of a rank, unit and micro-batch.
enum {
    DONE_FORWARD = 1,
    DONE_INPUT = 2,
    DONE_WEIGHT = 4,
    DONE_TIED = 8,
    HAVE_INPUT = 16,   // rows of the unit's input were received
    HAVE_GRADIENT = 32 // rows of the gradient of its output were received
};
// Flags of a unit and sample.
enum {
    SAMPLE_COMPUTED = 1,  // some rank has computed the forward
    SAMPLE_CAME = 2,      // the unit's input was received
    SAMPLE_CAME_BACK = 4, // the gradient of its output was received
    SAMPLE_NORMED = 8,    // the norm of its stage was received (unit: the stage's last one)
    SAMPLE_SCALED = 16    // the factor was received (unit: the same)
};

// Where the sum of a gradient is that is kept on the host.
typedef enum {
    SUM_BEGINS,  // there is no sum yet
    SUM_IN_SLOT, // reduced, about to leave its slot
    SUM_ON_HOST,
    SUM_IS_BACK // on the device, to be added to
} SumState;
// Rows that were received.
typedef struct {
    int64_t rows, first, end; // number of rows; first row; end of the last
} Received;

// The state of a unit and micro-batch.
typedef struct {
    unsigned char done;       // DONE_ and HAVE_ flags
    bool stashed;             // activations are on the host
    int64_t first_row, rows;  // of its forward
    Received input, gradient; // of the unit's input, of the gradient of its output
    // at a stage's last unit: samples whose norm was received by the first stage, or whose factor
    // by this stage
    Received factors;
} UnitRun;
// Of a micro-batch.
typedef struct {
    int forwards, open;   // units whose forward has run; those of them whose weight part has not
    int all;              // units whose forward the rank runs
    bool clipped;         // CLIP has run
    bool kept;            // uses one of the rank's Limits.clips
    int64_t factors_sent; // rows of factors
} MicroRun;
// Of a storage.
typedef struct {
    bool member;               // the rank contributes to the gradient, or only computes with it
    bool acquired, updated;    // parameters are in use; the new version exists
    bool flying, gathered;     // a gather has started and was not released; a gather has been done
    SumState sum;              // if the sum is kept on the host
    bool directed, orthogonal; // of an update in parts: DIRECT and ORTHOGONALISE have run
    int begun, made,
        ended;         // pieces of states that arrived for their update; are updated; went back
    int read, written; // pieces that were read from the disk, written to it
    int in_params, in_grads; // storages that are in the slots of this number, or -1
} StorageRun;
// Of the gradient of a storage in a span: a micro-batch if it is reduced in each one, else the
// step.
typedef struct {
    int missing; // contributions
    bool reduced;
} SpanRun;
// Of a rank.
typedef struct {
    Limits held;                 // what is in use
    UnitRun *recomputed;         // whose block activations exist, or NULL
    UnitRun *stash[STASH_SLOTS]; // whose activations are in the slot, or NULL
    bool normed;
    // the REDUCE that must come next because its bucket is begun: one more than its storage, or 0
    int in_bucket, bucket_micro;
    int slots;  // slots for pieces of states that are in use
    int stored; // host buffers for pieces from the disk that are in use
    // units of its actions and their neighbours: [first, end)
    int first, end;
} RankRun;

typedef struct {
    const Program *program;
    const UnitMap *map;
    int rank;             // whose state the functions below return
    const Action *action; // that is played
    // the states of the action's unit and micro-batch, of its micro-batch, and of its storage
    UnitRun *unit;
    MicroRun *micro;
    StorageRun *storage;
    RankRun *ranks;
    UnitRun *units;        // [rank][unit][micro]
    MicroRun *micros;      // [rank][micro]
    StorageRun *storages;  // [rank][storage]
    SpanRun *span;         // [rank][span][storage]
    int spans;             // number of spans after which gradients are reduced: micro-batches, or 1
    unsigned char *sample; // [unit][sample] SAMPLE_ flags
    char *error;           // first violation; empty while there is none
    size_t error_bytes;
} Validator;

static inline RankRun *rank_run(const Validator *v) { return &v->ranks[v->rank]; }
static inline size_t micro_index(const Validator *v, int row, int micro) {
    return row * (size_t)v->program->micro_batches + micro;
}
static inline UnitRun *unit_run(const Validator *v, int unit, int micro) {
    return &v->units[micro_index(v, v->rank * v->map->units + unit, micro)];
}
static inline MicroRun *micro_run(const Validator *v, int micro) {
    return &v->micros[micro_index(v, v->rank, micro)];
}
static inline StorageRun *storage_run(const Validator *v, int storage) {
    return &v->storages[v->rank * v->map->storages + storage];
}
static inline SpanRun *span_run(const Validator *v, int micro, int storage) {
    const size_t span =
        v->rank * (size_t)v->spans + (v->map->rule[storage].reduces_often ? micro : 0);
    return &v->span[span * v->map->storages + storage];
}

// Notes a violation, unless there was one before.
__attribute__((format(printf, 2, 3))) static inline void validator_fail(Validator *v,
                                                                        const char *format, ...) {
    if (*v->error) { return; }
    va_list args;
    va_start(args, format);
    vsnprintf(v->error, v->error_bytes, format, args);
    va_end(args);
}
// Notes a violation by the action that is played, if `bad`. Returns `bad`.
__attribute__((format(printf, 3, 4))) static inline bool refuse(Validator *v, bool bad,
                                                                const char *format, ...) {
    if (!bad || *v->error) { return bad; }
    const Action *a = v->action;
    char what[160];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    validator_fail(v, "rank %d: %s unit %d storage %d micro-batch %d: %s", v->rank,
                   action_name(a->kind), a->unit, a->storage, a->micro, what);
    return true;
}

static inline void received_add(Received *r, const Action *a) {
    r->first = r->rows ? min_i64(r->first, a->first_row) : a->first_row;
    r->end = max_i64(r->end, a->first_row + a->rows);
    r->rows += a->rows;
}
// Returns whether all rows of an action were received.
static inline bool received_all(const Received *r, const Action *a) {
    return !a->rows ||
           (r->rows == a->rows && r->first == a->first_row && r->end == a->first_row + a->rows);
}
// Sets a flag for the samples of an action in a unit. Refuses, and returns false, if it is set
// already: each may happen once in a step.
static inline bool validator_mark(Validator *v, const Action *a, int unit, unsigned char flag,
                                  const char *what) {
    for (int64_t i = a->first_row; i < a->first_row + a->rows; i++) {
        unsigned char *sample = &v->sample[unit * v->program->samples + i];
        if (refuse(v, *sample & flag, "sample %" PRId64 " %s already", i, what)) { return false; }
        *sample |= flag;
    }
    return true;
}

// -------------------------------------------------------------------------------------------------
// Stashed activations

// Activations of a unit enter their slot, whose content must not be needed any more, or be on the
// host.
static inline void validator_enter(Validator *v, const Action *a, int unit) {
    UnitRun *mine = unit_run(v, unit, a->micro), **user = &rank_run(v)->stash[stash_slot(unit)];
    refuse(v,
           *user && *user != mine && !(*user)->stashed && !((*user)->done & DONE_WEIGHT) &&
               !v->program->forward_only,
           "its slot holds the activations of another unit or micro-batch");
    *user = mine;
}
static inline bool validator_has_stash(const Validator *v, const Action *a) {
    return rank_run(v)->stash[stash_slot(a->unit)] == v->unit;
}
static inline void validate_stash(Validator *v, const Action *a) {
    UnitRun *me = v->unit;
    if (a->kind == ACT_EVICT_STASH) {
        refuse(v, !validator_has_stash(v, a), "its activations are not there");
        me->stashed = true;
        return;
    }
    refuse(v, !me->stashed || (me->done & DONE_WEIGHT), "its activations are not on the host");
    validator_enter(v, a, a->unit);
}

// -------------------------------------------------------------------------------------------------
// Passes and clipping

// Returns whether all rows that an action needs of a neighbouring unit exist: made by this rank
// (flag `done`), or received.
static inline bool validator_there(const Validator *v, const Action *a, int from,
                                   unsigned char done) {
    const UnitRun *me = v->unit, *other = unit_run(v, from, a->micro);
    return ((other->done & done) && other->first_row == a->first_row && other->rows == a->rows) ||
           received_all(from < a->unit ? &me->input : &me->gradient, a);
}
static inline void validate_recomputed(Validator *v, const Action *a) {
    const bool block = a->unit > 0 && a->unit < v->map->units - 1;
    refuse(v, v->program->recompute && block && rank_run(v)->recomputed != v->unit,
           "its activations were not recomputed");
}
// A micro-batch takes one of the rank's slots for norms that cross stages (Limits.clips), unless it
// has one.
static inline void validator_keep(Validator *v) {
    MicroRun *micro = v->micro;
    const int64_t limit = v->program->limits[v->rank].clips;
    refuse(v, !micro->kept && ++rank_run(v)->held.clips > limit,
           "norms of %" PRId64 " micro-batches are kept already", limit);
    micro->kept = true;
}
static inline void validate_backward_input(Validator *v, const Action *a) {
    UnitRun *me = v->unit;
    const Program *p = v->program;
    const int head = p->map.units - 1;
    refuse(v, !(me->done & DONE_FORWARD), "its forward has not run");
    refuse(v, me->done & DONE_INPUT, "runs twice");
    refuse(v, a->unit != head && !validator_there(v, a, a->unit + 1, DONE_INPUT),
           "the gradient of its output is not there");
    validate_recomputed(v, a);
    me->done |= DONE_INPUT;
    if (program_crosses(p) && (p->clips == CLIPS_ALL || a->unit == head)) { validator_keep(v); }
    refuse(v, ++rank_run(v)->held.works > p->limits[v->rank].works,
           "the weight part before it has not run");
}
// Frees the slot for a micro-batch's norms and factors when nothing needs it any more: after the
// last weight part, TIED (if it runs here), and the last factor that the first stage sends.
static inline void validator_forget(Validator *v, int micro) {
    const Program *p = v->program;
    MicroRun *m = micro_run(v, micro);
    const unsigned char head = unit_run(v, p->map.units - 1, micro)->done;
    int64_t stages = 0;
    const bool waits = program_ties(p) && (head & DONE_FORWARD) && !(head & DONE_TIED);
    if (!m->kept || m->open || waits) { return; }
    for (int u = 0; u < p->map.units; u++) { stages += program_sends_norms(p, u); }
    if (stages * unit_run(v, 0, micro)->rows > m->factors_sent) { return; }
    rank_run(v)->held.clips--;
    m->kept = false;
}
// The last weight part of a micro-batch on this rank frees what the micro-batch used. In a pass
// that does not train, the last forward does.
static inline void validator_free(Validator *v, int micro) {
    RankRun *rank = rank_run(v);
    const bool last = !micro_run(v, micro)->open;
    for (int u = rank->first; last && u < rank->end; u++) {
        const unsigned char done = unit_run(v, u, micro)->done;
        rank->held.inputs -= (done & HAVE_INPUT) != 0;
        rank->held.gradients -= (done & HAVE_GRADIENT) != 0;
    }
    rank->held.in_flight -= last;
    validator_forget(v, micro);
}
static inline void validate_forward(Validator *v, const Action *a) {
    UnitRun *me = v->unit;
    MicroRun *micro = v->micro;
    const int64_t limit = v->program->limits[v->rank].in_flight;
    refuse(v, me->done & DONE_FORWARD, "runs twice");
    refuse(v, a->unit && !validator_there(v, a, a->unit - 1, DONE_FORWARD),
           "its input is not there");
    // the first forward of a micro-batch on this rank takes one of its activation sets
    refuse(v, !micro->forwards && ++rank_run(v)->held.in_flight > limit,
           "more live micro-batches than the %" PRId64 " slots", limit);
    me->done |= DONE_FORWARD;
    micro->forwards++;
    micro->open++;
    me->first_row = a->first_row;
    me->rows = a->rows;
    rank_run(v)->recomputed = NULL;
    validator_mark(v, a, a->unit, SAMPLE_COMPUTED, "is computed");
    if (v->program->forward_only && micro->forwards == micro->all) {
        micro->open = 0;
        validator_free(v, a->micro);
    }
}
// The factors by which a weight part is scaled must be known.
static inline void validate_scale(Validator *v, const Action *a) {
    const Program *p = v->program;
    const bool crosses = program_crosses(p),
               far = crosses && p->clips == CLIPS_ALL && p->map.stage[a->unit] > 0,
               here = program_waits(p) || (crosses && a->unit == 0);
    int end = a->unit; // the last unit of its stage
    while (far && end + 1 < p->map.units && p->map.stage[end + 1] == p->map.stage[end]) { end++; }
    refuse(v, far && !received_all(&unit_run(v, end, a->micro)->factors, a),
           "not all factors are there");
    refuse(v, !far && here && !v->micro->clipped, "norms are not known: CLIP has not run");
}
static inline void validate_backward_weight(Validator *v, const Action *a) {
    UnitRun *me = v->unit;
    const bool ready = a->unit ? (me->done & DONE_INPUT)
                               : (me->done & DONE_FORWARD) && validator_there(v, a, 1, DONE_INPUT);
    refuse(v, !ready, "its backward input has not run");
    refuse(v, me->done & DONE_WEIGHT, "runs twice");
    validate_scale(v, a);
    validate_recomputed(v, a);
    me->done |= DONE_WEIGHT;
    v->micro->open--;
    if (a->unit) { rank_run(v)->held.works--; }
    validator_free(v, a->micro);
}
static inline void validate_recompute(Validator *v) {
    UnitRun *me = v->unit;
    refuse(v, !(me->done & DONE_FORWARD) || (me->done & DONE_INPUT),
           "belongs between its forward and its backward");
    // There is one set of recomputed block activations: the former content is lost.
    rank_run(v)->recomputed = me;
}
static inline void validate_norm_of(Validator *v, int unit, int micro) {
    const unsigned char done = unit_run(v, unit, micro)->done;
    refuse(v, (done & DONE_FORWARD) && !(done & DONE_INPUT), "the norms of unit %d are not known",
           unit);
}
static inline void validate_clip(Validator *v, const Action *a) {
    const Program *p = v->program;
    MicroRun *micro = v->micro;
    refuse(v, micro->clipped, "runs twice");
    for (int u = 1; u < p->map.units; u++) { validate_norm_of(v, u, a->micro); }
    refuse(v, !micro->forwards, "no forward has run");
    if (program_crosses(p) && a->unit == 0) {
        refuse(v, !validator_there(v, a, 1, DONE_INPUT),
               "the gradient of the embedding's output is not there");
        for (int u = 0; u < p->map.units; u++) {
            refuse(v,
                   program_sends_norms(p, u) &&
                       !received_all(&unit_run(v, u, a->micro)->factors, a),
                   "not all norms of stage %d are there", p->map.stage[u]);
        }
        validator_keep(v);
    }
    micro->clipped = true;
}
static inline void validate_tied(Validator *v, const Action *a) {
    UnitRun *me = v->unit;
    refuse(v, !program_ties(v->program), "no table crosses stages here");
    refuse(v, !(me->done & DONE_INPUT), "its backward input has not run");
    refuse(v, me->done & DONE_TIED, "runs twice");
    refuse(v, !received_all(&me->factors, a), "not all factors are there");
    me->done |= DONE_TIED;
    validator_forget(v, a->micro);
}

// -------------------------------------------------------------------------------------------------
// Messages of rows

// The rank must compute the rows of a message in this unit.
static inline void validate_holds(Validator *v, const Action *a, int unit, const char *what) {
    const UnitRun *run = unit_run(v, unit, a->micro);
    refuse(v,
           !a->rows || !(run->done & DONE_FORWARD) || a->first_row < run->first_row ||
               a->first_row + a->rows > run->first_row + run->rows,
           "%s", what);
}
static inline void validate_send(Validator *v, const Action *a) {
    const unsigned char done = v->unit->done;
    const bool forward = a->kind == ACT_SEND_FORWARD;
    refuse(v, forward && !(done & DONE_FORWARD), "sends an output that is not computed");
    refuse(v, forward && (done & DONE_WEIGHT), "sends an output that is gone");
    refuse(v, !forward && !(done & DONE_INPUT), "sends a gradient that is not computed");
    validate_holds(v, a, a->unit, "sends rows that it does not hold");
}
// NORM is sent from the stage of its unit to the first stage, FACTOR back. Both need the rank's
// slot for the micro-batch. CLIP runs between them.
static inline void validate_norm_message(Validator *v, const Action *a) {
    // far: the rank is not on the first stage
    const bool norm = a->kind == ACT_SEND_NORM || a->kind == ACT_RECV_NORM,
               sends = action_sends(a->kind), far = norm == sends;
    MicroRun *micro = v->micro;
    refuse(v, !program_crosses(v->program) || (norm && !program_sends_norms(v->program, a->unit)),
           "no norm crosses stages here");
    validate_holds(v, a, far ? a->unit : 0, "the rank does not compute these rows");
    // units of this stage (others have no forward here)
    for (int u = 0; norm && sends && u <= a->unit; u++) {
        if (v->program->clips == CLIPS_ALL || u == a->unit) { validate_norm_of(v, u, a->micro); }
    }
    refuse(v, norm && !sends && micro->clipped, "comes after its use");
    if (norm && !sends) { validator_keep(v); }
    refuse(v, !norm && sends && !micro->clipped, "sends factors before CLIP");
    refuse(v, !micro->kept, "its place is gone");
    if (!norm && sends) {
        micro->factors_sent += a->rows;
        validator_forget(v, a->micro);
    }
    if (!sends && validator_mark(v, a, a->unit, norm ? SAMPLE_NORMED : SAMPLE_SCALED, "has come")) {
        received_add(&v->unit->factors, a);
    }
}
// RECV_FORWARD(unit) brings rows of the input of unit + 1; RECV_BACKWARD(unit) brings rows of the
// gradient of the output of unit - 1.
static inline void validate_receive(Validator *v, const Action *a) {
    const bool backward = a->kind == ACT_RECV_BACKWARD;
    const int to = backward ? a->unit - 1 : a->unit + 1;
    if (refuse(v, to < 0 || to == v->map->units, "no unit wants it")) { return; }
    UnitRun *me = unit_run(v, to, a->micro);
    const Limits *limits = &v->program->limits[v->rank];
    Limits *all = &rank_run(v)->held;
    const unsigned char flag = backward ? HAVE_GRADIENT : HAVE_INPUT,
                        late = backward ? DONE_INPUT | DONE_WEIGHT : DONE_FORWARD;
    int64_t *held = backward ? &all->gradients : &all->inputs,
            limit = backward ? limits->gradients : limits->inputs;
    refuse(v, me->done & late, "comes after its use");
    if (backward) { validate_holds(v, a, to, "the rank does not compute these rows"); }
    if (!validator_mark(v, a, to, backward ? SAMPLE_CAME_BACK : SAMPLE_CAME, "has come")) {
        return;
    }
    refuse(v, !(me->done & flag) && ++*held > limit,
           "the places of %" PRId64 " micro-batches are taken", limit);
    me->done |= flag;
    received_add(backward ? &me->gradient : &me->input, a);
}

// -------------------------------------------------------------------------------------------------
// Parameters and gradients

// Point to the storage that is in the slot of a storage's parameters, or gradient; NULL if it
// shares none.
static inline int *validator_in_params(const Validator *v, int storage) {
    const int slot = v->map->rule ? v->map->rule[storage].param_slot : -1;
    return slot >= 0 ? &storage_run(v, slot)->in_params : NULL;
}
static inline int *validator_in_grads(const Validator *v, int storage) {
    const int slot = v->map->rule ? v->map->rule[storage].grad_slot : -1;
    return slot >= 0 ? &storage_run(v, slot)->in_grads : NULL;
}
static inline SumPlace validator_sum_place(const Validator *v, int storage) {
    return v->map->rule ? v->map->rule[storage].sum : SUM_STAYS;
}
static inline void validate_contribution(Validator *v, const Action *a, int storage) {
    SpanRun *span = span_run(v, a->micro, storage);
    const SumState sum = storage_run(v, storage)->sum;
    int *user = validator_in_grads(v, storage);
    const int other = user ? *user : -1;
    refuse(v, span->reduced, "storage %d is already reduced", storage);
    refuse(v, other >= 0 && other != storage,
           "the slot of storage %d holds the gradient of storage %d", storage, other);
    refuse(v, sum == SUM_IN_SLOT, "the sum of storage %d has not left", storage);
    refuse(v, sum == SUM_ON_HOST && validator_sum_place(v, storage) == SUM_COMES_BACK,
           "the sum of storage %d is not back", storage);
    if (user) { *user = storage; }
    span->missing--;
}
// The storages of a bucket are reduced one directly after another, in their order.
static inline void validate_bucket(Validator *v, const Action *a) {
    const StorageRule *rule = v->map->rule;
    const int at = a->storage, bucket = rule ? rule[at].bucket : -1;
    RankRun *rank = rank_run(v);
    if (bucket < 0) { return; }
    const int next = rank->in_bucket ? rank->in_bucket - 1 : bucket;
    refuse(v, at != next || (rank->in_bucket && a->micro != rank->bucket_micro),
           "storage %d is the next one in its bucket", next);
    rank->in_bucket = at && rule[at - 1].bucket == bucket ? at : 0;
    rank->bucket_micro = a->micro;
}
static inline void validate_reduce(Validator *v, const Action *a) {
    SpanRun *span = span_run(v, a->micro, a->storage);
    int *user = validator_in_grads(v, a->storage);
    validate_bucket(v, a);
    refuse(v, span->missing, "%d contributions are still to come", span->missing);
    refuse(v, span->reduced, "runs twice");
    if (validator_sum_place(v, a->storage) != SUM_STAYS) {
        v->storage->sum = SUM_IN_SLOT;
    } else if (user) {
        *user = -1;
    }
    span->reduced = true;
}
static inline void validate_sum(Validator *v, const Action *a) {
    const bool leaves = a->kind == ACT_EVICT_SUM;
    SumState *sum = &v->storage->sum;
    int *user = validator_in_grads(v, a->storage);
    refuse(v, *sum != (leaves ? SUM_IN_SLOT : SUM_ON_HOST), "its sum is not there");
    refuse(v, !leaves && user && *user >= 0, "its slot holds the gradient of storage %d",
           user ? *user : -1);
    *sum = leaves ? SUM_ON_HOST : SUM_IS_BACK;
    if (user) { *user = leaves ? -1 : a->storage; }
}
static inline void validate_norm(Validator *v) {
    for (int s = 0; s < v->map->storages; s++) {
        const StorageRun *me = storage_run(v, s);
        const int spans = v->map->rule[s].reduces_often ? v->spans : 1;
        for (int i = 0; i < spans && me->member; i++) {
            refuse(v, !span_run(v, i, s)->reduced, "storage %d is not reduced", s);
        }
        refuse(v, me->sum == SUM_IN_SLOT, "the sum of storage %d has not left", s);
    }
    rank_run(v)->normed = true;
}
// The parameters of the units of a compute action must be acquired.
static inline void validate_parameters(Validator *v, const Action *a) {
    for (int k = 0; k < v->map->of_unit_count[a->unit]; k++) {
        const int storage = v->map->of_unit[a->unit][k];
        refuse(v, !storage_run(v, storage)->acquired, "parameters of storage %d are not acquired",
               storage);
    }
}
static inline void validate_version(Validator *v, const Action *a) {
    refuse(v, a->version != v->storage->updated, "version %" PRId64 " is not the one that exists",
           a->version);
}
static inline void validate_gather(Validator *v, const Action *a) {
    const bool gathers = v->map->rule[a->storage].gathers;
    StorageRun *me = v->storage;
    int *user = validator_in_params(v, a->storage);
    validate_version(v, a);
    refuse(v, me->acquired || (gathers && me->flying), "its parameters are in use");
    refuse(v, user && *user >= 0, "its slot holds storage %d", user ? *user : -1);
    // a pass that does not train uses the copies if they exist
    refuse(v, a->secondary && !me->gathered && !v->program->forward_only,
           "no gather has made the copies");
    if (user) { *user = a->storage; }
    me->flying = me->gathered = gathers;
}
static inline void validate_acquire(Validator *v, const Action *a) {
    StorageRun *me = v->storage;
    refuse(v, me->acquired, "is acquired already");
    me->acquired = true;
    validate_version(v, a);
    refuse(v, v->map->rule[a->storage].gathers && !me->flying, "no gather is under way");
}
static inline void validate_release(Validator *v, const Action *a) {
    StorageRun *me = v->storage;
    int *user = validator_in_params(v, a->storage);
    refuse(v, !me->acquired, "is not acquired");
    if (user) { *user = -1; }
    me->acquired = me->flying = false;
}

// -------------------------------------------------------------------------------------------------
// Updates, and pieces of states on the host or the disk

static inline void validate_after_norm(Validator *v, const Action *a) {
    refuse(v, !span_run(v, 0, a->storage)->reduced || !rank_run(v)->normed,
           "needs REDUCE and NORM first");
}
// Returns how often a piece of a storage's states comes in a step, times the storage's pieces.
static inline int validator_pieces(const Validator *v, int storage) {
    const UnitMap *map = v->map;
    return map->rule ? map->rule[storage].pieces * (map_has_matrices(map, storage) ? 2 : 1) : 0;
}
static inline void validate_there(Validator *v, const Action *a, int pieces) {
    const StorageRun *me = v->storage;
    refuse(v,
           pieces && (a->use != me->made || a->use >= me->begun ||
                      (v->map->rule[a->storage].on_disk && a->use >= me->read)),
           "piece %d is not there", a->use);
}
// DIRECT: the first part of an update with whole matrices.
static inline void validate_direct(Validator *v, const Action *a) {
    StorageRun *me = v->storage;
    const int pieces = validator_pieces(v, a->storage);
    validate_after_norm(v, a);
    refuse(v, !map_has_matrices(v->map, a->storage), "the storage has no matrices");
    refuse(v, me->directed, "runs twice");
    validate_there(v, a, pieces);
    me->directed = 2 * ++me->made >= pieces;
}
static inline void validate_orthogonalise(Validator *v) {
    StorageRun *me = v->storage;
    refuse(v, !me->directed, "its directions are not there");
    refuse(v, me->orthogonal, "runs twice");
    me->orthogonal = true;
}
static inline void validate_update(Validator *v, const Action *a) {
    const UnitMap *map = v->map;
    StorageRun *me = v->storage;
    const int pieces = validator_pieces(v, a->storage);
    if (map->delays) {
        refuse(v, me->begun, "runs twice");
        refuse(v, me->sum != SUM_BEGINS && me->sum != SUM_IN_SLOT, "its gradient is written over");
        me->begun = me->made = pieces;
        return;
    }
    validate_after_norm(v, a);
    refuse(v, me->acquired, "its parameters are in use");
    refuse(v, me->updated, "runs twice");
    refuse(v, map_has_matrices(map, a->storage) && !me->orthogonal,
           "its matrices are not orthogonal");
    validate_there(v, a, pieces);
    me->updated = ++me->made >= pieces && !(pieces && map->cpu_update);
}
// A piece of states on the host goes to its update and takes a slot (begins), or goes back. If the
// host updates, the gradient is what goes to the update, and new parameters go back.
static inline void validate_piece(Validator *v, const Action *a) {
    const UnitMap *map = v->map;
    const int pieces = validator_pieces(v, a->storage);
    StorageRun *me = v->storage;
    const bool begins = (a->kind == ACT_EVICT) == map->cpu_update;
    int *count = begins ? &me->begun : &me->ended, *slots = &rank_run(v)->slots;
    refuse(v, a->use != *count || a->use >= pieces, "piece %d is not the next one", a->use);
    refuse(v, !begins && a->use >= me->made, "piece %d is not updated", a->use);
    refuse(v, begins && !map->cpu_update && map->rule[a->storage].on_disk && a->use >= me->read,
           "piece %d is not on the host", a->use);
    refuse(v, begins && *slots == MOVING_PIECES, "its slot is taken");
    if (begins && (map->cpu_update || validator_sum_place(v, a->storage) != SUM_STAYS)) {
        validate_after_norm(v, a);
    }
    refuse(v, map->delays && me->acquired, "its parameters are in use");
    ++*count;
    *slots += begins ? 1 : map->delays ? 0 : -1;
    if (!begins && map->cpu_update) { me->updated = me->ended == pieces; }
}
// READ brings a piece from the disk into a host buffer. WRITE takes it back when it is updated and
// on the host.
static inline void validate_stored(Validator *v, const Action *a) {
    StorageRun *me = v->storage;
    const bool reads = a->kind == ACT_READ;
    int *count = reads ? &me->read : &me->written, *stored = &rank_run(v)->stored;
    refuse(v,
           !v->map->rule[a->storage].on_disk || a->use != *count ||
               a->use >= validator_pieces(v, a->storage),
           "piece %d is not the next one on disk", a->use);
    refuse(v, reads && *stored == DISK_PIECES, "its buffer on the host is taken");
    refuse(v, !reads && a->use >= me->ended, "piece %d is not back from its update", a->use);
    ++*count;
    *stored += reads ? 1 : -1;
}

#endif
