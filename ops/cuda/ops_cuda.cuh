// ops_cuda.cuh: the tensor operations on a GPU, with our own kernels. The contract is ops.h.
// ops/cuda/device_cuda.cuh has the GPU itself.
//
// Precision  Real is fp32 or bf16, as passed to ops_open() (--dtype). Kernels are templates over it
//            and compute in fp32. Products of fp32 matrices are exact fp32. With -DUSE_TF32 (make
//            cuda TF32=1), cuBLASLt may round their operands to 10 bits.
// Sums       of floating-point numbers have one order, fixed by the shape. Atomics add integers
//            only (ops_square_sum). So the same call gives the same bits.
#ifndef OPS_CUDA_CUH
#define OPS_CUDA_CUH

#include "ops/cuda/attention_cuda.cuh"      // attention
#include "ops/cuda/attention_kept_cuda.cuh" // attention to keys that are kept
#include "ops/cuda/matmul_cuda.cuh"         // matrix products by cuBLASLt
#include "ops/cuda/muon_cuda.cuh"           // Muon
#include "ops/cuda/quantize_cuda.cuh"       // quantization
#include <float.h>                          // FLT_MAX

// --- embedding -----------------------------------------------------------------------------------
// A warp takes a row, each lane 8 channels at a time.
template <class R>
__global__ void embedding_kernel(R *out, const int32_t *tokens, const R *wte, const R *wpe, int N,
                                 int T, int64_t C) {
    const int n = (int)warp_index();
    if (n >= N) { return; }
    const R *token = wte + tokens[n] * C, *position = wpe ? wpe + n % T * C : NULL;
    for (int64_t c = threadIdx.x % 32 * 8; c < C; c += 32 * 8) {
        float x[8], more[8];
        read_numbers<8>(x, token + c, C - c);
        if (position) {
            read_numbers<8>(more, position + c, C - c);
            UNROLL for (int j = 0; j < 8; j++) { x[j] += more[j]; }
        }
        write_numbers<8>(out + n * C + c, x, C - c);
    }
}
static inline void ops_embedding_forward(Stream *s, Real *out, const int32_t *tokens,
                                         const Real *wte, const Real *wpe, int64_t rows, int64_t T,
                                         int64_t C) {
    const int64_t N = rows * T;
    LAUNCH_REAL(s, embedding_kernel, blocks_for(N, WARPS), out, tokens, wte, wpe, (int)N, (int)T,
                C);
}

