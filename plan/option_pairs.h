// option_pairs.h: the flags that do not combine, one row each: two flags, the condition under which
// they clash, and why. `why` completes the message "--a with --b: ...". --compat prints the table.
#ifndef OPTION_PAIRS_H
#define OPTION_PAIRS_H

#include "base/base.h"
#include "options.h"
#include "pipeline.h"
#include "state/optimizer.h"

// In conditions: is a flag given; does it belong to another optimizer; is the run private?
#define GIVEN(field) g->at[OPTION_INDEX_##field]
#define LACKS(field) options_lack(o, g, OPTION_INDEX_##field)
#define PRIVATE options_private(o, g)
#define MATRICES (optimizers[o->optimizer].cut == CUT_MATRICES)
// a flag of private runs alone
#define ONLY_PRIVATE(X, name, field)                                                               \
    X(name, "dp-noise", GIVEN(field) && !PRIVATE,                                                  \
      "needs it or --dp-epsilon: else no run is private")
// a flag that some optimizers do not have (state/optimizer.h)
#define OF_OPTIMIZER(X, name, field)                                                               \
    X(name, "optimizer", LACKS(field), "belongs to others: --help optimizer says to which")
// a flag of generated text alone; --sample-every 0 says that there is to be none
#define OF_SAMPLES(X, name, field)                                                                 \
    X(name, "sample-every", GIVEN(field) && !GIVEN(sample_every) && !options_prompts(g),           \
      "no text is asked for: give it (with 0 such flags may stay) or --prompt")
