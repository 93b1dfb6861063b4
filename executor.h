// executor.h: runs a schedule. The one place where actions become work: MODEL computes, STORE holds states, COMM moves them.
//
// Buffers    boundary[u]  input of unit u (rows*T, C) in storage precision, u = 1 .. L+1: all that survives of a forward
//                         pass under --recompute block
//            blocks       activations inside blocks: one set per block, or a single one under --recompute block
//            gradient     of each boundary: two places in turns, since unit u writes one while its weight part still reads the other
//            work         what a block's input part leaves for its weight part
//            Where samples are clipped by their norm over all units (dp.h: flat), weight parts wait: then what a unit's input part
//            leaves lies in activations that the unit above it has done with, and the topmost's in places of their own
//            tokens, targets, losses of all of a step's samples on this rank wait on the host, each micro-batch's in its own place:
//                         so nobody waits for the device before the end of a step, when all losses are there at once
// All of it is taken once, in executor_make, which also says beforehand how much.
// A micro-batch's loss is summed per sample, in fp64; samples are added in the order of their numbers, so the loss of a step
// is the same for every layout.
#ifndef EXECUTOR_H
#define EXECUTOR_H

#include "dataloader.h" // samples
#include "dp.h"         // clipping
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
    BlockGradients *work;        // [layers]
    Real **gradient;             // [units] of boundaries
    Clip clip;                   // policy.on: samples are clipped
    Real *input, *output;        // a block's input and output in compute precision, where that differs from storage precision
    Real *logits;                // (Vp) one row, for generation
    char *activations, *buffers; // the allocations all of these lie in
    OpsMark **marks;             // [actions of a step + 1] when each began, for a profile: then nothing is repeated as a whole; NULL: not wanted
    // host
    int64_t first_row;                   // of a pass's samples, the first that this rank computes
    int32_t *host_tokens, *host_targets; // (samples, T) from it on
    float *host_losses;                  // the same
    float *host_logits;                  // (Vp)
    float *host_weights;                 // (rows) of clipped samples
    const Real **held;                   // [storages] acquired parameters
    const Action *volatile action;       // that is running, for signal handlers; NULL between passes
    volatile int64_t step;
    int64_t version; // of the parameters when the pass began
} Executor;

// What one pass works on.
typedef struct {
    const Dataset *data;
    int64_t first_sample;   // number of the pass's first sample in the run
    const int64_t *windows; // [samples] of the data, instead of samples that follow each other; or NULL
    int64_t samples;        // of this pass; rows beyond are left out
    double *sample_losses;  // [samples] sum of -log p over a sample's targets, filled for the rows this rank computes
    float scale;            // of the loss: 1 / targets of the step
    bool training;          // false: only losses
    double *sample_right;   // [samples] of labelled data: 1 where the likeliest label is the sample's, else 0. NULL: not wanted
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
    if (e->clip.policy.on) { clip_carve_activations(&e->clip, a, e->model, e->rows, e->T); }
}
// Gradients: two places of boundaries and one of blocks in turns.
static inline void executor_carve_turns(Executor *e, Arena *a, int64_t elements) {
    Real *turns[2] = {arena_reals(a, elements), arena_reals(a, elements)};
    for (int u = 1; u < e->model->units; u++) { e->gradient[u] = turns[u % 2]; }
    for (int l = 1; l < e->model->config.layers; l++) { e->work[l] = e->work[0]; }
}
// Gradients that all stay until the weight parts: what is as large among the activations of the unit above is free by then.
static inline void executor_carve_kept(Executor *e, Arena *a, int64_t elements) {
    const int last = e->model->units - 1, top = (int)e->model->config.layers - 1;
    for (int u = 1; u <= last; u++) { e->gradient[u] = u == last || store_converts(e->dtype) ? arena_reals(a, elements) : (Real *)e->boundary[u + 1]; }
    e->work[top] = e->work[0];
    for (int l = 0; l < top; l++) {
        const BlockActs *above = &e->blocks[l + 1];
        e->work[l] = e->work[top];
        e->work[l].dfc = above->fc, e->work[l].dqkv = above->qkv, e->work[l].dres2 = above->res2;
    }
}
static inline void executor_carve_buffers(Executor *e, Arena *a) {
    int64_t N = e->rows * e->T, C = e->model->config.channels;
    e->work[0] = gpt_block_gradients(a, &e->model->config, N);
    if (e->clip.policy.flat) {
        executor_carve_kept(e, a, N * C);
    } else {
        executor_carve_turns(e, a, N * C);
    }
    e->input = e->output = NULL;
    if (store_converts(e->dtype)) { e->input = arena_reals(a, N * C), e->output = arena_reals(a, N * C); }
    e->logits = arena_reals(a, e->model->config.padded_vocab);
    if (e->clip.policy.on) { clip_carve_buffers(&e->clip, a, e->model, e->rows, e->T); }
}

