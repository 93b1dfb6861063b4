// plan.h: the plan of a run: one value that says everything that will happen, and how much memory,
// traffic and time it will take. plan_make.h makes it from three values, and from nothing else:
//
//   Config     what is asked: the flags, and what follows from them and from the data
//   Machine    what there is: ranks, nodes, threads, measured rates, memory that is taken already
//   ModelSpec  which model, and where its weights come from
//
// Predictions are sums over the schedule. Memory follows from the planned layouts, traffic from the
// messages of each PREFETCH, REDUCE and SEND, and time from the simulator with the machine's rates.
// Nothing here uses a device, a file, a message or a global variable. Plans contain pointers into
// themselves, so they stay where plan_make() has put them, and nobody changes them.
#ifndef PLAN_H
#define PLAN_H

#include "base/base.h"
#include "comm/group.h"
#include "cyclic.h"
#include "executor/activations.h"
#include "executor/compute.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "offload.h"
#include "ops/ops.h"
#include "options.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "plan/costs.h"
#include "plan/forecast.h"
#include "plan/rates.h"
#include "plan/state_plan.h"
#include "plan/system.h"
#include "privacy/privacy.h"
#include "schedule/actions.h"
#include "schedule/cyclic_windows.h"
#include "schedule/schedule.h"
#include "schedule/simulator.h"
#include "state/gather.h"
#include "state/layout.h"
#include "state/planned.h"
#include "state/policy.h"
#include "zero.h"

// What a run is asked to do. The options hold what was chosen where a flag leaves a choice: the
// stages of --pipeline auto, the number of cyclic stages.
typedef struct {
    Options options;
    OptionsGiven given;
    PipelinePlan pipeline; // stages of units on ranks, micro-batches
    int64_t samples;       // of a step over all ranks; in private runs the expected number
    int64_t steps;         // of the run
    bool chosen_length, chosen_batch; // --seq-len, --batch-tokens, by sizes.h
    bool restarts;                    // --resume 1, but there is no checkpoint yet: from step 0 on
    Privacy privacy;                  // privacy.on: the run is private
    Offload offload;                  // states off the device, as all ranks agree; host NULL: none
    // bytes of host memory that another model's states take while they become this one's
    size_t delink_bytes;
} Config;

// The model of a run.
typedef struct {
    GptModel model;
    DType dtype;
    const char *file; // of its weights; NULL: initial weights
    DType file_dtype; // of a model file, or of a folder of Hugging Face
    bool huggingface; // the file is such a folder
    GptModel begun;   // model of the checkpoint that `file` is; 0 units: it is a model file
} ModelSpec;

// The ranks of the run, or of --cluster, and what was measured on them.
typedef struct {
    Cluster cluster;     // --cluster; 0 x 0 nodes: not given
    Group cluster_ranks; // of the cluster
    const Group *ranks;  // all ranks that the plan is for, seen from the one that it is made on
    ProcessGroup world;  // the same ranks, with channels for collectives
    int threads;
    Rates rates;                // all 0: nothing is measured yet
    size_t taken[MEMORY_KINDS]; // device memory allocated before the run's: buffers of messages
    size_t resident;            // bytes of host memory that the process takes anyway
} Machine;

typedef struct {
    // memory: bytes on the device; host: resident bytes of the process besides these
    size_t memory[MEMORY_KINDS], host;
    size_t offloaded;                        // part of host: offloaded states and activations
    HostTraffic copied;                      // in a step
    int64_t stored;                          // bytes on disk; a step reads and writes all of them
    int64_t traffic[COMM_KINDS][LINK_KINDS]; // rows of experts: of even loads
    int64_t most_rows;   // bytes of rows of experts, if loads are as uneven as they can be
    double step_s, idle; // idle: share of the step in which this rank waits
    UnevenStep uneven;   // set by plan_make(), where rows of experts are sent; else all 0
} Prediction;

