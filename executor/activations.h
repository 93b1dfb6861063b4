// activations.h: the memory that an executor works in: activations, gradients between units,
// buffers of messages. This file says how much memory that is, allocates it once
// (executor_allocate), and says which buffers a micro-batch uses. executor_plan counts the bytes
// before anything is allocated.
//
// Micro-batch m uses activation set m modulo the number of sets (schedule.h: Limits), because
// micro-batches begin and end in order.
//
// ActivationSet      the activations of one micro-batch:
//                    boundary[u]  input of unit u, (rows*T, C), if another unit of the stage makes
//                                 it. With the next boundary it is all that survives a forward
//                                 pass under --recompute block
//                    unit[u]      values inside a unit (model/architecture.h): for blocks one set
//                                 each, or, under --recompute block, a single one that all share
//                    tokens, targets
// stash              offloaded activations. Blocks whose activations (under --recompute block:
//                    inputs) are on the host use two device buffers in turns (schedule.h)
// input, output      buffers of each stage of this rank: the received input of its first unit,
//                    the sent input of the unit after its last one
// received, sent     buffers of the gradients of output and of input, in compute precision
// GradientBuffers    what backward passes leave for weight parts: gradients of boundaries (two
//                    buffers in turns, because unit u writes one while its weight part still reads
//                    the other) and of blocks. Where weight parts wait (zero bubble), each waiting
//                    micro-batch has buffers of its own for each unit
//
// Flat clipping (dp.h: flat) makes weight parts wait for a norm over all units. What a unit's input
// part leaves is then stored in activations that the unit above no longer needs; the topmost unit
// has buffers of its own.
//
// Tokens, targets and losses of all samples that this rank computes in a step are kept on the host,
// those of each micro-batch at their own position. So the host waits for the device only at the end
// of a step, when all losses have arrived.
#ifndef ACTIVATIONS_H
#define ACTIVATIONS_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "cyclic.h"
#include "dataloader.h"
#include "dp.h"
#include "executor/deferred.h"
#include "executor/expert_loads.h"
#include "model/architecture.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "ops/ops.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "schedule/touch.h"
#include "schedule/touch_passes.h"
#include "schedule/touch_plan.h"
#include "state/planned.h"
#include "state/store.h"

typedef struct {
    void **boundary;           // [units]
    UnitBuffers *unit;         // [units] values that forward passes save, gradients kept with them
    int32_t *tokens, *targets; // (rows, T) on the device
    float *weights;            // (rows) of samples, if they are clipped
} ActivationSet;
typedef struct {
    Real **gradient;   // [units] gradients of boundaries
    UnitBuffers *unit; // [units] the other gradients
} GradientBuffers;

// A message of rows, or a copy of activations between the device and the host, that is under way.
typedef struct {
    CommRequest request;
    Stream *link;   // of a copy; NULL: a message
    Touch touch[2]; // [touches] what it touches until it is complete
    int touches;
} Transfer;

// In how many pieces the rows of a micro-batch go to the experts of a block, and come back
// (exchange.h). leave: the piece of this rank's rows for each expert; arrive: of the rows that each
// rank has for each expert of this one.
typedef struct {
    int count;               // 1: all rows at once
    int32_t *leave, *arrive; // [experts] numbers of pieces
} RowPieces;
// The dimensions and options that an executor is made for.
typedef struct {
    DType dtype;
    int64_t rows, T; // of a micro-batch, at most
    bool recompute;
    int64_t logits; // rows of logits computed at a time, where logits are not kept
    bool generates; // text: keys and values are kept
    ClipPolicy clip;
    RankUnits units; // of this rank
    Limits limits;
    // [units] micro-batches whose activations of a unit exist at once; NULL: limits.in_flight for
    // every unit
    int64_t *places;
    // [units] whether activations are offloaded to the host between forward and backward pass (with
    // recomputation: the unit's input); NULL: never
    const bool *stash;
    // [units] whether the gradient of the unit's input needs a buffer of its own, because other
    // gradients are made before it is used; NULL: no unit
    bool *cut;
} ExecutorShape;

// Step statistics, sent from rank to rank (cyclic.h).
typedef struct {
    double loss;      // of the samples so far
    ExactSum squares; // of the gradients so far; on the way back: of all gradients
    int64_t stop;     // whether a rank was asked to stop
    int64_t last;     // last step that any rank begins, as rank 0 has decided; 0: unknown
} StepStats;

