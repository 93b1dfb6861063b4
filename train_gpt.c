// train_gpt: pretrains GPT models. One program:
//
//     mpirun -np RANKS ./train_gpt [--flag value ...]
//
// Reading order: this file from the bottom (main is the recipe) to the top; then the other files in
// the order of the table in README.md, "Read it", which gives the question that each file answers.
// A file includes only files of its own row of that table or of rows below it. train_gpt.cu adds
// the GPU's operations and includes this file.
#ifndef OPS_IMPLEMENTATION // train_gpt.cu defines its own
#include "comm/comm.h"
#include "ops/cpu/ops_cpu.h"
// Allocates the staging memory for collectives over up to `elements` fp32 elements, sent as `wire`.
// Records of bytes and messages between two ranks need none, since MPI reads and writes the CPU's
// memory. Every rank calls it once.
static void transport_open(Comm *c, Stream *s, DType wire, int64_t elements, size_t records,
                           const CommTraffic *traffic) {
    size_t bytes = comm_staging_bytes(&c->everyone, wire, elements, COMM_STAGING_BYTES);
    (void)s;
    (void)records;
    (void)traffic;
    comm_allocate(c, bytes ? memory_take(MEMORY_BUFFERS, bytes, "messages") : NULL, bytes);
}
#endif
#include "engine/matmul_choices.h"
#include "engine/memory_plan.h"
#include "engine/outputs.h"

// -------------------------------------------------------------------------------------------------
// Setting up

// Returns which blocks share their parameters: as the flags say; as in the checkpoint that the run
// starts from, unless the run delinks; none if the run resumes after it has delinked.
static GptShare setup_share(Trainer *t, const GptConfig *config, GptShare begun) {
    const Options *o = &t->options;
    const GptShare asked = share_parse(o->share, config->layers);
    const bool shares = share_is(asked);
    if (o->delink && !share_is(begun)) {
        die(EXIT_INPUT, "give it --model FOLDER, a checkpoint of such a run",
            "--delink: %s has no blocks that share", o->model);
    }
    if (options_switches(o) && !shares) {
        die(EXIT_INPUT, "give --share all, N or AxB of more blocks, or leave it out",
            "--share %s: no two blocks of this model share, so none can be delinked", o->share);
    }
    if (shares && t->model_file && !share_same(asked, begun)) {
        die(EXIT_INPUT, "begin with a descriptor, such as d12",
            "--share %s with --model %s: its blocks are not the same", o->share, o->model);
    }
    const GptShare first = !t->model_begun.units ? asked : o->delink ? GPT_SHARE_NONE : begun;
    GptConfig of = *config;
    GptShare newest = first;
    if (o->resume && options_switches(o) &&
        !checkpoint_newest_model(o->out, &t->comm, &of, &newest)) {
        newest = first;
    }
    return share_is(newest) ? first : newest;
}
// Refuses what depends on the checkpoint given by --model: a checkpoint can have shared blocks
// although no flag says so, and --compat checks flags alone.
static void check_begun(const Trainer *t) {
    const Options *o = &t->options;
    const bool private_run = options_private(o, &t->given), plans = options_plans(o) || o->plan;
    if (t->model_begun.units && !o->resume && checkpoint_lies_in(o->model, o->out)) {
        die(EXIT_INPUT, "give another --out",
            "--model %s lies in --out %s, whose checkpoints a new run moves out of the way",
            o->model, o->out);
    }
    if (!share_is(t->model.share) || !(private_run || plans)) { return; }
    die(EXIT_INPUT, "give --delink, and each block gets its own",
        "--model %s: its blocks share, which does not go with %s", o->model,
        private_run ? "private training (--dp-noise, --dp-epsilon)" : "--pipeline auto and --plan");
}
static void setup_model(Trainer *t) {
    const Options *o = &t->options;
    GptConfig config;
    GptShare share = GPT_SHARE_NONE;
    t->dtype = o->dtype ? DTYPE_BF16 : DTYPE_FP32;
    if (checkpoint_model(o->model, &config, &share)) {
        t->model_file = o->model;
        t->model_begun = gpt_model_shared(config, share);
    } else if (!gpt_config_from_descriptor(&config, o->model, o->seq_len)) {
        t->model_file = o->model;
        config = model_file_config(o->model, &t->model_file_dtype);
        if (!t->given.at[OPTION_INDEX_dtype]) { t->dtype = t->model_file_dtype; }
    }
    if (o->stochastic_rounding && t->dtype == DTYPE_FP32) {
        die(EXIT_INPUT, "give --dtype bf16",
            "--stochastic-rounding rounds bf16 parameters, and these are fp32");
    }
    if (o->seq_len > config.max_seq_len) {
        die(EXIT_INPUT, "choose a smaller --seq-len",
            "--seq-len %" PRId64 " is more than this model's %" PRId64 " positions", o->seq_len,
            config.max_seq_len);
    }
    t->model = gpt_model_shared(config, setup_share(t, &config, share));
    check_begun(t);
    ops_open(&t->stream, t->comm.local_rank, t->dtype);
    if (t->stream.device) { // start() did not know the device yet
        char near_cores[256];
        ops_near_cores(near_cores, sizeof near_cores);
        t->stream.threads = comm_bind_to_cores(&t->comm, o->threads, near_cores);
    }
}

