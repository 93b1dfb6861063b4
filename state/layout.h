// layout.h: which ranks own a storage, and in which slices they divide it. The functions here are
// pure: they send no messages and allocate nothing but tables.
//
// Owners     The ranks of all stages whose units use a storage, in rank order. Other ranks have
//            nothing of it. Storages with equal lists of ranks share one ProcessGroup, whose
//            members divide each storage into slices.
// Tied       A storage that several stages use (wte: embedding and head) travels once a step at
//            every ZeRO stage. Its users work on different micro-batches, and would otherwise wait
//            for each other. This takes no more memory, since such a storage has its own slot
//            anyway. The same holds for a storage of blocks that alternate with others (--share
//            AxB), which would otherwise travel for each of its blocks.
// Slices     are cut at multiples of NORM_CHUNK elements (and of the quantization block), for any
//            number of ranks. All have the same length, except that the last ones end where the
//            storage ends, and may be empty.
// Padding    Arrays that collectives work on have free space behind the storage for what the last
//            slices lack (layout_padded). So one NCCL call gathers or reduces an array, in place.
//            The space holds zeros, nothing else reads or writes it, and it counts as buffers.
#ifndef LAYOUT_H
#define LAYOUT_H

#include "base/base.h"
#include "comm/group.h"
#include "comm/mpi.h"
#include "model/architecture.h"
#include "model/gpt.h"
#include "ops/quantize.h"
#include "state/policy.h"

// -------------------------------------------------------------------------------------------------
// Owners of storages
typedef struct {
    int n;      // ranks
    int *ranks; // [n] ascending
    int blocks; // their blocks that may share slots
} OwnerList;
typedef struct {
    int list;   // index of the list of its ranks
    bool tied;  // several stages use it, or blocks that alternate with others
    bool turns; // it is a block that shares slots with others; tied storages do not
} StorageOwners;
typedef struct {
    int count;              // different lists of ranks
    OwnerList *lists;       // [count]
    StorageOwners *storage; // [storages]
} Owners;

// Returns which stages use each storage: [storages][stages].
static inline bool *placement_uses(const GptModel *m, const Placement *p) {
    bool *uses = new_array(bool, m->storages * p->stages, "owners");
    for (int u = 0; u < m->units; u++) {
        int used[2];
        for (int k = gpt_unit_storages(m, u, used) - 1; k >= 0; k--) {
            uses[used[k] * p->stages + placement_stage_of_unit(p, u)] = true;
        }
    }
    return uses;
}
// Lists the ranks of these stages in order. The caller frees the list.
static inline OwnerList placement_list_ranks(const Placement *p, const bool *used) {
    int most = 0, all = 0;
    for (int s = 0; s < p->stages; s++) {
        for (int i = 0; i < p->stage[s].replicas; i++) {
            most = max_i64(most, p->stage[s].ranks[i] + 1);
            all += used[s];
        }
    }
    bool *marked = new_array(bool, most, "owners");
    OwnerList list = {.n = 0, .ranks = new_array(int, all, "owners")};
    for (int s = 0; s < p->stages; s++) {
        for (int i = 0; used[s] && i < p->stage[s].replicas; i++) {
            marked[p->stage[s].ranks[i]] = true;
        }
    }
    for (int r = 0; r < most; r++) {
        if (marked[r]) { list.ranks[list.n++] = r; }
    }
    free(marked);
    return list;
}
static inline Owners owners_new(const GptModel *m) {
    const Owners h = {.count = 0,
                      .lists = new_array(OwnerList, m->storages, "owners"),
                      .storage = new_array(StorageOwners, m->storages, "owners")};
    return h;
}
// Gives a storage its list of ranks, which is added if it is new, and otherwise freed.
static inline void owners_set(Owners *h, const GptModel *m, int storage, OwnerList list,
                              bool tied) {
    int k = 0;
    while (k < h->count && (h->lists[k].n != list.n ||
                            memcmp(h->lists[k].ranks, list.ranks, list.n * sizeof(int)))) {
        k++;
    }
    if (k < h->count) {
        free(list.ranks);
    } else {
        h->lists[h->count++] = list;
    }
    StorageOwners *x = &h->storage[storage];
    x->list = k;
    x->tied = tied;
    x->turns = gpt_storage_is_block(m, storage) && !tied;
    h->lists[k].blocks += x->turns;
}
static inline Owners owners_make(const GptModel *m, const Placement *p) {
    Owners h = owners_new(m);
    bool *uses = placement_uses(m, p);
    for (int i = 0; i < m->storages; i++) {
        const bool *used = uses + i * p->stages;
        int stages = 0;
        for (int s = 0; s < p->stages; s++) { stages += used[s]; }
        owners_set(&h, m, i, placement_list_ranks(p, used),
                   stages > 1 || (share_alternates(m->share) && gpt_storage_is_block(m, i)));
    }
    free(uses);
    return h;
}
// Each storage has one rank, its owner.
static inline Owners owners_of_p2p(const GptModel *m, const P2pStorage *p2p) {
    Owners h = owners_new(m);
    for (int i = 0; i < m->storages; i++) {
        const OwnerList one = {.n = 1, .ranks = new_array(int, 1, "owners")};
        one.ranks[0] = p2p[i].owner;
        owners_set(&h, m, i, one, false);
    }
    return h;
}
static inline void owners_free(Owners *h) {
    for (int i = 0; i < h->count; i++) { free(h->lists[i].ranks); }
    free_all(h->lists, h->storage);
}
// Returns how many ranks own a storage.
static inline int owner_count(const Owners *h, int storage) {
    return h->lists[h->storage[storage].list].n;
}

