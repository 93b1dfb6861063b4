// auto_stages.h: --pipeline auto: the planner chooses the stages of this run, for this model, timed
// here, on these ranks, whose links are measured, or on --cluster.
#ifndef AUTO_STAGES_H
#define AUTO_STAGES_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "executor/activations.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "ops/ops.h"
#include "ops/orthogonalise.h"
#include "options.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "plan/costs.h"
#include "plan/plan.h"
#include "plan/plan_make.h"
#include "plan/rates.h"
#include "plan/unit_times.h"
#include "planner/plan_answer.h"
#include "planner/plan_costs.h"
#include "planner/plan_task.h"
#include "planner/planner.h"
#include "planner/planner_model.h"
#include "schedule/schedule.h"
#include "state/optimizer.h"
#include "state/planned.h"
#include "state/policy.h"

// Computes what one sample takes in one unit: the activations, and the buffers for each further
// weight part that waits.
static inline void unit_bytes(const GptModel *m, const ExecutorShape *shape, int unit,
                              double *activations, double *waiting) {
    size_t memory[2][MEMORY_KINDS] = {{0}};
    ExecutorShape alone = *shape;
    alone.rows = 1;
    alone.units = units_range(unit, unit + 1);
    alone.recompute = false;
    for (int k = 0; k < 2; k++) {
        alone.limits.works = 2 + k;
        executor_memory(m, alone, 1, memory[k]);
    }
    const double sent =
        unit + 1 < m->units ? SEND_BUFFERS * (double)executor_boundary_bytes(&alone, m) : 0;
    *activations = (double)memory[0][MEMORY_ACTIVATIONS] - sent;
    *waiting = (double)memory[1][MEMORY_BUFFERS] - (double)memory[0][MEMORY_BUFFERS];
}
// Sets what a rank takes beside its states and activations: what it sends and receives, and
// buffers.
static inline void plan_model_buffers(PlanModel *model, const GptModel *m,
                                      const ExecutorShape *shape, int threads) {
    ExecutorShape some = *shape;
    some.rows = 1;
    some.units = units_range(0, 1); // whose gradients go nowhere
    model->boundary = (double)executor_boundary_bytes(&some, m);
    for (int i = 0; i < PLAN_ROWS; i++) {
        size_t memory[MEMORY_KINDS] = {0};
        some.rows = INT64_C(1) << i;
        if (some.rows > INT32_MAX / some.T) {
            model->buffers[i] = 2 * model->buffers[i - 1];
            continue;
        }
        executor_memory(m, some, threads, memory);
        model->buffers[i] = (double)memory[MEMORY_BUFFERS];
    }
    size_t waiting[MEMORY_KINDS] = {0}; // no gradients are kept of the first unit
    some.rows = 1;
    some.limits.works = 2;
    executor_memory(m, some, threads, waiting);
    model->turns = model->buffers[0] - (double)waiting[MEMORY_BUFFERS];
}
// Sets what an optimizer of whole matrices needs. real: compute precision.
static inline void plan_model_matrices(PlanModel *model, const GptModel *m, DType real,
                                       const Rates *rates, double iterations) {
    PlanMatrices *x = &model->matrices;
    StoragePart parts[MOST_PARTS];
    for (int k = gpt_storage_ranges(m, m->first_block, parts) - 1; k >= 0; k--) {
        const StoragePart *p = &parts[k];
        const double bytes = (double)(p->rows * p->cols) * sizeof(float);
        x->block += bytes;
        if (!p->is_matrix) { continue; }
        x->count++;
        x->of_matrices += bytes;
        x->largest = fmax(x->largest, bytes);
        x->scratch = fmax(x->scratch, (double)orthogonalise_bytes(p->rows, p->cols, real));
        const double seconds = matrix_seconds(rates, iterations, p);
        x->block_s += seconds;
        x->longest_s = fmax(x->longest_s, seconds);
    }
}
// Returns the model for the planner. shape: of a micro-batch; its rows do not matter. threads: of a
// rank. rates: of products.
static inline PlanModel plan_model_of_run(const GptModel *m, const ExecutorShape *shape,
                                          const UnitTimes *times, int threads, const Rates *rates,
                                          const Options *o) {
    PlanModel model = plan_model_make(m->units);
    model.tied = gpt_is_tied(m) ? (double)gpt_storage_elements(m, m->classifier) : 0;
    if (gpt_expert_ranks(&m->config) > 1) {
        model.expert_ranks = (int)gpt_expert_ranks(&m->config);
        model.experts = (double)m->class_elements[STORAGE_EXPERTS] * sizeof(float);
    }
    plan_model_buffers(&model, m, shape, threads);
    if (optimizers[o->optimizer].cut == CUT_MATRICES) {
        plan_model_matrices(&model, m, shape->dtype, rates, (double)o->muon_steps);
    }
    // a unit's output, and as much its gradient
    const double boundary = model.boundary;
    double activations = 0, waiting = 0, before = 0; // before: elements of the unit before
    for (int u = 0; u < m->units; u++) {
        const UnitClass kind = gpt_unit_class(m, u);
        const double *row_s = times->row_s[kind], *pass_s = times->pass_s[kind];
        int storages[2], n = gpt_unit_storages(m, u, storages);
        double elements = 0;
        for (int i = 0; i < n; i++) { elements += gpt_storage_elements(m, storages[i]); }
        // a unit of the same class and size as the one before keeps as much
        if (!u || kind != gpt_unit_class(m, u - 1) || elements != before) {
            unit_bytes(m, shape, u, &activations, &waiting);
        }
        before = elements;
        plan_model_add(&model, u, row_s[ACT_FORWARD],
                       row_s[ACT_BACKWARD_INPUT] + row_s[ACT_BACKWARD_WEIGHT], activations,
                       elements * sizeof(float));
        plan_model_pass(&model, u, pass_s[ACT_FORWARD],
                        pass_s[ACT_BACKWARD_INPUT] + pass_s[ACT_BACKWARD_WEIGHT],
                        pass_s[ACT_BACKWARD_WEIGHT]);
        plan_model_split(&model, u, row_s[ACT_BACKWARD_WEIGHT], waiting);
        // one block's activations are recomputed at a time
        plan_model_keep(&model, u, kind == UNIT_BLOCK ? 0 : activations, u ? boundary : 0);
        if (kind == UNIT_BLOCK) { model.again = activations; }
    }
    return model;
}
// A message to rank `to` and one from rank `from`, of so many bytes each.
typedef struct {
    Comm *comm;
    int to, from;
    char *data; // [2 * bytes]
    size_t bytes;
} TimedExchange;
static inline void begin_exchange(const void *exchange, CommRequest *requests) {
    const TimedExchange *x = (const TimedExchange *)exchange;
    requests[0] = comm_receive_begin(x->comm, MEASURING, x->from, x->data + x->bytes, x->bytes);
    requests[1] = comm_send_begin(x->comm, MEASURING, x->to, x->data, x->bytes);
}
// Returns the seconds of an exchange, the best of a few, while all ranks do the same. A rank that
// is `to` itself only waits for the others.
static inline double measure_exchange(const TimedExchange *x) {
    double best = INFINITY;
    for (int i = 0; i < 4; i++) {
        CommRequest requests[2];
        comm_barrier(x->comm);
        if (x->to == x->comm->rank) { continue; }
        double start = seconds_now();
        begin_exchange(x, requests);
        for (int r = 0; r < 2; r++) { comm_wait(x->comm, &requests[r]); }
        best = fmin(best, seconds_now() - start);
    }
    return best;
}
// Ranks count as equally fast up to this ratio: a measurement is not better than that.
static const double SPEEDS_ALIKE = 1.15;
// Returns the speed of a node whose ranks have these slownesses: 1, or a multiple of 0.05 where its
// slowest rank is clearly slower than others.
static inline double node_speed(const double *slowness, int ranks) {
    double most = 1;
    for (int i = 0; i < ranks; i++) { most = fmax(most, slowness[i]); }
    return most < SPEEDS_ALIKE ? 1 : fmax(0.05, round(20 / most) / 20);
}
// Returns the nodes of this run, without rates. slowness: of each rank; NULL: all are alike. Ends
// the program (EXIT_INPUT) if ranks are not numbered node by node, or nodes have too many sizes.
static inline Cluster nodes_of_run(const Comm *comm, const double *slowness) {
    Cluster c = cluster_empty();
    bool good = true;
    for (int r = 0, first = 0; r < comm->ranks; r++) {
        if (r + 1 < comm->ranks && comm->node_of[r + 1] == comm->node_of[r]) { continue; }
        const double speed = slowness ? node_speed(slowness + first, r + 1 - first) : 1;
        good = good && comm->node_of[r] == c.nodes && cluster_add(&c, 1, r + 1 - first, speed);
        first = r + 1;
    }
    if (!good && slowness) { return nodes_of_run(comm, NULL); } // too many speeds
    if (!good) {
        die(EXIT_INPUT, "give the stages, or start the ranks node by node, as many on each",
            "--pipeline auto: %d ranks on %d nodes are not in the nodes' order, or these have more "
            "than %d sizes",
            comm->ranks, comm->nodes, CLUSTER_PARTS);
    }
    return c;
}
// Returns the cluster of this run for the planner: its ranks, and the measured links. All ranks
// call it and get what the first rank of a largest node measures. Ends the program (EXIT_INPUT) as
// nodes_of_run() does.
static inline Cluster cluster_of_run(Comm *comm, const double *slowness, Stream *s,
                                     double flops_per_s) {
    const size_t little = 1 << 10, much = 1 << 20;
    Cluster c = nodes_of_run(comm, slowness);
    char *data = new_array(char, 2 * much, "measuring links");
    const int n = comm->ranks, node = comm->node_of[comm->rank],
              first = cluster_first_rank(&c, node), of_node = cluster_node_ranks(&c, node),
              local = comm->rank - first;
    int root = 0; // the first rank of a largest node
    while (cluster_node_ranks(&c, comm->node_of[root]) < c.ranks) { root++; }
    for (int between = 0; between < 2; between++) {
        if (between ? c.nodes == 1 : c.ranks == 1) { continue; }
        // to a rank of another node, as many ranks further as no node has; or inside the node
        const int to = between ? (comm->rank + c.ranks) % n : first + (local + 1) % of_node,
                  from = between ? (comm->rank + n - c.ranks) % n
                                 : first + (local + of_node - 1) % of_node;
        const TimedExchange large = {
            .comm = comm, .to = to, .from = from, .data = data, .bytes = much};
        TimedExchange small = large;
        small.bytes = little;
        const double shorter = measure_exchange(&small), longer = measure_exchange(&large);
        const double rate = (much - little) / fmax(longer - shorter, 1e-9) * 1e-9;
        if (between) { // the ranks of a node share its link
            c.inter = c.gather = rate * c.ranks;
        } else {
            c.intra = rate;
        }
        if (between || c.nodes == 1) {
            c.overlap = 1 - measure_lost(begin_exchange, &large, longer, comm, s, flops_per_s);
        }
        c.latency = fmax(c.latency, 1e6 * shorter);
    }
    if (c.nodes == 1) { c.inter = c.gather = c.intra; }
    if (c.ranks == 1) { c.intra = c.inter; }
    comm_barrier(comm);
    c.memory = measure_bytes(s) * 1e-9;
    free(data);
    comm_reset_counters(comm);
    comm_broadcast(comm, &c, sizeof c, root);
    return c;
}

