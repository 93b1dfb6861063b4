// device_cuda.cuh: the GPU as the operations use it: its stream, recorded work, memory, kernel
// launches, and the helpers that all kernels share. The operations are in ops_cuda.cuh and the
// files that it names.
//
// Order      There is one CUDA stream, and every call returns at once. The host may read results
//            only after ops_wait(), or through ops_to_host() and similar functions, which wait.
//            Messages move (Stream's progress) at each call and while this rank waits.
// Workspace  [MATMUL_WORKSPACE bytes for cuBLASLt | scratch for the running call]
// Compilers  nvcc, or g++ with test/emu.h in place of CUDA. So launches use LAUNCH, and kernels use
//            only what test/emu.h supports.
#ifndef DEVICE_CUDA_CUH
#define DEVICE_CUDA_CUH

#include "ops/cpu/update_cpu.h" // optimizers on the host; the contract (ops.h)
#include <ctype.h>              // tolower, isalnum
#include <sched.h>              // sched_yield

#ifdef __CUDACC__
#include <cublasLt.h>          // matrix products
#include <cuda_bf16.h>         // __nv_bfloat16
#include <cuda_profiler_api.h> // --profile-steps
#include <nvtx3/nvToolsExt.h>  // names of ranges for profilers
#define LAUNCH(kernel, grid, block, shared, stream, ...)                                           \
    do {                                                                                           \
        (kernel)<<<grid, block, shared, stream>>>(__VA_ARGS__);                                    \
        CUDA_CHECK(cudaGetLastError());                                                            \
    } while (0)
#define DYNAMIC_SHARED(type, name)                                                                 \
    extern __shared__ __align__(16) unsigned char dynamic_shared[];                                \
    type *name = (type *)(void *)dynamic_shared
#define COPY_BYTES ((size_t)256 << 20) // the L2 cache of a B200 has 126 MB
#define UNROLL _Pragma("unroll")       // arrays stay in registers only if all indices are constants
#else
#define EMU_CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())
#include "test/emu.h"
#define MATMUL_CALLS 1
#define COPY_BYTES ((size_t)1 << 20)
#endif

#ifndef MATMUL_WORKSPACE // tests make these smaller
#define MATMUL_WORKSPACE (32 << 20)
// Rows of a chunk. Each chunk holds rows x Vp logits, and reads and writes dwte once.
#define CLASSIFIER_ROWS 4096
// Bytes of a row of logits that a block keeps: two blocks are on a multiprocessor.
#define LOGITS_KEPT (shared_most() / 2 - 1024)
#endif
#ifdef USE_TF32
#define FP32_PRODUCTS CUBLAS_COMPUTE_32F_FAST_TF32
#else
#define FP32_PRODUCTS CUBLAS_COMPUTE_32F
#endif

enum {
    THREADS = 256,        // threads of a block, unless a kernel says otherwise
    WARPS = THREADS / 32, // warps of such a block
    RECORDINGS = 4096,    // number of recordings that are kept
    RECORDING_KEY = 256,  // largest key, in bytes
    PACE = 128,           // operations between two events of keep_pace()
    EACH = 8,          // neighbouring numbers that a thread takes, where it can: 16 bytes in bf16
    GRID_MOST = 65535, // blocks of a grid in its second and third dimension
    SCRATCH_LEAST = 1 << 16 // smallest scratch, in bytes, for data moved in pieces
};
#define ALL_LANES 0xffffffffu

// -------------------------------------------------------------------------------------------------
// The device part of a Stream

// Recorded work. It runs normally the first time, so that libraries get loaded. The second time it
// is captured as a CUDA graph.
typedef struct {
    unsigned char key[RECORDING_KEY];
    size_t bytes; // size of the key; 0 if this entry is free
    cudaGraphExec_t graph;
} Recording;
typedef struct {
    cudaStream_t stream;
    struct Matmuls *matmuls; // ops/cuda/matmul_cuda.cuh
    Recording recordings[RECORDINGS];
    Recording *recording; // the one being captured; NULL if none is
    int64_t operations;   // number of operations started
    cudaEvent_t paces[2]; // events recorded alternately, after PACE operations each
    cudaEvent_t reached;  // event for which ops_follow() makes another stream wait
    cudaEvent_t loads;    // the loads of experts are on the host
} Gpu;

static DType gpu_real = DTYPE_FP32; // type of a Real
static inline Gpu *gpu_of(const Stream *s) { return (Gpu *)s->device; }
static inline cudaStream_t stream_of(const Stream *s) { return gpu_of(s)->stream; }

