// version.h: --version, what this program was made from, and with what; and --help.
#ifndef VERSION_H
#define VERSION_H

#include "base/spin.h"
#include "cli/option_help.h"
#include "comm/mpi.h"
#include "ops/ops.h"

#define TRAIN_GPT_VERSION "2.0"
#ifndef COMMIT // the Makefile gives it
#define COMMIT ""
#endif
#ifdef __clang__
#define COMPILER __VERSION__ // with its name
#else
#define COMPILER "GCC " __VERSION__
#endif
#ifdef __cplusplus
#define LANGUAGE "C++17"
#else
#define LANGUAGE "C11"
#endif

static inline void version_print(FILE *to) {
    char mpi[MPI_MAX_LIBRARY_VERSION_STRING] = "", operations[200];
    const bool ours = spin_is_ours();
    const char *policy = getenv("OMP_WAIT_POLICY"), *spin = getenv("GOMP_SPINCOUNT");
    int n;
    MPI_Get_library_version(mpi, &n);
    mpi[strcspn(mpi, ",\n")] = 0;
    ops_build(operations, sizeof operations);
    fprintf(to,
            "train_gpt %s, commit %s\n"
            "compiler   %s, %s\n"
            "messages   %s\n"
            "operations %s\n"
            "threads    wait by %s%s\n",
            TRAIN_GPT_VERSION, *COMMIT ? COMMIT : "unknown", COMPILER, LANGUAGE, mpi, operations,
            ours     ? "the load of the machine"
            : policy ? "OMP_WAIT_POLICY="
            : spin   ? "GOMP_SPINCOUNT="
                     : "the default of OpenMP",
            ours     ? ""
            : policy ? policy
            : spin   ? spin
                     : "");
}

// Answers --help and --version, which need no other flag, unless `prints` is false. Returns whether
// one of them is there.
static inline bool print_help_or_version(int argc, char **argv, bool prints) {
    const char *topic = options_ask_help(argc, argv);
    bool version = false;
    for (int i = 1; i < argc; i++) { version = version || !strcmp(argv[i], "--version"); }
    if (topic && prints) { options_help(stdout, topic); }
    if (version && !topic && prints) { version_print(stdout); }
    return topic || version;
}

#endif
