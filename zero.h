// zero.h: the store. Where the states of a storage live (parameters, gradient, fp32 master, moments) and how they travel.
//
// Verbs carry the step or version: acquire/release(storage, version), gradient/reduce(storage, step), norm(step),
// update(storage, step). Everything above this header asks for a storage's parameters or gradient through them, and does
// not know whether they are whole, sharded or somewhere else. This is ZeRO stage 0 (arXiv 1910.02054, the baseline of its
// section 3): every rank holds all states. The work is divided: a rank owns one slice of each storage. Its gradient is summed
// over the ranks there (reduce-scatter, while the backward pass goes on), updated there, and the new parameters are gathered
// (while the next forward pass begins): 2 (R-1)/R of the parameters are sent, as an all-reduce would.
//
// Layout     one allocation per kind of state, storages one after another (offset[storage]):
//            master  fp32 parameters; with --dtype fp32 they are the working parameters as well
//            params  working parameters in bf16 (with --dtype bf16)
//            grads   fp32 sums over the micro-steps of a step; after the reduction valid in the own slice
//            m, v    moments (sgd: m is the momentum buffer, there is no v); current in the own slice, as are bf16's masters
//            unpacked  the acquired units' parameters in compute precision, where that differs from storage precision
//            All of it is the device's: initial values and files reach it a piece at a time, by ops_from_host and ops_to_host.
// Norms      canonical: fp64 sums of squares over chunks of NORM_CHUNK elements of each storage, added in chunk order, so
//            they do not depend on the layout. Slices are cut at chunk borders.
#ifndef ZERO_H
#define ZERO_H

#include "comm.h"     // collectives
#include "gpt.h"      // storages
#include "schedule.h" // lowering

enum { NORM_CHUNK = 2048 };

// The piece of states that goes between the host and the device just now: so short that it stays in a processor's cache.
#ifndef STATE_PIECE // tests make it small
#define STATE_PIECE (1 << 20)
#endif
enum { STATE_PIECE_FLOATS = STATE_PIECE / 4 };
static union {
    char bytes[STATE_PIECE];
    float floats[STATE_PIECE_FLOATS];
} state_piece;

typedef struct {
    const GptModel *model;
    Comm *comm;
    Stream *stream;
    const Group *group; // the ranks that share the gradients
    DType dtype, wire;  // of working parameters; of gradient messages
    bool adam;          // two moments, else one
    float *master, *grads, *m, *v;
    uint16_t *params; // NULL with fp32
    char *unpacked;
    size_t unpacked_bytes, unpacked_used;
    int held;                         // storages acquired now
    int64_t *offset;                  // [storages + 1] in elements
    int64_t *bounds;                  // [storages][ranks + 1] slices
    double *partials;                 // [all chunks] of the norm: rank by rank, storage by storage
    int64_t *partial_bounds;          // [ranks + 1]
    bool *fresh;                      // [storages] the gradient has no contribution in this step yet
    CommHandle *reducing, *gathering; // [storages]
    int64_t *updates;                 // [storages] updates so far: the version that exists, and the step counter of the moments
    bool by_chance;                   // bf16 parameters are rounded stochastically, with draws that follow from ...
    uint64_t seed;                    // ... this. The owner sets both before it fills the masters
} Store;

// Bytes of each kind of state on one rank: what is printed before anything is allocated, and what store_make takes.
typedef struct {
    size_t parameters, gradients, optimizer, unpacked;
} StoreBytes;

static inline bool store_converts(DType dtype) { return dtype_size(dtype) != ops_real_bytes(); }

