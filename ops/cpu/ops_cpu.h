// ops_cpu.h: the tensor operations on the CPU, with OpenMP for the team of threads and CBLAS for
// matrix products. The contract is ops.h.
//
// Plan     Matrix products take nearly all the time of a step, so the rest is arranged around them.
//          The output is cut into large tiles. A thread takes a tile, calls a serial sgemm for it,
//          and applies what follows (GELU, softmax) while the tile is in cache. A bias costs
//          nothing: the tile is filled with it first, and sgemm adds to the tile. Attention works
//          in 64 x 64 tiles with our own register-blocked product, because BLAS would spend its
//          time packing.
// Speed    is left to the compiler's vectoriser: `omp simd` loops, and GCC vector types where
//          registers must be blocked. There are no intrinsics, so the same code serves AVX2,
//          AVX-512 and others.
// Threads  Results do not depend on timing: each piece of work is computed alike whichever thread
//          takes it, and the pieces are cut by shape. Element-wise operations use blocks of a fixed
//          size. So the tail that the vectoriser treats separately is always the end of the array,
//          for any thread count.
#ifndef OPS_CPU_H
#define OPS_CPU_H

#include "ops/cpu/attention_cpu.h" // attention
#include "ops/cpu/clip_cpu.h"      // gradients of single samples
#include "ops/cpu/matmul_cpu.h"    // matrix products
#include "ops/cpu/noise_cpu.h"     // noise
#include "ops/cpu/quantize_cpu.h"  // quantization

// --- embedding -----------------------------------------------------------------------------------
static inline void ops_embedding_forward(Stream *s, Real *out, const int32_t *tokens,
                                         const Real *wte, const Real *wpe, int64_t rows, int64_t T,
                                         int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < rows * T; n++) {
        float *y = f32(out) + n * C;
        const float *token = f32_const(wte) + tokens[n] * C, *position = f32_const(wpe) + n % T * C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) { y[c] = token[c] + position[c]; }
    }
}

// Each thread has a slice of the channels, and adds the tokens in their order. So threads write to
// different elements, and a repeated token is summed in one order for any thread count.
static inline void embedding_scatter(Stream *s, float *dwte, const float *dout,
                                     const int32_t *tokens, const float *factors, int64_t N,
                                     int64_t T, int64_t C) {
    const int64_t lines = ceil_div(C, 16); // slices are whole cache lines
#pragma omp parallel num_threads(s->threads)
    {
        int64_t begin = 16 * part_begin(lines, omp_get_num_threads(), omp_get_thread_num());
        int64_t end =
            min_i64(C, 16 * part_begin(lines, omp_get_num_threads(), omp_get_thread_num() + 1));
        for (int64_t n = 0; n < N; n++) {
            float *to = dwte + tokens[n] * C;
            const float *from = dout + n * C, factor = factors ? factors[n / T] : 1.0f;
            if (factor == 0.0f) { continue; }
#pragma omp simd
            for (int64_t c = begin; c < end; c++) { to[c] += factor * from[c]; }
        }
    }
}
static inline void ops_embedding_backward(Stream *s, float *dwte, float *dwpe, const Real *dout,
                                          const int32_t *tokens, const float *factors, int64_t rows,
                                          int64_t T, int64_t C, int64_t Vp, int64_t maxT,
                                          bool accumulate_wte, bool accumulate_wpe) {
    if (dwte && !accumulate_wte) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
    if (dwte) { embedding_scatter(s, dwte, f32_const(dout), tokens, factors, rows * T, T, C); }
    if (!dwpe) { return; }
    if (!accumulate_wpe) { ops_zero(s, dwpe, (size_t)(maxT * C) * sizeof(float)); }
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t t = 0; t < T; t++) {
        float *to = dwpe + t * C;
        for (int64_t b = 0; b < rows; b++) {
            const float *from = f32_const(dout) + (b * T + t) * C,
                        factor = factors ? factors[b] : 1.0f;
            if (factor == 0.0f) { continue; }
#pragma omp simd
            for (int64_t c = 0; c < C; c++) { to[c] += factor * from[c]; }
        }
    }
}

