// pseudo.h: Pseudo-to-Real training (Lin et al., M6-10T, arXiv 2110.03888) by sharing weights (Yang et al., SWE, arXiv 2110.03848).
//
// Shared     --share says which blocks use one storage (gpt.h: GptShare): all of them, N that follow each other, or AxB: A distinct blocks, the whole
//            row of them B times. Nothing else changes: a block computes what it would with its own copy, and its gradient is added to that of the
//            others, in fp32, wherever they are: one rank, several stages of a pipeline (layout.h: tied), slices. The gradient of the storage is
//            the mean of its layers' (zero.h: store_mean), and it counts once in the norm; states, traffic and checkpoints are as much smaller.
// Delinked   at --delink-at, or at the beginning with --delink, each block gets a copy of the storage it shared, and of its moments. So the function is
//            the same, bit by bit, and so are the first updates but for the gradients, which are now each layer's own. The moments of the mean gradient
//            fit copies whose gradients are alike; where they are not, v is too small by up to the number of layers, for 1 / (1 - beta2) updates:
//            --delink-warmup N lets the rate rise anew, --delink-moments reset begins moments and counters anew; measured: v is the moving average of
//            the mean of the layers' squares, measured while they share (planned.h: measured). Each layer's gradient is apart until the end of a step then.
// Gradual    --delink-gradual cuts groups in two, again and again: halves at given steps, or before the layer whose gradient is least like that of the one
//            before it (SWE-M). Each cut is a switch as above, to a model in which fewer blocks share.
// Switch     a change of layout between two steps. Of the model before only states stay, and these leave the device, so that nothing is there twice: the
//            budgets of offload.h hold in both layouts and between them, and all of it is forecast at the start (placing.h: foresee).
// When       --delink-auto looks every --delink-every steps whether the gradients of layers that follow each other have become unlike (SWE-A). A look
//            makes them one by one, in passes of the step's samples without an update: so it needs no memory but a slice, and any layout can.
//            All states pass by all ranks once, a piece at a time, as they would from a checkpoint: so every layout can follow every other.
#ifndef PSEUDO_H
#define PSEUDO_H

#include "checkpoint.h" // states in pieces
#include "options.h"    // --share, --delink-...

// What --share says for a model of so many layers. Ends the program where that is no such text, or does not fit.
static inline GptShare share_parse(const char *text, int64_t layers) {
    const char *hint = "none, all, N (blocks that follow each other) or AxB (A distinct blocks, repeated B times), such as 4 or 2x6";
    long long a = 0, b = 0;
    int used = 0;
    if (!strcmp(text, "none")) { return GPT_SHARE_NONE; }
    if (!strcmp(text, "all")) { return gpt_share(layers, layers, 0); }
    if (sscanf(text, "%9lld%n", &a, &used) == 1 && !text[used] && isdigit((unsigned char)*text)) {
        if (a < 1 || a > layers) { die(EXIT_INPUT, hint, "--share %.40s: the model has %" PRId64 " blocks", text, layers); }
        return gpt_share(layers, a, 0);
    }
    if (sscanf(text, "%9lldx%9lld%n", &a, &b, &used) != 2 || text[used] || !isdigit((unsigned char)*text) || !isdigit((unsigned char)strchr(text, 'x')[1])) {
        die(EXIT_INPUT, hint, "--share takes none, all, N or AxB, found \"%.40s\"", text);
    }
    if (a < 1 || b < 1 || a * b != layers) {
        die(EXIT_INPUT, hint, "--share %.40s: %lld times %lld is not the model's %" PRId64 " blocks", text, a, b, layers);
    }
    return gpt_share(layers, layers, a);
}
// Are groups of `of` cut into those of `parts`?
static inline bool share_is_cut(const GptShare *of, const GptShare *parts, int64_t layers) {
    for (int64_t l = 0; share_is(parts) && l < layers; l++) {
        if (!share_is(of) || of->first[l] != of->first[parts->first[l]]) { return false; }
    }
    return true;
}
// The groups of a model cut in two, or more, before each layer that is marked. [layers]
static inline GptShare share_cut(const GptModel *m, const bool *cut) {
    GptShare parts = GPT_SHARE_NONE;
    for (int i = 2; i < m->storages - 1; i++) {
        int64_t first = gpt_first_layer(m, i);
        for (int64_t layer = first; layer >= 0; layer = gpt_next_layer(m, layer)) {
            first = cut[layer] ? layer : first;
            parts.first[layer] = (uint16_t)first;
        }
    }
    share_close(&parts, m->config.layers);
    return parts;
}
// How a gradual delink cuts groups: in halves, of an odd number the first one is longer; and, for forecasts of cuts that nobody knows yet, in pairs, and in
// single layers but for the first pair: whatever takes most memory on the way is one of these.
typedef enum { CUT_HALVES, CUT_PAIRS, CUT_ALL_BUT_ONE } ShareCut;
static inline GptShare share_parts(const GptModel *m, ShareCut how) {
    bool *cut = (bool *)checked_calloc((size_t)m->config.layers, sizeof(bool), "groups"), pair = false;
    for (int64_t l = 0; l < m->config.layers; l++) {
        const int64_t users = gpt_storage_shared_by(m, gpt_storage_of_layer(m, l)), user = gpt_layer_user(m, l);
        const bool kept = how == CUT_ALL_BUT_ONE && user == 1 && !pair;
        cut[l] = user && !kept && (how == CUT_HALVES ? user == ceil_div(users, 2) : how == CUT_ALL_BUT_ONE || user % 2 == 0);
        pair = pair || kept;
    }
    const GptShare parts = share_cut(m, cut);
    free(cut);
    return parts;
}

