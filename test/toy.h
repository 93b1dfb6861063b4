// toy.h: an architecture of a program of the tests: "toy" is nano, whose blocks have messages
// inside. The ranks exchange the rows that the MLP works on, and take them back (dispatch, experts,
// combine: where all experts are alike). So toy computes on any ranks what nano computes.
#ifndef TOY_H
#define TOY_H

#include "model/architecture.h"
#include "model/nano.h"

// The block: x1 = x + attention(rmsnorm(x)); y = x1 + back(mlp(there(rmsnorm(x1))))
enum {
    TOY_N1 = VALUE_FIRST,
    TOY_QKV,
    TOY_TURNED, // q and k after their norm and rotation, and v
    TOY_ATT,
    TOY_RES,
    TOY_N2,
    TOY_THERE, // the rows that other ranks have sent
    TOY_FC,
    TOY_RELU2,
    TOY_MLP,
    TOY_BACK,
    TOY_RSTD1,
    TOY_RSTDH, // of the heads of q and k
    TOY_LSE,
    TOY_RSTD2
};
enum {
    TOY_DRELU2 = GRADIENT_FIRST, // of relu2, and then of fc
    TOY_DTHERE,
    TOY_DMLP,
    TOY_DBACK,
    TOY_DN2,
    TOY_DRES,
    TOY_DATT,
    TOY_DTURNED,
    TOY_DQKV,
    TOY_DN1
};
static const ValueSpec toy_block_values[] = {
    BOUNDARIES,
    {.name = "n1", .width = CHANNELS_X1, .gradient = TOY_DN1},
    {.name = "qkv", .width = ONE_OF(OF_QKV), .gradient = TOY_DQKV},
    {.name = "turned", .width = ONE_OF(OF_QKV), .gradient = TOY_DTURNED},
    {.name = "att", .width = ONE_OF(OF_Q), .gradient = TOY_DATT},
    {.name = "res", .width = CHANNELS_X1, .gradient = TOY_DRES},
    {.name = "n2", .width = CHANNELS_X1, .gradient = TOY_DN2},
    {.name = "there", .width = CHANNELS_X1, .gradient = TOY_DTHERE},
    {.name = "fc", .width = ONE_OF(OF_FFN), .gradient = TOY_DRELU2},
    {.name = "relu2", .width = ONE_OF(OF_FFN), .gradient = TOY_DRELU2},
    {.name = "mlp", .width = CHANNELS_X1, .gradient = TOY_DMLP},
    {.name = "back", .width = CHANNELS_X1, .gradient = TOY_DBACK},
    {.name = "rstd1", FLOAT_PER_TOKEN},
    {.name = "rstd_heads", .type = VALUE_FLOATS, .width = ONE_OF(OF_NORMED_HEADS)},
    {.name = "lse", .type = VALUE_FLOATS, .width = ONE_OF(OF_HEADS)},
    {.name = "rstd2", FLOAT_PER_TOKEN},
};
static const GradientSpec toy_block_gradients[] = {
    BOUNDARY_GRADIENTS,
    {.name = "drelu2", .width = ONE_OF(OF_FFN), .kept_in = TOY_FC},
    {.name = "dthere", .width = CHANNELS_X1},
    {.name = "dmlp", .width = CHANNELS_X1},
    {.name = "dback", .width = CHANNELS_X1},
    {.name = "dn2", .width = CHANNELS_X1},
    {.name = "dres", .width = CHANNELS_X1, .kept_in = TOY_RES},
    {.name = "datt", .width = ONE_OF(OF_Q)},
    {.name = "dturned", .width = ONE_OF(OF_QKV)},
    {.name = "dqkv", .width = ONE_OF(OF_QKV), .kept_in = TOY_QKV},
    {.name = "dn1", .width = CHANNELS_X1},
};
static const OpNode toy_block_ops[] = {
    {.kind = OP_RMSNORM,
     .in = {VALUE_X},
     .out = {TOY_N1},
     .stats = {TOY_RSTD1},
     .params = {NO_TENSOR, NO_TENSOR}},
    {.kind = OP_LINEAR, .in = {TOY_N1}, .out = {TOY_QKV}, .params = {NANO_QKVW, NO_TENSOR}},
    {.kind = OP_HEAD_NORM,
     .in = {TOY_QKV},
     .out = {TOY_TURNED},
     .stats = {TOY_RSTDH},
     .params = {NO_TENSOR, NO_TENSOR}},
    {.kind = OP_ATTENTION, .in = {TOY_TURNED}, .out = {TOY_ATT}, .stats = {TOY_LSE}},
    {.kind = OP_LINEAR, .in = {TOY_ATT}, .out = {TOY_RES}, .params = {NANO_ATTPROJW, NO_TENSOR}},
    {.kind = OP_ADD_RMSNORM,
     .in = {TOY_RES, VALUE_X},
     .out = {TOY_N2, TOY_RES},
     .stats = {TOY_RSTD2},
     .params = {NO_TENSOR, NO_TENSOR}},
    {.kind = OP_EXCHANGE, .in = {TOY_N2}, .out = {TOY_THERE}},
    {.kind = OP_LINEAR, .in = {TOY_THERE}, .out = {TOY_FC}, .params = {NANO_FCW, NO_TENSOR}},
    {.kind = OP_RELU2, .in = {TOY_FC}, .out = {TOY_RELU2}},
    {.kind = OP_LINEAR, .in = {TOY_RELU2}, .out = {TOY_MLP}, .params = {NANO_FCPROJW, NO_TENSOR}},
    {.kind = OP_EXCHANGE, .in = {TOY_MLP}, .out = {TOY_BACK}},
    {.kind = OP_ADD, .in = {TOY_BACK, TOY_RES}, .out = {VALUE_Y}},
};

#define ARCHITECTURES_OF_TESTS                                                                     \
    {                                                                                              \
        .name = "toy",                                                                             \
        .tensors = nano_tensors,                                                                   \
        .tensor_count = NANO_TENSORS,                                                              \
        .units = {{UNIT_TABLES(nano_embedding), .storages = {STORAGE_WTE, NO_STORAGE}},            \
                  {UNIT_TABLES(toy_block), .storages = {STORAGE_BLOCK, NO_STORAGE}},               \
                  {UNIT_TABLES(nano_head), .storages = {STORAGE_HEAD, NO_STORAGE}}},               \
        .defaults = {.ffn = 4, .ffn_unit = 1, .theta = 1e5, .eps = 1e-6},                          \
        .softcap = 15,                                                                             \
        .qk_scale = 1.2f,                                                                          \
    },

#endif
