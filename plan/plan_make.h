// plan_make.h: makes the plan of a run (plan.h) from what is asked, from the machine, and from the
// model. It allocates only the plan, and uses no device, file, message or global variable. It can
// be called again and again: for a machine whose rates are not known yet, with other states
// offloaded, for the model after delinking. Ends the program (EXIT_INPUT) if flags, ranks and model
// do not fit together.
#ifndef PLAN_MAKE_H
#define PLAN_MAKE_H

#include "base/base.h"
#include "base/files.h"
#include "comm/group.h"
#include "cyclic.h"
#include "dp.h"
#include "executor/activations.h"
#include "model/config.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "options.h"
#include "pipeline.h"
#include "plan/plan.h"
#include "plan/state_plan.h"
#include "schedule/actions.h"
#include "schedule/cyclic_routes.h"
#include "schedule/cyclic_windows.h"
#include "schedule/schedule.h"
#include "schedule/validator.h"
#include "state/optimizer.h"
#include "state/planned.h"
#include "state/policy.h"

// -------------------------------------------------------------------------------------------------
// Samples of a step

// Returns the samples of a micro-batch over all ranks that compute it, as the flags say.
static inline int64_t config_micro_rows(const Config *c, const GptModel *m, int ranks) {
    const Options *o = &c->options;
    // with stages, --micro-batch counts the samples of all ranks of a stage together
    const bool whole = c->pipeline.placement.stages > 1 || o->micro_batches;
    const int at_once = o->cyclic && ranks > 1 ? cyclic_stages(o, m, ranks) : ranks;
    return whole ? o->micro_batch : o->micro_batch * at_once;
}
// Returns the number of samples of a step. --batch-tokens 0 means one micro-step of every rank, or
// --micro-batches of them.
static inline int64_t config_samples(const Config *c, const GptModel *m, int ranks) {
    const Options *o = &c->options;
    int64_t tokens = config_micro_rows(c, m, ranks) * o->seq_len * max_i64(1, o->micro_batches);
    if (o->cyclic && ranks == 1 && !o->micro_batches) { tokens *= max_i64(1, o->cyclic_stages); }
    options_check_batch(o);
    tokens = o->batch_tokens ? o->batch_tokens : tokens;
    if (tokens % o->seq_len) {
        const Text hint = text_of("a step is whole samples: --batch-tokens %" PRId64 " is next",
                                  round_up(tokens, o->seq_len));
        die(EXIT_INPUT, hint.at,
            "--batch-tokens %" PRId64 " is not a multiple of --seq-len %" PRId64, tokens,
            o->seq_len);
    }
    return tokens / o->seq_len;
}

// -------------------------------------------------------------------------------------------------
// Stages and micro-batches

