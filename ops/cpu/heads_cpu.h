// heads_cpu.h: rotary positions, and the norm of each head of q and k, on the CPU. The contract is
// ops.h.
//
// Plan     Cosines and sines are computed once for each position of a call, into a table in the
//          workspace, and serve all heads. The rest is one pass over memory, a head at a time: a
//          head is D <= 256 elements.
#ifndef HEADS_CPU_H
#define HEADS_CPU_H

#include "ops/cpu/clip_cpu.h" // slices of samples

enum { HEAD_MOST = 2 * ROTARY_PAIRS }; // D, at most

// The table has, for each position, the cosines of D/2 pairs, then their sines. It always fits the
// workspace, where attention has several arrays of this size for each thread.
static inline float *rotary_space(const Stream *s, AttentionShape a) {
    assert(a.D % 2 == 0 && a.D <= HEAD_MOST);
    assert(workspace_rest(s) >= (size_t)(a.T * a.D) * sizeof(float));
    return (float *)s->workspace;
}
// Called by each thread of the team. turn: 1, or -1 for the negative angles.
static inline void rotary_fill(float *table, AttentionShape a, const Rotary *r, float turn) {
    const int64_t pairs = a.D / 2;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a.T; t++) {
        float *cosines = table + t * a.D, *sines = cosines + pairs;
        for (int64_t i = 0; i < pairs; i++) {
            const float angle = (float)(a.first + t) * r->frequency[i];
            cosines[i] = cosf(angle);
            sines[i] = turn * sinf(angle);
        }
    }
}

TYPED void rotate_head(const DType type, Real *x, const float *cosines, int64_t pairs) {
    const float *sines = cosines + pairs;
#pragma omp simd
    for (int64_t i = 0; i < pairs; i++) {
        const float low = load_real(type, x, i), high = load_real(type, x, pairs + i);
        store_real(type, x, i, low * cosines[i] - high * sines[i]);
        store_real(type, x, pairs + i, high * cosines[i] + low * sines[i]);
    }
}
static inline void ops_rotary(Stream *s, Real *qkv, AttentionShape a, const Rotary *r, bool back) {
    const int64_t width = attention_qkv_width(a), turned = a.heads + a.kv_heads;
    float *table = rotary_space(s, a);
#pragma omp parallel num_threads(s->threads)
    {
        rotary_fill(table, a, r, back ? -1.0f : 1.0f);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < a.rows * a.T; n++) {
            for (int64_t head = 0; head < turned; head++) {
                FOR_TYPE(rotate_head, real_at(qkv, n * width + head * a.D), table + n % a.T * a.D,
                         a.D / 2);
            }
            poll_after_wide_row(s, n, width);
        }
    }
}

// --- norms of heads ------------------------------------------------------------------------------
static inline const Real *head_weight(const HeadNorm *h, int64_t head, const Real *q_weight,
                                      const Real *k_weight) {
    return head < h->shape.heads ? q_weight : k_weight;
}

// out = turned(x rstd weight scale)
TYPED void head_norm_forward(const DType type, Real *out, float *rstd, const Real *x,
                             const Real *weight, const float *cosines, const HeadNorm *h) {
    const int64_t D = h->shape.D, pairs = D / 2;
    const float *sines = cosines + pairs;
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < D; i++) { squares += load_real(type, x, i) * load_real(type, x, i); }
    const float r = 1.0f / sqrtf(squares / (float)D + h->eps), scale = h->scale;
#pragma omp simd
    for (int64_t i = 0; i < pairs; i++) {
        const float low = load_real(type, x, i) * r * scale *
                          (weight ? load_real(type, weight, i) : 1.0f),
                    high = load_real(type, x, pairs + i) * r * scale *
                           (weight ? load_real(type, weight, pairs + i) : 1.0f);
        store_real(type, out, i, low * cosines[i] - high * sines[i]);
        store_real(type, out, pairs + i, high * cosines[i] + low * sines[i]);
    }
    *rstd = r;
}
static inline void ops_head_norm_forward(Stream *s, Real *out, float *rstd, const Real *in,
                                         const Real *q_weight, const Real *k_weight,
                                         const HeadNorm *h) {
    const AttentionShape a = h->shape;
    const int64_t width = attention_qkv_width(a), normed = a.heads + a.kv_heads;
    float *table = rotary_space(s, a);
#pragma omp parallel num_threads(s->threads)
    {
        rotary_fill(table, a, h->rotary, 1.0f);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < a.rows * a.T; n++) {
            for (int64_t head = 0; head < normed; head++) {
                const int64_t at = n * width + head * a.D;
                FOR_TYPE(head_norm_forward, real_at(out, at), rstd + n * normed + head,
                         real_at_const(in, at), head_weight(h, head, q_weight, k_weight),
                         table + n % a.T * a.D, h);
            }
            memcpy(real_at(out, n * width + normed * a.D),
                   real_at_const(in, n * width + normed * a.D),
                   (size_t)(a.kv_heads * a.D) * ops_real_bytes());
            poll_after_wide_row(s, n, 2 * width);
        }
    }
}

