// test_ops.c: every tensor operation against slow, obvious double arithmetic.
//
// One table of cases (below) drives everything. An operation is described once: its inputs, a
// reference forward in double, and how to run it forward and backward. For each case the driver
// then checks
//   - the forward result against the reference; - each gradient against central differences, in
//   double, of sum(dout * reference forward); - that accumulate = false overwrites (buffers start
//   as NaN) and accumulate = true adds; - that a second run gives the same bits; and, where ops.h
//   promises it, that any number of threads does; - where results belong to samples: that a sample
//   alone gives the same bits, and that a NaN in one sample does nothing to the others.
// On the GPU, where a Real is what --dtype says, each case runs in fp32 and in bf16: the inputs are
// numbers that both have. Add an operation: write its two functions, add a row to `operations`, add
// cases.
#include "test/emulated_tiles.h"
#define POLL_WORK 20000 // so that small products are cut for polling too
#define TILE_WORK 20000 // the same: tiles
#define GEMM_DEPTH 64   // the same: a slice of the inner dimension
#define TILE_GROUP 64   // the same: blocks of products by AMX
#define TILE_BLOCK_DEPTH 96
#define TILE_BLOCK (64 * 96)
#define CLIP_PARTS 4       // so that a part is more than one piece of work
#ifndef OPS_IMPLEMENTATION // test_ops.cu brings the GPU's
#include "ops/cpu/ops_cpu.h"
#endif
#include "ops/orthogonalise.h"
#include "state/optimizer.h"
#include <setjmp.h> // cmocka wants these three first
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

enum { LOOKS_AHEAD = 3 }; // a variant of ADAMW and SGD
enum { EMBEDDING, LAYERNORM, MATMUL, RESIDUAL, ATTENTION, CLASSIFIER, CLASSIFIER_KEPT, ADAMW, SGD };
enum {
    MATMUL_NORMS = SGD + 1,
    BIAS_SAMPLES,
    LAYERNORM_SAMPLES,
    EMBEDDING_NORMS,
    TIED_NORMS,
    TIED_ROWS,
    TOKEN_ROWS,
    CROSSING_NORMS,
    SAMPLE_NORMS,
    FACTORS,
    MATMUL_SAMPLES,
    EMBEDDING_SAMPLES,
    ACCUMULATE_SAMPLES,
    NOISE,
    RMSNORM,
    SWIGLU,
    RELU2,
    SOFTCAP,
    ROTARY,
    HEAD_NORM,
    RMSNORM_SAMPLES,
    HEAD_NORM_SAMPLES,
    MUON,
    MUON_DIRECTION,
    ADAMW_DIRECTION,
    ORTHOGONAL_BEGIN,
    ORTHOGONAL_END,
    COMBINE,
    SYMMETRIC,
    ORTHOGONALISE,
    MIXTURE
};
enum { INPUTS = 4 };
typedef struct {
    int op;
    int64_t rows, T, C, other; // other: OC, NH or V; for flat operations rows is n
    int variant;               // what the operation makes of it, see there
    int threads;
    // of attention; 0: NH heads of C / NH channels. Of MIXTURE: groups of experts; OC
    int64_t kv_heads, D;
} Case;

static const Case cases[] = {
    // rows, T, C, V (Vp = V + 3, maxT = T + 2); variant 1: wte and wpe apart; 2: no wpe
    // multiples of 8: on a GPU in bf16 tensor cores make tiles of 128; of products, here and with
    // 203
    // on tensor cores: several tiles, samples of more than one panel
    {EMBEDDING, 2, 5, 8, 7, 0, 1},
    {EMBEDDING, 3, 1, 19, 2, 0, 2},
    {EMBEDDING, 1, 40, 33, 5, 0, 3},
    {EMBEDDING, 8, 40, 5, 9, 0, 2},
    {EMBEDDING, 0, 4, 8, 7, 0, 2},
    {EMBEDDING, 3, 6, 17, 5, 1, 2},
    {EMBEDDING, 2, 9, 21, 6, 2, 3},
    {EMBEDDING, 2, 60, 12, 1, 0, 2},
    {EMBEDDING, 3, 50, 132, 3, 0, 2},
    // rows, T, C; variant 1: two summands; 2: the sum goes over the first
    {LAYERNORM, 1, 1, 1, 0, 0, 1},
    {LAYERNORM, 1, 1, 48, 0, 1, 2},
    {LAYERNORM, 3, 7, 37, 0, 1, 3},
    {LAYERNORM, 2, 16, 96, 0, 2, 2},
    {LAYERNORM, 2, 9, 130, 0, 0, 1},
    // rows of which a lane of a GPU keeps up to 4 pieces, up to 8, or none
    {LAYERNORM, 1, 5, 264, 0, 2, 2},
    {LAYERNORM, 1, 3, 1096, 0, 1, 2},
    {LAYERNORM, 1, 2, 2056, 0, 2, 1},
    {LAYERNORM, 0, 3, 16, 0, 1, 2},
    // N = rows T, C, OC; variant 1: no bias; 2: GELU before and after
    {MATMUL, 1, 1, 1, 1, 0, 1},
    {MATMUL, 1, 1, 64, 48, 2, 2},
    {MATMUL, 3, 7, 37, 29, 0, 3},
    {MATMUL, 5, 13, 50, 131, 2, 2},
    {MATMUL, 2, 64, 96, 70, 1, 1},
    {MATMUL, 4, 33, 16, 257, 2, 3},
    {MATMUL, 0, 8, 16, 32, 0, 2},
    {MATMUL, 3, 5, 600, 40, 0, 2},
    {MATMUL, 40, 17, 9, 20, 0, 2},
    {MATMUL, 1, 33, 20, 700, 2, 1},
    {MATMUL, 3, 7, 24, 40, 2, 2},
    // n
    {RESIDUAL, 1, 1, 1, 0, 0, 1},
    {RESIDUAL, 1001, 1, 1, 0, 0, 2},
    {RESIDUAL, 300007, 1, 1, 0, 1, 3},
    {RESIDUAL, 0, 1, 1, 0, 0, 2},
    // rows, T, C, NH, and of some kv_heads, D: tiles are of 32, 64 or 128. variant 1: scores of
    // hundreds, so the running maximum must work
    {ATTENTION, 1, 1, 1, 1, 0, 1},
    {ATTENTION, 2, 1, 12, 3, 0, 2},
    {ATTENTION, 1, 64, 64, 1, 0, 1},
    {ATTENTION, 2, 63, 30, 2, 0, 3},
    {ATTENTION, 1, 65, 40, 2, 0, 2},
    {ATTENTION, 1, 150, 48, 3, 0, 3},
    {ATTENTION, 3, 17, 100, 1, 0, 2},
    {ATTENTION, 1, 203, 7, 1, 0, 2},
    {ATTENTION, 1, 70, 160, 2, 1, 2},
    {ATTENTION, 1, 200, 128, 2, 0, 2},
    {ATTENTION, 1, 140, 128, 1, 0, 3},
    {ATTENTION, 0, 8, 16, 2, 0, 2},
    {ATTENTION, 1, 70, 128, 2, 0, 2, 1, 64},
    {ATTENTION, 2, 65, 48, 3, 0, 3, 1, 16},
    {ATTENTION, 1, 130, 40, 6, 0, 3, 2, 80},
    {ATTENTION, 2, 33, 96, 4, 0, 2, 2, 96},
    {ATTENTION, 1, 129, 64, 2, 0, 2, 2, 128},
    {ATTENTION, 1, 40, 96, 4, 0, 3, 4, 128},
    {ATTENTION, 1, 66, 32, 2, 0, 2, 1, 256},
    {ATTENTION, 1, 70, 60, 4, 1, 2, 2, 15},
    {ATTENTION, 3, 1, 8, 4, 0, 2, 2, 8},
    {ATTENTION, 0, 8, 16, 2, 0, 2, 1, 8},
    // N = rows T, C, V (Vp = V + 3); variant 1: some rows masked; 2: all rows; 4 more: soft cap
    {CLASSIFIER, 1, 1, 1, 1, 0, 1},
    {CLASSIFIER, 1, 1, 16, 10, 0, 3},
    {CLASSIFIER, 2, 9, 37, 61, 1, 2},
    {CLASSIFIER, 1, 6, 20, 257, 1, 1},
    {CLASSIFIER, 361, 1, 9, 50, 1, 3},
    {CLASSIFIER, 1, 3, 8, 2600, 0, 2},
    {CLASSIFIER, 2, 4, 8, 12, 2, 2},
    {CLASSIFIER, 0, 4, 8, 12, 0, 2},
    {CLASSIFIER, 2, 9, 37, 61, 5, 2},
    {CLASSIFIER, 1, 3, 8, 2600, 4, 2},
    {CLASSIFIER, 361, 1, 40, 70, 5, 3},
    {CLASSIFIER, 2, 9, 24, 61, 5, 2},
    {CLASSIFIER, 3, 1, 4, 17005, 1, 2},
    // the same, keeping dlogits; variant 3: some rows masked, and dx, dwte and dlogits by calls of
    // their own
    {CLASSIFIER_KEPT, 1, 1, 1, 1, 0, 1},
    {CLASSIFIER_KEPT, 2, 9, 37, 61, 1, 2},
    {CLASSIFIER_KEPT, 2, 9, 37, 61, 3, 2},
    {CLASSIFIER_KEPT, 1, 6, 20, 257, 3, 1},
    {CLASSIFIER_KEPT, 361, 1, 9, 50, 1, 3},
    {CLASSIFIER_KEPT, 1, 3, 8, 2600, 0, 2},
    {CLASSIFIER_KEPT, 2, 4, 8, 12, 2, 2},
    {CLASSIFIER_KEPT, 0, 4, 8, 12, 3, 2},
    {CLASSIFIER_KEPT, 2, 9, 37, 61, 5, 2},
    {CLASSIFIER_KEPT, 1, 6, 20, 257, 7, 1},
    {CLASSIFIER_KEPT, 1, 3, 8, 2600, 4, 2},
    {CLASSIFIER_KEPT, 3, 1, 4, 4101, 1, 2},
    {CLASSIFIER_KEPT, 3, 1, 4, 17005, 5, 2},
    // n; variant 1: the parameter is stored in bf16; 2: and rounded stochastically;
    // LOOKS_AHEAD: in fp32, by Nesterov's form
    {ADAMW, 1, 1, 1, 0, 0, 1},
    {ADAMW, 997, 1, 1, 0, 1, 2},
    {ADAMW, 300007, 1, 1, 0, 0, 3},
    {ADAMW, 2999, 1, 1, 0, 2, 3},
    {ADAMW, 0, 1, 1, 0, 1, 2},
    {ADAMW, 2999, 1, 1, 0, LOOKS_AHEAD, 2},
    {SGD, 1, 1, 1, 0, 1, 1},
    {SGD, 997, 1, 1, 0, 0, 2},
    {SGD, 2999, 1, 1, 0, 2, 2},
    {SGD, 300007, 1, 1, 0, 1, 3},
    {SGD, 0, 1, 1, 0, 1, 2},
    {SGD, 2999, 1, 1, 0, LOOKS_AHEAD, 2},
    // rows, T, C, OC. Tiles of products are of up to 256 rows, slices of C and OC of 128; some are
    // less work from tiles of the gradient
    {MATMUL_NORMS, 1, 1, 1, 1, 0, 1},
    {MATMUL_NORMS, 3, 1, 40, 29, 0, 2},
    {MATMUL_NORMS, 2, 7, 129, 300, 0, 3},
    {MATMUL_NORMS, 5, 33, 64, 131, 0, 2},
    {MATMUL_NORMS, 2, 64, 96, 70, 0, 2},
    {MATMUL_NORMS, 1, 100, 257, 90, 0, 2},
    {MATMUL_NORMS, 2, 258, 300, 280, 0, 2},
    {MATMUL_NORMS, 1, 601, 620, 640, 0, 3},
    {MATMUL_NORMS, 3, 50, 5, 7, 0, 2},
    {MATMUL_NORMS, 2, 300, 270, 33, 0, 2},
    {MATMUL_NORMS, 3, 70, 40, 24, 0, 2},
    {MATMUL_NORMS, 2, 130, 72, 136, 0, 2},
    {MATMUL_NORMS, 2, 203, 136, 264, 0, 2},
    {MATMUL_NORMS, 1, 410, 600, 290, 0, 2},
    {MATMUL_NORMS, 0, 8, 16, 32, 0, 2},
    {MATMUL_NORMS, 2, 0, 16, 32, 0, 2},
    // rows, T, -, OC
    {BIAS_SAMPLES, 1, 1, 0, 1, 0, 1},
    {BIAS_SAMPLES, 3, 7, 0, 37, 0, 3},
    {BIAS_SAMPLES, 2, 65, 0, 300, 0, 2},
    {BIAS_SAMPLES, 5, 1, 0, 128, 0, 2},
    {BIAS_SAMPLES, 3, 256, 0, 40, 0, 2}, // on a GPU in several pieces of a sample
    {BIAS_SAMPLES, 2, 0, 0, 20, 0, 2},
    {BIAS_SAMPLES, 0, 7, 0, 20, 0, 2},
    // rows, T, C
    {LAYERNORM_SAMPLES, 1, 1, 1, 0, 0, 1},
    {LAYERNORM_SAMPLES, 3, 7, 37, 0, 0, 3},
    {LAYERNORM_SAMPLES, 2, 65, 300, 0, 0, 2},
    {LAYERNORM_SAMPLES, 4, 1, 130, 0, 0, 2},
    {LAYERNORM_SAMPLES, 2, 130, 20, 0, 0, 2},
    {LAYERNORM_SAMPLES, 2, 0, 20, 0, 0, 2},
    {LAYERNORM_SAMPLES, 0, 7, 20, 0, 0, 2},
    // rows, T, C, V; variant 1: all tokens of a sample equal; 2: no positions
    {EMBEDDING_NORMS, 1, 1, 1, 1, 0, 1},
    {EMBEDDING_NORMS, 3, 20, 37, 5, 0, 3},
    {EMBEDDING_NORMS, 2, 150, 200, 60000, 0, 2},
    {EMBEDDING_NORMS, 2, 40, 1300, 30, 0, 2},
    {EMBEDDING_NORMS, 2, 300, 40, 70, 0, 2},
    {EMBEDDING_NORMS, 3, 70, 130, 50, 1, 2},
    {EMBEDDING_NORMS, 3, 40, 130, 20, 2, 2},
    {EMBEDDING_NORMS, 2, 2100, 4, 900, 0, 2},
    {EMBEDDING_NORMS, 0, 20, 37, 5, 0, 2},
    // rows, T, C, V (Vp = V + 3); variant 1: all tokens of a sample equal
    {TIED_NORMS, 1, 1, 1, 1, 0, 1},
    {TIED_NORMS, 3, 9, 37, 5, 0, 3},
    {TIED_NORMS, 2, 65, 40, 301, 0, 2},
    {TIED_NORMS, 2, 260, 20, 30, 0, 2},
    {TIED_NORMS, 2, 140, 72, 20, 0, 2},
    {TIED_NORMS, 2, 33, 130, 50, 1, 2},
    {TIED_NORMS, 0, 9, 37, 5, 0, 2},
    // the same
    {TIED_ROWS, 1, 1, 1, 1, 0, 1},
    {TIED_ROWS, 3, 9, 37, 5, 0, 3},
    {TIED_ROWS, 2, 65, 40, 301, 0, 2},
    {TIED_ROWS, 1, 20, 1300, 30, 0, 2},
    {TIED_ROWS, 2, 33, 130, 50, 1, 2},
    {TIED_ROWS, 0, 9, 37, 5, 0, 2},
    {TOKEN_ROWS, 1, 1, 1, 1, 0, 1},
    {TOKEN_ROWS, 3, 9, 37, 5, 0, 3},
    {TOKEN_ROWS, 2, 65, 300, 30, 0, 2},
    {TOKEN_ROWS, 0, 9, 37, 5, 0, 2},
    // rows, T, C; variant 1: the two uses cancel each other
    {CROSSING_NORMS, 1, 1, 1, 0, 0, 1},
    {CROSSING_NORMS, 3, 9, 37, 0, 0, 3},
    {CROSSING_NORMS, 2, 65, 300, 0, 0, 2},
    {CROSSING_NORMS, 4, 20, 33, 0, 1, 2},
    {CROSSING_NORMS, 3, 9, 37, 0, 2, 2},
    {CROSSING_NORMS, 0, 9, 37, 0, 0, 2},
    // rows, -, n
    {SAMPLE_NORMS, 1, 1, 1, 0, 0, 1},
    {SAMPLE_NORMS, 7, 1, 133, 0, 0, 3},
    {SAMPLE_NORMS, 1, 1, 70001, 0, 0, 2},
    {SAMPLE_NORMS, 3, 1, 40001, 0, 0, 2},
    {SAMPLE_NORMS, 0, 1, 20, 0, 0, 2},
    // rows; variant: the ClipFunction
    {FACTORS, 1, 1, 1, 0, 0, 1},
    {FACTORS, 700, 1, 1, 0, 0, 1},
    {FACTORS, 700, 1, 1, 0, 1, 2},
    {FACTORS, 0, 1, 1, 0, 1, 2},
    // rows, T, C, OC; variant 1: added to what is there
    {MATMUL_SAMPLES, 1, 1, 1, 1, 0, 1},
    {MATMUL_SAMPLES, 5, 7, 37, 3, 1, 3},
    {MATMUL_SAMPLES, 4, 65, 20, 300, 0, 2},
    {MATMUL_SAMPLES, 4, 65, 300, 20, 1, 2},
    {MATMUL_SAMPLES, 3, 70, 136, 264, 1, 2},
    {MATMUL_SAMPLES, 6, 128, 24, 40, 0, 2},
    {MATMUL_SAMPLES, 0, 7, 20, 20, 0, 2},
    {MATMUL_SAMPLES, 0, 7, 20, 20, 1, 2},
    // rows, T, C, V; variant 1: without dwte
    {EMBEDDING_SAMPLES, 1, 1, 1, 1, 0, 1},
    {EMBEDDING_SAMPLES, 5, 7, 37, 3, 0, 3},
    {EMBEDDING_SAMPLES, 3, 40, 129, 8, 1, 2},
    {EMBEDDING_SAMPLES, 7, 700, 8, 600, 0, 2},
    {EMBEDDING_SAMPLES, 9, 30, 132, 2, 0, 2},
    {EMBEDDING_SAMPLES, 0, 7, 20, 20, 0, 2},
    // rows, -, n; variant 1: added to what is there
    {ACCUMULATE_SAMPLES, 1, 1, 1, 0, 0, 1},
    {ACCUMULATE_SAMPLES, 5, 1, 1033, 0, 0, 3},
    {ACCUMULATE_SAMPLES, 4, 1, 40001, 0, 1, 2},
    {ACCUMULATE_SAMPLES, 1, 1, 70001, 0, 1, 2},
    {ACCUMULATE_SAMPLES, 0, 1, 500, 0, 0, 2},
    {ACCUMULATE_SAMPLES, 0, 1, 500, 0, 1, 2},
    // n; variant 1: far into the storage; 2: without noise
    {NOISE, 1, 1, 1, 0, 0, 1},
    {NOISE, 997, 1, 1, 0, 0, 2},
    {NOISE, 2999, 1, 1, 0, 1, 3},
    {NOISE, 300007, 1, 1, 0, 1, 2},
    {NOISE, 997, 1, 1, 0, 2, 2},
    {NOISE, 0, 1, 1, 0, 0, 2},
    // rows, T, C; variant 1: two summands; 2: the sum goes over the first; 4 more: no gain
    {RMSNORM, 1, 1, 1, 0, 0, 1},
    {RMSNORM, 1, 1, 48, 0, 1, 2},
    {RMSNORM, 3, 7, 37, 0, 5, 3},
    {RMSNORM, 2, 16, 96, 0, 2, 2},
    {RMSNORM, 2, 9, 130, 0, 4, 1},
    {RMSNORM, 2, 33, 264, 0, 6, 2},
    {RMSNORM, 1, 5, 1100, 0, 1, 2},
    {RMSNORM, 1, 3, 1544, 0, 2, 1},
    {RMSNORM, 1, 2, 2056, 0, 5, 1},
    {RMSNORM, 0, 3, 16, 0, 1, 2},
    // N = rows T, F; variant 1: large numbers
    {SWIGLU, 1, 1, 1, 0, 0, 1},
    {SWIGLU, 3, 7, 37, 0, 0, 3},
    {SWIGLU, 2, 9, 1100, 0, 0, 2},
    {SWIGLU, 2, 20, 64, 0, 1, 2},
    {SWIGLU, 0, 9, 16, 0, 0, 2},
    // n; variant 1: din is dout
    {RELU2, 1, 1, 1, 0, 0, 1},
    {RELU2, 1001, 1, 1, 0, 1, 2},
    {RELU2, 70007, 1, 1, 0, 0, 3},
    {RELU2, 0, 1, 1, 0, 0, 2},
    // n; variant 1: large numbers
    {SOFTCAP, 1, 1, 1, 0, 0, 1},
    {SOFTCAP, 1001, 1, 1, 0, 1, 2},
    {SOFTCAP, 70007, 1, 1, 0, 0, 3},
    {SOFTCAP, 0, 1, 1, 0, 0, 2},
    // rows, T, C, NH, and of some kv_heads, D; variant 1: the frequencies of Llama 3.1
    {ROTARY, 1, 1, 2, 1, 0, 1},
    {ROTARY, 2, 9, 192, 3, 0, 3},
    {ROTARY, 2, 40, 96, 4, 1, 2, 2, 128},
    {ROTARY, 3, 5, 40, 6, 0, 2, 2, 80},
    {ROTARY, 1, 17, 32, 1, 1, 3, 1, 256},
    {ROTARY, 1, 5000, 16, 1, 0, 3},
    {ROTARY, 0, 9, 32, 2, 0, 2},
    // the same; variant 2 more: no gain
    {HEAD_NORM, 1, 1, 2, 1, 0, 1},
    {HEAD_NORM, 2, 9, 192, 3, 0, 3},
    {HEAD_NORM, 2, 20, 96, 4, 1, 2, 2, 128},
    {HEAD_NORM, 3, 5, 40, 6, 2, 2, 2, 80},
    {HEAD_NORM, 1, 17, 32, 3, 0, 3, 1, 96},
    {HEAD_NORM, 1, 7, 32, 1, 3, 2, 1, 256},
    {HEAD_NORM, 2, 70, 16, 2, 0, 5, 1, 16},
    {HEAD_NORM, 0, 9, 32, 2, 0, 2},
    // rows, T, C
    {RMSNORM_SAMPLES, 1, 1, 1, 0, 0, 1},
    {RMSNORM_SAMPLES, 2, 128, 9, 0, 0, 2},
    {RMSNORM_SAMPLES, 3, 7, 37, 0, 0, 3},
    {RMSNORM_SAMPLES, 2, 65, 300, 0, 0, 2},
    {RMSNORM_SAMPLES, 4, 1, 130, 0, 0, 2},
    {RMSNORM_SAMPLES, 2, 0, 20, 0, 0, 2},
    {RMSNORM_SAMPLES, 0, 7, 20, 0, 0, 2},
    // rows, T, C, NH, and of some kv_heads, D
    {HEAD_NORM_SAMPLES, 1, 1, 2, 1, 0, 1},
    {HEAD_NORM_SAMPLES, 3, 7, 192, 3, 0, 3},
    {HEAD_NORM_SAMPLES, 2, 65, 40, 6, 0, 2, 2, 80},
    {HEAD_NORM_SAMPLES, 5, 9, 32, 4, 0, 2, 2, 128},
    {HEAD_NORM_SAMPLES, 2, 17, 32, 1, 0, 2, 1, 256},
    {HEAD_NORM_SAMPLES, 2, 0, 20, 2, 0, 2},
    {HEAD_NORM_SAMPLES, 0, 7, 20, 2, 0, 2},
    // n; variant 1: the parameter is stored in bf16; 2: and rounded stochastically
    {MUON, 1, 1, 1, 0, 0, 1},
    {MUON, 997, 1, 1, 0, 1, 2},
    {MUON, 2999, 1, 1, 0, 2, 3},
    {MUON, 300007, 1, 1, 0, 0, 3},
    {MUON, 0, 1, 1, 0, 1, 2},
    // n
    {MUON_DIRECTION, 1, 1, 1, 0, 0, 1},
    {MUON_DIRECTION, 2999, 1, 1, 0, 0, 2},
    {MUON_DIRECTION, 300007, 1, 1, 0, 0, 3},
    {MUON_DIRECTION, 0, 1, 1, 0, 0, 2},
    {ADAMW_DIRECTION, 1, 1, 1, 0, 0, 1},
    {ADAMW_DIRECTION, 2999, 1, 1, 0, 0, 2},
    {ADAMW_DIRECTION, 300007, 1, 1, 0, 0, 3},
    {ADAMW_DIRECTION, 0, 1, 1, 0, 0, 2},
    // rows, -, columns; variant 1: turned
    {ORTHOGONAL_BEGIN, 1, 1, 1, 0, 0, 1},
    {ORTHOGONAL_BEGIN, 70, 1, 45, 0, 0, 2},
    {ORTHOGONAL_BEGIN, 70, 1, 45, 0, 1, 3},
    {ORTHOGONAL_BEGIN, 33, 1, 130, 0, 1, 2},
    {ORTHOGONAL_END, 1, 1, 1, 0, 1, 1},
    {ORTHOGONAL_END, 70, 1, 45, 0, 0, 2},
    {ORTHOGONAL_END, 70, 1, 45, 0, 1, 3},
    {ORTHOGONAL_END, 33, 1, 130, 0, 1, 2},
    // n; variant 1: over the first summand; 2: over the second
    {COMBINE, 1, 1, 1, 0, 0, 1},
    {COMBINE, 1001, 1, 1, 0, 1, 2},
    {COMBINE, 2999, 1, 1, 0, 2, 2},
    {COMBINE, 300007, 1, 1, 0, 0, 3},
    {COMBINE, 0, 1, 1, 0, 0, 2},
    // rows, -, columns: tiles are of about 192
    {SYMMETRIC, 1, 1, 1, 0, 0, 1},
    {SYMMETRIC, 37, 1, 130, 0, 0, 2},
    {SYMMETRIC, 130, 1, 37, 0, 0, 3},
    {SYMMETRIC, 400, 1, 33, 0, 0, 3},
    {SYMMETRIC, 611, 1, 20, 0, 0, 2},
    {SYMMETRIC, 64, 1, 96, 0, 0, 2},
    // rows, -, columns; variant: iterations
    {ORTHOGONALISE, 1, 1, 1, 0, 1, 1},
    {ORTHOGONALISE, 24, 1, 40, 0, 2, 2},
    {ORTHOGONALISE, 40, 1, 24, 0, 3, 3},
    {ORTHOGONALISE, 33, 1, 33, 0, 1, 2},
    {ORTHOGONALISE, 33, 1, 1, 0, 2, 2},
    {ORTHOGONALISE, 4, 1, 64, 0, 1, 2},
    {ORTHOGONALISE, 64, 1, 3, 0, 1, 2},
    {ORTHOGONALISE, 2, 1, 50, 0, 2, 2},
    {ORTHOGONALISE, 2, 1, 50, 0, 5, 2},
    // N = rows T, C, experts, top_k (+ 8: all tokens go to the last experts of each group, none to
    // the first; + 16: no other loss), groups, OC
    {MIXTURE, 1, 1, 1, 1, 1, 1, 1, 1},
    {MIXTURE, 2, 7, 19, 5, 2, 2, 1, 13},
    {MIXTURE, 3, 11, 40, 8, 3 + 16, 3, 1, 24},
    {MIXTURE, 2, 9, 16, 6, 1, 2, 3, 10},
    {MIXTURE, 2, 9, 24, 6, 2, 2, 2, 17},
    {MIXTURE, 3, 12, 21, 7, 1 + 8, 2, 1, 30},
    {MIXTURE, 2, 13, 20, 8, 2 + 8, 3, 2, 20},
    {MIXTURE, 2, 10, 300, 3, 3, 2, 1, 5},
    {MIXTURE, 0, 4, 8, 4, 2, 2, 1, 8},
    // on a GPU: several tiles of experts, parts of the tokens; blocks that sort; blocks of channels
    {MIXTURE, 2, 75, 12, 70, 4, 2, 1, 9},
    {MIXTURE, 3, 400, 5, 12, 2, 2, 2, 3},
    {MIXTURE, 1, 6, 1028, 4, 2, 2, 2, 3},
};
enum { CASES = sizeof cases / sizeof cases[0] };

