// unit.h: the forward and backward passes of a unit, by walking through its table of operations
// (architecture.h). `op_kinds` has a row for each kind of operation: how it computes its output,
// the gradients of its inputs and of its parameters, and what each sample adds to these (dp.h).
//
// Backward  has two parts. The input part computes the gradient of the unit's input, without the
//           gradients of parameters. The weight part computes those. It may run any time later,
//           from what the input part left in gradient buffers. One exception: the classifier's
//           input part also computes the gradient of its table, because its logits exist only for a
//           chunk of rows at a time. (dp.h has another exception.)
//
// A new kind of operation is a row of op_kinds, and its functions.
#ifndef UNIT_H
#define UNIT_H

#include "model/gpt.h" // sizes and offsets

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
// Reserves the values of N rows, and the gradients that are kept with them.
static inline void unit_carve_values(UnitBuffers *b, Arena *a, const GptModel *m, UnitClass c,
                                     int64_t N) {
    const UnitSpec *spec = gpt_unit_spec(m, c);
    for (int v = VALUE_FIRST; v < spec->value_count; v++) {
        const int64_t n = N * gpt_dim(m, spec->values[v].width);
        b->value[v] = spec->values[v].type == VALUE_REALS ? (void *)arena_reals(a, n)
                                                          : (void *)arena_floats(a, n);
    }
    for (int g = GRADIENT_FIRST; g < spec->gradient_count; g++) {
        const GradientSpec *gradient = &spec->gradients[g];
        if (gradient->with_values) {
            b->gradient[g] = arena_reals(a, N * gpt_dim(m, gradient->width));
        }
    }
}
// Reserves the other gradients.
static inline void unit_carve_gradients(UnitBuffers *b, Arena *a, const GptModel *m, UnitClass c,
                                        int64_t N) {
    const UnitSpec *spec = gpt_unit_spec(m, c);
    for (int g = GRADIENT_FIRST; g < spec->gradient_count; g++) {
        const GradientSpec *gradient = &spec->gradients[g];
        if (!gradient->with_values) {
            b->gradient[g] = arena_reals(a, N * gpt_dim(m, gradient->width));
        }
    }
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
                            .logits = logits};
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
    bool recompute;               // forward: only what the backward pass reads
    ClassifierResults classifier; // backward
    unsigned written;             // backward: values that have a gradient already
    // of samples
    const UnitSums *sums;
    double *norms;        // [rows], squared
    const float *factors; // [rows]
} UnitCall;

static inline int64_t call_rows(const UnitCall *c) { return c->rows * c->T; }
static inline int64_t call_width(const UnitCall *c, int value) {
    return gpt_dim(c->model, c->unit->values[value].width);
}
static inline Real *call_value(const UnitCall *c, int value) {
    return (Real *)c->buffers.value[value];
}
static inline float *call_stats(const UnitCall *c, const OpNode *n, int i) {
    return (float *)c->buffers.value[n->stats[i]];
}
static inline Real *call_gradient(const UnitCall *c, int value) {
    return c->buffers.gradient[c->unit->values[value].gradient];
}
static inline const Real *unit_param(const GptModel *m, const UnitStates *u, int tensor) {
    return tensor == NO_TENSOR
               ? NULL
               : real_at_const(u->params[tensor_class(m, tensor)], m->tensor_offset[tensor]);
}
static inline float *unit_grad(const GptModel *m, const UnitStates *u, int tensor) {
    float *grads = tensor == NO_TENSOR ? NULL : u->grads[tensor_class(m, tensor)];
    return grads ? grads + m->tensor_offset[tensor] : NULL;
}
static inline const Real *call_param(const UnitCall *c, const OpNode *n, int i) {
    return unit_param(c->model, c->states, n->params[i]);
}
static inline float *call_grad(const UnitCall *c, const OpNode *n, int i) {
    return unit_grad(c->model, c->states, n->params[i]);
}
static inline bool call_accumulates(const UnitCall *c, const OpNode *n, int i) {
    return n->params[i] != NO_TENSOR && c->states->accumulate[tensor_class(c->model, n->params[i])];
}
// Returns whether the gradient of a value is written for the first time in this backward pass.
static inline bool call_first_write(UnitCall *c, int value) {
    const unsigned bit = 1u << value;
    const bool first = !(c->written & bit);
    c->written |= bit;
    return first;
}

