// ops_cuda.cuh: the tensor operations on a GPU (the contract is ops.h). Own kernels, and cuBLASLt for the matrix products; attention is
// in attention_cuda.cuh, which brings this.
//
// Precision  Real is fp32 or bf16, as ops_open() is told (--dtype): kernels are templates over it and compute in fp32. Products of
//            fp32 matrices are exact fp32; with -DUSE_TF32 (make cuda TF32=1) cuBLASLt may round their operands to 10 bits.
// Order      One CUDA stream; every call returns at once. What the host reads it reads after ops_wait(), or through ops_to_host()
//            and its like, which wait. While this rank waits, and at each call, messages move (Stream's progress).
// Sums       have one order, fixed by the shape: no atomics. The same call gives the same bits.
// Workspace  [MATMUL_WORKSPACE bytes of cuBLASLt | scratch of the call that runs]
// Compiled by nvcc, or by g++ with test/emu.h in place of CUDA: so launches go through LAUNCH, and kernels keep to its list.
#ifndef OPS_CUDA_CUH
#define OPS_CUDA_CUH

#include "kernels/update_cpu.h" // optimizers of the host; ops.h, the contract
#include <ctype.h>              // names of devices
#include <sched.h>              // sched_yield

#ifdef __CUDACC__
#include <cublasLt.h>          // matrix products
#include <cuda_bf16.h>         // __nv_bfloat16
#include <cuda_profiler_api.h> // --profile-steps
#include <nvtx3/nvToolsExt.h>  // names for profilers
#define LAUNCH(kernel, grid, block, shared, stream, ...)                                                                                                       \
    do {                                                                                                                                                       \
        (kernel)<<<grid, block, shared, stream>>>(__VA_ARGS__);                                                                                                \
        CUDA_CHECK(cudaGetLastError());                                                                                                                        \
    } while (0)
#define DYNAMIC_SHARED(type, name)                                                                                                                             \
    extern __shared__ __align__(16) unsigned char dynamic_shared[];                                                                                            \
    type *name = (type *)(void *)dynamic_shared
#define UNROLL _Pragma("unroll") // arrays stay in registers only where every index is known
#else
#include "test/emu.h"
#define MATMUL_CALLS 1
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
    RECORDINGS = 4096,      // repeated work that is remembered
    RECORDING_KEY = 192,    // bytes, at most
    COLUMN_PARTS = 64,      // of a sum over rows, at most
    PACE = 128,             // operations
    SCRATCH_LEAST = 1 << 16 // bytes, for what is moved in pieces
};
#define ALL_LANES 0xffffffffu

// ---------------------------------------------------------------------------------------------------------------------
// The device part of a Stream

// Repeated work. The first time it runs as it is, so that libraries are loaded; the second time it becomes a graph.
typedef struct {
    unsigned char key[RECORDING_KEY];
    size_t bytes; // of the key; 0: a free place
    cudaGraphExec_t graph;
} Recording;
typedef struct {
    cudaStream_t stream;
    struct Matmuls *matmuls; // kernels/matmul_cuda.cuh
    Recording recordings[RECORDINGS];
    Recording *recording; // that the stream is captured for; NULL: it is not
    int64_t operations;   // begun
    cudaEvent_t paces[2]; // recorded in turns, after PACE operations each
    cudaEvent_t reached;  // what another stream waits for: ops_follow
} Gpu;

static DType gpu_real = DTYPE_FP32; // what a Real is

#define CUDA_CHECK(call) cuda_check((call), #call)
static inline void cuda_check(cudaError_t error, const char *call) {
    if (error != cudaSuccess) { die(EXIT_RESOURCES, NULL, "%s: %s", call, cudaGetErrorString(error)); }
}
// What a query says. "Not ready" is an answer, but CUDA keeps it as its last error, which the next launch would be blamed for.
static inline bool cuda_done(cudaError_t answer) {
    if (answer == cudaErrorNotReady) { return cudaGetLastError(), false; }
    CUDA_CHECK(answer);
    return true;
}

