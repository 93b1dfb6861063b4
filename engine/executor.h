// executor.h: runs a schedule. The one place where actions become work: MODEL computes, STORE holds states, COMM moves them.
//
// Places     Of the units [first, end) that this rank computes; micro-batch m has place m modulo the number of places (schedule.h: Limits), since
//            micro-batches come and go in order.
//            slot       one micro-batch's activations: boundary[u], input of unit u > first, (rows*T, C) in storage precision; with the next one all
//                       that survives of a forward pass under --recompute block; blocks: inside blocks, one set per block, or a single one of
//                       all slots under --recompute block; the head's; tokens, targets
//            input, output        of the stage: what was received for unit first, what is sent for unit end
//            received, sent       the gradients of output and of input, in compute precision
//            back       what a backward pass leaves for weight parts: gradients of boundaries, two places in turns, since unit u writes one while
//                       its weight part still reads the other; and of blocks. Where weight parts wait (zero bubble) each micro-batch that waits
//                       has its own, of each unit
//            Where samples are clipped by their norm over all units (dp.h: flat), weight parts wait: then what a unit's input part
//            leaves lies in activations that the unit above it has done with, and the topmost's in places of their own
//            tokens, targets, losses of all of a step's samples on this rank wait on the host, each micro-batch's in its own place:
//                         so nobody waits for the device before the end of a step, when all losses are there at once
// Messages   are posted where the schedule says so, and waited for by what needs them: a received one by the first unit that reads it, a
//            sent one by who writes its place again.
// All of it is taken once, in executor_make, which also says beforehand how much.
// A micro-batch's loss is summed per sample, in fp64; samples are added in the order of their numbers, so the loss of a step
// is the same for every layout.
#ifndef EXECUTOR_H
#define EXECUTOR_H

#include "dataloader.h" // samples
#include "dp.h"         // clipping
#include "zero.h"       // states

typedef struct {
    void **boundary;   // [units]
    BlockActs *blocks; // [layers]
    HeadActs head;
    int32_t *tokens, *targets; // (rows, T) on the device
    float *weights;            // (rows) of clipped samples, too
} Slot;
typedef struct {
    Real **gradient;      // [units] of boundaries
    BlockGradients *work; // [layers]
} Back;

// A place for what travels between stages, and the messages that have posted it: to or from each of its peers' parts.
typedef struct {
    void *p;
    Ticket *open; // [most_messages]
    int messages;
} Transit;
enum {
    OUTGOING = 2,  // places of what is sent: one travels while the other is made
    ERRANDS = 4096 // of a rank that wait at once: of two steps, at most
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
    const int64_t *places; // [units] micro-batches whose activations of a unit are there at once; NULL: limits.slots of all
    const bool *cut;       // [units] the gradient of its input has a place of its own: others are made before it is used; NULL: of none
} ExecutorShape;

// What a step has to tell, from rank to rank (cyclic.h).
typedef struct {
    double loss;      // of the samples so far
    ExactSum squares; // of the gradients so far; on the way back: of all
    int64_t stop;     // somebody was asked to
    int64_t last;     // the step after which nobody begins another, as the first rank has decided
} Tally;

typedef struct {
    const GptModel *model;
    Stream *stream;
    Store *store;
    Comm *comm;
    const UnitMap *map;
    ExecutorShape shape;
    // activations
    Slot *slot;                       // [limits.slots]
    Transit *input, output[OUTGOING]; // [limits.inputs]
    // buffers
    Back *back; // [backs]
    int64_t backs;
    Transit *received, sent[OUTGOING]; // [limits.gradients]
    int64_t *first_rows;               // [micro-batches] of the pass, first sample of this rank's part
    Clip *clip;                        // [clips]
    int64_t clips;
    Transit *norms, *tied, *factors; // [clips] of what crosses stages (dp.h: Crossing)
    Real *in, *out;                  // a unit's input and output in compute precision, where that differs from storage precision
    Real *logits;                    // (Vp) one row, for generation
    char *activations, *buffers;     // the allocations all of these lie in
    OpsMark **marks;                 // [actions of a step][2] when each began and ended, for a profile: then nothing is repeated as a whole; NULL: not wanted
    int running;                     // the action that runs, in its schedule
    // host
    int64_t first_row;                   // of a pass's samples, the first that this rank computes
    int32_t *host_tokens, *host_targets; // (samples, T) from it on
    float *host_losses;                  // the same
    int64_t host_rows;                   // samples of a step on this rank, at most
    int64_t first_micro, step_micros;    // number of the step's first micro-batch, and how many a step has, where steps overlap; else 0
    int64_t first_step, last_step;       // only these steps' actions are run, where steps overlap
    Tally told, telling;                 // what came from the rank before (to the first: of a whole step), what goes on
    Ticket told_ticket, telling_ticket;
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
    Errand *errands;                 // [ERRANDS] store work that waits for messages (relay.h), in its order; NULL: all is done at once
    int errand_count;
    bool on_errand;                // one is being done
    const Action *volatile action; // that is running, for signal handlers; NULL between passes
    volatile int64_t step;
    int64_t version; // of the parameters when the pass began
} Executor;

// What one pass works on.
typedef struct {
    const Dataset *data;
    int64_t first_sample;   // number of the pass's first sample in the run
    const int64_t *windows; // [samples] of the data, instead of samples that follow each other; or NULL
    const int64_t *begins;  // [micro-batches + 1] where each one's samples begin (layout.h: Pieces), or NULL
    int64_t samples;        // of this pass; rows beyond are left out
    double *sample_losses;  // [samples] sum of -log p over a sample's targets, filled for the rows this rank computes
    float scale;            // of the loss: 1 / targets of the step
    bool training;          // false: only losses
    double *sample_right;   // [samples] of labelled data: 1 where the likeliest label is the sample's, else 0. NULL: not wanted
    int64_t host_row;       // where the host keeps its first sample, in samples
} Pass;

// ---------------------------------------------------------------------------------------------------------------------
// Memory
static inline bool executor_has(const ExecutorShape *shape, int unit) { return unit >= shape->first && unit < shape->end; }
static inline bool executor_has_block(const ExecutorShape *shape, int64_t block) { return executor_has(shape, (int)block + 1); }
static inline bool executor_has_head(const Executor *e) { return e->shape.end == e->model->units; }
static inline int64_t executor_places(const ExecutorShape *shape, int unit) { return shape->places ? shape->places[unit] : shape->limits.slots; }
// Backward passes whose weight parts wait at once; in style flat each micro-batch's gradients lie among its activations.
static inline int64_t executor_backs(const ExecutorShape *shape) {
    return shape->clip.flat ? shape->limits.slots : max_i64(1, shape->limits.works / (shape->end - shape->first));
}

