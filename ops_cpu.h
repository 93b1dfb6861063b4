// ops_cpu.h: the tensor operations on the CPU, with OpenMP for the team of threads and CBLAS for
// matrix products. The contract is ops.h.
//
// Plan     Matrix products take nearly all the time of a step, so the rest is arranged around them.
//          The output is cut into large tiles. A thread takes a tile, calls a serial sgemm for it,
//          and applies what follows (GELU, softmax) while the tile is in cache. A bias costs
//          nothing: the tile is filled with it first, and sgemm adds to the tile. Attention works
//          in 64 x 64 tiles with our own register-blocked product, because BLAS would spend its
//          time packing.
// Speed    is left to the compiler's vectoriser: `omp simd` loops, and GCC vector types where
//          registers must be blocked. There are no intrinsics, so the same code serves AVX2,
//          AVX-512 and others.
// Threads  Results do not depend on timing: each piece of work is computed alike whichever thread
//          takes it, and the pieces are cut by shape. Element-wise operations use blocks of a fixed
//          size. So the tail that the vectoriser treats separately is always the end of the array,
//          for any thread count.
#ifndef OPS_CPU_H
#define OPS_CPU_H

#include "kernels/update_cpu.h" // optimizers; the contract (ops.h)
#if __has_include(<cblas.h>)
#include <cblas.h> // cblas_sgemm
#else
#include <mkl_cblas.h> // the same from MKL
#endif
#include <omp.h>      // the team of threads
#include <sys/mman.h> // mmap; madvise for huge pages

// -------------------------------------------------------------------------------------------------
// In this file, and only here, Real is float.
static inline float *f32(Real *p) { return (float *)p; }
static inline const float *f32_const(const Real *p) { return (const float *)p; }
static inline Real *real_at(Real *p, int64_t elements) { return (Real *)(f32(p) + elements); }
static inline const Real *real_at_const(const Real *p, int64_t elements) {
    return (const Real *)(f32_const(p) + elements);
}
static inline size_t ops_real_bytes(void) { return sizeof(float); }

// Vectors of the machine's width, for the product whose sums must stay in registers. They are never
// passed by value, because the ABI of that depends on the target.
#ifdef __AVX512F__
enum { LANES = 16, PANEL = 8 }; // 8 x 2 of the 32 registers hold sums
#else
enum { LANES = 8, PANEL = 4 }; // 4 x 2 of the 16 registers
#endif
typedef float Lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#ifndef POLL_WORK // tests make it smaller
// Multiply-adds between two calls of progress: 1 to 2 ms. Longer gaps would leave the network idle.
#define POLL_WORK 100000000
#endif

static inline void poll_after_row(Stream *s, int64_t row) {
    if (row % 1024 == 1023) { poll_messages(s); }
}

// BLAS must not start threads inside our own. blas_serial_here() sets the OpenMP thread count,
// inside a parallel region, for this thread and region only. A region of one thread does not count
// as parallel, so a BLAS that uses OpenMP would otherwise start a team there. blas_serial_once()
// turns off the threads that a BLAS manages itself, if it is OpenBLAS or MKL.
#ifdef __cplusplus
extern "C" {
#endif
extern void openblas_set_num_threads(int) __attribute__((weak));
extern void MKL_Set_Num_Threads(int) __attribute__((weak));
#ifdef __cplusplus
}
#endif
static inline void blas_serial_once(void) {
    static bool warned = false;
    if (warned) { return; }
    warned = true;
    int threads = omp_get_max_threads(); // OpenBLAS changes it below
    if (openblas_set_num_threads) { openblas_set_num_threads(1); }
    if (MKL_Set_Num_Threads) { MKL_Set_Num_Threads(1); }
    omp_set_num_threads(threads);
}
static inline void blas_serial_here(void) { omp_set_num_threads(1); }

// On the CPU every operation returns when it is done, so there is nothing to wait for.
static inline void ops_open(Stream *s, int place, DType real) {
    (void)place;
    (void)real;
    // Also for regions that give no thread count. More threads would run on the cores of other
    // ranks, and wait for them.
    omp_set_num_threads(s->threads);
}
static inline void ops_close(Stream *s) { (void)s; }
static inline void ops_near_cores(char *list, size_t bytes) { snprintf(list, bytes, "%s", ""); }
static inline const char *ops_attention(void) { return "own"; }
static inline const char *ops_products(void) { return "CBLAS"; }
static inline const char *ops_device(double *bf16_flops) {
    *bf16_flops = 0;
    return "";
}
static inline void ops_wait(Stream *s) { (void)s; }
// A CPU's library computes a product in one way only.
static inline void ops_matmul_library(char *text, size_t bytes) { snprintf(text, bytes, "%s", ""); }
static inline void ops_matmuls_seen(Stream *s, MatmulChoices *seen) {
    (void)s;
    seen->count = 0;
}
static inline void ops_matmuls_use(Stream *s, const MatmulChoices *choices) {
    (void)s;
    (void)choices;
}
static inline MatmulGain ops_matmuls_time(Stream *s, const MatmulChoices *wanted,
                                          MatmulChoices *made) {
    const MatmulGain none = {0, 0, 0, 0};
    (void)s;
    (void)wanted;
    made->count = 0;
    return none;
}
// On the CPU a call costs nothing, so nothing is recorded.
static inline bool ops_repeat_begin(Stream *s, const void *key, size_t bytes) {
    (void)s;
    (void)key;
    (void)bytes;
    return true;
}
static inline void ops_repeat_end(Stream *s) { (void)s; }

struct OpsMark {
    double at;
};
static inline OpsMark *ops_mark_make(void) {
    return (OpsMark *)checked_calloc(1, sizeof(OpsMark), "marks");
}
static inline void ops_mark_free(OpsMark *m) { free(m); }
static inline void ops_mark(Stream *s, OpsMark *m) {
    (void)s;
    m->at = seconds_now();
}
static inline double ops_mark_seconds(Stream *s, OpsMark *from, OpsMark *to) {
    (void)s;
    return to->at - from->at;
}
static inline void ops_range_begin(const char *what, const char *of, int number) {
    (void)what;
    (void)of;
    (void)number;
}
static inline void ops_range_end(void) {}
static inline void ops_profiler(bool on) { (void)on; }

