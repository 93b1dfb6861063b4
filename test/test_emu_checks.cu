// test_emu_checks.cu: what the checks of each access find (emu_checks.cc). Each kernel below is
// there twice: as it should be, which runs to its end, and with one fault, which ends the program
// with a message that names the kernel, the block, the thread and the line.
#include "base/base.h"
#include "test/emu.h"
#include "harness.h"

enum { THREADS = 128, PART = 1024 }; // PART: bytes of a tensor
static cudaStream_t stream() {
    cudaStream_t s;
    assert_int_equal(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    return s;
}
static char *device(size_t bytes) {
    void *p = NULL;
    assert_int_equal(cudaMalloc(&p, bytes), cudaSuccess);
    return (char *)p;
}
static float *zeros(size_t n) {
    char *p = device(n * sizeof(float));
    cudaMemset(p, 0, n * sizeof(float));
    cudaDeviceSynchronize();
    return (float *)(void *)p;
}
template <class... P, class... A>
static void launch_of(void (*kernel)(P...), int blocks, int shared, A... arguments) {
    cudaStream_t s = stream();
    LAUNCH(kernel, (unsigned)blocks, THREADS, (size_t)shared, s, arguments...);
    cudaStreamSynchronize(s);
    cudaStreamDestroy(s);
}

// --- races ---------------------------------------------------------------------------------------
// Each thread takes what another one has put there.
template <bool BARRIER> __global__ void shared_race_kernel(float *x) {
    __shared__ float part[THREADS];
    x += blockIdx.x * THREADS;
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    const float other = part[THREADS - 1 - threadIdx.x];
    if (BARRIER) { __syncthreads(); }
    part[threadIdx.x] = other; // who has not read yet?
    x[threadIdx.x] = part[threadIdx.x];
}
template <bool BARRIER> __global__ void warp_race_kernel(float *x) {
    DYNAMIC_SHARED(float, part);
    part[threadIdx.x] = x[threadIdx.x];
    if (BARRIER) {
        __syncwarp();
    } else {
        x[threadIdx.x] = __shfl_xor_sync(~0u, x[threadIdx.x], 1); // waits, but orders nothing
    }
    x[threadIdx.x] = part[threadIdx.x ^ 1];
}
template <bool OWN> __global__ void block_race_kernel(float *sums, const float *x) {
    if (threadIdx.x == 0) { sums[OWN ? blockIdx.x : 0] += x[blockIdx.x]; }
}
__global__ void atomic_kernel(int *sum) { atomicAdd(sum, 1); }
template <bool WAIT> __global__ void copy_kernel(float *x) {
    DYNAMIC_SHARED(float, part);
    copy_async_4(part + threadIdx.x, x + threadIdx.x, true);
    if (WAIT) { copy_async_wait(); }
    x[threadIdx.x] = 2.0f * part[threadIdx.x];
    if (!WAIT) { copy_async_wait(); }
}
template <bool RIGHT> static void do_shared_race(const void *) {
    launch_of(shared_race_kernel<RIGHT>, 3, 0, zeros(THREADS * 3));
}
template <bool RIGHT> static void do_warp_race(const void *) {
    launch_of(warp_race_kernel<RIGHT>, 1, 4 * THREADS, zeros(THREADS));
}
template <bool RIGHT> static void do_block_race(const void *) {
    launch_of(block_race_kernel<RIGHT>, 5, 0, zeros(5), zeros(5));
}
template <bool RIGHT> static void do_copy(const void *) {
    launch_of(copy_kernel<RIGHT>, 1, 4 * THREADS, zeros(THREADS));
}

// --- bounds --------------------------------------------------------------------------------------
template <int SHIFT> __global__ void shift_kernel(float *to, const float *from, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) { to[i + SHIFT] = from[i]; }
}
// Three tensors side by side in one allocation
struct Tensors {
    float *a, *b, *c;
};
static Tensors tensors() {
    char *base = device(1 << 16);
    float *places[3];
    size_t used = 0;
    for (int i = 0; i < 3; i++) {
        places[i] = (float *)(void *)(base + used);
        used += PART + PLACED_APART(places[i], PART);
    }
    cudaMemset(base, 0, 1 << 16);
    cudaDeviceSynchronize();
    return {places[0], places[1], places[2]};
}
// within a tensor, or one element behind it
template <int SHIFT> static void do_shift(const void *) {
    const Tensors t = tensors();
    launch_of(shift_kernel<SHIFT>, PART / 4 / THREADS, 0, t.a, (const float *)t.b,
              PART / 4 - (SHIFT == 0));
}
// a neighbour that it was not given
__global__ void jump_kernel(float *to, long elements) { to[elements] = 1.0f; }
static void do_jump(const void *) {
    const Tensors t = tensors();
    launch_of(jump_kernel, 1, 0, t.a, (long)(t.c - t.a));
}
template <int ROWS> __global__ void static_bound_kernel(float *x) {
    __shared__ float part[THREADS];
    part[threadIdx.x + ROWS - 1] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = part[(threadIdx.x ^ 1) + ROWS - 1];
}
template <int FLOATS> __global__ void dynamic_bound_kernel(float *x) {
    DYNAMIC_SHARED(float, part);
    part[threadIdx.x] = x[threadIdx.x];
}
__global__ void host_kernel(float *x, const float *y) { x[threadIdx.x] = y[threadIdx.x]; }
template <int ROWS> static void do_static_bound(const void *) {
    launch_of(static_bound_kernel<ROWS>, 1, 0, zeros(THREADS));
}
template <int FLOATS> static void do_dynamic_bound(const void *) {
    launch_of(dynamic_bound_kernel<FLOATS>, 1, FLOATS * 4, zeros(THREADS));
}
static void do_host(const void *) {
    static float of_host[THREADS];
    launch_of(host_kernel, 1, 0, zeros(THREADS), (const float *)of_host);
}

