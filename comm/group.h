// group.h: groups of ranks and their nodes (Group), the bytes that each member sends in a
// collective, and which ranks compute which units (Placement). All functions are pure: they send no
// messages.
//
// A collective over a group of n members divides an array into n slices by n + 1 ascending element
// bounds. Slice i belongs to member i and may be empty. The predictions here follow the rules of
// collectives.h (Levels): a group works on two levels if its members are spread evenly over several nodes.
#ifndef GROUP_H
#define GROUP_H

#include "base/base.h" // checked_malloc

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

// An ordered list of distinct ranks, as one rank sees it. Nodes are numbered within the group;
// member i is number local[i] on node[i].
typedef struct {
    int n, me;         // number of members; index of this rank, -1: it is not a member
    int *ranks;        // [n]
    int *node, *local; // [n]
    int nodes, locals; // nodes, and members of each; 1 and n if the group has one level
    int *at;           // [nodes][locals] index of the member
    void *channel;     // the transport's data of the group; NULL: none
} Group;

// Returns the group of n distinct ranks, in this order. node_of: node of each rank, indexed by
// rank. The caller frees it with group_free().
static inline Group group_make(const int *ranks, int n, int my_rank, const int *node_of) {
    Group g = {n, -1, NULL, NULL, NULL, 0, 0, NULL, NULL};
    size_t bytes = (size_t)n * sizeof(int);
    g.ranks = (int *)checked_malloc(bytes, "group");
    g.node = (int *)checked_malloc(bytes, "group");
    g.local = (int *)checked_malloc(bytes, "group");
    g.at = (int *)checked_malloc(bytes, "group");
    memcpy(g.ranks, ranks, bytes);
    // number of the member's node within the group, and of the member on it
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
// Returns the group of some members of g, in this order, as the same rank sees it. This rank must
// be a member of g.
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
// Returns the same group as another member sees it. The copy has no channel.
static inline Group group_seen_from(const Group *g, int member) {
    int *members = (int *)checked_malloc((size_t)g->n * sizeof(int), "group");
    for (int i = 0; i < g->n; i++) { members[i] = i; }
    Group seen = group_part(g, members, g->n);
    free(members);
    seen.me = member;
    return seen;
}
// Returns the group of all ranks of a cluster of equal nodes, as rank 0 sees it.
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
// Return the position of a member on the two levels (on one level: node 0), and the member at a
// position.
static inline int group_node(const Group *g, int i) { return g->nodes == 1 ? 0 : g->node[i]; }
static inline int group_local(const Group *g, int i) { return g->nodes == 1 ? i : g->local[i]; }
static inline int group_at(const Group *g, int node, int local) {
    return g->at[node * g->locals + local];
}
static inline CommLink group_link(const Group *g, int a, int b) {
    return g->node[a] == g->node[b] ? LINK_INTRA : LINK_INTER;
}

// Adds one message of `elements` from member `me` to member `to`; nothing if they are the same.
static inline void comm_count(const Group *g, int me, int to, int64_t elements,
                              size_t element_bytes, int64_t bytes[LINK_KINDS]) {
    if (to != me) { bytes[group_link(g, me, to)] += elements * (int64_t)element_bytes; }
}

// Predicts what a collective adds to the counters of a member: bytes[link] += the bytes that it
// sends. element_bytes: size of a sent element, for reductions dtype_size(wire). bounds: of an
// all-to-all, the member's send bounds.
static inline void comm_bytes_sent(CommKind kind, const Group *g, int member, const int64_t *bounds,
                                   size_t element_bytes, int64_t bytes[LINK_KINDS]) {
    int node = group_node(g, member), local = group_local(g, member);
    bool reduces = kind == COMM_REDUCE_SCATTER || kind == COMM_ALL_REDUCE,
         gathers = kind == COMM_ALL_GATHER || kind == COMM_ALL_REDUCE;
    for (int i = 0; i < g->n; i++) {
        int64_t elements = bounds[i + 1] - bounds[i];
        int i_node = group_node(g, i), i_local = group_local(g, i);
        if (kind == COMM_ALL_TO_ALL) { comm_count(g, member, i, elements, element_bytes, bytes); }
        // a contribution to slice i goes to the member of this node with the owner's local index,
        // which sends the node's sum to the owner
        if (reduces) {
            comm_count(g, member, group_at(g, node, i_local), elements, element_bytes, bytes);
        }
        if (reduces && i_local == local && i_node != node) {
            comm_count(g, member, i, elements, element_bytes, bytes);
        }
    }
    int64_t mine = bounds[member + 1] - bounds[member];
    // this member's slice goes to the other nodes; slices from there are sent on inside this node
    for (int n = 0; gathers && n < g->nodes; n++) {
        comm_count(g, member, group_at(g, n, local), mine, element_bytes, bytes);
        int owner = group_at(g, n, local);
        for (int l = 0; l < g->locals; l++) {
            comm_count(g, member, group_at(g, node, l), bounds[owner + 1] - bounds[owner],
                       element_bytes, bytes);
        }
    }
}

static inline int64_t slice_length(const int64_t *bounds, int i) {
    return bounds[i + 1] - bounds[i];
}
// Returns the elements of n slices of the length of the first. If only the last slices are shorter,
// because they end where the array ends, a collective over this many elements covers the array.
static inline int64_t bounds_padded(const int64_t *bounds, int n) { return n * bounds[1]; }

// -------------------------------------------------------------------------------------------------
// Placement: which ranks compute which units.
typedef struct {
    int first_unit, units;
    int replicas; // number of ranks
    int *ranks;   // [replicas] in the order of their rows
} Stage;
typedef struct {
    int stages;
    Stage *stage; // [stages] in the order of their units
} Placement;

static inline Placement placement_make(int stages) {
    Placement p = {stages, (Stage *)checked_calloc((size_t)stages, sizeof(Stage), "placement")};
    return p;
}
// Returns N stages whose numbers of units are as even as possible; the first stages take the units
// that remain.
static inline Placement placement_even(int units, int N) {
    Placement p = placement_make(N);
    for (int j = 0, unit = 0; j < N; unit += p.stage[j++].units) {
        p.stage[j].first_unit = unit;
        p.stage[j].units = units / N + (j < units % N);
    }
    return p;
}
// Gives the stages their ranks (Stage.replicas), in order.
static inline void placement_take_ranks(Placement *p) {
    for (int s = 0, rank = 0; s < p->stages; s++) {
        Stage *stage = &p->stage[s];
        stage->ranks = NEW_ARRAY(int, stage->replicas, "placement");
        for (int i = 0; i < stage->replicas; i++) { stage->ranks[i] = rank++; }
    }
}
static inline void placement_free(Placement *p) {
    for (int s = 0; s < p->stages; s++) { free(p->stage[s].ranks); }
    free(p->stage);
    memset(p, 0, sizeof *p);
}
// Returns the stage of a rank; 0 if the rank has none.
static inline int placement_stage_of_rank(const Placement *p, int rank) {
    for (int s = 0; s < p->stages; s++) {
        for (int i = 0; i < p->stage[s].replicas; i++) {
            if (p->stage[s].ranks[i] == rank) { return s; }
        }
    }
    return 0; // --cluster: the first stage represents the others
}
static inline int placement_stage_of_unit(const Placement *p, int unit) {
    int s = 0;
    while (unit >= p->stage[s].first_unit + p->stage[s].units) { s++; }
    return s;
}

#endif
