// validator.h: proves a program before it runs. It plays the program (walk.h), and
// checks what each action finds and leaves behind.
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
//               PREFETCH is under way by then, into a slot that nothing uses.
//   gradients   REDUCE(storage) follows all contributions of the step, or of its micro-batch. Until
//               then no other storage writes into the slot.
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

#include "engine/walk.h" // playing programs

// Flags of a rank, unit and micro-batch.
enum {
    DONE_FORWARD = 1,
    DONE_INPUT = 2,
    DONE_WEIGHT = 4,
    HAVE_INPUT = 8,     // rows of the unit's input were received
    HAVE_GRADIENT = 16, // rows of the gradient of its output were received
    CLIPPED = 32,       // CLIP has run; kept at unit 0, whichever units the rank has
    KEPT = 64,          // uses one of the rank's Limits.clips; kept at unit 0, too
    DONE_TIED = 128
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
static inline void received_add(Received *r, const Action *a) {
    r->first = r->rows ? min_i64(r->first, a->first_row) : a->first_row;
    r->end = max_i64(r->end, a->first_row + a->rows);
    r->rows += a->rows;
}

typedef struct {
    const Program *program;
    unsigned char *done;  // [rank][unit][micro] DONE_ and other flags above
    int spans;            // number of spans after which gradients are reduced: micro-batches, or 1
    int *contributions;   // [rank][span][storage] contributions that are missing
    signed char *reduced; // [rank][span][storage]
    signed char *acquired, *updated; // [rank][storage]
    // [rank][storage] a gather has started and was not released; a gather has been done
    signed char *flying, *gathered;
    int *param_user, *grad_user; // [rank][slot] storage that is in the slot, or -1
    // [rank][micro] units whose forward has run; those of them whose weight part has not
    int *forwards, *open;
    // [rank] range of the units of its actions and their neighbours. Flags are set only there, and
    // at unit 0.
    int *first, *end;
    // [rank][unit][micro][2] first row and number of rows of the forward
    int64_t *rows;
    // [rank][unit][micro][2] received rows of the unit's input, of the gradient of its output
    Received *received;
    // [rank][unit][micro] at a stage's last unit: samples whose norm was received by the first
    // stage, or whose factor by this stage; at unit 0: factors sent
    Received *factors;
    unsigned char *covered; // [unit][sample] SAMPLE_ flags above
    Limits *held;           // [rank] what is in use now
    // [rank] validator_index of the unit and micro-batch whose block activations exist, or -1
    int64_t *recomputed;
    bool *member; // [rank][storage] the rank contributes to the gradient
    bool *normed; // [rank]
    // [rank][storage] pieces of states on the host that arrived for their update, that went back
    int *begun, *ended;
    int *made;        // [rank][storage] pieces that are updated
    int *slots;       // [rank] slots for such pieces that are in use
    signed char *sum; // [rank][storage] SumState of a gradient whose sum is on the host
    bool *stashed;    // [rank][unit][micro] activations are on the host
    // [rank][STASH_SLOTS] validator_index of the activations in the slot, or -1
    int64_t *stash_user;
    int *read, *written; // [rank][storage] pieces that were read from the disk, written to it
    int *stored;         // [rank] host buffers for pieces from the disk that are in use
    char *error;         // first violation; empty while there is none
    size_t error_bytes;
} Validator;

static inline size_t validator_index(const Validator *v, int rank, int unit, int micro) {
    return ((size_t)rank * (size_t)v->program->map.units + (size_t)unit) *
               (size_t)v->program->micro_batches +
           (size_t)micro;
}
static inline size_t validator_micro(const Validator *v, int rank, int micro) {
    return (size_t)rank * (size_t)v->program->micro_batches + (size_t)micro;
}
static inline size_t validator_span(const Validator *v, int rank, int micro, int storage) {
    int span = v->program->map.reduces_often[storage] ? micro : 0;
    return ((size_t)rank * (size_t)v->spans + (size_t)span) * (size_t)v->program->map.storages +
           (size_t)storage;
}
static inline unsigned char *validator_done(Validator *v, int rank, int unit, int micro) {
    return &v->done[validator_index(v, rank, unit, micro)];
}
__attribute__((format(printf, 4, 5))) static inline void
validator_fail(Validator *v, int rank, const Action *a, const char *format, ...) {
    if (*v->error) { return; }
    char what[160];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    snprintf(v->error, v->error_bytes, "rank %d: %s unit %d storage %d micro-batch %d: %s", rank,
             action_name(a->kind), a->unit, a->storage, a->micro, what);
}

// A unit's parameters must be acquired while it computes.
static inline void validate_parameters(Validator *v, int rank, const Action *a) {
    const UnitMap *map = &v->program->map;
    for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
        int storage = map->of_unit[a->unit][k];
        if (!v->acquired[rank * map->storages + storage]) {
            validator_fail(v, rank, a, "parameters of storage %d are not acquired", storage);
        }
    }
}

