// shard_file.h: files of tokens, llm.c's format, little-endian. They are untrusted: the header, the
// size and every token are checked when a file is opened. A file is mapped, not copied. It must not
// change while it is in use: truncating it ends the program with SIGBUS.
//
//   header  256 int32: magic 20240520, version 1, token count n. llm.c leaves the other words zero.
//           Here words 3 and 4 of a labelled shard are the number of labels and the first label's
//           token, and words 5 to 8 name the tokenizer that made the tokens.
//   tokens  n uint16
#ifndef SHARD_FILE_H
#define SHARD_FILE_H

#include "base/files.h" // data_map_file

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the file formats are little-endian and read as they are"
#endif

enum {
    SHARD_MAGIC = 20240520,
    SHARD_MAGIC_LLAMA3 = 20240801, // uint32 tokens: refused by name
    TOKENIZER_MAGIC = 20240328,
    DATA_VOCAB_MAX = 65536 // limit of uint16 tokens
};
#define DATA_HINT                                                                                  \
    "run scripts/prepare_data.py --input on a text first, or get the tutorial's with 'make "       \
    "data'; "                                                                                      \
    "then --train 'data/NAME_train_*.bin'"

// Identifies the tokenizer that made some tokens. Data of different tokenizers in one run are
// refused.
typedef struct {
    int32_t vocab; // number of its tokens; 0: unknown tokenizer
    uint64_t hash; // tokenizer_hash()
} TokenizerId;

// Properties of a shard, from its header and its tokens.
typedef struct {
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
// Returns the first index i with low <= tokens[i] <= high, or count. The loop over whole blocks is
// vectorised.
static inline int64_t find_token(const uint16_t *tokens, int64_t count, int32_t low, int32_t high) {
    enum { BLOCK = 256 }; // a constant trip count, so that -O2 vectorises too
    int64_t i = 0;
    uint16_t first = (uint16_t)low, width = (uint16_t)(high - low);
    for (; i + BLOCK <= count; i += BLOCK) {
        uint16_t found = 0;
        for (int j = 0; j < BLOCK; j++) {
            found |= (uint16_t)((uint16_t)(tokens[i + j] - first) <= width);
        }
        if (found) { break; }
    }
    while (i < count && (tokens[i] < low || tokens[i] > high)) { i++; }
    return i;
}

// Returns the largest token, or -1 if there are none. Calls keep_alive() now and then, since a slow
// disk may take long.
static inline int32_t largest_token(const uint16_t *tokens, int64_t count) {
    enum { STEP = 1 << 22, BLOCK = 256 }; // constant trip counts, as in find_token
    uint16_t largest[BLOCK] = {0};
    uint16_t most = 0;
    int64_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        for (int j = 0; j < BLOCK; j++) {
            largest[j] = tokens[i + j] > largest[j] ? tokens[i + j] : largest[j];
        }
        if (i % STEP == 0) { keep_alive(); }
    }
    for (int64_t j = 0; i + j < count; j++) {
        largest[j] = tokens[i + j] > largest[j] ? tokens[i + j] : largest[j];
    }
    for (int j = 0; j < BLOCK; j++) { most = largest[j] > most ? largest[j] : most; }
    return count ? most : -1;
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

// Checks the size, magic and version of a shard. Returns its token count, which may be 0.
static inline int64_t shard_check_header(const char *path, const int32_t *header, size_t bytes) {
    if (header[0] == SHARD_MAGIC_LLAMA3) {
        die(EXIT_INPUT, DATA_HINT,
            "%s: expected GPT-2 tokens (magic %d, uint16), found Llama 3 tokens (magic %d, "
            "uint32), which are not supported",
            path, SHARD_MAGIC, SHARD_MAGIC_LLAMA3);
    }
    data_check_header(path, header, "a shard of tokens", SHARD_MAGIC, "shard version 1", 1,
                      DATA_HINT);
    int64_t count = header[2];
    if (count < 0) {
        die(EXIT_INPUT, DATA_HINT, "%s: expected a token count >= 0, found %" PRId64, path, count);
    }
    if (bytes != (size_t)DATA_HEADER_BYTES + 2 * (size_t)count) {
        die(EXIT_INPUT, "the file is cut off or damaged: make or copy it again",
            "%s: expected %" PRId64 " bytes for %" PRId64 " tokens, found %zu", path,
            DATA_HEADER_BYTES + 2 * count, count, bytes);
    }
    return count;
}

// Checks a shard's header, size and tokens. All tokens must be below vocab.
static inline ShardFacts shard_check(const char *path, const void *map, size_t bytes,
                                     int32_t vocab) {
    int32_t header[9];
    memcpy(header, map, sizeof header);
    ShardFacts f = {};
    f.count = shard_check_header(path, header, bytes);
    const uint16_t *tokens = (const uint16_t *)((const char *)map + DATA_HEADER_BYTES);
    f.largest = largest_token(tokens, f.count);
    if (f.largest >= vocab) {
        int64_t bad = find_token(tokens, f.count, vocab, DATA_VOCAB_MAX - 1);
        die(EXIT_INPUT,
            "the shard was made with a larger vocabulary than the model has: change one of them",
            "%s: expected tokens below the vocabulary of %d, found %d at token %" PRId64, path,
            vocab, tokens[bad], bad);
    }
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
