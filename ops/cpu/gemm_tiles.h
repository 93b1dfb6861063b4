// gemm_tiles.h: products of bf16 matrices by the tiles of AMX (Intel Sapphire Rapids and later),
// for gemm_cpu.h. A tile is 16 rows of 64 bytes; an instruction multiplies two tiles of bf16 and
// adds the result to a tile of 16 x 16 fp32.
//
// Plan     Four tiles of sums, 32 x 32 elements of the result, take in the inner dimension 32
//          indices at a time, from two tiles of each operand. Both operands are packed so that
//          these tiles lie one behind the other: the left one in blocks that stay in the L2 cache,
//          the right one in strips of 32 columns that stay in the L1 cache. A strip has a slice of
//          a block's inner indices. Between slices its sums stay in the L2 cache, too, and a strip
//          of the result is finished (bias, GELU, rounding) while it is there.
// Order    An element's terms are added in the order of the inner indices, whatever tile it is in.
#ifndef GEMM_TILES_H
#define GEMM_TILES_H

#include "ops/cpu/peak_cpu.h" // tiles_begin, TILES
#include "ops/cpu/real_cpu.h" // Product

#ifndef TILE_DEPTH // tests make all smaller
// Inner indices of a slice, of which a strip takes a third of an L1 cache; inner indices and
// elements of a packed block, at most (3/8 of an L2 cache of 2 MiB); and its rows.
#define TILE_DEPTH 256
#define TILE_BLOCK_DEPTH 768
#define TILE_BLOCK (768 * 512)
#define TILE_BLOCK_ROWS 1024
#endif
enum {
    TILE_STRIP = 32, // rows and columns of the result that a kernel computes
    // bytes of a thread: the packed block, a strip of the right operand, and a strip's sums
    TILE_SPACE = (TILE_BLOCK + TILE_STRIP * TILE_DEPTH) * 2 + TILE_BLOCK_ROWS * TILE_STRIP * 4
};
// Returns the rows of a block of so many inner indices.
static inline int64_t tile_block_rows(int64_t depth) {
    const int64_t rows = TILE_BLOCK / round_up(max_i64(1, depth), 32) / TILE_STRIP * TILE_STRIP;
    return min_i64(TILE_BLOCK_ROWS, max_i64(TILE_STRIP, rows));
}