// Sets a flag for the samples of an action in a unit. Fails, and returns false, if it is set
// already: each may happen once in a step.
static inline bool validator_mark(Validator *v, int rank, const Action *a, int unit,
                                  unsigned char flag, const char *what) {
    for (int64_t i = a->first_row; i < a->first_row + a->rows; i++) {
        unsigned char *sample = &v->covered[(int64_t)unit * v->program->samples + i];
        if (*sample & flag) {
            validator_fail(v, rank, a, "sample %" PRId64 " %s already", i, what);
            return false;
        }
        *sample |= flag;
    }
    return true;
}
// Activations of a unit enter their slot. Fails if the slot holds others that are still needed and
// are not on the host.
static inline void validator_enter(Validator *v, int rank, const Action *a, int unit) {
    const int64_t mine = (int64_t)validator_index(v, rank, unit, a->micro);
    int64_t *user = &v->stash_user[rank * STASH_SLOTS + stash_slot(unit)];
    const bool wanted =
        *user >= 0 && *user != mine && !v->stashed[*user] && !(v->done[*user] & DONE_WEIGHT);
    if (wanted) {
        validator_fail(v, rank, a, "its slot holds the activations of another unit or micro-batch");
    }
    *user = mine;
}
static inline bool validator_has_stash(const Validator *v, int rank, const Action *a) {
    return v->stash_user[rank * STASH_SLOTS + stash_slot(a->unit)] ==
           (int64_t)validator_index(v, rank, a->unit, a->micro);
}
static inline void validate_stash(Validator *v, int rank, const Action *a) {
    const size_t mine = validator_index(v, rank, a->unit, a->micro);
    if (a->kind == ACT_EVICT_STASH) {
        if (!validator_has_stash(v, rank, a)) {
            validator_fail(v, rank, a, "its activations are not there");
        }
        v->stashed[mine] = true;
        return;
    }
    if (!v->stashed[mine] || (v->done[mine] & DONE_WEIGHT)) {
        validator_fail(v, rank, a, "its activations are not on the host");
    }
    validator_enter(v, rank, a, a->unit);
}
// Actions after a forward must have the same rows.
static inline void validate_rows(Validator *v, int rank, const Action *a) {
    const int64_t *rows = &v->rows[2 * validator_index(v, rank, a->unit, a->micro)];
    bool forward = *validator_done(v, rank, a->unit, a->micro) & DONE_FORWARD;
    if (forward && (rows[0] != a->first_row || rows[1] != a->rows)) {
        validator_fail(v, rank, a, "rows differ from its forward's");
    }
}
// Returns whether all rows that an action needs exist: another unit of this rank has made them
// (flag `done`), or they were received.
static inline bool validator_there(Validator *v, int rank, const Action *a, int from,
                                   unsigned char done, bool backward) {
    const int64_t *rows = &v->rows[2 * validator_index(v, rank, from, a->micro)];
    const Received *r = &v->received[2 * validator_index(v, rank, a->unit, a->micro) + backward];
    bool local = (*validator_done(v, rank, from, a->micro) & done) && rows[0] == a->first_row &&
                 rows[1] == a->rows;
    return !a->rows || local ||
           (r->rows == a->rows && r->first == a->first_row && r->end == a->first_row + a->rows);
}
static inline void validate_forward(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    int64_t *rows = &v->rows[2 * validator_index(v, rank, a->unit, a->micro)];
    if (*me & DONE_FORWARD) { validator_fail(v, rank, a, "runs twice"); }
    if (a->unit && !validator_there(v, rank, a, a->unit - 1, DONE_FORWARD, false)) {
        validator_fail(v, rank, a, "its input is not there");
    }
    // the first forward of a micro-batch on this rank takes one of its activation sets
    const bool first = !v->forwards[validator_micro(v, rank, a->micro)];
    if (first && ++v->held[rank].in_flight > v->program->limits[rank].in_flight) {
        validator_fail(v, rank, a, "more live micro-batches than the %" PRId64 " slots",
                       v->program->limits[rank].in_flight);
    }
    *me |= DONE_FORWARD;
    v->forwards[validator_micro(v, rank, a->micro)]++;
    v->open[validator_micro(v, rank, a->micro)]++;
    rows[0] = a->first_row;
    rows[1] = a->rows;
    v->recomputed[rank] = -1;
    validator_mark(v, rank, a, a->unit, SAMPLE_COMPUTED, "is computed");
}
static inline bool validator_recomputed(const Validator *v, int rank, const Action *a) {
    bool block = a->unit > 0 && a->unit < v->program->map.units - 1;
    return !v->program->recompute || !block ||
           v->recomputed[rank] == (int64_t)validator_index(v, rank, a->unit, a->micro);
}
// Returns whether NORM or FACTOR messages of this unit have covered all samples of an action.
static inline bool validator_has_factors(const Validator *v, int rank, const Action *a, int unit) {
    const Received *r = &v->factors[validator_index(v, rank, unit, a->micro)];
    return !a->rows ||
           (r->rows == a->rows && r->first == a->first_row && r->end == a->first_row + a->rows);
}
// A micro-batch takes one of the rank's slots for norms that cross stages (Limits.clips), unless it
// has one.
static inline void validator_keep(Validator *v, int rank, const Action *a) {
    unsigned char *place = validator_done(v, rank, 0, a->micro);
    const int64_t limit = v->program->limits[rank].clips;
    if (!(*place & KEPT) && ++v->held[rank].clips > limit) {
        validator_fail(v, rank, a, "norms of %" PRId64 " micro-batches are kept already", limit);
    }
    *place |= KEPT;
}
static inline void validate_backward_input(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    if (!(*me & DONE_FORWARD)) { validator_fail(v, rank, a, "its forward has not run"); }
    if (*me & DONE_INPUT) { validator_fail(v, rank, a, "runs twice"); }
    bool there = a->unit == v->program->map.units - 1 ||
                 validator_there(v, rank, a, a->unit + 1, DONE_INPUT, true);
    if (!there) { validator_fail(v, rank, a, "the gradient of its output is not there"); }
    if (!validator_recomputed(v, rank, a)) {
        validator_fail(v, rank, a, "its activations were not recomputed");
    }
    *me |= DONE_INPUT;
    if (program_crosses(v->program) &&
        (v->program->clips == CLIPS_ALL || a->unit == v->program->map.units - 1)) {
        validator_keep(v, rank, a);
    }
    if (++v->held[rank].works > v->program->limits[rank].works) {
        validator_fail(v, rank, a, "the weight part before it has not run");
    }
}
// Returns whether all weight parts of a micro-batch have run on this rank.
static inline bool validator_weighed(const Validator *v, int rank, int micro) {
    return !v->open[validator_micro(v, rank, micro)];
}
// Returns how many rows of factors the first stage still has to send for a micro-batch.
static inline int64_t validator_to_send(const Validator *v, int rank, int micro) {
    const size_t at = validator_index(v, rank, 0, micro);
    int64_t stages = 0;
    for (int u = 0; u < v->program->map.units; u++) {
        stages += program_sends_norms(v->program, u);
    }
    return stages * v->rows[2 * at + 1] - v->factors[at].rows;
}
// Frees the slot for a micro-batch's norms and factors when nothing needs it any more: after the
// last weight part, TIED (if it runs here), and the last factor that is sent.
static inline void validator_forget(Validator *v, int rank, int micro) {
    unsigned char *place = validator_done(v, rank, 0, micro),
                  head = *validator_done(v, rank, v->program->map.units - 1, micro);
    if (!(*place & KEPT)) { return; }
    if (!validator_weighed(v, rank, micro) || ((head & DONE_FORWARD) && !(head & DONE_TIED)) ||
        validator_to_send(v, rank, micro) > 0) {
        return;
    }
    v->held[rank].clips--;
    *place &= (unsigned char)~KEPT;
}
// The last weight part of a micro-batch on this rank frees what the micro-batch used.
static inline void validator_free(Validator *v, int rank, int micro) {
    const bool last = validator_weighed(v, rank, micro);
    for (int u = v->first[rank]; last && u < v->end[rank]; u++) {
        unsigned char d = *validator_done(v, rank, u, micro);
        v->held[rank].inputs -= (d & HAVE_INPUT) != 0;
        v->held[rank].gradients -= (d & HAVE_GRADIENT) != 0;
    }
    v->held[rank].in_flight -= last;
    validator_forget(v, rank, micro);
}
// Returns the last unit of a unit's stage.
static inline int validator_end(const Validator *v, int unit) {
    while (unit + 1 < v->program->map.units &&
           v->program->map.stage[unit + 1] == v->program->map.stage[unit]) {
        unit++;
    }
    return unit;
}
// The factors by which a weight part is scaled must be known.
static inline void validate_scale(Validator *v, int rank, const Action *a) {
    const Program *p = v->program;
    const bool far = program_crosses(p) && p->clips == CLIPS_ALL && p->map.stage[a->unit] > 0,
               here = program_waits(p) || (program_crosses(p) && a->unit == 0);
    if (far && !validator_has_factors(v, rank, a, validator_end(v, a->unit))) {
        validator_fail(v, rank, a, "not all factors are there");
    }
    if (!far && here && !(*validator_done(v, rank, 0, a->micro) & CLIPPED)) {
        validator_fail(v, rank, a, "norms are not known: CLIP has not run");
    }
}
static inline void validate_backward_weight(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    bool ready = a->unit ? (*me & DONE_INPUT)
                         : (*me & DONE_FORWARD) && validator_there(v, rank, a, 1, DONE_INPUT, true);
    if (!ready) { validator_fail(v, rank, a, "its backward input has not run"); }
    if (*me & DONE_WEIGHT) { validator_fail(v, rank, a, "runs twice"); }
    validate_scale(v, rank, a);
    if (!validator_recomputed(v, rank, a)) {
        validator_fail(v, rank, a, "its activations were not recomputed");
    }
    *me |= DONE_WEIGHT;
    v->open[validator_micro(v, rank, a->micro)]--;
    if (a->unit) { v->held[rank].works--; }
    validator_free(v, rank, a->micro);
}
static inline void validate_recompute(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    if (!(*me & DONE_FORWARD) || (*me & DONE_INPUT)) {
        validator_fail(v, rank, a, "belongs between its forward and its backward");
    }
    // There is one set of recomputed block activations: the former content is lost.
    v->recomputed[rank] = (int64_t)validator_index(v, rank, a->unit, a->micro);
}
static inline void validate_clip(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, 0, a->micro);
    bool any = false;
    if (*me & CLIPPED) { validator_fail(v, rank, a, "runs twice"); }
    for (int u = 0; u < v->program->map.units; u++) {
        unsigned char d = *validator_done(v, rank, u, a->micro);
        if (u && (d & DONE_FORWARD) && !(d & DONE_INPUT)) {
            validator_fail(v, rank, a, "the norms of unit %d are not known", u);
        }
        any |= (d & DONE_FORWARD) != 0;
    }
    if (!any) { validator_fail(v, rank, a, "no forward has run"); }
    if (program_crosses(v->program) && a->unit == 0) {
        if (!validator_there(v, rank, a, 1, DONE_INPUT, true)) {
            validator_fail(v, rank, a, "the gradient of the embedding's output is not there");
        }
        for (int u = 0; u < v->program->map.units; u++) {
            bool missing =
                program_sends_norms(v->program, u) && !validator_has_factors(v, rank, a, u);
            if (missing) {
                validator_fail(v, rank, a, "not all norms of stage %d are there",
                               v->program->map.stage[u]);
            }
        }
        validator_keep(v, rank, a);
    }
    *me |= CLIPPED;
}
static inline void validate_tied(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    if (!(*me & DONE_INPUT)) { validator_fail(v, rank, a, "its backward input has not run"); }
    if (*me & DONE_TIED) { validator_fail(v, rank, a, "runs twice"); }
    if (!validator_has_factors(v, rank, a, a->unit)) {
        validator_fail(v, rank, a, "not all factors are there");
    }
    *me |= DONE_TIED;
    validator_forget(v, rank, a->micro);
}
// Returns whether the rank computes the rows of a message in this unit.
static inline bool validator_holds(Validator *v, int rank, const Action *a, int unit) {
    const int64_t *rows = &v->rows[2 * validator_index(v, rank, unit, a->micro)];
    return (*validator_done(v, rank, unit, a->micro) & DONE_FORWARD) && a->first_row >= rows[0] &&
           a->first_row + a->rows <= rows[0] + rows[1];
}
static inline void validate_send(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    bool forward = a->kind == ACT_SEND_FORWARD;
    if (forward && !(*me & DONE_FORWARD)) {
        validator_fail(v, rank, a, "sends an output that is not computed");
    }
    if (forward && (*me & DONE_WEIGHT)) {
        validator_fail(v, rank, a, "sends an output that is gone");
    }
    if (!forward && !(*me & DONE_INPUT)) {
        validator_fail(v, rank, a, "sends a gradient that is not computed");
    }
    if (!a->rows || !validator_holds(v, rank, a, a->unit)) {
        validator_fail(v, rank, a, "sends rows that it does not hold");
    }
}
// NORM is sent from the stage of its unit to the first stage, FACTOR back. Both need the rank's
// slot for the micro-batch. CLIP runs between them.
static inline void validate_norm_message(Validator *v, int rank, const Action *a) {
    // far: the rank is not on the first stage
    const bool norm = a->kind == ACT_SEND_NORM || a->kind == ACT_RECV_NORM,
               far = norm == action_sends(a->kind);
    const int unit = far ? a->unit : 0;
    unsigned char place = *validator_done(v, rank, 0, a->micro);
    if (!program_crosses(v->program) || (norm && !program_sends_norms(v->program, a->unit))) {
        validator_fail(v, rank, a, "no norm crosses stages here");
    }
    if (!a->rows || !validator_holds(v, rank, a, unit)) {
        validator_fail(v, rank, a, "the rank does not compute these rows");
    }
    // units of this stage (others have no forward here)
    for (int u = 0; far && norm && u <= a->unit; u++) {
        unsigned char d = *validator_done(v, rank, u, a->micro);
        bool counts = v->program->clips == CLIPS_ALL || u == a->unit;
        if (counts && (d & DONE_FORWARD) && !(d & DONE_INPUT)) {
            validator_fail(v, rank, a, "the norms of unit %d are not known", u);
        }
    }
    if (a->kind == ACT_RECV_NORM && (place & CLIPPED)) {
        validator_fail(v, rank, a, "comes after its use");
    }
    if (a->kind == ACT_RECV_NORM) { validator_keep(v, rank, a); }
    if (a->kind == ACT_SEND_FACTOR && !(place & CLIPPED)) {
        validator_fail(v, rank, a, "sends factors before CLIP");
    }
    if (!(*validator_done(v, rank, 0, a->micro) & KEPT)) {
        validator_fail(v, rank, a, "its place is gone");
    }
    if (a->kind == ACT_SEND_FACTOR) {
        received_add(&v->factors[validator_index(v, rank, 0, a->micro)], a);
        validator_forget(v, rank, a->micro);
    }
    if (action_sends(a->kind) ||
        !validator_mark(v, rank, a, a->unit, norm ? SAMPLE_NORMED : SAMPLE_SCALED, "has come")) {
        return;
    }
    received_add(&v->factors[validator_index(v, rank, a->unit, a->micro)], a);
}
// RECV_FORWARD(unit) brings rows of the input of unit + 1; RECV_BACKWARD(unit) brings rows of the
// gradient of the output of unit - 1.
static inline void validate_receive(Validator *v, int rank, const Action *a) {
    const bool backward = a->kind == ACT_RECV_BACKWARD;
    const int to = backward ? a->unit - 1 : a->unit + 1;
    if (to < 0 || to == v->program->map.units) {
        validator_fail(v, rank, a, "no unit wants it");
        return;
    }
    unsigned char *me = validator_done(v, rank, to, a->micro),
                  flag = backward ? HAVE_GRADIENT : HAVE_INPUT;
    Received *r = &v->received[2 * validator_index(v, rank, to, a->micro) + backward];
    int64_t *held = backward ? &v->held[rank].gradients : &v->held[rank].inputs;
    int64_t limit = backward ? v->program->limits[rank].gradients : v->program->limits[rank].inputs;
    if (*me & (backward ? DONE_INPUT | DONE_WEIGHT : DONE_FORWARD)) {
        validator_fail(v, rank, a, "comes after its use");
    }
    if (backward && !validator_holds(v, rank, a, to)) {
        validator_fail(v, rank, a, "the rank does not compute these rows");
    }
    if (!validator_mark(v, rank, a, to, backward ? SAMPLE_CAME_BACK : SAMPLE_CAME, "has come")) {
        return;
    }
    if (!(*me & flag) && ++*held > limit) {
        validator_fail(v, rank, a, "the places of %" PRId64 " micro-batches are taken", limit);
    }
    *me |= flag;
    received_add(r, a);
}

