// comm_nccl.cuh: collectives and messages between the memories of GPUs, as transports of comm.h.
// NCCL is used if each rank has a GPU of its own. NCCL refuses ranks that share a GPU; then data
// are staged (comm_staged.cuh). For tests on one GPU, TRAIN_GPT_NCCL_SHARED=1 (environment) makes
// ranks that share a GPU use NCCL all the same (nccl_share_gpus()), and a single rank open a
// communicator.
//
// NCCL
//   Groups     Each group has one communicator, made once. The first member makes an id, which MPI
//              sends to the others. So only the members take part.
//   Order      All collectives of a rank run on one stream of high priority, in the order of their
//              start. This order is the same on all members (comm.h), so communicators never wait
//              for each other in a cycle. A collective waits, by an event, for the work that the
//              compute stream had when the collective was started; by another event the compute
//              stream waits for the result. The host waits for neither.
//   Messages   between two ranks have a communicator and a stream of their own, and run in the
//              order in which they are posted. A message that waits for its other end blocks later
//              messages, which the schedule allows for (walk.h: rendezvous), but no collective.
//              Pairs of ranks that exchange messages connect at start.
//   Slices     All slices are as long as the first, so a collective is one call, in place. Where
//              the last slices are shorter, their arrays have padding (comm.h: Slices). Its zeros
//              are sent, too.
//   Sums       are computed by NCCL, in an order that its algorithm has for this number of ranks,
//              size and network. They are in fp32, or with wire bf16 in bf16: contributions are
//              packed on the device, and every partial sum is rounded. So the last bits differ from
//              the sums of comm.h, and may differ between clusters, but two runs on one cluster are
//              equal.
//   Lost ranks Communicators do not block. A call that needs other members returns "in progress"
//              and is polled, while the watch of comm.h checks the members. The watch also runs
//              when the host waits for a device that itself waits for others: its oldest
//              collective has begun and is not complete, or its compute stream needs a message. An
//              operation that is only open does not count: it may stay open for as long as other
//              ranks compute. A rank whose device still computes what a collective needs answers
//              that it works. NCCL shows no progress inside a collective, so --watchdog must be
//              longer than the longest one takes. An error ends the process, MPI ends the other
//              ranks, and an alarm ends a process that hangs meanwhile. No NCCL call is used for
//              this.
#ifndef COMM_NCCL_CUH
#define COMM_NCCL_CUH

#include "comm/comm_staged.cuh" // where ranks share a GPU
#ifdef __CUDACC__
#include <nccl.h> // collectives between GPUs
#else
#include "test/emu_nccl.h"
#endif

enum {
    NCCL_MOST = 1024,   // limit of collectives in flight, and of messages in flight
    NCCL_GROUPS = 256,  // limit of communicators
    NCCL_SHARED = 1024, // limit of registered pieces of memory
};
// Seconds between two polls of CUDA (operations call comm_progress() all the time); between two
// checks for errors; from an error to the end, to find the lost rank.
static const double NCCL_POLL_S = 20e-6, NCCL_LOOK_S = 0.1, NCCL_BLAME_S = 3;

// -------------------------------------------------------------------------------------------------
// NCCL
// Memory that is registered with a communicator.
typedef struct {
    ncclComm_t communicator;
    void *handle;
} NcclShared;
typedef struct {
    CommOp op;
    // ready: the compute stream has reached the operation's start, or, if it is `needed`, its wait;
    // carried: the operation is complete
    cudaEvent_t ready, carried;
    bool needed; // of a message: the compute stream waits for it
} NcclOp;
// The operations of one stream, which run one after another.
typedef struct {
    cudaStream_t carrier;
    NcclOp ops[NCCL_MOST]; // ring: operations done .. started - 1 are in flight
    int64_t started, done;
} NcclLane;
typedef struct {
    Stream *stream;            // the compute stream
    NcclLane lanes[2];         // collectives, messages
    Group joined[NCCL_GROUPS]; // groups with a communicator: all ranks, then others
    NcclShared shared[NCCL_SHARED];
    int groups, shares;
    bool alone;            // a group of one member has a communicator, too
    ncclComm_t talkers;    // the communicator of messages; NULL: no rank sends any
    bool *connected;       // [ranks] this rank exchanges messages with the other one
    const CommOp *calling; // operation whose NCCL call is in progress; NULL: none
    double polled, looked; // time of the last poll, of the last check for errors
} Nccl;

