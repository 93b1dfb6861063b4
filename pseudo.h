// pseudo.h: Pseudo-to-Real training (Lin et al., M6-10T, arXiv 2110.03888) by sharing weights (Yang
// et al., SWE, arXiv 2110.03848).
//
// Sharing     --share says which blocks use one storage (gpt.h: GptShare): all of them, N
//             consecutive ones, or AxB: A distinct blocks, this whole sequence B times. Nothing
//             else changes: a block computes what it would with a copy of its own. Its gradient is
//             added to those of the others, in fp32, wherever they are: on one rank, in several
//             stages of a pipeline (layout.h: tied), in slices. The gradient of the storage is the
//             mean over its layers (update.h: store_mean), and counts once in the norm. States,
//             traffic and checkpoints shrink accordingly.
// Delinking   at step --delink-at, or at the start with --delink: each block gets a copy of the
//             storage that it shared, and of its moments. So the function stays the same, bit by
//             bit, and so do the first updates, except that gradients are now those of each layer.
//             The moments of a mean gradient fit copies with similar gradients; otherwise v is too
//             small by up to the number of layers, for about 1 / (1 - beta2) updates.
//             --delink-warmup N raises the learning rate again from zero; --delink-moments reset
//             clears moments and counters.
// Transition  Delinking changes the layout between two steps. Only states survive from the old
//             model, and they leave the device, so that nothing is stored there twice: the budgets
//             of offload.h hold in both layouts and between them, and all of it is predicted at the
//             start (memory_plan.h: plan_delinked). All states pass through all ranks once, a
//             piece at a time, as they would from a checkpoint. So any layout can follow any other.
#ifndef PSEUDO_H
#define PSEUDO_H

#include "base/base.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/state_file.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "model/architecture.h"
#include "model/gpt.h"
#include "options.h"
#include "state/gather.h"
#include "state/layout.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"
#include "state/table.h"

// Returns what --share says for a model of so many layers. Ends the program (2) if the text is
// malformed, or does not fit the model.
static inline GptShare share_parse(const char *text, int64_t layers) {
    const char *hint = "none, all, N (blocks that follow each other) or AxB (A distinct blocks, "
                       "repeated B times), such as 4 or 2x6";
    long long a = 0, b = 0;
    int used = 0;
    if (!strcmp(text, "none")) { return GPT_SHARE_NONE; }
    if (!strcmp(text, "all")) { return gpt_share(layers, layers, 0); }
    if (sscanf(text, "%9lld%n", &a, &used) == 1 && !text[used] && isdigit((unsigned char)*text)) {
        if (a < 1 || a > layers) {
            die(EXIT_INPUT, hint, "--share %.40s: the model has %" PRId64 " blocks", text, layers);
        }
        return gpt_share(layers, a, 0);
    }
    if (sscanf(text, "%9lldx%9lld%n", &a, &b, &used) != 2 || text[used] ||
        !isdigit((unsigned char)*text) || !isdigit((unsigned char)strchr(text, 'x')[1])) {
        die(EXIT_INPUT, hint, "--share takes none, all, N or AxB, found \"%.40s\"", text);
    }
    if (a < 1 || b < 1 || a * b != layers) {
        die(EXIT_INPUT, hint,
            "--share %.40s: %lld times %lld is not the model's %" PRId64 " blocks", text, a, b,
            layers);
    }
    return gpt_share(layers, layers, a);
}
// -------------------------------------------------------------------------------------------------
// Delinking