// What an executor is made for.
typedef struct {
    DType dtype;
    int64_t rows, T; // of a micro-batch, at most
    bool recompute;
    int64_t logits; // rows of logits at a time, where they are not kept
    ClipPolicy clip;
} ExecutorShape;

// Bytes of the operations' workspace.
static inline size_t executor_workspace_bytes(const GptModel *m, const ExecutorShape *shape, int threads) {
    bool kept = shape->clip.on && !shape->clip.again && !clip_instantiates_head(m, shape->T);
    return gpt_workspace_bytes(m, shape->rows, shape->T, threads, kept ? 0 : shape->logits);
}

// Counts the activations and buffers of a rank. executor_allocate makes it ready to run.
static inline Executor executor_plan(const GptModel *m, ExecutorShape shape, size_t *activation_bytes, size_t *buffer_bytes) {
    Executor e;
    memset(&e, 0, sizeof e);
    e.model = m, e.dtype = shape.dtype, e.rows = shape.rows, e.T = shape.T, e.recompute = shape.recompute, e.clip.policy = shape.clip;
    e.boundary = (void **)checked_calloc((size_t)m->units, sizeof(void *), "executor");
    e.gradient = (Real **)checked_calloc((size_t)m->units, sizeof(Real *), "executor");
    e.blocks = (BlockActs *)checked_calloc((size_t)m->config.layers, sizeof(BlockActs), "executor");
    e.work = (BlockGradients *)checked_calloc((size_t)m->config.layers, sizeof(BlockGradients), "executor");
    e.clip.blocks = (BlockSums *)checked_calloc((size_t)m->config.layers, sizeof(BlockSums), "executor");
    e.held = (const Real **)checked_calloc((size_t)m->storages, sizeof(Real *), "executor");
    Arena activations = {NULL, 0}, buffers = {NULL, 0};
    executor_carve_activations(&e, &activations);
    executor_carve_buffers(&e, &buffers);
    *activation_bytes = activations.used, *buffer_bytes = buffers.used;
    return e;
}
static inline void executor_free(Executor *e) {
    ops_free(e->activations), ops_free(e->buffers);
    ops_free_host(e->host_tokens), ops_free_host(e->host_targets), ops_free_host(e->host_losses);
    free(e->boundary), free(e->gradient), free(e->blocks), free(e->work), free(e->clip.blocks), free(e->held), free(e->host_logits), free(e->host_weights);
    memset(e, 0, sizeof *e);
}
// All that it works with, in bytes.
static inline double executor_bytes(const GptModel *m, ExecutorShape shape, int threads) {
    size_t activations, buffers;
    Executor counted = executor_plan(m, shape, &activations, &buffers);
    executor_free(&counted);
    return (double)activations + (double)buffers + (double)executor_workspace_bytes(m, &shape, threads);
}
// Makes micro-steps that clip shorter, where that takes no more messages (`often`: each takes its own), and chunks of logits, so that what
// clipping keeps of a sample takes hardly more memory than longer ones would without it. states: bytes of all else.
static inline void executor_shorten(const GptModel *m, ExecutorShape *shape, double states, bool often, int threads) {
    const int64_t LEAST_LOGITS = 128;
    const double HARDLY = 0.045, TOO_MUCH = 1.1;
    ExecutorShape plain = *shape;
    plain.clip.on = plain.clip.flat = false;
    const double without = executor_bytes(m, plain, threads), most = without + HARDLY * (without + states);
    while (executor_bytes(m, *shape, threads) > most) {
        if (shape->rows > 1 && !often) {
            shape->rows--;
        } else if (shape->logits > LEAST_LOGITS) {
            shape->logits /= 2;
        } else {
            shape->clip.again = !shape->clip.flat && executor_bytes(m, *shape, threads) > TOO_MUCH * most;
            break;
        }
    }
}
// samples: that this rank computes in a step, at most.
static inline void executor_allocate(Executor *e, const UnitMap *map, Store *store, Stream *stream, int64_t samples) {
    Arena activations = {NULL, 0}, buffers = {NULL, 0};
    e->map = map, e->store = store, e->stream = stream;
    executor_carve_activations(e, &activations);
    executor_carve_buffers(e, &buffers);
    e->activations = activations.base = (char *)memory_take(MEMORY_ACTIVATIONS, activations.used, "activations");
    e->buffers = buffers.base = (char *)memory_take(MEMORY_BUFFERS, buffers.used, "gradients of activations");
    activations.used = buffers.used = 0;
    executor_carve_activations(e, &activations);
    executor_carve_buffers(e, &buffers);
    size_t N = (size_t)(samples * e->T);
    e->host_tokens = (int32_t *)memory_take_host(N * sizeof(int32_t), "tokens");
    e->host_targets = (int32_t *)memory_take_host(N * sizeof(int32_t), "targets");
    e->host_losses = (float *)memory_take_host(N * sizeof(float), "losses");
    e->host_logits = (float *)checked_malloc((size_t)e->model->config.padded_vocab * sizeof(float), "logits");
    e->host_weights = (float *)checked_malloc((size_t)e->rows * sizeof(float), "weights");
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
    int unit;
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
    Real *gathered = e->gradient[e->model->units - 1]; // free until the backward pass
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
    if (pass->windows) {
        dataset_fill_windows(pass->data, pass->windows + first_row, w->rows, tokens, targets);
    } else {
        dataset_fill(pass->data, pass->first_sample + first_row, w->rows, tokens, targets);
    }
    ops_from_host(e->stream, e->tokens, tokens, (size_t)w->N * sizeof(int32_t));
    ops_from_host(e->stream, e->targets, targets, (size_t)w->N * sizeof(int32_t));
}
// The weights of clipped samples: the mean over their own targets against that over T.
static inline void executor_load_weights(Executor *e, const Work *w, const Pass *pass, int64_t first_row) {
    for (int64_t r = 0; r < w->rows; r++) {
        int64_t targets = dataset_window_targets(pass->data, pass->windows[first_row + r]);
        e->host_weights[r] = (float)w->T / (float)max_i64(targets, 1);
    }
    ops_from_host(e->stream, e->clip.weights, e->host_weights, (size_t)w->rows * sizeof(float));
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
    const Real *x = boundary_read(e, w->unit, w->elements);
    Real *dx = e->gradient[w->unit];
    if (w->unit < e->model->units - 1) {
        gpt_block_backward_input(e->stream, e->model, &w->states, dx, e->gradient[w->unit + 1], x, executor_block(e, w->unit), &e->work[w->unit - 1], w->rows,
                                 w->T);
    } else if (e->clip.policy.on) {
        clip_head_backward_input(e->stream, e->model, &e->clip, &w->states, dx, x, &e->head, e->targets, w->rows, w->T);
    } else {
        gpt_head_backward_input(e->stream, e->model, &w->states, dx, x, &e->head, e->targets, w->N, pass->scale);
    }
}

