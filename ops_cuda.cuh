// ops_cuda.cuh: the tensor operations on a GPU (the contract is ops.h). Own kernels, and cuBLASLt for the matrix products.
//
// Precision  Real is fp32 or bf16, as ops_open() is told (--dtype): kernels are templates over it and compute in fp32. Products of
//            fp32 matrices are exact fp32; with -DUSE_TF32 (make cuda TF32=1) cuBLASLt may round their operands to 10 bits.
//            Updated bf16 parameters are rounded to nearest even: they are copies of fp32 masters, so nothing is lost that
//            stochastic rounding would keep.
// Order      One CUDA stream; every call returns at once. What the host reads it reads after ops_wait(), or through ops_to_host()
//            and its like, which wait. While this rank waits, and at each call, messages move (Stream's progress).
// Sums       have one order, fixed by the shape: no atomics. The same call gives the same bits.
// Workspace  [MATMUL_WORKSPACE bytes of cuBLASLt | scratch of the call that runs]
// Compiled by nvcc, or by g++ with test/emu.h in place of CUDA: so launches go through LAUNCH, and kernels keep to its list.
#ifndef OPS_CUDA_CUH
#define OPS_CUDA_CUH

#include "ops.h" // the contract

#ifdef __CUDACC__
#include <cublasLt.h>  // matrix products
#include <cuda_bf16.h> // __nv_bfloat16
#define LAUNCH(kernel, grid, block, shared, stream, ...)                                                                                                       \
    do {                                                                                                                                                       \
        (kernel)<<<grid, block, shared, stream>>>(__VA_ARGS__);                                                                                                \
        CUDA_CHECK(cudaGetLastError());                                                                                                                        \
    } while (0)
#define DYNAMIC_SHARED(type, name)                                                                                                                             \
    extern __shared__ __align__(16) unsigned char dynamic_shared[];                                                                                            \
    type *name = (type *)(void *)dynamic_shared
#else
#include "test/emu.h"
#endif

#ifndef MATMUL_WORKSPACE // tests make these small
#define MATMUL_WORKSPACE (32 << 20)
#define CLASSIFIER_ROWS 2048 // of a chunk, which holds rows x Vp logits and reads and writes dwte once
#endif
#ifdef USE_TF32
#define FP32_PRODUCTS CUBLAS_COMPUTE_32F_FAST_TF32
#else
#define FP32_PRODUCTS CUBLAS_COMPUTE_32F
#endif

enum {
    THREADS = 256,          // of a block, where nothing else is said
    WARPS = THREADS / 32,   // of such a block
    MATMUL_PLANS = 256,     // shapes of matrix products that are remembered
    COLUMN_PARTS = 64,      // of a sum over rows, at most
    SCRATCH_LEAST = 1 << 16 // bytes, for what is moved in pieces
};
#define ALL_LANES 0xffffffffu

// ---------------------------------------------------------------------------------------------------------------------
// The device part of a Stream

// A matrix product that was asked for before: D(m,n) = op(A) op(B), column-major, as cuBLASLt has it.
typedef struct {
    int64_t m, n, k;
    int a_transposed, b_transposed, out_fp32, bias;
    unsigned alignment[4]; // of A, B, C, D in bytes; the struct has no padding: keys are compared as bytes
} MatmulKey;
typedef struct {
    MatmulKey key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} MatmulPlan;
typedef struct {
    cudaStream_t stream;
    cublasLtHandle_t lt;
    MatmulPlan plans[MATMUL_PLANS];
    int64_t plans_made; // the newest MATMUL_PLANS of them are kept
} Gpu;

static DType gpu_real = DTYPE_FP32; // what a Real is

#define CUDA_CHECK(call) cuda_check((call), #call)
#define LT_CHECK(call) lt_check((call), #call)
static inline void cuda_check(cudaError_t error, const char *call) {
    if (error != cudaSuccess) { die(EXIT_RESOURCES, NULL, "%s: %s", call, cudaGetErrorString(error)); }
}
// What a query says. "Not ready" is an answer, but CUDA keeps it as its last error, which the next launch would be blamed for.
static inline bool cuda_done(cudaError_t answer) {
    if (answer == cudaErrorNotReady) { return cudaGetLastError(), false; }
    CUDA_CHECK(answer);
    return true;
}
static inline void lt_check(cublasStatus_t status, const char *call) {
    if (status != CUBLAS_STATUS_SUCCESS) { die(EXIT_RESOURCES, NULL, "%s: cuBLASLt status %d", call, (int)status); }
}

static inline void ops_open(Stream *s, int place, DType real) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) { die(EXIT_RESOURCES, "./train_gpt runs on the processor", "no GPU is at hand"); }
    CUDA_CHECK(cudaSetDevice(place % devices));
    Gpu *gpu = (Gpu *)checked_calloc(1, sizeof(Gpu), "the device's handles");
    CUDA_CHECK(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    LT_CHECK(cublasLtCreate(&gpu->lt));
    gpu_real = real;
    s->device = gpu;
}
static inline void free_matmul_plan(MatmulPlan *p) {
    LT_CHECK(cublasLtMatmulDescDestroy(p->desc));
    LT_CHECK(cublasLtMatrixLayoutDestroy(p->a)), LT_CHECK(cublasLtMatrixLayoutDestroy(p->b)), LT_CHECK(cublasLtMatrixLayoutDestroy(p->d));
}
static inline void ops_close(Stream *s) {
    Gpu *gpu = (Gpu *)s->device;
    CUDA_CHECK(cudaStreamDestroy(gpu->stream));
    for (int i = 0; i < min_i64(gpu->plans_made, MATMUL_PLANS); i++) { free_matmul_plan(&gpu->plans[i]); }
    LT_CHECK(cublasLtDestroy(gpu->lt));
    free(gpu);
    s->device = NULL;
}

// What every operation begins with: messages move a little, then its work goes into the stream.
static inline cudaStream_t enter(Stream *s) {
    if (s->progress) { s->progress(); }
    return ((Gpu *)s->device)->stream;
}
static inline void ops_wait(Stream *s) {
    while (!cuda_done(cudaStreamQuery(((Gpu *)s->device)->stream))) {
        if (s->progress) { s->progress(); }
    }
}
static inline void *scratch(Stream *s) { return (char *)s->workspace + MATMUL_WORKSPACE; }
static inline int64_t scratch_bytes(const Stream *s) { return (int64_t)s->workspace_bytes - MATMUL_WORKSPACE; }

// Does what follows once, with R the type of a Real.
#define FOR_REAL(...)                                                                                                                                          \
    do {                                                                                                                                                       \
        if (gpu_real == DTYPE_BF16) {                                                                                                                          \
            typedef __nv_bfloat16 R;                                                                                                                           \
            __VA_ARGS__;                                                                                                                                       \
        } else {                                                                                                                                               \
            typedef float R;                                                                                                                                   \
            __VA_ARGS__;                                                                                                                                       \
        }                                                                                                                                                      \
    } while (0)

