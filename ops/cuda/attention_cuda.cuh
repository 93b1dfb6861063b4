// attention_cuda.cuh: causal attention on a GPU. The contract is ops.h. There are two families of
// kernels:
//
// Tensor cores  bf16, and head sizes that are multiples of 8, up to 128 (padded to 64 or 128 with
//               zeros in shared memory).
// Plain         Everything else: fp32, and other head sizes, up to 256.
//
// Both work on tiles of queries and keys with a running softmax, so nothing of size T x T is
// stored. A block has one tile of queries (or keys) and visits the tiles of keys (or queries) that
// it needs; tiles above the diagonal are skipped. Backward runs two kernels, which both compute the
// scores again. One sums dk and dv over the queries, the other sums dq over the keys. So no two
// blocks add to the same element, every sum has one order, and the same call gives the same bits.
// The price is 7 products of tiles instead of 5 with atomics.
//
// Budget on an H200, per clock and SM: mma.sync does about 2,600 flop (0.63 of wgmma's rate), and
// shared memory delivers 128 bytes.
// head 64       A warp has 32 rows. Forward, dk with dv, and dq do 26, 21 and 19 flop per byte of
//               shared memory, or 3,300, 2,700 and 2,500 flop. The tensor cores are the limit.
// head 128      A warp has 32 rows forward, 16 backward (dk and dv fill the registers): 21, 13 and
//               12 flop per byte, or 2,700, 1,600 and 1,500 flop. Shared memory limits backward.
// occupancy     Registers on sm_90 are 244, 253, 228 (head 64) and 255, 248, 164 (head 128); the
//               forward kernel of head 128 spills 16 bytes. On sm_80: 225, 255, 236 and 250, 244,
//               166, none spilled (-Xptxas -v of CUDA 13.0). 55 to 70 KB of shared memory allow two
//               blocks, or 8 warps, per SM.
//
// Published rates of cuDNN's forward pass are about 0.45 of wgmma's rate at head 64 and 0.6 at head
// 128. Half of that is 35 % and 48 % of the rate of mma.sync.
#ifndef ATTENTION_CUDA_CUH
#define ATTENTION_CUDA_CUH

#include "ops/cuda/tensor_cores.cuh" // products of tiles
#ifdef USE_CUDNN
#include "ops/cuda/attention_cudnn.cuh" // preferred where it is compiled in
#endif

// An AttentionShape, and where things are in a token's row of qkv: a row has `stride` elements,
// keys begin at k, values at v. A row of out has k elements, as many as the queries.
typedef struct {
    int64_t rows, T, heads, kv_heads, D, stride, k, v;
    float scale;
} AttentionSizes;
// A block for each tile of a sequence and each head: of queries, or of keys.
static inline dim3 attention_grid(const AttentionSizes *a, int64_t tile, int64_t heads) {
    return dim3(blocks_for(a->T, tile), (unsigned)heads, (unsigned)a->rows);
}
// Returns the head of keys and values that a head of queries reads.
__device__ int64_t key_head(const AttentionSizes &a, int64_t head) {
    return head * a.kv_heads / a.heads;
}

// delta(rows, NH, T) = dout . out within a head, which equals the sum of p dp over a row of scores.
// So many lanes of a warp, a power of two, have a head, each EACH numbers of it.
template <class R>
__global__ void attention_delta_kernel(float *delta, const R *dout, const R *out, int T, int NH,
                                       int D, int lanes) {
    const int i = (int)thread_index() / lanes, from = (int)threadIdx.x % lanes * EACH,
              left = i < T * NH ? D - from : 0;
    const int64_t at = ((int64_t)blockIdx.y * T * NH + i) * D + from;
    float x[EACH], y[EACH], sum = 0.0f;
    read_numbers<EACH>(x, dout + at, left);
    read_numbers<EACH>(y, out + at, left);
    UNROLL for (int j = 0; j < EACH; j++) { sum += x[j] * y[j]; }
    sum = lanes_reduce(sum, lanes, false);
    if (from == 0 && left > 0) { delta[((int64_t)blockIdx.y * NH + i % NH) * T + i / NH] = sum; }
}
static inline void attention_delta(Stream *s, float *delta, const Real *dout, const Real *out,
                                   AttentionShape a) {
    int lanes = 1;
    while (lanes * EACH < a.D) { lanes *= 2; }
    assert(a.D <= 32 * EACH && a.T * a.heads * lanes <= INT32_MAX);
    const dim3 grid(blocks_for(a.T * a.heads * lanes, THREADS), (unsigned)a.rows);
    LAUNCH_REAL(s, attention_delta_kernel, grid, delta, dout, out, (int)a.T, (int)a.heads, (int)a.D,
                lanes);
}

