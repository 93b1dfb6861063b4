// clip_cuda.cuh: per-sample norms, clipping and noise on a GPU. The contract is in ops.h, section
// "privacy".
//
// Norms      A block sums the squares of a piece of a sample in fp64. A second kernel adds the
//            pieces in order. The pieces follow from the shape of one sample, so a norm has the
//            same bits whatever the number and contents of the other samples.
// Ghost      |dout^T in|^2 of a sample = the sum over pairs of its rows of (in_t . in_s)(dout_t .
//            dout_s). A block computes a tile of both products in registers, multiplies them
//            element by element, and sums. So nothing of size T x T is stored, and a pair of tiles
//            is computed once. If the gradient itself needs fewer products, its tiles are computed
//            and squared in the same way.
// Tiles      bf16 with rows of a multiple of 8: 128 x 128 on tensor cores, fed by asynchronous
//            copies in two stages. A warp has 64 x 32 of both products, or 21 flop per byte from
//            shared memory; 20 keep mma.sync busy (see attention_cuda.cuh). Everything else: 64 x
//            64 with plain arithmetic.
// Registers  sm_90: ghost norms 214 and sums of weights 221, so one block per SM; tied norms 162
//            and instantiated norms 125. sm_80: 216, 218, 162 and 125. None spill (-Xptxas -v of
//            CUDA 13.0).
// Workspace  [partial sums, fp64 | order of tokens]
#ifndef CLIP_CUDA_CUH
#define CLIP_CUDA_CUH

#include "ops/cuda/ops_cuda.cuh" // tensor cores, sums of columns, the order of tokens

enum { NORM_PIECE = 8192, PLAIN_EDGE = 64 };

// --- norms of pieces, one row of the grid for each sample ----------------------------------------
__device__ double block_total(double x) { // for a block of THREADS threads
    __shared__ double part[WARPS];
    __syncthreads(); // all threads have read the earlier contents
    for (int d = 16; d > 0; d >>= 1) { x += __shfl_xor_sync(ALL_LANES, x, d); }
    if (threadIdx.x % 32 == 0) { part[threadIdx.x / 32] = x; }
    __syncthreads();
    x = 0.0;
    for (int w = 0; w < WARPS; w++) { x += part[w]; }
    return x;
}
__device__ void note_part(double *parts, double x) { // stores the sum of x over the block
    x = block_total(x);
    if (threadIdx.x == 0) { parts[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = x; }
}
// Stores the sum of x over the block for add_norms_kernel. If the sample has only one block, adds
// it to the norm instead.
__device__ void add_to_norm(double *norms, double *parts, double x) {
    if (gridDim.x > 1) {
        note_part(parts, x);
        return;
    }
    x = block_total(x);
    if (threadIdx.x == 0) { norms[blockIdx.y] += x; }
}
// One block per sample.
__global__ void add_norms_kernel(double *norms, const double *parts, int64_t n) {
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) { sum += parts[blockIdx.x * n + i]; }
    sum = block_total(sum);
    if (threadIdx.x == 0) { norms[blockIdx.x] += sum; }
}
// Starts a kernel with `blocks` blocks per sample, which store their parts in the scratch.
template <class Kernel, class... Arguments>
static inline void start_parts(Stream *s, Kernel kernel, int shared, int64_t blocks, int64_t rows,
                               double *norms, Arguments... arguments) {
    cudaStream_t stream = enter(s);
    const dim3 grid((unsigned)blocks, (unsigned)rows);
    double *parts = (double *)scratch(s);
    assert(blocks * rows * (int64_t)sizeof *parts <= scratch_bytes(s));
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    LAUNCH(kernel, grid, THREADS, shared, stream, norms, parts, arguments...);
}
template <class Kernel, class... Arguments>
static inline void start_norms(Stream *s, Kernel kernel, int shared, int64_t blocks, int64_t rows,
                               double *norms, Arguments... arguments) {
    start_parts(s, kernel, shared, blocks, rows, norms, arguments...);
    cudaStream_t stream = enter(s);
    const double *parts = (const double *)scratch(s);
    if (blocks > 1) {
        LAUNCH(add_norms_kernel, (unsigned)rows, THREADS, 0, stream, norms, parts, blocks);
    }
}