static inline unsigned blocks_for(int64_t n, int64_t each) { return (unsigned)ceil_div(n, each); }

// --- inside kernels ---------------------------------------------------------------------------------------------------
__device__ int64_t thread_index() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ float read(const float *p) { return *p; }
__device__ float read(const __nv_bfloat16 *p) { return __bfloat162float(*p); }
__device__ void write(float *p, float x) { *p = x; }
__device__ void write(__nv_bfloat16 *p, float x) { *p = __float2bfloat16(x); }
__device__ float warp_sum(float x) { // the same bits in all lanes
    for (int d = 16; d > 0; d >>= 1) { x += __shfl_xor_sync(ALL_LANES, x, d); }
    return x;
}
__device__ float warp_max(float x) {
    for (int d = 16; d > 0; d >>= 1) { x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, d)); }
    return x;
}
// Of a block of THREADS threads
__device__ float block_reduce(float x, bool maximum) {
    __shared__ float part[WARPS];
    x = maximum ? warp_max(x) : warp_sum(x);
    if (threadIdx.x % 32 == 0) { part[threadIdx.x / 32] = x; }
    __syncthreads();
    x = part[0];
    for (int w = 1; w < WARPS; w++) { x = maximum ? fmaxf(x, part[w]) : x + part[w]; }
    __syncthreads(); // part is used again by the next call
    return x;
}

// --- memory and precision ---------------------------------------------------------------------------------------------
static inline size_t ops_real_bytes(void) { return dtype_size(gpu_real); }
static inline Real *real_at(Real *p, int64_t elements) { return (Real *)((char *)p + elements * (int64_t)ops_real_bytes()); }
static inline const Real *real_at_const(const Real *p, int64_t elements) { return (const Real *)((const char *)p + elements * (int64_t)ops_real_bytes()); }

static inline void *ops_alloc(size_t bytes) {
    void *p = NULL;
    if (cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError(); // it is told here
        return NULL;
    }
    CUDA_CHECK(cudaMemset(p, 0, bytes));
    CUDA_CHECK(cudaDeviceSynchronize());
    return p;
}
static inline void ops_free(void *p) { CUDA_CHECK(cudaFree(p)); }

static inline void ops_copy(Stream *s, void *to, const void *from, size_t bytes) {
    cudaStream_t stream = enter(s);
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}
static inline void ops_zero(Stream *s, void *p, size_t bytes) {
    cudaStream_t stream = enter(s);
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, stream));
}
static inline void ops_from_host(Stream *s, void *device, const void *host, size_t bytes) {
    cudaStream_t stream = enter(s);
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
}
static inline void ops_to_host(Stream *s, void *host, const void *device, size_t bytes) {
    cudaStream_t stream = enter(s);
    ops_wait(s); // with messages moving; the copy itself would wait without
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
    ops_wait(s);
}

template <class To, class From> __global__ void convert_kernel(To *to, const From *from, int64_t n) {
    int64_t i = thread_index();
    if (i < n) { write(to + i, read(from + i)); }
}
template <class To, class From> static inline void convert(Stream *s, To *to, const From *from, int64_t n) {
    cudaStream_t stream = enter(s);
    if (n) { LAUNCH((convert_kernel<To, From>), blocks_for(n, THREADS), THREADS, 0, stream, to, from, n); }
}
static inline void ops_unpack(Stream *s, Real *out, const void *in, DType dtype, int64_t n) {
    if (dtype == DTYPE_BF16) {
        FOR_REAL(convert(s, (R *)out, (const __nv_bfloat16 *)in, n));
    } else {
        FOR_REAL(convert(s, (R *)out, (const float *)in, n));
    }
}
static inline void ops_pack(Stream *s, void *out, const Real *in, DType dtype, int64_t n) {
    if (dtype == DTYPE_BF16) {
        FOR_REAL(convert(s, (__nv_bfloat16 *)out, (const R *)in, n));
    } else {
        FOR_REAL(convert(s, (float *)out, (const R *)in, n));
    }
}
static inline void ops_convert_float(Stream *s, void *out, const float *in, DType dtype, int64_t n) {
    if (dtype == DTYPE_BF16) {
        convert(s, (__nv_bfloat16 *)out, in, n);
    } else {
        convert(s, (float *)out, in, n);
    }
}
static inline void ops_reals_to_host(Stream *s, float *host, const Real *device, int64_t n) {
    const int64_t piece = scratch_bytes(s) / (int64_t)sizeof(float);
    for (int64_t i = 0; i < n; i += piece) {
        const int64_t count = min_i64(piece, n - i);
        ops_pack(s, scratch(s), real_at_const(device, i), DTYPE_FP32, count);
        ops_to_host(s, host + i, scratch(s), (size_t)count * sizeof(float));
    }
}

// --- embedding --------------------------------------------------------------------------------------------------------
template <class R> __global__ void embedding_kernel(R *out, const int32_t *tokens, const R *wte, const R *wpe, int64_t N, int64_t T, int64_t C) {
    const int64_t i = thread_index(), n = i / C, c = i % C;
    if (n < N) { write(out + i, read(wte + tokens[n] * C + c) + read(wpe + n % T * C + c)); }
}
static inline void ops_embedding_forward(Stream *s, Real *out, const int32_t *tokens, const Real *wte, const Real *wpe, int64_t rows, int64_t T, int64_t C) {
    cudaStream_t stream = enter(s);
    const int64_t N = rows * T;
    if (N == 0) { return; }
    FOR_REAL(LAUNCH((embedding_kernel<R>), blocks_for(N * C, THREADS), THREADS, 0, stream, (R *)out, tokens, (const R *)wte, (const R *)wpe, N, T, C));
}

