// emu.h: an emulation of CUDA on the CPU, for the tests of the GPU build. g++ compiles ops_cuda.cuh
// with this header in place of CUDA's.
//
// Kernels    A block runs on one OS thread. Its CUDA threads are fibers, which are switched at
//            barriers and shuffles (a few instructions each). OpenMP distributes the blocks.
//            Supported are __syncthreads, __syncwarp, __shfl_*_sync, __ballot_sync, atomicAdd,
//            static and dynamic shared memory, launches through LAUNCH(), and tensor core products
//            and asynchronous copies through the wrappers of tensor_cores.cuh. The warps of a
//            block must be whole.
// Adversary  Whatever CUDA leaves open is drawn from a seed (environment: EMU_SEED). Threads of a
//            block run forwards or backwards. Streams are queues that run as late as they may, in
//            any order that events allow. Dynamic shared memory starts as NaN. Asynchronous copies
//            are made when they are started, or not before they are awaited. So a missing barrier,
//            event or synchronisation gives a wrong result.
// Memory     Device memory is accessible only while kernels and copies run. So an access by the
//            host is a fault, as is an access beyond the end of an allocation. Managed and
//            page-locked memory are accessible to both sides, but kernels and copies run late. So
//            code that reads too early reads old data, and code that writes too early changes what
//            is copied.
// Machine    EMU_GPUS (environment; default 1) equal devices with EMU_SHARED bytes of shared memory
//            per block. A process uses one.
// Graphs     A stream that is being captured keeps its work. A graph is that work, and can be
//            started any number of times. What CUDA refuses during a capture, or what is not
//            emulated there, ends the program.
// Failures   EMU_FAILS=N makes the N-th kernel that runs access an illegal address. From then on
//            every call returns that error, as CUDA's do; no call names the kernel.
// Counts     EMU_COUNTS=FILE writes JSON at the end: the number of the host's waits and of
//            launches, both only inside (nvtx) ranges; the number of ranges; the maximum of device
//            memory, and of work queued in a stream; the number of products with an epilogue; of
//            graphs that cuDNN has built.
// Libraries  The calls of cuBLASLt that the program uses, with their column-major meaning and their
//            refusals. EMU_REFUSES=state: the first suggestion for a product has an error as its
//            state, and must not be used. EMU_REFUSES=first: the library refuses to run the first
//            suggestion. EMU_REFUSES=fused: it refuses to run each product with an epilogue,
//            although it suggests algorithms for it. NCCL is in emu_nccl.h.
//
// It works on x86-64 only, because the context switch is assembly.
#ifndef EMU_H
#define EMU_H

#include "base/base.h"   // random numbers
#include <algorithm>     // min
#include "emu_checks.h"  // optional checks of kernels' accesses
#include "emu_symbols.h" // names of kernels
#include <deque>         // a stream is a queue
#include <functional>    // of closures
#include <map>           // allocations by address
#include <math.h>        // kernels use expf, sqrtf, ...
#include <sched.h>       // sched_yield
#include <signal.h>      // a host dereference is a fault
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h> // mprotect
#include <time.h>     // times of events
#include <tuple>      // arguments of a launch
#include <unistd.h>
#include <vector>

#ifndef __x86_64__
#error "the emulation switches fibers with x86-64 instructions; on other machines use make cuda"
#endif

#define __global__ static
#define __device__ inline
#define __launch_bounds__(...)
#define UNROLL
// An OS thread runs one block at a time, and fibers never change their thread.
#define __shared__ static thread_local EMU_PARTED

__attribute__((noreturn, format(printf, 1, 2))) static inline void emu_fail(const char *what, ...) {
    va_list arguments;
    va_start(arguments, what);
    fprintf(stderr, "emu: ");
    vfprintf(stderr, what, arguments);
    fprintf(stderr, "\n");
    fflush(stderr);
    signal(SIGABRT, SIG_DFL); // a test's framework would catch the signal
    abort();
}

