// dataloader.h: token shards on disk -> batches of (inputs, targets); tokens -> text.
//
// Stream     The tokens 0 .. n-1: all shards of a pattern, joined in byte order of their names. The
//            shards are mapped, not copied. A shard must not change while it is in use: one that is
//            cut off, or has larger tokens than before, ends the program (EXIT_INPUT).
// Window     T inputs and T targets; the targets are the inputs shifted by one token. Windows have
//            numbers:
//            continuous  window w begins at token (w T) mod n. Where the stream ends, the window
//                        continues at token 0.
//            document    A document begins at each end-of-text token (tokens before the first one
//                        are a document too). It is cut from its beginning into windows of T
//                        targets. The last one is padded: inputs with end-of-text, targets with -1
//                        (masked). No target is in the next document, so a document of k tokens has
//                        k - 1 targets and ceil((k - 1) / T) windows. windows_per_document limits
//                        the windows of a document; the rest of the document is left out.
//            labelled    Labelled shards (images) always use document windows. Each document ends
//                        with its label and is one window.
//            choices     A context and a completion. The targets are those of the completion; all
//                        others are masked (-1). Window w is completion w mod 4 of example w div 4.
//                        T is the length of the longest window.
// Sample     The position of a run is one integer g, counted over the whole run:
//            shuffle 0   continuous: window g; document: window g mod W
//            shuffle 1   window permutation_e(g mod W) in epoch e = g div W. The permutation
//                        depends on (seed, e) alone. For continuous windows W = (n - 1) div T: the
//                        windows that do not wrap.
//            A private run has no g. Each step draws each of the windows 0 .. W-1 independently
//            with the same probability (Poisson), by secret random numbers (noise.h), and uses the
//            list of drawn windows.
// Invariants After dataset_open() nothing is allocated or changed. Any thread of any rank may call
//            any function of a const Dataset, and all ranks get the same result. Nothing here
//            communicates. Files are untrusted: every length and every token is checked when a file
//            is opened.
#ifndef DATALOADER_H
#define DATALOADER_H

#include "base/base.h"
#include "base/files.h"
#include "ops/noise.h"
#include "text/choices_file.h"
#include "text/shard_file.h"
#include "text/tokenizer.h"

#include <glob.h> // patterns of file names

enum {
    // low bits of a document window's table entry; its upper 40 bits are the first token
    TARGET_BITS = 24,
    // a position is never moved with probability 2^-64; streams have fewer than 2^40 positions
    PERMUTATION_ROUNDS = 64
};
// "shuffle" in ASCII: separates these random numbers from all others
static const uint64_t PERMUTATION_STREAM = 0x73687566666c65;
typedef enum { WINDOWS_CONTINUOUS, WINDOWS_DOCUMENT } WindowKind;

typedef struct {
    const char *flag; // flag that gave the pattern, for messages: "--train"
    int64_t T;        // tokens of a sample; of choices: the limit
    int32_t vocab;    // tokens must be below this
    int32_t eot;      // end-of-text token; used by document windows only
    WindowKind windows;
    bool shuffle;
    uint64_t seed;                // of the shuffle
    int64_t windows_per_document; // limit of document windows of a document; 0: none
} DatasetOptions;

typedef struct {
    void *map; // the whole file
    size_t bytes;
    const MappedFile *file; // NULL: the map is memory
    Tokens tokens;          // inside the map
    int64_t begin, count;   // first token's index in the stream; number of tokens (> 0)
} TokenShard;

typedef struct {
    int32_t masked; // number of leading masked targets, which belong to the context
    bool right;     // this is the right completion
} ChoiceRow;

