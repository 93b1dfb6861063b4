// plan_task.h: pipeline plans, the task for which they are sought, the ranks that a plan takes, and
// the links between these.
//
// Plans      A plan is a list of stages: number of units, number of replicas, and the policy by
//            which its ranks are taken from the nodes:
//              APPEND   nodes in use first, beginning with the last node of the stage before
//              FRESH    unused nodes first, so that sums stay inside nodes
//              SCATTER  evenly over the nodes in use (over all, if none is): for small parameters
//                       and large activations
//              SPREAD   from the nodes with the most free ranks (not in the paper)
//              LAST     from the last node back, since nodes may differ (not in the paper)
// Invariants The stages of a plan have all units in order, and all ranks. The size of a micro-batch
//            divides the samples of a step.
#ifndef PLAN_TASK_H
#define PLAN_TASK_H

#include "base/base.h"
#include "comm/group.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "planner/planner_model.h"
#include "schedule/schedule.h"
#include "state/optimizer.h"
#include "state/policy.h"

// -------------------------------------------------------------------------------------------------
// Links: seconds of messages, by the constants of --cluster

// The ranks of a stage: a range of the plan's list of ranks.
typedef struct {
    const int *ranks; // ascending
    int n, first_node, last_node;
    int least, most; // ranks of a node that has some
    double sent;     // of an all-reduce's bytes, what a rank sends to other nodes at most, if own
    double slowness; // of the slowest rank: all wait for it
    int hops; // of a message among them, each with its latency: inside nodes and between them
} PlanRanks;
// Finds on how many nodes the ranks are, how many on one, the largest 2 (n - k) / n of a node's k
// ranks (what leaves each of them if all exchange slices), and the slowness of the slowest.
static inline int plan_spread(const Cluster *c, PlanRanks *p) {
    int nodes = 0;
    for (int i = 0, k; i < p->n; i += k) {
        const int node = cluster_node_of(c, p->ranks[i]),
                  end = cluster_first_rank(c, node) + cluster_node_ranks(c, node);
        k = (int)min_i64(p->n - i, end - p->ranks[i]);
        while (p->ranks[i + k - 1] >= end) { k--; }
        p->most = max_i64(p->most, k);
        p->least = p->least ? min_i64(p->least, k) : k;
        p->sent = max_f64(p->sent, 2.0 * (p->n - k) / p->n);
        p->slowness = max_f64(p->slowness, cluster_slowness(c, p->ranks[i]));
        nodes++;
    }
    return nodes;
}
static inline PlanRanks plan_ranks(const Cluster *c, const int *ranks, int n) {
    PlanRanks p = {.ranks = ranks, .n = n};
    const int nodes = plan_spread(c, &p);
    p.first_node = cluster_node_of(c, ranks[0]);
    p.last_node = cluster_node_of(c, ranks[n - 1]);
    // members that are spread evenly add up inside their node first (comm/collectives.h)
    const bool even = p.most * nodes == n;
    if (even) { p.sent = 2.0 * (nodes - 1) / n; }
    p.hops = 1 + (even && nodes > 1 && p.most > 1);
    return p;
}
// Returns the ranks of two stages together, as far as plan_all_reduce_s() needs them.
static inline PlanRanks plan_ranks_of_both(const PlanRanks *a, const PlanRanks *b) {
    const int n = a->n + b->n, first_node = (int)min_i64(a->first_node, b->first_node),
              last_node = (int)max_i64(a->last_node, b->last_node);
    const bool same = a->first_node == b->first_node && a->last_node == b->last_node,
               even = a->most == a->least && b->most == b->least && (same || a->most == b->most);
    const int most = same ? a->most + b->most : (int)max_i64(a->most, b->most),
              least = same ? a->least + b->least : (int)min_i64(a->least, b->least);
    PlanRanks p = {
        .n = n, .first_node = first_node, .last_node = last_node, .least = least, .most = most};
    p.sent = even ? 2.0 * (n - most) / n / most : 2.0 * (n - least) / n;
    p.hops = 1 + (even && first_node != last_node && most > 1);
    return p;
}
// Returns the bytes/s of a rank between nodes, of whose link the other ranks of its node have as
// much (cluster_rates()).
static inline double plan_inter_of_rank(const Cluster *c) { return c->inter * 1e9 / c->ranks; }
// Returns the latency of an all-reduce, which is that of two messages among all ranks.
static inline double plan_latency_s(const Cluster *c, const PlanRanks *p, bool own) {
    return 2e-6 * c->latency * (own ? p->hops : 1);
}
// Returns the seconds of an all-reduce of `bytes` over the ranks of a stage. own: as this program
// makes it, inside nodes and then between them. Otherwise as in the paper, in a ring: each rank
// sends 2 (n - 1) / n of the bytes, over a node's link, or inside a node where n / 2 pairs send at
// once.
static inline double plan_all_reduce_s(const Cluster *c, const PlanRanks *p, bool own,
                                       double bytes) {
    const bool crosses = p->first_node != p->last_node;
    const double latency = plan_latency_s(c, p, own), ring = 2.0 * (p->n - 1) / p->n;
    if (p->n == 1 || bytes == 0) { return 0; }
    if (!own) {
        return ring * bytes / ((crosses ? c->inter : c->intra * (p->n / 2)) * 1e9) + latency;
    }
    const double inside = 2.0 * (p->most - 1) / p->most / (c->intra * 1e9),
                 between = crosses ? p->sent / plan_inter_of_rank(c) : 0;
    return (inside + between) * bytes + latency;
}
// Transfer of `bytes` from all ranks of a stage to all of another, split and concatenated on the
// way. own: as this program sends it, each rank its samples. Otherwise as in the paper: several
// senders to one node share its gather rate.
static inline double plan_transfer_s(const Cluster *c, const PlanRanks *from, const PlanRanks *to,
                                     bool own, double bytes) {
    bool one_node = to->first_node == to->last_node;
    int outside = 0;
    if (!one_node) {
        outside = from->n;
    } else if (from->first_node != from->last_node || from->first_node != to->first_node) {
        for (int i = 0; i < from->n; i++) {
            outside += cluster_node_of(c, from->ranks[i]) != to->first_node;
        }
    }
    if (bytes == 0) { return 0; }
    if (own) {
        return bytes / from->n / (outside ? plan_inter_of_rank(c) : c->intra * 1e9) +
               1e-6 * c->latency * ceil_div(to->n, from->n);
    }
    if (!outside) { return bytes / (c->intra * 1e9) + 1e-6 * c->latency; }
    double share = one_node ? (double)outside / from->n : 1;
    return share * bytes / ((one_node && outside > 1 ? c->gather : c->inter) * 1e9) +
           1e-6 * c->latency;
}

