// schedule.h: who computes what and when, as data: one array of actions per rank, for ONE optimizer
// step.
//
// Builders (pipeline.h, cyclic.h, schedule_sequential here) write the compute and message actions.
// Policies lower them: zero.h inserts PREFETCH, ACQUIRE, RELEASE, REDUCE, NORM and UPDATE into the
// same arrays; this file inserts RECOMPUTE, CLIP and the moves of activations. Nothing else happens
// in a step. So ONE validator proves a program before it runs (schedule/validator.h), ONE executor
// runs it (executor/executor.h), ONE simulator times it (schedule/simulator.h), ONE printer prints
// it, and predicted traffic is a sum over actions.
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include "base/base.h"
#include "dp.h"
#include "schedule/actions.h"
#include "state/table.h"

// Actions of a rank, at most: enough for some ten thousand micro-batches of a large model.
enum { SCHEDULE_MAX = 1 << 22 };
typedef struct {
    Action *actions;
    int count;
    int64_t capacity;
} Schedule;

// What a schedule must know about the model and its states: which storages each unit uses, and
// where their states are. zero.h makes it (unit_map).
typedef struct {
    int units, storages, parts; // parts: of each block
    int (*of_unit)[2];          // [units] storages that the unit uses
    int *of_unit_count;         // [units] how many: 1 or 2
    // which action makes the gradient of the classifier's table: the head's input part. Where
    // samples are clipped, it is the head's weight part (dp.h). If the table is wte, too, the
    // embedding's action makes it, and this is ACTION_KINDS; if the embedding is on another stage,
    // TIED makes it. Weight parts make all other gradients, but those of experts_made_early.
    ActionKind head_maker;
    int classifier;         // storage of the classifier's table
    const StorageRow *rows; // [storages] of a rank's plan, which must outlive the map; NULL: none
    // The input part of a block makes the gradient of its experts, its second storage, too: rows
    // may go to them in pieces (executor/exchange.h), of which nothing is left for the weight part.
    bool experts_made_early;
    bool copies; // hpZ: a gather leaves secondary copies, which later gathers use
    // The host updates states that are on it: EVICT takes gradients there, FETCH brings parameters.
    // Otherwise FETCH brings the states to the device, and EVICT takes them back.
    bool cpu_update;
    // Host updates run one step late, while the device computes with the previous version.
    bool delays;
    int *stage;  // [units] stage of a unit; NULL: one stage, or no clipping
    bool *stash; // [units] activations are on the host between the passes; NULL: none
    // The stash has the inputs of units, because all else is recomputed; else what is inside units.
    bool stash_inputs;
    // Storage that stays acquired from the head's backward pass to the embedding's weight part,
    // which reads it; -1: none.
    int kept_gathered;
} UnitMap;

// The capacity of a rank: how many it can hold at once.
typedef struct {
    int64_t in_flight; // micro-batches with activations: from first forward to last weight part
    // micro-batches whose input, whose output gradient was received: until the last weight part
    int64_t inputs, gradients;
    int64_t works; // units' backward inputs whose weight part has not run
    // micro-batches with clipping norms that cross stages: from the first norm that is received or
    // made to be sent, until nothing needs the norms and factors any more
    int64_t clips;
} Limits;

enum { SEND_BUFFERS = 2 }; // buffers of sent data: one is sent while the other is written

// Limits of a rank that works on one micro-batch at a time and has all stages.
static inline Limits limits_of_one(void) {
    const Limits one = {.in_flight = 1, .works = 1};
    return one;
}
static inline Limits limits_of_both(Limits a, Limits b) {
    const Limits both = {.in_flight = max_i64(a.in_flight, b.in_flight),
                         .inputs = max_i64(a.inputs, b.inputs),
                         .gradients = max_i64(a.gradients, b.gradients),
                         .works = max_i64(a.works, b.works),
                         .clips = max_i64(a.clips, b.clips)};
    return both;
}

