// dp.h: differential privacy inside the backward pass. The gradient of each sample is measured and
// scaled to a bounded norm before it is added. The owner of each element adds noise to the sum
// (zero.h); privacy.h states what this guarantees. (Data parallelism is in zero.h.)
//
// With C_i = clip(norm of sample i's gradient g_i), a step's sum is  sum_i C_i g_i.  No g_i of the
// whole model is ever in memory. There is one backward pass (book-keeping, arXiv 2210.00038). The
// input part of a unit runs as usual, since C_i scales the rows of sample i alone. The weight part
// waits until C_i is known, and then multiplies the rows of sample i by C_i.
// Styles
//   unit   Every unit is a group with the threshold R / sqrt(L + 2). C_i is known at once
//          (layer-wise, arXiv 2311.11822).
//   flat   All units form one group with the threshold R. The weight parts wait for the backward
//          pass of the embedding (schedule.h: CLIP). Until then each output gradient is kept in
//          dead activations of the next unit (activations.h).
//   stage  The units of each of S pipeline stages form a group with the threshold R / sqrt(S). wte
//          and wpe belong to the first stage.
// Groups of style unit: {wte with both its uses, wpe} | each block | {lnf}
// Norms of a unit are computed in the cheaper of two ways:
//   ghost          From products of rows (ops_matmul_sample_norms); small tensors from each
//                  sample's sums, which are kept. ONE product then adds all samples, each times its
//                  factor.
//   instantiated   A sample's gradient is computed in scratch memory, measured, and added times
//                  C_i. This takes no more products than a run without privacy.
// Tied table  wte is both the token table and the classifier. Its gradient is E_i + H_i. A norm
//             that left out one of them, or 2<E_i, H_i>, would be too small by a factor of up to
//             sqrt(2). The head computes H_i; the embedding computes E_i, at the very end. In
//             between, either dlogits (ghost) or H_i itself (instantiated) are kept. Where memory
//             is too small for either, the logits are computed again at the embedding, a few
//             samples at a time. wte stays acquired until then, so this sends no message.
//             A classifier with a table of its own belongs to the head's group, and H_i is its
//             gradient: measured, and added, by the head's weight part.
// Pipelines   E_i is computed on the first stage and H_i on the last. The last stage sends |H_i|^2
//             and, for each position t, the row of H_i for t's token (tied). The sum of these
//             rows' products with the rows that make up E_i is <E_i, H_i>. The first stage computes
//             the norm and the factors, and sends the factors back (schedule.h: TIED). In style
//             flat, each stage sends the norm of all its units and receives factors. A classifier
//             with a table of its own has no product with E_i: |H_i|^2 is one of these norms.
// Weights     The backward pass weights the loss of every token by 1 / T. A sample with n_i targets
//             is then weighted by T / n_i: its loss is the mean over its own tokens, whatever else
//             is in the batch.
// Not finite  A sample whose norm is not finite is left out. This depends on the sample alone.
#ifndef DP_H
#define DP_H

#include "base/base.h"
#include "comm/group.h"
#include "model/architecture.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "ops/ops.h"

// Which gradients of a sample are clipped together by one norm. Where the first and the last
// stage of a pipeline both use wte, some norm needs parts from several stages; so does the norm of
// all units. NORM sends the first stage what another stage knows of it. CLIP makes the sample's
// factor from all parts. FACTOR sends it to the other stages, where everything that is scaled by it
// waits. With groups inside stages only TIED waits: the classifier's part of wte.
typedef enum {
    CLIPS_NOTHING,
    CLIPS_UNITS,  // one norm for each unit
    CLIPS_STAGES, // one norm for each stage; its weight parts follow its CLIP
    CLIPS_ALL     // one norm for all units; all weight parts follow FACTOR
} Clips;

// How gradients are clipped.
typedef struct {
    bool on, flat; // flat: all units of a rank share one norm (styles flat and stage)
    Clips clips;   // groups that share a norm
    bool tied;     // wte is the classifier's table, too
    int stages;    // pipeline stages; with several, the groups of clip_crosses() cross them
    bool recomputes_logits; // logits are computed again for the gradient of wte
    bool overwrites;        // each micro-step's gradients start from zero, and add to no other's
    bool overlaps;          // the head processes other samples before the embedding gets these
    float threshold;        // of the norm of a group
    ClipFunction function;
} ClipPolicy;

