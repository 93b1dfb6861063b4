// plan_costs.h: what a pipeline plan costs: links of a cluster, placement, memory, and the replay
// of a plan's schedule, which decides.
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
#ifndef PLAN_COSTS_H
#define PLAN_COSTS_H

#include "base/base.h"
#include "comm/group.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "planner/planner_model.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "schedule/simulator.h"
#include "state/matrices.h"
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

// What a plan costs, for each stage.
typedef struct {
    // depth: micro-batches in flight for which there is memory, D
    int stages, micro_batches, depth;
    // seconds of a micro-batch (StageSeconds)
    double forward[PLAN_STAGES], backward[PLAN_STAGES], weight[PLAN_STAGES];
    // seconds of a micro-batch's messages from this stage to the next, and back
    double send[PLAN_STAGES], send_back[PLAN_STAGES];
    // seconds of the sums of gradients and of gathering parameters; of what is left of them, and of
    // the update, while the stage computes nothing
    double reduce[PLAN_STAGES], reduce_late[PLAN_STAGES];
    double memory[PLAN_STAGES]; // bytes that a rank needs
    int live[PLAN_STAGES];      // micro-batches in flight, K
    // maximum of forwards before the first gradient arrives
    int ahead[PLAN_STAGES];
} PlanCosts;

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
// Returns the samples for which a rank of a stage computes in a pass.
static inline double plan_pass_rows(const PlanTask *t, const StagePlan *p, int replicas) {
    return plan_is_whole(t, p) ? plan_rows(t->samples, replicas) / plan_batches(t, p)
                               : plan_rows(p->micro_batch, replicas);
}
// Seconds of a micro-batch in a stage.
typedef struct {
    double forward;
    double backward; // includes recomputation
    double weight;   // the part of backward that may wait: weight parts of zero-bubble; else 0
} StageSeconds;
// Returns the time of the units from `first` to the one before `end` on this many ranks, of which
// the slowest takes so many times as long as the fastest ones.
static inline StageSeconds plan_stage_seconds(const PlanTask *t, const StagePlan *p, int first,
                                              int end, int replicas, double slowness) {
    const PlanModel *m = t->model;
    const bool waits = p->kind == PIPELINE_ZERO_BUBBLE;
    const double rows = plan_pass_rows(t, p, replicas),
                 forward = slowness * unit_seconds(&m->forward, first, end, rows);
    const StageSeconds s = {
        .forward = forward,
        .backward =
            slowness * unit_seconds(&m->backward, first, end, rows) + (p->recompute ? forward : 0),
        .weight = waits ? slowness * unit_seconds(&m->weight, first, end, rows) : 0,
    };
    return s;
}
// Does each micro-batch sum gradients, and at ZeRO stage 3 gather parameters?
static inline bool plan_sums_often(const PlanTask *t) { return t->own_messages && t->zero >= 2; }
// Returns the bytes of gradients that the n ranks of a stage sum. One stage has the table that its
// first and last unit share once: with the first.
static inline double plan_sum_bytes(const PlanModel *m, const StagePlan *p, int first, int end,
                                    int n) {
    const bool again = p->stages == 1 && end == m->units;
    return plan_summed_bytes(m, first, end, n) - (again ? m->tied * sizeof(float) : 0);
}
// Returns the seconds of a message of `bytes` of gradients, of which it takes a share of the
// all-reduce.
static inline double plan_message_s(const PlanTask *t, const PlanRanks *ranks, double share,
                                    double bytes) {
    return bytes > 0 && share > 0
               ? share * plan_all_reduce_s(&t->cluster, ranks, t->own_messages, bytes)
               : 0;
}
// Returns the seconds in which a rank computes while a message travels: as long as the longer one,
// and what the message takes of the cores.
static inline double plan_beside_s(const PlanTask *t, double computing, double message) {
    return max_f64(computing, message) + (1 - t->cluster.overlap) * min_f64(computing, message);
}
// Returns the seconds of a micro-batch as plan_stage_seconds() does, with the messages that it has
// among the ranks of the stage. While a unit computes, the parameters of the next one are gathered
// (counted as its own), and the gradients of the one before are summed; those of the first unit,
// while the next micro-batch runs forward. The table that both ends share travels once a step.
static inline StageSeconds plan_pass_seconds(const PlanTask *t, const StagePlan *p, int first,
                                             int end, const PlanRanks *ranks) {
    const PlanModel *m = t->model;
    if (!plan_sums_often(t) || ranks->n == 1) {
        return plan_stage_seconds(t, p, first, end, ranks->n, ranks->slowness);
    }
    StageSeconds all = {};
    double before = 0; // the sum of the unit before
    for (int u = end - 1, n; u >= first; u -= n) {
        n = u + 1 - (int)max_i64(first, m->alike[u]);
        const StageSeconds unit = plan_stage_seconds(t, p, u, u + 1, ranks->n, ranks->slowness);
        const bool waits = unit.weight > 0;
        const bool shares = p->stages > 1 && (u == 0 || u == m->units - 1);
        const double bytes = plan_sum_bytes(m, p, u, u + 1, ranks->n) -
                             (shares ? m->tied * sizeof(float) : 0),
                     sum = plan_message_s(t, ranks, t->sum_share, bytes),
                     gather = t->zero == 3 ? plan_message_s(t, ranks, t->gather_share, bytes) : 0;
        all.forward += n * plan_beside_s(t, unit.forward, gather);
        if (waits) {
            all.weight += plan_beside_s(t, unit.weight, before) +
                          (n - 1) * plan_beside_s(t, unit.weight, sum);
            all.backward += n * plan_beside_s(t, unit.backward - unit.weight, gather);
        } else {
            all.backward += plan_beside_s(t, unit.backward, gather + before) +
                            (n - 1) * plan_beside_s(t, unit.backward, gather + sum);
        }
        before = sum;
    }
    all.backward += all.weight;
    if (plan_batches(t, p) > 1) { all.forward = plan_beside_s(t, all.forward, before); }
    return all;
}
// Returns the seconds of all messages of `bytes` of gradients over these ranks: sums, and the
// gathering of parameters.
static inline double plan_sums_s(const PlanTask *t, const PlanRanks *ranks, double bytes) {
    return plan_message_s(t, ranks, t->sum_share + t->gather_share, bytes);
}
// Returns the seconds of a stage's messages of gradients that remain after its last backward: that
// of each unit begins when its gradients are complete, the last unit's first; they run one after
// another. gather: instead, the seconds in which its first forward waits for parameters, each
// unit's message before the unit: the same, back in time. share: of an all-reduce.
static inline double plan_exposed_s(const PlanTask *t, const StagePlan *p, int first, int end,
                                    const PlanRanks *ranks, bool gather, double share) {
    const PlanModel *m = t->model;
    double computed = 0, sent = 0;
    if (ranks->n == 1 || share == 0) { return 0; }
    for (int u = end - 1, n; u >= first; u -= n) {
        // The n units up to u that are alike: the message that ends last waits for the first of
        // them, or for the last, or for those before.
        n = u + 1 - (int)max_i64(first, m->alike[u]);
        const StageSeconds unit = plan_stage_seconds(t, p, u, u + 1, ranks->n, ranks->slowness);
        const double bytes = plan_sum_bytes(m, p, u, u + 1, ranks->n),
                     one = gather ? unit.forward : unit.backward,
                     message = plan_message_s(t, ranks, share, bytes);
        if (bytes > 0) {
            sent =
                max_f64(max_f64(sent, computed + one) + n * message, computed + n * one + message);
        }
        computed += n * one;
    }
    return max_f64(0, sent - computed);
}
// Returns the seconds of a micro-batch's messages from a stage to another; bytes: of a sample. Of
// this program's the rank with most samples decides.
static inline double plan_sends_s(const PlanTask *t, const StagePlan *p, const PlanRanks *from,
                                  const PlanRanks *to, double bytes) {
    const bool own = t->own_messages;
    const double samples =
        own ? from->n * plan_rows(p->micro_batch, from->n) : (double)p->micro_batch;
    return plan_transfer_s(&t->cluster, from, to, own, samples * bytes);
}
// Returns the bytes of buffers that a rank needs for so many samples at once, whatever its units.
static inline double plan_buffers(const PlanModel *m, double rows) {
    int i = 0;
    double low = 1;
    for (; 2 * low <= rows && i < PLAN_ROWS - 2; i++) { low *= 2; }
    return m->buffers[i] + (rows - low) / low * (m->buffers[i + 1] - m->buffers[i]);
}
// Returns how many blocks of a stage an optimizer of whole matrices treats together, as if waves
// (state/matrices.h) began with the stage; 0: it treats none.
static inline double plan_wave(const PlanModel *m, int blocks, int replicas) {
    const int count = m->matrices.count;
    return count ? (double)min_i64(blocks, matrices_wave_blocks(count, replicas)) : 0;
}
// Returns the seconds in which the matrices of a stage travel to their homes, become orthogonal,
// and travel back, as if the ranks divided each wave as evenly as its largest matrix allows.
static inline double plan_matrices_s(const PlanTask *t, int first, int end,
                                     const PlanRanks *ranks) {
    const PlanMatrices *x = &t->model->matrices;
    const int blocks = plan_blocks(t->model, first, end);
    const double wave = plan_wave(t->model, blocks, ranks->n);
    if (wave == 0) { return 0; }
    // A rank sends its slice of each block to the homes, and then as much back, once for a block.
    const Cluster *c = &t->cluster;
    const bool crosses = ranks->first_node != ranks->last_node;
    const double n = ranks->n, far = crosses ? (n - ranks->least) / n / plan_inter_of_rank(c) : 0,
                 near = (ranks->most - 1) / n / (c->intra * 1e9),
                 messages = n == 1 ? 0
                                   : blocks * (2 * x->of_matrices / n * (far + near) +
                                               plan_latency_s(c, ranks, t->own_messages));
    return ranks->slowness * blocks / wave * fmax(wave * x->block_s / n, x->longest_s) + messages;
}
// Returns the bytes that an optimizer of whole matrices needs in a stage, whose ranks divide each
// wave evenly.
static inline double plan_matrices(const PlanModel *m, int first, int end, int replicas) {
    const PlanMatrices *x = &m->matrices;
    const double wave = plan_wave(m, plan_blocks(m, first, end), replicas);
    if (wave == 0) { return 0; }
    return x->scratch + wave * x->block / replicas +
           (replicas > 1 ? wave * x->of_matrices / replicas + x->largest : 0);
}
// A stage: units `first` to the one before `end`; its ranks; how many stages are after it; ranks of
// the first and of the last stage. Where a search does not know other stages yet, `after` is 0 and
// both ends have as many ranks as this stage.
typedef struct {
    int first, end, replicas, after, end_replicas[2];
} PlanStage;
static inline PlanStage plan_stage_alone(int first, int end, int replicas) {
    const PlanStage x = {first, end, replicas, 0, {replicas, replicas}};
    return x;
}
// Returns stage s of a plan, which begins with unit `first`.
static inline PlanStage plan_stage(const StagePlan *p, int s, int first) {
    const int last = p->stages - 1;
    const PlanStage x = {
        first, first + p->units[s], p->replicas[s], last - s, {p->replicas[0], p->replicas[last]}};
    return x;
}
// Returns the bytes of a rank's slots where ZeRO divides gradients, or parameters, too: for whole
// storages of two blocks, and for all others of the stage, less the slices that lie inside. The
// ranks of both ends own the table that these share.
static inline double plan_slots(const PlanTask *t, const PlanStage *x) {
    if (t->slots == 0) { return 0; }
    const PlanModel *m = t->model;
    const int blocks = plan_blocks(m, x->first, x->end), one = x->first ? x->first : 1;
    const bool begins = x->first == 0, ends = x->end == m->units;
    const double block = plan_summed_bytes(m, one, one + 1, x->replicas) / sizeof(float),
                 all = plan_summed_bytes(m, x->first, x->end, x->replicas) / sizeof(float),
                 table = begins || ends ? m->tied : 0,
                 others = all - blocks * block - (begins && ends ? 2 : 1) * table,
                 whole = others + (double)min_i64(2, blocks) * block,
                 inside = (others + (blocks > 2 ? 0 : blocks * block)) / x->replicas,
                 owners = begins && ends ? x->replicas : x->end_replicas[0] + x->end_replicas[1];
    return t->slots * ((x->replicas > 1 ? whole - inside : 0) + table * (1 - 1 / owners));
}
// Returns the bytes of a rank's states. The table that first and last unit share counts once. Ranks
// of both ends divide its states.
static inline double plan_stage_states(const PlanTask *t, const PlanStage *x) {
    const PlanModel *m = t->model;
    const bool begins = x->first == 0, ends = x->end == m->units;
    const double parameters = plan_parameters(m, x->first, x->end) - (begins && ends ? m->tied : 0),
                 of_other = begins != ends ? m->tied * x->end_replicas[begins] /
                                                 (x->end_replicas[0] + x->end_replicas[1])
                                           : 0,
                 divided = parameters - of_other + plan_elsewhere(m, x->first, x->end);
    return parameters * t->whole + divided * t->divided / x->replicas;
}
// Computes *bytes of a rank of a stage: its states; for each micro-batch in flight what the
// backward pass needs (of activations only what is kept, if the rest is recomputed) and what
// waiting weight parts need; what is recomputed at once; what is sent to, and received early from,
// the stages beside it; and buffers. Those of messages among the ranks of the stage are left out.
// Weight parts that wait are those of one micro-batch while there are at most `of_one` in flight,
// and of one more for each further one (pipeline.h: deferred).
// Returns how many micro-batches can be in flight in `limit` bytes (0: none).
static inline double plan_stage_memory(const PlanTask *t, const StagePlan *p, const PlanStage *x,
                                       double in_flight, double limit, double *bytes) {
    const PlanModel *m = t->model;
    const int first = x->first, end = x->end, replicas = x->replicas;
    const double rows = plan_rows(p->micro_batch, replicas),
                 all = m->activations[end] - m->activations[first],
                 left = p->recompute ? m->kept[end] - m->kept[first] : all,
                 again = all - left < m->again ? all - left : m->again,
                 inputs = m->cut[first] + m->inputs[end] - m->inputs[first + 1];
    // Gradients of weight parts that wait, and how much more these take than those that are used in
    // turns, which a stage of one unit has until a second micro-batch waits.
    const bool delays = p->kind == PIPELINE_ZERO_BUBBLE, one_unit = end - first == 1;
    const double waiting = delays ? rows * (m->waiting[end] - m->waiting[first]) : 0,
                 more = delays ? waiting - rows * m->turns : 0, later = one_unit ? more : 0,
                 gradients = delays && end < m->units ? m->boundary : 0;
    const double before = first > 0 ? SEND_BUFFERS + RECEIVED_AHEAD : 0,
                 behind = end < m->units ? SEND_BUFFERS + 1 + RECEIVED_AHEAD : 0,
                 fixed = plan_stage_states(t, x) +
                         rows * (again + m->boundary * (before + behind)) + plan_buffers(m, rows) +
                         plan_matrices(m, first, end, replicas) + plan_slots(t, x) + more - later,
                 each = rows * (left + inputs + gradients), of_one = x->after + 1;
    *bytes = fixed + in_flight * each +
             (in_flight > of_one ? (in_flight - of_one) * waiting + later : 0);
    const double room = limit - fixed,
                 fits = floor((room - later + of_one * waiting) / (each + waiting));
    return room < 0              ? 0
           : each + waiting == 0 ? INFINITY
           : fits > of_one       ? fits
                                 : fmin(floor(room / each), of_one);
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
static inline bool stages_memory(const PlanTask *t, const StagePlan *p, PlanCosts *c) {
    double depth = c->depth, bytes;
    for (int s = 0, first = 0; s < p->stages; first += p->units[s++]) {
        const PlanStage stage = plan_stage(p, s, first);
        double fits = plan_stage_memory(t, p, &stage, 0, t->memory, &bytes);
        if (fits < plan_live(p, s, c->depth, c->micro_batches)) { depth = min_f64(depth, fits); }
    }
    if (depth < (p->kind == PIPELINE_GPIPE ? c->micro_batches : 1)) { return false; }
    c->depth = (int)depth;
    for (int s = 0, first = 0; s < p->stages; first += p->units[s++]) {
        c->live[s] = plan_live(p, s, c->depth, c->micro_batches);
        c->ahead[s] =
            min_i64(c->live[s], p->kind == PIPELINE_ZERO_BUBBLE ? p->stages - s : INT32_MAX);
        const PlanStage stage = plan_stage(p, s, first);
        plan_stage_memory(t, p, &stage, c->live[s], t->memory, &c->memory[s]);
    }
    return true;
}
// Adds what a step of this program has besides: the cores that move messages cannot compute
// meanwhile, half of a message's time at each end; and each rank updates its part of the stage's
// parameters.
static inline void plan_add_own(const PlanTask *t, const StagePlan *p, PlanCosts *c) {
    const PlanModel *m = t->model;
    const double lost = 1 - t->cluster.overlap, bytes_per_s = t->cluster.memory * 1e9;
    for (int s = 0, first = 0; s < p->stages; first += p->units[s++]) {
        const double before = s ? c->send[s - 1] : 0, before_back = s ? c->send_back[s - 1] : 0,
                     elements = plan_parameters(m, first, first + p->units[s]) +
                                plan_elsewhere(m, first, first + p->units[s]) -
                                (p->stages == 1 ? m->tied : 0);
        c->forward[s] += lost / 2 * (before + c->send[s]);
        c->backward[s] += lost / 2 * (before_back + c->send_back[s]);
        c->reduce_late[s] += lost * (c->reduce[s] - c->reduce_late[s]);
        if (bytes_per_s > 0) {
            c->reduce_late[s] += elements / p->replicas[s] * t->update_bytes / bytes_per_s;
        }
    }
}
static inline void stage_takes(PlanCosts *c, int s, StageSeconds seconds) {
    c->forward[s] = seconds.forward;
    c->backward[s] = seconds.backward;
    c->weight[s] = seconds.weight;
}
// Computes the costs of a plan that do not depend on which ranks it has: memory, and the time of
// computing on the fastest ranks. All other costs are 0. Returns false if it does not fit the
// memory.
static inline bool plan_costs_anywhere(const PlanTask *t, const StagePlan *p, PlanCosts *c) {
    double *const none[] = {c->send, c->send_back, c->reduce, c->reduce_late};
    c->stages = p->stages;
    c->micro_batches = plan_batches(t, p);
    c->depth = INT32_MAX;
    if (!stages_memory(t, p, c)) { return false; }
    for (size_t i = 0; i < LENGTH_OF(none); i++) { memset(none[i], 0, p->stages * sizeof(double)); }
    for (int s = 0, first = 0; s < p->stages; first += p->units[s++]) {
        stage_takes(c, s, plan_stage_seconds(t, p, first, first + p->units[s], p->replicas[s], 1));
    }
    return true;
}
// Sets the seconds of a stage's messages once a step, and what remains of them. fill: when the
// first micro-batch arrives.
static inline void stage_ends(const PlanTask *t, const StagePlan *p, int s, int first,
                              const PlanRanks *ranks, double fill, PlanCosts *c) {
    const int end = first + p->units[s];
    const double bytes = plan_sum_bytes(t->model, p, first, end, ranks->n);
    double sums, gathers = 0;
    if (plan_sums_often(t)) { // those of the first unit are summed last
        sums = plan_message_s(t, ranks, t->sum_share,
                              plan_summed_bytes(t->model, first, first + 1, ranks->n));
        c->reduce[s] = sums + (t->zero == 2 ? plan_message_s(t, ranks, t->gather_share, bytes) : 0);
    } else {
        sums = plan_exposed_s(t, p, first, end, ranks, false, t->sum_share);
        c->reduce[s] = plan_sums_s(t, ranks, bytes);
    }
    if (t->zero < 3) { gathers = plan_exposed_s(t, p, first, end, ranks, true, t->gather_share); }
    c->reduce_late[s] = sums + max_f64(0, gathers - fill) + plan_matrices_s(t, first, end, ranks);
}
// Computes the costs of a plan on its ranks. Returns false if it does not fit the memory.
static inline bool plan_costs(const PlanTask *t, const StagePlan *p, const int *ranks,
                              PlanCosts *c) {
    const PlanModel *m = t->model;
    if (!plan_costs_anywhere(t, p, c)) { return false; }
    PlanRanks here = plan_ranks(&t->cluster, ranks, p->replicas[0]);
    const PlanRanks first_stage = here;
    const bool own = t->own_messages;
    double fill = 0; // when the first micro-batch arrives
    for (int s = 0, first = 0; s < p->stages; s++) {
        const int end = first + p->units[s];
        if (here.slowness != 1 || plan_sums_often(t)) {
            stage_takes(c, s, plan_pass_seconds(t, p, first, end, &here));
        }
        stage_ends(t, p, s, first, &here, fill, c);
        if (s + 1 < p->stages) {
            PlanRanks next = plan_ranks(&t->cluster, here.ranks + here.n, p->replicas[s + 1]);
            c->send[s] = plan_sends_s(t, p, &here, &next, m->cut[end]);
            c->send_back[s] = plan_sends_s(t, p, &next, &here, m->cut[end]);
            fill += c->forward[s] + c->send[s];
            here = next;
        }
        first = end;
    }
    if (own && p->stages > 1) {
        // The table that the embedding shares with the head is summed last, and used first.
        const PlanRanks both = plan_ranks_of_both(&first_stage, &here);
        const double bytes = m->tied * sizeof(float), alone = plan_sums_s(t, &first_stage, bytes),
                     more = max_f64(0, plan_sums_s(t, &both, bytes) - alone);
        c->reduce[0] += more;
        c->reduce_late[0] += more;
    }
    if (own) { plan_add_own(t, p, c); }
    return true;
}

// -------------------------------------------------------------------------------------------------
// A bound

// Returns a time that no schedule with these limits of micro-batches in flight beats. For each
// stage it adds the way of the first micro-batch to the stage, the time until its last input part,
// and what follows. The time until the last input part is at least all that the stage computes (of
// the forwards only some run before the first gradient is back), and at least the round trips in
// sequence that the limit of micro-batches in flight forces. What follows is the way back, or the
// stage's last weight part and its all-reduce. Other bounds are all that a stage computes, weight
// parts included, and its all-reduce; and all messages in or out.
static inline double plan_bound(const PlanCosts *c) {
    // back: from here to the end, not counting this stage's all-reduce
    double trip = 0, fill = 0, back = 0, bound = 0, last_send = 0, last_back = 0;
    const int M = c->micro_batches;
    for (int s = 0; s < c->stages; s++) {
        trip += c->forward[s] + c->backward[s] - c->weight[s] + c->send[s] + c->send_back[s];
    }
    for (int s = 0; s < c->stages; s++) {
        const int K = c->ahead[s];
        double F = c->forward[s], W = c->weight[s], B = c->backward[s] - W,
               late = c->reduce_late[s], drain = max_f64(back, W + late);
        double computing = trip + (M - 1) * B + (M - K) * F,
               waiting = (M - 1) / K * trip + (M - 1) % K * F + trip;
        double out = F + M * (c->send[s] + last_back) + back - last_back,
               in = M * (last_send + c->send_back[s]) - last_send + B + drain;
        bound = max_f64(bound, fill + max_f64(max_f64(max_f64(computing, waiting) + drain,
                                                      computing + M * W + late),
                                              max_f64(out, in)));
        trip -= F + B + c->send[s] + c->send_back[s];
        last_send = c->send[s];
        last_back = c->send_back[s];
        fill += F + last_send;
        back = drain + B + last_back; // the next stage's, to and from this one
    }
    return bound;
}

// -------------------------------------------------------------------------------------------------
// What decides: the schedule's replay

static inline ActionCost plan_action_cost(const void *context, int rank, const Action *a) {
    const PlanCosts *c = (const PlanCosts *)context;
    ActionCost cost = {0, 0};
    switch (a->kind) {
    case ACT_FORWARD: cost.compute_s = a->unit ? c->forward[rank] : 0; break;
    case ACT_BACKWARD_INPUT: cost.compute_s = c->backward[rank] - c->weight[rank]; break;
    case ACT_BACKWARD_WEIGHT: cost.compute_s = a->unit ? c->weight[rank] : 0; break;
    case ACT_SEND_FORWARD: cost.message_s = c->send[rank]; break;
    case ACT_SEND_BACKWARD: cost.message_s = c->send_back[rank - 1]; break;
    case ACT_REDUCE: cost.message_s = c->reduce_late[rank]; break;
    default: break;
    }
    return cost;
}
// Returns the map of a model whose units are the stages, each with one storage, after a unit
// without costs.
static inline UnitMap plan_unit_map(int stages) {
    UnitMap map = {};
    size_t n = (size_t)stages + 1;
    map.units = stages + 1;
    map.storages = stages;
    map.kept_gathered = -1;
    map.of_unit = (int(*)[2])checked_calloc(n, sizeof(int[2]), "map");
    map.of_unit_count = new_array(int, n, "map");
    for (int s = 0; s < stages; s++) {
        map.of_unit[s + 1][0] = s;
        map.of_unit_count[s + 1] = 1;
    }
    return map;
}
// Returns the step of a plan, one rank for each stage: the pipeline, then each stage's all-reduce;
// all ranks meet at the end.
static inline Program stages_program(const StagePlan *p, const PlanCosts *c, int micro_batches) {
    Program program = {.map = plan_unit_map(p->stages)};
    program.ranks = p->stages;
    program.rank = new_array(Schedule, p->stages, "schedules");
    for (int s = 0; s < p->stages; s++) { // space for nearly all, which then need not be moved
        const int of_micro_batch = 8;
        program.rank[s].capacity = of_micro_batch * (micro_batches + p->stages);
        program.rank[s].actions =
            resize_array(Action, NULL, program.rank[s].capacity, "a schedule");
    }
    PipelinePlan plan = plan_pipeline(p, micro_batches, c->depth);
    schedule_pipeline(&program, &plan, micro_batches, true);
    placement_free(&plan.placement);
    for (int s = 0; s < p->stages; s++) {
        schedule_add(&program.rank[s], action_make(ACT_REDUCE, -1, s, 0));
        schedule_add(&program.rank[s], action_make(ACT_NORM, -1, -1, 0));
    }
    return program;
}
// Returns the seconds of a step with this number of micro-batches.
static inline double plan_replay(const StagePlan *p, const PlanCosts *c, int micro_batches) {
    Program program = stages_program(p, c, micro_batches);
    double step = schedule_simulate(&program, plan_action_cost, c, NULL);
    program_free(&program);
    return step;
}
// Returns how many micro-batches plan_simulate() replays.
static inline int64_t plan_simulated_batches(const StagePlan *p, int64_t micro_batches) {
    const int half = 2 * p->stages + 16;
    const bool all = micro_batches <= 4 * half;
    return all ? micro_batches : 3 * half;
}
// Returns the seconds of a step with all micro-batches. If there are many, it extrapolates from two
// shorter replays: by then each further micro-batch takes the same time.
static inline double plan_simulate(const StagePlan *p, const PlanCosts *c) {
    int half = 2 * p->stages + 16, M = c->micro_batches;
    if (plan_simulated_batches(p, M) == M) { return plan_replay(p, c, M); }
    double longer = plan_replay(p, c, 2 * half);
    return longer + (longer - plan_replay(p, c, half)) / half * (M - 2 * half);
}
// Returns the share of all ranks' time in which they do not compute.
static inline double plan_bubble(const StagePlan *p, const PlanCosts *c, double step_s) {
    double computing = 0, ranks = 0;
    for (int s = 0; s < p->stages; s++) {
        computing += p->replicas[s] * c->micro_batches * (c->forward[s] + c->backward[s]);
        ranks += p->replicas[s];
    }
    return max_f64(0, 1 - computing / (ranks * step_s)); // not by rounding
}

#endif
