// bench_attention.cu: times the attention of the GPU's operations by own kernels and, where the
// build has it, by cuDNN. A JSON line per shape; the best of some repetitions, by events. For
// scripts/gpu_ten.py.
//   bench_attention [ROWS T C HEADS [KV_HEADS]]
// Of cuDNN: the time of a direction and its bytes of scratch, null where there is no plan for it,
// and `refused` says why; `apart` is the largest difference from the own kernels' result in the
// first and the last sample, over the largest number there.
#define OPS_IMPLEMENTATION
#include "ops/cuda/clip_cuda.cuh" // with ops_cuda.cuh: all operations
#include "report/log.h"           // JSON

typedef struct {
    Stream *s;
    OpsMark *marks[2];
    AttentionShape shape;
    Real *qkv, *dout, *out[2], *dqkv[2]; // by own kernels, by cuDNN
    float *lse[2];
} Bench;

static void *take(size_t bytes) {
    void *p = ops_alloc(bytes);
    if (!p) { die(EXIT_RESOURCES, "give smaller ROWS", "too little memory for %zu bytes", bytes); }
    return p;
}
static int64_t tokens_of(const Bench *b) { return b->shape.rows * b->shape.T; }
// Numbers in (-0.5, 0.5).
static Real *random_reals(Stream *s, int64_t n, uint64_t stream) {
    Real *p = (Real *)take((size_t)n * ops_real_bytes());
    float *host = (float *)checked_malloc((size_t)n * sizeof *host, "values"),
          *device = (float *)take((size_t)n * sizeof *device);
    for (int64_t i = 0; i < n; i++) {
        host[i] = (float)random_uniform(1, stream, (uint64_t)i) - 0.5f;
    }
    ops_from_host(s, device, host, (size_t)n * sizeof *host);
    ops_convert_float(s, p, device, ops_compute(), n, round_to_nearest());
    ops_wait(s);
    ops_free(device);
    free(host);
    return p;
}
// The least of seven calls: the first ones also load what they need. The backward pass of both gets
// the own kernels' results.
static double seconds_of(Bench *b, int by, bool backward) {
    double best = INFINITY;
    for (int i = 0; i < 7; i++) {
        ops_mark(b->s, b->marks[0]);
        if (backward) {
            ops_attention_backward(b->s, b->dqkv[by], b->dout, b->qkv, b->out[0], b->lse[0],
                                   b->shape);
        } else {
            ops_attention_forward(b->s, b->out[by], b->lse[by], b->qkv, b->shape);
        }
        ops_mark(b->s, b->marks[1]);
        ops_wait(b->s);
        best = fmin(best, ops_mark_seconds(b->s, b->marks[0], b->marks[1]));
    }
    return best;
}
// Adds the time of a direction by own kernels, or by cuDNN.
static void add_time(TextBuffer *line, Bench *b, int by, bool backward) {
    const AttentionShape *a = &b->shape;
    // of the forward pass's two products, causal: half of 4 N T C
    const double flops = 2.0 * (double)(tokens_of(b) * a->T * attention_q_width(*a)),
                 seconds = seconds_of(b, by, backward);
    const char *name = backward ? "backward" : "forward", *whose = by ? "cudnn_" : "";
    text_add(line, ",\"%s%s_ms\":%.6g,\"%s%s_tflops\":%.4g", whose, name, 1e3 * seconds, whose,
             name, (backward ? 2.5e-12 : 1e-12) * flops / seconds);
}
#ifdef USE_CUDNN
// Returns the largest difference of a sample, over the largest number.
static double apart(Bench *b, Real *const results[2], int64_t width, int64_t row) {
    const int64_t n = b->shape.T * width;
    uint16_t *host[2];
    double most = 0, difference = 0;
    for (int i = 0; i < 2; i++) {
        host[i] = (uint16_t *)checked_malloc((size_t)n * sizeof **host, "results");
        ops_to_host(b->s, host[i], real_at_const(results[i], row * n), (size_t)n * sizeof **host);
    }
    for (int64_t i = 0; i < n; i++) {
        const double x = bf16_to_float(host[0][i]), y = bf16_to_float(host[1][i]);
        if (!(fabs(x - y) <= difference)) { difference = isfinite(y) ? fabs(x - y) : INFINITY; }
        most = fmax(most, fabs(x));
    }
    free(host[0]);
    free(host[1]);
    return difference / most;
}
static void add_cudnn(TextBuffer *line, Bench *b, bool backward) {
    const AttentionShape *a = &b->shape;
    const CudnnKey key = {*a, backward};
    const CudnnPlan *p = find_cudnn_plan(key);
    const char *name = backward ? "backward" : "forward";
    const int64_t width = backward ? attention_qkv_width(*a) : attention_q_width(*a);
    Real **results = backward ? b->dqkv : b->out;
    if (!p->graph) {
        text_add(line,
                 ",\"cudnn_%s_ms\":null,\"cudnn_%s_tflops\":null,\"%s_scratch\":null,"
                 "\"%s_apart\":null",
                 name, name, name, name);
    } else {
        add_time(line, b, 1, backward);
        text_add(line, ",\"%s_scratch\":%" PRId64, name, p->scratch);
        text_add(line, ",\"%s_apart\":", name);
        json_add_number(line,
                        fmax(apart(b, results, width, 0), apart(b, results, width, a->rows - 1)));
    }
    text_add(line, ",\"%s_refused\":", name);
    json_add_string(line, p->reason.c_str());
}
#endif
static void print_shape(Bench *b) {
    const AttentionShape *a = &b->shape;
    TextBuffer line = {0};
    text_add(&line,
             "{\"rows\":%" PRId64 ",\"T\":%" PRId64 ",\"C\":%" PRId64 ",\"heads\":%" PRId64
             ",\"kv_heads\":%" PRId64,
             a->rows, a->T, attention_q_width(*a), a->heads, a->kv_heads);
    for (int backward = 0; backward < 2; backward++) { add_time(&line, b, 0, backward); }
#ifdef USE_CUDNN
    ops_own_attention(false);
    for (int backward = 0; backward < 2; backward++) { add_cudnn(&line, b, backward); }
    text_add(&line, ",\"attention\":\"%s\"", ops_attention());
    ops_own_attention(true);
#endif
    printf("%s}\n", line.text);
    fflush(stdout);
    free(line.text);
}
static void bench(Stream *s, AttentionShape a) {
    Bench b = {.s = s, .marks = {ops_mark_make(), ops_mark_make()}, .shape = a};
    const OpsShape shape = {.rows = a.rows,
                            .T = a.T,
                            .C = attention_q_width(a),
                            .NH = a.heads,
                            .V = 1,
                            .Vp = 1,
                            .kv_heads = a.kv_heads,
                            .D = a.D};
    const int64_t n = tokens_of(&b) * attention_q_width(a),
                  all = tokens_of(&b) * attention_qkv_width(a);
    ops_own_attention(false);
    s->workspace_bytes = ops_workspace_bytes(shape, 1);
    ops_own_attention(true);
    s->workspace = take(s->workspace_bytes);
    b.qkv = random_reals(s, all, 1);
    b.dout = random_reals(s, n, 2);
    for (int by = 0; by < 2; by++) {
        b.out[by] = (Real *)take((size_t)n * ops_real_bytes());
        b.dqkv[by] = (Real *)take((size_t)all * ops_real_bytes());
        b.lse[by] = (float *)take((size_t)(tokens_of(&b) * a.heads) * sizeof(float));
    }
    print_shape(&b);
    for (int by = 0; by < 2; by++) {
        ops_free(b.out[by]);
        ops_free(b.dqkv[by]);
        ops_free(b.lse[by]);
        ops_mark_free(b.marks[by]);
    }
    ops_free(b.qkv);
    ops_free(b.dout);
    ops_free(s->workspace);
}

