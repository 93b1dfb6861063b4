// trainer.h: the state of a run (Trainer), and one training step. A step ends before the next one
// begins, or, where micro-batches are delayed against each other (cyclic.h), the next step begins
// within the step's window. train_gpt.c sets up the Trainer and calls train_step for each step.
#ifndef TRAINER_H
#define TRAINER_H

#include "engine/proof.h"
#include "engine/privacy.h"
#include "pseudo.h"
#include "engine/profile.h"
#include "engine/report.h"
#include <signal.h> // graceful stop

typedef struct {
    Options options;
    OptionsGiven given;
    int argc;
    char **argv;
    // ranks and devices
    Comm comm;
    Stream stream;
    Rates rates;
    Cluster cluster;     // --cluster; 0 x 0 nodes: not given
    Group cluster_ranks; // of the cluster
    const Group *ranks;  // all ranks that the plan is for: of the run, or of the cluster
    // model and data
    GptModel model;
    DType dtype;
    const char *model_file; // NULL: random initial weights
    GptModel model_begun;   // model of the checkpoint that the run starts from; 0 units: none
    DType model_file_dtype;
    Dataset train, val, hellaswag;
    Tokenizer tokenizer;
    int64_t val_bytes; // of text in one validation's targets; 0: unknown
    // plan
    // samples of a step over all ranks, expected and at most; steps of the run
    int64_t samples, most_samples, rows, steps;
    Privacy privacy;     // privacy.on: the run is private
    ExecutorShape shape; // of this rank's micro-steps
    PipelinePlan plan;   // stages of units on ranks
    const Stage *stage;  // this rank's
    CyclicPlan cyclic;   // rule CYCLIC_OFF: not cyclic
    P2p p2p;             // of the cyclic plan: what this rank stores and sends
    Offload offload;     // host NULL: nothing is offloaded
    // schedules of a training step (a private run makes it again for each step) and of one
    // validation batch
    Program program, evaluation;
    // schedule of the last requested step that differs from step 0, whose schedule is `program`
    // (cyclic_alike) ...
    Program window;
    int64_t window_step;         // ... and the number of that step
    Prediction predicted, later; // later: of the model after delinking
    Needs needs;                 // of both models
    // bytes of host memory that the process takes anyway; decides how much goes to disk
    int64_t resident;
    // additional bytes while the states of the previous model are converted to this one's
    int64_t passing;
    // the host cannot hold the states of both models, so all of the shared model's offloaded states
    // are on disk
    bool spilled;
    int number;            // of this model: 0, and 1 after delinking
    DiskFile files[2];     // [number]
    int64_t file_bytes[2]; // largest size that each file needs
    // memory
    Store store;
    Executor executor;
    // [2][drawn_words] samples that a private step drew from the training data (draw_samples), of
    // even and odd steps
    int64_t *windows;
    int64_t drawn[2]; // 1 + the step that each half of `windows` belongs to
    // progress
    Progress progress;
    MatmulChoices matmuls;       // matrix product algorithms of the device's library
    int64_t first_step;          // 0, or the step that a resumed run began with
    int64_t metrics_start_step;  // first step that counts in the final figures
    size_t before[MEMORY_KINDS]; // memory taken before the states were allocated
    // last step: that of the options, or an earlier one, where a private run has spent its whole
    // budget
    int64_t end;
    Log log;
    ProgressBar bar;
    char flags[8192];     // the command line, for the manifest
    char stop_file[1100]; // OUT/stop, which rank 0 looks for; "" on other ranks
    Spent spent;
    EnergyMeter energy;
    Profile profile;
    bool stopping, save_failed, warned_of_loss;
} Trainer;

// -------------------------------------------------------------------------------------------------
// Stopping gracefully: on SIGUSR1 to mpirun, SIGTERM to any rank, or a file OUT/stop. The ranks
// agree in each step, before its updates begin to travel, and stop after that step.
static volatile sig_atomic_t stop_requested;
static const Trainer *signalled; // what the signal handler describes
static inline void request_stop(int signal_number) {
    stop_requested = 1;
    if (signal_number != SIGTERM) { return; } // SIGUSR1 reaches every rank: no note
    SignalText t = {"", 0};
    signal_text_add(&t, "note: rank ");
    signal_text_add_int(&t, signalled->comm.rank);
    signal_text_add(&t, ": SIGTERM in ");
    executor_describe(&signalled->executor, &t);
    signal_text_add(&t, ", waiting for ");
    comm_describe_waiting(&signalled->comm, &t);
    signal_text_add(&t, "; stopping after this step\n");
    signal_text_write(&t);
}
static inline void catch_signals(const Trainer *t) {
    signalled = t;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = request_stop;
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}
static inline bool asked_to_stop(const Trainer *t) {
    return stop_requested || (*t->stop_file && !access(t->stop_file, F_OK));
}

