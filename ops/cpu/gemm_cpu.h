// gemm_cpu.h: products of matrices on the CPU, tile by tile. A tile is one serial call of a
// library: oneDNN (make MATMUL=onednn) or any CBLAS (make MATMUL=cblas). Nothing but the file of a
// library knows which one it is.
//
// Operands are Reals, results are fp32. Matrices of bf16 are multiplied in bf16 where the CPU is
// fast at that: by this program's own kernel where it has AMX (gemm_tiles.h), else by the library,
// with AVX512-BF16. Elsewhere blocks of them are converted to fp32 first, and only the rounding of
// the sums differs. TRAIN_GPT_LIBRARY_PRODUCTS=1 (environment) leaves all of them to the library,
// in bf16 wherever the CPU can.
//
// The inner dimension is cut into slices by a rule of its length alone. With AVX-512 oneDNN adds
// the terms of a slice in one order, whatever the other two dimensions are. So an element of the
// result does not depend on the tile that it is in, and results do not depend on the number of
// threads.
#ifndef GEMM_CPU_H
#define GEMM_CPU_H

#include "ops/cpu/real_cpu.h" // operands; polling; the contract (ops.h)
#include <omp.h>              // the team of threads

#ifndef GEMM_DEPTH // tests make it smaller
// The longest slice of the inner dimension. Messages are polled after each slice of a tile. Longer
// slices are faster, since each reads and writes the tile again, but in slices of 777 and more
// oneDNN's fp32 sums depend on the tile (both measured, oneDNN 2.6.3).
#define GEMM_DEPTH 768
#endif

#ifdef USE_ONEDNN
#include "ops/cpu/gemm_onednn.h" // gemm_fp32, gemm_bf16
#else
#include "ops/cpu/gemm_cblas.h" // the same
#endif

#include "ops/cpu/gemm_tiles.h" // gemm_by_tiles

static DType cpu_compute = DTYPE_FP32; // what products are computed in (ops_compute())
static bool cpu_tiles;                 // products in bf16 are those of gemm_tiles.h

// The library must not start threads inside our own. gemm_serial_here() sets the OpenMP thread
// count, inside a parallel region, for this thread and region only: a region of one thread does not
// count as parallel, so the library would start a team there.
static inline void gemm_serial_here(void) { omp_set_num_threads(1); }
static inline bool gemm_open_tiles(void) {
#ifdef EMULATED_TILES // test/emulated_tiles.h
    if (tiles_are_emulated()) { return true; }
#endif
    return !environment_asks(ENVIRONMENT_LIBRARY_PRODUCTS) && gemm_allows_tiles() && tiles_open();
}
// Returns whether the library's products of bf16 are used where there are no tiles. Dot products of
// pairs do twice the operations of fp32 on AMD's cores, and half of them on Intel's that have AMX,
// which a virtual machine may hide (measured on Emerald Rapids: 89 and 179 GFLOP/s a core). Those
// are known by AVX512-FP16, which came with AMX.
static inline bool gemm_open_pairs(void) {
    return (environment_asks(ENVIRONMENT_LIBRARY_PRODUCTS) || !pairs_are_slow()) &&
           gemm_open_bf16();
}
// Prepares products of Reals.
static inline void gemm_open(DType real) {
    const int threads = omp_get_max_threads(); // a library may change it
    gemm_serial_here();
    gemm_open_library();
    cpu_real = real;
    cpu_tiles = real == DTYPE_BF16 && gemm_open_tiles();
    cpu_compute = real == DTYPE_BF16 && (cpu_tiles || gemm_open_pairs()) ? DTYPE_BF16 : DTYPE_FP32;
    omp_set_num_threads(threads);
}
// Return who multiplies Reals, and by which instructions.
static inline const char *gemm_of_reals(void) {
    return cpu_compute == DTYPE_BF16 && cpu_tiles ? "own" : gemm_library();
}
static inline Multiplier gemm_instructions(void) {
    if (cpu_compute != DTYPE_BF16) { return gemm_multiplier(false); }
    return cpu_tiles ? MULTIPLY_TILES : gemm_multiplier(true);
}

// --- the memory of a thread ----------------------------------------------------------------------
enum {
    // Elements of a tile whose sums are rounded to bf16 afterwards, at most: they stay in the L2
    // cache. With AMX packing takes longer than sums outside of it, so tiles may be larger.
    GEMM_BUFFER = 1 << 18,
    GEMM_BUFFER_AMX = 1 << 19,
    // Rows and columns of a block that is converted to fp32. A block has up to GEMM_DEPTH inner
    // indices.
    GEMM_ROWS = 512,
    GEMM_COLS = 1024
};
static inline bool gemm_uses_tiles(void) { return cpu_compute == DTYPE_BF16 && cpu_tiles; }
// Returns how many sums a thread's buffer has.
static inline int64_t gemm_sums(void) { return gemm_uses_tiles() ? GEMM_BUFFER_AMX : GEMM_BUFFER; }
// Returns the floats at the end of the workspace that each thread has for its products.
static inline int64_t gemm_thread_floats(void) {
    const int64_t converted =
        cpu_compute == cpu_real ? 0 : (GEMM_ROWS + GEMM_COLS) * (int64_t)GEMM_DEPTH;
    // also where no tiles are used, so that a run needs the same memory there
    const int64_t packed = TILE_SPACE / (int64_t)sizeof(float);
    return cpu_real == DTYPE_FP32 ? 0 : max_i64(GEMM_BUFFER + converted, GEMM_BUFFER_AMX + packed);
}
// Returns the bytes of the workspace that operations may divide as they like.
static inline size_t workspace_rest(const Stream *s) {
    const size_t products = (size_t)(s->threads * gemm_thread_floats()) * sizeof(float);
    assert(s->workspace_bytes >= products);
    return (s->workspace_bytes - products) / 64 * 64;
}
// Returns the calling thread's floats: GEMM_BUFFER for sums, then what packed or converted blocks
// take.
static inline float *gemm_thread_space(const Stream *s) {
    return (float *)(void *)((char *)s->workspace + workspace_rest(s)) +
           omp_get_thread_num() * gemm_thread_floats();
}

