// checkpoint.h: training states on disk. docs/formats.md describes every byte.
//
// Checkpoint  A folder OUT/step_00000020 with one state file for each rank, and a manifest. A state
//             file holds pieces of storages in global coordinates (state, storage, first element,
//             count), in fp32, so any layout can read what any other has written. The manifest is
//             text: the step, the data position, the counters, the size and checksum of every file,
//             and a checksum of itself in its last line.
// Atomic      Everything is written into OUT/step_00000020.tmp with fsync, the manifest last; then
//             the folder is renamed. A folder without a complete manifest does not count. A kill at
//             any instant loses no complete checkpoint.
// Untrusted   Everything that is read is checked before use: sizes, ranges, checksums.
// Foreign     Only files that this program writes are removed, by their exact names, and no link is
//             followed: a checkpoint may be a link to a folder elsewhere, which is read, but which
//             --keep does not touch.
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "engine/privacy.h"   // the history of private steps
#include "model/model_file.h" // writing files, states

#include <dirent.h>      // folders
#include <sys/file.h>    // flock
#include <sys/syscall.h> // renameat2

// -------------------------------------------------------------------------------------------------
// State files: header { magic, version, pieces }, then the table of pieces, then their data in the
// same order.
static const uint64_t STATE_MAGIC = 0x7470675f73746174; // "tats_gpt" in the file (little endian)
enum { STATE_VERSION = 1 };
typedef struct {
    uint64_t magic, version, pieces;
} StateHeader;
typedef struct {
    // StateKind; storage number; elements [begin, begin + count) of the storage
    int64_t state, storage, begin, count;
} StatePiece;

// Copies n elements of the previous version of the parameters (cyclic.h) to state_piece, or from
// it. The store has them in working precision, files have fp32.
static uint16_t state_halves[STATE_PIECE_FLOATS];
static inline void previous_to_host(const Store *s, int storage, int64_t at, int64_t n) {
    const bool half = s->dtype == DTYPE_BF16;
    store_read_state(s, STATE_PREVIOUS, storage, at, n,
                     half ? (void *)state_halves : (void *)state_piece.floats);
    for (int64_t i = 0; half && i < n; i++) {
        state_piece.floats[i] = bf16_to_float(state_halves[i]);
    }
}
static inline void previous_from_host(const Store *s, int storage, int64_t at, int64_t n) {
    const bool half = s->dtype == DTYPE_BF16;
    for (int64_t i = 0; half && i < n; i++) {
        state_halves[i] = float_to_bf16(state_piece.floats[i]);
    }
    store_write_state(s, STATE_PREVIOUS, storage, at, n,
                      half ? (void *)state_halves : (void *)state_piece.floats);
    ops_wait(s->stream);
}
static inline void writer_add_previous(FileWriter *w, const Store *s, int storage) {
    const int64_t elements = gpt_storage_elements(s->model, storage);
    for (int64_t at = 0, n; at < elements; at += n) {
        n = min_i64(STATE_PIECE_FLOATS, elements - at);
        previous_to_host(s, storage, at, n);
        writer_add(w, state_piece.bytes, (size_t)n * sizeof(float));
    }
}
// Returns what this rank writes of a state: its slice, or a whole previous version. Several ranks
// may have that version; its keeper writes it.
static inline StatePiece state_piece_written(const Store *s, int kind, int storage) {
    StatePiece piece = {kind, storage, 0, 0};
    if (kind == STATE_PREVIOUS) {
        piece.count =
            store_keeps_previous(s, storage) && s->comm->rank == s->policy.p2p->keeper[storage]
                ? gpt_storage_elements(s->model, storage)
                : 0;
    } else if (store_holds(s, storage)) {
        piece.count = store_own(s, storage, &piece.begin);
    }
    return piece;
}

// Writes this rank's slices of all states that it holds. Returns 0 or an errno; sets the file's
// size and checksum.
static inline int state_file_write(const char *path, const Store *s, uint64_t *bytes,
                                   uint64_t *checksum) {
    FileWriter w;
    writer_open(&w, path);
    StateHeader header = {STATE_MAGIC, STATE_VERSION, 0};
    for (int pass = 0; pass < 3; pass++) { // count, table, data
        if (pass == 1) { writer_add(&w, &header, sizeof header); }
        for (int kind = 0; kind < FILE_KINDS; kind++) {
            for (int storage = 0;
                 storage < s->model->storages && store_has_state(s, (StateKind)kind); storage++) {
                const StatePiece piece = state_piece_written(s, kind, storage);
                if (kind >= STATE_PREVIOUS ? !piece.count : !store_holds(s, storage)) { continue; }
                if (pass == 0) { header.pieces++; }
                if (pass == 1) { writer_add(&w, &piece, sizeof piece); }
                if (pass == 2 && kind == STATE_PREVIOUS && piece.count) {
                    writer_add_previous(&w, s, storage);
                }
                if (pass == 2 && kind != STATE_PREVIOUS) {
                    writer_add_state(&w, s, (StateKind)kind, storage, piece.count);
                }
            }
        }
    }
    *bytes = w.sum.length;
    *checksum = checksum_end(&w.sum);
    return writer_close(&w);
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
           (p->state >= STATE_PREVIOUS || store_has_state(s, (StateKind)p->state));
}

