// gemm_tiles.h: products of bf16 matrices by the tiles of AMX (Intel Sapphire Rapids and later),
// for gemm_cpu.h. A tile is 16 rows of 64 bytes; an instruction multiplies two tiles of bf16 and
// adds the result to a tile of 16 x 16 fp32.
//
// Plan     Four tiles of sums, 32 x 32 elements of the result, take in the whole inner dimension,
//          32 indices at a time, from two tiles of each operand. Both operands are packed so that
//          these tiles lie one behind the other: the left one in blocks of rows, the right one in
//          groups of columns. Both stay in the L2 cache. A band, which is 32 rows of a block and a
//          group, is finished (bias, GELU, rounding) while it is in the L1 cache.
// Order    An element's terms are added in the order of the inner indices, 32 at a time, whatever
//          tile it is in.
// Waiting  Loads and products alternate, and memory is asked for before it is needed. Where another
//          program uses the tiles of the same core, that gives 1.3 to 1.5 times as many products.
#ifndef GEMM_TILES_H
#define GEMM_TILES_H

#include "ops/cpu/peak_cpu.h" // tiles_begin, TILES
#include "ops/cpu/real_cpu.h" // Product

#ifndef TILE_BLOCK // tests make all smaller
// Inner indices and elements (3/8 of an L2 cache of 2 MiB) of a packed block, at most.
#define TILE_BLOCK_DEPTH 768
#define TILE_BLOCK (768 * 512)
#define TILE_GROUP 128 // columns that are packed together
#endif
enum {
    TILE_STRIP = 32, // rows and columns of the result that a kernel computes
    // bytes of a thread: the packed block, a group of the right operand, and a band's sums
    TILE_SPACE = (TILE_BLOCK + TILE_GROUP * TILE_BLOCK_DEPTH) * 2 + TILE_STRIP * TILE_GROUP * 4
};
// Returns the rows of a block of so many inner indices.
static inline int64_t tile_block_rows(int64_t depth) {
    const int64_t rows = TILE_BLOCK / round_up(max_i64(1, depth), 32) / TILE_STRIP * TILE_STRIP;
    return max_i64(TILE_STRIP, rows);
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
// The order in which the lower and the upper 16 of 32 bf16 become pairs.
#define PAIRS_OF_HALVES                                                                            \
    _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,   \
                     21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0)
