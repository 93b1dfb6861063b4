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
// Pipelines   E_i is computed on the first stage and H_i on the last. The last stage sends |H_i|^2
//             and, for each position t, the row of H_i for t's token (tied). The sum of these
//             rows' products with the rows that make up E_i is <E_i, H_i>. The first stage computes
//             the norm and the factors, and sends the factors back (schedule.h: TIED). In style
//             flat, each stage sends the norm of all its units and receives factors.
// Weights     The backward pass weights the loss of every token by 1 / T. A sample with n_i targets
//             is then weighted by T / n_i: its loss is the mean over its own tokens, whatever else
//             is in the batch.
// Not finite  A sample whose norm is not finite is left out. This depends on the sample alone.
#ifndef DP_H
#define DP_H

#include "model/gpt.h"       // the units
#include "engine/schedule.h" // Clips

// How gradients are clipped.
typedef struct {
    bool on, flat;   // flat: all units of a rank share one norm (styles flat and stage)
    Clips clips;     // groups that share a norm
    int stages;      // pipeline stages; with several, the group with wte crosses them
    bool again;      // logits are computed again for the gradient of wte
    bool fresh;      // each micro-step's gradients start from zero, and add to no other's
    bool overlaps;   // the head processes other samples before the embedding gets these
    float threshold; // of the norm of a group
    ClipFunction function;
} ClipPolicy;

// R: bound of the norm of a whole gradient. Each of n groups gets the threshold R / sqrt(n).
static inline ClipPolicy clip_policy(const GptModel *m, double R, Clips clips, int stages,
                                     ClipFunction function) {
    const double groups = clips == CLIPS_UNITS ? m->units : clips == CLIPS_STAGES ? stages : 1;
    ClipPolicy p = {true,  clips != CLIPS_UNITS,      clips,   stages, false, false,
                    false, (float)(R / sqrt(groups)), function};
    return p;
}
// Returns whether the group with wte crosses stages; the second: whether one group crosses all.
static inline bool clip_crosses(const ClipPolicy *p) { return p->on && p->stages > 1; }
static inline bool clip_crosses_all(const ClipPolicy *p) {
    return clip_crosses(p) && p->clips == CLIPS_ALL;
}

// -------------------------------------------------------------------------------------------------
// Choice between the ways: compares the bytes that instantiating moves (gradients are written,
// read, added) with the multiplications of ghost norms

// multiplications in the time of one byte, with the low efficiency of small products
// (docs/results.md)
enum { GHOST_RATIO = 50 };
// For the product of (T, d) and (T, p) rows of a sample; both: d + p, elements: d p. Compares
// T^2 (d + p) multiplications with d p elements.
static inline bool clip_prefers_ghost(int64_t T, double both, double elements) {
    return (double)T * (double)T * both <= GHOST_RATIO * elements;
}
static inline bool clip_instantiates_block(const ClipPolicy *p, const GptModel *m, int64_t T) {
    double C = (double)m->config.channels;
    // qkv, attention projection, fc and fc projection together
    return !p->flat && !clip_prefers_ghost(T, 16 * C, 12 * C * C);
}
// In a large model the head is a small part of the work. Then the way with less memory is chosen:
// the gradients of logits, where T < C.
static inline bool clip_instantiates_head(const GptModel *m, int64_t T) {
    const double C = (double)m->config.channels, V = (double)m->config.padded_vocab, t = (double)T;
    const bool hardly_counts =
        T < m->config.channels && t * t * (C + V) < 0.005 * gpt_step_flops(m, t, t);
    return !hardly_counts && !clip_prefers_ghost(T, C + V, C * V);
}

