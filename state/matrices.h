// matrices.h: optimizers that need whole matrices (Muon), where each rank has slices of elements.
//
// Parts      A block's storage is a list of parts: the ranges of its tensors (architecture.h).
//            Those of 2-D tensors are the matrices: q, k and v apart, gate and up apart.
// Directions A rank computes the direction of each element of its slice, from gradient and moments.
//            Directions lie in one array, those of matrices first, ordered by their homes.
// Homes      Each matrix has a home among the owners of its storage. The parts of its direction
//            travel there (all-to-all), the home makes it orthogonal, and the parts travel back.
//            So slices, collectives and the memory of states are those of any optimizer, and a
//            matrix is computed alike in every layout.
// Waves      The blocks of a wave travel and are made orthogonal together: enough matrices for all
//            ranks, and few enough to bound the memory. Homes are balanced by their operations over
//            the wave: the next costliest matrix goes to the rank with least work; of several, to
//            the one that has most of it.
//
// Where a storage has one owner, nothing travels.
#ifndef MATRICES_H
#define MATRICES_H

#include "base/base.h"
#include "comm/group.h"
#include "model/gpt.h"
#include "ops/orthogonalise.h"
#include "state/layout.h"
#include "state/policy.h"
#include "state/table.h"

enum { WAVE_MATRICES = 4 }; // of a wave, for each rank

// Returns how many matrices a block has.
static inline int block_matrices(const GptModel *m) {
    StoragePart parts[MOST_PARTS];
    int matrices = 0;
    for (int k = gpt_storage_ranges(m, m->first_block, parts) - 1; k >= 0; k--) {
        matrices += parts[k].is_matrix;
    }
    return matrices;
}
// Returns how many blocks a wave has where at most so many ranks own a block.
static inline int64_t matrices_wave_blocks(int matrices, int owners) {
    return owners == 1 ? 1 : max_i64(1, ceil_div(WAVE_MATRICES * owners, matrices));
}
// Returns the last storage of a block's wave, in which its owners update it together.
static inline int matrices_wave(const GptModel *m, const StorageRow *rows, int storage) {
    int most = 1;
    for (int i = m->first_block; i < m->first_after; i++) {
        most = max_i64(most, rows[i].owners->all.n);
    }
    const int64_t blocks = matrices_wave_blocks(block_matrices(m), most);
    const int64_t wave = (storage - m->first_block) / blocks;
    return m->first_block + (int)min_i64((wave + 1) * blocks, m->first_after - m->first_block) - 1;
}

typedef struct {
    int count; // parts of a block; 0: the optimizer needs no matrices
    StoragePart part[MOST_PARTS];
    // floats: of the directions of a wave; of the matrices of which this rank is home; of the
    // largest matrix, if matrices arrive in pieces; bytes of the iteration's scratch memory
    int64_t directions, gathered, whole, scratch;
} Matrices;

// Returns how many elements of a part are in a slice; *begin: the first of them in the storage.
static inline int64_t part_of_slice(const StoragePart *p, const int64_t *bounds, int member,
                                    int64_t *begin) {
    *begin = max_i64(p->offset, bounds[member]);
    return max_i64(0, min_i64(p->offset + p->rows * p->cols, bounds[member + 1]) - *begin);
}
// Returns where a part's directions begin among those of a member's slice.
static inline int64_t matrices_place(const Matrices *x, const MatrixExchange *e,
                                     const int64_t *bounds, int member, int part) {
    int64_t at = 0, begin;
    for (int k = 0; k < x->count; k++) {
        const bool matrix = e->home[k] >= 0, mine = e->home[part] >= 0;
        const bool before = matrix != mine                ? matrix
                            : e->home[k] != e->home[part] ? e->home[k] < e->home[part]
                                                          : k < part;
        at += before ? part_of_slice(&x->part[k], bounds, member, &begin) : 0;
    }
    return at;
}
// Returns where the part of a matrix that a member sends home begins among all that arrives there.
static inline int64_t matrices_arrival(const Matrices *x, const MatrixExchange *e,
                                       const int64_t *bounds, int member, int part) {
    int64_t at = e->from[member], begin;
    for (int k = 0; k < part; k++) {
        const bool same = e->home[k] == e->home[part];
        at += same ? part_of_slice(&x->part[k], bounds, member, &begin) : 0;
    }
    return at;
}

