// plan_answer.h: the answer to a planner's task: the best plan, beside data parallelism, GPipe's
// even split and the runners-up; and --plan, which prints it as a table or as one JSON object.
#ifndef PLAN_ANSWER_H
#define PLAN_ANSWER_H

#include "base/base.h"
#include "base/figures.h"
#include "base/files.h"
#include "base/readable.h"
#include "comm/group.h"
#include "options.h"
#include "pipeline.h"
#include "plan/cluster.h"
#include "plan/forecast.h"
#include "planner/balanced_stages.h"
#include "planner/plan_costs.h"
#include "planner/plan_task.h"
#include "planner/planner.h"
#include "planner/planner_model.h"
#include "planner/stage_memory.h"
#include "schedule/schedule.h"

enum { PLAN_OTHERS = 8 };
typedef struct {
    Candidate best;                // 0 stages if nothing fits the memory
    Candidate other[PLAN_OTHERS];  // baselines, then runners-up
    const char *name[PLAN_OTHERS]; // what the others are
    int others;
    // bytes of a rank of each stage: of the best plan, of the others
    double memory[PLAN_STAGES], memory_of_other[PLAN_OTHERS][PLAN_STAGES];
} PlanAnswer;

// Returns the best GPipe plan (arXiv 1811.06965): all forwards, then all backwards; stages of equal
// numbers of units, each on the same number of ranks.
static inline Candidate planner_gpipe(const PlanTask *t) {
    Planner p = planner_make(t);
    for (int stages = 2; stages <= task_most_stages(t); stages++) {
        StagePlan q = plan_even(t, stages, 1);
        q.kind = PIPELINE_GPIPE;
        for (int s = 0; s < stages; s++) {
            q.units[s] = t->model->units / stages + (s < t->model->units % stages);
        }
        if (task_ranks(t) % stages == 0) { planner_add_settings(&p, &q, false); }
    }
    return planner_best(&p);
}
static inline void answer_add(PlanAnswer *a, const char *name, const Candidate *c) {
    if (!c->plan.stages || a->others == PLAN_OTHERS) { return; }
    a->other[a->others] = *c;
    a->name[a->others++] = name;
}
// Returns whether two plans differ in nothing but cuts and settings.
static inline bool plans_alike(const StagePlan *a, const StagePlan *b) {
    return a->stages == b->stages && a->micro_batch == b->micro_batch &&
           !memcmp(a->replicas, b->replicas, a->stages * sizeof(int));
}
// Adds the best plans of the beam that differ from all before them.
static inline void answer_add_runners(PlanAnswer *a, const Planner *p) {
    for (int i = 1; i < p->found; i++) {
        bool known = plans_alike(&p->beam[i].plan, &a->best.plan);
        for (int k = 0; k < a->others; k++) {
            known = known || plans_alike(&p->beam[i].plan, &a->other[k].plan);
        }
        if (!known) { answer_add(a, "runner-up", &p->beam[i]); }
    }
}
// Returns the best plan for a task, and the baselines and runners-up.
static inline PlanAnswer planner_answer(const PlanTask *t) {
    PlanAnswer a = {};
    StagePlan whole = plan_even(t, 1, 1);
    Candidate others[] = {plan_best_setting(t, &whole), planner_gpipe(t)};
    static const char *const names[] = {"data parallel", "GPipe, even split"};
    for (int i = 0; i < 2; i++) { answer_add(&a, names[i], &others[i]); }
    Planner p = planner_make(t);
    planner_search(&p, others, 2);
    if (p.found) {
        a.best = p.beam[0];
        answer_add_runners(&a, &p);
    }
    planner_free(&p);
    return a;
}

// -------------------------------------------------------------------------------------------------
// --plan

