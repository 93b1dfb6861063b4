// comm.h: messages between ranks, as non-blocking, deterministic collectives whose bytes are
// counted.
//
// A collective is our own sequence of MPI point-to-point messages. So the messages, their links and
// the order of all sums depend on no library, setting or timing.
//
// Data       A collective over a group of n members divides an array into n slices by n + 1
//            ascending element bounds. Slice i belongs to member i and may be empty. NCCL needs
//            slices as store_bounds() cuts them: all of the same length, except that the last ones
//            end where the array ends. It also needs an array, and a slice that is stored
//            elsewhere, to have free space behind them for what the last slices lack
//            (bounds_padded), which an all-gather or a reduce-scatter may read and write.
// Levels     A group that has equally many members (more than one) on each of several nodes works
//            on two levels: inside each node, and between the members of the same local index on
//            different nodes. A slice then crosses to each other node exactly once. All other
//            groups work as if all members were on one node.
// Sums       A reduction adds the members of a node in member order, then the nodes in their order,
//            always in fp32. With wire bf16, every contribution (also the owner's) and every sum of
//            a node is first rounded to bf16, to nearest even.
// Progress   Collectives run one after another in the order of their start, which must be the same
//            on all their members. The head of the queue advances whenever comm_progress() is
//            called (operations call it between tiles) or this rank waits. A reduction runs piece
//            by piece through the staging buffer, with several pieces in flight. Messages between
//            two ranks are independent of the collectives and of each other.
// Lost ranks A waiting rank watches the ranks that it waits for. For ranks of its own machine it
//            reads in /proc whether they have ended or are stopped. It also sends questions to all
//            ranks that it waits for. A rank that computes answers from comm_progress(). A rank
//            that waits answers how long ago it last saw progress, its own or that of the ranks
//            that it waits for. So a slow rank may take any time, and a rank that is lost, stuck or
//            in a circle of waiting ranks is found after timeout_s. Time in which this process
//            itself did not run (it was suspended, or the machine was asleep) does not count.
// Transport  MPI reaches host memory. For collectives over the memory of another device, a
//            CommTransport carries the counted collectives under the same rules (comm_nccl.cuh).
//            Setup, scalars and the watch stay here.
// Invariants From start to completion a buffer belongs to its operation. Nothing is allocated here
//            after comm_allocate(). One thread makes all calls. A failure or a lost rank ends all
//            ranks with EXIT_PEER and a message that names the lost rank, the operation, the unit
//            and the step.
#ifndef COMM_H
#define COMM_H

// groups; included first, because base.h below it requests the GNU extensions
#include "comm/group.h"

#define OMPI_SKIP_MPICXX 1 // the C interface only
#include "base/cores.h"    // assignment of cores to ranks
#include <limits.h>        // INT_MAX
#include <mpi.h>           // point-to-point messages
#include <sched.h>         // sched_yield
#include <signal.h>        // the deadline of MPI's own start and end
#include <spawn.h>         // starts a shell that outlives this rank

enum {
    COMM_QUEUE = 1024,         // limit of collectives started and not completed
    COMM_SLOTS = 8,            // pieces of a reduction in flight
    COMM_PART_BYTES = 8 << 20, // limit of one MPI message, so that slow links show progress
    // tags of messages of collectives: inside a node (or the only level), between nodes
    TAG_LOCAL = 1,
    TAG_NODES = 2,
    TAG_QUESTION = 3, // from a waiting rank to the ranks that it waits for
    TAG_ANSWER = 4,
    TAG_MESSAGE = 5, // messages between two ranks on channel 0; further channels use higher tags
    COMM_MESSAGES = 4096,   // limit of such messages posted and not complete
    COMM_MPI_START_S = 120, // limit of MPI's own start, before the options are known
    // Eight slots of 1 MiB: large enough for few round trips while operations compute between two
    // polls, and small enough that received data is summed from the cache.
    COMM_STAGING_BYTES = 8 << 20,
};
// A rank of this machine that is stopped for this long counts as lost.
static const double COMM_STOPPED_S = 2;

typedef int64_t CommHandle; // a collective; 0: complete

typedef struct {
    CommKind kind;
    int unit; // unit, step, what: label for error messages
    int64_t step;
    const char *what;
    const Group *group;
    const int64_t *bounds, *recv_bounds;
    const char *in;
    char *out;
    size_t element_bytes;
    DType wire;
    bool counted; // bytes are counted (all operations except setup and scalars)
    int phase;    // PHASE_NEW: not begun; else the phase whose messages are in flight
} CommOp;

// A piece of a reduction in flight. Slot 0 also holds the messages of all other collectives.
typedef struct {
    int state; // 0: free, 1: waits for contributions, 2: waits for the sums of other nodes
    int64_t piece;
    int requests, open; // requests posted; those of them that are not complete
    MPI_Request *request;
    int *peer; // the other rank of each request
} CommSlot;

// A message between two ranks, independent of the collectives.
typedef int64_t CommRequest; // 0 and old requests are complete
typedef struct {
    MPI_Request request;
    bool send;
    int peer, unit; // unit, step, what: label for error messages
    int64_t step;
    const char *what;
} CommMessage;
// A bound on these messages, from which the transport takes memory and makes connections.
typedef struct {
    size_t bytes; // of the longest message; 0: no rank sends any
    int most;     // messages under way at a time; further ones wait for each other
    int *peers;   // [count] the other ranks, ascending
    int count;
} CommTraffic;

// Where a rank runs, as that rank reports it.
typedef struct {
    char host[64];
    // began: start time, field 22 of /proc/PID/stat; detects a pid that the system has reused
    int64_t pid, began;
} CommPlace;
// What this rank knows about another one.
typedef struct {
    CommPlace place;
    bool visible;    // its entry in /proc can be read from here
    bool awaited;    // an operation of this rank waits for its messages
    double fresh;    // time of its last known progress, on the watch's clock
    double asked;    // time of the last question to it
    double answered; // time of its last answer
    double stopped;  // since when it is seen stopped; negative: not stopped
    int64_t sent[2]; // the last question and answer, while in flight
    MPI_Request sending[2];
} CommPeer;

// Carries the counted collectives and the messages between two ranks where MPI does not. In the CPU
// build all functions are NULL. Its handles are negative and count down from -1; its requests do so
// too, independently.
typedef struct Comm Comm;
typedef struct {
    const char *name; // "mpi", "nccl", "staged"
    // Prepares a group. All members call it before the first collective of the group.
    void (*join)(Comm *c, Group *g);
    // Announces memory over which collectives of the group will run; may be NULL.
    void (*share)(Comm *c, const Group *g, void *memory, size_t bytes);
    // Starts a collective that runs after the work which the compute stream holds now.
    CommHandle (*start)(Comm *c, const CommOp *op);
    // Later work of the compute stream sees the result. The host need not wait.
    void (*wait)(Comm *c, CommHandle handle);
    // Posts a message; ordered after the compute stream's work as in `start`.
    CommRequest (*post)(Comm *c, bool send, int peer, void *data, size_t bytes);
    void (*wait_message)(Comm *c, CommRequest t); // as `wait`
    // Updates `waits` and looks for errors; may be NULL.
    void (*poll)(Comm *c);
    void (*end)(Comm *c);
    void *state;
    // the oldest operation for which the device waits for other members; NULL: none. A message
    // appears as a COMM_SEND of a group of two members.
    const CommOp *waits;
    int sharing; // number of ranks that share this rank's device
} CommTransport;

