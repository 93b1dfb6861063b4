// comm.h: how ranks exchange data: start and end, collectives, messages between two ranks, setup.
//
// Begin, wait   An operation is begun and waited for: CommRequest r = comm_..._begin(...),
//               comm_wait(c, &r). From begin to wait its memory belongs to it. It has a label for
//               error messages, and its bytes are counted by kind and link (Comm: bytes).
// Slices        A collective over a group of n members divides an array into n slices by n + 1
//               ascending element bounds. Slice i belongs to member i and may be empty. NCCL needs
//               slices as store_bounds() cuts them: all of the same length, except that the last
//               ones end where the array ends. It also needs an array, and a slice that is stored
//               elsewhere, to have free space behind them for what the last slices lack
//               (bounds_padded), which an all-gather or a reduce-scatter may read and write.
// Order         Collectives run one after another in the order of their begin, which must be the
//               same on all their members. Messages between two ranks are independent of them.
// Sums          are the same bits in each run (collectives.h says in which order they are added).
// Transport     MPI reaches host memory (progress.h). For the memory of another device a
//               CommTransport carries the operations under the same rules (comm_nccl.cuh). Setup,
//               scalars and the watch stay here.
// Failures      A failed message or a lost rank (watchdog.h) ends all ranks with EXIT_PEER.
// Memory, calls Nothing is allocated here after comm_allocate(). One thread makes all calls.
#ifndef COMM_H
#define COMM_H

#include "base/base.h"
#include "base/cores.h"
#include "comm/collectives.h"
#include "comm/group.h"
#include "comm/messages.h"
#include "comm/mpi.h"
#include "comm/progress.h"
#include "comm/records.h"
#include "comm/watchdog.h"
#include <limits.h> // INT_MAX

enum {
    COMM_MPI_START_S = 120, // limit of MPI's own start, before the options are known
    // Eight slots of 1 MiB: large enough for few round trips while operations compute between two
    // polls, and small enough that received data is summed from the cache.
    COMM_STAGING_BYTES = 8 << 20,
};

// -------------------------------------------------------------------------------------------------
// Starting and ending

