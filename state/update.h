// update.h: an update, from the sum of a storage's gradient (sums.h) to its new parameters, which
// gather.h and p2p.h send. From top to bottom:
//   fetch   states on disk are read to the host; states on the host are copied to the device
//   noise   of a private run; then the norm of the whole gradient (store_norm)
//   begin   the storage's new version, and the memory of the update (store_find_places)
//   update  of each tensor by the optimizer's kernel, with the mean over shared layers, the
//           clipping, and the decay of each. The kernel rounds working parameters itself
//   store   states return to the host, and are written to the disk
//
// Pieces   States on the host (policy.h: Offload; offload.h says which) move in pieces of at most
//          offload_piece() elements of a slice, so the buffers on the way are small for any model.
// Buffers  Two (OffloadBuffer). The pieces of all storages use them in turns, a piece always the
//          same one. The copies of a buffer run in order (its link). So a piece has arrived before
//          its update, has left before the next one arrives, and one buffer is filled while the
//          other is emptied.
// Device   If the device updates, a piece's states are fetched before the update, and evicted after
//          it: 8 bytes for each state of 4, with identical results.
// CPU      If the CPU updates, the gradient is evicted before the update (with fp32 parameters,
//          which are their own masters), and the new parameters are fetched after it.
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
#include "state/disk.h"
#include "state/gather.h"
#include "state/layout.h"
#include "state/matrices.h"
#include "state/optimizer.h"
#include "state/p2p.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"
#include "state/table.h"

// -------------------------------------------------------------------------------------------------
// Fetch

