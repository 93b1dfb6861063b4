// shard_file.h: files of tokens, little-endian. They are untrusted: the header, the size and every
// token are checked when a file is opened. A file is mapped, not copied. It must not change while
// it is in use: cutting it off ends the program (EXIT_INPUT).
//
//   header  256 int32: magic, version, token count n. llm.c leaves the other words zero. Here words
//           3 and 4 of a labelled shard are the number of labels and the first label's token, and
//           words 5 to 8 name the tokenizer that made the tokens.
//   tokens  n uint16 or n uint32: shard_forms[] says which
#ifndef SHARD_FILE_H
#define SHARD_FILE_H

#include "base/base.h"
#include "base/files.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the file formats are little-endian and read as they are"
#endif

enum {
    SHARD_MAGIC = 20240520,
    TOKENIZER_MAGIC = 20240328,
    DATA_VOCAB_MAX = 1 << 24 // limit of a model's vocabulary
};
// The forms of shards.
typedef struct {
    int32_t magic, version;
    int width; // bytes of a token
} ShardForm;
static const ShardForm shard_forms[] = {
    {SHARD_MAGIC, 1, 2}, // llm.c's, of GPT-2's tokens
    {SHARD_MAGIC, 2, 4}, // of a vocabulary of more than 65536
    {20240801, 7, 4},    // llm.c's, of Llama 3's tokens
};
// Tokens in memory.
typedef struct {
    const void *at;
    int width; // bytes of a token: 2 or 4
} Tokens;
#define DATA_HINT                                                                                  \
    "run scripts/prepare_data.py --input on a text first, or get the tutorial's with 'make "       \
    "data'; "                                                                                      \
    "then --train 'data/NAME_train_*.bin'"
#define VALIDATION_HINT                                                                            \
    "scripts/prepare_data.py writes NAME_val_*.bin beside NAME_train_*.bin; --val-every 0 turns "  \
    "validation off"

// Identifies the tokenizer that made some tokens. Data of different tokenizers in one run are
// refused.
typedef struct {
    int32_t vocab; // number of its tokens; 0: unknown tokenizer
    uint64_t hash; // tokenizer_hash()
} TokenizerId;

// Properties of a shard, from its header and its tokens.
typedef struct {
    Tokens tokens;
    int64_t count;
    int32_t labels, first_label;
    int32_t largest; // largest token; -1: no tokens
    TokenizerId tokenizer;
} ShardFacts;

// Checks the magic number and the version of a data file; versions: 1 to `newest`, in words.
static inline void data_check_header(const char *path, const int32_t *header, const char *what,
                                     int32_t magic, const char *versions, int32_t newest,
                                     const char *hint) {
    if (header[0] != magic) {
        die(EXIT_INPUT, hint, "%s: expected %s (magic %d), found magic %d", path, what, magic,
            header[0]);
    }
    if (header[1] < 1 || header[1] > newest) {
        die(EXIT_INPUT, hint, "%s: expected %s, found %d", path, versions, header[1]);
    }
}

// A loop over tokens is written once. Its `width` is a constant in each of the two copies that
// FOR_WIDTH() calls, so the compiler vectorises both.
#define TOKEN_LOOP static inline __attribute__((always_inline))
#define FOR_WIDTH(loop, tokens, ...)                                                               \
    ((tokens).width == 2 ? loop((tokens).at, 2, __VA_ARGS__) : loop((tokens).at, 4, __VA_ARGS__))

TOKEN_LOOP uint32_t load_token(const void *tokens, const int width, int64_t i) {
    return width == 2 ? ((const uint16_t *)tokens)[i] : ((const uint32_t *)tokens)[i];
}
static inline Tokens tokens_from(Tokens tokens, int64_t first) {
    tokens.at = (const char *)tokens.at + first * tokens.width;
    return tokens;
}
TOKEN_LOOP int64_t find_token_loop(const void *tokens, const int width, int64_t count,
                                   uint32_t first, uint32_t range) {
    enum { BLOCK = 256 }; // a constant trip count, so that -O2 vectorises too
    int64_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        uint32_t found = 0;
        for (int j = 0; j < BLOCK; j++) {
            found |= (uint32_t)(load_token(tokens, width, i + j) - first <= range);
        }
        if (found) { break; }
    }
    while (i < count && load_token(tokens, width, i) - first > range) { i++; }
    return i;
}
// Returns the first index i with low <= tokens[i] <= high, or count.
static inline int64_t find_token(Tokens tokens, int64_t count, int64_t low, int64_t high) {
    return FOR_WIDTH(find_token_loop, tokens, count, (uint32_t)low, (uint32_t)(high - low));
}

