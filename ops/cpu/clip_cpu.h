// clip_cpu.h: what each sample adds to a gradient, on the CPU. The contract is in ops.h, section
// "privacy".
//
// Plan     The squared norm of a sample's weight gradient dout^T in is the sum over pairs of its
//          rows of (dout_t . dout_s) (in_t . in_s), the ghost norm of arXiv 2210.00038. It needs
//          two matrices of products (Gram matrices). They are computed tile by tile, only on and
//          above the diagonal. A tile's rows are packed once, in slices of the inner dimension, and
//          serve as both operands of the register-blocked product. Where the gradient itself is
//          less work, its tiles are computed, squared and discarded. The other operations are
//          passes over memory.
// Threads  A sum over a sample is cut by the sample's shape, never by the number of samples or
//          threads. Its parts are fp64 numbers that are added in order. So the results of a sample
//          have the same bits for any thread count and any other samples.
#ifndef CLIP_CPU_H
#define CLIP_CPU_H

#include "ops/cpu/attention_cpu.h" // register-blocked products
#include "ops/cpu/matmul_cpu.h"    // tiles

#ifndef CLIP_PARTS     // tests make it smaller
#define CLIP_PARTS 256 // parts of the sum of a sample, at most
#endif
enum {
    CLIP_SLICE = 512, // channels of an embedding's gradient that are summed together
    // Rows and columns of a tile of products, at most. Two tiles and a slice stay in the L2 cache.
    GRAM_EDGE = 256,
    // Depth of a packed slice. What the panels of a band need stays in the L1 cache.
    GRAM_DEPTH = 128,
    BAND = 2 * LANES // rows that are packed together
};

typedef struct {
    int64_t edge;             // side of a tile, a multiple of BAND
    double *parts;            // (rows, CLIP_PARTS)
    uint64_t *order;          // (rows, T)
    float *first, *second;    // (edge, edge), for one thread
    float *packed, *packed_2; // (edge, GRAM_DEPTH), for one thread
} ClipSpace;
static inline ClipSpace clip_space(float *at, int64_t rows, int64_t T, int thread,
                                   int64_t *floats) {
    float *begin = at;
    ClipSpace k;
    k.edge = min_i64(GRAM_EDGE, round_up(max_i64(T, 1), BAND));
    k.parts = (double *)(void *)take_floats(&at, 2 * rows * CLIP_PARTS);
    k.order = (uint64_t *)(void *)take_floats(&at, 2 * rows * T);
    at += thread * (2 * k.edge * k.edge + 2 * k.edge * GRAM_DEPTH);
    k.first = take_floats(&at, k.edge * k.edge);
    k.second = take_floats(&at, k.edge * k.edge);
    k.packed = take_floats(&at, k.edge * GRAM_DEPTH);
    k.packed_2 = take_floats(&at, k.edge * GRAM_DEPTH);
    *floats = at - begin;
    return k;
}
static inline int64_t clip_floats(int64_t rows, int64_t T, int threads) {
    int64_t floats;
    clip_space(NULL, rows, T, threads - 1, &floats);
    return floats;
}
static inline ClipSpace thread_clip_space(Stream *s, int64_t rows, int64_t T) {
    int64_t floats;
    assert(workspace_rest(s) >= (size_t)clip_floats(rows, T, s->threads) * sizeof(float));
    return clip_space((float *)s->workspace, rows, T, omp_get_thread_num(), &floats);
}
static inline void add_parts(double *norms, const double *parts, int64_t rows, int64_t count) {
    for (int64_t b = 0; b < rows; b++) {
        double sum = 0.0;
        for (int64_t p = 0; p < count; p++) { sum += parts[b * CLIP_PARTS + p]; }
        norms[b] += sum;
    }
}

