// schedule.h: who computes what, when: as data. One array of actions per rank, for ONE optimizer
// step.
//
// Builders emit compute and message actions. Policies lower them: they insert RECOMPUTE, PREFETCH,
// ACQUIRE, RELEASE, REDUCE, NORM, UPDATE into the same array (zero.h). Then nothing is hidden: ONE
// validator proves a program before it runs, ONE executor runs it (executor.h), ONE simulator times
// it, ONE printer draws it; predicted traffic is a sum over actions.
//
// Fields     micro     micro-batch of this step, from 0
//            first_row, rows   its samples, as positions among the S samples of the step (rows may
//                              differ per action and rank, and
//                     be 0: a rank without samples takes part in what the others do)
//            unit, storage     as gpt.h numbers them; this header knows them only through a UnitMap
//            step, version     relative to the step that runs: version 0 are the parameters before
//                              its update, 1 after
//            peer              the other rank of SEND and RECV
//            near              PREFETCH: from the copies inside the partition (zero.h: hpZ)
//            use               of parameters that come for each use (layout.h: borrows): which one
//                              of the step; of FETCH, EVICT and their UPDATE: the piece
// Invariants proved by engine/validator.h.
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include "support/base.h" // checked_malloc, die

typedef enum {
    ACT_FORWARD,
    ACT_BACKWARD_INPUT,
    ACT_BACKWARD_WEIGHT,
    ACT_RECOMPUTE,
    ACT_CLIP,
    // compute, per unit and micro-batch (CLIP, of a stage's first unit: every sample's norm is
    // known; TIED: see Clips)
    ACT_TIED,
    ACT_SEND_FORWARD,
    ACT_RECV_FORWARD, // after its SEND, as all of them
    ACT_SEND_BACKWARD,
    ACT_RECV_BACKWARD, // a unit's output / the gradient of a unit's input
    ACT_SEND_NORM,
    ACT_RECV_NORM,
    ACT_SEND_FACTOR,
    // each sample's norm in a stage / the factor that follows; of the stage's last unit, whose
    // other end is the first stage
    ACT_RECV_FACTOR,
    ACT_SEND_SUM,
    ACT_RECV_SUM, // of a storage: its gradient, summed over the micro-batches so far
    ACT_SEND_PARAMETERS,
    ACT_RECV_PARAMETERS, // of a storage: the version after the update of this step
    ACT_SEND_PART,
    ACT_RECV_PART, // of a storage: what one unit adds to a micro-batch's gradient
    ACT_SEND_STATS,
    ACT_RECV_STATS, // what a step has to tell: its loss, its norm
    ACT_PREFETCH,
    ACT_ACQUIRE,
    ACT_RELEASE,
    ACT_REDUCE,
    ACT_NORM,
    ACT_UPDATE, // states, per storage (NORM: all of them)
    ACT_ADD,    // a part of a sum that came
    ACT_STATS,  // version 0: this rank adds to what a step has to tell; 1: it hears the whole
    ACT_FETCH,  // a piece of a storage's states, from the host to the device
    ACT_EVICT,  // and back (store/host.h)
    ACT_READ,   // a piece of them that lies on a disk, to the host
    ACT_WRITE,  // and back (store/disk.h)
    // of a unit and micro-batch: the activations that forward passes have left on the host
    ACT_FETCH_STASH,
    ACT_EVICT_STASH, // and their way there
    ACT_FETCH_SUM,   // of a storage: the sum of its gradient, from the host to be added to
    ACT_EVICT_SUM,   // and its way there
    ACTION_KINDS
} ActionKind;
static const char *const action_names[ACTION_KINDS] = {
    "FORWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "RECOMPUTE",
    "CLIP",
    "TIED",
    "SEND_FORWARD",
    "RECV_FORWARD",
    "SEND_BACKWARD",
    "RECV_BACKWARD",
    "SEND_NORM",
    "RECV_NORM",
    "SEND_FACTOR",
    "RECV_FACTOR",
    "SEND_SUM",
    "RECV_SUM",
    "SEND_PARAMETERS",
    "RECV_PARAMETERS",
    "SEND_PART",
    "RECV_PART",
    "SEND_STATS",
    "RECV_STATS",
    "PREFETCH",
    "ACQUIRE",
    "RELEASE",
    "REDUCE",
    "NORM",
    "UPDATE",
    "ADD",
    "STATS",
    "FETCH",
    "EVICT",
    "READ",
    "WRITE",
    "FETCH_STASH",
    "EVICT_STASH",
    "FETCH_SUM",
    "EVICT_SUM",
};
static inline bool action_computes(ActionKind kind) { return kind <= ACT_TIED; }
static inline bool action_reads_parameters(ActionKind kind) {
    return kind == ACT_FORWARD || kind == ACT_BACKWARD_INPUT || kind == ACT_RECOMPUTE;
}
static inline bool action_of_pieces(ActionKind kind) {
    return kind == ACT_UPDATE || (kind >= ACT_FETCH && kind <= ACT_WRITE);
}
static inline bool action_of_stash(ActionKind kind) {
    return kind == ACT_FETCH_STASH || kind == ACT_EVICT_STASH;
}
static inline bool action_moves(ActionKind kind) { // between host and device
    return kind == ACT_FETCH || kind == ACT_EVICT ||
           (kind >= ACT_FETCH_STASH && kind <= ACT_EVICT_SUM);
}
static inline bool action_is_message(ActionKind kind) {
    return kind >= ACT_SEND_FORWARD && kind <= ACT_RECV_STATS;
}
// its RECV follows it
static inline bool action_sends(ActionKind kind) {
    return action_is_message(kind) && (kind - ACT_SEND_FORWARD) % 2 == 0;
}
static inline bool action_receives(ActionKind kind) {
    return action_is_message(kind) && !action_sends(kind);
}
// a message of a micro-batch's rows
static inline bool action_of_rows(ActionKind kind) {
    return kind >= ACT_SEND_FORWARD && kind <= ACT_RECV_FACTOR;
}

