// costs.h: what each action of a schedule costs on a rank, by the rates of the ranks.
// schedule/simulator.h adds the costs up. Units take the time that was measured (unit_times.h);
// otherwise (in private runs, and for ranks that are not present) a unit's time follows from its
// arithmetic and the rate of matrix products.
#ifndef COSTS_H
#define COSTS_H

#include "base/base.h"
#include "comm/group.h"
#include "dp.h"
#include "executor/activations.h"
#include "executor/compute.h"
#include "executor/exchange.h"
#include "model/architecture.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "offload.h"
#include "ops/ops.h"
#include "ops/orthogonalise.h"
#include "plan/cluster.h"
#include "plan/rates.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "schedule/simulator.h"
#include "state/gather.h"
#include "state/matrices.h"
#include "state/optimizer.h"
#include "state/planned.h"
#include "state/policy.h"

// Writes the collectives of an action to m. Returns how many.
static inline int action_messages(const StatePlan *store, const Action *a,
                                  const ExecutorShape *shape, ZeroMessage m[2]) {
    if (action_is(a->kind, OF_PART)) {
        m[0] = m[1] = exchange_message(store, a, shape->T);
        const bool again = a->kind == ACT_EXCHANGE_BACK && a->part == EXPERTS_PART; // in pieces
        return 1 + (again && even_rows_take_pieces(store->model, shape, a));
    }
    if (a->kind == ACT_REDUCE) { return store_reduce_messages(store, a->storage, m); }
    if (a->kind == ACT_DIRECT || a->kind == ACT_ORTHOGONALISE) {
        const bool back = a->kind == ACT_ORTHOGONALISE;
        m[0] = store_matrix_message(store, a->storage, back);
        return back || a->use + 1 >= store->rows[a->storage].pieces; // with the last piece
    }
    m[0] = store_gather_message(store, a->storage, a->secondary);
    return a->kind == ACT_PREFETCH;
}
// Returns how many elements a rank owns, as if all slices were equal.
static inline double store_share(const StatePlan *s) {
    double elements = 0;
    for (int i = 0; i < s->model->storages; i++) {
        if (store_holds(s, i)) {
            elements += (double)gpt_storage_elements(s->model, i) / s->rows[i].owners->all.n;
        }
    }
    return elements;
}

// The bytes of messages that were counted before: the storages of a class have equal messages, and
// counting one takes time in proportion to its ranks.
enum { SENT_MESSAGES = 512 };
typedef struct { // on each kind of link: what this rank sends; what decides the time
    int64_t mine[LINK_KINDS], busiest[LINK_KINDS];
} SentBytes;
typedef struct {
    struct {
        ZeroMessage message;
        SentBytes bytes;
    } row[SENT_MESSAGES];
} SentMessages;
// Counts what decides the time of a message: what this rank sends; of a sum or a gathering among
// nodes with unequal numbers of ranks, what that rank sends which sends most to other nodes: all
// wait for it.
static inline void count_busiest(const ZeroMessage *m, SentBytes *bytes) {
    const Group *g = m->group;
    const bool uneven = m->kind != COMM_ALL_TO_ALL && g->nodes == 1 && group_spans(g);
    memcpy(bytes->busiest, bytes->mine, sizeof bytes->mine);
    for (int i = 0; uneven && i < g->n; i++) {
        int64_t sent[LINK_KINDS] = {0};
        comm_bytes_sent(m->kind, g, i, m->bounds, m->element_bytes, sent);
        if (sent[LINK_INTER] > bytes->busiest[LINK_INTER]) {
            memcpy(bytes->busiest, sent, sizeof sent);
        }
    }
}
// Returns the bytes of a message. They are counted if the last message in its row was another one.
static inline const SentBytes *message_bytes(SentMessages *sent, const ZeroMessage *m) {
    const size_t at = mix64((uintptr_t)m->bounds + m->kind) % SENT_MESSAGES;
    ZeroMessage *known = &sent->row[at].message;
    SentBytes *bytes = &sent->row[at].bytes;
    if (known->kind != m->kind || known->group != m->group || known->bounds != m->bounds ||
        known->element_bytes != m->element_bytes) {
        *known = *m;
        memset(bytes, 0, sizeof *bytes);
        comm_bytes_sent(m->kind, m->group, m->group->me, m->bounds, m->element_bytes, bytes->mine);
        count_busiest(m, bytes);
    }
    return bytes;
}