// order(N) = positions sorted by token; positions of equal tokens stay in order. Each row of the
// grid sorts N tokens of its own: by a digit of DIGIT_BITS at a time, the lowest first. A warp
// takes SORT_EACH entries, a block SORT_BLOCK; thread d counts those of digit d. Several blocks
// first only store their counts.
enum { DIGIT_BITS = 9, DIGITS = 1 << DIGIT_BITS, SORT_WARPS = DIGITS / 32, SORT_EACH = 128 };
enum { SORT_BLOCK = SORT_WARPS * SORT_EACH };
__global__ void __launch_bounds__(DIGITS)
    order_tokens_kernel(int32_t *to, const int32_t *from, int32_t *counts, const int32_t *tokens,
                        int N, int shift, bool counting) {
    __shared__ int32_t places[SORT_WARPS][DIGITS], sums[SORT_WARPS];
    const int d = (int)threadIdx.x, lane = d % 32, warp = d / 32,
              begin = ((int)blockIdx.x * SORT_WARPS + warp) * SORT_EACH,
              end = begin + SORT_EACH < N ? begin + SORT_EACH : N;
    to += (int64_t)blockIdx.y * N;
    tokens += (int64_t)blockIdx.y * N;
    counts += (int64_t)blockIdx.y * gridDim.x * DIGITS + d;
    const auto position = [&](int i) { return from ? from[(int64_t)blockIdx.y * N + i] : i; };
    const auto digit = [&](int n) { return tokens[n] >> shift & (DIGITS - 1); };
    for (int w = 0; w < SORT_WARPS; w++) { places[w][d] = 0; }
    __syncthreads();
    for (int i = begin + lane; i < end; i += 32) {
        atomicAdd(&places[warp][digit(position(i))], 1);
    }
    __syncthreads();
    int total = 0, place = 0;
    for (int w = 0; w < SORT_WARPS; w++) { total += places[w][d]; }
    if (counting) {
        counts[blockIdx.x * DIGITS] = total;
        return;
    }
    total = gridDim.x > 1 ? 0 : total;
    for (unsigned b = 0; b < gridDim.x && gridDim.x > 1; b++) { // of this digit, in all blocks
        const int count = counts[b * DIGITS];
        total += count;
        place += b < blockIdx.x ? count : 0;
    }
    int below = total; // of this digit or a lower one of this warp, then of lower ones
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_sync(ALL_LANES, below, lane - by);
        below += lane >= by ? other : 0;
    }
    if (lane == 31) { sums[warp] = below; }
    __syncthreads();
    place += below - total;
    for (int w = 0; w < warp; w++) { place += sums[w]; }
    for (int w = 0; w < SORT_WARPS; w++) { // where the warp's first entry of this digit goes
        const int count = places[w][d];
        places[w][d] = place;
        place += count;
    }
    __syncthreads();
    for (int first = begin; first < end; first += 32) {
        const bool there = first + lane < end;
        const int n = there ? position(first + lane) : 0, mine = there ? digit(n) : 0;
        unsigned equal = __ballot_sync(ALL_LANES, there);
        UNROLL for (int b = 0; b < DIGIT_BITS; b++) {
            const unsigned ones = __ballot_sync(ALL_LANES, mine >> b & 1);
            equal &= mine >> b & 1 ? ones : ~ones;
        }
        const int before = __popc(equal & ((1u << lane) - 1));
        if (there) { to[places[warp][mine] + before] = n; }
        __syncwarp();
        if (there && before == 0) { places[warp][mine] += __popc(equal); }
        __syncwarp();
    }
}
// What order_tokens() needs for a row of N tokens, in numbers: the order, the same before its last
// step, the counts of several blocks.
static inline int64_t order_numbers(int64_t N) {
    return 2 * N + (N > SORT_BLOCK ? ceil_div(N, SORT_BLOCK) * DIGITS : 0);
}
// Tokens are below `most`. `order` is scratch of rows * order_numbers(N) numbers. Returns it.
static inline const int32_t *order_tokens(Stream *s, int32_t *order, const int32_t *tokens,
                                          int64_t rows, int64_t N, int64_t most) {
    int32_t *other = order + rows * N, *counts = other + rows * N, *from = NULL;
    int steps = 1;
    while (most > (int64_t)1 << steps * DIGIT_BITS) { steps++; }
    assert((char *)(order + rows * order_numbers(N)) <= (char *)s->workspace + s->workspace_bytes);
    const dim3 grid(blocks_for(N, SORT_BLOCK), (unsigned)rows);
    for (int step = 0; step < steps; step++) {
        int32_t *to = (steps - step) % 2 ? order : other;
        for (int counting = N > SORT_BLOCK; counting >= 0; counting--) {
            launch_with(s, order_tokens_kernel, grid, DIGITS, 0, to, from, counts, tokens, (int)N,
                        step * DIGIT_BITS, counting);
        }
        from = to;
    }
    return order;
}
__device__ float factor_of_sample(const float *factors, int b) {
    return factors ? factors[b] : 1.0f;
}
// Adds factor(k) times the CHANNELS channels from dout + row(k) * C on, for k < ROWS, in order.
// A row whose factor is 0 adds nothing, whatever it holds.
template <int ROWS, int CHANNELS, class R, class Row, class Factor>
__device__ void add_rows(float *sum, const R *dout, int64_t C, Row row, Factor factor) {
    typedef typename Vector<CHANNELS, R>::Part Part;
    Part part[ROWS];
    UNROLL for (int k = 0; k < ROWS; k++) { part[k] = *(const Part *)(dout + row(k) * C); }
    UNROLL for (int k = 0; k < ROWS; k++) {
        const float by = factor(k);
        UNROLL for (int j = 0; j < CHANNELS; j++) {
            if (by != 0.0f) { sum[j] += by * read(&part[k].x[j]); }
        }
    }
}
// A lane's entry of the order; token -1: there is none.
struct Entry {
    int32_t position, token;
    float factor;
};
__device__ int32_t position_at(const int32_t *order, int i, int N) { return i < N ? order[i] : -1; }
__device__ Entry entry_of(int32_t position, const int32_t *tokens, const float *factors, int T) {
    if (position < 0) { return {0, -1, 0.0f}; }
    return {position, tokens[position], factor_of_sample(factors, position / T)};
}
// A warp takes 32 entries of the order, and 32 * CHANNELS channels. Of each token whose first entry
// is among them, it adds all positions, one after another.
template <int CHANNELS, class R>
__global__ void embedding_backward_wte_kernel(float *dwte, const R *dout, const int32_t *tokens,
                                              const int32_t *order, const float *factors, int N,
                                              int T, int64_t C) {
    const int lane = (int)threadIdx.x % 32, begin = (int)warp_index() * 32;
    const int64_t c = ((int64_t)blockIdx.y * 32 + lane) * CHANNELS;
    const Entry mine = entry_of(position_at(order, begin + lane, N), tokens, factors, T);
    const int32_t second = position_at(order, begin + 32 + lane, N);
    int32_t before = __shfl_sync(ALL_LANES, mine.token, lane - 1);
    if (lane == 0) { before = begin && begin < N ? tokens[order[begin - 1]] : -1; }
    const unsigned firsts = __ballot_sync(ALL_LANES, mine.token != before);
    dout += c < C ? c : 0; // every lane takes part in exchanges
    for (int at = 0; at < 32; at++) {
        const int32_t token = __shfl_sync(ALL_LANES, mine.token, at);
        if (!(firsts >> at & 1) || token < 0) { continue; }
        float sum[CHANNELS], *to = dwte + token * C + c;
        if (c < C) { read_numbers<CHANNELS>(sum, to, CHANNELS); }
        Entry now = mine, next = mine;
        int32_t later = second; // is read long before it is needed
        for (int k = at, entry = begin + 32 + lane, end = 32; end == 32; k = 0, now = next) {
            end = k + __popc(__ballot_sync(ALL_LANES, now.token == token));
            if (end == 32) {
                next = entry_of(later, tokens, factors, T);
                later = position_at(order, entry += 32, N);
            }
            const auto row = [&](int i) {
                return (int64_t)__shfl_sync(ALL_LANES, now.position, k + i);
            };
            const auto factor = [&](int i) { return __shfl_sync(ALL_LANES, now.factor, k + i); };
            for (; k + 16 <= end; k += 16) { add_rows<16, CHANNELS>(sum, dout, C, row, factor); }
            for (; k + 4 <= end; k += 4) { add_rows<4, CHANNELS>(sum, dout, C, row, factor); }
            for (; k < end; k++) { add_rows<1, CHANNELS>(sum, dout, C, row, factor); }
        }
        if (c < C) { write_numbers<CHANNELS>(to, sum, CHANNELS); }
    }
}
// A thread takes CHANNELS channels of a position.
template <int CHANNELS, class R>
__global__ void embedding_backward_wpe_kernel(float *dwpe, const R *dout, const float *factors,
                                              int rows, int64_t n) {
    const int64_t i = thread_index() * CHANNELS;
    if (i >= n) { return; }
    float sum[CHANNELS];
    read_numbers<CHANNELS>(sum, dwpe + i, CHANNELS);
    int b = 0;
    const auto row = [&](int k) { return b + k; };
    const auto factor = [&](int k) { return factor_of_sample(factors, b + k); };
    for (; b + 8 <= rows; b += 8) { add_rows<8, CHANNELS>(sum, dout + i, n, row, factor); }
    for (; b < rows; b++) { add_rows<1, CHANNELS>(sum, dout + i, n, row, factor); }
    write_numbers<CHANNELS>(dwpe + i, sum, CHANNELS);
}
template <int CHANNELS>
static inline void embedding_backward(Stream *s, float *dwte, float *dwpe, const Real *dout,
                                      const int32_t *tokens, const float *factors, int64_t rows,
                                      int64_t T, int64_t C, int64_t Vp) {
    const int64_t N = rows * T;
    if (dwte) {
        const int32_t *order = order_tokens(s, (int32_t *)scratch(s), tokens, 1, N, Vp);
        const dim3 grid(blocks_for(N, THREADS), blocks_for(C, 32 * CHANNELS));
        FOR_REAL(launch(s, embedding_backward_wte_kernel<CHANNELS, R>, grid, dwte, dout, tokens,
                        order, factors, (int)N, (int)T, C));
    }
    if (dwpe) {
        FOR_REAL(launch(s, embedding_backward_wpe_kernel<CHANNELS, R>,
                        blocks_for(T * C, THREADS * CHANNELS), dwpe, dout, factors, (int)rows,
                        T * C));
    }
}
static inline void ops_embedding_backward(Stream *s, float *dwte, float *dwpe, const Real *dout,
                                          const int32_t *tokens, const float *factors, int64_t rows,
                                          int64_t T, int64_t C, int64_t Vp, int64_t maxT,
                                          bool accumulate_wte, bool accumulate_wpe) {
    if (dwte && !accumulate_wte) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
    if (dwpe && !accumulate_wpe) { ops_zero(s, dwpe, (size_t)(maxT * C) * sizeof(float)); }
    if (rows * T == 0) { return; }
    const bool fours = C % 4 == 0 && alignment_of(dout) >= 4 * ops_real_bytes();
    (fours ? embedding_backward<4> : embedding_backward<1>)(s, dwte, dwpe, dout, tokens, factors,
                                                            rows, T, C, Vp);
}

