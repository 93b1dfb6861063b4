// quantize_cuda.cuh: quantization on a GPU. The contract is in ops.h, the format in quantize.h.
//
// Words     Threads work on whole 32-bit words, which hold 4 or 8 codes. So neighbouring threads
//           access neighbouring words of records.
// Encoding  A warp takes a block; THREADS threads take a large one. They pass over its numbers
//           twice, for the extreme and for the codes; the second time the numbers are in the
//           caches. Sums are computed twice too, so they need no buffer.
// Decoding  A thread takes one word.
#ifndef QUANTIZE_CUDA_CUH
#define QUANTIZE_CUDA_CUH

#include "ops/cuda/device_cuda.cuh" // helpers of kernels

enum { QUANT_WARP_BLOCK = 4096 }; // elements of the largest block that one warp takes

// --- inside kernels ------------------------------------------------------------------------------
template <int BITS> __device__ int code_of_word(uint32_t word, int j) {
    return BITS == 8 ? (int)(int8_t)(uint8_t)(word >> 8 * j) : (int)(word >> 4 * j & 15) - 8;
}
template <int BITS> __device__ uint32_t word_of_code(int code, int j) {
    return BITS == 8 ? (uint32_t)(uint8_t)code << 8 * j : (uint32_t)(code + 8) << 4 * j;
}

// The format in the form that kernels need, without divisions.
typedef struct {
    int log_block;
    int64_t record; // size in words
} Records;
__device__ const uint32_t *record_of(const void *records, Records r, int64_t element) {
    return (const uint32_t *)records + (element >> r.log_block) * r.record;
}
template <int BITS>
__device__ uint32_t codes_of(const uint32_t *record, Records r, int64_t element) {
    return record[1 + (element & (((int64_t)1 << r.log_block) - 1)) * BITS / 32];
}
__device__ float scale_of(const uint32_t *record) {
    const uint32_t pattern = *record;
    float d;
    memcpy(&d, &pattern, 4); // between registers: memory is accessed in words
    return d;
}
__device__ void set_scale(uint32_t *record, float d) {
    uint32_t pattern;
    memcpy(&pattern, &d, 4);
    *record = pattern;
}
static inline Records records_of(QuantFormat f) {
    const Records r = {63 - __builtin_clzll((unsigned long long)f.block),
                       quant_bytes(f, f.block) / 4};
    return r;
}

// --- decoding ------------------------------------------------------------------------------------
__device__ void set_value(float *y, int code, float d) { *y = quant_value(code, d); }
__device__ void set_value(uint16_t *y, int code, float d) { *y = quant_value_bf16(code, d); }
template <int BITS, class To>
__global__ void dequantize_kernel(To *out, const void *in, int64_t n, Records r) {
    enum { N = 32 / BITS };
    const int64_t e = thread_index() * N;
    if (e >= n) { return; }
    const uint32_t *record = record_of(in, r, e), word = codes_of<BITS>(record, r, e);
    const float d = scale_of(record);
    To y[N];
    UNROLL for (int j = 0; j < N; j++) { set_value(y + j, code_of_word<BITS>(word, j), d); }
    write_numbers<N>(out + e, y, n - e);
}
// x(N) += the contributions to the elements from e on
template <int BITS>
__device__ void add_contributions(float *x, const void *in, int64_t stride, int count, int64_t e,
                                  Records r) {
    for (int k = 0; k < count; k++) {
        const uint32_t *record = record_of((const char *)in + k * stride, r, e),
                       word = codes_of<BITS>(record, r, e);
        const float d = scale_of(record);
        UNROLL for (int j = 0; j < 32 / BITS; j++) {
            x[j] = quant_add(x[j], code_of_word<BITS>(word, j), d);
        }
    }
}
template <int BITS>
__global__ void dequantize_sum_kernel(float *out, bool accumulate, const void *in, int64_t stride,
                                      int count, int64_t n, Records r) {
    enum { N = 32 / BITS };
    const int64_t e = thread_index() * N;
    if (e >= n) { return; }
    float x[N] = {0};
    if (accumulate) { read_numbers<N>(x, out + e, n - e); }
    add_contributions<BITS>(x, in, stride, count, e, r);
    write_numbers<N>(out + e, x, n - e);
}

// --- encoding: from one of three sources ---------------------------------------------------------
template <class T> struct Numbers { const T *in; };
struct Sum {
    const void *in;
    int64_t stride;
    int count;
};
struct Feedback {
    const float *in;
    uint16_t *error;
    float beta;
};
// x = the n numbers of a word, from element e on (a word's worth if there are more)
template <int BITS, class T>
__device__ void take(float *x, const Numbers<T> &from, int64_t e, int64_t n, Records) {
    read_numbers<32 / BITS>(x, from.in + e, n);
}
template <int BITS> __device__ void take(float *x, const Sum &from, int64_t e, int64_t, Records r) {
    UNROLL for (int j = 0; j < 32 / BITS; j++) { x[j] = 0.0f; }
    add_contributions<BITS>(x, from.in, from.stride, from.count, e, r);
}
template <int BITS>
__device__ void take(float *x, const Feedback &from, int64_t e, int64_t n, Records) {
    float error[32 / BITS];
    read_numbers<32 / BITS>(x, from.in + e, n);
    read_numbers<32 / BITS>(error, from.error + e, n);
    UNROLL for (int j = 0; j < 32 / BITS; j++) { x[j] += error[j]; }
}
// Called when x has been encoded as this word. Updates the error for feedback.
template <int BITS, class From>
__device__ void note(const From &, const float *, uint32_t, float, int64_t, int64_t) {}
template <int BITS>
__device__ void note(const Feedback &from, const float *x, uint32_t word, float d, int64_t e,
                     int64_t n) {
    float error[32 / BITS];
    uint16_t now[32 / BITS];
    read_numbers<32 / BITS>(error, from.error + e, n);
    UNROLL for (int j = 0; j < 32 / BITS; j++) {
        now[j] = quant_error(error[j], from.beta, x[j], code_of_word<BITS>(word, j), d);
    }
    write_numbers<32 / BITS>(from.error + e, now, n);
}