// The seconds of passes that were computed before: units of a class take equally long for equally
// many samples, unless these are clipped.
typedef struct {
    struct {
        int64_t rows;
        double seconds;
    } last[UNIT_CLASSES][ACTION_KINDS];
} KnownPasses;

// Context of action_cost, for the simulator.
typedef struct {
    const Program *program;
    const GptModel *model;
    const ExecutorShape *shape;
    const StatePlan **stores; // [ranks of the program]
    Rates rates;
    double T;
    ClipPolicy clip;
    double iterations; // of Newton-Schulz
    // rows of experts that the busiest rank of each group has beyond the mean, as a share of it
    double uneven;
    SentMessages *sent;
    KnownPasses *passes;
} Costs;
static inline double slice_elements(const Costs *c, const StatePlan *store, int storage) {
    return (double)gpt_storage_elements(c->model, storage) / store->rows[storage].owners->all.n;
}
// Returns the bytes of a state of a slice.
static inline double slice_bytes(const Costs *c, const StatePlan *store, StateKind kind,
                                 int storage) {
    return (double)store_bytes(store, kind, gpt_storage_elements(c->model, storage)) /
           store->rows[storage].owners->all.n;
}
// Returns the cost of a move between host and device. It runs in parallel with computing if these
// memories are separate.
static inline ActionCost link_cost(const Costs *c, double bytes) {
    const double seconds = bytes / c->rates.link_bytes_per_s;
    ActionCost cost = {c->rates.apart ? 0 : seconds, c->rates.apart ? seconds : 0};
    return cost;
}
// Returns of how many alike the pass of an action is one: of each part of a unit.
static inline int parts_of_pass(const Costs *c, const Action *a) {
    const bool cut =
        a->kind == ACT_FORWARD || a->kind == ACT_BACKWARD_INPUT || a->kind == ACT_RECOMPUTE;
    return cut ? unit_parts(gpt_unit_spec(c->model, gpt_unit_class(c->model, a->unit))) : 1;
}
// Returns by how much longer the pass of an action takes than with even loads of experts, and all
// rows at once. As much of the unit's arithmetic as experts do grows: the busiest rank has more
// rows, and the backward pass computes what goes in pieces again.
static inline double experts_longer(const Costs *c, const Action *a) {
    const UnitClass of = gpt_unit_class(c->model, a->unit);
    const double experts = gpt_experts_flops(c->model, of, 1, c->T),
                 again =
                     a->kind == ACT_BACKWARD_INPUT && even_rows_take_pieces(c->model, c->shape, a);
    return 1 + (experts > 0
                    ? (c->uneven + again) * experts / gpt_forward_flops(c->model, of, 1, c->T)
                    : 0);
}
// Returns the cost of the messages of an action on each kind of link.
static inline ActionCost collectives_cost(const Costs *c, const StatePlan *store, const Action *a) {
    ZeroMessage m[2];
    ActionCost cost = {0, 0};
    const double times = action_is(a->kind, OF_PART) ? 1 + c->uneven : 1;
    double lost_s = 0;
    for (int k = action_messages(store, a, c->shape, m) - 1; k >= 0; k--) {
        const Group *g = m[k].group;
        int64_t of_matrices[LINK_KINDS];
        const int64_t *sent = of_matrices;
        if (a->kind == ACT_DIRECT || a->kind == ACT_ORTHOGONALISE) {
            matrices_busiest(&store->matrices, &store->rows[a->storage], of_matrices);
        } else {
            sent = message_bytes(c->sent, &m[k])->busiest;
        }
        const bool spans = group_spans(g),
                   goes[LINK_KINDS] = {g->n > 1 && (g->nodes > 1 || !spans), spans};
        for (int l = 0; l < LINK_KINDS; l++) {
            const double seconds = times * sent[l] / c->rates.message_bytes_per_s[l] +
                                   (goes[l] ? c->rates.message_s[l] : 0);
            cost.message_s += seconds;
            lost_s += c->rates.lost[l] * seconds;
        }
    }
    cost.slows = lost_s > 0 ? lost_s / cost.message_s : 0;
    return cost;
}
// Returns the cost of a PREFETCH or REDUCE on a rank: what is brought from its host, its messages,
// and the conversion to and from quantized records.
static inline ActionCost message_cost(const Costs *c, const StatePlan *store, const Action *a) {
    const ActionCost nothing = {0, 0};
    const ActionCost messages = collectives_cost(c, store, a);
    ActionCost cost = offload_brings(store, a)
                          ? link_cost(c, slice_bytes(c, store, STATE_PARAMETERS, a->storage))
                          : nothing;
    cost.compute_s += quantization_traffic(store, a->storage, a->kind == ACT_REDUCE, a->secondary) /
                      c->rates.bytes_per_s;
    cost.message_s += messages.message_s;
    // the copy from the host slows nothing
    cost.slows = messages.slows > 0 ? messages.slows * messages.message_s / cost.message_s : 0;
    return cost;
}
// Returns the seconds of an update, or of one piece if there are several. With p2p parameters only
// the owner updates.
static inline double update_seconds(const Costs *c, const StatePlan *store, int storage) {
    const double elements = slice_elements(c, store, storage);
    return elements / (store_delays(store) ? 1 : max_i64(1, store->rows[storage].pieces)) *
           optimizer_update_bytes(store->optimizer) /
           (store->rows[storage].cpu_updates ? c->rates.host_bytes_per_s : c->rates.bytes_per_s);
}
// Returns the seconds in which a matrix is made orthogonal: as products of the model with as many
// rows as its longer side.
static inline double matrix_seconds(const Rates *rates, double iterations, const StoragePart *p) {
    const double longer = (double)max_i64(p->rows, p->cols);
    return iterations * orthogonalise_flops(p->rows, p->cols) * (1 + rates->half_tokens / longer) /
           rates->flops_per_s;
}
// Returns the seconds in which a rank of full speed makes the matrices of a storage orthogonal.
static inline double matrices_seconds(const Costs *c, const StatePlan *store, int storage) {
    const Matrices *x = &store->matrices;
    const int me = store->rows[storage].owners->all.me;
    double seconds = 0;
    for (int k = 0; k < x->count; k++) {
        const bool mine = x->part[k].is_matrix && store->rows[storage].exchange.home[k] == me;
        seconds += mine ? matrix_seconds(&c->rates, c->iterations, &x->part[k]) : 0;
    }
    return seconds;
}
// Returns the cost of moving a piece between host and disk, in parallel with all else.
static inline ActionCost store_cost(const Costs *c, const StatePlan *store, const Action *a) {
    const double bytes =
        store->rows[a->storage].disk_bytes / (double)max_i64(1, store->rows[a->storage].pieces);
    ActionCost cost = {0, bytes / c->rates.disk_bytes_per_s};
    return cost;
}
// Returns the cost of moving a piece between host and device.
static inline ActionCost move_cost(const Costs *c, const StatePlan *store, const Action *a) {
    const bool second = a->use >= store->rows[a->storage].pieces;
    const int64_t whole = gpt_storage_elements(c->model, a->storage);
    const HostTraffic all = offload_update_bytes(store, a->storage, whole, second);
    const double bytes = (double)(a->kind == ACT_FETCH ? all.to_device : all.to_host) /
                         (double)whole / (double)store->rows[a->storage].pieces; // of an element
    return link_cost(c, slice_elements(c, store, a->storage) * bytes);
}
// Bytes of memory that are read and written for each element where a sum is added to another one.
enum { ADD_TRAFFIC = 3 * sizeof(float) };
// Returns the cost of moving a sum of gradients. If it is added to another sum, the host adds.
static inline ActionCost sum_cost(const Costs *c, const StatePlan *store, const Action *a) {
    const double elements = slice_elements(c, store, a->storage);
    const bool adds = store->rows[a->storage].sum == SUM_IS_ADDED && store->sum_bytes;
    ActionCost cost = link_cost(c, slice_bytes(c, store, STATE_GRADIENT, a->storage));
    cost.compute_s += adds ? ADD_TRAFFIC * elements / c->rates.host_bytes_per_s : 0;
    return cost;
}
// Seconds of the products of a unit's forward pass.
static inline double product_seconds(const Costs *c, UnitClass class_of_unit, double tokens) {
    if (!(tokens > 0)) { return 0; }
    const double flops = gpt_forward_flops(c->model, class_of_unit, tokens, c->T),
                 of_attention = gpt_attention_flops(c->model, class_of_unit, tokens, c->T),
                 rate = c->rates.flops_per_s * tokens / (tokens + c->rates.half_tokens),
                 attention = c->rates.attention_flops_per_s;
    return (flops - of_attention) / rate + of_attention / (attention > 0 ? attention : rate);
}
// Seconds of a compute action: as this machine's units were timed, else from the rates of products
// and of memory.
static inline double compute_seconds(const Costs *c, const Action *a) {
    if (c->rates.units.known && !c->clip.on) {
        const ActionKind kind = a->kind == ACT_RECOMPUTE ? ACT_FORWARD : a->kind;
        return unit_pass_s(&c->rates.units, gpt_unit_class(c->model, a->unit), kind,
                           (double)a->rows);
    }
    double tokens = a->rows * c->T, C = gpt_width(c->model);
    bool head = a->unit == c->model->units - 1, block = a->unit > 0 && !head;
    // without rows: any rate
    double products_per_s =
        tokens > 0 ? c->rates.flops_per_s * tokens / (tokens + c->rates.half_tokens) : 1;
    const double product = block ? product_seconds(c, UNIT_BLOCK, tokens) : 0;
    const double of_head = product_seconds(c, UNIT_HEAD, tokens);
    // logits are written, read, and replaced by their gradient
    const double logits = head ? 3 * tokens * (double)c->model->config.padded_vocab *
                                     (double)ops_real_bytes() / c->rates.bytes_per_s
                               : 0;
    double pass = tokens * C * 4 / c->rates.bytes_per_s; // one pass over a (N, C) tensor
    // Where samples are clipped, the head's part of wte's gradient is made with the embedding's
    // part, or by TIED; and so is the embedding's norm, if it crosses stages. A table of the head's
    // own is made by the head's weight part.
    const double classifier = head ? of_head : 0, table = c->clip.on ? of_head : 0;
    const bool ties = clip_ties(&c->clip);
    const bool makes_table = c->clip.tied ? !a->unit && !ties : head;
    const int of = !ties || block ? a->unit : head ? 0 : -1; // whose norms
    const double norms =
        of < 0 ? 0 : clip_norm_flops(&c->clip, c->model, of, a->rows, c->T) / products_per_s;
    double seconds = 0;
    switch (a->kind) {
    case ACT_FORWARD:
    case ACT_RECOMPUTE: seconds = product + (block ? 20 : 2) * pass; break;
    case ACT_BACKWARD_INPUT:
        seconds = product + (c->clip.on ? 2 : 3) * classifier + logits +
                  (c->clip.flat || (head && ties) ? norms : 0) + (block ? 20 : 6) * pass;
        break;
    case ACT_BACKWARD_WEIGHT:
        seconds = product + (makes_table ? table : 0) +
                  (c->clip.flat || (head && ties) ? 0 : norms) + 4 * pass;
        break;
    case ACT_CLIP: seconds = block ? 0 : norms; break;
    case ACT_TIED: seconds = table; break;
    default: break;
    }
    return seconds;
}
// Returns the same, as it was computed before.
static inline double pass_seconds(const Costs *c, const Action *a) {
    const UnitClass unit = gpt_unit_class(c->model, a->unit);
    if (c->clip.on) { return compute_seconds(c, a); }
    // at first 0 seconds of 0 rows
    if (c->passes->last[unit][a->kind].rows != a->rows) {
        c->passes->last[unit][a->kind].rows = a->rows;
        c->passes->last[unit][a->kind].seconds = compute_seconds(c, a);
    }
    return c->passes->last[unit][a->kind].seconds;
}
// Returns the seconds of each kind of unit. They grow by as much with each sample.
static inline UnitTimes unit_times_of_rates(const GptModel *m, const Rates *rates, double T) {
    const ActionKind kinds[] = {ACT_FORWARD, ACT_BACKWARD_INPUT, ACT_BACKWARD_WEIGHT};
    const Costs costs = {.model = m, .rates = *rates, .T = T};
    UnitTimes times = {.known = true};
    for (int c = 0; c < UNIT_CLASSES; c++) {
        for (int k = 0; k < 3; k++) {
            Action a = action_make(kinds[k], c == UNIT_HEAD ? m->units - 1 : c, -1, 0);
            double seconds[2];
            for (int rows = 1; rows <= 2; rows++) {
                a.rows = rows;
                seconds[rows - 1] = compute_seconds(&costs, &a);
            }
            times.row_s[c][kinds[k]] = seconds[1] - seconds[0];
            times.pass_s[c][kinds[k]] = 2 * seconds[0] - seconds[1];
        }
    }
    return times;
}
// Returns the seconds in which one rank computes so many samples in all units, in one pass.
static inline double unit_times_all(const GptModel *m, const UnitTimes *times, double rows) {
    double seconds = 0;
    for (int c = 0; c < UNIT_CLASSES; c++) {
        for (int k = 0; k < 3; k++) {
            seconds +=
                (c == UNIT_BLOCK ? (double)m->config.layers : 1) * unit_pass_s(times, c, k, rows);
        }
    }
    return seconds;
}
// The cost of a message between two ranks.
static inline ActionCost p2p_cost(const Costs *c, const StatePlan *store, int rank,
                                  const Action *a) {
    ActionCost cost = {0, 0};
    const CommLink link = group_link(store->ranks, program_job_rank(c->program, rank),
                                     program_job_rank(c->program, a->peer));
    const double bytes = executor_message_bytes(c->shape, c->model, a),
                 seconds = bytes / c->rates.message_bytes_per_s[link] + c->rates.message_s[link];
    // half at each end: in an all-reduce a rank is both ends
    cost.slows = c->rates.lost[link] / 2;
    cost.message_s = action_sends(a->kind) ? seconds : 0;
    return cost;
}
// Returns how slow a rank of the program is. The only one stands for the slowest.
static inline double slowness_of_rank(const Costs *c, int rank) {
    const Cluster *nodes = &c->rates.unequal;
    return !nodes->nodes            ? 1
           : c->program->ranks == 1 ? cluster_most_slowness(nodes)
                                    : cluster_slowness(nodes, program_job_rank(c->program, rank));
}
// Returns the cost of DIRECT or ORTHOGONALISE.
static inline ActionCost matrices_cost(const Costs *c, int rank, const StatePlan *store,
                                       const Action *a) {
    ActionCost cost = collectives_cost(c, store, a);
    cost.compute_s += a->kind == ACT_ORTHOGONALISE
                          ? slowness_of_rank(c, rank) * matrices_seconds(c, store, a->storage)
                          : update_seconds(c, store, a->storage) / 2;
    return cost;
}
static inline ActionCost action_cost(const void *context, int rank, const Action *a) {
    const Costs *c = (const Costs *)context;
    const StatePlan *store = c->stores[rank];
    const double elements = a->storage >= 0 ? gpt_storage_elements(c->model, a->storage) : 0;
    ActionCost cost = {0, 0};
    if (action_is_message(a->kind)) { return p2p_cost(c, store, rank, a); }
    if (action_computes(a->kind)) {
        cost.compute_s = slowness_of_rank(c, rank) * pass_seconds(c, a) / parts_of_pass(c, a);
        if (c->uneven > 0 || gpt_takes_pieces(c->model)) { cost.compute_s *= experts_longer(c, a); }
        return cost;
    }
    switch (a->kind) {
    case ACT_PREFETCH:
    case ACT_REDUCE:
        if (store->steps_overlap) { // a local sum, no collective
            cost.compute_s = ADD_TRAFFIC * elements / c->rates.bytes_per_s;
            return cost;
        }
        return message_cost(c, store, a);
    // includes the noise
    case ACT_NORM:
        cost.compute_s = store_share(store) * (c->clip.on ? 12 : 4) / c->rates.bytes_per_s;
        break;
    case ACT_UPDATE:
        *(store_delays(store) && ops_memory_apart() ? &cost.message_s : &cost.compute_s) =
            update_seconds(c, store, a->storage);
        break;
    case ACT_EXCHANGE:
    case ACT_EXCHANGE_BACK: return collectives_cost(c, store, a);
    case ACT_DIRECT:
    case ACT_ORTHOGONALISE: return matrices_cost(c, rank, store, a);
    case ACT_FETCH:
    case ACT_EVICT: return move_cost(c, store, a);
    case ACT_FETCH_STASH:
    case ACT_EVICT_STASH: return link_cost(c, executor_stash_bytes(c->shape, c->model));
    case ACT_FETCH_SUM:
    case ACT_EVICT_SUM: return sum_cost(c, store, a);
    case ACT_READ:
    case ACT_WRITE: return store_cost(c, store, a);
    default: break;
    }
    return cost;
}

#endif