// Returns n Reals as floats: in place where they are floats, else in the buffer.
static inline const float *as_floats(float *buffer, const Real *x, int64_t n) {
    if (cpu_real == DTYPE_FP32) { return (const float *)x; }
    reals_to_floats(buffer, x, n);
    return buffer;
}
// As chunk_squares().
static inline double real_squares(const Real *x, int64_t n) {
    double sum[32] = {0};
    double total = 0.0;
    float buffer[CLIP_SLICE];
    for (int64_t i = 0; i < n; i += CLIP_SLICE) {
        const int64_t part = min_i64(CLIP_SLICE, n - i);
        add_squares(sum, as_floats(buffer, real_at_const(x, i), part), part);
    }
    for (int64_t l = 0; l < 32; l++) { total += sum[l]; }
    return total;
}

// --- weight gradients ----------------------------------------------------------------------------
typedef int32_t LaneNumbers __attribute__((vector_size(LANES * 4)));
// One step of a transposition: exchanges the two off-diagonal squares, `size` wide, of each 2 x 2
// group of squares.
static inline __attribute__((always_inline)) void swap_squares(Lanes row[LANES], const int size) {
    LaneNumbers low = {0}, high = {0};
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) {
        low[l] = l & size ? LANES + l - size : l;
        high[l] = l & size ? LANES + l : l + size;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & size) { continue; }
        const Lanes a = row[i], b = row[i + size];
        row[i] = __builtin_shuffle(a, b, low);
        row[i + size] = __builtin_shuffle(a, b, high);
    }
}
// to(LANES, LANES), with rows BAND apart, = the transpose of from(LANES, LANES), in registers
static inline void transpose_lanes(float *to, const float *from, int64_t stride) {
    Lanes row[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) { row[i] = *(const Lanes *)(from + i * stride); }
    swap_squares(row, 1);
    swap_squares(row, 2);
    swap_squares(row, 4);
    if (LANES > 8) { swap_squares(row, 8); }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) { *(Lanes *)(to + i * BAND) = row[i]; }
}
// to(bands, depth, BAND) = rows of from(n, depth), which are `stride` apart. The last band is
// padded with zeros.
static inline void pack_bands(float *to, const float *from, int64_t n, int64_t depth,
                              int64_t stride) {
    for (int64_t t = 0; t < round_up(n, BAND); t += LANES) {
        float *half = to + t / BAND * BAND * depth + t % BAND;
        int64_t c = 0;
        for (; c + LANES <= depth && t + LANES <= n; c += LANES) {
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) {
                __builtin_prefetch(from + (t + l) * stride + c + depth, 0, 2);
            }
            transpose_lanes(half + c * BAND, from + t * stride + c, stride);
        }
        for (; c < depth; c++) {
            for (int64_t l = 0; l < LANES; l++) {
                half[c * BAND + l] = t + l < n ? from[(t + l) * stride + c] : 0.0f;
            }
        }
    }
}
// out(m, n) [+]= products of packed rows. On the diagonal, where a is b, only whole vectors on or
// above the diagonal are computed.
static inline __attribute__((always_inline)) void
multiply_bands(const bool pairs, float *out, int64_t edge, const Word *a, int64_t m, const Word *b,
               int64_t n, int64_t depth, bool diagonal, bool add) {
    for (int64_t j = 0; j < n; j += BAND) {
        const Word *bj = b + j * depth;
        for (int64_t i = 0; i < (diagonal ? min_i64(m, j + BAND) : m); i += PANEL) {
            const Word *ai = a + i / BAND * BAND * depth + i % BAND;
            if (diagonal && i >= j + LANES) {
                multiply_panel(pairs, 1, out + i * edge + j + LANES, edge, ai, 1, BAND, bj + LANES,
                               BAND, 0, depth, add);
            } else {
                multiply_panel(pairs, 2, out + i * edge + j, edge, ai, 1, BAND, bj, BAND, 0, depth,
                               add);
            }
        }
    }
}
// Rows of bf16 are packed as words of pairs (attention_cpu.h), if they have whole words and are not
// multiplied by tiles of AMX.
static inline void gram_tile(Stream *s, const ClipSpace *k, float *out, const Real *x, int64_t C,
                             Tile t) {
    const bool pairs = words_are_pairs() && C % 2 == 0, diagonal = t.row == t.col;
    if (cpu_real == DTYPE_BF16 && (!pairs || cpu_tiles)) {
        gemm_tile(s, AS_STORED, TRANSPOSED, t.rows, t.cols, C, real_at_const(x, t.row * C), C,
                  real_at_const(x, t.col * C), C, false, out, k->edge);
        return;
    }
    const float *rows = (const float *)(const void *)real_at_const(x, t.row * C),
                *cols = (const float *)(const void *)real_at_const(x, t.col * C);
    const Word *right = (const Word *)(void *)k->packed,
               *left = diagonal ? right : (const Word *)(void *)k->packed_2;
    const int64_t words = pairs ? C / 2 : C,
                  slices_a_poll = max_i64(1, POLL_WORK / (t.rows * t.cols * GRAM_DEPTH));
    for (int64_t c = 0; c < words; c += GRAM_DEPTH) {
        const int64_t depth = min_i64(GRAM_DEPTH, words - c);
        pack_bands(k->packed, cols + c, t.cols, depth, words);
        if (!diagonal) { pack_bands(k->packed_2, rows + c, t.rows, depth, words); }
        if (pairs) {
            multiply_bands(true, out, k->edge, left, t.rows, right, t.cols, depth, diagonal, c > 0);
        } else {
            multiply_bands(false, out, k->edge, left, t.rows, right, t.cols, depth, diagonal,
                           c > 0);
        }
        if (c / GRAM_DEPTH % slices_a_poll == slices_a_poll - 1 || c + depth == words) {
            poll_messages(s);
        }
    }
}
// Returns the sum of a * b over a tile and its mirror image: elements count twice, except those on
// the diagonal.
static inline double dot_tiles(const float *a, const float *b, int64_t edge, Tile t) {
    const bool diagonal = t.row == t.col;
    double twice = 0.0, once = 0.0;
    for (int64_t i = 0; i < t.rows; i++) {
        const float *ai = a + i * edge, *bi = b + i * edge;
#pragma omp simd reduction(+ : twice)
        for (int64_t j = diagonal ? i + 1 : 0; j < t.cols; j++) {
            twice += (double)ai[j] * (double)bi[j];
        }
        if (diagonal) { once += (double)ai[i] * (double)bi[i]; }
    }
    return 2.0 * twice + once;
}
static inline double ghost_tile(Stream *s, const ClipSpace *k, const Real *dout, const Real *in,
                                int64_t C, int64_t OC, Tile t) {
    if (t.row > t.col) { return 0.0; }
    gram_tile(s, k, k->first, in, C, t);
    gram_tile(s, k, k->second, dout, OC, t);
    return dot_tiles(k->first, k->second, k->edge, t);
}
static inline double gradient_tile(Stream *s, const ClipSpace *k, const Real *dout, const Real *in,
                                   int64_t T, int64_t C, int64_t OC, Tile t) {
    double squares = 0.0;
    gemm_tile(s, TRANSPOSED, AS_STORED, t.rows, t.cols, T, real_at_const(dout, t.row), OC,
              real_at_const(in, t.col), C, false, k->first, k->edge);
    for (int64_t r = 0; r < t.rows; r++) {
        squares += chunk_squares(k->first + r * k->edge, t.cols);
    }
    return squares;
}
static inline Tiling square_tiles(int64_t rows, int64_t cols, int64_t edge) {
    const Tiling g = {
        rows, cols, edge, edge, ceil_div(cols, edge), ceil_div(rows, edge) * ceil_div(cols, edge)};
    return g;
}
// The norm computed from fp32 products has an error of about 2^-24 of the square of the sum of
// |dout_t| |in_t|. The error matters only if the terms cancel more than random terms would. Then
// what may be missing is added, so that no sample's norm is too small.
static inline double cautious_norm(double norm, const Real *dout, const Real *in, int64_t T,
                                   int64_t C, int64_t OC) {
    double most = 0.0;
    for (int64_t t = 0; t < T; t++) {
        most += sqrt(real_squares(real_at_const(dout, t * OC), OC) *
                     real_squares(real_at_const(in, t * C), C));
    }
    most *= most;
    return norm + 0x1p-20 * fmax(0.0, most - norm * (double)(64 * T));
}
static inline void ops_matmul_sample_norms(Stream *s, double *norms, const Real *dout,
                                           const Real *in, int64_t rows, int64_t T, int64_t C,
                                           int64_t OC) {
    if (rows * T == 0) { return; }
    const ClipSpace shared = thread_clip_space(s, rows, T);
    // Multiply-adds are T^2 (C + OC) / 2 against T C OC. Both run equally fast (measured).
    const bool ghost = T * (C + OC) < 2 * C * OC;
    const Tiling g = ghost ? square_tiles(T, T, shared.edge) : square_tiles(OC, C, shared.edge);
    const int64_t parts = min_i64(CLIP_PARTS, g.tiles);
#pragma omp parallel num_threads(s->threads)
    {
        const ClipSpace k = thread_clip_space(s, rows, T);
        gemm_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < rows * parts; i++) {
            const int64_t b = i / parts;
            const Real *dy = real_at_const(dout, b * T * OC), *x = real_at_const(in, b * T * C);
            double sum = 0.0;
            for (int64_t n = i % parts; n < g.tiles; n += CLIP_PARTS) {
                sum += ghost ? ghost_tile(s, &k, dy, x, C, OC, tile_at(&g, n))
                             : gradient_tile(s, &k, dy, x, T, C, OC, tile_at(&g, n));
            }
            k.parts[b * CLIP_PARTS + i % parts] = sum;
        }
#pragma omp for schedule(static)
        for (int64_t b = 0; b < rows; b++) {
            double sum = 0.0;
            for (int64_t p = 0; p < parts; p++) { sum += k.parts[b * CLIP_PARTS + p]; }
            norms[b] += ghost ? cautious_norm(sum, real_at_const(dout, b * T * OC),
                                              real_at_const(in, b * T * C), T, C, OC)
                              : sum;
        }
    }
}