// Returns the flops of the norms of a unit for `rows` samples, in addition to a step without
// privacy.
static inline double clip_norm_flops(const ClipPolicy *p, const GptModel *m, int unit, double rows,
                                     double T) {
    double C = (double)m->config.channels, V = (double)m->config.padded_vocab;
    if (!p->on || unit == m->units - 1) { return 0; }
    if (unit) { return clip_instantiates_block(p, m, (int64_t)T) ? 0 : rows * T * T * 16 * C; }
    return clip_instantiates_head(m, (int64_t)T) ? 0 : rows * T * T * (C + V);
}
// Returns the number of samples whose gradient of wte is in memory at a time: all of a micro-batch,
// or a few where logits are computed again.
enum { AGAIN_ROWS = 256 }; // tokens of these few samples, if sequences are shorter
static inline int64_t clip_head_samples(const ClipPolicy *p, const GptModel *m, int64_t rows,
                                        int64_t T) {
    return !p->again                      ? rows
           : clip_instantiates_head(m, T) ? 1
                                          : min_i64(rows, max_i64(1, AGAIN_ROWS / T));
}
// Returns the largest possible ratio of the speed with these norms to the speed without privacy.
static inline double clip_speed_limit(const ClipPolicy *p, const GptModel *m, double T) {
    double norms = 0;
    for (int u = 0; u < m->units; u++) { norms += clip_norm_flops(p, m, u, 1, T); }
    if (p->again) { norms += gpt_head_forward_flops(m, T); }
    return 1 / (1 + norms / gpt_step_flops(m, T, T));
}

// -------------------------------------------------------------------------------------------------
// Memory

// The small tensors' gradients of a block, for each sample.
typedef struct {
    float *ln1w, *ln1b, *qkvb, *attprojb, *ln2w, *ln2b, *fcb, *fcprojb; // [rows][C, 3C or 4C]
} BlockSums;

// Values that cross stages. others: on the first stage the norms received, [senders][most];
// elsewhere the norms that this rank sends. If groups end with their stages, the last stage sends
// only |H|^2.
typedef struct {
    double *others; // squared norms
    float *tied;    // [rows T][C] rows of H, on the last and the first stage
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
    BlockSums *blocks;  // (a) [layers]; in style unit all blocks share one
    float *lnfw, *lnfb; // (a) [rows][C]
    Real *dlogits;      // (c) [rows T][Vp], or NULL
    float *head;        // (c) [rows][Vp][C]: H_i, then E_i + H_i, or NULL
    // (c) [rows T][C] the classifier's inputs where dlogits outlive the head's activations, or NULL
    Real *lnf;
    int64_t head_samples; // samples in dlogits or head: rows, or fewer if logits are computed again
    float *sample;        // one sample's gradient of a block, or of wpe
    Crossing crossing;
    int64_t senders, most; // stages that send norms to this rank; limit of a micro-batch's rows
} Clip;
// The units of a rank.
typedef struct {
    int first, end;
} ClipUnits;
static inline bool clip_has_block(ClipUnits u, int layer) {
    return layer + 1 >= u.first && layer + 1 < u.end;
}

