// layout.h: where the states of storages lie: on which ranks, in which slices, and where on the
// shelves of a rank. Pure: no messages and, but for tables, no memory; predictions ask it as well
// as the store (zero.h).
//
// Parties    The ranks that hold a storage are those of all stages whose units use it, in rank
//            order. Nobody else has anything of it. Storages with equal lists of ranks share one
//            Party, whose members divide each of them into slices.
// Tied       A storage that several stages use (wte, of the embedding and of the head) travels once
//            a step at every ZeRO stage: its users are at different micro-batches, and would wait
//            for each other. That takes no more memory, since such a storage has its own room
//            anyway. So does one that blocks use which do not follow each other (--share AxB): it
//            would travel for each of them.
// Shelves    a shelf for each kind of state, one allocation each, storages one after another. A
//            shelf that holds slices and lends whole arrays has ROOMS for these: blocks share a
//            few, in turns; the few other storages have their own, in which the slice has its place
//            where nothing else must be kept beside it.
// Slices     are cut at multiples of NORM_CHUNK elements (and of the quantization block), for any
//            number of ranks. All are equally long but the last ones, which end where the storage
//            does, and may be empty.
// Room       Arrays that collectives are over have room behind the storage for what the last slices
//            lack (layout_padded): so NCCL gathers or reduces one in one call, in place. It holds
//            zeros; nothing else reads or writes it. In the ledger it counts as buffers.
#ifndef LAYOUT_H
#define LAYOUT_H

#include "gpt.h"         // storages
#include "store/group.h" // ranks, stages
#include "options.h"     // --zero
#include "schedule.h"    // where sums are

enum {
    NORM_CHUNK = 256,
    SHARED_SLOTS = 2,   // that blocks share: one is in use while the other's block travels
    BORROWED_SLOTS = 2, // of a relay whose parameters come for each use: the same of stages
};

// How the sum of a step's gradients, ((g_1 + g_2) + g_3) + ..., comes to be at the last
// micro-batch's rank, which owns it: each rank adds its own and sends the sum on; or all but the
// last send theirs to the first, which sends the sum to the last; or all send theirs to the last.
typedef enum { SUM_CHAIN, SUM_FIRST, SUM_OWNER } SumWay;
// The pieces that a step's micro-batches are computed in, one after another: each micro-batch's
// first piece, then the second of each, and so on, where a rank has one of them (in_turns); else
// all pieces of a micro-batch, then the next one's. Numbers of pieces count in that order.
typedef struct {
    int micros, pieces; // of a step; of each of these
    bool in_turns;
} Pieces;
static inline int pieces_of_step(const Pieces *p) { return p->micros * p->pieces; }
static inline int piece_number(const Pieces *p, int micro, int within) {
    return p->in_turns ? within * p->micros + micro : micro * p->pieces + within;
}
static inline int piece_micro(const Pieces *p, int piece) {
    return p->in_turns ? piece % p->micros : piece / p->pieces;
}
static inline int piece_within(const Pieces *p, int piece) {
    return p->in_turns ? piece / p->micros : piece % p->pieces;
}
// of its micro-batch
static inline bool piece_is_last(const Pieces *p, int piece) {
    return piece_within(p, piece) == p->pieces - 1;
}
// Its samples, of so many of the step. begins: [micros + 1] where each micro-batch's begin; NULL:
// they are nearly equal.
static inline int64_t piece_rows(const Pieces *p, int64_t samples, const int64_t *begins, int piece,
                                 int64_t *first) {
    const int micro = piece_micro(p, piece), within = piece_within(p, piece);
    const int64_t begin = begins ? begins[micro] : part_begin(samples, p->micros, micro);
    const int64_t rows =
        (begins ? begins[micro + 1] : part_begin(samples, p->micros, micro + 1)) - begin;
    *first = begin + part_begin(rows, p->pieces, within);
    return begin + part_begin(rows, p->pieces, within + 1) - *first;
}
// States that go from rank to rank by messages, instead of collectives of all who hold them
// (cyclic.h). A storage has one owner, which updates it; others compute with copies of its
// parameters, and pass its gradient's sum on.
typedef struct {
    int *owner;   // [storages] the rank
    bool **taken; // [storages][ranks] who computes with its parameters
    // [storages] the rank that saves the version before the newest, where one is kept
    int *keeper;
    // [storages] versions of the parameters that this rank keeps: 0, 1 or 2. Version v is in place
    // v modulo places
    unsigned char *places;
    bool *adds;  // [storages] it contributes to the gradient
    bool *comes; // [storages] sums of it, or parts of them, come here
    // sums stay here from one micro-batch to the next, whose gradients are made in rooms; else they
    // come, and go on
    bool stays;
    bool waits; // updates wait for the norm of the whole gradient
    // places of sums that stay: 2 where a step's is awaited while the next one's begins
    int sums;
    // pieces whose gradient of wte is in the making: from the head's part to the embedding's
    int heads;
    const SumWay *way; // [storages] NULL: SUM_CHAIN
    Pieces pieces;     // of a step
    // those of a micro-batch are added up here; else there is one, or each is sent
    bool joins_pieces;
    int grad_slots;           // rooms for sums that come: those of a storage come into room ...
    unsigned char *grad_slot; // ... [storages]
    // only owners keep parameters: others get those of a stage for each use, and its gradients go
    // to the owner as they are
    bool borrows;
    int stages, uses; // then: of a step, for which parameters come
    // [storages] whose they are; wte is the first's, and used by the last one as well
    int *stage;
    // what waits for a message may be put aside (p2p.h): each gradient that is passed on has a
    // place of its own
    bool deferred;
    // steps that begin between the one that asks to stop and the last one, at most
    int notice;
} P2p;
// Which of the rooms has the parameters of a use, which count through the steps.
static inline int p2p_slot(const P2p *r, int use, int64_t step) {
    return (int)((step * r->uses + use) % BORROWED_SLOTS);
}