// A piece of this rank's slice of a storage, and the buffers through which it moves. A slice of
// which nothing is on the host is one piece.
typedef struct {
    int storage, number;
    bool second;          // it moves for the second part of its update (store_in_parts)
    int64_t begin, count; // elements of the slice. The last pieces of a short slice may be empty
    OffloadBuffer *buffer;
    DiskBuffer *disk; // NULL: nothing of it is on disk
} Piece;
static inline Piece store_piece(Store *s, int storage, int number) {
    const StorageRow *row = &s->plan.rows[storage];
    const bool second = row->pieces && number >= row->pieces;
    const int64_t own = store_own_elements(&s->plan, storage),
                  most = row->pieces ? offload_piece(s->plan.model) : own;
    const int within = second ? number - row->pieces : number;
    Piece p = {.storage = storage, .number = number, .second = second};
    p.begin = min_i64(own, within * most);
    p.count = min_i64(most, own - p.begin);
    p.buffer = &s->memory.offload_buffer[(row->first_piece[second] + within) % MOVING_PIECES];
    if (row->disk && p.count) {
        p.disk = &s->memory.disk->buffer[(row->first_stored + number) % DISK_PIECES];
    }
    return p;
}
// Returns where a state of a piece is when it is not in the OffloadBuffer: on the device, on the
// host, or in the buffer that it was read into from the disk; NULL: nowhere. step: of a gradient.
static inline char *store_piece_at(Store *s, StateKind kind, const Piece *p, int64_t step) {
    const State *x = store_record(&s->plan, kind, p->storage);
    if (x->place == PLACE_NONE || !p->count) { return NULL; }
    if (x->place == PLACE_DISK) {
        return p->disk->at + store_place_on_disk(&s->plan, kind, p->storage, p->number, p->count) -
               store_place_on_disk(&s->plan, STATE_MASTER, p->storage, p->number, p->count);
    }
    const int64_t version = kind == STATE_GRADIENT ? step : store_now(s, p->storage);
    char *slice = store_at(s, kind, p->storage, version);
    return slice ? slice + store_bytes(&s->plan, kind, p->begin) : NULL;
}
// Starts to read what is on disk of a piece into its buffer, or to write it.
static inline void store_move_stored(Store *s, const Piece *p, bool writes) {
    if (!p->count) { return; }
    const int64_t bytes = store_stored_bytes(&s->plan, p->storage, p->count);
    disk_start(p->disk,
               store_place_on_disk(&s->plan, STATE_MASTER, p->storage, p->number, p->count), bytes,
               writes);
    *(writes ? &s->flight.disk_written : &s->flight.disk_read) += bytes;
}
static inline void store_read_piece(Store *s, int storage, int piece) {
    const Piece p = store_piece(s, storage, piece);
    store_move_stored(s, &p, false);
}
// Delayed updates: returns the parameters of a piece as the masters are now. They are rounded into
// the buffer unless they are masters themselves.
static inline char *store_round_delayed(Store *s, const Piece *p) {
    char *master = store_piece_at(s, STATE_MASTER, p, 0);
    int64_t first;
    if (s->plan.dtype == DTYPE_FP32) { return master; }
    store_own(&s->plan, p->storage, &first);
    ops_wait(&p->buffer->link);
    ops_round_host(s->memory.stream, (uint16_t *)p->buffer->at, (const float *)(const void *)master,
                   p->count, store_rounding(s, p->storage, first + p->begin));
    return p->buffer->at;
}
// Copies a piece to the device (in) or to the host: what PiecePart says. Copies out follow the
// device's work so far; later device work sees what the CPU has made.
static inline void store_move_piece(Store *s, const Piece *p, int64_t step, bool in) {
    const bool cpu = s->plan.rows[p->storage].cpu_updates, delays = store_delays(&s->plan);
    PiecePart parts[PIECE_PARTS];
    const int count = store_piece_parts(&s->plan, p->storage, p->second, parts);
    if (!p->count) { return; }
    if (!in || delays) { ops_follow(&p->buffer->link, s->memory.stream); }
    if (in && !cpu && p->disk) { disk_wait(p->disk); }
    char *at = delays ? store_round_delayed(s, p) : p->buffer->at;
    for (int k = 0; k < count; k++) {
        const int64_t bytes = store_bytes(&s->plan, parts[k].kind, p->count);
        if (in ? parts[k].in : parts[k].out) {
            char *there = store_piece_at(s, parts[k].kind, p, step);
            store_move(s, &p->buffer->link, cpu ? at : there, cpu ? there : at, bytes, in);
        }
        at += bytes;
    }
    if (in && cpu) { ops_follow(s->memory.stream, &p->buffer->link); }
}
// Copies a piece to the device: its states, or, if the CPU updates, its new parameters.
static inline void store_fetch(Store *s, int storage, int piece, int64_t step) {
    const Piece p = store_piece(s, storage, piece);
    if (store_delays(&s->plan) && piece == 0) {
        s->flight.progress[storage].updates += s->flight.pending;
    }
    store_move_piece(s, &p, step, true);
    if (s->plan.rows[storage].cpu_updates && piece + 1 == s->plan.rows[storage].pieces) {
        store_slice_changed(s, storage);
    }
}

// -------------------------------------------------------------------------------------------------
// Noise, and the norm

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
// Adds noise if the run is private, and returns the norm of the whole gradient; each storage counts
// once. Follows store_finish_sums. All ranks must call it, whatever they hold.
static inline double store_norm(Store *s, int64_t step) {
    ExactSum sum = {};
    store_add_all_noise(s, step);
    store_measure(s, 0, s->plan.model->storages, step, &sum);
    comm_all_gather_small(s->memory.comm, &sum, s->memory.sums, sizeof sum);
    for (int r = 0; r < s->memory.comm->ranks; r++) {
        if (r != s->memory.comm->rank) { exact_join(&sum, &s->memory.sums[r]); }
    }
    return sqrt(exact_value(sum));
}
// After store_norm: this step makes no update.
static inline void store_skip_updates(Store *s) {
    for (int i = 0; i < s->plan.model->storages; i++) { s->flight.progress[i].noised = false; }
}

