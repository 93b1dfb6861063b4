// exchange.h: the messages inside a block (architecture.h: EXCHANGE), and rows that go to experts
// in pieces.
//
// Rows      of a rank's tokens are sorted by expert, so those for each rank follow each other. Rows
//           that come are sorted by the rank that sends them, and then by expert. What one rank
//           sends to one expert is a cell.
// Pieces    More rows may come than memory is planned for (--moe-buffer). Then the experts work on
//           one piece after another, which is as many whole cells as there is memory for, in their
//           order. A cell fits: it has no more rows than a micro-batch has tokens. Nothing of a
//           piece is kept. The backward pass lets its rows come again, and makes its part of the
//           gradients of weights before the next piece comes. Products, and the order in which they
//           are added, are those of all rows at once, and so are the results, bit by bit.
// Number    Each rank knows the loads of all that exchange rows, so all know into how many pieces
//           the rows of each are cut. All exchange as many pieces as the longest needs.
// Actions   An EXCHANGE of pieces does nothing: the passes beside it send them (compute.h:
//           run_pieces). Nothing is between the passes of a block's parts, so the order of messages
//           stays the same on all ranks.
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "executor/activations.h"
#include "executor/expert_loads.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "ops/ops.h"
#include "schedule/actions.h"
#include "state/gather.h"
#include "state/layout.h"
#include "state/planned.h"

// Returns the message before a part of a unit: what the ranks with its storage exchange, or, of
// rows of experts, what the ranks that have these do if all experts have equally many.
static inline ZeroMessage exchange_message(const StatePlan *s, const Action *a, int64_t T) {
    const UnitSpec *spec = gpt_unit_spec(s->model, UNIT_BLOCK);
    const OpNode *n = unit_message(spec, a->part);
    const bool routed = n->stats[0];
    const ProcessGroup *ranks = routed ? &s->expert_ranks : s->rows[a->storage].owners;
    const int64_t width = routed ? gpt_choices(&s->model->config) * gpt_width(s->model)
                                 : value_width(s->model, &spec->values[n->in[0]]);
    const ZeroMessage m = {COMM_ALL_TO_ALL, &ranks->all, ranks->each,
                           a->rows * T * width * dtype_size(s->dtype) / ranks->all.n};
    return m;
}
// Do the rows of an action go to experts in pieces even if all experts have equally many? shape: of
// the executor.
static inline bool even_rows_take_pieces(const GptModel *m, const ExecutorShape *shape,
                                         const Action *a) {
    return gpt_takes_pieces(m) &&
           a->rows * gpt_choices(&m->config) > shape->rows * m->quantity[OF_ARRIVALS];
}

// -------------------------------------------------------------------------------------------------
// Pieces

// Numbers the pieces in which rows come to a rank, of at most `most` rows each, from the loads of
// all ranks (ranks, experts). piece (ranks, experts / ranks): of each cell. Returns how many there
// are.
static inline int number_pieces(int32_t *piece, const int32_t *loads, int64_t experts,
                                int64_t ranks, int rank, int64_t most) {
    const int64_t each = experts / ranks;
    int64_t rows = 0;
    int number = 0;
    for (int64_t i = 0; i < experts; i++) {
        const int64_t cell = loads[i / each * experts + rank * each + i % each];
        if (rows + cell > most) {
            number++;
            rows = 0;
        }
        rows += cell;
        piece[i] = number;
    }
    return number + 1;
}
// The same for all ranks, from which follows when this rank's rows leave.
static inline void find_pieces(RowPieces *p, const int32_t *loads, int64_t experts, const Group *g,
                               int64_t most) {
    const int64_t each = experts / g->n;
    int32_t *piece = new_array(int32_t, experts, "pieces");
    p->count = 1;
    for (int r = 0; r < g->n; r++) {
        const int count = number_pieces(piece, loads, experts, g->n, r, most);
        p->count = (int)max_i64(p->count, count);
        memcpy(p->leave + r * each, piece + g->me * each, (size_t)each * sizeof *piece);
        if (r == g->me) { memcpy(p->arrive, piece, (size_t)experts * sizeof *piece); }
    }
    free(piece);
}
// Returns how many of a rank's rows go to each expert (experts), and how many come from each rank
// for each of its own (ranks, experts / ranks). In memory of the host.
static inline int32_t *routed_loads(const UnitCall *c) {
    return (int32_t *)c->buffers.value[unit_message(c->unit, EXPERTS_PART)->stats[0]];
}
static inline int32_t *routed_arrivals(const UnitCall *c) {
    return (int32_t *)c->buffers.value[unit_message(c->unit, EXPERTS_PART)->stats[1]];
}
// Finds out how many rows come from each rank, and in which pieces (`pieces`, unless it is NULL).
// All ranks that exchange rows call it when the router has run.
static inline void exchange_loads(Executor *e, const UnitCall *c, RowPieces *pieces) {
    const Group *g = &e->store->plan.expert_ranks.all;
    const int64_t experts = e->model->config.experts, each = experts / g->n,
                  most = e->shape.rows * e->shape.T * e->model->quantity[OF_ARRIVALS];
    int32_t *all = new_array(int32_t, experts * g->n, "loads");
    ops_wait(e->stream);
    comm_all_gather_in(e->comm, g, routed_loads(c), all, (size_t)experts * sizeof *all);
    for (int r = 0; r < g->n; r++) {
        memcpy(routed_arrivals(c) + r * each, all + r * experts + g->me * each,
               (size_t)each * sizeof *all);
    }
    if (pieces) { find_pieces(pieces, all, experts, g, most); }
    free(all);
}

