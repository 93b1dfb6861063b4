// train_gpt: pretrains GPT models. One program, launched with  mpirun -np RANKS ./train_gpt [--flag value ...]
//
// Reading order: this file from the bottom (main is the recipe) to the top; then
//   options.h     every flag, once                          base.h        dying with a message, random numbers, checksums
//   gpt.h         the model: units, storages, tensors       ops.h         the tensor operations; ops_cpu.h does them
//   quantize.h    numbers in 8 or 4 bits for messages       layout.h      which ranks hold what (zero.h's)
//   schedule.h    who computes what, when, as data          zero.h        where states live and how they travel (the store)
//   executor.h    runs a schedule                           comm.h        messages between ranks; group.h: who takes part
//   dataloader.h  shards -> samples                         checkpoint.h  models and training states on disk
//   report.h      predictions, log, progress                profile.h     where the time of some steps goes
//   dp.h          clips each sample's gradient              privacy.h     what a private run promises
//   noise.h       numbers that nobody can guess             accountant.h  what private steps give away
//   pipeline.h    schedules of stages                       planner.h     which stages (plan.h: what they cost; json.h)
// Includes go down this list only. train_gpt.cu brings the GPU's operations and includes this file.
#ifndef OPS_IMPLEMENTATION // train_gpt.cu brings its own
#include "comm.h"
#include "ops_cpu.h"
// Makes the program's collectives, over up to `elements` fp32 elements or so many bytes of records, and messages possible: MPI reaches the
// processor's memory.
static void transport_open(Comm *c, Stream *s, DType wire, int64_t elements, size_t records, const CommTraffic *traffic) {
    size_t bytes = comm_staging_bytes(&c->everyone, wire, elements, COMM_STAGING_BYTES);
    (void)s, (void)records, (void)traffic;
    comm_allocate(c, bytes ? memory_take(MEMORY_BUFFERS, bytes, "messages") : NULL, bytes);
}
#endif
#include "privacy.h"
#include "profile.h"
#include "report.h"

#include <signal.h> // graceful stop

typedef struct {
    Options options;
    OptionsGiven given;
    int argc;
    char **argv;
    // who and where
    Comm comm;
    Stream stream;
    Rates rates;
    Cluster cluster;     // --cluster; 0 x 0: there is none
    Group cluster_ranks; // of it
    const Group *ranks;  // all that the plan is for: of the run, or of the cluster
    // what
    GptModel model;
    DType dtype;
    const char *model_file; // NULL: random initial weights
    DType model_file_dtype;
    Dataset train, val, hellaswag;
    Tokenizer tokenizer;
    int64_t val_bytes; // that one validation's targets stand for; 0: not known
    // how
    int64_t samples, most_samples, rows, steps; // per step over all ranks, expected and at most; per micro-step of this rank at most; of the run
    Privacy privacy;                            // of a private run
    ExecutorShape shape;                        // of micro-steps
    PipelinePlan plan;                          // stages of units on ranks
    const Stage *stage;                         // this rank's
    Program program, evaluation;                // schedules of a training step (a private run's is made anew for each) and of one validation batch
    Prediction predicted;
    // with what
    Store store;
    Executor executor;
    int64_t *windows; // [most_samples + 1] of the training data that a private step takes; last, how many
    // where it stands
    Progress progress;
    int64_t first_step; // 0, or where a resumed run began
    int64_t end;        // of the run: its steps, or fewer where a private one has spent all it may
    Log log;
    ProgressBar bar;
    char flags[8192];     // as given, for the manifest
    char stop_file[1100]; // OUT/stop, which rank 0 looks for; "" elsewhere
    Spent spent;
    EnergyMeter energy;
    Profile profile;
    bool stopping, save_failed;
} Trainer;