typedef struct {
    const Config *config;
    const Machine *machine;
    GptModel model;
    DType dtype;
    PipelinePlan pipeline; // stages of units on ranks, micro-batches
    const Stage *stage;    // of this rank
    CyclicPlan cyclic;     // rule CYCLIC_OFF: not cyclic
    int64_t most_samples;  // of a step
    ExecutorShape shape;   // of this rank's micro-steps
    StatePlan store;       // where each state will be; run_open() allocates it
    // schedules of a training step (a private run makes one for each step: plan_program) and of one
    // validation batch
    Program program, evaluation;
    Prediction predicted; // 0 while the machine's rates are unknown
} Plan;

// -------------------------------------------------------------------------------------------------
// Schedules

// Do the equal parts of a pipeline send over the same kinds of links, at the same speeds of ranks?
static inline bool machine_parts_alike(const Machine *m, const Placement *placement, int parts) {
    bool alike = true;
    for (int s = 0; s < placement->stages; s++) {
        const Stage *from = &placement->stage[s], *to = s + 1 < placement->stages ? from + 1 : from;
        const int n = from->replicas / parts, others = to->replicas / parts;
        for (int i = 0, j = 0; alike && i < from->replicas && j < to->replicas;) {
            // neighbours whose rows may overlap
            const int a = from->ranks[i], b = to->ranks[j], first = from->ranks[i % n];
            const int64_t end = (i + 1) * (int64_t)to->replicas,
                          other_end = (j + 1) * (int64_t)from->replicas;
            alike =
                group_link(m->ranks, a, b) == group_link(m->ranks, first, to->ranks[j % others]) &&
                cluster_slowness(&m->cluster, a) == cluster_slowness(&m->cluster, first);
            i += end <= other_end;
            j += other_end <= end;
        }
    }
    return alike;
}
// Returns into how many parts that do the same the ranks of a pipeline divide. One is planned if
// nobody runs the plan.
static inline int machine_parts(const Machine *m, const PipelinePlan *plan, int64_t samples) {
    int parts = plan->placement.stage[0].replicas;
    while (!pipeline_divides(plan, samples, parts) ||
           !machine_parts_alike(m, &plan->placement, parts)) {
        parts--;
    }
    return parts;
}
// Returns how many ranks each rank of a program stands for. What is shown is shown of all ranks of
// a pipeline. Norms of samples also cross parts. Rows of experts do, too, but as collectives do.
static inline int plan_alike(const Plan *p, const PipelinePlan *plan, int64_t samples) {
    const Machine *m = p->machine;
    const bool all = p->config->options.show_schedule || p->shape.clip.on;
    return !m->cluster.nodes             ? 1
           : plan->placement.stages == 1 ? m->ranks->n
           : all                         ? 1
                                         : machine_parts(m, plan, samples);
}
// Makes the program of a step, or of a validation batch, with `samples` samples. With --cluster, of
// ranks that do the same it has one; of a single stage the one with the most samples, which stands
// for all. The caller frees it.
static inline Program plan_program(const Plan *p, int64_t samples, bool training) {
    const bool pipeline = p->pipeline.placement.stages > 1;
    const bool recompute = p->shape.recompute;
    const PipelinePlan plan = pipeline ? pipeline_of_batch(&p->pipeline, samples) : p->pipeline;
    Program program = {};
    program.map = unit_map(&p->store, p->shape.clip.on);
    if (recompute) { unit_map_recomputes(&program.map, &p->pipeline.placement); }
    const int alike = plan_alike(p, &plan, samples);
    program.ranks = p->machine->ranks->n / alike;
    program.rank = new_array(Schedule, program.ranks, "schedules");
    if (alike > 1) { program.job_rank = new_array(int, program.ranks, "schedules"); }
    const int64_t mine = ceil_div(ceil_div(samples, alike), program.ranks);
    int64_t rows = p->shape.rows;
    // batches vary in size: equal parts are faster
    if (p->shape.clip.on) { rows = max_i64(1, ceil_div(mine, max_i64(1, ceil_div(mine, rows)))); }
    if (p->cyclic.rule && training) {
        schedule_cyclic(&program, &p->cyclic, samples, 0);
        return program;
    }
    if (pipeline && alike > 1) {
        PipelinePlan part = pipeline_part(&plan, alike, program.job_rank);
        schedule_pipeline(&program, &part, samples / alike, training);
        placement_free(&part.placement);
    } else if (pipeline) {
        schedule_pipeline(&program, &plan, samples, training);
    } else {
        schedule_sequential(&program, ceil_div(samples, alike), rows, training);
    }
    if (training && recompute) { schedule_lower_recompute(&program); }
    if (training && p->shape.clip.flat && !pipeline) { schedule_lower_clip(&program); }
    zero_lower(&program, training);
    if (training) { schedule_lower_stash(&program); }
    schedule_lower_parts(&program);
    return program;
}
// Does a forward pass over a step's samples come before the step? Switch's loss needs the loads of
// the whole step in each backward pass. Where each rank has one micro-batch, they are known when
// the first one begins.
static inline bool plan_looks_ahead(const Plan *p) {
    const Options *o = &p->config->options;
    return o->moe_balance == BALANCE_AUX && o->moe_aux_coefficient > 0 &&
           (p->pipeline.placement.stages > 1 || p->pipeline.micro_batches > 1 ||
            p->config->samples % p->machine->ranks->n != 0);
}
// Returns this rank's schedule of a program; of a training step.
static inline const Schedule *plan_rank_schedule(const Plan *p, const Program *program) {
    return &program->rank[program_rank(program, p->machine->ranks->me)];
}
static inline const Schedule *plan_schedule(const Plan *p) {
    return plan_rank_schedule(p, &p->program);
}

