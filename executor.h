// executor.h: runs a schedule. The one place where actions become work: MODEL computes, STORE holds states, COMM moves them.
//
// Buffers    boundary[u]  input of unit u (rows*T, C) in storage precision, u = 1 .. L+1: all that survives of a forward
//                         pass under --recompute block
//            blocks       activations inside blocks: one set per block, or a single one under --recompute block
//            gradient[2]  gradients of boundaries, in turns: unit u writes one while its weight part still reads the other
//            work         what a block's input part leaves for its weight part
//            tokens, targets, losses of all of a step's samples on this rank wait on the host, each micro-batch's in its own place:
//                         so nobody waits for the device before the end of a step, when all losses are there at once
// All of it is taken once, in executor_make, which also says beforehand how much.
// A micro-batch's loss is summed per sample, in fp64; samples are added in the order of their numbers, so the loss of a step
// is the same for every layout.
#ifndef EXECUTOR_H
#define EXECUTOR_H

#include "dataloader.h" // samples
#include "zero.h"       // states

typedef struct {
    const GptModel *model;
    Stream *stream;
    Store *store;
    const UnitMap *map;
    int64_t T, rows; // largest shapes
    bool recompute;
    DType dtype;
    // activations
    void **boundary;   // [units]
    BlockActs *blocks; // [layers or 1]
    HeadActs head;
    int32_t *tokens, *targets; // (rows, T) on the device
    // buffers
    BlockGradients work;
    Real *gradient[2];
    Real *input, *output;        // a block's input and output in compute precision, where that differs from storage precision
    Real *logits;                // (Vp) one row, for generation
    char *activations, *buffers; // the allocations all of these lie in
    OpsMark **marks;             // [actions of a step + 1] when each began, for a profile: then nothing is repeated as a whole; NULL: not wanted
    // host
    int64_t first_row;                   // of a step's samples, the first that this rank computes
    int32_t *host_tokens, *host_targets; // (samples, T) from it on
    float *host_losses;                  // the same
    float *host_logits;                  // (Vp)
    const Real **held;                   // [storages] acquired parameters
    int current;                         // gradient[current] belongs to the boundary that backward has reached
    const Action *volatile action;       // that is running, for signal handlers; NULL between passes
    volatile int64_t step;
    int64_t version; // of the parameters when the pass began
} Executor;

// What one pass works on.
typedef struct {
    const Dataset *data;
    int64_t first_sample;  // number of the pass's first sample in the run
    int64_t samples;       // of this pass; rows beyond are left out
    double *sample_losses; // [samples] sum of -log p over a sample's targets, filled for the rows this rank computes
    float scale;           // of the loss: 1 / targets of the step
    bool training;         // false: only losses
    double *sample_right;  // [samples] of labelled data: 1 where the likeliest label is the sample's, else 0. NULL: not wanted
} Pass;

// ---------------------------------------------------------------------------------------------------------------------
// Memory
static inline void executor_carve_activations(Executor *e, Arena *a) {
    int64_t N = e->rows * e->T, C = e->model->config.channels;
    for (int u = 1; u < e->model->units; u++) { e->boundary[u] = arena_take(a, (size_t)(N * C) * dtype_size(e->dtype)); }
    for (int b = 0; b < (e->recompute ? 1 : e->model->config.layers); b++) { e->blocks[b] = gpt_block_acts(a, &e->model->config, N); }
    e->head = gpt_head_acts(a, &e->model->config, N);
    e->tokens = (int32_t *)arena_take(a, (size_t)N * sizeof(int32_t));
    e->targets = (int32_t *)arena_take(a, (size_t)N * sizeof(int32_t));
}
static inline void executor_carve_buffers(Executor *e, Arena *a) {
    int64_t N = e->rows * e->T, C = e->model->config.channels;
    e->work = gpt_block_gradients(a, &e->model->config, N);
    e->gradient[0] = arena_reals(a, N * C), e->gradient[1] = arena_reals(a, N * C);
    e->input = e->output = NULL;
    if (store_converts(e->dtype)) { e->input = arena_reals(a, N * C), e->output = arena_reals(a, N * C); }
    e->logits = arena_reals(a, e->model->config.padded_vocab);
}