__global__ void sample_norms_kernel(double *norms, double *parts, const float *in, int64_t n) {
    const int64_t begin = (int64_t)blockIdx.x * NORM_PIECE, end = least(begin + NORM_PIECE, n);
    double sum = 0.0;
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
        const double x = (double)in[blockIdx.y * n + i];
        sum += x * x;
    }
    add_to_norm(norms, parts, sum);
}
static inline void ops_sample_norms(Stream *s, double *norms, const float *in, int64_t rows,
                                    int64_t n) {
    if (rows && n) {
        start_norms(s, sample_norms_kernel, 0, ceil_div(n, NORM_PIECE), rows, norms, in, n);
    }
}
static inline void ops_bias_samples(Stream *s, float *sums, double *norms, const Real *dout,
                                    int64_t rows, int64_t T, int64_t OC) {
    column_partials(s, NULL, sums, OC, dout, NULL, NULL, NULL, rows * T, OC, rows, T);
    ops_sample_norms(s, norms, sums, rows, OC);
}
static inline void ops_layernorm_samples(Stream *s, float *dweights, float *dbiases, double *norms,
                                         const Real *dout, const Real *in, const float *mean,
                                         const float *rstd, int64_t rows, int64_t T, int64_t C) {
    column_partials(s, dweights, dbiases, C, dout, in, mean, rstd, rows * T, C, rows, T);
    ops_sample_norms(s, norms, dweights, rows, C);
    ops_sample_norms(s, norms, dbiases, rows, C);
}

// A block takes entry blockIdx.x of its sample's order. The square of that row of dout is the
// square of a row of dwpe. If the entry is the first of its token, the block also sums all rows of
// the token, and adds the square of the sum.
template <class R>
__global__ void embedding_norms_kernel(double *norms, double *parts, const R *dout,
                                       const int32_t *tokens, const int32_t *order, int64_t T,
                                       int64_t C) {
    const int64_t place = blockIdx.x;
    dout += blockIdx.y * T * C;
    tokens += blockIdx.y * T;
    order += blockIdx.y * T;
    const int32_t token = tokens[order[place]];
    const bool first = place == 0 || tokens[order[place - 1]] != token;
    int64_t end = place;
    while (first && end < T && tokens[order[end]] == token) { end++; }
    double squares = 0.0;
    for (int64_t c = threadIdx.x; c < C; c += THREADS) {
        const float x = read(dout + order[place] * C + c);
        float sum = 0.0f;
        for (int64_t i = place; i < end; i++) { sum += read(dout + order[i] * C + c); }
        squares += (double)x * (double)x + (double)sum * (double)sum;
    }
    add_to_norm(norms, parts, squares);
}
static inline void ops_embedding_sample_norms(Stream *s, double *norms, const Real *dout,
                                              const int32_t *tokens, int64_t rows, int64_t T,
                                              int64_t C) {
    cudaStream_t stream = enter(s);
    if (rows * T == 0) { return; }
    int32_t *order = (int32_t *)((double *)scratch(s) + rows * T); // after the partial sums
    assert(rows * T * (int64_t)(sizeof(double) + sizeof *order) <= scratch_bytes(s));
    LAUNCH(order_tokens_kernel, dim3(blocks_for(T, THREADS), (unsigned)rows), THREADS, 0, stream,
           order, tokens, T);
    FOR_REAL(start_norms(s, embedding_norms_kernel<R>, 0, T, rows, norms, (const R *)dout, tokens,
                         order, T, C));
}

// --- tiles of products of rows -------------------------------------------------------------------
// For each sample, a matrix whose rows are multiplied over `depth`, with each other or with another
// matrix's rows. In memory the elements of a row are contiguous; if ACROSS, those of a column are.
template <class R> struct Rows {
    const R *p;
    int rows, depth;
};
// Returns the address of element k of a row, in this block's sample.
template <bool ACROSS, class R> __device__ const R *element_of(const Rows<R> &a, int row, int k) {
    return a.p + (int64_t)blockIdx.y * a.rows * a.depth +
           (ACROSS ? (int64_t)k * a.rows + row : (int64_t)row * a.depth + k);
}

template <class R> __device__ Rows<R> sample_of(Rows<R> a, int b) { // b samples further on
    a.p += (int64_t)b * a.rows * a.depth;
    return a;
}