// -------------------------------------------------------------------------------------------------
// Memory

// Every forecast of memory asks here. A search has no time for that: it asks what these add up,
// executor_memory() of single units, and parameter_bytes() of states (planner/plan_task.h), and
// then here for the plan that it has found.

// Predicts the bytes of each kind on this rank, with micro-batches of `rows` samples.
static inline void predict_memory(const Plan *p, int64_t rows, bool recompute,
                                  size_t memory[MEMORY_KINDS]) {
    ExecutorShape shape = p->shape;
    shape.rows = rows;
    shape.recompute = recompute;
    memset(memory, 0, MEMORY_KINDS * sizeof *memory);
    executor_memory(&p->model, shape, p->machine->threads, memory);
    store_predict(&p->store, memory);
    memory[MEMORY_BUFFERS] += p->machine->taken[MEMORY_BUFFERS];
}
// Returns the plan as a rank of another stage sees it: its states, units and micro-batches in
// flight. store: of that stage. It is freed with p.
static inline Plan plan_of_stage(const Plan *p, const Stage *stage, const StatePlan *store) {
    const int rank = stage->ranks[0];
    Plan other = *p;
    other.store = *store;
    other.shape.units = placement_units_of_rank(&p->pipeline.placement, rank);
    other.shape.limits = limits_of_both(p->program.limits[program_rank(&p->program, rank)],
                                        p->evaluation.limits[program_rank(&p->evaluation, rank)]);
    return other;
}
// Returns the device memory that a rank of another stage takes. store: of that stage.
static inline double plan_stage_bytes(const Plan *p, const Stage *stage, const StatePlan *store) {
    size_t memory[MEMORY_KINDS];
    const Plan other = plan_of_stage(p, stage, store);
    predict_memory(&other, ceil_div(p->pipeline.micro_rows, stage->replicas), p->shape.recompute,
                   memory);
    return (double)memory_device(memory);
}
// Returns the bytes that this rank offloads to the host.
static inline size_t plan_offloaded_bytes(const Plan *p) {
    return store_host_bytes(&p->store) + executor_stash_all(&p->shape, &p->model);
}
// Returns the bytes of the host that this rank takes.
static inline size_t plan_host_bytes(const Plan *p) {
    return p->machine->resident + p->config->delink_bytes + plan_offloaded_bytes(p) +
           store_scratch_bytes(&p->store);
}

