// test_emu.cu: the emulation finds what is wrong. Each right program below gives its result under
// every seed; the same program without its barrier, event or wait gives another result under some;
// and what touches memory it must not is ended.
#include "base/base.h"
#include "test/emu.h"
#include "harness.h"

enum { N = 1024, THREADS = 128, SEEDS = 64 };

static int *shared_ints(int64_t n) {
    void *p = NULL;
    assert_int_equal(cudaMallocManaged(&p, (size_t)n * sizeof(int)), cudaSuccess);
    memset(p, 0, (size_t)n * sizeof(int));
    return (int *)p;
}
static cudaStream_t stream() {
    cudaStream_t s;
    assert_int_equal(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    return s;
}

// --- kernels -------------------------------------------------------------------------------------
// Each block turns its part around, through shared memory of either kind.
template <bool BARRIER> __global__ void reverse_kernel(int *x) {
    __shared__ int part[THREADS];
    DYNAMIC_SHARED(int, doubled);
    int *mine = x + blockIdx.x * THREADS;
    part[threadIdx.x] = mine[threadIdx.x];
    if (BARRIER) { __syncthreads(); }
    doubled[threadIdx.x] = 2 * part[THREADS - 1 - threadIdx.x];
    if (BARRIER) { __syncthreads(); }
    mine[threadIdx.x] = doubled[threadIdx.x ^ 32] / 2; // of another warp
}
// A shuffle where a lane is missing from the block's barrier, and the other way round
__global__ void divergent_kernel(int *x) {
    if (threadIdx.x == 5) {
        __syncwarp();
    } else {
        __syncthreads();
    }
    x[threadIdx.x] = 1;
}
__global__ void add_kernel(int *x, int value, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) { x[i] += value; }
}
__global__ void double_kernel(int *x, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) { x[i] *= 2; }
}
__global__ void warp_kernel(int *sums, unsigned *ballots, int *counter) {
    const int lane = (int)threadIdx.x % 32;
    int sum = (int)(blockIdx.x * blockDim.x + threadIdx.x),
        from_above = __shfl_down_sync(~0u, lane, 1), first;
    for (int d = 16; d > 0; d >>= 1) { sum += __shfl_xor_sync(~0u, sum, d); }
    first = __shfl_sync(~0u, lane == 3 ? 77 : 0, 3);
    const unsigned ballot = __ballot_sync(~0u, lane % 3 == 0);
    atomicAdd(counter, 1);
    if (lane == 0) {
        const int warp = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32;
        sums[warp] = sum;
        ballots[warp] = first == 77 && from_above == 1 ? ballot : 0;
    }
}

// --- barriers, shuffles --------------------------------------------------------------------------
template <bool BARRIER> static int wrong_reversals() {
    int *x = shared_ints(N), wrong = 0;
    cudaStream_t s = stream();
    for (int seed = 0; seed < SEEDS; seed++) {
        emu_seed((uint64_t)seed);
        for (int i = 0; i < N; i++) { x[i] = i; }
        LAUNCH(reverse_kernel<BARRIER>, N / THREADS, THREADS, THREADS * sizeof(int), s, x);
        cudaStreamSynchronize(s);
        bool same = true;
        for (int i = 0; i < N; i++) {
            same &= x[i] == i / THREADS * THREADS + THREADS - 1 - (i % THREADS ^ 32);
        }
        wrong += !same;
    }
    cudaStreamDestroy(s);
    cudaFree(x);
    return wrong;
}
static void test_barriers(void **) {
    assert_int_equal(wrong_reversals<true>(), 0);
    assert_int_equal(wrong_reversals<false>(), SEEDS); // forwards and backwards
}
static void test_warps(void **) {
    int *sums = shared_ints(N / 32), *ballots = shared_ints(N / 32), *counter = shared_ints(1);
    cudaStream_t s = stream();
    LAUNCH(warp_kernel, N / THREADS, THREADS, 0, s, sums, (unsigned *)ballots, counter);
    cudaStreamSynchronize(s);
    for (int w = 0; w < N / 32; w++) {
        assert_int_equal(sums[w], 32 * 32 * w + 31 * 16);
        assert_int_equal((unsigned)ballots[w], 0x49249249u);
    }
    assert_int_equal(counter[0], N);
    cudaStreamDestroy(s);
    cudaFree(sums);
    cudaFree(ballots);
    cudaFree(counter);
}