// Does the store use this kind of state from a file?
static inline bool state_taken(const Store *s, StateKind kind) {
    return kind != STATE_RETIRED && (kind != STATE_GRADIENT || store_delays(s));
}
// Returns how many elements of a state of a storage this rank has; *first: the first of them.
static inline int64_t state_own(const Store *s, StateKind kind, int storage, int64_t *first) {
    if (kind != STATE_PREVIOUS) { return store_own(s, storage, first); }
    *first = 0;
    return store_keeps_previous(s, storage) ? gpt_storage_elements(s->model, storage) : 0;
}
// Does this rank need any element of a piece of `from`, for the storage itself or for its copies?
static inline bool state_wanted(const Store *s, const GptModel *from, const StatePiece *p) {
    for (int i = 0; state_taken(s, (StateKind)p->state) && i < s->model->storages; i++) {
        if (gpt_storage_source(from, s->model, i) != p->storage) { continue; }
        int64_t first, own = state_own(s, (StateKind)p->state, i, &first);
        if (own && p->begin < first + own && p->begin + p->count > first) { return true; }
    }
    return false;
}
// Stores what this rank needs of the n elements in state_piece: those of a state of a storage of
// `from`, from element `at` on. It goes to the storage itself or to its copies.
static inline void state_piece_take(Store *s, const GptModel *from, StateKind kind, int storage,
                                    int64_t at, int64_t n) {
    for (int i = 0; state_taken(s, kind) && i < s->model->storages; i++) {
        if (gpt_storage_source(from, s->model, i) != storage) { continue; }
        int64_t first = 0, own = state_own(s, kind, i, &first), low = max_i64(at, first),
                high = min_i64(at + n, first + own);
        if (low >= high) { continue; }
        if (kind == STATE_PREVIOUS) {
            previous_from_host(s, i, at, n);
        } else {
            store_write_state(s, kind, i, low - first, high - low, state_piece.floats + (low - at));
        }
    }
}
// Reads the data of a piece and stores what this rank needs. sum NULL: a piece that is not needed
// is skipped.
static inline bool state_piece_read(FILE *f, Store *s, const GptModel *from, const StatePiece *p,
                                    Checksum *sum) {
    const int64_t end = p->begin + p->count;
    if (!sum && !state_wanted(s, from, p)) {
        return !fseeko(f, (off_t)(p->count * (int64_t)sizeof(float)), SEEK_CUR);
    }
    for (int64_t at = p->begin, n; at < end; at += n, keep_alive()) {
        n = min_i64(end - at, STATE_PIECE_FLOATS);
        if (!read_checked(f, sum, state_piece.bytes, (size_t)n * sizeof(float))) { return false; }
        state_piece_take(s, from, (StateKind)p->state, (int)p->storage, at, n);
    }
    return true;
}

// Copies the pieces of a state file, of model `from`, into the store. verify: this rank reads all
// of the file and checks its checksum; otherwise only the pieces that it needs. filled[state *
// storages of `from` + storage] counts elements: pieces must follow one another without gap or
// overlap, in the order of the files. Returns false, with the reason, if the file must not be used.
static inline bool state_file_read(const char *path, Store *s, const GptModel *from, bool verify,
                                   uint64_t bytes, uint64_t checksum, int64_t *filled, char *why,
                                   size_t why_bytes) {
    FILE *f = open_regular(path);
    if (!f) {
        snprintf(why, why_bytes, "%s: %s", path, strerror(errno));
        return false;
    }
    Checksum checked = checksum_begin(), *sum = verify ? &checked : NULL;
    StateHeader header;
    struct stat info;
    uint64_t most = (uint64_t)FILE_KINDS * (uint64_t)from->storages;
    bool good = !fstat(fileno(f), &info) && (uint64_t)info.st_size == bytes &&
                read_checked(f, sum, &header, sizeof header) && header.magic == STATE_MAGIC &&
                header.version == STATE_VERSION && header.pieces <= most;
    StatePiece *pieces = good ? (StatePiece *)checked_malloc(
                                    (size_t)header.pieces * sizeof(StatePiece), "piece table")
                              : NULL;
    good = good && read_checked(f, sum, pieces, (size_t)header.pieces * sizeof(StatePiece));
    for (uint64_t i = 0; good && i < header.pieces; i++) {
        const StatePiece *piece = &pieces[i];
        good = state_piece_fits(s, from, piece);
        if (!good) { break; }
        int64_t *count = &filled[piece->state * from->storages + piece->storage];
        good = piece->begin == *count && state_piece_read(f, s, from, piece, sum);
        *count += piece->count;
    }
    good = good && (uint64_t)ftello(f) == bytes && (!verify || checksum_end(sum) == checksum);
    if (!good) {
        snprintf(why, why_bytes, "%s: torn or changed (checksum, size or piece table)", path);
    }
    free(pieces);
    fclose(f);
    return good;
}

// -------------------------------------------------------------------------------------------------
// Manifest
enum { OUTLIER_WINDOW = 128, MANIFEST_MAX = 1 << 22, MANIFEST_FILES = 1 << 16 };
// largest accepted counter: a run can continue from it without overflow
static const int64_t MANIFEST_COUNT_MAX = INT64_C(1) << 60;

// Running statistics for --skip-loss-z and --skip-grad-z: the last values, in a ring buffer.
typedef struct {
    int64_t count; // number of all values so far
    double values[OUTLIER_WINDOW];
} OutlierWindow;

// Adds a value and returns by how many standard deviations it exceeds the mean of the last
// OUTLIER_WINDOW values, itself included; NAN while there are fewer.
static inline double outlier_z(OutlierWindow *w, double value) {
    w->values[w->count++ % OUTLIER_WINDOW] = value;
    if (w->count < OUTLIER_WINDOW) { return NAN; }
    double mean = 0, variance = 0;
    for (int i = 0; i < OUTLIER_WINDOW; i++) { mean += w->values[i] / OUTLIER_WINDOW; }
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        variance += (w->values[i] - mean) * (w->values[i] - mean) / OUTLIER_WINDOW;
    }
    return variance > 0 ? (value - mean) / sqrt(variance) : 0;
}

// The position of a run: what a resumed run needs in addition to the states.
typedef struct {
    int64_t step;     // updates taken or skipped
    int64_t position; // samples consumed
    int64_t updates;  // updates made: they count for the moments
    // step at which blocks that shared their parameters were delinked; 0: never
    int64_t delinked;
    int64_t restarted;   // updates made before the moments of blocks were reset (planned.h)
    double pending_norm; // of the gradient whose update is pending (--offload-delay)
    OutlierWindow loss, norm;
    // algorithms of matrix products; NULL or none: no choice was made
    const MatmulChoices *matmuls;
    // settings of the private steps so far (privacy.h), "none" if there were none; "" before any
    // checkpoint
    char privacy[PRIVACY_HISTORY_MAX];
} Progress;

typedef struct {
    char *text;
    size_t length, capacity;
} TextBuffer;
__attribute__((format(printf, 2, 3))) static inline void text_add(TextBuffer *t, const char *format,
                                                                  ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (t->length + (size_t)n + 1 > t->capacity) {
        t->capacity = 2 * t->capacity + (size_t)n + 1024;
        t->text = (char *)realloc(t->text, t->capacity);
        if (!t->text) { die(EXIT_RESOURCES, NULL, "cannot hold a text of %zu bytes", t->capacity); }
    }
    va_start(args, format);
    vsnprintf(t->text + t->length, (size_t)n + 1, format, args);
    va_end(args);
    t->length += (size_t)n;
}