// --- alignment -----------------------------------------------------------------------------------
struct alignas(16) Four {
    float x[4];
};
struct alignas(8) Two {
    float x[2];
};
template <class V> __global__ void vector_kernel(float *to, const float *from) {
    enum { N = sizeof(V) / 4 };
    *(V *)(void *)(to + N * threadIdx.x) = *(const V *)(const void *)(from + N * threadIdx.x);
}
template <class V, int SHIFT> static void do_vector(const void *) {
    float *from = zeros(5 * THREADS);
    launch_of(vector_kernel<V>, 1, 0, zeros(4 * THREADS), (const float *)from + SHIFT);
}
template <int SHIFT> __global__ void rows_kernel(float *x) { // of 8 bf16
    DYNAMIC_SHARED(Bf16, rows);
    unsigned m[4];
    for (int i = 0; i < 16; i++) { rows[16 * threadIdx.x + i].bits = 0; }
    __syncthreads();
    load_matrices(m, rows + 16 * threadIdx.x + SHIFT);
    x[threadIdx.x] = (float)m[0];
}
template <int SHIFT> static void do_rows(const void *) {
    launch_of(rows_kernel<SHIFT>, 1, 32 * THREADS, zeros(THREADS));
}
template <int SHIFT> __global__ void copy_place_kernel(float *x) {
    DYNAMIC_SHARED(float, part);
    copy_async_16(part + 4 * threadIdx.x, x + SHIFT, true);
    copy_async_wait();
}
template <int SHIFT> static void do_copy_place(const void *) {
    launch_of(copy_place_kernel<SHIFT>, 1, 16 * THREADS, zeros(THREADS));
}

// --- what nobody has written ---------------------------------------------------------------------
template <bool ALL> __global__ void unwritten_kernel(float *x) {
    __shared__ float part[THREADS];
    if (ALL || threadIdx.x < 100) { part[threadIdx.x] = 1.0f; }
    __syncthreads();
    x[threadIdx.x] = part[THREADS - 1 - threadIdx.x];
}
template <bool ALL> static void do_unwritten_shared(const void *) {
    launch_of(unwritten_kernel<ALL>, 1, 0, zeros(THREADS));
}
template <bool SET> static void do_unwritten_device(const void *) {
    float *x = SET ? zeros(THREADS) : (float *)(void *)device(THREADS * 4);
    launch_of(host_kernel, 1, 0, zeros(THREADS), (const float *)x);
}
template <bool SAME> static void do_scratch(const void *) { // from one operation to the next
    float *scratch = zeros(THREADS), *x = zeros(THREADS);
    launch_of(host_kernel, 1, 0, scratch, (const float *)x);
    if (!SAME) { emu_check_forget(scratch, THREADS * 4); }
    launch_of(host_kernel, 1, 0, x, (const float *)scratch);
}