typedef struct {
    ActionKind kind;
    int unit, storage, micro, peer; // -1 where it does not apply
    int64_t first_row, rows;
    int64_t step, version;
    bool near;
    int use;
} Action;

// of states on the host, at most at once: one comes while the other goes
enum { MOVING_PIECES = 2 };
// of states on a disk: one comes to the host, two are moving or at their updates, one goes
enum { DISK_PIECES = 4 };
// actions of a rank: some ten thousand micro-batches of a large model
enum { SCHEDULE_MAX = 1 << 22 };
typedef struct {
    Action *actions;
    int count, capacity;
} Schedule;

// The head's part of the gradient of wte is made by its input part (gpt.h), or, where samples are
// clipped, with the embedding's (dp.h): there, or, where that is on another stage, by TIED.
typedef enum {
    MADE_BY_WEIGHT_PART,
    MADE_BY_INPUT_PART,
    MADE_ELSEWHERE,
    MADE_BY_TIED
} GradientMaker;

// Whose gradients of a sample have one norm, where samples are clipped (dp.h). wte is used by the
// first stage and by the last, so there is a norm that several stages know a part of: NORM brings
// the first stage what another one knows, CLIP makes a factor of all, FACTOR takes it to the
// others, and what is scaled by it waits there. Of groups inside stages that is TIED alone, the
// classifier's part of wte.
typedef enum {
    CLIPS_NOTHING,
    CLIPS_UNITS,  // each unit's
    CLIPS_STAGES, // a stage's: its weight parts follow its CLIP
    CLIPS_ALL     // all: all weight parts follow FACTOR
} Clips;

// Where the sum of a storage's gradient is between micro-batches: on the device; or on the host,
// from where it comes back to be added to, where one rank adds while it computes; or there, added
// to what is there already.
typedef enum { SUM_STAYS, SUM_COMES_BACK, SUM_IS_ADDED } SumPlace;

