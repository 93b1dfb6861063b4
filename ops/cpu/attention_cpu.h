// attention_cpu.h: causal attention on the CPU, with register-blocked products of packed tiles. The
// contract is ops.h.
#ifndef ATTENTION_CPU_H
#define ATTENTION_CPU_H

#include "ops/cpu/device_cpu.h" // the team, polling

// --- attention: small products on packed tiles ---------------------------------------------------
// Queries and keys in a tile. A tile of scores (16 KiB) stays in the L1 cache.
enum { TILE = 64 };

// The part of a product that counts if the tile is on the diagonal, where a query sees only keys up
// to its own position. A tile of scores has one row per key. So the softmax of 64 queries works in
// whole vectors down the columns, and needs no sums across a vector.
typedef enum {
    WHOLE,
    OUT_ABOVE, // c is (keys, queries): columns from the row's number on
    A_ABOVE,   // a is (keys, queries): inner index from the row's number on
    A_BELOW    // a is (queries, keys): inner index up to the row's number
} Part;

// c(PANEL, vectors x LANES) [+]= a(PANEL, inner) b(inner, vectors x LANES), with all sums in
// registers, over inner indices from .. to - 1. Callers pass a constant for `vectors`. Element (i,
// k) of a is at a[i * a_row + k * a_inner].
static inline __attribute__((always_inline)) void
multiply_panel(const int vectors, float *c, int64_t ldc, const float *a, int64_t a_row,
               int64_t a_inner, const float *b, int64_t ldb, int64_t from, int64_t to, bool add) {
    Lanes sum[PANEL][2];
#pragma GCC unroll 8
    for (int i = 0; i < PANEL; i++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) { sum[i][v] = (Lanes){0}; }
    }
    for (int64_t k = from; k < to; k++) {
        const Lanes *bk = (const Lanes *)(b + k * ldb);
        const float *ak = a + k * a_inner;
#pragma GCC unroll 8
        for (int i = 0; i < PANEL; i++) {
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) { sum[i][v] += ak[i * a_row] * bk[v]; }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < PANEL; i++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            Lanes *to_c = (Lanes *)(c + i * ldc) + v;
            if (add) { sum[i][v] += *to_c; }
            *to_c = sum[i][v];
        }
    }
}
// c(m, n) [+]= a(m, inner) b(inner, n). n is a multiple of LANES. m is rounded up to whole panels,
// so the operands and c must be padded; values in the padding stay in the padding.
static inline void multiply_tile(float *c, int64_t ldc, const float *a, int64_t a_row,
                                 int64_t a_inner, const float *b, int64_t ldb, int64_t m, int64_t n,
                                 int64_t inner, Part part, bool add) {
    for (int64_t i = 0; i < m; i += PANEL) {
        const int64_t from = part == A_ABOVE ? i : 0,
                      to = part == A_BELOW ? min_i64(inner, i + PANEL) : inner;
        const float *ai = a + i * a_row;
        float *ci = c + i * ldc;
        int64_t j = part == OUT_ABOVE ? i / LANES * LANES : 0;
        for (; j + 2 * LANES <= n; j += 2 * LANES) {
            multiply_panel(2, ci + j, ldc, ai, a_row, a_inner, b + j, ldb, from, to, add);
        }
        for (; j < n; j += LANES) {
            multiply_panel(1, ci + j, ldc, ai, a_row, a_inner, b + j, ldb, from, to, add);
        }
    }
}

