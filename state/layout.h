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
// Lists the ranks of these stages in ascending order, of each stage every `step`-th from the one at
// place `first` on, and returns how many they are.
static inline int placement_list_ranks(const Placement *p, const bool *used, int first, int step,
                                       int *ranks) {
    int n = 0;
    for (int s = 0; s < p->stages; s++) {
        const Stage *stage = &p->stage[s];
        for (int i = first; used[s] && i < stage->replicas; i += step) {
            int at = n++;
            for (; at > 0 && ranks[at - 1] > stage->ranks[i]; at--) { ranks[at] = ranks[at - 1]; }
            ranks[at] = stage->ranks[i];
        }
    }
    return n;
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
    int64_t *each; // [all.n + 1] bounds of one element of each member
    Slices slices[SLICE_KINDS];
    // of the storages, those of blocks that may share slots: without experts, of experts
    int blocks[2];
} ProcessGroup;

static inline ProcessGroup process_group_make(const Group *ranks, const int *list, int n,
                                              int partition) {
    ProcessGroup p = {.all = group_part(ranks, list, n)};
    const Group *all = &p.all;
    if (all->me < 0) { return p; }
    p.each = new_array(int64_t, n + 1, "groups");
    for (int i = 0; i <= n; i++) { p.each[i] = i; }
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
    free(p->each);
    for (int k = 0; k < SLICE_KINDS; k++) { slices_free(&p->slices[k]); }
}

#endif
