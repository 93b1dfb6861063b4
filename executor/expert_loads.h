// expert_loads.h: how many tokens go to each expert, layer by layer: those of a step, for the log,
// and those that a step is going to have, for Switch's loss.
#ifndef EXPERT_LOADS_H
#define EXPERT_LOADS_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/records.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "ops/ops.h"

typedef struct {
    int64_t layers, experts; // 0: the model has none
    int64_t *loads;          // [layers][experts] tokens
    int64_t *all;            // [ranks][layers][experts]
    float *shares;           // [layers][experts] of a step's tokens
    bool summed;             // loads are those of all ranks
    bool known;              // shares are those of the step that runs
} ExpertLoads;
static inline ExpertLoads expert_loads_make(const GptModel *m, int ranks) {
    const int64_t n = m->config.layers * m->config.experts;
    ExpertLoads l = {.layers = m->config.layers, .experts = m->config.experts};
    if (!n) { return l; }
    l.loads = new_array(int64_t, n, "loads");
    l.all = new_array(int64_t, n * ranks, "loads");
    l.shares = new_array(float, n, "loads");
    return l;
}
static inline void expert_loads_free(ExpertLoads *l) { free_all(l->loads, l->all, l->shares); }
static inline void expert_loads_clear(ExpertLoads *l) {
    if (l->loads) { memset(l->loads, 0, (size_t)(l->layers * l->experts) * sizeof *l->loads); }
    l->summed = false;
}
// Adds the loads of a block's forward pass.
static inline void expert_loads_count(ExpertLoads *l, const UnitCall *c, int unit) {
    const int32_t *loads = (const int32_t *)c->buffers.value[unit_op(c->unit, OP_ROUTER)->stats[1]];
    for (int64_t e = 0; e < l->experts; e++) { l->loads[(unit - 1) * l->experts + e] += loads[e]; }
}
// Adds up the loads of all ranks, on each, if that is not done yet. All ranks call it.
static inline void expert_loads_sum(ExpertLoads *l, Comm *comm) {
    const int64_t n = l->layers * l->experts;
    if (l->summed) { return; }
    comm_all_gather_small(comm, l->loads, l->all, (size_t)n * sizeof *l->loads);
    expert_loads_clear(l);
    for (int64_t i = 0; i < n * comm->ranks; i++) { l->loads[i % n] += l->all[i]; }
    l->summed = true;
}
// Finds the shares of a step of so many tokens from the loads of all its forward passes. All ranks
// call it.
static inline void expert_loads_share(ExpertLoads *l, Comm *comm, int64_t tokens) {
    expert_loads_sum(l, comm);
    for (int64_t i = 0; i < l->layers * l->experts; i++) {
        l->shares[i] = (float)((double)l->loads[i] / (double)tokens);
    }
    l->known = true;
}
// Loads as the log has them, of all layers: the largest of an expert, in mean loads; and their
// entropy, of which 1 means that all are equal.
typedef struct {
    double most, entropy;
} LoadFigures;
static inline LoadFigures expert_loads_figures(const ExpertLoads *l) {
    LoadFigures f = {NAN, NAN};
    double entropy = 0, most = 0;
    for (int64_t i = 0; i < l->layers; i++) {
        const int64_t *loads = l->loads + i * l->experts;
        int64_t sum = 0;
        for (int64_t e = 0; e < l->experts; e++) { sum += loads[e]; }
        for (int64_t e = 0; e < l->experts; e++) {
            const double share = (double)loads[e] / (double)max_i64(sum, 1);
            most = fmax(most, share * (double)l->experts);
            if (share > 0) { entropy -= share * log(share); }
        }
    }
    if (!l->experts) { return f; }
    f.most = most;
    f.entropy = l->experts > 1 ? entropy / ((double)l->layers * log((double)l->experts)) : 1;
    return f;
}

#endif