// order(N): positions sorted by their token, equal tokens by position. A position's place is the number of those before it,
// which each thread counts for itself: N^2 comparisons from shared memory, but no step that depends on timing.
__global__ void order_tokens_kernel(int32_t *order, const int32_t *tokens, int64_t N) {
    __shared__ int32_t tile[THREADS];
    const int64_t n = thread_index();
    const int32_t mine = n < N ? tokens[n] : 0;
    int64_t place = 0;
    for (int64_t m = 0; m < N; m += THREADS) {
        __syncthreads();
        tile[threadIdx.x] = m + threadIdx.x < N ? tokens[m + threadIdx.x] : INT32_MAX;
        __syncthreads();
        for (int j = 0; j < THREADS; j++) { place += tile[j] < mine || (tile[j] == mine && m + j < n); }
    }
    if (n < N) { order[place] = (int32_t)n; }
}
// A block takes the token at place blockIdx.x of the order, if it is the first of its kind, and adds its positions one after another.
template <class R>
__global__ void embedding_backward_wte_kernel(float *dwte, const R *dout, const int32_t *tokens, const int32_t *order, int64_t N, int64_t C) {
    const int64_t first = blockIdx.x, c = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    const int32_t token = tokens[order[first]];
    if (c >= C || (first && tokens[order[first - 1]] == token)) { return; }
    float sum = dwte[token * C + c];
    for (int64_t i = first; i < N && tokens[order[i]] == token; i++) { sum += read(dout + order[i] * C + c); }
    dwte[token * C + c] = sum;
}
template <class R> __global__ void embedding_backward_wpe_kernel(float *dwpe, const R *dout, int64_t rows, int64_t T, int64_t C) {
    const int64_t i = thread_index(); // (t, c)
    if (i >= T * C) { return; }
    float sum = dwpe[i];
    for (int64_t b = 0; b < rows; b++) { sum += read(dout + b * T * C + i); }
    dwpe[i] = sum;
}
static inline void ops_embedding_backward(Stream *s, float *dwte, float *dwpe, const Real *dout, const int32_t *tokens, int64_t rows, int64_t T, int64_t C,
                                          int64_t Vp, int64_t maxT, bool accumulate_wte, bool accumulate_wpe) {
    const int64_t N = rows * T;
    if (!accumulate_wte) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
    if (!accumulate_wpe) { ops_zero(s, dwpe, (size_t)(maxT * C) * sizeof(float)); }
    if (N == 0) { return; }
    cudaStream_t stream = enter(s);
    int32_t *order = (int32_t *)scratch(s);
    assert(N * (int64_t)sizeof *order <= scratch_bytes(s));
    LAUNCH(order_tokens_kernel, blocks_for(N, THREADS), THREADS, 0, stream, order, tokens, N);
    const dim3 grid((unsigned)N, blocks_for(C, THREADS));
    FOR_REAL(LAUNCH((embedding_backward_wte_kernel<R>), grid, THREADS, 0, stream, dwte, (const R *)dout, tokens, order, N, C));
    FOR_REAL(LAUNCH((embedding_backward_wpe_kernel<R>), blocks_for(T * C, THREADS), THREADS, 0, stream, dwpe, (const R *)dout, rows, T, C));
}

// --- sums over rows, in two steps: parts of the rows, then the parts in their order ------------------------------------
// partials(parts, 2, C): of rows [part * each, ...), the sums of dout * (in - mean) * rstd (left out where in is NULL), and of dout
enum { COLUMN_ROWS = 8 }; // of a block, side by side
template <class R>
__global__ void column_partials_kernel(float *partials, const R *dout, const R *in, const float *mean, const float *rstd, int64_t N, int64_t C, int64_t each) {
    __shared__ float sums[2][COLUMN_ROWS][32];
    const int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x, end = least((blockIdx.y + 1) * each, N);
    float weight = 0.0f, bias = 0.0f;
    for (int64_t n = blockIdx.y * each + threadIdx.y; n < end && c < C; n += COLUMN_ROWS) {
        const float dy = read(dout + n * C + c);
        if (in) { weight += dy * ((read(in + n * C + c) - mean[n]) * rstd[n]); }
        bias += dy;
    }
    sums[0][threadIdx.y][threadIdx.x] = weight, sums[1][threadIdx.y][threadIdx.x] = bias;
    __syncthreads();
    if (threadIdx.y > 1 || c >= C) { return; }
    float total = 0.0f; // row of threads 0 adds up the one sum, row 1 the other
    for (int y = 0; y < COLUMN_ROWS; y++) { total += sums[threadIdx.y][y][threadIdx.x]; }
    partials[((int64_t)blockIdx.y * 2 + threadIdx.y) * C + c] = total;
}
__global__ void column_finish_kernel(float *dweight, float *dbias, const float *partials, int64_t parts, int64_t C, bool accumulate) {
    const int64_t c = thread_index();
    if (c >= C) { return; }
    float weight = accumulate && dweight ? dweight[c] : 0.0f, bias = accumulate ? dbias[c] : 0.0f;
    for (int64_t p = 0; p < parts; p++) { weight += partials[2 * p * C + c], bias += partials[(2 * p + 1) * C + c]; }
    if (dweight) { dweight[c] = weight; }
    dbias[c] = bias;
}
static inline void column_sums(Stream *s, float *dweight, float *dbias, const Real *dout, const Real *in, const float *mean, const float *rstd, int64_t N,
                               int64_t C, bool accumulate) {
    cudaStream_t stream = enter(s);
    float *partials = (float *)scratch(s);
    const int64_t each = max_i64(4 * COLUMN_ROWS, ceil_div(N, COLUMN_PARTS)), parts = ceil_div(N, each);
    assert(parts * 2 * C * (int64_t)sizeof(float) <= scratch_bytes(s));
    const dim3 grid(blocks_for(C, 32), (unsigned)parts), block(32, COLUMN_ROWS);
    if (N) { FOR_REAL(LAUNCH((column_partials_kernel<R>), grid, block, 0, stream, partials, (const R *)dout, (const R *)in, mean, rstd, N, C, each)); }
    LAUNCH(column_finish_kernel, blocks_for(C, THREADS), THREADS, 0, stream, dweight, dbias, partials, parts, C, accumulate);
}

// --- layernorm: a warp takes a row -------------------------------------------------------------------------------------
template <class R>
__global__ void layernorm_kernel(R *out, float *mean, float *rstd, R *sum, const R *a, const R *b, const R *weight, const R *bias, int64_t N, int64_t C) {
    const int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) { return; } // whole warps
    const R *x = a + n * C;
    for (int64_t c = lane; c < C && b; c += 32) { write(sum + n * C + c, read(x + c) + read(b + n * C + c)); }
    if (b) { x = sum + n * C; } // each lane reads what it wrote
    float total = 0.0f, squares = 0.0f;
    for (int64_t c = lane; c < C; c += 32) { total += read(x + c); }
    const float m = warp_sum(total) / (float)C;
    for (int64_t c = lane; c < C; c += 32) { squares += (read(x + c) - m) * (read(x + c) - m); } // around the mean: no cancellation
    const float r = 1.0f / sqrtf(warp_sum(squares) / (float)C + 1e-5f);
    for (int64_t c = lane; c < C; c += 32) { write(out + n * C + c, (read(x + c) - m) * r * read(weight + c) + read(bias + c)); }
    if (lane == 0) { mean[n] = m, rstd[n] = r; }
}
static inline void ops_layernorm_forward(Stream *s, Real *out, float *mean, float *rstd, Real *sum, const Real *a, const Real *b, const Real *weight,
                                         const Real *bias, int64_t N, int64_t C) {
    cudaStream_t stream = enter(s);
    if (N == 0) { return; }
    FOR_REAL(LAUNCH((layernorm_kernel<R>), blocks_for(N, WARPS), THREADS, 0, stream, (R *)out, mean, rstd, (R *)sum, (const R *)a, (const R *)b,
                    (const R *)weight, (const R *)bias, N, C));
}

