// spin.h: how long a thread of OpenMP that waits for others spins before it sleeps.
//
// On an idle machine it is best to spin for milliseconds, as libgomp does by default: waking a
// thread takes long. On a busy machine a spinning thread takes the core from the very thread that
// it waits for, and a step of 20 ms takes seconds. libgomp has two numbers of turns, which it reads
// before main (its manual, OMP_WAIT_POLICY and GOMP_SPINCOUNT): the second one holds while a
// process has more OpenMP threads than the machine has cores. So the program starts itself once
// more with a second number of its own, and adds sleeping OpenMP threads while its threads have to
// wait for cores. A setting of the user stays as it is.
#ifndef SPIN_H
#define SPIN_H

#include "base/base.h"

#include <dirent.h>   // threads of this process
#include <omp.h>      // omp_get_num_procs
#include <pthread.h>  // the watcher
#include <signal.h>   // signals go to other threads
#include <sys/auxv.h> // how the program was loaded

// Turns on an idle machine: some milliseconds. On a busy one, the policy "active" makes it 1000,
// some 10 microseconds.
#define SPIN_TURNS "300000"
#define SPIN_POLICY "active"
static const double SPIN_INTERVAL_S = 0.1;  // between two looks
static const double SPIN_BUSY = 0.1;        // share of an interval that a busy machine takes
static const int SPIN_CALM_INTERVALS = 10;  // without it until the threads may spin again
static const int SPIN_SLEEPERS_LIMIT = 128; // more threads could exceed a container's limit

static inline bool environment_has(const char *name, const char *value) {
    const char *now = getenv(name);
    return now && !strcmp(now, value);
}
// Whether the environment has the settings of spin_restart().
static inline bool spin_is_ours(void) {
    return environment_has("GOMP_SPINCOUNT", SPIN_TURNS) &&
           environment_has("OMP_WAIT_POLICY", SPIN_POLICY);
}
// Starts the program once more with our settings. The process stays the same, with its number,
// files and signals. Where the program's file cannot be found, the run goes on without them. Call
// it before MPI starts.
static inline void spin_restart(char **argv) {
    char path[4096];
    const bool loaded_by_name = !getauxval(AT_BASE); // /proc/self/exe may be the loader, ld.so
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY") || loaded_by_name) { return; }
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path);
    if (n <= 0 || n == sizeof path || setenv("GOMP_SPINCOUNT", SPIN_TURNS, 1) ||
        setenv("OMP_WAIT_POLICY", SPIN_POLICY, 1)) {
        return;
    }
    path[n] = 0;
    execv(path, argv); // by its path: the process keeps its name
}

// Returns how long the process's threads have waited for a core, ready to run, in seconds; below 0
// if the system does not tell.
static inline double threads_waited_for_cores(void) {
    double waited_s = -1;
    DIR *tasks = opendir("/proc/self/task");
    if (!tasks) { return -1; }
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[300];
        unsigned long long ran_ns, waited_ns;
        snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", task->d_name);
        FILE *f = task->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (!f) { continue; }
        if (fscanf(f, "%llu %llu", &ran_ns, &waited_ns) == 2) {
            waited_s = (waited_s < 0 ? 0 : waited_s) + (double)waited_ns * 1e-9;
        }
        fclose(f);
    }
    closedir(tasks);
    return waited_s;
}

// The watcher's thread. sleepers: int*, the number of threads to add. At the start they are added,
// since a busy machine shows only after a while, and they stay where the system does not tell. A
// team of OpenMP threads that has worked once stays, asleep, until it is released.
static void *spin_watch(void *sleepers) {
    double waited_s = threads_waited_for_cores();
    int calm = 0;                                       // intervals without other programs
    pthread_setname_np(pthread_self(), "spin watcher"); // its sleepers inherit the name
    for (bool added = false;;) {
        if (!calm && !added) {
            added = true;
#pragma omp parallel num_threads(*(int *)sleepers)
            { (void)*(volatile int *)sleepers; } // a team without any work would be left out
        } else if (added && calm == SPIN_CALM_INTERVALS) {
            added = false;
            omp_pause_resource_all(omp_pause_soft);
        }
        usleep((useconds_t)(SPIN_INTERVAL_S * 1e6));
        const double before_s = waited_s;
        waited_s = threads_waited_for_cores();
        const bool busy = waited_s < 0 || waited_s - before_s > SPIN_BUSY * SPIN_INTERVAL_S;
        calm = busy ? 0 : calm + 1;
    }
    return NULL;
}

// Watches from now on whether the machine is busy, if the settings are ours. threads: those that
// compute. cores: those that the process could use when it started, by which libgomp counts. Call
// it once.
static inline void spin_follow_load(int threads, int cores) {
    static int sleepers;
    sigset_t all, before;
    pthread_t watcher;
    sleepers = cores - threads + 2;
    if (!spin_is_ours() || threads < 2 || sleepers < 2 || sleepers > SPIN_SLEEPERS_LIMIT) {
        return;
    }
    sigfillset(&all); // signals are for the thread that trains
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!pthread_create(&watcher, NULL, spin_watch, &sleepers)) { pthread_detach(watcher); }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

#endif
