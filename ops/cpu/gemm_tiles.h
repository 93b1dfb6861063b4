// gemm_tiles.h: products of bf16 matrices by the tiles of AMX (Intel Sapphire Rapids and later),
// for gemm_cpu.h. A tile is 16 rows of 64 bytes; an instruction multiplies two tiles of bf16 and
// adds the result to a tile of 16 x 16 fp32.
//
// Plan     Four tiles of sums, 32 x 32 elements of the result, take in the whole inner dimension,
//          32 indices at a time, from two tiles of each operand. Both operands are packed so that
//          these tiles lie one behind the other: the left one in blocks that stay in the L2 cache,
//          the right one in groups of columns. A strip of the result is finished (bias, GELU,
//          rounding) while it is in the L2 cache.
// Order    An element's terms are added in the order of the inner indices, whatever tile it is in.
// Waiting  Loads and products alternate, and memory is asked for before it is needed. Where another
//          program uses the tiles of the same core, that is a third of the time.
#ifndef GEMM_TILES_H
#define GEMM_TILES_H

#include "ops/cpu/peak_cpu.h" // tiles_begin, TILES
#include "ops/cpu/real_cpu.h" // Product

#ifndef TILE_BLOCK // tests make all smaller
// Inner indices, elements (3/8 of an L2 cache of 2 MiB) and rows of a packed block, at most.
#define TILE_BLOCK_DEPTH 768
#define TILE_BLOCK (768 * 512)
#define TILE_BLOCK_ROWS 1024
#define TILE_GROUP 128 // columns that are packed together
#endif
enum {
    TILE_STRIP = 32, // rows and columns of the result that a kernel computes
    // bytes of a thread: the packed block, a group of the right operand, and a strip's sums
    TILE_SPACE = (TILE_BLOCK + TILE_GROUP * TILE_BLOCK_DEPTH) * 2 + TILE_BLOCK_ROWS * TILE_STRIP * 4
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
// Lines of the caches that a part of a matrix begins in: `rows` rows of `lines` lines, `stride`
// bytes apart.
typedef struct {
    const char *x;
    int64_t rows, lines, stride;
} TileSource;
// Asks for part i of n.
static inline void tile_prefetch_part(const TileSource *s, int64_t i, int64_t n) {
    for (int64_t r = s->rows * i / n; r < s->rows * (i + 1) / n; r++) {
        for (int64_t l = 0; l < s->lines; l++) {
            __builtin_prefetch(s->x + r * s->stride + 64 * l, 0, 2);
        }
    }
}
// A part of an operand, packed: `outer` rows of the left one or columns of the right one.
typedef struct {
    int64_t outer, steps; // steps: times 32 inner indices
    uint16_t *packed;
} TilePacked;
static inline const uint16_t *tile_packed(const TilePacked *t, int64_t outer) {
    return t->packed + outer * t->steps * 32;
}
// A block of rows of the result from `row` on, and a group of its columns from `col` on.
typedef struct {
    int64_t row, col;
    TilePacked left, right;
    float *sums; // (rows, TILE_STRIP): of a strip
} TileBlock;
// Returns where columns of the right operand begin.
static inline const uint16_t *tile_columns(const Product *p, int64_t col) {
    return (const uint16_t *)p->b + (p->tb == TRANSPOSED ? col * p->ldb : col);
}
static inline TileSource tile_next(const Product *p, int64_t col) {
    const bool turned = p->tb == TRANSPOSED;
    const int64_t next = col + TILE_GROUP < p->n ? col + TILE_GROUP : 0,
                  cols = min_i64(TILE_GROUP, p->n - next);
    const TileSource s = {(const char *)tile_columns(p, next), turned ? cols : p->k,
                          ceil_div((turned ? p->k : cols) * 2, 64), p->ldb * 2};
    return s;
}
// Computes 32 x 32 elements of the result: rows from i of the block, columns from j of the group.
// Their sums are where the result is, or in b->sums if they will be finished, or where the result
// ends between.
TILES static inline void tile_multiply_block(const Product *p, const TileBlock *b, int64_t i,
                                             int64_t j) {
    const int64_t row = b->row + i, col = b->col + j, ldc = p->ldc,
                  rows = min_i64(TILE_STRIP, p->m - row), cols = min_i64(TILE_STRIP, p->n - col),
                  near = TILE_STRIP * (int64_t)sizeof(float), far = ldc * (int64_t)sizeof(float);
    const bool whole = rows == TILE_STRIP && cols == TILE_STRIP;
    float *sums = b->sums + i * TILE_STRIP;
    if (p->finish) {
        const Tile below = {row + TILE_STRIP, col, min_i64(TILE_STRIP, p->m - row - TILE_STRIP),
                            cols};
        if (p->finish->prefetch && below.rows > 0) { p->finish->prefetch(p->finish->what, below); }
        tile_multiply(sums, near, false, tile_packed(&b->left, i), tile_packed(&b->right, j),
                      b->left.steps);
        return;
    }
    float *c = p->c + row * ldc + col, *next = c + TILE_STRIP * ldc;
    // its rows are far apart, so the hardware does not (gradients of weights: 1.7 times)
    for (int64_t r = 0; r < TILE_STRIP && whole; r++, next += ldc) {
        __builtin_prefetch(next, 1);
        __builtin_prefetch(next + 16, 1);
    }
    if (p->add && !whole) { tile_copy(sums, TILE_STRIP, c, ldc, rows, cols); }
    tile_multiply(whole ? c : sums, whole ? far : near, p->add, tile_packed(&b->left, i),
                  tile_packed(&b->right, j), b->left.steps);
    if (!whole) { tile_copy(c, ldc, sums, TILE_STRIP, rows, cols); }
}
// Computes the block's rows of the group's columns, strip by strip.
TILES static inline void tile_multiply_group(const Product *p, const TileBlock *b) {
    const TileSource next = tile_next(p, b->col);
    const int64_t down = ceil_div(b->left.outer, TILE_STRIP), cols = b->right.outer,
                  parts = ceil_div(cols, TILE_STRIP) * down;
    for (int64_t j = 0, part = 0; j < cols; j += TILE_STRIP) {
        for (int64_t i = 0; i < b->left.outer; i += TILE_STRIP) {
            tile_prefetch_part(&next, part++, parts);
            tile_multiply_block(p, b, i, j);
        }
        if (p->finish) {
            const Tile strip = {b->row, b->col + j, b->left.outer, min_i64(TILE_STRIP, cols - j)};
            p->finish->run(p->finish->what, strip, b->sums, TILE_STRIP);
        }
    }
}
// Computes a product of bf16 operands with at most TILE_BLOCK_DEPTH inner indices; space:
// TILE_SPACE bytes of the calling thread, at a multiple of 64. What is finished (p->finish) is not
// written to c.
TILES static inline void gemm_by_tiles(const Product *p, void *space) {
    const bool turned = p->ta == TRANSPOSED;
    const int64_t most = tile_block_rows(p->k), steps = ceil_div(p->k, 32);
    uint16_t *packed = (uint16_t *)space, *group = packed + TILE_BLOCK;
    TileBlock b = {.left = {0, steps, packed}, .right = {0, steps, group}};
    b.sums = (float *)(void *)(group + TILE_GROUP * TILE_BLOCK_DEPTH);
    assert(p->k <= TILE_BLOCK_DEPTH);
    tiles_begin();
    for (b.row = 0; b.row < p->m; b.row += most) {
        b.left.outer = min_i64(most, p->m - b.row);
        tile_pack(packed, steps * 1024, (const uint16_t *)p->a + (turned ? b.row : b.row * p->lda),
                  p->lda, b.left.outer, p->k, turned, false);
        for (b.col = 0; b.col < p->n; b.col += TILE_GROUP) {
            b.right.outer = min_i64(TILE_GROUP, p->n - b.col);
            tile_pack(group, steps * 1024, tile_columns(p, b.col), p->ldb, b.right.outer, p->k,
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
