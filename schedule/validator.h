// validator.h: proves that a program is correct, by what its actions touch (touches.h).
//
// Graph      Each rank's list is a chain. The two ends of a message are one event, and so is the
//            start of a collective on all its members. The walk (walk.h) plays this graph; it ends
//            if there is no circle, even if every message is a rendezvous. Whatever is posted early
//            or deferred waits only for actions that stand earlier in its list, so no order in
//            which ranks really run can wait in a circle, either.
// Order      A resource belongs to one rank, so any two touches of it are ordered by its list.
//            Where the executor defers an action, it keeps this order (order.h).
// Values     Each read finds its content, made by actions that found theirs: see touches.h.
// End        Nothing is left over, each sample is computed once by each unit, and every rank has
//            the version after the last step.
// Steps that overlap are unrolled (cyclic_unroll). Actions of a step touch what belongs to the
// steps directly before and after it, and windows repeat after some steps (cyclic_steps_to_check).
// So a program of a few steps more has every pair of touches that a run of any length has.
#ifndef VALIDATOR_H
#define VALIDATOR_H

#include "base/base.h"
#include "cyclic.h"
#include "model/gpt.h"
#include "schedule/actions.h"
#include "schedule/cyclic_routes.h"
#include "schedule/cyclic_windows.h"
#include "schedule/schedule.h"
#include "schedule/touch.h"
#include "schedule/touch_plan.h"
#include "schedule/touches.h"
#include "schedule/touch_states.h"
#include "schedule/walk.h"
#include "state/policy.h"

typedef struct {
    uint64_t what, amount;
    int64_t first, end, order; // rows; micro-batch that was added last
    Resource of;
    int rank;
} ResourceState;
typedef struct {
    TouchPlan plan;
    ResourceNumbers resources;
    ResourceState *cell; // [resources]
    int64_t capacity;
    uint64_t carried;      // amount that the last READ or FREE has found
    uint64_t *collectives; // [rank][storage] hash of those so far
    char *error;
    size_t error_bytes;
} Validator;

static inline const char *resource_text(Resource of) {
#define RESOURCE_TEXT(name, empty, text) text,
    static const char *const texts[] = {RESOURCE_TABLE(RESOURCE_TEXT)};
#undef RESOURCE_TEXT
    return texts[of];
}
static inline bool resource_must_be_empty(Resource of) {
#define RESOURCE_EMPTY(name, empty, text) empty,
    static const bool must[] = {RESOURCE_TABLE(RESOURCE_EMPTY)};
#undef RESOURCE_EMPTY
    return must[of];
}
__attribute__((format(printf, 4, 5))) static inline void
validator_refuse(Validator *c, int rank, const Action *a, const char *format, ...) {
    if (*c->error) { return; }
    char what[160];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    snprintf(c->error, c->error_bytes, "rank %d: %s unit %d storage %d micro-batch %" PRId64 ": %s",
             rank, a ? action_name(a->kind) : "at the end:", a ? a->unit : -1, a ? a->storage : -1,
             a ? a->micro : (int64_t)-1, what);
}

