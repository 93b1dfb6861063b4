// matmul_cuda.cuh: matrix products on a GPU by cuBLASLt, and the choice of the algorithm for each
// product. The operations that call matmul() are in ops_cuda.cuh.
//
// MatmulPlan  What cuBLASLt needs for one product (MatmulKey). It is made once and kept.
// Choice      The library suggests several algorithms for a product, its best guess first. It may
//             offer to fuse the following operation into the product (an epilogue).
//             ops_matmuls_time() times the first SUGGESTIONS of them, with and without the
//             epilogue, and keeps the fastest. Algorithms add in different orders, so a choice
//             determines the last bits of a result. Therefore rank 0 chooses for all ranks, and
//             checkpoints store the choices (engine/matmul_choices.h). A product without a choice
//             uses the library's first suggestion, which depends only on the product, the GPU and
//             the library.
#ifndef MATMUL_CUDA_CUH
#define MATMUL_CUDA_CUH

#include "ops/cuda/device_cuda.cuh" // stream, workspace

enum {
    // Plans that are kept. Another epilogue or alignment makes another product.
    MATMUL_PLANS = 256,
    SUGGESTIONS = 16, // number of the library's suggestions that are timed
    MATMUL_TURNS = 3  // timings of each suggestion; the fastest counts
};
#ifndef MATMUL_CALLS
#define MATMUL_CALLS 4 // calls of the product in one timing
#endif

#define LT_CHECK(call) lt_check((call), #call)
static inline void lt_check(cublasStatus_t status, const char *call) {
    if (status != CUBLAS_STATUS_SUCCESS) {
        die(EXIT_RESOURCES, NULL, "%s: cuBLASLt status %d", call, (int)status);
    }
}

// A product D(m,n) = op(A)(m,k) op(B)(k,n), column-major as in cuBLASLt.
typedef struct {
    int64_t m, n, k;
    int a_transposed, b_transposed, out_fp32, epilogue;
    // Alignments of A, B, D (which is also C), and the epilogue's pointers. The struct has no
    // padding, because keys are compared as bytes.
    unsigned alignment[4];
} MatmulKey;
typedef struct {
    MatmulKey key;
    // false: the library has no such product, or it is slower than the product without its epilogue
    bool offered;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} MatmulPlan;
struct Matmuls {
    cublasLtHandle_t lt;
    MatmulPlan plans[MATMUL_PLANS];
    int64_t plans_made; // the newest MATMUL_PLANS of them are kept
    MatmulChoices choices;
    bool timing, failed; // timing: suggestions are being timed; failed: one of them failed
};
// The contents of a MatmulChoice.
typedef struct {
    MatmulKey key;
    uint64_t offered;
    cublasLtMatmulAlgo_t algo;
} ChosenMatmul;
static_assert(sizeof(ChosenMatmul) <= sizeof(MatmulChoice), "a choice is carried as bytes");

static struct Matmuls *matmuls_open(void) {
    struct Matmuls *m = new_array(struct Matmuls, 1, "matrix products");
    LT_CHECK(cublasLtCreate(&m->lt));
    return m;
}
static inline void free_matmul_plan(MatmulPlan *p) {
    LT_CHECK(cublasLtMatmulDescDestroy(p->desc));
    LT_CHECK(cublasLtMatrixLayoutDestroy(p->a));
    LT_CHECK(cublasLtMatrixLayoutDestroy(p->b));
    LT_CHECK(cublasLtMatrixLayoutDestroy(p->d));
}
static inline int64_t matmul_plans_kept(const struct Matmuls *m) {
    return min_i64(m->plans_made, MATMUL_PLANS);
}
static inline void forget_matmul_plans(struct Matmuls *m) {
    for (int64_t i = 0; i < matmul_plans_kept(m); i++) { free_matmul_plan(&m->plans[i]); }
    m->plans_made = 0;
}
static void matmuls_close(struct Matmuls *m) {
    forget_matmul_plans(m);
    LT_CHECK(cublasLtDestroy(m->lt));
    free(m);
}

// Returns the largest power of two, up to 256, that divides the address. cuBLASLt may rely on it.
// For NULL it is 256.
static inline unsigned alignment_of(const void *p) {
    const uintptr_t lowest = (uintptr_t)p & -(uintptr_t)p;
    return lowest && lowest < 256 ? (unsigned)lowest : 256;
}
// What the library does to a product while it writes it.
typedef struct {
    int kind; // a cublasLtEpilogue_t
    // BIAS: (m) Reals, added. BGRADB: (n) written, the sums of op(B) over k, in D's type.
    const void *bias;
    // GELU_AUX: (m, n) Reals, written: the input of GELU. DGELU: the same, read.
    const void *pre_gelu;
} Epilogue;
enum { OF_GELU = 128 }; // the bit that is set in all epilogues with a pre_gelu