// Plain and Mma are the two kinds of tile. multiply() computes product = rows from a0 on of a times
// rows from b0 on of b. Each thread gets EACH elements of the tile. multiply() repeats this for
// `samples` samples, and calls done(b) after each.
template <class R, bool ACROSS> struct Plain {
    enum { EDGE = PLAIN_EDGE, EACH = 16, DEPTH = 16, SHARED = 0 };
    // Bound for the error of a product of two rows, relative to the product of their lengths.
    static constexpr double UNCERTAIN = 0x1p-20;
    __device__ int row(int e) { return (int)threadIdx.x / 16 + 16 * (e / 4); }
    __device__ int column(int e) { return (int)threadIdx.x % 16 + 16 * (e % 4); }
    __device__ void load(float (*to)[EDGE + 1], const Rows<R> &a, int row0, int k0) {
        for (int i = (int)threadIdx.x; i < DEPTH * EDGE; i += THREADS) {
            const int r = ACROSS ? i % EDGE : i / DEPTH, k = ACROSS ? i / EDGE : i % DEPTH;
            to[k][r] = row0 + r < a.rows && k0 + k < a.depth
                           ? read(element_of<ACROSS>(a, row0 + r, k0 + k))
                           : 0.0f;
        }
    }
    template <class Done>
    __device__ void multiply(float *product, const Rows<R> &a, int a0, const Rows<R> &b, int b0,
                             int samples, Done done) {
        __shared__ float left[DEPTH][EDGE + 1], right[DEPTH][EDGE + 1];
        for (int n = 0; n < samples; n++) {
            UNROLL for (int e = 0; e < EACH; e++) { product[e] = 0.0f; }
            for (int k0 = 0; k0 < a.depth; k0 += DEPTH) {
                __syncthreads(); // all threads are done with the earlier contents
                load(left, sample_of(a, n), a0, k0);
                load(right, sample_of(b, n), b0, k0);
                __syncthreads();
                for (int k = 0; k < DEPTH; k++) {
                    UNROLL for (int e = 0; e < EACH; e++) {
                        product[e] += left[k][row(e)] * right[k][column(e)];
                    }
                }
            }
            done(n);
        }
    }
    __device__ void multiply(float *product, const Rows<R> &a, int a0, const Rows<R> &b, int b0) {
        multiply(product, a, a0, b, b0, 1, [](int) {});
    }
};
template <bool ACROSS> struct Mma {
    enum {
        EDGE = 128,
        EACH = 64,
        DEPTH = 64,
        WIDTH = ACROSS ? EDGE : DEPTH,
        PITCH = WIDTH + 8,
        PANEL = EDGE * DEPTH / WIDTH * PITCH,
        SHARED = 4 * PANEL * 2
    };
    static constexpr double UNCERTAIN = 0x1p-16;
    __device__ int row(int e) {
        return (int)threadIdx.x / 32 % 2 * 64 + e / 16 * 16 + fragment_row(e / 2 % 2);
    }
    __device__ int column(int e) {
        return (int)threadIdx.x / 64 * 32 + e / 4 % 4 * 8 + fragment_column(e % 2);
    }
    // Starts loading a panel, in the same memory order as the matrix.
    __device__ void start(Bf16 *to, const Rows<Bf16> &a, int row0, int k0) {
        UNROLL for (int i = 0; i < EDGE * DEPTH / 8; i += THREADS) {
            const int at = i + (int)threadIdx.x, line = at / (WIDTH / 8), x = at % (WIDTH / 8) * 8;
            const int r = row0 + (ACROSS ? x : line), k = k0 + (ACROSS ? line : x);
            const bool there = r < a.rows && k < a.depth;
            copy_async_16(to + line * PITCH + x, there ? element_of<ACROSS>(a, r, k) : a.p, there);
        }
    }
    // Loads 16 rows of an operand, with 16 elements each.
    template <bool LEFT> __device__ void load(unsigned m[4], const Bf16 *panel, int r, int k) {
        // stacked: in the panel, the second of the four 8 x 8 parts is below the first one, not
        // right of it
        const bool stacked = LEFT != ACROSS;
        const int line = (ACROSS ? k : r) + (stacked ? lane() % 16 : lane() / 16 * 8 + lane() % 8);
        const int x = (ACROSS ? r : k) + (stacked ? lane() / 16 * 8 : lane() / 8 % 2 * 8);
        if (ACROSS) {
            load_matrices_transposed(m, panel + line * PITCH + x);
        } else {
            load_matrices(m, panel + line * PITCH + x);
        }
    }
    __device__ void multiply_panels(float *product, const Bf16 *a, const Bf16 *b) {
        UNROLL for (int k = 0; k < DEPTH; k += 16) {
            unsigned left[4][4], right[4];
            UNROLL for (int m = 0; m < 4; m++) {
                load<true>(left[m], a, (int)threadIdx.x / 32 % 2 * 64 + 16 * m, k);
            }
            UNROLL for (int n = 0; n < 4; n += 2) {
                load<false>(right, b, (int)threadIdx.x / 64 * 32 + 8 * n, k);
                UNROLL for (int m = 0; m < 4; m++) {
                    mma_bf16(product + 16 * m + 4 * n, left[m], right[0], right[1]);
                    mma_bf16(product + 16 * m + 4 * n + 4, left[m], right[2], right[3]);
                }
            }
        }
    }
    template <class Done>
    __device__ void multiply(float *product, const Rows<Bf16> &a, int a0, const Rows<Bf16> &b,
                             int b0, int samples, Done done) {
        DYNAMIC_SHARED(Bf16, panels);
        const bool alike = a.p == b.p && a0 == b0; // one panel serves both
        const int steps = (a.depth + DEPTH - 1) / DEPTH, end = samples * steps;
        for (int n = -1, stage = 1; n < end; n++, stage = 1 - stage) {
            Bf16 *now = panels + 2 * stage * PANEL, *next = panels + 2 * (1 - stage) * PANEL;
            copy_async_wait();
            // these panels are complete, and all threads are done with the earlier ones
            __syncthreads();
            if (n + 1 < end) {
                const int sample = (n + 1) / steps, k0 = (n + 1) % steps * DEPTH;
                start(next, sample_of(a, sample), a0, k0);
                if (!alike) { start(next + PANEL, sample_of(b, sample), b0, k0); }
            }
            if (n < 0) { continue; }
            if (n % steps == 0) {
                UNROLL for (int e = 0; e < EACH; e++) { product[e] = 0.0f; }
            }
            multiply_panels(product, now, alike ? now : now + PANEL);
            if (n % steps == steps - 1) { done(n / steps); }
        }
    }
    __device__ void multiply(float *product, const Rows<Bf16> &a, int a0, const Rows<Bf16> &b,
                             int b0) {
        multiply(product, a, a0, b, b0, 1, [](int) {});
    }
};