// Returns the seconds of the model's units, by the rates of --cluster.
static inline UnitTimes times_on_cluster(const Cluster *c, const GptModel *m,
                                         const ExecutorShape *shape) {
    const Rates rates = cluster_rates(c, shape->dtype);
    return unit_times_of_rates(m, &rates, (double)shape->T);
}
// The same, as timed on the fastest rank, or on rank 0 where it is nearly as fast. slowness[ranks]
// receives the time of each rank in that one's. All ranks call it. Ends the program (EXIT_INPUT) if
// that would take long.
static inline UnitTimes times_measured_here(const GptModel *m, const ExecutorShape *shape,
                                            Rates *rates, Comm *comm, Stream *s, double *slowness) {
    int root = 0;
    rates->flops_per_s = measure_flops(s);
    comm_barrier(comm); // all at the same time: they may share memory and cores
    time_units(&rates->units, m, shape, rates->flops_per_s, s);
    double mine = 0; // of a block
    for (int k = 0; k < 3; k++) {
        mine += unit_pass_s(&rates->units, UNIT_BLOCK, k, (double)shape->rows);
    }
    comm_all_gather_small(comm, &mine, slowness, sizeof mine);
    for (int r = 1; r < comm->ranks; r++) {
        if (slowness[r] * SPEEDS_ALIKE < slowness[0] && slowness[r] < slowness[root]) { root = r; }
    }
    const double fastest = slowness[root];
    for (int r = 0; r < comm->ranks; r++) { slowness[r] /= fastest; }
    // all ranks search by the same numbers, or they would choose other plans
    comm_broadcast(comm, &rates->flops_per_s, sizeof rates->flops_per_s, root);
    comm_broadcast(comm, &rates->units, sizeof rates->units, root);
    if (!rates->units.known) {
        die(EXIT_INPUT, "give the stages",
            "--pipeline auto: one sample takes this CPU or GPU too long to time the model's units "
            "by it");
    }
    return rates->units;
}

