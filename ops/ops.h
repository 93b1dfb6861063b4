// ops.h: the tensor operations. This header declares each operation once. ops_cpu.h (OpenMP and
// oneDNN or a CBLAS) and ops_cuda.cuh (CUDA) implement them.
//
// Every operation takes the Stream that it runs on as its first argument. On the GPU a stream is a
// CUDA stream, and the call returns at once. On the CPU a stream is a team of threads, and the call
// returns when the work is done. Only the implementations dereference tensor data: Real is an
// incomplete type, so the compiler enforces this rule. Use real_at() for pointer arithmetic.
//
// Types        Real    an element in compute precision, which is --dtype
//              float   gradients of parameters, optimizer states, statistics
//              void*   an array whose type a DType says, such as parameters and messages
// Shapes       Matrices are row-major. N rows of a matrix (sequences x T), C channels, OC output
//              channels, NH heads, V vocabulary, Vp padded vocabulary. Weights are (OC, C), as in
//              PyTorch's Linear and in llm.c. [+]= means = or +=, according to accumulate.
// accumulate   false: the result is written; true: it is added. The first contribution of a step
//              is written, so gradient buffers need no clearing pass.
// Determinism  The same call with the same number of threads gives the same bits. Any number gives
//              the same bits where the library's products allow it (gemm_same_in_all_tiles() on the
//              CPU), and in operations without products everywhere.
// Aliasing     Arguments must not overlap unless a comment allows it.
// Zero rows    are legal: nothing is read, and a gradient with accumulate = false becomes zero.
#ifndef OPS_H
#define OPS_H

#include "base/base.h"
#include "ops/noise.h"
#include "ops/quantize.h"

typedef struct Real Real; // incomplete on purpose, see above

typedef struct {
    int threads; // size of the team on the CPU
    // Lets messages move: the calling thread calls it between pieces of its work. May be NULL.
    void (*progress)(void);
    void *workspace; // ops_workspace_bytes(), allocated once by the caller with ops_alloc()
    size_t workspace_bytes;
    void *device; // the GPU build's handles and CUDA stream; NULL on the CPU
} Stream;

// The largest shapes that the model will use. They determine the size of the workspace.
typedef struct {
    int64_t rows, T, C, NH, V, Vp; // rows: sequences of a micro-batch
    // Rows of logits that the workspace can hold, at most. 0 if the caller always passes a buffer
    // for them.
    int64_t logits;
    int64_t kv_heads, D;      // of attention; 0: NH heads of C / NH channels
    int64_t widest;           // outputs of the widest linear layer; 0: 4 C
    int64_t experts, choices; // of a block, and of a token; 0: none
} OpsShape;
enum { LOGITS_PLENTY = 1 << 30 }; // for OpsShape.logits: no limit but the operation's
// The shape of attention: heads of D elements. `heads` query heads share `kv_heads` heads of keys
// and values, in groups of neighbours: query head h reads head h * kv_heads / heads, which is an
// integer division. The tokens of each row have the positions first .. first + T - 1; first is 0
// unless earlier tokens are in a cache of keys and values.
typedef struct {
    int64_t rows, T, heads, kv_heads, D, first;
} AttentionShape;
// Returns the largest shape of attention.
static inline AttentionShape ops_attention_shape(OpsShape s) {
    const AttentionShape a = {.rows = s.rows,
                              .T = s.T,
                              .heads = s.NH,
                              .kv_heads = s.kv_heads ? s.kv_heads : s.NH,
                              .D = s.D ? s.D : s.C / s.NH};
    return a;
}
// Returns the outputs of the widest linear layer of a block.
static inline int64_t ops_widest(OpsShape s) { return s.widest ? s.widest : 4 * s.C; }
static inline int64_t attention_q_width(AttentionShape a) { return a.heads * a.D; }
static inline int64_t attention_qkv_width(AttentionShape a) {
    return (a.heads + 2 * a.kv_heads) * a.D;
}
static size_t ops_workspace_bytes(OpsShape shape, int threads);

// Creates s->device. The caller must do this before any other operation. `place` is this rank's
// number on its machine and selects the GPU. `real` is the compute precision.
// Without a GPU, the GPU build ends with EXIT_RESOURCES.
static void ops_open(Stream *s, int place, DType real);
static void ops_close(Stream *s);
// Returns the device's name ("" for the CPU), and its dense bf16 peak in flop/s according to the
// manufacturer (0 if unknown).
static const char *ops_device(double *bf16_flops);
// What the instructions that multiply matrices can do at most, in flop/s: all threads together, as
// measured; and a core, by its clock. Figures are 0 where they are not known, as on a GPU.
typedef struct {
    const char *instructions;
    double measured, limit;
} OpsPeak;
static OpsPeak ops_peak(const Stream *s);
// Returns how many bytes a copy must have so that caches do not make it faster than memory is.
static size_t ops_copy_bytes(void);
// Writes the host cores nearest to the device, such as "0-15,32-47"; "" if they are unknown.
static void ops_near_cores(char *list, size_t bytes);
// Returns what computes attention for the shape that ops_workspace_bytes() was last asked for:
// "own" (our kernels), "cuDNN", or which of them each direction uses, as in "cuDNN forward, own
// backward".
static const char *ops_attention(void);
// Returns why cuDNN does not compute all of it; "" if it does, and on the CPU.
static const char *ops_attention_reason(void);
// own: plan from now on for own attention only; not own: as the build and the environment say.
static void ops_own_attention(bool own);
// Returns what products of matrices are computed in: the type of a Real, or fp32 where a CPU has no
// dot products of bf16. Call ops_open() first.
static DType ops_compute(void);
// Sets what products are computed in: fp32, if the CPU of another rank has no bf16. Call it
// before ops_workspace_bytes(). On a GPU it does nothing.
static void ops_compute_in(DType compute);
// Returns what computes matrix products: "oneDNN", "CBLAS" or "cuBLASLt".
static const char *ops_products(void);
// Writes what the bits of products depend on, besides the order of fp32 sums: the kind of device,
// the precision and, in bf16, where such an order moves results by steps of bf16, what multiplies.
static void ops_arithmetic(char *text, size_t bytes);
// Writes what the operations were built for: kind of device, instructions, libraries.
static void ops_build(char *text, size_t bytes);
// Returns when all work started on s is done. Calls s->progress while it waits.
static void ops_wait(Stream *s);