static inline void manifest_add_window(TextBuffer *t, const char *name, const OutlierWindow *w) {
    text_add(t, "%s %" PRId64, name, w->count);
    for (int i = 0; i < OUTLIER_WINDOW && i < w->count; i++) { text_add(t, " %a", w->values[i]); }
    text_add(t, "\n");
}
// Returns what follows `key ` in the manifest's line of that key, or NULL. Lines end with \n, the
// text with 0.
static inline const char *manifest_line(const char *text, const char *key) {
    size_t n = strlen(key);
    for (const char *line = text; line && *line;
         line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (!strncmp(line, key, n) && line[n] == ' ') { return line + n + 1; }
    }
    return NULL;
}
static inline bool manifest_int(const char *text, const char *key, int64_t *value) {
    const char *line = manifest_line(text, key);
    char *end = NULL;
    if (line) { *value = strtoll(line, &end, 10); }
    return line && end != line && *end == '\n' && *value >= 0 && *value <= MANIFEST_COUNT_MAX;
}
// Reads a counter, or 0 if the line is missing. Returns false if the line is malformed.
static inline bool manifest_count_or_none(const char *text, const char *key, int64_t *value) {
    *value = 0;
    return !manifest_line(text, key) || manifest_int(text, key, value);
}
static inline bool manifest_window(const char *text, const char *key, OutlierWindow *w) {
    const char *line = manifest_line(text, key);
    char *end = NULL;
    if (line) { w->count = strtoll(line, &end, 10); }
    if (!line || end == line) { return false; }
    for (int i = 0; i < OUTLIER_WINDOW && i < w->count; i++) {
        const char *at = end;
        w->values[i] = strtod(at, &end);
        if (end == at) { return false; }
    }
    return w->count >= 0 && w->count <= MANIFEST_COUNT_MAX && *end == '\n';
}

// Reads the manifest's entry for a state file: its size and checksum.
static inline bool manifest_file(const char *text, int64_t file, uint64_t *bytes,
                                 uint64_t *checksum) {
    char key[32];
    snprintf(key, sizeof key, "file%" PRId64, file);
    const char *entry = manifest_line(text, key);
    return entry && sscanf(entry, "%" SCNu64 " %16" SCNx64, bytes, checksum) == 2;
}
// Reads a text of at least one character; `missing` if the line is missing.
static inline bool manifest_text(const char *text, const char *key, const char *missing,
                                 char *value, size_t bytes) {
    const char *line = manifest_line(text, key);
    size_t n = line ? strcspn(line, "\n") : strlen(missing);
    if (n == 0 || n >= bytes) { return false; }
    memcpy(value, line ? line : missing, n);
    value[n] = 0;
    return true;
}

static inline void manifest_add_model(TextBuffer *t, const GptModel *m,
                                      const Optimizer *optimizer) {
    const GptConfig *c = &m->config;
    const GptShare *share = &m->share;
    text_add(t,
             "model layers=%" PRId64 ",heads=%" PRId64 ",channels=%" PRId64 ",vocab=%" PRId64
             ",padded_vocab=%" PRId64 ",max_seq_len=%" PRId64 ",optimizer=%s",
             c->layers, c->heads, c->channels, c->vocab, c->padded_vocab, c->max_seq_len,
             optimizer->name);
    if (share_is(*share)) {
        text_add(t, ",share=%" PRId64 "%s", max_i64(share->cycle, share->run),
                 share->cycle ? "x" : "");
    }
    text_add(t, "\n");
}

// Adds the algorithms of a GPU's matrix products, with the device and library that they belong to.
static inline void manifest_add_matmuls(TextBuffer *t, const MatmulChoices *choices) {
    char library[160];
    if (!choices || !choices->count) { return; }
    ops_matmul_library(library, sizeof library);
    text_add(t, "matmul_library %s\nmatmuls %d\n", library, choices->count);
    for (int i = 0; i < choices->count; i++) {
        char hex[2 * MATMUL_CHOICE_BYTES + 1];
        bytes_to_hex(hex, choices->choice[i].bytes, MATMUL_CHOICE_BYTES);
        text_add(t, "matmul%d %s\n", i, hex);
    }
}
// Returns false if the manifest has no algorithms for this library, or a line of them is damaged.
static inline bool manifest_matmuls(const char *text, const char *library, MatmulChoices *choices) {
    char found[160];
    int64_t count = 0;
    const bool same = manifest_text(text, "matmul_library", "none", found, sizeof found) &&
                      !strcmp(found, library);
    if (!same || !manifest_int(text, "matmuls", &count) || count > MATMUL_CHOICES) { return false; }
    for (int i = 0; i < count; i++) {
        char key[32];
        snprintf(key, sizeof key, "matmul%d", i);
        const char *line = manifest_line(text, key);
        const bool good =
            line && bytes_from_hex(choices->choice[i].bytes, line, MATMUL_CHOICE_BYTES);
        if (!good || line[2 * MATMUL_CHOICE_BYTES] != '\n') { return false; }
    }
    choices->count = (int)count;
    return true;
}

// Makes the last line: the checksum of all text before it.
static inline void manifest_seal(char *line, size_t bytes, const Checksum *sum) {
    snprintf(line, bytes, "checksum %016" PRIx64 "\n", checksum_end(sum));
}

// Reads a manifest and checks it against the checksum in its last line. Returns NULL, with the
// reason, if it is incomplete or changed.
static inline char *manifest_read(const char *folder, char *why, size_t why_bytes) {
    char path[1100];
    snprintf(path, sizeof path, "%s/manifest", folder);
    FILE *f = open_regular(path);
    if (!f) {
        snprintf(why, why_bytes, "%s: %s", path, strerror(errno));
        return NULL;
    }
    char *text = (char *)checked_malloc(MANIFEST_MAX + 1, "manifest");
    size_t n = fread(text, 1, MANIFEST_MAX, f);
    fclose(f);
    text[n] = 0;
    char *last = n > 1 && strlen(text) == n && text[n - 1] == '\n'
                     ? (char *)memrchr(text, '\n', n - 1)
                     : NULL;
    bool good = last;
    if (good) {
        char expected[64];
        Checksum sum = checksum_begin();
        checksum_add(&sum, text, (size_t)(last + 1 - text));
        manifest_seal(expected, sizeof expected, &sum);
        good = !strcmp(last + 1, expected);
    }
    if (!good) {
        snprintf(why, why_bytes, "%s: torn or changed", path);
        free(text);
        return NULL;
    }
    return text;
}

