// architecture.h: what a model consists of, as tables. An architecture is
//   tensors   the parameters of each storage: shape, initial values
//   units     embedding, block and head: each has a table of operations (OpNode) on named values
//             (ValueSpec), and the buffers of the gradients that its backward pass makes
//             (GradientSpec)
// Everything that depends on the architecture follows from these tables: sizes and offsets, files,
// initial values, floating-point operations, activation memory, the forward and backward passes,
// and the gradients of single samples (unit.h).
//
// Values      A unit reads VALUE_X and makes VALUE_Y, both (N, channels), where N = rows * T. All
//             other values are saved by the forward pass for the backward pass.
// Gradients   A value has the gradient buffer that its row names. Two values may use one buffer,
//             if their gradients are never needed at the same time. A value that only a fused
//             operation reads has none.
// Order       The forward pass runs a table from the top to the bottom, the backward pass from the
//             bottom to the top. If several operations read a value, the first of them that the
//             backward pass reaches writes its gradient, and the others add to it.
//
// A new architecture is a table of tensors, a table for each unit (gpt2.h, llama.h and nano.h are
// examples), and a row of `architectures` in architectures.h (docs/contributing.md shows each
// step).
#ifndef ARCHITECTURE_H
#define ARCHITECTURE_H

#include "base/base.h"

typedef enum { UNIT_EMBEDDING, UNIT_BLOCK, UNIT_HEAD, UNIT_CLASSES } UnitClass;
// Blocks have a storage each, and one of their experts, unless they share them; every other class
// is one storage.
typedef enum {
    STORAGE_WTE,
    STORAGE_WPE,
    STORAGE_BLOCK,
    STORAGE_EXPERTS,
    STORAGE_LNF,
    STORAGE_HEAD, // the classifier's table, if it is not wte
    STORAGE_CLASSES,
    NO_STORAGE = STORAGE_CLASSES
} StorageClass;

// A dimension is a multiple of one of these quantities.
typedef enum {
    OF_ONE,
    OF_CHANNELS,
    OF_VOCAB,
    OF_POSITIONS,
    OF_HEADS,        // of queries
    OF_NORMED_HEADS, // of queries and of keys
    OF_HEAD_DIM,
    OF_Q,   // all heads of queries
    OF_KV,  // all heads of keys, or of values
    OF_QKV, // queries, keys and values
    OF_FFN, // inner width of the MLP
    OF_EXPERTS,
    OF_CHOICES,     // experts that a token goes to
    OF_EXPERT_FFN,  // inner width of an expert
    OF_OWN_EXPERTS, // that a rank has: all, or --expert-parallel's part
    OF_ARRIVALS,    // rows that they get at once for each token of a rank, at most
    OF_ROUTE,       // numbers that say where a token goes (ops.h: Route)
    OF_SHARED,      // 1 if there are experts to which all tokens go, else 0
    OF_SHARED_FFN,  // inner width of all these together
    QUANTITIES
} Quantity;
typedef struct {
    int times;
    Quantity of;
} Dim;

// Biases that choose experts begin with 0 (balanced) and count loads, not gradients.
// Random values have a normal distribution with this standard deviation, divided by sqrt(2 L) for
// the layers that write to the residual stream; or a uniform one, where the deviation is divided by
// sqrt(channels).
typedef enum {
    INIT_ZERO,
    INIT_BALANCED,
    INIT_ONE,
    INIT_NORMAL,
    INIT_RESIDUAL,
    INIT_UNIFORM
} TensorInit;
enum { NO_TENSOR = -1, MOST_TENSORS = 24, MOST_RANGES = 3 };
// A run of a tensor's rows that is a matrix of its own, such as q of a fused qkv. A vector's rows
// have one element. Names of Hugging Face's tensors and optimizers of whole matrices refer to it.
typedef struct {
    const char *name;
    Dim rows;
} RowRange;
typedef struct {
    const char *name;
    StorageClass storage; // NO_STORAGE: this architecture does not have the tensor
    Dim copies;           // such matrices, one after the other; none: 1
    Dim rows, cols;       // without rows: a vector, to which no weight decay applies
    // all rows of a copy, in their order; none: the tensor is one matrix, or one vector
    RowRange ranges[MOST_RANGES];
    TensorInit init;
    double deviation; // 0: 0.02
} TensorSpec;

// A boundary is VALUE_X or VALUE_Y: its memory belongs to the micro-batch, not to the unit.
typedef enum { VALUE_REALS, VALUE_FLOATS, VALUE_BOUNDARY } ValueType;
enum { VALUE_X, VALUE_Y, VALUE_FIRST, MOST_VALUES = 32 };
typedef struct {
    const char *name;
    ValueType type; // of its elements: compute precision, or fp32
    Dim width;      // elements of each row
    Dim rows;       // rows of each token; none: 1
    bool once;      // the value has one row for all tokens
    int gradient;   // its buffer; NO_GRADIENT: no operation makes its gradient
} ValueSpec;