// --- memory and precision ------------------------------------------------------------------------
// A large allocation is its own mapping, whose pages are zero. The team touches the pages, so that
// they exist and, on a NUMA machine, are near a thread that uses them. Huge pages are requested for
// whole 2 MiB only, so the resident size is the requested size. A small allocation ends exactly
// where requested, so that sanitizers detect an overrun.
enum { HUGE_PAGE = 2 << 20 };
typedef struct { // stored in front of the returned pointer
    void *whole;
    size_t mapped; // bytes of the mapping; 0 if it came from posix_memalign
} Allocation;
static inline void *ops_alloc(size_t bytes) {
    const size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : 64, mapped = bytes + 64 + align;
    if (mapped < bytes) { return NULL; }
    void *whole = MAP_FAILED;
    if (align == HUGE_PAGE) {
        whole = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    } else if (!posix_memalign(&whole, 64, bytes + 64)) {
        memset(whole, 0, bytes + 64);
    }
    if (whole == MAP_FAILED || !whole) { return NULL; }
    char *p = (char *)whole + 64 + (align - ((uintptr_t)whole + 64) % align) % align;
    Allocation a = {whole, align == HUGE_PAGE ? mapped : 0};
    memcpy(p - sizeof a, &a, sizeof a);
    if (a.mapped) { madvise(p, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE); }
    const int64_t pages = a.mapped ? ceil_div((int64_t)bytes, 4096) : 0;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < pages; i++) { p[i * 4096] = 0; }
    return p;
}
static inline void ops_free(void *p) {
    Allocation a = {NULL, 0};
    if (p) { memcpy(&a, (char *)p - sizeof a, sizeof a); }
    if (a.mapped) {
        munmap(a.whole, a.mapped);
    } else {
        free(a.whole);
    }
}
static inline void *ops_alloc_host(size_t bytes) { return calloc(1, bytes); }
static inline void ops_free_host(void *p) { free(p); }
// On the CPU this is the same memory as ops_alloc()'s.
static inline void *ops_alloc_far(size_t bytes, bool *pinned) {
    *pinned = true;
    return ops_alloc(bytes);
}
static inline void ops_free_far(void *p, bool pinned) {
    (void)pinned;
    ops_free(p);
}
static inline void ops_link_open(Stream *link, const Stream *of) { *link = *of; }
static inline void ops_link_close(Stream *link) { memset(link, 0, sizeof *link); }
// Nothing to do: earlier calls have returned, so their work is done.
static inline void ops_follow(Stream *s, Stream *after) {
    (void)s;
    (void)after;
}
static inline bool ops_memory_apart(void) { return false; }
static inline double ops_memory_available(void) { return (double)INFINITY; }

static inline void ops_copy(Stream *s, void *to, const void *from, size_t bytes) {
    const int64_t block = BLOCK * 4, blocks = ceil_div((int64_t)bytes, block);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < blocks; b++) {
        memcpy((char *)to + b * block, (const char *)from + b * block,
               (size_t)min_i64(block, (int64_t)bytes - b * block));
        poll_after_block(s, b);
    }
}
static inline void ops_zero(Stream *s, void *p, size_t bytes) {
    const int64_t block = BLOCK * 4, blocks = ceil_div((int64_t)bytes, block);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < blocks; b++) {
        memset((char *)p + b * block, 0, (size_t)min_i64(block, (int64_t)bytes - b * block));
        poll_after_block(s, b);
    }
}
static inline void ops_from_host(Stream *s, void *device, const void *host, size_t bytes) {
    ops_copy(s, device, host, bytes);
}
static inline void ops_reals_to_host(Stream *s, float *host, const Real *device, int64_t n) {
    ops_copy(s, host, device, (size_t)n * sizeof(float));
}
static inline void ops_to_host(Stream *s, void *host, const void *device, size_t bytes) {
    ops_copy(s, host, device, bytes);
}
static inline void ops_to_host_later(Stream *s, void *host, const void *device, size_t bytes) {
    ops_copy(s, host, device, bytes);
}

static inline void ops_unpack(Stream *s, Real *out, const void *in, DType dtype, int64_t n) {
    if (dtype == DTYPE_FP32) {
        ops_copy(s, out, in, (size_t)n * sizeof(float));
        return;
    }
    float *y = f32(out);
    const uint16_t *x = (const uint16_t *)in;
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
#pragma omp simd
        for (int64_t i = b * BLOCK; i < min_i64(n, (b + 1) * BLOCK); i++) {
            y[i] = bf16_to_float(x[i]);
        }
        poll_after_block(s, b);
    }
}
static inline void ops_convert_float(Stream *s, void *out, const float *in, DType dtype, int64_t n,
                                     Rounding r) {
    if (dtype == DTYPE_FP32) {
        ops_copy(s, out, in, (size_t)n * sizeof(float));
        return;
    }
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
        round_part((uint16_t *)out, in, b * BLOCK, min_i64(n, (b + 1) * BLOCK), r);
        poll_after_block(s, b);
    }
}
static inline void ops_pack(Stream *s, void *out, const Real *in, DType dtype, int64_t n) {
    ops_convert_float(s, out, f32_const(in), dtype, n, round_to_nearest());
}

// --- scalar functions that the vectoriser can inline ---------------------------------------------
// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2. ln 2 is split into two parts, so r is
// exact to its last bit. A polynomial of degree 7 (coefficients from Moshier's Cephes) gives e^r.
// The error is below 1.5 units in the last place. Below -87.3 the result is 0 (it would be
// denormal); above 88.3 it is e^88.3. NaN stays NaN.
static inline float fast_exp(float x) {
    float t = x > 88.3f ? 88.3f : x;
    t = t < -87.3f ? -87.3f : t;
    float n = rintf(t * 1.44269504f);
    float r = t - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits = ((uint32_t)(int32_t)n + 127u) << 23; // unsigned, since n is arbitrary for a NaN
    float power;
    memcpy(&power, &bits, 4);
    return x < -87.3f ? 0.0f : p * power;
}

// GELU(x) = x/2 (1 + tanh u) = x / (1 + e^-2u), where u = sqrt(2/pi) (x + 0.044715 x^3). This form
// needs no tanh and has no cancellation for x << 0. gelu_sigmoid_power() returns -2u.
static inline float gelu_sigmoid_power(float x) {
    return -1.5957691216f * (x + 0.044715f * x * x * x);
}
static inline float gelu_value(float x) { return x / (1.0f + fast_exp(gelu_sigmoid_power(x))); }
static inline float gelu_slope(float x) {
    float e = fast_exp(gelu_sigmoid_power(x)), sigmoid = 1.0f / (1.0f + e);
    return sigmoid + x * sigmoid * (sigmoid * e) * 1.5957691216f * (1.0f + 0.134145f * x * x);
}

// --- embedding -----------------------------------------------------------------------------------
static inline void ops_embedding_forward(Stream *s, Real *out, const int32_t *tokens,
                                         const Real *wte, const Real *wpe, int64_t rows, int64_t T,
                                         int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < rows * T; n++) {
        float *y = f32(out) + n * C;
        const float *token = f32_const(wte) + tokens[n] * C, *position = f32_const(wpe) + n % T * C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) { y[c] = token[c] + position[c]; }
    }
}

