// group.h: who takes part in a collective, on which nodes, and what each member then sends; which
// ranks compute which units (Placement). Pure: no messages; comm.h sends them.
//
// A collective over a group of n members divides an array into n slices by n + 1 ascending element
// bounds; slice i belongs to member i and may be empty. What is counted here is what comm.h's
// banner says: two levels where the members lie evenly on several nodes.
#ifndef GROUP_H
#define GROUP_H

#include "support/base.h" // checked_malloc

typedef enum {
    COMM_ALL_GATHER,
    COMM_REDUCE_SCATTER,
    COMM_ALL_REDUCE,
    COMM_ALL_TO_ALL,
    COMM_SEND,
    COMM_KINDS
} CommKind;
typedef enum { LINK_INTRA, LINK_INTER, LINK_KINDS } CommLink; // inside a node, between nodes
static const char *const comm_kind_names[COMM_KINDS] = {"all_gather", "reduce_scatter",
                                                        "all_reduce", "all_to_all", "send"};
static const char *const comm_link_names[LINK_KINDS] = {"intra", "inter"};

// An ordered list of distinct ranks, seen from one of them (or from outside: me = -1). Member i is
// the local[i]-th on node[i].
typedef struct {
    int n, me;
    int *ranks;        // [n]
    int *node, *local; // [n]
    int nodes, locals; // 1 x n: one level
    int *at;           // [nodes][locals] member
    void *channel;     // what the transport keeps for it
} Group;

// The group of these distinct ranks in this order. Pure, but for memory: group_free() gives it
// back.
static inline Group group_make(const int *ranks, int n, int my_rank, const int *node_of) {
    Group g = {n, -1, NULL, NULL, NULL, 0, 0, NULL, NULL};
    size_t bytes = (size_t)n * sizeof(int);
    g.ranks = (int *)checked_malloc(bytes, "group");
    g.node = (int *)checked_malloc(bytes, "group");
    g.local = (int *)checked_malloc(bytes, "group");
    g.at = (int *)checked_malloc(bytes, "group");
    memcpy(g.ranks, ranks, bytes);
    // position of the node among the group's nodes, and of the member on it
    for (int i = 0; i < n; i++) {
        if (ranks[i] == my_rank) { g.me = i; }
        g.node[i] = g.nodes;
        g.local[i] = 0;
        for (int j = 0; j < i; j++) {
            if (node_of[ranks[j]] == node_of[ranks[i]]) {
                g.node[i] = g.node[j];
                g.local[i]++;
            }
        }
        if (g.node[i] == g.nodes) { g.nodes++; }
        g.locals = (int)max_i64(g.locals, g.local[i] + 1);
    }
    bool even = g.nodes > 1 && g.locals > 1 && g.nodes * g.locals == n;
    if (!even) {
        g.nodes = 1;
        g.locals = n;
    }
    for (int i = 0; i < n; i++) { g.at[even ? g.node[i] * g.locals + g.local[i] : i] = i; }
    return g;
}
// The group of some members of another, in this order, seen from the same rank.
static inline Group group_part(const Group *g, const int *members, int n) {
    int *ranks = (int *)checked_malloc((size_t)n * sizeof(int), "group"), most = 0;
    for (int i = 0; i < g->n; i++) { most = (int)max_i64(most, g->ranks[i]); }
    int *node_of = (int *)checked_calloc((size_t)most + 1, sizeof(int), "group");
    for (int i = 0; i < g->n; i++) { node_of[g->ranks[i]] = g->node[i]; }
    for (int i = 0; i < n; i++) { ranks[i] = g->ranks[members[i]]; }
    Group part = group_make(ranks, n, g->ranks[g->me], node_of);
    free(ranks);
    free(node_of);
    return part;
}
// The same group, seen from another of its members. Messages need their own.
static inline Group group_seen_from(const Group *g, int member) {
    int *members = (int *)checked_malloc((size_t)g->n * sizeof(int), "group");
    for (int i = 0; i < g->n; i++) { members[i] = i; }
    Group seen = group_part(g, members, g->n);
    free(members);
    seen.me = member;
    return seen;
}
// All ranks of a cluster of equal nodes, seen from the first.
static inline Group group_cluster(int nodes, int ranks_of_node) {
    int n = nodes * ranks_of_node, *ranks = (int *)checked_malloc((size_t)n * sizeof(int), "group"),
        *node_of = (int *)checked_malloc((size_t)n * sizeof(int), "group");
    for (int i = 0; i < n; i++) {
        ranks[i] = i;
        node_of[i] = i / ranks_of_node;
    }
    Group g = group_make(ranks, n, 0, node_of);
    free(ranks);
    free(node_of);
    return g;
}
static inline void group_free(Group *g) {
    free(g->ranks);
    free(g->node);
    free(g->local);
    free(g->at);
    memset(g, 0, sizeof *g);
}
// Place of a member on the levels on which the group works.
static inline int group_node(const Group *g, int i) { return g->nodes == 1 ? 0 : g->node[i]; }
static inline int group_local(const Group *g, int i) { return g->nodes == 1 ? i : g->local[i]; }
static inline int group_at(const Group *g, int node, int local) {
    return g->at[node * g->locals + local];
}
static inline CommLink group_link(const Group *g, int a, int b) {
    return g->node[a] == g->node[b] ? LINK_INTRA : LINK_INTER;
}

