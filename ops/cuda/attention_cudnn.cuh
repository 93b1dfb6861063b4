// attention_cudnn.cuh: causal attention by cuDNN in bf16, where `make cuda` finds its headers. The
// graphs are written with cudnn-frontend, a header-only library; `scripts/setup.sh cuda` installs
// both. TRAIN_GPT_OWN_ATTENTION=1 (environment) makes the program go without it, to compare.
//
// Layout  is that of ops.h, described to cuDNN by strides: q, k and v are (rows, heads, T, D)
//         inside qkv, so nothing is copied. cuDNN's statistics are the lse of ops.h.
// Plans   One per shape and direction. A plan is made at first use and never dropped: CUDA graphs
//         that were recorded with it use its kernels. attention_cuda.cuh's own kernels are used,
//         for this direction alone, where cuDNN refuses a shape, or needs more scratch than
//         CUDNN_SCRATCH, and for shapes that no workspace was planned for: generated text's.
// Sums    Backward uses the deterministic algorithm. The same call gives the same bits.
// Scratch That algorithm keeps the gradients of all scores (docs/gpu.md: Attention). It grows with
//         the rows at most in proportion, so the plan of one row decides for any number of them,
//         and says how much they need. A plan for more rows is made only when they are computed.
// Tests   test/cudnn_frontend.h stands in for cuDNN on the emulation; nvcc compiles this file.
#ifndef ATTENTION_CUDNN_CUH
#define ATTENTION_CUDNN_CUH

#define CUDNN_FRONTEND_SKIP_JSON_LIB // graphs are not written to files
#include "ops/cuda/device_cuda.cuh"  // scratch, enter
#include <cstring>                   // strlen, which the next header uses
#include <cudnn_frontend.h>          // graphs of operations
#include <deque>                     // plans
#include <memory>                    // graphs are shared pointers
#include <string>                    // reasons
#include <unordered_map>             // graphs take their tensors by number

// The limit, in bytes per channel of queries of each token.
enum { CUDNN_SCRATCH = 80 };
// numbers of the tensors in a graph
enum {
    TENSOR_Q = 1,
    TENSOR_K,
    TENSOR_V,
    TENSOR_OUT,
    TENSOR_LSE,
    TENSOR_DOUT,
    TENSOR_DQ,
    TENSOR_DK,
    TENSOR_DV
};

typedef struct {
    AttentionShape shape;
    int64_t backward;
} CudnnKey;
typedef cudnn_frontend::graph::Graph CudnnGraph;
typedef struct {
    CudnnKey key;
    std::shared_ptr<CudnnGraph> graph; // NULL if it is not used, for a reason
    int64_t scratch;                   // bytes
    std::string reason;
} CudnnPlan;
static std::deque<CudnnPlan> cudnn_plans; // a plan keeps its address when others are added
static CudnnPlan cudnn_refused;
static bool cudnn_off = environment_asks(ENVIRONMENT_OWN_ATTENTION);
static AttentionShape cudnn_shape; // that the workspace was last planned for
static cudnnHandle_t cudnn_handle; // created with the first graph, for this process's one device