// Sets the ranks that the plan is for: those of the run, or those of --cluster.
static void setup_ranks(Trainer *t) {
    t->cluster = cluster_parse(t->options.cluster);
    t->ranks = &t->comm.everyone;
    if (t->cluster.nodes) {
        t->cluster_ranks = group_cluster(t->cluster.nodes, t->cluster.ranks);
        t->ranks = &t->cluster_ranks;
    }
}

// Selects this rank's stage of the plan, and the units of that stage.
static void take_stage(Trainer *t) {
    t->stage = &t->plan.placement.stage[placement_stage_of_rank(&t->plan.placement, t->ranks->me)];
    t->shape.first = t->stage->first_unit;
    t->shape.end = t->stage->first_unit + t->stage->units;
}
// Decides which units each rank computes. With one stage every rank computes all units.
static void setup_stages(Trainer *t) {
    const Options *o = &t->options;
    PipelinePlan *p = &t->plan;
    p->depth = INT64_MAX;
    p->placement = options_plans(o)
                       ? plan_run(&t->options, &t->given, &t->model, t->dtype, &t->cluster,
                                  &t->comm, &t->stream, &t->rates, &p->depth)
                       : pipeline_placement(o->pipeline, t->model.units, t->ranks->n);
    p->kind = (PipelineKind)o->pipeline_schedule;
    p->warmup = (Warmup)o->pipeline_warmup;
    p->recompute = o->recompute == RECOMPUTE_BLOCK;
    t->shape.recompute = p->recompute;
    t->shape.limits = limits_of_one();
    take_stage(t);
}