// ---------------------------------------------------------------------------------------------------------------------
// Stopping gracefully: SIGUSR1 to mpirun, SIGTERM to any rank, or a file OUT/stop. The ranks agree in each step, before its
// updates begin to travel, and stop after it.
static volatile sig_atomic_t stop_requested;
static const Trainer *signalled; // what a handler may describe
static void request_stop(int signal_number) {
    stop_requested = 1;
    if (signal_number != SIGTERM) { return; } // every rank gets the others
    SignalText t = {"", 0};
    signal_text_add(&t, "note: rank "), signal_text_add_int(&t, signalled->comm.rank), signal_text_add(&t, ": SIGTERM in ");
    executor_describe(&signalled->executor, &t);
    signal_text_add(&t, ", waiting for "), comm_describe_waiting(&signalled->comm, &t);
    signal_text_add(&t, "; stopping after this step\n");
    signal_text_write(&t);
}
static void catch_signals(const Trainer *t) {
    signalled = t;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = request_stop;
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}
static bool asked_to_stop(const Trainer *t) { return stop_requested || (*t->stop_file && !access(t->stop_file, F_OK)); }

// ---------------------------------------------------------------------------------------------------------------------
// Setting up

static void setup_model(Trainer *t) {
    const Options *o = &t->options;
    GptConfig config;
    t->dtype = o->dtype ? DTYPE_BF16 : DTYPE_FP32;
    if (!gpt_config_from_descriptor(&config, o->model, o->seq_len)) {
        t->model_file = o->model;
        config = model_file_config(o->model, &t->model_file_dtype);
        if (!t->given.at[OPTION_INDEX_dtype]) { t->dtype = t->model_file_dtype; }
    }
    if (o->stochastic_rounding && t->dtype == DTYPE_FP32) {
        die(EXIT_INPUT, "give --dtype bf16", "--stochastic-rounding rounds bf16 parameters, and these are fp32");
    }
    if (o->seq_len > config.max_seq_len) {
        die(EXIT_INPUT, "choose a smaller --seq-len", "--seq-len %" PRId64 " is more than this model's %" PRId64 " positions", o->seq_len, config.max_seq_len);
    }
    t->model = gpt_model(config);
    ops_open(&t->stream, t->comm.local_rank, t->dtype);
}

// Whom the plan is for.
static void setup_ranks(Trainer *t) {
    t->cluster = cluster_parse(t->options.cluster);
    t->ranks = &t->comm.everyone;
    if (t->cluster.nodes) { t->cluster_ranks = group_cluster(t->cluster.nodes, t->cluster.ranks), t->ranks = &t->cluster_ranks; }
}

// Which units each rank computes. Of one stage all.
static void setup_stages(Trainer *t) {
    const Options *o = &t->options;
    PipelinePlan *p = &t->plan;
    p->depth = INT64_MAX;
    p->placement = options_plans(o) ? plan_run(&t->options, &t->given, &t->model, t->dtype, &t->cluster, &t->comm, &t->stream, &p->depth)
                                    : pipeline_placement(o->pipeline, t->model.units, t->ranks->n);
    p->kind = (PipelineKind)o->pipeline_schedule, p->warmup = (Warmup)o->pipeline_warmup, p->recompute = o->recompute == RECOMPUTE_BLOCK;
    t->shape.recompute = p->recompute, t->shape.limits = limits_of_one();
    t->stage = &p->placement.stage[placement_stage_of_rank(&p->placement, t->ranks->me)];
    t->shape.first = t->stage->first_unit, t->shape.end = t->stage->first_unit + t->stage->units;
}

// Samples of a step and of a micro-batch. --batch-tokens 0 stands for one micro-step of every rank, or as many as --micro-batches.
static void setup_batch(Trainer *t) {
    const Options *o = &t->options;
    const bool whole = t->plan.placement.stages > 1 || o->micro_batches; // --micro-batch is of all of a stage's ranks
    int64_t micro = whole ? o->micro_batch : o->micro_batch * t->ranks->n, tokens = micro * o->seq_len * max_i64(1, o->micro_batches);
    if (o->batch_tokens && o->micro_batches && o->batch_tokens != tokens) {
        die(EXIT_INPUT, "leave one of them out", "--batch-tokens %" PRId64 " is not --micro-batches x --micro-batch x --seq-len, %" PRId64, o->batch_tokens,
            tokens);
    }
    tokens = o->batch_tokens ? o->batch_tokens : tokens;
    if (tokens % o->seq_len) {
        die(EXIT_INPUT, "a step is whole samples", "--batch-tokens %" PRId64 " is not a multiple of --seq-len %" PRId64, tokens, o->seq_len);
    }
    t->samples = t->most_samples = tokens / o->seq_len;
    t->plan.micro_rows = min_i64(micro, t->samples), t->plan.micro_batches = (int)min_i64(ceil_div(t->samples, micro), SCHEDULE_MAX);
    t->shape.dtype = t->dtype, t->shape.rows = ceil_div(t->plan.micro_rows, t->stage->replicas), t->shape.T = o->seq_len, t->shape.logits = LOGITS_PLENTY;
    gpt_work_check(&t->model.config, t->shape.rows, o->seq_len);
}

