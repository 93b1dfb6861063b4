// activations.h: what an executor works in: activations, gradients between units, what travels; how
// much that is, and which micro-batch has which.
//
// Places     Of the units [first, end) that this rank computes; micro-batch m has place m modulo
//            the number of places (schedule.h: Limits), since micro-batches come and go in order.
//            slot       one micro-batch's activations: boundary[u], input of unit u > first,
//                       (rows*T, C) in storage precision; with the next one all that survives of a
//                       forward pass under --recompute block; blocks: inside blocks, one set per
//                       block, or a single one of all slots under --recompute block; the head's;
//                       tokens, targets
//            stash      two rooms that blocks take in turns whose activations, or, under
//                       --recompute block, whose inputs, lie on the host (schedule.h)
//            input, output        of the stage: what was received for unit first, what is sent for
//                                 unit end
//            received, sent       the gradients of output and of input, in compute precision
//            back       what a backward pass leaves for weight parts: gradients of boundaries, two
//                       places in turns, since unit u writes one while its weight part still reads
//                       the other; and of blocks. Where weight parts wait (zero bubble) each
//                       micro-batch that waits has its own, of each unit
//            Where samples are clipped by their norm over all units (dp.h: flat), weight parts
//            wait: then what a unit's input part leaves lies in activations that the unit above it
//            has done with, and the topmost's in places of their own tokens, targets, losses of all
//            of a step's samples on this rank wait on the host, each micro-batch's in its own
//            place:
//                         so nobody waits for the device before the end of a step, when all losses
//                         are there at once
// All of it is taken once, in executor_allocate; executor_plan says beforehand how much.
#ifndef ACTIVATIONS_H
#define ACTIVATIONS_H

#include "dataloader.h" // samples
#include "dp.h"         // clipping
#include "zero.h"       // states

typedef struct {
    void **boundary;   // [units]
    BlockActs *blocks; // [layers]
    HeadActs head;
    int32_t *tokens, *targets; // (rows, T) on the device
    float *weights;            // (rows) of clipped samples, too
} ActivationSet;
typedef struct {
    Real **gradient;      // [units] of boundaries
    BlockGradients *work; // [layers]
} GradientBuffers;

// A place for what travels between stages, and the messages that have posted it: to or from each of
// its peers' parts.
typedef struct {
    void *p;
    CommRequest *open; // [ranks]
    int messages;
} P2pBuffer;
enum {
    SEND_BUFFERS = 2,    // places of what is sent: one travels while the other is made
    DEFERRED_OPS = 4096, // of a rank that wait at once: of two steps, at most
    // a message is complete before its rank is so many steps on: by then versions have been used
    // that follow from it
    OPEN_STEPS = 8
};

// What an executor is made for.
typedef struct {
    DType dtype;
    int64_t rows, T; // of a micro-batch, at most
    bool recompute;
    int64_t logits; // rows of logits at a time, where they are not kept
    ClipPolicy clip;
    int first, end; // units of this rank
    Limits limits;
    // [units] micro-batches whose activations of a unit are there at once; NULL: limits.slots of
    // all
    const int64_t *places;
    // [units] activations are on the host between forward and backward passes (schedule.h: inputs,
    // where they recompute); NULL: of none
    const bool *stash;
    // [units] the gradient of its input has a place of its own: others are made before it is used;
    // NULL: of none
    const bool *cut;
} ExecutorShape;

// What a step has to tell, from rank to rank (cyclic.h).
typedef struct {
    double loss;      // of the samples so far
    ExactSum squares; // of the gradients so far; on the way back: of all
    int64_t stop;     // somebody was asked to
    int64_t last;     // the step after which nobody begins another, as the first rank has decided
} StepStats;

