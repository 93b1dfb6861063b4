// comm_nccl.cuh: collectives and messages between the memories of GPUs, as transports of comm.h.
// NCCL is used if each rank has a GPU of its own. NCCL refuses ranks that share a GPU; then data
// are staged: they go through pinned host memory and the MPI messages of comm.h.
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
//              messages, which the schedule allows for (schedule.h: rendezvous), but no collective.
//              Pairs of ranks that exchange messages connect at start.
//   Slices     All slices are as long as the first, so a collective is one call, in place. Where
//              the last slices are shorter, their arrays have padding (comm.h: Data). Its zeros are
//              sent, too.
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
// Staged     start() waits for the compute stream and copies the data to the host, from where MPI
//            sends them. wait() waits for MPI and copies the result back. STAGED_MOST collectives
//            are in flight at a time, each with its own piece of pinned memory. A further one first
//            waits for the oldest, and so for all its members, which the schedule allows for
//            (engine/validator.h: order). Messages use a ring of other pieces in the same way. A
//            message that finds no free piece waits for the oldest, as with rendezvous.
#ifndef COMM_NCCL_CUH
#define COMM_NCCL_CUH

#include "comm/comm.h"              // groups, the watch, MPI
#include "ops/cuda/device_cuda.cuh" // the compute stream
#ifdef __CUDACC__
#include <nccl.h> // collectives between GPUs
#else
#include "test/emu_nccl.h"
#endif

