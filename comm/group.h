// group.h: groups of ranks and their nodes (Group), the bytes that each member sends in a
// collective, which ranks compute which units (Placement), and which units a rank computes
// (RankUnits). All functions are pure: they send no messages.
//
// A collective over a group of n members divides an array into n slices by n + 1 ascending element
// bounds. Slice i belongs to member i and may be empty. The predictions here follow the rules of
// collectives.h (Levels): a group works on two levels if its members are spread evenly over
// several nodes.
#ifndef GROUP_H
#define GROUP_H

#include "base/base.h"

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
    int *ranks;        // [n]; the other arrays lie behind it
    int *node, *local; // [n]
    int nodes, locals; // nodes, and members of each; 1 and n if the group has one level
    int *at;           // [nodes][locals] index of the member
    void *channel;     // the transport's data of the group; NULL: none
} Group;

static inline Group group_allocate(int n) {
    Group g = {.n = n, .me = -1, .ranks = new_array(int, 4 * n, "group")};
    g.node = g.ranks + n;
    g.local = g.node + n;
    g.at = g.local + n;
    return g;
}
// Completes a group whose `ranks` are filled in, and whose `at` holds their nodes' numbers, from 0.
static inline Group group_complete(Group g, int my_rank) {
    int numbers = 0;
    for (int i = 0; i < g.n; i++) { numbers = (int)max_i64(numbers, g.at[i] + 1); }
    int *node_of = new_array(int, 2 * numbers, "groups"), // counted from 1; 0: not seen
        *members = node_of + numbers;                     // seen so far
    for (int i = 0; i < g.n; i++) {
        int *node = &node_of[g.at[i]];
        if (g.ranks[i] == my_rank) { g.me = i; }
        if (!*node) { *node = ++g.nodes; }
        g.node[i] = *node - 1;
        g.local[i] = members[g.at[i]]++;
        g.locals = (int)max_i64(g.locals, g.local[i] + 1);
    }
    free(node_of);
    bool even = g.nodes > 1 && g.locals > 1 && g.nodes * g.locals == g.n;
    if (!even) {
        g.nodes = 1;
        g.locals = g.n;
    }
    for (int i = 0; i < g.n; i++) { g.at[even ? g.node[i] * g.locals + g.local[i] : i] = i; }
    return g;
}
// Returns the group of n distinct ranks, in this order (NULL: ranks 0 .. n - 1). node_of: node of
// each rank, indexed by rank. The caller frees it with group_free().
static inline Group group_make(const int *ranks, int n, int my_rank, const int *node_of) {
    Group g = group_allocate(n);
    for (int i = 0; i < n; i++) {
        g.ranks[i] = ranks ? ranks[i] : i;
        g.at[i] = node_of[g.ranks[i]];
    }
    return group_complete(g, my_rank);
}
// Returns the group of n members of g, in this order (NULL: all, in theirs), as the same rank sees
// it. This rank must be a member of g. The copy has no channel.
static inline Group group_part(const Group *g, const int *members, int n) {
    Group part = group_allocate(n);
    for (int i = 0; i < n; i++) {
        const int member = members ? members[i] : i;
        part.ranks[i] = g->ranks[member];
        part.at[i] = g->node[member];
    }
    return group_complete(part, g->ranks[g->me]);
}
// Returns the same group as another member sees it.
static inline Group group_seen_from(const Group *g, int member) {
    Group seen = group_part(g, NULL, g->n);
    seen.me = member;
    return seen;
}
// Returns the group of all ranks of a cluster of equal nodes, as rank 0 sees it.
static inline Group group_cluster(int nodes, int ranks_of_node) {
    Group g = group_allocate(nodes * ranks_of_node);
    for (int i = 0; i < g.n; i++) {
        g.ranks[i] = i;
        g.at[i] = i / ranks_of_node;
    }
    return group_complete(g, 0);
}
static inline void group_free(Group *g) {
    free(g->ranks); // and the arrays behind it
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
// Is the group on several nodes?
static inline bool group_spans(const Group *g) { return group_link(g, 0, g->n - 1) == LINK_INTER; }

static inline int64_t slice_length(const int64_t *bounds, int i) {
    return bounds[i + 1] - bounds[i];
}
// Adds a message from member `me` to member `to`; nothing if they are the same.
static inline void comm_count(const Group *g, int me, int to, int64_t message_bytes,
                              int64_t bytes[LINK_KINDS]) {
    if (to != me) { bytes[group_link(g, me, to)] += message_bytes; }
}
// Predicts what a collective adds to the counters of a member: bytes[link] += the bytes that it
// sends. element_bytes: size of a sent element, for reductions dtype_size(wire). bounds: of an
// all-to-all, the member's send bounds.
static inline void comm_bytes_sent(CommKind kind, const Group *g, int member, const int64_t *bounds,
                                   size_t element_bytes, int64_t bytes[LINK_KINDS]) {
    const int node = group_node(g, member);
    const int64_t size = (int64_t)element_bytes, own = slice_length(bounds, member) * size;
    for (int i = 0; i < g->n; i++) {
        const int64_t slice = slice_length(bounds, i) * size;
        const int via = group_at(g, node, group_local(g, i)); // here, with the owner's local index
        if (kind == COMM_ALL_TO_ALL) { comm_count(g, member, i, slice, bytes); }
        if (kind == COMM_REDUCE_SCATTER || kind == COMM_ALL_REDUCE) {
            comm_count(g, member, via, slice, bytes);                      // a contribution
            if (via == member) { comm_count(g, member, i, slice, bytes); } // the node's sum
        }
        if ((kind == COMM_ALL_GATHER || kind == COMM_ALL_REDUCE) && via == member) {
            comm_count(g, member, i, own, bytes); // to another node
            for (int l = 0; l < g->locals; l++) { // what came from there, inside this node
                comm_count(g, member, group_at(g, node, l), slice, bytes);
            }
        }
    }
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
    Placement p = {stages, new_array(Stage, stages, "placement")};
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
        stage->ranks = new_array(int, stage->replicas, "placement");
        for (int i = 0; i < stage->replicas; i++) { stage->ranks[i] = rank++; }
    }
}
static inline void placement_free(Placement *p) {
    for (int s = 0; s < p->stages; s++) { free(p->stage[s].ranks); }
    free(p->stage);
    memset(p, 0, sizeof *p);
}
// Returns the stage of a rank, and writes its place among the stage's ranks; both are 0 if the rank
// has none.
static inline int placement_find_rank(const Placement *p, int rank, int *place) {
    for (int s = 0; s < p->stages; s++) {
        for (*place = 0; *place < p->stage[s].replicas; (*place)++) {
            if (p->stage[s].ranks[*place] == rank) { return s; }
        }
    }
    *place = 0;
    return 0; // --cluster: the first stage represents the others
}
static inline int placement_stage_of_rank(const Placement *p, int rank) {
    int place;
    return placement_find_rank(p, rank, &place);
}
static inline int placement_stage_of_unit(const Placement *p, int unit) {
    int s = 0;
    while (unit >= p->stage[s].first_unit + p->stage[s].units) { s++; }
    return s;
}