struct Comm {
    int rank, ranks;
    // local_*: among the ranks of this machine, whatever --ranks-per-node says
    int node, nodes, local_rank, local_ranks;
    int *node_of;        // [ranks] node of each rank
    bool oversubscribed; // more local ranks than cores: a waiting rank yields at once
    Group everyone;      // the group of all ranks, in order
    // time without progress after which a rank counts as lost, in seconds; 0: no limit
    double timeout_s;
    int64_t bytes[COMM_KINDS][LINK_KINDS]; // sent by this rank since comm_reset_counters()
    double waited_s;                       // time spent waiting since then
    // label of the operations that start next (comm_label)
    const char *what;
    int unit;
    int64_t step;
    int channel; // channel of the messages that are posted next (see below)
    // Called repeatedly while this rank waits; NULL: nothing else to do.
    void (*idle_callback)(void *of);
    void *idle_context;
    // private
    MPI_Comm world, questions;
    CommOp queue[COMM_QUEUE]; // ring: operations first .. started - 1 are not complete
    int64_t first, started;
    CommSlot slot[COMM_SLOTS];
    CommMessage message[COMM_MESSAGES]; // ring: request t is message t modulo its size
    // the last posted; all up to it are complete; the one that this rank waits for now, or 0
    CommRequest posted, settled, awaited;
    int request_capacity, *completed; // [request_capacity] indices from MPI_Testsome
    // of the reduction at the head of the queue: pieces begun, pieces complete, elements of a piece
    int64_t next_piece, done_pieces, piece_elements;
    char *staging;
    size_t staging_bytes;
    const float **sources; // [ranks] the terms of a sum
    int64_t *small_bounds; // [ranks + 1] for setup exchanges
    int *small_values;     // [ranks]
    CommPeer *peers;       // [ranks]
    // the watch: seconds for which this rank has been seen waiting; seconds_now() of its last look
    double clock, looked;
    double fresh;    // on that clock: the last progress of what this rank waits for
    double answered; // seconds_now() of the last look for questions
    int64_t heard;   // the question or answer that arrives next
    MPI_Request hearing;
    CommTransport transport;
};
static Comm *comm_running; // for comm_progress(), which takes no argument

// -------------------------------------------------------------------------------------------------
// Ending the job
static inline void comm_abort_job(int code) {
    alarm(5); // in case MPI itself hangs and cannot end the job
    MPI_Abort(MPI_COMM_WORLD, code);
}

// With Open MPI 4.1, mpirun and its daemons on other hosts wait for ever for a host that they
// cannot reach. This starts a shell that outlives this rank and, after five seconds, kills the
// launcher above this rank if it still runs.
static inline void comm_end_launcher(void) {
    char path[64], name[32] = "", command[96];
    snprintf(path, sizeof path, "/proc/%d/comm", (int)getppid());
    FILE *f = fopen(path, "r");
    bool launcher =
        f && fgets(name, sizeof name, f) &&
        (!strcmp(name, "mpirun\n") || !strcmp(name, "orterun\n") || !strcmp(name, "orted\n"));
    if (f) { fclose(f); }
    if (!launcher) { return; }
    snprintf(command, sizeof command, "exec </dev/null >/dev/null 2>&1; sleep 5; kill -9 %d",
             (int)getppid());
    char shell[] = "sh", option[] = "-c", *words[] = {shell, option, command, NULL};
    pid_t pid;
    posix_spawnattr_t own_session;
    posix_spawnattr_init(&own_session);
    posix_spawnattr_setflags(&own_session, POSIX_SPAWN_SETSID);
    posix_spawnp(&pid, shell, NULL, &own_session, words, environ);
    posix_spawnattr_destroy(&own_session);
}

// The watch cannot cover MPI's own start and end. There a deadline ends this rank; mpirun then ends
// the others.
static int comm_deadline_s;
static void comm_deadline_missed(int signal_number) {
    (void)signal_number;
    SignalText t = {"", 0};
    signal_text_add(&t, "train_gpt: rank ");
    signal_text_add_int(&t, speaker.rank);
    signal_text_add(&t, ": MPI's start or end took longer than ");
    signal_text_add_int(&t, comm_deadline_s);
    signal_text_add(&t, " s\n  hint: a rank is stopped or cut off, or a host cannot be reached\n");
    signal_text_write(&t);
    _exit(EXIT_PEER);
}
static inline void comm_deadline(int seconds) { // 0: ends the deadline
    comm_deadline_s = seconds;
    signal(SIGALRM, seconds ? comm_deadline_missed : SIG_DFL);
    alarm((unsigned)seconds);
}

static inline void comm_describe_message(SignalText *t, const char *what, int unit, bool send,
                                         int peer, int64_t step) {
    signal_text_add(t, what ? what : "?");
    signal_text_add(t, " of unit ");
    signal_text_add_int(t, unit);
    signal_text_add(t, send ? " to rank " : " from rank ");
    signal_text_add_int(t, peer);
    signal_text_add(t, ", step ");
    signal_text_add_int(t, step + 1); // counted from 1, as in the log
}
// Describes what this rank waits for. Safe in signal handlers.
static inline void comm_describe_waiting(const Comm *c, SignalText *t) {
    if (c->awaited) {
        const CommMessage *m = &c->message[c->awaited % COMM_MESSAGES];
        comm_describe_message(t, m->what, m->unit, m->send, m->peer, m->step);
        return;
    }
    const CommOp *op = c->transport.waits      ? c->transport.waits
                       : c->first < c->started ? &c->queue[c->first % COMM_QUEUE]
                                               : NULL;
    if (!op) {
        signal_text_add(t, "no collective");
        return;
    }
    if (op->kind == COMM_SEND) {
        comm_describe_message(t, op->what, op->unit, op->in != NULL,
                              op->group->ranks[1 - op->group->me], op->step);
        return;
    }
    if (op->counted) {
        signal_text_add(t, comm_kind_names[op->kind]);
        signal_text_add(t, " of ");
    }
    signal_text_add(t, op->what ? op->what : "?");
    if (op->counted) {
        signal_text_add(t, " ");
        signal_text_add_int(t, op->unit);
    }
    signal_text_add(t, ", step ");
    signal_text_add_int(t, op->step + 1);
}
// Ends the program (EXIT_PEER) if an MPI call failed. peer: the other rank, or -1.
static inline void comm_check(const Comm *c, int error, int peer, const char *doing) {
    if (error == MPI_SUCCESS) { return; }
    char text[MPI_MAX_ERROR_STRING] = "", with[96] = "";
    SignalText what = {"", 0};
    int n;
    MPI_Error_string(error, text, &n);
    comm_describe_waiting(c, &what);
    if (peer >= 0) {
        snprintf(with, sizeof with, " with rank %d on %s", peer, c->peers[peer].place.host);
    }
    die(EXIT_PEER, "another rank has ended; its message says why", "%s%s failed in %s: %s", doing,
        with, what.text, text);
}

// -------------------------------------------------------------------------------------------------
// Starting and ending

// Reads the state letter and the start time of a process from /proc. Returns false if it cannot.
static inline bool process_look(int64_t pid, char *state, int64_t *began) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
    FILE *f = fopen(path, "r");
    if (!f) { return false; }
    // the process name before it may contain any character
    char *rest = fgets(line, sizeof line, f) ? strrchr(line, ')') : NULL;
    fclose(f);
    if (!rest || rest[1] != ' ') { return false; }
    *state = rest[2];
    for (int field = 2; rest && field < 22; field++) { rest = strchr(rest + 1, ' '); }
    *began = rest ? atoll(rest) : 0;
    return rest != NULL;
}

// Returns the group of all ranks, in order.
static inline Group group_all(const Comm *c) {
    int *ranks = (int *)checked_malloc((size_t)c->ranks * sizeof(int), "group");
    for (int r = 0; r < c->ranks; r++) { ranks[r] = r; }
    Group g = group_make(ranks, c->ranks, c->rank, c->node_of);
    free(ranks);
    return g;
}

