// train_gpt.cu: the GPU build. The same program as train_gpt.c, with the operations of ops_cuda.cuh
// and the collectives of comm_nccl.cuh.
//
//   make cuda    train_gpt_cuda, by nvcc
//   make emu     train_gpt_emu, the same source by g++ on the CPU, under an emulation of CUDA:
//                slow, for tests
//
#define OPS_IMPLEMENTATION
#define DEFAULT_DTYPE "bf16"      // fastest on GPUs
#include "ops/cuda/clip_cuda.cuh" // with ops_cuda.cuh: all operations
#include "comm/comm_nccl.cuh"
#include "train_gpt.c"