// Cyclic data parallelism: plans which rank runs which micro-batch, and what this rank stores for
// it.
static void setup_cyclic(Trainer *t) {
    const size_t units = (size_t)t->model.units;
    t->cyclic =
        cyclic_plan(&t->options, &t->model, t->ranks->n, t->samples, t->options.micro_batch);
    t->p2p = cyclic_p2p(&t->cyclic, &t->model, t->ranks->me);
    int64_t *places = (int64_t *)checked_calloc(units, sizeof(int64_t), "cyclic stages");
    bool *cut = (bool *)checked_calloc(units, sizeof(bool), "cyclic stages");
    cyclic_activations(&t->cyclic, t->model.units, places, cut);
    t->shape.places = places;
    t->shape.cut = t->cyclic.mode == CYCLIC_SINGLE ? cut : NULL;
    t->shape.limits.in_flight = cyclic_live(&t->cyclic, 0);
    t->options.cyclic_stages = t->cyclic.N; // a resumed private run must use the same number
    if (t->cyclic.mode != CYCLIC_MODEL) { return; }
    t->plan.placement = cyclic_placement(&t->cyclic);
    take_stage(t);
    t->shape.limits = cyclic_limits(&t->cyclic, cyclic_stage_of_rank(&t->cyclic, t->ranks->me));
}
// Computes the number of samples of a step and of a micro-batch. --batch-tokens 0 means one
// micro-step of every rank, or --micro-batches of them.
static void setup_batch(Trainer *t) {
    const Options *o = &t->options;
    // with stages, --micro-batch counts the samples of all ranks of a stage together
    const bool whole = t->plan.placement.stages > 1 || o->micro_batches;
    const int at_once =
        o->cyclic && t->ranks->n > 1 ? cyclic_stages(o, &t->model, t->ranks->n) : t->ranks->n;
    int64_t micro = whole ? o->micro_batch : o->micro_batch * at_once,
            tokens = micro * o->seq_len * max_i64(1, o->micro_batches);
    if (o->cyclic && t->ranks->n == 1) { tokens *= max_i64(1, o->cyclic_stages); }
    if (o->batch_tokens && o->micro_batches && o->batch_tokens != tokens) {
        die(EXIT_INPUT, "leave one of them out",
            "--batch-tokens %" PRId64
            " is not --micro-batches x --micro-batch x --seq-len, %" PRId64,
            o->batch_tokens, tokens);
    }
    tokens = o->batch_tokens ? o->batch_tokens : tokens;
    if (tokens % o->seq_len) {
        die(EXIT_INPUT, "a step is whole samples",
            "--batch-tokens %" PRId64 " is not a multiple of --seq-len %" PRId64, tokens,
            o->seq_len);
    }
    t->samples = t->most_samples = tokens / o->seq_len;
    if (o->cyclic) {
        setup_cyclic(t);
        micro = max_i64(1, ceil_div(ceil_div(t->samples, t->cyclic.N), t->cyclic.pieces));
    }
    t->plan.micro_rows = min_i64(micro, t->samples);
    t->plan.micro_batches = (int)min_i64(ceil_div(t->samples, micro), SCHEDULE_MAX);
    t->shape.dtype = t->dtype;
    t->shape.rows = ceil_div(t->plan.micro_rows, t->cyclic.rule ? 1 : t->stage->replicas);
    t->shape.T = o->seq_len;
    t->shape.logits = LOGITS_PLENTY;
    gpt_work_check(&t->model.config, t->shape.rows, o->seq_len);
}

// Private cyclic steps: activations need the capacity for the largest number of samples that a step
// may draw. Each piece has complete gradients of its own, which are not added to another piece's.
static void setup_cyclic_privacy(Trainer *t) {
    t->shape.rows = ceil_div(t->privacy.most_of_part, t->cyclic.pieces);
    t->shape.clip.fresh = true;
    t->shape.clip.overlaps = t->cyclic.mode == CYCLIC_SINGLE;
    t->shape.limits.clips = cyclic_wte_gradients(&t->cyclic, t->ranks->me);
    gpt_work_check(&t->model.config, t->shape.rows, t->options.seq_len);
}
// Sets up a private run. It draws the samples of each step, so a step may have more of them than
// expected. --dry-run does not open the data.
static void setup_privacy(Trainer *t) {
    const Options *o = &t->options;
    if (!o->steps) { return; } // no training, so nothing to protect
    t->privacy = privacy_plan(o, &t->given, t->train.windows, t->samples, t->steps, &t->comm);
    if (!t->privacy.on) { return; }
    t->most_samples = t->privacy.most;
    const int stages = t->plan.placement.stages;
    t->plan.clips = o->dp_clip_style == DP_UNIT                  ? CLIPS_UNITS
                    : o->dp_clip_style == DP_STAGE && stages > 1 ? CLIPS_STAGES
                                                                 : CLIPS_ALL;
    t->shape.clip = clip_policy(&t->model, o->dp_clip, t->plan.clips, stages,
                                (ClipFunction)o->dp_clip_function);
    if (t->cyclic.rule) {
        setup_cyclic_privacy(t);
        return;
    }
    const bool often = o->zero > 1 && t->stage->replicas > 1;
    t->shape.clip.fresh =
        often || t->most_samples <= (stages > 1 ? t->plan.micro_rows : t->ranks->n);
    // bytes (of 16 for each parameter) that ZeRO stage 0, 1, 2, 3 replicates on every rank
    const double whole[4] = {16, 8, 4, 0};
    const double states =
        (double)t->model.parameters * (whole[o->zero] + (16 - whole[o->zero]) / t->ranks->n);
    // with several stages --micro-batch fixes the micro-batches
    if (stages == 1) { executor_shorten(&t->model, &t->shape, states, often, t->stream.threads); }
}
static void setup_messages(Trainer *t) {
    int64_t most = 0;
    for (int s = 0; s < t->model.storages; s++) {
        const int n = holders_of(&t->store.layout.owners, s);
        const int64_t elements = gpt_storage_elements(&t->model, s);
        most = max_i64(most, store_padded(elements, n, zero_grain(&t->store.policy)));
    }
    CommTraffic traffic = executor_traffic(&t->model, &t->shape, &t->plan.placement, t->comm.rank,
                                           &t->program, &t->evaluation, cyclic_turns(&t->cyclic));
    transport_open(&t->comm, &t->stream, (DType)t->options.reduce_dtype, most,
                   t->store.exchange_bytes, &traffic);
    free(traffic.peers);
    store_join(&t->store, &t->comm);
}

