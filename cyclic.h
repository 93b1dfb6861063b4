// cyclic.h: builds the schedules of Cyclic Data Parallelism (Fournier and Oyallon, arXiv
// 2403.08837). Only this file knows about the delay; the store just keeps the versions it is asked
// for.
//
// Rule       A step has N micro-batches i = 1..N, and the model is cut into N stages j = 1..N.
//            Micro-batch i computes stage j, forward and backward, with theta_t (fresh) or
//            theta_(t-1) (delayed):
//              v1  always delayed
//              v2  fresh if i + j >= N + 1 + K, where K = --cyclic-slack (K = N would be v1)
//            The update is the mean over the micro-batches, as usual: theta_(t+1) = theta_t -
//            step(sum of their gradients), with theta_(-1) = theta_0. wte belongs to stage 1, and
//            both of its uses read stage 1's version.
// Slots      The forward and the backward pass of a stage take one slot each. A step takes 2 N
//            slots, and micro-batch i runs two slots behind i - 1. Counting t, i and j from 0, as
//            the code and the rest of this comment do:
//              F_j of (t, i) is in slot 2 N t + 2 i + j
//              B_j of (t, i) is in slot 2 N t + 2 i + 2 N - 1 - j
//            So in each slot at most one micro-batch uses a stage. Stage j holds the activations of
//            N - j micro-batches, N (N + 1) / 2 in all. Gradients become complete stage by stage,
//            from the last to the first, each with B_j of micro-batch N - 1.
// Pieces     A micro-batch of more than --micro-batch samples is computed in A pieces
//            (state/layout.h: Pieces). Each piece has separate passes, with the versions of its
//            micro-batch. Piece k of the N A pieces of a step takes the position of micro-batch k
//            above, and a step takes 2 N A slots. The gradient of a piece is computed in full, then
//            added to those of the earlier pieces of its micro-batch: g_i = (g_i1 + g_i2) + ...
//            Action.micro counts pieces.
// Window     The list of actions for step t. It has 2 N A slots, begins 2 N - 2 slots after step t
//            does, and ends with the slot of the step's last update. So it has the rest of step t,
//            and the part of step t + 1 that already runs (Action.step = 1). New parameters travel
//            when they are needed, which may be in a later window (Action.step < 0). A run that
//            executes what belongs to step t and nothing more has drained: all of theta_(t+1)
//            exists, and no message is in flight.
// Sums       A micro-batch's gradient of a storage is computed in full, then added to the sum of
//            those before: ((g_1 + g_2) + g_3) + ... This order is part of the definition, so all
//            modes give the same bits.
// Modes      single  one rank runs all micro-batches, interleaved
//            model   rank j runs stage j of all micro-batches: a pipeline without bubbles. With N
//                    (N + 1) / 2 ranks, stage j has N - j ranks that take turns, and each holds the
//                    activations of only one micro-batch. One of them is the stage's owner: it sums
//                    what the others send, updates, and sends each the new version before its first
//                    use. Which rank runs which micro-batch then depends on the step.
//            data    rank i runs micro-batch i, all stages. Sums go from rank i to i + 1, and the
//                    last rank updates. Parameters return from rank to rank so that no rank sends
//                    more than the others (cyclic_route), two slots before they are needed where
//                    the rule permits. What a unit completes is sent in the unit's part of the
//                    slot. The lists are valid if every message is posted and waited for in order.
//                    Where the transport permits, store operations are deferred instead of waiting
//                    (state/p2p.h), which only removes constraints.
//            zero    as data, but the states of a stage have one owner, rank N - 1 - j, the first
//                    rank that uses what it updates. The owner sends parameters to the next user of
//                    the stage one slot before the use. Users send their gradients to the owner,
//                    which adds them. So each rank sends at most one stage's parameters and one
//                    stage's gradient in a slot, and receives as much.
#ifndef CYCLIC_H
#define CYCLIC_H

#include "state/layout.h"    // storages, stages
#include "engine/schedule.h" // actions

#include <limits.h> // INT_MAX

typedef enum { CYCLIC_OFF, CYCLIC_V1, CYCLIC_V2 } CyclicRule;
typedef enum { CYCLIC_AUTO, CYCLIC_SINGLE, CYCLIC_DATA, CYCLIC_ZERO, CYCLIC_MODEL } CyclicMode;

typedef struct {
    CyclicRule rule;
    CyclicMode mode; // never CYCLIC_AUTO
    int N, slack;    // number of stages, and of micro-batches in a step; K
    int pieces;      // pieces of a micro-batch (A)
    int ranks;
    Placement cut;        // [N] units of each stage
    const double *weight; // [N] size of each stage's parameters, in elements, for cyclic_route
    const SumWay *way;    // [storages] way of the sums; NULL: SUM_CHAIN
    bool recompute;
    bool waits; // updates wait for the norm of the whole gradient
    // Some steps drain before others follow. Then all new parameters have arrived early, and the
    // delayed ones must be kept as well.
    bool pauses;
} CyclicPlan;

// -------------------------------------------------------------------------------------------------
// The rule and the slots

static inline bool cyclic_fresh(const CyclicPlan *p, int micro, int stage) {
    return p->rule == CYCLIC_V2 && micro + stage + 1 >= p->N + p->slack;
}
// Each micro-batch has a rank.
static inline bool cyclic_by_micro(const CyclicPlan *p) {
    return p->mode == CYCLIC_DATA || p->mode == CYCLIC_ZERO;
}
static inline Pieces cyclic_pieces(const CyclicPlan *p) {
    const Pieces pieces = {p->N, p->pieces, cyclic_by_micro(p)};
    return pieces;
}
static inline int cyclic_micro(const CyclicPlan *p, int piece) {
    const Pieces pieces = cyclic_pieces(p);
    return piece_micro(&pieces, piece);
}
static inline int cyclic_first_piece(const CyclicPlan *p, int micro) {
    const Pieces pieces = cyclic_pieces(p);
    return piece_number(&pieces, micro, 0);
}
static inline int cyclic_last_piece(const CyclicPlan *p, int micro) {
    const Pieces pieces = cyclic_pieces(p);
    return piece_number(&pieces, micro, p->pieces - 1);
}
static inline int cyclic_step_pieces(const CyclicPlan *p) { return p->N * p->pieces; }
// slots of a step
static inline int cyclic_period(const CyclicPlan *p) { return 2 * cyclic_step_pieces(p); }
static inline int cyclic_forward_slot(const CyclicPlan *p, int step, int piece, int stage) {
    return cyclic_period(p) * step + 2 * piece + stage;
}
static inline int cyclic_backward_slot(const CyclicPlan *p, int step, int piece, int stage) {
    return cyclic_period(p) * step + 2 * piece + 2 * p->N - 1 - stage;
}
// Mode zero: returns whether the last micro-batch's gradient, too, has a slot to travel to the
// owner. Then the update is one slot later.
static inline bool cyclic_adds_later(const CyclicPlan *p, int stage) {
    return p->mode == CYCLIC_ZERO && !p->waits && (p->rule == CYCLIC_V1 || p->slack) && stage > 0;
}
// Returns the slot in which a stage's gradient is complete, and the slot after which its new
// version exists. Both count from the beginning of the step.
static inline int cyclic_complete_slot(const CyclicPlan *p, int stage) {
    return cyclic_backward_slot(p, 0, cyclic_last_piece(p, p->N - 1), stage);
}
static inline int cyclic_update_slot(const CyclicPlan *p, int stage) {
    const bool reported_later = p->mode == CYCLIC_MODEL || p->mode == CYCLIC_ZERO;
    return p->waits ? cyclic_complete_slot(p, 0) + (reported_later ? stage : 0)
                    : cyclic_complete_slot(p, stage) + cyclic_adds_later(p, stage);
}
// Returns the slot in which a micro-batch first uses, in a stage, the version that step 0 makes.
static inline int cyclic_first_use(const CyclicPlan *p, int micro, int stage) {
    return cyclic_forward_slot(p, cyclic_fresh(p, micro, stage) ? 1 : 2,
                               cyclic_first_piece(p, micro), stage);
}