typedef struct {
    const GptModel *model;
    Stream *stream;
    Store *store;
    Comm *comm;
    const UnitMap *map;
    ExecutorShape shape;
    // activations
    ActivationSet *acts;    // [limits.in_flight]
    void **transits;        // all buffers of data that stages send to each other
    void **input, **output; // [stages of this rank][limits.inputs], [SEND_BUFFERS]
    // device buffers of activations inside blocks, if these are offloaded
    UnitBuffers stash_acts[STASH_SLOTS];
    void *stash_slot[STASH_SLOTS];  // their addresses
    Stream stash_link[STASH_SLOTS]; // their copies to and from the host
    char *stash; // [limits.in_flight][offloaded blocks of this rank], host memory
    bool stash_pinned;
    // buffers
    GradientBuffers *grads; // [gradient_sets]
    int64_t gradient_sets;
    void **received, **sent; // [stages of this rank][limits.gradients], [SEND_BUFFERS]
    // [micro-batches of the pass] first sample of this rank's part
    int64_t *first_rows;
    Clip *clip; // [clips]
    int64_t clips;
    Real *logits;                // (Vp) one row, for text generation
    KeyCache *caches;            // [units] of T positions, for text generation
    char *activations, *buffers; // the two allocations that hold all of these
    // [actions of a step][2] begin and end of each action, for a profile; then block work is not
    // replayed as a whole. NULL: no profile
    OpsMark **marks;
    bool *marked; // [actions of a step] set when the action begins, for a profile
    int running;  // index of the running action in its schedule
    // host
    int64_t first_row;                   // first of the pass's samples that this rank computes
    int32_t *host_tokens, *host_targets; // (samples, T) from first_row on
    float *host_losses;                  // likewise
    int64_t host_rows;                   // most samples of a step on this rank
    // what actions touch (executor_follow), in evaluations and in training; open transfers
    Program followed[2];
    TouchPlan touches[2];
    Transfer *open; // [open_count]
    int open_count;
    int64_t open_capacity;
    // where steps overlap: number of the step's first micro-batch, and micro-batches of a step;
    // else 0
    int64_t first_micro, step_micros;
    float *host_logits;  // (Vp)
    float *host_weights; // (rows) of clipped samples
    ExpertLoads loads;   // of a pass
    // memory is apart: [limits.in_flight][units][2][experts] loads, and arrivals, on the host
    int32_t *counts;
    float *shares;           // of experts (ExpertLoads), among the buffers
    RowPieces *pieces;       // [limits.in_flight][units]; NULL: all rows of experts go at once
    int32_t *piece_of;       // [limits.in_flight][units][2][experts] what `pieces` point to
    double *losses, *right;  // [samples of a pass] for Pass
    double *message;         // [samples of a pass + ranks] for executor_share()
    int64_t *part;           // [ranks + 1] where each rank's part of message begins
    const Real **held;       // [storages] acquired parameters
    DeferredQueue queue;     // store operations that wait for messages
    struct Overlap *overlap; // steps that overlap (executor/overlap.h); NULL: they do not
    const Action *volatile action; // the running action, for signal handlers; NULL between passes
    volatile int64_t step;
    int64_t version; // of the parameters when the pass began
} Executor;

// The work of one pass over micro-batches: training or evaluation.
typedef struct {
    const Dataset *data;
    int64_t first_sample; // number of the pass's first sample in the run
    // [samples] windows of the data to use; NULL: consecutive samples from first_sample on
    const int64_t *windows;
    // [micro-batches + 1] first sample of each micro-batch (policy.h: Pieces), or NULL
    const int64_t *begins;
    int64_t samples; // of this pass; rows of the schedule beyond them are skipped
    // [samples] sum of -log p over a sample's targets; filled for the rows that this rank computes
    double *sample_losses;
    float scale;   // of the loss: 1 / targets of the step
    float aux, z;  // of routers' losses: each token's factor
    bool training; // false: computes losses only
    bool counts;   // the tokens of each expert
    bool looks;    // counts them, and computes no losses
    // [samples] of labelled data: 1 if the likeliest label is the sample's, else 0; NULL: not
    // wanted
    double *sample_right;
    int64_t host_row; // position of the first sample in the host arrays, in samples
} Pass;
static inline int64_t pass_tokens(const Pass *pass) {
    return pass->samples * pass->data->options.T;
}

