// device_cpu.h: what the operations on the CPU have in common: the team of threads, polling for
// messages, memory, numbers of bf16, and scalar functions that the vectoriser can inline. The
// contract of the operations is ops.h.
#ifndef DEVICE_CPU_H
#define DEVICE_CPU_H

#include "ops/cpu/gemm_cpu.h"   // products of matrices
#include "ops/cpu/peak_cpu.h"   // what they can do at most
#include "ops/cpu/update_cpu.h" // optimizers; the contract (ops.h)
#include <omp.h>                // the team of threads
#include <sys/mman.h>           // mmap; madvise for huge pages

// Vectors of the machine's width, for the product whose sums must stay in registers. They are never
// passed by value, because the ABI of that depends on the target.
#ifdef __AVX512F__
enum { LANES = 16, PANEL = 8 }; // 8 x 2 of the 32 registers hold sums
#else
enum { LANES = 8, PANEL = 4 }; // 4 x 2 of the 16 registers
#endif
typedef float Lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#ifndef POLL_WORK // tests make it smaller
// Multiply-adds of our own products between two calls of progress: 1 to 3 ms. Longer gaps would
// leave the network idle.
#define POLL_WORK 100000000
#endif

static inline void poll_after_row(Stream *s, int64_t row) {
    if (row % 1024 == 1023) { poll_messages(s); }
}
// The same for rows of any width, as often as poll_after_block().
static inline void poll_after_wide_row(Stream *s, int64_t row, int64_t width) {
    const int64_t rows = max_i64(1, (int64_t)BLOCK * BLOCKS_A_POLL / max_i64(1, width));
    if (row % rows == rows - 1) { poll_messages(s); }
}

// On the CPU every operation returns when it is done, so there is nothing to wait for.
static inline void ops_open(Stream *s, int place, DType real) {
    (void)place;
    // Also for regions that give no thread count. More threads would run on the cores of other
    // ranks, and wait for them.
    omp_set_num_threads(s->threads);
    gemm_open(real);
}
static inline void ops_close(Stream *s) { (void)s; }
static inline void ops_near_cores(char *list, size_t bytes) { snprintf(list, bytes, "%s", ""); }
static inline const char *ops_attention(void) { return "own"; }
static inline const char *ops_attention_reason(void) { return ""; }
static inline void ops_own_attention(bool own) { (void)own; }
static inline DType ops_compute(void) { return cpu_compute; }
static inline void ops_compute_in(DType compute) { cpu_compute = compute; }
static inline const char *ops_products(void) { return gemm_of_reals(); }
static inline void ops_build(char *text, size_t bytes) {
    char version[40];
    static const char instructions[] = "CPU"
#ifdef __AVX2__
                                       ", AVX2"
#endif
#ifdef __AVX512F__
                                       ", AVX-512"
#endif
#ifdef __AVX512BF16__
                                       ", AVX-512 BF16"
#endif
#ifdef __AMX_BF16__
                                       ", AMX BF16"
#endif
#ifdef __ARM_NEON
                                       ", NEON"
#endif
        ;
    gemm_version(version, sizeof version);
    snprintf(text, bytes, "%s, OpenMP %d; products by %s %s", instructions, _OPENMP, gemm_library(),
             version);
}
static inline const char *ops_device(double *bf16_flops) {
    *bf16_flops = 0;
    return "";
}
static inline OpsPeak ops_peak(const Stream *s) {
    return cpu_peak(gemm_instructions(), s->threads);
}
static inline size_t ops_copy_bytes(void) { return (size_t)16 << 20; }
static inline void ops_wait(Stream *s) { (void)s; }
static inline void ops_wait_loads(Stream *s) { (void)s; }
// A CPU's library computes a product in one way only.
static inline void ops_matmul_library(char *text, size_t bytes) { snprintf(text, bytes, "%s", ""); }
static inline void ops_matmuls_seen(Stream *s, MatmulChoices *seen) {
    (void)s;
    seen->count = 0;
}
static inline void ops_matmuls_use(Stream *s, const MatmulChoices *choices) {
    (void)s;
    (void)choices;
}
static inline MatmulGain ops_matmuls_time(Stream *s, const MatmulChoices *wanted,
                                          MatmulChoices *made) {
    const MatmulGain none = {0, 0, 0, 0};
    (void)s;
    (void)wanted;
    made->count = 0;
    return none;
}
// On the CPU a call costs nothing, so nothing is recorded.
static inline bool ops_repeat_begin(Stream *s, const void *key, size_t bytes) {
    (void)s;
    (void)key;
    (void)bytes;
    return true;
}
static inline void ops_repeat_end(Stream *s) { (void)s; }

