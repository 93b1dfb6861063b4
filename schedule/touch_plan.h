// touch_plan.h: what a program needs so that the touches of its actions can be listed (touches.h):
// which units and storages each rank computes with, and of what its gradients are the sum.
#ifndef TOUCH_PLAN_H
#define TOUCH_PLAN_H

#include "base/base.h"
#include "cyclic.h"
#include "model/gpt.h"
#include "schedule/actions.h"
#include "schedule/cyclic_routes.h"
#include "schedule/schedule.h"
#include "schedule/touch.h"
#include "schedule/touch_states.h"
#include "state/policy.h"

// Does the gradient of a storage have a part of this unit?
static inline bool touch_contributes(const UnitMap *map, int unit, int storage) {
    return unit != map->units - 1 || storage != map->classifier || map->head_maker != ACTION_KINDS;
}
static inline void touch_plan_units(TouchPlan *p) {
    const Program *of = p->program;
    const UnitMap *map = &of->map;
    for (int r = 0; r < of->ranks; r++) {
        for (int i = 0; i < of->rank[r].count; i++) {
            const Action *a = &of->rank[r].actions[i];
            if (a->kind != ACT_FORWARD || a->unit < 0 || a->unit >= map->units) { continue; }
            for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
                const int64_t s = map->of_unit[a->unit][k], at = (int64_t)r * map->storages + s;
                p->uses[at] = true;
                p->member[at] |= of->forward_only || touch_contributes(map, a->unit, (int)s);
            }
            // without rows it does nothing
            bool *computes = &p->computes[r * map->units + a->unit];
            if (a->rows > 0 && !*computes) { p->units[r]++; }
            *computes |= a->rows > 0;
        }
    }
}
// Sums up what gradients need, with that of the spans of the step so far. Where steps overlap, it
// is that of all pieces of the micro-batches so far.
static inline void touch_plan_sums(TouchPlan *p) {
    const int storages = p->program->map.storages, all = p->spans,
              together = p->cyclic ? p->pieces.pieces : 1,
              rows = p->cyclic ? p->program->micro_batches : p->program->ranks * all;
    for (int i = 0; i < rows * storages; i++) {
        const int s = i % storages, step = i / storages / all * all, at = i / storages - step;
        uint64_t sum = 0;
        if (at % together) { continue; }
        // the last piece of the micro-batch before
        if (at) {
            const int last = p->cyclic ? cyclic_last_piece(p->cyclic, at / together - 1) : at - 1;
            sum = p->before[(int64_t)(step + last) * storages + s];
        }
        for (int k = 0; k < 2 * together; k++) { // first adds up, then sets
            const int piece =
                p->cyclic ? piece_number(&p->pieces, at / together, k % together) : at;
            const int64_t span = (int64_t)(step + piece) * storages + s;
            if (k < together) { sum += p->whole[span] + TOUCH_REDUCED; }
            if (k >= together) { p->before[span] = sum; }
        }
    }
}
static inline void touch_plan_gradients(TouchPlan *p) {
    const Program *of = p->program;
    const UnitMap *map = &of->map;
    for (int r = 0; r < of->ranks; r++) {
        for (int i = 0; i < of->rank[r].count; i++) {
            const Action *a = &of->rank[r].actions[i];
            if (a->kind != ACT_FORWARD || a->part || a->unit < 0 || a->unit >= map->units ||
                a->micro < 0 || a->micro >= of->micro_batches || a->rows < 0 || a->first_row < 0 ||
                a->first_row + a->rows > of->samples) {
                continue;
            }
            if (p->cyclic) {
                p->row[2 * a->micro] = a->first_row;
                p->row[2 * a->micro + 1] = a->rows;
                if (a->unit == map->units - 1 && a->rows) { p->head_rank[a->micro] = r; }
            }
            for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
                const int s = map->of_unit[a->unit][k];
                const uint64_t rows = p->rows[a->first_row + a->rows] - p->rows[a->first_row];
                if (touch_contributes(map, a->unit, s)) {
                    p->whole[touch_span(p, r, s, a->micro)] +=
                        touch_contribution(a->unit, s) * rows;
                }
            }
        }
    }
    touch_plan_sums(p);
}
static inline void touch_plan_free(TouchPlan *p) {
    free_all(p->p2p, p->rows, p->computes, p->units, p->uses, p->member, p->whole, p->before,
             p->row, p->head_rank, p->touch);
}
// cyclic, model: of steps that overlap, else NULL.
static inline TouchPlan touch_plan(const Program *of, const CyclicPlan *cyclic,
                                   const GptModel *model) {
    const UnitMap *map = &of->map;
    TouchPlan p = {.program = of, .cyclic = cyclic, .model = model, .spans = 1};
    const size_t ranks = of->ranks, micros = max_i64(1, of->micro_batches);
    for (int s = 0; s < map->storages && !cyclic; s++) {
        p.spans = map->rows[s].reduces_often ? (int)micros : p.spans;
    }
    if (cyclic) {
        p.pieces = cyclic_pieces(cyclic);
        p.spans = pieces_of_step(&p.pieces);
        p.p2p = new_array(P2p, ranks, "touches");
        for (size_t r = 0; r < ranks; r++) { p.p2p[r] = cyclic_p2p(cyclic, (int)r); }
        p.row = new_array(int64_t, 2 * micros, "touches");
        p.head_rank = new_array(int, micros, "touches");
        for (size_t i = 0; i < micros; i++) { p.head_rank[i] = -1; }
    }
    p.rows = new_array(uint64_t, of->samples + 1, "touches");
    for (int64_t i = 0; i < of->samples; i++) { p.rows[i + 1] = p.rows[i] + mix64((uint64_t)~i); }
    p.computes = new_array(bool, ranks * map->units, "touches");
    p.units = new_array(int, ranks, "touches");
    p.uses = new_array(bool, ranks * map->storages, "touches");
    p.member = new_array(bool, ranks * map->storages, "touches");
    const size_t spans = cyclic ? micros : ranks * p.spans;
    p.whole = new_array(uint64_t, spans * map->storages, "touches");
    p.before = new_array(uint64_t, spans * map->storages, "touches");
    touch_plan_units(&p);
    touch_plan_gradients(&p);
    return p;
}

#endif