// -------------------------------------------------------------------------------------------------
// Tensor cores

// Adds a tile of scores to the running softmax of 16 M queries. Scores become 2^(factor (score -
// top)), and the earlier sums are rescaled.
template <int HEAD, int M, int N>
__device__ void softmax_scores(float scores[M][N / 8][4], float sum[M][HEAD / 8][4],
                               float top[M][2], float total[M][2], float factor) {
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int half = 0; half < 2; half++) {
            float highest = top[m][half];
            UNROLL for (int i = 0; i < N / 4; i++) {
                highest = fmaxf(highest, scores[m][i / 2][2 * half + i % 2]);
            }
            highest = over_quad(highest, true); // finite: each query sees a key of the first tile
            const float before = power_of_2(factor * (top[m][half] - highest));
            top[m][half] = highest;
            total[m][half] *= before;
            UNROLL for (int i = 0; i < N / 4; i++) {
                float *score = &scores[m][i / 2][2 * half + i % 2];
                total[m][half] += *score = power_of_2(factor * *score - factor * highest);
            }
            UNROLL for (int i = 0; i < HEAD / 4; i++) { sum[m][i / 2][2 * half + i % 2] *= before; }
        }
    }
}
// Sets the scores of keys after their query to -infinity. `behind` is the position of the first key
// minus the position of the first query. TRANSPOSED: rows are keys.
template <bool TRANSPOSED, int M, int N>
__device__ void hide_scores(float scores[M][N / 8][4], int behind) {
    UNROLL for (int i = 0; i < M * N / 2; i++) {
        const int m = i / (N / 2), n = i / 4 % (N / 8), e = i % 4,
                  row = 16 * m + fragment_row(e / 2), column = 8 * n + fragment_column(e % 2);
        if ((TRANSPOSED ? row - column : column - row) + behind > 0) {
            scores[m][n][e] = -INFINITY;
        }
    }
}
template <int HEAD, int M, int KEYS>
__global__ void __launch_bounds__(MMA_THREADS)
    attention_mma_kernel(Bf16 *out, float *lse, const Bf16 *qkv, AttentionSizes a) {
    enum { QUERIES = 16 * M * MMA_WARPS, STAGE = KEYS * (HEAD + SPARE) };
    DYNAMIC_SHARED(Bf16, q);
    Bf16 *k = q + QUERIES * (HEAD + SPARE), *v = k + 2 * STAGE;
    // blocks with the most keys first
    const int T = (int)a.T, D = (int)a.D, q0 = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES,
              end = (int)least(q0 + QUERIES, T);
    const int of_warp = (int)threadIdx.x / 32 * 16 * M, first = q0 + of_warp;
    const int64_t head = blockIdx.y, b = blockIdx.z, stride = a.stride;
    const Bf16 *from = qkv + b * T * stride + head * D,
               *keys = qkv + b * T * stride + a.k + key_head(a, head) * D;
    float sum[M][HEAD / 8][4], top[M][2], total[M][2];
    clear_tiles<M, HEAD / 8>(sum);
    UNROLL for (int i = 0; i < 2 * M; i++) {
        top[i / 2][i % 2] = -INFINITY;
        total[i / 2][i % 2] = 0.0f;
    }
    start_tile<HEAD, QUERIES>(q, from + q0 * stride, T - q0, D, stride);
    start_tile<HEAD, KEYS>(k, keys, T, D, stride);
    start_tile<HEAD, KEYS>(v, keys + a.v - a.k, T, D, stride);
    for (int k0 = 0, now = 0; k0 < end; k0 += KEYS, now = STAGE - now) {
        const int next = k0 + KEYS;
        copy_async_wait();
        __syncthreads(); // this tile is complete, and all threads are done with the one before
        if (next < end) {
            start_tile<HEAD, KEYS>(k + STAGE - now, keys + next * stride, T - next, D, stride);
            start_tile<HEAD, KEYS>(v + STAGE - now, keys + next * stride + a.v - a.k, T - next, D,
                                   stride);
        }
        // Skip keys after all queries of this warp, and warps without queries.
        if (k0 >= first + 16 * M || first >= T) { continue; }
        float scores[M][KEYS / 8][4];
        multiply_transposed<HEAD, M, KEYS>(scores, q + of_warp * (HEAD + SPARE), k + now);
        if (next > first) { hide_scores<false, M, KEYS>(scores, k0 - first); }
        softmax_scores<HEAD, M, KEYS>(scores, sum, top, total, a.scale * LOG2_E);
        multiply_add<HEAD, M, KEYS>(sum, scores, v + now);
    }
    UNROLL for (int i = 0; i < 2 * M; i++) {
        float *x = &total[i / 2][i % 2];
        const int query = first + i / 2 * 16 + fragment_row(i % 2);
        *x = over_quad(*x, false);
        if (lane() % 4 == 0 && query < T) {
            lse[(b * a.heads + head) * T + query] = a.scale * top[i / 2][i % 2] + logf(*x);
        }
        *x = 1.0f / *x;
    }
    store_sums<HEAD, M>(out + (b * T + first) * a.k + head * D, sum, total, T - first, D, a.k);
}