// --- the seed ------------------------------------------------------------------------------------
static inline uint64_t emu_seed_from_environment() {
    return getenv("EMU_SEED") ? strtoull(getenv("EMU_SEED"), NULL, 10) : 1;
}
static uint64_t emu_state = emu_seed_from_environment();
static struct EmuStream *emu_laggard;        // the stream that lags behind the others, or NULL
static inline void emu_seed(uint64_t seed) { // determines everything that is drawn
    emu_state = seed;
    emu_laggard = NULL;
}
static inline uint64_t emu_next(uint64_t *state) { // Steele et al.'s splitmix64
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
// Draws from 0 .. n - 1. Only the host thread calls it.
static inline uint64_t emu_draw(uint64_t n) { return emu_next(&emu_state) % n; }

// --- counts --------------------------------------------------------------------------------------
static struct EmuCounts {
    // inside ranges: the host's waits for the device; launches of kernels, copies, products, graphs
    int64_t waits, launches;
    int64_t ranges, depth, profiled; // started; now open; started while profiling
    bool profiling;
    size_t device_bytes, peak_bytes;   // device memory now, and its maximum
    size_t queued;                     // maximum length of a stream's queue
    int64_t epilogues, bias_gradients; // products that were fused with something; with BGRADB
    int64_t cudnn_graphs;
    ~EmuCounts() {
        FILE *f = getenv("EMU_COUNTS") ? fopen(getenv("EMU_COUNTS"), "w") : NULL;
        if (!f) { return; }
        fprintf(f,
                "{\"waits\":%lld,\"launches\":%lld,\"ranges\":%lld,\"profiled\":%lld,\"device_"
                "bytes\":%zu,\"queued\":%zu,\"epilogues\":%lld,\"bias_gradients\":%lld,"
                "\"cudnn_graphs\":%lld}\n",
                (long long)waits, (long long)launches, (long long)ranges, (long long)profiled,
                peak_bytes, queued, (long long)epilogues, (long long)bias_gradients,
                (long long)cudnn_graphs);
        fclose(f);
    }
} emu_counts;
static inline int nvtxRangePushA(const char *) {
    emu_counts.ranges++;
    emu_counts.profiled += emu_counts.profiling;
    return (int)emu_counts.depth++;
}
static inline int nvtxRangePop() {
    if (!emu_counts.depth) { emu_fail("nvtxRangePop without a push"); }
    return (int)--emu_counts.depth;
}

// --- types ---------------------------------------------------------------------------------------
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct __nv_bfloat16 {
    uint16_t bits;
};
typedef __nv_bfloat16 Bf16;
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
static inline float __bfloat162float(__nv_bfloat16 h) {
    uint32_t bits = (uint32_t)h.bits << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
// As fmaxf and fminf, which the compiler would call.
static inline float emu_fmaxf(float a, float b) { return a > b || b != b ? a : b; }
static inline float emu_fminf(float a, float b) { return a < b || b != b ? a : b; }
#define fmaxf emu_fmaxf
#define fminf emu_fminf
// to nearest even; every NaN becomes CUDA's NaN
static inline __nv_bfloat16 __float2bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    __nv_bfloat16 h = {(uint16_t)(x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
    return h;
}

static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16(x), __float2bfloat16(y)};
}

// --- fibers --------------------------------------------------------------------------------------
// Pushes the six registers that a callee must preserve, saves this stack pointer, and continues on
// the other stack.
extern "C" void emu_switch(void **save_sp, void *load_sp);
asm(".text\n.weak emu_switch\nemu_switch:\n push %rbp\n push %rbx\n push %r12\n push %r13\n push "
    "%r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop "
    "%rbp\n ret\n");

enum EmuState { EMU_READY, EMU_PAUSED, EMU_AT_WARP, EMU_AT_BLOCK, EMU_DONE };
enum { EMU_STACK = 64 << 10, EMU_SHARED_MOST = 232448, EMU_WARPS = 32, EMU_SHOWN = 32 };
struct EmuCopy { // into shared memory; from NULL: zeros
    void *to;
    const void *from;
    size_t bytes;
};
struct EmuSite { // place of a call; as a default argument, the caller's line
    const char *file;
    int line;
    const void *caller = NULL; // set if the line is not enough
    EmuSite(const char *f = __builtin_FILE(), int l = __builtin_LINE()) : file(f), line(l) {}
    bool operator==(const EmuSite &other) const {
        return line == other.line && caller == other.caller &&
               (file == other.file || !strcmp(file, other.file));
    }
};
struct EmuFiber {
    void *sp;
    EmuState state;
    dim3 thread;
    unsigned lane, warp, shuffles;
    const char *call; // the call in which it waits, with its mask and site below
    unsigned mask;
    EmuSite site;
    uint64_t path;               // hash of the calling functions (emu_checks.h)
    std::vector<EmuCopy> copies; // started but not made
};
typedef char EmuSlot[EMU_SHOWN];
struct EmuOrder { // drawn for each launch
    bool backwards, late_copies;
    uint64_t seed; // for the order of blocks, and of warps between two barriers
};
struct EmuBlock {     // one per OS thread, reused for all blocks that it runs
    EmuFiber *fibers; // [EMU_WARPS * 32], of which `stacks` have a stack
    size_t stacks;
    void *scheduler_sp;
    EmuFiber *current;
    const std::function<void()> *body;
    // Values that lanes exchange. There are two slots per lane, so a shuffle needs only one warp
    // barrier.
    EmuSlot slot[EMU_WARPS][2][32];
    EmuOrder order;
    uint64_t draws; // state of this block's random numbers
    char *dynamic;
    const void *kernel;
};
static const char *const emu_syncwarp = "__syncwarp";
// Zeros: what a constructor would have to make, each access would first ask for.
static thread_local EmuBlock emu;
static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

EMU_APART static inline void emu_wait(EmuState state, const char *call, unsigned mask,
                                      EmuSite site) {
    EmuFiber *me = emu.current;
    me->state = state;
    me->call = call;
    me->mask = mask;
    me->site = site;
    me->path = emu_check_path();
    emu_switch(&me->sp, emu.scheduler_sp);
}
EMU_APART static void emu_entry() {
    for (;;) {
        (*emu.body)();
        emu_wait(EMU_DONE, "", 0, EmuSite()); // the next block reuses this fiber
    }
}
static inline EmuFiber emu_fiber(size_t index) {
    EmuFiber f = {};
    // aligned, because the checks recognise the stack by its address
    char *stack = (char *)aligned_alloc(EMU_STACK, EMU_STACK);
    // The start is staggered. Otherwise all stacks would use the same cache set.
    void **sp = (void **)(stack + EMU_STACK - index % 32 * 448) - 1;
    *--sp = (void *)emu_entry;
    for (int r = 0; r < 6; r++) { *--sp = NULL; }
    f.sp = sp;
    return f;
}

// --- what kernels call ---------------------------------------------------------------------------
EMU_APART static inline void __syncthreads(EmuSite site = EmuSite()) {
    // Distinguishes two calls of a function that contains this line.
    if (EMU_CHECKS) { site.caller = __builtin_return_address(0); }
    emu_wait(EMU_AT_BLOCK, "__syncthreads", ~0u, site);
}
EMU_APART static inline void emu_pause() { emu_wait(EMU_PAUSED, "", 0, EmuSite()); }
EMU_APART static inline void emu_at_warp(const char *call, unsigned mask, EmuSite site) {
    const EmuFiber *me = emu.current;
    if (!(mask >> me->lane & 1)) {
        emu_check_leave();
        emu_fail("%s: %s with mask %08x does not name its own lane %u, %s:%d",
                 emu_function_name(emu.kernel).c_str(), call, mask, me->lane, site.file, site.line);
    }
    emu_wait(EMU_AT_WARP, call, mask, site);
}
EMU_APART static inline void __syncwarp(unsigned mask = ~0u, EmuSite site = EmuSite()) {
    emu_at_warp(emu_syncwarp, mask, site);
}
// Shows a value to the lanes of the mask, and returns the values of all of them.
template <class T>
EMU_APART static inline const EmuSlot *emu_show(const T &v, const char *call, unsigned mask,
                                                EmuSite site) {
    static_assert(sizeof(T) <= EMU_SHOWN, "too much to show");
    EmuFiber *me = emu.current;
    memcpy(emu.slot[me->warp][me->shuffles & 1][me->lane], &v, sizeof v);
    emu_at_warp(call, mask, site);
    return emu.slot[me->warp][me->shuffles++ & 1]; // emu_release() may have changed `shuffles`
}
template <class T> EMU_APART static inline T emu_shown(const EmuSlot *slots, unsigned by) {
    T result;
    memcpy(&result, slots[by], sizeof result);
    return result;
}
template <class T>
EMU_APART static inline T emu_shuffle(const char *call, unsigned mask, T v, unsigned from,
                                      EmuSite site) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    const EmuSlot *slots = emu_show(v, call, mask, site);
    if (!(mask >> from & 1)) {
        emu_check_leave();
        emu_fail("%s: %s: lane %u asks lane %u, which the mask %08x does not name, %s:%d",
                 emu_function_name(emu.kernel).c_str(), call, emu.current->lane, from, mask,
                 site.file, site.line);
    }
    return emu_shown<T>(slots, from);
}
template <class T>
EMU_APART static inline T __shfl_sync(unsigned mask, T v, int lane, EmuSite site = EmuSite()) {
    return emu_shuffle("__shfl_sync", mask, v, (unsigned)lane % 32, site);
}
template <class T>
EMU_APART static inline T __shfl_xor_sync(unsigned mask, T v, int by, EmuSite site = EmuSite()) {
    return emu_shuffle("__shfl_xor_sync", mask, v, (emu.current->lane ^ (unsigned)by) % 32, site);
}
template <class T>
EMU_APART static inline T __shfl_down_sync(unsigned mask, T v, unsigned by,
                                           EmuSite site = EmuSite()) {
    const unsigned lane = emu.current->lane;
    return emu_shuffle("__shfl_down_sync", mask, v, lane + by > 31 ? lane : lane + by, site);
}
EMU_APART static inline unsigned __ballot_sync(unsigned mask, int predicate,
                                               EmuSite site = EmuSite()) {
    const EmuSlot *shown = emu_show(predicate != 0, "__ballot_sync", mask, site);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        if (mask >> lane & 1) { bits |= (unsigned)emu_shown<bool>(shown, lane) << lane; }
    }
    return bits;
}
template <class T> EMU_APART static inline T atomicAdd(T *p, T v) {
    T before;
    emu_check_access(p, sizeof v, EMU_ATOMIC, __builtin_return_address(0));
#pragma omp critical(emu_atomic)
    {
        before = *p;
        *p = before + v;
    }
    return before;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// --- tensor cores and asynchronous copies: the wrappers of tensor_cores.cuh ---------------------
struct EmuWords {
    uint32_t word[6];
};
EMU_APART static inline float emu_low(uint32_t pair) { return __bfloat162float({(uint16_t)pair}); }
EMU_APART static inline float emu_high(uint32_t pair) {
    return __bfloat162float({(uint16_t)(pair >> 16)});
}
EMU_APART static inline void mma_bf16(float d[4], const unsigned a[4], unsigned b_upper,
                                      unsigned b_lower, EmuSite site = EmuSite()) {
    const unsigned lane = emu.current->lane, row = lane / 4, column = lane % 4 * 2;
    const EmuSlot *shown =
        emu_show(EmuWords{{a[0], a[1], a[2], a[3], b_upper, b_lower}}, "mma.sync", ~0u, site);
    // Two of the 16 terms: those in half i / 4, from lane i % 4 of each group of four lanes.
    for (unsigned i = 0; i < 8; i++) {
        const EmuWords of_row = emu_shown<EmuWords>(shown, row * 4 + i % 4);
        for (unsigned e = 0; e < 4; e++) {
            const uint32_t x = of_row.word[i / 4 * 2 + e / 2],
                           y = emu_shown<EmuWords>(shown, (column + e % 2) * 4 + i % 4)
                                   .word[4 + i / 4];
            d[e] += emu_low(x) * emu_low(y) + emu_high(x) * emu_high(y);
        }
    }
}
struct EmuRow { // 8 bf16 elements
    uint16_t at[8];
};
EMU_APART static inline const EmuSlot *emu_show_row(const Bf16 *row, const void *caller,
                                                    EmuSite site) {
    emu_check_access(row, 16, EMU_READ, caller);
    if ((uintptr_t)row % 16) {
        emu_check_leave();
        emu_fail("ldmatrix: a row that is not aligned to 16 bytes, %s:%d", site.file, site.line);
    }
    // The row is read now. Without a barrier, writes of other lanes may be missing.
    return emu_show(*(const EmuRow *)(const void *)row, "ldmatrix", ~0u, site);
}
EMU_APART static inline void load_matrices(unsigned m[4], const Bf16 *row,
                                           EmuSite site = EmuSite()) {
    const unsigned lane = emu.current->lane;
    const EmuSlot *shown = emu_show_row(row, __builtin_return_address(0), site);
    for (unsigned i = 0; i < 4; i++) { memcpy(&m[i], &shown[8 * i + lane / 4][lane % 4 * 4], 4); }
}
EMU_APART static inline void load_matrices_transposed(unsigned m[4], const Bf16 *row,
                                                      EmuSite site = EmuSite()) {
    const unsigned lane = emu.current->lane, first = lane % 4 * 2;
    const EmuSlot *shown = emu_show_row(row, __builtin_return_address(0), site);
    for (unsigned i = 0; i < 4; i++) {
        const EmuRow low = emu_shown<EmuRow>(shown, 8 * i + first),
                     high = emu_shown<EmuRow>(shown, 8 * i + first + 1);
        m[i] = low.at[lane / 4] | (unsigned)high.at[lane / 4] << 16;
    }
}
EMU_APART static inline void emu_copy(const EmuCopy &c) {
    if (c.from) {
        memcpy(c.to, c.from, c.bytes);
    } else {
        memset(c.to, 0, c.bytes);
    }
}
EMU_APART static inline void emu_back() {
    emu_check_enter(emu.current->warp * 32 + emu.current->lane, __builtin_frame_address(0));
}
EMU_APART static inline void emu_start_copy(void *to, const void *from, size_t bytes, bool there,
                                            const void *caller, EmuSite site) {
    if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) {
        emu_check_leave();
        emu_fail("cp.async: an address that is not aligned, %s:%d", site.file, site.line);
    }
    const EmuCopy copy = {to, there ? from : NULL, bytes};
    if (there) { emu_check_access(from, bytes, EMU_READ, caller); }
    emu_check_access(to, bytes, EMU_COPY_STARTS, caller);
    emu_check_leave(); // what follows is not the kernel's access
    if (emu.order.late_copies || EMU_CHECKS) {
        emu.current->copies.push_back(copy);
    } else {
        emu_copy(copy);
    }
    emu_back();
}
EMU_APART static inline void copy_async_16(void *to, const void *from, bool there,
                                           EmuSite site = EmuSite()) {
    emu_start_copy(to, from, 16, there, __builtin_return_address(0), site);
}
EMU_APART static inline void copy_async_4(void *to, const void *from, bool there,
                                          EmuSite site = EmuSite()) {
    emu_start_copy(to, from, 4, there, __builtin_return_address(0), site);
}
EMU_APART static inline void copy_async_wait() {
    emu_check_leave();
    for (const EmuCopy &copy : emu.current->copies) {
        emu_back();
        emu_check_access(copy.to, copy.bytes, EMU_COPY_ENDS, __builtin_return_address(0));
        emu_check_leave();
        emu_copy(copy);
    }
    emu.current->copies.clear();
    emu_back();
}
static inline float power_of_2(float x) { return exp2f(x); }
#define DYNAMIC_SHARED(type, name) type *name = (type *)(void *)emu.dynamic

