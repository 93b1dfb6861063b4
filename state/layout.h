// layout.h: where the states of storages are stored: on which ranks, in which slices, and at which
// offsets in the buffers of a rank. The functions here are pure: they send no messages and allocate
// nothing but tables. Predictions use them as well as the store.
//
// Owners     The ranks of all stages whose units use a storage, in rank order. Other ranks have
//            nothing of it. Storages with equal lists of ranks share one ProcessGroup, whose
//            members divide each storage into slices.
// Tied       A storage that several stages use (wte: embedding and head) travels once a step at
//            every ZeRO stage. Its users work on different micro-batches, and would otherwise wait
//            for each other. This takes no more memory, since such a storage has its own slot
//            anyway. The same holds for a storage of blocks that alternate with others (--share
//            AxB), which would otherwise travel for each of its blocks.
// Buffers    One StateBuffer, one allocation, for each kind of state, with the storages one after
//            another. A buffer that holds slices and lends whole arrays has slots for the arrays:
//            blocks share a few slots and use them in turn, every other storage has its own. In a
//            slot of its own a storage's slice is stored in place, unless what is gathered or
//            summed there must not overwrite it.
// Slices     are cut at multiples of NORM_CHUNK elements (and of the quantization block), for any
//            number of ranks. All have the same length, except that the last ones end where the
//            storage ends, and may be empty.
// Padding    Arrays that collectives work on have free space behind the storage for what the last
//            slices lack (layout_padded). So one NCCL call gathers or reduces an array, in place.
//            The space holds zeros, nothing else reads or writes it, and it counts as buffers.
#ifndef LAYOUT_H
#define LAYOUT_H

#include "model/gpt.h"       // storages
#include "comm/group.h"      // ranks, stages
#include "options.h"         // --zero
#include "engine/schedule.h" // where sums are

enum {
    NORM_CHUNK = 256,
    SHARED_SLOTS = 2,   // slots of blocks: one is in use while the data of the other travel
    BORROWED_SLOTS = 2, // slots of stages for borrowed parameters, used in the same way
};