#define SET(what, value)                                                                           \
    LT_CHECK(cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_##what, &(value),         \
                                            sizeof(value)))
static inline void point_epilogue(cublasLtMatmulDesc_t desc, const Epilogue *e) {
    LT_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &e->bias,
                                            sizeof e->bias));
    LT_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                            &e->pre_gelu, sizeof e->pre_gelu));
}
static inline MatmulPlan describe_matmul(MatmulKey key, const Epilogue *e) {
    MatmulPlan p;
    memset(&p, 0, sizeof p);
    p.key = key;
    const cudaDataType_t in = gpu_real == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F,
                         out = key.out_fp32 ? CUDA_R_32F : in;
    const cublasOperation_t a_op = key.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                            b_op = key.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint64_t m = (uint64_t)key.m, n = (uint64_t)key.n, k = (uint64_t)key.k;
    LT_CHECK(cublasLtMatmulDescCreate(
        &p.desc, in == CUDA_R_32F ? FP32_PRODUCTS : CUBLAS_COMPUTE_32F, CUDA_R_32F));
    SET(TRANSA, a_op);
    SET(TRANSB, b_op);
    SET(EPILOGUE, key.epilogue);
    if (key.epilogue & OF_GELU) { SET(EPILOGUE_AUX_LD, key.m); }
    point_epilogue(p.desc, e); // suggestions depend on the pointers' alignment
    LT_CHECK(cublasLtMatrixLayoutCreate(&p.a, in, key.a_transposed ? k : m,
                                        key.a_transposed ? m : k,
                                        key.a_transposed ? key.k : key.m));
    LT_CHECK(cublasLtMatrixLayoutCreate(&p.b, in, key.b_transposed ? n : k,
                                        key.b_transposed ? k : n,
                                        key.b_transposed ? key.n : key.k));
    LT_CHECK(cublasLtMatrixLayoutCreate(&p.d, out, m, n, key.m));
    return p;
}
#undef SET
static inline void prefer(cublasLtMatmulPreference_t preference, int attribute, const void *value,
                          size_t bytes) {
    LT_CHECK(cublasLtMatmulPreferenceSetAttribute(
        preference, (decltype(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES))attribute, value, bytes));
}
// Writes up to `most` algorithms for a product, the library's best guess first, and returns their
// number.
static inline int suggested_matmuls(struct Matmuls *m, const MatmulPlan *p,
                                    cublasLtMatmulAlgo_t *algos, int most) {
    cublasLtMatmulHeuristicResult_t found[SUGGESTIONS];
    cublasLtMatmulPreference_t preference;
    const uint64_t workspace = MATMUL_WORKSPACE;
    int count = 0;
    memset(found, 0, sizeof found);
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &p->key.alignment[0],
           sizeof p->key.alignment[0]);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &p->key.alignment[1],
           sizeof p->key.alignment[1]);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &p->key.alignment[2],
           sizeof p->key.alignment[2]);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &p->key.alignment[2],
           sizeof p->key.alignment[2]);
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        m->lt, p->desc, p->a, p->b, p->d, p->d, preference, most, found, &count);
    LT_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_SUCCESS) { return 0; }
    for (int i = 0; i < count; i++) { algos[i] = found[i].algo; }
    return count;
}

