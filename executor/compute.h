// compute.h: runs compute actions, and messages of a micro-batch's rows. It chooses the buffers
// that a unit's forward and backward parts use, and calls the model's functions (gpt.h, dp.h).
#ifndef COMPUTE_H
#define COMPUTE_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "dataloader.h"
#include "dp.h"
#include "executor/activations.h"
#include "executor/deferred.h"
#include "executor/exchange.h"
#include "executor/expert_loads.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "ops/ops.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "state/gather.h"
#include "state/layout.h"
#include "state/p2p.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/sums.h"

// -------------------------------------------------------------------------------------------------
// Compute actions

// Everything that the work of a block depends on and that varies: the key under which the work is
// recorded and replayed. (The head's work depends on the pass as well, so it is not replayed.) Keys
// are compared as bytes, so a Work must be cleared before it is filled.
typedef struct {
    ActionKind kind;
    int unit, part;
    int64_t rows, T, N; // N = rows * T
    UnitStates states;
    void *x, *y;   // input and output; NULL: the unit has none
    Real *dx, *dy; // their gradients
    const ActivationSet *acts;
    const GradientBuffers *grads;
    const Clip *clip;
    float *weights; // of samples, if they are clipped
    float aux, z;   // of routers' losses (Pass)
    // generated text (UnitCall)
    int64_t first;
    KeyCache cache;
} Work;

static inline Work executor_work(Executor *e, int unit, int64_t micro, int64_t rows, int64_t T) {
    const int head = e->model->units - 1;
    Work w;
    memset(&w, 0, sizeof w);
    w.unit = unit;
    w.rows = rows;
    w.T = T;
    w.N = rows * T;
    w.acts = executor_acts(e, unit, micro);
    w.grads = executor_grads(e, micro);
    w.clip = &e->clip[executor_clip_place(e, micro)];
    w.weights = executor_acts(e, units_first(&e->shape.units), micro)->weights;
    if (unit > 0) {
        w.x = executor_boundary(e, unit, micro);
        w.dx = executor_gradient(e, unit, micro);
    }
    if (unit < head) {
        w.y = executor_boundary(e, unit + 1, micro);
        w.dy = executor_gradient(e, unit + 1, micro);
    }
    return w;
}

// True if the samples of a micro-batch are known only when the step runs: private steps that
// overlap draw different numbers of samples. executor_action then fills in the rows of a piece.
static inline bool executor_splits_samples(const Executor *e, const Pass *pass) {
    return e->step_micros && pass->windows;
}
static inline Action executor_action(const Executor *e, const Action *a, const Pass *pass) {
    Action drawn = *a;
    if (executor_splits_samples(e, pass) && a->micro >= 0) {
        drawn.rows = piece_rows(&e->store->plan.p2p.pieces, pass->samples, pass->begins, a->micro,
                                &drawn.first_row);
    }
    return drawn;
}
// Returns the number of samples that this rank computes in a step, where steps overlap; *first: the
// first of them.
static inline int64_t executor_own_rows(const Executor *e, const Pass *pass, int64_t *first) {
    const Pieces *p = &e->store->plan.p2p.pieces, whole = {p->micros, 1, p->in_turns};
    *first = 0;
    return p->in_turns ? piece_rows(&whole, pass->samples, pass->begins, e->comm->rank, first)
                       : pass->samples;
}
// Returns the position, in the host arrays of tokens, targets and losses, of a row of the step.
static inline int64_t executor_host_place(const Executor *e, int64_t row, const Pass *pass) {
    int64_t first = e->first_row;
    if (executor_splits_samples(e, pass)) { executor_own_rows(e, pass, &first); }
    return (pass->host_row + row - first) * pass->data->options.T;
}
static inline int64_t executor_rows(const Action *a, const Pass *pass) {
    return min_i64(a->rows, pass->samples - a->first_row);
}
static inline bool executor_gives_losses(const Executor *e, const Action *a, const Pass *pass) {
    return a->unit == e->model->units - 1 &&
           a->kind == (pass->training ? ACT_BACKWARD_INPUT : ACT_FORWARD);
}