// Exchanges where the ranks run, and begins to listen for questions. All ranks call it.
static inline void comm_meet(Comm *c, const int *leader_of) {
    CommPlace mine,
        *all = (CommPlace *)checked_calloc((size_t)c->ranks, sizeof(CommPlace), "ranks");
    memset(&mine, 0, sizeof mine);
    gethostname(mine.host, sizeof mine.host - 1);
    char state;
    mine.pid = getpid();
    process_look(mine.pid, &state, &mine.began);
    MPI_Allgather(&mine, (int)sizeof mine, MPI_BYTE, all, (int)sizeof mine, MPI_BYTE, c->world);
    c->peers = (CommPeer *)checked_calloc((size_t)c->ranks, sizeof(CommPeer), "ranks");
    for (int r = 0; r < c->ranks; r++) {
        CommPeer *p = &c->peers[r];
        int64_t began;
        p->place = all[r];
        p->stopped = -1;
        p->sending[0] = p->sending[1] = MPI_REQUEST_NULL;
        p->visible = leader_of[r] == leader_of[c->rank] &&
                     process_look(p->place.pid, &state, &began) && began == p->place.began;
    }
    free(all);
    MPI_Recv_init(&c->heard, 1, MPI_INT64_T, MPI_ANY_SOURCE, MPI_ANY_TAG, c->questions,
                  &c->hearing);
    MPI_Start(&c->hearing);
}

static void comm_progress(void);

// Starts MPI, fills in ranks and nodes, and allocates the requests. All ranks call it.
static inline void comm_start(Comm *c, int *argc, char ***argv) {
    memset(c, 0, sizeof *c);
    c->transport.name = "mpi";
    int provided;
    // By default ("put") Open MPI sends a long message over TCP in one piece. The control message
    // that releases the next one waits behind it, and the link idles a quarter of the time. With
    // "send", messages go in pieces and the link stays busy. A setting of the user has precedence.
    setenv("OMPI_MCA_btl_tcp_flags", "send", 0);
    comm_deadline(COMM_MPI_START_S);
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &c->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &c->ranks);
    speaker.rank = c->rank;
    speaker.ranks = c->ranks;
    speaker.abort_job = comm_abort_job;
    MPI_Comm_dup(MPI_COMM_WORLD, &c->world);
    MPI_Comm_dup(MPI_COMM_WORLD, &c->questions);
    MPI_Comm_set_errhandler(c->world, MPI_ERRORS_RETURN);
    MPI_Comm here;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, c->rank, MPI_INFO_NULL, &here);
    MPI_Comm_rank(here, &c->local_rank);
    MPI_Comm_size(here, &c->local_ranks);
    int leader = c->rank;
    MPI_Bcast(&leader, 1, MPI_INT, 0, here);
    MPI_Comm_free(&here);
    size_t ranks = (size_t)c->ranks;
    c->node_of = (int *)checked_calloc(ranks, sizeof(int), "ranks");
    c->sources = (const float **)checked_calloc(ranks, sizeof(float *), "ranks");
    c->small_bounds = (int64_t *)checked_calloc(ranks + 1, sizeof(int64_t), "ranks");
    c->small_values = (int *)checked_calloc(ranks, sizeof(int), "ranks");
    MPI_Allgather(&leader, 1, MPI_INT, c->node_of, 1, MPI_INT, c->world);
    comm_meet(c, c->node_of);
    // enough requests for arrays of up to 64 GiB in one operation
    int64_t parts = ceil_div((int64_t)1 << 36, COMM_PART_BYTES);
    c->request_capacity = (int)(4 * c->ranks + 4 * parts);
    c->completed = (int *)checked_calloc((size_t)c->request_capacity, sizeof(int), "requests");
    for (int i = 0; i < COMM_SLOTS; i++) {
        c->slot[i].request = (MPI_Request *)checked_calloc((size_t)c->request_capacity,
                                                           sizeof(MPI_Request), "requests");
        c->slot[i].peer =
            (int *)checked_calloc((size_t)c->request_capacity, sizeof(int), "requests");
    }
    c->oversubscribed = c->local_ranks > sysconf(_SC_NPROCESSORS_ONLN);
    c->everyone = group_all(c);
    comm_running = c;
    keep_alive_hook = comm_progress;
    comm_deadline(0);
}

// Numbers the nodes: by host (ranks_per_node 0), or ranks_per_node consecutive ranks each. All
// ranks call it.
static inline void comm_place(Comm *c, int ranks_per_node) {
    int nodes = 0;
    for (int r = 0; r < c->ranks; r++) {
        if (ranks_per_node) {
            c->node_of[r] = r / ranks_per_node;
        } else { // the leader's rank becomes the number of its node, in order of appearance
            int leader = c->node_of[r];
            c->node_of[r] = leader == r ? nodes : c->node_of[leader];
        }
        nodes = (int)max_i64(nodes, c->node_of[r] + 1);
    }
    c->node = c->node_of[c->rank];
    c->nodes = nodes;
    group_free(&c->everyone);
    c->everyone = group_all(c);
}

// Sets the staging buffer of reductions, in memory that the transport reaches. The caller keeps it
// until comm_end() and frees it. Nothing is allocated here later.
static inline void comm_allocate(Comm *c, void *staging, size_t staging_bytes) {
    c->staging = (char *)staging;
    c->staging_bytes = staging_bytes;
}

static inline void comm_barrier(Comm *c);
// Ends messages and MPI. All ranks call it.
static inline void comm_end(Comm *c) {
    comm_barrier(c);
    if (c->transport.end) { c->transport.end(c); }
    comm_running = NULL;
    keep_alive_hook = NULL;
    comm_deadline((int)ceil(c->timeout_s));
    MPI_Cancel(&c->hearing);
    MPI_Request_free(&c->hearing);
    for (int i = 0; i < COMM_SLOTS; i++) {
        free(c->slot[i].request);
        free(c->slot[i].peer);
    }
    free(c->node_of);
    free(c->sources);
    free(c->completed);
    free(c->small_bounds);
    free(c->small_values);
    free(c->peers);
    group_free(&c->everyone);
    MPI_Comm_free(&c->world);
    MPI_Comm_free(&c->questions);
    MPI_Finalize();
    comm_deadline(0);
}
static inline void comm_reset_counters(Comm *c) {
    memset(c->bytes, 0, sizeof c->bytes);
    c->waited_s = 0;
}

// Prepares a group for collectives. All its members call it; a rank in several groups joins them in
// the same order as the other members.
static inline void comm_join(Comm *c, Group *g) {
    if (c->transport.join) { c->transport.join(c, g); }
}
// Announces that collectives of the group will run over this memory, until comm_end() or
// comm_share_none(). The caller must call comm_share_none() before it frees any of this memory.
static inline void comm_share(Comm *c, const Group *g, void *memory, size_t bytes) {
    if (c->transport.share) { c->transport.share(c, g, memory, bytes); }
}
static inline void comm_share_none(Comm *c) { comm_share(c, NULL, NULL, 0); }

// Labels the operations that start from here on, for error messages.
static inline void comm_label(Comm *c, const char *what, int unit, int64_t step) {
    c->what = what;
    c->unit = unit;
    c->step = step;
}

// -------------------------------------------------------------------------------------------------
// Sums
enum { SUM_BLOCK = 4096 };

