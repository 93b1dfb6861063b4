// touches.h: what an action does with which resources of its rank. touch.h says what resources and
// touches are; validator.h proves programs with them.
#ifndef TOUCHES_H
#define TOUCHES_H

#include "base/base.h"
#include "schedule/actions.h"
#include "schedule/touch.h"
#include "schedule/touch_passes.h"
#include "schedule/touch_states.h"

// Lists what an action of a rank does: touch[0 .. count - 1] of p, in this order. Actions without
// rows do nothing. The action's fields must be in range.
static inline void action_touches(TouchPlan *p, int rank, const Action *x) {
    const bool of_rows = action_is(x->kind, COMPUTES | OF_ROWS | OF_STASH);
    p->count = 0;
    if (of_rows && !x->rows) { return; }
    switch (x->kind) {
    case ACT_FORWARD:
    case ACT_BACKWARD_INPUT:
    case ACT_BACKWARD_WEIGHT:
    case ACT_RECOMPUTE:
    case ACT_CLIP:
    case ACT_TIED: touch_compute(p, rank, x); break;
    case ACT_FETCH_STASH:
    case ACT_EVICT_STASH: touch_stash(p, rank, x); break;
    case ACT_SEND_FORWARD:
    case ACT_RECV_FORWARD:
    case ACT_SEND_BACKWARD:
    case ACT_RECV_BACKWARD:
    case ACT_SEND_NORM:
    case ACT_RECV_NORM:
    case ACT_SEND_FACTOR:
    case ACT_RECV_FACTOR: touch_message(p, rank, x); break;
    case ACT_SEND_SUM:
    case ACT_RECV_SUM:
    case ACT_SEND_PART:
    case ACT_RECV_PART: touch_pass_gradient(p, rank, x); break;
    case ACT_SEND_PARAMETERS:
    case ACT_RECV_PARAMETERS: touch_pass_parameters(p, rank, x); break;
    case ACT_SEND_STATS:
    case ACT_RECV_STATS: touch_pass_stats(p, x); break;
    case ACT_PREFETCH: touch_gather(p, x); break;
    case ACT_ACQUIRE:
    case ACT_RELEASE: touch_hold(p, rank, x); break;
    case ACT_REDUCE: (p->cyclic ? touch_end_piece : touch_reduce)(p, rank, x); break;
    case ACT_ADD: touch_add_part(p, rank, x); break;
    case ACT_NORM: touch_norm(p, rank); break;
    case ACT_DIRECT: touch_update(p, rank, x); break;
    case ACT_UPDATE: (p->cyclic ? touch_make_version : touch_update)(p, rank, x); break;
    case ACT_ORTHOGONALISE: touch_orthogonalise(p, x); break;
    case ACT_STATS: touch_stats(p, rank, x); break;
    case ACT_FETCH:
    case ACT_EVICT: touch_move(p, rank, x); break;
    case ACT_READ:
    case ACT_WRITE: touch_disk(p, x); break;
    default: touch_move_sum(p, x); // FETCH_SUM, EVICT_SUM
    }
}

#endif
