// manifest.h: the text file of a checkpoint that says what the checkpoint is: the model, the step,
// the data position, the counters, the size and checksum of every state file, and a checksum of
// itself in its last line. A folder without a complete manifest does not count (docs/formats.md).
#ifndef MANIFEST_H
#define MANIFEST_H

#include "base/base.h"
#include "base/files.h"
#include "model/config.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "privacy/privacy.h"
#include "state/optimizer.h"

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
    double lr;           // of the last step (learning_rate()); NAN if the checkpoint does not say
    OutlierWindow loss, norm;
    // algorithms of matrix products; NULL or none: no choice was made
    const MatmulChoices *matmuls;
    // settings of the private steps so far (privacy.h), "none" if there were none; "" before any
    // checkpoint
    char privacy[PRIVACY_HISTORY_MAX];
    char compute[8]; // what products were computed in; "?" if the checkpoint does not say
    // "" if the checkpoint does not say: what its products depend on (ops_arithmetic()); the order
    // of its samples (data.h); its tokenizer: vocabulary, hash, and where its file was
    char products[200], order[300], tokenizer[1200];
} Progress;

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

// Reads a number of 0 or more, or NAN if the line is missing. Returns false if the line is
// malformed.
static inline bool manifest_number_or_none(const char *text, const char *key, double *value) {
    const char *line = manifest_line(text, key);
    char *end = NULL;
    *value = line ? strtod(line, &end) : (double)NAN;
    return !line || (end != line && *end == '\n' && *value >= 0 && isfinite(*value));
}

