// attention_cpu.h: causal attention on the CPU, with register-blocked products of packed tiles. The
// contract is ops.h.
//
// Words    Products work on words of 32 bits. In fp32 a word is a number. Where products are
//          computed in bf16 and the compiler knows the CPU's dot products, a word is a pair of
//          neighbours in the inner dimension, so a product has half as many inner words. Packing
//          and the conversion of scores differ, the loops do not.
// Tiles    Pairs are multiplied by the tiles of AMX where the CPU has them (gemm_tiles.h). Then
//          products are of whole tiles: operands have zeros beyond the rows and columns that exist,
//          the left one is packed by its rows, and on the diagonal what no query sees is zero.
#ifndef ATTENTION_CPU_H
#define ATTENTION_CPU_H

#include "ops/cpu/device_cpu.h" // the team, polling
#include "ops/cpu/gemm_tiles.h" // tile_turn
#ifdef __AVX512BF16__
#include <immintrin.h> // the dot product of pairs
#endif

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

typedef uint32_t Word __attribute__((may_alias)); // see above
static inline bool words_are_pairs(void) {
#ifdef __AVX512BF16__
    return cpu_compute == DTYPE_BF16;
#else
    return false;
#endif
}
static inline bool tiles_multiply_pairs(void) { return words_are_pairs() && cpu_tiles; }
// Returns the words of n inner elements.
static inline int64_t words_of(int64_t n) { return words_are_pairs() ? (n + 1) / 2 : n; }
static inline __attribute__((always_inline)) void multiply_word(const bool pairs, Lanes *sum,
                                                                const Word *a, const Lanes *b) {
#ifdef __AVX512BF16__
    if (pairs) {
        const __m512i word = _mm512_set1_epi32((int)*a);
        *sum = (Lanes)_mm512_dpbf16_ps((__m512)*sum, (__m512bh)*b, (__m512bh)word);
        return;
    }
#endif
    float number;
    (void)pairs;
    memcpy(&number, a, sizeof number);
    *sum += number * *b;
}
// c(PANEL, vectors x LANES) [+]= a(PANEL, inner) b(inner, vectors x LANES), with all sums in
// registers, over inner words from .. to - 1. Callers pass constants for `pairs` and `vectors`.
// Word (i, k) of a is at a[i * a_row + k * a_inner].
static inline __attribute__((always_inline)) void
multiply_panel(const bool pairs, const int vectors, float *c, int64_t ldc, const Word *a,
               int64_t a_row, int64_t a_inner, const Word *b, int64_t ldb, int64_t from, int64_t to,
               bool add) {
    Lanes sum[PANEL][2];
#pragma GCC unroll 8
    for (int i = 0; i < PANEL; i++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) { sum[i][v] = (Lanes){0}; }
    }
    for (int64_t k = from; k < to; k++) {
        const Lanes *bk = (const Lanes *)(const void *)(b + k * ldb);
        const Word *ak = a + k * a_inner;
#pragma GCC unroll 8
        for (int i = 0; i < PANEL; i++) {
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                multiply_word(pairs, &sum[i][v], ak + i * a_row, bk + v);
            }
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
// c(m, n) [+]= a(m, inner) b(inner, n), with `inner` words. n is a multiple of LANES. m is rounded
// up to whole panels, so the operands and c must be padded; values in the padding stay in the
// padding.
static inline __attribute__((always_inline)) void
multiply_words(const bool pairs, float *c, int64_t ldc, const Word *a, int64_t a_row,
               int64_t a_inner, const Word *b, int64_t ldb, int64_t m, int64_t n, int64_t inner,
               Part part, bool add) {
    const int64_t width = pairs ? 2 : 1; // elements of a word
    for (int64_t i = 0; i < m; i += PANEL) {
        const int64_t from = part == A_ABOVE ? i / width : 0,
                      to = part == A_BELOW ? min_i64(inner, (i + PANEL) / width) : inner;
        const Word *ai = a + i * a_row;
        float *ci = c + i * ldc;
        int64_t j = part == OUT_ABOVE ? i / LANES * LANES : 0;
        for (; j + 2 * LANES <= n; j += 2 * LANES) {
            multiply_panel(pairs, 2, ci + j, ldc, ai, a_row, a_inner, b + j, ldb, from, to, add);
        }
        for (; j < n; j += LANES) {
            multiply_panel(pairs, 1, ci + j, ldc, ai, a_row, a_inner, b + j, ldb, from, to, add);
        }
    }
}
// The same by tiles: m is rounded up to 32 and inner to 16 words; rows of a are words that follow
// each other.
#ifdef __AVX512BF16__
TILES static inline void multiply_by_tiles(float *c, int64_t ldc, const Word *a, int64_t a_row,
                                           const Word *b, int64_t ldb, int64_t m, int64_t n,
                                           int64_t inner, bool add) {
    const int64_t c_bytes = ldc * 4, a_bytes = a_row * 4, b_bytes = ldb * 4;
    for (int64_t i = 0; i < m; i += 32, a += 32 * a_row, c += 32 * ldc) {
        for (int64_t j = 0; j < n; j += 32) {
            const bool both = j + 16 < n; // else one column of tiles is left
            float *c0 = c + j, *c1 = c0 + 16 * ldc;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            if (add) {
                _tile_loadd(0, c0, c_bytes);
                _tile_loadd(2, c1, c_bytes);
            }
            if (add && both) {
                _tile_loadd(1, c0 + 16, c_bytes);
                _tile_loadd(3, c1 + 16, c_bytes);
            }
            for (int64_t k = 0; k < inner; k += 16) {
                const Word *bk = b + k * ldb + j;
                _tile_loadd(6, bk, b_bytes);
                _tile_loadd(4, a + k, a_bytes);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(5, a + 16 * a_row + k, a_bytes);
                _tile_dpbf16ps(2, 5, 6);
                if (both) {
                    _tile_loadd(7, bk + 16, b_bytes);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, c0, c_bytes);
            _tile_stored(2, c1, c_bytes);
            if (both) {
                _tile_stored(1, c0 + 16, c_bytes);
                _tile_stored(3, c1 + 16, c_bytes);
            }
        }
    }
}
// Turns words(n, TILE) into to(TILE, TILE / 2), where n is rounded up to 16.
TILES static inline void turn_words(Word *to, const Word *words, int64_t n) {
    for (int64_t k = 0; k < n; k += 16) {
        for (int64_t q = 0; q < TILE; q += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) { r[i] = _mm512_loadu_si512(words + (k + i) * TILE + q); }
            tile_turn(r);
            for (int i = 0; i < 16; i++) {
                _mm512_storeu_si512(to + (q + i) * (TILE / 2) + k, r[i]);
            }
        }
    }
}
TILES static inline void tiles_end(void) { _tile_release(); }
#endif
// Around what a thread does with tiles. Messages that move meanwhile may end it.
static inline void attention_begin_tiles(void) {
#ifdef __AVX512BF16__
    if (tiles_multiply_pairs()) { tiles_begin(); }
#endif
}
static inline void attention_end_tiles(void) {
#ifdef __AVX512BF16__
    if (tiles_multiply_pairs()) { tiles_end(); }
#endif
}
static inline void multiply_tile(float *c, int64_t ldc, const Word *a, int64_t a_row,
                                 int64_t a_inner, const Word *b, int64_t ldb, int64_t m, int64_t n,
                                 int64_t inner, Part part, bool add) {
#ifdef __AVX512BF16__
    if (tiles_multiply_pairs()) {
        multiply_by_tiles(c, ldc, a, a_inner == 1 ? a_row : TILE / 2, b, ldb, m, n, inner, add);
        return;
    }
#endif
    if (words_are_pairs()) {
        multiply_words(true, c, ldc, a, a_row, a_inner, b, ldb, m, n, inner, part, add);
    } else {
        multiply_words(false, c, ldc, a, a_row, a_inner, b, ldb, m, n, inner, part, add);
    }
}

// A thread's workspace for one query head. Tp is T rounded up to TILE, Dp is D rounded up to LANES,
// w() is the number of words, wp() is that rounded up to LANES. The padding is zero. Where words
// are numbers, an array and its `rows` are one.
typedef struct {
    float scale;                     // 1/sqrt(D)
    Word *k_rows, *v_rows;           // (Tp, wp(D)): words of a row
    Word *k, *v, *q, *dout;          // (w(Tp), Dp): words of a column
    Word *q_t, *dout_t;              // (wp(D), Tp): words of a row, transposed; forward uses a tile
    Word *rows;                      // (TILE, wp(D)): what is transposed
    float *out, *dq;                 // (TILE, Dp), (Tp, Dp)
    float *dk, *dv;                  // (TILE, Dp); if several query heads share them, (Tp, Dp)
    float *scores, *dscores;         // (TILE, TILE): (keys, queries)
    Word *p, *ds, *p_rows, *ds_rows; // the same as words of a column, (w(TILE), TILE), and of a row
    float *top, *sum, *factor;       // (TILE)
    float *delta, *lse;              // (Tp)
} HeadSpace;
static inline Word *take_words(float **at, int64_t n) { return (Word *)(void *)take_floats(at, n); }
// Takes words of pairs; numbers are where they are already.
static inline Word *take_pairs(float **at, int64_t n, Word *numbers) {
    return words_are_pairs() ? take_words(at, n) : numbers;
}
static inline int64_t row_words(int64_t D) { return round_up(words_of(D), LANES); }
static inline bool keys_are_shared(AttentionShape a) { return a.kv_heads < a.heads; }
static inline HeadSpace head_space(float *at, AttentionShape a, int64_t *floats) {
    const int64_t D = a.D, Tp = round_up(a.T, TILE), Dp = round_up(D, LANES), Dw = row_words(D),
                  tile = words_of(TILE) * TILE, keys = keys_are_shared(a) ? Tp : (int64_t)TILE;
    float *begin = at;
    HeadSpace h;
    h.scale = 1.0f / sqrtf((float)D);
    h.k = take_words(&at, words_of(Tp) * Dp);
    h.v = take_words(&at, words_of(Tp) * Dp);
    h.q = take_words(&at, words_of(Tp) * Dp);
    h.dout = take_words(&at, words_of(Tp) * Dp);
    h.k_rows = take_pairs(&at, Tp * Dw, h.k);
    h.v_rows = take_pairs(&at, Tp * Dw, h.v);
    h.q_t = take_words(&at, (words_are_pairs() ? Dw : D) * Tp);
    h.dout_t = take_words(&at, (words_are_pairs() ? Dw : D) * Tp);
    h.rows = take_words(&at, TILE * Dw);
    h.out = take_floats(&at, TILE * Dp);
    h.dq = take_floats(&at, Tp * Dp);
    h.dk = take_floats(&at, keys * Dp);
    h.dv = take_floats(&at, keys * Dp);
    h.scores = take_floats(&at, TILE * TILE);
    h.dscores = take_floats(&at, TILE * TILE);
    h.p = take_pairs(&at, tile, (Word *)(void *)h.scores);
    h.ds = take_pairs(&at, tile, (Word *)(void *)h.dscores);
    h.p_rows = take_pairs(&at, tile, (Word *)(void *)h.scores);
    h.ds_rows = take_pairs(&at, tile, (Word *)(void *)h.dscores);
    h.top = take_floats(&at, TILE);
    h.sum = take_floats(&at, TILE);
    h.factor = take_floats(&at, TILE);
    h.delta = take_floats(&at, Tp);
    h.lse = take_floats(&at, Tp);
    *floats = at - begin;
    return h;
}
static inline HeadSpace thread_head_space(Stream *s, AttentionShape a) {
    int64_t floats;
    head_space((float *)s->workspace, a, &floats);
    assert(workspace_rest(s) >= (size_t)(floats * s->threads) * sizeof(float));
    return head_space((float *)s->workspace + floats * omp_get_thread_num(), a, &floats);
}
// Returns where head `head` of q begins in qkv, or in an array like out, of a row of the batch; and
// where the head of keys begins that it reads. Values follow kv_heads D elements later.
static inline int64_t query_at(AttentionShape a, int64_t row, int64_t width, int64_t head) {
    return row * a.T * width + head * a.D;
}
static inline int64_t keys_at(AttentionShape a, int64_t row, int64_t kv_head) {
    return row * a.T * attention_qkv_width(a) + (a.heads + kv_head) * a.D;
}

// to(n, wp(D)) = words of the rows of from(n, D), which are `stride` apart
static inline void pack_rows(Word *to, const Real *from, int64_t n, int64_t D, int64_t stride) {
    const bool convert = cpu_real == DTYPE_BF16 && !words_are_pairs();
    const int64_t Dw = row_words(D), bytes = D * (int64_t)ops_real_bytes(),
                  used = convert ? D * (int64_t)sizeof(float) : bytes;
    for (int64_t t = 0; t < n; t++, to += Dw) {
        const Real *row = real_at_const(from, t * stride);
        // Each row is on another page, so the hardware does not prefetch them.
        for (int64_t byte = 0; byte < bytes && t + 8 < n; byte += 64) {
            __builtin_prefetch((const char *)real_at_const(row, 8 * stride) + byte);
        }
        memset((char *)to + used, 0, (size_t)Dw * sizeof(Word) - (size_t)used);
        if (convert) {
            reals_to_floats((float *)(void *)to, row, D);
        } else {
            memcpy(to, row, (size_t)bytes);
        }
    }
}
// The same of a head, with zeros up to a whole tile.
static inline void pack_head_rows(Word *to, const Real *from, int64_t n, int64_t D,
                                  int64_t stride) {
    const int64_t Dw = row_words(D);
    pack_rows(to, from, n, D, stride);
    memset(to + n * Dw, 0, (size_t)((round_up(n, TILE) - n) * Dw) * sizeof(Word));
}
// to(w(n), Dp) = words of the columns of from(n, D), with zeros up to a whole tile
static inline void pack_columns(Word *to, const Real *from, int64_t n, int64_t D, int64_t stride) {
    const int64_t Dp = round_up(D, LANES);
    if (!words_are_pairs()) {
        pack_head_rows(to, from, n, D, stride);
        return;
    }
    memset(to + n / 2 * Dp, 0, (size_t)((round_up(n, TILE) / 2 - n / 2) * Dp) * sizeof(Word));
    for (int64_t t = 0; t < n; t += 2, to += Dp) {
        const uint16_t *low = (const uint16_t *)real_at_const(from, t * stride),
                       *high = t + 1 < n ? low + stride : NULL;
#pragma omp simd
        for (int64_t d = 0; d < D; d++) { to[d] = low[d]; }
        if (high) {
#pragma omp simd
            for (int64_t d = 0; d < D; d++) { to[d] |= (uint32_t)high[d] << 16; }
        }
        for (int64_t d = D; d < Dp; d++) { to[d] = 0; }
    }
}
// to(wp(D), Tp) = the transpose of the words of the rows of from(n, D); a tile of rows at a time
static inline void pack_transposed(const HeadSpace *h, Word *to, const Real *from, int64_t n,
                                   int64_t D, int64_t stride) {
    const int64_t Tp = round_up(n, TILE), Dw = row_words(D), used = words_of(D);
    if (words_are_pairs()) { memset(to + used * Tp, 0, (size_t)((Dw - used) * Tp) * sizeof *to); }
    for (int64_t t0 = 0; t0 < n; t0 += TILE) {
        const int64_t rows = min_i64(TILE, n - t0);
        pack_rows(h->rows, real_at_const(from, t0 * stride), rows, D, stride);
        memset(h->rows + rows * Dw, 0, (size_t)((TILE - rows) * Dw) * sizeof(Word));
        for (int64_t part = 0; part < TILE; part += 16) {
            for (int64_t d = 0; d < used; d++) {
                for (int64_t t = part; t < part + 16; t++) {
                    to[d * Tp + t0 + t] = h->rows[t * Dw + d];
                }
            }
        }
    }
}
// Scores are rounded by an instruction that makes 0 of denormal numbers, as products of pairs do.
// to(w(n), TILE) = words of the columns of scores(n, TILE)
static inline void pack_score_columns(Word *to, const float *scores, int64_t n) {
#ifdef __AVX512BF16__
    for (int64_t k = 0; k < n && words_are_pairs(); k += 2, scores += 2 * TILE, to += TILE) {
        for (int64_t l = 0; l < TILE; l += LANES) {
            const __m512 low = _mm512_loadu_ps(scores + l),
                         high =
                             k + 1 < n ? _mm512_loadu_ps(scores + TILE + l) : _mm512_setzero_ps();
            const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            _mm512_storeu_si512(to + l, _mm512_permutexvar_epi16(PAIRS_OF_HALVES, rounded));
        }
    }
#else
    (void)to;
    (void)scores;
    (void)n;
#endif
}
// The same for a product whose left operand is (TILE, n): for tiles these are words of a row.
static inline void pack_scores_turned(Word *to, const float *scores, int64_t n) {
#ifdef __AVX512BF16__
    if (tiles_multiply_pairs()) {
        Word words[TILE / 2 * TILE];
        pack_score_columns(words, scores, round_up(n, 32));
        turn_words(to, words, words_of(n));
        return;
    }
#endif
    pack_score_columns(to, scores, n);
}
// to(n, w(TILE)) = words of the rows of scores(n, TILE)
static inline void pack_score_rows(Word *to, const float *scores, int64_t n) {
#ifdef __AVX512BF16__
    for (int64_t i = 0; i < n * TILE && words_are_pairs(); i += 2 * LANES) {
        _mm512_storeu_si512(to + i / 2,
                            (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(scores + i + LANES),
                                                         _mm512_loadu_ps(scores + i)));
    }
#else
    (void)to;
    (void)scores;
    (void)n;
#endif
}

// Returns the first column of row `key` of a score tile that is computed, rounded down to whole
// vectors. hide_future() masks the columns before `key` itself.
static inline int64_t first_seen(int64_t key, bool diagonal) {
    return diagonal ? key / LANES * LANES : 0;
}
// For tiles, whose products are whole: zeros before these columns.
static inline void clear_unseen(float *scores, bool diagonal) {
    for (int64_t key = LANES; key < TILE && diagonal && tiles_multiply_pairs(); key++) {
        memset(scores + key * TILE, 0, (size_t)first_seen(key, true) * sizeof *scores);
    }
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
                score[l] *= h->scale;
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
    for (int64_t i = 0; i < n; i++) { store_real(type, to, i, from[i] * scale); }
}
// Computes one tile of queries with all keys up to it. h->k and h->v hold the whole head. Queries
// beyond T are zero and are computed too.
static inline void attention_query_tile(HeadSpace *h, Real *out, float *lse, const Real *q,
                                        int64_t q0, AttentionShape a) {
    const int64_t T = a.T, D = a.D, stride = attention_qkv_width(a), Dp = round_up(D, LANES),
                  Dw = row_words(D), m = min_i64(TILE, T - q0);
    attention_begin_tiles();
    pack_transposed(h, h->q_t, real_at_const(q, q0 * stride), m, D, stride);
    for (int64_t i = 0; i < TILE; i++) {
        h->top[i] = -1e30f;
        h->sum[i] = 0.0f;
    }
    for (int64_t k0 = 0; k0 <= q0; k0 += TILE) {
        const bool diagonal = k0 == q0;
        const int64_t n = min_i64(TILE, T - k0);
        multiply_tile(h->scores, TILE, h->k_rows + k0 * Dw, Dw, 1, h->q_t, TILE, n, TILE,
                      words_of(D), diagonal ? OUT_ABOVE : WHOLE, false);
        softmax_tile(h, n, diagonal);
        clear_unseen(h->scores, diagonal);
        pack_scores_turned(h->p, h->scores, n);
        for (int64_t i = 0; i < m && k0; i++) {
            float *o = h->out + i * Dp;
#pragma omp simd
            for (int64_t d = 0; d < Dp; d++) { o[d] *= h->factor[i]; }
        }
        multiply_tile(h->out, Dp, h->p, 1, TILE, h->v + words_of(k0) * Dp, Dp, m, Dp, words_of(n),
                      diagonal ? A_BELOW : WHOLE, k0 > 0);
    }
    for (int64_t i = 0; i < m; i++) {
        const float share = 1.0f / h->sum[i];
        FOR_TYPE(store_scaled, real_at(out, (q0 + i) * attention_q_width(a)), h->out + i * Dp,
                 share, D);
        lse[q0 + i] = h->top[i] + logf(h->sum[i]);
    }
}

// A piece of work is one query head and every `groups`-th tile of its queries, so that a few heads
// can still occupy many threads.
static inline void ops_attention_forward(Stream *s, Real *out, float *lse, const Real *qkv,
                                         AttentionShape a) {
    const int64_t heads = a.rows * a.heads, tiles = ceil_div(a.T, TILE),
                  stride = attention_qkv_width(a);
    if (heads * a.T == 0) { return; }
    const int64_t groups = min_i64(tiles, ceil_div(4 * s->threads, heads));
#pragma omp parallel num_threads(s->threads)
    {
        HeadSpace h = thread_head_space(s, a);
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < heads * groups; piece++) {
            const int64_t head = piece / groups, row = head / a.heads, mine = head % a.heads;
            const Real *k = real_at_const(qkv, keys_at(a, row, mine * a.kv_heads / a.heads));
            pack_head_rows(h.k_rows, k, a.T, a.D, stride);
            pack_columns(h.v, real_at_const(k, a.kv_heads * a.D), a.T, a.D, stride);
            for (int64_t i = piece % groups; i < tiles; i += groups) {
                attention_query_tile(&h, real_at(out, query_at(a, row, attention_q_width(a), mine)),
                                     lse + head * a.T,
                                     real_at_const(qkv, query_at(a, row, stride, mine)), i * TILE,
                                     a);
                poll_messages(s);
            }
        }
        attention_end_tiles();
    }
}

