// architectures.h: all architectures, by the name that --model knows.
#ifndef ARCHITECTURES_H
#define ARCHITECTURES_H

#include "base/base.h"
#include "model/architecture.h"
#include "model/gpt2.h"
#include "model/llama.h"
#include "model/nano.h"

#ifndef ARCHITECTURES_OF_TESTS // rows of tests
#define ARCHITECTURES_OF_TESTS
#endif

// GPT-2 must come first: checkpoints that name no architecture are GPT-2's. The defaults of an
// architecture are those of its first row.
#define LLAMA_DEFAULTS                                                                             \
    { .ffn = 8.0 / 3, .ffn_unit = 256, .theta = 1e4, .eps = 1e-5 }
#define QWEN_DEFAULTS                                                                              \
    { .ffn = 8.0 / 3, .ffn_unit = 256, .theta = 1e4, .eps = 1e-6 }
static const Architecture architectures[] = {
    {
        .name = "gpt2",
        .tensors = gpt2_tensors,
        .tensor_count = GPT2_TENSORS,
        .units = {{UNIT_TABLES(gpt2_embedding), .storages = {STORAGE_WTE, STORAGE_WPE}},
                  {UNIT_TABLES(gpt2_block), .storages = {STORAGE_BLOCK, NO_STORAGE}},
                  {UNIT_TABLES(gpt2_head), .storages = {STORAGE_LNF, STORAGE_WTE}}},
        .defaults = {.ffn = 4, .ffn_unit = 1},
    },
    {
        .name = "llama",
        .tensors = llama_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units = LLAMA_UNITS(llama, llama, NO_STORAGE, llama_head, STORAGE_HEAD),
        .defaults = LLAMA_DEFAULTS,
    },
    {
        .name = "llama",
        .tensors = llama_tied_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units = LLAMA_UNITS(llama, llama, NO_STORAGE, llama_tied_head, STORAGE_WTE),
        .defaults = LLAMA_DEFAULTS,
    },
    {
        .name = "qwen2",
        .tensors = qwen2_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units = LLAMA_UNITS(qwen2, llama, NO_STORAGE, llama_head, STORAGE_HEAD),
        .defaults = QWEN_DEFAULTS,
    },
    {
        .name = "qwen2",
        .tensors = qwen2_tied_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units = LLAMA_UNITS(qwen2, llama, NO_STORAGE, llama_tied_head, STORAGE_WTE),
        .defaults = QWEN_DEFAULTS,
    },
    {
        .name = "qwen3",
        .tensors = qwen3_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units = LLAMA_UNITS(qwen3, qwen3, NO_STORAGE, llama_head, STORAGE_HEAD),
        .defaults = QWEN_DEFAULTS,
        .qk_scale = 1,
    },
    {
        .name = "qwen3",
        .tensors = qwen3_tied_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units = LLAMA_UNITS(qwen3, qwen3, NO_STORAGE, llama_tied_head, STORAGE_WTE),
        .defaults = QWEN_DEFAULTS,
        .qk_scale = 1,
    },
    {
        .name = "llama",
        .tensors = llama_experts_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units =
            LLAMA_UNITS(llama_experts, llama_experts, STORAGE_EXPERTS, llama_head, STORAGE_HEAD),
        .defaults = LLAMA_DEFAULTS,
        .experts = true,
    },
    {
        .name = "llama",
        .tensors = llama_experts_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units =
            LLAMA_UNITS(llama_exchange, llama_exchange, STORAGE_EXPERTS, llama_head, STORAGE_HEAD),
        .defaults = LLAMA_DEFAULTS,
        .experts = true,
        .exchanges = true,
    },
    {
        .name = "llama",
        .tensors = llama_experts_tied_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units = LLAMA_UNITS(llama_experts, llama_experts, STORAGE_EXPERTS, llama_tied_head,
                             STORAGE_WTE),
        .defaults = LLAMA_DEFAULTS,
        .experts = true,
    },
    {
        .name = "llama",
        .tensors = llama_experts_tied_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units = LLAMA_UNITS(llama_exchange, llama_exchange, STORAGE_EXPERTS, llama_tied_head,
                             STORAGE_WTE),
        .defaults = LLAMA_DEFAULTS,
        .experts = true,
        .exchanges = true,
    },
    {
        .name = "qwen3",
        .tensors = qwen3_experts_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units =
            LLAMA_UNITS(qwen3_experts, qwen3_experts, STORAGE_EXPERTS, llama_head, STORAGE_HEAD),
        .defaults = QWEN_DEFAULTS,
        .qk_scale = 1,
        .experts = true,
    },
    {
        .name = "qwen3",
        .tensors = qwen3_experts_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units =
            LLAMA_UNITS(qwen3_exchange, qwen3_exchange, STORAGE_EXPERTS, llama_head, STORAGE_HEAD),
        .defaults = QWEN_DEFAULTS,
        .qk_scale = 1,
        .experts = true,
        .exchanges = true,
    },
    {
        .name = "qwen3",
        .tensors = qwen3_experts_tied_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units = LLAMA_UNITS(qwen3_experts, qwen3_experts, STORAGE_EXPERTS, llama_tied_head,
                             STORAGE_WTE),
        .defaults = QWEN_DEFAULTS,
        .qk_scale = 1,
        .experts = true,
    },
    {
        .name = "qwen3",
        .tensors = qwen3_experts_tied_tensors,
        .tensor_count = LLAMA_TENSORS,
        .units = LLAMA_UNITS(qwen3_exchange, qwen3_exchange, STORAGE_EXPERTS, llama_tied_head,
                             STORAGE_WTE),
        .defaults = QWEN_DEFAULTS,
        .qk_scale = 1,
        .experts = true,
        .exchanges = true,
    },
    {
        .name = "gpt2",
        .tensors = gpt2_experts_tensors,
        .tensor_count = GPT2_EXPERTS_TENSORS,
        .units = {{UNIT_TABLES(gpt2_embedding), .storages = {STORAGE_WTE, STORAGE_WPE}},
                  {UNIT_TABLES(gpt2_experts_block), .storages = {STORAGE_BLOCK, STORAGE_EXPERTS}},
                  {UNIT_TABLES(gpt2_head), .storages = {STORAGE_LNF, STORAGE_WTE}}},
        .defaults = {.ffn = 4, .ffn_unit = 1},
        .experts = true,
    },
    {
        .name = "gpt2",
        .tensors = gpt2_experts_tensors,
        .tensor_count = GPT2_EXPERTS_TENSORS,
        .units = {{UNIT_TABLES(gpt2_embedding), .storages = {STORAGE_WTE, STORAGE_WPE}},
                  {UNIT_TABLES(gpt2_exchange_block), .storages = {STORAGE_BLOCK, STORAGE_EXPERTS}},
                  {UNIT_TABLES(gpt2_head), .storages = {STORAGE_LNF, STORAGE_WTE}}},
        .defaults = {.ffn = 4, .ffn_unit = 1},
        .experts = true,
        .exchanges = true,
    },
    {
        .name = "nano",
        .tensors = nano_tensors,
        .tensor_count = NANO_TENSORS,
        .units = {{UNIT_TABLES(nano_embedding), .storages = {STORAGE_WTE, NO_STORAGE}},
                  {UNIT_TABLES(nano_block), .storages = {STORAGE_BLOCK, NO_STORAGE}},
                  {UNIT_TABLES(nano_head), .storages = {STORAGE_HEAD, NO_STORAGE}}},
        .defaults = {.ffn = 4, .ffn_unit = 1, .theta = 1e5, .eps = 1e-6},
        .softcap = 15,
        .qk_scale = 1.2f,
    },
    ARCHITECTURES_OF_TESTS};
enum { ARCHITECTURES = LENGTH_OF(architectures) };

// Returns the class of the storage with the classifier's table.
static inline StorageClass architecture_classifier(const Architecture *a) {
    return a->tensors[unit_op(&a->units[UNIT_HEAD], OP_CLASSIFIER)->params[0]].storage;
}
// Returns whether the classifier's table is the embedding's.
static inline bool architecture_is_tied(const Architecture *a) {
    return architecture_classifier(a) == STORAGE_WTE;
}

#endif