static inline void executor_carve_slot(Executor *e, Arena *a, int64_t place) {
    const ExecutorShape *shape = &e->shape;
    const int64_t N = shape->rows * shape->T, C = e->model->config.channels;
    const int head = e->model->units - 1;
    Slot *slot = &e->slot[place];
    for (int u = shape->first; u < shape->end; u++) {
        if (place >= executor_places(shape, u)) { continue; }
        const int64_t l = u - 1;
        if (u > shape->first) { slot->boundary[u] = arena_take(a, (size_t)(N * C) * dtype_size(shape->dtype)); }
        if (u == 0 || (u == head && shape->first && clip_crosses(&shape->clip))) { slot->tokens = (int32_t *)arena_take(a, (size_t)N * sizeof(int32_t)); }
        if (u == shape->first && shape->clip.on) { slot->weights = arena_floats(a, shape->rows); }
        if (u == head) { slot->head = gpt_head_acts(a, &e->model->config, N), slot->targets = (int32_t *)arena_take(a, (size_t)N * sizeof(int32_t)); }
        if (u == 0 || u == head) { continue; }
        const int64_t other = max_i64(shape->first, 1) - 1; // the first block here: of it all are copies
        const bool shares = shape->recompute && (place || l != other);
        slot->blocks[l] = shares ? e->slot[0].blocks[other] : gpt_block_acts(a, &e->model->config, N);
    }
}
static inline void executor_carve_activations(Executor *e, Arena *a) {
    const ExecutorShape *shape = &e->shape;
    const size_t boundary = (size_t)(shape->rows * shape->T * e->model->config.channels) * dtype_size(shape->dtype);
    for (int64_t i = 0; i < shape->limits.slots; i++) { executor_carve_slot(e, a, i); }
    for (int64_t i = 0; i < shape->limits.inputs; i++) { e->input[i].p = arena_take(a, boundary); }
    for (int i = 0; i < OUTGOING && !executor_has_head(e); i++) { e->output[i].p = arena_take(a, boundary); }
    for (int64_t i = 0; i < e->clips && executor_has_head(e); i++) { clip_carve_activations(&e->clip[i], a, e->model, shape->rows, shape->T); }
}
// Gradients: two places of boundaries and one of blocks in turns.
static inline void executor_carve_turns(Executor *e, Arena *a, Back *back, int64_t elements) {
    Real *turns[2] = {arena_reals(a, elements), arena_reals(a, elements)};
    BlockGradients work = gpt_block_gradients(a, &e->model->config, e->shape.rows * e->shape.T);
    for (int u = 1; u < e->model->units; u++) { back->gradient[u] = e->shape.cut && e->shape.cut[u] ? arena_reals(a, elements) : turns[u % 2]; }
    for (int l = 0; l < e->model->config.layers; l++) { back->work[l] = work; }
}
// Gradients that all stay until the weight parts: what is as large among the activations of the unit above is free by then. The topmost have places of
// their own, which micro-batches share (`first`: of the first one's) where none waits while another's are made.
static inline void executor_carve_flat(Executor *e, Arena *a, Back *back, int64_t elements) {
    const int last = e->shape.end - 1, blocks = (int)e->model->config.layers, top = (int)min_i64(e->shape.end - 1, blocks) - 1;
    const Back *first = back == e->back || clip_crosses_all(&e->shape.clip) ? NULL : e->back;
    const Slot *slot = &e->slot[back - e->back];
    for (int u = e->shape.first + 1; u <= last; u++) {
        const bool own = u == last || store_converts(e->shape.dtype);
        back->gradient[u] = !own ? (Real *)slot->boundary[u + 1] : first ? first->gradient[u] : arena_reals(a, elements);
    }
    for (int l = top; l >= 0 && executor_has_block(&e->shape, l); l--) {
        const BlockActs *above = &slot->blocks[l + 1];
        if (l == top) {
            back->work[l] = first ? first->work[l] : gpt_block_gradients(a, &e->model->config, e->shape.rows * e->shape.T);
            continue;
        }
        back->work[l] = back->work[top];
        back->work[l].dfc = above->fc, back->work[l].dqkv = above->qkv, back->work[l].dres2 = above->res2;
    }
}
// The same, of several micro-batches.
static inline void executor_carve_waiting(Executor *e, Arena *a, Back *back, int64_t elements) {
    for (int u = e->shape.first + 1; u < e->shape.end; u++) { back->gradient[u] = arena_reals(a, elements); }
    for (int64_t l = 0; l < e->model->config.layers; l++) {
        if (executor_has_block(&e->shape, l)) { back->work[l] = gpt_block_gradients(a, &e->model->config, e->shape.rows * e->shape.T); }
    }
}
static inline void executor_carve_buffers(Executor *e, Arena *a) {
    const ExecutorShape *shape = &e->shape;
    const int64_t n = shape->rows * shape->T * e->model->config.channels;
    for (int64_t i = 0; i < e->backs; i++) {
        (shape->clip.flat ? executor_carve_flat : shape->limits.works > 1 ? executor_carve_waiting : executor_carve_turns)(e, a, &e->back[i], n);
    }
    for (int64_t i = 0; i < shape->limits.gradients; i++) { e->received[i].p = arena_reals(a, n); }
    for (int i = 0; i < OUTGOING && shape->first; i++) { e->sent[i].p = arena_reals(a, n); }
    e->in = e->out = NULL;
    if (store_converts(shape->dtype)) { e->in = arena_reals(a, n), e->out = arena_reals(a, n); }
    e->logits = arena_reals(a, e->model->config.padded_vocab);
    for (int64_t i = 0; i < e->clips; i++) {
        const ClipUnits units = {shape->first, shape->end};
        clip_carve_buffers(&e->clip[i], i ? &e->clip[0] : NULL, a, e->model, units, shape->rows, shape->T);
        e->norms[i].p = e->clip[i].crossing.others, e->tied[i].p = e->clip[i].crossing.tied, e->factors[i].p = e->clip[i].crossing.factors;
    }
}

// Bytes of the operations' workspace.
static inline size_t executor_workspace_bytes(const GptModel *m, const ExecutorShape *shape, int threads) {
    bool kept = shape->clip.on && !shape->clip.again && !clip_instantiates_head(m, shape->T);
    return gpt_workspace_bytes(m, shape->rows, shape->T, threads, kept ? 0 : shape->logits);
}