// -------------------------------------------------------------------------------------------------
// Memory
static inline bool executor_has(const ExecutorShape *shape, int unit) {
    return units_have(&shape->units, unit);
}
static inline bool executor_has_head(const Executor *e) {
    return executor_has(&e->shape, e->model->units - 1);
}
static inline int64_t executor_places(const ExecutorShape *shape, int unit) {
    return shape->places ? shape->places[unit] : shape->limits.in_flight;
}
// Returns the number of backward passes whose weight parts wait at once. With flat clipping each
// micro-batch has its own gradient buffers, which are among its activations.
static inline int64_t executor_gradient_sets(const ExecutorShape *shape) {
    return shape->clip.flat ? shape->limits.in_flight
                            : max_i64(1, shape->limits.works / units_count(&shape->units));
}

// Offloaded activations (ExecutorShape: stash), in bytes: of a boundary, of one offloaded block, of
// all offloaded blocks of this rank. executor_stashes counts the offloaded blocks of this rank
// below a unit.
static inline size_t executor_boundary_bytes(const ExecutorShape *shape, const GptModel *m) {
    return (shape->rows * shape->T * gpt_width(m)) * dtype_size(shape->dtype);
}
static inline size_t executor_stash_bytes(const ExecutorShape *shape, const GptModel *m) {
    Arena block = {NULL, 0};
    if (shape->recompute) {
        arena_take(&block, executor_boundary_bytes(shape, m));
    } else {
        UnitBuffers counted;
        unit_carve_values(&counted, &block, m, UNIT_BLOCK, shape->rows * shape->T);
    }
    return block.used;
}
static inline bool executor_stashes_input(const ExecutorShape *shape, int unit) {
    return shape->recompute && shape->stash && shape->stash[unit];
}
static inline int executor_stashes(const ExecutorShape *shape, int before) {
    int blocks = 0;
    for (int u = 0; u < before && shape->stash; u++) {
        blocks += executor_has(shape, u) && shape->stash[u];
    }
    return blocks;
}
static inline size_t executor_stash_all(const ExecutorShape *shape, const GptModel *m) {
    return (shape->limits.in_flight * executor_stashes(shape, m->units)) *
           executor_stash_bytes(shape, m);
}