// R: bound of the norm of a whole gradient. Each of n groups gets the threshold R / sqrt(n).
static inline ClipPolicy clip_policy(const GptModel *m, double R, Clips clips, int stages,
                                     ClipFunction function) {
    const double groups = clips == CLIPS_UNITS ? m->units : clips == CLIPS_STAGES ? stages : 1;
    const ClipPolicy p = {.on = true,
                          .flat = clips != CLIPS_UNITS,
                          .clips = clips,
                          .tied = gpt_is_tied(m),
                          .stages = stages,
                          .threshold = (float)(R / sqrt(groups)),
                          .function = function};
    return p;
}
// Return whether a tied wte is on two stages; whether one group crosses all stages; whether any
// group crosses stages.
static inline bool clip_ties(const ClipPolicy *p) { return p->on && p->tied && p->stages > 1; }
static inline bool clip_crosses_all(const ClipPolicy *p) {
    return p->on && p->clips == CLIPS_ALL && p->stages > 1;
}
static inline bool clip_crosses(const ClipPolicy *p) { return clip_ties(p) || clip_crosses_all(p); }

// -------------------------------------------------------------------------------------------------
// Choice between the ways: compares the bytes that instantiating moves (gradients are written,
// read, added) with the multiplications of ghost norms

// multiplications in the time of one byte, with the low efficiency of small products
// (docs/results/dpzero.md)
enum { GHOST_RATIO = 50 };
// For the product of (T, d) and (T, p) rows of a sample; both: d + p, elements: d p. Compares
// T^2 (d + p) multiplications with d p elements.
static inline bool clip_prefers_ghost(int64_t T, double both, double elements) {
    return T * (double)T * both <= GHOST_RATIO * elements;
}
// Sums these of all linear layers of a block.
typedef struct {
    double both, elements;
} ClipProducts;
static inline ClipProducts clip_products(const GptModel *m) {
    const UnitSpec *spec = gpt_unit_spec(m, UNIT_BLOCK);
    ClipProducts all = {};
    for (int i = 0; i < spec->op_count; i++) {
        const OpNode *n = &spec->ops[i];
        if (op_kinds[n->kind].flops != linear_flops) { continue; }
        const double in = gpt_dim(m, spec->values[n->in[0]].width),
                     out = gpt_dim(m, spec->values[n->out[0]].width);
        all.both += in + out;
        all.elements += in * out;
    }
    return all;
}
static inline bool clip_instantiates_block(const ClipPolicy *p, const GptModel *m, int64_t T) {
    const ClipProducts all = clip_products(m);
    return !p->flat && !clip_prefers_ghost(T, all.both, all.elements);
}
// In a large model the head is a small part of the work. Then the way with less memory is chosen:
// the gradients of logits, where T < C.
static inline bool clip_instantiates_head(const GptModel *m, int64_t T) {
    const double C = gpt_width(m), V = m->config.padded_vocab, t = T;
    const bool hardly_counts =
        T < gpt_width(m) && t * t * (C + V) < 0.005 * gpt_step_flops(m, t, t);
    return !hardly_counts && !clip_prefers_ghost(T, C + V, C * V);
}

// Returns the flops of the norms of a unit for `rows` samples, in addition to a step without
// privacy.
static inline double clip_norm_flops(const ClipPolicy *p, const GptModel *m, int unit, double rows,
                                     double T) {
    const double C = gpt_width(m), V = m->config.padded_vocab;
    const bool table = unit == (p->tied ? 0 : m->units - 1); // of the classifier
    if (!p->on) { return 0; }
    if (table) { return clip_instantiates_head(m, T) ? 0 : rows * T * T * (C + V); }
    if (gpt_unit_class(m, unit) != UNIT_BLOCK) { return 0; }
    return clip_instantiates_block(p, m, T) ? 0 : rows * T * T * clip_products(m).both;
}
// Returns the number of samples whose gradient of wte is in memory at a time: all of a micro-batch,
// or a few where logits are computed again.
enum { AGAIN_ROWS = 256 }; // tokens of these few samples, if sequences are shorter
static inline int64_t clip_head_samples(const ClipPolicy *p, const GptModel *m, int64_t rows,
                                        int64_t T) {
    return !p->recomputes_logits          ? rows
           : clip_instantiates_head(m, T) ? 1
                                          : min_i64(rows, max_i64(1, AGAIN_ROWS / T));
}
// Returns the largest possible ratio of the speed with these norms to the speed without privacy.
static inline double clip_speed_limit(const ClipPolicy *p, const GptModel *m, double T) {
    double norms = 0;
    for (int u = 0; u < m->units; u++) { norms += clip_norm_flops(p, m, u, 1, T); }
    if (p->recomputes_logits) { norms += gpt_forward_flops(m, UNIT_HEAD, T, T); }
    return 1 / (1 + norms / gpt_step_flops(m, T, T));
}