// g(D) = dy, turned back, * weight * scale
TYPED void head_norm_turn_back(const DType type, float *g, const Real *dy, const Real *weight,
                               const float *cosines, const HeadNorm *h) {
    const int64_t pairs = h->shape.D / 2;
    const float *sines = cosines + pairs, scale = h->scale;
#pragma omp simd
    for (int64_t i = 0; i < pairs; i++) {
        const float low = load_real(type, dy, i), high = load_real(type, dy, pairs + i);
        g[i] = (low * cosines[i] - high * sines[i]) * scale *
               (weight ? load_real(type, weight, i) : 1.0f);
        g[pairs + i] = (high * cosines[i] + low * sines[i]) * scale *
                       (weight ? load_real(type, weight, pairs + i) : 1.0f);
    }
}
// With h = x rstd: dx = rstd (g - h average(g h)).
TYPED void head_norm_backward(const DType type, Real *dx, const Real *dy, const Real *x,
                              const Real *weight, float r, const float *cosines,
                              const HeadNorm *h) {
    const int64_t D = h->shape.D;
    float g[HEAD_MOST] = {0};
    float gx_sum = 0.0f;
    head_norm_turn_back(type, g, dy, weight, cosines, h);
#pragma omp simd reduction(+ : gx_sum)
    for (int64_t i = 0; i < D; i++) { gx_sum += g[i] * load_real(type, x, i); }
    const float gh_mean = gx_sum * r / (float)D;
#pragma omp simd
    for (int64_t i = 0; i < D; i++) {
        store_real(type, dx, i, r * (g[i] - load_real(type, x, i) * r * gh_mean));
    }
}
static inline void ops_head_norm_backward_input(Stream *s, Real *din, const Real *dout,
                                                const Real *in, const Real *q_weight,
                                                const Real *k_weight, const float *rstd,
                                                const HeadNorm *h) {
    const AttentionShape a = h->shape;
    const int64_t width = attention_qkv_width(a), normed = a.heads + a.kv_heads;
    float *table = rotary_space(s, a);
#pragma omp parallel num_threads(s->threads)
    {
        rotary_fill(table, a, h->rotary, -1.0f);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < a.rows * a.T; n++) {
            for (int64_t head = 0; head < normed; head++) {
                const int64_t at = n * width + head * a.D;
                FOR_TYPE(head_norm_backward, real_at(din, at), real_at_const(dout, at),
                         real_at_const(in, at), head_weight(h, head, q_weight, k_weight),
                         rstd[n * normed + head], table + n % a.T * a.D, h);
            }
            memcpy(real_at(din, n * width + normed * a.D),
                   real_at_const(dout, n * width + normed * a.D),
                   (size_t)(a.kv_heads * a.D) * ops_real_bytes());
            poll_after_wide_row(s, n, 3 * width);
        }
    }
}