// -------------------------------------------------------------------------------------------------
// Traffic

// Adds the traffic of one step: all that PREFETCH, REDUCE and SEND of this rank's schedule send.
static inline void predict_program_traffic(const Plan *p, const Program *program,
                                           int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    const Group *ranks = p->machine->ranks;
    const Schedule *schedule = &program->rank[program_rank(program, ranks->me)];
    const StatePlan *store = &p->store;
    SentMessages *sent = new_array(SentMessages, 1, "prediction");
    for (int i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        ZeroMessage m[2];
        if (action_sends(a->kind)) {
            const int peer = program_job_rank(program, a->peer);
            traffic[COMM_SEND][group_link(ranks, ranks->me, peer)] +=
                executor_message_bytes(&p->shape, &p->model, a);
        }
        if (store->steps_overlap) { continue; } // no collectives
        for (int k = a->storage >= 0 ? action_messages(store, a, &p->shape, m) - 1 : -1; k >= 0;
             k--) {
            const int64_t *bytes = message_bytes(sent, &m[k])->mine;
            for (int l = 0; l < LINK_KINDS; l++) { traffic[m[k].kind][l] += bytes[l]; }
        }
    }
    free(sent);
}
// Returns the bytes of rows of experts that a rank's schedule sends at most: all of its own rows go
// away, and all rows of the others come, and go back.
static inline int64_t predict_most_rows(const Plan *p, const Program *program) {
    const GptModel *m = &p->model;
    const Schedule *schedule = plan_rank_schedule(p, program);
    const int64_t own = m->quantity[OF_OWN_EXPERTS], choices = gpt_choices(&m->config),
                  ranks = gpt_expert_ranks(&m->config),
                  away = min_i64(choices, m->config.experts - own),
                  come = (ranks - 1) * min_i64(choices, own);
    int64_t rows = 0;
    for (int i = 0; i < schedule->count && ranks > 1; i++) {
        const Action *a = &schedule->actions[i];
        if (!action_is(a->kind, OF_PART)) { continue; }
        // what leaves: own rows, by the first message forward and the second one back
        const bool leaves = (a->part == 1) == (a->kind == ACT_EXCHANGE);
        // in pieces, rows leave once more before their gradients come
        const bool again = gpt_takes_pieces(m) && a->kind == ACT_EXCHANGE_BACK && !leaves;
        // another rank may have a sample more
        const int64_t most = min_i64(a->rows + 1, max_i64(a->rows, p->shape.rows));
        rows += p->shape.T * (leaves ? a->rows * away : most * come);
        rows += p->shape.T * (again ? a->rows * away : 0);
    }
    return rows * gpt_width(m) * (int64_t)dtype_size(p->dtype);
}
// Predicts the traffic of a step. Where ranks take turns, this is the mean over their cycle of
// steps: the first rank, which is reported, has the same micro-batch in all steps, but its messages
// go to each rank of stage 1 in turn.
static inline void predict_traffic(const Plan *p, int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    const int steps = cyclic_turns(&p->cyclic) ? cyclic_phases(&p->cyclic, 1) : 1;
    predict_program_traffic(p, &p->program, traffic);
    if (plan_looks_ahead(p)) { predict_program_traffic(p, &p->evaluation, traffic); }
    for (int step = 1; step < steps; step++) {
        Program window = cyclic_window(&p->program, &p->cyclic, step);
        predict_program_traffic(p, &window, traffic);
        cyclic_window_free(&window);
    }
    for (int l = 0; l < LINK_KINDS; l++) { traffic[COMM_SEND][l] /= steps; }
}

// -------------------------------------------------------------------------------------------------
// Time