// The whole job: one schedule for each rank, or for some ranks that stand for all, if nobody runs
// it. program_free() frees it.
typedef struct {
    UnitMap map;
    int ranks, micro_batches;
    int *job_rank;   // [ranks] which ranks of the job these are; NULL: all, in order
    int64_t samples; // samples of the step; each unit computes each sample once, on some rank
    Limits *limits;  // [ranks]
    bool recompute;
    bool forward_only; // a pass that does not train
    Clips clips;
    Schedule *rank;
} Program;
// Returns which rank of the job a rank of the program is.
static inline int program_job_rank(const Program *p, int rank) {
    return p->job_rank ? p->job_rank[rank] : rank;
}
// Returns the schedule's number of a rank of the job that has one.
static inline int program_rank(const Program *p, int job_rank) {
    int rank = p->job_rank ? 0 : job_rank;
    while (p->job_rank && p->job_rank[rank] != job_rank) { rank++; }
    assert(rank < p->ranks);
    return rank;
}
// Returns whether the gradient of wte has parts of two stages, and samples are clipped.
static inline bool program_ties(const Program *p) {
    return p->clips && p->map.head_maker == ACT_TIED;
}
// Returns whether a clipping norm needs parts from several stages.
static inline bool program_crosses(const Program *p) {
    return program_ties(p) || (p->clips == CLIPS_ALL && p->map.stage);
}
// Returns whether weight parts wait for a norm over several units.
static inline bool program_waits(const Program *p) { return p->clips >= CLIPS_STAGES; }
// Returns whether this unit is the last one of a stage that sends its norms to the first stage.
static inline bool program_sends_norms(const Program *p, int unit) {
    if (!program_crosses(p) || p->map.stage[unit] == 0) { return false; }
    return unit == p->map.units - 1 ||
           (p->clips == CLIPS_ALL && p->map.stage[unit + 1] != p->map.stage[unit]);
}

// Does a storage's update have the parts DIRECT and ORTHOGONALISE before UPDATE?
static inline bool map_has_matrices(const UnitMap *map, int storage) {
    return map->rows && map->rows[storage].wave >= 0;
}
static inline bool unit_uses(const UnitMap *map, int unit, int storage) {
    return (map->of_unit_count[unit] > 0 && map->of_unit[unit][0] == storage) ||
           (map->of_unit_count[unit] > 1 && map->of_unit[unit][1] == storage);
}
// Returns whether this action adds to the gradient of a storage. Of a backward pass over the parts
// of a block that is the last action, which is back in the first part.
static inline bool action_contributes(const UnitMap *map, const Action *a, int storage) {
    if (!action_computes(a->kind) || !unit_uses(map, a->unit, storage)) { return false; }
    const int head = map->units - 1;
    const bool classifier = a->unit == head && storage == map->classifier,
               early = map->experts_made_early && a->unit > 0 && a->unit < head &&
                       storage == map->of_unit[a->unit][1];
    return a->part == 0 && a->kind == (classifier ? map->head_maker
                                       : early    ? ACT_BACKWARD_INPUT
                                                  : ACT_BACKWARD_WEIGHT);
}
static inline void schedule_free(Schedule *s) {
    free(s->actions);
    memset(s, 0, sizeof *s);
}
static inline void schedule_replace(Schedule *s, Schedule by) {
    schedule_free(s);
    *s = by;
}
// Returns the index of the last action of a kind; if there is none, an index that no rank reaches.
static inline int schedule_last(const Schedule *s, ActionKind kind) {
    for (int i = s->count - 1; i >= 0; i--) {
        if (s->actions[i].kind == kind) { return i; }
    }
    return s->count + 1;
}