// --- blocks --------------------------------------------------------------------------------------
static inline std::string emu_about(const EmuFiber *f) { // describes where a thread is
    char text[300];
    if (f->state == EMU_DONE) {
        snprintf(text, sizeof text, "thread (%u,%u,%u) has left", f->thread.x, f->thread.y,
                 f->thread.z);
    } else {
        snprintf(text, sizeof text, "thread (%u,%u,%u) is at %s, mask %08x, %s:%d", f->thread.x,
                 f->thread.y, f->thread.z, f->call, f->mask, f->site.file, f->site.line);
    }
    return text;
}
__attribute__((noreturn)) static inline void emu_diverged(const char *what, const EmuFiber *a,
                                                          const EmuFiber *b) {
    emu_fail("divergent barrier in %s, block (%u,%u,%u): %s: %s; %s",
             emu_function_name(emu.kernel).c_str(), blockIdx.x, blockIdx.y, blockIdx.z, what,
             emu_about(a).c_str(), emu_about(b).c_str());
}
static inline bool emu_same_call(const EmuFiber *a, const EmuFiber *b) {
    return a->state == b->state && a->call == b->call && a->mask == b->mask && a->site == b->site &&
           a->path == b->path;
}
// Returns the first lane of f's mask that is not at the same call as f; NULL if all are.
static inline const EmuFiber *emu_missing(const EmuFiber *warp, const EmuFiber *f) {
    for (unsigned i = 0; i < 32; i++) {
        if ((f->mask >> i & 1) && !emu_same_call(f, &warp[i])) { return &warp[i]; }
    }
    return NULL;
}
// Releases the lanes of a mask, which have all arrived. They continue with the same number of
// shuffles: lanes that were in different groups may have done different numbers.
static inline void emu_release(EmuFiber *warp, const EmuFiber *first) {
    const unsigned mask = first->mask, number = first->shuffles;
    if (mask == ~0u && first->call == emu_syncwarp) { emu_check_warp_barrier(first->warp); }
    for (unsigned i = 0; i < 32; i++) {
        EmuFiber *f = &warp[i];
        if (!(mask >> i & 1)) { continue; }
        if ((f->shuffles ^ number) & 1) {
            EmuSlot(*slots)[32] = emu.slot[f->warp];
            memcpy(slots[number & 1][i], slots[f->shuffles & 1][i], EMU_SHOWN);
        }
        f->shuffles = number;
        f->state = EMU_READY;
    }
}
static inline void emu_release_groups(EmuFiber *warp) {
    const EmuFiber *alone = NULL, *missing = NULL;
    bool released = false;
    for (unsigned i = 0; i < 32; i++) {
        if (warp[i].state == EMU_READY || warp[i].state == EMU_PAUSED) { released = true; }
        if (warp[i].state != EMU_AT_WARP) { continue; }
        const EmuFiber *first_missing = emu_missing(warp, &warp[i]);
        if (!first_missing) {
            emu_release(warp, &warp[i]);
            released = true;
        } else if (!alone) {
            alone = &warp[i];
            missing = first_missing;
        }
    }
    if (!released && alone) { emu_diverged("lanes that a mask names do not come", alone, missing); }
}
EMU_APART static inline void emu_run_fiber(EmuFiber *f) {
    emu.current = f;
    threadIdx = f->thread;
    emu_check_enter(f->warp * 32 + f->lane, f->sp);
    emu_switch(&emu.scheduler_sp, f->sp);
    emu_check_leave();
}
// Runs a warp until all its lanes wait at a block barrier or are done. Returns how many are done.
static inline unsigned emu_run_warp(EmuFiber *warp, bool backwards) {
    unsigned ended = 0;
    for (bool again = true; again;) { // one turn is an interval between warp barriers
        again = false;
        for (unsigned i = 0; i < 32; i++) {
            EmuFiber *f = warp + (backwards ? 31 - i : i);
            if (f->state == EMU_READY) {
                emu_run_fiber(f);
                ended += f->state == EMU_DONE;
            }
            again = again || f->state == EMU_AT_WARP || f->state == EMU_PAUSED;
        }
        emu_check_turn();
        if (again) { emu_release_groups(warp); }
        for (unsigned i = 0; i < 32; i++) {
            if (warp[i].state == EMU_PAUSED) { warp[i].state = EMU_READY; }
        }
    }
    return ended;
}
static inline void emu_release_block(unsigned threads, unsigned live) {
    if (!live) { return; }
    const EmuFiber *first = &emu.fibers[0];
    for (unsigned i = 0; i < threads; i++) {
        EmuFiber *f = &emu.fibers[i];
        if (!emu_same_call(f, first)) {
            emu_diverged("not all threads of the block are there", f, first);
        }
    }
    for (unsigned i = 0; i < threads; i++) { emu.fibers[i].state = EMU_READY; }
    emu_check_block_barrier();
}
static inline void emu_run_block(unsigned threads) {
    const unsigned warps = threads / 32;
    unsigned order[EMU_WARPS];
    for (unsigned w = 0; w < warps; w++) { order[w] = w; }
    for (unsigned i = 0; i < threads; i++) { emu.fibers[i].state = EMU_READY; }
    for (unsigned live = threads; live;) { // one turn is an interval between block barriers
        for (unsigned w = 0; w < warps; w++) {
            std::swap(order[w], order[w + emu_next(&emu.draws) % (warps - w)]);
            live -= emu_run_warp(&emu.fibers[order[w] * 32], emu.order.backwards);
        }
        emu_release_block(threads, live);
    }
}
static inline void emu_prepare_block(dim3 grid, dim3 block, long index,
                                     const std::function<void()> *body, size_t shared,
                                     EmuOrder order) {
    const unsigned threads = block.x * block.y * block.z;
    const bool shaped = blockDim.x == block.x && blockDim.y == block.y && blockDim.z == block.z;
    if (!emu.fibers) { emu.fibers = new EmuFiber[EMU_WARPS * 32](); }
    for (; emu.stacks < threads; emu.stacks++) { emu.fibers[emu.stacks] = emu_fiber(emu.stacks); }
    if (!emu.dynamic) { emu.dynamic = (char *)aligned_alloc(128, EMU_SHARED_MOST); }
    memset(emu.dynamic, 0xff, shared); // NaN
    emu.body = body;
    emu.order = order;
    blockDim = block;
    gridDim = grid;
    emu.draws = order.seed + (uint64_t)index;
    blockIdx = dim3((unsigned)(index % grid.x), (unsigned)(index / grid.x % grid.y),
                    (unsigned)(index / grid.x / grid.y));
    for (unsigned i = 0; i < threads; i++) {
        EmuFiber *f = &emu.fibers[i];
        f->shuffles = 0;
        f->copies.clear();
        if (shaped) { continue; } // as it was in the block before
        f->thread = dim3(i % block.x, i / block.x % block.y, i / block.x / block.y);
        f->lane = i % 32;
        f->warp = i / 32;
    }
}
// The order of blocks: index i means block (i step + first) modulo the number of blocks. That
// number and the step have no common divisor.
struct EmuBlockOrder {
    long blocks, first, step;
};
static inline EmuBlockOrder emu_block_order(long blocks, uint64_t seed) {
    EmuBlockOrder o = {blocks, (long)(emu_next(&seed) % (uint64_t)blocks), 0};
    do {
        o.step = 1 + (long)(emu_next(&seed) % (uint64_t)std::min(blocks, 1000000L));
    } while (std::__gcd(o.step, blocks) != 1);
    return o;
}
static inline void emu_run_grid(const void *kernel, dim3 grid, dim3 block, size_t shared,
                                EmuOrder order, const std::function<void()> &body) {
    const unsigned threads = block.x * block.y * block.z;
    const long blocks = (long)grid.x * grid.y * grid.z;
    const EmuBlockOrder which = emu_block_order(blocks, order.seed);
#pragma omp parallel for schedule(static) if (!EMU_CHECKS && blocks > 1 && blocks * threads > 4096)
    for (long i = 0; i < blocks; i++) {
        emu.kernel = kernel;
        emu_prepare_block(grid, block, (long)(((__int128)i * which.step + which.first) % blocks),
                          &body, shared, order);
        emu_check_block(&blockIdx.x, emu.dynamic);
        emu_run_block(threads);
    }
}