#define CUDA_CHECK(call) cuda_check((call), #call)
static inline void cuda_check(cudaError_t error, const char *call) {
    if (error != cudaSuccess) {
        die(EXIT_RESOURCES, NULL, "%s: %s", call, cudaGetErrorString(error));
    }
}
// Returns whether memory was allocated. Running out of it is for the caller to report. Any other
// error, such as that of an earlier kernel, which CUDA reports at any later call, ends the program.
#define CUDA_ALLOCATED(call) cuda_allocated((call), #call)
static inline bool cuda_allocated(cudaError_t error, const char *call) {
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError(); // CUDA keeps it, and the check after the next launch would report it
        return false;
    }
    cuda_check(error, call);
    return true;
}
// Returns whether a queried stream or event is done. "Not ready" is no error, but CUDA keeps it as
// the last error, and the check after the next launch would report it.
static inline bool cuda_done(cudaError_t answer) {
    if (answer == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    cuda_check(answer, "waiting for the device");
    return true;
}

static struct Matmuls *matmuls_open(void); // ops/cuda/matmul_cuda.cuh
static void matmuls_close(struct Matmuls *m);
static inline Gpu *gpu_stream_open(void) {
    Gpu *gpu = new_array(Gpu, 1, "the device's handles");
    CUDA_CHECK(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&gpu->paces[i], cudaEventDisableTiming));
    }
    CUDA_CHECK(cudaEventCreateWithFlags(&gpu->reached, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&gpu->loads, cudaEventDisableTiming));
    return gpu;
}
static inline void gpu_stream_close(Gpu *gpu) {
    for (int i = 0; i < 2; i++) { CUDA_CHECK(cudaEventDestroy(gpu->paces[i])); }
    CUDA_CHECK(cudaEventDestroy(gpu->reached));
    CUDA_CHECK(cudaEventDestroy(gpu->loads));
    CUDA_CHECK(cudaStreamDestroy(gpu->stream));
    free(gpu);
}
// Loads kernels when the program starts, instead of at their first launch. Loading waits for the
// device, and the device may be waiting for a message that this rank has not sent yet. This must
// happen before MPI starts, since MPI may be the first to use CUDA.
__attribute__((constructor)) static void load_kernels_eagerly(void) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}
static inline void ops_open(Stream *s, int place, DType real) {
    int devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || !devices) {
        die(EXIT_RESOURCES, "./train_gpt runs on the CPU", "no GPU is at hand: %s",
            cudaGetErrorString(error));
    }
    CUDA_CHECK(cudaSetDevice(place % devices));
    Gpu *gpu = gpu_stream_open();
    gpu->matmuls = matmuls_open();
    gpu_real = real;
    s->device = gpu;
}
static inline void ops_close(Stream *s) {
    Gpu *gpu = gpu_of(s);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int i = 0; i < RECORDINGS; i++) {
        if (gpu->recordings[i].graph) {
            CUDA_CHECK(cudaGraphExecDestroy(gpu->recordings[i].graph));
        }
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
    if (link->device) { gpu_stream_close(gpu_of(link)); }
    memset(link, 0, sizeof *link);
}
static inline void ops_follow(Stream *s, Stream *after) {
    const cudaEvent_t reached = gpu_of(after)->reached;
    CUDA_CHECK(cudaEventRecord(reached, stream_of(after)));
    CUDA_CHECK(cudaStreamWaitEvent(stream_of(s), reached, 0));
}

// Dense bf16 peaks in TFLOP/s, by the first words of the device's name. They are from NVIDIA's
// datasheets, where figures "with sparsity" are twice these. Those of GeForce and RTX cards are
// from the white papers of Blackwell, Ada and Ampere, for sums in fp32: cores x boost clock x 4, or
// x 8 for workstation cards.
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
    for (int i = 0; i < LENGTH_OF(gpu_peaks) && *bf16_flops == 0; i++) {
        const size_t n = strlen(gpu_peaks[i].name);
        if (!strncmp(device.name, gpu_peaks[i].name, n) &&
            !isalnum((unsigned char)device.name[n])) {
            *bf16_flops = 1e12 * gpu_peaks[i].tflops;
        }
    }
    return device.name;
}

// The maker's figure stands for it (ops_device).
static inline OpsPeak ops_peak(const Stream *s) {
    const OpsPeak unknown = {"", 0, 0};
    (void)s;
    return unknown;
}
static inline size_t ops_copy_bytes(void) { return COPY_BYTES; }