// --- layernorm: a row fits the L1 cache, so its passes cost one pass over memory -----------------
static inline void layernorm_row(float *out, float *mean, float *rstd, const float *x,
                                 const float *weight, const float *bias, int64_t C) {
    float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < C; c++) { sum += x[c]; }
    const float m = sum / (float)C;
// The mean is subtracted first, which avoids cancellation.
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < C; c++) { squares += (x[c] - m) * (x[c] - m); }
    const float r = 1.0f / sqrtf(squares / (float)C + 1e-5f);
#pragma omp simd
    for (int64_t c = 0; c < C; c++) { out[c] = (x[c] - m) * r * weight[c] + bias[c]; }
    *mean = m;
    *rstd = r;
}
static inline void ops_layernorm_forward(Stream *s, Real *out, float *mean, float *rstd, Real *sum,
                                         const Real *a, const Real *b, const Real *weight,
                                         const Real *bias, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < N; n++) {
        const float *x = f32_const(a) + n * C;
        if (b) {
            float *total = f32(sum) + n * C;
            const float *y = f32_const(b) + n * C;
#pragma omp simd
            for (int64_t c = 0; c < C; c++) { total[c] = x[c] + y[c]; }
            x = total;
        }
        layernorm_row(f32(out) + n * C, mean + n, rstd + n, x, f32_const(weight), f32_const(bias),
                      C);
        poll_after_row(s, n);
    }
}

// With h = (x - mean) rstd and g = dout * weight: dx = rstd (g - average(g) - h average(g h)).
static inline void ops_layernorm_backward_input(Stream *s, Real *din, const Real *dout,
                                                const Real *in, const Real *weight,
                                                const float *mean, const float *rstd, int64_t N,
                                                int64_t C) {
    const float *w = f32_const(weight);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < N; n++) {
        float *dx = f32(din) + n * C;
        const float *dy = f32_const(dout) + n * C, *x = f32_const(in) + n * C;
        const float m = mean[n], r = rstd[n];
        float g_sum = 0.0f, gh_sum = 0.0f;
#pragma omp simd reduction(+ : g_sum, gh_sum)
        for (int64_t c = 0; c < C; c++) {
            float g = dy[c] * w[c];
            g_sum += g;
            gh_sum += g * ((x[c] - m) * r);
        }
        const float g_mean = g_sum / (float)C, gh_mean = gh_sum / (float)C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) {
            dx[c] += r * (dy[c] * w[c] - g_mean - (x[c] - m) * r * gh_mean);
        }
        poll_after_row(s, n);
    }
}

// Each thread has a slice of the channels, and adds the rows in their order.
static inline void ops_layernorm_backward_weight(Stream *s, float *dweight, float *dbias,
                                                 const Real *dout, const Real *in,
                                                 const float *mean, const float *rstd, int64_t N,
                                                 int64_t C, bool accumulate) {
    const int64_t lines = ceil_div(C, 16);
#pragma omp parallel num_threads(s->threads)
    {
        int64_t begin = 16 * part_begin(lines, omp_get_num_threads(), omp_get_thread_num());
        int64_t end =
            min_i64(C, 16 * part_begin(lines, omp_get_num_threads(), omp_get_thread_num() + 1));
        for (int64_t c = begin; c < end && !accumulate; c++) { dweight[c] = dbias[c] = 0.0f; }
        for (int64_t n = 0; n < N; n++) {
            const float *dy = f32_const(dout) + n * C, *x = f32_const(in) + n * C;
            const float m = mean[n], r = rstd[n];
#pragma omp simd
            for (int64_t c = begin; c < end; c++) {
                dweight[c] += dy[c] * ((x[c] - m) * r);
                dbias[c] += dy[c];
            }
            poll_after_row(s, n);
        }
    }
}