// --- memory --------------------------------------------------------------------------------------
typedef enum {
    cudaSuccess,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700
} cudaError_t;
// Set when a kernel has failed: the answer of all later calls.
static cudaError_t emu_failed = cudaSuccess;
static inline cudaError_t emu_answer(cudaError_t error) { return emu_failed ? emu_failed : error; }
// The kernel that fails; 0: none.
static const long emu_failing = getenv("EMU_FAILS") ? atol(getenv("EMU_FAILS")) : 0;
static inline void emu_work_on();
// The same, of a call that has nothing to do with kernels: the device may have worked until then.
static inline cudaError_t emu_late_answer(cudaError_t error) {
    emu_work_on();
    return emu_answer(error);
}
typedef enum {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3
} cudaMemcpyKind;
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
static const size_t EMU_PAGE = 4096;
enum EmuPlace { EMU_DEVICE, EMU_MANAGED, EMU_PINNED };
struct EmuMemory {
    size_t pages; // accessible bytes; an inaccessible page follows
    char *mapped;
    EmuPlace place;
};
static size_t emu_device_total =
    getenv("EMU_DEVICE_MEMORY") ? strtoull(getenv("EMU_DEVICE_MEMORY"), NULL, 10) : (size_t)1 << 40;
static std::map<char *, EmuMemory> emu_memory; // by the pointer that the caller got
static bool emu_open;                          // device memory is accessible now

// Returns the allocation that contains p, or that ends just before p; NULL if none does.
static inline const EmuMemory *emu_find(const void *p) {
    for (const auto &m : emu_memory) {
        if ((char *)p >= m.second.mapped &&
            (char *)p < m.second.mapped + m.second.pages + EMU_PAGE) {
            return &m.second;
        }
    }
    return NULL;
}
static void emu_fault(int signal_number, siginfo_t *info, void *) {
    const EmuMemory *m = emu_find(info->si_addr);
    if (m && !emu_open && m->place == EMU_DEVICE) {
        fprintf(stderr, "emu: the host touches device memory\n");
    }
    if (m && emu_open) {
        fprintf(stderr, "emu: a kernel or copy goes beyond the end of its memory\n");
    }
    fflush(stderr);
    signal(signal_number, SIG_DFL); // the access is repeated, and ends the program
}
static inline void emu_protect(bool open) {
    if (open == emu_open) { return; }
    emu_open = open;
    for (const auto &m : emu_memory) {
        if (m.second.place == EMU_DEVICE &&
            mprotect(m.second.mapped, m.second.pages, open ? PROT_READ | PROT_WRITE : PROT_NONE)) {
            emu_fail("mprotect failed");
        }
    }
}
static inline cudaError_t emu_malloc(void **p, size_t bytes, EmuPlace place) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = emu_fault;
    action.sa_flags = SA_SIGINFO;
    // Set at each allocation, because other code sets this handler too.
    sigaction(SIGSEGV, &action, NULL);
    // Aligned as CUDA does, and placed at the end of the pages.
    size_t used = (bytes + 255) / 256 * 256, pages = (used + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE;
    if (emu_late_answer(cudaSuccess)) { return emu_failed; }
    if (place != EMU_PINNED && pages > emu_device_total - emu_counts.device_bytes) {
        return cudaErrorMemoryAllocation;
    }
    char *mapped = (char *)mmap(NULL, pages + EMU_PAGE, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) { return cudaErrorMemoryAllocation; }
    madvise(mapped, pages, MADV_HUGEPAGE); // fewer pages for emu_protect() to change
    if (place != EMU_DEVICE && mprotect(mapped, pages, PROT_READ | PROT_WRITE)) {
        emu_fail("mprotect failed");
    }
    EmuMemory m = {pages, mapped, place};
    *p = mapped + pages - used;
    emu_memory[(char *)*p] = m;
    emu_check_allocated(*p, bytes, place == EMU_DEVICE);
    emu_counts.device_bytes += place == EMU_PINNED ? 0 : pages;
    if (emu_counts.device_bytes > emu_counts.peak_bytes) {
        emu_counts.peak_bytes = emu_counts.device_bytes;
    }
    return cudaSuccess;
}
static inline cudaError_t cudaMalloc(void **p, size_t bytes) {
    return emu_malloc(p, bytes, EMU_DEVICE);
}
static inline cudaError_t cudaMallocManaged(void **p, size_t bytes) {
    return emu_malloc(p, bytes, EMU_MANAGED);
}
enum { cudaHostAllocMapped = 2 };
static inline cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) { // for kernels, too
    return emu_malloc(p, bytes, EMU_MANAGED);
}
// limit for the bytes of one allocation
static size_t emu_pinned_most =
    getenv("EMU_PINNED_MOST") ? strtoull(getenv("EMU_PINNED_MOST"), NULL, 10) : SIZE_MAX;
static inline cudaError_t cudaMallocHost(void **p, size_t bytes) {
    return bytes > emu_pinned_most ? cudaErrorMemoryAllocation : emu_malloc(p, bytes, EMU_PINNED);
}
static inline cudaError_t cudaMemGetInfo(size_t *there, size_t *total) {
    *there = emu_device_total - emu_counts.device_bytes;
    *total = emu_device_total;
    return cudaSuccess;
}

