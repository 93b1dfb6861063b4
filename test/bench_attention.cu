// bench_attention.cu: times the attention of the GPU's operations, as it was built, on shapes of
// GPT-2. A JSON line per shape; the best of some repetitions, by events. For scripts/gpu_ten.py.
// bench_attention [ROWS T C HEADS]
#define OPS_IMPLEMENTATION
#include "ops/cuda/clip_cuda.cuh" // with ops_cuda.cuh: all operations

typedef struct {
    int64_t rows, T, C, NH;
} Shape;

// The least of seven calls: the first ones also load what they need.
static double seconds_of(Stream *s, OpsMark *marks[2], const Shape *a, bool backward, Real *qkv,
                         Real *out, Real *dqkv, float *lse) {
    const AttentionShape shape = {
        .rows = a->rows, .T = a->T, .heads = a->NH, .kv_heads = a->NH, .D = a->C / a->NH};
    double best = INFINITY;
    for (int i = 0; i < 7; i++) {
        ops_mark(s, marks[0]);
        if (backward) {
            ops_attention_backward(s, dqkv, out, qkv, out, lse, shape);
        } else {
            ops_attention_forward(s, out, lse, qkv, shape);
        }
        ops_mark(s, marks[1]);
        ops_wait(s);
        best = fmin(best, ops_mark_seconds(s, marks[0], marks[1]));
    }
    return best;
}
static void bench(Stream *s, Shape a) {
    const int64_t N = a.rows * a.T;
    const size_t real = ops_real_bytes();
    OpsShape shape = {a.rows, a.T, a.C, a.NH, 1, 1, 0};
    OpsMark *marks[2] = {ops_mark_make(), ops_mark_make()};
    s->workspace_bytes = ops_workspace_bytes(shape, 1);
    s->workspace = ops_alloc(s->workspace_bytes);
    Real *qkv = (Real *)ops_alloc((size_t)(3 * N * a.C) * real),
         *out = (Real *)ops_alloc((size_t)(N * a.C) * real);
    Real *dqkv = (Real *)ops_alloc((size_t)(3 * N * a.C) * real);
    float *lse = (float *)ops_alloc((size_t)(N * a.NH) * sizeof(float)),
          *floats = (float *)ops_alloc((size_t)(3 * N * a.C) * sizeof(float));
    float *values = (float *)checked_malloc((size_t)(3 * N * a.C) * sizeof(float), "values");
    if (!s->workspace || !qkv || !out || !dqkv || !lse || !floats) {
        die(EXIT_RESOURCES, "give smaller ROWS", "too little memory");
    }
    for (int64_t i = 0; i < 3 * N * a.C; i++) {
        values[i] = (float)random_uniform(1, 1, (uint64_t)i) - 0.5f;
    }
    ops_from_host(s, floats, values, (size_t)(3 * N * a.C) * sizeof(float));
    ops_convert_float(s, qkv, floats, ops_compute(), 3 * N * a.C, round_to_nearest());
    const double forward = seconds_of(s, marks, &a, false, qkv, out, dqkv, lse),
                 backward = seconds_of(s, marks, &a, true, qkv, out, dqkv, lse);
    // of the forward pass's two products, causal: half of 4 N T C
    const double flops = 2.0 * (double)(N * a.T * a.C);
    printf("{\"rows\":%" PRId64 ",\"T\":%" PRId64 ",\"C\":%" PRId64 ",\"heads\":%" PRId64
           ",\"forward_ms\":%.6g,\"backward_ms\":%.6g,\"forward_tflops\":%.4g,"
           "\"backward_tflops\":%.4g}\n",
           a.rows, a.T, a.C, a.NH, 1e3 * forward, 1e3 * backward, 1e-12 * flops / forward,
           2.5e-12 * flops / backward);
    ops_free(s->workspace);
    ops_free(qkv);
    ops_free(out);
    ops_free(dqkv);
    ops_free(lse);
    ops_free(floats);
    free(values);
    ops_mark_free(marks[0]);
    ops_mark_free(marks[1]);
}

int main(int argc, char **argv) {
    Stream s = {1, NULL, NULL, 0, NULL};
    ops_open(&s, 0, DTYPE_BF16);
    const Shape shapes[] = {{16, 1024, 768, 12}, {16, 1024, 1600, 25}, {8, 2048, 2048, 16}};
    if (argc == 5) {
        const Shape asked = {atoll(argv[1]), atoll(argv[2]), atoll(argv[3]), atoll(argv[4])};
        bench(&s, asked);
    } else {
        for (int i = 0; i < 3; i++) { bench(&s, shapes[i]); }
    }
    ops_close(&s);
    return 0;
}
