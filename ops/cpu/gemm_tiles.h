// gemm_tiles.h: products of bf16 matrices by the tiles of AMX (Intel Sapphire Rapids and later),
// for gemm_cpu.h. A tile is 16 rows of 64 bytes; an instruction multiplies two tiles of bf16 and
// adds the result to a tile of 16 x 16 fp32.
//
// Plan     Four tiles of sums, 32 x 32 elements of the result, take in the inner dimension 32
//          indices at a time, from two tiles of each operand. Both operands are packed so that
//          these tiles lie one behind the other: the left one in blocks that stay in the L2 cache,
//          the right one in strips of 32 columns that stay in the L1 cache.
// Order    An element's terms are added in the order of the inner indices, whatever tile it is in.
#ifndef GEMM_TILES_H
#define GEMM_TILES_H

#include "ops/cpu/peak_cpu.h" // tiles_begin, TILES
#include "ops/cpu/real_cpu.h" // Product

#ifndef TILE_DEPTH // tests make both smaller
// Inner indices of a block, of which a strip takes half of an L1 cache; rows of a packed block, at
// most: 3/8 of an L2 cache of 2 MiB.
#define TILE_DEPTH 384
#define TILE_BLOCK_ROWS 1024
#endif
enum {
    TILE_STRIP = 32, // rows and columns of the result that a kernel computes
    // bytes of a thread: the packed block, a strip, and the sums of a strip that is not whole
    TILE_SPACE = (TILE_BLOCK_ROWS + TILE_STRIP) * TILE_DEPTH * 2 + TILE_STRIP * TILE_STRIP * 4
};