static struct Matmuls *matmuls_open(void); // kernels/matmul_cuda.cuh
static void matmuls_close(struct Matmuls *m);
static inline Gpu *gpu_stream_open(void) {
    Gpu *gpu = (Gpu *)checked_calloc(1, sizeof(Gpu), "the device's handles");
    CUDA_CHECK(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    for (int i = 0; i < 2; i++) { CUDA_CHECK(cudaEventCreateWithFlags(&gpu->paces[i], cudaEventDisableTiming)); }
    CUDA_CHECK(cudaEventCreateWithFlags(&gpu->reached, cudaEventDisableTiming));
    return gpu;
}
static inline void gpu_stream_close(Gpu *gpu) {
    for (int i = 0; i < 2; i++) { CUDA_CHECK(cudaEventDestroy(gpu->paces[i])); }
    CUDA_CHECK(cudaEventDestroy(gpu->reached));
    CUDA_CHECK(cudaStreamDestroy(gpu->stream));
    free(gpu);
}
// Kernels are loaded when the program starts, not at their first launch: loading waits for the device, which may wait for a message
// that this rank has yet to send. Before MPI starts, since it may be the first to use CUDA.
__attribute__((constructor)) static void load_kernels_eagerly(void) { setenv("CUDA_MODULE_LOADING", "EAGER", 0); }
static inline void ops_open(Stream *s, int place, DType real) {
    int devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || !devices) { die(EXIT_RESOURCES, "./train_gpt runs on the processor", "no GPU is at hand: %s", cudaGetErrorString(error)); }
    CUDA_CHECK(cudaSetDevice(place % devices));
    Gpu *gpu = gpu_stream_open();
    gpu->matmuls = matmuls_open();
    gpu_real = real;
    s->device = gpu;
}
static inline void ops_close(Stream *s) {
    Gpu *gpu = (Gpu *)s->device;
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int i = 0; i < RECORDINGS; i++) {
        if (gpu->recordings[i].graph) { CUDA_CHECK(cudaGraphExecDestroy(gpu->recordings[i].graph)); }
    }
    matmuls_close(gpu->matmuls);
    gpu_stream_close(gpu);
    s->device = NULL;
}
static inline void ops_link_open(Stream *link, const Stream *of) {
    *link = *of;
    link->device = gpu_stream_open();
}
static inline void ops_link_close(Stream *link) {
    if (link->device) { gpu_stream_close((Gpu *)link->device); }
    memset(link, 0, sizeof *link);
}
static inline void ops_follow(Stream *s, Stream *after) {
    Gpu *gpu = (Gpu *)after->device;
    CUDA_CHECK(cudaEventRecord(gpu->reached, gpu->stream));
    CUDA_CHECK(cudaStreamWaitEvent(((Gpu *)s->device)->stream, gpu->reached, 0));
}

// Dense bf16 products, in TFLOP/s, by the first words of the device's name: from NVIDIA's datasheets of each, where figures "with
// sparsity" are twice these; for GeForce and RTX from the white papers of Blackwell, Ada and Ampere (sums in fp32): the number of
// cores times the boost clock times 4, of cards for workstations times 8.
static const struct {
    const char *name;
    double tflops;
} gpu_peaks[] = {{"NVIDIA A10", 125},
                 {"NVIDIA A100", 312},
                 {"NVIDIA H100 PCIe", 756},
                 {"NVIDIA H100 NVL", 835},
                 {"NVIDIA H100", 989.4},
                 {"NVIDIA H200 NVL", 835},
                 {"NVIDIA H200", 989.4},
                 {"NVIDIA GH200", 989.4},
                 {"NVIDIA B200", 2250},
                 {"NVIDIA GB200", 2500},
                 {"NVIDIA B300", 2250},
                 {"NVIDIA GB300", 2500},
                 {"NVIDIA L40S", 362},
                 {"NVIDIA L4", 121},
                 {"NVIDIA RTX A6000", 154.8},
                 {"NVIDIA RTX 6000 Ada Generation", 364.2},
                 {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8},
                 {"NVIDIA GeForce RTX 5090", 209.5},
                 {"NVIDIA GeForce RTX 5080", 112.6},
                 {"NVIDIA GeForce RTX 5070 Ti", 87.9},
                 {"NVIDIA GeForce RTX 5070", 61.7},
                 {"NVIDIA GeForce RTX 4090", 165.2},
                 {"NVIDIA GeForce RTX 3090", 71}};
static inline const char *ops_device(double *bf16_flops) {
    static cudaDeviceProp device;
    int number;
    CUDA_CHECK(cudaGetDevice(&number));
    CUDA_CHECK(cudaGetDeviceProperties(&device, number));
    *bf16_flops = 0;
    for (size_t i = 0; i < sizeof gpu_peaks / sizeof gpu_peaks[0] && *bf16_flops == 0; i++) {
        const size_t n = strlen(gpu_peaks[i].name);
        if (!strncmp(device.name, gpu_peaks[i].name, n) && !isalnum((unsigned char)device.name[n])) { *bf16_flops = 1e12 * gpu_peaks[i].tflops; }
    }
    return device.name;
}