// --- barriers in functions that are called twice -------------------------------------------------
__attribute__((noinline)) __device__ void meet(float *x) {
    *x += 1.0f;
    __syncthreads();
}
template <bool APART> __global__ void meet_kernel(float *x) {
    if (APART && threadIdx.x < 64) {
        meet(x + threadIdx.x);
    } else {
        meet(x + threadIdx.x);
    }
}
template <bool APART> static void do_meet(const void *) {
    launch_of(meet_kernel<APART>, 1, 0, zeros(THREADS));
}

// --- a library -----------------------------------------------------------------------------------
// a (ROWS x 16) times b (16 x 16) into tensors of 16 x 16
template <int ROWS> static void do_product(const void *) {
    const Tensors t = tensors();
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    const float one = 1.0f, zero = 0.0f;
    int count = 0;
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayoutCreate(&a, CUDA_R_32F, ROWS, 16, ROWS);
    cublasLtMatrixLayoutCreate(&b, CUDA_R_32F, 16, 16, 16);
    cublasLtMatrixLayoutCreate(&d, CUDA_R_32F, ROWS, 16, ROWS);
    cublasLtMatmulPreferenceCreate(&preference);
    cublasLtMatmulAlgoGetHeuristic(NULL, desc, a, b, d, d, preference, 1, &found, &count);
    memset(found.algo.alignment, 0, sizeof found.algo.alignment);
    for (uint32_t &alignment : found.algo.alignment) { alignment = 1; }
    cudaStream_t s = stream();
    assert_int_equal(cublasLtMatmul(NULL, desc, &one, t.a, a, t.b, b, &zero, t.c, d, t.c, d,
                                    &found.algo, NULL, 0, s),
                     CUBLAS_STATUS_SUCCESS);
    cudaStreamSynchronize(s);
}

typedef struct {
    void (*right)(const void *);
    void (*wrong)(const void *);
    const char *said[3]; // with the fault
} Plant;
static const Plant plants[] = {
    {do_shared_race<true>,
     do_shared_race<false>,
     {"shared_race_kernel<false>, block (", "race: writes 4 bytes|race: reads 4 bytes",
      "shared_race_kernel<false>::part"}},
    {do_warp_race<true>,
     do_warp_race<false>,
     {"warp_race_kernel<false>", "race: reads 4 bytes", "of the dynamic shared memory"}},
    {do_block_race<true>,
     do_block_race<false>,
     {"block_race_kernel<false>", "race: ", "of block ("}},
    {do_copy<true>,
     do_copy<false>,
     {"copy_kernel<false>", "asynchronous copy", "was not waited for"}},
    {do_shift<0>,
     do_shift<1>,
     {"shift_kernel<1>, block (1,0,0), thread (127,0,0)",
      "writes 4 bytes that end 4 bytes behind a tensor of 1024", "test_emu_checks.cu:"}},
    {do_shift<0>,
     do_jump,
     {"jump_kernel", "device memory that no argument points into|behind a tensor", ""}},
    {do_static_bound<1>,
     do_static_bound<2>,
     {"static_bound_kernel<2>", "writes 4 bytes at byte 512", "behind its end"}},
    {do_dynamic_bound<THREADS>,
     do_dynamic_bound<THREADS - 1>,
     {"dynamic_bound_kernel<127>", "at byte 508 of the dynamic shared memory", "asked for 508"}},
    {do_vector<Four, 0>, do_host, {"host_kernel", "reads 4 bytes of the host's memory", ""}},
    {do_vector<Four, 4>,
     do_vector<Four, 2>,
     {"vector_kernel<Four>", "reads 16 bytes at an address", "multiple of 16"}},
    {do_vector<Two, 2>,
     do_vector<Two, 1>,
     {"vector_kernel<Two>", "reads 8 bytes at an address", "multiple of 8"}},
    {do_rows<8>, do_rows<4>, {"ldmatrix", "aligned to 16 bytes", "test_emu_checks.cu:"}},
    {do_copy_place<4>, do_copy_place<2>, {"cp.async", "not aligned", "test_emu_checks.cu:"}},
    {do_unwritten_shared<true>,
     do_unwritten_shared<false>,
     {"unwritten_kernel<false>", "which this block has not written", "part"}},
    {do_unwritten_device<true>,
     do_unwritten_device<false>,
     {"host_kernel", "nobody has written", ""}},
    {do_scratch<true>, do_scratch<false>, {"host_kernel", "nobody has written", ""}},
    {do_meet<false>,
     do_meet<true>,
     {"meet_kernel<true>", "not all threads of the block are there", ""}},
    {do_product<16>,
     do_product<17>,
     {"cublasLtMatmul: matrix A", "behind a tensor of 1024 bytes", ""}},
};
static bool says(const char *said, const char *one_of) { // parts of which one is there, apart by |
    char parts[200];
    snprintf(parts, sizeof parts, "%s", one_of);
    for (char *part = strtok(parts, "|"); part; part = strtok(NULL, "|")) {
        if (strstr(said, part)) { return true; }
    }
    return !*one_of;
}
static void test_plants(void **) {
    for (const Plant &p : plants) {
        for (int seed = 1; seed <= 3; seed++) { // whatever order things run in
            char said[2000];
            emu_seed((uint64_t)seed);
            const int right = run_child(p.right, NULL, said, sizeof said);
            if (right != EXIT_DONE) { fail_msg("without its fault: %s", said); }
            const int wrong = run_child(p.wrong, NULL, said, sizeof said);
            if (wrong < 1000) {
                fail_msg("nothing was found where this was planted: %s", p.said[0]);
            }
            for (const char *part : p.said) {
                if (!says(said, part)) { fail_msg("'%s' is not in: %s", part, said); }
            }
        }
    }
}
static void test_atomics(void **) { // of many blocks at one place are no race
    float *x = zeros(1);
    launch_of(atomic_kernel, 3, 0, (int *)(void *)x);
    int sum = 0;
    cudaStream_t s = stream();
    cudaMemcpyAsync(&sum, x, sizeof sum, cudaMemcpyDeviceToHost, s);
    assert_int_equal(sum, 3 * THREADS);
    cudaStreamDestroy(s);
    cudaFree(x);
}

