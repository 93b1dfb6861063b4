// classifier_cpu.h: the classifier on the CPU: logits, losses and all their gradients in one
// operation. The contract is ops.h.
//
// A chunk of rows keeps all its logits, since the softmax needs the whole row before any gradient.
// First sweep   Computes a tile of logits, and at once, of each row and block of the vocabulary,
//               e^(logit - the row's maximum in the block) and their sum.
// Between       Computes the log-sum-exp of each row from its blocks.
// Second sweep  Goes through groups of columns that fit the caches of the team. Each thread turns
//               some columns into dlogits with one multiplication, and makes their rows of dwte.
//               Then the team adds the group's part of dx, block by block.
// Blocks are cut by the vocabulary alone, so results do not depend on the number of threads.
#ifndef CLASSIFIER_CPU_H
#define CLASSIFIER_CPU_H

#include "ops/cpu/activation_cpu.h" // soft caps
#include "ops/cpu/matmul_cpu.h"     // tiles, products, the team

enum {
    // Rows of a chunk. Each chunk reads and writes dwte once, and holds rows x V logits.
    CLASSIFIER_ROWS = 352,
    CLASSIFIER_BLOCK = 384, // columns of a block; the last one has what is left, too
    CLASSIFIER_TILE = 1536  // columns of a group, for each thread
};
typedef struct {
    int64_t R, C, V;
    int64_t blocks, group;   // blocks of the vocabulary; columns of a group, in whole blocks
    int64_t first, each, Vp; // first: the chunk's first row; each, Vp: see ops.h
    // The groups one after the other, each (R, its columns); or, kept for the caller, (R, Vp).
    Real *logits;
    bool kept;
    float softcap;        // 0: none
    float *dx;            // (R, C) sums, in bf16 only
    float *maximum, *sum; // (blocks, R)
    float *target;        // (R) logit of the target
    double *lse;          // (R)
} Classifier;
// Returns the blocks of the vocabulary that a product takes together. Own tiles add in the same
// order for any number.
static inline int64_t classifier_together(void) { return gemm_uses_tiles() ? 2 : 1; }
// Divides the workspace. most: maximum number of rows in a chunk; logits: the workspace also holds
// logits.
static inline Classifier classifier_space(float *at, int64_t N, int64_t C, int64_t V, int threads,
                                          int64_t most, bool logits, int64_t *floats) {
    float *begin = at;
    Classifier k;
    k.C = C;
    k.V = V;
    k.first = 0;
    k.each = N;
    k.Vp = V;
    k.kept = !logits;
    k.softcap = 0.0f;
    k.R = ceil_div(N, max_i64(1, ceil_div(N, most)));
    k.blocks = max_i64(1, V / CLASSIFIER_BLOCK);
    const int64_t groups = ceil_div(V, (int64_t)threads * CLASSIFIER_TILE);
    k.group = ceil_div(k.blocks, groups) * CLASSIFIER_BLOCK;
    const int64_t logits_bytes = round_up(V, 16) * k.R * (int64_t)ops_real_bytes();
    k.logits = logits ? (Real *)take_floats(&at, ceil_div(logits_bytes, 4)) : NULL;
    k.dx = cpu_real == DTYPE_BF16 ? take_floats(&at, k.R * C) : NULL;
    k.maximum = take_floats(&at, k.blocks * k.R);
    k.sum = take_floats(&at, k.blocks * k.R);
    k.target = take_floats(&at, k.R);
    k.lse = (double *)(void *)take_floats(&at, 2 * k.R);
    *floats = at - begin;
    return k;
}
// Divides the stream's workspace for the longest chunks that fit.
static inline Classifier classifier_that_fits(const Stream *s, int64_t N, int64_t C, int64_t V,
                                              bool logits) {
    float *at = (float *)s->workspace;
    int64_t floats;
    Classifier k = classifier_space(at, N, C, V, s->threads, CLASSIFIER_ROWS, logits, &floats);
    for (int64_t chunks = ceil_div(N, k.R) + 1;
         k.R > 1 && workspace_rest(s) < (size_t)floats * sizeof(float); chunks++) {
        k = classifier_space(at, N, C, V, s->threads, ceil_div(N, chunks), logits, &floats);
    }
    assert(workspace_rest(s) >= (size_t)floats * sizeof(float));
    return k;
}
// Returns the first column of a block; of the block after the last one, the end.
static inline int64_t classifier_column(const Classifier *k, int64_t block) {
    return block < k->blocks ? block * CLASSIFIER_BLOCK : k->V;
}
static inline int64_t classifier_block(const Classifier *k, int64_t v) {
    return min_i64(v / CLASSIFIER_BLOCK, k->blocks - 1);
}
// Returns the first column of the group that a column belongs to, and of the next group.
static inline int64_t classifier_group(const Classifier *k, int64_t v) {
    return classifier_block(k, v) * CLASSIFIER_BLOCK / k->group * k->group;
}
static inline int64_t classifier_group_end(const Classifier *k, int64_t v) {
    const int64_t end = classifier_group(k, v) + k->group;
    return end < k->blocks * CLASSIFIER_BLOCK ? end : k->V;
}
// Returns the distance between rows of logits in the group of column v.
static inline int64_t classifier_stride(const Classifier *k, int64_t v) {
    const int64_t columns = classifier_group_end(k, v) - classifier_group(k, v);
    return k->kept ? k->Vp : round_up(columns, 16);
}
static inline Real *classifier_logits(const Classifier *k, int64_t row, int64_t v) {
    const int64_t first = k->kept ? 0 : classifier_group(k, v);
    return real_at(k->logits, first * k->R + row * classifier_stride(k, v) + (v - first));
}

