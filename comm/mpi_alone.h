// mpi_alone.h: the MPI functions that the program calls, for a job of one rank, so that a build for
// one rank needs no MPI (make MPI=0). Names, parameters and results are those of the MPI standard.
//
// One rank     Groups have one member. A collective copies what the rank itself contributes. No
//              operation fails.
// No messages  A rank sends nothing to itself (a group of one copies), so to send or to receive is
//              a programmer error. The only request is the watch's persistent receive, which nobody
//              answers: it is never complete.
// Launchers    MPI_Init_thread() refuses to be one of several processes of a launcher. Each of them
//              would train the whole model, and write the same files.
#ifndef COMM_MPI_ALONE_H
#define COMM_MPI_ALONE_H

#include "base/base.h"

typedef int MPI_Comm, MPI_Request, MPI_Info, MPI_Errhandler;
typedef int MPI_Datatype; // the bytes of an element
typedef struct {
    int MPI_SOURCE, MPI_TAG;
} MPI_Status;
enum { MPI_COMM_NULL, MPI_COMM_WORLD };
enum { MPI_REQUEST_NULL, MPI_REQUEST_RECEIVE }; // the second one: the watch's
enum { MPI_BYTE = 1, MPI_INT = sizeof(int), MPI_INT64_T = sizeof(int64_t) };
enum {
    MPI_SUCCESS = 0,
    MPI_UNDEFINED = -1,
    MPI_ANY_SOURCE = -1,
    MPI_ANY_TAG = -1,
    MPI_INFO_NULL = 0,
    MPI_ERRORS_RETURN = 0,
    MPI_COMM_TYPE_SHARED = 0,
    MPI_THREAD_FUNNELED = 1,
    MPI_MAX_ERROR_STRING = 16,
    MPI_MAX_LIBRARY_VERSION_STRING = 64,
};
// Most parameters say which rank, group or operation is meant, and there is one.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define MPI_STATUS_IGNORE ((MPI_Status *)NULL)
#define MPI_STATUSES_IGNORE ((MPI_Status *)NULL)

// -------------------------------------------------------------------------------------------------
// Start and end

// What a launcher tells each process that it starts: its rank, and how many there are. These
// variables are set for launched processes only; others, such as SLURM_NTASKS, are also set in the
// shell of an allocation, where one program is started by hand.
typedef struct {
    const char *rank, *ranks; // ranks NULL: the launcher does not say
} MpiLauncher;
static const MpiLauncher mpi_launchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, // Open MPI
    {"PMI_RANK", "PMI_SIZE"},                         // MPICH, Intel MPI, Flux, Cray
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},   // MVAPICH2
    {"PMIX_RANK", NULL},                              // PRRTE
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},         // srun
};
// Returns the number in an environment variable; 0: there is none.
static inline int mpi_environment(const char *name) {
    const char *text = name ? getenv(name) : NULL;
    return text ? atoi(text) : 0;
}
// Ends the program (EXIT_INPUT) if a launcher has started several processes of it. The launcher
// that is nearest to the program counts: mpirun -np 1 in a step of Slurm starts one process. Rank 0
// speaks for the others, unless its launcher does not say that there are any.
static inline void mpi_refuse_ranks(void) {
    for (int i = 0; i < LENGTH_OF(mpi_launchers); i++) {
        const MpiLauncher *l = &mpi_launchers[i];
        const int rank = mpi_environment(l->rank), ranks = mpi_environment(l->ranks);
        if (ranks == 1) { return; }
        if (rank > 0 && ranks > 1) {
            sleep(3); // rank 0 speaks meanwhile; then most launchers end this process
            _exit(EXIT_INPUT);
        }
        if (rank > 0 || ranks > 1) {
            const char *name = ranks > 1 ? l->ranks : l->rank;
            speaker.rank = rank;
            die(EXIT_INPUT,
                "start it without a launcher, or build it with MPI; or unset the variable, if only "
                "one process was started",
                "%s=%s: a launcher has started this program several times, and it was built for "
                "one rank, without MPI (make MPI=0)",
                name, getenv(name));
        }
    }
}
static inline int MPI_Init_thread(int *argc, char ***argv, int wanted, int *provided) {
    mpi_refuse_ranks();
    *provided = wanted;
    return MPI_SUCCESS;
}
static inline int MPI_Finalize(void) { return MPI_SUCCESS; }
static inline int MPI_Abort(MPI_Comm c, int code) { _exit(code); }
static inline int MPI_Get_library_version(char *text, int *length) {
    *length =
        snprintf(text, MPI_MAX_LIBRARY_VERSION_STRING, "none: built without MPI for one rank");
    return MPI_SUCCESS;
}
static inline int MPI_Error_string(int error, char *text, int *length) {
    *length = snprintf(text, MPI_MAX_ERROR_STRING, "error %d", error % 1000);
    return MPI_SUCCESS;
}

