// checked_touches.h: checks what touches.h says of each action (train_gpt_faulty.c, TOUCHES=1).
// While an action runs, all memory of parameters, gradients and activations that it does not touch
// is not a number. So an action that reads what it does not say computes another loss than the
// program, and one that writes it is named here, and ends the run. Messages are waited for at once:
// a touch holds until the message is complete, and so must what follows it (sums of quantized
// gradients, and on the host) be. Not checked: states of steps that overlap, states of pieces,
// delayed updates.
#ifndef CHECKED_TOUCHES_H
#define CHECKED_TOUCHES_H

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
static TouchPlan own, *touches = &own; // of the pass
static bool checking, rows_only;
static const Action *last_list;
static int last_index;

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
static void places_of_unit(Executor *e, int rank, int u, int64_t micro) {
    const int head = e->model->units - 1;
    const UnitClass c = gpt_unit_class(e->model, u);
    const size_t boundary = executor_boundary_bytes(&e->shape, e->model);
    const Action a = {.kind = ACT_FORWARD, .unit = u, .storage = -1, .micro = micro, .rows = 1};
    const bool mine = executor_has(&e->shape, u);
    if (u && u <= head && (mine || units_sender(&e->shape.units, u) >= 0)) {
        place_is(RES_INPUT, u, touch_input_place(touches, rank, u, micro),
                 executor_boundary(e, u, micro), boundary);
        touches->count = 0;
        const Touch *t = touch_input_gradient(touches, TOUCH_READ, rank, u, &a);
        if (t->b >= 0) { place_is(t->of, t->a, t->b, executor_gradient(e, u, micro), boundary); }
    }
    if (!mine) { return; }
    const bool block = c == UNIT_BLOCK, again = block && e->shape.recompute;
    const UnitBuffers *values = &executor_acts(e, u, micro)->unit[u];
    const int64_t place = touch_place(micro, touch_live(touches, rank, u));
    place_is(
        again ? RES_RECOMPUTED : RES_ACTIVATIONS, again ? 0 : u, again ? 0 : place,
        lowest((void *const *)values->value, VALUE_FIRST, gpt_unit_spec(e->model, c)->value_count),
        values_bytes(e, c, false));
    if (!block) { return; }
    const UnitSpec *spec = gpt_unit_spec(e->model, c);
    const UnitBuffers *made = &executor_grads(e, micro)->unit[u];
    const int64_t N = e->shape.rows * e->shape.T;
    for (int g = GRADIENT_FIRST; g < spec->gradient_count; g++) {
        if (spec->gradients[g].with_values) { continue; }
        place_is(RES_WORK, u, micro, made->gradient[g],
                 N * gradient_width(e->model, &spec->gradients[g]) * ops_real_bytes());
    }
}
// Norms and factors of samples, if they are kept from one action to another.
static void places_of_samples(Executor *e, int rank, int64_t micro) {
    const Program *p = touches->program;
    const Clip *c = &e->clip[executor_clip_place(e, micro)];
    const size_t rows = e->shape.rows, floats = rows * sizeof(float), norms = rows * sizeof(double),
                 tied = floats * e->shape.T * gpt_width(e->model);
    const int64_t place = touch_clip_place(touches, rank, micro);
    const bool first = executor_has(&e->shape, 0);
    if (program_waits(p)) { place_is(RES_NORMS, 0, place, c->norms, norms); }
    for (int u = 1; u < e->model->units && program_waits(p); u++) {
        for (int t = 0; t < e->model->arch->tensor_count && executor_has(&e->shape, u); t++) {
            place_is(RES_NORMS, u, place, c->sums[u].tensor[t],
                     floats * (size_t)e->model->tensor_elements[t]);
        }
    }
    if (!program_crosses(p)) {
        if (program_waits(p)) { place_is(RES_FACTORS, 0, place, c->factors, floats); }
        return;
    }
    if (first || program_waits(p)) {
        place_is(RES_FACTORS, 0, place, first ? c->crossing.factors : c->factors, floats);
    }
    if (!first && executor_has_head(e)) {
        if (p->clips != CLIPS_ALL) { place_is(RES_CROSSING, 0, place, c->crossing.others, norms); }
        place_is(RES_CROSSING, 0, place, c->crossing.tied, tied);
    }
    for (int u = 1; u < e->model->units; u++) {
        if (!program_sends_norms(p, u)) { continue; }
        const int sender = p->clips == CLIPS_ALL ? p->map.stage[u] - 1 : 0;
        if (first) {
            place_is(RES_FAR_NORMS, u, place, c->crossing.others + sender * (int64_t)rows, norms);
            if (u + 1 == e->model->units) {
                place_is(RES_FAR_NORMS, u, place, c->crossing.tied, tied);
            }
        } else if (executor_has(&e->shape, u)) {
            place_is(RES_FAR_FACTORS, u, place, c->crossing.factors, floats);
        }
    }
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
    if (own && row->sum == SUM_STAYS) {
        place_is(RES_SUM, s, 0, store_floats(store, STATE_GRADIENT, s, 0), own * 4);
    }
    if (store_has_matrices(plan, s) && own && !row->pieces) {
        const float *directions =
            matrices_directions(store->memory.matrices, &plan->rows[s].exchange);
        place_is(RES_DIRECTIONS, s, 0, directions, own * sizeof(float));
        place_is(RES_ORTHOGONAL, s, 0, directions, own * sizeof(float));
    }
    // the sum stays where the gradient is made
    if (!row->reduces_often && row->sum == SUM_STAYS) {
        place_is(RES_SUM, s, 0, store_full_gradient(store, s), floats);
    }
}
// Begins a pass: lists the memory of this rank's resources.
static void checked_begin(Executor *e, const Action *a, int64_t step) {
    Run *r = (Run *)(void *)((char *)e - offsetof(Run, executor));
    const int me = e->comm->rank;
    const Schedule *evaluation = &r->plan->evaluation.rank[me];
    const bool evaluates = a >= evaluation->actions && a < evaluation->actions + evaluation->count;
    const bool overlaps = e->overlap && !evaluates;
    checking = !store_delays(&e->store->plan);
    if (!checking) { return; }
    rows_only = e->overlap != NULL;
    const Program *p = evaluates ? &r->plan->evaluation : step_program(r, step);
    if (own.program) { touch_plan_free(&own); }
    own = touch_plan(p, NULL, NULL);
    touches = rows_only ? &e->touches[overlaps] : &own;
    memory_count = place_count = 0;
    for (int s = 0; s < e->model->storages && !rows_only; s++) {
        if (own.uses[me * e->model->storages + s]) { places_of_storage(e, s); }
    }
    for (int i = 0; i < STASH_SLOTS && executor_stashes(&e->shape, e->model->units); i++) {
        place_is(RES_STASH, i, 0, e->stash_slot[i], executor_stash_bytes(&e->shape, e->model));
    }
    // where steps overlap, a window has micro-batches of the steps around it
    const int64_t around = overlaps ? 2 * e->step_micros : 0,
                  begin = max_i64(0, e->first_micro - around),
                  end = e->first_micro + p->micro_batches + around;
    for (int64_t m = begin; m < end; m++) {
        for (int u = 0; u < e->model->units; u++) { places_of_unit(e, me, u, m); }
        if (e->clips) { places_of_samples(e, me, m); }
    }
}
static void checked_before(void *executor, const void *action, int index, long long step) {
    Executor *e = (Executor *)executor;
    const Action *a = (const Action *)action;
    // Another list, or the same one again: a list may begin after its first actions.
    if (a - index != last_list || index <= last_index) { checked_begin(e, a, step); }
    last_list = a - index;
    last_index = index;
    if (!checking) { return; }
    for (int i = 0; i < memory_count; i++) { memories[i].touched = false; }
    if (rows_only) {
        (void)executor_touches(e, a, touches == &e->touches[true]);
    } else {
        action_touches(touches, e->comm->rank, a);
    }
    for (int i = 0; i < touches->count; i++) {
        const Touch *t = &touches->touch[i];
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
// Ends what an action has begun on sums, so that no later action does it.
static void checked_finish(Store *s, const Action *a) {
    BucketExchange *p = exchange_newest(s);
    if (a->kind == ACT_REDUCE && p->hop) {
        exchange_send_on(s, p);
        exchange_finish(s, p);
    }
    for (int i = 0; i < MOVING_PIECES && a->kind == ACT_EVICT_SUM; i++) {
        store_finish_adding(s, i);
    }
}
static void checked_after(void *executor) {
    Executor *e = (Executor *)executor;
    const Action *a = e->action;
    if (!checking) { return; }
    if (a->kind == ACT_REDUCE && !rows_only) { store_finish_reduce(e->store, a->storage); }
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
                    action_name(a->kind), a->unit, a->storage, (int)a->micro,
                    resource_text(places[n].of), (int)places[n].a, (int)places[n].b);
            }
            abort();
        }
        memcpy(m->at, m->kept, m->bytes);
        free(m->kept);
        m->kept = NULL;
    }
    if (!rows_only) { checked_finish(e->store, a); }
}

#endif