// out = e^(l - maximum) of a block of a row's logits l, which may be out; keeps maximum and sum.
TYPED void classifier_exponentials(const DType type, const Classifier *k, int64_t row,
                                   int64_t block, Real *out, const float *l) {
    const int64_t w = classifier_column(k, block + 1) - classifier_column(k, block);
    float top = l[0], sum = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t c = 0; c < w; c++) { top = l[c] > top ? l[c] : top; }
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < w; c++) {
        const float e = fast_exp(l[c] - top);
        store_real(type, out, c, e);
        sum += e;
    }
    k->maximum[block * k->R + row] = top;
    k->sum[block * k->R + row] = sum;
}
// First sweep of rows begin to end, and of some blocks of one group: logits = x wte^T.
static inline void classifier_forward(Stream *s, const Classifier *k, int64_t begin, int64_t end,
                                      int64_t block, int64_t last, const Real *x, const Real *wte,
                                      const int32_t *targets) {
    const int64_t v0 = classifier_column(k, block), v1 = classifier_column(k, last), w = v1 - v0,
                  stride = cpu_real == DTYPE_FP32 ? classifier_stride(k, v0) : w;
    float *l =
        cpu_real == DTYPE_FP32 ? (float *)classifier_logits(k, begin, v0) : gemm_thread_space(s);
    gemm_tile(s, AS_STORED, TRANSPOSED, end - begin, w, k->C, real_at_const(x, begin * k->C), k->C,
              real_at_const(wte, v0 * k->C), k->C, false, l, stride);
    for (int64_t i = begin; i < end; i++, l += stride) {
        if (k->softcap != 0.0f) { cap_part(DTYPE_FP32, (Real *)(void *)l, k->softcap, w); }
        if (targets[i] >= v0 && targets[i] < v1) { k->target[i] = l[targets[i] - v0]; }
        for (int64_t b = block; b < last; b++) {
            const int64_t v = classifier_column(k, b);
            FOR_TYPE(classifier_exponentials, k, i, b, classifier_logits(k, i, v), l + (v - v0));
        }
    }
}
// The same in pieces whose logits fit where they are computed.
static inline void classifier_forward_pieces(Stream *s, const Classifier *k, int64_t begin,
                                             int64_t end, int64_t block, int64_t last,
                                             const Real *x, const Real *wte,
                                             const int32_t *targets) {
    const bool whole = cpu_real == DTYPE_FP32;
    for (int64_t b = block, next; b < last; b = next) {
        next = whole ? last : min_i64(last, b + classifier_together());
        const int64_t rows =
            whole ? end - begin
                  : gemm_sums() / (classifier_column(k, next) - classifier_column(k, b));
        for (int64_t i = begin; i < end; i += rows) {
            classifier_forward(s, k, i, min_i64(end, i + rows), b, next, x, wte, targets);
        }
    }
}

// Computes the log-sum-exp of row i, and returns its loss.
static inline float classifier_row_loss(const Classifier *k, int64_t i, int32_t target) {
    double top = -INFINITY, sum = 0.0;
    for (int64_t b = 0; b < k->blocks; b++) { // gcc 12 for ARM cannot compile fmax() here
        const double maximum = (double)k->maximum[b * k->R + i];
        top = maximum > top ? maximum : top;
    }
    int64_t b = k->blocks;
    do { // there is at least one
        b--;
        sum += (double)k->sum[b * k->R + i] * exp((double)k->maximum[b * k->R + i] - top);
    } while (b > 0);
    k->lse[i] = top + log(sum);
    return target < 0 ? 0.0f : (float)(k->lse[i] - (double)k->target[i]);
}

