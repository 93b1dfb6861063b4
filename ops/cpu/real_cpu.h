// real_cpu.h: elements in compute precision on the CPU: fp32, or bf16 with --dtype bf16.
//
// A kernel is written once. It loads an element as a float, computes in fp32, and rounds what it
// stores to nearest even. Its first argument is the type, a constant in each of the two copies that
// FOR_TYPE() calls, so the compiler vectorises both.
#ifndef REAL_CPU_H
#define REAL_CPU_H

#include "ops/cpu/update_cpu.h" // blocks, polling; the contract (ops.h)

static DType cpu_real = DTYPE_FP32; // of ops_open()

#define TYPED INLINED // a kernel for both types
#define FOR_TYPE(kernel, ...)                                                                      \
    (cpu_real == DTYPE_BF16 ? kernel(DTYPE_BF16, __VA_ARGS__) : kernel(DTYPE_FP32, __VA_ARGS__))

TYPED float load_real(const DType type, const Real *x, int64_t i) {
    return type == DTYPE_BF16 ? bf16_to_float(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}
TYPED void store_real(const DType type, Real *x, int64_t i, float value) {
    if (type == DTYPE_BF16) {
        ((uint16_t *)x)[i] = float_to_bf16(value);
    } else {
        ((float *)x)[i] = value;
    }
}

static inline size_t ops_real_bytes(void) { return dtype_size(cpu_real); }
static inline Real *real_at(Real *p, int64_t elements) {
    return (Real *)((char *)p + elements * (int64_t)ops_real_bytes());
}
static inline const Real *real_at_const(const Real *p, int64_t elements) {
    return (const Real *)((const char *)p + elements * (int64_t)ops_real_bytes());
}

// Asks for n Reals, which will be read.
static inline void prefetch_reals(const Real *x, int64_t n) {
    const char *at = (const char *)x;
    for (int64_t byte = 0; byte < n * (int64_t)ops_real_bytes(); byte += 64) {
        __builtin_prefetch(at + byte, 0, 2);
    }
}

TYPED void load_part(const DType type, float *to, const Real *from, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) { to[i] = load_real(type, from, i); }
}
TYPED void store_part(const DType type, Real *to, const float *from, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) { store_real(type, to, i, from[i]); }
}
// n Reals as floats, and back
static inline void reals_to_floats(float *to, const Real *from, int64_t n) {
    FOR_TYPE(load_part, to, from, n);
}
static inline void floats_to_reals(Real *to, const float *from, int64_t n) {
    FOR_TYPE(store_part, to, from, n);
}

// --- products ------------------------------------------------------------------------------------
// An operand is read as it is stored, or transposed.
typedef enum { AS_STORED, TRANSPOSED } Operand;
// A part of a matrix.
typedef struct {
    int64_t row, col, rows, cols;
} Tile;
// What is done with complete sums(rows, cols) of a part of a result. Their rows are `stride`
// elements apart. prefetch: asks for the memory that run() will read, which takes time to arrive;
// NULL: none.
typedef struct {
    void (*run)(const void *what, Tile part, float *sums, int64_t stride);
    void (*prefetch)(const void *what, Tile part);
    const void *what;
} Finish;
// c(m, n) [+]= a b with a(m, k) and b(k, n). Rows are lda, ldb and ldc elements apart.
typedef struct {
    Operand ta, tb;
    int64_t m, n, k;
    const void *a, *b;
    int64_t lda, ldb;
    bool add;
    float *c;
    int64_t ldc;
    const Finish *finish; // NULL: the sums are the result
} Product;

#endif
