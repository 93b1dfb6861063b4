// unit.h: the forward and backward passes of a unit, by walking through its table of operations
// (architecture.h). `op_kinds` says of each kind of operation how it computes its output, the
// gradients of its inputs and of its parameters, and what each sample adds to these (dp.h).
//
// Backward  has two parts. The input part computes the gradient of the unit's input, without the
//           gradients of parameters. The weight part computes those. It may run any time later,
//           from what the input part left in gradient buffers. One exception: the classifier's
//           input part also computes the gradient of its table, because its logits exist only for a
//           chunk of rows at a time. (dp.h has another exception.)
//
// A new kind of operation is a row of OP_TABLE (architecture.h), and its functions.
#ifndef UNIT_H
#define UNIT_H

#include "base/base.h"
#include "model/architecture.h"
#include "model/gpt.h"
#include "ops/ops.h"

// -------------------------------------------------------------------------------------------------
// Memory: activations are carved from one buffer by an Arena. If base is NULL, the same code only
// counts bytes.
typedef struct {
    char *base;
    size_t used;
} Arena;
#ifndef PLACED_APART // gap between tensors, where the GPU emulation detects stray accesses
#define PLACED_APART(p, bytes) 0
#endif
static inline void *arena_take(Arena *a, size_t bytes) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += (bytes + 63) / 64 * 64 + PLACED_APART(p, bytes);
    return p;
}
static inline Real *arena_reals(Arena *a, int64_t n) {
    return (Real *)arena_take(a, (size_t)n * ops_real_bytes());
}
static inline float *arena_floats(Arena *a, int64_t n) {
    return (float *)arena_take(a, (size_t)n * sizeof(float));
}

// The buffers of a unit: values that the forward pass saves, and gradients that the input part of
// the backward pass leaves. Those of boundaries stay NULL.
typedef struct {
    void *value[MOST_VALUES];
    Real *gradient[MOST_GRADIENTS];
} UnitBuffers;
// Reserves the gradients of N rows: those that are kept with the values, or the others.
static inline void unit_carve_gradients(UnitBuffers *b, Arena *a, const GptModel *m, UnitClass c,
                                        int64_t N, bool with_values) {
    const UnitSpec *spec = gpt_unit_spec(m, c);
    for (int g = GRADIENT_FIRST; g < spec->gradient_count; g++) {
        const GradientSpec *gradient = &spec->gradients[g];
        if (gradient->with_values == with_values) {
            b->gradient[g] = arena_reals(a, N * gpt_dim(m, gradient->width));
        }
    }
}
// Reserves the values of N rows, and the gradients that are kept with them.
static inline void unit_carve_values(UnitBuffers *b, Arena *a, const GptModel *m, UnitClass c,
                                     int64_t N) {
    const UnitSpec *spec = gpt_unit_spec(m, c);
    for (int v = VALUE_FIRST; v < spec->value_count; v++) {
        const bool reals = spec->values[v].type == VALUE_REALS;
        b->value[v] = arena_take(a, N * gpt_dim(m, spec->values[v].width) *
                                        (reals ? ops_real_bytes() : sizeof(float)));
    }
    unit_carve_gradients(b, a, m, c, N, true);
}
// Returns the width of a block's widest value.
static inline int64_t gpt_widest(const GptModel *m) {
    const UnitSpec *spec = gpt_unit_spec(m, UNIT_BLOCK);
    int64_t widest = 0;
    for (int v = 0; v < spec->value_count; v++) {
        widest = max_i64(widest, gpt_dim(m, spec->values[v].width));
    }
    return widest;
}
// Returns the size of the operations' workspace for micro-batches of `rows` samples and chunks of
// at most `logits` rows of logits.
static inline size_t gpt_workspace_bytes(const GptModel *m, int64_t rows, int64_t T, int threads,
                                         int64_t logits) {
    const OpsShape shape = {.rows = rows,
                            .T = T,
                            .C = m->config.channels,
                            .NH = m->config.heads,
                            .V = m->config.vocab,
                            .Vp = m->config.padded_vocab,
                            .logits = logits,
                            .kv_heads = m->config.kv_heads,
                            .D = m->config.head_dim,
                            .widest = gpt_widest(m)};
    return ops_workspace_bytes(shape, threads);
}