struct OpsMark {
    double at;
};
static inline OpsMark *ops_mark_make(void) { return new_array(OpsMark, 1, "marks"); }
static inline void ops_mark_free(OpsMark *m) { free(m); }
static inline void ops_mark(Stream *s, OpsMark *m) {
    (void)s;
    m->at = seconds_now();
}
static inline double ops_mark_seconds(Stream *s, OpsMark *from, OpsMark *to) {
    (void)s;
    return to->at - from->at;
}
static inline void ops_range_begin(const char *what, const char *of, int number) {
    (void)what;
    (void)of;
    (void)number;
}
static inline void ops_range_end(void) {}
static inline void ops_profiler(bool on) { (void)on; }

// --- memory and precision ------------------------------------------------------------------------
// A large allocation is its own mapping, whose pages are zero. The team touches the pages, so that
// they exist and, on a NUMA machine, are near a thread that uses them. Huge pages are requested for
// whole 2 MiB and forbidden elsewhere, where some systems use them unasked, so the resident size is
// the requested size. A small allocation ends exactly where requested, so that sanitizers detect an
// overrun.
enum { HUGE_PAGE = 2 << 20 };
typedef struct { // stored in front of the returned pointer
    void *whole;
    size_t mapped; // bytes of the mapping; 0 if it came from posix_memalign
} Allocation;
static inline void *ops_alloc(size_t bytes) {
    const size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : 64, mapped = bytes + 64 + align;
    if (mapped < bytes) { return NULL; }
    void *whole = MAP_FAILED;
    if (align == HUGE_PAGE) {
        whole = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (whole != MAP_FAILED) { madvise(whole, mapped, MADV_NOHUGEPAGE); }
    } else if (!posix_memalign(&whole, 64, bytes + 64)) {
        memset(whole, 0, bytes + 64);
    }
    if (whole == MAP_FAILED || !whole) { return NULL; }
    char *p = (char *)whole + 64 + (align - ((uintptr_t)whole + 64) % align) % align;
    Allocation a = {whole, align == HUGE_PAGE ? mapped : 0};
    memcpy(p - sizeof a, &a, sizeof a);
    if (a.mapped) { madvise(p, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE); }
    const int64_t pages = a.mapped ? ceil_div((int64_t)bytes, 4096) : 0;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < pages; i++) { p[i * 4096] = 0; }
    return p;
}
static inline void ops_free(void *p) {
    Allocation a = {NULL, 0};
    if (p) { memcpy(&a, (char *)p - sizeof a, sizeof a); }
    if (a.mapped) {
        munmap(a.whole, a.mapped);
    } else {
        free(a.whole);
    }
}
static inline void *ops_alloc_host(size_t bytes) { return calloc(1, bytes); }
static inline void ops_free_host(void *p) { free(p); }
// On the CPU this is the same memory as ops_alloc()'s.
static inline void *ops_alloc_far(size_t bytes, bool *pinned) {
    *pinned = true;
    return ops_alloc(bytes);
}
static inline void ops_free_far(void *p, bool pinned) {
    (void)pinned;
    ops_free(p);
}
static inline void ops_link_open(Stream *link, const Stream *of) { *link = *of; }
static inline void ops_link_close(Stream *link) { memset(link, 0, sizeof *link); }
// Nothing to do: earlier calls have returned, so their work is done.
static inline void ops_follow(Stream *s, Stream *after) {
    (void)s;
    (void)after;
}
static inline bool ops_memory_apart(void) { return false; }
static inline double ops_memory_available(void) { return (double)INFINITY; }

