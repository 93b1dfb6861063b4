// cyclic.h: builds the schedules of Cyclic Data Parallelism (Fournier and Oyallon, arXiv
// 2403.08837): which micro-batch computes which stage when and where, with which version of the
// parameters. schedule/cyclic_routes.h says how sums and new parameters travel, and
// schedule/cyclic_windows.h makes the lists of actions. Nothing else knows about the delay; the
// store just keeps the versions it is asked for.
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
//            (state/policy.h: Pieces). Each piece has separate passes, with the versions of its
//            micro-batch. Piece k of the N A pieces of a step takes the position of micro-batch k
//            above, and a step takes 2 N A slots. The gradient of a piece is computed in full, then
//            added to those of the earlier pieces of its micro-batch: g_i = (g_i1 + g_i2) + ...
//            Action.micro counts pieces.
#ifndef CYCLIC_H
#define CYCLIC_H

#include "base/base.h"
#include "comm/group.h"
#include "comm/mpi.h"
#include "model/gpt.h"
#include "options.h"
#include "schedule/schedule.h"
#include "state/policy.h"

#include <limits.h> // INT_MAX

typedef enum { CYCLIC_OFF, CYCLIC_V1, CYCLIC_V2 } CyclicRule;
typedef enum { CYCLIC_AUTO, CYCLIC_SINGLE, CYCLIC_DATA, CYCLIC_ZERO, CYCLIC_MODEL } CyclicMode;