// Sums the losses of the pass for each sample. The caller must have waited for the device.
static inline void executor_take_losses(const Executor *e, const Schedule *schedule,
                                        const Pass *pass) {
    int64_t T = pass->data->options.T;
    for (int i = 0; i < schedule->count; i++) {
        const Action drawn = executor_action(e, &schedule->actions[i], pass), *a = &drawn;
        for (int64_t r = 0; executor_gives_losses(e, a, pass) && r < executor_rows(a, pass); r++) {
            const float *losses = e->host_losses + executor_host_place(e, a->first_row + r, pass);
            double sum = 0;
            for (int64_t t = 0; t < T; t++) { sum += losses[t]; }
            pass->sample_losses[a->first_row + r] = sum;
        }
    }
}

// Writes logits(rows, count) of the tokens first .. first + count - 1 to host memory, for rows of
// the classifier's input. rows * count must be at most padded_vocab.
static inline void executor_logits_of_rows(Executor *e, const UnitStates *states,
                                           const Real *classified, int64_t rows, int64_t first,
                                           int64_t count, float *logits) {
    assert(rows * count <= e->model->config.padded_vocab);
    head_logits(e->stream, e->model, states, e->logits, classified, rows, first, count);
    ops_reals_to_host(e->stream, logits, e->logits, rows * count);
}

// Returns the row of the micro-batch that predicts the label of its r-th sample: that of the last
// target.
static inline int64_t executor_label_row(const Work *w, const Pass *pass, int64_t first_row,
                                         int64_t r) {
    return r * w->T + dataset_targets(pass->data, pass->first_sample + first_row + r) - 1;
}
// Notes for each sample whether its label is the likeliest of all labels. One product serves as
// many samples as the buffer of logits can hold.
static inline void executor_judge_labels(Executor *e, const Work *w, const Pass *pass,
                                         int64_t first_row) {
    const int64_t C = gpt_width(e->model), first = pass->data->first_label,
                  labels = pass->data->labels;
    const Real *classified = head_classified(e->model, &w->acts->unit[w->unit]);
    const int64_t most = e->model->config.padded_vocab / labels;
    const int32_t *targets = e->host_targets + executor_host_place(e, first_row, pass);
    Real *gathered = w->dx; // free until the backward pass
    for (int64_t begin = 0; begin < w->rows; begin += most) {
        const int64_t count = min_i64(most, w->rows - begin);
        for (int64_t r = 0; r < count; r++) {
            const Real *row =
                real_at_const(classified, executor_label_row(w, pass, first_row, begin + r) * C);
            ops_copy(e->stream, real_at(gathered, r * C), row, C * ops_real_bytes());
        }
        executor_logits_of_rows(e, &w->states, gathered, count, first, labels, e->host_logits);
        for (int64_t r = 0; r < count; r++) {
            const float *logits = e->host_logits + r * labels;
            int64_t best = 0;
            for (int64_t i = 1; i < labels; i++) { best = logits[i] > logits[best] ? i : best; }
            pass->sample_right[first_row + begin + r] =
                targets[executor_label_row(w, pass, first_row, begin + r)] == first + best;
        }
    }
}

// Makes the samples of a micro-batch and copies them to the device: tokens for the embedding,
// targets for the head. The first of these units on this rank reads them from the data.
static inline void executor_load_samples(Executor *e, const Work *w, const Pass *pass,
                                         int64_t first_row) {
    int32_t *tokens = e->host_tokens + executor_host_place(e, first_row, pass),
            *targets = e->host_targets + executor_host_place(e, first_row, pass);
    const int head = e->model->units - 1;
    const bool embeds = executor_has(&e->shape, 0), reads = w->unit == (embeds ? 0 : head);
    if (reads && pass->windows) {
        dataset_fill_windows(pass->data, pass->windows + first_row, w->rows, tokens, targets);
    } else if (reads) {
        dataset_fill(pass->data, pass->first_sample + first_row, w->rows, tokens, targets);
    }
    if (w->unit == 0 || (!embeds && w->acts->tokens)) {
        ops_from_host(e->stream, w->acts->tokens, tokens, w->N * sizeof(int32_t));
    }
    if (w->unit == head) {
        ops_from_host(e->stream, w->acts->targets, targets, w->N * sizeof(int32_t));
    }
}
// Copies the weights of clipped samples to the device: the loss of a sample is the mean over its
// own targets, while the backward pass divides by T, so the weight is T / targets.
static inline void executor_load_weights(Executor *e, const Work *w, const Pass *pass,
                                         int64_t first_row) {
    for (int64_t r = 0; r < w->rows; r++) {
        int64_t targets = dataset_window_targets(pass->data, pass->windows[first_row + r]);
        e->host_weights[r] = w->T / (float)max_i64(targets, 1);
    }
    ops_from_host(e->stream, w->acts->weights, e->host_weights, w->rows * sizeof(float));
}