// --- sums down the rows of a sample --------------------------------------------------------------
// Returns into how many slices of channels each sample is cut, so that all threads get the same
// work. The result of an element does not depend on the cut.
static inline int64_t sample_slices(int64_t rows, int threads) {
    int64_t slices = 1;
    while (rows * slices % threads) { slices++; }
    return slices;
}
// Slices start on a cache line.
static inline int64_t slice_begin(int64_t channels, int64_t slices, int64_t slice) {
    return min_i64(channels, 16 * part_begin(ceil_div(channels, 16), slices, slice));
}
static inline void ops_bias_samples(Stream *s, float *sums, double *norms, const Real *dout,
                                    int64_t rows, int64_t T, int64_t OC) {
    const int64_t slices = sample_slices(rows, s->threads);
#pragma omp parallel num_threads(s->threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * slices; i++) {
            const int64_t b = i / slices, c = slice_begin(OC, slices, i % slices),
                          end = slice_begin(OC, slices, i % slices + 1);
            FOR_TYPE(column_sums, sums + b * OC + c, real_at_const(dout, b * T * OC + c), T,
                     end - c, OC, false);
            poll_messages(s);
        }
#pragma omp for schedule(static)
        for (int64_t b = 0; b < rows; b++) { norms[b] += chunk_squares(sums + b * OC, OC); }
    }
}
// Adds what a row gives to the gradients of a layernorm's weight and bias.
TYPED void layernorm_add_row(const DType type, float *dweight, float *dbias, const Real *dy,
                             const Real *x, float mean, float rstd, int64_t channels) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        dweight[c] += load_real(type, dy, c) * ((load_real(type, x, c) - mean) * rstd);
        dbias[c] += load_real(type, dy, c);
    }
}
static inline void layernorm_sums(float *dweight, float *dbias, const Real *dout, const Real *in,
                                  const float *mean, const float *rstd, int64_t T, int64_t C,
                                  int64_t channels) {
    for (int64_t c = 0; c < channels; c++) { dweight[c] = dbias[c] = 0.0f; }
    for (int64_t t = 0; t < T; t++) {
        FOR_TYPE(layernorm_add_row, dweight, dbias, real_at_const(dout, t * C),
                 real_at_const(in, t * C), mean[t], rstd[t], channels);
    }
}
static inline void ops_layernorm_samples(Stream *s, float *dweights, float *dbiases, double *norms,
                                         const Real *dout, const Real *in, const float *mean,
                                         const float *rstd, int64_t rows, int64_t T, int64_t C) {
    const int64_t slices = sample_slices(rows, s->threads);
#pragma omp parallel num_threads(s->threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * slices; i++) {
            const int64_t b = i / slices, c = slice_begin(C, slices, i % slices),
                          end = slice_begin(C, slices, i % slices + 1), at = b * T * C + c;
            layernorm_sums(dweights + b * C + c, dbiases + b * C + c, real_at_const(dout, at),
                           real_at_const(in, at), mean + b * T, rstd + b * T, T, C, end - c);
            poll_messages(s);
        }