// Points to the user of a storage's slot; NULL if the storage shares none.
static inline int *validator_user(const Validator *v, int *users, const int *slots, int rank,
                                  int storage) {
    return slots && slots[storage] >= 0 ? &users[rank * v->program->map.storages + slots[storage]]
                                        : NULL;
}
static inline SumPlace validator_sum_place(const Validator *v, int storage) {
    return v->program->map.sums ? v->program->map.sums[storage] : SUM_STAYS;
}
static inline void validate_contribution(Validator *v, int rank, const Action *a, int storage) {
    size_t at = validator_span(v, rank, a->micro, storage);
    int *user = validator_user(v, v->grad_user, v->program->map.grad_slot, rank, storage);
    if (v->reduced[at]) { validator_fail(v, rank, a, "storage %d is already reduced", storage); }
    if (user && *user >= 0 && *user != storage) {
        validator_fail(v, rank, a, "the slot of storage %d holds the gradient of storage %d",
                       storage, *user);
    }
    const int sum = v->sum[rank * v->program->map.storages + storage];
    if (sum == SUM_IN_SLOT) {
        validator_fail(v, rank, a, "the sum of storage %d has not left", storage);
    }
    if (sum == SUM_ON_HOST && validator_sum_place(v, storage) == SUM_COMES_BACK) {
        validator_fail(v, rank, a, "the sum of storage %d is not back", storage);
    }
    if (user) { *user = storage; }
    v->contributions[at]--;
}
static inline void validate_norm(Validator *v, int rank, const Action *a) {
    for (int s = 0; s < v->program->map.storages; s++) {
        const int spans = v->program->map.reduces_often[s] ? v->spans : 1;
        for (int i = 0; i < spans && v->member[rank * v->program->map.storages + s]; i++) {
            if (!v->reduced[validator_span(v, rank, i, s)]) {
                validator_fail(v, rank, a, "storage %d is not reduced", s);
            }
        }
        if (v->sum[rank * v->program->map.storages + s] == SUM_IN_SLOT) {
            validator_fail(v, rank, a, "the sum of storage %d has not left", s);
        }
    }
    v->normed[rank] = true;
}
static inline void validate_gather(Validator *v, int rank, const Action *a) {
    const UnitMap *map = &v->program->map;
    int at = rank * map->storages + a->storage,
        *user = validator_user(v, v->param_user, map->param_slot, rank, a->storage);
    if (a->version != v->updated[at]) {
        validator_fail(v, rank, a, "version %" PRId64 " is not the one that exists", a->version);
    }
    if (v->acquired[at] || (map->gathers[a->storage] && v->flying[at])) {
        validator_fail(v, rank, a, "its parameters are in use");
    }
    if (user && *user >= 0) { validator_fail(v, rank, a, "its slot holds storage %d", *user); }
    if (a->near && !v->gathered[at]) {
        validator_fail(v, rank, a, "no gather has made the copies");
    }
    if (user) { *user = a->storage; }
    v->flying[at] = v->gathered[at] = map->gathers[a->storage];
}
static inline void validate_acquire(Validator *v, int rank, const Action *a) {
    int at = rank * v->program->map.storages + a->storage;
    if (v->acquired[at]) { validator_fail(v, rank, a, "is acquired already"); }
    if (a->version != v->updated[at]) {
        validator_fail(v, rank, a, "version %" PRId64 " is not the one that exists", a->version);
    }
    if (v->program->map.gathers[a->storage] && !v->flying[at]) {
        validator_fail(v, rank, a, "no gather is under way");
    }
    v->acquired[at] = 1;
}
static inline void validate_release(Validator *v, int rank, const Action *a) {
    int at = rank * v->program->map.storages + a->storage,
        *user = validator_user(v, v->param_user, v->program->map.param_slot, rank, a->storage);
    if (!v->acquired[at]) { validator_fail(v, rank, a, "is not acquired"); }
    if (user) { *user = -1; }
    v->acquired[at] = v->flying[at] = 0;
}
static inline void validate_reduce(Validator *v, int rank, const Action *a) {
    size_t at = validator_span(v, rank, a->micro, a->storage);
    int *user = validator_user(v, v->grad_user, v->program->map.grad_slot, rank, a->storage);
    if (v->contributions[at]) {
        validator_fail(v, rank, a, "%d contributions are still to come", v->contributions[at]);
    }
    if (v->reduced[at]) { validator_fail(v, rank, a, "runs twice"); }
    const bool far = validator_sum_place(v, a->storage);
    if (user && !far) { *user = -1; }
    if (far) { v->sum[rank * v->program->map.storages + a->storage] = SUM_IN_SLOT; }
    v->reduced[at] = 1;
}
static inline void validate_sum(Validator *v, int rank, const Action *a) {
    const bool leaves = a->kind == ACT_EVICT_SUM;
    signed char *sum = &v->sum[rank * v->program->map.storages + a->storage];
    int *user = validator_user(v, v->grad_user, v->program->map.grad_slot, rank, a->storage);
    if (*sum != (leaves ? SUM_IN_SLOT : SUM_ON_HOST)) {
        validator_fail(v, rank, a, "its sum is not there");
    }
    if (!leaves && user && *user >= 0) {
        validator_fail(v, rank, a, "its slot holds the gradient of storage %d", *user);
    }
    *sum = leaves ? SUM_ON_HOST : SUM_IS_BACK;
    if (user) { *user = leaves ? -1 : a->storage; }
}
static inline void validate_update(Validator *v, int rank, const Action *a) {
    int at = rank * v->program->map.storages + a->storage;
    if (v->program->map.delays) {
        if (v->begun[at]) { validator_fail(v, rank, a, "runs twice"); }
        if (v->sum[at] != SUM_BEGINS && v->sum[at] != SUM_IN_SLOT) {
            validator_fail(v, rank, a, "its gradient is written over");
        }
        v->begun[at] = v->made[at] = v->program->map.pieces[a->storage];
        return;
    }
    if (!v->reduced[validator_span(v, rank, 0, a->storage)] || !v->normed[rank]) {
        validator_fail(v, rank, a, "needs REDUCE and NORM first");
    }
    if (v->acquired[at]) { validator_fail(v, rank, a, "its parameters are in use"); }
    if (v->updated[at]) { validator_fail(v, rank, a, "runs twice"); }
    const UnitMap *map = &v->program->map;
    const int pieces = map->pieces ? map->pieces[a->storage] : 0;
    const bool missing = pieces && map->on_disk[a->storage] && a->use >= v->read[at];
    if (missing || (pieces && (a->use != v->made[at] || a->use >= v->begun[at]))) {
        validator_fail(v, rank, a, "piece %d is not there", a->use);
    }
    v->updated[at] = ++v->made[at] >= pieces && !(pieces && map->cpu_update);
}
// A piece of states on the host goes to its update and takes a slot (begins), or goes back. If the
// host updates, the gradient is what goes to the update, and new parameters go back.
static inline void validate_piece(Validator *v, int rank, const Action *a) {
    const UnitMap *map = &v->program->map;
    const int at = rank * map->storages + a->storage;
    const bool begins = (a->kind == ACT_EVICT) == map->cpu_update;
    int *count = begins ? v->begun : v->ended;
    if (a->use != count[at] || a->use >= map->pieces[a->storage]) {
        validator_fail(v, rank, a, "piece %d is not the next one", a->use);
    }
    if (!begins && a->use >= v->made[at]) {
        validator_fail(v, rank, a, "piece %d is not updated", a->use);
    }
    if (begins && !map->cpu_update && map->on_disk[a->storage] && a->use >= v->read[at]) {
        validator_fail(v, rank, a, "piece %d is not on the host", a->use);
    }
    if (begins && v->slots[rank] == MOVING_PIECES) {
        validator_fail(v, rank, a, "its slot is taken");
    }
    const bool waits = map->cpu_update || validator_sum_place(v, a->storage);
    if (begins && waits &&
        (!v->reduced[validator_span(v, rank, 0, a->storage)] || !v->normed[rank])) {
        validator_fail(v, rank, a, "needs REDUCE and NORM first");
    }
    if (map->delays && v->acquired[at]) { validator_fail(v, rank, a, "its parameters are in use"); }
    count[at]++;
    v->slots[rank] += begins ? 1 : map->delays ? 0 : -1;
    if (!begins && map->cpu_update) { v->updated[at] = v->ended[at] == map->pieces[a->storage]; }
}

