// train_gpt.cu: the GPU build. The same program as train_gpt.c, with the operations of ops_cuda.cuh.
//
//   make cuda    train_gpt_cuda, by nvcc
//   make emu     train_gpt_emu, the same source by g++ on the processor: for tests, slow
//
// Messages go through MPI from host memory, which the store's states share with the device (ops.h, ops_alloc_shared).
#define OPS_IMPLEMENTATION
#include "attention_cuda.cuh" // and ops_cuda.cuh
#include "train_gpt.c"
