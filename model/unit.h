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
#include "model/config.h"
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
// Returns the elements of a value, or of a gradient, for each token.
static inline int64_t value_width(const GptModel *m, const ValueSpec *v) {
    return gpt_dim(m, v->width) * gpt_dim_or_one(m, v->rows);
}
static inline int64_t gradient_width(const GptModel *m, const GradientSpec *g) {
    return gpt_dim(m, g->width) * gpt_dim_or_one(m, g->rows);
}
// Reserves the gradients of N tokens: those that are kept with the values, or the others.
static inline void unit_carve_gradients(UnitBuffers *b, Arena *a, const GptModel *m, UnitClass c,
                                        int64_t N, bool with_values) {
    const UnitSpec *spec = gpt_unit_spec(m, c);
    for (int g = GRADIENT_FIRST; g < spec->gradient_count; g++) {
        const GradientSpec *gradient = &spec->gradients[g];
        if (gradient->with_values == with_values) {
            b->gradient[g] = arena_reals(a, N * gradient_width(m, gradient));
        }
    }
}
// Reserves the values of N rows, and the gradients that are kept with them.
static inline void unit_carve_values(UnitBuffers *b, Arena *a, const GptModel *m, UnitClass c,
                                     int64_t N) {
    const UnitSpec *spec = gpt_unit_spec(m, c);
    for (int v = VALUE_FIRST; v < spec->value_count; v++) {
        const bool reals = spec->values[v].type == VALUE_REALS;
        b->value[v] =
            arena_take(a, (spec->values[v].once ? 1 : N) * value_width(m, &spec->values[v]) *
                              (reals ? ops_real_bytes() : sizeof(float)));
    }
    unit_carve_gradients(b, a, m, c, N, true);
}
// Returns the elements of a block's longest row.
static inline int64_t gpt_widest(const GptModel *m) {
    const UnitSpec *spec = gpt_unit_spec(m, UNIT_BLOCK);
    int64_t widest = 0;
    for (int v = 0; v < spec->value_count; v++) {
        widest = max_i64(widest, gpt_dim(m, spec->values[v].width)); // of one row
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
                            .widest = gpt_widest(m),
                            .experts = m->config.experts,
                            .choices = gpt_choices(&m->config)};
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
    int part;         // forward, backward input: of the unit
    unsigned weights; // backward weight: bits of the parts of the unit; 0: all
    bool recompute;   // forward: only what the backward pass reads
    // generated text: position of the first token, and where a block's keys and values are kept
    int64_t first;
    KeyCache cache;               // most 0: they are not kept
    ClassifierResults classifier; // backward
    RouterLosses router;          // likewise
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

// Returns the sum of in[0] and in[1] that an operation makes; VALUE_X: it makes none.
static inline int op_sum(const OpNode *n) {
    const bool norms = n->kind == OP_ADD_LAYERNORM || n->kind == OP_ADD_RMSNORM;
    return norms ? n->out[1] : n->kind == OP_ADD ? n->out[0] : VALUE_X;
}
// Returns the value whose gradient the input part computes: in[0]; the sum before a norm; what GELU
// was computed from.
static inline int op_x(const OpNode *n) {
    const int sum = op_sum(n);
    const bool of_gelu = n->kind == OP_LINEAR_OF_GELU || n->kind == OP_EXPERTS_OF_GELU;
    return sum != VALUE_X ? sum : n->in[of_gelu];
}

// What one operation of a pass works on: its row's values, parameters and their gradients, in the
// order of the row. What the operation's kind does not have is not to be used.
typedef struct {
    const UnitCall *call;
    const OpNode *node;
    Stream *s;
    int64_t rows, T, N;      // samples, tokens of each, rows of in[0]: one a token, or several
    int64_t in_width, width; // of in[0]; of out[0]
    Real *in[2], *out[2];
    Real *x, *dx;       // op_x(), and the buffer of its gradient
    const Real *so_far; // what a norm's input part adds to dx, which it may be; NULL: nothing
    Real *dout;         // the gradient of out[0]
    float *stats[2];
    const Real *params[2];
    float *grads[2];
    bool accumulates[2]; // the gradient of the parameter has a contribution of this step
    float *sums[2];      // of vectors: each sample's gradient
} OpCall;
static inline Real *gradient_buffer(const UnitCall *c, int value) {
    return c->buffers.gradient[c->unit->values[value].gradient];
}
static inline OpCall op_call(const UnitCall *c, const OpNode *n) {
    const GptModel *m = c->model;
    const ValueSpec *values = c->unit->values;
    OpCall o = {.call = c,
                .node = n,
                .s = c->stream,
                .rows = c->rows,
                .T = c->T,
                .N = c->rows * c->T * gpt_dim_or_one(m, values[n->in[0]].rows),
                .in_width = gpt_dim(m, values[n->in[0]].width),
                .width = gpt_dim(m, values[n->out[0]].width),
                .x = (Real *)c->buffers.value[op_x(n)],
                .dx = gradient_buffer(c, op_x(n)),
                .dout = gradient_buffer(c, n->out[0])};
    for (int i = 0; i < 2; i++) {
        const int tensor = n->params[i];
        o.in[i] = (Real *)c->buffers.value[n->in[i]];
        o.out[i] = (Real *)c->buffers.value[n->out[i]];
        o.stats[i] = (float *)c->buffers.value[n->stats[i]];
        if (tensor == NO_TENSOR) { continue; }
        o.params[i] = unit_param(m, c->states, tensor);
        o.grads[i] = unit_grad(m, c->states, tensor);
        o.accumulates[i] = c->states->accumulate[tensor_class(m, tensor)];
        if (c->sums) { o.sums[i] = c->sums->tensor[tensor]; }
    }
    return o;
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
    const OpCall o = op_call(c, n);
    ops_embedding_backward(c->stream, o.grads[0], o.grads[1], o.dout, c->tokens, factors, c->rows,
                           c->T, o.width, c->model->config.padded_vocab,
                           c->model->config.max_seq_len, o.accumulates[0], o.accumulates[1]);
}
static inline void embedding_backward_weight(const OpCall *o) {
    embedding_backward(o->call, o->node, NULL);
}

// -------------------------------------------------------------------------------------------------
// Layernorm, and the sum before it
static inline void layernorm_forward(const OpCall *o) {
    const bool adds = op_sum(o->node) != VALUE_X;
    ops_layernorm_forward(o->s, o->out[0], o->stats[0], o->stats[1], adds ? o->out[1] : NULL,
                          o->in[0], adds ? o->in[1] : NULL, o->params[0], o->params[1], o->N,
                          o->width);
}
static inline void layernorm_backward_input(const OpCall *o) {
    ops_layernorm_backward_input(o->s, o->dx, o->so_far, o->dout, o->x, o->params[0], o->stats[0],
                                 o->stats[1], o->N, o->width);
}
static inline void layernorm_backward_weight(const OpCall *o) {
    ops_layernorm_backward_weight(o->s, o->grads[0], o->grads[1], o->dout, o->x, o->stats[0],
                                  o->stats[1], o->N, o->width, o->accumulates[0]);
}
static inline void layernorm_sample_norms(const OpCall *o) {
    ops_layernorm_samples(o->s, o->sums[0], o->sums[1], o->call->norms, o->dout, o->x, o->stats[0],
                          o->stats[1], o->rows, o->T, o->width);
}
static inline void layernorm_sample_sum(const OpCall *o) {
    vector_sample_sum(o, 0);
    vector_sample_sum(o, 1);
}

// -------------------------------------------------------------------------------------------------
// RMSNorm, and the sum before it
static inline void rmsnorm_forward(const OpCall *o) {
    const bool adds = op_sum(o->node) != VALUE_X;
    ops_rmsnorm_forward(o->s, o->out[0], o->stats[0], adds ? o->out[1] : NULL, o->in[0],
                        adds ? o->in[1] : NULL, o->params[0], o->N, o->width,
                        (float)o->call->model->config.eps);
}
static inline void rmsnorm_backward_input(const OpCall *o) {
    ops_rmsnorm_backward_input(o->s, o->dx, o->so_far, o->dout, o->x, o->params[0], o->stats[0],
                               o->N, o->width);
}
static inline void rmsnorm_backward_weight(const OpCall *o) {
    if (o->node->params[0] == NO_TENSOR) { return; }
    ops_rmsnorm_backward_weight(o->s, o->grads[0], o->dout, o->x, o->stats[0], o->N, o->width,
                                o->accumulates[0]);
}
static inline void rmsnorm_sample_norms(const OpCall *o) {
    if (o->node->params[0] == NO_TENSOR) { return; }
    ops_rmsnorm_samples(o->s, o->sums[0], o->call->norms, o->dout, o->x, o->stats[0], o->rows, o->T,
                        o->width);
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
    const Real *before_gelu = o->node->kind == OP_LINEAR_OF_GELU ? o->x : NULL;
    ops_matmul_backward_input(o->s, o->dx, o->dout, o->params[0], before_gelu, o->N, o->in_width,
                              o->width);
}
static inline void linear_backward_weight(const OpCall *o) {
    ops_matmul_backward_weight(o->s, o->grads[0], o->grads[1], o->dout, o->in[0], o->N, o->in_width,
                               o->width, o->accumulates[0]);
}
static inline void linear_sample_norms(const OpCall *o) {
    double *norms = o->call->norms;
    ops_matmul_sample_norms(o->s, norms, o->dout, o->in[0], o->rows, o->T, o->in_width, o->width);
    if (o->sums[1]) { ops_bias_samples(o->s, o->sums[1], norms, o->dout, o->rows, o->T, o->width); }
}
static inline void linear_sample_sum(const OpCall *o) {
    ops_matmul_backward_weight_samples(o->s, o->grads[0], o->dout, o->in[0], o->call->factors,
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
    ops_attention_backward(o->s, o->dx, o->dout, o->in[0], o->out[0], o->stats[0], op_attention(o));
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
    ops_rotary(o->s, o->dout, op_attention(o), &o->call->model->rotary, true);
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
    ops_head_norm_backward_input(o->s, o->dx, o->dout, o->in[0], o->params[0], o->params[1],
                                 o->stats[0], &h);
}
static inline void qk_norm_backward_weight(const OpCall *o) {
    const HeadNorm h = qk_norm_of(o);
    if (o->node->params[0] == NO_TENSOR) { return; }
    ops_head_norm_backward_weight(o->s, o->grads[0], o->grads[1], o->dout, o->in[0], o->stats[0],
                                  &h, o->accumulates[0]);
}
static inline void qk_norm_sample_norms(const OpCall *o) {
    const HeadNorm h = qk_norm_of(o);
    if (o->node->params[0] == NO_TENSOR) { return; }
    ops_head_norm_samples(o->s, o->sums[0], o->sums[1], o->call->norms, o->dout, o->in[0],
                          o->stats[0], &h);
}
static inline void qk_norm_sample_sum(const OpCall *o) {
    vector_sample_sum(o, 0);
    vector_sample_sum(o, 1);
}

// -------------------------------------------------------------------------------------------------
// Activations of the MLP
static inline void relu2_forward(const OpCall *o) {
    ops_relu2_forward(o->s, o->out[0], o->in[0], o->N * o->width);
}
static inline void relu2_backward_input(const OpCall *o) {
    ops_relu2_backward(o->s, o->dx, o->dout, o->in[0], o->N * o->width);
}

// -------------------------------------------------------------------------------------------------
// Sums
static inline void add_forward(const OpCall *o) {
    ops_residual(o->s, o->out[0], o->in[0], o->in[1], o->N * o->width);
}

// -------------------------------------------------------------------------------------------------
// Experts
static inline Route op_route(const OpCall *o) {
    return route_at(o->stats[0], o->rows * o->T, gpt_choices(&o->call->model->config));
}
// The rows of experts: those of this rank's tokens, or those that came from others.
static inline ExpertRows op_expert_rows(const OpCall *o) {
    const GptModel *m = o->call->model;
    const ExpertRows r = {.counts = (const int32_t *)(const void *)o->stats[0],
                          .sources = gpt_expert_ranks(&m->config),
                          .experts = m->quantity[OF_OWN_EXPERTS]};
    return r;
}
static inline void router_forward(const OpCall *o) {
    const GptConfig *c = &o->call->model->config;
    ops_route(o->s, op_route(o), (int32_t *)(void *)o->stats[1], (float *)(void *)o->out[0],
              o->in[0], o->params[0], o->params[1], o->in_width, gpt_router(c));
}
static inline void router_backward_input(const OpCall *o) {
    const GptConfig *c = &o->call->model->config;
    ops_route_backward_input(o->s, o->dx, o->so_far, (float *)(void *)o->out[0], op_route(o),
                             o->params[0], o->in_width, gpt_router(c), o->call->router);
}
static inline void router_backward_weight(const OpCall *o) {
    const GptConfig *c = &o->call->model->config;
    ops_route_backward_weight(o->s, o->grads[0], o->grads[1], (const float *)(void *)o->out[0],
                              op_route(o), (const int32_t *)(const void *)o->stats[1], o->in[0],
                              o->in_width, gpt_router(c), o->accumulates[0]);
}
static inline void dispatch_forward(const OpCall *o) {
    ops_dispatch(o->s, o->out[0], o->in[0], op_route(o), o->width);
    // the next operations ask on the host for the loads, or a message (run_exchange)
    if (!o->call->model->arch->exchanges) { ops_wait_loads(o->s); }
}
static inline void dispatch_backward_input(const OpCall *o) {
    ops_dispatch_backward(o->s, o->dx, o->so_far, o->dout, op_route(o), o->width);
}
static inline void experts_forward(const OpCall *o) {
    Real *gelu = o->node->kind == OP_EXPERTS_GELU ? o->out[1] : NULL;
    // in training a rank with a single token may have rows of other ranks
    const bool one = o->call->cache.most && o->rows * o->T == 1;
    ops_experts_forward(o->s, o->out[0], gelu, o->in[0], o->params[0], op_expert_rows(o),
                        o->in_width, o->width, one);
}
static inline void experts_backward_input(const OpCall *o) {
    const Real *before_gelu = o->node->kind == OP_EXPERTS_OF_GELU ? o->x : NULL;
    ops_experts_backward_input(o->s, o->dx, o->dout, o->params[0], before_gelu, op_expert_rows(o),
                               o->in_width, o->width);
}
static inline void experts_backward_weight(const OpCall *o) {
    ops_experts_backward_weight(o->s, o->grads[0], o->dout, o->in[0], op_expert_rows(o),
                                o->in_width, o->width, o->accumulates[0]);
}
// A token's choices are computed once, wherever.
static inline double experts_flops(const GptModel *m, const UnitSpec *u, const OpNode *n,
                                   double T) {
    (void)T;
    return 2.0 * (double)gpt_choices(&m->config) *
           (double)(gpt_dim(m, u->values[n->in[0]].width) * gpt_dim(m, u->values[n->out[0]].width));
}
static inline void combine_forward(const OpCall *o) {
    ops_combine_rows(o->s, o->out[0], o->in[0], op_route(o), o->width);
}
static inline void combine_backward_input(const OpCall *o) {
    ops_combine_rows_backward(o->s, o->dx, o->dout, o->in[0], op_route(o), o->width);
}

// SwiGLU of an MLP, or of experts
static inline int64_t swiglu_rows(const OpCall *o) {
    return o->node->stats[0] ? expert_rows_sum(op_expert_rows(o)) : o->N;
}
static inline void swiglu_forward(const OpCall *o) {
    ops_swiglu_forward(o->s, o->out[0], o->in[0], swiglu_rows(o), o->width);
}
static inline void swiglu_backward_input(const OpCall *o) {
    ops_swiglu_backward(o->s, o->dx, o->dout, o->in[0], swiglu_rows(o), o->width);
}

// -------------------------------------------------------------------------------------------------
// Classifier
static inline void classifier_run(const UnitCall *c, const OpNode *n, ClassifierResults r,
                                  Real *logits) {
    const OpCall o = op_call(c, n);
    ops_classifier(o.s, (float *)c->buffers.value[n->out[0]], r.dx, r.dweight,
                   r.dlogits ? r.dlogits : logits, o.in[0], o.params[0], c->targets, o.N, r.each,
                   o.in_width, c->model->config.vocab, c->model->config.padded_vocab, r.scale,
                   c->model->arch->softcap, r.accumulate);
}
static inline void classifier_backward_input(const OpCall *o) {
    ClassifierResults results = o->call->classifier;
    results.dx = o->dx;
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
// its terms get its gradient without an input part: op_backward_input()
#define OPS_ADD        {.part = {add_forward}}
#define OPS_ROUTER     {.part = {router_forward, router_backward_input, router_backward_weight},   \
                        .flops = linear_flops}
#define OPS_DISPATCH   {.part = {dispatch_forward, dispatch_backward_input}}
#define OPS_EXPERTS    {.part = {experts_forward, experts_backward_input,                          \
                        experts_backward_weight}, .flops = experts_flops}
