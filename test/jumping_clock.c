// jumping_clock.c: a library to be preloaded: clocks as they look to a program on a machine whose
// time is set, or that is suspended. The wall clock jumps by up to a year, either way, at every
// look. The monotonic clock leaps an hour ahead now and then. CLOCK_FAST="before FILE" or "after
// FILE" in the environment: instead, it runs ten thousand times too fast before that file is there, or
// from then on, so that all work seems to take as much longer.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long leap;

// Adds to the time what has passed too fast.
static void run_fast(struct timespec *t, const char *when) {
    static double before, added;
    const double now = (double)t->tv_sec + 1e-9 * (double)t->tv_nsec;
    const int there = !access(strchr(when, ' ') + 1, F_OK);
    if (before && there == !strncmp(when, "after", 5)) { added += 9999 * (now - before); }
    before = now;
    t->tv_sec = (time_t)(now + added);
    t->tv_nsec = (long)((now + added - (double)t->tv_sec) * 1e9);
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    static unsigned looks;
    if (!real) { *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime"); }
    int result = real(clock, t);
    const char *fast = getenv("CLOCK_FAST");
    if (fast) {
        if (clock == CLOCK_MONOTONIC) { run_fast(t, fast); }
        return result;
    }
    if (__sync_add_and_fetch(&looks, 1) % 97 == 0) { __sync_add_and_fetch(&leap, 3600); }
    t->tv_sec += clock == CLOCK_REALTIME    ? rand() % 63072000 - 31536000
                 : clock == CLOCK_MONOTONIC ? leap
                                            : 0;
    return result;
}
time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) { *out = t.tv_sec; }
    return t.tv_sec;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