// Each half of a warp by itself, in turns of its own, then both together: right, if each call names
// who is there.
__global__ void halves_kernel(int *x) {
    const int lane = (int)threadIdx.x % 32;
    int sum = lane;
    if (lane < 16) {
        for (int d = 8; d > 0; d >>= 1) { sum += __shfl_xor_sync(0xffffu, sum, d); }
    } else {
        sum += __shfl_xor_sync(0xffff0000u, sum, 1);
        __syncwarp(0xffff0000u);
    }
    x[threadIdx.x] = sum + 1000 * __shfl_sync(~0u, sum, 31 - lane);
}
enum Fault { TWO_CALLS, LANE_LEFT, OUTSIDE_MASK, WITHOUT_ITSELF, TWO_MASKS, WARP_CALLS };
template <int FAULT> __global__ void warp_fault_kernel(int *x) {
    const int lane = (int)threadIdx.x % 32;
    int sum = lane;
    if (FAULT == LANE_LEFT && lane == 7) { return; }
    if (FAULT == TWO_CALLS && lane % 2) {
        sum += __shfl_xor_sync(~0u, sum, 2);
    } else if (FAULT == OUTSIDE_MASK) {
        if (lane < 16) { sum += __shfl_xor_sync(0xffffu, sum, 16); }
    } else if (FAULT == WITHOUT_ITSELF) {
        sum += __shfl_xor_sync(0xffffu, sum, 1);
    } else if (FAULT == TWO_MASKS) {
        sum += __shfl_xor_sync(lane < 16 ? ~0u : 0xffff0000u, sum, 1);
    } else if (FAULT == WARP_CALLS && lane == 3) {
        __syncwarp();
    } else {
        sum += __shfl_xor_sync(~0u, sum, 2);
    }
    x[threadIdx.x] = sum;
}
enum BlockFault { BLOCK_CALLS, WARP_LEFT, LANES_LEFT };
template <int FAULT> __global__ void block_fault_kernel(int *x) {
    if (FAULT == WARP_LEFT && threadIdx.x >= 32) { return; }
    if (FAULT == LANES_LEFT && threadIdx.x % 32 >= 20) { return; }
    if (FAULT == BLOCK_CALLS && threadIdx.x >= 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    x[threadIdx.x] = 1;
}

// --- tensor cores: c(16, 8) = a(16, 16) b; b(8, 16) row by row or b(16, 8) column by column ------
enum { TERMS = 16, PITCH = 24 };
template <bool TRANSPOSED, bool WAIT, bool BARRIER>
__global__ void product_kernel(float *c, const Bf16 *a, const Bf16 *b) {
    DYNAMIC_SHARED(Bf16, shared);
    Bf16 *sa = shared, *sb = sa + 16 * PITCH;
    const int thread = (int)threadIdx.x, lane = thread % 32, row = lane % 16, half = lane / 16 * 8;
    if (thread < 32) { // the first warp brings, the second multiplies
        copy_async_16(sa + row * PITCH + half, a + row * TERMS + half, true);
        copy_async_16(sb + row * PITCH + half, TRANSPOSED || row < 8 ? b + row * TERMS + half : b,
                      TRANSPOSED || row < 8);
        copy_async_4(shared + 32 * PITCH + 2 * lane, a, false);
        if (WAIT) { copy_async_wait(); }
    }
    if (BARRIER) { __syncthreads(); }
    if (thread < 32) { return; }
    unsigned left[4], right[4];
    float sum[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    load_matrices(left, sa + row * PITCH + half);
    if (TRANSPOSED) {
        load_matrices_transposed(right, sb + row * PITCH + half);
    } else {
        load_matrices(right, sb + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8);
    }
    mma_bf16(sum, left, right[0], right[1]);
    for (int e = 0; e < 4; e++) {
        c[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2] =
            sum[e] + __bfloat162float(shared[32 * PITCH + 2 * lane]);
    }
}
template <bool TRANSPOSED, bool WAIT, bool BARRIER> static int wrong_tensor_products() {
    float *c = (float *)shared_ints(16 * 8);
    Bf16 *a = (Bf16 *)shared_ints(16 * TERMS), *b = (Bf16 *)shared_ints(16 * TERMS);
    int wrong = 0;
    // exact in any order
    for (int i = 0; i < 16 * TERMS; i++) {
        a[i] = __float2bfloat16((float)(i % 7 - 3));
        b[i] = __float2bfloat16((float)(i % 11 - 5));
    }
    cudaStream_t s = stream();
    for (int seed = 0; seed < SEEDS; seed++) {
        emu_seed((uint64_t)seed);
        LAUNCH((product_kernel<TRANSPOSED, WAIT, BARRIER>), 1, 64, 64 * PITCH, s, c, a, b);
        cudaStreamSynchronize(s);
        bool same = true;
        for (int i = 0; i < 16 * 8; i++) {
            float sum = 1.0f;
            for (int k = 0; k < TERMS; k++) {
                sum += __bfloat162float(a[i / 8 * TERMS + k]) *
                       __bfloat162float(TRANSPOSED ? b[k * TERMS + i % 8] : b[i % 8 * TERMS + k]);
            }
            same &= c[i] == sum;
        }
        wrong += !same;
    }
    cudaStreamDestroy(s);
    cudaFree(a);
    cudaFree(b);
    cudaFree(c);
    return wrong;
}
static void test_tensor_cores(void **) {
    const int right =
        wrong_tensor_products<false, true, true>() + wrong_tensor_products<true, true, true>();
    const int unawaited = wrong_tensor_products<false, false, true>(),
              unordered = wrong_tensor_products<false, true, false>();
    assert_int_equal(right, 0);
    assert_true(unawaited > 0 && unawaited < SEEDS);
    assert_true(unordered > 0 && unordered < SEEDS);
}

// --- streams -------------------------------------------------------------------------------------
// (x + 1) * 2 on two streams; without the event the seed decides which comes first.
static int wrong_orders(bool event, bool wait) {
    int *x = shared_ints(N), wrong = 0;
    cudaStream_t first = stream(), second = stream();
    cudaEvent_t added;
    cudaEventCreateWithFlags(&added, cudaEventDisableTiming);
    for (int seed = 0; seed < SEEDS; seed++) {
        emu_seed((uint64_t)seed);
        memset(x, 0, N * sizeof(int));
        LAUNCH(add_kernel, N / THREADS, THREADS, 0, first, x, 1, (int)N);
        cudaEventRecord(added, first);
        if (event) { cudaStreamWaitEvent(second, added); }
        LAUNCH(double_kernel, N / THREADS, THREADS, 0, second, x, (int)N);
        if (wait) { cudaStreamSynchronize(second); }
        wrong += x[0] != 2 || x[N - 1] != 2;
        cudaDeviceSynchronize();
    }
    cudaEventDestroy(added);
    cudaStreamDestroy(first);
    cudaStreamDestroy(second);
    cudaFree(x);
    return wrong;
}
static void test_streams(void **) {
    assert_int_equal(wrong_orders(true, true), 0);
    int wrong = wrong_orders(false, true);
    assert_true(wrong > 0 && wrong < SEEDS);            // a missing event
    assert_int_equal(wrong_orders(true, false), SEEDS); // a missing wait: nothing ran yet
}
// work goes on between looks, and an event waits for no more than what was before it
static void test_queries(void **) {
    int *x = shared_ints(N), looks = 0;
    cudaStream_t s = stream();
    cudaEvent_t halfway;
    cudaEventCreateWithFlags(&halfway, cudaEventDisableTiming);
    for (int i = 0; i < 40; i++) {
        LAUNCH(add_kernel, N / THREADS, THREADS, 0, s, x, 1, (int)N);
        if (i == 19) { cudaEventRecord(halfway, s); }
    }
    cudaEventSynchronize(halfway);
    assert_int_equal(x[0], 20);
    while (cudaStreamQuery(s) == cudaErrorNotReady) { looks++; }
    assert_true(looks > 1 && x[0] == 40);
    assert_int_equal(cudaGetLastError(), cudaErrorNotReady);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    LAUNCH(add_kernel, N / THREADS, THREADS, 0, s, x, 1, (int)N);
    cudaEventRecord(halfway, s);
    for (looks = 0; cudaEventQuery(halfway) == cudaErrorNotReady; looks++) {}
    assert_true(looks > 0 && x[0] == 41); // the device goes on by itself
    cudaGetLastError();
    cudaEventDestroy(halfway);
    cudaStreamDestroy(s);
    cudaFree(x);
}

// --- memory --------------------------------------------------------------------------------------
static void do_host_read(const void *) {
    void *p = NULL;
    cudaMalloc(&p, 100);
    int value = *(volatile int *)p;
    exit(value);
}
static void do_overrun(const void *) {
    cudaStream_t s = stream();
    void *p = NULL;
    cudaMalloc(&p, 1024 * sizeof(int));
    LAUNCH(add_kernel, 1, 32, 0, s, (int *)p + 1020, 1, 32);
    cudaStreamSynchronize(s);
}
static void do_divergence(const void *) {
    cudaStream_t s = stream();
    LAUNCH(divergent_kernel, 1, 32, 0, s, shared_ints(32));
    cudaStreamSynchronize(s);
}
template <int FAULT> static void do_warp_fault(const void *) {
    cudaStream_t s = stream();
    LAUNCH(warp_fault_kernel<FAULT>, 1, 64, 0, s, shared_ints(64));
    cudaStreamSynchronize(s);
}
template <int FAULT> static void do_block_fault(const void *) {
    cudaStream_t s = stream();
    LAUNCH(block_fault_kernel<FAULT>, 1, 64, 0, s, shared_ints(64));
    cudaStreamSynchronize(s);
}
static void do_deadlock(const void *) {
    cudaStream_t s = stream(), other = stream();
    cudaEvent_t e;
    cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    e->recorded = 1; // as if a later record were meant
    cudaStreamWaitEvent(s, e);
    cudaStreamWaitEvent(other, e);
    cudaStreamSynchronize(s);
}
static void do_forget_not_ready(const void *) {
    cudaStream_t s = stream();
    int *x = shared_ints(32);
    LAUNCH(add_kernel, 1, 32, 0, s, x, 1, 32);
    LAUNCH(add_kernel, 1, 32, 0, s, x, 1, 32);
    cudaStreamQuery(s);
    LAUNCH(add_kernel, 1, 32, 0, s, x, 1, 32);
}
static void do_too_much_shared(const void *) {
    LAUNCH(reverse_kernel<true>, 1, THREADS, 49 << 10, stream(), shared_ints(THREADS));
}
static void do_wrong_kind(const void *) {
    void *p = NULL;
    int x = 0;
    cudaMalloc(&p, sizeof x);
    cudaMemcpyAsync(p, &x, sizeof x, cudaMemcpyDeviceToDevice, stream());
}
static void check_ends(void (*body)(const void *), const char *message) {
    char said[2000];
    assert_true(run_child(body, NULL, said, sizeof said) > 1000); // by a signal
    if (!strstr(said, message)) { print_message("%s", said); }
    assert_non_null(strstr(said, message));
}
static void test_memory(void **) {
    check_ends(do_host_read, "the host touches device memory");
    check_ends(do_overrun, "beyond the end of its memory");
    check_ends(do_divergence, "divergent barrier");
    check_ends(do_deadlock, "wait for each other");
    check_ends(do_forget_not_ready, "blamed for an earlier call");
    check_ends(do_too_much_shared, "CUDA refuses");
    check_ends(do_wrong_kind, "does not tell what the pointers are");
    void *p = NULL;
    assert_int_equal(cudaMalloc(&p, (size_t)1 << 60), cudaErrorMemoryAllocation);
}
// who is named comes to the same call, and only who is named is asked
static void test_masks(void **) {
    int *x = shared_ints(64);
    cudaStream_t s = stream();
    for (int seed = 0; seed < 8; seed++) {
        emu_seed((uint64_t)seed);
        LAUNCH(halves_kernel, 1, 64, 0, s, x);
        cudaStreamSynchronize(s);
        for (int i = 0; i < 64; i++) {
            const int lane = i % 32, other = 31 - lane;
            const int mine = lane < 16 ? 120 : lane + (lane ^ 1),
                      theirs = other < 16 ? 120 : other + (other ^ 1);
            assert_int_equal(x[i], mine + 1000 * theirs);
        }
    }
    cudaStreamDestroy(s);
    cudaFree(x);
    check_ends(do_warp_fault<TWO_CALLS>, "lanes that a mask names do not come");
    check_ends(do_warp_fault<LANE_LEFT>, "has left");
    check_ends(do_warp_fault<OUTSIDE_MASK>, "which the mask 0000ffff does not name");
    check_ends(do_warp_fault<WITHOUT_ITSELF>, "does not name its own lane");
    check_ends(do_warp_fault<TWO_MASKS>, "lanes that a mask names do not come");
    check_ends(do_warp_fault<WARP_CALLS>, "warp_fault_kernel<5>, block (0,0,0)"); // it says where
}
static void test_block_barriers(void **) {
    check_ends(do_block_fault<BLOCK_CALLS>, "not all threads of the block are there");
    check_ends(do_block_fault<WARP_LEFT>, "has left");
    check_ends(do_block_fault<LANES_LEFT>, "thread (20,0,0) has left");
}
static void test_copies(void **) { // the source of a copy from the host may be changed at once
    int x[3] = {1, 2, 3}, y[3] = {0, 0, 0};
    void *p = NULL;
    cudaStream_t s = stream();
    cudaMalloc(&p, sizeof x);
    cudaMemcpyAsync(p, x, sizeof x, cudaMemcpyHostToDevice, s);
    x[0] = 9;
    LAUNCH(add_kernel, 1, 32, 0, s, (int *)p, 10, 3);
    cudaMemcpyAsync(y, p, sizeof y, cudaMemcpyDeviceToHost, s);
    assert_true(y[0] == 11 && y[1] == 12 && y[2] == 13);
    cudaStreamDestroy(s);
    cudaFree(p);
}

// copies run late: what is written meanwhile is copied, what is read too early is old
static void test_page_locked(void **) {
    void *p = NULL, *q = NULL;
    cudaStream_t s = stream();
    cudaMalloc(&p, sizeof(int));
    cudaMallocHost(&q, 2 * sizeof(int));
    int *x = (int *)q;
    x[0] = 1;
    x[1] = -1;
    cudaMemcpyAsync(p, x, sizeof(int), cudaMemcpyHostToDevice, s);
    x[0] = 2;
    cudaMemcpyAsync(x + 1, p, sizeof(int), cudaMemcpyDeviceToHost, s);
    assert_int_equal(x[1], -1);
    cudaStreamSynchronize(s);
    assert_int_equal(x[1], 2);
    cudaStreamDestroy(s);
    cudaFree(p);
    cudaFreeHost(q);
}

// --- graphs --------------------------------------------------------------------------------------
// captured work does not run; a graph's runs as often as it is started, with what it was given then
static void test_graphs(void **) {
    int *x = shared_ints(N), value = 3;
    cudaStream_t s = stream();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed);
    LAUNCH(add_kernel, N / THREADS, THREADS, 0, s, x, value, (int)N);
    LAUNCH(double_kernel, N / THREADS, THREADS, 0, s, x, (int)N);
    cudaStreamEndCapture(s, &graph);
    cudaStreamSynchronize(s);
    assert_int_equal(x[0], 0);
    cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    value = 5;
    for (int i = 0; i < 2; i++) { cudaGraphLaunch(exec, s); }
    cudaStreamSynchronize(s);
    assert_int_equal(x[N - 1], 18); // (0 + 3) * 2 = 6, (6 + 3) * 2
    cudaGraphExecDestroy(exec);
    cudaStreamDestroy(s);
    cudaFree(x);
}
static cudaStream_t captured() {
    cudaStream_t s = stream();
    cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed);
    return s;
}
static void do_captured_wait(const void *) { cudaStreamSynchronize(captured()); }
static void do_captured_look(const void *) { cudaStreamQuery(captured()); }
static void do_captured_copy(const void *) {
    int x = 0;
    cudaMemcpyAsync(shared_ints(1), &x, sizeof x, cudaMemcpyHostToDevice, captured());
}
static void do_lone_pop(const void *) { nvtxRangePop(); }
static void test_refused_in_captures(void **) {
    check_ends(do_captured_wait, "a stream that is captured");
    check_ends(do_captured_look, "a stream that is captured");
    check_ends(do_captured_copy, "a stream that is captured");
    check_ends(do_lone_pop, "without a push");
}