// Gives each of a thread's rows the same factor.
template <int M> __device__ void fill_rows(float factors[M][2], float value) {
    UNROLL for (int i = 0; i < 2 * M; i++) { factors[i / 2][i % 2] = value; }
}
// Backward for keys. A warp has 16 M keys and computes transposed scores (keys, queries), so that
// it can sum over queries: those of each head that reads these keys, one head after another.
template <int HEAD, int M, int QUERIES>
__global__ void __launch_bounds__(MMA_THREADS)
    attention_mma_keys_kernel(Bf16 *dqkv, const Bf16 *dout, const Bf16 *qkv, const float *lse,
                              const float *delta, AttentionSizes a) {
    enum { KEYS = 16 * M * MMA_WARPS, STAGE = QUERIES * (HEAD + SPARE) };
    DYNAMIC_SHARED(Bf16, k);
    Bf16 *v = k + KEYS * (HEAD + SPARE), *q = v + KEYS * (HEAD + SPARE), *dy = q + 2 * STAGE;
    float *statistics = (float *)(void *)(dy + 2 * STAGE); // lse and delta of each stage
    const int T = (int)a.T, D = (int)a.D, k0 = (int)blockIdx.x * KEYS,
              of_warp = (int)threadIdx.x / 32 * 16 * M, first = k0 + of_warp;
    const int group = (int)(a.heads / a.kv_heads), tiles = (T - k0 + QUERIES - 1) / QUERIES;
    const int64_t b = blockIdx.z, stride = a.stride, head0 = (int64_t)blockIdx.y * group;
    const Bf16 *keys = qkv + (b * T + k0) * stride + a.k + blockIdx.y * D;
    float dk[M][HEAD / 8][4], dv[M][HEAD / 8][4];
    clear_tiles<M, HEAD / 8>(dk);
    clear_tiles<M, HEAD / 8>(dv);
    const auto start_queries = [&](int i, int stage) { // tile i of all heads
        const int q0 = k0 + i % tiles * QUERIES;
        const int64_t head = head0 + i / tiles, row = (b * a.heads + head) * T;
        start_tile<HEAD, QUERIES>(q + stage * STAGE, qkv + (b * T + q0) * stride + head * D, T - q0,
                                  D, stride);
        start_tile<HEAD, QUERIES>(dy + stage * STAGE, dout + (b * T + q0) * a.k + head * D, T - q0,
                                  D, a.k);
        for (int i = (int)threadIdx.x; i < 2 * QUERIES; i += MMA_THREADS) {
            const bool there = q0 + i % QUERIES < T;
            copy_async_4(statistics + 2 * QUERIES * stage + i,
                         (i < QUERIES ? lse : delta) + row + (there ? q0 + i % QUERIES : 0), there);
        }
    };
    start_tile<HEAD, KEYS>(k, keys, T - k0, D, stride);
    start_tile<HEAD, KEYS>(v, keys + a.v - a.k, T - k0, D, stride);
    start_queries(0, 0);
    for (int tile = 0, stage = 0; tile < group * tiles; tile++, stage = 1 - stage) {
        const int q0 = k0 + tile % tiles * QUERIES;
        copy_async_wait();
        __syncthreads();
        if (tile + 1 < group * tiles) { start_queries(tile + 1, 1 - stage); }
        // Skip queries before all keys of this warp, and warps without keys.
        if (q0 + QUERIES <= first || first >= T) { continue; }
        float p[M][QUERIES / 8][4], dp[M][QUERIES / 8][4];
        multiply_transposed<HEAD, M, QUERIES>(p, k + of_warp * (HEAD + SPARE), q + stage * STAGE);
        multiply_transposed<HEAD, M, QUERIES>(dp, v + of_warp * (HEAD + SPARE), dy + stage * STAGE);
        if (q0 < first + 16 * M) { hide_scores<true, M, QUERIES>(p, first - q0); }
        // Queries beyond T add nothing, because their dout and delta are 0.
        UNROLL for (int i = 0; i < M * QUERIES / 2; i++) {
            const int m = i / (QUERIES / 2), n = i / 4 % (QUERIES / 8), e = i % 4;
            const float *of_query =
                statistics + 2 * QUERIES * stage + 8 * n + fragment_column(e % 2);
            p[m][n][e] = power_of_2(a.scale * LOG2_E * p[m][n][e] - LOG2_E * of_query[0]);
            dp[m][n][e] = p[m][n][e] * (dp[m][n][e] - of_query[QUERIES]);
        }
        multiply_add<HEAD, M, QUERIES>(dv, p, dy + stage * STAGE);
        multiply_add<HEAD, M, QUERIES>(dk, dp, q + stage * STAGE);
    }
    float one[M][2], scale[M][2];
    fill_rows<M>(one, 1.0f);
    fill_rows<M>(scale, a.scale);
    Bf16 *to = dqkv + (b * T + first) * stride + blockIdx.y * D;
    store_sums<HEAD, M>(to + a.k, dk, scale, T - first, D, stride);
    store_sums<HEAD, M>(to + a.v, dv, one, T - first, D, stride);
}
// Backward for queries. A warp has 16 M queries and sums over the keys that they see.
template <int HEAD, int M, int KEYS>
__global__ void __launch_bounds__(MMA_THREADS)
    attention_mma_queries_kernel(Bf16 *dqkv, const Bf16 *dout, const Bf16 *qkv, const float *lse,
                                 const float *delta, AttentionSizes a) {
    enum { QUERIES = 16 * M * MMA_WARPS, STAGE = KEYS * (HEAD + SPARE) };
    DYNAMIC_SHARED(Bf16, q);
    Bf16 *dy = q + QUERIES * (HEAD + SPARE), *k = dy + QUERIES * (HEAD + SPARE), *v = k + 2 * STAGE;
    const int T = (int)a.T, D = (int)a.D, q0 = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES,
              end = (int)least(q0 + QUERIES, T);
    const int of_warp = (int)threadIdx.x / 32 * 16 * M, first = q0 + of_warp;
    const int64_t head = blockIdx.y, b = blockIdx.z, stride = a.stride,
                  row = (b * a.heads + head) * T;
    const Bf16 *from = qkv + b * T * stride + head * D,
               *keys = qkv + b * T * stride + a.k + key_head(a, head) * D;
    float dq[M][HEAD / 8][4], of_lse[M][2], of_delta[M][2], scale[M][2];
    clear_tiles<M, HEAD / 8>(dq);
    UNROLL for (int i = 0; i < 2 * M; i++) {
        const int query = first + i / 2 * 16 + fragment_row(i % 2);
        of_lse[i / 2][i % 2] = query < T ? LOG2_E * lse[row + query] : 0.0f;
        of_delta[i / 2][i % 2] = query < T ? delta[row + query] : 0.0f;
    }
    fill_rows<M>(scale, a.scale);
    start_tile<HEAD, QUERIES>(q, from + q0 * stride, T - q0, D, stride);
    start_tile<HEAD, QUERIES>(dy, dout + (b * T + q0) * a.k + head * D, T - q0, D, a.k);
    start_tile<HEAD, KEYS>(k, keys, T, D, stride);
    start_tile<HEAD, KEYS>(v, keys + a.v - a.k, T, D, stride);
    for (int k0 = 0, now = 0; k0 < end; k0 += KEYS, now = STAGE - now) {
        const int next = k0 + KEYS;
        copy_async_wait();
        __syncthreads();
        if (next < end) {
            start_tile<HEAD, KEYS>(k + STAGE - now, keys + next * stride, T - next, D, stride);
            start_tile<HEAD, KEYS>(v + STAGE - now, keys + next * stride + a.v - a.k, T - next, D,
                                   stride);
        }
        if (k0 >= first + 16 * M || first >= T) { continue; }
        float p[M][KEYS / 8][4], dp[M][KEYS / 8][4];
        multiply_transposed<HEAD, M, KEYS>(p, q + of_warp * (HEAD + SPARE), k + now);
        multiply_transposed<HEAD, M, KEYS>(dp, dy + of_warp * (HEAD + SPARE), v + now);
        if (next > first) { hide_scores<false, M, KEYS>(p, k0 - first); }
        UNROLL for (int i = 0; i < M * KEYS / 2; i++) {
            const int m = i / (KEYS / 2), n = i / 4 % (KEYS / 8), e = i % 4;
            dp[m][n][e] = power_of_2(a.scale * LOG2_E * p[m][n][e] - of_lse[m][e / 2]) *
                          (dp[m][n][e] - of_delta[m][e / 2]);
        }
        multiply_add<HEAD, M, KEYS>(dq, dp, k + now);
    }
    store_sums<HEAD, M>(dqkv + (b * T + first) * stride + head * D, dq, scale, T - first, D,
                        stride);
}