// Returns the pass over a unit that a compute action makes.
static inline UnitCall executor_call(Executor *e, const Work *w) {
    UnitCall c;
    memset(&c, 0, sizeof c);
    c.stream = e->stream;
    c.model = e->model;
    c.unit = gpt_unit_spec(e->model, gpt_unit_class(e->model, w->unit));
    c.states = &w->states;
    c.buffers = w->acts->unit[w->unit];
    for (int g = GRADIENT_FIRST; g < c.unit->gradient_count; g++) {
        if (!c.unit->gradients[g].with_values) {
            c.buffers.gradient[g] = w->grads->unit[w->unit].gradient[g];
        }
    }
    c.buffers.value[VALUE_X] = w->x;
    c.buffers.gradient[GRADIENT_X] = w->dx;
    c.buffers.gradient[GRADIENT_Y] = w->dy;
    c.tokens = w->acts->tokens;
    c.targets = w->acts->targets;
    c.rows = w->rows;
    c.T = w->T;
    c.part = w->part;
    c.first = w->first;
    c.cache = w->cache;
    return c;
}

static inline void run_forward(Executor *e, const Work *w) {
    UnitCall c = executor_call(e, w);
    c.recompute = w->kind == ACT_RECOMPUTE;
    if (!c.recompute) { c.buffers.value[VALUE_Y] = w->y; }
    unit_pass(&c, PART_FORWARD);
}

static inline void run_backward_input(Executor *e, const Work *w, UnitCall *c, const Pass *pass) {
    const bool head = w->unit == e->model->units - 1;
    if (head && e->shape.clip.on) {
        clip_head_backward_input(c, w->clip);
        if (clip_ties(&e->shape.clip)) { clip_head_prepare(c, w->clip); }
        return;
    }
    if (head) {
        const int table = gpt_classifier(e->model)->params[0];
        c->classifier.dweight = unit_grad(e->model, &w->states, table);
        c->classifier.accumulate = w->states.accumulate[tensor_class(e->model, table)];
        c->classifier.each = w->N;
        c->classifier.scale = pass->scale;
    }
    if (e->loads.experts && !head) {
        c->router.shares = w->aux > 0 ? e->shares + (w->unit - 1) * e->loads.experts : NULL;
        c->router.aux = w->aux;
        c->router.z = w->z;
    }
    unit_pass(c, PART_BACKWARD_INPUT);
}

