// activation_cuda.cuh: activations of the MLP and soft caps on a GPU. The contract is
// ops.h.
#ifndef ACTIVATION_CUDA_CUH
#define ACTIVATION_CUDA_CUH

#include "ops/cuda/device_cuda.cuh" // launching kernels

// e^-x is limited to e^88, which is finite.
__device__ float silu_sigmoid(float x) { return 1.0f / (1.0f + expf(fminf(-x, 88.0f))); }

template <class R> __global__ void swiglu_kernel(R *out, const R *in, int64_t N, int64_t F) {
    const RowPart at = row_part(F);
    const int64_t gates = at.n * 2 * F + at.c, left = F - at.c;
    float gate[EACH], up[EACH];
    if (at.n >= N) { return; }
    read_numbers<EACH>(gate, in + gates, left);
    read_numbers<EACH>(up, in + gates + F, left);
    UNROLL for (int j = 0; j < EACH; j++) { up[j] *= gate[j] * silu_sigmoid(gate[j]); }
    write_numbers<EACH>(out + at.n * F + at.c, up, left);
}
static inline void ops_swiglu_forward(Stream *s, Real *out, const Real *in, int64_t N, int64_t F) {
    LAUNCH_REAL(s, swiglu_kernel, row_part_blocks(N, F), out, in, N, F);
}
// With S the sigmoid of a: d up = dout a S, and d gate = dout up S (1 + a (1 - S)).
template <class R>
__global__ void swiglu_backward_kernel(R *din, const R *dout, const R *in, int64_t N, int64_t F) {
    const RowPart at = row_part(F);
    const int64_t gates = at.n * 2 * F + at.c, left = F - at.c;
    float a[EACH], up[EACH], dy[EACH];
    if (at.n >= N) { return; }
    read_numbers<EACH>(a, in + gates, left);
    read_numbers<EACH>(up, in + gates + F, left);
    read_numbers<EACH>(dy, dout + at.n * F + at.c, left);
    UNROLL for (int j = 0; j < EACH; j++) {
        const float sigmoid = silu_sigmoid(a[j]),
                    dgate = sigmoid * (1.0f + a[j] * (1.0f - sigmoid));
        up[j] *= dy[j] * dgate;
        dy[j] *= a[j] * sigmoid;
    }
    write_numbers<EACH>(din + gates, up, left);
    write_numbers<EACH>(din + gates + F, dy, left);
}
static inline void ops_swiglu_backward(Stream *s, Real *din, const Real *dout, const Real *in,
                                       int64_t N, int64_t F) {
    LAUNCH_REAL(s, swiglu_backward_kernel, row_part_blocks(N, F), din, dout, in, N, F);
}

__device__ float above_zero(float x) { return x < 0.0f ? 0.0f : x; } // a NaN stays
struct Relu2 {
    __device__ float operator()(float x, float) const { return above_zero(x) * above_zero(x); }
};
static inline void ops_relu2_forward(Stream *s, Real *out, const Real *in, int64_t n) {
    map_reals(s, Relu2(), out, in, NULL, n);
}
struct Relu2Backward {
    __device__ float operator()(float dy, float x) const { return dy * (2.0f * above_zero(x)); }
};
static inline void ops_relu2_backward(Stream *s, Real *din, const Real *dout, const Real *in,
                                      int64_t n) {
    map_reals(s, Relu2Backward(), din, dout, in, n);
}

// softcap 0: none
__device__ float capped(float x, float softcap) {
    return softcap > 0.0f ? softcap * tanhf(x / softcap) : x;
}
// The derivative, by the capped value.
__device__ float cap_slope(float value, float softcap) {
    return softcap > 0.0f ? 1.0f - value / softcap * (value / softcap) : 1.0f;
}
struct Softcap {
    float cap;
    __device__ float operator()(float x, float) const { return capped(x, cap); }
};
static inline void ops_softcap(Stream *s, Real *x, int64_t n, float softcap) {
    const Softcap f = {softcap};
    map_reals(s, f, x, x, NULL, n);
}

#endif
