// cyclic_windows.h: builds the schedules of Cyclic Data Parallelism (cyclic.h) as windows, one for
// each step.
//
// Window     The list of actions for step t. It has 2 N A slots, begins 2 N - 2 slots after step t
//            does, and ends with the slot of the step's last update. So it has the rest of step t,
//            and the part of step t + 1 that already runs (Action.step = 1). New parameters travel
//            when they are needed, which may be in a later window (Action.step < 0). A run that
//            executes what belongs to step t and nothing more has drained: all of theta_(t+1)
//            exists, and no message is in flight.
#ifndef CYCLIC_WINDOWS_H
#define CYCLIC_WINDOWS_H

#include "base/base.h"
#include "comm/group.h"
#include "cyclic.h"
#include "schedule/actions.h"
#include "schedule/cyclic_routes.h"
#include "schedule/schedule.h"
#include "state/policy.h"

// -------------------------------------------------------------------------------------------------
// Building

typedef struct {
    Program *program;
    const CyclicPlan *plan;
    ParamsMessages routes;
    int64_t step; // the step of the window
} CyclicBuilder;

static inline Schedule *cyclic_list(CyclicBuilder *b, int rank) { return &b->program->rank[rank]; }

// A pass of a piece through a stage, forward or backward; `step` is relative to the window's.
typedef struct {
    int step, piece, stage;
} StagePass;
// The i-th of all stage passes from the window's step on.
static inline StagePass stage_pass_of(const CyclicPlan *p, int i) {
    const StagePass at = {i / p->N / cyclic_step_pieces(p), i / p->N % cyclic_step_pieces(p),
                          i % p->N};
    return at;
}
static inline int stage_pass_slot(const CyclicPlan *p, StagePass at, bool backward) {
    return backward ? cyclic_backward_slot(p, at.step, at.piece, at.stage)
                    : cyclic_forward_slot(p, at.step, at.piece, at.stage);
}
// Returns the number of the piece of a stage pass through all steps, and the rank that computes
// this piece in a stage.
static inline int64_t stage_pass_number(const CyclicBuilder *b, StagePass at) {
    return (b->step + at.step) * cyclic_step_pieces(b->plan) + at.piece;
}
static inline int stage_pass_rank(const CyclicBuilder *b, StagePass at, int stage) {
    return cyclic_rank(b->plan, stage_pass_number(b, at), stage);
}
static inline Action cyclic_action(ActionKind kind, int unit, int storage, int micro, int step) {
    Action a = action_make(kind, unit, storage, micro);
    a.step = step;
    return a;
}
// Adds an action of a storage to the list of a rank.
static inline void cyclic_add(CyclicBuilder *b, int rank, ActionKind kind, int storage, int micro,
                              int step) {
    schedule_add(cyclic_list(b, rank), cyclic_action(kind, -1, storage, micro, step));
}
// Adds both ends of a message. All messages are posted in one order, between slots. If the messages
// of two ranks crossed each other, both would wait for ever on a transport that completes each
// message before the next (comm_nccl.cuh).
static inline void cyclic_message(CyclicBuilder *b, Action a, int from, int to) {
    Action other = a;
    other.kind = (ActionKind)(a.kind + 1);
    a.peer = to;
    other.peer = from;
    schedule_add(cyclic_list(b, from), a);
    schedule_add(cyclic_list(b, to), other);
}
// Adds ACQUIRE or RELEASE of the parameters that an action uses.
static inline void cyclic_hold(CyclicBuilder *b, Schedule *list, const Action *use,
                               ActionKind kind) {
    const UnitMap *map = &b->program->map;
    for (int k = 0; k < map->of_unit_count[use->unit]; k++) {
        const int storage = map->of_unit[use->unit][k], stage = map->rows[storage].p2p.stage;
        Action a = cyclic_action(kind, -1, storage, -1, use->step);
        a.version = use->step - !cyclic_fresh(b->plan, cyclic_micro(b->plan, use->micro), stage);
        a.use =
            cyclic_use(b->plan, cyclic_stage_of_unit(b->plan, use->unit), use->kind != ACT_FORWARD);
        schedule_add(list, a);
    }
}
static inline Action cyclic_compute(const CyclicBuilder *b, ActionKind kind, int unit,
                                    StagePass at) {
    const Pieces pieces = cyclic_pieces(b->plan);
    Action a = cyclic_action(kind, unit, -1, at.piece, at.step);
    a.rows = piece_rows(&pieces, b->program->samples, NULL, at.piece, &a.first_row);
    return a;
}
// Mode data divides a slot into parts of one unit each, so that what a unit completes is sent at
// once. cyclic_part returns the units of a stage in a part.
static inline int cyclic_parts(const CyclicPlan *p) {
    return p->mode == CYCLIC_DATA ? cyclic_longest(p) : 1;
}
static inline Stage cyclic_part(const CyclicPlan *p, int stage, int part, bool backward) {
    Stage units = p->cut.stage[stage];
    if (p->mode != CYCLIC_DATA) { return units; }
    units.first_unit += backward ? units.units - 1 - part : part;
    units.units = part < units.units;
    return units;
}
static inline void cyclic_forward(CyclicBuilder *b, StagePass at, int part) {
    const Stage units = cyclic_part(b->plan, at.stage, part, false);
    Schedule *list = cyclic_list(b, stage_pass_rank(b, at, at.stage));
    for (int u = units.first_unit; u < units.first_unit + units.units; u++) {
        const Action a = cyclic_compute(b, ACT_FORWARD, u, at);
        cyclic_hold(b, list, &a, ACT_ACQUIRE);
        schedule_add(list, a);
        cyclic_hold(b, list, &a, ACT_RELEASE);
    }
}
// Adds REDUCE for the gradients that a unit completes. With the last piece of the step their owner
// updates, too.
static inline void cyclic_sums(CyclicBuilder *b, StagePass at, int unit) {
    const UnitMap *map = &b->program->map;
    const int rank = stage_pass_rank(b, at, at.stage);
    const bool updates = at.piece == b->program->micro_batches - 1 && !b->plan->waits &&
                         rank == cyclic_owner(b->plan, at.stage);
    for (int k = map->of_unit_count[unit] - 1; k >= 0; k--) {
        const int storage = map->of_unit[unit][k];
        // in backward order a storage's first unit is the last one to add to its gradient
        if (cyclic_unit_of_storage(map, storage) != unit) { continue; }
        cyclic_add(b, rank, ACT_REDUCE, storage, at.piece, at.step);
        if (updates) { cyclic_add(b, rank, ACT_UPDATE, storage, -1, at.step); }
    }
}
static inline void cyclic_backward(CyclicBuilder *b, StagePass at, int part) {
    const Stage units = cyclic_part(b->plan, at.stage, part, true);
    Schedule *list = cyclic_list(b, stage_pass_rank(b, at, at.stage));
    for (int u = units.first_unit + units.units - 1; u >= units.first_unit; u--) {
        const bool block = u > 0 && u < b->program->map.units - 1;
        const Action input = cyclic_compute(b, ACT_BACKWARD_INPUT, u, at);
        if (u) { cyclic_hold(b, list, &input, ACT_ACQUIRE); } // the embedding has no input gradient
        if (block && b->plan->recompute) {
            schedule_add(list, cyclic_compute(b, ACT_RECOMPUTE, u, at));
        }
        if (u) {
            schedule_add(list, input);
            cyclic_hold(b, list, &input, ACT_RELEASE);
        }
        schedule_add(list, cyclic_compute(b, ACT_BACKWARD_WEIGHT, u, at));
        cyclic_sums(b, at, u);
    }
}
// Sends the gradient of a storage to its owner, and adds it to the sum.
static inline void cyclic_pass_sum(CyclicBuilder *b, StagePass at, int storage, bool later) {
    const CyclicPlan *p = b->plan;
    const int from = stage_pass_rank(b, at, at.stage),
              to = cyclic_sum_to(p, stage_pass_number(b, at), at.stage);
    const bool last = at.piece == b->program->micro_batches - 1,
               adds = p->mode == CYCLIC_ZERO ? later : later == !last;
    const Action sum = cyclic_action(ACT_SEND_SUM, -1, storage, at.piece, at.step);
    if (to < 0) { return; }
    if (!later) { cyclic_message(b, sum, from, to); }
    if (adds) { cyclic_add(b, to, ACT_ADD, storage, at.piece, at.step); }
    if (adds && last && !p->waits) { cyclic_add(b, to, ACT_UPDATE, storage, -1, at.step); }
}
// Sends gradients at the end of their part of the slot. They are added one slot later. The last one
// is added at once, since the update follows, except that mode zero gives it a slot to travel.
// later: this is the slot after that of the backward pass.
static inline void cyclic_pass_sums(CyclicBuilder *b, StagePass at, int part, bool later) {
    const UnitMap *map = &b->program->map;
    const CyclicPlan *p = b->plan;
    const Stage units = cyclic_part(p, at.stage, part, true);
    // ranks that take turns each send the gradient of their piece
    if (at.piece != cyclic_last_piece(p, cyclic_micro(p, at.piece)) && !cyclic_turns(p)) { return; }
    for (int u = units.first_unit + units.units - 1; u >= units.first_unit; u--) {
        for (int k = map->of_unit_count[u] - 1; k >= 0; k--) {
            const int storage = map->of_unit[u][k];
            if (cyclic_unit_of_storage(map, storage) == u) {
                cyclic_pass_sum(b, at, storage, later);
            }
        }
    }
}
// Returns the part of a slot in which the parameters of a storage are sent: that of its unit's
// backward pass; the last part if updates wait for the norm.
static inline int cyclic_part_of_storage(const CyclicPlan *p, const UnitMap *map, int storage) {
    const Stage *units = &p->cut.stage[map->rows[storage].p2p.stage];
    if (p->mode != CYCLIC_DATA || p->waits) { return cyclic_parts(p) - 1; }
    return units->first_unit + units->units - 1 - cyclic_unit_of_storage(map, storage);
}
// Sends the parameters that leave at the end of this part of a slot, of this step and of earlier
// ones. made: in mode zero, selects the messages of versions that were made in this slot (true) or
// before (false).
static inline void cyclic_send_params(CyclicBuilder *b, int slot, int part, bool made) {
    const UnitMap *map = &b->program->map;
    const CyclicPlan *p = b->plan;
    const int period = cyclic_period(p);
    for (int k = 0; k < b->routes.count; k++) {
        const ParamsMessage *h = &b->routes.message[k];
        const bool now = h->use < 0 ||
                         h->slot == cyclic_update_slot(p, h->stage) + period * (h->version - 1),
                   // the embedding has no input gradient
            unread = h->use >= 0 && cyclic_use_is_backward(p, h->use);
        const int behind = (h->slot - slot) / period; // in steps
        if ((h->use < 0 && h->slot < slot) || now != made || (h->slot - slot) % period ||
            !params_message_in_step(h, b->step - behind)) {
            continue;
        }
        for (int storage = 0; storage < (h->head ? 1 : map->storages); storage++) {
            if (map->rows[storage].p2p.stage != h->stage ||
                cyclic_part_of_storage(p, map, storage) != part ||
                (unread && unit_uses(map, 0, storage))) {
                continue;
            }
            Action a = cyclic_action(ACT_SEND_PARAMETERS, -1, storage, -1, -behind);
            a.version = a.step + h->version;
            a.use = h->use;
            cyclic_message(b, a, h->from, h->to);
        }
    }
}
// Sends what crosses to another rank at the end of a piece's slot: activations, their gradients,
// and the head's part of the gradient of wte.
static inline void cyclic_cross(CyclicBuilder *b, bool backward, StagePass at) {
    const CyclicPlan *p = b->plan;
    const Stage *units = &p->cut.stage[at.stage];
    const int next = backward ? at.stage - 1 : at.stage + 1,
              from = stage_pass_rank(b, at, at.stage), first = stage_pass_rank(b, at, 0),
              to = next >= 0 && next < p->N ? stage_pass_rank(b, at, next) : from;
    const Action rows =
        backward ? cyclic_compute(b, ACT_SEND_BACKWARD, units->first_unit, at)
                 : cyclic_compute(b, ACT_SEND_FORWARD, units->first_unit + units->units - 1, at);
    if (to != from && rows.rows) { cyclic_message(b, rows, from, to); }
    if (backward && at.stage == p->N - 1 && from != first && !p->untied) {
        cyclic_message(b, cyclic_action(ACT_SEND_PART, -1, 0, at.piece, at.step), from, first);
    }
}

