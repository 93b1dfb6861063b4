// executor.h: runs a schedule. Here, and only here, actions become work: the model computes
// (compute.h), the store holds states (zero.h), messages move them (comm.h).
//
// Messages   are posted where the schedule says so. An action waits for those that must precede it,
//            by what both touch (schedule/touches.h).
// Losses     The loss of a micro-batch is summed for each sample, in fp64. Samples are added in the
//            order of their numbers, so the loss of a step is the same for every layout.
#ifndef EXECUTOR_H
#define EXECUTOR_H

#include "base/base.h"
#include "comm/comm.h"
#include "cyclic.h"
#include "dataloader.h"
#include "executor/activations.h"
#include "executor/compute.h"
#include "executor/deferred.h"
#include "executor/expert_loads.h"
#include "executor/overlap.h"
#include "ops/ops.h"
#include "schedule/actions.h"
#include "schedule/order.h"
#include "schedule/schedule.h"
#include "state/gather.h"
#include "state/p2p.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"
#include "state/sums.h"
#include "state/update.h"

// -------------------------------------------------------------------------------------------------
// Running. All ranks run the schedules of one program.

#ifndef EXECUTOR_HOOK // tests inject faults here, before an action, and look at what it has done
#define EXECUTOR_HOOK(action, step)
#endif
#ifndef EXECUTOR_DONE
#define EXECUTOR_DONE(executor)
#endif
static inline void executor_begin(Executor *e, const Action *a, int index, int64_t step) {
    EXECUTOR_HOOK(a, step);
    e->action = a;
    e->step = step;
    e->comm->step = step;
    bool of_unit = a->unit >= 0;
    ops_range_begin(action_name(a->kind), of_unit ? "unit" : "storage",
                    of_unit ? a->unit : a->storage);
    e->running = index;
    if (e->marks) {
        ops_mark(e->stream, e->marks[2 * index]);
        e->marked[index] = true;
    }
}
// Describes what this rank is doing. Signal handlers may call it.
static inline void executor_describe(const Executor *e, SignalText *t) {
    const Action *a = e->action;
    if (!a) {
        signal_text_add(t, "between steps");
        return;
    }
    signal_text_add(t, action_name(a->kind));
    if (a->unit >= 0) {
        signal_text_print(t, " of unit %d, micro-batch %" PRId64, a->unit, a->micro);
    }
    if (a->storage >= 0) { signal_text_print(t, " of storage %d", a->storage); }
    signal_text_print(t, ", step %" PRId64, e->step + 1);
}

// Returns the slot of a storage's borrowed parameters: in training that of the use, else the
// storage's own; 0 if parameters are not borrowed.
static inline int executor_slot_of(const Executor *e, const Action *a, const Pass *pass,
                                   int64_t of_step) {
    return !e->store->plan.rows[a->storage].borrowed ? 0
           : pass->training ? p2p_slot(&e->store->plan.p2p, a->use, of_step)
                            : e->map->rows[a->storage].param_slot;
}
static inline const Real *executor_acquire(Executor *e, int storage, int64_t version, int slot) {
    return e->store->plan.rows[storage].borrowed ? store_acquire_borrowed(e->store, storage, slot)
                                                 : store_acquire(e->store, storage, version);
}
// Returns an action's version relative to the step's. Where updates are delayed, version 1 may not
// exist yet: then the result is at most 0.
static inline int64_t executor_step_version(const Executor *e, const Action *a) {
    return store_delays(&e->store->plan) && !e->store->flight.pending ? min_i64(0, a->version)
                                                                      : a->version;
}
static inline void executor_prefetch(Executor *e, int storage, int64_t version, bool secondary) {
    if (e->store->plan.steps_overlap) {
        store_broadcast(e->store, storage, e->map->rows[storage].param_slot, e->step);
    } else {
        store_prefetch(e->store, storage, version, secondary, e->step);
    }
}
// Notes which rows this rank computes, of the pass and of each micro-batch.
static inline void executor_look_ahead(Executor *e, const Schedule *schedule) {
    schedule_rows(schedule, &e->first_row);
    for (int i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        // a rank may receive rows that it computes in the next window
        const bool posted = e->store->plan.steps_overlap && action_of_rows(a->kind);
        if (a->kind == ACT_FORWARD || posted) { e->first_rows[a->micro] = a->first_row; }
    }
}