// --- norms of products of rows -------------------------------------------------------------------
template <class Tile, class R>
__global__ void __launch_bounds__(THREADS)
    ghost_norms_kernel(double *norms, double *parts, Rows<R> dout, Rows<R> in) {
    int i = 0, j = (int)blockIdx.x; // the pairs are (0,0) (1,0) (1,1) (2,0) ...
    for (; j > i; i++) { j -= i + 1; }
    float p[Tile::EACH], q[Tile::EACH];
    Tile().multiply(p, in, i * Tile::EDGE, in, j * Tile::EDGE);
    Tile().multiply(q, dout, i * Tile::EDGE, dout, j * Tile::EDGE);
    double sum = 0.0;
    UNROLL for (int e = 0; e < Tile::EACH; e++) { sum += (double)p[e] * (double)q[e]; }
    (void)norms;
    note_part(parts, i == j ? sum : 2.0 * sum);
}
template <class R> __device__ double length_of(const R *row, int64_t n) { // for a warp
    double squares = 0.0;
    for (int64_t i = threadIdx.x % 32; i < n; i += 32) {
        const double x = (double)read(row + i);
        squares += x * x;
    }
    for (int d = 16; d > 0; d >>= 1) { squares += __shfl_xor_sync(ALL_LANES, squares, d); }
    return sqrt(squares);
}
// Adds up the parts of a sample. Where terms cancel, rounding errors may hide a part of the norm
// (see cautious_norm() in clip_cpu.h). So if they cancel strongly, `uncertain` times the square of
// the sum of |dout_t| |in_t| is added; `uncertain` bounds the relative error of a product of two
// rows. It is larger on tensor cores, which truncate when they add.
template <class R>
__global__ void add_ghost_norms_kernel(double *norms, const double *parts, int64_t n, Rows<R> dout,
                                       Rows<R> in, double uncertain) {
    const Rows<R> left = sample_of(dout, (int)blockIdx.x), right = sample_of(in, (int)blockIdx.x);
    const int64_t T = left.rows;
    double sum = 0.0, most = 0.0;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) { sum += parts[blockIdx.x * n + i]; }
    for (int64_t t = threadIdx.x / 32; t < T; t += WARPS) { // uniform within a warp
        const double product = length_of(left.p + t * left.depth, left.depth) *
                               length_of(right.p + t * right.depth, right.depth);
        most += threadIdx.x % 32 == 0 ? product : 0.0;
    }
    sum = block_total(sum);
    most = block_total(most);
    if (threadIdx.x == 0) {
        norms[blockIdx.x] += sum + uncertain * fmax(0.0, most * most - sum * (double)(64 * T));
    }
}
template <class Tile, class R>
__global__ void __launch_bounds__(THREADS)
    gradient_norms_kernel(double *norms, double *parts, Rows<R> dout, Rows<R> in) {
    const int across = (in.rows + Tile::EDGE - 1) / Tile::EDGE, i = (int)blockIdx.x / across,
              j = (int)blockIdx.x % across;
    float p[Tile::EACH];
    Tile().multiply(p, dout, i * Tile::EDGE, in, j * Tile::EDGE);
    double sum = 0.0;
    UNROLL for (int e = 0; e < Tile::EACH; e++) { sum += (double)p[e] * (double)p[e]; }
    add_to_norm(norms, parts, sum);
}
// Computes a tile of (x_s . dout_t), and multiplies each element by dlogits[s, token of t].
template <class Tile, class R>
__global__ void __launch_bounds__(THREADS)
    tied_norms_kernel(double *norms, double *parts, Rows<R> dout, Rows<R> x, const R *dlogits,
                      const int32_t *tokens, int64_t Vp) {
    const int T = x.rows, across = (T + Tile::EDGE - 1) / Tile::EDGE,
              i = (int)blockIdx.x / across * Tile::EDGE, j = (int)blockIdx.x % across * Tile::EDGE;
    dlogits += (int64_t)blockIdx.y * T * Vp;
    tokens += (int64_t)blockIdx.y * T;
    float p[Tile::EACH];
    Tile().multiply(p, x, i, dout, j);
    double sum = 0.0;
    UNROLL for (int e = 0; e < Tile::EACH; e++) {
        const int s = i + Tile().row(e), t = j + Tile().column(e);
        if (s < T && t < T) { sum += (double)p[e] * (double)read(dlogits + s * Vp + tokens[t]); }
    }
    add_to_norm(norms, parts, 2.0 * sum);
}
template <class Along, class Across, class R>
static inline void matmul_sample_norms(Stream *s, double *norms, const R *dout, const R *in,
                                       int64_t rows, int T, int C, int OC) {
    const int64_t lines = ceil_div(T, Along::EDGE), pairs = lines * (lines + 1) / 2,
                  tiles = ceil_div(OC, Along::EDGE) * ceil_div(C, Along::EDGE);
    if (pairs * (C + OC) <= tiles * T) { // depends on the shape alone
        const Rows<R> left = {dout, T, OC}, right = {in, T, C};
        start_parts(s, ghost_norms_kernel<Along, R>, Along::SHARED, pairs, rows, norms, left,
                    right);
        cudaStream_t stream = enter(s);
        LAUNCH(add_ghost_norms_kernel<R>, (unsigned)rows, THREADS, 0, stream, norms,
               (const double *)scratch(s), pairs, left, right, Along::UNCERTAIN);
    } else {
        start_norms(s, gradient_norms_kernel<Across, R>, Across::SHARED, tiles, rows, norms,
                    Rows<R>{dout, OC, T}, Rows<R>{in, C, T});
    }
}
static inline bool fits_mma(const void *p, int64_t width) {
    return gpu_real == DTYPE_BF16 && width % 8 == 0 && alignment_of(p) >= 16;
}
static inline void ops_matmul_sample_norms(Stream *s, double *norms, const Real *dout,
                                           const Real *in, int64_t rows, int64_t T, int64_t C,
                                           int64_t OC) {
    if (rows * T == 0) { return; }
    if (fits_mma(dout, OC) && fits_mma(in, C)) {
        matmul_sample_norms<Mma<false>, Mma<true>>(s, norms, (const Bf16 *)dout, (const Bf16 *)in,
                                                   rows, (int)T, (int)C, (int)OC);
    } else {
        FOR_REAL(matmul_sample_norms<Plain<R, false>, Plain<R, true>>(
            s, norms, (const R *)dout, (const R *)in, rows, (int)T, (int)C, (int)OC));
    }
}
template <class Tile, class R>
static inline void tied_sample_norms(Stream *s, double *norms, const R *dout, const int32_t *tokens,
                                     const R *dlogits, const R *x, int64_t rows, int T, int C,
                                     int64_t Vp) {
    const int64_t lines = ceil_div(T, Tile::EDGE);
    start_norms(s, tied_norms_kernel<Tile, R>, Tile::SHARED, lines * lines, rows, norms,
                Rows<R>{dout, T, C}, Rows<R>{x, T, C}, dlogits, tokens, Vp);
}
static inline void ops_tied_sample_norms(Stream *s, double *norms, const Real *dout,
                                         const int32_t *tokens, const Real *dlogits, const Real *x,
                                         int64_t rows, int64_t T, int64_t C, int64_t Vp) {
    if (rows * T == 0) { return; }
    if (fits_mma(dout, C) && fits_mma(x, C)) {
        tied_sample_norms<Mma<false>>(s, norms, (const Bf16 *)dout, tokens, (const Bf16 *)dlogits,
                                      (const Bf16 *)x, rows, (int)T, (int)C, Vp);
    } else {
        FOR_REAL(tied_sample_norms<Plain<R, false>>(s, norms, (const R *)dout, tokens,
                                                    (const R *)dlogits, (const R *)x, rows, (int)T,
                                                    (int)C, Vp));
    }
}