#pragma omp for schedule(static)
        for (int64_t b = 0; b < rows; b++) {
            norms[b] += chunk_squares(dweights + b * C, C) + chunk_squares(dbiases + b * C, C);
        }
    }
}

// --- embedding -----------------------------------------------------------------------------------
static inline int compare_order(const void *a, const void *b) {
    uint64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}
// Sorts tokens with their positions. Rows of equal tokens stay in order.
static inline void sort_tokens(uint64_t *order, const int32_t *tokens, int64_t T) {
    for (int64_t t = 0; t < T; t++) { order[t] = (uint64_t)tokens[t] << 32 | (uint64_t)t; }
    qsort(order, (size_t)T, sizeof *order, compare_order);
}
// Returns the squares of some channels: of each token's sum of rows, and, with positions, of every
// row.
static inline double embedding_squares(const Real *dout, const uint64_t *order, bool positions,
                                       int64_t T, int64_t C, int64_t channels) {
    double squares[32] = {0};
    double sum = 0.0;
    float row_sum[CLIP_SLICE], buffer[CLIP_SLICE];
    for (int64_t i = 0, next; i < T; i = next) {
        memset(row_sum, 0, sizeof row_sum);
        for (next = i; next < T && order[next] >> 32 == order[i] >> 32; next++) {
            const int64_t at = (int64_t)(order[next] & 0xffffffffu) * C;
            const float *row = as_floats(buffer, real_at_const(dout, at), channels);
#pragma omp simd
            for (int64_t c = 0; c < channels; c++) { row_sum[c] += row[c]; }
            if (positions) { add_squares(squares, row, channels); }
        }
        add_squares(squares, row_sum, channels);
    }
    for (int64_t l = 0; l < 32; l++) { sum += squares[l]; }
    return sum;
}
static inline void ops_embedding_sample_norms(Stream *s, double *norms, const Real *dout,
                                              const int32_t *tokens, bool positions, int64_t rows,
                                              int64_t T, int64_t C, int64_t Vp) {
    (void)Vp;
    const ClipSpace k = thread_clip_space(s, rows, T);
    const int64_t slices = ceil_div(C, CLIP_SLICE);
    assert(slices <= CLIP_PARTS);
#pragma omp parallel num_threads(s->threads)
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < rows; b++) { sort_tokens(k.order + b * T, tokens + b * T, T); }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * slices; i++) {
            const int64_t b = i / slices, c = i % slices * CLIP_SLICE, at = b * T * C + c;
            k.parts[b * CLIP_PARTS + i % slices] =
                embedding_squares(real_at_const(dout, at), k.order + b * T, positions, T, C,
                                  min_i64(CLIP_SLICE, C - c));
            poll_messages(s);
        }
    }
    add_parts(norms, k.parts, rows, slices);
}

