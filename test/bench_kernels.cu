// bench_kernels.cu: times each operation of a training step on the shapes of a GPT, beside two
// ceilings measured here: a copy in the device's memory and a large product. A JSON line each: the
// best of some calls, by events. `bytes` and `flops` are what the operation must move and compute
// at least, not what its kernels do. For scripts/gpu_ten.py.
//   bench_kernels [ROWS T C HEADS V PRODUCT]     PRODUCT: the side of the square product
#define OPS_IMPLEMENTATION
#include "ops/cuda/clip_cuda.cuh" // with ops_cuda.cuh: all operations

enum { CALLS = 7 }; // the first ones also load what they need

typedef struct {
    int64_t rows, T, C, NH, V, product;
} Shape;
typedef struct {
    Stream s;
    OpsMark *begin, *end;
    Shape a;
    int64_t N, Vp, parameters;
    Real *small[3], *wide[2], *weight; // N x C; N x 4 C; 4 C x C
    Real *head;                        // Vp x C
    float *statistics[2], *gradient, *states[4], *lse, *losses;
    ExactSum *sum;
    int32_t *tokens;
} Bench;
typedef struct {
    const char *name;
    void (*run)(Bench *b);
    double bytes, flops;
} Work;

static void *take(size_t bytes) {
    void *p = ops_alloc(bytes);
    if (!p) { die(EXIT_RESOURCES, "give smaller ROWS", "too little memory for %zu bytes", bytes); }
    return p;
}
// Numbers in (-0.5, 0.5): zeros would take less power.
static Real *take_reals(Bench *b, int64_t n) {
    Real *p = (Real *)take((size_t)n * ops_real_bytes());
    float *host = (float *)checked_malloc((size_t)n * sizeof *host, "values"),
          *device = (float *)take((size_t)n * sizeof *device);
    for (int64_t i = 0; i < n; i++) { host[i] = (float)random_uniform(1, 1, (uint64_t)i) - 0.5f; }
    ops_from_host(&b->s, device, host, (size_t)n * sizeof *host);
    ops_convert_float(&b->s, p, device, ops_compute(), n, round_to_nearest());
    ops_wait(&b->s);
    ops_free(device);
    free(host);
    return p;
}
static float *take_floats(int64_t n) { return (float *)take((size_t)n * sizeof(float)); }

