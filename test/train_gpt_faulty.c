// train_gpt_faulty.c: the program with a fault in it, for test_faults.py, and for test_gpu.py as C++. FAULT="HOW RANK STEP ACTION" (ACTION as
// --show-schedule prints it, STEP as the log counts) makes that rank, about to run that action in that step,
//   kill    die as by kill -9
//   stop    be stopped, as by kill -STOP
//   hang    live on without doing anything
//   crash   run into a segmentation fault
// LATE="SEED PERCENT" does an errand of the store (relay.h) that could be done now only in that share of all looks, drawn by lot.
// Quantized gradients of the tests' small models travel in several parcels here.
#include <signal.h>
#include "schedule.h" // Action

#define PARCEL_ELEMENTS 20000
#include <stdbool.h>
static void fault_here(const Action *a, int64_t step);
static bool errand_may_be_done(void);
#define EXECUTOR_HOOK(action, step) fault_here(action, step)
#define ERRAND_HOOK(errand) errand_may_be_done()
#ifdef __cplusplus
#include "train_gpt.cu" // the GPU build, emulated
#else
#include "train_gpt.c"
#endif

static bool errand_may_be_done(void) {
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
    if (!read || done || rank != speaker.rank || at != step + 1 || strcmp(action, action_names[a->kind])) { return; }
    done = true;
    if (!strcmp(how, "kill")) { raise(SIGKILL); }
    if (!strcmp(how, "stop")) { raise(SIGSTOP); }
    if (!strcmp(how, "crash")) { raise(SIGSEGV); }
    while (!strcmp(how, "hang")) { sleep(1); }
}
