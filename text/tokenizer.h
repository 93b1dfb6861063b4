// tokenizer.h: the text of each token, from llm.c's tokenizer files or a tokenizer.json (decoding
// only), and one tokenizer for all data of a run.
//
//   file    little-endian, with a header of 256 int32: magic 20240328, version 1 to 3, vocabulary,
//           end-of-text token (not in version 1); then for each token one length byte (1-255) and
//           that many bytes. In version 3 a zero stands before a length of two bytes (256-65535)
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "base/base.h"
#include "base/files.h"
#include "text/shard_file.h"
#include "text/tokenizer_json.h"

enum {
    GPT2_EOT = 50256,
    BYTE_TOKENS = 256,
    FEW_TOKENS = 1000, // fewer tokens than this say nothing about their tokenizer
    // limit to which a model's vocabulary may be padded, however small the tokenizer's is
    PADDED_VOCAB_LEAST = 1024,
    TOKENIZER_LONG = 3 // version of a file with a token of TOKEN_LONG bytes or more
};

typedef struct {
    int32_t vocab; // number of tokens with known text; without a file 0, unless tokens are bytes
    int32_t eot;   // end-of-text token; -1 if unknown
    // read from a file: end-of-text has no text; else every token below 256 is one byte
    bool from_file;
    bool from_json;  // that file is a tokenizer.json
    bool named_end;  // which does not say by itself what ends texts
    TokenizerId id;  // of a tokenizer file
    char *path;      // of that file; NULL without one
    uint32_t *begin; // [vocab] index in text of each token's length; its bytes follow
    unsigned char *text;
} Tokenizer;

// Hash of a tokenizer: FNV-1a of the vocabulary and the end-of-text token as int32, then of all
// tokens as in the file (length and bytes). prepare_data.py writes the same hash into shard
// headers.
#define FNV1A_BEGIN UINT64_C(0xcbf29ce484222325)
static inline uint64_t fnv1a(uint64_t hash, const void *data, size_t bytes) {
    for (const unsigned char *p = (const unsigned char *)data; bytes; p++, bytes--) {
        hash = (hash ^ *p) * UINT64_C(0x100000001b3);
    }
    return hash;
}
static inline uint64_t tokenizer_hash(int32_t vocab, int32_t eot, const void *text, size_t bytes) {
    const int32_t words[2] = {vocab, eot};
    return fnv1a(fnv1a(FNV1A_BEGIN, words, sizeof words), text, bytes);
}
static inline bool tokenizer_same(TokenizerId a, TokenizerId b) {
    return a.vocab == b.vocab && a.hash == b.hash;
}
#define TOKENIZER_ID "%d tokens, hash %016" PRIx64 // in messages
#define TOKENIZER_ID_OF(id) (int)(id).vocab, (id).hash

// Checks the header of a tokenizer file; sets vocab and eot.
static inline void tokenizer_header(Tokenizer *t, const char *path, const void *map) {
    int32_t header[4];
    memcpy(header, map, sizeof header);
    data_check_header(path, header, "a tokenizer", TOKENIZER_MAGIC, "tokenizer version 1 to 3",
                      TOKENIZER_LONG, TOKENIZER_HINT);
    t->vocab = header[2];
    t->eot = header[1] == 1 ? (int32_t)GPT2_EOT : header[3];
    if (t->vocab < 1 || t->vocab > DATA_VOCAB_MAX) {
        die(EXIT_INPUT, TOKENIZER_HINT, "%s: expected a vocabulary of 1 to %d, found %d", path,
            DATA_VOCAB_MAX, t->vocab);
    }
    if (t->eot < 0 || t->eot >= t->vocab) {
        die(EXIT_INPUT, TOKENIZER_HINT,
            "%s: expected an end-of-text token below the vocabulary of %d, found %d", path,
            t->vocab, t->eot);
    }
}