// Buffers of gradients, in compute precision. The input part of a backward pass fills them, and the
// weight part reads them, possibly much later.
enum { NO_GRADIENT, GRADIENT_X, GRADIENT_Y, GRADIENT_FIRST, MOST_GRADIENTS = 24 };
typedef struct {
    const char *name;
    Dim width, rows;
    bool with_values; // the buffer belongs to the micro-batch's values, and is kept with them
    // A value whose memory is free when the unit below needs this buffer, and which is as wide.
    // With flat clipping (dp.h) the gradient is kept there until the weight part, in the unit
    // above. VALUE_X: none, since the weight part of clipped samples does not read it.
    int kept_in;
} GradientSpec;

// The kinds of operations: what unit.h calls their functions, how many inputs, outputs, statistics
// and parameters they have, and what they compute.
// clang-format off
//     kind           functions    in out stats params
#define OP_TABLE(OP)                                                                               \
    /* out = rows of params[0] by token [+ rows of params[1] by position] */                       \
    OP(EMBEDDING,      EMBEDDING,   0, 1, 0, 2)                                                    \
    /* out = layernorm(in) with gain params[0] and bias params[1] */                               \
    OP(LAYERNORM,      LAYERNORM,   1, 1, 2, 2)                                                    \
    /* out[1] = in[0] + in[1]; out[0] = layernorm(out[1]) */                                       \
    OP(ADD_LAYERNORM,  LAYERNORM,   2, 2, 2, 2)                                                    \
    /* out = rmsnorm(in) [with gain params[0]] */                                                  \
    OP(RMSNORM,        RMSNORM,     1, 1, 1, 1)                                                    \
    /* out[1] = in[0] + in[1]; out[0] = rmsnorm(out[1]) */                                         \
    OP(ADD_RMSNORM,    RMSNORM,     2, 2, 1, 1)                                                    \
    /* out = in params[0]^T [+ params[1]] */                                                       \
    OP(LINEAR,         LINEAR,      1, 1, 0, 2)                                                    \
    /* out[0] = in params[0]^T + params[1]; out[1] = GELU(out[0]) */                               \
    OP(LINEAR_GELU,    LINEAR,      1, 2, 0, 2)                                                    \
    /* OP_LINEAR, where in[0] = GELU(in[1]); its backward pass includes GELU's */                  \
    OP(LINEAR_OF_GELU, LINEAR,      2, 1, 0, 2)                                                    \
    /* in = out: q and k turned by their positions */                                              \
    OP(ROTARY,         ROTARY,      1, 1, 0, 0)                                                    \
    /* out = in, its q and k normed [with gains params[0], params[1]] and turned */                \
    OP(HEAD_NORM,      HEAD_NORM,   1, 1, 1, 2)                                                    \
    /* out = causal attention(in) */                                                               \
    OP(ATTENTION,      ATTENTION,   1, 1, 1, 0)                                                    \
    /* out = silu(first half of in) * second half, of all rows, or of those that stats count */    \
    OP(SWIGLU,         SWIGLU,      1, 1, 1, 0)                                                    \
    /* out = max(in, 0)^2 */                                                                       \
    OP(RELU2,          RELU2,       1, 1, 0, 0)                                                    \
    /* out = in[0] + in[1] */                                                                      \
    OP(ADD,            ADD,         2, 1, 0, 0)                                                    \
    /* out = softmax(in params[0]^T), where params[1] + out chooses experts: stats[0] says */      \
    /* which, stats[1] how many rows each gets */                                                  \
    OP(ROUTER,         ROUTER,      1, 1, 2, 2)                                                    \
    /* out = rows of in, one for each choice, those of an expert together */                       \
    OP(DISPATCH,       DISPATCH,    1, 1, 1, 0)                                                    \
    /* out = in params[0]^T, where each expert has its matrix, and the rows that stats count */    \
    OP(EXPERTS,        EXPERTS,     1, 1, 1, 1)                                                    \
    /* out[0] = EXPERTS; out[1] = GELU(out[0]) */                                                  \
    OP(EXPERTS_GELU,   EXPERTS,     1, 2, 1, 1)                                                    \
    /* OP_EXPERTS, where in[0] = GELU(in[1]); its backward pass includes GELU's */                 \
    OP(EXPERTS_OF_GELU, EXPERTS,    2, 1, 1, 1)                                                    \
    /* out = the rows of in that belong to a token, summed by the weights of its choices */        \
    OP(COMBINE,        COMBINE,     1, 1, 1, 0)                                                    \
    /* out = in, of which ranks exchange equal parts: the i-th goes to rank i. This message */     \
    /* cuts the unit into parts; out does not overlap in, nor do their gradients. With stats: */   \
    /* rank i gets the rows that stats[0] counts for its experts; stats[1]: what comes */          \
    OP(EXCHANGE,       EXCHANGE,    1, 1, 2, 0)                                                    \
    /* out = -log p(target) of the logits in params[0]^T */                                        \
    OP(CLASSIFIER,     CLASSIFIER,  1, 1, 0, 1)