static inline Group group_all(const Comm *c) {
    return group_make(NULL, c->ranks, c->rank, c->node_of);
}
// Starts MPI, fills in ranks and nodes, and allocates the requests. All ranks call it.
static inline void comm_start(Comm *c, int *argc, char ***argv) {
    memset(c, 0, sizeof *c);
    c->transport.name = HAS_MPI ? "mpi" : "none";
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
    c->node_of = new_array(int, c->ranks, "ranks");
    c->sources = new_array(const float *, c->ranks, "ranks");
    c->small_bounds = new_array(int64_t, c->ranks + 1, "ranks");
    c->small_values = new_array(int, c->ranks, "ranks");
    MPI_Allgather(&leader, 1, MPI_INT, c->node_of, 1, MPI_INT, c->world);
    comm_meet(c, c->node_of);
    // enough requests for arrays of up to 64 GiB in one operation
    int64_t parts = ceil_div((int64_t)1 << 36, COMM_PART_BYTES);
    c->request_capacity = (int)(4 * c->ranks + 4 * parts);
    c->completed = new_array(int, c->request_capacity, "requests");
    for (int i = 0; i < COMM_SLOTS; i++) {
        c->slot[i].request = new_array(MPI_Request, c->request_capacity, "requests");
        c->slot[i].peer = new_array(int, c->request_capacity, "requests");
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

// Returns the bytes of staging that reductions of up to `elements` elements need to go in one
// piece, but at most `most`. Longer reductions go in several pieces.
static inline size_t comm_staging_bytes(const Group *g, DType wire, int64_t elements, size_t most) {
    int64_t segment = round_up(ceil_div(elements, g->n) + 4096, 16); // slices are whole chunks
    int64_t bytes = segment * 4 * COMM_SLOTS * comm_region(g, wire, STAGED_END);
    return g->n == 1 ? 0 : (size_t)min_i64(bytes, (int64_t)most);
}
// Sets the staging buffer of reductions, in memory that the transport reaches. The caller keeps it
// until comm_end() and frees it. Nothing is allocated here later.
static inline void comm_allocate(Comm *c, void *staging, size_t staging_bytes) {
    c->staging = (char *)staging;
    c->staging_bytes = staging_bytes;
}

// Prepares a group for collectives. All its members call it; a rank in several groups joins them in
// the same order as the other members. Ranks outside of the group may call it.
static inline void comm_join(Comm *c, Group *g) {
    if (c->transport.join) { c->transport.join(c, g); }
}
// Announces that collectives of the group will run over this memory, until comm_end() or
// comm_share_none(). The caller must call comm_share_none() before it frees any of this memory.
static inline void comm_share(Comm *c, const Group *g, void *memory, size_t bytes) {
    if (c->transport.share) { c->transport.share(c, g, memory, bytes); }
}
static inline void comm_share_none(Comm *c) { comm_share(c, NULL, NULL, 0); }

// Sets the counted bytes and the time spent waiting to 0. Each rank has its own.
static inline void comm_reset_counters(Comm *c) {
    memset(c->bytes, 0, sizeof c->bytes);
    c->waited_s = 0;
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

// -------------------------------------------------------------------------------------------------
// Begin and wait. Begins return at once. Every begun operation is waited for once. While it is in
// flight, comm_progress() advances it.

// Waits until an operation is complete; for a collective, also all that began before it. Then the
// request's number is 0. An operation of a transport is complete for later work of the compute
// stream; the host sees its result after ops_wait().
static inline void comm_wait(Comm *c, CommRequest *r) {
    if (r->number < 0) { c->transport.wait(c, *r); }
    if (r->number > 0) { comm_wait_by_mpi(c, *r); }
    r->number = 0;
}

#ifndef COMM_BEGUN // tests wait here
#define COMM_BEGUN(c, request)
#endif
static inline CommRequest comm_begin(Comm *c, const CommOp *op) {
    CommRequest r = {.message = op->kind == COMM_SEND};
    assert(r.message || op->group->me >= 0);
    if (op->send) {
        const CommLink link = c->node_of[op->peer] == c->node ? LINK_INTRA : LINK_INTER;
        c->bytes[COMM_SEND][link] += (int64_t)op->element_bytes;
    }
    if (op->on_host || !c->transport.begin) {
        r = comm_begin_by_mpi(c, op);
    } else {
        r.number = c->transport.begin(c, op);
    }
    COMM_BEGUN(c, &r);
    return r;
}
// A collective in place on an array, counted.
static inline CommOp comm_collective(CommKind kind, CommLabel label, const Group *g,
                                     const void *array, const int64_t *bounds,
                                     size_t element_bytes) {
    char *data = (char *)(uintptr_t)array;
    const CommOp op = {.kind = kind,
                       .label = label,
                       .counted = true,
                       .group = g,
                       .bounds = bounds,
                       .in = data,
                       .out = data,
                       .slice = data + (size_t)bounds[g->me] * element_bytes,
                       .element_bytes = element_bytes};
    return op;
}
// All-gather of data(bounds[n]): slice i is valid at member i before, and everywhere after. All
// members of the group call it.
static inline CommRequest comm_all_gather_begin(Comm *c, CommLabel label, const Group *g,
                                                void *data, const int64_t *bounds,
                                                size_t element_bytes) {
    const CommOp op = comm_collective(COMM_ALL_GATHER, label, g, data, bounds, element_bytes);
    return comm_begin(c, &op);
}
// Reduce-scatter: slice = this rank's slice of the sum of in(bounds[n]) over the members. slice may
// be this rank's slice inside `in`. wire: what messages hold, fp32 or bf16. All members call it.
static inline CommRequest comm_reduce_scatter_begin(Comm *c, CommLabel label, const Group *g,
                                                    const float *in, float *slice,
                                                    const int64_t *bounds, DType wire) {
    CommOp op = comm_collective(COMM_REDUCE_SCATTER, label, g, in, bounds, sizeof *in);
    op.out = NULL;
    op.slice = (char *)slice;
    op.wire = wire;
    return comm_begin(c, &op);
}
// All-reduce: data(bounds[n]) = its sum over the members, with the same bits everywhere. With wire
// bf16 the result is rounded to bf16 too. All members call it.
static inline CommRequest comm_all_reduce_begin(Comm *c, CommLabel label, const Group *g,
                                                float *data, const int64_t *bounds, DType wire) {
    CommOp op = comm_collective(COMM_ALL_REDUCE, label, g, data, bounds, sizeof *data);
    op.wire = wire;
    return comm_begin(c, &op);
}
// Returns an all-to-all. apart: see CommOp.
static inline CommOp comm_all_to_all_op(CommLabel label, const Group *g, const void *send,
                                        const int64_t *send_bounds, void *recv,
                                        const int64_t *recv_bounds, bool apart,
                                        size_t element_bytes) {
    CommOp op = comm_collective(COMM_ALL_TO_ALL, label, g, recv, recv_bounds, element_bytes);
    op.in = (const char *)send;
    op.bounds = send_bounds;
    op.recv_bounds = recv_bounds;
    op.apart = apart;
    op.slice = comm_received(&op, g->me).data;
    return op;
}
// All-to-all: slice i of send(send_bounds[n]) goes to member i; what member i sends begins at
// recv_bounds[i] of recv. The two do not overlap. All members call it.
static inline CommRequest comm_all_to_all_begin(Comm *c, CommLabel label, const Group *g,
                                                const void *send, const int64_t *send_bounds,
                                                void *recv, const int64_t *recv_bounds,
                                                size_t element_bytes) {
    const CommOp op =
        comm_all_to_all_op(label, g, send, send_bounds, recv, recv_bounds, false, element_bytes);
    return comm_begin(c, &op);
}
// The same, where slices need not follow each other: slice i of send is elements send_ranges[2 i]
// to send_ranges[2 i + 1] - 1, and so for recv. Ranges ascend. What is between them stays as it is.
static inline CommRequest comm_all_to_all_ranges_begin(Comm *c, CommLabel label, const Group *g,
                                                       const void *send, const int64_t *send_ranges,
                                                       void *recv, const int64_t *recv_ranges,
                                                       size_t element_bytes) {
    const CommOp op =
        comm_all_to_all_op(label, g, send, send_ranges, recv, recv_ranges, true, element_bytes);
    return comm_begin(c, &op);
}

static inline CommOp comm_message(CommLabel label, bool send, int peer, void *data, size_t bytes) {
    const CommOp op = {.kind = COMM_SEND,
                       .label = label,
                       .send = send,
                       .peer = peer,
                       .out = (char *)data,
                       .element_bytes = bytes};
    return op;
}
// Sends `bytes` bytes to another rank, or receives them from it. Both ranks call it, with as many
// bytes; if they are 0, nothing is sent. Messages from one rank to another on one channel match in
// the order in which both ranks begin them. Channels are independent of each other. Ends the
// program (EXIT_INPUT) if a message is longer than INT_MAX.
static inline CommRequest comm_message_begin(Comm *c, CommLabel label, bool send, int peer,
                                             int channel, void *data, size_t bytes) {
    const CommRequest none = {.number = 0};
    CommOp op = comm_message(label, send, peer, data, bytes);
    op.channel = channel;
    if (bytes > INT_MAX) {
        die(EXIT_INPUT, "choose a smaller --micro-batch",
            "a message of %zu bytes to another stage: 2 GiB are too much", bytes);
    }
    return bytes ? comm_begin(c, &op) : none;
}
// The same of a few bytes (not 0) in host memory, where a transport carries the device's messages.
static inline CommRequest comm_host_message_begin(Comm *c, CommLabel label, bool send, int peer,
                                                  void *data, size_t bytes) {
    CommOp op = comm_message(label, send, peer, data, bytes);
    op.on_host = true;
    return comm_begin(c, &op);
}
// The two directions of comm_message_begin() on channel 0.
static inline CommRequest comm_send_begin(Comm *c, CommLabel label, int peer, const void *data,
                                          size_t bytes) {
    return comm_message_begin(c, label, true, peer, 0, (void *)(uintptr_t)data, bytes);
}
static inline CommRequest comm_receive_begin(Comm *c, CommLabel label, int peer, void *data,
                                             size_t bytes) {
    return comm_message_begin(c, label, false, peer, 0, data, bytes);
}
// Do messages have channels other than 0? A transport has none.
static inline bool comm_has_channels(const Comm *c) { return !c->transport.begin; }
// Returns whether a message by MPI was complete at the last comm_note_messages().
static inline bool comm_known_complete(const Comm *c, CommRequest r) {
    return comm_message_noted(c, r.number);
}

// -------------------------------------------------------------------------------------------------
// Setup and scalars: small, in host memory, complete on return, not counted. All members of the
// group (without one: all ranks) call them.

// All-gather: elements bounds[i] .. bounds[i + 1] - 1 of data are valid at member i before, and
// everywhere after.
static inline void comm_gather_now(Comm *c, const Group *g, const char *what, void *data,
                                   const int64_t *bounds, size_t element_bytes) {
    const CommLabel label = {what, -1, c->step};
    CommOp op = comm_collective(COMM_ALL_GATHER, label, g, data, bounds, element_bytes);
    op.on_host = true;
    op.counted = false;
    CommRequest r = comm_begin(c, &op);
    comm_wait(c, &r);
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
// comm_broadcast_in() over all ranks.
static inline void comm_broadcast(Comm *c, void *data, size_t bytes, int root) {
    comm_broadcast_in(c, &c->everyone, data, bytes, root);
}
// Returns the largest, or the smallest, value of all ranks.
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
// Ends the program (EXIT_INPUT) if a switch of the environment is on for some ranks only. mpirun
// hands its own environment to the ranks of its own machine; to others only what -x names.
static inline void comm_agree_environment(Comm *c) {
    for (int i = 0; i < ENVIRONMENT_SWITCHES; i++) {
        const int mine = environment_asks((Switch)i);
        if (comm_agree_max(c, mine) == comm_agree_min(c, mine)) { continue; }
        const char *name = environment_names[i];
        char hint[100];
        snprintf(hint, sizeof hint, "mpirun -x %s gives it to all ranks", name);
        die(EXIT_INPUT, hint, "%s must be the same on all ranks; it is %s on this one", name,
            mine ? "on" : "off");
    }
}
// Returns when all ranks have called it.
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
    uint64_t *all = new_array(uint64_t, c->ranks, "the places of ranks");
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