typedef struct {
    const GptModel *model;
    Stream *stream;
    Store *store;
    Comm *comm;
    const UnitMap *map;
    ExecutorShape shape;
    // activations
    ActivationSet *acts;                    // [limits.slots]
    P2pBuffer *input, output[SEND_BUFFERS]; // [limits.inputs]
    // rooms of activations that go to the host, if those are inside blocks
    BlockActs stash_acts[STASH_SLOTS];
    void *stash_slot[STASH_SLOTS];  // where they begin
    Stream stash_link[STASH_SLOTS]; // their copies
    char *stash;                    // [slots][such blocks of this rank] on the host
    bool stash_pinned;
    // buffers
    GradientBuffers *grads; // [backs]
    int64_t gradient_sets;
    P2pBuffer *received, sent[SEND_BUFFERS]; // [limits.gradients]
    // [micro-batches] of the pass, first sample of this rank's part
    int64_t *first_rows;
    Clip *clip; // [clips]
    int64_t clips;
    P2pBuffer *norms, *tied, *factors; // [clips] of what crosses stages (dp.h: Crossing)
    // a unit's input and output in compute precision, where that differs from storage precision
    Real *in, *out;
    Real *logits;                // (Vp) one row, for generation
    char *activations, *buffers; // the allocations all of these lie in
    // [actions of a step][2] when each began and ended, for a profile: then nothing is repeated as
    // a whole; NULL: not wanted
    OpsMark **marks;
    int running; // the action that runs, in its schedule
    // host
    int64_t first_row;                   // of a pass's samples, the first that this rank computes
    int32_t *host_tokens, *host_targets; // (samples, T) from it on
    float *host_losses;                  // the same
    int64_t host_rows;                   // samples of a step on this rank, at most
    // number of the step's first micro-batch, and how many a step has, where steps overlap; else 0
    int64_t first_micro, step_micros;
    int64_t first_step, last_step; // only these steps' actions are run, where steps overlap
    // what came from the rank before (to the first: of a whole step), what goes on
    StepStats stats_in, stats_out;
    CommRequest stats_in_request, stats_out_request;
    ExactSum squares;                // of the gradients that this rank owns, of the step at hand
    OptimizerStep update[2];         // of even and odd steps, where they overlap
    double whole_clip, storage_clip; // largest norm of the whole gradient, of a storage's; 0: any
    double norm;                     // of the whole gradient, as far as it is known
    int64_t stop_after;              // the last step, where somebody was asked to stop
    bool asked;                      // this rank was
    float *host_logits;              // (Vp)
    float *host_weights;             // (rows) of clipped samples
    double *losses, *right;          // [samples of a pass] of each one, for a Pass
    double *message;                 // [samples of a pass + ranks] of executor_share()
    int64_t *part;                   // [ranks + 1] whose part is which
    const Real **held;               // [storages] acquired parameters
    // [ERRANDS] store work that waits for messages (p2p.h), in its order; NULL: all is done at once
    DeferredOp *deferred;
    int deferred_count;
    const Action *volatile action; // that is running, for signal handlers; NULL between passes
    volatile int64_t step;
    int64_t version; // of the parameters when the pass began
} Executor;

// What one pass works on.
typedef struct {
    const Dataset *data;
    int64_t first_sample; // number of the pass's first sample in the run
    // [samples] of the data, instead of samples that follow each other; or NULL
    const int64_t *windows;
    // [micro-batches + 1] where each one's samples begin (layout.h: Pieces), or NULL
    const int64_t *begins;
    int64_t samples; // of this pass; rows beyond are left out
    // [samples] sum of -log p over a sample's targets, filled for the rows this rank computes
    double *sample_losses;
    float scale;   // of the loss: 1 / targets of the step
    bool training; // false: only losses
    // [samples] of labelled data: 1 where the likeliest label is the sample's, else 0. NULL: not
    // wanted
    double *sample_right;
    int64_t host_row; // where the host keeps its first sample, in samples
} Pass;

// -------------------------------------------------------------------------------------------------
// Memory
static inline bool executor_has(const ExecutorShape *shape, int unit) {
    return unit >= shape->first && unit < shape->end;
}
static inline bool executor_has_block(const ExecutorShape *shape, int64_t block) {
    return executor_has(shape, (int)block + 1);
}
static inline bool executor_has_head(const Executor *e) { return e->shape.end == e->model->units; }
static inline int64_t executor_places(const ExecutorShape *shape, int unit) {
    return shape->places ? shape->places[unit] : shape->limits.in_flight;
}
// Backward passes whose weight parts wait at once; in style flat each micro-batch's gradients lie
// among its activations.
static inline int64_t executor_gradient_sets(const ExecutorShape *shape) {
    return shape->clip.flat ? shape->limits.in_flight
                            : max_i64(1, shape->limits.works / (shape->end - shape->first));
}