// -------------------------------------------------------------------------------------------------
// What a pass over a unit works on

// Parameters and gradients of a unit, by class of storage. accumulate says whether the gradient
// buffer already holds a contribution of this step.
typedef struct {
    const Real *params[STORAGE_CLASSES];
    float *grads[STORAGE_CLASSES];
    bool accumulate[STORAGE_CLASSES];
} UnitStates;
// Each sample's gradients of the unit's vectors: biases, gains. [rows][elements of the tensor]
typedef struct {
    float *tensor[MOST_TENSORS];
} UnitSums;
// What the classifier makes beside losses. dx, dweight and dlogits may each be NULL (ops.h:
// ops_classifier).
typedef struct {
    Real *dx;
    float *dweight;
    Real *dlogits;
    int64_t each; // rows that share one dweight
    float scale;  // weight of each token: 1 / tokens of the step
    bool accumulate;
} ClassifierResults;

typedef struct {
    Stream *stream;
    const GptModel *model;
    const UnitSpec *unit;
    const UnitStates *states;
    UnitBuffers buffers; // with those of the boundaries
    const int32_t *tokens, *targets;
    int64_t rows, T;
    bool recompute; // forward: only what the backward pass reads
    // generated text: position of the first token, and where a block's keys and values are kept
    int64_t first;
    KeyCache cache;               // most 0: they are not kept
    ClassifierResults classifier; // backward
    // of samples
    const UnitSums *sums;
    double *norms;        // [rows], squared
    const float *factors; // [rows]
} UnitCall;

static inline const Real *unit_param(const GptModel *m, const UnitStates *u, int tensor) {
    return tensor == NO_TENSOR
               ? NULL
               : real_at_const(u->params[tensor_class(m, tensor)], m->tensor_offset[tensor]);
}
static inline float *unit_grad(const GptModel *m, const UnitStates *u, int tensor) {
    float *grads = tensor == NO_TENSOR ? NULL : u->grads[tensor_class(m, tensor)];
    return grads ? grads + m->tensor_offset[tensor] : NULL;
}