static inline bool on_tensor_cores(const AttentionSizes *a) {
    return gpu_real == DTYPE_BF16 && a->D % 8 == 0 && a->D <= 128;
}
// Shared memory of a block. own: number of the block's tiles, of `rows` (16 M MMA_WARPS) rows each.
// It visits two tiles of other_rows rows at a time, in two stages.
static inline int mma_bytes(int head, int rows, int own, int other_rows) {
    return (own * rows + 4 * other_rows) * (head + SPARE) * 2;
}
template <int HEAD, int M, int KEYS>
static inline void attention_mma_forward(Stream *s, AttentionSizes a, Real *out, float *lse,
                                         const Real *qkv) {
    const int queries = 16 * M * MMA_WARPS;
    launch_with(s, attention_mma_kernel<HEAD, M, KEYS>, attention_grid(&a, queries, a.heads),
                MMA_THREADS, mma_bytes(HEAD, queries, 1, KEYS), out, lse, qkv, a);
}
template <int HEAD, int M, int OTHER>
static inline void attention_mma_backward(Stream *s, AttentionSizes a, Real *dqkv, const Real *dout,
                                          const Real *qkv, const float *lse, const float *delta) {
    const int rows = 16 * M * MMA_WARPS, bytes = mma_bytes(HEAD, rows, 2, OTHER),
              statistics = 4 * OTHER * (int)sizeof(float);
    launch_with(s, attention_mma_keys_kernel<HEAD, M, OTHER>, attention_grid(&a, rows, a.kv_heads),
                MMA_THREADS, bytes + statistics, dqkv, dout, qkv, lse, delta, a);
    launch_with(s, attention_mma_queries_kernel<HEAD, M, OTHER>, attention_grid(&a, rows, a.heads),
                MMA_THREADS, bytes, dqkv, dout, qkv, lse, delta, a);
}