// Makes the executor of a rank, for micro-batches of at most `rows` sequences of T tokens. allocate = false only counts: activation
// and buffer bytes.
static inline Executor executor_make(const GptModel *m, const Program *program, int rank, Store *store, Stream *stream, DType dtype, int64_t rows, int64_t T,
                                     bool recompute, bool allocate, size_t *activation_bytes, size_t *buffer_bytes) {
    Executor e;
    memset(&e, 0, sizeof e);
    e.model = m, e.map = &program->map, e.store = store, e.stream = stream, e.dtype = dtype, e.rows = rows, e.T = T, e.recompute = recompute;
    e.boundary = (void **)checked_calloc((size_t)m->units, sizeof(void *), "executor");
    e.blocks = (BlockActs *)checked_calloc((size_t)m->config.layers, sizeof(BlockActs), "executor");
    e.held = (const Real **)checked_calloc((size_t)m->storages, sizeof(Real *), "executor");
    Arena activations = {NULL, 0}, buffers = {NULL, 0};
    executor_carve_activations(&e, &activations);
    executor_carve_buffers(&e, &buffers);
    *activation_bytes = activations.used, *buffer_bytes = buffers.used;
    if (!allocate) { return e; }
    e.activations = activations.base = (char *)memory_take(MEMORY_ACTIVATIONS, activations.used, "activations");
    e.buffers = buffers.base = (char *)memory_take(MEMORY_BUFFERS, buffers.used, "gradients of activations");
    activations.used = buffers.used = 0;
    executor_carve_activations(&e, &activations);
    executor_carve_buffers(&e, &buffers);
    size_t N = (size_t)(schedule_rows(&program->rank[rank], &e.first_row) * T);
    e.host_tokens = (int32_t *)memory_take_host(N * sizeof(int32_t), "tokens");
    e.host_targets = (int32_t *)memory_take_host(N * sizeof(int32_t), "targets");
    e.host_losses = (float *)memory_take_host(N * sizeof(float), "losses");
    e.host_logits = (float *)checked_malloc((size_t)m->config.padded_vocab * sizeof(float), "logits");
    return e;
}
static inline void executor_free(Executor *e) {
    ops_free(e->activations), ops_free(e->buffers);
    ops_free_host(e->host_tokens), ops_free_host(e->host_targets), ops_free_host(e->host_losses);
    free(e->boundary), free(e->blocks), free(e->held), free(e->host_logits);
    memset(e, 0, sizeof *e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Boundaries: a unit's input and output in compute precision
static inline const Real *boundary_read(Executor *e, int unit, int64_t n) {
    if (!store_converts(e->dtype)) { return (const Real *)e->boundary[unit]; }
    ops_unpack(e->stream, e->input, e->boundary[unit], e->dtype, n);
    return e->input;
}
static inline Real *boundary_write_begin(Executor *e, int unit) { return store_converts(e->dtype) ? e->output : (Real *)e->boundary[unit]; }
static inline void boundary_write_end(Executor *e, int unit, int64_t n) {
    if (store_converts(e->dtype)) { ops_pack(e->stream, e->boundary[unit], e->output, e->dtype, n); }
}

// ---------------------------------------------------------------------------------------------------------------------
// Compute actions

// All that a block's work depends on, besides what never changes: it is the key under which the work can be repeated. The head's
// depends on the pass as well. Cleared before it is filled, since keys are compared as bytes.
typedef struct {
    ActionKind kind;
    int unit, current;            // current: as the executor's
    int64_t rows, T, N, elements; // N = rows * T, elements = N * C
    UnitStates states;
} Work;

static inline const BlockActs *executor_block(const Executor *e, int unit) { return &e->blocks[e->recompute ? 0 : unit - 1]; }

// Where the host keeps what belongs to a row of the step.
static inline int64_t executor_host_place(const Executor *e, int64_t row, const Pass *pass) { return (row - e->first_row) * pass->data->options.T; }
static inline int64_t executor_rows(const Action *a, const Pass *pass) { return min_i64(a->rows, pass->samples - a->first_row); }
static inline bool executor_gives_losses(const Executor *e, const Action *a, const Pass *pass) {
    return a->unit == e->model->units - 1 && a->kind == (pass->training ? ACT_BACKWARD_INPUT : ACT_FORWARD);
}

// The losses of the pass, summed per sample. They are there: somebody has waited.
static inline void executor_take_losses(const Executor *e, const Schedule *schedule, const Pass *pass) {
    int64_t T = pass->data->options.T;
    for (int i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        for (int64_t r = 0; executor_gives_losses(e, a, pass) && r < executor_rows(a, pass); r++) {
            const float *losses = e->host_losses + executor_host_place(e, a->first_row + r, pass);
            double sum = 0;
            for (int64_t t = 0; t < T; t++) { sum += (double)losses[t]; }
            pass->sample_losses[a->first_row + r] = sum;
        }
    }
}

// logits(rows, count) of tokens first .. first + count - 1, of rows of the head's layernorm, on the host; there is room for padded_vocab.
static inline void executor_logits_of_rows(Executor *e, const UnitStates *states, const Real *lnf, int64_t rows, int64_t first, int64_t count, float *logits) {
    const int64_t C = e->model->config.channels;
    assert(rows * count <= e->model->config.padded_vocab);
    ops_matmul_forward(e->stream, e->logits, NULL, lnf, real_at_const(unit_param(e->model, states, WTE), first * C), NULL, rows, C, count);
    ops_reals_to_host(e->stream, logits, e->logits, rows * count);
}

// Where among the rows of a micro-batch the label of its r-th sample is predicted: the last target.
static inline int64_t executor_label_row(const Work *w, const Pass *pass, int64_t first_row, int64_t r) {
    return r * w->T + dataset_targets(pass->data, pass->first_sample + first_row + r) - 1;
}
// Whether each sample's label is the likeliest of all labels. One product for as many samples as there is room for.
static inline void executor_judge_labels(Executor *e, const Work *w, const Pass *pass, int64_t first_row) {
    const int64_t C = e->model->config.channels, first = pass->data->first_label, labels = pass->data->labels;
    const int64_t most = e->model->config.padded_vocab / labels;
    const int32_t *targets = e->host_targets + executor_host_place(e, first_row, pass);
    Real *gathered = e->gradient[1 - e->current]; // free until the last block's backward pass
    for (int64_t begin = 0; begin < w->rows; begin += most) {
        const int64_t count = min_i64(most, w->rows - begin);
        for (int64_t r = 0; r < count; r++) {
            const Real *row = real_at_const(e->head.lnf, executor_label_row(w, pass, first_row, begin + r) * C);
            ops_copy(e->stream, real_at(gathered, r * C), row, (size_t)C * ops_real_bytes());
        }
        executor_logits_of_rows(e, &w->states, gathered, count, first, labels, e->host_logits);
        for (int64_t r = 0; r < count; r++) {
            const float *logits = e->host_logits + r * labels;
            int64_t best = 0;
            for (int64_t i = 1; i < labels; i++) { best = logits[i] > logits[best] ? i : best; }
            pass->sample_right[first_row + begin + r] = targets[executor_label_row(w, pass, first_row, begin + r)] == first + best;
        }
    }
}

static inline void executor_load_samples(Executor *e, const Work *w, const Pass *pass, int64_t first_row) {
    int32_t *tokens = e->host_tokens + executor_host_place(e, first_row, pass), *targets = e->host_targets + executor_host_place(e, first_row, pass);
    dataset_fill(pass->data, pass->first_sample + first_row, w->rows, tokens, targets);
    ops_from_host(e->stream, e->tokens, tokens, (size_t)w->N * sizeof(int32_t));
    ops_from_host(e->stream, e->targets, targets, (size_t)w->N * sizeof(int32_t));
}

static inline void run_forward(Executor *e, const Work *w) {
    int unit = w->unit, head = e->model->units - 1;
    if (unit == head) {
        gpt_head_forward(e->stream, e->model, &w->states, boundary_read(e, unit, w->elements), &e->head, w->N);
        return;
    }
    const Real *x = unit ? boundary_read(e, unit, w->elements) : NULL;
    Real *out = boundary_write_begin(e, unit + 1);
    if (unit == 0) {
        gpt_embedding_forward(e->stream, e->model, &w->states, out, e->tokens, w->rows, w->T);
    } else {
        gpt_block_forward(e->stream, e->model, &w->states, out, x, executor_block(e, unit), w->rows, w->T);
    }
    boundary_write_end(e, unit + 1, w->elements);
}

static inline void run_backward_input(Executor *e, const Work *w, const Pass *pass) {
    const Real *x = boundary_read(e, w->unit, w->elements), *dout = e->gradient[e->current];
    if (w->unit == e->model->units - 1) {
        gpt_head_backward_input(e->stream, e->model, &w->states, e->gradient[e->current], x, &e->head, e->targets, w->N, pass->scale);
        return;
    }
    gpt_block_backward_input(e->stream, e->model, &w->states, e->gradient[1 - e->current], dout, x, executor_block(e, w->unit), &e->work, w->rows, w->T);
}

static inline void run_backward_weight(Executor *e, const Work *w) {
    const Real *dout = e->gradient[e->current];
    if (w->unit == 0) {
        gpt_embedding_backward_weight(e->stream, e->model, &w->states, dout, e->tokens, w->rows, w->T);
        return;
    }
    const Real *x = boundary_read(e, w->unit, w->elements);
    if (w->unit == e->model->units - 1) {
        gpt_head_backward_weight(e->stream, e->model, &w->states, x, &e->head, w->N);
        return;
    }
    gpt_block_backward_weight(e->stream, e->model, &w->states, dout, x, executor_block(e, w->unit), &e->work, w->rows, w->T);
}

static inline void run_work(Executor *e, const Work *w, const Pass *pass) {
    switch (w->kind) {
    case ACT_FORWARD: run_forward(e, w); break;
    case ACT_RECOMPUTE:
        gpt_block_forward(e->stream, e->model, &w->states, NULL, boundary_read(e, w->unit, w->elements), executor_block(e, w->unit), w->rows, w->T);
        break;
    case ACT_BACKWARD_INPUT: run_backward_input(e, w, pass); break;
    default: run_backward_weight(e, w);
    }
}

static inline void run_compute(Executor *e, const Action *a, const Pass *pass) {
    Work w;
    memset(&w, 0, sizeof w);
    w.unit = a->unit, w.rows = executor_rows(a, pass), w.T = pass->data->options.T;
    if (w.rows <= 0) { return; }
    w.N = w.rows * w.T, w.elements = w.N * e->model->config.channels;
    int storages[2], n = gpt_unit_storages(e->model, a->unit, storages);
    for (int i = 0; i < n; i++) {
        StorageClass c = gpt_storage_class(e->model, storages[i]);
        if (action_reads_parameters(a->kind)) { w.states.params[c] = e->held[storages[i]]; }
        if (action_contributes(e->map, a, storages[i])) { w.states.grads[c] = store_gradient(e->store, storages[i], &w.states.accumulate[c]); }
    }
    if (a->kind == ACT_FORWARD && a->unit == 0) { executor_load_samples(e, &w, pass, a->first_row); }
    w.kind = a->kind, w.current = e->current;
    bool block = a->unit > 0 && a->unit < e->model->units - 1, repeated = block && !e->marks;
    if (!repeated || ops_repeat_begin(e->stream, &w, sizeof w)) {
        run_work(e, &w, pass);
        if (repeated) { ops_repeat_end(e->stream); }
    }
    if (block && a->kind == ACT_BACKWARD_WEIGHT) { e->current = 1 - e->current; } // dout is free: the gradient is now that of this unit's input
    if (!executor_gives_losses(e, a, pass)) { return; }
    if (!pass->training) { gpt_head_losses(e->stream, e->model, &w.states, &e->head, e->targets, w.N); }
    ops_to_host_later(e->stream, e->host_losses + executor_host_place(e, a->first_row, pass), e->head.losses, (size_t)w.N * sizeof(float));
    if (pass->sample_right) { executor_judge_labels(e, &w, pass, a->first_row); }
}

// ---------------------------------------------------------------------------------------------------------------------
// Running. All ranks run the schedules of one program.

#ifndef EXECUTOR_HOOK // tests of faults look in here: what is about to run
#define EXECUTOR_HOOK(action, step)
#endif

static inline void executor_begin(Executor *e, const Action *a, int index, int64_t step) {
    EXECUTOR_HOOK(a, step);
    e->action = a, e->step = step;
    bool of_unit = a->unit >= 0;
    ops_range_begin(action_names[a->kind], of_unit ? "unit" : "storage", of_unit ? a->unit : a->storage);
    if (e->marks) { ops_mark(e->stream, e->marks[index]); }
}
// What this rank is doing. For signal handlers.
static inline void executor_describe(const Executor *e, SignalText *t) {
    const Action *a = e->action;
    if (!a) {
        signal_text_add(t, "between steps");
        return;
    }
    signal_text_add(t, action_names[a->kind]);
    if (a->unit >= 0) {
        signal_text_add(t, " of unit "), signal_text_add_int(t, a->unit), signal_text_add(t, ", micro-batch "), signal_text_add_int(t, a->micro);
    }
    if (a->storage >= 0) { signal_text_add(t, " of storage "), signal_text_add_int(t, a->storage); }
    signal_text_add(t, ", step "), signal_text_add_int(t, e->step + 1);
}

// Runs this rank's actions from *at up to and including NORM (whose result goes to *norm), or to the end; *at moves on.
// The caller looks at loss and norm there, and runs the rest (the updates) with the optimizer settings of the step, or not.
// Losses are there after NORM, or at the end of a pass that does not train: the only places where the host waits for the device,
// unless messages make it.
static inline void executor_run(Executor *e, const Schedule *schedule, int *at, const Pass *pass, const OptimizerStep *optimizer, int64_t step, double *norm) {
    if (*at == 0) { e->version = e->store->updates[0]; }
    while (*at < schedule->count) {
        const Action *a = &schedule->actions[*at];
        executor_begin(e, a, (*at)++, step);
        switch (a->kind) {
        case ACT_PREFETCH: store_prefetch(e->store, a->storage, e->version + a->version, a->near, step); break;
        case ACT_ACQUIRE: e->held[a->storage] = store_acquire(e->store, a->storage, e->version + a->version); break;
        case ACT_RELEASE: store_release(e->store, a->storage); break;
        case ACT_REDUCE: store_reduce(e->store, a->storage, step + a->step); break;
        case ACT_UPDATE: store_update(e->store, a->storage, *optimizer); break;
        case ACT_NORM:
            *norm = store_norm(e->store);
            executor_take_losses(e, schedule, pass);
            break;
        default: assert(action_computes(a->kind)); run_compute(e, a, pass); // no builder sends yet
        }
        ops_range_end();
        if (a->kind == ACT_NORM) { return; }
    }
    if (!pass->training) {
        ops_wait(e->stream);
        executor_take_losses(e, schedule, pass);
    }
    e->action = NULL;
}

// Logits(Vp), on the host, of the token that follows tokens(n), n <= T. No schedule: one sequence through all units. Every rank calls it.
static inline void executor_logits(Executor *e, const int32_t *tokens, int64_t n, float *logits) {
    const GptModel *m = e->model;
    Work w;
    memset(&w, 0, sizeof w);
    w.rows = 1, w.T = w.N = n, w.elements = n * m->config.channels;
    ops_from_host(e->stream, e->tokens, tokens, (size_t)n * sizeof(int32_t));
    for (w.unit = 0; w.unit < m->units; w.unit++) {
        int storages[2], count = gpt_unit_storages(m, w.unit, storages);
        for (int i = 0; i < count; i++) {
            int64_t version = e->store->updates[storages[i]];
            if (store_gathers_for_use(e->store)) { store_prefetch(e->store, storages[i], version, true, e->step); }
            w.states.params[gpt_storage_class(m, storages[i])] = store_acquire(e->store, storages[i], version);
        }
        run_forward(e, &w);
        if (w.unit == m->units - 1) {
            executor_logits_of_rows(e, &w.states, real_at_const(e->head.lnf, (n - 1) * m->config.channels), 1, 0, m->config.padded_vocab, logits);
        }
        for (int i = 0; i < count; i++) { store_release(e->store, storages[i]); }
    }
}

#endif
