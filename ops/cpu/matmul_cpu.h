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
// No tile has fewer rows or columns, unless the whole output has: the library multiplies narrower
// matrices by other kernels, which add in another order.
enum { TILE_LEAST = 32 };
static inline int64_t tiles_along(int64_t length, int64_t tile) {
    return max_i64(1, (length + tile - TILE_LEAST) / tile);
}

// Returns the grid of tiles that takes the least time by a model that counts multiply-adds. The
// library packs its operands again for each tile. Packing an element costs about 40 multiply-adds
// for the left operand (tile_rows x depth) and about 24 for the right one (tile_cols x depth), as
// measured; of own tiles about 100, since they multiply faster.
// most: elements of a tile, at most.
static inline Tiling tile_output(int64_t rows, int64_t cols, int64_t depth, int threads,
                                 int64_t most) {
    enum { TRIED = 64 }; // cuts of each direction
    Tiling best = {rows, cols, rows, cols, 1, 0};
    const int64_t packing = gemm_uses_tiles() ? 100 : 24;
    double best_cost = 1e300;
    if (rows == 0 || cols == 0) { return best; }
    // A tile of so many rows is small enough that a column fits beside it, also with its rows
    // rounded up to 16: most / (r + TILE_LEAST) > 2 * TILE_LEAST below.
    const int64_t first_down = ceil_div(rows, most / (2 * TILE_LEAST) - 3 * TILE_LEAST);
    for (int64_t down = first_down; down < first_down + TRIED; down++) {
        if (down > 1 && rows / down < TILE_LEAST) { break; }
        const int64_t r = round_up(ceil_div(rows, down), 16), rs = tiles_along(rows, r),
                      first = ceil_div(cols, most / (r + TILE_LEAST) - 2 * TILE_LEAST);
        for (int64_t across = first; across < first + TRIED; across++) {
            if (across > first && cols / across < TILE_LEAST) { break; }
            const int64_t c = round_up(ceil_div(cols, across), 16), cs = tiles_along(cols, c);
            // late > 1: gemm_tile() cannot call progress often enough
            const double tile = (double)(r * c + packing * (r + c)),
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

// A product of Reals in bf16 has its sums in a thread's buffer until they are rounded, unless
// bands of them are. In fp32 they are where the output is.
static inline int64_t rounded_tile(int64_t depth) {
    return cpu_real == DTYPE_FP32 || gemm_finishes_bands(depth) ? INT64_MAX : gemm_sums();
}
static inline float *tile_sums(const Stream *s, Real *out, int64_t cols, Tile t, int64_t *stride) {
    *stride = cpu_real == DTYPE_FP32 ? cols : t.cols;
    return cpu_real == DTYPE_FP32 ? (float *)real_at(out, t.row * cols + t.col)
                                  : gemm_thread_space(s);
}
// Finishes a row of an output: the bias, GELU, and rounding to bf16.
TYPED void finish_forward(const DType type, Real *out, Real *gelu, const Real *bias, float *sums,
                          int64_t n) {
    if (bias) {
#pragma omp simd
        for (int64_t c = 0; c < n; c++) { sums[c] += load_real(type, bias, c); }
    }
    if (type == DTYPE_BF16) { store_part(type, out, sums, n); }
    if (gelu) {
#pragma omp simd
        for (int64_t c = 0; c < n; c++) { store_real(type, gelu, c, gelu_value(sums[c])); }
    }
}
// Where sums of a forward product go: out and gelu, which may be NULL, have rows of `cols`
// elements.
typedef struct {
    Real *out, *gelu;
    const Real *bias; // or NULL
    int64_t cols;
} ForwardOutput;
static inline void finish_forward_rows(const void *what, Tile t, float *sums, int64_t stride) {
    const ForwardOutput *to = (const ForwardOutput *)what;
    const Real *bias = to->bias ? real_at_const(to->bias, t.col) : NULL;
    for (int64_t n = 0; n < t.rows; n++, sums += stride) {
        const int64_t at = (t.row + n) * to->cols + t.col;
        FOR_TYPE(finish_forward, real_at(to->out, at), to->gelu ? real_at(to->gelu, at) : NULL,
                 bias, sums, t.cols);
    }
}
static inline void ops_matmul_forward(Stream *s, Real *out, Real *gelu, const Real *in,
                                      const Real *weight, const Real *bias, int64_t N, int64_t C,
                                      int64_t OC) {
    const Tiling grid = tile_output(N, OC, C, s->threads, rounded_tile(C));
#pragma omp parallel num_threads(s->threads)
    {
        gemm_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            const int64_t at = t.row * OC + t.col;
            int64_t stride;
            float *y = tile_sums(s, out, OC, t, &stride);
            const ForwardOutput to = {real_at(out, at), gelu ? real_at(gelu, at) : NULL,
                                      bias ? real_at_const(bias, t.col) : NULL, OC};
            const Finish finish = {finish_forward_rows, NULL, &to};
            gemm_finished(s, TRANSPOSED, t, C, real_at_const(in, t.row * C), C,
                          real_at_const(weight, t.col * C), C, y, stride, finish);
        }
    }
}

// --- one row: a vector ---------------------------------------------------------------------------
// A product with one row reads each weight once, so memory is the limit. A library packs the matrix
// first, or runs in one thread.
enum { VECTOR_ROWS = 4, VECTOR_BLOCK = 16 }; // rows of weights at once; of a piece of work
// sums(VECTOR_ROWS) = rows of weight(VECTOR_ROWS, C) times x(C)
TYPED void vector_rows(const DType type, float *sums, const Real *weight, const Real *x,
                       int64_t C) {
    const Real *w[VECTOR_ROWS];
    for (int r = 0; r < VECTOR_ROWS; r++) { w[r] = real_at_const(weight, r * C); }
    float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
#pragma omp simd reduction(+ : a, b, c, d)
    for (int64_t i = 0; i < C; i++) {
        const float value = load_real(type, x, i);
        a += value * load_real(type, w[0], i);
        b += value * load_real(type, w[1], i);
        c += value * load_real(type, w[2], i);
        d += value * load_real(type, w[3], i);
    }
    sums[0] = a;
    sums[1] = b;
    sums[2] = c;
    sums[3] = d;
}
TYPED void vector_row(const DType type, float *sum, const Real *weight, const Real *x, int64_t C) {
    float a = 0.0f;
#pragma omp simd reduction(+ : a)
    for (int64_t i = 0; i < C; i++) { a += load_real(type, x, i) * load_real(type, weight, i); }
    *sum = a;
}
static inline void ops_vector_forward(Stream *s, Real *out, Real *gelu, const Real *in,
                                      const Real *weight, const Real *bias, int64_t C, int64_t OC) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t block = 0; block < ceil_div(OC, VECTOR_BLOCK); block++) {
        const int64_t first = block * VECTOR_BLOCK, n = min_i64(VECTOR_BLOCK, OC - first);
        float rounded[VECTOR_BLOCK];
        float *y = cpu_real == DTYPE_FP32 ? (float *)real_at(out, first) : rounded;
        int64_t r = 0;
        for (; r + VECTOR_ROWS <= n; r += VECTOR_ROWS) {
            FOR_TYPE(vector_rows, y + r, real_at_const(weight, (first + r) * C), in, C);
        }
        for (; r < n; r++) {
            FOR_TYPE(vector_row, y + r, real_at_const(weight, (first + r) * C), in, C);
        }
        FOR_TYPE(finish_forward, real_at(out, first), gelu ? real_at(gelu, first) : NULL,
                 bias ? real_at_const(bias, first) : NULL, y, n);
        poll_after_wide_row(s, block, VECTOR_BLOCK * C);
    }
}