// Selects this rank's stage, and the units of that stage.
static inline void plan_take_stage(Plan *p) {
    const Placement *placement = &p->pipeline.placement;
    p->stage = &placement->stage[placement_stage_of_rank(placement, p->machine->ranks->me)];
    p->shape.units = placement_units_of_rank(placement, p->machine->ranks->me);
}
// Cyclic data parallelism: which rank runs which micro-batch, and what this rank stores for it.
static inline void plan_cyclic(Plan *p) {
    const Config *c = p->config;
    const int me = p->machine->ranks->me;
    const size_t units = p->model.units;
    p->cyclic = cyclic_plan(&c->options, &p->model, p->machine->ranks->n, c->samples,
                            c->options.micro_batch);
    p->cyclic.drawn = c->privacy.on;
    p->shape.places = new_array(int64_t, units, "cyclic stages");
    p->shape.cut = new_array(bool, units, "cyclic stages");
    cyclic_activations(&p->cyclic, p->model.units, p->shape.places, p->shape.cut);
    p->shape.limits.in_flight = cyclic_live(&p->cyclic, 0);
    if (p->cyclic.mode != CYCLIC_SINGLE) {
        free(p->shape.cut);
        p->shape.cut = NULL;
    }
    if (p->cyclic.mode != CYCLIC_MODEL) { return; }
    p->pipeline.placement = cyclic_placement(&p->cyclic);
    plan_take_stage(p);
    p->shape.limits = cyclic_limits(&p->cyclic, cyclic_stage_of_rank(&p->cyclic, me));
}
// Are there texts, and nothing else? (Cyclic modes keep the memory of training.)
static inline bool plan_only_forward(const Plan *p) {
    return options_prompts(&p->config->given) && !p->config->options.cyclic;
}
// Plans the micro-batches, and which of them a rank computes. With one stage every rank computes
// all units.
static inline void plan_micro_batches(Plan *p) {
    const Config *c = p->config;
    const int64_t samples = c->samples;
    int64_t micro = config_micro_rows(c, &p->model, p->machine->ranks->n);
    // No backward pass follows a text, so the blocks share their activations. (Zero bubble plans
    // weight parts, which would miss them.)
    const bool shares =
        plan_only_forward(p) && c->options.pipeline_schedule != PIPELINE_ZERO_BUBBLE;
    p->shape.recompute = p->pipeline.recompute || shares;
    p->shape.limits = limits_of_one();
    plan_take_stage(p);
    if (c->options.cyclic) {
        plan_cyclic(p);
        micro = max_i64(1, ceil_div(ceil_div(samples, p->cyclic.N), p->cyclic.pieces));
    }
    p->pipeline.micro_rows = min_i64(micro, samples);
    p->pipeline.micro_batches = min_i64(ceil_div(samples, micro), SCHEDULE_MAX);
    p->shape.dtype = p->dtype;
    p->shape.rows = ceil_div(p->pipeline.micro_rows, p->cyclic.rule ? 1 : p->stage->replicas);
    p->shape.T = c->options.seq_len;
    p->shape.logits = LOGITS_PLENTY;
    p->shape.generates = options_generates(&c->options, &c->given);
    gpt_work_check(&p->model.config, p->shape.rows, p->shape.T);
}
// Private runs: how samples are clipped. Each step draws its samples, so it may have more of them
// than expected.
static inline void plan_clipping(Plan *p) {
    const Config *c = p->config;
    const Options *o = &c->options;
    const int stages = p->pipeline.placement.stages, ranks = p->machine->ranks->n;
    p->most_samples = c->privacy.on ? c->privacy.most : c->samples;
    if (!c->privacy.on) { return; }
    p->pipeline.clips = o->dp_clip_style == DP_UNIT                  ? CLIPS_UNITS
                        : o->dp_clip_style == DP_STAGE && stages > 1 ? CLIPS_STAGES
                                                                     : CLIPS_ALL;
    ClipPolicy *clip = &p->shape.clip;
    *clip = clip_policy(&p->model, o->dp_clip, p->pipeline.clips, stages,
                        (ClipFunction)o->dp_clip_function);
    if (p->cyclic.rule) {
        // Activations need the capacity for the largest number of samples that a step may draw.
        // Each piece has complete gradients of its own, which are not added to another piece's.
        p->shape.rows = ceil_div(c->privacy.most_of_part, p->cyclic.pieces);
        clip->overwrites = true;
        clip->overlaps = p->cyclic.mode == CYCLIC_SINGLE;
        p->shape.limits.clips = cyclic_wte_gradients(&p->cyclic, p->machine->ranks->me);
        gpt_work_check(&p->model.config, p->shape.rows, p->shape.T);
        return;
    }
    const bool often = o->zero > 1 && p->stage->replicas > 1;
    clip->overwrites = often || p->most_samples <= (stages > 1 ? p->pipeline.micro_rows : ranks);
    const double states = (double)p->model.parameters *
                          parameter_bytes(&optimizers[o->optimizer], p->dtype, (int)o->zero, ranks);
    // with several stages --micro-batch fixes the micro-batches
    if (stages == 1) { executor_shorten(&p->model, &p->shape, states, often, p->machine->threads); }
}

// -------------------------------------------------------------------------------------------------
// States and schedules