// --- helpers -------------------------------------------------------------------------------------
// in [-1, 1)
static double uniform(uint64_t stream, int64_t i) {
    return 2.0 * random_uniform(7, stream, (uint64_t)i) - 1.0;
}
// memory that the host reaches too
#ifndef OPS_SHARED
#define OPS_SHARED ops_alloc
#endif
static float *floats(int64_t n) { return (float *)OPS_SHARED((size_t)(n ? n : 1) * sizeof(float)); }
static double *doubles(int64_t n) {
    return (double *)checked_calloc((size_t)n, sizeof(double), "doubles");
}
static int64_t positions(const Case *c) { return c->rows * c->T; }

// Workspaces are as large as asked for, so that an access behind them is found. Only one of the size
// that a GPU's library wants in production is kept: it is much more than most cases compute with.
enum { KEPT_LEAST = 32 << 20 };
static void *kept_workspace;
static void *take_workspace(size_t bytes) {
    static size_t kept_bytes;
    if (bytes < KEPT_LEAST) { return ops_alloc(bytes); }
    if (bytes > kept_bytes) {
        ops_free(kept_workspace);
        kept_workspace = ops_alloc(bytes);
        kept_bytes = bytes;
    }
    return kept_workspace;
}
static void fill_with_nan(Stream *s, char *to, size_t bytes) {
    unsigned char nan[4096];
    memset(nan, 0xff, sizeof nan);
    size_t filled = bytes < sizeof nan ? bytes : sizeof nan;
    ops_from_host(s, to, nan, filled);
    for (size_t more; filled < bytes; filled += more) {
        more = filled < bytes - filled ? filled : bytes - filled;
        ops_copy(s, to + filled, to, more);
    }
    ops_wait(s); // before `nan` goes out of scope
}

static int polls;
static void count_poll(void) { polls++; }
static DType precision = DTYPE_FP32; // of a Real
static Stream stream_of(const Case *c, int threads) {
    const bool classifier = c->op == CLASSIFIER || c->op == CLASSIFIER_KEPT;
    const bool of_heads =
        c->op == ATTENTION || c->op == ROTARY || c->op == HEAD_NORM || c->op == HEAD_NORM_SAMPLES;
    OpsShape shape = {c->rows,
                      c->T,
                      c->C,
                      of_heads ? c->other : max_i64(1, c->C),
                      classifier ? c->other : 1,
                      c->other + 3,
                      LOGITS_PLENTY,
                      c->kv_heads,
                      c->D,
                      0,
                      c->op == MIXTURE ? c->other : 0,
                      c->op == MIXTURE ? c->kv_heads * (c->variant % 8) : 0};
    Stream s = {threads, count_poll, NULL, 0, NULL};
    ops_open(&s, 0, precision);
    s.workspace_bytes = ops_workspace_bytes(shape, threads);
    s.workspace = take_workspace(s.workspace_bytes);
    fill_with_nan(&s, (char *)s.workspace, s.workspace_bytes); // nothing may be assumed of it
    return s;
}
static void free_stream(Stream *s) {
    if (s->workspace != kept_workspace) { ops_free(s->workspace); }
    ops_close(s);
}
// The driver's numbers are floats; operations want Reals. In fp32 they are the same. In bf16 a
// tensor of floats gets a copy in bf16 when an operation first asks for it (later ones get the
// same), and reals_done() brings all copies back.
static struct {
    float *floats;
    Real *reals;
    int64_t n;
} copies[16];
static int copied;
static Real *out_real(Stream *s, float *p, int64_t n) {
    if (precision == DTYPE_FP32) { return (Real *)(void *)p; }
    for (int i = 0; i < copied; i++) {
        if (copies[i].floats == p && copies[i].n == n) { return copies[i].reals; }
    }
    Real *reals = (Real *)ops_alloc((size_t)n * ops_real_bytes());
    ops_convert_float(s, reals, p, precision, n, round_to_nearest());
    assert_true(copied < (int)(sizeof copies / sizeof copies[0]));
    copies[copied].floats = p;
    copies[copied].reals = reals;
    copies[copied++].n = n;
    return reals;
}
static const Real *in_real(Stream *s, const float *p, int64_t n) {
    return out_real(s, (float *)(uintptr_t)p, n);
}
static void reals_done(Stream *s) {
    for (; copied; copied--) {
        ops_reals_to_host(s, copies[copied - 1].floats, copies[copied - 1].reals,
                          copies[copied - 1].n);
        ops_wait(s);
        ops_free(copies[copied - 1].reals);
    }
}
static int32_t *tokens_of(const Case *c, bool mask) {
    int64_t N = positions(c);
    int32_t *tokens = (int32_t *)(void *)floats(N);
    for (int64_t i = 0; i < N; i++) {
        tokens[i] = (int32_t)(random_u64(3, 1, (uint64_t)i) % (uint64_t)c->other);
        if (mask && (c->variant == 2 || (c->variant % 2 && i % 3 == 0))) { tokens[i] = -1; }
    }
    return tokens;
}
static double gelu_double(double x) {
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

// --- the operations: sizes, reference, run -------------------------------------------------------
static void embedding_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = (c->other + 3) * c->C;
    in[1] = c->variant == 2 ? 0 : (c->T + 2) * c->C;
    *out = positions(c) * c->C;
}
static void embedding_reference(const Case *c, double **in, double *out) {
    int32_t *tokens = tokens_of(c, false);
    for (int64_t n = 0; n < positions(c); n++) {
        for (int64_t i = 0; i < c->C; i++) {
            out[n * c->C + i] =
                in[0][tokens[n] * c->C + i] + (c->variant == 2 ? 0.0 : in[1][n % c->T * c->C + i]);
        }
    }
    ops_free(tokens);
}
static void embedding_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                          float **grad, bool accumulate) {
    int32_t *tokens = tokens_of(c, false);
    const int64_t n = positions(c) * c->C;
    const bool none = c->variant == 2;
    const int calls = none ? 0 : c->variant;
    ops_embedding_forward(s, out_real(s, out, n), tokens, in_real(s, in[0], (c->other + 3) * c->C),
                          none ? NULL : in_real(s, in[1], (c->T + 2) * c->C), c->rows, c->T, c->C);
    float *again = floats((c->other + 3) * c->C);
    for (int apart = 0; apart <= calls; apart++) {
        ops_embedding_backward(s, apart ? again : grad[0], apart == calls && !none ? grad[1] : NULL,
                               in_real(s, dout, n), tokens, NULL, c->rows, c->T, c->C, c->other + 3,
                               c->T + 2, accumulate, accumulate);
    }
    ops_wait(s);
    ops_free(tokens);
    ops_free(again);
}

// out: sum | normalised | mean | rstd (the last two take no gradient)
static void layernorm_sizes(const Case *c, int64_t *in, int64_t *out) {
    int64_t N = positions(c), C = c->C;
    in[0] = N * C;
    in[1] = c->variant ? N * C : 0;
    in[2] = C;
    in[3] = C;
    *out = 2 * N * C + 2 * N;
}
static void layernorm_reference(const Case *c, double **in, double *out) {
    int64_t N = positions(c), C = c->C;
    for (int64_t n = 0; n < N; n++) {
        double mean = 0.0, variance = 0.0, *sum = out + n * C;
        for (int64_t i = 0; i < C; i++) {
            mean += (sum[i] = in[0][n * C + i] + (c->variant ? in[1][n * C + i] : 0.0)) / (double)C;
        }
        for (int64_t i = 0; i < C; i++) {
            variance += (sum[i] - mean) * (sum[i] - mean) / (double)C;
        }
        double rstd = 1.0 / sqrt(variance + 1e-5);
        for (int64_t i = 0; i < C; i++) {
            out[(N + n) * C + i] = (sum[i] - mean) * rstd * in[2][i] + in[3][i];
        }
        out[2 * N * C + n] = mean;
        out[2 * N * C + N + n] = rstd;
    }
}
// Returns where the gradient of a normalised value goes. before = the residual path's: in the same
// place, or elsewhere.
static Real *residual_path(const Case *c, Stream *s, float *din, const float *dout,
                           const Real **before) {
    const int64_t n = positions(c) * c->C;
    if (c->variant % 2) {
        *before = in_real(s, dout, n);
        return out_real(s, din, n);
    }
    ops_copy(s, din, dout, (size_t)n * sizeof(float));
    Real *same = out_real(s, din, n);
    *before = same;
    return same;
}
static void layernorm_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                          float **grad, bool accumulate) {
    int64_t N = positions(c), C = c->C, n = N * C;
    float *mean = out + 2 * n, *rstd = mean + N;
    // sum is a, or is not written at all
    if (c->variant != 1) { ops_copy(s, out, in[0], (size_t)n * sizeof(float)); }
    Real *sum = out_real(s, out, n);
    const Real *weight = in_real(s, in[2], C), *dy = in_real(s, dout + n, n), *before;
    Real *din = residual_path(c, s, grad[0], dout, &before);
    ops_layernorm_forward(s, out_real(s, out + n, n), mean, rstd, c->variant ? sum : NULL,
                          c->variant == 2 ? sum : in_real(s, in[0], n),
                          c->variant ? in_real(s, in[1], n) : NULL, weight, in_real(s, in[3], C), N,
                          C);
    ops_layernorm_backward_input(s, din, before, dy, sum, weight, mean, rstd, N, C);
    ops_layernorm_backward_weight(s, grad[2], grad[3], dy, sum, mean, rstd, N, C, accumulate);
    reals_done(s);
    if (c->variant) { ops_copy(s, grad[1], grad[0], (size_t)n * sizeof(float)); }
}

// in: x (or, for variant 2, what GELU is taken of to get x), weight, bias; out: product | GELU of
// it (no gradient asked)
static void matmul_sizes(const Case *c, int64_t *in, int64_t *out) {
    int64_t N = positions(c);
    in[0] = N * c->C;
    in[1] = c->other * c->C;
    in[2] = c->variant == 1 ? 0 : c->other;
    *out = N * c->other * (c->variant == 2 ? 2 : 1);
}
static void matmul_reference(const Case *c, double **in, double *out) {
    int64_t N = positions(c), C = c->C, OC = c->other;
    for (int64_t n = 0; n < N; n++) {
        for (int64_t o = 0; o < OC; o++) {
            double sum = c->variant == 1 ? 0.0 : in[2][o];
            for (int64_t i = 0; i < C; i++) {
                sum += (c->variant == 2 ? in[3][n * C + i] : in[0][n * C + i]) * in[1][o * C + i];
            }
            out[n * OC + o] = sum;
            if (c->variant == 2) { out[(N + n) * OC + o] = gelu_double(sum); }
        }
    }
}
// GELU once per element, not once per product
static void matmul_reference_gelu(const Case *c, double **in, double *out) {
    double *with_x[INPUTS] = {in[0], in[1], in[2], doubles(positions(c) * c->C)};
    for (int64_t i = 0; i < positions(c) * c->C && c->variant == 2; i++) {
        with_x[3][i] = gelu_double(in[0][i]);
    }
    matmul_reference(c, with_x, out);
    free(with_x[3]);
}
// Writes the last row of an odd number of them once more, as a row alone.
static void matmul_row(const Case *c, Stream *s, Real *out, Real *gelu, const Real *in,
                       const Real *weight, const Real *bias) {
    const int64_t row = positions(c) - 1;
    if (row % 2) { return; }
    ops_vector_forward(s, real_at(out, row * c->other), gelu ? real_at(gelu, row * c->other) : NULL,
                       real_at_const(in, row * c->C), weight, bias, c->C, c->other);
}
static void matmul_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                       float **grad, bool accumulate) {
    int64_t N = positions(c), C = c->C, OC = c->other;
    float *x = floats(N * C);
    for (int64_t i = 0; i < N * C; i++) {
        x[i] = c->variant == 2 ? (float)gelu_double(in[0][i]) : in[0][i];
    }
    const Real *input = in_real(s, x, N * C), *weight = in_real(s, in[1], OC * C),
               *dy = in_real(s, dout, N * OC);
    Real *y = out_real(s, out, N * OC),
         *gelu = c->variant == 2 ? out_real(s, out + N * OC, N * OC) : NULL;
    const Real *bias = c->variant == 1 ? NULL : in_real(s, in[2], OC);
    ops_matmul_forward(s, y, gelu, input, weight, bias, N, C, OC);
    matmul_row(c, s, y, gelu, input, weight, bias);
    ops_matmul_backward_input(s, out_real(s, grad[0], N * C), dy, weight,
                              c->variant == 2 ? in_real(s, in[0], N * C) : NULL, N, C, OC);
    ops_matmul_backward_weight(s, grad[1], c->variant == 1 ? NULL : grad[2], dy, input, N, C, OC,
                               accumulate);
    reals_done(s);
    ops_free(x);
}

static void residual_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[1] = *out = c->rows;
}
static void residual_reference(const Case *c, double **in, double *out) {
    for (int64_t i = 0; i < c->rows; i++) { out[i] = in[0][i] + in[1][i]; }
}
static void residual_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                         float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    if (c->variant) { ops_copy(s, out, in[0], (size_t)c->rows * sizeof(float)); } // in place
    ops_residual(s, out_real(s, out, c->rows), in_real(s, c->variant ? out : in[0], c->rows),
                 in_real(s, in[1], c->rows), c->rows);
}

static AttentionShape attention_of(const Case *c) {
    const AttentionShape a = {
        .rows = c->rows,
        .T = c->T,
        .heads = c->other,
        .kv_heads = c->kv_heads ? c->kv_heads : c->other,
        .D = c->D ? c->D : c->C / max_i64(1, c->other),
    };
    return a;
}
// in: qkv; out: attention | lse (no gradient asked)
static void attention_sizes(const Case *c, int64_t *in, int64_t *out) {
    const AttentionShape a = attention_of(c);
    in[0] = positions(c) * attention_qkv_width(a);
    *out = positions(c) * (attention_q_width(a) + a.heads);
}
// One query: out(D), and its log-sum-exp. q, k and v are its head in the sequence's first row.
static double attention_query(AttentionShape a, double *out, const double *q, const double *k,
                              const double *v, int64_t t, double *p) {
    const int64_t W = attention_qkv_width(a);
    double top = -INFINITY, sum = 0.0;
    for (int64_t u = 0; u <= t; u++) {
        p[u] = 0.0;
        for (int64_t d = 0; d < a.D; d++) {
            p[u] += q[t * W + d] * k[u * W + d] / sqrt((double)a.D);
        }
        top = fmax(top, p[u]);
    }
    for (int64_t u = 0; u <= t; u++) { sum += (p[u] = exp(p[u] - top)); }
    for (int64_t d = 0; d < a.D; d++) {
        out[d] = 0.0;
        for (int64_t u = 0; u <= t; u++) { out[d] += p[u] / sum * v[u * W + d]; }
    }
    return top + log(sum);
}
static void attention_reference(const Case *c, double **in, double *out) {
    const AttentionShape a = attention_of(c);
    double *p = doubles(a.T), *lse = out + positions(c) * attention_q_width(a);
    for (int64_t b = 0; b < a.rows; b++) {
        for (int64_t h = 0; h < a.heads; h++) {
            const double *row = in[0] + b * a.T * attention_qkv_width(a), *q = row + h * a.D,
                         *k = row + (a.heads + h / (a.heads / a.kv_heads)) * a.D,
                         *v = k + a.kv_heads * a.D;
            for (int64_t t = 0; t < a.T; t++) {
                lse[(b * a.heads + h) * a.T + t] = attention_query(
                    a, out + (b * a.T + t) * attention_q_width(a) + h * a.D, q, k, v, t, p);
            }
        }
    }
    free(p);
}
// Writes the last queries of each second row once more, from keys and values that are kept: those
// of the first positions first, then those of the queries.
static void attention_again(Stream *s, Real *out, const Real *qkv, AttentionShape a) {
    AttentionShape first = a, last = a;
    first.rows = last.rows = 1;
    last.T = min_i64(a.T, 3);
    first.T = last.first = a.T - last.T;
    const int64_t half = key_cache_elements(a, a.T + 2) / 2;
    Real *kept = (Real *)ops_alloc(2 * (size_t)half * ops_real_bytes());
    const KeyCache cache = {.keys = kept, .values = real_at(kept, half), .most = a.T + 2};
    for (int64_t row = 1; row < a.rows; row += 2) {
        const Real *of_row = real_at_const(qkv, row * a.T * attention_qkv_width(a)),
                   *queries = real_at_const(of_row, first.T * attention_qkv_width(a));
        if (first.T) { ops_keep_keys(s, cache, of_row, first); }
        ops_keep_keys(s, cache, queries, last);
        ops_attention_kept(s, real_at(out, (row * a.T + first.T) * attention_q_width(a)), queries,
                           cache, last);
    }
    ops_wait(s);
    ops_free(kept);
}
static void attention_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                          float **grad, bool accumulate) {
    (void)accumulate;
    const AttentionShape a = attention_of(c);
    const int64_t n = positions(c) * attention_q_width(a),
                  wide = positions(c) * attention_qkv_width(a);
    float *lse = out + n;
    Real *attended = out_real(s, out, n);
    const Real *qkv = in_real(s, in[0], wide);
    ops_attention_forward(s, attended, lse, qkv, a);
    attention_again(s, attended, qkv, a);
    ops_attention_backward(s, out_real(s, grad[0], wide), in_real(s, dout, n), qkv, attended, lse,
                           a);
}

// in: x, wte; out: losses. dout is the scale of every row.
enum { SCALE_EIGHTHS = 3, CAPPED = 4 };
static float softcap_of(const Case *c) { return c->variant & CAPPED ? 2.5f : 0.0f; }
static double capped(const Case *c, double logit) {
    const double cap = (double)softcap_of(c);
    return c->variant & CAPPED ? cap * tanh(logit / cap) : logit;
}
static void classifier_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = positions(c) * c->C;
    in[1] = (c->other + 3) * c->C;
    *out = positions(c);
}
static void classifier_reference(const Case *c, double **in, double *out) {
    int32_t *targets = tokens_of(c, true);
    double *logits = doubles(c->other);
    for (int64_t n = 0; n < positions(c); n++) {
        double top = -INFINITY, sum = 0.0;
        out[n] = 0.0;
        if (targets[n] < 0) { continue; }
        for (int64_t v = 0; v < c->other; v++) {
            logits[v] = 0.0;
            for (int64_t i = 0; i < c->C; i++) {
                logits[v] += in[0][n * c->C + i] * in[1][v * c->C + i];
            }
            logits[v] = capped(c, logits[v]);
            top = fmax(top, logits[v]);
        }
        for (int64_t v = 0; v < c->other; v++) { sum += exp(logits[v] - top); }
        out[n] = top + log(sum) - logits[targets[n]];
    }
    ops_free(targets);
    free(logits);
}
static void classifier_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                           float **grad, bool accumulate) {
    (void)dout;
    int32_t *targets = tokens_of(c, true);
    int64_t N = positions(c), Vp = c->other + 3;
    float *alone = floats(N);
    const Real *x = in_real(s, in[0], N * c->C), *wte = in_real(s, in[1], Vp * c->C);
    ops_classifier(s, out, out_real(s, grad[0], N * c->C), grad[1], NULL, x, wte, targets, N, N,
                   c->C, c->other, Vp, SCALE_EIGHTHS / 8.0f, softcap_of(c), accumulate);
    ops_classifier(s, alone, NULL, NULL, NULL, x, wte, targets, N, N, c->C, c->other, Vp, 0.0f,
                   softcap_of(c), false);
    ops_wait(s);
    assert_memory_equal(alone, out, (size_t)N * sizeof(float)); // losses only: the same losses
    ops_free(alone);
    ops_free(targets);
}

