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
// A new architecture is a table of tensors, a table for each unit, and a row of `architectures`
// (docs/contributing.md shows each step).
#ifndef ARCHITECTURE_H
#define ARCHITECTURE_H

#include "ops/ops.h" // the arithmetic

typedef enum { UNIT_EMBEDDING, UNIT_BLOCK, UNIT_HEAD, UNIT_CLASSES } UnitClass;
// Blocks have a storage each, unless they share it; every other class is one storage.
typedef enum {
    STORAGE_WTE,
    STORAGE_WPE,
    STORAGE_BLOCK,
    STORAGE_LNF,
    STORAGE_CLASSES,
    NO_STORAGE = STORAGE_CLASSES
} StorageClass;

// A dimension is a multiple of one of these quantities.
typedef enum { OF_ONE, OF_CHANNELS, OF_VOCAB, OF_POSITIONS, OF_HEADS, QUANTITIES } Quantity;
typedef struct {
    int times;
    Quantity of;
} Dim;

// Random values are 0.02 z, or 0.02 z / sqrt(2 L) for the layers that write to the residual stream.
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL, INIT_RESIDUAL } TensorInit;
enum { NO_TENSOR = -1, MOST_TENSORS = 24 };
typedef struct {
    const char *name;
    StorageClass storage;
    Dim rows, cols; // without rows: a vector, to which no weight decay applies
    TensorInit init;
} TensorSpec;

// A boundary is VALUE_X or VALUE_Y: its memory belongs to the micro-batch, not to the unit.
typedef enum { VALUE_REALS, VALUE_FLOATS, VALUE_BOUNDARY } ValueType;
enum { VALUE_X, VALUE_Y, VALUE_FIRST, MOST_VALUES = 16 };
typedef struct {
    const char *name;
    ValueType type; // of its elements: compute precision, or fp32
    Dim width;      // elements of each of the N rows
    int gradient;   // its buffer; NO_GRADIENT: no operation makes its gradient
} ValueSpec;

// Buffers of gradients, in compute precision. The input part of a backward pass fills them, and the
// weight part reads them, possibly much later.
enum { NO_GRADIENT, GRADIENT_X, GRADIENT_Y, GRADIENT_FIRST, MOST_GRADIENTS = 12 };
typedef struct {
    const char *name;
    Dim width;
    bool with_values; // the buffer belongs to the micro-batch's values, and is kept with them
    // A value whose memory is free when the unit below needs this buffer, and which is as wide.
    // With flat clipping (dp.h) the gradient is kept there until the weight part, in the unit
    // above. VALUE_X: none, since the weight part of clipped samples does not read it.
    int kept_in;
} GradientSpec;

// The kinds of operations. unit.h has a row for each.
typedef enum {
    OP_EMBEDDING,      // out = rows of params[0] by token + rows of params[1] by position
    OP_LAYERNORM,      // out = layernorm(in) with gain params[0] and bias params[1]
    OP_ADD_LAYERNORM,  // out[1] = in[0] + in[1]; out[0] = layernorm(out[1])
    OP_LINEAR,         // out = in params[0]^T + params[1]
    OP_LINEAR_GELU,    // out[0] = in params[0]^T + params[1]; out[1] = GELU(out[0])
    OP_LINEAR_OF_GELU, // OP_LINEAR, where in[0] = GELU(in[1]); its backward pass includes GELU's
    OP_ATTENTION,      // out = causal attention(in)
    OP_ADD,            // out = in[0] + in[1]
    OP_CLASSIFIER,     // out = -log p(target) of the logits in params[0]^T
    OP_KINDS
} OpKindId;
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
typedef struct {
    const char *name;
    const TensorSpec *tensors; // in the order of llm.c's files
    int tensor_count;
    UnitSpec units[UNIT_CLASSES];
} Architecture;

// What tables use often: dimensions; a value of one number in fp32 for each token
#define CHANNELS_X1                                                                                \
    { 1, OF_CHANNELS }
#define CHANNELS_X3                                                                                \
    { 3, OF_CHANNELS }
#define CHANNELS_X4                                                                                \
    { 4, OF_CHANNELS }
#define FLOAT_PER_TOKEN .type = VALUE_FLOATS, .width = {1, OF_ONE}
#define LENGTH_OF(table) (int)(sizeof(table) / sizeof((table)[0]))
// The first rows of each table of values and of gradients, and the tables of a unit
#define BOUNDARIES                                                                                 \
    {.name = "x", .type = VALUE_BOUNDARY, .width = CHANNELS_X1, .gradient = GRADIENT_X}, {         \
        .name = "y", .type = VALUE_BOUNDARY, .width = CHANNELS_X1, .gradient = GRADIENT_Y          \
    }