// Runs an action that releases, reduces, updates or moves a storage's states. Returns false if the
// action is of another kind.
static inline bool executor_run_states(Executor *e, const Action *a, const OptimizerStep *optimizer,
                                       int64_t of_step) {
    switch (a->kind) {
    case ACT_RELEASE: break; // later actions may overwrite the parameters
    case ACT_REDUCE: store_reduce(e->store, a->storage, of_step); break;
    case ACT_UPDATE:
        if (store_delays(&e->store->plan)) {
            store_update_delayed(e->store, a->storage, of_step, *optimizer);
        } else {
            store_update(e->store, a->storage, of_step, *optimizer, a->use);
        }
        break;
    case ACT_DIRECT: store_direct(e->store, a->storage, of_step, *optimizer, a->use); break;
    case ACT_ORTHOGONALISE: store_orthogonalise(e->store, a->storage, of_step, *optimizer); break;
    case ACT_FETCH: store_fetch(e->store, a->storage, a->use, of_step); break;
    case ACT_EVICT: store_evict(e->store, a->storage, a->use, of_step); break;
    case ACT_FETCH_SUM: store_fetch_sum(e->store, a->storage, of_step); break;
    case ACT_EVICT_SUM: store_evict_sum(e->store, a->storage, of_step); break;
    case ACT_READ: store_read_piece(e->store, a->storage, a->use); break;
    case ACT_WRITE: store_write_piece(e->store, a->storage, a->use); break;
    default: return false;
    }
    return true;
}
// Finds the shares of a step of so many tokens from the loads of its forward passes, and has them
// where the operations are. All ranks call it.
static inline void executor_share_loads(Executor *e, int64_t tokens) {
    const size_t n = (size_t)(e->loads.layers * e->loads.experts);
    expert_loads_share(&e->loads, e->comm, tokens);
    ops_from_host(e->stream, e->shares, e->loads.shares, n * sizeof(float));
}
// Runs one action of step `of`, which is not deferred.
static inline void executor_run_action(Executor *e, const Schedule *schedule, const Action *a,
                                       const Pass *pass, const OptimizerStep *optimizer,
                                       int64_t of_step, double *norm) {
    if (executor_run_states(e, a, optimizer, of_step)) { return; }
    // if no pass came before the step, its forward passes are done when the first one goes back
    if (a->kind == ACT_BACKWARD_INPUT && pass->aux > 0 && !e->loads.known) {
        executor_share_loads(e, pass_tokens(pass));
    }
    switch (a->kind) {
    case ACT_PREFETCH:
        executor_prefetch(e, a->storage, e->version + executor_step_version(e, a), a->secondary);
        break;
    case ACT_ACQUIRE:
        e->held[a->storage] = executor_acquire(e, a->storage, max_i64(0, e->version + a->version),
                                               executor_slot_of(e, a, pass, of_step));
        break;
    case ACT_EXCHANGE:
    case ACT_EXCHANGE_BACK: run_exchange(e, a, pass + a->step); break;
    case ACT_FETCH_STASH:
    case ACT_EVICT_STASH: run_stash(e, a, pass + a->step); break;
    case ACT_NORM:
        executor_await_all(e);
        store_finish_sums(e->store);
        *norm = store_norm(e->store, of_step);
        executor_take_losses(e, schedule, pass);
        break;
    case ACT_STATS: overlap_run_stats(e, a, schedule, pass + a->step, of_step); break;
    case ACT_SEND_PART:
    case ACT_RECV_PART: {
        const StateMessage m = {action_sends(a->kind), a->storage, a->peer, of_step};
        store_pass_part(e->store, &m, executor_micro(e, a));
        break;
    }
    case ACT_SEND_STATS:
    case ACT_RECV_STATS: overlap_post_stats(e, a); break;
    default: (action_is_message(a->kind) ? run_message : run_compute)(e, a, pass + a->step);
    }
}

