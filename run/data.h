// data.h: opens the data of a run: shards for training and validation, multiple choices, and
// the one tokenizer of all of them.
#ifndef DATA_H
#define DATA_H

#include "base/base.h"
#include "base/files.h"
#include "base/readable.h"
#include "checkpoint/huggingface.h"
#include "checkpoint/manifest.h"
#include "checkpoint/model_file.h"
#include "dataloader.h"
#include "model/architecture.h"
#include "options.h"
#include "plan/plan.h"
#include "run/trainer.h"
#include "text/shard_file.h"
#include "text/tokenizer.h"
#include "text/tokenizer_encode.h"
#include "text/tokenizer_json.h"

// Returns the samples of one validation. Labelled samples are used once at most.
static inline int64_t validation_samples(const Config *c, const Dataset *val) {
    int64_t all = val->windows, asked = c->options.val_batches * c->samples;
    return asked < 0 || (val->labels && asked > all) ? all : asked;
}
// Refuses a validation of no samples, which has no loss.
static inline void check_validation(const Config *c, const Dataset *val) {
    const Options *o = &c->options;
    if (validation_samples(c, val)) { return; }
    if (!o->val_batches) {
        die(EXIT_INPUT, "--val-every 0 asks for no validation",
            "--val-batches 0: a validation of nothing has no loss");
    }
    die(EXIT_INPUT, "use a smaller --seq-len or more data; --val-batches 1 begins it again",
        "--val %s: expected at least one window of %" PRId64
        " tokens and one more for --val-batches -1, found %" PRId64 " tokens",
        o->val, val->options.T, val->tokens);
}
// Returns the tokenizer file that a checkpoint was trained with: a copy in the folder of its run,
// or where its manifest says that the file was. Returns NULL if it is not there, and in `path`
// where it was; "" if the checkpoint has none.
static inline const char *tokenizer_of_checkpoint(const char *folder, const Options *o,
                                                  int32_t vocab, char *path, size_t bytes) {
    Text why;
    char *text = manifest_read(folder, &why);
    const char *line = text ? manifest_line(text, "tokenizer") : NULL;
    TokenizerId id = {};
    int used = 0;
    bool found = false;
    path[0] = 0;
    if (line) { sscanf(line, "%d %" SCNx64 " %n", &id.vocab, &id.hash, &used); }
    // the run's folder, and the one from which a new run moved it to earlier-1
    static const char *const places[] = {"%s/../tokenizer.bin", "%s/../tokenizer.json",
                                         "%s/../../tokenizer.bin", "%s/../../tokenizer.json"};
    for (int i = 0; used && !found && i <= LENGTH_OF(places); i++) {
        if (i < LENGTH_OF(places)) {
            snprintf(path, bytes, places[i], folder);
        } else {
            snprintf(path, bytes, "%.*s", (int)strcspn(line + used, "\n"), line + used);
        }
        if (access(path, R_OK)) { continue; }
        Tokenizer t = tokenizer_open_ending(path, vocab, o->end_of_text);
        found = tokenizer_same(t.id, id);
        free_all(t.path, t.begin, t.text);
    }
    free(text);
    return found ? path : NULL;
}
// Returns the tokenizer file of the run, or NULL: --tokenizer, or one that is stored next to the
// shards, those for training first. --prompt, and --export of a folder without data, also take that
// of the checkpoint and, with GPT-2's vocabulary, the one next to the default shards; --prompt also
// takes the one in the model's folder. `path` (of `bytes` bytes) is space for its name.
static inline const char *find_tokenizer(const Config *c, const ModelSpec *spec, bool validates,
                                         char *path, size_t bytes) {
    const Options *o = &c->options;
    const bool prompts = options_prompts(&c->given), *given = c->given.at;
    const bool trains = o->steps || given[OPTION_INDEX_train];
    const bool exports = export_is_folder(o->export_file) && !trains && !validates;
    const bool wants = prompts || (exports && !spec->huggingface);
    if (*o->tokenizer) { return o->tokenizer; }
    const char *file = trains ? tokenizer_find(o->train, path, bytes) : NULL;
    if (!file && (validates || (wants && given[OPTION_INDEX_val]))) {
        file = tokenizer_find(o->val, path, bytes);
    }
    Text lost = text_of("%s", "");
    if (!file && wants && spec->begun.units) {
        const int32_t vocab = (int32_t)spec->model.config.vocab;
        file = tokenizer_of_checkpoint(spec->file, o, vocab, path, bytes);
        if (!file) { lost = text_of("%s", path); }
    }
    if (!file && prompts && spec->huggingface) {
        snprintf(path, bytes, "%s/tokenizer.json", spec->file);
        file = access(path, R_OK) ? NULL : path;
    }
    if (!file && wants && spec->model.config.vocab == GPT2_EOT + 1) {
        file = tokenizer_find(o->train, path, bytes);
    }
    if (!file && prompts && *lost.at) {
        die(EXIT_INPUT, "give it by --tokenizer",
            "--prompt: the tokenizer of %s is neither beside it nor where it was: %s", spec->file,
            lost.at);
    }
    return file;
}
// Refuses data made by several tokenizers, or by one that does not fit the model: training or
// evaluating on them would mean nothing.
static inline void check_tokenizers(const Options *o, const Data *d, int32_t vocab,
                                    const char *file) {
    const Dataset *data[] = {&d->train, &d->val, &d->hellaswag};
    const char *names[] = {o->train, o->val, o->hellaswag};
    CommonTokenizer common = {};
    common_tokenizer_add(&common, d->tokenizer.id, "the file", file);
    for (int i = 0; i < 3; i++) {
        common_tokenizer_add(&common, data[i]->tokenizer, data[i]->options.flag, names[i]);
    }
    common_tokenizer_check_model(&common, vocab);
    for (int i = 0; i < 3; i++) { common_tokenizer_check(&common, data[i], names[i]); }
}
// -------------------------------------------------------------------------------------------------
// The order of samples, as a checkpoint's manifest has it: what a position in it depends on