// READ brings a piece from the disk into a host buffer. WRITE takes it back when it is updated and
// on the host.
static inline void validate_stored(Validator *v, int rank, const Action *a) {
    const UnitMap *map = &v->program->map;
    const int at = rank * map->storages + a->storage;
    const bool reads = a->kind == ACT_READ;
    int *count = reads ? v->read : v->written;
    if (!map->on_disk[a->storage] || a->use != count[at] || a->use >= map->pieces[a->storage]) {
        validator_fail(v, rank, a, "piece %d is not the next one on disk", a->use);
    }
    if (reads && v->stored[rank] == DISK_PIECES) {
        validator_fail(v, rank, a, "its buffer on the host is taken");
    }
    if (!reads && a->use >= v->ended[at]) {
        validator_fail(v, rank, a, "piece %d is not back from its update", a->use);
    }
    count[at]++;
    v->stored[rank] += reads ? 1 : -1;
}

static inline bool validate_ranges(Validator *v, int rank, const Action *a) {
    const Program *p = v->program;
    const bool per_unit = action_is(a->kind, COMPUTES | OF_ROWS | OF_STASH),
               of_storage = action_is(a->kind, OF_STORAGE),
               good_storage = a->storage >= 0 && a->storage < p->map.storages,
               per_micro =
                   per_unit || action_is(a->kind, OF_MICRO) ||
                   (a->kind == ACT_REDUCE && good_storage && p->map.reduces_often[a->storage]);
    bool good =
        !per_unit || (a->unit >= 0 && a->unit < p->map.units && a->rows >= 0 && a->first_row >= 0 &&
                      a->rows <= p->samples && a->first_row <= p->samples - a->rows);
    good = good && (!per_micro || (a->micro >= 0 && a->micro < p->micro_batches));
    good = good && (!of_storage || good_storage);
    if (!good) { validator_fail(v, rank, a, "a field is out of range"); }
    return good;
}

