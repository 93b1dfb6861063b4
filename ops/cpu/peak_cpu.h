// peak_cpu.h: how many operations a second the cores can do at most in products of matrices, for
// each kind of instruction that multiplies. There are two figures:
//
// Limit     what the widest cores of that kind do in a cycle, times the clock, which is measured:
//           no core does more.
// Measured  the best of several tries. A try is so short that it is hardly ever interrupted, also
//           where other processes use the machine.
#ifndef PEAK_CPU_H
#define PEAK_CPU_H

#include "ops/ops.h" // OpsPeak
#include <omp.h>     // the team of threads
#ifdef __x86_64__
#include <immintrin.h>   // tiles
#include <sys/syscall.h> // arch_prctl
#include <unistd.h>      // syscall
#endif

// PAIRS: dot products of pairs of bf16 (VDPBF16PS). TILES: products of tiles of bf16 (AMX).
typedef enum {
    MULTIPLY_128,
    MULTIPLY_256,
    MULTIPLY_512,
    MULTIPLY_PAIRS,
    MULTIPLY_TILES
} Multiplier;
static const struct {
    const char *name;
    // operations of an instruction, and of a core in a cycle at most: two 512-bit units or four
    // 128-bit ones; a unit of tiles
    double flops, per_cycle;
} multipliers[] = {
#ifdef __x86_64__
    [MULTIPLY_128] = {"SSE", 8, 16},
#else
    [MULTIPLY_128] = {"NEON", 8, 32},
#endif
    [MULTIPLY_256] = {"AVX2", 16, 32},
    [MULTIPLY_512] = {"AVX-512", 32, 64},
    [MULTIPLY_PAIRS] = {"AVX-512 BF16", 64, 128},
    [MULTIPLY_TILES] = {"AMX", 16384, 1024},
};
// Returns the widest instructions of the CPU that multiply fp32.
static inline Multiplier multiplier_of_fp32(void) {
#ifdef __x86_64__
    return __builtin_cpu_supports("avx512f") ? MULTIPLY_512
           : __builtin_cpu_supports("fma")   ? MULTIPLY_256
                                             : MULTIPLY_128;
#else
    return MULTIPLY_128;
#endif
}

// Returns whether the CPU multiplies fp32 faster than pairs of bf16, though it has both.
static inline bool pairs_are_slow(void) {
#ifdef __x86_64__
    return __builtin_cpu_is("intel") && __builtin_cpu_supports("avx512fp16");
#else
    return false;
#endif
}

enum { PEAK_TRIES = 12, PEAK_ADDS = 128, PEAK_SUMS = 12, PEAK_TILES = 4 };
static const double PEAK_TRY_S = 50e-6;