typedef struct {
    int64_t shuffle, seed, documents, seq_len, windows, shards, tokens;
    uint64_t hash; // of the shards
} SampleOrder;
#define ORDER_FORMAT                                                                               \
    "shuffle=%" PRId64 " seed=%" PRId64 " documents=%" PRId64 " seq_len=%" PRId64                  \
    " windows=%" PRId64 " shards=%" PRId64 " tokens=%" PRId64
static inline SampleOrder order_of(const Dataset *d) {
    const SampleOrder order = {
        .shuffle = d->options.shuffle,
        .seed = (int64_t)d->options.seed,
        .documents = d->options.windows == WINDOWS_DOCUMENT,
        .seq_len = d->options.T,
        .windows = d->windows,
        .shards = d->shard_count,
        .tokens = d->tokens,
        .hash = dataset_fingerprint(d, d->shard_count),
    };
    return order;
}
static inline void order_text(const Dataset *d, char *text, size_t bytes) {
    const SampleOrder o = order_of(d);
    snprintf(text, bytes, ORDER_FORMAT " hash=%016" PRIx64, o.shuffle, o.seed, o.documents,
             o.seq_len, o.windows, o.shards, o.tokens, o.hash);
}
static inline bool order_parse(const char *text, SampleOrder *o) {
    return sscanf(text,
                  "shuffle=%" SCNd64 " seed=%" SCNd64 " documents=%" SCNd64 " seq_len=%" SCNd64
                  " windows=%" SCNd64 " shards=%" SCNd64 " tokens=%" SCNd64 " hash=%" SCNx64,
                  &o->shuffle, &o->seed, &o->documents, &o->seq_len, &o->windows, &o->shards,
                  &o->tokens, &o->hash) == 8 &&
           o->windows >= 0 && o->shards >= 0;
}
// Names the first flag by which the two orders differ from sample `position` on; "" if none does:
// windows that were used do not come again before the others have.
static inline Text order_difference(const SampleOrder *was, const Dataset *d, int64_t position) {
    const SampleOrder now = order_of(d);
    const bool same_cut = was->seq_len == now.seq_len && was->documents == now.documents,
               same_data = was->tokens == now.tokens && was->hash == now.hash,
               begins = was->windows && position % was->windows == 0; // a pass over the data
    const bool added = now.shards >= was->shards && !was->shuffle && !now.shuffle &&
                       position <= was->windows &&
                       dataset_fingerprint(d, (int)was->shards) == was->hash;
    if (was->seq_len != now.seq_len) {
        return text_of("--seq-len %" PRId64 ", it had %" PRId64, now.seq_len, was->seq_len);
    }
    if (!same_cut) {
        static const char *const names[] = {"continuous", "document"};
        return text_of("--windows %s, it had %s", names[now.documents], names[!!was->documents]);
    }
    if (!same_data && !added) {
        return text_of("--train of %" PRId64 " shard%s with %" PRId64 " tokens, it had %" PRId64
                       " with %" PRId64 "%s",
                       now.shards, plural(now.shards), now.tokens, was->shards, was->tokens,
                       was->tokens == now.tokens ? ", other ones or in another order" : "");
    }
    if (was->shuffle != now.shuffle && !begins) {
        return text_of("--shuffle %" PRId64 ", it had %" PRId64, now.shuffle, was->shuffle);
    }
    if (now.shuffle && was->seed != now.seed && !begins) {
        return text_of("--seed %" PRId64 ", it had %" PRId64, now.seed, was->seed);
    }
    return text_of("%s", "");
}
// Warns if the samples of a resumed run come in another order than the checkpoint's. Private runs
// have none; what they may change is in their record (privacy_ledger.h).
static inline void order_check(const char *text, const Dataset *d, int64_t position) {
    SampleOrder was = {};
    if (!order_parse(text, &was) || !d->tokens) { return; }
    const Text other = order_difference(&was, d, position);
    if (!*other.at) { return; }
    fprintf(stderr,
            "warning: --resume with another order of the training data than the checkpoint's: %s. "
            "It has used %" PRId64 " of its %" PRId64 " windows in this pass; what follows is "
            "sample %" PRId64 " of the new order: some windows are used twice in this pass, others "
            "not at all\n",
            other.at, was.windows ? position % was.windows : position, was.windows, position);
}