static inline Nccl *nccl_state(const Comm *c) { return (Nccl *)c->transport.state; }
static inline ncclComm_t nccl_channel(const Group *g) { return (ncclComm_t)g->channel; }
static inline bool nccl_refused(ncclResult_t result) {
    return result != ncclSuccess && result != ncclInProgress;
}

// Ends the program after an error of NCCL (EXIT_PEER or EXIT_RESOURCES). It waits for a moment
// first: the watch may find the lost rank and name it; otherwise the message names the ranks that
// do not answer.
__attribute__((noreturn)) static inline void nccl_failed(Comm *c, ncclComm_t communicator,
                                                         ncclResult_t error, const CommOp *op) {
    SignalText what = {"", 0}, silent = {"", 0};
    double before = c->clock;
    c->transport.poll = NULL;
    c->transport.waits = op;
    c->looked = seconds_now();
    c->last_progress = c->clock;
    for (double end = c->looked + NCCL_BLAME_S; seconds_now() < end; usleep(1000)) {
        comm_progress();
    }
    comm_describe_waiting(c, &what);
    for (int r = 0; op && r < c->ranks; r++) { // ranks that a question was sent to
        if (!c->peers[r].awaited || c->peers[r].answered > before) { continue; }
        signal_text_print(&silent, "; no answer from rank %d on %s", r, c->peers[r].place.host);
    }
    bool of_others =
        error == ncclRemoteError || error == ncclSystemError || error == ncclInternalError;
    die(of_others ? EXIT_PEER : EXIT_RESOURCES, "NCCL_DEBUG=WARN makes NCCL say more",
        "NCCL: %s: %s, in %s%s", ncclGetErrorString(error), ncclGetLastError(communicator),
        what.text, silent.text);
}
// Waits until an NCCL call for op, which may need other members, is no longer in progress.
static inline void nccl_finish(Comm *c, ncclComm_t communicator, ncclResult_t result,
                               const CommOp *op) {
    Nccl *n = nccl_state(c);
    while (result == ncclInProgress) {
        n->calling = op;
        comm_progress();
        if (ncclCommGetAsyncError(communicator, &result) != ncclSuccess) {
            result = ncclRemoteError;
        }
    }
    n->calling = NULL;
    c->transport.waits = NULL; // until the next poll
    if (result != ncclSuccess) { nccl_failed(c, communicator, result, op); }
}
// Checks a call between ncclGroupStart() and ncclGroupEnd(). NCCL only queues such calls, and
// reports errors here or at the end of the group.
static inline void nccl_call(Comm *c, const CommOp *op, ncclResult_t result) {
    if (nccl_refused(result)) { nccl_failed(c, nccl_channel(op->group), result, op); }
}

