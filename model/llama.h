// llama.h: the tables of Llama, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped keys and
// values, SwiGLU. Qwen2 adds a bias to q, k and v. Qwen3 normalises each head of q and k. Blocks of
// Llama with experts are Mixtral's, those of Qwen3 are Qwen3-MoE's.
// Source: huggingface/transformers, models/{llama,mixtral,qwen2,qwen3,qwen3_moe}/modeling_*.py.
#ifndef LLAMA_H
#define LLAMA_H

#include "model/architecture.h"

enum {
    LLAMA_WTE,
    LLAMA_LN1W,
    LLAMA_QKVW,
    LLAMA_QKVB,
    LLAMA_QNORMW,
    LLAMA_KNORMW,
    LLAMA_ATTPROJW,
    LLAMA_LN2W,
    LLAMA_GATEUPW,
    LLAMA_DOWNW,
    LLAMA_LNFW,
    LLAMA_HEADW,
    LLAMA_ROUTERW, // of blocks with experts, in place of the MLP
    LLAMA_ROUTERB,
    LLAMA_EXPERT_GATEUPW,
    LLAMA_EXPERT_DOWNW,
    LLAMA_SHARED_GATEUPW, // of experts to which all tokens go, together
    LLAMA_SHARED_DOWNW,
    LLAMA_TENSORS
};
// Each argument is the storage of tensors that not all architectures have, or NO_STORAGE.
#define LLAMA_TENSOR_TABLE(bias, qk_norm, mlp, router, experts, head)                              \
    {.name = "wte",                                                                                \
     .storage = STORAGE_WTE,                                                                       \
     .rows = ONE_OF(OF_VOCAB),                                                                     \
     .cols = CHANNELS_X1,                                                                          \
     .init = INIT_NORMAL},                                                                         \
        {.name = "ln1w", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1, .init = INIT_ONE},         \
        {.name = "qkvw",                                                                           \
         .storage = STORAGE_BLOCK,                                                                 \
         .rows = ONE_OF(OF_QKV),                                                                   \
         .cols = CHANNELS_X1,                                                                      \
         .ranges = RANGES_QKV,                                                                     \
         .init = INIT_NORMAL},                                                                     \
        {.name = "qkvb", .storage = bias, .cols = ONE_OF(OF_QKV), .ranges = RANGES_QKV},           \
        {.name = "qnormw", .storage = qk_norm, .cols = ONE_OF(OF_HEAD_DIM), .init = INIT_ONE},     \
        {.name = "knormw", .storage = qk_norm, .cols = ONE_OF(OF_HEAD_DIM), .init = INIT_ONE},     \
        {.name = "attprojw",                                                                       \
         .storage = STORAGE_BLOCK,                                                                 \
         .rows = CHANNELS_X1,                                                                      \
         .cols = ONE_OF(OF_Q),                                                                     \
         .init = INIT_RESIDUAL},                                                                   \
        {.name = "ln2w", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1, .init = INIT_ONE},         \
        {.name = "gateupw",                                                                        \
         .storage = mlp,                                                                           \
         .rows = {2, OF_FFN},                                                                      \
         .cols = CHANNELS_X1,                                                                      \
         .ranges = RANGES_GATE_UP,                                                                 \
         .init = INIT_NORMAL},                                                                     \
        {.name = "downw",                                                                          \
         .storage = mlp,                                                                           \
         .rows = CHANNELS_X1,                                                                      \
         .cols = ONE_OF(OF_FFN),                                                                   \
         .init = INIT_RESIDUAL},                                                                   \
        {.name = "lnfw", .storage = STORAGE_LNF, .cols = CHANNELS_X1, .init = INIT_ONE},           \
        {.name = "headw",                                                                          \
         .storage = head,                                                                          \
         .rows = ONE_OF(OF_VOCAB),                                                                 \
         .cols = CHANNELS_X1,                                                                      \
         .init = INIT_NORMAL},                                                                     \
        {.name = "routerw",                                                                        \
         .storage = router,                                                                        \
         .rows = ONE_OF(OF_EXPERTS),                                                               \
         .cols = CHANNELS_X1,                                                                      \
         .init = INIT_NORMAL},                                                                     \
        {.name = "routerb", .storage = router, .cols = ONE_OF(OF_EXPERTS), .init = INIT_BALANCED}, \
        {.name = "expertgateupw",                                                                  \
         .storage = experts,                                                                       \
         .copies = ONE_OF(OF_OWN_EXPERTS),                                                         \
         .rows = {2, OF_EXPERT_FFN},                                                               \
         .cols = CHANNELS_X1,                                                                      \
         .ranges = RANGES_EXPERT_GATE_UP,                                                          \
         .init = INIT_NORMAL},                                                                     \
        {.name = "expertdownw",                                                                    \
         .storage = experts,                                                                       \
         .copies = ONE_OF(OF_OWN_EXPERTS),                                                         \
         .rows = CHANNELS_X1,                                                                      \
         .cols = ONE_OF(OF_EXPERT_FFN),                                                            \
         .init = INIT_RESIDUAL},                                                                   \
        {.name = "sharedgateupw",                                                                  \
         .storage = router,                                                                        \
         .rows = {2, OF_SHARED_FFN},                                                               \
         .cols = CHANNELS_X1,                                                                      \
         .ranges = RANGES_SHARED_GATE_UP,                                                          \
         .init = INIT_NORMAL},                                                                     \
    {                                                                                              \
        .name = "shareddownw", .storage = router, .rows = CHANNELS_X1,                             \
        .cols = ONE_OF(OF_SHARED_FFN), .init = INIT_RESIDUAL                                       \
    }