// clang-format off
#define OPTION_PAIR_TABLE(X)                                                                       \
    X("resume", "out", o->resume && !*o->out,                                                      \
      "needs the folder with the checkpoints: add --out FOLDER")                                   \
    X("save-every", "out", o->save_every && !*o->out,                                              \
      "needs a folder to save into: add --out FOLDER")                                             \
    X("keep", "out", o->keep && !*o->out,                                                          \
      "counts the checkpoints of a folder: add --out FOLDER")                                      \
    X("hellaswag", "val-every", *o->hellaswag && !o->val_every,                                    \
      "it is scored with each validation: give --val-every steps")                                 \
    X("json", "dry-run", o->json && !o->dry_run && !o->plan && !*o->dp_account,                    \
      "only this, --plan and --dp-account print an object; training writes JSON lines to --log "   \
      "FILE")                                                                                      \
    X("json", "show-schedule", o->json && o->show_schedule,                                        \
      "a list of actions is text: leave --json out")                                               \
    X("dp-account", "dry-run",                                                                     \
      *o->dp_account && (o->dry_run || o->plan || o->show_schedule || o->fit || PRIVATE),          \
      "(or --plan, --show-schedule, --fit, --dp-noise, --dp-epsilon) it prints and stops, and "    \
      "says all itself: give it alone")                                                            \
    X("show-schedule", "plan", o->show_schedule && (o->plan || o->fit),                            \
      "(or --fit) a search prints flags: give these with --show-schedule")                         \
    X("prompt", "dry-run", GIVEN(prompt) && options_only_prints(o),                                \
      "(or another flag that prints and stops) both print and stop: give one")                     \
    X("prompt", "fit", GIVEN(prompt) && o->fit,                                                    \
      "no step is made that could be fast: leave --fit out")                                       \
    X("cluster", "dry-run", *o->cluster && !o->dry_run && !o->plan,                                \
      "a real run is on the ranks that there are")                                                 \
    X("fit", "plan", o->fit && o->plan,                                                            \
      "both choose, and --fit what --plan does, too: give one")                                    \
    X("fit", "pipeline", o->fit && options_plans(o),                                               \
      "both choose the stages: leave --pipeline out, or give the stages")                          \
    X("fit", "cyclic", o->fit && o->cyclic,                                                        \
      "cyclic schedules are not searched")                                                         \
    X("fit", "dp-noise", o->fit && PRIVATE,                                                        \
      "(or --dp-epsilon) how many samples a private step draws is not known here")                 \
    X("plan", "dry-run", o->plan && o->dry_run,                                                    \
      "both print and stop: give one")                                                             \
    X("profile", "plan", *o->profile && !o->plan,                                                  \
      "only plans are made from it")                                                               \
    X("profile", "cluster", *o->profile && !*o->cluster,                                           \
      "needs it: which ranks there are, and how fast their links")                                 \
    X("offload", "device-memory",                                                                  \
      GIVEN(offload) && o->offload == OFFLOAD_AUTO && !*o->device_memory,                          \
      "auto fills the device up to this budget: give it")                                          \
    X("offload", "pipeline",                                                                       \
      GIVEN(offload) && o->offload != OFFLOAD_NONE && (o->plan || options_plans(o)),               \
      "the planner chooses stages that fit into --device-memory without it: give the stages")      \
    X("offload", "zero-quantized-weights",                                                         \
      o->offload >= OFFLOAD_PARAMS && o->zero_quantized_weights,                                   \
      "(of params, all) parameters travel as records, which stay on the device: give --offload "   \
      "optimizer")                                                                                 \
    X("offload", "pipeline-schedule",                                                              \
      o->offload == OFFLOAD_ALL && o->pipeline_schedule == PIPELINE_ZERO_BUBBLE,                   \
      "(of all) zero-bubble's weight parts wait for others, and their activations with them: "     \
      "give --offload params")                                                                     \
    X("offload", "dp-noise", o->offload == OFFLOAD_ALL && PRIVATE,                                 \
      "(of all; or --dp-epsilon) clipping may spoil activations, which do not go back: give "      \
      "--offload params")                                                                          \
    X("host-memory", "offload", *o->host_memory && !options_offloads(o),                           \
      "nothing lies on the host: give --device-memory, or --offload optimizer")                    \
    X("offload-update", "offload", GIVEN(offload_update) && !options_offloads(o),                  \
      "nothing lies on the host: give --device-memory, or --offload optimizer")                    \
    X("offload-delay", "offload", o->offload_delay && o->offload != OFFLOAD_OPTIMIZER,             \
      "the host keeps gradients and all states: give --offload optimizer")                         \
    X("offload-delay", "offload-update", o->offload_delay && o->offload_update == UPDATE_DEVICE,   \
      "it is the host that updates while the device computes")                                     \
    X("offload-delay", "dp-noise", o->offload_delay && PRIVATE,                                    \
      "(or --dp-epsilon) the gradient of a private step gets its noise on the device")             \
    X("offload-delay", "zero-quantized-gradients",                                                 \
      o->offload_delay && o->zero_quantized_gradients,                                             \
      "their sums stay on the device")                                                             \
    X("offload-delay", "delink-at", o->offload_delay && o->delink_at,                              \
      "a gradient that waits is of a model that is gone: give --delink to a run that follows")     \
    X("offload-delay", "offload-dir", o->offload_delay && *o->offload_dir,                         \
      "all states are updated on the host while the device computes, and none is on its way "      \
      "there")                                                                                     \
    X("lr-last-part", "lr-schedule",                                                               \
      GIVEN(lr_last_part) && o->lr_schedule != LR_WSD && o->lr_schedule != LR_WSD_LINEAR,          \
      "only wsd and wsd-linear have a last part")                                                  \
    X("offload-update", "optimizer",                                                               \
      GIVEN(offload_update) && o->offload_update == UPDATE_HOST && MATRICES,                       \
      "(of host, with muon) the device makes matrices orthogonal: leave --offload-update out")     \
    X("offload-delay", "optimizer", o->offload_delay && MATRICES,                                  \
      "(of muon) the device makes matrices orthogonal, and would wait for the host's part")        \
    X("offload-dir", "optimizer", *o->offload_dir && MATRICES,                                     \
      "(of muon) its states come twice in a step, and are not read twice from a disk")             \
    X("offload-dir", "offload", *o->offload_dir && !options_offloads(o),                           \
      "nothing leaves the device: give --device-memory, or --offload optimizer")                   \
    X("cluster", "ranks-per-node", *o->cluster && GIVEN(ranks_per_node),                           \
      "the cluster says how many there are")                                                       \
    OF_OPTIMIZER(X, "beta1", beta1)                                                                \
    OF_OPTIMIZER(X, "beta2", beta2)                                                                \
    OF_OPTIMIZER(X, "eps", eps)                                                                    \
    OF_OPTIMIZER(X, "nesterov", nesterov)                                                          \
    OF_OPTIMIZER(X, "momentum", momentum)                                                          \
    OF_OPTIMIZER(X, "muon-lr", muon_lr)                                                            \
    OF_OPTIMIZER(X, "muon-momentum", muon_momentum)                                                \
    OF_OPTIMIZER(X, "muon-momentum-warmup", muon_momentum_warmup)                                  \
    OF_OPTIMIZER(X, "muon-steps", muon_steps)                                                      \
    OF_OPTIMIZER(X, "muon-weight-decay", muon_weight_decay)                                        \
    X("profile-steps", "steps", options_profiles_beyond(o),                                        \
      "the run ends before")                                                                       \
    OF_SAMPLES(X, "sample-tokens", sample_tokens)                                                  \
    OF_SAMPLES(X, "temperature", temperature)                                                      \
    OF_SAMPLES(X, "top-k", top_k)                                                                  \
    OF_SAMPLES(X, "top-p", top_p)                                                                  \
    X("trace", "profile-steps", *o->trace && !*o->profile_steps && !o->show_schedule,              \
      "only profiled steps are timed: give it, or --show-schedule for the plan")                   \
    X("stochastic-rounding", "dtype",                                                              \
      GIVEN(dtype) && o->stochastic_rounding && o->dtype == DTYPE_FP32,                            \
      "only bf16 parameters are rounded: give --dtype bf16")                                       \
    X("zero-quantized-weights", "zero", o->zero_quantized_weights && o->zero < 3,                  \
      "only stage 3 gathers parameters for each use: give --zero 3")                               \
    X("zero-hpz-partition-size", "zero", o->zero_hpz_partition_size > 1 && o->zero < 3,            \
      "only stage 3 gathers parameters for each use: give --zero 3")                               \
    X("zero-gradient-bits", "zero-quantized-gradients",                                            \
      GIVEN(zero_gradient_bits) && !o->zero_quantized_gradients,                                   \
      "needs it")                                                                                  \
    X("zero-error-feedback", "zero-quantized-gradients",                                           \
      o->zero_error_feedback && !o->zero_quantized_gradients,                                      \
      "needs it")                                                                                  \
    X("zero-quant-block", "zero-quantized-weights",                                                \
      GIVEN(zero_quant_block) && !o->zero_quantized_weights && !o->zero_quantized_gradients,       \
      "nothing is quantized: give this or --zero-quantized-gradients")                             \
    ONLY_PRIVATE(X, "dp-delta", dp_delta)                                                          \
    ONLY_PRIVATE(X, "dp-clip", dp_clip)                                                            \
    ONLY_PRIVATE(X, "dp-clip-style", dp_clip_style)                                                \
    ONLY_PRIVATE(X, "dp-clip-function", dp_clip_function)                                          \
    ONLY_PRIVATE(X, "dp-unit", dp_unit)                                                            \
    ONLY_PRIVATE(X, "dp-key", dp_key)                                                              \
    ONLY_PRIVATE(X, "dp-show-private", dp_show_private)                                            \
    X("dp-accountant", "dp-account", GIVEN(dp_accountant) && !*o->dp_account && !PRIVATE,          \
      "needs it or a private run (--dp-epsilon, --dp-noise): nothing else is accounted")           \
    X("dp-neighbours", "dp-account", GIVEN(dp_neighbours) && !*o->dp_account && !PRIVATE,          \
      "needs it or a private run (--dp-epsilon, --dp-noise): nothing else is accounted")           \
    X("dp-epsilon", "dp-noise", o->dp_epsilon > 0 && GIVEN(dp_noise) && o->dp_noise == 0,          \
      "without noise no epsilon is kept: leave --dp-noise out, and it is found")                   \
    X("dp-unit", "windows", o->dp_unit == DP_DOCUMENT && o->windows == 0,                          \
      "the windows of a document are known where none holds two: give --windows document")         \
    X("dp-windows-per-document", "dp-unit",                                                        \
      GIVEN(dp_windows_per_document) && o->dp_unit != DP_DOCUMENT,                                 \
      "only there windows are counted by document: give --dp-unit document")                       \
    X("dp-windows-per-document", "dp-accountant",                                                  \
      o->dp_windows_per_document > 1 && o->dp_accountant == DP_RDP,                                \
      "more than one is accounted by prv")                                                         \
    X("dp-clip-style", "recompute",                                                                \
      PRIVATE && o->dp_clip_style != DP_UNIT && o->recompute == RECOMPUTE_BLOCK,                   \
      "private: flat and stage keep what each block computed until the whole norm is known; "      \
      "--dp-clip-style unit does not")                                                             \
    X("zero-quantized-gradients", "dp-noise", o->zero_quantized_gradients && PRIVATE,              \
      "(or --dp-epsilon) a block's scale and rounding are made of gradients without noise, so "    \
      "one sample can move all of its elements: these travel in fp32")                             \
    X("reduce-dtype", "dp-noise", o->reduce_dtype == DTYPE_BF16 && PRIVATE,                        \
      "(or --dp-epsilon) rounding before noise is added can move more than a sample may: "         \
      "private gradients travel in fp32")                                                          \
    X("skip-loss-z", "dp-noise", o->skip_loss_z > 0 && PRIVATE,                                    \
      "(or --dp-epsilon) a step that is skipped reveals something of its samples, which no "       \
      "epsilon counts")                                                                            \
    X("skip-grad-z", "dp-noise", o->skip_grad_z > 0 && PRIVATE,                                    \
      "(or --dp-epsilon) a step that is skipped reveals something of its samples, which no "       \
      "epsilon counts")                                                                            \
    X("profile-steps", "dp-noise", *o->profile_steps && PRIVATE && !o->dp_show_private,            \
      "(or --dp-epsilon) the times of a step tell how many samples it drew: give "                 \
      "--dp-show-private too")                                                                     \
    X("dp-neighbours", "dp-accountant",                                                            \
      o->dp_neighbours == DP_REPLACE_ONE && o->dp_accountant == DP_RDP,                            \
      "replace-one is accounted by prv")                                                           \
    X("pipeline", "dp-noise", (options_plans(o) || o->plan) && PRIVATE,                            \
      "(or --dp-epsilon) auto and --plan do not know what clipping takes: give a run the "         \
      "stages")                                                                                    \
    X("pipeline-schedule", "dp-noise", o->pipeline_schedule == PIPELINE_ZERO_BUBBLE && PRIVATE,    \
      "(or --dp-epsilon) zero-bubble does not know when factors come: choose dapple")              \
    X("pipeline-schedule", "pipeline", GIVEN(pipeline_schedule) && !options_gives_stages(o),       \
      "one stage, and auto, have nothing to order: give --pipeline N")                             \
    X("pipeline-warmup", "pipeline", GIVEN(pipeline_warmup) && !options_gives_stages(o),           \
      "one stage, and auto, have nothing to order: give --pipeline N")                             \
    X("pipeline-warmup", "pipeline-schedule",                                                      \
      GIVEN(pipeline_warmup) && o->pipeline_schedule != PIPELINE_DAPPLE,                           \
      "only dapple has policies")                                                                  \
    X("pipeline", "recompute", options_plans(o) && GIVEN(recompute),                               \
      "auto chooses it, for the memory that --device-memory gives")                                \
    X("plan", "recompute", o->plan && !GIVEN(pipeline) && GIVEN(recompute),                        \
      "the planner chooses it, but for stages that --pipeline gives")                              \
    X("pipeline", "zero-hpz-partition-size", options_plans(o) && o->zero_hpz_partition_size > 1,   \
      "auto may choose stages of fewer ranks: give the stages")                                    \
    X("pipeline-schedule", "recompute",                                                            \
      o->pipeline_schedule == PIPELINE_ZERO_BUBBLE && o->recompute == RECOMPUTE_BLOCK,             \
      "zero-bubble keeps activations until the weight parts run: leave --recompute out, or "       \
      "choose dapple")                                                                             \
    X("cyclic-mode", "cyclic", GIVEN(cyclic_mode) && !o->cyclic,                                   \
      "needs --cyclic v1 or v2")                                                                   \
    X("cyclic-slack", "cyclic", GIVEN(cyclic_slack) && o->cyclic != 2,                             \
      "only --cyclic v2 has pairs that could wait")                                                \
    X("cyclic-stages", "cyclic", GIVEN(cyclic_stages) && !o->cyclic,                               \
      "needs --cyclic v1 or v2")                                                                   \
    X("cyclic-cut", "cyclic", *o->cyclic_cut && !o->cyclic,                                        \
      "needs --cyclic v1 or v2")                                                                   \
    X("cyclic", "pipeline", o->cyclic && (options_pipelined(o) || o->plan),                        \
      "(or --plan) both cut the model into stages, by rules of their own: give one")               \
    X("cyclic", "zero", o->cyclic && o->zero,                                                      \
      "states travel from rank to rank, not by collectives: leave --zero out")                     \
    X("cyclic", "zero-quantized-gradients", o->cyclic && o->zero_quantized_gradients,              \
      "sums go on from rank to rank: each would be quantized again")                               \
    X("cyclic", "reduce-dtype", o->cyclic && o->reduce_dtype == DTYPE_BF16,                        \
      "sums go on from rank to rank: each would be rounded again; they travel in fp32")            \
    X("cyclic-mode", "dp-noise", o->cyclic_mode > 2 && PRIVATE,                                    \
      "(or --dp-epsilon) a sample's gradient of the table of tokens has two parts, which zero "    \
      "and model have apart: choose single or data")                                               \
    X("dp-clip-style", "cyclic", o->cyclic && PRIVATE && o->dp_clip_style != DP_UNIT,              \
      "flat and stage know a sample's factor when its backward pass ends, and sums of the last "   \
      "stage do not wait for that: choose unit")                                                   \
    X("cyclic", "grad-clip",                                                                       \
      GIVEN(grad_clip) && o->cyclic == 2 && o->grad_clip > 0 && !o->cyclic_clip,                   \
      "v2 updates the last stage before the first one has a gradient, so there is no norm of "     \
      "all: give --cyclic-clip storage, or leave it out")                                          \
    X("cyclic-clip", "cyclic", GIVEN(cyclic_clip) && o->cyclic != 2,                               \
      "only v2 has no norm of the whole gradient in time")                                         \
    X("cyclic", "skip-loss-z", o->cyclic && o->skip_loss_z > 0,                                    \
      "updates do not wait for the loss of the step")                                              \
    X("cyclic", "skip-grad-z", o->cyclic && o->skip_grad_z > 0,                                    \
      "updates do not wait for the norm of the step")                                              \
    X("cyclic", "cluster", o->cyclic && *o->cluster,                                               \
      "is not predicted for ranks that are not there")                                             \
    X("moe-aux-coefficient", "moe-balance",                                                        \
      GIVEN(moe_aux_coefficient) && o->moe_balance != BALANCE_AUX,                                 \
      "needs aux: nothing else has the loss")                                                      \
    X("moe-buffer", "expert-parallel",                                                             \
      o->moe_buffer > 0 && o->expert_parallel < 2 && !GIVEN(expert_parallel) &&                    \
          !options_searches(o),                                                                    \
      "no rows come from other ranks: leave it out")                                               \
    X("moe-balance", "cyclic", o->moe_balance == BALANCE_AUX && o->cyclic,                         \
      "(aux) the loads of a whole step are not known before it begins: give bias")                 \
    X("moe-balance", "dp-noise", o->moe_balance && PRIVATE,                                        \
      "(or --dp-epsilon) loads tell of samples, and carry no noise: leave it out")                 \
    X("share-lr", "share", o->share_lr > 0 && !options_shares(o),                                  \
      "no blocks share: give --share all, or --lr")                                                \
    X("share-lr", "lr", o->share_lr > 0 && o->lr == 0,                                             \
      "the rate while blocks share is a part of --lr's schedule, and no part of 0: give --lr")     \
    X("delink-at", "share", o->delink_at && !options_shares(o),                                    \
      "no blocks share: give --share all")                                                         \
    X("delink-at", "delink", o->delink_at && o->delink,                                            \
      "one is for the begin of a run, one for later: give one")                                    \
    X("delink-at", "profile-steps", o->delink_at && *o->profile_steps,                             \
      "one schedule is profiled, and there are two: give it to the run after --resume")            \
    X("delink-moments", "delink-at", GIVEN(delink_moments) && !options_switches(o) && !o->delink,  \
      "needs it or --delink: nothing is copied")                                                   \
    X("delink-warmup", "delink-at", o->delink_warmup && !options_switches(o),                      \
      "needs it; a run that begins with --delink has --warmup")                                    \
    X("share", "pipeline", options_shares(o) && (options_plans(o) || o->plan),                     \
      "auto and --plan do not know that blocks share their parameters: give the stages")           \
    X("share", "dp-noise", options_shares(o) && PRIVATE,                                           \
      "(or --dp-epsilon) the norm of what a sample adds to a shared block is not known layer by "  \
      "layer")                                                                                     \
    X("delink-at", "cyclic", o->delink_at && o->cyclic,                                            \
      "micro-batches of two steps are under way at the switch: give --delink to a run that "       \
      "follows")                                                                                   \
    X("cyclic", "offload", o->cyclic && options_offloads(o),                                       \
      "(or --device-memory) states go from rank to rank when their updates are made, and none "    \
      "lies on the host")