// A block computes TIED_EACH rows. Each thread computes some channels of all of them, so that a row
// of x is read once for all.
enum { TIED_EACH = 8 };
template <class R>
__global__ void tied_rows_kernel(float *out, const int32_t *tokens, const R *dlogits, const R *x,
                                 int T, int64_t C, int64_t Vp) {
    const int first = (int)blockIdx.x * TIED_EACH,
              n = T - first < TIED_EACH ? T - first : TIED_EACH;
    out += (int64_t)blockIdx.y * T * C;
    tokens += (int64_t)blockIdx.y * T;
    dlogits += (int64_t)blockIdx.y * T * Vp;
    x += (int64_t)blockIdx.y * T * C;
    for (int64_t c = threadIdx.x; c < C; c += THREADS) {
        double sum[TIED_EACH];
        UNROLL for (int i = 0; i < TIED_EACH; i++) { sum[i] = 0.0; }
        for (int t = 0; t < T; t++) {
            const double value = (double)read(x + t * C + c);
            UNROLL for (int i = 0; i < TIED_EACH; i++) {
                if (i < n) { sum[i] += value * (double)read(dlogits + t * Vp + tokens[first + i]); }
            }
        }
        UNROLL for (int i = 0; i < TIED_EACH; i++) {
            if (i < n) { out[(first + i) * C + c] = (float)sum[i]; }
        }
    }
}
static inline void ops_tied_rows(Stream *s, float *out, const int32_t *tokens, const Real *dlogits,
                                 const Real *x, int64_t rows, int64_t T, int64_t C, int64_t Vp) {
    cudaStream_t stream = enter(s);
    const dim3 grid((unsigned)ceil_div(T, TIED_EACH), (unsigned)rows);
    if (rows * T == 0) { return; }
    FOR_REAL(LAUNCH(tied_rows_kernel<R>, grid, THREADS, 0, stream, out, tokens, (const R *)dlogits,
                    (const R *)x, (int)T, C, Vp));
}
// One block per row.
__global__ void token_rows_kernel(float *out, const int32_t *tokens, const float *table, int64_t T,
                                  int64_t C, int64_t Vp) {
    const int64_t at = blockIdx.y * T + blockIdx.x;
    for (int64_t c = threadIdx.x; c < C; c += THREADS) {
        out[at * C + c] = table[(blockIdx.y * Vp + tokens[at]) * C + c];
    }
}
static inline void ops_token_rows(Stream *s, float *out, const int32_t *tokens, const float *table,
                                  int64_t rows, int64_t T, int64_t C, int64_t Vp) {
    cudaStream_t stream = enter(s);
    if (rows * T > 0) {
        LAUNCH(token_rows_kernel, dim3((unsigned)T, (unsigned)rows), THREADS, 0, stream, out,
               tokens, table, T, C, Vp);
    }
}
// One block per sample; its warps take the rows in turn.
template <class R>
__global__ void crossing_norms_kernel(double *norms, const double *others, int64_t count,
                                      int64_t stride, const R *dout, const float *tied, int64_t T,
                                      int64_t C) {
    const int lane = (int)threadIdx.x % 32;
    double product = 0.0, size = 0.0;
    for (int64_t t = threadIdx.x / 32; t < T; t += WARPS) {
        const R *e = dout + (blockIdx.x * T + t) * C;
        const float *u = tied + (blockIdx.x * T + t) * C;
        const double lengths = length_of(e, C) * length_of(u, C);
        for (int64_t c = lane; c < C; c += 32) { product += (double)read(e + c) * (double)u[c]; }
        size += lane == 0 ? lengths : 0.0;
    }
    product = block_total(product);
    size = block_total(size);
    if (threadIdx.x) { return; }
    double sum = norms[blockIdx.x];
    for (int64_t k = 0; k < count; k++) { sum += others[k * stride + blockIdx.x]; }
    norms[blockIdx.x] =
        sum + 2.0 * product + 0x1p-20 * fmax(0.0, sum + 2.0 * size - 64.0 * (sum + 2.0 * product));
}
static inline void ops_crossing_norms(Stream *s, double *norms, const double *others, int64_t count,
                                      int64_t stride, const Real *dout, const float *tied,
                                      int64_t rows, int64_t T, int64_t C) {
    cudaStream_t stream = enter(s);
    if (rows == 0) { return; }
    FOR_REAL(LAUNCH(crossing_norms_kernel<R>, (unsigned)rows, THREADS, 0, stream, norms, others,
                    count, stride, (const R *)dout, tied, T, C));
}