// -------------------------------------------------------------------------------------------------
// Folders

// Parses which blocks share, from the text after "share=" to the end of the line: N (consecutive
// blocks), or Nx (blocks with equal numbers modulo N). Returns false if it is neither.
static inline bool manifest_share(const char *text, int64_t layers, GptShare *share) {
    char *end = NULL;
    const int64_t n = strtoll(text, &end, 10);
    const bool cycle = *end == 'x', good = n >= 1 && n <= layers && end[cycle] == '\n';
    if (good) { *share = gpt_share(layers, n, cycle ? n : 0); }
    return good;
}
// Reads the model of a manifest. Returns false if the text has none. optimizer: space for 8 bytes.
static inline bool manifest_model(const char *text, GptConfig *c, GptShare *share,
                                  char *optimizer) {
    const char *line = manifest_line(text, "model"), *shared = ",share=";
    int used = 0;
    memset(c, 0, sizeof *c); // manifests name no architecture: the first one
    const int found =
        line ? sscanf(line,
                      "layers=%" SCNd64 ",heads=%" SCNd64 ",channels=%" SCNd64 ",vocab=%" SCNd64
                      ",padded_vocab=%" SCNd64 ",max_seq_len=%" SCNd64 ",optimizer=%7[a-z]%n",
                      &c->layers, &c->heads, &c->channels, &c->vocab, &c->padded_vocab,
                      &c->max_seq_len, optimizer, &used)
             : 0;
    *share = GPT_SHARE_NONE;
    if (found != 7 || c->layers < 1 || c->layers > GPT_LAYERS) { return false; }
    return line[used] == '\n' || (!strncmp(line + used, shared, strlen(shared)) &&
                                  manifest_share(line + used + strlen(shared), c->layers, share));
}
static inline void checkpoint_folder(char *path, size_t bytes, const char *out, int64_t step,
                                     const char *suffix) {
    snprintf(path, bytes, "%s/step_%08" PRId64 "%s", out, step, suffix);
}
// Returns the step of a checkpoint's folder, if its name is exactly as checkpoint_folder() makes
// it; else -1. *rest: what follows the digits.
enum { STEP_DIGITS = 8, STEP_DIGITS_MOST = 18 };
static inline int64_t checkpoint_step_of(const char *name, const char **rest) {
    if (strncmp(name, "step_", 5)) { return -1; }
    const size_t digits = strspn(name + 5, "0123456789");
    if (digits < STEP_DIGITS || digits > STEP_DIGITS_MOST) { return -1; }
    if (digits > STEP_DIGITS && name[5] == '0') { return -1; }
    *rest = name + 5 + digits;
    return strtoll(name + 5, NULL, 10);
}
// Makes the name of the folder in which a step is written: step_00000020.tmp, or .2.tmp to .9.tmp
// if others exist that cannot be removed.
enum { HALVES = 9 };
static inline void checkpoint_half(char *path, size_t bytes, const char *out, int64_t step,
                                   int turn) {
    char suffix[16] = ".tmp";
    if (turn > 1) { snprintf(suffix, sizeof suffix, ".%d.tmp", turn); }
    checkpoint_folder(path, bytes, out, step, suffix);
}
static inline bool checkpoint_is_half(const char *name) {
    const char *rest = "";
    if (checkpoint_step_of(name, &rest) < 0) { return false; }
    if (rest[0] == '.' && rest[1] >= '2' && rest[1] <= '0' + HALVES) { rest += 2; }
    return !strcmp(rest, ".tmp");
}
// Is this the name of a checkpoint's file: manifest, state_00000 ..., or one of these while it is
// written?
static inline bool checkpoint_file_name(const char *name) {
    const char *end = name + strlen("manifest");
    if (strncmp(name, "manifest", strlen("manifest"))) {
        if (strncmp(name, "state_", 6)) { return false; }
        const size_t digits = strspn(name + 6, "0123456789");
        if (digits < 5 || digits > 9 || (digits > 5 && name[6] == '0')) { return false; }
        end = name + 6 + digits;
    }
    return !*end || !strcmp(end, ".tmp");
}
// Removes a checkpoint's file from an open folder. Returns false if the file remains, or is none of
// a checkpoint.
static inline bool folder_remove_file(int folder, const char *name) {
    struct stat info;
    keep_alive();
    const bool there = !fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW);
    return checkpoint_file_name(name) && there && S_ISREG(info.st_mode) &&
           !unlinkat(folder, name, 0);
}
// Removes a checkpoint's folder, and in it the files that a checkpoint has. The manifest goes last,
// so that the remains of a folder with a manifest are still recognised. If the folder contains
// anything else it stays, with a warning. No link is followed.
static inline void folder_remove(const char *path) {
    struct stat info;
    if (lstat(path, &info)) { return; }
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (!d && !S_ISDIR(info.st_mode)) {
        const char *kind = file_kind_name(info.st_mode);
        fprintf(stderr, "warning: %s is left as it is: it is %s and no folder\n", path, kind);
        return;
    }
    bool foreign = false;
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *name = e->d_name;
        if (!strcmp(name, ".") || !strcmp(name, "..") || !strcmp(name, "manifest")) { continue; }
        if (!folder_remove_file(dirfd(d), name)) { foreign = true; }
    }
    if (d) {
        folder_remove_file(dirfd(d), "manifest");
        closedir(d);
    }
    if (!rmdir(path) || errno == ENOENT) { return; }
    const char *why = foreign ? "there is something in it that no checkpoint has" : strerror(errno);
    fprintf(stderr, "warning: %s cannot be removed: %s\n", path, why);
}
// Is this a folder, not a link to one, with a manifest in it?
static inline bool folder_has_manifest(const char *path) {
    struct stat info;
    char manifest[1200];
    snprintf(manifest, sizeof manifest, "%s/manifest", path);
    if (lstat(path, &info) || !S_ISDIR(info.st_mode)) { return false; }
    return !lstat(manifest, &info) && S_ISREG(info.st_mode);
}
static inline int compare_i64_descending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}
// Lists the steps whose folders are named like checkpoints, newest first. The caller frees the
// list.
static inline int64_t *checkpoint_list(const char *out, int *count) {
    int64_t *steps = NULL;
    int capacity = 0;
    *count = 0;
    DIR *d = opendir(out);
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *rest = "";
        const int64_t step = checkpoint_step_of(e->d_name, &rest);
        if (step < 0 || *rest) { continue; }
        if (*count == capacity) {
            capacity = 2 * capacity + 16;
            steps = (int64_t *)realloc(steps, (size_t)capacity * sizeof(int64_t));
            if (!steps) { die(EXIT_RESOURCES, NULL, "too many checkpoints in %s", out); }
        }
        steps[(*count)++] = step;
    }
    if (d) { closedir(d); }
    if (steps) { qsort(steps, (size_t)*count, sizeof *steps, compare_i64_descending); }
    return steps;
}

