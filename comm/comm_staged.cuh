// comm_staged.cuh: the transport for ranks that share a GPU, which NCCL refuses. Data go through
// pinned host memory and the MPI messages of progress.h.
//
// begin() waits for the compute stream and copies the data to the host, from where MPI sends them.
// wait() waits for MPI and copies the result back. STAGED_MOST collectives are in flight at a time,
// each with its own piece of pinned memory. A further one first waits for the oldest, and so for
// all its members, which the schedule allows for (schedule/validator.h: order). Messages use a ring
// of other pieces in the same way. A message that finds no free piece waits for the oldest, as with
// rendezvous.
#ifndef COMM_STAGED_CUH
#define COMM_STAGED_CUH

#include "comm/comm.h"              // groups, the watch, MPI
#include "ops/cuda/device_cuda.cuh" // the compute stream

enum { STAGED_MOST = 2 };      // limit of staged collectives in flight
#ifndef STAGED_LEAST           // tests make it smaller
#define STAGED_LEAST (4 << 20) // least bytes of a mirror; measuring the message rate needs them
#endif

static inline bool cuda_happened(cudaEvent_t event) { return cuda_done(cudaEventQuery(event)); }
// A collective of a group of one member is a copy. Returns 0: nothing is to be waited for.
static inline int64_t copy_to_myself(Stream *s, const CommOp *op) {
    const CommPart mine = comm_sent(op, 0);
    if (mine.data != op->slice) { ops_copy(s, op->slice, mine.data, (size_t)mine.bytes); }
    return 0;
}

typedef struct {
    CommOp op;            // on device memory
    CommRequest request;  // of the same operation on the mirror
    char *mirror;         // copy of the array; behind it the data that an all-to-all receives
    size_t bytes;         // of the mirror
    void *own;            // memory of a mirror that is longer than planned; NULL: none
    cudaEvent_t returned; // the result has been copied to the device
} StagedOp;
typedef struct {
    StagedOp *ops; // [most]
    int64_t most, started;
} StagedRing;
typedef struct {
    Stream *stream;
    StagedRing rings[2]; // collectives, messages
    char *pinned;        // memory of the staging buffer and the mirrors
} Staged;