// out[0 .. n) = sources[0] + sources[1] + ... in this order, in fp32. out may be one of the
// sources: each block is read before it is written.
static inline void comm_sum(float *out, const float **sources, int count, int64_t n) {
    float sum[SUM_BLOCK];
    for (int64_t at = 0; at < n; at += SUM_BLOCK) {
        int64_t m = min_i64(SUM_BLOCK, n - at);
        const float *first = sources[0] + at, *last = sources[count - 1] + at;
        for (int k = 1; k < count - 1; k++) {
            const float *x = sources[k] + at;
#pragma omp simd
            for (int64_t i = 0; i < m; i++) { sum[i] = first[i] + x[i]; }
            first = sum;
        }
#pragma omp simd
        for (int64_t i = 0; i < m; i++) { out[at + i] = count > 1 ? first[i] + last[i] : first[i]; }
    }
}
// Rounds fp32 values to values that bf16 can hold.
static inline void comm_round(float *out, const float *in, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) { out[i] = bf16_to_float(float_to_bf16(in[i])); }
}
static inline void comm_pack(uint16_t *out, const float *in, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) { out[i] = float_to_bf16(in[i]); }
}
// Converts in place, from the end: the n bf16 values at the front of the buffer become n floats.
static inline void comm_unpack_in_place(void *buffer, int64_t n) {
    const uint16_t *in = (const uint16_t *)buffer;
    float *out = (float *)buffer;
    for (int64_t i = n - 1; i >= 0; i--) {
        uint16_t half;
        memcpy(&half, in + i, 2);
        float x = bf16_to_float(half);
        memcpy(out + i, &x, 4);
    }
}

// -------------------------------------------------------------------------------------------------
// Messages of collectives. Long ones are cut into parts of COMM_PART_BYTES, alike on both sides.
static inline void comm_post(Comm *c, CommSlot *slot, bool send, int rank, int tag,
                             const void *data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += COMM_PART_BYTES) {
        assert(slot->requests < c->request_capacity);
        char *part = (char *)(uintptr_t)data + at;
        int n = (int)min_i64(COMM_PART_BYTES, bytes - at);
        slot->peer[slot->requests] = rank;
        MPI_Request *request = &slot->request[slot->requests++];
        slot->open++;
        comm_check(c,
                   send ? MPI_Isend(part, n, MPI_BYTE, rank, tag, c->world, request)
                        : MPI_Irecv(part, n, MPI_BYTE, rank, tag, c->world, request),
                   rank, "a message");
    }
}
static inline void comm_post_send(Comm *c, CommSlot *slot, const CommOp *op, int to, int tag,
                                  const void *data, int64_t bytes) {
    if (op->counted) { c->bytes[op->kind][group_link(op->group, op->group->me, to)] += bytes; }
    comm_post(c, slot, true, op->group->ranks[to], tag, data, bytes);
}
static inline void comm_post_recv(Comm *c, CommSlot *slot, const CommOp *op, int from, int tag,
                                  void *data, int64_t bytes) {
    comm_post(c, slot, false, op->group->ranks[from], tag, data, bytes);
}
// Returns whether all messages of the slot are complete.
static inline bool comm_slot_done(Comm *c, CommSlot *slot) {
    int done = 0;
    if (slot->open) {
        comm_check(
            c,
            MPI_Testsome(slot->requests, slot->request, &done, c->completed, MPI_STATUSES_IGNORE),
            -1, "a message");
    }
    if (done) {
        slot->open -= done;
        c->fresh = c->clock;
    }
    if (!slot->open) { slot->requests = 0; }
    return !slot->open;
}

// -------------------------------------------------------------------------------------------------
// Reductions. A piece is the same range [first, first + count) of every slice. For each piece, the
// member at (node, local)
//   1. exchanges contributions inside its node. It sends its contribution to every slice to the
//      member with the local index of the slice's owner. It receives the contributions to the
//      slices of all owners with its own local index (one on each node), and sums them in member
//      order;
//   2. exchanges sums between nodes. It sends these sums to their owners on the other nodes,
//      receives the sums for its own slice, and adds them in node order.
// Regions of a slot in the staging buffer, in segments of piece_elements floats:
//   contributions [nodes][locals - 1] | sums [nodes] | received sums [nodes]
//   with wire bf16 also: contributions to send [n] | own contributions, rounded [nodes]
// The two regions of sums exist only with several nodes.
static inline int64_t comm_segments(const Group *g, DType wire) {
    int64_t contributions = (int64_t)g->nodes * (g->locals - 1);
    return contributions + (g->nodes > 1 ? 2 * g->nodes : 0) +
           (wire == DTYPE_BF16 ? g->n + g->nodes : 0);
}
typedef enum {
    STAGED_CONTRIBUTIONS,
    STAGED_SUMS,
    STAGED_RECEIVED,
    STAGED_SENT,
    STAGED_OWN
} CommRegion;
static inline float *comm_staged(const Comm *c, const CommOp *op, const CommSlot *slot,
                                 CommRegion region, int index) {
    const Group *g = op->group;
    int64_t contributions = (int64_t)g->nodes * (g->locals - 1);
    int64_t sums = g->nodes > 1 ? g->nodes : 0; // one node: the sum goes straight into the result
    int64_t begin[] = {0, contributions, contributions + sums, contributions + 2 * sums,
                       contributions + 2 * sums + g->n};
    int64_t segment = (slot - c->slot) * comm_segments(g, op->wire) + begin[region] + index;
    return (float *)(void *)c->staging + segment * c->piece_elements;
}
// Returns the elements of member i's slice that belong to a piece. *first: their begin in the
// array.
static inline int64_t comm_piece(const Comm *c, const CommOp *op, int i, int64_t piece,
                                 int64_t *first) {
    *first = op->bounds[i] + piece * c->piece_elements;
    return max_i64(0, min_i64(c->piece_elements, op->bounds[i + 1] - *first));
}
static inline int64_t comm_pieces(const Comm *c, const CommOp *op) {
    int64_t longest = 0;
    for (int i = 0; i < op->group->n; i++) {
        longest = max_i64(longest, op->bounds[i + 1] - op->bounds[i]);
    }
    return ceil_div(longest, c->piece_elements);
}

// Returns the bytes of staging that reductions of up to `elements` elements need to go in one
// piece, but at most `most`. Longer reductions go in several pieces.
static inline size_t comm_staging_bytes(const Group *g, DType wire, int64_t elements, size_t most) {
    int64_t segment = round_up(ceil_div(elements, g->n) + 4096, 16); // slices are whole chunks
    int64_t bytes = segment * 4 * COMM_SLOTS * comm_segments(g, wire);
    return g->n == 1 ? 0 : (size_t)min_i64(bytes, (int64_t)most);
}

static inline void comm_reduce_begin(Comm *c, const CommOp *op) {
    c->next_piece = c->done_pieces = 0;
    c->piece_elements =
        (int64_t)c->staging_bytes / 4 / COMM_SLOTS / comm_segments(op->group, op->wire) / 16 * 16;
    if (c->piece_elements < 16) {
        die(EXIT_RESOURCES, NULL, "staging buffer of %zu bytes is too small for %d ranks",
            c->staging_bytes, op->group->n);
    }
}

