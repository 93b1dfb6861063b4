// trainer.h: a run: what changes while a plan is carried out, and one training step. A step ends
// before the next one begins, or, where micro-batches are delayed against each other (cyclic.h),
// the next step begins within the step's window. train_gpt.c opens the run and calls train_step for
// each step.
#ifndef TRAINER_H
#define TRAINER_H

#include "base/base.h"
#include "base/files.h"
#include "checkpoint/folders.h"
#include "checkpoint/manifest.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "comm/watchdog.h"
#include "cyclic.h"
#include "dataloader.h"
#include "executor/activations.h"
#include "executor/executor.h"
#include "executor/expert_loads.h"
#include "model/config.h"
#include "model/unit.h"
#include "ops/noise.h"
#include "ops/ops.h"
#include "options.h"
#include "plan/forecast.h"
#include "plan/plan.h"
#include "plan/system.h"
#include "privacy/privacy.h"
#include "pseudo.h"
#include "report/log.h"
#include "report/profile.h"
#include "report/report.h"
#include "run/privacy_ledger.h"
#include "schedule/cyclic_windows.h"
#include "schedule/schedule.h"
#include "state/disk.h"
#include "state/learning_rate.h"
#include "state/gather.h"
#include "state/planned.h"
#include "state/store.h"
#include "state/update.h"
#include "text/tokenizer.h"
#include <omp.h>    // threads that leave signals to this one
#include <signal.h> // graceful stop

// The data of a run.
typedef struct {
    Dataset train, val, hellaswag;
    Tokenizer tokenizer;
    int64_t val_bytes; // of text in one validation's targets; 0: unknown
} Data;
// Whether the run still learns, as rank 0 knows it. A checkpoint is good if a loss was computed
// from its weights that is finite: that of the next step or of an evaluation. In private runs,
// whose losses must not decide what is published, finite weights suffice.
typedef struct {
    int64_t skipped;     // updates in a row, the last ones
    const char *reason;  // of the last one
    int64_t good, saved; // steps: of the newest good checkpoint, and of the newest one; -1: none
    int64_t validated;   // step of the last evaluation with a finite loss; -1: none
    bool lost;           // the newest loss is not finite
    bool stuck;          // the newest updates, two or more, were skipped, the newest because its
                         // gradients are not finite
    bool bad;            // so the newest checkpoint is not good
} Health;
// What rank 0 reports while the run goes on.
typedef struct {
    Log log;
    Health health;
    Spent spent;
    PublicTime public_time; // of private runs
    EnergyMeter energy;
    int64_t start_step;  // first step that counts in the final figures
    bool warned_of_loss; // once in a run
} Journal;

// What is reported of a step.
typedef struct {
    int64_t step; // counted from 1; 0: none
    double loss, norm, lr, seconds;
    int64_t samples;
    const int64_t *windows; // [samples] of a private step, else NULL
    int64_t counted;        // in cyclic runs: what the loss is a mean over
    const char *skipped;    // why it made no update, or NULL
} StepReport;

typedef struct {
    const Plan *plan;
    Comm *comm;
    Stream *stream;
    const Data *data;
    Store store;       // of the plan, with its memory
    DiskFile files[2]; // of this model and of the delinked one, which come in turns
    Executor executor;
    Privacy privacy; // how much of the plan's promise is spent
    Progress progress;
    int64_t first_step; // 0, or the step that a resumed run began with
    // last step: that of the options, or an earlier one, where a private run has spent its whole
    // budget
    int64_t end;
    // [2][drawn_words] samples that a private step drew from the training data (draw_samples), of
    // even and odd steps
    int64_t *windows;
    int64_t drawn[2]; // 1 + the step that each half of `windows` belongs to
    // program of the last step that does not run the plan's: of a private step, whose samples are
    // drawn; or where cyclic ranks take turns (cyclic_alike); and the number of that step
    Program step_program;
    int64_t step_of_program;
    Profile profile;
    char stop_file[1100]; // OUT/stop, which rank 0 looks for; "" on other ranks
    bool stopping, save_failed;
    Journal journal;
    StepReport unreported; // the last step, if its statistics come in the next window (cyclic.h)
} Run;
static inline const Options *run_options(const Run *r) { return &r->plan->config->options; }

