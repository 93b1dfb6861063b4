// rmsnorm_cpu.h: RMSNorm on the CPU. A row fits the L1 cache, so its passes cost one pass over
// memory. The contract is ops.h.
#ifndef RMSNORM_CPU_H
#define RMSNORM_CPU_H

#include "ops/cpu/clip_cpu.h" // slices of samples

TYPED void rmsnorm_row(const DType type, Real *out, float *rstd, const Real *x, const Real *weight,
                       int64_t C, float eps) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < C; c++) { squares += load_real(type, x, c) * load_real(type, x, c); }
    const float r = 1.0f / sqrtf(squares / (float)C + eps);
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        store_real(type, out, c,
                   load_real(type, x, c) * r * (weight ? load_real(type, weight, c) : 1.0f));
    }
    *rstd = r;
}
static inline void ops_rmsnorm_forward(Stream *s, Real *out, float *rstd, Real *sum, const Real *a,
                                       const Real *b, const Real *weight, int64_t N, int64_t C,
                                       float eps) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < N; n++) {
        const Real *x = real_at_const(a, n * C);
        if (b) {
            FOR_TYPE(add_part, real_at(sum, n * C), x, real_at_const(b, n * C), C);
            x = real_at_const(sum, n * C);
        }
        FOR_TYPE(rmsnorm_row, real_at(out, n * C), rstd + n, x, weight, C, eps);
        poll_after_row(s, n);
    }
}

// With h = x rstd and g = dout * weight: dx = rstd (g - h average(g h)).
TYPED void rmsnorm_row_backward(const DType type, Real *dx, const Real *before, const Real *dy,
                                const Real *x, const Real *weight, float r, int64_t C) {
    float gx_sum = 0.0f;
#pragma omp simd reduction(+ : gx_sum)
    for (int64_t c = 0; c < C; c++) {
        gx_sum += load_real(type, dy, c) * (weight ? load_real(type, weight, c) : 1.0f) *
                  load_real(type, x, c);
    }
    const float gh_mean = gx_sum * r / (float)C;
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        const float g = load_real(type, dy, c) * (weight ? load_real(type, weight, c) : 1.0f);
        store_real(type, dx, c,
                   (before ? load_real(type, before, c) : 0.0f) +
                       r * (g - load_real(type, x, c) * r * gh_mean));
    }
}
static inline void ops_rmsnorm_backward_input(Stream *s, Real *din, const Real *before,
                                              const Real *dout, const Real *in, const Real *weight,
                                              const float *rstd, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < N; n++) {
        FOR_TYPE(rmsnorm_row_backward, real_at(din, n * C),
                 before ? real_at_const(before, n * C) : NULL, real_at_const(dout, n * C),
                 real_at_const(in, n * C), weight, rstd[n], C);
        poll_after_row(s, n);
    }
}

// Adds what a row gives to the gradient of the weight.
TYPED void rmsnorm_add_row(const DType type, float *dweight, const Real *dy, const Real *x,
                           float rstd, int64_t channels) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        dweight[c] += load_real(type, dy, c) * (load_real(type, x, c) * rstd);
    }
}
// Each thread has a slice of the channels, and adds the rows in their order.
static inline void ops_rmsnorm_backward_weight(Stream *s, float *dweight, const Real *dout,
                                               const Real *in, const float *rstd, int64_t N,
                                               int64_t C, bool accumulate) {
#pragma omp parallel num_threads(s->threads)
    {
        const int64_t begin = slice_begin(C, omp_get_num_threads(), omp_get_thread_num()),
                      end = slice_begin(C, omp_get_num_threads(), omp_get_thread_num() + 1);
        for (int64_t c = begin; c < end && !accumulate; c++) { dweight[c] = 0.0f; }
        for (int64_t n = 0; n < N; n++) {
            FOR_TYPE(rmsnorm_add_row, dweight + begin, real_at_const(dout, n * C + begin),
                     real_at_const(in, n * C + begin), rstd[n], end - begin);
            poll_after_row(s, n);
        }
    }
}

static inline void ops_rmsnorm_samples(Stream *s, float *dweights, double *norms, const Real *dout,
                                       const Real *in, const float *rstd, int64_t rows, int64_t T,
                                       int64_t C) {
    const int64_t slices = sample_slices(rows, s->threads);
#pragma omp parallel num_threads(s->threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * slices; i++) {
            const int64_t b = i / slices, begin = slice_begin(C, slices, i % slices),
                          end = slice_begin(C, slices, i % slices + 1);
            float *sums = dweights + b * C + begin;
            for (int64_t c = 0; c < end - begin; c++) { sums[c] = 0.0f; }
            for (int64_t n = b * T; n < (b + 1) * T; n++) {
                FOR_TYPE(rmsnorm_add_row, sums, real_at_const(dout, n * C + begin),
                         real_at_const(in, n * C + begin), rstd[n], end - begin);
            }
            poll_messages(s);
        }
#pragma omp for schedule(static)
        for (int64_t b = 0; b < rows; b++) { norms[b] += chunk_squares(dweights + b * C, C); }
    }
}

#endif