// As the kernel's PCI subsystem knows the GPU.
static inline void ops_near_cores(char *list, size_t bytes) {
    int number;
    char bus[64] = "", path[160];
    CUDA_CHECK(cudaGetDevice(&number));
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, number));
    for (char *c = bus; *c; c++) { *c = (char)tolower((unsigned char)*c); }
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/local_cpulist", bus);
    snprintf(list, bytes, "%s", "");
    FILE *f = fopen(path, "r");
    if (!f) { return; } // a machine without /sys, or a virtual one that hides it
    if (!fgets(list, (int)bytes, f)) { *list = 0; }
    fclose(f);
    list[strcspn(list, "\n")] = 0;
}
static inline const char *ops_products(void) { return "cuBLASLt"; }

// The host runs ahead of the device by two paces at most. Beyond some thousand launches the driver would make it wait, and nobody would
// look after lost ranks meanwhile.
static inline void keep_pace(Stream *s) {
    Gpu *gpu = (Gpu *)s->device;
    if (gpu->recording || ++gpu->operations % PACE) { return; } // work that is recorded is not under way
    cudaEvent_t pace = gpu->paces[gpu->operations / PACE % 2];
    while (!cuda_done(cudaEventQuery(pace))) {
        if (s->progress) { s->progress(); }
    }
    CUDA_CHECK(cudaEventRecord(pace, gpu->stream));
}
// What every operation begins with: messages move a little, then its work goes into the stream.
static inline cudaStream_t enter(Stream *s) {
    if (s->progress) { s->progress(); }
    keep_pace(s);
    return ((Gpu *)s->device)->stream;
}
static inline void ops_wait(Stream *s) {
    for (int turn = 0; !cuda_done(cudaStreamQuery(((Gpu *)s->device)->stream)); turn++) {
        if (s->progress) { s->progress(); }
        if (turn > 200) { sched_yield(); } // ranks that share cores wait for each other
    }
}

// The place of a key, new or not, among those near its checksum; NULL where these are taken.
static inline Recording *find_recording(Gpu *gpu, const void *key, size_t bytes) {
    assert(bytes <= RECORDING_KEY && !gpu->recording);
    Checksum sum = checksum_begin();
    checksum_add(&sum, key, bytes);
    const uint64_t home = checksum_end(&sum);
    for (uint64_t i = 0; i < 16; i++) {
        Recording *r = &gpu->recordings[(home + i) % RECORDINGS];
        if (!r->bytes || (r->bytes == bytes && !memcmp(r->key, key, bytes))) { return r; }
    }
    return NULL;
}
static inline bool ops_repeat_begin(Stream *s, const void *key, size_t bytes) {
    cudaStream_t stream = enter(s);
    Gpu *gpu = (Gpu *)s->device;
    Recording *r = find_recording(gpu, key, bytes);
    if (r && r->graph) {
        CUDA_CHECK(cudaGraphLaunch(r->graph, stream));
        return false;
    }
    if (r && r->bytes) { // the second time
        gpu->recording = r;
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed)); // relaxed: messages go on meanwhile
    } else if (r) {
        memcpy(r->key, key, bytes), r->bytes = bytes;
    }
    return true;
}
static inline void ops_repeat_end(Stream *s) {
    Gpu *gpu = (Gpu *)s->device;
    if (!gpu->recording) { return; }
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamEndCapture(gpu->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&gpu->recording->graph, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaGraphLaunch(gpu->recording->graph, gpu->stream));
    gpu->recording = NULL;
}