// Returns the last storage of the wave that begins with this one.
static inline int wave_end(const StorageRow *rows, int first) {
    return (int)max_i64(first, rows[first].wave);
}
// Returns the matrix of a wave that costs most and has no home yet: storage and part. Returns false
// if all have one.
static inline bool matrices_next(const Matrices *x, const StorageRow *rows, int first, int *storage,
                                 int *part) {
    double most = 0;
    for (int i = first; i <= wave_end(rows, first); i++) {
        for (int k = 0; k < x->count; k++) {
            const double flops = orthogonalise_flops(x->part[k].rows, x->part[k].cols);
            if (!x->part[k].is_matrix || rows[i].exchange.home[k] >= 0 || flops <= most) {
                continue;
            }
            most = flops;
            *storage = i;
            *part = k;
        }
    }
    return most > 0;
}
// Gives each matrix of a wave its home. work: [ranks] scratch memory, zeros.
static inline void matrices_find_homes(const Matrices *x, StorageRow *rows, int first,
                                       double *work) {
    int i, k;
    while (matrices_next(x, rows, first, &i, &k)) {
        const Group *owners = &rows[i].owners->all;
        int home = 0;
        int64_t most = -1, begin;
        for (int r = 0; r < owners->n; r++) {
            const double more = work[owners->ranks[r]] - work[owners->ranks[home]];
            const int64_t has = part_of_slice(&x->part[k], rows[i].slices[SLICES_WHOLE], r, &begin);
            if (more < 0 || (more == 0 && has > most)) {
                home = r;
                most = has;
            }
        }
        rows[i].exchange.home[k] = home;
        work[owners->ranks[home]] += orthogonalise_flops(x->part[k].rows, x->part[k].cols);
    }
}
// Plans the exchange of a storage that this rank owns: what follows from the homes.
static inline void matrices_plan_exchange(const Matrices *x, StorageRow *row) {
    MatrixExchange *e = &row->exchange;
    const Group *owners = &row->owners->all;
    const int64_t *bounds = row->slices[SLICES_WHOLE];
    e->to = new_array(int64_t, owners->n + 1, "matrices");
    e->from = new_array(int64_t, owners->n + 1, "matrices");
    for (int r = 0; r < owners->n; r++) {
        e->to[r + 1] = e->to[r];
        e->from[r + 1] = e->from[r];
        for (int k = 0; k < x->count; k++) {
            int64_t begin, mine = part_of_slice(&x->part[k], bounds, owners->me, &begin);
            e->to[r + 1] += e->home[k] == r ? mine : 0;
            const int64_t theirs = part_of_slice(&x->part[k], bounds, r, &begin);
            e->from[r + 1] += e->home[k] == owners->me ? theirs : 0;
        }
    }
}
// Sets what the busiest owner of a storage sends to the homes, or receives there, whichever is
// more, for which all wait: bytes on each kind of link. The way back takes as much.
static inline void matrices_busiest(const Matrices *x, const StorageRow *row,
                                    int64_t bytes[LINK_KINDS]) {
    const Group *owners = &row->owners->all;
    typedef struct {
        int64_t sent[LINK_KINDS], got[LINK_KINDS];
    } Owner;
    Owner *owner = new_array(Owner, owners->n, "matrices");
    for (int r = 0; r < owners->n; r++) {
        for (int k = 0; k < x->count; k++) {
            const int home = row->exchange.home[k];
            if (home < 0 || home == r) { continue; }
            const CommLink link = group_link(owners, r, home);
            int64_t begin, part;
            part = part_of_slice(&x->part[k], row->slices[SLICES_WHOLE], r, &begin);
            owner[r].sent[link] += part * sizeof(float);
            owner[home].got[link] += part * sizeof(float);
        }
    }
    for (int l = 0; l < LINK_KINDS; l++) {
        bytes[l] = 0;
        for (int r = 0; r < owners->n; r++) {
            bytes[l] = max_i64(bytes[l], max_i64(owner[r].sent[l], owner[r].got[l]));
        }
    }
    free(owner);
}
// Plans a wave: homes, and where the storages have their directions.
static inline void matrices_plan_wave(Matrices *x, StorageRow *rows, int first, double *work) {
    int64_t directions = 0, gathered = 0;
    matrices_find_homes(x, rows, first, work);
    for (int i = first; i <= wave_end(rows, first); i++) {
        MatrixExchange *e = &rows[i].exchange;
        const Group *owners = &rows[i].owners->all;
        if (owners->me < 0) { continue; }
        matrices_plan_exchange(x, &rows[i]);
        e->directions = directions;
        e->gathered = gathered;
        directions += slice_length(rows[i].slices[SLICES_WHOLE], owners->me);
        if (owners->n > 1) { gathered += e->from[owners->n]; }
        for (int k = 0; k < x->count && owners->n > 1; k++) {
            const int64_t elements = x->part[k].rows * x->part[k].cols;
            if (e->home[k] == owners->me) { x->whole = max_i64(x->whole, elements); }
        }
    }
    x->directions = max_i64(x->directions, directions);
    x->gathered = max_i64(x->gathered, gathered);
}
// Plans whose matrices are made orthogonal where. real: compute precision.
static inline Matrices matrices_plan(const GptModel *m, StorageRow *rows, int ranks, DType real) {
    Matrices x = {};
    x.count = gpt_storage_ranges(m, m->first_block, x.part);
    for (int i = 0; i < m->storages; i++) {
        for (int k = 0; k < MOST_PARTS; k++) { rows[i].exchange.home[k] = -1; }
    }
    bool owns = false;
    for (int i = m->first_block; i < m->first_after; i = wave_end(rows, i) + 1) {
        double *work = new_array(double, ranks, "matrices");
        matrices_plan_wave(&x, rows, i, work);
        for (int k = i; k <= wave_end(rows, i); k++) { owns |= row_holds(&rows[k]); }
        free(work);
    }
    for (int k = 0; k < x.count && owns; k++) {
        const StoragePart *p = &x.part[k];
        if (!p->is_matrix) { continue; }
        x.scratch = max_i64(x.scratch, orthogonalise_bytes(p->rows, p->cols, real));
    }
    return x;
}

// The memory at `base`: directions, gathered matrices, one whole matrix, and the scratch.
static inline int64_t matrices_round(int64_t floats) {
    return round_up(floats * (int64_t)sizeof(float), 256);
}
static inline int64_t matrices_bytes(const Matrices *x) {
    return matrices_round(x->directions) + matrices_round(x->gathered) + matrices_round(x->whole) +
           x->scratch;
}
static inline float *matrices_directions(char *base, const MatrixExchange *e) {
    return (float *)(void *)base + e->directions;
}
static inline float *matrices_gathered(char *base, const Matrices *x, const MatrixExchange *e) {
    return (float *)(void *)(base + matrices_round(x->directions)) + e->gathered;
}
static inline float *matrices_whole(char *base, const Matrices *x) {
    return (float *)(void *)(base + matrices_round(x->directions) + matrices_round(x->gathered));
}
static inline void *matrices_scratch(char *base, const Matrices *x) {
    return base + matrices_bytes(x) - x->scratch;
}

#endif