// With h = (x - mean) rstd and g = dout * weight:  dx = rstd (g - average(g) - h average(g h))
template <class R>
__global__ void layernorm_backward_kernel(R *din, const R *dout, const R *in, const R *weight, const float *mean, const float *rstd, int64_t N, int64_t C) {
    const int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) { return; }
    const R *dy = dout + n * C, *x = in + n * C;
    const float m = mean[n], r = rstd[n];
    float g_sum = 0.0f, gh_sum = 0.0f;
    for (int64_t c = lane; c < C; c += 32) {
        const float g = read(dy + c) * read(weight + c);
        g_sum += g;
        gh_sum += g * ((read(x + c) - m) * r);
    }
    const float g_mean = warp_sum(g_sum) / (float)C, gh_mean = warp_sum(gh_sum) / (float)C;
    for (int64_t c = lane; c < C; c += 32) {
        const float dx = r * (read(dy + c) * read(weight + c) - g_mean - (read(x + c) - m) * r * gh_mean);
        write(din + n * C + c, read(din + n * C + c) + dx);
    }
}
static inline void ops_layernorm_backward_input(Stream *s, Real *din, const Real *dout, const Real *in, const Real *weight, const float *mean,
                                                const float *rstd, int64_t N, int64_t C) {
    cudaStream_t stream = enter(s);
    if (N == 0) { return; }
    FOR_REAL(LAUNCH((layernorm_backward_kernel<R>), blocks_for(N, WARPS), THREADS, 0, stream, (R *)din, (const R *)dout, (const R *)in, (const R *)weight, mean,
                    rstd, N, C));
}
static inline void ops_layernorm_backward_weight(Stream *s, float *dweight, float *dbias, const Real *dout, const Real *in, const float *mean,
                                                 const float *rstd, int64_t N, int64_t C, bool accumulate) {
    column_sums(s, dweight, dbias, dout, in, mean, rstd, N, C, accumulate);
}

// --- matmul -----------------------------------------------------------------------------------------------------------
static inline unsigned alignment_of(const void *p) { // what cuBLASLt may rely on
    return (unsigned)((uintptr_t)p & -(uintptr_t)p & 511) ? (unsigned)min_i64((int64_t)((uintptr_t)p & -(uintptr_t)p), 256) : 256;
}
static inline void set_alignment(cublasLtMatmulPreference_t preference, int which, unsigned alignment) {
    LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, (decltype(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES))which, &alignment, sizeof alignment));
}
static inline MatmulPlan make_matmul_plan(Gpu *gpu, MatmulKey key) {
    MatmulPlan p;
    memset(&p, 0, sizeof p);
    p.key = key;
    const cudaDataType_t in = gpu_real == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F, out = key.out_fp32 ? CUDA_R_32F : in;
    const cublasOperation_t a_op = key.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, b_op = key.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasLtEpilogue_t epilogue = key.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    const uint64_t m = (uint64_t)key.m, n = (uint64_t)key.n, k = (uint64_t)key.k;
    LT_CHECK(cublasLtMatmulDescCreate(&p.desc, in == CUDA_R_32F ? FP32_PRODUCTS : CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_CHECK(cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_TRANSA, &a_op, sizeof a_op));
    LT_CHECK(cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_TRANSB, &b_op, sizeof b_op));
    LT_CHECK(cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    LT_CHECK(cublasLtMatrixLayoutCreate(&p.a, in, key.a_transposed ? k : m, key.a_transposed ? m : k, key.a_transposed ? key.k : key.m));
    LT_CHECK(cublasLtMatrixLayoutCreate(&p.b, in, key.b_transposed ? n : k, key.b_transposed ? k : n, key.b_transposed ? key.n : key.k));
    LT_CHECK(cublasLtMatrixLayoutCreate(&p.d, out, m, n, key.m));
    cublasLtMatmulPreference_t preference;
    const uint64_t workspace = MATMUL_WORKSPACE;
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    set_alignment(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.alignment[0]);
    set_alignment(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.alignment[1]);
    set_alignment(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.alignment[2]);
    set_alignment(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.alignment[3]);
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(gpu->lt, p.desc, p.a, p.b, p.d, p.d, preference, 1, &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS || !count) {
        die(EXIT_RESOURCES, "multiples of 8 work for channels and padded vocabulary",
            "cuBLASLt has no product of %" PRId64 " x %" PRId64 " x %" PRId64 " (status %d)", key.m, key.n, key.k, (int)status);
    }
    p.algo = found.algo;
    LT_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    return p;
}
static inline MatmulPlan *find_matmul_plan(Gpu *gpu, const MatmulKey *key) {
    const int64_t kept = min_i64(gpu->plans_made, MATMUL_PLANS);
    for (int64_t i = 0; i < kept; i++) {
        if (!memcmp(&gpu->plans[i].key, key, sizeof *key)) { return &gpu->plans[i]; }
    }
    MatmulPlan *p = &gpu->plans[gpu->plans_made++ % MATMUL_PLANS]; // the oldest makes room
    if (kept == MATMUL_PLANS) { free_matmul_plan(p); }
    *p = make_matmul_plan(gpu, *key);
    return p;
}
// Column-major, packed: d(m,n) [+]= op(a)(m,k) op(b)(k,n) + bias(m). A row-major (N, C) matrix is a column-major (C, N) one.
static inline void matmul(Stream *s, void *d, bool out_fp32, const Real *a, bool a_transposed, const Real *b, bool b_transposed, const Real *bias, int64_t m,
                          int64_t n, int64_t k, bool accumulate) {
    cudaStream_t stream = enter(s);
    MatmulKey key;
    static_assert(sizeof key == 56, "keys are compared as bytes");
    key.m = m, key.n = n, key.k = k, key.a_transposed = a_transposed, key.b_transposed = b_transposed, key.out_fp32 = out_fp32, key.bias = bias != NULL;
    key.alignment[0] = alignment_of(a), key.alignment[1] = alignment_of(b), key.alignment[2] = key.alignment[3] = alignment_of(d);
    Gpu *gpu = (Gpu *)s->device;
    MatmulPlan *p = find_matmul_plan(gpu, &key);
    const float one = 1.0f, beta = accumulate ? 1.0f : 0.0f;
    if (bias) { LT_CHECK(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias)); }
    LT_CHECK(cublasLtMatmul(gpu->lt, p->desc, &one, a, p->a, b, p->b, &beta, d, p->d, d, p->d, &p->algo, s->workspace, MATMUL_WORKSPACE, stream));
}

