// ops.h: the tensor operations. Declared once; implemented by ops_cpu.h (OpenMP + CBLAS) and
// ops_cuda.cuh (CUDA).
//
// Every operation takes the Stream it runs on first. On the GPU it is a CUDA stream and the call
// returns at once; on the processor it is a team of threads and the call returns when done. Nothing
// outside the implementation dereferences tensor data: Real is an incomplete type, so the compiler
// enforces it (real_at() does pointer arithmetic).
//
// Types      Real    an element in compute precision (fp32 on the processor whatever --dtype is;
//                    --dtype on the GPU)
//            float   gradients of parameters, optimizer states, statistics
//            void*   storage and message precision, with its DType (convert with ops_unpack /
//                    ops_pack)
// Shapes     row-major; N = rows of a matrix (sequences x T), C channels, OC output channels, NH
//            heads, V vocabulary, Vp padded vocabulary. Weights are (OC, C), as in PyTorch's Linear
//            and llm.c.
// accumulate false: the result is written; true: it is added. The first contribution of a step
// writes, so gradients
//            need no clearing pass.
// Determinism: the same call with the same thread count gives the same bits. Element-wise
// operations, norms and the
//            optimizers give the same bits for any thread count.
// Aliasing   none unless a comment allows it.
// Zero rows  are legal: nothing is read, and a gradient with accumulate = false is written as
//            zeros.
#ifndef OPS_H
#define OPS_H

#include "support/base.h"     // DType
#include "kernels/noise.h"    // NoiseStream
#include "kernels/quantize.h" // QuantFormat

typedef struct Real Real; // never completed: see above

typedef struct {
    int threads; // of the team on the processor
    // called between tiles by the calling thread, so that messages move while it computes; may be
    // NULL
    void (*progress)(void);
    void *workspace; // ops_workspace_bytes(), allocated once by the caller through ops_alloc
    size_t workspace_bytes;
    void *device; // what the GPU build needs (handles, CUDA stream); NULL on the processor
} Stream;

// Largest shapes the model will ask for; what the workspace must hold follows from it.
typedef struct {
    int64_t rows, T, C, NH, V, Vp; // rows: sequences of a micro-batch
    // rows of these that the workspace holds at most; 0 where the caller always has another place
    int64_t logits;
} OpsShape;
enum { LOGITS_PLENTY = 1 << 30 }; // as many as the operation likes
static size_t ops_workspace_bytes(OpsShape shape, int threads);

// Before anything else: makes s->device. `place`: this rank's number on its machine, which chooses
// a GPU; `real`: the compute precision, which a processor ignores (it has one).
static void ops_open(Stream *s, int place, DType real);
static void ops_close(Stream *s);
// its name, "" for a processor; the dense bf16 peak its maker states, 0 where not known
static const char *ops_device(double *bf16_flops);
// the host's cores nearest to the device, such as "0-15,32-47"; "" where that is not known
static void ops_near_cores(char *list, size_t bytes);
// what computes attention, of the shapes planned so far: "own" kernels or "cuDNN"
static const char *ops_attention(void);
// what computes matrix products: "CBLAS" or "cuBLASLt"
static const char *ops_products(void);
// returns when all that was started on s is done
static void ops_wait(Stream *s);

// Matrix products of a library that offers several algorithms for each (GPUs; elsewhere there are
// none to choose from, and counts stay 0). A choice names a product and its algorithm, as bytes
// that only the same device and library understand.
enum { MATMUL_CHOICES = 256, MATMUL_CHOICE_BYTES = 128 };
typedef struct {
    unsigned char bytes[MATMUL_CHOICE_BYTES];
} MatmulChoice;
typedef struct {
    int count;
    MatmulChoice choice[MATMUL_CHOICES];
} MatmulChoices;
// What choosing brought: products that were timed, those whose epilogue a kernel of its own
// computes faster, and the seconds of all, each once, by the library's first suggestions and by the
// choices.
typedef struct {
    int products, apart;
    double first_s, chosen_s;
} MatmulGain;
// the device and the library that choices hold for; "" where there are none
static void ops_matmul_library(char *text, size_t bytes);
// asked for since ops_matmuls_use(), with several algorithms and no choice
static void ops_matmuls_seen(Stream *s, MatmulChoices *seen);
static void ops_matmuls_use(Stream *s, const MatmulChoices *choices); // from now on
// Times the algorithms of each wanted product, on operands of its own, and writes the fastest to
// *made. What the device has no memory for now is left out. The device must be idle.
static MatmulGain ops_matmuls_time(Stream *s, const MatmulChoices *wanted, MatmulChoices *made);