// The choice of algorithms for matrix products. A GPU's library offers several algorithms for each
// product. On the CPU there is nothing to choose, and all counts stay 0. A MatmulChoice names a
// product and its algorithm as opaque bytes, valid only for the same device and library.
enum { MATMUL_CHOICES = 256, MATMUL_CHOICE_BYTES = 128 };
typedef struct {
    unsigned char bytes[MATMUL_CHOICE_BYTES];
} MatmulChoice;
typedef struct {
    int count;
    MatmulChoice choice[MATMUL_CHOICES];
} MatmulChoices;
// What choosing gained. products: products that were timed; apart: those of them that are faster
// without a fused epilogue, whose work a separate kernel then does; first_s and chosen_s: seconds
// of one run of each product, by the library's first suggestions and by the choices.
typedef struct {
    int products, apart;
    double first_s, chosen_s;
} MatmulGain;
// Writes the device and library for which choices are valid; "" if there are no choices to make.
static void ops_matmul_library(char *text, size_t bytes);
// Lists the products used since ops_matmuls_use() that have several algorithms but no choice.
static void ops_matmuls_seen(Stream *s, MatmulChoices *seen);
static void ops_matmuls_use(Stream *s, const MatmulChoices *choices); // replaces all choices
// Times the algorithms of each wanted product, on operands that it allocates, and writes the
// fastest to *made. Products that do not fit the device's free memory are left out. The device must
// be idle.
static MatmulGain ops_matmuls_time(Stream *s, const MatmulChoices *wanted, MatmulChoices *made);

// Recording repeated work (CUDA graphs). The same operations with the same arguments can later be
// started at the cost of one launch. `key` holds everything that they depend on. If
// ops_repeat_begin() returns true, the caller must start the operations and then call
// ops_repeat_end(). If it returns false, it has started the recorded operations itself, and the
// caller must not. Between the two calls, nothing may wait for the device or make it access host
// memory.
static bool ops_repeat_begin(Stream *s, const void *key, size_t bytes);
static void ops_repeat_end(Stream *s);

// For profiles. A mark is a point in a stream's work.
typedef struct OpsMark OpsMark;
static OpsMark *ops_mark_make(void);
static void ops_mark_free(OpsMark *m);
// The mark is reached when all work started on s before it is done.
static void ops_mark(Stream *s, OpsMark *m);
static double ops_mark_seconds(Stream *s, OpsMark *from, OpsMark *to); // call ops_wait() first
// Names a range of the host's time for a profiler of the device: "what of number", or just "what"
// if number is negative.
static void ops_range_begin(const char *what, const char *of, int number);
static void ops_range_end(void);
static void ops_profiler(bool on); // starts or stops a profiler that waits for this signal

// --- memory and precision ------------------------------------------------------------------------
// Returns zero-filled device memory, aligned to 64 bytes, whose pages exist; NULL if there is not
// enough.
static void *ops_alloc(size_t bytes);
static void ops_free(void *p);
// Returns zero-filled host memory that the device can access directly (pinned); NULL if there is
// not enough. Copies from and to it run asynchronously, so the host must not touch it before
// ops_wait().
static void *ops_alloc_host(size_t bytes);
static void ops_free_host(void *p);
// Returns zero-filled host memory for offloaded states (offload.h), whose pages exist; NULL if
// there is not enough. Sets *pinned. Copies from and to memory that is not pinned are slower and
// block the host.
static void *ops_alloc_far(size_t bytes, bool *pinned);
static void ops_free_far(void *p, bool pinned);
// A link is another stream of the same device, for copies that run concurrently with the work on
// `of`. ops_follow() makes later work on s wait for all earlier work on `after`.
static void ops_link_open(Stream *link, const Stream *of);
static void ops_link_close(Stream *link);
static void ops_follow(Stream *s, Stream *after);
// Returns the free bytes of this rank's device, shared by all ranks that use it; INFINITY if the
// device has no memory of its own.
static double ops_memory_available(void);
static bool ops_memory_apart(void); // true: device memory is separate from host memory
static Real *real_at(Real *p, int64_t elements);
static const Real *real_at_const(const Real *p, int64_t elements);
static size_t ops_real_bytes(void);                                        // size of one Real
static void ops_copy(Stream *s, void *to, const void *from, size_t bytes); // within the device
static void ops_zero(Stream *s, void *p, size_t bytes);
// The host data has been read when this returns, unless it is memory of ops_alloc_host().
static void ops_from_host(Stream *s, void *device, const void *host, size_t bytes);
// Returns when the copy is done.
static void ops_to_host(Stream *s, void *host, const void *device, size_t bytes);
// Returns at once. host must be memory of ops_alloc_host().
static void ops_to_host_later(Stream *s, void *host, const void *device, size_t bytes);
// Returns when the copy is done.
static void ops_reals_to_host(Stream *s, float *host, const Real *device, int64_t n);
// Converts fp32 to storage precision, rounding as r says.
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
static size_t memory_taken[MEMORY_KINDS]; // bytes actually allocated
// bytes of offloaded states and their buffers on the host (offload.h); not part of the kinds above
static size_t memory_on_host;