static inline void run_backward_weight(Executor *e, const Work *w) {
    const Real *dout = w->unit < e->model->units - 1 ? e->gradient[w->unit + 1] : NULL;
    if (w->unit == 0) {
        gpt_embedding_backward_weight(e->stream, e->model, &w->states, dout, e->tokens, w->rows, w->T);
        return;
    }
    const Real *x = boundary_read(e, w->unit, w->elements);
    if (w->unit == e->model->units - 1) {
        gpt_head_backward_weight(e->stream, e->model, &w->states, x, &e->head, w->N);
        return;
    }
    gpt_block_backward_weight(e->stream, e->model, &w->states, dout, x, executor_block(e, w->unit), &e->work[w->unit - 1], w->rows, w->T);
}

// What each sample adds to the gradients of a unit: its squared norm, added to the group's.
static inline void run_norms(Executor *e, const Work *w) {
    const int head = e->model->units - 1;
    if (w->unit == 0) {
        clip_embedding_norms(e->stream, e->model, &e->clip, e->gradient[1], e->tokens, &e->head, w->rows, w->T);
        return;
    }
    const Real *x = boundary_read(e, w->unit, w->elements);
    if (w->unit == head) {
        clip_head_norms(e->stream, e->model, &e->clip, x, &e->head, w->rows, w->T);
        return;
    }
    clip_block_norms(e->stream, e->model, &e->clip, &e->clip.blocks[w->unit - 1], e->gradient[w->unit + 1], x, executor_block(e, w->unit),
                     &e->work[w->unit - 1], w->rows, w->T);
}
// The unit's gradients, of all samples times their factors.
static inline void run_sum(Executor *e, const Work *w) {
    if (w->unit == 0) {
        clip_embedding_sum(e->stream, e->model, &e->clip, &w->states, e->gradient[1], e->tokens, &e->head, w->rows, w->T);
    } else if (w->unit == e->model->units - 1) {
        clip_head_sum(e->stream, e->model, &e->clip, &w->states, w->rows);
    } else {
        clip_block_sum(e->stream, e->model, &e->clip, &w->states, &e->clip.blocks[w->unit - 1], e->gradient[w->unit + 1], executor_block(e, w->unit),
                       &e->work[w->unit - 1], w->rows, w->T);
    }
}
// The weight part of a unit that is a group of its own.
static inline void run_clipped_weight(Executor *e, const Work *w) {
    const bool block = w->unit > 0 && w->unit < e->model->units - 1;
    if (block && clip_instantiates_block(&e->clip.policy, e->model, w->T)) {
        clip_block_instantiated(e->stream, e->model, &e->clip, &w->states, e->gradient[w->unit + 1], boundary_read(e, w->unit, w->elements),
                                executor_block(e, w->unit), &e->work[w->unit - 1], w->rows, w->T);
        return;
    }
    if (w->unit == 0 && e->clip.policy.again) {
        clip_embedding_again(e->stream, e->model, &e->clip, &w->states, e->gradient[1], e->tokens, e->targets, &e->head, w->rows, w->T);
        return;
    }
    clip_begin(e->stream, &e->clip, w->rows);
    run_norms(e, w);
    clip_factors(e->stream, &e->clip, w->rows);
    run_sum(e, w);
}
// The same in parts, where all units are one group.
static inline void run_flat_work(Executor *e, const Work *w, const Pass *pass) {
    switch (w->kind) {
    case ACT_BACKWARD_INPUT:
        run_backward_input(e, w, pass);
        if (w->unit == e->model->units - 1) { clip_begin(e->stream, &e->clip, w->rows); }
        run_norms(e, w);
        break;
    case ACT_CLIP:
        run_norms(e, w);
        clip_factors(e->stream, &e->clip, w->rows);
        break;
    default: run_sum(e, w);
    }
}