// Each thread has a slice of the channels, and adds the tokens in their order. So threads write to
// different elements, and a repeated token is summed in one order for any thread count.
static inline void embedding_scatter(Stream *s, float *dwte, const float *dout,
                                     const int32_t *tokens, const float *factors, int64_t N,
                                     int64_t T, int64_t C) {
    const int64_t lines = ceil_div(C, 16); // slices are whole cache lines
#pragma omp parallel num_threads(s->threads)
    {
        int64_t begin = 16 * part_begin(lines, omp_get_num_threads(), omp_get_thread_num());
        int64_t end =
            min_i64(C, 16 * part_begin(lines, omp_get_num_threads(), omp_get_thread_num() + 1));
        for (int64_t n = 0; n < N; n++) {
            float *to = dwte + tokens[n] * C;
            const float *from = dout + n * C, factor = factors ? factors[n / T] : 1.0f;
            if (factor == 0.0f) { continue; }
#pragma omp simd
            for (int64_t c = begin; c < end; c++) { to[c] += factor * from[c]; }
        }
    }
}
static inline void ops_embedding_backward(Stream *s, float *dwte, float *dwpe, const Real *dout,
                                          const int32_t *tokens, const float *factors, int64_t rows,
                                          int64_t T, int64_t C, int64_t Vp, int64_t maxT,
                                          bool accumulate_wte, bool accumulate_wpe) {
    if (dwte && !accumulate_wte) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
    if (dwte) { embedding_scatter(s, dwte, f32_const(dout), tokens, factors, rows * T, T, C); }
    if (!dwpe) { return; }
    if (!accumulate_wpe) { ops_zero(s, dwpe, (size_t)(maxT * C) * sizeof(float)); }
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t t = 0; t < T; t++) {
        float *to = dwpe + t * C;
        for (int64_t b = 0; b < rows; b++) {
            const float *from = f32_const(dout) + (b * T + t) * C,
                        factor = factors ? factors[b] : 1.0f;
            if (factor == 0.0f) { continue; }
#pragma omp simd
            for (int64_t c = 0; c < C; c++) { to[c] += factor * from[c]; }
        }
    }
}

// --- layernorm: a row fits the L1 cache, so its passes cost one pass over memory -----------------
static inline void layernorm_row(float *out, float *mean, float *rstd, const float *x,
                                 const float *weight, const float *bias, int64_t C) {
    float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < C; c++) { sum += x[c]; }
    const float m = sum / (float)C;
// The mean is subtracted first, which avoids cancellation.
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < C; c++) { squares += (x[c] - m) * (x[c] - m); }
    const float r = 1.0f / sqrtf(squares / (float)C + 1e-5f);
#pragma omp simd
    for (int64_t c = 0; c < C; c++) { out[c] = (x[c] - m) * r * weight[c] + bias[c]; }
    *mean = m;
    *rstd = r;
}
static inline void ops_layernorm_forward(Stream *s, Real *out, float *mean, float *rstd, Real *sum,
                                         const Real *a, const Real *b, const Real *weight,
                                         const Real *bias, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < N; n++) {
        const float *x = f32_const(a) + n * C;
        if (b) {
            float *total = f32(sum) + n * C;
            const float *y = f32_const(b) + n * C;
#pragma omp simd
            for (int64_t c = 0; c < C; c++) { total[c] = x[c] + y[c]; }
            x = total;
        }
        layernorm_row(f32(out) + n * C, mean + n, rstd + n, x, f32_const(weight), f32_const(bias),
                      C);
        poll_after_row(s, n);
    }
}

// With h = (x - mean) rstd and g = dout * weight: dx = rstd (g - average(g) - h average(g h)).
static inline void ops_layernorm_backward_input(Stream *s, Real *din, const Real *dout,
                                                const Real *in, const Real *weight,
                                                const float *mean, const float *rstd, int64_t N,
                                                int64_t C) {
    const float *w = f32_const(weight);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t n = 0; n < N; n++) {
        float *dx = f32(din) + n * C;
        const float *dy = f32_const(dout) + n * C, *x = f32_const(in) + n * C;
        const float m = mean[n], r = rstd[n];
        float g_sum = 0.0f, gh_sum = 0.0f;
#pragma omp simd reduction(+ : g_sum, gh_sum)
        for (int64_t c = 0; c < C; c++) {
            float g = dy[c] * w[c];
            g_sum += g;
            gh_sum += g * ((x[c] - m) * r);
        }
        const float g_mean = g_sum / (float)C, gh_mean = gh_sum / (float)C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) {
            dx[c] += r * (dy[c] * w[c] - g_mean - (x[c] - m) * r * gh_mean);
        }
        poll_after_row(s, n);
    }
}

// Each thread has a slice of the channels, and adds the rows in their order.
static inline void ops_layernorm_backward_weight(Stream *s, float *dweight, float *dbias,
                                                 const Real *dout, const Real *in,
                                                 const float *mean, const float *rstd, int64_t N,
                                                 int64_t C, bool accumulate) {
    const int64_t lines = ceil_div(C, 16);
#pragma omp parallel num_threads(s->threads)
    {
        int64_t begin = 16 * part_begin(lines, omp_get_num_threads(), omp_get_thread_num());
        int64_t end =
            min_i64(C, 16 * part_begin(lines, omp_get_num_threads(), omp_get_thread_num() + 1));
        for (int64_t c = begin; c < end && !accumulate; c++) { dweight[c] = dbias[c] = 0.0f; }
        for (int64_t n = 0; n < N; n++) {
            const float *dy = f32_const(dout) + n * C, *x = f32_const(in) + n * C;
            const float m = mean[n], r = rstd[n];
#pragma omp simd
            for (int64_t c = begin; c < end; c++) {
                dweight[c] += dy[c] * ((x[c] - m) * r);
                dbias[c] += dy[c];
            }
            poll_after_row(s, n);
        }
    }
}

// --- matmul: tiles of the output -----------------------------------------------------------------
typedef struct {
    int64_t rows, cols, tile_rows, tile_cols, across, tiles;
} Tiling;
typedef struct {
    int64_t row, col, rows, cols;
} Tile;

// Returns the grid of tiles that takes the least time by a model that counts multiply-adds. sgemm
// packs its operands again for each tile. Packing an element costs about 40 multiply-adds for the
// left operand (tile_rows x depth) and about 24 for the right one (tile_cols x depth), as measured.
static inline Tiling tile_output(int64_t rows, int64_t cols, int64_t depth, int threads) {
    Tiling best = {rows, cols, rows, cols, 1, 0};
    double best_cost = 1e300;
    for (int64_t down = 1; down <= 64 && rows && cols && (down == 1 || rows / down >= 32); down++) {
        const int64_t r = round_up(ceil_div(rows, down), 16);
        for (int64_t across = 1; across <= 64 && (across == 1 || cols / across >= 32); across++) {
            const int64_t c = round_up(ceil_div(cols, across), 16),
                          tiles = ceil_div(rows, r) * ceil_div(cols, c);
            // late > 1: sgemm_tile() cannot call progress often enough
            const double tile = (double)(r * c + 40 * r + 24 * c),
                         late = tile * 256.0 / (double)POLL_WORK;
            const double cost =
                tile * (double)ceil_div(tiles, threads) * (depth >= 256 && late > 1.0 ? late : 1.0);
            if (cost < best_cost) {
                const Tiling t = {rows, cols, r, c, ceil_div(cols, c), tiles};
                best_cost = cost;
                best = t;
            }
        }
    }
    return best;
}
static inline Tile tile_at(const Tiling *g, int64_t i) {
    Tile t;
    t.row = i / g->across * g->tile_rows;
    t.col = i % g->across * g->tile_cols;
    t.rows = min_i64(g->tile_rows, g->rows - t.row);
    t.cols = min_i64(g->tile_cols, g->cols - t.col);
    return t;
}