// Allocates with ops_alloc() and counts the bytes. Like the other memory_take functions, it ends
// with EXIT_RESOURCES if memory is lacking; `what` names the buffer in the message.
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
// Makes one allocation for states and for the slots behind them, which the ledger counts as
// buffers.
static inline void *memory_take_with_slots(MemoryKind kind, size_t bytes, size_t slot_bytes,
                                           const char *what) {
    void *p = memory_take(kind, bytes + slot_bytes, what);
    memory_taken[kind] -= slot_bytes;
    memory_taken[MEMORY_BUFFERS] += slot_bytes;
    return p;
}
// Allocates host memory for offloaded states or activations with ops_alloc_far().
static inline void *memory_take_far(size_t bytes, const char *what, bool *pinned) {
    void *p = ops_alloc_far(bytes, pinned);
    if (!p) {
        die(EXIT_RESOURCES, "give a larger --device-memory, or more ranks with --zero 1",
            "cannot allocate %zu bytes of the host for %s", bytes, what);
    }
    memory_on_host += bytes;
    return p;
}
// Allocates with ops_alloc_host(). The ledger counts device memory, so it leaves this out.
static inline void *memory_take_host(size_t bytes, const char *what) {
    void *p = ops_alloc_host(bytes ? bytes : 1);
    if (!p) {
        die(EXIT_RESOURCES, "use a smaller --batch-tokens or --model",
            "cannot allocate %zu bytes of the host for %s", bytes, what);
    }
    return p;
}

// --- embedding -----------------------------------------------------------------------------------
// out(rows*T, C) = wte[token] + wpe[position]; wpe may be NULL
static void ops_embedding_forward(Stream *s, Real *out, const int32_t *tokens, const Real *wte,
                                  const Real *wpe, int64_t rows, int64_t T, int64_t C);
// Gradients of the tables: dwte(Vp, C) and dwpe(maxT, C); either may be NULL. With accumulate =
// false the whole table is written: zero for tokens that do not occur and for positions from T on.
// factors(rows) may be NULL; otherwise each sample's contribution is multiplied by its factor, and
// a sample whose factor is 0 adds nothing, whatever it holds.
static void ops_embedding_backward(Stream *s, float *dwte, float *dwpe, const Real *dout,
                                   const int32_t *tokens, const float *factors, int64_t rows,
                                   int64_t T, int64_t C, int64_t Vp, int64_t maxT,
                                   bool accumulate_wte, bool accumulate_wpe);

// --- layernorm (epsilon 1e-5), statistics kept in fp32 -------------------------------------------
// out = (x - mean) * rstd * weight + bias. If b is given, x = a + b is written to sum (which may be
// a); if b is NULL, x = a and sum is not written.
static void ops_layernorm_forward(Stream *s, Real *out, float *mean, float *rstd, Real *sum,
                                  const Real *a, const Real *b, const Real *weight,
                                  const Real *bias, int64_t N, int64_t C);
// din = before + the gradient through the normalisation. before: the gradient of another path, such
// as the residual stream's; it may be din; NULL: there is none.
static void ops_layernorm_backward_input(Stream *s, Real *din, const Real *before, const Real *dout,
                                         const Real *in, const Real *weight, const float *mean,
                                         const float *rstd, int64_t N, int64_t C);
static void ops_layernorm_backward_weight(Stream *s, float *dweight, float *dbias, const Real *dout,
                                          const Real *in, const float *mean, const float *rstd,
                                          int64_t N, int64_t C, bool accumulate);

// --- RMSNorm, statistics kept in fp32 ------------------------------------------------------------
// out = x * rstd * weight with rstd(N) = 1 / sqrt(mean of x^2 + eps); weight(C) may be NULL: no
// gain. If b is given, x = a + b is written to sum (which may be a); if b is NULL, x = a and sum is
// not written. x * rstd is computed in fp32 and rounded once.
static void ops_rmsnorm_forward(Stream *s, Real *out, float *rstd, Real *sum, const Real *a,
                                const Real *b, const Real *weight, int64_t N, int64_t C, float eps);