// -------------------------------------------------------------------------------------------------
// The plain kernels. Queries and keys are in tiles of TILE. A block of SIDE x SIDE threads has one
// tile of one head, and visits the tiles of the other kind. Of each small product, thread (y, x)
// computes rows y + SIDE i and columns x + SIDE j, so that neighbouring threads read neighbouring
// elements. Rows in shared memory have one extra column against bank conflicts: D + 1, and TILE + 1
// for scores. Sums stay in registers; HEAD is D rounded up to a compiled size. Only dk and dv of
// 256 channels do not fit: about 0.8 KB per thread is spilled (sm_90; 1 KB on sm_80).
enum {
    TILE = 32,
    SIDE = 8,
    PER = TILE / SIDE,
    ATTENTION_THREADS = SIDE * SIDE,
    HEAD_MOST = 2 * ROTARY_PAIRS
};

// to(TILE, D) = scale * rows of from(rows, D), which are `stride` apart, padded with zero rows
template <class R>
__device__ void load_tile(float *to, const R *from, int64_t rows, int D, int64_t stride,
                          float scale) {
    for (int i = (int)threadIdx.x; i < TILE * D; i += ATTENTION_THREADS) {
        const int row = i / D, d = i % D;
        to[row * (D + 1) + d] = row < rows ? scale * read(from + row * stride + d) : 0.0f;
    }
}
// products[i][j] = row y + SIDE i of a . row x + SIDE j of b
__device__ void tile_dots(float products[PER][PER], const float *a, const float *b, int D) {
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    for (int i = 0; i < PER; i++) {
        for (int j = 0; j < PER; j++) { products[i][j] = 0.0f; }
    }
    for (int d = 0; d < D; d++) {
        float row[PER], column[PER];
        for (int i = 0; i < PER; i++) {
            row[i] = a[(y + SIDE * i) * (D + 1) + d];
            column[i] = b[(x + SIDE * i) * (D + 1) + d];
        }
        for (int i = 0; i < PER; i++) {
            for (int j = 0; j < PER; j++) { products[i][j] += row[i] * column[j]; }
        }
    }
}
__device__ void store_scores(float *to, const float scores[PER][PER]) {
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    for (int i = 0; i < PER; i++) {
        for (int j = 0; j < PER; j++) {
            to[(y + SIDE * i) * (TILE + 1) + x + SIDE * j] = scores[i][j];
        }
    }
}
// sum(TILE, D) += w b, where w(TILE, TILE) may be transposed, and b is (TILE, D)
template <int HEAD>
__device__ void tile_product(float sum[PER][HEAD / SIDE], const float *w, bool transposed,
                             const float *b, int D) {
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    for (int k = 0; k < TILE; k++) {
        float row[PER];
        for (int i = 0; i < PER; i++) {
            row[i] =
                transposed ? w[k * (TILE + 1) + y + SIDE * i] : w[(y + SIDE * i) * (TILE + 1) + k];
        }
        for (int j = 0; j < HEAD / SIDE; j++) {
            const float value = x + SIDE * j < D ? b[k * (D + 1) + x + SIDE * j] : 0.0f;
            for (int i = 0; i < PER; i++) { sum[i][j] += row[i] * value; }
        }
    }
}
template <class R, int HEAD>
__device__ void store_rows(R *to, const float sum[PER][HEAD / SIDE], const float *factor,
                           int64_t rows, int D, int64_t stride) {
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    for (int i = 0; i < PER; i++) {
        for (int j = 0; j < HEAD / SIDE; j++) {
            if (y + SIDE * i < rows && x + SIDE * j < D) {
                write(to + (y + SIDE * i) * stride + x + SIDE * j, sum[i][j] * factor[i]);
            }
        }
    }
}
template <int HEAD> __device__ void clear(float sum[PER][HEAD / SIDE]) {
    for (int i = 0; i < PER; i++) {
        for (int j = 0; j < HEAD / SIDE; j++) { sum[i][j] = 0.0f; }
    }
}