// Room for the compute-precision copy of the largest unit.
static inline size_t store_unpacked_bytes(const GptModel *m, DType dtype) {
    size_t most = 0;
    for (int unit = 0; store_converts(dtype) && unit < m->units; unit++) {
        int storages[2], n = gpt_unit_storages(m, unit, storages);
        size_t bytes = 0;
        for (int i = 0; i < n; i++) { bytes += (size_t)round_up(gpt_storage_elements(m, storages[i]) * (int64_t)ops_real_bytes(), 64); }
        if (bytes > most) { most = bytes; }
    }
    return most;
}
static inline StoreBytes store_bytes(const GptModel *m, DType dtype, bool adam) {
    size_t n = (size_t)m->parameters;
    bool own_master = dtype == DTYPE_FP32; // fp32 parameters are their own master
    StoreBytes b = {n * dtype_size(dtype), n * 4, n * 4 * ((adam ? 2 : 1) + (own_master ? 0 : 1)), store_unpacked_bytes(m, dtype)};
    return b;
}

// The slices of a storage over n ranks, cut at chunk borders; bounds has n + 1 elements. Equal, and the rest to the last, where that
// makes it at most a sixteenth longer: equal slices are one call of NCCL, in place. Else nearly equal.
static inline void store_bounds(int64_t elements, int n, int64_t *bounds) {
    int64_t chunks = ceil_div(elements, NORM_CHUNK), each = elements / NORM_CHUNK / n;
    bool equal = elements - n * each * NORM_CHUNK <= each * NORM_CHUNK / 16;
    for (int r = 0; r < n; r++) { bounds[r] = (equal ? r * each : part_begin(chunks, n, r)) * NORM_CHUNK; }
    bounds[n] = elements;
}

// Norm chunks in slice r.
static inline int64_t store_chunks(const int64_t *bounds, int r) { return ceil_div(bounds[r + 1] - bounds[r], NORM_CHUNK); }

// Places and allocates everything. comm, stream and group must outlive the store.
static inline Store store_make(const GptModel *m, Comm *comm, const Group *group, Stream *stream, DType dtype, DType wire, bool adam) {
    Store s;
    memset(&s, 0, sizeof s);
    s.model = m, s.comm = comm, s.group = group, s.stream = stream, s.dtype = dtype, s.wire = wire, s.adam = adam;
    size_t n = (size_t)m->storages, row = (size_t)group->n + 1;
    s.offset = (int64_t *)checked_calloc(n + 1, sizeof(int64_t), "store");
    s.bounds = (int64_t *)checked_calloc(n * row, sizeof(int64_t), "store");
    s.fresh = (bool *)checked_calloc(n, sizeof(bool), "store");
    s.reducing = (CommHandle *)checked_calloc(n, sizeof(CommHandle), "store");
    s.gathering = (CommHandle *)checked_calloc(n, sizeof(CommHandle), "store");
    s.partial_bounds = (int64_t *)checked_calloc(row, sizeof(int64_t), "store");
    s.updates = (int64_t *)checked_calloc(n, sizeof(int64_t), "store");
    for (int i = 0; i < m->storages; i++) {
        int64_t *bounds = s.bounds + (size_t)i * row;
        s.offset[i + 1] = s.offset[i] + gpt_storage_elements(m, i);
        store_bounds(gpt_storage_elements(m, i), group->n, bounds);
        for (int r = 0; r < group->n; r++) { s.partial_bounds[r + 1] += store_chunks(bounds, r); }
        s.fresh[i] = true;
    }
    for (int r = 0; r < group->n; r++) { s.partial_bounds[r + 1] += s.partial_bounds[r]; }
    s.partials = (double *)memory_take_host((size_t)s.partial_bounds[group->n] * sizeof(double), "norm partials");
    StoreBytes b = store_bytes(m, dtype, adam);
    size_t floats = (size_t)m->parameters * sizeof(float);
    s.master = (float *)memory_take(dtype == DTYPE_FP32 ? MEMORY_PARAMETERS : MEMORY_OPTIMIZER, floats, "fp32 parameters");
    s.params = dtype == DTYPE_FP32 ? NULL : (uint16_t *)memory_take(MEMORY_PARAMETERS, b.parameters, "bf16 parameters");
    s.grads = (float *)memory_take(MEMORY_GRADIENTS, b.gradients, "gradients");
    s.m = (float *)memory_take(MEMORY_OPTIMIZER, floats, "moments");
    s.v = adam ? (float *)memory_take(MEMORY_OPTIMIZER, floats, "moments") : NULL;
    comm_share(comm, group, s.params ? (void *)s.params : (void *)s.master, b.parameters), comm_share(comm, group, s.grads, b.gradients);
    s.unpacked_bytes = b.unpacked;
    s.unpacked = b.unpacked ? (char *)memory_take(MEMORY_BUFFERS, b.unpacked, "unpacked parameters") : NULL;
    return s;
}