// What the plan must know of the model and of its states: which storages a unit uses, and which of
// them share rooms.
typedef struct {
    int units, storages;
    int (*of_unit)[2];
    int *of_unit_count;
    // which part of the unit contributes to the gradient: a GradientMaker
    unsigned char (*made)[2];
    // [storages] the room that its gathered parameters, its gradient share with others'; -1: none
    int *param_slot, *grad_slot;
    // [storages] parameters come by PREFETCH before each use; else they stay
    bool *gathers;
    // [storages] the gradient leaves by REDUCE in each micro-batch; else once
    bool *reduces_often;
    // [storages] several stages use it: the gradient leaves after all others
    bool *tied;
    // [storages] that its states on the host go in, to be updated; 0: there are none
    int *pieces;
    // then the host updates them: gradients leave by EVICT, parameters come by FETCH; else states
    // come, and go back
    bool cpu_update;
    // [storages] some of them come to the host by READ first, and leave it by WRITE
    bool *on_disk;
    // the host makes them whole, one step late, beside what is computed by the version before
    bool delays;
    // [storages] where the sum of its gradient is between micro-batches
    SumPlace *sums;
    // [units] of a pipeline in which samples are clipped; NULL: it is one stage, or they are not
    int *stage;
    // [units] activations are on the host between the forward and the backward pass; NULL: of none
    bool *stash;
    // those that go into the unit, which are all that is kept of it; else those inside
    bool stash_inputs;
    // storage that stays acquired from the last unit's backward pass to the first one's weight
    // part, which reads it; -1: none
    int lent;
} UnitMap;

// What a rank has room for at once.
typedef struct {
    // micro-batches with activations: from its first forward to its last weight part
    int64_t in_flight;
    // micro-batches whose input, whose gradient was received: from then to the last weight part
    int64_t inputs, gradients;
    int64_t works; // backward inputs whose weight part has not run
    // micro-batches of a group that crosses stages: from a norm that is received, or made to be
    // sent, to all that follows
    int64_t clips;
} Limits;