// Repeated work: the same operations with the same arguments, later, at the cost of one launch.
// `key` holds all that they depend on. true: the caller starts them now, then calls
// ops_repeat_end(). false: they were recorded when they were started before, and have been started
// again. In between nobody waits for the device or lets it touch memory that is not the device's.
static bool ops_repeat_begin(Stream *s, const void *key, size_t bytes);
static void ops_repeat_end(Stream *s);

// For profiles: moments in the stream's time, and what a profiler shows as a named range of the
// host's time.
typedef struct OpsMark OpsMark;
static OpsMark *ops_mark_make(void);
static void ops_mark_free(OpsMark *m);
// when all that was started before is done
static void ops_mark(Stream *s, OpsMark *m);
static double ops_mark_seconds(Stream *s, OpsMark *from, OpsMark *to); // after ops_wait()
// What a profiler of the device shows until the range ends: "what of number", or "what" alone where
// number is negative.
static void ops_range_begin(const char *what, const char *of, int number);
static void ops_range_end(void);
static void ops_profiler(bool on); // a profiler that waits for a sign begins, or ends

// --- memory and precision ------------------------------------------------------------------------
// device memory, 64-byte aligned, zero-filled (so its pages exist); NULL if there is none
static void *ops_alloc(size_t bytes);
static void ops_free(void *p);
// Memory of the host that the device reaches by itself, zero-filled: copies from and to it go on
// while the host does other things, which must leave it alone until ops_wait(). NULL if there is
// none.
static void *ops_alloc_host(size_t bytes);
static void ops_free_host(void *p);
// States that lie on the host (offload.h): memory for them, zero-filled, whose pages exist; pinned:
// copies go on beside the host's work, else they are slower. NULL if there is none.
static void *ops_alloc_far(size_t bytes, bool *pinned);
static void ops_free_far(void *p, bool pinned);
// Another stream of the same device, for copies beside what `of` does. What is started on s from
// now on begins when all is done that was started on `after` before.
static void ops_link_open(Stream *link, const Stream *of);
static void ops_link_close(Stream *link);
static void ops_follow(Stream *s, Stream *after);
// Memory that this rank's device has left, for all ranks on it; INFINITY where it is the machine's
// own.
static double ops_memory_available(void);
static bool ops_memory_apart(void); // the device's memory is not the process's own
static Real *real_at(Real *p, int64_t elements);
static const Real *real_at_const(const Real *p, int64_t elements);
static size_t ops_real_bytes(void);                                        // of one Real
static void ops_copy(Stream *s, void *to, const void *from, size_t bytes); // inside the device
static void ops_zero(Stream *s, void *p, size_t bytes);
// host: read before this returns, or ops_alloc_host()
static void ops_from_host(Stream *s, void *device, const void *host, size_t bytes);
// returns when done
static void ops_to_host(Stream *s, void *host, const void *device, size_t bytes);
// host: ops_alloc_host()
static void ops_to_host_later(Stream *s, void *host, const void *device, size_t bytes);
// returns when done
static void ops_reals_to_host(Stream *s, float *host, const Real *device, int64_t n);
// storage -> compute
static void ops_unpack(Stream *s, Real *out, const void *in, DType dtype, int64_t n);
// compute -> storage, nearest even
static void ops_pack(Stream *s, void *out, const Real *in, DType dtype, int64_t n);
// fp32 -> storage
static void ops_convert_float(Stream *s, void *out, const float *in, DType dtype, int64_t n,
                              Rounding r);