// Prints ascending ranks as ranges: 0-3,8.
static inline void print_ranges(FILE *to, const int *ranks, int n) {
    for (int i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && ranks[end] == ranks[end - 1] + 1;) { end++; }
        fprintf(to, end > i + 1 ? "%s%d-%d" : "%s%d", i ? "," : "", ranks[i], ranks[end - 1]);
    }
}
// Returns what the rank that needs most of it takes of its device. memory: of a rank of each stage.
static inline double plan_most_memory(const StagePlan *plan, const double *memory) {
    double most = 0;
    for (int s = 0; s < plan->stages; s++) { most = fmax(most, memory[s]); }
    return most;
}
// Returns what the step of a plan means. memory: of a rank of each stage.
static inline Forecast plan_forecast(const Planner *p, const Candidate *c, const double *memory) {
    const PlanTask *t = p->task;
    const double needed = plan_most_memory(&c->plan, memory);
    const StepWork work = {.tokens = t->samples * t->sample_tokens,
                           .flops = t->samples * t->sample_flops,
                           .peak = t->cluster.peak * 1e12,
                           .ranks = task_ranks(t)};
    return forecast_make(work, c->step_s, needed, t->device);
}
// Writes what is reported of a plan: PLAN_PREDICTED rows of its prediction, and how it runs.
enum { PLAN_PREDICTED = 3, PLAN_FIGURES = 5 };
static inline void plan_figures(Planner *p, const Candidate *c, double one_rank_s,
                                Figure rows[PLAN_FIGURES]) {
    planner_look(p, &c->plan);
    const Figure all[PLAN_FIGURES] = {
        {"step_ms= %13T", 1e3 * c->step_s},
        {"= %8.2fx", one_rank_s / c->step_s},
        {"bubble= %7Q idle", plan_bubble(&c->plan, &p->costs, c->step_s)},
        {"micro_batches=, %.0f", (double)p->costs.micro_batches},
        {"micro_batch= x %.0f samples", (double)plan_batch_samples(p->task, &c->plan)},
    };
    memcpy(rows, all, sizeof all);
}
// Adds "5:3,3:1", the units:replicas of the stages.
static inline void text_add_stages(TextBuffer *t, const StagePlan *plan) {
    for (int s = 0; s < plan->stages; s++) {
        text_add(t, "%s%d:%d", s ? "," : "", plan->units[s], plan->replicas[s]);
    }
}
// Adds the flags to type for a plan. planner_look() has placed it. Stages whose ranks are not in
// order cannot be given, nor that there is memory for fewer micro-batches in flight than the
// schedule would have: then the run plans again.
static inline void text_add_plan_flags(TextBuffer *t, const Planner *p, const StagePlan *plan) {
    const PlanTask *task = p->task;
    const int ranks = task_ranks(task), all = p->costs.micro_batches;
    bool ordered = true;
    for (int r = 0; r < ranks; r++) { ordered = ordered && p->ranks[r] == r; }
    for (int s = 0; s < plan->stages; s++) {
        ordered = ordered && p->costs.live[s] == plan_live(plan, s, INT32_MAX, all);
    }
    text_add(t, "--pipeline ");
    if (plan->stages == 1) {
        text_add(t, "1%s --micro-batch %" PRId64, plan->recompute ? " --recompute block" : "",
                 ceil_div(plan->micro_batch, ranks));
    } else if (ordered) {
        text_add_stages(t, plan);
        text_add(t, " --pipeline-schedule %s%s%s --micro-batch %" PRId64,
                 pipeline_kind_names[plan->kind],
                 plan->kind == PIPELINE_DAPPLE && plan->warmup == WARMUP_B ? " --pipeline-warmup b"
                                                                           : "",
                 plan->recompute ? " --recompute block" : "", plan->micro_batch);
    } else {
        text_add(t, "auto --micro-batch %" PRId64, plan->micro_batch);
    }
    if (task->zero) { text_add(t, " --zero %d", task->zero); }
    text_add(t, " --batch-tokens %.0f --seq-len %.0f", task->samples * task->sample_tokens,
             task->sample_tokens);
}
// Adds stage number s of a plan to an array of JSON. ranks: [replicas]
static inline void json_add_stage(TextBuffer *t, int s, int units, int replicas, const int *ranks) {
    text_add(t, "%s{\"units\":%d,\"replicas\":%d,\"ranks\":", s ? "," : "", units, replicas);
    for (int i = 0; i < replicas; i++) { text_add(t, "%c%d", i ? ',' : '[', ranks[i]); }
    text_add(t, "]}");
}
// Adds the members of a plan's JSON object, without the braces. memory: of a rank of each stage.
static inline void json_add_plan(TextBuffer *t, Planner *p, const Candidate *c,
                                 const double *memory, double one_rank_s) {
    const StagePlan *plan = &c->plan;
    Figure rows[PLAN_FIGURES];
    plan_figures(p, c, one_rank_s, rows);
    text_add(t, "\"stages\":[");
    for (int s = 0, rank = 0; s < plan->stages; rank += plan->replicas[s++]) {
        json_add_stage(t, s, plan->units[s], plan->replicas[s], p->ranks + rank);
    }
    text_add(t, "]");
    json_add_figures(t, rows + PLAN_PREDICTED, PLAN_FIGURES - PLAN_PREDICTED);
    text_add(t, ",\"recompute\":%s,\"warmup\":\"%c\",\"schedule\":\"%s\",\"predicted\":{",
             plan->recompute ? "true" : "false", "ab"[plan->warmup],
             pipeline_kind_names[plan->kind]);
    json_add_figures(t, rows, PLAN_PREDICTED);
    const Forecast forecast = plan_forecast(p, c, memory);
    json_add_forecast(t, &forecast);
    for (int s = 0; s < plan->stages; s++) {
        text_add(t, "%s%.0f", s ? "," : ",\"memory\":[", memory[s]);
    }
    text_add(t, "]},\"flags\":\"");
    text_add_plan_flags(t, p, plan);
    text_add(t, "\"");
}
static inline void print_answer_json(FILE *to, Planner *p, const PlanAnswer *a, double one_rank_s) {
    const double T = p->task->sample_tokens;
    TextBuffer t = {};
    text_add(&t, "{");
    json_add_plan(&t, p, &a->best, a->memory, one_rank_s);
    text_add(&t, ",\"alternatives\":[");
    for (int i = 0; i < a->others; i++) {
        text_add(&t, "%s{\"name\":\"%s\",", i ? "," : "", a->name[i]);
        json_add_plan(&t, p, &a->other[i], a->memory_of_other[i], one_rank_s);
        text_add(&t, "}");
    }
    text_add(&t, "],\"one_rank_ms\":%.17g,\"seq_len\":%.0f,\"batch_tokens\":%.0f", 1e3 * one_rank_s,
             T, p->task->samples * T);
    fprintf(to, "%s}\n", t.text);
    free(t.text);
}
static inline void print_plan_line(FILE *to, Planner *p, const char *name, const Candidate *c,
                                   double one_rank_s) {
    const StagePlan *plan = &c->plan;
    Figure rows[PLAN_FIGURES];
    plan_figures(p, c, one_rank_s, rows);
    fprintf(to, "%-18s", name);
    print_figures(to, rows, PLAN_FIGURES);
    fprintf(to, "%s, %s", plan->recompute ? ", recomputed" : "",
            plan->kind != PIPELINE_DAPPLE ? pipeline_kind_names[plan->kind]
            : plan->warmup == WARMUP_B    ? "warm-up b"
                                          : "warm-up a");
    TextBuffer stages = {};
    text_add_stages(&stages, plan);
    fprintf(to, "  %s\n", stages.text);
    free(stages.text);
}
static inline void print_answer(FILE *to, Planner *p, const PlanAnswer *a, double one_rank_s) {
    const StagePlan *plan = &a->best.plan;
    fprintf(to, "                        step against 1 rank             micro-batches          "
                "units:replicas of the stages\n");
    print_plan_line(to, p, "plan", &a->best, one_rank_s);
    for (int i = 0; i < a->others; i++) {
        print_plan_line(to, p, a->name[i], &a->other[i], one_rank_s);
    }
    planner_look(p, plan);
    fprintf(to, "\nstage   units      forward     backward      to next     all-reduce   memory "
                "MiB  ranks\n");
    for (int s = 0, first = 0, rank = 0; s < plan->stages;
         first += plan->units[s], rank += plan->replicas[s++]) {
        fprintf(to, "%5d %4d-%-4d %9s %12s %12s %14s %12.1f  ", s, first,
                first + plan->units[s] - 1, readable_step(p->costs.forward[s]).at,
                readable_step(p->costs.backward[s]).at, readable_step(p->costs.send[s]).at,
                readable_step(p->costs.reduce[s]).at, a->memory[s] / 1048576);
        print_ranges(to, p->ranks + rank, plan->replicas[s]);
        fprintf(to, "\n");
    }
    const Forecast forecast = plan_forecast(p, &a->best, a->memory);
    TextBuffer flags = {};
    text_add_plan_flags(&flags, p, plan);
    fprintf(to, "\nflags      %s\n", flags.text);
    free(flags.text);
    print_gpu(to, &p->task->cluster);
    print_forecast(to, &forecast, p->task->run_tokens, "");
}

