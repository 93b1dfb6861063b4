// read_model.h: the model of a run: from a descriptor, a model file, a folder or a checkpoint.
#ifndef READ_MODEL_H
#define READ_MODEL_H

#include "base/base.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/folders.h"
#include "checkpoint/huggingface.h"
#include "checkpoint/huggingface_config.h"
#include "checkpoint/model_file.h"
#include "cli/model_names.h"
#include "comm/records.h"
#include "model/config.h"
#include "model/gpt.h"
#include "model/presets.h"
#include "options.h"
#include "plan/plan.h"
#include "plan/sizes.h"
#include "pseudo.h"
#include "run/prompt.h"
#include "state/optimizer.h"

// Returns which blocks share their parameters: as the flags say; as in the checkpoint that the run
// starts from (`begun`), unless the run delinks; none if the run resumes after it has delinked.
static inline GptShare choose_share(const Options *o, const ModelSpec *spec,
                                    const GptConfig *config, GptShare begun, Comm *comm) {
    const GptShare asked = share_parse(o->share, config->layers);
    const bool shares = share_is(asked);
    if (o->delink && !share_is(begun)) {
        die(EXIT_INPUT, "give it --model FOLDER, a checkpoint of such a run",
            "--delink: %s has no blocks that share", o->model);
    }
    const char *needs = options_switches(o) ? "delink-at" : o->share_lr > 0 ? "share-lr" : NULL;
    if (needs && !shares) {
        die(EXIT_INPUT, "give --share all, N or AxB of more blocks, or leave both out",
            "--%s with --share %s: no two blocks of this model share", needs, o->share);
    }
    if (shares && spec->file && !share_same(asked, begun)) {
        die(EXIT_INPUT, "begin with a descriptor, such as d12",
            "--share %s with --model %s: its blocks are not the same", o->share, o->model);
    }
    const GptShare first = !spec->begun.units ? asked : o->delink ? GPT_SHARE_NONE : begun;
    GptConfig of = *config;
    GptShare newest = first;
    if (o->resume && options_switches(o) && !checkpoint_newest_model(o->out, comm, &of, &newest)) {
        newest = first;
    }
    return share_is(newest) ? first : newest;
}
// Refuses what depends on the checkpoint given by --model: a checkpoint can have shared blocks
// although no flag says so, and --compat checks flags alone.
static inline void check_begun(const Config *c, const ModelSpec *spec) {
    const Options *o = &c->options;
    const bool private_run = options_private(o, &c->given), plans = options_plans(o) || o->plan;
    if (spec->begun.units && !o->resume && checkpoint_lies_in(o->model, o->out)) {
        die(EXIT_INPUT, "give another --out",
            "--model %s lies in --out %s, whose checkpoints a new run moves out of the way",
            o->model, o->out);
    }
    if (!share_is(spec->model.share) || !(private_run || plans)) { return; }
    die(EXIT_INPUT, "give --delink, and each block gets its own",
        "--model %s: its blocks share, which does not go with %s", o->model,
        private_run ? "private training (--dp-noise, --dp-epsilon)" : "--pipeline auto and --plan");
}
// Returns the model that --model describes: a descriptor, a model file, or a checkpoint, whose
// dtype and shape are read here, and what --export keeps; sizes that depend on the model are
// chosen. All ranks call it.
static inline ModelSpec read_model(Config *c, const Machine *m, HfKept *kept, Comm *comm) {
    Options *o = &c->options;
    GptConfig config;
    GptShare share = GPT_SHARE_NONE;
    o->model = checkpoint_chosen(o->model, comm);
    char optimizer[OPTIMIZER_NAME];
    ModelSpec spec = {};
    spec.dtype = o->dtype ? DTYPE_BF16 : DTYPE_FP32;
    if (huggingface_is(o->model)) {
        spec.file = o->model;
        spec.huggingface = true;
        config = huggingface_config(o->model, &spec.file_dtype,
                                    export_is_folder(o->export_file) ? kept : NULL);
    } else if (checkpoint_model(o->model, &config, &share, optimizer)) {
        spec.file = o->model;
        if (options_prompts(&c->given)) { o->optimizer = optimizer_named(optimizer); }
        spec.begun = gpt_model_shared(config, share);
    } else if (!gpt_config_from_descriptor(&config, o->model, o->seq_len)) {
        spec.file = o->model;
        model_check_name(o->model);
        config = model_file_config(o->model, &spec.file_dtype);
    }
    config = gpt_divide_experts(config, o->expert_parallel, o->moe_buffer);
    sizes_choose_length(c, &config, m->cluster.all_ranks);
    sizes_choose_batch(c, &config, m->cluster.all_ranks);
    const bool of_file = spec.file && !spec.begun.units;
    if (of_file && !c->given.at[OPTION_INDEX_dtype]) { spec.dtype = spec.file_dtype; }
    if (o->stochastic_rounding && spec.dtype == DTYPE_FP32) {
        die(EXIT_INPUT, "give --dtype bf16",
            "--stochastic-rounding rounds bf16 parameters, and these are fp32");
    }
    if (options_prompts(&c->given) && !c->given.at[OPTION_INDEX_seq_len]) {
        o->seq_len = min_i64(config.max_seq_len, PROMPT_CONTEXT);
    }
    model_check_length(&config, o->seq_len, o->model);
    spec.model = gpt_model_shared(config, choose_share(o, &spec, &config, share, comm));
    check_begun(c, &spec);
    export_check(o->export_file, &spec.model);
    return spec;
}

#endif
