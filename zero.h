// zero.h: ZeRO and ZeRO++ as a policy: which states a rank keeps, when they travel, and the actions
// that make them travel (lowering of schedules). state/ has what the actions do.
//
// ZeRO    arXiv 1910.02054. At every stage a rank owns one slice of each storage, sums the slice's
//         gradient over the ranks, and updates the slice. The stages differ in what else a rank
//         keeps, and so in messages:
//         stage  a rank keeps                            messages
//         0      everything whole                        reduce-scatter once a step, all-gather
//                                                        after the update
//         1      slices of master and moments            the same
//         2      also slices of gradients; whole         reduce-scatter in each micro-step,
//                gradients exist for a unit at a time    all-gather after the update
//         3      also slices of parameters; whole ones   two all-gathers and a reduce-scatter in
//                are gathered just before their use      each micro-step
//         A storage that several pipeline stages use travels once a step at every ZeRO stage
//         (layout.h: tied).
// ZeRO++  arXiv 2306.10209, in addition:
//   qwZ   A gather sends INT8 records (ops.h), which the owner makes once, after its update.
//   hpZ   The first gather of a step leaves 1/partition of each storage on every rank: the
//         secondary copy. Until the update, later gathers need only the ranks of one partition
//         (inside a node).
//   qgZ   A reduction is two exchanges of INT4 or INT8 records, inside nodes and then between them.
//         Sums are in fp32, and no value is quantized more than twice (section 3.3 of the paper).
// Norms   are canonical: fp64 sums of squares over chunks of NORM_CHUNK elements of each storage,
//         added exactly, so they do not depend on the layout.
#ifndef ZERO_H
#define ZERO_H

#include "base/base.h"
#include "comm/group.h"
#include "comm/mpi.h"
#include "model/architecture.h"
#include "model/gpt.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "state/layout.h"
#include "state/matrices.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/table.h"

// -------------------------------------------------------------------------------------------------
// What is decided about each storage

