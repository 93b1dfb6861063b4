// update_cpu.h: optimizers, sums and norms in host memory. The CPU build uses them for everything,
// the GPU build for states that are on the host (offload.h).
//
// Each makes one pass over memory with a team of threads, vectorised. A block of elements is read,
// updated and written, and rounded while it is in the L1 cache. Messages move between blocks.
#ifndef UPDATE_CPU_H
#define UPDATE_CPU_H

#include "ops/ops.h" // the contract
#include <omp.h>     // omp_get_thread_num

enum {
    BLOCK = 16384,     // elements that a thread takes at a time in element-wise operations
    BLOCKS_A_POLL = 16 // blocks between two calls of progress
};
// A function that must be part of its caller's loop: a loop with a call is not vectorised, and the
// compiler does not inline everything that is called often.
#define INLINED static inline __attribute__((always_inline))
// Lets messages move if the calling thread is the team's first; only that one may use MPI.
static inline void poll_messages(Stream *s) {
    if (s->progress && omp_get_thread_num() == 0) { s->progress(); }
}
static inline void poll_after_block(Stream *s, int64_t block) {
    if (block % BLOCKS_A_POLL == BLOCKS_A_POLL - 1) { poll_messages(s); }
}

static inline void round_part(uint16_t *rounded, const float *x, int64_t begin, int64_t end,
                              Rounding r) {
    if (r.stochastic) { // vectors of its 64-bit products measure no gain
        for (int64_t i = begin; i < end; i++) { rounded[i] = round_stochastic(x[i], r, i); }
        return;
    }
#pragma omp simd
    for (int64_t i = begin; i < end; i++) { rounded[i] = float_to_bf16(x[i]); }
}

// Updates an element's moments. Returns its direction. In the sums of two products the function
// says which one is fused with the addition: a compiler may choose differently in the vector body
// of a loop and in its rest, and then an element's bits would depend on its place in a rank's
// slice.
INLINED float adamw_element(float *m, float *v, float grad, OptimizerStep o, AdamwBias bias) {
    const float g = grad * o.grad_scale;
    *m = fmaf(o.beta1, *m, (1.0f - o.beta1) * g);
    *v = fmaf(o.beta2, *v, (1.0f - o.beta2) * g * g);
    const float used = o.nesterov ? fmaf(o.beta1, *m, (1.0f - o.beta1) * g) : *m;
    return used * bias.m / (sqrtf(*v * bias.v) + o.eps);
}
enum { NEAR = 1024 }; // elements that are updated, then rounded while in the L1 cache
// Each thread has the step's numbers in variables of its own: through a pointer to those of the
// team the compiler reads them again after each store, and does not vectorise the loop.
static inline void ops_adamw_host(Stream *s, UpdateSlice u, OptimizerStep o) {
    float *master = u.master, *m = u.moment[0], *v = u.moment[1];
    const float *grad = u.grad;
    const int64_t n = u.n;
    const AdamwBias bias = adamw_bias(o);
    uint16_t *rounded = u.dtype == DTYPE_BF16 ? (uint16_t *)u.param : NULL;
#pragma omp parallel for schedule(static) num_threads(s->threads) firstprivate(o, bias)
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
        for (int64_t begin = b * BLOCK; begin < min_i64(n, (b + 1) * BLOCK); begin += NEAR) {
            const int64_t end = min_i64(n, begin + NEAR);
#pragma omp simd
            for (int64_t i = begin; i < end; i++) {
                master[i] -= o.lr * (adamw_element(&m[i], &v[i], grad[i], o, bias) +
                                     o.weight_decay * master[i]);
            }
            if (rounded) { round_part(rounded, master, begin, end, o.rounding); }
        }
        poll_after_block(s, b);
    }
}
static inline void ops_sgd_host(Stream *s, UpdateSlice u, OptimizerStep o) {
    float *master = u.master, *b = u.moment[0];
    const float *grad = u.grad;
    const int64_t n = u.n;
    uint16_t *rounded = u.dtype == DTYPE_BF16 ? (uint16_t *)u.param : NULL;
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < ceil_div(n, BLOCK); k++) {
        for (int64_t begin = k * BLOCK; begin < min_i64(n, (k + 1) * BLOCK); begin += NEAR) {
            const int64_t end = min_i64(n, begin + NEAR);
#pragma omp simd
            for (int64_t i = begin; i < end; i++) {
                const float g = fmaf(o.weight_decay, master[i], grad[i] * o.grad_scale);
                b[i] = fmaf(o.momentum, b[i], g);
                const float ahead = fmaf(o.momentum, b[i], g);
                master[i] -= o.lr * (o.nesterov ? ahead : b[i]);
            }
            if (rounded) { round_part(rounded, master, begin, end, o.rounding); }
        }
        poll_after_block(s, k);
    }
}