// Returns the same list on all ranks, as rank 0 finds it. All ranks call it.
static inline int64_t *checkpoint_steps(const char *out, Comm *comm, int *count) {
    int64_t *steps = comm->rank == 0 ? checkpoint_list(out, count) : NULL;
    comm_broadcast(comm, count, sizeof *count, 0);
    if (!steps) {
        steps = (int64_t *)checked_calloc((size_t)*count + 1, sizeof *steps, "checkpoints");
    }
    comm_broadcast(comm, steps, (size_t)*count * sizeof *steps, 0);
    return steps;
}

// Makes a folder, and the missing ones above it. Returns 0 or an errno.
static inline int folder_make(const char *out) {
    char path[1100];
    snprintf(path, sizeof path, "%s", out);
    for (char *end = path; *end;) { // one parent after another, then the folder itself
        end += 1 + strcspn(end + 1, "/");
        char next = *end;
        *end = 0;
        if (mkdir(path, 0777) && errno != EEXIST) { return errno; }
        *end = next;
    }
    struct stat info;
    return stat(path, &info) ? errno : S_ISDIR(info.st_mode) ? 0 : ENOTDIR;
}

// Takes the lock of OUT, for as long as the process lives: a second run in the same folder ends
// here (2).
static inline void out_folder_lock(const char *out) {
    char path[1100];
    struct stat info;
    snprintf(path, sizeof path, "%s/lock", out);
    const char *hint = "remove it: the program makes a file of this name";
    const mode_t mode = lstat(path, &info) ? S_IFREG : info.st_mode;
    if (!S_ISREG(mode)) { die(EXIT_INPUT, hint, "%s is %s", path, file_kind_name(mode)); }
    const int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd < 0) {
        die(EXIT_RESOURCES, "--out must be writable", "cannot write into %s: %s", out,
            strerror(errno));
    }
    if (!flock(fd, LOCK_EX | LOCK_NB)) { return; }
    const bool taken = errno == EWOULDBLOCK;
    if (taken) { die(EXIT_INPUT, "give each run its own --out", "another run is using %s", out); }
    hint = "choose a file system for --out that has locks";
    die(EXIT_RESOURCES, hint, "cannot lock %s: %s", path, strerror(errno));
}
// Refuses a folder named OUT/stop: it would stop each run after its first step, and could not be
// removed.
static inline void out_folder_check_stop(const char *out) {
    char path[1100];
    struct stat info;
    snprintf(path, sizeof path, "%s/stop", out);
    const char *hint = "remove it: a file of this name stops a run";
    const bool folder = !stat(path, &info) && S_ISDIR(info.st_mode);
    if (folder) { die(EXIT_INPUT, hint, "%s is a folder", path); }
}
// Removes what a crash has left half-written, and warns of names that resemble a checkpoint's but
// are none.
static inline void out_folder_clean(const char *out) {
    char path[1100], odd[1100] = "";
    int64_t odds = 0;
    DIR *d = opendir(out);
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *rest = "", *name = e->d_name;
        snprintf(path, sizeof path, "%s/%s", out, name);
        const bool half = checkpoint_is_half(name);
        const bool whole = checkpoint_step_of(name, &rest) >= 0 && !*rest;
        if (half) { folder_remove(path); }
        if (half || whole || strncmp(name, "step_", 5)) { continue; }
        if (!odds++) { snprintf(odd, sizeof odd, "%s", path); }
    }
    if (d) { closedir(d); }
    if (!odds) { return; }
    fprintf(stderr, "warning: %s", odd);
    if (odds > 1) { fprintf(stderr, " and %" PRId64 " others of %s", odds - 1, out); }
    fprintf(stderr, ": no checkpoint has such a name (step_00000020 has); left as found\n");
}
// Makes a new folder OUT/earlier-N.
static inline void earlier_folder_make(char *path, size_t bytes, const char *out) {
    enum { EARLIER_MOST = 1000000 };
    for (int n = 1; n <= EARLIER_MOST; n++) {
        snprintf(path, bytes, "%s/earlier-%d", out, n);
        if (!mkdir(path, 0777)) { return; }
        if (errno != EEXIST) { break; }
    }
    const char *hint = "an earlier run's checkpoints belong there: choose another --out";
    die(EXIT_RESOURCES, hint, "cannot make %s: %s", path, strerror(errno));
}
// Moves an entry of OUT into a folder of OUT. A link with a relative target is made again. Returns
// 0 or an errno.
static inline int earlier_move(const char *out, const char *name, const char *folder) {
    char from[1400], to[1400], target[PATH_BYTES + 4] = "../";
    snprintf(from, sizeof from, "%s/%s", out, name);
    snprintf(to, sizeof to, "%s/%s", folder, name);
    const ssize_t n = readlink(from, target + 3, PATH_BYTES);
    if (n <= 0 || n == PATH_BYTES || target[3] == '/') { return rename(from, to) ? errno : 0; }
    target[3 + n] = 0;
    return symlink(target, to) || unlink(from) ? errno : 0;
}
// Moves the checkpoints of an earlier run, with its key and record of private steps, to
// OUT/earlier-N, so that nothing is lost or mixed up.
static inline void out_folder_set_aside(const char *out) {
    char target[1200], name[40];
    int count;
    int64_t *steps = checkpoint_list(out, &count);
    if (count) { earlier_folder_make(target, sizeof target, out); }
    // Key and record go first: a private run cannot continue without them.
    static const char *const along[] = {"dp_key", "dp_steps"};
    for (int i = 0; i < (count ? count + 2 : 0); i++) {
        if (i >= 2) { snprintf(name, sizeof name, "step_%08" PRId64, steps[i - 2]); }
        const char *entry = i < 2 ? along[i] : name;
        const int error = earlier_move(out, entry, target);
        if (error && (i >= 2 || error != ENOENT)) {
            const char *why = strerror(error), *hint = "choose another --out";
            die(EXIT_RESOURCES, hint, "cannot move %s/%s to %s: %s", out, entry, target, why);
        }
    }
    if (count) {
        printf("note: %d checkpoints of an earlier run moved to %s", count, target);
        printf(" (to go on from them: --resume 1)\n");
    }
    free(steps);
}
// Makes OUT, locks and cleans it, and moves the checkpoints of an earlier run away unless this run
// resumes it. Rank 0 calls it.
static inline void out_folder_prepare(const char *out, bool resume) {
    int error = folder_make(out);
    if (error) {
        die(error == ENOSPC || error == EDQUOT || error == EROFS ? EXIT_RESOURCES : EXIT_INPUT,
            "--out names a folder that can be made", "cannot make %s: %s", out, strerror(error));
    }
    out_folder_lock(out);
    out_folder_check_stop(out);
    out_folder_clean(out);
    if (!resume) { out_folder_set_aside(out); }
}