// -------------------------------------------------------------------------------------------------
// Groups of ranks

static inline int MPI_Comm_rank(MPI_Comm c, int *rank) {
    *rank = 0;
    return MPI_SUCCESS;
}
static inline int MPI_Comm_size(MPI_Comm c, int *ranks) {
    *ranks = 1;
    return MPI_SUCCESS;
}
static inline int MPI_Comm_dup(MPI_Comm c, MPI_Comm *copy) {
    *copy = c;
    return MPI_SUCCESS;
}
static inline int MPI_Comm_split_type(MPI_Comm c, int type, int key, MPI_Info info,
                                      MPI_Comm *part) {
    *part = c;
    return MPI_SUCCESS;
}
static inline int MPI_Comm_set_errhandler(MPI_Comm c, MPI_Errhandler handler) {
    return MPI_SUCCESS;
}
static inline int MPI_Comm_free(MPI_Comm *c) {
    *c = MPI_COMM_NULL;
    return MPI_SUCCESS;
}
// The root has the data already.
static inline int MPI_Bcast(void *data, int count, MPI_Datatype type, int root, MPI_Comm c) {
    return MPI_SUCCESS;
}
static inline int MPI_Allgather(const void *mine, int count, MPI_Datatype type, void *all,
                                int all_count, MPI_Datatype all_type, MPI_Comm c) {
    assert(count * type == all_count * all_type);
    memcpy(all, mine, (size_t)count * (size_t)type);
    return MPI_SUCCESS;
}

// -------------------------------------------------------------------------------------------------
// Messages

static inline int MPI_Isend(const void *data, int count, MPI_Datatype type, int rank, int tag,
                            MPI_Comm c, MPI_Request *request) {
    *request = MPI_REQUEST_NULL;
    die(EXIT_PEER, "please report this", "a message to rank %d, in a job of one rank", rank);
}
static inline int MPI_Irecv(void *data, int count, MPI_Datatype type, int rank, int tag, MPI_Comm c,
                            MPI_Request *request) {
    return MPI_Isend(data, count, type, rank, tag, c, request);
}

static inline int MPI_Recv_init(void *data, int count, MPI_Datatype type, int rank, int tag,
                                MPI_Comm c, MPI_Request *request) {
    *request = MPI_REQUEST_RECEIVE;
    return MPI_SUCCESS;
}
static inline int MPI_Start(MPI_Request *request) { return MPI_SUCCESS; }
static inline int MPI_Cancel(MPI_Request *request) { return MPI_SUCCESS; }
static inline int MPI_Request_free(MPI_Request *request) {
    *request = MPI_REQUEST_NULL;
    return MPI_SUCCESS;
}
static inline int MPI_Request_get_status(MPI_Request request, int *done, MPI_Status *status) {
    *done = request == MPI_REQUEST_NULL;
    return MPI_SUCCESS;
}
static inline int MPI_Test(MPI_Request *request, int *done, MPI_Status *status) {
    if (status) { status->MPI_SOURCE = status->MPI_TAG = MPI_ANY_TAG; } // "empty"
    return MPI_Request_get_status(*request, done, status);
}
static inline int MPI_Testsome(int count, MPI_Request *requests, int *done, int *which,
                               MPI_Status *statuses) {
    *done = MPI_UNDEFINED; // no request is active
    return MPI_SUCCESS;
}

#pragma GCC diagnostic pop
#endif