// GELU(x) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3): no tanh, and no cancellation for x << 0. e^88 stays finite.
__device__ float gelu_power(float x) { return expf(fminf(-1.5957691216f * (x + 0.044715f * x * x * x), 88.0f)); } // e^-2u
template <class R> __global__ void gelu_kernel(R *out, const R *in, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { write(out + i, read(in + i) / (1.0f + gelu_power(read(in + i)))); }
}
template <class R> __global__ void gelu_backward_kernel(R *d, const R *pre_gelu, int64_t n) { // d *= GELU'(pre_gelu)
    const int64_t i = thread_index();
    if (i >= n) { return; }
    const float x = read(pre_gelu + i), e = gelu_power(x), sigmoid = 1.0f / (1.0f + e);
    write(d + i, read(d + i) * (sigmoid + x * sigmoid * (sigmoid * e) * 1.5957691216f * (1.0f + 0.134145f * x * x)));
}

static inline void ops_matmul_forward(Stream *s, Real *out, Real *gelu, const Real *in, const Real *weight, const Real *bias, int64_t N, int64_t C,
                                      int64_t OC) {
    if (N == 0) { return; }
    matmul(s, out, false, weight, true, in, false, bias, OC, N, C, false);
    cudaStream_t stream = enter(s);
    if (gelu) { FOR_REAL(LAUNCH((gelu_kernel<R>), blocks_for(N * OC, THREADS), THREADS, 0, stream, (R *)gelu, (const R *)out, N * OC)); }
}
static inline void ops_matmul_backward_input(Stream *s, Real *din, const Real *dout, const Real *weight, const Real *pre_gelu, int64_t N, int64_t C,
                                             int64_t OC) {
    if (N == 0) { return; }
    matmul(s, din, false, weight, false, dout, false, NULL, C, N, OC, false);
    cudaStream_t stream = enter(s);
    if (pre_gelu) { FOR_REAL(LAUNCH((gelu_backward_kernel<R>), blocks_for(N * C, THREADS), THREADS, 0, stream, (R *)din, (const R *)pre_gelu, N * C)); }
}
static inline void ops_matmul_backward_weight(Stream *s, float *dweight, float *dbias, const Real *dout, const Real *in, int64_t N, int64_t C, int64_t OC,
                                              bool accumulate) {
    if (dbias) { column_sums(s, NULL, dbias, dout, NULL, NULL, NULL, N, OC, accumulate); }
    if (N) {
        matmul(s, dweight, true, in, false, dout, true, NULL, C, OC, N, accumulate);
    } else if (!accumulate) { // a sum of nothing
        ops_zero(s, dweight, (size_t)(OC * C) * sizeof(float));
    }
}

template <class R> __global__ void residual_kernel(R *out, const R *a, const R *b, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { write(out + i, read(a + i) + read(b + i)); }
}
static inline void ops_residual(Stream *s, Real *out, const Real *a, const Real *b, int64_t n) {
    cudaStream_t stream = enter(s);
    if (n) { FOR_REAL(LAUNCH((residual_kernel<R>), blocks_for(n, THREADS), THREADS, 0, stream, (R *)out, (const R *)a, (const R *)b, n)); }
}

// --- attention --------------------------------------------------------------------------------------------------------
// Queries and keys in tiles of TILE; a block of SIDE x SIDE threads takes one tile of one head and goes over the tiles of the other
// kind. Thread (y, x) has rows y + SIDE i and columns x + SIDE j of every small product, so that neighbours read neighbours.
// Tiles lie in shared memory with a column to spare (no bank conflicts): rows of D + 1, scores of TILE + 1. Sums stay in registers:
// HEAD is D rounded up to what is compiled. Backward takes two kernels, each of which computes the scores anew: one sums dk
// and dv over the queries, the other dq over the keys, so no two blocks add to the same place.
enum { TILE = 32, SIDE = 8, PER = TILE / SIDE, ATTENTION_THREADS = SIDE * SIDE, HEAD_MOST = 256 };

// to(TILE, D) = scale * rows from(rows, D), `stride` apart; rows beyond are zero
template <class R> __device__ void load_tile(float *to, const R *from, int64_t rows, int D, int64_t stride, float scale) {
    for (int i = (int)threadIdx.x; i < TILE * D; i += ATTENTION_THREADS) {
        const int row = i / D, d = i % D;
        to[row * (D + 1) + d] = row < rows ? scale * read(from + row * stride + d) : 0.0f;
    }
}
// products[i][j] = row i of a . row j of b
__device__ void tile_dots(float products[PER][PER], const float *a, const float *b, int D) {
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    for (int i = 0; i < PER; i++) {
        for (int j = 0; j < PER; j++) { products[i][j] = 0.0f; }
    }
    for (int d = 0; d < D; d++) {
        float row[PER], column[PER];
        for (int i = 0; i < PER; i++) { row[i] = a[(y + SIDE * i) * (D + 1) + d], column[i] = b[(x + SIDE * i) * (D + 1) + d]; }
        for (int i = 0; i < PER; i++) {
            for (int j = 0; j < PER; j++) { products[i][j] += row[i] * column[j]; }
        }
    }
}
__device__ void store_scores(float *to, const float scores[PER][PER]) {
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    for (int i = 0; i < PER; i++) {
        for (int j = 0; j < PER; j++) { to[(y + SIDE * i) * (TILE + 1) + x + SIDE * j] = scores[i][j]; }
    }
}
// sum(TILE, D) += w b, w(TILE, TILE) or its transpose, b(TILE, D)
template <int HEAD> __device__ void tile_product(float sum[PER][HEAD / SIDE], const float *w, bool transposed, const float *b, int D) {
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    for (int k = 0; k < TILE; k++) {
        float row[PER];
        for (int i = 0; i < PER; i++) { row[i] = transposed ? w[k * (TILE + 1) + y + SIDE * i] : w[(y + SIDE * i) * (TILE + 1) + k]; }
        for (int j = 0; j < HEAD / SIDE; j++) {
            const float value = x + SIDE * j < D ? b[k * (D + 1) + x + SIDE * j] : 0.0f;
            for (int i = 0; i < PER; i++) { sum[i][j] += row[i] * value; }
        }
    }
}
template <class R, int HEAD> __device__ void store_rows(R *to, const float sum[PER][HEAD / SIDE], const float *factor, int64_t rows, int D, int64_t stride) {
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    for (int i = 0; i < PER; i++) {
        for (int j = 0; j < HEAD / SIDE; j++) {
            if (y + SIDE * i < rows && x + SIDE * j < D) { write(to + (y + SIDE * i) * stride + x + SIDE * j, sum[i][j] * factor[i]); }
        }
    }
}
template <int HEAD> __device__ void clear(float sum[PER][HEAD / SIDE]) {
    for (int i = 0; i < PER; i++) {
        for (int j = 0; j < HEAD / SIDE; j++) { sum[i][j] = 0.0f; }
    }
}
__device__ float across_row(float x, bool maximum) { // over the SIDE threads that share a row
    for (int d = SIDE / 2; d > 0; d >>= 1) {
        const float other = __shfl_xor_sync(ALL_LANES, x, d);
        x = maximum ? fmaxf(x, other) : x + other;
    }
    return x;
}