// clang-format on
#define OP_KIND(KIND, ...) OP_##KIND,
typedef enum { OP_TABLE(OP_KIND) OP_KINDS } OpKindId;
#undef OP_KIND
typedef struct {
    OpKindId kind;
    int in[2], out[2];
    int stats[2]; // what the forward part notes for the backward parts
    int params[2];
} OpNode;

typedef struct {
    const ValueSpec *values;
    const GradientSpec *gradients;
    const OpNode *ops;
    int value_count, gradient_count, op_count;
    StorageClass storages[2]; // that the unit uses
} UnitSpec;
// What the keys of --model are if they are not given
typedef struct {
    double ffn;   // inner width of the MLP, in channels
    int ffn_unit; // ... rounded up to a multiple of this
    double theta; // base of rotary positions; 0: the architecture has none
    double eps;   // of the norms; 0: it is fixed
} ArchitectureDefaults;
typedef struct {
    const char *name;
    const TensorSpec *tensors; // GPT-2: in the order of llm.c's files
    int tensor_count;
    UnitSpec units[UNIT_CLASSES];
    ArchitectureDefaults defaults;
    float softcap;  // of logits (ops_classifier); 0: none
    float qk_scale; // of q and k after their norm
    bool experts;   // its blocks have experts in place of the MLP
    bool exchanges; // ... which are divided over ranks
} Architecture;

// The parts of a unit: a message is between two of them, and counts to the second one. Experts that
// are divided over ranks are in EXPERTS_PART (EXCHANGE_OPS). Returns the part of operation i; how
// many parts there are; the message before a part, which is not the first.
enum { EXPERTS_PART = 1 };
static inline int unit_part(const UnitSpec *u, int i) {
    int part = 0;
    for (; i >= 0; i--) { part += u->ops[i].kind == OP_EXCHANGE; }
    return part;
}
static inline int unit_parts(const UnitSpec *u) { return unit_part(u, u->op_count - 1) + 1; }
static inline const OpNode *unit_message(const UnitSpec *u, int part) {
    int i = 0;
    while (unit_part(u, i) < part) { i++; }
    return &u->ops[i];
}
// Returns the operation of a unit that is of this kind.
static inline const OpNode *unit_op(const UnitSpec *u, OpKindId kind) {
    const OpNode *n = u->ops;
    while (n->kind != kind) { n++; }
    return n;
}

// What tables use often: dimensions; a value of one number in fp32 for each token
#define CHANNELS_X1                                                                                \
    { 1, OF_CHANNELS }
#define CHANNELS_X3                                                                                \
    { 3, OF_CHANNELS }
#define CHANNELS_X4                                                                                \
    { 4, OF_CHANNELS }
#define ONE_OF(quantity)                                                                           \
    { 1, quantity }
// Rows of q, then of k, then of v; rows of gate, then of up
#define RANGES_QKV                                                                                 \
    {                                                                                              \
        {"q", ONE_OF(OF_Q)}, {"k", ONE_OF(OF_KV)}, { "v", ONE_OF(OF_KV) }                          \
    }
#define RANGES_GATE_UP                                                                             \
    {                                                                                              \
        {"gate", ONE_OF(OF_FFN)}, { "up", ONE_OF(OF_FFN) }                                         \
    }
#define RANGES_EXPERT_GATE_UP                                                                      \
    {                                                                                              \
        {"gate", ONE_OF(OF_EXPERT_FFN)}, { "up", ONE_OF(OF_EXPERT_FFN) }                           \
    }
#define RANGES_SHARED_GATE_UP                                                                      \
    {                                                                                              \
        {"gate", ONE_OF(OF_SHARED_FFN)}, { "up", ONE_OF(OF_SHARED_FFN) }                           \
    }
#define FLOAT_PER_TOKEN .type = VALUE_FLOATS, .width = {1, OF_ONE}
// The first rows of each table of values and of gradients, and the tables of a unit
#define BOUNDARIES                                                                                 \
    {.name = "x", .type = VALUE_BOUNDARY, .width = CHANNELS_X1, .gradient = GRADIENT_X}, {         \
        .name = "y", .type = VALUE_BOUNDARY, .width = CHANNELS_X1, .gradient = GRADIENT_Y          \
    }
#define BOUNDARY_GRADIENTS                                                                         \
    {.name = "none"}, {.name = "dx", .width = CHANNELS_X1}, { .name = "dy", .width = CHANNELS_X1 }