// -------------------------------------------------------------------------------------------------
// Saving and loading. All ranks call these functions, and agree on the outcome.

// What a rank reports about its state file.
typedef struct {
    double failed, bytes, checksum_high, checksum_low;
} StateReport;

static inline int manifest_write(const char *folder, const Store *s, const Progress *p,
                                 const char *flags, const StateReport *reports) {
    TextBuffer t = {NULL, 0, 0};
    text_add(&t, "train_gpt checkpoint 1\n");
    manifest_add_model(&t, s->model, s->optimizer);
    text_add(&t, "step %" PRId64 "\nposition %" PRId64 "\nupdates %" PRId64 "\n", p->step,
             p->position, p->updates);
    if (s->pending) { text_add(&t, "pending %a\n", p->pending_norm); }
    if (p->delinked) {
        text_add(&t, "delinked %" PRId64 "\nrestarted %" PRId64 "\n", p->delinked, p->restarted);
    }
    // the losses of private steps are not published in checkpoints
    bool shown = !*p->privacy || !strcmp(p->privacy, "none");
    const OutlierWindow empty = {0, {0}};
    manifest_add_window(&t, "losses", shown ? &p->loss : &empty);
    manifest_add_window(&t, "norms", shown ? &p->norm : &empty);
    text_add(&t, "privacy %s\nflags %s\nfiles %d\n", *p->privacy ? p->privacy : "none", flags,
             s->comm->ranks);
    for (int r = 0; r < s->comm->ranks; r++) {
        text_add(&t, "file%d %.0f %08lx%08lx\n", r, reports[r].bytes,
                 (unsigned long)reports[r].checksum_high, (unsigned long)reports[r].checksum_low);
    }
    manifest_add_matmuls(&t, p->matmuls);
    Checksum sum = checksum_begin();
    checksum_add(&sum, t.text, t.length);
    char seal[64];
    manifest_seal(seal, sizeof seal, &sum);
    text_add(&t, "%s", seal);
    char path[1100];
    snprintf(path, sizeof path, "%s/manifest", folder);
    FileWriter w;
    writer_open(&w, path);
    writer_add(&w, t.text, t.length);
    free(t.text);
    return writer_close(&w);
}

// Renames a finished folder to its final name. If another entry has that name (an older checkpoint
// of the same step, or a foreign one), the two are exchanged atomically, and the program's own
// files in the other are removed.
static inline int folder_publish(const char *temporary, const char *path, const char *out) {
    sync_folder(temporary);
    int error = 0;
    if (rename(temporary, path)) {
        error = syscall(SYS_renameat2, AT_FDCWD, temporary, AT_FDCWD, path, 2 /* RENAME_EXCHANGE */)
                    ? errno
                    : 0;
        if (!error) { folder_remove(temporary); }
    }
    sync_folder(out);
    return error;
}

// Keeps the newest `keep` checkpoints up to the one just saved. Later steps are left alone: they
// belong to a run that continued differently. Links to folders elsewhere, and folders without a
// manifest, are left alone too and do not count.
static inline void checkpoints_prune(const char *out, int64_t saved, int64_t keep) {
    int count;
    int64_t *steps = checkpoint_list(out, &count);
    for (int64_t i = 0, kept = 0; keep && i < count; i++) {
        char path[1100];
        checkpoint_folder(path, sizeof path, out, steps[i], "");
        const bool counts = steps[i] <= saved && folder_has_manifest(path);
        if (counts && ++kept > keep) { folder_remove(path); }
    }
    free(steps);
}
// Makes an empty folder for a checkpoint to be written. Returns the number in its name
// (checkpoint_half), or minus an errno.
static inline int checkpoint_half_make(const char *out, int64_t step) {
    for (int turn = 1;; turn++) {
        char path[1100];
        checkpoint_half(path, sizeof path, out, step, turn);
        folder_remove(path);
        if (!mkdir(path, 0777)) { return turn; }
        if (errno != EEXIST || turn == HALVES) { return -errno; }
    }
}

