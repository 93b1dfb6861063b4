// ops_cpu.h: the tensor operations on the CPU, with OpenMP for the team of threads and oneDNN
// or a CBLAS for matrix products (gemm_cpu.h). The contract is ops.h.
//
// Plan     Matrix products take nearly all the time of a step, so the rest is arranged around them.
//          The output is cut into large tiles. A thread takes a tile, calls a serial product for
//          it, and applies what follows (bias, GELU, softmax, rounding to bf16) while the tile is
//          in cache. Attention works in 64 x 64 tiles with our own register-blocked product,
//          because a library would spend its time packing.
// Speed    is left to the compiler's vectoriser: `omp simd` loops, and GCC vector types where
//          registers must be blocked. There are no intrinsics, so the same code serves AVX2,
//          AVX-512 and others.
// Threads  Results do not depend on timing: each piece of work is computed alike whichever thread
//          takes it, and the pieces are cut by shape. Element-wise operations use blocks of a fixed
//          size. So the tail that the vectoriser treats separately is always the end of the array,
//          for any thread count.
#ifndef OPS_CPU_H
#define OPS_CPU_H

#include "ops/cpu/activation_cpu.h"     // activations, soft caps
#include "ops/cpu/attention_kept_cpu.h" // attention
#include "ops/cpu/classifier_cpu.h"     // the classifier
#include "ops/cpu/clip_cpu.h"           // gradients of single samples
#include "ops/cpu/experts_cpu.h"        // mixtures of experts
#include "ops/cpu/heads_cpu.h"          // rotary positions, norms of heads
#include "ops/cpu/matmul_cpu.h"         // matrix products
#include "ops/cpu/muon_cpu.h"           // Muon
#include "ops/cpu/noise_cpu.h"          // noise
#include "ops/cpu/quantize_cpu.h"       // quantization
#include "ops/cpu/rmsnorm_cpu.h"        // RMSNorm

// --- embedding -----------------------------------------------------------------------------------
static inline void ops_embedding_forward(Stream *s, Real *out, const int32_t *tokens,
                                         const Real *wte, const Real *wpe, int64_t rows, int64_t T,
                                         int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < rows * T; n++) {
        const Real *row = real_at_const(wte, tokens[n] * C);
        if (wpe) {
            FOR_TYPE(add_part, real_at(out, n * C), row, real_at_const(wpe, n % T * C), C);
        } else {
            memcpy(real_at(out, n * C), row, (size_t)C * ops_real_bytes());
        }
    }
}

TYPED void add_scaled(const DType type, float *to, float factor, const Real *from, int64_t n) {
#pragma omp simd
    for (int64_t c = 0; c < n; c++) { to[c] += factor * load_real(type, from, c); }
}
// Each thread has a slice of the channels, and adds the tokens in their order. So threads write to
// different elements, and a repeated token is summed in one order for any thread count.
static inline void embedding_scatter(Stream *s, float *dwte, const Real *dout,
                                     const int32_t *tokens, const float *factors, int64_t N,
                                     int64_t T, int64_t C) {
    const int64_t lines = ceil_div(C, 16); // slices are whole cache lines
#pragma omp parallel num_threads(s->threads)
    {
        int64_t begin = 16 * part_begin(lines, omp_get_num_threads(), omp_get_thread_num());
        int64_t end =
            min_i64(C, 16 * part_begin(lines, omp_get_num_threads(), omp_get_thread_num() + 1));
        for (int64_t n = 0; n < N; n++) {
            const float factor = factors ? factors[n / T] : 1.0f;
            if (factor == 0.0f) { continue; }
            FOR_TYPE(add_scaled, dwte + tokens[n] * C + begin, factor,
                     real_at_const(dout, n * C + begin), end - begin);
        }
    }
}
static inline void ops_embedding_backward(Stream *s, float *dwte, float *dwpe, const Real *dout,
                                          const int32_t *tokens, const float *factors, int64_t rows,
                                          int64_t T, int64_t C, int64_t Vp, int64_t maxT,
                                          bool accumulate_wte, bool accumulate_wpe) {
    if (dwte && !accumulate_wte) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
    if (dwte) { embedding_scatter(s, dwte, dout, tokens, factors, rows * T, T, C); }
    if (!dwpe) { return; }
    if (!accumulate_wpe) { ops_zero(s, dwpe, (size_t)(maxT * C) * sizeof(float)); }
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t t = 0; t < T; t++) {
        for (int64_t b = 0; b < rows; b++) {
            const float factor = factors ? factors[b] : 1.0f;
            if (factor == 0.0f) { continue; }
            FOR_TYPE(add_scaled, dwpe + t * C, factor, real_at_const(dout, (b * T + t) * C), C);
        }
    }
}

// --- layernorm: a row fits the L1 cache, so its passes cost one pass over memory -----------------
TYPED void layernorm_row(const DType type, Real *out, float *mean, float *rstd, const Real *x,
                         const Real *weight, const Real *bias, int64_t C) {
    float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < C; c++) { sum += load_real(type, x, c); }
    const float m = sum / (float)C;