TYPED void finish_input(const DType type, Real *din, const Real *pre_gelu, const float *sums,
                        int64_t n) {
    if (pre_gelu) {
#pragma omp simd
        for (int64_t c = 0; c < n; c++) {
            store_real(type, din, c, sums[c] * gelu_slope(load_real(type, pre_gelu, c)));
        }
    } else if (type == DTYPE_BF16) {
        store_part(type, din, sums, n);
    }
}
// Where sums of an input gradient go: rows of `cols` elements. pre_gelu may be NULL.
typedef struct {
    Real *din;
    const Real *pre_gelu;
    int64_t cols;
} InputGradient;
static inline void finish_input_rows(const void *what, Tile t, float *sums, int64_t stride) {
    const InputGradient *to = (const InputGradient *)what;
    for (int64_t n = 0; n < t.rows; n++, sums += stride) {
        const int64_t at = (t.row + n) * to->cols + t.col;
        FOR_TYPE(finish_input, real_at(to->din, at),
                 to->pre_gelu ? real_at_const(to->pre_gelu, at) : NULL, sums, t.cols);
    }
}
static inline void prefetch_input_rows(const void *what, Tile t) {
    const InputGradient *to = (const InputGradient *)what;
    for (int64_t n = t.row; n < t.row + t.rows; n++) {
        const int64_t at = n * to->cols + t.col;
        prefetch_reals(real_at_const(to->pre_gelu, at), t.cols);
    }
}
static inline void ops_matmul_backward_input(Stream *s, Real *din, const Real *dout,
                                             const Real *weight, const Real *pre_gelu, int64_t N,
                                             int64_t C, int64_t OC) {
    const Tiling grid = tile_output(N, C, OC, s->threads, rounded_tile(OC));
#pragma omp parallel num_threads(s->threads)
    {
        gemm_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            const int64_t at = t.row * C + t.col;
            int64_t stride;
            float *dx = tile_sums(s, din, C, t, &stride);
            const InputGradient to = {real_at(din, at),
                                      pre_gelu ? real_at_const(pre_gelu, at) : NULL, C};
            const Finish finish = {finish_input_rows, pre_gelu ? prefetch_input_rows : NULL, &to};
            gemm_finished(s, AS_STORED, t, OC, real_at_const(dout, t.row * OC), OC,
                          real_at_const(weight, t.col), C, dx, stride, finish);
        }
    }
}

