// mutations.h: random single changes of a program, and what they do to it. Each is refused by the
// validator, or harmless: the values at the end are those of the unchanged program.
#ifndef MUTATIONS_H
#define MUTATIONS_H

#include "schedule/cyclic_windows.h"
#include "schedule/validator.h"

#include "harness.h"

// -------------------------------------------------------------------------------------------------
// An interpreter that knows only which places an action reads and writes, not what must be there. A
// value is a hash of the values that it was made from. Places have the values of the last writer.

typedef struct {
    uint64_t what, made; // the content, and its value
} Value;
typedef struct {
    TouchPlan plan;
    ResourceNumbers resources;
    Value *value; // [resources]
    int64_t capacity;
    uint64_t sent; // value of the message whose sender was visited last
} Values;
static inline Value *value_of(Values *v, int rank, const Touch *t) {
    const int known = v->resources.count, at = resource_number(&v->resources, rank, t);
    if (at == known) {
        v->value = grow_array(Value, v->value, at, &v->capacity, "values");
        memset(&v->value[at], 0, sizeof(Value));
    }
    return &v->value[at];
}
static inline bool is_bookkeeping(Resource of) {
    return of == RES_WORKS || of == RES_MOVING || of == RES_READING || of == RES_COUNT ||
           of == RES_SAMPLES || of == RES_BUCKET || of == RES_GRADIENT_SLOT ||
           of == RES_BORROWED_FOR;
}
// Plays a part of an action: what is done when the list reaches it (0), or the rest (1).
static inline void values_part(Values *v, int rank, const Action *a, int part) {
    TouchPlan *p = &v->plan;
    action_touches(p, rank, a);
    uint64_t made = touch_name((uint64_t)a->kind, a->kind == ACT_CLIP ? 0 : a->unit, a->storage);
    made += (uint64_t)a->part;
    if (a->rows) { made = touch_name(made, a->first_row, a->rows); }
    for (int i = 0; i < p->count; i++) {
        const Touch *t = &p->touch[i];
        if (is_bookkeeping(t->of) || t->at_once == part || t->use == TOUCH_WRITE ||
            t->use == TOUCH_TAKE || t->use == TOUCH_ADD) {
            continue;
        }
        made = mix64(made ^ value_of(v, rank, t)->made);
    }
    if (action_sends(a->kind)) { v->sent = made; }
    if (action_is(a->kind, RECEIVES)) { made = mix64(v->sent); }
    for (int i = 0; i < p->count; i++) {
        const Touch *t = &p->touch[i];
        if (is_bookkeeping(t->of) || t->at_once == part) { continue; }
        Value *value = value_of(v, rank, t);
        const bool adds = t->use == TOUCH_ADD && value->what == t->what;
        if (t->use == TOUCH_FREE) { value->made = value->what = 0; }
        if (t->use == TOUCH_READ || t->use == TOUCH_FREE) { continue; }
        value->made = (adds ? value->made : 0) + mix64(made ^ (uint64_t)t->of);
        value->what = t->what;
    }
}
static inline void values_visit(void *context, int rank, const Action *a, int peer) {
    (void)peer;
    values_part((Values *)context, rank, a, 0);
    values_part((Values *)context, rank, a, 1);
}
static inline Values values_new(const Program *p, const CyclicPlan *cyclic, const GptModel *model) {
    const Values v = {.plan = touch_plan(p, cyclic, model)};
    return v;
}
static inline void values_free(Values *v) {
    touch_plan_free(&v->plan);
    free_all(v->resources.slot, v->value);
}
// Returns a hash of all parameters at the end; of a pass that does not train, of the inputs of all
// units.
static inline uint64_t values_of_parameters(Values *v) {
    const Program *p = v->plan.program;
    uint64_t all = 1;
    for (int r = 0; r < p->ranks; r++) {
        validator_needs(&v->plan, r);
        for (int i = 0; i < v->plan.count; i++) {
            const Touch *t = &v->plan.touch[i];
            if (t->of == RES_PARAMETERS || t->of == RES_NEWEST) {
                all = mix64(all ^ value_of(v, r, t)->made);
            }
        }
        for (int i = 0; p->forward_only && i < p->map.units; i++) {
            for (int64_t place = 0; place < 4; place++) {
                const Touch t = {.of = RES_INPUT, .a = i, .b = place};
                all = mix64(all ^ value_of(v, r, &t)->made);
            }
        }
    }
    return all;
}
static inline uint64_t values_at_end(const Program *p, const CyclicPlan *cyclic,
                                     const GptModel *model) {
    Values v = values_new(p, cyclic, model);
    int at;
    walk_program(p, &at, false, values_visit, &v);
    const uint64_t all = values_of_parameters(&v);
    values_free(&v);
    return all;
}