// The planned stores of all ranks. Ranks of a stage have equal plans: this rank's stands for its
// own stage, the first rank's for each other stage.
typedef struct {
    const StatePlan **of_rank; // [ranks of the program]
    StatePlan *stores;         // [stages] of the other stages
    Group *seen;               // [stages] all ranks, seen from the first rank of the stage
    int stages;
} StageStores;
static inline StageStores stage_stores_make(const Plan *p) {
    const StatePlan *mine = &p->store;
    const Placement *placement = mine->placement;
    const int ranks = p->program.ranks, alike = mine->ranks->n / ranks;
    int number = 0; // of a rank in the program
    StageStores s = {NULL, NULL, NULL, placement->stages};
    s.of_rank = new_array(const StatePlan *, ranks, "stages");
    s.stores = new_array(StatePlan, s.stages, "stages");
    s.seen = new_array(Group, s.stages, "stages");
    for (int r = 0; r < ranks; r++) { s.of_rank[r] = mine; }
    for (int i = 0; i < s.stages; i++) {
        const Stage *stage = &placement->stage[i];
        number += stage->replicas / alike;
        if (stage == p->stage) { continue; }
        s.seen[i] = group_seen_from(mine->ranks, stage->ranks[0]);
        s.stores[i] = state_plan_as(mine, &s.seen[i], &mine->policy);
        for (int k = 0; k < stage->replicas / alike; k++) {
            s.of_rank[p->program.job_rank ? number - 1 - k : stage->ranks[k]] = &s.stores[i];
        }
    }
    return s;
}
static inline void stage_stores_free(StageStores *s) {
    for (int i = 0; i < s->stages; i++) {
        if (s->seen[i].n) {
            store_plan_free(&s->stores[i]);
            group_free(&s->seen[i]);
        }
    }
    free_all(s->of_rank, s->stores, s->seen);
}
// Computes the device memory of a rank of each stage: bytes[stages]. stages: of this plan.
static inline void plan_stages_bytes(const Plan *p, const StageStores *stages, double *bytes) {
    const Placement *placement = &p->pipeline.placement;
    size_t memory[MEMORY_KINDS];
    predict_memory(p, p->shape.rows, p->shape.recompute, memory);
    bytes[p->stage - placement->stage] = (double)memory_device(memory);
    for (int i = 0; i < stages->stages; i++) {
        const Stage *stage = &placement->stage[i];
        if (stage == p->stage) { continue; }
        bytes[i] = plan_stage_bytes(p, stage, &stages->stores[i]);
    }
}
// Returns that of the rank that needs most of it.
static inline double plan_most_bytes(const Plan *p, const StageStores *stages) {
    const int count = p->pipeline.placement.stages;
    double *bytes = new_array(double, count, "prediction"), most = 0;
    plan_stages_bytes(p, stages, bytes);
    for (int i = 0; i < count; i++) { most = max_f64(most, bytes[i]); }
    free(bytes);
    return most;
}
// Returns what the costs of a plan's actions follow from; the caller frees costs.sent and
// costs.passes. stores: of the ranks of the program.
static inline Costs plan_costs_of(const Plan *p, const StatePlan **stores) {
    const Costs costs = {
        .program = &p->program,
        .model = &p->model,
        .shape = &p->shape,
        .stores = stores,
        .rates = p->machine->rates,
        .T = (double)p->shape.T,
        .clip = p->shape.clip,
        .iterations = (double)p->config->options.muon_steps,
        .sent = new_array(SentMessages, 1, "prediction"),
        .passes = new_array(KnownPasses, 1, "prediction"),
    };
    return costs;
}
// Returns the simulated time of a step that follows others, in seconds. Sets the computing time of
// each rank (busy) and the times of each action (times), if these are not NULL. stages: of this
// plan. uneven: see Costs.
static inline double predict_uneven_step(const Plan *p, const StageStores *stages, double uneven,
                                         double *busy, ActionTime **times) {
    Costs costs = plan_costs_of(p, stages->of_rank);
    costs.uneven = uneven;
    double step_s = schedule_simulate_times(&p->program, action_cost, &costs, busy, times);
    if (plan_looks_ahead(p)) {
        double *looks = new_array(double, p->program.ranks, "prediction");
        step_s += schedule_simulate(&p->evaluation, action_cost, &costs, looks);
        for (int r = 0; r < p->program.ranks && busy; r++) { busy[r] += looks[r]; }
        free(looks);
    }
    free_all(costs.sent, costs.passes);
    return step_s;
}
// The same, where the loads of experts are even.
static inline double predict_step(const Plan *p, const StageStores *stages, double *busy,
                                  ActionTime **times) {
    return predict_uneven_step(p, stages, 0, busy, times);
}
// Adds the seconds in which ranks wait for rows of experts in a program, of the rank that waits
// longest: forward (and again where that is computed again), and back.
static inline void predict_waits(const Plan *p, const StageStores *stages, const Program *program,
                                 double uneven, double seconds[2]) {
    Costs costs = plan_costs_of(p, stages->of_rank);
    double most[2] = {0};
    costs.uneven = uneven;
    for (int r = 0; r < program->ranks; r++) {
        double waits[2] = {0};
        for (int i = 0; i < program->rank[r].count; i++) {
            const Action *a = &program->rank[r].actions[i];
            if (!action_is(a->kind, OF_PART)) { continue; }
            const ActionCost cost = collectives_cost(&costs, stages->of_rank[r], a);
            waits[a->kind == ACT_EXCHANGE_BACK] += cost.message_s;
        }
        if (waits[0] + waits[1] > most[0] + most[1]) { memcpy(most, waits, sizeof most); }
    }
    for (int k = 0; k < 2; k++) { seconds[k] += most[k]; }
    free_all(costs.sent, costs.passes);
}
// Returns how a step fares where loads of experts are even, and where they are as uneven as memory
// is planned for.
static inline UnevenStep predict_uneven(const Plan *p, const StageStores *stages) {
    const GptModel *m = &p->model;
    const double planned = (double)m->quantity[OF_ARRIVALS] / (double)gpt_choices(&m->config);
    UnevenStep step = {.most = fmax(1, planned)};
    for (int k = 0; k < 2; k++) {
        const double uneven = k ? step.most - 1 : 0;
        double waits[2] = {0};
        predict_waits(p, stages, &p->program, uneven, waits);
        if (plan_looks_ahead(p)) { predict_waits(p, stages, &p->evaluation, uneven, waits); }
        step.wait_s[k] = waits[0] + waits[1];
    }
    step.most_s = predict_uneven_step(p, stages, step.most - 1, NULL, NULL);
    return step;
}