// Reads 16 pairs of rows of x(rows, cols), of which 16 columns are used: [pair] = the pairs of the
// columns.
TILES static inline __attribute__((always_inline)) void
tile_read_pairs(__m512i r[16], const uint16_t *x, int64_t stride, int64_t rows, int64_t cols) {
    const uint32_t mask = tile_mask(min_i64(cols, 16));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const uint16_t *row = x + 2 * i * stride;
        const __m512i even = _mm512_maskz_loadu_epi16(2 * i < rows ? mask : 0, row),
                      odd = _mm512_maskz_loadu_epi16(2 * i + 1 < rows ? mask : 0, row + stride);
        r[i] = _mm512_permutexvar_epi16(PAIRS_OF_HALVES,
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
// Asks for the line of each row of x that begins there.
static inline __attribute__((always_inline)) void
tile_prefetch_rows(const uint16_t *x, int64_t stride, const int rows) {
#pragma GCC unroll 32
    for (int i = 0; i < rows; i++) { __builtin_prefetch(x + i * stride); }
}
// Packs a matrix into strips of TILE_STRIP outer indices, which are `strip` elements apart, with
// zeros beyond the matrix: for each 32 inner indices, two tiles of 16 outer ones. x is (outer,
// inner), or (inner, outer) if `inner_first`. A tile's rows are outer indices, or (`pairs`) pairs
// of inner ones. Reads x in its order, and asks for its next rows. Callers pass constants for
// inner_first and pairs.
TILES static inline __attribute__((always_inline)) void
tile_pack_so(const bool inner_first, const bool pairs, uint16_t *to, int64_t strip,
             const uint16_t *x, int64_t stride, int64_t outer, int64_t inner) {
    const int64_t across = inner_first ? round_up(outer, TILE_STRIP) / 16 : ceil_div(inner, 32),
                  down = inner_first ? ceil_div(inner, 32) : round_up(outer, TILE_STRIP) / 16;
    for (int64_t i = 0; i < down; i++) {
        for (int64_t j = 0; j < across; j++) {
            const int64_t o = 16 * (inner_first ? j : i), k = 32 * (inner_first ? i : j);
            const uint16_t *from = x + (inner_first ? k * stride + o : o * stride + k);
            uint16_t *tile = to + o / TILE_STRIP * strip + k * TILE_STRIP + o % TILE_STRIP * 32;
            __m512i r[16];
            if (inner_first) {
                if (j % 2 == 0) { tile_prefetch_rows(from + 32 * stride, stride, 32); }
                tile_read_pairs(r, from, stride, inner - k, outer - o);
            } else {
                tile_prefetch_rows(from + 16 * stride, stride, 16);
                tile_read_rows(r, from, stride, outer - o, inner - k);
            }
            if (inner_first != pairs) { tile_turn(r); }
#pragma GCC unroll 16
            for (int l = 0; l < 16; l++) { _mm512_store_si512((void *)(tile + 32 * l), r[l]); }
        }
    }
}
TILES static inline void tile_pack(uint16_t *to, int64_t strip, const uint16_t *x, int64_t stride,
                                   int64_t outer, int64_t inner, bool inner_first, bool pairs) {
    if (inner_first && pairs) {
        tile_pack_so(true, true, to, strip, x, stride, outer, inner);
    } else if (inner_first) {
        tile_pack_so(true, false, to, strip, x, stride, outer, inner);
    } else if (pairs) {
        tile_pack_so(false, true, to, strip, x, stride, outer, inner);
    } else {
        tile_pack_so(false, false, to, strip, x, stride, outer, inner);
    }
}
// Asks for a packed tile.
static inline __attribute__((always_inline)) void tile_prefetch(const uint16_t *x) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) { __builtin_prefetch(x + 32 * i); }
}
// sums(32, 32), or zeros (!add), + a strip of the left operand times one of the right one, with
// `steps` times 32 inner indices. Rows of sums are `stride` bytes apart.
TILES static inline void tile_multiply(float *sums, int64_t stride, bool add, const uint16_t *a,
                                       const uint16_t *b, int64_t steps) {
    char *below = (char *)sums + 16 * stride;
    if (add) {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + 16, stride);
        _tile_loadd(2, below, stride);
        _tile_loadd(3, below + 64, stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + 512, 64);
    _tile_loadd(5, a + 512, 64);
    for (int64_t i = 1; i < steps; i++, a += 1024, b += 1024) {
        _tile_dpbf16ps(0, 4, 6);
        tile_prefetch(a + 2048);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(4, a + 1024, 64);
        tile_prefetch(a + 2560);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(6, b + 1024, 64);
        tile_prefetch(b + 2048);
        _tile_dpbf16ps(3, 5, 7);
        _tile_loadd(7, b + 1536, 64);
        _tile_loadd(5, a + 1536, 64);
        tile_prefetch(b + 2560);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + 16, stride);
    _tile_stored(2, below, stride);
    _tile_stored(3, below + 64, stride);
}
static inline void tile_copy(float *to, int64_t to_cols, const float *from, int64_t from_cols,
                             int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; i++) {
        memcpy(to + i * to_cols, from + i * from_cols, (size_t)cols * sizeof *to);
    }
}
// Memory that will be used: `rows` rows of `lines` cache lines, `stride` bytes apart.
typedef struct {
    const char *x;
    int64_t rows, lines, stride;
} TileMemory;
static inline TileMemory tile_memory(const void *x, int64_t rows, int64_t bytes, int64_t stride) {
    const TileMemory m = {(const char *)x, rows, ceil_div(bytes, 64), stride};
    return m;
}
// Asks for part i of n, to read it in the L2 cache, or to write it.
static inline void tile_prefetch_part(const TileMemory *m, int64_t i, int64_t n, bool write) {
    for (int64_t r = m->rows * i / n; r < m->rows * (i + 1) / n; r++) {
        const char *row = m->x + r * m->stride;
        for (int64_t l = 0; l < m->lines; l++) {
            if (write) {
                __builtin_prefetch(row + 64 * l, 1);
            } else {
                __builtin_prefetch(row + 64 * l, 0, 2);
            }
        }
    }
}
// A block of `rows` rows of the result from `row` on, and a group of `cols` columns from `col` on,
// with `steps` times 32 inner indices.
typedef struct {
    int64_t row, rows, col, cols, steps;
    uint16_t *left, *right; // the operands, packed
    float *sums; // (TILE_STRIP, TILE_GROUP): of a band, which is 32 rows of the block and the group
} TileBlock;
// Returns where columns of the right operand begin.
static inline const uint16_t *tile_columns(const Product *p, int64_t col) {
    return (const uint16_t *)p->b + (p->tb == TRANSPOSED ? col * p->ldb : col);
}
// Returns the group of the right operand that is packed next: of the same block, or the first one
// of the next block. After the last block it has no rows.
static inline TileMemory tile_next_group(const Product *p, const TileBlock *b) {
    const bool turned = p->tb == TRANSPOSED, across = b->col + b->cols < p->n,
               any = across || b->row + b->rows < p->m;
    const int64_t col = across ? b->col + b->cols : 0, cols = min_i64(TILE_GROUP, p->n - col),
                  rows = turned ? cols : p->k;
    return tile_memory(tile_columns(p, col), any ? rows : 0, 2 * (turned ? p->k : cols),
                       2 * p->ldb);
}
// Returns where the result is written after the band of row i of the block.
static inline TileMemory tile_next_band(const Product *p, const TileBlock *b, int64_t i) {
    const int64_t next = i + TILE_STRIP, rows = min_i64(TILE_STRIP, max_i64(0, b->rows - next));
    return tile_memory(p->c + (rows ? (b->row + next) * p->ldc + b->col : 0), rows, 4 * b->cols,
                       4 * p->ldc);
}
// Computes 32 x 32 elements of the result: rows from i of the block, columns from j of the group.
// Their sums are where the result is, or in b->sums if they will be finished, or where the result
// ends between.
TILES static inline void tile_multiply_block(const Product *p, const TileBlock *b, int64_t i,
                                             int64_t j) {
    const int64_t row = b->row + i, col = b->col + j, rows = min_i64(TILE_STRIP, p->m - row),
                  cols = min_i64(TILE_STRIP, p->n - col);
    const bool in_place = rows == TILE_STRIP && cols == TILE_STRIP && !p->finish;
    float *c = p->c + row * p->ldc + col, *sums = in_place ? c : b->sums + j;
    const int64_t stride = in_place ? p->ldc : (int64_t)TILE_GROUP;
    if (p->add && !in_place) { tile_copy(sums, stride, c, p->ldc, rows, cols); }
    tile_multiply(sums, stride * (int64_t)sizeof(float), p->add, b->left + i * b->steps * 32,
                  b->right + j * b->steps * 32, b->steps);
    if (!p->finish && !in_place) { tile_copy(c, p->ldc, sums, stride, rows, cols); }
}
// Computes the block's rows of the group's columns, band by band.
TILES static inline void tile_multiply_group(const Product *p, const TileBlock *b) {
    const int64_t parts = ceil_div(b->rows, TILE_STRIP) * ceil_div(b->cols, TILE_STRIP);
    const TileMemory group = tile_next_group(p, b);
    int64_t part = 0;
    for (int64_t i = 0; i < b->rows; i += TILE_STRIP) {
        const Tile band = {b->row + i, b->col, min_i64(TILE_STRIP, b->rows - i), b->cols};
        if (!p->finish) {
            const TileMemory next = tile_next_band(p, b, i);
            tile_prefetch_part(&next, 0, 1, true);
        } else if (p->finish->prefetch) {
            p->finish->prefetch(p->finish->what, band);
        }
        for (int64_t j = 0; j < b->cols; j += TILE_STRIP) {
            tile_prefetch_part(&group, part++, parts, false);
            tile_multiply_block(p, b, i, j);
        }
        if (p->finish) { p->finish->run(p->finish->what, band, b->sums, TILE_GROUP); }
    }
}
// Computes a product of bf16 operands with at most TILE_BLOCK_DEPTH inner indices; space:
// TILE_SPACE bytes of the calling thread, at a multiple of 64. What is finished (p->finish) is not
// written to c.
TILES static inline void gemm_by_tiles(const Product *p, void *space) {
    const bool turned = p->ta == TRANSPOSED;
    const int64_t most = tile_block_rows(p->k), steps = ceil_div(p->k, 32),
                  strip = TILE_STRIP * 32 * steps;
    TileBlock b = {.steps = steps, .left = (uint16_t *)space};
    b.right = b.left + TILE_BLOCK;
    b.sums = (float *)(void *)(b.right + TILE_GROUP * TILE_BLOCK_DEPTH);
    assert(p->k <= TILE_BLOCK_DEPTH);
    tiles_begin();
    for (b.row = 0; b.row < p->m; b.row += most) {
        b.rows = min_i64(most, p->m - b.row);
        tile_pack(b.left, strip, (const uint16_t *)p->a + (turned ? b.row : b.row * p->lda), p->lda,
                  b.rows, p->k, turned, false);
        for (b.col = 0; b.col < p->n; b.col += TILE_GROUP) {
            b.cols = min_i64(TILE_GROUP, p->n - b.col);
            tile_pack(b.right, strip, tile_columns(p, b.col), p->ldb, b.cols, p->k,
                      p->tb != TRANSPOSED, true);
            tile_multiply_group(p, &b);
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