// Which states lie in the host's memory (offload.h chooses them). What lies there are slices, at
// every stage of ZeRO: what a rank updates. Those of the optimizer come to the device for the
// update, piece by piece; or it is made on the host, from gradients that come there. Of a gradient
// on the host the device has only a room for what is being made. Parameters come for each use, as
// at stage 3, from all who hold them, into rooms that blocks share; those in fp32 are their own
// masters, and one state with these.
typedef enum {
    STATE_MASTER,
    STATE_M,
    STATE_V,
    STATE_PREVIOUS,
    STATE_RETIRED, // in files of older versions; passed over. Numbers are those of the files
    STATE_GRADIENT,
    STATE_KINDS, // of a checkpoint
    STATE_PARAMETERS = STATE_KINDS,
    HOST_KINDS, // of shelves
    // of blocks that use the storage, between their forward and backward passes (executor)
    STATE_ACTIVATIONS = HOST_KINDS
} StateKind;
enum { // bits: of the optimizer; all that may lie there
    OPTIMIZER_STATES = 1 << STATE_MASTER | 1 << STATE_M | 1 << STATE_V,
    OFFLOAD_ANY = OPTIMIZER_STATES | 1 << STATE_GRADIENT | 1 << STATE_PARAMETERS
};
typedef struct {
    unsigned char *host; // [storages] bits of kinds
    // the host updates what lies there: all kinds of the optimizer's of a storage, or none
    bool cpu_update;
    // [storages] bits of the optimizer's among them that lie on a disk (store/disk.h) and come to
    // the host for their update; NULL: none
    unsigned char *disk;
    const char *folder; // where
    bool gradients;     // they may lie there
    bool delays;        // updates are made one step late: then all do, and all masters
    int storages;
} Offload;
#ifndef OFFLOAD_PIECE // tests make it small
#define OFFLOAD_PIECE (1 << 20)
#endif
static inline bool offload_has(const Offload *o, int storage, StateKind kind) {
    return o && (o->host[storage] >> kind & 1);
}
static inline bool offload_has_any(const Offload *o, StateKind kind) {
    bool any = false;
    for (int i = 0; o && i < o->storages; i++) { any |= offload_has(o, i, kind); }
    return any;
}
static inline bool offload_has_states(const Offload *o, int storage) {
    return o && (o->host[storage] & ((1 << HOST_KINDS) - 1));
}
static inline int offload_states(const Offload *o, int storage) {
    return __builtin_popcount(o->host[storage] & OPTIMIZER_STATES);
}

static inline bool offload_on_disk(const Offload *o, int storage, StateKind kind) {
    return o && o->disk && (o->disk[storage] >> kind & 1);
}
// kinds of it on disk
static inline int offload_stored(const Offload *o, int storage) {
    return o && o->disk ? __builtin_popcount(o->disk[storage]) : 0;
}

// What --zero and its companions ask for.
typedef struct {
    int stage; // 0 .. 3
    // hpZ: ranks that together keep a copy of the parameters; 1: off
    int partition;
    bool quantized_weights, quantized_gradients, feedback; // qwZ, qgZ; errors of qgZ are fed back
    QuantFormat weights, gradients;
    bool accumulates;       // a step has several micro-steps
    bool keeps_gathered;    // wte stays acquired from the head to the embedding (dp.h)
    const P2p *p2p;         // NULL: states travel by collectives
    const Offload *offload; // NULL: all states are on the device
} ZeroPolicy;

static inline ZeroPolicy zero_policy(const Options *o, bool accumulates, bool keeps_gathered) {
    ZeroPolicy z;
    memset(&z, 0, sizeof z);
    z.stage = (int)o->zero;
    z.partition = (int)o->zero_hpz_partition_size;
    z.accumulates = accumulates;
    z.keeps_gathered = keeps_gathered;
    z.quantized_weights = o->zero_quantized_weights;
    z.quantized_gradients = o->zero_quantized_gradients;
    z.feedback = o->zero_error_feedback;
    z.weights.bits = 8;
    z.gradients.bits = o->zero_gradient_bits == GRADIENT_BITS_8 ? 8 : 4;
    z.weights.block = z.gradients.block = o->zero_quant_block;
    return z;
}

