// state_plan.h: makes the plan of a rank's states (state/planned.h). Each policy fills the rows of
// storages once, in its own file: zero.h says what ZeRO divides, offload.h what is on the host and
// on disk, schedule/cyclic_routes.h which versions a rank keeps where steps overlap.
#ifndef STATE_PLAN_H
#define STATE_PLAN_H

#include "base/base.h"
#include "comm/group.h"
#include "model/gpt.h"
#include "offload.h"
#include "schedule/cyclic_routes.h"
#include "state/optimizer.h"
#include "state/planned.h"
#include "state/policy.h"
#include "zero.h"

// Decides where every state is stored. It allocates only tables, so predictions use it, too. ranks
// has all ranks, as the rank of the plan sees them. ranks and placement must outlive the plan.
static inline StatePlan state_plan(const GptModel *m, const Group *ranks,
                                   const Placement *placement, const ZeroPolicy *policy,
                                   MixedPrecision precision, const Optimizer *optimizer) {
    StatePlan s = store_plan(m, ranks, placement, policy, precision, optimizer);
    if (s.steps_overlap) { cyclic_fill_routes(&s); }
    store_find_expert_ranks(&s);
    store_find_owners(&s);
    offload_fill(&s);
    zero_check_partition(&s);
    zero_fill(&s);
    if (s.steps_overlap) { cyclic_fill(&s); }
    store_set_positions(&s);
    return s;
}
// Returns the plan of another rank, or with another policy.
static inline StatePlan state_plan_as(const StatePlan *s, const Group *ranks,
                                      const ZeroPolicy *policy) {
    const MixedPrecision precision = {s->dtype, s->wire};
    return state_plan(s->model, ranks, s->placement, policy, precision, s->optimizer);
}

#endif
