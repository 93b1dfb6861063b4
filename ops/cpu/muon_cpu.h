// muon_cpu.h: what Muon needs on the CPU: directions, symmetric products, and the passes over a
// matrix between them. The contract is ops.h.
#ifndef MUON_CPU_H
#define MUON_CPU_H

#include "ops/cpu/matmul_cpu.h" // tiles

static inline void ops_muon(Stream *s, UpdateSlice u, OptimizerStep o) { ops_muon_host(s, u, o); }
static inline void ops_muon_direction(Stream *s, float *out, UpdateSlice u, OptimizerStep o) {
    float *m = u.moment[0];
    const float *grad = u.grad;
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < ceil_div(u.n, BLOCK); b++) {
        const int64_t end = min_i64(u.n, (b + 1) * BLOCK);
#pragma omp simd
        for (int64_t i = b * BLOCK; i < end; i++) {
            // which product is fused with which sum is said (update_cpu.h: adamw_element)
            m[i] = fmaf(1.0f - o.momentum, fmaf(grad[i], o.grad_scale, -m[i]), m[i]);
            const float ahead = fmaf(-grad[i], o.grad_scale, m[i]);
            out[i] = fmaf(o.momentum, ahead, grad[i] * o.grad_scale);
        }
        poll_after_block(s, b);
    }
}
static inline void ops_adamw_direction(Stream *s, float *out, UpdateSlice u, OptimizerStep o) {
    float *m = u.moment[0], *v = u.moment[1];
    const float *grad = u.grad;
    const AdamwBias bias = adamw_bias(o);
#pragma omp parallel for schedule(static) num_threads(s->threads) firstprivate(o, bias)
    for (int64_t b = 0; b < ceil_div(u.n, BLOCK); b++) {
        const int64_t end = min_i64(u.n, (b + 1) * BLOCK);
#pragma omp simd
        for (int64_t i = b * BLOCK; i < end; i++) {
            out[i] = adamw_element(&m[i], &v[i], grad[i], o, bias);
        }
        poll_after_block(s, b);
    }
}

// Squares of elements that are turned at once, so that their rows stay in the cache
enum { TURN_SIDE = 32 };
// to(cols, rows) = from(rows, cols)^T / by, for rows [first, last) of `from`
TYPED void turn_to_reals(const DType type, Real *to, const float *from, int64_t rows, int64_t cols,
                         int64_t first, int64_t last, float by) {
    for (int64_t c = 0; c < cols; c += TURN_SIDE) {
        for (int64_t i = c; i < min_i64(cols, c + TURN_SIDE); i++) {
            for (int64_t r = first; r < last; r++) {
                store_real(type, to, i * rows + r, from[r * cols + i] / by);
            }
        }
    }
}
// to(rows, cols) = from(cols, rows)^T, for rows [first, last) of `to`
TYPED void turn_to_floats(const DType type, float *to, const Real *from, int64_t rows, int64_t cols,
                          int64_t first, int64_t last) {
    for (int64_t c = 0; c < cols; c += TURN_SIDE) {
        for (int64_t r = first; r < last; r++) {
            for (int64_t i = c; i < min_i64(cols, c + TURN_SIDE); i++) {
                to[r * cols + i] = load_real(type, from, i * rows + r);
            }
        }
    }
}
TYPED void divide_part(const DType type, Real *to, const float *from, int64_t n, float by) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) { store_real(type, to, i, from[i] / by); }
}
static inline void ops_orthogonal_begin(Stream *s, Real *out, const float *x,
                                        const ExactSum *squares, int64_t rows, int64_t cols,
                                        bool turn) {
    const float norm = (float)fmax(sqrt(exact_value(*squares)), 1e-7);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < ceil_div(rows, TURN_SIDE); b++) {
        const int64_t first = b * TURN_SIDE, last = min_i64(rows, first + TURN_SIDE);
        if (turn) {
            FOR_TYPE(turn_to_reals, out, x, rows, cols, first, last, norm);
        } else {
            FOR_TYPE(divide_part, real_at(out, first * cols), x + first * cols,
                     (last - first) * cols, norm);
        }
        poll_after_block(s, b);
    }
}
static inline void ops_orthogonal_end(Stream *s, float *x, const Real *in, int64_t rows,
                                      int64_t cols, bool turn) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < ceil_div(rows, TURN_SIDE); b++) {
        const int64_t first = b * TURN_SIDE, last = min_i64(rows, first + TURN_SIDE);
        if (turn) {
            FOR_TYPE(turn_to_floats, x, in, rows, cols, first, last);
        } else {
            reals_to_floats(x + first * cols, real_at_const(in, first * cols),
                            (last - first) * cols);
        }
        poll_after_block(s, b);
    }
}
TYPED void combine_part(const DType type, Real *out, float a, const Real *x, float b, const Real *y,
                        int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        store_real(type, out, i, a * load_real(type, x, i) + b * load_real(type, y, i));
    }
}
static inline void ops_combine(Stream *s, Real *out, float a, const Real *x, float b, const Real *y,
                               int64_t n) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < ceil_div(n, BLOCK); k++) {
        const int64_t at = k * BLOCK;
        FOR_TYPE(combine_part, real_at(out, at), a, real_at_const(x, at), b, real_at_const(y, at),
                 min_i64(BLOCK, n - at));
        poll_after_block(s, k);
    }
}

// The side of the tiles of a symmetric product. It depends on nothing but N, so that the result
// does not depend on the number of threads.
enum { SYMMETRIC_TILE = 192 };
static inline Tiling tile_symmetric(int64_t N) {
    const int64_t across = max_i64(1, N / SYMMETRIC_TILE), side = round_up(ceil_div(N, across), 16),
                  tiles = tiles_along(N, side);
    const Tiling t = {N, N, side, side, tiles, tiles * tiles};
    return t;
}
TYPED void mirror_tile(const DType type, Real *out, Tile t, int64_t N) {
    for (int64_t c = t.col; c < t.col + t.cols; c++) {
        for (int64_t r = t.row; r < t.row + t.rows; r++) {
            store_real(type, out, c * N + r, load_real(type, out, r * N + c));
        }
    }
}
// Tiles above the diagonal are copies of those below it.
static inline void ops_matmul_symmetric(Stream *s, Real *out, const Real *in, int64_t N,
                                        int64_t C) {
    const Tiling grid = tile_symmetric(N);
#pragma omp parallel num_threads(s->threads)
    {
        gemm_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            if (t.col > t.row) { continue; }
            int64_t stride;
            float *y = tile_sums(s, out, N, t, &stride);
            const ForwardOutput to = {real_at(out, t.row * N + t.col), NULL, NULL, N};
            const Finish finish = {finish_forward_rows, NULL, &to};
            gemm_finished(s, TRANSPOSED, t, C, real_at_const(in, t.row * C), C,
                          real_at_const(in, t.col * C), C, y, stride, finish);
            if (t.col < t.row) { FOR_TYPE(mirror_tile, out, t, N); }
        }
    }
}

#endif
