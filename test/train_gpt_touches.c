// train_gpt_touches.c: the program, which checks what touches.h says of each action. While an action
// runs, all memory of parameters, gradients and activations that it does not touch is not a number.
// So an action that reads what it does not say computes another loss than the program, and one that
// writes it is named here, and ends the run. Messages are waited for at once: a touch holds until
// the message is complete. Not checked: steps that overlap, clipped steps, states on the host,
// quantized gradients.
#include <stdbool.h>
static void checked_before(void *executor, const void *action, int index, long long step);
static void checked_after(void *executor);
#define EXECUTOR_HOOK(action, step) checked_before(e, action, index, step)
#define EXECUTOR_DONE(executor) checked_after(executor)
#define COMM_BEGUN(c, request) comm_wait(c, request)
#include "train_gpt.c"

typedef struct {
    char *at;
    size_t bytes;
    char *kept; // its content, while it is not a number; else NULL
    bool touched;
} Memory;
// A place of a resource, and where it is.
typedef struct {
    Resource of;
    int64_t a, b;
    Memory *memory;
} ResourcePlace;
enum { MEMORIES = 20000 };
static Memory memories[MEMORIES];
static ResourcePlace places[MEMORIES];
static int memory_count, place_count;
static TouchPlan touches;
static bool checking;