// out: losses | dlogits (no gradient asked)
static void kept_sizes(const Case *c, int64_t *in, int64_t *out) {
    classifier_sizes(c, in, out);
    *out += positions(c) * (c->other + 3);
}
static void kept_reference(const Case *c, double **in, double *out) {
    const int64_t N = positions(c), Vp = c->other + 3;
    int32_t *targets = tokens_of(c, true);
    classifier_reference(c, in, out);
    memset(out + N, 0, (size_t)(N * Vp) * sizeof(double));
    for (int64_t n = 0; n < N; n++) {
        double *logits = out + N + n * Vp, target = 0.0;
        for (int64_t v = 0; v < c->other && targets[n] >= 0; v++) {
            for (int64_t i = 0; i < c->C; i++) {
                logits[v] += in[0][n * c->C + i] * in[1][v * c->C + i];
            }
            target = v == targets[n] ? capped(c, logits[v]) : target;
        }
        // log p = logit - (the target's + the loss)
        for (int64_t v = 0; v < c->other && targets[n] >= 0; v++) {
            const double logit = capped(c, logits[v]),
                         slope =
                             1.0 -
                             (c->variant & CAPPED ? pow(logit / (double)softcap_of(c), 2.0) : 0.0);
            logits[v] =
                SCALE_EIGHTHS / 8.0 * slope * (exp(logit - target - out[n]) - (v == targets[n]));
        }
    }
    ops_free(targets);
}
// The samples' own dwte, made by one call, are those of calls for each alone: to rounding, as rows
// may be cut elsewhere.
static void check_own_dwte(const Case *c, Stream *s, const Real *x, const Real *wte,
                           const int32_t *targets, int64_t Vp) {
    const int64_t C = c->C, n = Vp * C;
    float *losses = floats(positions(c)), *own = floats(c->rows * n), *alone = floats(n);
    ops_classifier(s, losses, NULL, own, NULL, x, wte, targets, positions(c), c->T, C, c->other, Vp,
                   1.0f, softcap_of(c), false);
    for (int64_t b = 0; b < c->rows; b++) {
        ops_classifier(s, losses, NULL, alone, NULL, real_at_const(x, b * c->T * C), wte,
                       targets + b * c->T, c->T, c->T, C, c->other, Vp, 1.0f, softcap_of(c), false);
        ops_wait(s);
        for (int64_t i = 0; i < n; i++) {
            if (!(fabsf(alone[i] - own[b * n + i]) <= 1e-5f * (1.0f + fabsf(alone[i])))) {
                fail_msg("sample %d element %d: %g, alone %g", (int)b, (int)i, own[b * n + i],
                         alone[i]);
            }
        }
    }
    ops_free(losses);
    ops_free(own);
    ops_free(alone);
}
static void kept_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                     float **grad, bool accumulate) {
    (void)dout;
    int32_t *targets = tokens_of(c, true);
    const int64_t N = positions(c), C = c->C, V = c->other, Vp = V + 3;
    const Real *x = in_real(s, in[0], N * C), *wte = in_real(s, in[1], Vp * C);
    Real *dx = out_real(s, grad[0], N * C), *dlogits = out_real(s, out + N, N * Vp);
    const float scale = SCALE_EIGHTHS / 8.0f, cap = softcap_of(c);
    if (c->variant % 4 == 3) {
        ops_classifier(s, out, dx, NULL, NULL, x, wte, targets, N, N, C, V, Vp, scale, cap,
                       accumulate);
        ops_classifier(s, out, NULL, grad[1], NULL, x, wte, targets, N, N, C, V, Vp, scale, cap,
                       accumulate);
        ops_classifier(s, out, NULL, NULL, dlogits, x, wte, targets, N, N, C, V, Vp, scale, cap,
                       accumulate);
    } else {
        ops_classifier(s, out, dx, grad[1], dlogits, x, wte, targets, N, N, C, V, Vp, scale, cap,
                       accumulate);
    }
    ops_wait(s);
    if (N) { check_own_dwte(c, s, x, wte, targets, Vp); }
    ops_free(targets);
}

static const OptimizerStep optimizer_step = {0.01f, 0.9f, 0.95f, 1e-8f,        0.1f,
                                             0.8f,  0.5f, 3,     {false, 0, 0}},
                           stochastic = {
                               0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.8f, 0.5f, 3, {true, 12345, 678}};
static OptimizerStep step_of(const Case *c) {
    OptimizerStep o = c->variant == 2 ? stochastic : optimizer_step;
    o.nesterov = c->variant == LOOKS_AHEAD;
    return o;
}
static bool is_rounded(const Case *c) { return c->variant && c->variant != LOOKS_AHEAD; }
static void check_rounded(const Case *c, const float *master, const uint16_t *param) {
    for (int64_t i = 0; i < c->rows && is_rounded(c); i++) {
        assert_int_equal(param[i], c->variant == 2
                                       ? round_stochastic(master[i], stochastic.rounding, i)
                                       : float_to_bf16(master[i]));
    }
}
// in: parameter, m, v (taken positive), gradient; out: parameter | m | v
static void adamw_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[1] = in[2] = in[3] = c->rows;
    *out = 3 * c->rows;
}
static void adamw_reference(const Case *c, double **in, double *out) {
    OptimizerStep o = optimizer_step;
    for (int64_t i = 0; i < c->rows; i++) {
        double g = in[3][i] * (double)o.grad_scale, b1 = (double)o.beta1, b2 = (double)o.beta2;
        double m = b1 * in[1][i] + (1.0 - b1) * g, v = b2 * fabs(in[2][i]) + (1.0 - b2) * g * g;
        double used = c->variant == LOOKS_AHEAD ? b1 * m + (1.0 - b1) * g : m;
        double root = sqrt(v / (1.0 - pow(b2, 3.0)));
        double update = used / (1.0 - pow(b1, 3.0)) / (root + (double)o.eps);
        out[i] = in[0][i] - (double)o.lr * (update + (double)o.weight_decay * in[0][i]);
        out[c->rows + i] = m;
        out[2 * c->rows + i] = v;
    }
}
static UpdateSlice slice_of(const Case *c, float *out, const float *grad, uint16_t *param) {
    const int64_t n = c->rows;
    const UpdateSlice u = {
        .master = out,
        .moment = {out + n, out + 2 * n},
        .grad = grad,
        .param = is_rounded(c) ? (void *)param : out,
        .dtype = is_rounded(c) ? DTYPE_BF16 : DTYPE_FP32,
        .n = n,
    };
    return u;
}
static void adamw_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                      float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    int64_t n = c->rows;
    uint16_t *param = (uint16_t *)(void *)floats(n);
    for (int64_t i = 0; i < n; i++) {
        out[i] = in[0][i];
        out[n + i] = in[1][i];
        out[2 * n + i] = fabsf(in[2][i]);
    }
    ops_adamw(s, slice_of(c, out, in[3], param), step_of(c));
    ops_wait(s);
    check_rounded(c, out, param);
    ops_free(param);
}
// in: parameter, b, gradient; out: parameter | b
static void sgd_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[1] = in[2] = c->rows;
    *out = 2 * c->rows;
}
static void sgd_reference(const Case *c, double **in, double *out) {
    OptimizerStep o = optimizer_step;
    for (int64_t i = 0; i < c->rows; i++) {
        double g = in[2][i] * (double)o.grad_scale + (double)o.weight_decay * in[0][i];
        double b = (double)o.momentum * in[1][i] + g;
        double used = c->variant == LOOKS_AHEAD ? (double)o.momentum * b + g : b;
        out[i] = in[0][i] - (double)o.lr * used;
        out[c->rows + i] = b;
    }
}
static void sgd_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                    float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    int64_t n = c->rows;
    uint16_t *param = (uint16_t *)(void *)floats(n);
    for (int64_t i = 0; i < n; i++) {
        out[i] = in[0][i];
        out[n + i] = in[1][i];
    }
    ops_sgd(s, slice_of(c, out, in[2], param), step_of(c));
    ops_wait(s);
    check_rounded(c, out, param);
    ops_free(param);
}

// --- Muon ----------------------------------------------------------------------------------------
// in: parameter, direction; out: parameter
static void muon_sizes(const Case *c, int64_t *in, int64_t *out) { in[0] = in[1] = *out = c->rows; }
static void muon_reference(const Case *c, double **in, double *out) {
    const OptimizerStep o = optimizer_step;
    for (int64_t i = 0; i < c->rows; i++) {
        const double scaled = in[1][i] * (double)o.grad_scale;
        out[i] = in[0][i] - (double)o.lr * ((double)o.weight_decay * in[0][i] + scaled);
    }
}
static void muon_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                     float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    uint16_t *param = (uint16_t *)(void *)floats(c->rows);
    ops_copy(s, out, in[0], (size_t)c->rows * sizeof(float));
    ops_muon(s, slice_of(c, out, in[1], param), step_of(c));
    ops_wait(s);
    check_rounded(c, out, param);
    ops_free(param);
}
// in: m, gradient; out: direction | m
static void muon_direction_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[1] = c->rows;
    *out = 2 * c->rows;
}
static void muon_direction_reference(const Case *c, double **in, double *out) {
    const double mu = (double)optimizer_step.momentum;
    for (int64_t i = 0; i < c->rows; i++) {
        const double g = in[1][i] * (double)optimizer_step.grad_scale,
                     m = mu * in[0][i] + (1.0 - mu) * g;
        out[i] = (1.0 - mu) * g + mu * m;
        out[c->rows + i] = m;
    }
}
static void muon_direction_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                               float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const UpdateSlice u = {.moment = {out + c->rows}, .grad = in[1], .n = c->rows};
    ops_copy(s, out + c->rows, in[0], (size_t)c->rows * sizeof(float));
    ops_muon_direction(s, out, u, optimizer_step);
}
// in: m, v (taken positive), gradient; out: direction | m | v
static void adamw_direction_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[1] = in[2] = c->rows;
    *out = 3 * c->rows;
}
static void adamw_direction_reference(const Case *c, double **in, double *out) {
    const OptimizerStep o = optimizer_step;
    const double b1 = (double)o.beta1, b2 = (double)o.beta2;
    for (int64_t i = 0; i < c->rows; i++) {
        const double g = in[2][i] * (double)o.grad_scale, m = b1 * in[0][i] + (1.0 - b1) * g,
                     v = b2 * fabs(in[1][i]) + (1.0 - b2) * g * g;
        out[i] = m / (1.0 - pow(b1, 3.0)) / (sqrt(v / (1.0 - pow(b2, 3.0))) + (double)o.eps);
        out[c->rows + i] = m;
        out[2 * c->rows + i] = v;
    }
}
static void adamw_direction_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                                float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t n = c->rows;
    const UpdateSlice u = {.moment = {out + n, out + 2 * n}, .grad = in[2], .n = n};
    for (int64_t i = 0; i < n; i++) {
        out[n + i] = in[0][i];
        out[2 * n + i] = fabsf(in[1][i]);
    }
    ops_adamw_direction(s, out, u, optimizer_step);
}
// in: matrix; out: the same divided by its norm, or turned
static void matrix_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = *out = c->rows * c->C;
}
static double norm_of_matrix(const Case *c, const double *x) {
    double squares = 0.0;
    for (int64_t i = 0; i < c->rows * c->C; i++) { squares += x[i] * x[i]; }
    return fmax(sqrt(squares), 1e-7);
}
static void orthogonal_begin_reference(const Case *c, double **in, double *out) {
    const double norm = norm_of_matrix(c, in[0]);
    for (int64_t r = 0; r < c->rows; r++) {
        for (int64_t k = 0; k < c->C; k++) {
            out[c->variant ? k * c->rows + r : r * c->C + k] = in[0][r * c->C + k] / norm;
        }
    }
}
static void orthogonal_begin_run(const Case *c, Stream *s, float **in, float *out,
                                 const float *dout, float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t n = c->rows * c->C;
    ExactSum *squares = (ExactSum *)ops_alloc(sizeof *squares);
    ops_square_sum(s, squares, in[0], n, 64, 1);
    ops_orthogonal_begin(s, out_real(s, out, n), in[0], squares, c->rows, c->C, c->variant);
    ops_wait(s);
    ops_free(squares);
}
static void orthogonal_end_reference(const Case *c, double **in, double *out) {
    for (int64_t r = 0; r < c->rows; r++) {
        for (int64_t k = 0; k < c->C; k++) {
            out[r * c->C + k] = in[0][c->variant ? k * c->rows + r : r * c->C + k];
        }
    }
}
static void orthogonal_end_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                               float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    ops_orthogonal_end(s, out, in_real(s, in[0], c->rows * c->C), c->rows, c->C, c->variant);
}
// in: x, y
static const float combine_a = -4.775f, combine_b = 2.0315f;
static void combine_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[1] = *out = c->rows;
}
static void combine_reference(const Case *c, double **in, double *out) {
    for (int64_t i = 0; i < c->rows; i++) {
        out[i] = (double)combine_a * in[0][i] + (double)combine_b * in[1][i];
    }
}
static void combine_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                        float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t n = c->rows;
    if (c->variant) { ops_copy(s, out, in[c->variant - 1], (size_t)n * sizeof(float)); }
    ops_combine(s, out_real(s, out, n), combine_a, in_real(s, c->variant == 1 ? out : in[0], n),
                combine_b, in_real(s, c->variant == 2 ? out : in[1], n), n);
}
static void symmetric_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = c->rows * c->C;
    *out = c->rows * c->rows;
}
// out(rows, rows) = x(rows, cols) x^T
static void symmetric_product(double *out, const double *x, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t q = 0; q < rows; q++) {
            double sum = 0.0;
            for (int64_t k = 0; k < cols; k++) { sum += x[r * cols + k] * x[q * cols + k]; }
            out[r * rows + q] = sum;
        }
    }
}
static void symmetric_reference(const Case *c, double **in, double *out) {
    symmetric_product(out, in[0], c->rows, c->C);
}
static void symmetric_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                          float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    ops_matmul_symmetric(s, out_real(s, out, c->rows * c->rows), in_real(s, in[0], c->rows * c->C),
                         c->rows, c->C);
}
// X = a X + (b A + c A A) X with A = X X^T, of a matrix that is not turned. What the program stores
// as a Real is rounded here too, so that in bf16 nothing is left but sums whose last bits decide
// which neighbour a number is rounded to: 4 roundings of the largest number are allowed, where a
// coefficient that is wrong by 0.01 makes 9.
static float number(double x);
static void orthogonalise_reference(const Case *c, double **in, double *out) {
    const int64_t R = c->rows, C = c->C, n = R * C;
    // a matrix that the program turns has its products over the rows: A is (C, C)
    const bool turned = R > C;
    const int64_t M = turned ? C : R, N = turned ? R : C;
    double *x = doubles(n), *a = doubles(M * M), *b = doubles(M * M), *next = doubles(n);
    const double norm = norm_of_matrix(c, in[0]);
    for (int64_t i = 0; i < n; i++) {
        x[i] = (double)number(in[0][turned ? i % N * C + i / N : i] / norm);
    }
    for (int step = 0; step < c->variant; step++) {
        symmetric_product(a, x, M, N);
        for (int64_t i = 0; i < M * M; i++) { a[i] = (double)number(a[i]); }
        symmetric_product(b, a, M, M);
        for (int64_t i = 0; i < M * M; i++) {
            b[i] = (double)number(-4.775 * a[i] + 2.0315 * (double)number(b[i]));
        }
        for (int64_t i = 0; i < n; i++) {
            next[i] = 0.0;
            for (int64_t k = 0; k < M; k++) { next[i] += b[i / N * M + k] * x[k * N + i % N]; }
        }
        for (int64_t i = 0; i < n; i++) {
            x[i] = (double)number(3.4445 * x[i] + (double)number(next[i]));
        }
    }
    for (int64_t i = 0; i < n; i++) { out[turned ? i % N * C + i / N : i] = x[i]; }
    free(x);
    free(a);
    free(b);
    free(next);
}
static void orthogonalise_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                              float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t bytes = orthogonalise_bytes(c->rows, c->C, precision);
    void *scratch = ops_alloc((size_t)bytes);
    ops_copy(s, out, in[0], (size_t)(c->rows * c->C) * sizeof(float));
    orthogonalise(s, out, c->rows, c->C, c->variant, precision, scratch);
    ops_wait(s);
    ops_free(scratch);
}

// --- privacy: the results of a sample lie together, its norm first, in two floats ----------------
enum { NORM_FLOATS = 2 };
static const double norm_before = 0.25; // is added to
static double *norms_before(const Case *c) {
    double *norms = (double *)(void *)floats(2 * c->rows);
    for (int64_t b = 0; b < c->rows; b++) { norms[b] = norm_before; }
    return norms;
}
// `share` brings a norm to the size of the sums beside it.
static void put_norms(const Case *c, Stream *s, float *out, double *norms, int64_t sums,
                      double share) {
    ops_wait(s);
    for (int64_t b = 0; b < c->rows; b++) {
        float *result = out + b * (NORM_FLOATS + sums);
        result[0] = (float)(norms[b] * share);
        result[1] = (float)(norms[b] * share - (double)result[0]);
    }
    ops_free(norms);
}
static void put_sums(const Case *c, float *out, int64_t at, int64_t sums, const float *from,
                     int64_t n) {
    for (int64_t b = 0; b < c->rows; b++) {
        memcpy(out + b * (NORM_FLOATS + sums) + NORM_FLOATS + at, from + b * n,
               (size_t)n * sizeof(float));
    }
}
static void reference_norm(double *result, double squares, double share) {
    result[0] = (norm_before + squares) * share;
    result[1] = 0.0;
}
static double squares_of(const double *x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) { sum += x[i] * x[i]; }
    return sum;
}

// in: dout, in
static void matmul_norms_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = positions(c) * c->other;
    in[1] = positions(c) * c->C;
    *out = NORM_FLOATS * c->rows;
}
static void matmul_norms_reference(const Case *c, double **in, double *out) {
    const int64_t T = c->T, C = c->C, OC = c->other;
    double *gradient = doubles(OC * C);
    for (int64_t b = 0; b < c->rows; b++) {
        memset(gradient, 0, (size_t)(OC * C) * sizeof(double));
        for (int64_t n = b * T; n < (b + 1) * T; n++) {
            for (int64_t o = 0; o < OC; o++) {
                for (int64_t i = 0; i < C; i++) {
                    gradient[o * C + i] += in[0][n * OC + o] * in[1][n * C + i];
                }
            }
        }
        reference_norm(out + NORM_FLOATS * b, squares_of(gradient, OC * C), 1.0);
    }
    free(gradient);
}
static void matmul_norms_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                             float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t N = positions(c);
    double *norms = norms_before(c);
    ops_matmul_sample_norms(s, norms, in_real(s, in[0], N * c->other), in_real(s, in[1], N * c->C),
                            c->rows, c->T, c->C, c->other);
    put_norms(c, s, out, norms, 0, 1.0);
}

// in: dout; out, of each sample: norm | sums
static void bias_samples_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = positions(c) * c->other;
    *out = c->rows * (NORM_FLOATS + c->other);
}
static void bias_samples_reference(const Case *c, double **in, double *out) {
    for (int64_t b = 0; b < c->rows; b++) {
        double *result = out + b * (NORM_FLOATS + c->other), *sums = result + NORM_FLOATS;
        memset(sums, 0, (size_t)c->other * sizeof(double));
        for (int64_t t = 0; t < c->T; t++) {
            for (int64_t o = 0; o < c->other; o++) {
                sums[o] += in[0][(b * c->T + t) * c->other + o];
            }
        }
        reference_norm(result, squares_of(sums, c->other), 1.0 / (double)c->other);
    }
}
static void bias_samples_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                             float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    double *norms = norms_before(c);
    float *sums = floats(c->rows * c->other);
    memset(sums, 0xff, (size_t)(c->rows * c->other) * sizeof(float));
    ops_bias_samples(s, sums, norms, in_real(s, in[0], positions(c) * c->other), c->rows, c->T,
                     c->other);
    put_norms(c, s, out, norms, c->other, 1.0 / (double)c->other);
    put_sums(c, out, 0, c->other, sums, c->other);
    ops_free(sums);
}

// in: dout, in, mean, rstd; out, of each sample: norm | dweight | dbias
static void layernorm_samples_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[1] = positions(c) * c->C;
    in[2] = in[3] = positions(c);
    *out = c->rows * (NORM_FLOATS + 2 * c->C);
}
static void layernorm_samples_reference(const Case *c, double **in, double *out) {
    const int64_t C = c->C;
    for (int64_t b = 0; b < c->rows; b++) {
        double *result = out + b * (NORM_FLOATS + 2 * C), *sums = result + NORM_FLOATS;
        memset(sums, 0, (size_t)(2 * C) * sizeof(double));
        for (int64_t n = b * c->T; n < (b + 1) * c->T; n++) {
            for (int64_t i = 0; i < C; i++) {
                sums[i] += in[0][n * C + i] * (in[1][n * C + i] - in[2][n]) * in[3][n];
                sums[C + i] += in[0][n * C + i];
            }
        }
        reference_norm(result, squares_of(sums, 2 * C), 0.5 / (double)C);
    }
}
static void layernorm_samples_run(const Case *c, Stream *s, float **in, float *out,
                                  const float *dout, float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t n = positions(c) * c->C;
    double *norms = norms_before(c);
    float *dweights = floats(c->rows * c->C), *dbiases = floats(c->rows * c->C);
    memset(dweights, 0xff, (size_t)(c->rows * c->C) * sizeof(float));
    memset(dbiases, 0xff, (size_t)(c->rows * c->C) * sizeof(float));
    ops_layernorm_samples(s, dweights, dbiases, norms, in_real(s, in[0], n), in_real(s, in[1], n),
                          in[2], in[3], c->rows, c->T, c->C);
    put_norms(c, s, out, norms, 2 * c->C, 0.5 / (double)c->C);
    put_sums(c, out, 0, 2 * c->C, dweights, c->C);
    put_sums(c, out, c->C, 2 * c->C, dbiases, c->C);
    ops_free(dweights);
    ops_free(dbiases);
}