// The values that blocks with experts have beside those of others, and their gradients. each: rows
// that the experts of a rank work on, for each of its tokens
#define EXPERT_VALUES(each, drows, dmade)                                                          \
    {.name = "rows", .width = CHANNELS_X1, .rows = ONE_OF(OF_CHOICES), .gradient = (drows)},       \
        {.name = "made", .width = CHANNELS_X1, .rows = ONE_OF(each), .gradient = (dmade)},         \
        {.name = "p", .type = VALUE_FLOATS, .width = ONE_OF(OF_EXPERTS)},                          \
        {.name = "route", .type = VALUE_FLOATS, .width = ONE_OF(OF_ROUTE)}, {                      \
        .name = "loads", .type = VALUE_FLOATS, .width = ONE_OF(OF_EXPERTS), .once = true           \
    }
#define EXPERT_GRADIENTS(each)                                                                     \
    {.name = "drows", .width = CHANNELS_X1, .rows = ONE_OF(OF_CHOICES)}, {                         \
        .name = "dmade", .width = CHANNELS_X1, .rows = ONE_OF(each)                                \
    }
// The same, if the experts are on several ranks, which exchange rows
#define EXCHANGE_VALUES(darrived, dback)                                                           \
    {.name = "arrived",                                                                            \
     .width = CHANNELS_X1,                                                                         \
     .rows = ONE_OF(OF_ARRIVALS),                                                                  \
     .gradient = (darrived)},                                                                      \
        {.name = "back", .width = CHANNELS_X1, .rows = ONE_OF(OF_CHOICES), .gradient = (dback)}, { \
        .name = "arrivals", .type = VALUE_FLOATS, .width = ONE_OF(OF_EXPERTS), .once = true        \
    }
#define EXCHANGE_GRADIENTS                                                                         \
    {.name = "darrived", .width = CHANNELS_X1, .rows = ONE_OF(OF_ARRIVALS)}, {                     \
        .name = "dback", .width = CHANNELS_X1, .rows = ONE_OF(OF_CHOICES)                          \
    }
// The operations of such a block between `from`, which the experts read, and the block's output. a:
// the prefix of the names of its values and tensors; a_EXPERTS_OF(rows, loads) makes a_MADE, and
// a_SHARED_OF(from) makes a_SHARED, by the experts to which all tokens go. The values of these have
// no elements where there are none; then operations on them are left out (unit.h: op_is_empty).
#define EXPERT_OPS(a, from)                                                                        \
    EXPERT_ROUTE(a, from), a##_SHARED_OF(from), a##_EXPERTS_OF(a##_ROWS, a##_LOADS),               \
        EXPERT_SUM(a, a##_MADE)
#define EXCHANGE_OPS(a, from)                                                                      \
    EXPERT_ROUTE(a, from), a##_SHARED_OF(from),                                                    \
        EXPERT_EXCHANGE(a##_ROWS, a##_ARRIVED, a##_LOADS, a##_ARRIVALS),                           \
        a##_EXPERTS_OF(a##_ARRIVED, a##_ARRIVALS),                                                 \
        EXPERT_EXCHANGE(a##_MADE, a##_BACK, a##_ARRIVALS, a##_LOADS), EXPERT_SUM(a, a##_BACK)
#define EXPERT_ROUTE(a, from)                                                                      \
    {.kind = OP_ROUTER,                                                                            \
     .in = {from},                                                                                 \
     .out = {a##_P},                                                                               \
     .stats = {a##_ROUTE, a##_LOADS},                                                              \
     .params = {a##_ROUTERW, a##_ROUTERB}},                                                        \
    {                                                                                              \
        .kind = OP_DISPATCH, .in = {from}, .out = {a##_ROWS}, .stats = { a##_ROUTE }               \
    }
#define EXPERT_EXCHANGE(from, to, sent, comes)                                                     \
    {                                                                                              \
        .kind = OP_EXCHANGE, .in = {from}, .out = {to}, .stats = { sent, comes }                   \
    }
#define EXPERT_SUM(a, made)                                                                        \
    {.kind = OP_COMBINE, .in = {made}, .out = {VALUE_Y}, .stats = {a##_ROUTE}},                    \
        {.kind = OP_ADD, .in = {VALUE_Y, a##_SHARED}, .out = {VALUE_Y}}, {                         \
        .kind = OP_ADD, .in = {VALUE_Y, a##_RES}, .out = { VALUE_Y }                               \
    }
#define UNIT_TABLES(unit)                                                                          \
    .values = unit##_values, .gradients = unit##_gradients, .ops = unit##_ops,                     \
    .value_count = LENGTH_OF(unit##_values), .gradient_count = LENGTH_OF(unit##_gradients),        \
    .op_count = LENGTH_OF(unit##_ops)

#endif