// Reads the cores from the PCI data of Linux.
static inline void ops_near_cores(char *list, size_t bytes) {
    int number;
    char bus[64] = "", path[160];
    CUDA_CHECK(cudaGetDevice(&number));
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, number));
    for (char *c = bus; *c; c++) { *c = (char)tolower((unsigned char)*c); }
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/local_cpulist", bus);
    snprintf(list, bytes, "%s", "");
    FILE *f = fopen(path, "r");
    if (!f) { return; } // no /sys, or a virtual machine that hides it
    if (!fgets(list, (int)bytes, f)) { *list = 0; }
    fclose(f);
    list[strcspn(list, "\n")] = 0;
}
static inline DType ops_compute(void) { return gpu_real; }
static inline void ops_compute_in(DType compute) { (void)compute; }
static inline const char *ops_products(void) { return "cuBLASLt"; }

// Limits how far the host runs ahead of the device: at most two paces. After some thousand launches
// the driver would block the host, and then nothing would watch for lost ranks.
static inline void keep_pace(Stream *s) {
    Gpu *gpu = gpu_of(s);
    // captured work is not running
    if (gpu->recording || ++gpu->operations % PACE) { return; }
    cudaEvent_t pace = gpu->paces[gpu->operations / PACE % 2];
    while (!cuda_done(cudaEventQuery(pace))) {
        if (s->progress) { s->progress(); }
    }
    CUDA_CHECK(cudaEventRecord(pace, gpu->stream));
}
// Every operation starts with this: it lets messages move, and returns the stream for its work.
static inline cudaStream_t enter(Stream *s) {
    if (s->progress) { s->progress(); }
    keep_pace(s);
    return stream_of(s);
}
// Between two questions to the device
static inline void wait_a_turn(Stream *s, int turn) {
    if (s->progress) { s->progress(); }
    if (turn > 200) { sched_yield(); } // ranks that share cores wait for each other
}
static inline void ops_wait(Stream *s) {
    for (int turn = 0; !cuda_done(cudaStreamQuery(stream_of(s))); turn++) { wait_a_turn(s, turn); }
}
// Notes that the loads of experts are written; not in recorded work, whose events the host cannot
// wait for.
static inline void mark_loads(Stream *s) {
    if (!gpu_of(s)->recording) { CUDA_CHECK(cudaEventRecord(gpu_of(s)->loads, stream_of(s))); }
}
static inline void ops_wait_loads(Stream *s) {
    for (int turn = 0; !cuda_done(cudaEventQuery(gpu_of(s)->loads)); turn++) {
        wait_a_turn(s, turn);
    }
}

// Forgets the error of a call that was refused. Ends the program (EXIT_RESOURCES) if the device
// itself has failed: then every call is refused, and only CUDA knows why.
static inline void forget_refused_call(Stream *s) {
    cudaGetLastError();
    // a stream that is captured may not be asked; what is captured has run before
    if (!gpu_of(s)->recording) { (void)cuda_done(cudaStreamQuery(stream_of(s))); }
}
// Returns the entry of a key, known or new, among 16 entries chosen by its checksum; NULL if all of
// them hold other keys.
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
    Gpu *gpu = gpu_of(s);
    Recording *r = find_recording(gpu, key, bytes);
    if (r && r->graph) {
        CUDA_CHECK(cudaGraphLaunch(r->graph, stream));
        return false;
    }
    if (r && r->bytes) { // the second time
        gpu->recording = r;
        // relaxed mode, because messages move during the capture
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    } else if (r) {
        memcpy(r->key, key, bytes);
        r->bytes = bytes;
    }
    return true;
}
static inline void ops_repeat_end(Stream *s) {
    Gpu *gpu = gpu_of(s);
    if (!gpu->recording) { return; }
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamEndCapture(gpu->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&gpu->recording->graph, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaGraphLaunch(gpu->recording->graph, gpu->stream));
    gpu->recording = NULL;
}