// Visits what one member sends in a phase of a collective: phase 0 of an all-gather and phase 1 of
// a reduction go between nodes, the others inside. A slice of `elements` travels from member `me`
// to `to`.
static inline void comm_count(const Group *g, int me, int to, int64_t elements,
                              size_t element_bytes, int64_t bytes[LINK_KINDS]) {
    if (to != me) { bytes[group_link(g, me, to)] += elements * (int64_t)element_bytes; }
}

// Predicts what a collective adds to the counters of `member`: bytes[link] += what it sends. Pure.
// element_bytes is dtype_size(wire) for reductions; bounds are the send bounds of an all-to-all.
static inline void comm_bytes_sent(CommKind kind, const Group *g, int member, const int64_t *bounds,
                                   size_t element_bytes, int64_t bytes[LINK_KINDS]) {
    int node = group_node(g, member), local = group_local(g, member);
    bool reduces = kind == COMM_REDUCE_SCATTER || kind == COMM_ALL_REDUCE,
         gathers = kind == COMM_ALL_GATHER || kind == COMM_ALL_REDUCE;
    for (int i = 0; i < g->n; i++) {
        int64_t elements = bounds[i + 1] - bounds[i];
        int i_node = group_node(g, i), i_local = group_local(g, i);
        if (kind == COMM_ALL_TO_ALL) { comm_count(g, member, i, elements, element_bytes, bytes); }
        // a contribution to slice i goes to my node's member in the owner's place, which sends the
        // node's sum to the owner
        if (reduces) {
            comm_count(g, member, group_at(g, node, i_local), elements, element_bytes, bytes);
        }
        if (reduces && i_local == local && i_node != node) {
            comm_count(g, member, i, elements, element_bytes, bytes);
        }
    }
    int64_t mine = bounds[member + 1] - bounds[member];
    // my slice to the other nodes, then what came from there inside mine
    for (int n = 0; gathers && n < g->nodes; n++) {
        comm_count(g, member, group_at(g, n, local), mine, element_bytes, bytes);
        int owner = group_at(g, n, local);
        for (int l = 0; l < g->locals; l++) {
            comm_count(g, member, group_at(g, node, l), bounds[owner + 1] - bounds[owner],
                       element_bytes, bytes);
        }
    }
}

// The elements of n slices that are all as long as the first. Where slices are equally long but for
// the last ones, which end where the array does, a collective over so many elements covers it.
static inline int64_t bounds_padded(const int64_t *bounds, int n) { return n * bounds[1]; }

// -------------------------------------------------------------------------------------------------
// Placement: which ranks compute which units.
typedef struct {
    int first_unit, units;
    int replicas;
    int *ranks; // [replicas] in the order of their rows
} Stage;
typedef struct {
    int stages;
    Stage *stage; // [stages] their units follow each other
} Placement;

static inline Placement placement_make(int stages) {
    Placement p = {stages, (Stage *)checked_calloc((size_t)stages, sizeof(Stage), "placement")};
    return p;
}
static inline void placement_free(Placement *p) {
    for (int s = 0; s < p->stages; s++) { free(p->stage[s].ranks); }
    free(p->stage);
    memset(p, 0, sizeof *p);
}
static inline int placement_stage_of_rank(const Placement *p, int rank) {
    for (int s = 0; s < p->stages; s++) {
        for (int i = 0; i < p->stage[s].replicas; i++) {
            if (p->stage[s].ranks[i] == rank) { return s; }
        }
    }
    return 0; // --cluster: the first stands for all
}
static inline int placement_stage_of_unit(const Placement *p, int unit) {
    int s = 0;
    while (unit >= p->stage[s].first_unit + p->stage[s].units) { s++; }
    return s;
}

#endif