// --- sums over rows, in two steps: partial sums of groups of rows, then their sum in order -------
// For part p = blockIdx.y, sums over rows p * each .. (p + 1) * each - 1. weights[p * stride + c] =
// the sum of dout * (in - mean) * rstd; biases[p * stride + c] = the sum of dout. Each may be NULL;
// without weights, in may be NULL, too. mean NULL: 0.
enum {
    COLUMN_ROWS = 8,     // rows that a block adds side by side
    COLUMNS = 32 * EACH, // columns of a block
    COLUMN_BLOCKS = 1024 // that a GPU is given, where the rows suffice
};
static inline int64_t column_parts(int64_t N, int64_t C) {
    return max_i64(
        1, min_i64(ceil_div(COLUMN_BLOCKS, ceil_div(C, COLUMNS)), ceil_div(N, 4 * COLUMN_ROWS)));
}
// Bytes of all partial sums of up to C columns.
static inline int64_t column_scratch_bytes(int64_t C) {
    return (COLUMN_BLOCKS + ceil_div(C, COLUMNS)) * 2 * COLUMNS * (int64_t)sizeof(float);
}
template <class R>
__global__ void column_partials_kernel(float *weights, float *biases, int64_t stride, const R *dout,
                                       const R *in, const float *mean, const float *rstd, int64_t N,
                                       int64_t C, int64_t each) {
    __shared__ float sums[2][COLUMN_ROWS][COLUMNS];
    const int64_t c = (int64_t)blockIdx.x * COLUMNS + threadIdx.x * EACH, left = C - c,
                  end = left > 0 ? least((blockIdx.y + 1) * each, N) : 0;
    float dy[EACH], x[EACH];
    float weight[EACH] = {};
    float bias[EACH] = {};
    for (int64_t n = blockIdx.y * each + threadIdx.y; n < end; n += COLUMN_ROWS) {
        read_numbers<EACH>(dy, dout + n * C + c, left);
        if (in) {
            const float m = mean ? mean[n] : 0.0f, r = rstd[n];
            read_numbers<EACH>(x, in + n * C + c, left);
            UNROLL for (int j = 0; j < EACH; j++) { weight[j] += dy[j] * ((x[j] - m) * r); }
        }
        UNROLL for (int j = 0; j < EACH; j++) { bias[j] += dy[j]; }
    }
    write_numbers<EACH>(&sums[0][threadIdx.y][threadIdx.x * EACH], weight, EACH);
    write_numbers<EACH>(&sums[1][threadIdx.y][threadIdx.x * EACH], bias, EACH);
    __syncthreads();
    // Each thread finishes a column.
    const int column = (int)(threadIdx.y * 32 + threadIdx.x);
    const int64_t to = (int64_t)blockIdx.x * COLUMNS + column;
    for (int i = 0; i < 2 && to < C; i++) {
        float total = 0.0f, *sum = i ? biases : weights;
        for (int y = 0; y < COLUMN_ROWS; y++) { total += sums[i][y][column]; }
        if (sum) { sum[blockIdx.y * stride + to] = total; }
    }
}
static_assert((int)COLUMNS == (int)COLUMN_ROWS * 32, "a thread for each column");
// A block adds the parts of 32 columns, those of COLUMN_ROWS parts side by side.
__global__ void column_finish_kernel(float *dweight, float *dbias, const float *partials,
                                     int64_t parts, int64_t C, bool accumulate) {
    __shared__ float sums[2][COLUMN_ROWS][32];
    const int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    const int which = threadIdx.y;
    float weight = 0.0f, bias = 0.0f;
    for (int64_t p = threadIdx.y; p < parts && c < C; p += COLUMN_ROWS) {
        weight += partials[2 * p * C + c];
        bias += partials[(2 * p + 1) * C + c];
    }
    sums[0][threadIdx.y][threadIdx.x] = weight;
    sums[1][threadIdx.y][threadIdx.x] = bias;
    __syncthreads();
    float *to = which == 0 ? dweight : which == 1 ? dbias : NULL;
    if (!to || c >= C) { return; }
    float total = accumulate ? to[c] : 0.0f;
    for (int y = 0; y < COLUMN_ROWS; y++) { total += sums[which][y][threadIdx.x]; }
    to[c] = total;
}
static inline void column_partials(Stream *s, float *weights, float *biases, int64_t stride,
                                   const Real *dout, const Real *in, const float *mean,
                                   const float *rstd, int64_t N, int64_t C, int64_t parts,
                                   int64_t each) {
    const dim3 grid(blocks_for(C, COLUMNS), (unsigned)parts), block(32, COLUMN_ROWS);
    FOR_REAL(launch_with(s, column_partials_kernel<R>, grid, block, 0, weights, biases, stride,
                         dout, in, mean, rstd, N, C, each));
}
static inline void column_finish(Stream *s, float *dweight, float *dbias, const float *partials,
                                 int64_t parts, int64_t C, bool accumulate) {
    const dim3 block(32, COLUMN_ROWS);
    launch_with(s, column_finish_kernel, blocks_for(C, 32), block, 0, dweight, dbias, partials,
                parts, C, accumulate);
}
static inline void column_sums(Stream *s, float *dweight, float *dbias, const Real *dout,
                               const Real *in, const float *mean, const float *rstd, int64_t N,
                               int64_t C, bool accumulate) {
    float *partials = (float *)scratch(s);
    const int64_t each = max_i64(1, ceil_div(N, column_parts(N, C))), parts = ceil_div(N, each);
    assert(parts * 2 * C * (int64_t)sizeof(float) <= scratch_bytes(s));
    column_partials(s, partials, partials + C, 2 * C, dout, in, mean, rstd, N, C, parts, each);
    column_finish(s, dweight, dbias, partials, parts, C, accumulate);
}