// Decides where each state will be.
static inline void plan_states(Plan *p) {
    const Options *o = &p->config->options;
    const Machine *m = p->machine;
    const bool accumulates = p->pipeline.placement.stages > 1
                                 ? p->most_samples > p->pipeline.micro_rows
                                 : ceil_div(p->most_samples, m->ranks->n) > p->shape.rows;
    ZeroPolicy policy = zero_policy(o, accumulates, p->shape.clip.recomputes_logits);
    policy.forward_only = plan_only_forward(p);
    policy.matrices &= !policy.forward_only;
    if (p->cyclic.rule) { policy.cyclic = &p->cyclic; }
    if (p->config->offload.host) { policy.offload = &p->config->offload; }
    const MixedPrecision precision = {p->dtype, (DType)o->reduce_dtype};
    p->store = state_plan(&p->model, m->ranks, &p->pipeline.placement, &policy, precision,
                          &optimizers[o->optimizer]);
    p->store.stochastic = o->stochastic_rounding;
    p->store.seed = (uint64_t)o->seed;
    p->store.rates[RATE_EMBEDDING] = (float)o->lr_embedding;
    p->store.rates[RATE_HEAD] = (float)o->lr_head;
    p->store.rates[RATE_VECTORS] = (float)o->lr_vectors;
    p->store.rates[RATE_BALANCE] = o->moe_balance == BALANCE_BIAS ? 0.001f : 0;
    p->store.world.all.channel = m->world.all.channel;
    p->store.world.partition.channel = m->world.partition.channel;
    p->store.world.node.channel = m->world.node.channel;
    p->store.world.across.channel = m->world.across.channel;
}
// The fewest and most samples that a private step may draw.
static inline int plan_extremes(const Plan *p, int64_t samples[2]) {
    samples[0] = 0;
    samples[1] = p->most_samples;
    return p->config->privacy.on && !p->cyclic.rule ? 2 : 0;
}
// Refuses what is not done for blocks with experts, by name.
static inline void check_experts(const Config *c, const GptModel *m) {
    const Options *o = &c->options;
    const char *with = o->cyclic       ? "--cyclic"
                       : c->privacy.on ? "--dp-noise (or --dp-epsilon)"
                       : optimizers[o->optimizer].cut == CUT_MATRICES ? "--optimizer muon"
                       : o->zero_quantized_weights                    ? "--zero-quantized-weights"
                       : o->zero_quantized_gradients                  ? "--zero-quantized-gradients"
                       : o->zero_hpz_partition_size > 1               ? "--zero-hpz-partition-size"
                                                                      : NULL;
    if (!m->config.experts) {
        with = o->moe_balance             ? "--moe-balance"
               : o->moe_z_coefficient > 0 ? "--moe-z-coefficient"
               : o->expert_parallel > 1   ? "--expert-parallel"
               : o->moe_buffer > 0        ? "--moe-buffer"
                                          : NULL;
        if (!with) { return; }
        die(EXIT_INPUT, "give --model a key such as experts=8, or leave the flag out",
            "%s: the model has no experts", with);
    }
    if (with) { die(EXIT_INPUT, "leave it out", "experts are not done with %s", with); }
}
// Refuses learning rates of tensors that the model does not have.
static inline void check_rates(const Options *o, const GptModel *m) {
    bool has[RATE_KINDS] = {};
    for (int t = 0; t < m->arch->tensor_count; t++) {
        has[tensor_rate(&m->arch->tensors[t])] |= m->tensor_elements[t] > 0;
    }
    if (o->lr_head != 1 && !has[RATE_HEAD]) {
        die(EXIT_INPUT, "the head uses the embedding's table: give --lr-embedding",
            "--lr-head: the model has no head of its own");
    }
    if (o->lr_vectors != 1 && !has[RATE_VECTORS]) {
        die(EXIT_INPUT, "leave it out", "--lr-vectors: the model has no biases and no gains");
    }
}
// Does another rank exchange as many rows of blocks when this one does, from action `from` on?
static inline bool plan_exchanges_alike(const Schedule *mine, int from, const Schedule *other) {
    for (int i = from, k = 0; i < mine->count; i++) {
        const Action *a = &mine->actions[i];
        if (a->kind != ACT_EXCHANGE) { continue; }
        while (k < other->count && other->actions[k].kind != ACT_EXCHANGE) { k++; }
        if (k == other->count) { return false; }
        const Action *b = &other->actions[k++];
        if (b->unit != a->unit || b->micro != a->micro || b->part != a->part ||
            b->rows != a->rows) {
            return false;
        }
    }
    return true;
}
// Refuses what is not done for blocks with messages inside, by name.
static inline void plan_check_parts(const Plan *p, const Program *program) {
    const Config *c = p->config;
    const Options *o = &c->options;
    const Schedule *mine = &program->rank[program_rank(program, p->machine->ranks->me)];
    const char *with =
        o->cyclic       ? "--cyclic"
        : c->privacy.on ? "--dp-noise (or --dp-epsilon)"
        : p->model.arch->experts && share_is(p->model.share) && p->pipeline.placement.stages > 1
            ? "--share and --pipeline"
        : p->shape.generates ? "--prompt or --sample-every"
        : program->ranks < p->machine->ranks->n && !p->model.arch->experts ? "--cluster"
                                                                           : NULL;
    if (with) {
        die(EXIT_INPUT, "leave it out", "arch=%s has messages inside its blocks%s: not with %s",
            p->model.arch->name, p->model.arch->experts ? " (--expert-parallel)" : "", with);
    }
    const Group *all = &p->store.expert_ranks.all;
    bool alike = !p->model.arch->experts || pipeline_feeds_all(&p->pipeline, c->samples);
    for (int i = 0; i < mine->count && !p->model.arch->experts; i++) {
        const Action *a = &mine->actions[i];
        if (a->kind != ACT_EXCHANGE) { continue; }
        all = &p->store.rows[a->storage].owners->all;
        alike = a->rows * p->shape.T % all->n == 0;
        for (int k = 0; k < all->n; k++) {
            alike = alike && plan_exchanges_alike(mine, i, &program->rank[all->ranks[k]]);
        }
        break; // so are all that follow
    }
    if (alike) { return; }
    die(EXIT_INPUT, "choose a --batch-tokens and --seq-len that their number divides",
        "arch=%s: the %d ranks of a block exchange rows, so %s", p->model.arch->name, all->n,
        p->model.arch->experts ? "each must have samples of its own in all micro-batches"
                               : "they must have equally many tokens, a multiple of their number");
}
// Makes the schedules, and finds how many micro-batches are in flight at once.
static inline void plan_schedules(Plan *p) {
    p->program = plan_program(p, p->config->samples, true);
    p->evaluation = plan_program(p, p->config->samples, false);
    if (p->program.map.parts > 1) {
        plan_check_parts(p, &p->program);
        plan_check_parts(p, &p->evaluation);
    }
    p->shape.stash = p->evaluation.map.stash;
    const int me = p->machine->ranks->me;
    int64_t samples[2];
    p->shape.limits = limits_of_both(
        p->cyclic.rule ? p->shape.limits : p->program.limits[program_rank(&p->program, me)],
        p->evaluation.limits[program_rank(&p->evaluation, me)]);
    for (int i = 0; i < plan_extremes(p, samples); i++) {
        Program extreme = plan_program(p, samples[i], true);
        p->shape.limits =
            limits_of_both(p->shape.limits, extreme.limits[program_rank(&extreme, me)]);
        program_free(&extreme);
    }
}
__attribute__((noreturn)) static inline void plan_refuse_schedule(const char *error) {
    die(EXIT_INPUT, "this is a defect of train_gpt; please report it", "invalid schedule: %s",
        error);
}
static inline void plan_prove_program(const Program *program) {
    char error[400];
    if (!schedule_validate(program, error, sizeof error)) { plan_refuse_schedule(error); }
}
// Proves that the schedules of a plan are correct, before it is used. Ends the program (EXIT_INPUT)
// if one is not.
static inline void plan_prove(const Plan *p) {
    const CyclicPlan *cyclic = &p->cyclic;
    int64_t samples[2];
    plan_prove_program(&p->evaluation);
    if (cyclic->rule) {
        char error[400];
        if (p->machine->ranks->me) { return; } // all ranks have the same program
        if (!schedule_validate_steps(&p->program, cyclic, &p->model, error, sizeof error)) {
            plan_refuse_schedule(error);
        }
        return;
    }
    plan_prove_program(&p->program);
    for (int i = 0; i < plan_extremes(p, samples); i++) {
        Program extreme = plan_program(p, samples[i], true);
        plan_prove_program(&extreme);
        program_free(&extreme);
    }
}