// --- streams and events --------------------------------------------------------------------------
struct EmuEvent {
    int64_t recorded, happened;
    double ms; // time at which it happened
};
typedef EmuEvent *cudaEvent_t;
struct EmuWork {
    std::function<void()> run;
    // If not NULL, this work only waits until record number `record` of the event has happened.
    const EmuEvent *awaited;
    int64_t record;
    // Used instead of run if other processes take part. false: not done yet, so it is called again.
    std::function<bool()> attempt;
    bool mark; // touches no memory of the device
};
struct EmuStream {
    std::deque<EmuWork> queue, captured;
    bool capturing;
};
typedef EmuStream *cudaStream_t;
enum { cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2 };
static std::vector<EmuStream *> emu_streams;
static cudaError_t emu_last_error; // "not ready" counts as an error, too
static inline cudaError_t cudaGetLastError() {
    cudaError_t error = emu_last_error;
    emu_last_error = cudaSuccess;
    return emu_answer(error);
}

// the time of products beyond the time that they take here (emu_matmul_ms)
static double emu_extra_ms = 0;
static inline double emu_clock_ms() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec + emu_extra_ms;
}

static inline void emu_queue(cudaStream_t stream, std::function<void()> run, bool mark = false) {
    (stream->capturing ? stream->captured : stream->queue).push_back({run, NULL, 0, NULL, mark});
    if (stream->queue.size() > emu_counts.queued) { emu_counts.queued = stream->queue.size(); }
}
// Queues work that counts as a launch. Events do not.
static inline void emu_enqueue(cudaStream_t stream, std::function<void()> run) {
    emu_queue(stream, run);
    emu_counts.launches += !stream->capturing && emu_counts.depth;
}
static inline void emu_not_captured(const EmuStream *s) {
    if (s->capturing) {
        emu_fail("a stream that is captured: no waits, no events, no copies of pageable memory");
    }
}
static inline bool emu_can_run(const EmuStream *s) {
    return !s->queue.empty() && (!s->queue.front().awaited ||
                                 s->queue.front().awaited->happened >= s->queue.front().record);
}
// Runs the next work of a stream drawn from the seed. One stream lags behind and runs only when no
// other can; which one it is changes now and then. Returns false if all remaining work waits for
// other processes.
static inline bool emu_step() {
    std::vector<EmuStream *> able;
    if (emu_draw(64) == 0) { emu_laggard = emu_streams[emu_draw(emu_streams.size())]; }
    for (EmuStream *s : emu_streams) {
        if (emu_can_run(s)) { able.insert(s == emu_laggard ? able.begin() : able.end(), s); }
    }
    if (able.empty()) { emu_fail("streams wait for each other"); }
    for (; !able.empty(); able.pop_back()) {
        const size_t last = able.size() > 1 && able[0] == emu_laggard;
        std::swap(able[last + emu_draw(able.size() - last)], able.back());
        EmuStream *s = able.back();
        if (s->queue.front().attempt && !s->queue.front().attempt()) { continue; }
        EmuWork work = std::move(s->queue.front());
        s->queue.pop_front();
        if (work.run) {
            if (!work.mark) { emu_protect(true); }
            work.run();
        }
        return true;
    }
    return false;
}
// Runs work until done() is true. If not patient, also stops when all work waits for other
// processes.
static inline void emu_run_until(const std::function<bool()> &done, bool patient = true) {
    if (done()) { return; }
    do { // what touches device memory opens it
        bool ran = emu_step();
        if (!ran) { sched_yield(); }
        if (!ran && !patient) { break; }
    } while (!done());
    emu_protect(false);
}
static inline void emu_work_on() { // only where it matters: tests want work to be late
    if (!emu_failing) { return; }
    emu_run_until(
        [] {
            bool idle = true;
            for (const EmuStream *s : emu_streams) { idle = idle && s->queue.empty(); }
            return idle;
        },
        false);
}
static inline void emu_wait_until(const std::function<bool()> &done) { // the host waits
    emu_counts.waits += emu_counts.depth > 0;
    emu_run_until(done);
}
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) {
    emu_streams.push_back(*s = new EmuStream());
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int) {
    return cudaStreamCreateWithFlags(s, flags);
}
static inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    emu_not_captured(s);
    emu_wait_until([=] { return s->queue.empty(); });
    return emu_answer(cudaSuccess);
}
// A query runs some of the work. Repeated queries until the stream is empty count as one wait.
static inline cudaError_t cudaStreamQuery(cudaStream_t s) {
    emu_not_captured(s);
    if (s->queue.empty()) {
        emu_counts.waits += emu_counts.depth > 0;
        return emu_answer(cudaSuccess);
    }
    uint64_t steps = 1 + emu_draw(8);
    emu_run_until([&] { return s->queue.empty() || steps-- == 0; }, false);
    return emu_answer(emu_last_error = cudaErrorNotReady);
}
static inline cudaError_t cudaDeviceSynchronize() {
    for (EmuStream *s : emu_streams) { cudaStreamSynchronize(s); }
    return emu_answer(cudaSuccess);
}
static inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
    cudaStreamSynchronize(s);
    for (size_t i = 0; i < emu_streams.size(); i++) {
        if (emu_streams[i] == s) {
            emu_streams.erase(emu_streams.begin() + (long)i);
            i--;
        }
    }
    if (emu_laggard == s) { emu_laggard = NULL; }
    delete s;
    return cudaSuccess;
}
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    *e = new EmuEvent();
    return cudaSuccess;
}
static inline cudaError_t cudaEventDestroy(cudaEvent_t e) {
    cudaDeviceSynchronize();
    delete e;
    return cudaSuccess;
}
static inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    emu_not_captured(s);
    int64_t record = ++e->recorded;
    emu_queue(
        s,
        [=] {
            e->happened = record;
            e->ms = emu_clock_ms();
        },
        true);
    return emu_answer(cudaSuccess);
}
static inline cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned = 0) {
    emu_not_captured(s);
    s->queue.push_back({NULL, e, e->recorded, NULL, true});
    return cudaSuccess;
}
static inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    if (!from->recorded || !to->recorded || from->happened < from->recorded ||
        to->happened < to->recorded) {
        return cudaErrorNotReady;
    }
    *ms = (float)(to->ms - from->ms);
    return cudaSuccess;
}
// A query runs work too, but little.
static inline cudaError_t cudaEventQuery(cudaEvent_t e) {
    uint64_t steps = emu_draw(8) == 0;
    emu_run_until([&] { return e->happened >= e->recorded || steps-- == 0; }, false);
    return emu_answer(e->happened >= e->recorded ? cudaSuccess
                                                 : emu_last_error = cudaErrorNotReady);
}
static inline cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    const int64_t record = e->recorded;
    emu_wait_until([=] { return e->happened >= record; });
    return cudaSuccess;
}
// --- graphs: the work that a stream was given while it was captured ------------------------------
typedef std::deque<EmuWork> *cudaGraph_t, *cudaGraphExec_t;
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
static inline cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    emu_not_captured(s);
    s->capturing = true;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    if (!s->capturing) { emu_fail("cudaStreamEndCapture of a stream that is not captured"); }
    *graph = new std::deque<EmuWork>(s->captured);
    s->captured.clear();
    s->capturing = false;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *to, cudaGraph_t graph,
                                               unsigned long long) {
    *to = new std::deque<EmuWork>(*graph);
    return cudaSuccess;
}
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) {
    emu_not_captured(s);
    s->queue.insert(s->queue.end(), graph->begin(), graph->end());
    emu_counts.launches += emu_counts.depth > 0;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    delete graph;
    return cudaSuccess;
}

