// overlap.h: steps that overlap (cyclic.h). A step's window has the rest of the step and the part
// of the next one that already runs. Its actions are run by the executor like all others; here is
// what they do: step statistics, updates, deferred operations, and which actions of a window run.
//
// Windows    Each action belongs to a step (Action.step, relative to the window's). Actions of
//            first_step .. last_step run, others are skipped. A step that must drain ends all its
//            work before a later one begins: what later windows hold of it is run at once
//            (overlap_drain). The step after it begins with what precedes its window
//            (overlap_lead).
// Statistics travel from rank to rank (cyclic.h says when): each adds the losses of its samples and
//            the squares of the gradients that it owns. Rank 0 decides which step is the last:
//            `notice` steps after it has learnt of a request to stop, since other ranks may have
//            begun later steps.
// Updates    If updates do not wait for the norm of the whole gradient, each storage is clipped by
//            its own norm. A norm that is not finite makes no update.
#ifndef OVERLAP_H
#define OVERLAP_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/records.h"
#include "dataloader.h"
#include "executor/activations.h"
#include "executor/compute.h"
#include "executor/deferred.h"
#include "ops/ops.h"
#include "cyclic.h"
#include "schedule/actions.h"
#include "schedule/order.h"
#include "schedule/schedule.h"
#include "state/p2p.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"
#include "state/update.h"

// A message is complete before its rank is this many steps further: by then the rank has used
// versions of parameters that depend on the message.
enum { OPEN_STEPS = 8 };
typedef struct Overlap {
    int64_t first_step, last_step; // only actions of these steps run
    // statistics received from the previous rank (rank 0: those of a whole step), and those sent on
    StepStats stats_in, stats_out;
    CommRequest in_request, out_request;
    // Of even and odd steps: the squares of the gradients that this rank owns, so far; the
    // statistics of the step, as far as this rank knows them (rank 0: complete); the update.
    ExactSum squares[2];
    StepStats result[2];
    OptimizerStep update[2];
    // largest norm of the whole gradient, of a storage's; 0: no limit
    double whole_clip, storage_clip;
    double norm;        // of the whole gradient, as far as it is known
    int64_t stop_after; // the last step, if a rank was asked to stop
    bool asked;         // this rank was asked to stop
} Overlap;

// Returns whether an action of this step does not run now.
static inline bool overlap_skips(const Executor *e, const Pass *pass, int64_t of_step) {
    const Overlap *o = e->overlap;
    return o && pass->training && (of_step < o->first_step || of_step > o->last_step);
}

// -------------------------------------------------------------------------------------------------
// Deferred operations: additions to sums, updates, messages of sums and parameters

static inline void overlap_update(Executor *e, int storage, int64_t step) {
    Overlap *o = e->overlap;
    OptimizerStep update = o->update[step & 1];
    double norm = o->norm, most = o->whole_clip;
    if (!e->store->plan.p2p.waits) {
        ExactSum squares = {};
        if (e->store->plan.noise.on) { store_add_noise(e->store, storage, step); }
        store_measure(e->store, storage, storage + 1, step, &squares);
        norm = sqrt(exact_value(squares));
        most = o->storage_clip;
        exact_join(&o->squares[step & 1], &squares);
    }
    if (most > 0 && norm > most) { update.grad_scale = (float)(most / norm); }
    if (isfinite(norm)) {
        store_update(e->store, storage, step, update, 0);
    } else {
        store_skip_version(e->store, storage, step + 1);
    }
}
static inline void overlap_run_deferred(void *executor, const DeferredOp *op) {
    Executor *e = (Executor *)executor;
    Store *s = e->store;
    const P2p *p2p = &s->plan.p2p;
    const Action *a = &op->action;
    const StateMessage m = {action_sends(a->kind), a->storage, a->peer, a->step};
    switch (a->kind) {
    case ACT_REDUCE: store_add_sum(s, a->storage, op->micro, a->micro, a->step); break;
    case ACT_ADD: store_add_part(s, a->storage, a->micro, a->step); break;
    case ACT_UPDATE: overlap_update(e, a->storage, a->step); break;
    case ACT_SEND_SUM:
    case ACT_RECV_SUM: store_pass_sum(s, &m); break;
    default:
        if (p2p->borrows) {
            store_pass_borrowed(s, &m, max_i64(0, a->version), p2p_slot(p2p, a->use, a->step));
        } else {
            store_pass_parameters(s, &m, a->version);
        }
    }
}
// Waits for what must precede an action of step `of_step`, at a place of the lists, and defers it.
// Returns false if it is none that can be deferred.
static inline bool overlap_defers(Executor *e, const Action *a, ListPlace place, int64_t of_step) {
    if (!e->overlap) { return false; }
    deferred_wait_before(&e->queue, place);
    if (!action_may_be_deferred(a)) { return false; }
    DeferredOp op = {.action = *a, .micro = executor_micro(e, a), .place = place};
    op.action.step = of_step;
    op.action.version += e->version;
    if (a->kind == ACT_REDUCE) { store_end_piece(e->store, a->storage, op.micro, a->micro); }
    deferred_push(&e->queue, &op);
    return true;
}