// -------------------------------------------------------------------------------------------------
// Changes

typedef enum {
    MUTATE_REMOVE,
    MUTATE_SWAP,
    MUTATE_UNIT,
    MUTATE_MICRO,
    MUTATE_VERSION,
    MUTATE_STORAGE,
    MUTATE_USE,
    MUTATE_PEER,
    MUTATE_SECONDARY,
    MUTATE_PART,
    MUTATE_REMOVE_MESSAGE,
    MUTATE_UNIT_OF_MESSAGE,
    MUTATE_MICRO_OF_MESSAGE,
    MUTATE_VERSION_OF_MESSAGE,
    MUTATE_STORAGE_OF_MESSAGE,
    MUTATIONS
} Mutation;
static const char *const mutation_names[] = {"removed",
                                             "swapped",
                                             "unit",
                                             "micro-batch",
                                             "version",
                                             "storage",
                                             "use",
                                             "peer",
                                             "secondary",
                                             "part",
                                             "message removed",
                                             "message unit",
                                             "message micro-batch",
                                             "message version",
                                             "message storage"};
typedef struct {
    uint64_t seed, draws;
} MutationDraw;
static inline int mutation_draw(MutationDraw *d, int n) {
    return (int)(random_u64(d->seed, 99, d->draws++) % (uint64_t)n);
}
static inline void mutation_remove(Schedule *s, int i) {
    memmove(&s->actions[i], &s->actions[i + 1], (size_t)(s->count - 1 - i) * sizeof(Action));
    s->count--;
}
static inline void mutation_set(Action *a, Mutation what, int by, const Program *p) {
    switch (what) {
    case MUTATE_UNIT:
    case MUTATE_UNIT_OF_MESSAGE: a->unit = (a->unit + by) % p->map.units; break;
    case MUTATE_MICRO:
    case MUTATE_MICRO_OF_MESSAGE: a->micro = (a->micro + by) % p->micro_batches; break;
    case MUTATE_VERSION:
    case MUTATE_VERSION_OF_MESSAGE: a->version += by % 2 ? 1 : -1; break;
    case MUTATE_STORAGE:
    case MUTATE_STORAGE_OF_MESSAGE: a->storage = (a->storage + by) % p->map.storages; break;
    case MUTATE_USE: a->use += by % 2 ? 1 : -1; break;
    case MUTATE_SECONDARY: a->secondary = !a->secondary; break;
    case MUTATE_PART: a->part = (a->part + by) % p->map.parts; break;
    default: a->peer = (a->peer + by) % p->ranks;
    }
}
static inline bool mutation_fits(const Action *a, Mutation what, const Program *p, bool cyclic) {
    const bool message = action_is_message(a->kind),
               versions = cyclic ? a->kind == ACT_ACQUIRE || a->kind == ACT_SEND_PARAMETERS ||
                                       a->kind == ACT_RECV_PARAMETERS
                                 : a->kind == ACT_PREFETCH;
    if (what >= MUTATE_REMOVE_MESSAGE && !action_sends(a->kind)) { return false; }
    switch (what) {
    case MUTATE_UNIT:
    case MUTATE_UNIT_OF_MESSAGE: return a->unit >= 0;
    case MUTATE_MICRO:
    case MUTATE_MICRO_OF_MESSAGE: return a->micro >= 0 && p->micro_batches > 1;
    case MUTATE_VERSION:
    case MUTATE_VERSION_OF_MESSAGE: return versions;
    case MUTATE_STORAGE:
    case MUTATE_STORAGE_OF_MESSAGE: return a->storage >= 0;
    case MUTATE_USE: return action_is(a->kind, OF_PIECES) && p->map.rows[a->storage].pieces > 0;
    case MUTATE_PEER: return message && p->ranks > 2;
    case MUTATE_SECONDARY: return a->kind == ACT_PREFETCH;
    case MUTATE_PART:
        return p->map.parts > 1 && (a->kind == ACT_FORWARD || a->kind == ACT_BACKWARD_INPUT ||
                                    action_is(a->kind, OF_PART));
    default: return true;
    }
}
// Changes a random action. Writes what it did to text; returns false if it did nothing.
static inline bool mutate(Program *p, bool cyclic, MutationDraw *d, char *text, size_t bytes) {
    const int r = mutation_draw(d, p->ranks);
    Schedule *s = &p->rank[r];
    const Mutation what = (Mutation)mutation_draw(d, MUTATIONS);
    const int i = s->count ? mutation_draw(d, s->count) : 0, by = 1 + mutation_draw(d, 7);
    if (i + (what == MUTATE_SWAP) >= s->count || !mutation_fits(&s->actions[i], what, p, cyclic)) {
        return false;
    }
    Action *a = &s->actions[i];
    const Action before = *a;
    snprintf(text, bytes,
             "%s rank %d action %d %s unit %d storage %d micro-batch %d step %d rows %d",
             mutation_names[what], r, i, action_name(a->kind), a->unit, a->storage, (int)a->micro,
             (int)a->step, (int)a->rows);
    if (what == MUTATE_REMOVE) {
        mutation_remove(s, i);
        return true;
    }
    if (what == MUTATE_SWAP) {
        const size_t at = strlen(text);
        snprintf(text + at, bytes - at, " with %s unit %d storage %d micro-batch %d",
                 action_name(a[1].kind), a[1].unit, a[1].storage, (int)a[1].micro);
        *a = a[1];
        a[1] = before;
        return true;
    }
    if (what >= MUTATE_REMOVE_MESSAGE) {
        Schedule *t = &p->rank[a->peer];
        int j = 0;
        while (!actions_match(a, r, &t->actions[j], a->peer)) { j++; }
        if (what == MUTATE_REMOVE_MESSAGE) {
            mutation_remove(t, j);
            mutation_remove(s, i);
            return true;
        }
        mutation_set(&t->actions[j], what, by, p);
    }
    mutation_set(a, what, by, p);
    return memcmp(a, &before, sizeof before) != 0;
}
static inline Program program_copy(const Program *p) {
    Program copy = *p;
    copy.rank = new_array(Schedule, p->ranks, "schedules");
    for (int r = 0; r < p->ranks; r++) {
        for (int i = 0; i < p->rank[r].count; i++) {
            schedule_add(&copy.rank[r], p->rank[r].actions[i]);
        }
    }
    return copy;
}
static inline void program_free_copy(Program *copy, const Program *p) {
    for (int r = 0; r < p->ranks; r++) { schedule_free(&copy->rank[r]); }
    free(copy->rank);
}