// Puts what counts the rows of a block's experts where the host reaches it, too. On a CPU it is
// among the activations.
static inline void executor_place_counts(Executor *e, int64_t place, int unit) {
    const int64_t experts = e->model->config.experts;
    const UnitSpec *spec = gpt_unit_spec(e->model, UNIT_BLOCK);
    void **value = e->acts[place].unit[unit].value;
    int32_t *counts = e->counts + (place * e->model->units + unit) * 2 * experts;
    value[unit_op(spec, OP_ROUTER)->stats[1]] = counts;
    if (e->model->arch->exchanges) { value[unit_message(spec, 1)->stats[1]] = counts + experts; }
}
static inline void executor_carve_acts(Executor *e, Arena *a, int64_t place) {
    const ExecutorShape *shape = &e->shape;
    const int64_t N = shape->rows * shape->T;
    const size_t boundary = executor_boundary_bytes(shape, e->model);
    const int head = e->model->units - 1, first = units_first(&shape->units);
    ActivationSet *acts = &e->acts[place];
    for (int u = first; u < e->model->units; u++) {
        if (!executor_has(shape, u) || place >= executor_places(shape, u)) { continue; }
        if (u && units_receiver(&shape->units, u) < 0) {
            acts->boundary[u] = executor_stashes_input(shape, u) ? e->stash_slot[stash_slot(u)]
                                                                 : arena_take(a, boundary);
        }
        if (u == 0 || (u == head && first && clip_ties(&shape->clip))) {
            acts->tokens = (int32_t *)arena_take(a, N * sizeof(int32_t));
        }
        if (u == first && shape->clip.on) { acts->weights = arena_floats(a, shape->rows); }
        const UnitClass class_of = gpt_unit_class(e->model, u);
        // under recomputation all blocks share the memory of this rank's first block
        const int other = max_i64(first, 1);
        const bool block = class_of == UNIT_BLOCK,
                   shares = block && shape->recompute && (place || u != other),
                   stashed = block && !shape->recompute && shape->stash && shape->stash[u];
        if (stashed) {
            acts->unit[u] = e->stash_acts[stash_slot(u)];
        } else if (shares) {
            acts->unit[u] = e->acts[0].unit[other];
        } else {
            unit_carve_values(&acts->unit[u], a, e->model, class_of, N);
        }
        if (block && e->counts) { executor_place_counts(e, place, u); }
        if (u == head) { acts->targets = (int32_t *)arena_take(a, N * sizeof(int32_t)); }
    }
}
static inline void executor_carve_activations(Executor *e, Arena *a) {
    const ExecutorShape *shape = &e->shape;
    const size_t boundary = executor_boundary_bytes(shape, e->model);
    for (int i = 0; i < STASH_SLOTS && executor_stashes(shape, e->model->units); i++) {
        if (!shape->recompute) {
            unit_carve_values(&e->stash_acts[i], a, e->model, UNIT_BLOCK, shape->rows * shape->T);
        }
        e->stash_slot[i] =
            shape->recompute ? arena_take(a, boundary) : e->stash_acts[i].value[VALUE_FIRST];
    }
    for (int64_t i = 0; i < shape->limits.in_flight; i++) { executor_carve_acts(e, a, i); }
    const int64_t inputs = shape->units.stages * shape->limits.inputs;
    for (int64_t i = 0; i < inputs; i++) { e->input[i] = arena_take(a, boundary); }
    for (int i = 0; i < SEND_BUFFERS * shape->units.stages; i++) {
        const bool sends = shape->units.stage[i / SEND_BUFFERS].end < e->model->units;
        e->output[i] = sends ? arena_take(a, boundary) : NULL;
    }
    for (int64_t i = 0; i < e->clips && executor_has_head(e); i++) {
        clip_carve_activations(&e->clip[i], a, e->model, shape->rows, shape->T);
    }
}
static inline UnitBuffers executor_carve_block_gradients(const Executor *e, Arena *a) {
    UnitBuffers b = {};
    unit_carve_gradients(&b, a, e->model, UNIT_BLOCK, e->shape.rows * e->shape.T, false);
    return b;
}
// Does the gradient of a unit's input stay on this rank?
static inline bool executor_makes_gradient(const Executor *e, int unit) {
    return unit > 0 && executor_has(&e->shape, unit) && units_receiver(&e->shape.units, unit) < 0;
}
// Gradient buffers without waiting weight parts: two buffers of boundaries and one of blocks, used
// in turns.
static inline void executor_carve_turns(Executor *e, Arena *a, GradientBuffers *grads,
                                        int64_t elements) {
    Real *turns[2] = {arena_reals(a, elements), arena_reals(a, elements)};
    const UnitBuffers shared = executor_carve_block_gradients(e, a);
    for (int u = 1; u < e->model->units; u++) {
        grads->gradient[u] =
            e->shape.cut && e->shape.cut[u] ? arena_reals(a, elements) : turns[u % 2];
        grads->unit[u] = shared;
    }
}
// Gradient buffers for flat clipping, where all of them live until the weight parts run. Each uses
// memory of the same size among the activations of the unit above, which are no longer needed. The
// topmost gradients have buffers of their own. Micro-batches share these (`first`: of the first
// micro-batch), unless one waits while another's gradients are made.
static inline void executor_carve_flat(Executor *e, Arena *a, GradientBuffers *grads,
                                       int64_t elements) {
    const UnitSpec *block = gpt_unit_spec(e->model, UNIT_BLOCK);
    const int head = e->model->units - 1;
    const GradientBuffers *first =
        grads == e->grads || clip_crosses_all(&e->shape.clip) ? NULL : e->grads;
    const ActivationSet *acts = &e->acts[grads - e->grads];
    for (int u = 1; u <= head; u++) {
        if (!executor_makes_gradient(e, u)) { continue; }
        grads->gradient[u] = executor_has(&e->shape, u + 1) ? (Real *)acts->boundary[u + 1]
                             : first                        ? first->gradient[u]
                                                            : arena_reals(a, elements);
    }
    for (int u = head - 1; u > 0; u--) {
        if (!executor_has(&e->shape, u)) { continue; }
        if (u + 1 == head || !executor_has(&e->shape, u + 1)) {
            grads->unit[u] = first ? first->unit[u] : executor_carve_block_gradients(e, a);
            continue;
        }
        grads->unit[u] = grads->unit[u + 1];
        for (int g = GRADIENT_FIRST; g < block->gradient_count; g++) {
            const int kept_in = block->gradients[g].kept_in;
            if (kept_in) { grads->unit[u].gradient[g] = (Real *)acts->unit[u + 1].value[kept_in]; }
        }
    }
}
// Gradient buffers where the weight parts of several micro-batches wait: each unit has its own.
static inline void executor_carve_waiting(Executor *e, Arena *a, GradientBuffers *grads,
                                          int64_t elements) {
    for (int u = 1; u < e->model->units; u++) {
        if (executor_makes_gradient(e, u)) { grads->gradient[u] = arena_reals(a, elements); }
    }
    for (int u = 1; u < e->model->units - 1; u++) {
        if (executor_has(&e->shape, u)) { grads->unit[u] = executor_carve_block_gradients(e, a); }
    }
}
// The keys and values of one sequence in the blocks of this rank.
static inline void executor_carve_caches(Executor *e, Arena *a) {
    const int64_t T = e->shape.T, half = key_cache_elements(gpt_attention(e->model, 1, T), T) / 2;
    for (int u = 1; u < e->model->units - 1; u++) {
        if (!executor_has(&e->shape, u)) { continue; }
        e->caches[u].keys = arena_reals(a, half);
        e->caches[u].values = arena_reals(a, half);
        e->caches[u].most = T;
    }
}
static inline void executor_carve_buffers(Executor *e, Arena *a) {
    const ExecutorShape *shape = &e->shape;
    const int64_t n = shape->rows * shape->T * gpt_width(e->model);
    for (int64_t i = 0; i < e->gradient_sets; i++) {
        (shape->clip.flat          ? executor_carve_flat
         : shape->limits.works > 1 ? executor_carve_waiting
                                   : executor_carve_turns)(e, a, &e->grads[i], n);
    }
    const int64_t gradients = shape->units.stages * shape->limits.gradients;
    for (int64_t i = 0; i < gradients; i++) { e->received[i] = arena_reals(a, n); }
    for (int i = 0; i < SEND_BUFFERS * shape->units.stages; i++) {
        const bool sends = shape->units.stage[i / SEND_BUFFERS].first > 0;
        e->sent[i] = sends ? arena_reals(a, n) : NULL;
    }
    e->logits = arena_reals(a, e->model->config.padded_vocab);
    if (e->model->config.experts) {
        e->shares = arena_floats(a, e->model->config.layers * e->model->config.experts);
    }
    if (shape->generates) { executor_carve_caches(e, a); }
    for (int64_t i = 0; i < e->clips; i++) {
        clip_carve_buffers(&e->clip[i], i ? &e->clip[0] : NULL, a, e->model, &shape->units,
                           shape->rows, shape->T);
    }
}

