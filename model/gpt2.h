// gpt2.h: the tables of GPT-2: learned positions, pre-layernorm blocks, tanh GELU, a head that is
// tied to wte.
#ifndef GPT2_H
#define GPT2_H

#include "model/architecture.h"

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
    GPT2_TENSORS, // those of llm.c's files; then those of experts
    GPT2_ROUTERW = GPT2_TENSORS,
    GPT2_ROUTERB,
    GPT2_EXPERT_FCW,
    GPT2_EXPERT_PROJW,
    GPT2_SHARED_FCW,
    GPT2_SHARED_PROJW,
    GPT2_EXPERTS_TENSORS
};
// mlp: the storage of the MLP, or NO_STORAGE
#define GPT2_TENSOR_TABLE(mlp)                                                                     \
    {.name = "wte",                                                                                \
     .storage = STORAGE_WTE,                                                                       \
     .rows = {1, OF_VOCAB},                                                                        \
     .cols = CHANNELS_X1,                                                                          \
     .init = INIT_NORMAL},                                                                         \
        {.name = "wpe",                                                                            \
         .storage = STORAGE_WPE,                                                                   \
         .rows = {1, OF_POSITIONS},                                                                \
         .cols = CHANNELS_X1,                                                                      \
         .init = INIT_NORMAL},                                                                     \
        {.name = "ln1w", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1, .init = INIT_ONE},         \
        {.name = "ln1b", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1},                           \
        {.name = "qkvw",                                                                           \
         .storage = STORAGE_BLOCK,                                                                 \
         .rows = CHANNELS_X3,                                                                      \
         .cols = CHANNELS_X1,                                                                      \
         .ranges = RANGES_QKV,                                                                     \
         .init = INIT_NORMAL},                                                                     \
        {.name = "qkvb", .storage = STORAGE_BLOCK, .cols = CHANNELS_X3, .ranges = RANGES_QKV},     \
        {.name = "attprojw",                                                                       \
         .storage = STORAGE_BLOCK,                                                                 \
         .rows = CHANNELS_X1,                                                                      \
         .cols = CHANNELS_X1,                                                                      \
         .init = INIT_RESIDUAL},                                                                   \
        {.name = "attprojb", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1},                       \
        {.name = "ln2w", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1, .init = INIT_ONE},         \
        {.name = "ln2b", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1},                           \
        {.name = "fcw",                                                                            \
         .storage = mlp,                                                                           \
         .rows = CHANNELS_X4,                                                                      \
         .cols = CHANNELS_X1,                                                                      \
         .init = INIT_NORMAL},                                                                     \
        {.name = "fcb", .storage = mlp, .cols = CHANNELS_X4},                                      \
        {.name = "fcprojw",                                                                        \
         .storage = mlp,                                                                           \
         .rows = CHANNELS_X1,                                                                      \
         .cols = CHANNELS_X4,                                                                      \
         .init = INIT_RESIDUAL},                                                                   \
        {.name = "fcprojb", .storage = mlp, .cols = CHANNELS_X1},                                  \
        {.name = "lnfw", .storage = STORAGE_LNF, .cols = CHANNELS_X1, .init = INIT_ONE}, {         \
        .name = "lnfb", .storage = STORAGE_LNF, .cols = CHANNELS_X1                                \
    }