// What one operation of a pass works on: its row's values, parameters and their gradients, in the
// order of the row. What the operation's kind does not have is not to be used.
typedef struct {
    const UnitCall *call;
    const OpNode *node;
    Real **at; // backward: where each value's gradient is; NULL: it has none yet
    Stream *s;
    int64_t rows, T, N;      // samples, tokens of each, tokens of all
    int64_t in_width, width; // of in[0]; of out[0]
    Real *in[2], *out[2];
    Real *din[2], *dout[2]; // their gradients
    float *stats[2];
    const Real *params[2];
    float *grads[2];
    bool accumulates[2]; // the gradient of the parameter has a contribution of this step
    float *sums[2];      // of vectors: each sample's gradient
} OpCall;
static inline Real *gradient_buffer(const UnitCall *c, int value) {
    return c->buffers.gradient[c->unit->values[value].gradient];
}
static inline OpCall op_call(const UnitCall *c, const OpNode *n, Real **at) {
    const GptModel *m = c->model;
    const ValueSpec *values = c->unit->values;
    OpCall o = {.call = c,
                .node = n,
                .at = at,
                .s = c->stream,
                .rows = c->rows,
                .T = c->T,
                .N = c->rows * c->T,
                .in_width = gpt_dim(m, values[n->in[0]].width),
                .width = gpt_dim(m, values[n->out[0]].width)};
    for (int i = 0; i < 2; i++) {
        const int tensor = n->params[i];
        o.in[i] = (Real *)c->buffers.value[n->in[i]];
        o.out[i] = (Real *)c->buffers.value[n->out[i]];
        o.din[i] = gradient_buffer(c, n->in[i]);
        o.dout[i] = at && at[n->out[i]] ? at[n->out[i]] : gradient_buffer(c, n->out[i]);
        o.stats[i] = (float *)c->buffers.value[n->stats[i]];
        if (tensor == NO_TENSOR) { continue; }
        o.params[i] = unit_param(m, c->states, tensor);
        o.grads[i] = unit_grad(m, c->states, tensor);
        o.accumulates[i] = c->states->accumulate[tensor_class(m, tensor)];
        if (c->sums) { o.sums[i] = c->sums->tensor[tensor]; }
    }
    return o;
}
// Where the gradient of out[i] is now: gradient_so_far() may move it.
static inline Real *dout_now(const OpCall *o, int i) {
    return o->at[o->node->out[i]] ? o->at[o->node->out[i]] : o->dout[i];
}
static inline void copy_gradient(const OpCall *o, int value) {
    const UnitCall *c = o->call;
    Real *own = gradient_buffer(c, value);
    const int64_t width = gpt_dim(c->model, c->unit->values[value].width);
    if (o->at[value] && o->at[value] != own) {
        ops_copy(o->s, own, o->at[value], o->N * width * ops_real_bytes());
        o->at[value] = own;
    }
}
// The caller writes the gradient of a value into the value's own buffer. Returns what it must add:
// where the gradient is so far; NULL if there is none.
static inline const Real *gradient_so_far(const OpCall *o, int value) {
    const Real *so_far = o->at[value];
    Real *own = gradient_buffer(o->call, value);
    for (int v = 0; v < o->call->unit->value_count; v++) {
        if (v != value && o->at[v] == own) { copy_gradient(o, v); }
    }
    o->at[value] = own;
    return so_far;
}
// Adds the gradient of a sum to that of in[i], one of its terms, which is as wide. If it is the
// first part of it, it stays where it is.
static inline void add_to_gradient(const OpCall *o, int i, Real *gradient) {
    const int value = o->node->in[i];
    if (o->din[i] == gradient || !o->at[value]) {
        o->at[value] = gradient;
    } else {
        const Real *so_far = gradient_so_far(o, value);
        ops_residual(o->s, o->din[i], so_far, gradient, o->N * o->width);
    }
}
// Adds each sample's gradient of a vector, times its factor.
static inline void vector_sample_sum(const OpCall *o, int i) {
    const int tensor = o->node->params[i];
    if (tensor == NO_TENSOR) { return; }
    ops_accumulate_samples(o->s, o->grads[i], o->sums[i], o->call->factors, o->rows,
                           o->call->model->tensor_elements[tensor], o->accumulates[i]);
}

// -------------------------------------------------------------------------------------------------
// Embedding
static inline void embedding_forward(const OpCall *o) {
    const Real *positions =
        o->params[1] ? real_at_const(o->params[1], o->call->first * o->width) : NULL;
    ops_embedding_forward(o->s, o->out[0], o->call->tokens, o->params[0], positions, o->rows, o->T,
                          o->width);
}
// factors may be NULL (ops.h).
static inline void embedding_backward(const UnitCall *c, const OpNode *n, const float *factors) {
    const OpCall o = op_call(c, n, NULL);
    ops_embedding_backward(c->stream, o.grads[0], o.grads[1], o.dout[0], c->tokens, factors,
                           c->rows, c->T, o.width, c->model->config.padded_vocab,
                           c->model->config.max_seq_len, o.accumulates[0], o.accumulates[1]);
}
static inline void embedding_backward_weight(const OpCall *o) {
    embedding_backward(o->call, o->node, NULL);
}