// sums(cols) [+]= column sums of x(rows, cols), whose rows are `stride` apart. Rows are added in
// order, four at a time.
TYPED void column_sums(const DType type, float *sums, const Real *x, int64_t rows, int64_t cols,
                       int64_t stride, bool accumulate) {
    for (int64_t c = 0; c < cols && !accumulate; c++) { sums[c] = 0.0f; }
    int64_t n = 0;
    for (; n + 4 <= rows; n += 4) {
        const Real *a = real_at_const(x, n * stride), *b = real_at_const(a, stride),
                   *c = real_at_const(b, stride), *d = real_at_const(c, stride);
#pragma omp simd
        for (int64_t i = 0; i < cols; i++) {
            sums[i] += (load_real(type, a, i) + load_real(type, b, i)) +
                       (load_real(type, c, i) + load_real(type, d, i));
        }
    }
    for (; n < rows; n++) {
        const Real *row = real_at_const(x, n * stride);
#pragma omp simd
        for (int64_t i = 0; i < cols; i++) { sums[i] += load_real(type, row, i); }
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
    const Tiling grid = tile_output(OC, C, N, s->threads, INT64_MAX);
#pragma omp parallel num_threads(s->threads)
    {
        gemm_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            const Real *dy = real_at_const(dout, t.row);
            // This also loads dout into the cache for the product.
            if (dbias && t.col == 0) {
                FOR_TYPE(column_sums, dbias + t.row, dy, N, t.rows, OC, accumulate);
            }
            gemm_tile(s, TRANSPOSED, AS_STORED, t.rows, t.cols, N, dy, OC, real_at_const(in, t.col),
                      C, accumulate, dweight + t.row * C + t.col, C);
        }
    }
}

TYPED void add_part(const DType type, Real *out, const Real *a, const Real *b, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        store_real(type, out, i, load_real(type, a, i) + load_real(type, b, i));
    }
}
static inline void ops_residual(Stream *s, Real *out, const Real *a, const Real *b, int64_t n) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < ceil_div(n, BLOCK); k++) {
        const int64_t at = k * BLOCK;
        FOR_TYPE(add_part, real_at(out, at), real_at_const(a, at), real_at_const(b, at),
                 min_i64(BLOCK, n - at));
        poll_after_block(s, k);
    }
}

#endif
