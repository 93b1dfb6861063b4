// matmul_cuda.cuh: matrix products on a GPU by cuBLASLt, and the choice of the algorithm for each
// product. The operations that call matmul() are in ops_cuda.cuh.
//
// MatmulPlan  What cuBLASLt needs for one product (MatmulKey). It is made once and kept.
// Choice      The library suggests several algorithms for a product, its best guess first. It may
//             offer to fuse the following operation into the product (an epilogue).
//             ops_matmuls_time() times the first SUGGESTIONS of them, with and without the
//             epilogue, and keeps the fastest. Algorithms add in different orders, so a choice
//             determines the last bits of a result. Therefore rank 0 chooses for all ranks, and
//             checkpoints store the choices (run/matmul_choices.h). A product without a choice
//             uses the library's first suggestion that runs, which depends only on the product, the
//             GPU and the library. If none runs, the product is computed without its epilogue.
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
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    cuda_check(cudaGetLastError(), call); // CUDA's own word, where it has one
    die(EXIT_RESOURCES, NULL, "%s: %s", call, cublasLtGetStatusString(status));
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
    bool rows_vary; // Product
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
static inline void free_layouts(MatmulPlan *p) {
    LT_CHECK(cublasLtMatrixLayoutDestroy(p->a));
    LT_CHECK(cublasLtMatrixLayoutDestroy(p->b));
    LT_CHECK(cublasLtMatrixLayoutDestroy(p->d));
}
static inline void free_matmul_plan(MatmulPlan *p) {
    LT_CHECK(cublasLtMatmulDescDestroy(p->desc));
    free_layouts(p);
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
// The bits that are set in all epilogues with a pre_gelu, and in all with a bias.
enum { OF_GELU = 128, OF_BIAS = CUBLASLT_EPILOGUE_BIAS | CUBLASLT_EPILOGUE_BGRADB };

#define SET(desc, what, value)                                                                     \
    LT_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_##what, &(value),           \
                                            sizeof(value)))
static inline void point_epilogue(cublasLtMatmulDesc_t desc, const Epilogue *e) {
    SET(desc, BIAS_POINTER, e->bias);
    SET(desc, EPILOGUE_AUX_POINTER, e->pre_gelu);
}
// Describes a packed matrix (rows, columns), or its transpose.
static inline cublasLtMatrixLayout_t matrix_layout(cudaDataType_t type, bool transposed,
                                                   int64_t rows, int64_t columns) {
    const int64_t height = transposed ? columns : rows, width = transposed ? rows : columns;
    cublasLtMatrixLayout_t layout;
    LT_CHECK(cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)height, (uint64_t)width, height));
    return layout;
}
static inline cudaDataType_t matmul_in() {
    return gpu_real == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}