// Returns the ZeRO stage at which gradients are stored: they are also divided if sums leave the
// device.
static inline int zero_gradient_stage(const StatePlan *s) {
    bool leave = false;
    for (int i = 0; i < s->model->storages; i++) {
        leave |= row_offloads(&s->rows[i], STATE_GRADIENT);
    }
    return leave ? (int)max_i64(s->policy.stage, state_divided_from(STATE_GRADIENT))
                 : s->policy.stage;
}
// Does the whole gradient of a storage exist only during each use, from stage 2 on? A single rank
// has no gradients to divide.
static inline bool zero_divides(const StorageRow *row) {
    return !row->tied && (row->owners->all.n > 1 || row->sum == SUM_COMES_BACK);
}
// Returns the slot that a state of a storage shares with others; -1: it has a slot of its own, also
// if sharing would not save memory.
static inline int shared_slot(const StorageRow *row, int storage, const State *x) {
    const int64_t n = row->owners->all.n, blocks = row->owners->blocks[row->experts],
                  spared = x->apart ? blocks : blocks * (n - 1) / n;
    const bool shares = row->turns && (x->place == PLACE_HOST || spared >= SHARED_SLOTS);
    return shares ? storage % SHARED_SLOTS + (row->experts ? SHARED_SLOTS : 0) : -1;
}
// Returns the buffer on the device of the states of a kind; *here: the run has them.
static inline StateBuffer zero_buffer(const StatePlan *s, StateKind kind, bool *here) {
    const ZeroPolicy *z = &s->policy;
    const bool used = kind == STATE_PARAMETERS || kind == STATE_GRADIENT; // by computing
    const int stage = kind == STATE_GRADIENT ? zero_gradient_stage(s) : z->stage;
    StateBuffer b = {.layout = stage < state_divided_from(kind) ? BUFFER_FULL
                               : used                           ? BUFFER_SLOTS
                                                                : BUFFER_SLICES,
                     .size = (size_t)state_bytes(kind, s->dtype, 1)};
    *here = true;
    switch (kind) {
    case STATE_MASTER: *here = s->dtype != DTYPE_FP32 || store_delays(s); break;
    case STATE_PARAMETERS: b.travels = true; break;
    case STATE_GRADIENT: *here = b.travels = !z->forward_only; break;
    case STATE_SECONDARY:
        *here = z->partition > 1;
        b.layout = BUFFER_SLICES;
        b.cut = SLICES_SECONDARY;
        break;
    case STATE_RECORDS:
        *here = b.travels = z->quantized_weights;
        b.layout = BUFFER_SLOTS;
        b.cut = SLICES_WEIGHTS;
        break;
    case STATE_ERRORS:
        *here = false;
        for (int i = 0; i < s->model->storages; i++) {
            *here |= z->feedback && row_holds(&s->rows[i]) && s->rows[i].bucket >= 0;
        }
        b.layout = BUFFER_FULL;
        break;
    default: *here = store_keeps_moment(s, kind);
    }
    return b;
}
// Fills the states of a kind. None has its position yet in the buffer, which it returns.
static inline StateBuffer zero_fill_kind(const StatePlan *s, StateKind kind) {
    bool here;
    const StateBuffer b = zero_buffer(s, kind, &here);
    for (int i = 0; i < s->model->storages; i++) {
        StorageRow *row = &s->rows[i];
        // storages that several stages use are not gathered for each use
        const bool exists = here && !(kind == STATE_SECONDARY && row->tied),
                   own = kind != STATE_PREVIOUS && (exists || kind != STATE_MASTER),
                   divided = kind == STATE_GRADIENT && s->policy.accumulates &&
                             b.layout == BUFFER_SLOTS && zero_divides(row);
        const Place away = kind < OPTIMIZER_KINDS && row->disk >> kind & 1 ? PLACE_DISK
                           : kind < HOST_KINDS && row_offloads(row, kind)  ? PLACE_HOST
                                                                           : PLACE_DEVICE;
        State x = {
            .place = exists ? away : PLACE_NONE,
            .copy_of = own ? kind : STATE_PARAMETERS,
            // what is gathered must not overwrite parameters that are not what was quantized
            .apart = divided || (kind == STATE_PARAMETERS && s->policy.quantized_weights),
            .versions = 1,
            .whole = -1,
        };
        x.slot = shared_slot(row, i, &x);
        row->states[kind] = x;
    }
    return b;
}
// Returns the first storage of the bucket in which a storage's quantized gradient travels; -1: it
// travels alone. The storages of a bucket are neighbours, have the same owners, and are always
// reduced one directly after another. So tied ones, which are reduced at the end of the step, are
// apart from the others; and so is the head's own table, whose gradient the head's input part
// makes: in a zero-bubble schedule the head's other gradients follow micro-batches later.
// *elements: of the bucket so far, from the last storage on.
static inline int zero_bucket(const StatePlan *s, int storage, int64_t *elements) {
    const StorageRow *row = &s->rows[storage];
    const bool alike = storage + 1 < s->model->storages && row->owners == row[1].owners &&
                       row->tied == row[1].tied && storage + 1 != s->model->classifier,
               joins = alike && *elements < BUCKET_ELEMENTS;
    *elements = gpt_storage_elements(s->model, storage) + (joins ? *elements : 0);
    return !s->policy.quantized_gradients || row->owners->all.n == 1 ? -1
           : joins                                                   ? row[1].bucket
                                                                     : storage;
}
// Ends the program if hpZ's partitions are larger than the ranks of a stage.
static inline void zero_check_partition(const StatePlan *s) {
    const int partition = s->policy.partition;
    for (int i = 0; i < s->placement->stages; i++) {
        const int replicas = s->placement->stage[i].replicas;
        if (partition <= replicas) { continue; }
        die(EXIT_INPUT,
            HINT_ON_RANKS(replicas, "a partition is some of a stage's ranks, those of a node"),
            "--zero-hpz-partition-size %d is more than the %d ranks of stage %d", partition,
            replicas, i);
    }
}
// Fills what ZeRO decides, after the owners are known and what is offloaded.
static inline void zero_fill(StatePlan *s) {
    const int gradient_stage = zero_gradient_stage(s);
    int64_t elements = 0;
    for (int i = s->model->storages - 1; i >= 0; i--) {
        s->rows[i].bucket = zero_bucket(s, i, &elements);
    }
    for (int k = 0; k < STATE_KINDS; k++) { s->device[k] = zero_fill_kind(s, k); }
    for (int i = 0; i < s->model->storages; i++) {
        StorageRow *row = &s->rows[i];
        const bool matrices = s->policy.matrices && gpt_storage_is_block(s->model, i);
        row->gathers = (s->policy.stage >= 3 && !row->tied) || row_offloads(row, STATE_PARAMETERS);
        row->reduces_often = zero_divides(row) && gradient_stage >= 2;
        row->param_slot = row->gathers ? row->states[STATE_PARAMETERS].slot : -1;
        row->grad_slot = row->reduces_often ? row->states[STATE_GRADIENT].slot : -1;
        row->wave = matrices ? matrices_wave(s->model, s->rows, i) : -1;
    }
}