static inline void run_work(Executor *e, const Work *w, const Pass *pass) {
    if (w->kind == ACT_FORWARD) {
        run_forward(e, w);
    } else if (w->kind == ACT_RECOMPUTE) {
        gpt_block_forward(e->stream, e->model, &w->states, NULL, boundary_read(e, w->unit, w->elements), executor_block(e, w->unit), w->rows, w->T);
    } else if (e->clip.policy.flat) {
        run_flat_work(e, w, pass);
    } else if (w->kind == ACT_BACKWARD_INPUT) {
        run_backward_input(e, w, pass);
    } else if (e->clip.policy.on) {
        run_clipped_weight(e, w);
    } else {
        run_backward_weight(e, w);
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
        if (action_reads_parameters(a->kind) || storages[i] == e->map->lent) { w.states.params[c] = e->held[storages[i]]; }
        if (action_contributes(e->map, a, storages[i])) { w.states.grads[c] = store_gradient(e->store, storages[i], &w.states.accumulate[c]); }
    }
    if (a->kind == ACT_FORWARD && a->unit == 0) { executor_load_samples(e, &w, pass, a->first_row); }
    if (a->kind == ACT_FORWARD && a->unit == 0 && pass->training && e->clip.policy.on) { executor_load_weights(e, &w, pass, a->first_row); }
    w.kind = a->kind;
    bool block = a->unit > 0 && a->unit < e->model->units - 1, repeated = block && !e->marks;
    if (!repeated || ops_repeat_begin(e->stream, &w, sizeof w)) {
        run_work(e, &w, pass);
        if (repeated) { ops_repeat_end(e->stream); }
    }
    if (!executor_gives_losses(e, a, pass)) { return; }
    if (!pass->training) { gpt_head_losses(e->stream, e->model, &w.states, &e->head, e->clip.policy.again ? NULL : e->clip.dlogits, e->targets, w.N); }
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
    if (*at == 0) { e->version = store_version(e->store), schedule_rows(schedule, &e->first_row); }
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
            *norm = store_norm(e->store, step);
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
            if (store_gathers_for_use(e->store, storages[i])) { store_prefetch(e->store, storages[i], version, true, e->step); }
            w.states.params[gpt_storage_class(m, storages[i])] = store_acquire(e->store, storages[i], version);
        }
        run_forward(e, &w);
        if (w.unit == m->units - 1) {
            executor_logits_of_rows(e, &w.states, real_at_const(e->head.lnf, (n - 1) * m->config.channels), 1, 0, m->config.padded_vocab, logits);
        }
        for (int i = 0; i < count; i++) { store_release(e->store, storages[i]); }
    }
}