// Mode model: whether the ranks of a stage take turns; how many ranks a stage has; its first rank;
// the stage of a rank.
static inline bool cyclic_turns(const CyclicPlan *p) {
    return p->mode == CYCLIC_MODEL && p->ranks > p->N;
}
static inline int cyclic_width(const CyclicPlan *p, int stage) {
    return cyclic_turns(p) ? p->N - stage : 1;
}
static inline int cyclic_first_rank(const CyclicPlan *p, int stage) {
    return cyclic_turns(p) ? stage * p->N - stage * (stage - 1) / 2 : stage;
}
static inline int cyclic_stage_of_rank(const CyclicPlan *p, int rank) {
    int stage = 0;
    while (stage + 1 < p->N && cyclic_first_rank(p, stage + 1) <= rank) { stage++; }
    return stage;
}
static inline int cyclic_turn(int64_t number, int n) { return (int)((number % n + n) % n); }
// cyclic_phases returns after how many steps the ranks of a stage have the same pieces again.
// cyclic_alike returns whether all ranks have the same pieces in two steps.
static inline int cyclic_phases(const CyclicPlan *p, int stage) {
    int phases = 1;
    while ((int64_t)phases * cyclic_step_pieces(p) % cyclic_width(p, stage)) { phases++; }
    return phases;
}
static inline bool cyclic_alike(const CyclicPlan *p, int64_t step, int64_t other) {
    bool alike = true;
    for (int j = 0; j < p->N; j++) { alike = alike && (step - other) % cyclic_phases(p, j) == 0; }
    return alike;
}
// cyclic_rank returns the rank that computes a piece in a stage; pieces are numbered through all
// steps. cyclic_owner returns the rank that updates a stage.
static inline int cyclic_rank(const CyclicPlan *p, int64_t piece, int stage) {
    if (p->mode == CYCLIC_MODEL) {
        return cyclic_first_rank(p, stage) + cyclic_turn(piece, cyclic_width(p, stage));
    }
    return p->mode == CYCLIC_SINGLE ? 0
                                    : cyclic_micro(p, cyclic_turn(piece, cyclic_step_pieces(p)));
}
static inline bool cyclic_computes(const CyclicPlan *p, int rank, int stage) {
    return p->mode != CYCLIC_MODEL || cyclic_stage_of_rank(p, rank) == stage;
}
static inline int cyclic_owner(const CyclicPlan *p, int stage) {
    return p->mode == CYCLIC_ZERO ? p->N - 1 - stage
                                  : cyclic_rank(p, cyclic_step_pieces(p) - 1, stage);
}
static inline int cyclic_stage_of_unit(const CyclicPlan *p, int unit) {
    return placement_stage_of_unit(&p->cut, unit);
}
// Returns the first unit that uses a storage. The storage has the versions of that unit's stage.
static inline int cyclic_unit_of_storage(const UnitMap *map, int storage) {
    int unit = 0;
    while (map->of_unit[unit][0] != storage &&
           !(map->of_unit_count[unit] > 1 && map->of_unit[unit][1] == storage)) {
        unit++;
    }
    return unit;
}
static inline int cyclic_stage_of_storage(const CyclicPlan *p, const UnitMap *map, int storage) {
    return cyclic_stage_of_unit(p, cyclic_unit_of_storage(map, storage));
}
// Cuts the units into N stages, as even as possible by number of units; the first stages take the
// remainder.
static inline Placement cyclic_cut(int units, int N) {
    Placement cut = placement_make(N);
    for (int j = 0, unit = 0; j < N; unit += cut.stage[j++].units) {
        cut.stage[j].first_unit = unit;
        cut.stage[j].units = units / N + (j < units % N);
    }
    return cut;
}
// Cuts the units as --cyclic-cut says. Ends the program (EXIT_INPUT) if the text does not fit.
static inline void cyclic_cut_by(Placement *cut, const char *text, int units) {
    const char
        *at = text,
        *hint =
            "units of each stage, such as 5,3,3,3: as many as stages, adding up to the blocks + 2";
    int all = 0;
    for (int j = 0; j < cut->stages; j++) {
        int n = 0, used = 0;
        const bool read = sscanf(at, "%6d%n", &n, &used) == 1 && n > 0 &&
                          isdigit((unsigned char)*at) &&
                          at[used] == (j + 1 < cut->stages ? ',' : 0);
        if (!read) {
            die(EXIT_INPUT, hint, "--cyclic-cut %.80s: expected the units of %d stages", text,
                cut->stages);
        }
        cut->stage[j].first_unit = all;
        cut->stage[j].units = n;
        all += n;
        at += used + 1;
    }
    if (all != units) {
        die(EXIT_INPUT, hint, "--cyclic-cut %.80s: these are %d units, the model has %d", text, all,
            units);
    }
}
// Returns the number of units of the longest stage.
static inline int cyclic_longest(const CyclicPlan *p) {
    int64_t most = 0;
    for (int j = 0; j < p->N; j++) { most = max_i64(most, p->cut.stage[j].units); }
    return (int)most;
}
static inline void cyclic_free(CyclicPlan *p) {
    placement_free(&p->cut);
    free((void *)(uintptr_t)p->weight);
    free((void *)(uintptr_t)p->way);
    memset(p, 0, sizeof *p);
}

// -------------------------------------------------------------------------------------------------
// The way of sums (state/layout.h: SumWay). With the chain alone, the ranks in the middle would
// receive all sums and all parameters: 2 Psi (Psi: size of all parameters), where the mean is 2 (N
// - 1) / N Psi. So for 1 / N of the storages, by size, the gradients go to the first rank, and for
// another 1 / N straight to the owner. The order of addition stays the same.

// Returns the rank to which a piece's rank sends its gradient, or the sum that includes it; -1: the
// sum stays on this rank.
static inline int cyclic_sum_to(const CyclicPlan *p, int storage, int64_t piece, int stage) {
    const SumWay way = p->way ? p->way[storage] : SUM_CHAIN;
    const bool last = cyclic_turn(piece + 1, cyclic_step_pieces(p)) == 0;
    const int owner = cyclic_owner(p, stage);
    const int to = p->mode == CYCLIC_ZERO || last || way == SUM_OWNER ? owner
                   : way == SUM_FIRST                                 ? 0
                                      : cyclic_rank(p, piece + 1, stage);
    return to == cyclic_rank(p, piece, stage) ? -1 : to;
}
// Assigns the way `to` to storages, the largest first, as long as each brings their total size
// nearer to `share`.
static inline void cyclic_take(const GptModel *m, SumWay *way, SumWay to, double share) {
    for (double taken = 0;;) {
        int best = -1;
        for (int i = 0; i < m->storages; i++) {
            const double bytes = (double)gpt_storage_elements(m, i);
            const bool nearer = fabs(share - taken - bytes) < share - taken;
            if (way[i] == SUM_CHAIN && nearer &&
                (best < 0 || bytes > (double)gpt_storage_elements(m, best))) {
                best = i;
            }
        }
        if (best < 0) { return; }
        way[best] = to;
        taken += (double)gpt_storage_elements(m, best);
    }
}
static inline SumWay *cyclic_ways(const GptModel *m, int N) {
    SumWay *way = (SumWay *)checked_calloc((size_t)m->storages, sizeof(SumWay), "ways of sums");
    double all = 0;
    for (int i = 0; i < m->storages; i++) { all += (double)gpt_storage_elements(m, i); }
    if (N > 2) {
        cyclic_take(m, way, SUM_OWNER, all / N);
        cyclic_take(m, way, SUM_FIRST, all / N);
    }
    return way;
}
// Where the ranks of a stage take turns, the sum stays with the owner. That needs fewer messages
// than a chain, since the owner makes some of the gradients itself.
static inline SumWay *cyclic_ways_to_owner(const GptModel *m) {
    SumWay *way = (SumWay *)checked_calloc((size_t)m->storages, sizeof(SumWay), "ways of sums");
    for (int i = 0; i < m->storages; i++) { way[i] = SUM_OWNER; }
    return way;
}

