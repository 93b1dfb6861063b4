// schedule.h: who computes what, when: as data. One array of actions per rank, for ONE optimizer step.
//
// Builders emit compute and message actions. Policies lower them: they insert RECOMPUTE, PREFETCH, ACQUIRE, RELEASE, REDUCE,
// NORM, UPDATE into the same array (zero.h). Then nothing is hidden: ONE validator proves a program before it runs, ONE executor
// runs it (executor.h), ONE simulator times it, ONE printer draws it; predicted traffic is a sum over actions.
//
// Fields     micro     micro-batch of this step, from 0
//            first_row, rows   its samples, as positions among the S samples of the step (rows may differ per action and rank, and
//                     be 0: a rank without samples takes part in what the others do)
//            unit, storage     as gpt.h numbers them; this header knows them only through a UnitMap
//            step, version     relative to the step that runs: version 0 are the parameters before its update, 1 after
//            peer              the other rank of SEND and RECV
//            near              PREFETCH: from the copies inside the partition (zero.h: hpZ)
//            use               of parameters that come for each use (layout.h: guests): which one of the step
// Invariants (proved by schedule_validate): every SEND meets its RECV with the same unit, micro-batch and rows, without
//            deadlock when messages are rendezvous; it sends rows that were computed, and each row comes once, before its use; a unit's
//            forward follows its input, all rows of it (several messages may bring them), its backward input follows its
//            forward and the next unit's backward, its backward weight follows its backward input, and its micro-batch's CLIP
//            where there is one, which follows all its backward inputs, and the NORMs of all other stages where these have a part in it; what is
//            scaled on another stage follows all of its FACTORs, which follow CLIP; parameters are acquired
//            while they are used, and where they come for each use (UnitMap: gathers), a PREFETCH is under way by then, into a
//            room that nobody uses; REDUCE(storage) follows every contribution of the step, or of its micro-batch, and before
//            it nobody writes into its room; UPDATE follows REDUCE and NORM, and no acquire of version v + 1 comes before the
//            update that makes it; live activations and what was received fit the rank's limits; each unit computes each sample of the step once; all ranks
//            start the collectives in which they both take part in one order.
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include "support/base.h" // checked_malloc, die

typedef enum {
    ACT_FORWARD,
    ACT_BACKWARD_INPUT,
    ACT_BACKWARD_WEIGHT,
    ACT_RECOMPUTE,
    ACT_CLIP,
    ACT_TIED, // compute, per unit and micro-batch (CLIP, of a stage's first unit: every sample's norm is known; TIED: see Clips)
    ACT_SEND_FORWARD,
    ACT_RECV_FORWARD, // after its SEND, as all of them
    ACT_SEND_BACKWARD,
    ACT_RECV_BACKWARD, // a unit's output / the gradient of a unit's input
    ACT_SEND_NORM,
    ACT_RECV_NORM,
    ACT_SEND_FACTOR,
    ACT_RECV_FACTOR, // each sample's norm in a stage / the factor that follows; of the stage's last unit, whose other end is the first stage
    ACT_SEND_SUM,
    ACT_RECV_SUM, // of a storage: its gradient, summed over the micro-batches so far
    ACT_SEND_PARAMETERS,
    ACT_RECV_PARAMETERS, // of a storage: the version after the update of this step
    ACT_SEND_PART,
    ACT_RECV_PART, // of a storage: what one unit adds to a micro-batch's gradient
    ACT_SEND_TALLY,
    ACT_RECV_TALLY, // what a step has to tell: its loss, its norm
    ACT_PREFETCH,
    ACT_ACQUIRE,
    ACT_RELEASE,
    ACT_REDUCE,
    ACT_NORM,
    ACT_UPDATE, // states, per storage (NORM: all of them)
    ACT_ADD,    // a part of a sum that came
    ACT_TALLY,  // version 0: this rank adds to what a step has to tell; 1: it hears the whole
    ACTION_KINDS
} ActionKind;
static const char *const action_names[ACTION_KINDS] = {
    "FORWARD",      "BACKWARD_INPUT", "BACKWARD_WEIGHT", "RECOMPUTE",       "CLIP",      "TIED",        "SEND_FORWARD",
    "RECV_FORWARD", "SEND_BACKWARD",  "RECV_BACKWARD",   "SEND_NORM",       "RECV_NORM", "SEND_FACTOR", "RECV_FACTOR",
    "SEND_SUM",     "RECV_SUM",       "SEND_PARAMETERS", "RECV_PARAMETERS", "SEND_PART", "RECV_PART",   "SEND_TALLY",
    "RECV_TALLY",   "PREFETCH",       "ACQUIRE",         "RELEASE",         "REDUCE",    "NORM",        "UPDATE",
    "ADD",          "TALLY",
};
static inline bool action_computes(ActionKind kind) { return kind <= ACT_TIED; }
static inline bool action_reads_parameters(ActionKind kind) { return kind == ACT_FORWARD || kind == ACT_BACKWARD_INPUT || kind == ACT_RECOMPUTE; }
static inline bool action_is_message(ActionKind kind) { return kind >= ACT_SEND_FORWARD && kind <= ACT_RECV_TALLY; }
static inline bool action_sends(ActionKind kind) { return action_is_message(kind) && (kind - ACT_SEND_FORWARD) % 2 == 0; } // its RECV follows it
static inline bool action_receives(ActionKind kind) { return action_is_message(kind) && !action_sends(kind); }
static inline bool action_of_rows(ActionKind kind) { return kind >= ACT_SEND_FORWARD && kind <= ACT_RECV_FACTOR; } // a message of a micro-batch's rows

typedef struct {
    ActionKind kind;
    int unit, storage, micro, peer; // -1 where it does not apply
    int64_t first_row, rows;
    int64_t step, version;
    bool near;
    int use;
} Action;

enum { SCHEDULE_MAX = 1 << 22 }; // actions of a rank: some ten thousand micro-batches of a large model
typedef struct {
    Action *actions;
    int count, capacity;
} Schedule;

// The head's part of the gradient of wte is made by its input part (gpt.h), or, where samples are clipped, with the embedding's (dp.h): there, or,
// where that is on another stage, by TIED.
typedef enum { MADE_BY_WEIGHT_PART, MADE_BY_INPUT_PART, MADE_ELSEWHERE, MADE_BY_TIED } GradientMaker;

// Whose gradients of a sample have one norm, where samples are clipped (dp.h). wte is used by the first stage and by the last, so there is a
// norm that several stages know a part of: NORM brings the first stage what another one knows, CLIP makes a factor of all, FACTOR takes it to
// the others, and what is scaled by it waits there. Of groups inside stages that is TIED alone, the classifier's part of wte.
typedef enum {
    CLIPS_NOTHING,
    CLIPS_UNITS,  // each unit's
    CLIPS_STAGES, // a stage's: its weight parts follow its CLIP
    CLIPS_ALL     // all: all weight parts follow FACTOR
} Clips;

// What the plan must know of the model and of its states: which storages a unit uses, and which of them share rooms.
typedef struct {
    int units, storages;
    int (*of_unit)[2];
    int *of_unit_count;
    unsigned char (*made)[2];    // which part of the unit contributes to the gradient: a GradientMaker
    int *param_room, *grad_room; // [storages] the room that its gathered parameters, its gradient share with others'; -1: none
    bool *gathers;               // [storages] parameters come by PREFETCH before each use; else they stay
    bool *reduces_often;         // [storages] the gradient leaves by REDUCE in each micro-batch; else once
    bool *tied;                  // [storages] several stages use it: the gradient leaves after all others
    int *stage;                  // [units] of a pipeline in which samples are clipped; NULL: it is one stage, or they are not
    int lent;                    // storage that stays acquired from the last unit's backward pass to the first one's weight part, which reads it; -1: none
} UnitMap;

// What a rank has room for at once.
typedef struct {
    int64_t slots;             // micro-batches with activations: from its first forward to its last weight part
    int64_t inputs, gradients; // micro-batches whose input, whose gradient was received: from then to the last weight part
    int64_t works;             // backward inputs whose weight part has not run
    int64_t clips;             // micro-batches of a group that crosses stages: from a norm that is received, or made to be sent, to all that follows
} Limits;