static inline cudaDataType_t matmul_out(const MatmulKey *key) {
    return key->out_fp32 ? CUDA_R_32F : matmul_in();
}
static inline void make_layouts(MatmulPlan *p, int64_t m, int64_t n, int64_t k) {
    p->a = matrix_layout(matmul_in(), p->key.a_transposed, m, k);
    p->b = matrix_layout(matmul_in(), p->key.b_transposed, k, n);
    p->d = matrix_layout(matmul_out(&p->key), false, m, n);
}
static inline MatmulPlan describe_matmul(MatmulKey key, const Epilogue *e) {
    MatmulPlan p;
    memset(&p, 0, sizeof p);
    p.key = key;
    const cudaDataType_t in = matmul_in(), out = matmul_out(&key);
    const cublasOperation_t a_op = key.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                            b_op = key.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    LT_CHECK(cublasLtMatmulDescCreate(
        &p.desc, in == CUDA_R_32F ? FP32_PRODUCTS : CUBLAS_COMPUTE_32F, CUDA_R_32F));
    SET(p.desc, TRANSA, a_op);
    SET(p.desc, TRANSB, b_op);
    SET(p.desc, EPILOGUE, key.epilogue);
    if (key.epilogue & OF_GELU) { SET(p.desc, EPILOGUE_AUX_LD, key.m); }
    if (key.epilogue & OF_BIAS) { SET(p.desc, BIAS_DATA_TYPE, out); }
    point_epilogue(p.desc, e); // suggestions depend on the pointers' alignment
    make_layouts(&p, key.m, key.n, key.k);
    return p;
}
#undef SET
// Writes up to `most` algorithms for a product, the library's best guess first, and returns their
// number. The library may also list some that it cannot use: all are asked for, and these left out.
static inline int suggested_matmuls(struct Matmuls *m, const MatmulPlan *p,
                                    cublasLtMatmulAlgo_t *algos, int most) {
    cublasLtMatmulHeuristicResult_t found[SUGGESTIONS];
    cublasLtMatmulPreference_t preference;
    const uint64_t workspace = MATMUL_WORKSPACE;
    // The parts of a sum that is split are added in fp32: in the workspace, not in a bf16 result.
    const uint32_t reductions =
        p->key.out_fp32 ? CUBLASLT_REDUCTION_SCHEME_MASK : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    int asked = 0, count = 0;
    memset(found, 0, sizeof found);
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    LT_CHECK(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    LT_CHECK(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions));
    const decltype(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES};
    for (int i = 0; i < 4; i++) { // D is also C
        LT_CHECK(cublasLtMatmulPreferenceSetAttribute(
            preference, alignments[i], &p->key.alignment[i < 3 ? i : 2], sizeof(unsigned)));
    }
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        m->lt, p->desc, p->a, p->b, p->d, p->d, preference, SUGGESTIONS, found, &asked);
    LT_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < asked && count < most; i++) {
        const bool usable =
            found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= workspace;
        if (usable) { algos[count++] = found[i].algo; }
    }
    return count;
}