// Returns the bytes of the operations' workspace.
static inline size_t executor_workspace_bytes(const GptModel *m, const ExecutorShape *shape,
                                              int threads) {
    bool kept =
        shape->clip.on && !shape->clip.recomputes_logits && !clip_instantiates_head(m, shape->T);
    return gpt_workspace_bytes(m, shape->rows, shape->T, threads, kept ? 0 : shape->logits);
}

// Counts the bytes of activations and buffers of a rank, allocating only tables. executor_allocate
// makes the result ready to run, executor_free frees it.
static inline Executor executor_plan(const GptModel *m, ExecutorShape shape,
                                     size_t *activation_bytes, size_t *buffer_bytes) {
    Executor e = {};
    const size_t units = m->units;
    e.model = m;
    e.shape = shape;
    e.gradient_sets = executor_gradient_sets(&shape);
    e.clips = shape.clip.on ? max_i64(1, shape.limits.clips) : 0;
    e.acts = new_array(ActivationSet, shape.limits.in_flight, "executor");
    for (int64_t i = 0; i < shape.limits.in_flight; i++) {
        e.acts[i].boundary = new_array(void *, units, "executor");
        e.acts[i].unit = new_array(UnitBuffers, units, "executor");
    }
    e.grads = new_array(GradientBuffers, e.gradient_sets, "executor");
    for (int64_t i = 0; i < e.gradient_sets; i++) {
        e.grads[i].gradient = new_array(Real *, units, "executor");
        e.grads[i].unit = new_array(UnitBuffers, units, "executor");
    }
    const int stages = shape.units.stages;
    e.transits =
        new_array(void *, stages *(shape.limits.inputs + shape.limits.gradients + 2 * SEND_BUFFERS),
                  "executor");
    e.input = e.transits;
    e.output = e.input + stages * shape.limits.inputs;
    e.received = e.output + stages * SEND_BUFFERS;
    e.sent = e.received + stages * shape.limits.gradients;
    e.clip = new_array(Clip, e.clips + 1, "executor");
    for (int64_t i = 0; i < e.clips; i++) {
        e.clip[i].policy = shape.clip;
        e.clip[i].sums = new_array(UnitSums, units, "executor");
    }
    e.held = new_array(const Real *, m->storages, "executor");
    e.caches = new_array(KeyCache, units, "executor");
    Arena activations = {NULL, 0}, buffers = {NULL, 0};
    executor_carve_activations(&e, &activations);
    executor_carve_buffers(&e, &buffers);
    *activation_bytes = activations.used;
    *buffer_bytes = buffers.used;
    return e;
}
static inline void executor_free(Executor *e) {
    deferred_close(&e->queue);
    free(e->overlap);
    ops_free(e->activations);
    ops_free(e->buffers);
    ops_free_far(e->stash, e->stash_pinned);
    for (int i = 0; i < STASH_SLOTS; i++) { ops_link_close(&e->stash_link[i]); }
    ops_free_host(e->host_tokens);
    ops_free_host(e->host_targets);
    ops_free_host(e->host_losses);
    ops_free_host(e->counts);
    for (int64_t i = 0; i < e->shape.limits.in_flight; i++) {
        free_all(e->acts[i].boundary, e->acts[i].unit);
    }
    for (int64_t i = 0; i < e->gradient_sets; i++) {
        free_all(e->grads[i].gradient, e->grads[i].unit);
    }
    for (int i = 0; i < 2; i++) {
        touch_plan_free(&e->touches[i]);
        free(e->followed[i].limits);
    }
    for (int64_t i = 0; i < e->clips; i++) { free(e->clip[i].sums); }
    expert_loads_free(&e->loads);
    free_all(e->pieces, e->piece_of);
    free_all(e->acts, e->grads, e->transits, e->open, e->first_rows, e->clip, e->held, e->caches,
             e->host_logits, e->host_weights, e->message, e->part, e->losses, e->right);
    memset(e, 0, sizeof *e);
}
// Sets the bytes of everything that an executor works with: activations, and buffers with the
// workspace of the operations.
static inline void executor_memory(const GptModel *m, ExecutorShape shape, int threads,
                                   size_t memory[MEMORY_KINDS]) {
    Executor counted =
        executor_plan(m, shape, &memory[MEMORY_ACTIVATIONS], &memory[MEMORY_BUFFERS]);
    executor_free(&counted);
    memory[MEMORY_BUFFERS] += executor_workspace_bytes(m, &shape, threads);
}
static inline double executor_bytes(const GptModel *m, ExecutorShape shape, int threads) {
    size_t memory[MEMORY_KINDS] = {0};
    executor_memory(m, shape, threads, memory);
    return (double)(memory[MEMORY_ACTIVATIONS] + memory[MEMORY_BUFFERS]);
}
// Shortens the micro-steps of a run that clips samples, so that what clipping keeps for each sample
// takes hardly more memory than longer micro-steps would take without it. Reduces the rows, unless
// each micro-step sends messages of its own (`often`), then the rows of a chunk of logits; at last
// logits may be recomputed. states: bytes of everything else on the device.
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
            // in small steps, since each chunk reads and writes the table's gradient
            const int64_t rows = min_i64(shape->logits, shape->rows * shape->T);
            shape->logits = max_i64(LEAST_LOGITS, rows - rows / 8);
        } else {
            shape->clip.recomputes_logits = !shape->clip.flat && shape->clip.tied &&
                                            executor_bytes(m, *shape, threads) > TOO_MUCH * most;
            break;
        }
    }
}
// Points the executor's buffers into two allocations of the sizes that executor_plan() has counted.
// The executor owns both from now on.
static inline void executor_place(Executor *e, void *activations, void *buffers) {
    Arena of_activations = {(char *)activations, 0}, of_buffers = {(char *)buffers, 0};
    const int64_t counts =
        e->shape.limits.in_flight * e->model->units * 2 * e->model->config.experts;
    if (counts && ops_memory_apart()) {
        e->counts = (int32_t *)memory_take_host((size_t)counts * sizeof *e->counts, "loads");
    }
    e->activations = (char *)activations;
    e->buffers = (char *)buffers;
    executor_carve_activations(e, &of_activations);
    executor_carve_buffers(e, &of_buffers);
}
static inline void executor_allocate_pieces(Executor *e) {
    const int64_t count = e->shape.limits.in_flight * e->model->units,
                  experts = e->model->config.experts;
    e->pieces = new_array(RowPieces, count, "pieces");
    e->piece_of = new_array(int32_t, 2 * count * experts, "pieces");
    for (int64_t i = 0; i < count; i++) {
        e->pieces[i].leave = e->piece_of + 2 * i * experts;
        e->pieces[i].arrive = e->pieces[i].leave + experts;
    }
}
// Allocates a planned executor. A pass has at most `samples` samples and `micro_batches`
// micro-batches; this rank's samples are among `mine` consecutive ones. Every rank calls it.
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
    size_t N = mine * e->shape.T;
    // steps overlap: the host arrays hold two of them
    if (store->plan.steps_overlap) {
        N *= 2;
        e->host_rows = mine;
        e->step_micros = micro_batches;
    }
    e->host_tokens = (int32_t *)memory_take_host(N * sizeof(int32_t), "tokens");
    e->host_targets = (int32_t *)memory_take_host(N * sizeof(int32_t), "targets");
    e->host_losses = (float *)memory_take_host(N * sizeof(float), "losses");
    e->host_logits = new_array(float, e->model->config.padded_vocab, "logits");
    e->host_weights = new_array(float, e->shape.rows, "weights");
    e->losses = new_array(double, samples, "losses");
    e->right = new_array(double, samples, "losses");
    if (gpt_takes_pieces(e->model)) { executor_allocate_pieces(e); }
    e->loads = expert_loads_make(e->model, comm->ranks);
    e->message = new_array(double, samples + comm->ranks, "losses");
    e->part = new_array(int64_t, comm->ranks + 1, "losses");
    e->first_rows = new_array(int64_t, micro_batches, "executor");
}
// Lists from now on what the actions of passes touch, of which `of` is the longest one, of a plan
// whose units and storages `map` has; cyclic: of steps that overlap, else NULL. The executor must
// not be moved any more, nor the map.
static inline void executor_follow(Executor *e, const Program *of, const UnitMap *map,
                                   const CyclicPlan *cyclic) {
    Program *mine = &e->followed[!of->forward_only];
    *mine = *of;
    mine->map = *map;
    mine->limits = new_array(Limits, of->ranks, "executor");
    mine->limits[e->comm->rank] = e->shape.limits;
    e->touches[!of->forward_only] = touch_plan(mine, cyclic, cyclic ? e->model : NULL);
    mine->rank = NULL; // the actions may go now
}