// --- what is counted -----------------------------------------------------------------------------
static void test_counts(void **) { // in ranges only
    int *x = shared_ints(N);
    cudaStream_t s = stream();
    const EmuCounts before = emu_counts;
    for (int i = 0; i < 2; i++) {
        if (i) { nvtxRangePushA("counted"); }
        LAUNCH(add_kernel, N / THREADS, THREADS, 0, s, x, 1, (int)N);
        cudaMemsetAsync(x, 0, sizeof(int), s);
        cudaStreamSynchronize(s);
        while (cudaStreamQuery(s) == cudaErrorNotReady) {}
        if (i) { nvtxRangePop(); }
    }
    assert_int_equal(emu_counts.launches - before.launches, 2);
    assert_int_equal(emu_counts.waits - before.waits, 2);
    assert_int_equal(emu_counts.ranges - before.ranges, 1);
    size_t there = 0, total = 0, after = 0;
    void *p = NULL;
    cudaMemGetInfo(&there, &total);
    cudaMalloc(&p, 100000);
    cudaMemGetInfo(&after, &total);
    assert_true(there - after >= 100000 && there - after < 110000);
    cudaFree(p);
    cudaMemGetInfo(&after, &total);
    assert_true(after == there);
    cudaStreamDestroy(s);
    cudaFree(x);
}