static inline void ops_copy(Stream *s, void *to, const void *from, size_t bytes) {
    const int64_t block = BLOCK * 4, blocks = ceil_div((int64_t)bytes, block);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < blocks; b++) {
        memcpy((char *)to + b * block, (const char *)from + b * block,
               (size_t)min_i64(block, (int64_t)bytes - b * block));
        poll_after_block(s, b);
    }
}
static inline void ops_zero(Stream *s, void *p, size_t bytes) {
    const int64_t block = BLOCK * 4, blocks = ceil_div((int64_t)bytes, block);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < blocks; b++) {
        memset((char *)p + b * block, 0, (size_t)min_i64(block, (int64_t)bytes - b * block));
        poll_after_block(s, b);
    }
}
static inline void ops_from_host(Stream *s, void *device, const void *host, size_t bytes) {
    ops_copy(s, device, host, bytes);
}
static inline void ops_to_host(Stream *s, void *host, const void *device, size_t bytes) {
    ops_copy(s, host, device, bytes);
}
static inline void ops_to_host_later(Stream *s, void *host, const void *device, size_t bytes) {
    ops_copy(s, host, device, bytes);
}

static inline void ops_convert_float(Stream *s, void *out, const float *in, DType dtype, int64_t n,
                                     Rounding r) {
    if (dtype == DTYPE_FP32) {
        ops_copy(s, out, in, (size_t)n * sizeof(float));
    } else {
        ops_round_host(s, (uint16_t *)out, in, n, r);
    }
}
static inline void ops_reals_to_host(Stream *s, float *host, const Real *device, int64_t n) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
        reals_to_floats(host + b * BLOCK, real_at_const(device, b * BLOCK),
                        min_i64(BLOCK, n - b * BLOCK));
        poll_after_block(s, b);
    }
}

// Takes n floats from a workspace of which `at` is the next free place.
static inline float *take_floats(float **at, int64_t n) {
    float *p = *at;
    *at += round_up(n, 16);
    return p;
}

// --- scalar functions of loops that are vectorised -----------------------------------------------
// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2. ln 2 is split into two parts, so r is
// exact to its last bit. A polynomial of degree 7 (coefficients from Moshier's Cephes) gives e^r.
// The error is below 1.5 units in the last place. Below -87.3 the result is 0 (it would be
// denormal); above 88.3 it is e^88.3. NaN stays NaN.
INLINED float fast_exp(float x) {
    float t = x > 88.3f ? 88.3f : x;
    t = t < -87.3f ? -87.3f : t;
    float n = rintf(t * 1.44269504f);
    float r = t - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits = ((uint32_t)(int32_t)n + 127u) << 23; // unsigned, since n is arbitrary for a NaN
    float power;
    memcpy(&power, &bits, 4);
    return x < -87.3f ? 0.0f : p * power;
}

// ln x of a positive x that is not denormal, below 2 units in the last place. x = 2^n m with m
// from sqrt(1/2) to sqrt(2); the polynomial is Cephes', of degree 9. ln 2 is split as above.
INLINED float fast_log(float x) {
    const uint32_t half = 0x3f3504f3u; // sqrt(1/2)
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const int32_t n = (int32_t)(bits - half) >> 23;
    bits -= (uint32_t)n << 23;
    float m;
    memcpy(&m, &bits, 4);
    m -= 1.0f;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * (m * m) - 2.12194440e-4f * (float)n;
    return m + (p - 0.5f * (m * m)) + 0.693359375f * (float)n;
}
// tanh x, below 4 units in the last place: 1 - 2 / (1 + e^2|x|) with the sign of x; near 0, where
// that cancels, Cephes' polynomial
INLINED float fast_tanh(float x) {
    const float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const float far = 1.0f - 2.0f / (1.0f + fast_exp(2.0f * fabsf(x)));
    return z < 0.390625f ? x + x * (z * p) : copysignf(far, x);
}

// GELU(x) = x/2 (1 + tanh u) = x / (1 + e^-2u), where u = sqrt(2/pi) (x + 0.044715 x^3). This form
// needs no tanh and has no cancellation for x << 0. gelu_sigmoid_power() returns -2u.
INLINED float gelu_sigmoid_power(float x) { return -1.5957691216f * (x + 0.044715f * x * x * x); }
INLINED float gelu_value(float x) { return x / (1.0f + fast_exp(gelu_sigmoid_power(x))); }
INLINED float gelu_slope(float x) {
    float e = fast_exp(gelu_sigmoid_power(x)), sigmoid = 1.0f / (1.0f + e);
    return sigmoid + x * sigmoid * (sigmoid * e) * 1.5957691216f * (1.0f + 0.134145f * x * x);
}

#endif