// Scratch for partial sums: of pairs of tiles, or of tiles of a gradient; of positions, together
// with the order of tokens; of the pieces of a whole gradient, which is computed for one sample at
// a time. The gradient is that of wte or of a block, which has fewer than 16 C^2 elements.
static inline int64_t clip_scratch_bytes(OpsShape shape) {
    const int64_t lines = ceil_div(shape.T, PLAIN_EDGE), widest = max_i64(4 * shape.C, shape.Vp);
    const int64_t tiles =
        max_i64(lines * lines, ceil_div(widest, PLAIN_EDGE) * ceil_div(shape.C, PLAIN_EDGE));
    const int64_t of_samples = shape.rows * max_i64(8 * tiles, (8 + 4) * shape.T),
                  of_one = 8 * ceil_div(4 * widest * shape.C, NORM_PIECE);
    return max_i64(of_samples, of_one);
}

// --- clipping ------------------------------------------------------------------------------------
__global__ void clip_factors_kernel(float *factors, const double *norms, const float *weights,
                                    int64_t rows, double R, ClipFunction clip) {
    const int64_t b = thread_index();
    if (b >= rows) { return; }
    const double weight = (double)weights[b], x = weight * sqrt(norms[b]);
    const double factor = clip == CLIP_ABADI ? fmin(1.0, R / (x + 1e-6)) : R / (x + 0.01);
    factors[b] = isfinite(x) ? (float)(weight * factor) : 0.0f;
}
static inline void ops_clip_factors(Stream *s, float *factors, const double *norms,
                                    const float *weights, int64_t rows, float R,
                                    ClipFunction clip) {
    cudaStream_t stream = enter(s);
    if (rows) {
        LAUNCH(clip_factors_kernel, blocks_for(rows, THREADS), THREADS, 0, stream, factors, norms,
               weights, rows, (double)R, clip);
    }
}

