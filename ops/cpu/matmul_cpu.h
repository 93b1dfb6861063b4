// matmul_cpu.h: matrix products on the CPU, by tiles of the output (ops_cpu.h: Plan). The contract
// is ops.h.
#ifndef MATMUL_CPU_H
#define MATMUL_CPU_H

#include "ops/cpu/device_cpu.h" // the team, polling

// --- matmul: tiles of the output -----------------------------------------------------------------
#ifndef TILE_WORK // tests make it smaller
// Multiply-adds of a slice of a tile, about, after which messages are polled: 2 to 7 ms. Smaller
// tiles would be packed more often, which takes longer than messages lose (measured).
#define TILE_WORK 600000000
#endif
// Tiles have tile_rows x tile_cols elements; the last ones of each direction take what is left.
typedef struct {
    int64_t rows, cols, tile_rows, tile_cols, across, tiles; // across: tiles side by side
} Tiling;
typedef struct {
    int64_t row, col, rows, cols;
} Tile;
// No tile has fewer rows or columns, unless the whole output has: the library multiplies narrower
// matrices by other kernels, which add in another order.
enum { TILE_LEAST = 32 };
static inline int64_t tiles_along(int64_t length, int64_t tile) {
    return max_i64(1, (length + tile - TILE_LEAST) / tile);
}

// Returns the grid of tiles that takes the least time by a model that counts multiply-adds. The
// library packs its operands again for each tile. Packing an element costs about 40 multiply-adds
// for the left operand (tile_rows x depth) and about 24 for the right one (tile_cols x depth), as
// measured.
static inline Tiling tile_output(int64_t rows, int64_t cols, int64_t depth, int threads) {
    Tiling best = {rows, cols, rows, cols, 1, 0};
    double best_cost = 1e300;
    for (int64_t down = 1; down <= 64 && rows && cols && (down == 1 || rows / down >= TILE_LEAST);
         down++) {
        const int64_t r = round_up(ceil_div(rows, down), 16), rs = tiles_along(rows, r);
        for (int64_t across = 1; across <= 64 && (across == 1 || cols / across >= TILE_LEAST);
             across++) {
            const int64_t c = round_up(ceil_div(cols, across), 16), cs = tiles_along(cols, c);
            // late > 1: gemm_tile() cannot call progress often enough
            const double tile = (double)(r * c + 24 * r + 24 * c),
                         late = tile * (double)GEMM_DEPTH / (double)TILE_WORK;
            const double cost = tile * (double)ceil_div(rs * cs, threads) *
                                (depth >= GEMM_DEPTH && late > 1.0 ? late : 1.0);
            if (cost < best_cost) {
                const Tiling t = {rows, cols, r, c, cs, rs * cs};
                best_cost = cost;
                best = t;
            }
        }
    }
    return best;
}
static inline Tile tile_at(const Tiling *g, int64_t i) {
    const int64_t down = g->tiles / g->across, row = i / g->across, col = i % g->across;
    Tile t;
    t.row = row * g->tile_rows;
    t.col = col * g->tile_cols;
    t.rows = row + 1 < down ? g->tile_rows : g->rows - t.row;
    t.cols = col + 1 < g->across ? g->tile_cols : g->cols - t.col;
    return t;
}

static inline void ops_matmul_forward(Stream *s, Real *out, Real *gelu, const Real *in,
                                      const Real *weight, const Real *bias, int64_t N, int64_t C,
                                      int64_t OC) {
    const Tiling grid = tile_output(N, OC, C, s->threads);
    gemm_serial_once();
#pragma omp parallel num_threads(s->threads)
    {
        gemm_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            float *y = f32(out) + t.row * OC + t.col;
            for (int64_t n = 0; n < t.rows && bias; n++) {
                memcpy(y + n * OC, f32_const(bias) + t.col, (size_t)t.cols * sizeof(float));
            }
            gemm_tile(s, AS_STORED, TRANSPOSED, t.rows, t.cols, C, f32_const(in) + t.row * C, C,
                      f32_const(weight) + t.col * C, C, bias ? 1.0f : 0.0f, y, OC);
            for (int64_t n = 0; n < t.rows && gelu; n++) {
                const float *x = y + n * OC;
                float *g = f32(gelu) + (t.row + n) * OC + t.col;
#pragma omp simd
                for (int64_t c = 0; c < t.cols; c++) { g[c] = gelu_value(x[c]); }
            }
        }
    }
}