// Activations that go to the host (ExecutorShape: stash): of one block, in bytes; how many blocks
// of this rank before a unit have such; all of them.
static inline size_t executor_boundary_bytes(const ExecutorShape *shape, const GptModel *m) {
    return (size_t)(shape->rows * shape->T * m->config.channels) * dtype_size(shape->dtype);
}
static inline size_t executor_stash_bytes(const ExecutorShape *shape, const GptModel *m) {
    Arena block = {NULL, 0};
    if (shape->recompute) {
        arena_take(&block, executor_boundary_bytes(shape, m));
    } else {
        gpt_block_acts(&block, &m->config, shape->rows * shape->T);
    }
    return block.used;
}
static inline bool executor_stashes_input(const ExecutorShape *shape, int unit) {
    return shape->recompute && shape->stash && shape->stash[unit];
}
static inline int executor_stashes(const ExecutorShape *shape, int before) {
    int blocks = 0;
    for (int u = shape->first; u < before && shape->stash; u++) { blocks += shape->stash[u]; }
    return blocks;
}
static inline size_t executor_stash_all(const ExecutorShape *shape, const GptModel *m) {
    return (size_t)(shape->limits.in_flight * executor_stashes(shape, shape->end)) *
           executor_stash_bytes(shape, m);
}

static inline void executor_carve_acts(Executor *e, Arena *a, int64_t place) {
    const ExecutorShape *shape = &e->shape;
    const int64_t N = shape->rows * shape->T;
    const size_t boundary = executor_boundary_bytes(shape, e->model);
    const int head = e->model->units - 1;
    ActivationSet *acts = &e->acts[place];
    for (int u = shape->first; u < shape->end; u++) {
        if (place >= executor_places(shape, u)) { continue; }
        const int64_t l = u - 1;
        if (u > shape->first) {
            acts->boundary[u] = executor_stashes_input(shape, u) ? e->stash_slot[stash_slot(u)]
                                                                 : arena_take(a, boundary);
        }
        if (u == 0 || (u == head && shape->first && clip_crosses(&shape->clip))) {
            acts->tokens = (int32_t *)arena_take(a, (size_t)N * sizeof(int32_t));
        }
        if (u == shape->first && shape->clip.on) { acts->weights = arena_floats(a, shape->rows); }
        if (u == head) {
            acts->head = gpt_head_acts(a, &e->model->config, N);
            acts->targets = (int32_t *)arena_take(a, (size_t)N * sizeof(int32_t));
        }
        if (u == 0 || u == head) { continue; }
        // the first block here: of it all are copies
        const int64_t other = max_i64(shape->first, 1) - 1;
        const bool shares = shape->recompute && (place || l != other),
                   stashed = !shape->recompute && shape->stash && shape->stash[u];
        acts->blocks[l] = stashed  ? e->stash_acts[stash_slot(u)]
                          : shares ? e->acts[0].blocks[other]
                                   : gpt_block_acts(a, &e->model->config, N);
    }
}
static inline void executor_carve_activations(Executor *e, Arena *a) {
    const ExecutorShape *shape = &e->shape;
    const size_t boundary = executor_boundary_bytes(shape, e->model);
    for (int i = 0; i < STASH_SLOTS && executor_stashes(shape, shape->end); i++) {
        if (!shape->recompute) {
            e->stash_acts[i] = gpt_block_acts(a, &e->model->config, shape->rows * shape->T);
        }
        e->stash_slot[i] =
            shape->recompute ? arena_take(a, boundary) : (void *)e->stash_acts[i].ln1;
    }
    for (int64_t i = 0; i < shape->limits.in_flight; i++) { executor_carve_acts(e, a, i); }
    for (int64_t i = 0; i < shape->limits.inputs; i++) { e->input[i].p = arena_take(a, boundary); }
    for (int i = 0; i < SEND_BUFFERS && !executor_has_head(e); i++) {
        e->output[i].p = arena_take(a, boundary);
    }
    for (int64_t i = 0; i < e->clips && executor_has_head(e); i++) {
        clip_carve_activations(&e->clip[i], a, e->model, shape->rows, shape->T);
    }
}
// Gradients: two places of boundaries and one of blocks in turns.
static inline void executor_carve_turns(Executor *e, Arena *a, GradientBuffers *grads,
                                        int64_t elements) {
    Real *turns[2] = {arena_reals(a, elements), arena_reals(a, elements)};
    BlockGradients work = gpt_block_gradients(a, &e->model->config, e->shape.rows * e->shape.T);
    for (int u = 1; u < e->model->units; u++) {
        grads->gradient[u] =
            e->shape.cut && e->shape.cut[u] ? arena_reals(a, elements) : turns[u % 2];
    }
    for (int l = 0; l < e->model->config.layers; l++) { grads->work[l] = work; }
}
// Gradients that all stay until the weight parts: what is as large among the activations of the
// unit above is free by then. The topmost have places of their own, which micro-batches share
// (`first`: of the first one's) where none waits while another's are made.
static inline void executor_carve_flat(Executor *e, Arena *a, GradientBuffers *grads,
                                       int64_t elements) {
    const int last = e->shape.end - 1, blocks = (int)e->model->config.layers,
              top = (int)min_i64(e->shape.end - 1, blocks) - 1;
    const GradientBuffers *first =
        grads == e->grads || clip_crosses_all(&e->shape.clip) ? NULL : e->grads;
    const ActivationSet *acts = &e->acts[grads - e->grads];
    for (int u = e->shape.first + 1; u <= last; u++) {
        const bool own = u == last || store_converts(e->shape.dtype);
        grads->gradient[u] = !own    ? (Real *)acts->boundary[u + 1]
                             : first ? first->gradient[u]
                                     : arena_reals(a, elements);
    }
    for (int l = top; l >= 0 && executor_has_block(&e->shape, l); l--) {
        const BlockActs *above = &acts->blocks[l + 1];
        if (l == top) {
            grads->work[l] =
                first ? first->work[l]
                      : gpt_block_gradients(a, &e->model->config, e->shape.rows * e->shape.T);
            continue;
        }
        grads->work[l] = grads->work[top];
        grads->work[l].dfc = above->fc;
        grads->work[l].dqkv = above->qkv;
        grads->work[l].dres2 = above->res2;
    }
}
// The same, of several micro-batches.
static inline void executor_carve_waiting(Executor *e, Arena *a, GradientBuffers *grads,
                                          int64_t elements) {
    for (int u = e->shape.first + 1; u < e->shape.end; u++) {
        grads->gradient[u] = arena_reals(a, elements);
    }
    for (int64_t l = 0; l < e->model->config.layers; l++) {
        if (executor_has_block(&e->shape, l)) {
            grads->work[l] = gpt_block_gradients(a, &e->model->config, e->shape.rows * e->shape.T);
        }
    }
}
static inline void executor_carve_buffers(Executor *e, Arena *a) {
    const ExecutorShape *shape = &e->shape;
    const int64_t n = shape->rows * shape->T * e->model->config.channels;
    for (int64_t i = 0; i < e->gradient_sets; i++) {
        (shape->clip.flat          ? executor_carve_flat
         : shape->limits.works > 1 ? executor_carve_waiting
                                   : executor_carve_turns)(e, a, &e->grads[i], n);
    }
    for (int64_t i = 0; i < shape->limits.gradients; i++) { e->received[i].p = arena_reals(a, n); }
    for (int i = 0; i < SEND_BUFFERS && shape->first; i++) { e->sent[i].p = arena_reals(a, n); }
    e->in = e->out = NULL;
    if (store_converts(shape->dtype)) {
        e->in = arena_reals(a, n);
        e->out = arena_reals(a, n);
    }
    e->logits = arena_reals(a, e->model->config.padded_vocab);
    for (int64_t i = 0; i < e->clips; i++) {
        const ClipUnits units = {shape->first, shape->end};
        clip_carve_buffers(&e->clip[i], i ? &e->clip[0] : NULL, a, e->model, units, shape->rows,
                           shape->T);
        e->norms[i].p = e->clip[i].crossing.others;
        e->tied[i].p = e->clip[i].crossing.tied;
        e->factors[i].p = e->clip[i].crossing.factors;
    }
}