static const TensorSpec gpt2_tensors[GPT2_TENSORS] = {GPT2_TENSOR_TABLE(STORAGE_BLOCK)};
// Experts have no biases.
static const TensorSpec gpt2_experts_tensors[GPT2_EXPERTS_TENSORS] = {
    GPT2_TENSOR_TABLE(NO_STORAGE),
    {.name = "routerw",
     .storage = STORAGE_BLOCK,
     .rows = ONE_OF(OF_EXPERTS),
     .cols = CHANNELS_X1,
     .init = INIT_NORMAL},
    {.name = "routerb",
     .storage = STORAGE_BLOCK,
     .cols = ONE_OF(OF_EXPERTS),
     .init = INIT_BALANCED},
    {.name = "expertfcw",
     .storage = STORAGE_EXPERTS,
     .copies = ONE_OF(OF_OWN_EXPERTS),
     .rows = ONE_OF(OF_EXPERT_FFN),
     .cols = CHANNELS_X1,
     .init = INIT_NORMAL},
    {.name = "expertprojw",
     .storage = STORAGE_EXPERTS,
     .copies = ONE_OF(OF_OWN_EXPERTS),
     .rows = CHANNELS_X1,
     .cols = ONE_OF(OF_EXPERT_FFN),
     .init = INIT_RESIDUAL},
    {.name = "sharedfcw",
     .storage = STORAGE_BLOCK,
     .rows = ONE_OF(OF_SHARED_FFN),
     .cols = CHANNELS_X1,
     .init = INIT_NORMAL},
    {.name = "sharedprojw",
     .storage = STORAGE_BLOCK,
     .rows = CHANNELS_X1,
     .cols = ONE_OF(OF_SHARED_FFN),
     .init = INIT_RESIDUAL},
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
// mlp: the width of the MLP, or of an expert; each: rows for each token
#define GPT2_BLOCK_VALUES(mlp, each)                                                               \
    BOUNDARIES, {.name = "ln1", .width = CHANNELS_X1, .gradient = GPT2_DLN1},                      \
        {.name = "qkv",                                                                            \
         .width = CHANNELS_X3,                                                                     \
         .gradient =                                                                               \
             GPT2_DQKV}, /* its gradient's buffer is free until the gradient of ln1 is known */    \
        {.name = "att", .width = CHANNELS_X1, .gradient = GPT2_DLN1},                              \
        {.name = "res", .width = CHANNELS_X1, .gradient = GPT2_DRES},                              \
        {.name = "ln2", .width = CHANNELS_X1, .gradient = GPT2_DLN2},                              \
        {.name = "fc", .width = mlp, .rows = ONE_OF(each), .gradient = GPT2_DFC},                  \
        {.name = "gelu", .width = mlp, .rows = ONE_OF(each)}, {.name = "mean1", FLOAT_PER_TOKEN},  \
        {.name = "rstd1", FLOAT_PER_TOKEN}, {.name = "mean2", FLOAT_PER_TOKEN},                    \
        {.name = "rstd2", FLOAT_PER_TOKEN}, {                                                      \
        .name = "lse", .type = VALUE_FLOATS, .width = { 1, OF_HEADS }                              \
    }
#define GPT2_BLOCK_GRADIENTS(mlp, each)                                                            \
    BOUNDARY_GRADIENTS, {.name = "dfc", .width = mlp, .rows = ONE_OF(each), .kept_in = GPT2_FC},   \
        {.name = "dqkv", .width = CHANNELS_X3, .kept_in = GPT2_QKV},                               \
        {.name = "dres", .width = CHANNELS_X1, .kept_in = GPT2_RES},                               \
        {.name = "dln2", .width = CHANNELS_X1}, {                                                  \
        .name = "dln1", .width = CHANNELS_X1                                                       \
    }
#define EXPERT_FFN_X1                                                                              \
    { 1, OF_EXPERT_FFN }
static const ValueSpec gpt2_block_values[] = {GPT2_BLOCK_VALUES(CHANNELS_X4, OF_ONE)};
static const GradientSpec gpt2_block_gradients[] = {GPT2_BLOCK_GRADIENTS(CHANNELS_X4, OF_ONE)};

// With experts, of which each token has several (architecture.h: EXPERT_VALUES)
enum {
    GPT2_ROWS = GPT2_LSE + 1,
    GPT2_MADE,
    GPT2_P,
    GPT2_ROUTE,
    GPT2_LOADS,
    GPT2_SHARED_FC, // of experts to which all tokens go: one MLP
    GPT2_SHARED_GELU,
    GPT2_SHARED, // what they make
    GPT2_ARRIVED,
    GPT2_BACK,
    GPT2_ARRIVALS
};
enum {
    GPT2_DROWS = GPT2_DLN1 + 1,
    GPT2_DMADE,
    GPT2_DSHARED_FC,
    GPT2_DSHARED,
    GPT2_DARRIVED,
    GPT2_DBACK
};
#define GPT2_SHARED_VALUES                                                                         \
    {.name = "shared_fc", .width = ONE_OF(OF_SHARED_FFN), .gradient = GPT2_DSHARED_FC},            \
        {.name = "shared_gelu", .width = ONE_OF(OF_SHARED_FFN)}, {                                 \
        .name = "shared", .width = CHANNELS_X1, .rows = ONE_OF(OF_SHARED),                         \
        .gradient = GPT2_DSHARED                                                                   \
    }
#define GPT2_SHARED_GRADIENTS                                                                      \
    {.name = "dshared_fc", .width = ONE_OF(OF_SHARED_FFN)}, {                                      \
        .name = "dshared", .width = CHANNELS_X1, .rows = ONE_OF(OF_SHARED)                         \
    }
static const ValueSpec gpt2_experts_block_values[] = {
    GPT2_BLOCK_VALUES(EXPERT_FFN_X1, OF_CHOICES), EXPERT_VALUES(OF_CHOICES, GPT2_DROWS, GPT2_DMADE),
    GPT2_SHARED_VALUES};
static const ValueSpec gpt2_exchange_block_values[] = {
    GPT2_BLOCK_VALUES(EXPERT_FFN_X1, OF_ARRIVALS),
    EXPERT_VALUES(OF_ARRIVALS, GPT2_DROWS, GPT2_DMADE), GPT2_SHARED_VALUES,
    EXCHANGE_VALUES(GPT2_DARRIVED, GPT2_DBACK)};
static const GradientSpec gpt2_experts_block_gradients[] = {
    GPT2_BLOCK_GRADIENTS(EXPERT_FFN_X1, OF_CHOICES), EXPERT_GRADIENTS(OF_CHOICES),
    GPT2_SHARED_GRADIENTS};
static const GradientSpec gpt2_exchange_block_gradients[] = {
    GPT2_BLOCK_GRADIENTS(EXPERT_FFN_X1, OF_ARRIVALS), EXPERT_GRADIENTS(OF_ARRIVALS),
    GPT2_SHARED_GRADIENTS, EXCHANGE_GRADIENTS};

#define GPT2_TO_MLP                                                                                \
    {.kind = OP_LAYERNORM,                                                                         \
     .in = {VALUE_X},                                                                              \
     .out = {GPT2_LN1},                                                                            \
     .stats = {GPT2_MEAN1, GPT2_RSTD1},                                                            \
     .params = {LN1W, LN1B}},                                                                      \
        {.kind = OP_LINEAR, .in = {GPT2_LN1}, .out = {GPT2_QKV}, .params = {QKVW, QKVB}},          \
        {.kind = OP_ATTENTION, .in = {GPT2_QKV}, .out = {GPT2_ATT}, .stats = {GPT2_LSE}},          \
        {.kind = OP_LINEAR, .in = {GPT2_ATT}, .out = {GPT2_RES}, .params = {ATTPROJW, ATTPROJB}},  \
    {                                                                                              \
        .kind = OP_ADD_LAYERNORM, .in = {GPT2_RES, VALUE_X}, .out = {GPT2_LN2, GPT2_RES},          \
        .stats = {GPT2_MEAN2, GPT2_RSTD2}, .params = {                                             \
            LN2W,                                                                                  \
            LN2B                                                                                   \
        }                                                                                          \
    }
static const OpNode gpt2_block_ops[] = {
    GPT2_TO_MLP,
    {.kind = OP_LINEAR_GELU, .in = {GPT2_LN2}, .out = {GPT2_FC, GPT2_GELU}, .params = {FCW, FCB}},
    {.kind = OP_LINEAR_OF_GELU,
     .in = {GPT2_GELU, GPT2_FC},
     .out = {VALUE_Y},
     .params = {FCPROJW, FCPROJB}},
    {.kind = OP_ADD, .in = {VALUE_Y, GPT2_RES}, .out = {VALUE_Y}},
};
// What experts make of `rows`
#define GPT2_EXPERTS_OF(rows, loads)                                                               \
    {.kind = OP_EXPERTS_GELU,                                                                      \
     .in = {rows},                                                                                 \
     .out = {GPT2_FC, GPT2_GELU},                                                                  \
     .stats = {loads},                                                                             \
     .params = {GPT2_EXPERT_FCW, NO_TENSOR}},                                                      \
    {                                                                                              \
        .kind = OP_EXPERTS_OF_GELU, .in = {GPT2_GELU, GPT2_FC}, .out = {GPT2_MADE},                \
        .stats = {loads}, .params = {                                                              \
            GPT2_EXPERT_PROJW,                                                                     \
            NO_TENSOR                                                                              \
        }                                                                                          \
    }
// ... and what those make to which all tokens go
#define GPT2_SHARED_OF(from)                                                                       \
    {.kind = OP_LINEAR_GELU,                                                                       \
     .in = {from},                                                                                 \
     .out = {GPT2_SHARED_FC, GPT2_SHARED_GELU},                                                    \
     .params = {GPT2_SHARED_FCW, NO_TENSOR}},                                                      \
    {                                                                                              \
        .kind = OP_LINEAR_OF_GELU, .in = {GPT2_SHARED_GELU, GPT2_SHARED_FC}, .out = {GPT2_SHARED}, \
        .params = {                                                                                \
            GPT2_SHARED_PROJW,                                                                     \
            NO_TENSOR                                                                              \
        }                                                                                          \
    }
static const OpNode gpt2_experts_block_ops[] = {
    GPT2_TO_MLP,
    EXPERT_OPS(GPT2, GPT2_LN2),
};
static const OpNode gpt2_exchange_block_ops[] = {
    GPT2_TO_MLP,
    EXCHANGE_OPS(GPT2, GPT2_LN2),
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

#endif