// Reserves what stays in memory from the head to the embedding.
static inline void clip_carve_activations(Clip *c, Arena *a, const GptModel *m, int64_t rows,
                                          int64_t T) {
    int64_t Vp = m->config.padded_vocab;
    bool whole = clip_instantiates_head(m, T);
    c->head_samples = clip_head_samples(&c->policy, m, rows, T);
    c->head = whole ? arena_floats(a, c->head_samples * Vp * m->config.channels) : NULL;
    c->dlogits = whole ? NULL : arena_reals(a, c->head_samples * T * Vp);
    c->lnf = whole || !(clip_crosses(&c->policy) || c->policy.overlaps)
                 ? NULL
                 : arena_reals(a, rows * T * m->config.channels);
}
static inline BlockSums clip_carve_sums(Arena *a, int64_t n) { // n = rows * C
    BlockSums s;
    s.ln1w = arena_floats(a, n);
    s.ln1b = arena_floats(a, n);
    s.qkvb = arena_floats(a, 3 * n);
    s.attprojb = arena_floats(a, n);
    s.ln2w = arena_floats(a, n);
    s.ln2b = arena_floats(a, n);
    s.fcb = arena_floats(a, 4 * n);
    s.fcprojb = arena_floats(a, n);
    return s;
}
// Reserves each sample's sums, norms and factors.
static inline void clip_carve_samples(Clip *c, Arena *a, const GptModel *m, ClipUnits units,
                                      int64_t rows) {
    const int64_t n = rows * m->config.channels;
    int any = -1;
    c->norms = (double *)arena_take(a, (size_t)rows * sizeof(double));
    c->factors = arena_floats(a, rows);
    if (units.end == m->units) {
        c->lnfw = arena_floats(a, n);
        c->lnfb = arena_floats(a, n);
    }
    for (int l = 0; l < m->config.layers; l++) {
        if (!clip_has_block(units, l)) { continue; }
        c->blocks[l] = any < 0 || c->policy.flat ? clip_carve_sums(a, n) : c->blocks[any];
        any = l;
    }
}
// Reserves what crosses stages.
static inline void clip_carve_crossing(Clip *c, Arena *a, const GptModel *m, ClipUnits units,
                                       int64_t rows, int64_t T) {
    const bool first = units.first == 0, ends = first || units.end == m->units,
               all = clip_crosses_all(&c->policy);
    c->senders = first ? (all ? c->policy.stages - 1 : 1) : 0;
    c->crossing.others =
        first || !all
            ? (double *)arena_take(a, (size_t)(max_i64(c->senders, 1) * rows) * sizeof(double))
            : c->norms;
    c->crossing.tied = ends ? arena_floats(a, rows * T * m->config.channels) : NULL;
    c->crossing.factors = arena_floats(a, rows);
    // the rank's only group crosses stages
    if (all || (first && c->policy.flat)) { c->factors = c->crossing.factors; }
}
// of: the micro-batch whose scratch memory this one shares; NULL for the first one.
static inline void clip_carve_buffers(Clip *c, const Clip *of, Arena *a, const GptModel *m,
                                      ClipUnits units, int64_t rows, int64_t T) {
    const bool blocks = clip_instantiates_block(&c->policy, m, T);
    int64_t sample =
        blocks && (rows > 1 || !c->policy.fresh) ? m->class_elements[STORAGE_BLOCK] : 0;
    if (!of && clip_instantiates_head(m, T) && !clip_crosses(&c->policy)) {
        sample = max_i64(sample, m->class_elements[STORAGE_WPE]);
    }
    c->most = rows;
    c->sample = of ? of->sample : arena_floats(a, sample);
    if (!of || clip_crosses_all(&c->policy)) {
        clip_carve_samples(c, a, m, units, rows);
    } else {
        c->norms = of->norms;
        c->factors = of->factors;
        c->lnfw = of->lnfw;
        c->lnfb = of->lnfb;
        memcpy(c->blocks, of->blocks, (size_t)m->config.layers * sizeof(BlockSums));
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

// -------------------------------------------------------------------------------------------------
// Blocks

// Ghost norms of a block; keeps the small tensors' gradients of each sample in sums.
static inline void clip_block_norms(Stream *s, const GptModel *m, const Clip *c,
                                    const BlockSums *sums, const Real *dout, const Real *x,
                                    const BlockActs *a, const BlockGradients *g, int64_t rows,
                                    int64_t T) {
    const int64_t C = m->config.channels;
    ops_matmul_sample_norms(s, c->norms, dout, a->gelu, rows, T, 4 * C, C);
    ops_bias_samples(s, sums->fcprojb, c->norms, dout, rows, T, C);
    ops_matmul_sample_norms(s, c->norms, g->dfc, a->ln2, rows, T, C, 4 * C);
    ops_bias_samples(s, sums->fcb, c->norms, g->dfc, rows, T, 4 * C);
    ops_layernorm_samples(s, sums->ln2w, sums->ln2b, c->norms, g->dln2, a->res2, a->mean2, a->rstd2,
                          rows, T, C);
    ops_matmul_sample_norms(s, c->norms, g->dres2, a->att, rows, T, C, C);
    ops_bias_samples(s, sums->attprojb, c->norms, g->dres2, rows, T, C);
    ops_matmul_sample_norms(s, c->norms, g->dqkv, a->ln1, rows, T, C, 3 * C);
    ops_bias_samples(s, sums->qkvb, c->norms, g->dqkv, rows, T, 3 * C);
    ops_layernorm_samples(s, sums->ln1w, sums->ln1b, c->norms, g->dln1, x, a->mean1, a->rstd1, rows,
                          T, C);
}

static inline void clip_weight_sum(Stream *s, const GptModel *m, const Clip *c, const UnitStates *u,
                                   TensorId tensor, Real *dout, Real *in, int64_t rows, int64_t T,
                                   int64_t in_channels, int64_t out_channels) {
    ops_matmul_backward_weight_samples(s, unit_grad(m, u, tensor), dout, in, c->factors, rows, T,
                                       in_channels, out_channels, u->accumulate[STORAGE_BLOCK]);
}
static inline void clip_small_sum(Stream *s, const GptModel *m, const Clip *c, const UnitStates *u,
                                  TensorId tensor, const float *samples, int64_t rows) {
    ops_accumulate_samples(s, unit_grad(m, u, tensor), samples, c->factors, rows,
                           m->tensor_elements[tensor], u->accumulate[tensor_specs[tensor].storage]);
}
// Adds the block's gradients, times the factors. Requires clip_factors(). Overwrites dout,
// activations and g.
static inline void clip_block_sum(Stream *s, const GptModel *m, const Clip *c, const UnitStates *u,
                                  const BlockSums *sums, Real *dout, const BlockActs *a,
                                  const BlockGradients *g, int64_t rows, int64_t T) {
    const int64_t C = m->config.channels;
    clip_weight_sum(s, m, c, u, FCPROJW, dout, a->gelu, rows, T, 4 * C, C);
    clip_weight_sum(s, m, c, u, FCW, g->dfc, a->ln2, rows, T, C, 4 * C);
    clip_weight_sum(s, m, c, u, ATTPROJW, g->dres2, a->att, rows, T, C, C);
    clip_weight_sum(s, m, c, u, QKVW, g->dqkv, a->ln1, rows, T, C, 3 * C);
    clip_small_sum(s, m, c, u, FCPROJB, sums->fcprojb, rows);
    clip_small_sum(s, m, c, u, FCB, sums->fcb, rows);
    clip_small_sum(s, m, c, u, LN2W, sums->ln2w, rows);
    clip_small_sum(s, m, c, u, LN2B, sums->ln2b, rows);
    clip_small_sum(s, m, c, u, ATTPROJB, sums->attprojb, rows);
    clip_small_sum(s, m, c, u, QKVB, sums->qkvb, rows);
    clip_small_sum(s, m, c, u, LN1W, sums->ln1w, rows);
    clip_small_sum(s, m, c, u, LN1B, sums->ln1b, rows);
}

// Returns the activations of the rows from `row` on.
static inline BlockActs block_acts_from(const BlockActs *a, int64_t row, int64_t C) {
    BlockActs b = *a; // qkv, fc and lse serve the input part only
    b.ln1 = real_at(a->ln1, row * C);
    b.att = real_at(a->att, row * C);
    b.res2 = real_at(a->res2, row * C);
    b.ln2 = real_at(a->ln2, row * C);
    b.gelu = real_at(a->gelu, row * 4 * C);
    b.mean1 += row;
    b.rstd1 += row;
    b.mean2 += row;
    b.rstd2 += row;
    return b;
}
static inline BlockGradients block_gradients_from(const BlockGradients *g, int64_t row, int64_t C) {
    BlockGradients b;
    b.dfc = real_at(g->dfc, row * 4 * C);
    b.dqkv = real_at(g->dqkv, row * 3 * C);
    b.dres2 = real_at(g->dres2, row * C);
    b.dln2 = real_at(g->dln2, row * C);
    b.dln1 = real_at(g->dln1, row * C);
    return b;
}
// Computes norms, factors and the sum of a block, sample by sample. If the sum begins here, its
// first sample is computed in place.
static inline void clip_block_instantiated(Stream *s, const GptModel *m, const Clip *c,
                                           const UnitStates *u, const Real *dout, const Real *x,
                                           const BlockActs *a, const BlockGradients *g,
                                           int64_t rows, int64_t T) {
    const int64_t C = m->config.channels, elements = m->class_elements[STORAGE_BLOCK];
    UnitStates alone;
    memset(&alone, 0, sizeof alone);
    clip_begin(s, c, rows);
    for (int64_t b = 0; b < rows; b++) {
        const bool more = u->accumulate[STORAGE_BLOCK] || b;
        float *grad = alone.grads[STORAGE_BLOCK] = more ? c->sample : u->grads[STORAGE_BLOCK];
        const BlockActs acts = block_acts_from(a, b * T, C);
        const BlockGradients gradients = block_gradients_from(g, b * T, C);
        gpt_block_backward_weight(s, m, &alone, real_at_const(dout, b * T * C),
                                  real_at_const(x, b * T * C), &acts, &gradients, 1, T);
        ops_sample_norms(s, c->norms + b, grad, 1, elements);
        ops_clip_factors(s, c->factors + b, c->norms + b, c->weights + b, 1, c->policy.threshold,
                         c->policy.function);
        ops_accumulate_samples(s, u->grads[STORAGE_BLOCK], grad, c->factors + b, 1, elements, more);
    }
}

// -------------------------------------------------------------------------------------------------
// Head: lnf is a group; the gradient of wte waits for the embedding

// Computes losses, dlnf, and what clipping needs for wte; each output may be NULL.
static inline void clip_classifier(Stream *s, const GptModel *m, const UnitStates *u,
                                   const HeadActs *h, Real *dlnf, float *head, Real *dlogits,
                                   const int32_t *targets, int64_t rows, int64_t T) {
    ops_classifier(s, h->losses, dlnf, head, dlogits, h->lnf, unit_param(m, u, WTE), targets,
                   rows * T, T, m->config.channels, m->config.vocab, m->config.padded_vocab,
                   1.0f / (float)T, false);
}
static inline void clip_head_backward_input(Stream *s, const GptModel *m, const Clip *c,
                                            const UnitStates *u, Real *dx, const Real *x,
                                            const HeadActs *h, const int32_t *targets, int64_t rows,
                                            int64_t T) {
    const bool again = c->policy.again;
    clip_classifier(s, m, u, h, h->dlnf, again ? NULL : c->head, again ? NULL : c->dlogits, targets,
                    rows, T);
    gpt_head_backward_lnf(s, m, u, dx, x, h, rows * T);
    if (c->lnf) {
        ops_copy(s, c->lnf, h->lnf, (size_t)(rows * T * m->config.channels) * ops_real_bytes());
    }
}
static inline void clip_head_norms(Stream *s, const GptModel *m, const Clip *c, const Real *x,
                                   const HeadActs *h, int64_t rows, int64_t T) {
    ops_layernorm_samples(s, c->lnfw, c->lnfb, c->norms, h->dlnf, x, h->mean, h->rstd, rows, T,
                          m->config.channels);
}
static inline void clip_head_sum(Stream *s, const GptModel *m, const Clip *c, const UnitStates *u,
                                 int64_t rows) {
    clip_small_sum(s, m, c, u, LNFW, c->lnfw, rows);
    clip_small_sum(s, m, c, u, LNFB, c->lnfb, rows);
}

// Prepares what the first stage needs of the classifier's gradient of wte: |H|^2 and the tied rows.
// The rest stays here until the factors arrive.
static inline void clip_head_prepare(Stream *s, const GptModel *m, const Clip *c,
                                     const int32_t *tokens, const HeadActs *h, int64_t rows,
                                     int64_t T) {
    const int64_t C = m->config.channels, Vp = m->config.padded_vocab;
    const Crossing *x = &c->crossing;
    ops_zero(s, x->others, (size_t)rows * sizeof(double));
    if (c->head) {
        ops_sample_norms(s, x->others, c->head, rows, Vp * C);
        ops_token_rows(s, x->tied, tokens, c->head, rows, T, C, Vp);
        return;
    }
    ops_matmul_sample_norms(s, x->others, c->dlogits, h->lnf, rows, T, C, Vp);
    ops_tied_rows(s, x->tied, tokens, c->dlogits, h->lnf, rows, T, C, Vp);
}
// Adds H of all samples, times their factors. lnf: the classifier's inputs. Overwrites lnf and
// dlogits.
static inline void clip_classifier_sum(Stream *s, const GptModel *m, const Clip *c,
                                       const UnitStates *u, const float *factors, Real *lnf,
                                       int64_t rows, int64_t T) {
    const int64_t C = m->config.channels, Vp = m->config.padded_vocab;
    if (c->head) {
        ops_accumulate_samples(s, unit_grad(m, u, WTE), c->head, factors, rows, Vp * C,
                               u->accumulate[STORAGE_WTE]);
    } else {
        ops_matmul_backward_weight_samples(s, unit_grad(m, u, WTE), c->dlogits, lnf, factors, rows,
                                           T, C, Vp, u->accumulate[STORAGE_WTE]);
    }
}

// -------------------------------------------------------------------------------------------------
// Embedding: wte with both its uses, and wpe

// Returns the classifier's inputs.
static inline Real *clip_lnf(const Clip *c, const HeadActs *h) { return c->lnf ? c->lnf : h->lnf; }
static inline void clip_embedding_norms(Stream *s, const GptModel *m, const Clip *c,
                                        const Real *dout, const int32_t *tokens, const HeadActs *h,
                                        int64_t rows, int64_t T) {
    const int64_t C = m->config.channels, Vp = m->config.padded_vocab,
                  positions = m->config.max_seq_len;
    if (!c->head) {
        ops_matmul_sample_norms(s, c->norms, c->dlogits, clip_lnf(c, h), rows, T, C, Vp);
        ops_embedding_sample_norms(s, c->norms, dout, tokens, rows, T, C);
        ops_tied_sample_norms(s, c->norms, dout, tokens, c->dlogits, clip_lnf(c, h), rows, T, C,
                              Vp);
        return;
    }
    for (int64_t b = 0; b < rows; b++) {
        float *wte = c->head + b * Vp * C;
        ops_embedding_backward(s, wte, c->sample, real_at_const(dout, b * T * C), tokens + b * T,
                               NULL, 1, T, C, Vp, positions, true, false);
        ops_sample_norms(s, c->norms + b, wte, 1, Vp * C);
        ops_sample_norms(s, c->norms + b, c->sample, 1, T * C);
    }
}
// Completes the norm of the group that crosses stages, and its factors. On this stage only the
// embedding's norm is missing; the other stages have sent theirs.
static inline void clip_crossing_norms(Stream *s, const GptModel *m, const Clip *c,
                                       const Real *dout, const int32_t *tokens, int64_t rows,
                                       int64_t T) {
    ops_embedding_sample_norms(s, c->norms, dout, tokens, rows, T, m->config.channels);
    ops_crossing_norms(s, c->norms, c->crossing.others, c->senders, c->most, dout, c->crossing.tied,
                       rows, T, m->config.channels);
    ops_clip_factors(s, c->crossing.factors, c->norms, c->weights, rows, c->policy.threshold,
                     c->policy.function);
}
// Adds the embedding's gradients of wte and wpe, where the classifier is on another stage.
static inline void clip_table_sum(Stream *s, const GptModel *m, const Clip *c, const UnitStates *u,
                                  const Real *dout, const int32_t *tokens, int64_t rows,
                                  int64_t T) {
    ops_embedding_backward(s, unit_grad(m, u, WTE), unit_grad(m, u, WPE), dout, tokens,
                           c->crossing.factors, rows, T, m->config.channels, m->config.padded_vocab,
                           m->config.max_seq_len, u->accumulate[STORAGE_WTE],
                           u->accumulate[STORAGE_WPE]);
}
// Adds the gradients of wte and wpe, times the factors. Requires clip_factors(). Overwrites the
// head's activations.
static inline void clip_embedding_sum(Stream *s, const GptModel *m, const Clip *c,
                                      const UnitStates *u, const Real *dout, const int32_t *tokens,
                                      const HeadActs *h, int64_t rows, int64_t T) {
    const int64_t C = m->config.channels, Vp = m->config.padded_vocab,
                  positions = m->config.max_seq_len;
    float *wte = unit_grad(m, u, WTE), *wpe = unit_grad(m, u, WPE);
    clip_classifier_sum(s, m, c, u, c->factors, clip_lnf(c, h), rows, T);
    ops_embedding_backward(s, c->head ? NULL : wte, wpe, dout, tokens, c->factors, rows, T, C, Vp,
                           positions, true, u->accumulate[STORAGE_WPE]);
}
// Norms, factors and sum of the embedding's group, where logits are computed again: a few samples
// at a time. u has the parameters, too.
static inline void clip_embedding_again(Stream *s, const GptModel *m, const Clip *c,
                                        const UnitStates *u, const Real *dout,
                                        const int32_t *tokens, const int32_t *targets,
                                        const HeadActs *h, int64_t rows, int64_t T) {
    const int64_t C = m->config.channels;
    UnitStates more = *u;
    for (int64_t b = 0, n; b < rows; b += n) {
        n = min_i64(c->head_samples, rows - b);
        Clip few = *c;
        HeadActs acts = *h;
        few.weights += b;
        few.factors += b;
        few.norms += b;
        acts.lnf = real_at(h->lnf, b * T * C);
        acts.losses += b * T;
        more.accumulate[STORAGE_WTE] |= b > 0;
        more.accumulate[STORAGE_WPE] |= b > 0;
        clip_classifier(s, m, u, &acts, NULL, c->head, c->dlogits, targets + b * T, n, T);
        clip_begin(s, &few, n);
        clip_embedding_norms(s, m, &few, real_at_const(dout, b * T * C), tokens + b * T, &acts, n,
                             T);
        clip_factors(s, &few, n);
        clip_embedding_sum(s, m, &few, &more, real_at_const(dout, b * T * C), tokens + b * T, &acts,
                           n, T);
    }
}

#endif