// Computes one tile of keys with one tile of queries: p = e^(scale q k - lse), dp = dout v, ds = p
// (dp - delta), each (keys, queries). Then dv += p dout, dk += ds q, dq += ds^T k (dk and dq are
// scaled at the end).
static inline void attention_backward_tile(HeadSpace *h, float *dk, float *dv, int64_t q0,
                                           int64_t k0, int64_t T, int64_t D) {
    const int64_t Tp = round_up(T, TILE), Dp = round_up(D, LANES), Dw = row_words(D),
                  m = min_i64(TILE, T - q0), n = min_i64(TILE, T - k0), row = words_of(TILE);
    const bool diagonal = k0 == q0;
    const float *lse = h->lse + q0, *delta = h->delta + q0;
    multiply_tile(h->scores, TILE, h->k_rows + k0 * Dw, Dw, 1, h->q_t + q0, Tp, n, TILE,
                  words_of(D), diagonal ? OUT_ABOVE : WHOLE, false);
    multiply_tile(h->dscores, TILE, h->v_rows + k0 * Dw, Dw, 1, h->dout_t + q0, Tp, n, TILE,
                  words_of(D), diagonal ? OUT_ABOVE : WHOLE, false);
    for (int64_t k = 0; k < n; k++) {
        float *p = h->scores + k * TILE, *ds = h->dscores + k * TILE;
        hide_future(p, k, diagonal);
        for (int64_t c = first_seen(k, diagonal); c < TILE; c += LANES) {
#pragma omp simd
            for (int64_t l = c; l < c + LANES; l++) {
                p[l] = fast_exp(p[l] * h->scale - lse[l]);
                ds[l] = p[l] * (ds[l] - delta[l]);
            }
        }
    }
    clear_unseen(h->scores, diagonal);
    clear_unseen(h->dscores, diagonal);
    pack_score_rows(h->p_rows, h->scores, n);
    pack_score_rows(h->ds_rows, h->dscores, n);
    pack_scores_turned(h->ds, h->dscores, n);
    multiply_tile(dv, Dp, h->p_rows, row, 1, h->dout + words_of(q0) * Dp, Dp, n, Dp, words_of(m),
                  diagonal ? A_ABOVE : WHOLE, true);
    multiply_tile(dk, Dp, h->ds_rows, row, 1, h->q + words_of(q0) * Dp, Dp, n, Dp, words_of(m),
                  diagonal ? A_ABOVE : WHOLE, true);
    multiply_tile(h->dq + q0 * Dp, Dp, h->ds, 1, TILE, h->k + words_of(k0) * Dp, Dp, m, Dp,
                  words_of(n), diagonal ? A_BELOW : WHOLE, true);
}