// clang-format on

typedef struct {
    const char *a, *b, *why;
} OptionPair;
static const OptionPair option_pairs[] = {
#define PAIR(a, b, condition, why) {a, b, why},
    OPTION_PAIR_TABLE(PAIR)
#undef PAIR
};
enum { OPTION_PAIRS = LENGTH_OF(option_pairs) };

// Returns the first pair that clashes, or NULL.
static inline const OptionPair *options_clash(const Options *o, const OptionsGiven *g) {
#define CONDITION(a, b, condition, why) condition,
    const bool clashes[] = {OPTION_PAIR_TABLE(CONDITION)};
#undef CONDITION
    for (int i = 0; i < OPTION_PAIRS; i++) {
        if (clashes[i]) { return &option_pairs[i]; }
    }
    return NULL;
}
#undef GIVEN
#undef LACKS
#undef PRIVATE
#undef ONLY_PRIVATE
#undef OF_OPTIMIZER
#undef OF_SAMPLES

static inline void options_print_compat(FILE *to) {
    fprintf(to, "Every combination of flags is accepted, but for these:\n");
    for (int i = 0; i < OPTION_PAIRS; i++) {
        fprintf(to, "  --%-12s with --%-12s %s\n", option_pairs[i].a, option_pairs[i].b,
                option_pairs[i].why);
    }
}

#endif
