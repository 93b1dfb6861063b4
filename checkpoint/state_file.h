// state_file.h: the file of a checkpoint with the states of a rank. It holds pieces of storages in
// global coordinates (state, storage, first element, count), in fp32, so any layout can read what
// any other has written: header { magic, version, pieces }, then the table of pieces, then their
// data in the same order (docs/formats.md). Everything that is read is checked before use.
#ifndef STATE_FILE_H
#define STATE_FILE_H

#include "base/base.h"
#include "base/files.h"
#include "checkpoint/model_file.h"
#include "model/architecture.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"

static const uint64_t STATE_MAGIC = 0x7470675f73746174; // "tats_gpt" in the file (little endian)
enum { STATE_VERSION = 1 };
typedef struct {
    uint64_t magic, version, pieces;
} StateHeader;
typedef struct {
    // StateKind; storage number; elements [begin, begin + count) of the storage
    int64_t state, storage, begin, count;
} StatePiece;

// Read and write n elements of a state, from element `at` of what this rank has of it on. The store
// has the previous version of the parameters (cyclic.h) in working precision, files have fp32.
static uint16_t state_halves[STATE_PIECE_FLOATS];
static inline bool state_is_half(const StatePlan *s, StateKind kind) {
    return kind == STATE_PREVIOUS && s->dtype == DTYPE_BF16;
}
static inline void state_to_piece(const Store *s, StateKind kind, int storage, int64_t at,
                                  int64_t n) {
    const bool half = state_is_half(&s->plan, kind);
    store_read_state(s, kind, storage, at, n, half ? (void *)state_halves : state_piece.floats);
    for (int64_t i = 0; half && i < n; i++) {
        state_piece.floats[i] = bf16_to_float(state_halves[i]);
    }
}
static inline void state_from_floats(const Store *s, StateKind kind, int storage, int64_t at,
                                     int64_t n, const float *floats) {
    const bool half = state_is_half(&s->plan, kind);
    for (int64_t i = 0; half && i < n; i++) { state_halves[i] = float_to_bf16(floats[i]); }
    store_write_state(s, kind, storage, at, n, half ? (const void *)state_halves : floats);
    if (kind == STATE_PREVIOUS) { ops_wait(s->memory.stream); }
}
// Returns what this rank writes of a state: its slice, or a whole previous version. Several ranks
// may have that version; its keeper writes it.
static inline StatePiece state_piece_written(const Store *s, int kind, int storage) {
    StatePiece piece = {kind, storage, 0, 0};
    if (kind == STATE_PREVIOUS) {
        piece.count = store_keeps_previous(&s->plan, storage) &&
                              s->memory.comm->rank == s->plan.rows[storage].p2p.keeper
                          ? gpt_storage_elements(s->plan.model, storage)
                          : 0;
    } else if (store_holds(&s->plan, storage)) {
        piece.count = store_own(&s->plan, storage, &piece.begin);
    }
    return piece;
}

// Writes the numbers of a piece, from element `first` of this rank's slice on. Returns whether all
// are finite.
static inline bool state_write_piece(FileWriter *w, const Store *s, const StatePiece *piece,
                                     int64_t first) {
    bool finite = true;
    for (int64_t at = 0, n; at < piece->count; at += n) {
        n = min_i64(STATE_PIECE_FLOATS, piece->count - at);
        state_to_piece(s, piece->state, (int)piece->storage, first + at, n);
        finite &= first_not_finite(state_piece.floats, n) == n;
        writer_add(w, state_piece.bytes, n * sizeof(float));
    }
    return finite;
}
// Writes this rank's slices of all states that it holds. Returns 0, an errno, or STATE_NOT_FINITE
// if a number is NaN or infinite; sets the file's size and checksum.
enum { STATE_NOT_FINITE = -1 };
static inline int state_file_write(const char *path, const Store *s, uint64_t *bytes,
                                   uint64_t *checksum) {
    FileWriter w;
    writer_open(&w, path);
    StateHeader header = {STATE_MAGIC, STATE_VERSION, 0};
    const int storages = s->plan.model->storages;
    bool finite = true;
    for (int pass = 0; pass < 3; pass++) { // count, table, data
        if (pass == 1) { writer_add(&w, &header, sizeof header); }
        for (int i = 0; i < FILE_KINDS * storages; i++) {
            const StateKind kind = i / storages;
            const StatePiece own = state_piece_written(s, kind, i % storages);
            if (!store_has_state(s, kind) ||
                (kind >= STATE_PREVIOUS ? !own.count : !store_holds(&s->plan, i % storages))) {
                continue;
            }
            StorageRun runs[MOST_TENSORS];
            const int count =
                gpt_storage_runs(s->plan.model, own.storage, own.begin, own.count, runs);
            for (int k = 0; k < count; k++) {
                const StatePiece piece = {kind, own.storage, runs[k].whole, runs[k].count};
                header.pieces += pass == 0;
                if (pass == 1) { writer_add(&w, &piece, sizeof piece); }
                const int64_t first = runs[k].begin - own.begin;
                finite &= pass < 2 || state_write_piece(&w, s, &piece, first);
            }
        }
    }
    *bytes = w.sum.length;
    *checksum = checksum_end(&w.sum);
    const int error = writer_close(&w);
    return error || finite ? error : STATE_NOT_FINITE;
}