// din = before + the gradient through the normalisation: dx = r g dy - x r^3 mean(g dy x). before:
// as in ops_layernorm_backward_input()
static void ops_rmsnorm_backward_input(Stream *s, Real *din, const Real *before, const Real *dout,
                                       const Real *in, const Real *weight, const float *rstd,
                                       int64_t N, int64_t C);
// dweight(C) [+]= sum over rows of dout * in * rstd
static void ops_rmsnorm_backward_weight(Stream *s, float *dweight, const Real *dout, const Real *in,
                                        const float *rstd, int64_t N, int64_t C, bool accumulate);

// --- matmul --------------------------------------------------------------------------------------
// out(N, OC) = in(N, C) weight^T + bias (bias may be NULL). If gelu is given, gelu(N, OC) =
// GELU_tanh(out) too.
static void ops_matmul_forward(Stream *s, Real *out, Real *gelu, const Real *in, const Real *weight,
                               const Real *bias, int64_t N, int64_t C, int64_t OC);
// The same for one row, N = 1. It may add in another order than ops_matmul_forward().
static void ops_vector_forward(Stream *s, Real *out, Real *gelu, const Real *in, const Real *weight,
                               const Real *bias, int64_t C, int64_t OC);
// din(N, C) = dout(N, OC) weight. If pre_gelu(N, C) is given, din is multiplied by
// GELU_tanh'(pre_gelu).
static void ops_matmul_backward_input(Stream *s, Real *din, const Real *dout, const Real *weight,
                                      const Real *pre_gelu, int64_t N, int64_t C, int64_t OC);
// dweight(OC, C) [+]= dout^T in; dbias(OC) [+]= column sums of dout (dbias may be NULL)
static void ops_matmul_backward_weight(Stream *s, float *dweight, float *dbias, const Real *dout,
                                       const Real *in, int64_t N, int64_t C, int64_t OC,
                                       bool accumulate);
// out = a + b, n elements; out may be a
static void ops_residual(Stream *s, Real *out, const Real *a, const Real *b, int64_t n);

// --- rotary positions (arXiv 2104.09864), and the norm of each head of q and k -------------------
// Element i < D/2 of a head turns with element i + D/2 by the angle position * frequency[i], in
// fp32 ("rotate half"): y_i = x_i cos - x_(i+D/2) sin, y_(i+D/2) = x_(i+D/2) cos + x_i sin. The
// position is AttentionShape.first, plus the row's number in its sequence.
enum { ROTARY_PAIRS = 128 }; // at most, so D <= 256
typedef struct {
    float frequency[ROTARY_PAIRS];
} Rotary;
// Turns q and k of qkv in place; v stays. back: by the negative angles, which is the gradient.
static void ops_rotary(Stream *s, Real *qkv, AttentionShape a, const Rotary *r, bool back);
// Makes out(rows, T, (heads + 2 kv_heads) D) from in, which has the same shape: RMSNorm of each
// head of q and k (over its D elements), times q_weight(D) or k_weight(D) (both may be NULL: no
// gain), times `scale`, then turned; v is copied. rstd(rows, T, heads + kv_heads).
typedef struct {
    AttentionShape shape;
    const Rotary *rotary;
    float eps, scale;
} HeadNorm;
static void ops_head_norm_forward(Stream *s, Real *out, float *rstd, const Real *in,
                                  const Real *q_weight, const Real *k_weight, const HeadNorm *h);
// din, all of it, is written.
static void ops_head_norm_backward_input(Stream *s, Real *din, const Real *dout, const Real *in,
                                         const Real *q_weight, const Real *k_weight,
                                         const float *rstd, const HeadNorm *h);
// dq_weight(D), dk_weight(D) [+]= sums over tokens and heads
static void ops_head_norm_backward_weight(Stream *s, float *dq_weight, float *dk_weight,
                                          const Real *dout, const Real *in, const float *rstd,
                                          const HeadNorm *h, bool accumulate);

// --- activations of the MLP ----------------------------------------------------------------------
// out(N, F) = silu(gate) * up, where in(N, 2F) holds gate(F), then up(F) of each row, and silu(a) =
// a / (1 + exp(-a))
static void ops_swiglu_forward(Stream *s, Real *out, const Real *in, int64_t N, int64_t F);
static void ops_swiglu_backward(Stream *s, Real *din, const Real *dout, const Real *in, int64_t N,
                                int64_t F);
// out = max(in, 0)^2, n elements. din may be dout.
static void ops_relu2_forward(Stream *s, Real *out, const Real *in, int64_t n);
static void ops_relu2_backward(Stream *s, Real *din, const Real *dout, const Real *in, int64_t n);

// --- causal attention, softmax(q k^T / sqrt(D)) v; no (T, T) matrix is stored --------------------
// qkv(rows, T, (heads + 2 kv_heads) D) holds all of q, then k, then v of each token, split into
// heads inside each. out(rows, T, heads D). lse(rows, heads, T) is the log-sum-exp of each row of
// scores. dqkv is written. The gradients of a shared key or value are added in the order of heads.
static void ops_attention_forward(Stream *s, Real *out, float *lse, const Real *qkv,
                                  AttentionShape a);
static void ops_attention_backward(Stream *s, Real *dqkv, const Real *dout, const Real *qkv,
                                   const Real *out, const float *lse, AttentionShape a);

