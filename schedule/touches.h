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
    p->count = 0;
    if (action_is(x->kind, COMPUTES | OF_ROWS | OF_STASH)) {
        if (!x->rows) { return; }
        if (action_reads_parameters(x->kind)) { touch_parameters(p, rank, x); }
        touch_passes(p, rank, x);
        if (action_computes(x->kind)) { touch_contributions(p, rank, x); }
        return;
    }
    switch (x->kind) {
    case ACT_SEND_SUM:
    case ACT_RECV_SUM:
    case ACT_SEND_PART:
    case ACT_RECV_PART: touch_pass_gradient(p, rank, x); break;
    case ACT_SEND_PARAMETERS:
    case ACT_RECV_PARAMETERS: touch_pass_parameters(p, rank, x); break;
    case ACT_SEND_STATS:
    case ACT_RECV_STATS: touch_pass_stats(p, x); break;
    case ACT_EXCHANGE:
    case ACT_EXCHANGE_BACK: touch_exchange(p, rank, x); break;
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