// -------------------------------------------------------------------------------------------------
// Step statistics. data and zero: from rank to rank as they finish the step, or in mode data the
// step after it (cyclic_reports_later), and from the last to the first, which then has the complete
// ones. model: from the last rank to the first as their stages become complete, and back, one slot
// for each stage, so that all ranks learn the norm.

// Adds STATS on a rank, and the updates that wait for the norm where the rank knows it; then sends
// the statistics on (to: -1, nowhere). whole: they are complete.
static inline void cyclic_add_stats(CyclicBuilder *b, int rank, bool whole, int step) {
    const CyclicPlan *p = b->plan;
    // of the ranks to which the norm returns, the one that knows it first
    const int knower = cyclic_by_micro(p) ? p->N - 1 : 0;
    const bool back = p->mode != CYCLIC_SINGLE, knows = back ? whole || rank == knower : !whole;
    Action stats = cyclic_action(ACT_STATS, -1, -1, -1, step);
    stats.version = whole;
    schedule_add(cyclic_list(b, rank), stats);
    for (int s = 0; p->waits && knows && s < b->program->map.storages; s++) {
        if (cyclic_owner(p, b->program->map.rows[s].p2p.stage) == rank) {
            cyclic_add(b, rank, ACT_UPDATE, s, -1, step);
        }
    }
}
static inline void cyclic_send_stats(CyclicBuilder *b, int from, int to, bool whole, int step) {
    Action a = cyclic_action(ACT_SEND_STATS, -1, -1, -1, step);
    a.version = whole;
    if (from != to) { cyclic_message(b, a, from, to); }
}
static inline void cyclic_stats_of_stages(CyclicBuilder *b, int slot) {
    const CyclicPlan *p = b->plan;
    const int end = cyclic_complete_slot(p, 0), stages = p->mode == CYCLIC_MODEL ? p->N : 1;
    for (int j = 0; j < stages; j++) {
        const int first = cyclic_first_rank(p, j), last = first + cyclic_width(p, j) - 1;
        for (int r = last; r >= first && slot == end - j; r--) {
            cyclic_add_stats(b, r, false, 0);
            cyclic_send_stats(b, r, max_i64(r - 1, 0), false, 0);
        }
    }
    // the way back, in this step's window and in the next
    for (int j = 0; j < stages; j++) {
        const int first = cyclic_first_rank(p, j), last = first + cyclic_width(p, j) - 1,
                  late = end + j - slot, step = late ? -1 : 0;
        for (int r = first; r <= last && (late == 0 || late == cyclic_period(p)); r++) {
            if (r) { cyclic_add_stats(b, r, true, step); }
            cyclic_send_stats(b, r, min_i64(r + 1, p->ranks - 1), true, step);
        }
    }
}
static inline void cyclic_stats_of_ranks(CyclicBuilder *b, int slot) {
    const CyclicPlan *p = b->plan;
    const int N = p->N, end = cyclic_complete_slot(p, 0), of = -cyclic_reports_later(p);
    for (int r = 0; r < N; r++) {
        const int stage = N - 1 - r,
                  at = cyclic_complete_slot(p, stage) + cyclic_adds_later(p, stage);
        if (at != slot) { continue; }
        cyclic_add_stats(b, r, false, of);
        cyclic_send_stats(b, r, (r + 1) % N, false, of);
        if (N > 1 && r == N - 1) { cyclic_add_stats(b, 0, true, of); }
    }
    // the norm returns to the owners in between, in this window and in the next
    for (int r = N - 1; p->waits && r > 0; r--) {
        const int late = end + N - 1 - r - slot, step = late ? -1 : 0;
        if (late && late != cyclic_period(p)) { continue; }
        if (r < N - 1) { cyclic_add_stats(b, r, true, step); }
        cyclic_send_stats(b, r, max_i64(r - 1, 1), true, step);
    }
}

