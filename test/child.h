// child.h: runs a body that may end the program, in a child process. For tests of die().
#ifndef CHILD_H
#define CHILD_H

#include "base/base.h" // EXIT_DONE

#include <sys/wait.h> // waitpid
#include <unistd.h>   // fork, pipe

// The exit code of a child that calls body(argument), EXIT_DONE if it returns, and what it said on
// stderr. Include after cmocka.h.
static int run_child(void (*body)(const void *), const void *argument, char *message,
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