// Bytes of the operations' workspace.
static inline size_t executor_workspace_bytes(const GptModel *m, const ExecutorShape *shape,
                                              int threads) {
    bool kept = shape->clip.on && !shape->clip.again && !clip_instantiates_head(m, shape->T);
    return gpt_workspace_bytes(m, shape->rows, shape->T, threads, kept ? 0 : shape->logits);
}

// Counts the activations and buffers of a rank. executor_allocate makes it ready to run.
static inline Executor executor_plan(const GptModel *m, ExecutorShape shape,
                                     size_t *activation_bytes, size_t *buffer_bytes) {
    Executor e;
    memset(&e, 0, sizeof e);
    const size_t units = (size_t)m->units, layers = (size_t)m->config.layers;
    e.model = m;
    e.shape = shape;
    e.gradient_sets = executor_gradient_sets(&shape);
    e.clips = shape.clip.on ? max_i64(1, shape.limits.clips) : 0;
    e.acts = (ActivationSet *)checked_calloc((size_t)shape.limits.in_flight, sizeof(ActivationSet),
                                             "executor");
    for (int64_t i = 0; i < shape.limits.in_flight; i++) {
        e.acts[i].boundary = (void **)checked_calloc(units, sizeof(void *), "executor");
        e.acts[i].blocks = (BlockActs *)checked_calloc(layers, sizeof(BlockActs), "executor");
    }
    e.grads = (GradientBuffers *)checked_calloc((size_t)e.gradient_sets, sizeof(GradientBuffers),
                                                "executor");
    for (int64_t i = 0; i < e.gradient_sets; i++) {
        e.grads[i].gradient = (Real **)checked_calloc(units, sizeof(Real *), "executor");
        e.grads[i].work =
            (BlockGradients *)checked_calloc(layers, sizeof(BlockGradients), "executor");
    }
    e.input =
        (P2pBuffer *)checked_calloc((size_t)shape.limits.inputs + 1, sizeof(P2pBuffer), "executor");
    e.received = (P2pBuffer *)checked_calloc((size_t)shape.limits.gradients + 1, sizeof(P2pBuffer),
                                             "executor");
    e.norms = (P2pBuffer *)checked_calloc((size_t)e.clips + 1, sizeof(P2pBuffer), "executor");
    e.tied = (P2pBuffer *)checked_calloc((size_t)e.clips + 1, sizeof(P2pBuffer), "executor");
    e.factors = (P2pBuffer *)checked_calloc((size_t)e.clips + 1, sizeof(P2pBuffer), "executor");
    e.clip = (Clip *)checked_calloc((size_t)e.clips + 1, sizeof(Clip), "executor");
    for (int64_t i = 0; i < e.clips; i++) {
        e.clip[i].policy = shape.clip;
        e.clip[i].blocks = (BlockSums *)checked_calloc(layers, sizeof(BlockSums), "executor");
    }
    e.held = (const Real **)checked_calloc((size_t)m->storages, sizeof(Real *), "executor");
    Arena activations = {NULL, 0}, buffers = {NULL, 0};
    executor_carve_activations(&e, &activations);
    executor_carve_buffers(&e, &buffers);
    *activation_bytes = activations.used;
    *buffer_bytes = buffers.used;
    return e;
}
// What travels between stages, place by place; NULL after the last.
static inline P2pBuffer *executor_transit(const Executor *e, int64_t i) {
    P2pBuffer *kinds[] = {e->input,    (P2pBuffer *)(uintptr_t)e->output,
                          e->received, (P2pBuffer *)(uintptr_t)e->sent,
                          e->norms,    e->tied,
                          e->factors};
    const int64_t counts[] = {e->shape.limits.inputs,
                              SEND_BUFFERS,
                              e->shape.limits.gradients,
                              SEND_BUFFERS,
                              e->clips,
                              e->clips,
                              e->clips};
    for (int k = 0; k < 7; i -= counts[k++]) {
        if (i < counts[k]) { return &kinds[k][i]; }
    }
    return NULL;
}
static inline void executor_free(Executor *e) {
    if (e->deferred) { e->comm->idle_callback = NULL; }
    free(e->deferred);
    ops_free(e->activations);
    ops_free(e->buffers);
    ops_free_far(e->stash, e->stash_pinned);
    for (int i = 0; i < STASH_SLOTS; i++) { ops_link_close(&e->stash_link[i]); }
    ops_free_host(e->host_tokens);
    ops_free_host(e->host_targets);
    ops_free_host(e->host_losses);
    for (int64_t i = 0; i < e->shape.limits.in_flight; i++) {
        free(e->acts[i].boundary);
        free(e->acts[i].blocks);
    }
    for (int64_t i = 0; i < e->gradient_sets; i++) {
        free(e->grads[i].gradient);
        free(e->grads[i].work);
    }
    for (int64_t i = 0; executor_transit(e, i); i++) { free(executor_transit(e, i)->open); }
    for (int64_t i = 0; i < e->clips; i++) { free(e->clip[i].blocks); }
    free(e->acts);
    free(e->grads);
    free(e->input);
    free(e->received);
    free(e->first_rows);
    free(e->norms);
    free(e->tied);
    free(e->factors);
    free(e->clip);
    free(e->held);
    free(e->host_logits);
    free(e->host_weights);
    free(e->message);
    free(e->part);
    free(e->losses);
    free(e->right);
    memset(e, 0, sizeof *e);
}
// All that it works with, in bytes.
static inline double executor_bytes(const GptModel *m, ExecutorShape shape, int threads) {
    size_t activations, buffers;
    Executor counted = executor_plan(m, shape, &activations, &buffers);
    executor_free(&counted);
    return (double)activations + (double)buffers +
           (double)executor_workspace_bytes(m, &shape, threads);
}
// Makes micro-steps that clip shorter, where that takes no more messages (`often`: each takes its
// own), and chunks of logits, so that what clipping keeps of a sample takes hardly more memory than
// longer ones would without it. states: bytes of all else.
static inline void executor_shorten(const GptModel *m, ExecutorShape *shape, double states,
                                    bool often, int threads) {
    const int64_t LEAST_LOGITS = 128;
    const double HARDLY = 0.045, TOO_MUCH = 1.1;
    ExecutorShape plain = *shape;
    plain.clip.on = plain.clip.flat = false;
    const double without = executor_bytes(m, plain, threads),
                 most = without + HARDLY * (without + states);
    while (executor_bytes(m, *shape, threads) > most) {
        if (shape->rows > 1 && !often) {
            shape->rows--;
        } else if (shape->logits > LEAST_LOGITS) {
            shape->logits /= 2;
        } else {
            shape->clip.again =
                !shape->clip.flat && executor_bytes(m, *shape, threads) > TOO_MUCH * most;
            break;
        }
    }
}
// Puts the activations and buffers where executor_plan() has counted them; they are the executor's
// from now on.
static inline void executor_place(Executor *e, void *activations, void *buffers) {
    Arena of_activations = {(char *)activations, 0}, of_buffers = {(char *)buffers, 0};
    e->activations = (char *)activations;
    e->buffers = (char *)buffers;
    executor_carve_activations(e, &of_activations);
    executor_carve_buffers(e, &of_buffers);
}
// A pass has so many samples and micro-batches, at most; this rank's lie among `mine` that follow
// each other. Every rank calls it.
static inline void executor_allocate(Executor *e, const UnitMap *map, Store *store, Comm *comm,
                                     Stream *stream, int64_t samples, int64_t mine,
                                     int micro_batches) {
    Arena activations = {NULL, 0}, buffers = {NULL, 0};
    e->map = map;
    e->store = store;
    e->stream = stream;
    e->comm = comm;
    executor_carve_activations(e, &activations);
    executor_carve_buffers(e, &buffers);
    executor_place(e, memory_take(MEMORY_ACTIVATIONS, activations.used, "activations"),
                   memory_take(MEMORY_BUFFERS, buffers.used, "gradients of activations"));
    const size_t stash = executor_stash_all(&e->shape, e->model);
    if (stash) {
        e->stash = (char *)memory_take_far(stash, "activations on the host", &e->stash_pinned);
    }
    for (int i = 0; i < STASH_SLOTS && stash; i++) { ops_link_open(&e->stash_link[i], stream); }
    size_t N = (size_t)(mine * e->shape.T);
    // of two steps
    if (store->policy.p2p) {
        N *= 2;
        e->host_rows = mine;
        e->step_micros = micro_batches;
    }
    e->host_tokens = (int32_t *)memory_take_host(N * sizeof(int32_t), "tokens");
    e->host_targets = (int32_t *)memory_take_host(N * sizeof(int32_t), "targets");
    e->host_losses = (float *)memory_take_host(N * sizeof(float), "losses");
    e->host_logits =
        (float *)checked_malloc((size_t)e->model->config.padded_vocab * sizeof(float), "logits");
    e->host_weights = (float *)checked_malloc((size_t)e->shape.rows * sizeof(float), "weights");
    e->losses = (double *)checked_calloc((size_t)samples, sizeof(double), "losses");
    e->right = (double *)checked_calloc((size_t)samples, sizeof(double), "losses");
    e->message =
        (double *)checked_malloc((size_t)(samples + comm->ranks) * sizeof(double), "losses");
    e->part = (int64_t *)checked_malloc((size_t)(comm->ranks + 1) * sizeof(int64_t), "losses");
    e->first_rows = (int64_t *)checked_malloc((size_t)micro_batches * sizeof(int64_t), "executor");
    // a stage's neighbour has as many ranks, at most
    for (int64_t i = 0; executor_transit(e, i); i++) {
        executor_transit(e, i)->open =
            (CommRequest *)checked_malloc((size_t)comm->ranks * sizeof(CommRequest), "executor");
    }
}
// Store work may be put aside (p2p.h: errands) where messages have channels, and another can always
// be posted: so who posts never waits.
static inline void executor_run_deferred(void *executor);
static inline void executor_put_aside(Executor *e, const Schedule *window) {
    int64_t messages = 0;
    for (int i = 0; i < window->count; i++) {
        messages += action_is_message(window->actions[i].kind);
    }
    if (!e->store->policy.p2p || !e->store->policy.p2p->deferred || !comm_has_channels(e->comm) ||
        OPEN_STEPS * messages > COMM_MESSAGES) {
        return;
    }
    e->deferred = (DeferredOp *)checked_malloc(DEFERRED_OPS * sizeof(DeferredOp), "executor");
    e->comm->idle_callback = executor_run_deferred;
    e->comm->idle_context = e;
}