// A private run draws each step's samples: then there may be more of them than a step expects. The data are not there for --dry-run.
static void setup_privacy(Trainer *t) {
    const Options *o = &t->options;
    if (!o->steps) { return; } // nothing is learnt
    t->privacy = privacy_plan(o, &t->given, t->train.windows, t->samples, t->steps, &t->comm);
    if (!t->privacy.on) { return; }
    t->most_samples = t->privacy.most;
    t->shape.clip = clip_policy(&t->model, o->dp_clip, o->dp_clip_style != DP_UNIT, (ClipFunction)o->dp_clip_function);
    bool often = o->zero > 1 && t->ranks->n > 1;
    t->shape.clip.fresh = often || t->most_samples <= t->ranks->n;
    const double whole[4] = {16, 8, 4, 0}; // bytes of a parameter's states that ZeRO leaves on every rank
    const double states = (double)t->model.parameters * (whole[o->zero] + (16 - whole[o->zero]) / t->ranks->n);
    executor_shorten(&t->model, &t->shape, states, often, t->stream.threads);
}
static void setup_store(Trainer *t) {
    const Options *o = &t->options;
    const bool accumulates = t->plan.placement.stages > 1 ? t->plan.micro_batches > 1 : ceil_div(t->most_samples, t->ranks->n) > t->shape.rows;
    ZeroPolicy policy = zero_policy(o, accumulates, t->shape.clip.again);
    t->store = store_plan(&t->model, t->ranks, &t->plan.placement, policy, t->dtype, (DType)o->reduce_dtype, o->optimizer == OPTIMIZER_ADAMW);
    t->store.by_chance = o->stochastic_rounding, t->store.seed = (uint64_t)o->seed;
}
// The whole job, of so many samples. Of --cluster one rank stands for all, which do alike: one that has most samples.
static Program make_program(const Trainer *t, int64_t samples, bool training) {
    const bool pipeline = t->plan.placement.stages > 1;
    int alike = t->cluster.nodes && !pipeline ? t->ranks->n : 1;
    Program p;
    memset(&p, 0, sizeof p);
    p.map = unit_map(&t->model, &t->store.policy, &t->plan.placement, t->shape.clip.on);
    p.ranks = t->ranks->n / alike;
    p.rank = (Schedule *)checked_calloc((size_t)p.ranks, sizeof(Schedule), "schedules");
    int64_t mine = ceil_div(ceil_div(samples, alike), p.ranks), rows = t->shape.rows;
    if (t->shape.clip.on) { rows = max_i64(1, ceil_div(mine, max_i64(1, ceil_div(mine, rows)))); } // of batches of any size: equal parts are faster
    if (pipeline) {
        schedule_pipeline(&p, &t->plan, samples, training);
    } else {
        schedule_sequential(&p, ceil_div(samples, alike), rows, training);
    }
    if (training && t->options.recompute == RECOMPUTE_BLOCK) { schedule_lower_recompute(&p); }
    if (training && t->shape.clip.flat) { schedule_lower_clip(&p); }
    zero_lower(&p, &t->store.policy, training);
    return p;
}
static void check_program(const Program *p) {
    char error[400];
    if (!schedule_validate(p, error, sizeof error)) { die(EXIT_INPUT, "this is a defect of train_gpt; please report it", "invalid schedule: %s", error); }
}
static void setup_schedule(Trainer *t) {
    t->program = make_program(t, t->samples, true);
    t->evaluation = make_program(t, t->samples, false);
    t->shape.limits = limits_of_both(t->program.limits[t->ranks->me % t->program.ranks], t->evaluation.limits[t->ranks->me % t->program.ranks]);
    check_program(&t->program);
    const int64_t extremes[] = {0, t->most_samples}; // what a private step may draw
    for (int i = 0; t->privacy.on && i < 2; i++) {
        Program p = make_program(t, extremes[i], true);
        check_program(&p), program_free(&p);
    }
}