static inline ResourceState *validator_cell(Validator *c, int rank, const Touch *t) {
    const int known = c->resources.count, at = resource_number(&c->resources, rank, t);
    if (at == known) {
        const ResourceState empty = {.of = t->of, .rank = rank};
        c->cell = grow_array(ResourceState, c->cell, at, &c->capacity, "the validator");
        c->cell[at] = empty;
    }
    return &c->cell[at];
}
static inline void validator_put(ResourceState *cell, const Touch *t, uint64_t amount) {
    cell->what = amount ? t->what : 0;
    cell->amount = amount;
    cell->first = t->first;
    cell->end = t->first + t->rows;
    cell->order = t->order;
}
// Returns whether a place has the content that a touch needs.
static inline bool validator_finds(const Validator *c, const ResourceState *cell, const Touch *t,
                                   uint64_t amount) {
    const uint64_t *rows = c->plan.rows;
    if (t->any) { return cell->what == t->what || (t->absent && !cell->amount); }
    if (!amount) { return cell->what != t->what; }
    if (cell->what != t->what) { return false; }
    if (!t->part) { return cell->amount == amount; }
    return cell->amount == t->scale * (rows[cell->end] - rows[cell->first]) &&
           cell->first <= t->first && t->first + t->rows <= cell->end;
}
static inline void validator_apply(Validator *c, int rank, const Action *a, const Touch *t) {
    if (t->b < 0) {
        validator_refuse(c, rank, a, "there is no place for %s", resource_text(t->of));
        return;
    }
    ResourceState *cell = validator_cell(c, rank, t);
    const uint64_t amount = touch_amount(&c->plan, t) + (t->carry ? c->carried : 0);
    if (t->limit) { // a pool
        const bool takes = t->use == TOUCH_TAKE;
        if (takes ? cell->amount >= (uint64_t)t->limit : !cell->amount) {
            validator_refuse(c, rank, a, takes ? "all are taken: %s" : "none is taken: %s",
                             resource_text(t->of));
        }
        cell->amount += takes ? 1 : (uint64_t)-1;
        return;
    }
    switch (t->use) {
    case TOUCH_READ:
    case TOUCH_FREE:
        if (!validator_finds(c, cell, t, amount)) {
            validator_refuse(c, rank, a,
                             "not there, or not complete: %s (%" PRId64 ", %" PRId64 ")",
                             resource_text(t->of), t->a, t->b);
        }
        c->carried = cell->what == t->what ? cell->amount : 0;
        if (t->use == TOUCH_FREE && cell->what == t->what) { cell->what = cell->amount = 0; }
        break;
    case TOUCH_TAKE:
        if (cell->amount && amount) {
            validator_refuse(c, rank, a, "the place is taken: %s (%" PRId64 ", %" PRId64 ")",
                             resource_text(t->of), t->a, t->b);
        }
        if (amount) { validator_put(cell, t, amount); }
        break;
    case TOUCH_WRITE:
        if (t->once && cell->what == t->what) {
            validator_refuse(c, rank, a, "came already: %s", resource_text(t->of));
        }
        validator_put(cell, t, amount);
        break;
    case TOUCH_ADD:
        if (cell->what != t->what) {
            if (amount) { validator_put(cell, t, amount); }
            break;
        }
        if (t->order < cell->order) {
            validator_refuse(c, rank, a, "added in another order: %s", resource_text(t->of));
        }
        cell->amount += amount;
        cell->order = t->order;
        cell->first = t->rows ? min_i64(cell->first, t->first) : cell->first;
        cell->end = t->rows ? max_i64(cell->end, t->first + t->rows) : cell->end;
    }
}
static inline void validator_apply_all(Validator *c, int rank, const Action *a) {
    for (int i = 0; i < c->plan.count; i++) { validator_apply(c, rank, a, &c->plan.touch[i]); }
}

