// test_ops.cu: the cases of test_ops.c, run on the GPU's operations.
#define MATMUL_WORKSPACE (64 << 10)
#define CLASSIFIER_ROWS 256
#define OPS_IMPLEMENTATION
#include "attention_cuda.cuh"
#include <setjmp.h> // cmocka wants these three first
#include <stdarg.h>
#include <stddef.h>
extern "C" { // which its header forgets in places
#include <cmocka.h>
}
#include "test_ops.c"
