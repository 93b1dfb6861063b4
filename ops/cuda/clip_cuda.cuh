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

enum { NORM_PIECE = 8192, PLAIN_EDGE = 64, MMA_EDGE = 128 };

// --- norms of pieces, one row of the grid for each sample ----------------------------------------
__device__ double block_total(double x) { // for a block of THREADS threads
    __shared__ double part[WARPS];
    __syncthreads(); // all threads have read the earlier contents
    x = warp_sum(x);
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
    double *parts = (double *)scratch(s);
    assert(blocks * rows * (int64_t)sizeof *parts <= scratch_bytes(s));
    launch_with(s, kernel, dim3((unsigned)blocks, (unsigned)rows), THREADS, shared, norms, parts,
                arguments...);
}
template <class Kernel, class... Arguments>
static inline void start_norms(Stream *s, Kernel kernel, int shared, int64_t blocks, int64_t rows,
                               double *norms, Arguments... arguments) {
    start_parts(s, kernel, shared, blocks, rows, norms, arguments...);
    if (blocks > 1) {
        launch(s, add_norms_kernel, (unsigned)rows, norms, (const double *)scratch(s), blocks);
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
    start_norms(s, sample_norms_kernel, 0, ceil_div(n, NORM_PIECE), rows, norms, in, n);
}
// Sums over the rows of a sample, as in column_partials(), in equal pieces: few samples alone would
// leave most of a GPU idle. The number of pieces depends on T alone.
enum { SAMPLE_PIECES = 16, PIECE_ROWS = 8 * COLUMN_ROWS }; // at most; at least
static inline int64_t sample_pieces(int64_t T) {
    int64_t pieces = 1;
    while (pieces < SAMPLE_PIECES && T % (2 * pieces) == 0 && T / (2 * pieces) >= PIECE_ROWS) {
        pieces *= 2;
    }
    return pieces;
}
// sums(rows, C) = the sums of each row's `pieces` rows of parts(rows * pieces, C), in order
__global__ void add_pieces_kernel(float *sums, const float *parts, int64_t pieces, int64_t C,
                                  int64_t n) {
    const int64_t i = thread_index();
    float total = 0.0f;
    if (i >= n) { return; }
    for (int64_t p = 0; p < pieces; p++) { total += parts[(i / C * pieces + p) * C + i % C]; }
    sums[i] = total;
}
static inline void sample_sums(Stream *s, float *weights, float *biases, const Real *dout,
                               const Real *in, const float *mean, const float *rstd, int64_t rows,
                               int64_t T, int64_t C) {
    const int64_t pieces = sample_pieces(T), n = rows * pieces * C;
    float *to[] = {weights, biases};
    float *parts[] = {weights, biases};
    float *partials = (float *)scratch(s);
    for (int i = 0; i < 2 && pieces > 1; i++) {
        if (to[i]) {
            parts[i] = partials;
            partials += n;
        }
    }
    assert((char *)partials <= (char *)s->workspace + s->workspace_bytes);
    column_partials(s, parts[0], parts[1], C, dout, in, mean, rstd, rows * T, C, rows * pieces,
                    T / pieces);
    for (int i = 0; i < 2 && pieces > 1; i++) {
        if (!to[i]) { continue; }
        launch(s, add_pieces_kernel, blocks_for(rows * C, THREADS), to[i], parts[i], pieces, C,
               rows * C);
    }
}
static inline void ops_bias_samples(Stream *s, float *sums, double *norms, const Real *dout,
                                    int64_t rows, int64_t T, int64_t OC) {
    sample_sums(s, NULL, sums, dout, NULL, NULL, NULL, rows, T, OC);
    ops_sample_norms(s, norms, sums, rows, OC);
}
static inline void ops_layernorm_samples(Stream *s, float *dweights, float *dbiases, double *norms,
                                         const Real *dout, const Real *in, const float *mean,
                                         const float *rstd, int64_t rows, int64_t T, int64_t C) {
    sample_sums(s, dweights, dbiases, dout, in, mean, rstd, rows, T, C);
    ops_sample_norms(s, norms, dweights, rows, C);
    ops_sample_norms(s, norms, dbiases, rows, C);
}
static inline void ops_rmsnorm_samples(Stream *s, float *dweights, double *norms, const Real *dout,
                                       const Real *in, const float *rstd, int64_t rows, int64_t T,
                                       int64_t C) {
    sample_sums(s, dweights, NULL, dout, in, NULL, rstd, rows, T, C);
    ops_sample_norms(s, norms, dweights, rows, C);
}
static inline void ops_head_norm_samples(Stream *s, float *dq_weights, float *dk_weights,
                                         double *norms, const Real *dout, const Real *in,
                                         const float *rstd, const HeadNorm *h) {
    const AttentionShape a = h->shape;
    head_norm_partials(s, dq_weights, dk_weights, a.D, dout, in, rstd, h, a.rows, a.T);
    ops_sample_norms(s, norms, dq_weights, a.rows, a.D);
    ops_sample_norms(s, norms, dk_weights, a.rows, a.D);
}

// A block takes entry blockIdx.x of its sample's order. If there are positions, the square of that
// row of dout is the square of a row of dwpe. If the entry is the first of its token, the block
// also sums all rows of the token, and adds the square of the sum.
template <class R>
__global__ void embedding_norms_kernel(double *norms, double *parts, const R *dout,
                                       const int32_t *tokens, const int32_t *order, bool positions,
                                       int64_t T, int64_t C) {
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
        const float x = positions ? read(dout + order[place] * C + c) : 0.0f;
        float sum = 0.0f;
        for (int64_t i = place; i < end; i++) { sum += read(dout + order[i] * C + c); }
        squares += (double)x * (double)x + (double)sum * (double)sum;
    }
    add_to_norm(norms, parts, squares);
}
static inline void ops_embedding_sample_norms(Stream *s, double *norms, const Real *dout,
                                              const int32_t *tokens, bool positions, int64_t rows,
                                              int64_t T, int64_t C, int64_t Vp) {
    if (rows * T == 0) { return; }
    const int32_t *order = order_tokens(s, (int32_t *)((double *)scratch(s) + rows * T), tokens,
                                        rows, T, Vp); // after the partial sums
    FOR_REAL(start_norms(s, embedding_norms_kernel<R>, 0, T, rows, norms, dout, tokens, order,
                         positions, T, C));
}