// c(m, n) = beta c + a b. The product is cut along the inner dimension, so that messages are polled
// often enough. sgemm itself works in slices of 200 to 400, so slices of at least 256 cost nothing
// (measured).
static inline void sgemm_tile(Stream *s, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int64_t m,
                              int64_t n, int64_t k, const float *a, int64_t lda, const float *b,
                              int64_t ldb, float beta, float *c, int64_t ldc) {
    const int64_t slices = max_i64(1, min_i64(ceil_div(m * n * k, POLL_WORK), k / 256)),
                  slice = round_up(ceil_div(k, slices), 32);
    for (int64_t i = 0; i < k; i += slice) {
        cblas_sgemm(CblasRowMajor, ta, tb, (int)m, (int)n, (int)min_i64(slice, k - i), 1.0f,
                    a + (ta == CblasTrans ? i * lda : i), (int)lda,
                    b + (tb == CblasTrans ? i : i * ldb), (int)ldb, i ? 1.0f : beta, c, (int)ldc);
        poll_messages(s);
    }
}

static inline void ops_matmul_forward(Stream *s, Real *out, Real *gelu, const Real *in,
                                      const Real *weight, const Real *bias, int64_t N, int64_t C,
                                      int64_t OC) {
    const Tiling grid = tile_output(N, OC, C, s->threads);
    blas_serial_once();
#pragma omp parallel num_threads(s->threads)
    {
        blas_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            float *y = f32(out) + t.row * OC + t.col;
            for (int64_t n = 0; n < t.rows && bias; n++) {
                memcpy(y + n * OC, f32_const(bias) + t.col, (size_t)t.cols * sizeof(float));
            }
            sgemm_tile(s, CblasNoTrans, CblasTrans, t.rows, t.cols, C, f32_const(in) + t.row * C, C,
                       f32_const(weight) + t.col * C, C, bias ? 1.0f : 0.0f, y, OC);
            for (int64_t n = 0; n < t.rows && gelu; n++) {
                const float *x = y + n * OC;
                float *g = f32(gelu) + (t.row + n) * OC + t.col;
#pragma omp simd
                for (int64_t c = 0; c < t.cols; c++) { g[c] = gelu_value(x[c]); }
            }
        }
    }
}

static inline void ops_matmul_backward_input(Stream *s, Real *din, const Real *dout,
                                             const Real *weight, const Real *pre_gelu, int64_t N,
                                             int64_t C, int64_t OC) {
    const Tiling grid = tile_output(N, C, OC, s->threads);
    blas_serial_once();
#pragma omp parallel num_threads(s->threads)
    {
        blas_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            float *dx = f32(din) + t.row * C + t.col;
            sgemm_tile(s, CblasNoTrans, CblasNoTrans, t.rows, t.cols, OC,
                       f32_const(dout) + t.row * OC, OC, f32_const(weight) + t.col, C, 0.0f, dx, C);
            for (int64_t n = 0; n < t.rows && pre_gelu; n++) {
                float *d = dx + n * C;
                const float *x = f32_const(pre_gelu) + (t.row + n) * C + t.col;
#pragma omp simd
                for (int64_t c = 0; c < t.cols; c++) { d[c] *= gelu_slope(x[c]); }
            }
        }
    }
}

// sums(cols) [+]= column sums of x(rows, cols), whose rows are `stride` apart. Rows are added in
// order, four at a time.
static inline void column_sums(float *sums, const float *x, int64_t rows, int64_t cols,
                               int64_t stride, bool accumulate) {
    for (int64_t c = 0; c < cols && !accumulate; c++) { sums[c] = 0.0f; }
    int64_t n = 0;
    for (; n + 4 <= rows; n += 4) {
        const float *a = x + n * stride, *b = a + stride, *c = b + stride, *d = c + stride;
#pragma omp simd
        for (int64_t i = 0; i < cols; i++) { sums[i] += (a[i] + b[i]) + (c[i] + d[i]); }
    }
    for (; n < rows; n++) {
#pragma omp simd
        for (int64_t i = 0; i < cols; i++) { sums[i] += x[n * stride + i]; }
    }
}
static inline void ops_matmul_backward_weight(Stream *s, float *dweight, float *dbias,
                                              const Real *dout, const Real *in, int64_t N,
                                              int64_t C, int64_t OC, bool accumulate) {
    if (N == 0) { // an empty sum
        if (!accumulate) { ops_zero(s, dweight, (size_t)(OC * C) * sizeof(float)); }
        if (!accumulate && dbias) { ops_zero(s, dbias, (size_t)OC * sizeof(float)); }
        return;
    }
    const Tiling grid = tile_output(OC, C, N, s->threads);
    blas_serial_once();
#pragma omp parallel num_threads(s->threads)
    {
        blas_serial_here();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            const float *dy = f32_const(dout) + t.row;
            // This also loads dout into the cache for sgemm.
            if (dbias && t.col == 0) { column_sums(dbias + t.row, dy, N, t.rows, OC, accumulate); }
            sgemm_tile(s, CblasTrans, CblasNoTrans, t.rows, t.cols, N, dy, OC,
                       f32_const(in) + t.col, C, accumulate ? 1.0f : 0.0f,
                       dweight + t.row * C + t.col, C);
        }
    }
}

static inline void ops_residual(Stream *s, Real *out, const Real *a, const Real *b, int64_t n) {
    float *y = f32(out);
    const float *x1 = f32_const(a), *x2 = f32_const(b);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t k = 0; k < ceil_div(n, BLOCK); k++) {
#pragma omp simd
        for (int64_t i = k * BLOCK; i < min_i64(n, (k + 1) * BLOCK); i++) { y[i] = x1[i] + x2[i]; }
        poll_after_block(s, k);
    }
}

// --- attention: small products on packed tiles ---------------------------------------------------
// Queries and keys in a tile. A tile of scores (16 KiB) stays in the L1 cache.
enum { TILE = 64 };

// The part of a product that counts if the tile is on the diagonal, where a query sees only keys up
// to its own position. A tile of scores has one row per key. So the softmax of 64 queries works in
// whole vectors down the columns, and needs no sums across a vector.
typedef enum {
    WHOLE,
    OUT_ABOVE, // c is (keys, queries): columns from the row's number on
    A_ABOVE,   // a is (keys, queries): inner index from the row's number on
    A_BELOW    // a is (queries, keys): inner index up to the row's number
} Part;