// Multiplies a(rows*T, A) by the factor of each sample; n = T * A. A sample whose factor is 0 is
// set to zero in a and in b(rows*T, B), whatever it holds; m = T * B.
__global__ void scale_samples_kernel(float *a, int64_t n, float *b, int64_t m,
                                     const float *factors) {
    const float factor = factors[blockIdx.y];
    const int64_t first = thread_index(), step = (int64_t)gridDim.x * THREADS;
    a += blockIdx.y * n;
    b += blockIdx.y * m;
    for (int64_t i = first; i < n; i += step) { a[i] = factor == 0.0f ? 0.0f : factor * a[i]; }
    for (int64_t i = first; i < m && factor == 0.0f; i += step) { b[i] = 0.0f; }
}
// Computes a tile of the gradient: the product of each sample, multiplied by its factor, is added.
template <class Tile, class R>
__global__ void __launch_bounds__(THREADS)
    weight_samples_kernel(float *dweight, Rows<R> dout, Rows<R> in, const float *factors,
                          int samples, bool accumulate) {
    const int across = (in.rows + Tile::EDGE - 1) / Tile::EDGE,
              i = (int)blockIdx.x / across * Tile::EDGE, j = (int)blockIdx.x % across * Tile::EDGE;
    float product[Tile::EACH], total[Tile::EACH];
    UNROLL for (int e = 0; e < Tile::EACH; e++) { total[e] = 0.0f; }
    Tile().multiply(product, dout, i, in, j, samples, [&](int b) {
        const float factor = factors[b];
        if (factor == 0.0f) { return; } // even if the product is not finite
        UNROLL for (int e = 0; e < Tile::EACH; e++) { total[e] += factor * product[e]; }
    });
    UNROLL for (int e = 0; e < Tile::EACH; e++) {
        const int r = i + Tile().row(e), c = j + Tile().column(e);
        float *to = dweight + (int64_t)r * in.rows + c;
        if (r < dout.rows && c < in.rows) { *to = accumulate ? *to + total[e] : total[e]; }
    }
}
template <class Tile, class R>
static inline void weight_samples(Stream *s, float *dweight, const R *dout, const R *in,
                                  const float *factors, int64_t rows, int T, int C, int OC,
                                  bool accumulate) {
    cudaStream_t stream = enter(s);
    const int64_t tiles = ceil_div(OC, Tile::EDGE) * ceil_div(C, Tile::EDGE);
    CUDA_CHECK(cudaFuncSetAttribute(weight_samples_kernel<Tile, R>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)Tile::SHARED));
    LAUNCH((weight_samples_kernel<Tile, R>), (unsigned)tiles, THREADS, Tile::SHARED, stream,
           dweight, Rows<R>{dout, OC, T}, Rows<R>{in, C, T}, factors, (int)rows, accumulate);
}
static inline void ops_matmul_backward_weight_samples(Stream *s, float *dweight, Real *dout,
                                                      Real *in, const float *factors, int64_t rows,
                                                      int64_t T, int64_t C, int64_t OC,
                                                      bool accumulate) {
    const bool exact = gpu_real == DTYPE_FP32 && FP32_PRODUCTS == CUBLAS_COMPUTE_32F;
    if (rows * T == 0 || exact) {
        cudaStream_t stream = enter(s);
        const bool out_is_narrow = OC <= C; // the narrow operand is less to scale
        float *narrow = (float *)(out_is_narrow ? dout : in),
              *wide = (float *)(out_is_narrow ? in : dout);
        const int64_t n = T * min_i64(C, OC), m = T * max_i64(C, OC);
        const dim3 grid(blocks_for(n, 4 * THREADS), (unsigned)rows);
        if (rows * T > 0) {
            LAUNCH(scale_samples_kernel, grid, THREADS, 0, stream, narrow, n, wide, m, factors);
        }
        ops_matmul_backward_weight(s, dweight, NULL, dout, in, rows * T, C, OC, accumulate);
    } else if (fits_mma(dout, OC) && fits_mma(in, C)) {
        weight_samples<Mma<true>>(s, dweight, (const Bf16 *)dout, (const Bf16 *)in, factors, rows,
                                  (int)T, (int)C, (int)OC, accumulate);
    } else {
        FOR_REAL(
            (weight_samples<Plain<R, true>>(s, dweight, (const R *)dout, (const R *)in, factors,
                                            rows, (int)T, (int)C, (int)OC, accumulate)));
    }
}

