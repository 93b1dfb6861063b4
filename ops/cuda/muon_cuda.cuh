// muon_cuda.cuh: what Muon needs on a GPU: directions, and the passes over a matrix between the
// products. The contract is ops.h.
#ifndef MUON_CUDA_CUH
#define MUON_CUDA_CUH

#include "ops/cuda/device_cuda.cuh" // launching kernels

__global__ void muon_direction_kernel(float *out, UpdateSlice u, OptimizerStep o) {
    const int64_t i = thread_index();
    if (i >= u.n) { return; }
    const float before = u.moment[0][i], g = u.grad[i], scale = o.grad_scale,
                m = fmaf(1.0f - o.momentum, fmaf(g, scale, -before), before);
    u.moment[0][i] = m;
    out[i] = fmaf(o.momentum, fmaf(-g, scale, m), g * scale);
}
static inline void ops_muon_direction(Stream *s, float *out, UpdateSlice u, OptimizerStep o) {
    launch(s, muon_direction_kernel, blocks_for(u.n, THREADS), out, u, o);
}
// Updates the moments of element i. Returns its direction.
__device__ float adamw_element(const UpdateSlice &u, const OptimizerStep &o, AdamwBias bias,
                               int64_t i) {
    const float g = u.grad[i] * o.grad_scale,
                first = fmaf(o.beta1, u.moment[0][i], (1.0f - o.beta1) * g),
                second = fmaf(o.beta2, u.moment[1][i], (1.0f - o.beta2) * g * g);
    u.moment[0][i] = first;
    u.moment[1][i] = second;
    const float used = o.nesterov ? fmaf(o.beta1, first, (1.0f - o.beta1) * g) : first;
    return used * bias.m / (sqrtf(second * bias.v) + o.eps);
}
__global__ void adamw_direction_kernel(float *out, UpdateSlice u, OptimizerStep o, AdamwBias bias) {
    const int64_t i = thread_index();
    if (i < u.n) { out[i] = adamw_element(u, o, bias, i); }
}
static inline void ops_adamw_direction(Stream *s, float *out, UpdateSlice u, OptimizerStep o) {
    launch(s, adamw_direction_kernel, blocks_for(u.n, THREADS), out, u, o, adamw_bias(o));
}

// A block turns a square of TURN_SIDE^2 elements, so that both its reads and its writes are of
// neighbours. Without `turn` it copies the square.
enum { TURN_SIDE = 16 };
static_assert(TURN_SIDE * TURN_SIDE == THREADS, "an element a thread");
template <class To, class From>
__device__ void turn_square(To *out, const From *in, int64_t rows, int64_t cols, bool turn,
                            float by) {
    __shared__ float square[TURN_SIDE][TURN_SIDE + 1];
    const int64_t across = (cols + TURN_SIDE - 1) / TURN_SIDE,
                  row = blockIdx.x / across * TURN_SIDE, col = blockIdx.x % across * TURN_SIDE;
    const int y = threadIdx.x / TURN_SIDE, x = threadIdx.x % TURN_SIDE;
    if (row + y < rows && col + x < cols) {
        square[y][x] = read(in + (row + y) * cols + col + x) / by;
    }
    __syncthreads();
    if (turn && row + x < rows && col + y < cols) {
        write(out + (col + y) * rows + row + x, square[x][y]);
    }
    if (!turn && row + y < rows && col + x < cols) {
        write(out + (row + y) * cols + col + x, square[y][x]);
    }
}
static inline unsigned squares_of(int64_t rows, int64_t cols) {
    return (unsigned)(ceil_div(rows, TURN_SIDE) * ceil_div(cols, TURN_SIDE));
}
template <class R>
__global__ void orthogonal_begin_kernel(R *out, const float *x, const ExactSum *squares,
                                        int64_t rows, int64_t cols, bool turn) {
    __shared__ float norm;
    if (threadIdx.x == 0) { norm = (float)fmax(sqrt(exact_value(*squares)), 1e-7); }
    __syncthreads();
    turn_square(out, x, rows, cols, turn, norm);
}
static inline void ops_orthogonal_begin(Stream *s, Real *out, const float *x,
                                        const ExactSum *squares, int64_t rows, int64_t cols,
                                        bool turn) {
    LAUNCH_REAL(s, orthogonal_begin_kernel, squares_of(rows, cols), out, x, squares, rows, cols,
                turn);
}
// in is (cols, rows) where it is turned
template <class R>
__global__ void orthogonal_end_kernel(float *x, const R *in, int64_t rows, int64_t cols,
                                      bool turn) {
    turn_square(x, in, turn ? cols : rows, turn ? rows : cols, turn, 1.0f);
}
static inline void ops_orthogonal_end(Stream *s, float *x, const Real *in, int64_t rows,
                                      int64_t cols, bool turn) {
    LAUNCH_REAL(s, orthogonal_end_kernel, squares_of(turn ? cols : rows, turn ? rows : cols), x, in,
                rows, cols, turn);
}

template <class R>
__global__ void combine_kernel(R *out, float a, const R *x, float b, const R *y, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { write(out + i, a * read(x + i) + b * read(y + i)); }
}
static inline void ops_combine(Stream *s, Real *out, float a, const Real *x, float b, const Real *y,
                               int64_t n) {
    LAUNCH_REAL(s, combine_kernel, blocks_for(n, THREADS), out, a, x, b, y, n);
}
// cuBLASLt has no product that is computed by half.
static inline void ops_matmul_symmetric(Stream *s, Real *out, const Real *in, int64_t N,
                                        int64_t C) {
    ops_matmul_forward(s, out, NULL, in, in, NULL, N, C, N);
}

#endif