// One tile of scores joins the running softmax: scores become e^(score - top), what was summed before is multiplied by factor.
__device__ void softmax_tile(float scores[PER][PER], float *top, float *sum, float *factor, int64_t q0, int64_t k0, int64_t T) {
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    for (int i = 0; i < PER; i++) {
        const int64_t query = q0 + y + SIDE * i;
        float highest = -INFINITY, total = 0.0f;
        for (int j = 0; j < PER; j++) {
            const int64_t key = k0 + x + SIDE * j;
            if (key > query || key >= T) { scores[i][j] = -INFINITY; }
            highest = fmaxf(highest, scores[i][j]);
        }
        const float before = top[i];
        top[i] = fmaxf(before, across_row(highest, true)); // finite: every tile has a key that the query sees
        factor[i] = expf(before - top[i]);
        for (int j = 0; j < PER; j++) { total += scores[i][j] = expf(scores[i][j] - top[i]); }
        sum[i] = sum[i] * factor[i] + across_row(total, false);
    }
}
template <class R, int HEAD>
__global__ void __launch_bounds__(ATTENTION_THREADS) attention_kernel(R *out, float *lse, const R *qkv, int64_t T, int64_t C, int D, float scale) {
    DYNAMIC_SHARED(float, shared);
    float *q = shared, *kv = q + TILE * (D + 1), *weights = kv + TILE * (D + 1);
    const int64_t q0 = (int64_t)blockIdx.x * TILE, head = blockIdx.y, b = blockIdx.z, rows = least(T - q0, TILE);
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    const R *mine = qkv + b * T * 3 * C + head * D;
    float scores[PER][PER], acc[PER][HEAD / SIDE], top[PER], sum[PER], factor[PER];
    clear<HEAD>(acc);
    for (int i = 0; i < PER; i++) { top[i] = -INFINITY, sum[i] = 0.0f; }
    load_tile(q, mine + q0 * 3 * C, rows, D, 3 * C, scale);
    for (int64_t k0 = 0; k0 <= q0; k0 += TILE) {
        __syncthreads(); // the tile before has been used
        load_tile(kv, mine + k0 * 3 * C + C, T - k0, D, 3 * C, 1.0f);
        __syncthreads();
        tile_dots(scores, q, kv, D);
        softmax_tile(scores, top, sum, factor, q0, k0, T);
        store_scores(weights, scores);
        __syncthreads(); // all keys have been used: values take their place
        load_tile(kv, mine + k0 * 3 * C + 2 * C, T - k0, D, 3 * C, 1.0f);
        for (int i = 0; i < PER; i++) {
            for (int j = 0; j < HEAD / SIDE; j++) { acc[i][j] *= factor[i]; }
        }
        __syncthreads();
        tile_product<HEAD>(acc, weights, false, kv, D);
    }
    for (int i = 0; i < PER; i++) {
        if (x == 0 && y + SIDE * i < rows) { lse[(b * gridDim.y + head) * T + q0 + y + SIDE * i] = top[i] + logf(sum[i]); }
        factor[i] = 1.0f / sum[i];
    }
    store_rows<R, HEAD>(out + (b * T + q0) * C + head * D, acc, factor, rows, D, C);
}

// delta(rows, NH, T) = dout . out of a head: the sum of p dp over a row of scores. A warp takes one.
template <class R> __global__ void attention_delta_kernel(float *delta, const R *dout, const R *out, int64_t n, int64_t T, int64_t NH, int D) {
    const int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, t = i % T, head = i / T % NH, b = i / T / NH;
    if (i >= n) { return; }
    const int64_t at = ((b * T + t) * NH + head) * D;
    float sum = 0.0f;
    for (int d = (int)threadIdx.x % 32; d < D; d += 32) { sum += read(dout + at + d) * read(out + at + d); }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) { delta[i] = sum; }
}

// The tiles of a backward kernel in shared memory, and of one head the statistics
typedef struct {
    float *q, *k, *v, *dout;  // (TILE, D); q scaled
    float *weights, *dscores; // (TILE, TILE): queries x keys
    const float *lse, *delta; // (T)
} BackwardTiles;
__device__ BackwardTiles backward_tiles(float *shared, const float *lse, const float *delta, int64_t T, int D) {
    const int64_t tile = TILE * (D + 1), row = ((int64_t)blockIdx.z * gridDim.y + blockIdx.y) * T;
    BackwardTiles t = {shared,    shared + tile, shared + 2 * tile, shared + 3 * tile, shared + 4 * tile, shared + 4 * tile + TILE * (TILE + 1),
                       lse + row, delta + row};
    return t;
}
// weights and dscores of queries from q0 on and keys from k0 on; 0 where the query does not see the key
__device__ void backward_scores(const BackwardTiles *t, int64_t q0, int64_t k0, int64_t T, int D) {
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    float p[PER][PER], dp[PER][PER];
    tile_dots(p, t->q, t->k, D);
    tile_dots(dp, t->dout, t->v, D);
    for (int i = 0; i < PER; i++) {
        const int64_t query = q0 + y + SIDE * i;
        for (int j = 0; j < PER; j++) {
            const bool sees = k0 + x + SIDE * j <= query && query < T;
            p[i][j] = sees ? expf(p[i][j] - t->lse[query]) : 0.0f;
            dp[i][j] = sees ? p[i][j] * (dp[i][j] - t->delta[query]) : 0.0f;
        }
    }
    store_scores(t->weights, p);
    store_scores(t->dscores, dp);
}
template <class R, int HEAD>
__global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_backward_keys_kernel(R *dqkv, const R *dout, const R *qkv, const float *lse, const float *delta, int64_t T, int64_t C, int D, float scale) {
    DYNAMIC_SHARED(float, shared);
    const BackwardTiles t = backward_tiles(shared, lse, delta, T, D);
    const int64_t k0 = (int64_t)blockIdx.x * TILE, at = blockIdx.z * T * C, head = (int64_t)blockIdx.y * D, rows = least(T - k0, TILE);
    const R *mine = qkv + 3 * at + head;
    float dk[PER][HEAD / SIDE], dv[PER][HEAD / SIDE];
    const float one[PER] = {1.0f, 1.0f, 1.0f, 1.0f};
    clear<HEAD>(dk), clear<HEAD>(dv);
    load_tile(t.k, mine + k0 * 3 * C + C, rows, D, 3 * C, 1.0f);
    load_tile(t.v, mine + k0 * 3 * C + 2 * C, rows, D, 3 * C, 1.0f);
    for (int64_t q0 = k0; q0 < T; q0 += TILE) {
        __syncthreads();
        load_tile(t.q, mine + q0 * 3 * C, T - q0, D, 3 * C, scale);
        load_tile(t.dout, dout + at + q0 * C + head, T - q0, D, C, 1.0f);
        __syncthreads();
        backward_scores(&t, q0, k0, T, D);
        __syncthreads();
        tile_product<HEAD>(dv, t.weights, true, t.dout, D);
        tile_product<HEAD>(dk, t.dscores, true, t.q, D);
    }
    store_rows<R, HEAD>(dqkv + 3 * at + head + k0 * 3 * C + C, dk, one, rows, D, 3 * C);
    store_rows<R, HEAD>(dqkv + 3 * at + head + k0 * 3 * C + 2 * C, dv, one, rows, D, 3 * C);
}
template <class R, int HEAD>
__global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_backward_queries_kernel(R *dqkv, const R *dout, const R *qkv, const float *lse, const float *delta, int64_t T, int64_t C, int D, float scale) {
    DYNAMIC_SHARED(float, shared);
    const BackwardTiles t = backward_tiles(shared, lse, delta, T, D);
    const int64_t q0 = (int64_t)blockIdx.x * TILE, at = blockIdx.z * T * C, head = (int64_t)blockIdx.y * D, rows = least(T - q0, TILE);
    const R *mine = qkv + 3 * at + head;
    float dq[PER][HEAD / SIDE];
    const float scales[PER] = {scale, scale, scale, scale};
    clear<HEAD>(dq);
    load_tile(t.q, mine + q0 * 3 * C, rows, D, 3 * C, scale);
    load_tile(t.dout, dout + at + q0 * C + head, rows, D, C, 1.0f);
    for (int64_t k0 = 0; k0 <= q0; k0 += TILE) {
        __syncthreads();
        load_tile(t.k, mine + k0 * 3 * C + C, T - k0, D, 3 * C, 1.0f);
        load_tile(t.v, mine + k0 * 3 * C + 2 * C, T - k0, D, 3 * C, 1.0f);
        __syncthreads();
        backward_scores(&t, q0, k0, T, D);
        __syncthreads();
        tile_product<HEAD>(dq, t.dscores, false, t.k, D);
    }
    store_rows<R, HEAD>(dqkv + 3 * at + head + q0 * 3 * C, dq, scales, rows, D, 3 * C);
}