// A thread's workspace for one head. Tp is T rounded up to TILE; Dp is D = C/NH rounded up to
// LANES. The padding is zero.
typedef struct {
    float *q, *k, *v, *dout, *dq; // (Tp, Dp); q is scaled by 1/sqrt(D); forward uses only k and v
    float *q_t, *dout_t;          // (D, Tp); forward uses a tile of q_t, (D, TILE)
    float *out, *dk, *dv;         // (TILE, Dp)
    float *scores, *dscores;      // (TILE, TILE): (keys, queries)
    float *top, *sum, *factor;    // (TILE)
    float *delta, *lse;           // (Tp)
} HeadSpace;
static inline float *take_floats(float **at, int64_t n) {
    float *p = *at;
    *at += round_up(n, 16);
    return p;
}
static inline HeadSpace head_space(float *at, int64_t T, int64_t D, int64_t *floats) {
    const int64_t Tp = round_up(T, TILE), Dp = round_up(D, LANES);
    float *begin = at;
    HeadSpace h;
    h.q = take_floats(&at, Tp * Dp);
    h.k = take_floats(&at, Tp * Dp);
    h.v = take_floats(&at, Tp * Dp);
    h.dout = take_floats(&at, Tp * Dp);
    h.dq = take_floats(&at, Tp * Dp);
    h.q_t = take_floats(&at, D * Tp);
    h.dout_t = take_floats(&at, D * Tp);
    h.out = take_floats(&at, TILE * Dp);
    h.dk = take_floats(&at, TILE * Dp);
    h.dv = take_floats(&at, TILE * Dp);
    h.scores = take_floats(&at, TILE * TILE);
    h.dscores = take_floats(&at, TILE * TILE);
    h.top = take_floats(&at, TILE);
    h.sum = take_floats(&at, TILE);
    h.factor = take_floats(&at, TILE);
    h.delta = take_floats(&at, Tp);
    h.lse = take_floats(&at, Tp);
    *floats = at - begin;
    return h;
}
static inline HeadSpace thread_head_space(Stream *s, int64_t T, int64_t D) {
    int64_t floats;
    head_space((float *)s->workspace, T, D, &floats);
    assert(workspace_rest(s) >= (size_t)(floats * s->threads) * sizeof(float));
    return head_space((float *)s->workspace + floats * omp_get_thread_num(), T, D, &floats);
}

// to(n, Dp) = scale * from(n, D), where rows of `from` are `stride` apart
TYPED void pack_rows(const DType type, float *to, const Real *from, int64_t n, int64_t D,
                     int64_t stride, float scale) {
    const int64_t Dp = round_up(D, LANES);
    for (int64_t t = 0; t < n; t++) {
        const Real *row = real_at_const(from, t * stride);
        // Each row is on another page, so the hardware does not prefetch them.
        for (int64_t d = 0; d < D && t + 8 < n; d += 16) {
            __builtin_prefetch(real_at_const(row, 8 * stride + d));
        }
#pragma omp simd
        for (int64_t d = 0; d < D; d++) { to[t * Dp + d] = load(type, row, d) * scale; }
        for (int64_t d = D; d < Dp; d++) { to[t * Dp + d] = 0.0f; }
    }
}
// to(D, Tp) = scale * the transpose of from(n, D)
TYPED void pack_columns(const DType type, float *to, const Real *from, int64_t n, int64_t D,
                        int64_t stride, float scale) {
    const int64_t Tp = round_up(n, TILE);
    for (int64_t t0 = 0; t0 < Tp; t0 += 16) {
        const int64_t end = min_i64(n, t0 + 16);
        for (int64_t d = 0; d < D; d++) {
            for (int64_t t = t0; t < end; t++) {
                to[d * Tp + t] = load(type, from, t * stride + d) * scale;
            }
            for (int64_t t = max_i64(end, t0); t < t0 + 16; t++) { to[d * Tp + t] = 0.0f; }
        }
    }
}

// Returns the first column of row `key` of a score tile that is computed, rounded down to whole
// vectors. hide_future() masks the columns before `key` itself.
static inline int64_t first_seen(int64_t key, bool diagonal) {
    return diagonal ? key / LANES * LANES : 0;
}
static inline void hide_future(float *score, int64_t key, bool diagonal) {
    for (int64_t c = first_seen(key, diagonal); c < key && diagonal; c++) { score[c] = -1e30f; }
}

// Adds the scores of n keys to the running softmax of 64 queries. Scores become e^(score - top),
// and factor is the factor by which earlier sums shrink.
static inline void softmax_tile(HeadSpace *h, int64_t n, bool diagonal) {
    float top[TILE];
    memcpy(top, h->top, sizeof top);
    for (int64_t k = 0; k < n; k++) {
        float *score = h->scores + k * TILE;
        hide_future(score, k, diagonal);
        for (int64_t c = first_seen(k, diagonal); c < TILE; c += LANES) {
#pragma omp simd
            for (int64_t l = c; l < c + LANES; l++) {
                top[l] = score[l] > top[l] ? score[l] : top[l];
            }
        }
    }
#pragma omp simd
    for (int64_t l = 0; l < TILE; l++) {
        h->factor[l] = fast_exp(h->top[l] - top[l]);
        h->sum[l] *= h->factor[l];
        h->top[l] = top[l];
    }
    for (int64_t k = 0; k < n; k++) {
        float *score = h->scores + k * TILE;
        for (int64_t c = first_seen(k, diagonal); c < TILE; c += LANES) {
#pragma omp simd
            for (int64_t l = c; l < c + LANES; l++) {
                score[l] = fast_exp(score[l] - top[l]);
                h->sum[l] += score[l];
            }
        }
    }
}