static inline int tokenizer_copy_file(const char *path, const char *out, const char *end) {
    const Text to = text_of("%s/tokenizer.%s", out, end);
    const FileIdentity from = file_identity(path), there = file_identity(to.at);
    if (file_same(&from, &there)) { return 0; }
    size_t bytes;
    const void *map = map_file(path, "a tokenizer", TOKENIZER_HINT, 1, &bytes);
    FileWriter w;
    writer_open(&w, to.at);
    writer_add(&w, map, bytes);
    unmap_file(map);
    return writer_close(&w);
}
// Writes tokenizer.bin, which also says which token ends texts, from a tokenizer.json.
static inline int tokenizer_write(const Tokenizer *t, const char *out) {
    int32_t header[DATA_HEADER_BYTES / 4] = {TOKENIZER_MAGIC, TOKENIZER_LONG - 1, t->vocab, t->eot};
    int length;
    for (int32_t id = 0; id < t->vocab; id++) {
        tokenizer_decode(t, id, &length);
        if (length >= TOKEN_LONG) { header[1] = TOKENIZER_LONG; }
    }
    const unsigned char *last = tokenizer_decode(t, t->vocab - 1, &length);
    FileWriter w;
    writer_open(&w, text_of("%s/tokenizer.bin", out).at);
    writer_add(&w, header, sizeof header);
    writer_add(&w, t->text, (size_t)(last + length - t->text));
    return writer_close(&w);
}
// Copies the tokenizer's file into OUT, where --prompt finds it, and the one with its merges.
// Returns 0 or an errno. Rank 0 calls it.
static inline int tokenizer_keep(const Tokenizer *t, const char *out) {
    char merges[1100];
    if (!t->path) { return 0; }
    const bool beside = !t->from_json && encode_beside(t->path, merges, sizeof merges);
    const int error = t->named_end    ? tokenizer_write(t, out)
                      : !t->from_json ? tokenizer_copy_file(t->path, out, "bin")
                                      : 0;
    if (error || !(t->from_json || beside)) { return error; }
    return tokenizer_copy_file(t->from_json ? t->path : merges, out, "json");
}

// Opens the data of a run. train_alone: only what it trains on.
static inline Data open_data(const Config *c, const ModelSpec *spec, bool train_alone) {
    const Options *o = &c->options;
    const int32_t vocab = (int32_t)spec->model.config.vocab;
    const bool validates =
        !train_alone && o->val_every && (*o->val || c->given.at[OPTION_INDEX_val]);
    char path[1100];
    Data d = {};
    const char *file = find_tokenizer(c, spec, validates, path, sizeof path);
    d.tokenizer = tokenizer_open_ending(file, vocab, o->end_of_text);
    if (options_prompts(&c->given) && !d.tokenizer.vocab) {
        die(EXIT_INPUT, TOKENIZER_HINT,
            "--prompt: no tokenizer for the model's vocabulary of %d: --tokenizer is not given, "
            "and "
            "none is beside the shards or in the model's folder",
            vocab);
    }
    const DatasetOptions val = {.flag = "--val",
                                .T = o->seq_len,
                                .vocab = vocab,
                                .eot = d.tokenizer.eot,
                                .windows = WINDOWS_CONTINUOUS};
    DatasetOptions hellaswag = val, train = val;
    hellaswag.flag = "--hellaswag";
    train.flag = "--train";
    train.windows = o->windows == WINDOWS_DOCUMENT ? WINDOWS_DOCUMENT : WINDOWS_CONTINUOUS;
    train.shuffle = o->shuffle != 0;
    train.seed = o->seed;
    train.windows_per_document = o->dp_unit == DP_DOCUMENT ? o->dp_windows_per_document : 0;
    if (o->steps) { d.train = dataset_open(o->train, train); }
    if (validates) { d.val = dataset_open(o->val, val); }
    if (*o->hellaswag && !train_alone) { d.hellaswag = choices_open(o->hellaswag, hellaswag); }
    check_tokenizers(o, &d, vocab, file);
    if (validates) {
        check_validation(c, &d.val);
        d.val_bytes = dataset_target_bytes(&d.val, &d.tokenizer, validation_samples(c, &d.val));
    }
    return d;
}

#endif