// Returns the buffers of the head of the same micro-batch.
static inline const UnitBuffers *work_head(const Executor *e, const Work *w) {
    return &w->acts->unit[e->model->units - 1];
}
// Adds the squared norms of each sample's gradients in one unit to those of its clipping group.
static inline void run_norms(Executor *e, const Work *w, UnitCall *c, const Clip *clip) {
    if (w->unit == 0) {
        unit_pass(c, PART_BACKWARD_INPUT);
        clip_embedding_norms(c, clip, work_head(e, w));
        return;
    }
    UnitCall clipped = clip_call(c, clip, w->unit);
    if (w->unit == e->model->units - 1) {
        clip_head_norms(&clipped, clip);
    } else {
        unit_pass(&clipped, PART_SAMPLE_NORMS);
    }
}
// Adds the gradients of a unit, summed over the samples, each times its clipping factor.
static inline void run_sum(Executor *e, const Work *w, UnitCall *c, const Clip *clip) {
    if (w->unit == 0) {
        clip_embedding_sum(c, clip, work_head(e, w));
        return;
    }
    UnitCall clipped = clip_call(c, clip, w->unit);
    if (w->unit == e->model->units - 1) {
        clip_head_sum(&clipped, clip);
    } else {
        unit_pass(&clipped, PART_SAMPLE_SUM);
    }
}
// Runs the weight part of a unit that is a clipping group of its own.
static inline void run_clipped_weight(Executor *e, const Work *w, UnitCall *c, const Clip *clip) {
    const bool block = gpt_unit_class(e->model, w->unit) == UNIT_BLOCK;
    if (block && clip_instantiates_block(&clip->policy, e->model, w->T)) {
        clip_block_instantiated(c, clip);
        return;
    }
    if (w->unit == 0 && clip->policy.recomputes_logits) {
        clip_embedding_again(c, clip, work_head(e, w));
        return;
    }
    if (w->unit || !clip_crosses(&clip->policy)) { // otherwise CLIP has made the factors
        clip_begin(e->stream, clip, w->rows);
        run_norms(e, w, c, clip);
        clip_factors(e->stream, clip, w->rows);
    }
    run_sum(e, w, c, clip);
}
// Runs CLIP: finishes the norms of a group of several units (the embedding's are still missing) and
// makes the factors.
static inline void run_clip(Executor *e, const Work *w, UnitCall *c, const Clip *clip) {
    // the unit is alone in its group, or in its stage
    if (w->unit == 0 && (!clip->policy.flat || !executor_has(&e->shape, w->unit + 1))) {
        clip_begin(e->stream, clip, w->rows);
    }
    if (w->unit == 0 && clip_crosses(&clip->policy)) {
        unit_pass(c, PART_BACKWARD_INPUT);
        clip_crossing_norms(c, clip);
        return;
    }
    if (w->unit == 0) { run_norms(e, w, c, clip); }
    clip_factors(e->stream, clip, w->rows);
}
// Runs a backward action of a unit whose samples are clipped.
static inline void run_clipped_work(Executor *e, const Work *w, const Pass *pass) {
    UnitCall c = executor_call(e, w);
    Clip clip = *w->clip;
    clip.weights = w->weights;
    switch (w->kind) {
    case ACT_BACKWARD_INPUT:
        if (clip.policy.flat && !executor_has(&e->shape, w->unit + 1)) {
            clip_begin(e->stream, &clip, w->rows);
        }
        run_backward_input(e, w, &c, pass);
        if (clip.policy.flat) { run_norms(e, w, &c, &clip); }
        break;
    case ACT_CLIP: run_clip(e, w, &c, &clip); break;
    case ACT_TIED: clip_classifier_sum(&c, &clip, clip.crossing.factors, clip.lnf); break;
    default: (clip.policy.flat ? run_sum : run_clipped_weight)(e, w, &c, &clip);
    }
}

static inline void run_work(Executor *e, const Work *w, const Pass *pass) {
    if (w->kind == ACT_FORWARD || w->kind == ACT_RECOMPUTE) {
        run_forward(e, w);
        return;
    }
    if (e->shape.clip.on) {
        run_clipped_work(e, w, pass);
        return;
    }
    UnitCall c = executor_call(e, w);
    if (w->kind == ACT_BACKWARD_INPUT) {
        run_backward_input(e, w, &c, pass);
        return;
    }
    // the embedding has no action for its input part: nothing is below it
    if (w->unit == 0) { unit_pass(&c, PART_BACKWARD_INPUT); }
    if (e->pieces) { c.weights = ~(1u << EXPERTS_PART); } // run_pieces has made the others
    unit_pass(&c, PART_BACKWARD_WEIGHT);
}