static const TensorSpec llama_tied_tensors[LLAMA_TENSORS] = {
    LLAMA_TENSOR_TABLE(NO_STORAGE, NO_STORAGE, STORAGE_BLOCK, NO_STORAGE, NO_STORAGE, NO_STORAGE)};
static const TensorSpec llama_tensors[LLAMA_TENSORS] = {LLAMA_TENSOR_TABLE(
    NO_STORAGE, NO_STORAGE, STORAGE_BLOCK, NO_STORAGE, NO_STORAGE, STORAGE_HEAD)};
static const TensorSpec qwen2_tied_tensors[LLAMA_TENSORS] = {LLAMA_TENSOR_TABLE(
    STORAGE_BLOCK, NO_STORAGE, STORAGE_BLOCK, NO_STORAGE, NO_STORAGE, NO_STORAGE)};
static const TensorSpec qwen2_tensors[LLAMA_TENSORS] = {LLAMA_TENSOR_TABLE(
    STORAGE_BLOCK, NO_STORAGE, STORAGE_BLOCK, NO_STORAGE, NO_STORAGE, STORAGE_HEAD)};
static const TensorSpec qwen3_tied_tensors[LLAMA_TENSORS] = {LLAMA_TENSOR_TABLE(
    NO_STORAGE, STORAGE_BLOCK, STORAGE_BLOCK, NO_STORAGE, NO_STORAGE, NO_STORAGE)};
static const TensorSpec qwen3_tensors[LLAMA_TENSORS] = {LLAMA_TENSOR_TABLE(
    NO_STORAGE, STORAGE_BLOCK, STORAGE_BLOCK, NO_STORAGE, NO_STORAGE, STORAGE_HEAD)};
static const TensorSpec llama_experts_tied_tensors[LLAMA_TENSORS] = {LLAMA_TENSOR_TABLE(
    NO_STORAGE, NO_STORAGE, NO_STORAGE, STORAGE_BLOCK, STORAGE_EXPERTS, NO_STORAGE)};
static const TensorSpec llama_experts_tensors[LLAMA_TENSORS] = {LLAMA_TENSOR_TABLE(
    NO_STORAGE, NO_STORAGE, NO_STORAGE, STORAGE_BLOCK, STORAGE_EXPERTS, STORAGE_HEAD)};
