// test_ops.cu: the cases of test_ops.c, run on the GPU's operations.
#define MATMUL_WORKSPACE (64 << 10)
#define CLASSIFIER_ROWS 256
#define OPS_IMPLEMENTATION
#include "kernels/attention_cuda.cuh"
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
#include "test_ops.c"
