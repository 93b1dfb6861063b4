// bench_ops.c: how fast the tensor operations are, against what this machine can do. `make
// bench-ops`
//
// For each shape of GPT-2 124M: every operation of a training step with its time, its rate, the
// time at the machine's limit, and the share of the limit that it reaches.
//   products           the limit is the peak of fused multiply-adds in fp32 of all threads, or of
//                      the products of bf16 that the CPU has: of layers, of causal attention (the multiplications
//                      below the diagonal), and of private training (half the pairs of rows)
//   quantization       the limit is ops_copy() of as many bytes; records of 256 elements
//   the rest           the limit is a plain pass that reads and writes as many bytes
// Times are the best of several. The peaks are measured before each shape, since what else the
// machine does changes. Usage: bench_ops [threads] [rounds] [bf16], or bench_ops THREADS peak
#include "ops/cpu/ops_cpu.h"

enum { C = 768, NH = 12, LAYERS = 12, V = 50257, Vp = 50304, ELEMENTS = 124475904, ADAM_PART = 4 };

static int rounds = 5;
typedef struct {
    double seconds, flops; // of operations; of products
} Step;                    // a whole step, summed as rows are printed
static Step step;
static double peak_rate; // flop/s of the instructions that multiply
static double pass_rate; // bytes/s of a plain pass over memory

// Fills memory with pairs of equal bf16 numbers, which are ordinary fp32 numbers, too.
static void fill(float *p, int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const float x = (float)(random_u64(1, 1, (uint64_t)i) >> 40) * 0x1p-24f - 0.5f;
        const uint32_t pair = float_to_bf16(x) * 0x10001u;
        memcpy(p + i, &pair, sizeof pair);
    }
}
static float *filled(int64_t n) {
    float *p = (float *)ops_alloc((size_t)n * sizeof(float));
    if (!p) { die(EXIT_RESOURCES, "free some memory", "cannot allocate %" PRId64 " floats", n); }
    fill(p, n);
    return p;
}
static Real *real(float *p) { return (Real *)(void *)p; }

