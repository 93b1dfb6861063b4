// matmul_cpu.h: matrix products on the CPU, by tiles of the output (ops_cpu.h: Plan). The contract
// is ops.h.
#ifndef MATMUL_CPU_H
#define MATMUL_CPU_H

#include "ops/cpu/device_cpu.h" // the team, polling

// --- matmul: tiles of the output -----------------------------------------------------------------
typedef struct {
    int64_t rows, cols, tile_rows, tile_cols, across, tiles;
} Tiling;
typedef struct {
    int64_t row, col, rows, cols;
} Tile;

// Returns the grid of tiles that takes the least time by a model that counts multiply-adds. sgemm
// packs its operands again for each tile. Packing an element costs about 40 multiply-adds for the
// left operand (tile_rows x depth) and about 24 for the right one (tile_cols x depth), as measured.
static inline Tiling tile_output(int64_t rows, int64_t cols, int64_t depth, int threads) {
    Tiling best = {rows, cols, rows, cols, 1, 0};
    double best_cost = 1e300;
    for (int64_t down = 1; down <= 64 && rows && cols && (down == 1 || rows / down >= 32); down++) {
        const int64_t r = round_up(ceil_div(rows, down), 16);
        for (int64_t across = 1; across <= 64 && (across == 1 || cols / across >= 32); across++) {
            const int64_t c = round_up(ceil_div(cols, across), 16),
                          tiles = ceil_div(rows, r) * ceil_div(cols, c);
            // late > 1: sgemm_tile() cannot call progress often enough
            const double tile = (double)(r * c + 40 * r + 24 * c),
                         late = tile * 256.0 / (double)POLL_WORK;
            const double cost =
                tile * (double)ceil_div(tiles, threads) * (depth >= 256 && late > 1.0 ? late : 1.0);
            if (cost < best_cost) {
                const Tiling t = {rows, cols, r, c, ceil_div(cols, c), tiles};
                best_cost = cost;
                best = t;
            }
        }
    }
    return best;
}
static inline Tile tile_at(const Tiling *g, int64_t i) {
    Tile t;
    t.row = i / g->across * g->tile_rows;
    t.col = i % g->across * g->tile_cols;
    t.rows = min_i64(g->tile_rows, g->rows - t.row);
    t.cols = min_i64(g->tile_cols, g->cols - t.col);
    return t;
}

// c(m, n) = beta c + a b. The product is cut along the inner dimension, so that messages are polled
// often enough. sgemm itself works in slices of 200 to 400, so slices of at least 256 cost nothing
// (measured).
static inline void sgemm_tile(Stream *s, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int64_t m,
                              int64_t n, int64_t k, const float *a, int64_t lda, const float *b,
                              int64_t ldb, float beta, float *c, int64_t ldc) {
    const int64_t slices = max_i64(1, min_i64(ceil_div(m * n * k, POLL_WORK), k / 256)),
                  slice = round_up(ceil_div(k, slices), 32);
    for (int64_t i = 0; i < k; i += slice) {
        cblas_sgemm(CblasRowMajor, ta, tb, (int)m, (int)n, (int)min_i64(slice, k - i), 1.0f,
                    a + (ta == CblasTrans ? i * lda : i), (int)lda,
                    b + (tb == CblasTrans ? i : i * ldb), (int)ldb, i ? 1.0f : beta, c, (int)ldc);
        poll_messages(s);
    }
}

static inline void ops_matmul_forward(Stream *s, Real *out, Real *gelu, const Real *in,
                                      const Real *weight, const Real *bias, int64_t N, int64_t C,
                                      int64_t OC) {
    const Tiling grid = tile_output(N, OC, C, s->threads);
    blas_serial_once();
#pragma omp parallel num_threads(s->threads)
    {
        blas_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            float *y = f32(out) + t.row * OC + t.col;
            for (int64_t n = 0; n < t.rows && bias; n++) {
                memcpy(y + n * OC, f32_const(bias) + t.col, (size_t)t.cols * sizeof(float));
            }
            sgemm_tile(s, CblasNoTrans, CblasTrans, t.rows, t.cols, C, f32_const(in) + t.row * C, C,
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
    blas_serial_once();
#pragma omp parallel num_threads(s->threads)
    {
        blas_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            float *dx = f32(din) + t.row * C + t.col;
            sgemm_tile(s, CblasNoTrans, CblasNoTrans, t.rows, t.cols, OC,
                       f32_const(dout) + t.row * OC, OC, f32_const(weight) + t.col, C, 0.0f, dx, C);
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
    blas_serial_once();
#pragma omp parallel num_threads(s->threads)
    {
        blas_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            const float *dy = f32_const(dout) + t.row;
            // This also loads dout into the cache for sgemm.
            if (dbias && t.col == 0) { column_sums(dbias + t.row, dy, N, t.rows, OC, accumulate); }
            sgemm_tile(s, CblasTrans, CblasNoTrans, t.rows, t.cols, N, dy, OC,
                       f32_const(in) + t.col, C, accumulate ? 1.0f : 0.0f,
                       dweight + t.row * C + t.col, C);
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
