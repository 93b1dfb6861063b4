// stage_memory.h: what a rank of a pipeline stage needs, as a search counts it.
#ifndef STAGE_MEMORY_H
#define STAGE_MEMORY_H

#include "base/base.h"
#include "pipeline.h"
#include "planner/plan_task.h"
#include "planner/planner_model.h"
#include "schedule/schedule.h"
#include "state/matrices.h"

// Returns the bytes of buffers that a rank needs for so many samples at once, whatever its units.
static inline double plan_buffers(const PlanModel *m, double rows) {
    int i = 0;
    double low = 1;
    for (; 2 * low <= rows && i < PLAN_ROWS - 2; i++) { low *= 2; }
    return m->buffers[i] + (rows - low) / low * (m->buffers[i + 1] - m->buffers[i]);
}
// Returns how many blocks of a stage an optimizer of whole matrices treats together, as if waves
// (state/matrices.h) began with the stage; 0: it treats none.
static inline double plan_wave(const PlanModel *m, int blocks, int replicas) {
    const int count = m->matrices.count;
    return count ? (double)min_i64(blocks, matrices_wave_blocks(count, replicas)) : 0;
}
// Returns the bytes that an optimizer of whole matrices needs in a stage, whose ranks divide each
// wave evenly.
static inline double plan_matrices(const PlanModel *m, int first, int end, int replicas) {
    const PlanMatrices *x = &m->matrices;
    const double wave = plan_wave(m, plan_blocks(m, first, end), replicas);
    if (wave == 0) { return 0; }
    return x->scratch + wave * x->block / replicas +
           (replicas > 1 ? wave * x->of_matrices / replicas + x->largest : 0);
}
// A stage: units `first` to the one before `end`; its ranks; how many stages are after it; ranks of
// the first and of the last stage. Where a search does not know other stages yet, `after` is 0 and
// both ends have as many ranks as this stage.
typedef struct {
    int first, end, replicas, after, end_replicas[2];
} PlanStage;
static inline PlanStage plan_stage_alone(int first, int end, int replicas) {
    const PlanStage x = {first, end, replicas, 0, {replicas, replicas}};
    return x;
}
// Returns stage s of a plan, which begins with unit `first`.
static inline PlanStage plan_stage(const StagePlan *p, int s, int first) {
    const int last = p->stages - 1;
    const PlanStage x = {
        first, first + p->units[s], p->replicas[s], last - s, {p->replicas[0], p->replicas[last]}};
    return x;
}
// Returns the bytes of a rank's slots where ZeRO divides gradients, or parameters, too: for whole
// storages of two blocks, and for all others of the stage, less the slices that lie inside. The
// ranks of both ends own the table that these share.
static inline double plan_slots(const PlanTask *t, const PlanStage *x) {
    if (t->slots == 0) { return 0; }
    const PlanModel *m = t->model;
    const int blocks = plan_blocks(m, x->first, x->end), one = x->first ? x->first : 1;
    const bool begins = x->first == 0, ends = x->end == m->units;
    const double block = plan_summed_bytes(m, one, one + 1, x->replicas) / sizeof(float),
                 all = plan_summed_bytes(m, x->first, x->end, x->replicas) / sizeof(float),
                 table = begins || ends ? m->tied : 0,
                 others = all - blocks * block - (begins && ends ? 2 : 1) * table,
                 whole = others + (double)min_i64(2, blocks) * block,
                 inside = (others + (blocks > 2 ? 0 : blocks * block)) / x->replicas,
                 owners = begins && ends ? x->replicas : x->end_replicas[0] + x->end_replicas[1];
    return t->slots * ((x->replicas > 1 ? whole - inside : 0) + table * (1 - 1 / owners));
}
// Returns the bytes of a rank's states. The table that first and last unit share counts once. Ranks
// of both ends divide its states.
static inline double plan_stage_states(const PlanTask *t, const PlanStage *x) {
    const PlanModel *m = t->model;
    const bool begins = x->first == 0, ends = x->end == m->units;
    const double parameters = plan_parameters(m, x->first, x->end) - (begins && ends ? m->tied : 0),
                 of_other = begins != ends ? m->tied * x->end_replicas[begins] /
                                                 (x->end_replicas[0] + x->end_replicas[1])
                                           : 0,
                 divided = parameters - of_other + plan_elsewhere(m, x->first, x->end);
    return parameters * t->whole + divided * t->divided / x->replicas;
}
// Computes *bytes of a rank of a stage: its states; for each micro-batch in flight what the
// backward pass needs (of activations only what is kept, if the rest is recomputed) and what
// waiting weight parts need; what is recomputed at once; what is sent to, and received early from,
// the stages beside it; and buffers. Those of messages among the ranks of the stage are left out.
// Weight parts that wait are those of one micro-batch while there are at most `of_one` in flight,
// and of one more for each further one (pipeline.h: deferred).
// Returns how many micro-batches can be in flight in `limit` bytes (0: none).
static inline double plan_stage_memory(const PlanTask *t, const StagePlan *p, const PlanStage *x,
                                       double in_flight, double limit, double *bytes) {
    const PlanModel *m = t->model;
    const int first = x->first, end = x->end, replicas = x->replicas;
    const double rows = plan_rows(p->micro_batch, replicas),
                 all = m->activations[end] - m->activations[first],
                 left = p->recompute ? m->kept[end] - m->kept[first] : all,
                 again = all - left < m->again ? all - left : m->again,
                 inputs = m->cut[first] + m->inputs[end] - m->inputs[first + 1];
    // Gradients of weight parts that wait, and how much more these take than those that are used in
    // turns, which a stage of one unit has until a second micro-batch waits.
    const bool delays = p->kind == PIPELINE_ZERO_BUBBLE, one_unit = end - first == 1;
    const double waiting = delays ? rows * (m->waiting[end] - m->waiting[first]) : 0,
                 more = delays ? waiting - rows * m->turns : 0, later = one_unit ? more : 0,
                 gradients = delays && end < m->units ? m->boundary : 0;
    const double before = first > 0 ? SEND_BUFFERS + RECEIVED_AHEAD : 0,
                 behind = end < m->units ? SEND_BUFFERS + 1 + RECEIVED_AHEAD : 0,
                 fixed = plan_stage_states(t, x) +
                         rows * (again + m->boundary * (before + behind)) + plan_buffers(m, rows) +
                         plan_matrices(m, first, end, replicas) + plan_slots(t, x) + more - later,
                 each = rows * (left + inputs + gradients), of_one = x->after + 1;
    *bytes = fixed + in_flight * each +
             (in_flight > of_one ? (in_flight - of_one) * waiting + later : 0);
    const double room = limit - fixed,
                 fits = floor((room - later + of_one * waiting) / (each + waiting));
    return room < 0              ? 0
           : each + waiting == 0 ? INFINITY
           : fits > of_one       ? fits
                                 : fmin(floor(room / each), of_one);
}

#endif