// --- matmul --------------------------------------------------------------------------------------
// GELU(x) = x / (1 + e^-2u), where u = sqrt(2/pi) (x + 0.044715 x^3). This form needs no tanh and
// has no cancellation for x << 0. gelu_power() returns e^-2u, limited to e^88, which is finite.
__device__ float gelu_power(float x) {
    return expf(fminf(-1.5957691216f * (x + 0.044715f * x * x * x), 88.0f));
}
struct Gelu {
    __device__ float operator()(float x, float) const { return x / (1.0f + gelu_power(x)); }
};
// d GELU'(x)
struct GeluBackward {
    __device__ float operator()(float d, float x) const {
        const float e = gelu_power(x), sigmoid = 1.0f / (1.0f + e);
        return d *
               (sigmoid + x * sigmoid * (sigmoid * e) * 1.5957691216f * (1.0f + 0.134145f * x * x));
    }
};

// The library's GELU is used in bf16 only. Its accuracy is not documented, and the hardware's tanh,
// which it may use, has 11 bits. The library may not offer an epilogue (GELU needs pre_gelu with
// rows of a multiple of 8). Then it computes only the product, and a kernel does the rest.
static inline void ops_matmul_forward(Stream *s, Real *out, Real *gelu, const Real *in,
                                      const Real *weight, const Real *bias, int64_t N, int64_t C,
                                      int64_t OC) {
    if (N == 0) { return; }
    const Epilogue fused = {bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX,
                            bias, out};
    Product x = {.m = OC, .n = N, .k = C, .d = gelu, .a = weight, .b = in, .a_transposed = true};
    if (gelu && gpu_real == DTYPE_BF16 && matmul(s, &x, fused)) { return; }
    x.d = out;
    plain_matmul(s, &x, bias);
    if (gelu) { map_reals(s, Gelu(), gelu, out, NULL, N * OC); }
}
static inline void ops_vector_forward(Stream *s, Real *out, Real *gelu, const Real *in,
                                      const Real *weight, const Real *bias, int64_t C, int64_t OC) {
    ops_matmul_forward(s, out, gelu, in, weight, bias, 1, C, OC);
}
static inline void ops_matmul_backward_input(Stream *s, Real *din, const Real *dout,
                                             const Real *weight, const Real *pre_gelu, int64_t N,
                                             int64_t C, int64_t OC) {
    if (N == 0) { return; }
    const Epilogue fused = {CUBLASLT_EPILOGUE_DGELU, NULL, pre_gelu};
    const Product x = {.m = C, .n = N, .k = OC, .d = din, .a = weight, .b = dout};
    if (pre_gelu && gpu_real == DTYPE_BF16 && matmul(s, &x, fused)) { return; }
    plain_matmul(s, &x, NULL);
    if (pre_gelu) { map_reals(s, GeluBackward(), din, din, pre_gelu, N * C); }
}
static inline void ops_matmul_backward_weight(Stream *s, float *dweight, float *dbias,
                                              const Real *dout, const Real *in, int64_t N,
                                              int64_t C, int64_t OC, bool accumulate) {
    if (N == 0) { // an empty sum
        if (!accumulate) { ops_zero(s, dweight, (size_t)(OC * C) * sizeof(float)); }
        if (!accumulate && dbias) { ops_zero(s, dbias, (size_t)OC * sizeof(float)); }
        return;
    }
    // The library can only overwrite dbias. A sum to be added goes to the scratch first.
    float *sums = accumulate ? (float *)scratch(s) : dbias;
    const Epilogue fused = {CUBLASLT_EPILOGUE_BGRADB, sums, NULL};
    const Product x = {.m = C,
                       .n = OC,
                       .k = N,
                       .d = dweight,
                       .a = in,
                       .b = dout,
                       .b_transposed = true,
                       .out_fp32 = true,
                       .accumulate = accumulate};
    if (dbias && matmul(s, &x, fused)) {
        if (accumulate) { ops_accumulate(s, dbias, sums, OC); }
        return;
    }
    if (dbias) { column_sums(s, NULL, dbias, dout, NULL, NULL, NULL, N, OC, accumulate); }
    plain_matmul(s, &x, NULL);
}

