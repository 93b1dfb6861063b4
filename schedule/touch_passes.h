// touch_passes.h: what compute actions and the messages of rows touch (touches.h): activations,
// inputs and gradients of units, norms and factors of samples.
#ifndef TOUCH_PASSES_H
#define TOUCH_PASSES_H

#include "base/base.h"
#include "cyclic.h"
#include "dp.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "schedule/touch.h"
#include "schedule/touch_states.h"

// -------------------------------------------------------------------------------------------------
// Passes and clipping

// Activations in a slot between the host and the device.
static inline void touch_stash(TouchPlan *p, int rank, const Action *x) {
    const UnitMap *map = &p->program->map;
    const int64_t place = touch_place(x->micro, p->program->limits[rank].in_flight);
    const uint64_t what = touch_name(RES_STASH, x->unit, x->micro);
    const int made = action_makes_stash(map, x);
    if (action_of_stash(x->kind)) {
        const bool leaves = x->kind == ACT_EVICT_STASH;
        touch_rows(p, TOUCH_READ, leaves ? RES_STASH : RES_STASHED,
                   leaves ? stash_slot(x->unit) : x->unit, leaves ? 0 : place, what, x);
        touch_rows(p, TOUCH_WRITE, leaves ? RES_STASHED : RES_STASH,
                   leaves ? x->unit : stash_slot(x->unit), leaves ? place : 0, what, x);
        return;
    }
    if (action_reads_stash(map, x) >= 0) {
        touch_rows(p, TOUCH_READ, RES_STASH, stash_slot(x->unit), 0, what, x);
    }
    if (made >= 0) {
        touch_rows(p, TOUCH_WRITE, RES_STASH, stash_slot(made), 0,
                   touch_name(RES_STASH, made, x->micro), x);
    }
}
static inline void touch_activations(TouchPlan *p, TouchUse use, int rank, int unit,
                                     const Action *x) {
    touch_rows(p, use, RES_ACTIVATIONS, unit, touch_place(x->micro, touch_live(p, rank, unit)),
               touch_name(RES_ACTIVATIONS, unit, x->micro), x);
}
static inline void touch_work(TouchPlan *p, TouchUse use, const Action *x) {
    touch_rows(p, use, RES_WORK, x->unit, x->micro, touch_name(RES_WORK, x->unit, x->micro), x);
}
// What crosses from a part of a unit to another, by the message before `part`: made, or received.
static inline void touch_crosses(TouchPlan *p, TouchUse use, const Action *x, int part, bool back,
                                 bool received) {
    touch_rows(p, use, RES_CROSSES, x->unit, 2 * part + back,
               touch_name(RES_CROSSES, 4 * (int64_t)x->unit + 2 * back + received, x->micro), x);
}
static inline uint64_t touch_recomputed(const Action *x) {
    return touch_name(RES_RECOMPUTED, x->unit, x->micro);
}
static inline void touch_exchange(TouchPlan *p, int rank, const Action *x) {
    const bool back = x->kind == ACT_EXCHANGE_BACK;
    if (!x->rows) { return; }
    // rows of experts: how many go where, and come from where, is among the activations
    touch_activations(p, TOUCH_READ, rank, x->unit, x);
    if (!back || p->program->recompute) {
        touch_rows(p, TOUCH_READ, RES_RECOMPUTED, 0, 0, touch_recomputed(x), x);
    }
    if (back) { touch_work(p, TOUCH_READ, x); }
    touch_crosses(p, TOUCH_FREE, x, x->part, back, false);
    touch_crosses(p, TOUCH_TAKE, x, x->part, back, true);
}
// Is this a pass over the last part of its unit?
static inline bool touch_is_last(const TouchPlan *p, const Action *x) {
    const bool block = x->unit > 0 && x->unit < p->program->map.units - 1;
    return !block || x->part == p->program->map.parts - 1;
}
static inline void touch_forward(TouchPlan *p, int rank, const Action *x) {
    const int units = p->program->map.units;
    const bool trains = !p->program->forward_only, last = touch_is_last(p, x);
    if (x->part) { touch_crosses(p, TOUCH_FREE, x, x->part, false, true); }
    if (x->unit) {
        touch_rows(p, TOUCH_READ, RES_INPUT, x->unit, touch_input_place(p, rank, x->unit, x->micro),
                   touch_input_name(x->unit, x->micro), x);
    }
    // without a backward pass they are not needed any more
    for (int leaves = 0; leaves < (trains || !last ? 1 : 2); leaves++) {
        touch_activations(p,
                          leaves    ? TOUCH_FREE
                          : x->part ? TOUCH_READ
                                    : TOUCH_TAKE,
                          rank, x->unit, x);
    }
    if (p->program->map.parts > 1) { // what a part has made, the next message reads
        touch_rows(p, TOUCH_WRITE, RES_RECOMPUTED, 0, 0, touch_recomputed(x), x);
    } else {
        touch_add(p, TOUCH_WRITE, RES_RECOMPUTED, 0, 0, 1);
    }
    if (!last) {
        touch_crosses(p, TOUCH_TAKE, x, x->part + 1, false, false);
        return;
    }
    if (x->unit + 1 < units) {
        touch_rows(p, TOUCH_WRITE, RES_INPUT, x->unit + 1,
                   touch_input_place(p, rank, x->unit + 1, x->micro),
                   touch_input_name(x->unit + 1, x->micro), x);
    }
    touch_rows(p, TOUCH_ADD, RES_SAMPLES, x->unit, 0, touch_name(RES_SAMPLES, x->unit, 0), x);
}
// What each backward action reads: its activations, its input, the gradient of its output, and
// recomputed activations of blocks.
static inline void touch_saved(TouchPlan *p, int rank, const Action *x) {
    const int head = p->program->map.units - 1;
    touch_activations(p, TOUCH_READ, rank, x->unit, x);
    if (x->unit) {
        touch_rows(p, TOUCH_READ, RES_INPUT, x->unit, touch_input_place(p, rank, x->unit, x->micro),
                   touch_input_name(x->unit, x->micro), x);
    }
    if (x->unit < head && x->kind != ACT_RECOMPUTE) {
        touch_input_gradient(p, TOUCH_READ, rank, x->unit + 1, x);
    }
    if (p->program->recompute && x->unit && x->unit < head && x->kind != ACT_RECOMPUTE) {
        touch_rows(p, TOUCH_READ, RES_RECOMPUTED, 0, 0, touch_recomputed(x), x);
    }
}
// The norms of the units of a rank, which a clipping group of several units adds up; `until`: the
// last of these units.
static inline uint64_t touch_norms(const TouchPlan *p, int rank, int until) {
    uint64_t all = 0;
    for (int u = 1; u <= until; u++) {
        all += touch_computes(p, rank, u) ? touch_name(NAME_NORM, u, 0) : 0;
    }
    return all;
}
static inline void touch_backward_input(TouchPlan *p, int rank, const Action *x) {
    const Program *of = p->program;
    const int head = of->map.units - 1;
    const int64_t place = touch_clip_place(p, rank, x->micro);
    const bool last = touch_is_last(p, x);
    touch_saved(p, rank, x);
    if (!last) { touch_crosses(p, TOUCH_FREE, x, x->part + 1, true, true); }
    if (last) {
        touch_add(p, TOUCH_TAKE, RES_WORKS, 0, 0, 1)->limit = max_i64(1, of->limits[rank].works);
    }
    touch_work(p, last ? TOUCH_TAKE : TOUCH_READ, x);
    if (of->limits[rank].works < 1) { p->touch[p->count - 1].b = -1; }
    if (x->part) {
        touch_crosses(p, TOUCH_TAKE, x, x->part, true, false);
        return;
    }
    touch_input_gradient(p, TOUCH_WRITE, rank, x->unit, x);
    if (program_waits(of)) {
        Touch *t =
            touch_rows(p, TOUCH_ADD, RES_NORMS, 0, place, touch_name(RES_NORMS, 0, x->micro), x);
        t->scale = touch_name(NAME_NORM, x->unit, 0);
        touch_rows(p, TOUCH_WRITE, RES_NORMS, x->unit, place,
                   touch_name(RES_NORMS, x->unit, x->micro), x);
    }
    if (x->unit != head) { return; }
    if (program_crosses(of)) {
        touch_rows(p, TOUCH_WRITE, RES_CROSSING, 0, touch_crossing_place(p, rank, x->micro),
                   touch_name(RES_CROSSING, 0, x->micro), x);
    }
    touch_add(p, TOUCH_WRITE, RES_LOSS, p->cyclic ? x->micro % (2 * p->spans) : x->micro, 0,
              touch_name(RES_LOSS, x->micro, 0));
}
// Where samples are clipped: do the embedding's actions make the norms and the gradient of the
// classifier's table, too, from the head's activations?
static inline bool touch_has_table(const TouchPlan *p, int rank) {
    const UnitMap *map = &p->program->map;
    const bool keeps_apart = p->cyclic && p->cyclic->mode == CYCLIC_SINGLE; // dp.h: lnf
    return map->head_maker == ACTION_KINDS && !keeps_apart && touch_computes(p, rank, 0) &&
           touch_computes(p, rank, map->units - 1);
}
static inline int touch_last_of_stage(const TouchPlan *p, int unit) {
    const UnitMap *map = &p->program->map;
    while (unit + 1 < map->units && map->stage[unit + 1] == map->stage[unit]) { unit++; }
    return unit;
}
static inline void touch_backward_weight(TouchPlan *p, int rank, const Action *x) {
    const Program *of = p->program;
    const UnitMap *map = &of->map;
    const bool crosses = program_crosses(of),
               far = crosses && of->clips == CLIPS_ALL && map->stage[x->unit] > 0,
               scaled = far || program_waits(of) || (crosses && x->unit == 0);
    const int last = far ? touch_last_of_stage(p, x->unit) : -1;
    touch_saved(p, rank, x);
    if (x->unit) {
        touch_add(p, TOUCH_FREE, RES_WORKS, 0, 0, 1)->limit = 1;
        touch_work(p, TOUCH_FREE, x);
    }
    if (x->unit && program_waits(of)) {
        touch_rows(p, TOUCH_READ, RES_NORMS, x->unit, touch_clip_place(p, rank, x->micro),
                   touch_name(RES_NORMS, x->unit, x->micro), x);
    }
    if (scaled) {
        touch_rows(p, TOUCH_READ, far ? RES_FAR_FACTORS : RES_FACTORS, far ? last : 0,
                   touch_clip_place(p, rank, x->micro),
                   touch_name(RES_FACTORS, far ? last : 0, x->micro), x);
    }
    if (x->unit == 0 && map->kept_gathered >= 0 && !p->cyclic) {
        touch_add(p, TOUCH_READ, RES_HELD, map->kept_gathered, 0,
                  touch_version_name(map->kept_gathered, 0));
    }
    const int head = map->units - 1;
    const bool together = touch_has_table(p, rank);
    touch_activations(p, together && x->unit == head ? TOUCH_READ : TOUCH_FREE, rank, x->unit, x);
    if (together && x->unit == 0) { touch_activations(p, TOUCH_FREE, rank, head, x); }
}
// CLIP: norms of the units of this rank, and of other stages, become factors.
static inline void touch_clip(TouchPlan *p, int rank, const Action *x) {
    const Program *of = p->program;
    const int64_t place = touch_clip_place(p, rank, x->micro);
    const uint64_t norms = touch_norms(p, rank, of->map.units - 1);
    if (program_waits(of) && norms) {
        touch_rows(p, TOUCH_READ, RES_NORMS, 0, place, touch_name(RES_NORMS, 0, x->micro), x)
            ->scale = norms;
    } else if (program_waits(of)) { // it makes those of the embedding, and uses them
        touch_rows(p, TOUCH_WRITE, RES_NORMS, 0, place, touch_name(RES_NORMS, 0, x->micro), x);
    }
    const bool embeds = x->unit == 0;
    if (embeds) {
        touch_input_gradient(p, TOUCH_READ, rank, 1, x);
        touch_activations(p, TOUCH_READ, rank, 0, x);
        if (touch_has_table(p, rank)) {
            touch_activations(p, TOUCH_READ, rank, of->map.units - 1, x);
        }
    }
    for (int u = 0; embeds && u < of->map.units; u++) {
        if (!program_sends_norms(of, u)) { continue; }
        touch_rows(p, TOUCH_READ, RES_FAR_NORMS, u, touch_crossing_place(p, rank, x->micro),
                   touch_name(RES_FAR_NORMS, u, x->micro), x);
    }
    touch_rows(p, TOUCH_TAKE, RES_SAMPLES, -1 - rank, x->micro,
               touch_name(RES_FACTORS, 0, x->micro), x); // once
    touch_rows(p, TOUCH_WRITE, RES_FACTORS, 0, place, touch_name(RES_FACTORS, 0, x->micro), x);
}
// TIED: the classifier's part of wte, scaled by the factors of the first stage.
static inline void touch_tied(TouchPlan *p, int rank, const Action *x) {
    const int64_t place = touch_clip_place(p, rank, x->micro);
    touch_rows(p, TOUCH_READ, RES_CROSSING, 0, place, touch_name(RES_CROSSING, 0, x->micro), x);
    touch_rows(p, TOUCH_READ, RES_FAR_FACTORS, x->unit, place,
               touch_name(RES_FACTORS, x->unit, x->micro), x);
}
// Messages of rows. What is sent must be here; what comes adds up from several messages.
static inline void touch_message(TouchPlan *p, int rank, const Action *x) {
    const Program *of = p->program;
    const int64_t place = touch_crossing_place(p, rank, x->micro);
    const bool all = of->clips == CLIPS_ALL;
    switch (x->kind) {
    case ACT_SEND_FORWARD:
    case ACT_RECV_FORWARD:
        touch_rows(p, action_sends(x->kind) ? TOUCH_READ : TOUCH_ADD, RES_INPUT, x->unit + 1,
                   touch_input_place(p, rank, x->unit + 1, x->micro),
                   touch_input_name(x->unit + 1, x->micro), x)
            ->part = true;
        break;
    case ACT_SEND_BACKWARD:
        touch_input_gradient(p, TOUCH_READ, rank, x->unit, x)->part = true;
        break;
    case ACT_RECV_BACKWARD: touch_input_gradient(p, TOUCH_ADD, rank, x->unit, x); break;
    case ACT_SEND_NORM:
        touch_part(p, all ? RES_NORMS : RES_CROSSING, 0, place,
                   touch_name(all ? RES_NORMS : RES_CROSSING, 0, x->micro), x);
        if (all) { p->touch[p->count - 1].scale = touch_norms(p, rank, x->unit); }
        if (all && program_ties(of) && x->unit == of->map.units - 1) {
            touch_part(p, RES_CROSSING, 0, place, touch_name(RES_CROSSING, 0, x->micro), x);
        }
        break;
    case ACT_RECV_NORM:
        touch_rows(p, TOUCH_ADD, RES_FAR_NORMS, x->unit, place,
                   touch_name(RES_FAR_NORMS, x->unit, x->micro), x);
        break;
    case ACT_SEND_FACTOR:
        touch_part(p, RES_FACTORS, 0, place, touch_name(RES_FACTORS, 0, x->micro), x);
        break;
    default:
        touch_rows(p, TOUCH_ADD, RES_FAR_FACTORS, x->unit, place,
                   touch_name(RES_FACTORS, x->unit, x->micro), x);
    }
}
// What an action that computes with, sends, receives or moves rows does with them. The numbers of
// micro-batches may count through all steps.
static inline void touch_passes(TouchPlan *p, int rank, const Action *x) {
    if (action_is(x->kind, COMPUTES | OF_STASH)) { touch_stash(p, rank, x); }
    switch (x->kind) {
    case ACT_FORWARD: touch_forward(p, rank, x); break;
    case ACT_BACKWARD_INPUT: touch_backward_input(p, rank, x); break;
    case ACT_BACKWARD_WEIGHT: touch_backward_weight(p, rank, x); break;
    case ACT_RECOMPUTE:
        touch_saved(p, rank, x);
        if (x->part) { touch_crosses(p, TOUCH_FREE, x, x->part, false, true); }
        if (!touch_is_last(p, x)) { touch_crosses(p, TOUCH_TAKE, x, x->part + 1, false, false); }
        touch_rows(p, TOUCH_WRITE, RES_RECOMPUTED, 0, 0, touch_recomputed(x), x);
        break;
    case ACT_CLIP: touch_clip(p, rank, x); break;
    case ACT_TIED: touch_tied(p, rank, x); break;
    default:
        if (action_of_rows(x->kind)) { touch_message(p, rank, x); }
    }
}

#endif