TYPED void store_scaled(const DType type, Real *to, const float *from, float scale, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) { store(type, to, i, from[i] * scale); }
}
// Computes one tile of queries with all keys up to it. h->k and h->v hold the whole head. Queries
// beyond T are zero and are computed too.
static inline void attention_query_tile(HeadSpace *h, Real *out, float *lse, const Real *q,
                                        int64_t q0, int64_t T, int64_t C, int64_t D) {
    const int64_t Dp = round_up(D, LANES), m = min_i64(TILE, T - q0);
    FOR_TYPE(pack_columns, h->q_t, real_at_const(q, q0 * 3 * C), m, D, 3 * C,
             1.0f / sqrtf((float)D));
    for (int64_t i = 0; i < TILE; i++) {
        h->top[i] = -1e30f;
        h->sum[i] = 0.0f;
    }
    for (int64_t k0 = 0; k0 <= q0; k0 += TILE) {
        const bool diagonal = k0 == q0;
        const int64_t n = min_i64(TILE, T - k0);
        multiply_tile(h->scores, TILE, h->k + k0 * Dp, Dp, 1, h->q_t, TILE, n, TILE, D,
                      diagonal ? OUT_ABOVE : WHOLE, false);
        softmax_tile(h, n, diagonal);
        for (int64_t i = 0; i < m && k0; i++) {
            float *o = h->out + i * Dp;
#pragma omp simd
            for (int64_t d = 0; d < Dp; d++) { o[d] *= h->factor[i]; }
        }
        multiply_tile(h->out, Dp, h->scores, 1, TILE, h->v + k0 * Dp, Dp, m, Dp, n,
                      diagonal ? A_BELOW : WHOLE, k0 > 0);
    }
    for (int64_t i = 0; i < m; i++) {
        const float share = 1.0f / h->sum[i];
        FOR_TYPE(store_scaled, real_at(out, (q0 + i) * C), h->out + i * Dp, share, D);
        lse[q0 + i] = h->top[i] + logf(h->sum[i]);
    }
}

// A piece of work is one head and every `groups`-th tile of its queries, so that a few heads can
// still occupy many threads.
static inline void ops_attention_forward(Stream *s, Real *out, float *lse, const Real *qkv,
                                         int64_t rows, int64_t T, int64_t C, int64_t NH) {
    const int64_t D = C / NH, heads = rows * NH, tiles = ceil_div(T, TILE);
    if (heads * T == 0) { return; }
    const int64_t groups = min_i64(tiles, ceil_div(4 * s->threads, heads));
#pragma omp parallel num_threads(s->threads)
    {
        HeadSpace h = thread_head_space(s, T, D);
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < heads * groups; piece++) {
            const int64_t head = piece / groups, b = head / NH, first = (head % NH) * D;
            const Real *q = real_at_const(qkv, b * T * 3 * C + first);
            FOR_TYPE(pack_rows, h.k, real_at_const(q, C), T, D, 3 * C, 1.0f);
            FOR_TYPE(pack_rows, h.v, real_at_const(q, 2 * C), T, D, 3 * C, 1.0f);
            for (int64_t i = piece % groups; i < tiles; i += groups) {
                attention_query_tile(&h, real_at(out, b * T * C + first), lse + head * T, q,
                                     i * TILE, T, C, D);
                poll_messages(s);
            }
        }
    }
}

// Computes one tile of keys with one tile of queries: p = e^(q k - lse), dp = dout v, ds = p (dp -
// delta), each (keys, queries). Then dv += p dout, dk += ds q (q is scaled already), dq += ds^T k
// (scaled at the end).
static inline void attention_backward_tile(HeadSpace *h, int64_t q0, int64_t k0, int64_t T,
                                           int64_t D) {
    const int64_t Tp = round_up(T, TILE), Dp = round_up(D, LANES), m = min_i64(TILE, T - q0),
                  n = min_i64(TILE, T - k0);
    const bool diagonal = k0 == q0;
    const float *lse = h->lse + q0, *delta = h->delta + q0;
    multiply_tile(h->scores, TILE, h->k + k0 * Dp, Dp, 1, h->q_t + q0, Tp, n, TILE, D,
                  diagonal ? OUT_ABOVE : WHOLE, false);
    multiply_tile(h->dscores, TILE, h->v + k0 * Dp, Dp, 1, h->dout_t + q0, Tp, n, TILE, D,
                  diagonal ? OUT_ABOVE : WHOLE, false);
    for (int64_t k = 0; k < n; k++) {
        float *p = h->scores + k * TILE, *ds = h->dscores + k * TILE;
        hide_future(p, k, diagonal);
        for (int64_t c = first_seen(k, diagonal); c < TILE; c += LANES) {
#pragma omp simd
            for (int64_t l = c; l < c + LANES; l++) {
                p[l] = fast_exp(p[l] - lse[l]);
                ds[l] = p[l] * (ds[l] - delta[l]);
            }
        }
    }
    multiply_tile(h->dv, Dp, h->scores, TILE, 1, h->dout + q0 * Dp, Dp, n, Dp, m,
                  diagonal ? A_ABOVE : WHOLE, true);
    multiply_tile(h->dk, Dp, h->dscores, TILE, 1, h->q + q0 * Dp, Dp, n, Dp, m,
                  diagonal ? A_ABOVE : WHOLE, true);
    multiply_tile(h->dq + q0 * Dp, Dp, h->dscores, 1, TILE, h->k + k0 * Dp, Dp, m, Dp, n,
                  diagonal ? A_BELOW : WHOLE, true);
}

