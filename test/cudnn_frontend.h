// cudnn_frontend.h: stands in for cuDNN's attention in the emulation (emu.h), so that the tests run
// what attention_cudnn.cuh describes to it: tensors, options, scratch, refusals. Only what that
// file calls. It refuses heads of more than 64 channels forward; its backward pass asks for the
// scratch that cuDNN 9.19 has on an H200. Its arithmetic is plain loops in fp64, in one thread.
// EMU_CUDNN_REFUSES=N: it refuses backward passes of N rows.
#ifndef CUDNN_FRONTEND_H
#define CUDNN_FRONTEND_H

#include <array>         // results of a node
#include <memory>        // shared pointers
#include <string>        // messages
#include <unordered_map> // tensors by number
#include <vector>        // sizes

typedef struct {
    cudaStream_t stream;
} * cudnnHandle_t;
typedef enum { CUDNN_STATUS_SUCCESS, CUDNN_STATUS_NOT_INITIALIZED } cudnnStatus_t;
static inline cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    *handle = (cudnnHandle_t)calloc(1, sizeof **handle);
    return getenv("EMU_NO_CUDNN") ? CUDNN_STATUS_NOT_INITIALIZED : CUDNN_STATUS_SUCCESS;
}
static inline cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

// A tensor as a kernel sees it: (rows, heads, T, D) by strides.
typedef struct {
    void *p;
    int64_t n[4], stride[4];
} EmuTensor;
enum { EMU_Q, EMU_K, EMU_V, EMU_OUT, EMU_LSE, EMU_DOUT, EMU_DQ, EMU_DK, EMU_DV, EMU_TENSORS };
typedef struct {
    EmuTensor of[EMU_TENSORS];
    double scale;
    bool backward;
    unsigned char *scratch; // all of it is written
    int64_t bytes;
} EmuAttention;
static inline int64_t emu_at(const EmuTensor &x, int64_t row, int64_t head, int64_t t, int64_t d) {
    return row * x.stride[0] + head * x.stride[1] + t * x.stride[2] + d * x.stride[3];
}
static inline double emu_get(const EmuTensor &x, int64_t row, int64_t head, int64_t t, int64_t d) {
    return read((const __nv_bfloat16 *)x.p + emu_at(x, row, head, t, d));
}
static inline double emu_dot(const EmuTensor &x, const EmuTensor &y, const int64_t head[2],
                             int64_t row, const int64_t t[2]) {
    double sum = 0;
    for (int64_t d = 0; d < x.n[3]; d++) {
        sum += emu_get(x, row, head[0], t[0], d) * emu_get(y, row, head[1], t[1], d);
    }
    return sum;
}
// Of one query: its scores' exponentials, divided by their sum unless `lse` is given.
static inline double emu_weights(const EmuAttention &a, int64_t row, int64_t head, int64_t t,
                                 std::vector<double> *p, const double *lse) {
    const int64_t heads[2] = {head, head * a.of[EMU_K].n[1] / a.of[EMU_Q].n[1]};
    double sum = 0;
    for (int64_t u = 0; u <= t; u++) {
        const int64_t at[2] = {t, u};
        const double score = a.scale * emu_dot(a.of[EMU_Q], a.of[EMU_K], heads, row, at);
        (*p)[(size_t)u] = exp(score - (lse ? *lse : 0));
        sum += (*p)[(size_t)u];
    }
    for (int64_t u = 0; !lse && u <= t; u++) { (*p)[(size_t)u] /= sum; }
    return log(sum);
}
static inline void emu_forward(const EmuAttention &a, int64_t row, int64_t head, int64_t t) {
    const EmuTensor &out = a.of[EMU_OUT], &v = a.of[EMU_V], &lse = a.of[EMU_LSE];
    const int64_t key = head * v.n[1] / out.n[1];
    std::vector<double> p((size_t)out.n[2]);
    ((float *)lse.p)[emu_at(lse, row, head, t, 0)] = (float)emu_weights(a, row, head, t, &p, NULL);
    for (int64_t d = 0; d < out.n[3]; d++) {
        double sum = 0;
        for (int64_t u = 0; u <= t; u++) { sum += p[(size_t)u] * emu_get(v, row, key, u, d); }
        write((__nv_bfloat16 *)out.p + emu_at(out, row, head, t, d), (float)sum);
    }
}
// Adds what one query contributes, to dq and, in fp64, to dk and dv of its key's head.
static inline void emu_backward(const EmuAttention &a, int64_t row, int64_t head, int64_t t,
                                std::vector<double> *dk, std::vector<double> *dv) {
    const EmuTensor &q = a.of[EMU_Q], &k = a.of[EMU_K], &v = a.of[EMU_V], &dq = a.of[EMU_DQ],
                    &dout = a.of[EMU_DOUT], &lse = a.of[EMU_LSE];
    const int64_t D = q.n[3], key = head * k.n[1] / q.n[1], heads[2] = {head, key},
                  same[2] = {head, head}, here[2] = {t, t};
    const double delta = emu_dot(dout, a.of[EMU_OUT], same, row, here),
                 log_sum = ((const float *)lse.p)[emu_at(lse, row, head, t, 0)];
    std::vector<double> p((size_t)q.n[2]), sum((size_t)D);
    emu_weights(a, row, head, t, &p, &log_sum);
    for (int64_t u = 0; u <= t; u++) {
        const int64_t at[2] = {t, u};
        const double dp = emu_dot(dout, v, heads, row, at),
                     ds = p[(size_t)u] * (dp - delta) * a.scale;
        for (int64_t d = 0; d < D; d++) {
            sum[(size_t)d] += ds * emu_get(k, row, key, u, d);
            (*dk)[(size_t)(u * D + d)] += ds * emu_get(q, row, head, t, d);
            (*dv)[(size_t)(u * D + d)] += p[(size_t)u] * emu_get(dout, row, head, t, d);
        }
    }
    for (int64_t d = 0; d < D; d++) {
        write((__nv_bfloat16 *)dq.p + emu_at(dq, row, head, t, d), (float)sum[(size_t)d]);
    }
}
__global__ void emu_attention_kernel(EmuAttention a) {
    const EmuTensor &q = a.of[EMU_Q], &k = a.of[EMU_K];
    const int64_t T = q.n[2], D = q.n[3], group = q.n[1] / k.n[1];
    if (threadIdx.x) { return; }
    if (a.bytes) { memset(a.scratch, 0xff, (size_t)a.bytes); }
    for (int64_t row = 0; row < q.n[0]; row++) {
        for (int64_t key = 0; key < k.n[1]; key++) {
            std::vector<double> sums[2] = {std::vector<double>((size_t)(T * D)),
                                           std::vector<double>((size_t)(T * D))};
            for (int64_t i = 0; i < group * T; i++) {
                const int64_t head = key * group + i / T;
                if (a.backward) {
                    emu_backward(a, row, head, i % T, &sums[0], &sums[1]);
                } else {
                    emu_forward(a, row, head, i % T);
                }
            }
            for (int64_t i = 0; a.backward && i < 2 * T * D; i++) {
                const EmuTensor &to = a.of[i < T * D ? EMU_DK : EMU_DV];
                const int64_t j = i % (T * D);
                write((__nv_bfloat16 *)to.p + emu_at(to, row, key, j / D, j % D),
                      (float)sums[i / (T * D)][(size_t)j]);
            }
        }
    }
}