// Returns the buffer that an action adds its gradient to. *accumulate: false if the buffer must be
// overwritten instead.
static inline float *executor_capacity(Executor *e, const Action *a, int storage,
                                       bool *accumulate) {
    if (e->store->plan.steps_overlap) {
        return store_own_gradient(e->store, storage, executor_micro(e, a), accumulate);
    }
    return store_gradient(e->store, storage, accumulate);
}
// Copies activations inside a block, or its input, between the device buffer and the host. Copies
// of one buffer run in order, after the work already issued on the compute stream.
static inline void run_stash(Executor *e, const Action *a, const Pass *pass) {
    const size_t bytes = executor_stash_bytes(&e->shape, e->model);
    const int64_t slot = executor_micro(e, a) % e->shape.limits.in_flight,
                  blocks = executor_stashes(&e->shape, e->model->units);
    char *host = e->stash + (slot * blocks + executor_stashes(&e->shape, a->unit)) * bytes;
    Stream *link = &e->stash_link[stash_slot(a->unit)];
    void *device = e->stash_slot[stash_slot(a->unit)];
    if (executor_rows(a, pass) <= 0) { return; }
    ops_follow(link, e->stream);
    if (a->kind == ACT_FETCH_STASH) {
        ops_from_host(link, device, host, bytes);
        e->store->flight.copied.to_device += (int64_t)bytes;
    } else {
        ops_to_host_later(link, host, device, bytes);
        e->store->flight.copied.to_host += (int64_t)bytes;
    }
    const CommRequest none = {.number = 0};
    transfer_open(e, a, pass->training, none, link);
}
// Runs the message before a part of a unit (architecture.h: EXCHANGE); back: gradients, the other
// way. What goes in pieces is sent while the experts run.
static inline void run_exchange(Executor *e, const Action *a, const Pass *pass) {
    const int64_t T = pass->data->options.T, micro = executor_micro(e, a);
    const Work w = executor_work(e, a->unit, micro, a->rows, T);
    const UnitCall c = executor_call(e, &w);
    const OpNode *n = unit_message(c.unit, a->part);
    const bool back = a->kind == ACT_EXCHANGE_BACK;
    if (n->stats[0]) {
        RowPieces *pieces = executor_pieces(e, a->unit, micro);
        if (!back && a->part == EXPERTS_PART) {
            exchange_loads(e, &c, pieces);
            if (pieces && pass->counts) { expert_loads_note_pieces(&e->loads, pieces->count); }
        }
        if (!pieces || pieces->count == 1) { exchange_all_rows(e, &c, a->part, back); }
        return;
    }
    const ZeroMessage m = exchange_message(&e->store->plan, a, T);
    const CommLabel label = {"rows of a unit", a->unit, e->step};
    CommRequest r = comm_all_to_all_begin(
        e->comm, label, m.group, back ? gradient_buffer(&c, n->out[0]) : c.buffers.value[n->in[0]],
        m.bounds, back ? gradient_buffer(&c, n->in[0]) : c.buffers.value[n->out[0]], m.bounds,
        m.element_bytes);
    comm_wait(e->comm, &r);
}
// Runs what a compute action does with experts to which rows may go in pieces: the pass of their
// part, if there are several, and the gradients of their weights, when the backward pass comes to
// the block's first part. Returns true if nothing of the action is left.
static inline bool run_pieces(Executor *e, const Action *a, Work *w) {
    const RowPieces *pieces = executor_pieces(e, a->unit, executor_micro(e, a));
    if (!pieces || gpt_unit_class(e->model, a->unit) != UNIT_BLOCK) { return false; }
    const bool several = pieces->count > 1, back = a->kind == ACT_BACKWARD_INPUT;
    UnitCall c = executor_call(e, w);
    if (a->part == EXPERTS_PART) {
        if (several && !back) { exchange_pieces(e, &c, pieces, false); }
        return several;
    }
    if (!back || a->part) { return false; }
    c.weights = 1u << EXPERTS_PART;
    if (several) {
        exchange_pieces(e, &c, pieces, true);
    } else {
        unit_pass(&c, PART_BACKWARD_WEIGHT);
    }
    // the rest of the action is recorded without these
    w->states.grads[STORAGE_EXPERTS] = NULL;
    w->states.accumulate[STORAGE_EXPERTS] = false;
    return false;
}
static inline void run_compute(Executor *e, const Action *action, const Pass *pass) {
    const Action drawn = executor_action(e, action, pass), *a = &drawn;
    // ranks exchange all rows, those beyond the pass's samples included
    const bool cut = e->map->parts > 1 && gpt_unit_class(e->model, a->unit) == UNIT_BLOCK;
    const int64_t rows = cut ? a->rows : executor_rows(a, pass);
    if (rows <= 0 || (pass->looks && a->unit == e->model->units - 1)) { return; }
    executor_await(e, a, pass->training);
    // time spent waiting for other stages does not count
    if (e->marks) { ops_mark(e->stream, e->marks[2 * e->running]); }
    Work w = executor_work(e, a->unit, executor_micro(e, a), rows, pass->data->options.T);
    int storages[2], n = gpt_unit_storages(e->model, a->unit, storages);
    for (int i = 0; i < n; i++) {
        StorageClass c = gpt_storage_class(e->model, storages[i]);
        if (action_reads_parameters(a->kind) || storages[i] == e->map->kept_gathered) {
            w.states.params[c] = e->held[storages[i]];
        }
        if (action_contributes(e->map, a, storages[i])) {
            w.states.grads[c] = executor_capacity(e, a, storages[i], &w.states.accumulate[c]);
        }
    }
    if (a->kind == ACT_FORWARD && (a->unit == 0 || a->unit == e->model->units - 1)) {
        executor_load_samples(e, &w, pass, a->first_row);
    }
    if (a->kind == ACT_FORWARD && a->unit == units_first(&e->shape.units) && pass->training &&
        e->shape.clip.on) {
        executor_load_weights(e, &w, pass, a->first_row);
    }
    w.kind = a->kind;
    w.part = a->part;
    w.aux = pass->aux;
    w.z = pass->z;
    const bool block = a->unit > 0 && a->unit < e->model->units - 1,
               varies = unit_counts_rows(gpt_unit_spec(e->model, UNIT_BLOCK),
                                         a->kind == ACT_BACKWARD_WEIGHT ? -1 : a->part),
               repeated = block && !e->marks && !varies;
    if (!run_pieces(e, a, &w) && (!repeated || ops_repeat_begin(e->stream, &w, sizeof w))) {
        run_work(e, &w, pass);
        if (repeated) { ops_repeat_end(e->stream); }
    }
    if (pass->counts && e->loads.experts && block && a->kind == ACT_FORWARD && a->part == 0) {
        const UnitCall c = executor_call(e, &w);
        if (e->model->arch->exchanges) { ops_wait(e->stream); } // else the pass has waited
        expert_loads_count(&e->loads, &c, w.unit);
    }
    if (!executor_gives_losses(e, a, pass)) { return; }
    if (!pass->training) {
        const UnitCall c = executor_call(e, &w);
        unit_losses(&c, !e->clips || e->shape.clip.recomputes_logits ? NULL : e->clip[0].dlogits);
    }
    ops_to_host_later(e->stream, e->host_losses + executor_host_place(e, a->first_row, pass),
                      head_losses(e->model, &w.acts->unit[w.unit]), w.N * sizeof(float));
    if (pass->sample_right) { executor_judge_labels(e, &w, pass, a->first_row); }
}