// -------------------------------------------------------------------------------------------------
// Schedules

// Makes the program of a step, or of a validation batch, with `samples` samples. With --cluster and
// one stage it has a single rank, which stands for all: the one with the most samples.
static inline Program make_program(const Trainer *t, int64_t samples, bool training) {
    const bool pipeline = t->plan.placement.stages > 1;
    int alike = t->cluster.nodes && !pipeline ? t->ranks->n : 1;
    Program p;
    memset(&p, 0, sizeof p);
    p.map = unit_map(&t->model, &t->store.policy, &t->plan.placement, t->shape.clip.on);
    if (t->options.recompute == RECOMPUTE_BLOCK) {
        unit_map_recomputes(&p.map, &t->plan.placement);
    }
    p.ranks = t->ranks->n / alike;
    p.rank = (Schedule *)checked_calloc((size_t)p.ranks, sizeof(Schedule), "schedules");
    int64_t mine = ceil_div(ceil_div(samples, alike), p.ranks), rows = t->shape.rows;
    // batches vary in size: equal parts are faster
    if (t->shape.clip.on) { rows = max_i64(1, ceil_div(mine, max_i64(1, ceil_div(mine, rows)))); }
    if (t->cyclic.rule && training) {
        schedule_cyclic(&p, &t->cyclic, samples, 0);
        return p;
    }
    if (pipeline) {
        const PipelinePlan plan = pipeline_of_batch(&t->plan, samples);
        schedule_pipeline(&p, &plan, samples, training);
    } else {
        schedule_sequential(&p, ceil_div(samples, alike), rows, training);
    }
    if (training && t->options.recompute == RECOMPUTE_BLOCK) { schedule_lower_recompute(&p); }
    if (training && t->shape.clip.flat && !pipeline) { schedule_lower_clip(&p); }
    zero_lower(&p, &t->store.policy, training);
    if (training) { schedule_lower_stash(&p); }
    return p;
}

// Returns the program of a step: `program`, unless cyclic ranks take turns. The result is valid
// until the next call.
static inline const Program *step_program(Trainer *t, int64_t step) {
    if (!t->cyclic.rule || cyclic_alike(&t->cyclic, step, 0)) { return &t->program; }
    if (!t->window.rank || !cyclic_alike(&t->cyclic, step, t->window_step)) {
        cyclic_window_free(&t->window);
        t->window = cyclic_window(&t->program, &t->cyclic, step);
        t->window_step = step;
    }
    return &t->window;
}
static inline const Schedule *step_schedule(Trainer *t, int64_t step) {
    return &step_program(t, step)->rank[t->comm.rank];
}
static inline const Schedule *step_schedule_of(void *trainer, int64_t step) {
    return step_schedule((Trainer *)trainer, step);
}

// -------------------------------------------------------------------------------------------------
// One step

static inline double shown_loss(const Trainer *t, double loss) {
    return privacy_hides(&t->privacy) ? (double)NAN : loss;
}
// Returns the loss above which the run has a problem. Guessing has a loss of ln(vocabulary), and so
// has a model before its first step; a confident and wrong model has more. No run that learns has
// twice as much after its warm-up. The 1 is for vocabularies of a few tokens.
static inline double loss_limit(const Trainer *t) {
    return 2 * (1 + log((double)t->model.config.vocab));
}
// Warns of a high loss, once in a run. Must not be called if the loss is private.
static inline void warn_of_loss(Trainer *t, double loss) {
    const bool high = t->progress.step > t->options.warmup && loss > loss_limit(t);
    if (t->warned_of_loss || !(high || !isfinite(loss))) { return; }
    t->warned_of_loss = true;
    progress_break(&t->bar);
    fflush(stdout);
    fprintf(stderr,
            "warning: step %" PRId64
            ": the loss is %g, and guessing alone has ln(vocabulary), %.2f: "
            "the run diverges, or --model or the data are not what they should be; try a smaller "
            "--lr, a longer --warmup, a smaller --grad-clip (this is said once)\n",
            t->progress.step, loss, log((double)t->model.config.vocab));
}

