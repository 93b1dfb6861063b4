// update.h: an update, from the reduced gradient to the new parameters, in the order in which it
// happens: the gradient gets its noise and is measured (store_norm); its storage begins a version
// (store_begin_update); the states are found, on the device, on the host, or in the buffer of a
// piece (store_find_places); the tensors are updated by the optimizer's kernel, with the mean over
// shared layers, the clipping, and the decay of each (store_update_parts); at last the copies of
// the parameters are renewed (store_slice_changed). The kernel rounds working parameters itself.
#ifndef UPDATE_H
#define UPDATE_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "model/architecture.h"
#include "model/gpt.h"
#include "ops/noise.h"
#include "ops/ops.h"
#include "ops/orthogonalise.h"
#include "state/gather.h"
#include "state/host.h"
#include "state/matrices.h"
#include "state/optimizer.h"
#include "state/p2p.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"
#include "state/table.h"

// -------------------------------------------------------------------------------------------------
// The gradient
// Adds the noise of a step to this rank's slice of a gradient whose reduction has ended. Noise is a
// function of key, step and element alone. The padding of the vocabulary is no parameter: it has
// neither gradient nor noise.
static inline void store_add_noise(Store *s, int storage, int64_t step) {
    int64_t begin, n = store_own(&s->plan, storage, &begin);
    const int64_t real = gpt_storage_real_elements(s->plan.model, storage);
    NoiseStream noise;
    memcpy(noise.key, s->plan.noise.key, sizeof noise.key);
    noise.domain = NOISE_GRADIENT;
    noise.part = (uint32_t)storage;
    noise.step = (uint64_t)step;
    assert(!s->flight.progress[storage].noised);
    s->flight.progress[storage].noised = true;
    n = max_i64(0, min_i64(n, real - begin));
    if (n) { // an empty slice may begin inside a block of the generator
        ops_add_noise(s->memory.stream, store_floats(s, STATE_GRADIENT, storage, step), begin, n,
                      noise, s->plan.noise.deviation, s->plan.noise.scale);
    }
    noise_wipe(&noise, sizeof noise);
}
static inline void store_add_all_noise(Store *s, int64_t step) {
    for (int i = 0; s->plan.noise.on && i < s->plan.model->storages; i++) {
        if (store_holds(&s->plan, i)) { store_add_noise(s, i, step); }
    }
}
// After store_norm: this step makes no update.
static inline void store_skip_updates(Store *s) {
    for (int i = 0; i < s->plan.model->storages; i++) { s->flight.progress[i].noised = false; }
}

