// bench_kernels.cu: times each operation of a training step on the shapes of GPT-2 or, with
// KV_HEADS and F (the width of the feed-forward layer), of Llama, or, with EXPERTS of that width, of
// which a token has CHOICES, those of experts, beside two ceilings measured here: a copy in the
// device's memory and a large product. A JSON line each: the best of some calls, by events. `bytes`
// and `flops` are what the operation must move and compute at least, not what its kernels do. For
// scripts/gpu_ten.py.
//   bench_kernels [ROWS T C HEADS V PRODUCT [KV_HEADS F [EXPERTS CHOICES]]]
//   PRODUCT: the side of the square one
#define OPS_IMPLEMENTATION
#include "ops/cuda/clip_cuda.cuh" // with ops_cuda.cuh: all operations

enum { CALLS = 7 }; // the first ones also load what they need

typedef struct {
    int64_t rows, T, C, NH, V, product, kv_heads, F; // F: 0 for GPT-2
    int64_t experts, choices;                        // 0: none
} Shape;
typedef struct {
    Stream s;
    OpsMark *begin, *end;
    Shape a;
    int64_t N, Vp, parameters;
    Real *small[3], *wide[2]; // N x C; N x 4 C or N x 2 F
    Real *weight, *head;      // 4 C x C or 2 F x C; Vp x C
    float *statistics[2], *gradient, *states[4], *lse, *losses;
    ExactSum *sum;
    int32_t *tokens;
    Rotary rotary;
    // of experts: rows(N x choices, C), what is made of them (2 F), parameters, where rows go
    Real *of_experts[2], *made, *matrices, *router;
    float *gradients, *p;
    Route route;
    int32_t *loads; // on the host
} Bench;
enum { GPT2 = 1, LLAMA = 2, MIXTURE = 4, ALL = GPT2 | LLAMA | MIXTURE };
typedef struct {
    int of; // models
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
    enum { NUMBERS = 1 << 20 };
    Real *p = (Real *)take((size_t)n * ops_real_bytes());
    float *host = (float *)checked_malloc(NUMBERS * sizeof *host, "values"),
          *device = (float *)take(NUMBERS * sizeof *device);
    for (int i = 0; i < NUMBERS; i++) { host[i] = (float)random_uniform(1, 1, (uint64_t)i) - 0.5f; }
    ops_from_host(&b->s, device, host, NUMBERS * sizeof *host);
    for (int64_t at = 0; at < n; at += NUMBERS) {
        ops_convert_float(&b->s, real_at(p, at), device, ops_compute(), min_i64(n - at, NUMBERS),
                          round_to_nearest());
    }
    ops_wait(&b->s);
    ops_free(device);
    free(host);
    return p;
}
static float *take_floats(int64_t n) { return (float *)take((size_t)n * sizeof(float)); }