// -------------------------------------------------------------------------------------------------
// Embedding
static inline void embedding_forward(UnitCall *c, const OpNode *n) {
    ops_embedding_forward(c->stream, call_value(c, n->out[0]), c->tokens, call_param(c, n, 0),
                          call_param(c, n, 1), c->rows, c->T, call_width(c, n->out[0]));
}
// factors may be NULL (ops.h).
static inline void embedding_backward(const UnitCall *c, const OpNode *n, const float *factors) {
    ops_embedding_backward(
        c->stream, call_grad(c, n, 0), call_grad(c, n, 1), call_gradient(c, n->out[0]), c->tokens,
        factors, c->rows, c->T, call_width(c, n->out[0]), c->model->config.padded_vocab,
        c->model->config.max_seq_len, call_accumulates(c, n, 0), call_accumulates(c, n, 1));
}
static inline void embedding_backward_weight(UnitCall *c, const OpNode *n) {
    embedding_backward(c, n, NULL);
}

// -------------------------------------------------------------------------------------------------
// Layernorm, and the sum before it
static inline void layernorm_forward(UnitCall *c, const OpNode *n) {
    const bool adds = n->kind == OP_ADD_LAYERNORM;
    ops_layernorm_forward(c->stream, call_value(c, n->out[0]), call_stats(c, n, 0),
                          call_stats(c, n, 1), adds ? call_value(c, n->out[1]) : NULL,
                          call_value(c, n->in[0]), adds ? call_value(c, n->in[1]) : NULL,
                          call_param(c, n, 0), call_param(c, n, 1), call_rows(c),
                          call_width(c, n->out[0]));
}
// Returns the value that is normalised.
static inline int layernorm_input(const OpNode *n) {
    return n->kind == OP_ADD_LAYERNORM ? n->out[1] : n->in[0];
}
// Adds the gradient of a value that is a sum to that of one of its terms.
static inline void add_to_gradient(UnitCall *c, int term, const Real *gradient) {
    Real *to = call_gradient(c, term);
    const int64_t elements = call_rows(c) * call_width(c, term);
    if (to == gradient) { return; }
    if (call_first_write(c, term)) {
        ops_copy(c->stream, to, gradient, (size_t)elements * ops_real_bytes());
    } else {
        ops_residual(c->stream, to, to, gradient, elements);
    }
}
static inline void layernorm_backward_input(UnitCall *c, const OpNode *n) {
    const int in = layernorm_input(n);
    Real *din = call_gradient(c, in);
    const int64_t N = call_rows(c), width = call_width(c, in);
    if (call_first_write(c, in)) {
        ops_zero(c->stream, din, (size_t)(N * width) * ops_real_bytes());
    }
    ops_layernorm_backward_input(c->stream, din, call_gradient(c, n->out[0]), call_value(c, in),
                                 call_param(c, n, 0), call_stats(c, n, 0), call_stats(c, n, 1), N,
                                 width);
    for (int i = 0; n->kind == OP_ADD_LAYERNORM && i < 2; i++) {
        add_to_gradient(c, n->in[i], din);
    }
}
static inline void layernorm_backward_weight(UnitCall *c, const OpNode *n) {
    ops_layernorm_backward_weight(c->stream, call_grad(c, n, 0), call_grad(c, n, 1),
                                  call_gradient(c, n->out[0]), call_value(c, layernorm_input(n)),
                                  call_stats(c, n, 0), call_stats(c, n, 1), call_rows(c),
                                  call_width(c, n->out[0]), call_accumulates(c, n, 0));
}
static inline void layernorm_sample_norms(UnitCall *c, const OpNode *n) {
    ops_layernorm_samples(c->stream, c->sums->tensor[n->params[0]], c->sums->tensor[n->params[1]],
                          c->norms, call_gradient(c, n->out[0]), call_value(c, layernorm_input(n)),
                          call_stats(c, n, 0), call_stats(c, n, 1), c->rows, c->T,
                          call_width(c, n->out[0]));
}
// Adds each sample's gradient of a vector, times its factor.
static inline void vector_sample_sum(const UnitCall *c, const OpNode *n, int i) {
    const int tensor = n->params[i];
    if (tensor == NO_TENSOR) { return; }
    ops_accumulate_samples(c->stream, call_grad(c, n, i), c->sums->tensor[tensor], c->factors,
                           c->rows, c->model->tensor_elements[tensor], call_accumulates(c, n, i));
}
static inline void layernorm_sample_sum(UnitCall *c, const OpNode *n) {
    vector_sample_sum(c, n, 0);
    vector_sample_sum(c, n, 1);
}