TYPED void scale_reals(const DType type, Real *x, float factor, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) { store_real(type, x, i, load_real(type, x, i) * factor); }
}
// The slope of the soft cap at a logit that it has capped.
static inline float softcap_slope(float logit, float softcap) {
    return 1.0f - logit / softcap * (logit / softcap);
}
// dlogits of capped logits, which are log(x) + maximum. Where x has become 0, so does the dlogit.
TYPED void scale_capped(const DType type, Real *x, float factor, float maximum, float softcap,
                        int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float e = load_real(type, x, i),
                    slope = softcap_slope(fast_log(e) + maximum, softcap);
        store_real(type, x, i, e == 0.0f ? 0.0f : e * factor * slope);
    }
}
// The target's dlogit, from its probability before that was rounded.
TYPED void classifier_target(const DType type, Real *l, int64_t at, double log_p, float scale) {
    store_real(type, l, at,
               type == DTYPE_FP32 ? load_real(type, l, at) - scale : scale * (float)expm1(log_p));
}
// dlogits of columns v0 to v1 = scale (softmax - one at the target); 0 in masked rows.
static inline void classifier_dlogits(const Classifier *k, int64_t rows, int64_t v0, int64_t v1,
                                      const int32_t *targets, float scale) {
    for (int64_t i = 0; i < rows; i++) {
        Real *l = classifier_logits(k, i, v0);
        for (int64_t v = v0, next; v < v1; v = next) {
            const int64_t block = classifier_block(k, v);
            next = min_i64(v1, classifier_column(k, block + 1));
            const double exponent = (double)k->maximum[block * k->R + i] - k->lse[i];
            const float factor = targets[i] < 0 ? 0.0f : scale * (float)exp(exponent);
            if (k->softcap != 0.0f) {
                FOR_TYPE(scale_capped, real_at(l, v - v0), factor, k->maximum[block * k->R + i],
                         k->softcap, next - v);
            } else {
                FOR_TYPE(scale_reals, real_at(l, v - v0), factor, next - v);
            }
        }
        if (targets[i] >= v0 && targets[i] < v1) {
            const float slope = k->softcap != 0.0f ? softcap_slope(k->target[i], k->softcap) : 1.0f;
            FOR_TYPE(classifier_target, l, targets[i] - v0, k->target[i] - k->lse[i],
                     scale * slope);
        }
    }
}
// Computes rows v0 to v1 of dwte. Rows of the chunk that belong to different samples (`each` rows)
// go to different dwte.
static inline void classifier_dwte(Stream *s, const Classifier *k, int64_t rows, int64_t v0,
                                   int64_t v1, float *dwte, const Real *x, bool accumulate) {
    for (int64_t i = 0, next; i < rows; i = next) {
        const int64_t sample = (k->first + i) / k->each;
        next = min_i64(rows, (sample + 1) * k->each - k->first);
        gemm_tile(s, TRANSPOSED, AS_STORED, v1 - v0, k->C, next - i, classifier_logits(k, i, v0),
                  classifier_stride(k, v0), real_at_const(x, i * k->C), k->C,
                  accumulate || (k->first + i) % k->each, dwte + (sample * k->Vp + v0) * k->C,
                  k->C);
    }
}
// Adds the part of columns v0 to v1 to a tile of dx, in whole blocks. The first part is written.
static inline void classifier_dx(Stream *s, const Classifier *k, Tile t, int64_t v0, int64_t v1,
                                 Real *dx, const Real *wte) {
    float *sums = (k->dx ? k->dx : (float *)dx) + t.row * k->C + t.col;
    for (int64_t v = v0, next; v < v1; v = next) {
        next = min_i64(v1, classifier_column(k, classifier_block(k, v) + classifier_together()));
        gemm_tile(s, AS_STORED, AS_STORED, t.rows, t.cols, next - v, classifier_logits(k, t.row, v),
                  classifier_stride(k, v), real_at_const(wte, v * k->C + t.col), k->C, v > 0, sums,
                  k->C);
    }
    for (int64_t n = 0; n < t.rows && k->dx && v1 == k->V; n++) {
        floats_to_reals(real_at(dx, (t.row + n) * k->C + t.col), sums + n * k->C, t.cols);
    }
}

