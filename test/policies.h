// policies.h: the one place in the tests that knows the order of the fields of ZeroPolicy and
// Offload.
#ifndef TEST_POLICIES_H
#define TEST_POLICIES_H

#include "state/layout.h" // ZeroPolicy

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