// -------------------------------------------------------------------------------------------------

// Returns all that is predicted of a plan. The machine's rates must be known. stages: of this plan.
static inline Prediction plan_predict(const Plan *p, const StageStores *stages) {
    const size_t block_bytes = executor_stash_bytes(&p->shape, &p->model);
    Prediction all = {};
    double *busy = new_array(double, p->program.ranks, "prediction");
    predict_memory(p, p->shape.rows, p->shape.recompute, all.memory);
    all.offloaded = plan_offloaded_bytes(p);
    all.host = plan_host_bytes(p);
    all.copied = offload_update_traffic(&p->store);
    offload_add_traffic(&p->store, plan_schedule(p), block_bytes, &all.copied);
    if (plan_looks_ahead(p)) {
        offload_add_traffic(&p->store, plan_rank_schedule(p, &p->evaluation), block_bytes,
                            &all.copied);
    }
    all.stored = store_disk_bytes(&p->store);
    predict_traffic(p, all.traffic);
    all.most_rows = predict_most_rows(p, &p->program);
    if (plan_looks_ahead(p)) { all.most_rows += predict_most_rows(p, &p->evaluation); }
    all.step_s = predict_step(p, stages, busy, NULL);
    const int me = program_rank(&p->program, p->machine->ranks->me);
    all.idle = all.step_s > 0 ? max_f64(0, 1 - busy[me] / all.step_s) : 0; // not by rounding
    free(busy);
    return all;
}

#endif
