// activation_cpu.h: activations of the MLP and soft caps on the CPU. The contract is ops.h.
#ifndef ACTIVATION_CPU_H
#define ACTIVATION_CPU_H

#include "ops/cpu/device_cpu.h" // the team, polling, e^x

// --- SwiGLU: passes over rows --------------------------------------------------------------------
INLINED float silu_sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

TYPED void swiglu_row(const DType type, Real *out, const Real *gate, const Real *up, int64_t F) {
#pragma omp simd
    for (int64_t f = 0; f < F; f++) {
        const float a = load_real(type, gate, f);
        store_real(type, out, f, a * silu_sigmoid(a) * load_real(type, up, f));
    }
}
static inline void ops_swiglu_forward(Stream *s, Real *out, const Real *in, int64_t N, int64_t F) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < N; n++) {
        FOR_TYPE(swiglu_row, real_at(out, n * F), real_at_const(in, 2 * n * F),
                 real_at_const(in, (2 * n + 1) * F), F);
        poll_after_wide_row(s, n, 2 * F);
    }
}

// With S the sigmoid of a: d up = dout a S, and d gate = dout up S (1 + a (1 - S)).
TYPED void swiglu_row_backward(const DType type, Real *dgate, Real *dup, const Real *dout,
                               const Real *gate, const Real *up, int64_t F) {
#pragma omp simd
    for (int64_t f = 0; f < F; f++) {
        const float a = load_real(type, gate, f), dy = load_real(type, dout, f), e = fast_exp(-a),
                    sigmoid = 1.0f / (1.0f + e);
        store_real(type, dup, f, dy * (a * sigmoid));
        store_real(type, dgate, f,
                   dy * load_real(type, up, f) * (sigmoid * (1.0f + a * (sigmoid * e))));
    }
}
static inline void ops_swiglu_backward(Stream *s, Real *din, const Real *dout, const Real *in,
                                       int64_t N, int64_t F) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < N; n++) {
        const int64_t gate = 2 * n * F, up = gate + F;
        FOR_TYPE(swiglu_row_backward, real_at(din, gate), real_at(din, up),
                 real_at_const(dout, n * F), real_at_const(in, gate), real_at_const(in, up), F);
        poll_after_wide_row(s, n, 4 * F);
    }
}

// --- element-wise --------------------------------------------------------------------------------
TYPED void relu2_part(const DType type, Real *out, const Real *in, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float x = load_real(type, in, i), above = x < 0.0f ? 0.0f : x; // a NaN stays
        store_real(type, out, i, above * above);
    }
}
static inline void ops_relu2_forward(Stream *s, Real *out, const Real *in, int64_t n) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < ceil_div(n, BLOCK); k++) {
        FOR_TYPE(relu2_part, real_at(out, k * BLOCK), real_at_const(in, k * BLOCK),
                 min_i64(BLOCK, n - k * BLOCK));
        poll_after_block(s, k);
    }
}
TYPED void relu2_part_backward(const DType type, Real *din, const Real *dout, const Real *in,
                               int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float x = load_real(type, in, i), above = x < 0.0f ? 0.0f : x;
        store_real(type, din, i, load_real(type, dout, i) * (2.0f * above));
    }
}
static inline void ops_relu2_backward(Stream *s, Real *din, const Real *dout, const Real *in,
                                      int64_t n) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < ceil_div(n, BLOCK); k++) {
        const int64_t at = k * BLOCK;
        FOR_TYPE(relu2_part_backward, real_at(din, at), real_at_const(dout, at),
                 real_at_const(in, at), min_i64(BLOCK, n - at));
        poll_after_block(s, k);
    }
}

TYPED void cap_part(const DType type, Real *x, float softcap, int64_t n) {
    const float inverse = 1.0f / softcap;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        store_real(type, x, i, softcap * fast_tanh(load_real(type, x, i) * inverse));
    }
}
static inline void ops_softcap(Stream *s, Real *x, int64_t n, float softcap) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < ceil_div(n, BLOCK); k++) {
        FOR_TYPE(cap_part, real_at(x, k * BLOCK), softcap, min_i64(BLOCK, n - k * BLOCK));
        poll_after_block(s, k);
    }
}

#endif