static inline OpsMark *ops_mark_make(void) { // a mark is a CUDA event
    cudaEvent_t e;
    CUDA_CHECK(cudaEventCreateWithFlags(&e, cudaEventDefault));
    return (OpsMark *)e;
}
static inline void ops_mark_free(OpsMark *m) { CUDA_CHECK(cudaEventDestroy((cudaEvent_t)m)); }
static inline void ops_mark(Stream *s, OpsMark *m) {
    CUDA_CHECK(cudaEventRecord((cudaEvent_t)m, enter(s)));
}
static inline double ops_mark_seconds(Stream *s, OpsMark *from, OpsMark *to) {
    float ms = 0;
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
static inline void ops_profiler(bool on) {
    CUDA_CHECK(on ? cudaProfilerStart() : cudaProfilerStop());
}

static inline void *scratch(Stream *s) { return (char *)s->workspace + MATMUL_WORKSPACE; }
static inline int64_t scratch_bytes(const Stream *s) {
    return (int64_t)s->workspace_bytes - MATMUL_WORKSPACE;
}

// Runs the arguments once, with `Type` defined as the type of an element in memory.
#define FOR_DTYPE(Type, dtype, ...)                                                                \
    do {                                                                                           \
        if ((dtype) == DTYPE_BF16) {                                                               \
            typedef __nv_bfloat16 Type;                                                            \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            typedef float Type;                                                                    \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)
#define FOR_REAL(...) FOR_DTYPE(R, gpu_real, __VA_ARGS__) // R: the type of a Real

static inline unsigned blocks_for(int64_t n, int64_t each) { return (unsigned)ceil_div(n, each); }

// Converts an argument to the type of a kernel's parameter. A Real has the
// type that the kernel is compiled for.
template <class To, class From> static inline To converted(From x) { return x; }
template <class To> static inline To converted(Real *p) { return (To)p; }
template <class To> static inline To converted(const Real *p) {
    return static_cast<To>(static_cast<const void *>(p));
}
static inline int shared_most(void) { // bytes of a block's dynamic shared memory
    int number, bytes;
    CUDA_CHECK(cudaGetDevice(&number));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, number));
    return bytes;
}
// Lets the blocks of a kernel have more dynamic shared memory than the 48 KB that every launch may
// ask for. Ends the program (EXIT_INPUT) if the GPU has less.
template <class... Parameters>
static inline void allow_shared(void (*kernel)(Parameters...), int bytes) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaErrorInvalidValue) {
        die(EXIT_INPUT, "choose a smaller model, or smaller heads",
            "a kernel needs %d bytes of shared memory in a block, more than this GPU has", bytes);
    }
    cuda_check(error, "cudaFuncSetAttribute");
}
// Starts a kernel on the stream. Does nothing if the grid is empty. shared: bytes of dynamic shared
// memory of a block. Ends the program (EXIT_INPUT) if the GPU has less, or no grids of this shape.
template <class... Parameters, class... Arguments>
static inline void launch_with(Stream *s, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                               int shared, Arguments... arguments) {
    cudaStream_t stream = enter(s);
    if (!grid.x || !grid.y || !grid.z) { return; }
    if (grid.y > GRID_MOST || grid.z > GRID_MOST) {
        die(EXIT_INPUT, "choose a smaller --micro-batch",
            "a kernel for %u x %u rows and heads; a GPU takes at most %d of each", grid.z, grid.y,
            (int)GRID_MOST);
    }
    if (shared) { allow_shared(kernel, shared); }
    LAUNCH(kernel, grid, block, shared, stream, converted<Parameters>(arguments)...);
}
// Starts a kernel with blocks of THREADS threads.
template <class... Parameters, class... Arguments>
static inline void launch(Stream *s, void (*kernel)(Parameters...), dim3 grid,
                          Arguments... arguments) {
    launch_with(s, kernel, grid, THREADS, 0, arguments...);
}
#define LAUNCH_REAL(s, kernel, grid, ...) FOR_REAL(launch(s, kernel<R>, grid, __VA_ARGS__))