typedef struct CyclicPlan {
    CyclicRule rule;
    CyclicMode mode; // never CYCLIC_AUTO
    int N, slack;    // number of stages, and of micro-batches in a step; K
    int pieces;      // pieces of a micro-batch (A)
    int ranks;
    Placement cut; // [N] units of each stage
    bool recompute;
    bool untied; // wte has no use in the head
    bool waits;  // updates wait for the norm of the whole gradient
    // Some steps drain before others follow. Then all new parameters have arrived early, and the
    // delayed ones must be kept as well.
    bool pauses;
    bool drawn; // each step draws its samples (private runs)
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
    const bool reported_later = p->mode != CYCLIC_SINGLE;
    return p->waits ? cyclic_complete_slot(p, 0) + (reported_later ? stage : 0)
                    : cyclic_complete_slot(p, stage) + cyclic_adds_later(p, stage);
}
// Mode data: returns whether the statistics of a step are taken in the window after the step's,
// when its updates have long been made. Ranks would stand still at them otherwise, for no update
// depends on them. Not if steps draw their samples: these are known for two steps at a time.
static inline bool cyclic_reports_later(const CyclicPlan *p) {
    return p->mode == CYCLIC_DATA && p->N > 1 && !p->waits && !p->drawn;
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
static inline int cyclic_turn(int64_t number, int n) { return (number % n + n) % n; }
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
enum { DRAINS = 3 }; // windows after its own in which a step has actions
// Returns how many steps show all that a run can do: those until the windows repeat (at most 128,
// which is enough for 8 stages whose ranks take turns), and the 4 in which a step has actions.
static inline int cyclic_steps_to_check(const CyclicPlan *p) {
    int steps = 1;
    while (steps < 128 && !cyclic_alike(p, steps, 0)) { steps++; }
    return steps + 4;
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
static inline int cyclic_owner(const CyclicPlan *p, int stage) {
    return cyclic_by_micro(p) ? p->N - 1 - stage : cyclic_rank(p, cyclic_step_pieces(p) - 1, stage);
}
static inline int cyclic_stage_of_unit(const CyclicPlan *p, int unit) {
    return placement_stage_of_unit(&p->cut, unit);
}
// Returns the first unit that uses a storage. The storage belongs to that unit's stage.
static inline int cyclic_unit_of_storage(const UnitMap *map, int storage) {
    int unit = 0;
    while (!unit_uses(map, unit, storage)) { unit++; }
    return unit;
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
    return most;
}
static inline void cyclic_free(CyclicPlan *p) {
    placement_free(&p->cut);
    memset(p, 0, sizeof *p);
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

// Returns the rank to which a piece's rank sends its gradient: the owner, which adds them in the
// order of the micro-batches; -1: it is this rank.
static inline int cyclic_sum_to(const CyclicPlan *p, int64_t piece, int stage) {
    const int owner = cyclic_owner(p, stage);
    return owner == cyclic_rank(p, piece, stage) ? -1 : owner;
}

// -------------------------------------------------------------------------------------------------
// Plans

// Returns N, as the flags and the number of ranks determine it; 0: a single rank may choose.
// Without --cyclic-stages each rank of mode model has one stage, unless the model has too few units
// for that.
static inline int cyclic_stages(const Options *o, const GptModel *m, int ranks) {
    // side of a triangle that has so many ranks: N of N (N + 1) / 2
    int side = 1;
    while (side * (side + 1) / 2 < ranks) { side++; }
    if (o->cyclic_stages || ranks == 1) { return o->cyclic_stages; }
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
    CyclicPlan p = {};
    p.rule = (CyclicRule)o->cyclic;
    p.untied = !gpt_is_tied(m);
    p.mode = o->cyclic_mode ? (CyclicMode)o->cyclic_mode : ranks == 1 ? CYCLIC_SINGLE : CYCLIC_DATA;
    p.ranks = ranks;
    const int64_t natural =
        p.mode == CYCLIC_SINGLE ? max_i64(1, min_i64(ceil_div(samples, micro), m->units)) : ranks;
    const int stages = cyclic_stages(o, m, ranks);
    p.N = stages ? stages : natural;
    p.slack = o->cyclic_slack;
    p.pieces = min_i64(max_i64(1, ceil_div(ceil_div(samples, p.N), micro)), SCHEDULE_MAX);
    p.recompute = o->recompute == RECOMPUTE_BLOCK;
    p.waits = p.rule == CYCLIC_V1 && o->grad_clip > 0;
    p.pauses = o->val_every || o->sample_every || *o->out;
    if (p.mode == CYCLIC_SINGLE && ranks > 1) {
        die(EXIT_INPUT, "start one rank, or choose --cyclic-mode data",
            "--cyclic-mode single runs on one rank, not on %d", ranks);
    }
    if (cyclic_by_micro(&p) && p.N != ranks) {
        die(EXIT_INPUT,
            HINT_ON_RANKS(ranks, "start as many ranks as stages, or leave --cyclic-stages out"),
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
        die(EXIT_INPUT,
            HINT_ON_RANKS(ranks, "start N ranks, or N (N + 1) / 2, with --cyclic-stages N"),
            "--cyclic-mode model has a rank for each stage, or N - j for stage j: %d stages, %d "
            "ranks",
            p.N, ranks);
    }
    if (p.N > m->units) {
        die(EXIT_INPUT, "give fewer --cyclic-stages (or ranks)",
            "%d cyclic stages are more than the model's %d units", p.N, m->units);
    }
    p.cut = placement_even(m->units, p.N);
    if (*o->cyclic_cut) { cyclic_cut_by(&p.cut, o->cyclic_cut, m->units); }
    cyclic_check_share(&p, m, o->share);
    return p;
}
// Mode model: each stage with its ranks (passes that do not train divide their samples among them),
// and the limits of a rank of a stage.
static inline Placement cyclic_placement(const CyclicPlan *p) {
    Placement placement = placement_make(p->N);
    for (int j = 0; j < p->N; j++) {
        Stage *stage = &placement.stage[j];
        *stage = p->cut.stage[j];
        stage->replicas = cyclic_width(p, j);
    }
    placement_take_ranks(&placement);
    return placement;
}
static inline Limits cyclic_limits(const CyclicPlan *p, int stage) {
    const int64_t live = cyclic_live(p, stage);
    const Limits limits = {
        .in_flight = live, .inputs = stage ? live : 0, .gradients = stage + 1 < p->N, .works = 1};
    return limits;
}
// Sets, for each unit, how many activation sets a rank needs (executor/activations.h), and whether
// the gradient of the unit's input outlasts its slot, because a stage begins there. Both arrays are
// [units].
static inline void cyclic_activations(const CyclicPlan *p, int units, int64_t *places, bool *cut) {
    for (int u = 0; u < units; u++) {
        const int stage = cyclic_stage_of_unit(p, u);
        places[u] = cyclic_live(p, stage);
        cut[u] = u == p->cut.stage[stage].first_unit;
    }
}

#endif