// Returns where the bytes of a token begin whose length is at `text`, and sets their number.
static inline const unsigned char *token_bytes(const unsigned char *text, int *length) {
    *length = text[0] ? text[0] : text[1] | text[2] << 8;
    return text + (text[0] ? 1 : 3);
}
// Finds where each token begins in text[size]. Checks every length against the bytes that are left.
// most: bytes of a token.
static inline void tokenizer_index(Tokenizer *t, const char *path, size_t size, int most) {
    t->begin = new_array(uint32_t, t->vocab, "the tokenizer");
    size_t at = 0;
    for (int32_t id = 0; id < t->vocab; id++) {
        const unsigned char *text = t->text + at;
        const size_t left = size - at;
        const bool wide = left && !*text && most >= TOKEN_LONG, ends = left < (wide ? 3 : 1);
        int length = 0;
        const size_t head =
            ends || (!*text && !wide) ? 1 : (size_t)(token_bytes(text, &length) - text);
        const bool none = !ends && length < (wide ? TOKEN_LONG : 1);
        if (ends || none || (size_t)length > left - head) {
            die(EXIT_INPUT, TOKENIZER_HINT,
                "%s: expected 1 to %d bytes for token %d of %d, found %s", path, most, id, t->vocab,
                none ? "none" : "the end of the file");
        }
        t->begin[id] = (uint32_t)at;
        at += head + (size_t)length;
    }
    if (at != size) {
        die(EXIT_INPUT, TOKENIZER_HINT,
            "%s: expected the end of the file after %d tokens (%zu bytes), found more", path,
            t->vocab, DATA_HEADER_BYTES + at);
    }
}

// The tokenizer that is assumed without a file. Tokens of a vocabulary of up to 256 are bytes, with
// end-of-text 0. Tokens of a larger vocabulary have no known text; end-of-text is then 50256 if the
// vocabulary contains it.
static inline Tokenizer tokenizer_of_bytes(int32_t vocab) {
    Tokenizer t = {};
    t.vocab = vocab <= 256 ? vocab : 0;
    t.eot = vocab <= 256 ? 0 : vocab > GPT2_EOT ? (int32_t)GPT2_EOT : -1;
    t.text = new_array(unsigned char, 2 * 256, "the tokenizer");
    for (int i = 0; i < 256; i++) {
        t.text[2 * i] = 1;
        t.text[2 * i + 1] = (unsigned char)i;
    }
    tokenizer_index(&t, "", 2 * (size_t)t.vocab, TOKEN_LONG - 1);
    return t;
}

// Finds NAME_tokenizer.bin in the folder of shards whose name or pattern begins with NAME_train or
// NAME_val. Writes its path to `path` and returns that; NULL if the file cannot be read.
static inline const char *tokenizer_find(const char *shards, char *path, size_t bytes) {
    const char *slash = strrchr(shards, '/'), *name = slash ? slash : shards, *end = NULL;
    static const char *const parts[] = {"_train", "_val"};
    for (int i = 0; i < 2; i++) {
        for (const char *at = strstr(name, parts[i]); at; at = strstr(at + 1, parts[i])) {
            end = !end || at > end ? at : end;
        }
    }
    if (!end) { return NULL; }
    snprintf(path, bytes, "%.*s_tokenizer.bin", (int)(end - shards), shards);
    return access(path, R_OK) ? NULL : path;
}

// Returns how many bytes a token of a tokenizer file has at most, by its header.
static inline int tokenizer_most(const void *map) {
    int32_t version;
    memcpy(&version, (const char *)map + sizeof version, sizeof version);
    return version < TOKENIZER_LONG ? TOKEN_LONG - 1 : TOKEN_BYTES_MAX;
}
// Reads the header of a mapped tokenizer file. Returns a copy of the tokens behind it, and sets
// their size.
static inline unsigned char *tokenizer_copy(Tokenizer *t, const char *path, const void *map,
                                            size_t bytes, size_t *size) {
    tokenizer_header(t, path, map);
    // one byte more than possible, so that tokenizer_index() detects a file that is too long
    const size_t most =
        (tokenizer_most(map) < TOKEN_LONG ? TOKEN_LONG : 3 + TOKEN_BYTES_MAX) * (size_t)t->vocab +
        1;
    *size = bytes - DATA_HEADER_BYTES < most ? bytes - DATA_HEADER_BYTES : most;
    if (*size > (size_t)UINT32_MAX + 2) {
        die(EXIT_INPUT, TOKENIZER_HINT, "%s: expected a tokenizer of at most 4 GiB", path);
    }
    unsigned char *text = new_array(unsigned char, *size, "the tokenizer");
    memcpy(text, (const char *)map + DATA_HEADER_BYTES, *size);
    return text;
}