static const TensorSpec qwen3_experts_tied_tensors[LLAMA_TENSORS] = {LLAMA_TENSOR_TABLE(
    NO_STORAGE, STORAGE_BLOCK, NO_STORAGE, STORAGE_BLOCK, STORAGE_EXPERTS, NO_STORAGE)};
static const TensorSpec qwen3_experts_tensors[LLAMA_TENSORS] = {LLAMA_TENSOR_TABLE(
    NO_STORAGE, STORAGE_BLOCK, NO_STORAGE, STORAGE_BLOCK, STORAGE_EXPERTS, STORAGE_HEAD)};

// The embedding: y = wte[token]
static const ValueSpec llama_embedding_values[] = {
    BOUNDARIES,
};
static const GradientSpec llama_embedding_gradients[] = {
    BOUNDARY_GRADIENTS,
};
static const OpNode llama_embedding_ops[] = {
    {.kind = OP_EMBEDDING, .out = {VALUE_Y}, .params = {LLAMA_WTE, NO_TENSOR}},
};

// The block: x1 = x + attention(rmsnorm(x)); y = x1 + mlp(rmsnorm(x1))
enum {
    LLAMA_N1 = VALUE_FIRST,
    LLAMA_QKV,
    LLAMA_ATT,
    LLAMA_RES,
    LLAMA_N2,
    LLAMA_GATEUP,
    LLAMA_SILU, // silu(gate) * up
    LLAMA_RSTD1,
    LLAMA_RSTD2,
    LLAMA_LSE,
    QWEN3_TURNED, // q and k after their norm and rotation, and v
    QWEN3_RSTD    // of the heads of q and k
};
// With experts: rows for each choice of a token
enum {
    LLAMA_ROWS = LLAMA_LSE + 1, // of n2, those of an expert together
    LLAMA_MADE,                 // by the experts
    LLAMA_P,                    // of each expert
    LLAMA_ROUTE,
    LLAMA_LOADS, // rows of each expert
    LLAMA_SHARED_GATEUP,
    LLAMA_SHARED_SILU,
    LLAMA_SHARED, // what the experts to which all tokens go make
    EXPERTS_TURNED,
    EXPERTS_RSTD
};
// With experts on several ranks, which exchange rows
enum {
    LLAMA_ARRIVED = LLAMA_SHARED + 1, // rows of all these ranks, for the experts of this one
    LLAMA_BACK,                       // what the experts have made of this rank's rows
    LLAMA_ARRIVALS,                   // rows that came from each rank for each expert
    EXCHANGE_TURNED,
    EXCHANGE_RSTD
};
enum {
    LLAMA_DSILU = GRADIENT_FIRST,
    LLAMA_DGATEUP,
    LLAMA_DQKV,
    LLAMA_DRES,
    LLAMA_DN2,
    LLAMA_DN1,
    LLAMA_DATT,
    QWEN3_DTURNED
};
enum {
    LLAMA_DROWS = LLAMA_DATT + 1,
    LLAMA_DMADE,
    LLAMA_DSHARED_GATEUP,
    LLAMA_DSHARED_SILU,
    LLAMA_DSHARED,
    EXPERTS_DTURNED
};
enum { LLAMA_DARRIVED = LLAMA_DSHARED + 1, LLAMA_DBACK, EXCHANGE_DTURNED };
// mlp: the width of the MLP, or of an expert; each: rows for each token
#define LLAMA_BLOCK_VALUES(mlp, each)                                                              \
    BOUNDARIES, {.name = "n1", .width = CHANNELS_X1, .gradient = LLAMA_DN1},                       \
        {.name = "qkv", .width = ONE_OF(OF_QKV), .gradient = LLAMA_DQKV},                          \
        {.name = "att", .width = ONE_OF(OF_Q), .gradient = LLAMA_DATT},                            \
        {.name = "res", .width = CHANNELS_X1, .gradient = LLAMA_DRES},                             \
        {.name = "n2", .width = CHANNELS_X1, .gradient = LLAMA_DN2},                               \
        {.name = "gateup", .width = {2, mlp}, .rows = ONE_OF(each), .gradient = LLAMA_DGATEUP},    \
        {.name = "silu", .width = ONE_OF(mlp), .rows = ONE_OF(each), .gradient = LLAMA_DSILU},     \
        {.name = "rstd1", FLOAT_PER_TOKEN}, {.name = "rstd2", FLOAT_PER_TOKEN}, {                  \
        .name = "lse", .type = VALUE_FLOATS, .width = ONE_OF(OF_HEADS)                             \
    }
