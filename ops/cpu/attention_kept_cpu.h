// attention_kept_cpu.h: attention of the queries of new tokens to keys and values that are kept, on
// the CPU. The contract is ops.h.
//
// Plan     A query head passes over the kept keys and values of its group once, a tile of positions
//          at a time, with a running softmax. There is no product of tiles: with one new token each
//          key is read for one number.
#ifndef ATTENTION_KEPT_CPU_H
#define ATTENTION_KEPT_CPU_H

#include "ops/cpu/attention_cpu.h" // a thread's workspace

static inline void ops_keep_keys(Stream *s, KeyCache cache, const Real *qkv, AttentionShape a) {
    const int64_t width = attention_qkv_width(a), D = a.D;
    assert(a.rows == 1 && a.first + a.T <= cache.most);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t head = 0; head < 2 * a.kv_heads; head++) {
        const bool value = head >= a.kv_heads;
        Real *to = real_at(value ? cache.values : cache.keys,
                           ((head - (value ? a.kv_heads : 0)) * cache.most + a.first) * D);
        for (int64_t t = 0; t < a.T; t++) {
            memcpy(real_at(to, t * D), real_at_const(qkv, t * width + (a.heads + head) * D),
                   (size_t)D * ops_real_bytes());
        }
    }
}

// scores(n) = scale q . the rows of keys(n, D)
TYPED void kept_scores(const DType type, float *scores, const float *q, const Real *keys,
                       float scale, int64_t n, int64_t D) {
    for (int64_t k = 0; k < n; k++) {
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < D; d++) { sum += q[d] * load_real(type, keys, k * D + d); }
        scores[k] = sum * scale;
    }
}
// out(D) += weights(n) values(n, D)
TYPED void kept_values(const DType type, float *out, const float *weights, const Real *values,
                       int64_t n, int64_t D) {
    for (int64_t k = 0; k < n; k++) {
#pragma omp simd
        for (int64_t d = 0; d < D; d++) {
            out[d] += weights[k] * load_real(type, values, k * D + d);
        }
    }
}
// Computes one query head with the keys and values of the first `n` positions.
static inline void attention_kept_query(HeadSpace *h, Real *out, const Real *query,
                                        const Real *keys, const Real *values, int64_t n,
                                        int64_t D) {
    float *q = h->dq, top = -1e30f, sum = 0.0f;
    reals_to_floats(q, query, D);
    memset(h->out, 0, (size_t)D * sizeof(float));
    for (int64_t k0 = 0; k0 < n; k0 += TILE) {
        const int64_t count = min_i64(TILE, n - k0);
        FOR_TYPE(kept_scores, h->scores, q, real_at_const(keys, k0 * D), h->scale, count, D);
        float highest = top;
        for (int64_t k = 0; k < count; k++) { highest = fmaxf(highest, h->scores[k]); }
        const float before = fast_exp(top - highest);
        top = highest;
        sum *= before;
        for (int64_t d = 0; d < D; d++) { h->out[d] *= before; }
        for (int64_t k = 0; k < count; k++) {
            h->scores[k] = fast_exp(h->scores[k] - top);
            sum += h->scores[k];
        }
        FOR_TYPE(kept_values, h->out, h->scores, real_at_const(values, k0 * D), count, D);
    }
    FOR_TYPE(store_scaled, out, h->out, 1.0f / sum, D);
}
static inline void ops_attention_kept(Stream *s, Real *out, const Real *qkv, KeyCache cache,
                                      AttentionShape a) {
    const int64_t width = attention_qkv_width(a), head_elements = cache.most * a.D;
    assert(a.rows == 1);
#pragma omp parallel num_threads(s->threads)
    {
        HeadSpace h = thread_head_space(s, a);
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < a.T * a.heads; piece++) {
            const int64_t t = piece / a.heads, head = piece % a.heads,
                          at = head * a.kv_heads / a.heads * head_elements;
            attention_kept_query(&h, real_at(out, piece * a.D),
                                 real_at_const(qkv, t * width + head * a.D),
                                 real_at_const(cache.keys, at), real_at_const(cache.values, at),
                                 a.first + t + 1, a.D);
            poll_messages(s);
        }
    }
}

#endif