// --- attention to tokens whose keys and values are kept ------------------------------------------
// The keys and values of one sequence: keys(kv_heads, most, D), then values(kv_heads, most, D), as
// they are in qkv after rotary positions. A head's positions lie behind each other.
typedef struct {
    Real *keys, *values;
    int64_t most; // positions that there is memory for; 0: nothing is kept
} KeyCache;
// Returns the elements of a cache for `most` positions, keys and values together.
static inline int64_t key_cache_elements(AttentionShape a, int64_t most) {
    return 2 * a.kv_heads * most * a.D;
}
// Keeps the keys and values of qkv(1, T, (heads + 2 kv_heads) D), at the positions from a.first on.
static void ops_keep_keys(Stream *s, KeyCache cache, const Real *qkv, AttentionShape a);
// out(1, T, heads D): attention of T queries, each to the kept keys and values of all positions up
// to its own, which ops_keep_keys() has kept before. For few queries: nothing is shared among them.
static void ops_attention_kept(Stream *s, Real *out, const Real *qkv, KeyCache cache,
                               AttentionShape a);

// --- experts: a mixture, in place of an MLP ------------------------------------------------------
// Where the tokens of a micro-batch go. N tokens have `choices` experts each, all different.
// Choice j of token t has number t * choices + j. The rows that experts work on are one for each
// choice: those of an expert together, in the order of the experts, and in that of the tokens.
enum { ROUTE_PARTS = 5 };
typedef struct {
    int32_t *expert, *place; // [N * choices] of a choice; place: its row
    float *weight, *dweight; // [N * choices] of its expert's output; the gradient of it
    float *lse;              // [N * choices] log of the sum of e^logit of each group, one a group
    int64_t N, choices;
} Route;
// Lays a route into N * choices * ROUTE_PARTS numbers of four bytes.
static inline Route route_at(float *at, int64_t N, int64_t choices) {
    const int64_t n = N * choices;
    int32_t *whole = (int32_t *)(void *)at;
    const Route r = {.expert = whole,
                     .place = whole + n,
                     .weight = at + 2 * n,
                     .dweight = at + 3 * n,
                     .lse = at + 4 * n,
                     .N = N,
                     .choices = choices};
    return r;
}
// Experts in groups of equal size. A token goes to the likeliest `top_k` of each group. With one
// group their weights are divided by their sum, as Mixtral's; with several they are not (M6-T's
// prototypes, arXiv 2105.15082).
typedef struct {
    int64_t experts, groups, top_k;
} Router;
// What else a router's gradient has: that of `aux` * shares[e] * p[t][e], for all tokens and
// experts, and of `z` * lse^2. shares(experts), in the memory of activations; NULL: no such part.
typedef struct {
    const float *shares;
    float aux, z;
} RouterLosses;
// Gradients of the biases that choose experts are loads: what an expert has more than the mean,
// times this, so that no norm of gradients shows them.
#define LOAD_UNIT 0x1p-100f
// p(N, experts) = softmax of in(N, C) weight(experts, C)^T, within each group, in fp32. Makes the
// route: of each group, the experts of the largest p + bias; of equal ones, the first.
// loads(experts): how many rows each gets, in memory of ops_alloc_host() or ops_alloc().
static void ops_route(Stream *s, Route route, int32_t *loads, float *p, const Real *in,
                      const Real *weight, const Real *bias, int64_t C, Router router);
// Returns when the host can read the loads of the last ops_route(), if these are in memory of
// ops_alloc_host(). After recorded work that has routed, only ops_wait() does.
static void ops_wait_loads(Stream *s);
// dx(N, C) = before + dlogits weight, where before may be NULL, or dx. p becomes dlogits.
static void ops_route_backward_input(Stream *s, Real *dx, const Real *before, float *p, Route route,
                                     const Real *weight, int64_t C, Router router,
                                     RouterLosses losses);
// dweight(experts, C) [+]= dlogits^T in; dbias(experts) [+]= loads
static void ops_route_backward_weight(Stream *s, float *dweight, float *dbias, const float *dlogits,
                                      Route route, const int32_t *loads, const Real *in, int64_t C,
                                      Router router, bool accumulate);
// rows(N * choices, C): a copy of its token's row of in(N, C) for each choice. Back: dx = before +
// the sum of a token's rows, where before may be NULL, or dx.
static void ops_dispatch(Stream *s, Real *rows, const Real *in, Route route, int64_t C);
static void ops_dispatch_backward(Stream *s, Real *dx, const Real *before, const Real *drows,
                                  Route route, int64_t C);
// out(N, C) = the sum of a token's rows, each times its weight. Back: drows, and the route's
// dweight.
static void ops_combine_rows(Stream *s, Real *out, const Real *rows, Route route, int64_t C);
static void ops_combine_rows_backward(Stream *s, Real *drows, const Real *dout, const Real *rows,
                                      Route route, int64_t C);