#define LLAMA_BLOCK_GRADIENTS(mlp, each)                                                           \
    BOUNDARY_GRADIENTS, {.name = "dsilu", .width = ONE_OF(mlp), .rows = ONE_OF(each)},             \
        {.name = "dgateup", .width = {2, mlp}, .rows = ONE_OF(each), .kept_in = LLAMA_GATEUP},     \
        {.name = "dqkv", .width = ONE_OF(OF_QKV), .kept_in = LLAMA_QKV},                           \
        {.name = "dres", .width = CHANNELS_X1, .kept_in = LLAMA_RES},                              \
        {.name = "dn2", .width = CHANNELS_X1}, {.name = "dn1", .width = CHANNELS_X1}, {            \
        .name = "datt", .width = ONE_OF(OF_Q)                                                      \
    }
static const ValueSpec llama_block_values[] = {LLAMA_BLOCK_VALUES(OF_FFN, OF_ONE)};
static const GradientSpec llama_block_gradients[] = {LLAMA_BLOCK_GRADIENTS(OF_FFN, OF_ONE)};
// Experts to which all tokens go: one MLP, beside the others
#define LLAMA_SHARED_VALUES                                                                        \
    {.name = "shared_gateup", .width = {2, OF_SHARED_FFN}, .gradient = LLAMA_DSHARED_GATEUP},      \
        {.name = "shared_silu", .width = ONE_OF(OF_SHARED_FFN), .gradient = LLAMA_DSHARED_SILU}, { \
        .name = "shared", .width = CHANNELS_X1, .rows = ONE_OF(OF_SHARED),                         \
        .gradient = LLAMA_DSHARED                                                                  \
    }
#define LLAMA_SHARED_GRADIENTS                                                                     \
    {.name = "dshared_gateup", .width = {2, OF_SHARED_FFN}},                                       \
        {.name = "dshared_silu", .width = ONE_OF(OF_SHARED_FFN)}, {                                \
        .name = "dshared", .width = CHANNELS_X1, .rows = ONE_OF(OF_SHARED)                         \
    }
// Qwen3's heads of q and k after their norm
#define HEADS_VALUES(dturned)                                                                      \
    {.name = "turned", .width = ONE_OF(OF_QKV), .gradient = (dturned)}, {                          \
        .name = "rstd_heads", .type = VALUE_FLOATS, .width = ONE_OF(OF_NORMED_HEADS)               \
    }
#define HEADS_GRADIENT                                                                             \
    { .name = "dturned", .width = ONE_OF(OF_QKV) }
static const ValueSpec qwen3_block_values[] = {LLAMA_BLOCK_VALUES(OF_FFN, OF_ONE),
                                               HEADS_VALUES(QWEN3_DTURNED)};
static const GradientSpec qwen3_block_gradients[] = {LLAMA_BLOCK_GRADIENTS(OF_FFN, OF_ONE),
                                                     HEADS_GRADIENT};
static const ValueSpec llama_experts_block_values[] = {
    LLAMA_BLOCK_VALUES(OF_EXPERT_FFN, OF_CHOICES),
    EXPERT_VALUES(OF_CHOICES, LLAMA_DROWS, LLAMA_DMADE), LLAMA_SHARED_VALUES};
static const ValueSpec llama_exchange_block_values[] = {
    LLAMA_BLOCK_VALUES(OF_EXPERT_FFN, OF_ARRIVALS),
    EXPERT_VALUES(OF_ARRIVALS, LLAMA_DROWS, LLAMA_DMADE), LLAMA_SHARED_VALUES,
    EXCHANGE_VALUES(LLAMA_DARRIVED, LLAMA_DBACK)};