// With one thread the processor time of this program, which other programs on the machine hardly
// disturb; else the wall's.
static double clock_now(const Stream *s) {
    struct timespec t;
    if (s->threads > 1) { return seconds_now(); }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#define BEST(best, work)                                                                           \
    do {                                                                                           \
        double begin_ = clock_now(s);                                                              \
        work;                                                                                      \
        double took_ = clock_now(s) - begin_;                                                      \
        if (took_ < (best)) { (best) = took_; }                                                    \
    } while (0)

static void print_peaks(const Stream *s) {
    const bool tiles = gemm_open_tiles(), has_bf16 = tiles || gemm_open_bf16(),
               bf16 = ops_compute() == DTYPE_BF16;
    const OpsPeak fp32 = cpu_peak(gemm_multiplier(false), s->threads),
                  pairs = cpu_peak(tiles ? MULTIPLY_TILES : gemm_multiplier(has_bf16), s->threads);
    printf("peak of fp32 multiply-adds %.1f GFLOP/s, of bf16 dot products %.1f GFLOP/s (%s, %s)\n",
           fp32.measured * 1e-9, has_bf16 ? pairs.measured * 1e-9 : 0.0, fp32.instructions,
           has_bf16 ? pairs.instructions : "the library has none");
    peak_rate = bf16 ? pairs.measured : fp32.measured;
}

static void print_head(const char *what) {
    printf("\n%-30s %6s %10s %12s %10s %7s\n", what, "a step", "ms", "rate", "limit ms", "share");
}
static void row_product(const char *name, int calls, double seconds, double flops) {
    printf("%-30s %6d %10.3f %7.1f GF/s %10.3f %7.2f\n", name, calls, seconds * 1e3,
           flops / seconds * 1e-9, flops / peak_rate * 1e3, flops / peak_rate / seconds);
    step.seconds += calls * seconds;
    step.flops += calls * flops;
}
static void row_pass(const char *name, double calls, double seconds, double bytes) {
    printf("%-30s %6.0f %10.3f %7.1f GB/s %10.3f %7.2f\n", name, calls, seconds * 1e3,
           bytes / seconds * 1e-9, bytes / pass_rate * 1e3, bytes / pass_rate / seconds);
    step.seconds += calls * seconds;
}

// The three products of a layer with weights (OC, IC), as a step calls them: fc's forward with
// GELU, fcproj's backward through it.
static void bench_matmul(Stream *s, const char *name, int64_t N, int64_t IC, int64_t OC,
                         bool gelu_after, bool gelu_before) {
    float *x = filled(N * IC), *w = filled(OC * IC), *y = filled(N * OC), *g = filled(N * OC),
          *bias = filled(OC), *dw = filled(OC * IC), *pre = filled(N * IC);
    double best[3] = {1e9, 1e9, 1e9};
    for (int i = 0; i < rounds; i++) {
        BEST(best[0], ops_matmul_forward(s, real(y), gelu_after ? real(g) : NULL, real(x), real(w),
                                         real(bias), N, IC, OC));
        BEST(best[1], ops_matmul_backward_input(s, real(x), real(y), real(w),
                                                gelu_before ? real(pre) : NULL, N, IC, OC));
        BEST(best[2], ops_matmul_backward_weight(s, dw, bias, real(y), real(x), N, IC, OC, false));
        fill(x, N * IC); // keep numbers ordinary
    }
    const char *part[3] = {"forward", "backward input", "backward weight"};
    for (int k = 0; k < 3; k++) {
        char label[64];
        snprintf(label, sizeof label, "%s %s", name, part[k]);
        row_product(label, LAYERS, best[k], 2.0 * (double)N * (double)IC * (double)OC);
    }
    ops_free(x);
    ops_free(w);
    ops_free(y);
    ops_free(g);
    ops_free(bias);
    ops_free(dw);
    ops_free(pre);
}

// Products of experts: 8 of them, of which a token has 2, each with half of the dense layer's width,
// so that a token's arithmetic is that of fc.
static void bench_experts(Stream *s, int64_t N) {
    enum { EXPERTS = 8, TOP_K = 2, WIDTH = 2 * C };
    const int64_t rows = N * TOP_K, matrix = (int64_t)WIDTH * C;
    float *x = filled(rows * C), *w = filled(EXPERTS * matrix), *dw = filled(EXPERTS * matrix),
          *y = filled(rows * WIDTH);
    const char *const names[] = {"experts, even", "experts, half to one", "experts, all to one"};
    for (int skew = 0; skew < 3; skew++) {
        int32_t counts[EXPERTS] = {0};
        const int64_t first = skew == 2 ? rows : skew ? rows / 2 : rows / EXPERTS;
        for (int e = 0; e < EXPERTS; e++) {
            counts[e] = (int32_t)(e ? (rows - first) / (EXPERTS - 1) : first);
        }
        counts[1] += (int32_t)((rows - first) % (EXPERTS - 1));
        const ExpertRows loads = {.counts = counts, .experts = EXPERTS, .sources = 1};
        double best[3] = {1e9, 1e9, 1e9};
        for (int i = 0; i < rounds; i++) {
            BEST(best[0],
                 ops_experts_forward(s, real(y), NULL, real(x), real(w), loads, C, WIDTH, false));
            BEST(best[1],
                 ops_experts_backward_input(s, real(x), real(y), real(w), NULL, loads, C, WIDTH));
            BEST(best[2],
                 ops_experts_backward_weight(s, dw, real(y), real(x), loads, C, WIDTH, false));
            fill(x, rows * C); // keep numbers ordinary
        }
        const char *const part[] = {"forward", "backward input", "backward weight"};
        for (int k = 0; k < 3; k++) {
            char label[64];
            snprintf(label, sizeof label, "%s %s", names[skew], part[k]);
            row_product(label, 0, best[k], 2.0 * (double)rows * C * WIDTH);
        }
    }
    ops_free(x);
    ops_free(w);
    ops_free(dw);
    ops_free(y);
}

static void bench_classifier(Stream *s, int64_t N) {
    float *x = filled(N * C), *wte = filled((int64_t)Vp * C), *dwte = filled((int64_t)Vp * C),
          *dx = filled(N * C), *losses = filled(N);
    float *logits = filled(N * Vp);
    int32_t *targets = (int32_t *)checked_malloc((size_t)N * sizeof(int32_t), "targets");
    for (int64_t i = 0; i < N; i++) { targets[i] = (int32_t)(i * 37 % V); }
    double best[2] = {1e9, 1e9}, products = 6.0 * (double)N * C * (double)V;
    for (int i = 0; i < (rounds + 1) / 2; i++) {
        BEST(best[0], ops_classifier(s, losses, real(dx), dwte, NULL, real(x), real(wte), targets,
                                     N, N, C, V, Vp, 1.0f / (float)N, 0.0f, false));
        BEST(best[1], ops_classifier(s, losses, real(dx), dwte, real(logits), real(x), real(wte),
                                     targets, N, N, C, V, Vp, 1.0f / (float)N, 0.0f, false));
    }
    row_product("classifier, all of it", 1, best[0], products);
    row_product("classifier, keeping dlogits", 0, best[1], products);
    ops_free(x);
    ops_free(wte);
    ops_free(dwte);
    ops_free(dx);
    ops_free(losses);
    ops_free(logits);
    free(targets);
}

static void bench_attention(Stream *s, int64_t rows, int64_t T) {
    int64_t N = rows * T;
    float *qkv = filled(3 * N * C), *dqkv = filled(3 * N * C), *out = filled(N * C),
          *dout = filled(N * C), *lse = filled(N * NH);
    const AttentionShape a = {.rows = rows, .T = T, .heads = NH, .kv_heads = NH, .D = C / NH};
    double forward = 1e9, backward = 1e9, pairs = (double)rows * (double)T * (double)(T + 1) / 2;
    for (int i = 0; i < rounds; i++) {
        BEST(forward, ops_attention_forward(s, real(out), lse, real(qkv), a));
        BEST(backward,
             ops_attention_backward(s, real(dqkv), real(dout), real(qkv), real(out), lse, a));
    }
    row_product("attention forward", LAYERS, forward, 4.0 * pairs * C);
    row_product("attention backward", LAYERS, backward, 10.0 * pairs * C);
    ops_free(qkv);
    ops_free(dqkv);
    ops_free(out);
    ops_free(dout);
    ops_free(lse);
}

static void bench_rows(Stream *s, int64_t rows, int64_t T) {
    const int64_t N = rows * T;
    const double pass = (double)ops_real_bytes() * (double)N * C, table = 4.0 * (double)N * C;
    float *a = filled(N * C), *b = filled(N * C), *y = filled(N * C), *z = filled(N * C),
          *w = filled(C), *bias = filled(C), *mean = filled(N), *rstd = filled(N);
    float *wte = filled((int64_t)Vp * C), *dwte = filled((int64_t)Vp * C);
    int32_t *tokens = (int32_t *)checked_malloc((size_t)N * sizeof(int32_t), "tokens");
    for (int64_t i = 0; i < N; i++) { tokens[i] = (int32_t)(random_u64(1, 2, (uint64_t)i) % V); }
    double best[8] = {1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9};
    for (int i = 0; i < 3 * rounds; i++) {
        BEST(best[0], ops_layernorm_forward(s, real(y), mean, rstd, NULL, real(a), NULL, real(w),
                                            real(bias), N, C));
        BEST(best[1], ops_layernorm_forward(s, real(y), mean, rstd, real(z), real(a), real(b),
                                            real(w), real(bias), N, C));
        BEST(best[2], ops_layernorm_backward_input(s, real(z), real(z), real(b), real(a), real(w),
                                                   mean, rstd, N, C));
        BEST(best[3],
             ops_layernorm_backward_weight(s, w, bias, real(b), real(a), mean, rstd, N, C, false));
        BEST(best[4], ops_residual(s, real(z), real(z), real(b), N * C));
        BEST(best[5], ops_copy(s, y, b, (size_t)(N * C) * ops_real_bytes()));
        BEST(best[6], ops_embedding_forward(s, real(y), tokens, real(wte), real(wte), rows, T, C));
        BEST(best[7], ops_embedding_backward(s, dwte, wte, real(b), tokens, NULL, rows, T, C, Vp, T,
                                             true, true));
    }
    row_pass("layernorm forward", LAYERS + 1, best[0], 2 * pass);
    row_pass("layernorm forward with sum", LAYERS, best[1], 4 * pass);
    row_pass("layernorm backward input", 2 * LAYERS + 1, best[2], 4 * pass);
    row_pass("layernorm backward weight", 2 * LAYERS + 1, best[3], 2 * pass);
    row_pass("residual", LAYERS, best[4], 3 * pass);
    row_pass("copy", 2 * LAYERS, best[5], 2 * pass);
    row_pass("embedding forward", 1, best[6], 3 * pass);
    row_pass("embedding backward", 1, best[7], 2 * pass + 4 * table);
    ops_free(a);
    ops_free(b);
    ops_free(y);
    ops_free(z);
    ops_free(w);
    ops_free(bias);
    ops_free(mean);
    ops_free(rstd);
    ops_free(wte);
    ops_free(dwte);
    free(tokens);
}

static void bench_sample_products(Stream *s, int64_t rows, int64_t T) {
    const int64_t N = rows * T,
                  shapes[5][2] = {{C, 3 * C}, {C, C}, {C, 4 * C}, {4 * C, C}, {C, Vp}};
    const char *const names[5] = {"sample norms qkv", "sample norms attproj", "sample norms fc",
                                  "sample norms fcproj", "sample norms head"};
    float *in = filled(N * 4 * C), *dout = filled(N * Vp), *wide = filled(N * C);
    double *norms = (double *)(void *)filled(2 * rows);
    int32_t *tokens = (int32_t *)checked_malloc((size_t)N * sizeof(int32_t), "tokens");
    for (int64_t i = 0; i < N; i++) { tokens[i] = (int32_t)(random_u64(1, 2, (uint64_t)i) % V); }
    for (int k = 0; k < 5; k++) {
        double best = 1e9;
        const double ghost = (double)T * (double)(shapes[k][0] + shapes[k][1]),
                     gradient = 2.0 * (double)shapes[k][0] * (double)shapes[k][1];
        for (int i = 0; i < rounds; i++) {
            BEST(best, ops_matmul_sample_norms(s, norms, real(dout), real(in), rows, T,
                                               shapes[k][0], shapes[k][1]));
        }
        row_product(names[k], 0, best, (double)N * fmin(ghost, gradient));
    }
    double best = 1e9;
    for (int i = 0; i < rounds; i++) {
        BEST(best, ops_tied_sample_norms(s, norms, real(wide), tokens, real(dout), real(in), rows,
                                         T, C, Vp));
    }
    row_product("tied sample norms", 0, best, 2.0 * (double)N * (double)T * C);
    ops_free(in);
    ops_free(dout);
    ops_free(wide);
    ops_free(norms);
    free(tokens);
}
static void bench_sample_passes(Stream *s, int64_t rows, int64_t T) {
    const int64_t N = rows * T, n = 12 * C * C + 13 * C; // parameters of a block
    const double pass = (double)ops_real_bytes() * (double)N * C, block = 4.0 * (double)n;
    float *a = filled(N * 3 * C), *b = filled(N * C), *mean = filled(N), *rstd = filled(N),
          *sums = filled(rows * 3 * C), *more = filled(rows * C);
    float *gradients = filled(rows * n), *gradient = filled(n), *factors = filled(rows);
    double *norms = (double *)(void *)filled(2 * rows);
    int32_t *tokens = (int32_t *)checked_malloc((size_t)N * sizeof(int32_t), "tokens");
    for (int64_t i = 0; i < N; i++) { tokens[i] = (int32_t)(random_u64(1, 2, (uint64_t)i) % V); }
    for (int64_t i = 0; i < rows; i++) { factors[i] = i % 2 ? -1.0f : 1.0f; }
    double best[8] = {1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9};
    for (int i = 0; i < 3 * rounds; i++) {
        BEST(best[0], ops_bias_samples(s, sums, norms, real(a), rows, T, 3 * C));
        BEST(best[1],
             ops_layernorm_samples(s, sums, more, norms, real(a), real(b), mean, rstd, rows, T, C));
        BEST(best[2], ops_embedding_sample_norms(s, norms, real(b), tokens, true, rows, T, C, V));
        BEST(best[3], ops_matmul_backward_weight_samples(s, gradient, real(b), real(a), factors,
                                                         rows, T, 3 * C, C, false));
        BEST(best[4], ops_sample_norms(s, norms, gradients, rows, n));
        BEST(best[5], ops_sample_norms(s, norms, gradients, 1, n));
        BEST(best[6], ops_accumulate_samples(s, gradient, gradients, factors, rows, n, true));
        BEST(best[7], ops_accumulate_samples(s, gradient, gradients, factors, 1, n, true));
    }
    row_pass("bias samples qkv", 0, best[0], 3 * pass);
    row_pass("layernorm samples", 0, best[1], 2 * pass);
    row_pass("embedding sample norms", 0, best[2], pass);
    row_pass("weight of samples qkv", 0, best[3], 4 * pass);
    row_pass("sample norms of a block", 0, best[4], (double)rows * block);
    row_pass("sample norms, 1 sample", 0, best[5], block);
    row_pass("accumulate samples of a block", 0, best[6], (double)(rows + 2) * block);
    row_pass("accumulate samples, 1 sample", 0, best[7], 3 * block);
    ops_free(a);
    ops_free(b);
    ops_free(mean);
    ops_free(rstd);
    ops_free(sums);
    ops_free(more);
    ops_free(gradients);
    ops_free(gradient);
    ops_free(factors);
    ops_free(norms);
    free(tokens);
}

// The plain pass that moves what AdamW moves: reads four arrays, writes three.
static void plain_pass(Stream *s, float *p, float *m, float *v, const float *g, int64_t n) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
#pragma omp simd
        for (int64_t i = b * BLOCK; i < min_i64(n, (b + 1) * BLOCK); i++) {
            p[i] += g[i];
            m[i] += g[i];
            v[i] += g[i];
        }
    }
}
static void bench_optimizers(Stream *s) {
    const int64_t n = ELEMENTS / ADAM_PART;
    const double bytes = 4.0 * (double)n;
    float *p = filled(n), *m = filled(n), *v = filled(n), *g = filled(n);
    uint16_t *stored = (uint16_t *)(void *)filled(n / 2 + 1);
    ExactSum *squares = (ExactSum *)ops_alloc(sizeof *squares);
    double best[8] = {1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9};
    const NoiseStream noise = {{1, 2, 3, 4, 5, 6, 7, 8}, NOISE_GRADIENT, 0, 1};
    OptimizerStep o = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.9f, 1.0f, 10, round_to_nearest()};
    UpdateSlice fp32 = {
        .master = p,
        .moment = {m, v},
        .grad = g,
        .param = p,
        .dtype = DTYPE_FP32,
        .n = n,
    };
    UpdateSlice bf16 = fp32;
    bf16.param = stored;
    bf16.dtype = DTYPE_BF16;
    for (int i = 0; i < rounds; i++) {
        BEST(best[0], plain_pass(s, p, m, v, g, n));
        ops_zero(s, v, (size_t)n * sizeof(float));
        BEST(best[1], ops_adamw(s, fp32, o));
        BEST(best[2], ops_adamw(s, bf16, o));
        BEST(best[3], ops_sgd(s, fp32, o));
        BEST(best[4], ops_square_sum(s, squares, g, n, 256, 1));
        BEST(best[5], ops_reals_to_host(s, p, real(g), n));
        BEST(best[6], ops_convert_float(s, stored, g, DTYPE_BF16, n, round_to_nearest()));
        BEST(best[7], ops_add_noise(s, m, 0, n, noise, 1.0f, 0.5f));
    }
    pass_rate = 7 * bytes / best[0];
    printf("plain pass (4 reads, 3 writes): %.1f GB/s\n", pass_rate * 1e-9);
    print_head("all parameters / 4");
    row_pass("adamw", ADAM_PART, best[1], 7 * bytes);
    row_pass("norm", ADAM_PART, best[4], bytes);
    const Step fp32_step = step;
    step.seconds = ADAM_PART * best[4];
    row_pass("adamw, bf16 storage", ADAM_PART, best[2], 7.5 * bytes);
    const Step plain = ops_real_bytes() == 4 ? fp32_step : step;
    row_pass("sgd", 0, best[3], 5 * bytes);
    row_pass("numbers to fp32", 0, best[5], bytes + (double)ops_real_bytes() * (double)n);
    row_pass("fp32 to bf16", 0, best[6], 1.5 * bytes);
    row_pass("noise", 0, best[7], 2 * bytes);
    step = plain;
    ops_free(p);
    ops_free(m);
    ops_free(v);
    ops_free(g);
    ops_free(stored);
    ops_free(squares);
}