// -------------------------------------------------------------------------------------------------
// Memory

// Values that cross stages. others: on the first stage the norms received, [senders][most];
// elsewhere the norms that this rank sends. If groups end with their stages, the last stage sends
// only |H|^2.
typedef struct {
    double *others; // squared norms
    float *tied;    // [rows T][C] rows of H, on the last and the first stage; NULL: wte is not tied
    float *factors; // [rows]
} Crossing;

// State of a micro-batch. Where groups cross stages, several micro-batches are under way. Each then
// has its own copy of what is marked (c), and, if one group crosses all stages, of what is marked
// (a). All else is scratch memory that they share.
typedef struct {
    ClipPolicy policy;
    double *norms; // (a) [rows] squared, of the current group
    // [rows] weights: T / n_i, stored with the micro-batch's activations; factors: (c) where they
    // cross stages
    float *weights, *factors;
    UnitSums *sums; // (a) [units]; in style unit all blocks share one's memory
    Real *dlogits;  // (c) [rows T][Vp], or NULL
    float *head;    // (c) [rows][Vp][C]: H_i, then E_i + H_i, or NULL
    // (c) [rows T][C] the classifier's inputs where dlogits outlive the head's activations, or NULL
    Real *lnf;
    int64_t head_samples; // samples in dlogits or head: rows, or fewer if logits are computed again
    float *sample;        // one sample's gradient of a block, or of wpe
    Crossing crossing;
    int64_t senders, most; // stages that send norms to this rank; limit of a micro-batch's rows
} Clip;

// Returns the elements of the table of positions.
static inline int64_t clip_positions(const GptModel *m) {
    const int tensor = unit_op(gpt_unit_spec(m, UNIT_EMBEDDING), OP_EMBEDDING)->params[1];
    return tensor == NO_TENSOR ? 0 : m->tensor_elements[tensor];
}
// Reserves what stays in memory from the head to the embedding.
static inline void clip_carve_activations(Clip *c, Arena *a, const GptModel *m, int64_t rows,
                                          int64_t T) {
    int64_t Vp = m->config.padded_vocab;
    bool whole = clip_instantiates_head(m, T);
    c->head_samples = clip_head_samples(&c->policy, m, rows, T);
    c->head = whole ? arena_floats(a, c->head_samples * Vp * gpt_width(m)) : NULL;
    c->dlogits = whole ? NULL : arena_reals(a, c->head_samples * T * Vp);
    c->lnf = whole || !(clip_ties(&c->policy) || c->policy.overlaps)
                 ? NULL
                 : arena_reals(a, rows * T * gpt_width(m));
}
// Reserves each sample's gradients of a unit's vectors.
static inline UnitSums clip_carve_sums(Arena *a, const GptModel *m, UnitClass c, int64_t rows) {
    UnitSums s = {};
    for (int t = 0; t < m->arch->tensor_count; t++) {
        const TensorSpec *spec = &m->arch->tensors[t];
        if (spec->storage == gpt_unit_spec(m, c)->storages[0] && !spec->rows.times) {
            s.tensor[t] = arena_floats(a, rows * m->tensor_elements[t]);
        }
    }
    return s;
}
// Reserves each sample's sums, norms and factors.
static inline void clip_carve_samples(Clip *c, Arena *a, const GptModel *m, const RankUnits *units,
                                      int64_t rows) {
    const int head = m->units - 1;
    int any = 0;
    c->norms = (double *)arena_take(a, (size_t)rows * sizeof(double));
    c->factors = arena_floats(a, rows);
    if (units_have(units, head)) { c->sums[head] = clip_carve_sums(a, m, UNIT_HEAD, rows); }
    for (int u = 1; u < head; u++) {
        if (!units_have(units, u)) { continue; }
        c->sums[u] =
            !any || c->policy.flat ? clip_carve_sums(a, m, UNIT_BLOCK, rows) : c->sums[any];
        any = u;
    }
}
// Reserves what crosses stages.
static inline void clip_carve_crossing(Clip *c, Arena *a, const GptModel *m, const RankUnits *units,
                                       int64_t rows, int64_t T) {
    const bool first = units_have(units, 0), all = clip_crosses_all(&c->policy),
               ties = clip_ties(&c->policy) && (first || units_have(units, m->units - 1));
    c->senders = first ? (all ? c->policy.stages - 1 : 1) : 0;
    c->crossing.others =
        first || !all ? (double *)arena_take(a, (max_i64(c->senders, 1) * rows) * sizeof(double))
                      : c->norms;
    c->crossing.tied = ties ? arena_floats(a, rows * T * gpt_width(m)) : NULL;
    c->crossing.factors = arena_floats(a, rows);
    // the rank's only group crosses stages
    if (all || (first && c->policy.flat)) { c->factors = c->crossing.factors; }
}
// of: the micro-batch whose scratch memory this one shares; NULL for the first one.
static inline void clip_carve_buffers(Clip *c, const Clip *of, Arena *a, const GptModel *m,
                                      const RankUnits *units, int64_t rows, int64_t T) {
    const bool blocks = clip_instantiates_block(&c->policy, m, T);
    int64_t sample =
        blocks && (rows > 1 || !c->policy.overwrites) ? m->class_elements[STORAGE_BLOCK] : 0;
    if (!of && clip_instantiates_head(m, T) && !clip_crosses(&c->policy)) {
        sample = max_i64(sample, clip_positions(m));
    }
    c->most = rows;
    c->sample = of ? of->sample : arena_floats(a, sample);
    if (!of || clip_crosses_all(&c->policy)) {
        clip_carve_samples(c, a, m, units, rows);
    } else {
        c->norms = of->norms;
        c->factors = of->factors;
        memcpy(c->sums, of->sums, m->units * sizeof(UnitSums));
    }
    if (clip_crosses(&c->policy)) { clip_carve_crossing(c, a, m, units, rows, T); }
}

