// collectives.h: collectives as our own sequences of MPI messages, so that the messages, their
// links and the order of all sums depend on no library, setting or timing.
//
// Levels A group that has equally many members (more than one) on each of several nodes works on
//        two levels: inside each node, and between the members of the same local index on different
//        nodes. A slice then crosses to each other node exactly once. All other groups work as if
//        all members were on one node.
// Sums   A reduction adds the members of a node in member order, then the nodes in their order,
//        always in fp32. With wire bf16, every contribution (also the owner's) and every sum of a
//        node is first rounded to bf16, to nearest even. A reduction runs piece by piece through
//        the staging buffer, with several pieces in flight.
#ifndef COMM_COLLECTIVES_H
#define COMM_COLLECTIVES_H

#include "base/base.h"
#include "comm/group.h"
#include "comm/mpi.h"
#include "comm/records.h"
#include "comm/watchdog.h"

enum { COMM_PART_BYTES = 8 << 20 }; // limit of one MPI message, so that slow links show progress

// -------------------------------------------------------------------------------------------------
// Sums and conversions of n values
enum { SUM_BLOCK = 4096 };

static inline float *comm_floats(const char *array) { return (float *)(uintptr_t)array; }

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
// Converts fp32 values to bf16. The result may be at the front of the input.
static inline void comm_pack(void *out, const float *in, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t half = float_to_bf16(in[i]);
        memcpy((char *)out + 2 * i, &half, 2);
    }
}
// Converts in place, from the end: the n bf16 values at the front of the buffer become n floats.
static inline void comm_unpack_in_place(float *buffer, int64_t n) {
    for (int64_t i = n - 1; i >= 0; i--) {
        uint16_t half;
        memcpy(&half, (char *)buffer + 2 * i, 2);
        float x = bf16_to_float(half);
        memcpy(buffer + i, &x, 4);
    }
}

// -------------------------------------------------------------------------------------------------
// Messages of collectives

typedef struct {
    char *data;
    int64_t bytes;
} CommPart;
// Return slice i of the array that an operation sends from, or receives.
static inline CommPart comm_part(const CommOp *op, const char *array, const int64_t *bounds,
                                 int i) {
    const int64_t size = (int64_t)op->element_bytes;
    const int at = op->apart ? 2 * i : i;
    const CommPart part = {(char *)(uintptr_t)array + bounds[at] * size,
                           slice_length(bounds, at) * size};
    return part;
}
static inline CommPart comm_sent(const CommOp *op, int i) {
    return comm_part(op, op->in, op->bounds, i);
}
static inline CommPart comm_received(const CommOp *op, int i) {
    return comm_part(op, op->out, op->recv_bounds ? op->recv_bounds : op->bounds, i);
}
// Returns where the last slice ends, in elements.
static inline int64_t comm_end_of_slices(const CommOp *op, const int64_t *bounds) {
    return bounds[op->apart ? 2 * op->group->n - 1 : op->group->n];
}