// -------------------------------------------------------------------------------------------------
// Layernorm, and the sum before it
static inline bool layernorm_adds(const OpCall *o) { return o->node->kind == OP_ADD_LAYERNORM; }
// Returns the value that is normalised.
static inline const Real *layernorm_input(const OpCall *o) {
    return layernorm_adds(o) ? o->out[1] : o->in[0];
}
static inline void layernorm_forward(const OpCall *o) {
    const bool adds = layernorm_adds(o);
    ops_layernorm_forward(o->s, o->out[0], o->stats[0], o->stats[1], adds ? o->out[1] : NULL,
                          o->in[0], adds ? o->in[1] : NULL, o->params[0], o->params[1], o->N,
                          o->width);
}
static inline void layernorm_backward_input(const OpCall *o) {
    const bool adds = layernorm_adds(o);
    const int value = adds ? o->node->out[1] : o->node->in[0];
    const Real *so_far = gradient_so_far(o, value);
    ops_layernorm_backward_input(o->s, o->at[value], so_far, dout_now(o, 0), layernorm_input(o),
                                 o->params[0], o->stats[0], o->stats[1], o->N, o->width);
    for (int i = 0; adds && i < 2; i++) { add_to_gradient(o, i, o->at[value]); }
}
static inline void layernorm_backward_weight(const OpCall *o) {
    ops_layernorm_backward_weight(o->s, o->grads[0], o->grads[1], o->dout[0], layernorm_input(o),
                                  o->stats[0], o->stats[1], o->N, o->width, o->accumulates[0]);
}
static inline void layernorm_sample_norms(const OpCall *o) {
    ops_layernorm_samples(o->s, o->sums[0], o->sums[1], o->call->norms, o->dout[0],
                          layernorm_input(o), o->stats[0], o->stats[1], o->rows, o->T, o->width);
}
static inline void layernorm_sample_sum(const OpCall *o) {
    vector_sample_sum(o, 0);
    vector_sample_sum(o, 1);
}

// -------------------------------------------------------------------------------------------------
// RMSNorm, and the sum before it
static inline bool rmsnorm_adds(const OpCall *o) { return o->node->kind == OP_ADD_RMSNORM; }
static inline const Real *rmsnorm_input(const OpCall *o) {
    return rmsnorm_adds(o) ? o->out[1] : o->in[0];
}
static inline void rmsnorm_forward(const OpCall *o) {
    const bool adds = rmsnorm_adds(o);
    ops_rmsnorm_forward(o->s, o->out[0], o->stats[0], adds ? o->out[1] : NULL, o->in[0],
                        adds ? o->in[1] : NULL, o->params[0], o->N, o->width,
                        (float)o->call->model->config.eps);
}
static inline void rmsnorm_backward_input(const OpCall *o) {
    const bool adds = rmsnorm_adds(o);
    const int value = adds ? o->node->out[1] : o->node->in[0];
    const Real *so_far = gradient_so_far(o, value);
    ops_rmsnorm_backward_input(o->s, o->at[value], so_far, dout_now(o, 0), rmsnorm_input(o),
                               o->params[0], o->stats[0], o->N, o->width);
    for (int i = 0; adds && i < 2; i++) { add_to_gradient(o, i, o->at[value]); }
}
static inline void rmsnorm_backward_weight(const OpCall *o) {
    if (o->node->params[0] == NO_TENSOR) { return; }
    ops_rmsnorm_backward_weight(o->s, o->grads[0], o->dout[0], rmsnorm_input(o), o->stats[0], o->N,
                                o->width, o->accumulates[0]);
}
static inline void rmsnorm_sample_norms(const OpCall *o) {
    if (o->node->params[0] == NO_TENSOR) { return; }
    ops_rmsnorm_samples(o->s, o->sums[0], o->call->norms, o->dout[0], rmsnorm_input(o), o->stats[0],
                        o->rows, o->T, o->width);
}
static inline void rmsnorm_sample_sum(const OpCall *o) { vector_sample_sum(o, 0); }