// Computes a tile of products of rows of x and rows of dout, and multiplies each by its dlogits.
TYPED double tied_dot(const DType type, const float *product, const Real *dlogits,
                      const int32_t *tokens, int64_t n) {
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++) {
        sum += (double)product[c] * (double)load_real(type, dlogits, tokens[c]);
    }
    return sum;
}
static inline double tied_tile(Stream *s, const ClipSpace *k, const Real *dout,
                               const int32_t *tokens, const Real *dlogits, const Real *x, int64_t C,
                               int64_t Vp, Tile t) {
    double sum = 0.0;
    gemm_tile(s, AS_STORED, TRANSPOSED, t.rows, t.cols, C, real_at_const(x, t.row * C), C,
              real_at_const(dout, t.col * C), C, false, k->first, k->edge);
    for (int64_t r = 0; r < t.rows; r++) {
        sum += FOR_TYPE(tied_dot, k->first + r * k->edge, real_at_const(dlogits, (t.row + r) * Vp),
                        tokens + t.col, t.cols);
    }
    return sum;
}
static inline void ops_tied_sample_norms(Stream *s, double *norms, const Real *dout,
                                         const int32_t *tokens, const Real *dlogits, const Real *x,
                                         int64_t rows, int64_t T, int64_t C, int64_t Vp) {
    if (rows * T == 0) { return; }
    const ClipSpace shared = thread_clip_space(s, rows, T);
    const Tiling g = square_tiles(T, T, shared.edge);
    const int64_t parts = min_i64(CLIP_PARTS, g.tiles);
#pragma omp parallel num_threads(s->threads)
    {
        const ClipSpace k = thread_clip_space(s, rows, T);
        gemm_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < rows * parts; i++) {
            const int64_t b = i / parts, at = b * T;
            const Real *dy = real_at_const(dout, at * C), *x_b = real_at_const(x, at * C),
                       *d = real_at_const(dlogits, at * Vp);
            double sum = 0.0;
            for (int64_t n = i % parts; n < g.tiles; n += CLIP_PARTS) {
                sum += tied_tile(s, &k, dy, tokens + at, d, x_b, C, Vp, tile_at(&g, n));
            }
            k.parts[b * CLIP_PARTS + i % parts] = 2.0 * sum;
        }
    }
    add_parts(norms, shared.parts, rows, parts);
}

