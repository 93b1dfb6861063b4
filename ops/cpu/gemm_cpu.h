// gemm_cpu.h: products of fp32 matrices by the CPU's library, one serial call for each tile.
//
// oneDNN (make MATMUL=onednn) compiles its kernels when the program runs, for the instructions that
// the CPU has. Any CBLAS is the fallback (make MATMUL=cblas). Nothing outside this file knows which
// library it is.
//
// The inner dimension is cut into slices by a rule of its length alone. With AVX-512 oneDNN adds
// the terms of a slice in one order, whatever the other two dimensions are. So an element of the
// result does not depend on the tile that it is in, and results do not depend on the number of
// threads.
#ifndef GEMM_CPU_H
#define GEMM_CPU_H

#include "ops/cpu/update_cpu.h" // poll_messages; the contract (ops.h)
#ifdef USE_ONEDNN
#include <dnnl.h> // dnnl_sgemm
#elif __has_include(<cblas.h>)
#include <cblas.h> // cblas_sgemm
#else
#include <mkl_cblas.h> // the same from MKL
#endif
#include <omp.h> // the team of threads

#ifndef GEMM_DEPTH // tests make it smaller
// The longest slice of the inner dimension. Messages are polled after each slice of a tile. Longer
// slices are faster, since each reads and writes the tile again, but in slices of 777 and more
// oneDNN's sums depend on the tile (both measured, oneDNN 2.6.3).
#define GEMM_DEPTH 768
#endif
#ifdef USE_ONEDNN
static inline const char *gemm_library(void) { return "oneDNN"; }
// Returns whether an element of a product has the same bits in every tile that has at least 32 rows
// and columns, or all of them. It holds for oneDNN's kernels of AVX-512, and not for those of AVX2.
static inline bool gemm_same_in_all_tiles(void) {
    return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core;
}
#else
static inline const char *gemm_library(void) { return "CBLAS"; }
static inline bool gemm_same_in_all_tiles(void) { return false; } // nobody promises it
#endif

// The library must not start threads inside our own. gemm_serial_here() sets the OpenMP thread
// count, inside a parallel region, for this thread and region only: a region of one thread does not
// count as parallel, so the library would start a team there. gemm_serial_once() turns off the
// threads that a BLAS manages itself, if it is OpenBLAS or MKL.
#ifdef __cplusplus
extern "C" {
#endif
extern void openblas_set_num_threads(int) __attribute__((weak));
extern void MKL_Set_Num_Threads(int) __attribute__((weak));
#ifdef __cplusplus
}
#endif
static inline void gemm_serial_once(void) {
    static bool done = false;
    if (done) { return; }
    done = true;
    const int threads = omp_get_max_threads(); // OpenBLAS changes it below
    if (openblas_set_num_threads) { openblas_set_num_threads(1); }
    if (MKL_Set_Num_Threads) { MKL_Set_Num_Threads(1); }
    omp_set_num_threads(threads);
#ifdef USE_ONEDNN
    // oneDNN describes its kernels to profilers otherwise, which takes a tenth of a second.
    dnnl_set_jit_profiling_flags(0);
#endif
}
static inline void gemm_serial_here(void) { omp_set_num_threads(1); }

// An operand is read as it is stored, or transposed.
typedef enum { AS_STORED, TRANSPOSED } Operand;
static inline void gemm_slice(Operand ta, Operand tb, int64_t m, int64_t n, int64_t k,
                              const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                              float *c, int64_t ldc) {
#ifdef USE_ONEDNN
    const dnnl_status_t status =
        dnnl_sgemm(ta == TRANSPOSED ? 'T' : 'N', tb == TRANSPOSED ? 'T' : 'N', m, n, k, 1.0f, a,
                   lda, b, ldb, beta, c, ldc);
    if (status != dnnl_success) {
        die(EXIT_RESOURCES, "free some memory, or build with make MATMUL=cblas",
            "oneDNN cannot multiply matrices (status %d)", (int)status);
    }
#else
    cblas_sgemm(CblasRowMajor, ta == TRANSPOSED ? CblasTrans : CblasNoTrans,
                tb == TRANSPOSED ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, 1.0f, a,
                (int)lda, b, (int)ldb, beta, c, (int)ldc);
#endif
}
// Returns the length of the slices of an inner dimension of length k.
static inline int64_t gemm_slice_length(int64_t k) {
    const int64_t slices = max_i64(1, ceil_div(k, GEMM_DEPTH));
    return round_up(ceil_div(k, slices), 16);
}
// c(m, n) = beta c + a b with a(m, k) and b(k, n), each as stored or transposed, by the calling
// thread alone. Rows are lda, ldb and ldc elements apart. Lets messages move after each slice.
static inline void gemm_tile(Stream *s, Operand ta, Operand tb, int64_t m, int64_t n, int64_t k,
                             const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                             float *c, int64_t ldc) {
    const int64_t slice = gemm_slice_length(k);
    for (int64_t i = 0; i < k; i += slice) {
        gemm_slice(ta, tb, m, n, min_i64(slice, k - i), a + (ta == TRANSPOSED ? i * lda : i), lda,
                   b + (tb == TRANSPOSED ? i : i * ldb), ldb, i ? 1.0f : beta, c, ldc);
        poll_messages(s);
    }
}

#endif