#ifdef __x86_64__
// Returns a mask of the first n of 32 numbers.
static inline uint32_t tile_mask(int64_t n) {
    return n >= 32 ? UINT32_MAX : n <= 0 ? 0 : (1u << n) - 1;
}
// Turns a square of 16 x 16 pairs of bf16.
TILES static inline __attribute__((always_inline)) void tile_turn(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}
// Reads 16 pairs of rows of x(rows, cols), of which 16 columns are used: [pair] = the pairs of the
// columns.
TILES static inline __attribute__((always_inline)) void
tile_read_pairs(__m512i r[16], const uint16_t *x, int64_t stride, int64_t rows, int64_t cols) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const uint32_t mask = tile_mask(min_i64(cols, 16));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const uint16_t *row = x + 2 * i * stride;
        const __m512i even = _mm512_maskz_loadu_epi16(2 * i < rows ? mask : 0, row),
                      odd = _mm512_maskz_loadu_epi16(2 * i + 1 < rows ? mask : 0, row + stride);
        r[i] = _mm512_permutexvar_epi16(order,
                                        _mm512_inserti64x4(even, _mm512_castsi512_si256(odd), 1));
    }
}
// Reads 16 rows of x(rows, cols), of which 32 columns are used.
TILES static inline __attribute__((always_inline)) void
tile_read_rows(__m512i r[16], const uint16_t *x, int64_t stride, int64_t rows, int64_t cols) {
    const uint32_t mask = tile_mask(cols);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        r[i] = _mm512_maskz_loadu_epi16(i < rows ? mask : 0, x + i * stride);
    }
}
// Packs a strip: for each 32 inner indices, two tiles of 16 outer ones, with zeros beyond the
// matrix. x is (outer, inner), or (inner, outer) if `inner_first`. A tile's rows are outer indices,
// or (`pairs`) pairs of inner ones. Callers pass constants for these two.
TILES static inline __attribute__((always_inline)) void
tile_pack_so(const bool inner_first, const bool pairs, uint16_t *to, const uint16_t *x,
             int64_t stride, int64_t outer, int64_t inner) {
    for (int64_t k = 0; k < inner; k += 32) {
        for (int64_t o = 0; o < TILE_STRIP; o += 16, to += 512) {
            __m512i r[16];
            if (inner_first) {
                tile_read_pairs(r, x + k * stride + o, stride, inner - k, outer - o);
            } else {
                tile_read_rows(r, x + o * stride + k, stride, outer - o, inner - k);
            }
            if (inner_first != pairs) { tile_turn(r); }
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) { _mm512_store_si512((void *)(to + 32 * i), r[i]); }
        }
    }
}
TILES static inline void tile_pack(uint16_t *to, const uint16_t *x, int64_t stride, int64_t outer,
                                   int64_t inner, bool inner_first, bool pairs) {
    if (inner_first && pairs) {
        tile_pack_so(true, true, to, x, stride, outer, inner);
    } else if (inner_first) {
        tile_pack_so(true, false, to, x, stride, outer, inner);
    } else if (pairs) {
        tile_pack_so(false, true, to, x, stride, outer, inner);
    } else {
        tile_pack_so(false, false, to, x, stride, outer, inner);
    }
}
// to(32, 32) = from, or zeros (NULL), + a strip of the left operand times one of the right one,
// with `steps` times 32 inner indices. Rows are from_stride and to_stride bytes apart.
TILES static inline void tile_multiply(const float *from, int64_t from_stride, float *to,
                                       int64_t to_stride, const uint16_t *a, const uint16_t *b,
                                       int64_t steps) {
    if (from) {
        const char *below = (const char *)from + 16 * from_stride;
        _tile_loadd(0, from, from_stride);
        _tile_loadd(1, from + 16, from_stride);
        _tile_loadd(2, below, from_stride);
        _tile_loadd(3, below + 64, from_stride);
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
    char *below = (char *)to + 16 * to_stride;
    _tile_stored(0, to, to_stride);
    _tile_stored(1, to + 16, to_stride);
    _tile_stored(2, below, to_stride);
    _tile_stored(3, below + 64, to_stride);
}
static inline void tile_copy(float *to, int64_t to_cols, const float *from, int64_t from_cols,
                             int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; i++) {
        memcpy(to + i * to_cols, from + i * from_cols, (size_t)cols * sizeof *to);
    }
}
// A block of the left operand: `rows` rows of the result from `row` on, all `inner` inner indices,
// which are packed in `slices` slices of `depth` indices (the last one of fewer).
typedef struct {
    int64_t row, rows, inner, depth, slices;
    uint16_t *packed, *strip;
    float *sums; // (rows, TILE_STRIP): of a strip
} TileBlock;
// Returns slice k's inner indices.
static inline int64_t tile_slice(const TileBlock *b, int64_t k) {
    return min_i64(b->depth, b->inner - k * b->depth);
}
static inline uint16_t *tile_packed(const TileBlock *b, int64_t k, int64_t row) {
    return b->packed + k * b->depth * round_up(b->rows, TILE_STRIP) +
           row * round_up(tile_slice(b, k), 32);
}
TILES static inline void tile_pack_left(const Product *p, const TileBlock *b) {
    const bool turned = p->ta == TRANSPOSED;
    for (int64_t k = 0; k < b->slices; k++) {
        for (int64_t i = 0; i < b->rows; i += TILE_STRIP) {
            const int64_t row = b->row + i, inner = k * b->depth;
            tile_pack(tile_packed(b, k, i),
                      (const uint16_t *)p->a +
                          (turned ? inner * p->lda + row : row * p->lda + inner),
                      p->lda, min_i64(TILE_STRIP, b->rows - i), tile_slice(b, k), turned, false);
        }
    }
}
// Multiplies slice k of a block by a packed strip of `cols` columns from `col` on.
TILES static inline void tile_multiply_slice(const Product *p, const TileBlock *b, int64_t k,
                                             int64_t col, int64_t cols) {
    const bool first = k == 0, add = p->add, last = k + 1 == b->slices && !p->finish;
    const int64_t steps = ceil_div(tile_slice(b, k), 32), ldc = p->ldc,
                  near = TILE_STRIP * (int64_t)sizeof(float), far = ldc * (int64_t)sizeof(float);
    for (int64_t i = 0; i < b->rows; i += TILE_STRIP) {
        const int64_t rows = min_i64(TILE_STRIP, b->rows - i);
        const bool whole = rows == TILE_STRIP && cols == TILE_STRIP, reads = first && add && whole,
                   writes = last && whole;
        float *sums = b->sums + i * TILE_STRIP, *c = p->c + (b->row + i) * ldc + col,
              *next = c + TILE_STRIP * ldc;
        // its rows are far apart, so the hardware does not (gradients of weights: 1.7 times)
        for (int64_t r = 0; r < TILE_STRIP && (reads || writes); r++, next += ldc) {
            __builtin_prefetch(next, 1);
            __builtin_prefetch(next + 16, 1);
        }
        if (first && add && !whole) { tile_copy(sums, TILE_STRIP, c, ldc, rows, cols); }
        tile_multiply(first && !add ? NULL
                      : reads       ? c
                                    : sums,
                      reads ? far : near, writes ? c : sums, writes ? far : near,
                      tile_packed(b, k, i), b->strip, steps);
        if (last && !whole) { tile_copy(c, ldc, sums, TILE_STRIP, rows, cols); }
    }
}
// Computes a product of bf16 operands with at most TILE_BLOCK_DEPTH inner indices; space:
// TILE_SPACE bytes of the calling thread, at a multiple of 64. What is finished (p->finish) is not
// written to c.
TILES static inline void gemm_by_tiles(const Product *p, void *space) {
    const bool turned = p->tb == TRANSPOSED;
    const int64_t most = tile_block_rows(p->k);
    TileBlock b = {.inner = p->k, .packed = (uint16_t *)space};
    b.depth = round_up(ceil_div(p->k, ceil_div(p->k, TILE_DEPTH)), 32);
    b.slices = ceil_div(p->k, b.depth);
    b.strip = b.packed + TILE_BLOCK;
    b.sums = (float *)(void *)(b.strip + TILE_STRIP * TILE_DEPTH);
    assert(p->k <= TILE_BLOCK_DEPTH);
    tiles_begin();
    for (b.row = 0; b.row < p->m; b.row += most) {
        b.rows = min_i64(most, p->m - b.row);
        tile_pack_left(p, &b);
        for (int64_t col = 0; col < p->n; col += TILE_STRIP) {
            const int64_t cols = min_i64(TILE_STRIP, p->n - col);
            for (int64_t k = 0; k < b.slices; k++) {
                const int64_t at = k * b.depth;
                tile_pack(b.strip,
                          (const uint16_t *)p->b + (turned ? col * p->ldb + at : at * p->ldb + col),
                          p->ldb, cols, tile_slice(&b, k), !turned, true);
                tile_multiply_slice(p, &b, k, col, cols);
            }
            if (p->finish) {
                const Tile part = {b.row, col, b.rows, cols};
                p->finish->run(p->finish->what, part, b.sums, TILE_STRIP);
            }
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