// Return whether the whole parameters, or the whole gradient, of a storage exist only during each
// use. A single rank has no gradients to divide.
static inline bool zero_param_on_host(const ZeroPolicy *z, int storage) {
    return offload_has(z->offload, storage, STATE_PARAMETERS);
}
static inline bool zero_gathers(const ZeroPolicy *z, const Owners *h, int storage) {
    return (z->stage >= 3 && !h->storage[storage].tied) || zero_param_on_host(z, storage);
}
// also if sums leave the device
static inline int zero_gradient_stage(const ZeroPolicy *z) {
    return offload_has_any(z->offload, STATE_GRADIENT) ? (int)max_i64(z->stage, 2) : z->stage;
}
static inline SumPlace zero_sum_place(const Offload *o, const Owners *h, int storage) {
    const bool alone = owner_count(h, storage) == 1 && h->storage[storage].turns;
    return !offload_has(o, storage, STATE_GRADIENT) ? SUM_STAYS
           : alone                                  ? SUM_COMES_BACK
                                                    : SUM_IS_ADDED;
}
// the gradient, from stage 2 on
static inline bool zero_divides(const ZeroPolicy *z, const Owners *h, int storage) {
    return !h->storage[storage].tied && (owner_count(h, storage) > 1 ||
                                         zero_sum_place(z->offload, h, storage) == SUM_COMES_BACK);
}
static inline bool zero_reduces_often(const ZeroPolicy *z, const Owners *h, int storage) {
    return zero_divides(z, h, storage) && zero_gradient_stage(z) >= 2;
}
// Returns whether the slices of parameters are stored outside the slots of whole arrays.
static inline bool zero_param_apart(const ZeroPolicy *z) { return z->quantized_weights; }