static inline void validate_compute(Validator *v, int rank, const Action *a) {
    if (action_reads_parameters(a->kind)) { validate_parameters(v, rank, a); }
    if (a->kind != ACT_FORWARD) { validate_rows(v, rank, a); }
    const int makes = action_makes_stash(&v->program->map, a);
    if (action_reads_stash(&v->program->map, a) >= 0 && !validator_has_stash(v, rank, a)) {
        validator_fail(v, rank, a, "its activations are not there");
    }
    if (makes >= 0) { validator_enter(v, rank, a, makes); }
    for (int k = 0; k < v->program->map.of_unit_count[a->unit]; k++) {
        int storage = v->program->map.of_unit[a->unit][k];
        if (action_contributes(&v->program->map, a, storage)) {
            validate_contribution(v, rank, a, storage);
        }
    }
    switch (a->kind) {
    case ACT_FORWARD: validate_forward(v, rank, a); break;
    case ACT_BACKWARD_INPUT: validate_backward_input(v, rank, a); break;
    case ACT_BACKWARD_WEIGHT: validate_backward_weight(v, rank, a); break;
    case ACT_RECOMPUTE: validate_recompute(v, rank, a); break;
    case ACT_TIED: validate_tied(v, rank, a); break;
    default: validate_clip(v, rank, a);
    }
}
static inline void validator_visit(void *context, int rank, const Action *a, int peer) {
    (void)peer;
    Validator *v = (Validator *)context;
    if (*v->error || !validate_ranges(v, rank, a)) { return; }
    switch (a->kind) {
    case ACT_SEND_FORWARD:
    case ACT_SEND_BACKWARD: validate_send(v, rank, a); break;
    case ACT_RECV_FORWARD:
    case ACT_RECV_BACKWARD: validate_receive(v, rank, a); break;
    case ACT_SEND_NORM:
    case ACT_RECV_NORM:
    case ACT_SEND_FACTOR:
    case ACT_RECV_FACTOR: validate_norm_message(v, rank, a); break;
    case ACT_PREFETCH: validate_gather(v, rank, a); break;
    case ACT_ACQUIRE: validate_acquire(v, rank, a); break;
    case ACT_RELEASE: validate_release(v, rank, a); break;
    case ACT_REDUCE: validate_reduce(v, rank, a); break;
    case ACT_UPDATE: validate_update(v, rank, a); break;
    case ACT_FETCH:
    case ACT_EVICT: validate_piece(v, rank, a); break;
    case ACT_FETCH_STASH:
    case ACT_EVICT_STASH: validate_stash(v, rank, a); break;
    case ACT_FETCH_SUM:
    case ACT_EVICT_SUM: validate_sum(v, rank, a); break;
    case ACT_READ:
    case ACT_WRITE: validate_stored(v, rank, a); break;
    case ACT_NORM: validate_norm(v, rank, a); break;
    default: validate_compute(v, rank, a);
    }
}