// in: dout, numbers that tokens are made of
static int32_t token_of(const Case *c, double number) {
    return c->variant == 1 ? (int32_t)(c->other - 1)
                           : (int32_t)((number / 1.5 + 1.0) / 2.0 * 0.999 * (double)c->other);
}
static int32_t *tokens_from(const Case *c, const float *numbers) {
    int32_t *tokens = (int32_t *)(void *)floats(positions(c));
    for (int64_t n = 0; n < positions(c); n++) { tokens[n] = token_of(c, (double)numbers[n]); }
    return tokens;
}
static void embedding_norms_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = positions(c) * c->C;
    in[1] = positions(c);
    *out = NORM_FLOATS * c->rows;
}
// squares of the positions, and products of rows of the same token
static void embedding_norms_reference(const Case *c, double **in, double *out) {
    for (int64_t b = 0; b < c->rows; b++) {
        const double *dout = in[0] + b * c->T * c->C, *numbers = in[1] + b * c->T;
        double squares = c->variant < 2 ? squares_of(dout, c->T * c->C) : 0.0;
        for (int64_t t = 0; t < c->T; t++) {
            for (int64_t u = 0; u < c->T; u++) {
                for (int64_t i = 0; i < c->C && token_of(c, numbers[t]) == token_of(c, numbers[u]);
                     i++) {
                    squares += dout[t * c->C + i] * dout[u * c->C + i];
                }
            }
        }
        reference_norm(out + NORM_FLOATS * b, squares, 1.0);
    }
}
static void embedding_norms_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                                float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    double *norms = norms_before(c);
    int32_t *tokens = tokens_from(c, in[1]);
    ops_embedding_sample_norms(s, norms, in_real(s, in[0], positions(c) * c->C), tokens,
                               c->variant < 2, c->rows, c->T, c->C, c->other);
    put_norms(c, s, out, norms, 0, 1.0);
    ops_free(tokens);
}

// in: dout, numbers that tokens are made of, dlogits, x
static void tied_norms_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[3] = positions(c) * c->C;
    in[1] = positions(c);
    in[2] = positions(c) * (c->other + 3);
    *out = NORM_FLOATS * c->rows;
}
static void tied_norms_reference(const Case *c, double **in, double *out) { // both gradients, whole
    const int64_t T = c->T, C = c->C, Vp = c->other + 3;
    for (int64_t b = 0; b < c->rows; b++) {
        double *embedding = doubles(Vp * C), *classifier = doubles(Vp * C), product = 0.0;
        for (int64_t n = b * T; n < (b + 1) * T; n++) {
            for (int64_t i = 0; i < C; i++) {
                embedding[token_of(c, in[1][n]) * C + i] += in[0][n * C + i];
                for (int64_t v = 0; v < Vp; v++) {
                    classifier[v * C + i] += in[2][n * Vp + v] * in[3][n * C + i];
                }
            }
        }
        for (int64_t i = 0; i < Vp * C; i++) { product += embedding[i] * classifier[i]; }
        reference_norm(out + NORM_FLOATS * b, 2.0 * product, 1.0);
        free(embedding);
        free(classifier);
    }
}
static void tied_norms_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                           float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t n = positions(c) * c->C, Vp = c->other + 3;
    double *norms = norms_before(c);
    int32_t *tokens = tokens_from(c, in[1]);
    ops_tied_sample_norms(s, norms, in_real(s, in[0], n), tokens,
                          in_real(s, in[2], positions(c) * Vp), in_real(s, in[3], n), c->rows, c->T,
                          c->C, Vp);
    put_norms(c, s, out, norms, 0, 1.0);
    ops_free(tokens);
}

// in: numbers that tokens are made of, dlogits, x
static void tied_rows_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = positions(c);
    in[1] = positions(c) * (c->other + 3);
    in[2] = *out = positions(c) * c->C;
}
static void tied_rows_reference(const Case *c, double **in, double *out) {
    for (int64_t n = 0; n < positions(c); n++) {
        for (int64_t i = 0; i < c->C; i++) {
            out[n * c->C + i] = 0.0;
            for (int64_t s = n / c->T * c->T; s < (n / c->T + 1) * c->T; s++) {
                out[n * c->C + i] +=
                    in[1][s * (c->other + 3) + token_of(c, in[0][n])] * in[2][s * c->C + i];
            }
        }
    }
}
static void tied_rows_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                          float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t Vp = c->other + 3;
    int32_t *tokens = tokens_from(c, in[0]);
    ops_tied_rows(s, out, tokens, in_real(s, in[1], positions(c) * Vp),
                  in_real(s, in[2], positions(c) * c->C), c->rows, c->T, c->C, Vp);
    ops_wait(s);
    ops_free(tokens);
}
// in: numbers that tokens are made of, tables
static void token_rows_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = positions(c);
    in[1] = c->rows * (c->other + 3) * c->C;
    *out = positions(c) * c->C;
}
static void token_rows_reference(const Case *c, double **in, double *out) {
    for (int64_t i = 0; i < positions(c) * c->C; i++) {
        const int64_t n = i / c->C;
        out[i] = in[1][(n / c->T * (c->other + 3) + token_of(c, in[0][n])) * c->C + i % c->C];
    }
}
static void token_rows_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                           float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    int32_t *tokens = tokens_from(c, in[0]);
    ops_token_rows(s, out, tokens, in[1], c->rows, c->T, c->C, c->other + 3);
    ops_wait(s);
    ops_free(tokens);
}
// in: dout, tied, a number of each sample, 3 and 5 times which two others tell. Variant 1: tied =
// -dout, and they tell what makes the norm 0 but for what rounding may hide: 2^-20 of |E|^2 + |H|^2
// + 2 |E| |H|, of which each is Q. Variant 2: no tied rows; one of the others tells Q
static void crossing_norms_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[1] = positions(c) * c->C;
    in[2] = c->rows;
    *out = NORM_FLOATS * c->rows;
}
static void crossing_norms_reference(const Case *c, double **in, double *out) {
    const int64_t n = c->T * c->C;
    for (int64_t b = 0; b < c->rows; b++) {
        double product = 0.0;
        for (int64_t i = b * n; i < (b + 1) * n; i++) { product += in[0][i] * in[1][i]; }
        const double told = (2.0 + in[2][b]) * (double)n, squares = squares_of(in[0] + b * n, n);
        reference_norm(out + NORM_FLOATS * b,
                       c->variant == 2 ? 5.0 * told + squares : 8.0 * told + 2.0 * product, 1.0);
        if (c->variant == 1) { out[NORM_FLOATS * b] = 0x1p-20 * 4.0 * squares; }
    }
}
static void crossing_norms_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                               float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t n = c->T * c->C, stride = c->rows + 1;
    double *norms = norms_before(c), *others = (double *)(void *)floats(4 * stride);
    float *tied = floats(c->rows * n);
    for (int64_t i = 0; i < c->rows * n; i++) { tied[i] = c->variant == 1 ? -in[0][i] : in[1][i]; }
    for (int64_t b = 0; b < c->rows; b++) {
        double squares = 0.0;
        for (int64_t i = b * n; i < (b + 1) * n; i++) {
            squares += (double)in[0][i] * (double)in[0][i];
        }
        const double told = (2.0 + (double)in[2][b]) * (double)n;
        others[b] = c->variant == 1   ? 2.0 * squares - norm_before
                    : c->variant == 2 ? squares
                                      : 3.0 * told;
        others[stride + b] = c->variant == 1 ? 0.0 : 5.0 * told;
    }
    ops_crossing_norms(s, norms, others, 2, stride, in_real(s, in[0], c->rows * n),
                       c->variant == 2 ? NULL : tied, c->rows, c->T, c->C);
    put_norms(c, s, out, norms, 0, 1.0);
    ops_free(others);
    ops_free(tied);
}

static void sample_norms_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = c->rows * c->C;
    *out = NORM_FLOATS * c->rows;
}
static void sample_norms_reference(const Case *c, double **in, double *out) {
    for (int64_t b = 0; b < c->rows; b++) {
        reference_norm(out + NORM_FLOATS * b, squares_of(in[0] + b * c->C, c->C), 1.0);
    }
}
static void sample_norms_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                             float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    double *norms = norms_before(c);
    ops_sample_norms(s, norms, in[0], c->rows, c->C);
    put_norms(c, s, out, norms, 0, 1.0);
}

// in: norms (taken positive), weights (too)
static const float clip_at = 0.5f;
static void factors_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[1] = *out = c->rows;
}
static void factors_reference(const Case *c, double **in, double *out) {
    for (int64_t b = 0; b < c->rows; b++) {
        const double weight = fabs(in[1][b]), norm = weight * sqrt(fabs(in[0][b]));
        out[b] = weight * (c->variant == CLIP_ABADI ? fmin(1.0, (double)clip_at / (norm + 1e-6))
                                                    : (double)clip_at / (norm + 0.01));
    }
}
static void factors_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                        float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    double *norms = norms_before(c);
    float *weights = floats(c->rows);
    for (int64_t b = 0; b < c->rows; b++) {
        norms[b] = fabs((double)in[0][b]);
        weights[b] = fabsf(in[1][b]);
    }
    ops_clip_factors(s, out, norms, weights, c->rows, clip_at, (ClipFunction)c->variant);
    ops_wait(s);
    ops_free(norms);
    ops_free(weights);
}

// A factor of 0 for some samples; these hold a NaN then.
static float factor_of(double number) { return number < -0.1 ? 0.0f : (float)number; }
static float *factors_from(const Case *c, const float *numbers) {
    float *factors = floats(c->rows);
    for (int64_t b = 0; b < c->rows; b++) { factors[b] = factor_of((double)numbers[b]); }
    return factors;
}
static float *spoilt_copy(const Case *c, const float *from, int64_t n, const float *factors) {
    float *copy = floats(c->rows * n);
    memcpy(copy, from, (size_t)(c->rows * n) * sizeof(float));
    for (int64_t b = 0; b < c->rows; b++) {
        copy[b * n + n / 2] = factors[b] == 0.0f ? NAN : copy[b * n + n / 2];
    }
    return copy;
}
// in: dout, in, numbers that factors are made of, what is there. A GPU in bf16 must not round
// between factor and product: the tolerance is that of fp32
static void matmul_samples_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = positions(c) * c->other;
    in[1] = positions(c) * c->C;
    in[2] = c->rows;
    in[3] = *out = c->other * c->C;
}
static void matmul_samples_reference(const Case *c, double **in, double *out) {
    const int64_t C = c->C, OC = c->other;
    for (int64_t i = 0; i < OC * C; i++) { out[i] = c->variant ? in[3][i] : 0.0; }
    for (int64_t n = 0; n < positions(c); n++) {
        const double factor = (double)factor_of(in[2][n / c->T]);
        for (int64_t o = 0; o < OC; o++) {
            for (int64_t i = 0; i < C; i++) {
                out[o * C + i] += factor * in[0][n * OC + o] * in[1][n * C + i];
            }
        }
    }
}
static void matmul_samples_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                               float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t N = positions(c), C = c->C, OC = c->other;
    float *factors = factors_from(c, in[2]), *a = spoilt_copy(c, in[0], c->T * OC, factors),
          *b = spoilt_copy(c, in[1], c->T * C, factors);
    ops_copy(s, out, in[3], (size_t)(OC * C) * sizeof(float));
    ops_matmul_backward_weight_samples(s, out, out_real(s, a, N * OC), out_real(s, b, N * C),
                                       factors, c->rows, c->T, C, OC, c->variant);
    ops_wait(s);
    reals_done(s);
    ops_free(factors);
    ops_free(a);
    ops_free(b);
}

// in: dout, tokens' numbers, numbers that factors are made of; out: dwte | dwpe. variant 1: dwpe
// alone
static void embedding_samples_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = positions(c) * c->C;
    in[1] = positions(c);
    in[2] = c->rows;
    *out = (c->other + 3 + c->T + 2) * c->C;
}
static void embedding_samples_reference(const Case *c, double **in, double *out) {
    const int64_t C = c->C, wte = (c->other + 3) * C;
    memset(out, 0, (size_t)(wte + (c->T + 2) * C) * sizeof(double));
    for (int64_t n = 0; n < positions(c); n++) {
        const double factor = (double)factor_of(in[2][n / c->T]);
        for (int64_t i = 0; i < C; i++) {
            if (!c->variant) { out[token_of(c, in[1][n]) * C + i] += factor * in[0][n * C + i]; }
            out[wte + n % c->T * C + i] += factor * in[0][n * C + i];
        }
    }
}
static void embedding_samples_run(const Case *c, Stream *s, float **in, float *out,
                                  const float *dout, float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t n = c->T * c->C, wte = (c->other + 3) * c->C;
    int32_t *tokens = tokens_from(c, in[1]);
    float *factors = factors_from(c, in[2]), *spoilt = spoilt_copy(c, in[0], n, factors);
    if (c->variant) { memset(out, 0, (size_t)wte * sizeof(float)); }
    ops_embedding_backward(s, c->variant ? NULL : out, out + wte, in_real(s, spoilt, c->rows * n),
                           tokens, factors, c->rows, c->T, c->C, c->other + 3, c->T + 2, false,
                           false);
    ops_wait(s);
    reals_done(s);
    ops_free(factors);
    ops_free(spoilt);
    ops_free(tokens);
}

// in: numbers of each sample, numbers that factors are made of, what is there
static void accumulate_samples_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = c->rows * c->C;
    in[1] = c->rows;
    in[2] = *out = c->C;
}
static void accumulate_samples_reference(const Case *c, double **in, double *out) {
    for (int64_t i = 0; i < c->C; i++) {
        out[i] = c->variant ? in[2][i] : 0.0;
        for (int64_t b = 0; b < c->rows; b++) {
            out[i] += (double)factor_of(in[1][b]) * in[0][b * c->C + i];
        }
    }
}
static void accumulate_samples_run(const Case *c, Stream *s, float **in, float *out,
                                   const float *dout, float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    float *factors = factors_from(c, in[1]), *spoilt = spoilt_copy(c, in[0], c->C, factors);
    if (c->variant) { memcpy(out, in[2], (size_t)c->C * sizeof(float)); }
    ops_accumulate_samples(s, out, spoilt, factors, c->rows, c->C, c->variant);
    if (c->rows == 1 && !c->variant) { // in its place
        ops_accumulate_samples(s, spoilt, spoilt, factors, 1, c->C, false);
        ops_wait(s);
        assert_memory_equal(spoilt, out, (size_t)c->C * sizeof(float));
    }
    ops_wait(s);
    ops_free(factors);
    ops_free(spoilt);
}
// in, out: x. The reference has noise.h's formulas in double, and no grid; the run compares with
// noise.h's own functions, element by element.
static const float noise_deviation = 0.3f, noise_factor = 0.5f;
static const double noise_grid = 0x1p-14; // the power of two below the deviation, over 2^12
static const NoiseStream noise_stream = {
    {11, 22, 33, 44, 55, 66, 77, 88}, NOISE_GRADIENT, 5, 0x100000002};
static int64_t noise_first(const Case *c) { return c->variant == 1 ? (INT64_C(1) << 35) + 48 : 0; }
static void noise_sizes(const Case *c, int64_t *in, int64_t *out) { in[0] = *out = c->rows; }
static void noise_reference(const Case *c, double **in, double *out) {
    for (int64_t i = 0; i < c->rows; i++) {
        uint32_t words[NOISE_BLOCK];
        noise_words(words, &noise_stream, (uint32_t)((noise_first(c) + i) / NOISE_BLOCK));
        const uint32_t a = words[i % NOISE_BLOCK / 2 * 2], b = words[i % NOISE_BLOCK / 2 * 2 + 1];
        const double u = ((double)a + ((double)__builtin_bswap32(b) + 0.5) * 0x1p-32) * 0x1p-32,
                     angle = 2.0 * M_PI * (b >> 8) * 0x1p-24;
        const double z = sqrt(-2.0 * log(u)) * (i % 2 ? sin(angle) : cos(angle));
        out[i] = (double)noise_factor *
                 (in[0][i] + (c->variant == 2 ? 0.0 : (double)noise_deviation * z));
    }
}
static void noise_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                      float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const NoiseScale scale = noise_scale(noise_deviation, noise_factor);
    ops_copy(s, out, in[0], (size_t)c->rows * sizeof(float));
    ops_add_noise(s, out, noise_first(c), c->rows, noise_stream,
                  c->variant == 2 ? 0.0f : noise_deviation, noise_factor);
    ops_wait(s);
    for (int64_t i = 0; i < c->rows; i++) {
        uint32_t words[NOISE_BLOCK];
        float z[2], expected = noise_factor * in[0][i];
        noise_words(words, &noise_stream, (uint32_t)((noise_first(c) + i) / NOISE_BLOCK));
        noise_normals(words[i % NOISE_BLOCK / 2 * 2], words[i % NOISE_BLOCK / 2 * 2 + 1], &z[0],
                      &z[1]);
        if (c->variant != 2) { expected = noise_add(in[0][i], z[i % 2], scale); }
        assert_memory_equal(&out[i], &expected, sizeof expected); // the same bits, in each build
        if (c->variant != 2) {
            assert_true((double)expected ==
                        rint((double)expected / (0.5 * noise_grid)) * (0.5 * noise_grid));
        }
    }
}

// --- RMSNorm, activations, rotary positions ------------------------------------------------------
static const float rms_eps = 0.03f; // large, so that it shows
// in: summands, weight; out: sum | normalised | rstd (no gradient asked)
static void rmsnorm_sizes(const Case *c, int64_t *in, int64_t *out) {
    const int64_t n = positions(c) * c->C;
    in[0] = n;
    in[1] = c->variant % 4 ? n : 0;
    in[2] = c->variant & 4 ? 0 : c->C;
    *out = 2 * n + positions(c);
}
static void rmsnorm_reference(const Case *c, double **in, double *out) {
    const int64_t N = positions(c), C = c->C;
    for (int64_t n = 0; n < N; n++) {
        double *sum = out + n * C, rstd;
        for (int64_t i = 0; i < C; i++) {
            sum[i] = in[0][n * C + i] + (c->variant % 4 ? in[1][n * C + i] : 0.0);
        }
        rstd = 1.0 / sqrt(squares_of(sum, C) / (double)C + (double)rms_eps);
        for (int64_t i = 0; i < C; i++) {
            out[(N + n) * C + i] = sum[i] * rstd * (c->variant & 4 ? 1.0 : in[2][i]);
        }
        out[2 * N * C + n] = rstd;
    }
}
static void rmsnorm_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                        float **grad, bool accumulate) {
    const int64_t N = positions(c), C = c->C, n = N * C;
    const int add = c->variant % 4;
    float *rstd = out + 2 * n;
    // sum is a, or is not written at all
    if (add != 1) { ops_copy(s, out, in[0], (size_t)n * sizeof(float)); }
    Real *sum = out_real(s, out, n);
    const Real *weight = c->variant & 4 ? NULL : in_real(s, in[2], C),
               *dy = in_real(s, dout + n, n), *before;
    Real *din = residual_path(c, s, grad[0], dout, &before);
    ops_rmsnorm_forward(s, out_real(s, out + n, n), rstd, add ? sum : NULL,
                        add == 2 ? sum : in_real(s, in[0], n), add ? in_real(s, in[1], n) : NULL,
                        weight, N, C, rms_eps);
    ops_rmsnorm_backward_input(s, din, before, dy, sum, weight, rstd, N, C);
    if (weight) { ops_rmsnorm_backward_weight(s, grad[2], dy, sum, rstd, N, C, accumulate); }
    reals_done(s);
    if (add) { ops_copy(s, grad[1], grad[0], (size_t)n * sizeof(float)); }
}

static void swiglu_sizes(const Case *c, int64_t *in, int64_t *out) {
    *out = positions(c) * c->C;
    in[0] = 2 * *out;
}
static void swiglu_reference(const Case *c, double **in, double *out) {
    const int64_t F = c->C;
    for (int64_t i = 0; i < positions(c) * F; i++) {
        const double *row = in[0] + i / F * 2 * F, gate = row[i % F];
        out[i] = gate / (1.0 + exp(-gate)) * row[F + i % F];
    }
}
static void swiglu_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                       float **grad, bool accumulate) {
    (void)accumulate;
    const int64_t N = positions(c), n = N * c->C;
    const Real *x = in_real(s, in[0], 2 * n);
    ops_swiglu_forward(s, out_real(s, out, n), x, N, c->C);
    ops_swiglu_backward(s, out_real(s, grad[0], 2 * n), in_real(s, dout, n), x, N, c->C);
}

static void flat_sizes(const Case *c, int64_t *in, int64_t *out) { in[0] = *out = c->rows; }
static void relu2_reference(const Case *c, double **in, double *out) {
    for (int64_t i = 0; i < c->rows; i++) { out[i] = in[0][i] > 0.0 ? in[0][i] * in[0][i] : 0.0; }
}
static void relu2_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                      float **grad, bool accumulate) {
    (void)accumulate;
    const int64_t n = c->rows;
    if (c->variant) { ops_copy(s, grad[0], dout, (size_t)n * sizeof(float)); }
    const Real *x = in_real(s, in[0], n);
    Real *din = out_real(s, grad[0], n);
    ops_relu2_forward(s, out_real(s, out, n), x, n);
    ops_relu2_backward(s, din, c->variant ? din : in_real(s, dout, n), x, n);
}

static const float flat_softcap = 15.0f;
static void softcap_reference(const Case *c, double **in, double *out) {
    const double cap = (double)flat_softcap;
    for (int64_t i = 0; i < c->rows; i++) { out[i] = cap * tanh(in[0][i] / cap); }
}
static void softcap_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                        float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    ops_copy(s, out, in[0], (size_t)c->rows * sizeof(float));
    ops_softcap(s, out_real(s, out, c->rows), c->rows, flat_softcap);
}

static Rotary rotary_of(const Case *c) {
    const double theta = c->variant % 2 ? 5e5 : 1e4, D = (double)attention_of(c).D;
    Rotary r;
    memset(&r, 0, sizeof r);
    for (int i = 0; i < (int)D / 2; i++) {
        const double f = pow(theta, -2.0 * i / D), wave = 2.0 * M_PI / f;
        const double between = (8192.0 / wave - 1.0) / 3.0; // of high (1) and low frequencies (0)
        const double share = fmin(1.0, fmax(0.0, between));
        r.frequency[i] = (float)(c->variant % 2 ? (1.0 - share) * f / 8.0 + share * f : f);
    }
    return r;
}
// out(D) = the head x at a position, turned
static void reference_turned(double *out, const double *x, int64_t D, int64_t position,
                             const Rotary *r) {
    for (int64_t i = 0; i < D / 2; i++) {
        const float angle = (float)position * r->frequency[i];
        const double low = x[i], high = x[i + D / 2];
        out[i] = low * cos((double)angle) - high * sin((double)angle);
        out[i + D / 2] = high * cos((double)angle) + low * sin((double)angle);
    }
}
static void rotary_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = *out = positions(c) * attention_qkv_width(attention_of(c));
}
static void rotary_reference(const Case *c, double **in, double *out) {
    const AttentionShape a = attention_of(c);
    const Rotary r = rotary_of(c);
    const int64_t all = a.heads + 2 * a.kv_heads;
    for (int64_t i = 0; i < positions(c) * all; i++) {
        if (i % all < a.heads + a.kv_heads) {
            reference_turned(out + i * a.D, in[0] + i * a.D, a.D, i / all % a.T, &r);
        } else {
            memcpy(out + i * a.D, in[0] + i * a.D, (size_t)a.D * sizeof(double));
        }
    }
}
static void rotary_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                       float **grad, bool accumulate) {
    (void)accumulate;
    const AttentionShape a = attention_of(c);
    const Rotary r = rotary_of(c);
    const int64_t n = positions(c) * attention_qkv_width(a);
    ops_copy(s, out, in[0], (size_t)n * sizeof(float));
    ops_copy(s, grad[0], dout, (size_t)n * sizeof(float));
    ops_rotary(s, out_real(s, out, n), a, &r, false);
    ops_rotary(s, out_real(s, grad[0], n), a, &r, true);
}

