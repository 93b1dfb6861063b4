// policies.h: the one place in the tests that knows the order of the fields of ZeroPolicy and
// Offload.
#ifndef TEST_POLICIES_H
#define TEST_POLICIES_H

#include "state/layout.h" // ZeroPolicy

// A small model of any architecture: rows of `architectures` are counted on and on. Every second
// program that is drawn has a head with a table of its own, of even and odd numbers of layers.
static inline GptConfig config_of(int arch, int layers) {
    const GptConfig config = {.layers = layers,
                              .heads = 1,
                              .channels = 4,
                              .vocab = 8,
                              .padded_vocab = 128,
                              .max_seq_len = 4,
                              .arch = arch % ARCHITECTURES};
    return config;
}

// quantized: weights and gradients.
#define ZERO_POLICY(stage, partition, quantized, accumulates, keeps_gathered, p2p, offload)        \
    {                                                                                              \
        stage, partition, quantized, quantized, false, {8, 256}, {4, 256}, accumulates,            \
            keeps_gathered, false, p2p, offload                                                    \
    }
// Of a stage, for which all states travel by collectives: what it places on the host (NULL:
// nothing).
#define ZERO_STAGE(stage, accumulates, offload)                                                    \
    ZERO_POLICY(stage, 1, false, accumulates, false, NULL, offload)
// host, disk: [storages] bits of kinds.
#define OFFLOAD(host, cpu_update, disk, gradients, delays, storages)                               \
    { host, cpu_update, disk, "", gradients, delays, storages }

#endif
