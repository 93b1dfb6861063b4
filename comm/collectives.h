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

#include "comm/watchdog.h" // errors of MPI

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
                                  void *received, int64_t received_bytes, const void *sent,
                                  int64_t sent_bytes) {
    comm_post(c, slot, op, false, member, received, received_bytes);
    comm_post(c, slot, op, true, member, sent, sent_bytes);
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
static inline float *comm_staged(const Comm *c, const CommOp *op, const CommSlot *slot,
                                 CommRegion region, int index) {
    const int64_t segment = (slot - c->slot) * comm_region(op->group, op->wire, STAGED_END) +
                            comm_region(op->group, op->wire, region) + index;
    return comm_floats(c->staging) + segment * c->piece_elements;
}
// Returns where the contributions of the member of this node with local index l, to the slice of an
// owner on node n, arrive.
static inline float *comm_contribution(const Comm *c, const CommOp *op, const CommSlot *slot, int l,
                                       int n) {
    const int index = l < group_local(op->group, op->group->me) ? l : l - 1;
    return comm_staged(c, op, slot, STAGED_CONTRIBUTIONS, index * op->group->nodes + n);
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
static inline void comm_reduce_begin(Comm *c, const CommOp *op) {
    const int64_t segments = COMM_SLOTS * comm_region(op->group, op->wire, STAGED_END);
    c->next_piece = c->done_pieces = 0;
    c->piece_elements = (int64_t)c->staging_bytes / 4 / segments / 16 * 16;
    if (c->piece_elements < 16) {
        die(EXIT_RESOURCES, NULL, "staging buffer of %zu bytes is too small for %d ranks",
            c->staging_bytes, op->group->n);
    }
}

// Returns what is sent of some values: with wire bf16, their packed copy in a segment of staging.
static inline const void *comm_on_wire(const Comm *c, const CommOp *op, const CommSlot *slot,
                                       CommRegion region, int index, const float *values,
                                       int64_t count) {
    if (op->wire != DTYPE_BF16) { return values; }
    float *packed = comm_staged(c, op, slot, region, index);
    comm_pack(packed, values, count);
    return packed;
}
// Step 1 of a piece: posts its contributions.
static inline void comm_reduce_local(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    const int node = group_node(g, g->me), local = group_local(g, g->me);
    const int64_t size = (int64_t)dtype_size(op->wire);
    int64_t first;
    slot->piece = c->next_piece++;
    slot->state = 1;
    slot->requests = 0;
    for (int l = 0; l < g->locals; l++) {
        for (int n = 0; n < g->nodes && l != local; n++) {
            int64_t count = comm_piece(c, op, group_at(g, n, local), slot->piece, &first);
            comm_post(c, slot, op, false, group_at(g, node, l),
                      comm_contribution(c, op, slot, l, n), count * size);
        }
    }
    for (int l = 0; l < g->locals; l++) {
        for (int n = 0; n < g->nodes && l != local; n++) {
            int owner = group_at(g, n, l);
            int64_t count = comm_piece(c, op, owner, slot->piece, &first);
            const float *mine = comm_floats(op->in) + first;
            comm_post(c, slot, op, true, group_at(g, node, l),
                      comm_on_wire(c, op, slot, STAGED_SENT, owner, mine, count), count * size);
        }
    }
}
// Sums this node's contributions to a piece of one slice into out. The slice's owner is the member
// on node n with this rank's local index.
static inline void comm_reduce_sum_node(Comm *c, const CommOp *op, CommSlot *slot, int n,
                                        float *out) {
    const Group *g = op->group;
    const bool packed = op->wire == DTYPE_BF16;
    int local = group_local(g, g->me);
    int64_t first, count = comm_piece(c, op, group_at(g, n, local), slot->piece, &first);
    for (int l = 0; l < g->locals; l++) {
        if (l == local) { continue; }
        float *theirs = comm_contribution(c, op, slot, l, n);
        if (packed) { comm_unpack_in_place(theirs, count); }
        c->sources[l] = theirs;
    }
    c->sources[local] = comm_floats(op->in) + first;
    if (packed) {
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
        if (n == node) { continue; }
        comm_post(c, slot, op, false, group_at(g, n, local),
                  comm_staged(c, op, slot, STAGED_RECEIVED, n), mine * size);
    }
    for (int n = 0; n < g->nodes; n++) {
        float *sum = comm_staged(c, op, slot, STAGED_SUMS, n);
        int64_t count = comm_piece(c, op, group_at(g, n, local), slot->piece, &first);
        comm_reduce_sum_node(c, op, slot, n, sum);
        if (n == node) {
            if (op->wire == DTYPE_BF16) { comm_round(sum, sum, count); }
            continue;
        }
        // STAGED_OWN held the rank's own contribution, which `sum` contains already
        comm_post(c, slot, op, true, group_at(g, n, local),
                  comm_on_wire(c, op, slot, STAGED_OWN, n, sum, count), count * size);
    }
}
static inline void comm_reduce_finish(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    int64_t first, count = comm_piece(c, op, g->me, slot->piece, &first);
    float *out = comm_floats(op->slice) + slot->piece * c->piece_elements;
    slot->state = 0;
    c->done_pieces++;
    if (g->nodes == 1) {
        comm_reduce_sum_node(c, op, slot, 0, out);
        return;
    }
    for (int n = 0; n < g->nodes; n++) {
        const bool mine = n == group_node(g, g->me);
        float *sum = comm_staged(c, op, slot, mine ? STAGED_SUMS : STAGED_RECEIVED, n);
        if (!mine && op->wire == DTYPE_BF16) { comm_unpack_in_place(sum, count); }
        c->sources[n] = sum;
    }
    comm_sum(out, c->sources, g->nodes, count);
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
            const bool last_step = op->group->nodes == 1 || slot->state == 2;
            (last_step ? comm_reduce_finish : comm_reduce_nodes)(c, op, slot);
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
// Returns member i's slice, and the bytes of it that an all-gather sends.
static inline char *comm_slice(const CommOp *op, int i, int64_t *bytes) {
    const int64_t size = (int64_t)op->element_bytes;
    *bytes = slice_length(op->bounds, i) * (comm_gathers_packed(op) ? 2 : size);
    return op->out + op->bounds[i] * size;
}
static inline void comm_gather_nodes(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    int64_t mine, theirs;
    char *own = comm_slice(op, g->me, &mine);
    for (int n = 0; n < g->nodes; n++) {
        int peer = group_at(g, n, group_local(g, g->me));
        char *slice = comm_slice(op, peer, &theirs);
        if (peer != g->me) { comm_post_both(c, slot, op, peer, slice, theirs, own, mine); }
    }
}
static inline void comm_gather_local(Comm *c, const CommOp *op, CommSlot *slot) {
    const Group *g = op->group;
    int node = group_node(g, g->me), local = group_local(g, g->me);
    int64_t in_bytes, out_bytes;
    for (int l = 0; l < g->locals; l++) {
        for (int n = 0; n < g->nodes && l != local; n++) {
            char *received = comm_slice(op, group_at(g, n, l), &in_bytes),
                 *sent = comm_slice(op, group_at(g, n, local), &out_bytes);
            comm_post_both(c, slot, op, group_at(g, node, l), received, in_bytes, sent, out_bytes);
        }
    }
}
static inline void comm_exchange(Comm *c, const CommOp *op, CommSlot *slot) {
    const int64_t size = (int64_t)op->element_bytes, *b = op->bounds, *to = op->recv_bounds;
    for (int i = 0; i < op->group->n; i++) {
        const char *sent = op->in + b[i] * size;
        const int64_t bytes = (b[i + 1] - b[i]) * size;
        if (i == op->group->me) {
            memcpy(op->slice, sent, (size_t)bytes);
        } else {
            comm_post_both(c, slot, op, i, op->out + to[i] * size, (to[i + 1] - to[i]) * size, sent,
                           bytes);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Phases
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
    const int64_t *b = op->bounds;
    const bool packed = comm_gathers_packed(op), gathers = comm_op_gathers(op);
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