// -------------------------------------------------------------------------------------------------
// Stopping gracefully: on SIGUSR1 to mpirun, SIGTERM to any rank, or a file OUT/stop. The ranks
// agree in each step, before its updates begin to travel, and stop after that step.
static volatile sig_atomic_t stop_requested;
static const Run *signalled; // what the signal handler describes
static inline void request_stop(int signal_number) {
    stop_requested = 1;
    if (signal_number != SIGTERM) { return; } // SIGUSR1 reaches every rank: no note
    SignalText t = {"", 0};
    signal_text_print(&t, "note: rank %d: SIGTERM in ", signalled->comm->rank);
    executor_describe(&signalled->executor, &t);
    signal_text_add(&t, ", waiting for ");
    comm_describe_waiting(signalled->comm, &t);
    signal_text_add(&t, "; stopping after this step\n");
    signal_text_write(&t);
}
// The handler has a stack of its own. Products of oneDNN 2.6 keep other addresses in the register
// of the stack, so on the stack that this register names a handler would write over the heap. Such
// a stack belongs to one thread, so the other threads of the team leave the signals to it.
static inline void catch_signals(const Run *r) {
    static char stack[1 << 16];
    stack_t own = {};
    struct sigaction action = {};
    signalled = r;
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, NULL);
    sigemptyset(&action.sa_mask);
    sigaddset(&action.sa_mask, SIGUSR1);
    sigaddset(&action.sa_mask, SIGTERM);
#pragma omp parallel num_threads(r->stream->threads)
    if (omp_get_thread_num()) { pthread_sigmask(SIG_BLOCK, &action.sa_mask, NULL); }
    action.sa_handler = request_stop;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}
static inline bool asked_to_stop(const char *stop_file) {
    return stop_requested || (*stop_file && !access(stop_file, F_OK));
}

// -------------------------------------------------------------------------------------------------
// The program of a step

// Returns the program of a step: the plan's, unless a private step has drawn its samples (prepared
// by prepare_program), or cyclic ranks take turns. The result is valid until the next call.
static inline const Program *step_program(Run *r, int64_t step) {
    const CyclicPlan *cyclic = &r->plan->cyclic;
    if (!cyclic->rule && r->step_program.rank) { return &r->step_program; }
    if (!cyclic->rule || cyclic_alike(cyclic, step, 0)) { return &r->plan->program; }
    if (!r->step_program.rank || !cyclic_alike(cyclic, step, r->step_of_program)) {
        cyclic_window_free(&r->step_program);
        r->step_program = cyclic_window(&r->plan->program, cyclic, step);
        r->step_of_program = step;
    }
    return &r->step_program;
}
static inline const Schedule *step_schedule(Run *r, int64_t step) {
    return &step_program(r, step)->rank[r->comm->rank];
}
static inline const Schedule *step_schedule_of(void *run, int64_t step) {
    return step_schedule((Run *)run, step);
}

// -------------------------------------------------------------------------------------------------
// Reports of a step

static inline double shown_loss(const Privacy *privacy, double loss) {
    return privacy_hides(privacy) ? NAN : loss;
}
// Returns the loss above which the run has a problem. Guessing has a loss of ln(vocabulary), and so
// has a model before its first step; a confident and wrong model has more. No run that learns has
// twice as much after its warm-up. The 1 is for vocabularies of a few tokens.
static inline double loss_limit(int64_t vocab) { return 2 * (1 + log(vocab)); }
// Warns of a high loss, once in a run. Must not be called if the loss is private.
static inline void warn_of_loss(Journal *j, int64_t step, int64_t warmup, int64_t vocab,
                                double loss) {
    const bool high = step > warmup && loss > loss_limit(vocab);
    if (j->warned_of_loss || !(high || !isfinite(loss))) { return; }
    j->warned_of_loss = true;
    log_break(&j->log);
    fflush(stdout);
    fprintf(stderr,
            "warning: step %" PRId64
            ": the loss is %g, and guessing alone has ln(vocabulary), %.2f: "
            "the run diverges, or --model or the data are not what they should be; try a smaller "
            "--lr, a longer --warmup, a smaller --grad-clip (this is said once)\n",
            step, loss, log(vocab));
}