static inline void ops_residual(Stream *s, Real *out, const Real *a, const Real *b, int64_t n) {
    map_reals(s, Add(), out, a, b, n);
}

// parts of this file
#include "ops/cuda/activation_cuda.cuh" // activations of the MLP, soft caps
#include "ops/cuda/experts_cuda.cuh"    // mixtures of experts
#include "ops/cuda/norms_cuda.cuh"      // layernorm, RMSNorm

#include "ops/cuda/heads_cuda.cuh" // rotary positions, norms of heads

// --- classifier: a chunk of rows at a time -------------------------------------------------------
enum { CLASSIFIER_THREADS = 512, AHEAD = 4 };
// Calls f(i, part i) for those of the parts first .. n - 1 that fall to this thread. It reads AHEAD
// parts at once.
template <class Part, class F> __device__ void for_parts(const Part *from, int first, int n, F f) {
    for (int i = first + (int)threadIdx.x; i < n; i += AHEAD * CLASSIFIER_THREADS) {
        Part part[AHEAD];
        UNROLL for (int k = 0; k < AHEAD; k++) {
            if (i + k * CLASSIFIER_THREADS < n) { part[k] = from[i + k * CLASSIFIER_THREADS]; }
        }
        UNROLL for (int k = 0; k < AHEAD; k++) {
            if (i + k * CLASSIFIER_THREADS < n) { f(i + k * CLASSIFIER_THREADS, part[k]); }
        }
    }
}
// *sum is a sum of powers 2^(x log2(e) - *top), where *top is the largest x log2(e) so far. Adds N.
template <int N, class R>
__device__ void add_powers(float *top, float *sum, const R *numbers, float softcap) {
    float x[N], most = -FLT_MAX;
    UNROLL for (int j = 0; j < N; j++) {
        x[j] = capped(read(numbers + j), softcap);
        most = fmaxf(most, x[j]);
    }
    most = fmaxf(*top, LOG2_E * most);
    *sum *= power_of_2(*top - most);
    UNROLL for (int j = 0; j < N; j++) { *sum += power_of_2(fmaf(x[j], LOG2_E, -most)); }
    *top = most;
}
// Turns the logits(rows, Vp) of a chunk into their gradient, in place. A block takes a row, reads
// it once, and keeps its first `kept` parts of 16 bytes for the second pass. A row that is not
// aligned to 16 bytes is read number by number.
template <bool CAPPED, class R>
__global__ void __launch_bounds__(CLASSIFIER_THREADS, 2)
    classifier_kernel(float *losses, R *logits, const int32_t *targets, int V, int Vp, float scale,
                      float softcap, bool gradient, int kept) {
    enum { PART_LOGITS = 16 / sizeof(R) };
    typedef typename Vector<PART_LOGITS, R>::Part Part;
    DYNAMIC_SHARED(Part, copy);
    R *row = logits + (int64_t)blockIdx.x * Vp;
    const int32_t target = targets[blockIdx.x];
    const float cap = CAPPED ? softcap : 0.0f,
                of_target = target < 0 ? 0.0f : capped(read(row + target), cap);
    const int columns = target < 0 ? 0 : V,
              parts = lies_in_parts<PART_LOGITS>(row) ? columns / PART_LOGITS : 0,
              // this thread's first number after the parts
        rest = parts * PART_LOGITS + (int)threadIdx.x;
    float top = -FLT_MAX, sum = 0.0f;
    for_parts((const Part *)row, 0, parts, [&](int i, const Part &part) {
        if (i < kept) { copy[i] = part; }
        add_powers<PART_LOGITS>(&top, &sum, part.x, cap);
    });
    for (int v = rest; v < columns; v += CLASSIFIER_THREADS) {
        add_powers<1>(&top, &sum, row + v, cap);
    }
    const float most = block_reduce(top, true),
                lse = most + log2f(block_reduce(sum * power_of_2(top - most), false));
    if (threadIdx.x == 0) { losses[blockIdx.x] = target < 0 ? 0.0f : lse / LOG2_E - of_target; }
    if (!gradient) { return; }
    const auto slope = [&](float logit, float is_target) {
        return scale * (power_of_2(fmaf(logit, LOG2_E, -lse)) - is_target) * cap_slope(logit, cap);
    };
    const auto put = [&](int i, Part part) {
        UNROLL for (int j = 0; j < PART_LOGITS; j++) {
            write(&part.x[j], slope(capped(read(&part.x[j]), cap), 0.0f));
        }
        ((Part *)row)[i] = part;
    };
    for_parts(copy, 0, (int)least(kept, parts), put);
    for_parts((const Part *)row, kept, parts, put);
    for (int v = rest; v < Vp; v += CLASSIFIER_THREADS) {
        write(row + v, v < columns ? slope(capped(read(row + v), cap), 0.0f) : 0.0f);
    }
    __syncthreads();
    if (threadIdx.x == 0 && target >= 0) { write(row + target, slope(of_target, 1.0f)); }
}
static inline void ops_classifier(Stream *s, float *losses, Real *dx, float *dwte, Real *dlogits,
                                  const Real *x, const Real *wte, const int32_t *targets, int64_t N,
                                  int64_t each, int64_t C, int64_t V, int64_t Vp, float scale,
                                  float softcap, bool accumulate) {
    if (N == 0 && dwte && !accumulate) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
    const int64_t real = (int64_t)ops_real_bytes(),
                  capacity = dlogits ? N : scratch_bytes(s) / (Vp * real);
    const int kept = (int)min_i64(V * real, LOGITS_KEPT) / 16;
    for (int64_t n = 0, rows; n < N; n += rows) {
        rows = min_i64(min_i64(min_i64(CLASSIFIER_ROWS, capacity), N - n), each - n % each);
        Real *logits = dlogits ? real_at(dlogits, n * Vp) : (Real *)scratch(s);
        assert(dlogits || rows * Vp * real <= scratch_bytes(s));
        ops_matmul_forward(s, logits, NULL, real_at_const(x, n * C), wte, NULL, rows, C, Vp);
        FOR_REAL(launch_with(
            s, softcap > 0.0f ? classifier_kernel<true, R> : classifier_kernel<false, R>,
            (unsigned)rows, CLASSIFIER_THREADS, 16 * kept, losses + n, logits, targets + n, (int)V,
            (int)Vp, scale, softcap, dx || dwte || dlogits, kept));
        if (dwte) {
            ops_matmul_backward_weight(s, dwte + n / each * Vp * C, NULL, logits,
                                       real_at_const(x, n * C), rows, C, Vp,
                                       accumulate || n % each);
        }
        if (dx) {
            ops_matmul_backward_input(s, real_at(dx, n * C), logits, wte, NULL, rows, C, Vp);
        }
    }
}

