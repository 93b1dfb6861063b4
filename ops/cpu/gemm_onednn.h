// gemm_onednn.h: products of matrices by oneDNN (gemm_cpu.h), versions 2 and 3. oneDNN compiles its
// kernels when the program runs, for the instructions that the CPU has.
#ifndef GEMM_ONEDNN_H
#define GEMM_ONEDNN_H

#include "ops/cpu/peak_cpu.h" // Multiplier
#include "ops/cpu/real_cpu.h" // Product
#include <dnnl.h>             // dnnl_sgemm, dnnl_matmul

static inline const char *gemm_library(void) { return "oneDNN"; }
static inline void gemm_version(char *text, size_t bytes) {
    const dnnl_version_t *v = dnnl_version();
    snprintf(text, bytes, "%d.%d.%d", v->major, v->minor, v->patch);
}
static inline bool gemm_has_instructions(dnnl_cpu_isa_t wanted) {
    return (dnnl_get_effective_cpu_isa() & wanted) == wanted;
}
// Returns whether an element of a product has the same bits in every tile that has at least 32 rows
// and columns, or all of them. It holds for oneDNN's kernels of AVX-512, and not for those of AVX2.
static inline bool gemm_same_in_all_tiles(void) {
    return gemm_has_instructions(dnnl_cpu_isa_avx512_core);
}
// Returns whether the CPU has instructions for products of bf16.
static inline bool gemm_has_bf16(void) {
    return gemm_has_instructions(dnnl_cpu_isa_avx512_core_bf16);
}
// Returns whether products by tiles are allowed: who limits oneDNN's instructions limits ours.
static inline bool gemm_allows_tiles(void) {
    return gemm_has_instructions(dnnl_cpu_isa_avx512_core_amx);
}
// Returns the instructions that its products in bf16 or fp32 use.
static inline Multiplier gemm_multiplier(bool bf16) {
    const Multiplier widest = multiplier_of_fp32();
    if (bf16) {
        return gemm_has_instructions(dnnl_cpu_isa_avx512_core_amx) ? MULTIPLY_TILES
                                                                   : MULTIPLY_PAIRS;
    }
    return widest == MULTIPLY_512 && !gemm_has_instructions(dnnl_cpu_isa_avx512_core) ? MULTIPLY_256
                                                                                      : widest;
}
static inline void gemm_check(dnnl_status_t status) {
    if (status != dnnl_success) {
        die(EXIT_RESOURCES, "free some memory, or build with make MATMUL=cblas",
            "oneDNN cannot multiply matrices (status %d)", (int)status);
    }
}
// oneDNN describes its kernels to profilers otherwise, which takes a tenth of a second.
static inline void gemm_open_library(void) { gemm_check(dnnl_set_jit_profiling_flags(0)); }
static inline void gemm_fp32(const Product *p) {
    gemm_check(dnnl_sgemm(p->ta == TRANSPOSED ? 'T' : 'N', p->tb == TRANSPOSED ? 'T' : 'N', p->m,
                          p->n, p->k, 1.0f, (const float *)p->a, p->lda, (const float *)p->b,
                          p->ldb, p->add ? 1.0f : 0.0f, p->c, p->ldc));
}

// --- what differs between the versions -----------------------------------------------------------
typedef dnnl_memory_desc_t MatrixLayout; // of a matrix; in version 3 a pointer
#if DNNL_VERSION_MAJOR >= 3
static inline const_dnnl_memory_desc_t matrix_layout_of(const MatrixLayout *layout) {
    return *layout;
}
static inline void matrix_layout_free(MatrixLayout *layout) { dnnl_memory_desc_destroy(*layout); }
static inline dnnl_status_t matrix_layout_set(MatrixLayout *layout, dnnl_data_type_t type,
                                              const dnnl_dims_t sizes, const dnnl_dims_t strides) {
    return dnnl_memory_desc_create_with_strides(layout, 2, sizes, type, strides);
}
static inline dnnl_status_t product_describe(dnnl_primitive_desc_t *description,
                                             dnnl_engine_t engine, const MatrixLayout *a,
                                             const MatrixLayout *b, const MatrixLayout *c,
                                             dnnl_primitive_attr_t how) {
    return dnnl_matmul_primitive_desc_create(description, engine, *a, *b, NULL, *c, how);
}
static inline dnnl_status_t product_added(dnnl_post_ops_t ops) {
    return dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef);
}
#else
static inline const dnnl_memory_desc_t *matrix_layout_of(const MatrixLayout *layout) {
    return layout;
}
static inline void matrix_layout_free(MatrixLayout *layout) { (void)layout; }
static inline dnnl_status_t matrix_layout_set(MatrixLayout *layout, dnnl_data_type_t type,
                                              const dnnl_dims_t sizes, const dnnl_dims_t strides) {
    return dnnl_memory_desc_init_by_strides(layout, 2, sizes, type, strides);
}
static inline dnnl_status_t product_describe(dnnl_primitive_desc_t *description,
                                             dnnl_engine_t engine, const MatrixLayout *a,
                                             const MatrixLayout *b, const MatrixLayout *c,
                                             dnnl_primitive_attr_t how) {
    dnnl_matmul_desc_t product;
    gemm_check(dnnl_matmul_desc_init(&product, a, b, NULL, c));
    return dnnl_primitive_desc_create(description, &product, how, engine, NULL);
}
static inline dnnl_status_t product_added(dnnl_post_ops_t ops) {
    return dnnl_post_ops_append_sum(ops, 1.0f);
}
#endif