// Notes that a checkpoint is good: older ones may go.
static inline void health_found_good(const Run *r, Health *h, int64_t step) {
    h->good = step;
    checkpoints_prune(run_options(r)->out, step, run_options(r)->keep, step);
}
// Ends the program (EXIT_RESOURCES) because nothing is learnt any more. The checkpoint that no
// finite loss followed gets another name, so that a resume begins with the one before it.
__attribute__((noreturn)) static inline void health_give_up(const Run *r, const char *what) {
    const Health *h = &r->journal.health;
    const char *out = run_options(r)->out;
    Text from = text_of("begin again with"), bad = text_of("%s", "");
    if (h->bad && h->saved > h->good) {
        const Text path = checkpoint_folder(out, h->saved, "");
        const Text aside = checkpoint_folder(out, h->saved, ".diverged");
        if (!rename(path.at, aside.at)) {
            bad = text_of("; no loss after %s was finite, so it is now %s", path.at, aside.at);
        }
    }
    if (h->good >= 0) {
        from = text_of("with --resume 1 it goes on from %s; give it",
                       checkpoint_folder(out, h->good, "").at);
    } else if (*out) {
        from = text_of("begin again, or with --resume 1 if --out has an older checkpoint, with");
    }
    const Text hint =
        text_of("%s a lower --lr, a longer --warmup or a smaller --grad-clip%s", from.at, bad.at);
    die(EXIT_RESOURCES, hint.at, "the run has diverged: %s", what);
}
// Notes whether a step gave a finite loss and an update.
static inline void health_note(Run *r, const StepReport *step) {
    Health *h = &r->journal.health;
    const int64_t most = run_options(r)->max_skipped;
    h->lost = !r->privacy.on && !isfinite(step->loss);
    h->skipped = step->skipped ? h->skipped + 1 : 0;
    h->bad = h->lost && h->skipped > 1; // a single step may have odd samples
    h->stuck = h->skipped > 1 && !isfinite(step->norm);
    h->reason = step->skipped;
    if (!h->lost && h->saved == step->step - 1 && h->good != h->saved) {
        health_found_good(r, h, h->saved);
    }
    if (!most || h->skipped < most) { return; }
    log_break(&r->journal.log);
    health_give_up(r, text_of("%" PRId64 " updates in a row were skipped (--max-skipped), the last "
                              "one at step %" PRId64 ": %s",
                              h->skipped, step->step, h->reason)
                          .at);
}
// Notes a checkpoint that was saved, whose weights are finite, or from which the run resumes.
static inline void health_saved(Run *r, int64_t step) {
    Health *h = &r->journal.health;
    const Options *o = run_options(r);
    h->saved = step;
    if (r->privacy.on || h->validated == step) { h->good = step; }
    checkpoints_prune(o->out, step, o->keep, h->good);
}

static inline void trainer_report_step(Run *r, const StepReport *step) {
    if (r->comm->rank) { return; }
    const Plan *plan = r->plan;
    Journal *j = &r->journal;
    const int64_t T = plan->shape.T;
    const bool shown = !privacy_hides(&r->privacy);
    const double nobody = NAN,
                 seconds = shown ? step->seconds
                                 : public_step_time(&j->public_time, j->spent.steps,
                                                    j->spent.steps_s, plan->predicted.step_s);
    if (shown) {
        warn_of_loss(j, step->step, run_options(r)->warmup, plan->model.config.vocab, step->loss);
    }
    const int64_t samples = r->privacy.on && shown ? step->samples : plan->config->samples;
    const double tokens = samples * T;
    const StepWork work = {.tokens = tokens,
                           .flops = gpt_step_flops(&plan->model, tokens, T),
                           .peak = plan->machine->rates.peak_flops_per_s,
                           .ranks = r->comm->ranks};
    const LoadFigures loads = expert_loads_figures(&r->executor.loads);
    const StepFacts facts = {
        .step = step->step,
        .last = step->step == r->progress.step && (step->step == r->end || r->stopping),
        .loss = shown ? step->loss : nobody,
        .norm = shown ? step->norm : nobody,
        .lr = step->lr,
        .seconds = seconds,
        .tokens = tokens,
        .mfu = mfu_of(work.flops, seconds, work.peak * work.ranks),
        .tflops = tflops_of(&work, seconds),
        .joules = shown ? energy_joules(&j->energy) : nobody,
        .load_most = loads.most,
        .load_entropy = loads.entropy,
        .pieces = loads.pieces,
        .windows = shown ? step->windows : NULL,
        .samples = step->samples,
    };
    report_step(&facts, &j->log);
    health_note(r, step);
}

// -------------------------------------------------------------------------------------------------
// One step