static inline OpsMark *ops_mark_make(void) { // an event
    cudaEvent_t e;
    CUDA_CHECK(cudaEventCreateWithFlags(&e, cudaEventDefault));
    return (OpsMark *)e;
}
static inline void ops_mark_free(OpsMark *m) { CUDA_CHECK(cudaEventDestroy((cudaEvent_t)m)); }
static inline void ops_mark(Stream *s, OpsMark *m) { CUDA_CHECK(cudaEventRecord((cudaEvent_t)m, enter(s))); }
static inline double ops_mark_seconds(Stream *s, OpsMark *from, OpsMark *to) {
    float ms;
    (void)s;
    CUDA_CHECK(cudaEventElapsedTime(&ms, (cudaEvent_t)from, (cudaEvent_t)to));
    return (double)ms / 1000;
}
static inline void ops_range_begin(const char *what, const char *of, int number) {
    char name[64];
    snprintf(name, sizeof name, number < 0 ? "%s" : "%s %s %d", what, of, number);
    nvtxRangePushA(name);
}
static inline void ops_range_end(void) { nvtxRangePop(); }
static inline void ops_profiler(bool on) { CUDA_CHECK(on ? cudaProfilerStart() : cudaProfilerStop()); }

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
static inline void *ops_alloc_host(size_t bytes) {
    void *p = NULL;
    if (cudaMallocHost(&p, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError(); // it is told here
        return NULL;
    }
    return memset(p, 0, bytes);
}
static inline void ops_free_host(void *p) {
    if (p) { CUDA_CHECK(cudaFreeHost(p)); }
}
// In one piece of exactly this size: whoever rounds pinned memory up to a power of two takes up to twice as much.
static inline void *ops_alloc_far(size_t bytes, bool *pinned) {
    void *p = ops_alloc_host(bytes);
    *pinned = p != NULL;
    if (!p) { p = malloc(bytes ? bytes : 1); }
    return p && !*pinned ? memset(p, 0, bytes) : p;
}
static inline void ops_free_far(void *p, bool pinned) {
    if (pinned) {
        ops_free_host(p);
    } else {
        free(p);
    }
}
static inline bool ops_memory_apart(void) { return true; }
static inline double ops_memory_available(void) { // less what graphs, libraries and NCCL take in the first steps
    size_t there, total;
    CUDA_CHECK(cudaMemGetInfo(&there, &total));
    return (double)there - (double)total / 64;
}

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
static inline void ops_to_host_later(Stream *s, void *host, const void *device, size_t bytes) {
    cudaStream_t stream = enter(s);
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
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
__device__ uint16_t round_master(float x, Rounding r, int64_t i) { return r.by_chance ? round_by_chance(x, r, i) : float_to_bf16(x); }
__global__ void round_kernel(uint16_t *out, const float *in, int64_t n, Rounding r) {
    const int64_t i = thread_index();
    if (i < n) { out[i] = round_master(in[i], r, i); }
}
static inline void ops_convert_float(Stream *s, void *out, const float *in, DType dtype, int64_t n, Rounding r) {
    cudaStream_t stream = enter(s);
    if (dtype == DTYPE_FP32) {
        ops_copy(s, out, in, (size_t)n * sizeof(float));
    } else if (n) {
        LAUNCH(round_kernel, blocks_for(n, THREADS), THREADS, 0, stream, (uint16_t *)out, in, n, r);
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

// order(N): positions sorted by their token, equal tokens by position; of each row of the grid, which has N tokens of its own. A position's
// place is the number of those before it, which each thread counts for itself: N^2 comparisons from shared memory, but no step that depends
// on timing.
__global__ void order_tokens_kernel(int32_t *order, const int32_t *tokens, int64_t N) {
    __shared__ int32_t tile[THREADS];
    order += blockIdx.y * N, tokens += blockIdx.y * N;
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
__device__ float factor_of_sample(const float *factors, int64_t b) { return factors ? factors[b] : 1.0f; }
template <class R>
__global__ void embedding_backward_wte_kernel(float *dwte, const R *dout, const int32_t *tokens, const int32_t *order, const float *factors, int64_t N,
                                              int64_t T, int64_t C) {
    const int64_t first = blockIdx.x, c = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    const int32_t token = tokens[order[first]];
    if (c >= C || (first && tokens[order[first - 1]] == token)) { return; }
    float sum = dwte[token * C + c];
    for (int64_t i = first; i < N && tokens[order[i]] == token; i++) {
        const float factor = factor_of_sample(factors, order[i] / T);
        if (factor != 0.0f) { sum += factor * read(dout + order[i] * C + c); }
    }
    dwte[token * C + c] = sum;
}
template <class R> __global__ void embedding_backward_wpe_kernel(float *dwpe, const R *dout, const float *factors, int64_t rows, int64_t T, int64_t C) {
    const int64_t i = thread_index(); // (t, c)
    if (i >= T * C) { return; }
    float sum = dwpe[i];
    for (int64_t b = 0; b < rows; b++) {
        const float factor = factor_of_sample(factors, b);
        if (factor != 0.0f) { sum += factor * read(dout + b * T * C + i); }
    }
    dwpe[i] = sum;
}
static inline void ops_embedding_backward(Stream *s, float *dwte, float *dwpe, const Real *dout, const int32_t *tokens, const float *factors, int64_t rows,
                                          int64_t T, int64_t C, int64_t Vp, int64_t maxT, bool accumulate_wte, bool accumulate_wpe) {
    const int64_t N = rows * T;
    if (dwte && !accumulate_wte) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
    if (dwpe && !accumulate_wpe) { ops_zero(s, dwpe, (size_t)(maxT * C) * sizeof(float)); }
    if (N == 0) { return; }
    cudaStream_t stream = enter(s);
    if (dwte) {
        int32_t *order = (int32_t *)scratch(s);
        assert(N * (int64_t)sizeof *order <= scratch_bytes(s));
        LAUNCH(order_tokens_kernel, blocks_for(N, THREADS), THREADS, 0, stream, order, tokens, N);
        const dim3 grid((unsigned)N, blocks_for(C, THREADS));
        FOR_REAL(LAUNCH((embedding_backward_wte_kernel<R>), grid, THREADS, 0, stream, dwte, (const R *)dout, tokens, order, factors, N, T, C));
    }
    if (dwpe) {
        const unsigned blocks = blocks_for(T * C, THREADS);
        FOR_REAL(LAUNCH((embedding_backward_wpe_kernel<R>), blocks, THREADS, 0, stream, dwpe, (const R *)dout, factors, rows, T, C));
    }
}

// --- sums over rows, in two steps: parts of the rows, then the parts in their order ------------------------------------
// Of rows [part * each, ...), the sums of dout * (in - mean) * rstd (left out where in is NULL), and of dout: at weights + part * stride,
// which may be NULL where in is, and at biases + part * stride.
enum { COLUMN_ROWS = 8 }; // of a block, side by side
template <class R>
__global__ void column_partials_kernel(float *weights, float *biases, int64_t stride, const R *dout, const R *in, const float *mean, const float *rstd,
                                       int64_t N, int64_t C, int64_t each) {
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
    float total = 0.0f, *to = threadIdx.y ? biases : weights; // row of threads 0 adds up the one sum, row 1 the other
    for (int y = 0; y < COLUMN_ROWS; y++) { total += sums[threadIdx.y][y][threadIdx.x]; }
    if (to) { to[blockIdx.y * stride + c] = total; }
}
__global__ void column_finish_kernel(float *dweight, float *dbias, const float *partials, int64_t parts, int64_t C, bool accumulate) {
    const int64_t c = thread_index();
    if (c >= C) { return; }
    float weight = accumulate && dweight ? dweight[c] : 0.0f, bias = accumulate ? dbias[c] : 0.0f;
    for (int64_t p = 0; p < parts; p++) { weight += partials[2 * p * C + c], bias += partials[(2 * p + 1) * C + c]; }
    if (dweight) { dweight[c] = weight; }
    dbias[c] = bias;
}
static inline void column_partials(Stream *s, float *weights, float *biases, int64_t stride, const Real *dout, const Real *in, const float *mean,
                                   const float *rstd, int64_t N, int64_t C, int64_t parts, int64_t each) {
    cudaStream_t stream = enter(s);
    if (parts == 0) { return; }
    const dim3 grid(blocks_for(C, 32), (unsigned)parts), block(32, COLUMN_ROWS);
    FOR_REAL(LAUNCH((column_partials_kernel<R>), grid, block, 0, stream, weights, biases, stride, (const R *)dout, (const R *)in, mean, rstd, N, C, each));
}
static inline void column_sums(Stream *s, float *dweight, float *dbias, const Real *dout, const Real *in, const float *mean, const float *rstd, int64_t N,
                               int64_t C, bool accumulate) {
    cudaStream_t stream = enter(s);
    float *partials = (float *)scratch(s);
    const int64_t each = max_i64(4 * COLUMN_ROWS, ceil_div(N, COLUMN_PARTS)), parts = ceil_div(N, each);
    assert(parts * 2 * C * (int64_t)sizeof(float) <= scratch_bytes(s));
    column_partials(s, partials, partials + C, 2 * C, dout, in, mean, rstd, N, C, parts, each);
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

// --- matmul ---------------------------------------------------------------------------------------------------------
#include "kernels/matmul_cuda.cuh" // products by cuBLASLt, and which algorithm computes each

// GELU(x) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3): no tanh, and no cancellation for x << 0. e^88 stays finite.
__device__ float gelu_power(float x) { return expf(fminf(-1.5957691216f * (x + 0.044715f * x * x * x), 88.0f)); } // e^-2u
template <class R> __global__ void gelu_kernel(R *out, const R *in, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { write(out + i, read(in + i) / (1.0f + gelu_power(read(in + i)))); }
}
__global__ void add_kernel(float *to, const float *x, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { to[i] += x[i]; }
}
template <class R> __global__ void gelu_backward_kernel(R *d, const R *pre_gelu, int64_t n) { // d *= GELU'(pre_gelu)
    const int64_t i = thread_index();
    if (i >= n) { return; }
    const float x = read(pre_gelu + i), e = gelu_power(x), sigmoid = 1.0f / (1.0f + e);
    write(d + i, read(d + i) * (sigmoid + x * sigmoid * (sigmoid * e) * 1.5957691216f * (1.0f + 0.134145f * x * x)));
}

// The library's GELU is taken in bf16 only: nobody says how exact it is, and the hardware's tanh, which it may use, has 11 bits. Where the
// library does not offer an epilogue (it wants pre_gelu in rows of a multiple of 8), the product comes without and a kernel follows.
static inline void ops_matmul_forward(Stream *s, Real *out, Real *gelu, const Real *in, const Real *weight, const Real *bias, int64_t N, int64_t C,
                                      int64_t OC) {
    if (N == 0) { return; }
    const Epilogue fused = {bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX, bias, out};
    if (gelu && gpu_real == DTYPE_BF16 && matmul(s, gelu, false, weight, true, in, false, fused, OC, N, C, false)) { return; }
    const Epilogue plain = {bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT, bias, NULL};
    must_be_offered(matmul(s, out, false, weight, true, in, false, plain, OC, N, C, false), N, C, OC);
    cudaStream_t stream = enter(s);
    if (gelu) { FOR_REAL(LAUNCH((gelu_kernel<R>), blocks_for(N * OC, THREADS), THREADS, 0, stream, (R *)gelu, (const R *)out, N * OC)); }
}
static inline void ops_matmul_backward_input(Stream *s, Real *din, const Real *dout, const Real *weight, const Real *pre_gelu, int64_t N, int64_t C,
                                             int64_t OC) {
    if (N == 0) { return; }
    const Epilogue fused = {CUBLASLT_EPILOGUE_DGELU, NULL, pre_gelu}, plain = {CUBLASLT_EPILOGUE_DEFAULT, NULL, NULL};
    if (pre_gelu && gpu_real == DTYPE_BF16 && matmul(s, din, false, weight, false, dout, false, fused, C, N, OC, false)) { return; }
    must_be_offered(matmul(s, din, false, weight, false, dout, false, plain, C, N, OC, false), N, OC, C);
    cudaStream_t stream = enter(s);
    if (pre_gelu) { FOR_REAL(LAUNCH((gelu_backward_kernel<R>), blocks_for(N * C, THREADS), THREADS, 0, stream, (R *)din, (const R *)pre_gelu, N * C)); }
}
static inline void ops_matmul_backward_weight(Stream *s, float *dweight, float *dbias, const Real *dout, const Real *in, int64_t N, int64_t C, int64_t OC,
                                              bool accumulate) {
    if (N == 0) { // sums of nothing
        if (!accumulate) { ops_zero(s, dweight, (size_t)(OC * C) * sizeof(float)); }
        if (!accumulate && dbias) { ops_zero(s, dbias, (size_t)OC * sizeof(float)); }
        return;
    }
    float *sums = accumulate ? (float *)scratch(s) : dbias; // the library only writes dbias: what is to be added waits in the scratch
    const Epilogue fused = {CUBLASLT_EPILOGUE_BGRADB, sums, NULL}, plain = {CUBLASLT_EPILOGUE_DEFAULT, NULL, NULL};
    if (dbias && matmul(s, dweight, true, in, false, dout, true, fused, C, OC, N, accumulate)) {
        cudaStream_t stream = enter(s);
        if (accumulate) { LAUNCH(add_kernel, blocks_for(OC, THREADS), THREADS, 0, stream, dbias, sums, OC); }
        return;
    }
    if (dbias) { column_sums(s, NULL, dbias, dout, NULL, NULL, NULL, N, OC, accumulate); }
    must_be_offered(matmul(s, dweight, true, in, false, dout, true, plain, C, OC, N, accumulate), N, C, OC);
}

template <class R> __global__ void residual_kernel(R *out, const R *a, const R *b, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { write(out + i, read(a + i) + read(b + i)); }
}
static inline void ops_residual(Stream *s, Real *out, const Real *a, const Real *b, int64_t n) {
    cudaStream_t stream = enter(s);
    if (n) { FOR_REAL(LAUNCH((residual_kernel<R>), blocks_for(n, THREADS), THREADS, 0, stream, (R *)out, (const R *)a, (const R *)b, n)); }
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
static inline void ops_classifier(Stream *s, float *losses, Real *dx, float *dwte, Real *dlogits, const Real *x, const Real *wte, const int32_t *targets,
                                  int64_t N, int64_t each, int64_t C, int64_t V, int64_t Vp, float scale, bool accumulate) {
    if (N == 0 && dwte && !accumulate) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
    const int64_t room = dlogits ? N : scratch_bytes(s) / (Vp * (int64_t)ops_real_bytes());
    for (int64_t n = 0, rows; n < N; n += rows) {
        rows = min_i64(min_i64(min_i64(CLASSIFIER_ROWS, room), N - n), each - n % each);
        Real *logits = dlogits ? real_at(dlogits, n * Vp) : (Real *)scratch(s);
        assert(dlogits || rows * Vp * (int64_t)ops_real_bytes() <= scratch_bytes(s));
        ops_matmul_forward(s, logits, NULL, real_at_const(x, n * C), wte, NULL, rows, C, Vp);
        cudaStream_t stream = enter(s);
        FOR_REAL(LAUNCH((classifier_kernel<R>), (unsigned)rows, THREADS, 0, stream, losses + n, (R *)logits, targets + n, V, Vp, scale, dx || dwte || dlogits));
        if (dwte) { ops_matmul_backward_weight(s, dwte + n / each * Vp * C, NULL, logits, real_at_const(x, n * C), rows, C, Vp, accumulate || n % each); }
        if (dx) { ops_matmul_backward_input(s, real_at(dx, n * C), logits, wte, NULL, rows, C, Vp); }
    }
}

static int64_t attention_scratch_bytes(OpsShape shape); // attention_cuda.cuh
static int64_t clip_scratch_bytes(OpsShape shape);      // clip_cuda.cuh
static inline size_t ops_workspace_bytes(OpsShape shape, int threads) {
    (void)threads;
    const int64_t N = shape.rows * shape.T, widest = max_i64(4 * shape.C, shape.Vp), real = (int64_t)ops_real_bytes();
    const int64_t columns = COLUMN_PARTS * 2 * widest * 4, order = N * 4, attention = attention_scratch_bytes(shape),
                  logits = min_i64(min_i64(N, CLASSIFIER_ROWS), shape.logits) * shape.Vp * real;
    return (size_t)(MATMUL_WORKSPACE +
                    max_i64(max_i64(SCRATCH_LEAST, clip_scratch_bytes(shape)), max_i64(max_i64(columns, order), max_i64(attention, logits))));
}

// --- optimizers and norms ---------------------------------------------------------------------------------------------
__global__ void adamw_kernel(float *master, uint16_t *rounded, float *m, float *v, const float *grad, int64_t n, OptimizerStep o, float unbias_m,
                             float unbias_v) {
    const int64_t i = thread_index();
    if (i >= n) { return; }
    const float g = grad[i] * o.grad_scale, first = o.beta1 * m[i] + (1.0f - o.beta1) * g, second = o.beta2 * v[i] + (1.0f - o.beta2) * g * g;
    const float x = master[i] - o.lr * (first * unbias_m / (sqrtf(second * unbias_v) + o.eps) + o.weight_decay * master[i]);
    m[i] = first, v[i] = second, master[i] = x;
    if (rounded) { rounded[i] = round_master(x, o.rounding, i); }
}
static inline void ops_adamw(Stream *s, float *master, void *param, DType dtype, float *m, float *v, const float *grad, int64_t n, OptimizerStep o) {
    cudaStream_t stream = enter(s);
    const float unbias_m = (float)(1.0 / (1.0 - pow((double)o.beta1, (double)o.step)));
    const float unbias_v = (float)(1.0 / (1.0 - pow((double)o.beta2, (double)o.step)));
    uint16_t *rounded = dtype == DTYPE_BF16 ? (uint16_t *)param : NULL;
    if (n) { LAUNCH(adamw_kernel, blocks_for(n, THREADS), THREADS, 0, stream, master, rounded, m, v, grad, n, o, unbias_m, unbias_v); }
}
__global__ void sgd_kernel(float *master, uint16_t *rounded, float *b, const float *grad, int64_t n, OptimizerStep o) {
    const int64_t i = thread_index();
    if (i >= n) { return; }
    const float momentum = o.momentum * b[i] + grad[i] * o.grad_scale + o.weight_decay * master[i], x = master[i] - o.lr * momentum;
    b[i] = momentum, master[i] = x;
    if (rounded) { rounded[i] = round_master(x, o.rounding, i); }
}
static inline void ops_sgd(Stream *s, float *master, void *param, DType dtype, float *b, const float *grad, int64_t n, OptimizerStep o) {
    cudaStream_t stream = enter(s);
    uint16_t *rounded = dtype == DTYPE_BF16 ? (uint16_t *)param : NULL;
    if (n) { LAUNCH(sgd_kernel, blocks_for(n, THREADS), THREADS, 0, stream, master, rounded, b, grad, n, o); }
}

// Element e of a chunk goes to the sum of lane e mod 32, and the sums of the lanes are added in order, as on the CPU: the same bits,
// since the square of an fp32 number is exact in fp64. A warp takes SQUARE_CHUNKS chunks at a time; then each lane adds up one
// of them. The terms of a block meet in shared memory, those of all blocks in *sum; sums of integers have no order.
enum { SQUARE_CHUNKS = 8, SQUARE_BLOCKS = 1024 };
__device__ void exact_atomic_add(int64_t *limb, int64_t part) {
    if (part) { atomicAdd((unsigned long long *)limb, (unsigned long long)part); }
}
__device__ void exact_add_shared(ExactSum *sum, double x) {
    const ExactTerm term = exact_term(x);
    if (term.first < 0) {
        exact_atomic_add(&sum->strange, 1);
        return;
    }
    for (int i = 0; i < 3; i++) { exact_atomic_add(&sum->limb[term.first + i], term.part[i]); }
}
__global__ void square_sum_kernel(ExactSum *sum, const float *x, int64_t n, int64_t chunk, int64_t chunks, double scale) {
    __shared__ ExactSum block;
    __shared__ double of_lanes[WARPS][SQUARE_CHUNKS][33]; // 33: the lanes of the second part read from different banks
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < EXACT_LIMBS; i += THREADS) { block.limb[i] = 0; }
    if (threadIdx.x == 0) { block.strange = 0; }
    __syncthreads();
    const int64_t stride = (int64_t)gridDim.x * WARPS * SQUARE_CHUNKS;
    for (int64_t first = ((int64_t)blockIdx.x * WARPS + warp) * SQUARE_CHUNKS; first < chunks; first += stride) {
        const int count = (int)least(SQUARE_CHUNKS, chunks - first);
        for (int c = 0; c < count; c++) {
            const int64_t end = least((first + c + 1) * chunk, n);
            double squares = 0.0;
            for (int64_t e = (first + c) * chunk + lane; e < end; e += 32) { squares += (double)x[e] * (double)x[e]; }
            of_lanes[warp][c][lane] = squares;
        }
        __syncwarp();
        if (lane < count) {
            double total = 0.0;
            for (int l = 0; l < 32; l++) { total += of_lanes[warp][lane][l]; }
            exact_add_shared(&block, scale * total);
        }
        __syncwarp();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < EXACT_LIMBS; i += THREADS) { exact_atomic_add(&sum->limb[i], block.limb[i]); }
    if (threadIdx.x == 0) { exact_atomic_add(&sum->strange, block.strange); }
}
static inline void ops_square_sum(Stream *s, ExactSum *sum, const float *x, int64_t n, int64_t chunk, double scale) {
    cudaStream_t stream = enter(s);
    const int64_t chunks = ceil_div(n, chunk);
    const int64_t blocks = min_i64(SQUARE_BLOCKS, ceil_div(chunks, WARPS * SQUARE_CHUNKS));
    if (n) { LAUNCH(square_sum_kernel, (unsigned)blocks, THREADS, 0, stream, sum, x, n, chunk, chunks, scale); }
}
static inline void ops_accumulate(Stream *s, float *out, const float *in, int64_t n) {
    cudaStream_t stream = enter(s);
    if (n) { LAUNCH(add_kernel, blocks_for(n, THREADS), THREADS, 0, stream, out, in, n); }
}

#include "kernels/quantize_cuda.cuh" // the rest of the contract

#endif