enum {
    NCCL_MOST = 1024,      // limit of collectives in flight, and of messages in flight
    NCCL_GROUPS = 256,     // limit of communicators
    NCCL_SHARED = 1024,    // limit of registered pieces of memory
    STAGED_MOST = 2,       // limit of staged collectives in flight
    STAGED_LEAST = 4 << 20 // least bytes of a mirror; measuring the message rate needs them
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
// The operations of one stream, which run one after another.
typedef struct {
    cudaStream_t carrier;
    CommOp ops[NCCL_MOST]; // ring: operations done .. started - 1 are in flight
    // ready: the compute stream has reached the operation's start, or, if it is `needed`, its wait;
    // carried: the operation is complete
    cudaEvent_t ready[NCCL_MOST], carried[NCCL_MOST];
    bool needed[NCCL_MOST]; // messages: the compute stream waits for it
    int64_t started, done;
} NcclLane;
typedef struct {
    Stream *stream; // the compute stream
    NcclLane collectives, messages;
    Group talkers; // all ranks, with the communicator of messages; empty: no messages
    Group *pairs;  // [ranks] this rank and the other one
    ncclComm_t communicators[NCCL_GROUPS];
    NcclShared shared[NCCL_SHARED];
    Group joined[NCCL_GROUPS]; // groups of stores that have a communicator
    int groups, shares, joins;
    const CommOp *calling; // operation whose NCCL call is in progress; NULL: none
    double polled, looked; // time of the last poll, of the last check for errors
} Nccl;

static inline cudaStream_t compute_stream(const Stream *s) { return ((Gpu *)s->device)->stream; }
static inline bool cuda_happened(cudaEvent_t event) { return cuda_done(cudaEventQuery(event)); }

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
    c->fresh = c->clock;
    for (double end = c->looked + NCCL_BLAME_S; seconds_now() < end; usleep(1000)) {
        comm_progress();
    }
    comm_describe_waiting(c, &what);
    for (int r = 0; op && r < c->ranks; r++) { // ranks that a question was sent to
        if (!c->peers[r].awaited || c->peers[r].answered > before) { continue; }
        signal_text_add(&silent, "; no answer from rank ");
        signal_text_add_int(&silent, r);
        signal_text_add(&silent, " on ");
        signal_text_add(&silent, c->peers[r].place.host);
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
    Nccl *n = (Nccl *)c->transport.state;
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
    if (result != ncclSuccess && result != ncclInProgress) {
        nccl_failed(c, (ncclComm_t)op->group->channel, result, op);
    }
}

static inline const CommOp *lane_oldest(const NcclLane *l) {
    return l->done < l->started ? &l->ops[l->done % NCCL_MOST] : NULL;
}
// Updates `done`. Returns whether an operation has completed since the last call.
static inline bool lane_moved(NcclLane *l) {
    const int64_t before = l->done;
    while (l->done < l->started && cuda_happened(l->carried[l->done % NCCL_MOST])) { l->done++; }
    return l->done > before;
}
// Returns the oldest collective if it has begun; otherwise NULL.
static inline const CommOp *nccl_awaited_collective(const Nccl *n) {
    const NcclLane *l = &n->collectives;
    return lane_oldest(l) && cuda_happened(l->ready[l->done % NCCL_MOST]) ? lane_oldest(l) : NULL;
}
// Returns the oldest message if the compute stream waits for it or for a later one; otherwise NULL.
// The compute stream may need messages in any order.
static inline const CommOp *nccl_awaited_message(const Nccl *n) {
    const NcclLane *l = &n->messages;
    for (int64_t i = l->done; i < l->started; i++) {
        if (l->needed[i % NCCL_MOST] && cuda_happened(l->ready[i % NCCL_MOST])) {
            return lane_oldest(l);
        }
    }
    return NULL;
}
// Updates which operations are complete and what the device waits for. Ends the program if NCCL
// reports an error.
static inline void nccl_poll(Comm *c) {
    Nccl *n = (Nccl *)c->transport.state;
    CommTransport *t = &c->transport;
    const CommOp *before = t->waits;
    double now = seconds_now();
    if (now - n->polled < NCCL_POLL_S) { return; }
    n->polled = now;
    bool moved = lane_moved(&n->collectives);
    moved = lane_moved(&n->messages) || moved;
    t->waits = n->calling ? n->calling : nccl_awaited_collective(n);
    if (!t->waits) { t->waits = nccl_awaited_message(n); }
    if (t->waits != before || moved) { c->fresh = c->clock; }
    if (t->waits && !before) { c->looked = now; }
    if (now - n->looked < NCCL_LOOK_S) { return; }
    n->looked = now;
    for (int i = 0; i < n->groups; i++) {
        ncclResult_t error = ncclSuccess,
                     asked = ncclCommGetAsyncError(n->communicators[i], &error);
        const CommOp *oldest =
            lane_oldest(n->communicators[i] == n->talkers.channel ? &n->messages : &n->collectives);
        error = asked == ncclSuccess ? error : asked;
        if (error != ncclSuccess && error != ncclInProgress) {
            nccl_failed(c, n->communicators[i], error, oldest ? oldest : t->waits);
        }
    }
}

static inline void lane_open(NcclLane *l) {
    int least, greatest;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&l->carrier, cudaStreamNonBlocking, greatest));
    for (int i = 0; i < NCCL_MOST; i++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&l->ready[i], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&l->carried[i], cudaEventDisableTiming));
    }
}
static inline void lane_close(NcclLane *l) {
    for (int i = 0; i < NCCL_MOST; i++) {
        CUDA_CHECK(cudaEventDestroy(l->ready[i]));
        CUDA_CHECK(cudaEventDestroy(l->carried[i]));
    }
    CUDA_CHECK(cudaStreamDestroy(l->carrier));
}

