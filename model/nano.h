// nano.h: the tables of nanochat's block: RMSNorm without gain (also after the embedding), norms of
// q and k, squared ReLU, a head of its own with a soft cap. Source: karpathy/nanochat,
// without windows, value embeddings and residual scalars.
#ifndef NANO_H
#define NANO_H

#include "model/architecture.h"

enum { NANO_WTE, NANO_QKVW, NANO_ATTPROJW, NANO_FCW, NANO_FCPROJW, NANO_HEADW, NANO_TENSORS };
static const TensorSpec nano_tensors[NANO_TENSORS] = {
    {.name = "wte",
     .storage = STORAGE_WTE,
     .rows = ONE_OF(OF_VOCAB),
     .cols = CHANNELS_X1,
     .init = INIT_NORMAL,
     .deviation = 0.8},
    {.name = "qkvw",
     .storage = STORAGE_BLOCK,
     .rows = ONE_OF(OF_QKV),
     .cols = CHANNELS_X1,
     .ranges = RANGES_QKV,
     .init = INIT_UNIFORM,
     .deviation = 1},
    {.name = "attprojw", .storage = STORAGE_BLOCK, .rows = CHANNELS_X1, .cols = ONE_OF(OF_Q)},
    {.name = "fcw",
     .storage = STORAGE_BLOCK,
     .rows = ONE_OF(OF_FFN),
     .cols = CHANNELS_X1,
     .init = INIT_UNIFORM,
     .deviation = 0.4},
    {.name = "fcprojw", .storage = STORAGE_BLOCK, .rows = CHANNELS_X1, .cols = ONE_OF(OF_FFN)},
    {.name = "headw",
     .storage = STORAGE_HEAD,
     .rows = ONE_OF(OF_VOCAB),
     .cols = CHANNELS_X1,
     .init = INIT_NORMAL,
     .deviation = 0.001},
};

// The embedding: y = rmsnorm(wte[token])
enum { NANO_EMB = VALUE_FIRST, NANO_RSTDE };
enum { NANO_DEMB = GRADIENT_FIRST };
static const ValueSpec nano_embedding_values[] = {
    BOUNDARIES,
    {.name = "emb", .width = CHANNELS_X1, .gradient = NANO_DEMB},
    {.name = "rstd", FLOAT_PER_TOKEN},
};
static const GradientSpec nano_embedding_gradients[] = {
    BOUNDARY_GRADIENTS,
    {.name = "demb", .width = CHANNELS_X1, .with_values = true},
};
static const OpNode nano_embedding_ops[] = {
    {.kind = OP_EMBEDDING, .out = {NANO_EMB}, .params = {NANO_WTE, NO_TENSOR}},
    {.kind = OP_RMSNORM,
     .in = {NANO_EMB},
     .out = {VALUE_Y},
     .stats = {NANO_RSTDE},
     .params = {NO_TENSOR, NO_TENSOR}},
};