static inline void store_free(Store *s) {
    ops_free(s->master), ops_free(s->params), ops_free(s->grads), ops_free(s->m), ops_free(s->v), ops_free(s->unpacked);
    free(s->offset), free(s->bounds), free(s->fresh), free(s->reducing), free(s->gathering), free(s->updates), free(s->partial_bounds);
    ops_free_host(s->partials);
    memset(s, 0, sizeof *s);
}

// States by name, for checkpoints: fp32, whole storages, on the device.
typedef enum { STATE_MASTER, STATE_M, STATE_V, STATE_KINDS } StateKind;
static const char *const state_names[STATE_KINDS] = {"parameters", "m", "v"};
static inline float *store_state(const Store *s, StateKind kind, int storage) {
    float *base = kind == STATE_MASTER ? s->master : kind == STATE_M ? s->m : s->v;
    return base ? base + s->offset[storage] : NULL;
}
// Working parameters, in storage precision, from an element of all storages on.
static inline void *store_param(const Store *s, int64_t at) { return s->params ? (void *)(s->params + at) : (void *)(s->master + at); }
// How the parameters of a storage are rounded at its version, from an element of it on: whoever rounds the same masters again, after a
// resume or on any number of ranks, gets the same bits.
static inline Rounding store_rounding(const Store *s, int storage, int64_t element) {
    const uint64_t ROUNDING_STREAM = 0x726f756e64696e67u;
    Rounding r = {s->by_chance ? random_u64(s->seed, ROUNDING_STREAM, (uint64_t)s->updates[storage]) | 1 : 0, element};
    return r;
}
// Call after writing masters from outside (initial values, a loaded file): makes the working parameters follow.
static inline void store_masters_changed(Store *s) {
    for (int i = 0; s->params && i < s->model->storages; i++) {
        const int64_t at = s->offset[i];
        ops_convert_float(s->stream, s->params + at, s->master + at, s->dtype, s->offset[i + 1] - at, store_rounding(s, i, 0));
    }
}

static inline void store_initialise(Store *s, uint64_t seed) {
    for (int i = 0; i < s->model->storages; i++) {
        for (int64_t at = 0, end, n = gpt_storage_elements(s->model, i); at < n; at = end, keep_alive()) {
            end = min_i64(at + STATE_PIECE_FLOATS, n);
            gpt_initialise(s->model, i, seed, at, end, state_piece.floats);
            ops_from_host(s->stream, store_state(s, STATE_MASTER, i) + at, state_piece.floats, (size_t)(end - at) * sizeof(float));
        }
    }
    store_masters_changed(s);
}

// ---------------------------------------------------------------------------------------------------------------------
// Verbs

// Parameters of a storage in compute precision, valid until its release. `version`: how many updates they must have seen.
static inline const Real *store_acquire(Store *s, int storage, int64_t version) {
    assert(version == s->updates[storage]);
    (void)version;
    comm_wait(s->comm, s->gathering[storage]);
    s->held++;
    int64_t elements = s->offset[storage + 1] - s->offset[storage];
    const void *stored = store_param(s, s->offset[storage]);
    if (!store_converts(s->dtype)) { return (const Real *)stored; }
    Real *copy = (Real *)(s->unpacked + s->unpacked_used);
    s->unpacked_used += (size_t)round_up(elements * (int64_t)ops_real_bytes(), 64);
    assert(s->unpacked_used <= s->unpacked_bytes);
    ops_unpack(s->stream, copy, stored, s->dtype, elements);
    return copy;
}
static inline void store_release(Store *s, int storage) {
    (void)storage;
    if (--s->held == 0) { s->unpacked_used = 0; }
}

