// activation_cuda.cuh: activations of the MLP and soft caps on a GPU, an element a thread. The
// contract is ops.h.
#ifndef ACTIVATION_CUDA_CUH
#define ACTIVATION_CUDA_CUH

#include "ops/cuda/device_cuda.cuh" // launching kernels

// e^-x is limited to e^88, which is finite.
__device__ float silu_sigmoid(float x) { return 1.0f / (1.0f + expf(fminf(-x, 88.0f))); }

template <class R> __global__ void swiglu_kernel(R *out, const R *in, int64_t n, int64_t F) {
    const int64_t i = thread_index(), gate = i / F * 2 * F + i % F;
    if (i >= n) { return; }
    const float a = read(in + gate);
    write(out + i, a * silu_sigmoid(a) * read(in + gate + F));
}
static inline void ops_swiglu_forward(Stream *s, Real *out, const Real *in, int64_t N, int64_t F) {
    LAUNCH_REAL(s, swiglu_kernel, blocks_for(N * F, THREADS), out, in, N * F, F);
}
// With S the sigmoid of a: d up = dout a S, and d gate = dout up S (1 + a (1 - S)).
template <class R>
__global__ void swiglu_backward_kernel(R *din, const R *dout, const R *in, int64_t n, int64_t F) {
    const int64_t i = thread_index(), gate = i / F * 2 * F + i % F;
    if (i >= n) { return; }
    const float a = read(in + gate), up = read(in + gate + F), dy = read(dout + i),
                sigmoid = silu_sigmoid(a);
    write(din + gate, dy * up * (sigmoid * (1.0f + a * (1.0f - sigmoid))));
    write(din + gate + F, dy * (a * sigmoid));
}
static inline void ops_swiglu_backward(Stream *s, Real *din, const Real *dout, const Real *in,
                                       int64_t N, int64_t F) {
    LAUNCH_REAL(s, swiglu_backward_kernel, blocks_for(N * F, THREADS), din, dout, in, N * F, F);
}

__device__ float above_zero(float x) { return x < 0.0f ? 0.0f : x; } // a NaN stays
template <class R> __global__ void relu2_kernel(R *out, const R *in, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { write(out + i, above_zero(read(in + i)) * above_zero(read(in + i))); }
}
static inline void ops_relu2_forward(Stream *s, Real *out, const Real *in, int64_t n) {
    LAUNCH_REAL(s, relu2_kernel, blocks_for(n, THREADS), out, in, n);
}
template <class R>
__global__ void relu2_backward_kernel(R *din, const R *dout, const R *in, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { write(din + i, read(dout + i) * (2.0f * above_zero(read(in + i)))); }
}
static inline void ops_relu2_backward(Stream *s, Real *din, const Real *dout, const Real *in,
                                      int64_t n) {
    LAUNCH_REAL(s, relu2_backward_kernel, blocks_for(n, THREADS), din, dout, in, n);
}

// softcap 0: none
__device__ float capped(float x, float softcap) {
    return softcap > 0.0f ? softcap * tanhf(x / softcap) : x;
}
// The derivative, by the capped value.
__device__ float cap_slope(float value, float softcap) {
    return softcap > 0.0f ? 1.0f - value / softcap * (value / softcap) : 1.0f;
}
template <class R> __global__ void softcap_kernel(R *x, int64_t n, float softcap) {
    const int64_t i = thread_index();
    if (i < n) { write(x + i, capped(read(x + i), softcap)); }
}
static inline void ops_softcap(Stream *s, Real *x, int64_t n, float softcap) {
    LAUNCH_REAL(s, softcap_kernel, blocks_for(n, THREADS), x, n, softcap);
}

#endif