// Returns why this update must not be made, or NULL.
static inline const char *reason_to_skip(const Options *o, bool private_run, Progress *p,
                                         double loss, double norm) {
    // the norm includes noise; the loss, and anything else that depends on the samples, must not
    // decide
    if (private_run) { return isfinite(norm) ? NULL : "gradient norm is not finite"; }
    if (!isfinite(loss) || !isfinite(norm)) { return "loss or gradient norm is not finite"; }
    double loss_z = outlier_z(&p->loss, loss), norm_z = outlier_z(&p->norm, norm);
    if (o->skip_loss_z > 0 && loss_z > o->skip_loss_z) { return "loss is an outlier"; }
    if (o->skip_grad_z > 0 && norm_z > o->skip_grad_z) { return "gradient norm is an outlier"; }
    return NULL;
}

// Draws the samples of a private step: their windows, their number, and where each micro-batch
// begins. Rank 0 draws for all ranks, because logarithms may differ between machines. Every rank
// calls it.
static inline int64_t drawn_words(const Plan *p) {
    return p->most_samples + 1 + p->config->privacy.parts + 1;
}
static inline void draw_samples(Run *r, int64_t step, Pass *pass) {
    const Privacy *p = &r->privacy;
    const Plan *plan = r->plan;
    const int64_t words = drawn_words(plan);
    int64_t *windows = r->windows + (step & 1) * words, *count = windows + plan->most_samples,
            *begins = count + 1;
    const bool known = r->drawn[step & 1] == step + 1;
    if (!known && r->comm->rank == 0) {
        const Dataset *train = &r->data->train;
        NoiseStream stream = {{0}, NOISE_SAMPLING, 0, (uint64_t)step};
        memcpy(stream.key, p->key, sizeof stream.key);
        const double rate = plan->config->samples / (double)train->windows;
        *count = dataset_sample_poisson(train, rate, plan->most_samples, stream, windows);
        stream.part = 1;
        *count = dataset_split(windows, *count, p->parts, p->most_of_part, stream, begins);
        noise_wipe(&stream, sizeof stream);
    }
    if (!known) { comm_broadcast(r->comm, windows, words * sizeof *windows, 0); }
    r->drawn[step & 1] = step + 1;
    pass->windows = windows;
    pass->samples = *count;
    pass->begins = p->parts > 1 ? begins : NULL;
}
// Returns the loss of a step: the mean over its targets, or, in private runs, the mean over its
// samples of each sample's mean.
static inline double step_loss(const Pass *pass, double sum, int64_t targets) {
    if (!pass->windows) { return sum / max_i64(targets, 1); }
    double mean = 0;
    for (int64_t i = 0; i < pass->samples; i++) {
        mean += pass->sample_losses[i] /
                max_i64(dataset_window_targets(pass->data, pass->windows[i]), 1);
    }
    return mean / pass->samples;
}

// Returns the targets of the step that is `ahead` steps from the current one.
static inline int64_t step_targets(const Run *r, int ahead) {
    const int64_t samples = r->plan->config->samples,
                  first = r->progress.position + ahead * samples;
    return r->privacy.on || first < 0 ? 0 : dataset_count_targets(&r->data->train, first, samples);
}
// Returns the pass of that step.
static inline Pass make_pass(Run *r, int ahead) {
    const int64_t samples = r->plan->config->samples, targets = step_targets(r, ahead);
    const GptConfig *c = &r->plan->model.config;
    const Options *o = run_options(r);
    const double tokens = (double)(samples * r->plan->shape.T),
                 of_group = (double)c->experts / (double)gpt_groups(c);
    const Pass pass = {
        .data = &r->data->train,
        .first_sample = r->progress.position + ahead * samples,
        .samples = samples,
        .sample_losses = r->executor.losses,
        .scale = (float)(1.0 / (double)max_i64(targets, 1)),
        .aux =
            o->moe_balance == BALANCE_AUX ? (float)(o->moe_aux_coefficient * of_group / tokens) : 0,
        .z = (float)(o->moe_z_coefficient / tokens),
        .training = true,
        .counts = true,
        .host_row = ((r->progress.step + ahead) & 1) * r->executor.host_rows,
    };
    return pass;
}
// Returns what Muon does with matrices in a step (counted from 0). factor: of the schedule.
static inline MatrixStep make_matrix_step(const Options *o, int64_t step, double factor) {
    const double first = 0.85, warm = (double)o->muon_momentum_warmup,
                 part = step < o->muon_momentum_warmup ? (double)step / warm : 1;
    const MatrixStep m = {
        .lr = (float)(o->muon_lr * factor),
        .weight_decay = (float)o->muon_weight_decay,
        .momentum =
            (float)(part < 1 ? first + (o->muon_momentum - first) * part : o->muon_momentum),
        .iterations = (int)o->muon_steps,
    };
    return m;
}
// The rates of a step: of the schedule, and as a factor of its peak, for rates with another one.
typedef struct {
    double lr, factor;
    int64_t step;
} StepRates;
static inline OptimizerStep make_update(const Options *o, StepRates rates, double norm) {
    const OptimizerStep u = {
        .lr = (float)rates.lr,
        .beta1 = (float)o->beta1,
        .beta2 = (float)o->beta2,
        .eps = (float)o->eps,
        .weight_decay = (float)o->weight_decay,
        .momentum = (float)o->momentum,
        .grad_scale = (float)(o->grad_clip > 0 && norm > o->grad_clip ? o->grad_clip / norm : 1.0),
        .rounding = round_to_nearest(),
        .matrices = make_matrix_step(o, rates.step, rates.factor),
        .nesterov = o->nesterov != 0,
    };
    return u;
}
static inline bool due(int64_t every, int64_t step, bool last) {
    return every && (step % every == 0 || last);
}
// Does anything need all parameters of this step before later steps run?
static inline bool pauses_after(const Options *o, int64_t step, int64_t end) {
    const bool last = step == end;
    return last || due(o->val_every, step, last) || due(o->sample_every, step, last) ||
           due(o->save_every, step, last);
}