// A chunk of rows, in ops_classifier()'s terms, and what it needs.
typedef struct {
    int64_t rows;
    float *losses, *dwte;
    Real *dx;
    const Real *x, *wte;
    const int32_t *targets;
    float scale;
    bool gradients, accumulate;
} ClassifierChunk;
// Both sweeps are called by each thread of the team.
static inline void classifier_first_sweep(Stream *s, const Classifier *k, ClassifierChunk c) {
    const int64_t blocks = k->group / CLASSIFIER_BLOCK, groups = ceil_div(k->blocks, blocks),
                  across = min_i64(s->threads, blocks),
                  down = max_i64(
                      1, min_i64(ceil_div(s->threads, across * groups), c.rows / TILE_LEAST));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < groups * across * down; i++) {
        const int row = (int)(i % down), part = (int)(i / down % across);
        const int64_t first = i / down / across * blocks, mine = min_i64(blocks, k->blocks - first);
        classifier_forward_pieces(
            s, k, part_begin(c.rows, (int)down, row), part_begin(c.rows, (int)down, row + 1),
            first + part_begin(mine, (int)across, part),
            first + part_begin(mine, (int)across, part + 1), c.x, c.wte, c.targets);
    }
}
static inline void classifier_second_sweep(Stream *s, const Classifier *k, ClassifierChunk c) {
    const Tiling grid = tile_output(c.rows, k->C, CLASSIFIER_BLOCK, s->threads, INT64_MAX);
    for (int64_t v = 0, end; v < k->V; v = end) {
        end = classifier_group_end(k, v);
        const int64_t lines = max_i64(1, (end - v) / TILE_LEAST);
#pragma omp for schedule(dynamic, 1)
        for (int part = 0; part < s->threads; part++) {
            const int64_t line = part_begin(lines, s->threads, part),
                          last = part_begin(lines, s->threads, part + 1),
                          v0 = v + line * TILE_LEAST,
                          v1 = last < lines ? v + last * TILE_LEAST : end;
            if (line == last) { continue; }
            classifier_dlogits(k, c.rows, v0, v1, c.targets, c.scale);
            if (c.dwte) { classifier_dwte(s, k, c.rows, v0, v1, c.dwte, c.x, c.accumulate); }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < (c.dx ? grid.tiles : 0); i++) {
            classifier_dx(s, k, tile_at(&grid, i), v, end, c.dx, c.wte);
        }
    }
}
static inline void classifier_chunk(Stream *s, const Classifier *k, ClassifierChunk c) {
#pragma omp parallel num_threads(s->threads)
    {
        gemm_serial_here();
        classifier_first_sweep(s, k, c);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < c.rows; i++) {
            c.losses[i] = classifier_row_loss(k, i, c.targets[i]);
        }
        if (c.gradients) { classifier_second_sweep(s, k, c); }
    }
}

static inline void ops_classifier(Stream *s, float *losses, Real *dx, float *dwte, Real *dlogits,
                                  const Real *x, const Real *wte, const int32_t *targets, int64_t N,
                                  int64_t each, int64_t C, int64_t V, int64_t Vp, float scale,
                                  float softcap, bool accumulate) {
    if (N == 0) {
        if (dwte && !accumulate) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
        return;
    }
    for (int64_t b = 0; b < N / each && dwte && !accumulate; b++) {
        ops_zero(s, dwte + (b * Vp + V) * C, (size_t)((Vp - V) * C) * sizeof(float));
    }
    Classifier k = classifier_that_fits(s, N, C, V, !dlogits);
    if (dlogits) { k.logits = dlogits; }
    k.each = each;
    k.Vp = Vp;
    k.softcap = softcap;
    for (int64_t n = 0; n < N; n += k.R) {
        k.first = n;
        const ClassifierChunk chunk = {
            .rows = min_i64(k.R, N - n),
            .losses = losses + n,
            .dwte = dwte,
            .dx = dx ? real_at(dx, n * C) : NULL,
            .x = real_at_const(x, n * C),
            .wte = wte,
            .targets = targets + n,
            .scale = scale,
            .gradients = dx || dwte || dlogits,
            .accumulate = accumulate,
        };
        classifier_chunk(s, &k, chunk);
        for (int64_t i = 0; i < chunk.rows && dlogits; i++) {
            memset(real_at(k.logits, i * Vp + V), 0, (size_t)(Vp - V) * ops_real_bytes());
        }
        if (dlogits) { k.logits = real_at(k.logits, k.R * Vp); }
    }
}

#endif