// -------------------------------------------------------------------------------------------------
// The way of new parameters

// A message that carries a version of a stage's parameters from one rank to another at the end of a
// slot. The slot counts from the beginning of the step that makes the version (then version = 1);
// in mode zero, from the beginning of the step that uses it (then version = 0 or -1).
typedef struct {
    int stage, from, to, slot;
    bool head;         // only wte, for the head
    int phase, phases; // only for steps whose number is `phase` modulo `phases`
    int version, use;  // use: mode zero: which use of the step; else -1
} HandBack;
typedef struct {
    int count;
    HandBack *message; // [count] sorted by slot
} HandBacks;

static inline bool hand_back_of(const HandBack *h, int64_t step) {
    return cyclic_turn(step - h->phase, h->phases) == 0;
}
static inline int hand_back_compare(const void *a, const void *b) {
    const HandBack *x = (const HandBack *)a, *y = (const HandBack *)b;
    if (x->slot != y->slot) { return x->slot - y->slot; }
    if (x->stage != y->stage) { return y->stage - x->stage; }
    return x->to != y->to ? x->to - y->to : x->head - y->head;
}
// State of cyclic_route, for mode data. Message k carries stage k / N to rank k % N; the messages
// to the owner are unused.
typedef struct {
    const CyclicPlan *plan;
    int *from, *slot; // [N * N] sender and slot of each message
    double *sent;     // [ranks] elements sent, including sums
} Routing;
// Returns whether a rank can send a message: it has the version by then, because it made or used
// it, or received it two slots before.
static inline bool routing_can(const Routing *r, int rank, int message) {
    const int N = r->plan->N, stage = message / N, at = r->slot[message];
    if (rank == cyclic_owner(r->plan, stage)) { return true; }
    return rank != message % N &&
           (r->slot[stage * N + rank] + 2 <= at || cyclic_first_use(r->plan, rank, stage) <= at);
}
// Moves one message from the rank that sends most to another rank that can send it. If that rank
// would send too much, one of its messages that is at least as large moves to a third rank, and so
// on (a breadth-first search). Returns false if no move improves the balance.
static inline bool routing_relieve(Routing *r) {
    const int N = r->plan->N, owner = cyclic_owner(r->plan, 0);
    // takes: the message that each rank takes over; -1: none
    int *queue = (int *)checked_malloc(2 * (size_t)N * sizeof(int), "routes"), *takes = queue + N,
        count = 1, end = -1;
    queue[0] = 0;
    for (int q = 0; q < N; q++) {
        takes[q] = -1;
        queue[0] = r->sent[q] > r->sent[queue[0]] ? q : queue[0];
    }
    for (int at = 0; at < count && end < 0; at++) {
        const int from = queue[at];
        for (int k = 0; k < N * N && end < 0; k++) {
            const double bytes = r->plan->weight[k / N];
            if (k % N == owner || r->from[k] != from ||
                (at && bytes < r->plan->weight[takes[from] / N])) {
                continue;
            }
            for (int q = 0; q < N && end < 0; q++) {
                if (q == queue[0] || takes[q] >= 0 || !routing_can(r, q, k)) { continue; }
                takes[q] = k;
                queue[count++] = q;
                end = r->sent[q] + bytes < r->sent[queue[0]] ? q : -1;
            }
        }
    }
    for (int q = end, from; q >= 0 && q != queue[0]; q = from) {
        from = r->from[takes[q]];
        r->from[takes[q]] = q;
        r->sent[q] += r->plan->weight[takes[q] / N];
        r->sent[from] -= r->plan->weight[takes[q] / N];
    }
    free(queue);
    return end >= 0;
}
// Mode zero: the uses of a step are numbered in a rank's order. Each stage forward, then each but
// the last backward.
static inline int cyclic_use(const CyclicPlan *p, int stage, bool backward) {
    return backward ? 2 * p->N - 2 - stage : stage;
}
static inline bool cyclic_use_is_backward(const CyclicPlan *p, int use) { return use >= p->N; }
// Mode zero: a message for each use, early enough to have a slot to travel, into a slot of the
// borrowed parameters that is free by then; and one more with wte for the head.
static inline void cyclic_route_uses(const CyclicPlan *p, HandBacks *h) {
    const int N = p->N;
    for (int k = 0; k < N * 2 * N; k++) {
        const int to = k / (2 * N), use = k % (2 * N);
        // the last use is the head's
        const bool head = use == 2 * N - 1, backward = !head && cyclic_use_is_backward(p, use);
        const int at = head ? N - 1 : backward ? 2 * N - 2 - use : use, stage = head ? 0 : at;
        const int version = -!cyclic_fresh(p, to, stage),
                  there = cyclic_update_slot(p, stage) + 2 * N * (version - 1);
        const int slot =
            (backward ? cyclic_backward_slot(p, 0, to, at) : cyclic_forward_slot(p, 0, to, at)) -
            BORROWED_SLOTS;
        const HandBack message = {
            stage,   cyclic_owner(p, stage), to, (int)max_i64(max_i64(slot, there), -2), head, 0, 1,
            version, head ? N - 1 : use};
        if (message.from != to && (!head || N > 1)) { h->message[h->count++] = message; }
    }
    qsort(h->message, (size_t)h->count, sizeof(HandBack), hand_back_compare);
}
// Where the ranks of a stage take turns: cyclic_first_turn returns the slot in which a rank first
// uses the version that a step makes; cyclic_route_turns adds the owner's messages to the others.
static inline int cyclic_first_turn(const CyclicPlan *p, int64_t step, int rank, int stage) {
    int first = INT_MAX;
    for (int piece = 0; piece < cyclic_step_pieces(p); piece++) {
        const int later = cyclic_fresh(p, cyclic_micro(p, piece), stage) ? 1 : 2;
        const bool mine =
            cyclic_rank(p, (step + later) * cyclic_step_pieces(p) + piece, stage) == rank;
        if (mine) { first = (int)min_i64(first, cyclic_forward_slot(p, later, piece, stage)); }
    }
    return first;
}
static inline void cyclic_route_turns(const CyclicPlan *p, HandBacks *h) {
    for (int stage = 0; stage < p->N; stage++) {
        const int width = cyclic_width(p, stage), phases = cyclic_phases(p, stage),
                  first = cyclic_first_rank(p, stage), owner = cyclic_owner(p, stage);
        for (int k = 0; k < width * phases; k++) {
            const int to = first + k % width, phase = k / width;
            const int slot = (int)max_i64(cyclic_update_slot(p, stage),
                                          cyclic_first_turn(p, phase, to, stage) - 3);
            const HandBack message = {stage, owner, to, slot, false, phase, phases, 1, -1};
            if (to != owner) { h->message[h->count++] = message; }
        }
    }
}
// Returns all messages of parameters, sorted by slot; the caller frees .message. In mode data each
// rank receives each stage's parameters from a rank that has them, chosen so that no rank sends
// more than the others, sums included. A message has two idle slots to travel where that is
// possible. The rank that is last to use all stages (in v1: rank N - 2) has no one to send to, so
// the others send one more stage for it.
static inline HandBacks cyclic_route(const CyclicPlan *p) {
    const int N = p->N, owner = cyclic_owner(p, 0);
    // a stage has at most as many phases as ranks
    const size_t most = (size_t)(N * N) * (size_t)(cyclic_turns(p) ? N : 3);
    HandBacks h = {0, (HandBack *)checked_malloc(most * sizeof(HandBack), "routes")};
    if (p->mode == CYCLIC_MODEL && N > 1) {
        const HandBack wte = {0, owner, p->ranks - 1, cyclic_update_slot(p, 0), true, 0, 1, 1, -1};
        h.message[h.count++] = wte;
    }
    if (p->mode == CYCLIC_ZERO) { cyclic_route_uses(p, &h); }
    if (cyclic_turns(p)) {
        cyclic_route_turns(p, &h);
        qsort(h.message, (size_t)h.count, sizeof(HandBack), hand_back_compare);
    }
    if (p->mode != CYCLIC_DATA) { return h; }
    int *from = (int *)checked_malloc(2 * (size_t)(N * N) * sizeof(int), "routes");
    Routing r = {p, from, from + N * N,
                 (double *)checked_calloc((size_t)p->ranks, sizeof(double), "routes")};
    for (int k = 0; k < N * N; k++) {
        const int stage = k / N, to = k % N;
        r.from[k] = owner;
        r.slot[k] = (int)max_i64(cyclic_update_slot(p, stage), cyclic_first_use(p, to, stage) - 3);
        r.sent[to == owner ? owner : to] +=
            to == owner ? (N - 1) * p->weight[stage] : p->weight[stage];
    }
    while (routing_relieve(&r)) {}
    for (int k = 0; k < N * N; k++) {
        const HandBack message = {k / N, r.from[k], k % N, r.slot[k], false, 0, 1, 1, -1};
        if (k % N != owner) { h.message[h.count++] = message; }
    }
    qsort(h.message, (size_t)h.count, sizeof(HandBack), hand_back_compare);
    free(from);
    free(r.sent);
    return h;
}
// Returns how many versions of a stage's parameters a rank keeps. Two, if a new one arrives before
// the last use of the previous one, or before the previous one is sent on. head: versions of wte on
// the rank of the last stage, if that is not the first stage's.
static inline int cyclic_places(const CyclicPlan *p, const HandBacks *h, int rank, int stage,
                                bool head) {
    const int at = head ? p->N - 1 : stage, phases = cyclic_phases(p, at); // the stage that uses it
    int places = 0;
    // the other ranks borrow parameters
    if (p->mode == CYCLIC_ZERO) {
        return rank == cyclic_owner(p, stage) ? 1 + !cyclic_fresh(p, 0, stage) : 0;
    }
    for (int phase = 0; phase < phases; phase++) {
        int comes = cyclic_update_slot(p, stage);
        for (int k = 0; k < h->count; k++) {
            const HandBack *m = &h->message[k];
            if (m->stage == stage && m->to == rank && m->head == head && hand_back_of(m, phase)) {
                comes = m->slot;
            }
        }
        for (int piece = 0; piece < cyclic_step_pieces(p); piece++) {
            const bool delayed = !cyclic_fresh(p, cyclic_micro(p, piece), stage);
            if (cyclic_rank(p, cyclic_step_pieces(p) * (int64_t)(phase + delayed) + piece, at) !=
                rank) {
                continue;
            }
            const bool two =
                (p->pauses && delayed) || comes < cyclic_backward_slot(p, delayed, piece, at);
            places = (int)max_i64(places, 1 + two);
        }
        for (int k = 0; k < h->count; k++) { // sent on after the next one has arrived
            const HandBack *m = &h->message[k];
            if (m->stage == stage && m->from == rank && m->head == head &&
                m->slot >= comes + cyclic_period(p)) {
                places = 2;
            }
        }
    }
    return places;
}
// cyclic_live returns how many pieces' activations of a stage a rank holds at once.
// cyclic_wte_gradients returns for how many pieces it has begun the gradient of wte (the head's
// part) and not finished it (the embedding's part).
static inline int cyclic_live(const CyclicPlan *p, int stage) {
    return cyclic_by_micro(p) ? 1 : (p->N - stage) / cyclic_width(p, stage);
}
static inline int cyclic_wte_gradients(const CyclicPlan *p, int rank) {
    return cyclic_live(p, 0) > 1 && rank == 0 ? (p->N - 1) / 2 + 1 : 1;
}
// Returns whether sums stay on a rank from one micro-batch to the next.
static inline bool cyclic_stays(const CyclicPlan *p, int rank) {
    return p->mode == CYCLIC_MODEL ? rank == cyclic_owner(p, cyclic_stage_of_rank(p, rank))
                                   : p->mode != CYCLIC_DATA;
}