typedef std::shared_ptr<cudnn_frontend::graph::Tensor_attributes> CudnnTensor;
// shape_heads describes a tensor (rows, heads, T, D) whose tokens are `stride` elements apart;
// shape_statistics describes one number for each (rows, heads of queries, T).
static inline void shape_heads(CudnnTensor t, const CudnnKey *k, int64_t heads, int64_t number,
                               int64_t stride) {
    const AttentionShape *a = &k->shape;
    t->set_uid(number)
        .set_dim({a->rows, heads, a->T, a->D})
        .set_stride({a->T * stride, a->D, stride, 1});
}
static inline void shape_statistics(CudnnTensor t, const CudnnKey *k) {
    t->set_uid(TENSOR_LSE)
        .set_dim({k->shape.rows, k->shape.heads, k->shape.T, 1})
        .set_stride({k->shape.heads * k->shape.T, k->shape.T, 1, 1})
        .set_data_type(cudnn_frontend::DataType_t::FLOAT);
}
static inline CudnnTensor new_tensor(CudnnGraph *g) {
    return g->tensor(cudnn_frontend::graph::Tensor_attributes());
}
static inline CudnnTensor heads_of(CudnnGraph *g, const CudnnKey *k, int64_t heads, int64_t number,
                                   int64_t stride) {
    CudnnTensor t = new_tensor(g);
    shape_heads(t, k, heads, number, stride);
    return t;
}
// options of both directions
template <class Attributes> static inline Attributes causal(const CudnnKey *k) {
    Attributes a;
    a.set_name("attention").set_attn_scale(1.0f / sqrtf((float)k->shape.D));
    a.set_diagonal_alignment(cudnn_frontend::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
    return a;
}
static inline void make_cudnn_graph(CudnnPlan *p) {
    const CudnnKey *k = &p->key;
    const auto g = std::make_shared<CudnnGraph>();
    if (!cudnn_handle && cudnnCreate(&cudnn_handle) != CUDNN_STATUS_SUCCESS) {
        die(EXIT_RESOURCES, "TRAIN_GPT_OWN_ATTENTION=1 goes without it", "cuDNN does not start");
    }
    const auto fp32 = cudnn_frontend::DataType_t::FLOAT;
    g->set_io_data_type(cudnn_frontend::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fp32)
        .set_compute_data_type(fp32);
    const AttentionShape *a = &k->shape;
    const int64_t stride = attention_qkv_width(*a), width = attention_q_width(*a);
    const CudnnTensor q = heads_of(g.get(), k, a->heads, TENSOR_Q, stride),
                      key = heads_of(g.get(), k, a->kv_heads, TENSOR_K, stride),
                      v = heads_of(g.get(), k, a->kv_heads, TENSOR_V, stride);
    if (k->backward) {
        const CudnnTensor out = heads_of(g.get(), k, a->heads, TENSOR_OUT, width),
                          dout = heads_of(g.get(), k, a->heads, TENSOR_DOUT, width),
                          lse = new_tensor(g.get());
        shape_statistics(lse, k);
        auto options = causal<cudnn_frontend::graph::SDPA_backward_attributes>(k);
        const auto gradients =
            g->sdpa_backward(q, key, v, out, dout, lse, options.set_deterministic_algorithm(true));
        for (int i = 0; i < 3; i++) {
            shape_heads(gradients[(size_t)i], k, i ? a->kv_heads : a->heads, TENSOR_DQ + i, stride);
            gradients[(size_t)i]->set_output(true);
        }
    } else {
        auto options = causal<cudnn_frontend::graph::SDPA_attributes>(k);
        const auto results = g->sdpa(q, key, v, options.set_generate_stats(true));
        shape_heads(results[0], k, a->heads, TENSOR_OUT, width);
        results[0]->set_output(true);
        shape_statistics(results[1], k);
        results[1]->set_output(true);
    }
    auto built = g->build(cudnn_handle, {cudnn_frontend::HeurMode_t::A});
    if (built.is_good()) {
        p->graph = g;
    } else {
        p->reason = built.get_message();
    }
}
// most: bytes of scratch
static inline void make_cudnn_plan(CudnnPlan *p, int64_t most) {
    if (gpu_real != DTYPE_BF16 || p->key.shape.D % 8) {
        p->reason = gpu_real != DTYPE_BF16
                        ? "it is used in bf16 only"
                        : "it takes heads of a multiple of 8 channels"; // aligned
        return;
    }
    make_cudnn_graph(p);
    if (p->graph && (!p->graph->get_workspace_size(p->scratch).is_good() || p->scratch > most)) {
        p->reason = "it needs " + std::to_string(p->scratch) + " bytes of scratch; the limit is " +
                    std::to_string(most);
        p->graph = NULL;
        p->scratch = 0;
    }
}
static inline const CudnnPlan *known_plan(const CudnnKey &key) {
    for (const CudnnPlan &p : cudnn_plans) {
        if (!memcmp(&p.key, &key, sizeof key)) { return &p; }
    }
    return NULL;
}
static inline const CudnnPlan *find_or_make_plan(const CudnnKey &key, int64_t most) {
    const CudnnPlan *known = known_plan(key);
    if (known) { return known; }
    cudnn_plans.push_back({key, NULL, 0, ""});
    make_cudnn_plan(&cudnn_plans.back(), most);
    return &cudnn_plans.back();
}
// Returns the plan for one row of a shape, which decides for all.
static inline const CudnnPlan *plan_of_row(AttentionShape shape, int64_t backward) {
    shape.rows = 1;
    return find_or_make_plan({shape, backward}, CUDNN_SCRATCH * shape.T * attention_q_width(shape));
}
static inline const CudnnPlan *find_cudnn_plan(CudnnKey key) {
    CudnnKey of_row = key;
    of_row.shape.rows = 1;
    const CudnnPlan *row = known_plan(of_row);
    if (cudnn_off || !row) { return &cudnn_refused; }
    if (!row->graph) { return row; }
    const bool known = known_plan(key);
    const CudnnPlan *p = find_or_make_plan(key, key.shape.rows * row->scratch);
    if (!p->graph && !known && speaker.rank == 0) {
        fprintf(stderr,
                "warning: own attention computes the %s pass of %" PRId64
                " sequences (cuDNN: %s)\n",
                key.backward ? "backward" : "forward", key.shape.rows, p->reason.c_str());
    }
    return p;
}
static inline int64_t cudnn_scratch_bytes(OpsShape s) {
    cudnn_shape = ops_attention_shape(s);
    if (cudnn_off) { return 0; }
    return s.rows *
           max_i64(plan_of_row(cudnn_shape, 0)->scratch, plan_of_row(cudnn_shape, 1)->scratch);
}
// Returns what computes attention of the planned shape.
static inline const char *cudnn_attention(void) {
    static const char *const names[2][2] = {{"own", "own forward, cuDNN backward"},
                                            {"cuDNN forward, own backward", "cuDNN"}};
    if (cudnn_off) { return names[0][0]; }
    return names[!!plan_of_row(cudnn_shape, 0)->graph][!!plan_of_row(cudnn_shape, 1)->graph];
}
// Returns why cuDNN does not compute it, or "".
static inline std::string cudnn_reason(void) {
    if (cudnn_off) { return "TRAIN_GPT_OWN_ATTENTION is set"; }
    const std::string forward = plan_of_row(cudnn_shape, 0)->reason,
                      backward = plan_of_row(cudnn_shape, 1)->reason;
    return forward.empty() || forward == backward ? backward
           : backward.empty()                     ? forward
                                                  : forward + "; " + backward;
}
// Returns false, and does nothing, if there is no plan for the key.
static inline bool run_cudnn(Stream *s, CudnnKey key, std::unordered_map<int64_t, void *> tensors) {
    const CudnnPlan *p = find_cudnn_plan(key);
    if (!p->graph || p->scratch > scratch_bytes(s)) { return false; }
    if (cudnnSetStream(cudnn_handle, enter(s)) != CUDNN_STATUS_SUCCESS ||
        !p->graph->execute(cudnn_handle, tensors, scratch(s)).is_good()) {
        die(EXIT_RESOURCES, "TRAIN_GPT_OWN_ATTENTION=1 goes without it",
            "cuDNN's attention failed");
    }
    return true;
}
static inline void *tensor_at(const Real *p, int64_t elements) {
    return (void *)(uintptr_t)real_at_const(p, elements);
}
static inline bool cudnn_attention_forward(Stream *s, Real *out, float *lse, const Real *qkv,
                                           AttentionShape a) {
    const CudnnKey key = {a, 0};
    return run_cudnn(s, key,
                     {{TENSOR_Q, tensor_at(qkv, 0)},
                      {TENSOR_K, tensor_at(qkv, attention_q_width(a))},
                      {TENSOR_V, tensor_at(qkv, (a.heads + a.kv_heads) * a.D)},
                      {TENSOR_OUT, out},
                      {TENSOR_LSE, lse}});
}
static inline bool cudnn_attention_backward(Stream *s, Real *dqkv, const Real *dout,
                                            const Real *qkv, const Real *out, const float *lse,
                                            AttentionShape a) {
    const int64_t k = attention_q_width(a), v = (a.heads + a.kv_heads) * a.D;
    const CudnnKey key = {a, 1};
    return run_cudnn(s, key,
                     {{TENSOR_Q, tensor_at(qkv, 0)},
                      {TENSOR_K, tensor_at(qkv, k)},
                      {TENSOR_V, tensor_at(qkv, v)},
                      {TENSOR_OUT, tensor_at(out, 0)},
                      {TENSOR_DOUT, tensor_at(dout, 0)},
                      {TENSOR_LSE, (void *)(uintptr_t)lse},
                      {TENSOR_DQ, tensor_at(dqkv, 0)},
                      {TENSOR_DK, tensor_at(dqkv, k)},
                      {TENSOR_DV, tensor_at(dqkv, v)}});
}

#endif