// --- bf16 ----------------------------------------------------------------------------------------
// One primitive serves all sizes, because they are given when it runs. Such primitives have one
// kernel, which adds in one order.
static struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_t product[2][2][2]; // [a is transposed][b is transposed][the result is added]
} gemm_primitives;

static inline MatrixLayout matrix_layout_make(Operand operand, dnnl_data_type_t type, int64_t rows,
                                              int64_t cols, int64_t stride) {
    const dnnl_dims_t sizes = {rows, cols}, as_stored = {stride, 1}, transposed = {1, stride};
    MatrixLayout layout;
    gemm_check(
        matrix_layout_set(&layout, type, sizes, operand == TRANSPOSED ? transposed : as_stored));
    return layout;
}
// Returns NULL if oneDNN has only its reference for such a product, which takes a thousand times as
// long.
static inline dnnl_primitive_t product_make(Operand ta, Operand tb, bool add) {
    const int64_t later = DNNL_RUNTIME_DIM_VAL;
    MatrixLayout a = matrix_layout_make(ta, dnnl_bf16, later, later, later),
                 b = matrix_layout_make(tb, dnnl_bf16, later, later, later),
                 c = matrix_layout_make(AS_STORED, dnnl_f32, later, later, later);
    dnnl_primitive_attr_t how;
    dnnl_primitive_desc_t description;
    dnnl_primitive_t product = NULL;
    const char *kernel = "";
    gemm_check(dnnl_primitive_attr_create(&how));
    if (add) {
        dnnl_post_ops_t ops;
        gemm_check(dnnl_post_ops_create(&ops));
        gemm_check(product_added(ops));
        gemm_check(dnnl_primitive_attr_set_post_ops(how, ops));
        dnnl_post_ops_destroy(ops);
    }
    gemm_check(product_describe(&description, gemm_primitives.engine, &a, &b, &c, how));
    gemm_check(dnnl_primitive_desc_query(description, dnnl_query_impl_info_str, 0, &kernel));
    if (strncmp(kernel, "ref", 3)) { gemm_check(dnnl_primitive_create(&product, description)); }
    dnnl_primitive_desc_destroy(description);
    dnnl_primitive_attr_destroy(how);
    matrix_layout_free(&a);
    matrix_layout_free(&b);
    matrix_layout_free(&c);
    return product;
}
// Makes the primitives, once, which threads may share. Returns whether products in bf16 are fast.
static inline bool gemm_open_bf16(void) {
    static bool fast;
    if (gemm_primitives.engine || !gemm_has_bf16()) { return fast; }
    fast = true;
    gemm_check(dnnl_engine_create(&gemm_primitives.engine, dnnl_cpu, 0));
    gemm_check(dnnl_stream_create(&gemm_primitives.stream, gemm_primitives.engine,
                                  dnnl_stream_default_flags));
    for (int i = 0; i < 8; i++) {
        const Operand ta = i / 4 ? TRANSPOSED : AS_STORED, tb = i / 2 % 2 ? TRANSPOSED : AS_STORED;
        dnnl_primitive_t product = product_make(ta, tb, i % 2);
        gemm_primitives.product[ta][tb][i % 2] = product;
        fast = fast && product;
    }
    return fast;
}
static inline void gemm_bf16(const Product *p) {
    enum { MATRICES = 3 };
    MatrixLayout layout[MATRICES] = {matrix_layout_make(p->ta, dnnl_bf16, p->m, p->k, p->lda),
                                     matrix_layout_make(p->tb, dnnl_bf16, p->k, p->n, p->ldb),
                                     matrix_layout_make(AS_STORED, dnnl_f32, p->m, p->n, p->ldc)};
    // oneDNN takes operands as pointers to what could be written.
    void *const data[MATRICES] = {(void *)(uintptr_t)p->a, (void *)(uintptr_t)p->b, p->c};
    dnnl_exec_arg_t argument[MATRICES];
    const int name[MATRICES] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
    for (int i = 0; i < MATRICES; i++) {
        argument[i].arg = name[i];
        gemm_check(dnnl_memory_create(&argument[i].memory, matrix_layout_of(&layout[i]),
                                      gemm_primitives.engine, data[i]));
    }
    gemm_check(dnnl_primitive_execute(gemm_primitives.product[p->ta][p->tb][p->add],
                                      gemm_primitives.stream, MATRICES, argument));
    for (int i = 0; i < MATRICES; i++) {
        dnnl_memory_destroy(argument[i].memory);
        matrix_layout_free(&layout[i]);
    }
}

#endif