static void setup_messages(Trainer *t) {
    int64_t most = 0;
    for (int s = 0; s < t->model.storages; s++) { most = max_i64(most, gpt_storage_elements(&t->model, s)); }
    CommTraffic traffic = executor_traffic(&t->model, &t->shape, &t->plan.placement, t->comm.rank, &t->program, &t->evaluation);
    transport_open(&t->comm, &t->stream, (DType)t->options.reduce_dtype, most, t->store.parcel_bytes, &traffic);
    free(traffic.peers);
    store_join(&t->store, &t->comm);
}

// What predictions and reports of the run are about.
static RunFacts run_facts(Trainer *t) {
    RunFacts facts = {&t->options, &t->model, &t->comm,          &t->cluster, t->ranks,        &t->program, &t->rates, &t->predicted,
                      &t->train,   &t->store, t->stream.threads, t->samples,  t->most_samples, t->steps,    t->shape,  &t->privacy};
    return facts;
}

// Samples of one validation (labelled ones once at most).
static int64_t validation_samples(const Trainer *t) {
    int64_t all = dataset_whole_windows(&t->val), asked = t->options.val_batches * t->samples;
    return asked < 0 || (t->val.labels && asked > all) ? all : asked;
}

static void setup_data(Trainer *t) {
    const Options *o = &t->options;
    char path[1100];
    bool trains = o->steps || t->given.at[OPTION_INDEX_train];
    const char *file = trains ? tokenizer_find(o->train, "_train", path, sizeof path) : tokenizer_find(o->val_every ? o->val : "", "_val", path, sizeof path);
    t->tokenizer = tokenizer_open(*o->tokenizer ? o->tokenizer : file, (int32_t)t->model.config.vocab);
    WindowKind windows = o->windows == WINDOWS_DOCUMENT ? WINDOWS_DOCUMENT : WINDOWS_CONTINUOUS;
    DatasetOptions train = {"--train",
                            o->seq_len,
                            (int32_t)t->model.config.vocab,
                            t->tokenizer.eot,
                            windows,
                            o->shuffle != 0,
                            (uint64_t)o->seed,
                            o->dp_unit == DP_DOCUMENT ? o->dp_windows_per_document : 0};
    DatasetOptions val = {"--val", o->seq_len, (int32_t)t->model.config.vocab, t->tokenizer.eot, WINDOWS_CONTINUOUS, false, 0, 0};
    t->steps = o->steps;
    if (o->steps) { t->train = dataset_open(o->train, train); }
    if (o->val_every) { t->val = dataset_open(o->val, val), t->val_bytes = dataset_target_bytes(&t->val, &t->tokenizer, validation_samples(t)); }
    DatasetOptions hellaswag = val;
    hellaswag.flag = "--hellaswag";
    if (*o->hellaswag) { t->hellaswag = choices_open(o->hellaswag, hellaswag); }
    if (o->steps < 0) { t->steps = dataset_whole_windows(&t->train) / t->samples; }
}

static void setup_states(Trainer *t) {
    size_t unused[2];
    t->stream.workspace_bytes = executor_workspace_bytes(&t->model, &t->shape, t->stream.threads);
    t->stream.workspace = memory_take(MEMORY_BUFFERS, t->stream.workspace_bytes, "workspace");
    store_allocate(&t->store, &t->comm, &t->stream);
    t->executor = executor_plan(&t->model, t->shape, &unused[0], &unused[1]);
    Program longest = make_program(t, t->most_samples, true);
    const int micro_batches = (int)max_i64(longest.micro_batches, t->evaluation.micro_batches);
    int64_t first, mine = max_i64(schedule_rows(&longest.rank[t->comm.rank], &first), schedule_rows(&t->evaluation.rank[t->comm.rank], &first));
    mine = max_i64(mine, ceil_div(t->most_samples, t->comm.ranks)); // a rank's part of fewer samples may be larger
    executor_allocate(&t->executor, &t->program.map, &t->store, &t->comm, &t->stream, t->most_samples, mine, micro_batches);
    t->profile = profile_make(&t->options, longest.rank[t->comm.rank].count);
    program_free(&longest);
    t->windows = (int64_t *)checked_calloc((size_t)t->most_samples + 1, sizeof(int64_t), "samples");
}