// Reads exactly n bytes into p, and adds them to *sum unless that is NULL. Returns false at the end
// of the file.
static inline bool read_checked(FILE *f, Checksum *sum, void *p, size_t n) {
    if (fread(p, 1, n, f) != n) { return false; }
    if (sum) { checksum_add(sum, p, n); }
    return true;
}
static inline bool state_piece_fits(const Store *s, const GptModel *from, const StatePiece *p) {
    if (p->state < 0 || p->state >= FILE_KINDS || p->storage < 0 || p->storage >= from->storages) {
        return false;
    }
    int64_t elements = gpt_storage_elements(from, (int)p->storage);
    return p->begin >= 0 && p->count >= 0 && p->begin <= elements &&
           p->count <= elements - p->begin &&
           (p->state >= STATE_PREVIOUS || store_has_state(s, p->state));
}

// Does the store use this kind of state from a file?
static inline bool state_taken(const StatePlan *s, StateKind kind) {
    return kind == STATE_GRADIENT                ? store_delays(s)
           : optimizer_keeps(s->optimizer, kind) ? store_keeps_moment(s, kind)
                                                 : kind != STATE_RESERVED;
}
// Returns how many elements of a state of a storage this rank has; *first: the first of them.
static inline int64_t state_own(const StatePlan *s, StateKind kind, int storage, int64_t *first) {
    if (kind != STATE_PREVIOUS) { return store_own(s, storage, first); }
    *first = 0;
    return store_keeps_previous(s, storage) ? gpt_storage_elements(s->model, storage) : 0;
}
// Does this rank need any element of a piece of `from`, for the storage itself or for its copies?
static inline bool state_wanted(const StatePlan *s, const GptModel *from, const StatePiece *p) {
    StorageRun runs[MOST_TENSORS];
    for (int i = 0; state_taken(s, p->state) && i < s->model->storages; i++) {
        if (gpt_storage_source(from, s->model, i) != p->storage) { continue; }
        int64_t first, own = state_own(s, p->state, i, &first);
        for (int k = own ? gpt_storage_runs(s->model, i, first, own, runs) - 1 : -1; k >= 0; k--) {
            const int64_t end = runs[k].whole + runs[k].count;
            if (p->begin < end && p->begin + p->count > runs[k].whole) { return true; }
        }
    }
    return false;
}
// Stores what this rank needs of n numbers: elements of a state of a storage of `from`, from
// element `at` of the whole model's on. It goes to the storage itself or to its copies.
static inline void state_piece_take(Store *s, const GptModel *from, StateKind kind, int storage,
                                    int64_t at, int64_t n, const float *floats) {
    for (int i = 0; state_taken(&s->plan, kind) && i < s->plan.model->storages; i++) {
        if (gpt_storage_source(from, s->plan.model, i) != storage) { continue; }
        StorageRun runs[MOST_TENSORS];
        int64_t first = 0, own = state_own(&s->plan, kind, i, &first);
        for (int k = gpt_storage_runs(s->plan.model, i, first, own, runs) - 1; k >= 0; k--) {
            const int64_t low = max_i64(at, runs[k].whole),
                          high = min_i64(at + n, runs[k].whole + runs[k].count);
            if (low >= high) { continue; }
            state_from_floats(s, kind, i, runs[k].begin - first + low - runs[k].whole, high - low,
                              floats + (low - at));
        }
    }
}
// Reads the data of a piece and stores what this rank needs. sum NULL: a piece that is not needed
// is skipped. Returns false at the end of the file, or at a number that is NaN or infinite, which
// *why then names.
static inline bool state_piece_read(FILE *f, Store *s, const GptModel *from, const StatePiece *p,
                                    Checksum *sum, Text *why) {
    const int64_t end = p->begin + p->count;
    if (!sum && !state_wanted(&s->plan, from, p)) {
        return !fseeko(f, (off_t)(p->count * (int64_t)sizeof(float)), SEEK_CUR);
    }
    for (int64_t at = p->begin, n; at < end; at += n, keep_alive()) {
        n = min_i64(end - at, STATE_PIECE_FLOATS);
        if (!read_checked(f, sum, state_piece.bytes, (size_t)n * sizeof(float))) { return false; }
        const int64_t bad = first_not_finite(state_piece.floats, n);
        if (bad < n) {
            const Text tensor = model_tensor_name(from, (int)p->storage, at + bad);
            const char *state = state_name((StateKind)p->state);
            *why = model_not_finite(state, tensor.at, state_piece.floats[bad]);
            return false;
        }
        state_piece_take(s, from, p->state, (int)p->storage, at, n, state_piece.floats);
    }
    return true;
}

