// comm_staged.cuh: the transport for ranks that share a GPU, which NCCL refuses. Data go through
// pinned host memory and the MPI messages of progress.h.
//
// begin() waits for the compute stream and copies the data to the host, from where MPI sends them.
// wait() waits for MPI and copies the result back. STAGED_MOST collectives are in flight at a time,
// each with its own piece of pinned memory. A further one first waits for the oldest, and so for
// all its members, which the schedule allows for (engine/validator.h: order). Messages use a ring
// of other pieces in the same way. A message that finds no free piece waits for the oldest, as with
// rendezvous.
#ifndef COMM_STAGED_CUH
#define COMM_STAGED_CUH

#include "comm/comm.h"              // groups, the watch, MPI
#include "ops/cuda/device_cuda.cuh" // the compute stream

enum {
    STAGED_MOST = 2,       // limit of staged collectives in flight
    STAGED_LEAST = 4 << 20 // least bytes of a mirror; measuring the message rate needs them
};

static inline cudaStream_t compute_stream(const Stream *s) { return ((Gpu *)s->device)->stream; }
static inline bool cuda_happened(cudaEvent_t event) { return cuda_done(cudaEventQuery(event)); }
// A collective of a group of one member is a copy. Returns 0: nothing is to be waited for.
static inline int64_t copy_to_myself(Stream *s, const CommOp *op) {
    const size_t size = op->element_bytes;
    const char *mine = op->in + (size_t)op->bounds[0] * size;
    if (mine != op->slice) {
        ops_copy(s, op->slice, mine, (size_t)slice_length(op->bounds, 0) * size);
    }
    return 0;
}

typedef struct {
    CommOp op;           // the operation, on device memory
    CommRequest request; // of the same operation on the mirror
    char *mirror;        // copy of the array; behind it the data that an all-to-all receives
} StagedOp;
typedef struct {
    CommRequest request; // of MPI
    void *device;        // destination of a received message; NULL: it is sent
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
    char *pinned; // memory of the staging buffer, the mirrors and the messages
} Staged;

static inline Staged *staged_state(const Comm *c) { return (Staged *)c->transport.state; }
// Returns where the result of an operation arrives on the host.
static inline char *staged_received(const StagedOp *o) {
    const CommOp *op = &o->op;
    return o->mirror +
           (op->recv_bounds ? op->bounds[op->group->n] : 0) * (int64_t)op->element_bytes;
}
// Copies elements first .. end - 1 of the result back to the device.
static inline void staged_return(Staged *s, const StagedOp *o, int64_t first, int64_t end) {
    const int64_t size = (int64_t)o->op.element_bytes;
    ops_from_host(s->stream, o->op.out ? o->op.out + first * size : o->op.slice,
                  staged_received(o) + first * size, (size_t)((end - first) * size));
}
static inline void staged_finish_oldest(Comm *c) {
    Staged *s = staged_state(c);
    StagedOp *o = &s->ops[s->done++ % STAGED_MOST];
    const int64_t *b = o->op.recv_bounds ? o->op.recv_bounds : o->op.bounds, n = o->op.group->n,
                  me = o->op.group->me;
    comm_wait(c, &o->request);
    if (o->op.kind == COMM_ALL_GATHER) {
        staged_return(s, o, 0, b[me]);
        staged_return(s, o, b[me + 1], b[n]);
    } else if (o->op.kind == COMM_REDUCE_SCATTER) {
        staged_return(s, o, b[me], b[me + 1]);
    } else {
        staged_return(s, o, b[0], b[n]);
    }
}
static inline void staged_wait_message(Comm *c, StagedMessage *m) {
    Staged *s = staged_state(c);
    const bool arrives = m->request.number && m->device;
    comm_wait(c, &m->request);
    if (!arrives) { return; }
    ops_from_host(s->stream, m->device, m->mirror, m->bytes);
    CUDA_CHECK(cudaEventRecord(m->returned, compute_stream(s->stream)));
}
static inline void staged_wait(Comm *c, CommRequest r) {
    Staged *s = staged_state(c);
    while (!r.message && s->done < -r.number) { staged_finish_oldest(c); }
    // otherwise the message's piece has been used again since
    if (r.message && -r.number > s->posted - s->most) {
        staged_wait_message(c, &s->messages[(-r.number - 1) % s->most]);
    }
}
static inline int64_t staged_begin_message(Comm *c, const CommOp *op) {
    Staged *s = staged_state(c);
    StagedMessage *m = &s->messages[s->posted % s->most];
    CommOp over_host = *op;
    if (op->element_bytes > s->message_bytes) {
        die(EXIT_RESOURCES, NULL, "no memory to stage a message of %zu bytes", op->element_bytes);
    }
    staged_wait_message(c, m);
    m->device = op->send ? NULL : op->out;
    m->bytes = op->element_bytes;
    over_host.out = m->mirror;
    if (op->send) {
        ops_to_host(s->stream, m->mirror, op->out, m->bytes); // after an earlier copy to the device
    } else {
        while (!cuda_happened(m->returned)) { comm_progress(); }
    }
    m->request = comm_begin_by_mpi(c, &over_host);
    return -++s->posted;
}
static inline int64_t staged_begin(Comm *c, const CommOp *op) {
    Staged *s = staged_state(c);
    if (op->kind == COMM_SEND) { return staged_begin_message(c, op); }
    const Group *g = op->group;
    const int64_t size = (int64_t)op->element_bytes, *b = op->bounds, *to = op->recv_bounds,
                  all = b[g->n] + (to ? to[g->n] : 0);
    const bool gathers = op->kind == COMM_ALL_GATHER; // sends only this rank's slice
    const int64_t first = b[gathers ? g->me : 0], end = b[gathers ? g->me + 1 : g->n];
    if (g->n == 1) { return copy_to_myself(s->stream, op); }
    if ((size_t)(all * size) > s->mirror_bytes) {
        die(EXIT_RESOURCES, NULL, "no memory to stage %" PRId64 " elements", all);
    }
    if (s->started - s->done == STAGED_MOST) { staged_finish_oldest(c); }
    StagedOp *o = &s->ops[s->started % STAGED_MOST];
    o->op = *op;
    // on the compute stream, so after copies of earlier results to the device
    ops_to_host(s->stream, o->mirror + first * size, op->in + first * size,
                (size_t)((end - first) * size));
    CommOp over_host = *op;
    over_host.in = o->mirror;
    over_host.out = staged_received(o);
    over_host.slice = over_host.out + (to ? to : b)[g->me] * size;
    o->request = comm_begin_by_mpi(c, &over_host);
    return -++s->started;
}
static inline void staged_end(Comm *c) {
    Staged *s = staged_state(c);
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
// Opens the staged transport. bytes: of the longest array; staging: bytes for the reductions
// by MPI; traffic: bounds of the messages.
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
    const CommTransport t = {.name = "staged",
                             .begin = staged_begin,
                             .wait = staged_wait,
                             .end = staged_end,
                             .state = s};
    c->transport = t;
}

#endif