static int64_t attention_scratch_bytes(OpsShape shape); // attention_cuda.cuh
static int64_t clip_scratch_bytes(OpsShape shape);      // clip_cuda.cuh
static inline size_t ops_workspace_bytes(OpsShape shape, int threads) {
    (void)threads;
    const int64_t N = shape.rows * shape.T, widest = max_i64(ops_widest(shape), shape.Vp),
                  real = (int64_t)ops_real_bytes();
    const int64_t columns = column_scratch_bytes(widest), order = order_numbers(N) * 4,
                  attention = attention_scratch_bytes(shape),
                  logits = min_i64(min_i64(N, CLASSIFIER_ROWS), shape.logits) * shape.Vp * real;
    return (size_t)(MATMUL_WORKSPACE +
                    max_i64(max_i64(SCRATCH_LEAST, clip_scratch_bytes(shape)),
                            max_i64(max_i64(max_i64(columns, order), experts_scratch_bytes(shape)),
                                    max_i64(attention, logits))));
}

// --- optimizers and norms ------------------------------------------------------------------------
__device__ void store_master(const UpdateSlice &u, const OptimizerStep &o, int64_t i, float x) {
    u.master[i] = x;
    if (u.dtype == DTYPE_BF16) { ((uint16_t *)u.param)[i] = round_master(x, o.rounding, i); }
}
__global__ void adamw_kernel(UpdateSlice u, OptimizerStep o, AdamwBias bias) {
    const int64_t i = thread_index();
    if (i >= u.n) { return; }
    const float x = u.master[i];
    store_master(u, o, i, x - o.lr * (adamw_element(u, o, bias, i) + o.weight_decay * x));
}
static inline void ops_adamw(Stream *s, UpdateSlice u, OptimizerStep o) {
    launch(s, adamw_kernel, blocks_for(u.n, THREADS), u, o, adamw_bias(o));
}
__global__ void sgd_kernel(UpdateSlice u, OptimizerStep o) {
    const int64_t i = thread_index();
    if (i >= u.n) { return; }
    float *b = u.moment[0];
    const float *master = u.master, g = fmaf(o.weight_decay, master[i], u.grad[i] * o.grad_scale),
                momentum = fmaf(o.momentum, b[i], g),
                used = o.nesterov ? fmaf(o.momentum, momentum, g) : momentum,
                x = master[i] - o.lr * used;
    b[i] = momentum;
    store_master(u, o, i, x);
}
static inline void ops_sgd(Stream *s, UpdateSlice u, OptimizerStep o) {
    launch(s, sgd_kernel, blocks_for(u.n, THREADS), u, o);
}
__global__ void balance_kernel(UpdateSlice u, OptimizerStep o) {
    const int64_t i = thread_index();
    if (i >= u.n) { return; }
    const float sign = (float)((u.grad[i] > 0) - (u.grad[i] < 0));
    store_master(u, o, i, u.master[i] - o.lr * sign);
}
static inline void ops_balance(Stream *s, UpdateSlice u, OptimizerStep o) {
    launch(s, balance_kernel, blocks_for(u.n, THREADS), u, o);
}
__global__ void muon_kernel(UpdateSlice u, OptimizerStep o) {
    const int64_t i = thread_index();
    if (i >= u.n) { return; }
    const float kept = 1.0f - o.lr * o.weight_decay, rate = o.lr * o.grad_scale;
    store_master(u, o, i, fmaf(-rate, u.grad[i], kept * u.master[i]));
}
static inline void ops_muon(Stream *s, UpdateSlice u, OptimizerStep o) {
    launch(s, muon_kernel, blocks_for(u.n, THREADS), u, o);
}