// Collectives are matched by their order. So two ranks must start those in which both take part in
// the same order. A rank takes part in the collectives of the storages to which it contributes.
// Returns the index of the first such action from i on.
static inline int validator_next_collective(const Validator *v, int rank, int other, int i) {
    const Schedule *s = &v->program->rank[rank];
    const bool *mine = v->member + rank * v->program->map.storages,
               *theirs = v->member + other * v->program->map.storages;
    for (; i < s->count; i++) {
        const Action *a = &s->actions[i];
        if (action_is(a->kind, COLLECTIVE) && mine[a->storage] &&
            theirs[a->storage]) {
            break;
        }
    }
    return i;
}
// Returns whether two ranks take part in any common collective.
static inline bool validator_meet(const Validator *v, int q, int r) {
    const bool *mine = v->member + q * v->program->map.storages,
               *theirs = v->member + r * v->program->map.storages;
    int storage = 0;
    while (storage < v->program->map.storages && !(mine[storage] && theirs[storage])) { storage++; }
    return storage < v->program->map.storages;
}
static inline void validate_order(Validator *v, int q, int r) {
    const Schedule *a = &v->program->rank[q], *b = &v->program->rank[r];
    for (int i = 0, j = 0; !*v->error; i++, j++) {
        i = validator_next_collective(v, q, r, i);
        j = validator_next_collective(v, r, q, j);
        const Action *x = i < a->count ? &a->actions[i] : NULL,
                     *y = j < b->count ? &b->actions[j] : NULL;
        if (!x && !y) { return; }
        bool same = x && y && x->kind == y->kind && x->storage == y->storage && x->near == y->near;
        if (!same) {
            snprintf(v->error, v->error_bytes,
                     "rank %d: %s of storage %d where rank %d has %s of storage %d", r,
                     y ? action_name(y->kind) : "nothing", y ? y->storage : -1, q,
                     x ? action_name(x->kind) : "nothing", x ? x->storage : -1);
        }
    }
}
// Returns whether a rank takes part in the same collectives as the rank before it. Then it is
// compared with that rank only, and other ranks are compared with the first of such a row.
static inline bool validator_alike(const Validator *v, int rank) {
    const size_t storages = (size_t)v->program->map.storages;
    return rank && !memcmp(v->member + (size_t)rank * storages,
                           v->member + (size_t)(rank - 1) * storages, storages * sizeof(bool));
}
static inline void validate_orders(Validator *v) {
    // first rank of each row
    int *first = (int *)checked_malloc((size_t)v->program->ranks * sizeof(int), "validator"),
        rows = 0;
    for (int r = 0; r < v->program->ranks; r++) {
        const bool alike = validator_alike(v, r);
        if (alike) { validate_order(v, r - 1, r); }
        for (int i = 0; i < rows && !alike; i++) {
            if (validator_meet(v, first[i], r)) { validate_order(v, first[i], r); }
        }
        if (!alike) { first[rows++] = r; }
    }
    free(first);
}