typedef struct {
    int64_t rows, T, C, NH, D;
    dim3 grid;
    float scale;
    int forward_bytes, backward_bytes; // of shared memory
} AttentionShape;
static inline AttentionShape attention_shape(int64_t rows, int64_t T, int64_t C, int64_t NH) {
    AttentionShape a = {rows, T, C, NH, C / NH, dim3(blocks_for(T, TILE), (unsigned)NH, (unsigned)rows), 1.0f / sqrtf((float)(C / NH)), 0, 0};
    if (a.D > HEAD_MOST) { die(EXIT_INPUT, "choose more heads", "a head of %" PRId64 " channels; the GPU build takes at most %d", a.D, HEAD_MOST); }
    a.forward_bytes = (int)sizeof(float) * (2 * TILE * ((int)a.D + 1) + TILE * (TILE + 1));
    a.backward_bytes = (int)sizeof(float) * (4 * TILE * ((int)a.D + 1) + 2 * TILE * (TILE + 1));
    return a;
}
template <class R, int HEAD> static inline void attention_forward(cudaStream_t stream, AttentionShape a, R *out, float *lse, const R *qkv) {
    CUDA_CHECK(cudaFuncSetAttribute(attention_kernel<R, HEAD>, cudaFuncAttributeMaxDynamicSharedMemorySize, a.forward_bytes));
    LAUNCH((attention_kernel<R, HEAD>), a.grid, ATTENTION_THREADS, a.forward_bytes, stream, out, lse, qkv, a.T, a.C, (int)a.D, a.scale);
}
template <class R, int HEAD>
static inline void attention_backward(cudaStream_t stream, AttentionShape a, R *dqkv, const R *dout, const R *qkv, const float *lse, const float *delta) {
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_keys_kernel<R, HEAD>, cudaFuncAttributeMaxDynamicSharedMemorySize, a.backward_bytes));
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_queries_kernel<R, HEAD>, cudaFuncAttributeMaxDynamicSharedMemorySize, a.backward_bytes));
    LAUNCH((attention_backward_keys_kernel<R, HEAD>), a.grid, ATTENTION_THREADS, a.backward_bytes, stream, dqkv, dout, qkv, lse, delta, a.T, a.C, (int)a.D,
           a.scale);
    LAUNCH((attention_backward_queries_kernel<R, HEAD>), a.grid, ATTENTION_THREADS, a.backward_bytes, stream, dqkv, dout, qkv, lse, delta, a.T, a.C, (int)a.D,
           a.scale);
}
// Calls function<R, HEAD>(...) with the least HEAD that holds D channels.
#define FOR_HEAD(D, function, ...)                                                                                                                             \
    do {                                                                                                                                                       \
        if ((D) <= 64) {                                                                                                                                       \
            FOR_REAL(function<R, 64>(__VA_ARGS__));                                                                                                            \
        } else if ((D) <= 128) {                                                                                                                               \
            FOR_REAL(function<R, 128>(__VA_ARGS__));                                                                                                           \
        } else {                                                                                                                                               \
            FOR_REAL(function<R, HEAD_MOST>(__VA_ARGS__));                                                                                                     \
        }                                                                                                                                                      \
    } while (0)
static inline void ops_attention_forward(Stream *s, Real *out, float *lse, const Real *qkv, int64_t rows, int64_t T, int64_t C, int64_t NH) {
    cudaStream_t stream = enter(s);
    if (rows * T == 0) { return; }
    const AttentionShape a = attention_shape(rows, T, C, NH);
    FOR_HEAD(a.D, attention_forward, stream, a, (R *)out, lse, (const R *)qkv);
}
static inline void ops_attention_backward(Stream *s, Real *dqkv, const Real *dout, const Real *qkv, const Real *out, const float *lse, int64_t rows, int64_t T,
                                          int64_t C, int64_t NH) {
    cudaStream_t stream = enter(s);
    const int64_t n = rows * NH * T;
    if (n == 0) { return; }
    const AttentionShape a = attention_shape(rows, T, C, NH);
    float *delta = (float *)scratch(s);
    assert(n * (int64_t)sizeof(float) <= scratch_bytes(s));
    FOR_REAL(LAUNCH((attention_delta_kernel<R>), blocks_for(n, WARPS), THREADS, 0, stream, delta, (const R *)dout, (const R *)out, n, T, NH, (int)a.D));
    FOR_HEAD(a.D, attention_backward, stream, a, (R *)dqkv, (const R *)dout, (const R *)qkv, lse, delta);
}

