// fit.h: --fit: which way to run a model on a cluster, or on these ranks, is fastest. It makes the
// plan of each way that may be, keeps those that fit the memory, and orders them by predicted time.
//
// Ways       One stage: each ZeRO stage, with and without each part of ZeRO++, micro-batches of
//            1, 2, 4 ... samples and of all that a rank has in a step, recomputation, offloading.
//            Pipelines: even stages, and those that the planner finds; micro-batches that divide
//            the samples of a step; each schedule; ZeRO stages; recomputation. Experts: all of this
//            with experts on 1 rank, 2 ... A flag that is given stays as it is, and the samples of
//            a step do.
// Left out   Recomputation and offloading, where they are not needed: both only add to what a step
//            does. In pipelines: offloading that is not given; higher ZeRO stages where a lower one
//            fits, since they send more; plans whose computing alone takes longer than the ten
//            best. Where pipelines are many and large, those with the largest bounds (plan_bound),
//            after FIT_ACTIONS.
#ifndef FIT_H
#define FIT_H

#include "base/base.h"
#include "base/figures.h"
#include "base/files.h"
#include "base/readable.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "executor/activations.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "ops/ops.h"
#include "options.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "plan/costs.h"
#include "plan/forecast.h"
#include "plan/memory_plan.h"
#include "plan/option_pairs.h"
#include "plan/plan.h"
#include "plan/plan_make.h"
#include "plan/rates.h"
#include "plan/sizes.h"
#include "plan/system.h"
#include "planner/auto_stages.h"
#include "planner/balanced_stages.h"
#include "planner/plan_answer.h"
#include "planner/plan_costs.h"
#include "planner/plan_task.h"
#include "planner/planner.h"
#include "planner/planner_model.h"
#include "planner/stage_memory.h"
#include "schedule/schedule.h"
#include "state/optimizer.h"
#include "state/policy.h"

enum { FIT_BEST = 10, FIT_TEXT = 512, FIT_MICRO_BATCHES = 24, FIT_DEGREES = 32 };
// actions of pipelines that are simulated at most: some seconds
enum { FIT_ACTIONS = 32 << 20 };

// A way to run: the flags that are chosen.
typedef struct {
    int64_t zero, quantized_weights, partition, quantized_gradients;
    int64_t recompute, offload, micro_batch;
    int64_t schedule, warmup;
    int64_t expert_parallel;
    char pipeline[FIT_TEXT]; // "1": one stage
} FitWay;
typedef struct {
    FitWay way;
    double step_s, device, host; // device: bytes of the rank that needs most
    int64_t sent[LINK_KINDS];
} FitResult;
typedef struct {
    const Config *config; // what is asked
    const ModelSpec *spec;
    const Comm *comm;    // of these ranks; NULL: the search is for --cluster
    Machine machine;     // whose rates are known
    double memory, host; // bytes that a rank may take of its device, of the host
    bool offloads;       // the device has a memory of its own, and offloading is searched
    FitResult best[FIT_BEST];
    int found, tried;
    int64_t actions; // of the pipelines that were simulated
    int degrees;     // numbers of ranks that experts may be on
    int64_t degree[FIT_DEGREES];
    double one_rank_s; // seconds in which one rank would compute a step
} Fit;

// -------------------------------------------------------------------------------------------------
// One way