// Saves OUT/step_N. A failure (disk full, folder missing) is a warning: returns false, and training
// continues. All ranks call it.
static inline bool checkpoint_save(const char *out, Store *s, const Progress *p, int64_t keep,
                                   const char *flags, char *path, size_t path_bytes) {
    char temporary[1100], file[1200];
    Comm *comm = s->comm;
    store_wait_all(s);
    for (int storage = 0; storage < s->model->storages; storage++) {
        store_forget_errors(s, storage);
    }
    checkpoint_folder(path, path_bytes, out, p->step, "");
    int turn = comm->rank == 0 ? checkpoint_half_make(out, p->step) : 0;
    comm_broadcast(comm, &turn, sizeof turn, 0);
    const int made = turn < 0 ? -turn : 0;
    checkpoint_half(temporary, sizeof temporary, out, p->step, turn);
    snprintf(file, sizeof file, "%s/state_%05d", temporary, comm->rank);
    uint64_t bytes = 0, checksum = 0;
    int error = made ? made : state_file_write(file, s, &bytes, &checksum);
    StateReport mine = {(double)error, (double)bytes, (double)(checksum >> 32),
                        (double)(checksum & 0xffffffffu)};
    StateReport *reports =
        (StateReport *)checked_calloc((size_t)comm->ranks, sizeof(StateReport), "checkpoint");
    comm_all_gather_small(comm, &mine, reports, sizeof mine);
    for (int r = 0; r < comm->ranks && !error; r++) { error = (int)reports[r].failed; }
    if (comm->rank == 0 && !error) { error = manifest_write(temporary, s, p, flags, reports); }
    if (comm->rank == 0 && !error) { error = folder_publish(temporary, path, out); }
    comm_broadcast(comm, &error, sizeof error, 0);
    if (comm->rank == 0 && error) {
        if (!made) { folder_remove(temporary); }
        fprintf(
            stderr,
            "warning: checkpoint %s not saved: %s; training goes on, the exit code will be %d\n",
            path, strerror(error), EXIT_RESOURCES);
    }
    if (comm->rank == 0 && !error) { checkpoints_prune(out, p->step, keep); }
    free(reports);
    return !error;
}
// Reads the counters of a manifest and how many state files there are. Returns false where a field
// is missing or out of range.
static inline bool manifest_progress(const char *text, Progress *p, int64_t *files) {
    return manifest_int(text, "step", &p->step) && manifest_int(text, "position", &p->position) &&
           manifest_int(text, "updates", &p->updates) &&
           manifest_window(text, "losses", &p->loss) && manifest_window(text, "norms", &p->norm) &&
           manifest_int(text, "files", files) && *files <= MANIFEST_FILES &&
           manifest_count_or_none(text, "delinked", &p->delinked) &&
           manifest_count_or_none(text, "restarted", &p->restarted) &&
           manifest_text(text, "privacy", "none", p->privacy, sizeof p->privacy);
}
// Checks that the files held all elements of each state that this model has.
// filled: [kinds][storages] elements that were read.
static inline bool states_are_whole(const char *folder, const Store *s, const GptModel *from,
                                    const int64_t *filled, char *why, size_t why_bytes) {
    bool good = true;
    for (int i = 0; good && i < FILE_KINDS * from->storages; i++) {
        int storage = i % from->storages;
        const int64_t elements = gpt_storage_elements(from, storage);
        const StateKind kind = (StateKind)(i / from->storages);
        // 0 elements: that run did not have this state
        int64_t expected = kind >= STATE_PREVIOUS     ? (filled[i] ? elements : 0)
                           : store_has_state(s, kind) ? elements
                                                      : 0;
        good = filled[i] == expected;
        if (!good) {
            snprintf(why, why_bytes, "%s: %s of storage %d is not %s", folder, state_name(kind),
                     storage, filled[i] ? "whole" : "there");
        }
    }
    return good;
}

// Fills store and progress from one checkpoint, of model `from`. A run that resumes passes the
// store's own model. Otherwise a new run begins with the checkpoint, in which as many blocks share
// or fewer: it counts its own steps, has no version before the first one, and no pending gradient.
// Each rank reads what it needs, and verifies its part of the files. So the checkpoint is valid
// only if the result is true on all ranks. Returns false, with the reason, if it is incomplete,
// invalid or of another model.
static inline bool checkpoint_load(const char *folder, Store *s, const GptModel *from, Progress *p,
                                   char *why, size_t why_bytes) {
    const bool resumes = from == s->model;
    char *text = manifest_read(folder, why, why_bytes);
    if (!text) { return false; }
    TextBuffer model = {NULL, 0, 0};
    manifest_add_model(&model, from, s->optimizer);
    const char *line = manifest_line(text, "model");
    int64_t files = 0, *filled = (int64_t *)checked_calloc((size_t)(FILE_KINDS * from->storages),
                                                           sizeof(int64_t), "checkpoint");
    bool same = line && !strncmp(line, model.text + strlen("model "), strcspn(line, "\n") + 1);
    if (!same) {
        snprintf(why, why_bytes, "%s: of another model or optimizer: %.*s", folder,
                 line ? (int)strcspn(line, "\n") : 1, line ? line : "?");
    }
    bool good = same && manifest_progress(text, p, &files);
    for (int i = 0; good && s->version && i < s->model->storages; i++) {
        s->version[i] = resumes ? p->step : 0;
    }
    if (same && !good) {
        snprintf(why, why_bytes, "%s/manifest: a field is missing or out of range", folder);
    }
    for (int64_t i = 0; good && i < files; i++) {
        char path[1200];
        snprintf(path, sizeof path, "%s/state_%05" PRId64, folder, i);
        uint64_t bytes = 0, checksum = 0;
        good = manifest_file(text, i, &bytes, &checksum);
        if (!good) {
            snprintf(why, why_bytes, "%s/manifest: no entry for file %" PRId64, folder, i);
        }
        good = good && state_file_read(path, s, from, i % s->comm->ranks == s->comm->rank, bytes,
                                       checksum, filled, why, why_bytes);
    }
    good = good && states_are_whole(folder, s, from, filled, why, why_bytes);
    const char *pending = good ? manifest_line(text, "pending") : NULL;
    p->pending_norm = pending ? strtod(pending, NULL) : 0;
    s->pending =
        resumes && pending && store_delays(s) && filled[STATE_GRADIENT * from->storages] > 0;
    // storage 0 (wte) stands for all: if any stage is delayed, the first one is
    s->knows_previous = resumes && filled[STATE_PREVIOUS * from->storages] > 0;
    free(filled);
    free(model.text);
    free(text);
    return good;
}