// -------------------------------------------------------------------------------------------------
// Building
static inline void schedule_add(Schedule *s, Action a) {
    if (s->count == SCHEDULE_MAX) {
        die(EXIT_INPUT, "choose a larger --micro-batch or a smaller --batch-tokens",
            "a step has more than %d actions", SCHEDULE_MAX);
    }
    s->actions = grow_array(Action, s->actions, s->count, &s->capacity, "a schedule");
    s->actions[s->count++] = a;
}
// Returns how many of the step's samples the actions span; *first is the first of them (0 if none).
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
static inline void program_free(Program *p) {
    for (int r = 0; r < p->ranks; r++) { schedule_free(&p->rank[r]); }
    free_all(p->rank, p->job_rank, p->map.of_unit, p->map.of_unit_count, p->map.stage, p->map.stash,
             p->limits);
    memset(p, 0, sizeof *p);
}
// Gives all ranks the same limits.
static inline void program_limit(Program *p, Limits limits) {
    free(p->limits);
    p->limits = new_array(Limits, p->ranks, "limits");
    for (int r = 0; r < p->ranks; r++) { p->limits[r] = limits; }
}

// Builds the schedule of plain data parallelism: sequential accumulation of gradients. Each rank
// gets a contiguous, nearly equal part of the step's `samples`. It processes at most `micro_rows`
// of them at a time, forward then backward. All ranks have the same number of micro-batches (at
// least 1), because they gather and reduce together; the last one may be empty on some ranks. The
// caller has set the map, the ranks and empty lists of p. training = false: forwards only
// (evaluation).
static inline void schedule_sequential(Program *p, int64_t samples, int64_t micro_rows,
                                       bool training) {
    p->micro_batches =
        min_i64(max_i64(1, ceil_div(ceil_div(samples, p->ranks), micro_rows)), SCHEDULE_MAX);
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
    p->forward_only = !training;
    program_limit(p, limits_of_one());
}

// Lowering for recomputation: only block inputs are kept. Inserts RECOMPUTE, which computes a
// block's other activations again, just before the block's backward pass.
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
        schedule_replace(&p->rank[r], out);
    }
}

// Lowering of blocks with messages inside: a pass is one of each part, with EXCHANGE between them.
static inline void schedule_lower_parts(Program *p) {
    for (int r = 0; r < p->ranks && p->map.parts > 1; r++) {
        Schedule out = {NULL, 0, 0};
        for (int i = 0; i < p->rank[r].count; i++) {
            Action a = p->rank[r].actions[i], message = a;
            const bool block = a.unit > 0 && a.unit < p->map.units - 1,
                       forward = a.kind == ACT_FORWARD || a.kind == ACT_RECOMPUTE,
                       cut = block && (forward || a.kind == ACT_BACKWARD_INPUT);
            message.kind = forward ? ACT_EXCHANGE : ACT_EXCHANGE_BACK;
            for (int k = 0; k < (cut ? p->map.parts : 1); k++) {
                if (k) {
                    message.storage = p->map.of_unit[a.unit][0];
                    message.part = forward ? k : p->map.parts - k;
                    schedule_add(&out, message);
                }
                a.part = !cut || forward ? k : p->map.parts - 1 - k;
                schedule_add(&out, a);
            }
        }
        schedule_replace(&p->rank[r], out);
    }
}

// Lowering for clipping: moves the weight parts of each micro-batch behind its last backward action
// and a CLIP, since a sample's factor depends on the norm of its gradient over all units of the
// rank. Actions of other micro-batches stay where they are. For programs of one stage: pipeline.h
// clips by itself.
static inline void lower_clip(Schedule *in, int micro_batches) {
    // [micro] the last, the first of its backward actions
    int *last = new_array(int, 2 * micro_batches, "lowering"), *first = last + micro_batches;
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
        a.kind = ACT_CLIP; // its unit is the first one of the stage
        schedule_add(&out, a);
        for (int k = first[a.micro]; k <= i; k++) {
            if (in->actions[k].kind == ACT_BACKWARD_WEIGHT && in->actions[k].micro == a.micro) {
                schedule_add(&out, in->actions[k]);
            }
        }
    }
    free(last);
    schedule_replace(in, out);
}
static inline void schedule_lower_clip(Program *p) {
    p->clips = CLIPS_STAGES;
    for (int r = 0; r < p->ranks; r++) {
        p->limits[r].works = max_i64(p->limits[r].works, p->map.units);
        lower_clip(&p->rank[r], p->micro_batches);
    }
}