// ---------------------------------------------------------------------------------------------------------------------
// Delinking

// Of moments that begin anew nothing is copied; what was measured takes the place of v.
static inline bool delink_copies(const Store *from, int kind, int storage, int64_t moments) {
    if (kind == STATE_MEASURED && !store_measures(from, storage)) { return false; }
    return kind == STATE_MASTER || (kind != STATE_PREVIOUS && (moments != DELINK_RESET || gpt_storage_class(from->model, storage) != STORAGE_BLOCK));
}
// Bytes of my slice of a state that is copied.
static inline size_t delink_state_bytes(const Store *from, int kind, int storage, int64_t moments) {
    return store_has_state(from, (StateKind)kind) && delink_copies(from, kind, storage, moments) ? (size_t)store_own_elements(from, storage) * sizeof(float)
                                                                                                 : 0;
}
// What lies on the host of a shared model's states at the switch, beside those of the copies. Those on disk come from there, through their rooms.
static inline size_t delink_host_bytes(const Store *from, int64_t moments) {
    const int storages = from->model->storages;
    size_t bytes = from->disk_rooms.held;
    for (int i = 0; i < STATE_KINDS * storages; i++) {
        const bool stored = store_on_disk(from, (StateKind)(i / storages), i % storages);
        bytes += stored ? 0 : delink_state_bytes(from, i / storages, i % storages, moments);
    }
    return bytes;
}
// The layout changes while states are on their way: those that lie on the device leave it, so that nothing is there twice. [kinds][storages] my slices;
// NULL: there is nothing to be copied, or it lies on the host or on disk anyway, and stays there until it has been copied.
static inline float **delink_pack(const Store *from, int64_t moments) {
    const int storages = from->model->storages;
    float **packed = (float **)checked_calloc((size_t)(STATE_KINDS * storages), sizeof(float *), "shared states");
    for (int i = 0; i < STATE_KINDS * storages; i++) {
        const size_t bytes = delink_state_bytes(from, i / storages, i % storages, moments);
        if (!bytes || store_on_host(from, (StateKind)(i / storages), i % storages)) { continue; }
        packed[i] = (float *)checked_malloc(bytes, "shared states");
        store_read_state(from, (StateKind)(i / storages), i % storages, 0, (int64_t)(bytes / sizeof(float)), packed[i]);
    }
    return packed;
}
// A state of a storage, from those who own slices of it to all of its copies in `to`. mine: my slice, where it has left the device.
static inline void delink_state(Store *to, const Store *from, const float *mine, StateKind kind, int storage) {
    const Party *party = store_party(from, storage);
    Slices slices = slices_make(from->model, party->all.n, zero_grain(&from->policy), NULL);
    const int64_t *bounds = slices.of_class[gpt_storage_class(from->model, storage)];
    for (int i = 0; i < party->all.n; i++) {
        for (int64_t at = bounds[i], n; at < bounds[i + 1]; at += n) {
            n = min_i64(STATE_PIECE_FLOATS, bounds[i + 1] - at);
            if (from->comm->rank == party->all.ranks[i]) {
                if (mine) {
                    memcpy(state_piece.floats, mine + (at - bounds[i]), (size_t)n * sizeof(float));
                } else {
                    store_read_state(from, kind, storage, at - bounds[i], n, state_piece.floats);
                }
            }
            comm_broadcast(from->comm, state_piece.bytes, (size_t)n * sizeof(float), party->all.ranks[i]);
            state_piece_take(to, from->model, kind, storage, at, n);
        }
    }
    slices_free(&slices);
}
// Moments that begin anew: their places may have been another model's (trainer.h: files).
static inline void delink_clear_moments(Store *to) {
    for (int i = 0; i < to->model->storages; i++) {
        const bool block = gpt_storage_class(to->model, i) == STORAGE_BLOCK && store_own_elements(to, i) > 0;
        for (int kind = STATE_M; block && kind <= STATE_V; kind++) {
            if (store_has_state(to, (StateKind)kind)) { store_clear_state(to, (StateKind)kind, i); }
        }
    }
}
// Fills the masters and moments of `to`, in whose model fewer blocks share than in `from`'s. packed: of delink_pack, given back storage by storage.
// *p: notes it. All ranks call it.
static inline void delink_states(Store *to, const Store *from, float **packed, int64_t moments, Progress *p) {
    for (int kind = STATE_MASTER; kind < STATE_KINDS; kind++) {
        for (int i = 0; i < from->model->storages && store_has_state(from, (StateKind)kind); i++) {
            float *mine = packed[kind * from->model->storages + i];
            if (delink_copies(from, kind, i, moments)) { delink_state(to, from, mine, (StateKind)kind, i); }
            free(mine);
        }
    }
    free(packed);
    if (moments == DELINK_RESET) { delink_clear_moments(to); }
    p->delinked = p->step, p->restarted = moments == DELINK_RESET ? p->updates : 0;
    store_count_updates(to, p), store_masters_changed(to);
}
// What --share-lr and --delink-warmup make of the learning rate of a step, as a factor.
static inline double delink_rate(const Options *o, const GptModel *m, const Progress *p) {
    const int64_t since = p->step - p->delinked;
    const double shared = share_is(&m->share) && o->share_lr > 0 && o->lr > 0 ? o->share_lr / o->lr : 1;
    return shared * (p->delinked && since < o->delink_warmup ? (double)(since + 1) / (double)o->delink_warmup : 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Looking whether it is time (--delink-auto)
enum { LOOKS_IN_A_ROW = 3 };
typedef struct {
    double *cosine; // [layers] of its gradient and that of the layer before it of those that share with it; NAN: it is the first
    int pairs, unlike;
    double *square; // [storages] of the layer before
} Look;
static inline Look look_make(const GptModel *m) {
    Look look = {(double *)checked_calloc((size_t)m->config.layers, sizeof(double), "look"), 0, 0,
                 (double *)checked_calloc((size_t)m->storages, sizeof(double), "look")};
    for (int64_t layer = 0; layer < m->config.layers; layer++) { look.cosine[layer] = (double)NAN; }
    return look;
}
static inline void look_free(Look *look) { free(look->cosine), free(look->square); }
// How many layers the largest group has.
static inline int64_t look_passes(const GptModel *m) {
    int64_t most = 0;
    for (int i = 0; i < m->storages; i++) { most = max_i64(most, gpt_storage_shared_by(m, i)); }
    return most;
}
// The gradient of each storage's `user`-th layer is there. |a + b|^2 = |a|^2 + |b|^2 + 2 ab. All ranks call it, and get the same.
static inline void look_at(Look *look, Store *s, int64_t user, int64_t step, double below) {
    for (int i = 0; i < s->model->storages; i++) {
        if (gpt_storage_shared_by(s->model, i) <= max_i64(1, user)) { continue; }
        double square, both;
        int64_t layer = gpt_first_layer(s->model, i);
        while (gpt_layer_user(s->model, layer) < user) { layer = gpt_next_layer(s->model, layer); }
        store_look(s, i, step, &square, &both);
        const double norms = sqrt(square * look->square[i]), product = (both - square - look->square[i]) / 2;
        if (user) {
            look->cosine[layer] = norms > 0 ? product / norms : 0;
            look->pairs++, look->unlike += !(norms > 0 && product >= below * norms);
        }
        look->square[i] = square;
    }
}
// A group is cut in two before the layer whose gradient is least like that of the one before it, where they are unlike (SWE-M).
static inline GptShare look_cut(const Look *look, const GptModel *m, double below) {
    bool *cut = (bool *)checked_calloc((size_t)m->config.layers, sizeof(bool), "groups");
    for (int i = 2; i < m->storages - 1; i++) {
        int64_t least = -1; // the first layer has no cosine
        for (int64_t layer = gpt_next_layer(m, gpt_first_layer(m, i)); layer >= 0; layer = gpt_next_layer(m, layer)) {
            if (look->cosine[layer] < below && (least < 0 || look->cosine[layer] < look->cosine[least])) { least = layer; }
        }
        if (least >= 0) { cut[least] = true; }
    }
    const GptShare parts = share_cut(m, cut);
    free(cut);
    return parts;
}
// Is it time? More than half of the pairs were unlike, and so at the looks before.
static inline bool look_decide(const Look *look, Progress *p) {
    p->unlike = 2 * look->unlike > look->pairs ? p->unlike + 1 : 0;
    return p->unlike >= LOOKS_IN_A_ROW;
}

#endif
