// train_gpt_faulty.c: the program with a fault in it, for test_faults.py, and for test_gpu.py as
// C++. FAULT="HOW RANK STEP ACTION" (ACTION as --show-schedule prints it, STEP as the log counts)
// makes that rank, about to run that action in that step,
//   kill    die as by kill -9
//   stop    be stopped, as by kill -STOP
//   hang    live on without doing anything
//   slow    compute for three seconds, without using the core
//   crash   run into a segmentation fault
// LATE="SEED PERCENT" does an errand of the store (p2p.h) that could be done now only in that share
// of all looks, drawn by lot. DISK="HOW RANK N" for that rank's file of --offload-dir
// (state/disk.h):
//   short   each transfer stops before it is complete, by a part of a block, and every third is
//           interrupted before it begins
//   stuck   from the N-th transfer on nothing gets on, without an error
//   error   the N-th transfer fails
//   end     the file ends before what the N-th transfer wants
//   full    the file cannot be allocated
// TOUCHES=1 checks what each action touches (checked_touches.h), TEST_TILES=1 multiplies by tiles
// (emulated_tiles.h): both not as C++.
// Quantized gradients of the tests' small models travel in several parcels here. An architecture
// more has messages inside its blocks (toy.h).
#include "emulated_tiles.h"
#include <signal.h>
#include "schedule/actions.h" // Action

#define BUCKET_ELEMENTS 20000
#define ERROR_STEPS 8
#include <stdbool.h>
static void fault_here(const Action *a, int64_t step);
static bool deferred_may_run(void);
#include <sys/types.h>
static ssize_t faulty_read(int file, void *memory, size_t bytes, off_t at);
static ssize_t faulty_write(int file, const void *memory, size_t bytes, off_t at);
static int faulty_allocate(int file, off_t at, off_t bytes);
#define DISK_READ faulty_read
#define DISK_WRITE faulty_write
#define DISK_ALLOCATE faulty_allocate
#define DEFERRED_HOOK(op) deferred_may_run()
#ifdef __cplusplus
#define EXECUTOR_HOOK(action, step) fault_here(action, step)
#include "train_gpt.cu" // the GPU build, emulated
#else
static bool checks_touches(void);
static void checked_before(void *executor, const void *action, int index, long long step);
static void checked_after(void *executor);
#define EXECUTOR_HOOK(action, step)                                                                \
    do {                                                                                           \
        fault_here(action, step);                                                                  \
        if (checks_touches()) { checked_before(e, action, index, step); }                          \
    } while (0)
#define EXECUTOR_DONE(executor)                                                                    \
    do {                                                                                           \
        if (checks_touches()) { checked_after(executor); }                                         \
    } while (0)
#define COMM_BEGUN(c, request)                                                                     \
    do {                                                                                           \
        if (checks_touches()) { comm_wait(c, request); }                                           \
    } while (0)
#include "toy.h"
#include "train_gpt.c"
#include "checked_touches.h"
static bool checks_touches(void) {
    static int asked = -1;
    if (asked < 0) { asked = getenv("TOUCHES") != NULL; }
    return asked;
}
#endif

static bool deferred_may_run(void) {
    static uint64_t draws;
    long long seed = 0, percent = 100;
    const char *late = getenv("LATE");
    if (!late || sscanf(late, "%lld %lld", &seed, &percent) != 2) { return true; }
    return random_u64((uint64_t)seed, (uint64_t)speaker.rank, draws++) % 100 < (uint64_t)percent;
}
static void fault_here(const Action *a, int64_t step) {
    static bool done;
    char how[16] = "", action[32] = "";
    int rank = -1;
    long long at = -1;
    const char *fault = getenv("FAULT");
    bool read = fault && sscanf(fault, "%15s %d %lld %31s", how, &rank, &at, action) == 4;
    if (!read || done || rank != speaker.rank || at != step + 1 ||
        strcmp(action, action_name(a->kind))) {
        return;
    }
    done = true;
    if (!strcmp(how, "kill")) { raise(SIGKILL); }
    if (!strcmp(how, "stop")) { raise(SIGSTOP); }
    if (!strcmp(how, "crash")) { raise(SIGSEGV); }
    while (!strcmp(how, "hang")) { sleep(1); }
    for (int i = 0; i < 300 && !strcmp(how, "slow"); i++) {
        keep_alive();
        usleep(10000);
    }
}

// How the disk of this rank fails: the first letter of HOW, 0: not at all; *at: N.
static char disk_fault(int64_t *at) {
    char how[16] = "";
    int rank = -1;
    long long n = 0;
    const char *fault = getenv("DISK");
    const bool mine =
        fault && sscanf(fault, "%15s %d %lld", how, &rank, &n) >= 2 && rank == speaker.rank;
    *at = n;
    return mine ? strcmp(how, "stuck") ? *how : 'k' : 0;
}
// What a transfer comes to instead: fewer bytes of it, or -1 or 0, an error or the end of the file.
// Several threads ask.
static ssize_t disk_comes_to(size_t bytes) {
    static int64_t transfers;
    int64_t n;
    const char how = disk_fault(&n);
    const int64_t now = __atomic_add_fetch(&transfers, 1, __ATOMIC_SEQ_CST);
    if (how == 's' && now % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    if (how == 's' && bytes > 3 * DISK_GRAIN / 2) { return (ssize_t)(bytes - DISK_GRAIN / 2); }
    if (how == 'k' && now >= n) { return 1; }
    if (how == 'e' && now == n) { return strstr(getenv("DISK"), "end") ? 0 : (errno = EIO, -1); }
    return (ssize_t)bytes;
}
static ssize_t faulty_read(int file, void *memory, size_t bytes, off_t at) {
    const ssize_t n = disk_comes_to(bytes),
                  all = n == (ssize_t)bytes || n > DISK_GRAIN ? pread(file, memory, bytes, at) : 0;
    // what has not come
    if (n > 0 && n < (ssize_t)bytes) { memset((char *)memory + n, 0x7f, bytes - (size_t)n); }
    return all < 0 ? all : n;
}
static ssize_t faulty_write(int file, const void *memory, size_t bytes, off_t at) {
    const ssize_t n = disk_comes_to(bytes), whole = n / DISK_GRAIN * DISK_GRAIN;
    const ssize_t written = whole > 0 ? pwrite(file, memory, (size_t)whole, at) : 0;
    return written < 0 ? written : n;
}
static int faulty_allocate(int file, off_t at, off_t bytes) {
    int64_t n;
    return disk_fault(&n) == 'f' ? ENOSPC : posix_fallocate(file, at, bytes);
}