// Writes a way into flags. `given` notes the ones that the table of pairs asks about.
static inline void fit_apply(const FitWay *w, int64_t batch_tokens, Options *o) {
    o->zero = w->zero;
    o->zero_quantized_weights = w->quantized_weights;
    o->zero_hpz_partition_size = w->partition;
    o->zero_quantized_gradients = w->quantized_gradients;
    o->recompute = w->recompute;
    o->offload = w->offload;
    o->micro_batch = w->micro_batch;
    o->pipeline_schedule = w->schedule;
    o->pipeline_warmup = w->warmup;
    o->expert_parallel = w->expert_parallel;
    o->pipeline = w->pipeline;
    o->batch_tokens = batch_tokens;
    o->micro_batches = 0;
}
// Writes the flags to type. A plan's give its stages, even if it is one: --pipeline auto would
// search again.
static inline void fit_text(const Fit *f, const FitWay *w, char *text, size_t bytes) {
    static const char *const offloads[] = {"auto", "none", "optimizer", "params", "all"};
    const Options *o = &f->config->options;
    const bool pipelined = strcmp(w->pipeline, "1") != 0, stages = pipelined || !o->fit;
    int n = snprintf(text, bytes, "--zero %" PRId64, w->zero);
    n += snprintf(text + n, bytes - n, "%s%s",
                  w->quantized_weights ? " --zero-quantized-weights" : "",
                  w->quantized_gradients ? " --zero-quantized-gradients" : "");
    if (w->partition > 1) {
        n += snprintf(text + n, bytes - n, " --zero-hpz-partition-size %" PRId64, w->partition);
    }
    if (stages) { n += snprintf(text + n, bytes - n, " --pipeline %s", w->pipeline); }
    if (pipelined) {
        n += snprintf(text + n, bytes - n, " --pipeline-schedule %s",
                      pipeline_kind_names[w->schedule]);
    }
    n += snprintf(text + n, bytes - n, "%s%s", w->warmup ? " --pipeline-warmup b" : "",
                  w->recompute ? " --recompute block" : "");
    if (f->spec->model.config.experts) {
        n += snprintf(text + n, bytes - n, " --expert-parallel %" PRId64, w->expert_parallel);
    }
    if (w->offload != OFFLOAD_NONE || *o->device_memory) {
        n += snprintf(text + n, bytes - n, " --offload %s", offloads[w->offload]);
    }
    n += snprintf(text + n, bytes - n, " --micro-batch %" PRId64 " --batch-tokens %" PRId64,
                  w->micro_batch, f->config->samples * o->seq_len);
    if (f->config->chosen_length) {
        snprintf(text + n, bytes - n, " --seq-len %" PRId64, o->seq_len);
    }
}
// Returns the time by which ways are ordered. Quantized messages change what is computed, so they
// must gain at least one percent.
static inline double fit_order(const FitResult *r) {
    return r->step_s * (r->way.quantized_weights || r->way.quantized_gradients ? 1.01 : 1);
}
static inline void fit_keep(Fit *f, const FitResult *r) {
    int at = f->found;
    while (at > 0 && fit_order(&f->best[at - 1]) > fit_order(r)) { at--; }
    if (at == FIT_BEST) { return; }
    if (f->found < FIT_BEST) { f->found++; }
    memmove(f->best + at + 1, f->best + at, (f->found - 1 - at) * sizeof *f->best);
    f->best[at] = *r;
}
// Returns the seconds that a way must beat.
static inline double fit_limit(const Fit *f) {
    return f->found == FIT_BEST ? fit_order(&f->best[FIT_BEST - 1]) : (double)INFINITY;
}
// Returns the model of a way: its experts are on as many ranks as it says.
static inline ModelSpec fit_spec(const Fit *f, const FitWay *w) {
    ModelSpec spec = *f->spec;
    spec.model = gpt_model_divided(&spec.model, w->expert_parallel, f->config->options.moe_buffer);
    return spec;
}
// Makes the plan of a way. *c, which the caller has set to what is asked, and *unknown must outlive
// it; fit_free() frees it and what it is made from. Returns NULL if no such run is possible.
static inline Plan *fit_make(const Fit *f, const FitWay *w, Config *c, Machine *unknown) {
    const Options *o = &c->options;
    const ModelSpec spec = fit_spec(f, w);
    fit_apply(w, c->samples * o->seq_len, &c->options);
    c->given.at[OPTION_INDEX_expert_parallel] = true; // the way says it
    if (options_clash(o, &c->given)) { return NULL; }
    c->pipeline.placement = pipeline_placement(w->pipeline, spec.model.units, unknown->ranks->n);
    c->pipeline.micro_rows =
        min_i64(config_micro_rows(c, &spec.model, unknown->ranks->n), c->samples);
    if (w->expert_parallel > 1 && !pipeline_feeds_all(&c->pipeline, c->samples)) {
        placement_free(&c->pipeline.placement);
        return NULL;
    }
    c->pipeline.kind = (PipelineKind)w->schedule;
    c->pipeline.warmup = (Warmup)w->warmup;
    c->pipeline.recompute = w->recompute == RECOMPUTE_BLOCK;
    memset(&unknown->rates, 0, sizeof unknown->rates);
    Plan *p = plan_make(c, unknown, &spec);
    unknown->taken[MEMORY_BUFFERS] += staging_to_come(f->comm, p);
    c->offload.cpu_update = choose_updater(o, &f->machine.rates, &p->store);
    plan_offloaded(&p, c, &spec, NULL);
    return p;
}
static inline void fit_free(Plan *p, Config *c) {
    plan_free(p);
    free_all(c->offload.host, c->offload.disk);
    placement_free(&c->pipeline.placement);
}
// Makes the plan of a way, and keeps it if it fits and is fast. Returns whether it fits.
static inline bool fit_try(Fit *f, const FitWay *w) {
    Config c = *f->config;
    Machine unknown = f->machine;
    FitResult r = {.way = *w};
    Plan *p = fit_make(f, w, &c, &unknown);
    if (!p) { return false; }
    StageStores stages = stage_stores_make(p);
    r.device = plan_most_bytes(p, &stages);
    f->tried++;
    keep_alive(); // other ranks may be waiting
    const bool fits = r.device <= f->memory && (double)plan_offloaded_bytes(p) <= f->host;
    if (fits) {
        unknown.rates = f->machine.rates;
        const Prediction predicted = plan_predict(p, &stages);
        check_cluster_moves(&f->config->options, &f->machine.cluster, &predicted);
        r.step_s = predicted.step_s;
        r.host = (double)predicted.host;
        for (int k = 0; k < COMM_KINDS * LINK_KINDS; k++) {
            r.sent[k % LINK_KINDS] += predicted.traffic[k / LINK_KINDS][k % LINK_KINDS];
        }
        fit_keep(f, &r);
    }
    f->actions += (int64_t)p->program.ranks * plan_schedule(p)->count;
    stage_stores_free(&stages);
    fit_free(p, &c);
    return fits;
}