// Waits until all states are there, before they are read otherwise than by store_acquire. All members call it.
static inline void store_settle(Store *s) {
    for (int i = 0; i < s->model->storages; i++) { comm_wait(s->comm, s->gathering[i]); }
    ops_wait(s->stream);
}
static inline const int64_t *store_slices(const Store *s, int storage) { return s->bounds + storage * (s->group->n + 1); }

// Where contributions to the gradient of this step go. *accumulate: there is one already, add to it.
static inline float *store_gradient(Store *s, int storage, bool *accumulate) {
    *accumulate = !s->fresh[storage];
    s->fresh[storage] = false;
    return s->grads + s->offset[storage];
}

// All contributions of this rank are in: starts summing over the group. All members call it, storages in the same order.
static inline void store_reduce(Store *s, int storage, int64_t step) {
    float *grad = s->grads + s->offset[storage];
    if (s->fresh[storage]) { ops_zero(s->stream, grad, (size_t)gpt_storage_elements(s->model, storage) * sizeof(float)); }
    s->fresh[storage] = true;
    comm_label(s->comm, "gradient", storage, step);
    s->reducing[storage] = comm_reduce_scatter(s->comm, s->group, grad, grad, store_slices(s, storage), s->wire);
}

// Waits for all reductions and everything else that was started, and returns the norm of the whole gradient, every storage counted
// once. All members call it.
static inline double store_norm(Store *s) {
    int ranks = s->group->n, me = s->group->me;
    double *mine = s->partials + s->partial_bounds[me], sum = 0;
    for (int i = s->model->storages - 1; i >= 0; i--) { comm_wait(s->comm, s->reducing[i]); }
    for (int i = 0; i < s->model->storages; i++) {
        const int64_t *slice = store_slices(s, i) + me;
        ops_norm_partials(s->stream, mine, s->grads + s->offset[i] + slice[0], slice[1] - slice[0], NORM_CHUNK);
        mine += store_chunks(store_slices(s, i), me);
    }
    ops_wait(s->stream);
    comm_all_gather_doubles(s->comm, s->partials, s->partial_bounds);
    for (int i = 0; i < s->model->storages; i++) { // in the order of the elements: a rank's chunks of a storage follow those before
        for (int r = 0; r < ranks; r++) {
            const double *theirs = s->partials + s->partial_bounds[r];
            for (int j = 0; j < i; j++) { theirs += store_chunks(store_slices(s, j), r); }
            for (int64_t c = 0; c < store_chunks(store_slices(s, i), r); c++) { sum += theirs[c]; }
        }
    }
    return sqrt(sum);
}

// One optimizer update of my slice of a storage, weight decay on 2-D tensors only; then the new parameters travel to all.
// All members call it, storages in the same order.
static inline void store_update(Store *s, int storage, int64_t step, OptimizerStep o) {
    TensorPart parts[TENSORS];
    int n = gpt_storage_parts(s->model, storage, parts);
    const int64_t *slice = store_slices(s, storage) + s->group->me;
    float decay = o.weight_decay;
    o.step = ++s->updates[storage];
    for (int i = 0; i < n; i++) {
        int64_t begin = max_i64(slice[0], parts[i].offset), end = min_i64(slice[1], parts[i].offset + parts[i].elements);
        if (begin >= end) { continue; }
        int64_t at = s->offset[storage] + begin;
        void *param = store_param(s, at);
        o.weight_decay = tensor_specs[parts[i].tensor].decay ? decay : 0.0f;
        o.rounding = store_rounding(s, storage, begin);
        if (s->adam) {
            ops_adamw(s->stream, s->master + at, param, s->dtype, s->m + at, s->v + at, s->grads + at, end - begin, o);
        } else {
            ops_sgd(s->stream, s->master + at, param, s->dtype, s->m + at, s->grads + at, end - begin, o);
        }
    }
    comm_label(s->comm, "parameters", storage, step);
    s->gathering[storage] = comm_all_gather(s->comm, s->group, store_param(s, s->offset[storage]), store_slices(s, storage), dtype_size(s->dtype));
}

