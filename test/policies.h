// policies.h: the one place in the tests that knows the order of the fields of ZeroPolicy and
// Offload; and plans of states for schedules that no store belongs to.
#ifndef TEST_POLICIES_H
#define TEST_POLICIES_H

#include "plan/state_plan.h"

// Sets a row of `architectures`, and what its blocks have: of rows whose ranks exchange rows of experts,
// the one before, where they do not.
static inline GptConfig config_with(GptConfig config, int arch) {
    while (architectures[arch].exchanges) { arch--; }
    config.arch = arch;
    if (architectures[arch].experts) {
        config.experts = 4;
        config.top_k = 2;
        config.expert_ffn = 6;
        config.shared_experts = arch % 4 == 3; // of three of the five
        config.shared_expert_ffn = config.shared_experts ? 5 : 0;
    }
    return config;
}
// A small model of any architecture: rows of `architectures` are counted on and on. Every second
// program that is drawn has a head with a table of its own, of even and odd numbers of layers.
static inline GptConfig config_of(int arch, int layers) {
    const GptConfig config = {.layers = layers,
                              .heads = 1,
                              .channels = 4,
                              .vocab = 8,
                              .padded_vocab = 128,
                              .max_seq_len = 4};
    return config_with(config, arch % ARCHITECTURES);
}
// The same without experts: GPT-2 in place of what has them.
static inline GptConfig dense_config_of(int arch, int layers) {
    return config_of(architectures[arch % ARCHITECTURES].experts ? 0 : arch, layers);
}

// quantized: weights and gradients.
#define ZERO_POLICY(stage, partition, quantized, accumulates, keeps_gathered, cyclic, offload)     \
    {                                                                                              \
        stage, partition, quantized, quantized, false, {8, 256}, {4, 256}, accumulates,            \
            keeps_gathered, false, cyclic, offload                                                 \
    }
// Of a stage, for which all states travel by collectives: what it places on the host (NULL:
// nothing).
#define ZERO_STAGE(stage, accumulates, offload)                                                    \
    ZERO_POLICY(stage, 1, false, accumulates, false, NULL, offload)
// host, disk: [storages] bits of kinds.
#define OFFLOAD(host, cpu_update, disk, gradients, delays)                                         \
    { host, cpu_update, disk, "", gradients, delays }

// Returns the map of a layout, as its first rank sees it. Its rows are valid until so many others
// have been made.
enum { TEST_PLANS = 256 };
static inline UnitMap test_unit_map(const GptModel *m, const ZeroPolicy *policy,
                                    const Placement *placement, bool clips) {
    static struct {
        GptModel model;
        StatePlan plan;
        Group ranks;
    } made[TEST_PLANS];
    static int number;
    int ranks = 0;
    for (int i = 0; i < placement->stages; i++) {
        for (int k = 0; k < placement->stage[i].replicas; k++) {
            ranks = (int)max_i64(ranks, placement->stage[i].ranks[k] + 1);
        }
    }
    const int i = number++ % TEST_PLANS;
    if (made[i].plan.model) {
        store_plan_free(&made[i].plan);
        group_free(&made[i].ranks);
    }
    const MixedPrecision fp32 = {DTYPE_FP32, DTYPE_FP32};
    made[i].model = *m;
    made[i].ranks = group_cluster(1, ranks);
    made[i].plan = state_plan(&made[i].model, &made[i].ranks, placement, policy, fp32,
                              &optimizers[policy->matrices ? 2 : 0]);
    return unit_map(&made[i].plan, clips);
}

#endif