// --- memory ledger: every large buffer is taken here once, before the loop -----------------------
typedef enum {
    MEMORY_PARAMETERS,
    MEMORY_GRADIENTS,
    MEMORY_OPTIMIZER,
    MEMORY_ACTIVATIONS,
    MEMORY_BUFFERS,
    MEMORY_KINDS
} MemoryKind;
static const char *const memory_names[MEMORY_KINDS] = {"parameters", "gradients", "optimizer",
                                                       "activations", "buffers"};
static size_t memory_taken[MEMORY_KINDS]; // measured: what was really allocated
// of these states, and of what goes with them, what lies on the host (offload.h): not in the kinds
static size_t memory_on_host;

static inline void *memory_take(MemoryKind kind, size_t bytes, const char *what) {
    void *p = ops_alloc(bytes ? bytes : 1);
    if (!p) {
        die(EXIT_RESOURCES,
            "try --recompute block, a smaller --micro-batch or --seq-len, or --dtype bf16",
            "cannot allocate %zu bytes for %s", bytes, what);
    }
    memory_taken[kind] += bytes;
    return p;
}
// One allocation for states and for the rooms beside them, which are buffers.
static inline void *memory_take_with_slots(MemoryKind kind, size_t bytes, size_t slot_bytes,
                                           const char *what) {
    void *p = memory_take(kind, bytes + slot_bytes, what);
    memory_taken[kind] -= slot_bytes;
    memory_taken[MEMORY_BUFFERS] += slot_bytes;
    return p;
}
static inline void *memory_take_far(size_t bytes, const char *what, bool *pinned) {
    void *p = ops_alloc_far(bytes, pinned);
    if (!p) {
        die(EXIT_RESOURCES, "give a larger --device-memory, or more ranks with --zero 1",
            "cannot allocate %zu bytes of the host for %s", bytes, what);
    }
    memory_on_host += bytes;
    return p;
}
// no device memory: not in the ledger
static inline void *memory_take_host(size_t bytes, const char *what) {
    void *p = ops_alloc_host(bytes ? bytes : 1);
    if (!p) {
        die(EXIT_RESOURCES, "use a smaller --batch-tokens or --model",
            "cannot allocate %zu bytes of the host for %s", bytes, what);
    }
    return p;
}

// --- embedding -----------------------------------------------------------------------------------
// out(rows*T, C) = wte[token] + wpe[position]
static void ops_embedding_forward(Stream *s, Real *out, const int32_t *tokens, const Real *wte,
                                  const Real *wpe, int64_t rows, int64_t T, int64_t C);
// dwte(Vp, C), dwpe(maxT, C), either NULL where it is not wanted. accumulate = false writes whole
// dwte (zero for absent tokens) and whole dwpe (maxT rows, zero from T on). Where factors(rows) are
// given, what comes from a sample is times its factor; one of factor 0 is not read.
static void ops_embedding_backward(Stream *s, float *dwte, float *dwpe, const Real *dout,
                                   const int32_t *tokens, const float *factors, int64_t rows,
                                   int64_t T, int64_t C, int64_t Vp, int64_t maxT,
                                   bool accumulate_wte, bool accumulate_wpe);

// --- layernorm (epsilon 1e-5), statistics kept in fp32 -------------------------------------------
// sum = a + b where b is given (sum may be a), else sum is not written and a is normalised. out =
// (sum - mean) * rstd * weight + bias
static void ops_layernorm_forward(Stream *s, Real *out, float *mean, float *rstd, Real *sum,
                                  const Real *a, const Real *b, const Real *weight,
                                  const Real *bias, int64_t N, int64_t C);
// din += gradient through the normalisation (the residual path is already in din)
static void ops_layernorm_backward_input(Stream *s, Real *din, const Real *dout, const Real *in,
                                         const Real *weight, const float *mean, const float *rstd,
                                         int64_t N, int64_t C);