// -------------------------------------------------------------------------------------------------
// One stage

static inline bool fit_pinned(const Fit *f, int index) { return f->config->given.at[index]; }
// Is a place for states given? (auto leaves it to the search.)
static inline bool fit_pins_offload(const Fit *f) {
    return fit_pinned(f, OPTION_INDEX_offload) && f->config->options.offload != OFFLOAD_AUTO;
}
// May a flag have this value? asked: its value now.
static inline bool fit_allows(const Fit *f, int index, int64_t asked, int64_t value) {
    return !fit_pinned(f, index) || asked == value;
}
// Returns the bytes of a parameter's states that stay on each device of the n that have it.
static inline double fit_kept_bytes(const Fit *f, const FitWay *w, double n) {
    const Optimizer *o = &optimizers[f->config->options.optimizer];
    const StateKind last = w->offload >= OFFLOAD_PARAMS ? STATE_GRADIENT : STATE_PARAMETERS,
                    leave = OPTIMIZER_KINDS - 1;
    double kept[STATE_KINDS]; // up to this kind
    for (StateKind k = leave; k <= STATE_PARAMETERS; k++) {
        kept[k] = parameter_bytes_up_to(k, o, f->spec->dtype, (int)w->zero, n);
    }
    return kept[last] - (w->offload >= OFFLOAD_OPTIMIZER ? kept[leave] : 0);
}
// May the states that stay on the device fit it? If not, a way is not planned.
static inline bool fit_holds_states(const Fit *f, const FitWay *w) {
    const GptModel m = fit_spec(f, w).model;
    const double ranks = f->machine.ranks->n, divided = (double)w->expert_parallel,
                 experts = (double)(m.class_elements[STORAGE_EXPERTS] * m.blocks),
                 others = (double)m.parameters - divided * experts;
    return others * fit_kept_bytes(f, w, ranks) + experts * fit_kept_bytes(f, w, ranks / divided) <=
           f->memory;
}
// Tries what makes a way fit, least first.
static inline void fit_try_memory(Fit *f, FitWay w) {
    const Options *o = &f->config->options;
    for (w.recompute = RECOMPUTE_NONE; w.recompute <= RECOMPUTE_BLOCK; w.recompute++) {
        if (!fit_allows(f, OPTION_INDEX_recompute, o->recompute, w.recompute)) { continue; }
        for (w.offload = OFFLOAD_NONE; w.offload <= OFFLOAD_ALL; w.offload++) {
            const bool allowed = fit_pins_offload(f) ? o->offload == w.offload
                                                     : w.offload == OFFLOAD_NONE || f->offloads;
            const bool fits = allowed && fit_holds_states(f, &w) && fit_try(f, &w);
            if (fits && w.offload == OFFLOAD_NONE) { return; }
        }
    }
}
static inline bool fit_try_micro_batches(Fit *f, FitWay w, const void *unused) {
    const Options *o = &f->config->options;
    (void)unused;
    const int64_t all = ceil_div(f->config->samples, f->machine.ranks->n);
    for (int64_t b = 1, last = 0; last < all; b *= 2) {
        last = w.micro_batch = min_i64(b, all);
        if (fit_pinned(f, OPTION_INDEX_micro_batch)) {
            last = all;
            w.micro_batch = o->micro_batch;
        }
        if (schedule_is_short(ceil_div(all, w.micro_batch), f->spec->model.units, 0)) {
            fit_try_memory(f, w);
        }
    }
    return false;
}
// May a way have this ZeRO stage and these parts of ZeRO++? A partition is searched between nodes
// alone.
static inline bool fit_allows_zero(const Fit *f, const FitWay *w) {
    const Options *o = &f->config->options;
    const Cluster *c = &f->machine.cluster;
    const bool staged = strcmp(w->pipeline, "1") != 0,
               apart = fit_pinned(f, OPTION_INDEX_zero_hpz_partition_size)
                           ? !staged || options_gives_stages(o)
                           : c->nodes > 1 && c->ranks > 1 && cluster_is_even(c) && !staged;
    const bool plain = !w->quantized_weights && !w->quantized_gradients && w->partition == 1;
    return (plain || !f->spec->model.config.experts) && // plan_make.h: check_experts()
           (w->zero == 3 || (!w->quantized_weights && w->partition == 1)) &&
           (apart || w->partition == 1) && fit_allows(f, OPTION_INDEX_zero, o->zero, w->zero) &&
           fit_allows(f, OPTION_INDEX_zero_quantized_weights, o->zero_quantized_weights,
                      w->quantized_weights) &&
           fit_allows(f, OPTION_INDEX_zero_hpz_partition_size, o->zero_hpz_partition_size,
                      w->partition) &&
           fit_allows(f, OPTION_INDEX_zero_quantized_gradients, o->zero_quantized_gradients,
                      w->quantized_gradients);
}
// Calls `act` for each ZeRO stage, and each part of ZeRO++ that a way can have. context: of `act`.
// One rank has use for none, but has what is given. If `first`, higher stages follow only until
// `act` returns true.
typedef bool (*FitAct)(Fit *f, FitWay w, const void *context);
static inline void fit_each_zero(Fit *f, FitWay w, bool first, FitAct act, const void *context) {
    const Options *o = &f->config->options;
    const bool many = f->machine.ranks->n > 1;
    const int last = many || fit_pinned(f, OPTION_INDEX_zero) ? 3 : 0,
              most = many || fit_pinned(f, OPTION_INDEX_zero_quantized_gradients) ? 1 : 0;
    const int64_t partition = fit_pinned(f, OPTION_INDEX_zero_hpz_partition_size)
                                  ? o->zero_hpz_partition_size
                                  : f->machine.cluster.ranks;
    for (int quantized = 0; quantized <= most; quantized++) {
        bool done = false;
        for (w.zero = 0; w.zero <= last && !(first && done); w.zero++) {
            for (int part = 0; part < 4; part++) {
                w.quantized_gradients = quantized;
                w.quantized_weights = part & 1;
                w.partition = part & 2 ? partition : 1;
                if ((part & 2) && w.partition == 1) { continue; }
                if (fit_allows_zero(f, &w)) { done |= act(f, w, context); }
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Pipelines

// A pipeline with its setting. bound: of its time, with messages and sums as the planner counts
// them, or that time itself; computing: of its computing alone; needed: about what it takes of a
// device at each ZeRO stage.
typedef struct {
    FitWay way;
    StagePlan plan;
    int degree; // of the list's degrees: the experts' ranks
    double bound, computing, needed[4];
} FitPipeline;
typedef struct {
    Fit *fit;
    PlanTask task;
    FitPipeline *at;
    int64_t count, capacity;
    int *ranks, *scratch; // buffers of plan_place()
    PlanCosts costs;
    PlanModel *models; // [degrees of the search]
    int degree;        // of task.model
} FitPipelines;

// Goes on with the model whose experts are on this number of ranks.
static inline void fit_take_degree(FitPipelines *l, int degree) {
    l->degree = degree;
    l->task.model = &l->models[degree];
}

// Computes a plan's costs. Returns the bound of its time.
static inline double fit_bound(FitPipelines *l, const StagePlan *q) {
    plan_place(&l->task, q, l->ranks, l->scratch);
    return plan_costs(&l->task, q, l->ranks, &l->costs) ? plan_bound(&l->costs) : (double)INFINITY;
}
// Returns the same as if nothing were sent or updated. l->costs are of this plan.
static inline double fit_computing(const FitPipelines *l) {
    PlanCosts silent = l->costs;
    const size_t bytes = silent.stages * sizeof(double);
    memset(silent.send, 0, bytes);
    memset(silent.send_back, 0, bytes);
    memset(silent.reduce_late, 0, bytes);
    return plan_bound(&silent);
}
// Sets the memory that a plan needs at each ZeRO stage. l->costs are of this plan.
static inline void fit_needs(const FitPipelines *l, const StagePlan *q, double needed[4]) {
    const Fit *f = l->fit;
    const Options *o = &f->config->options;
    PlanTask task = l->task;
    for (int z = 0; z < 4; z++) {
        needed[z] = 0;
        task_set_run(&task, &optimizers[o->optimizer], f->spec->dtype, (DType)o->reduce_dtype, z);
        for (int s = 0, first = 0; s < q->stages; first += q->units[s++]) {
            const PlanStage stage = plan_stage(q, s, first);
            double bytes;
            plan_stage_memory(&task, q, &stage, l->costs.live[s], INFINITY, &bytes);
            needed[z] = fmax(needed[z], bytes);
        }
    }
}
// Is a setting possible, and does it agree with the flags that are given?
static inline bool fit_allows_setting(const Fit *f, const FitWay *w) {
    const Options *o = &f->config->options;
    return !(w->recompute && w->schedule == PIPELINE_ZERO_BUBBLE) &&
           fit_allows(f, OPTION_INDEX_recompute, o->recompute, w->recompute) &&
           fit_allows(f, OPTION_INDEX_pipeline_schedule, o->pipeline_schedule, w->schedule) &&
           fit_allows(f, OPTION_INDEX_pipeline_warmup, o->pipeline_warmup, w->warmup);
}
// Adds the stages of a plan with this micro-batch, and each schedule, with and without
// recomputation.
static inline void fit_add_micro_batch(FitPipelines *l, StagePlan *q, FitWay w) {
    static const PipelineKind kinds[] = {PIPELINE_DAPPLE, PIPELINE_DAPPLE, PIPELINE_ZERO_BUBBLE,
                                         PIPELINE_GPIPE};
    q->micro_batch = w.micro_batch;
    for (int k = 0; k < 8 && plan_is_short(&l->task, q); k++) {
        w.recompute = k / 4;
        q->recompute = w.recompute == RECOMPUTE_BLOCK;
        w.schedule = q->kind = kinds[k % 4];
        q->warmup = k % 4 == 1 ? WARMUP_B : WARMUP_A;
        w.warmup = q->warmup;
        if (!fit_allows_setting(l->fit, &w)) { continue; }
        FitPipeline p = {.way = w, .plan = *q, .degree = l->degree, .bound = fit_bound(l, q)};
        p.computing = fit_computing(l);
        fit_needs(l, q, p.needed);
        l->at = grow_array(FitPipeline, l->at, l->count, &l->capacity, "pipelines");
        l->at[l->count++] = p;
    }
}
// Adds the stages of a plan with each micro-batch and setting, unless it has them already.
static inline void fit_add_settings(FitPipelines *l, StagePlan q) {
    const Fit *f = l->fit;
    const Options *o = &f->config->options;
    FitWay w = {.partition = 1, .offload = OFFLOAD_NONE, .expert_parallel = f->degree[l->degree]};
    if (fit_pins_offload(f)) { w.offload = o->offload; }
    size_t n = 0;
    for (int s = 0; s < q.stages; s++) {
        n += snprintf(w.pipeline + n, n < FIT_TEXT ? FIT_TEXT - n : 0, "%s%d:%d", s ? "," : "",
                      q.units[s], q.replicas[s]);
        q.policy[s] = PLACE_APPEND; // ranks in order, as --pipeline takes them
    }
    if (q.stages < 2 || n >= FIT_TEXT || !plan_divides_experts(l->task.model, &q)) { return; }
    for (int64_t i = 0; i < l->count; i++) {
        if (l->at[i].degree == l->degree && !strcmp(l->at[i].way.pipeline, w.pipeline)) { return; }
    }
    const int64_t samples = l->task.samples;
    const bool pinned = fit_pinned(f, OPTION_INDEX_micro_batch), many = samples > FIT_MICRO_BATCHES;
    for (int64_t b = 1; b <= samples; b++) {
        const bool tried = samples % b == 0 && !(many && b & (b - 1) && b % q.replicas[0]);
        if (pinned ? b != min_i64(o->micro_batch, samples) : !tried) { continue; }
        w.micro_batch = b;
        fit_add_micro_batch(l, &q, w);
    }
}
// Adds the stages that --pipeline gives, or even ones and those of the planner.
static inline void fit_list_pipelines(FitPipelines *l) {
    const Options *o = &l->fit->config->options;
    const PlanTask *t = &l->task;
    if (options_gives_stages(o)) {
        Placement placement = pipeline_placement(o->pipeline, t->model->units, task_ranks(t));
        StagePlan q = {.stages = placement.stages};
        for (int s = 0; s < q.stages; s++) {
            q.units[s] = placement.stage[s].units;
            q.replicas[s] = placement.stage[s].replicas;
        }
        placement_free(&placement);
        fit_add_settings(l, q);
        return;
    }
    PlanTask within = *t; // the planner leaves out what cannot fit
    within.memory = l->fit->memory;
    Planner p = planner_make(&within);
    planner_search(&p, NULL, 0);
    for (int i = 0; i < p.found; i++) { fit_add_settings(l, p.beam[i].plan); }
    planner_free(&p);
    for (int stages = 2; stages <= task_most_stages(t); stages++) {
        if (task_ranks(t) % stages) { continue; }
        // What balances them depends on the micro-batch: seconds of a pass, or those of samples.
        fit_add_settings(l, plan_even(t, stages, 1));
        fit_add_settings(l, plan_even(t, stages, t->samples));
    }
}
static inline int fit_pipeline_order(const void *a, const void *b) {
    const double x = ((const FitPipeline *)a)->bound, y = ((const FitPipeline *)b)->bound;
    return (x > y) - (x < y);
}
// Orders the pipelines by their time as the planner counts it, those with the smallest bounds, and
// behind them the others.
static inline void fit_sort_pipelines(FitPipelines *l) {
    const int64_t most_work = 1 << 20;
    int64_t work = 0, replayed = 0;
    if (!l->count) { return; }
    qsort(l->at, l->count, sizeof *l->at, fit_pipeline_order);
    for (; replayed < l->count && work < most_work; replayed++) {
        FitPipeline *p = &l->at[replayed];
        fit_take_degree(l, p->degree);
        fit_bound(l, &p->plan);
        p->bound = plan_simulate(&p->plan, &l->costs);
        work += plan_simulated_batches(&p->plan, l->costs.micro_batches) * p->plan.stages;
        keep_alive();
    }
    qsort(l->at, replayed, sizeof *l->at, fit_pipeline_order);
}
// Returns about how many actions the program of a pipeline has.
static inline int64_t fit_actions(const Fit *f, const FitWay *w) {
    const int64_t of_unit = 10, samples = f->config->samples;
    const PipelinePlan plan = {
        .placement = pipeline_placement(w->pipeline, f->spec->model.units, f->machine.ranks->n),
        .micro_rows = min_i64(w->micro_batch, samples)};
    const int parts = machine_parts(&f->machine, &plan, samples);
    int64_t units = 0; // of all ranks that are planned
    for (int s = 0; s < plan.placement.stages; s++) {
        const Stage *stage = &plan.placement.stage[s];
        units += stage->replicas / parts * (int64_t)stage->units;
    }
    Placement placement = plan.placement;
    placement_free(&placement);
    return of_unit * units * ceil_div(samples, plan.micro_rows);
}
static inline bool fit_try_pipeline(Fit *f, FitWay w, const void *pipeline) {
    const double *needed = ((const FitPipeline *)pipeline)->needed, about = 0.95;
    const bool small = w.offload != OFFLOAD_NONE || about * needed[w.zero] <= f->memory;
    return f->actions < FIT_ACTIONS && small && fit_try(f, &w);
}
// Returns the times of units with those in which a sample waits for rows of experts.
static inline UnitTimes fit_times(const Fit *f, const FitWay *w, UnitTimes times) {
    const int64_t many = 64; // samples, so that latency hardly counts
    Config c = *f->config;
    Machine unknown = f->machine;
    FitWay one = *w;
    double waits[2] = {0};
    if (w->expert_parallel == 1) { return times; }
    one.micro_batch = many;
    c.samples = many * unknown.ranks->n;
    Plan *p = fit_make(f, &one, &c, &unknown);
    if (!p) { return times; }
    unknown.rates = f->machine.rates;
    StageStores stages = stage_stores_make(p);
    predict_waits(p, &stages, &p->program, 0, waits);
    stage_stores_free(&stages);
    const double blocks = (double)(many * p->model.config.layers);
    times.row_s[UNIT_BLOCK][ACT_FORWARD] += waits[0] / blocks;
    times.row_s[UNIT_BLOCK][ACT_BACKWARD_INPUT] += waits[1] / blocks;
    fit_free(p, &c);
    return times;
}
// Makes the model for the planner with experts on each number of ranks.
static inline void fit_make_models(FitPipelines *l, const FitWay *one, const UnitTimes *times) {
    const Fit *f = l->fit;
    const ExecutorShape shape = {.dtype = f->spec->dtype,
                                 .rows = 1,
                                 .T = f->config->options.seq_len,
                                 .logits = LOGITS_PLENTY,
                                 .limits = limits_of_one()};
    l->models = new_array(PlanModel, f->degrees, "pipelines");
    for (int i = 0; i < f->degrees; i++) {
        FitWay w = *one;
        w.expert_parallel = f->degree[i];
        const GptModel m = fit_spec(f, &w).model;
        const UnitTimes waiting = fit_times(f, &w, *times);
        l->models[i] = plan_model_of_run(&m, &shape, &waiting, f->machine.threads,
                                         &f->machine.rates, &f->config->options);
    }
}
// Tries pipelines, the most promising ones first. one: a way with one stage.
static inline void fit_try_pipelines(Fit *f, const FitWay *one, const UnitTimes *times) {
    const Options *o = &f->config->options;
    FitPipelines l = {.fit = f,
                      .ranks = new_array(int, f->machine.ranks->n, "pipelines"),
                      .scratch = new_array(int, 2 * f->machine.cluster.nodes, "pipelines")};
    fit_make_models(&l, one, times);
    l.task.cluster = f->machine.cluster;
    l.task.samples = f->config->samples;
    l.task.memory = INFINITY;
    l.task.most_work = (1 << 19) / f->degrees;
    // unless a ZeRO stage is given, the one at which parameters and gradients stay
    task_set_run(&l.task, &optimizers[o->optimizer], f->spec->dtype, (DType)o->reduce_dtype,
                 fit_pinned(f, OPTION_INDEX_zero) ? (int)o->zero : 1);
    for (int i = 0; i < f->degrees; i++) {
        fit_take_degree(&l, i);
        fit_list_pipelines(&l);
    }
    fit_sort_pipelines(&l);
    f->actions = 0;
    for (int64_t i = 0; i < l.count; i++) {
        if (l.at[i].computing < fit_limit(f) && fit_actions(f, &l.at[i].way) < FIT_ACTIONS) {
            fit_each_zero(f, l.at[i].way, true, fit_try_pipeline, &l.at[i]);
        }
    }
    for (int i = 0; i < f->degrees; i++) { plan_model_free(&l.models[i]); }
    free_all(l.at, l.ranks, l.scratch, l.models);
}

// -------------------------------------------------------------------------------------------------
// The search, and its answer

// Returns what would make a plan fit: the first of these flags that does, or "".
static inline const char *fit_remedy(const Plan *p, const ModelSpec *spec, double memory) {
    static const struct {
        const char *flags;
        int64_t zero, recompute, micro_batch;
    } remedies[] = {
        {"--zero 1", 1, 0, 0},
        {"--zero 2", 2, 0, 0},
        {"--zero 3", 3, 0, 0},
        {"--recompute block", 0, 1, 0},
        {"--zero 1 --recompute block", 1, 1, 0},
        {"--zero 3 --recompute block", 3, 1, 0},
        {"--zero 3 --micro-batch 1", 3, 0, 1},
        {"--zero 3 --recompute block --micro-batch 1", 3, 1, 1},
    };
    for (size_t i = 0; i < sizeof remedies / sizeof *remedies; i++) {
        Config c = *p->config;
        Machine unknown = *p->machine;
        Options *o = &c.options;
        const bool less = remedies[i].zero > o->zero || remedies[i].recompute > o->recompute;
        o->zero = max_i64(o->zero, remedies[i].zero);
        o->recompute = max_i64(o->recompute, remedies[i].recompute);
        o->batch_tokens = c.samples * o->seq_len;
        o->micro_batches = 0;
        if (remedies[i].micro_batch) { o->micro_batch = 1; }
        c.pipeline.recompute = o->recompute == RECOMPUTE_BLOCK;
        memset(&unknown.rates, 0, sizeof unknown.rates);
        if ((!less && !remedies[i].micro_batch) || options_clash(o, &c.given)) { continue; }
        Plan *other = plan_make(&c, &unknown, spec);
        StageStores stages = stage_stores_make(other);
        const bool fits = plan_most_bytes(other, &stages) <= memory;
        stage_stores_free(&stages);
        plan_free(other);
        if (fits) { return remedies[i].flags; }
    }
    return "";
}

// Do all groups of N neighbours lie alike on the nodes? Then one stands for all.
static inline bool fit_lies_alike(const Cluster *c, int64_t N) {
    bool inside = true;
    for (int p = 0; p < c->parts; p++) { inside = inside && c->part[p].ranks % N == 0; }
    return inside || (cluster_is_even(c) && N % c->ranks == 0);
}
// Finds on how many ranks experts may be.
static inline void fit_find_degrees(Fit *f) {
    const Options *o = &f->config->options;
    const int64_t experts = f->spec->model.config.experts, ranks = f->machine.ranks->n;
    const bool given = fit_pinned(f, OPTION_INDEX_expert_parallel),
               // what ranks with a part of the experts do not do (huggingface.h, plan_check_parts)
        whole = !experts || *o->export_file || options_generates(o, &f->config->given);
    f->degrees = 1;
    f->degree[0] = given ? o->expert_parallel : 1;
    for (int64_t N = 2; N <= ranks && f->degrees < FIT_DEGREES && !given && !whole; N++) {
        if (experts % N == 0 && ranks % N == 0 && fit_lies_alike(&f->machine.cluster, N)) {
            f->degree[f->degrees++] = N;
        }
    }
}
static inline void fit_search(Fit *f, const UnitTimes *times) {
    const Options *o = &f->config->options;
    FitWay one = {.partition = 1, .schedule = PIPELINE_DAPPLE, .pipeline = "1"};
    const bool stages = options_gives_stages(o),     // --pipeline 1 gives one
        only_one = share_is(f->spec->model.share) || // blocks of several stages would share
                   (!stages && !options_plans(o) && fit_pinned(f, OPTION_INDEX_pipeline));
    fit_find_degrees(f);
    for (int i = f->degrees - 1; i >= 0 && !stages; i--) {
        one.expert_parallel = f->degree[i];
        fit_each_zero(f, one, false, fit_try_micro_batches, NULL);
    }
    if (f->machine.ranks->n > 1 && !only_one) { fit_try_pipelines(f, &one, times); }
}
// Describes the ranks that there are as a cluster: their links and rates, as measured. All ranks
// call it and get what rank 0 measures.
static inline Cluster fit_cluster_here(Comm *comm, Stream *stream, DType dtype) {
    Rates rates = {.flops_per_s = measure_flops(stream)};
    measure_peak(&rates, stream, comm, dtype);
    Cluster c = cluster_of_run(comm, NULL, stream, rates.flops_per_s);
    c.tflops = rates.flops_per_s * 1e-12;
    c.peak = rates.peak_flops_per_s * 1e-12;
    if (ops_memory_apart()) {
        measure_offload(&rates, stream);
        c.link = rates.link_bytes_per_s * 1e-9;
        c.host = rates.host_bytes_per_s * 1e-9;
    }
    const double there = ops_memory_apart() ? ops_memory_available() / comm->transport.sharing
                                            : memory_available() / comm->local_ranks;
    c.capacity = there / 0x1p30;
    comm_broadcast(comm, &c, sizeof c, 0);
    return c;
}
// Prints the answer of a search.
typedef void (*FitPrint)(const Fit *f);
// Chooses the flags of a run on the machine's cluster, or on the ranks that there are, prints the
// best ones, and writes the best into the options. All ranks call it. Ends the program
// (EXIT_RESOURCES) if none fits.
static inline void fit_run(Config *c, const Machine *machine, const ModelSpec *spec, Comm *comm,
                           Stream *stream, FitPrint print) {
    static FitWay chosen; // the options point to its text
    Options *o = &c->options;
    Fit f = {.config = c, .spec = spec, .machine = *machine};
    Rates measured = {};
    const GptModel whole = gpt_model_divided(&spec->model, 1, 0); // all experts on each rank
    const bool here = !machine->cluster.nodes;
    if (here) {
        f.comm = comm;
        f.machine.cluster = fit_cluster_here(comm, stream, spec->dtype);
        const ExecutorShape shape = {.dtype = spec->dtype,
                                     .rows = o->micro_batch,
                                     .T = o->seq_len,
                                     .logits = LOGITS_PLENTY,
                                     .units = units_range(0, spec->model.units),
                                     .limits = limits_of_one()};
        double *slowness = new_array(double, comm->ranks, "speeds of ranks");
        times_measured_here(&whole, &shape, &measured, comm, stream, slowness);
        free(slowness);
    }
    Group ranks = cluster_group(&f.machine.cluster);
    f.machine.ranks = &ranks;
    f.machine.rates = cluster_rates(&f.machine.cluster, spec->dtype);
    f.machine.rates.units = measured.units;
    f.memory = planner_memory(&f.machine.cluster, o);
    f.host = option_size("host-memory", o->host_memory);
    f.offloads = f.machine.cluster.link > 0 && f.machine.cluster.host > 0 && o->fit;
    const UnitTimes times =
        here ? measured.units : unit_times_of_rates(&whole, &f.machine.rates, (double)o->seq_len);
    f.one_rank_s = unit_times_all(&whole, &times, (double)c->samples);
    if (comm->rank == 0) { fit_search(&f, &times); }
    comm_broadcast(comm, &f.found, sizeof f.found, 0);
    if (!f.found) {
        die(EXIT_RESOURCES, "give more ranks, a smaller model, --seq-len or --batch-tokens",
            "%s: no way to run fits into %s of a rank",
            o->fit    ? "--fit"
            : o->plan ? "--plan"
                      : "--pipeline auto",
            readable_bytes(f.memory).at);
    }
    comm_broadcast(comm, &f.best[0].way, sizeof chosen, 0);
    if (comm->rank == 0) { print(&f); }
    chosen = f.best[0].way;
    fit_apply(&chosen, c->samples * o->seq_len, o);
    group_free(&ranks);
}

#endif