static void run_copy(Bench *b) {
    ops_copy(&b->s, b->wide[1], b->wide[0], (size_t)(b->N * 4 * b->a.C) * ops_real_bytes());
}
static void run_product(Bench *b) {
    ops_matmul_forward(&b->s, b->wide[1], NULL, b->wide[0], b->head, NULL, b->a.product,
                       b->a.product, b->a.product);
}
static void run_embedding(Bench *b) {
    ops_embedding_forward(&b->s, b->small[0], b->tokens, b->head, b->small[1], b->a.rows, b->a.T,
                          b->a.C);
}
static void run_embedding_backward(Bench *b) {
    ops_embedding_backward(&b->s, b->gradient, b->states[0], b->small[0], b->tokens, NULL,
                           b->a.rows, b->a.T, b->a.C, b->Vp, b->a.T, true, false);
}
static void run_layernorm(Bench *b) {
    ops_layernorm_forward(&b->s, b->small[1], b->statistics[0], b->statistics[1], NULL, b->small[0],
                          NULL, b->weight, b->weight, b->N, b->a.C);
}
static void run_layernorm_sum(Bench *b) {
    ops_layernorm_forward(&b->s, b->small[1], b->statistics[0], b->statistics[1], b->wide[0],
                          b->small[0], b->small[2], b->weight, b->weight, b->N, b->a.C);
}
static void run_layernorm_input(Bench *b) {
    ops_layernorm_backward_input(&b->s, b->small[2], b->small[2], b->small[1], b->small[0],
                                 b->weight, b->statistics[0], b->statistics[1], b->N, b->a.C);
}
static void run_layernorm_weight(Bench *b) {
    ops_layernorm_backward_weight(&b->s, b->gradient, b->states[0], b->small[1], b->small[0],
                                  b->statistics[0], b->statistics[1], b->N, b->a.C, true);
}
static void run_residual(Bench *b) {
    ops_residual(&b->s, b->small[2], b->small[0], b->small[1], b->N * b->a.C);
}
static void run_qkv(Bench *b) {
    ops_matmul_forward(&b->s, b->wide[0], NULL, b->small[0], b->weight, b->weight, b->N, b->a.C,
                       3 * b->a.C);
}
static void run_fc(Bench *b) {
    ops_matmul_forward(&b->s, b->wide[0], b->wide[1], b->small[0], b->weight, b->weight, b->N,
                       b->a.C, 4 * b->a.C);
}
static void run_fcproj(Bench *b) {
    ops_matmul_forward(&b->s, b->small[0], NULL, b->wide[0], b->weight, b->weight, b->N, 4 * b->a.C,
                       b->a.C);
}
static void run_fcproj_input(Bench *b) {
    ops_matmul_backward_input(&b->s, b->wide[1], b->small[0], b->weight, b->wide[0], b->N,
                              4 * b->a.C, b->a.C);
}
static void run_fc_input(Bench *b) {
    ops_matmul_backward_input(&b->s, b->small[0], b->wide[0], b->weight, NULL, b->N, b->a.C,
                              4 * b->a.C);
}
static void run_fc_weight(Bench *b) {
    ops_matmul_backward_weight(&b->s, b->gradient, b->states[0], b->wide[0], b->small[0], b->N,
                               b->a.C, 4 * b->a.C, true);
}
static AttentionShape attention_of(const Bench *b) {
    const AttentionShape shape = {.rows = b->a.rows,
                                  .T = b->a.T,
                                  .heads = b->a.NH,
                                  .kv_heads = b->a.NH,
                                  .D = b->a.C / b->a.NH};
    return shape;
}
static void run_attention(Bench *b) {
    ops_attention_forward(&b->s, b->small[0], b->lse, b->wide[0], attention_of(b));
}
static void run_attention_backward(Bench *b) {
    ops_attention_backward(&b->s, b->wide[1], b->small[0], b->wide[0], b->small[0], b->lse,
                           attention_of(b));
}
static void run_classifier(Bench *b) {
    ops_classifier(&b->s, b->losses, b->small[1], b->gradient, NULL, b->small[0], b->head,
                   b->tokens, b->N, b->N, b->a.C, b->a.V, b->Vp, 1e-3f, 0.0f, true);
}
static void run_adamw(Bench *b) {
    OptimizerStep o = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.0f, 1.0f, 2, round_to_nearest()};
    const UpdateSlice u = {
        .master = b->states[0],
        .moment = {b->states[1], b->states[2]},
        .grad = b->states[3],
        .param = b->head,
        .dtype = DTYPE_BF16,
        .n = b->parameters,
    };
    ops_adamw(&b->s, u, o);
}
static void run_norm(Bench *b) {
    ops_square_sum(&b->s, b->sum, b->states[3], b->parameters, 4096, 1.0);
}
static void run_accumulate(Bench *b) {
    ops_accumulate(&b->s, b->states[0], b->states[1], b->parameters);
}