static inline NcclOp *lane_op(NcclLane *l, int64_t i) { return &l->ops[i % NCCL_MOST]; }
static inline const CommOp *lane_oldest(NcclLane *l) {
    return l->done < l->started ? &lane_op(l, l->done)->op : NULL;
}
// Updates `done`. Returns whether an operation has completed since the last call.
static inline bool lane_moved(NcclLane *l) {
    const int64_t before = l->done;
    while (l->done < l->started && cuda_happened(lane_op(l, l->done)->carried)) { l->done++; }
    return l->done > before;
}
// Returns the oldest collective if it has begun; otherwise NULL.
static inline const CommOp *nccl_awaited_collective(NcclLane *l) {
    const CommOp *oldest = lane_oldest(l);
    return oldest && cuda_happened(lane_op(l, l->done)->ready) ? oldest : NULL;
}
// Returns the oldest message if the compute stream waits for it or for a later one; otherwise NULL.
// The compute stream may need messages in any order.
static inline const CommOp *nccl_awaited_message(NcclLane *l) {
    for (int64_t i = l->done; i < l->started; i++) {
        const NcclOp *o = lane_op(l, i);
        if (o->needed && cuda_happened(o->ready)) { return lane_oldest(l); }
    }
    return NULL;
}
// Updates which operations are complete and what the device waits for. Ends the program if NCCL
// reports an error.
static inline void nccl_poll(Comm *c) {
    Nccl *n = nccl_state(c);
    CommTransport *t = &c->transport;
    const CommOp *before = t->waits;
    double now = seconds_now();
    if (now - n->polled < NCCL_POLL_S) { return; }
    n->polled = now;
    const bool moved[2] = {lane_moved(&n->lanes[0]), lane_moved(&n->lanes[1])};
    t->waits = n->calling ? n->calling : nccl_awaited_collective(&n->lanes[0]);
    if (!t->waits) { t->waits = nccl_awaited_message(&n->lanes[1]); }
    if (t->waits != before || moved[0] || moved[1]) { c->last_progress = c->clock; }
    if (t->waits && !before) { c->looked = now; }
    if (now - n->looked < NCCL_LOOK_S) { return; }
    n->looked = now;
    for (int i = 0; i < n->groups; i++) {
        ncclComm_t communicator = nccl_channel(&n->joined[i]);
        ncclResult_t error = ncclSuccess, asked = ncclCommGetAsyncError(communicator, &error);
        const CommOp *oldest = lane_oldest(&n->lanes[communicator == n->talkers]);
        error = asked == ncclSuccess ? error : asked;
        if (nccl_refused(error)) {
            nccl_failed(c, communicator, error, oldest ? oldest : t->waits);
        }
    }
}

static inline void lane_open(NcclLane *l) {
    int least, greatest;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&l->carrier, cudaStreamNonBlocking, greatest));
    for (int i = 0; i < NCCL_MOST; i++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&l->ops[i].ready, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&l->ops[i].carried, cudaEventDisableTiming));
    }
}
static inline void lane_close(NcclLane *l) {
    for (int i = 0; i < NCCL_MOST; i++) {
        CUDA_CHECK(cudaEventDestroy(l->ops[i].ready));
        CUDA_CHECK(cudaEventDestroy(l->ops[i].carried));
    }
    CUDA_CHECK(cudaStreamDestroy(l->carrier));
}