// Returns the factor that turns a storage's gradient, the sum over the layers that share it, into
// their mean.
static inline double store_mean(const StatePlan *s, int storage) {
    return 1 / (double)gpt_storage_shared_by(s->model, storage);
}
// Adds the squares of the elements of this rank's slices, for the storages [first, end) and a
// step's gradient, to *sum.
static inline void store_measure(Store *s, int first, int end, int64_t step, ExactSum *sum) {
    ops_zero(s->memory.stream, s->memory.squares, sizeof *s->memory.squares);
    for (int i = first; i < end; i++) {
        const int64_t n = store_own_elements(&s->plan, i);
        const double mean = store_mean(&s->plan, i);
        if (!n) { continue; }
        const float *sum_of_slice = store_floats(s, STATE_GRADIENT, i, step);
        if (store_on_host(&s->plan, STATE_GRADIENT, i)) {
            ops_square_sum_host(s->memory.stream, sum, sum_of_slice, n, NORM_CHUNK, mean * mean);
        } else {
            ops_square_sum(s->memory.stream, s->memory.squares, sum_of_slice, n, NORM_CHUNK,
                           mean * mean);
        }
    }
    ops_to_host_later(s->memory.stream, s->memory.squares_read, s->memory.squares,
                      sizeof *s->memory.squares);
    ops_wait(s->memory.stream);
    exact_join(sum, s->memory.squares_read);
}
// Waits for all reductions, adds noise if the run is private, and returns the norm of the whole
// gradient; each storage counts once. All ranks must call it, whatever they hold.
static inline double store_norm(Store *s, int64_t step) {
    BucketExchange *newest = exchange_newest(s),
                   *older = &s->flight.exchange[s->flight.exchanges % EXCHANGES];
    ExactSum sum = {};
    exchange_send_on(s, newest);
    exchange_finish(s, older);
    exchange_finish(s, newest);
    for (int i = s->plan.model->storages - 1; i >= 0; i--) {
        store_finish_reduce(s, i);
        s->flight.progress[i].summed = false;
    }
    store_finish_sums(s);
    store_add_all_noise(s, step);
    store_measure(s, 0, s->plan.model->storages, step, &sum);
    comm_all_gather_small(s->memory.comm, &sum, s->memory.sums, sizeof sum);
    for (int r = 0; r < s->memory.comm->ranks; r++) {
        if (r != s->memory.comm->rank) { exact_join(&sum, &s->memory.sums[r]); }
    }
    return sqrt(exact_value(sum));
}
// Resets the fed back errors of a storage: after each ERROR_STEPS updates, and with each
// checkpoint, since checkpoints do not hold them.
static inline void store_forget_errors(Store *s, int storage) {
    if (s->memory.device[STATE_ERRORS].base && store_holds(&s->plan, storage)) {
        ops_zero(s->memory.stream, store_full(s, STATE_ERRORS, storage),
                 store_full_bytes(&s->plan, STATE_ERRORS, storage));
    }
}

// -------------------------------------------------------------------------------------------------
// The update

// Begins the update of a storage, before its first piece: counts it.
static inline void store_begin_update(Store *s, int storage, int64_t step) {
    StorageProgress *p = &s->flight.progress[storage];
    // a gradient is clipped, reduced, given its noise and then used, in this order
    assert(store_holds(&s->plan, storage) && p->noised == s->plan.noise.on);
    if (s->plan.policy.p2p) { store_begin_version(s, storage, step + 1); }
    p->noised = false;
    if (++p->updates % ERROR_STEPS == 0) { store_forget_errors(s, storage); }
}
// The memory that an update works on: `count` elements of a storage from `first` on, on the device
// or on the host.
typedef struct {
    char *at[HOST_KINDS]; // [kinds] NULL: not there
    int64_t first, count;
    bool cpu_update;
} UpdatePlaces;
// Points into the buffer of a piece that has arrived (host.h).
static inline void store_find_arrived(Store *s, int storage, int piece, UpdatePlaces *p) {
    const Offload *o = s->plan.policy.offload;
    OffloadBuffer *buffer = store_piece_buffer(s, storage, piece);
    PiecePart parts[PIECE_PARTS];
    char *at = buffer->at;
    p->cpu_update = o->cpu_update;
    if (p->cpu_update) {
        ops_wait(&buffer->link);
        store_await_stored(s, storage, piece);
    } else {
        ops_follow(s->memory.stream, &buffer->link);
    }
    const bool second = piece_is_second_pass(&s->plan, storage, piece);
    for (int k = 0, n = store_piece_parts(&s->plan, o, storage, second, parts); k < n; k++) {
        p->at[parts[k].kind] = at;
        at += p->count * parts[k].size;
    }
}
// Finds the memory of an update with the gradient of a step: of this rank's slice, or of one of its
// pieces.
static inline UpdatePlaces store_find_places(Store *s, int storage, int64_t step, int piece) {
    UpdatePlaces p = {};
    int64_t begin, first;
    p.count = store_piece(&s->plan, storage, piece, &begin);
    store_own(&s->plan, storage, &first);
    p.first = first + begin;
    for (int kind = 0; kind < HOST_KINDS; kind++) {
        p.at[kind] = store_piece_at(s, kind, storage, piece, step);
    }
    if (s->plan.rows[storage].pieces) { store_find_arrived(s, storage, piece, &p); }
    // parameters are their own masters
    if (s->plan.dtype == DTYPE_FP32) { p.at[STATE_MASTER] = p.at[STATE_PARAMETERS]; }
    return p;
}
// The same of a delayed update: this rank's whole slice, all of it on the host. The device's
// parameters are of another version.
static inline UpdatePlaces store_find_delayed(const Store *s, int storage, int64_t step) {
    UpdatePlaces p = {};
    p.count = store_own(&s->plan, storage, &p.first);
    p.cpu_update = true;
    for (int kind = 0; kind <= STATE_GRADIENT; kind++) {
        const bool here = store_place(&s->plan, kind, storage) != PLACE_NONE;
        p.at[kind] = here ? store_at(s, kind, storage, step) : NULL;
    }
    return p;
}