// Runs this rank's actions from *at up to and including NORM (the norm goes to *norm), or to the
// end, and moves *at. After NORM the caller checks loss and norm, and runs the rest, the updates,
// with the optimizer settings of the step, or not at all. Losses are complete after NORM, or at the
// end of a pass that does not train. Only there does the host wait for the device, unless messages
// require it.
static inline void executor_run(Executor *e, const Schedule *schedule, int *at, const Pass *pass,
                                const OptimizerStep *optimizer, int64_t step, double *norm) {
    if (*at == 0) {
        e->version = e->overlap ? step : store_version(e->store);
        executor_look_ahead(e, schedule);
        e->first_micro = step * e->step_micros;
    }
    while (*at < schedule->count) {
        const Action *a = &schedule->actions[*at];
        const int64_t of_step = step + a->step; // the step that the action belongs to
        if (overlap_skips(e, pass, of_step)) {
            (*at)++;
            continue;
        }
        const ListPlace place = {step, *at};
        executor_begin(e, a, (*at)++, step);
        const bool deferred = overlap_defers(e, a, place, of_step);
        deferred_run_ready(&e->queue);
        if (!deferred) { executor_run_action(e, schedule, a, pass, optimizer, of_step, norm); }
        EXECUTOR_DONE(e);
        if (e->marks) { ops_mark(e->stream, e->marks[2 * e->running + 1]); }
        ops_range_end();
        if (a->kind == ACT_NORM) { return; }
    }
    if (!pass->training) {
        executor_await_all(e);
        ops_wait(e->stream);
        executor_take_losses(e, schedule, pass);
    }
    e->action = NULL;
}

// Where steps overlap (overlap.h): overlap_lead runs what precedes a step's window, if the step
// before has drained. overlap_drain runs what a later window holds of this step: messages of
// parameters and, in the window after the step's own (its pass: `pass`), statistics.
static inline void overlap_lead(Executor *e, const Schedule *window, const Pass *pass,
                                int64_t step) {
    int at = 0;
    const int64_t last = e->overlap->last_step;
    e->overlap->last_step = step;
    executor_run(e, window, &at, pass, NULL, step - 1, NULL);
    e->overlap->last_step = last;
}
static inline void overlap_drain(Executor *e, const Schedule *window, const Pass *pass,
                                 int64_t step, int64_t later) {
    int at = 0;
    executor_run(e, window, &at, pass, NULL, later, NULL);
    deferred_finish(&e->queue);
    e->overlap->first_step = step + 1;
}
// Runs the window of a step, with the rest of the step if it drains. window_of returns this rank's
// window of a step. passes: of the previous step, this one and the next one. asked: this rank was
// asked to stop; *stops: this is the last step.
static inline void overlap_run_window(Executor *e, const Schedule *(*window_of)(void *, int64_t),
                                      void *context, const Pass passes[3], int64_t step,
                                      bool drains, bool asked, OptimizerStep update, bool *stops) {
    Overlap *o = e->overlap;
    int at = 0;
    o->asked = asked;
    o->update[step & 1] = update;
    o->last_step = min_i64(o->stop_after, step + !drains);
    if (o->first_step == step) { overlap_lead(e, window_of(context, step - 1), passes, step); }
    executor_run(e, window_of(context, step), &at, passes + 1, NULL, step, NULL);
    for (int64_t later = step + 1; o->last_step <= step && later <= step + DRAINS; later++) {
        overlap_drain(e, window_of(context, later), passes + 2, step, later);
    }
    *stops = o->stop_after <= step;
}
// Gives every rank values[] of all samples of a pass, which only ranks with the head know. *flag,
// on return true if it was true on any rank, travels with them, since each exchange costs a
// latency. A rank's part of the message is its samples' values, in the order of its schedule, then
// its flag. All ranks call it after the pass.
static inline void executor_share(Executor *e, const Program *p, double *values, bool *flag) {
    const int head = e->model->units - 1;
    e->part[0] = 0;
    for (int pass = 0; pass < 2; pass++) { // first count, pack and exchange; then unpack
        for (int r = 0; r < p->ranks; r++) {
            int64_t at = e->part[r];
            for (int i = 0; i < p->rank[r].count; i++) {
                const Action *a = &p->rank[r].actions[i];
                if (a->kind != ACT_FORWARD || a->unit != head) { continue; }
                double *there = e->message + at, *here = values + a->first_row;
                if (pass || r == e->comm->rank) {
                    memcpy(pass ? here : there, pass ? there : here, a->rows * sizeof(double));
                }
                at += a->rows;
            }
            if (pass) {
                *flag |= e->message[at] != 0;
            } else if (r == e->comm->rank) {
                e->message[at] = *flag;
            }
            if (!pass) { e->part[r + 1] = at + 1; }
        }
        if (!pass) { comm_all_gather_doubles(e->comm, e->message, e->part); }
    }
}