// How the rows of experts follow each other: for each of `sources` ranks that sent them, those of
// each of this rank's experts. counts[sources][experts]: how many, on the host.
typedef struct {
    const int32_t *counts;
    int64_t sources, experts;
} ExpertRows;
static inline int64_t expert_rows_sum(ExpertRows r) {
    int64_t n = 0;
    for (int64_t i = 0; i < r.sources * r.experts; i++) { n += r.counts[i]; }
    return n;
}
// The matrix products of experts: out(rows, OC), in(rows, C), weight(experts, OC, C). gelu,
// pre_gelu: as in ops_matmul_forward() and ops_matmul_backward_input(); or NULL. one: the rows are
// those of a single token.
static void ops_experts_forward(Stream *s, Real *out, Real *gelu, const Real *in,
                                const Real *weight, ExpertRows rows, int64_t C, int64_t OC,
                                bool one);
static void ops_experts_backward_input(Stream *s, Real *din, const Real *dout, const Real *weight,
                                       const Real *pre_gelu, ExpertRows rows, int64_t C,
                                       int64_t OC);
// dweight(experts, OC, C) [+]= ...: zero for an expert without rows
static void ops_experts_backward_weight(Stream *s, float *dweight, const Real *dout, const Real *in,
                                        ExpertRows rows, int64_t C, int64_t OC, bool accumulate);

// --- classifier: logits, softmax, cross-entropy and their gradients, a chunk of rows at a time ---
// losses(N)        -log p(target) of each row (natural logarithm); 0 if target is -1 (a masked row,
//                  which adds nothing to gradients)
// dx(N, C)         = scale * dlogits wte
// dwte(Vp, C)      [+]= scale * dlogits^T x. Rows V..Vp-1 get no gradient.
// dlogits(N, Vp)   = scale * dlogits, zero in columns V..Vp-1, which take no part in the softmax
// each             rows of x that share one dwte: N for a single dwte; otherwise dwte is
//                  (N / each, Vp, C)
// softcap          0: none; otherwise logits are softcap tanh(x wte^T / softcap), and dlogits are
//                  the gradients before the tanh
// dx, dwte and dlogits may each be NULL; if all are, only the losses are computed. If dlogits is
// given, the logits are computed in it; otherwise in the workspace, as many rows at a time as fit.
static void ops_classifier(Stream *s, float *losses, Real *dx, float *dwte, Real *dlogits,
                           const Real *x, const Real *wte, const int32_t *targets, int64_t N,
                           int64_t each, int64_t C, int64_t V, int64_t Vp, float scale,
                           float softcap, bool accumulate);
// x = softcap tanh(x / softcap), n elements (logits of generated text)
static void ops_softcap(Stream *s, Real *x, int64_t n, float softcap);

// --- optimizers and norms ------------------------------------------------------------------------
// One pair of kernels for each row of state/optimizer.h: for the device, and for states in host
// memory. Each makes one pass over memory. In the formulas, g = grad * grad_scale.

// n elements to be updated. master is the fp32 parameter. param is its copy in storage precision,
// rounded by o.rounding, with the same bits on the CPU and on the GPU. With DTYPE_FP32,
// param == master.
typedef struct {
    float *master, *moment[2];
    const float *grad;
    void *param;
    DType dtype; // of param
    int64_t n;
} UpdateSlice;
// What an optimizer of whole matrices does with them
typedef struct {
    float lr, weight_decay, momentum;
    int iterations; // of Newton-Schulz
} MatrixStep;
typedef struct {
    float lr, beta1, beta2, eps, weight_decay, momentum, grad_scale;
    int64_t step;      // counted from 1, for the bias correction
    Rounding rounding; // of copies in bf16; numbers the elements from the first on
    MatrixStep matrices;
    bool nesterov; // of AdamW and SGD
    bool balances; // the elements are biases that choose experts: ops_balance()
} OptimizerStep;
// The factors of AdamW's moments that correct their start at zero (arXiv 1412.6980).
typedef struct {
    float m, v;
} AdamwBias;
static inline AdamwBias adamw_bias(OptimizerStep o) {
    const AdamwBias bias = {
        .m = (float)(1.0 / (1.0 - pow((double)o.beta1, (double)o.step))),
        .v = (float)(1.0 / (1.0 - pow((double)o.beta2, (double)o.step))),
    };
    return bias;
}
// m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2
// p -= lr (m/(1-b1^step) / (sqrt(v/(1-b2^step)) + eps) + wd p)
// With o.nesterov, b1 m + (1-b1) g takes the place of m in p: m, if g came once more.
static void ops_adamw(Stream *s, UpdateSlice u, OptimizerStep o);
// b = momentum b + g + wd p; p -= lr b; with o.nesterov p -= lr (momentum b + g + wd p)
static void ops_sgd(Stream *s, UpdateSlice u, OptimizerStep o);
// The last part of Muon's update, with a direction as `grad`: p = p (1 - lr wd) - lr g
static void ops_muon(Stream *s, UpdateSlice u, OptimizerStep o);
// The same for states in host memory. The host's threads compute, and the call returns when it is
// done.
static void ops_adamw_host(Stream *s, UpdateSlice u, OptimizerStep o);
static void ops_sgd_host(Stream *s, UpdateSlice u, OptimizerStep o);
static void ops_muon_host(Stream *s, UpdateSlice u, OptimizerStep o);
// The update of biases that choose experts, from loads as gradients: p -= lr sign(g). Moments are
// not used.
static void ops_balance(Stream *s, UpdateSlice u, OptimizerStep o);
static void ops_balance_host(Stream *s, UpdateSlice u, OptimizerStep o);
// The first part of an update in two parts: the moments are updated, and out(n) is the direction;
// master and param are not used. Of Muon, with mu = o.momentum:
// m += (1 - mu) (g - m); out = g + mu (m - g)
static void ops_muon_direction(Stream *s, float *out, UpdateSlice u, OptimizerStep o);
// Of AdamW: m and v as in ops_adamw; out = m/(1-b1^step) / (sqrt(v/(1-b2^step)) + eps)
static void ops_adamw_direction(Stream *s, float *out, UpdateSlice u, OptimizerStep o);
// The parts of ops/orthogonalise.h. out is (rows, cols) or, with `turn`, (cols, rows).
// out = x(rows, cols) / max(sqrt(sum of squares), 1e-7), turned if `turn`
static void ops_orthogonal_begin(Stream *s, Real *out, const float *x, const ExactSum *squares,
                                 int64_t rows, int64_t cols, bool turn);