static inline void ops_matmul_backward_input(Stream *s, Real *din, const Real *dout,
                                             const Real *weight, const Real *pre_gelu, int64_t N,
                                             int64_t C, int64_t OC) {
    const Tiling grid = tile_output(N, C, OC, s->threads);
    gemm_serial_once();
#pragma omp parallel num_threads(s->threads)
    {
        gemm_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            float *dx = f32(din) + t.row * C + t.col;
            gemm_tile(s, AS_STORED, AS_STORED, t.rows, t.cols, OC, f32_const(dout) + t.row * OC, OC,
                      f32_const(weight) + t.col, C, 0.0f, dx, C);
            for (int64_t n = 0; n < t.rows && pre_gelu; n++) {
                float *d = dx + n * C;
                const float *x = f32_const(pre_gelu) + (t.row + n) * C + t.col;
#pragma omp simd
                for (int64_t c = 0; c < t.cols; c++) { d[c] *= gelu_slope(x[c]); }
            }
        }
    }
}

// sums(cols) [+]= column sums of x(rows, cols), whose rows are `stride` apart. Rows are added in
// order, four at a time.
static inline void column_sums(float *sums, const float *x, int64_t rows, int64_t cols,
                               int64_t stride, bool accumulate) {
    for (int64_t c = 0; c < cols && !accumulate; c++) { sums[c] = 0.0f; }
    int64_t n = 0;
    for (; n + 4 <= rows; n += 4) {
        const float *a = x + n * stride, *b = a + stride, *c = b + stride, *d = c + stride;
#pragma omp simd
        for (int64_t i = 0; i < cols; i++) { sums[i] += (a[i] + b[i]) + (c[i] + d[i]); }
    }
    for (; n < rows; n++) {
#pragma omp simd
        for (int64_t i = 0; i < cols; i++) { sums[i] += x[n * stride + i]; }
    }
}
static inline void ops_matmul_backward_weight(Stream *s, float *dweight, float *dbias,
                                              const Real *dout, const Real *in, int64_t N,
                                              int64_t C, int64_t OC, bool accumulate) {
    if (N == 0) { // an empty sum
        if (!accumulate) { ops_zero(s, dweight, (size_t)(OC * C) * sizeof(float)); }
        if (!accumulate && dbias) { ops_zero(s, dbias, (size_t)OC * sizeof(float)); }
        return;
    }
    const Tiling grid = tile_output(OC, C, N, s->threads);
    gemm_serial_once();
#pragma omp parallel num_threads(s->threads)
    {
        gemm_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            const float *dy = f32_const(dout) + t.row;
            // This also loads dout into the cache for sgemm.
            if (dbias && t.col == 0) { column_sums(dbias + t.row, dy, N, t.rows, OC, accumulate); }
            gemm_tile(s, TRANSPOSED, AS_STORED, t.rows, t.cols, N, dy, OC, f32_const(in) + t.col, C,
                      accumulate ? 1.0f : 0.0f, dweight + t.row * C + t.col, C);
        }
    }
}

static inline void ops_residual(Stream *s, Real *out, const Real *a, const Real *b, int64_t n) {
    float *y = f32(out);
    const float *x1 = f32_const(a), *x2 = f32_const(b);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < ceil_div(n, BLOCK); k++) {
#pragma omp simd
        for (int64_t i = k * BLOCK; i < min_i64(n, (k + 1) * BLOCK); i++) { y[i] = x1[i] + x2[i]; }
        poll_after_block(s, k);
    }
}

#endif