static const ValueSpec qwen3_experts_block_values[] = {
    LLAMA_BLOCK_VALUES(OF_EXPERT_FFN, OF_CHOICES),
    EXPERT_VALUES(OF_CHOICES, LLAMA_DROWS, LLAMA_DMADE), LLAMA_SHARED_VALUES,
    HEADS_VALUES(EXPERTS_DTURNED)};
static const ValueSpec qwen3_exchange_block_values[] = {
    LLAMA_BLOCK_VALUES(OF_EXPERT_FFN, OF_ARRIVALS),
    EXPERT_VALUES(OF_ARRIVALS, LLAMA_DROWS, LLAMA_DMADE), LLAMA_SHARED_VALUES,
    EXCHANGE_VALUES(LLAMA_DARRIVED, LLAMA_DBACK), HEADS_VALUES(EXCHANGE_DTURNED)};
static const GradientSpec llama_experts_block_gradients[] = {
    LLAMA_BLOCK_GRADIENTS(OF_EXPERT_FFN, OF_CHOICES), EXPERT_GRADIENTS(OF_CHOICES),
    LLAMA_SHARED_GRADIENTS};
static const GradientSpec llama_exchange_block_gradients[] = {
    LLAMA_BLOCK_GRADIENTS(OF_EXPERT_FFN, OF_ARRIVALS), EXPERT_GRADIENTS(OF_ARRIVALS),
    LLAMA_SHARED_GRADIENTS, EXCHANGE_GRADIENTS};
static const GradientSpec qwen3_experts_block_gradients[] = {
    LLAMA_BLOCK_GRADIENTS(OF_EXPERT_FFN, OF_CHOICES), EXPERT_GRADIENTS(OF_CHOICES),
    LLAMA_SHARED_GRADIENTS, HEADS_GRADIENT};
static const GradientSpec qwen3_exchange_block_gradients[] = {
    LLAMA_BLOCK_GRADIENTS(OF_EXPERT_FFN, OF_ARRIVALS), EXPERT_GRADIENTS(OF_ARRIVALS),
    LLAMA_SHARED_GRADIENTS, EXCHANGE_GRADIENTS, HEADS_GRADIENT};

// From the block's input to q, k and v, before positions
#define LLAMA_TO_QKV(bias)                                                                         \
    {.kind = OP_RMSNORM,                                                                           \
     .in = {VALUE_X},                                                                              \
     .out = {LLAMA_N1},                                                                            \
     .stats = {LLAMA_RSTD1},                                                                       \
     .params = {LLAMA_LN1W, NO_TENSOR}},                                                           \
    {                                                                                              \
        .kind = OP_LINEAR, .in = {LLAMA_N1}, .out = {LLAMA_QKV}, .params = { LLAMA_QKVW, bias }    \
    }
#define LLAMA_ATTENTION(qkv)                                                                       \
    {                                                                                              \
        .kind = OP_ATTENTION, .in = {qkv}, .out = {LLAMA_ATT}, .stats = { LLAMA_LSE }              \
    }
#define QWEN3_ATTENTION(turned, rstd)                                                              \
    {.kind = OP_HEAD_NORM,                                                                         \
     .in = {LLAMA_QKV},                                                                            \
     .out = {turned},                                                                              \
     .stats = {rstd},                                                                              \
     .params = {LLAMA_QNORMW, LLAMA_KNORMW}},                                                      \
        LLAMA_ATTENTION(turned)
// From the attention's output to the MLP
#define LLAMA_TO_MLP                                                                               \
    {.kind = OP_LINEAR,                                                                            \
     .in = {LLAMA_ATT},                                                                            \
     .out = {LLAMA_RES},                                                                           \
     .params = {LLAMA_ATTPROJW, NO_TENSOR}},                                                       \
    {                                                                                              \
        .kind = OP_ADD_RMSNORM, .in = {LLAMA_RES, VALUE_X}, .out = {LLAMA_N2, LLAMA_RES},          \
        .stats = {LLAMA_RSTD2}, .params = {                                                        \
            LLAMA_LN2W,                                                                            \
            NO_TENSOR                                                                              \
        }                                                                                          \
    }