// -------------------------------------------------------------------------------------------------
// Begin

// Resets the fed back errors of a storage: after each ERROR_STEPS updates, and with each
// checkpoint, since checkpoints do not hold them.
static inline void store_forget_errors(Store *s, int storage) {
    if (s->memory.device[STATE_ERRORS].base && store_holds(&s->plan, storage)) {
        ops_zero(s->memory.stream, store_full(s, STATE_ERRORS, storage),
                 store_full_bytes(&s->plan, STATE_ERRORS, storage));
    }
}

// Begins the update of a storage, before its first piece: counts it.
static inline void store_begin_update(Store *s, int storage, int64_t step) {
    StorageProgress *p = &s->flight.progress[storage];
    // a gradient is clipped, reduced, given its noise and then used, in this order
    assert(store_holds(&s->plan, storage) && p->noised == s->plan.noise.on);
    if (s->plan.rows[storage].places) { store_begin_version(s, storage, step + 1); }
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
// Finds the memory of an update with the gradient of a step: of this rank's slice, or of one of its
// pieces, whose states have arrived in its buffer.
static inline UpdatePlaces store_find_places(Store *s, int storage, int64_t step, int piece) {
    const Piece x = store_piece(s, storage, piece);
    UpdatePlaces p = {.count = x.count, .cpu_update = s->plan.rows[storage].cpu_updates};
    store_own(&s->plan, storage, &p.first);
    p.first += x.begin;
    for (int kind = 0; kind < HOST_KINDS; kind++) {
        p.at[kind] = store_piece_at(s, kind, &x, step);
    }
    if (s->plan.rows[storage].pieces) {
        PiecePart parts[PIECE_PARTS];
        char *at = x.buffer->at;
        if (p.cpu_update) {
            ops_wait(&x.buffer->link);
            if (x.disk) { disk_wait(x.disk); }
        } else {
            ops_follow(s->memory.stream, &x.buffer->link);
        }
        const int n = store_piece_parts(&s->plan, storage, x.second, parts);
        for (int k = 0; k < n; k++) {
            p.at[parts[k].kind] = at;
            at += store_bytes(&s->plan, parts[k].kind, p.count);
        }
    }
    // parameters are their own masters
    if (s->plan.dtype == DTYPE_FP32) { p.at[STATE_MASTER] = p.at[STATE_PARAMETERS]; }
    return p;
}

// -------------------------------------------------------------------------------------------------
// Update

// The kernels of each optimizer: for the device, for the host, and of the first part of an update
// in two parts (matrices.h).
typedef void OptimizerKernel(Stream *, UpdateSlice, OptimizerStep);
typedef void DirectionKernel(Stream *, float *, UpdateSlice, OptimizerStep);
static const struct {
    OptimizerKernel *update[2];
    DirectionKernel *direct;
} optimizer_kernels[] = {
#define OPTIMIZER_KERNELS(NAME, COUNT, CUT, DIRECTIONS, ...)                                       \
    {.update = {ops_##NAME, ops_##NAME##_host}, .direct = (DIRECTIONS)},
    OPTIMIZER_TABLE(OPTIMIZER_KERNELS)};
static OptimizerKernel *const balance_kernels[2] = {ops_balance, ops_balance_host};
// Does the storage's update need whole matrices?
static inline bool store_has_matrices(const StatePlan *s, int storage) {
    return s->matrices.count && gpt_storage_is_block(s->model, storage);
}
// Updates n elements, from element `at` of the places on.
static inline void store_update_elements(Store *s, int storage, const UpdatePlaces *p, int64_t at,
                                         int64_t n, OptimizerStep o) {
    const Optimizer *optimizer = gpt_storage_is_block(s->plan.model, storage)
                                     ? s->plan.optimizer
                                     : optimizer_of_others(s->plan.optimizer);
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
    OptimizerKernel *const *kernels =
        o.balances ? balance_kernels : optimizer_kernels[optimizer - optimizers].update;
    kernels[p->cpu_update](s->memory.stream, u, o);
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
        o.balances = parts[i].rate == RATE_BALANCE;
        o.weight_decay = parts[i].decays ? decay : 0.0f;
        o.lr = (o.balances ? 1 : rate) * s->plan.rates[parts[i].rate];
        o.rounding = store_rounding(s, storage, begin);
        store_update_elements(s, storage, p, begin - p->first, count, o);
    }
}

// -------------------------------------------------------------------------------------------------
// Updates with whole matrices (matrices.h): directions, their exchange, and the rest of the update

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
    const MatrixExchange *e = &s->plan.rows[storage].exchange;
    const int64_t *bounds = store_slices(&s->plan, storage);
    const int me = s->plan.rows[storage].owners->all.me;
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
    const Group *all = &s->plan.rows[storage].owners->all;
    const MatrixExchange *e = &s->plan.rows[storage].exchange;
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
        optimizer_kernels[optimizer - optimizers].direct(s->memory.stream, part.direction, u, o);
    }
    if (piece + 1 >= s->plan.rows[storage].pieces) {
        store_exchange_matrices(s, storage, step, false);
    }
}
// Copies the parts of a matrix from where they arrived to one array, or (back) from there.
static inline void store_copy_matrix(Store *s, int storage, int k, float *whole, bool back) {
    const Matrices *x = &s->plan.matrices;
    const MatrixExchange *e = &s->plan.rows[storage].exchange;
    const int64_t *bounds = store_slices(&s->plan, storage);
    for (int r = 0; r < s->plan.rows[storage].owners->all.n; r++) {
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
    const MatrixExchange *e = &s->plan.rows[storage].exchange;
    const Group *all = &s->plan.rows[storage].owners->all;
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

// -------------------------------------------------------------------------------------------------
// The update of a storage

// Makes one optimizer update of this rank's slice of a storage, or of one of its pieces, with the
// gradient of a step. All members call it.
static inline void store_update(Store *s, int storage, int64_t step, OptimizerStep o, int piece) {
    const bool matrices = store_has_matrices(&s->plan, storage);
    if (matrices && !store_in_parts(&s->plan, storage)) { // no other actions for the first parts
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
// Updates masters and moments on the host, where all of this rank's slice is, with the pending
// gradient, while the device computes with the version before (--offload-delay). The new version is
// used from the moment when it is fetched.
static inline void store_update_delayed(Store *s, int storage, int64_t step, OptimizerStep o) {
    UpdatePlaces p = {.cpu_update = true};
    if (!s->flight.pending) { return; }
    // copies of fp32 masters that the previous step began may still read them
    for (int i = 0; i < MOVING_PIECES; i++) { ops_wait(&s->memory.offload_buffer[i].link); }
    p.count = store_own(&s->plan, storage, &p.first);
    for (int kind = 0; kind <= STATE_GRADIENT; kind++) { // the parameters are of another version
        const bool here = store_place(&s->plan, kind, storage) != PLACE_NONE;
        p.at[kind] = here ? store_at(s, kind, storage, step) : NULL;
    }
    store_update_parts(s, storage, &p, s->flight.progress[storage].updates + 1, o);
}

// -------------------------------------------------------------------------------------------------
// Store

// Copies a piece to the host: its updated states, or, if the CPU updates, its gradient.
static inline void store_evict(Store *s, int storage, int piece, int64_t step) {
    const Piece p = store_piece(s, storage, piece);
    store_move_piece(s, &p, step, false);
}
static inline void store_write_piece(Store *s, int storage, int piece) {
    const Piece p = store_piece(s, storage, piece);
    // first the states that the device has updated must arrive on the host
    if (!s->plan.rows[storage].cpu_updates) { ops_wait(&p.buffer->link); }
    store_move_stored(s, &p, true);
}

#endif