// Runs the window of a cyclic step, in which the next step begins.
static inline void run_window(Run *r, Pass *pass, StepRates rates) {
    Pass passes[3] = {make_pass(r, -1), *pass, make_pass(r, 1)};
    const int64_t step = r->progress.step;
    if (r->privacy.on) { draw_samples(r, step + 1, &passes[2]); }
    const bool pauses = pauses_after(run_options(r), step + 1, r->end);
    overlap_run_window(&r->executor, step_schedule_of, r, passes, step, pauses,
                       asked_to_stop(r->stop_file), make_update(run_options(r), rates, 0),
                       &r->stopping);
}
// Reports a cyclic step. Only rank 0 has its whole loss and norm.
static inline void report_window(Run *r, StepReport *report) {
    const StepStats *stats = &r->executor.overlap->result[(report->step - 1) & 1];
    report->loss = stats->loss / max_i64(report->counted, 1);
    report->norm = sqrt(exact_value(stats->squares));
    r->progress.updates += isfinite(report->norm);
    report->skipped = isfinite(report->norm) ? NULL : "gradients are not finite";
    if (r->comm->rank == 0 && !isfinite(report->norm)) {
        fprintf(stderr,
                "warning: step %" PRId64
                ": gradients that are not finite made no update (loss %g, norm %g)\n",
                report->step, shown_loss(&r->privacy, report->loss), report->norm);
    }
    trainer_report_step(r, report);
}
// Reports the steps whose statistics are known after the window of a step: this one, or, if they
// come a window later, the one before, and this one if it has drained.
static inline void report_windows(Run *r, const StepReport *report) {
    const bool drained = r->executor.overlap->first_step == report->step;
    if (r->unreported.step) { report_window(r, &r->unreported); }
    r->unreported = *report;
    if (cyclic_reports_later(&r->plan->cyclic) && !drained) { return; }
    report_window(r, &r->unreported);
    r->unreported.step = 0;
}
// The loss and gradient norm of a step.
typedef struct {
    double loss, norm;
    const char *skipped; // why no update was made, or NULL
} StepResult;
// Ends a step with delayed updates (--offload-delay): the updates of the previous step have been
// made, its new parameters are received, and this step's gradient is kept.
static inline void keep_gradient(Run *r, const Schedule *schedule, int *at, const Pass *pass,
                                 double norm, bool skipped) {
    executor_run(&r->executor, schedule, at, pass, NULL, r->progress.step, NULL);
    r->progress.updates += r->store.flight.pending;
    r->store.flight.pending = !skipped;
    r->progress.pending_norm = norm;
}
// Counts of messages and copies, which the passes of steps alone are to change.
typedef struct {
    int64_t sent[COMM_KINDS][LINK_KINDS];
    HostTraffic copied;
} TrafficCounts;
static inline TrafficCounts traffic_counts(const Run *r) {
    TrafficCounts c = {.copied = r->store.flight.copied};
    memcpy(c.sent, r->comm->bytes, sizeof c.sent);
    return c;
}
static inline void traffic_restore(Run *r, const TrafficCounts *c) {
    memcpy(r->comm->bytes, c->sent, sizeof c->sent);
    r->store.flight.copied = c->copied;
}
// Runs a step completely, before the next one begins.
static inline StepResult run_step(Run *r, Pass *pass, StepRates rates) {
    const Program *program = step_program(r, r->progress.step);
    const Schedule *schedule = &program->rank[r->comm->rank];
    const Options *o = run_options(r);
    const OptimizerStep delayed = make_update(o, rates, r->progress.pending_norm);
    StepResult result = {};
    int at = 0;
    expert_loads_clear(&r->executor.loads);
    r->executor.loads.known = false;
    if (plan_looks_ahead(r->plan)) {
        executor_look_at_loads(&r->executor, &r->plan->evaluation, pass);
    }
    executor_run(&r->executor, schedule, &at, pass, &delayed, r->progress.step, &result.norm);
    if (r->executor.loads.experts) { expert_loads_sum(&r->executor.loads, r->comm); }
    const double look = seconds_now();
    r->stopping = asked_to_stop(r->stop_file);
    r->journal.spent.report_s += seconds_now() - look;
    result.loss = step_loss(pass, executor_sum_losses(&r->executor, program, pass, &r->stopping),
                            step_targets(r, 0));
    const char *skip = reason_to_skip(o, r->privacy.on, &r->progress, result.loss, result.norm);
    if (store_delays(&r->store.plan)) {
        keep_gradient(r, schedule, &at, pass, result.norm, skip != NULL);
    } else if (!skip) {
        const OptimizerStep update = make_update(o, rates, result.norm);
        executor_run(&r->executor, schedule, &at, pass, &update, r->progress.step, &result.norm);
        r->progress.updates++;
    }
    result.skipped = skip;
    if (!skip) { return result; }
    r->executor.action = NULL; // no action is running: the updates are skipped
    store_skip_updates(&r->store);
    if (r->comm->rank == 0) {
        fprintf(stderr, "warning: step %" PRId64 ": update skipped: %s (loss %g, norm %g)\n",
                r->progress.step + 1, skip, shown_loss(&r->privacy, result.loss), result.norm);
    }
    return result;
}
// Begins a private step: notes it, draws its samples, and makes their schedule.
static inline void begin_private_step(Run *r, Pass *pass) {
    if (!r->privacy.on) { return; }
    privacy_note(&r->privacy, r->progress.step);
    draw_samples(r, r->progress.step, pass);
    if (r->plan->cyclic.rule) { return; }
    program_free(&r->step_program);
    r->step_program = plan_program(r->plan, pass->samples, true);
}
static inline void train_step(Run *r) {
    const double start = seconds_now(), waited = r->comm->waited_s;
    const Options *o = run_options(r);
    const int64_t step = r->progress.step, steps = r->plan->config->steps;
    const double changed = delink_rate(o, &r->plan->model, &r->progress);
    const StepRates rates = {
        .lr = learning_rate(o, step, steps) * changed,
        .factor = learning_rate_share(o, step, steps) * changed,
        .step = step,
    };
    Journal *j = &r->journal;
    Pass pass = make_pass(r, 0);
    if (r->progress.step == j->start_step + 1) { memset(&j->spent, 0, sizeof j->spent); }
    begin_private_step(r, &pass);
    ops_range_begin("step", "", -1);
    profile_begin(&r->profile, &r->executor, r->progress.step + 1);
    StepReport report = {
        .step = step + 1, .lr = rates.lr, .samples = pass.samples, .windows = pass.windows};
    if (r->plan->cyclic.rule) {
        report.counted = r->privacy.on ? pass.samples : step_targets(r, 0);
        run_window(r, &pass, rates);
    } else {
        const StepResult result = run_step(r, &pass, rates);
        report.loss = result.loss;
        report.norm = result.norm;
        report.skipped = result.skipped;
    }
    const Program *program = step_program(r, r->progress.step);
    profile_end(&r->profile, &r->executor, &program->rank[r->comm->rank]);
    ops_range_end();
    r->progress.step++;
    r->progress.lr = learning_rate(o, step, steps);
    r->progress.position += r->plan->config->samples;
    report.seconds = seconds_now() - start;
    j->spent.steps++;
    j->spent.steps_s += report.seconds;
    j->spent.waiting_s += r->comm->waited_s - waited;
    if (r->plan->cyclic.rule) {
        report_windows(r, &report);
    } else {
        trainer_report_step(r, &report);
    }
    if (r->progress.step == r->profile.last) {
        r->save_failed |= !profile_report(&r->profile, r->comm, program, o->trace, &j->log);
    }
    j->spent.report_s += seconds_now() - start - report.seconds;
}

#endif