// Counts the activations and buffers of a rank. executor_allocate makes it ready to run.
static inline Executor executor_plan(const GptModel *m, ExecutorShape shape, size_t *activation_bytes, size_t *buffer_bytes) {
    Executor e;
    memset(&e, 0, sizeof e);
    const size_t units = (size_t)m->units, layers = (size_t)m->config.layers;
    e.model = m, e.shape = shape, e.backs = executor_backs(&shape), e.clips = shape.clip.on ? max_i64(1, shape.limits.clips) : 0;
    e.slot = (Slot *)checked_calloc((size_t)shape.limits.slots, sizeof(Slot), "executor");
    for (int64_t i = 0; i < shape.limits.slots; i++) {
        e.slot[i].boundary = (void **)checked_calloc(units, sizeof(void *), "executor");
        e.slot[i].blocks = (BlockActs *)checked_calloc(layers, sizeof(BlockActs), "executor");
    }
    e.back = (Back *)checked_calloc((size_t)e.backs, sizeof(Back), "executor");
    for (int64_t i = 0; i < e.backs; i++) {
        e.back[i].gradient = (Real **)checked_calloc(units, sizeof(Real *), "executor");
        e.back[i].work = (BlockGradients *)checked_calloc(layers, sizeof(BlockGradients), "executor");
    }
    e.input = (Transit *)checked_calloc((size_t)shape.limits.inputs + 1, sizeof(Transit), "executor");
    e.received = (Transit *)checked_calloc((size_t)shape.limits.gradients + 1, sizeof(Transit), "executor");
    e.norms = (Transit *)checked_calloc((size_t)e.clips + 1, sizeof(Transit), "executor");
    e.tied = (Transit *)checked_calloc((size_t)e.clips + 1, sizeof(Transit), "executor");
    e.factors = (Transit *)checked_calloc((size_t)e.clips + 1, sizeof(Transit), "executor");
    e.clip = (Clip *)checked_calloc((size_t)e.clips + 1, sizeof(Clip), "executor");
    for (int64_t i = 0; i < e.clips; i++) {
        e.clip[i].policy = shape.clip, e.clip[i].blocks = (BlockSums *)checked_calloc(layers, sizeof(BlockSums), "executor");
    }
    e.held = (const Real **)checked_calloc((size_t)m->storages, sizeof(Real *), "executor");
    Arena activations = {NULL, 0}, buffers = {NULL, 0};
    executor_carve_activations(&e, &activations);
    executor_carve_buffers(&e, &buffers);
    *activation_bytes = activations.used, *buffer_bytes = buffers.used;
    return e;
}
// What travels between stages, place by place; NULL after the last.
static inline Transit *executor_transit(const Executor *e, int64_t i) {
    Transit *kinds[] = {e->input, (Transit *)(uintptr_t)e->output, e->received, (Transit *)(uintptr_t)e->sent, e->norms, e->tied, e->factors};
    const int64_t counts[] = {e->shape.limits.inputs, OUTGOING, e->shape.limits.gradients, OUTGOING, e->clips, e->clips, e->clips};
    for (int k = 0; k < 7; i -= counts[k++]) {
        if (i < counts[k]) { return &kinds[k][i]; }
    }
    return NULL;
}
static inline void executor_free(Executor *e) {
    if (e->errands) { e->comm->chores = NULL; }
    free(e->errands);
    ops_free(e->activations), ops_free(e->buffers);
    ops_free_host(e->host_tokens), ops_free_host(e->host_targets), ops_free_host(e->host_losses);
    for (int64_t i = 0; i < e->shape.limits.slots; i++) { free(e->slot[i].boundary), free(e->slot[i].blocks); }
    for (int64_t i = 0; i < e->backs; i++) { free(e->back[i].gradient), free(e->back[i].work); }
    for (int64_t i = 0; executor_transit(e, i); i++) { free(executor_transit(e, i)->open); }
    for (int64_t i = 0; i < e->clips; i++) { free(e->clip[i].blocks); }
    free(e->slot), free(e->back), free(e->input), free(e->received), free(e->first_rows), free(e->norms), free(e->tied), free(e->factors);
    free(e->clip), free(e->held), free(e->host_logits), free(e->host_weights), free(e->message), free(e->part), free(e->losses), free(e->right);
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
// Puts the activations and buffers where executor_plan() has counted them; they are the executor's from now on.
static inline void executor_place(Executor *e, void *activations, void *buffers) {
    Arena of_activations = {(char *)activations, 0}, of_buffers = {(char *)buffers, 0};
    e->activations = (char *)activations, e->buffers = (char *)buffers;
    executor_carve_activations(e, &of_activations);
    executor_carve_buffers(e, &of_buffers);
}
// A pass has so many samples and micro-batches, at most; this rank's lie among `mine` that follow each other. Every rank calls it.
static inline void executor_do_errands(void *executor);
static inline void executor_allocate(Executor *e, const UnitMap *map, Store *store, Comm *comm, Stream *stream, int64_t samples, int64_t mine,
                                     int micro_batches) {
    Arena activations = {NULL, 0}, buffers = {NULL, 0};
    e->map = map, e->store = store, e->stream = stream, e->comm = comm;
    executor_carve_activations(e, &activations);
    executor_carve_buffers(e, &buffers);
    executor_place(e, memory_take(MEMORY_ACTIVATIONS, activations.used, "activations"), memory_take(MEMORY_BUFFERS, buffers.used, "gradients of activations"));
    size_t N = (size_t)(mine * e->shape.T);
    if (store->policy.relay) { N *= 2, e->host_rows = mine, e->step_micros = micro_batches; } // of two steps
    e->host_tokens = (int32_t *)memory_take_host(N * sizeof(int32_t), "tokens");
    e->host_targets = (int32_t *)memory_take_host(N * sizeof(int32_t), "targets");
    e->host_losses = (float *)memory_take_host(N * sizeof(float), "losses");
    e->host_logits = (float *)checked_malloc((size_t)e->model->config.padded_vocab * sizeof(float), "logits");
    e->host_weights = (float *)checked_malloc((size_t)e->shape.rows * sizeof(float), "weights");
    e->losses = (double *)checked_calloc((size_t)samples, sizeof(double), "losses"),
    e->right = (double *)checked_calloc((size_t)samples, sizeof(double), "losses");
    e->message = (double *)checked_malloc((size_t)(samples + comm->ranks) * sizeof(double), "losses");
    e->part = (int64_t *)checked_malloc((size_t)(comm->ranks + 1) * sizeof(int64_t), "losses");
    e->first_rows = (int64_t *)checked_malloc((size_t)micro_batches * sizeof(int64_t), "executor");
    if (store->policy.relay && store->policy.relay->errands && comm_has_channels(comm)) {
        e->errands = (Errand *)checked_malloc(ERRANDS * sizeof(Errand), "executor");
        comm->chores = executor_do_errands, comm->chores_of = e;
    }
    for (int64_t i = 0; executor_transit(e, i); i++) { // a stage's neighbour has as many ranks, at most
        executor_transit(e, i)->open = (Ticket *)checked_malloc((size_t)comm->ranks * sizeof(Ticket), "executor");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Places of a micro-batch
// They count through the steps where these overlap.
static inline int64_t executor_micro(const Executor *e, const Action *a) { return e->first_micro + a->step * e->step_micros + a->micro; }
static inline Slot *executor_slot(const Executor *e, int unit, int64_t micro) { return &e->slot[micro % executor_places(&e->shape, unit)]; }
static inline Back *executor_back(const Executor *e, int64_t micro) { return &e->back[micro % e->backs]; }
static inline int64_t executor_clip_place(const Executor *e, int64_t micro) { return e->clips ? micro % e->clips : 0; }
// Where the input of a unit comes from, or goes to, that another stage shares; NULL: it stays here.
static inline Transit *executor_boundary_transit(Executor *e, int unit, int64_t micro) {
    if (unit == 0 || unit == e->model->units) { return NULL; }
    if (unit == e->shape.end) { return &e->output[micro % OUTGOING]; }
    return unit == e->shape.first ? &e->input[micro % e->shape.limits.inputs] : NULL;
}
static inline void *executor_boundary(Executor *e, int unit, int64_t micro) {
    Transit *transit = executor_boundary_transit(e, unit, micro);
    return transit ? transit->p : executor_slot(e, unit, micro)->boundary[unit];
}
// The same of its gradient.
static inline Transit *executor_gradient_transit(Executor *e, int unit, int64_t micro) {
    if (unit == 0 || unit == e->model->units) { return NULL; }
    if (unit == e->shape.end) { return &e->received[micro % e->shape.limits.gradients]; }
    return unit == e->shape.first ? &e->sent[micro % OUTGOING] : NULL;
}
static inline Real *executor_gradient(Executor *e, int unit, int64_t micro) {
    Transit *transit = executor_gradient_transit(e, unit, micro);
    return transit ? (Real *)transit->p : executor_back(e, micro)->gradient[unit];
}
// Its messages have arrived, or left.
static inline void transit_wait(Executor *e, Transit *transit) {
    for (int i = 0; transit && i < transit->messages; i++) { comm_wait_message(e->comm, transit->open[i]); }
    if (transit) { transit->messages = 0; }
}

// ---------------------------------------------------------------------------------------------------------------------
// Boundaries: a unit's input and output in compute precision
static inline const Real *boundary_read(Executor *e, const void *x, int64_t n) {
    if (!store_converts(e->shape.dtype)) { return (const Real *)x; }
    ops_unpack(e->stream, e->in, x, e->shape.dtype, n);
    return e->in;
}
static inline Real *boundary_write_begin(Executor *e, void *y) { return store_converts(e->shape.dtype) ? e->out : (Real *)y; }
static inline void boundary_write_end(Executor *e, void *y, int64_t n) {
    if (store_converts(e->shape.dtype)) { ops_pack(e->stream, y, e->out, e->shape.dtype, n); }
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
    void *x, *y;   // input and output, in storage precision. NULL: the unit has none
    Real *dx, *dy; // their gradients
    const Slot *slot;
    const Back *back;
    const Clip *clip;
    float *weights; // of clipped samples
} Work;

static inline const BlockActs *work_acts(const Work *w) { return &w->slot->blocks[w->unit - 1]; }
static inline Clip work_clip(const Work *w) {
    Clip c = *w->clip;
    c.weights = w->weights;
    return c;
}
static inline const BlockGradients *work_gradients(const Work *w) { return &w->back->work[w->unit - 1]; }
static inline Work executor_work(Executor *e, int unit, int64_t micro, int64_t rows, int64_t T) {
    const int head = e->model->units - 1;
    Work w;
    memset(&w, 0, sizeof w);
    w.unit = unit, w.rows = rows, w.T = T, w.N = rows * T, w.elements = w.N * e->model->config.channels;
    w.slot = executor_slot(e, unit, micro), w.back = executor_back(e, micro), w.clip = &e->clip[executor_clip_place(e, micro)];
    w.weights = executor_slot(e, e->shape.first, micro)->weights;
    if (unit > 0) { w.x = executor_boundary(e, unit, micro), w.dx = executor_gradient(e, unit, micro); }
    if (unit < head) { w.y = executor_boundary(e, unit + 1, micro), w.dy = executor_gradient(e, unit + 1, micro); }
    return w;
}

// Private steps that overlap have samples of different number: what a piece, and a rank, has of them is known here.
static inline bool executor_deals(const Executor *e, const Pass *pass) { return e->step_micros && pass->windows; }
static inline Action executor_action(const Executor *e, const Action *a, const Pass *pass) {
    Action of = *a;
    if (executor_deals(e, pass) && a->micro >= 0) {
        of.rows = piece_rows(&e->store->policy.relay->pieces, pass->samples, pass->begins, a->micro, &of.first_row);
    }
    return of;
}
static inline int64_t executor_own_rows(const Executor *e, const Pass *pass, int64_t *first) { // where steps overlap
    const Pieces *p = &e->store->policy.relay->pieces, whole = {p->micros, 1, p->in_turns};
    *first = 0;
    return p->in_turns ? piece_rows(&whole, pass->samples, pass->begins, e->comm->rank, first) : pass->samples;
}
// Where the host keeps what belongs to a row of the step.
static inline int64_t executor_host_place(const Executor *e, int64_t row, const Pass *pass) {
    int64_t first = e->first_row;
    if (executor_deals(e, pass)) { executor_own_rows(e, pass, &first); }
    return (pass->host_row + row - first) * pass->data->options.T;
}
static inline int64_t executor_rows(const Action *a, const Pass *pass) { return min_i64(a->rows, pass->samples - a->first_row); }
static inline bool executor_gives_losses(const Executor *e, const Action *a, const Pass *pass) {
    return a->unit == e->model->units - 1 && a->kind == (pass->training ? ACT_BACKWARD_INPUT : ACT_FORWARD);
}

// The losses of the pass, summed per sample. They are there: somebody has waited.
static inline void executor_take_losses(const Executor *e, const Schedule *schedule, const Pass *pass) {
    int64_t T = pass->data->options.T;
    for (int i = 0; i < schedule->count; i++) {
        const Action of = executor_action(e, &schedule->actions[i], pass), *a = &of;
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
    Real *gathered = w->dx; // free until the backward pass
    for (int64_t begin = 0; begin < w->rows; begin += most) {
        const int64_t count = min_i64(most, w->rows - begin);
        for (int64_t r = 0; r < count; r++) {
            const Real *row = real_at_const(w->slot->head.lnf, executor_label_row(w, pass, first_row, begin + r) * C);
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

// The first unit here that reads samples has them made; tokens are for the embedding, targets for the head.
static inline void executor_load_samples(Executor *e, const Work *w, const Pass *pass, int64_t first_row) {
    int32_t *tokens = e->host_tokens + executor_host_place(e, first_row, pass), *targets = e->host_targets + executor_host_place(e, first_row, pass);
    const int head = e->model->units - 1;
    if (w->unit == (e->shape.first ? head : 0) && pass->windows) {
        dataset_fill_windows(pass->data, pass->windows + first_row, w->rows, tokens, targets);
    } else if (w->unit == (e->shape.first ? head : 0)) {
        dataset_fill(pass->data, pass->first_sample + first_row, w->rows, tokens, targets);
    }
    if (w->unit == 0 || (e->shape.first && w->slot->tokens)) { ops_from_host(e->stream, w->slot->tokens, tokens, (size_t)w->N * sizeof(int32_t)); }
    if (w->unit == head) { ops_from_host(e->stream, w->slot->targets, targets, (size_t)w->N * sizeof(int32_t)); }
}
// The weights of clipped samples: the mean over their own targets against that over T.
static inline void executor_load_weights(Executor *e, const Work *w, const Pass *pass, int64_t first_row) {
    for (int64_t r = 0; r < w->rows; r++) {
        int64_t targets = dataset_window_targets(pass->data, pass->windows[first_row + r]);
        e->host_weights[r] = (float)w->T / (float)max_i64(targets, 1);
    }
    ops_from_host(e->stream, w->slot->weights, e->host_weights, (size_t)w->rows * sizeof(float));
}

static inline void run_forward(Executor *e, const Work *w) {
    int unit = w->unit, head = e->model->units - 1;
    if (unit == head) {
        gpt_head_forward(e->stream, e->model, &w->states, boundary_read(e, w->x, w->elements), &w->slot->head, w->N);
        return;
    }
    const Real *x = unit ? boundary_read(e, w->x, w->elements) : NULL;
    Real *out = boundary_write_begin(e, w->y);
    if (unit == 0) {
        gpt_embedding_forward(e->stream, e->model, &w->states, out, w->slot->tokens, w->rows, w->T);
    } else {
        gpt_block_forward(e->stream, e->model, &w->states, out, x, work_acts(w), w->rows, w->T);
    }
    boundary_write_end(e, w->y, w->elements);
}

static inline void run_backward_input(Executor *e, const Work *w, const Pass *pass) {
    const Real *x = boundary_read(e, w->x, w->elements);
    const Slot *slot = w->slot;
    if (w->unit < e->model->units - 1) {
        gpt_block_backward_input(e->stream, e->model, &w->states, w->dx, w->dy, x, work_acts(w), work_gradients(w), w->rows, w->T);
    } else if (e->shape.clip.on) {
        clip_head_backward_input(e->stream, e->model, w->clip, &w->states, w->dx, x, &slot->head, slot->targets, w->rows, w->T);
        if (clip_crosses(&e->shape.clip)) { clip_head_tell(e->stream, e->model, w->clip, slot->tokens, &slot->head, w->rows, w->T); }
    } else {
        gpt_head_backward_input(e->stream, e->model, &w->states, w->dx, x, &slot->head, slot->targets, w->N, pass->scale);
    }
}

static inline void run_backward_weight(Executor *e, const Work *w) {
    if (w->unit == 0) {
        gpt_embedding_backward_weight(e->stream, e->model, &w->states, w->dy, w->slot->tokens, w->rows, w->T);
        return;
    }
    const Real *x = boundary_read(e, w->x, w->elements);
    if (w->unit == e->model->units - 1) {
        gpt_head_backward_weight(e->stream, e->model, &w->states, x, &w->slot->head, w->N);
        return;
    }
    gpt_block_backward_weight(e->stream, e->model, &w->states, w->dy, x, work_acts(w), work_gradients(w), w->rows, w->T);
}

// What each sample adds to the gradients of a unit: its squared norm, added to the group's.
static inline void run_norms(Executor *e, const Work *w, const Clip *c) {
    const Slot *slot = w->slot;
    if (w->unit == 0) {
        clip_embedding_norms(e->stream, e->model, c, w->dy, slot->tokens, &slot->head, w->rows, w->T);
        return;
    }
    const Real *x = boundary_read(e, w->x, w->elements);
    if (w->unit == e->model->units - 1) {
        clip_head_norms(e->stream, e->model, c, x, &slot->head, w->rows, w->T);
        return;
    }
    clip_block_norms(e->stream, e->model, c, &c->blocks[w->unit - 1], w->dy, x, work_acts(w), work_gradients(w), w->rows, w->T);
}
// The unit's gradients, of all samples times their factors.
static inline void run_sum(Executor *e, const Work *w, const Clip *c) {
    const Slot *slot = w->slot;
    if (w->unit == 0 && clip_crosses(&c->policy)) {
        clip_table_sum(e->stream, e->model, c, &w->states, w->dy, slot->tokens, w->rows, w->T);
    } else if (w->unit == 0) {
        clip_embedding_sum(e->stream, e->model, c, &w->states, w->dy, slot->tokens, &slot->head, w->rows, w->T);
    } else if (w->unit == e->model->units - 1) {
        clip_head_sum(e->stream, e->model, c, &w->states, w->rows);
    } else {
        clip_block_sum(e->stream, e->model, c, &w->states, &c->blocks[w->unit - 1], w->dy, work_acts(w), work_gradients(w), w->rows, w->T);
    }
}
// The weight part of a unit that is a group of its own.
static inline void run_clipped_weight(Executor *e, const Work *w, const Clip *c) {
    const bool block = w->unit > 0 && w->unit < e->model->units - 1;
    if (block && clip_instantiates_block(&c->policy, e->model, w->T)) {
        clip_block_instantiated(e->stream, e->model, c, &w->states, w->dy, boundary_read(e, w->x, w->elements), work_acts(w), work_gradients(w), w->rows, w->T);
        return;
    }
    if (w->unit == 0 && c->policy.again) {
        clip_embedding_again(e->stream, e->model, c, &w->states, w->dy, w->slot->tokens, w->slot->targets, &w->slot->head, w->rows, w->T);
        return;
    }
    if (w->unit || !clip_crosses(&c->policy)) { // else CLIP has made the factors
        clip_begin(e->stream, c, w->rows);
        run_norms(e, w, c);
        clip_factors(e->stream, c, w->rows);
    }
    run_sum(e, w, c);
}
// The norms of a group of several units are known, but for the embedding's.
static inline void run_clip(Executor *e, const Work *w, const Clip *c) {
    if (w->unit == 0 && clip_crosses(&c->policy)) {
        if (!c->policy.flat || w->unit + 1 == e->shape.end) { clip_begin(e->stream, c, w->rows); } // it is alone in its group, or its stage
        clip_crossing_norms(e->stream, e->model, c, w->dy, w->slot->tokens, w->rows, w->T);
        return;
    }
    if (w->unit == 0) { run_norms(e, w, c); }
    clip_factors(e->stream, c, w->rows);
}
// The backward pass of a unit whose samples are clipped.
static inline void run_clipped_work(Executor *e, const Work *w, const Pass *pass) {
    const Clip c = work_clip(w);
    switch (w->kind) {
    case ACT_BACKWARD_INPUT:
        if (c.policy.flat && w->unit == e->shape.end - 1) { clip_begin(e->stream, &c, w->rows); }
        run_backward_input(e, w, pass);
        if (c.policy.flat) { run_norms(e, w, &c); }
        break;
    case ACT_CLIP: run_clip(e, w, &c); break;
    case ACT_TIED: clip_classifier_sum(e->stream, e->model, &c, &w->states, c.crossing.factors, c.lnf, w->rows, w->T); break;
    default: (c.policy.flat ? run_sum : run_clipped_weight)(e, w, &c);
    }
}

static inline void run_work(Executor *e, const Work *w, const Pass *pass) {
    if (w->kind == ACT_FORWARD) {
        run_forward(e, w);
    } else if (w->kind == ACT_RECOMPUTE) {
        gpt_block_forward(e->stream, e->model, &w->states, NULL, boundary_read(e, w->x, w->elements), work_acts(w), w->rows, w->T);
    } else if (e->shape.clip.on) {
        run_clipped_work(e, w, pass);
    } else if (w->kind == ACT_BACKWARD_INPUT) {
        run_backward_input(e, w, pass);
    } else {
        run_backward_weight(e, w);
    }
}

// What this action reads has arrived, and what it writes over has left.
static inline void executor_await(Executor *e, const Action *a) {
    const int64_t micro = executor_micro(e, a);
    if (a->kind == ACT_FORWARD) {
        transit_wait(e, executor_boundary_transit(e, a->unit, micro)), transit_wait(e, executor_boundary_transit(e, a->unit + 1, micro));
    }
    if (a->kind == ACT_BACKWARD_INPUT) { transit_wait(e, executor_gradient_transit(e, a->unit, micro)); }
    if (a->kind == ACT_BACKWARD_INPUT || a->kind == ACT_BACKWARD_WEIGHT || a->kind == ACT_CLIP) {
        transit_wait(e, executor_gradient_transit(e, a->unit + 1, micro));
    }
    if (!e->clips || a->kind == ACT_FORWARD) { return; }
    const int64_t place = executor_clip_place(e, micro);
    transit_wait(e, &e->norms[place]), transit_wait(e, &e->tied[place]), transit_wait(e, &e->factors[place]);
}
static inline void executor_free_sum(Executor *e, int storage);
// Where an action's contribution to a gradient goes.
static inline float *executor_room(Executor *e, const Action *a, int storage, bool *accumulate) {
    if (e->store->policy.relay) {
        executor_free_sum(e, storage);
        return store_own_gradient(e->store, storage, executor_micro(e, a), accumulate);
    }
    return store_gradient(e->store, storage, accumulate);
}
static inline void run_compute(Executor *e, const Action *action, const Pass *pass) {
    const Action of = executor_action(e, action, pass), *a = &of;
    const int64_t rows = executor_rows(a, pass);
    if (rows <= 0) { return; }
    executor_await(e, a);
    if (e->marks) { ops_mark(e->stream, e->marks[2 * e->running]); } // waiting for other stages is not its time
    Work w = executor_work(e, a->unit, executor_micro(e, a), rows, pass->data->options.T);
    int storages[2], n = gpt_unit_storages(e->model, a->unit, storages);
    for (int i = 0; i < n; i++) {
        StorageClass c = gpt_storage_class(e->model, storages[i]);
        if (action_reads_parameters(a->kind) || storages[i] == e->map->lent) { w.states.params[c] = e->held[storages[i]]; }
        if (action_contributes(e->map, a, storages[i])) { w.states.grads[c] = executor_room(e, a, storages[i], &w.states.accumulate[c]); }
    }
    if (a->kind == ACT_FORWARD && (a->unit == 0 || a->unit == e->model->units - 1)) { executor_load_samples(e, &w, pass, a->first_row); }
    if (a->kind == ACT_FORWARD && a->unit == e->shape.first && pass->training && e->shape.clip.on) { executor_load_weights(e, &w, pass, a->first_row); }
    w.kind = a->kind;
    bool block = a->unit > 0 && a->unit < e->model->units - 1, repeated = block && !e->marks;
    if (!repeated || ops_repeat_begin(e->stream, &w, sizeof w)) {
        run_work(e, &w, pass);
        if (repeated) { ops_repeat_end(e->stream); }
    }
    if (!executor_gives_losses(e, a, pass)) { return; }
    if (!pass->training) {
        gpt_head_losses(e->stream, e->model, &w.states, &w.slot->head, !e->clips || e->shape.clip.again ? NULL : e->clip[0].dlogits, w.slot->targets, w.N);
    }
    ops_to_host_later(e->stream, e->host_losses + executor_host_place(e, a->first_row, pass), w.slot->head.losses, (size_t)w.N * sizeof(float));
    if (pass->sample_right) { executor_judge_labels(e, &w, pass, a->first_row); }
}

// Bytes of one sample of a message: what goes on to the next stage (in storage precision), or back, its norm (with rows of the classifier's gradient,
// from the head), or its factor.
static inline int64_t executor_row_bytes(const ExecutorShape *shape, const GptModel *m, const Action *a) {
    const int64_t elements = shape->T * m->config.channels;
    switch (a->kind) {
    case ACT_SEND_FORWARD:
    case ACT_RECV_FORWARD: return elements * (int64_t)dtype_size(shape->dtype);
    case ACT_SEND_BACKWARD:
    case ACT_RECV_BACKWARD: return elements * (int64_t)ops_real_bytes();
    case ACT_SEND_NORM:
    case ACT_RECV_NORM: return (int64_t)sizeof(double) + (a->unit == m->units - 1 ? elements * (int64_t)sizeof(float) : 0);
    default: return (int64_t)sizeof(float);
    }
}
// Bytes of a message, that a step sends once for each action.
static inline int64_t executor_message_bytes(const ExecutorShape *shape, const GptModel *m, const Action *a) {
    if (action_of_rows(a->kind)) { return a->rows * executor_row_bytes(shape, m, a); }
    if (a->storage < 0) { return (int64_t)sizeof(Tally); }
    const bool parameters = a->kind == ACT_SEND_PARAMETERS || a->kind == ACT_RECV_PARAMETERS; // else gradients
    return gpt_storage_elements(m, a->storage) * (int64_t)(parameters ? dtype_size(shape->dtype) : sizeof(float));
}
// What messages this rank will post in these two programs, and in executor_logits, where the stages' first ranks talk. turns: other programs like the
// first let it talk to all ranks of the stages beside its own. The caller frees peers.
static inline CommTraffic executor_traffic(const GptModel *m, const ExecutorShape *shape, const Placement *placement, int rank, const Program *a,
                                           const Program *b, bool turns) {
    const bool crosses = clip_crosses(&shape->clip);
    const int64_t word = max_i64(crosses ? (int64_t)sizeof(float) : (int64_t)dtype_size(shape->dtype), (int64_t)ops_real_bytes());
    const size_t row_bytes = (size_t)(shape->T * m->config.channels * word);
    if (placement->stages > 1 && row_bytes * (size_t)shape->rows > INT_MAX) {
        die(EXIT_INPUT, "choose a smaller --micro-batch", "a micro-batch of %zu bytes between stages: 2 GiB are too much", row_bytes * (size_t)shape->rows);
    }
    const int mine = placement_stage_of_rank(placement, rank);
    CommTraffic traffic = {placement->stages > 1 ? row_bytes : 0, 0, (int *)checked_malloc((size_t)a->ranks * sizeof(int), "peers"), 0};
    bool *talks = (bool *)checked_calloc((size_t)a->ranks, sizeof(bool), "peers");
    int sides[2] = {0, 0};
    for (int s = 0; s < placement->stages; s++) {
        const bool next = s == mine - 1 || s == mine + 1, norms = crosses && s != mine && (s == 0 || mine == 0);
        if (next && placement->stage[mine].ranks[0] == rank) { talks[placement->stage[s].ranks[0]] = true; }
        const bool all = (crosses && (next || norms)) || (turns && next); // as samples, or micro-batches, fall
        for (int i = 0; all && i < placement->stage[s].replicas; i++) { talks[placement->stage[s].ranks[i]] = true; }
    }
    if (crosses) { traffic.bytes = row_bytes * (size_t)shape->rows; }
    for (int p = 0; p < 2; p++) {
        const Schedule *schedule = &(p ? b : a)->rank[rank];
        for (int i = 0; i < schedule->count; i++) {
            const Action *action = &schedule->actions[i];
            if (!action_is_message(action->kind)) { continue; }
            talks[action->peer] = true;
            traffic.bytes = (size_t)max_i64((int64_t)traffic.bytes, executor_message_bytes(shape, m, action));
        }
    }
    for (int r = 0; r < a->ranks; r++) {
        if (talks[r]) { traffic.peers[traffic.count++] = r, sides[placement_stage_of_rank(placement, r) > mine]++; }
    }
    free(talks);
    // a place is filled, or sent, by as many as there are on one side
    traffic.most = (int)((shape->limits.inputs + shape->limits.gradients + 2 * OUTGOING + 3 * shape->limits.clips) * max_i64(sides[0], sides[1]));
    return traffic;
}

// Posts a message of rows that begin at p, of the micro-batch's first row.
static inline void post_rows(Executor *e, const Action *a, Transit *transit, char *p, int64_t rows, int64_t row_bytes) {
    p += (a->first_row - e->first_rows[a->micro]) * row_bytes;
    transit->open[transit->messages++] = comm_post_message(e->comm, action_sends(a->kind), a->peer, p, (size_t)(rows * row_bytes));
}
// Posts a message: rows of what goes on to the next stage (the output of the unit), or back (the gradient of its input); norms, and what belongs
// to them, or factors.
static inline void run_message(Executor *e, const Action *a, const Pass *pass) {
    const int64_t rows = executor_rows(a, pass), row_bytes = executor_row_bytes(&e->shape, e->model, a), place = executor_clip_place(e, executor_micro(e, a));
    if (rows <= 0) { return; }
    const bool norm = a->kind == ACT_SEND_NORM || a->kind == ACT_RECV_NORM, forward = a->kind == ACT_SEND_FORWARD || a->kind == ACT_RECV_FORWARD;
    if (norm) {
        const bool apart = a->kind == ACT_RECV_NORM && clip_crosses_all(&e->shape.clip); // senders have places of their own
        double *norms = (double *)e->norms[place].p + (apart ? (e->map->stage[a->unit] - 1) * e->shape.rows : 0);
        comm_label(e->comm, "norms", a->unit, e->step);
        post_rows(e, a, &e->norms[place], (char *)norms, rows, (int64_t)sizeof(double));
        if (row_bytes > (int64_t)sizeof(double)) { post_rows(e, a, &e->tied[place], (char *)e->tied[place].p, rows, row_bytes - (int64_t)sizeof(double)); }
    } else if (a->kind == ACT_SEND_FACTOR || a->kind == ACT_RECV_FACTOR) {
        comm_label(e->comm, "factors", a->unit, e->step);
        post_rows(e, a, &e->factors[place], (char *)e->factors[place].p, rows, row_bytes);
    } else {
        const int64_t micro = executor_micro(e, a);
        Transit *transit = forward ? executor_boundary_transit(e, a->unit + 1, micro) : executor_gradient_transit(e, a->unit, micro);
        comm_label(e->comm, forward ? "activations" : "gradients", a->unit, e->step);
        post_rows(e, a, transit, (char *)transit->p, rows, row_bytes);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Running. All ranks run the schedules of one program.

#ifndef EXECUTOR_HOOK // tests of faults look in here: what is about to run
#define EXECUTOR_HOOK(action, step)
#endif
#ifndef ERRAND_HOOK // and here: may it be done now?
#define ERRAND_HOOK(errand) true
#endif

static inline void executor_begin(Executor *e, const Action *a, int index, int64_t step) {
    EXECUTOR_HOOK(a, step);
    e->action = a, e->step = step;
    bool of_unit = a->unit >= 0;
    ops_range_begin(action_names[a->kind], of_unit ? "unit" : "storage", of_unit ? a->unit : a->storage);
    e->running = index;
    if (e->marks) { ops_mark(e->stream, e->marks[2 * index]); }
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

// Which room has parameters that came for a use: in a pass that does not train, their own.
static inline int executor_room_of(const Executor *e, const Action *a, const Pass *pass, int64_t of) {
    const Relay *relay = e->store->policy.relay;
    return !relay || !relay->guests ? 0 : pass->training ? relay_room(relay, a->use, of) : e->map->param_room[a->storage];
}
static inline const Real *executor_acquire(Executor *e, int storage, int64_t version, int room) {
    return store_is_guest(e->store, storage) ? store_acquire_guest(e->store, storage, room) : store_acquire(e->store, storage, version);
}
static inline void executor_prefetch(Executor *e, int storage, int64_t version, bool near) {
    if (e->store->policy.relay) {
        store_hand_round(e->store, storage, e->map->param_room[storage], e->step);
    } else {
        store_prefetch(e->store, storage, version, near, e->step);
    }
}
// Which rows this rank computes.
static inline void executor_look_ahead(Executor *e, const Schedule *schedule) {
    schedule_rows(schedule, &e->first_row);
    for (int i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        const bool relayed = e->store->policy.relay && action_of_rows(a->kind); // a rank may receive what it computes in the next window
        if (a->kind == ACT_FORWARD || relayed) { e->first_rows[a->micro] = a->first_row; }
    }
}
// All that was sent has left.
static inline void executor_wait_messages(Executor *e) {
    for (int64_t i = 0; executor_transit(e, i); i++) { transit_wait(e, executor_transit(e, i)); }
}

// Of a relay. Where updates do not wait for the norm of the whole gradient, each storage's is looked at by itself. One that is not finite makes no
// update.
static inline void executor_update(Executor *e, int storage, int64_t step) {
    OptimizerStep update = e->update[step & 1];
    double norm = e->norm, most = e->whole_clip;
    if (!e->store->policy.relay->waits) {
        ExactSum squares;
        if (e->store->noise.on) { store_add_noise(e->store, storage, step); }
        memset(&squares, 0, sizeof squares);
        store_measure(e->store, storage, storage + 1, step, &squares);
        norm = sqrt(exact_value(squares)), most = e->storage_clip, exact_join(&e->squares, &squares);
    }
    if (most > 0 && norm > most) { update.grad_scale = (float)(most / norm); }
    if (isfinite(norm)) {
        store_update(e->store, storage, step, update);
    } else {
        store_skip_version(e->store, storage, step + 1);
    }
}
// Store work of a relay.
static inline void run_parameters(Executor *e, const Action *a) {
    const Relay *relay = e->store->policy.relay;
    if (relay->guests) {
        store_pass_guest(e->store, action_sends(a->kind), a->storage, max_i64(0, a->version), relay_room(relay, a->use, a->step), a->peer, a->step);
    } else {
        store_pass_parameters(e->store, action_sends(a->kind), a->storage, a->version, a->peer, a->step);
    }
}
static inline void run_errand(Executor *e, const Errand *errand) {
    const Action *a = &errand->action;
    switch (a->kind) {
    case ACT_REDUCE: store_add_sum(e->store, a->storage, errand->micro, a->micro, a->step); break;
    case ACT_ADD: store_add_part(e->store, a->storage, a->micro, a->step); break;
    case ACT_UPDATE: executor_update(e, a->storage, a->step); break;
    case ACT_SEND_SUM:
    case ACT_RECV_SUM: store_pass_sum(e->store, action_sends(a->kind), a->storage, a->peer, a->step); break;
    default: run_parameters(e, a);
    }
}
// Does the errands that wait for nothing, nor for one before them. Also while this rank waits (comm.h: chores).
static inline void executor_do_errands(void *executor) {
    Executor *e = (Executor *)executor;
    int left = 0;
    if (e->on_errand || !e->errand_count) { return; }
    e->on_errand = true;
    comm_note_messages(e->comm);
    for (int i = 0; i < e->errand_count; i++) {
        const Errand errand = e->errands[i];
        bool can = ERRAND_HOOK(&errand);
        for (int k = 0; k < left && can; k++) { can = !errands_conflict(&e->errands[k], &errand); }
        if (can && !errand_awaits(e->store, &errand)) {
            run_errand(e, &errand);
        } else {
            e->errands[left++] = errand;
        }
    }
    e->errand_count = left, e->on_errand = false;
}
// The first errand of these kinds (bits), of a storage (-1: of any), of a step (-1); -1: there is none.
static inline int executor_find_errand(const Executor *e, unsigned kinds, int storage, int64_t step) {
    for (int i = 0; i < e->errand_count; i++) {
        const Action *a = &e->errands[i].action;
        if ((kinds & errand_bit(a->kind)) && (storage < 0 || a->storage == storage) && (step < 0 || a->step == step)) { return i; }
    }
    return -1;
}
// Something needs an errand: waits for the first message that holds it up, or one before it.
static inline void executor_await_errand(Executor *e, int at) {
    for (int i = at - 1; i >= 0; i--) { at = errands_conflict(&e->errands[i], &e->errands[at]) ? i : at; }
    const Ticket t = errand_awaits(e->store, &e->errands[at]);
    if (t) { comm_wait_message(e->comm, t); }
    executor_do_errands(e);
}
static inline void executor_finish_errands(Executor *e, unsigned kinds, int storage, int64_t step) {
    for (int at = 0; (at = executor_find_errand(e, kinds, storage, step)) >= 0;) { executor_await_errand(e, at); }
}
// A gradient is about to be made: all of the one before it has gone on.
static inline void executor_free_sum(Executor *e, int storage) {
    const unsigned sums = errand_bit(ACT_REDUCE) | errand_bit(ACT_SEND_SUM) | errand_bit(ACT_UPDATE);
    executor_finish_errands(e, sums, storage, -1);
}
// A version is about to be read: it is here, or on its way.
static inline void executor_expect_version(Executor *e, int storage, int64_t version) {
    const unsigned makes = errand_bit(ACT_RECV_PARAMETERS) | errand_bit(ACT_UPDATE);
    for (int at = 0; store_now(e->store, storage) < version && (at = executor_find_errand(e, makes, storage, -1)) >= 0;) { executor_await_errand(e, at); }
}
static inline void executor_relay(Executor *e, const Action *a, int64_t of) {
    Errand errand = {*a, executor_micro(e, a)};
    errand.action.step = of, errand.action.version += e->version;
    if (a->kind == ACT_REDUCE) { executor_free_sum(e, a->storage), store_end_piece(e->store, a->storage, errand.micro, a->micro); }
    if (!e->errands) {
        run_errand(e, &errand);
        return;
    }
    if (e->errand_count == ERRANDS) { executor_await_errand(e, 0); }
    e->errands[e->errand_count++] = errand;
}
// This rank adds what it knows of a step: the losses of its samples, in their order, after those of the ranks before; the squares of what it owns.
static inline void tally_add(Executor *e, const Schedule *schedule, const Pass *pass, int64_t step) {
    executor_finish_errands(e, errand_bit(e->store->policy.relay->waits ? ACT_REDUCE : ACT_UPDATE), -1, step);
    ops_wait(e->stream);
    executor_take_losses(e, schedule, pass);
    int64_t first, rows = executor_own_rows(e, pass, &first);
    for (int64_t r = first; executor_has_head(e) && r < first + rows; r++) { // of private samples each one's mean counts
        const int64_t targets = pass->windows ? max_i64(dataset_window_targets(pass->data, pass->windows[r]), 1) : 1;
        e->telling.loss += pass->sample_losses[r] / (double)targets;
    }
    if (e->store->policy.relay->waits) {
        store_add_all_noise(e->store, step);
        store_measure(e->store, 0, e->model->storages, step, &e->squares);
    }
    exact_join(&e->telling.squares, &e->squares), e->telling.stop |= e->asked;
    memset(&e->squares, 0, sizeof e->squares);
}
// Of a relay: what a step has to tell so far, or, when it is whole, what all hear. The first rank decides when to stop: after the step
// that follows the one in which it has heard of it, or a later one, since others may have begun that.
static inline void run_tally(Executor *e, const Action *a, const Schedule *schedule, const Pass *pass, int64_t step) {
    const bool first = e->comm->rank == 0;
    comm_wait_message(e->comm, e->telling_ticket), comm_wait_message(e->comm, e->told_ticket);
    e->telling = e->told;
    memset(&e->told, 0, sizeof e->told);
    if (a->version == 0) { tally_add(e, schedule, pass, step); }
    if (first && e->telling.stop) { e->stop_after = min_i64(e->stop_after, step + e->store->policy.relay->notice); }
    if (first) { e->telling.last = e->stop_after; }
    if (e->telling.last) { e->stop_after = e->telling.last, e->last_step = min_i64(e->last_step, e->stop_after); }
    e->norm = sqrt(exact_value(e->telling.squares));
}

// Runs this rank's actions from *at up to and including NORM (whose result goes to *norm), or to the end; *at moves on.
// The caller looks at loss and norm there, and runs the rest (the updates) with the optimizer settings of the step, or not.
// Losses are there after NORM, or at the end of a pass that does not train: the only places where the host waits for the device,
// unless messages make it.
static inline void executor_run(Executor *e, const Schedule *schedule, int *at, const Pass *pass, const OptimizerStep *optimizer, int64_t step, double *norm) {
    const bool relay = e->store->policy.relay;
    if (*at == 0) { e->version = relay ? step : store_version(e->store), executor_look_ahead(e, schedule), e->first_micro = step * e->step_micros; }
    while (*at < schedule->count) {
        const Action *a = &schedule->actions[*at];
        const int64_t of = step + a->step; // the step that it belongs to
        if (relay && pass->training && (of < e->first_step || of > e->last_step)) {
            (*at)++;
            continue;
        }
        executor_begin(e, a, (*at)++, step);
        if (relay && errand_lanes(a->kind)) { executor_relay(e, a, of); }
        executor_do_errands(e);
        switch (relay && errand_lanes(a->kind) ? ACTION_KINDS : a->kind) {
        case ACT_PREFETCH: executor_prefetch(e, a->storage, e->version + a->version, a->near); break;
        case ACT_ACQUIRE:
            executor_expect_version(e, a->storage, e->version + a->version);
            e->held[a->storage] = executor_acquire(e, a->storage, max_i64(0, e->version + a->version), executor_room_of(e, a, pass, of));
            break;
        case ACT_RELEASE: store_release(e->store, a->storage); break;
        case ACT_REDUCE: store_reduce(e->store, a->storage, of); break;
        case ACT_UPDATE: store_update(e->store, a->storage, of, *optimizer); break;
        case ACT_NORM:
            executor_wait_messages(e);
            *norm = store_norm(e->store, step);
            executor_take_losses(e, schedule, pass);
            break;
        case ACT_TALLY: run_tally(e, a, schedule, pass, of); break;
        case ACT_SEND_PART:
        case ACT_RECV_PART: store_pass_part(e->store, action_sends(a->kind), a->storage, executor_micro(e, a), a->peer, of); break;
        case ACT_SEND_TALLY:
            comm_wait_message(e->comm, e->telling_ticket);
            e->telling_ticket = comm_post_on_host(e->comm, true, a->peer, &e->telling, sizeof e->telling);
            break;
        case ACT_RECV_TALLY: e->told_ticket = comm_post_on_host(e->comm, false, a->peer, &e->told, sizeof e->told); break;
        case ACTION_KINDS: break; // an errand
        default: (action_is_message(a->kind) ? run_message : run_compute)(e, a, pass + a->step);
        }
        if (e->marks) { ops_mark(e->stream, e->marks[2 * e->running + 1]); }
        ops_range_end();
        if (a->kind == ACT_NORM) { return; }
    }
    if (!pass->training) {
        executor_wait_messages(e), ops_wait(e->stream);
        executor_take_losses(e, schedule, pass);
    }
    e->action = NULL;
}

// Where steps overlap: what is done of a step before its window, if the step before has drained (first_step); and, where this one drains (last_step), what
// of it comes in a later one's. pass: of the step before, of this one, of the next; schedule: of the step before, of the later one.
enum { DRAINS = 3 }; // windows
static inline void executor_lead(Executor *e, const Schedule *schedule, const Pass *pass, int64_t step) {
    int at = 0;
    const int64_t last = e->last_step;
    e->last_step = step;
    executor_run(e, schedule, &at, pass, NULL, step - 1, NULL);
    e->last_step = last;
}
static inline void executor_drain(Executor *e, const Schedule *schedule, const Pass *pass, int64_t step, int64_t later) {
    int at = 0;
    executor_run(e, schedule, &at, pass, NULL, later, NULL);
    executor_finish_errands(e, ~0u, -1, -1);
    e->first_step = step + 1;
}
// Every rank gets what the ranks with the head know: values[] of a pass's samples. What else the ranks have to agree on travels with it, since an
// exchange costs a latency: *flag, whether this rank, then whether any rank has it. A rank's part of the message is its samples' values, in the order
// of its schedule, and the flag. All ranks call it after the pass.
static inline void executor_share(Executor *e, const Program *p, double *values, bool *flag) {
    const int head = e->model->units - 1;
    e->part[0] = 0;
    for (int pass = 0; pass < 2; pass++) { // count and pack; then unpack
        for (int r = 0; r < p->ranks; r++) {
            int64_t at = e->part[r];
            for (int i = 0; i < p->rank[r].count; i++) {
                const Action *a = &p->rank[r].actions[i];
                if (a->kind != ACT_FORWARD || a->unit != head) { continue; }
                double *there = e->message + at, *here = values + a->first_row;
                if (pass || r == e->comm->rank) { memcpy(pass ? here : there, pass ? there : here, (size_t)a->rows * sizeof(double)); }
                at += a->rows;
            }
            if (pass) {
                *flag |= e->message[at] != 0;
            } else if (r == e->comm->rank) {
                e->message[at] = *flag;
            }
            if (!pass) { e->part[r + 1] = at + 1; }
        }
        if (!pass) { comm_all_gather_doubles(e->comm, e->message, e->part); }
    }
}

// Sum of the losses of a pass's samples, in their order, from all ranks. *stop: whether this rank, then whether any rank, was asked to stop.
static inline double executor_sum_losses(Executor *e, const Program *program, const Pass *pass, bool *stop) {
    double sum = 0;
    executor_share(e, program, pass->sample_losses, stop);
    for (int64_t i = 0; i < pass->samples; i++) { sum += pass->sample_losses[i]; }
    return sum;
}

// What samples tell about the model.
typedef struct {
    double loss;            // summed over targets
    int64_t targets, right; // right: labels, or choices of an example, that the model finds likeliest and that are so
} Evaluation;

// Runs samples 0 .. samples - 1 of the data through the model, by the schedule of passes that do not train. All ranks call it, and get the same.
static inline Evaluation executor_evaluate(Executor *e, const Program *program, const Dataset *data, int64_t samples, int64_t step) {
    Evaluation sum = {0, 0, 0};
    Choice choice = {0, false};
    for (int64_t first = 0; first < samples; first += program->samples) {
        int64_t count = min_i64(program->samples, samples - first);
        Pass pass = {data, first, NULL, NULL, count, e->losses, 0.0f, false, data->labels ? e->right : NULL, 0};
        int at = 0;
        bool none = false; // to stop is asked of training steps only
        executor_run(e, &program->rank[e->comm->rank], &at, &pass, NULL, step, NULL);
        sum.loss += executor_sum_losses(e, program, &pass, &none);
        if (data->labels) { executor_share(e, program, e->right, &none); }
        sum.targets += dataset_count_targets(data, first, count);
        for (int64_t i = 0; i < count; i++) {
            if (data->labels) { sum.right += e->right[i] != 0; }
            if (data->rows) { sum.right += choice_add(&choice, data, first + i, e->losses[i]); }
        }
    }
    return sum;
}

// The stage's part of a forward pass of one sequence: its units read what slot 0 holds, or input 0, and leave output 0, or logits(Vp) on the
// host. All ranks of the stage call it.
static inline void executor_stage_forward(Executor *e, int64_t n, float *logits) {
    const GptModel *m = e->model;
    for (int unit = e->shape.first; unit < e->shape.end; unit++) {
        Work w = executor_work(e, unit, 0, 1, n);
        int storages[2], count = gpt_unit_storages(m, w.unit, storages);
        for (int i = 0; i < count; i++) {
            int64_t version = store_now(e->store, storages[i]);
            if (store_gathers_for_use(e->store, storages[i])) { executor_prefetch(e, storages[i], version, true); }
            w.states.params[gpt_storage_class(m, storages[i])] = executor_acquire(e, storages[i], version, e->map->param_room[storages[i]]);
        }
        run_forward(e, &w);
        if (w.unit == m->units - 1) {
            executor_logits_of_rows(e, &w.states, real_at_const(w.slot->head.lnf, (n - 1) * m->config.channels), 1, 0, m->config.padded_vocab, logits);
        }
        for (int i = 0; i < count; i++) { store_release(e->store, storages[i]); }
    }
}
// Logits(Vp), on the host, of the token that follows tokens(n), n <= T. No schedule: one sequence through all stages, where the first rank of each
// sends it on. Every rank calls it, and gets the same.
static inline void executor_logits(Executor *e, const Placement *placement, const int32_t *tokens, int64_t n, float *logits) {
    const size_t bytes = (size_t)(n * e->model->config.channels) * dtype_size(e->shape.dtype);
    const int mine = placement_stage_of_unit(placement, e->shape.first), last = placement->stages - 1;
    const Stage *stage = &placement->stage[mine];
    if (e->slot[0].tokens) { ops_from_host(e->stream, e->slot[0].tokens, tokens, (size_t)n * sizeof(int32_t)); }
    bool leads = stage->ranks[0] == e->comm->rank;
    if (leads && mine) { comm_wait_message(e->comm, comm_receive(e->comm, stage[-1].ranks[0], e->input[0].p, bytes)); }
    executor_stage_forward(e, n, logits);
    if (leads && mine < last) { comm_wait_message(e->comm, comm_send(e->comm, stage[1].ranks[0], e->output[0].p, bytes)); }
    if (last) { comm_broadcast(e->comm, logits, (size_t)e->model->config.padded_vocab * sizeof(float), placement->stage[last].ranks[0]); }
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
static inline void executor_generate(Executor *e, const Placement *placement, int32_t first, int32_t *out, int64_t count, Draws draws) {
    int64_t T = e->shape.T, n = 1;
    int32_t *tokens = (int32_t *)checked_malloc((size_t)T * sizeof(int32_t), "sample");
    tokens[0] = first;
    for (int64_t i = 0; i < count; i++) {
        executor_logits(e, placement, tokens, n, e->host_logits);
        out[i] = choose_token(draws, e->host_logits, e->model->config.vocab, i);
        if (n == T) { memmove(tokens, tokens + T / 2, (size_t)(T - T / 2) * sizeof(int32_t)), n = T - T / 2; } // slide: keep the newer half
        tokens[min_i64(n, T - 1)] = out[i];
        n = min_i64(n + 1, T);
    }
    free(tokens);
}

#endif
