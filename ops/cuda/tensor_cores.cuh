// tensor_cores.cuh: products of bf16 matrices in shared memory by tensor cores, and asynchronous
// copies into shared memory: what kernels for attention and for private training are made of.
//
// A warp multiplies 16 x 16 by 16 x 8 at a time. Lane l holds four elements of the result: element
// e is in row l/4 + e/2 * 8 and column l%4 * 2 + e%2. Two adjacent results, rounded
// to bf16, are exactly what a lane must hold of the left operand of the next product. So scores go
// from one product to the next without leaving the registers.
#ifndef TENSOR_CORES_CUH
#define TENSOR_CORES_CUH

#include "ops/cuda/device_cuda.cuh" // helpers of kernels

#ifdef __CUDACC__ // test/emu.h has emulations of these
typedef __nv_bfloat16 Bf16;
// d(16, 8) += a(16, 16) b(16, 8), with b as two halves of 8 rows
__device__ void mma_bf16(float d[4], const unsigned a[4], unsigned b_upper, unsigned b_lower) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_upper), "r"(b_lower));
}
__device__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
// Loads four 8 x 8 matrices from shared memory. Lane l passes the address of row l%8 of matrix l/8.
// Of each matrix it gets row l/4, columns l%4 * 2 and the next; or, transposed, column l/4, rows
// l%4 * 2 and the next.
#define LDMATRIX(m, row, transposed)                                                               \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" transposed ".shared.b16 {%0,%1,%2,%3}, [%4];"     \
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])                                  \
                 : "r"(shared_address(row))                                                        \
                 : "memory")
__device__ void load_matrices(unsigned m[4], const Bf16 *row) { LDMATRIX(m, row, ""); }
__device__ void load_matrices_transposed(unsigned m[4], const Bf16 *row) {
    LDMATRIX(m, row, ".trans");
}
// Starts a copy into shared memory, or writes zeros if `there` is false. After copy_async_wait(),
// the copies of the calling thread have arrived.
__device__ void copy_async_16(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ void copy_async_4(void *to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(there ? 4 : 0)
                 : "memory");
}
__device__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// error up to 2 units in the last place; results below 2^-126 become 0
__device__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

enum {
    MMA_WARPS = 4,
    MMA_THREADS = 32 * MMA_WARPS,
    // Padding of a row in shared memory after its HEAD elements. So eight consecutive rows start in
    // eight different groups of banks.
    SPARE = 8
};
#define LOG2_E 1.4426950409f

__device__ int lane() { return (int)threadIdx.x % 32; }
__device__ int fragment_row(int half) { return lane() / 4 + 8 * half; }
__device__ int fragment_column(int e) { return lane() % 4 * 2 + e; }
__device__ unsigned pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    unsigned bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}
__device__ float over_quad(float x, bool maximum) { // over the four lanes that share a row
    for (int d = 1; d <= 2; d *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, x, d);
        x = maximum ? fmaxf(x, other) : x + other;
    }
    return x;
}

// Returns what this lane passes to load four 8 x 8 matrices of a (16, 16) one, whose first row and
// column are given, from a panel in shared memory. stacked: the second of the four is below the
// first; otherwise it is right of it.
__device__ const Bf16 *matrix_row(const Bf16 *panel, int pitch, int row, int column, bool stacked) {
    const int line = row + (stacked ? lane() % 16 : lane() / 16 * 8 + lane() % 8);
    return panel + line * pitch + column + (stacked ? lane() / 16 * 8 : lane() / 8 % 2 * 8);
}
// d(16, 16), as two tiles of 8 columns, += a(16, 16) b(16, 16)
__device__ void mma_pair(float d[2][4], const unsigned a[4], const unsigned b[4]) {
    mma_bf16(d[0], a, b[0], b[1]);
    mma_bf16(d[1], a, b[2], b[3]);
}
template <int M, int N> __device__ void clear_tiles(float x[M][N][4]) {
    UNROLL for (int i = 0; i < M * N * 4; i++) { x[i / (4 * N)][i / 4 % N][i % 4] = 0.0f; }
}
// Starts copying to(ROWS, HEAD) = rows of from(rows, D), which are `stride` apart, padded with
// zeros.
template <int HEAD, int ROWS>
__device__ void start_tile(Bf16 *to, const Bf16 *from, int64_t rows, int D, int64_t stride) {
    UNROLL for (int i = 0; i < ROWS * HEAD / 8; i += MMA_THREADS) {
        const int at = i + (int)threadIdx.x, row = at / (HEAD / 8), d = at % (HEAD / 8) * 8;
        const bool there = row < rows && d < D;
        copy_async_16(to + row * (HEAD + SPARE) + d, there ? from + row * stride + d : from, there);
    }
}
// For a warp: product(16 M, N) = a(16 M, HEAD) b(N, HEAD)^T.
template <int HEAD, int M, int N>
__device__ void multiply_transposed(float product[M][N / 8][4], const Bf16 *a, const Bf16 *b) {
    clear_tiles<M, N / 8>(product);
    UNROLL for (int d = 0; d < HEAD; d += 16) {
        unsigned left[M][4], right[4];
        UNROLL for (int m = 0; m < M; m++) {
            load_matrices(left[m], matrix_row(a, HEAD + SPARE, 16 * m, d, true));
        }
        UNROLL for (int n = 0; n < N; n += 16) {
            load_matrices(right, matrix_row(b, HEAD + SPARE, n, d, false));
            UNROLL for (int m = 0; m < M; m++) { mma_pair(&product[m][n / 8], left[m], right); }
        }
    }
}
// For a warp: sum(16 M, HEAD) += w(16 M, N) b(N, HEAD), with w rounded to bf16.
template <int HEAD, int M, int N>
__device__ void multiply_add(float sum[M][HEAD / 8][4], const float w[M][N / 8][4], const Bf16 *b) {
    UNROLL for (int n = 0; n < N; n += 16) {
        unsigned left[M][4], right[4];
        UNROLL for (int m = 0; m < M; m++) {
            UNROLL for (int i = 0; i < 4; i++) {
                left[m][i] =
                    pack_bf16(w[m][n / 8 + i / 2][i % 2 * 2], w[m][n / 8 + i / 2][i % 2 * 2 + 1]);
            }
        }
        UNROLL for (int d = 0; d < HEAD; d += 16) {
            load_matrices_transposed(right, matrix_row(b, HEAD + SPARE, n, d, true));
            UNROLL for (int m = 0; m < M; m++) { mma_pair(&sum[m][d / 8], left[m], right); }
        }
    }
}
// For a warp: to(rows, D), with rows `stride` apart, = factor * sum(16 M, HEAD).
template <int HEAD, int M>
__device__ void store_sums(Bf16 *to, const float sum[M][HEAD / 8][4], const float factor[M][2],
                           int64_t rows, int D, int64_t stride) {
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int half = 0; half < 2; half++) {
            const int row = 16 * m + fragment_row(half);
            UNROLL for (int n = 0; n < HEAD / 8; n++) {
                const int d = 8 * n + fragment_column(0);
                const float f = factor[m][half], *pair = &sum[m][n][2 * half];
                if (row < rows && d < D) {
                    *(unsigned *)(void *)(to + row * stride + d) =
                        pack_bf16(f * pair[0], f * pair[1]);
                }
            }
        }
    }
}

#endif
