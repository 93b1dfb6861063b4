// train_gpt_checked.cu: train_gpt_emu, with each access of its kernels checked (emu_checks.h), for
// tests: slow.
#define MATMUL_WORKSPACE (64 << 10)
#define CLASSIFIER_ROWS 256
#define LOGITS_KEPT 1024
#define OPS_IMPLEMENTATION
#include "test/emu_operations.h"
#include "train_gpt.cu"