#define OPS_COMBINE    {.part = {combine_forward, combine_backward_input}}
#define OPS_EXCHANGE   {.part = {NULL}} // the executor sends what it says
// unit_losses() is its forward part, in evaluations; dp.h has its parts of samples
#define OPS_CLASSIFIER {.part = {NULL, classifier_backward_input}, .flops = classifier_flops}
// clang-format on
#define OP_ROW(KIND, FUNCTIONS, ...) OPS_##FUNCTIONS,
static const OpKind op_kinds[OP_KINDS] = {OP_TABLE(OP_ROW)};
#undef OP_ROW
#define OP_INPUTS(KIND, FUNCTIONS, in, ...) in,
static const int op_inputs[OP_KINDS] = {OP_TABLE(OP_INPUTS)};
#undef OP_INPUTS

// -------------------------------------------------------------------------------------------------
// Passes over a unit

// The input part keeps where each value's gradient is: at[value]; NULL if no operation has written
// it yet, or none will read it. The gradient of a sum is also its terms', without a copy: so a
// gradient may lie in the buffer of another value.

static inline int64_t value_elements(const UnitCall *c, int value) {
    return c->rows * c->T * value_width(c->model, &c->unit->values[value]);
}
// Moves a value's gradient, if there is one, into the value's own buffer. The gradients of other
// values that lie there are moved into theirs first.
static inline void move_to_own_buffer(const UnitCall *c, Real **at, int value) {
    Real *own = gradient_buffer(c, value), *from = at[value];
    if (from == own) { return; }
    for (int v = 0; v < c->unit->value_count; v++) {
        if (at[v] == own) { move_to_own_buffer(c, at, v); }
    }
    if (from) { ops_copy(c->stream, own, from, value_elements(c, value) * ops_real_bytes()); }
    at[value] = own;
}
static inline void op_backward_input(const UnitCall *c, const OpNode *n, Real **at) {
    const OpKind *kind = &op_kinds[n->kind];
    const int x = op_x(n), sum = op_sum(n);
    // the weight part will read it there
    if (kind->part[PART_BACKWARD_WEIGHT]) { move_to_own_buffer(c, at, n->out[0]); }
    if (kind->part[PART_BACKWARD_INPUT]) {
        OpCall o = op_call(c, n);
        o.so_far = at[x];
        if (x != n->out[0]) { at[x] = NULL; } // else it is changed in place
        move_to_own_buffer(c, at, x);
        o.dout = at[n->out[0]];
        kind->part[PART_BACKWARD_INPUT](&o);
    }
    for (int i = 0; sum != VALUE_X && i < 2; i++) {
        const int term = n->in[i];
        const Real *so_far = at[term];
        at[term] = so_far && term != sum ? NULL : at[sum];
        if (at[term]) { continue; }
        move_to_own_buffer(c, at, term);
        ops_residual(c->stream, at[term], so_far, at[sum], value_elements(c, term));
    }
    for (int i = 0; i < 2; i++) {
        const int made = n->out[i]; // no other operation reads its gradient
        if (made != VALUE_X && made != n->in[0] && made != n->in[1]) { at[made] = NULL; }
    }
}