// Returns the bytes of one sample in a message: activations for the next stage,
// gradients for the stage before, a norm (from the head, where the table is tied, with rows of its
// gradient), or a clipping factor.
static inline int64_t executor_row_bytes(const ExecutorShape *shape, const GptModel *m,
                                         const Action *a) {
    const int64_t elements = shape->T * gpt_width(m);
    switch (a->kind) {
    case ACT_SEND_FORWARD:
    case ACT_RECV_FORWARD:
    case ACT_SEND_BACKWARD:
    case ACT_RECV_BACKWARD: return elements * (int64_t)dtype_size(shape->dtype);
    case ACT_SEND_NORM:
    case ACT_RECV_NORM:
        return (int64_t)sizeof(double) +
               (a->unit == m->units - 1 && clip_ties(&shape->clip) ? elements * sizeof(float) : 0);
    default: return sizeof(float);
    }
}
// Returns the bytes of a message action, which a step sends once.
static inline int64_t executor_message_bytes(const ExecutorShape *shape, const GptModel *m,
                                             const Action *a) {
    if (action_of_rows(a->kind)) { return a->rows * executor_row_bytes(shape, m, a); }
    if (a->storage < 0) { return sizeof(StepStats); }
    // other messages of storages are gradients
    const bool parameters = a->kind == ACT_SEND_PARAMETERS || a->kind == ACT_RECV_PARAMETERS;
    return gpt_storage_elements(m, a->storage) *
           (parameters ? dtype_size(shape->dtype) : sizeof(float));
}
// Returns which messages this rank will send and receive in programs a and b, and in
// executor_logits, where the first ranks of stages exchange messages. turns: later programs may
// connect this rank with every rank of the neighbouring stages. The caller frees peers.
static inline CommTraffic executor_traffic(const GptModel *m, const ExecutorShape *shape,
                                           const Placement *placement, int rank, const Program *a,
                                           const Program *b, bool turns) {
    const bool crosses = clip_crosses(&shape->clip);
    const int64_t word = clip_ties(&shape->clip) ? sizeof(float) : dtype_size(shape->dtype);
    const size_t row_bytes = shape->T * gpt_width(m) * word;
    if (placement->stages > 1 && row_bytes * shape->rows > INT_MAX) {
        die(EXIT_INPUT, "choose a smaller --micro-batch",
            "a micro-batch of %zu bytes between stages: 2 GiB are too much",
            row_bytes * shape->rows);
    }
    const int mine = placement_stage_of_rank(placement, rank);
    CommTraffic traffic = {placement->stages > 1 ? row_bytes : 0, 0,
                           new_array(int, a->ranks, "peers"), 0};
    bool *talks = new_array(bool, a->ranks, "peers");
    int sides[2] = {0, 0};
    for (int r = 0; r < a->ranks; r++) {
        const int s = placement_stage_of_rank(placement, r);
        const bool lead =
                       placement->stage[mine].ranks[0] == rank && placement->stage[s].ranks[0] == r,
                   next = s == mine - 1 || s == mine + 1;
        // samples, or micro-batches, may go to any rank of the next stage, and norms to the first
        talks[r] = next ? lead || crosses || turns : crosses && s != mine && (s == 0 || mine == 0);
    }
    if (crosses) { traffic.bytes = row_bytes * shape->rows; }
    for (int p = 0; p < 2; p++) {
        const Schedule *schedule = &(p ? b : a)->rank[rank];
        for (int i = 0; i < schedule->count; i++) {
            const Action *action = &schedule->actions[i];
            if (!action_is_message(action->kind)) { continue; }
            talks[action->peer] = true;
            traffic.bytes = max_i64(traffic.bytes, executor_message_bytes(shape, m, action));
        }
    }
    for (int r = 0; r < a->ranks; r++) {
        if (talks[r]) {
            traffic.peers[traffic.count++] = r;
            sides[placement_stage_of_rank(placement, r) > mine]++;
        }
    }
    free(talks);
    // at most the peers on one side fill, or receive, one buffer
    traffic.most =
        (shape->units.stages * (shape->limits.inputs + shape->limits.gradients + 2 * SEND_BUFFERS) +
         3 * shape->limits.clips) *
        max_i64(sides[0], sides[1]);
    return traffic;
}