// Adds a tile of scores to the running softmax. Scores become e^(score - top), and the caller must
// multiply its earlier sums by factor.
__device__ void softmax_tile(float scores[PER][PER], float *top, float *sum, float *factor,
                             int64_t q0, int64_t k0, int64_t T) {
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
        // finite: in every tile visited, each query sees a key
        top[i] = fmaxf(before, lanes_reduce(highest, SIDE, true));
        factor[i] = expf(before - top[i]);
        for (int j = 0; j < PER; j++) { total += scores[i][j] = expf(scores[i][j] - top[i]); }
        sum[i] = sum[i] * factor[i] + lanes_reduce(total, SIDE, false);
    }
}
template <class R, int HEAD>
__global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_kernel(R *out, float *lse, const R *qkv, AttentionSizes a) {
    DYNAMIC_SHARED(float, shared);
    const int D = (int)a.D;
    const int64_t T = a.T;
    float *q = shared, *kv = q + TILE * (D + 1), *weights = kv + TILE * (D + 1);
    const int64_t q0 = (int64_t)blockIdx.x * TILE, head = blockIdx.y, b = blockIdx.z,
                  rows = least(T - q0, TILE);
    const int y = (int)threadIdx.x / SIDE, x = (int)threadIdx.x % SIDE;
    const R *mine = qkv + b * T * a.stride + head * D,
            *keys = qkv + b * T * a.stride + a.k + key_head(a, head) * D;
    float scores[PER][PER], acc[PER][HEAD / SIDE], top[PER], sum[PER], factor[PER];
    clear<HEAD>(acc);
    for (int i = 0; i < PER; i++) {
        top[i] = -INFINITY;
        sum[i] = 0.0f;
    }
    load_tile(q, mine + q0 * a.stride, rows, D, a.stride, a.scale);
    for (int64_t k0 = 0; k0 <= q0; k0 += TILE) {
        __syncthreads(); // all threads are done with the tile before
        load_tile(kv, keys + k0 * a.stride, T - k0, D, a.stride, 1.0f);
        __syncthreads();
        tile_dots(scores, q, kv, D);
        softmax_tile(scores, top, sum, factor, q0, k0, T);
        store_scores(weights, scores);
        __syncthreads(); // all threads are done with the keys; the values overwrite them
        load_tile(kv, keys + k0 * a.stride + a.v - a.k, T - k0, D, a.stride, 1.0f);
        for (int i = 0; i < PER; i++) {
            for (int j = 0; j < HEAD / SIDE; j++) { acc[i][j] *= factor[i]; }
        }
        __syncthreads();
        tile_product<HEAD>(acc, weights, false, kv, D);
    }
    for (int i = 0; i < PER; i++) {
        if (x == 0 && y + SIDE * i < rows) {
            lse[(b * gridDim.y + head) * T + q0 + y + SIDE * i] = top[i] + logf(sum[i]);
        }
        factor[i] = 1.0f / sum[i];
    }
    store_rows<R, HEAD>(out + (b * T + q0) * a.k + head * D, acc, factor, rows, D, a.k);
}