// The kernels of each optimizer, in the order of their table.
typedef void OptimizerKernel(Stream *, UpdateSlice, OptimizerStep);
static OptimizerKernel *const optimizer_kernels[][2] = {
#define OPTIMIZER_KERNELS(NAME, ...) {ops_##NAME, ops_##NAME##_host},
    OPTIMIZER_TABLE(OPTIMIZER_KERNELS)};
// Returns the optimizer of a storage: blocks have the run's.
static inline const Optimizer *store_optimizer(const StatePlan *s, int storage) {
    return gpt_storage_is_block(s->model, storage) ? s->optimizer
                                                   : optimizer_of_others(s->optimizer);
}
// Does the storage's update need whole matrices?
static inline bool store_has_matrices(const StatePlan *s, int storage) {
    return s->matrices.count && gpt_storage_is_block(s->model, storage);
}
// Updates n elements, from element `at` of the places on.
static inline void store_update_elements(Store *s, int storage, const UpdatePlaces *p, int64_t at,
                                         int64_t n, OptimizerStep o) {
    const Optimizer *optimizer = store_optimizer(&s->plan, storage);
    const int64_t word = sizeof(float);
    char *parameters = p->at[STATE_PARAMETERS], *master = p->at[STATE_MASTER] + at * word;
    const DType dtype =
        parameters ? s->plan.dtype : DTYPE_FP32; // otherwise only masters are updated
    UpdateSlice u = {
        .master = (float *)(void *)master,
        .moment = {NULL},
        .grad = (const float *)(const void *)(p->at[STATE_GRADIENT] + at * word),
        .param = parameters ? parameters + at * (int64_t)dtype_size(dtype) : master,
        .dtype = dtype,
        .n = n,
    };
    for (int k = 0; k < optimizer->moments; k++) {
        u.moment[k] = (float *)(void *)(p->at[STATE_MOMENT + k] + at * word);
    }
    optimizer_kernels[optimizer - optimizers][p->cpu_update](s->memory.stream, u, o);
}
// Updates the elements of `p`, with `version` as the optimizer's step number. Weight decay applies
// to 2-D tensors only.
static inline void store_update_parts(Store *s, int storage, const UpdatePlaces *p, int64_t version,
                                      OptimizerStep o) {
    TensorPart parts[MOST_TENSORS];
    const float decay = o.weight_decay, rate = o.lr;
    o.step = version - s->flight.progress[storage].restarted;
    o.grad_scale *= (float)store_mean(&s->plan, storage);
    for (int i = 0, n = gpt_storage_parts(s->plan.model, storage, parts); i < n; i++) {
        const int64_t begin = max_i64(p->first, parts[i].offset),
                      count =
                          min_i64(p->first + p->count, parts[i].offset + parts[i].elements) - begin;
        if (count <= 0) { continue; }
        o.weight_decay = parts[i].decays ? decay : 0.0f;
        o.lr = rate * s->plan.rates[parts[i].rate];
        o.rounding = store_rounding(s, storage, begin);
        store_update_elements(s, storage, p, begin - p->first, count, o);
    }
}

// -------------------------------------------------------------------------------------------------
// Updates with whole matrices (matrices.h): directions, their exchange, and the rest of the update

