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
    int64_t *loads;          // [layers][experts] tokens, then the most pieces of rows (exchange.h)
    int64_t *all;            // [ranks] the same of each
    float *shares;           // [layers][experts] of a step's tokens
    bool summed;             // loads are those of all ranks
    bool known;              // shares are those of the step that runs
} ExpertLoads;
static inline ExpertLoads expert_loads_make(const GptModel *m, int ranks) {
    const int64_t n = m->config.layers * m->config.experts;
    ExpertLoads l = {.layers = m->config.layers, .experts = m->config.experts};
    if (!n) { return l; }
    l.loads = new_array(int64_t, n + 1, "loads");
    l.all = new_array(int64_t, (n + 1) * ranks, "loads");
    l.shares = new_array(float, n, "loads");
    return l;
}
static inline void expert_loads_free(ExpertLoads *l) { free_all(l->loads, l->all, l->shares); }
static inline int64_t *expert_loads_pieces(const ExpertLoads *l) {
    return l->loads + l->layers * l->experts;
}
static inline void expert_loads_clear(ExpertLoads *l) {
    if (l->loads) { memset(l->loads, 0, (size_t)(l->layers * l->experts + 1) * sizeof *l->loads); }
    l->summed = false;
}
// Notes the pieces in which the rows of a micro-batch go to a block's experts.
static inline void expert_loads_note_pieces(ExpertLoads *l, int64_t pieces) {
    *expert_loads_pieces(l) = max_i64(*expert_loads_pieces(l), pieces);
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
    comm_all_gather_small(comm, l->loads, l->all, (size_t)(n + 1) * sizeof *l->loads);
    expert_loads_clear(l);
    for (int r = 0; r < comm->ranks; r++) {
        const int64_t *of_rank = l->all + r * (n + 1);
        for (int64_t i = 0; i < n; i++) { l->loads[i] += of_rank[i]; }
        expert_loads_note_pieces(l, of_rank[n]);
    }
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
    int64_t pieces; // most of a micro-batch and block; 0: rows do not go in pieces
} LoadFigures;
static inline LoadFigures expert_loads_figures(const ExpertLoads *l) {
    LoadFigures f = {NAN, NAN, 0};
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
    f.pieces = *expert_loads_pieces(l);
    f.entropy = l->experts > 1 ? entropy / ((double)l->layers * log((double)l->experts)) : 1;
    return f;
}

#endif