// Runs rounds of PEAK_SUMS sums that are independent of each other (of PEAK_TILES tiles), so that
// none waits for another. Returns false if it cannot.
#ifdef __x86_64__
#define MULTIPLY(factors, instruction)                                                             \
    __asm__ volatile(".irp r,0,1,2,3,4,5,6,7,8,9,10,11\n vxorps %%xmm\\r,%%xmm\\r,%%xmm\\r\n"      \
                     ".endr\n vmovd %1,%%xmm14\n" factors                                          \
                     "1:\n .irp r,0,1,2,3,4,5,6,7,8,9,10,11\n" instruction "\\r\n.endr\n"          \
                     "dec %0\n jnz 1b\n vzeroupper\n"                                              \
                     : "+r"(rounds)                                                                \
                     : "r"(0x3f7f3f7f) /* 0.996, also as a pair of bf16 */                         \
                     : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",       \
                       "xmm8", "xmm9", "xmm10", "xmm11", "xmm14")
// Asks the system for the registers of tiles, for all threads. Returns whether the CPU has tiles.
static inline bool tiles_open(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("avx512bw") &&
           !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#define TILES __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw")))
// Sets the shape of the calling thread's tiles: all are whole, 16 rows of 64 bytes.
TILES static inline void tiles_begin(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.row_bytes[i] = 64;
        shape.rows[i] = 16;
    }
    _tile_loadconfig(&shape);
}
TILES static inline bool multiply_tiles(int64_t rounds) {
    uint32_t numbers[16 * 16];
    if (!tiles_open()) { return false; }
    for (int i = 0; i < 16 * 16; i++) { numbers[i] = 0x3f7f3f7f; }
    tiles_begin();
    __asm__ volatile("tileloadd (%1,%2,1),%%tmm4\n tileloadd (%1,%2,1),%%tmm5\n"
                     ".irp r,0,1,2,3\n tilezero %%tmm\\r\n.endr\n"
                     "1:\n .irp r,0,1,2,3\n tdpbf16ps %%tmm5,%%tmm4,%%tmm\\r\n.endr\n"
                     "dec %0\n jnz 1b\n tilerelease\n"
                     : "+r"(rounds)
                     : "r"(numbers), "r"((int64_t)64)
                     : "cc", "memory");
    return true;
}
static inline bool multiply_rounds(Multiplier m, int64_t rounds) {
    switch (m) {
    case MULTIPLY_256:
        MULTIPLY("vpbroadcastd %%xmm14,%%ymm14\n", "vfmadd231ps %%ymm14,%%ymm14,%%ymm");
        return true;
    case MULTIPLY_512:
        MULTIPLY("vpbroadcastd %%xmm14,%%zmm14\n", "vfmadd231ps %%zmm14,%%zmm14,%%zmm");
        return true;
    case MULTIPLY_PAIRS:
        MULTIPLY("vpbroadcastd %%xmm14,%%zmm14\n", "vdpbf16ps %%zmm14,%%zmm14,%%zmm");
        return true;
    case MULTIPLY_TILES: return multiply_tiles(rounds);
    default: return false; // too old a CPU to be measured
    }
}
static inline void add_rounds(int64_t rounds) {
    int64_t sum = 1;
    __asm__ volatile("1:\n .rept 128\n add %2,%0\n .endr\n dec %1\n jnz 1b\n"
                     : "+r"(sum), "+r"(rounds)
                     : "r"((int64_t)1)
                     : "cc");
}
#elif defined __aarch64__
static inline bool multiply_rounds(Multiplier m, int64_t rounds) {
    (void)m;
    __asm__ volatile(".irp r,0,1,2,3,4,5,6,7,8,9,10,11,14\n fmov v\\r\\().4s,#0.5\n .endr\n"
                     "1:\n .irp r,0,1,2,3,4,5,6,7,8,9,10,11\n fmla v\\r\\().4s,v14.4s,v14.4s\n"
                     ".endr\n subs %0,%0,#1\n b.ne 1b\n"
                     : "+r"(rounds)
                     :
                     : "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",
                       "v11", "v14");
    return true;
}
static inline void add_rounds(int64_t rounds) {
    int64_t sum = 1;
    __asm__ volatile("1:\n .rept 128\n add %0,%0,%2\n .endr\n subs %1,%1,#1\n b.ne 1b\n"
                     : "+r"(sum), "+r"(rounds)
                     : "r"((int64_t)1)
                     : "cc");
}
#else
static inline bool multiply_rounds(Multiplier m, int64_t rounds) {
    (void)m;
    (void)rounds;
    return false;
}
static inline void add_rounds(int64_t rounds) { (void)rounds; }
#endif

#ifndef __x86_64__
static inline bool tiles_open(void) { return false; }
#endif

// Returns the cycles per second of this core at work: additions that wait for each other take a
// cycle each. 0: not known.
static inline double clock_of_core(void) {
    const double least = 2e8, most = 1e10, adds = PEAK_TRY_S * 3e9;
    double best = 0;
    for (int i = 0; i < PEAK_TRIES; i++) {
        const int64_t rounds = (int64_t)(adds / PEAK_ADDS);
        const double start = seconds_now();
        add_rounds(rounds);
        const double rate = (double)(rounds * PEAK_ADDS) / (seconds_now() - start);
        if (rate < most) { best = fmax(best, rate); }
    }
    return best > least ? best : 0;
}
// Returns the operations per second of this thread; 0: not known.
static inline double multiplications_of_thread(Multiplier m, double limit) {
    const double of_round = multipliers[m].flops * (m == MULTIPLY_TILES ? PEAK_TILES : PEAK_SUMS);
    const int64_t rounds = (int64_t)fmax(1, PEAK_TRY_S * limit / of_round);
    double best = 0;
    for (int i = 0; i < PEAK_TRIES; i++) {
        const double start = seconds_now();
        if (!multiply_rounds(m, rounds)) { return 0; }
        best = fmax(best, fmin(limit, (double)rounds * of_round / (seconds_now() - start)));
    }
    return best;
}
static inline OpsPeak cpu_peak(Multiplier m, int threads) {
    const double limit = clock_of_core() * multipliers[m].per_cycle;
    double sum = 0;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
    sum += multiplications_of_thread(m, limit);
    const OpsPeak peak = {multipliers[m].name, sum, limit};
    return peak;
}

#endif