static void ops_layernorm_backward_weight(Stream *s, float *dweight, float *dbias, const Real *dout,
                                          const Real *in, const float *mean, const float *rstd,
                                          int64_t N, int64_t C, bool accumulate);

// --- matmul --------------------------------------------------------------------------------------
// out(N, OC) = in(N, C) weight^T + bias (bias may be NULL). Where gelu is given, gelu(N, OC) =
// GELU_tanh(out) as well.
static void ops_matmul_forward(Stream *s, Real *out, Real *gelu, const Real *in, const Real *weight,
                               const Real *bias, int64_t N, int64_t C, int64_t OC);
// din(N, C) = dout(N, OC) weight; where pre_gelu(N, C) is given, times GELU_tanh'(pre_gelu).
static void ops_matmul_backward_input(Stream *s, Real *din, const Real *dout, const Real *weight,
                                      const Real *pre_gelu, int64_t N, int64_t C, int64_t OC);
// dweight(OC, C) [+]= dout^T in; dbias(OC) [+]= column sums of dout (dbias may be NULL)
static void ops_matmul_backward_weight(Stream *s, float *dweight, float *dbias, const Real *dout,
                                       const Real *in, int64_t N, int64_t C, int64_t OC,
                                       bool accumulate);
// out = a + b, n elements; out may be a
static void ops_residual(Stream *s, Real *out, const Real *a, const Real *b, int64_t n);

// --- causal attention, softmax(q k^T / sqrt(C/NH)) v: no (T,T) matrix is ever held ---------------
// qkv(rows, T, 3C): all q, all k, all v of a token, heads inside. out(rows, T, C). lse(rows, NH,
// T): log-sum-exp of each score row.
static void ops_attention_forward(Stream *s, Real *out, float *lse, const Real *qkv, int64_t rows,
                                  int64_t T, int64_t C, int64_t NH);
static void ops_attention_backward(Stream *s, Real *dqkv, const Real *dout, const Real *qkv,
                                   const Real *out, const float *lse, int64_t rows, int64_t T,
                                   int64_t C, int64_t NH);

// --- classifier: logits, softmax, cross-entropy and their gradients, a chunk of rows at a time ---
// losses(N): -log p(target) of each row, natural log; 0 where target is -1 (a masked row, which
// also gets no gradient). dx(N, C) = scale * dlogits wte, dwte(Vp, C) [+]= scale * dlogits^T x.
// Columns V..Vp-1 take no part; their rows of dwte get no gradient (zero where accumulate is
// false). dlogits(N, Vp), where it is wanted, keeps scale * dlogits, zero in columns V..Vp-1. Each
// of dx, dwte and dlogits may be NULL; all of them: losses only. With dlogits kept the workspace
// holds no logits; else as many rows are taken at a time as it has room for. each: rows that share
// a dwte, N for one of all; else dwte is (N / each, Vp, C).
static void ops_classifier(Stream *s, float *losses, Real *dx, float *dwte, Real *dlogits,
                           const Real *x, const Real *wte, const int32_t *targets, int64_t N,
                           int64_t each, int64_t C, int64_t V, int64_t Vp, float scale,
                           bool accumulate);

// --- optimizers and norms ------------------------------------------------------------------------
// One pass over memory. master is the fp32 parameter; param (storage precision) gets its rounded
// copy; with DTYPE_FP32 param == master. g = grad * grad_scale. Copies are rounded by o.rounding,
// with the same bits on the processor and on the GPU.
typedef struct {
    float lr, beta1, beta2, eps, weight_decay, momentum, grad_scale;
    int64_t step;      // from 1: bias correction
    Rounding rounding; // to bf16 storage, of the first element on
} OptimizerStep;
// m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m/(1-b1^step) / (sqrt(v/(1-b2^step)) + eps)
// + wd p)
static void ops_adamw(Stream *s, float *master, void *param, DType dtype, float *m, float *v,
                      const float *grad, int64_t n, OptimizerStep o);