TYPED float dot_reals(const DType type, const Real *a, const Real *b, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) { sum += load_real(type, a, i) * load_real(type, b, i); }
    return sum;
}
// A query head, and the head of keys and values that it reads.
typedef struct {
    const Real *q, *k, *v, *out, *dout;
    Real *dq, *dk, *dv;
    const float *lse;
    bool first, last; // of the query heads that share the keys
} BackwardHead;
static inline void pack_backward_head(HeadSpace *h, const BackwardHead *g, AttentionShape a) {
    const int64_t T = a.T, D = a.D, stride = attention_qkv_width(a), out = attention_q_width(a);
    pack_columns(h->q, g->q, T, D, stride);
    if (g->first) {
        if (h->k != h->k_rows) { pack_columns(h->k, g->k, T, D, stride); }
        pack_head_rows(h->k_rows, g->k, T, D, stride);
        pack_head_rows(h->v_rows, g->v, T, D, stride);
    }
    pack_columns(h->dout, g->dout, T, D, out);
    pack_transposed(h, h->q_t, g->q, T, D, stride);
    pack_transposed(h, h->dout_t, g->dout, T, D, out);
    memset(h->delta, 0, (size_t)round_up(T, TILE) * sizeof(float));
    memset(h->lse, 0, (size_t)round_up(T, TILE) * sizeof(float));
    memcpy(h->lse, g->lse, (size_t)T * sizeof(float));
    for (int64_t t = 0; t < T; t++) { // delta = sum(p dp) of a row, which equals dout . out
        h->delta[t] =
            FOR_TYPE(dot_reals, real_at_const(g->dout, t * out), real_at_const(g->out, t * out), D);
    }
}
static inline void attention_backward_head(Stream *s, HeadSpace *h, const BackwardHead *g,
                                           AttentionShape a) {
    const int64_t T = a.T, D = a.D, stride = attention_qkv_width(a), Dp = round_up(D, LANES);
    pack_backward_head(h, g, a);
    memset(h->dq, 0, (size_t)(T * Dp) * sizeof(float));
    for (int64_t k0 = 0; k0 < T; k0 += TILE) {
        const int64_t kept = keys_are_shared(a) ? k0 * Dp : 0;
        float *dk = h->dk + kept, *dv = h->dv + kept;
        if (g->first) {
            memset(dk, 0, (size_t)(TILE * Dp) * sizeof(float));
            memset(dv, 0, (size_t)(TILE * Dp) * sizeof(float));
        }
        attention_begin_tiles();
        for (int64_t q0 = k0; q0 < T; q0 += TILE) {
            attention_backward_tile(h, dk, dv, q0, k0, T, D);
        }
        poll_messages(s);
        for (int64_t i = 0; i < min_i64(TILE, T - k0) && g->last; i++) {
            const int64_t at = (k0 + i) * stride;
            FOR_TYPE(store_scaled, real_at(g->dk, at), dk + i * Dp, h->scale, D);
            floats_to_reals(real_at(g->dv, at), dv + i * Dp, D);
        }
    }
    for (int64_t t = 0; t < T; t++) {
        FOR_TYPE(store_scaled, real_at(g->dq, t * stride), h->dq + t * Dp, h->scale, D);
    }
}