// -------------------------------------------------------------------------------------------------
// Groups: each unit adds its squared norms to norms[rows]; factors follow when a group is complete

static inline void clip_begin(Stream *s, const Clip *c, int64_t rows) {
    ops_zero(s, c->norms, (size_t)rows * sizeof(double));
}
static inline void clip_factors(Stream *s, const Clip *c, int64_t rows) {
    ops_clip_factors(s, c->factors, c->norms, c->weights, rows, c->policy.threshold,
                     c->policy.function);
}

// Points a call at what its unit's parts of samples need.
static inline UnitCall clip_call(const UnitCall *c, const Clip *clip, int unit) {
    UnitCall of = *c;
    of.norms = clip->norms;
    of.factors = clip->factors;
    of.sums = &clip->sums[unit];
    return of;
}

// Computes norms, factors and the sum of a block, sample by sample. If the sum begins here, its
// first sample is computed in place.
static inline void clip_block_instantiated(const UnitCall *c, const Clip *clip) {
    Stream *s = c->stream;
    const UnitStates *u = c->states;
    const int64_t elements = c->model->class_elements[STORAGE_BLOCK];
    UnitStates alone = {};
    UnitCall sample = *c;
    sample.states = &alone;
    sample.rows = 1;
    clip_begin(s, clip, c->rows);
    for (int64_t b = 0; b < c->rows; b++) {
        const bool more = u->accumulate[STORAGE_BLOCK] || b;
        float *grad = alone.grads[STORAGE_BLOCK] = more ? clip->sample : u->grads[STORAGE_BLOCK];
        sample.buffers = unit_buffers_from(c, b * c->T);
        unit_pass(&sample, PART_BACKWARD_WEIGHT);
        ops_sample_norms(s, clip->norms + b, grad, 1, elements);
        ops_clip_factors(s, clip->factors + b, clip->norms + b, clip->weights + b, 1,
                         clip->policy.threshold, clip->policy.function);
        ops_accumulate_samples(s, u->grads[STORAGE_BLOCK], grad, clip->factors + b, 1, elements,
                               more);
    }
}

// -------------------------------------------------------------------------------------------------
// Head: its layernorm is a group; the gradient of the classifier's table waits for the embedding

// Returns what the classifier makes for clipping, without its input's gradient: each sample's
// gradient of the table, or the gradients of logits. The loss of each token has the weight 1 / T.
static inline ClassifierResults clip_results(const Clip *clip, int64_t T) {
    const ClassifierResults results = {
        .dweight = clip->head, .dlogits = clip->dlogits, .each = T, .scale = 1.0f / (float)T};
    return results;
}
// Computes losses, the input's gradient, and what clipping needs for the table. If logits are
// computed again later, nothing is kept for the table.
static inline void clip_head_backward_input(const UnitCall *c, const Clip *clip) {
    UnitCall head = *c;
    head.classifier = clip_results(clip, c->T);
    if (clip->policy.recomputes_logits) {
        head.classifier.dweight = NULL;
        head.classifier.dlogits = NULL;
    }
    unit_pass(&head, PART_BACKWARD_INPUT);
    if (clip->lnf) {
        ops_copy(c->stream, clip->lnf, head_classified(c->model, &c->buffers),
                 c->rows * c->T * gpt_width(c->model) * ops_real_bytes());
    }
}