// Posts a message to or from another member, and counts what is sent. Long messages are cut into
// parts of COMM_PART_BYTES, alike on both sides.
static inline void comm_post(Comm *c, CommSlot *slot, const CommOp *op, bool send, int member,
                             const void *data, int64_t bytes) {
    const Group *g = op->group;
    const int rank = g->ranks[member];
    if (send && op->counted) { c->bytes[op->kind][group_link(g, g->me, member)] += bytes; }
    for (int64_t at = 0; at < bytes; at += COMM_PART_BYTES) {
        assert(slot->requests < c->request_capacity);
        slot->peer[slot->requests] = rank;
        comm_post_part(c, send, (char *)(uintptr_t)data + at,
                       (size_t)min_i64(COMM_PART_BYTES, bytes - at), rank, TAG_COLLECTIVE,
                       &slot->request[slot->requests++]);
        slot->open++;
    }
}
static inline void comm_post_both(Comm *c, CommSlot *slot, const CommOp *op, int member,
                                  CommPart received, CommPart sent) {
    comm_post(c, slot, op, false, member, received.data, received.bytes);
    comm_post(c, slot, op, true, member, sent.data, sent.bytes);
}
// Returns whether all messages of the slot are complete.
static inline bool comm_slot_done(Comm *c, CommSlot *slot) {
    int done = 0;
    if (slot->open) {
        int error =
            MPI_Testsome(slot->requests, slot->request, &done, c->completed, MPI_STATUSES_IGNORE);
        comm_check(c, error, -1);
    }
    if (done) {
        slot->open -= done;
        c->last_progress = c->clock;
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

// Regions of a slot in the staging buffer.
typedef enum {
    STAGED_CONTRIBUTIONS, // [locals - 1][nodes]
    STAGED_SUMS,          // [nodes], with several nodes
    STAGED_RECEIVED,      // [nodes] sums of other nodes, with several nodes
    STAGED_SENT,          // [n] contributions to send, with wire bf16
    STAGED_OWN,           // [nodes] own contributions, rounded, with wire bf16
    STAGED_END
} CommRegion;
// Returns where a region begins, in segments of one piece of one slice each.
static inline int64_t comm_region(const Group *g, DType wire, CommRegion region) {
    const int64_t sums = g->nodes > 1 ? g->nodes : 0; // one node: straight into the result
    const int64_t lengths[STAGED_END] = {(int64_t)g->nodes * (g->locals - 1), sums, sums,
                                         wire == DTYPE_BF16 ? g->n : 0,
                                         wire == DTYPE_BF16 ? g->nodes : 0};
    int64_t begin = 0;
    for (int r = 0; r < (int)region; r++) { begin += lengths[r]; }
    return begin;
}
// A reduction at the head of the queue, and this rank's part in it.
typedef struct {
    Comm *c;
    const CommOp *op;
    const Group *g;
    int node, local; // position of this rank
    bool packed;     // wire bf16
    int64_t size;    // bytes of a sent element
} Reduction;

static inline float *reduction_staged(const Reduction *r, const CommSlot *slot, CommRegion region,
                                      int index) {
    const DType wire = r->op->wire;
    const int64_t segment = (slot - r->c->slot) * comm_region(r->g, wire, STAGED_END) +
                            comm_region(r->g, wire, region) + index;
    return comm_floats(r->c->staging) + segment * r->c->piece_elements;
}
// Returns where the contributions of the member of this node with local index l, to the slice of an
// owner on node n, arrive.
static inline float *reduction_contribution(const Reduction *r, const CommSlot *slot, int l,
                                            int n) {
    const int index = l < r->local ? l : l - 1;
    return reduction_staged(r, slot, STAGED_CONTRIBUTIONS, index * r->g->nodes + n);
}
// Returns the elements of member i's slice that belong to the slot's piece. *first: their begin in
// the array.
static inline int64_t reduction_piece(const Reduction *r, const CommSlot *slot, int i,
                                      int64_t *first) {
    const int64_t elements = r->c->piece_elements;
    *first = r->op->bounds[i] + slot->piece * elements;
    return max_i64(0, min_i64(elements, r->op->bounds[i + 1] - *first));
}
static inline int64_t reduction_pieces(const Reduction *r) {
    int64_t longest = 0;
    for (int i = 0; i < r->g->n; i++) {
        longest = max_i64(longest, slice_length(r->op->bounds, i));
    }
    return ceil_div(longest, r->c->piece_elements);
}
static inline void comm_reduce_begin(Comm *c, const CommOp *op) {
    const int64_t segments = COMM_SLOTS * comm_region(op->group, op->wire, STAGED_END);
    c->next_piece = c->done_pieces = 0;
    c->piece_elements = (int64_t)c->staging_bytes / 4 / segments / 16 * 16;
    if (c->piece_elements < 16) {
        die(EXIT_RESOURCES, NULL, "staging buffer of %zu bytes is too small for %d ranks",
            c->staging_bytes, op->group->n);
    }
}

static inline void reduction_receive(const Reduction *r, CommSlot *slot, int from, float *values,
                                     int64_t count) {
    comm_post(r->c, slot, r->op, false, from, values, count * r->size);
}
// Sends values, with wire bf16 packed into a segment of staging.
static inline void reduction_send(const Reduction *r, CommSlot *slot, int to, const float *values,
                                  int64_t count, CommRegion region, int index) {
    const void *sent = values;
    if (r->packed) {
        float *packed = reduction_staged(r, slot, region, index);
        comm_pack(packed, values, count);
        sent = packed;
    }
    comm_post(r->c, slot, r->op, true, to, sent, count * r->size);
}
// Step 1 of a piece: posts its contributions.
static inline void reduction_start(const Reduction *r, CommSlot *slot) {
    const Group *g = r->g;
    int64_t first;
    slot->piece = r->c->next_piece++;
    slot->state = 1;
    slot->requests = 0;
    for (int l = 0; l < g->locals; l++) {
        const int member = group_at(g, r->node, l);
        for (int n = 0; n < g->nodes && l != r->local; n++) {
            const int owner = group_at(g, n, l);
            int64_t count = reduction_piece(r, slot, group_at(g, n, r->local), &first);
            reduction_receive(r, slot, member, reduction_contribution(r, slot, l, n), count);
            count = reduction_piece(r, slot, owner, &first);
            reduction_send(r, slot, member, comm_floats(r->op->in) + first, count, STAGED_SENT,
                           owner);
        }
    }
}
// Sums this node's contributions to a piece of one slice into out. The slice's owner is the member
// on node n with this rank's local index.
static inline void reduction_sum_node(const Reduction *r, CommSlot *slot, int n, float *out) {
    const float **sources = r->c->sources;
    int64_t first, count = reduction_piece(r, slot, group_at(r->g, n, r->local), &first);
    for (int l = 0; l < r->g->locals; l++) {
        if (l == r->local) { continue; }
        float *theirs = reduction_contribution(r, slot, l, n);
        if (r->packed) { comm_unpack_in_place(theirs, count); }
        sources[l] = theirs;
    }
    sources[r->local] = comm_floats(r->op->in) + first;
    if (r->packed) {
        float *own = reduction_staged(r, slot, STAGED_OWN, n);
        comm_round(own, sources[r->local], count);
        sources[r->local] = own;
    }
    comm_sum(out, sources, r->g->locals, count);
}
// Step 2: sends the sums of this node to their owners on the other nodes.
static inline void reduction_cross(const Reduction *r, CommSlot *slot) {
    const Group *g = r->g;
    int64_t first, mine = reduction_piece(r, slot, g->me, &first);
    slot->state = 2;
    for (int n = 0; n < g->nodes; n++) {
        if (n == r->node) { continue; }
        reduction_receive(r, slot, group_at(g, n, r->local),
                          reduction_staged(r, slot, STAGED_RECEIVED, n), mine);
    }
    for (int n = 0; n < g->nodes; n++) {
        const int owner = group_at(g, n, r->local);
        float *sum = reduction_staged(r, slot, STAGED_SUMS, n);
        const int64_t count = reduction_piece(r, slot, owner, &first);
        reduction_sum_node(r, slot, n, sum);
        if (n != r->node) {
            // STAGED_OWN held the rank's own contribution, which `sum` contains already
            reduction_send(r, slot, owner, sum, count, STAGED_OWN, n);
        } else if (r->packed) {
            comm_round(sum, sum, count);
        }
    }
}
static inline void reduction_finish(const Reduction *r, CommSlot *slot) {
    const float **sources = r->c->sources;
    int64_t first, count = reduction_piece(r, slot, r->g->me, &first);
    float *out = comm_floats(r->op->slice) + slot->piece * r->c->piece_elements;
    slot->state = 0;
    r->c->done_pieces++;
    if (r->g->nodes == 1) {
        reduction_sum_node(r, slot, 0, out);
        return;
    }
    for (int n = 0; n < r->g->nodes; n++) {
        const bool mine = n == r->node;
        float *sum = reduction_staged(r, slot, mine ? STAGED_SUMS : STAGED_RECEIVED, n);
        if (!mine && r->packed) { comm_unpack_in_place(sum, count); }
        sources[n] = sum;
    }
    comm_sum(out, sources, r->g->nodes, count);
}
// Advances a reduction. Returns true when it is complete.
static inline bool comm_reduce_progress(Comm *c, const CommOp *op) {
    const Group *g = op->group;
    const Reduction r = {.c = c,
                         .op = op,
                         .g = g,
                         .node = group_node(g, g->me),
                         .local = group_local(g, g->me),
                         .packed = op->wire == DTYPE_BF16,
                         .size = (int64_t)dtype_size(op->wire)};
    const int64_t pieces = reduction_pieces(&r);
    for (bool moved = true; moved && c->done_pieces < pieces;) {
        moved = false;
        for (int i = 0; i < COMM_SLOTS; i++) {
            if (c->slot[i].state == 0 && c->next_piece < pieces) {
                reduction_start(&r, &c->slot[i]);
                moved = true;
            }
        }
        CommSlot *slot = &c->slot[c->done_pieces % COMM_SLOTS]; // the oldest piece
        if (slot->state && comm_slot_done(c, slot)) {
            const bool last_step = g->nodes == 1 || slot->state == 2;
            (last_step ? reduction_finish : reduction_cross)(&r, slot);
            moved = true;
        }
    }
    return c->done_pieces == pieces;
}

// -------------------------------------------------------------------------------------------------
// All-gather (between nodes first, then inside each node) and all-to-all. All messages of a step
// are posted together.

// An all-reduce with wire bf16 gathers bf16 values: each owner packs its result at the front of its
// slice, and all members unpack at the end.
static inline bool comm_gathers_packed(const CommOp *op) {
    return op->kind == COMM_ALL_REDUCE && op->wire == DTYPE_BF16;
}
// Returns the part of member i's slice that an all-gather sends.
static inline CommPart comm_slice(const CommOp *op, int i) {
    CommPart slice = comm_received(op, i);
    if (comm_gathers_packed(op)) { slice.bytes /= 2; }
    return slice;
}
static inline void comm_gather_nodes(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    const CommPart own = comm_slice(op, g->me);
    for (int n = 0; n < g->nodes; n++) {
        const int peer = group_at(g, n, group_local(g, g->me));
        if (peer != g->me) { comm_post_both(c, slot, op, peer, comm_slice(op, peer), own); }
    }
}
static inline void comm_gather_local(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    const int node = group_node(g, g->me), local = group_local(g, g->me);
    for (int l = 0; l < g->locals; l++) {
        for (int n = 0; n < g->nodes && l != local; n++) {
            comm_post_both(c, slot, op, group_at(g, node, l), comm_slice(op, group_at(g, n, l)),
                           comm_slice(op, group_at(g, n, local)));
        }
    }
}
static inline void comm_exchange(Comm *c, const CommOp *op, CommSlot *slot) {
    for (int i = 0; i < op->group->n; i++) {
        const CommPart sent = comm_sent(op, i);
        if (i == op->group->me) {
            memcpy(op->slice, sent.data, (size_t)sent.bytes);
        } else {
            comm_post_both(c, slot, op, i, comm_received(op, i), sent);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Phases
enum { PHASE_NEW, PHASE_REDUCE, PHASE_NODES, PHASE_LOCAL, PHASE_DONE };

static inline bool comm_op_reduces(const CommOp *op) {
    return op->kind == COMM_REDUCE_SCATTER || op->kind == COMM_ALL_REDUCE;
}

// Enters the operation's next phase and posts its messages, if it has any there.
static inline void comm_next_phase(Comm *c, CommOp *op) {
    CommSlot *slot = &c->slot[0];
    const int64_t *b = op->bounds;
    const bool packed = comm_gathers_packed(op),
               gathers = op->kind == COMM_ALL_GATHER || op->kind == COMM_ALL_REDUCE;
    slot->requests = 0;
    switch (++op->phase) {
    case PHASE_REDUCE:
        if (comm_op_reduces(op)) { comm_reduce_begin(c, op); }
        break;
    case PHASE_NODES:
        if (packed) {
            const float *mine = comm_floats(op->slice);
            comm_pack(op->slice, mine, slice_length(b, op->group->me));
        }
        if (gathers) { comm_gather_nodes(c, op, slot); }
        break;
    case PHASE_LOCAL:
        if (gathers) { comm_gather_local(c, op, slot); }
        if (op->kind == COMM_ALL_TO_ALL) { comm_exchange(c, op, slot); }
        break;
    default:
        for (int i = 0; packed && i < op->group->n; i++) {
            comm_unpack_in_place(comm_floats(op->out) + b[i], slice_length(b, i));
        }
    }
}
// Advances the collectives, one after another. Cheap when none is in flight.
static inline void comm_advance_collectives(Comm *c) {
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

#endif