// -------------------------------------------------------------------------------------------------
// Which buffers a micro-batch uses
// Where steps overlap, micro-batches are numbered through all steps.
static inline int64_t executor_micro(const Executor *e, const Action *a) {
    return e->first_micro + a->step * e->step_micros + a->micro;
}
static inline ActivationSet *executor_acts(const Executor *e, int unit, int64_t micro) {
    return &e->acts[micro % executor_places(&e->shape, unit)];
}
// Returns the pieces of a micro-batch's rows in a unit; NULL: all rows of all units go at once.
static inline RowPieces *executor_pieces(const Executor *e, int unit, int64_t micro) {
    return e->pieces ? &e->pieces[micro % e->shape.limits.in_flight * e->model->units + unit]
                     : NULL;
}
static inline GradientBuffers *executor_grads(const Executor *e, int64_t micro) {
    return &e->grads[micro % e->gradient_sets];
}
static inline int64_t executor_clip_place(const Executor *e, int64_t micro) {
    return e->clips ? micro % e->clips : 0;
}
// Returns the buffer of a unit's input, if another stage sends or receives that input; else NULL.
static inline void *executor_boundary_transit(Executor *e, int unit, int64_t micro) {
    const int above = units_receiver(&e->shape.units, unit),
              below = unit < e->model->units ? units_sender(&e->shape.units, unit) : -1;
    const int64_t inputs = e->shape.limits.inputs;
    if (above >= 0) { return e->input[above * inputs + micro % inputs]; }
    return below >= 0 ? e->output[below * SEND_BUFFERS + micro % SEND_BUFFERS] : NULL;
}
static inline void *executor_boundary(Executor *e, int unit, int64_t micro) {
    void *transit = executor_boundary_transit(e, unit, micro);
    return transit ? transit : executor_acts(e, unit, micro)->boundary[unit];
}
// Returns the same for the gradient of a unit's input.
static inline void *executor_gradient_transit(Executor *e, int unit, int64_t micro) {
    const int above = units_receiver(&e->shape.units, unit),
              below = unit < e->model->units ? units_sender(&e->shape.units, unit) : -1;
    const int64_t gradients = e->shape.limits.gradients;
    if (below >= 0) { return e->received[below * gradients + micro % gradients]; }
    return above >= 0 ? e->sent[above * SEND_BUFFERS + micro % SEND_BUFFERS] : NULL;
}
static inline Real *executor_gradient(Executor *e, int unit, int64_t micro) {
    void *transit = executor_gradient_transit(e, unit, micro);
    return transit ? (Real *)transit : executor_grads(e, micro)->gradient[unit];
}