__global__ void accumulate_samples_kernel(float *out, const float *in, const float *factors,
                                          int64_t rows, int64_t n, bool accumulate) {
    const int64_t i = thread_index() * 4;
    float sum[4] = {0};
    float x[4];
    if (i >= n) { return; }
    if (accumulate) { read_numbers<4>(sum, out + i, n - i); }
    for (int64_t b = 0; b < rows; b++) {
        const float factor = factors[b];
        if (factor == 0.0f) { continue; }
        read_numbers<4>(x, in + b * n + i, n - i);
        UNROLL for (int j = 0; j < 4; j++) { sum[j] += factor * x[j]; }
    }
    write_numbers<4>(out + i, sum, n - i);
}
static inline void ops_accumulate_samples(Stream *s, float *out, const float *in,
                                          const float *factors, int64_t rows, int64_t n,
                                          bool accumulate) {
    cudaStream_t stream = enter(s);
    if (n) {
        LAUNCH(accumulate_samples_kernel, blocks_for(n, THREADS * 4), THREADS, 0, stream, out, in,
               factors, rows, n, accumulate);
    }
}

// --- noise: a thread computes the 16 elements of a block of ChaCha20 -----------------------------
__global__ void scale_kernel(float *x, int64_t n, float scale) {
    const int64_t i = thread_index();
    if (i < n) { x[i] *= scale; }
}
__global__ void add_noise_kernel(float *x, int64_t first, int64_t n, NoiseStream noise,
                                 NoiseScale scale) {
    const int64_t i = thread_index() * NOISE_BLOCK;
    uint32_t words[NOISE_BLOCK];
    float y[NOISE_BLOCK];
    if (i >= n) { return; }
    read_numbers<NOISE_BLOCK>(y, x + i, n - i);
    noise_words(words, &noise, (uint32_t)((first + i) / NOISE_BLOCK));
    UNROLL for (int j = 0; j < NOISE_BLOCK; j += 2) {
        float z[2];
        noise_normals(words[j], words[j + 1], &z[0], &z[1]);
        y[j] = noise_add(y[j], z[0], scale);
        y[j + 1] = noise_add(y[j + 1], z[1], scale);
    }
    write_numbers<NOISE_BLOCK>(x + i, y, n - i);
}
static inline void ops_add_noise(Stream *s, float *x, int64_t first, int64_t n, NoiseStream noise,
                                 float deviation, float scale) {
    cudaStream_t stream = enter(s);
    assert(first % NOISE_BLOCK == 0 && (first + n) / NOISE_BLOCK <= (int64_t)UINT32_MAX);
    if (n && deviation == 0.0f) {
        LAUNCH(scale_kernel, blocks_for(n, THREADS), THREADS, 0, stream, x, n, scale);
    } else if (n) {
        LAUNCH(add_noise_kernel, blocks_for(n, THREADS * NOISE_BLOCK), THREADS, 0, stream, x, first,
               n, noise, noise_scale(deviation, scale));
    }
}

#endif