int main(int argc, char **argv) {
    Stream s = {1, NULL, NULL, 0, NULL};
    // rows, T, heads of queries, of keys, channels of a head: GPT-2 124M, 774M and 1558M, Llama 1B
    // and 8B, and more of one thing
    const int64_t shapes[][5] = {
        {64, 1024, 12, 12, 64}, {16, 1024, 20, 20, 64}, {16, 1024, 25, 25, 64},
        {8, 2048, 32, 8, 64},   {8, 2048, 32, 32, 64},  {8, 2048, 16, 16, 128},
        {4, 2048, 32, 8, 128},  {4, 4096, 32, 8, 64},   {2, 4096, 32, 8, 128},
    };
    ops_open(&s, 0, DTYPE_BF16);
    if (argc == 5 || argc == 6) {
        const int64_t heads = atoll(argv[4]);
        const AttentionShape asked = {.rows = atoll(argv[1]),
                                      .T = atoll(argv[2]),
                                      .heads = heads,
                                      .kv_heads = argc == 6 ? atoll(argv[5]) : heads,
                                      .D = atoll(argv[3]) / heads};
        bench(&s, asked);
    } else if (argc == 1) {
        for (const auto &x : shapes) {
            const AttentionShape shape = {
                .rows = x[0], .T = x[1], .heads = x[2], .kv_heads = x[3], .D = x[4]};
            bench(&s, shape);
        }
    } else {
        die(EXIT_INPUT, "give ROWS T C HEADS [KV_HEADS], or nothing", "%d arguments", argc - 1);
    }
    ops_close(&s);
    return 0;
}