// -------------------------------------------------------------------------------------------------
// Transfers that are under way

// Lists what an action does with rows.
static inline TouchPlan *executor_touches(Executor *e, const Action *a, bool training) {
    TouchPlan *p = &e->touches[training];
    Action counted = *a;
    counted.micro = executor_micro(e, a);
    p->count = 0;
    touch_passes(p, e->comm->rank, &counted);
    return p;
}
// Notes a message that an action has begun, or its copy on a link.
static inline void transfer_open(Executor *e, const Action *a, bool training, CommRequest request,
                                 Stream *link) {
    const TouchPlan *p = executor_touches(e, a, training);
    e->open = grow_array(Transfer, e->open, e->open_count, &e->open_capacity, "messages");
    Transfer *t = &e->open[e->open_count++];
    assert(p->count <= LENGTH_OF(t->touch));
    t->request = request;
    t->link = link;
    t->touches = p->count;
    memcpy(t->touch, p->touch, p->count * sizeof *p->touch);
}
static inline void transfer_end(Executor *e, Transfer *t) {
    if (t->link) {
        ops_follow(e->stream, t->link);
    } else {
        comm_wait(e->comm, &t->request);
    }
}
// Must an action wait for a transfer? Not if both read, or each adds rows of its own.
static inline bool transfer_precedes(const Transfer *t, const TouchPlan *p) {
    for (int i = 0; i < t->touches; i++) {
        const Touch *a = &t->touch[i];
        for (int k = 0; k < p->count; k++) {
            const Touch *b = &p->touch[k];
            const bool adds = a->use == TOUCH_ADD && b->use == TOUCH_ADD && a->what == b->what,
                       reads = a->use == TOUCH_READ && b->use == TOUCH_READ;
            if (a->of == b->of && a->a == b->a && a->b == b->b && !adds && !reads) { return true; }
        }
    }
    return false;
}
// Waits for the transfers that must precede an action.
static inline void executor_await(Executor *e, const Action *a, bool training) {
    if (!e->open_count) { return; }
    const TouchPlan *p = executor_touches(e, a, training);
    int left = 0;
    for (int i = 0; i < e->open_count; i++) {
        if (transfer_precedes(&e->open[i], p)) {
            transfer_end(e, &e->open[i]);
        } else {
            e->open[left++] = e->open[i];
        }
    }
    e->open_count = left;
}
// Waits for all transfers.
static inline void executor_await_all(Executor *e) {
    for (int i = 0; i < e->open_count; i++) { transfer_end(e, &e->open[i]); }
    e->open_count = 0;
}

#endif