static HeadNorm head_norm_of(const Case *c, const Rotary *r) {
    const HeadNorm h = {.shape = attention_of(c), .rotary = r, .eps = rms_eps, .scale = 1.2f};
    return h;
}
// in: qkv, q_weight, k_weight; out: qkv | rstd (no gradient asked)
static void head_norm_sizes(const Case *c, int64_t *in, int64_t *out) {
    const AttentionShape a = attention_of(c);
    in[0] = positions(c) * attention_qkv_width(a);
    in[1] = in[2] = c->variant & 2 ? 0 : a.D;
    *out = in[0] + positions(c) * (a.heads + a.kv_heads);
}
static void head_norm_reference(const Case *c, double **in, double *out) {
    const Rotary r = rotary_of(c);
    const HeadNorm h = head_norm_of(c, &r);
    const AttentionShape a = h.shape;
    const int64_t all = a.heads + 2 * a.kv_heads, normed = a.heads + a.kv_heads;
    double *y = doubles(a.D), *rstd = out + positions(c) * all * a.D;
    for (int64_t i = 0; i < positions(c) * all; i++) {
        const double *x = in[0] + i * a.D, *weight = in[i % all < a.heads ? 1 : 2];
        if (i % all >= normed) {
            memcpy(out + i * a.D, x, (size_t)a.D * sizeof(double));
            continue;
        }
        const double of_head = 1.0 / sqrt(squares_of(x, a.D) / (double)a.D + (double)h.eps);
        for (int64_t d = 0; d < a.D; d++) {
            y[d] = x[d] * of_head * (double)h.scale * (c->variant & 2 ? 1.0 : weight[d]);
        }
        reference_turned(out + i * a.D, y, a.D, i / all % a.T, &r);
        rstd[i / all * normed + i % all] = of_head;
    }
    free(y);
}
static void head_norm_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                          float **grad, bool accumulate) {
    const Rotary r = rotary_of(c);
    const HeadNorm h = head_norm_of(c, &r);
    const int64_t n = positions(c) * attention_qkv_width(h.shape), D = h.shape.D;
    float *rstd = out + n;
    const Real *x = in_real(s, in[0], n), *dy = in_real(s, dout, n),
               *q_weight = c->variant & 2 ? NULL : in_real(s, in[1], D),
               *k_weight = c->variant & 2 ? NULL : in_real(s, in[2], D);
    ops_head_norm_forward(s, out_real(s, out, n), rstd, x, q_weight, k_weight, &h);
    ops_head_norm_backward_input(s, out_real(s, grad[0], n), dy, x, q_weight, k_weight, rstd, &h);
    if (q_weight) {
        ops_head_norm_backward_weight(s, grad[1], grad[2], dy, x, rstd, &h, accumulate);
    }
}

// in: dout, in, rstd; out, of each sample: norm | dweight
static void rmsnorm_samples_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = in[1] = positions(c) * c->C;
    in[2] = positions(c);
    *out = c->rows * (NORM_FLOATS + c->C);
}
static void rmsnorm_samples_reference(const Case *c, double **in, double *out) {
    const int64_t C = c->C;
    for (int64_t b = 0; b < c->rows; b++) {
        double *result = out + b * (NORM_FLOATS + C), *sums = result + NORM_FLOATS;
        memset(sums, 0, (size_t)C * sizeof(double));
        for (int64_t n = b * c->T; n < (b + 1) * c->T; n++) {
            for (int64_t i = 0; i < C; i++) {
                sums[i] += in[0][n * C + i] * in[1][n * C + i] * in[2][n];
            }
        }
        reference_norm(result, squares_of(sums, C), 1.0 / (double)C);
    }
}
static void rmsnorm_samples_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                                float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const int64_t n = positions(c) * c->C;
    double *norms = norms_before(c);
    float *dweights = floats(c->rows * c->C);
    memset(dweights, 0xff, (size_t)(c->rows * c->C) * sizeof(float));
    ops_rmsnorm_samples(s, dweights, norms, in_real(s, in[0], n), in_real(s, in[1], n), in[2],
                        c->rows, c->T, c->C);
    put_norms(c, s, out, norms, c->C, 1.0 / (double)c->C);
    put_sums(c, out, 0, c->C, dweights, c->C);
    ops_free(dweights);
}

// in: dout, in, rstd; out, of each sample: norm | dq_weight | dk_weight
static void head_norm_samples_sizes(const Case *c, int64_t *in, int64_t *out) {
    const AttentionShape a = attention_of(c);
    in[0] = in[1] = positions(c) * attention_qkv_width(a);
    in[2] = positions(c) * (a.heads + a.kv_heads);
    *out = c->rows * (NORM_FLOATS + 2 * a.D);
}
static void head_norm_samples_reference(const Case *c, double **in, double *out) {
    const Rotary r = rotary_of(c);
    Rotary back;
    const HeadNorm h = head_norm_of(c, &r);
    const AttentionShape a = h.shape;
    const int64_t D = a.D, all = a.heads + 2 * a.kv_heads, normed = a.heads + a.kv_heads;
    double *dy = doubles(D);
    for (int i = 0; i < ROTARY_PAIRS; i++) { back.frequency[i] = -r.frequency[i]; }
    for (int64_t b = 0; b < c->rows; b++) {
        double *result = out + b * (NORM_FLOATS + 2 * D), *sums = result + NORM_FLOATS;
        memset(sums, 0, (size_t)(2 * D) * sizeof(double));
        for (int64_t i = b * a.T * normed; i < (b + 1) * a.T * normed; i++) {
            const int64_t at = (i / normed * all + i % normed) * D;
            double *sum = sums + (i % normed < a.heads ? 0 : D);
            reference_turned(dy, in[0] + at, D, i / normed % a.T, &back);
            for (int64_t d = 0; d < D; d++) {
                sum[d] += dy[d] * (double)h.scale * in[1][at + d] * in[2][i];
            }
        }
        reference_norm(result, squares_of(sums, 2 * D), 0.5 / (double)D);
    }
    free(dy);
}
static void head_norm_samples_run(const Case *c, Stream *s, float **in, float *out,
                                  const float *dout, float **grad, bool accumulate) {
    (void)dout;
    (void)grad;
    (void)accumulate;
    const Rotary r = rotary_of(c);
    const HeadNorm h = head_norm_of(c, &r);
    const int64_t n = positions(c) * attention_qkv_width(h.shape), D = h.shape.D;
    double *norms = norms_before(c);
    float *dq_weights = floats(c->rows * D), *dk_weights = floats(c->rows * D);
    memset(dq_weights, 0xff, (size_t)(c->rows * D) * sizeof(float));
    memset(dk_weights, 0xff, (size_t)(c->rows * D) * sizeof(float));
    ops_head_norm_samples(s, dq_weights, dk_weights, norms, in_real(s, in[0], n),
                          in_real(s, in[1], n), in[2], &h);
    put_norms(c, s, out, norms, 2 * D, 0.5 / (double)D);
    put_sums(c, out, 0, 2 * D, dq_weights, D);
    put_sums(c, out, D, 2 * D, dk_weights, D);
    ops_free(dq_weights);
    ops_free(dk_weights);
}

// --- a mixture of experts, each of one matrix: router, dispatch, products, combine ---------------
// in: x(N, C), router(E, C), weight(E, OC, C); out(N, OC) | of each token sum of lse^2 | of
// shares p
static const float of_z = 0.375f, of_aux = 1.25f;
static Router mixture_router(const Case *c) {
    const Router r = {.experts = c->other, .groups = c->kv_heads, .top_k = c->variant % 8};
    return r;
}
static double mixture_bias(const Case *c, int64_t e) {
    const int64_t each = c->other / c->kv_heads;
    return c->variant & 8 ? (double)(e % each) : 0.125 * (double)(e % 2);
}
static double mixture_share(int64_t e) { return 0.25 * (double)(e % 3 + 1); }
static void mixture_sizes(const Case *c, int64_t *in, int64_t *out) {
    in[0] = positions(c) * c->C;
    in[1] = c->other * c->C;
    in[2] = c->other * c->D * c->C;
    *out = positions(c) * (c->D + 2);
}
// Softmax of n logits, in place; returns the log of their sum.
static double softmax_double(double *z, int64_t n) {
    double most = -INFINITY, sum = 0;
    for (int64_t e = 0; e < n; e++) { most = fmax(most, z[e]); }
    for (int64_t e = 0; e < n; e++) { sum += exp(z[e] - most); }
    for (int64_t e = 0; e < n; e++) { z[e] = exp(z[e] - most) / sum; }
    return most + log(sum);
}
// How many experts of a group come before expert e: those that are likelier, with the bias, and of
// equal ones the smaller.
static int64_t experts_before(const Case *c, const double *p, int64_t first, int64_t e) {
    const int64_t n = c->other / c->kv_heads;
    int64_t before = 0;
    for (int64_t i = 0; i < n; i++) {
        const double other = p[i] + mixture_bias(c, first + i),
                     own = p[e] + mixture_bias(c, first + e);
        before += other > own || (other == own && i < e);
    }
    return before;
}
static void mixture_reference(const Case *c, double **in, double *out) {
    const Router r = mixture_router(c);
    const int64_t N = positions(c), C = c->C, OC = c->D, n = r.experts / r.groups;
    double p[96];
    for (int64_t t = 0; t < N; t++) {
        double *y = out + t * OC, *squares = out + N * OC + t, *shares = squares + N;
        memset(y, 0, (size_t)OC * sizeof *y);
        *squares = *shares = 0;
        for (int64_t g = 0; g < r.groups; g++) {
            double chosen = 0;
            for (int64_t e = 0; e < n; e++) {
                p[e] = 0;
                for (int64_t i = 0; i < C; i++) {
                    p[e] += in[0][t * C + i] * in[1][(g * n + e) * C + i];
                }
            }
            const double lse = softmax_double(p, n);
            *squares += lse * lse;
            for (int64_t e = 0; e < n; e++) {
                *shares += mixture_share(g * n + e) * p[e];
                chosen += experts_before(c, p, g * n, e) < r.top_k ? p[e] : 0;
            }
            for (int64_t e = 0; e < n; e++) {
                if (experts_before(c, p, g * n, e) >= r.top_k) { continue; }
                const double w = r.groups == 1 ? p[e] / chosen : p[e];
                for (int64_t o = 0; o < OC; o++) {
                    const double *row = in[2] + ((g * n + e) * OC + o) * C;
                    for (int64_t i = 0; i < C; i++) { y[o] += w * row[i] * in[0][t * C + i]; }
                }
            }
        }
    }
}
typedef struct {
    Router router;
    Route route;
    int32_t *loads;
    float *p, *bias, *shares, *dbias;
    Real *rows, *made, *drows, *dmade;
} Mixture;
static Mixture make_mixture(const Case *c) {
    const Router r = mixture_router(c);
    const int64_t N = positions(c), rows = N * r.groups * r.top_k;
    Mixture m = {.router = r,
                 .route = route_at(floats(rows * ROUTE_PARTS), N, r.groups * r.top_k),
                 .loads = (int32_t *)(void *)floats(r.experts),
                 .p = floats(N * r.experts),
                 .bias = floats(r.experts),
                 .shares = floats(r.experts),
                 .dbias = floats(r.experts),
                 .rows = (Real *)floats(rows * c->C),
                 .made = (Real *)floats(rows * c->D),
                 .drows = (Real *)floats(rows * c->C),
                 .dmade = (Real *)floats(rows * c->D)};
    for (int64_t e = 0; e < r.experts; e++) {
        m.bias[e] = (float)mixture_bias(c, e);
        m.shares[e] = (float)mixture_share(e);
    }
    return m;
}
static void free_mixture(Mixture *m) {
    void *all[] = {m->route.expert, m->loads, m->p,    m->bias,  m->shares,
                   m->dbias,        m->rows,  m->made, m->drows, m->dmade};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) { ops_free(all[i]); }
}
// Each choice has its row; the experts of a token differ; their rows follow each other in the order
// of the tokens, as many as the loads say, which a gradient of the biases tells.
static void check_route(const Mixture *m) {
    const Route *r = &m->route;
    const int64_t n = r->N * r->choices, E = m->router.experts;
    int64_t *at = (int64_t *)checked_calloc((size_t)E + 1, sizeof *at, "rows"), odd = E;
    for (int64_t e = 0; e < E; e++) { at[e + 1] = at[e] + m->loads[e]; }
    assert_int_equal(at[E], n);
    for (int64_t i = 0; i < n; i++) {
        const int64_t e = r->expert[i], group = i % r->choices / m->router.top_k;
        assert_true(e * m->router.groups / E == group);
        for (int64_t j = i / r->choices * r->choices; j < i; j++) {
            assert_true(r->expert[j] != e);
        }
        assert_int_equal(r->place[i], at[e]++);
    }
    while (odd % 2 == 0) { odd /= 2; }
    for (int64_t e = 0; e < E; e++) {
        const double above = (double)(m->loads[e] * E - n) / ((double)E / (double)odd);
        assert_true((double)m->dbias[e] / (double)LOAD_UNIT == above);
    }
    free(at);
}
static void mixture_run(const Case *c, Stream *s, float **in, float *out, const float *dout,
                        float **grad, bool accumulate) {
    const int64_t N = positions(c), C = c->C, OC = c->D, E = c->other;
    Mixture m = make_mixture(c);
    const Real *x = in_real(s, in[0], N * C), *router = in_real(s, in[1], E * C),
               *weight = in_real(s, in[2], E * OC * C), *bias = in_real(s, m.bias, E),
               *dy = in_real(s, dout, N * OC);
    Real *dx = out_real(s, grad[0], N * C);
    ops_route(s, m.route, m.loads, m.p, x, router, bias, C, m.router);
    const ExpertRows rows = {m.loads, 1, E};
    ops_dispatch(s, m.rows, x, m.route, C);
    ops_wait_loads(s);
    ops_experts_forward(s, m.made, NULL, m.rows, weight, rows, C, OC, N == 1);
    ops_combine_rows(s, out_real(s, out, N * OC), m.made, m.route, OC);
    ops_wait(s);
    for (int64_t t = 0; t < N; t++) {
        double squares = 0, shares = 0;
        for (int64_t g = 0; g < m.router.groups; g++) {
            squares += pow((double)m.route.lse[t * m.route.choices + g], 2);
        }
        for (int64_t e = 0; e < E; e++) { shares += (double)(m.shares[e] * m.p[t * E + e]); }
        out[N * OC + t] = (float)squares;
        out[N * OC + N + t] = (float)shares;
    }
    ops_combine_rows_backward(s, m.dmade, dy, m.made, m.route, OC);
    ops_experts_backward_weight(s, grad[2], m.dmade, m.rows, rows, C, OC, accumulate);
    ops_experts_backward_input(s, m.drows, m.dmade, weight, NULL, rows, C, OC);
    const bool no_loss = c->variant & 16;
    const RouterLosses losses = {no_loss ? NULL : m.shares, of_aux, no_loss ? 0 : of_z};
    if (!no_loss) { ops_dispatch_backward(s, dx, NULL, m.drows, m.route, C); }
    ops_route_backward_input(s, dx, no_loss ? NULL : dx, m.p, m.route, router, C, m.router, losses);
    if (no_loss) { ops_dispatch_backward(s, dx, dx, m.drows, m.route, C); } // either may be first
    ops_route_backward_weight(s, grad[1], m.dbias, m.p, m.route, m.loads, x, C, m.router,
                              accumulate);
    if (accumulate) { // loads that are not added to others
        ops_route_backward_weight(s, grad[1], m.dbias, m.p, m.route, m.loads, x, 0, m.router,
                                  false);
    }
    ops_wait(s);
    check_route(&m);
    reals_done(s);
    free_mixture(&m);
}

typedef struct {
    const char *name;
    void (*sizes)(const Case *c, int64_t *in, int64_t *out);
    void (*reference)(const Case *c, double **in, double *out);
    void (*run)(const Case *c, Stream *s, float **in, float *out, const float *dout, float **grad,
                bool accumulate);
    bool backward; // has gradients
    int weights;   // from this input on, gradients obey `accumulate`
    // to bf16 between the inputs and a result: the output, a gradient. 0: it has no Reals; NONE:
    // they are only read
    int roundings[2];
    bool by_sample; // inputs and results lie sample by sample
} Operation;
enum { NONE = -1 };
static const Operation operations[] = {
    {"embedding", embedding_sizes, embedding_reference, embedding_run, true, 0, {1, 0}, false},
    {"layernorm", layernorm_sizes, layernorm_reference, layernorm_run, true, 2, {2, 2}, false},
    {"matmul", matmul_sizes, matmul_reference_gelu, matmul_run, true, 1, {3, 2}, false},
    {"residual", residual_sizes, residual_reference, residual_run, false, 0, {1, 0}, false},
    {"attention", attention_sizes, attention_reference, attention_run, true, 1, {2, 4}, false},
    {"classifier", classifier_sizes, classifier_reference, classifier_run, true, 1, {2, 4}, false},
    {"classifier keeping dlogits", kept_sizes, kept_reference, kept_run, true, 1, {2, 4}, false},
    {"adamw", adamw_sizes, adamw_reference, adamw_run, false, 0, {0, 0}, false},
    {"sgd", sgd_sizes, sgd_reference, sgd_run, false, 0, {0, 0}, false},
    {"matmul sample norms",
     matmul_norms_sizes,
     matmul_norms_reference,
     matmul_norms_run,
     false,
     0,
     {NONE, 0},
     true},
    {"bias samples",
     bias_samples_sizes,
     bias_samples_reference,
     bias_samples_run,
     false,
     0,
     {NONE, 0},
     true},
    {"layernorm samples",
     layernorm_samples_sizes,
     layernorm_samples_reference,
     layernorm_samples_run,
     false,
     0,
     {NONE, 0},
     true},
    {"embedding sample norms",
     embedding_norms_sizes,
     embedding_norms_reference,
     embedding_norms_run,
     false,
     0,
     {NONE, 0},
     true},
    {"tied sample norms",
     tied_norms_sizes,
     tied_norms_reference,
     tied_norms_run,
     false,
     0,
     {NONE, 0},
     true},
    {"tied rows", tied_rows_sizes, tied_rows_reference, tied_rows_run, false, 0, {NONE, 0}, false},
    {"token rows", token_rows_sizes, token_rows_reference, token_rows_run, false, 0, {0, 0}, false},
    {"crossing norms",
     crossing_norms_sizes,
     crossing_norms_reference,
     crossing_norms_run,
     false,
     0,
     {NONE, 0},
     true},
    {"sample norms",
     sample_norms_sizes,
     sample_norms_reference,
     sample_norms_run,
     false,
     0,
     {0, 0},
     true},
    {"clip factors", factors_sizes, factors_reference, factors_run, false, 0, {0, 0}, true},
    {"matmul backward weight of samples",
     matmul_samples_sizes,
     matmul_samples_reference,
     matmul_samples_run,
     false,
     0,
     {NONE, 0},
     false},
    {"embedding backward of samples",
     embedding_samples_sizes,
     embedding_samples_reference,
     embedding_samples_run,
     false,
     0,
     {NONE, 0},
     false},
    {"accumulate samples",
     accumulate_samples_sizes,
     accumulate_samples_reference,
     accumulate_samples_run,
     false,
     0,
     {0, 0},
     false},
    {"noise", noise_sizes, noise_reference, noise_run, false, 0, {0, 0}, false},
    {"rmsnorm", rmsnorm_sizes, rmsnorm_reference, rmsnorm_run, true, 2, {2, 2}, false},
    {"swiglu", swiglu_sizes, swiglu_reference, swiglu_run, true, 1, {1, 1}, false},
    {"relu2", flat_sizes, relu2_reference, relu2_run, true, 1, {1, 1}, false},
    {"softcap", flat_sizes, softcap_reference, softcap_run, false, 0, {1, 0}, false},
    {"rotary", rotary_sizes, rotary_reference, rotary_run, true, 1, {1, 1}, false},
    {"head norm", head_norm_sizes, head_norm_reference, head_norm_run, true, 1, {1, 1}, false},
    {"rmsnorm samples",
     rmsnorm_samples_sizes,
     rmsnorm_samples_reference,
     rmsnorm_samples_run,
     false,
     0,
     {NONE, 0},
     true},
    {"head norm samples",
     head_norm_samples_sizes,
     head_norm_samples_reference,
     head_norm_samples_run,
     false,
     0,
     {NONE, 0},
     true},
    {"muon", muon_sizes, muon_reference, muon_run, false, 0, {0, 0}, false},
    {"muon direction",
     muon_direction_sizes,
     muon_direction_reference,
     muon_direction_run,
     false,
     0,
     {0, 0},
     false},
    {"adamw direction",
     adamw_direction_sizes,
     adamw_direction_reference,
     adamw_direction_run,
     false,
     0,
     {0, 0},
     false},
    {"orthogonal begin",
     matrix_sizes,
     orthogonal_begin_reference,
     orthogonal_begin_run,
     false,
     0,
     {1, 0},
     false},
    {"orthogonal end",
     matrix_sizes,
     orthogonal_end_reference,
     orthogonal_end_run,
     false,
     0,
     {NONE, 0},
     false},
    {"combine", combine_sizes, combine_reference, combine_run, false, 0, {1, 0}, false},
    {"symmetric product",
     symmetric_sizes,
     symmetric_reference,
     symmetric_run,
     false,
     0,
     {1, 0},
     false},
    {"orthogonalise",
     matrix_sizes,
     orthogonalise_reference,
     orthogonalise_run,
     false,
     0,
     {4, 0},
     false},
    {"mixture", mixture_sizes, mixture_reference, mixture_run, true, 1, {3, 6}, false},
};

// --- the driver ----------------------------------------------------------------------------------
typedef struct {
    int64_t in_size[INPUTS], out_size;
    float *in[INPUTS], *grad[INPUTS], *out, *dout;
    double *in_double[INPUTS];
} Trial;

// How many of the outputs take part in the objective: the rest are statistics.
static int64_t differentiable(const Case *c) {
    int64_t N = positions(c);
    return c->op == LAYERNORM || c->op == RMSNORM  ? 2 * N * c->C
           : c->op == MATMUL                       ? N * c->other
           : c->op == MIXTURE                      ? N * (c->D + (c->variant & 16 ? 0 : 2))
           : c->op == ATTENTION                    ? N * attention_q_width(attention_of(c))
           : c->op == ROTARY || c->op == HEAD_NORM ? N * attention_qkv_width(attention_of(c))
           : c->op == CLASSIFIER || c->op == CLASSIFIER_KEPT ? N
                                                             : N * c->C;
}
// Terms in the longest sum behind a result: its rounding error grows as the square root.
static double longest_sum(const Case *c) {
    double N = (double)positions(c);
    if (c->op == ACCUMULATE_SAMPLES) { return (double)c->rows; }
    if (c->op >= MUON && c->op <= COMBINE) { return 4.0; } // element by element
    if (c->op == SAMPLE_NORMS) { return 1.0; }             // fp64: only the result is rounded
    if (c->op == SWIGLU || c->op == RELU2 || c->op == SOFTCAP || c->op == ROTARY) { return 2.0; }
    if (c->op == HEAD_NORM || c->op == HEAD_NORM_SAMPLES) {
        return fmax(N * (double)c->other, (double)attention_of(c).D);
    }
    return fmax(fmax((double)c->C, N), fmax((double)c->other, (double)c->T));
}
// Largest error allowed, given the largest value: a sum of K terms rounds to about sqrt(K) units in
// the last place (2^-24 each) of its size; 16 covers the worst of many elements, a few chained
// operations and the 1.5 units of our exponential. Scores of hundreds (attention, variant 1) lose
// their absolute size times 2^-24 before the exponential. A rounding to bf16 changes a number by up
// to 2^-8 of it; where a sum is over rounded terms, their errors grow as the sum does. (A
// classifier's counts twice: logits of up to 16 change a probability, which is at most a quarter
// away from where it may go, by that much more.) What noise was added to lies on the grid, up to
// half of its D from where the reference is; z errs by 3e-7 of its radius, which is below 9.5, and
// near the middle by as little (noise.h).
static double tolerance(const Case *c, double largest, bool gradient) {
    if (c->op == NOISE) {
        return c->variant == 2 ? 0x1p-24 * largest
                               : (double)noise_factor *
                                     (0.5 * noise_grid + (double)noise_deviation * 9.5 * 3e-7);
    }
    double magnified = c->op == ATTENTION && c->variant == 1 ? 100.0 : 1.0;
    double of_sums = 16.0 * 0x1p-24 * sqrt(longest_sum(c)) * magnified,
           of_reals = precision == DTYPE_BF16
                          ? 0x1p-8 * fmax(0.0, operations[c->op].roundings[gradient])
                          : 0.0;
    return (of_sums + of_reals * magnified) * fmax(largest, 1e-3);
}