static void bench_quantize(Stream *s) {
    const int64_t n = ELEMENTS / ADAM_PART, part = n / 4 / 2048 * 2048;
    float *x = filled(n), *y = filled(n), *error = filled(n / 2 + 1), *records = filled(n / 2 + 1);
    const char *const names[] = {"quantize",
                                 "dequantize",
                                 "quantize bf16",
                                 "dequantize bf16",
                                 "quantize with feedback",
                                 "sum of 4",
                                 "requantized sum of 4"};
    // bf16 numbers, which serve as errors too
    ops_convert_float(s, error, x, DTYPE_BF16, n, round_to_nearest());
    print_head("quantization, parameters / 4");
    const double plain_rate = pass_rate;
    for (int bits = 8; bits >= 4; bits -= 4) {
        const QuantFormat f = {bits, 256};
        const double r = (double)quant_bytes(f, n), number = (double)n;
        const double bytes[7] = {r + 4 * number, r + 4 * number, r + 2 * number, r + 2 * number,
                                 r + 8 * number, r + number,     1.25 * r};
        double best[8] = {1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9};
        for (int i = 0; i < rounds; i++) {
            BEST(best[0], ops_quantize(s, records, x, DTYPE_FP32, n, f));
            BEST(best[1], ops_dequantize(s, y, DTYPE_FP32, records, n, f));
            BEST(best[2], ops_quantize(s, records, error, DTYPE_BF16, n, f));
            BEST(best[3], ops_dequantize(s, y, DTYPE_BF16, records, n, f));
            BEST(best[4],
                 ops_quantize_feedback(s, records, x, (uint16_t *)(void *)error, 0.8f, n, f));
            BEST(best[5],
                 ops_dequantize_sum(s, y, false, records, quant_bytes(f, part), 4, part, f));
            BEST(best[6], ops_requantize_sum(s, y, records, quant_bytes(f, part), 4, part, f));
            BEST(best[7], ops_copy(s, y, x, (size_t)n * sizeof(float)));
        }
        pass_rate = 8 * number / best[7];
        for (int k = 0; k < 7; k++) {
            char label[64];
            snprintf(label, sizeof label, "%s, %d bits", names[k], bits);
            row_pass(label, 0, best[k], bytes[k]);
        }
    }
    pass_rate = plain_rate;
    ops_free(x);
    ops_free(y);
    ops_free(error);
    ops_free(records);
}