// The tiles of a backward kernel in shared memory, and the statistics of a head.
typedef struct {
    float *q, *k, *v, *dout;  // (TILE, D); q is scaled
    float *weights, *dscores; // (TILE, TILE): (queries, keys)
    const float *lse, *delta; // (T)
} BackwardTiles;
__device__ BackwardTiles backward_tiles(float *shared, int D) {
    const int64_t tile = TILE * (D + 1);
    BackwardTiles t = {};
    t.q = shared;
    t.k = shared + tile;
    t.v = shared + 2 * tile;
    t.dout = shared + 3 * tile;
    t.weights = shared + 4 * tile;
    t.dscores = shared + 4 * tile + TILE * (TILE + 1);
    return t;
}
// Computes weights and dscores of the queries from q0 on and the keys from k0 on; they are 0 where
// a query does not see a key.
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
// With KEYS, a block has a tile of keys, and sums dk and dv over the queries that see them: those
// of each head that reads the keys, one head after another. Otherwise it has a tile of queries, and
// sums dq over the keys that they see.
template <class R, int HEAD, bool KEYS>
__global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_backward_kernel(R *dqkv, const R *dout, const R *qkv, const float *lse,
                              const float *delta, AttentionSizes a) {
    DYNAMIC_SHARED(float, shared);
    const int D = (int)a.D;
    BackwardTiles t = backward_tiles(shared, D);
    const int64_t group = KEYS ? a.heads / a.kv_heads : 1, head0 = blockIdx.y * group,
                  key = KEYS ? blockIdx.y : key_head(a, blockIdx.y), T = a.T,
                  own = (int64_t)blockIdx.x * TILE, at = blockIdx.z * T,
                  rows = least(T - own, TILE);
    const R *keys = qkv + at * a.stride + a.k + key * D;
    const auto load = [&](bool of_keys, int64_t head, int64_t first, int64_t rows) {
        if (of_keys) {
            load_tile(t.k, keys + first * a.stride, rows, D, a.stride, 1.0f);
            load_tile(t.v, keys + first * a.stride + a.v - a.k, rows, D, a.stride, 1.0f);
        } else {
            load_tile(t.q, qkv + (at + first) * a.stride + head * D, rows, D, a.stride, a.scale);
            load_tile(t.dout, dout + (at + first) * a.k + head * D, rows, D, a.k, 1.0f);
        }
    };
    float dq_or_dk[PER][HEAD / SIDE], dv[PER][HEAD / SIDE];
    const float one[PER] = {1.0f, 1.0f, 1.0f, 1.0f},
                scales[PER] = {a.scale, a.scale, a.scale, a.scale};
    clear<HEAD>(dq_or_dk);
    clear<HEAD>(dv);
    load(KEYS, head0, own, rows);
    const int64_t begin = KEYS ? own : 0, end = KEYS ? T : own + TILE;
    for (int64_t head = head0; head < head0 + group; head++) {
        t.lse = lse + (blockIdx.z * a.heads + head) * T;
        t.delta = delta + (blockIdx.z * a.heads + head) * T;
        for (int64_t other = begin; other < end; other += TILE) {
            __syncthreads();
            load(!KEYS, head, other, T - other);
            __syncthreads();
            backward_scores(&t, KEYS ? other : own, KEYS ? own : other, T, D);
            __syncthreads();
            if (KEYS) { tile_product<HEAD>(dv, t.weights, true, t.dout, D); }
            tile_product<HEAD>(dq_or_dk, t.dscores, KEYS, KEYS ? t.q : t.k, D);
        }
    }
    R *to = dqkv + (at + own) * a.stride + (KEYS ? a.k + key * D : head0 * D);
    store_rows<R, HEAD>(to, dq_or_dk, KEYS ? one : scales, rows, D, a.stride);
    if (KEYS) { store_rows<R, HEAD>(to + a.v - a.k, dv, one, rows, D, a.stride); }
}