// The stash: activations that are on the host between the forward and the backward pass. On the
// device they are written to, and read from, one of STASH_SLOTS slots, which units take in turns.
// If units' inputs are kept (stash_inputs), the forward pass of a unit reads its input from a
// slot and writes the next unit's. Otherwise it writes what is kept inside its unit. The next two
// functions return the unit whose stashed activations an action makes or reads, or -1 for none.
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
// Returns the slot whose copies an action must wait for, or -1. A forward pass waits until the
// slot's former content has left. A backward pass or a recomputation waits until its activations
// have arrived. (What a forward pass reads was made on the device, so it does not wait for that.)
static inline int action_awaits_stash(const UnitMap *map, const Action *a) {
    const int unit =
        a->kind == ACT_FORWARD ? action_makes_stash(map, a) : action_reads_stash(map, a);
    return unit < 0 ? -1 : stash_slot(unit);
}
// Lowering of the stash. EVICT_STASH follows the action that makes activations, if their slot is
// needed for others before the backward pass. FETCH_STASH follows the last use of the slot before
// the activations are needed again. Uses of slots are numbered: use 2 i is what action i reads, use
// 2 i + 1 what it makes.
typedef struct {
    // [uses] following use of the same slot, of the same activations; -1: none
    int *next, *again;
} StashUses;
static inline int stash_user(const UnitMap *map, const Schedule *s, int use) {
    return (use % 2 ? action_makes_stash : action_reads_stash)(map, &s->actions[use / 2]);
}
static inline StashUses stash_uses(const UnitMap *map, const Schedule *s, int micro_batches) {
    const size_t keys = map->units * (size_t)micro_batches, uses = 2 * (size_t)s->count;
    StashUses of = {new_array(int, 2 * uses + keys, "lowering"), NULL};
    // [units][micro-batches] next use of these activations; [slots] next use of the slot
    int *first = of.next + 2 * uses, in_slot[STASH_SLOTS] = {-1, -1};
    of.again = of.next + uses;
    for (size_t i = 0; i < keys; i++) { first[i] = -1; }
    for (int use = uses - 1; use >= 0; use--) {
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
// Returns whether others take the slot before the last use of the activations that this use makes.
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
    schedule_replace(in, out);
}
static inline void schedule_lower_stash(Program *p) {
    for (int r = 0; r < p->ranks && p->map.stash; r++) {
        lower_stash(&p->map, &p->rank[r], p->micro_batches);
    }
}

// -------------------------------------------------------------------------------------------------
// Printer: one line per action, one block per rank.
static inline void schedule_print(FILE *to, const Program *p) {
    for (int r = 0; r < p->ranks; r++) {
        fprintf(to, "rank %d: %d actions\n", r, p->rank[r].count);
        for (int i = 0; i < p->rank[r].count; i++) {
            const Action *a = &p->rank[r].actions[i];
            fprintf(to, "  %5d %-16s", i, action_name(a->kind));
            if (a->unit >= 0) {
                fprintf(to, " unit %-3d micro-batch %-3" PRId64 " samples %" PRId64 "..%" PRId64,
                        a->unit, a->micro, a->first_row, a->first_row + a->rows - 1);
            }
            if (a->storage >= 0) {
                fprintf(to, " storage %-3d version %" PRId64, a->storage, a->version);
            }
            // statistics
            if (a->unit < 0 && a->storage < 0 && a->step) {
                fprintf(to, " step %" PRId64, a->step);
            }
            if (a->peer >= 0) { fprintf(to, " peer %d", a->peer); }
            if (a->secondary) { fprintf(to, " near"); }
            if (a->storage >= 0 && p->map.rows && p->map.rows[a->storage].pieces &&
                action_is(a->kind, OF_PIECES)) {
                fprintf(to, " piece %d", a->use);
            }
            fprintf(to, "\n");
        }
    }
}

#endif