// c(PANEL, vectors x LANES) [+]= a(PANEL, inner) b(inner, vectors x LANES), with all sums in
// registers, over inner indices from .. to - 1. Callers pass a constant for `vectors`. Element (i,
// k) of a is at a[i * a_row + k * a_inner].
static inline __attribute__((always_inline)) void
multiply_panel(const int vectors, float *c, int64_t ldc, const float *a, int64_t a_row,
               int64_t a_inner, const float *b, int64_t ldb, int64_t from, int64_t to, bool add) {
    Lanes sum[PANEL][2];
#pragma GCC unroll 8
    for (int i = 0; i < PANEL; i++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) { sum[i][v] = (Lanes){0}; }
    }
    for (int64_t k = from; k < to; k++) {
        const Lanes *bk = (const Lanes *)(b + k * ldb);
        const float *ak = a + k * a_inner;
#pragma GCC unroll 8
        for (int i = 0; i < PANEL; i++) {
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) { sum[i][v] += ak[i * a_row] * bk[v]; }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < PANEL; i++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            Lanes *to_c = (Lanes *)(c + i * ldc) + v;
            if (add) { sum[i][v] += *to_c; }
            *to_c = sum[i][v];
        }
    }
}
// c(m, n) [+]= a(m, inner) b(inner, n). n is a multiple of LANES. m is rounded up to whole panels,
// so the operands and c must be padded; values in the padding stay in the padding.
static inline void multiply_tile(float *c, int64_t ldc, const float *a, int64_t a_row,
                                 int64_t a_inner, const float *b, int64_t ldb, int64_t m, int64_t n,
                                 int64_t inner, Part part, bool add) {
    for (int64_t i = 0; i < m; i += PANEL) {
        const int64_t from = part == A_ABOVE ? i : 0,
                      to = part == A_BELOW ? min_i64(inner, i + PANEL) : inner;
        const float *ai = a + i * a_row;
        float *ci = c + i * ldc;
        int64_t j = part == OUT_ABOVE ? i / LANES * LANES : 0;
        for (; j + 2 * LANES <= n; j += 2 * LANES) {
            multiply_panel(2, ci + j, ldc, ai, a_row, a_inner, b + j, ldb, from, to, add);
        }
        for (; j < n; j += LANES) {
            multiply_panel(1, ci + j, ldc, ai, a_row, a_inner, b + j, ldb, from, to, add);
        }
    }
}

// A thread's workspace for one head. Tp is T rounded up to TILE; Dp is D = C/NH rounded up to
// LANES. The padding is zero.
typedef struct {
    float *q, *k, *v, *dout, *dq; // (Tp, Dp); q is scaled by 1/sqrt(D); forward uses only k and v
    float *q_t, *dout_t;          // (D, Tp); forward uses a tile of q_t, (D, TILE)
    float *out, *dk, *dv;         // (TILE, Dp)
    float *scores, *dscores;      // (TILE, TILE): (keys, queries)
    float *top, *sum, *factor;    // (TILE)
    float *delta, *lse;           // (Tp)
} HeadSpace;
static inline float *take_floats(float **at, int64_t n) {
    float *p = *at;
    *at += round_up(n, 16);
    return p;
}
static inline HeadSpace head_space(float *at, int64_t T, int64_t D, int64_t *floats) {
    const int64_t Tp = round_up(T, TILE), Dp = round_up(D, LANES);
    float *begin = at;
    HeadSpace h;
    h.q = take_floats(&at, Tp * Dp);
    h.k = take_floats(&at, Tp * Dp);
    h.v = take_floats(&at, Tp * Dp);
    h.dout = take_floats(&at, Tp * Dp);
    h.dq = take_floats(&at, Tp * Dp);
    h.q_t = take_floats(&at, D * Tp);
    h.dout_t = take_floats(&at, D * Tp);
    h.out = take_floats(&at, TILE * Dp);
    h.dk = take_floats(&at, TILE * Dp);
    h.dv = take_floats(&at, TILE * Dp);
    h.scores = take_floats(&at, TILE * TILE);
    h.dscores = take_floats(&at, TILE * TILE);
    h.top = take_floats(&at, TILE);
    h.sum = take_floats(&at, TILE);
    h.factor = take_floats(&at, TILE);
    h.delta = take_floats(&at, Tp);
    h.lse = take_floats(&at, Tp);
    *floats = at - begin;
    return h;
}
static inline HeadSpace thread_head_space(Stream *s, int64_t T, int64_t D) {
    int64_t floats;
    head_space((float *)s->workspace, T, D, &floats);
    assert(s->workspace_bytes >= (size_t)(floats * s->threads) * sizeof(float));
    return head_space((float *)s->workspace + floats * omp_get_thread_num(), T, D, &floats);
}

// to(n, Dp) = scale * from(n, D), where rows of `from` are `stride` apart
static inline void pack_rows(float *to, const float *from, int64_t n, int64_t D, int64_t stride,
                             float scale) {
    const int64_t Dp = round_up(D, LANES);
    for (int64_t t = 0; t < n; t++) {
        // Each row is on another page, so the hardware does not prefetch them.
        for (int64_t d = 0; d < D && t + 8 < n; d += 16) {
            __builtin_prefetch(from + (t + 8) * stride + d);
        }
#pragma omp simd
        for (int64_t d = 0; d < D; d++) { to[t * Dp + d] = from[t * stride + d] * scale; }
        for (int64_t d = D; d < Dp; d++) { to[t * Dp + d] = 0.0f; }
    }
}
// to(D, Tp) = scale * the transpose of from(n, D)
static inline void pack_columns(float *to, const float *from, int64_t n, int64_t D, int64_t stride,
                                float scale) {
    const int64_t Tp = round_up(n, TILE);
    for (int64_t t0 = 0; t0 < Tp; t0 += 16) {
        const int64_t end = min_i64(n, t0 + 16);
        for (int64_t d = 0; d < D; d++) {
            for (int64_t t = t0; t < end; t++) { to[d * Tp + t] = from[t * stride + d] * scale; }
            for (int64_t t = max_i64(end, t0); t < t0 + 16; t++) { to[d * Tp + t] = 0.0f; }
        }
    }
}

// Returns the first column of row `key` of a score tile that is computed, rounded down to whole
// vectors. hide_future() masks the columns before `key` itself.
static inline int64_t first_seen(int64_t key, bool diagonal) {
    return diagonal ? key / LANES * LANES : 0;
}
static inline void hide_future(float *score, int64_t key, bool diagonal) {
    for (int64_t c = first_seen(key, diagonal); c < key && diagonal; c++) { score[c] = -1e30f; }
}

// Adds the scores of n keys to the running softmax of 64 queries. Scores become e^(score - top),
// and factor is the factor by which earlier sums shrink.
static inline void softmax_tile(HeadSpace *h, int64_t n, bool diagonal) {
    float top[TILE];
    memcpy(top, h->top, sizeof top);
    for (int64_t k = 0; k < n; k++) {
        float *score = h->scores + k * TILE;
        hide_future(score, k, diagonal);
        for (int64_t c = first_seen(k, diagonal); c < TILE; c += LANES) {
#pragma omp simd
            for (int64_t l = c; l < c + LANES; l++) {
                top[l] = score[l] > top[l] ? score[l] : top[l];
            }
        }
    }
#pragma omp simd
    for (int64_t l = 0; l < TILE; l++) {
        h->factor[l] = fast_exp(h->top[l] - top[l]);
        h->sum[l] *= h->factor[l];
        h->top[l] = top[l];
    }
    for (int64_t k = 0; k < n; k++) {
        float *score = h->scores + k * TILE;
        for (int64_t c = first_seen(k, diagonal); c < TILE; c += LANES) {
#pragma omp simd
            for (int64_t l = c; l < c + LANES; l++) {
                score[l] = fast_exp(score[l] - top[l]);
                h->sum[l] += score[l];
            }
        }
    }
}

