// rmsnorm_cuda.cuh: RMSNorm on a GPU, a warp per row. Part of ops_cuda.cuh. The contract is ops.h.
#ifndef RMSNORM_CUDA_CUH
#define RMSNORM_CUDA_CUH

template <class R> __device__ float gain(const R *weight, int64_t c) {
    return weight ? read(weight + c) : 1.0f;
}
template <class R>
__global__ void rmsnorm_kernel(R *out, float *rstd, R *sum, const R *a, const R *b, const R *weight,
                               int64_t N, int64_t C, float eps) {
    const int64_t n = warp_index(), lane = threadIdx.x % 32;
    if (n >= N) { return; } // whole warps return
    const R *x = a + n * C;
    for (int64_t c = lane; c < C && b; c += 32) {
        write(sum + n * C + c, read(x + c) + read(b + n * C + c));
    }
    if (b) { x = sum + n * C; } // each lane reads only what it wrote
    float squares = 0.0f;
    for (int64_t c = lane; c < C; c += 32) { squares += read(x + c) * read(x + c); }
    const float r = 1.0f / sqrtf(warp_sum(squares) / (float)C + eps);
    for (int64_t c = lane; c < C; c += 32) {
        write(out + n * C + c, read(x + c) * r * gain(weight, c));
    }
    if (lane == 0) { rstd[n] = r; }
}
static inline void ops_rmsnorm_forward(Stream *s, Real *out, float *rstd, Real *sum, const Real *a,
                                       const Real *b, const Real *weight, int64_t N, int64_t C,
                                       float eps) {
    LAUNCH_REAL(s, rmsnorm_kernel, blocks_for(N, WARPS), out, rstd, sum, a, b, weight, N, C, eps);
}

// With h = x rstd and g = dout * weight: dx = rstd (g - h average(g h)).
template <class R>
__global__ void rmsnorm_backward_kernel(R *din, const R *dout, const R *in, const R *weight,
                                        const float *rstd, int64_t N, int64_t C) {
    const int64_t n = warp_index(), lane = threadIdx.x % 32;
    if (n >= N) { return; }
    const R *dy = dout + n * C, *x = in + n * C;
    const float r = rstd[n];
    float gh_sum = 0.0f;
    for (int64_t c = lane; c < C; c += 32) {
        gh_sum += read(dy + c) * gain(weight, c) * (read(x + c) * r);
    }
    const float gh_mean = warp_sum(gh_sum) / (float)C;
    for (int64_t c = lane; c < C; c += 32) {
        const float dx = r * (read(dy + c) * gain(weight, c) - read(x + c) * r * gh_mean);
        write(din + n * C + c, read(din + n * C + c) + dx);
    }
}
static inline void ops_rmsnorm_backward_input(Stream *s, Real *din, const Real *dout,
                                              const Real *in, const Real *weight, const float *rstd,
                                              int64_t N, int64_t C) {
    LAUNCH_REAL(s, rmsnorm_backward_kernel, blocks_for(N, WARPS), din, dout, in, weight, rstd, N,
                C);
}
static inline void ops_rmsnorm_backward_weight(Stream *s, float *dweight, const Real *dout,
                                               const Real *in, const float *rstd, int64_t N,
                                               int64_t C, bool accumulate) {
    column_sums(s, dweight, NULL, dout, in, NULL, rstd, N, C, accumulate);
}

#endif