static inline ChosenMatmul chosen_matmul(const MatmulChoice *choice) {
    ChosenMatmul chosen;
    memcpy(&chosen, choice->bytes, sizeof chosen);
    return chosen;
}
// Returns the index of the choice for a product; -1 if it has none.
static inline int matmul_choice_of(const MatmulChoices *choices, const MatmulKey *key) {
    for (int i = 0; i < choices->count; i++) {
        const ChosenMatmul chosen = chosen_matmul(&choices->choice[i]);
        if (!memcmp(&chosen.key, key, sizeof *key)) { return i; }
    }
    return -1;
}
static inline void add_matmul_choice(MatmulChoices *choices, const MatmulPlan *p) {
    if (choices->count == MATMUL_CHOICES || matmul_choice_of(choices, &p->key) >= 0) { return; }
    ChosenMatmul chosen;
    memset(&chosen, 0, sizeof chosen);
    chosen.key = p->key;
    chosen.offered = p->offered;
    chosen.algo = p->algo;
    memset(choices->choice[choices->count].bytes, 0, sizeof(MatmulChoice));
    memcpy(choices->choice[choices->count++].bytes, &chosen, sizeof chosen);
}
static int matmul_suggestion = 0; // suggestion for products without a choice; tests try all
// Sets the plan's algorithm: its choice, if the library accepts it, otherwise the first suggestion.
// A choice may be from a file, so it is checked.
static inline void choose_algorithm(struct Matmuls *m, MatmulPlan *p) {
    const int choice = matmul_choice_of(&m->choices, &p->key);
    if (choice >= 0) {
        const ChosenMatmul chosen = chosen_matmul(&m->choices.choice[choice]);
        cublasLtMatmulHeuristicResult_t checked;
        p->offered = chosen.offered;
        p->algo = chosen.algo;
        const bool works = cublasLtMatmulAlgoCheck(m->lt, p->desc, p->a, p->b, p->d, p->d, &p->algo,
                                                   &checked) == CUBLAS_STATUS_SUCCESS &&
                           checked.workspaceSize <= MATMUL_WORKSPACE;
        if (!p->offered || works) { return; }
    }
    cublasLtMatmulAlgo_t algos[SUGGESTIONS];
    const int count =
        suggested_matmuls(m, p, algos, (int)min_i64(matmul_suggestion + 1, SUGGESTIONS));
    p->offered = count > 0;
    if (count) { p->algo = algos[count - 1]; }
}
static inline MatmulPlan *find_matmul_plan(struct Matmuls *m, const MatmulKey *key,
                                           const Epilogue *e) {
    for (int64_t i = 0; i < matmul_plans_kept(m); i++) {
        if (!memcmp(&m->plans[i].key, key, sizeof *key)) { return &m->plans[i]; }
    }
    MatmulPlan *p = &m->plans[m->plans_made % MATMUL_PLANS]; // replaces the oldest
    if (m->plans_made++ >= MATMUL_PLANS) { free_matmul_plan(p); }
    *p = describe_matmul(*key, e);
    choose_algorithm(m, p);
    return p;
}
// Column-major, packed: d(m,n) [+]= op(a)(m,k) op(b)(k,n), followed by the epilogue. A row-major
// (N, C) matrix is a column-major (C, N) matrix. Returns false, and does nothing, if the product is
// not offered with this epilogue.
static inline bool matmul(Stream *s, void *d, bool out_fp32, const Real *a, bool a_transposed,
                          const Real *b, bool b_transposed, Epilogue e, int64_t m, int64_t n,
                          int64_t k, bool accumulate) {
    cudaStream_t stream = enter(s);
    struct Matmuls *all = ((Gpu *)s->device)->matmuls;
    MatmulKey key;
    static_assert(sizeof key == 56, "keys are compared as bytes");
    key.m = m;
    key.n = n;
    key.k = k;
    key.a_transposed = a_transposed;
    key.b_transposed = b_transposed;
    key.out_fp32 = out_fp32;
    key.epilogue = e.kind;
    key.alignment[0] = alignment_of(a);
    key.alignment[1] = alignment_of(b);
    key.alignment[2] = alignment_of(d);
    key.alignment[3] = (unsigned)min_i64(alignment_of(e.bias), alignment_of(e.pre_gelu));
    MatmulPlan *p = find_matmul_plan(all, &key, &e);
    if (!p->offered) { return false; }
    const float one = 1.0f, beta = accumulate ? 1.0f : 0.0f;
    point_epilogue(p->desc, &e);
    const cublasStatus_t status =
        cublasLtMatmul(all->lt, p->desc, &one, a, p->a, b, p->b, &beta, d, p->d, d, p->d, &p->algo,
                       s->workspace, MATMUL_WORKSPACE, stream);
    if (all->timing) {
        all->failed = all->failed || status != CUBLAS_STATUS_SUCCESS;
    } else {
        lt_check(status, "cublasLtMatmul");
    }
    return true;
}
static inline void must_be_offered(bool offered, int64_t N, int64_t C, int64_t OC) {
    if (offered) { return; }
    die(EXIT_RESOURCES, "multiples of 8 work for channels and padded vocabulary",
        "cuBLASLt has no product of (%" PRId64 ", %" PRId64 ") and (%" PRId64 ", %" PRId64 ")", N,
        C, OC, C);
}

