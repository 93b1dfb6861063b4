// test_ops.cu: the cases of test_ops.c, run on the GPU's operations. The workspace of matrix
// products is small here, so that small cases have several chunks; with -DPRODUCTION it is that of
// the program, in which the library has other algorithms. MATMUL_SUGGESTION=k in the environment
// takes the library's suggestion k for each product, where it has so many.
#ifndef PRODUCTION
#define MATMUL_WORKSPACE (64 << 10)
#define CLASSIFIER_ROWS 256
#define LOGITS_KEPT 1024
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
#include <set> // which memory is the host's
// Tensors that the host reaches, too, are in its memory, which kernels reach through the bus.
// (Managed memory would move page by page at each fault, and not every system lets the host touch
// it while the GPU works.)
static std::set<void *> mapped_memory;
static void *mapped(size_t bytes) {
    void *p = NULL;
    CUDA_CHECK(cudaHostAlloc(&p, bytes, cudaHostAllocMapped));
    mapped_memory.insert(p);
    return memset(p, 0, bytes);
}
static void free_mapped(void *p) {
    if (mapped_memory.erase(p)) {
        CUDA_CHECK(cudaDeviceSynchronize()); // as cudaFree() does
        CUDA_CHECK(cudaFreeHost(p));
    } else {
        ops_free(p);
    }
}
#define OPS_SHARED mapped
#define ops_free free_mapped
#define OPS_TEST_BEGIN()                                                                           \
    matmul_suggestion = getenv("MATMUL_SUGGESTION") ? atoi(getenv("MATMUL_SUGGESTION")) : 0
#include "test_ops.c"