// Step 1 of a piece: posts its contributions.
static inline void comm_reduce_local(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    int node = group_node(g, g->me), local = group_local(g, g->me);
    size_t size = dtype_size(op->wire);
    int64_t first;
    slot->piece = c->next_piece++;
    slot->state = 1;
    slot->requests = 0;
    for (int l = 0, index = 0; l < g->locals; l++) {
        for (int n = 0; n < g->nodes && l != local; n++, index++) {
            int64_t count = comm_piece(c, op, group_at(g, n, local), slot->piece, &first);
            comm_post_recv(c, slot, op, group_at(g, node, l), TAG_LOCAL,
                           comm_staged(c, op, slot, STAGED_CONTRIBUTIONS, index),
                           count * (int64_t)size);
        }
    }
    for (int l = 0; l < g->locals; l++) {
        for (int n = 0; n < g->nodes && l != local; n++) {
            int owner = group_at(g, n, l);
            int64_t count = comm_piece(c, op, owner, slot->piece, &first);
            const float *mine = (const float *)(const void *)op->in + first;
            void *sent = comm_staged(c, op, slot, STAGED_SENT, op->wire == DTYPE_BF16 ? owner : 0);
            if (op->wire == DTYPE_BF16) { comm_pack((uint16_t *)sent, mine, count); }
            comm_post_send(c, slot, op, group_at(g, node, l), TAG_LOCAL,
                           op->wire == DTYPE_BF16 ? sent : mine, count * (int64_t)size);
        }
    }
}
// Sums this node's contributions to a piece of one slice into out. The slice's owner is the member
// on node n with this rank's local index.
static inline void comm_reduce_sum_node(Comm *c, const CommOp *op, CommSlot *slot, int n,
                                        float *out) {
    const Group *g = op->group;
    int local = group_local(g, g->me);
    int64_t first, count = comm_piece(c, op, group_at(g, n, local), slot->piece, &first);
    for (int l = 0; l < g->locals; l++) {
        int index = (l < local ? l : l - 1) * g->nodes + n;
        float *theirs = l == local ? NULL : comm_staged(c, op, slot, STAGED_CONTRIBUTIONS, index);
        if (theirs && op->wire == DTYPE_BF16) { comm_unpack_in_place(theirs, count); }
        c->sources[l] = theirs;
    }
    c->sources[local] = (const float *)(const void *)op->in + first;
    if (op->wire == DTYPE_BF16 && g->n > 1) {
        float *own = comm_staged(c, op, slot, STAGED_OWN, n);
        comm_round(own, c->sources[local], count);
        c->sources[local] = own;
    }
    comm_sum(out, c->sources, g->locals, count);
}
// Step 2: sends the sums of this node to their owners on the other nodes.
static inline void comm_reduce_nodes(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    int node = group_node(g, g->me), local = group_local(g, g->me);
    int64_t first, size = (int64_t)dtype_size(op->wire),
                   mine = comm_piece(c, op, g->me, slot->piece, &first);
    slot->state = 2;
    for (int n = 0; n < g->nodes; n++) {
        if (n != node) {
            comm_post_recv(c, slot, op, group_at(g, n, local), TAG_NODES,
                           comm_staged(c, op, slot, STAGED_RECEIVED, n), mine * size);
        }
    }
    for (int n = 0; n < g->nodes; n++) {
        float *sum = comm_staged(c, op, slot, STAGED_SUMS, n);
        int64_t count = comm_piece(c, op, group_at(g, n, local), slot->piece, &first);
        comm_reduce_sum_node(c, op, slot, n, sum);
        if (op->wire == DTYPE_BF16 && n == node) { comm_round(sum, sum, count); }
        if (n == node) { continue; }
        // This segment held the rank's own contribution, which `sum` contains already.
        if (op->wire == DTYPE_BF16) {
            void *packed = comm_staged(c, op, slot, STAGED_OWN, n);
            comm_pack((uint16_t *)packed, sum, count);
            comm_post_send(c, slot, op, group_at(g, n, local), TAG_NODES, packed, count * size);
        } else {
            comm_post_send(c, slot, op, group_at(g, n, local), TAG_NODES, sum, count * size);
        }
    }
}
static inline void comm_reduce_finish(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    int node = group_node(g, g->me);
    int64_t first, count = comm_piece(c, op, g->me, slot->piece, &first);
    float *out = (float *)(void *)op->out + first;
    if (g->nodes == 1) {
        comm_reduce_sum_node(c, op, slot, 0, out);
    } else {
        for (int n = 0; n < g->nodes; n++) {
            float *sum = comm_staged(c, op, slot, n == node ? STAGED_SUMS : STAGED_RECEIVED, n);
            if (n != node && op->wire == DTYPE_BF16) { comm_unpack_in_place(sum, count); }
            c->sources[n] = sum;
        }
        comm_sum(out, c->sources, g->nodes, count);
    }
    slot->state = 0;
    c->done_pieces++;
}
// Advances a reduction. Returns true when it is complete.
static inline bool comm_reduce_progress(Comm *c, const CommOp *op) {
    int64_t pieces = comm_pieces(c, op);
    for (bool moved = true; moved && c->done_pieces < pieces;) {
        moved = false;
        for (int i = 0; i < COMM_SLOTS; i++) {
            if (c->slot[i].state == 0 && c->next_piece < pieces) {
                comm_reduce_local(c, op, &c->slot[i]);
                moved = true;
            }
        }
        CommSlot *slot = &c->slot[c->done_pieces % COMM_SLOTS]; // the oldest piece
        if (slot->state && comm_slot_done(c, slot)) {
            bool last_step = op->group->nodes == 1 || slot->state == 2;
            if (last_step) {
                comm_reduce_finish(c, op, slot);
            } else {
                comm_reduce_nodes(c, op, slot);
            }
            moved = true;
        }
    }
    return c->done_pieces == pieces;
}

// -------------------------------------------------------------------------------------------------
// All-gather (between nodes first, then inside each node) and all-to-all. All messages of a step
// are posted together.
// Returns the bytes of member i's slice that an all-gather sends, and where they begin.
static inline char *comm_slice(const CommOp *op, int i, int64_t *bytes) {
    // packed values are at the front of their slice
    bool packed = op->kind == COMM_ALL_REDUCE && op->wire == DTYPE_BF16;
    *bytes = (op->bounds[i + 1] - op->bounds[i]) * (packed ? 2 : (int64_t)op->element_bytes);
    return op->out + op->bounds[i] * (int64_t)op->element_bytes;
}
static inline void comm_gather_nodes(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    int64_t mine, theirs;
    char *own = comm_slice(op, g->me, &mine);
    for (int n = 0; n < g->nodes; n++) {
        int peer = group_at(g, n, group_local(g, g->me));
        char *slice = comm_slice(op, peer, &theirs);
        if (peer != g->me) {
            comm_post_recv(c, slot, op, peer, TAG_NODES, slice, theirs);
            comm_post_send(c, slot, op, peer, TAG_NODES, own, mine);
        }
    }
}
static inline void comm_gather_local(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    int node = group_node(g, g->me), local = group_local(g, g->me);
    int64_t bytes;
    for (int l = 0; l < g->locals; l++) {
        int peer = group_at(g, node, l);
        for (int n = 0; n < g->nodes && peer != g->me; n++) {
            char *slice = comm_slice(op, group_at(g, n, l), &bytes);
            comm_post_recv(c, slot, op, peer, TAG_LOCAL, slice, bytes);
            slice = comm_slice(op, group_at(g, n, local), &bytes);
            comm_post_send(c, slot, op, peer, TAG_LOCAL, slice, bytes);
        }
    }
}
static inline void comm_exchange(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    int64_t size = (int64_t)op->element_bytes;
    for (int i = 0; i < g->n; i++) {
        const char *sent = op->in + op->bounds[i] * size;
        char *received = op->out + op->recv_bounds[i] * size;
        int64_t out_bytes = (op->bounds[i + 1] - op->bounds[i]) * size,
                in_bytes = (op->recv_bounds[i + 1] - op->recv_bounds[i]) * size;
        if (i == g->me) {
            memcpy(received, sent, (size_t)out_bytes);
            continue;
        }
        comm_post_recv(c, slot, op, i, TAG_LOCAL, received, in_bytes);
        comm_post_send(c, slot, op, i, TAG_LOCAL, sent, out_bytes);
    }
}

// An all-reduce with wire bf16 gathers bf16 values: each owner packs its result at the front of its
// slice, and all members unpack at the end.
static inline void comm_pack_own(const CommOp *op) {
    int64_t n = op->bounds[op->group->me + 1] - op->bounds[op->group->me];
    float *slice = (float *)(void *)op->out + op->bounds[op->group->me];
    for (int64_t i = 0; i < n; i++) {
        uint16_t half = float_to_bf16(slice[i]);
        memcpy((char *)slice + 2 * i, &half, 2);
    }
}