// Pieces that follow one another add up to what one piece of all of them has: where one ends, the
// next begins, and both terms cancel. With a gap or an overlap some are left.
static inline int64_t state_piece_ends(const StatePiece *p) {
    return (int64_t)(mix64((uint64_t)(p->begin + p->count)) >> 16) -
           (int64_t)(mix64((uint64_t)p->begin) >> 16);
}
// Copies the pieces of a state file, of model `from`, into the store. verify: this rank reads all
// of the file and checks its checksum; otherwise only the pieces that it needs. filled[state *
// storages of `from` + storage] counts elements, and as many numbers behind these say whether
// pieces follow one another without gap or overlap (state_piece_ends). Returns false, with the
// reason, if the file must not be used.
static inline bool state_file_read(const char *path, Store *s, const GptModel *from, bool verify,
                                   uint64_t bytes, uint64_t checksum, int64_t *filled, Text *why) {
    FILE *f = open_regular(path);
    if (!f) {
        *why = text_of("%s: %s", path, strerror(errno));
        return false;
    }
    Checksum checked = checksum_begin(), *sum = verify ? &checked : NULL;
    StateHeader header;
    struct stat info;
    const uint64_t most = FILE_KINDS * from->storages * MOST_TENSORS;
    int64_t *ends = filled + FILE_KINDS * from->storages;
    Text number = text_of("%s", ""); // what is wrong with one
    bool good = !fstat(fileno(f), &info) && (uint64_t)info.st_size == bytes &&
                read_checked(f, sum, &header, sizeof header) && header.magic == STATE_MAGIC &&
                header.version == STATE_VERSION && header.pieces <= most;
    StatePiece *pieces = good ? new_array(StatePiece, header.pieces, "piece table") : NULL;
    good = good && read_checked(f, sum, pieces, header.pieces * sizeof(StatePiece));
    for (uint64_t i = 0; good && i < header.pieces; i++) {
        const StatePiece *piece = &pieces[i];
        good = state_piece_fits(s, from, piece);
        if (!good) { break; }
        const int64_t state = piece->state * from->storages + piece->storage;
        good = state_piece_read(f, s, from, piece, sum, &number);
        filled[state] += piece->count;
        ends[state] += state_piece_ends(piece);
    }
    good = good && (uint64_t)ftello(f) == bytes && (!verify || checksum_end(sum) == checksum);
    if (!good) {
        *why = text_of("%s: %s", path,
                       *number.at ? number.at : "torn or changed (checksum, size or piece table)");
    }
    free(pieces);
    fclose(f);
    return good;
}
// Checks that the files held all elements of each state that this model has.
// filled: [kinds][storages] elements that were read.
static inline bool states_are_whole(const char *folder, const Store *s, const GptModel *from,
                                    const int64_t *filled, Text *why) {
    bool good = true;
    for (int i = 0; good && i < FILE_KINDS * from->storages; i++) {
        int storage = i % from->storages;
        const int64_t elements = gpt_storage_elements(from, storage);
        const StateKind kind = (i / from->storages);
        // 0 elements: that run did not have this state
        int64_t expected = kind >= STATE_PREVIOUS     ? (filled[i] ? elements : 0)
                           : store_has_state(s, kind) ? elements
                                                      : 0;
        const StatePiece all = {kind, storage, 0, expected};
        const int64_t ends = filled[FILE_KINDS * from->storages + i];
        good = filled[i] == expected && ends == (expected ? state_piece_ends(&all) : 0);
        if (!good) {
            *why = text_of("%s: %s of storage %d is not %s", folder, state_name(kind), storage,
                           filled[i] ? "whole" : "there");
        }
    }
    return good;
}

// Does a file have this size and checksum, and no NaN or infinite number?
static inline bool state_file_whole(const char *path, uint64_t bytes, uint64_t checksum) {
    FILE *f = open_regular(path);
    Checksum sum = checksum_begin();
    StateHeader header = {};
    bool good = f && read_checked(f, &sum, &header, sizeof header);
    size_t table = good ? header.pieces * sizeof(StatePiece) : 0;
    for (size_t n; good && (n = fread(state_piece.bytes, 1, sizeof state_piece.bytes, f)) > 0;
         keep_alive()) {
        const size_t skipped = table < n ? table : n; // numbers begin after the table
        const int64_t numbers = (int64_t)((n - skipped) / sizeof(float));
        checksum_add(&sum, state_piece.bytes, n);
        good = first_not_finite(state_piece.floats + skipped / sizeof(float), numbers) == numbers;
        table -= skipped;
    }
    if (f) { fclose(f); }
    return good && sum.length == bytes && checksum_end(&sum) == checksum;
}

#endif