// Returns the samples of one validation. Labelled samples are used once at most.
static int64_t validation_samples(const Trainer *t) {
    int64_t all = dataset_whole_windows(&t->val), asked = t->options.val_batches * t->samples;
    return asked < 0 || (t->val.labels && asked > all) ? all : asked;
}

// Returns the tokenizer file of the run: --tokenizer, or one that is stored next to the shards,
// those for training first; NULL if none exists. `path` (of `bytes` bytes) is space for its name.
static const char *find_tokenizer(const Trainer *t, bool validates, char *path, size_t bytes) {
    const Options *o = &t->options;
    const bool trains = o->steps || t->given.at[OPTION_INDEX_train];
    if (*o->tokenizer) { return o->tokenizer; }
    const char *file = trains ? tokenizer_find(o->train, path, bytes) : NULL;
    return file || !validates ? file : tokenizer_find(o->val, path, bytes);
}

// Refuses data made by several tokenizers, or by one that does not fit the model: training or
// evaluating on them would mean nothing.
static void check_tokenizers(const Trainer *t, const char *file) {
    const Options *o = &t->options;
    const Dataset *data[] = {&t->train, &t->val, &t->hellaswag};
    const char *names[] = {o->train, o->val, o->hellaswag};
    CommonTokenizer common;
    memset(&common, 0, sizeof common);
    common_tokenizer_add(&common, t->tokenizer.id, "the file", file);
    for (int i = 0; i < 3; i++) {
        common_tokenizer_add(&common, data[i]->tokenizer, data[i]->options.flag, names[i]);
    }
    common_tokenizer_check_model(&common, (int32_t)t->model.config.vocab);
    for (int i = 0; i < 3; i++) { common_tokenizer_check(&common, data[i], names[i]); }
}

static void setup_data(Trainer *t) {
    const Options *o = &t->options;
    const bool validates = o->val_every && (*o->val || t->given.at[OPTION_INDEX_val]);
    char path[1100];
    const char *file = find_tokenizer(t, validates, path, sizeof path);
    t->tokenizer = tokenizer_open(file, (int32_t)t->model.config.vocab);
    WindowKind windows = o->windows == WINDOWS_DOCUMENT ? WINDOWS_DOCUMENT : WINDOWS_CONTINUOUS;
    DatasetOptions train = {"--train",
                            o->seq_len,
                            (int32_t)t->model.config.vocab,
                            t->tokenizer.eot,
                            windows,
                            o->shuffle != 0,
                            (uint64_t)o->seed,
                            o->dp_unit == DP_DOCUMENT ? o->dp_windows_per_document : 0};
    DatasetOptions val = {"--val",
                          o->seq_len,
                          (int32_t)t->model.config.vocab,
                          t->tokenizer.eot,
                          WINDOWS_CONTINUOUS,
                          false,
                          0,
                          0};
    DatasetOptions hellaswag = val;
    hellaswag.flag = "--hellaswag";
    t->steps = o->steps;
    if (o->steps) { t->train = dataset_open(o->train, train); }
    if (validates) { t->val = dataset_open(o->val, val); }
    if (*o->hellaswag) { t->hellaswag = choices_open(o->hellaswag, hellaswag); }
    check_tokenizers(t, file);
    if (validates) {
        t->val_bytes = dataset_target_bytes(&t->val, &t->tokenizer, validation_samples(t));
    }
    if (o->steps < 0) { t->steps = dataset_whole_windows(&t->train) / t->samples; }
}