// -------------------------------------------------------------------------------------------------
// Progress
enum { PHASE_NEW, PHASE_REDUCE, PHASE_NODES, PHASE_LOCAL, PHASE_DONE };

static inline bool comm_op_reduces(const CommOp *op) {
    return op->kind == COMM_REDUCE_SCATTER || op->kind == COMM_ALL_REDUCE;
}
static inline bool comm_op_gathers(const CommOp *op) {
    return op->kind == COMM_ALL_GATHER || op->kind == COMM_ALL_REDUCE;
}

// Enters the operation's next phase and posts its messages, if it has any there.
static inline void comm_next_phase(Comm *c, CommOp *op) {
    CommSlot *slot = &c->slot[0];
    op->phase++;
    slot->requests = 0;
    if (op->phase == PHASE_REDUCE && comm_op_reduces(op)) { comm_reduce_begin(c, op); }
    if (op->phase == PHASE_NODES && comm_op_gathers(op)) {
        if (op->kind == COMM_ALL_REDUCE && op->wire == DTYPE_BF16 && op->group->n > 1) {
            comm_pack_own(op);
        }
        comm_gather_nodes(c, op, slot);
    }
    if (op->phase == PHASE_LOCAL && comm_op_gathers(op)) { comm_gather_local(c, op, slot); }
    if (op->phase == PHASE_LOCAL && op->kind == COMM_ALL_TO_ALL) { comm_exchange(c, op, slot); }
    if (op->phase == PHASE_DONE && op->kind == COMM_ALL_REDUCE && op->wire == DTYPE_BF16 &&
        op->group->n > 1) {
        for (int i = 0; i < op->group->n; i++) {
            comm_unpack_in_place((float *)(void *)op->out + op->bounds[i],
                                 op->bounds[i + 1] - op->bounds[i]);
        }
    }
}

// Returns whether the message is complete.
static inline bool comm_message_done(Comm *c, CommRequest t) {
    CommMessage *m = &c->message[t % COMM_MESSAGES];
    int done = 1;
    if (t <= c->settled || m->request == MPI_REQUEST_NULL) { return true; }
    comm_check(c, MPI_Test(&m->request, &done, MPI_STATUS_IGNORE), m->peer, "a message");
    if (done) { c->fresh = c->clock; }
    return done;
}

// Records which messages are complete, with a single MPI call. comm_message_noted() then costs
// little.
static inline void comm_note_messages(Comm *c) {
    MPI_Request open[COMM_MESSAGES];
    CommRequest of[COMM_MESSAGES];
    int n = 0, done = 0, which[COMM_MESSAGES];
    for (CommRequest t = c->settled + 1; t <= c->posted; t++) {
        if (c->message[t % COMM_MESSAGES].request != MPI_REQUEST_NULL) {
            of[n] = t;
            open[n++] = c->message[t % COMM_MESSAGES].request;
        }
    }
    if (!n) { return; }
    comm_check(c, MPI_Testsome(n, open, &done, which, MPI_STATUSES_IGNORE), -1, "a message");
    for (int i = 0; i < done; i++) {
        c->message[of[which[i]] % COMM_MESSAGES].request = MPI_REQUEST_NULL;
        c->fresh = c->clock;
    }
}
static inline bool comm_message_noted(const Comm *c, CommRequest t) {
    return t <= c->settled || c->message[t % COMM_MESSAGES].request == MPI_REQUEST_NULL;
}

// Advances everything in flight. Cheap when nothing is.
static inline void comm_advance(Comm *c) {
    if (c->transport.poll) { c->transport.poll(c); }
    // a message that is not complete holds back `settled` only, not the others
    while (c->settled < c->posted && comm_message_done(c, c->settled + 1)) { c->settled++; }
    while (c->first < c->started) {
        CommOp *op = &c->queue[c->first % COMM_QUEUE];
        bool done = op->phase == PHASE_REDUCE && comm_op_reduces(op)
                        ? comm_reduce_progress(c, op)
                        : comm_slot_done(c, &c->slot[0]);
        if (!done) { return; }
        comm_next_phase(c, op);
        if (op->phase == PHASE_DONE) { c->first++; }
    }
}

// -------------------------------------------------------------------------------------------------
// The watch over the ranks that this one waits for (see "Lost ranks" above). A question carries any
// number. An answer carries the milliseconds since the rank last saw progress.
static const double WATCH_EVERY_S = 0.1, WATCH_ASK_S = 1, WATCH_STEP_S = 0.5;

// Sends a question or an answer to a rank. Does nothing while the previous one is still in flight:
// then the rank is not listening.
static inline void comm_send_watch_message(Comm *c, int rank, int tag, int64_t number) {
    CommPeer *p = &c->peers[rank];
    int which = tag == TAG_ANSWER, done = 1;
    if (p->sending[which] != MPI_REQUEST_NULL) {
        MPI_Test(&p->sending[which], &done, MPI_STATUS_IGNORE);
    }
    if (!done) { return; }
    p->sent[which] = number;
    MPI_Isend(&p->sent[which], 1, MPI_INT64_T, rank, tag, c->questions, &p->sending[which]);
}
// Handles the questions and answers that have arrived. working: this rank is computing.
static inline void comm_listen(Comm *c, bool working) {
    MPI_Status status;
    int come = 1;
    for (MPI_Test(&c->hearing, &come, &status); come; MPI_Test(&c->hearing, &come, &status)) {
        CommPeer *p = &c->peers[status.MPI_SOURCE];
        if (status.MPI_TAG == TAG_ANSWER) {
            p->fresh = fmax(p->fresh, c->clock - (double)c->heard * 1e-3);
            p->answered = c->clock;
        } else {
            double fresh = working ? c->clock : c->fresh;
            for (int r = 0; r < c->ranks && !working; r++) {
                fresh = c->peers[r].awaited ? fmax(fresh, c->peers[r].fresh) : fresh;
            }
            comm_send_watch_message(c, status.MPI_SOURCE, TAG_ANSWER,
                                    (int64_t)((c->clock - fresh) * 1e3));
        }
        MPI_Start(&c->hearing);
    }
}