// From the attention's output to the block's
#define LLAMA_FROM_ATTENTION                                                                       \
    LLAMA_TO_MLP,                                                                                  \
        {.kind = OP_LINEAR,                                                                        \
         .in = {LLAMA_N2},                                                                         \
         .out = {LLAMA_GATEUP},                                                                    \
         .params = {LLAMA_GATEUPW, NO_TENSOR}},                                                    \
        {.kind = OP_SWIGLU, .in = {LLAMA_GATEUP}, .out = {LLAMA_SILU}},                            \
        {.kind = OP_LINEAR,                                                                        \
         .in = {LLAMA_SILU},                                                                       \
         .out = {VALUE_Y},                                                                         \
         .params = {LLAMA_DOWNW, NO_TENSOR}},                                                      \
    {                                                                                              \
        .kind = OP_ADD, .in = {VALUE_Y, LLAMA_RES}, .out = { VALUE_Y }                             \
    }
// What experts make of `rows`
#define LLAMA_EXPERTS_OF(rows, loads)                                                              \
    {.kind = OP_EXPERTS,                                                                           \
     .in = {rows},                                                                                 \
     .out = {LLAMA_GATEUP},                                                                        \
     .stats = {loads},                                                                             \
     .params = {LLAMA_EXPERT_GATEUPW, NO_TENSOR}},                                                 \
        {.kind = OP_SWIGLU, .in = {LLAMA_GATEUP}, .out = {LLAMA_SILU}, .stats = {loads}}, {        \
        .kind = OP_EXPERTS, .in = {LLAMA_SILU}, .out = {LLAMA_MADE}, .stats = {loads}, .params = { \
            LLAMA_EXPERT_DOWNW,                                                                    \
            NO_TENSOR                                                                              \
        }                                                                                          \
    }
// ... and what those make to which all tokens go
#define LLAMA_SHARED_OF(from)                                                                      \
    {.kind = OP_LINEAR,                                                                            \
     .in = {from},                                                                                 \
     .out = {LLAMA_SHARED_GATEUP},                                                                 \
     .params = {LLAMA_SHARED_GATEUPW, NO_TENSOR}},                                                 \
        {.kind = OP_SWIGLU, .in = {LLAMA_SHARED_GATEUP}, .out = {LLAMA_SHARED_SILU}}, {            \
        .kind = OP_LINEAR, .in = {LLAMA_SHARED_SILU}, .out = {LLAMA_SHARED}, .params = {           \
            LLAMA_SHARED_DOWNW,                                                                    \
            NO_TENSOR                                                                              \
        }                                                                                          \
    }
static const OpNode llama_block_ops[] = {
    LLAMA_TO_QKV(NO_TENSOR),
    {.kind = OP_ROTARY, .in = {LLAMA_QKV}, .out = {LLAMA_QKV}},
    LLAMA_ATTENTION(LLAMA_QKV),
    LLAMA_FROM_ATTENTION,
};
static const OpNode qwen2_block_ops[] = {
    LLAMA_TO_QKV(LLAMA_QKVB),
    {.kind = OP_ROTARY, .in = {LLAMA_QKV}, .out = {LLAMA_QKV}},
    LLAMA_ATTENTION(LLAMA_QKV),
    LLAMA_FROM_ATTENTION,
};
static const OpNode qwen3_block_ops[] = {
    LLAMA_TO_QKV(NO_TENSOR),
    QWEN3_ATTENTION(QWEN3_TURNED, QWEN3_RSTD),
    LLAMA_FROM_ATTENTION,
};
static const OpNode llama_experts_block_ops[] = {
    LLAMA_TO_QKV(NO_TENSOR),     {.kind = OP_ROTARY, .in = {LLAMA_QKV}, .out = {LLAMA_QKV}},
    LLAMA_ATTENTION(LLAMA_QKV),  LLAMA_TO_MLP,
    EXPERT_OPS(LLAMA, LLAMA_N2),
};
static const OpNode llama_exchange_block_ops[] = {
    LLAMA_TO_QKV(NO_TENSOR),       {.kind = OP_ROTARY, .in = {LLAMA_QKV}, .out = {LLAMA_QKV}},
    LLAMA_ATTENTION(LLAMA_QKV),    LLAMA_TO_MLP,
    EXCHANGE_OPS(LLAMA, LLAMA_N2),
};
static const OpNode qwen3_experts_block_ops[] = {
    LLAMA_TO_QKV(NO_TENSOR),
    QWEN3_ATTENTION(EXPERTS_TURNED, EXPERTS_RSTD),
    LLAMA_TO_MLP,
    EXPERT_OPS(LLAMA, LLAMA_N2),
};
static const OpNode qwen3_exchange_block_ops[] = {
    LLAMA_TO_QKV(NO_TENSOR),
    QWEN3_ATTENTION(EXCHANGE_TURNED, EXCHANGE_RSTD),
    LLAMA_TO_MLP,
    EXCHANGE_OPS(LLAMA, LLAMA_N2),
};