// --- classifier ----------------------------------------------------------------------------------
// A chunk of rows keeps all its logits, since the softmax needs the whole row before any gradient.
// The logits are stored as tiles of the vocabulary, each (R, width) and contiguous, or in whole
// rows if the caller wants dlogits.
// First sweep   Computes the logits of a tile, and at once e^(logit - the row's maximum here).
// Between       Computes the log-sum-exp of each row from its tiles.
// Second sweep  Turns a tile into dlogits with one multiplication. While the tile is in cache, it
//               serves dwte (its own rows) and dx (a partial sum per thread).
enum {
    // Rows of a chunk. Each chunk reads and writes dwte once, and holds rows x V logits.
    CLASSIFIER_ROWS = 512,
    CLASSIFIER_COLS = 2048 // columns of a tile, at most
};
typedef struct {
    // A thread computes contiguous tiles, the same ones in both sweeps.
    int64_t R, C, V, width, tiles, tiles_a_thread;
    int64_t first, each, Vp; // first: the chunk's first row; each, Vp: see ops.h
    // (tiles, R, width), or the caller's (R, Vp)
    float *logits;
    // distance from a row of a tile to the next row, and from a tile to the next tile
    int64_t row, next;
    float *maximum, *sum; // (tiles, R)
    float *target;        // (R) logit of the target
    double *lse;          // (R)
    float *dx;            // (threads, R, C)
} Classifier;
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
    k.R = ceil_div(N, max_i64(1, ceil_div(N, most)));
    k.tiles_a_thread = ceil_div(V, (int64_t)threads * CLASSIFIER_COLS);
    k.tiles = k.tiles_a_thread * threads;
    k.width = round_up(ceil_div(V, k.tiles), 16);
    k.logits = logits ? take_floats(&at, k.tiles * k.R * k.width) : NULL;
    k.row = k.width;
    k.next = k.R * k.width;
    k.maximum = take_floats(&at, k.tiles * k.R);
    k.sum = take_floats(&at, k.tiles * k.R);
    k.target = take_floats(&at, k.R);
    k.lse = (double *)(void *)take_floats(&at, 2 * k.R);
    k.dx = take_floats(&at, threads * k.R * C);
    *floats = at - begin;
    return k;
}
static inline int64_t classifier_width(const Classifier *k, int64_t tile) {
    return min_i64(k->width, k->V - tile * k->width);
}
static inline float *classifier_logits(const Classifier *k, int64_t tile, int64_t i) {
    return k->logits + tile * k->next + i * k->row;
}

// First sweep of one tile: logits(rows, w) = x wte_tile^T, then e^(logit - maximum).
static inline void classifier_tile_forward(Stream *s, const Classifier *k, int64_t tile,
                                           int64_t rows, const float *x, const float *wte,
                                           const int32_t *targets) {
    const int64_t v0 = tile * k->width, w = classifier_width(k, tile);
    if (w <= 0) { return; }
    sgemm_tile(s, CblasNoTrans, CblasTrans, rows, w, k->C, x, k->C, wte + v0 * k->C, k->C, 0.0f,
               classifier_logits(k, tile, 0), k->row);
    for (int64_t i = 0; i < rows; i++) {
        float *l = classifier_logits(k, tile, i), top = l[0], sum = 0.0f;
        if (targets[i] >= v0 && targets[i] < v0 + w) { k->target[i] = l[targets[i] - v0]; }
#pragma omp simd reduction(max : top)
        for (int64_t c = 0; c < w; c++) { top = l[c] > top ? l[c] : top; }
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < w; c++) {
            l[c] = fast_exp(l[c] - top);
            sum += l[c];
        }
        k->maximum[tile * k->R + i] = top;
        k->sum[tile * k->R + i] = sum;
    }
}

// Computes the log-sum-exp of row i, and returns its loss.
static inline float classifier_row_loss(const Classifier *k, int64_t i, int32_t target) {
    double top = -INFINITY, sum = 0.0;
    int64_t t = 0;
    for (; t < k->tiles && classifier_width(k, t) > 0; t++) {
        top = fmax(top, (double)k->maximum[t * k->R + i]);
    }
    do { // at least one tile exists
        t--;
        sum += (double)k->sum[t * k->R + i] * exp((double)k->maximum[t * k->R + i] - top);
    } while (t > 0);
    k->lse[i] = top + log(sum);
    return target < 0 ? 0.0f : (float)(k->lse[i] - (double)k->target[i]);
}