// ---------------------------------------------------------------------------------------------------------------------
// Lowering: the store's part of the schedule

// What the plan must know of the model.
static inline UnitMap unit_map(const GptModel *m) {
    UnitMap map;
    memset(&map, 0, sizeof map);
    map.units = m->units, map.storages = m->storages;
    map.of_unit = (int(*)[2])checked_calloc((size_t)m->units, sizeof *map.of_unit, "unit map");
    map.of_unit_count = (int *)checked_calloc((size_t)m->units, sizeof(int), "unit map");
    map.by_input = (bool(*)[2])checked_calloc((size_t)m->units, sizeof *map.by_input, "unit map");
    for (int u = 0; u < m->units; u++) { map.of_unit_count[u] = gpt_unit_storages(m, u, map.of_unit[u]); }
    map.by_input[m->units - 1][1] = true; // the head's part of the wte gradient
    return map;
}

// ACQUIRE before and RELEASE after each compute action, left out between neighbours that use the same unit.
static inline void zero_lower_parameters(Program *p) {
    for (int r = 0; r < p->ranks; r++) {
        Schedule out = {NULL, 0, 0};
        Schedule *in = &p->rank[r];
        for (int i = 0; i < in->count; i++) {
            Action a = in->actions[i];
            bool compute = action_computes(a.kind);
            bool held = compute && i > 0 && action_computes(in->actions[i - 1].kind) && in->actions[i - 1].unit == a.unit;
            bool kept = compute && i + 1 < in->count && action_computes(in->actions[i + 1].kind) && in->actions[i + 1].unit == a.unit;
            for (int k = 0; compute && !held && k < p->map.of_unit_count[a.unit]; k++) {
                schedule_add(&out, action_make(ACT_ACQUIRE, -1, p->map.of_unit[a.unit][k], -1));
            }
            schedule_add(&out, a);
            for (int k = 0; compute && !kept && k < p->map.of_unit_count[a.unit]; k++) {
                schedule_add(&out, action_make(ACT_RELEASE, -1, p->map.of_unit[a.unit][k], -1));
            }
        }
        schedule_free(in);
        *in = out;
    }
}

// REDUCE right after a storage's last contribution; storages without any (a rank without samples) at the end. The order is
// the same on every rank: lnf, blocks from the last to the first, then wpe and wte. Then NORM, then UPDATE in the order in
// which the next forward pass wants the parameters.
static inline void zero_lower_updates(Program *p) {
    for (int r = 0; r < p->ranks; r++) {
        Schedule out = {NULL, 0, 0};
        Schedule *in = &p->rank[r];
        int *last = (int *)checked_malloc((size_t)p->map.storages * sizeof(int), "lowering");
        for (int s = 0; s < p->map.storages; s++) { last[s] = in->count; }
        for (int i = 0; i < in->count; i++) {
            for (int s = 0; s < p->map.storages; s++) {
                if (action_contributes(&p->map, &in->actions[i], s)) { last[s] = i; }
            }
        }
        for (int i = 0; i <= in->count; i++) {
            if (i < in->count) { schedule_add(&out, in->actions[i]); }
            for (int s = p->map.storages - 1; s >= 0; s--) {
                if (last[s] == i) { schedule_add(&out, action_make(ACT_REDUCE, -1, s, -1)); }
            }
        }
        schedule_add(&out, action_make(ACT_NORM, -1, -1, -1));
        for (int s = 0; s < p->map.storages; s++) { schedule_add(&out, action_make(ACT_UPDATE, -1, s, -1)); }
        free(last);
        schedule_free(in);
        *in = out;
    }
}

#endif