// Computes one tile of queries with all keys up to it. h->k and h->v hold the whole head. Queries
// beyond T are zero and are computed too.
static inline void attention_query_tile(HeadSpace *h, float *out, float *lse, const float *q,
                                        int64_t q0, int64_t T, int64_t C, int64_t D) {
    const int64_t Dp = round_up(D, LANES), m = min_i64(TILE, T - q0);
    pack_columns(h->q_t, q + q0 * 3 * C, m, D, 3 * C, 1.0f / sqrtf((float)D));
    for (int64_t i = 0; i < TILE; i++) {
        h->top[i] = -1e30f;
        h->sum[i] = 0.0f;
    }
    for (int64_t k0 = 0; k0 <= q0; k0 += TILE) {
        const bool diagonal = k0 == q0;
        const int64_t n = min_i64(TILE, T - k0);
        multiply_tile(h->scores, TILE, h->k + k0 * Dp, Dp, 1, h->q_t, TILE, n, TILE, D,
                      diagonal ? OUT_ABOVE : WHOLE, false);
        softmax_tile(h, n, diagonal);
        for (int64_t i = 0; i < m && k0; i++) {
            float *o = h->out + i * Dp;
#pragma omp simd
            for (int64_t d = 0; d < Dp; d++) { o[d] *= h->factor[i]; }
        }
        multiply_tile(h->out, Dp, h->scores, 1, TILE, h->v + k0 * Dp, Dp, m, Dp, n,
                      diagonal ? A_BELOW : WHOLE, k0 > 0);
    }
    for (int64_t i = 0; i < m; i++) {
        const float share = 1.0f / h->sum[i];
        for (int64_t d = 0; d < D; d++) { out[(q0 + i) * C + d] = h->out[i * Dp + d] * share; }
        lse[q0 + i] = h->top[i] + logf(h->sum[i]);
    }
}

// A piece of work is one head and every `groups`-th tile of its queries, so that a few heads can
// still occupy many threads.
static inline void ops_attention_forward(Stream *s, Real *out, float *lse, const Real *qkv,
                                         int64_t rows, int64_t T, int64_t C, int64_t NH) {
    const int64_t D = C / NH, heads = rows * NH, tiles = ceil_div(T, TILE);
    if (heads * T == 0) { return; }
    const int64_t groups = min_i64(tiles, ceil_div(4 * s->threads, heads));
#pragma omp parallel num_threads(s->threads)
    {
        HeadSpace h = thread_head_space(s, T, D);
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < heads * groups; piece++) {
            const int64_t head = piece / groups, b = head / NH, first = (head % NH) * D;
            const float *q = f32_const(qkv) + b * T * 3 * C + first;
            pack_rows(h.k, q + C, T, D, 3 * C, 1.0f);
            pack_rows(h.v, q + 2 * C, T, D, 3 * C, 1.0f);
            for (int64_t i = piece % groups; i < tiles; i += groups) {
                attention_query_tile(&h, f32(out) + b * T * C + first, lse + head * T, q, i * TILE,
                                     T, C, D);
                poll_messages(s);
            }
        }
    }
}

// Computes one tile of keys with one tile of queries: p = e^(q k - lse), dp = dout v, ds = p (dp -
// delta), each (keys, queries). Then dv += p dout, dk += ds q (q is scaled already), dq += ds^T k
// (scaled at the end).
static inline void attention_backward_tile(HeadSpace *h, int64_t q0, int64_t k0, int64_t T,
                                           int64_t D) {
    const int64_t Tp = round_up(T, TILE), Dp = round_up(D, LANES), m = min_i64(TILE, T - q0),
                  n = min_i64(TILE, T - k0);
    const bool diagonal = k0 == q0;
    const float *lse = h->lse + q0, *delta = h->delta + q0;
    multiply_tile(h->scores, TILE, h->k + k0 * Dp, Dp, 1, h->q_t + q0, Tp, n, TILE, D,
                  diagonal ? OUT_ABOVE : WHOLE, false);
    multiply_tile(h->dscores, TILE, h->v + k0 * Dp, Dp, 1, h->dout_t + q0, Tp, n, TILE, D,
                  diagonal ? OUT_ABOVE : WHOLE, false);
    for (int64_t k = 0; k < n; k++) {
        float *p = h->scores + k * TILE, *ds = h->dscores + k * TILE;
        hide_future(p, k, diagonal);
        for (int64_t c = first_seen(k, diagonal); c < TILE; c += LANES) {
#pragma omp simd
            for (int64_t l = c; l < c + LANES; l++) {
                p[l] = fast_exp(p[l] - lse[l]);
                ds[l] = p[l] * (ds[l] - delta[l]);
            }
        }
    }
    multiply_tile(h->dv, Dp, h->scores, TILE, 1, h->dout + q0 * Dp, Dp, n, Dp, m,
                  diagonal ? A_ABOVE : WHOLE, true);
    multiply_tile(h->dk, Dp, h->dscores, TILE, 1, h->q + q0 * Dp, Dp, n, Dp, m,
                  diagonal ? A_ABOVE : WHOLE, true);
    multiply_tile(h->dq + q0 * Dp, Dp, h->dscores, 1, TILE, h->k + k0 * Dp, Dp, m, Dp, n,
                  diagonal ? A_BELOW : WHOLE, true);
}

static inline void attention_backward_head(Stream *s, HeadSpace *h, float *dq, const float *dout,
                                           const float *q, const float *out, const float *lse,
                                           int64_t T, int64_t C, int64_t D) {
    const int64_t Dp = round_up(D, LANES);
    const float scale = 1.0f / sqrtf((float)D);
    pack_rows(h->q, q, T, D, 3 * C, scale);
    pack_rows(h->k, q + C, T, D, 3 * C, 1.0f);
    pack_rows(h->v, q + 2 * C, T, D, 3 * C, 1.0f);
    pack_rows(h->dout, dout, T, D, C, 1.0f);
    pack_columns(h->q_t, q, T, D, 3 * C, scale);
    pack_columns(h->dout_t, dout, T, D, C, 1.0f);
    memset(h->delta, 0, (size_t)round_up(T, TILE) * sizeof(float));
    memset(h->lse, 0, (size_t)round_up(T, TILE) * sizeof(float));
    memcpy(h->lse, lse, (size_t)T * sizeof(float));
    memset(h->dq, 0, (size_t)(T * Dp) * sizeof(float));
    for (int64_t t = 0; t < T; t++) { // delta = sum(p dp) of a row, which equals dout . out
        float delta = 0.0f;
#pragma omp simd reduction(+ : delta)
        for (int64_t d = 0; d < D; d++) { delta += dout[t * C + d] * out[t * C + d]; }
        h->delta[t] = delta;
    }
    for (int64_t k0 = 0; k0 < T; k0 += TILE) {
        memset(h->dk, 0, (size_t)(TILE * Dp) * sizeof(float));
        memset(h->dv, 0, (size_t)(TILE * Dp) * sizeof(float));
        for (int64_t q0 = k0; q0 < T; q0 += TILE) { attention_backward_tile(h, q0, k0, T, D); }
        poll_messages(s);
        for (int64_t i = 0; i < min_i64(TILE, T - k0); i++) {
            float *dk = dq + (k0 + i) * 3 * C + C;
            memcpy(dk, h->dk + i * Dp, (size_t)D * sizeof(float));
            memcpy(dk + C, h->dv + i * Dp, (size_t)D * sizeof(float));
        }
    }
    for (int64_t t = 0; t < T; t++) {
        for (int64_t d = 0; d < D; d++) { dq[t * 3 * C + d] = h->dq[t * Dp + d] * scale; }
    }
}