// -------------------------------------------------------------------------------------------------
// Plans
typedef enum {
    PLACE_APPEND,
    PLACE_FRESH,
    PLACE_SCATTER,
    PLACE_SPREAD,
    PLACE_LAST,
    PLACE_POLICIES
} PlacePolicy;
typedef struct {
    int stages;
    int64_t micro_batch; // samples
    bool recompute;
    PipelineKind kind;
    Warmup warmup;
    int units[PLAN_STAGES], replicas[PLAN_STAGES];
    unsigned char policy[PLAN_STAGES];
} StagePlan;

typedef struct PlanTask PlanTask;
// Counts the device memory of a rank of each stage, bytes[stages], on these ranks (plan_place).
// depth: micro-batches in flight at most.
typedef void (*CountStages)(const PlanTask *t, const StagePlan *p, const int *ranks, int depth,
                            double *bytes);
// What to plan for.
struct PlanTask {
    const PlanModel *model;
    Cluster cluster;
    int64_t samples; // samples of a step
    double device;   // bytes that a rank may take of its device; INFINITY: no limit
    double memory;   // the same, of what stages_memory() counts
    int zero;        // ZeRO stage
    // bytes of the states of a parameter: on each rank of a stage; those that its ranks divide
    double whole, divided;
    double slots;        // of a parameter whose whole storage is in slots (plan_slots), such bytes
    int64_t micro_batch; // only this size; 0: any
    bool gives_stages;   // --pipeline gives them
    // Messages are those of this program, not the paper's: they take time from computing (overlap=
    // of the cluster), and a step ends with the update, between sums of gradients and a gathering
    // of parameters. What these two take of an all-reduce of gradients in fp32.
    bool own_messages;
    double sum_share, gather_share;
    double update_bytes; // memory traffic of a parameter's update; 0: not known
    // tokens and floating-point operations of a sample; 0 operations: not known
    double sample_tokens, sample_flops;
    double run_tokens; // of the run; not positive: not known
    // stages x micro-batches of all replays after which a search ends with its best plan so far; 0:
    // it goes on to the end
    int64_t most_work;
    // counts what the plan of a run takes (NULL: not known, stages_memory() stands for it)
    CountStages count;
    const void *run; // of `count`
};
static inline int task_ranks(const PlanTask *t) { return t->cluster.all_ranks; }
// Sets what a task's states take at a ZeRO stage.
static inline void task_set_states(PlanTask *t, const Optimizer *o, DType dtype, int zero_stage) {
    t->sum_share = 1;
    t->zero = zero_stage;
    t->whole = parameter_bytes(o, dtype, zero_stage, INFINITY);
    t->divided = parameter_bytes(o, dtype, zero_stage, 1) - t->whole;
}
// The same, and what else is known of a run: its messages, sums in reduce_dtype, and its updates.
static inline void task_set_run(PlanTask *t, const Optimizer *o, DType dtype, DType reduce_dtype,
                                int zero_stage) {
    task_set_states(t, o, dtype, zero_stage);
    t->own_messages = true;
    t->sum_share = (double)dtype_size(reduce_dtype) / (2 * sizeof(float));
    t->gather_share = (double)dtype_size(dtype) / (2 * sizeof(float));
    t->update_bytes = optimizer_update_bytes(o);
    t->slots = (zero_stage >= 2 ? sizeof(float) : 0) + (zero_stage == 3 ? dtype_size(dtype) : 0);
}
// Returns the parameters of the units from `first` to the one before `end`: the model has the bytes
// of their gradients.
static inline double plan_parameters(const PlanModel *m, int first, int end) {
    return (m->parameters[end] - m->parameters[first]) / sizeof(float);
}