// Sets how many updates the states have had.
static inline void store_count_updates(Store *s, const Progress *p) {
    for (int i = 0; i < s->model->storages; i++) {
        s->updates[i] = p->updates;
        s->restarted[i] = gpt_storage_class(s->model, i) == STORAGE_BLOCK ? p->restarted : 0;
    }
}
// Is a checkpoint's folder directly in OUT?
static inline bool checkpoint_lies_in(const char *folder, const char *out) {
    char *path = realpath(folder, NULL), *there = realpath(out, NULL);
    const size_t n = there ? strlen(there) : 0;
    const bool lies = path && there && !strncmp(path, there, n) && path + n == strrchr(path, '/');
    free(path);
    free(there);
    return lies;
}
// Reads the model of a checkpoint's folder. Returns false if `folder` is no folder; ends the
// program (2) if it holds no valid checkpoint. All ranks call it.
static inline bool checkpoint_model(const char *folder, GptConfig *config, GptShare *share) {
    struct stat info;
    char why[1400] = "", optimizer[8];
    if (stat(folder, &info) || !S_ISDIR(info.st_mode)) { return false; }
    char *text = manifest_read(folder, why, sizeof why);
    const bool good = text && manifest_model(text, config, share, optimizer);
    const char *line = text ? manifest_line(text, "model") : NULL;
    if (line && !good) {
        snprintf(why, sizeof why, "a model that this program does not know: %.*s",
                 (int)strcspn(line, "\n"), line);
    }
    if (!good) {
        die(EXIT_INPUT, "--model takes a descriptor, a model file, or the folder of a checkpoint",
            "%s: no checkpoint: %s", folder, why);
    }
    gpt_config_check(config, folder);
    free(text);
    return true;
}
// Does a file have this size and checksum?
static inline bool state_file_whole(const char *path, uint64_t bytes, uint64_t checksum) {
    FILE *f = open_regular(path);
    Checksum sum = checksum_begin();
    for (size_t n; f && (n = fread(state_piece.bytes, 1, sizeof state_piece.bytes, f)) > 0;
         keep_alive()) {
        checksum_add(&sum, state_piece.bytes, n);
    }
    if (f) { fclose(f); }
    return f && sum.length == bytes && checksum_end(&sum) == checksum;
}
// Reads the model of a checkpoint. Returns false unless the manifest, and the files that this rank
// verifies, are complete.
static inline bool checkpoint_whole(const char *folder, const Comm *comm, GptConfig *config,
                                    GptShare *share) {
    char why[1400], path[1200], optimizer[8];
    int64_t files = 0;
    char *text = manifest_read(folder, why, sizeof why);
    bool good = text && manifest_model(text, config, share, optimizer) &&
                manifest_int(text, "files", &files) && files <= MANIFEST_FILES;
    for (int64_t i = comm->rank; good && i < files; i += comm->ranks) {
        uint64_t bytes = 0, checksum = 0;
        snprintf(path, sizeof path, "%s/state_%05" PRId64, folder, i);
        good = manifest_file(text, i, &bytes, &checksum) && state_file_whole(path, bytes, checksum);
    }
    free(text);
    return good;
}
// Reads the model of the newest complete checkpoint of OUT. Returns false if none exists. All ranks
// call it.
static inline bool checkpoint_newest_model(const char *out, Comm *comm, GptConfig *config,
                                           GptShare *share) {
    int count;
    bool found = false;
    int64_t *steps = checkpoint_steps(out, comm, &count);
    for (int i = 0; i < count && !found; i++) {
        char path[1100];
        checkpoint_folder(path, sizeof path, out, steps[i], "");
        found = comm_agree_min(comm, checkpoint_whole(path, comm, config, share));
    }
    free(steps);
    return found;
}
// Reads the choices of matrix products from the newest valid manifest of `out`. Returns false if
// they are not for this device and library.
static inline bool checkpoint_matmuls(const char *out, const char *library,
                                      MatmulChoices *choices) {
    int count;
    int64_t *steps = checkpoint_list(out, &count);
    char *text = NULL;
    for (int i = 0; i < count && !text; i++) {
        char path[1100], why[1400];
        checkpoint_folder(path, sizeof path, out, steps[i], "");
        text = manifest_read(path, why, sizeof why);
    }
    const bool found = text && manifest_matmuls(text, library, choices);
    free(text);
    free(steps);
    return found;
}
// Fills the store of a new run with the states of a checkpoint of model `from`, or ends the program
// (2). anew: the moments of blocks are reset. All ranks call it.
static inline void checkpoint_begin(const char *folder, Store *s, const GptModel *from, bool anew,
                                    Progress *p) {
    Progress of;
    char why[1400] = "";
    memset(&of, 0, sizeof of);
    bool good = checkpoint_load(folder, s, from, &of, why, sizeof why);
    if (!comm_agree_min(s->comm, good)) {
        die(EXIT_INPUT, "another checkpoint may be whole", "--model %s: %s", folder,
            good ? "not valid on another rank" : why);
    }
    p->updates = of.updates;
    p->restarted = anew ? of.updates : of.restarted;
    for (int i = 0; anew && i < s->model->storages; i++) {
        if (gpt_storage_class(s->model, i) != STORAGE_BLOCK || !store_own_elements(s, i)) {
            continue;
        }
        store_clear_moments(s, i);
    }
    store_count_updates(s, p);
    store_masters_changed(s);
}
// Loads the newest valid checkpoint of OUT, or ends the program (2) if none is valid. All ranks
// call it.
static inline void checkpoint_resume(const char *out, Store *s, Progress *p, char *path,
                                     size_t path_bytes) {
    int count;
    int64_t *steps = checkpoint_steps(out, s->comm, &count);
    for (int i = 0; i < count; i++) {
        checkpoint_folder(path, path_bytes, out, steps[i], "");
        char why[1400] = "";
        bool good = checkpoint_load(path, s, s->model, p, why, sizeof why);
        if (comm_agree_min(s->comm, good)) {
            store_count_updates(s, p);
            store_masters_changed(s);
            free(steps);
            return;
        }
        if (!good) {
            fprintf(stderr, "warning: rank %d skips checkpoint %s: %s\n", s->comm->rank, path, why);
        }
    }
    die(EXIT_INPUT,
        "--out must hold a checkpoint of this model; without --resume 1 a new run starts",
        "no valid checkpoint in %s (%d tried)", out, count);
}

#endif