// Second sweep of one tile: dlogits = scale (softmax - one at the target); 0 in masked rows.
static inline void classifier_tile_dlogits(const Classifier *k, int64_t tile, int64_t rows,
                                           const int32_t *targets, float scale) {
    const int64_t v0 = tile * k->width, w = classifier_width(k, tile);
    for (int64_t i = 0; i < rows; i++) {
        float *l = classifier_logits(k, tile, i);
        if (targets[i] < 0) {
            memset(l, 0, (size_t)w * sizeof(float));
            continue;
        }
        const float factor = scale * (float)exp((double)k->maximum[tile * k->R + i] - k->lse[i]);
#pragma omp simd
        for (int64_t c = 0; c < w; c++) { l[c] *= factor; }
        if (targets[i] >= v0 && targets[i] < v0 + w) { l[targets[i] - v0] -= scale; }
    }
}
// Computes a tile's rows of dwte. Rows of the chunk that belong to different samples (`each` rows)
// go to different dwte.
static inline void classifier_tile_dwte(Stream *s, const Classifier *k, int64_t tile, int64_t rows,
                                        float *dwte, const float *x, bool accumulate) {
    for (int64_t i = 0, next; i < rows; i = next) {
        const int64_t sample = (k->first + i) / k->each;
        next = min_i64(rows, (sample + 1) * k->each - k->first);
        sgemm_tile(s, CblasTrans, CblasNoTrans, classifier_width(k, tile), k->C, next - i,
                   classifier_logits(k, tile, i), k->row, x + i * k->C, k->C,
                   accumulate || (k->first + i) % k->each ? 1.0f : 0.0f,
                   dwte + (sample * k->Vp + tile * k->width) * k->C, k->C);
    }
}
static inline void classifier_tile_backward(Stream *s, const Classifier *k, int64_t tile,
                                            int64_t rows, float *dx, bool first, float *dwte,
                                            const float *x, const float *wte,
                                            const int32_t *targets, float scale, bool accumulate) {
    const int64_t v0 = tile * k->width, w = classifier_width(k, tile), C = k->C;
    if (w <= 0) {
        // There are more threads than tiles.
        if (dx && first) { memset(dx, 0, (size_t)(rows * C) * sizeof(float)); }
        return;
    }
    const float *dlogits = classifier_logits(k, tile, 0);
    classifier_tile_dlogits(k, tile, rows, targets, scale);
    if (dwte) { classifier_tile_dwte(s, k, tile, rows, dwte, x, accumulate); }
    if (dx) {
        sgemm_tile(s, CblasNoTrans, CblasNoTrans, rows, C, w, dlogits, k->row, wte + v0 * C, C,
                   first ? 0.0f : 1.0f, dx, C);
    }
}

// Adds up the threads' partial sums of dx for row i.
static inline void classifier_sum_dx(const Classifier *k, float *dx, int64_t i, int64_t shares) {
    const int64_t C = k->C;
    memcpy(dx + i * C, k->dx + i * C, (size_t)C * sizeof(float));
    for (int64_t share = 1; share < shares; share++) {
        const float *part = k->dx + (share * k->R + i) * C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) { dx[i * C + c] += part[c]; }
    }
}
static inline void classifier_chunk(Stream *s, const Classifier *k, int64_t rows, float *losses,
                                    float *dx, float *dwte, bool gradients, const float *x,
                                    const float *wte, const int32_t *targets, float scale,
                                    bool accumulate) {
    const int64_t per = k->tiles_a_thread, shares = k->tiles / per;
#pragma omp parallel num_threads(s->threads)
    {
        blas_serial_here();
#pragma omp for schedule(static, 1)
        for (int64_t share = 0; share < shares; share++) {
            for (int64_t t = share * per; t < (share + 1) * per; t++) {
                classifier_tile_forward(s, k, t, rows, x, wte, targets);
            }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) { losses[i] = classifier_row_loss(k, i, targets[i]); }
        if (gradients) {
#pragma omp for schedule(static, 1)
            for (int64_t share = 0; share < shares; share++) {
                for (int64_t t = share * per; t < (share + 1) * per; t++) {
                    classifier_tile_backward(s, k, t, rows, dx ? k->dx + share * k->R * k->C : NULL,
                                             t == share * per, dwte, x, wte, targets, scale,
                                             accumulate);
                }
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < rows; i++) {
                if (dx) { classifier_sum_dx(k, dx, i, shares); }
            }
        }
    }
}