// Weights: from a checkpoint, a model file, or the seed.
static void setup_weights(Trainer *t) {
    const Options *o = &t->options;
    if (o->resume) {
        char path[1100];
        checkpoint_resume(o->out, &t->store, &t->progress, path, sizeof path);
        t->first_step = t->progress.step;
        if (t->comm.rank == 0) { printf("resumed from %s: step %" PRId64 "\n", path, t->progress.step); }
    } else if (t->model_file) {
        model_file_load(t->model_file, &t->store, t->model_file_dtype);
    } else {
        store_initialise(&t->store, (uint64_t)o->seed);
    }
}
// What a private run promises stands when the weights are there: a resumed one goes on with its noise, its key and what it has spent.
static void setup_promise(Trainer *t) {
    Privacy *p = &t->privacy;
    if (p->on && t->comm.rank == 0 && *t->options.out) { p->data = dataset_checksum(&t->train); }
    privacy_begin(p, &t->options, &t->given, t->progress.privacy, t->progress.step, &t->comm);
    t->end = min_i64(t->steps, privacy_allowed_steps(p));
    if (!p->on) { return; }
    t->store.noise.on = true, t->store.noise.deviation = (float)(p->sigma * p->clip), t->store.noise.scale = (float)(1.0 / (double)p->samples);
    memcpy(t->store.noise.key, p->key, sizeof p->key);
    if (t->comm.rank == 0) {
        privacy_print_start(stdout, p);
        printf("clipping   the arithmetic of norms leaves %.1f %% of the speed without privacy, at most; micro-steps of up to %" PRId64 " samples\n",
               100 * clip_speed_limit(&t->shape.clip, &t->model, (double)t->options.seq_len), t->shape.rows);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// One step

static void tell_step(Trainer *t, const Pass *pass, double loss, double norm, double lr, double seconds) {
    if (t->comm.rank) { return; }
    bool shown = !privacy_hides(&t->privacy);
    if (!shown) { seconds = privacy_rounded(t->spent.steps_s / (double)(t->progress.step - t->first_step)); }
    double tokens = (double)((t->privacy.on && shown ? pass->samples : t->samples) * t->options.seq_len), nobody = (double)NAN;
    double mfu = gpt_step_flops(&t->model, tokens, (double)t->options.seq_len) / seconds / (t->rates.peak_flops_per_s * t->comm.ranks);
    StepFacts facts = {t->progress.step,
                       shown ? loss : nobody,
                       shown ? norm : nobody,
                       lr,
                       seconds,
                       tokens,
                       mfu,
                       shown ? energy_joules(&t->energy) : nobody,
                       shown ? pass->windows : NULL,
                       pass->samples};
    report_step(&facts, &t->bar, &t->log);
}

// Why this update must not be made, or NULL.
static const char *reason_to_skip(Trainer *t, double loss, double norm) {
    if (t->privacy.on) { return isfinite(norm) ? NULL : "gradient norm is not finite"; } // with its noise: nothing that depends on the samples more
    if (!isfinite(loss) || !isfinite(norm)) { return "loss or gradient norm is not finite"; }
    double loss_z = outlier_z(&t->progress.loss, loss), norm_z = outlier_z(&t->progress.norm, norm);
    if (t->options.skip_loss_z > 0 && loss_z > t->options.skip_loss_z) { return "loss is an outlier"; }
    if (t->options.skip_grad_z > 0 && norm_z > t->options.skip_grad_z) { return "gradient norm is an outlier"; }
    return NULL;
}

// The rest of a step's schedule: clips, and lets the optimizer update the parameters.
static void run_updates(Trainer *t, const Schedule *schedule, int *at, const Pass *pass, double lr, double norm) {
    const Options *o = &t->options;
    double scale = o->grad_clip > 0 && norm > o->grad_clip ? o->grad_clip / norm : 1.0;
    OptimizerStep optimizer = {(float)lr, (float)o->beta1, (float)o->beta2, (float)o->eps, (float)o->weight_decay, (float)o->momentum, (float)scale, 0, {0, 0}};
    executor_run(&t->executor, schedule, at, pass, &optimizer, t->progress.step, &norm);
    t->progress.updates++;
}

// The samples that a private step draws, and its schedule. Rank 0 draws for all: logarithms may differ between machines.
static void draw_samples(Trainer *t, Pass *pass) {
    if (t->comm.rank == 0) {
        NoiseStream stream = {{0}, NOISE_SAMPLING, 0, (uint64_t)t->progress.step};
        memcpy(stream.key, t->privacy.key, sizeof stream.key);
        const double rate = (double)t->samples / (double)t->train.windows;
        t->windows[t->most_samples] = dataset_sample_poisson(&t->train, rate, t->most_samples, stream, t->windows);
        noise_wipe(&stream, sizeof stream);
    }
    comm_broadcast(&t->comm, t->windows, (size_t)(t->most_samples + 1) * sizeof *t->windows, 0);
    pass->windows = t->windows, pass->samples = t->windows[t->most_samples];
    program_free(&t->program);
    t->program = make_program(t, pass->samples, true);
}
// The loss of a step: the mean over its targets, or, where each sample's mean counts, over its samples.
static double step_loss(const Trainer *t, const Pass *pass, double sum, int64_t targets) {
    if (!t->privacy.on) { return sum / (double)max_i64(targets, 1); }
    double mean = 0;
    for (int64_t i = 0; i < pass->samples; i++) { mean += pass->sample_losses[i] / (double)max_i64(dataset_window_targets(pass->data, pass->windows[i]), 1); }
    return mean / (double)pass->samples;
}

static void train_step(Trainer *t) {
    double start = seconds_now(), waited = t->comm.waited_s, norm = 0, lr = options_learning_rate(&t->options, t->progress.step, t->steps);
    int64_t targets = t->privacy.on ? 0 : dataset_count_targets(&t->train, t->progress.position, t->samples);
    Pass pass = {&t->train, t->progress.position, NULL, t->samples, t->executor.losses, (float)(1.0 / (double)max_i64(targets, 1)), true, NULL};
    if (t->privacy.on) { privacy_note(&t->privacy, t->progress.step), draw_samples(t, &pass); }
    const Schedule *schedule = &t->program.rank[t->comm.rank];
    int at = 0;
    ops_range_begin("step", "", -1);
    profile_begin(&t->profile, &t->executor, t->progress.step + 1);
    executor_run(&t->executor, schedule, &at, &pass, NULL, t->progress.step, &norm);
    double look = seconds_now();
    t->stopping = asked_to_stop(t);
    t->spent.telling_s += seconds_now() - look;
    double loss = step_loss(t, &pass, executor_sum_losses(&t->executor, &t->program, &pass, &t->stopping), targets);
    const char *skip = reason_to_skip(t, loss, norm);
    if (!skip) {
        run_updates(t, schedule, &at, &pass, lr, norm);
    } else {
        t->executor.action = NULL; // the updates do not run
        store_skip_updates(&t->store);
        if (t->comm.rank == 0) {
            fprintf(stderr, "warning: step %" PRId64 ": update skipped: %s (loss %g, norm %g)\n", t->progress.step + 1, skip,
                    t->privacy.on ? (double)NAN : loss, norm);
        }
    }
    profile_end(&t->profile, &t->executor, schedule, at);
    ops_range_end();
    t->progress.step++;
    t->progress.position += t->samples;
    double seconds = seconds_now() - start;
    t->spent.steps_s += seconds, t->spent.waiting_s += t->comm.waited_s - waited;
    tell_step(t, &pass, loss, norm, lr, seconds);
    if (t->progress.step == t->profile.last) { profile_report(&t->profile, &t->comm, &t->program, t->options.trace, &t->bar, &t->log); }
    t->spent.telling_s += seconds_now() - start - seconds;
}

// ---------------------------------------------------------------------------------------------------------------------
// Between steps: validation, a sample of text, checkpoints

static void validate(Trainer *t) {
    int64_t samples = validation_samples(t);
    Evaluation e = executor_evaluate(&t->executor, &t->evaluation, &t->val, samples, t->progress.step);
    if (t->comm.rank) { return; }
    double loss = e.loss / (double)max_i64(e.targets, 1), bits = NAN, accuracy = NAN;
    if (t->val_bytes > 0) { bits = e.loss / log(2.0) / (double)t->val_bytes; }
    if (t->val.labels) { accuracy = (double)e.right / (double)samples; }
    report_validation(t->progress.step, loss, bits, accuracy, t->privacy.on ? privacy_epsilon(&t->privacy, t->progress.step).high : (double)NAN, e.targets,
                      &t->bar, &t->log);
}

static void score_hellaswag(Trainer *t) {
    int64_t rows = dataset_whole_windows(&t->hellaswag), examples = rows / CHOICES;
    Evaluation e = executor_evaluate(&t->executor, &t->evaluation, &t->hellaswag, rows, t->progress.step);
    if (t->comm.rank == 0) { report_choices(t->progress.step, e.right, examples, &t->bar, &t->log); }
}

// All ranks compute the same text; rank 0 prints it.
static void print_sample(Trainer *t) {
    const Options *o = &t->options;
    int32_t *text = (int32_t *)checked_malloc((size_t)o->sample_tokens * sizeof(int32_t), "sample");
    Draws draws = {o->temperature, (uint64_t)o->seed ^ 0x67656e6572617465u, (uint64_t)t->progress.step};
    executor_generate(&t->executor, &t->plan.placement, (int32_t)max_i64(t->tokenizer.eot, 0), text, o->sample_tokens, draws);
    if (t->comm.rank == 0) {
        progress_break(&t->bar), printf("--- sample at step %" PRId64 " ---\n", t->progress.step);
        for (int64_t i = 0; i < o->sample_tokens; i++) { tokenizer_print(&t->tokenizer, text[i], stdout); }
        printf("\n---\n");
    }
    free(text);
}

static void save_checkpoint(Trainer *t) {
    char path[1100];
    privacy_history(&t->privacy, t->progress.step, t->progress.privacy);
    privacy_settle(&t->privacy);
    bool saved = checkpoint_save(t->options.out, &t->store, &t->progress, t->options.keep, t->flags, path, sizeof path);
    t->save_failed |= !saved;
    if (saved && t->comm.rank == 0) { report_checkpoint(t->progress.step, path, &t->bar, &t->log); }
}

static bool due(int64_t every, int64_t step, bool last) { return every && (step % every == 0 || last); }

// What happens with the weights after `step` updates; a resumed run did it before it was stopped. What it sends is not of the steps.
static void between_steps(Trainer *t) {
    int64_t step = t->progress.step, sent[COMM_KINDS][LINK_KINDS];
    bool last = step == t->end, fresh = !t->options.resume || step > t->first_step;
    bool validates = (fresh || last) && due(t->options.val_every, step, last), samples = (fresh || last) && step && due(t->options.sample_every, step, last);
    if (validates || samples) { store_settle(&t->store); }
    memcpy(sent, t->comm.bytes, sizeof sent);
    if (validates) { validate(t); }
    if (validates && *t->options.hellaswag) { score_hellaswag(t); }
    if (samples) { print_sample(t); }
    memcpy(t->comm.bytes, sent, sizeof sent);
    bool save = due(t->options.save_every, step, last) || (t->stopping && *t->options.out);
    if (save && step > t->first_step) { save_checkpoint(t); }
}

// ---------------------------------------------------------------------------------------------------------------------
// The recipe

static void start(Trainer *t, int argc, char **argv) {
    memset(t, 0, sizeof *t);
    t->argc = argc, t->argv = argv;
    comm_start(&t->comm, &t->argc, &t->argv);
    if (options_ask_help(t->argc, t->argv)) {
        if (t->comm.rank == 0) { options_print_help(stdout); }
        comm_end(&t->comm), exit(EXIT_DONE);
    }
    options_parse(&t->options, &t->given, t->argc, t->argv);
    comm_place(&t->comm, (int)t->options.ranks_per_node);
    t->comm.timeout_s = t->options.watchdog;
    t->stream.threads = comm_bind_to_cores(&t->comm, t->options.threads);
    t->stream.progress = comm_progress;
    for (int i = 1, n = 0; i < t->argc && n < (int)sizeof t->flags; i++) {
        n += snprintf(t->flags + n, sizeof t->flags - (size_t)n, "%s%s", i > 1 ? " " : "", t->argv[i]);
    }
    if (*t->options.out && t->comm.rank == 0) { snprintf(t->stop_file, sizeof t->stop_file, "%s/stop", t->options.out); }
    for (char *c = t->flags; *c; c++) { *c = *c < ' ' ? ' ' : *c; } // one line of the manifest
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
    RunFacts facts = run_facts(t);
    if (!t->privacy.on && !t->cluster.nodes && memory_fits(&facts)) { time_units(&t->rates.units, &t->model, &t->shape, t->rates.flops_per_s, &t->stream); }
    predict(&facts);
}

// The modes that only print; true when there was one.
static bool print_and_stop(Trainer *t) {
    const Options *o = &t->options;
    if (!o->compat && !*o->dp_account && !o->dry_run && !o->show_schedule && !o->plan) { return false; }
    if (o->plan && !*o->profile) {
        setup_ranks(t), setup_model(t), plan_run(&t->options, &t->given, &t->model, t->dtype, &t->cluster, &t->comm, &t->stream, &t->plan.depth);
        return true;
    }
    if (o->compat || *o->dp_account || o->plan) {
        if (t->comm.rank) { return true; }
        if (o->compat) { options_print_compat(stdout); }
        if (o->plan && !o->compat) { planner_main(stdout, o, &t->given); }
        if (!o->plan && !o->compat) { account_answer(stdout, o->dp_account, o->dp_accountant == DP_RDP, o->dp_neighbours == DP_REPLACE_ONE, o->json); }
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
    if (t->comm.rank == 0) { print_start(&facts), check_writable("--export", t->options.export_file); }
    check_memory(&facts);
    if (*t->options.out && t->comm.rank == 0) { out_folder_prepare(t->options.out, t->options.resume != 0); }
    t->log = log_open(t->comm.rank == 0 ? t->options.log : "", t->options.resume != 0);
    comm_barrier(&t->comm);
    setup_states(t);
    setup_weights(t);
    setup_promise(t);
    store_settle(&t->store);
    TextBuffer line = {NULL, 0, 0};
    if (t->comm.rank == 0) { json_add_start(&facts, &line), log_line(&t->log, &line); }
    ProgressBar bar = {output_is_terminal(), false, t->end, t->first_step, 0, 0};
    t->bar = bar;
    t->energy = energy_meter("/sys/class/powercap");
    comm_reset_counters(&t->comm);
}

static void train(Trainer *t) {
    between_steps(t);
    while (t->progress.step < t->end && !t->stopping) {
        train_step(t);
        between_steps(t);
    }
    if (t->stopping && *t->stop_file) { unlink(t->stop_file); }
}

static int finish(Trainer *t) {
    store_settle(&t->store);
    profile_report(&t->profile, &t->comm, &t->program, t->options.trace, &t->bar, &t->log);
    RunFacts facts = run_facts(t);
    report_end(&facts, t->progress.step, t->progress.step - t->first_step, t->spent, energy_joules(&t->energy), &t->bar, &t->log);
    if (*t->options.export_file) {
        int error = model_file_write(t->options.export_file, &t->store);
        if (error) { fprintf(stderr, "train_gpt: cannot write %s: %s\n", t->options.export_file, strerror(error)), t->save_failed = true; }
    }
    if (t->comm.rank == 0) { privacy_print_statement(stdout, &t->privacy, t->progress.step); }
    privacy_end(&t->privacy, &t->options), noise_wipe(t->store.noise.key, sizeof t->store.noise.key);
    if (t->stopping && t->progress.step < t->end && t->comm.rank == 0) { print_resume_command(t->progress.step, t->comm.ranks, t->argc, t->argv); }
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
