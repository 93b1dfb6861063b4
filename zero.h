// zero.h: ZeRO and ZeRO++ as a policy: which states a rank keeps, when these travel, and the actions
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

#include "engine/schedule.h" // actions
#include "state/update.h"    // what they do

// -------------------------------------------------------------------------------------------------
// Lowering: adds the store's actions to a schedule

// Makes the UnitMap of a model: which storages a unit uses, and where these are, which share slots.
// clips: samples are clipped. program_free frees its tables.
static inline UnitMap unit_map(const GptModel *m, const ZeroPolicy *policy,
                               const Placement *placement, bool clips) {
    UnitMap map;
    const size_t storages = (size_t)m->storages;
    memset(&map, 0, sizeof map);
    map.units = m->units;
    map.storages = m->storages;
    map.of_unit = (int(*)[2])new_array(int, 2 * m->units, "unit map");
    map.of_unit_count = new_array(int, m->units, "unit map");
    map.param_slot = new_array(int, storages, "unit map");
    map.grad_slot = new_array(int, storages, "unit map");
    map.gathers = new_array(bool, storages, "unit map");
    map.reduces_often = new_array(bool, storages, "unit map");
    map.tied = new_array(bool, storages, "unit map");
    map.pieces = new_array(int, storages, "unit map");
    map.on_disk = new_array(bool, storages, "unit map");
    map.sums = new_array(SumPlace, storages, "unit map");
    map.cpu_update = policy->offload && policy->offload->cpu_update;
    map.delays = policy->offload && policy->offload->delays;
    if (policy->offload) { map.stash = new_array(bool, m->units, "unit map"); }
    for (int u = 1; u < m->units - 1 && map.stash; u++) {
        int used[2];
        gpt_unit_storages(m, u, used);
        map.stash[u] = offload_has(policy->offload, used[0], STATE_ACTIVATIONS);
    }
    for (int u = 0; u < m->units; u++) {
        map.of_unit_count[u] = gpt_unit_storages(m, u, map.of_unit[u]);
    }
    Owners owners = owners_make(m, placement);
    // the head's part of the gradient of wte
    map.head_maker = !clips ? ACT_BACKWARD_INPUT : owners.tied[0] ? ACT_TIED : ACTION_KINDS;
    for (int s = 0; s < m->storages; s++) {
        map.reduces_often[s] = policy->p2p != NULL;
        map.param_slot[s] = zero_param_slot(m, policy, &owners, s);
        map.grad_slot[s] = zero_grad_slot(policy, &owners, s);
        map.sums[s] = zero_sum_place(policy->offload, &owners, s);
        map.pieces[s] = offload_pieces(m, policy, &owners, s);
        map.on_disk[s] = offload_stored(policy->offload, s) > 0;
        map.gathers[s] = zero_gathers(policy, &owners, s);
        map.reduces_often[s] |= zero_reduces_often(policy, &owners, s);
        map.tied[s] = owners.tied[s];
    }
    if (clips && placement->stages > 1) { map.stage = new_array(int, m->units, "unit map"); }
    for (int u = 0; map.stage && u < m->units; u++) {
        map.stage[u] = placement_stage_of_unit(placement, u);
    }
    map.lent = policy->keeps_gathered && !owners.tied[0] ? 0 : -1;
    owners_free(&owners);
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

// Does the next action in this direction read the storage? Messages between are skipped: the ranks
// of a stage have different ones, and must gather alike. So are weight parts, because neighbours
// may share a storage.
static inline bool lower_neighbour_reads(const UnitMap *map, const Schedule *s, int i,
                                         int direction, int storage) {
    do {
        i += direction;
    } while (i >= 0 && i < s->count &&
             (action_is_message(s->actions[i].kind) || s->actions[i].kind == ACT_BACKWARD_WEIGHT));
    if (i < 0 || i >= s->count || !action_reads_parameters(s->actions[i].kind)) { return false; }
    const int *of = map->of_unit[s->actions[i].unit];
    return of[0] == storage || (map->of_unit_count[s->actions[i].unit] > 1 && of[1] == storage);
}
// Adds ACQUIRE before and RELEASE after each action that reads parameters. Neighbours that read the
// same storage need neither between them.
static inline void lower_uses(const UnitMap *map, Schedule *in) {
    Schedule out = {NULL, 0, 0};
    for (int i = 0; i < in->count; i++) {
        Action a = in->actions[i];
        bool reads = action_reads_parameters(a.kind);
        for (int k = 0; reads && k < map->of_unit_count[a.unit]; k++) {
            const bool held = lower_neighbour_reads(map, in, i, -1, map->of_unit[a.unit][k]);
            if (!held) {
                schedule_add(&out, action_make(ACT_ACQUIRE, -1, map->of_unit[a.unit][k], -1));
            }
        }
        schedule_add(&out, a);
        for (int k = 0; reads && k < map->of_unit_count[a.unit]; k++) {
            const bool lent = a.kind == ACT_BACKWARD_INPUT && map->of_unit[a.unit][k] == map->lent;
            if (!lent && !lower_neighbour_reads(map, in, i, 1, map->of_unit[a.unit][k])) {
                schedule_add(&out, action_make(ACT_RELEASE, -1, map->of_unit[a.unit][k], -1));
            }
        }
        if (a.kind == ACT_BACKWARD_WEIGHT && a.unit == 0 && map->lent >= 0) {
            schedule_add(&out, action_make(ACT_RELEASE, -1, map->lent, -1));
        }
    }
    schedule_replace(in, out);
}

// Adds PREFETCHes, in the order of the uses: each as early as its storage, and the others in its
// slot, are released, but at most 2 SHARED_SLOTS storages ahead. A gather uses the hpZ secondary
// copies (near) if an earlier gather of the step has made them. A pass that does not train uses
// them if they exist. Parameters that stay whole are not gathered for their uses.
static inline void lower_gathers(const UnitMap *map, const ZeroPolicy *policy, Schedule *in,
                                 bool training) {
    Schedule out = {NULL, 0, 0};
    // [storages] gathered, and not yet released
    bool *busy = new_array(bool, map->storages, "lowering");
    bool *seen = new_array(bool, map->storages, "lowering"), taken[SHARED_SLOTS] = {false};
    int ahead = 0; // gathers whose ACQUIRE is still to come
    for (int i = 0, next = 0; i < in->count; i++) {
        for (; next < in->count && ahead < 2 * SHARED_SLOTS; next++) {
            Action a = in->actions[next];
            if (a.kind != ACT_ACQUIRE || !map->gathers[a.storage]) { continue; }
            int slot = map->param_slot[a.storage];
            if (busy[a.storage] || (slot >= 0 && taken[slot])) { break; }
            a.kind = ACT_PREFETCH;
            a.near = policy->partition > 1 && (seen[a.storage] || !training);
            busy[a.storage] = seen[a.storage] = true;
            ahead++;
            if (slot >= 0) { taken[slot] = true; }
            schedule_add(&out, a);
        }
        Action a = in->actions[i];
        schedule_add(&out, a);
        ahead -= a.kind == ACT_ACQUIRE && map->gathers[a.storage];
        if (a.kind != ACT_RELEASE) { continue; }
        busy[a.storage] = false;
        if (map->param_slot[a.storage] >= 0) { taken[map->param_slot[a.storage]] = false; }
    }
    free(busy);
    free(seen);
    schedule_replace(in, out);
}

// Adds REDUCE right after a storage's last contribution, of the step or of each micro-batch. The
// order is the same on all ranks of a stage; in sequential schedules lnf, blocks from the last to
// the first, then wpe and wte. Storages that several stages use are reduced last in the step, after
// the rank's last message too. So every rank reduces what it shares with few ranks before what it
// shares with more: no cycle of ranks waits for each other. And neither a reduction nor a message
// waits behind a sum for which other stages must first finish their step.
static inline void lower_reductions(const UnitMap *map, Schedule *in, int micro_batches) {
    Schedule out = {NULL, 0, 0};
    // [micro-batches][storages]
    int *last = (int *)checked_malloc((size_t)map->storages * (size_t)micro_batches * sizeof(int),
                                      "lowering");
    for (int i = 0; i < micro_batches * map->storages; i++) { last[i] = -1; }
    for (int i = 0; i < in->count; i++) {
        const Action *a = &in->actions[i];
        for (int k = 0; action_computes(a->kind) && k < map->of_unit_count[a->unit]; k++) {
            int storage = map->of_unit[a->unit][k],
                span = map->reduces_often[storage] ? a->micro : 0;
            if (action_contributes(map, a, storage)) { last[span * map->storages + storage] = i; }
        }
    }
    for (int i = 0; i < in->count; i++) {
        Action a = in->actions[i];
        schedule_add(&out, a);
        // a unit's storages, from the last to the first
        for (int k = 1; action_computes(a.kind) && k >= 0; k--) {
            int storage = k < map->of_unit_count[a.unit] ? map->of_unit[a.unit][k] : -1;
            bool often = storage >= 0 && map->reduces_often[storage];
            bool due = storage >= 0 && !map->tied[storage] &&
                       last[(often ? a.micro : 0) * map->storages + storage] == i;
            if (due) {
                schedule_add(&out, action_make(ACT_REDUCE, -1, storage, often ? a.micro : -1));
            }
        }
    }
    for (int storage = map->storages - 1; storage >= 0; storage--) {
        if (map->tied[storage] && last[storage] >= 0) {
            schedule_add(&out, action_make(ACT_REDUCE, -1, storage, -1));
        }
    }
    free(last);
    schedule_replace(in, out);
}

// Returns the storage to whose gradient an action contributes, if it is this one or another in its
// slot; else -1.
static inline int lower_slot_user(const UnitMap *map, const Action *a, int storage) {
    for (int k = 0; action_computes(a->kind) && k < map->of_unit_count[a->unit]; k++) {
        const int other = map->of_unit[a->unit][k];
        const bool shares = other == storage || (map->grad_slot[storage] >= 0 &&
                                                 map->grad_slot[other] == map->grad_slot[storage]);
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
    Schedule out = {NULL, 0, 0};
    bool *left = new_array(bool, map->storages, "lowering");
    int waits = -1;
    for (int i = 0; i < in->count; i++) {
        const Action a = in->actions[i];
        const bool far = a.kind == ACT_REDUCE && map->sums[a.storage];
        if (waits >= 0 && (a.kind == ACT_REDUCE || lower_slot_user(map, &a, waits) >= 0)) {
            schedule_add(&out, action_make(ACT_EVICT_SUM, -1, waits, -1));
            waits = -1;
        }
        schedule_add(&out, a);
        if (far && map->sums[a.storage] == SUM_IS_ADDED && !map->tied[a.storage]) {
            waits = a.storage;
        }
        if (!far || map->sums[a.storage] != SUM_COMES_BACK) { continue; }
        left[a.storage] = true;
        schedule_add(&out, action_make(ACT_EVICT_SUM, -1, a.storage, -1));
        const int next = lower_next_in_slot(map, in, i, a.storage);
        if (next >= 0 && left[next]) {
            schedule_add(&out, action_make(ACT_FETCH_SUM, -1, next, -1));
        }
    }
    if (waits >= 0) { schedule_add(&out, action_make(ACT_EVICT_SUM, -1, waits, -1)); }
    for (int i = 0; i < in->count; i++) {
        const Action a = in->actions[i];
        if (a.kind == ACT_REDUCE && map->sums[a.storage] && map->tied[a.storage]) {
            schedule_add(&out, action_make(ACT_EVICT_SUM, -1, a.storage, -1));
        }
    }
    free(left);
    schedule_replace(in, out);
}

// Adds the action that brings the next piece, in the order of updates, to where it is updated:
// FETCH of the states, or, if the CPU updates, EVICT of the gradient. *at: storage and piece, which
// it advances.
static inline void lower_next_piece(const UnitMap *map, const bool *used, Schedule *s, int at[2]) {
    while (at[0] < map->storages && (!used[at[0]] || at[1] >= map->pieces[at[0]])) {
        at[0]++;
        at[1] = 0;
    }
    if (at[0] == map->storages) { return; }
    Action a = action_make(map->cpu_update ? ACT_EVICT : ACT_FETCH, -1, at[0], -1);
    a.use = at[1]++;
    schedule_add(s, a);
}
// Adds READ of the next piece on disk. *at as above.
static inline void lower_next_read(const UnitMap *map, const bool *used, Schedule *s, int at[2]) {
    while (at[0] < map->storages &&
           (!used[at[0]] || !map->on_disk[at[0]] || at[1] >= map->pieces[at[0]])) {
        at[0]++;
        at[1] = 0;
    }
    if (at[0] == map->storages) { return; }
    Action a = action_make(ACT_READ, -1, at[0], -1);
    a.use = at[1]++;
    schedule_add(s, a);
}
// Adds UPDATE of a storage, piece by piece if states are on the host. Each piece returns after its
// update, which frees a buffer for the next piece but one. A piece on disk is also written there,
// which frees its buffer on the host.
static inline void lower_update(const UnitMap *map, const bool *used, Schedule *s, int storage,
                                int at[2], int read[2]) {
    Action write = action_make(ACT_WRITE, -1, storage, -1),
           update = action_make(ACT_UPDATE, -1, storage, -1),
           back = action_make(map->cpu_update ? ACT_FETCH : ACT_EVICT, -1, storage, -1);
    if (!map->pieces[storage]) { schedule_add(s, update); }
    for (int piece = 0; piece < map->pieces[storage]; piece++) {
        update.use = back.use = write.use = piece;
        schedule_add(s, update);
        schedule_add(s, back);
        if (map->on_disk[storage]) {
            schedule_add(s, write);
            lower_next_read(map, used, s, read);
        }
        lower_next_piece(map, used, s, at);
    }
}
// Adds the FETCHes of the parameters of a storage, whose delayed update was made during the step.
static inline void lower_fetches(const UnitMap *map, Schedule *s, int storage) {
    Action fetch = action_make(ACT_FETCH, -1, storage, -1);
    for (; fetch.use < map->pieces[storage]; fetch.use++) { schedule_add(s, fetch); }
}
// Adds delayed UPDATEs, one after each forward action of the step's first micro-batches, in the
// order in which the gradients that they need are overwritten.
static inline void lower_delayed_updates(const UnitMap *map, Schedule *in) {
    Schedule out = {NULL, 0, 0};
    bool *left = new_array(bool, map->storages, "lowering");
    for (int i = 0; i < in->count; i++) {
        left[max_i64(0, in->actions[i].storage)] |= in->actions[i].kind == ACT_EVICT_SUM;
    }
    for (int i = 0; i < in->count; i++) {
        const Action a = in->actions[i];
        int next = map->storages - 1;
        while (next >= 0 && !left[next]) { next--; }
        if (a.kind == ACT_EVICT_SUM && left[a.storage]) {
            schedule_add(&out, action_make(ACT_UPDATE, -1, a.storage, -1));
            left[a.storage] = false;
        }
        schedule_add(&out, a);
        if (a.kind == ACT_FORWARD && next >= 0) {
            schedule_add(&out, action_make(ACT_UPDATE, -1, next, -1));
            left[next] = false;
        }
    }
    free(left);
    schedule_replace(in, out);
}
// Adds READs of the first pieces on disk at the beginning, so that they run during the step.
static inline void lower_first_reads(const UnitMap *map, const bool *used, Schedule *in,
                                     int read[2]) {
    Schedule out = {NULL, 0, 0};
    for (int i = 0; i < DISK_PIECES; i++) { lower_next_read(map, used, &out, read); }
    for (int i = 0; i < in->count; i++) { schedule_add(&out, in->actions[i]); }
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
    int at[2] = {map->delays ? map->storages : 0, 0}, read[2] = {0, 0};
    lower_first_reads(map, used, s, read);
    for (int i = 0; i < MOVING_PIECES && !waits; i++) { lower_next_piece(map, used, s, at); }
    schedule_add(s, action_make(ACT_NORM, -1, -1, -1));
    for (int i = 0; i < MOVING_PIECES && waits; i++) { lower_next_piece(map, used, s, at); }
    for (int storage = 0; storage < map->storages; storage++) {
        Action gather = action_make(ACT_PREFETCH, -1, storage, -1);
        gather.version = 1;
        if (used[storage] && map->delays) { lower_fetches(map, s, storage); }
        if (used[storage] && !map->delays) { lower_update(map, used, s, storage, at, read); }
        if (used[storage] && !map->gathers[storage]) { schedule_add(s, gather); }
    }
    free(used);
}

// Adds all of these actions to every rank's schedule. A rank reduces and gathers what its own
// compute actions use.
static inline void zero_lower(Program *p, const ZeroPolicy *policy, bool training) {
    for (int r = 0; r < p->ranks; r++) {
        lower_uses(&p->map, &p->rank[r]);
        lower_gathers(&p->map, policy, &p->rank[r], training);
        if (!training) { continue; }
        lower_reductions(&p->map, &p->rank[r], p->micro_batches);
        lower_sums(&p->map, &p->rank[r]);
        if (p->map.delays) { lower_delayed_updates(&p->map, &p->rank[r]); }
        lower_updates(&p->map, &p->rank[r]);
    }
}

#endif