// The kernels of the first part of an update, in the order of the table; NULL: it has one part.
typedef void DirectionKernel(Stream *, float *, UpdateSlice, OptimizerStep);
static DirectionKernel *const direction_kernels[] = {ops_adamw_direction, NULL, ops_muon_direction};

// A part of a storage in the memory of an update: count elements, from element `at` of the places
// on, whose directions are at `direction`.
typedef struct {
    const StoragePart *part;
    int64_t at, begin, count; // begin: in the storage
    float *direction;
} UpdatePart;
static inline UpdatePart store_update_part(const Store *s, int storage, const UpdatePlaces *p,
                                           int k) {
    const Matrices *x = &s->plan.matrices;
    const MatrixExchange *e = &x->of[storage];
    const int64_t *bounds = store_slices(&s->plan, storage);
    const int me = store_process_group(&s->plan, storage)->all.me;
    int64_t first;
    const int64_t own = part_of_slice(&x->part[k], bounds, me, &first),
                  begin = max_i64(first, p->first);
    const UpdatePart u = {.part = &x->part[k],
                          .at = begin - p->first,
                          .begin = begin,
                          .count = min_i64(first + own, p->first + p->count) - begin,
                          .direction = matrices_directions(s->memory.matrices, e) +
                                       matrices_place(x, e, bounds, me, k) + (begin - first)};
    return u;
}
// Starts to send this rank's parts of directions home, or (back) the results to their slices.
static inline void store_exchange_matrices(Store *s, int storage, int64_t step, bool back) {
    const Group *all = &store_process_group(&s->plan, storage)->all;
    const MatrixExchange *e = &s->plan.matrices.of[storage];
    const CommLabel label = {back ? "orthogonal matrices" : "directions", storage, step};
    float *slice = matrices_directions(s->memory.matrices, e),
          *gathered = matrices_gathered(s->memory.matrices, &s->plan.matrices, e);
    if (all->n == 1) { return; }
    s->flight.progress[storage].exchanging =
        back ? comm_all_to_all_begin(s->memory.comm, label, all, gathered, e->from, slice, e->to,
                                     sizeof(float))
             : comm_all_to_all_begin(s->memory.comm, label, all, slice, e->to, gathered, e->from,
                                     sizeof(float));
}
// The first part of an update: moments and directions of this rank's slice, or of one of its
// pieces. With the last piece, directions begin to travel. All members call it.
static inline void store_direct(Store *s, int storage, int64_t step, OptimizerStep o, int piece) {
    if (piece == 0) { store_begin_update(s, storage, step); }
    const UpdatePlaces p = store_find_places(s, storage, step, piece);
    const Optimizer *others = optimizer_of_others(s->plan.optimizer);
    o.step = s->flight.progress[storage].updates - s->flight.progress[storage].restarted;
    o.grad_scale *= (float)store_mean(&s->plan, storage);
    o.momentum = o.matrices.momentum;
    for (int k = 0; k < s->plan.matrices.count; k++) {
        const UpdatePart part = store_update_part(s, storage, &p, k);
        const Optimizer *optimizer = part.part->is_matrix ? s->plan.optimizer : others;
        UpdateSlice u = {.n = part.count};
        if (part.count <= 0) { continue; }
        u.grad = (const float *)(const void *)p.at[STATE_GRADIENT] + part.at;
        for (int i = 0; i < optimizer->moments; i++) {
            u.moment[i] = (float *)(void *)p.at[STATE_MOMENT + i] + part.at;
        }
        direction_kernels[optimizer - optimizers](s->memory.stream, part.direction, u, o);
    }
    if (piece + 1 >= s->plan.rows[storage].pieces) {
        store_exchange_matrices(s, storage, step, false);
    }
}
// Copies the parts of a matrix from where they arrived to one array, or (back) from there.
static inline void store_copy_matrix(Store *s, int storage, int k, float *whole, bool back) {
    const Matrices *x = &s->plan.matrices;
    const MatrixExchange *e = &x->of[storage];
    const int64_t *bounds = store_slices(&s->plan, storage);
    for (int r = 0; r < store_process_group(&s->plan, storage)->all.n; r++) {
        int64_t begin, n = part_of_slice(&x->part[k], bounds, r, &begin);
        float *there = matrices_gathered(s->memory.matrices, x, e) +
                       matrices_arrival(x, e, bounds, r, k),
              *here = whole + (begin - x->part[k].offset);
        if (n > 0) {
            ops_copy(s->memory.stream, back ? there : here, back ? here : there,
                     (size_t)n * sizeof(float));
        }
    }
}
// Makes the matrices orthogonal of which this rank is home, and sends them back. All members call
// it, after store_direct.
static inline void store_orthogonalise(Store *s, int storage, int64_t step, OptimizerStep o) {
    const Matrices *x = &s->plan.matrices;
    const MatrixExchange *e = &x->of[storage];
    const Group *all = &store_process_group(&s->plan, storage)->all;
    comm_wait(s->memory.comm, &s->flight.progress[storage].exchanging);
    for (int k = 0; k < x->count; k++) {
        const StoragePart *p = &x->part[k];
        if (!p->is_matrix || e->home[k] != all->me) { continue; }
        float *matrix = all->n > 1
                            ? matrices_whole(s->memory.matrices, x)
                            : matrices_directions(s->memory.matrices, e) +
                                  matrices_place(x, e, store_slices(&s->plan, storage), 0, k);
        if (all->n > 1) { store_copy_matrix(s, storage, k, matrix, false); }
        orthogonalise(s->memory.stream, matrix, p->rows, p->cols, o.matrices.iterations,
                      s->plan.dtype, matrices_scratch(s->memory.matrices, x));
        if (all->n > 1) { store_copy_matrix(s, storage, k, matrix, true); }
    }
    store_exchange_matrices(s, storage, step, true);
}
// The last part: parameters follow their directions.
static inline void store_follow_directions(Store *s, int storage, const UpdatePlaces *p,
                                           OptimizerStep o) {
    const MatrixStep matrices = o.matrices;
    const float rate = o.lr;
    UpdatePlaces along = *p;
    for (int k = 0; k < s->plan.matrices.count; k++) {
        const UpdatePart part = store_update_part(s, storage, p, k);
        const double ratio = (double)part.part->rows / (double)part.part->cols;
        const bool matrix = part.part->is_matrix;
        if (part.count <= 0) { continue; }
        o.lr = matrix ? matrices.lr : rate * s->plan.rates[RATE_VECTORS];
        o.weight_decay = matrix ? matrices.weight_decay : 0;
        o.grad_scale = matrix ? (float)sqrt(fmax(1, ratio)) : 1;
        o.rounding = store_rounding(s, storage, part.begin);
        // the directions stand for the gradient
        along.at[STATE_GRADIENT] = (char *)(part.direction - part.at);
        store_update_elements(s, storage, &along, part.at, part.count, o);
    }
}
// Must be called when this rank's slice of the parameters has changed: invalidates the hpZ
// secondary copy, and quantizes again.
static inline void store_slice_changed(Store *s, int storage) {
    s->flight.progress[storage].secondary_valid = false;
    if (s->plan.policy.quantized_weights) {
        ops_quantize(s->memory.stream, store_at(s, STATE_RECORDS, storage, 0),
                     store_at(s, STATE_PARAMETERS, storage, 0), s->plan.dtype,
                     store_own_elements(&s->plan, storage), s->plan.policy.weights);
    }
}
// Makes one optimizer update of this rank's slice of a storage, or of one of its pieces
// (state/host.h), with the gradient of a step. All members call it.
static inline void store_update(Store *s, int storage, int64_t step, OptimizerStep o, int piece) {
    const bool matrices = store_has_matrices(&s->plan, storage);
    if (matrices && s->plan.policy.p2p) { // one owner, and no other actions for the first parts
        store_direct(s, storage, step, o, 0);
        store_orthogonalise(s, storage, step, o);
    }
    if (piece == 0 && !matrices) { store_begin_update(s, storage, step); }
    const UpdatePlaces p = store_find_places(s, storage, step, piece);
    if (matrices) {
        comm_wait(s->memory.comm, &s->flight.progress[storage].exchanging);
        store_follow_directions(s, storage, &p, o);
    } else {
        store_update_parts(s, storage, &p, s->flight.progress[storage].updates, o);
    }
    const int last = s->plan.rows[storage].pieces * (matrices ? 2 : 1) - 1;
    if (!p.cpu_update && piece >= last) { store_slice_changed(s, storage); }
}
// Updates masters and moments on the host with the pending gradient, while the device computes with
// the version before. The new version is used from the moment when it is fetched.
static inline void store_update_delayed(Store *s, int storage, int64_t step, OptimizerStep o) {
    if (!s->flight.pending) { return; }
    // copies of fp32 masters that the previous step began may still read them
    for (int i = 0; i < MOVING_PIECES; i++) { ops_wait(&s->memory.offload_buffer[i].link); }
    const UpdatePlaces p = store_find_delayed(s, storage, step);
    store_update_parts(s, storage, &p, s->flight.progress[storage].updates + 1, o);
}
// Moves a piece of offloaded states: FETCH to the device, EVICT to the host. If the device updates,
// the piece is fetched before its update and evicted after it. If the CPU updates, the gradient is
// evicted before the update, and the new parameters are fetched after it.
static inline void store_fetch(Store *s, int storage, int piece, int64_t step) {
    if (store_delays(&s->plan) && piece == 0) {
        s->flight.progress[storage].updates += s->flight.pending;
    }
    store_move_piece(s, storage, piece, step, true);
    if (s->plan.policy.offload->cpu_update && piece + 1 == s->plan.rows[storage].pieces) {
        store_slice_changed(s, storage);
    }
}
static inline void store_evict(Store *s, int storage, int piece, int64_t step) {
    store_move_piece(s, storage, piece, step, false);
}