static inline void ops_attention_backward(Stream *s, Real *dqkv, const Real *dout, const Real *qkv,
                                          const Real *out, const float *lse, int64_t rows,
                                          int64_t T, int64_t C, int64_t NH) {
    const int64_t D = C / NH, heads = rows * NH;
    if (heads * T == 0) { return; }
#pragma omp parallel num_threads(s->threads)
    {
        HeadSpace h = thread_head_space(s, T, D);
#pragma omp for schedule(dynamic, 1)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t b = head / NH, at = b * T * C + (head % NH) * D,
                          at_qkv = b * T * 3 * C + (head % NH) * D;
            attention_backward_head(s, &h, f32(dqkv) + at_qkv, f32_const(dout) + at,
                                    f32_const(qkv) + at_qkv, f32_const(out) + at, lse + head * T, T,
                                    C, D);
        }
    }
}

// --- classifier ----------------------------------------------------------------------------------
// A chunk of rows keeps all its logits, since the softmax needs the whole row before any gradient.
// The logits are stored as tiles of the vocabulary, each (R, width) and contiguous, or in whole
// rows if the caller wants dlogits.
// First sweep   Computes the logits of a tile, and at once e^(logit - the row's maximum here).
// Between       Computes the log-sum-exp of each row from its tiles.
// Second sweep  Turns a tile into dlogits with one multiplication. While the tile is in cache, it
//               serves dwte (its own rows) and dx (a partial sum per thread).
enum {
    // Rows of a chunk. Each chunk reads and writes dwte once, and holds rows x V logits.
    CLASSIFIER_ROWS = 512,
    CLASSIFIER_COLS = 2048 // columns of a tile, at most
};
typedef struct {
    // A thread computes contiguous tiles, the same ones in both sweeps.
    int64_t R, C, V, width, tiles, tiles_a_thread;
    int64_t first, each, Vp; // first: the chunk's first row; each, Vp: see ops.h
    // (tiles, R, width), or the caller's (R, Vp)
    float *logits;
    // distance from a row of a tile to the next row, and from a tile to the next tile
    int64_t row, next;
    float *maximum, *sum; // (tiles, R)
    float *target;        // (R) logit of the target
    double *lse;          // (R)
    float *dx;            // (threads, R, C)
} Classifier;
// Divides the workspace. most: maximum number of rows in a chunk; logits: the workspace also holds
// logits.
static inline Classifier classifier_space(float *at, int64_t N, int64_t C, int64_t V, int threads,
                                          int64_t most, bool logits, int64_t *floats) {
    float *begin = at;
    Classifier k;
    k.C = C;
    k.V = V;
    k.first = 0;
    k.each = N;
    k.Vp = V;
    k.R = ceil_div(N, max_i64(1, ceil_div(N, most)));
    k.tiles_a_thread = ceil_div(V, (int64_t)threads * CLASSIFIER_COLS);
    k.tiles = k.tiles_a_thread * threads;
    k.width = round_up(ceil_div(V, k.tiles), 16);
    k.logits = logits ? take_floats(&at, k.tiles * k.R * k.width) : NULL;
    k.row = k.width;
    k.next = k.R * k.width;
    k.maximum = take_floats(&at, k.tiles * k.R);
    k.sum = take_floats(&at, k.tiles * k.R);
    k.target = take_floats(&at, k.R);
    k.lse = (double *)(void *)take_floats(&at, 2 * k.R);
    k.dx = take_floats(&at, threads * k.R * C);
    *floats = at - begin;
    return k;
}
static inline int64_t classifier_width(const Classifier *k, int64_t tile) {
    return min_i64(k->width, k->V - tile * k->width);
}
static inline float *classifier_logits(const Classifier *k, int64_t tile, int64_t i) {
    return k->logits + tile * k->next + i * k->row;
}

// First sweep of one tile: logits(rows, w) = x wte_tile^T, then e^(logit - maximum).
static inline void classifier_tile_forward(Stream *s, const Classifier *k, int64_t tile,
                                           int64_t rows, const float *x, const float *wte,
                                           const int32_t *targets) {
    const int64_t v0 = tile * k->width, w = classifier_width(k, tile);
    if (w <= 0) { return; }
    sgemm_tile(s, CblasNoTrans, CblasTrans, rows, w, k->C, x, k->C, wte + v0 * k->C, k->C, 0.0f,
               classifier_logits(k, tile, 0), k->row);
    for (int64_t i = 0; i < rows; i++) {
        float *l = classifier_logits(k, tile, i), top = l[0], sum = 0.0f;
        if (targets[i] >= v0 && targets[i] < v0 + w) { k->target[i] = l[targets[i] - v0]; }
#pragma omp simd reduction(max : top)
        for (int64_t c = 0; c < w; c++) { top = l[c] > top ? l[c] : top; }
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < w; c++) {
            l[c] = fast_exp(l[c] - top);
            sum += l[c];
        }
        k->maximum[tile * k->R + i] = top;
        k->sum[tile * k->R + i] = sum;
    }
}

// Computes the log-sum-exp of row i, and returns its loss.
static inline float classifier_row_loss(const Classifier *k, int64_t i, int32_t target) {
    double top = -INFINITY, sum = 0.0;
    int64_t t = 0;
    for (; t < k->tiles && classifier_width(k, t) > 0; t++) {
        top = fmax(top, (double)k->maximum[t * k->R + i]);
    }
    do { // at least one tile exists
        t--;
        sum += (double)k->sum[t * k->R + i] * exp((double)k->maximum[t * k->R + i] - top);
    } while (t > 0);
    k->lse[i] = top + log(sum);
    return target < 0 ? 0.0f : (float)(k->lse[i] - (double)k->target[i]);
}