// Is this a file of JSON: does an object begin behind white space?
static inline bool tokenizer_is_json(const char *path) {
    FILE *f = open_regular(path);
    int c = f ? ' ' : EOF;
    while (c != EOF && c && strchr(" \t\r\n", c)) { c = fgetc(f); }
    if (f) { fclose(f); }
    return c == '{';
}
// Reads a tokenizer.json. Returns its tokens as in a tokenizer file, and sets their size.
static inline unsigned char *tokenizer_read_json(Tokenizer *t, const char *path, const char *end,
                                                 size_t *size) {
    TokenizerJson json = tokenizer_json_open(path);
    unsigned char *text = tokenizer_json_text(&json, size);
    t->vocab = json.vocab;
    t->eot = tokenizer_json_end(&json, end);
    t->named_end = t->eot != tokenizer_json_known_end(&json);
    tokenizer_json_close(&json);
    return text;
}

static inline const unsigned char *tokenizer_decode(const Tokenizer *t, int32_t id, int *length);
// Ends the program (EXIT_INPUT) unless the end-of-text token is `end`, or that is empty.
static inline void tokenizer_check_end(const Tokenizer *t, const char *end) {
    int length;
    const unsigned char *found = tokenizer_decode(t, t->eot, &length);
    if (!end || !*end ||
        (t->from_file && (size_t)length == strlen(end) && !memcmp(found, end, (size_t)length))) {
        return;
    }
    die(EXIT_INPUT, "it names a token of a tokenizer.json, which --tokenizer gives",
        "--end-of-text %s: expected the token that ends texts in %s, found %.*s", end,
        t->from_file ? t->path : "the tokenizer", t->from_file ? length : 4,
        t->from_file && length ? (const char *)found : "none");
}

// Loads a tokenizer; path NULL: tokenizer_of_bytes(vocab). end: of --end-of-text, or NULL. Any rank
// may call it alone. Ends the program (EXIT_INPUT) if the file is bad.
static inline Tokenizer tokenizer_open_ending(const char *path, int32_t vocab, const char *end) {
    Tokenizer t = {};
    if (!path) {
        t = tokenizer_of_bytes(vocab);
        tokenizer_check_end(&t, end);
        return t;
    }
    t.from_file = true;
    t.path = new_array(char, strlen(path) + 1, "the tokenizer");
    strcpy(t.path, path);
    size_t bytes, size;
    int most = TOKEN_BYTES_MAX;
    t.from_json = tokenizer_is_json(path);
    if (t.from_json) {
        t.text = tokenizer_read_json(&t, path, end, &size);
    } else {
        void *map = data_map_file(path, "a tokenizer", TOKENIZER_HINT, &bytes);
        t.text = tokenizer_copy(&t, path, map, bytes, &size);
        most = tokenizer_most(map);
        unmap_file(map);
    }
    if (t.eot >= vocab) {
        die(EXIT_INPUT, TOKENIZER_HINT,
            "%s: expected an end-of-text token below the model's vocabulary of %d, found %d", path,
            vocab, t.eot);
    }
    tokenizer_index(&t, path, size, most);
    tokenizer_check_end(&t, t.from_json ? NULL : end);
    t.id.vocab = t.vocab;
    t.id.hash = tokenizer_hash(t.vocab, t.eot, t.text, size);
    return t;
}
static inline Tokenizer tokenizer_open(const char *path, int32_t vocab) {
    return tokenizer_open_ending(path, vocab, NULL);
}

static inline void tokenizer_close(Tokenizer *t) {
    free_all(t->begin, t->text, t->path);
    memset(t, 0, sizeof *t);
}

// Returns the tokenizer in the folder of a shard whose header names none. `last` caches the last
// file, since many shards have the same one.
typedef struct {
    char path[1100];
    TokenizerId id;
} TokenizerBeside;
static inline TokenizerId tokenizer_beside(TokenizerBeside *last, const char *shard,
                                           int32_t vocab) {
    const TokenizerId unknown = {};
    char path[sizeof last->path];
    if (!tokenizer_find(shard, path, sizeof path)) { return unknown; }
    if (strcmp(path, last->path) != 0) {
        Tokenizer t = tokenizer_open(path, vocab);
        snprintf(last->path, sizeof last->path, "%s", path);
        last->id = t.id;
        tokenizer_close(&t);
    }
    return last->id;
}