// b = momentum b + g + wd p; p -= lr b
static void ops_sgd(Stream *s, float *master, void *param, DType dtype, float *b, const float *grad,
                    int64_t n, OptimizerStep o);
// The same in the host's memory, by the host's threads; they return when done.
static void ops_adamw_host(Stream *s, float *master, void *param, DType dtype, float *m, float *v,
                           const float *grad, int64_t n, OptimizerStep o);
static void ops_sgd_host(Stream *s, float *master, void *param, DType dtype, float *b,
                         const float *grad, int64_t n, OptimizerStep o);
// Adds scale x (the fp64 sum of x[e]^2, in a fixed order) of each chunk of `chunk` elements of x[n]
// to *sum, exactly: the same bits on any build, for any number of threads and any cut at multiples
// of the chunk. *sum lies where x does, in memory of ops_alloc().
static void ops_square_sum(Stream *s, ExactSum *sum, const float *x, int64_t n, int64_t chunk,
                           double scale);
static void ops_accumulate(Stream *s, float *out, const float *in, int64_t n); // out += in
// The same two in the host's memory, by the host's threads; they return when done.
static void ops_square_sum_host(Stream *s, ExactSum *sum, const float *x, int64_t n, int64_t chunk,
                                double scale);
// to bf16
static void ops_round_host(Stream *s, uint16_t *rounded, const float *x, int64_t n, Rounding r);
static void ops_accumulate_host(Stream *s, float *out, const float *in, int64_t n);

// --- quantization: n elements, which begin with a block, as records of quantize.h ----------------
// The same bits for any thread count, and on both builds (but for which NaN). Records are aligned
// to 4 bytes.
// storage precision -> records
static void ops_quantize(Stream *s, void *out, const void *in, DType dtype, int64_t n,
                         QuantFormat f);
// records -> storage, nearest even
static void ops_dequantize(Stream *s, void *out, DType dtype, const void *in, int64_t n,
                           QuantFormat f);
// out [+]= the sum of `count` contributions; the records of contribution k are at in + k * stride
// bytes. fp32, in this order; out is the first term where it is added to.
static void ops_dequantize_sum(Stream *s, float *out, bool accumulate, const void *in,
                               int64_t stride, int count, int64_t n, QuantFormat f);
// The records of such a sum, which is never held. count > 0.
static void ops_requantize_sum(Stream *s, void *out, const void *in, int64_t stride, int count,
                               int64_t n, QuantFormat f);
// Records of x = in + error; error = (1 - beta) error + beta (x - its value), to nearest even:
// bf16, which the caller keeps from call to call.
static void ops_quantize_feedback(Stream *s, void *out, const float *in, uint16_t *error,
                                  float beta, int64_t n, QuantFormat f);

// --- privacy: what each sample (T consecutive rows) adds to a gradient ---------------------------
// norms(rows): SQUARED norms, fp64, added to; factors(rows): fp32. Both in device memory. What
// concerns a sample has the same bits whatever other samples are there (but for the number of
// threads where a comment says so): nobody's noise may hide what neighbours do.
typedef enum { CLIP_ABADI, CLIP_AUTOMATIC } ClipFunction; // order of --dp-clip-function
// norms += |dout_b^T in_b|^2: the weight gradient of a linear layer, of each sample b, which is
// never held. From the products of its rows, tile by tile, each pair once (ghost norm, arXiv
// 2210.00038); or from tiles of the gradient itself where that is less work.
static void ops_matmul_sample_norms(Stream *s, double *norms, const Real *dout, const Real *in,
                                    int64_t rows, int64_t T, int64_t C, int64_t OC);
// sums(rows, OC) = each sample's column sums of dout(rows*T, OC): its gradient of a bias. norms +=
// their squares
static void ops_bias_samples(Stream *s, float *sums, double *norms, const Real *dout, int64_t rows,
                             int64_t T, int64_t OC);
// dweights(rows, C), dbiases(rows, C) = each sample's gradients of a layernorm. norms += their
// squares
static void ops_layernorm_samples(Stream *s, float *dweights, float *dbiases, double *norms,
                                  const Real *dout, const Real *in, const float *mean,
                                  const float *rstd, int64_t rows, int64_t T, int64_t C);