// -------------------------------------------------------------------------------------------------
// Who holds which storage
typedef struct {
    int count;   // different lists of ranks
    int *size;   // [count]
    int **ranks; // [count][size] ascending
    int *blocks; // [count] blocks of theirs that may share rooms
    int *of;     // [storages] the list of its ranks
    bool *tied;  // [storages] several stages use it, or blocks that do not follow each other
    // [storages] it is a block that comes and goes in turns with others: none that is tied
    bool *turns;
} Owners;

// One more than the largest rank of a placement. Its stages have each unit once, in order, and no
// rank twice.
static inline int placement_ranks(const GptModel *m, const Placement *p) {
    int most = 0, units = 0;
    for (int s = 0; s < p->stages; s++) {
        assert(p->stage[s].first_unit == units && p->stage[s].units > 0 &&
               p->stage[s].replicas > 0);
        units += p->stage[s].units;
        for (int i = 0; i < p->stage[s].replicas; i++) {
            most = (int)max_i64(most, p->stage[s].ranks[i] + 1);
        }
    }
    assert(units == m->units);
    (void)m;
    return most;
}
// Which stages use a storage: [storages][stages].
static inline bool *placement_uses(const GptModel *m, const Placement *p) {
    bool *uses = (bool *)checked_calloc((size_t)m->storages, (size_t)p->stages, "holders");
    for (int s = 0; s < p->stages; s++) {
        for (int u = p->stage[s].first_unit; u < p->stage[s].first_unit + p->stage[s].units; u++) {
            int used[2];
            for (int k = gpt_unit_storages(m, u, used) - 1; k >= 0; k--) {
                uses[(size_t)used[k] * (size_t)p->stages + (size_t)s] = true;
            }
        }
    }
    return uses;
}
// Marks the ranks of these stages; returns how many stages.
static inline int placement_mark_ranks(const Placement *p, const bool *used, bool *marked,
                                       int ranks) {
    int stages = 0;
    memset(marked, 0, (size_t)ranks * sizeof(bool));
    for (int s = 0; s < p->stages; s++) {
        stages += used[s];
        for (int i = 0; used[s] && i < p->stage[s].replicas; i++) {
            marked[p->stage[s].ranks[i]] = true;
        }
    }
    return stages;
}
// The list of these marked ranks: one that is there already, or a new one.
static inline int holders_list(Owners *h, const bool *marked, int ranks) {
    int *list = (int *)checked_malloc((size_t)ranks * sizeof(int), "ranks"), n = 0;
    for (int r = 0; r < ranks; r++) {
        if (marked[r]) { list[n++] = r; }
    }
    for (int i = 0; i < h->count; i++) {
        if (h->size[i] != n || memcmp(h->ranks[i], list, (size_t)n * sizeof(int))) { continue; }
        free(list);
        return i;
    }
    h->size[h->count] = n;
    h->ranks[h->count] = list;
    return h->count++;
}
static inline Owners owners_make(const GptModel *m, const Placement *p) {
    const size_t n = (size_t)m->storages, ranks = (size_t)placement_ranks(m, p);
    Owners h = {0, NULL, NULL, NULL, NULL, NULL, NULL};
    h.size = (int *)checked_calloc(n, sizeof(int), "holders");
    h.ranks = (int **)checked_calloc(n, sizeof(int *), "holders");
    h.blocks = (int *)checked_calloc(n, sizeof(int), "holders");
    h.of = (int *)checked_calloc(n, sizeof(int), "holders");
    h.tied = (bool *)checked_calloc(n, sizeof(bool), "holders");
    h.turns = (bool *)checked_calloc(n, sizeof(bool), "holders");
    bool *marked = (bool *)checked_calloc(ranks, sizeof(bool), "holders"),
         *uses = placement_uses(m, p);
    const bool *used = uses;
    for (int i = 0, stages = 0; i < m->storages; i++, used += p->stages) {
        // as of the one before
        const bool same = i && !memcmp(used, used - p->stages, (size_t)p->stages);
        if (!same) { stages = placement_mark_ranks(p, used, marked, (int)ranks); }
        h.of[i] = same ? h.of[i - 1] : holders_list(&h, marked, (int)ranks);
        h.tied[i] = stages > 1 || (m->share.cycle && gpt_storage_class(m, i) == STORAGE_BLOCK);
        h.turns[i] = gpt_storage_class(m, i) == STORAGE_BLOCK && !h.tied[i];
        h.blocks[h.of[i]] += h.turns[i];
    }
    free(marked);
    free(uses);
    return h;
}
// One rank holds a storage: its owner.
static inline Owners owners_of_p2p(const GptModel *m, const int *owner) {
    const size_t n = (size_t)m->storages;
    Owners h = {0, NULL, NULL, NULL, NULL, NULL, NULL};
    h.size = (int *)checked_calloc(n, sizeof(int), "holders");
    h.ranks = (int **)checked_calloc(n, sizeof(int *), "holders");
    h.blocks = (int *)checked_calloc(n, sizeof(int), "holders");
    h.of = (int *)checked_calloc(n, sizeof(int), "holders");
    h.tied = (bool *)checked_calloc(n, sizeof(bool), "holders");
    h.turns = (bool *)checked_calloc(n, sizeof(bool), "holders");
    for (int i = 0; i < m->storages; i++) {
        while (h.of[i] < h.count && h.ranks[h.of[i]][0] != owner[i]) { h.of[i]++; }
        if (h.of[i] == h.count) {
            h.ranks[h.count] = (int *)checked_malloc(sizeof(int), "holders");
            h.ranks[h.count][0] = owner[i];
            h.size[h.count++] = 1;
        }
        h.turns[i] = gpt_storage_class(m, i) == STORAGE_BLOCK && !h.tied[i];
        h.blocks[h.of[i]] += h.turns[i];
    }
    return h;
}
static inline void owners_free(Owners *h) {
    for (int i = 0; i < h->count; i++) { free(h->ranks[i]); }
    free(h->size);
    free(h->ranks);
    free(h->blocks);
    free(h->of);
    free(h->tied);
    free(h->turns);
    memset(h, 0, sizeof *h);
}
// how many ranks hold it
static inline int holders_of(const Owners *h, int storage) { return h->size[h->of[storage]]; }