// -------------------------------------------------------------------------------------------------
// Choosing algorithms
static inline void ops_matmul_library(char *text, size_t bytes) {
    double peak;
    snprintf(text, bytes, "%s, cuBLASLt %zu", ops_device(&peak), cublasLtGetVersion());
}
static inline void ops_matmuls_use(Stream *s, const MatmulChoices *choices) {
    struct Matmuls *m = ((Gpu *)s->device)->matmuls;
    ops_wait(s);
    forget_matmul_plans(m);
    m->choices = *choices;
}
static inline void ops_matmuls_seen(Stream *s, MatmulChoices *seen) {
    struct Matmuls *m = ((Gpu *)s->device)->matmuls;
    cublasLtMatmulAlgo_t algos[2];
    memset(seen, 0, sizeof *seen);
    for (int64_t i = 0; i < matmul_plans_kept(m); i++) {
        const MatmulPlan *p = &m->plans[i];
        if (matmul_choice_of(&m->choices, &p->key) < 0 && suggested_matmuls(m, p, algos, 2) == 2) {
            add_matmul_choice(seen, p);
        }
    }
}

// A product to be timed, with buffers for its operands that are aligned as in its key.
typedef struct {
    MatmulKey key;
    void *memory;
    Real *a, *b;
    void *d, *bias, *pre_gelu;
} TimedMatmul;
// Fills with numbers of both signs, since zeros would need less power and run faster.
template <class R> __global__ void fill_kernel(R *p, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { write(p + i, (float)(int)(mix64((uint64_t)i) >> 40) * 0x1p-23f - 1.0f); }
}
static inline void *take_operand(char **at, int64_t bytes, unsigned alignment) {
    char *p = *at + (alignment < 256 ? alignment : 0);
    *at += round_up(bytes + 256, 256);
    return p;
}
// Returns false if the device has no memory for the operands now.
static inline bool open_timed_matmul(TimedMatmul *t, const MatmulKey *key, cudaStream_t stream) {
    const int64_t real = (int64_t)ops_real_bytes(), out = key->out_fp32 ? 4 : real,
                  a = key->m * key->k * real, b = key->k * key->n * real;
    const int64_t d = key->m * key->n * out, bias = max_i64(key->m, key->n) * 4,
                  aux = key->epilogue & OF_GELU ? key->m * key->n * real : 0;
    const int64_t all = a + b + d + bias + aux + 10 * 512;
    t->key = *key;
    t->memory = ops_alloc((size_t)all);
    if (!t->memory) { return false; }
    FOR_REAL(LAUNCH((fill_kernel<R>), blocks_for(all / (int64_t)sizeof(R), THREADS), THREADS, 0,
                    stream, (R *)t->memory, all / (int64_t)sizeof(R)));
    char *at = (char *)t->memory;
    t->a = (Real *)take_operand(&at, a, key->alignment[0]);
    t->b = (Real *)take_operand(&at, b, key->alignment[1]);
    t->d = take_operand(&at, d, key->alignment[2]);
    t->bias = take_operand(&at, bias, key->alignment[3]);
    t->pre_gelu = take_operand(&at, aux, key->alignment[3]);
    return true;
}
// Calls the operation that uses this product: ops_matmul_forward(), _backward_input() or
// _backward_weight().
static inline void run_timed_matmul(Stream *s, const TimedMatmul *t) {
    const MatmulKey *key = &t->key;
    const bool gelu = key->epilogue & OF_GELU;
    const Real *bias = key->epilogue & CUBLASLT_EPILOGUE_BIAS ? (const Real *)t->bias : NULL;
    if (key->b_transposed) {
        float *sums = key->epilogue == CUBLASLT_EPILOGUE_BGRADB ? (float *)t->bias : NULL;
        ops_matmul_backward_weight(s, (float *)t->d, sums, t->b, t->a, key->k, key->m, key->n,
                                   false);
    } else if (key->a_transposed && gelu) {
        ops_matmul_forward(s, (Real *)t->pre_gelu, (Real *)t->d, t->b, t->a, bias, key->n, key->k,
                           key->m);
    } else if (key->a_transposed) {
        ops_matmul_forward(s, (Real *)t->d, NULL, t->b, t->a, bias, key->n, key->k, key->m);
    } else {
        ops_matmul_backward_input(s, (Real *)t->d, t->b, t->a,
                                  gelu ? (const Real *)t->pre_gelu : NULL, key->n, key->m, key->k);
    }
}
// Returns the seconds of the operation with the current plans; INFINITY if it fails.
static inline double timed_matmul_seconds(Stream *s, const TimedMatmul *t) {
    struct Matmuls *m = ((Gpu *)s->device)->matmuls;
    double best = INFINITY;
    OpsMark *from = ops_mark_make(), *to = ops_mark_make();
    m->failed = false;
    run_timed_matmul(s, t); // the first call loads what it needs
    for (int turn = 0; turn < MATMUL_TURNS && !m->failed; turn++) {
        ops_mark(s, from);
        for (int call = 0; call < MATMUL_CALLS; call++) { run_timed_matmul(s, t); }
        ops_mark(s, to);
        ops_wait(s);
        const double seconds = ops_mark_seconds(s, from, to) / MATMUL_CALLS;
        best = seconds < best ? seconds : best;
    }
    ops_wait(s);
    ops_mark_free(from);
    ops_mark_free(to);
    return m->failed ? INFINITY : best;
}
// Sets the plan to the fastest suggestion, and returns the operation's seconds with it.
static inline double choose_suggestion(Stream *s, const TimedMatmul *t, MatmulPlan *p) {
    cublasLtMatmulAlgo_t algos[SUGGESTIONS];
    const int count = suggested_matmuls(((Gpu *)s->device)->matmuls, p, algos, SUGGESTIONS);
    double best = INFINITY;
    int fastest = 0;
    for (int i = 0; i < count; i++) {
        p->algo = algos[i];
        const double seconds = timed_matmul_seconds(s, t);
        if (seconds < best) {
            best = seconds;
            fastest = i;
        }
    }
    p->offered = count > 0 && isfinite(best);
    if (count) { p->algo = algos[fastest]; }
    return best;
}
// Chooses for one product. If it has an epilogue that a kernel can replace, the suggestions for the
// product without that epilogue compete too. seconds = {with the first suggestion, as chosen}.
static inline void choose_matmul(Stream *s, const TimedMatmul *t, MatmulChoices *made,
                                 double seconds[2]) {
    struct Matmuls *m = ((Gpu *)s->device)->matmuls;
    const MatmulKey *key = &t->key;
    const bool fused = key->epilogue & OF_GELU || key->epilogue == CUBLASLT_EPILOGUE_BGRADB;
    forget_matmul_plans(m);
    m->timing = true;
    run_timed_matmul(s, t);
    ops_wait(s);
    MatmulPlan *asked = &m->plans[0];
    assert(m->plans_made && !memcmp(&asked->key, key, sizeof *key));
    seconds[0] = timed_matmul_seconds(s, t); // with the library's first suggestion
    double best = choose_suggestion(s, t, asked);
    if (fused) {
        const bool offered = asked->offered;
        asked->offered = false;
        run_timed_matmul(s, t); // makes the plan of the product without the epilogue
        ops_wait(s);
        MatmulPlan *plain = &m->plans[1];
        assert(m->plans_made == 2);
        const double apart = choose_suggestion(s, t, plain);
        asked->offered = offered && best <= apart;
        if (!asked->offered) {
            best = apart;
            add_matmul_choice(made, plain);
        }
    }
    seconds[1] = best;
    m->timing = false;
    add_matmul_choice(made, asked);
}
static inline MatmulGain ops_matmuls_time(Stream *of, const MatmulChoices *wanted,
                                          MatmulChoices *made) {
    Stream s = *of;
    MatmulGain gain = {0, 0, 0, 0};
    int64_t widest = 0;
    for (int i = 0; i < wanted->count; i++) {
        const ChosenMatmul w = chosen_matmul(&wanted->choice[i]);
        widest = max_i64(widest, max_i64(w.key.m, w.key.n));
    }
    s.workspace_bytes =
        (size_t)(MATMUL_WORKSPACE + max_i64(SCRATCH_LEAST, COLUMN_PARTS * 2 * widest * 4));
    s.workspace = ops_alloc(s.workspace_bytes);
    made->count = 0;
    for (int i = 0; s.workspace && i < wanted->count; i++) {
        const ChosenMatmul w = chosen_matmul(&wanted->choice[i]);
        TimedMatmul t;
        double seconds[2];
        if (matmul_choice_of(made, &w.key) >= 0 ||
            !open_timed_matmul(&t, &w.key, ((Gpu *)s.device)->stream)) {
            continue;
        }
        choose_matmul(&s, &t, made, seconds);
        gain.products++;
        gain.first_s += seconds[0];
        gain.chosen_s += seconds[1];
        gain.apart += matmul_choice_of(made, &w.key) >= 0 &&
                      !chosen_matmul(&made->choice[matmul_choice_of(made, &w.key)]).offered;
        forget_matmul_plans(((Gpu *)s.device)->matmuls); // they point to memory that is freed now
        ops_free(t.memory);
    }
    if (s.workspace) { ops_free(s.workspace); }
    return gain;
}

#endif