// --- tiles of products of rows -------------------------------------------------------------------
// For each sample, a matrix whose rows are multiplied over `depth`, with each other or with another
// matrix's rows. In memory the elements of a row are contiguous; if ACROSS, those of a column are.
template <class R> struct Rows {
    const R *p;
    int rows, depth;
};
struct RealRows { // the same on the host
    const Real *p;
    int64_t rows, depth;
    template <class R> operator Rows<R>() const { return {(const R *)p, (int)rows, (int)depth}; }
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
};
template <bool ACROSS> struct Mma {
    enum {
        EDGE = MMA_EDGE,
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
        if (ACROSS) {
            load_matrices_transposed(m, matrix_row(panel, PITCH, k, r, !LEFT));
        } else {
            load_matrices(m, matrix_row(panel, PITCH, r, k, LEFT));
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
                    mma_pair((float(*)[4])(product + 16 * m + 4 * n), left[m], right);
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
};
// The same for one sample, the block's.
template <class Tile, class R>
__device__ void multiply_rows(float *product, const Rows<R> &a, int a0, const Rows<R> &b, int b0) {
    Tile().multiply(product, a, a0, b, b0, 1, [](int) {});
}

// Returns the first row and column of the block's tile of a matrix with this number of columns.
struct TileBegin {
    int row, column;
};
template <class Tile> __device__ TileBegin tile_begin(int columns) {
    const int across = (columns + Tile::EDGE - 1) / Tile::EDGE, i = (int)blockIdx.x;
    return {i / across * Tile::EDGE, i % across * Tile::EDGE};
}

// --- norms of products of rows -------------------------------------------------------------------
template <class Tile, class R>
__global__ void __launch_bounds__(THREADS)
    ghost_norms_kernel(double *norms, double *parts, Rows<R> dout, Rows<R> in) {
    int i = 0, j = (int)blockIdx.x; // the pairs are (0,0) (1,0) (1,1) (2,0) ...
    for (; j > i; i++) { j -= i + 1; }
    float p[Tile::EACH], q[Tile::EACH];
    multiply_rows<Tile>(p, in, i * Tile::EDGE, in, j * Tile::EDGE);
    multiply_rows<Tile>(q, dout, i * Tile::EDGE, dout, j * Tile::EDGE);
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
    return sqrt(warp_sum(squares));
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
    const TileBegin begin = tile_begin<Tile>(in.rows);
    float p[Tile::EACH];
    multiply_rows<Tile>(p, dout, begin.row, in, begin.column);
    double sum = 0.0;
    UNROLL for (int e = 0; e < Tile::EACH; e++) { sum += (double)p[e] * (double)p[e]; }
    add_to_norm(norms, parts, sum);
}
// Computes a tile of (x_s . dout_t), and multiplies each element by dlogits[s, token of t].
template <class Tile, class R>
__global__ void __launch_bounds__(THREADS)
    tied_norms_kernel(double *norms, double *parts, Rows<R> dout, Rows<R> x, const R *dlogits,
                      const int32_t *tokens, int64_t Vp) {
    const int T = x.rows;
    const TileBegin begin = tile_begin<Tile>(T);
    dlogits += (int64_t)blockIdx.y * T * Vp;
    tokens += (int64_t)blockIdx.y * T;
    float p[Tile::EACH];
    multiply_rows<Tile>(p, x, begin.row, dout, begin.column);
    double sum = 0.0;
    UNROLL for (int e = 0; e < Tile::EACH; e++) {
        const int s = begin.row + Tile().row(e), t = begin.column + Tile().column(e);
        if (s < T && t < T) { sum += (double)p[e] * (double)read(dlogits + s * Vp + tokens[t]); }
    }
    add_to_norm(norms, parts, 2.0 * sum);
}
// Returns whether Mma takes matrices (.., a_width) and (.., b_width); otherwise Plain does.
static inline bool fits_mma(const Real *a, int64_t a_width, const Real *b, int64_t b_width) {
    return gpu_real == DTYPE_BF16 && a_width % 8 == 0 && b_width % 8 == 0 &&
           alignment_of(a) >= 16 && alignment_of(b) >= 16;
}
// Runs the arguments once, with R defined as the type of a Real, and Tile as Mma or Plain.
#define FOR_TILE(ACROSS, mma, ...)                                                                 \
    do {                                                                                           \
        if (mma) {                                                                                 \
            typedef Bf16 R;                                                                        \
            typedef Mma<ACROSS> Tile;                                                              \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            FOR_REAL(typedef Plain<R, ACROSS> Tile; __VA_ARGS__);                                  \
        }                                                                                          \
    } while (0)
static inline void ops_matmul_sample_norms(Stream *s, double *norms, const Real *dout,
                                           const Real *in, int64_t rows, int64_t T, int64_t C,
                                           int64_t OC) {
    const bool mma = fits_mma(dout, OC, in, C);
    const int64_t edge = mma ? MMA_EDGE : PLAIN_EDGE, lines = ceil_div(T, edge),
                  pairs = lines * (lines + 1) / 2, tiles = ceil_div(OC, edge) * ceil_div(C, edge);
    if (pairs * (C + OC) <= tiles * T) { // depends on the shape alone
        const RealRows left = {dout, T, OC}, right = {in, T, C};
        FOR_TILE(false, mma,
                 start_parts(s, ghost_norms_kernel<Tile, R>, Tile::SHARED, pairs, rows, norms, left,
                             right);
                 launch(s, add_ghost_norms_kernel<R>, (unsigned)rows, norms,
                        (const double *)scratch(s), pairs, left, right, Tile::UNCERTAIN));
    } else {
        FOR_TILE(true, mma,
                 start_norms(s, gradient_norms_kernel<Tile, R>, Tile::SHARED, tiles, rows, norms,
                             RealRows{dout, OC, T}, RealRows{in, C, T}));
    }
}
static inline void ops_tied_sample_norms(Stream *s, double *norms, const Real *dout,
                                         const int32_t *tokens, const Real *dlogits, const Real *x,
                                         int64_t rows, int64_t T, int64_t C, int64_t Vp) {
    const bool mma = fits_mma(dout, C, x, C);
    const int64_t lines = ceil_div(T, mma ? MMA_EDGE : PLAIN_EDGE);
    FOR_TILE(false, mma,
             start_norms(s, tied_norms_kernel<Tile, R>, Tile::SHARED, lines * lines, rows, norms,
                         RealRows{dout, T, C}, RealRows{x, T, C}, dlogits, tokens, Vp));
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
    const dim3 grid(blocks_for(T, TIED_EACH), (unsigned)rows);
    LAUNCH_REAL(s, tied_rows_kernel, grid, out, tokens, dlogits, x, (int)T, C, Vp);
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
    launch(s, token_rows_kernel, dim3((unsigned)T, (unsigned)rows), out, tokens, table, T, C, Vp);
}
// One block per sample; its warps take the rows in turn.
template <class R>
__global__ void crossing_norms_kernel(double *norms, const double *others, int64_t count,
                                      int64_t stride, const R *dout, const float *tied, int64_t T,
                                      int64_t C) {
    const int lane = (int)threadIdx.x % 32;
    double product = 0.0, size = 0.0;
    for (int64_t t = threadIdx.x / 32; tied && t < T; t += WARPS) {
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
    LAUNCH_REAL(s, crossing_norms_kernel, (unsigned)rows, norms, others, count, stride, dout, tied,
                T, C);
}

// Scratch for partial sums: of pairs of tiles, or of tiles of a gradient; of positions, together
// with the order of tokens; of the pieces of vectors; of the pieces of a whole gradient, which is
// computed for one sample at a time. The gradient is that of wte or of a block, which has fewer
// than 16 C^2 elements.
static inline int64_t clip_scratch_bytes(OpsShape shape) {
    const int64_t lines = ceil_div(shape.T, PLAIN_EDGE),
                  widest = max_i64(ops_widest(shape), shape.Vp);
    const int64_t tiles =
        max_i64(lines * lines, ceil_div(widest, PLAIN_EDGE) * ceil_div(shape.C, PLAIN_EDGE));
    const int64_t of_samples =
                      shape.rows * max_i64(8 * tiles, 8 * shape.T + 4 * order_numbers(shape.T)),
                  of_vectors = 4 * shape.rows * sample_pieces(shape.T) *
                               max_i64(ops_widest(shape), 2 * shape.C),
                  of_one = 8 * ceil_div(4 * widest * shape.C, NORM_PIECE);
    return max_i64(max_i64(of_samples, of_vectors), of_one);
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
    launch(s, clip_factors_kernel, blocks_for(rows, THREADS), factors, norms, weights, rows,
           (double)R, clip);
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
    const TileBegin begin = tile_begin<Tile>(in.rows);
    float product[Tile::EACH], total[Tile::EACH];
    UNROLL for (int e = 0; e < Tile::EACH; e++) { total[e] = 0.0f; }
    Tile().multiply(product, dout, begin.row, in, begin.column, samples, [&](int b) {
        const float factor = factors[b];
        if (factor == 0.0f) { return; } // even if the product is not finite
        UNROLL for (int e = 0; e < Tile::EACH; e++) { total[e] += factor * product[e]; }
    });
    UNROLL for (int e = 0; e < Tile::EACH; e++) {
        const int r = begin.row + Tile().row(e), c = begin.column + Tile().column(e);
        float *to = dweight + (int64_t)r * in.rows + c;
        if (r < dout.rows && c < in.rows) { *to = accumulate ? *to + total[e] : total[e]; }
    }
}
static inline void ops_matmul_backward_weight_samples(Stream *s, float *dweight, Real *dout,
                                                      Real *in, const float *factors, int64_t rows,
                                                      int64_t T, int64_t C, int64_t OC,
                                                      bool accumulate) {
    const bool exact = gpu_real == DTYPE_FP32 && FP32_PRODUCTS == CUBLAS_COMPUTE_32F;
    if (rows * T == 0 || exact) {
        const bool out_is_narrow = OC <= C; // the narrow operand is less to scale
        float *narrow = (float *)(out_is_narrow ? dout : in),
              *wide = (float *)(out_is_narrow ? in : dout);
        const int64_t n = T * min_i64(C, OC), m = T * max_i64(C, OC);
        const dim3 grid(blocks_for(n, 4 * THREADS), (unsigned)rows);
        launch(s, scale_samples_kernel, grid, narrow, n, wide, m, factors);
        ops_matmul_backward_weight(s, dweight, NULL, dout, in, rows * T, C, OC, accumulate);
        return;
    }
    const bool mma = fits_mma(dout, OC, in, C);
    const int64_t edge = mma ? MMA_EDGE : PLAIN_EDGE;
    const unsigned tiles = (unsigned)(ceil_div(OC, edge) * ceil_div(C, edge));
    FOR_TILE(true, mma,
             launch_with(s, weight_samples_kernel<Tile, R>, tiles, THREADS, Tile::SHARED, dweight,
                         RealRows{dout, OC, T}, RealRows{in, C, T}, factors, (int)rows,
                         accumulate));
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
    launch(s, accumulate_samples_kernel, blocks_for(n, THREADS * 4), out, in, factors, rows, n,
           accumulate);
}

// --- noise: a thread computes the 16 elements of a block of ChaCha20 -----------------------------
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
    assert(first % NOISE_BLOCK == 0 && (first + n) / NOISE_BLOCK <= (int64_t)UINT32_MAX);
    if (deviation == 0.0f) {
        const Scale all = {scale};
        launch_map<float, float>(s, all, x, x, NULL, n);
    } else {
        launch(s, add_noise_kernel, blocks_for(n, THREADS * NOISE_BLOCK), x, first, n, noise,
               noise_scale(deviation, scale));
    }
}

#endif