// Marks the ranks that this rank waits for: those that the device waits for, and the other ends of
// the message or of the collective that the host waits for.
static inline void comm_mark_awaited(Comm *c) {
    const CommOp *far = c->transport.waits;
    for (int r = 0; r < c->ranks; r++) { c->peers[r].awaited = false; }
    for (int i = 0; far && i < far->group->n; i++) {
        c->peers[far->group->ranks[i]].awaited = i != far->group->me;
    }
    if (c->awaited) {
        c->peers[c->message[c->awaited % COMM_MESSAGES].peer].awaited = true;
        return;
    }
    for (int i = 0; i < COMM_SLOTS; i++) {
        for (int k = 0; k < c->slot[i].requests; k++) {
            int done = 1;
            if (c->slot[i].request[k] != MPI_REQUEST_NULL) {
                MPI_Request_get_status(c->slot[i].request[k], &done, MPI_STATUS_IGNORE);
            }
            if (!done) { c->peers[c->slot[i].peer[k]].awaited = true; }
        }
    }
}
// Ends the job because a rank is lost.
__attribute__((noreturn)) static inline void comm_lost(const Comm *c, int rank, const char *how,
                                                       double seconds) {
    SignalText what = {"", 0};
    comm_describe_waiting(c, &what);
    if (strcmp(c->peers[rank].place.host, c->peers[c->rank].place.host)) { comm_end_launcher(); }
    die(EXIT_PEER,
        "--resume 1 goes on from the newest checkpoint; --watchdog sets how long a rank may be "
        "silent",
        "lost rank %d on %s: %s for %.1f s, in %s", rank, c->peers[rank].place.host, how, seconds,
        what.text);
}
// Looks in /proc at a rank of this machine; ends the job if it has ended or is stopped.
static inline void comm_look_at(Comm *c, int rank) {
    CommPeer *p = &c->peers[rank];
    char state = 'X';
    int64_t began = 0;
    bool there = process_look(p->place.pid, &state, &began) && began == p->place.began &&
                 state != 'Z' && state != 'X';
    if (!there) { comm_lost(c, rank, "it has ended; waited", c->clock - c->fresh); }
    // The watch: takes the time, handles questions and looks at the ranks that this one waits for.
    if (state != 'T') {
        p->stopped = -1;
    } else if (p->stopped < 0) {
        p->stopped = c->clock;
    } else if (c->clock - p->stopped > COMM_STOPPED_S) {
        comm_lost(c, rank, "it is stopped, seen", c->clock - p->stopped);
    }
}
static inline void comm_watch(Comm *c) {
    double now = seconds_now();
    // a longer step means that this process did not run
    c->clock += fmin(now - c->looked, WATCH_STEP_S);
    c->looked = now;
    comm_listen(c, false);
    if (c->timeout_s <= 0 || c->clock - c->fresh < 0.5) { return; }
    comm_mark_awaited(c);
    for (int r = 0; r < c->ranks; r++) {
        CommPeer *p = &c->peers[r];
        if (!p->awaited) { continue; }
        if (p->visible) { comm_look_at(c, r); }
        if (c->clock - p->asked > fmin(WATCH_ASK_S, c->timeout_s / 4)) {
            p->asked = c->clock;
            comm_send_watch_message(c, r, TAG_QUESTION, 0);
        }
        double silent = c->clock - fmax(p->fresh, c->fresh);
        if (silent > c->timeout_s) { comm_lost(c, r, "no sign of progress", silent); }
    }
}

// Advances everything in flight and answers questions. Operations call it between tiles, also
// through keep_alive().
static void comm_progress(void) {
    Comm *c = comm_running;
    if (!c || c->ranks == 1) { return; }
    comm_advance(c);
    double now = seconds_now();
    if (c->transport.waits) { // the device waits, whatever the host does
        if (now - c->looked > WATCH_EVERY_S) { comm_watch(c); }
    } else if (now - c->answered > 0.05) {
        c->answered = now;
        comm_listen(c, true);
    }
}

// One turn of waiting: first polls, then yields, then sleeps, since ranks may share a core.
static inline void comm_idle(Comm *c, int64_t turn) {
    if (turn > 200 || c->oversubscribed) { sched_yield(); }
    if (turn > 2000) { usleep(50); }
    // by the clock, not by turns: on a busy machine a sleep takes long
    bool look = turn > 2000 || turn % 64 == 63;
    if (look && seconds_now() - c->looked > WATCH_EVERY_S) { comm_watch(c); }
}

static inline bool comm_op_done(Comm *c, CommHandle handle) { return c->first >= handle; }
static inline void comm_wait_until(Comm *c, bool (*done)(Comm *c, int64_t what), int64_t what) {
    double start = seconds_now();
    c->looked = start;
    c->fresh = c->clock;
    comm_advance(c);
    for (int64_t turn = 0; !done(c, what); turn++) {
        double before = c->fresh;
        comm_idle(c, turn);
        comm_advance(c);
        if (c->idle_callback) { c->idle_callback(c->idle_context); }
        if (c->fresh != before) { turn = 0; }
    }
    c->waited_s += seconds_now() - start;
}
// Waits until the operation and all operations started before it are complete. An operation of a
// transport is complete for later work of the compute stream; the host sees it after ops_wait().
static inline void comm_wait(Comm *c, CommHandle handle) {
    if (handle < 0) { c->transport.wait(c, handle); }
    if (c->first < handle) { comm_wait_until(c, comm_op_done, handle); }
}

// -------------------------------------------------------------------------------------------------
// Messages between two ranks, by MPI or the transport. These functions return at once; `data`
// belongs to the message until comm_wait_message() has returned. Messages from one rank to another
// on one channel match in the order in which both ranks post them. Channels are independent of each
// other. A transport has only one channel.
static inline bool comm_has_channels(const Comm *c) { return !c->transport.post; }
static inline void comm_wait_message_by_mpi(Comm *c, CommRequest t) {
    if (comm_message_done(c, t)) { return; }
    c->awaited = t;
    comm_wait_until(c, comm_message_done, t);
    c->awaited = 0;
}
static inline CommRequest comm_post_by_mpi(Comm *c, bool send, int peer, void *data, size_t bytes) {
    while (c->posted - c->settled == COMM_MESSAGES) {
        comm_wait_message_by_mpi(c, c->settled + 1);
        comm_advance(c);
    }
    CommMessage *m = &c->message[++c->posted % COMM_MESSAGES];
    m->send = send;
    m->peer = peer;
    m->what = c->what;
    m->unit = c->unit;
    m->step = c->step;
    int n = (int)bytes;
    const int tag = TAG_MESSAGE + c->channel;
    int error = send ? MPI_Isend(data, n, MPI_BYTE, peer, tag, c->world, &m->request)
                     : MPI_Irecv(data, n, MPI_BYTE, peer, tag, c->world, &m->request);
    comm_check(c, error, peer, "a message");
    return c->posted;
}
static inline void comm_count_message(Comm *c, bool send, int peer, size_t bytes) {
    if (send) {
        c->bytes[COMM_SEND][c->node_of[peer] == c->node ? LINK_INTRA : LINK_INTER] +=
            (int64_t)bytes;
    }
}
static inline CommRequest comm_post_message(Comm *c, bool send, int peer, void *data,
                                            size_t bytes) {
    if (bytes > INT_MAX) {
        die(EXIT_INPUT, "choose a smaller --micro-batch",
            "a message of %zu bytes to another stage: 2 GiB are too much", bytes);
    }
    if (!bytes) { return 0; } // both sides know that it is empty
    comm_count_message(c, send, peer, bytes);
    return (c->transport.post ? c->transport.post : comm_post_by_mpi)(c, send, peer, data, bytes);
}
// Posts a message of a few bytes in host memory, also where a transport carries the device's
// messages.
static inline CommRequest comm_post_on_host(Comm *c, bool send, int peer, void *data,
                                            size_t bytes) {
    comm_count_message(c, send, peer, bytes);
    return comm_post_by_mpi(c, send, peer, data, bytes);
}
static inline CommRequest comm_send(Comm *c, int peer, const void *data, size_t bytes) {
    return comm_post_message(c, true, peer, (void *)(uintptr_t)data, bytes);
}
static inline CommRequest comm_receive(Comm *c, int peer, void *data, size_t bytes) {
    return comm_post_message(c, false, peer, data, bytes);
}
// Waits until the message has left or arrived, for later work of the compute stream.
static inline void comm_wait_message(Comm *c, CommRequest t) {
    if (t < 0) { c->transport.wait_message(c, t); }
    if (t > 0) { comm_wait_message_by_mpi(c, t); }
}