// Is this state copied? Moments that are reset are not.
static inline bool delink_copies(const StatePlan *from, int kind, int storage, int64_t moments) {
    return kind == STATE_MASTER ||
           (kind != STATE_PREVIOUS &&
            (moments != DELINK_RESET || !gpt_storage_is_block(from->model, storage)));
}
// Returns the bytes of this rank's slice of a state that is copied.
static inline size_t delink_state_bytes(const StatePlan *from, int kind, int storage,
                                        int64_t moments) {
    return delink_copies(from, kind, storage, moments)
               ? store_own_elements(from, storage) * sizeof(float)
               : 0;
}
// Returns the bytes that the shared model's states take on the host during delinking, in addition
// to those of the copies. States on disk count with their buffers, through which they are read.
static inline size_t delink_host_bytes(const StatePlan *from, int64_t moments) {
    const int storages = from->model->storages;
    size_t bytes = from->disk_buffers.held;
    for (int i = 0; i < FILE_KINDS * storages; i++) {
        const bool copied = store_plan_has_state(from, i / storages) &&
                            store_place(from, i / storages, i % storages) != PLACE_DISK;
        bytes += copied ? delink_state_bytes(from, i / storages, i % storages, moments) : 0;
    }
    return bytes;
}
// Copies states from the device to the host, so that the device never holds two models. Returns
// [kinds][storages] this rank's slices; NULL: nothing to copy, or it is on the host or on disk
// already, and stays there until it has been copied.
static inline float **delink_pack(const Store *from, int64_t moments) {
    const int storages = from->plan.model->storages;
    float **packed = new_array(float *, FILE_KINDS *storages, "shared states");
    for (int i = 0; i < FILE_KINDS * storages; i++) {
        const size_t bytes = delink_state_bytes(&from->plan, i / storages, i % storages, moments);
        if (!bytes || !store_has_state(from, i / storages) ||
            store_place(&from->plan, i / storages, i % storages) != PLACE_DEVICE) {
            continue;
        }
        packed[i] = (float *)checked_malloc(bytes, "shared states");
        store_read_state(from, i / storages, i % storages, 0, bytes / sizeof(float), packed[i]);
    }
    return packed;
}
// Copies a state of a storage from the ranks that own slices of it to all its copies in `to`, which
// some of these ranks have. mine:
// this rank's slice, if it was on the device.
static inline void delink_state(Store *to, const Store *from, const float *mine, StateKind kind,
                                int storage) {
    const Group *owners = &from->plan.rows[storage].owners->all;
    const int64_t *bounds = store_slices(&from->plan, storage);
    StorageRun runs[MOST_TENSORS];
    for (int i = 0; i < owners->n && owners->me >= 0; i++) {
        for (int64_t at = bounds[i], n; at < bounds[i + 1]; at += n) {
            n = min_i64(STATE_PIECE_FLOATS, bounds[i + 1] - at);
            if (owners->me == i) {
                if (mine) {
                    memcpy(state_piece.floats, mine + (at - bounds[i]), n * sizeof(float));
                } else {
                    store_read_state(from, kind, storage, at - bounds[i], n, state_piece.floats);
                }
            }
            comm_broadcast_in(from->memory.comm, owners, state_piece.bytes,
                              (size_t)n * sizeof(float), i);
            for (int k = gpt_storage_runs(from->plan.model, storage, at, n, runs) - 1; k >= 0;
                 k--) {
                state_piece_take(to, from->plan.model, kind, storage, runs[k].whole, runs[k].count,
                                 state_piece.floats + (runs[k].begin - at));
            }
        }
    }
}
// Fills the masters and moments of `to`, whose blocks do not share as those of `from` do. packed:
// from delink_pack; freed storage by storage. *p notes the delinking. All ranks call it.
static inline void delink_states(Store *to, const Store *from, float **packed, int64_t moments,
                                 Progress *p) {
    for (int kind = STATE_MASTER; kind < FILE_KINDS; kind++) {
        for (int i = 0; i < from->plan.model->storages && store_has_state(from, kind); i++) {
            float *mine = packed[kind * from->plan.model->storages + i];
            if (delink_copies(&from->plan, kind, i, moments)) {
                delink_state(to, from, mine, kind, i);
            }
            free(mine);
        }
    }
    free(packed);
    // their memory or file may hold those of an earlier model (trainer.h: Run)
    if (moments == DELINK_RESET) { store_reset_blocks(to); }
    p->delinked = p->step;
    p->restarted = moments == DELINK_RESET ? p->updates : 0;
    store_count_updates(to, p);
    store_masters_changed(to);
}
// Returns the factor by which --share-lr and --delink-warmup change a step's learning rate.
static inline double delink_rate(const Options *o, const GptModel *m, const Progress *p) {
    const int64_t since = p->step - p->delinked;
    const double shared = share_is(m->share) && o->share_lr > 0 ? o->share_lr / o->lr : 1;
    return shared *
           (p->delinked && since < o->delink_warmup ? (since + 1) / (double)o->delink_warmup : 1);
}

#endif