// Makes the communicator of a group. All members call it. A group of one member has none.
static inline void nccl_join(Comm *c, Group *g) {
    Nccl *n = (Nccl *)c->transport.state;
    if (g->me < 0 || g->n == 1) { return; }
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
    CommOp op;
    memset(&op, 0, sizeof op);
    op.what = "start of NCCL";
    op.group = g;
    op.step = c->step;
    ncclComm_t communicator;
    ncclResult_t result = ncclCommInitRankConfig(&communicator, g->n, id, g->me, &config);
    nccl_finish(c, communicator, result, &op);
    g->channel = n->communicators[n->groups++] = communicator;
}
// Joins a group of a store. Later stores of a run have groups of the same ranks, which reuse the
// communicator of the first.
static inline void nccl_join_once(Comm *c, Group *g) {
    Nccl *n = (Nccl *)c->transport.state;
    for (int i = 0; i < n->joins && !g->channel; i++) {
        const Group *joined = &n->joined[i];
        if (joined->n == g->n && !memcmp(joined->ranks, g->ranks, (size_t)g->n * sizeof(int))) {
            g->channel = joined->channel;
        }
    }
    if (g->channel) { return; }
    nccl_join(c, g);
    if (g->channel) {
        n->joined[n->joins] = group_seen_from(g, g->me);
        n->joined[n->joins++].channel = g->channel;
    }
}
// Registers memory with NCCL. All members call it. Memory that NCCL refuses is copied through
// NCCL's buffers: slower, but not an error. memory NULL: unregisters all memory.
static inline void nccl_share(Comm *c, const Group *g, void *memory, size_t bytes) {
    Nccl *n = (Nccl *)c->transport.state;
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
static inline int64_t nccl_slice(const CommOp *op) {
    const int64_t *b = op->bounds, slice = b[1];
    for (int i = 0; i <= op->group->n; i++) { assert(b[i] == min_i64(i * slice, b[op->group->n])); }
    return slice;
}
// data: elements of `size` bytes; member i sends slice i.
static inline void nccl_gather(Comm *c, const CommOp *op, char *data, int64_t size) {
    cudaStream_t carrier = ((Nccl *)c->transport.state)->collectives.carrier;
    ncclComm_t communicator = (ncclComm_t)op->group->channel;
    const int64_t bytes = nccl_slice(op) * size;
    const char *mine = data + op->group->me * bytes;
    nccl_call(c, op, ncclAllGather(mine, data, (size_t)bytes, ncclUint8, communicator, carrier));
}
// Writes the sum of this rank's slice over the members to the slice's position in out. In place,
// NCCL requires the position in the padded array, which for an empty slice is in the padding.
static inline void nccl_reduce(Comm *c, const CommOp *op, const char *in, char *out,
                               ncclDataType_t type) {
    cudaStream_t carrier = ((Nccl *)c->transport.state)->collectives.carrier;
    ncclComm_t communicator = (ncclComm_t)op->group->channel;
    const int64_t slice = nccl_slice(op), size = type == ncclBfloat16 ? 2 : 4;
    char *mine = out + (in == out ? op->group->me * slice : op->bounds[op->group->me]) * size;
    const size_t count = (size_t)slice;
    nccl_call(c, op, ncclReduceScatter(in, mine, count, type, ncclSum, communicator, carrier));
}
static inline void nccl_exchange(Comm *c, const CommOp *op) {
    cudaStream_t carrier = ((Nccl *)c->transport.state)->collectives.carrier;
    ncclComm_t communicator = (ncclComm_t)op->group->channel;
    int64_t size = (int64_t)op->element_bytes;
    for (int i = 0; i < op->group->n; i++) {
        const char *sent = op->in + op->bounds[i] * size;
        char *received = op->out + op->recv_bounds[i] * size;
        size_t out_bytes = (size_t)((op->bounds[i + 1] - op->bounds[i]) * size),
               in_bytes = (size_t)((op->recv_bounds[i + 1] - op->recv_bounds[i]) * size);
        if (i == op->group->me) {
            CUDA_CHECK(
                cudaMemcpyAsync(received, sent, out_bytes, cudaMemcpyDeviceToDevice, carrier));
            continue;
        }
        if (out_bytes) {
            nccl_call(c, op, ncclSend(sent, out_bytes, ncclUint8, i, communicator, carrier));
        }
        if (in_bytes) {
            nccl_call(c, op, ncclRecv(received, in_bytes, ncclUint8, i, communicator, carrier));
        }
    }
}

// Queues a collective on the carrier stream, with the conversions of wire bf16.
static inline void nccl_carry(Comm *c, const CommOp *op) {
    cudaStream_t carrier = ((Nccl *)c->transport.state)->collectives.carrier;
    const int64_t *b = op->bounds, all = b[op->group->n], mine = b[op->group->me],
                  my_end = b[op->group->me + 1];
    bool packed = comm_op_reduces(op) && op->wire == DTYPE_BF16;
    ncclDataType_t type = packed ? ncclBfloat16 : ncclFloat32;
    const char *in = packed ? c->staging : op->in;
    char *out = packed ? c->staging : op->out;
    if (packed) {
        const int64_t sent = op->kind == COMM_ALL_REDUCE ? all : bounds_padded(b, op->group->n);
        if ((size_t)sent * 2 > c->staging_bytes) {
            die(EXIT_RESOURCES, NULL, "no memory to pack %" PRId64 " elements", sent);
        }
        LAUNCH((convert_kernel<__nv_bfloat16, float>), blocks_for(sent, THREADS), THREADS, 0,
               carrier, (__nv_bfloat16 *)(void *)c->staging, (const float *)(const void *)op->in,
               sent);
    }
    nccl_call(c, op, ncclGroupStart()); // an exchange is several calls
    switch (op->kind) {
    case COMM_ALL_GATHER: nccl_gather(c, op, op->out, (int64_t)op->element_bytes); break;
    case COMM_REDUCE_SCATTER: nccl_reduce(c, op, in, out, type); break;
    case COMM_ALL_REDUCE:
        nccl_call(c, op,
                  ncclAllReduce(in, out, (size_t)all, type, ncclSum, (ncclComm_t)op->group->channel,
                                carrier));
        break;
    default: nccl_exchange(c, op);
    }
    nccl_finish(c, (ncclComm_t)op->group->channel, ncclGroupEnd(), op);
    int64_t first = op->kind == COMM_ALL_REDUCE ? 0 : mine,
            count = op->kind == COMM_ALL_REDUCE ? all : my_end - mine;
    if (packed && count) {
        LAUNCH((convert_kernel<float, __nv_bfloat16>), blocks_for(count, THREADS), THREADS, 0,
               carrier, (float *)(void *)op->out + first,
               (const __nv_bfloat16 *)(const void *)c->staging + first, count);
    }
}

// A collective of a group of one member is a copy.
static inline CommHandle copy_to_myself(Stream *s, const CommOp *op) {
    int64_t size = (int64_t)op->element_bytes,
            to = op->recv_bounds ? op->recv_bounds[0] : op->bounds[0];
    if (op->in && op->in != op->out) {
        ops_copy(s, op->out + to * size, op->in + op->bounds[0] * size,
                 (size_t)((op->bounds[1] - op->bounds[0]) * size));
    }
    return 0;
}
// Records the next operation of a lane, and makes it wait for the work that is queued on the
// compute stream.
static inline const CommOp *lane_begin(Comm *c, NcclLane *l, const CommOp *op) {
    Nccl *n = (Nccl *)c->transport.state;
    while (l->started - l->done == NCCL_MOST) { // rare: most steps have fewer
        (void)cuda_done(cudaStreamQuery(l->carrier));
        comm_progress();
    }
    int64_t i = l->started % NCCL_MOST;
    l->ops[i] = *op;
    l->needed[i] = false;
    CUDA_CHECK(cudaEventRecord(l->ready[i], compute_stream(n->stream)));
    CUDA_CHECK(cudaStreamWaitEvent(l->carrier, l->ready[i], 0));
    return &l->ops[i];
}
static inline int64_t lane_end(NcclLane *l) {
    CUDA_CHECK(cudaEventRecord(l->carried[l->started % NCCL_MOST], l->carrier));
    return -++l->started;
}
// Makes the compute stream wait for an operation.
static inline void lane_wait(const Nccl *n, const NcclLane *l, int64_t handle) {
    if (l->done >= -handle) { return; }
    CUDA_CHECK(
        cudaStreamWaitEvent(compute_stream(n->stream), l->carried[(-handle - 1) % NCCL_MOST], 0));
}

static inline CommHandle nccl_start(Comm *c, const CommOp *op) {
    Nccl *n = (Nccl *)c->transport.state;
    if (op->group->n == 1) { return copy_to_myself(n->stream, op); }
    comm_bytes_sent(op->kind, op->group, op->group->me, op->bounds,
                    comm_op_reduces(op) ? dtype_size(op->wire) : op->element_bytes,
                    c->bytes[op->kind]);
    if (op->bounds[op->group->n] == 0 && op->kind != COMM_ALL_TO_ALL) { return 0; }
    const CommOp *begun = lane_begin(c, &n->collectives, op);
    nccl_carry(c, begun);
    return lane_end(&n->collectives);
}
static inline void nccl_wait(Comm *c, CommHandle handle) {
    Nccl *n = (Nccl *)c->transport.state;
    lane_wait(n, &n->collectives, handle);
}

static inline void nccl_wait_message(Comm *c, CommRequest t) {
    Nccl *n = (Nccl *)c->transport.state;
    NcclLane *l = &n->messages;
    if (l->done >= -t) { return; }
    const int64_t i = (-t - 1) % NCCL_MOST;
    // the event's first use, at the start, is already queued on both streams
    CUDA_CHECK(cudaEventRecord(l->ready[i], compute_stream(n->stream)));
    l->needed[i] = true;
    lane_wait(n, l, t);
}
static inline CommRequest nccl_post(Comm *c, bool send, int peer, void *data, size_t bytes) {
    Nccl *n = (Nccl *)c->transport.state;
    NcclLane *l = &n->messages;
    ncclComm_t communicator = (ncclComm_t)n->talkers.channel;
    assert(n->pairs[peer].n);
    CommOp op;
    memset(&op, 0, sizeof op);
    op.kind = COMM_SEND;
    op.unit = c->unit;
    op.step = c->step;
    op.what = c->what;
    op.group = &n->pairs[peer];
    op.in = send ? (const char *)data : NULL;
    op.out = send ? NULL : (char *)data;
    op.element_bytes = bytes;
    op.counted = true;
    // the ring is full: wait for the oldest message, so that the watch checks its other end
    if (l->started - l->done == NCCL_MOST) { nccl_wait_message(c, -(l->done + 1)); }
    const CommOp *begun = lane_begin(c, l, &op);
    ncclResult_t result = send ? ncclSend(data, bytes, ncclUint8, peer, communicator, l->carrier)
                               : ncclRecv(data, bytes, ncclUint8, peer, communicator, l->carrier);
    nccl_finish(c, communicator, result, begun);
    return lane_end(l);
}

static inline void nccl_end(Comm *c) {
    Nccl *n = (Nccl *)c->transport.state;
    CommOp op;
    memset(&op, 0, sizeof op);
    op.what = "end of NCCL";
    op.group = &c->everyone;
    op.step = c->step;
    CUDA_CHECK(cudaStreamSynchronize(n->collectives.carrier));
    CUDA_CHECK(cudaStreamSynchronize(n->messages.carrier));
    nccl_share(c, NULL, NULL, 0);
    while (n->groups) {
        ncclComm_t communicator = n->communicators[n->groups - 1];
        nccl_finish(c, communicator, ncclCommFinalize(communicator), &op);
        n->groups--; // it is not polled any more
        ncclCommDestroy(communicator);
    }
    lane_close(&n->collectives);
    lane_close(&n->messages);
    for (int i = 0; i < n->joins; i++) { group_free(&n->joined[i]); }
    for (int r = 0; r < c->ranks; r++) { group_free(&n->pairs[r]); }
    group_free(&n->talkers);
    free(n->pairs);
    free(n);
    c->transport.poll = NULL;
}
// Connects this rank with all ranks that it exchanges messages with, in ascending order, by one
// message in each direction. All ranks call it.
static inline void nccl_meet_peers(Comm *c, const CommTraffic *traffic) {
    Nccl *n = (Nccl *)c->transport.state;
    if (!traffic->bytes || c->ranks == 1) { return; }
    n->talkers = group_all(c);
    nccl_join(c, &n->talkers);
    char *bytes = (char *)ops_alloc(2);
    if (!bytes) { die(EXIT_RESOURCES, NULL, "no device memory for messages"); }
    comm_label(c, "connection", -1, c->step);
    for (int i = 0; i < traffic->count; i++) { // ascending
        const int peer = traffic->peers[i], both[2] = {c->rank, peer};
        n->pairs[peer] = group_make(both, 2, c->rank, c->node_of);
        for (int turn = 0; turn < 2; turn++) {
            nccl_post(c, turn == (c->rank > peer), peer, bytes + turn, 1);
        }
    }
    for (CommRequest t = -1; t >= -n->messages.started; t--) { nccl_wait_message(c, t); }
    ops_wait(n->stream);
    ops_free(bytes);
}
static inline void nccl_open(Comm *c, Stream *s, const CommTraffic *traffic) {
    Nccl *n = (Nccl *)checked_calloc(1, sizeof(Nccl), "NCCL");
    n->stream = s;
    n->pairs = (Group *)checked_calloc((size_t)c->ranks, sizeof(Group), "NCCL");
    lane_open(&n->collectives);
    lane_open(&n->messages);
    CommTransport t = {
        "nccl",    nccl_join_once, nccl_share, nccl_start, nccl_wait, nccl_post, nccl_wait_message,
        nccl_poll, nccl_end,       n,          NULL,       0};
    c->transport = t;
    nccl_join(c, &c->everyone);
    nccl_meet_peers(c, traffic);
}

// -------------------------------------------------------------------------------------------------
// Staged
typedef struct {
    CommOp op;         // the operation, on device memory
    CommHandle handle; // of the same operation on the mirror
    char *mirror;      // copy of the array; behind it the data that an all-to-all receives
} StagedOp;
typedef struct {
    CommRequest ticket; // request of MPI; 0: none, or complete
    void *device;       // destination of a received message; NULL: it is sent
    size_t bytes;
    char *mirror;
    cudaEvent_t returned; // its data are copied to the device
} StagedMessage;
typedef struct {
    Stream *stream;
    StagedOp ops[STAGED_MOST]; // ring: operations done .. started - 1 are in flight
    size_t mirror_bytes;
    int64_t started, done;
    StagedMessage *messages; // [most] ring
    int64_t most, posted;
    size_t message_bytes;
    char *pinned; // memory of the staging buffer of comm.h, the mirrors and the messages
} Staged;

// Returns the mirror of op.out.
static inline char *staged_received(const StagedOp *o) {
    return o->mirror +
           (o->op.recv_bounds ? o->op.bounds[o->op.group->n] * (int64_t)o->op.element_bytes : 0);
}
// Copies elements first .. end - 1 of the result back to the device.
static inline void staged_return(Staged *s, const StagedOp *o, int64_t first, int64_t end) {
    int64_t size = (int64_t)o->op.element_bytes;
    ops_from_host(s->stream, o->op.out + first * size, staged_received(o) + first * size,
                  (size_t)((end - first) * size));
}
static inline void staged_wait(Comm *c, CommHandle handle) {
    Staged *s = (Staged *)c->transport.state;
    while (s->done < -handle) {
        const StagedOp *o = &s->ops[s->done++ % STAGED_MOST];
        const int64_t *b = o->op.bounds, me = o->op.group->me, n = o->op.group->n;
        comm_wait(c, o->handle);
        switch (o->op.kind) {
        case COMM_ALL_GATHER:
            staged_return(s, o, 0, b[me]), staged_return(s, o, b[me + 1], b[n]);
            break;
        case COMM_REDUCE_SCATTER: staged_return(s, o, b[me], b[me + 1]); break;
        case COMM_ALL_REDUCE: staged_return(s, o, 0, b[n]); break;
        default: staged_return(s, o, o->op.recv_bounds[0], o->op.recv_bounds[n]);
        }
    }
}
static inline CommHandle staged_start(Comm *c, const CommOp *op) {
    Staged *s = (Staged *)c->transport.state;
    const Group *g = op->group;
    int64_t size = (int64_t)op->element_bytes,
            all = op->bounds[g->n] + (op->recv_bounds ? op->recv_bounds[g->n] : 0);
    bool gathers = op->kind == COMM_ALL_GATHER; // sends only this rank's slice
    int64_t first = op->bounds[gathers ? g->me : 0], end = op->bounds[gathers ? g->me + 1 : g->n];
    if (g->n == 1) { return copy_to_myself(s->stream, op); }
    if ((size_t)(all * size) > s->mirror_bytes) {
        die(EXIT_RESOURCES, NULL, "no memory to stage %" PRId64 " elements", all);
    }
    if (s->started - s->done == STAGED_MOST) { staged_wait(c, -(s->done + 1)); }
    StagedOp *o = &s->ops[s->started % STAGED_MOST];
    o->op = *op;
    // on the compute stream, so after copies of earlier results to the device
    ops_to_host(s->stream, o->mirror + first * size, (gathers ? op->out : op->in) + first * size,
                (size_t)((end - first) * size));
    CommOp over_host = *op;
    over_host.in = op->in ? o->mirror : NULL;
    over_host.out = staged_received(o);
    o->handle = comm_queue_op(c, over_host);
    return -++s->started;
}
static inline void staged_wait_message(Comm *c, CommRequest t) {
    Staged *s = (Staged *)c->transport.state;
    if (-t <= s->posted - s->most) { return; } // its piece has been used again since
    StagedMessage *m = &s->messages[(-t - 1) % s->most];
    comm_wait_message_by_mpi(c, m->ticket);
    if (m->ticket && m->device) {
        ops_from_host(s->stream, m->device, m->mirror, m->bytes);
        CUDA_CHECK(cudaEventRecord(m->returned, compute_stream(s->stream)));
    }
    m->ticket = 0;
}
static inline CommRequest staged_post(Comm *c, bool send, int peer, void *data, size_t bytes) {
    Staged *s = (Staged *)c->transport.state;
    StagedMessage *m = &s->messages[s->posted % s->most];
    if (bytes > s->message_bytes) {
        die(EXIT_RESOURCES, NULL, "no memory to stage a message of %zu bytes", bytes);
    }
    if (m->ticket) { staged_wait_message(c, s->most - s->posted - 1); }
    m->device = send ? NULL : data;
    m->bytes = bytes;
    if (send) {
        ops_to_host(s->stream, m->mirror, data, bytes); // after an earlier copy to the device
    } else {
        while (!cuda_happened(m->returned)) { comm_progress(); }
    }
    m->ticket = comm_post_by_mpi(c, send, peer, m->mirror, bytes);
    return -++s->posted;
}
static inline void staged_join(Comm *c, Group *g) {
    (void)c;
    (void)g;
}
static inline void staged_end(Comm *c) {
    Staged *s = (Staged *)c->transport.state;
    ops_wait(s->stream);
    for (int64_t i = 0; i < s->most; i++) { CUDA_CHECK(cudaEventDestroy(s->messages[i].returned)); }
    CUDA_CHECK(cudaFreeHost(s->pinned));
    free(s->messages);
    free(s);
}
static inline void staged_make_ring(Staged *s, char *memory) {
    s->messages = (StagedMessage *)checked_calloc((size_t)s->most + 1, sizeof(StagedMessage),
                                                  "staged messages");
    for (int64_t i = 0; i < s->most; i++) {
        s->messages[i].mirror = memory + (size_t)i * s->message_bytes;
        CUDA_CHECK(cudaEventCreateWithFlags(&s->messages[i].returned, cudaEventDisableTiming));
    }
}
// Opens the staged transport. bytes: of the longest array; staging: bytes for the reductions of
// comm.h; traffic: bounds of the messages.
static inline void staged_open(Comm *c, Stream *stream, size_t bytes, size_t staging,
                               const CommTraffic *traffic) {
    Staged *s = (Staged *)checked_calloc(1, sizeof(Staged), "staged messages");
    s->stream = stream;
    s->mirror_bytes = (size_t)round_up(max_i64((int64_t)bytes, STAGED_LEAST), 4096);
    staging = (size_t)round_up((int64_t)staging, 4096);
    s->message_bytes = (size_t)round_up((int64_t)traffic->bytes, 4096);
    s->most = traffic->bytes ? traffic->most : 0;
    size_t mirrors = staging + STAGED_MOST * s->mirror_bytes,
           pinned = mirrors + (size_t)s->most * s->message_bytes;
    if (cudaMallocHost((void **)&s->pinned, pinned) != cudaSuccess) {
        die(EXIT_RESOURCES, "one rank for each GPU needs none",
            "cannot pin %zu bytes of host memory for messages", pinned);
    }
    memset(s->pinned, 0, pinned);
    for (int i = 0; i < STAGED_MOST; i++) {
        s->ops[i].mirror = s->pinned + staging + (size_t)i * s->mirror_bytes;
    }
    staged_make_ring(s, s->pinned + mirrors);
    comm_allocate(c, s->pinned, staging);
    CommTransport t = {"staged",
                       staged_join,
                       NULL,
                       staged_start,
                       staged_wait,
                       staged_post,
                       staged_wait_message,
                       NULL,
                       staged_end,
                       s,
                       NULL,
                       0};
    c->transport = t;
}

// -------------------------------------------------------------------------------------------------
// Choice of the transport

// Returns whether each rank has a GPU of its own; the result is the same on all ranks. *sharing:
// number of ranks on this rank's GPU. All ranks call it.
static inline bool gpus_apart(Comm *c, int *sharing) {
    typedef struct {
        char bus[32];
    } Place;
    Place mine, *all = (Place *)checked_calloc((size_t)c->ranks, sizeof(Place), "GPUs");
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
// Opens the transport for counted collectives and messages on this rank's GPU. elements: most fp32
// elements of a collective, with padding; records: most bytes of records sent and received;
// traffic: bounds of the messages. All ranks call it.
static inline void transport_open(Comm *c, Stream *s, DType wire, int64_t elements, size_t records,
                                  const CommTraffic *traffic) {
    int sharing;
    if (gpus_apart(c, &sharing)) {
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
