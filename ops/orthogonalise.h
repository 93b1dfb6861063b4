// orthogonalise.h: the Newton-Schulz iteration of Muon: a matrix becomes a nearly orthogonal one
// with the same singular vectors. Its products are made in compute precision, by the same
// operations as those of the model.
//
// X = U / max(|U|, 1e-7), turned where U has more rows than columns; then some times A = X X^T and
// X = a X + (b A + c A A) X; turned back. A and A A are symmetric (ops_matmul_symmetric).
// The coefficients are those of KellerJordan/Muon: they raise small singular values fast, and leave
// all of them between 0.7 and 1.2.
#ifndef ORTHOGONALISE_H
#define ORTHOGONALISE_H

#include "base/base.h"
#include "ops/ops.h"

// Elements of a chunk of the sum of squares
enum { ORTHOGONAL_CHUNK = 256 };
static const float ORTHOGONAL_A = 3.4445f, ORTHOGONAL_B = -4.775f, ORTHOGONAL_C = 2.0315f;

// The scratch memory of one matrix with `shorter` rows and `longer` columns: two matrices of its
// size and two squares, in compute precision, and the sum of squares.
typedef struct {
    int64_t matrix, square, sum; // bytes of each, rounded up
} OrthogonalScratch;
static inline OrthogonalScratch orthogonal_scratch(int64_t rows, int64_t cols, DType real) {
    const int64_t size = (int64_t)dtype_size(real), shorter = min_i64(rows, cols);
    const OrthogonalScratch s = {.matrix = round_up(rows * cols * size, 256),
                                 .square = round_up(shorter * shorter * size, 256),
                                 .sum = round_up((int64_t)sizeof(ExactSum), 256)};
    return s;
}
static inline int64_t orthogonalise_bytes(int64_t rows, int64_t cols, DType real) {
    const OrthogonalScratch s = orthogonal_scratch(rows, cols, real);
    return 2 * s.matrix + 2 * s.square + s.sum;
}
// Returns the floating-point operations of an iteration with whole products.
static inline double orthogonalise_flops(int64_t rows, int64_t cols) {
    const double m = (double)min_i64(rows, cols), n = (double)max_i64(rows, cols);
    return 4 * m * m * n + 2 * m * m * m;
}
// x(rows, cols) becomes its iterate. real: compute precision. scratch: orthogonalise_bytes() of
// device memory, aligned to 256 bytes.
static inline void orthogonalise(Stream *s, float *x, int64_t rows, int64_t cols, int iterations,
                                 DType real, void *scratch) {
    const OrthogonalScratch size = orthogonal_scratch(rows, cols, real);
    const int64_t m = min_i64(rows, cols), n = max_i64(rows, cols);
    const bool turn = rows > cols;
    char *at = (char *)scratch;
    ExactSum *sum = (ExactSum *)(void *)at;
    Real *now = (Real *)(void *)(at + size.sum),
         *next = (Real *)(void *)((char *)now + size.matrix),
         *a = (Real *)(void *)((char *)next + size.matrix),
         *b = (Real *)(void *)((char *)a + size.square);
    ops_zero(s, sum, sizeof *sum);
    ops_square_sum(s, sum, x, rows * cols, ORTHOGONAL_CHUNK, 1);
    ops_orthogonal_begin(s, now, x, sum, rows, cols, turn);
    for (int i = 0; i < iterations; i++) {
        ops_matmul_symmetric(s, a, now, m, n);
        ops_matmul_symmetric(s, b, a, m, m);
        ops_combine(s, b, ORTHOGONAL_B, a, ORTHOGONAL_C, b, m * m);
        ops_matmul_backward_input(s, next, b, now, NULL, m, n, m);
        ops_combine(s, next, ORTHOGONAL_A, now, 1, next, m * n);
        Real *old = now;
        now = next;
        next = old;
    }
    ops_orthogonal_end(s, x, now, rows, cols, turn);
}

#endif