namespace cudnn_frontend {
enum class DataType_t { FLOAT, BFLOAT16 };
enum class DiagonalAlignment_t { TOP_LEFT };
enum class HeurMode_t { A };
struct error_t {
    std::string message;
    bool is_good() { return message.empty(); }
    std::string get_message() { return message; }
};
namespace graph {
struct Tensor_attributes {
    int64_t uid = 0;
    std::vector<int64_t> dim, stride;
    bool output = false;
    DataType_t type = DataType_t::BFLOAT16;
    Tensor_attributes &set_uid(int64_t x) { return uid = x, *this; }
    Tensor_attributes &set_dim(std::vector<int64_t> x) { return dim = x, *this; }
    Tensor_attributes &set_stride(std::vector<int64_t> x) { return stride = x, *this; }
    Tensor_attributes &set_output(bool x) { return output = x, *this; }
    Tensor_attributes &set_data_type(DataType_t x) { return type = x, *this; }
};
typedef std::shared_ptr<Tensor_attributes> Tensor;
struct Options {
    float scale = 0;
    bool causal = false, deterministic = false, stats = false;
    Options &set_name(const char *) { return *this; }
    Options &set_attn_scale(float x) { return scale = x, *this; }
    Options &set_diagonal_alignment(DiagonalAlignment_t) { return *this; }
    Options &set_diagonal_band_right_bound(int x) { return causal = x == 0, *this; }
    Options &set_deterministic_algorithm(bool x) { return deterministic = x, *this; }
    Options &set_generate_stats(bool x) { return stats = x, *this; }
};
typedef Options SDPA_attributes;
typedef Options SDPA_backward_attributes;
struct Graph {
    Tensor of[EMU_TENSORS];
    Options options;
    bool backward = false;
    Graph &set_io_data_type(DataType_t) { return *this; }
    Graph &set_intermediate_data_type(DataType_t) { return *this; }
    Graph &set_compute_data_type(DataType_t) { return *this; }
    Tensor tensor(Tensor_attributes x) { return std::make_shared<Tensor_attributes>(x); }
    std::array<Tensor, 2> sdpa(Tensor q, Tensor k, Tensor v, Options o) {
        const Tensor made[] = {q, k, v, tensor({}), tensor({})};
        for (int i = 0; i < 5; i++) { of[i] = made[i]; }
        options = o;
        return {of[EMU_OUT], of[EMU_LSE]};
    }
    std::array<Tensor, 3> sdpa_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor dout,
                                        Tensor lse, Options o) {
        const Tensor made[] = {q, k, v, out, lse, dout, tensor({}), tensor({}), tensor({})};
        for (int i = 0; i < EMU_TENSORS; i++) { of[i] = made[i]; }
        options = o;
        backward = true;
        return {of[EMU_DQ], of[EMU_DK], of[EMU_DV]};
    }
    error_t build(cudnnHandle_t handle, std::vector<HeurMode_t>) {
        const bool whole = options.causal && (backward ? options.deterministic : options.stats) &&
                           of[EMU_LSE]->type == DataType_t::FLOAT;
        const char *refused = getenv("EMU_CUDNN_REFUSES");
        emu_counts.cudnn_graphs++;
        if (backward && refused && of[EMU_Q]->dim[0] == atoi(refused)) { return {"no such rows"}; }
        if (!handle || !whole) { return {"not what a training step needs"}; }
        for (int i = backward ? EMU_DQ : EMU_OUT; i < (backward ? EMU_TENSORS : EMU_DOUT); i++) {
            if (!of[i]->output) { return {"a result is virtual"}; }
        }
        if (!backward && of[EMU_Q]->dim[3] > 64) { return {"no engine for \"heads\" > 64"}; }
        return {};
    }
    error_t get_workspace_size(int64_t &bytes) {
        const std::vector<int64_t> &q = of[EMU_Q]->dim;
        const int64_t scores = q[0] * q[1] * q[2];
        bytes = backward ? scores * q[2] * 2 + scores * 4 + 256 : 0;
        return {};
    }
    error_t execute(cudnnHandle_t handle, std::unordered_map<int64_t, void *> tensors,
                    void *scratch) {
        EmuAttention a = {
            .scale = options.scale, .backward = backward, .scratch = (unsigned char *)scratch};
        get_workspace_size(a.bytes);
        for (int i = 0; i < (backward ? EMU_TENSORS : EMU_DOUT); i++) {
            if (!tensors.count(of[i]->uid)) { return {"a tensor is missing"}; }
            a.of[i].p = tensors[of[i]->uid];
            for (size_t j = 0; j < 4; j++) {
                a.of[i].n[j] = of[i]->dim[j];
                a.of[i].stride[j] = of[i]->stride[j];
            }
        }
        LAUNCH(emu_attention_kernel, dim3(1), dim3(32), 0, handle->stream, a);
        return {};
    }
};
} // namespace graph
} // namespace cudnn_frontend

#endif