// -------------------------------------------------------------------------------------------------
// Slots

// Mode zero: first sends all gradients and parameters, then waits for and adds what was received.
static inline void cyclic_go_to_owners(CyclicBuilder *b, int slot) {
    const CyclicPlan *p = b->plan;
    for (int pass = 0; pass < 2; pass++) {
        for (int k = 0; k < 2 * p->N * p->N; k++) {
            const StagePass at = stage_pass_of(p, k);
            const int behind = slot - stage_pass_slot(p, at, true);
            const bool later = at.piece < p->N - 1 || cyclic_adds_later(p, at.stage);
            if (pass ? behind == later : behind == 0) { cyclic_pass_sums(b, at, 0, pass); }
        }
        if (!pass) { cyclic_send_params(b, slot, 0, false); }
    }
}
// Adds a part of a slot. Backward passes precede forward passes, because on one rank the next
// micro-batch writes the buffer of a stage's boundary again.
static inline void cyclic_slot(CyclicBuilder *b, int slot, int part) {
    const CyclicPlan *p = b->plan;
    const bool last = part == cyclic_parts(p) - 1;
    // stage passes of pieces that run in this slot or ran in the slot before
    const int first = max_i64(0, slot / 2 - p->N) * p->N, end = (slot / 2 + 1) * p->N;
    for (int backward = 1; backward >= 0; backward--) {
        for (int k = first; k < end; k++) {
            const StagePass at = stage_pass_of(p, k);
            if (stage_pass_slot(p, at, backward) == slot) {
                (backward ? cyclic_backward : cyclic_forward)(b, at, part);
            }
        }
    }
    if (p->mode == CYCLIC_ZERO) { cyclic_go_to_owners(b, slot); }
    for (int k = first; k < end; k++) {
        const StagePass at = stage_pass_of(p, k);
        const int behind = slot - stage_pass_slot(p, at, true);
        if (p->mode != CYCLIC_ZERO && (behind == 0 || behind == 1)) {
            cyclic_pass_sums(b, at, part, behind == 1);
        }
        for (int backward = 1; backward >= 0; backward--) {
            if (last && stage_pass_slot(p, at, backward) == slot) { cyclic_cross(b, backward, at); }
        }
    }
    if (last) { // before the parameters that wait for it
        (cyclic_by_micro(p) ? cyclic_stats_of_ranks : cyclic_stats_of_stages)(b, slot);
    }
    cyclic_send_params(b, slot, part, true);
}