static inline void ops_classifier(Stream *s, float *losses, Real *dx, float *dwte, Real *dlogits,
                                  const Real *x, const Real *wte, const int32_t *targets, int64_t N,
                                  int64_t each, int64_t C, int64_t V, int64_t Vp, float scale,
                                  bool accumulate) {
    if (N == 0) {
        if (dwte && !accumulate) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
        return;
    }
    for (int64_t b = 0; b < N / each && dwte && !accumulate; b++) {
        ops_zero(s, dwte + (b * Vp + V) * C, (size_t)((Vp - V) * C) * sizeof(float));
    }
    int64_t floats;
    Classifier k = classifier_space((float *)s->workspace, N, C, V, s->threads, CLASSIFIER_ROWS,
                                    !dlogits, &floats);
    for (int64_t most = k.R / 2; most && s->workspace_bytes < (size_t)floats * sizeof(float);
         most /= 2) {
        k = classifier_space((float *)s->workspace, N, C, V, s->threads, most, !dlogits, &floats);
    }
    assert(s->workspace_bytes >= (size_t)floats * sizeof(float));
    if (dlogits) {
        k.logits = f32(dlogits);
        k.row = Vp;
        k.next = k.width;
    }
    k.each = each;
    k.Vp = Vp;
    blas_serial_once();
    for (int64_t n = 0; n < N; n += k.R) {
        const int64_t rows = min_i64(k.R, N - n);
        k.first = n;
        classifier_chunk(s, &k, rows, losses + n, dx ? f32(dx) + n * C : NULL, dwte,
                         dx || dwte || dlogits, f32_const(x) + n * C, f32_const(wte), targets + n,
                         scale, accumulate);
        for (int64_t i = 0; i < rows && dlogits; i++) {
            memset(k.logits + i * Vp + V, 0, (size_t)(Vp - V) * sizeof(float));
        }
        if (dlogits) { k.logits += k.R * Vp; }
    }
}

// --- optimizers and norms ------------------------------------------------------------------------
static inline void ops_adamw(Stream *s, UpdateSlice u, OptimizerStep o) { ops_adamw_host(s, u, o); }
static inline void ops_sgd(Stream *s, UpdateSlice u, OptimizerStep o) { ops_sgd_host(s, u, o); }

static inline void ops_square_sum(Stream *s, ExactSum *sum, const float *x, int64_t n,
                                  int64_t chunk, double scale) {
    ops_square_sum_host(s, sum, x, n, chunk, scale);
}
static inline void ops_accumulate(Stream *s, float *out, const float *in, int64_t n) {
    ops_accumulate_host(s, out, in, n);
}

static inline size_t ops_workspace_bytes(OpsShape shape, int threads) {
    int64_t head = 0, classifier = 0;
    head_space(NULL, shape.T, shape.C / max_i64(1, shape.NH), &head);
    // All chunks have nearly the same size, so fewer rows can give larger chunks. min(N, most) rows
    // give the largest.
    const int64_t plenty = CLASSIFIER_ROWS,
                  most = shape.logits ? min_i64(shape.logits, plenty) : plenty;
    classifier_space(NULL, min_i64(shape.rows * shape.T, most), shape.C, max_i64(1, shape.V),
                     threads, most, shape.logits > 0, &classifier);
    return (size_t)max_i64(max_i64(head * threads, classifier),
                           clip_floats(shape.rows, shape.T, threads)) *
           sizeof(float);
}

#endif