// Makes a communicator of a group's members, which all call it.
static inline ncclComm_t nccl_connect(Comm *c, const Group *g) {
    Nccl *n = nccl_state(c);
    if (n->groups == NCCL_GROUPS) {
        die(EXIT_RESOURCES, NULL, "more than %d groups of ranks", (int)NCCL_GROUPS);
    }
    ncclUniqueId id;
    ncclResult_t made = g->me == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (made != ncclSuccess) {
        die(EXIT_RESOURCES, "NCCL_DEBUG=WARN makes NCCL say more", "NCCL does not start: %s",
            ncclGetErrorString(made));
    }
    comm_broadcast_in(c, g, &id, sizeof id, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const CommOp op = {.label = {"start of NCCL", -1, c->step}, .group = g};
    ncclComm_t communicator = NULL; // NCCL leaves it so if it refuses the call
    ncclResult_t result = ncclCommInitRankConfig(&communicator, g->n, id, g->me, &config);
    nccl_finish(c, communicator, result, &op);
    n->joined[n->groups] = group_part(g, NULL, g->n);
    n->joined[n->groups++].channel = communicator;
    return communicator;
}
// Joins a group. Groups of the same ranks share a communicator, also those of later stores. A group
// of one member has none, unless a test asks for it.
static inline void nccl_join(Comm *c, Group *g) {
    Nccl *n = nccl_state(c);
    if (g->me < 0 || g->n < (n->alone ? 1 : 2)) { return; }
    for (int i = 0; i < n->groups && !g->channel; i++) {
        const Group *joined = &n->joined[i];
        if (joined->n == g->n && !memcmp(joined->ranks, g->ranks, (size_t)g->n * sizeof(int))) {
            g->channel = joined->channel;
        }
    }
    if (!g->channel) { g->channel = nccl_connect(c, g); }
}
// Registers memory with NCCL. All members call it. Memory that NCCL refuses is copied through
// NCCL's buffers: slower, but not an error. memory NULL: unregisters all memory.
static inline void nccl_share(Comm *c, const Group *g, void *memory, size_t bytes) {
    Nccl *n = nccl_state(c);
    for (; !memory && n->shares; n->shares--) {
        ncclCommDeregister(n->shared[n->shares - 1].communicator, n->shared[n->shares - 1].handle);
    }
    if (!memory) { return; }
    NcclShared shared = {(ncclComm_t)g->channel, NULL};
    if (!shared.communicator || n->shares == NCCL_SHARED) { return; }
    const int mine =
        ncclCommRegister(shared.communicator, memory, bytes, &shared.handle) == ncclSuccess &&
        shared.handle;
    int *theirs = c->small_values, taken = 0;
    comm_all_gather_in(c, g, &mine, theirs, sizeof mine);
    for (int i = 0; i < g->n; i++) { taken += theirs[i]; }
    if (taken == g->n) { // NCCL needs the memory of all members registered, or of none
        n->shared[n->shares++] = shared;
    } else if (mine) {
        ncclCommDeregister(shared.communicator, shared.handle);
    }
}

// Returns the elements of each slice with its padding.
static inline size_t nccl_slice(const CommOp *op) {
    const int64_t *b = op->bounds, slice = b[1];
    for (int i = 0; i <= op->group->n; i++) { assert(b[i] == min_i64(i * slice, b[op->group->n])); }
    return (size_t)slice;
}
static inline void nccl_exchange(Comm *c, const CommOp *op, ncclComm_t communicator,
                                 cudaStream_t carrier) {
    for (int i = 0; i < op->group->n; i++) {
        const CommPart sent = comm_sent(op, i), received = comm_received(op, i);
        const size_t out_bytes = (size_t)sent.bytes, in_bytes = (size_t)received.bytes;
        if (i == op->group->me) {
            CUDA_CHECK(cudaMemcpyAsync(received.data, sent.data, out_bytes,
                                       cudaMemcpyDeviceToDevice, carrier));
            continue;
        }
        if (out_bytes) {
            nccl_call(c, op, ncclSend(sent.data, out_bytes, ncclUint8, i, communicator, carrier));
        }
        if (in_bytes) {
            nccl_call(c, op,
                      ncclRecv(received.data, in_bytes, ncclUint8, i, communicator, carrier));
        }
    }
}
// Converts between the fp32 arrays of a reduction and its bf16 values, which are in the staging
// buffer.
static inline void nccl_pack(Comm *c, const CommOp *op, cudaStream_t carrier) {
    const int64_t *b = op->bounds, n = op->group->n,
                  sent = op->kind == COMM_ALL_REDUCE ? b[n] : bounds_padded(b, (int)n);
    if ((size_t)sent * 2 > c->staging_bytes) {
        die(EXIT_RESOURCES, NULL, "no memory to pack %" PRId64 " elements", sent);
    }
    convert_on(carrier, (__nv_bfloat16 *)c->staging, (const float *)comm_floats(op->in), sent);
}
static inline void nccl_unpack(Comm *c, const CommOp *op, cudaStream_t carrier) {
    const bool whole = op->kind == COMM_ALL_REDUCE;
    const int64_t *b = op->bounds, first = whole ? 0 : b[op->group->me],
                  count = whole ? b[op->group->n] : slice_length(b, op->group->me);
    if (!count) { return; }
    convert_on(carrier, comm_floats(whole ? op->out : op->slice),
               (const __nv_bfloat16 *)c->staging + first, count);
}
// Queues a collective on the carrier stream, with the conversions of wire bf16.
static inline void nccl_carry(Comm *c, const CommOp *op) {
    cudaStream_t carrier = nccl_state(c)->lanes[0].carrier;
    const Group *g = op->group;
    ncclComm_t communicator = nccl_channel(g);
    const bool packed = comm_op_reduces(op) && op->wire == DTYPE_BF16 && g->n > 1;
    const ncclDataType_t type = packed ? ncclBfloat16 : ncclFloat32;
    const size_t size = packed ? 2 : op->element_bytes, all = (size_t)op->bounds[g->n];
    char *in = packed ? c->staging : (char *)(uintptr_t)op->in, *mine = op->slice;
    ncclResult_t queued = ncclSuccess;
    if (packed) { nccl_pack(c, op, carrier); }
    nccl_call(c, op, ncclGroupStart()); // an exchange is several calls
    switch (op->kind) {
    case COMM_ALL_GATHER: {
        const size_t slice = nccl_slice(op) * size;
        queued = ncclAllGather(op->out + (size_t)g->me * slice, op->out, slice, ncclUint8,
                               communicator, carrier);
        break;
    }
    case COMM_REDUCE_SCATTER: {
        const size_t slice = nccl_slice(op);
        // In place, NCCL requires the position in the padded array, which for an empty slice is in
        // the padding.
        if (packed || mine == comm_sent(op, g->me).data) {
            mine = in + (size_t)g->me * slice * size;
        }
        queued = ncclReduceScatter(in, mine, slice, type, ncclSum, communicator, carrier);
        break;
    }
    case COMM_ALL_REDUCE:
        queued =
            ncclAllReduce(in, packed ? in : op->out, all, type, ncclSum, communicator, carrier);
        break;
    default: nccl_exchange(c, op, communicator, carrier);
    }
    nccl_call(c, op, queued);
    nccl_finish(c, communicator, ncclGroupEnd(), op);
    if (packed) { nccl_unpack(c, op, carrier); }
}

// Records the next operation of a lane, and makes it wait for the work that is queued on the
// compute stream.
static inline const CommOp *lane_begin(Comm *c, NcclLane *l, const CommOp *op) {
    Nccl *n = nccl_state(c);
    while (l->started - l->done == NCCL_MOST) { // rare: most steps have fewer
        (void)cuda_done(cudaStreamQuery(l->carrier));
        comm_progress();
    }
    NcclOp *begun = lane_op(l, l->started);
    begun->op = *op;
    begun->needed = false;
    CUDA_CHECK(cudaEventRecord(begun->ready, stream_of(n->stream)));
    CUDA_CHECK(cudaStreamWaitEvent(l->carrier, begun->ready, 0));
    return &begun->op;
}
static inline int64_t lane_end(NcclLane *l) {
    CUDA_CHECK(cudaEventRecord(lane_op(l, l->started)->carried, l->carrier));
    return -++l->started;
}
// Makes the compute stream wait for an operation.
static inline void nccl_wait(Comm *c, CommRequest r) {
    Nccl *n = nccl_state(c);
    NcclLane *l = &n->lanes[r.message];
    cudaStream_t stream = stream_of(n->stream);
    NcclOp *o = lane_op(l, -r.number - 1);
    if (l->done >= -r.number) { return; }
    if (r.message) {
        // the event's first use, at the start, is already queued on both streams
        CUDA_CHECK(cudaEventRecord(o->ready, stream));
        o->needed = true;
    }
    CUDA_CHECK(cudaStreamWaitEvent(stream, o->carried, 0));
}
static inline int64_t nccl_begin_message(Comm *c, const CommOp *op) {
    Nccl *n = nccl_state(c);
    NcclLane *l = &n->lanes[1];
    assert(n->connected[op->peer]);
    // the ring is full: wait for the oldest message, so that the watch checks its other end
    const CommRequest oldest = {true, -(l->done + 1)};
    if (l->started - l->done == NCCL_MOST) { nccl_wait(c, oldest); }
    const CommOp *begun = lane_begin(c, l, op);
    const size_t bytes = op->element_bytes;
    nccl_finish(c, n->talkers,
                op->send ? ncclSend(op->out, bytes, ncclUint8, op->peer, n->talkers, l->carrier)
                         : ncclRecv(op->out, bytes, ncclUint8, op->peer, n->talkers, l->carrier),
                begun);
    return lane_end(l);
}
static inline void nccl_count(Comm *c, const CommOp *op) {
    const Group *g = op->group;
    for (int i = 0; op->apart && i < g->n; i++) {
        comm_count(g, g->me, i, comm_sent(op, i).bytes, c->bytes[op->kind]);
    }
    if (op->apart) { return; }
    comm_bytes_sent(op->kind, g, g->me, op->bounds,
                    comm_op_reduces(op) ? dtype_size(op->wire) : op->element_bytes,
                    c->bytes[op->kind]);
}
static inline int64_t nccl_begin(Comm *c, const CommOp *op) {
    Nccl *n = nccl_state(c);
    if (op->kind == COMM_SEND) { return nccl_begin_message(c, op); }
    if (op->group->n == 1 && !n->alone) { return copy_to_myself(n->stream, op); }
    nccl_count(c, op);
    if (op->bounds[op->group->n] == 0 && op->kind != COMM_ALL_TO_ALL) { return 0; }
    nccl_carry(c, lane_begin(c, &n->lanes[0], op));
    return lane_end(&n->lanes[0]);
}

static inline void nccl_end(Comm *c) {
    Nccl *n = nccl_state(c);
    const CommOp op = {.label = {"end of NCCL", -1, c->step}, .group = &c->everyone};
    for (int i = 0; i < 2; i++) { CUDA_CHECK(cudaStreamSynchronize(n->lanes[i].carrier)); }
    nccl_share(c, NULL, NULL, 0);
    while (n->groups) {
        Group *g = &n->joined[n->groups - 1];
        nccl_finish(c, nccl_channel(g), ncclCommFinalize(nccl_channel(g)), &op);
        n->groups--; // it is not polled any more
        ncclCommDestroy(nccl_channel(g));
        group_free(g);
    }
    for (int i = 0; i < 2; i++) { lane_close(&n->lanes[i]); }
    free(n->connected);
    free(n);
    c->transport.poll = NULL;
}
// Connects this rank with all ranks that it exchanges messages with, in ascending order, by one
// message in each direction. All ranks call it.
static inline void nccl_meet_peers(Comm *c, const CommTraffic *traffic) {
    Nccl *n = nccl_state(c);
    if (!traffic->bytes || c->ranks == 1) { return; }
    n->talkers = nccl_connect(c, &c->everyone);
    char *bytes = (char *)ops_alloc(2);
    if (!bytes) { die(EXIT_RESOURCES, NULL, "no device memory for messages"); }
    const CommLabel label = {"connection", -1, c->step};
    for (int i = 0; i < traffic->count; i++) { // ascending
        const int peer = traffic->peers[i];
        n->connected[peer] = true;
        for (int turn = 0; turn < 2; turn++) {
            const bool send = turn == (c->rank > peer);
            const CommOp op = comm_message(label, send, peer, bytes + turn, 1);
            const CommRequest r = {true, nccl_begin_message(c, &op)};
            nccl_wait(c, r);
        }
    }
    ops_wait(n->stream);
    ops_free(bytes);
}
static inline void nccl_open(Comm *c, Stream *s, const CommTraffic *traffic) {
    Nccl *n = new_array(Nccl, 1, "NCCL");
    n->stream = s;
    n->alone = c->ranks == 1 && environment_asks(ENVIRONMENT_NCCL_SHARED);
    n->connected = new_array(bool, c->ranks, "NCCL");
    for (int i = 0; i < 2; i++) { lane_open(&n->lanes[i]); }
    const CommTransport t = {.name = "nccl",
                             .join = nccl_join,
                             .share = nccl_share,
                             .begin = nccl_begin,
                             .wait = nccl_wait,
                             .poll = nccl_poll,
                             .end = nccl_end,
                             .state = n};
    c->transport = t;
    nccl_join(c, &c->everyone);
    nccl_meet_peers(c, traffic);
}

// -------------------------------------------------------------------------------------------------
// Choice of the transport

// Returns whether each rank has a GPU of its own; the result is the same on all ranks. *sharing:
// number of ranks on this rank's GPU. All ranks call it.
static inline bool gpus_apart(Comm *c, int *sharing) {
    typedef struct {
        char bus[32];
    } Place;
    Place mine, *all = new_array(Place, c->ranks, "GPUs");
    int device;
    bool apart = true;
    memset(&mine, 0, sizeof mine);
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(mine.bus, (int)sizeof mine.bus, device));
    comm_all_gather_small(c, &mine, all, sizeof mine);
    *sharing = 0;
    for (int a = 0; a < c->ranks; a++) {
        for (int b = 0; b < c->ranks; b++) {
            bool same = !strcmp(c->peers[a].place.host, c->peers[b].place.host) &&
                        !strcmp(all[a].bus, all[b].bus);
            apart = apart && (a == b || !same);
            *sharing += a == c->rank && same;
        }
    }
    free(all);
    return apart;
}
// Makes NCCL accept ranks that share a GPU. It refuses two ranks whose host and GPU are the same
// ("Duplicate GPU detected"), and takes NCCL_HOSTID, where it is set, for the name of the host. So
// each rank seems to be on a host of its own, and data go through sockets of the loopback device.
// Direct copies and shared memory, which hosts do not have, are disabled by name, too. NCCL reads
// the environment once, at its first call, so this comes before it. A network that the user has
// chosen stays.
static inline void nccl_share_gpus(const Comm *c) {
    char host[32];
    snprintf(host, sizeof host, "train_gpt rank %d", c->rank);
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_P2P_DISABLE", "1", 1);
    setenv("NCCL_SHM_DISABLE", "1", 1);
    setenv("NCCL_NET", "Socket", 0);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
}
// Returns whether NCCL connects the ranks: each has a GPU of its own, or a test asks for it.
// *sharing: as gpus_apart(). All ranks call it, before the first call of NCCL.
static inline bool nccl_connects(Comm *c, int *sharing) {
    const bool apart = gpus_apart(c, sharing), asked = environment_asks(ENVIRONMENT_NCCL_SHARED);
    if (asked && !apart) { nccl_share_gpus(c); }
    return apart || asked;
}
// Opens the transport for counted collectives and messages on this rank's GPU. elements: most fp32
// elements of a collective, with padding; records: most bytes of records sent and received;
// traffic: bounds of the messages. All ranks call it.
static inline void transport_open(Comm *c, Stream *s, DType wire, int64_t elements, size_t records,
                                  const CommTraffic *traffic) {
    int sharing;
    if (nccl_connects(c, &sharing)) {
        size_t packed = wire == DTYPE_BF16 && c->ranks > 1 ? (size_t)elements * 2 : 0;
        comm_allocate(c, packed ? memory_take(MEMORY_BUFFERS, packed, "messages") : NULL, packed);
        nccl_open(c, s, traffic);
    } else {
        staged_open(c, s, (size_t)max_i64(elements * 4, (int64_t)records),
                    comm_staging_bytes(&c->everyone, wire, elements, COMM_STAGING_BYTES), traffic);
    }
    c->transport.sharing = sharing;
}

#endif