// that a Real has
static float number(double x) {
    return precision == DTYPE_FP32 ? (float)x : bf16_to_float(float_to_bf16((float)x));
}
static Trial make_trial(const Case *c) {
    Trial t;
    memset(&t, 0, sizeof t);
    operations[c->op].sizes(c, t.in_size, &t.out_size);
    t.out = floats(t.out_size);
    t.dout = floats(t.out_size);
    for (int k = 0; k < INPUTS; k++) {
        t.in[k] = floats(t.in_size[k]);
        t.grad[k] = floats(t.in_size[k]);
        t.in_double[k] = doubles(t.in_size[k]);
        const bool large = c->variant == 1 && (c->op == SWIGLU || c->op == SOFTCAP);
        double size = large ? 100.0 : c->op == ATTENTION && c->variant == 1 ? 8.0 : 1.5;
        for (int64_t i = 0; i < t.in_size[k]; i++) {
            t.in_double[k][i] = (double)(t.in[k][i] = number(size * uniform(10 + (uint64_t)k, i)));
        }
    }
    for (int64_t i = 0; i < differentiable(c) && operations[c->op].backward; i++) {
        t.dout[i] = c->op == CLASSIFIER || c->op == CLASSIFIER_KEPT ? SCALE_EIGHTHS / 8.0f
                                                                    : number(uniform(20, i));
    }
    for (int64_t i = positions(c) * c->D; c->op == MIXTURE && i < differentiable(c); i++) {
        t.dout[i] = i < positions(c) * (c->D + 1) ? of_z : of_aux;
    }
    return t;
}
static void free_trial(Trial *t) {
    for (int k = 0; k < INPUTS; k++) {
        ops_free(t->in[k]);
        ops_free(t->grad[k]);
        free(t->in_double[k]);
    }
    ops_free(t->out);
    ops_free(t->dout);
}
static void run_trial(const Case *c, Trial *t, int threads, bool accumulate) {
    Stream s = stream_of(c, threads);
    memset(t->out, 0xff, (size_t)t->out_size * sizeof(float));
    for (int k = 0; k < INPUTS; k++) {
        for (int64_t i = 0; i < t->in_size[k]; i++) {
            t->grad[k][i] = accumulate && k >= operations[c->op].weights ? (float)(i % 5) : NAN;
        }
    }
    operations[c->op].run(c, &s, t->in, t->out, t->dout, t->grad, accumulate);
    reals_done(&s);
    ops_wait(&s);
    free_stream(&s);
}

static void check_forward(const Case *c, const Trial *t) {
    double *reference = doubles(t->out_size), largest = 0.0;
    double *in[INPUTS] = {t->in_double[0], t->in_double[1], t->in_double[2], t->in_double[3]};
    operations[c->op].reference(c, in, reference);
    for (int64_t i = 0; i < t->out_size; i++) { largest = fmax(largest, fabs(reference[i])); }
    for (int64_t i = 0; i < t->out_size; i++) {
        if (!(fabs(reference[i] - (double)t->out[i]) <= tolerance(c, largest, false))) {
            fail_msg("output %" PRId64 ": %.9g, expected %.9g within %.2g", i, (double)t->out[i],
                     reference[i], tolerance(c, largest, false));
        }
    }
    free(reference);
}

static double objective(const Case *c, const Trial *t, double *scratch) {
    double sum = 0.0,
           *in[INPUTS] = {t->in_double[0], t->in_double[1], t->in_double[2], t->in_double[3]};
    operations[c->op].reference(c, in, scratch);
    for (int64_t i = 0; i < differentiable(c); i++) { sum += (double)t->dout[i] * scratch[i]; }
    return sum;
}
// Central differences in double, step 1e-4: their own error (1e-8 of the third derivative, and
// 1e-16/1e-4 of the objective) is far below the tolerance. Large inputs are sampled; untouched rows
// and the ends are always among the samples.
static void check_gradient(const Case *c, Trial *t, int k, bool accumulate) {
    double *scratch = doubles(t->out_size), largest = 0.0;
    const int64_t n = t->in_size[k], samples = min_i64(n, 20);
    double expected[20];
    int64_t at[20];
    for (int64_t j = 0; j < samples; j++) {
        at[j] = j == 0    ? 0
                : j == 1  ? n - 1
                : n <= 20 ? j - 1
                          : (int64_t)(random_u64(5, (uint64_t)k, (uint64_t)j) % (uint64_t)n);
        double *x = &t->in_double[k][at[j]], saved = *x;
        *x = saved + 1e-4;
        double above = objective(c, t, scratch);
        *x = saved - 1e-4;
        expected[j] = (above - objective(c, t, scratch)) / 2e-4;
        *x = saved;
    }
    for (int64_t i = 0; i < n; i++) { largest = fmax(largest, fabs((double)t->grad[k][i])); }
    for (int64_t j = 0; j < samples; j++) {
        double before = accumulate && k >= operations[c->op].weights ? (double)(at[j] % 5) : 0.0;
        if (!(fabs(expected[j] + before - (double)t->grad[k][at[j]]) <=
              tolerance(c, fmax(largest, 1.0), true))) {
            fail_msg("gradient of input %d, element %" PRId64
                     ", accumulate %d: %.9g, expected %.9g within %.2g",
                     k, at[j], accumulate, (double)t->grad[k][at[j]], expected[j] + before,
                     tolerance(c, fmax(largest, 1.0), true));
        }
    }
    for (int64_t i = 0; i < n; i++) { assert_false(isnan(t->grad[k][i])); } // all was written
    free(scratch);
}
static void check_same(const Trial *a, const Trial *b) {
    assert_memory_equal(a->out, b->out, (size_t)a->out_size * sizeof(float));
    for (int k = 0; k < INPUTS; k++) {
        assert_memory_equal(a->grad[k], b->grad[k], (size_t)a->in_size[k] * sizeof(float));
    }
}

// What belongs to a sample has the same bits where it is alone, and where another one holds a NaN
// (which shows in that one's norm).
static void check_apart(const Case *c, Trial *all) {
    Trial again = make_trial(c), one = *all;
    Case alone = *c;
    alone.rows = 1;
    one.out_size = all->out_size / c->rows;
    one.out = floats(one.out_size);
    for (int64_t b = 0; b < c->rows; b += max_i64(1, c->rows / 7)) {
        for (int k = 0; k < INPUTS; k++) {
            one.in_size[k] = 0;
            one.in[k] = all->in[k] + b * all->in_size[k] / c->rows;
        }
        run_trial(&alone, &one, c->threads, false);
        assert_memory_equal(one.out, all->out + b * one.out_size,
                            (size_t)one.out_size * sizeof(float));
    }
    const int64_t each = all->in_size[0] / c->rows;
    // samples 1, 3, ...
    for (int64_t i = each; each && i < all->in_size[0]; i += 2 * each) {
        again.in[0][i + each / 2] = NAN;
    }
    run_trial(c, &again, c->threads, false);
    for (int64_t b = 0; b < c->rows; b++) {
        const float *result = again.out + b * one.out_size;
        if (b % 2 == 0 || !each) {
            assert_memory_equal(result, all->out + b * one.out_size,
                                (size_t)one.out_size * sizeof(float));
        }
        if (b % 2 && each) { assert_true(c->op == FACTORS ? *result == 0.0f : isnan(*result)); }
    }
    ops_free(one.out);
    free_trial(&again);
}

#ifdef EMU_CHECKED // what kernels do is looked at: the other programs compare results
enum { COMPARES = 0 };
#else
enum { COMPARES = 1 };
#endif
// Without TEST_ALL, some cases are drawn by TEST_SEED, beside the first of each operation: fewest of
// emulated threads, which take their time, and with a CPU's older instructions, which only products
// use; where each access is checked, none of the large ones. Returns how many cases there are for
// one that is drawn.
static uint64_t cases_each_drawn(void) {
#ifdef EMU_H
    return 8;
#elif defined OPS_CPU_H
    return getenv("DNNL_MAX_CPU_ISA") ? 4 : 2;
#else
    return 1;
#endif
}
static uint64_t test_seed(void) {
    return getenv("TEST_SEED") ? strtoull(getenv("TEST_SEED"), NULL, 10) : 1;
}
enum { LARGE = 2000000 }; // multiplications
static bool is_drawn(int number, const Case *c) {
    if (cases_each_drawn() == 1 || getenv("TEST_ALL")) { return true; }
    const int64_t across = c->op == ATTENTION || c->op == TIED_NORMS ? c->T : max_i64(c->other, 1);
    const int64_t each = 3; // products of its matrix, forward and backward
    if (!COMPARES && each * c->rows * c->T * c->C * across > LARGE) { return false; }
    const bool first = number % 2 == 0 && (c == cases || c[-1].op != c->op);
    return first || random_u64(test_seed(), 77, (uint64_t)number) % cases_each_drawn() == 0;
}
#ifdef EMU_H
enum { EACH_BIT = 6 }; // of tokens, whose digits have 9
#else
enum { EACH_BIT = 1 };
#endif
// Of emulated threads each second format, the even or the odd ones: blocks of any size in 8 bits, or
// in 4.
static bool format_is_drawn(int format) {
#ifdef EMU_H
    return getenv("TEST_ALL") || (uint64_t)format % 2 == test_seed() % 2;
#else
    (void)format;
    return true;
#endif
}
static void run_only(const Case *c) {
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        Trial t = make_trial(c);
        run_trial(c, &t, c->threads, accumulate);
        free_trial(&t);
    }
}
static void run_case(const Case *c) {
    const Operation *op = &operations[c->op];
    Trial first = make_trial(c), again = make_trial(c);
    run_trial(c, &first, c->threads, false);
    check_forward(c, &first);
    for (int k = 0; k < INPUTS && op->backward; k++) { check_gradient(c, &first, k, false); }
    run_trial(c, &again, c->threads, false);
    check_same(&first, &again);
#ifdef OPS_CPU_H // a GPU knows no threads of ours
    const bool tiles = c->op == MATMUL || c->op == MATMUL_SAMPLES || c->op == CLASSIFIER ||
                       c->op == CLASSIFIER_KEPT || c->op == MIXTURE,
               same = !tiles || gemm_same_in_all_tiles();
    for (int threads = 1; threads <= 5 && same; threads += threads == 3 ? 2 : 1) {
        run_trial(c, &again, threads, false);
        check_same(&first, &again);
    }
#endif
    run_trial(c, &again, c->threads, true);
    for (int k = op->weights; k < INPUTS && op->backward; k++) {
        check_gradient(c, &again, k, true);
    }
    if (op->by_sample && c->rows) { check_apart(c, &first); }
    free_trial(&first);
    free_trial(&again);
}
static void test_case(void **state) {
    precision = DTYPE_FP32;
    (COMPARES ? run_case : run_only)((const Case *)*state);
}
static void test_case_bf16(void **state) {
    precision = DTYPE_BF16;
    (COMPARES ? run_case : run_only)((const Case *)*state);
}

static int fp32_again(void **state) {
    (void)state;
    precision = DTYPE_FP32;
    return 0;
}

// --- what is not a forward and a backward --------------------------------------------------------
static void test_precision(void **state) { // storage formats, exactly
    (void)state;
    enum { N = 300011 };
    float *x = floats(N), *back = floats(N),
          *from_device = (float *)checked_malloc(N * sizeof(float), "numbers");
    uint16_t *stored = (uint16_t *)(void *)floats(N);
    for (int64_t i = 0; i < N; i++) { // every exponent, both halves, ties: random bits, but no NaN
        uint32_t bits =
            (uint32_t)random_u64(1, 1, (uint64_t)i) & (i % 3 ? 0xffffffffu : 0xffff8000u);
        if ((bits & 0x7f800000u) == 0x7f800000u) { bits &= 0xff800000u; }
        memcpy(&x[i], &bits, 4);
    }
    const Case c = {RESIDUAL, N, 1, 1, 0, 0, 2};
    for (int threads = 1; threads <= 3; threads++) {
        Stream s = stream_of(&c, threads);
        ops_convert_float(&s, stored, x, DTYPE_BF16, N, round_to_nearest());
        ops_wait(&s);
        for (int64_t i = 0; i < N; i++) {
            assert_int_equal(stored[i], float_to_bf16(x[i]));
            back[i] = bf16_to_float(stored[i]);
        }
        // the nearest of the three candidates, so rounding itself is right
        for (int64_t i = 0; i < N; i++) {
            double error = fabs((double)back[i] - (double)x[i]);
            if (isinf(back[i]) || isinf(x[i])) { continue; }
            assert_true(error <=
                        fabs((double)bf16_to_float((uint16_t)(stored[i] + 1)) - (double)x[i]));
            assert_true((stored[i] & 0x7fff) == 0 ||
                        error <=
                            fabs((double)bf16_to_float((uint16_t)(stored[i] - 1)) - (double)x[i]));
        }
        ops_convert_float(&s, back, x, DTYPE_FP32, N, round_to_nearest());
        ops_wait(&s);
        assert_memory_equal(back, x, N * sizeof(float));
        ops_reals_to_host(&s, from_device, in_real(&s, x, N), N);
        assert_memory_equal(from_device, x, N * sizeof(float));
        free_stream(&s);
    }
    x[0] = NAN;
    Stream one = stream_of(&c, 1);
    ops_convert_float(&one, stored, x, DTYPE_BF16, 1, round_to_nearest());
    ops_wait(&one);
    free_stream(&one);
    assert_true(isnan(bf16_to_float(stored[0])));
    ops_free(x);
    ops_free(back);
    ops_free(stored);
    free(from_device);
}

// both neighbours, the right mean, what bf16 has stays, and the same bits wherever a piece begins
static void test_rounding_stochastic(void **state) {
    (void)state;
    enum { N = 20000, SIXTEENTHS = 16 };
    const Case c = {RESIDUAL, N, 1, 1, 0, 0, 2};
    float *x = floats(N);
    uint16_t *stored = (uint16_t *)(void *)floats(N), *later = (uint16_t *)(void *)floats(N);
    Stream s = stream_of(&c, 2);
    for (int sixteenths = 0; sixteenths < SIXTEENTHS; sixteenths++) {
        const float low = sixteenths % 2 ? -1.0f : 1.0f, unit = low * 0x1p-7f;
        for (int64_t i = 0; i < N; i++) { x[i] = low + unit * (float)sixteenths / SIXTEENTHS; }
        const Rounding r = {true, (uint64_t)sixteenths + 1, 1000};
        const Rounding r_later = {true, r.key, r.first + 3};
        ops_convert_float(&s, stored, x, DTYPE_BF16, N, r);
        ops_convert_float(&s, later, x + 3, DTYPE_BF16, N - 3, r_later);
        ops_wait(&s);
        assert_memory_equal(stored + 3, later, (N - 3) * sizeof *later);
        int64_t up = 0;
        for (int64_t i = 0; i < N; i++) {
            assert_true(bf16_to_float(stored[i]) == low ||
                        (sixteenths && bf16_to_float(stored[i]) == low + unit));
            assert_int_equal(stored[i], round_stochastic(x[i], r, i));
            up += bf16_to_float(stored[i]) != low;
        }
        const double chance = (double)sixteenths / SIXTEENTHS; // 5 standard deviations
        assert_true(fabs((double)up / N - chance) <= 5.0 * sqrt(chance * (1.0 - chance) / N));
    }
    x[0] = NAN;
    x[1] = INFINITY;
    x[2] = -INFINITY;
    x[3] = 0.0f;
    const Rounding r = {true, 1, 0};
    ops_convert_float(&s, stored, x, DTYPE_BF16, 4, r);
    ops_wait(&s);
    assert_true(isnan(bf16_to_float(stored[0])) && stored[1] == 0x7f80 && stored[2] == 0xff80 &&
                stored[3] == 0);
    ops_free(x);
    ops_free(stored);
    ops_free(later);
    free_stream(&s);
}

// The factors at the ends: nothing is clipped below a norm of 0, and what is no number is left out.
static void test_clip_factors(void **state) {
    (void)state;
    enum { N = 9 };
    const double norm[N] = {0.0, 1.0, 4.0, 4.0, (double)NAN, (double)INFINITY, -1e-9, 1.0, 1e300};
    const float weight[N] = {2.0f, 1.0f, 1.0f, 3.0f, 1.0f, 1.0f, 1.0f, 0.0f, 1.0f};
    const double expected[2][N] = {
        {2.0, 1.0, 1.5 / 2.000001, 3.0 * 1.5 / 6.000001, 0.0, 0.0, 0.0, 0.0, 0.0},
        {2.0 * 1.5 / 0.01, 1.5 / 1.01, 1.5 / 2.01, 3.0 * 1.5 / 6.01, 0.0, 0.0, 0.0, 0.0, 0.0}};
    const Case c = {RESIDUAL, N, 1, 1, 0, 0, 1};
    Stream s = stream_of(&c, 1);
    double *norms = (double *)(void *)floats(2 * N);
    float *weights = floats(N), *factors = floats(N);
    memcpy(norms, norm, sizeof norm);
    memcpy(weights, weight, sizeof weight);
    for (int clip = 0; clip < 2; clip++) {
        memset(factors, 0xff, N * sizeof(float));
        ops_clip_factors(&s, factors, norms, weights, N, 1.5f, (ClipFunction)clip);
        ops_wait(&s);
        // one rounding
        for (int i = 0; i < N; i++) {
            assert_true(fabs((double)factors[i] - expected[clip][i]) <=
                        0x1p-23 * expected[clip][i]);
        }
    }
    ops_free(norms);
    ops_free(weights);
    ops_free(factors);
    free_stream(&s);
}

// fp64 to its last bits: integers, whose squares add up exactly in any order, beyond what fp32 has;
// and added to what is there
static void test_sample_norms(void **state) {
    (void)state;
    enum { N = 70001, ROWS = 3 };
    const Case c = {SAMPLE_NORMS, ROWS, 1, N, 0, 0, 2};
    Stream s = stream_of(&c, 2);
    float *x = floats(ROWS * N);
    double *norms = (double *)(void *)floats(2 * ROWS);
    for (int64_t i = 0; i < ROWS * N; i++) {
        x[i] = (float)(random_u64(2, 3, (uint64_t)i) % 200001) - 100000.0f;
    }
    for (int b = 0; b < ROWS; b++) { norms[b] = b; }
    ops_sample_norms(&s, norms, x, ROWS, N);
    ops_wait(&s);
    for (int b = 0; b < ROWS; b++) {
        double sum = b;
        for (int64_t i = 0; i < N; i++) { sum += (double)x[b * N + i] * (double)x[b * N + i]; }
        assert_true(norms[b] == sum);
    }
    ops_free(x);
    ops_free(norms);
    free_stream(&s);
}

// Positions of a token are added in their order, to the last bit; tokens differ in any bit.
static void test_equal_tokens(void **state) {
    (void)state;
    enum { T = 2100, C = 4, V = 1000 }; // more than one block of a GPU sorts
    const Case c = {EMBEDDING, 1, T, C, V, 0, 2};
    Stream s = stream_of(&c, 2);
    float *dout = floats(T * C), *dwte = floats((V + 3) * C), *sums = floats((V + 3) * C);
    int32_t *tokens = (int32_t *)(void *)floats(T);
    for (int kinds = 1; kinds <= V; kinds *= 10) {
        memset(sums, 0, (V + 3) * C * sizeof(float));
        for (int64_t i = 0; i < T * C; i++) {
            tokens[i / C] = (int32_t)(random_u64(6, 1, (uint64_t)i / C) % (uint64_t)kinds);
            sums[tokens[i / C] * C + i % C] += dout[i] = (float)uniform(5, i);
        }
        ops_embedding_backward(&s, dwte, NULL, (const Real *)(const void *)dout, tokens, NULL, 1, T,
                               C, V + 3, T, false, false);
        ops_wait(&s);
        assert_memory_equal(dwte, sums, (V + 3) * C * sizeof(float));
    }
    double *norm = (double *)(void *)floats(2);
    for (int bit = 0; bit < 31; bit += EACH_BIT) { // two tokens, which alternate
        for (int64_t i = 0; i < 100; i++) {
            tokens[i] = (int32_t)((i % 2 ? 1u << bit : 0) | (bit < 30 ? 1u << 30 : 0));
            for (int64_t j = 0; j < C; j++) { dout[i * C + j] = i % 2 ? 2.0f : 1.0f; }
        }
        *norm = 0.0;
        ops_embedding_sample_norms(&s, norm, (const Real *)(const void *)dout, tokens, false, 1,
                                   100, C, INT32_MAX);
        ops_wait(&s);
        assert_true(*norm == C * (50.0 * 50.0 + 100.0 * 100.0));
    }
#ifdef EMU_H // a vocabulary of 9 or 10 bits is sorted by one or two digits
    for (int64_t most = 512; most <= 513; most++) {
        for (int64_t t = 0; t < 100; t++) { tokens[t] = 0; }
        nvtxRangePushA("counted");
        const int64_t before = emu_counts.launches;
        ops_embedding_sample_norms(&s, norm, (const Real *)(const void *)dout, tokens, false, 1,
                                   100, C, most);
        assert_int_equal(emu_counts.launches - before, most - 511 + 2); // the squares, their sum
        nvtxRangePop();
        ops_wait(&s);
    }
#endif
    ops_free(norm);
    ops_free(dout);
    ops_free(dwte);
    ops_free(sums);
    ops_free(tokens);
    free_stream(&s);
}

