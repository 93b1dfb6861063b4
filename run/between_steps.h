// between_steps.h: what follows a step: validation, a sample of text, a checkpoint.
#ifndef BETWEEN_STEPS_H
#define BETWEEN_STEPS_H

#include "base/base.h"
#include "base/files.h"
#include "checkpoint/checkpoint.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "dataloader.h"
#include "executor/executor.h"
#include "options.h"
#include "privacy/privacy.h"
#include "report/log.h"
#include "run/data.h"
#include "run/privacy_ledger.h"
#include "run/prompt.h"
#include "run/trainer.h"
#include "state/gather.h"
#include "state/planned.h"
#include "text/choices_file.h"

static inline void validate(Run *r) {
    const Dataset *val = &r->data->val;
    int64_t samples = validation_samples(r->plan->config, val);
    Evaluation e =
        executor_evaluate(&r->executor, &r->plan->evaluation, val, samples, r->progress.step);
    if (r->comm->rank) { return; }
    double loss = e.loss / max_i64(e.targets, 1), bits = NAN, accuracy = NAN;
    if (isfinite(loss)) { r->journal.health.validated = r->progress.step; }
    if (r->data->val_bytes > 0) { bits = e.loss / log(2.0) / r->data->val_bytes; }
    if (val->labels) { accuracy = e.right / (double)samples; }
    report_validation(r->progress.step, loss, bits, accuracy,
                      r->privacy.on ? privacy_epsilon(&r->privacy, r->progress.step).high : NAN,
                      e.targets, &r->journal.log);
}

static inline void score_hellaswag(Run *r) {
    const Dataset *questions = &r->data->hellaswag;
    int64_t rows = questions->windows, examples = rows / CHOICES;
    Evaluation e =
        executor_evaluate(&r->executor, &r->plan->evaluation, questions, rows, r->progress.step);
    if (r->comm->rank == 0) {
        report_choices(r->progress.step, e.right, examples, &r->journal.log);
    }
}

// Finds out whether the last checkpoint of a run is good: no step follows it whose loss would tell.
// All ranks call it.
static inline void evaluate_last(Run *r) {
    Health *h = &r->journal.health;
    int known = h->good == r->progress.step; // on rank 0
    comm_broadcast(r->comm, &known, sizeof known, 0);
    if (known) { return; }
    const TrafficCounts before = traffic_counts(r);
    const Evaluation e = executor_evaluate(&r->executor, &r->plan->evaluation, &r->data->train,
                                           r->plan->evaluation.samples, r->progress.step);
    traffic_restore(r, &before);
    h->lost = h->bad = !isfinite(e.loss);
    if (r->comm->rank == 0 && !h->lost) { health_found_good(r, h, r->progress.step); }
}
// Saves a checkpoint, unless the weights are those of the step before, which gave no finite loss.
static inline void save_checkpoint(Run *r, const char *command) {
    Text path;
    const Options *o = run_options(r);
    int lost = r->journal.health.lost; // as rank 0 knows
    comm_broadcast(r->comm, &lost, sizeof lost, 0);
    if (lost) {
        if (r->comm->rank) { return; }
        log_break(&r->journal.log);
        fprintf(stderr,
                "warning: no checkpoint at step %" PRId64 ": its loss is not finite, and its "
                "update was skipped\n",
                r->progress.step);
        return;
    }
    privacy_history(&r->privacy, r->progress.step, r->progress.privacy);
    privacy_sync(&r->privacy);
    const bool saved = checkpoint_save(o->out, &r->store, &r->progress, command, &path);
    r->save_failed |= !saved;
    if (saved && r->comm->rank == 0) {
        report_checkpoint(r->progress.step, path.at, &r->journal.log);
        health_saved(r, r->progress.step);
    }
    const bool ends = r->progress.step >= r->end || r->stopping;
    if (saved && o->keep && ends && !r->privacy.on) { evaluate_last(r); }
}

// Does what follows the update number `step`: validation, a sample of text, a checkpoint. A resumed
// run did this before it was stopped, so it repeats only what is due after the last step. No text
// is sampled before the first step, unless the run has no steps. Messages and copies made here are
// not counted as traffic of the steps.
static inline void between_steps(Run *r, const char *command) {
    const Options *o = run_options(r);
    const int64_t step = r->progress.step;
    bool last = step >= r->end, fresh = !o->resume || step > r->first_step;
    bool validates = (fresh || last) && due(o->val_every, step, last);
    bool samples = last || (fresh && step > 0);
    samples = samples && due(o->sample_every, step, last);
    if (validates || samples) { store_wait_all(&r->store); }
    const TrafficCounts before = traffic_counts(r);
    if (validates && r->data->val.tokens) { validate(r); }
    if (validates && *o->hellaswag) { score_hellaswag(r); }
    if (samples) { print_sample(r); }
    traffic_restore(r, &before);
    bool save = due(o->save_every, step, last) || (r->stopping && *o->out);
    if (save && step > r->first_step) { save_checkpoint(r, command); }
}

#endif