static void setup_executor(Trainer *t) {
    size_t unused[2];
    t->executor = executor_plan(&t->model, t->shape, &unused[0], &unused[1]);
    Program longest = make_program(t, t->most_samples, true);
    const int micro_batches = (int)max_i64(longest.micro_batches, t->evaluation.micro_batches);
    int64_t first, mine = max_i64(schedule_rows(&longest.rank[t->comm.rank], &first),
                                  schedule_rows(&t->evaluation.rank[t->comm.rank], &first));
    mine = max_i64(mine, t->cyclic.rule ? t->privacy.most_of_part : 0);
    // this rank may get more of a smaller batch than of the largest one
    mine = max_i64(mine, t->plan.placement.stages > 1 ? t->most_samples
                                                      : ceil_div(t->most_samples, t->comm.ranks));
    executor_allocate(&t->executor, &t->program.map, &t->store, &t->comm, &t->stream,
                      t->most_samples, mine, micro_batches);
    if (t->cyclic.rule) {
        overlap_open(&t->executor, &longest.rank[t->comm.rank], t->options.grad_clip,
                     t->options.cyclic_clip ? t->options.grad_clip / sqrt((double)t->model.storages)
                                            : 0);
    }
    // ranks that take turns have run every kind of schedule after N steps
    int actions = longest.rank[t->comm.rank].count;
    for (int step = 1; step < t->cyclic.N; step++) {
        actions = (int)max_i64(actions, step_schedule(t, step)->count);
    }
    t->profile = profile_make(&t->options, actions);
    program_free(&longest);
}
static void allocate_states(Trainer *t) {
    t->stream.workspace_bytes = executor_workspace_bytes(&t->model, &t->shape, t->stream.threads);
    t->stream.workspace = memory_take(MEMORY_BUFFERS, t->stream.workspace_bytes, "workspace");
    store_allocate(&t->store, &t->comm, &t->stream);
}
static void setup_states(Trainer *t) {
    memcpy(t->before, memory_taken, sizeof t->before);
    for (int i = 0; i < 2; i++) {
        disk_take_file(&t->files[i], t->options.offload_dir, t->file_bytes[i]);
    }
    allocate_states(t);
    setup_executor(t);
    t->windows = (int64_t *)checked_calloc(2 * (size_t)drawn_words(t), sizeof(int64_t), "samples");
}

// Fills the parameters: from a checkpoint, a model file, or the seed.
static void setup_weights(Trainer *t) {
    const Options *o = &t->options;
    if (o->resume) {
        char path[1100];
        checkpoint_resume(o->out, &t->store, &t->progress, path, sizeof path);
        t->first_step = t->metrics_start_step = t->progress.step;
        if (t->comm.rank == 0) { report_resumed(path, t->progress.step, t->steps); }
    } else if (t->model_begun.units) {
        checkpoint_begin(o->model, &t->store, &t->model_begun,
                         o->delink && o->delink_moments == DELINK_RESET, &t->progress);
    } else if (t->model_file) {
        model_file_load(t->model_file, &t->store, t->model_file_dtype);
    } else {
        store_initialise(&t->store, (uint64_t)o->seed);
    }
}
// Starts the privacy guarantee, after the weights are loaded: a resumed run continues with the same
// noise and key, and with the privacy that was already spent.
static void setup_promise(Trainer *t) {
    Privacy *p = &t->privacy;
    if (p->on && t->comm.rank == 0 && *t->options.out) { p->data = dataset_checksum(&t->train); }
    privacy_begin(p, &t->options, &t->given, t->progress.privacy, t->progress.step, &t->comm);
    t->end = min_i64(t->steps, privacy_allowed_steps(p));
    if (!p->on) { return; }
    t->store.noise.on = true;
    t->store.noise.deviation = (float)(p->sigma * p->clip);
    t->store.noise.scale = (float)(1.0 / (double)p->samples);
    memcpy(t->store.noise.key, p->key, sizeof p->key);
    if (t->comm.rank == 0) {
        privacy_print_start(stdout, p);
        printf("clipping   the arithmetic of norms leaves %.1f %% of the speed without privacy, at "
               "most; micro-steps of up to %" PRId64 " samples\n",
               100 * clip_speed_limit(&t->shape.clip, &t->model, (double)t->options.seq_len),
               t->shape.rows);
    }
}

// -------------------------------------------------------------------------------------------------
// Between steps: validation, a sample of text, checkpoints