// Does an operation work on a value without elements? Then it is left out.
static inline bool op_is_empty(const UnitCall *c, const OpNode *n) {
    bool empty = false;
    for (int i = 0; i < 2; i++) {
        empty = empty || !value_width(c->model, &c->unit->values[n->in[i]]) ||
                !value_width(c->model, &c->unit->values[n->out[i]]);
    }
    return empty;
}
// Does an operation only make the unit's output, or a term of it? The backward pass reads neither.
static inline bool op_makes_output(const UnitSpec *u, const OpNode *n) {
    bool is_term = false;
    if (n->out[0] == VALUE_Y) { return true; }
    for (int i = 0; i < u->op_count; i++) {
        const OpNode *reader = &u->ops[i];
        for (int k = 0; k < op_inputs[reader->kind]; k++) {
            if (reader->in[k] != n->out[0]) { continue; }
            if (reader->kind != OP_ADD || reader->out[0] != VALUE_Y) { return false; }
            is_term = true;
        }
    }
    return is_term && !n->stats[0];
}
// The same, while one part of a unit with messages goes back. What later parts have read has its
// gradient in its own buffer; so has at the end what this part has read.
static inline void op_backward_of_part(const UnitCall *c, const OpNode *n, int of, Real **at) {
    for (int i = 0; i < op_inputs[n->kind] && of > c->part; i++) {
        at[n->in[i]] = gradient_buffer(c, n->in[i]);
    }
    if (of > c->part) { return; }
    if (of == c->part && n->kind != OP_EXCHANGE) {
        op_backward_input(c, n, at);
        return;
    }
    for (int i = 0; i < 2; i++) {
        if (n->out[i] != VALUE_X) { move_to_own_buffer(c, at, n->out[i]); }
    }
    if (at[VALUE_X]) { move_to_own_buffer(c, at, VALUE_X); }
}