TOKEN_LOOP int64_t largest_token_loop(const void *tokens, const int width, int64_t count) {
    enum { STEP = 1 << 22, BLOCK = 256 }; // constant trip counts, as above
    uint32_t largest[BLOCK] = {0};
    uint32_t most = 0;
    int64_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        for (int j = 0; j < BLOCK; j++) {
            const uint32_t token = load_token(tokens, width, i + j);
            largest[j] = token > largest[j] ? token : largest[j];
        }
        if (i % STEP == 0) { keep_alive(); }
    }
    for (; i < count; i++) {
        const uint32_t token = load_token(tokens, width, i);
        most = token > most ? token : most;
    }
    for (int j = 0; j < BLOCK; j++) { most = largest[j] > most ? largest[j] : most; }
    return count ? (int64_t)most : -1;
}
// Returns the largest token, or -1 if there are none. Calls keep_alive() now and then, since a slow
// disk may take long.
static inline int64_t largest_token(Tokens tokens, int64_t count) {
    return FOR_WIDTH(largest_token_loop, tokens, count);
}

// Returns the tokenizer that a shard's header names. Words 5 to 8: TOKENIZER_MAGIC (else no
// tokenizer is named), its vocabulary, the lower and the upper half of its hash.
static inline TokenizerId shard_tokenizer(const char *path, const int32_t *header) {
    TokenizerId id = {};
    if (header[5] != TOKENIZER_MAGIC) { return id; }
    id.vocab = header[6];
    id.hash = (uint64_t)(uint32_t)header[8] << 32 | (uint32_t)header[7];
    if (id.vocab < 1 || id.vocab > DATA_VOCAB_MAX) {
        die(EXIT_INPUT, DATA_HINT, "%s: expected a tokenizer of 1 to %d tokens in word 6, found %d",
            path, DATA_VOCAB_MAX, id.vocab);
    }
    return id;
}

// Returns the form that a shard's magic and version name.
static inline ShardForm shard_form(const char *path, const int32_t *header) {
    enum { FORMS = sizeof shard_forms / sizeof *shard_forms };
    bool known = false;
    for (int i = 0; i < FORMS; i++) {
        known |= header[0] == shard_forms[i].magic;
        if (header[0] == shard_forms[i].magic && header[1] == shard_forms[i].version) {
            return shard_forms[i];
        }
    }
    if (known) {
        die(EXIT_INPUT, DATA_HINT,
            "%s: expected shard version 1 (16 bits a token) or 2 (32 bits), found %d", path,
            header[1]);
    }
    die(EXIT_INPUT, DATA_HINT, "%s: expected a shard of tokens (magic %d), found magic %d", path,
        SHARD_MAGIC, header[0]);
}

// Checks the size, magic and version of a shard. Returns its token count, which may be 0, and sets
// *width.
static inline int64_t shard_check_header(const char *path, const int32_t *header, size_t bytes,
                                         int *width) {
    *width = shard_form(path, header).width;
    int64_t count = header[2];
    if (count < 0) {
        die(EXIT_INPUT, DATA_HINT, "%s: expected a token count >= 0, found %" PRId64, path, count);
    }
    if (bytes != (size_t)DATA_HEADER_BYTES + (size_t)*width * (size_t)count) {
        die(EXIT_INPUT, "the file is cut off or damaged: make or copy it again",
            "%s: expected %" PRId64 " bytes for %" PRId64 " tokens, found %zu", path,
            DATA_HEADER_BYTES + *width * count, count, bytes);
    }
    return count;
}

// Checks a shard's header, size and tokens. All tokens must be below vocab.
static inline ShardFacts shard_check(const char *path, const void *map, size_t bytes,
                                     int32_t vocab) {
    int32_t header[9];
    memcpy(header, map, sizeof header);
    ShardFacts f = {};
    f.count = shard_check_header(path, header, bytes, &f.tokens.width);
    f.tokens.at = (const char *)map + DATA_HEADER_BYTES;
    const int64_t largest = largest_token(f.tokens, f.count);
    if (largest >= vocab) {
        int64_t bad = find_token(f.tokens, f.count, vocab, UINT32_MAX);
        die(EXIT_INPUT,
            "the shard was made with a larger vocabulary than the model has: change one of them",
            "%s: expected tokens below the vocabulary of %d, found %" PRId64 " at token %" PRId64,
            path, vocab, (int64_t)load_token(f.tokens.at, f.tokens.width, bad), bad);
    }
    f.largest = (int32_t)largest;
    f.labels = header[3];
    f.first_label = f.labels ? header[4] : 0;
    if (f.labels < 0 || f.first_label < 0 || (int64_t)f.labels + f.first_label > vocab) {
        die(EXIT_INPUT,
            "words 3 and 4 of the header are how many labels there are, and the first of their "
            "tokens",
            "%s: expected labels below the vocabulary of %d, found %d from token %d on", path,
            vocab, f.labels, f.first_label);
    }
    f.tokenizer = shard_tokenizer(path, header);
    if (f.tokenizer.vocab && f.largest >= f.tokenizer.vocab) {
        die(EXIT_INPUT, "the file is damaged: make or copy it again",
            "%s: expected tokens below %d, the vocabulary of its tokenizer, found %d", path,
            f.tokenizer.vocab, f.largest);
    }
    return f;
}

#endif