// -------------------------------------------------------------------------------------------------
// Lowering: adds the store's actions to a schedule

// Makes the UnitMap of a plan: which storages a unit uses, and what is decided about them. clips:
// samples are clipped. The plan must outlive the map; program_free frees what is the map's own.
static inline UnitMap unit_map(const StatePlan *s, bool clips) {
    const GptModel *m = s->model;
    const Offload *o = s->policy.offload;
    const int units = m->units;
    const bool tied = s->rows[0].tied;
    UnitMap map = {
        .units = units,
        .storages = m->storages,
        .parts = unit_parts(gpt_unit_spec(m, UNIT_BLOCK)),
        .of_unit = (int(*)[2])new_array(int, 2 * units, "unit map"),
        .of_unit_count = new_array(int, units, "unit map"),
        // the head's part of the gradient of wte
        .head_maker = !clips            ? ACT_BACKWARD_INPUT
                      : !gpt_is_tied(m) ? ACT_BACKWARD_WEIGHT
                      : tied            ? ACT_TIED
                                        : ACTION_KINDS,
        .classifier = m->classifier,
        .rows = s->rows,
        .experts_made_early = gpt_takes_pieces(m),
        .copies = s->policy.partition > 1,
        .cpu_update = o && o->cpu_update,
        .delays = store_delays(s),
        .kept_gathered = s->policy.keeps_gathered && !tied ? 0 : -1,
    };
    if (o) { map.stash = new_array(bool, units, "unit map"); }
    if (clips && s->placement->stages > 1) { map.stage = new_array(int, units, "unit map"); }
    for (int u = 0; u < units; u++) {
        map.of_unit_count[u] = gpt_unit_storages(m, u, map.of_unit[u]);
        if (map.stage) { map.stage[u] = placement_stage_of_unit(s->placement, u); }
        if (o && gpt_unit_class(m, u) == UNIT_BLOCK) {
            map.stash[u] = row_offloads(&s->rows[map.of_unit[u][0]], STATE_ACTIVATIONS);
        }
    }
    return map;
}
// With recomputation a block's input is offloaded instead of the activations inside. A stage's
// first block has received its input in a message, which stays.
static inline void unit_map_recomputes(UnitMap *map, const Placement *placement) {
    map->stash_inputs = map->stash != NULL;
    for (int s = 0; map->stash && s < placement->stages; s++) {
        map->stash[placement->stage[s].first_unit] = false;
    }
}