static inline Staged *staged_state(const Comm *c) { return (Staged *)c->transport.state; }
// Returns where the result of an operation arrives on the host.
static inline char *staged_received(const StagedOp *o) {
    const CommOp *op = &o->op;
    return o->mirror +
           (op->recv_bounds ? comm_end_of_slices(op, op->bounds) : 0) * (int64_t)op->element_bytes;
}
// Copies elements first .. end - 1 of the result back to the device. A message is one element.
static inline void staged_return(Staged *s, const StagedOp *o, int64_t first, int64_t end) {
    const int64_t size = (int64_t)o->op.element_bytes;
    ops_from_host(s->stream, o->op.out ? o->op.out + first * size : o->op.slice,
                  staged_received(o) + first * size, (size_t)((end - first) * size));
}
static inline void staged_finish(Comm *c, StagedOp *o) {
    Staged *s = staged_state(c);
    const CommOp *op = &o->op;
    const Group *g = op->group;
    const int64_t *b = op->recv_bounds ? op->recv_bounds : op->bounds;
    if (!o->request.number) { return; }
    comm_wait(c, &o->request);
    switch (op->kind) {
    case COMM_SEND:
        if (!op->send) { staged_return(s, o, 0, 1); }
        break;
    case COMM_ALL_GATHER:
        staged_return(s, o, 0, b[g->me]);
        staged_return(s, o, b[g->me + 1], b[g->n]);
        break;
    case COMM_REDUCE_SCATTER: staged_return(s, o, b[g->me], b[g->me + 1]); break;
    default:
        if (!op->apart) { staged_return(s, o, b[0], b[g->n]); }
    }
    // what is between slices stays as it is
    for (int i = 0; op->apart && i < g->n; i++) { staged_return(s, o, b[2 * i], b[2 * i + 1]); }
    CUDA_CHECK(cudaEventRecord(o->returned, stream_of(s->stream)));
}
// Collectives return in the order of their begin.
static inline void staged_wait(Comm *c, CommRequest r) {
    StagedRing *ring = &staged_state(c)->rings[r.message];
    // the mirrors of older operations have been used again since
    const int64_t last = -r.number, oldest = max_i64(1, ring->started - ring->most + 1);
    for (int64_t t = r.message ? max_i64(last, oldest) : oldest; t <= last; t++) {
        staged_finish(c, &ring->ops[(t - 1) % ring->most]);
    }
}
// Makes a mirror longer that is not in use: how many rows experts get is known only now.
static inline void staged_grow(StagedOp *o, size_t bytes) {
    ops_free_host(o->own);
    o->bytes = bytes + bytes / 4; // the next ones may have some more
    o->own = ops_alloc_host(o->bytes);
    if (!o->own) {
        die(EXIT_RESOURCES, "one rank for each GPU needs none",
            "cannot pin %zu bytes of host memory for rows of experts", o->bytes);
    }
    o->mirror = (char *)o->own;
}
static inline int64_t staged_begin(Comm *c, const CommOp *op) {
    Staged *s = staged_state(c);
    StagedRing *ring = &s->rings[op->kind == COMM_SEND];
    StagedOp *o = &ring->ops[ring->started % ring->most];
    const Group *g = op->group;
    const int64_t size = (int64_t)op->element_bytes, *b = op->bounds, *to = op->recv_bounds;
    int64_t first = 0, end = 1, all = 1;
    if (g && g->n == 1) { return copy_to_myself(s->stream, op); }
    if (g) {
        const bool gathers = op->kind == COMM_ALL_GATHER; // sends only this rank's slice
        first = b[gathers ? g->me : 0];
        end = gathers ? b[g->me + 1] : comm_end_of_slices(op, b);
        all = comm_end_of_slices(op, b) + (to ? comm_end_of_slices(op, to) : 0);
    }
    if ((size_t)(all * size) > o->bytes && !to) {
        die(EXIT_RESOURCES, NULL, "no memory to stage %" PRId64 " bytes", all * size);
    }
    staged_finish(c, o);
    while (!cuda_happened(o->returned)) { comm_progress(); }
    if ((size_t)(all * size) > o->bytes) { staged_grow(o, (size_t)(all * size)); }
    o->op = *op;
    CommOp over_host = *op;
    over_host.in = o->mirror;
    over_host.out = staged_received(o);
    if (g) { over_host.slice = comm_received(&over_host, g->me).data; }
    if (g || op->send) {
        ops_to_host(s->stream, o->mirror + first * size, (g ? op->in : op->out) + first * size,
                    (size_t)((end - first) * size));
    }
    o->request = comm_begin_by_mpi(c, &over_host);
    return -++ring->started;
}
static inline void staged_end(Comm *c) {
    Staged *s = staged_state(c);
    ops_wait(s->stream);
    for (int k = 0; k < 2; k++) {
        for (int64_t i = 0; i < s->rings[k].most; i++) {
            CUDA_CHECK(cudaEventDestroy(s->rings[k].ops[i].returned));
            ops_free_host(s->rings[k].ops[i].own);
        }
        free(s->rings[k].ops);
    }
    ops_free_host(s->pinned);
    free(s);
}
// Opens the staged transport. bytes: of the longest array; staging: bytes for the reductions by
// MPI; traffic: bounds of the messages.
static inline void staged_open(Comm *c, Stream *stream, size_t bytes, size_t staging,
                               const CommTraffic *traffic) {
    Staged *s = new_array(Staged, 1, "staged messages");
    const size_t most[2] = {STAGED_MOST, traffic->bytes ? (size_t)traffic->most : 0};
    size_t longest[2] = {(size_t)max_i64((int64_t)bytes, STAGED_LEAST), traffic->bytes};
    size_t pinned = staging = (size_t)round_up((int64_t)staging, 4096);
    s->stream = stream;
    for (int k = 0; k < 2; k++) {
        s->rings[k].most = (int64_t)most[k];
        longest[k] = (size_t)round_up((int64_t)longest[k], 4096);
        pinned += most[k] * longest[k];
    }
    s->pinned = (char *)ops_alloc_host(pinned);
    if (!s->pinned) {
        die(EXIT_RESOURCES, "one rank for each GPU needs none",
            "cannot pin %zu bytes of host memory for messages", pinned);
    }
    char *mirror = s->pinned + staging;
    for (int k = 0; k < 2; k++) {
        s->rings[k].ops = new_array(StagedOp, s->rings[k].most, "staged messages");
        for (int64_t i = 0; i < s->rings[k].most; i++) {
            StagedOp *o = &s->rings[k].ops[i];
            o->mirror = mirror;
            o->bytes = longest[k];
            mirror += longest[k];
            CUDA_CHECK(cudaEventCreateWithFlags(&o->returned, cudaEventDisableTiming));
        }
    }
    comm_allocate(c, s->pinned, staging);
    const CommTransport t = {.name = "staged",
                             .begin = staged_begin,
                             .wait = staged_wait,
                             .end = staged_end,
                             .state = s};
    c->transport = t;
}

#endif