typedef struct {
    // as used: T of choices and windows of labelled shards differ from those requested
    DatasetOptions options;
    TokenShard *shards; // in order of begin
    int shard_count;
    int64_t tokens; // n
    // W, of an epoch, of a private run's draws and of a validation over all data: whole windows
    // (continuous), or all windows (document); 0: a continuous stream is shorter than T + 1
    int64_t windows;
    int64_t documents; // that document windows are of; continuous windows: 0
    // document and choice windows: first token << TARGET_BITS | number of targets before the
    // padding; continuous windows: NULL
    uint64_t *table;
    // the labels are tokens first_label .. first_label + labels - 1; labels 0: unlabelled shards
    int32_t labels, first_label;
    int32_t largest;       // largest token
    TokenizerId tokenizer; // of the shards whose tokenizer is known
    // a shard of unknown tokenizer has at least FEW_TOKENS tokens, all below BYTE_TOKENS
    bool like_bytes;
    ChoiceRow *rows; // [windows] of choices; else NULL
} Dataset;

// -------------------------------------------------------------------------------------------------
// Shards of a data set

static inline int data_compare_names(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// Adds the properties of a shard to the data set, and checks that they agree with those of the
// others. first: path of the first shard.
static inline void dataset_add_facts(Dataset *ds, const char *path, const char *first,
                                     const ShardFacts *f) {
    static const char hint[] = "these are shards of different data sets: name those of one";
    if (path == first) {
        ds->labels = f->labels;
        ds->first_label = f->first_label;
    }
    if (f->labels != ds->labels || f->first_label != ds->first_label) {
        die(EXIT_INPUT, hint,
            "%s: expected %d labels from token %d on, as in %s, found %d from %d on", path,
            ds->labels, ds->first_label, first, f->labels, f->first_label);
    }
    if (ds->tokenizer.vocab && f->tokenizer.vocab && !tokenizer_same(ds->tokenizer, f->tokenizer)) {
        die(EXIT_INPUT, hint,
            "%s %s: expected tokens of one tokenizer (" TOKENIZER_ID
            "), found another one (" TOKENIZER_ID ")",
            ds->options.flag, path, TOKENIZER_ID_OF(ds->tokenizer), TOKENIZER_ID_OF(f->tokenizer));
    }
    if (f->tokenizer.vocab) { ds->tokenizer = f->tokenizer; }
    ds->like_bytes |= !f->tokenizer.vocab && like_bytes(f->count, f->largest);
    ds->largest = f->largest > ds->largest ? f->largest : ds->largest;
}

// Lists the files that a pattern matches. Returns glob()'s result. The caller calls globfree().
static inline int data_glob(const char *pattern, glob_t *names) {
    memset(names, 0, sizeof *names);
    int flags = GLOB_NOSORT;
#ifdef GLOB_BRACE
    flags |= GLOB_BRACE; // a list: "{one,two}.bin"
#endif
    return glob(pattern, flags, NULL, names);
}
// Returns the files that a pattern matches, in byte order of their names whatever the locale. The
// caller calls globfree().
static inline glob_t dataset_names(const char *flag, const char *pattern) {
    glob_t names;
    int failed = data_glob(pattern, &names);
    if (failed == GLOB_NOSPACE) {
        die(EXIT_RESOURCES, "", "%s %s: no memory to list the files", flag, pattern);
    }
    if (failed || names.gl_pathc == 0) {
        const bool of_val = !strcmp(flag, "--val");
        die(EXIT_INPUT, of_val ? VALIDATION_HINT : DATA_HINT,
            "%s %s: expected shards of tokens, found no such file", flag, pattern);
    }
    qsort(names.gl_pathv, names.gl_pathc, sizeof *names.gl_pathv, data_compare_names);
    return names;
}
// Returns the status of the files that a pattern matches; links are followed. The caller frees it.
static inline struct stat *data_files(const char *pattern, size_t *count) {
    glob_t names;
    *count = data_glob(pattern, &names) ? 0 : names.gl_pathc;
    struct stat *files = new_array(struct stat, *count, "shards");
    for (size_t i = 0; i < *count; i++) {
        if (stat(names.gl_pathv[i], &files[i])) { files[i].st_mode = 0; }
    }
    globfree(&names);
    return files;
}
// Returns whether two patterns have a file in common, by whatever path or link.
static inline bool dataset_shares_file(const char *pattern, const char *other) {
    size_t n, m;
    struct stat *a = data_files(pattern, &n), *b = data_files(other, &m);
    bool shares = !strcmp(pattern, other);
    for (size_t i = 0; i < n * m && !shares; i++) { shares = stat_same(&a[i / m], &b[i % m]); }
    free_all(a, b);
    return shares;
}

// Maps and checks every shard that matches, in byte order of the names. Sets the shards, their
// common properties and the number of tokens.
static inline void dataset_map(Dataset *ds, const char *pattern) {
    glob_t names = dataset_names(ds->options.flag, pattern);
    TokenizerBeside beside = {};
    ds->shards = new_array(TokenShard, names.gl_pathc, "the list of shards");
    for (size_t i = 0; i < names.gl_pathc; i++) {
        const char *path = names.gl_pathv[i];
        TokenShard shard;
        shard.map = data_map_file(path, "a shard of tokens", DATA_HINT, &shard.bytes);
        shard.file = mapped_files;
        posix_madvise(shard.map, shard.bytes, POSIX_MADV_SEQUENTIAL);
        ShardFacts facts = shard_check(path, shard.map, shard.bytes, ds->options.vocab);
        if (!facts.tokenizer.vocab) {
            facts.tokenizer = tokenizer_beside(&beside, path, ds->options.vocab);
        }
        dataset_add_facts(ds, path, names.gl_pathv[0], &facts);
        posix_madvise(shard.map, shard.bytes, POSIX_MADV_NORMAL);
        shard.tokens = facts.tokens;
        shard.begin = ds->tokens;
        shard.count = facts.count;
        if (shard.count) {
            ds->shards[ds->shard_count++] = shard;
        } else {
            unmap_file(shard.map);
        }
        ds->tokens += shard.count;
        keep_alive();
    }
    globfree(&names);
    if (ds->tokens < 2) {
        die(EXIT_INPUT, DATA_HINT, "%s %s: expected at least 2 tokens, found %" PRId64,
            ds->options.flag, pattern, ds->tokens);
    }
}

// -------------------------------------------------------------------------------------------------
// The stream

// out[count] = tokens at .. at+count-1 of the stream, 0 <= at < n. Token 0 follows token n-1, any
// number of times.
static inline void dataset_copy(const Dataset *ds, int64_t at, int64_t count, int32_t *out) {
    int low = 0, high = ds->shard_count; // the shard that holds `at` is one of low .. high-1
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (ds->shards[middle].begin <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    for (int s = low; count > 0; s = s + 1 < ds->shard_count ? s + 1 : 0) {
        const TokenShard *shard = &ds->shards[s];
        int64_t piece = min_i64(count, shard->count - (at - shard->begin));
        const Tokens in = tokens_from(shard->tokens, at - shard->begin);
        int32_t largest = 0;
        for (int64_t i = 0; i < piece; i++) {
            out[i] = (int32_t)load_token(in.at, in.width, i);
            largest = out[i] > largest ? out[i] : largest;
        }
        if (shard->file) { mapped_check(shard->file); }
        if (shard->file && largest > ds->largest) { mapped_refuse(shard->file); }
        out += piece;
        count -= piece;
        at += piece;
        if (at == ds->tokens) { at = 0; }
    }
}
static inline int32_t dataset_token(const Dataset *ds, int64_t at) {
    int32_t token;
    dataset_copy(ds, at, 1, &token);
    return token;
}

// -------------------------------------------------------------------------------------------------
// Document windows: the table

// Returns the first end-of-text token at or after `at`, or n. *shard is a hint that moves forward
// over calls with growing `at`.
static inline int64_t next_document(const Dataset *ds, int64_t at, int *shard) {
    for (; *shard < ds->shard_count; (*shard)++) {
        const TokenShard *s = &ds->shards[*shard];
        int64_t offset = max_i64(at - s->begin, 0);
        if (offset >= s->count) { continue; }
        offset += find_token(tokens_from(s->tokens, offset), s->count - offset, ds->options.eot,
                             ds->options.eot);
        if (offset < s->count) { return s->begin + offset; }
    }
    return ds->tokens;
}

// Checks that a document of labelled shards ends with its label and fits into one window.
static inline void check_labelled_document(const Dataset *ds, const char *pattern, int64_t begin,
                                           int64_t end) {
    int64_t last = (int64_t)dataset_token(ds, end - 1) - ds->first_label, T = end - begin - 1;
    if (last < 0 || last >= ds->labels) {
        die(EXIT_INPUT,
            "the shards are marked as labelled: make them with scripts/prepare_data.py --images",
            "%s %s: expected a label (%d to %d) at the end of the document at token %" PRId64
            ", found %d",
            ds->options.flag, pattern, ds->first_label, (int)(ds->first_label + ds->labels - 1),
            begin, (int)(ds->first_label + last));
    }
    if (T > ds->options.T) {
        die(EXIT_INPUT, "labelled documents are not cut: use this --seq-len or a larger one",
            "%s %s: expected --seq-len %" PRId64 " at least, for the document at token %" PRId64
            ", found %" PRId64,
            ds->options.flag, pattern, T, begin, ds->options.T);
    }
}

// Appends the windows of the document in tokens begin .. end-1, up to windows_per_document. A
// document of one token has none.
static inline void add_document(Dataset *ds, const char *pattern, int64_t begin, int64_t end,
                                int64_t *capacity) {
    if (ds->labels && begin < end) { check_labelled_document(ds, pattern, begin, end); }
    const int64_t most = ds->options.windows_per_document ? ds->options.windows_per_document
                                                          : INT64_MAX,
                  before = ds->windows;
    for (int64_t at = begin; at + 1 < end && ds->windows - before < most; at += ds->options.T) {
        ds->table = grow_array(uint64_t, ds->table, ds->windows, capacity, "document windows");
        ds->table[ds->windows++] =
            (uint64_t)at << TARGET_BITS | min_i64(ds->options.T, end - 1 - at);
    }
    ds->documents += ds->windows > before;
}

// Builds the table of document windows in one pass over the stream: 8 bytes a window.
static inline void find_documents(Dataset *ds, const char *pattern) {
    DatasetOptions o = ds->options;
    if (o.eot < 0 || o.eot >= o.vocab) {
        die(EXIT_INPUT, "give the --tokenizer of the shards, or of text use --windows continuous",
            "%s %s: expected an end-of-text token below the vocabulary of %d, to find documents, "
            "found %d",
            o.flag, pattern, o.vocab, o.eot);
    }
    int64_t capacity = 0;
    int shard = 0;
    int64_t end = next_document(ds, 0, &shard);
    if (end == ds->tokens) {
        die(EXIT_INPUT, "use --windows continuous, or prepare the shards with documents",
            "%s %s: expected documents that begin with token %d, found none in %" PRId64 " tokens",
            o.flag, pattern, o.eot, ds->tokens);
    }
    add_document(ds, pattern, 0, end, &capacity);
    while (end < ds->tokens) {
        int64_t begin = end;
        end = next_document(ds, begin + 1, &shard);
        add_document(ds, pattern, begin, end, &capacity);
    }
    if (ds->windows == 0) {
        die(EXIT_INPUT, DATA_HINT,
            "%s %s: expected a document of 2 tokens or more, found only documents of 1 token",
            o.flag, pattern);
    }
    void *fitted = realloc(ds->table, ds->windows * sizeof *ds->table);
    if (fitted) { ds->table = (uint64_t *)fitted; }
}

// -------------------------------------------------------------------------------------------------
// Open and close

// Opens every shard that matches the pattern (glob, with {one,two} lists). Reads each shard once,
// to check it. Any rank may call it alone. Ends the program (EXIT_INPUT) and names the file if a
// file or an option is wrong.
static inline Dataset dataset_open(const char *pattern, DatasetOptions options) {
    Dataset ds = {};
    ds.options = options;
    if (options.T < 1 || options.T >= INT64_C(1) << 22) {
        die(EXIT_INPUT, "", "--seq-len: expected 1 to %d, found %" PRId64, (1 << 22) - 1,
            options.T);
    }
    if (options.vocab < 1) {
        die(EXIT_INPUT, "", "expected a vocabulary of at least 1, found %d", options.vocab);
    }
    dataset_map(&ds, pattern);
    if (ds.tokens >= INT64_C(1) << 40) { // so that no product below and no table entry overflows
        die(EXIT_INPUT, "use fewer shards",
            "%s %s: expected fewer than 2^40 tokens, found %" PRId64, options.flag, pattern,
            ds.tokens);
    }
    if (ds.labels) { ds.options.windows = WINDOWS_DOCUMENT; }
    if (ds.options.windows == WINDOWS_DOCUMENT) {
        find_documents(&ds, pattern);
    } else {
        ds.windows = (ds.tokens - 1) / options.T;
    }
    if (options.shuffle && ds.windows == 0) {
        die(EXIT_INPUT, "use a smaller --seq-len, more data or --shuffle 0",
            "%s %s: expected at least one window of %" PRId64
            " tokens and one more to shuffle, found %" PRId64 " tokens",
            options.flag, pattern, options.T, ds.tokens);
    }
    return ds;
}

// Returns a checksum of everything that determines the samples: all tokens in order, the document
// separator and the labels. The names and boundaries of files do not matter. This reads all data
// once more, because data sets that differ in a single sample must get different checksums.
static inline uint64_t dataset_checksum(const Dataset *ds) {
    enum { STEP = 1 << 22 };
    const bool documents = ds->options.windows == WINDOWS_DOCUMENT;
    const int64_t facts[] = {documents, documents ? ds->options.eot : 0, ds->labels,
                             ds->first_label};
    Checksum sum = checksum_begin();
    checksum_add(&sum, facts, sizeof facts);
    for (const TokenShard *s = ds->shards; s < ds->shards + ds->shard_count; s++) {
        for (int64_t at = 0; at < s->count; at += STEP, keep_alive()) {
            checksum_add(&sum, tokens_from(s->tokens, at).at,
                         (size_t)min_i64(STEP, s->count - at) * s->tokens.width);
        }
    }
    return checksum_end(&sum);
}

// Returns a hash of the first `shards` shards, by which a resumed run knows them again, whatever
// their names: of their numbers of tokens, and of some of these in each.
static inline uint64_t dataset_fingerprint(const Dataset *ds, int shards) {
    enum { PLACES = 16, STEP = 1 << 10 };
    Checksum sum = checksum_begin();
    for (const TokenShard *s = ds->shards; s < ds->shards + shards; s++) {
        checksum_add(&sum, &s->count, sizeof s->count);
        for (int i = 0; i < PLACES; i++) {
            const int64_t n = min_i64(STEP, s->count), at = (s->count - n) * i / (PLACES - 1);
            checksum_add(&sum, tokens_from(s->tokens, at).at, (size_t)n * s->tokens.width);
        }
    }
    return checksum_end(&sum);
}

// Checks the tokens of the data set `name` against the tokenizer or, if that is unknown, the
// model's vocabulary.
static inline void common_tokenizer_check(const CommonTokenizer *common, const Dataset *ds,
                                          const char *name) {
    const int32_t known = common->id.vocab, vocab = known ? known : ds->options.vocab;
    if (known && ds->largest >= known) {
        die(EXIT_INPUT, TOKENIZERS_HINT,
            "%s %s: expected tokens below %d, the vocabulary of the tokenizer that %s %s has, "
            "found %d",
            ds->options.flag, name, known, common->flag, common->name, ds->largest);
    }
    if (ds->like_bytes && !vocabulary_fits(vocab, BYTE_TOKENS)) {
        die(EXIT_INPUT, TOKENIZERS_HINT ", and a model with its vocabulary",
            "%s %s: expected tokens of a vocabulary of %d, found none above %d: these are bytes",
            ds->options.flag, name, vocab, BYTE_TOKENS - 1);
    }
}

// -------------------------------------------------------------------------------------------------
// Choices: a context and completions. The model chooses the completion with the lowest loss per
// token.

// Appends the rows of an example: the context's tokens, then those of a completion.
static inline void add_choices(Dataset *ds, const ChoiceExample *e) {
    const ChoiceTokens *context = &e->context;
    for (int c = 0; c < CHOICES; c++) {
        const ChoiceTokens *completion = &e->completion[c];
        uint16_t *out = (uint16_t *)ds->shards[0].map + ds->tokens;
        const int64_t count = context->count + completion->count;
        const ChoiceRow row = {(int32_t)(context->count - 1), c == e->right};
        memcpy(out, context->tokens, context->count * sizeof *out);
        memcpy(out + context->count, completion->tokens, completion->count * sizeof *out);
        ds->rows[ds->windows] = row;
        ds->table[ds->windows++] = (uint64_t)ds->tokens << TARGET_BITS | (count - 1);
        ds->tokens += count;
        ds->options.T = max_i64(ds->options.T, count - 1);
    }
}

// Opens a file of multiple choices as a data set with CHOICES windows for each example. Its T is
// that of the longest row, which must not be longer than options.T. The rows are copied: 2 bytes a
// token, at most CHOICES times the size of the file, whatever its header says.
static inline Dataset choices_open(const char *path, DatasetOptions options) {
    size_t bytes;
    int64_t longest, most = 0, at = 0;
    const void *map = data_map_file(path, "multiple choices", CHOICES_HINT, &bytes);
    int64_t examples = choices_header(path, map, &longest);
    Dataset ds = {};
    ds.options = options;
    ds.options.windows = WINDOWS_DOCUMENT;
    ds.options.T = 0;
    ds.options.eot = (int32_t)max_i64(options.eot, 0); // padding: any token serves
    ds.table = new_array(uint64_t, CHOICES * examples, "multiple choices");
    ds.rows = new_array(ChoiceRow, CHOICES * examples, "multiple choices");
    ds.shards = new_array(TokenShard, 1, "multiple choices");
    ds.shards[0].bytes = CHOICES * bytes;
    ds.shard_count = 1;
    // MAP_NORESERVE: only pages that are written take memory
    ds.shards[0].map = mmap(NULL, ds.shards[0].bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (ds.shards[0].map == MAP_FAILED) {
        die(EXIT_RESOURCES, "free memory", "%s: cannot take %zu bytes of memory", path,
            ds.shards[0].bytes);
    }
    const Tokens tokens = {ds.shards[0].map, sizeof(uint16_t)};
    ds.shards[0].tokens = tokens;
    ChoiceFile f = {.path = path,
                    .words = (const uint16_t *)((const char *)map + DATA_HEADER_BYTES),
                    .end = (int64_t)(bytes - DATA_HEADER_BYTES) / 2};
    for (; f.example < examples; f.example++) {
        ChoiceExample example;
        const int64_t next = choices_example(f, at, options.vocab, &example);
        add_choices(&ds, &example);
        most = max_i64(most, 2 * (next - at));
        at = next;
    }
    ds.shards[0].count = ds.tokens;
    ds.largest = (int32_t)largest_token(tokens, ds.tokens);
    ds.like_bytes = like_bytes(ds.tokens, ds.largest); // the file does not name its tokenizer
    if (choices_byte(at) != (int64_t)bytes || most != longest) {
        die(EXIT_INPUT, CHOICES_HINT,
            "%s: expected a longest example of %" PRId64 " bytes and the end at byte %" PRId64
            ", found %" PRId64 " and %zu",
            path, longest, choices_byte(at), most, bytes);
    }
    unmap_file(map);
    if (ds.options.T > options.T) {
        die(EXIT_INPUT, "use this --seq-len or a larger one: rows are not cut",
            "%s %s: expected --seq-len %" PRId64 " at least, for its longest row, found %" PRId64,
            options.flag, path, ds.options.T, options.T);
    }
    return ds;
}

// -------------------------------------------------------------------------------------------------
// Samples and windows

// Returns the position of x (0 .. count-1) in the permutation that key selects: a bijection for
// every count >= 1. Swap-or-not (Hoang, Morris, Rogaway 2012): a round pairs each x with pivot - x,
// and a random bit of the pair decides whether the two are swapped. So every round is a bijection
// for any count; nothing is stored and nothing is drawn again.
static inline int64_t permutation(uint64_t key, int64_t count, int64_t x) {
    uint64_t n = count, place = x;
    for (uint64_t round = 0; round < PERMUTATION_ROUNDS; round++) {
        uint64_t round_key = mix64(key + round), pivot = round_key % n;
        uint64_t partner = pivot >= place ? pivot - place : pivot + n - place;
        uint64_t coin = mix64(round_key ^ (place > partner ? place : partner)) >> 63;
        place = coin ? partner : place;
    }
    return place;
}

// Returns the window of sample g >= 0 of the run.
static inline int64_t dataset_window(const Dataset *ds, int64_t g) {
    assert(g >= 0);
    if (ds->options.shuffle) {
        uint64_t key =
            random_u64(ds->options.seed, PERMUTATION_STREAM, (uint64_t)(g / ds->windows));
        return permutation(key, ds->windows, g % ds->windows);
    }
    return ds->options.windows == WINDOWS_DOCUMENT ? g % ds->windows : g;
}

// Returns where the padding of a window begins (T: not padded). Continuous windows may have any
// number >= 0; all others are 0 .. W-1.
static inline int64_t dataset_window_end(const Dataset *ds, int64_t window) {
    assert(window >= 0 && (!ds->table || window < ds->windows));
    return ds->table ? (int64_t)(ds->table[window] & ((1u << TARGET_BITS) - 1)) : ds->options.T;
}

// Returns how many targets of a window are masked before its first real one.
static inline int64_t dataset_window_masked(const Dataset *ds, int64_t window) {
    return ds->rows ? ds->rows[window].masked : 0;
}

// Returns the number of real (not masked) targets of a window, 1 .. T.
static inline int64_t dataset_window_targets(const Dataset *ds, int64_t window) {
    return dataset_window_end(ds, window) - dataset_window_masked(ds, window);
}

// Returns the number of real targets of sample g, without reading its tokens. So every rank can
// divide the step's loss by the sum over all samples of the step.
static inline int64_t dataset_targets(const Dataset *ds, int64_t g) {
    return dataset_window_targets(ds, dataset_window(ds, g));
}
static inline int64_t dataset_count_targets(const Dataset *d, int64_t first, int64_t samples) {
    int64_t targets = 0;
    for (int64_t g = first; g < first + samples; g++) { targets += dataset_targets(d, g); }
    return targets;
}

// Writes inputs[T], targets[T] of one window.
static inline void dataset_fill_window(const Dataset *ds, int64_t window, int32_t *inputs,
                                       int32_t *targets) {
    int64_t T = ds->options.T, n = ds->tokens, end = dataset_window_end(ds, window),
            held = min_i64(end + 1, T);
    // n T < 2^62
    int64_t begin = ds->table ? (int64_t)(ds->table[window] >> TARGET_BITS) : window % n * T % n;
    dataset_copy(ds, begin, held, inputs);
    memcpy(targets, inputs + 1, (held - 1) * sizeof *targets);
    if (end == T) { dataset_copy(ds, (begin + T) % n, 1, targets + T - 1); }
    for (int64_t i = held; i < T; i++) { inputs[i] = ds->options.eot; }
    for (int64_t i = end; i < T; i++) { targets[i] = -1; }
    for (int64_t i = 0; i < dataset_window_masked(ds, window); i++) { targets[i] = -1; }
}

// Writes inputs[count][T], targets[count][T] of the samples g .. g+count-1.
static inline void dataset_fill(const Dataset *ds, int64_t g, int64_t count, int32_t *inputs,
                                int32_t *targets) {
    int64_t T = ds->options.T;
    for (int64_t i = 0; i < count; i++) {
        dataset_fill_window(ds, dataset_window(ds, g + i), inputs + i * T, targets + i * T);
    }
}

// Writes inputs[count][T], targets[count][T] of the listed windows.
static inline void dataset_fill_windows(const Dataset *ds, const int64_t *windows, int64_t count,
                                        int32_t *inputs, int32_t *targets) {
    int64_t T = ds->options.T;
    for (int64_t i = 0; i < count; i++) {
        dataset_fill_window(ds, windows[i], inputs + i * T, targets + i * T);
    }
}

// Poisson sampling of a private run.
static inline int compare_windows(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}
// Draws each window with probability q, 0 < q <= 1, and writes them to windows[cap] in ascending
// order. If more than cap are drawn, keeps a uniformly random choice of cap of them. Returns how
// many. The result depends on the stream alone. Only the gaps between windows are drawn: a gap is g
// or longer with probability (1 - q)^g.
static inline int64_t dataset_sample_poisson(const Dataset *ds, double q, int64_t cap,
                                             NoiseStream stream, int64_t *windows) {
    assert(q > 0 && q <= 1 && cap > 0);
    const double log_left_out = log1p(-q); // q = 1: -INFINITY, so all gaps are 0
    NoiseDraws draws = noise_draws(stream);
    int64_t count = 0;
    for (int64_t at = 0;; at++) {
        const double gap = floor(log(noise_uniform(&draws)) / log_left_out);
        if (gap >= (double)(ds->windows - at)) { break; }
        at += (int64_t)gap;
        const int64_t place =
            count < cap ? count : (int64_t)((1.0 - noise_uniform(&draws)) * (count + 1));
        if (place < cap) { windows[place] = at; }
        count++;
    }
    if (count > cap) { qsort(windows, cap, sizeof *windows, compare_windows); }
    noise_wipe(&draws, sizeof draws);
    return min_i64(count, cap);
}

// Splits windows[count] into `parts` random parts: each window independently goes to one of them,
// with equal probabilities. Reorders the windows part by part; inside a part they keep their order.
// A part keeps at most `most` windows; its last ones are left out. begins[parts + 1]: where each
// part begins. Returns how many windows are left.
static inline int64_t dataset_split(int64_t *windows, int64_t count, int64_t parts, int64_t most,
                                    NoiseStream stream, int64_t *begins) {
    int64_t *part = new_array(int64_t, 2 * count + 1, "samples"), *all = part + count, left = 0;
    NoiseDraws draws = noise_draws(stream);
    for (int64_t i = 0; i < count; i++) {
        part[i] = min_i64((int64_t)((1.0 - noise_uniform(&draws)) * parts), parts - 1);
        all[i] = windows[i];
    }
    for (int64_t k = 0; k < parts; k++) {
        begins[k] = left;
        for (int64_t i = 0; i < count; i++) {
            if (part[i] == k && left < begins[k] + most) { windows[left++] = all[i]; }
        }
    }
    begins[parts] = left;
    noise_wipe(&draws, sizeof draws);
    free(part);
    return left;
}

// Chooses the likeliest completion of an example, whose rows arrive one by one.
typedef struct {
    double best; // mean loss per token of the likeliest completion of the example so far
    bool right;  // that completion is the right one
} Choice;

// Adds row `window`, whose losses add up to `loss`. Returns 1 if the row completes an example and
// its likeliest completion is the right one.
static inline int choice_add(Choice *choice, const Dataset *ds, int64_t window, double loss) {
    double mean = loss / (double)dataset_window_targets(ds, window);
    if (window % CHOICES == 0 || mean < choice->best) {
        choice->best = mean;
        choice->right = ds->rows[window].right;
    }
    return window % CHOICES == CHOICES - 1 && choice->right;
}

// Returns the bytes of text of the targets of samples 0 .. samples - 1.
static inline int64_t dataset_target_bytes(const Dataset *ds, const Tokenizer *t, int64_t samples) {
    int64_t T = ds->options.T, bytes = 0;
    int32_t *tokens = new_array(int32_t, 2 * T, "targets");
    for (int64_t g = 0; g < samples; g++) {
        dataset_fill(ds, g, 1, tokens, tokens + T);
        bytes += tokenizer_count_bytes(t, tokens + T, T);
        keep_alive();
    }
    free(tokens);
    return bytes;
}

#endif