// Runs the arguments once, with R as FOR_REAL defines it, and HEAD the smallest compiled size that
// holds D channels.
#define FOR_HEAD(D, ...)                                                                           \
    do {                                                                                           \
        if ((D) <= 64) {                                                                           \
            enum { HEAD = 64 };                                                                    \
            FOR_REAL(__VA_ARGS__);                                                                 \
        } else if ((D) <= 128) {                                                                   \
            enum { HEAD = 128 };                                                                   \
            FOR_REAL(__VA_ARGS__);                                                                 \
        } else {                                                                                   \
            enum { HEAD = HEAD_MOST };                                                             \
            FOR_REAL(__VA_ARGS__);                                                                 \
        }                                                                                          \
    } while (0)
// Shared memory of the forward kernel. The backward kernels have twice as many tiles of each kind.
static inline int plain_bytes(int64_t D) {
    return (int)(sizeof(float) * (size_t)(2 * TILE * (D + 1) + TILE * (TILE + 1)));
}

// -------------------------------------------------------------------------------------------------
static inline AttentionSizes attention_sizes(const AttentionShape *a) {
    const AttentionSizes sizes = {.rows = a->rows,
                                  .T = a->T,
                                  .heads = a->heads,
                                  .kv_heads = a->kv_heads,
                                  .D = a->D,
                                  .stride = attention_qkv_width(*a),
                                  .k = a->heads * a->D,
                                  .v = (a->heads + a->kv_heads) * a->D,
                                  .scale = 1.0f / sqrtf((float)a->D)};
    if (a->D > HEAD_MOST) {
        die(EXIT_INPUT, "choose more heads",
            "a head of %" PRId64 " channels; the GPU build takes at most %d", a->D, HEAD_MOST);
    }
    return sizes;
}
static inline int64_t attention_scratch_bytes(OpsShape s) {
    int64_t bytes = s.rows * s.T * s.NH * (int64_t)sizeof(float); // delta
#ifdef USE_CUDNN
    bytes = max_i64(bytes, cudnn_scratch_bytes(s));
#endif
    return bytes;
}
static inline const char *ops_attention(void) {
#ifdef USE_CUDNN
    return cudnn_attention();
#else
    return "own";
#endif
}
static inline void ops_attention_forward(Stream *s, Real *out, float *lse, const Real *qkv,
                                         AttentionShape shape) {
    if (shape.rows * shape.T == 0) { return; }
#ifdef USE_CUDNN
    if (cudnn_attention_forward(s, out, lse, qkv, shape)) { return; }
#endif
    const AttentionSizes a = attention_sizes(&shape);
    if (!on_tensor_cores(&a)) {
        FOR_HEAD(a.D, launch_with(s, attention_kernel<R, HEAD>, attention_grid(&a, TILE, a.heads),
                                  ATTENTION_THREADS, plain_bytes(a.D), out, lse, qkv, a));
    } else if (a.D <= 64) {
        attention_mma_forward<64, 2, 64>(s, a, out, lse, qkv);
    } else {
        attention_mma_forward<128, 2, 32>(s, a, out, lse, qkv);
    }
}
static inline void ops_attention_backward(Stream *s, Real *dqkv, const Real *dout, const Real *qkv,
                                          const Real *out, const float *lse, AttentionShape shape) {
    const int64_t n = shape.rows * shape.heads * shape.T;
    if (n == 0) { return; }
#ifdef USE_CUDNN
    if (cudnn_attention_backward(s, dqkv, dout, qkv, out, lse, shape)) { return; }
#endif
    const AttentionSizes a = attention_sizes(&shape);
    float *delta = (float *)scratch(s);
    assert(n * (int64_t)sizeof(float) <= scratch_bytes(s));
    attention_delta(s, delta, dout, out, shape);
    if (!on_tensor_cores(&a)) {
        const int bytes = 2 * plain_bytes(a.D);
        FOR_HEAD(a.D, launch_with(s, attention_backward_kernel<R, HEAD, true>,
                                  attention_grid(&a, TILE, a.kv_heads), ATTENTION_THREADS, bytes,
                                  dqkv, dout, qkv, lse, delta, a));
        FOR_HEAD(a.D, launch_with(s, attention_backward_kernel<R, HEAD, false>,
                                  attention_grid(&a, TILE, a.heads), ATTENTION_THREADS, bytes, dqkv,
                                  dout, qkv, lse, delta, a));
    } else if (a.D <= 64) {
        attention_mma_backward<64, 2, 32>(s, a, dqkv, dout, qkv, lse, delta);
    } else {
        attention_mma_backward<128, 1, 32>(s, a, dqkv, dout, qkv, lse, delta);
    }
}

#endif