// Of these mutations. Those that the validator accepts are harmless, or the test has failed.
typedef struct {
    int all, refused;
} Verdicts;
// cyclic, model: of steps that overlap, whose windows are unrolled; else NULL.
typedef struct {
    const CyclicPlan *cyclic;
    const GptModel *model;
    int steps;
} MutationCase;
// Returns the verdict of the validator, and the values at the end of a valid program.
static inline bool mutation_check(const Program *p, const MutationCase *c, char *error,
                                  size_t bytes, uint64_t *values) {
    Program steps = c->cyclic ? cyclic_unroll(p, c->cyclic, c->steps, c->steps) : *p;
    const bool valid = validate_unrolled(&steps, c->cyclic, c->model, error, bytes);
    *values = valid ? values_at_end(&steps, c->cyclic, c->model) : 0;
    if (c->cyclic) { cyclic_window_free(&steps); }
    return valid;
}
// MUTATIONS=1 also prints each mutation and the verdict.
static inline void mutate_program(const Program *p, const MutationCase *c, const char *name,
                                  int count, uint64_t seed, Verdicts *sum) {
    char error[400], text[200];
    uint64_t expected, values;
    MutationDraw d = {seed, 0};
    if (!mutation_check(p, c, error, sizeof error, &expected)) { fail_msg("%s: %s", name, error); }
    for (int tries = 0, i = 0; i < count && tries < 100 * count; tries++) {
        Program q = program_copy(p);
        if (mutate(&q, c->cyclic != NULL, &d, text, sizeof text)) {
            const bool valid = mutation_check(&q, c, error, sizeof error, &values);
            i++;
            sum->all++;
            sum->refused += !valid;
            if (valid && values != expected) {
                fail_msg("%s, seed %" PRIu64 ": %s", name, seed, text);
            }
            if (getenv("MUTATIONS")) {
                printf("%s: %s: %s\n", name, text, valid ? "harmless" : error);
            }
        }
        program_free_copy(&q, p);
    }
}
static inline void mutations_print(const char *name, const Verdicts *v) {
    printf("%-28s %4d mutations: %4d refused, %3d harmless\n", name, v->all, v->refused,
           v->all - v->refused);
}

#endif