// -------------------------------------------------------------------------------------------------
// Linear layers
static inline void linear_forward(UnitCall *c, const OpNode *n) {
    Real *gelu = n->kind == OP_LINEAR_GELU ? call_value(c, n->out[1]) : NULL;
    ops_matmul_forward(c->stream, call_value(c, n->out[0]), gelu, call_value(c, n->in[0]),
                       call_param(c, n, 0), call_param(c, n, 1), call_rows(c),
                       call_width(c, n->in[0]), call_width(c, n->out[0]));
}
static inline void linear_backward_input(UnitCall *c, const OpNode *n) {
    const bool of_gelu = n->kind == OP_LINEAR_OF_GELU;
    const int in = of_gelu ? n->in[1] : n->in[0];
    const bool first = call_first_write(c, in);
    assert(first); // the product does not add
    (void)first;
    ops_matmul_backward_input(c->stream, call_gradient(c, in), call_gradient(c, n->out[0]),
                              call_param(c, n, 0), of_gelu ? call_value(c, in) : NULL, call_rows(c),
                              call_width(c, in), call_width(c, n->out[0]));
}
static inline void linear_backward_weight(UnitCall *c, const OpNode *n) {
    ops_matmul_backward_weight(c->stream, call_grad(c, n, 0), call_grad(c, n, 1),
                               call_gradient(c, n->out[0]), call_value(c, n->in[0]), call_rows(c),
                               call_width(c, n->in[0]), call_width(c, n->out[0]),
                               call_accumulates(c, n, 0));
}
static inline void linear_sample_norms(UnitCall *c, const OpNode *n) {
    const Real *dout = call_gradient(c, n->out[0]);
    const int64_t width = call_width(c, n->out[0]);
    ops_matmul_sample_norms(c->stream, c->norms, dout, call_value(c, n->in[0]), c->rows, c->T,
                            call_width(c, n->in[0]), width);
    if (n->params[1] == NO_TENSOR) { return; }
    ops_bias_samples(c->stream, c->sums->tensor[n->params[1]], c->norms, dout, c->rows, c->T,
                     width);
}
static inline void linear_sample_sum(UnitCall *c, const OpNode *n) {
    ops_matmul_backward_weight_samples(c->stream, call_grad(c, n, 0), call_gradient(c, n->out[0]),
                                       call_value(c, n->in[0]), c->factors, c->rows, c->T,
                                       call_width(c, n->in[0]), call_width(c, n->out[0]),
                                       call_accumulates(c, n, 0));
    vector_sample_sum(c, n, 1);
}
static inline double linear_flops(const GptModel *m, const UnitSpec *u, const OpNode *n, double T) {
    (void)T;
    return 2.0 * (double)gpt_dim(m, u->values[n->in[0]].width) *
           (double)gpt_dim(m, u->values[n->out[0]].width);
}

// -------------------------------------------------------------------------------------------------
// Attention
static inline void attention_forward(UnitCall *c, const OpNode *n) {
    ops_attention_forward(c->stream, call_value(c, n->out[0]), call_stats(c, n, 0),
                          call_value(c, n->in[0]), c->rows, c->T, call_width(c, n->out[0]),
                          c->model->config.heads);
}
static inline void attention_backward_input(UnitCall *c, const OpNode *n) {
    call_first_write(c, n->in[0]);
    ops_attention_backward(c->stream, call_gradient(c, n->in[0]), call_gradient(c, n->out[0]),
                           call_value(c, n->in[0]), call_value(c, n->out[0]), call_stats(c, n, 0),
                           c->rows, c->T, call_width(c, n->out[0]), c->model->config.heads);
}
static inline double attention_flops(const GptModel *m, const UnitSpec *u, const OpNode *n,
                                     double T) {
    return 2.0 * (double)gpt_dim(m, u->values[n->out[0]].width) * T; // causal: half of 2 * 2 T C
}

// -------------------------------------------------------------------------------------------------
// Sums
static inline void add_forward(UnitCall *c, const OpNode *n) {
    ops_residual(c->stream, call_value(c, n->out[0]), call_value(c, n->in[0]),
                 call_value(c, n->in[1]), call_rows(c) * call_width(c, n->out[0]));
}
static inline void add_backward_input(UnitCall *c, const OpNode *n) {
    const Real *dout = call_gradient(c, n->out[0]);
    add_to_gradient(c, n->in[0], dout);
    add_to_gradient(c, n->in[1], dout);
}