// Reads the manifest's entry for a state file: its size and checksum.
static inline bool manifest_file(const char *text, int64_t file, uint64_t *bytes,
                                 uint64_t *checksum) {
    const char *entry = manifest_line(text, text_of("file%" PRId64, file).at);
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

// The same, "" if the line is missing.
static inline bool manifest_text_or_none(const char *text, const char *key, char *value,
                                         size_t bytes) {
    value[0] = 0;
    return !manifest_line(text, key) || manifest_text(text, key, "", value, bytes);
}
// Adds a line, unless the value is "". A value is one line.
static inline void manifest_add_text(TextBuffer *t, const char *key, const char *value) {
    if (!*value) { return; }
    text_add(t, "%s ", key);
    const size_t begin = t->length;
    text_add(t, "%s", value);
    show_plainly(t->text + begin);
    text_add(t, "\n");
}

static inline void manifest_add_model(TextBuffer *t, const GptModel *m,
                                      const Optimizer *optimizer) {
    const GptConfig *c = &m->config;
    const GptShare *share = &m->share;
    text_add(t, "model ");
    // manifests without an architecture are GPT-2's
    if (c->arch) {
        const RotaryScaling *r = &c->scaling;
        text_add(t,
                 "arch=%s,tie=%d,kv_heads=%" PRId64 ",head_dim=%" PRId64 ",ffn=%" PRId64
                 ",theta=%.17g,eps=%.17g,rope_factor=%.17g,rope_low=%.17g,rope_high=%.17g,"
                 "rope_original=%" PRId64 ",",
                 m->arch->name, gpt_is_tied(m), c->kv_heads, c->head_dim, c->ffn, c->theta, c->eps,
                 r->factor, r->low, r->high, r->original);
    }
    if (c->experts) {
        text_add(t,
                 "experts=%" PRId64 ",top_k=%" PRId64 ",expert_ffn=%" PRId64 ",prototypes=%" PRId64
                 ",",
                 c->experts, c->top_k, c->expert_ffn, c->prototypes);
    }
    if (c->shared_experts) {
        text_add(t, "shared_experts=%" PRId64 ",shared_expert_ffn=%" PRId64 ",", c->shared_experts,
                 c->shared_expert_ffn);
    }
    text_add(t,
             "layers=%" PRId64 ",heads=%" PRId64 ",channels=%" PRId64 ",vocab=%" PRId64
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
        const char *line = manifest_line(text, text_of("matmul%d", i).at);
        const bool good =
            line && bytes_from_hex(choices->choice[i].bytes, line, MATMUL_CHOICE_BYTES);
        if (!good || line[2 * MATMUL_CHOICE_BYTES] != '\n') { return false; }
    }
    choices->count = (int)count;
    return true;
}

// Returns the last line: the checksum of all text before it.
static inline Text manifest_seal(const char *text, size_t bytes) {
    Checksum sum = checksum_begin();
    checksum_add(&sum, text, bytes);
    return text_of("checksum %016" PRIx64 "\n", checksum_end(&sum));
}

// Reads a manifest and checks it against the checksum in its last line. Returns NULL, with the
// reason, if it is incomplete or changed.
static inline char *manifest_read(const char *folder, Text *why) {
    const Text path = text_of("%s/manifest", folder);
    FILE *f = open_regular(path.at);
    if (!f) {
        *why = text_of("%s: %s", path.at, strerror(errno));
        return NULL;
    }
    char *text = new_array(char, MANIFEST_MAX + 1, "manifest");
    const size_t n = fread(text, 1, MANIFEST_MAX, f);
    fclose(f);
    const bool ends = n > 1 && strlen(text) == n && text[n - 1] == '\n';
    const char *before = ends ? (const char *)memrchr(text, '\n', n - 1) : NULL;
    if (before && !strcmp(before + 1, manifest_seal(text, before + 1 - text).at)) { return text; }
    *why = text_of("%s: torn or changed", path.at);
    free(text);
    return NULL;
}
// Parses which blocks share, from the text after "share=" to the end of the line: N (consecutive
// blocks), or Nx (blocks with equal numbers modulo N). Returns false if it is neither.
static inline bool manifest_share(const char *text, int64_t layers, GptShare *share) {
    char *end = NULL;
    const int64_t n = strtoll(text, &end, 10);
    const bool cycle = *end == 'x', good = n >= 1 && n <= layers && end[cycle] == '\n';
    if (good) { *share = gpt_share(layers, n, cycle ? n : 0); }
    return good;
}
// Reads what the line of a model says before its layers, if it names an architecture. Returns the
// rest of the line; NULL if it is not readable.
static inline const char *manifest_architecture(const char *line, GptConfig *c) {
    RotaryScaling *r = &c->scaling;
    char name[16];
    int tie = 0, used = 0;
    if (!strncmp(line, "arch=gpt2,layers", 16)) { return line + 10; }
    const int found = sscanf(line,
                             "arch=%15[a-z0-9],tie=%d,kv_heads=%" SCNd64 ",head_dim=%" SCNd64
                             ",ffn=%" SCNd64 ",theta=%lg,eps=%lg,rope_factor=%lg,rope_low=%lg,"
                             "rope_high=%lg,rope_original=%" SCNd64 ",%n",
                             name, &tie, &c->kv_heads, &c->head_dim, &c->ffn, &c->theta, &c->eps,
                             &r->factor, &r->low, &r->high, &r->original, &used);
    if (found != 11 || !used) { return NULL; }
    line += used;
    const int experts = sscanf(line,
                               "experts=%" SCNd64 ",top_k=%" SCNd64 ",expert_ffn=%" SCNd64
                               ",prototypes=%" SCNd64 ",%n",
                               &c->experts, &c->top_k, &c->expert_ffn, &c->prototypes, &used);
    if (experts == 4) { line += used; }
    if (sscanf(line, "shared_experts=%" SCNd64 ",shared_expert_ffn=%" SCNd64 ",%n",
               &c->shared_experts, &c->shared_expert_ffn, &used) == 2) {
        line += used;
    }
    c->arch = gpt_architecture(name, strlen(name), tie, experts == 4);
    return c->arch > 0 ? line : NULL;
}
// Reads the model of a manifest. Returns false if the text has none. optimizer: space for 8 bytes.
static inline bool manifest_model(const char *text, GptConfig *c, GptShare *share,
                                  char *optimizer) {
    const char *line = manifest_line(text, "model"), *shared = ",share=";
    int used = 0;
    memset(c, 0, sizeof *c);
    if (line && !strncmp(line, "arch=", 5)) { line = manifest_architecture(line, c); }
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
// Writes the first key=value of a run's model that a checkpoint's line of the model has otherwise.
static inline Text manifest_difference(const char *line, const char *asked) {
    for (const char *at = asked, *end; *at && *at != '\n'; at = end + (*end == ',')) {
        const size_t key = strcspn(at, "=,\n") + 1;
        const char *there = line;
        end = at + strcspn(at, ",\n");
        while (*there && *there != '\n' && strncmp(there, at, key)) {
            there += strcspn(there, ",\n");
            there += *there == ',';
        }
        const size_t length = strcspn(there, ",\n"), n = (size_t)(end - at);
        if (length == n && !strncmp(there, at, n)) { continue; }
        return text_of("%.*s is %.*s in the checkpoint, %.*s is asked for", (int)key - 1, at,
                       length > key ? (int)(length - key) : 4, length > key ? there + key : "none",
                       (int)(n - key), at + key);
    }
    return text_of("its blocks share");
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
           manifest_number_or_none(text, "lr", &p->lr) &&
           manifest_text(text, "compute", "?", p->compute, sizeof p->compute) &&
           manifest_text_or_none(text, "products", p->products, sizeof p->products) &&
           manifest_text_or_none(text, "order", p->order, sizeof p->order) &&
           manifest_text_or_none(text, "tokenizer", p->tokenizer, sizeof p->tokenizer) &&
           manifest_text(text, "privacy", "none", p->privacy, sizeof p->privacy);
}

#endif