TYPED float dot_reals(const DType type, const Real *a, const Real *b, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) { sum += load(type, a, i) * load(type, b, i); }
    return sum;
}
static inline void attention_backward_head(Stream *s, HeadSpace *h, Real *dq, const Real *dout,
                                           const Real *q, const Real *out, const float *lse,
                                           int64_t T, int64_t C, int64_t D) {
    const int64_t Dp = round_up(D, LANES);
    const float scale = 1.0f / sqrtf((float)D);
    FOR_TYPE(pack_rows, h->q, q, T, D, 3 * C, scale);
    FOR_TYPE(pack_rows, h->k, real_at_const(q, C), T, D, 3 * C, 1.0f);
    FOR_TYPE(pack_rows, h->v, real_at_const(q, 2 * C), T, D, 3 * C, 1.0f);
    FOR_TYPE(pack_rows, h->dout, dout, T, D, C, 1.0f);
    FOR_TYPE(pack_columns, h->q_t, q, T, D, 3 * C, scale);
    FOR_TYPE(pack_columns, h->dout_t, dout, T, D, C, 1.0f);
    memset(h->delta, 0, (size_t)round_up(T, TILE) * sizeof(float));
    memset(h->lse, 0, (size_t)round_up(T, TILE) * sizeof(float));
    memcpy(h->lse, lse, (size_t)T * sizeof(float));
    memset(h->dq, 0, (size_t)(T * Dp) * sizeof(float));
    for (int64_t t = 0; t < T; t++) { // delta = sum(p dp) of a row, which equals dout . out
        h->delta[t] = FOR_TYPE(dot_reals, real_at_const(dout, t * C), real_at_const(out, t * C), D);
    }
    for (int64_t k0 = 0; k0 < T; k0 += TILE) {
        memset(h->dk, 0, (size_t)(TILE * Dp) * sizeof(float));
        memset(h->dv, 0, (size_t)(TILE * Dp) * sizeof(float));
        for (int64_t q0 = k0; q0 < T; q0 += TILE) { attention_backward_tile(h, q0, k0, T, D); }
        poll_messages(s);
        for (int64_t i = 0; i < min_i64(TILE, T - k0); i++) {
            Real *dk = real_at(dq, (k0 + i) * 3 * C + C);
            floats_to_reals(dk, h->dk + i * Dp, D);
            floats_to_reals(real_at(dk, C), h->dv + i * Dp, D);
        }
    }
    for (int64_t t = 0; t < T; t++) {
        FOR_TYPE(store_scaled, real_at(dq, t * 3 * C), h->dq + t * Dp, scale, D);
    }
}

static inline void ops_attention_backward(Stream *s, Real *dqkv, const Real *dout, const Real *qkv,
                                          const Real *out, const float *lse, int64_t rows,
                                          int64_t T, int64_t C, int64_t NH) {
    const int64_t D = C / NH, heads = rows * NH;
    if (heads * T == 0) { return; }
#pragma omp parallel num_threads(s->threads)
    {
        HeadSpace h = thread_head_space(s, T, D);
#pragma omp for schedule(dynamic, 1)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t b = head / NH, at = b * T * C + (head % NH) * D,
                          at_qkv = b * T * 3 * C + (head % NH) * D;
            attention_backward_head(s, &h, real_at(dqkv, at_qkv), real_at_const(dout, at),
                                    real_at_const(qkv, at_qkv), real_at_const(out, at),
                                    lse + head * T, T, C, D);
        }
    }
}

#endif