static inline cudaError_t cudaFree(void *p) { // waits for the device, as CUDA does
    auto m = emu_memory.find((char *)p);
    if (!p) { return cudaSuccess; }
    if (m == emu_memory.end()) { emu_fail("cudaFree of what was not allocated"); }
    cudaDeviceSynchronize();
    emu_counts.device_bytes -= m->second.place == EMU_PINNED ? 0 : m->second.pages;
    munmap(m->second.mapped, m->second.pages + EMU_PAGE);
    emu_check_freed(p);
    emu_memory.erase(m);
    return cudaSuccess;
}
static inline cudaError_t cudaFreeHost(void *p) {
    if (!p) { emu_fail("cudaFreeHost of NULL, of which CUDA says nothing"); }
    return cudaFree(p);
}
static inline bool emu_fits(const EmuMemory *m, bool host) { // managed memory fits both
    return m && m->place == EMU_MANAGED ? true : host == (!m || m->place == EMU_PINNED);
}
// A copy from pageable host memory reads its source before the call returns. A copy to it is done
// when the call returns.
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                          cudaMemcpyKind kind, cudaStream_t s) {
    const EmuMemory *memory_to = emu_find(to), *memory_from = emu_find(from);
    bool fits = emu_fits(memory_to, kind == cudaMemcpyDeviceToHost) &&
                emu_fits(memory_from, kind == cudaMemcpyHostToDevice);
    if (bytes && !fits) {
        emu_fail("cudaMemcpyAsync: the kind does not tell what the pointers are");
    }
    if (!memory_to || !memory_from) { emu_not_captured(s); }
    if (!memory_from) {
        std::vector<char> held((const char *)from, (const char *)from + bytes);
        emu_enqueue(s, [=] {
            memcpy(to, held.data(), bytes);
            emu_check_copied(to, bytes);
        });
        return cudaSuccess;
    }
    emu_enqueue(s, [=] {
        memmove(to, from, bytes);
        emu_check_copied(to, bytes);
    });
    return memory_to ? emu_answer(cudaSuccess) : cudaStreamSynchronize(s);
}
// Zeros whole pages by giving them back to the system: what is never used then costs nothing.
static inline void emu_zero(char *to, size_t bytes) {
    char *first = (char *)(((uintptr_t)to + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE);
    const size_t before = std::min(bytes, (size_t)(first - to)),
                 whole = (bytes - before) / EMU_PAGE * EMU_PAGE;
    if (whole && madvise(first, whole, MADV_DONTNEED)) { emu_fail("madvise failed"); }
    memset(to, 0, before);
    memset(first + whole, 0, bytes - before - whole);
}
static inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) {
    emu_enqueue(s, [=] {
        if (!value && bytes >= 1 << 20) {
            emu_zero((char *)to, bytes);
        } else {
            memset(to, value, bytes);
        }
        emu_check_copied(to, bytes);
    });
    return cudaSuccess;
}
// This uses the default stream, and does not wait.
static inline cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    static EmuStream *unnamed = NULL;
    if (!unnamed) { emu_streams.push_back(unnamed = new EmuStream()); }
    return cudaMemsetAsync(to, value, bytes, unnamed);
}
static int emu_device;
static inline cudaError_t cudaGetDeviceCount(int *n) {
    *n = getenv("EMU_GPUS") ? atoi(getenv("EMU_GPUS")) : 1;
    return cudaSuccess;
}
static inline cudaError_t cudaSetDevice(int device) {
    int devices;
    cudaGetDeviceCount(&devices);
    emu_device = device;
    return device >= 0 && device < devices ? cudaSuccess : cudaErrorMemoryAllocation;
}
static inline cudaError_t cudaGetDevice(int *device) {
    *device = emu_device;
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceGetPCIBusId(char *id, int bytes, int device) {
    snprintf(id, (size_t)bytes, "0000:%02x:00.0", (unsigned)device);
    return cudaSuccess;
}
struct cudaDeviceProp {
    char name[256];
};
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    snprintf(p->name, sizeof p->name, "%s",
             getenv("EMU_DEVICE") ? getenv("EMU_DEVICE") : "emulated");
    return cudaSuccess;
}
static inline cudaError_t cudaProfilerStart() {
    emu_counts.profiling = true;
    return cudaSuccess;
}
static inline cudaError_t cudaProfilerStop() {
    emu_counts.profiling = false;
    return cudaSuccess;
}
static inline const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess               ? "no error"
           : e == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
           : e == cudaErrorInvalidValue   ? "invalid argument"
                                          : "out of memory";
}

// --- launches ------------------------------------------------------------------------------------
static std::map<void *, size_t> emu_shared_allowed; // by kernel; kernels not listed may have 48 KiB
static inline int emu_shared_most() {
    static const int most = getenv("EMU_SHARED") ? atoi(getenv("EMU_SHARED")) : EMU_SHARED_MOST;
    return most;
}
enum { cudaDevAttrMaxSharedMemoryPerBlockOptin };
static inline cudaError_t cudaDeviceGetAttribute(int *value, int, int) {
    *value = emu_shared_most();
    return cudaSuccess;
}
template <class... P>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), int, int bytes) {
    emu_shared_allowed[(void *)kernel] = (size_t)bytes;
    return emu_late_answer(bytes <= emu_shared_most() ? cudaSuccess : cudaErrorInvalidValue);
}
template <class... P, size_t... I>
EMU_APART static void emu_call(void (*kernel)(P...), const std::tuple<P...> &values,
                               std::index_sequence<I...>) {
    emu_check_begin();
    kernel(std::get<I>(values)...);
    emu_check_end();
}
// Returns whether the kernel that is about to run fails, or an earlier one has: then none runs.
static inline bool emu_fails_now() {
    static long kernels;
    if (++kernels == emu_failing) { emu_failed = cudaErrorIllegalAddress; }
    return emu_failed != cudaSuccess;
}
template <class... P, class... A>
static inline void emu_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                              cudaStream_t s, A... arguments) {
    const unsigned threads = block.x * block.y * block.z;
    if (emu_last_error != cudaSuccess) {
        emu_fail("a launch is blamed for an earlier call's error");
    }
    auto allowed = emu_shared_allowed.find((void *)kernel);
    bool fits = shared <= (allowed == emu_shared_allowed.end() ? 48 << 10 : allowed->second);
    bool shaped = threads && threads <= 1024 && threads % 32 == 0 && grid.x && grid.y && grid.z &&
                  grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535;
    if (!fits || !shaped) { emu_fail("a launch with a shape that CUDA refuses"); }
    std::tuple<P...> values(arguments...);
    const EmuOrder order = {emu_draw(2) == 1, emu_draw(2) == 1, emu_draw(~0ull)};
    emu_check_pause = emu_pause;
    emu_enqueue(s, [=] {
        if (emu_fails_now()) { return; }
        emu_check_launch((const void *)kernel, &grid.x, &block.x, shared, &values, sizeof values);
        emu_run_grid((const void *)kernel, grid, block, shared, order,
                     [&] { emu_call(kernel, values, std::index_sequence_for<P...>()); });
        emu_check_launch_ends();
    });
}
#define LAUNCH(kernel, grid, block, shared, stream, ...)                                           \
    do {                                                                                           \
        emu_launch(kernel, grid, block, shared, stream, __VA_ARGS__);                              \
        EMU_CHECK_LAUNCH();                                                                        \
    } while (0)
// What a program checks after a launch; the tests of the emulation itself check nothing.
#ifndef EMU_CHECK_LAUNCH
#define EMU_CHECK_LAUNCH()
#endif

// --- cuBLASLt: matrices are column-major; D = alpha op(A) op(B) + beta C, then the epilogue ------
typedef enum {
    CUBLAS_STATUS_SUCCESS,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;
static inline const char *cublasLtGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_INVALID_VALUE      ? "an unsupported value or parameter"
           : status == CUBLAS_STATUS_EXECUTION_FAILED ? "the GPU program failed to execute"
           : status == CUBLAS_STATUS_NOT_SUPPORTED    ? "the functionality is not supported"
                                                      : "success";
}
typedef enum { CUDA_R_32F = 0, CUDA_R_16BF = 14 } cudaDataType_t;
typedef enum { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 } cublasComputeType_t;
typedef enum { CUBLAS_OP_N, CUBLAS_OP_T } cublasOperation_t;
typedef enum {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_GELU_AUX = 32 | 128,
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = CUBLASLT_EPILOGUE_GELU_AUX | CUBLASLT_EPILOGUE_BIAS,
    CUBLASLT_EPILOGUE_DGELU = 64 | 128,
    CUBLASLT_EPILOGUE_BGRADB = 512
} cublasLtEpilogue_t;
enum {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12,
    CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26
};
enum {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5, // .. D: 8
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
};
enum {
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2,
    CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE = 4,
    CUBLASLT_REDUCTION_SCHEME_MASK = 7
};
struct EmuMatmulDesc {
    cublasOperation_t op[2];
    cublasLtEpilogue_t epilogue;
    void *bias, *aux; // aux: a matrix of D's shape and type
    int64_t aux_ld;
    int32_t bias_type; // -1: D's type
};
struct EmuLayout {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
};
struct EmuPreference {
    uint64_t workspace;
    uint32_t alignment[4];
    uint32_t reductions; // allowed where a sum is split
};
typedef EmuMatmulDesc *cublasLtMatmulDesc_t;
typedef EmuLayout *cublasLtMatrixLayout_t;
typedef EmuPreference *cublasLtMatmulPreference_t;
typedef struct {
    uint64_t workspace;
    uint32_t alignment[6]; // alignments assumed for A, B, C, D, bias, aux
    uint32_t number;       // index of the suggestion
    uint32_t rounds;       // the sum is split, and its parts are added in D's type
} cublasLtMatmulAlgo_t;
typedef struct {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state; // the rest is valid only if it is CUBLAS_STATUS_SUCCESS
} cublasLtMatmulHeuristicResult_t;
typedef void *cublasLtHandle_t;
static inline size_t cublasLtGetVersion() { return 1; }