// Writes a plan into the flags and the stages of a run. ranks: of plan_place(). depth:
// micro-batches in flight for which there is memory. The caller calls placement_free() for
// c->pipeline.placement.
static inline void plan_apply(Config *c, const PlanTask *t, const StagePlan *plan, const int *ranks,
                              int depth) {
    Options *o = &c->options;
    o->batch_tokens = t->samples * o->seq_len;
    o->micro_batch =
        plan->stages > 1 ? plan->micro_batch : ceil_div(plan->micro_batch, task_ranks(t));
    o->micro_batches = plan->stages > 1 ? t->samples / plan->micro_batch : 0;
    o->recompute = plan->recompute ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
    o->pipeline_schedule = plan->kind;
    o->pipeline_warmup = plan->warmup;
    const PipelinePlan pipeline = {.placement = plan_placement(plan, ranks),
                                   .kind = plan->kind,
                                   .warmup = plan->warmup,
                                   .depth = depth < INT32_MAX ? depth : INT64_MAX,
                                   .recompute = plan->recompute};
    c->pipeline = pipeline;
}
// The run that a plan is for.
typedef struct {
    const Config *config;
    const ModelSpec *spec;
    const Machine *machine;
    Comm *comm; // NULL: the plan is for --cluster
} PlannedRun;
// Returns the bytes of the buffer of messages that a rank takes before its run (transport_open), of
// a plan that is made earlier. comm NULL: the plan is for --cluster.
static inline size_t staging_to_come(const Comm *comm, const Plan *p) {
    return comm ? comm_staging_bytes(&comm->everyone, p->store.wire, store_most_elements(&p->store),
                                     COMM_STAGING_BYTES)
                : 0;
}
// Counts the memory of a plan's stages by making the run's plan, of a step that is only so long
// that every stage holds as much as in a longer one. All ranks call it (CountStages).
static inline void count_stages_of_run(const PlanTask *t, const StagePlan *plan, const int *ranks,
                                       int depth, double *bytes) {
    const PlannedRun *run = (const PlannedRun *)t->run;
    Config c = *run->config;
    Machine machine = *run->machine;
    plan_apply(&c, t, plan, ranks, depth);
    // a stage of GPipe holds all micro-batches, of others at most twice as many as there are stages
    const int64_t few = plan->kind == PIPELINE_GPIPE ? t->samples : 2 * (plan->stages + 1);
    c.samples = min_i64(t->samples, few * plan_batch_samples(t, plan));
    memset(&machine.rates, 0, sizeof machine.rates);
    Plan *p = plan_make(&c, &machine, run->spec);
    StageStores stages = stage_stores_make(p);
    machine.taken[MEMORY_BUFFERS] += staging_to_come(run->comm, p);
    plan_stages_bytes(p, &stages, bytes);
    stage_stores_free(&stages);
    plan_free(p);
    placement_free(&c.pipeline.placement);
    if (run->comm) { comm_broadcast(run->comm, bytes, plan->stages * sizeof *bytes, 0); }
}