// x(rows, cols) = in, which is (cols, rows) if `turn`
static void ops_orthogonal_end(Stream *s, float *x, const Real *in, int64_t rows, int64_t cols,
                               bool turn);
// out(n) = a x + b y; out may be x or y
static void ops_combine(Stream *s, Real *out, float a, const Real *x, float b, const Real *y,
                        int64_t n);
// out(N, N) = in(N, C) in^T, where half of it may be computed, and the rest copied
static void ops_matmul_symmetric(Stream *s, Real *out, const Real *in, int64_t N, int64_t C);
// For each chunk of `chunk` elements of x[n], adds scale * (fp64 sum of x[e]^2 in a fixed order) to
// *sum, exactly. The result has the same bits in both builds, for any thread count, and for any cut
// of x at multiples of the chunk. *sum is in the same memory as x, allocated with ops_alloc().
static void ops_square_sum(Stream *s, ExactSum *sum, const float *x, int64_t n, int64_t chunk,
                           double scale);
static void ops_accumulate(Stream *s, float *out, const float *in, int64_t n); // out += in
// ops_square_sum and ops_accumulate for host memory, and rounding to bf16. The host's threads
// compute, and each call returns when it is done.
static void ops_square_sum_host(Stream *s, ExactSum *sum, const float *x, int64_t n, int64_t chunk,
                                double scale);
static void ops_round_host(Stream *s, uint16_t *rounded, const float *x, int64_t n, Rounding r);
static void ops_accumulate_host(Stream *s, float *out, const float *in, int64_t n);

// --- quantization: n elements as records of quantize.h -------------------------------------------
// The n elements start with a block. Results have the same bits for any thread count and in
// both builds, except for the bits of a NaN. Records are aligned to 4 bytes.

// Converts storage precision to records.
static void ops_quantize(Stream *s, void *out, const void *in, DType dtype, int64_t n,
                         QuantFormat f);
// Converts records to storage precision, rounding to nearest even.
static void ops_dequantize(Stream *s, void *out, DType dtype, const void *in, int64_t n,
                           QuantFormat f);
// out [+]= the sum of `count` contributions, in fp32 and in this order. The records of contribution
// k start at in + k * stride bytes. With accumulate, the sum starts with out.
static void ops_dequantize_sum(Stream *s, float *out, bool accumulate, const void *in,
                               int64_t stride, int count, int64_t n, QuantFormat f);
// Writes the records of such a sum without storing the sum itself. count > 0.
static void ops_requantize_sum(Stream *s, void *out, const void *in, int64_t stride, int count,
                               int64_t n, QuantFormat f);
// Quantization with error feedback. Writes the records of x = in + error, and updates error = (1 -
// beta) error + beta (x - the records' value), in bf16, rounded to nearest even. The caller keeps
// error from call to call.
static void ops_quantize_feedback(Stream *s, void *out, const float *in, uint16_t *error,
                                  float beta, int64_t n, QuantFormat f);

// --- privacy: what each sample (T consecutive rows) adds to a gradient ---------------------------
// norms(rows) are SQUARED norms in fp64, and each operation adds to them; factors(rows) are fp32.
// Both are in device memory. The results of a sample have the same bits whatever the other samples
// are: the noise is scaled for a change of one sample's contribution, and would not hide a change
// of rounding in the others.
typedef enum { CLIP_ABADI, CLIP_AUTOMATIC } ClipFunction; // in the order of --dp-clip-function
// norms += |dout_b^T in_b|^2, the squared norm of each sample's weight gradient of a linear layer.
// The gradient itself is never stored. The norm is computed from products of pairs of rows, tile by
// tile, each pair once (the ghost norm, arXiv 2210.00038), or from tiles of the gradient where that
// is less work.
static void ops_matmul_sample_norms(Stream *s, double *norms, const Real *dout, const Real *in,
                                    int64_t rows, int64_t T, int64_t C, int64_t OC);
// sums(rows, OC) = the column sums of each sample's dout(T, OC), its gradient of a bias. norms +=
// the squared norms of these sums.
static void ops_bias_samples(Stream *s, float *sums, double *norms, const Real *dout, int64_t rows,
                             int64_t T, int64_t OC);