// -------------------------------------------------------------------------------------------------
// Places of a micro-batch
// They count through the steps where these overlap.
static inline int64_t executor_micro(const Executor *e, const Action *a) {
    return e->first_micro + a->step * e->step_micros + a->micro;
}
static inline ActivationSet *executor_acts(const Executor *e, int unit, int64_t micro) {
    return &e->acts[micro % executor_places(&e->shape, unit)];
}
static inline GradientBuffers *executor_grads(const Executor *e, int64_t micro) {
    return &e->grads[micro % e->gradient_sets];
}
static inline int64_t executor_clip_place(const Executor *e, int64_t micro) {
    return e->clips ? micro % e->clips : 0;
}
// Where the input of a unit comes from, or goes to, that another stage shares; NULL: it stays here.
static inline P2pBuffer *executor_boundary_transit(Executor *e, int unit, int64_t micro) {
    if (unit == 0 || unit == e->model->units) { return NULL; }
    if (unit == e->shape.end) { return &e->output[micro % SEND_BUFFERS]; }
    return unit == e->shape.first ? &e->input[micro % e->shape.limits.inputs] : NULL;
}
static inline void *executor_boundary(Executor *e, int unit, int64_t micro) {
    P2pBuffer *transit = executor_boundary_transit(e, unit, micro);
    return transit ? transit->p : executor_acts(e, unit, micro)->boundary[unit];
}
// The same of its gradient.
static inline P2pBuffer *executor_gradient_transit(Executor *e, int unit, int64_t micro) {
    if (unit == 0 || unit == e->model->units) { return NULL; }
    if (unit == e->shape.end) { return &e->received[micro % e->shape.limits.gradients]; }
    return unit == e->shape.first ? &e->sent[micro % SEND_BUFFERS] : NULL;
}
static inline Real *executor_gradient(Executor *e, int unit, int64_t micro) {
    P2pBuffer *transit = executor_gradient_transit(e, unit, micro);
    return transit ? (Real *)transit->p : executor_grads(e, micro)->gradient[unit];
}
// Its messages have arrived, or left.
static inline void transit_wait(Executor *e, P2pBuffer *transit) {
    for (int i = 0; transit && i < transit->messages; i++) {
        comm_wait_message(e->comm, transit->open[i]);
    }
    if (transit) { transit->messages = 0; }
}

#endif