// Do whole parameters, or whole gradients, of a storage come and go with each use? One rank has no
// gradients to divide.
static inline bool zero_param_far(const ZeroPolicy *z, int storage) {
    return offload_has(z->offload, storage, STATE_PARAMETERS);
}
static inline bool zero_gathers(const ZeroPolicy *z, const Owners *h, int storage) {
    return z->p2p ? z->p2p->borrows
                  : (z->stage >= 3 && !h->tied[storage]) || zero_param_far(z, storage);
}
// where sums leave the device, whole ones come and go
static inline int zero_gradient_stage(const ZeroPolicy *z) {
    return offload_has_any(z->offload, STATE_GRADIENT) ? (int)max_i64(z->stage, 2) : z->stage;
}
static inline SumPlace zero_sum_place(const Offload *o, const Owners *h, int storage) {
    const bool alone = holders_of(h, storage) == 1 && h->turns[storage];
    return !offload_has(o, storage, STATE_GRADIENT) ? SUM_STAYS
           : alone                                  ? SUM_COMES_BACK
                                                    : SUM_IS_ADDED;
}
// its gradient, from stage 2 on
static inline bool zero_divides(const ZeroPolicy *z, const Owners *h, int storage) {
    return !h->tied[storage] &&
           (holders_of(h, storage) > 1 || zero_sum_place(z->offload, h, storage) == SUM_COMES_BACK);
}
static inline bool zero_reduces_often(const ZeroPolicy *z, const Owners *h, int storage) {
    return zero_divides(z, h, storage) && zero_gradient_stage(z) >= 2;
}
// Do the slices of a storage's parameters, of its gradient lie beside its room?
static inline bool zero_param_apart(const ZeroPolicy *z) { return z->quantized_weights; }
static inline bool zero_grad_apart(const ZeroPolicy *z, const Owners *h, int storage) {
    return z->accumulates && zero_reduces_often(z, h, storage);
}

// Which of the rooms that blocks share a storage comes into; -1: its own, also where sharing would
// take no less memory. far: its slice is on the host.
static inline int shared_slot(const Owners *h, int storage, bool apart, bool far) {
    const int n = holders_of(h, storage), blocks = h->blocks[h->of[storage]];
    const int64_t spared = apart ? blocks : (int64_t)blocks * (n - 1) / n;
    bool shares = h->turns[storage] && (far || spared >= SHARED_SLOTS);
    return shares ? storage % SHARED_SLOTS : -1;
}
static inline int zero_grad_slot(const ZeroPolicy *z, const Owners *h, int storage) {
    return zero_reduces_often(z, h, storage)
               ? shared_slot(h, storage, z->accumulates,
                             offload_has(z->offload, storage, STATE_GRADIENT))
               : -1;
}
static inline int zero_param_slot(const GptModel *m, const ZeroPolicy *z, const Owners *h,
                                  int storage) {
    // the two of a unit lie in both
    if (z->p2p && z->p2p->borrows) { return storage == m->storages - 1 ? 1 : storage % 2; }
    return zero_gathers(z, h, storage)
               ? shared_slot(h, storage, zero_param_apart(z), zero_param_far(z, storage))
               : -1;
}

// -------------------------------------------------------------------------------------------------
// Slices