// Computes some channels of the sum over s of dlogits[s, token] x_s.
TYPED void tied_row(const DType type, float *out, const Real *dlogits, const Real *x, int64_t T,
                    int64_t C, int64_t Vp, int64_t channels) {
    double sum[CLIP_SLICE] = {0};
    for (int64_t t = 0; t < T; t++) {
        const double d = (double)load_real(type, dlogits, t * Vp);
#pragma omp simd
        for (int64_t c = 0; c < channels; c++) {
            sum[c] += d * (double)load_real(type, x, t * C + c);
        }
    }
    for (int64_t c = 0; c < channels; c++) { out[c] = (float)sum[c]; }
}
static inline void ops_tied_rows(Stream *s, float *out, const int32_t *tokens, const Real *dlogits,
                                 const Real *x, int64_t rows, int64_t T, int64_t C, int64_t Vp) {
    const ClipSpace k = thread_clip_space(s, rows, T);
#pragma omp parallel num_threads(s->threads)
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < rows; b++) { sort_tokens(k.order + b * T, tokens + b * T, T); }
#pragma omp for schedule(dynamic, 1)
        // the first position of a token does the work for all of them
        for (int64_t i = 0; i < rows * T; i++) {
            const int64_t b = i / T, at = b * T, token = (int64_t)(k.order[i] >> 32),
                          place = at + (int64_t)(k.order[i] & 0xffffffffu);
            if (i > at && (int64_t)(k.order[i - 1] >> 32) == token) { continue; }
            for (int64_t c = 0; c < C; c += CLIP_SLICE) {
                FOR_TYPE(tied_row, out + place * C + c, real_at_const(dlogits, at * Vp + token),
                         real_at_const(x, at * C + c), T, C, Vp, min_i64(CLIP_SLICE, C - c));
            }
            for (int64_t n = i + 1; n < at + T && (int64_t)(k.order[n] >> 32) == token; n++) {
                memcpy(out + (at + (int64_t)(k.order[n] & 0xffffffffu)) * C, out + place * C,
                       (size_t)C * sizeof(float));
            }
            poll_messages(s);
        }
    }
}
static inline void ops_token_rows(Stream *s, float *out, const int32_t *tokens, const float *table,
                                  int64_t rows, int64_t T, int64_t C, int64_t Vp) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t i = 0; i < rows * T; i++) {
        memcpy(out + i * C, table + (i / T * Vp + tokens[i]) * C, (size_t)C * sizeof(float));
    }
}
TYPED double dot_with_floats(const DType type, const Real *a, const float *b, int64_t n) {
    double dot = 0.0;
#pragma omp simd reduction(+ : dot)
    for (int64_t c = 0; c < n; c++) { dot += (double)load_real(type, a, c) * (double)b[c]; }
    return dot;
}
static inline void ops_crossing_norms(Stream *s, double *norms, const double *others, int64_t count,
                                      int64_t stride, const Real *dout, const float *tied,
                                      int64_t rows, int64_t T, int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < rows; b++) {
        double sum = norms[b], product = 0.0, size = 0.0;
        for (int64_t k = 0; k < count; k++) { sum += others[k * stride + b]; }
        for (int64_t t = b * T; tied && t < (b + 1) * T; t++) {
            const Real *e = real_at_const(dout, t * C);
            const float *u = tied + t * C;
            product += FOR_TYPE(dot_with_floats, e, u, C);
            size += sqrt(real_squares(e, C) * chunk_squares(u, C));
        }
        norms[b] = sum + 2.0 * product +
                   0x1p-20 * fmax(0.0, sum + 2.0 * size - 64.0 * (sum + 2.0 * product));
    }
    poll_messages(s);
}