// -------------------------------------------------------------------------------------------------
// Step statistics

// Adds what this rank knows: the losses of its samples, in their order, after those of earlier
// ranks, and the squares of the gradients that it owns.
static inline void overlap_add_stats(Executor *e, const Schedule *schedule, const Pass *pass,
                                     int64_t step) {
    Overlap *o = e->overlap;
    ExactSum *squares = &o->squares[step & 1]; // updates of the next step may have been made
    ops_wait(e->stream);
    executor_take_losses(e, schedule, pass);
    int64_t first, rows = executor_own_rows(e, pass, &first);
    // a private sample counts with the mean over its targets
    for (int64_t r = first; executor_has_head(e) && r < first + rows; r++) {
        const int64_t targets =
            pass->windows ? max_i64(dataset_window_targets(pass->data, pass->windows[r]), 1) : 1;
        o->stats_out.loss += pass->sample_losses[r] / targets;
    }
    if (e->store->plan.p2p.waits) {
        store_add_all_noise(e->store, step);
        store_measure(e->store, 0, e->model->storages, step, squares);
    }
    exact_join(&o->stats_out.squares, squares);
    o->stats_out.stop |= o->asked;
    memset(squares, 0, sizeof *squares);
}
// Runs STATS: adds to the statistics of a step, or reads the complete ones.
static inline void overlap_run_stats(Executor *e, const Action *a, const Schedule *schedule,
                                     const Pass *pass, int64_t step) {
    Overlap *o = e->overlap;
    const bool first = e->comm->rank == 0;
    comm_wait(e->comm, &o->out_request);
    comm_wait(e->comm, &o->in_request);
    o->stats_out = o->stats_in;
    memset(&o->stats_in, 0, sizeof o->stats_in);
    if (a->version == 0) { overlap_add_stats(e, schedule, pass, step); }
    if (first && o->stats_out.stop) {
        o->stop_after = min_i64(o->stop_after, step + e->store->plan.p2p.notice);
    }
    if (first) { o->stats_out.last = o->stop_after; }
    if (o->stats_out.last) {
        o->stop_after = o->stats_out.last;
        o->last_step = min_i64(o->last_step, o->stop_after);
    }
    o->norm = sqrt(exact_value(o->stats_out.squares));
    o->result[step & 1] = o->stats_out;
}
// Posts the message of an action that sends or receives step statistics.
static inline void overlap_post_stats(Executor *e, const Action *a) {
    Overlap *o = e->overlap;
    const CommLabel label = {"statistics", -1, e->step};
    const bool sends = action_sends(a->kind);
    CommRequest *request = sends ? &o->out_request : &o->in_request;
    comm_wait(e->comm, request);
    *request = comm_host_message_begin(e->comm, label, sends, a->peer,
                                       sends ? &o->stats_out : &o->stats_in, sizeof(StepStats));
}

// -------------------------------------------------------------------------------------------------
// Opening

// Prepares an executor for steps that overlap: called after executor_allocate. Store operations are
// deferred (executor/deferred.h) if messages have channels and another message can always be
// posted, so that posting never waits. window: with the longest schedule of this rank. clip:
// largest norm of a gradient, of the whole one and of a storage's. executor_free frees what is
// allocated here.
static inline void overlap_open(Executor *e, const Program *window, const CyclicPlan *cyclic,
                                double whole_clip, double storage_clip) {
    const Schedule *mine = &window->rank[e->comm->rank];
    int64_t messages = 0;
    for (int i = 0; i < mine->count; i++) { messages += action_is_message(mine->actions[i].kind); }
    e->overlap = new_array(Overlap, 1, "overlapping steps");
    e->overlap->whole_clip = whole_clip;
    e->overlap->storage_clip = storage_clip;
    e->overlap->stop_after = INT64_MAX;
    e->queue.store = e->store;
    e->queue.run = overlap_run_deferred;
    e->queue.context = e;
    if (e->store->plan.p2p.deferred && comm_has_channels(e->comm) &&
        OPEN_STEPS * messages <= COMM_MESSAGES) {
        deferred_open(&e->queue, window_order(window, cyclic, e->model, e->comm->rank));
    }
}

#endif