#define BOUNDARY_GRADIENTS                                                                         \
    {.name = "none"}, {.name = "dx", .width = CHANNELS_X1}, { .name = "dy", .width = CHANNELS_X1 }
#define UNIT_TABLES(unit)                                                                          \
    .values = unit##_values, .gradients = unit##_gradients, .ops = unit##_ops,                     \
    .value_count = LENGTH_OF(unit##_values), .gradient_count = LENGTH_OF(unit##_gradients),        \
    .op_count = LENGTH_OF(unit##_ops)

// -------------------------------------------------------------------------------------------------
// GPT-2: learned positions, pre-layernorm blocks, tanh GELU, a head tied to wte
enum {
    WTE,
    WPE,
    LN1W,
    LN1B,
    QKVW,
    QKVB,
    ATTPROJW,
    ATTPROJB,
    LN2W,
    LN2B,
    FCW,
    FCB,
    FCPROJW,
    FCPROJB,
    LNFW,
    LNFB,
    GPT2_TENSORS
};
static const TensorSpec gpt2_tensors[GPT2_TENSORS] = {
    {.name = "wte",
     .storage = STORAGE_WTE,
     .rows = {1, OF_VOCAB},
     .cols = CHANNELS_X1,
     .init = INIT_NORMAL},
    {.name = "wpe",
     .storage = STORAGE_WPE,
     .rows = {1, OF_POSITIONS},
     .cols = CHANNELS_X1,
     .init = INIT_NORMAL},
    {.name = "ln1w", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1, .init = INIT_ONE},
    {.name = "ln1b", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1},
    {.name = "qkvw",
     .storage = STORAGE_BLOCK,
     .rows = CHANNELS_X3,
     .cols = CHANNELS_X1,
     .init = INIT_NORMAL},
    {.name = "qkvb", .storage = STORAGE_BLOCK, .cols = CHANNELS_X3},
    {.name = "attprojw",
     .storage = STORAGE_BLOCK,
     .rows = CHANNELS_X1,
     .cols = CHANNELS_X1,
     .init = INIT_RESIDUAL},
    {.name = "attprojb", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1},
    {.name = "ln2w", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1, .init = INIT_ONE},
    {.name = "ln2b", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1},
    {.name = "fcw",
     .storage = STORAGE_BLOCK,
     .rows = CHANNELS_X4,
     .cols = CHANNELS_X1,
     .init = INIT_NORMAL},
    {.name = "fcb", .storage = STORAGE_BLOCK, .cols = CHANNELS_X4},
    {.name = "fcprojw",
     .storage = STORAGE_BLOCK,
     .rows = CHANNELS_X1,
     .cols = CHANNELS_X4,
     .init = INIT_RESIDUAL},
    {.name = "fcprojb", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1},
    {.name = "lnfw", .storage = STORAGE_LNF, .cols = CHANNELS_X1, .init = INIT_ONE},
    {.name = "lnfb", .storage = STORAGE_LNF, .cols = CHANNELS_X1},
};

// The embedding: y = wte[token] + wpe[position]
static const ValueSpec gpt2_embedding_values[] = {
    BOUNDARIES,
};
static const GradientSpec gpt2_embedding_gradients[] = {
    BOUNDARY_GRADIENTS,
};
static const OpNode gpt2_embedding_ops[] = {
    {.kind = OP_EMBEDDING, .out = {VALUE_Y}, .params = {WTE, WPE}},
};

// The block: x1 = x + attention(layernorm(x)); y = x1 + mlp(layernorm(x1))
enum {
    GPT2_LN1 = VALUE_FIRST,
    GPT2_QKV,
    GPT2_ATT,
    GPT2_RES,
    GPT2_LN2,
    GPT2_FC,
    GPT2_GELU,
    GPT2_MEAN1,
    GPT2_RSTD1,
    GPT2_MEAN2,
    GPT2_RSTD2,
    GPT2_LSE
};
enum { GPT2_DFC = GRADIENT_FIRST, GPT2_DQKV, GPT2_DRES, GPT2_DLN2, GPT2_DLN1 };
static const ValueSpec gpt2_block_values[] = {
    BOUNDARIES,
    {.name = "ln1", .width = CHANNELS_X1, .gradient = GPT2_DLN1},
    {.name = "qkv", .width = CHANNELS_X3, .gradient = GPT2_DQKV},
    // its gradient's buffer is free until the gradient of ln1 is known
    {.name = "att", .width = CHANNELS_X1, .gradient = GPT2_DLN1},
    {.name = "res", .width = CHANNELS_X1, .gradient = GPT2_DRES},
    {.name = "ln2", .width = CHANNELS_X1, .gradient = GPT2_DLN2},
    {.name = "fc", .width = CHANNELS_X4, .gradient = GPT2_DFC},
    {.name = "gelu", .width = CHANNELS_X4},
    {.name = "mean1", FLOAT_PER_TOKEN},
    {.name = "rstd1", FLOAT_PER_TOKEN},
    {.name = "mean2", FLOAT_PER_TOKEN},
    {.name = "rstd2", FLOAT_PER_TOKEN},
    {.name = "lse", .type = VALUE_FLOATS, .width = {1, OF_HEADS}},
};
static const GradientSpec gpt2_block_gradients[] = {
    BOUNDARY_GRADIENTS,
    {.name = "dfc", .width = CHANNELS_X4, .kept_in = GPT2_FC},
    {.name = "dqkv", .width = CHANNELS_X3, .kept_in = GPT2_QKV},
    {.name = "dres", .width = CHANNELS_X1, .kept_in = GPT2_RES},
    {.name = "dln2", .width = CHANNELS_X1},
    {.name = "dln1", .width = CHANNELS_X1},
};
static const OpNode gpt2_block_ops[] = {
    {.kind = OP_LAYERNORM,
     .in = {VALUE_X},
     .out = {GPT2_LN1},
     .stats = {GPT2_MEAN1, GPT2_RSTD1},
     .params = {LN1W, LN1B}},
    {.kind = OP_LINEAR, .in = {GPT2_LN1}, .out = {GPT2_QKV}, .params = {QKVW, QKVB}},
    {.kind = OP_ATTENTION, .in = {GPT2_QKV}, .out = {GPT2_ATT}, .stats = {GPT2_LSE}},
    {.kind = OP_LINEAR, .in = {GPT2_ATT}, .out = {GPT2_RES}, .params = {ATTPROJW, ATTPROJB}},
    {.kind = OP_ADD_LAYERNORM,
     .in = {GPT2_RES, VALUE_X},
     .out = {GPT2_LN2, GPT2_RES},
     .stats = {GPT2_MEAN2, GPT2_RSTD2},
     .params = {LN2W, LN2B}},
    {.kind = OP_LINEAR_GELU, .in = {GPT2_LN2}, .out = {GPT2_FC, GPT2_GELU}, .params = {FCW, FCB}},
    {.kind = OP_LINEAR_OF_GELU,
     .in = {GPT2_GELU, GPT2_FC},
     .out = {VALUE_Y},
     .params = {FCPROJW, FCPROJB}},
    {.kind = OP_ADD, .in = {VALUE_Y, GPT2_RES}, .out = {VALUE_Y}},
};

// The head: losses = classifier(layernorm(x))
enum { GPT2_LNF = VALUE_FIRST, GPT2_MEANF, GPT2_RSTDF, GPT2_LOSSES };
enum { GPT2_DLNF = GRADIENT_FIRST };
static const ValueSpec gpt2_head_values[] = {
    BOUNDARIES,
    {.name = "lnf", .width = CHANNELS_X1, .gradient = GPT2_DLNF},
    {.name = "mean", FLOAT_PER_TOKEN},
    {.name = "rstd", FLOAT_PER_TOKEN},
    {.name = "losses", FLOAT_PER_TOKEN},
};
static const GradientSpec gpt2_head_gradients[] = {
    BOUNDARY_GRADIENTS,
    {.name = "dlnf", .width = CHANNELS_X1, .with_values = true},
};
static const OpNode gpt2_head_ops[] = {
    {.kind = OP_LAYERNORM,
     .in = {VALUE_X},
     .out = {GPT2_LNF},
     .stats = {GPT2_MEANF, GPT2_RSTDF},
     .params = {LNFW, LNFB}},
    {.kind = OP_CLASSIFIER, .in = {GPT2_LNF}, .out = {GPT2_LOSSES}, .params = {WTE, NO_TENSOR}},
};

// -------------------------------------------------------------------------------------------------
// All architectures, by the name that --model knows
static const Architecture architectures[] = {
    {
        .name = "gpt2",
        .tensors = gpt2_tensors,
        .tensor_count = GPT2_TENSORS,
        .units = {{UNIT_TABLES(gpt2_embedding), .storages = {STORAGE_WTE, STORAGE_WPE}},
                  {UNIT_TABLES(gpt2_block), .storages = {STORAGE_BLOCK, NO_STORAGE}},
                  {UNIT_TABLES(gpt2_head), .storages = {STORAGE_LNF, STORAGE_WTE}}},
    },
};
enum { ARCHITECTURES = LENGTH_OF(architectures) };

#endif