static inline Limits limits_of_one(void) { // micro-batch, and no other stages
    const Limits one = {1, 0, 0, 1, 0};
    return one;
}
static inline Limits limits_of_both(Limits a, Limits b) {
    Limits both = {max_i64(a.in_flight, b.in_flight), max_i64(a.inputs, b.inputs),
                   max_i64(a.gradients, b.gradients), max_i64(a.works, b.works),
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
    return unit == p->map.units - 1 ||
           (p->clips == CLIPS_ALL && p->map.stage[unit + 1] != p->map.stage[unit]);
}

// -------------------------------------------------------------------------------------------------
// Building
static inline Action action_make(ActionKind kind, int unit, int storage, int micro) {
    Action a = {kind, unit, storage, micro, -1, 0, 0, 0, 0, false, 0};
    return a;
}
static inline void schedule_add(Schedule *s, Action a) {
    if (s->count == SCHEDULE_MAX) {
        die(EXIT_INPUT, "choose a larger --micro-batch or a smaller --batch-tokens",
            "a step has more than %d actions", SCHEDULE_MAX);
    }
    if (s->count == s->capacity) {
        s->capacity = s->capacity ? 2 * s->capacity : 64;
        s->actions = (Action *)realloc(s->actions, (size_t)s->capacity * sizeof(Action));
        if (!s->actions) {
            die(EXIT_RESOURCES, NULL, "cannot hold a schedule of %d actions", s->capacity);
        }
    }
    s->actions[s->count++] = a;
}
// How many of a step's samples the actions span, from *first on.
static inline int64_t schedule_rows(const Schedule *s, int64_t *first) {
    int64_t begin = INT64_MAX, end = 0;
    for (int i = 0; i < s->count; i++) {
        const Action *a = &s->actions[i];
        if (a->rows) {
            begin = min_i64(begin, a->first_row);
            end = max_i64(end, a->first_row + a->rows);
        }
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
    free(p->rank);
    free(p->map.of_unit);
    free(p->map.of_unit_count);
    free(p->map.made);
    free(p->map.param_slot);
    free(p->map.grad_slot);
    free(p->map.gathers);
    free(p->map.reduces_often);
    free(p->map.tied);
    free(p->map.pieces);
    free(p->map.on_disk);
    free(p->map.sums);
    free(p->map.stage);
    free(p->map.stash);
    free(p->limits);
    memset(p, 0, sizeof *p);
}
// The same limits for all ranks.
static inline void program_limit(Program *p, Limits limits) {
    free(p->limits);
    p->limits = (Limits *)checked_malloc((size_t)p->ranks * sizeof(Limits), "limits");
    for (int r = 0; r < p->ranks; r++) { p->limits[r] = limits; }
}

// Sequential accumulation (the schedule of plain data parallelism): the step's `samples` are dealt
// to the ranks in contiguous, nearly equal parts; a rank works through its part, at most
// `micro_rows` samples at a time, forward then backward. All ranks have as many micro-batches, at
// least one, some of them the last one without samples: they gather and reduce together. training =
// false: forward only (evaluation).
static inline void schedule_sequential(Program *p, int64_t samples, int64_t micro_rows,
                                       bool training) {
    p->micro_batches =
        (int)min_i64(max_i64(1, ceil_div(ceil_div(samples, p->ranks), micro_rows)), SCHEDULE_MAX);
    for (int r = 0; r < p->ranks; r++) {
        int64_t begin = part_begin(samples, p->ranks, r),
                end = part_begin(samples, p->ranks, r + 1);
        for (int micro = 0; micro < p->micro_batches;
             micro++, begin = min_i64(begin + micro_rows, end)) {
            Action a = action_make(ACT_FORWARD, 0, -1, micro);
            a.first_row = begin;
            a.rows = min_i64(micro_rows, end - begin);
            for (a.unit = 0; a.unit < p->map.units; a.unit++) { schedule_add(&p->rank[r], a); }
            for (a.unit = p->map.units - 1; training && a.unit >= 0; a.unit--) {
                // the embedding has no input gradient
                if (a.unit > 0) {
                    a.kind = ACT_BACKWARD_INPUT;
                    schedule_add(&p->rank[r], a);
                }
                a.kind = ACT_BACKWARD_WEIGHT;
                schedule_add(&p->rank[r], a);
            }
        }
    }
    p->samples = samples;
    program_limit(p, limits_of_one());
}

// Lowering: keep only block inputs; compute a block's other activations again just before its
// backward.
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

// Lowering: the weight parts of a micro-batch wait until its last input part has run, since a
// sample's factor depends on the norm of its gradient over all units of the rank. What other
// micro-batches do meanwhile stays where it is. (Of one stage: pipeline.h does it itself.)
static inline void lower_clip(Schedule *in, int micro_batches) {
    // [micro] of its backward actions
    int *last = (int *)checked_malloc(2 * (size_t)micro_batches * sizeof(int), "lowering"),
        *first = last + micro_batches;
    Schedule out = {NULL, 0, 0};
    for (int m = 0; m < micro_batches; m++) { first[m] = last[m] = -1; }
    for (int i = 0; i < in->count; i++) {
        const Action *a = &in->actions[i];
        if (a->kind != ACT_BACKWARD_INPUT && a->kind != ACT_BACKWARD_WEIGHT) { continue; }
        last[a->micro] = i;
        first[a->micro] = first[a->micro] < 0 ? i : first[a->micro];
    }
    for (int i = 0; i < in->count; i++) {
        Action a = in->actions[i];
        if (a.kind != ACT_BACKWARD_WEIGHT) { schedule_add(&out, a); }
        if (a.micro < 0 || last[a.micro] != i) { continue; }
        a.kind = ACT_CLIP;
        a.unit = 0;
        schedule_add(&out, a);
        for (int k = first[a.micro]; k <= i; k++) {
            if (in->actions[k].kind == ACT_BACKWARD_WEIGHT && in->actions[k].micro == a.micro) {
                schedule_add(&out, in->actions[k]);
            }
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

// Activations that lie on the host between a forward and a backward pass are made, and read, in one
// of two rooms, which units take in turns. A forward pass makes what is kept inside its unit, or,
// where units' inputs are kept, reads its own and makes the next unit's. Whose an action makes,
// reads; -1: nobody's.
enum { STASH_SLOTS = 2 };
static inline int stash_slot(int unit) { return unit % STASH_SLOTS; }
static inline int action_makes_stash(const UnitMap *map, const Action *a) {
    const int unit = a->unit + map->stash_inputs;
    return map->stash && a->kind == ACT_FORWARD && a->rows > 0 && unit < map->units &&
                   map->stash[unit]
               ? unit
               : -1;
}
static inline int action_reads_stash(const UnitMap *map, const Action *a) {
    const bool backward = a->kind == ACT_BACKWARD_INPUT || a->kind == ACT_BACKWARD_WEIGHT,
               input = a->kind == ACT_FORWARD || a->kind == ACT_RECOMPUTE;
    return map->stash && (backward || (map->stash_inputs && input)) && a->rows > 0 &&
                   map->stash[a->unit]
               ? a->unit
               : -1;
}
// The room whose copies an action waits for: what left it before more is made there, what came for
// the backward pass. (What a forward pass reads it has made.)
static inline int action_awaits_stash(const UnitMap *map, const Action *a) {
    const int unit =
        a->kind == ACT_FORWARD ? action_makes_stash(map, a) : action_reads_stash(map, a);
    return unit < 0 ? -1 : stash_slot(unit);
}
// Lowering: they leave as soon as they are made if others come into their room before the backward
// pass, and come back as soon as these are done with it. Uses of rooms are numbered: 2 i is what
// action i reads, 2 i + 1 what it makes.
typedef struct {
    // [uses] use of the same room, of the same activations, that follows; -1: none
    int *next, *again;
} StashUses;
static inline int stash_user(const UnitMap *map, const Schedule *s, int use) {
    return (use % 2 ? action_makes_stash : action_reads_stash)(map, &s->actions[use / 2]);
}
static inline StashUses stash_uses(const UnitMap *map, const Schedule *s, int micro_batches) {
    const size_t keys = (size_t)map->units * (size_t)micro_batches, uses = 2 * (size_t)s->count;
    StashUses of = {(int *)checked_malloc((2 * uses + keys) * sizeof(int), "lowering"), NULL};
    // [units][micro-batches] use from here on, of a room
    int *first = of.next + 2 * uses, in_slot[STASH_SLOTS] = {-1, -1};
    of.again = of.next + uses;
    for (size_t i = 0; i < keys; i++) { first[i] = -1; }
    for (int use = (int)uses - 1; use >= 0; use--) {
        const int unit = stash_user(map, s, use);
        if (unit < 0) { continue; }
        int *mine = &first[unit * micro_batches + s->actions[use / 2].micro],
            *slot = &in_slot[stash_slot(unit)];
        of.next[use] = *slot;
        of.again[use] = *mine;
        *slot = *mine = use;
    }
    return of;
}
// what is made, for others, before its last use
static inline bool stash_leaves(const StashUses *of, int use) {
    while (of->again[use] >= 0 && of->again[use] == of->next[use]) { use = of->again[use]; }
    return of->again[use] >= 0;
}
static inline void lower_stash(const UnitMap *map, Schedule *in, int micro_batches) {
    const StashUses of = stash_uses(map, in, micro_batches);
    Schedule out = {NULL, 0, 0};
    for (int use = 0; use < 2 * in->count; use++) {
        Action a = in->actions[use / 2];
        const int unit = stash_user(map, in, use), next = unit < 0 ? -1 : of.next[use];
        if (use % 2 == 0) { schedule_add(&out, a); }
        if (unit >= 0 && use % 2 && stash_leaves(&of, use)) {
            a.kind = ACT_EVICT_STASH;
            a.unit = unit;
            schedule_add(&out, a);
        }
        if (next < 0 || next == of.again[use] || in->actions[next / 2].kind == ACT_FORWARD) {
            continue;
        }
        a = in->actions[next / 2];
        a.kind = ACT_FETCH_STASH;
        schedule_add(&out, a);
    }
    free(of.next);
    schedule_free(in);
    *in = out;
}
static inline void schedule_lower_stash(Program *p) {
    for (int r = 0; r < p->ranks && p->map.stash; r++) {
        lower_stash(&p->map, &p->rank[r], p->micro_batches);
    }
}

// Does this action add to the gradient of a storage?
static inline bool action_contributes(const UnitMap *map, const Action *a, int storage) {
    if (a->kind != ACT_BACKWARD_WEIGHT && a->kind != ACT_BACKWARD_INPUT && a->kind != ACT_TIED) {
        return false;
    }
    const GradientMaker maker = a->kind == ACT_BACKWARD_INPUT ? MADE_BY_INPUT_PART
                                : a->kind == ACT_TIED         ? MADE_BY_TIED
                                                              : MADE_BY_WEIGHT_PART;
    for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
        if (map->of_unit[a->unit][k] == storage) { return map->made[a->unit][k] == maker; }
    }
    return false;
}

// -------------------------------------------------------------------------------------------------
// Walking: plays the program with rendezvous messages. visit(context, rank, action, peer) is called
// in an order that a real run could have; SEND and RECV are visited together (the sender first,
// peer = the receiver's rank; then the receiver).
typedef void (*ScheduleVisit)(void *context, int rank, const Action *action, int peer);

static inline bool actions_match(const Action *send, int sender, const Action *recv, int receiver) {
    const bool kinds = action_sends(send->kind) && (int)recv->kind == (int)send->kind + 1;
    return kinds && send->peer == receiver && recv->peer == sender && send->unit == recv->unit &&
           send->storage == recv->storage && send->micro == recv->micro &&
           send->step == recv->step && send->version == recv->version && send->use == recv->use &&
           send->first_row == recv->first_row && send->rows == recv->rows;
}

// Where a rank's NORM stands (only updates follow it); its length where there is none, which nobody
// gets past.
static inline int schedule_norm_index(const Schedule *s) {
    for (int i = s->count - 1; i >= 0; i--) {
        if (s->actions[i].kind == ACT_NORM) { return i; }
    }
    return s->count + 1;
}

// Who can move is woken by who made it possible: so a walk takes as long as there are actions,
// however many ranks wait.
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
    if (!w->listed[r]) {
        w->listed[r] = true;
        w->awake[w->count++] = r;
    }
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
    if (r < 0 || r >= p->ranks || q < 0 || q >= p->ranks || w->at[r] >= p->rank[r].count ||
        w->at[q] >= p->rank[q].count) {
        return false;
    }
    return actions_match(&p->rank[r].actions[w->at[r]], r, &p->rank[q].actions[w->at[q]], q);
}
// Rank r has come to a SEND. If its peer waits for this, both go on.
static inline bool walk_send(Walk *w, int r, const Action *a) {
    const int q = a->peer;
    if (!walk_matches(w, r, q)) { return false; }
    w->visit(w->context, r, a, q);
    w->visit(w->context, q, &w->program->rank[q].actions[w->at[q]], r);
    w->at[q]++;
    walk_wake(w, q);
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

// Returns -1, or the first rank that is stuck for ever; at[] (per rank) then says where each rank
// stands.
static inline int schedule_walk(const Program *p, int *at, ScheduleVisit visit, void *context) {
    const size_t n = (size_t)p->ranks;
    Walk w = {p, visit, context, at, NULL, NULL, 0, NULL, NULL, 0};
    int stuck = -1;
    w.norm = (int *)checked_malloc(2 * n * sizeof(int), "walk");
    w.awake = w.norm + n;
    w.listed = (bool *)checked_calloc(2 * n, sizeof(bool), "walk");
    w.met = w.listed + n;
    for (int r = p->ranks - 1; r >= 0; r--) {
        at[r] = 0;
        w.norm[r] = schedule_norm_index(&p->rank[r]);
        walk_wake(&w, r);
    }
    while (w.count) {
        int r = w.awake[--w.count];
        w.listed[r] = false;
        walk_rank(&w, r);
    }
    for (int r = p->ranks - 1; r >= 0; r--) { stuck = at[r] < p->rank[r].count ? r : stuck; }
    free(w.norm);
    free(w.listed);
    return stuck;
}

// -------------------------------------------------------------------------------------------------
// Printer: one line per run of actions of the same kind and micro-batch, one block per rank.
static inline void schedule_print(FILE *to, const Program *p) {
    for (int r = 0; r < p->ranks; r++) {
        fprintf(to, "rank %d: %d actions\n", r, p->rank[r].count);
        for (int i = 0; i < p->rank[r].count; i++) {
            const Action *a = &p->rank[r].actions[i];
            fprintf(to, "  %5d %-16s", i, action_names[a->kind]);
            if (a->unit >= 0) {
                fprintf(to, " unit %-3d micro-batch %-3d samples %" PRId64 "..%" PRId64, a->unit,
                        a->micro, a->first_row, a->first_row + a->rows - 1);
            }
            if (a->storage >= 0) {
                fprintf(to, " storage %-3d version %" PRId64, a->storage, a->version);
            }
            if (a->peer >= 0) { fprintf(to, " peer %d", a->peer); }
            if (a->near) { fprintf(to, " near"); }
            if (a->storage >= 0 && p->map.pieces && p->map.pieces[a->storage] &&
                action_of_pieces(a->kind)) {
                fprintf(to, " piece %d", a->use);
            }
            fprintf(to, "\n");
        }
    }
}

#endif