// EMU_MATMULS=SEED makes the library suggest EMU_SUGGESTIONS algorithms for a product. They add in
// different orders, and their times depend only on the seed, the product and the algorithm; with
// EMU_MATMULS=SEED+rank also on the rank. Without EMU_MATMULS there is one suggestion: another one
// where B is aligned to less than 16 bytes.
enum { EMU_SUGGESTIONS = 3 };
static inline const char *emu_matmuls() { return getenv("EMU_MATMULS"); }
static inline double emu_matmul_ms(const EmuMatmulDesc &d, const EmuLayout &D, uint64_t k,
                                   uint32_t number) {
    const char *text = emu_matmuls(), *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (!text) { return 0; }
    const uint64_t seed = strtoull(text, NULL, 10) +
                          (strstr(text, "+rank") && rank ? 1000 * strtoull(rank, NULL, 10) : 0);
    const uint64_t product = mix64(mix64(mix64(D.rows) ^ D.cols) ^ k) ^ (uint64_t)d.epilogue;
    return 1e5 * (1 + (double)(random_u64(seed, product, number) % 1000));
}

static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) {
    *h = malloc(1);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) {
    free(h);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t,
                                                      cudaDataType_t scale) {
    *d =
        new EmuMatmulDesc{{CUBLAS_OP_N, CUBLAS_OP_N}, CUBLASLT_EPILOGUE_DEFAULT, NULL, NULL, 0, -1};
    return scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}
static inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    delete d;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, int attribute,
                                                            const void *value, size_t bytes) {
    const struct {
        int attribute;
        void *to;
        size_t bytes;
    } known[] = {{CUBLASLT_MATMUL_DESC_TRANSA, &d->op[0], 4},
                 {CUBLASLT_MATMUL_DESC_TRANSB, &d->op[1], 4},
                 {CUBLASLT_MATMUL_DESC_EPILOGUE, &d->epilogue, 4},
                 {CUBLASLT_MATMUL_DESC_BIAS_POINTER, &d->bias, 8},
                 {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &d->aux, 8},
                 {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &d->aux_ld, 8},
                 {CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &d->bias_type, 4}};
    for (const auto &k : known) {
        if (k.attribute == attribute && k.bytes == bytes) {
            memcpy(k.to, value, bytes);
            return CUBLAS_STATUS_SUCCESS;
        }
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}
static inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l,
                                                        cudaDataType_t type, uint64_t rows,
                                                        uint64_t cols, int64_t ld) {
    *l = new EmuLayout{type, rows, cols, ld};
    return rows && cols && ld >= (int64_t)rows ? CUBLAS_STATUS_SUCCESS
                                               : CUBLAS_STATUS_INVALID_VALUE;
}
static inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    delete l;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
    *p = new EmuPreference{0, {256, 256, 256, 256}, CUBLASLT_REDUCTION_SCHEME_MASK};
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    delete p;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                                  int attribute, const void *value,
                                                                  size_t bytes) {
    bool workspace = attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    if (bytes != (workspace ? 8 : 4)) { return CUBLAS_STATUS_INVALID_VALUE; }
    void *to = &p->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES];
    if (workspace) { to = &p->workspace; }
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) { to = &p->reductions; }
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
static inline uint64_t emu_op_rows(const EmuLayout *l, cublasOperation_t op) {
    return op == CUBLAS_OP_T ? l->cols : l->rows;
}
static inline uint64_t emu_op_cols(const EmuLayout *l, cublasOperation_t op) {
    return op == CUBLAS_OP_T ? l->rows : l->cols;
}
static inline uint32_t emu_alignment(const void *p) {
    return p ? std::min((uint32_t)((uintptr_t)p & -(uintptr_t)p), 256u) : 256;
}
static inline bool emu_has_aux(const EmuMatmulDesc &d) { return d.epilogue & 128; }
static inline bool emu_has_bias(const EmuMatmulDesc &d) {
    return d.epilogue & (CUBLASLT_EPILOGUE_BIAS | CUBLASLT_EPILOGUE_BGRADB);
}
// Products of bf16 and fp32 take a bias, and give a bias gradient, of D's type only.
static inline bool emu_bias_fits(const EmuMatmulDesc &d, const EmuLayout &D) {
    return !emu_has_bias(d) || d.bias_type == -1 || d.bias_type == (int32_t)D.type;
}
static inline bool emu_refuses(const char *what) {
    const char *refused = getenv("EMU_REFUSES");
    return refused && !strcmp(refused, what);
}
static inline bool emu_shapes_fit(cublasLtMatmulDesc_t d, const EmuLayout *A, const EmuLayout *B,
                                  const EmuLayout *C, const EmuLayout *D) {
    return emu_op_rows(A, d->op[0]) == D->rows &&
           emu_op_cols(A, d->op[0]) == emu_op_rows(B, d->op[1]) &&
           emu_op_cols(B, d->op[1]) == D->cols && C->rows == D->rows && C->cols == D->cols &&
           A->type == B->type && C->type == D->type &&
           (D->type == A->type || D->type == CUDA_R_32F);
}
static inline cublasStatus_t
cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t A,
                               cublasLtMatrixLayout_t B, cublasLtMatrixLayout_t C,
                               cublasLtMatrixLayout_t D, cublasLtMatmulPreference_t p, int most,
                               cublasLtMatmulHeuristicResult_t *results, int *count) {
    if (!emu_shapes_fit(d, A, B, C, D)) { return CUBLAS_STATUS_INVALID_VALUE; }
    if (emu_has_aux(*d) && (d->aux_ld % 8 || d->aux_ld < (int64_t)D->rows)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (!emu_bias_fits(*d, *D)) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    // The library may refuse this, so the code for that case is tested here.
    if (d->epilogue == CUBLASLT_EPILOGUE_BGRADB && A->type == CUDA_R_32F) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    const bool several = emu_matmuls() || emu_refuses("state") || emu_refuses("first");
    *count = std::min(most, several ? (int)EMU_SUGGESTIONS : 1);
    for (int i = 0; i < *count; i++) {
        results[i].state =
            i == 0 && emu_refuses("state") ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
        results[i].algo.workspace = results[i].workspaceSize = p->workspace;
        memcpy(results[i].algo.alignment, p->alignment, sizeof p->alignment);
        // The pointers' values determine these.
        results[i].algo.alignment[4] = emu_alignment(d->bias);
        results[i].algo.alignment[5] = emu_alignment(d->aux);
        results[i].algo.number = (uint32_t)(i + (p->alignment[1] < 16)) % EMU_SUGGESTIONS;
        // as cuBLASLt 13.1 does on an H200 with little workspace
        results[i].algo.rounds =
            p->workspace < 1 << 20 && (p->reductions & CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE);
    }
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t
cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t A,
                        cublasLtMatrixLayout_t B, cublasLtMatrixLayout_t C,
                        cublasLtMatrixLayout_t D, const cublasLtMatmulAlgo_t *algo,
                        cublasLtMatmulHeuristicResult_t *result) {
    result->workspaceSize = algo->workspace;
    result->state = CUBLAS_STATUS_SUCCESS;
    return emu_shapes_fit(d, A, B, C, D) && algo->number < EMU_SUGGESTIONS
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_NOT_SUPPORTED;
}

static inline float emu_load(const void *p, cudaDataType_t type, int64_t i) {
    return type == CUDA_R_16BF ? __bfloat162float(((const __nv_bfloat16 *)p)[i])
                               : ((const float *)p)[i];
}
static inline void emu_store(void *p, cudaDataType_t type, int64_t i, float x) {
    if (type == CUDA_R_16BF) {
        ((__nv_bfloat16 *)p)[i] = __float2bfloat16(x);
    } else {
        ((float *)p)[i] = x;
    }
}
// Returns op(X), column by column.
static inline std::vector<float> emu_operand(const void *x, const EmuLayout &l,
                                             cublasOperation_t op) {
    const int64_t rows = (int64_t)emu_op_rows(&l, op), cols = (int64_t)emu_op_cols(&l, op);
    std::vector<float> packed((size_t)(rows * cols));
    for (int64_t c = 0; c < cols; c++) {
        for (int64_t r = 0; r < rows; r++) {
            packed[(size_t)(c * rows + r)] =
                emu_load(x, l.type, op == CUBLAS_OP_T ? c + r * l.ld : r + c * l.ld);
        }
    }
    return packed;
}
static inline float emu_gelu_inner(float x) { return 0.7978845608f * (x + 0.044715f * x * x * x); }
static inline float emu_gelu_slope(float x) {
    const float t = tanhf(emu_gelu_inner(x));
    return 0.5f * (1.0f + t) +
           0.5f * x * (1.0f - t * t) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
}
static inline void emu_matmul(const EmuMatmulDesc &d, float alpha, const void *A,
                              const EmuLayout &Al, const void *B, const EmuLayout &Bl, float beta,
                              const void *C, const EmuLayout &Cl, void *D, const EmuLayout &Dl,
                              uint32_t number, bool rounds) {
    const std::vector<float> a = emu_operand(A, Al, d.op[0]), b = emu_operand(B, Bl, d.op[1]);
    const int64_t m = (int64_t)Dl.rows, n = (int64_t)Dl.cols,
                  k = (int64_t)emu_op_cols(&Al, d.op[0]);
#pragma omp parallel for schedule(static) if (m * n * k > 1000000)
    for (int64_t j = 0; j < n; j++) {
        std::vector<float> sum((size_t)m, 0.0f);
        for (int64_t turn = 0; turn < k; turn++) { // algorithms start at different terms
            const int64_t l = (turn + number * k / EMU_SUGGESTIONS) % k;
            const float x = b[(size_t)(j * k + l)], *column = a.data() + l * m;
#pragma omp simd
            for (int64_t i = 0; i < m; i++) { sum[(size_t)i] += column[i] * x; }
            for (int64_t i = 0; i < m && rounds && turn == k / 2; i++) {
                emu_store(D, Dl.type, i + j * Dl.ld, sum[(size_t)i]);
                sum[(size_t)i] = emu_load(D, Dl.type, i + j * Dl.ld);
            }
        }
        for (int64_t i = 0; i < m; i++) {
            float y = alpha * sum[(size_t)i] +
                      (beta != 0.0f ? beta * emu_load(C, Cl.type, i + j * Cl.ld) : 0.0f);
            if (d.epilogue & CUBLASLT_EPILOGUE_BIAS) { y += emu_load(d.bias, Dl.type, i); }
            if (d.epilogue == CUBLASLT_EPILOGUE_DGELU) {
                y *= emu_gelu_slope(emu_load(d.aux, Dl.type, i + j * d.aux_ld));
            }
            if (d.epilogue & 32) { // GELU
                emu_store(d.aux, Dl.type, i + j * d.aux_ld, y);
                y *= 0.5f * (1.0f + tanhf(emu_gelu_inner(y)));
            }
            emu_store(D, Dl.type, i + j * Dl.ld, y);
        }
        if (d.epilogue == CUBLASLT_EPILOGUE_BGRADB) {
            float total = 0.0f;
            for (int64_t l = 0; l < k; l++) { total += b[(size_t)(j * k + l)]; }
            emu_store(d.bias, Dl.type, j, total);
        }
    }
}
// Everything that a product accesses must be inside the tensors that it is given.
static inline size_t emu_extent(const EmuLayout &l) {
    return ((size_t)l.ld * (l.cols - 1) + l.rows) * (l.type == CUDA_R_16BF ? 2 : 4);
}
static inline void emu_check_matmul(const EmuMatmulDesc &d, const void *A, const EmuLayout &Al,
                                    const void *B, const EmuLayout &Bl, const void *C,
                                    const EmuLayout &Cl, void *D, const EmuLayout &Dl, bool adds) {
    const EmuLayout column = {Dl.type, Dl.rows, 1, (int64_t)Dl.rows};
    const EmuLayout aux = {Dl.type, Dl.rows, Dl.cols, d.aux_ld};
    const EmuLayout row = {Dl.type, Dl.cols, 1, (int64_t)Dl.cols};
    emu_check_library("cublasLtMatmul: matrix A", A, emu_extent(Al), false);
    emu_check_library("cublasLtMatmul: matrix B", B, emu_extent(Bl), false);
    if (adds) { emu_check_library("cublasLtMatmul: matrix C", C, emu_extent(Cl), false); }
    if (d.epilogue & CUBLASLT_EPILOGUE_BIAS) {
        emu_check_library("cublasLtMatmul: the bias", d.bias, emu_extent(column), false);
    }
    if (emu_has_aux(d)) {
        emu_check_library("cublasLtMatmul: what GELU is of", d.aux, emu_extent(aux),
                          d.epilogue & 32);
    }
    if (d.epilogue == CUBLASLT_EPILOGUE_BGRADB) {
        emu_check_library("cublasLtMatmul: the gradient of the bias", d.bias, emu_extent(row),
                          true);
    }
    emu_check_library("cublasLtMatmul: matrix D", D, emu_extent(Dl), true);
}
static inline cublasStatus_t
cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void *alpha, const void *A,
               cublasLtMatrixLayout_t Al, const void *B, cublasLtMatrixLayout_t Bl,
               const void *beta, const void *C, cublasLtMatrixLayout_t Cl, void *D,
               cublasLtMatrixLayout_t Dl, const cublasLtMatmulAlgo_t *algo, void *workspace,
               size_t workspace_bytes, cudaStream_t stream) {
    const void *pointers[6] = {A, B, C, D, d->bias, d->aux};
    for (int i = 0; i < 6; i++) {
        if ((uintptr_t)pointers[i] % algo->alignment[i]) {
            emu_fail("cublasLtMatmul: a matrix is less aligned than its algorithm was promised");
        }
    }
    if (!workspace && workspace_bytes) {
        emu_fail("cublasLtMatmul: NULL for a workspace of %zu bytes", workspace_bytes);
    }
    if (emu_has_aux(*d) && (!d->aux || (uintptr_t)d->aux % 16)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    const bool workspace_fits =
        workspace_bytes >= algo->workspace && (uintptr_t)workspace % 256 == 0;
    if (!emu_shapes_fit(d, Al, Bl, Cl, Dl) || !workspace_fits) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (emu_late_answer(cudaSuccess)) { return CUBLAS_STATUS_EXECUTION_FAILED; }
    if (algo->number == 0 && emu_refuses("state")) {
        emu_fail("cublasLtMatmul: a suggestion whose state is an error");
    }
    if ((algo->number == 0 && emu_refuses("first")) ||
        (d->epilogue != CUBLASLT_EPILOGUE_DEFAULT && emu_refuses("fused"))) {
        emu_last_error = cudaErrorInvalidValue; // the library's own call leaves one behind
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    emu_counts.epilogues += d->epilogue != CUBLASLT_EPILOGUE_DEFAULT;
    emu_counts.bias_gradients += d->epilogue == CUBLASLT_EPILOGUE_BGRADB;
    const EmuMatmulDesc desc = *d;
    const EmuLayout la = *Al, lb = *Bl, lc = *Cl, ld = *Dl;
    const float a = *(const float *)alpha, b = *(const float *)beta;
    const uint32_t number = algo->number;
    const bool rounds = algo->rounds && b == 0.0f;
    emu_enqueue(stream, [=] {
        if (EMU_CHECKS) {
            emu_check_matmul(desc, A, la, B, lb, C, lc, D, ld, b != 0.0f);
            emu_check_library("cublasLtMatmul: the workspace", workspace, workspace_bytes, true);
            // The product may leave anything in the workspace.
            if (workspace_bytes) { memset(workspace, 0xff, workspace_bytes); }
        }
        emu_matmul(desc, a, A, la, B, lb, b, C, lc, D, ld, number, rounds);
        emu_extra_ms += emu_matmul_ms(desc, ld, emu_op_cols(&la, desc.op[0]), number);
    });
    return CUBLAS_STATUS_SUCCESS;
}

#endif