static inline void trainer_report_step(Trainer *t, const Pass *pass, double loss, double norm,
                                       double lr, double seconds) {
    if (t->comm.rank) { return; }
    bool shown = !privacy_hides(&t->privacy);
    if (shown) { warn_of_loss(t, loss); }
    if (!shown) {
        seconds = privacy_rounded(t->spent.steps_s / (double)(t->progress.step - t->first_step));
    }
    double tokens =
               (double)((t->privacy.on && shown ? pass->samples : t->samples) * t->options.seq_len),
           nobody = (double)NAN;
    double mfu = gpt_step_flops(&t->model, tokens, (double)t->options.seq_len) / seconds /
                 (t->rates.peak_flops_per_s * t->comm.ranks);
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

// Returns why this update must not be made, or NULL.
static inline const char *reason_to_skip(Trainer *t, double loss, double norm) {
    // the norm includes noise; the loss, and anything else that depends on the samples, must not
    // decide
    if (t->privacy.on) { return isfinite(norm) ? NULL : "gradient norm is not finite"; }
    if (!isfinite(loss) || !isfinite(norm)) { return "loss or gradient norm is not finite"; }
    double loss_z = outlier_z(&t->progress.loss, loss), norm_z = outlier_z(&t->progress.norm, norm);
    if (t->options.skip_loss_z > 0 && loss_z > t->options.skip_loss_z) {
        return "loss is an outlier";
    }
    if (t->options.skip_grad_z > 0 && norm_z > t->options.skip_grad_z) {
        return "gradient norm is an outlier";
    }
    return NULL;
}

// Draws the samples of a private step: their windows, their number, and where each micro-batch
// begins. Rank 0 draws for all ranks, because logarithms may differ between machines. Every rank
// calls it.
static inline int64_t drawn_words(const Trainer *t) {
    return t->most_samples + 1 + t->privacy.parts + 1;
}
static inline void draw_samples(Trainer *t, int64_t step, Pass *pass) {
    const Privacy *p = &t->privacy;
    int64_t *windows = t->windows + (step & 1) * drawn_words(t), *count = windows + t->most_samples,
            *begins = count + 1;
    const bool known = t->drawn[step & 1] == step + 1;
    if (!known && t->comm.rank == 0) {
        NoiseStream stream = {{0}, NOISE_SAMPLING, 0, (uint64_t)step};
        memcpy(stream.key, p->key, sizeof stream.key);
        const double rate = (double)t->samples / (double)t->train.windows;
        *count = dataset_sample_poisson(&t->train, rate, t->most_samples, stream, windows);
        stream.part = 1;
        *count = dataset_split(windows, *count, p->parts, p->most_of_part, stream, begins);
        noise_wipe(&stream, sizeof stream);
    }
    if (!known) { comm_broadcast(&t->comm, windows, (size_t)drawn_words(t) * sizeof *windows, 0); }
    t->drawn[step & 1] = step + 1;
    pass->windows = windows;
    pass->samples = *count;
    pass->begins = p->parts > 1 ? begins : NULL;
}
// Returns the loss of a step: the mean over its targets, or, in private runs, the mean over its
// samples of each sample's mean.
static inline double step_loss(const Trainer *t, const Pass *pass, double sum, int64_t targets) {
    if (!t->privacy.on) { return sum / (double)max_i64(targets, 1); }
    double mean = 0;
    for (int64_t i = 0; i < pass->samples; i++) {
        mean += pass->sample_losses[i] /
                (double)max_i64(dataset_window_targets(pass->data, pass->windows[i]), 1);
    }
    return mean / (double)pass->samples;
}

// Returns the pass of the step that is `ahead` steps from the current one.
static inline Pass make_pass(Trainer *t, int ahead) {
    const int64_t first = t->progress.position + ahead * t->samples;
    int64_t targets =
        t->privacy.on || first < 0 ? 0 : dataset_count_targets(&t->train, first, t->samples);
    const int64_t host_row = ((t->progress.step + ahead) & 1) * t->executor.host_rows;
    Pass pass = {&t->train,
                 first,
                 NULL,
                 NULL,
                 t->samples,
                 t->executor.losses,
                 (float)(1.0 / (double)max_i64(targets, 1)),
                 true,
                 NULL,
                 host_row};
    return pass;
}
static inline OptimizerStep make_update(const Options *o, double lr, double norm) {
    double scale = o->grad_clip > 0 && norm > o->grad_clip ? o->grad_clip / norm : 1.0;
    OptimizerStep u = {(float)lr,
                       (float)o->beta1,
                       (float)o->beta2,
                       (float)o->eps,
                       (float)o->weight_decay,
                       (float)o->momentum,
                       (float)scale,
                       0,
                       round_to_nearest()};
    return u;
}
static inline bool due(int64_t every, int64_t step, bool last) {
    return every && (step % every == 0 || last);
}
// Does anything need all parameters of this step before later steps run?
static inline bool pauses_after(const Trainer *t, int64_t step) {
    const Options *o = &t->options;
    const bool last = step == t->end;
    return last || due(o->val_every, step, last) || due(o->sample_every, step, last) ||
           due(o->save_every, step, last);
}

// Runs the window of a cyclic step, in which the next step begins. Only rank 0 gets the loss and
// norm of the step.
static inline void run_window(Trainer *t, Pass *pass, double lr, double *loss, double *norm) {
    Pass passes[3] = {make_pass(t, -1), *pass, make_pass(t, 1)};
    if (t->privacy.on) { draw_samples(t, t->progress.step + 1, &passes[2]); }
    const int64_t step = t->progress.step;
    const StepStats stats = overlap_run_window(&t->executor, step_schedule_of, t, passes, step,
                                               pauses_after(t, step + 1), asked_to_stop(t),
                                               make_update(&t->options, lr, 0), &t->stopping);
    const int64_t counted =
        t->privacy.on ? pass->samples
                      : dataset_count_targets(&t->train, t->progress.position, t->samples);
    *loss = stats.loss / (double)max_i64(counted, 1);
    *norm = sqrt(exact_value(stats.squares));
    t->progress.updates += isfinite(*norm);
    if (t->comm.rank == 0 && !isfinite(*norm)) {
        fprintf(stderr,
                "warning: step %" PRId64
                ": gradients that are not finite made no update (loss %g, norm %g)\n",
                step + 1, shown_loss(t, *loss), *norm);
    }
}
// Ends a step with delayed updates (--offload-delay): the updates of the previous step have been
// made, its new parameters are received, and this step's gradient is kept.
static inline void keep_gradient(Trainer *t, const Schedule *schedule, int *at, const Pass *pass,
                                 double norm, bool skipped) {
    executor_run(&t->executor, schedule, at, pass, NULL, t->progress.step, NULL);
    t->progress.updates += t->store.pending;
    t->store.pending = !skipped;
    t->progress.pending_norm = norm;
}
// Runs a step completely, before the next one begins.
static inline void run_step(Trainer *t, Pass *pass, double lr, double *loss, double *norm) {
    int at = 0;
    const Schedule *schedule = &t->program.rank[t->comm.rank];
    const OptimizerStep delayed = make_update(&t->options, lr, t->progress.pending_norm);
    executor_run(&t->executor, schedule, &at, pass, &delayed, t->progress.step, norm);
    double look = seconds_now();
    t->stopping = asked_to_stop(t);
    t->spent.report_s += seconds_now() - look;
    const int64_t targets = dataset_count_targets(&t->train, t->progress.position, t->samples);
    *loss = step_loss(t, pass, executor_sum_losses(&t->executor, &t->program, pass, &t->stopping),
                      targets);
    const char *skip = reason_to_skip(t, *loss, *norm);
    if (store_delays(&t->store)) {
        keep_gradient(t, schedule, &at, pass, *norm, skip != NULL);
    } else if (!skip) {
        OptimizerStep update = make_update(&t->options, lr, *norm);
        executor_run(&t->executor, schedule, &at, pass, &update, t->progress.step, norm);
        t->progress.updates++;
    }
    if (!skip) { return; }
    t->executor.action = NULL; // no action is running: the updates are skipped
    store_skip_updates(&t->store);
    if (t->comm.rank == 0) {
        fprintf(stderr, "warning: step %" PRId64 ": update skipped: %s (loss %g, norm %g)\n",
                t->progress.step + 1, skip, shown_loss(t, *loss), *norm);
    }
}
static inline void train_step(Trainer *t) {
    double start = seconds_now(), waited = t->comm.waited_s, norm = 0, loss = 0;
    const double lr = options_learning_rate(&t->options, t->progress.step, t->steps) *
                      delink_rate(&t->options, &t->model, &t->progress);
    Pass pass = make_pass(t, 0);
    if (t->privacy.on) {
        privacy_note(&t->privacy, t->progress.step);
        draw_samples(t, t->progress.step, &pass);
    }
    if (t->privacy.on && !t->cyclic.rule) {
        program_free(&t->program);
        t->program = make_program(t, pass.samples, true);
    }
    ops_range_begin("step", "", -1);
    profile_begin(&t->profile, &t->executor, t->progress.step + 1);
    if (t->cyclic.rule) {
        run_window(t, &pass, lr, &loss, &norm);
    } else {
        run_step(t, &pass, lr, &loss, &norm);
    }
    const Program *program = step_program(t, t->progress.step);
    const Schedule *schedule = &program->rank[t->comm.rank];
    profile_end(&t->profile, &t->executor, schedule);
    ops_range_end();
    t->progress.step++;
    t->progress.position += t->samples;
    double seconds = seconds_now() - start;
    t->spent.steps_s += seconds;
    t->spent.waiting_s += t->comm.waited_s - waited;
    trainer_report_step(t, &pass, loss, norm, lr, seconds);
    if (t->progress.step == t->profile.last) {
        profile_report(&t->profile, &t->comm, program, t->options.trace, &t->bar, &t->log);
    }
    t->spent.report_s += seconds_now() - start - seconds;
}

#endif