// A piece of work is one head of keys with all query heads that read it, one after the other.
static inline void ops_attention_backward(Stream *s, Real *dqkv, const Real *dout, const Real *qkv,
                                          const Real *out, const float *lse, AttentionShape a) {
    const int64_t pieces = a.rows * a.kv_heads, stride = attention_qkv_width(a);
    if (pieces * a.T == 0) { return; }
#pragma omp parallel num_threads(s->threads)
    {
        HeadSpace h = thread_head_space(s, a);
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t row = piece / a.kv_heads, kv = piece % a.kv_heads,
                          begin = ceil_div(kv * a.heads, a.kv_heads),
                          end = ceil_div((kv + 1) * a.heads, a.kv_heads), k = keys_at(a, row, kv),
                          v = k + a.kv_heads * a.D;
            for (int64_t head = begin; head < end; head++) {
                const int64_t q = query_at(a, row, stride, head),
                              o = query_at(a, row, attention_q_width(a), head);
                const BackwardHead g = {
                    .q = real_at_const(qkv, q),
                    .k = real_at_const(qkv, k),
                    .v = real_at_const(qkv, v),
                    .out = real_at_const(out, o),
                    .dout = real_at_const(dout, o),
                    .dq = real_at(dqkv, q),
                    .dk = real_at(dqkv, k),
                    .dv = real_at(dqkv, v),
                    .lse = lse + (row * a.heads + head) * a.T,
                    .first = head == begin,
                    .last = head + 1 == end,
                };
                attention_backward_head(s, &h, &g, a);
            }
        }
        attention_end_tiles();
    }
}

#endif
