// test_ops.cu: the cases of test_ops.c, run on the GPU's operations. The workspace of matrix
// products is small here, so that small cases have several chunks; with -DPRODUCTION it is that of
// the program, in which the library has other algorithms. MATMUL_SUGGESTION=k in the environment
// takes the library's suggestion k for each product, where it has so many.
#ifndef PRODUCTION
#define MATMUL_WORKSPACE (64 << 10)
#define CLASSIFIER_ROWS 256
#endif
#define OPS_IMPLEMENTATION
#include "ops/cuda/clip_cuda.cuh" // with ops_cuda.cuh: all operations
#ifdef EMU_CHECKED
#include "test/emu_operations.h"
#endif
#include <setjmp.h> // cmocka wants these three first
#include <stdarg.h>
#include <stddef.h>
extern "C" { // which its header forgets in places
#include <cmocka.h>
}
static void *managed(size_t bytes) {
    void *p = NULL;
    CUDA_CHECK(cudaMallocManaged(&p, bytes));
    CUDA_CHECK(cudaMemset(p, 0, bytes));
    CUDA_CHECK(cudaDeviceSynchronize());
    return p;
}
#define OPS_SHARED managed
#define OPS_TEST_BEGIN()                                                                           \
    matmul_suggestion = getenv("MATMUL_SUGGESTION") ? atoi(getenv("MATMUL_SUGGESTION")) : 0
#include "test_ops.c"