static Memory *memory_at(const void *at, size_t bytes) {
    for (int i = 0; i < memory_count; i++) {
        if (memories[i].at == at && memories[i].bytes == bytes) { return &memories[i]; }
    }
    assert(memory_count < MEMORIES);
    Memory *m = &memories[memory_count++];
    memset(m, 0, sizeof *m);
    m->at = (char *)(uintptr_t)at;
    m->bytes = bytes;
    return m;
}
static void place_is(Resource of, int64_t a, int64_t b, const void *at, size_t bytes) {
    if (!at || !bytes) { return; }
    assert(place_count < MEMORIES);
    const ResourcePlace p = {of, a, b, memory_at(at, bytes)};
    places[place_count++] = p;
}
static bool overlap(const Memory *a, const Memory *b) {
    return a->at < b->at + b->bytes && b->at < a->at + a->bytes;
}
// The span of the arrays that `count` pointers point to, of `bytes` bytes in all.
static const void *lowest(void *const *pointers, int first, int count) {
    const char *low = NULL;
    for (int i = first; i < count; i++) {
        const char *p = (const char *)pointers[i];
        if (p && (!low || p < low)) { low = p; }
    }
    return low;
}
static size_t values_bytes(const Executor *e, UnitClass c, bool gradients) {
    UnitBuffers counted = {};
    Arena a = {NULL, 0};
    const int64_t N = e->shape.rows * e->shape.T;
    if (gradients) {
        unit_carve_gradients(&counted, &a, e->model, c, N, false);
    } else {
        unit_carve_values(&counted, &a, e->model, c, N);
    }
    return a.used;
}
static void places_of_unit(Executor *e, int rank, int u, int micro) {
    const int head = e->model->units - 1;
    const UnitClass c = gpt_unit_class(e->model, u);
    const size_t boundary = executor_boundary_bytes(&e->shape, e->model);
    const Action a = {.kind = ACT_FORWARD, .unit = u, .storage = -1, .micro = micro, .rows = 1};
    const bool mine = executor_has(&e->shape, u);
    if (u && u <= head && (mine || units_sender(&e->shape.units, u) >= 0)) {
        place_is(RES_INPUT, u, touch_input_place(&touches, rank, u, micro),
                 executor_boundary(e, u, micro), boundary);
        touches.count = 0;
        const Touch *t = touch_input_gradient(&touches, TOUCH_READ, rank, u, &a);
        if (t->b >= 0) { place_is(t->of, t->a, t->b, executor_gradient(e, u, micro), boundary); }
    }
    if (!mine) { return; }
    const bool block = c == UNIT_BLOCK, again = block && e->shape.recompute;
    const UnitBuffers *values = &executor_acts(e, u, micro)->unit[u];
    const int64_t place = touch_place(micro, touch_live(&touches, rank, u));
    place_is(
        again ? RES_RECOMPUTED : RES_ACTIVATIONS, again ? 0 : u, again ? 0 : place,
        lowest((void *const *)values->value, VALUE_FIRST, gpt_unit_spec(e->model, c)->value_count),
        values_bytes(e, c, false));
    if (!block) { return; }
    const UnitSpec *spec = gpt_unit_spec(e->model, c);
    const UnitBuffers *made = &executor_grads(e, micro)->unit[u];
    void *own[64] = {NULL};
    for (int g = GRADIENT_FIRST; g < spec->gradient_count; g++) {
        own[g] = spec->gradients[g].with_values ? NULL : made->gradient[g];
    }
    place_is(RES_WORK, u, micro, lowest(own, GRADIENT_FIRST, spec->gradient_count),
             values_bytes(e, c, true));
}
static void places_of_storage(Executor *e, int s) {
    Store *store = e->store;
    const StatePlan *plan = &store->plan;
    const StorageRow *row = &e->map->rows[s];
    const size_t whole = store_full_bytes(plan, STATE_PARAMETERS, s),
                 floats = store_full_bytes(plan, STATE_GRADIENT, s),
                 own = (size_t)store_own_elements(plan, s);
    const void *full = store_full(store, STATE_PARAMETERS, s);
    if (row->gathers) {
        place_is(RES_GATHERED, touch_slot(row->param_slot, s), 0, full, whole);
    } else {
        place_is(RES_PARAMETERS, -1 - s, 0, full, whole);
    }
    place_is(RES_HELD, s, 0, full, whole);
    for (int kind = 0; kind < STATE_KINDS; kind++) {
        const bool newest = kind == STATE_MASTER || kind == STATE_PARAMETERS,
                   moment = optimizer_keeps(plan->optimizer, kind);
        if (!(newest || moment) || store_place(plan, kind, s) != PLACE_DEVICE || !own) { continue; }
        place_is(newest ? RES_NEWEST : RES_MOMENTS, s, 0, store_at(store, kind, s, 0),
                 own * plan->device[kind].size);
    }
    place_is(RES_GRADIENT, touch_slot(row->grad_slot, s), 0, store_full_gradient(store, s), floats);
    if (own) { place_is(RES_SUM, s, 0, store_floats(store, STATE_GRADIENT, s, 0), own * 4); }
    if (store_has_matrices(plan, s) && own) {
        const float *directions =
            matrices_directions(store->memory.matrices, &plan->rows[s].exchange);
        place_is(RES_DIRECTIONS, s, 0, directions, own * sizeof(float));
        place_is(RES_ORTHOGONAL, s, 0, directions, own * sizeof(float));
    }
    // the sum stays where the gradient is made
    if (!row->reduces_often) { place_is(RES_SUM, s, 0, store_full_gradient(store, s), floats); }
}
// Begins a pass: lists the memory of this rank's resources.
static void checked_begin(Executor *e, const Action *a, int64_t step) {
    Run *r = (Run *)(void *)((char *)e - offsetof(Run, executor));
    const int me = e->comm->rank;
    const ZeroPolicy *z = &e->store->plan.policy;
    const Schedule *evaluation = &r->plan->evaluation.rank[me];
    const bool evaluates = a >= evaluation->actions && a < evaluation->actions + evaluation->count;
    checking = !e->overlap && !e->clips && !z->offload && !z->quantized_gradients && !z->cyclic;
    if (!checking) { return; }
    const Program *p = evaluates ? &r->plan->evaluation : step_program(r, step);
    if (touches.program) { touch_plan_free(&touches); }
    touches = touch_plan(p, NULL, NULL);
    memory_count = place_count = 0;
    for (int s = 0; s < e->model->storages; s++) {
        if (touches.uses[me * e->model->storages + s]) { places_of_storage(e, s); }
    }
    for (int u = 0; u < e->model->units; u++) {
        for (int m = 0; m < p->micro_batches; m++) { places_of_unit(e, me, u, m); }
    }
}
static void checked_before(void *executor, const void *action, int index, long long step) {
    Executor *e = (Executor *)executor;
    const Action *a = (const Action *)action;
    if (index == 0) { checked_begin(e, a, step); }
    if (!checking) { return; }
    for (int i = 0; i < memory_count; i++) { memories[i].touched = false; }
    action_touches(&touches, e->comm->rank, a);
    for (int i = 0; i < touches.count; i++) {
        const Touch *t = &touches.touch[i];
        for (int k = 0; k < place_count; k++) {
            const ResourcePlace *p = &places[k];
            if (p->of == t->of && p->a == t->a && p->b == t->b) { p->memory->touched = true; }
        }
    }
    for (int i = 0; i < memory_count; i++) {
        Memory *m = &memories[i];
        bool used = m->touched; // or it is not a number already, as part of other memory
        for (int k = 0; k < memory_count && !used; k++) {
            const Memory *other = &memories[k];
            used = overlap(m, other) && (other->touched || other->kept);
        }
        if (used) { continue; }
        m->kept = (char *)malloc(m->bytes);
        memcpy(m->kept, m->at, m->bytes);
        memset(m->at, 0xFF, m->bytes);
    }
}
static void checked_after(void *executor) {
    Executor *e = (Executor *)executor;
    const Action *a = e->action;
    if (!checking) { return; }
    if (a->kind == ACT_REDUCE) { store_finish_reduce(e->store, a->storage); }
    for (int i = 0; i < memory_count; i++) {
        Memory *m = &memories[i];
        if (!m->kept) { continue; }
        for (size_t k = 0; k < m->bytes; k++) {
            if ((unsigned char)m->at[k] == 0xFF) { continue; }
            for (int n = 0; n < place_count; n++) {
                if (places[n].memory != m) { continue; }
                fprintf(
                    stderr,
                    "%s of unit %d, storage %d, micro-batch %d writes what it does not touch: %s "
                    "(%d, %d)\n",
                    action_name(a->kind), a->unit, a->storage, a->micro,
                    resource_text(places[n].of), (int)places[n].a, (int)places[n].b);
            }
            abort();
        }
        memcpy(m->at, m->kept, m->bytes);
        free(m->kept);
        m->kept = NULL;
    }
}