static void validate(Trainer *t) {
    int64_t samples = validation_samples(t);
    Evaluation e =
        executor_evaluate(&t->executor, &t->evaluation, &t->val, samples, t->progress.step);
    if (t->comm.rank) { return; }
    double loss = e.loss / (double)max_i64(e.targets, 1), bits = NAN, accuracy = NAN;
    if (t->val_bytes > 0) { bits = e.loss / log(2.0) / (double)t->val_bytes; }
    if (t->val.labels) { accuracy = (double)e.right / (double)samples; }
    report_validation(t->progress.step, loss, bits, accuracy,
                      t->privacy.on ? privacy_epsilon(&t->privacy, t->progress.step).high
                                    : (double)NAN,
                      e.targets, &t->bar, &t->log);
}

static void score_hellaswag(Trainer *t) {
    int64_t rows = dataset_whole_windows(&t->hellaswag), examples = rows / CHOICES;
    Evaluation e =
        executor_evaluate(&t->executor, &t->evaluation, &t->hellaswag, rows, t->progress.step);
    if (t->comm.rank == 0) {
        report_choices(t->progress.step, e.right, examples, &t->bar, &t->log);
    }
}

// All ranks call this and compute the same text; rank 0 prints it.
static void print_sample(Trainer *t) {
    const Options *o = &t->options;
    int32_t *text = (int32_t *)checked_malloc((size_t)o->sample_tokens * sizeof(int32_t), "sample");
    Draws draws = {o->temperature, (uint64_t)o->seed ^ 0x67656e6572617465u,
                   (uint64_t)t->progress.step};
    executor_generate(&t->executor, &t->plan.placement, (int32_t)max_i64(t->tokenizer.eot, 0), text,
                      o->sample_tokens, draws);
    if (t->comm.rank == 0) {
        progress_break(&t->bar);
        printf("--- sample at step %" PRId64 " ---\n", t->progress.step);
        for (int64_t i = 0; i < o->sample_tokens; i++) {
            tokenizer_print(&t->tokenizer, text[i], stdout);
        }
        printf("\n---\n");
    }
    free(text);
}

static void save_checkpoint(Trainer *t) {
    char path[1100];
    privacy_history(&t->privacy, t->progress.step, t->progress.privacy);
    privacy_sync(&t->privacy);
    bool saved = checkpoint_save(t->options.out, &t->store, &t->progress, t->options.keep, t->flags,
                                 path, sizeof path);
    t->save_failed |= !saved;
    if (saved && t->comm.rank == 0) { report_checkpoint(t->progress.step, path, &t->bar, &t->log); }
}

// Does what follows the update number `step`: validation, a sample of text, a checkpoint. A resumed
// run did this before it was stopped, so it repeats only what is due after the last step. No text
// is sampled before the first step, unless the run has no steps. Messages and copies made here are
// not counted as traffic of the steps.
static void between_steps(Trainer *t) {
    int64_t step = t->progress.step, sent[COMM_KINDS][LINK_KINDS], moved = t->store.moved[0];
    bool last = step >= t->end, fresh = !t->options.resume || step > t->first_step;
    bool validates = (fresh || last) && due(t->options.val_every, step, last);
    bool samples = last || (fresh && step > 0);
    samples = samples && due(t->options.sample_every, step, last);
    if (validates || samples) { store_wait_all(&t->store); }
    memcpy(sent, t->comm.bytes, sizeof sent);
    if (validates && t->val.tokens) { validate(t); }
    if (validates && *t->options.hellaswag) { score_hellaswag(t); }
    if (samples) { print_sample(t); }
    memcpy(t->comm.bytes, sent, sizeof sent);
    t->store.moved[0] = moved;
    bool save = due(t->options.save_every, step, last) || (t->stopping && *t->options.out);
    if (save && step > t->first_step) { save_checkpoint(t); }
}

// -------------------------------------------------------------------------------------------------
// Delinking: from shared blocks to separate ones, between two steps.
// Everything that works on the states is made again: the plan of the store, the schedules, the
// executor.