// Runs one part of all operations: the forward part from the first to the last, the others from the
// last to the first. Of a unit with messages, forward and input parts are of the operations of one
// part of the unit. Recomputation leaves out operations that only make the unit's output. At the
// end each gradient that the weight part, a part of the unit before this one, or the unit below
// reads is in its value's own buffer: that of x, too, since the first operation can read no other
// value.
static inline void unit_pass(const UnitCall *c, OpPart part) {
    const int count = c->unit->op_count;
    Real *at[MOST_VALUES] = {NULL};
    at[VALUE_Y] = gradient_buffer(c, VALUE_Y);
    for (int i = 0; i < count; i++) {
        const int k = part == PART_FORWARD ? i : count - 1 - i, of = unit_part(c->unit, k);
        const OpNode *n = &c->unit->ops[k];
        const bool skipped =
            (part == PART_FORWARD && of != c->part) ||
            (part == PART_BACKWARD_WEIGHT && c->weights && !(c->weights >> of & 1)) ||
            (c->recompute && op_makes_output(c->unit, n));
        if (op_is_empty(c, n)) { continue; }
        if (part == PART_BACKWARD_INPUT) {
            op_backward_of_part(c, n, of, at);
        } else if (op_kinds[n->kind].part[part] && !skipped) {
            const OpCall o = op_call(c, n);
            op_kinds[n->kind].part[part](&o);
        }
    }
}