// How tokens are drawn: by temperature (0: the likeliest), as a function of seed, step and the token's place.
typedef struct {
    double temperature;
    uint64_t seed, step;
} Draws;
static inline int32_t choose_token(Draws d, const float *logits, int64_t V, int64_t position) {
    int64_t best = 0;
    for (int64_t i = 1; i < V; i++) { best = logits[i] > logits[best] ? i : best; }
    double sum = 0;
    if (d.temperature == 0) { return (int32_t)best; }
    for (int64_t i = 0; i < V; i++) { sum += exp(((double)logits[i] - (double)logits[best]) / d.temperature); }
    double draw = random_uniform(d.seed, d.step, (uint64_t)position) * sum;
    for (int64_t i = 0; i < V; i++) {
        draw -= exp(((double)logits[i] - (double)logits[best]) / d.temperature);
        if (draw < 0) { return (int32_t)i; }
    }
    return (int32_t)best;
}
// `count` tokens that follow `first`. Every rank calls it, and gets the same.
static inline void executor_generate(Executor *e, int32_t first, int32_t *out, int64_t count, Draws draws) {
    int64_t T = e->T, n = 1;
    int32_t *tokens = (int32_t *)checked_malloc((size_t)T * sizeof(int32_t), "sample");
    tokens[0] = first;
    for (int64_t i = 0; i < count; i++) {
        executor_logits(e, tokens, n, e->host_logits);
        out[i] = choose_token(draws, e->host_logits, e->model->config.vocab, i);
        if (n == T) { memmove(tokens, tokens + T / 2, (size_t)(T - T / 2) * sizeof(int32_t)), n = T - T / 2; } // slide: keep the newer half
        tokens[min_i64(n, T - 1)] = out[i];
        n = min_i64(n + 1, T);
    }
    free(tokens);
}

#endif