// The head: losses = classifier(rmsnorm(x))
enum { LLAMA_NF = VALUE_FIRST, LLAMA_RSTDF, LLAMA_LOSSES };
enum { LLAMA_DNF = GRADIENT_FIRST };
static const ValueSpec llama_head_values[] = {
    BOUNDARIES,
    {.name = "nf", .width = CHANNELS_X1, .gradient = LLAMA_DNF},
    {.name = "rstd", FLOAT_PER_TOKEN},
    {.name = "losses", FLOAT_PER_TOKEN},
};
static const GradientSpec llama_head_gradients[] = {
    BOUNDARY_GRADIENTS,
    {.name = "dnf", .width = CHANNELS_X1, .with_values = true},
};
#define LLAMA_HEAD(table)                                                                          \
    {.kind = OP_RMSNORM,                                                                           \
     .in = {VALUE_X},                                                                              \
     .out = {LLAMA_NF},                                                                            \
     .stats = {LLAMA_RSTDF},                                                                       \
     .params = {LLAMA_LNFW, NO_TENSOR}},                                                           \
    {                                                                                              \
        .kind = OP_CLASSIFIER, .in = {LLAMA_NF}, .out = {LLAMA_LOSSES}, .params = {                \
            table,                                                                                 \
            NO_TENSOR                                                                              \
        }                                                                                          \
    }
static const OpNode llama_tied_head_ops[] = {LLAMA_HEAD(LLAMA_WTE)};
static const OpNode llama_head_ops[] = {LLAMA_HEAD(LLAMA_HEADW)};

// The rows of `architectures`. block: the prefix of a block's tables; experts: the storage of its
// experts, or NO_STORAGE.
#define LLAMA_UNITS(block, block_tables, experts, head, table)                                     \
    {                                                                                              \
        {UNIT_TABLES(llama_embedding), .storages = {STORAGE_WTE, NO_STORAGE}},                     \
            {.values = block_tables##_block_values,                                                \
             .gradients = block_tables##_block_gradients,                                          \
             .ops = block##_block_ops,                                                             \
             .value_count = LENGTH_OF(block_tables##_block_values),                                \
             .gradient_count = LENGTH_OF(block_tables##_block_gradients),                          \
             .op_count = LENGTH_OF(block##_block_ops),                                             \
             .storages = {STORAGE_BLOCK, experts}},                                                \
        {                                                                                          \
            .values = llama_head_values, .gradients = llama_head_gradients, .ops = head##_ops,     \
            .value_count = LENGTH_OF(llama_head_values),                                           \
            .gradient_count = LENGTH_OF(llama_head_gradients), .op_count = LENGTH_OF(head##_ops),  \
            .storages = {                                                                          \
                STORAGE_LNF,                                                                       \
                table                                                                              \
            }                                                                                      \
        }                                                                                          \
    }

#endif