// -------------------------------------------------------------------------------------------------
// What a rank needs

// Returns N, as the flags and the number of ranks determine it; 0: a single rank may choose.
// Without --cyclic-stages each rank of mode model has one stage, unless the model has too few units
// for that.
static inline int cyclic_stages(const Options *o, const GptModel *m, int ranks) {
    // side of a triangle that has so many ranks: N of N (N + 1) / 2
    int side = 1;
    while (side * (side + 1) / 2 < ranks) { side++; }
    if (o->cyclic_stages || ranks == 1) { return (int)o->cyclic_stages; }
    return o->cyclic_mode == CYCLIC_MODEL && ranks > m->units && side * (side + 1) / 2 == ranks
               ? side
               : ranks;
}
// Blocks of several stages may share a storage only in mode data, where a rank has one micro-batch
// at a time. In other modes gradients of several micro-batches would be in progress at once, and
// the owner would have to be where the storage is used. Ends the program (EXIT_INPUT) otherwise.
static inline void cyclic_check_share(const CyclicPlan *p, const GptModel *m, const char *share) {
    for (int64_t layer = 0; layer < m->config.layers && p->mode != CYCLIC_DATA; layer++) {
        const int first =
            cyclic_stage_of_unit(p, gpt_unit_of_storage(m, gpt_storage_of_layer(m, layer)));
        if (first == cyclic_stage_of_unit(p, (int)layer + 1) &&
            (!m->share.cycle || layer < m->share.cycle)) {
            continue;
        }
        die(EXIT_INPUT, "choose --cyclic-mode data, or a --cyclic-cut between blocks that share",
            "--share %s: blocks of one stage may share here, those that follow each other; block "
            "%" PRId64 " does not",
            share, layer);
    }
}
// Returns the plan for these flags. Ends the program (EXIT_INPUT) if the ranks or the model do not
// fit it. samples: of a step; micro: samples of --micro-batch. cyclic_free() frees the plan.
static inline CyclicPlan cyclic_plan(const Options *o, const GptModel *m, int ranks,
                                     int64_t samples, int64_t micro) {
    CyclicPlan p;
    memset(&p, 0, sizeof p);
    p.rule = (CyclicRule)o->cyclic;
    p.mode = o->cyclic_mode ? (CyclicMode)o->cyclic_mode : ranks == 1 ? CYCLIC_SINGLE : CYCLIC_DATA;
    p.ranks = ranks;
    const int64_t natural =
        p.mode == CYCLIC_SINGLE ? max_i64(1, min_i64(ceil_div(samples, micro), m->units)) : ranks;
    const int stages = cyclic_stages(o, m, ranks);
    p.N = stages ? stages : (int)natural;
    p.slack = (int)o->cyclic_slack;
    p.pieces = (int)min_i64(max_i64(1, ceil_div(ceil_div(samples, p.N), micro)), SCHEDULE_MAX);
    p.recompute = o->recompute == RECOMPUTE_BLOCK;
    p.waits = p.rule == CYCLIC_V1 && o->grad_clip > 0;
    p.pauses = o->val_every || o->sample_every || *o->out;
    if (p.mode == CYCLIC_SINGLE && ranks > 1) {
        die(EXIT_INPUT, "start one rank, or choose --cyclic-mode data",
            "--cyclic-mode single runs on one rank, not on %d", ranks);
    }
    if (cyclic_by_micro(&p) && p.N != ranks) {
        die(EXIT_INPUT, "start as many ranks as stages, or leave --cyclic-stages out",
            "--cyclic-mode %s has a rank for each micro-batch: %d stages, %d ranks",
            p.mode == CYCLIC_ZERO ? "zero" : "data", p.N, ranks);
    }
    if (p.mode == CYCLIC_ZERO && p.pieces > 1) {
        die(EXIT_INPUT, "give a larger --micro-batch, or --cyclic-mode data",
            "--cyclic-mode zero adds no pieces up: a rank's %" PRId64
            " samples are more than --micro-batch %" PRId64,
            ceil_div(samples, p.N), micro);
    }
    if (p.mode == CYCLIC_MODEL && p.N != ranks && (int64_t)p.N * (p.N + 1) / 2 != ranks) {
        die(EXIT_INPUT, "start N ranks, or N (N + 1) / 2, with --cyclic-stages N",
            "--cyclic-mode model has a rank for each stage, or N - j for stage j: %d stages, %d "
            "ranks",
            p.N, ranks);
    }
    if (p.N > m->units) {
        die(EXIT_INPUT, "give fewer --cyclic-stages (or ranks)",
            "%d cyclic stages are more than the model's %d units", p.N, m->units);
    }
    p.cut = cyclic_cut(m->units, p.N);
    if (*o->cyclic_cut) { cyclic_cut_by(&p.cut, o->cyclic_cut, m->units); }
    cyclic_check_share(&p, m, o->share);
    double *weight = (double *)checked_calloc((size_t)p.N, sizeof(double), "cyclic stages");
    for (int i = 0; i < m->storages; i++) {
        weight[cyclic_stage_of_unit(&p, gpt_unit_of_storage(m, i))] +=
            (double)gpt_storage_elements(m, i);
    }
    p.weight = weight;
    p.way = p.mode == CYCLIC_DATA ? cyclic_ways(m, p.N)
            : cyclic_turns(&p)    ? cyclic_ways_to_owner(m)
                                  : NULL;
    return p;
}
// Returns which states this rank keeps and exchanges. Pure, apart from memory: p2p_free() frees it.
static inline P2p cyclic_p2p(const CyclicPlan *p, const GptModel *m, int rank) {
    const size_t n = (size_t)m->storages;
    HandBacks h = cyclic_route(p);
    P2p r;
    memset(&r, 0, sizeof r);
    r.owner = (int *)checked_calloc(n, sizeof(int), "p2p states");
    r.keeper = (int *)checked_calloc(n, sizeof(int), "p2p states");
    r.places = (unsigned char *)checked_calloc(n, 1, "p2p states");
    r.grad_slot = (unsigned char *)checked_calloc(n, 1, "p2p states");
    r.adds = (bool *)checked_calloc(n, sizeof(bool), "p2p states");
    r.comes = (bool *)checked_calloc(n, sizeof(bool), "p2p states");
    r.taken = (bool **)checked_calloc(n, sizeof(bool *), "p2p states");
    r.stays = cyclic_stays(p, rank);
    r.waits = p->waits;
    r.sums = r.stays && p->waits ? 2 : 1;
    r.heads = cyclic_wte_gradients(p, rank);
    r.grad_slots = p->mode == CYCLIC_DATA ? p->N : 2;
    r.way = p->way;
    r.pieces = cyclic_pieces(p);
    r.deferred = p->mode == CYCLIC_DATA;
    r.borrows = p->mode == CYCLIC_ZERO;
    r.stages = p->N;
    r.uses = 2 * p->N - 1;
    r.notice = r.borrows ? 2 : 1;
    r.stage = (int *)checked_calloc(n, sizeof(int), "p2p states");
    r.joins_pieces = p->pieces > 1 && (r.stays || !cyclic_turns(p));
    for (int i = 0; i < m->storages; i++) {
        r.taken[i] = (bool *)checked_calloc((size_t)p->ranks, sizeof(bool), "p2p states");
    }
    // The stage of a storage is that of its first unit, so the loop ends with it.
    for (int u = m->units - 1, used[2]; u >= 0; u--) {
        for (int k = gpt_unit_storages(m, u, used) - 1; k >= 0; k--) {
            const bool head =
                u == m->units - 1 && k == 1 && cyclic_rank(p, 0, p->N - 1) != cyclic_rank(p, 0, 0);
            const int i = used[k],
                      stage = head ? 0 : cyclic_stage_of_unit(p, i ? gpt_unit_of_storage(m, i) : u);
            if (r.borrows && u && !i) { continue; } // wte belongs to the first stage only
            r.stage[i] = stage;
            for (int q = 0; q < p->ranks && !r.borrows; q++) {
                r.taken[i][q] = r.taken[i][q] || cyclic_computes(p, q, head ? p->N - 1 : stage);
            }
            r.owner[i] = cyclic_owner(p, stage);
            r.keeper[i] = r.borrows ? r.owner[i] : cyclic_rank(p, 0, stage);
            r.grad_slot[i] = (unsigned char)(p->mode == CYCLIC_DATA ? stage : stage % 2);
            r.places[i] =
                (unsigned char)max_i64(r.places[i], cyclic_places(p, &h, rank, stage, head));
            r.adds[i] = r.borrows || r.taken[i][rank];
            r.comes[i] = r.stays ? (r.borrows || cyclic_width(p, stage) > 1) && r.owner[i] == rank
                                 : r.adds[i] && !cyclic_turns(p);
        }
    }
    free(h.message);
    return r;
}
static inline void p2p_free(P2p *r, int storages) {
    for (int i = 0; i < storages; i++) { free(r->taken[i]); }
    free(r->owner);
    free(r->taken);
    free(r->keeper);
    free(r->places);
    free(r->adds);
    free(r->comes);
    free(r->grad_slot);
    free(r->stage);
}
// Mode model: each stage with its ranks (passes that do not train divide their samples among them),
// and the limits of a rank of a stage.
static inline Placement cyclic_placement(const CyclicPlan *p) {
    Placement placement = placement_make(p->N);
    for (int j = 0; j < p->N; j++) {
        Stage *stage = &placement.stage[j];
        *stage = p->cut.stage[j];
        stage->replicas = cyclic_width(p, j);
        stage->ranks = (int *)checked_malloc((size_t)stage->replicas * sizeof(int), "placement");
        for (int k = 0; k < stage->replicas; k++) { stage->ranks[k] = cyclic_first_rank(p, j) + k; }
    }
    return placement;
}
static inline Limits cyclic_limits(const CyclicPlan *p, int stage) {
    const Limits limits = {cyclic_live(p, stage), stage ? cyclic_live(p, stage) : 0,
                           stage + 1 < p->N, 1, 0};
    return limits;
}
// Sets, for each unit, how many activation sets a rank needs (engine/activations.h), and whether
// the gradient of the unit's input outlasts its slot, because a stage begins there. Both arrays are
// [units].
static inline void cyclic_activations(const CyclicPlan *p, int units, int64_t *places, bool *cut) {
    for (int u = 0; u < units; u++) {
        const int stage = cyclic_stage_of_unit(p, u);
        places[u] = cyclic_live(p, stage);
        cut[u] = u == p->cut.stage[stage].first_unit;
    }
}