static void bench_step(Stream *s, int64_t rows, int64_t T, Step optimizer) {
    const int64_t N = rows * T;
    OpsShape shape = {rows, T, C, NH, V, Vp, LOGITS_PLENTY};
    s->workspace_bytes = ops_workspace_bytes(shape, s->threads);
    s->workspace = ops_alloc(s->workspace_bytes);
    char title[64];
    snprintf(title, sizeof title, "%d rows of %d tokens", (int)rows, (int)T);
    print_head(title);
    print_peaks(s);
    step = optimizer;
    bench_matmul(s, "qkv", N, C, 3 * C, false, false);
    bench_matmul(s, "attproj", N, C, C, false, false);
    bench_matmul(s, "fc (GELU)", N, C, 4 * C, true, false);
    bench_matmul(s, "fcproj (GELU)", N, 4 * C, C, false, true);
    bench_experts(s, N);
    bench_classifier(s, N);
    bench_attention(s, rows, T);
    bench_rows(s, rows, T);
    bench_sample_products(s, rows, T);
    bench_sample_passes(s, rows, T);
    printf("step of %d tokens: operations %.1f ms (optimizer %.1f), products at the peak %.1f ms, "
           "share %.3f; workspace %.0f MB\n",
           (int)N, step.seconds * 1e3, optimizer.seconds * 1e3, step.flops / peak_rate * 1e3,
           step.flops / peak_rate / step.seconds, (double)s->workspace_bytes * 1e-6);
    ops_free(s->workspace);
}

int main(int argc, char **argv) {
    Stream s = {argc > 1 ? atoi(argv[1]) : omp_get_max_threads(), NULL, NULL, 0, NULL};
    const bool bf16 = argc > 1 && !strcmp(argv[argc - 1], "bf16");
    if (argc > 2 && atoi(argv[2]) > 0) { rounds = atoi(argv[2]); }
    ops_open(&s, 0, bf16 ? DTYPE_BF16 : DTYPE_FP32);
    if (argc > 2 && !strcmp(argv[2], "peak")) {
        print_peaks(&s);
        return 0;
    }
    printf("%d threads, best of %d, %s, products in %s by %s\n", s.threads, rounds,
           bf16 ? "bf16" : "fp32", dtype_name(ops_compute()), ops_products());
    bench_optimizers(&s);
    Step optimizer = step;
    bench_quantize(&s);
    bench_step(&s, 4, 64, optimizer);
    bench_step(&s, 4, 256, optimizer);
    bench_step(&s, 1, 1024, optimizer);
    return 0;
}