static bool delink_due(const Trainer *t) {
    const Options *o = &t->options;
    return share_is(t->model.share) && options_switches(o) && t->progress.step >= o->delink_at;
}
// Shrinks the files on disk to what the new model needs, and frees the other model's file.
static void give_back_files(Trainer *t) {
    const int mine = t->number;
    disk_free_file(&t->files[!mine]);
    disk_cut_file(&t->files[mine], store_disk_bytes(&t->store));
    t->file_bytes[!mine] = 0;
    t->file_bytes[mine] = t->predicted.disk = store_disk_bytes(&t->store);
}
// Frees everything on the device, then allocates it again. In between, the states are on the host
// or on disk.
static void delink(Trainer *t) {
    const GptModel shared = t->model;
    const Offload offload = t->offload;
    const int64_t moments = t->options.delink_moments;
    Store before = t->store;
    store_wait_all(&before);
    ops_wait(&t->stream);
    executor_free(&t->executor);
    program_free(&t->program);
    program_free(&t->evaluation);
    before.model = before.layout.model = &shared;
    before.policy.offload = offload.host ? &offload : NULL;
    const size_t leaves = delink_host_bytes(&before, moments);
    float **packed = delink_pack(&before, moments);
    comm_share_none(&t->comm);
    store_leave_states(&before);
    ops_free(t->stream.workspace);
    memcpy(memory_taken, t->before, sizeof memory_taken);
    t->number++;
    plan_model(t, gpt_model(shared.config), leaves);
    store_join(&t->store, &t->comm);
    RunFacts facts = run_facts(t);
    predict(&facts);
    const size_t passing = memory_on_host;
    allocate_states(t);
    delink_states(&t->store, &before, packed, moments, &t->progress);
    store_free(&before);
    free(offload.host);
    free(offload.disk);
    memory_on_host -= passing;
    give_back_files(t);
    setup_executor(t);
    if (t->comm.rank == 0) { report_delink(&facts, t->progress.step, &t->bar, &t->log); }
    store_wait_all(&t->store);
    comm_reset_counters(&t->comm);
    memset(&t->spent, 0, sizeof t->spent);
    t->metrics_start_step = t->progress.step;
}

// -------------------------------------------------------------------------------------------------
// The recipe

static void start(Trainer *t, int argc, char **argv) {
    memset(t, 0, sizeof *t);
    t->argc = argc;
    t->argv = argv;
    comm_start(&t->comm, &t->argc, &t->argv);
    if (options_ask_help(t->argc, t->argv)) {
        if (t->comm.rank == 0) { options_print_help(stdout); }
        comm_end(&t->comm);
        exit(EXIT_DONE);
    }
    options_parse(&t->options, &t->given, t->argc, t->argv);
    if (t->comm.rank == 0) { outputs_check(&t->options); }
    comm_place(&t->comm, (int)t->options.ranks_per_node);
    t->comm.timeout_s = t->options.watchdog;
    t->stream.threads = comm_bind_to_cores(&t->comm, t->options.threads, NULL);
    t->stream.progress = comm_progress;
    for (int i = 1, n = 0; i < t->argc && n < (int)sizeof t->flags; i++) {
        n += snprintf(t->flags + n, sizeof t->flags - (size_t)n, "%s%s", i > 1 ? " " : "",
                      t->argv[i]);
    }
    if (*t->options.out && t->comm.rank == 0) {
        snprintf(t->stop_file, sizeof t->stop_file, "%s/stop", t->options.out);
    }
    for (char *c = t->flags; *c; c++) { *c = *c < ' ' ? ' ' : *c; } // one line in the manifest
}

static void plan(Trainer *t) {
    setup_ranks(t);
    setup_model(t);
    setup_stages(t);
    setup_batch(t);
    if (!t->options.dry_run && !t->options.show_schedule) { setup_data(t); }
    setup_privacy(t);
    setup_store(t);
    setup_schedule(t);
    if (!t->cluster.nodes) { setup_messages(t); }
    find_rates(&t->rates, &t->cluster, &t->stream, &t->comm, &t->store.world, t->dtype);
    setup_offload(t);
    RunFacts facts = run_facts(t);
    if (!t->privacy.on && !t->cluster.nodes && memory_fits(&facts)) {
        time_units(&t->rates.units, &t->model, &t->shape, t->rates.flops_per_s, &t->stream);
    }
    setup_disk_again(t);
    forecast_run(t);
    if (spill_to_disk(t)) { forecast_run(t); }
    facts = run_facts(t); // plans may have changed
    check_budgets(&facts, &t->needs);
}