// Of what slices are whole multiples.
static inline int64_t zero_grain(const ZeroPolicy *z) {
    return max_i64(NORM_CHUNK, max_i64(z->quantized_weights ? z->weights.block : 1,
                                       z->quantized_gradients ? z->gradients.block : 1));
}
// The longest slice of a storage over n ranks, which is the first.
static inline int64_t store_slice(int64_t elements, int n, int64_t grain) {
    return min_i64(elements, ceil_div(elements, n * grain) * grain);
}
// The slices of a storage over n ranks, cut at multiples of `grain`; bounds has n + 1 elements.
static inline void store_bounds(int64_t elements, int n, int64_t grain, int64_t *bounds) {
    const int64_t slice = store_slice(elements, n, grain);
    for (int r = 0; r <= n; r++) { bounds[r] = min_i64(r * slice, elements); }
}
// Elements of an array of it that collectives are over.
static inline int64_t store_padded(int64_t elements, int n, int64_t grain) {
    return n * store_slice(elements, n, grain);
}

// Elements of a state that go between host and device at once: an eighth of the largest storage, or
// less.
static inline int64_t offload_piece(const GptModel *m) {
    int64_t most = 0;
    for (int c = 0; c < STORAGE_CLASSES; c++) { most = max_i64(most, m->class_elements[c]); }
    return min_i64(OFFLOAD_PIECE, round_up(ceil_div(most, 8), NORM_CHUNK));
}

// So many of them has a storage of which something lies on the host, over its longest slice; 0:
// nothing does.
static inline int offload_pieces(const GptModel *m, const ZeroPolicy *z, const Owners *h,
                                 int storage) {
    if (!offload_has_states(z->offload, storage)) { return 0; }
    const int64_t longest =
        store_slice(gpt_storage_elements(m, storage), holders_of(h, storage), zero_grain(z));
    return (int)ceil_div(longest, offload_piece(m));
}

// Bounds of the slices of each class of storages: in elements, or in the bytes of their records.
typedef struct {
    int n;
    int64_t *of_class[STORAGE_CLASSES]; // [n + 1]
} Slices;
static inline Slices slices_make(const GptModel *m, int n, int64_t grain,
                                 const QuantFormat *records) {
    Slices s = {n, {NULL}};
    for (int c = 0; c < STORAGE_CLASSES; c++) {
        s.of_class[c] = (int64_t *)checked_calloc((size_t)n + 1, sizeof(int64_t), "slices");
        store_bounds(m->class_elements[c], n, grain, s.of_class[c]);
        for (int r = 0; records && r <= n; r++) {
            s.of_class[c][r] = quant_bytes(*records, s.of_class[c][r]);
        }
    }
    return s;
}
static inline void slices_free(Slices *s) {
    for (int c = 0; c < STORAGE_CLASSES; c++) { free(s->of_class[c]); }
    memset(s, 0, sizeof *s);
}
static inline int64_t slice_length(const int64_t *bounds, int member) {
    return bounds[member + 1] - bounds[member];
}

// -------------------------------------------------------------------------------------------------
// Parties

// The ranks that hold some storages, seen from one of them or from outside (then there is nothing
// but `all`), and the parts of them that hpZ and qgZ exchange in. near: of my partition; node: on
// my node; across: in my place of the other nodes. Where they do not lie evenly on several nodes,
// node has all and across me alone.
// elements, elements; bytes of records
typedef enum { SLICES_WHOLE, SLICES_NEAR, SLICES_WEIGHTS, SLICES_GRADIENTS, SLICE_KINDS } SliceKind;
typedef struct {
    Group all, near, node, across;
    Slices slices[SLICE_KINDS];
} ProcessGroup;

static inline ProcessGroup process_group_make(const Group *ranks, const int *list, int n,
                                              int partition) {
    ProcessGroup p;
    memset(&p, 0, sizeof p);
    p.all = group_part(ranks, list, n);
    const Group *all = &p.all;
    if (all->me < 0) { return p; }
    int *members = (int *)checked_malloc((size_t)n * sizeof(int), "groups"), k = 0;
    for (int i = all->me / partition * partition; i < n && k < partition; i++) { members[k++] = i; }
    p.near = group_part(all, members, k);
    for (k = 0; k < all->locals; k++) { members[k] = group_at(all, group_node(all, all->me), k); }
    p.node = group_part(all, members, k);
    for (k = 0; k < all->nodes; k++) { members[k] = group_at(all, k, group_local(all, all->me)); }
    p.across = group_part(all, members, k);
    free(members);
    return p;
}
static inline ProcessGroup process_group_of_all(const Group *ranks) {
    int *list = (int *)checked_malloc((size_t)ranks->n * sizeof(int), "ranks");
    for (int i = 0; i < ranks->n; i++) { list[i] = i; }
    ProcessGroup p = process_group_make(ranks, list, ranks->n, 1);
    free(list);
    return p;
}
static inline void process_group_slice(ProcessGroup *p, const GptModel *m, const ZeroPolicy *z) {
    if (p->all.me < 0) { return; }
    const int64_t grain = zero_grain(z);
    p->slices[SLICES_WHOLE] = slices_make(m, p->all.n, grain, NULL);
    p->slices[SLICES_NEAR] = slices_make(m, p->near.n, NORM_CHUNK, NULL);
    p->slices[SLICES_WEIGHTS] =
        slices_make(m, p->all.n, grain, z->quantized_weights ? &z->weights : NULL);
    p->slices[SLICES_GRADIENTS] =
        slices_make(m, p->all.n, grain, z->quantized_gradients ? &z->gradients : NULL);
}
static inline void process_group_free(ProcessGroup *p) {
    group_free(&p->all);
    group_free(&p->near);
    group_free(&p->node);
    group_free(&p->across);
    for (int k = 0; k < SLICE_KINDS; k++) { slices_free(&p->slices[k]); }
}