// norms += |dwte|^2 + |dwpe|^2 of the embedding: the rows of dout(rows*T, C) summed by token
// (sorted, no (T, V) matrix), and one by one
static void ops_embedding_sample_norms(Stream *s, double *norms, const Real *dout,
                                       const int32_t *tokens, int64_t rows, int64_t T, int64_t C);
// norms += 2 <dwte of the embedding, dwte of the classifier> = 2 sum over t, s of dlogits[s,
// token_t] (x_s . dout_t): the two uses of a tied wte add up before they are measured. x, dout
// (rows*T, C); dlogits (rows*T, Vp)
static void ops_tied_sample_norms(Stream *s, double *norms, const Real *dout, const int32_t *tokens,
                                  const Real *dlogits, const Real *x, int64_t rows, int64_t T,
                                  int64_t C, int64_t Vp);
// Where table and classifier are on different ranks: what one must know of the other for this term.
// out(rows*T, C)_t = the row of the classifier's dwte that position t's token has = sum over s of
// dlogits[s, token_t] x_s, summed in fp64; or row token_t of table(rows, Vp, C).
static void ops_tied_rows(Stream *s, float *out, const int32_t *tokens, const Real *dlogits,
                          const Real *x, int64_t rows, int64_t T, int64_t C, int64_t Vp);
static void ops_token_rows(Stream *s, float *out, const int32_t *tokens, const float *table,
                           int64_t rows, int64_t T, int64_t C, int64_t Vp);
// norms += sum over k < count of others[k * stride + b] + 2 sum over t of tied_t . dout_t, both
// (rows*T, C). Where the two uses of wte cancel each other 64-fold or more, so that what is left
// may be rounding, 2^-20 of the terms' sizes is added: no sample seems shorter than it is.
static void ops_crossing_norms(Stream *s, double *norms, const double *others, int64_t count,
                               int64_t stride, const Real *dout, const float *tied, int64_t rows,
                               int64_t T, int64_t C);
// norms += sums of squares of in(rows, n)
static void ops_sample_norms(Stream *s, double *norms, const float *in, int64_t rows, int64_t n);
// factors[b] = weights[b] * clip(weights[b] * sqrt(norms[b])), where clip(x) is min(1, R / (x +
// 1e-6)) or R / (x + 0.01); 0 where x is not finite: then the sample is left out
static void ops_clip_factors(Stream *s, float *factors, const double *norms, const float *weights,
                             int64_t rows, float R, ClipFunction clip);
// dweight(OC, C) [+]= sum over b of factors[b] dout_b^T in_b, whatever a sample of factor 0 holds
// (NaN too). It may spoil dout(rows*T, OC) and in(rows*T, C). No product is of rows that were
// rounded to less than fp32 after they were scaled: where the terms of a sample cancel, what
// rounding leaves of them would not be bounded by its norm.
static void ops_matmul_backward_weight_samples(Stream *s, float *dweight, Real *dout, Real *in,
                                               const float *factors, int64_t rows, int64_t T,
                                               int64_t C, int64_t OC, bool accumulate);
// out(n) [+]= sum over b of factors[b] in(b, n), samples in order; a sample of factor 0 is not
// read. rows 0 without accumulate: zeros. in may be out where it is one sample that is not added to
// others.
static void ops_accumulate_samples(Stream *s, float *out, const float *in, const float *factors,
                                   int64_t rows, int64_t n, bool accumulate);
// x = scale * (x + deviation z) of n elements, which are `first` ... of the noise (first: a
// multiple of 16), z ~ N(0, 1) of noise.h. The sum is rounded to a public grid, so that its last
// bits do not tell x (noise.h). deviation 0: x = scale * x, exactly
static void ops_add_noise(Stream *s, float *x, int64_t first, int64_t n, NoiseStream noise,
                          float deviation, float scale);

#endif