// -------------------------------------------------------------------------------------------------
// Building

typedef struct {
    Program *program;
    const CyclicPlan *plan;
    HandBacks routes;
    int64_t step; // the step of the window
} CyclicBuilder;

static inline Schedule *cyclic_list(CyclicBuilder *b, int rank) { return &b->program->rank[rank]; }
// cyclic_number returns the number of a piece through all steps; `step` is relative to the
// window's. cyclic_at returns the rank that computes the piece.
static inline int64_t cyclic_number(const CyclicBuilder *b, int step, int piece) {
    return (b->step + step) * cyclic_step_pieces(b->plan) + piece;
}
static inline int cyclic_at(const CyclicBuilder *b, int step, int piece, int stage) {
    return cyclic_rank(b->plan, cyclic_number(b, step, piece), stage);
}
static inline Action cyclic_action(ActionKind kind, int unit, int storage, int micro, int step) {
    Action a = action_make(kind, unit, storage, micro);
    a.step = step;
    return a;
}
// Adds both ends of a message. All messages are posted in one order, between slots. If the messages
// of two ranks crossed each other, both would wait for ever on a transport that completes each
// message before the next (comm_nccl.cuh).
static inline void cyclic_message(CyclicBuilder *b, Action a, int from, int to) {
    Action other = a;
    other.kind = (ActionKind)(a.kind + 1);
    a.peer = to;
    other.peer = from;
    schedule_add(cyclic_list(b, from), a);
    schedule_add(cyclic_list(b, to), other);
}
// Adds ACQUIRE or RELEASE of the parameters that an action uses.
static inline void cyclic_hold(CyclicBuilder *b, Schedule *list, const Action *use,
                               ActionKind kind) {
    const UnitMap *map = &b->program->map;
    for (int k = 0; k < map->of_unit_count[use->unit]; k++) {
        const int storage = map->of_unit[use->unit][k],
                  stage = cyclic_stage_of_storage(b->plan, map, storage);
        Action a = cyclic_action(kind, -1, storage, -1, (int)use->step);
        a.version = use->step - !cyclic_fresh(b->plan, cyclic_micro(b->plan, use->micro), stage);
        a.use =
            cyclic_use(b->plan, cyclic_stage_of_unit(b->plan, use->unit), use->kind != ACT_FORWARD);
        schedule_add(list, a);
    }
}
static inline Action cyclic_compute(const CyclicBuilder *b, ActionKind kind, int unit, int piece,
                                    int step) {
    const Pieces pieces = cyclic_pieces(b->plan);
    Action a = cyclic_action(kind, unit, -1, piece, step);
    a.rows = piece_rows(&pieces, b->program->samples, NULL, piece, &a.first_row);
    return a;
}
// Mode data divides a slot into parts of one unit each, so that what a unit completes is sent at
// once. cyclic_part returns the units of a stage in a part.
static inline int cyclic_parts(const CyclicPlan *p) {
    return p->mode == CYCLIC_DATA ? cyclic_longest(p) : 1;
}
static inline Stage cyclic_part(const CyclicPlan *p, int stage, int part, bool backward) {
    Stage units = p->cut.stage[stage];
    if (p->mode != CYCLIC_DATA) { return units; }
    units.first_unit += backward ? units.units - 1 - part : part;
    units.units = part < units.units;
    return units;
}
static inline void cyclic_forward(CyclicBuilder *b, int step, int piece, int stage, int part) {
    const Stage units = cyclic_part(b->plan, stage, part, false);
    Schedule *list = cyclic_list(b, cyclic_at(b, step, piece, stage));
    for (int u = units.first_unit; u < units.first_unit + units.units; u++) {
        const Action a = cyclic_compute(b, ACT_FORWARD, u, piece, step);
        cyclic_hold(b, list, &a, ACT_ACQUIRE);
        schedule_add(list, a);
        cyclic_hold(b, list, &a, ACT_RELEASE);
    }
}
// Adds REDUCE for the gradients that a unit completes. With the last piece of the step their owner
// updates, too.
static inline void cyclic_sums(CyclicBuilder *b, int step, int piece, int unit) {
    const UnitMap *map = &b->program->map;
    const int stage = cyclic_stage_of_unit(b->plan, unit), rank = cyclic_at(b, step, piece, stage);
    const bool updates = piece == b->program->micro_batches - 1 && !b->plan->waits &&
                         rank == cyclic_owner(b->plan, stage);
    for (int k = map->of_unit_count[unit] - 1; k >= 0; k--) {
        const int storage = map->of_unit[unit][k];
        // in backward order a storage's first unit is the last one to add to its gradient
        if (cyclic_unit_of_storage(map, storage) != unit) { continue; }
        schedule_add(cyclic_list(b, rank), cyclic_action(ACT_REDUCE, -1, storage, piece, step));
        if (updates) {
            schedule_add(cyclic_list(b, rank), cyclic_action(ACT_UPDATE, -1, storage, -1, step));
        }
    }
}
static inline void cyclic_backward(CyclicBuilder *b, int step, int piece, int stage, int part) {
    const Stage units = cyclic_part(b->plan, stage, part, true);
    Schedule *list = cyclic_list(b, cyclic_at(b, step, piece, stage));
    for (int u = units.first_unit + units.units - 1; u >= units.first_unit; u--) {
        const bool block = u > 0 && u < b->program->map.units - 1;
        const Action input = cyclic_compute(b, ACT_BACKWARD_INPUT, u, piece, step);
        if (u) { cyclic_hold(b, list, &input, ACT_ACQUIRE); } // the embedding has no input gradient
        if (block && b->plan->recompute) {
            schedule_add(list, cyclic_compute(b, ACT_RECOMPUTE, u, piece, step));
        }
        if (u) {
            schedule_add(list, input);
            cyclic_hold(b, list, &input, ACT_RELEASE);
        }
        schedule_add(list, cyclic_compute(b, ACT_BACKWARD_WEIGHT, u, piece, step));
        cyclic_sums(b, step, piece, u);
    }
}
// Sends sums, and gradients that join them, at the end of their part of the slot. A gradient that
// joins a sum elsewhere than on the next micro-batch's rank is added one slot later. The last one
// is added at once, since the update follows, except that mode zero gives it a slot to travel.
// later: this is the slot after that of the backward pass.
static inline void cyclic_pass_sums(CyclicBuilder *b, int step, int piece, int stage, int part,
                                    bool later) {
    const UnitMap *map = &b->program->map;
    const CyclicPlan *p = b->plan;
    const Stage units = cyclic_part(p, stage, part, true);
    const int micro = cyclic_micro(p, piece), from = cyclic_at(b, step, piece, stage);
    const bool last = piece == b->program->micro_batches - 1;
    // ranks that take turns each send the gradient of their piece
    if (piece != cyclic_last_piece(p, micro) && !cyclic_turns(p)) { return; }
    for (int u = units.first_unit + units.units - 1; u >= units.first_unit; u--) {
        for (int k = map->of_unit_count[u] - 1; k >= 0; k--) {
            const int storage = map->of_unit[u][k],
                      to = cyclic_sum_to(p, storage, cyclic_number(b, step, piece), stage);
            const SumWay way = p->way ? p->way[storage] : SUM_CHAIN;
            if (to < 0 || cyclic_unit_of_storage(map, storage) != u) { continue; }
            const Action sum = cyclic_action(ACT_SEND_SUM, -1, storage, piece, step);
            if (!later) { cyclic_message(b, sum, from, to); }
            const bool adds = p->mode == CYCLIC_ZERO ? later : later == !last;
            if (adds && (way != SUM_CHAIN || p->mode == CYCLIC_ZERO)) {
                schedule_add(cyclic_list(b, to), cyclic_action(ACT_ADD, -1, storage, piece, step));
            }
            if (adds && last && !p->waits) {
                schedule_add(cyclic_list(b, to), cyclic_action(ACT_UPDATE, -1, storage, -1, step));
            }
            if (later && way == SUM_FIRST && micro == p->N - 2) {
                cyclic_message(b, sum, to, p->N - 1);
            }
        }
    }
}
static inline bool cyclic_is_of_unit(const UnitMap *map, int storage, int unit) {
    return map->of_unit[unit][0] == storage ||
           (map->of_unit_count[unit] > 1 && map->of_unit[unit][1] == storage);
}
// Returns the part of a slot in which the parameters of a storage are sent: that of its unit's
// backward pass; the last part if updates wait for the norm.
static inline int cyclic_part_of_storage(const CyclicPlan *p, const UnitMap *map, int storage) {
    const Stage *units = &p->cut.stage[cyclic_stage_of_storage(p, map, storage)];
    if (p->mode != CYCLIC_DATA || p->waits) { return cyclic_parts(p) - 1; }
    return units->first_unit + units->units - 1 - cyclic_unit_of_storage(map, storage);
}
// Sends the parameters that leave at the end of this part of a slot, of this step and of earlier
// ones. made: in mode zero, selects the messages of versions that were made in this slot (true) or
// before (false).
static inline void cyclic_hand_back(CyclicBuilder *b, int slot, int part, bool made) {
    const UnitMap *map = &b->program->map;
    const int period = cyclic_period(b->plan);
    for (int k = 0; k < b->routes.count; k++) {
        const HandBack *h = &b->routes.message[k];
        const bool now = h->use < 0 || h->slot == cyclic_update_slot(b->plan, h->stage) +
                                                      period * (h->version - 1);
        const int behind = (h->slot - slot) / period; // in steps
        if ((h->use < 0 && h->slot < slot) || now != made || (h->slot - slot) % period ||
            !hand_back_of(h, b->step - behind)) {
            continue;
        }
        for (int storage = 0; storage < map->storages; storage++) {
            if (cyclic_stage_of_storage(b->plan, map, storage) != h->stage ||
                (h->head && storage)) {
                continue;
            }
            const bool read = h->use < 0 || !cyclic_use_is_backward(b->plan, h->use) ||
                              !cyclic_is_of_unit(map, storage, 0);
            // the embedding has no input gradient
            if (!read || cyclic_part_of_storage(b->plan, map, storage) != part) { continue; }
            Action a = cyclic_action(ACT_SEND_PARAMETERS, -1, storage, -1, -behind);
            a.version = a.step + h->version;
            a.use = h->use;
            cyclic_message(b, a, h->from, h->to);
        }
    }
}
// Sends what crosses to another rank at the end of a piece's slot: activations, their gradients,
// and the head's part of the gradient of wte.
static inline void cyclic_cross(CyclicBuilder *b, bool backward, int step, int piece, int stage) {
    const CyclicPlan *p = b->plan;
    const Stage *units = &p->cut.stage[stage];
    const int to = backward ? stage - 1 : stage + 1, from = cyclic_at(b, step, piece, stage),
              first = cyclic_at(b, step, piece, 0);
    if (to >= 0 && to < p->N && cyclic_at(b, step, piece, to) != from) {
        const int unit = backward ? units->first_unit : units->first_unit + units->units - 1;
        const Action rows =
            cyclic_compute(b, backward ? ACT_SEND_BACKWARD : ACT_SEND_FORWARD, unit, piece, step);
        if (rows.rows) { cyclic_message(b, rows, from, cyclic_at(b, step, piece, to)); }
    }
    if (backward && stage == p->N - 1 && from != first) {
        cyclic_message(b, cyclic_action(ACT_SEND_PART, -1, 0, piece, step), from, first);
    }
}
// Adds STATS on a rank, and the updates that wait for the norm where the rank knows it. Step
// statistics travel as follows. data and zero: from rank to rank as they finish the step, and from
// the last to the first, which then has the complete ones. model: from the last rank to the first
// as their stages become complete, and back, one slot for each stage, so that all ranks learn the
// norm.
static inline void cyclic_add_stats(CyclicBuilder *b, int rank, bool whole, int step) {
    Action stats = cyclic_action(ACT_STATS, -1, -1, -1, step);
    stats.version = whole;
    schedule_add(cyclic_list(b, rank), stats);
    for (int storage = 0; b->plan->waits && storage < b->program->map.storages; storage++) {
        const int stage = cyclic_stage_of_storage(b->plan, &b->program->map, storage);
        // of the ranks to which the norm returns, the one that knows it first
        const int knower = b->plan->mode == CYCLIC_ZERO ? b->plan->N - 1 : 0;
        const bool back = b->plan->mode == CYCLIC_MODEL || b->plan->mode == CYCLIC_ZERO;
        const bool mine = cyclic_owner(b->plan, stage) == rank,
                   knows = back ? whole || rank == knower : !whole;
        if (mine && knows) {
            schedule_add(cyclic_list(b, rank), cyclic_action(ACT_UPDATE, -1, storage, -1, step));
        }
    }
}
static inline void cyclic_stats(CyclicBuilder *b, int slot) {
    const CyclicPlan *p = b->plan;
    const int N = p->N, end = cyclic_complete_slot(p, 0);
    const Action message = cyclic_action(ACT_SEND_STATS, -1, -1, -1, 0);
    const int stages = p->mode == CYCLIC_MODEL ? N : 1;
    for (int j = 0; j < stages && !cyclic_by_micro(p); j++) {
        for (int r = cyclic_first_rank(p, j) + cyclic_width(p, j) - 1;
             r >= cyclic_first_rank(p, j) && slot == end - j; r--) {
            cyclic_add_stats(b, r, false, 0);
            if (r) { cyclic_message(b, message, r, r - 1); }
        }
    }
    // the way back, in this step's window and in the next
    for (int j = 0; j < stages && !cyclic_by_micro(p); j++) {
        const int behind = slot == end + j ? 0 : slot + cyclic_period(p) == end + j ? -1 : -2;
        for (int r = cyclic_first_rank(p, j);
             r < cyclic_first_rank(p, j) + cyclic_width(p, j) && behind > -2; r++) {
            Action down = message;
            down.step = behind;
            down.version = 1;
            if (r) { cyclic_add_stats(b, r, true, behind); }
            if (r + 1 < p->ranks) { cyclic_message(b, down, r, r + 1); }
        }
    }
    if (!cyclic_by_micro(p)) { return; }
    for (int r = 0; r < N; r++) {
        const int stats_slot =
            p->mode == CYCLIC_DATA
                ? cyclic_backward_slot(p, 0, cyclic_last_piece(p, r), 0)
                : cyclic_complete_slot(p, N - 1 - r) + cyclic_adds_later(p, N - 1 - r);
        if (stats_slot != slot) { continue; }
        cyclic_add_stats(b, r, false, 0);
        if (N > 1) { cyclic_message(b, message, r, (r + 1) % N); }
        if (N > 1 && r == N - 1) { cyclic_add_stats(b, 0, true, 0); }
    }
    // mode zero: the norm returns to the owners in between, in this window and in the next
    for (int r = N - 1; p->mode == CYCLIC_ZERO && p->waits && r > 0; r--) {
        const int behind = slot - (end + N - 1 - r);
        Action down = message;
        down.step = behind ? -1 : 0;
        down.version = 1;
        if (behind && behind != -2 * N) { continue; }
        if (r < N - 1) { cyclic_add_stats(b, r, true, (int)down.step); }
        if (r > 1) { cyclic_message(b, down, r, r - 1); }
    }
}
// Mode zero: first sends all gradients and parameters, then waits for and adds what was received.
static inline void cyclic_go_to_owners(CyclicBuilder *b, int slot) {
    const CyclicPlan *p = b->plan;
    const int N = p->N;
    for (int pass = 0; pass < 2; pass++) {
        for (int k = 0; k < 2 * N * N; k++) {
            const int step = k / (N * N), micro = k / N % N, stage = k % N,
                      behind = slot - cyclic_backward_slot(p, step, micro, stage);
            const bool later = micro < N - 1 || cyclic_adds_later(p, stage);
            if (pass ? behind == later : behind == 0) {
                cyclic_pass_sums(b, step, micro, stage, 0, pass);
            }
        }
        if (!pass) { cyclic_hand_back(b, slot, 0, false); }
    }
}
// Adds a part of a slot. Backward passes precede forward passes, because on one rank the next
// micro-batch writes the buffer of a stage's boundary again.
static inline void cyclic_slot(CyclicBuilder *b, int slot, int part) {
    const bool last = part == cyclic_parts(b->plan) - 1;
    // N, and the pieces of a step
    const int N = b->plan->N, all = b->program->micro_batches;
    // pieces that run in this slot or ran in the slot before, times the stages
    const int first = (int)max_i64(0, slot / 2 - N) * N, end = (slot / 2 + 1) * N;
    for (int backward = 1; backward >= 0; backward--) {
        for (int k = first; k < end; k++) {
            const int step = k / N / all, piece = k / N % all, stage = k % N;
            if (backward && cyclic_backward_slot(b->plan, step, piece, stage) == slot) {
                cyclic_backward(b, step, piece, stage, part);
            }
            if (!backward && cyclic_forward_slot(b->plan, step, piece, stage) == slot) {
                cyclic_forward(b, step, piece, stage, part);
            }
        }
    }
    if (b->plan->mode == CYCLIC_ZERO) { cyclic_go_to_owners(b, slot); }
    for (int k = first; k < end; k++) {
        const int step = k / N / all, piece = k / N % all, stage = k % N;
        const int behind = slot - cyclic_backward_slot(b->plan, step, piece, stage);
        if (b->plan->mode != CYCLIC_ZERO && (behind == 0 || behind == 1)) {
            cyclic_pass_sums(b, step, piece, stage, part, behind == 1);
        }
        for (int backward = 1; backward >= 0; backward--) {
            const int at = backward ? cyclic_backward_slot(b->plan, step, piece, stage)
                                    : cyclic_forward_slot(b->plan, step, piece, stage);
            if (last && at == slot) { cyclic_cross(b, backward, step, piece, stage); }
        }
    }
    if (last) { cyclic_stats(b, slot); } // before the parameters that wait for it
    cyclic_hand_back(b, slot, part, true);
}