// All of it, seen from one rank.
typedef struct {
    const GptModel *model;
    Owners owners;
    ProcessGroup *process_groups; // [holders.count]
} Layout;
static inline const ProcessGroup *layout_process_group(const Layout *l, int storage) {
    return &l->process_groups[l->owners.of[storage]];
}
static inline bool layout_holds(const Layout *l, int storage) {
    return layout_process_group(l, storage)->all.me >= 0;
}
static inline const int64_t *layout_slices(const Layout *l, SliceKind kind, int storage) {
    return layout_process_group(l, storage)
        ->slices[kind]
        .of_class[gpt_storage_class(l->model, storage)];
}
// What an array of a storage takes that collectives are over: elements, or bytes of records. Into
// one place parameters come from all who hold them, and from those of a partition.
static inline int64_t layout_padded(const Layout *l, SliceKind kind, int storage) {
    const ProcessGroup *p = layout_process_group(l, storage);
    const int64_t all = bounds_padded(layout_slices(l, kind, storage), p->all.n);
    const int64_t near = bounds_padded(layout_slices(l, SLICES_NEAR, storage), p->near.n);
    return kind == SLICES_WHOLE ? max_i64(all, near) : all;
}
// my place among those slices
static inline int layout_me(const Layout *l, SliceKind kind, int storage) {
    const ProcessGroup *p = layout_process_group(l, storage);
    return kind == SLICES_NEAR ? p->near.me : p->all.me;
}

static inline Layout layout_make(const GptModel *m, const Group *ranks, const Placement *placement,
                                 const ZeroPolicy *z) {
    Layout l = {m, z->p2p ? owners_of_p2p(m, z->p2p->owner) : owners_make(m, placement), NULL};
    for (int s = 0; s < placement->stages; s++) {
        if (z->partition > placement->stage[s].replicas) {
            die(EXIT_INPUT, "a partition is some of a stage's ranks, those of a node",
                "--zero-hpz-partition-size %d is more than the %d ranks of stage %d", z->partition,
                placement->stage[s].replicas, s);
        }
    }
    l.process_groups =
        (ProcessGroup *)checked_calloc((size_t)l.owners.count, sizeof(ProcessGroup), "parties");
    for (int i = 0; i < l.owners.count; i++) {
        l.process_groups[i] =
            process_group_make(ranks, l.owners.ranks[i], l.owners.size[i], z->partition);
        process_group_slice(&l.process_groups[i], m, z);
    }
    return l;
}
static inline void layout_free(Layout *l) {
    for (int i = 0; i < l->owners.count; i++) { process_group_free(&l->process_groups[i]); }
    owners_free(&l->owners);
    free(l->process_groups);
    memset(l, 0, sizeof *l);
}

// -------------------------------------------------------------------------------------------------
// Shelves
// whole arrays; slices; slices, and rooms for whole ones
typedef enum { BUFFER_NONE, BUFFER_FULL, BUFFER_SLICES, BUFFER_SLOTS } BufferLayout;
typedef struct {
    // [storages] where this rank's slice and the whole array begin, in bytes; whole -1: never here
    int64_t *slice, *whole;
    size_t held, slot_bytes; // bytes of the states themselves, and of rooms beside them
    char *base;
    bool far, pinned; // on the host (offload.h), where copies go on beside its work
} StateBuffer;
typedef struct {
    BufferLayout layout;
    SliceKind slices;
    size_t size; // bytes of an element
    // [storages] the slice lies beside the room, whatever comes into this; NULL: never
    const bool *apart;
    const bool *there; // [storages] what this shelf has; NULL: all
    // [storages] the slice is on the host, and nothing but a room here; NULL: never
    const bool *far;
    bool travels; // collectives are over its arrays and slices, which have room behind them
} BufferPlan;
// Bytes of a storage's whole array, and of this rank's slice of it.
static inline int64_t buffer_full_bytes(const Layout *l, const BufferPlan *plan, int storage) {
    const int n = layout_process_group(l, storage)->slices[plan->slices].n;
    return layout_slices(l, plan->slices, storage)[n] * (int64_t)plan->size;
}
static inline int64_t shelf_slice_bytes(const Layout *l, const BufferPlan *plan, int storage) {
    const int64_t *bounds = layout_slices(l, plan->slices, storage);
    return slice_length(bounds, layout_me(l, plan->slices, storage)) * (int64_t)plan->size;
}
// The same with the room behind them.
static inline int64_t buffer_full_padded(const Layout *l, const BufferPlan *plan, int storage) {
    if (!plan->travels) { return buffer_full_bytes(l, plan, storage); }
    return layout_padded(l, plan->slices, storage) * (int64_t)plan->size;
}
static inline int64_t buffer_slice_padded(const Layout *l, const BufferPlan *plan, int storage) {
    if (!plan->travels) { return shelf_slice_bytes(l, plan, storage); }
    return layout_slices(l, plan->slices, storage)[1] * (int64_t)plan->size;
}
static inline int buffer_plan_slot(const Layout *l, const BufferPlan *plan, int storage) {
    return shared_slot(&l->owners, storage, plan->apart && plan->apart[storage],
                       plan->far && plan->far[storage]);
}
static inline bool buffer_stays_full(const Layout *l, const BufferPlan *plan, int storage) {
    const bool far = plan->far && plan->far[storage], apart = plan->apart && plan->apart[storage];
    return !far && (plan->layout == BUFFER_FULL || (plan->layout == BUFFER_SLOTS && !apart &&
                                                    buffer_plan_slot(l, plan, storage) < 0));
}