// Finds out where the tokens of a step will go, by a forward pass of its samples, without the head:
// the share of each expert, of which Switch's loss is made. All ranks call it before the step, with
// its pass and the schedule of passes that do not train.
static inline void executor_look_at_loads(Executor *e, const Program *program, const Pass *step) {
    ExpertLoads *l = &e->loads;
    expert_loads_clear(l);
    for (int64_t first = 0; first < step->samples; first += program->samples) {
        Pass pass = *step;
        int at = 0;
        pass.first_sample += first;
        pass.windows = step->windows ? step->windows + first : NULL;
        pass.samples = min_i64(program->samples, step->samples - first);
        pass.training = false;
        pass.looks = true;
        pass.host_row = 0;
        executor_run(e, &program->rank[e->comm->rank], &at, &pass, NULL, e->step, NULL);
    }
    executor_share_loads(e, pass_tokens(step));
    expert_loads_clear(l);
}

// Returns the sum of the losses of a pass's samples, in their order, over all ranks. *stop: in,
// whether this rank was asked to stop; out, whether any rank was. All ranks call it.
static inline double executor_sum_losses(Executor *e, const Program *program, const Pass *pass,
                                         bool *stop) {
    double sum = 0;
    executor_share(e, program, pass->sample_losses, stop);
    for (int64_t i = 0; i < pass->samples; i++) { sum += pass->sample_losses[i]; }
    return sum;
}

// The result of an evaluation.
typedef struct {
    double loss; // summed over targets
    // right: samples whose likeliest label, or examples whose likeliest choice, is the correct one
    int64_t targets, right;
} Evaluation;

// Evaluates samples 0 .. samples - 1 of the data with the schedule of passes that do not train. All
// ranks call it and get the same result.
static inline Evaluation executor_evaluate(Executor *e, const Program *program, const Dataset *data,
                                           int64_t samples, int64_t step) {
    Evaluation sum = {0, 0, 0};
    Choice choice = {0, false};
    for (int64_t first = 0; first < samples; first += program->samples) {
        int64_t count = min_i64(program->samples, samples - first);
        Pass pass = {.data = data,
                     .first_sample = first,
                     .samples = count,
                     .sample_losses = e->losses,
                     .sample_right = data->labels ? e->right : NULL};
        int at = 0;
        bool none = false; // requests to stop are exchanged in training steps only
        executor_run(e, &program->rank[e->comm->rank], &at, &pass, NULL, step, NULL);
        sum.loss += executor_sum_losses(e, program, &pass, &none);
        if (data->labels) { executor_share(e, program, e->right, &none); }
        sum.targets += dataset_count_targets(data, first, count);
        for (int64_t i = 0; i < count; i++) {
            if (data->labels) { sum.right += e->right[i] != 0; }
            if (data->rows) { sum.right += choice_add(&choice, data, first + i, e->losses[i]); }
        }
    }
    return sum;
}

#endif