// -------------------------------------------------------------------------------------------------
// Classifier
static inline void classifier_run(const UnitCall *c, const OpNode *n, ClassifierResults r,
                                  Real *logits) {
    ops_classifier(c->stream, (float *)c->buffers.value[n->out[0]], r.dx, r.dweight,
                   r.dlogits ? r.dlogits : logits, call_value(c, n->in[0]), call_param(c, n, 0),
                   c->targets, call_rows(c), r.each, call_width(c, n->in[0]),
                   c->model->config.vocab, c->model->config.padded_vocab, r.scale, r.accumulate);
}
static inline void classifier_backward_input(UnitCall *c, const OpNode *n) {
    ClassifierResults results = c->classifier;
    results.dx = call_gradient(c, n->in[0]);
    call_first_write(c, n->in[0]);
    classifier_run(c, n, results, NULL);
}
static inline double classifier_flops(const GptModel *m, const UnitSpec *u, const OpNode *n,
                                      double T) {
    (void)T;
    return 2.0 * (double)(m->config.padded_vocab * gpt_dim(m, u->values[n->in[0]].width));
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
    const char *name;
    // NULL: the kind has no such part. A kind without parameters has only the first two.
    void (*part[PARTS])(UnitCall *c, const OpNode *n);
    // floating-point operations of the forward part, for one token of a sample of T tokens; NULL: 0
    double (*flops)(const GptModel *m, const UnitSpec *u, const OpNode *n, double T);
} OpKind;
static const OpKind op_kinds[OP_KINDS] = {
    // dp.h has its parts of samples, since its table may be tied
    {.name = "embedding", .part = {embedding_forward, NULL, embedding_backward_weight}},
#define LAYERNORM                                                                                  \
    {                                                                                              \
        layernorm_forward, layernorm_backward_input, layernorm_backward_weight,                    \
            layernorm_sample_norms, layernorm_sample_sum                                           \
    }
    {.name = "layernorm", .part = LAYERNORM},
    {.name = "add + layernorm", .part = LAYERNORM},
#define LINEAR                                                                                     \
    {                                                                                              \
        linear_forward, linear_backward_input, linear_backward_weight, linear_sample_norms,        \
            linear_sample_sum                                                                      \
    }
    {.name = "linear", .part = LINEAR, .flops = linear_flops},
    {.name = "linear + GELU", .part = LINEAR, .flops = linear_flops},
    {.name = "linear of GELU", .part = LINEAR, .flops = linear_flops},
    {.name = "attention",
     .part = {attention_forward, attention_backward_input},
     .flops = attention_flops},
    {.name = "add", .part = {add_forward, add_backward_input}},
    // unit_losses() is its forward part, in evaluations; dp.h has its parts of samples
    {.name = "classifier", .part = {NULL, classifier_backward_input}, .flops = classifier_flops},
};

// -------------------------------------------------------------------------------------------------
// Passes over a unit

// Runs one part of all operations: the forward part from the first to the last, the others from the
// last to the first. Recomputation leaves out operations that only make the unit's output.
static inline void unit_pass(UnitCall *c, OpPart part) {
    const int count = c->unit->op_count;
    c->written = 1u << VALUE_Y;
    for (int i = 0; i < count; i++) {
        const OpNode *n = &c->unit->ops[part == PART_FORWARD ? i : count - 1 - i];
        const bool skipped = c->recompute && n->out[0] == VALUE_Y;
        if (op_kinds[n->kind].part[part] && !skipped) { op_kinds[n->kind].part[part](c, n); }
    }
}

// Returns the operation of a unit that is of this kind.
static inline const OpNode *unit_op(const UnitSpec *u, OpKindId kind) {
    const OpNode *n = u->ops;
    while (n->kind != kind) { n++; }
    return n;
}
// Returns the model's classifier, which is in the head.
static inline const OpNode *gpt_classifier(const GptModel *m) {
    return unit_op(gpt_unit_spec(m, UNIT_HEAD), OP_CLASSIFIER);
}
// Computes the losses alone (evaluation). logits is a buffer (N, Vp), or NULL if the workspace
// holds them.
static inline void unit_losses(const UnitCall *c, Real *logits) {
    const ClassifierResults none = {.each = call_rows(c)};
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
    const OpNode *n = gpt_classifier(m);
    const int64_t width = gpt_width(m);
    ops_matmul_forward(s, logits, NULL, classified,
                       real_at_const(unit_param(m, u, n->params[0]), first * width), NULL, rows,
                       width, count);
}

// Returns the buffers of the rows from `row` on.
static inline UnitBuffers unit_buffers_from(const UnitCall *c, int64_t row) {
    UnitBuffers b = c->buffers;
    for (int v = 0; v < c->unit->value_count; v++) {
        const int64_t at = row * call_width(c, v);
        if (!b.value[v]) { continue; }
        b.value[v] = c->unit->values[v].type == VALUE_FLOATS
                         ? (void *)((float *)b.value[v] + at)
                         : (void *)real_at((Real *)b.value[v], at);
    }
    for (int g = GRADIENT_X; g < c->unit->gradient_count; g++) {
        if (!b.gradient[g]) { continue; }
        b.gradient[g] =
            real_at(b.gradient[g], row * gpt_dim(c->model, c->unit->gradients[g].width));
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
// A backward pass has two products for each product of the forward pass.
static inline double gpt_step_flops(const GptModel *m, double tokens, double T) {
    return 3.0 * ((double)m->config.layers * gpt_forward_flops(m, UNIT_BLOCK, tokens, T) +
                  gpt_forward_flops(m, UNIT_HEAD, tokens, T));
}

#endif