// Builds the window of step `step`, for steps of `samples` samples. The caller has set the map, the
// ranks and empty lists of p; this fills the lists of all ranks and sets the limits.
static inline void schedule_cyclic(Program *p, const CyclicPlan *plan, int64_t samples,
                                   int64_t step) {
    CyclicBuilder b = {.program = p, .plan = plan, .routes = cyclic_route(plan), .step = step};
    const int begin = 2 * plan->N - 2;
    p->samples = samples;
    p->micro_batches = cyclic_step_pieces(plan);
    p->recompute = plan->recompute;
    for (int slot = begin; slot < begin + cyclic_period(plan); slot++) {
        for (int part = 0; part < cyclic_parts(plan); part++) { cyclic_slot(&b, slot, part); }
    }
    program_limit(p, limits_of_one());
    free(b.routes.message);
}

// Returns the window of another step, with the map of `window`. cyclic_window_free frees it, but
// not the map.
static inline Program cyclic_window(const Program *window, const CyclicPlan *plan, int64_t step) {
    Program p = *window;
    p.rank = new_array(Schedule, p.ranks, "schedules");
    p.limits = NULL;
    schedule_cyclic(&p, plan, window->samples, step);
    return p;
}
static inline void cyclic_window_free(Program *p) {
    for (int r = 0; r < p->ranks; r++) { schedule_free(&p->rank[r]); }
    free_all(p->rank, p->limits);
    memset(p, 0, sizeof *p);
}