// Does the host have to know how many rows experts have, to start the operations of a part of a
// unit, or (part < 0) of all parts? Such work differs from time to time.
static inline bool unit_counts_rows(const UnitSpec *u, int part) {
    bool counts = false;
    for (int i = 0; i < u->op_count; i++) {
        counts |= op_kinds[u->ops[i].kind].part[PART_FORWARD] == experts_forward &&
                  (part < 0 || part == unit_part(u, i));
    }
    return counts;
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
            b.value[v] = (char *)b.value[v] + row * value_width(c->model, spec) * size;
        }
    }
    for (int g = GRADIENT_X; g < c->unit->gradient_count; g++) {
        const int64_t width = gradient_width(c->model, &c->unit->gradients[g]);
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
// Those that experts have, to which tokens are routed.
static inline double gpt_experts_flops(const GptModel *m, UnitClass c, double tokens, double T) {
    const UnitSpec *spec = gpt_unit_spec(m, c);
    double flops = 0;
    for (int i = 0; i < spec->op_count; i++) {
        const OpNode *n = &spec->ops[i];
        if (op_kinds[n->kind].flops == experts_flops) { flops += experts_flops(m, spec, n, T); }
    }
    return tokens * flops;
}
// A backward pass has two products for each product of the forward pass.
static inline double gpt_step_flops(const GptModel *m, double tokens, double T) {
    return 3.0 * (m->config.layers * gpt_forward_flops(m, UNIT_BLOCK, tokens, T) +
                  gpt_forward_flops(m, UNIT_HEAD, tokens, T));
}

#endif