// --- classifier: a chunk of rows at a time ----------------------------------------------------------------------------
// logits(rows, Vp) of a chunk become their own gradient in place. A block takes a row.
template <class R> __global__ void classifier_kernel(float *losses, R *logits, const int32_t *targets, int64_t V, int64_t Vp, float scale, bool gradient) {
    R *row = logits + (int64_t)blockIdx.x * Vp;
    const int32_t target = targets[blockIdx.x];
    const float of_target = target < 0 ? 0.0f : read(row + target); // read before anyone writes: the barriers below part them
    float top = -INFINITY, sum = 0.0f;
    for (int64_t v = threadIdx.x; v < V; v += THREADS) { top = fmaxf(top, read(row + v)); }
    top = block_reduce(top, true);
    for (int64_t v = threadIdx.x; v < V; v += THREADS) { sum += expf(read(row + v) - top); }
    const float lse = top + logf(block_reduce(sum, false));
    if (threadIdx.x == 0) { losses[blockIdx.x] = target < 0 ? 0.0f : lse - of_target; }
    for (int64_t v = threadIdx.x; v < Vp && gradient; v += THREADS) {
        const bool counts = v < V && target >= 0;
        write(row + v, counts ? scale * (expf(read(row + v) - lse) - (v == target ? 1.0f : 0.0f)) : 0.0f);
    }
}
static inline void ops_classifier(Stream *s, float *losses, Real *dx, float *dwte, const Real *x, const Real *wte, const int32_t *targets, int64_t N, int64_t C,
                                  int64_t V, int64_t Vp, float scale, bool accumulate) {
    assert((dx == NULL) == (dwte == NULL));
    if (N == 0 && dwte && !accumulate) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
    Real *logits = (Real *)scratch(s);
    for (int64_t n = 0; n < N; n += CLASSIFIER_ROWS) {
        const int64_t rows = min_i64(CLASSIFIER_ROWS, N - n);
        assert(rows * Vp * (int64_t)ops_real_bytes() <= scratch_bytes(s));
        ops_matmul_forward(s, logits, NULL, real_at_const(x, n * C), wte, NULL, rows, C, Vp);
        cudaStream_t stream = enter(s);
        FOR_REAL(LAUNCH((classifier_kernel<R>), (unsigned)rows, THREADS, 0, stream, losses + n, (R *)logits, targets + n, V, Vp, scale, dx != NULL));
        if (!dx) { continue; }
        ops_matmul_backward_weight(s, dwte, NULL, logits, real_at_const(x, n * C), rows, C, Vp, accumulate || n > 0);
        ops_matmul_backward_input(s, real_at(dx, n * C), logits, wte, NULL, rows, C, Vp);
    }
}

static inline size_t ops_workspace_bytes(OpsShape shape, int threads) {
    (void)threads;
    const int64_t N = shape.rows * shape.T, widest = max_i64(4 * shape.C, shape.Vp), real = (int64_t)ops_real_bytes();
    const int64_t columns = COLUMN_PARTS * 2 * widest * 4, order = N * 4, delta = N * shape.NH * 4, logits = min_i64(N, CLASSIFIER_ROWS) * shape.Vp * real;
    return (size_t)(MATMUL_WORKSPACE + max_i64(SCRATCH_LEAST, max_i64(max_i64(columns, order), max_i64(delta, logits))));
}

// --- optimizers and norms ---------------------------------------------------------------------------------------------
__global__ void adamw_kernel(float *master, __nv_bfloat16 *rounded, float *m, float *v, const float *grad, int64_t n, OptimizerStep o, float unbias_m,
                             float unbias_v) {
    const int64_t i = thread_index();
    if (i >= n) { return; }
    const float g = grad[i] * o.grad_scale, first = o.beta1 * m[i] + (1.0f - o.beta1) * g, second = o.beta2 * v[i] + (1.0f - o.beta2) * g * g;
    const float x = master[i] - o.lr * (first * unbias_m / (sqrtf(second * unbias_v) + o.eps) + o.weight_decay * master[i]);
    m[i] = first, v[i] = second, master[i] = x;
    if (rounded) { write(rounded + i, x); }
}
static inline void ops_adamw(Stream *s, float *master, void *param, DType dtype, float *m, float *v, const float *grad, int64_t n, OptimizerStep o) {
    cudaStream_t stream = enter(s);
    const float unbias_m = (float)(1.0 / (1.0 - pow((double)o.beta1, (double)o.step)));
    const float unbias_v = (float)(1.0 / (1.0 - pow((double)o.beta2, (double)o.step)));
    __nv_bfloat16 *rounded = dtype == DTYPE_BF16 ? (__nv_bfloat16 *)param : NULL;
    if (n) { LAUNCH(adamw_kernel, blocks_for(n, THREADS), THREADS, 0, stream, master, rounded, m, v, grad, n, o, unbias_m, unbias_v); }
}
__global__ void sgd_kernel(float *master, __nv_bfloat16 *rounded, float *b, const float *grad, int64_t n, OptimizerStep o) {
    const int64_t i = thread_index();
    if (i >= n) { return; }
    const float momentum = o.momentum * b[i] + grad[i] * o.grad_scale + o.weight_decay * master[i], x = master[i] - o.lr * momentum;
    b[i] = momentum, master[i] = x;
    if (rounded) { write(rounded + i, x); }
}
static inline void ops_sgd(Stream *s, float *master, void *param, DType dtype, float *b, const float *grad, int64_t n, OptimizerStep o) {
    cudaStream_t stream = enter(s);
    __nv_bfloat16 *rounded = dtype == DTYPE_BF16 ? (__nv_bfloat16 *)param : NULL;
    if (n) { LAUNCH(sgd_kernel, blocks_for(n, THREADS), THREADS, 0, stream, master, rounded, b, grad, n, o); }
}

// A warp takes a chunk. Element i of it goes to the sum of lane i mod 32, and the lanes are added in order, as on the processor: the
// same bits, since the square of an fp32 is exact in fp64.
__global__ void norm_partials_kernel(double *partials, const float *x, int64_t n, int64_t chunk, int64_t chunks) {
    const int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, end = least((i + 1) * chunk, n);
    if (i >= chunks) { return; }
    double sum = 0.0, total = 0.0;
    for (int64_t e = i * chunk + threadIdx.x % 32; e < end; e += 32) { sum += (double)x[e] * (double)x[e]; }
    for (int lane = 0; lane < 32; lane++) { total += __shfl_sync(ALL_LANES, sum, lane); }
    if (threadIdx.x % 32 == 0) { partials[i] = total; }
}
static inline void ops_norm_partials(Stream *s, double *partials, const float *x, int64_t n, int64_t chunk) {
    const int64_t chunks = ceil_div(n, chunk), most = scratch_bytes(s) / (int64_t)sizeof(double);
    for (int64_t i = 0; i < chunks; i += most) {
        cudaStream_t stream = enter(s);
        const int64_t count = min_i64(most, chunks - i);
        LAUNCH(norm_partials_kernel, blocks_for(count, WARPS), THREADS, 0, stream, (double *)scratch(s), x + i * chunk, n - i * chunk, chunk, count);
        ops_to_host(s, partials + i, scratch(s), (size_t)count * sizeof(double));
    }
}

#endif