// Returns, as one long program, what is run in `steps` steps of which every `pause`-th drains
// (overlap_lead, overlap_drain). So it can be validated, and compared with the paper's tables.
// Its steps, versions, micro-batches and samples count from the first step. window: the window of
// step 0, which is used for all steps that are alike. The result shares its map; cyclic_window_free
// frees the rest.
static inline Program cyclic_unroll(const Program *window, const CyclicPlan *plan, int steps,
                                    int pause) {
    Program p = *window;
    // [step + 1] windows of steps that differ from `window`
    Program *others = new_array(Program, steps + 4, "windows");
    for (int k = 0; k < steps + 4; k++) {
        if (!cyclic_alike(plan, k - 1, 0)) { others[k] = cyclic_window(window, plan, k - 1); }
    }
    p.micro_batches = steps * window->micro_batches;
    p.samples = steps * window->samples;
    p.rank = new_array(Schedule, p.ranks, "schedules");
    p.limits = new_array(Limits, p.ranks, "limits");
    for (int r = 0; r < p.ranks; r++) {
        const int stage = plan->mode == CYCLIC_MODEL ? cyclic_stage_of_rank(plan, r) : 0;
        p.limits[r] = plan->mode == CYCLIC_MODEL ? cyclic_limits(plan, stage) : limits_of_one();
        p.limits[r].in_flight = cyclic_live(plan, stage);
        for (int first = 0; first < steps; first += pause) {
            const int end = min_i64(first + pause, steps);
            for (int64_t step = first - 1; step < end + DRAINS; step++) {
                const Schedule *list =
                    &(others[step + 1].rank ? &others[step + 1] : window)->rank[r];
                for (int i = 0; i < list->count; i++) {
                    Action a = list->actions[i];
                    // the version of STATS is not one of parameters
                    const bool stats =
                        a.kind == ACT_STATS || a.kind == ACT_SEND_STATS || a.kind == ACT_RECV_STATS;
                    a.step += step;
                    a.version = stats ? a.version : max_i64(0, a.version + step);
                    if (a.step < first || a.step >= end) { continue; }
                    if (a.micro >= 0) { a.micro += (int)a.step * window->micro_batches; }
                    if (a.unit >= 0) { a.first_row += a.step * window->samples; }
                    schedule_add(&p.rank[r], a);
                }
            }
        }
    }
    for (int k = 0; k < steps + 4; k++) { cyclic_window_free(&others[k]); }
    free(others);
    return p;
}

#endif