// dweights(rows, C), dbiases(rows, C) = the gradients of a layernorm for each sample. norms +=
// their squared norms.
static void ops_layernorm_samples(Stream *s, float *dweights, float *dbiases, double *norms,
                                  const Real *dout, const Real *in, const float *mean,
                                  const float *rstd, int64_t rows, int64_t T, int64_t C);
// The same for RMSNorm: dweights(rows, C), and for the norms of heads: dq_weights(rows, D),
// dk_weights(rows, D), each summed over the tokens (and heads) of a sample before it is squared.
static void ops_rmsnorm_samples(Stream *s, float *dweights, double *norms, const Real *dout,
                                const Real *in, const float *rstd, int64_t rows, int64_t T,
                                int64_t C);
static void ops_head_norm_samples(Stream *s, float *dq_weights, float *dk_weights, double *norms,
                                  const Real *dout, const Real *in, const float *rstd,
                                  const HeadNorm *h);
// norms += |dwte|^2 of the embedding, + |dwpe|^2 if it has positions. dwte sums the rows of
// dout(rows*T, C) by token (by sorting, without a (T, V) matrix); dwpe has one row of dout for each
// position. Tokens are below Vp.
static void ops_embedding_sample_norms(Stream *s, double *norms, const Real *dout,
                                       const int32_t *tokens, bool positions, int64_t rows,
                                       int64_t T, int64_t C, int64_t Vp);
// Cross term of a tied table: norms += 2 <dwte of the embedding, dwte of the classifier> = 2 sum
// over t, s of dlogits[s, token_t] (x_s . dout_t), since a sample's gradient is the sum of both
// uses of wte. x and dout are (rows*T, C); dlogits is (rows*T, Vp).
static void ops_tied_sample_norms(Stream *s, double *norms, const Real *dout, const int32_t *tokens,
                                  const Real *dlogits, const Real *x, int64_t rows, int64_t T,
                                  int64_t C, int64_t Vp);
// The rows that must be sent for this term if embedding and classifier are on different ranks.
// ops_tied_rows: out(rows*T, C)_t = row token_t of the sample's classifier gradient, the sum over s
// of dlogits[s, token_t] x_s, in fp64. ops_token_rows: the same rows, copied from table(rows, Vp,
// C).
static void ops_tied_rows(Stream *s, float *out, const int32_t *tokens, const Real *dlogits,
                          const Real *x, int64_t rows, int64_t T, int64_t C, int64_t Vp);
static void ops_token_rows(Stream *s, float *out, const int32_t *tokens, const float *table,
                           int64_t rows, int64_t T, int64_t C, int64_t Vp);
// norms += sum over k < count of others[k * stride + b] + 2 sum over t of tied_t . dout_t, where
// tied and dout are (rows*T, C). Without tied (NULL) the second sum is 0. If the two uses of wte
// cancel each other 64-fold or more, what is left may be rounding error. Then 2^-20 of the terms'
// sizes is added, so that no sample's norm is too small.
static void ops_crossing_norms(Stream *s, double *norms, const double *others, int64_t count,
                               int64_t stride, const Real *dout, const float *tied, int64_t rows,
                               int64_t T, int64_t C);
// norms += the sum of squares of each row of in(rows, n)
static void ops_sample_norms(Stream *s, double *norms, const float *in, int64_t rows, int64_t n);
// factors[b] = weights[b] * clip(weights[b] * sqrt(norms[b])), where clip(x) is min(1, R / (x +
// 1e-6)) for CLIP_ABADI and R / (x + 0.01) for CLIP_AUTOMATIC. If x is not finite, the factor is 0,
// and the sample is left out.
static void ops_clip_factors(Stream *s, float *factors, const double *norms, const float *weights,
                             int64_t rows, float R, ClipFunction clip);
// dweight(OC, C) [+]= sum over b of factors[b] dout_b^T in_b. A sample whose factor is 0 adds
// nothing, even if it holds NaN. The call may overwrite dout(rows*T, OC) and in(rows*T, C). Scaled
// rows are never rounded to less than fp32 before the product: if the terms of a sample cancel, the
// rounding errors would not be bounded by its clipped norm.
static void ops_matmul_backward_weight_samples(Stream *s, float *dweight, Real *dout, Real *in,
                                               const float *factors, int64_t rows, int64_t T,
                                               int64_t C, int64_t OC, bool accumulate);
// out(n) [+]= sum over b of factors[b] in(b, n), in the order of the samples. A sample whose factor
// is 0 is not read. With rows = 0 and no accumulate, out becomes zero. in may be out if there is
// one sample and no accumulate.
static void ops_accumulate_samples(Stream *s, float *out, const float *in, const float *factors,
                                   int64_t rows, int64_t n, bool accumulate);
// x = scale * (x + deviation z) for n elements, which have the numbers `first` (a multiple of 16)
// and following in the noise stream. z ~ N(0, 1) is defined in noise.h. The sum is rounded to a
// public grid, so that its last bits do not reveal x (noise.h). With deviation = 0, x = scale * x
// exactly.
static void ops_add_noise(Stream *s, float *x, int64_t first, int64_t n, NoiseStream noise,
                          float deviation, float scale);

#endif