// Prepares what the first stage needs of the classifier's gradient of the table: |H|^2 and the tied
// rows. The rest stays here until the factors arrive.
static inline void clip_head_prepare(const UnitCall *c, const Clip *clip) {
    const int64_t C = gpt_width(c->model), Vp = c->model->config.padded_vocab;
    const Crossing *x = &clip->crossing;
    const Real *classified = head_classified(c->model, &c->buffers);
    ops_zero(c->stream, x->others, c->rows * sizeof(double));
    if (clip->head) {
        ops_sample_norms(c->stream, x->others, clip->head, c->rows, Vp * C);
        ops_token_rows(c->stream, x->tied, c->tokens, clip->head, c->rows, c->T, C, Vp);
        return;
    }
    ops_matmul_sample_norms(c->stream, x->others, clip->dlogits, classified, c->rows, c->T, C, Vp);
    ops_tied_rows(c->stream, x->tied, c->tokens, clip->dlogits, classified, c->rows, c->T, C, Vp);
}
// Adds H of all samples, times their factors. classified: the classifier's inputs. Overwrites these
// and dlogits.
static inline void clip_classifier_sum(const UnitCall *c, const Clip *clip, const float *factors,
                                       Real *classified) {
    const int64_t C = gpt_width(c->model), Vp = c->model->config.padded_vocab;
    const int table = gpt_classifier(c->model)->params[0];
    float *grad = unit_grad(c->model, c->states, table);
    const bool more = c->states->accumulate[tensor_class(c->model, table)];
    if (clip->head) {
        ops_accumulate_samples(c->stream, grad, clip->head, factors, c->rows, Vp * C, more);
    } else {
        ops_matmul_backward_weight_samples(c->stream, grad, clip->dlogits, classified, factors,
                                           c->rows, c->T, C, Vp, more);
    }
}

// Adds each sample's squared norm of the classifier's table. It keeps the buffers of the head.
static inline void clip_classifier_norms(const UnitCall *c, const Clip *clip,
                                         const Real *classified) {
    const int64_t C = gpt_width(c->model), Vp = c->model->config.padded_vocab;
    if (clip->head) {
        ops_sample_norms(c->stream, clip->norms, clip->head, c->rows, Vp * C);
    } else {
        ops_matmul_sample_norms(c->stream, clip->norms, clip->dlogits, classified, c->rows, c->T, C,
                                Vp);
    }
}
// The two parts of the head: norms; the sum, which overwrites the head's activations where the
// classifier has a table of its own.
static inline void clip_head_norms(const UnitCall *c, const Clip *clip) {
    unit_pass(c, PART_SAMPLE_NORMS);
    if (clip->policy.tied) { return; }
    clip_classifier_norms(c, clip, head_classified(c->model, &c->buffers));
}
static inline void clip_head_sum(const UnitCall *c, const Clip *clip) {
    unit_pass(c, PART_SAMPLE_SUM);
    if (clip->policy.tied) { return; }
    clip_classifier_sum(c, clip, clip->factors, head_classified(c->model, &c->buffers));
}

// -------------------------------------------------------------------------------------------------
// Embedding: the token table with both its uses, and the positions. All calls are of the
// embedding's unit; head: buffers of the head's.