// Returns the answer for the stages that --pipeline gives, with the best micro-batch, or
// --micro-batch if it is given.
static inline PlanAnswer planner_given(PlanTask *t, const Options *o) {
    Placement placement = pipeline_placement(o->pipeline, t->model->units, task_ranks(t));
    Planner p = planner_make(t);
    StagePlan q = {.stages = placement.stages,
                   .recompute = o->recompute == RECOMPUTE_BLOCK,
                   .kind = (PipelineKind)o->pipeline_schedule,
                   .warmup = (Warmup)o->pipeline_warmup};
    if (placement.stages > PLAN_STAGES) {
        die(EXIT_INPUT, NULL, "--plan takes at most %d stages", PLAN_STAGES);
    }
    for (int s = 0; s < placement.stages; s++) {
        q.units[s] = placement.stage[s].units;
        q.replicas[s] = placement.stage[s].replicas;
    }
    for (int i = 0; i < p.divisor_count && !t->micro_batch; i++) {
        q.micro_batch = p.divisors[i];
        planner_add(&p, &q);
    }
    if (t->micro_batch) {
        // one stage's is that of a rank, but with --micro-batches (config_micro_rows)
        const bool each = plan_is_whole(t, &q) && !o->micro_batches;
        q.micro_batch = min_i64(t->samples, t->micro_batch * (each ? task_ranks(t) : 1));
        planner_add(&p, &q);
    }
    placement_free(&placement);
    const PlanAnswer a = {.best = planner_best(&p)};
    return a;
}
// Returns the bytes that a rank may take of its device: --device-memory, or else what the device of
// --cluster has.
static inline double planner_memory(const Cluster *c, const Options *o) {
    return *o->device_memory || !(c->capacity > 0) ? option_size("device-memory", o->device_memory)
                                                   : c->capacity * 0x1p30;
}
// Returns the tokens of a step. Ends the program (EXIT_INPUT) if flags contradict each other.
static inline int64_t planner_tokens(const Options *o, int ranks) {
    options_check_batch(o);
    const int64_t micro_batches = o->micro_batches ? o->micro_batches : ranks;
    return o->batch_tokens ? o->batch_tokens : o->micro_batch * o->seq_len * micro_batches;
}
// Returns what to plan for, as the flags say, for this model on this cluster. Ends the program
// (EXIT_INPUT) if a step is not a whole number of samples and micro-batches.
static inline PlanTask planner_task(const PlanModel *model, const Cluster *cluster,
                                    const Options *o, const OptionsGiven *given) {
    PlanTask t = {.model = model,
                  .cluster = *cluster,
                  .device = planner_memory(cluster, o),
                  .micro_batch = given->at[OPTION_INDEX_micro_batch] ? o->micro_batch : 0,
                  .gives_stages = given->at[OPTION_INDEX_pipeline] && !options_plans(o),
                  .sample_tokens = (double)o->seq_len};
    const int64_t tokens = planner_tokens(o, task_ranks(&t));
    t.memory = t.device;
    t.samples = tokens / o->seq_len;
    t.run_tokens = (double)o->steps * tokens;
    if (tokens % o->seq_len || t.samples > SCHEDULE_MAX / 16) {
        die(EXIT_INPUT, "a step is whole samples, not too many",
            "--batch-tokens %" PRId64 " of --seq-len %" PRId64 ": that cannot be planned", tokens,
            o->seq_len);
    }
    // one stage's last micro-batch may be smaller
    const bool whole = t.gives_stages && !options_pipelined(o);
    if (t.micro_batch && t.samples % t.micro_batch && !whole) {
        die(EXIT_INPUT, "a step is whole micro-batches",
            "%" PRId64 " samples are no multiple of --micro-batch %" PRId64, t.samples,
            t.micro_batch);
    }
    return t;
}
// Counts the memory of a plan's stages. Returns that of the stage that needs most, as the search
// counted it.
static inline double answer_count(const PlanTask *t, const StagePlan *plan, double *memory) {
    Planner p = planner_make(t);
    planner_look(&p, plan);
    memcpy(memory, p.costs.memory, plan->stages * sizeof *memory);
    if (t->count) { t->count(t, plan, p.ranks, p.costs.depth, memory); }
    const double most = plan_most_memory(plan, p.costs.memory);
    planner_free(&p);
    return most;
}
// Counts the memory of the other plans, and leaves out those that do not fit the device.
static inline void answer_count_others(PlanAnswer *a, const PlanTask *t) {
    int fit = 0;
    for (int i = 0; i < a->others; i++) {
        answer_count(t, &a->other[i].plan, a->memory_of_other[fit]);
        if (plan_most_memory(&a->other[i].plan, a->memory_of_other[fit]) > t->device) { continue; }
        a->other[fit] = a->other[i];
        a->name[fit++] = a->name[i];
    }
    a->others = fit;
}
// Makes the fastest of the other plans the best one, if there is any.
static inline void answer_take_other(PlanAnswer *a) {
    int best = 0;
    if (!a->others) { return; }
    for (int i = 1; i < a->others; i++) {
        if (a->other[i].step_s < a->other[best].step_s) { best = i; }
    }
    a->best = a->other[best];
    memcpy(a->memory, a->memory_of_other[best], sizeof a->memory);
    a->others--;
    for (int i = best; i < a->others; i++) {
        a->other[i] = a->other[i + 1];
        a->name[i] = a->name[i + 1];
    }
}
// Finds the best plan that fits the device, or that of the stages which --pipeline gives. What a
// search counts leaves some buffers out (plan_stage_memory). Where its best plan does not fit with
// them, it begins again with so much less: t->memory. Where it then finds nothing, another plan of
// the search before may fit.
static inline void answer_find(PlanAnswer *a, PlanTask *t, const Options *o) {
    PlanAnswer *before = new_array(PlanAnswer, 1, "plans");
    double memory = t->memory; // of the search before
    for (double excess = 1; excess > 0;) {
        *a = t->gives_stages ? planner_given(t, o) : planner_answer(t);
        if (!a->best.plan.stages) {
            *a = *before;
            a->best.plan.stages = 0;
            t->memory = memory;
            break;
        }
        const double counted = answer_count(t, &a->best.plan, a->memory);
        *before = *a;
        memory = t->memory;
        excess = plan_most_memory(&a->best.plan, a->memory) - t->device;
        if (excess > 0) { t->memory = counted - fmax(excess, t->device / 256); }
    }
    answer_count_others(a, t);
    if (!a->best.plan.stages) { answer_take_other(a); }
    free(before);
}
// Returns the best plan, or the plan of the stages that --pipeline gives. Prints the answer to `to`
// (NULL: not) as a table or as JSON. Ends the program (EXIT_RESOURCES) if no plan fits. If
// task->count is collective, all ranks call it.
static inline StagePlan planner_report(FILE *to, PlanTask *t, const Options *o) {
    const PlanModel *model = t->model;
    PlanAnswer *a = new_array(PlanAnswer, 1, "plans");
    answer_find(a, t, o);
    if (!a->best.plan.stages) {
        die(EXIT_RESOURCES, "give more ranks, a larger --device-memory or --micro-batch",
            "no plan fits into %.0f bytes of memory and %d actions of a rank", t->device,
            SCHEDULE_MAX);
    }
    Planner p = planner_make(t);
    const double one_rank_s = plan_units_seconds(model, 0, model->units, (double)t->samples);
    if (to && o->json) {
        print_answer_json(to, &p, a, one_rank_s);
    } else if (to) {
        print_answer(to, &p, a, one_rank_s);
    }
    StagePlan best = a->best.plan;
    planner_free(&p);
    free(a);
    return best;
}
// Prints on standard error which flags have no effect with --profile. A sweep may give them to all
// runs.
static inline void planner_note_useless(const OptionsGiven *given) {
    static const int useless[] = {
        OPTION_INDEX_model,
        OPTION_INDEX_dtype,
        OPTION_INDEX_reduce_dtype,
        OPTION_INDEX_optimizer,
        OPTION_INDEX_zero_quantized_weights,
        OPTION_INDEX_zero_quantized_gradients,
        OPTION_INDEX_zero_hpz_partition_size,
        OPTION_INDEX_expert_parallel,
    };
    for (int i = 0; i < LENGTH_OF(useless); i++) {
        if (!given->at[useless[i]]) { continue; }
        fprintf(stderr, "note: --%s has no effect: --profile says what each unit takes\n",
                option_specs[useless[i]].name);
    }
}
// Runs --plan for the model of --profile on --cluster.
static inline void planner_main(FILE *to, const Options *o, const OptionsGiven *given) {
    PlanModel model = profile_load(o->profile);
    Cluster cluster = cluster_parse(o->cluster);
    PlanTask t = planner_task(&model, &cluster, o, given);
    task_set_states(&t, &optimizers[0], DTYPE_FP32, (int)o->zero); // AdamW's 16 bytes a parameter
    planner_note_useless(given);
    planner_report(to, &t, o);
    plan_model_free(&model);
}
// Returns the units and ranks of a plan's stages; the caller calls placement_free(). ranks: of
// plan_place().
static inline Placement plan_placement(const StagePlan *p, const int *ranks) {
    Placement placement = placement_make(p->stages);
    for (int s = 0, unit = 0, at = 0; s < p->stages; unit += p->units[s], at += p->replicas[s++]) {
        Stage *stage = &placement.stage[s];
        stage->first_unit = unit;
        stage->units = p->units[s];
        stage->replicas = p->replicas[s];
        stage->ranks = new_array(int, stage->replicas, "placement");
        memcpy(stage->ranks, ranks + at, stage->replicas * sizeof(int));
    }
    return placement;
}

#endif