// -------------------------------------------------------------------------------------------------
// Linear layers
static inline void linear_forward(const OpCall *o) {
    Real *gelu = o->node->kind == OP_LINEAR_GELU ? o->out[1] : NULL;
    if (o->call->cache.most && o->N == 1) {
        ops_vector_forward(o->s, o->out[0], gelu, o->in[0], o->params[0], o->params[1], o->in_width,
                           o->width);
        return;
    }
    ops_matmul_forward(o->s, o->out[0], gelu, o->in[0], o->params[0], o->params[1], o->N,
                       o->in_width, o->width);
}
static inline void linear_backward_input(const OpCall *o) {
    const bool of_gelu = o->node->kind == OP_LINEAR_OF_GELU;
    const Real *so_far = gradient_so_far(o, o->node->in[of_gelu]);
    assert(!so_far); // the product does not add
    (void)so_far;
    ops_matmul_backward_input(o->s, o->din[of_gelu], dout_now(o, 0), o->params[0],
                              of_gelu ? o->in[1] : NULL, o->N, o->in_width, o->width);
}
static inline void linear_backward_weight(const OpCall *o) {
    ops_matmul_backward_weight(o->s, o->grads[0], o->grads[1], o->dout[0], o->in[0], o->N,
                               o->in_width, o->width, o->accumulates[0]);
}
static inline void linear_sample_norms(const OpCall *o) {
    double *norms = o->call->norms;
    ops_matmul_sample_norms(o->s, norms, o->dout[0], o->in[0], o->rows, o->T, o->in_width,
                            o->width);
    if (o->sums[1]) {
        ops_bias_samples(o->s, o->sums[1], norms, o->dout[0], o->rows, o->T, o->width);
    }
}
static inline void linear_sample_sum(const OpCall *o) {
    ops_matmul_backward_weight_samples(o->s, o->grads[0], o->dout[0], o->in[0], o->call->factors,
                                       o->rows, o->T, o->in_width, o->width, o->accumulates[0]);
    vector_sample_sum(o, 1);
}
static inline double linear_flops(const GptModel *m, const UnitSpec *u, const OpNode *n, double T) {
    (void)T;
    return 2.0 * gpt_dim(m, u->values[n->in[0]].width) * gpt_dim(m, u->values[n->out[0]].width);
}

// -------------------------------------------------------------------------------------------------
// Attention
static inline AttentionShape op_attention(const OpCall *o) {
    AttentionShape a = gpt_attention(o->call->model, o->rows, o->T);
    a.first = o->call->first;
    return a;
}
static inline void attention_forward(const OpCall *o) {
    const AttentionShape a = op_attention(o);
    const KeyCache cache = o->call->cache;
    if (cache.most) { ops_keep_keys(o->s, cache, o->in[0], a); }
    if (a.first) {
        ops_attention_kept(o->s, o->out[0], o->in[0], cache, a);
    } else {
        ops_attention_forward(o->s, o->out[0], o->stats[0], o->in[0], a);
    }
}
static inline void attention_backward_input(const OpCall *o) {
    (void)gradient_so_far(o, o->node->in[0]);
    ops_attention_backward(o->s, o->din[0], dout_now(o, 0), o->in[0], o->out[0], o->stats[0],
                           op_attention(o));
}
static inline double attention_flops(const GptModel *m, const UnitSpec *u, const OpNode *n,
                                     double T) {
    return 2.0 * gpt_dim(m, u->values[n->out[0]].width) * T; // causal: half of 2 * 2 T C
}