// The block: x1 = x + attention(rmsnorm(x)); y = x1 + mlp(rmsnorm(x1))
enum {
    NANO_N1 = VALUE_FIRST,
    NANO_QKV,
    NANO_TURNED, // q and k after their norm and rotation, and v
    NANO_ATT,
    NANO_RES,
    NANO_N2,
    NANO_FC,
    NANO_RELU2,
    NANO_RSTD1,
    NANO_RSTDH, // of the heads of q and k
    NANO_LSE,
    NANO_RSTD2
};
enum {
    NANO_DRELU2 = GRADIENT_FIRST, // of relu2, and then of fc
    NANO_DN2,
    NANO_DRES,
    NANO_DATT,
    NANO_DTURNED,
    NANO_DQKV,
    NANO_DN1
};
static const ValueSpec nano_block_values[] = {
    BOUNDARIES,
    {.name = "n1", .width = CHANNELS_X1, .gradient = NANO_DN1},
    {.name = "qkv", .width = ONE_OF(OF_QKV), .gradient = NANO_DQKV},
    {.name = "turned", .width = ONE_OF(OF_QKV), .gradient = NANO_DTURNED},
    {.name = "att", .width = ONE_OF(OF_Q), .gradient = NANO_DATT},
    {.name = "res", .width = CHANNELS_X1, .gradient = NANO_DRES},
    {.name = "n2", .width = CHANNELS_X1, .gradient = NANO_DN2},
    {.name = "fc", .width = ONE_OF(OF_FFN), .gradient = NANO_DRELU2},
    {.name = "relu2", .width = ONE_OF(OF_FFN), .gradient = NANO_DRELU2},
    {.name = "rstd1", FLOAT_PER_TOKEN},
    {.name = "rstd_heads", .type = VALUE_FLOATS, .width = ONE_OF(OF_NORMED_HEADS)},
    {.name = "lse", .type = VALUE_FLOATS, .width = ONE_OF(OF_HEADS)},
    {.name = "rstd2", FLOAT_PER_TOKEN},
};
static const GradientSpec nano_block_gradients[] = {
    BOUNDARY_GRADIENTS,
    {.name = "drelu2", .width = ONE_OF(OF_FFN), .kept_in = NANO_FC},
    {.name = "dn2", .width = CHANNELS_X1},
    {.name = "dres", .width = CHANNELS_X1, .kept_in = NANO_RES},
    {.name = "datt", .width = ONE_OF(OF_Q)},
    {.name = "dturned", .width = ONE_OF(OF_QKV)},
    {.name = "dqkv", .width = ONE_OF(OF_QKV), .kept_in = NANO_QKV},
    {.name = "dn1", .width = CHANNELS_X1},
};
static const OpNode nano_block_ops[] = {
    {.kind = OP_RMSNORM,
     .in = {VALUE_X},
     .out = {NANO_N1},
     .stats = {NANO_RSTD1},
     .params = {NO_TENSOR, NO_TENSOR}},
    {.kind = OP_LINEAR, .in = {NANO_N1}, .out = {NANO_QKV}, .params = {NANO_QKVW, NO_TENSOR}},
    {.kind = OP_HEAD_NORM,
     .in = {NANO_QKV},
     .out = {NANO_TURNED},
     .stats = {NANO_RSTDH},
     .params = {NO_TENSOR, NO_TENSOR}},
    {.kind = OP_ATTENTION, .in = {NANO_TURNED}, .out = {NANO_ATT}, .stats = {NANO_LSE}},
    {.kind = OP_LINEAR, .in = {NANO_ATT}, .out = {NANO_RES}, .params = {NANO_ATTPROJW, NO_TENSOR}},
    {.kind = OP_ADD_RMSNORM,
     .in = {NANO_RES, VALUE_X},
     .out = {NANO_N2, NANO_RES},
     .stats = {NANO_RSTD2},
     .params = {NO_TENSOR, NO_TENSOR}},
    {.kind = OP_LINEAR, .in = {NANO_N2}, .out = {NANO_FC}, .params = {NANO_FCW, NO_TENSOR}},
    {.kind = OP_RELU2, .in = {NANO_FC}, .out = {NANO_RELU2}},
    {.kind = OP_LINEAR, .in = {NANO_RELU2}, .out = {VALUE_Y}, .params = {NANO_FCPROJW, NO_TENSOR}},
    {.kind = OP_ADD, .in = {VALUE_Y, NANO_RES}, .out = {VALUE_Y}},
};

// The head: losses = classifier(rmsnorm(x))
enum { NANO_NF = VALUE_FIRST, NANO_RSTDF, NANO_LOSSES };
enum { NANO_DNF = GRADIENT_FIRST };
static const ValueSpec nano_head_values[] = {
    BOUNDARIES,
    {.name = "nf", .width = CHANNELS_X1, .gradient = NANO_DNF},
    {.name = "rstd", FLOAT_PER_TOKEN},
    {.name = "losses", FLOAT_PER_TOKEN},
};
static const GradientSpec nano_head_gradients[] = {
    BOUNDARY_GRADIENTS,
    {.name = "dnf", .width = CHANNELS_X1, .with_values = true},
};
static const OpNode nano_head_ops[] = {
    {.kind = OP_RMSNORM,
     .in = {VALUE_X},
     .out = {NANO_NF},
     .stats = {NANO_RSTDF},
     .params = {NO_TENSOR, NO_TENSOR}},
    {.kind = OP_CLASSIFIER,
     .in = {NANO_NF},
     .out = {NANO_LOSSES},
     .params = {NANO_HEADW, NO_TENSOR}},
};

#endif