static inline ChosenMatmul chosen_matmul(const MatmulChoices *choices, int i) {
    ChosenMatmul chosen;
    memcpy(&chosen, choices->choice[i].bytes, sizeof chosen);
    return chosen;
}
// Reads the choice for a product. Returns false if it has none.
static inline bool find_matmul_choice(const MatmulChoices *choices, const MatmulKey *key,
                                      ChosenMatmul *chosen) {
    bool found = false;
    for (int i = 0; i < choices->count && !found; i++) {
        *chosen = chosen_matmul(choices, i);
        found = !memcmp(&chosen->key, key, sizeof *key);
    }
    return found;
}
static inline void add_matmul_choice(MatmulChoices *choices, const MatmulPlan *p) {
    ChosenMatmul chosen;
    if (choices->count == MATMUL_CHOICES || find_matmul_choice(choices, &p->key, &chosen)) {
        return;
    }
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
    ChosenMatmul chosen;
    if (find_matmul_choice(&m->choices, &p->key, &chosen)) {
        cublasLtMatmulHeuristicResult_t checked;
        memset(&checked, 0, sizeof checked);
        p->offered = chosen.offered;
        p->algo = chosen.algo;
        const bool works = cublasLtMatmulAlgoCheck(m->lt, p->desc, p->a, p->b, p->d, p->d, &p->algo,
                                                   &checked) == CUBLAS_STATUS_SUCCESS &&
                           checked.state == CUBLAS_STATUS_SUCCESS &&
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
// Column-major, packed: d(m,n) [+]= op(a)(m,k) op(b)(k,n). A row-major (N, C) matrix is a
// column-major (C, N) matrix. d: Reals, or with out_fp32 floats.
// rows_vary: the number of rows of the row-major matrices that are no weights (n, or k of a weight
// gradient) is another one each time. The plan is that of the next power of two, and relies on
// alignments that every row has, of 16 bytes at most: else there would be as many plans as numbers
// of rows, and bits would depend on where rows lie. It is not timed.
typedef struct {
    int64_t m, n, k;
    void *d;
    const Real *a, *b;
    bool a_transposed, b_transposed, out_fp32, accumulate, rows_vary;
} Product;
// Starts a product by the plan's algorithm. Returns whether the library takes it.
static inline bool start_matmul(Stream *s, const MatmulPlan *p, const Product *x) {
    const float one = 1.0f, beta = x->accumulate ? 1.0f : 0.0f;
    const cublasStatus_t status =
        cublasLtMatmul(gpu_of(s)->matmuls->lt, p->desc, &one, x->a, p->a, x->b, p->b, &beta, x->d,
                       p->d, x->d, p->d, &p->algo, s->workspace, MATMUL_WORKSPACE, stream_of(s));
    if (status != CUBLAS_STATUS_SUCCESS) { forget_refused_call(s); }
    return status == CUBLAS_STATUS_SUCCESS;
}
// Starts a product by the first suggestion that the library takes, after it has refused the plan's
// algorithm, and keeps that one. Returns false if it takes none.
static inline bool start_other_matmul(Stream *s, MatmulPlan *p, const Product *x) {
    cublasLtMatmulAlgo_t algos[SUGGESTIONS];
    const int count = suggested_matmuls(gpu_of(s)->matmuls, p, algos, SUGGESTIONS);
    for (int i = 0; i < count; i++) {
        p->algo = algos[i];
        if (start_matmul(s, p, x)) { return true; }
    }
    return false;
}
// Starts a product by the plan of others whose number of rows is similar. The plan stays as it is,
// so what is computed does not depend on earlier products.
static inline bool start_similar_matmul(Stream *s, const MatmulPlan *similar, const Product *x) {
    MatmulPlan exact = *similar;
    make_layouts(&exact, x->m, x->n, x->k);
    const bool started = start_matmul(s, &exact, x) || start_other_matmul(s, &exact, x);
    free_layouts(&exact);
    return started;
}
static inline int64_t power_of_2_from(int64_t n) {
    int64_t power = 1;
    while (power < n) { power *= 2; }
    return power;
}
static inline MatmulKey matmul_key(const Product *x, const Epilogue *e) {
    const bool gradient = x->b_transposed; // of weights: the rows are in k
    const int64_t real = (int64_t)ops_real_bytes(), out = x->out_fp32 ? 4 : real;
    const int64_t row_bytes[] = {(x->a_transposed ? x->k : x->m) * real,
                                 (x->b_transposed ? x->n : x->k) * real, x->m * out, 0, 0};
    const void *pointers[] = {x->a, x->b, x->d, e->bias, e->pre_gelu};
    unsigned aligned[5];
    for (int i = 0; i < 5; i++) { // where rows vary, as any row is aligned
        const uintptr_t row = x->rows_vary ? 16 | (uintptr_t)row_bytes[i] : 0;
        aligned[i] = alignment_of((const void *)((uintptr_t)pointers[i] | row));
    }
    const MatmulKey key = {.m = x->m,
                           .n = x->rows_vary && !gradient ? power_of_2_from(x->n) : x->n,
                           .k = x->rows_vary && gradient ? power_of_2_from(x->k) : x->k,
                           .a_transposed = x->a_transposed,
                           .b_transposed = x->b_transposed,
                           .out_fp32 = x->out_fp32,
                           .epilogue = e->kind,
                           .alignment = {aligned[0], aligned[1], aligned[2],
                                         (unsigned)min_i64(aligned[3], aligned[4])}};
    return key;
}
// Computes a product, followed by the epilogue. Returns false, and does nothing, if the product is
// not offered with this epilogue, or is offered but refused when it should run.
static inline bool matmul(Stream *s, const Product *x, Epilogue e) {
    (void)enter(s);
    struct Matmuls *all = gpu_of(s)->matmuls;
    const MatmulKey key = matmul_key(x, &e);
    static_assert(sizeof key == 56, "keys are compared as bytes");
    MatmulPlan *p = find_matmul_plan(all, &key, &e);
    if (!p->offered) { return false; }
    point_epilogue(p->desc, &e);
    if (x->rows_vary) {
        p->rows_vary = true;
        return start_similar_matmul(s, p, x);
    }
    const bool started = start_matmul(s, p, x);
    if (all->timing) {
        all->failed = all->failed || !started;
        return true;
    }
    p->offered = started || start_other_matmul(s, p, x);
    return p->offered;
}
template <class R> __global__ void bias_kernel(R *out, const R *bias, int64_t n, int64_t m) {
    const int64_t i = thread_index();
    if (i < n) { write(out + i, read(out + i) + read(bias + i % m)); }
}
// Computes a product, followed by adding the bias if it is not NULL. Ends the program
// (EXIT_RESOURCES) if the library cannot.
static inline void plain_matmul(Stream *s, const Product *x, const Real *bias) {
    const Epilogue plain = {CUBLASLT_EPILOGUE_DEFAULT, NULL, NULL},
                   with_bias = {CUBLASLT_EPILOGUE_BIAS, bias, NULL};
    if (bias && matmul(s, x, with_bias)) { return; }
    if (!matmul(s, x, plain)) {
        die(EXIT_RESOURCES, "multiples of 8 work for channels and padded vocabulary",
            "cuBLASLt has no product of (%" PRId64 ", %" PRId64 ") and (%" PRId64 ", %" PRId64 ")",
            x->n, x->k, x->m, x->k);
    }
    if (bias) {
        const int64_t n = x->m * x->n;
        LAUNCH_REAL(s, bias_kernel, blocks_for(n, THREADS), (Real *)x->d, bias, n, x->m);
    }
}

// -------------------------------------------------------------------------------------------------
// Choosing algorithms
static inline void ops_matmul_library(char *text, size_t bytes) {
    double peak;
    snprintf(text, bytes, "%s, cuBLASLt %zu", ops_device(&peak), cublasLtGetVersion());
}
static inline void ops_arithmetic(char *text, size_t bytes) {
    char library[160];
    ops_matmul_library(library, sizeof library);
    const char *attention = ops_attention();
    const bool own = !strcmp(attention, "own");
    snprintf(text, bytes, "gpu %s %s%s%s", dtype_name(gpu_real), library,
             own ? "" : ", attention by ", own ? "" : attention);
}
static inline void ops_build(char *text, size_t bytes) {
    static const char choices[] = "own attention"
#ifdef USE_CUDNN
                                  ", or cuDNN's"
#endif
#ifdef USE_TF32
                                  "; TF32"
#endif
        ;
    snprintf(text, bytes, "GPU; products by cuBLASLt %zu; %s", cublasLtGetVersion(), choices);
}
static inline void ops_matmuls_use(Stream *s, const MatmulChoices *choices) {
    struct Matmuls *m = gpu_of(s)->matmuls;
    ops_wait(s);
    forget_matmul_plans(m);
    m->choices = *choices;
}
static inline void ops_matmuls_seen(Stream *s, MatmulChoices *seen) {
    struct Matmuls *m = gpu_of(s)->matmuls;
    cublasLtMatmulAlgo_t algos[2];
    memset(seen, 0, sizeof *seen);
    for (int64_t i = 0; i < matmul_plans_kept(m); i++) {
        const MatmulPlan *p = &m->plans[i];
        ChosenMatmul chosen;
        if (!p->rows_vary && !find_matmul_choice(&m->choices, &p->key, &chosen) &&
            suggested_matmuls(m, p, algos, 2) == 2) {
            add_matmul_choice(seen, p);
        }
    }
}

// A product to be timed, with buffers for its operands that are aligned as in its key.
typedef struct {
    MatmulKey key;
    void *memory;
    Real *a, *b, *d, *bias, *pre_gelu; // d and bias may hold floats
} TimedMatmul;
// Fills with numbers of both signs, since zeros would need less power and run faster.
template <class R> __global__ void fill_kernel(R *p, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { write(p + i, (float)(int)(mix64((uint64_t)i) >> 40) * 0x1p-23f - 1.0f); }
}
static inline Real *take_operand(char **at, int64_t bytes, unsigned alignment) {
    Real *p = (Real *)(*at + (alignment < 256 ? alignment : 0));
    *at += round_up(bytes + 256, 256);
    return p;
}
// Returns false if the device has no memory for the operands now.
static inline bool open_timed_matmul(Stream *s, TimedMatmul *t, const MatmulKey *key) {
    const int64_t real = (int64_t)ops_real_bytes(), out = key->out_fp32 ? 4 : real,
                  a = key->m * key->k * real, b = key->k * key->n * real;
    const int64_t d = key->m * key->n * out, bias = max_i64(key->m, key->n) * 4,
                  aux = key->epilogue & OF_GELU ? key->m * key->n * real : 0;
    const int64_t all = a + b + d + bias + aux + 10 * 512;
    t->key = *key;
    t->memory = ops_alloc((size_t)all);
    if (!t->memory) { return false; }
    LAUNCH_REAL(s, fill_kernel, blocks_for(all / real, THREADS), (R *)t->memory, all / real);
    char *at = (char *)t->memory;
    t->a = take_operand(&at, a, key->alignment[0]);
    t->b = take_operand(&at, b, key->alignment[1]);
    t->d = take_operand(&at, d, key->alignment[2]);
    t->bias = take_operand(&at, bias, key->alignment[3]);
    t->pre_gelu = take_operand(&at, aux, key->alignment[3]);
    return true;
}
static inline int64_t column_scratch_bytes(int64_t C); // ops_cuda.cuh
// Calls the operation that uses this product: ops_matmul_forward(), _backward_input() or
// _backward_weight().
static inline void run_timed_matmul(Stream *s, const TimedMatmul *t) {
    const MatmulKey *key = &t->key;
    const bool gelu = key->epilogue & OF_GELU;
    const Real *bias = key->epilogue & CUBLASLT_EPILOGUE_BIAS ? t->bias : NULL;
    if (key->b_transposed) {
        float *sums = key->epilogue == CUBLASLT_EPILOGUE_BGRADB ? (float *)t->bias : NULL;
        ops_matmul_backward_weight(s, (float *)t->d, sums, t->b, t->a, key->k, key->m, key->n,
                                   false);
    } else if (key->a_transposed) {
        ops_matmul_forward(s, gelu ? t->pre_gelu : t->d, gelu ? t->d : NULL, t->b, t->a, bias,
                           key->n, key->k, key->m);
    } else {
        ops_matmul_backward_input(s, t->d, t->b, t->a, gelu ? t->pre_gelu : NULL, key->n, key->m,
                                  key->k);
    }
}
// Returns the seconds of the operation with the current plans; INFINITY if it fails.
static inline double timed_matmul_seconds(Stream *s, const TimedMatmul *t) {
    struct Matmuls *m = gpu_of(s)->matmuls;
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
    const int count = suggested_matmuls(gpu_of(s)->matmuls, p, algos, SUGGESTIONS);
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
    struct Matmuls *m = gpu_of(s)->matmuls;
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
        assert(m->plans_made >= 2); // a third one, if the library does not add the bias either
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
        const ChosenMatmul w = chosen_matmul(wanted, i);
        widest = max_i64(widest, max_i64(w.key.m, w.key.n));
    }
    s.workspace_bytes =
        (size_t)(MATMUL_WORKSPACE + max_i64(SCRATCH_LEAST, column_scratch_bytes(widest)));
    s.workspace = ops_alloc(s.workspace_bytes);
    made->count = 0;
    for (int i = 0; s.workspace && i < wanted->count; i++) {
        const ChosenMatmul w = chosen_matmul(wanted, i);
        ChosenMatmul chosen;
        TimedMatmul t;
        double seconds[2];
        if (find_matmul_choice(made, &w.key, &chosen) || !open_timed_matmul(&s, &t, &w.key)) {
            continue;
        }
        choose_matmul(&s, &t, made, seconds);
        gain.products++;
        gain.first_s += isfinite(seconds[0]) ? seconds[0] : seconds[1]; // it may not run at all
        gain.chosen_s += seconds[1];
        gain.apart += find_matmul_choice(made, &w.key, &chosen) && !chosen.offered;
        forget_matmul_plans(gpu_of(&s)->matmuls); // they point to memory that is freed now
        ops_free(t.memory);
    }
    if (s.workspace) { ops_free(s.workspace); }
    return gain;
}

#endif