static void run_copy(Bench *b) {
    ops_copy(&b->s, b->wide[1], b->wide[0], (size_t)(b->N * 4 * b->a.C) * ops_real_bytes());
}
static void run_copy_gradient(Bench *b) {
    ops_copy(&b->s, b->small[1], b->small[0], (size_t)(b->N * b->a.C) * ops_real_bytes());
}
static void run_zero_gradient(Bench *b) {
    ops_zero(&b->s, b->small[1], (size_t)(b->N * b->a.C) * ops_real_bytes());
}
static void run_product(Bench *b) {
    ops_matmul_forward(&b->s, b->wide[1], NULL, b->wide[0], b->head, NULL, b->a.product,
                       b->a.product, b->a.product);
}
static void run_embedding(Bench *b) {
    ops_embedding_forward(&b->s, b->small[0], b->tokens, b->head, b->a.F ? NULL : b->small[1],
                          b->a.rows, b->a.T, b->a.C);
}
static void run_embedding_backward(Bench *b) {
    ops_embedding_backward(&b->s, b->gradient, b->a.F ? NULL : b->states[0], b->small[0], b->tokens,
                           NULL, b->a.rows, b->a.T, b->a.C, b->Vp, b->a.T, true, false);
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
static void run_rmsnorm(Bench *b) {
    ops_rmsnorm_forward(&b->s, b->small[1], b->statistics[0], NULL, b->small[0], NULL, b->weight,
                        b->N, b->a.C, 1e-5f);
}
static void run_rmsnorm_sum(Bench *b) {
    ops_rmsnorm_forward(&b->s, b->small[1], b->statistics[0], b->wide[0], b->small[0], b->small[2],
                        b->weight, b->N, b->a.C, 1e-5f);
}
static void run_rmsnorm_input(Bench *b) {
    ops_rmsnorm_backward_input(&b->s, b->small[2], b->small[2], b->small[1], b->small[0], b->weight,
                               b->statistics[0], b->N, b->a.C);
}
static void run_rmsnorm_weight(Bench *b) {
    ops_rmsnorm_backward_weight(&b->s, b->gradient, b->small[1], b->small[0], b->statistics[0],
                                b->N, b->a.C, true);
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
// What the library may not fuse into a product
static void run_gelu(Bench *b) {
    map_reals(&b->s, Gelu(), b->wide[1], b->wide[0], NULL, b->N * 4 * b->a.C);
}
static void run_gelu_backward(Bench *b) {
    map_reals(&b->s, GeluBackward(), b->wide[1], b->wide[1], b->wide[0], b->N * 4 * b->a.C);
}
static void run_bias_sums(Bench *b) {
    column_sums(&b->s, NULL, b->states[0], b->wide[0], NULL, NULL, NULL, b->N, 4 * b->a.C, true);
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
                                  .kv_heads = b->a.kv_heads,
                                  .D = b->a.C / b->a.NH};
    return shape;
}
static HeadNorm head_norm_of(const Bench *b) {
    const HeadNorm h = {
        .shape = attention_of(b), .rotary = &b->rotary, .eps = 1e-5f, .scale = 1.0f};
    return h;
}
static void run_rotary(Bench *b) {
    ops_rotary(&b->s, b->wide[0], attention_of(b), &b->rotary, false);
}
static void run_rotary_backward(Bench *b) {
    ops_rotary(&b->s, b->wide[0], attention_of(b), &b->rotary, true);
}
static void run_head_norm(Bench *b) {
    const HeadNorm h = head_norm_of(b);
    ops_head_norm_forward(&b->s, b->wide[1], b->statistics[0], b->wide[0], b->weight, b->weight,
                          &h);
}
static void run_head_norm_input(Bench *b) {
    const HeadNorm h = head_norm_of(b);
    ops_head_norm_backward_input(&b->s, b->wide[1], b->head, b->wide[0], b->weight, b->weight,
                                 b->statistics[0], &h);
}
static void run_head_norm_weight(Bench *b) {
    const HeadNorm h = head_norm_of(b);
    ops_head_norm_backward_weight(&b->s, b->states[0], b->states[1], b->head, b->wide[0],
                                  b->statistics[0], &h, true);
}
static void run_swiglu(Bench *b) {
    ops_swiglu_forward(&b->s, b->wide[1], b->wide[0], b->N, b->a.F);
}
static void run_swiglu_backward(Bench *b) {
    ops_swiglu_backward(&b->s, b->wide[1], b->head, b->wide[0], b->N, b->a.F);
}
static void run_linear(Bench *b, int64_t in, int64_t out) {
    ops_matmul_forward(&b->s, b->wide[1], NULL, b->wide[0], b->weight, NULL, b->N, in, out);
}
static void run_linear_input(Bench *b, int64_t in, int64_t out) {
    ops_matmul_backward_input(&b->s, b->wide[1], b->wide[0], b->weight, NULL, b->N, in, out);
}
static void run_linear_weight(Bench *b, int64_t in, int64_t out) {
    ops_matmul_backward_weight(&b->s, b->gradient, NULL, b->wide[0], b->wide[1], b->N, in, out,
                               true);
}
static void run_llama_qkv(Bench *b) { run_linear(b, b->a.C, attention_qkv_width(attention_of(b))); }
static void run_gate_up(Bench *b) { run_linear(b, b->a.C, 2 * b->a.F); }
static void run_gate_up_input(Bench *b) { run_linear_input(b, b->a.C, 2 * b->a.F); }
static void run_gate_up_weight(Bench *b) { run_linear_weight(b, b->a.C, 2 * b->a.F); }
static void run_down(Bench *b) { run_linear(b, b->a.F, b->a.C); }
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
static Router router_of(const Bench *b) {
    const Router r = {.experts = b->a.experts, .groups = 1, .top_k = b->a.choices};
    return r;
}
static ExpertRows rows_of(const Bench *b) {
    const ExpertRows rows = {.counts = b->loads, .sources = 1, .experts = b->a.experts};
    return rows;
}
static void run_route(Bench *b) {
    ops_route(&b->s, b->route, b->loads, b->p, b->small[0], b->router,
              real_at_const(b->router, b->a.experts * b->a.C), b->a.C, router_of(b));
}
static void run_dispatch(Bench *b) {
    ops_dispatch(&b->s, b->of_experts[0], b->small[0], b->route, b->a.C);
}
static void run_dispatch_backward(Bench *b) {
    ops_dispatch_backward(&b->s, b->small[1], b->small[1], b->of_experts[0], b->route, b->a.C);
}
static void run_combine(Bench *b) {
    ops_combine_rows(&b->s, b->small[1], b->of_experts[0], b->route, b->a.C);
}
static void run_combine_backward(Bench *b) {
    ops_combine_rows_backward(&b->s, b->of_experts[1], b->small[1], b->of_experts[0], b->route,
                              b->a.C);
}
static void run_experts(Bench *b) {
    ops_experts_forward(&b->s, b->made, NULL, b->of_experts[0], b->matrices, rows_of(b), b->a.C,
                        2 * b->a.F, false);
}
static void run_experts_input(Bench *b) {
    ops_experts_backward_input(&b->s, b->of_experts[1], b->made, b->matrices, NULL, rows_of(b),
                               b->a.C, 2 * b->a.F);
}
static void run_experts_weight(Bench *b) {
    ops_experts_backward_weight(&b->s, b->gradients, b->made, b->of_experts[0], rows_of(b), b->a.C,
                                2 * b->a.F, true);
}
// Gradients become smaller from call to call, as p is multiplied by them.
static void run_route_input(Bench *b) {
    const RouterLosses losses = {NULL, 0, 0};
    ops_route_backward_input(&b->s, b->small[1], b->small[1], b->p, b->route, b->router, b->a.C,
                             router_of(b), losses);
}
static void run_route_weight(Bench *b) {
    ops_route_backward_weight(&b->s, b->gradients, b->states[0], b->p, b->route, b->loads,
                              b->small[0], b->a.C, router_of(b), true);
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
static void open_experts(Bench *b) {
    const Shape *a = &b->a;
    const int64_t n = b->N * a->choices, matrices = a->experts * 2 * a->F * a->C;
    for (int i = 0; i < 2; i++) { b->of_experts[i] = take_reals(b, n * a->C); }
    b->made = take_reals(b, n * 2 * a->F);
    b->matrices = take_reals(b, matrices);
    b->router = take_reals(b, a->experts * (a->C + 1)); // biases behind the weights
    b->gradients = take_floats(matrices);
    b->p = take_floats(b->N * a->experts);
    b->route = route_at(take_floats(n * ROUTE_PARTS), b->N, a->choices);
    b->loads = (int32_t *)ops_alloc_host((size_t)a->experts * sizeof *b->loads);
    run_route(b);
    ops_wait(&b->s);
}
static void open_bench(Bench *b, Shape a) {
    const OpsShape shape = {.rows = a.rows,
                            .T = a.T,
                            .C = a.C,
                            .NH = a.NH,
                            .V = a.V,
                            .Vp = (a.V + 127) / 128 * 128,
                            .logits = LOGITS_PLENTY,
                            .kv_heads = a.kv_heads,
                            .D = a.C / a.NH,
                            .widest = max_i64(4 * a.C, 2 * a.F),
                            .experts = a.experts,
                            .choices = a.choices};
    const int64_t side = a.product * a.product, widest = max_i64(4 * a.C, 2 * a.F);
    b->a = a;
    b->N = a.rows * a.T;
    b->Vp = shape.Vp;
    b->parameters = b->Vp * a.C;
    b->begin = ops_mark_make();
    b->end = ops_mark_make();
    b->s.workspace_bytes = ops_workspace_bytes(shape, 1);
    b->s.workspace = take(b->s.workspace_bytes);
    for (int i = 0; i < ROTARY_PAIRS; i++) { b->rotary.frequency[i] = 1.0f / (float)(1 + i); }
    for (int i = 0; i < 3; i++) { b->small[i] = take_reals(b, max_i64(b->N, a.T) * a.C); }
    for (int i = 0; i < 2; i++) { b->wide[i] = take_reals(b, max_i64(b->N * widest, side)); }
    b->weight = take_reals(b, widest * a.C);
    // as gradients, too
    b->head = take_reals(b, max_i64(max_i64(b->parameters, side), a.F ? b->N * widest : 0));
    for (int i = 0; i < 2; i++) { b->statistics[i] = take_floats(b->N * 2 * a.NH); }
    b->gradient = take_floats(max_i64(b->parameters, widest * a.C));
    for (int i = 0; i < 4; i++) {
        b->states[i] = take_floats(max_i64(b->parameters, max_i64(widest, a.T * a.C)));
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
    if (a.experts) { open_experts(b); }
}
static void print_work(Bench *b, const Work *w) {
    const double seconds = seconds_of(b, w->run);
    printf("{\"kernel\":\"%s\",\"ms\":%.6g,\"bytes\":%.10g,\"flops\":%.10g,\"gb_per_s\":%.5g,"
           "\"tflops\":%.5g}\n",
           w->name, 1e3 * seconds, w->bytes, w->flops, 1e-9 * w->bytes / seconds,
           1e-12 * w->flops / seconds);
    fflush(stdout);
}
// Elements of a token's row of qkv.
static double head_width(const Bench *b) { return (double)attention_qkv_width(attention_of(b)); }
static void bench(Bench *b) {
    const Shape *a = &b->a;
    const double real = (double)ops_real_bytes(), N = (double)b->N, C = (double)a->C,
                 T = (double)a->T, n = N * C * real, qkv = real * N * head_width(b),
                 kv = real * N * 2 * (double)(a->kv_heads * a->C / a->NH),
                 turned = 2 * (qkv - kv / 2), F = (double)a->F, f = N * F * real;
    const double side = (double)a->product, P = (double)b->parameters, square = 4 * C * C,
                 head = (double)b->Vp * C, gate = 2 * F * C, positions = a->F ? 0 : T * C;
    const double E = (double)a->experts, rows = N * (double)a->choices, moved = rows * C * real,
                 made = rows * 2 * F * real, p = 4 * N * E, router = E * C;
    const Work works[] = {
        {ALL, "copy", run_copy, 8 * n, 0},
        {ALL, "product", run_product, 3 * side * side * real, 2 * side * side * side},
        {ALL, "copy of a gradient", run_copy_gradient, 2 * n, 0},
        {ALL, "zeros of a gradient", run_zero_gradient, n, 0},
        {ALL, "embedding", run_embedding, 2 * n + positions * real, 0},
        {ALL, "embedding backward", run_embedding_backward, 2 * n + 8 * N * C + 4 * positions, 0},
        {GPT2, "layernorm", run_layernorm, 2 * n, 0},
        {GPT2, "residual and layernorm", run_layernorm_sum, 4 * n, 0},
        {GPT2, "layernorm backward, input", run_layernorm_input, 4 * n, 0},
        {GPT2, "layernorm backward, weight", run_layernorm_weight, 2 * n, 0},
        {LLAMA, "rmsnorm", run_rmsnorm, 2 * n, 0},
        {LLAMA, "residual and rmsnorm", run_rmsnorm_sum, 4 * n, 0},
        {LLAMA, "rmsnorm backward, input", run_rmsnorm_input, 4 * n, 0},
        {LLAMA, "rmsnorm backward, weight", run_rmsnorm_weight, 2 * n, 0},
        {ALL, "residual", run_residual, 3 * n, 0},
        {GPT2, "qkv, bias", run_qkv, 4 * n + 0.75 * square * real, 6 * N * C * C},
        {GPT2, "fc, bias and GELU", run_fc, 9 * n + square * real, 8 * N * C * C},
        {GPT2, "fcproj, bias", run_fcproj, 5 * n + square * real, 8 * N * C * C},
        {GPT2, "fcproj backward, input and GELU", run_fcproj_input, 9 * n + square * real,
         8 * N * C * C},
        {GPT2, "fc backward, input", run_fc_input, 5 * n + square * real, 8 * N * C * C},
        {GPT2, "fc backward, weight and bias", run_fc_weight, 5 * n + 8 * square, 8 * N * C * C},
        {GPT2, "GELU", run_gelu, 8 * n, 0},
        {GPT2, "GELU backward", run_gelu_backward, 12 * n, 0},
        {GPT2, "sums of a bias", run_bias_sums, 4 * n, 0},
        {LLAMA, "qkv", run_llama_qkv, n + qkv + head_width(b) * C * real,
         2 * N * head_width(b) * C},
        {LLAMA, "gate and up", run_gate_up, n + 2 * f + gate * real, 2 * N * gate},
        {LLAMA, "down", run_down, n + f + gate / 2 * real, N * gate},
        {LLAMA, "gate and up backward, input", run_gate_up_input, n + 2 * f + gate * real,
         2 * N * gate},
        {LLAMA, "gate and up backward, weight", run_gate_up_weight, n + 2 * f + 8 * gate,
         2 * N * gate},
        {LLAMA, "rotary", run_rotary, turned, 0},
        {LLAMA, "rotary backward", run_rotary_backward, turned, 0},
        {LLAMA, "norm of heads", run_head_norm, 2 * qkv, 0},
        {LLAMA, "norm of heads backward, input", run_head_norm_input, 3 * qkv, 0},
        {LLAMA, "norm of heads backward, weight", run_head_norm_weight, turned, 0},
        {LLAMA, "SwiGLU", run_swiglu, 3 * f, 0},
        {LLAMA, "SwiGLU backward", run_swiglu_backward, 5 * f, 0},
        {MIXTURE, "router and places of rows", run_route, n + router * real + p, 2 * N * router},
        {MIXTURE, "rows to experts", run_dispatch, n + moved, 0},
        {MIXTURE, "rows to experts, backward", run_dispatch_backward, 2 * n + moved, 0},
        {MIXTURE, "experts, gate and up", run_experts, moved + made + E * gate * real,
         2 * rows * gate},
        {MIXTURE, "experts backward, input", run_experts_input, moved + made + E * gate * real,
         2 * rows * gate},
        {MIXTURE, "experts backward, weight", run_experts_weight, moved + made + 8 * E * gate,
         2 * rows * gate},
        {MIXTURE, "sums of tokens' rows", run_combine, n + moved, 0},
        {MIXTURE, "sums of tokens' rows, backward", run_combine_backward, n + 2 * moved, 0},
        {MIXTURE, "router backward, input", run_route_input, 2 * n + router * real + 2 * p,
         2 * N * router},
        {MIXTURE, "router backward, weight", run_route_weight, n + p + 8 * router, 2 * N * router},
        {ALL, "attention", run_attention, 2 * n + kv, 2 * N * T * C},
        {ALL, "attention backward", run_attention_backward, 4 * n + 2 * kv, 5 * N * T * C},
        {ALL, "classifier, all of it", run_classifier, 2 * n + head * (2 * real + 8), 6 * N * head},
        {ALL, "AdamW, bf16", run_adamw, 30 * P, 0},
        {ALL, "gradient norm", run_norm, 4 * P, 0},
        {ALL, "accumulate", run_accumulate, 12 * P, 0},
    };
    for (const Work &w : works) {
        if (w.of & (a->experts ? MIXTURE : a->F ? LLAMA : GPT2)) { print_work(b, &w); }
    }
}

int main(int argc, char **argv) {
    static Bench b; // zeros: the device's memory ends with the process
    int64_t x[] = {16, 1024, 768, 12, 50257, 4096, 0, 0, 0, 0};
    if (argc != 1 && argc != 7 && argc != 9 && argc != 11) {
        die(EXIT_INPUT, "give ROWS T C HEADS V PRODUCT [KV_HEADS F [EXPERTS CHOICES]], or nothing",
            "%d arguments", argc - 1);
    }
    for (int i = 1; i < argc; i++) { x[i - 1] = atoll(argv[i]); }
    const Shape shape = {.rows = x[0],
                         .T = x[1],
                         .C = x[2],
                         .NH = x[3],
                         .V = x[4],
                         .product = x[5],
                         .kv_heads = x[7] ? x[6] : x[3],
                         .F = x[7],
                         .experts = x[8],
                         .choices = x[9]};
    b.s.threads = 1;
    ops_open(&b.s, 0, DTYPE_BF16);
    open_bench(&b, shape);
    bench(&b);
    return 0;
}