// Adds an action of a storage.
static inline void lower_add(Schedule *s, ActionKind kind, int storage) {
    schedule_add(s, action_make(kind, -1, storage, -1));
}
// Does the next action in this direction read the storage? Messages between are skipped: the ranks
// of a stage have different ones, and must gather alike. So are weight parts, because neighbours
// may share a storage.
static inline bool lower_neighbour_reads(const UnitMap *map, const Schedule *s, int i,
                                         int direction, int storage) {
    do {
        i += direction;
    } while (i >= 0 && i < s->count &&
             (action_is_message(s->actions[i].kind) || s->actions[i].kind == ACT_BACKWARD_WEIGHT));
    return i >= 0 && i < s->count && action_reads_parameters(s->actions[i].kind) &&
           unit_uses(map, s->actions[i].unit, storage);
}
// Adds ACQUIRE before and RELEASE after each action that reads parameters. Neighbours that read the
// same storage need neither between them.
static inline void lower_uses(const UnitMap *map, Schedule *in) {
    Schedule out = {};
    for (int i = 0; i < in->count; i++) {
        const Action a = in->actions[i];
        const int uses = action_reads_parameters(a.kind) ? map->of_unit_count[a.unit] : 0;
        const int *used = uses ? map->of_unit[a.unit] : NULL;
        for (int k = 0; k < uses; k++) {
            if (!lower_neighbour_reads(map, in, i, -1, used[k])) {
                lower_add(&out, ACT_ACQUIRE, used[k]);
            }
        }
        schedule_add(&out, a);
        for (int k = 0; k < uses; k++) {
            const bool kept = a.kind == ACT_BACKWARD_INPUT && used[k] == map->kept_gathered;
            if (!kept && !lower_neighbour_reads(map, in, i, 1, used[k])) {
                lower_add(&out, ACT_RELEASE, used[k]);
            }
        }
        if (a.kind == ACT_BACKWARD_WEIGHT && a.unit == 0 && map->kept_gathered >= 0) {
            lower_add(&out, ACT_RELEASE, map->kept_gathered);
        }
    }
    schedule_replace(in, out);
}

// Adds PREFETCHes, in the order of the uses: each as early as its storage, and the others in its
// slot, are released, but at most 2 SHARED_SLOTS storages ahead. A gather uses the hpZ secondary
// copies (near) if an earlier gather of the step has made them. A pass that does not train uses
// them if they exist. Parameters that stay whole are not gathered for their uses.
static inline void lower_gathers(const UnitMap *map, Schedule *in, bool training) {
    bool any = false;
    for (int i = 0; i < map->storages; i++) { any |= map->rows[i].gathers; }
    if (!any) { return; }
    Schedule out = {};
    // [storages] gathered and not yet released; gathered before
    bool *gathered = new_array(bool, map->storages, "lowering"),
         *copied = new_array(bool, map->storages, "lowering"), in_use[ALL_SLOTS] = {false};
    int ahead = 0; // gathers whose ACQUIRE is still to come
    for (int i = 0, next = 0; i < in->count; i++) {
        for (; next < in->count && ahead < 2 * SHARED_SLOTS; next++) {
            Action a = in->actions[next];
            if (a.kind != ACT_ACQUIRE || !map->rows[a.storage].gathers) { continue; }
            int slot = map->rows[a.storage].param_slot;
            if (gathered[a.storage] || (slot >= 0 && in_use[slot])) { break; }
            a.kind = ACT_PREFETCH;
            a.secondary = map->copies && (copied[a.storage] || !training);
            gathered[a.storage] = copied[a.storage] = true;
            ahead++;
            if (slot >= 0) { in_use[slot] = true; }
            schedule_add(&out, a);
        }
        Action a = in->actions[i];
        schedule_add(&out, a);
        ahead -= a.kind == ACT_ACQUIRE && map->rows[a.storage].gathers;
        if (a.kind != ACT_RELEASE) { continue; }
        gathered[a.storage] = false;
        if (map->rows[a.storage].param_slot >= 0) {
            in_use[map->rows[a.storage].param_slot] = false;
        }
    }
    free_all(gathered, copied);
    schedule_replace(in, out);
}