// The sum that ops_square_sum() promises, the obvious way: a chunk's elements go to 32 sums in
// turns, which are added in order.
static double reference_square_sum(ExactSum *sum, const float *x, int64_t n, int64_t chunk,
                                   double scale) {
    for (int64_t first = 0; first < n; first += chunk) {
        double lanes[32] = {0}, total = 0.0;
        for (int64_t i = first; i < min_i64(n, first + chunk); i++) {
            lanes[(i - first) % 32] += (double)x[i] * (double)x[i];
        }
        for (int l = 0; l < 32; l++) { total += lanes[l]; }
        exact_add(sum, scale * total);
    }
    return exact_value(*sum);
}
static double computed_square_sum(Stream *s, ExactSum *sum, const float *x, int64_t n,
                                  int64_t chunk, double scale) {
    ExactSum *read = (ExactSum *)ops_alloc_host(sizeof *read);
    ops_square_sum(s, sum, x, n, chunk, scale);
    ops_to_host_later(s, read, sum, sizeof *read);
    ops_wait(s);
    const double value = exact_value(*read);
    ops_free_host(read);
    return value;
}
// bit for bit, for any number of threads, chunks and elements
static void test_square_sums(void **state) {
    (void)state;
    enum { MOST = 100003 };
    const int64_t counts[] = {0, 1, 31, 255, 256, 257, 8 * 8 * 256 + 1, MOST},
                  chunks[] = {256, 4096};
    const double scales[] = {1.0, 1.0 / 9};
    const Case c = {RESIDUAL, MOST, 1, 1, 0, 0, 1};
    float *x = floats(MOST);
    ExactSum *sum = (ExactSum *)ops_alloc(sizeof *sum);
    for (int64_t i = 0; i < MOST; i++) {
        x[i] = ldexpf((float)uniform(4, i), (int)(random_u64(5, 5, (uint64_t)i) % 80) - 60);
    }
    for (int threads = 1; threads <= 3; threads++) {
        Stream s = stream_of(&c, threads);
        for (int k = 0; k < 8 * 2 * 2; k++) {
            const int64_t n = counts[k / 4], chunk = chunks[k % 2];
            ExactSum expected;
            memset(&expected, 0, sizeof expected);
            ops_zero(&s, sum, sizeof *sum);
            double reference = reference_square_sum(&expected, x, n, chunk, scales[k / 2 % 2]);
            assert_true(computed_square_sum(&s, sum, x, n, chunk, scales[k / 2 % 2]) == reference);
            // what is there is added to, from an address that is not that of an allocation
            reference = reference_square_sum(&expected, x + 1, n / 2, chunk, 0.25);
            assert_true(computed_square_sum(&s, sum, x + 1, n / 2, chunk, 0.25) == reference);
        }
        free_stream(&s);
    }
    Stream s = stream_of(&c, 2);
    for (int64_t i = 0; i < MOST; i++) {
        x[i] = (float)(random_u64(2, 2, (uint64_t)i) % 2001) - 1000.0f;
    }
    uint64_t squares = 0;
    for (int64_t i = 0; i < MOST; i++) { squares += (uint64_t)((int64_t)x[i] * (int64_t)x[i]); }
    ops_zero(&s, sum, sizeof *sum);
    assert_true(computed_square_sum(&s, sum, x, MOST, 256, 1) == (double)squares);
    x[MOST / 2] = INFINITY; // one element that is no number makes the sum none
    assert_true(isnan(computed_square_sum(&s, sum, x, MOST, 256, 1)));
    free_stream(&s);
    ops_free(x);
    ops_free(sum);
}

// --- quantization: bit for bit what an obvious reference makes -----------------------------------
static const QuantFormat formats[] = {{8, 16},   {4, 16},   {8, 256},  {4, 256},     {8, 2048},
                                      {4, 2048}, {8, 8192}, {4, 8192}, {8, 1 << 30}, {4, 1 << 30}};
enum { FORMATS = sizeof formats / sizeof formats[0], CONTRIBUTIONS = 5 };

// One bit after another: element i has the bits from bits * i on, the lowest first, behind the
// scale.
static int64_t reference_record(uint8_t *record, const float *x, int64_t n, int bits) {
    const int least = bits == 8 ? -128 : -8;
    const int64_t bytes = 4 + round_up(ceil_div(n * bits, 8), 4);
    float extreme = 0.0f;
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        finite = finite && isfinite(x[i]);
        if (fabsf(x[i]) > fabsf(extreme) || (fabsf(x[i]) == fabsf(extreme) && x[i] < 0.0f)) {
            extreme = x[i];
        }
    }
    float d = fabsf(extreme) < 0x1p-100f ? 0.0f : extreme / (float)least;
    const float inverse = d == 0.0f ? 0.0f : 1.0f / d;
    memset(record, 0, (size_t)bytes);
    for (int64_t i = 0; i < n; i++) {
        const double quotient =
            finite ? rint((double)(float)((double)x[i] * (double)inverse)) : 1e9;
        const int code = (int)fmin(quotient, -least - 1), pattern = bits == 8 ? code : code + 8;
        for (int64_t b = 0; b < bits; b++) {
            record[4 + (i * bits + b) / 8] |= (uint8_t)((pattern >> b & 1) << (i * bits + b) % 8);
        }
    }
    memcpy(record, finite ? (const void *)&d : "\0\0\xc0\x7f", 4);
    return bytes;
}
static int64_t reference_quantize(uint8_t *out, const float *x, int64_t n, QuantFormat f) {
    uint8_t *begin = out;
    for (int64_t i = 0; i < n; i += f.block) {
        out += reference_record(out, x + i, min_i64(f.block, n - i), f.bits);
    }
    return out - begin;
}
// of element i
static int reference_code(const uint8_t *records, int64_t i, QuantFormat f, float *d) {
    const uint8_t *record = records + i / f.block * (4 + f.block * f.bits / 8);
    int pattern = 0;
    for (int64_t b = 0, at = i % f.block * f.bits; b < f.bits; b++, at++) {
        pattern |= (record[4 + at / 8] >> at % 8 & 1) << b;
    }
    memcpy(d, record, 4);
    return f.bits == 4 ? pattern - 8 : pattern < 128 ? pattern : pattern - 256;
}

// Numbers of all kinds, a kind for a block; all are in bf16 too, where that is asked for.
static float quant_number(uint64_t stream, int64_t i, int64_t block, DType dtype) {
    const int kind = (int)((i / min_i64(block, 300) + (int64_t)stream) % 11);
    const uint64_t draw = random_u64(9, stream, (uint64_t)i);
    uint32_t bits = (uint32_t)draw;
    float x = (float)(2.0 * random_uniform(8, stream, (uint64_t)i) - 1.0);
    if (kind == 1) { x = draw % 2 ? 0.0f : -0.0f; }
    // denormal, and too small
    if (kind == 2) { x *= draw % 64 ? 0x1p-130f : 0x1p-101f; }
    // on both sides of the border
    if (kind == 3) { x *= 0x1p-99f; }
    // ties of 8 bits
    if (kind == 4) { x = i % 16 ? ((float)(draw % 255) - 127.0f) / 2.0f : -128.0f; }
    // of 4 bits, and d < 0
    if (kind == 5) { x = i % 16 ? ((float)(draw % 15) - 7.0f) / 2.0f : 8.0f; }
    // an extreme of either sign
    if (kind == 6) { x = draw % 2 ? 3.0f : -3.0f; }
    if (kind == 7 && draw % 16 == 0) { x = draw % 32 ? NAN : INFINITY; }
    if (kind == 8) { x *= 3e38f; }
    if (kind == 9) {
        bits = (bits & 0x7f800000u) == 0x7f800000u ? bits & 0xbfffffffu : bits; // any finite
        memcpy(&x, &bits, 4);
    }
    return dtype == DTYPE_BF16 ? bf16_to_float(float_to_bf16(x)) : x;
}
// the same bits; any NaN is a NaN
static void check_floats(const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        assert_true(isnan(a[i]) ? isnan(b[i]) : memcmp(a + i, b + i, 4) == 0);
    }
}

// All of an operation's arrays begin `shift` elements behind where memory was given, so that
// nothing relies on more than is promised.
typedef struct {
    QuantFormat f;
    int64_t n, bytes, stride;
    float *x, *out, *expected;
    uint16_t *x16, *out16, *error, *expected_error;
    uint8_t *records, *expected_records, *contributions;
} QuantTrial;
static QuantTrial make_quant_trial(QuantFormat f, int64_t n, int shift, DType dtype) {
    QuantTrial t;
    t.f = f;
    t.n = n;
    t.bytes = quant_bytes(f, n);
    t.stride = t.bytes + 4;
    t.x = floats(n + shift) + shift;
    t.out = floats(n + shift) + shift;
    t.expected = floats(n);
    t.x16 = (uint16_t *)(void *)floats(n + shift) + shift;
    t.out16 = (uint16_t *)(void *)floats(n + shift) + shift;
    t.error = (uint16_t *)(void *)floats(n + shift) + shift;
    t.expected_error = (uint16_t *)(void *)floats(n);
    t.records = (uint8_t *)(floats(t.bytes / 4 + 1 + shift) + shift);
    t.expected_records = (uint8_t *)floats(t.bytes / 4 + 1);
    t.contributions = (uint8_t *)(floats(CONTRIBUTIONS * t.stride / 4 + shift) + shift);
    for (int64_t i = 0; i < n; i++) {
        t.x[i] = quant_number(1, i, f.block, dtype);
        t.x16[i] = float_to_bf16(t.x[i]);
    }
    return t;
}
static void free_quant_trial(QuantTrial *t, int shift) {
    ops_free(t->x - shift);
    ops_free(t->out - shift);
    ops_free(t->expected);
    ops_free(t->x16 - shift);
    ops_free(t->out16 - shift);
    ops_free(t->error - shift);
    ops_free(t->expected_error);
    ops_free((float *)(void *)t->records - shift);
    ops_free(t->expected_records);
    ops_free((float *)(void *)t->contributions - shift);
}
static void check_records(QuantTrial *t) { // and that what follows them is left alone
    assert_memory_equal(t->records, t->expected_records, (size_t)t->bytes + 4);
    memset(t->records, 0x5a, (size_t)t->bytes + 4);
}
static void check_quantize(QuantTrial *t, Stream *s, DType dtype) {
    assert_int_equal(reference_quantize(t->expected_records, t->x, t->n, t->f), t->bytes);
    memset(t->expected_records + t->bytes, 0x5a, 4);
    memset(t->records, 0x5a, (size_t)t->bytes + 4);
    ops_quantize(s, t->records, dtype == DTYPE_BF16 ? (const void *)t->x16 : t->x, dtype, t->n,
                 t->f);
    ops_wait(s);
    check_records(t);
    for (int64_t i = 0; i < t->n; i++) {
        float d;
        const int code = reference_code(t->expected_records, i, t->f, &d);
        t->expected[i] = (float)((double)d * code);
    }
    ops_dequantize(s, t->out, DTYPE_FP32, t->expected_records, t->n, t->f);
    ops_dequantize(s, t->out16, DTYPE_BF16, t->expected_records, t->n, t->f);
    ops_wait(s);
    check_floats(t->expected, t->out, t->n);
    for (int64_t i = 0; i < t->n; i++) {
        const float there = bf16_to_float(t->out16[i]),
                    rounded = bf16_to_float(float_to_bf16(t->expected[i]));
        check_floats(&rounded, &there, 1);
    }
}
// alike: contributions of one size, so that none hides another
static void check_quantized_sums(QuantTrial *t, Stream *s, bool alike) {
    for (int count = 1; count <= CONTRIBUTIONS; count++) {
        uint8_t *contribution = t->contributions + (count - 1) * t->stride;
        for (int64_t i = 0; i < t->n; i++) {
            t->out[i] = alike ? (float)uniform((uint64_t)count, i)
                              : quant_number((uint64_t)count, i, t->f.block, DTYPE_FP32);
        }
        reference_quantize(contribution, t->out, t->n, t->f);
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            for (int64_t i = 0; i < t->n; i++) {
                t->expected[i] = accumulate ? t->x[i] : 0.0f;
                t->out[i] = accumulate ? t->x[i] : NAN;
                for (int k = 0; k < count; k++) {
                    float d;
                    const int code = reference_code(t->contributions + k * t->stride, i, t->f, &d);
                    t->expected[i] = fmaf((float)code, d, t->expected[i]);
                }
            }
            ops_dequantize_sum(s, t->out, accumulate, t->contributions, t->stride, count, t->n,
                               t->f);
            ops_wait(s);
            check_floats(t->expected, t->out, t->n);
            if (accumulate) { continue; }
            reference_quantize(t->expected_records, t->expected, t->n, t->f);
            ops_requantize_sum(s, t->records, t->contributions, t->stride, count, t->n, t->f);
            ops_wait(s);
            check_records(t);
        }
    }
}
static void check_feedback(QuantTrial *t, Stream *s) { // twice: the second time there is an error
    const float beta = 0.8f;
    memset(t->error, 0, (size_t)t->n * 2);
    memset(t->expected_error, 0, (size_t)t->n * 2);
    for (int step = 0; step < 2; step++) {
        for (int64_t i = 0; i < t->n; i++) {
            t->expected[i] = t->x[i] + bf16_to_float(t->expected_error[i]);
        }
        reference_quantize(t->expected_records, t->expected, t->n, t->f);
        for (int64_t i = 0; i < t->n; i++) {
            float d;
            const int code = reference_code(t->expected_records, i, t->f, &d);
            const float lost = fmaf((float)-code, d, t->expected[i]),
                        kept = (1.0f - beta) * bf16_to_float(t->expected_error[i]);
            t->expected_error[i] = isnan(d) ? 0 : float_to_bf16(fmaf(beta, lost, kept));
        }
        ops_quantize_feedback(s, t->records, t->x, t->error, beta, t->n, t->f);
        ops_wait(s);
        check_records(t);
        assert_memory_equal(t->error, t->expected_error, (size_t)t->n * 2);
    }
}
#ifdef OPS_CPU_H
enum { MOST_THREADS = 3 };
#else
enum { MOST_THREADS = 1 }; // a GPU knows none of ours
#endif
static void check_moved(int threads) {      // messages, since the last time
    assert_true(threads > 1 || polls >= 1); // a part of the work may be too short for it
    polls = 0;
}
// What does not depend on values: slices, none at all, any number of threads, and messages that
// move meanwhile
static void test_quantize_pieces(void **state) {
    (void)state;
#ifdef EMU_H
    enum { N = 50011, BEGIN = 5 * 8192 };
#else // threads share it
    enum { N = 320011, BEGIN = 5 * 8192 };
#endif
    const Case c = {RESIDUAL, 1, 1, 1, 0, 0, 1};
    for (size_t k = 0; k < FORMATS; k++) {
        const QuantFormat f = formats[k];
        const int64_t begin = f.block <= BEGIN ? BEGIN : 0;
        QuantTrial t = make_quant_trial(f, N, 0, DTYPE_FP32);
        memset(t.expected_records, 0x5a, (size_t)t.bytes + 4);
        reference_quantize(t.expected_records, t.x, N, f);
        for (int threads = 1; threads <= MOST_THREADS; threads++) {
            Stream s = stream_of(&c, threads);
            memset(t.records, 0x5a, (size_t)t.bytes + 4);
            polls = 0;
            ops_quantize(&s, t.records, t.x, DTYPE_FP32, 0, f);
            ops_quantize(&s, t.records, t.x, DTYPE_FP32, begin, f);
            ops_quantize(&s, t.records + quant_bytes(f, begin), t.x + begin, DTYPE_FP32, N - begin,
                         f);
            ops_wait(&s);
            check_moved(threads);
            check_records(&t);
            ops_dequantize(&s, t.expected, DTYPE_FP32, t.expected_records, N, f);
            check_moved(threads);
            ops_dequantize(&s, t.out, DTYPE_FP32, t.expected_records, begin, f);
            ops_dequantize_sum(&s, t.out + begin, false, t.expected_records + quant_bytes(f, begin),
                               0, 1, N - begin, f);
            ops_wait(&s);
            for (int64_t i = 0; i < N; i++) {
                assert_true(t.out[i] == t.expected[i] || isnan(t.expected[i]));
            }
            polls = 0;
            ops_dequantize_sum(&s, t.out, false, t.expected_records, 0, 0, N, f); // of nothing
            check_moved(threads);
            ops_wait(&s);
            for (int64_t i = 0; i < N; i++) {
                t.expected[i] = t.x[i] + (float)i;
                assert_true(t.out[i] == 0.0f);
                t.out[i] = (float)i;
            }
            ops_accumulate(&s, t.out, t.x, N);
            check_moved(threads);
            ops_wait(&s);
            check_floats(t.expected, t.out, N);
            free_stream(&s);
        }
        free_quant_trial(&t, 0);
    }
}

// The sum of 16 contributions by two hops, 4 x 4: relative RMS error. A block of 256 normal numbers
// loses 0.112 of its RMS in 4 bits (the mean extreme is 2.9 of 8 steps), and it is lost twice:
// about 0.112 sqrt(2). 8 bits have 16 times finer steps.
static double two_hop_error(Stream *s, QuantFormat f) {
    enum { N = 16384, HOP = 4 };
    const int64_t bytes = quant_bytes(f, N);
    float *x = floats(N), *sum = floats(N);
    double *exact = doubles(N), error = 0.0, total = 0.0;
    char *first = (char *)floats(HOP * bytes / 4), *second = (char *)floats(HOP * bytes / 4);
    for (int node = 0; node < HOP; node++) {
        for (int rank = 0; rank < HOP; rank++) {
            for (int64_t i = 0; i < N; i += 2) {
                double pair[2];
                random_normal_pair(11, (uint64_t)(node * HOP + rank), (uint64_t)i / 2, pair);
                for (int k = 0; k < 2; k++) {
                    x[i + k] = (float)pair[k];
                    exact[i + k] += (double)x[i + k];
                }
            }
            ops_quantize(s, first + rank * bytes, x, DTYPE_FP32, N, f);
            ops_wait(s); // x is made anew
        }
        ops_requantize_sum(s, second + node * bytes, first, bytes, HOP, N, f);
    }
    ops_dequantize_sum(s, sum, false, second, bytes, HOP, N, f);
    ops_wait(s);
    for (int64_t i = 0; i < N; i++) {
        error += pow((double)sum[i] - exact[i], 2.0);
        total += exact[i] * exact[i];
    }
    ops_free(x);
    ops_free(sum);
    ops_free(first);
    ops_free(second);
    free(exact);
    return sqrt(error / total);
}
static void test_two_hops(void **state) {
    (void)state;
    const Case c = {RESIDUAL, 1, 1, 1, 0, 0, 1};
    const QuantFormat four = {4, 256}, eight = {8, 256};
    Stream s = stream_of(&c, 2);
    const double error = two_hop_error(&s, four);
    assert_true(error > 0.1 && error <= 0.179); // the anchor's figure
    assert_true(two_hop_error(&s, eight) <= error / 15.0);
    free_stream(&s);
}

static void test_quantize(void **state) {
    const QuantFormat f = *(const QuantFormat *)*state;
    const int64_t lengths[] = {1, 15, 16, 255, 256, 257, 2049, 5007, 10239};
    const Case c = {RESIDUAL, 1, 1, 1, 0, 0, 1};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (int variant = 0; variant < 4; variant++) {
            const DType dtype = variant % 2 ? DTYPE_BF16 : DTYPE_FP32;
            Stream s =
                stream_of(&c, lengths[i] > 2 * 2048 ? 1 + (int)(i + (size_t)variant) % 3 : 1);
            QuantTrial t = make_quant_trial(f, lengths[i], variant / 2, dtype);
            check_quantize(&t, &s, dtype);
            if (dtype == DTYPE_FP32) {
                check_quantized_sums(&t, &s, variant > 1);
                check_feedback(&t, &s);
            }
            free_quant_trial(&t, variant / 2);
            free_stream(&s);
        }
    }
}

#ifdef OPS_CPU_H                       // messages move while a GPU is given work: check_moved()
static void test_polls(void **state) { // messages move while a long operation runs
    (void)state;
    const Case longer[] = {{CLASSIFIER, 1, 64, 64, 3000, 0, 1},
                           {MATMUL, 1, 64, 600, 40, 1, 1},
                           {LAYERNORM, 1, 3000, 4, 0, 0, 1},
                           {ATTENTION, 1, 300, 16, 1, 0, 1},
                           {RESIDUAL, 300007, 1, 1, 0, 0, 1},
                           {ADAMW, 300007, 1, 1, 0, 0, 1},
                           {SGD, 300007, 1, 1, 0, 0, 1},
                           {CLASSIFIER_KEPT, 1, 64, 64, 3000, 0, 1},
                           {MATMUL_NORMS, 1, 100, 300, 90, 0, 1},
                           {MATMUL_NORMS, 1, 300, 20, 30, 0, 1},
                           {TIED_NORMS, 1, 100, 40, 30, 0, 1},
                           {TIED_ROWS, 1, 100, 40, 30, 0, 1},
                           {BIAS_SAMPLES, 3, 20, 0, 300, 0, 1},
                           {LAYERNORM_SAMPLES, 3, 20, 300, 0, 0, 1},
                           {EMBEDDING_NORMS, 3, 20, 300, 9, 0, 1},
                           {SAMPLE_NORMS, 1, 1, 300007, 0, 0, 1},
                           {MATMUL_SAMPLES, 1, 100, 300, 40, 1, 1},
                           {ACCUMULATE_SAMPLES, 1, 1, 300007, 0, 1, 1},
                           {NOISE, 300007, 1, 1, 0, 0, 1},
                           {RMSNORM, 1, 3000, 4, 0, 0, 1},
                           {SWIGLU, 1, 3000, 100, 0, 0, 1},
                           {RELU2, 300007, 1, 1, 0, 0, 1},
                           {SOFTCAP, 300007, 1, 1, 0, 0, 1},
                           {ROTARY, 1, 3000, 64, 2, 0, 1},
                           {HEAD_NORM, 1, 3000, 64, 2, 0, 1},
                           {RMSNORM_SAMPLES, 3, 20, 300, 0, 0, 1},
                           {HEAD_NORM_SAMPLES, 3, 20, 64, 2, 0, 1}};
    for (size_t i = 0; i < sizeof longer / sizeof longer[0]; i++) {
        Trial t = make_trial(&longer[i]);
        polls = 0;
        run_trial(&longer[i], &t, longer[i].threads, false);
        assert_true(polls >= 1);
        free_trial(&t);
    }
}
#endif