// The result has the same bits as on the CPU. Element e of a chunk is added to sum e mod 32, and
// these sums are added in order; the square of an fp32 number is exact in fp64. A warp takes
// SQUARE_CHUNKS chunks at a time: eight lanes a chunk, each lane four neighbouring sums. Afterwards
// a lane finishes a chunk. The chunks' terms are added as integers, which needs no order: those of
// a block in shared memory, then those of all blocks in *sum.
enum { SQUARE_CHUNKS = 4, SQUARE_BLOCKS = 1024 };
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
__global__ void square_sum_kernel(ExactSum *sum, const float *x, int64_t n, int64_t chunk,
                                  int64_t chunks, double scale) {
    __shared__ ExactSum block;
    // 33 columns, so that the lanes of the second part read from different banks
    __shared__ double of_sums[WARPS][SQUARE_CHUNKS][33];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < EXACT_LIMBS; i += THREADS) { block.limb[i] = 0; }
    if (threadIdx.x == 0) { block.strange = 0; }
    __syncthreads();
    const int64_t stride = (int64_t)gridDim.x * WARPS * SQUARE_CHUNKS;
    for (int64_t first = ((int64_t)blockIdx.x * WARPS + warp) * SQUARE_CHUNKS; first < chunks;
         first += stride) {
        const int64_t own = first + lane / 8, end = least((own + 1) * chunk, n);
        double squares[4] = {0};
        float y[4];
        int64_t e = own * chunk + lane % 8 * 4;
        for (; e + 7 * 32 + 4 <= end && lies_in_parts<4>(x); e += 8 * 32) { // eight at once
            Vector<4, float>::Part part[8];
            UNROLL for (int k = 0; k < 8; k++) {
                part[k] = *(const Vector<4, float>::Part *)(x + e + 32 * k);
            }
            UNROLL for (int i = 0; i < 32; i++) {
                squares[i % 4] += (double)part[i / 4].x[i % 4] * (double)part[i / 4].x[i % 4];
            }
        }
        for (; e < end; e += 32) {
            read_numbers<4>(y, x + e, end - e);
            UNROLL for (int j = 0; j < 4; j++) { squares[j] += (double)y[j] * (double)y[j]; }
        }
        UNROLL for (int j = 0; j < 4; j++) {
            of_sums[warp][lane / 8][lane % 8 * 4 + j] = squares[j];
        }
        __syncwarp();
        if (lane < SQUARE_CHUNKS && first + lane < chunks) {
            double total = 0.0;
            for (int l = 0; l < 32; l++) { total += of_sums[warp][lane][l]; }
            exact_add_shared(&block, scale * total);
        }
        __syncwarp();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < EXACT_LIMBS; i += THREADS) {
        exact_atomic_add(&sum->limb[i], block.limb[i]);
    }
    if (threadIdx.x == 0) { exact_atomic_add(&sum->strange, block.strange); }
}
static inline void ops_square_sum(Stream *s, ExactSum *sum, const float *x, int64_t n,
                                  int64_t chunk, double scale) {
    const int64_t chunks = ceil_div(n, chunk);
    const int64_t blocks = min_i64(SQUARE_BLOCKS, ceil_div(chunks, WARPS * SQUARE_CHUNKS));
    launch(s, square_sum_kernel, (unsigned)blocks, sum, x, n, chunk, chunks, scale);
}
static inline void ops_accumulate(Stream *s, float *out, const float *in, int64_t n) {
    launch_map<float, float>(s, Add(), out, out, in, n);
}

#endif