// Returns the shared slot of a storage; -1: it has a slot of its own, also if sharing would not
// save memory. on_host: its slice is on the host.
static inline int shared_slot(const Owners *h, int storage, bool apart, bool on_host) {
    const int n = owner_count(h, storage), blocks = h->lists[h->storage[storage].list].blocks;
    const int64_t spared = apart ? blocks : (int64_t)blocks * (n - 1) / n;
    bool shares = h->storage[storage].turns && (on_host || spared >= SHARED_SLOTS);
    return shares ? storage % SHARED_SLOTS : -1;
}
static inline int zero_grad_slot(const ZeroPolicy *z, const Owners *h, int storage) {
    return zero_reduces_often(z, h, storage)
               ? shared_slot(h, storage, z->accumulates,
                             offload_has(z->offload, storage, STATE_GRADIENT))
               : -1;
}
// Returns the slot of borrowed parameters that a pass without training brings a storage into. The
// two storages of a unit have different slots, since both must be there before the unit computes.
static inline int borrowed_slot(const GptModel *m, int storage) {
    return storage == m->classifier ? 0 : storage >= m->first_after ? 1 : storage % BORROWED_SLOTS;
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
        store_slice(gpt_storage_elements(m, storage), owner_count(h, storage), zero_grain(z));
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
        s.of_class[c] = new_array(int64_t, n + 1, "slices");
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
// exchange. partition: this rank's, of hpZ; node: this rank's node; across: the ranks with this
// rank's local index on all nodes. If the owners are not spread evenly over several nodes, node has
// all of them and across only this rank. A rank that is no owner has only `all`, and its slices.
// Slices are in elements (WHOLE, SECONDARY) or in bytes of records (WEIGHTS, GRADIENTS).
typedef enum {
    SLICES_WHOLE,
    SLICES_SECONDARY,
    SLICES_WEIGHTS,
    SLICES_GRADIENTS,
    SLICE_KINDS
} SliceKind;
typedef struct {
    Group all, partition, node, across;
    Slices slices[SLICE_KINDS];
} ProcessGroup;

static inline ProcessGroup process_group_make(const Group *ranks, const int *list, int n,
                                              int partition) {
    ProcessGroup p = {.all = group_part(ranks, list, n)};
    const Group *all = &p.all;
    if (all->me < 0) { return p; }
    int *members = new_array(int, n, "groups"), k = 0;
    for (int i = all->me / partition * partition; i < n && k < partition; i++) { members[k++] = i; }
    p.partition = group_part(all, members, k);
    for (k = 0; k < all->locals; k++) { members[k] = group_at(all, group_node(all, all->me), k); }
    p.node = group_part(all, members, k);
    for (k = 0; k < all->nodes; k++) { members[k] = group_at(all, k, group_local(all, all->me)); }
    p.across = group_part(all, members, k);
    free(members);
    return p;
}
static inline ProcessGroup process_group_of_all(const Group *ranks) {
    int *list = new_array(int, ranks->n, "ranks");
    for (int i = 0; i < ranks->n; i++) { list[i] = i; }
    ProcessGroup p = process_group_make(ranks, list, ranks->n, 1);
    free(list);
    return p;
}
static inline void process_group_slice(ProcessGroup *p, const GptModel *m, const ZeroPolicy *z) {
    const int64_t grain = zero_grain(z);
    p->slices[SLICES_WHOLE] = slices_make(m, p->all.n, grain, NULL);
    if (p->all.me < 0) { return; }
    p->slices[SLICES_SECONDARY] = slices_make(m, p->partition.n, NORM_CHUNK, NULL);
    p->slices[SLICES_WEIGHTS] =
        slices_make(m, p->all.n, grain, z->quantized_weights ? &z->weights : NULL);
    p->slices[SLICES_GRADIENTS] =
        slices_make(m, p->all.n, grain, z->quantized_gradients ? &z->gradients : NULL);
}
static inline void process_group_free(ProcessGroup *p) {
    group_free(&p->all);
    group_free(&p->partition);
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
    return &l->process_groups[l->owners.storage[storage].list];
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
    const int64_t part = bounds_padded(layout_slices(l, SLICES_SECONDARY, storage), p->partition.n);
    return kind == SLICES_WHOLE ? max_i64(all, part) : all;
}
// Returns this rank's index among those slices.
static inline int layout_me(const Layout *l, SliceKind kind, int storage) {
    const ProcessGroup *p = layout_process_group(l, storage);
    return kind == SLICES_SECONDARY ? p->partition.me : p->all.me;
}

static inline Layout layout_make(const GptModel *m, const Group *ranks, const Placement *placement,
                                 const ZeroPolicy *z) {
    Layout l = {m, z->p2p ? owners_of_p2p(m, z->p2p->storage) : owners_make(m, placement), NULL};
    for (int s = 0; s < placement->stages; s++) {
        if (z->partition > placement->stage[s].replicas) {
            die(EXIT_INPUT,
                HINT_ON_RANKS(placement->stage[s].replicas,
                              "a partition is some of a stage's ranks, those of a node"),
                "--zero-hpz-partition-size %d is more than the %d ranks of stage %d", z->partition,
                placement->stage[s].replicas, s);
        }
    }
    l.process_groups = new_array(ProcessGroup, l.owners.count, "process groups");
    for (int i = 0; i < l.owners.count; i++) {
        l.process_groups[i] =
            process_group_make(ranks, l.owners.lists[i].ranks, l.owners.lists[i].n, z->partition);
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

#endif