// The rooms, after all slices: first those that blocks share.
static inline void buffer_plan_slots(StateBuffer *buffer, const Layout *l, const BufferPlan *plan,
                                     int64_t at) {
    for (int slot = 0; slot <= SHARED_SLOTS; slot++) {
        int64_t place = -1; // of the shared room
        for (int i = 0; i < l->model->storages; i++) {
            if (!layout_holds(l, i) || buffer->whole[i] >= 0) { continue; }
            int shared = buffer_plan_slot(l, plan, i);
            if (slot < SHARED_SLOTS && shared != slot) { continue; }
            if (slot == SHARED_SLOTS || place < 0) {
                place = round_up(at, 64);
                at = place + buffer_full_padded(l, plan, i);
            }
            buffer->whole[i] = place;
        }
    }
    buffer->slot_bytes = (size_t)at - buffer->held;
}
static inline StateBuffer buffer_plan(const Layout *l, BufferPlan plan) {
    StateBuffer buffer = {NULL, NULL, 0, 0, NULL, false, false};
    int64_t at = 0;
    if (plan.layout == BUFFER_NONE) { return buffer; }
    buffer.slice = (int64_t *)checked_calloc((size_t)l->model->storages, sizeof(int64_t), "shelf");
    buffer.whole = (int64_t *)checked_calloc((size_t)l->model->storages, sizeof(int64_t), "shelf");
    for (int i = 0; i < l->model->storages; i++) {
        buffer.whole[i] = -1;
        // copies are for each use
        if (!layout_holds(l, i) || (plan.slices == SLICES_NEAR && l->owners.tied[i])) { continue; }
        if ((plan.there && !plan.there[i]) || (plan.far && plan.far[i])) { continue; }
        const int64_t begin =
            layout_slices(l, plan.slices, i)[layout_me(l, plan.slices, i)] * (int64_t)plan.size;
        const bool here = buffer_stays_full(l, &plan, i);
        buffer.slice[i] = here ? at + begin : at;
        buffer.whole[i] = here ? at : -1;
        at += here ? buffer_full_padded(l, &plan, i) : buffer_slice_padded(l, &plan, i);
        const bool whole = plan.layout == BUFFER_FULL;
        buffer.held +=
            (size_t)(whole ? buffer_full_bytes(l, &plan, i) : shelf_slice_bytes(l, &plan, i));
    }
    if (plan.layout == BUFFER_SLOTS || plan.far) {
        buffer_plan_slots(&buffer, l, &plan, at);
    } else {
        buffer.slot_bytes = (size_t)at - buffer.held;
    }
    return buffer;
}