// Adds REDUCE right after a storage's last contribution, of the step or of each micro-batch. The
// order is the same on all ranks of a stage; in sequential schedules lnf, blocks from the last to
// the first, then wpe and wte. Storages that several stages use are reduced last in the step, after
// the rank's last message too. So every rank reduces what it shares with few ranks before what it
// shares with more: no cycle of ranks waits for each other. And neither a reduction nor a message
// waits behind a sum for which other stages must first finish their step.
static inline void lower_reductions(const UnitMap *map, Schedule *in, int micro_batches) {
    Schedule out = {};
    // [micro-batches][storages] one more than the index of the last contribution
    int *last = new_array(int, micro_batches * map->storages, "lowering");
    for (int i = 0; i < in->count; i++) {
        const Action *a = &in->actions[i];
        for (int k = 0; action_computes(a->kind) && k < map->of_unit_count[a->unit]; k++) {
            int storage = map->of_unit[a->unit][k],
                span = map->rows[storage].reduces_often ? a->micro : 0;
            if (action_contributes(map, a, storage)) {
                last[span * map->storages + storage] = i + 1;
            }
        }
    }
    for (int i = 0; i < in->count; i++) {
        Action a = in->actions[i];
        schedule_add(&out, a);
        // a unit's storages, from the last to the first
        for (int k = 1; action_computes(a.kind) && k >= 0; k--) {
            int storage = k < map->of_unit_count[a.unit] ? map->of_unit[a.unit][k] : -1;
            bool often = storage >= 0 && map->rows[storage].reduces_often;
            bool due = storage >= 0 && !map->rows[storage].tied &&
                       last[(often ? a.micro : 0) * map->storages + storage] == i + 1;
            if (due) {
                schedule_add(&out, action_make(ACT_REDUCE, -1, storage, often ? a.micro : -1));
            }
        }
    }
    for (int storage = map->storages - 1; storage >= 0; storage--) {
        if (map->rows[storage].tied && last[storage]) { lower_add(&out, ACT_REDUCE, storage); }
    }
    free(last);
    schedule_replace(in, out);
}

// Returns the storage to whose gradient an action contributes, if it is this one or another in its
// slot; else -1.
static inline int lower_slot_user(const UnitMap *map, const Action *a, int storage) {
    for (int k = 0; action_computes(a->kind) && k < map->of_unit_count[a->unit]; k++) {
        const int other = map->of_unit[a->unit][k];
        const bool shares =
            other == storage || (map->rows[storage].grad_slot >= 0 &&
                                 map->rows[other].grad_slot == map->rows[storage].grad_slot);
        if (shares && action_contributes(map, a, other)) { return other; }
    }
    return -1;
}
// Returns the next storage to use this one's gradient slot, from action i on; -1: none.
static inline int lower_next_in_slot(const UnitMap *map, const Schedule *s, int i, int storage) {
    int next = -1;
    for (; i < s->count && next < 0; i++) { next = lower_slot_user(map, &s->actions[i], storage); }
    return next;
}
// Adds EVICT_SUM after the REDUCE of gradients on the host. If one rank has the storage, at once,
// followed by FETCH_SUM of the next storage in the slot, if its sum was evicted before. Otherwise
// after the next unit, during whose work the sum travels between ranks, or when its slot is needed.
// Sums of several stages are evicted last: they wait for other stages, which may wait for messages
// of this rank.
static inline void lower_sums(const UnitMap *map, Schedule *in) {
    bool any = false;
    for (int i = 0; i < map->storages; i++) { any |= map->rows[i].sum != SUM_STAYS; }
    if (!any) { return; }
    Schedule out = {};
    bool *on_the_host = new_array(bool, map->storages, "lowering"); // the sum, at this place
    int waits = -1;
    for (int i = 0; i < in->count; i++) {
        const Action a = in->actions[i];
        const bool on_host = a.kind == ACT_REDUCE && map->rows[a.storage].sum;
        if (waits >= 0 && (a.kind == ACT_REDUCE || lower_slot_user(map, &a, waits) >= 0)) {
            lower_add(&out, ACT_EVICT_SUM, waits);
            waits = -1;
        }
        schedule_add(&out, a);
        if (on_host && map->rows[a.storage].sum == SUM_IS_ADDED && !map->rows[a.storage].tied) {
            waits = a.storage;
        }
        if (!on_host || map->rows[a.storage].sum != SUM_COMES_BACK) { continue; }
        on_the_host[a.storage] = true;
        lower_add(&out, ACT_EVICT_SUM, a.storage);
        const int next = lower_next_in_slot(map, in, i, a.storage);
        if (next >= 0 && on_the_host[next]) { lower_add(&out, ACT_FETCH_SUM, next); }
    }
    if (waits >= 0) { lower_add(&out, ACT_EVICT_SUM, waits); }
    for (int i = 0; i < in->count; i++) {
        const Action a = in->actions[i];
        if (a.kind == ACT_REDUCE && map->rows[a.storage].sum && map->rows[a.storage].tied) {
            lower_add(&out, ACT_EVICT_SUM, a.storage);
        }
    }
    free(on_the_host);
    schedule_replace(in, out);
}