// --- tiles ---------------------------------------------------------------------------------------
// to(rows, cols) = a block of a matrix of bf16, as it is stored, in fp32
static inline void gemm_convert(float *to, const Real *from, int64_t rows, int64_t cols,
                                int64_t stride) {
    for (int64_t r = 0; r < rows; r++) {
        reals_to_floats(to + r * cols, real_at_const(from, r * stride), cols);
    }
}
// Multiplies a slice of bf16 operands in blocks of fp32. All blocks have the slice's inner indices,
// so the sums do not depend on them.
static inline void gemm_converted(const Stream *s, const Product *p) {
    float *right = gemm_thread_space(s) + GEMM_BUFFER, *left = right + GEMM_COLS * p->k;
    for (int64_t j = 0; j < p->n; j += GEMM_COLS) {
        Product block = *p;
        block.n = min_i64(GEMM_COLS, p->n - j);
        const bool tb = p->tb == TRANSPOSED, ta = p->ta == TRANSPOSED;
        block.b = right;
        block.ldb = tb ? p->k : block.n;
        gemm_convert(right, real_at_const((const Real *)p->b, tb ? j * p->ldb : j),
                     tb ? block.n : p->k, block.ldb, p->ldb);
        for (int64_t i = 0; i < p->m; i += GEMM_ROWS) {
            block.m = min_i64(GEMM_ROWS, p->m - i);
            block.a = left;
            block.lda = ta ? block.m : p->k;
            gemm_convert(left, real_at_const((const Real *)p->a, ta ? i : i * p->lda),
                         ta ? p->k : block.m, block.lda, p->lda);
            block.c = p->c + i * p->ldc + j;
            gemm_fp32(&block);
        }
    }
}
static inline void gemm_own_tiles(const Stream *s, const Product *p) {
    gemm_by_tiles(p, gemm_thread_space(s) + GEMM_BUFFER_AMX);
}
// Returns the length of the slices of an inner dimension of length k.
static inline int64_t gemm_slice_length(int64_t k) {
    const int64_t most = gemm_uses_tiles() ? TILE_BLOCK_DEPTH : GEMM_DEPTH,
                  slices = max_i64(1, ceil_div(k, most));
    return round_up(ceil_div(k, slices), gemm_uses_tiles() ? 32 : 16);
}
// c(m, n) [+]= a b with a(m, k) and b(k, n), each as stored or transposed, by the calling thread
// alone. Rows are lda, ldb and ldc elements apart. Lets messages move after each slice.
static inline void gemm_tile(Stream *s, Operand ta, Operand tb, int64_t m, int64_t n, int64_t k,
                             const Real *a, int64_t lda, const Real *b, int64_t ldb, bool add,
                             float *c, int64_t ldc) {
    const int64_t slice = gemm_slice_length(k);
    for (int64_t i = 0; i < k; i += slice) {
        const Product p = {
            .ta = ta,
            .tb = tb,
            .m = m,
            .n = n,
            .k = min_i64(slice, k - i),
            .a = real_at_const(a, ta == TRANSPOSED ? i * lda : i),
            .b = real_at_const(b, tb == TRANSPOSED ? i : i * ldb),
            .lda = lda,
            .ldb = ldb,
            .add = add || i > 0,
            .c = c,
            .ldc = ldc,
        };
        if (gemm_uses_tiles()) {
            gemm_own_tiles(s, &p);
        } else if (cpu_compute == DTYPE_BF16) {
            gemm_bf16(&p);
        } else if (cpu_real == DTYPE_BF16) {
            gemm_converted(s, &p);
        } else {
            gemm_fp32(&p);
        }
        poll_messages(s);
    }
}
// Does gemm_finished() finish sums where they are made?
static inline bool gemm_finishes_bands(int64_t k) {
    return gemm_uses_tiles() && k <= TILE_BLOCK_DEPTH;
}
// Computes a product and finishes its sums, which are in c meanwhile if they need the space.
static inline void gemm_finished(Stream *s, Operand tb, Tile t, int64_t k, const Real *a,
                                 int64_t lda, const Real *b, int64_t ldb, float *c, int64_t ldc,
                                 Finish finish) {
    if (gemm_finishes_bands(k)) {
        const Product p = {.tb = tb,
                           .m = t.rows,
                           .n = t.cols,
                           .k = k,
                           .a = a,
                           .b = b,
                           .lda = lda,
                           .ldb = ldb,
                           .finish = &finish};
        gemm_own_tiles(s, &p);
        poll_messages(s);
    } else {
        const Tile all = {0, 0, t.rows, t.cols};
        gemm_tile(s, AS_STORED, tb, t.rows, t.cols, k, a, lda, b, ldb, false, c, ldc);
        finish.run(finish.what, all, c, ldc);
    }
}

#endif
