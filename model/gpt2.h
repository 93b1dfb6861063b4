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
     .ranges = RANGES_QKV,
     .init = INIT_NORMAL},
    {.name = "qkvb", .storage = STORAGE_BLOCK, .cols = CHANNELS_X3, .ranges = RANGES_QKV},
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

#endif