// A start of a collective may wait for its other members. Then none of them may wait for a message
// that this rank sends later.
static inline void validate_meetings(Validator *v) {
    const Program *p = v->program;
    int *at = (int *)checked_calloc((size_t)p->ranks, sizeof(int), "validator");
    const int stuck = schedule_walk_collectives(p, at);
    if (stuck >= 0) {
        const Action *a = &p->rank[stuck].actions[at[stuck]];
        validator_fail(v, stuck, a,
                       "deadlock where collectives wait for their members: action %d waits for "
                       "ever (peer %d)",
                       at[stuck], a->peer);
    }
    free(at);
}

// By the end every forward needs its backward weight, every received input its forward, and every
// unit must have computed every sample.
static inline void validate_end_of_work(Validator *v) {
    const Program *p = v->program;
    for (int r = 0; r < p->ranks; r++) {
        for (int u = v->first[r]; u < v->end[r]; u++) {
            for (int m = 0; m < p->micro_batches; m++) {
                unsigned char d = *validator_done(v, r, u, m);
                if ((d & DONE_FORWARD) && !(d & DONE_WEIGHT) && !*v->error) {
                    snprintf(v->error, v->error_bytes,
                             "rank %d: unit %d micro-batch %d has a forward but no backward weight",
                             r, u, m);
                }
                if (program_crosses(p) && u == p->map.units - 1 && (d & DONE_FORWARD) &&
                    !(d & DONE_TIED) && !*v->error) {
                    snprintf(v->error, v->error_bytes,
                             "rank %d: unit %d micro-batch %d has a forward but no TIED", r, u, m);
                }
                if ((d & HAVE_INPUT) && !(d & DONE_FORWARD) && !*v->error) {
                    snprintf(v->error, v->error_bytes,
                             "rank %d: unit %d micro-batch %d has an input but no forward", r, u,
                             m);
                }
            }
        }
    }
    for (int64_t i = 0; i < p->map.units * p->samples; i++) {
        if (!(v->covered[i] & SAMPLE_COMPUTED) && !*v->error) {
            snprintf(v->error, v->error_bytes,
                     "unit %" PRId64 " computes sample %" PRId64 " nowhere", i / p->samples,
                     i % p->samples);
        }
    }
}
// By the end every storage must be updated, and nothing may still be held.
static inline void validate_end(Validator *v) {
    const Program *p = v->program;
    validate_end_of_work(v);
    for (int r = 0; r < p->ranks; r++) {
        for (int s = 0; s < p->map.storages; s++) {
            int at = r * p->map.storages + s;
            bool bad = (v->member[at] && !v->updated[at]) || v->acquired[at] || v->flying[at] ||
                       v->begun[at] != v->ended[at] || v->read[at] != v->written[at];
            if (bad && !*v->error) {
                snprintf(v->error, v->error_bytes,
                         "rank %d: storage %d is not updated, or still held, at the end", r, s);
            }
        }
    }
    if (!*v->error) { validate_orders(v); }
    if (!*v->error) { validate_meetings(v); }
}