// Pieces in the order of their updates: what was brought last to where the next one needs it.
typedef struct {
    const UnitMap *map;
    const bool *used; // [storages] the rank updates it
    bool on_disk;     // only pieces on disk
    ActionKind kind;  // of the action that brings a piece
    int storage, piece;
    bool second; // the pieces of the storage's wave come for the second time
} PieceCursor;
// Moves on to the next storage: of a wave, all storages come twice.
static inline void lower_next_storage(PieceCursor *c) {
    const UnitMap *map = c->map;
    const bool last = map->rows[c->storage].wave == c->storage;
    c->piece = 0;
    c->storage++;
    if (!last) { return; }
    c->second = !c->second;
    for (const int wave = c->storage - 1; c->second && c->storage > 0; c->storage--) {
        if (map->rows[c->storage - 1].wave != wave) { break; }
    }
}
// Adds the actions that bring the next `count` pieces.
static inline void lower_next_pieces(PieceCursor *c, Schedule *s, int count) {
    const UnitMap *map = c->map;
    for (int i = 0; i < count; i++) {
        while (c->storage < map->storages &&
               (!c->used[c->storage] || (c->on_disk && !map->rows[c->storage].disk) ||
                c->piece >= map->rows[c->storage].pieces)) {
            lower_next_storage(c);
        }
        if (c->storage == map->storages) { return; }
        Action a = action_make(c->kind, -1, c->storage, -1);
        a.use = c->piece++ + (c->second ? map->rows[c->storage].pieces : 0);
        schedule_add(s, a);
    }
}
// Adds UPDATE of a storage (or DIRECT), piece by piece if states are on the host. Each piece
// returns after its update, which frees a buffer for the next piece but one. A piece on disk is
// also written there, which frees its buffer on the host.
static inline void lower_update(PieceCursor *moves, PieceCursor *reads, Schedule *s, int storage,
                                ActionKind kind) {
    const UnitMap *map = moves->map;
    Action write = action_make(ACT_WRITE, -1, storage, -1),
           update = action_make(kind, -1, storage, -1),
           back = action_make(map->cpu_update ? ACT_FETCH : ACT_EVICT, -1, storage, -1);
    const int first =
        kind == ACT_UPDATE && map_has_matrices(map, storage) ? map->rows[storage].pieces : 0;
    if (!map->rows[storage].pieces) { schedule_add(s, update); }
    for (int piece = first; piece < first + map->rows[storage].pieces; piece++) {
        update.use = back.use = write.use = piece;
        schedule_add(s, update);
        schedule_add(s, back);
        if (map->rows[storage].disk) {
            schedule_add(s, write);
            lower_next_pieces(reads, s, 1);
        }
        lower_next_pieces(moves, s, 1);
    }
}
// Adds what comes before the UPDATEs of a wave of storages with matrices.
static inline void lower_wave(PieceCursor *moves, PieceCursor *reads, Schedule *s, int first) {
    const UnitMap *map = moves->map;
    for (int i = first; i <= map->rows[first].wave; i++) {
        if (moves->used[i]) { lower_update(moves, reads, s, i, ACT_DIRECT); }
    }
    for (int i = first; i <= map->rows[first].wave; i++) {
        if (moves->used[i]) { lower_add(s, ACT_ORTHOGONALISE, i); }
    }
}
// Adds the FETCHes of the parameters of a storage, whose delayed update was made during the step.
static inline void lower_fetches(const UnitMap *map, Schedule *s, int storage) {
    Action fetch = action_make(ACT_FETCH, -1, storage, -1);
    for (; fetch.use < map->rows[storage].pieces; fetch.use++) { schedule_add(s, fetch); }
}
// Adds delayed UPDATEs, one after each forward action of the step's first micro-batches, in the
// order in which the gradients that they need are overwritten.
static inline void lower_delayed_updates(const UnitMap *map, Schedule *in) {
    Schedule out = {};
    bool *waiting = new_array(bool, map->storages, "lowering"); // for its update
    for (int i = 0; i < in->count; i++) {
        waiting[max_i64(0, in->actions[i].storage)] |= in->actions[i].kind == ACT_EVICT_SUM;
    }
    for (int i = 0; i < in->count; i++) {
        const Action a = in->actions[i];
        int next = map->storages - 1;
        while (next >= 0 && !waiting[next]) { next--; }
        if (a.kind == ACT_EVICT_SUM && waiting[a.storage]) {
            lower_add(&out, ACT_UPDATE, a.storage);
            waiting[a.storage] = false;
        }
        schedule_add(&out, a);
        if (a.kind == ACT_FORWARD && next >= 0) {
            lower_add(&out, ACT_UPDATE, next);
            waiting[next] = false;
        }
    }
    free(waiting);
    schedule_replace(in, out);
}
// Adds NORM, then UPDATEs in the order in which the next forward pass needs the parameters;
// parameters that stay whole are gathered at once. States that the device updates are fetched
// before NORM, unless gradients are on the host, whose sums are complete only then.
static inline void lower_updates(const UnitMap *map, Schedule *s) {
    bool *used = new_array(bool, map->storages, "lowering");
    bool waits = map->cpu_update;
    for (int i = 0; i < s->count; i++) {
        if (s->actions[i].kind == ACT_REDUCE) { used[s->actions[i].storage] = true; }
        waits |= s->actions[i].kind == ACT_EVICT_SUM;
    }
    PieceCursor reads = {.map = map, .used = used, .on_disk = true, .kind = ACT_READ};
    PieceCursor moves = reads;
    moves.on_disk = false;
    // the states, or, if the CPU updates, the gradient
    moves.kind = map->cpu_update ? ACT_EVICT : ACT_FETCH;
    moves.storage = map->delays ? map->storages : 0;
    Schedule out = {};
    lower_next_pieces(&reads, &out, DISK_PIECES); // they run during the step
    if (out.count) {
        for (int i = 0; i < s->count; i++) { schedule_add(&out, s->actions[i]); }
        schedule_replace(s, out);
    }
    if (!waits) { lower_next_pieces(&moves, s, MOVING_PIECES); }
    lower_add(s, ACT_NORM, -1);
    if (waits) { lower_next_pieces(&moves, s, MOVING_PIECES); }
    for (int storage = 0; storage < map->storages; storage++) {
        Action gather = action_make(ACT_PREFETCH, -1, storage, -1);
        gather.version = 1;
        const bool opens = map_has_matrices(map, storage) &&
                           (!storage || map->rows[storage - 1].wave != map->rows[storage].wave);
        if (opens) { lower_wave(&moves, &reads, s, storage); }
        if (used[storage] && map->delays) { lower_fetches(map, s, storage); }
        if (used[storage] && !map->delays) { lower_update(&moves, &reads, s, storage, ACT_UPDATE); }
        if (used[storage] && !map->rows[storage].gathers) { schedule_add(s, gather); }
    }
    free(used);
}

// Adds all of these actions to every rank's schedule. A rank reduces and gathers what its own
// compute actions use.
static inline void zero_lower(Program *p, bool training) {
    for (int r = 0; r < p->ranks; r++) {
        lower_uses(&p->map, &p->rank[r]);
        lower_gathers(&p->map, &p->rank[r], training);
        if (!training) { continue; }
        lower_reductions(&p->map, &p->rank[r], p->micro_batches);
        lower_sums(&p->map, &p->rank[r]);
        if (p->map.delays) { lower_delayed_updates(&p->map, &p->rank[r]); }
        lower_updates(&p->map, &p->rank[r]);
    }
}

#endif