// -------------------------------------------------------------------------------------------------
// Parameters from outside

// Must be called after masters were written from outside (initial values, a loaded file): updates
// the working parameters. All members call it.
static inline void store_masters_changed(Store *s) {
    for (int i = 0; i < s->plan.model->storages; i++) {
        int64_t begin, n = store_own(&s->plan, i, &begin);
        if (!store_holds(&s->plan, i)) { continue; }
        if (s->plan.dtype != DTYPE_FP32 || store_delays(&s->plan)) {
            if (store_place(&s->plan, STATE_MASTER, i) == PLACE_DEVICE &&
                store_place(&s->plan, STATE_PARAMETERS, i) == PLACE_DEVICE) {
                ops_convert_float(s->memory.stream, store_newest(s, i),
                                  store_floats(s, STATE_MASTER, i, 0), s->plan.dtype, n,
                                  store_rounding(s, i, begin));
            } else {
                store_round_on_host(s, i);
            }
        }
        store_slice_changed(s, i);
        if (!s->plan.policy.p2p && !s->plan.rows[i].rule.gathers) {
            store_prefetch(s, i, s->flight.progress[i].updates, false, s->memory.comm->step);
        }
    }
    if (s->plan.policy.p2p) { store_send_all(s); }
}
static inline void store_initialise(Store *s, uint64_t seed) {
    for (int i = 0; i < s->plan.model->storages; i++) {
        int64_t begin, n = store_own(&s->plan, i, &begin);
        for (int64_t at = 0, count; at < n; at += count, keep_alive()) {
            count = min_i64(STATE_PIECE_FLOATS, n - at);
            gpt_initialise(s->plan.model, i, seed, begin + at, begin + at + count,
                           state_piece.floats);
            store_write_state(s, STATE_MASTER, i, at, count, state_piece.floats);
        }
    }
    store_masters_changed(s);
}

#endif