// --- cuBLASLt: column-major, against three loops -------------------------------------------------
static void check_product(bool a_transposed, bool b_transposed, bool bias, float beta) {
    enum { M = 3, K = 4, COLS = 2, LDA = 5, LDB = 6, LDD = 7 };
    float *a = (float *)shared_ints(LDA * 5), *b = (float *)shared_ints(LDB * 5),
          *d = (float *)shared_ints(LDD * COLS), *bias_at = (float *)shared_ints(M),
          expected[M][COLS];
    for (int i = 0; i < LDA * 5; i++) { a[i] = (float)(i % 7 - 3); }
    for (int i = 0; i < LDB * 5; i++) { b[i] = (float)(i % 5 - 2); }
    for (int i = 0; i < LDD * COLS; i++) { d[i] = (float)i; }
    for (int i = 0; i < M; i++) { bias_at[i] = (float)(100 * i); }
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < COLS; j++) {
            expected[i][j] = beta * d[i + LDD * j] + (bias ? bias_at[i] : 0.0f);
            for (int k = 0; k < K; k++) {
                expected[i][j] += a[a_transposed ? k + LDA * i : i + LDA * k] *
                                  b[b_transposed ? j + LDB * k : k + LDB * j];
            }
        }
    }
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t al, bl, dl;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    const cublasOperation_t ops[2] = {a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                                      b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N};
    const cublasLtEpilogue_t epilogue = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    const uint32_t alignment = 4;
    const float one = 1.0f;
    int count = 0;
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &ops[0], sizeof ops[0]);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &ops[1], sizeof ops[1]);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias_at,
                                   sizeof bias_at);
    cublasLtMatrixLayoutCreate(&al, CUDA_R_32F, a_transposed ? K : M, a_transposed ? M : K, LDA);
    cublasLtMatrixLayoutCreate(&bl, CUDA_R_32F, b_transposed ? COLS : K, b_transposed ? K : COLS,
                               LDB);
    cublasLtMatrixLayoutCreate(&dl, CUDA_R_32F, M, COLS, LDD);
    cublasLtMatmulPreferenceCreate(&preference);
    for (int i = 0; i < 4; i++) {
        cublasLtMatmulPreferenceSetAttribute(preference,
                                             CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i,
                                             &alignment, sizeof alignment);
    }
    assert_int_equal(
        cublasLtMatmulAlgoGetHeuristic(NULL, desc, al, bl, dl, dl, preference, 1, &found, &count),
        CUBLAS_STATUS_SUCCESS);
    assert_int_equal(
        cublasLtMatmulAlgoGetHeuristic(NULL, desc, al, dl, dl, dl, preference, 1, &found, &count),
        CUBLAS_STATUS_INVALID_VALUE);
    const cublasLtEpilogue_t gelu = CUBLASLT_EPILOGUE_GELU_AUX;
    // rows of what GELU was taken of: at least M long, and a multiple of 8
    for (int64_t ld = 2; ld <= 8; ld++) {
        cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &gelu, sizeof gelu);
        cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld, sizeof ld);
        cublasLtMatmulHeuristicResult_t ignored;
        assert_int_equal(cublasLtMatmulAlgoGetHeuristic(NULL, desc, al, bl, dl, dl, preference, 1,
                                                        &ignored, &count),
                         ld == 8 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED);
    }
    // a bias, or a gradient of it, of another type than the result's
    const cublasLtEpilogue_t with_bias[] = {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_BGRADB};
    const int32_t types[] = {CUDA_R_16BF, -1};
    for (int i = 0; i < 4; i++) {
        cublasLtMatmulHeuristicResult_t ignored;
        cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &with_bias[i / 2],
                                       sizeof *with_bias);
        cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &types[i % 2],
                                       sizeof *types);
        // this library has no gradients of biases beside fp32 operands at all
        const bool offered = i % 2 && with_bias[i / 2] == CUBLASLT_EPILOGUE_BIAS;
        assert_int_equal(cublasLtMatmulAlgoGetHeuristic(NULL, desc, al, bl, dl, dl, preference, 1,
                                                        &ignored, &count),
                         offered ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED);
    }
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    cudaStream_t s = stream();
    assert_int_equal(cublasLtMatmul(NULL, desc, &one, a, al, b, bl, &beta, d, dl, d, dl,
                                    &found.algo, NULL, 0, s),
                     CUBLAS_STATUS_SUCCESS);
    cudaStreamSynchronize(s);
    for (int i = 0; i < LDD * COLS; i++) {
        assert_true(d[i] == (i % LDD < M ? expected[i % LDD][i / LDD] : (float)i));
    }
    cublasLtMatmulDescDestroy(desc);
    cublasLtMatrixLayoutDestroy(al);
    cublasLtMatrixLayoutDestroy(bl);
    cublasLtMatrixLayoutDestroy(dl);
    cublasLtMatmulPreferenceDestroy(preference);
    cudaStreamDestroy(s);
    cudaFree(a);
    cudaFree(b);
    cudaFree(d);
    cudaFree(bias_at);
}
static void test_products(void **) {
    for (int i = 0; i < 16; i++) { check_product(i & 1, i & 2, i & 4, i & 8 ? 2.0f : 0.0f); }
}

int main() {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_barriers),
        cmocka_unit_test(test_warps),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_queries),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_page_locked),
        cmocka_unit_test(test_graphs),
        cmocka_unit_test(test_refused_in_captures),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_tensor_cores),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_block_barriers),
    };
    return cmocka_run_group_tests_name("emu", tests, NULL, NULL);
}