// -------------------------------------------------------------------------------------------------
// Rotary positions, and the norms of heads of q and k
static inline void rotary_forward(const OpCall *o) {
    ops_rotary(o->s, o->out[0], op_attention(o), &o->call->model->rotary, false);
}
// The gradient of q and k is turned back in place.
static inline void rotary_backward_input(const OpCall *o) {
    ops_rotary(o->s, dout_now(o, 0), op_attention(o), &o->call->model->rotary, true);
}
static inline HeadNorm qk_norm_of(const OpCall *o) {
    const GptModel *m = o->call->model;
    const HeadNorm h = {.shape = op_attention(o),
                        .rotary = &m->rotary,
                        .eps = (float)m->config.eps,
                        .scale = m->arch->qk_scale};
    return h;
}
static inline void qk_norm_forward(const OpCall *o) {
    const HeadNorm h = qk_norm_of(o);
    ops_head_norm_forward(o->s, o->out[0], o->stats[0], o->in[0], o->params[0], o->params[1], &h);
}
static inline void qk_norm_backward_input(const OpCall *o) {
    const HeadNorm h = qk_norm_of(o);
    (void)gradient_so_far(o, o->node->in[0]);
    ops_head_norm_backward_input(o->s, o->din[0], dout_now(o, 0), o->in[0], o->params[0],
                                 o->params[1], o->stats[0], &h);
}
static inline void qk_norm_backward_weight(const OpCall *o) {
    const HeadNorm h = qk_norm_of(o);
    if (o->node->params[0] == NO_TENSOR) { return; }
    ops_head_norm_backward_weight(o->s, o->grads[0], o->grads[1], o->dout[0], o->in[0], o->stats[0],
                                  &h, o->accumulates[0]);
}
static inline void qk_norm_sample_norms(const OpCall *o) {
    const HeadNorm h = qk_norm_of(o);
    if (o->node->params[0] == NO_TENSOR) { return; }
    ops_head_norm_samples(o->s, o->sums[0], o->sums[1], o->call->norms, o->dout[0], o->in[0],
                          o->stats[0], &h);
}
static inline void qk_norm_sample_sum(const OpCall *o) {
    vector_sample_sum(o, 0);
    vector_sample_sum(o, 1);
}

// -------------------------------------------------------------------------------------------------
// Activations of the MLP
static inline void swiglu_forward(const OpCall *o) {
    ops_swiglu_forward(o->s, o->out[0], o->in[0], o->N, o->width);
}
static inline void swiglu_backward_input(const OpCall *o) {
    (void)gradient_so_far(o, o->node->in[0]);
    ops_swiglu_backward(o->s, o->din[0], dout_now(o, 0), o->in[0], o->N, o->width);
}
static inline void relu2_forward(const OpCall *o) {
    ops_relu2_forward(o->s, o->out[0], o->in[0], o->N * o->width);
}
static inline void relu2_backward_input(const OpCall *o) {
    (void)gradient_so_far(o, o->node->in[0]);
    ops_relu2_backward(o->s, o->din[0], dout_now(o, 0), o->in[0], o->N * o->width);
}

// -------------------------------------------------------------------------------------------------
// Sums
static inline void add_forward(const OpCall *o) {
    ops_residual(o->s, o->out[0], o->in[0], o->in[1], o->N * o->width);
}
static inline void add_backward_input(const OpCall *o) {
    add_to_gradient(o, 0, dout_now(o, 0));
    add_to_gradient(o, 1, dout_now(o, 0));
}

// -------------------------------------------------------------------------------------------------
// Classifier
static inline void classifier_run(const UnitCall *c, const OpNode *n, ClassifierResults r,
                                  Real *logits) {
    const OpCall o = op_call(c, n, NULL);
    ops_classifier(o.s, (float *)c->buffers.value[n->out[0]], r.dx, r.dweight,
                   r.dlogits ? r.dlogits : logits, o.in[0], o.params[0], c->targets, o.N, r.each,
                   o.in_width, c->model->config.vocab, c->model->config.padded_vocab, r.scale,
                   c->model->arch->softcap, r.accumulate);
}
static inline void classifier_backward_input(const OpCall *o) {
    ClassifierResults results = o->call->classifier;
    results.dx = o->din[0];
    (void)gradient_so_far(o, o->node->in[0]);
    classifier_run(o->call, o->node, results, NULL);
}
static inline double classifier_flops(const GptModel *m, const UnitSpec *u, const OpNode *n,
                                      double T) {
    (void)T;
    return 2.0 * (m->config.padded_vocab * gpt_dim(m, u->values[n->in[0]].width));
}

// -------------------------------------------------------------------------------------------------
// The table