// Where the rows of a piece are: those of this rank that go to each rank, and those that come from
// each, as ranges (ranks, 2). counts (ranks, experts / ranks): rows of each cell in the piece.
typedef struct {
    int64_t *own, *come;
    int32_t *counts;
} PieceRows;
// pieces: NULL: all rows are in piece 0. c: the call with the counts of all rows.
static inline void piece_find_rows(PieceRows *rows, const UnitCall *c, const RowPieces *pieces,
                                   int piece) {
    const int32_t *loads = routed_loads(c), *arrivals = routed_arrivals(c);
    const int64_t each = c->model->quantity[OF_OWN_EXPERTS];
    int64_t row = 0, place = 0;
    for (int64_t r = 0; r < gpt_expert_ranks(&c->model->config); r++) {
        int64_t *own = rows->own + 2 * r, *come = rows->come + 2 * r;
        own[0] = own[1] = row;
        come[0] = place;
        for (int64_t i = r * each; i < (r + 1) * each; i++) {
            const int leaves = pieces ? pieces->leave[i] : 0,
                      arrives = pieces ? pieces->arrive[i] : 0;
            own[0] += leaves < piece ? loads[i] : 0;
            own[1] += leaves <= piece ? loads[i] : 0;
            row += loads[i];
            rows->counts[i] = arrives == piece ? arrivals[i] : 0;
            place += rows->counts[i];
        }
        come[1] = place;
    }
}
// Sends the rows of a piece by the message before a part of a unit; back: their gradients, the
// other way.
static inline void exchange_rows(Executor *e, const UnitCall *c, int part, bool back,
                                 const PieceRows *rows) {
    const OpNode *n = unit_message(c->unit, part);
    const bool to_experts = (part == EXPERTS_PART) != back;
    const void *from = back ? gradient_buffer(c, n->out[0]) : c->buffers.value[n->in[0]];
    void *to = back ? gradient_buffer(c, n->in[0]) : c->buffers.value[n->out[0]];
    const CommLabel label = {"rows of experts", e->action->unit, e->step};
    CommRequest r = comm_all_to_all_ranges_begin(
        e->comm, label, &e->store->plan.expert_ranks.all, from, to_experts ? rows->own : rows->come,
        to, to_experts ? rows->come : rows->own, (size_t)gpt_width(e->model) * ops_real_bytes());
    comm_wait(e->comm, &r);
}
static inline PieceRows piece_rows_make(const GptModel *m) {
    const int64_t ranks = gpt_expert_ranks(&m->config);
    PieceRows rows = {.own = new_array(int64_t, 4 * ranks, "rows of experts"),
                      .counts = new_array(int32_t, m->config.experts, "rows of experts")};
    rows.come = rows.own + 2 * ranks;
    return rows;
}
static inline void piece_rows_free(PieceRows *rows) { free_all(rows->own, rows->counts); }
// Sends all rows at once by the message before a part of a unit; back: as above.
static inline void exchange_all_rows(Executor *e, const UnitCall *c, int part, bool back) {
    PieceRows rows = piece_rows_make(c->model);
    piece_find_rows(&rows, c, NULL, 0);
    exchange_rows(e, c, part, back, &rows);
    piece_rows_free(&rows);
}
// Runs the pass of a block's experts, with the messages before and after it, piece by piece. back:
// the backward pass, with the gradients of weights.
static inline void exchange_pieces(Executor *e, const UnitCall *all, const RowPieces *pieces,
                                   bool back) {
    UnitCall c = *all;
    UnitStates states = *all->states;
    PieceRows rows = piece_rows_make(c.model);
    c.states = &states;
    c.part = EXPERTS_PART;
    c.weights = 1u << EXPERTS_PART;
    c.buffers.value[unit_message(c.unit, EXPERTS_PART)->stats[1]] = rows.counts;
    for (int k = 0; k < pieces->count; k++) {
        piece_find_rows(&rows, all, pieces, k);
        exchange_rows(e, &c, EXPERTS_PART, false, &rows);
        unit_pass(&c, PART_FORWARD);
        if (back) {
            exchange_rows(e, &c, EXPERTS_PART + 1, true, &rows);
            unit_pass(&c, PART_BACKWARD_INPUT);
            unit_pass(&c, PART_BACKWARD_WEIGHT);
            states.accumulate[STORAGE_EXPERTS] = true;
        }
        exchange_rows(e, &c, back ? EXPERTS_PART : EXPERTS_PART + 1, back, &rows);
    }
    piece_rows_free(&rows);
}

#endif