// Returns how many of the blocks from unit `first` to the one before `end` there are.
static inline int plan_blocks(const PlanModel *m, int first, int end) {
    return (int)max_i64(0, min_i64(end, m->units - 1) - max_i64(first, 1));
}
// Returns the parameters of their experts that other ranks have.
static inline double plan_elsewhere(const PlanModel *m, int first, int end) {
    return m->expert_ranks
               ? (m->expert_ranks - 1) * m->experts / sizeof(float) * plan_blocks(m, first, end)
               : 0;
}
// Returns the bytes of gradients that the n ranks of a stage sum: all but those of experts that
// only one of them has.
static inline double plan_summed_bytes(const PlanModel *m, int first, int end, int n) {
    return m->parameters[end] - m->parameters[first] -
           (m->expert_ranks == n ? m->experts * plan_blocks(m, first, end) : 0);
}
// Can stages have so many ranks? Experts are divided over each expert_ranks of a stage.
static inline bool plan_divides_experts(const PlanModel *m, const StagePlan *p) {
    bool divides = true;
    for (int s = 0; s < p->stages && m->expert_ranks; s++) {
        divides = divides && p->replicas[s] % m->expert_ranks == 0;
    }
    return divides;
}

// Returns the i-th number of replicas to try for a part of n replicas: all if n is small; otherwise
// the smallest, whole nodes, and those that leave the smallest rest. 0: no more.
static inline int split_choice(int n, int node, int i) {
    enum { FEW = 8 };
    if (n <= 4 * FEW) { return i + 1 < n ? i + 1 : 0; }
    if (i < FEW) { return i + 1; }
    if (i < 2 * FEW) { return n - (i - FEW + 1); }
    int step = max_i64(node, ceil_div(n, 2 * FEW) / node * node), at = (i - 2 * FEW + 1) * step;
    while (at <= FEW) { at += step; }
    return at < n - FEW ? at : 0;
}
// How many ranks of each node the stages so far have, and the next one takes.
typedef struct {
    const Cluster *cluster;
    int *used, *take; // [nodes]; take is all 0 between stages
    int open;         // all nodes before it are full
    int spare;        // free ranks of nodes that are in use
    int low, high;    // the next stage takes ranks of nodes low .. high - 1
    int last;         // last node of the stage before
} PlanPlaces;
static inline int places_free(const PlanPlaces *p, int node) {
    return cluster_node_ranks(p->cluster, node) - p->used[node] - p->take[node];
}
static inline void places_take(PlanPlaces *p, int node, int n) {
    p->take[node] += n;
    p->low = (int)min_i64(p->low, node);
    p->high = (int)max_i64(p->high, node + 1);
}
// Takes up to n ranks from the nodes that are in use (touched) or unused, from node `first` on, as
// many as each has. Returns how many are missing.
static inline int place_take(PlanPlaces *p, bool touched, int first, int n) {
    const int nodes = p->cluster->nodes;
    int spare = touched ? p->spare : INT32_MAX;
    for (int i = 0, k = first; i < nodes && n && spare; i++, k = k + 1 < nodes ? k + 1 : 0) {
        if ((p->used[k] > 0) != touched || p->take[k]) { continue; }
        const int of_node = (int)min_i64(n, places_free(p, k));
        places_take(p, k, of_node);
        n -= of_node;
        spare -= touched ? of_node : 0;
    }
    return n;
}
static inline int place_scatter(PlanPlaces *p, bool touched, int n) {
    int spare = touched ? p->spare : INT32_MAX;
    for (bool moved = true; moved && n && spare;) {
        moved = false;
        for (int k = p->open; k < p->cluster->nodes && n && spare; k++) {
            if ((p->used[k] > 0) == touched && places_free(p, k)) {
                places_take(p, k, 1);
                n--;
                spare -= touched;
                moved = true;
            }
        }
    }
    return n;
}
static inline int place_last(PlanPlaces *p, int n) {
    for (int k = p->cluster->nodes - 1; k >= 0 && n; k--) {
        const int of_node = (int)min_i64(n, places_free(p, k));
        if (of_node) { places_take(p, k, of_node); }
        n -= of_node;
    }
    return n;
}
static inline int place_spread(PlanPlaces *p, int n) {
    for (int free_ranks = p->cluster->ranks; n; free_ranks--) {
        for (int k = p->open; k < p->cluster->nodes && n; k++) {
            if (places_free(p, k) == free_ranks) {
                places_take(p, k, 1);
                n--;
            }
        }
    }
    return 0;
}
// Chooses n ranks for the next stage (section 4.2 of the paper).
static inline void place_stage(PlanPlaces *p, PlacePolicy policy, int n) {
    bool touched = policy != PLACE_FRESH;
    p->low = p->cluster->nodes;
    p->high = 0;
    if (policy == PLACE_SPREAD) { n = place_spread(p, n); }
    if (policy == PLACE_LAST) { n = place_last(p, n); }
    for (int round = 0; round < 2 && n; round++) {
        n = policy == PLACE_SCATTER
                ? place_scatter(p, touched, n)
                : place_take(p, touched, policy == PLACE_APPEND ? p->last : 0, n);
        touched = !touched;
    }
}
// Writes the ranks of a plan, stage by stage, to ranks[task_ranks]. scratch: [2 * nodes].
static inline void plan_place(const PlanTask *t, const StagePlan *plan, int *ranks, int *scratch) {
    const Cluster *c = &t->cluster;
    PlanPlaces p = {.cluster = c, .used = scratch, .take = scratch + c->nodes};
    int at = 0;
    memset(scratch, 0, 2 * c->nodes * sizeof(int));
    for (int s = 0; s < plan->stages; s++) {
        place_stage(&p, (PlacePolicy)plan->policy[s], plan->replicas[s]);
        for (int k = p.low; k < p.high; k++) {
            if (!p.take[k]) { continue; }
            const int first = cluster_first_rank(c, k) + p.used[k];
            for (int i = 0; i < p.take[k]; i++) { ranks[at++] = first + i; }
            p.spare += p.used[k] ? -p.take[k] : cluster_node_ranks(c, k) - p.take[k];
            p.used[k] += p.take[k];
            p.take[k] = 0;
            p.last = k;
        }
        while (p.open < c->nodes && !places_free(&p, p.open)) { p.open++; }
    }
}