// What is not a number, and equal ones: of each group the first experts that are left.
static void test_routes(void **state) {
    (void)state;
    enum { ROWS = 5, EACH = 11 };
    for (int number = 0; number < 4; number++) {
        const Case c = {MIXTURE, ROWS, 1, 4, 3 * EACH, 2, 2, number % 2 ? 3 : 1, 4};
        Mixture m = make_mixture(&c);
        Stream s = stream_of(&c, 2);
        float *x = floats(ROWS * 4), *weight = floats(3 * EACH * 4), *bias = floats(3 * EACH);
        for (int i = 0; i < ROWS * 4 && number >= 2; i++) { x[i] = NAN; }
        ops_route(&s, m.route, m.loads, m.p, (Real *)x, (Real *)weight, (Real *)bias, 4, m.router);
        ops_route_backward_weight(&s, weight, m.dbias, m.p, m.route, m.loads, (Real *)x, 0,
                                  m.router, false);
        ops_wait(&s);
        check_route(&m);
        for (int64_t i = 0; i < ROWS * m.route.choices && number < 2; i++) {
            const int64_t group = i % m.route.choices / 2;
            assert_int_equal(m.route.expert[i], group * EACH + i % 2);
            assert_true(fabsf(m.route.weight[i] - (number ? 1.0f / EACH : 0.5f)) < 1e-7f);
        }
        ops_free(x);
        ops_free(weight);
        ops_free(bias);
        free_mixture(&m);
        free_stream(&s);
    }
}
// Many experts, and more rows than one block of a GPU sorts: those of the largest p are chosen, from
// the largest on.
static void test_many_experts(void **state) {
    (void)state;
    precision = DTYPE_FP32;
    enum { ROWS = 700, E = 600, K = 3, C = 5 };
    const Case c = {MIXTURE, ROWS, 1, C, E, K, 2, 1, 4};
    Mixture m = make_mixture(&c);
    Stream s = stream_of(&c, 2);
    float *x = floats(ROWS * C), *weight = floats(E * C), *bias = floats(E), *dw = floats(E * C);
    for (int i = 0; i < ROWS * C; i++) { x[i] = (float)uniform(1, i); }
    for (int i = 0; i < E * C; i++) { weight[i] = (float)uniform(2, i); }
    ops_route(&s, m.route, m.loads, m.p, (Real *)x, (Real *)weight, (Real *)bias, C, m.router);
    ops_wait_loads(&s);
    int64_t rows = 0;
    for (int e = 0; e < E; e++) { rows += m.loads[e]; }
    assert_int_equal(rows, ROWS * K);
    ops_route_backward_weight(&s, dw, m.dbias, m.p, m.route, m.loads, (Real *)x, C, m.router,
                              false);
    ops_wait(&s);
    check_route(&m);
    for (int t = 0; t < ROWS && COMPARES; t++) {
        const float *p = m.p + t * E;
        double sum = 0;
        for (int e = 0; e < E; e++) {
            const int32_t *chosen = m.route.expert + t * K;
            int before = 0;
            for (int i = 0; i < E; i++) { before += p[i] > p[e] || (p[i] == p[e] && i < e); }
            if (before < K) { assert_int_equal(chosen[before], e); }
            sum += (double)p[e];
        }
        assert_true(fabs(sum - 1) < 1e-5);
    }
    for (int e = 0; e < E; e += 7) {
        for (int i = 0; i < C; i++) { // the gradient, of p in place of dlogits
            double sum = 0;
            for (int t = 0; t < ROWS; t++) { sum += (double)m.p[t * E + e] * (double)x[t * C + i]; }
            assert_true(fabs(sum - (double)dw[e * C + i]) < 1e-5);
        }
    }
    ops_free(x);
    ops_free(weight);
    ops_free(bias);
    ops_free(dw);
    free_mixture(&m);
    free_stream(&s);
}
// Loads of the parts of a micro-batch add up to those of all, to the bit; biases follow their signs.
static void test_loads(void **state) {
    (void)state;
    const Case c = {MIXTURE, 40, 1, 9, 12, 2, 2, 1, 4}, half = {MIXTURE, 20, 1, 9, 12, 2, 2, 1, 4};
    Trial t = make_trial(&c);
    Mixture all = make_mixture(&c), part = make_mixture(&half);
    Stream s = stream_of(&c, 2);
    const Real *weight = (Real *)t.in[1], *bias = (Real *)all.bias;
    ops_route(&s, all.route, all.loads, all.p, (Real *)t.in[0], weight, bias, 9, all.router);
    ops_route_backward_weight(&s, t.grad[1], all.dbias, all.p, all.route, all.loads,
                              (Real *)t.in[0], 9, all.router, false);
    for (int i = 0; i < 2; i++) {
        const Real *x = real_at_const((Real *)t.in[0], i * 20 * 9);
        ops_route(&s, part.route, part.loads, part.p, x, weight, bias, 9, part.router);
        ops_route_backward_weight(&s, t.grad[1], part.dbias, part.p, part.route, part.loads, x, 9,
                                  part.router, i);
    }
    ops_wait(&s);
    assert_memory_equal(all.dbias, part.dbias, 12 * sizeof(float));
    float *moved = floats(12);
    memcpy(moved, all.bias, 12 * sizeof(float));
    const UpdateSlice u = {
        .master = moved, .grad = all.dbias, .param = moved, .dtype = DTYPE_FP32, .n = 12};
    const OptimizerStep o = {.lr = 0.001f};
    ops_balance(&s, u, o);
    ops_wait(&s);
    for (int e = 0; e < 12; e++) {
        const float step = 12 * all.loads[e] > 80 ? 0.001f : 12 * all.loads[e] < 80 ? -0.001f : 0;
        assert_true(moved[e] == all.bias[e] - step);
    }
    ops_free(moved);
    free_mixture(&all);
    free_mixture(&part);
    free_trial(&t);
    free_stream(&s);
}
// Rows of several sources; experts that have many, none at all, or none of some sources. The
// gradient of an expert without rows is 0, or stays.
static void test_rows_of_experts(void **state) {
    (void)state;
    enum { SOURCES = 3, E = 5, C = 21, OC = 34, MOST = 200 };
    static const int32_t counts[][SOURCES][E] = {
        {{0, 70, 0, 1, 0}, {0, 0, 0, 2, 9}, {0, 5, 0, 0, 0}},
        {{0, 0, 0, 0, 90}, {0, 0, 0, 0, 1}, {0}},
        {{1, 1, 1, 1, 1}, {2, 0, 3, 0, 4}, {0, 6, 0, 5, 0}},
        {{0}, {0}, {0}}};
    const Case c = {MATMUL, MOST, 1, C, OC, 1, 2};
    for (size_t k = 0; k < 2 * sizeof counts / sizeof *counts; k++) {
        precision = k % 2 ? DTYPE_BF16 : DTYPE_FP32;
        const ExpertRows rows = {&counts[k / 2][0][0], SOURCES, E};
        const int64_t n = expert_rows_sum(rows);
        Stream s = stream_of(&c, 2);
        float *x = floats(n * C), *w = floats(E * OC * C), *dy = floats(n * OC),
              *y = floats(n * OC), *dx = floats(n * C), *gelu = floats(n * OC), *dw[2];
        for (int64_t i = 0; i < n * C; i++) { x[i] = number(uniform(1, i)); }
        for (int64_t i = 0; i < E * OC * C; i++) { w[i] = number(uniform(2, i)); }
        for (int64_t i = 0; i < n * OC; i++) { dy[i] = number(uniform(3, i)); }
        const Real *in = in_real(&s, x, n * C), *weight = in_real(&s, w, E * OC * C),
                   *dout = in_real(&s, dy, n * OC);
        ops_experts_forward(&s, out_real(&s, y, n * OC), out_real(&s, gelu, n * OC), in, weight,
                            rows, C, OC, false);
        ops_experts_backward_input(&s, out_real(&s, dx, n * C), dout, weight, NULL, rows, C, OC);
        for (int a = 0; a < 2; a++) {
            dw[a] = floats(E * OC * C);
            for (int64_t i = 0; i < E * OC * C; i++) { dw[a][i] = a ? (float)(i % 5) : NAN; }
            ops_experts_backward_weight(&s, dw[a], dout, in, rows, C, OC, a);
        }
        reals_done(&s);
        ops_wait(&s);
        double *sums = doubles(E * OC * C);
        const double close = precision == DTYPE_BF16 ? 0x1p-8 : 1e-6;
        for (int64_t row = 0, i = 0; i < SOURCES * E; row += rows.counts[i++]) {
            for (int64_t r = row; r < row + rows.counts[i]; r++) {
                for (int64_t o = 0; o < OC; o++) {
                    double sum = 0;
                    for (int64_t j = 0; j < C; j++) {
                        sum += (double)x[r * C + j] * (double)w[(i % E * OC + o) * C + j];
                        sums[(i % E * OC + o) * C + j] +=
                            (double)x[r * C + j] * (double)dy[r * OC + o];
                    }
                    assert_true(fabs((double)y[r * OC + o] - sum) < 6 * close);
                    assert_true(fabs((double)gelu[r * OC + o] - gelu_double(sum)) < 8 * close);
                }
                for (int64_t j = 0; j < C; j++) {
                    double sum = 0;
                    for (int64_t o = 0; o < OC; o++) {
                        sum += (double)dy[r * OC + o] * (double)w[(i % E * OC + o) * C + j];
                    }
                    assert_true(fabs((double)dx[r * C + j] - sum) < 8 * close);
                }
            }
        }
        for (int64_t i = 0; i < E * OC * C; i++) {
            bool none = true;
            for (int64_t f = 0; f < SOURCES; f++) {
                none = none && !rows.counts[f * E + i / (OC * C)];
            }
            assert_true(none ? dw[0][i] == 0 && dw[1][i] == (float)(i % 5)
                             : fabs((double)dw[0][i] - sums[i]) < 2e-5 &&
                                   fabs((double)dw[1][i] - (double)(i % 5) - sums[i]) < 2e-5);
        }
        float *all[] = {x, w, dy, y, dx, gelu, dw[0], dw[1]};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) { ops_free(all[i]); }
        free(sums);
        free_stream(&s);
    }
    precision = DTYPE_FP32;
}

static void test_memory(void **state) {
    (void)state;
    const size_t bytes = ((size_t)5 << 20) + 12;
    const Case c = {RESIDUAL, 1, 1, 1, 0, 0, 3};
    Stream s = stream_of(&c, 3);
    char *p = (char *)OPS_SHARED(bytes), *q = (char *)ops_alloc(bytes),
         *host = (char *)checked_malloc(bytes, "bytes");
    assert_true((uintptr_t)p % 64 == 0 && (uintptr_t)q % 64 == 0);
    ops_to_host(&s, host, q, bytes);
    for (size_t i = 0; i < bytes; i++) { assert_true(p[i] == 0 && host[i] == 0); }
    for (size_t i = 0; i < bytes; i++) { p[i] = (char)(i % 251); }
    ops_copy(&s, q, p, bytes);
    ops_to_host(&s, host, q, bytes);
    assert_memory_equal(p, host, bytes);
    ops_zero(&s, q, bytes - 1);
    ops_to_host(&s, host, q, bytes);
    assert_true(host[0] == 0 && host[bytes - 2] == 0 && host[bytes - 1] == p[bytes - 1]);
    ops_from_host(&s, q, p, bytes);
    ops_copy(&s, p + 8, q, 8);
    ops_wait(&s);
    assert_memory_equal(p, p + 8, 8);
    char *waiting = (char *)ops_alloc_host(bytes), *back = (char *)ops_alloc_host(bytes);
    for (size_t i = 0; i < bytes; i++) {
        assert_true(!waiting[i] && !back[i]);
        waiting[i] = (char)(i % 241);
    }
    ops_from_host(&s, q, waiting, bytes);
    ops_to_host_later(&s, back, q, bytes);
    ops_wait(&s);
    assert_memory_equal(waiting, back, bytes);
    ops_free(p);
    ops_free(q);
    ops_free_host(waiting);
    ops_free_host(back);
    free(host);
    free_stream(&s);
    assert_null(ops_alloc((size_t)1 << 60));
}

#ifdef OPS_CPU_H                           // what only that implementation has
static void test_functions(void **state) { // the polynomial, over its whole range
    (void)state;
    double worst = 0.0;
    for (double x = -87.2; x < 88.2; x += 1.7e-3) {
        float argument = (float)x;
        double exact = exp((double)argument);
        worst = fmax(worst, fabs((double)fast_exp(argument) - exact) / exact);
    }
    // as its comment says, in units in the last place of the smallest mantissa
    assert_true(worst < 1.6 * 0x1p-23);
    assert_true(fast_exp(0.0f) == 1.0f && fast_exp(-1e30f) == 0.0f && fast_exp(-INFINITY) == 0.0f);
    assert_true(isnan(fast_exp(NAN)) && fast_exp(INFINITY) > 1e38f);
    // error against a value of about |x|: ten units cover the exponent's rounding
    for (double x = -12.0; x < 12.0; x += 1.3e-3) {
        float argument = (float)x;
        double slope =
            (gelu_double((double)argument + 1e-5) - gelu_double((double)argument - 1e-5)) / 2e-5;
        assert_true(fabs((double)gelu_value(argument) - gelu_double((double)argument)) <=
                    10 * 0x1p-24 * fmax(fabs(x), 0.1));
        assert_true(fabs((double)gelu_slope(argument) - slope) <= 20 * 0x1p-24 + 1e-9);
    }
    assert_true(gelu_value(-100.0f) <= 0.0f && gelu_value(-100.0f) > -1e-30f &&
                gelu_value(100.0f) == 100.0f && gelu_slope(100.0f) == 1.0f);
    assert_true(isnan(gelu_value(NAN)) && fabsf(gelu_slope(-100.0f)) < 1e-30f);
    // as their comments say
    for (double x = 1e-37; x < 1e37; x *= 1.0017) {
        const double exact = log((double)(float)x);
        assert_true(fabs((double)fast_log((float)x) - exact) <= 2.0 * 0x1p-24 * fabs(exact));
    }
    assert_true(fast_log(1.0f) == 0.0f);
    for (double x = 1e-6; x < 50.0; x *= 1.00017) {
        const double exact = tanh((double)(float)x);
        assert_true(fabs((double)fast_tanh((float)x) - exact) <= 4.0 * 0x1p-24 * exact);
        assert_true(fast_tanh(-(float)x) == -fast_tanh((float)x));
    }
    assert_true(fast_tanh(0.0f) == 0.0f && fast_tanh(1e30f) == 1.0f && isnan(fast_tanh(NAN)));
}

#ifdef OPS_CPU_H
// An element of a product has the same bits in every tile that has at least TILE_LEAST rows and
// columns, or all of them (gemm_cpu.h): slices up to the longest that the program uses, and sizes
// at which the library changes its kernels.
static int64_t draw(uint64_t *state, int64_t least, int64_t most) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return least + (int64_t)(*state >> 33) % (most - least + 1);
}
static int64_t draw_part(uint64_t *state, int64_t whole, int64_t *begin) {
    *begin = 0;
    if (whole < 2 * TILE_LEAST || draw(state, 0, 3) == 0) { return whole; }
    *begin = draw(state, 0, (whole - TILE_LEAST) / 16) * 16;
    return draw(state, TILE_LEAST, whole - *begin);
}
// The bytes of element (row, col) of an operand.
static const void *operand_at(Operand operand, const void *x, int64_t row, int64_t col,
                              int64_t stride, size_t size) {
    return (const char *)x +
           (operand == TRANSPOSED ? col * stride + row : row * stride + col) * (int64_t)size;
}
static void check_tile_of_product(uint64_t *state, DType type) {
    const bool bf16 = type == DTYPE_BF16;
    const int64_t most = draw(state, 0, 9) ? 300 : 1800, m = draw(state, 1, most),
                  n = draw(state, 1, most),
                  k = draw(state, 1,
                           !bf16       ? 768
                           : cpu_tiles ? TILE_BLOCK_DEPTH
                                       : 2000);
    const Operand ta = draw(state, 0, 1) ? TRANSPOSED : AS_STORED,
                  tb = draw(state, 0, 1) ? TRANSPOSED : AS_STORED;
    const int64_t lda = (ta == TRANSPOSED ? m : k) + draw(state, 0, 9),
                  ldb = (tb == TRANSPOSED ? k : n) + draw(state, 0, 9), ldc = n + draw(state, 0, 9),
                  sizes[3] = {(ta == TRANSPOSED ? k : m) * lda, (tb == TRANSPOSED ? n : k) * ldb,
                              m * ldc};
    float *in[3], *tile = (float *)checked_malloc((size_t)sizes[2] * sizeof(float), "tile");
    for (int i = 0; i < 3; i++) {
        in[i] = (float *)checked_malloc((size_t)sizes[i] * sizeof(float), "matrix");
        for (int64_t j = 0; j < sizes[i]; j++) { in[i][j] = (float)draw(state, -999, 999) / 999; }
        if (bf16 && i < 2) {
            round_part((uint16_t *)in[i], in[i], 0, sizes[i], round_to_nearest());
        }
    }
    memcpy(tile, in[2], (size_t)sizes[2] * sizeof(float));
    int64_t row, col;
    const Product whole = {ta, tb, m, n, k, in[0], in[1], lda, ldb, draw(state, 0, 1), in[2], ldc};
    Product part = whole;
    part.m = draw_part(state, m, &row);
    part.n = draw_part(state, n, &col);
    part.a = operand_at(ta, in[0], row, 0, lda, dtype_size(type));
    part.b = operand_at(tb, in[1], 0, col, ldb, dtype_size(type));
    part.c = tile + row * ldc + col;
    if (bf16 && cpu_tiles) {
        void *space = aligned_alloc(64, TILE_SPACE);
        gemm_by_tiles(&whole, space);
        gemm_by_tiles(&part, space);
        free(space);
    } else if (bf16) {
        gemm_bf16(&whole);
        gemm_bf16(&part);
    } else {
        gemm_fp32(&whole);
        gemm_fp32(&part);
    }
    for (int64_t i = row; i < row + part.m; i++) {
        assert_memory_equal(tile + i * ldc + col, in[2] + i * ldc + col,
                            (size_t)part.n * sizeof(float));
    }
    for (int i = 0; i < 3; i++) { free(in[i]); }
    free(tile);
}
static void test_products_bf16(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    gemm_open(DTYPE_BF16);
    gemm_serial_here();
    const bool tiles = cpu_tiles, library = gemm_open_bf16();
    const DType compute = ops_compute();
    if (library) { ops_compute_in(DTYPE_BF16); } // also where conversion to fp32 is faster
    for (int i = 0; i < (getenv("TEST_ALL") ? 5000 : 300) && gemm_same_in_all_tiles(); i++) {
        cpu_tiles = tiles && !(library && i % 4 == 1); // both, where the library can
        check_tile_of_product(&seed,
                              ops_compute() == DTYPE_BF16 && i % 2 ? DTYPE_BF16 : DTYPE_FP32);
    }
    cpu_tiles = tiles;
    ops_compute_in(compute);
    omp_set_num_threads(omp_get_num_procs());
}
#endif

// Tiles cover an output of any size and fit into a thread's buffer. 4032 rows once divided by 0.
static void test_tilings(void **state) {
    (void)state;
    static const int64_t columns[] = {1, 40, 128, 384, 1000, 4032};
    for (int64_t rows = 1; rows <= 20000; rows += rows < 4100 ? 1 : 13) {
        const int64_t cols = columns[rows % 6];
        const Tiling grid = tile_output(rows, cols, 128, 1 + (int)(rows % 2), GEMM_BUFFER);
        int64_t covered = 0;
        for (int64_t i = 0; i < grid.tiles; i++) {
            const Tile t = tile_at(&grid, i);
            assert_true(t.rows > 0 && t.cols > 0 && t.rows * t.cols <= GEMM_BUFFER);
            covered += t.rows * t.cols;
        }
        assert_int_equal(covered, rows * cols);
    }
}
// Each optimizer has cases.
static void test_optimizers(void **state) {
    (void)state;
    for (size_t o = 0; o < sizeof optimizers / sizeof *optimizers; o++) {
        bool has = false;
        for (size_t i = 0; i < CASES; i++) {
            has = has || !strcmp(operations[cases[i].op].name, optimizers[o].name);
        }
        if (!has) { fail_msg("no cases of \"%s\"", optimizers[o].name); }
    }
}
// What is taken for some rows is enough for fewer: the last batch of a validation is short, its
// chunks may be longer.
static void test_workspace(void **state) {
    (void)state;
    for (int64_t rows = 1; rows <= 12; rows++) {
        OpsShape shape = {rows, 129, 16, 1, 300, 384, LOGITS_PLENTY};
        for (int64_t fewer = 1; fewer <= rows * shape.T; fewer++) {
            int64_t floats;
            classifier_space(NULL, fewer, shape.C, shape.V, 2, CLASSIFIER_ROWS, true, &floats);
            assert_true((size_t)floats * sizeof(float) <= ops_workspace_bytes(shape, 2));
        }
    }
}
// A workspace for chunks of so many rows is used for chunks of as many: each chunk reads and writes
// the gradient of the whole table.
static void test_chunks_of_logits(void **state) {
    (void)state;
    enum { THREADS = 2, C = 16, V = 3000 };
    for (int64_t tokens = 20; tokens <= 1100; tokens += 27) {
        for (int64_t most = 16; most <= 352; most += 41) {
            OpsShape shape = {1, tokens, C, 1, V, V, most};
            Stream s = {.threads = THREADS, .workspace_bytes = ops_workspace_bytes(shape, THREADS)};
            int64_t floats;
            const int64_t asked =
                classifier_space(NULL, tokens, C, V, THREADS, most, true, &floats).R;
            s.workspace = calloc(1, s.workspace_bytes);
            assert_true(classifier_that_fits(&s, tokens, C, V, true).R >= asked);
            free(s.workspace);
        }
    }
}
// under the address sanitizer an allocation that fails gives NULL, as without
#endif

#ifndef OPS_CPU_H
// What is taken for some tokens is enough for fewer, of which a router's gradient may have more
// parts.
static void test_scratch_of_routers(void **state) {
    (void)state;
    static const OpsShape shapes[] = {
        {.T = 1, .C = 128, .experts = 40, .choices = 1},
        {.T = 1, .C = 7, .experts = 3, .choices = 1},
        {.T = 1, .C = 2000, .experts = 300, .choices = 2},
    };
    for (int i = 0; i < 3; i++) {
        OpsShape shape = shapes[i];
        int64_t most = 0;
        for (shape.rows = 1; shape.rows < 40000; shape.rows++) {
            const int64_t parts = router_parts(shape.rows, shape.experts, shape.C);
            most = max_i64(most, parts > 1 ? parts * shape.experts * shape.C * 4 : 0);
            assert_true(most <= experts_scratch_bytes(shape));
        }
    }
}
#endif

const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

int main(void) {
#ifdef OPS_TEST_BEGIN
    OPS_TEST_BEGIN();
#endif
    static char names[2 * CASES][96], names_of_formats[FORMATS][64];
    static struct CMUnitTest tests[2 * CASES + FORMATS + 18];
    int count = 0;
    for (int i = 0; i < 2 * CASES; i++) {
        const Case *c = &cases[i / 2];
        const bool bf16 = i % 2;
        if ((bf16 && operations[c->op].roundings[0] == 0) || !is_drawn(i, c)) { continue; }
        snprintf(names[i], sizeof names[i],
                 "%s rows %" PRId64 " T %" PRId64 " C %" PRId64 " other %" PRId64
                 " variant %d threads %d%s",
                 operations[c->op].name, c->rows, c->T, c->C, c->other, c->variant, c->threads,
                 bf16 ? " bf16" : "");
        struct CMUnitTest test = {names[i], bf16 ? test_case_bf16 : test_case, NULL, fp32_again,
                                  (void *)(uintptr_t)c};
        tests[count++] = test;
    }
    if (cases_each_drawn() > 1) {
        printf("seed of drawn cases: %" PRIu64 " (set TEST_SEED to repeat)\n", test_seed());
    }
    for (int i = 0; i < FORMATS; i++) {
        if (!format_is_drawn(i)) { continue; }
        snprintf(names_of_formats[i], sizeof names_of_formats[i], "quantize bits %d block %" PRId64,
                 formats[i].bits, formats[i].block);
        struct CMUnitTest test = {names_of_formats[i], test_quantize, NULL, NULL,
                                  (void *)(uintptr_t)&formats[i]};
        tests[count++] = test;
    }
    const struct CMUnitTest others[] = {
        cmocka_unit_test(test_quantize_pieces),
        cmocka_unit_test(test_two_hops),
        cmocka_unit_test(test_precision),
        cmocka_unit_test(test_equal_tokens),
        cmocka_unit_test(test_square_sums),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_rounding_stochastic),
        cmocka_unit_test(test_clip_factors),
        cmocka_unit_test(test_sample_norms),
        cmocka_unit_test(test_routes),
        cmocka_unit_test(test_many_experts),
        cmocka_unit_test(test_loads),
        cmocka_unit_test_teardown(test_rows_of_experts, fp32_again),
#ifdef OPS_CPU_H
        cmocka_unit_test(test_polls),
        cmocka_unit_test(test_functions),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_chunks_of_logits),
        cmocka_unit_test(test_products_bf16),
        cmocka_unit_test(test_tilings),
        cmocka_unit_test(test_optimizers),
#else
        cmocka_unit_test(test_scratch_of_routers),
#endif
    };
    memcpy(tests + count, others, sizeof others);
    // a pattern of names: some of the tests
    if (getenv("OPS_TESTS")) { cmocka_set_test_filter(getenv("OPS_TESTS")); }
    return _cmocka_run_group_tests("ops", tests, (size_t)count + sizeof others / sizeof others[0],
                                   NULL, NULL);
}
