// harness.h: what the unit tests of the C code share. Each is a program of cmocka, test/test_*.c,
// which includes the one header that it tests, then this.
//
// How to write one: functions `static void test_WHAT(void **state)` in a table that main gives to
// cmocka_run_group_tests; `make build/test_NAME && build/test_NAME`. A loop over many cases asks
// all_tests() whether it may take minutes, and draws its sample from test_seed(). A mistake that
// ends the program is tested in a child (run_child). Beside this: counts.h for programs that run
// under mpirun, policies.h for placements of states.
#ifndef TEST_HARNESS_H
#define TEST_HARNESS_H

#include "base/base.h" // EXIT_DONE

#include <setjmp.h> // cmocka wants these three first
#include <stdarg.h>
#include <stddef.h>
#ifdef __cplusplus
extern "C" { // which its header forgets in places
#endif
#include <cmocka.h>
#ifdef __cplusplus
}
#endif
#include <stdlib.h>   // getenv
#include <sys/wait.h> // waitpid
#include <unistd.h>   // fork, pipe

// Are the exhaustive forms asked for, with TEST_ALL=1?
static inline bool all_tests(void) {
    const char *text = getenv("TEST_ALL");
    return text && atoi(text);
}
// TEST_SEED, which test/run.py gives, or this number; it is printed.
static inline uint64_t test_seed(uint64_t otherwise) {
    const char *text = getenv("TEST_SEED");
    const uint64_t seed = text && *text ? strtoull(text, NULL, 10) : otherwise;
    printf("TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

// The exit code of a child that calls body(argument), EXIT_DONE if it returns, and what it said on
// stderr.
static inline int run_child(void (*body)(const void *), const void *argument, char *message,
                            size_t bytes) {
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        speaker.abort_job = NULL; // MPI does not survive a fork
        body(argument);
        _exit(EXIT_DONE); // stdout stays in its buffer
    }
    close(ends[1]);
    size_t held = 0;
    for (ssize_t got; (got = read(ends[0], message + held, bytes - 1 - held)) > 0;) {
        held += (size_t)got;
    }
    message[held] = 0;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

#endif