// Runs the modes that only print. Returns true if the run was in such a mode.
static bool print_and_stop(Trainer *t) {
    const Options *o = &t->options;
    if (!options_only_prints(o)) { return false; }
    if (o->plan && !*o->profile) {
        setup_ranks(t);
        setup_model(t);
        plan_run(&t->options, &t->given, &t->model, t->dtype, &t->cluster, &t->comm, &t->stream,
                 &t->rates, &t->plan.depth);
        return true;
    }
    if (o->compat || *o->dp_account || o->plan) {
        if (t->comm.rank) { return true; }
        if (o->compat) { options_print_compat(stdout); }
        if (o->plan && !o->compat) { planner_main(stdout, o, &t->given); }
        if (!o->plan && !o->compat) {
            account_answer(stdout, o->dp_account, o->dp_accountant == DP_RDP,
                           o->dp_neighbours == DP_REPLACE_ONE, o->json);
        }
        return true;
    }
    plan(t);
    RunFacts facts = run_facts(t);
    if (t->comm.rank) { return true; }
    if (o->show_schedule) {
        show_schedule(&facts);
    } else if (o->json) {
        print_start_json(&facts);
    } else {
        print_start(&facts);
    }
    return true;
}

static void prepare(Trainer *t) {
    plan(t);
    RunFacts facts = run_facts(t);
    if (t->comm.rank == 0) { print_start(&facts); }
    check_memory(&facts);
    if (*t->options.out && t->comm.rank == 0) {
        out_folder_prepare(t->options.out, t->options.resume != 0);
    }
    t->log = log_open(t->comm.rank == 0 ? t->options.log : "", t->options.resume != 0);
    comm_barrier(&t->comm);
    matmuls_choose(&t->matmuls, t->options.out, t->options.resume, &t->model, &t->shape,
                   t->rates.flops_per_s, &t->stream, &t->comm);
    t->progress.matmuls = &t->matmuls;
    setup_states(t);
    setup_weights(t);
    setup_promise(t);
    store_wait_all(&t->store);
    TextBuffer line = {NULL, 0, 0};
    if (t->comm.rank == 0) {
        json_add_start(&facts, &line);
        log_line(&t->log, &line);
    }
    ProgressBar bar = {output_is_terminal(), false, t->end, t->first_step, 0, 0};
    t->bar = bar;
    t->energy = energy_meter("/sys/class/powercap");
    comm_reset_counters(&t->comm);
}

static void train(Trainer *t) {
    if (t->cyclic.rule) { t->executor.overlap->first_step = t->first_step; }
    between_steps(t);
    while (t->progress.step < t->end && !t->stopping) {
        if (delink_due(t)) { delink(t); }
        train_step(t);
        between_steps(t);
    }
    if (t->stopping && *t->stop_file && unlink(t->stop_file) && errno != ENOENT) {
        fprintf(stderr, "warning: cannot remove %s, which stops each run: %s\n", t->stop_file,
                strerror(errno));
    }
}

static int finish(Trainer *t) {
    store_wait_all(&t->store);
    profile_report(&t->profile, &t->comm, step_program(t, t->progress.step - 1), t->options.trace,
                   &t->bar, &t->log);
    RunFacts facts = run_facts(t);
    report_end(&facts, t->progress.step, t->progress.step - t->metrics_start_step, t->spent,
               energy_joules(&t->energy), &t->bar, &t->log);
    if (*t->options.export_file) {
        int error = model_file_write(t->options.export_file, &t->store);
        if (error) {
            fprintf(stderr, "train_gpt: cannot write %s: %s\n", t->options.export_file,
                    strerror(error));
            t->save_failed = true;
        }
    }
    if (t->comm.rank == 0) { privacy_print_statement(stdout, &t->privacy, t->progress.step); }
    privacy_end(&t->privacy, &t->options);
    noise_wipe(t->store.noise.key, sizeof t->store.noise.key);
    if (t->stopping && t->progress.step < t->end && t->comm.rank == 0) {
        print_resume_command(t->progress.step, t->comm.ranks, t->argc, t->argv,
                             t->options.resume != 0);
    }
    return comm_agree_max(&t->comm, t->save_failed || t->log.failed) ? EXIT_RESOURCES : EXIT_DONE;
}

int main(int argc, char **argv) {
    static Trainer trainer; // static: too large for some stacks
    Trainer *t = &trainer;
    int code = EXIT_DONE;
    start(t, argc, argv);
    if (!print_and_stop(t)) {
        prepare(t);
        catch_signals(t);
        train(t);
        code = finish(t);
    }
    comm_end(&t->comm);
    return code;
}
