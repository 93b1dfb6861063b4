// rmsnorm_cuda.cuh: RMSNorm on a GPU, a warp per row. Part of ops_cuda.cuh. The contract is ops.h.
#ifndef RMSNORM_CUDA_CUH
#define RMSNORM_CUDA_CUH

template <class R> __device__ float gain(const R *weight, int64_t c) {
    return weight ? read(weight + c) : 1.0f;
}
template <class R> __device__ void read_gains(float *w, const R *weight, int64_t c, int64_t C) {
    UNROLL for (int j = 0; j < EACH; j++) { w[j] = 1.0f; }
    if (weight) { read_numbers<EACH>(w, weight + c, C - c); }
}
template <class R>
__global__ void rmsnorm_kernel(R *out, float *rstd, R *sum, const R *a, const R *b, const R *weight,
                               float eps, int64_t N, int64_t C, int width) {
    const int64_t n = warp_index();
    if (n >= N) { return; } // whole warps return
    const NormRow<R> row = norm_row(sum, a, b, n, C, 0, width);
    float x[EACH], w[EACH], squares = 0.0f;
    for (int64_t c = norm_begin(); c < C; c += NORM_STEP) {
        row.read_first(x, c);
        UNROLL for (int j = 0; j < EACH; j++) { squares += x[j] * x[j]; }
    }
    const float r = 1.0f / sqrtf(warp_sum(squares) / (float)C + eps);
    for (int64_t c = norm_begin(); c < C; c += NORM_STEP) {
        row.read_again(x, c);
        read_gains(w, weight, c, C);
        UNROLL for (int j = 0; j < EACH; j++) { x[j] *= r * w[j]; }
        write_numbers<EACH>(out + n * C + c, x, C - c);
    }
    if (threadIdx.x % 32 == 0) { rstd[n] = r; }
}
static inline void ops_rmsnorm_forward(Stream *s, Real *out, float *rstd, Real *sum, const Real *a,
                                       const Real *b, const Real *weight, int64_t N, int64_t C,
                                       float eps) {
    LAUNCH_NORM(s, rmsnorm_kernel, 1, N, C, out, rstd, sum, a, b, weight, eps);
}

// With h = x rstd and g = dout * weight: dx = rstd (g - h average(g h)).
template <class R>
__global__ void rmsnorm_backward_kernel(R *din, const R *before, const R *dout, const R *in,
                                        const R *weight, const float *rstd, int64_t N, int64_t C,
                                        int width) {
    const int64_t n = warp_index();
    if (n >= N) { return; }
    const NormRow<R> dy_row = norm_row(dout, n, C, 0, width), x_row = norm_row(in, n, C, 1, width);
    const float r = rstd[n];
    float dy[EACH], x[EACH], w[EACH], to[EACH] = {}, gh_sum = 0.0f;
    for (int64_t c = norm_begin(); c < C; c += NORM_STEP) {
        dy_row.read_first(dy, c);
        x_row.read_first(x, c);
        read_gains(w, weight, c, C);
        UNROLL for (int j = 0; j < EACH; j++) { gh_sum += dy[j] * w[j] * (x[j] * r); }
    }
    const float gh_mean = warp_sum(gh_sum) / (float)C;
    for (int64_t c = norm_begin(); c < C; c += NORM_STEP) {
        if (before) { read_numbers<EACH>(to, before + n * C + c, C - c); }
        dy_row.read_again(dy, c);
        x_row.read_again(x, c);
        read_gains(w, weight, c, C);
        UNROLL for (int j = 0; j < EACH; j++) {
            to[j] = (before ? to[j] : 0.0f) + r * (dy[j] * w[j] - x[j] * r * gh_mean);
        }
        write_numbers<EACH>(din + n * C + c, to, C - c);
    }
}
static inline void ops_rmsnorm_backward_input(Stream *s, Real *din, const Real *before,
                                              const Real *dout, const Real *in, const Real *weight,
                                              const float *rstd, int64_t N, int64_t C) {
    LAUNCH_NORM(s, rmsnorm_backward_kernel, 2, N, C, din, before, dout, in, weight, rstd);
}
static inline void ops_rmsnorm_backward_weight(Stream *s, float *dweight, const Real *dout,
                                               const Real *in, const float *rstd, int64_t N,
                                               int64_t C, bool accumulate) {
    column_sums(s, dweight, NULL, dout, in, NULL, rstd, N, C, accumulate);
}

#endif