// Returns the plan for schedule_pipeline(): one unit and one rank for each stage, after a unit
// without costs, since the first unit of a model has no input part. The caller frees the placement.
static inline PipelinePlan plan_pipeline(const StagePlan *p, int micro_batches, int64_t depth) {
    // recompute is false: recomputation is in the costs
    PipelinePlan plan = {.placement = placement_make(p->stages),
                         .kind = p->kind,
                         .warmup = p->warmup,
                         .micro_rows = 1,
                         .micro_batches = micro_batches,
                         .depth = depth};
    for (int s = 0; s < p->stages; s++) {
        Stage *stage = &plan.placement.stage[s];
        stage->first_unit = s ? s + 1 : 0;
        stage->units = s ? 1 : 2;
        stage->replicas = 1;
        stage->ranks = new_array(int, 1, "placement");
        *stage->ranks = s;
    }
    return plan;
}
static inline int plan_live(const StagePlan *p, int stage, int depth, int micro_batches) {
    const PipelinePlan plan = {.placement = {p->stages, NULL},
                               .kind = p->kind,
                               .warmup = p->warmup,
                               .micro_batches = micro_batches,
                               .depth = depth};
    return pipeline_live(&plan, stage);
}
// Returns the samples of a micro-batch that the busiest replica has.
static inline double plan_rows(int64_t micro_batch, int replicas) {
    return (double)ceil_div(micro_batch, replicas);
}
// Is a plan a run of one stage? Its ranks divide the step, and have equally many samples of each
// micro-batch (plan_apply).
static inline bool plan_is_whole(const PlanTask *t, const StagePlan *p) {
    return t->own_messages && p->stages == 1;
}
// Returns the samples of a micro-batch, as a run of the plan has them.
static inline int64_t plan_batch_samples(const PlanTask *t, const StagePlan *p) {
    const int64_t ranks = plan_is_whole(t, p) ? task_ranks(t) : 1;
    return min_i64(t->samples, ranks * ceil_div(p->micro_batch, ranks));
}
// Returns the micro-batches of a step.
static inline int plan_batches(const PlanTask *t, const StagePlan *p) {
    return (int)ceil_div(t->samples, plan_batch_samples(t, p));
}
// Returns whether a rank's schedule is short enough (SCHEDULE_MAX). For a micro-batch a unit has at
// most four compute actions, ACQUIRE and RELEASE of one or two storages around each, and sums.
// peers: ranks with which it exchanges messages, at most.
static inline bool schedule_is_short(int64_t micro_batches, int64_t units, int64_t peers) {
    const int64_t of_unit = 24;
    return micro_batches * (of_unit * units + 2 * peers) <= SCHEDULE_MAX;
}
// Returns whether those of a plan are: peers are all replicas of the neighbouring stages.
static inline bool plan_is_short(const PlanTask *t, const StagePlan *p) {
    bool is_short = true;
    for (int s = 0; s < p->stages; s++) {
        const int64_t peers =
            (s ? p->replicas[s - 1] : 0) + (s + 1 < p->stages ? p->replicas[s + 1] : 0);
        is_short &= schedule_is_short(plan_batches(t, p), p->units[s], peers);
    }
    return is_short;
}

#endif