// Extends a rank's range of units by those of an action. Messages set flags at a neighbouring
// unit.
static inline void validator_reach(Validator *v, int rank, const Action *a) {
    if (a->unit < 0) { return; }
    v->first[rank] = (int)max_i64(0, min_i64(v->first[rank], a->unit - 1));
    v->end[rank] = (int)min_i64(v->program->map.units, max_i64(v->end[rank], (int64_t)a->unit + 2));
}
// Allocates what the validator keeps of each unit and micro-batch, of gradients and parameters.
static inline void validator_allocate_units(Validator *v, const Program *p) {
    size_t per_storage = (size_t)p->ranks * (size_t)p->map.storages;
    v->done = (unsigned char *)checked_calloc((size_t)p->ranks * (size_t)p->map.units,
                                              (size_t)max_i64(p->micro_batches, 1), "validator");
    v->spans = 1;
    for (int s = 0; s < p->map.storages; s++) {
        v->spans = p->map.reduces_often[s] ? (int)max_i64(p->micro_batches, 1) : v->spans;
    }
    v->contributions =
        (int *)checked_calloc(per_storage * (size_t)v->spans, sizeof(int), "validator");
    v->reduced = (signed char *)checked_calloc(per_storage * (size_t)v->spans, 1, "validator");
    v->acquired = (signed char *)checked_calloc(per_storage, 1, "validator");
    v->updated = (signed char *)checked_calloc(per_storage, 1, "validator");
    v->flying = (signed char *)checked_calloc(per_storage, 1, "validator");
    v->gathered = (signed char *)checked_calloc(per_storage, 1, "validator");
    v->param_user = (int *)checked_malloc(per_storage * sizeof(int), "validator");
    v->grad_user = (int *)checked_malloc(per_storage * sizeof(int), "validator");
    for (size_t i = 0; i < per_storage; i++) { v->param_user[i] = v->grad_user[i] = -1; }
    v->rows = (int64_t *)checked_calloc((size_t)p->ranks * (size_t)p->map.units,
                                        2 * sizeof(int64_t) * (size_t)max_i64(p->micro_batches, 1),
                                        "validator");
    v->received = (Received *)checked_calloc(
        (size_t)p->ranks * (size_t)p->map.units,
        2 * sizeof(Received) * (size_t)max_i64(p->micro_batches, 1), "validator");
    v->factors = (Received *)checked_calloc((size_t)p->ranks * (size_t)p->map.units,
                                            sizeof(Received) * (size_t)max_i64(p->micro_batches, 1),
                                            "validator");
}
// Allocates what it keeps of ranks, of stashed activations and of states on the host and the disk.
static inline void validator_allocate_ranks(Validator *v, const Program *p) {
    const size_t per_storage = (size_t)p->ranks * (size_t)p->map.storages;
    v->recomputed = (int64_t *)checked_malloc((size_t)p->ranks * sizeof(int64_t), "validator");
    for (int r = 0; r < p->ranks; r++) { v->recomputed[r] = -1; }
    v->stashed = (bool *)checked_calloc((size_t)p->ranks * (size_t)p->map.units,
                                        (size_t)max_i64(p->micro_batches, 1), "validator");
    v->stash_user =
        (int64_t *)checked_malloc((size_t)p->ranks * STASH_SLOTS * sizeof(int64_t), "validator");
    for (int i = 0; i < p->ranks * STASH_SLOTS; i++) { v->stash_user[i] = -1; }
    v->covered =
        (unsigned char *)checked_calloc((size_t)p->map.units, (size_t)p->samples, "validator");
    v->member = (bool *)checked_calloc(per_storage, sizeof(bool), "validator");
    v->held = (Limits *)checked_calloc((size_t)p->ranks, sizeof(Limits), "validator");
    v->normed = (bool *)checked_calloc((size_t)p->ranks, sizeof(bool), "validator");
    v->sum = (signed char *)checked_calloc(per_storage, 1, "validator");
    v->begun =
        (int *)checked_calloc(5 * per_storage + 2 * (size_t)p->ranks, sizeof(int), "validator");
    v->ended = v->begun + per_storage;
    v->made = v->ended + per_storage;
    v->read = v->made + per_storage;
    v->written = v->read + per_storage;
    v->slots = v->written + per_storage;
    v->stored = v->slots + p->ranks;
    v->forwards = (int *)checked_calloc(
        2 * (size_t)p->ranks, (size_t)max_i64(p->micro_batches, 1) * sizeof(int), "validator");
    v->open = v->forwards + (size_t)p->ranks * (size_t)p->micro_batches;
    v->first = (int *)checked_calloc(2 * (size_t)p->ranks, sizeof(int), "validator");
    v->end = v->first + p->ranks;
}
static inline void validator_start(Validator *v, const Program *p) {
    memset(v, 0, sizeof *v);
    v->program = p;
    validator_allocate_units(v, p);
    validator_allocate_ranks(v, p);
    for (int r = 0; r < p->ranks; r++) {
        v->first[r] = p->map.units;
        for (int i = 0; i < p->rank[r].count; i++) {
            const Action *a = &p->rank[r].actions[i];
            validator_reach(v, r, a);
            bool good = action_computes(a->kind) && a->unit >= 0 && a->unit < p->map.units &&
                        a->micro >= 0 && a->micro < p->micro_batches;
            for (int k = 0; good && k < p->map.of_unit_count[a->unit]; k++) {
                int storage = p->map.of_unit[a->unit][k];
                if (!action_contributes(&p->map, a, storage)) { continue; }
                v->contributions[validator_span(v, r, a->micro, storage)]++;
                v->member[r * p->map.storages + storage] = true;
            }
        }
    }
}

static inline void validator_stop(Validator *v) {
    free(v->done);
    free(v->contributions);
    free(v->acquired);
    free(v->reduced);
    free(v->updated);
    free(v->normed);
    free(v->rows);
    free(v->received);
    free(v->factors);
    free(v->recomputed);
    free(v->covered);
    free(v->held);
    free(v->member);
    free(v->flying);
    free(v->gathered);
    free(v->param_user);
    free(v->grad_user);
    free(v->begun);
    free(v->sum);
    free(v->stashed);
    free(v->stash_user);
    free(v->forwards);
    free(v->first);
}
// Plays the program. A rank that waits for ever is a violation.
static inline void validator_walk(Validator *v, ScheduleVisit visit, void *context) {
    const Program *p = v->program;
    int *at = (int *)checked_calloc((size_t)p->ranks, sizeof(int), "validator");
    int stuck = schedule_walk(p, at, visit, context);
    if (stuck >= 0 && !*v->error) {
        const Action *a = &p->rank[stuck].actions[at[stuck]];
        validator_fail(v, stuck, a, "deadlock: action %d waits for ever (peer %d)", at[stuck],
                       a->peer);
    }
    free(at);
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