// Returns the maximum over a group of threads: a warp, or a whole block of THREADS.
__device__ uint32_t group_highest(uint32_t x, int group) {
    __shared__ uint32_t part[WARPS];
    for (int d = 16; d > 0; d >>= 1) {
        const uint32_t other = __shfl_xor_sync(ALL_LANES, x, d);
        x = other > x ? other : x;
    }
    if (group == 32) { return x; }
    if (threadIdx.x % 32 == 0) { part[threadIdx.x / 32] = x; }
    __syncthreads();
    for (int w = 0; w < WARPS; w++) { x = part[w] > x ? part[w] : x; }
    return x;
}
template <int BITS, class From>
__global__ void quantize_kernel(uint32_t *out, From from, int64_t n, Records r, int group) {
    enum { N = 32 / BITS };
    const int64_t block = thread_index() / group, lane = threadIdx.x % group,
                  begin = block << r.log_block, end = least(n, begin + ((int64_t)1 << r.log_block));
    if (begin >= n) { return; }
    uint32_t highest = 0, *record = out + block * r.record;
    for (int64_t e = begin + N * lane; e < end; e += N * group) {
        float x[N];
        take<BITS>(x, from, e, end - e, r);
        UNROLL for (int j = 0; j < N; j++) {
            if (j < end - e && quant_rank(x[j]) > highest) { highest = quant_rank(x[j]); }
        }
    }
    const float d = quant_scale(group_highest(highest, group), BITS), inverse = quant_inverse(d);
    if (lane == 0) { set_scale(record, d); }
    for (int64_t e = begin + N * lane; e < end; e += N * group) {
        float x[N];
        uint32_t word = 0;
        take<BITS>(x, from, e, end - e, r);
        UNROLL for (int j = 0; j < N; j++) {
            word |= j < end - e ? word_of_code<BITS>(quant_code(x[j], inverse, BITS), j) : 0;
        }
        record[1 + (e - begin) / N] = word;
        note<BITS>(from, x, word, d, e, end - e);
    }
}

// --- the operations ------------------------------------------------------------------------------
// Runs the arguments once, with BITS defined as the format's.
#define FOR_BITS(f, ...)                                                                           \
    do {                                                                                           \
        if ((f).bits == 8) {                                                                       \
            enum { BITS = 8 };                                                                     \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            enum { BITS = 4 };                                                                     \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)

template <class From>
static inline void quantize(Stream *s, void *out, From from, int64_t n, QuantFormat f) {
    const int group = f.block <= QUANT_WARP_BLOCK ? 32 : THREADS;
    const unsigned blocks = blocks_for(ceil_div(n, f.block), THREADS / group);
    FOR_BITS(f, launch(s, quantize_kernel<BITS, From>, blocks, (uint32_t *)out, from, n,
                       records_of(f), group));
}
static inline void ops_quantize(Stream *s, void *out, const void *in, DType dtype, int64_t n,
                                QuantFormat f) {
    if (dtype == DTYPE_BF16) {
        quantize(s, out, Numbers<uint16_t>{(const uint16_t *)in}, n, f);
    } else {
        quantize(s, out, Numbers<float>{(const float *)in}, n, f);
    }
}
static inline void ops_requantize_sum(Stream *s, void *out, const void *in, int64_t stride,
                                      int count, int64_t n, QuantFormat f) {
    quantize(s, out, Sum{in, stride, count}, n, f);
}
static inline void ops_quantize_feedback(Stream *s, void *out, const float *in, uint16_t *error,
                                         float beta, int64_t n, QuantFormat f) {
    quantize(s, out, Feedback{in, error, beta}, n, f);
}
template <class To>
static inline void dequantize(Stream *s, To *out, const void *in, int64_t n, QuantFormat f) {
    FOR_BITS(f, launch(s, dequantize_kernel<BITS, To>, blocks_for(n, THREADS * (32 / BITS)), out,
                       in, n, records_of(f)));
}
static inline void ops_dequantize(Stream *s, void *out, DType dtype, const void *in, int64_t n,
                                  QuantFormat f) {
    if (dtype == DTYPE_BF16) {
        dequantize(s, (uint16_t *)out, in, n, f);
    } else {
        dequantize(s, (float *)out, in, n, f);
    }
}
static inline void ops_dequantize_sum(Stream *s, float *out, bool accumulate, const void *in,
                                      int64_t stride, int count, int64_t n, QuantFormat f) {
    FOR_BITS(f, launch(s, dequantize_sum_kernel<BITS>, blocks_for(n, THREADS * (32 / BITS)), out,
                       accumulate, in, stride, count, n, records_of(f)));
}

#endif