// The parts of an operation. The last two are for clipped samples: the first of them adds each
// sample's squared norm to norms, and keeps its gradients of vectors in sums; the other adds the
// gradients of all samples, each times its factor.
typedef enum {
    PART_FORWARD,
    PART_BACKWARD_INPUT,
    PART_BACKWARD_WEIGHT,
    PART_SAMPLE_NORMS,
    PART_SAMPLE_SUM,
    PARTS
} OpPart;
typedef struct {
    // NULL: the kind has no such part. A kind without parameters has only the first two.
    void (*part[PARTS])(const OpCall *o);
    // floating-point operations of the forward part, for one token of a sample of T tokens; NULL: 0
    double (*flops)(const GptModel *m, const UnitSpec *u, const OpNode *n, double T);
} OpKind;
// clang-format off
// dp.h has the embedding's parts of samples, since its table may be tied
#define OPS_EMBEDDING  {.part = {embedding_forward, NULL, embedding_backward_weight}}
#define OPS_LAYERNORM  {.part = {layernorm_forward, layernorm_backward_input,                      \
                        layernorm_backward_weight, layernorm_sample_norms, layernorm_sample_sum}}
#define OPS_RMSNORM    {.part = {rmsnorm_forward, rmsnorm_backward_input,                          \
                        rmsnorm_backward_weight, rmsnorm_sample_norms, rmsnorm_sample_sum}}
#define OPS_LINEAR     {.part = {linear_forward, linear_backward_input, linear_backward_weight,    \
                        linear_sample_norms, linear_sample_sum}, .flops = linear_flops}
#define OPS_ROTARY     {.part = {rotary_forward, rotary_backward_input}}
#define OPS_HEAD_NORM  {.part = {qk_norm_forward, qk_norm_backward_input, qk_norm_backward_weight, \
                        qk_norm_sample_norms, qk_norm_sample_sum}}
#define OPS_ATTENTION  {.part = {attention_forward, attention_backward_input},                     \
                        .flops = attention_flops}
#define OPS_SWIGLU     {.part = {swiglu_forward, swiglu_backward_input}}
#define OPS_RELU2      {.part = {relu2_forward, relu2_backward_input}}
#define OPS_ADD        {.part = {add_forward, add_backward_input}}
// unit_losses() is its forward part, in evaluations; dp.h has its parts of samples
#define OPS_CLASSIFIER {.part = {NULL, classifier_backward_input}, .flops = classifier_flops}
// clang-format on
#define OP_ROW(KIND, FUNCTIONS, ...) OPS_##FUNCTIONS,
static const OpKind op_kinds[OP_KINDS] = {OP_TABLE(OP_ROW)};
#undef OP_ROW

// -------------------------------------------------------------------------------------------------
// Passes over a unit

// Runs one part of all operations: the forward part from the first to the last, the others from the
// last to the first. Recomputation leaves out operations that only make the unit's output. At the
// end each gradient that the weight part or the unit below reads is in its value's own buffer.
static inline void unit_pass(const UnitCall *c, OpPart part) {
    const int count = c->unit->op_count;
    Real *at[MOST_VALUES] = {NULL};
    at[VALUE_Y] = gradient_buffer(c, VALUE_Y);
    for (int i = 0; i < count; i++) {
        const OpNode *n = &c->unit->ops[part == PART_FORWARD ? i : count - 1 - i];
        const bool skipped = c->recompute && n->out[0] == VALUE_Y;
        const OpCall o = op_call(c, n, at);
        if (op_kinds[n->kind].part[part] && !skipped) { op_kinds[n->kind].part[part](&o); }
    }
    for (int i = 0; part == PART_BACKWARD_INPUT && i < count; i++) {
        const OpNode *n = &c->unit->ops[i];
        const OpCall o = op_call(c, n, at);
        if (op_kinds[n->kind].part[PART_BACKWARD_WEIGHT]) { copy_gradient(&o, n->out[0]); }
        if (i == 0) { copy_gradient(&o, VALUE_X); }
    }
}