// Posts a message of an action's rows, in a buffer that begins with the micro-batch's first row.
static inline void post_rows(Executor *e, const Action *a, const Pass *pass, const char *what,
                             void *buffer, int64_t row_bytes) {
    const CommLabel label = {what, a->unit, e->step};
    char *p = (char *)buffer + (a->first_row - e->first_rows[a->micro]) * row_bytes;
    transfer_open(e, a, pass->training,
                  comm_message_begin(e->comm, label, action_sends(a->kind), a->peer, 0, p,
                                     executor_rows(a, pass) * row_bytes),
                  NULL);
}
// Posts the messages of an action: output of the unit to the next stage, gradient of its input to
// the stage before, norms (with rows of the classifier's gradient), or clipping factors.
static inline void run_message(Executor *e, const Action *a, const Pass *pass) {
    const int64_t row_bytes = executor_row_bytes(&e->shape, e->model, a),
                  micro = executor_micro(e, a);
    const Crossing *crossing = &e->clip[executor_clip_place(e, micro)].crossing;
    if (executor_rows(a, pass) <= 0) { return; }
    executor_await(e, a, pass->training);
    const bool norm = a->kind == ACT_SEND_NORM || a->kind == ACT_RECV_NORM,
               forward = a->kind == ACT_SEND_FORWARD || a->kind == ACT_RECV_FORWARD;
    if (norm) {
        // each sender has its own part of the receiver's buffer
        const bool apart = a->kind == ACT_RECV_NORM && clip_crosses_all(&e->shape.clip);
        double *norms =
            crossing->others + (apart ? (e->map->stage[a->unit] - 1) * e->shape.rows : 0);
        post_rows(e, a, pass, "norms", norms, sizeof(double));
        if (row_bytes > (int64_t)sizeof(double)) {
            post_rows(e, a, pass, "norms", crossing->tied, row_bytes - (int64_t)sizeof(double));
        }
    } else if (a->kind == ACT_SEND_FACTOR || a->kind == ACT_RECV_FACTOR) {
        post_rows(e, a, pass, "factors", crossing->factors, row_bytes);
    } else {
        post_rows(e, a, pass, forward ? "activations" : "gradients",
                  forward ? executor_boundary_transit(e, a->unit + 1, micro)
                          : executor_gradient_transit(e, a->unit, micro),
                  row_bytes);
    }
}

#endif