// Builds the window of step `step`, for steps of `samples` samples. The caller has set the map, the
// ranks and empty lists of p; this fills the lists of all ranks and sets the limits.
static inline void schedule_cyclic(Program *p, const CyclicPlan *plan, int64_t samples,
                                   int64_t step) {
    CyclicBuilder b = {p, plan, cyclic_route(plan), step};
    const int begin = 2 * plan->N - 2;
    p->samples = samples;
    p->micro_batches = cyclic_step_pieces(plan);
    p->recompute = plan->recompute;
    for (int slot = begin; slot < begin + cyclic_period(plan); slot++) {
        for (int part = 0; part < cyclic_parts(plan); part++) { cyclic_slot(&b, slot, part); }
    }
    program_limit(p, limits_of_one());
    free(b.routes.message);
}

// Returns the window of another step, with the map of `window`. cyclic_window_free frees it, but
// not the map.
static inline Program cyclic_window(const Program *window, const CyclicPlan *plan, int64_t step) {
    Program p = *window;
    p.rank = (Schedule *)checked_calloc((size_t)p.ranks, sizeof(Schedule), "schedules");
    p.limits = NULL;
    schedule_cyclic(&p, plan, window->samples, step);
    return p;
}
static inline void cyclic_window_free(Program *p) {
    for (int r = 0; r < p->ranks; r++) { schedule_free(&p->rank[r]); }
    free(p->rank);
    free(p->limits);
    memset(p, 0, sizeof *p);
}