// Returns the plan of a run. All ranks make their own, from equal flags and agreed choices.
// config, machine and what these point to must outlive the plan. plan_free() frees it.
static inline Plan *plan_make(const Config *config, const Machine *machine, const ModelSpec *spec) {
    Plan *p = new_array(Plan, 1, "the plan");
    p->config = config;
    p->machine = machine;
    p->pipeline = config->pipeline;
    p->model = spec->model;
    int place;
    placement_find_rank(&p->pipeline.placement, machine->ranks->me, &place);
    p->model.expert_rank = place % (int)gpt_expert_ranks(&p->model.config);
    p->dtype = spec->dtype;
    check_experts(config, &p->model);
    check_rates(&config->options, &p->model);
    plan_micro_batches(p);
    plan_clipping(p);
    plan_states(p);
    plan_schedules(p);
    if (machine->rates.bytes_per_s > 0) {
        StageStores stages = stage_stores_make(p);
        p->predicted = plan_predict(p, &stages);
        if (gpt_expert_ranks(&p->model.config) > 1) {
            p->predicted.uneven = predict_uneven(p, &stages);
        }
        stage_stores_free(&stages);
    }
    return p;
}
// Frees a plan, and the tables of its store, unless a run has taken these (run_open).
static inline void plan_free(Plan *p) {
    if (!p) { return; }
    if (p->store.model) { store_plan_free(&p->store); }
    program_free(&p->program);
    program_free(&p->evaluation);
    if (p->cyclic.rule) {
        if (p->cyclic.mode == CYCLIC_MODEL) { placement_free(&p->pipeline.placement); }
        cyclic_free(&p->cyclic);
        free_all(p->shape.places, p->shape.cut);
    }
    free(p);
}

#endif