// --- norms, factors, and sums with factors -------------------------------------------------------
static inline void ops_sample_norms(Stream *s, double *norms, const float *in, int64_t rows,
                                    int64_t n) {
    const ClipSpace k = thread_clip_space(s, rows, 0);
    const int64_t piece = max_i64(BLOCK, round_up(ceil_div(n, CLIP_PARTS), 32)),
                  pieces = ceil_div(n, piece);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t i = 0; i < rows * pieces; i++) {
        const int64_t b = i / pieces, part = i % pieces;
        k.parts[b * CLIP_PARTS + part] =
            chunk_squares(in + b * n + part * piece, min_i64(piece, n - part * piece));
        poll_messages(s);
    }
    add_parts(norms, k.parts, rows, pieces);
}
static inline void ops_clip_factors(Stream *s, float *factors, const double *norms,
                                    const float *weights, int64_t rows, float R,
                                    ClipFunction clip) {
    (void)s;
    for (int64_t b = 0; b < rows; b++) {
        const double norm = (double)weights[b] * sqrt(norms[b]),
                     abadi = fmin(1.0, (double)R / (norm + 1e-6)),
                     automatic = (double)R / (norm + 0.01);
        factors[b] = isfinite(norm)
                         ? (float)((double)weights[b] * (clip == CLIP_ABADI ? abadi : automatic))
                         : 0.0f;
    }
}
// Multiplies a(rows*T, A) by the factor of each sample. A sample whose factor is 0 is set to zero
// in a and in b(rows*T, B), whatever it holds.
static inline void scale_samples(Stream *s, float *a, int64_t A, float *b, int64_t B,
                                 const float *factors, int64_t rows, int64_t T) {
    const int64_t n = T * A, m = T * B, blocks = ceil_div(max_i64(n, m), BLOCK);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < rows * blocks; k++) {
        const int64_t sample = k / blocks, begin = k % blocks * BLOCK,
                      end = min_i64(n, begin + BLOCK), end_b = min_i64(m, begin + BLOCK);
        const float factor = factors[sample];
        float *x = a + sample * n;
        if (factor == 0.0f) {
            if (begin < end) { memset(x + begin, 0, (size_t)(end - begin) * sizeof(float)); }
            if (begin < end_b) {
                memset(b + sample * m + begin, 0, (size_t)(end_b - begin) * sizeof(float));
            }
        } else {
#pragma omp simd
            for (int64_t i = begin; i < end; i++) { x[i] *= factor; }
        }
        poll_after_block(s, k);
    }
}
// sums(n) [+]= factor * x(n)
static inline void scale_row(float *sums, bool add, float factor, const float *x, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) { sums[i] = (add ? sums[i] : 0.0f) + factor * x[i]; }
}
// Adds the samples' gradients one after the other to a tile of dweight, each from its own product:
// rows of bf16 that are multiplied by a factor would have to be rounded again.
static inline void add_samples(Stream *s, float *dweight, const Real *dout, const Real *in,
                               const float *factors, int64_t rows, int64_t T, int64_t C, int64_t OC,
                               Tile t, bool accumulate) {
    float *product = gemm_thread_space(s), *sums = dweight + t.row * C + t.col;
    bool add = accumulate;
    for (int64_t b = 0; b < rows; b++) {
        if (factors[b] == 0.0f) { continue; }
        gemm_tile(s, TRANSPOSED, AS_STORED, t.rows, t.cols, T,
                  real_at_const(dout, b * T * OC + t.row), OC, real_at_const(in, b * T * C + t.col),
                  C, false, product, t.cols);
        for (int64_t r = 0; r < t.rows; r++) {
            scale_row(sums + r * C, add, factors[b], product + r * t.cols, t.cols);
        }
        add = true;
    }
    for (int64_t r = 0; r < t.rows && !add; r++) {
        memset(sums + r * C, 0, (size_t)t.cols * sizeof(float));
    }
}
static inline void ops_matmul_backward_weight_samples(Stream *s, float *dweight, Real *dout,
                                                      Real *in, const float *factors, int64_t rows,
                                                      int64_t T, int64_t C, int64_t OC,
                                                      bool accumulate) {
    if (cpu_real == DTYPE_FP32) {
        if (OC <= C) { // the narrow operand is less to scale
            scale_samples(s, (float *)dout, OC, (float *)in, C, factors, rows, T);
        } else {
            scale_samples(s, (float *)in, C, (float *)dout, OC, factors, rows, T);
        }
        ops_matmul_backward_weight(s, dweight, NULL, dout, in, rows * T, C, OC, accumulate);
        return;
    }
    const Tiling grid = tile_output(OC, C, T, s->threads, GEMM_BUFFER);
#pragma omp parallel num_threads(s->threads)
    {
        gemm_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            add_samples(s, dweight, dout, in, factors, rows, T, C, OC, tile_at(&grid, i),
                        accumulate);
        }
    }
}
static inline void ops_accumulate_samples(Stream *s, float *out, const float *in,
                                          const float *factors, int64_t rows, int64_t n,
                                          bool accumulate) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < ceil_div(n, BLOCK); k++) {
        for (int64_t begin = k * BLOCK; begin < min_i64(n, (k + 1) * BLOCK); begin += NEAR) {
            const int64_t end = min_i64(n, begin + NEAR);
            bool more = accumulate;
            for (int64_t b = 0; b < rows; b++) {
                const float factor = factors[b], *x = in + b * n;
                if (factor == 0.0f) { continue; }
                if (more) {
#pragma omp simd
                    for (int64_t i = begin; i < end; i++) { out[i] += factor * x[i]; }
                } else {
#pragma omp simd
                    for (int64_t i = begin; i < end; i++) { out[i] = factor * x[i]; }
                }
                more = true;
            }
            if (!more) { memset(out + begin, 0, (size_t)(end - begin) * sizeof(float)); }
        }
        poll_after_block(s, k);
    }
}

#endif
