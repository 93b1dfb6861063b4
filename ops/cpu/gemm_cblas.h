// gemm_cblas.h: products of matrices by a library with a CBLAS interface (gemm_cpu.h), where oneDNN
// is not at hand.
#ifndef GEMM_CBLAS_H
#define GEMM_CBLAS_H

#include "ops/cpu/peak_cpu.h" // Multiplier
#include "ops/cpu/real_cpu.h" // Product
#if __has_include(<cblas.h>)
#include <cblas.h> // cblas_sgemm
#else
#include <mkl_cblas.h> // the same from MKL
#endif

#ifdef __cplusplus
extern "C" {
#endif
extern void openblas_set_num_threads(int) __attribute__((weak));
extern void MKL_Set_Num_Threads(int) __attribute__((weak));
#ifdef __cplusplus
}
#endif

static inline const char *gemm_library(void) { return "CBLAS"; }
// the interface has none
static inline void gemm_version(char *text, size_t bytes) { snprintf(text, bytes, "%s", ""); }
static inline bool gemm_same_in_all_tiles(void) { return false; } // nobody promises it
static inline bool gemm_allows_tiles(void) { return true; }
// Turns off the threads that OpenBLAS and MKL manage themselves.
static inline void gemm_open_library(void) {
    if (openblas_set_num_threads) { openblas_set_num_threads(1); }
    if (MKL_Set_Num_Threads) { MKL_Set_Num_Threads(1); }
}
static inline Multiplier gemm_multiplier(bool bf16) {
    (void)bf16;
    return multiplier_of_fp32();
}
static inline bool gemm_open_bf16(void) { return false; }   // it multiplies fp32 only
static inline void gemm_bf16(const Product *p) { (void)p; } // never called
static inline void gemm_fp32(const Product *p) {
    cblas_sgemm(CblasRowMajor, p->ta == TRANSPOSED ? CblasTrans : CblasNoTrans,
                p->tb == TRANSPOSED ? CblasTrans : CblasNoTrans, (int)p->m, (int)p->n, (int)p->k,
                1.0f, (const float *)p->a, (int)p->lda, (const float *)p->b, (int)p->ldb,
                p->add ? 1.0f : 0.0f, p->c, (int)p->ldc);
}

#endif