// --- inside kernels ------------------------------------------------------------------------------
__device__ int64_t thread_index() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
// The number of this thread's warp, with WARPS in a block.
__device__ int64_t warp_index() { return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; }
__device__ int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ float read(const float *p) { return *p; }
__device__ float read(const __nv_bfloat16 *p) { return __bfloat162float(*p); }
__device__ float read(const uint16_t *p) { return bf16_to_float(*p); }
__device__ void write(float *p, float x) { *p = x; }
__device__ void write(__nv_bfloat16 *p, float x) { *p = __float2bfloat16(x); }
template <class T> __device__ void write(T *p, T x) { *p = x; }
// N numbers that one instruction reads or writes, or several of 16 bytes each if they are longer.
template <int N, class T> struct Vector {
    enum { EACH = N * sizeof(T) < 16 ? N : 16 / sizeof(T) };
    struct alignas(EACH * sizeof(T)) Part {
        T x[EACH];
    };
};
template <int N, class T> __device__ bool lies_in_parts(const T *p) {
    return (uintptr_t)p % sizeof(typename Vector<N, T>::Part) == 0;
}
// x(N) = the numbers from p on, which lie in parts
template <int N, class T> __device__ void read_parts(float *x, const T *p) {
    typedef Vector<N, T> V;
    UNROLL for (int j = 0; j < N; j += V::EACH) {
        const typename V::Part part = *(const typename V::Part *)(p + j);
        UNROLL for (int i = 0; i < V::EACH; i++) { x[j + i] = read(&part.x[i]); }
    }
}
// x(N) = the n numbers from p on, padded if n < N
template <int N, class T>
__device__ void read_numbers(float *x, const T *p, int64_t n, float padding = 0.0f) {
    if (n >= N && lies_in_parts<N>(p)) {
        read_parts<N>(x, p);
        return;
    }
    UNROLL for (int j = 0; j < N; j++) { x[j] = j < n ? read(p + j) : padding; }
}
// The first n of x(N) are written from p on, in p's type.
template <int N, class T, class From>
__device__ void write_numbers(T *p, const From *x, int64_t n) {
    typedef Vector<N, T> V;
    if (n >= N && lies_in_parts<N>(p)) {
        UNROLL for (int j = 0; j < N; j += V::EACH) {
            typename V::Part part;
            UNROLL for (int i = 0; i < V::EACH; i++) { write(&part.x[i], x[j + i]); }
            *(typename V::Part *)(p + j) = part;
        }
        return;
    }
    UNROLL for (int j = 0; j < N; j++) {
        if (j < n) { write(p + j, x[j]); }
    }
}
template <class R> __device__ float rounded(float x) { // as memory keeps it
    R kept;
    write(&kept, x);
    return read(&kept);
}
// out = f(a, b), element by element. b may be NULL; out may be a or b.
template <class F, class Out, class In>
__global__ void map_kernel(F f, Out *out, const In *a, const In *b, int64_t n) {
    const int64_t i = thread_index() * EACH;
    float x[EACH], y[EACH] = {};
    if (i >= n) { return; }
    read_numbers<EACH>(x, a + i, n - i);
    if (b) { read_numbers<EACH>(y, b + i, n - i); }
    UNROLL for (int j = 0; j < EACH; j++) { x[j] = f(x[j], y[j]); }
    write_numbers<EACH>(out + i, x, n - i);
}
template <class Out, class In, class F>
static inline void launch_map(Stream *s, F f, void *out, const void *a, const void *b, int64_t n) {
    launch(s, map_kernel<F, Out, In>, blocks_for(n, THREADS * EACH), f, (Out *)out, (const In *)a,
           (const In *)b, n);
}
template <class F>
static inline void map_reals(Stream *s, F f, Real *out, const Real *a, const Real *b, int64_t n) {
    FOR_REAL(launch_map<R, R>(s, f, out, a, b, n));
}
struct Add {
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct Scale {
    float by;
    __device__ float operator()(float x, float) const { return by * x; }
};
// EACH numbers of a row of C: a thread's share of an (N, C) array.
typedef struct {
    int64_t n, c;
} RowPart;
static inline unsigned row_part_blocks(int64_t N, int64_t C) {
    return blocks_for(N * ceil_div(C, EACH), THREADS);
}
__device__ RowPart row_part(int64_t C) {
    const int64_t parts = (C + EACH - 1) / EACH, i = thread_index();
    return {i / parts, i % parts * EACH};
}
template <class T> __device__ T warp_sum(T x) { // gives the same bits in all lanes
    for (int d = 16; d > 0; d >>= 1) { x += __shfl_xor_sync(ALL_LANES, x, d); }
    return x;
}
// Reduces x over each group of `lanes` adjacent lanes, a power of two.
__device__ float lanes_reduce(float x, int lanes, bool maximum) {
    for (int d = lanes / 2; d > 0; d >>= 1) {
        const float other = __shfl_xor_sync(ALL_LANES, x, d);
        x = maximum ? fmaxf(x, other) : x + other;
    }
    return x;
}
// Reduces x over a block, whose number of warps is a power of two. All threads must call it.
__device__ float block_reduce(float x, bool maximum) {
    __shared__ float part[32];
    const int warps = (int)blockDim.x / 32;
    x = lanes_reduce(x, 32, maximum);
    if (threadIdx.x % 32 == 0) { part[threadIdx.x / 32] = x; }
    __syncthreads();
    x = lanes_reduce(part[threadIdx.x % (unsigned)warps], warps, maximum);
    __syncthreads(); // the next call overwrites part
    return x;
}

// --- memory and precision ------------------------------------------------------------------------
static inline size_t ops_real_bytes(void) { return dtype_size(gpu_real); }
static inline Real *real_at(Real *p, int64_t elements) {
    return (Real *)((char *)p + elements * (int64_t)ops_real_bytes());
}
static inline const Real *real_at_const(const Real *p, int64_t elements) {
    return (const Real *)((const char *)p + elements * (int64_t)ops_real_bytes());
}

static inline void *ops_alloc(size_t bytes) {
    void *p = NULL;
    if (!CUDA_ALLOCATED(cudaMalloc(&p, bytes ? bytes : 1))) { return NULL; }
    CUDA_CHECK(cudaMemset(p, 0, bytes));
    CUDA_CHECK(cudaDeviceSynchronize());
    return p;
}
static inline void ops_free(void *p) { CUDA_CHECK(cudaFree(p)); }
static inline void *ops_alloc_host(size_t bytes) {
    void *p = NULL;
    return CUDA_ALLOCATED(cudaMallocHost(&p, bytes ? bytes : 1)) ? memset(p, 0, bytes) : NULL;
}
static inline void ops_free_host(void *p) {
    if (p) { CUDA_CHECK(cudaFreeHost(p)); }
}
// One allocation of exactly this size. Allocators that round pinned memory up to a power of two may
// take up to twice as much.
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
// An estimate: it subtracts what graphs, libraries and NCCL allocate in the first steps.
static inline double ops_memory_available(void) {
    size_t there, total;
    CUDA_CHECK(cudaMemGetInfo(&there, &total));
    return (double)there - (double)total / 64;
}

static inline void ops_copy(Stream *s, void *to, const void *from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, enter(s)));
}
static inline void ops_zero(Stream *s, void *p, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, enter(s)));
}
static inline void ops_from_host(Stream *s, void *device, const void *host, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, enter(s)));
}
static inline void ops_to_host_later(Stream *s, void *host, const void *device, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, enter(s)));
}
static inline void ops_to_host(Stream *s, void *host, const void *device, size_t bytes) {
    ops_wait(s); // lets messages move, which the copy itself would not
    ops_to_host_later(s, host, device, bytes);
    ops_wait(s);
}