// --- gradients of the weights --------------------------------------------------------------------
enum { HEAD_SLICE = 16 }; // pairs of a slice, at most
// Some pairs of the gradient of q's or k's weight: sums over `heads` heads of tokens, whose rows
// are `width` apart, and their rstd `stride`.
typedef struct {
    const Real *dout, *in;
    const float *rstd, *cosines; // of the first token, and of the first position
    int64_t tokens, T, heads, D, width, stride;
    int64_t pair, pairs; // the first, and how many
    float scale;
} HeadSums;
// low(pairs), high(pairs) += what a head of a token gives
TYPED void head_norm_add(const DType type, float *low, float *high, const HeadSums *k, int64_t at,
                         float factor, const float *cosines) {
    const float *sines = cosines + k->D / 2;
    const Real *dy = real_at_const(k->dout, at), *x = real_at_const(k->in, at),
               *dy_high = real_at_const(dy, k->D / 2), *x_high = real_at_const(x, k->D / 2);
#pragma omp simd
    for (int64_t i = 0; i < k->pairs; i++) {
        const float a = load_real(type, dy, i), b = load_real(type, dy_high, i);
        low[i] += (a * cosines[i] - b * sines[i]) * (load_real(type, x, i) * factor);
        high[i] += (b * cosines[i] + a * sines[i]) * (load_real(type, x_high, i) * factor);
    }
}
// The heads of a token are added up first, which keeps the sums over many tokens exact.
static inline void head_norm_sums(float *dweight, const HeadSums *k) {
    float *low = dweight + k->pair, *high = low + k->D / 2;
    for (int64_t n = 0; n < k->tokens; n++) {
        const float *cosines = k->cosines + n % k->T * k->D + k->pair;
        float of_token[2][HEAD_SLICE] = {{0}};
        for (int64_t head = 0; head < k->heads; head++) {
            FOR_TYPE(head_norm_add, of_token[0], of_token[1], k,
                     n * k->width + head * k->D + k->pair, k->rstd[n * k->stride + head] * k->scale,
                     cosines);
        }
        for (int64_t i = 0; i < k->pairs; i++) {
            low[i] += of_token[0][i];
            high[i] += of_token[1][i];
        }
    }
}
// The gradients of `samples` samples, each of its own `tokens` tokens. A piece of work is a slice
// of q's or k's weight of one sample, so that neither threads nor other samples change its sums.
// Called by each thread of the team.
static inline void head_norm_weights(Stream *s, float *dq_weights, float *dk_weights,
                                     const Real *dout, const Real *in, const float *rstd,
                                     const HeadNorm *h, const float *table, int64_t samples,
                                     int64_t tokens, bool accumulate) {
    const AttentionShape a = h->shape;
    const int64_t pairs = a.D / 2, slices = ceil_div(pairs, HEAD_SLICE),
                  width = attention_qkv_width(a), normed = a.heads + a.kv_heads;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < samples * 2 * slices; i++) {
        const int64_t b = i / (2 * slices), pair = i % slices * HEAD_SLICE,
                      count = min_i64(HEAD_SLICE, pairs - pair);
        const bool of_k = i / slices % 2;
        const int64_t head = of_k ? a.heads : 0, at = b * tokens * width + head * a.D;
        float *dweight = (of_k ? dk_weights : dq_weights) + b * a.D;
        const HeadSums k = {
            .dout = real_at_const(dout, at),
            .in = real_at_const(in, at),
            .rstd = rstd + b * tokens * normed + head,
            .cosines = table,
            .tokens = tokens,
            .T = a.T,
            .heads = of_k ? a.kv_heads : a.heads,
            .D = a.D,
            .width = width,
            .stride = normed,
            .pair = pair,
            .pairs = count,
            .scale = h->scale,
        };
        for (int64_t p = pair; p < pair + count && !accumulate; p++) {
            dweight[p] = dweight[pairs + p] = 0.0f;
        }
        head_norm_sums(dweight, &k);
        poll_messages(s);
    }
}
static inline void ops_head_norm_backward_weight(Stream *s, float *dq_weight, float *dk_weight,
                                                 const Real *dout, const Real *in,
                                                 const float *rstd, const HeadNorm *h,
                                                 bool accumulate) {
    float *table = rotary_space(s, h->shape);
#pragma omp parallel num_threads(s->threads)
    {
        rotary_fill(table, h->shape, h->rotary, -1.0f);
        head_norm_weights(s, dq_weight, dk_weight, dout, in, rstd, h, table, 1,
                          h->shape.rows * h->shape.T, accumulate);
    }
}
static inline void ops_head_norm_samples(Stream *s, float *dq_weights, float *dk_weights,
                                         double *norms, const Real *dout, const Real *in,
                                         const float *rstd, const HeadNorm *h) {
    const AttentionShape a = h->shape;
    float *table = rotary_space(s, a);
#pragma omp parallel num_threads(s->threads)
    {
        rotary_fill(table, a, h->rotary, -1.0f);
        head_norm_weights(s, dq_weights, dk_weights, dout, in, rstd, h, table, a.rows, a.T, false);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < a.rows; b++) {
            norms[b] +=
                chunk_squares(dq_weights + b * a.D, a.D) + chunk_squares(dk_weights + b * a.D, a.D);
        }
    }
}

#endif
