// plan_costs.h: what a pipeline plan costs: the times of its stages and their messages, a bound of
// its step, and the replay of its schedule, which decides.
#ifndef PLAN_COSTS_H
#define PLAN_COSTS_H

#include "base/base.h"
#include "comm/group.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "planner/plan_task.h"
#include "planner/planner_model.h"
#include "planner/stage_memory.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "schedule/simulator.h"

// What a plan costs, for each stage.
typedef struct {
    // depth: micro-batches in flight for which there is memory, D
    int stages, micro_batches, depth;
    // seconds of a micro-batch (StageSeconds)
    double forward[PLAN_STAGES], backward[PLAN_STAGES], weight[PLAN_STAGES];
    // seconds of a micro-batch's messages from this stage to the next, and back
    double send[PLAN_STAGES], send_back[PLAN_STAGES];
    double slows; // ActionCost.slows of these
    // seconds of the sums of gradients and of gathering parameters; of what is left of them, and of
    // the update, while the stage computes nothing
    double reduce[PLAN_STAGES], reduce_late[PLAN_STAGES];
    double memory[PLAN_STAGES]; // bytes that a rank needs
    int live[PLAN_STAGES];      // micro-batches in flight, K
    // maximum of forwards before the first gradient arrives
    int ahead[PLAN_STAGES];
} PlanCosts;

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
    return max_f64(message, computing + (1 - t->cluster.overlap) * message);
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
// Returns the seconds in which the matrices of a stage travel to their homes, become orthogonal,
// and travel back, as if the ranks divided each wave as evenly as its largest matrix allows.
static inline double plan_matrices_s(const PlanTask *t, int first, int end,
                                     const PlanRanks *ranks) {
    const PlanMatrices *x = &t->model->matrices;
    const int blocks = plan_blocks(t->model, first, end);
    const double wave = plan_wave(t->model, blocks, ranks->n);
    if (wave == 0) { return 0; }
    // All wait for the home of a block's largest matrix, which has a slice of it and gets the rest,
    // as if from all ranks alike, or for a rank that sends half of its slice. Back it is the same.
    const Cluster *c = &t->cluster;
    const bool crosses = ranks->first_node != ranks->last_node;
    const double n = ranks->n, slice = x->of_matrices / n,
                 moves = 2 * max_f64(x->largest - slice, slice / 2),
                 far = crosses ? (n - ranks->least) / (n - 1) / plan_inter_of_rank(c) : 0,
                 near = (ranks->most - 1) / (n - 1) / (c->intra * 1e9),
                 messages = n == 1 ? 0
                                   : blocks * (moves * (far + near) +
                                               plan_latency_s(c, ranks, t->own_messages));
    return ranks->slowness * blocks / wave * fmax(wave * x->block_s / n, x->longest_s) + messages;
}
// Sets what each stage needs, and how many micro-batches are in flight, of which c->depth is the
// limit. Returns false if a stage does not fit.
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
// meanwhile (plan_action_cost counts those between stages: half at each end); and each rank updates
// its part of the stage's parameters.
static inline void plan_add_own(const PlanTask *t, const StagePlan *p, PlanCosts *c) {
    const PlanModel *m = t->model;
    const double lost = 1 - t->cluster.overlap, bytes_per_s = t->cluster.memory * 1e9;
    for (int s = 0, first = 0; s < p->stages; first += p->units[s++]) {
        const double elements = plan_parameters(m, first, first + p->units[s]) +
                                plan_elsewhere(m, first, first + p->units[s]) -
                                (p->stages == 1 ? m->tied : 0);
        c->reduce_late[s] += lost * (c->reduce[s] - c->reduce_late[s]);
        if (bytes_per_s > 0) {
            c->reduce_late[s] += elements / p->replicas[s] * t->update_bytes / bytes_per_s;
        }
    }
}
// Sets the time of a micro-batch in a stage.
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
    c->slows = own ? (1 - t->cluster.overlap) / 2 : 0;
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
    cost.slows = action_is_message(a->kind) ? c->slows : 0;
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