// Converts n numbers on a stream of the caller's.
template <class Out, class In>
static inline void convert_on(cudaStream_t stream, Out *out, const In *in, int64_t n) {
    const Scale as_they_are = {1.0f};
    LAUNCH((map_kernel<Scale, Out, In>), blocks_for(n, THREADS * EACH), THREADS, 0, stream,
           as_they_are, out, in, (const In *)NULL, n);
}
__device__ uint16_t round_master(float x, Rounding r, int64_t i) {
    return r.stochastic ? round_stochastic(x, r, i) : float_to_bf16(x);
}
__global__ void round_kernel(uint16_t *out, const float *in, int64_t n, Rounding r) {
    const int64_t i = thread_index() * EACH;
    float x[EACH];
    uint16_t y[EACH];
    if (i >= n) { return; }
    read_numbers<EACH>(x, in + i, n - i);
    UNROLL for (int j = 0; j < EACH; j++) { y[j] = round_master(x[j], r, i + j); }
    write_numbers<EACH>(out + i, y, n - i);
}
static inline void ops_convert_float(Stream *s, void *out, const float *in, DType dtype, int64_t n,
                                     Rounding r) {
    if (dtype == DTYPE_FP32) {
        ops_copy(s, out, in, (size_t)n * sizeof(float));
    } else {
        launch(s, round_kernel, blocks_for(n, THREADS * EACH), (uint16_t *)out, in, n, r);
    }
}
static inline void ops_reals_to_host(Stream *s, float *host, const Real *device, int64_t n) {
    const int64_t piece = scratch_bytes(s) / (int64_t)sizeof(float);
    for (int64_t i = 0; i < n; i += piece) {
        const int64_t count = min_i64(piece, n - i);
        FOR_REAL(
            convert_on(enter(s), (float *)scratch(s), (const R *)real_at_const(device, i), count));
        ops_to_host(s, host + i, scratch(s), (size_t)count * sizeof(float));
    }
}

#endif