static inline void ops_balance_host(Stream *s, UpdateSlice u, OptimizerStep o) {
    uint16_t *rounded = u.dtype == DTYPE_BF16 ? (uint16_t *)u.param : NULL;
    for (int64_t i = 0; i < u.n; i++) {
        u.master[i] -= o.lr * (float)((u.grad[i] > 0) - (u.grad[i] < 0));
    }
    if (rounded) { round_part(rounded, u.master, 0, u.n, o.rounding); }
    poll_messages(s);
}
static inline void ops_muon_host(Stream *s, UpdateSlice u, OptimizerStep o) {
    float *master = u.master;
    const float *direction = u.grad;
    const float kept = 1.0f - o.lr * o.weight_decay, rate = o.lr * o.grad_scale;
    const int64_t n = u.n;
    uint16_t *rounded = u.dtype == DTYPE_BF16 ? (uint16_t *)u.param : NULL;
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < ceil_div(n, BLOCK); k++) {
        for (int64_t begin = k * BLOCK; begin < min_i64(n, (k + 1) * BLOCK); begin += NEAR) {
            const int64_t end = min_i64(n, begin + NEAR);
#pragma omp simd
            for (int64_t i = begin; i < end; i++) {
                master[i] = fmaf(-rate, direction[i], kept * master[i]);
            }
            if (rounded) { round_part(rounded, master, begin, end, o.rounding); }
        }
        poll_after_block(s, k);
    }
}

static inline void ops_round_host(Stream *s, uint16_t *rounded, const float *x, int64_t n,
                                  Rounding r) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
        round_part(rounded, x, b * BLOCK, min_i64(n, (b + 1) * BLOCK), r);
        poll_after_block(s, b);
    }
}
static inline void ops_accumulate_host(Stream *s, float *out, const float *in, int64_t n) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
#pragma omp simd
        for (int64_t i = b * BLOCK; i < min_i64(n, (b + 1) * BLOCK); i++) { out[i] += in[i]; }
        poll_after_block(s, b);
    }
}

// Element i of a chunk is added to sum i mod 32, and the sums are added in order. So the result has
// the same bits on any machine and for any thread count.
static inline void add_squares(double sum[32], const float *x, int64_t n) {
    enum { AHEAD = 1024 }; // floats that are asked for ahead: hardware alone asks for too few
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __builtin_prefetch(x + i + AHEAD);
        __builtin_prefetch(x + i + AHEAD + 16);
#pragma omp simd
        for (int64_t l = 0; l < 32; l++) { sum[l] += (double)x[i + l] * (double)x[i + l]; }
    }
    for (int64_t l = 0; i + l < n; l++) { sum[l] += (double)x[i + l] * (double)x[i + l]; }
}
static inline double chunk_squares(const float *x, int64_t n) {
    double sum[32] = {0};
    double total = 0.0;
    add_squares(sum, x, n);
    for (int64_t l = 0; l < 32; l++) { total += sum[l]; }
    return total;
}
static inline void ops_square_sum_host(Stream *s, ExactSum *sum, const float *x, int64_t n,
                                       int64_t chunk, double scale) {
#pragma omp parallel num_threads(s->threads)
    {
        ExactSum mine;
        memset(&mine, 0, sizeof mine);
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < ceil_div(n, chunk); i++) {
            exact_add(&mine, scale * chunk_squares(x + i * chunk, min_i64(chunk, n - i * chunk)));
            poll_after_block(s, i);
        }
#pragma omp critical(exact_sums)
        exact_join(sum, &mine);
    }
}

#endif