// -------------------------------------------------------------------------------------------------
// The units of a rank: those of its stages. Whatever depends on which units these are asks here.
enum { RANK_STAGES = 16 }; // of a rank, at most
typedef struct {
    struct {
        int first, end; // units [first, end)
    } stage[RANK_STAGES];
    int stages; // in the order of their units
} RankUnits;

static inline void units_add(RankUnits *u, int first, int end) {
    assert(u->stages < RANK_STAGES);
    u->stage[u->stages].first = first;
    u->stage[u->stages++].end = end;
}
static inline RankUnits units_range(int first, int end) {
    RankUnits u = {};
    units_add(&u, first, end);
    return u;
}
// Returns the units of a rank: all stages of its ranks. A rank without a stage has the first one's.
static inline RankUnits placement_units_of_rank(const Placement *p, int rank) {
    RankUnits u = {};
    const int first = placement_stage_of_rank(p, rank);
    for (int s = first; s < p->stages; s++) {
        const Stage *stage = &p->stage[s];
        if (s == first || (stage->replicas && stage->ranks[0] == p->stage[first].ranks[0])) {
            units_add(&u, stage->first_unit, stage->first_unit + stage->units);
        }
    }
    return u;
}
static inline int units_first(const RankUnits *u) { return u->stage[0].first; }
static inline int units_count(const RankUnits *u) {
    int count = 0;
    for (int s = 0; s < u->stages; s++) { count += u->stage[s].end - u->stage[s].first; }
    return count;
}
static inline bool units_have(const RankUnits *u, int unit) {
    for (int s = 0; s < u->stages; s++) {
        if (unit >= u->stage[s].first && unit < u->stage[s].end) { return true; }
    }
    return false;
}
// Returns which stage of the rank, from 0 on, receives the input of a unit from another one, or
// sends it to another one; else -1.
static inline int units_receiver(const RankUnits *u, int unit) {
    int s = unit > 0 ? u->stages - 1 : -1;
    while (s >= 0 && u->stage[s].first != unit) { s--; }
    return s;
}
static inline int units_sender(const RankUnits *u, int unit) {
    int s = u->stages - 1;
    while (s >= 0 && u->stage[s].end != unit) { s--; }
    return s;
}

#endif