// -------------------------------------------------------------------------------------------------
// Collectives. Every member of the group starts them, in the same order. They return at once.
// Starts a collective by MPI, over host memory.
static inline CommHandle comm_queue_op(Comm *c, CommOp op) {
    if (op.group->n == 1) { // no messages
        int64_t size = (int64_t)op.element_bytes,
                to = op.recv_bounds ? op.recv_bounds[0] : op.bounds[0];
        if (op.in && op.in != op.out) {
            memcpy(op.out + to * size, op.in + op.bounds[0] * size,
                   (size_t)((op.bounds[1] - op.bounds[0]) * size));
        }
        return 0;
    }
    if (c->started - c->first == COMM_QUEUE) { comm_wait(c, c->first + 1); }
    c->queue[c->started++ % COMM_QUEUE] = op;
    comm_advance(c);
    return c->started;
}
static inline CommHandle comm_start_op(Comm *c, CommOp op) {
    op.what = c->what;
    op.unit = c->unit;
    op.step = c->step;
    op.phase = PHASE_NEW;
    assert(op.group->me >= 0);
    if (op.counted && c->transport.start) { return c->transport.start(c, &op); }
    return comm_queue_op(c, op);
}
// All-gather: slice i of data is valid at member i before, and everywhere after.
static inline CommHandle comm_all_gather(Comm *c, const Group *g, void *data, const int64_t *bounds,
                                         size_t element_bytes) {
    CommOp op = {COMM_ALL_GATHER, 0,          0,    NULL, g, bounds, NULL, NULL, (char *)data,
                 element_bytes,   DTYPE_FP32, true, 0};
    return comm_start_op(c, op);
}
// Reduce-scatter: slice = this rank's slice of the sum of `in` over the members. slice may be this
// rank's slice inside `in`.
static inline CommHandle comm_reduce_scatter(Comm *c, const Group *g, const float *in, float *slice,
                                             const int64_t *bounds, DType wire) {
    // begin of the whole array that this slice would be a part of; the array need not exist
    char *out = (char *)((uintptr_t)slice - (uintptr_t)bounds[g->me] * sizeof(float));
    CommOp op = {COMM_REDUCE_SCATTER, 0,    0,    NULL, g, bounds, NULL, (const char *)in, out,
                 sizeof(float),       wire, true, 0};
    return comm_start_op(c, op);
}
// All-reduce: data = the sum of data over the members, with the same bits everywhere. With wire
// bf16 the result is rounded to bf16 too.
static inline CommHandle comm_all_reduce(Comm *c, const Group *g, float *data,
                                         const int64_t *bounds, DType wire) {
    CommOp op = {
        COMM_ALL_REDUCE, 0,    0,    NULL, g, bounds, NULL, (const char *)data, (char *)data,
        sizeof(float),   wire, true, 0};
    return comm_start_op(c, op);
}
// All-to-all: slice i of send goes to member i; what member i sends begins at recv_bounds[i] of
// recv.
static inline CommHandle comm_all_to_all(Comm *c, const Group *g, const void *send,
                                         const int64_t *send_bounds, void *recv,
                                         const int64_t *recv_bounds, size_t element_bytes) {
    CommOp op = {COMM_ALL_TO_ALL,
                 0,
                 0,
                 NULL,
                 g,
                 send_bounds,
                 recv_bounds,
                 (const char *)send,
                 (char *)recv,
                 element_bytes,
                 DTYPE_FP32,
                 true,
                 0};
    return comm_start_op(c, op);
}

// -------------------------------------------------------------------------------------------------
// Setup and scalars: small, complete on return, not counted. All members of the group (without one:
// all ranks) call them.

// All-gather: elements bounds[i] .. bounds[i + 1] - 1 of data are valid at member i before, and
// everywhere after.
static inline void comm_gather_now(Comm *c, const Group *g, const char *what, void *data,
                                   const int64_t *bounds, size_t element_bytes) {
    comm_label(c, what, -1, c->step);
    CommOp op = {COMM_ALL_GATHER, 0,          0,     NULL, g, bounds, NULL, NULL, (char *)data,
                 element_bytes,   DTYPE_FP32, false, 0};
    comm_wait(c, comm_start_op(c, op));
}
static inline void comm_all_gather_doubles(Comm *c, double *data, const int64_t *bounds) {
    comm_gather_now(c, &c->everyone, "numbers", data, bounds, sizeof *data);
}
// all[i] = `mine` of member i, of `bytes` bytes each.
static inline void comm_all_gather_in(Comm *c, const Group *g, const void *mine, void *all,
                                      size_t bytes) {
    memcpy((char *)all + (size_t)g->me * bytes, mine, bytes);
    for (int i = 0; i <= g->n; i++) { c->small_bounds[i] = i; }
    comm_gather_now(c, g, "small values", all, c->small_bounds, bytes);
}
// comm_all_gather_in() over all ranks.
static inline void comm_all_gather_small(Comm *c, const void *mine, void *all, size_t bytes) {
    comm_all_gather_in(c, &c->everyone, mine, all, bytes);
}
// data of member `root` becomes data of all members.
static inline void comm_broadcast_in(Comm *c, const Group *g, void *data, size_t bytes, int root) {
    for (int i = 0; i <= g->n; i++) { c->small_bounds[i] = i > root; }
    comm_gather_now(c, g, "broadcast", data, c->small_bounds, bytes);
}
static inline void comm_broadcast(Comm *c, void *data, size_t bytes, int root) {
    comm_broadcast_in(c, &c->everyone, data, bytes, root);
}
static inline int comm_agree(Comm *c, int value, bool largest) {
    int *all = c->small_values;
    comm_all_gather_small(c, &value, all, sizeof value);
    for (int r = 0; r < c->ranks; r++) {
        value = (largest ? all[r] > value : all[r] < value) ? all[r] : value;
    }
    return value;
}
static inline int comm_agree_max(Comm *c, int value) { return comm_agree(c, value, true); }
static inline int comm_agree_min(Comm *c, int value) { return comm_agree(c, value, false); }
static inline void comm_barrier(Comm *c) { comm_agree_max(c, 0); }

// -------------------------------------------------------------------------------------------------
// Cores

// Returns how many ranks of this machine have devices near the same cores, and sets *index to this
// rank's index among them. All ranks call it.
static inline int comm_ranks_near(Comm *c, const char *near_cores, int *index) {
    char key[512];
    Checksum sum = checksum_begin();
    snprintf(key, sizeof key, "%s %s", c->peers[c->rank].place.host, near_cores);
    checksum_add(&sum, key, strlen(key));
    const uint64_t mine = checksum_end(&sum);
    uint64_t *all =
        (uint64_t *)checked_calloc((size_t)c->ranks, sizeof *all, "the places of ranks");
    int count = 0;
    comm_all_gather_small(c, &mine, all, sizeof mine);
    for (int r = 0; r < c->ranks; r++) {
        if (r == c->rank) { *index = count; }
        count += all[r] == mine;
    }
    free(all);
    return count;
}
// Binds this rank to its part of the cores that mpirun itself may use (mpirun's default would bind
// a rank to one core). Returns its number of threads: `wanted`, or if that is 0 one for each core.
// If there are more ranks than cores, all ranks share all cores. near_cores lists the cores near
// this rank's device, in the form of cores_parse(); the ranks whose devices are near the same cores
// divide them. It is "" where the cores are not known, and NULL where there is no device yet. All
// ranks call it.
static inline int comm_bind_to_cores(Comm *c, int64_t wanted, const char *near_cores) {
    cpu_set_t allowed, close, mine;
    int index = c->local_rank, ranks = c->local_ranks;
    if (sched_getaffinity(getppid(), sizeof allowed, &allowed) &&
        sched_getaffinity(0, sizeof allowed, &allowed)) {
        return wanted ? (int)wanted : 1;
    }
    bool near_device = near_cores && cores_parse(near_cores, &close);
    if (near_device) { CPU_AND(&close, &close, &allowed); }
    near_device = near_device && CPU_COUNT(&close); // if not, the job may use none of these cores
    if (near_cores) {
        int place = 0;
        const int sharing = comm_ranks_near(c, near_device ? near_cores : "all", &place);
        if (near_device) {
            allowed = close;
            index = place;
            ranks = sharing;
        }
    }
    const int threads = cores_of_rank(&allowed, index, ranks, wanted, &mine);
    sched_setaffinity(0, sizeof mine, &mine); // a failure is harmless
    return threads;
}

#endif