static double seconds_of(Bench *b, void (*run)(Bench *b)) {
    double best = INFINITY;
    for (int i = 0; i < CALLS; i++) {
        ops_mark(&b->s, b->begin);
        run(b);
        ops_mark(&b->s, b->end);
        ops_wait(&b->s);
        best = fmin(best, ops_mark_seconds(&b->s, b->begin, b->end));
    }
    return best;
}
static void open_bench(Bench *b, Shape a) {
    const OpsShape shape = {a.rows, a.T, a.C, a.NH, a.V, (a.V + 127) / 128 * 128, LOGITS_PLENTY};
    const int64_t side = a.product * a.product;
    b->a = a;
    b->N = a.rows * a.T;
    b->Vp = shape.Vp;
    b->parameters = b->Vp * a.C;
    b->begin = ops_mark_make();
    b->end = ops_mark_make();
    b->s.workspace_bytes = ops_workspace_bytes(shape, 1);
    b->s.workspace = take(b->s.workspace_bytes);
    for (int i = 0; i < 3; i++) { b->small[i] = take_reals(b, max_i64(b->N, a.T) * a.C); }
    for (int i = 0; i < 2; i++) { b->wide[i] = take_reals(b, max_i64(4 * b->N * a.C, side)); }
    b->weight = take_reals(b, 4 * a.C * a.C);
    b->head = take_reals(b, max_i64(b->parameters, side));
    for (int i = 0; i < 2; i++) { b->statistics[i] = take_floats(b->N); }
    b->gradient = take_floats(max_i64(b->parameters, 4 * a.C * a.C));
    for (int i = 0; i < 4; i++) {
        b->states[i] = take_floats(max_i64(b->parameters, max_i64(4, a.T) * a.C));
    }
    b->lse = take_floats(b->N * a.NH);
    b->losses = take_floats(b->N);
    b->sum = (ExactSum *)take(sizeof *b->sum);
    b->tokens = (int32_t *)take((size_t)b->N * sizeof *b->tokens);
    int32_t *tokens = (int32_t *)checked_malloc((size_t)b->N * sizeof *tokens, "tokens");
    for (int64_t i = 0; i < b->N; i++) {
        tokens[i] = (int32_t)(random_uniform(2, 1, (uint64_t)i) * (double)a.V);
    }
    ops_from_host(&b->s, b->tokens, tokens, (size_t)b->N * sizeof *tokens);
    free(tokens);
}
static void print_work(Bench *b, const Work *w) {
    const double seconds = seconds_of(b, w->run);
    printf("{\"kernel\":\"%s\",\"ms\":%.6g,\"bytes\":%.10g,\"flops\":%.10g,\"gb_per_s\":%.5g,"
           "\"tflops\":%.5g}\n",
           w->name, 1e3 * seconds, w->bytes, w->flops, 1e-9 * w->bytes / seconds,
           1e-12 * w->flops / seconds);
    fflush(stdout);
}
static void bench(Bench *b) {
    const double real = (double)ops_real_bytes(), N = (double)b->N, C = (double)b->a.C,
                 T = (double)b->a.T, n = N * C * real;
    const double side = (double)b->a.product, P = (double)b->parameters, square = 4 * C * C,
                 head = (double)b->Vp * C;
    const Work works[] = {
        {"copy", run_copy, 8 * n, 0},
        {"product", run_product, 3 * side * side * real, 2 * side * side * side},
        {"embedding", run_embedding, 2 * n + T * C * real, 0},
        {"embedding backward", run_embedding_backward, 2 * n + 8 * N * C + 4 * T * C, 0},
        {"layernorm", run_layernorm, 2 * n, 0},
        {"residual and layernorm", run_layernorm_sum, 4 * n, 0},
        {"layernorm backward, input", run_layernorm_input, 4 * n, 0},
        {"layernorm backward, weight", run_layernorm_weight, 2 * n, 0},
        {"residual", run_residual, 3 * n, 0},
        {"qkv, bias", run_qkv, 4 * n + 0.75 * square * real, 6 * N * C * C},
        {"fc, bias and GELU", run_fc, 9 * n + square * real, 8 * N * C * C},
        {"fcproj, bias", run_fcproj, 5 * n + square * real, 8 * N * C * C},
        {"fcproj backward, input and GELU", run_fcproj_input, 9 * n + square * real, 8 * N * C * C},
        {"fc backward, input", run_fc_input, 5 * n + square * real, 8 * N * C * C},
        {"fc backward, weight and bias", run_fc_weight, 5 * n + 8 * square, 8 * N * C * C},
        {"attention", run_attention, 4 * n, 2 * N * T * C},
        {"attention backward", run_attention_backward, 8 * n, 5 * N * T * C},
        {"classifier, all of it", run_classifier, 2 * n + head * (2 * real + 8), 6 * N * head},
        {"AdamW, bf16", run_adamw, 30 * P, 0},
        {"gradient norm", run_norm, 4 * P, 0},
        {"accumulate", run_accumulate, 12 * P, 0},
    };
    for (size_t i = 0; i < sizeof works / sizeof works[0]; i++) { print_work(b, &works[i]); }
}

int main(int argc, char **argv) {
    static Bench b; // zeros: the device's memory ends with the process
    Shape shape = {16, 1024, 768, 12, 50257, 4096};
    if (argc == 7) {
        const Shape asked = {atoll(argv[1]), atoll(argv[2]), atoll(argv[3]),
                             atoll(argv[4]), atoll(argv[5]), atoll(argv[6])};
        shape = asked;
    } else if (argc != 1) {
        die(EXIT_INPUT, "give ROWS T C HEADS V PRODUCT, or nothing", "%d arguments", argc - 1);
    }
    b.s.threads = 1;
    ops_open(&b.s, 0, DTYPE_BF16);
    open_bench(&b, shape);
    bench(&b);
    return 0;
}