// The bytes of such a shelf, kept up to date while slices leave it and come back, one at a time.
typedef struct {
    int64_t slices;          // and whole arrays that stay
    int64_t slot_bytes;      // of their own, each with what rounds it up
    int users[SHARED_SLOTS]; // storages that come into each of those that blocks share
    int64_t shared;          // bytes of each of these
    Largest last_slot;       // one more than the last storage that has its own room
} BufferSum;
// A storage's part comes (times 1) or goes (-1), as the plan is just now.
static inline void buffer_sum_add(BufferSum *sum, const Layout *l, const BufferPlan *plan,
                                  int storage, int times) {
    if (!layout_holds(l, storage)) { return; }
    const int64_t whole = buffer_full_padded(l, plan, storage);
    const bool stays = buffer_stays_full(l, plan, storage);
    const int slot = buffer_plan_slot(l, plan, storage);
    if (stays) { sum->slices += times * whole; }
    if (!stays && !plan->far[storage]) {
        sum->slices += times * buffer_slice_padded(l, plan, storage);
    }
    if (!stays && slot >= 0) {
        sum->users[slot] += times;
        sum->shared = whole;
    }
    if (!stays && slot < 0) {
        sum->slot_bytes += times * round_up(whole, 64);
        largest_set(&sum->last_slot, storage, times > 0 ? storage + 1 : 0);
    }
}
static inline BufferSum buffer_sum(const Layout *l, const BufferPlan *plan) {
    BufferSum sum = {0, 0, {0}, 0, largest_make(l->model->storages)};
    for (int i = 0; i < l->model->storages; i++) { buffer_sum_add(&sum, l, plan, i, 1); }
    return sum;
}
static inline void buffer_sum_free(BufferSum *sum) { free(sum->last_slot.node); }
// held and rooms of buffer_plan
static inline int64_t buffer_sum_bytes(const BufferSum *sum, const Layout *l,
                                       const BufferPlan *plan) {
    const int last = (int)largest_of(&sum->last_slot) - 1;
    int64_t at = sum->slices;
    for (int slot = 0; slot < SHARED_SLOTS; slot++) {
        if (sum->users[slot]) { at = round_up(at, 64) + sum->shared; }
    }
    if (last < 0) { return at; }
    const int64_t whole = buffer_full_padded(l, plan, last);
    return round_up(at, 64) + sum->slot_bytes - round_up(whole, 64) + whole;
}
// Whole arrays of so many copies each (0: none), one after another.
static inline StateBuffer buffer_plan_copies(const GptModel *m, const int *copies, size_t size) {
    StateBuffer buffer = {NULL, NULL, 0, 0, NULL, false, false};
    buffer.slice = (int64_t *)checked_calloc((size_t)m->storages, sizeof(int64_t), "shelf");
    buffer.whole = (int64_t *)checked_calloc((size_t)m->storages, sizeof(int64_t), "shelf");
    for (int i = 0; i < m->storages; i++) {
        buffer.slice[i] = buffer.whole[i] = (int64_t)buffer.held;
        buffer.held += (size_t)(copies[i] * gpt_storage_elements(m, i)) * size;
    }
    return buffer;
}
// Rooms that storages share which are never there at once; room[]: whose; of those whose copies are
// 0, none.
static inline StateBuffer buffer_plan_shared(const GptModel *m, const int *copies,
                                             const unsigned char *slot, int slots, size_t size,
                                             bool one_at_a_time) {
    StateBuffer buffer = buffer_plan_copies(m, copies, size);
    size_t at = 0;
    for (int k = 0; k < slots; k++) {
        size_t used = 0;
        for (int i = 0; i < m->storages; i++) {
            if (!copies[i] || slot[i] != k) { continue; }
            const size_t bytes = (size_t)(copies[i] * gpt_storage_elements(m, i)) * size;
            buffer.slice[i] = buffer.whole[i] = (int64_t)(at + (one_at_a_time ? 0 : used));
            used = one_at_a_time ? (size_t)max_i64((int64_t)used, (int64_t)bytes) : used + bytes;
        }
        at += used;
    }
    buffer.held = 0;
    buffer.slot_bytes = at;
    return buffer;
}
// Rooms of a relay's stages, behind what the shelf holds: a stage's storages lie one after another,
// where they are here, and stages overlap. wte has the same place in the first and in the last one.
// Returns the elements of a room, which are those of the longest.
static inline int64_t buffer_add_stages(StateBuffer *buffer, const GptModel *m, const P2p *r,
                                        const bool *here, int slots, size_t size) {
    int64_t most = 0;
    for (int stage = 0; stage < r->stages; stage++) {
        int64_t at = 0;
        for (int i = 0; i < m->storages; i++) {
            if (!here[i] || (r->stage[i] != stage && (i || stage != r->stages - 1))) { continue; }
            buffer->slice[i] = buffer->whole[i] =
                (int64_t)(buffer->held + buffer->slot_bytes) + at * (int64_t)size;
            at += gpt_storage_elements(m, i);
        }
        most = max_i64(most, at);
    }
    buffer->slot_bytes += (size_t)(slots * most) * size;
    return most;
}
static inline void buffer_allocate(StateBuffer *buffer, MemoryKind kind, const char *what) {
    if (!(buffer->held + buffer->slot_bytes)) { return; }
    buffer->base = (char *)(buffer->far ? memory_take_far(buffer->held, what, &buffer->pinned)
                                        : memory_take_with_slots(kind, buffer->held,
                                                                 buffer->slot_bytes, what));
}
static inline void buffer_free(StateBuffer *buffer) {
    if (buffer->far) {
        ops_free_far(buffer->base, buffer->pinned);
    } else {
        ops_free(buffer->base);
    }
    free(buffer->slice);
    free(buffer->whole);
    memset(buffer, 0, sizeof *buffer);
}
static inline char *buffer_slice(const StateBuffer *buffer, int storage) {
    return buffer->base ? buffer->base + buffer->slice[storage] : NULL;
}
static inline char *buffer_full(const StateBuffer *buffer, int storage) {
    return buffer->base + buffer->whole[storage];
}

#endif