// How the sum of a step's gradients, ((g_1 + g_2) + g_3) + ..., reaches its owner, the rank of the
// last micro-batch. SUM_CHAIN: each rank adds its gradient and sends the sum to the next.
// SUM_FIRST: all but the last send their gradients to the first rank, which sends the sum to the
// last. SUM_OWNER: all send their gradients to the last.
typedef enum { SUM_CHAIN, SUM_FIRST, SUM_OWNER } SumWay;
// The pieces in which the micro-batches of a step are computed. Pieces are numbered in the order of
// their computation. in_turns (a rank has one micro-batch): the first piece of each micro-batch,
// then the second of each, and so on. Otherwise: all pieces of a micro-batch, then of the next.
typedef struct {
    int micros, pieces; // micro-batches of a step; pieces of a micro-batch
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
// Returns whether a piece is the last one of its micro-batch.
static inline bool piece_is_last(const Pieces *p, int piece) {
    return piece_within(p, piece) == p->pieces - 1;
}
// Returns how many of the step's samples a piece has, and writes the first to *first.
// begins: [micros + 1] the first sample of each micro-batch; NULL: micro-batches are nearly equal.
static inline int64_t piece_rows(const Pieces *p, int64_t samples, const int64_t *begins, int piece,
                                 int64_t *first) {
    const int micro = piece_micro(p, piece), within = piece_within(p, piece);
    const int64_t begin = begins ? begins[micro] : part_begin(samples, p->micros, micro);
    const int64_t rows =
        (begins ? begins[micro + 1] : part_begin(samples, p->micros, micro + 1)) - begin;
    *first = begin + part_begin(rows, p->pieces, within);
    return begin + part_begin(rows, p->pieces, within + 1) - *first;
}
// States that travel by p2p messages instead of collectives of all owners (cyclic.h). A storage has
// one owner, which updates it. Other ranks compute with copies of its parameters, and pass on the
// sum of its gradient.
typedef struct {
    int *owner;   // [storages] rank that updates it
    bool **taken; // [storages][ranks] whether the rank computes with its parameters
    // [storages] rank that saves the version before the newest, if one is kept
    int *keeper;
    // [storages] versions of the parameters that this rank keeps: 0, 1 or 2. Version v is stored in
    // buffer v modulo places
    unsigned char *places;
    bool *adds;  // [storages] whether this rank contributes to the gradient
    bool *comes; // [storages] whether this rank receives sums, or parts of sums, of its gradient
    // sums stay on this rank from one micro-batch to the next, and gradients of micro-batches are
    // made in slots; otherwise sums are received and passed on
    bool stays;
    bool waits; // updates wait for the norm of the whole gradient
    // buffers of sums that stay: 2 if the sum of the next step begins before that of this step is
    // used
    int sums;
    // pieces between the head's and the embedding's part of their gradient of wte
    int heads;
    const SumWay *way; // [storages] NULL: SUM_CHAIN
    Pieces pieces;     // of a step
    // the pieces of a micro-batch are added up here; otherwise there is one, or each is sent
    bool joins_pieces;
    int grad_slots;           // slots for received sums
    unsigned char *grad_slot; // [storages] slot that receives the sums of the storage
    // only owners keep parameters: other ranks borrow those of a stage for each use, and send its
    // gradients to the owner without adding to them
    bool borrows;
    int stages, uses; // with borrows: stages; uses of a stage's parameters in a step
    // [storages] stage that it belongs to; wte belongs to the first, and the last uses it, too
    int *stage;
    // operations that wait for a message are deferred (p2p.h); each gradient that is passed on has
    // a buffer of its own
    bool deferred;
    // most steps that begin after the step in which a stop was requested
    int notice;
} P2p;
// Returns the slot that holds the parameters of a use. Uses are counted through all steps.
static inline int p2p_slot(const P2p *r, int use, int64_t step) {
    return (int)((step * r->uses + use) % BORROWED_SLOTS);
}

// Which states are in host memory (offload.h chooses them). The host holds slices at every ZeRO
// stage: what the rank updates. States of the optimizer are copied to the device for the update,
// piece by piece, or the host updates them from gradients that are copied there. Of a gradient on
// the host, the device has only a slot for the contribution that is being computed. Parameters are
// gathered for each use, as at stage 3, into slots that blocks share. Parameters in fp32 are their
// own masters, and one state with them.
typedef enum {
    STATE_MASTER,
    STATE_M,
    STATE_V,
    STATE_PREVIOUS,
    STATE_RETIRED, // in files of older versions; ignored. The numbers are those of the files
    STATE_GRADIENT,
    STATE_KINDS, // of a checkpoint
    STATE_PARAMETERS = STATE_KINDS,
    HOST_KINDS, // kinds that have a buffer on the host
    // activations of blocks that use the storage, between forward and backward pass (executor)
    STATE_ACTIVATIONS = HOST_KINDS
} StateKind;
enum { // bits of kinds: states of the optimizer; all states that may be on the host
    OPTIMIZER_STATES = 1 << STATE_MASTER | 1 << STATE_M | 1 << STATE_V,
    OFFLOAD_ANY = OPTIMIZER_STATES | 1 << STATE_GRADIENT | 1 << STATE_PARAMETERS
};
typedef struct {
    unsigned char *host; // [storages] bits of kinds
    // the host updates what it holds: of a storage all states of the optimizer, or none
    bool cpu_update;
    // [storages] bits of the optimizer's states that are on a disk (state/disk.h) and are read to
    // the host for their update; NULL: none
    unsigned char *disk;
    const char *folder; // of the files on disk
    bool gradients;     // gradients may be on the host
    bool delays;        // updates are one step late; then all gradients and masters are there
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
// Returns how many kinds of a storage's states are on disk.
static inline int offload_stored(const Offload *o, int storage) {
    return o && o->disk ? __builtin_popcount(o->disk[storage]) : 0;
}

// The ZeRO and ZeRO++ flags of a run.
typedef struct {
    int stage; // 0 .. 3
    // hpZ: ranks that together keep a secondary copy of the parameters; 1: off
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
// Owners of storages
typedef struct {
    int count;   // different lists of ranks
    int *size;   // [count]
    int **ranks; // [count][size] ascending
    int *blocks; // [count] their blocks that may share slots
    int *of;     // [storages] index of the list of its ranks
    bool *tied;  // [storages] several stages use it, or blocks that alternate with others
    // [storages] whether it is a block that shares slots with others; tied storages do not
    bool *turns;
} Owners;

// Returns one more than the largest rank of a placement, whose stages have each unit once, in
// order, and no rank twice.
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
// Returns which stages use each storage: [storages][stages].
static inline bool *placement_uses(const GptModel *m, const Placement *p) {
    bool *uses = (bool *)checked_calloc((size_t)m->storages, (size_t)p->stages, "owners");
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
// Marks the ranks of these stages. Returns the number of stages.
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
// Returns the index of the list of these marked ranks, which is added if it is new.
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
    h.size = (int *)checked_calloc(n, sizeof(int), "owners");
    h.ranks = (int **)checked_calloc(n, sizeof(int *), "owners");
    h.blocks = (int *)checked_calloc(n, sizeof(int), "owners");
    h.of = (int *)checked_calloc(n, sizeof(int), "owners");
    h.tied = (bool *)checked_calloc(n, sizeof(bool), "owners");
    h.turns = (bool *)checked_calloc(n, sizeof(bool), "owners");
    bool *marked = (bool *)checked_calloc(ranks, sizeof(bool), "owners"),
         *uses = placement_uses(m, p);
    const bool *used = uses;
    for (int i = 0, stages = 0; i < m->storages; i++, used += p->stages) {
        // the same list as of the storage before
        const bool same = i && !memcmp(used, used - p->stages, (size_t)p->stages);
        if (!same) { stages = placement_mark_ranks(p, used, marked, (int)ranks); }
        h.of[i] = same ? h.of[i - 1] : holders_list(&h, marked, (int)ranks);
        h.tied[i] =
            stages > 1 || (share_alternates(m->share) && gpt_storage_class(m, i) == STORAGE_BLOCK);
        h.turns[i] = gpt_storage_class(m, i) == STORAGE_BLOCK && !h.tied[i];
        h.blocks[h.of[i]] += h.turns[i];
    }
    free(marked);
    free(uses);
    return h;
}
// Each storage has one rank, its owner.
static inline Owners owners_of_p2p(const GptModel *m, const int *owner) {
    const size_t n = (size_t)m->storages;
    Owners h = {0, NULL, NULL, NULL, NULL, NULL, NULL};
    h.size = (int *)checked_calloc(n, sizeof(int), "owners");
    h.ranks = (int **)checked_calloc(n, sizeof(int *), "owners");
    h.blocks = (int *)checked_calloc(n, sizeof(int), "owners");
    h.of = (int *)checked_calloc(n, sizeof(int), "owners");
    h.tied = (bool *)checked_calloc(n, sizeof(bool), "owners");
    h.turns = (bool *)checked_calloc(n, sizeof(bool), "owners");
    for (int i = 0; i < m->storages; i++) {
        while (h.of[i] < h.count && h.ranks[h.of[i]][0] != owner[i]) { h.of[i]++; }
        if (h.of[i] == h.count) {
            h.ranks[h.count] = (int *)checked_malloc(sizeof(int), "owners");
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
// Returns how many ranks own a storage.
static inline int holders_of(const Owners *h, int storage) { return h->size[h->of[storage]]; }

// Return whether the whole parameters, or the whole gradient, of a storage exist only during each
// use. A single rank has no gradients to divide.
static inline bool zero_param_far(const ZeroPolicy *z, int storage) {
    return offload_has(z->offload, storage, STATE_PARAMETERS);
}
static inline bool zero_gathers(const ZeroPolicy *z, const Owners *h, int storage) {
    return z->p2p ? z->p2p->borrows
                  : (z->stage >= 3 && !h->tied[storage]) || zero_param_far(z, storage);
}
// also if sums leave the device
static inline int zero_gradient_stage(const ZeroPolicy *z) {
    return offload_has_any(z->offload, STATE_GRADIENT) ? (int)max_i64(z->stage, 2) : z->stage;
}
static inline SumPlace zero_sum_place(const Offload *o, const Owners *h, int storage) {
    const bool alone = holders_of(h, storage) == 1 && h->turns[storage];
    return !offload_has(o, storage, STATE_GRADIENT) ? SUM_STAYS
           : alone                                  ? SUM_COMES_BACK
                                                    : SUM_IS_ADDED;
}
// the gradient, from stage 2 on
static inline bool zero_divides(const ZeroPolicy *z, const Owners *h, int storage) {
    return !h->tied[storage] &&
           (holders_of(h, storage) > 1 || zero_sum_place(z->offload, h, storage) == SUM_COMES_BACK);
}
static inline bool zero_reduces_often(const ZeroPolicy *z, const Owners *h, int storage) {
    return zero_divides(z, h, storage) && zero_gradient_stage(z) >= 2;
}
// Return whether the slice of a storage's parameters, of its gradient, is stored outside its slot.
static inline bool zero_param_apart(const ZeroPolicy *z) { return z->quantized_weights; }
static inline bool zero_grad_apart(const ZeroPolicy *z, const Owners *h, int storage) {
    return z->accumulates && zero_reduces_often(z, h, storage);
}

// Returns the shared slot of a storage; -1: it has a slot of its own, also if sharing would not
// save memory. far: its slice is on the host.
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

// Returns the number of elements that slices are multiples of.
static inline int64_t zero_grain(const ZeroPolicy *z) {
    return max_i64(NORM_CHUNK, max_i64(z->quantized_weights ? z->weights.block : 1,
                                       z->quantized_gradients ? z->gradients.block : 1));
}
// Returns the elements of the longest slice of a storage over n ranks, which is the first.
static inline int64_t store_slice(int64_t elements, int n, int64_t grain) {
    return min_i64(elements, ceil_div(elements, n * grain) * grain);
}
// Cuts a storage into slices of n ranks at multiples of `grain`. bounds: [n + 1].
static inline void store_bounds(int64_t elements, int n, int64_t grain, int64_t *bounds) {
    const int64_t slice = store_slice(elements, n, grain);
    for (int r = 0; r <= n; r++) { bounds[r] = min_i64(r * slice, elements); }
}
// Returns the elements of an array of the storage, with its padding.
static inline int64_t store_padded(int64_t elements, int n, int64_t grain) {
    return n * store_slice(elements, n, grain);
}

// Returns the elements of a state that are copied between host and device at once: at most an
// eighth of the largest storage.
static inline int64_t offload_piece(const GptModel *m) {
    int64_t most = 0;
    for (int c = 0; c < STORAGE_CLASSES; c++) { most = max_i64(most, m->class_elements[c]); }
    return min_i64(OFFLOAD_PIECE, round_up(ceil_div(most, 8), NORM_CHUNK));
}

// Returns the number of such pieces of a storage's longest slice; 0: nothing of it is on the host.
static inline int offload_pieces(const GptModel *m, const ZeroPolicy *z, const Owners *h,
                                 int storage) {
    if (!offload_has_states(z->offload, storage)) { return 0; }
    const int64_t longest =
        store_slice(gpt_storage_elements(m, storage), holders_of(h, storage), zero_grain(z));
    return (int)ceil_div(longest, offload_piece(m));
}

// Bounds of the slices of each class of storages, in elements or in bytes of records.
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

// -------------------------------------------------------------------------------------------------
// Process groups

// The owners of some storages, as one rank sees them, and the subgroups in which hpZ and qgZ
// exchange. near: this rank's partition; node: this rank's node; across: the ranks with this rank's
// local index on all nodes. If the owners are not spread evenly over several nodes, node has all of
// them and across only this rank. A rank that is no owner has `all` only.
// Slices are in elements (FULL, NEAR) or in bytes of records (WEIGHTS, GRADIENTS).
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

// The layout of all storages, as one rank sees it.
typedef struct {
    const GptModel *model;
    Owners owners;
    ProcessGroup *process_groups; // [owners.count]
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
// Returns the elements, or bytes of records, of an array of a storage with its padding. The same
// array receives parameters from all owners and from those of a partition.
static inline int64_t layout_padded(const Layout *l, SliceKind kind, int storage) {
    const ProcessGroup *p = layout_process_group(l, storage);
    const int64_t all = bounds_padded(layout_slices(l, kind, storage), p->all.n);
    const int64_t near = bounds_padded(layout_slices(l, SLICES_NEAR, storage), p->near.n);
    return kind == SLICES_WHOLE ? max_i64(all, near) : all;
}
// Returns this rank's index among those slices.
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
    l.process_groups = (ProcessGroup *)checked_calloc((size_t)l.owners.count, sizeof(ProcessGroup),
                                                      "process groups");
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
// Buffers of states
// What a buffer holds: whole arrays; slices; slices, and slots for whole arrays.
typedef enum { BUFFER_NONE, BUFFER_FULL, BUFFER_SLICES, BUFFER_SLOTS } BufferLayout;
typedef struct {
    // [storages] offset in bytes of this rank's slice and of the whole array; whole -1: it has none
    int64_t *slice, *whole;
    size_t held, slot_bytes; // bytes of the states themselves, and of the slots
    char *base;
    bool far, pinned; // on the host (offload.h); pinned, so that copies run beside its work
} StateBuffer;
typedef struct {
    BufferLayout layout;
    SliceKind slices;
    size_t size; // bytes of an element
    // [storages] the slice is stored outside the slot; NULL: never
    const bool *apart;
    const bool *there; // [storages] what this buffer has; NULL: all
    // [storages] the slice is on the host, and only a slot is here; NULL: never
    const bool *far;
    bool travels; // collectives work on its arrays and slices, which have padding
} BufferPlan;
// Return the bytes of a storage's whole array, and of this rank's slice of it.
static inline int64_t buffer_full_bytes(const Layout *l, const BufferPlan *plan, int storage) {
    const int n = layout_process_group(l, storage)->slices[plan->slices].n;
    return layout_slices(l, plan->slices, storage)[n] * (int64_t)plan->size;
}
static inline int64_t buffer_slice_bytes(const Layout *l, const BufferPlan *plan, int storage) {
    const int64_t *bounds = layout_slices(l, plan->slices, storage);
    return slice_length(bounds, layout_me(l, plan->slices, storage)) * (int64_t)plan->size;
}
// The same with the padding.
static inline int64_t buffer_full_padded(const Layout *l, const BufferPlan *plan, int storage) {
    if (!plan->travels) { return buffer_full_bytes(l, plan, storage); }
    return layout_padded(l, plan->slices, storage) * (int64_t)plan->size;
}
static inline int64_t buffer_slice_padded(const Layout *l, const BufferPlan *plan, int storage) {
    if (!plan->travels) { return buffer_slice_bytes(l, plan, storage); }
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

// Places the slots behind all slices, those that blocks share first.
static inline void buffer_plan_slots(StateBuffer *buffer, const Layout *l, const BufferPlan *plan,
                                     int64_t at) {
    for (int slot = 0; slot <= SHARED_SLOTS; slot++) {
        int64_t place = -1; // offset of the shared slot
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
    buffer.slice = (int64_t *)checked_calloc((size_t)l->model->storages, sizeof(int64_t), "buffer");
    buffer.whole = (int64_t *)checked_calloc((size_t)l->model->storages, sizeof(int64_t), "buffer");
    for (int i = 0; i < l->model->storages; i++) {
        buffer.whole[i] = -1;
        // secondary copies are of storages that are gathered for each use
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
            (size_t)(whole ? buffer_full_bytes(l, &plan, i) : buffer_slice_bytes(l, &plan, i));
    }
    if (plan.layout == BUFFER_SLOTS || plan.far) {
        buffer_plan_slots(&buffer, l, &plan, at);
    } else {
        buffer.slot_bytes = (size_t)at - buffer.held;
    }
    return buffer;
}

// The bytes of such a buffer, kept up to date while slices leave it and return, one at a time.
typedef struct {
    int64_t slices;          // bytes of slices, and of whole arrays that stay
    int64_t slot_bytes;      // bytes of slots of one storage, each rounded up
    int users[SHARED_SLOTS]; // storages that use each shared slot
    int64_t shared;          // bytes of each shared slot
    Largest last_slot;       // one more than the last storage that has its own slot
} BufferSum;
// Adds (times 1) or removes (-1) a storage's part, as the plan is now.
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
// Returns `held` and `slot_bytes` of buffer_plan() together.
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
// Plans whole arrays of each storage, so many copies each (0: none), one after another.
static inline StateBuffer buffer_plan_copies(const GptModel *m, const int *copies, size_t size) {
    StateBuffer buffer = {NULL, NULL, 0, 0, NULL, false, false};
    buffer.slice = (int64_t *)checked_calloc((size_t)m->storages, sizeof(int64_t), "buffer");
    buffer.whole = (int64_t *)checked_calloc((size_t)m->storages, sizeof(int64_t), "buffer");
    for (int i = 0; i < m->storages; i++) {
        buffer.slice[i] = buffer.whole[i] = (int64_t)buffer.held;
        buffer.held += (size_t)(copies[i] * gpt_storage_elements(m, i)) * size;
    }
    return buffer;
}
// Plans slots for storages that are never stored at the same time. slot: [storages] the slot of
// each; storages with 0 copies have none.
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
// Adds slots for the stages of p2p parameters behind what the buffer holds. In a slot the storages
// of a stage that `here` names are stored one after another, and stages use the same slots. wte has
// the same offset in the first and in the last stage. Returns the elements of a slot: those of the
// longest stage.
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