// Returns the model's classifier, which is in the head.
static inline const OpNode *gpt_classifier(const GptModel *m) {
    return unit_op(gpt_unit_spec(m, UNIT_HEAD), OP_CLASSIFIER);
}
// Computes the losses alone (evaluation). logits is a buffer (N, Vp), or NULL if the workspace
// holds them.
static inline void unit_losses(const UnitCall *c, Real *logits) {
    const ClassifierResults none = {.each = c->rows * c->T};
    classifier_run(c, gpt_classifier(c->model), none, logits);
}
// Returns the values that the classifier reads (N, width), and those that it makes: losses (N).
static inline Real *head_classified(const GptModel *m, const UnitBuffers *b) {
    return (Real *)b->value[gpt_classifier(m)->in[0]];
}
static inline float *head_losses(const GptModel *m, const UnitBuffers *b) {
    return (float *)b->value[gpt_classifier(m)->out[0]];
}
// Computes logits(rows, count) of the tokens first .. first + count - 1, for rows of the
// classifier's input.
static inline void head_logits(Stream *s, const GptModel *m, const UnitStates *u, Real *logits,
                               const Real *classified, int64_t rows, int64_t first, int64_t count) {
    const int64_t width = gpt_width(m);
    const Real *table =
        real_at_const(unit_param(m, u, gpt_classifier(m)->params[0]), first * width);
    if (rows == 1) {
        ops_vector_forward(s, logits, NULL, classified, table, NULL, width, count);
    } else {
        ops_matmul_forward(s, logits, NULL, classified, table, NULL, rows, width, count);
    }
    if (m->arch->softcap > 0) { ops_softcap(s, logits, rows * count, m->arch->softcap); }
}

// Returns the buffers of the rows from `row` on.
static inline UnitBuffers unit_buffers_from(const UnitCall *c, int64_t row) {
    UnitBuffers b = c->buffers;
    for (int v = 0; v < c->unit->value_count; v++) {
        const ValueSpec *spec = &c->unit->values[v];
        const size_t size = spec->type == VALUE_FLOATS ? sizeof(float) : ops_real_bytes();
        if (b.value[v]) {
            b.value[v] = (char *)b.value[v] + row * gpt_dim(c->model, spec->width) * size;
        }
    }
    for (int g = GRADIENT_X; g < c->unit->gradient_count; g++) {
        const int64_t width = gpt_dim(c->model, c->unit->gradients[g].width);
        if (b.gradient[g]) { b.gradient[g] = real_at(b.gradient[g], row * width); }
    }
    return b;
}

// -------------------------------------------------------------------------------------------------
// Floating-point operations of matrix products, for the MFU and for predictions. `tokens` tokens
// are computed in samples of T tokens.
static inline double gpt_forward_flops(const GptModel *m, UnitClass c, double tokens, double T) {
    const UnitSpec *spec = gpt_unit_spec(m, c);
    double flops = 0;
    for (int i = 0; i < spec->op_count; i++) {
        const OpNode *n = &spec->ops[i];
        if (op_kinds[n->kind].flops) { flops += op_kinds[n->kind].flops(m, spec, n, T); }
    }
    return tokens * flops;
}
// Those of them that attention has.
static inline double gpt_attention_flops(const GptModel *m, UnitClass c, double tokens, double T) {
    const UnitSpec *spec = gpt_unit_spec(m, c);
    double flops = 0;
    for (int i = 0; i < spec->op_count; i++) {
        const OpNode *n = &spec->ops[i];
        if (n->kind == OP_ATTENTION) { flops += attention_flops(m, spec, n, T); }
    }
    return tokens * flops;
}
// A backward pass has two products for each product of the forward pass.
static inline double gpt_step_flops(const GptModel *m, double tokens, double T) {
    return 3.0 * (m->config.layers * gpt_forward_flops(m, UNIT_BLOCK, tokens, T) +
                  gpt_forward_flops(m, UNIT_HEAD, tokens, T));
}

#endif