// Are the fields of an action in range? Only a rank that uses a storage has its actions.
static inline bool validator_in_range(const Validator *c, int rank, const Action *a) {
    const TouchPlan *p = &c->plan;
    const Program *of = p->program;
    const bool of_unit = action_is(a->kind, COMPUTES | OF_ROWS | OF_STASH | OF_PART),
               of_storage = action_is(a->kind, OF_STORAGE),
               piece = p->cyclic && (a->kind == ACT_SEND_PART || a->kind == ACT_RECV_PART);
    if (of_storage && (a->storage < 0 || a->storage >= of->map.storages)) { return false; }
    const bool gradient = action_is(a->kind, ON_SUM | ON_PARAMETERS);
    if (of_storage && !p->cyclic &&
        !(gradient ? p->member : p->uses)[rank * of->map.storages + a->storage]) {
        return false;
    }
    const bool of_micro = of_unit || piece || action_is(a->kind, OF_MICRO) ||
                          (a->kind == ACT_REDUCE && of->map.rows[a->storage].reduces_often);
    const int step = p->cyclic ? of->micro_batches / p->spans : 0;
    if (of_unit && (a->unit < 0 || a->unit >= of->map.units || a->rows < 0 || a->first_row < 0 ||
                    a->rows > of->samples || a->first_row > of->samples - a->rows)) {
        return false;
    }
    // the last unit has no output that is sent, the first no gradient of its input
    const bool down = a->kind == ACT_SEND_FORWARD || a->kind == ACT_RECV_FORWARD,
               up = a->kind == ACT_SEND_BACKWARD || a->kind == ACT_RECV_BACKWARD;
    if ((down && a->unit + 1 == of->map.units) || (up && a->unit == 0)) { return false; }
    const bool first =
        of_unit && touch_computes(p, rank, a->unit) && !touch_computes(p, rank, a->unit - 1);
    if (a->kind == ACT_CLIP && a->rows && !first) { return false; }
    if (of_unit && (a->part < 0 || a->part >= max_i64(1, of->map.parts))) { return false; }
    if (action_is(a->kind, OF_PART) && of->map.of_unit[a->unit][0] != a->storage) { return false; }
    if (of_micro && (a->micro < 0 || a->micro >= of->micro_batches)) { return false; }
    if (p->cyclic && (a->step < 0 || a->step >= step)) { return false; }
    return !p->cyclic || !of_micro || a->micro / p->spans == a->step;
}
static inline void validator_visit(void *context, int rank, const Action *a, int peer) {
    Validator *c = (Validator *)context;
    (void)peer;
    if (*c->error) { return; }
    const bool parts = a->kind == ACT_SEND_PART || a->kind == ACT_RECV_PART ||
                       a->kind == ACT_STATS || a->kind == ACT_ADD;
    const bool alien = c->plan.cyclic
                           ? a->kind == ACT_PREFETCH || a->kind == ACT_NORM ||
                                 action_is(a->kind, MOVES | ON_DISK | OF_STASH)
                           : parts || a->kind == ACT_SEND_STATS || a->kind == ACT_SEND_SUM ||
                                 a->kind == ACT_SEND_PARAMETERS;
    if (alien || !validator_in_range(c, rank, a)) {
        validator_refuse(c, rank, a,
                         alien ? "is no part of these schedules" : "a field is out of range");
        return;
    }
    action_touches(&c->plan, rank, a);
    validator_apply_all(c, rank, a);
    if (!c->plan.cyclic && action_is(a->kind, COLLECTIVE)) {
        uint64_t *all = &c->collectives[rank * c->plan.program->map.storages + a->storage];
        const uint64_t kind = touch_name((uint64_t)a->kind, a->unit, a->part);
        *all = mix64(*all ^ touch_name(kind, a->micro, a->secondary));
    }
}

// -------------------------------------------------------------------------------------------------
// The beginning and the end