// --- counts --------------------------------------------------------------------------------------
// 128 threads read floats STRIDE apart, put them into shared memory that far apart, and write them
// side by side.
template <int STRIDE> __global__ void stride_kernel(float *to, const float *from) {
    DYNAMIC_SHARED(float, part);
    part[STRIDE * threadIdx.x] = from[STRIDE * threadIdx.x];
    if (threadIdx.x < 64) { to[threadIdx.x] = part[STRIDE * threadIdx.x]; }
}
template <int STRIDE> static void do_stride(const void *file) {
    setenv("EMU_SECTORS", (const char *)file, 1);
    launch_of(stride_kernel<STRIDE>, 1, 4 * STRIDE * THREADS, zeros(THREADS),
              (const float *)zeros(STRIDE * THREADS));
    exit(0); // what was counted is written now
}
static void check_counts(void (*body)(const void *), const char *expected) {
    char file[] = "/tmp/emu_sectors_XXXXXX", said[2000], line[1000] = "";
    close(mkstemp(file));
    assert_int_equal(run_child(body, file, said, sizeof said), EXIT_DONE);
    FILE *f = fopen(file, "r");
    assert_non_null(fgets(line, sizeof line, f));
    fclose(f);
    unlink(file);
    assert_string_equal(line, expected);
}
static void test_counts(void **) {
    // 4 warps read 32 floats each: 4 sectors of 32 bytes; 2 write; no two lanes meet in a bank
    check_counts(do_stride<1>, "{\"kernel\":\"stride_kernel<1>\",\"launches\":1,\"threads\":128,"
                               "\"read_requests\":4,\"read_bytes\":512,"
                               "\"read_sectors\":16,\"read_distinct_sectors\":16,\"write_"
                               "requests\":2,\"write_bytes\":256,\"write_sectors\":8,"
                               "\"write_distinct_sectors\":8,\"shared_requests\":6,\"shared_"
                               "bytes\":768,\"wavefronts\":6,\"bank_conflicts\":0}\n");
    // 32 bytes apart: a sector for each lane, 8 lanes in each of 4 banks
    check_counts(do_stride<8>, "{\"kernel\":\"stride_kernel<8>\",\"launches\":1,\"threads\":128,"
                               "\"read_requests\":4,\"read_bytes\":512,"
                               "\"read_sectors\":128,\"read_distinct_sectors\":128,\"write_"
                               "requests\":2,\"write_bytes\":256,\"write_sectors\":8,"
                               "\"write_distinct_sectors\":8,\"shared_requests\":6,\"shared_"
                               "bytes\":768,\"wavefronts\":48,\"bank_conflicts\":42}\n");
}

int main() {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plants),
        cmocka_unit_test(test_atomics),
        cmocka_unit_test(test_counts),
    };
    return cmocka_run_group_tests_name("emu_checks", tests, NULL, NULL);
}