// The mean is subtracted first, which avoids cancellation.
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < C; c++) {
        squares += (load_real(type, x, c) - m) * (load_real(type, x, c) - m);
    }
    const float r = 1.0f / sqrtf(squares / (float)C + 1e-5f);
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        store_real(type, out, c,
                   (load_real(type, x, c) - m) * r * load_real(type, weight, c) +
                       load_real(type, bias, c));
    }
    *mean = m;
    *rstd = r;
}
static inline void ops_layernorm_forward(Stream *s, Real *out, float *mean, float *rstd, Real *sum,
                                         const Real *a, const Real *b, const Real *weight,
                                         const Real *bias, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < N; n++) {
        const Real *x = real_at_const(a, n * C);
        if (b) {
            FOR_TYPE(add_part, real_at(sum, n * C), x, real_at_const(b, n * C), C);
            x = real_at_const(sum, n * C);
        }
        FOR_TYPE(layernorm_row, real_at(out, n * C), mean + n, rstd + n, x, weight, bias, C);
        poll_after_row(s, n);
    }
}

// With h = (x - mean) rstd and g = dout * weight: dx = rstd (g - average(g) - h average(g h)).
TYPED void layernorm_row_backward(const DType type, Real *dx, const Real *before, const Real *dy,
                                  const Real *x, const Real *w, float m, float r, int64_t C) {
    float g_sum = 0.0f, gh_sum = 0.0f;
#pragma omp simd reduction(+ : g_sum, gh_sum)
    for (int64_t c = 0; c < C; c++) {
        float g = load_real(type, dy, c) * load_real(type, w, c);
        g_sum += g;
        gh_sum += g * ((load_real(type, x, c) - m) * r);
    }
    const float g_mean = g_sum / (float)C, gh_mean = gh_sum / (float)C;
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        const float g = load_real(type, dy, c) * load_real(type, w, c);
        store_real(type, dx, c,
                   (before ? load_real(type, before, c) : 0.0f) +
                       r * (g - g_mean - (load_real(type, x, c) - m) * r * gh_mean));
    }
}
static inline void ops_layernorm_backward_input(Stream *s, Real *din, const Real *before,
                                                const Real *dout, const Real *in,
                                                const Real *weight, const float *mean,
                                                const float *rstd, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < N; n++) {
        FOR_TYPE(layernorm_row_backward, real_at(din, n * C),
                 before ? real_at_const(before, n * C) : NULL, real_at_const(dout, n * C),
                 real_at_const(in, n * C), weight, mean[n], rstd[n], C);
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
            FOR_TYPE(layernorm_add_row, dweight + begin, dbias + begin,
                     real_at_const(dout, n * C + begin), real_at_const(in, n * C + begin), mean[n],
                     rstd[n], end - begin);
            poll_after_row(s, n);
        }
    }
}

// --- optimizers and norms ------------------------------------------------------------------------
static inline void ops_adamw(Stream *s, UpdateSlice u, OptimizerStep o) { ops_adamw_host(s, u, o); }
static inline void ops_sgd(Stream *s, UpdateSlice u, OptimizerStep o) { ops_sgd_host(s, u, o); }
static inline void ops_balance(Stream *s, UpdateSlice u, OptimizerStep o) {
    ops_balance_host(s, u, o);
}

static inline void ops_square_sum(Stream *s, ExactSum *sum, const float *x, int64_t n,
                                  int64_t chunk, double scale) {
    ops_square_sum_host(s, sum, x, n, chunk, scale);
}
static inline void ops_accumulate(Stream *s, float *out, const float *in, int64_t n) {
    ops_accumulate_host(s, out, in, n);
}

static inline size_t ops_workspace_bytes(OpsShape shape, int threads) {
    int64_t head = 0, classifier = 0;
    head_space(NULL, ops_attention_shape(shape), &head);
    // All chunks have nearly the same size, so fewer rows can give larger chunks. min(N, most) rows
    // give the largest.
    const int64_t plenty = CLASSIFIER_ROWS,
                  most = shape.logits ? min_i64(shape.logits, plenty) : plenty;
    classifier_space(NULL, min_i64(shape.rows * shape.T, most), shape.C, max_i64(1, shape.V),
                     threads, most, shape.logits > 0, &classifier);
    return (size_t)(max_i64(max_i64(head * threads, classifier),
                            clip_floats(shape.rows, shape.T, threads)) +
                    threads * gemm_thread_floats()) *
               sizeof(float) +
           64; // workspace_rest() rounds down
}

static inline void ops_arithmetic(char *text, size_t bytes) {
    const bool bf16 = cpu_real == DTYPE_BF16;
    snprintf(text, bytes, "cpu %s%s%s%s%s%s", dtype_name(cpu_compute), bf16 ? " " : "",
             bf16 ? gemm_of_reals() : "", bf16 ? " " : "",
             bf16 ? multipliers[gemm_instructions()].name : "", words_are_pairs() ? " pairs" : "");
}

#endif