// Runs the planner for this model, timed here, on these ranks or on --cluster, and writes its
// choice into *c. Rank 0 prints it. All ranks call it. *rates receives what was timed. The caller
// calls placement_free() for c->pipeline.placement.
static inline void plan_run(Config *c, const ModelSpec *spec, const Machine *machine, Comm *comm,
                            Stream *s, Rates *rates) {
    const Options *o = &c->options;
    const GptModel *m = &spec->model;
    const Cluster *given = &machine->cluster;
    ExecutorShape shape = {};
    shape.dtype = spec->dtype;
    shape.rows = o->micro_batch;
    shape.T = o->seq_len;
    shape.logits = LOGITS_PLENTY;
    shape.units = units_range(0, m->units);
    shape.limits = limits_of_one();
    gpt_work_check(&m->config, shape.rows, shape.T);
    double *slowness = new_array(double, comm->ranks, "speeds of ranks");
    const UnitTimes times = given->nodes ? times_on_cluster(given, m, &shape)
                                         : times_measured_here(m, &shape, rates, comm, s, slowness);
    const Rates products = given->nodes ? cluster_rates(given, spec->dtype) : *rates;
    int threads = machine->threads;
    comm_broadcast(comm, &threads, sizeof threads, 0);
    PlanModel model = plan_model_of_run(m, &shape, &times, threads, &products, o);
    Cluster cluster = given->nodes ? *given : cluster_of_run(comm, slowness, s, rates->flops_per_s);
    if (!cluster_is_alike(&cluster)) { rates->unequal = cluster; }
    const PlannedRun run = {c, spec, machine, given->nodes ? NULL : comm};
    PlanTask task = planner_task(&model, &cluster, o, &c->given);
    task_set_run(&task, &optimizers[o->optimizer], spec->dtype, (DType)o->reduce_dtype,
                 (int)o->zero);
    task.count = count_stages_of_run;
    task.run = &run;
    if (given->nodes) { task.most_work = 1 << 20; } // about a second
    task.sample_flops = gpt_step_flops(m, (double)o->seq_len, (double)o->seq_len);
    const StagePlan best =
        planner_report(comm->rank || (o->json && !o->plan) ? NULL : stdout, &task, o);
    Planner p = planner_make(&task);
    planner_look(&p, &best);
    plan_apply(c, &task, &best, p.ranks, p.costs.depth);
    planner_free(&p);
    plan_model_free(&model);
    free(slowness);
}

#endif