// Returns the gradient of the embedding's rows.
static inline const Real *clip_embedded(const UnitCall *c) {
    return op_call(c, unit_op(c->unit, OP_EMBEDDING)).dout;
}
// Adds each sample's squared norms of E_i and of the positions.
static inline void clip_rows_norms(const UnitCall *c, const Clip *clip) {
    ops_embedding_sample_norms(c->stream, clip->norms, clip_embedded(c), c->tokens,
                               clip_positions(c->model) > 0, c->rows, c->T, gpt_width(c->model),
                               c->model->config.padded_vocab);
}
// Returns the classifier's inputs.
static inline Real *clip_classified(const UnitCall *c, const Clip *clip, const UnitBuffers *head) {
    return clip->lnf ? clip->lnf : head_classified(c->model, head);
}
static inline void clip_embedding_norms(const UnitCall *c, const Clip *clip,
                                        const UnitBuffers *head) {
    Stream *s = c->stream;
    const int64_t C = gpt_width(c->model), Vp = c->model->config.padded_vocab, T = c->T;
    if (!clip->policy.tied) {
        clip_rows_norms(c, clip);
        return;
    }
    const bool positions = clip_positions(c->model) > 0;
    const Real *dout = clip_embedded(c), *classified = clip_classified(c, clip, head);
    if (!clip->head) {
        clip_classifier_norms(c, clip, classified);
        clip_rows_norms(c, clip);
        ops_tied_sample_norms(s, clip->norms, dout, c->tokens, clip->dlogits, classified, c->rows,
                              T, C, Vp);
        return;
    }
    for (int64_t b = 0; b < c->rows; b++) {
        float *table = clip->head + b * Vp * C;
        ops_embedding_backward(s, table, positions ? clip->sample : NULL,
                               real_at_const(dout, b * T * C), c->tokens + b * T, NULL, 1, T, C, Vp,
                               c->model->config.max_seq_len, true, false);
        ops_sample_norms(s, clip->norms + b, table, 1, Vp * C);
        if (positions) { ops_sample_norms(s, clip->norms + b, clip->sample, 1, T * C); }
    }
}
// Completes the norm of the group that crosses stages, and its factors. On this stage only the
// embedding's norm is missing; the other stages have sent theirs.
static inline void clip_crossing_norms(const UnitCall *c, const Clip *clip) {
    clip_rows_norms(c, clip);
    ops_crossing_norms(c->stream, clip->norms, clip->crossing.others, clip->senders, clip->most,
                       clip_embedded(c), clip->crossing.tied, c->rows, c->T, gpt_width(c->model));
    ops_clip_factors(c->stream, clip->crossing.factors, clip->norms, clip->weights, c->rows,
                     clip->policy.threshold, clip->policy.function);
}
// Adds the gradients of the token table and the positions, times the factors, which must have been
// made. Overwrites the head's activations, unless the classifier is on another stage or has a table
// of its own.
static inline void clip_embedding_sum(const UnitCall *c, const Clip *clip,
                                      const UnitBuffers *head) {
    const OpNode *n = unit_op(c->unit, OP_EMBEDDING);
    const StorageClass table = tensor_class(c->model, n->params[0]);
    if (!clip->policy.tied || clip_crosses(&clip->policy)) {
        embedding_backward(c, n,
                           clip_crosses(&clip->policy) ? clip->crossing.factors : clip->factors);
        return;
    }
    UnitStates states = *c->states;
    UnitCall rest = *c;
    clip_classifier_sum(c, clip, clip->factors, clip_classified(c, clip, head));
    rest.states = &states;
    states.accumulate[table] = true;
    if (clip->head) { states.grads[table] = NULL; } // H_i included E_i
    embedding_backward(&rest, n, clip->factors);
}
// Returns the call for n samples from b on, and their part of the head's buffers.
static inline UnitCall clip_few(const UnitCall *c, int64_t b, int64_t n) {
    UnitCall few = *c;
    few.buffers = unit_buffers_from(c, b * c->T);
    few.tokens += b * c->T;
    few.targets += b * c->T;
    few.rows = n;
    return few;
}
// Norms, factors and sum of the embedding's group, where logits are computed again: a few samples
// at a time. The call has the parameters and targets, too.
static inline void clip_embedding_again(const UnitCall *c, const Clip *clip,
                                        const UnitBuffers *head) {
    UnitStates states = *c->states;
    UnitCall classifier = *c;
    classifier.unit = gpt_unit_spec(c->model, UNIT_HEAD);
    classifier.buffers = *head;
    for (int64_t b = 0, count; b < c->rows; b += count) {
        count = min_i64(clip->head_samples, c->rows - b);
        Clip few = *clip;
        UnitCall samples = clip_few(c, b, count), logits = clip_few(&classifier, b, count);
        few.weights += b;
        few.factors += b;
        few.norms += b;
        samples.states = &states;
        for (int i = 0; b && i < 2; i++) { states.accumulate[c->unit->storages[i]] = true; }
        classifier_run(&logits, gpt_classifier(c->model), clip_results(clip, c->T), NULL);
        clip_begin(c->stream, &few, count);
        clip_embedding_norms(&samples, &few, &logits.buffers);
        clip_factors(c->stream, &few, count);
        clip_embedding_sum(&samples, &few, &logits.buffers);
    }
}

#endif