// What there is before the first action.
static inline void validator_begin(Validator *c) {
    TouchPlan *p = &c->plan;
    const UnitMap *map = &p->program->map;
    for (int r = 0; r < p->program->ranks; r++) {
        p->count = 0;
        for (int s = 0; s < map->storages; s++) {
            const uint64_t version = touch_version_name(s, 0);
            if (p->cyclic) {
                if (touch_p2p(p, s)->places[r]) {
                    touch_add(p, TOUCH_WRITE, RES_PARAMETERS, s, 0, version);
                }
                continue;
            }
            touch_add(p, TOUCH_WRITE, RES_NEWEST, s, 0, version);
            if (!map->rows[s].gathers) {
                touch_add(p, TOUCH_WRITE, RES_PARAMETERS, -1 - s, 0, version);
            }
            if (map->copies && p->program->forward_only) {
                touch_add(p, TOUCH_WRITE, RES_COPIES, s, 0, version);
            }
            if (map->delays) { // the sum of the step before
                touch_add(p, TOUCH_WRITE, RES_HOST_SUM, s, 0, touch_name(RES_SUM, s, -1));
            }
        }
        validator_apply_all(c, r, NULL);
    }
}
// What every rank must have at the end.
static inline void validator_needs(TouchPlan *p, int rank) {
    const Program *of = p->program;
    const UnitMap *map = &of->map;
    const int64_t steps = p->cyclic ? of->micro_batches / p->spans : 1;
    p->count = 0;
    for (int s = 0; s < map->storages && !of->forward_only; s++) {
        const uint64_t version = touch_version_name(s, steps);
        if (p->cyclic) {
            const int places = touch_p2p(p, s)->places[rank];
            if (places) {
                touch_add(p, TOUCH_READ, RES_PARAMETERS, s, touch_place(steps, places), version);
            }
            continue;
        }
        if (!p->member[rank * map->storages + s]) { continue; }
        touch_add(p, TOUCH_READ, RES_NEWEST, s, 0, version);
        if (!map->rows[s].gathers) { touch_add(p, TOUCH_READ, RES_PARAMETERS, -1 - s, 0, version); }
        if (map->delays) { touch_whole_sum(p, TOUCH_READ, rank, s); }
    }
    if (p->cyclic) {
        touch_any(touch_add(p, TOUCH_READ, RES_STATS_OUT, 0, 0, touch_stats_name(steps - 1)));
    }
    for (int u = 0; u < map->units && rank == 0 && of->samples; u++) {
        Touch *t = touch_add(p, TOUCH_READ, RES_SAMPLES, u, 0, touch_name(RES_SAMPLES, u, 0));
        t->rows = of->samples;
    }
}
static inline void validator_end(Validator *c) {
    TouchPlan *p = &c->plan;
    const int storages = p->program->map.storages;
    for (int r = 0; r < p->program->ranks; r++) {
        validator_needs(p, r);
        validator_apply_all(c, r, NULL);
    }
    for (int i = 0; i < c->resources.count; i++) {
        const ResourceState *cell = &c->cell[i];
        if (cell->amount && resource_must_be_empty(cell->of)) {
            validator_refuse(c, cell->rank, NULL, "left over: %s", resource_text(cell->of));
        }
    }
    for (int s = 0; s < storages; s++) {
        int before = -1; // member
        for (int r = 0; r < p->program->ranks; r++) {
            if (!p->member[r * storages + s]) { continue; }
            if (before >= 0 &&
                c->collectives[r * storages + s] != c->collectives[before * storages + s]) {
                validator_refuse(c, r, NULL,
                                 "collectives of storage %d differ from those of rank %d", s,
                                 before);
            }
            before = r;
        }
    }
}

// Proves a program: of one step, or (cyclic, model; else NULL) of unrolled steps that overlap.
// Returns false on a violation, and describes the first one in error.
static inline bool validate_unrolled(const Program *p, const CyclicPlan *cyclic,
                                     const GptModel *model, char *error, size_t error_bytes) {
    Validator v = {
        .plan = touch_plan(p, cyclic, model), .error = error, .error_bytes = error_bytes};
    int at;
    v.collectives = new_array(uint64_t, (int64_t)p->ranks * p->map.storages, "the validator");
    *error = 0;
    validator_begin(&v);
    const int stuck = walk_program(p, &at, !cyclic, validator_visit, &v);
    if (stuck >= 0) {
        validator_refuse(&v, stuck, &p->rank[stuck].actions[at],
                         "deadlock: action %d waits for ever (peer %d)", at,
                         p->rank[stuck].actions[at].peer);
    }
    if (!*error) { validator_end(&v); }
    touch_plan_free(&v.plan);
    free_all(v.resources.slot, v.cell, v.collectives);
    return !*error;
}
// Proves a program of one step.
static inline bool schedule_validate(const Program *p, char *error, size_t error_bytes) {
    return validate_unrolled(p, NULL, NULL, error, error_bytes);
}
// Proves steps of windows that overlap (schedule_cyclic; `window` is step 0's): without a pause,
// and, if the run may have any, with one after every second step.
static inline bool schedule_validate_steps(const Program *window, const CyclicPlan *cyclic,
                                           const GptModel *model, char *error, size_t error_bytes) {
    const int steps = cyclic_steps_to_check(cyclic);
    bool valid = true;
    for (int pause = steps; pause && valid; pause = pause > 2 && cyclic->pauses ? 2 : 0) {
        Program program = cyclic_unroll(window, cyclic, steps, pause);
        valid = validate_unrolled(&program, cyclic, model, error, error_bytes);
        cyclic_window_free(&program);
    }
    return valid;
}

#endif