// Returns, as one long program, what is run in `steps` steps of which every `pause`-th drains
// (executor_lead, executor_drain). So it can be validated, and compared with the paper's tables.
// Its steps, versions, micro-batches and samples count from the first step. window: the window of
// step 0, which is used for all steps that are alike. The result shares its map; cyclic_window_free
// frees the rest.
static inline Program cyclic_unroll(const Program *window, const CyclicPlan *plan, int steps,
                                    int pause) {
    Program p = *window;
    // [step + 1] windows of steps that differ from `window`
    Program *others = (Program *)checked_calloc((size_t)steps + 4, sizeof(Program), "windows");
    for (int k = 0; k < steps + 4; k++) {
        if (!cyclic_alike(plan, k - 1, 0)) { others[k] = cyclic_window(window, plan, k - 1); }
    }
    p.micro_batches = steps * window->micro_batches;
    p.samples = steps * window->samples;
    p.rank = (Schedule *)checked_calloc((size_t)p.ranks, sizeof(Schedule), "schedules");
    p.limits = NULL;
    program_limit(&p, limits_of_one());
    for (int r = 0; r < p.ranks; r++) {
        for (int first = 0; first < steps; first += pause) {
            const int end = (int)min_i64(first + pause, steps);
            for (int64_t step = first - 1; step < end + 3; step++) {
                const Schedule *list =
                    &(others[step + 1].rank ? &others[step + 1] : window)->rank[r];
                for (int i = 0; i < list->count; i++) {
                    Action a = list->actions[i];
                    // the version of STATS is not one of parameters
                    const bool stats =
                        a.kind == ACT_STATS || a.kind == ACT_SEND_STATS || a.kind == ACT_RECV_STATS;
                    a.step += step;
                    a.version = stats ? a.version : max_i64(0, a.version + step);
                    if (a.step < first || a.step >= end) { continue; }
                    if (a.micro >= 0) { a.micro += (int)a.step * window->micro_batches; }
                    if (a.unit >= 0) { a.first_row += a.step * window->samples; }
                    schedule_add(&p.rank[r], a);
                }
            }
        }
    }
    for (int k = 0; k < steps + 4; k++) { cyclic_window_free(&others[k]); }
    free(others);
    return p;
}

#endif