static inline Limits limits_of_one(void) { // micro-batch, and no other stages
    const Limits one = {1, 0, 0, 1, 0};
    return one;
}
static inline Limits limits_of_both(Limits a, Limits b) {
    Limits both = {max_i64(a.slots, b.slots), max_i64(a.inputs, b.inputs), max_i64(a.gradients, b.gradients), max_i64(a.works, b.works),
                   max_i64(a.clips, b.clips)};
    return both;
}

// The whole job: one schedule per rank.
typedef struct {
    UnitMap map;
    int ranks, micro_batches;
    int64_t samples; // of a step: each unit computes each of them once, on some rank
    Limits *limits;  // [ranks]
    bool recompute;
    Clips clips;
    Schedule *rank;
} Program;
// Is there a norm that several stages know a part of?
static inline bool program_crosses(const Program *p) { return p->clips && p->map.stage; }
// Do weight parts of this rank wait for a norm over several units?
static inline bool program_waits(const Program *p) { return p->clips >= CLIPS_STAGES; }
// Is this unit the last one of a stage that sends its norms to the first stage?
static inline bool program_sends_norms(const Program *p, int unit) {
    if (!program_crosses(p) || p->map.stage[unit] == 0) { return false; }
    return unit == p->map.units - 1 || (p->clips == CLIPS_ALL && p->map.stage[unit + 1] != p->map.stage[unit]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Building
static inline Action action_make(ActionKind kind, int unit, int storage, int micro) {
    Action a = {kind, unit, storage, micro, -1, 0, 0, 0, 0, false, 0};
    return a;
}
static inline void schedule_add(Schedule *s, Action a) {
    if (s->count == SCHEDULE_MAX) {
        die(EXIT_INPUT, "choose a larger --micro-batch or a smaller --batch-tokens", "a step has more than %d actions", SCHEDULE_MAX);
    }
    if (s->count == s->capacity) {
        s->capacity = s->capacity ? 2 * s->capacity : 64;
        s->actions = (Action *)realloc(s->actions, (size_t)s->capacity * sizeof(Action));
        if (!s->actions) { die(EXIT_RESOURCES, NULL, "cannot hold a schedule of %d actions", s->capacity); }
    }
    s->actions[s->count++] = a;
}
// How many of a step's samples the actions span, from *first on.
static inline int64_t schedule_rows(const Schedule *s, int64_t *first) {
    int64_t begin = INT64_MAX, end = 0;
    for (int i = 0; i < s->count; i++) {
        const Action *a = &s->actions[i];
        if (a->rows) { begin = min_i64(begin, a->first_row), end = max_i64(end, a->first_row + a->rows); }
    }
    *first = end ? begin : 0;
    return end - *first;
}
static inline void schedule_free(Schedule *s) {
    free(s->actions);
    memset(s, 0, sizeof *s);
}
static inline void program_free(Program *p) {
    for (int r = 0; r < p->ranks; r++) { schedule_free(&p->rank[r]); }
    free(p->rank), free(p->map.of_unit), free(p->map.of_unit_count), free(p->map.made), free(p->map.param_room), free(p->map.grad_room);
    free(p->map.gathers), free(p->map.reduces_often), free(p->map.tied), free(p->map.stage), free(p->limits);
    memset(p, 0, sizeof *p);
}
// The same limits for all ranks.
static inline void program_limit(Program *p, Limits limits) {
    free(p->limits);
    p->limits = (Limits *)checked_malloc((size_t)p->ranks * sizeof(Limits), "limits");
    for (int r = 0; r < p->ranks; r++) { p->limits[r] = limits; }
}

// Sequential accumulation (the schedule of plain data parallelism): the step's `samples` are dealt to the ranks in
// contiguous, nearly equal parts; a rank works through its part, at most `micro_rows` samples at a time, forward then backward. All ranks
// have as many micro-batches, at least one, some of them the last one without samples: they gather and reduce together.
// training = false: forward only (evaluation).
static inline void schedule_sequential(Program *p, int64_t samples, int64_t micro_rows, bool training) {
    p->micro_batches = (int)min_i64(max_i64(1, ceil_div(ceil_div(samples, p->ranks), micro_rows)), SCHEDULE_MAX);
    for (int r = 0; r < p->ranks; r++) {
        int64_t begin = part_begin(samples, p->ranks, r), end = part_begin(samples, p->ranks, r + 1);
        for (int micro = 0; micro < p->micro_batches; micro++, begin = min_i64(begin + micro_rows, end)) {
            Action a = action_make(ACT_FORWARD, 0, -1, micro);
            a.first_row = begin, a.rows = min_i64(micro_rows, end - begin);
            for (a.unit = 0; a.unit < p->map.units; a.unit++) { schedule_add(&p->rank[r], a); }
            for (a.unit = p->map.units - 1; training && a.unit >= 0; a.unit--) {
                if (a.unit > 0) { a.kind = ACT_BACKWARD_INPUT, schedule_add(&p->rank[r], a); } // the embedding has no input gradient
                a.kind = ACT_BACKWARD_WEIGHT, schedule_add(&p->rank[r], a);
            }
        }
    }
    p->samples = samples;
    program_limit(p, limits_of_one());
}

// Lowering: keep only block inputs; compute a block's other activations again just before its backward.
static inline void schedule_lower_recompute(Program *p) {
    p->recompute = true;
    for (int r = 0; r < p->ranks; r++) {
        Schedule out = {NULL, 0, 0};
        for (int i = 0; i < p->rank[r].count; i++) {
            Action a = p->rank[r].actions[i];
            bool block = a.unit > 0 && a.unit < p->map.units - 1;
            if (a.kind == ACT_BACKWARD_INPUT && block) {
                Action again = a;
                again.kind = ACT_RECOMPUTE;
                schedule_add(&out, again);
            }
            schedule_add(&out, a);
        }
        schedule_free(&p->rank[r]);
        p->rank[r] = out;
    }
}

// Lowering: the weight parts of a micro-batch wait until its last input part has run, since a sample's factor depends on the norm of its
// gradient over all units of the rank. What other micro-batches do meanwhile stays where it is. (Of one stage: pipeline.h does it itself.)
static inline void lower_clip(Schedule *in, int micro_batches) {
    int *last = (int *)checked_malloc(2 * (size_t)micro_batches * sizeof(int), "lowering"), *first = last + micro_batches; // [micro] of its backward actions
    Schedule out = {NULL, 0, 0};
    for (int m = 0; m < micro_batches; m++) { first[m] = last[m] = -1; }
    for (int i = 0; i < in->count; i++) {
        const Action *a = &in->actions[i];
        if (a->kind != ACT_BACKWARD_INPUT && a->kind != ACT_BACKWARD_WEIGHT) { continue; }
        last[a->micro] = i, first[a->micro] = first[a->micro] < 0 ? i : first[a->micro];
    }
    for (int i = 0; i < in->count; i++) {
        Action a = in->actions[i];
        if (a.kind != ACT_BACKWARD_WEIGHT) { schedule_add(&out, a); }
        if (a.micro < 0 || last[a.micro] != i) { continue; }
        a.kind = ACT_CLIP, a.unit = 0;
        schedule_add(&out, a);
        for (int k = first[a.micro]; k <= i; k++) {
            if (in->actions[k].kind == ACT_BACKWARD_WEIGHT && in->actions[k].micro == a.micro) { schedule_add(&out, in->actions[k]); }
        }
    }
    free(last);
    schedule_free(in);
    *in = out;
}
static inline void schedule_lower_clip(Program *p) {
    p->clips = CLIPS_STAGES;
    for (int r = 0; r < p->ranks; r++) {
        p->limits[r].works = max_i64(p->limits[r].works, p->map.units);
        lower_clip(&p->rank[r], p->micro_batches);
    }
}

// Does this action add to the gradient of a storage?
static inline bool action_contributes(const UnitMap *map, const Action *a, int storage) {
    if (a->kind != ACT_BACKWARD_WEIGHT && a->kind != ACT_BACKWARD_INPUT && a->kind != ACT_TIED) { return false; }
    const GradientMaker maker = a->kind == ACT_BACKWARD_INPUT ? MADE_BY_INPUT_PART : a->kind == ACT_TIED ? MADE_BY_TIED : MADE_BY_WEIGHT_PART;
    for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
        if (map->of_unit[a->unit][k] == storage) { return map->made[a->unit][k] == maker; }
    }
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// Walking: plays the program with rendezvous messages. visit(context, rank, action, peer) is called in an order that a real
// run could have; SEND and RECV are visited together (the sender first, peer = the receiver's rank; then the receiver).
typedef void (*ScheduleVisit)(void *context, int rank, const Action *action, int peer);

static inline bool actions_match(const Action *send, int sender, const Action *recv, int receiver) {
    const bool kinds = action_sends(send->kind) && (int)recv->kind == (int)send->kind + 1;
    return kinds && send->peer == receiver && recv->peer == sender && send->unit == recv->unit && send->storage == recv->storage &&
           send->micro == recv->micro && send->step == recv->step && send->version == recv->version && send->use == recv->use && send->first_row == recv->first_row &&
           send->rows == recv->rows;
}

// Where a rank's NORM stands (only updates follow it); its length where there is none, which nobody gets past.
static inline int schedule_norm_index(const Schedule *s) {
    for (int i = s->count - 1; i >= 0; i--) {
        if (s->actions[i].kind == ACT_NORM) { return i; }
    }
    return s->count + 1;
}

// Who can move is woken by who made it possible: so a walk takes as long as there are actions, however many ranks wait.
typedef struct {
    const Program *program;
    ScheduleVisit visit;
    void *context;
    int *at;            // [ranks] the next action
    int *norm;          // [ranks] schedule_norm_index
    int *awake, count;  // [count] ranks that may be able to move
    bool *listed, *met; // [ranks] it is among these; it has come to its NORM
    int meeting;        // ranks that have
} Walk;

static inline void walk_wake(Walk *w, int r) {
    if (!w->listed[r]) { w->listed[r] = true, w->awake[w->count++] = r; }
}
// Rank r has come to a NORM, where all ranks meet. May it go on?
static inline bool walk_meet(Walk *w, int r) {
    const int ranks = w->program->ranks;
    if (w->at[r] != w->norm[r]) { return false; }
    if (!w->met[r] && ++w->meeting == ranks) {
        for (int q = 0; q < ranks; q++) { walk_wake(w, q); }
    }
    w->met[r] = true;
    return w->meeting == ranks;
}
// Does the next action of rank r send what that of rank q receives?
static inline bool walk_matches(const Walk *w, int r, int q) {
    const Program *p = w->program;
    if (r < 0 || r >= p->ranks || q < 0 || q >= p->ranks || w->at[r] >= p->rank[r].count || w->at[q] >= p->rank[q].count) { return false; }
    return actions_match(&p->rank[r].actions[w->at[r]], r, &p->rank[q].actions[w->at[q]], q);
}
// Rank r has come to a SEND. If its peer waits for this, both go on.
static inline bool walk_send(Walk *w, int r, const Action *a) {
    const int q = a->peer;
    if (!walk_matches(w, r, q)) { return false; }
    w->visit(w->context, r, a, q);
    w->visit(w->context, q, &w->program->rank[q].actions[w->at[q]], r);
    w->at[q]++, walk_wake(w, q);
    return true;
}
// Lets rank r go on as far as it can.
static inline void walk_rank(Walk *w, int r) {
    const Schedule *s = &w->program->rank[r];
    for (; w->at[r] < s->count; w->at[r]++) {
        const Action *a = &s->actions[w->at[r]];
        if (action_receives(a->kind)) { // the sender's turn moves it
            if (walk_matches(w, a->peer, r)) { walk_wake(w, a->peer); }
            return;
        }
        if (action_sends(a->kind)) {
            if (!walk_send(w, r, a)) { return; }
            continue;
        }
        if (a->kind == ACT_NORM && !walk_meet(w, r)) { return; }
        w->visit(w->context, r, a, -1);
    }
}

// Returns -1, or the first rank that is stuck for ever; at[] (per rank) then says where each rank stands.
static inline int schedule_walk(const Program *p, int *at, ScheduleVisit visit, void *context) {
    const size_t n = (size_t)p->ranks;
    Walk w = {p, visit, context, at, NULL, NULL, 0, NULL, NULL, 0};
    int stuck = -1;
    w.norm = (int *)checked_malloc(2 * n * sizeof(int), "walk"), w.awake = w.norm + n;
    w.listed = (bool *)checked_calloc(2 * n, sizeof(bool), "walk"), w.met = w.listed + n;
    for (int r = p->ranks - 1; r >= 0; r--) { at[r] = 0, w.norm[r] = schedule_norm_index(&p->rank[r]), walk_wake(&w, r); }
    while (w.count) {
        int r = w.awake[--w.count];
        w.listed[r] = false;
        walk_rank(&w, r);
    }
    for (int r = p->ranks - 1; r >= 0; r--) { stuck = at[r] < p->rank[r].count ? r : stuck; }
    free(w.norm), free(w.listed);
    return stuck;
}

// ---------------------------------------------------------------------------------------------------------------------
// Validator
enum { // HAVE: rows received. CLIPPED, KEPT: at unit 0, whoever computes that. KEPT: it has a place for what crosses stages
    DONE_FORWARD = 1,
    DONE_INPUT = 2,
    DONE_WEIGHT = 4,
    HAVE_INPUT = 8,
    HAVE_GRADIENT = 16,
    CLIPPED = 32,
    KEPT = 64,
    DONE_TIED = 128
};
enum { // some forward computes it; some rank received it, its gradient, of a stage its norm, its factor
    SAMPLE_COMPUTED = 1,
    SAMPLE_CAME = 2,
    SAMPLE_CAME_BACK = 4,
    SAMPLE_NORMED = 8,
    SAMPLE_SCALED = 16
};

typedef struct {
    int64_t rows, first, end; // how many, from the first on, up to the end
} Received;
static inline void received_add(Received *r, const Action *a) {
    r->first = r->rows ? min_i64(r->first, a->first_row) : a->first_row;
    r->end = max_i64(r->end, a->first_row + a->rows), r->rows += a->rows;
}

typedef struct {
    const Program *program;
    unsigned char *done;             // [rank][unit][micro] flags above
    int spans;                       // in which gradients are reduced: micro-batches, or 1
    int *contributions;              // [rank][span][storage] still to come
    signed char *reduced;            // [rank][span][storage]
    signed char *acquired, *updated; // [rank][storage]
    signed char *flying, *gathered;  // [rank][storage] a gather is under way or its parameters are there; there was one
    int *param_user, *grad_user;     // [rank][room] storage that is in it now, or -1
    int64_t *rows;                   // [rank][unit][micro][2] first row and rows, as the forward had them
    Received *received;              // [rank][unit][micro][2] rows of the unit's input, of the gradient of its output
    Received *told;         // [rank][unit][micro] samples whose norm of the unit's stage came to the first one, or whose factor to it; unit 0: factors sent
    unsigned char *covered; // [unit][sample] flags above
    Limits *held;           // [rank] as it stands
    int64_t *recomputed;    // [rank] unit and micro-batch (their validator_index) whose block activations are there, or -1
    bool *member;           // [rank][storage] the rank contributes to its gradient
    bool *normed;           // [rank]
    char *error;            // first violation, empty while valid
    size_t error_bytes;
} Validator;

static inline size_t validator_index(const Validator *v, int rank, int unit, int micro) {
    return ((size_t)rank * (size_t)v->program->map.units + (size_t)unit) * (size_t)v->program->micro_batches + (size_t)micro;
}
static inline size_t validator_span(const Validator *v, int rank, int micro, int storage) {
    int span = v->program->map.reduces_often[storage] ? micro : 0;
    return ((size_t)rank * (size_t)v->spans + (size_t)span) * (size_t)v->program->map.storages + (size_t)storage;
}
static inline unsigned char *validator_done(Validator *v, int rank, int unit, int micro) { return &v->done[validator_index(v, rank, unit, micro)]; }
__attribute__((format(printf, 4, 5))) static inline void validator_fail(Validator *v, int rank, const Action *a, const char *format, ...) {
    if (*v->error) { return; }
    char what[160];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    snprintf(v->error, v->error_bytes, "rank %d: %s unit %d storage %d micro-batch %d: %s", rank, action_names[a->kind], a->unit, a->storage, a->micro, what);
}

// The unit's parameters must be held while it computes.
static inline void validate_parameters(Validator *v, int rank, const Action *a) {
    const UnitMap *map = &v->program->map;
    for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
        int storage = map->of_unit[a->unit][k];
        if (!v->acquired[rank * map->storages + storage]) { validator_fail(v, rank, a, "parameters of storage %d are not acquired", storage); }
    }
}

// Once in a step: each sample of a unit's. False: not the first time.
static inline bool validator_mark(Validator *v, int rank, const Action *a, int unit, unsigned char flag, const char *what) {
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
// What follows a forward works on its rows.
static inline void validate_rows(Validator *v, int rank, const Action *a) {
    const int64_t *rows = &v->rows[2 * validator_index(v, rank, a->unit, a->micro)];
    bool forward = *validator_done(v, rank, a->unit, a->micro) & DONE_FORWARD;
    if (forward && (rows[0] != a->first_row || rows[1] != a->rows)) { validator_fail(v, rank, a, "rows differ from its forward's"); }
}
// Are all rows of an action there: from another unit of this rank, which has done its part, or received?
static inline bool validator_there(Validator *v, int rank, const Action *a, int from, unsigned char done, bool backward) {
    const int64_t *rows = &v->rows[2 * validator_index(v, rank, from, a->micro)];
    const Received *r = &v->received[2 * validator_index(v, rank, a->unit, a->micro) + backward];
    bool local = (*validator_done(v, rank, from, a->micro) & done) && rows[0] == a->first_row && rows[1] == a->rows;
    return !a->rows || local || (r->rows == a->rows && r->first == a->first_row && r->end == a->first_row + a->rows);
}
static inline void validate_forward(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    int64_t *rows = &v->rows[2 * validator_index(v, rank, a->unit, a->micro)];
    if (*me & DONE_FORWARD) { validator_fail(v, rank, a, "runs twice"); }
    if (a->unit && !validator_there(v, rank, a, a->unit - 1, DONE_FORWARD, false)) { validator_fail(v, rank, a, "its input is not there"); }
    bool first = true; // the first forward of a micro-batch on this rank takes a slot
    for (int u = 0; u < v->program->map.units; u++) { first = first && !(*validator_done(v, rank, u, a->micro) & DONE_FORWARD); }
    if (first && ++v->held[rank].slots > v->program->limits[rank].slots) {
        validator_fail(v, rank, a, "more live micro-batches than the %" PRId64 " slots", v->program->limits[rank].slots);
    }
    *me |= DONE_FORWARD;
    rows[0] = a->first_row, rows[1] = a->rows, v->recomputed[rank] = -1;
    validator_mark(v, rank, a, a->unit, SAMPLE_COMPUTED, "is computed");
}
static inline bool validator_recomputed(const Validator *v, int rank, const Action *a) {
    bool block = a->unit > 0 && a->unit < v->program->map.units - 1;
    return !v->program->recompute || !block || v->recomputed[rank] == (int64_t)validator_index(v, rank, a->unit, a->micro);
}
// Were all samples of an action told about, by NORM or FACTOR of this unit?
static inline bool validator_told(const Validator *v, int rank, const Action *a, int unit) {
    const Received *r = &v->told[validator_index(v, rank, unit, a->micro)];
    return !a->rows || (r->rows == a->rows && r->first == a->first_row && r->end == a->first_row + a->rows);
}
// A micro-batch takes one of the rank's places for what crosses stages, unless it has one.
static inline void validator_keep(Validator *v, int rank, const Action *a) {
    unsigned char *place = validator_done(v, rank, 0, a->micro);
    const int64_t limit = v->program->limits[rank].clips;
    if (!(*place & KEPT) && ++v->held[rank].clips > limit) { validator_fail(v, rank, a, "norms of %" PRId64 " micro-batches are kept already", limit); }
    *place |= KEPT;
}
static inline void validate_backward_input(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    if (!(*me & DONE_FORWARD)) { validator_fail(v, rank, a, "its forward has not run"); }
    if (*me & DONE_INPUT) { validator_fail(v, rank, a, "runs twice"); }
    bool there = a->unit == v->program->map.units - 1 || validator_there(v, rank, a, a->unit + 1, DONE_INPUT, true);
    if (!there) { validator_fail(v, rank, a, "the gradient of its output is not there"); }
    if (!validator_recomputed(v, rank, a)) { validator_fail(v, rank, a, "its activations were not recomputed"); }
    *me |= DONE_INPUT;
    if (program_crosses(v->program) && (v->program->clips == CLIPS_ALL || a->unit == v->program->map.units - 1)) { validator_keep(v, rank, a); }
    if (++v->held[rank].works > v->program->limits[rank].works) { validator_fail(v, rank, a, "the weight part before it has not run"); }
}
// Of a micro-batch on this rank: have all weight parts run?
static inline bool validator_weighed(Validator *v, int rank, int micro) {
    bool all = true;
    for (int u = 0; u < v->program->map.units; u++) {
        unsigned char d = *validator_done(v, rank, u, micro);
        all = all && (!(d & DONE_FORWARD) || (d & DONE_WEIGHT));
    }
    return all;
}
// Rows of factors that the first stage still has to send, of a micro-batch.
static inline int64_t validator_to_send(const Validator *v, int rank, int micro) {
    const size_t at = validator_index(v, rank, 0, micro);
    int64_t stages = 0;
    for (int u = 0; u < v->program->map.units; u++) { stages += program_sends_norms(v->program, u); }
    return stages * v->rows[2 * at + 1] - v->told[at].rows;
}
// After the last weight part, TIED where there is one, and the last factor that is sent, nothing is left of its norms and factors.
static inline void validator_forget(Validator *v, int rank, int micro) {
    unsigned char *place = validator_done(v, rank, 0, micro), head = *validator_done(v, rank, v->program->map.units - 1, micro);
    bool uses = !validator_weighed(v, rank, micro) || ((head & DONE_FORWARD) && !(head & DONE_TIED)) || validator_to_send(v, rank, micro) > 0;
    if (!(*place & KEPT) || uses) { return; }
    v->held[rank].clips--, *place &= (unsigned char)~KEPT;
}
// The last weight part of a micro-batch on this rank gives back its places.
static inline void validator_free(Validator *v, int rank, int micro) {
    const bool last = validator_weighed(v, rank, micro);
    for (int u = 0; last && u < v->program->map.units; u++) {
        unsigned char d = *validator_done(v, rank, u, micro);
        v->held[rank].inputs -= (d & HAVE_INPUT) != 0, v->held[rank].gradients -= (d & HAVE_GRADIENT) != 0;
    }
    v->held[rank].slots -= last;
    validator_forget(v, rank, micro);
}
// The last unit of the stage that a unit is of.
static inline int validator_end(const Validator *v, int unit) {
    while (unit + 1 < v->program->map.units && v->program->map.stage[unit + 1] == v->program->map.stage[unit]) { unit++; }
    return unit;
}
// Is what a weight part is scaled by there?
static inline void validate_scale(Validator *v, int rank, const Action *a) {
    const Program *p = v->program;
    const bool far = program_crosses(p) && p->clips == CLIPS_ALL && p->map.stage[a->unit] > 0, here = program_waits(p) || (program_crosses(p) && a->unit == 0);
    if (far && !validator_told(v, rank, a, validator_end(v, a->unit))) { validator_fail(v, rank, a, "not all factors are there"); }
    if (!far && here && !(*validator_done(v, rank, 0, a->micro) & CLIPPED)) { validator_fail(v, rank, a, "norms are not known: CLIP has not run"); }
}
static inline void validate_backward_weight(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    bool ready = a->unit ? (*me & DONE_INPUT) : (*me & DONE_FORWARD) && validator_there(v, rank, a, 1, DONE_INPUT, true);
    if (!ready) { validator_fail(v, rank, a, "its backward input has not run"); }
    if (*me & DONE_WEIGHT) { validator_fail(v, rank, a, "runs twice"); }
    validate_scale(v, rank, a);
    if (!validator_recomputed(v, rank, a)) { validator_fail(v, rank, a, "its activations were not recomputed"); }
    *me |= DONE_WEIGHT;
    if (a->unit) { v->held[rank].works--; }
    validator_free(v, rank, a->micro);
}
static inline void validate_recompute(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    if (!(*me & DONE_FORWARD) || (*me & DONE_INPUT)) { validator_fail(v, rank, a, "belongs between its forward and its backward"); }
    v->recomputed[rank] = (int64_t)validator_index(v, rank, a->unit, a->micro); // one set of block activations: what was recomputed before is gone
}
static inline void validate_clip(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, 0, a->micro);
    bool any = false;
    if (*me & CLIPPED) { validator_fail(v, rank, a, "runs twice"); }
    for (int u = 0; u < v->program->map.units; u++) {
        unsigned char d = *validator_done(v, rank, u, a->micro);
        if (u && (d & DONE_FORWARD) && !(d & DONE_INPUT)) { validator_fail(v, rank, a, "the norms of unit %d are not known", u); }
        any |= (d & DONE_FORWARD) != 0;
    }
    if (!any) { validator_fail(v, rank, a, "no forward has run"); }
    if (program_crosses(v->program) && a->unit == 0) {
        if (!validator_there(v, rank, a, 1, DONE_INPUT, true)) { validator_fail(v, rank, a, "the gradient of the embedding's output is not there"); }
        for (int u = 0; u < v->program->map.units; u++) {
            bool missing = program_sends_norms(v->program, u) && !validator_told(v, rank, a, u);
            if (missing) { validator_fail(v, rank, a, "not all norms of stage %d are there", v->program->map.stage[u]); }
        }
        validator_keep(v, rank, a);
    }
    *me |= CLIPPED;
}
static inline void validate_tied(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    if (!(*me & DONE_INPUT)) { validator_fail(v, rank, a, "its backward input has not run"); }
    if (*me & DONE_TIED) { validator_fail(v, rank, a, "runs twice"); }
    if (!validator_told(v, rank, a, a->unit)) { validator_fail(v, rank, a, "not all factors are there"); }
    *me |= DONE_TIED;
    validator_forget(v, rank, a->micro);
}
// Does the rank compute the rows of a message in this unit?
static inline bool validator_holds(Validator *v, int rank, const Action *a, int unit) {
    const int64_t *rows = &v->rows[2 * validator_index(v, rank, unit, a->micro)];
    return (*validator_done(v, rank, unit, a->micro) & DONE_FORWARD) && a->first_row >= rows[0] && a->first_row + a->rows <= rows[0] + rows[1];
}
static inline void validate_send(Validator *v, int rank, const Action *a) {
    unsigned char *me = validator_done(v, rank, a->unit, a->micro);
    bool forward = a->kind == ACT_SEND_FORWARD;
    if (forward && !(*me & DONE_FORWARD)) { validator_fail(v, rank, a, "sends an output that is not computed"); }
    if (forward && (*me & DONE_WEIGHT)) { validator_fail(v, rank, a, "sends an output that is gone"); }
    if (!forward && !(*me & DONE_INPUT)) { validator_fail(v, rank, a, "sends a gradient that is not computed"); }
    if (!a->rows || !validator_holds(v, rank, a, a->unit)) { validator_fail(v, rank, a, "sends rows that it does not hold"); }
}
// NORM goes from the stage of its unit to the first one, FACTOR back. Both need the rank's place for the micro-batch; CLIP is between them.
static inline void validate_norm_message(Validator *v, int rank, const Action *a) {
    const bool norm = a->kind == ACT_SEND_NORM || a->kind == ACT_RECV_NORM, far = norm == action_sends(a->kind); // it is not on the first stage
    const int unit = far ? a->unit : 0;
    unsigned char place = *validator_done(v, rank, 0, a->micro);
    if (!program_crosses(v->program) || (norm && !program_sends_norms(v->program, a->unit))) { validator_fail(v, rank, a, "no norm crosses stages here"); }
    if (!a->rows || !validator_holds(v, rank, a, unit)) { validator_fail(v, rank, a, "the rank does not compute these rows"); }
    for (int u = 0; far && norm && u <= a->unit; u++) { // units of this stage
        unsigned char d = *validator_done(v, rank, u, a->micro);
        bool counts = v->program->clips == CLIPS_ALL || u == a->unit;
        if (counts && (d & DONE_FORWARD) && !(d & DONE_INPUT)) { validator_fail(v, rank, a, "the norms of unit %d are not known", u); }
    }
    if (a->kind == ACT_RECV_NORM && (place & CLIPPED)) { validator_fail(v, rank, a, "comes after its use"); }
    if (a->kind == ACT_RECV_NORM) { validator_keep(v, rank, a); }
    if (a->kind == ACT_SEND_FACTOR && !(place & CLIPPED)) { validator_fail(v, rank, a, "sends factors before CLIP"); }
    if (!(*validator_done(v, rank, 0, a->micro) & KEPT)) { validator_fail(v, rank, a, "its place is gone"); }
    if (a->kind == ACT_SEND_FACTOR) { received_add(&v->told[validator_index(v, rank, 0, a->micro)], a), validator_forget(v, rank, a->micro); }
    if (action_sends(a->kind) || !validator_mark(v, rank, a, a->unit, norm ? SAMPLE_NORMED : SAMPLE_SCALED, "has come")) { return; }
    received_add(&v->told[validator_index(v, rank, a->unit, a->micro)], a);
}
// RECV_FORWARD(unit) brings rows of the input of unit + 1, RECV_BACKWARD(unit) of the gradient of the output of unit - 1.
static inline void validate_receive(Validator *v, int rank, const Action *a) {
    const bool backward = a->kind == ACT_RECV_BACKWARD;
    const int to = backward ? a->unit - 1 : a->unit + 1;
    if (to < 0 || to == v->program->map.units) {
        validator_fail(v, rank, a, "no unit wants it");
        return;
    }
    unsigned char *me = validator_done(v, rank, to, a->micro), flag = backward ? HAVE_GRADIENT : HAVE_INPUT;
    Received *r = &v->received[2 * validator_index(v, rank, to, a->micro) + backward];
    int64_t *held = backward ? &v->held[rank].gradients : &v->held[rank].inputs;
    int64_t limit = backward ? v->program->limits[rank].gradients : v->program->limits[rank].inputs;
    if (*me & (backward ? DONE_INPUT | DONE_WEIGHT : DONE_FORWARD)) { validator_fail(v, rank, a, "comes after its use"); }
    if (backward && !validator_holds(v, rank, a, to)) { validator_fail(v, rank, a, "the rank does not compute these rows"); }
    if (!validator_mark(v, rank, a, to, backward ? SAMPLE_CAME_BACK : SAMPLE_CAME, "has come")) { return; }
    if (!(*me & flag) && ++*held > limit) { validator_fail(v, rank, a, "the places of %" PRId64 " micro-batches are taken", limit); }
    *me |= flag;
    received_add(r, a);
}

// Who uses the room of a storage, if it shares one.
static inline int *validator_user(const Validator *v, int *users, const int *rooms, int rank, int storage) {
    return rooms && rooms[storage] >= 0 ? &users[rank * v->program->map.storages + rooms[storage]] : NULL;
}
static inline void validate_contribution(Validator *v, int rank, const Action *a, int storage) {
    size_t at = validator_span(v, rank, a->micro, storage);
    int *user = validator_user(v, v->grad_user, v->program->map.grad_room, rank, storage);
    if (v->reduced[at]) { validator_fail(v, rank, a, "storage %d is already reduced", storage); }
    if (user && *user >= 0 && *user != storage) { validator_fail(v, rank, a, "the room of storage %d holds the gradient of storage %d", storage, *user); }
    if (user) { *user = storage; }
    v->contributions[at]--;
}
static inline void validate_norm(Validator *v, int rank, const Action *a) {
    for (int s = 0; s < v->program->map.storages; s++) {
        const int spans = v->program->map.reduces_often[s] ? v->spans : 1;
        for (int i = 0; i < spans && v->member[rank * v->program->map.storages + s]; i++) {
            if (!v->reduced[validator_span(v, rank, i, s)]) { validator_fail(v, rank, a, "storage %d is not reduced", s); }
        }
    }
    v->normed[rank] = true;
}
static inline void validate_gather(Validator *v, int rank, const Action *a) {
    const UnitMap *map = &v->program->map;
    int at = rank * map->storages + a->storage, *user = validator_user(v, v->param_user, map->param_room, rank, a->storage);
    if (a->version != v->updated[at]) { validator_fail(v, rank, a, "version %" PRId64 " is not the one that exists", a->version); }
    if (v->acquired[at] || (map->gathers[a->storage] && v->flying[at])) { validator_fail(v, rank, a, "its parameters are in use"); }
    if (user && *user >= 0) { validator_fail(v, rank, a, "its room holds storage %d", *user); }
    if (a->near && !v->gathered[at]) { validator_fail(v, rank, a, "no gather has made the copies"); }
    if (user) { *user = a->storage; }
    v->flying[at] = v->gathered[at] = map->gathers[a->storage];
}
static inline void validate_acquire(Validator *v, int rank, const Action *a) {
    int at = rank * v->program->map.storages + a->storage;
    if (v->acquired[at]) { validator_fail(v, rank, a, "is acquired already"); }
    if (a->version != v->updated[at]) { validator_fail(v, rank, a, "version %" PRId64 " is not the one that exists", a->version); }
    if (v->program->map.gathers[a->storage] && !v->flying[at]) { validator_fail(v, rank, a, "no gather is under way"); }
    v->acquired[at] = 1;
}
static inline void validate_release(Validator *v, int rank, const Action *a) {
    int at = rank * v->program->map.storages + a->storage, *user = validator_user(v, v->param_user, v->program->map.param_room, rank, a->storage);
    if (!v->acquired[at]) { validator_fail(v, rank, a, "is not acquired"); }
    if (user) { *user = -1; }
    v->acquired[at] = v->flying[at] = 0;
}
static inline void validate_reduce(Validator *v, int rank, const Action *a) {
    size_t at = validator_span(v, rank, a->micro, a->storage);
    int *user = validator_user(v, v->grad_user, v->program->map.grad_room, rank, a->storage);
    if (v->contributions[at]) { validator_fail(v, rank, a, "%d contributions are still to come", v->contributions[at]); }
    if (v->reduced[at]) { validator_fail(v, rank, a, "runs twice"); }
    if (user) { *user = -1; }
    v->reduced[at] = 1;
}
static inline void validate_update(Validator *v, int rank, const Action *a) {
    int at = rank * v->program->map.storages + a->storage;
    if (!v->reduced[validator_span(v, rank, 0, a->storage)] || !v->normed[rank]) { validator_fail(v, rank, a, "needs REDUCE and NORM first"); }
    if (v->acquired[at]) { validator_fail(v, rank, a, "its parameters are in use"); }
    if (v->updated[at]) { validator_fail(v, rank, a, "runs twice"); }
    v->updated[at] = 1;
}

static inline bool validate_ranges(Validator *v, int rank, const Action *a) {
    const Program *p = v->program;
    bool per_unit = action_computes(a->kind) || action_of_rows(a->kind);
    bool of_storage = !per_unit && a->kind != ACT_NORM && a->kind != ACT_TALLY && a->kind != ACT_SEND_TALLY && a->kind != ACT_RECV_TALLY,
         good_storage = a->storage >= 0 && a->storage < p->map.storages;
    bool per_micro = per_unit || a->kind == ACT_ADD || (a->kind >= ACT_SEND_SUM && a->kind <= ACT_RECV_SUM) ||
                     (a->kind == ACT_REDUCE && good_storage && p->map.reduces_often[a->storage]);
    bool good = !per_unit ||
                (a->unit >= 0 && a->unit < p->map.units && a->rows >= 0 && a->first_row >= 0 && a->rows <= p->samples && a->first_row <= p->samples - a->rows);
    good = good && (!per_micro || (a->micro >= 0 && a->micro < p->micro_batches));
    good = good && (!of_storage || good_storage);
    if (!good) { validator_fail(v, rank, a, "a field is out of range"); }
    return good;
}

static inline void validate_compute(Validator *v, int rank, const Action *a) {
    if (action_reads_parameters(a->kind)) { validate_parameters(v, rank, a); }
    if (a->kind != ACT_FORWARD) { validate_rows(v, rank, a); }
    for (int k = 0; k < v->program->map.of_unit_count[a->unit]; k++) {
        int storage = v->program->map.of_unit[a->unit][k];
        if (action_contributes(&v->program->map, a, storage)) { validate_contribution(v, rank, a, storage); }
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
    case ACT_NORM: validate_norm(v, rank, a); break;
    default: validate_compute(v, rank, a);
    }
}

// Messages are matched by their order: two ranks start the collectives that both take part in alike. A rank takes part in those of the
// storages that it contributes to.
static inline int validator_next_collective(const Validator *v, int rank, int other, int i) { // from action i on, that both are in
    const Schedule *s = &v->program->rank[rank];
    const bool *mine = v->member + rank * v->program->map.storages, *theirs = v->member + other * v->program->map.storages;
    for (; i < s->count; i++) {
        const Action *a = &s->actions[i];
        if ((a->kind == ACT_PREFETCH || a->kind == ACT_REDUCE) && mine[a->storage] && theirs[a->storage]) { break; }
    }
    return i;
}
static inline void validate_order(Validator *v, int q, int r) {
    const Schedule *a = &v->program->rank[q], *b = &v->program->rank[r];
    for (int i = 0, j = 0; !*v->error; i++, j++) {
        i = validator_next_collective(v, q, r, i), j = validator_next_collective(v, r, q, j);
        const Action *x = i < a->count ? &a->actions[i] : NULL, *y = j < b->count ? &b->actions[j] : NULL;
        if (!x && !y) { return; }
        bool same = x && y && x->kind == y->kind && x->storage == y->storage && x->near == y->near;
        if (!same) {
            snprintf(v->error, v->error_bytes, "rank %d: %s of storage %d where rank %d has %s of storage %d", r, y ? action_names[y->kind] : "nothing",
                     y ? y->storage : -1, q, x ? action_names[x->kind] : "nothing", x ? x->storage : -1);
        }
    }
}
// Ranks that take part in the same need not all be compared with all.
static inline void validate_orders(Validator *v) {
    size_t storages = (size_t)v->program->map.storages;
    for (int r = 1; r < v->program->ranks; r++) {
        bool alike = !memcmp(v->member + (size_t)r * storages, v->member + (size_t)(r - 1) * storages, storages * sizeof(bool));
        for (int q = alike ? r - 1 : 0; q < r; q++) { validate_order(v, q, r); }
    }
}

// What must have happened by the end: every forward has its backward; of each sample.
static inline void validate_end_of_work(Validator *v) {
    const Program *p = v->program;
    for (int r = 0; r < p->ranks; r++) {
        for (int u = 0; u < p->map.units; u++) {
            for (int m = 0; m < p->micro_batches; m++) {
                unsigned char d = *validator_done(v, r, u, m);
                if ((d & DONE_FORWARD) && !(d & DONE_WEIGHT) && !*v->error) {
                    snprintf(v->error, v->error_bytes, "rank %d: unit %d micro-batch %d has a forward but no backward weight", r, u, m);
                }
                if (program_crosses(p) && u == p->map.units - 1 && (d & DONE_FORWARD) && !(d & DONE_TIED) && !*v->error) {
                    snprintf(v->error, v->error_bytes, "rank %d: unit %d micro-batch %d has a forward but no TIED", r, u, m);
                }
                if ((d & HAVE_INPUT) && !(d & DONE_FORWARD) && !*v->error) {
                    snprintf(v->error, v->error_bytes, "rank %d: unit %d micro-batch %d has an input but no forward", r, u, m);
                }
            }
        }
    }
    for (int64_t i = 0; i < p->map.units * p->samples; i++) {
        if (!(v->covered[i] & SAMPLE_COMPUTED) && !*v->error) {
            snprintf(v->error, v->error_bytes, "unit %" PRId64 " computes sample %" PRId64 " nowhere", i / p->samples, i % p->samples);
        }
    }
}
// Every storage has its update, nothing is still held.
static inline void validate_end(Validator *v) {
    const Program *p = v->program;
    validate_end_of_work(v);
    for (int r = 0; r < p->ranks; r++) {
        for (int s = 0; s < p->map.storages; s++) {
            int at = r * p->map.storages + s;
            bool bad = (v->member[at] && !v->updated[at]) || v->acquired[at] || v->flying[at];
            if (bad && !*v->error) { snprintf(v->error, v->error_bytes, "rank %d: storage %d is not updated, or still held, at the end", r, s); }
        }
    }
    if (!*v->error) { validate_orders(v); }
}

static inline void validator_start(Validator *v, const Program *p) {
    size_t per_storage = (size_t)p->ranks * (size_t)p->map.storages;
    memset(v, 0, sizeof *v);
    v->program = p;
    v->done = (unsigned char *)checked_calloc((size_t)p->ranks * (size_t)p->map.units, (size_t)max_i64(p->micro_batches, 1), "validator");
    v->spans = 1;
    for (int s = 0; s < p->map.storages; s++) { v->spans = p->map.reduces_often[s] ? (int)max_i64(p->micro_batches, 1) : v->spans; }
    v->contributions = (int *)checked_calloc(per_storage * (size_t)v->spans, sizeof(int), "validator");
    v->reduced = (signed char *)checked_calloc(per_storage * (size_t)v->spans, 1, "validator");
    v->acquired = (signed char *)checked_calloc(per_storage, 1, "validator");
    v->updated = (signed char *)checked_calloc(per_storage, 1, "validator");
    v->flying = (signed char *)checked_calloc(per_storage, 1, "validator");
    v->gathered = (signed char *)checked_calloc(per_storage, 1, "validator");
    v->param_user = (int *)checked_malloc(per_storage * sizeof(int), "validator");
    v->grad_user = (int *)checked_malloc(per_storage * sizeof(int), "validator");
    for (size_t i = 0; i < per_storage; i++) { v->param_user[i] = v->grad_user[i] = -1; }
    v->rows = (int64_t *)checked_calloc((size_t)p->ranks * (size_t)p->map.units, 2 * sizeof(int64_t) * (size_t)max_i64(p->micro_batches, 1), "validator");
    v->received = (Received *)checked_calloc((size_t)p->ranks * (size_t)p->map.units, 2 * sizeof(Received) * (size_t)max_i64(p->micro_batches, 1), "validator");
    v->told = (Received *)checked_calloc((size_t)p->ranks * (size_t)p->map.units, sizeof(Received) * (size_t)max_i64(p->micro_batches, 1), "validator");
    v->recomputed = (int64_t *)checked_malloc((size_t)p->ranks * sizeof(int64_t), "validator");
    for (int r = 0; r < p->ranks; r++) { v->recomputed[r] = -1; }
    v->covered = (unsigned char *)checked_calloc((size_t)p->map.units, (size_t)p->samples, "validator");
    v->member = (bool *)checked_calloc(per_storage, sizeof(bool), "validator");
    v->held = (Limits *)checked_calloc((size_t)p->ranks, sizeof(Limits), "validator");
    v->normed = (bool *)checked_calloc((size_t)p->ranks, sizeof(bool), "validator");
    for (int r = 0; r < p->ranks; r++) {
        for (int i = 0; i < p->rank[r].count; i++) {
            const Action *a = &p->rank[r].actions[i];
            bool good = action_computes(a->kind) && a->unit >= 0 && a->unit < p->map.units && a->micro >= 0 && a->micro < p->micro_batches;
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
    free(v->done), free(v->contributions), free(v->acquired), free(v->reduced), free(v->updated), free(v->normed);
    free(v->rows), free(v->received), free(v->told), free(v->recomputed), free(v->covered), free(v->held), free(v->member), free(v->flying), free(v->gathered);
    free(v->param_user), free(v->grad_user);
}
// Plays the program; who waits for ever is a violation.
static inline void validator_walk(Validator *v, ScheduleVisit visit, void *context) {
    const Program *p = v->program;
    int *at = (int *)checked_calloc((size_t)p->ranks, sizeof(int), "validator");
    int stuck = schedule_walk(p, at, visit, context);
    if (stuck >= 0 && !*v->error) {
        const Action *a = &p->rank[stuck].actions[at[stuck]];
        validator_fail(v, stuck, a, "deadlock: action %d waits for ever (peer %d)", at[stuck], a->peer);
    }
    free(at);
}

// Proves the invariants of the banner. On a violation returns false and describes the first one in error.
static inline bool schedule_validate(const Program *p, char *error, size_t error_bytes) {
    Validator v;
    validator_start(&v, p);
    v.error = error, v.error_bytes = error_bytes;
    *error = 0;
    validator_walk(&v, validator_visit, &v);
    if (!*error) { validate_end(&v); }
    validator_stop(&v);
    return !*error;
}

// The same for the program: ends it where there is one.
__attribute__((noreturn)) static inline void schedule_refuse(const char *error) {
    die(EXIT_INPUT, "this is a defect of train_gpt; please report it", "invalid schedule: %s", error);
}
static inline void schedule_check(const Program *p) {
    char error[400];
    if (!schedule_validate(p, error, sizeof error)) { schedule_refuse(error); }
}

// ---------------------------------------------------------------------------------------------------------------------
// Simulator: each rank has a clock for compute and one for its collectives, which run beside it, one after another. NORM waits
// for both and for all ranks; ACQUIRE for the gather of its storage; who writes a gradient into a room for the last REDUCE from it.
// Messages run beside compute too, in both directions at once: one begins when the sender comes to its SEND, the receiver to its RECV (it has a
// room by then), and neither the sender's way out nor the receiver's way in carries another; the compute actions of its micro-batch wait for it.
// A step is looked at that follows another (all ranks begin together where there is no NORM). Costs come from the caller.
enum { CHANNELS = 4 }; // kinds of messages: inputs, gradients, norms, factors
typedef struct {
    double compute_s, message_s;
} ActionCost;
typedef ActionCost (*ActionCosts)(const void *context, int rank, const Action *action);
typedef struct {
    double begin_s, end_s; // of a RECV: from when it waits until the message is there
} ActionTime;
typedef struct {
    const Program *program;
    ActionCosts cost;
    const void *context;
    ActionTime **times;   // [rank][action] gets them; NULL: not wanted
    double *clock, *comm; // [rank]
    double *out, *in;     // [rank] when its links are free
    double *busy;         // [rank] time spent computing
    double *ready;        // [rank][storage] when its parameters are there
    double *left;         // [rank][storages, then rooms] when the gradient there has left
    double *arrived;      // [rank][micro][CHANNELS] when what a kind of message brings is there
    double *sum;          // [rank][storage] when the sum, or part, that came last is there
    double meeting;       // when all ranks have come to NORM; negative before
    double untold;
} Simulation;

// When the place of a storage's gradient is free.
static inline double *simulator_left(const Simulation *s, int rank, int storage) {
    const UnitMap *map = &s->program->map;
    bool shares = map->grad_room && map->grad_room[storage] >= 0;
    return &s->left[(int64_t)rank * 2 * map->storages + (shares ? map->storages + map->grad_room[storage] : storage)];
}
// Where it is noted when that is there which a compute action, or a message, is about. A tally nobody waits for.
static inline double *simulator_arrived(Simulation *s, int rank, const Action *a) {
    const int64_t at = (int64_t)rank * s->program->map.storages + a->storage;
    if (action_is_message(a->kind) && !action_of_rows(a->kind)) {
        return a->storage < 0 ? &s->untold : a->kind == ACT_RECV_PARAMETERS ? &s->ready[at] : &s->sum[at];
    }
    const int channel = action_is_message(a->kind) ? (a->kind - ACT_SEND_FORWARD) / 2 : 0;
    return &s->arrived[((int64_t)rank * s->program->micro_batches + a->micro) * CHANNELS + channel];
}
static inline void simulator_time(const Simulation *s, int rank, const Action *a, double begin, double end) {
    if (!s->times) { return; }
    s->times[rank][a - s->program->rank[rank].actions].begin_s = begin, s->times[rank][a - s->program->rank[rank].actions].end_s = end;
}
// A message, with its sender's turn. What its ends compute for it (ActionCost) is done before.
static inline void simulator_message(Simulation *s, int rank, const Action *a, ActionCost cost, int peer) {
    s->clock[rank] += cost.compute_s, s->busy[rank] += cost.compute_s;
    if (action_receives(a->kind)) {
        double *arrived = simulator_arrived(s, rank, a);
        *arrived = fmax(*arrived, s->in[rank]);
        simulator_time(s, rank, a, s->clock[rank], s->in[rank]);
        return;
    }
    double begin = fmax(fmax(s->clock[rank], s->clock[peer]), fmax(s->out[rank], s->in[peer]));
    s->out[rank] = s->in[peer] = begin + cost.message_s;
    simulator_time(s, rank, a, begin, s->out[rank]);
}
// A compute action waits for its messages and for the places it writes gradients into.
static inline void simulator_await(Simulation *s, int rank, const Action *a) {
    const UnitMap *map = &s->program->map;
    const double *arrived = simulator_arrived(s, rank, a); // a forward needs its input; what follows all that came before it
    for (int c = a->kind == ACT_FORWARD ? 0 : 1; c < (a->kind == ACT_FORWARD ? 1 : CHANNELS); c++) { s->clock[rank] = fmax(s->clock[rank], arrived[c]); }
    for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
        int storage = map->of_unit[a->unit][k];
        if (action_contributes(map, a, storage)) { s->clock[rank] = fmax(s->clock[rank], *simulator_left(s, rank, storage)); }
    }
}
static inline void simulator_visit(void *context, int rank, const Action *a, int peer) {
    Simulation *s = (Simulation *)context;
    ActionCost cost = s->cost(s->context, rank, a);
    double slowest = 0, *ready = s->ready + (int64_t)rank * s->program->map.storages;
    if (action_is_message(a->kind)) {
        simulator_message(s, rank, a, cost, peer);
        return;
    }
    if (action_computes(a->kind)) { simulator_await(s, rank, a); }
    if (a->kind == ACT_ACQUIRE) { s->clock[rank] = fmax(s->clock[rank], ready[a->storage]); }
    if (a->kind == ACT_REDUCE || a->kind == ACT_ADD) { s->clock[rank] = fmax(s->clock[rank], s->sum[(int64_t)rank * s->program->map.storages + a->storage]); }
    if (a->kind == ACT_NORM) { // the first to pass sees everybody's time of arrival; the slowest decides for all
        for (int r = 0; r < s->program->ranks && s->meeting < 0; r++) { slowest = fmax(slowest, fmax(s->clock[r], s->comm[r])); }
        if (s->meeting < 0) { s->meeting = slowest; }
        s->clock[rank] = s->meeting;
    }
    double begin = s->clock[rank];
    s->clock[rank] += cost.compute_s;
    s->busy[rank] += cost.compute_s;
    if (cost.message_s > 0) { s->comm[rank] = fmax(s->comm[rank], s->clock[rank]) + cost.message_s; }
    double done = cost.message_s > 0 ? s->comm[rank] : s->clock[rank];
    if (a->kind == ACT_PREFETCH) { ready[a->storage] = done; }
    if (a->kind == ACT_REDUCE) { *simulator_left(s, rank, a->storage) = done; }
    simulator_time(s, rank, a, begin, done);
}
static inline double simulator_step(Simulation *s, int *at) { // returns when the last rank ends
    double end = 0;
    s->meeting = -1;
    memset(s->busy, 0, (size_t)s->program->ranks * sizeof(double));
    schedule_walk(s->program, at, simulator_visit, s);
    for (int r = 0; r < s->program->ranks; r++) { end = fmax(end, s->clock[r]); }
    for (int r = 0; r < s->program->ranks && s->meeting < 0; r++) { s->clock[r] = end; }
    return end;
}

// Room for the times of all actions of a program: [rank][action].
static inline ActionTime **schedule_times(const Program *p) {
    ActionTime **times = (ActionTime **)checked_malloc((size_t)p->ranks * sizeof(ActionTime *), "times");
    for (int r = 0; r < p->ranks; r++) { times[r] = (ActionTime *)checked_calloc((size_t)p->rank[r].count, sizeof(ActionTime), "times"); }
    return times;
}
static inline void schedule_times_free(const Program *p, ActionTime **times) {
    for (int r = 0; r < p->ranks; r++) { free(times[r]); }
    free(times);
}

// Predicted seconds of one step among others; busy (may be NULL) gets each rank's compute time, so the bubble of a rank is 1 - busy / step.
// times (may be NULL): [rank][action] gets when each action begins and ends, from the end of the step before on.
static inline double schedule_simulate_times(const Program *p, ActionCosts cost, const void *context, double *busy, ActionTime **times) {
    size_t n = (size_t)p->ranks, storages = (size_t)p->map.storages;
    double *all = (double *)checked_calloc(n * (5 + 4 * storages + CHANNELS * (size_t)p->micro_batches), sizeof(double), "simulator");
    Simulation s = {p, cost, context, times, all, all + n, all + 2 * n, all + 3 * n, all + 4 * n, all + 5 * n, NULL, NULL, NULL, -1, 0};
    s.left = s.ready + n * storages, s.sum = s.left + 2 * n * storages, s.arrived = s.sum + n * storages;
    int *at = (int *)checked_calloc(n, sizeof(int), "simulator");
    double first = simulator_step(&s, at), second = simulator_step(&s, at);
    if (busy) { memcpy(busy, s.busy, n * sizeof(double)); }
    for (int r = 0; r < p->ranks && times; r++) {
        for (int i = 0; i < p->rank[r].count; i++) { times[r][i].begin_s -= first, times[r][i].end_s -= first; }
    }
    free(all), free(at);
    return second - first;
}
static inline double schedule_simulate(const Program *p, ActionCosts cost, const void *context, double *busy) {
    return schedule_simulate_times(p, cost, context, busy, NULL);
}

// ---------------------------------------------------------------------------------------------------------------------
// Printer: one line per run of actions of the same kind and micro-batch, one block per rank.
static inline void schedule_print(FILE *to, const Program *p) {
    for (int r = 0; r < p->ranks; r++) {
        fprintf(to, "rank %d: %d actions\n", r, p->rank[r].count);
        for (int i = 0; i < p->rank[r].count; i++) {
            const Action *a = &p->rank[r].actions[i];
            fprintf(to, "  %5d %-16s", i, action_names[a->kind]);
            if (a->unit >= 0) {
                fprintf(to, " unit %-3d micro-batch %-3d samples %" PRId64 "..%" PRId64, a->unit, a->micro, a->first_row, a->first_row + a->rows - 1);
            }
            if (a->storage >= 0) { fprintf(to, " storage %-3d version %" PRId64, a->storage, a->version); }
            if (a->peer >= 0) { fprintf(to, " peer %d", a->peer); }
            if (a->near) { fprintf(to, " near"); }
            fprintf(to, "\n");
        }
    }
}

#endif
