// process.h: the program's standard streams, which may be full, closed or no longer read.
#ifndef PROCESS_H
#define PROCESS_H

#include "base/base.h"

#include <fcntl.h>  // open
#include <poll.h>   // is a pipe still read?
#include <signal.h> // SIGPIPE, SIGXFSZ

// A run must outlive whoever reads its output (train_gpt | head), and the shell's limit of a file's
// size (ulimit -f): what cannot be written is an error and no signal. A standard stream that is
// closed becomes one that can be neither read nor written, since a file of the run could take its
// number.
static bool output_closed; // from the start on
static inline void process_keep_streams(void) {
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    output_closed = fcntl(STDOUT_FILENO, F_GETFD) < 0;
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        const bool closed = fcntl(fd, F_GETFD) < 0;
        if (closed && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0) { return; }
    }
}
// Returns whether an open file is a pipe, socket or terminal whose reader is gone.
static inline bool output_is_left(int fd) {
    struct pollfd output = {.fd = fd, .events = POLLOUT};
    return poll(&output, 1, 0) == 1 && (output.revents & (POLLERR | POLLHUP));
}
// Sends on what was printed. Returns 0, or why not all could be written since the start (an errno).
static inline int output_flush(void) {
    static int error;
    if (fflush(stdout)) { error = errno; }
    return error ? error : ferror(stdout) ? EIO : 0;
}
// The same during training, which goes on: warns of the first failure.
static inline void output_flush_or_warn(void) {
    static bool warned;
    const int error = output_flush();
    if (!error || warned) { return; }
    warned = true;
    fprintf(stderr, "warning: cannot write to standard output: %s; training goes on\n",
            output_is_left(STDOUT_FILENO) ? "nobody reads it any more" : strerror(error));
}
// Ends the program (EXIT_RESOURCES) if not all that was printed could be written. Not if its reader
// has left, who has what they wanted. prints: printing is all that the program does.
static inline void output_end(bool prints) {
    const int error = output_flush();
    if (!error || output_is_left(STDOUT_FILENO) || (output_closed && !prints)) { return; }
    die(EXIT_RESOURCES, "is there space where it goes?", "cannot write to standard output: %s",
        strerror(error));
}

#endif