#ifdef __x86_64__
// Returns a mask of the first n of 32 numbers.
static inline uint32_t tile_mask(int64_t n) {
    return n >= 32 ? UINT32_MAX : n <= 0 ? 0 : (1u << n) - 1;
}
// Turns a square of 16 x 16 pairs of bf16.
TILES static inline void tile_turn(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}
// Reads 16 pairs of rows of x(rows, cols), of which 16 columns are used: [pair] = the pairs of the
// columns.
TILES static inline void tile_read_pairs(__m512i r[16], const uint16_t *x, int64_t stride,
                                         int64_t rows, int64_t cols) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const uint32_t mask = tile_mask(min_i64(cols, 16));
    for (int i = 0; i < 16; i++) {
        const uint16_t *row = x + 2 * i * stride;
        const __m512i even = _mm512_maskz_loadu_epi16(2 * i < rows ? mask : 0, row),
                      odd = _mm512_maskz_loadu_epi16(2 * i + 1 < rows ? mask : 0, row + stride);
        r[i] = _mm512_permutexvar_epi16(order,
                                        _mm512_inserti64x4(even, _mm512_castsi512_si256(odd), 1));
    }
}
// Reads 16 rows of x(rows, cols), of which 32 columns are used.
TILES static inline void tile_read_rows(__m512i r[16], const uint16_t *x, int64_t stride,
                                        int64_t rows, int64_t cols) {
    const uint32_t mask = tile_mask(cols);
    for (int i = 0; i < 16; i++) {
        r[i] = _mm512_maskz_loadu_epi16(i < rows ? mask : 0, x + i * stride);
    }
}
// Packs a strip: for each 32 inner indices, two tiles of 16 outer ones, with zeros beyond the
// matrix. x is (outer, inner), or (inner, outer) if `inner_first`. A tile's rows are outer indices,
// or (`pairs`) pairs of inner ones.
TILES static inline void tile_pack(uint16_t *to, const uint16_t *x, int64_t stride, int64_t outer,
                                   int64_t inner, bool inner_first, bool pairs) {
    for (int64_t k = 0; k < inner; k += 32) {
        for (int64_t o = 0; o < TILE_STRIP; o += 16, to += 512) {
            __m512i r[16];
            if (inner_first) {
                tile_read_pairs(r, x + k * stride + o, stride, inner - k, outer - o);
            } else {
                tile_read_rows(r, x + o * stride + k, stride, outer - o, inner - k);
            }
            if (inner_first != pairs) { tile_turn(r); }
            for (int i = 0; i < 16; i++) { _mm512_store_si512((void *)(to + 32 * i), r[i]); }
        }
    }
}
// sums(32, 32) [+]= a strip of the left operand times one of the right one, with `steps` times 32
// inner indices. Rows of sums are `stride` bytes apart.
TILES static inline void tile_multiply(float *sums, int64_t stride, const uint16_t *a,
                                       const uint16_t *b, int64_t steps, bool add) {
    char *c[4] = {(char *)sums, (char *)(sums + 16), (char *)sums + 16 * stride,
                  (char *)(sums + 16) + 16 * stride};
    if (add) {
        _tile_loadd(0, c[0], stride);
        _tile_loadd(1, c[1], stride);
        _tile_loadd(2, c[2], stride);
        _tile_loadd(3, c[3], stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < steps; i++, a += 1024, b += 1024) {
        _tile_loadd(6, b, 64);
        _tile_loadd(4, a, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 512, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c[0], stride);
    _tile_stored(1, c[1], stride);
    _tile_stored(2, c[2], stride);
    _tile_stored(3, c[3], stride);
}
// The same where fewer than 32 rows or columns exist: by way of whole sums.
TILES static inline void tile_multiply_part(float *sums, int64_t stride, int64_t rows, int64_t cols,
                                            float *whole, const uint16_t *a, const uint16_t *b,
                                            int64_t steps, bool add) {
    for (int64_t i = 0; i < rows && add; i++) {
        memcpy(whole + i * TILE_STRIP, (char *)sums + i * stride, (size_t)cols * sizeof *sums);
    }
    tile_multiply(whole, TILE_STRIP * sizeof *whole, a, b, steps, add);
    for (int64_t i = 0; i < rows; i++) {
        memcpy((char *)sums + i * stride, whole + i * TILE_STRIP, (size_t)cols * sizeof *sums);
    }
}
// The columns of the result, strip by strip, for `rows` rows of it whose left operand is packed:
// `inner` inner indices from `first` on.
TILES static inline void tile_strips(const Product *p, int64_t row, int64_t rows, int64_t first,
                                     int64_t inner, uint16_t *block, bool add) {
    uint16_t *strip = block + TILE_BLOCK_ROWS * TILE_DEPTH;
    float *whole = (float *)(void *)(strip + TILE_STRIP * TILE_DEPTH);
    const int64_t steps = ceil_div(inner, 32), stride = p->ldc * (int64_t)sizeof(float);
    const bool turned = p->tb == TRANSPOSED;
    for (int64_t col = 0; col < p->n; col += TILE_STRIP) {
        const int64_t cols = min_i64(TILE_STRIP, p->n - col);
        tile_pack(strip,
                  (const uint16_t *)p->b + (turned ? col * p->ldb + first : first * p->ldb + col),
                  p->ldb, cols, inner, !turned, true);
        for (int64_t i = 0; i < rows; i += TILE_STRIP) {
            float *sums = p->c + (row + i) * p->ldc + col, *next = sums + TILE_STRIP * p->ldc;
            const uint16_t *a = block + i * steps * 32;
            // its rows are far apart, so the hardware does not (gradients of weights: 1.7 times)
            for (int64_t r = 0; r < TILE_STRIP; r++, next += p->ldc) {
                __builtin_prefetch(next, 1);
                __builtin_prefetch(next + 16, 1);
            }
            if (cols == TILE_STRIP && rows - i >= TILE_STRIP) {
                tile_multiply(sums, stride, a, strip, steps, add);
            } else {
                tile_multiply_part(sums, stride, min_i64(TILE_STRIP, rows - i), cols, whole, a,
                                   strip, steps, add);
            }
        }
    }
}
// Computes a product of bf16 operands; space: TILE_SPACE bytes of the calling thread, at a multiple
// of 64.
TILES static inline void gemm_by_tiles(const Product *p, void *space) {
    uint16_t *block = (uint16_t *)space;
    const bool turned = p->ta == TRANSPOSED;
    const int64_t depth = round_up(ceil_div(p->k, max_i64(1, ceil_div(p->k, TILE_DEPTH))), 32);
    tiles_begin();
    for (int64_t first = 0; first < p->k; first += depth) {
        const int64_t inner = min_i64(depth, p->k - first), steps = ceil_div(inner, 32);
        for (int64_t row = 0; row < p->m; row += TILE_BLOCK_ROWS) {
            const int64_t rows = min_i64(TILE_BLOCK_ROWS, p->m - row);
            for (int64_t i = 0; i < rows; i += TILE_STRIP) {
                const int64_t at = row + i;
                tile_pack(block + i * steps * 32,
                          (const uint16_t *)p->a +
                              (turned ? first * p->lda + at : at * p->lda + first),
                          p->lda, min_i64(TILE_STRIP, rows - i), inner, turned, false);
            }
            tile_strips(p, row, rows, first, inner, block, p->add || first > 0);
        }
    }
    _tile_release();
}
#else
static inline void gemm_by_tiles(const Product *p, void *space) {
    (void)p;
    (void)space;
}
#endif

#endif