// Second sweep of one tile: dlogits = scale (softmax - one at the target); 0 in masked rows.
static inline void classifier_tile_dlogits(const Classifier *k, int64_t tile, int64_t rows,
                                           const int32_t *targets, float scale) {
    const int64_t v0 = tile * k->width, w = classifier_width(k, tile);
    for (int64_t i = 0; i < rows; i++) {
        float *l = classifier_logits(k, tile, i);
        if (targets[i] < 0) {
            memset(l, 0, (size_t)w * sizeof(float));
            continue;
        }
        const float factor = scale * (float)exp((double)k->maximum[tile * k->R + i] - k->lse[i]);
#pragma omp simd
        for (int64_t c = 0; c < w; c++) { l[c] *= factor; }
        if (targets[i] >= v0 && targets[i] < v0 + w) { l[targets[i] - v0] -= scale; }
    }
}
// Computes a tile's rows of dwte. Rows of the chunk that belong to different samples (`each` rows)
// go to different dwte.
static inline void classifier_tile_dwte(Stream *s, const Classifier *k, int64_t tile, int64_t rows,
                                        float *dwte, const float *x, bool accumulate) {
    for (int64_t i = 0, next; i < rows; i = next) {
        const int64_t sample = (k->first + i) / k->each;
        next = min_i64(rows, (sample + 1) * k->each - k->first);
        sgemm_tile(s, CblasTrans, CblasNoTrans, classifier_width(k, tile), k->C, next - i,
                   classifier_logits(k, tile, i), k->row, x + i * k->C, k->C,
                   accumulate || (k->first + i) % k->each ? 1.0f : 0.0f,
                   dwte + (sample * k->Vp + tile * k->width) * k->C, k->C);
    }
}
static inline void classifier_tile_backward(Stream *s, const Classifier *k, int64_t tile,
                                            int64_t rows, float *dx, bool first, float *dwte,
                                            const float *x, const float *wte,
                                            const int32_t *targets, float scale, bool accumulate) {
    const int64_t v0 = tile * k->width, w = classifier_width(k, tile), C = k->C;
    if (w <= 0) {
        // There are more threads than tiles.
        if (dx && first) { memset(dx, 0, (size_t)(rows * C) * sizeof(float)); }
        return;
    }
    const float *dlogits = classifier_logits(k, tile, 0);
    classifier_tile_dlogits(k, tile, rows, targets, scale);
    if (dwte) { classifier_tile_dwte(s, k, tile, rows, dwte, x, accumulate); }
    if (dx) {
        sgemm_tile(s, CblasNoTrans, CblasNoTrans, rows, C, w, dlogits, k->row, wte + v0 * C, C,
                   first ? 0.0f : 1.0f, dx, C);
    }
}

// Adds up the threads' partial sums of dx for row i.
static inline void classifier_sum_dx(const Classifier *k, float *dx, int64_t i, int64_t shares) {
    const int64_t C = k->C;
    memcpy(dx + i * C, k->dx + i * C, (size_t)C * sizeof(float));
    for (int64_t share = 1; share < shares; share++) {
        const float *part = k->dx + (share * k->R + i) * C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) { dx[i * C + c] += part[c]; }
    }
}
static inline void classifier_chunk(Stream *s, const Classifier *k, int64_t rows, float *losses,
                                    float *dx, float *dwte, bool gradients, const float *x,
                                    const float *wte, const int32_t *targets, float scale,
                                    bool accumulate) {
    const int64_t per = k->tiles_a_thread, shares = k->tiles / per;
#pragma omp parallel num_threads(s->threads)
    {
        blas_serial_here();
#pragma omp for schedule(static, 1)
        for (int64_t share = 0; share < shares; share++) {
            for (int64_t t = share * per; t < (share + 1) * per; t++) {
                classifier_tile_forward(s, k, t, rows, x, wte, targets);
            }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) { losses[i] = classifier_row_loss(k, i, targets[i]); }
        if (gradients) {
#pragma omp for schedule(static, 1)
            for (int64_t share = 0; share < shares; share++) {
                for (int64_t t = share * per; t < (share + 1) * per; t++) {
                    classifier_tile_backward(s, k, t, rows, dx ? k->dx + share * k->R * k->C : NULL,
                                             t == share * per, dwte, x, wte, targets, scale,
                                             accumulate);
                }
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < rows; i++) {
                if (dx) { classifier_sum_dx(k, dx, i, shares); }
            }
        }
    }
}

static inline void ops_classifier(Stream *s, float *losses, Real *dx, float *dwte, Real *dlogits,
                                  const Real *x, const Real *wte, const int32_t *targets, int64_t N,
                                  int64_t each, int64_t C, int64_t V, int64_t Vp, float scale,
                                  bool accumulate) {
    if (N == 0) {
        if (dwte && !accumulate) { ops_zero(s, dwte, (size_t)(Vp * C) * sizeof(float)); }
        return;
    }
    for (int64_t b = 0; b < N / each && dwte && !accumulate; b++) {
        ops_zero(s, dwte + (b * Vp + V) * C, (size_t)((Vp - V) * C) * sizeof(float));
    }
    int64_t floats;
    Classifier k = classifier_space((float *)s->workspace, N, C, V, s->threads, CLASSIFIER_ROWS,
                                    !dlogits, &floats);
    for (int64_t most = k.R / 2; most && s->workspace_bytes < (size_t)floats * sizeof(float);
         most /= 2) {
        k = classifier_space((float *)s->workspace, N, C, V, s->threads, most, !dlogits, &floats);
    }
    assert(s->workspace_bytes >= (size_t)floats * sizeof(float));
    if (dlogits) {
        k.logits = f32(dlogits);
        k.row = Vp;
        k.next = k.width;
    }
    k.each = each;
    k.Vp = Vp;
    blas_serial_once();
    for (int64_t n = 0; n < N; n += k.R) {
        const int64_t rows = min_i64(k.R, N - n);
        k.first = n;
        classifier_chunk(s, &k, rows, losses + n, dx ? f32(dx) + n * C : NULL, dwte,
                         dx || dwte || dlogits, f32_const(x) + n * C, f32_const(wte), targets + n,
                         scale, accumulate);
        for (int64_t i = 0; i < rows && dlogits; i++) {
            memset(k.logits + i * Vp + V, 0, (size_t)(Vp - V) * sizeof(float));
        }
        if (dlogits) { k.logits += k.R * Vp; }
    }
}

// --- optimizers and norms ------------------------------------------------------------------------
static inline void ops_adamw(Stream *s, float *master, void *param, DType dtype, float *m, float *v,
                             const float *grad, int64_t n, OptimizerStep o) {
    ops_adamw_host(s, master, param, dtype, m, v, grad, n, o);
}
static inline void ops_sgd(Stream *s, float *master, void *param, DType dtype, float *b,
                           const float *grad, int64_t n, OptimizerStep o) {
    ops_sgd_host(s, master, param, dtype, b, grad, n, o);
}

static inline void ops_square_sum(Stream *s, ExactSum *sum, const float *x, int64_t n,
                                  int64_t chunk, double scale) {
    ops_square_sum_host(s, sum, x, n, chunk, scale);
}
static inline void ops_accumulate(Stream *s, float *out, const float *in, int64_t n) {
    ops_accumulate_host(s, out, in, n);
}

#include "kernels/clip_cpu.h"     // gradients of single samples
#include "kernels/noise_cpu.h"    // noise
#include "kernels/quantize_cpu.h" // quantization

static inline size_t ops_workspace_bytes(OpsShape shape, int threads) {
    int64_t head = 0, classifier = 0;
    head_space(NULL, shape.T, shape.C / max_i64(1, shape.NH), &head);
    // All chunks have nearly the same size, so fewer rows can give larger chunks. min(N, most) rows
    // give the largest.
    const int64_t plenty = CLASSIFIER_ROWS,
                  most = shape.logits ? min_i64(shape.logits, plenty) : plenty;
    classifier_space(NULL, min_i64(shape.rows * shape.T, most), shape.C, max_i64(1, shape.V),
                     threads, most, shape.logits > 0, &classifier);
    return (size_t)max_i64(max_i64(head * threads, classifier),
                           clip_floats(shape.rows, shape.T, threads)) *
           sizeof(float);
}

#endif