// Returns whether tokens of unknown origin are probably bytes: this many tokens of a larger
// vocabulary would include larger ones.
static inline bool like_bytes(int64_t count, int32_t largest) {
    return count >= FEW_TOKENS && largest < BYTE_TOKENS;
}

// -------------------------------------------------------------------------------------------------
// One tokenizer for all data of a run. A shard's header, a tokenizer file in its folder and
// --tokenizer may each name the tokenizer; all names must agree. Where none is known, only tokens
// that are too large or suspiciously small can be detected.

typedef struct {
    TokenizerId id;
    const char *flag, *name; // the flag and file that named it first
} CommonTokenizer;

#define TOKENIZERS_HINT                                                                            \
    "take training shards, validation shards and tokenizer from one run of "                       \
    "scripts/prepare_data.py; --end-of-text must be as there"

// Adds the tokenizer that `flag name` has; id may be unknown.
static inline void common_tokenizer_add(CommonTokenizer *common, TokenizerId id, const char *flag,
                                        const char *name) {
    if (!id.vocab) { return; }
    if (!common->id.vocab) {
        const CommonTokenizer first = {id, flag, name};
        *common = first;
    }
    if (!tokenizer_same(common->id, id)) {
        die(EXIT_INPUT, TOKENIZERS_HINT,
            "%s %s: expected the tokenizer that %s %s has (" TOKENIZER_ID
            "), found another one (" TOKENIZER_ID ")",
            flag, name, common->flag, common->name, TOKENIZER_ID_OF(common->id),
            TOKENIZER_ID_OF(id));
    }
}

// Returns whether a model's vocabulary fits a tokenizer of `tokens` tokens. It may be padded to
// twice that, or to PADDED_VOCAB_LEAST.
static inline bool vocabulary_fits(int64_t vocab, int64_t tokens) {
    return vocab <= max_i64(2 * tokens, PADDED_VOCAB_LEAST);
}
static inline void common_tokenizer_check_model(const CommonTokenizer *common, int32_t vocab) {
    if (common->id.vocab && !vocabulary_fits(vocab, common->id.vocab)) {
        die(EXIT_INPUT,
            "give a model with the vocabulary of the tokenizer, such as "
            "layers=L,heads=H,channels=C,vocab=V, or other shards",
            "%s %s: the tokenizer has %d tokens, and a vocabulary of %d is no padding of that (%d "
            "at most)",
            common->flag, common->name, common->id.vocab, vocab,
            (int)max_i64(2 * (int64_t)common->id.vocab, PADDED_VOCAB_LEAST));
    }
}

// -------------------------------------------------------------------------------------------------
// The text of tokens

// Returns the bytes of a token (not terminated) and sets their number; NULL and 0 for an unknown
// token (such as -1).
static inline const unsigned char *tokenizer_decode(const Tokenizer *t, int32_t id, int *length) {
    *length = 0;
    return id >= 0 && id < t->vocab ? token_bytes(t->text + t->begin[id], length) : NULL;
}

// Returns how many bytes of text a token has: none for end-of-text and unknown tokens.
static inline int tokenizer_bytes(const Tokenizer *t, int32_t id) {
    int length;
    tokenizer_decode(t, id, &length);
    return t->from_file && id == t->eot ? 0 : length;
}

// Returns the bytes of text of targets[count] together, for bits per byte. Masked targets (-1) have
// none. 0 if the text is not known.
static inline int64_t tokenizer_count_bytes(const Tokenizer *t, const int32_t *targets,
                                            int64_t count) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) { sum += tokenizer_bytes(t, targets[i]); }
    return sum;
}

// Writes a token's text. Control characters except newline and tab become \xNN, so that a sample
// cannot drive a terminal. Other bytes are written unchanged, since a character may span several
// tokens. An unknown token becomes [id].
static inline void tokenizer_print(const Tokenizer *t, int32_t id, FILE *out) {
    int length;
    const unsigned char *bytes = tokenizer_decode(t, id, &length);
    if (!bytes) { fprintf(out, "[%d]", id); }
    for (int i = 0; i < length; i++) {
        bool control =
            (bytes[i] < 0x20 && bytes[i] != '\n' && bytes[i] != '\t') || bytes[i] == 0x7f;
        if (control) {
            fprintf(out, "\\x%02x", bytes[i]);
        } else {
            fputc(bytes[i], out);
        }
    }
}

#endif
