// tokenizer_encode.h: the tokens of a text, and what a tokenizer's file says about it. Tokens are
// those of the PyPI package tokenizers, special tokens included.
//
//   bytes            a vocabulary of bytes: the bytes themselves, also those that are not UTF-8
//   tokenizer file   GPT-2's; of another one the tokenizer.json of the same name, if it is there
//   tokenizer.json   added_tokens, normalizer, pre_tokenizer, post_processor and model, where the
//                    program knows what they say; a file that says something else is refused.
//                    `truncation` and `padding` do not count, as for transformers
#ifndef TOKENIZER_ENCODE_H
#define TOKENIZER_ENCODE_H

#include "base/base.h"
#include "base/files.h"
#include "base/json.h"
#include "text/bpe.h"
#include "text/encoder.h"
#include "text/shard_file.h"
#include "text/tokenizer.h"
#include "text/tokenizer_json.h"
#include "text/utf8.h"
#include "text/words.h"

#define ENCODE_HINT                                                                                \
    "give --tokenizer a file whose text can be encoded: a tokenizer.json with byte-level BPE, "    \
    "GPT-2's tokenizer file, or a vocabulary of bytes"

enum { GPT2_BYTES_END = 256 }; // GPT-2's tokens below this are bytes
static const TokenizerId gpt2_tokenizer = {.vocab = 50257, .hash = UINT64_C(0xb119a95e51dca789)};

// Returns how many tokens a text of so many bytes has at most: 4 for a byte, since a byte that is
// not UTF-8 becomes a character of 3 bytes, and a space may be put in front of a word; and one that
// the tokenizer puts in front.
static inline int64_t tokenizer_encode_most(int64_t bytes) { return 4 * bytes + 2; }

// -------------------------------------------------------------------------------------------------
// tokenizer.json

// Ends the program: `value` is what was found.
__attribute__((noreturn)) static inline void encode_refuse(const TokenizerJson *t,
                                                           const char *expected, int value) {
    const JsonValue *v = value < 0 ? NULL : &t->json.values[value];
    const char *text = v && v->bytes ? v->text : v ? "something else" : "nothing";
    const int64_t bytes = v && v->bytes ? (int64_t)v->bytes : (int64_t)strlen(text);
    die(EXIT_INPUT, ENCODE_HINT, "%s: expected %s, found %.*s", t->path, expected,
        (int)min_i64(bytes, 600), text);
}
static inline bool encode_is(const TokenizerJson *t, int value, const char *text) {
    const JsonValue *v = value < 0 ? NULL : &t->json.values[value];
    return v && v->kind != JSON_NUMBER && v->bytes == strlen(text) &&
           !memcmp(v->text, text, v->bytes);
}
static inline bool encode_is_null(const TokenizerJson *t, int value) {
    return value < 0 || (json_is(&t->json, value, JSON_WORD) && encode_is(t, value, "null"));
}
// Returns a member that is true or false; `missing` if it is not there.
static inline bool encode_flag(const TokenizerJson *t, int object, const char *name, bool missing) {
    const int value = json_get(&t->json, object, name);
    const bool yes = encode_is(t, value, "true"), no = encode_is(t, value, "false");
    if (value >= 0 && !(json_is(&t->json, value, JSON_WORD) && (yes || no))) {
        char expected[100];
        snprintf(expected, sizeof expected, "true or false as %s", name);
        encode_refuse(t, expected, value);
    }
    return value < 0 ? missing : yes;
}
// Calls `read` for a part of the file, such as the normalizer: not if it is null, and for each of
// its parts if it is a Sequence, whose list is called `list`.
static inline void encode_each(Encoder *e, const TokenizerJson *t, int part, const char *list,
                               void (*read)(Encoder *, const TokenizerJson *, int)) {
    const int type = json_get(&t->json, part, "type");
    if (encode_is_null(t, part)) { return; }
    if (!encode_is(t, type, "Sequence")) {
        read(e, t, part);
        return;
    }
    const int parts = json_get(&t->json, part, list);
    for (int i = json_first(&t->json, parts); i >= 0; i = json_next(&t->json, parts, i)) {
        encode_each(e, t, i, list, read);
    }
}

static inline void encode_read_normalizer(Encoder *e, const TokenizerJson *t, int part) {
    const int type = json_get(&t->json, part, "type");
    if (!encode_is(t, type, "NFC")) { encode_refuse(t, "no normalizer or NFC", type); }
    e->nfc = true;
}

// Adds a cut by a pattern.
static inline void encode_add_cut(Encoder *e, const TokenizerJson *t, int value,
                                  const char *pattern, bool only) {
    WordCut words = {.only = only};
    if (!words_open(&words, pattern)) {
        encode_refuse(t, "a pattern that PCRE2 reads as Oniguruma does, and of no empty text",
                      value);
    }
    e->cut[e->cuts++] = words;
}
static inline void encode_read_split(Encoder *e, const TokenizerJson *t, int part) {
    const int pattern = json_get(&t->json, json_get(&t->json, part, "pattern"), "Regex");
    const bool invert = encode_flag(t, part, "invert", false);
    const int behavior = json_get(&t->json, part, "behavior");
    if (!json_is(&t->json, pattern, JSON_STRING)) {
        encode_refuse(t, "a Regex to split by", pattern);
    }
    const bool only = invert && encode_is(t, behavior, "Removed");
    if (!only && !encode_is(t, behavior, "Isolated")) {
        encode_refuse(t, "the behavior Isolated, or Removed inverted", behavior);
    }
    const JsonValue *v = &t->json.values[pattern];
    const int64_t n = json_unescape(v->text, v->bytes, t->scratch);
    t->scratch[max_i64(n, 0)] = 0;
    if (n != (int64_t)strlen((const char *)t->scratch)) {
        encode_refuse(t, "a text without zero bytes as pattern", pattern);
    }
    encode_add_cut(e, t, pattern, (const char *)t->scratch, only);
}
static inline void encode_read_cut(Encoder *e, const TokenizerJson *t, int part) {
    const int type = json_get(&t->json, part, "type");
    if (e->byte_level || e->cuts == ENCODER_CUTS) {
        encode_refuse(t, "at most 8 pre_tokenizers, of which only the last is ByteLevel", type);
    }
    if (encode_is(t, type, "Split")) {
        encode_read_split(e, t, part);
    } else if (encode_is(t, type, "Digits")) {
        const bool each = encode_flag(t, part, "individual_digits", false);
        encode_add_cut(e, t, type, each ? "\\p{N}" : "\\p{N}+", false);
    } else if (encode_is(t, type, "ByteLevel")) {
        const WordCut all = {};
        e->space_in_front = encode_flag(t, part, "add_prefix_space", true);
        e->byte_level = true;
        if (encode_flag(t, part, "use_regex", true)) {
            encode_add_cut(e, t, type, WORDS_GPT2, false);
        } else {
            e->cut[e->cuts++] = all;
        }
    } else {
        encode_refuse(t, "a pre_tokenizer Split, Digits or ByteLevel", type);
    }
}

static inline void encode_read_post_processor(Encoder *e, const TokenizerJson *t, int part) {
    const Json *j = &t->json;
    const int type = json_get(j, part, "type");
    if (encode_is(t, type, "ByteLevel")) { return; } // it changes no token
    if (!encode_is(t, type, "TemplateProcessing")) {
        encode_refuse(t, "a post_processor ByteLevel or TemplateProcessing", type);
    }
    const int single = json_get(j, part, "single"), first = json_first(j, single);
    const int special = json_get(j, first, "SpecialToken"), name = json_get(j, special, "id");
    const int text = special < 0 ? first : json_next(j, single, first);
    const bool good = json_get(j, json_get(j, text, "Sequence"), "id") >= 0 &&
                      json_next(j, single, text) < 0 && (special < 0 || e->front < 0);
    if (!good) { encode_refuse(t, "at most one special token, in front of the text", type); }
    if (special < 0) { return; }
    const int tokens = json_get(j, part, "special_tokens");
    for (int i = json_first(j, tokens); i >= 0; i = json_next(j, tokens, i)) {
        const int ids = json_get(j, i, "ids");
        const JsonValue *v = &j->values[i], *wanted = &j->values[name < 0 ? i : name];
        if (v->name_bytes != wanted->bytes || memcmp(v->name, wanted->text, v->name_bytes) != 0) {
            continue;
        }
        if (json_members(j, ids) != 1) { encode_refuse(t, "one id of the token in front", ids); }
        e->front = tokenizer_json_id(t, json_first(j, ids));
    }
    if (e->front < 0 || e->front >= t->vocab) {
        encode_refuse(t, "the token in front of the text among special_tokens", name);
    }
}

static inline void encode_read_added(Encoder *e, const TokenizerJson *t) {
    const int list = json_get(&t->json, 0, "added_tokens");
    TextBuffer other = {}; // how a text has the token
    for (int i = json_first(&t->json, list); i >= 0; i = json_next(&t->json, list, i)) {
        const int32_t token = tokenizer_json_id(t, json_get(&t->json, i, "id"));
        const int content = json_get(&t->json, i, "content");
        if (encode_flag(t, i, "single_word", false)) {
            encode_refuse(t, "no added token that is a single_word", content);
        }
        const bool special = encode_flag(t, i, "special", false);
        const bool normalized = encode_flag(t, i, "normalized", !special);
        e->strip[token] = (unsigned char)(encode_flag(t, i, "lstrip", false) * STRIP_LEFT +
                                          encode_flag(t, i, "rstrip", false) * STRIP_RIGHT);
        token_table_add(&e->added[normalized], e->tokenizer, token);
        int length;
        const char *text = (const char *)tokenizer_decode(e->tokenizer, token, &length);
        other.length = 0;
        if (normalized && e->nfc) {
            text_add_normal(&other, text, length);
        } else {
            text_add_valid(&other, text, length);
        }
        if (other.length != (size_t)length || memcmp(other.text, text, (size_t)length) != 0) {
            encode_refuse(t, "added tokens in UTF-8 that NFC does not change", content);
        }
    }
    free(other.text);
}

// Returns the token that a part of a merge is, in text[bytes], and adds its bytes to `joined`.
static inline int32_t encode_merge_part(const Encoder *e, const TokenizerJson *t, int merge,
                                        unsigned char *text, int64_t bytes, TextBuffer *joined) {
    const int64_t n = bytes < 0 ? -1 : tokenizer_json_bytes(t, text, bytes);
    const int32_t token = n < 0 ? -1 : token_find(&e->words, e->tokenizer, text, n);
    if (token < 0) { encode_refuse(t, "merges of two tokens", merge); }
    text_add_bytes(joined, (const char *)text, n);
    return token;
}
// Reads a merge: "left right" or ["left", "right"].
static inline void encode_read_merge(Encoder *e, const TokenizerJson *t, int merge, int32_t rank,
                                     TextBuffer *joined) {
    unsigned char *text = t->scratch;
    int32_t part[2];
    joined->length = 0;
    if (json_is(&t->json, merge, JSON_STRING)) {
        const JsonValue *v = &t->json.values[merge];
        const int64_t n = json_unescape(v->text, v->bytes, text);
        unsigned char *space = n < 0 ? NULL : (unsigned char *)memchr(text, ' ', (size_t)n);
        if (!space) { encode_refuse(t, "merges of two tokens", merge); }
        part[0] = encode_merge_part(e, t, merge, text, space - text, joined);
        part[1] = encode_merge_part(e, t, merge, space + 1, text + n - space - 1, joined);
    } else {
        int value = json_is(&t->json, merge, JSON_ARRAY) ? json_first(&t->json, merge) : -1;
        for (int i = 0; i < 2; i++, value = json_next(&t->json, merge, value)) {
            if (!json_is(&t->json, value, JSON_STRING)) {
                encode_refuse(t, "merges of two tokens", value);
            }
            const JsonValue *v = &t->json.values[value];
            const int64_t n = json_unescape(v->text, v->bytes, text);
            part[i] = encode_merge_part(e, t, value, text, n, joined);
        }
        if (value >= 0) { encode_refuse(t, "merges of two tokens", value); }
    }
    const int32_t made = token_find(&e->words, e->tokenizer, joined->text, (int64_t)joined->length);
    if (made < 0) { encode_refuse(t, "merges whose result is a token", merge); }
    bpe_add(&e->bpe, part[0], part[1], rank, made);
}
static inline void encode_read_model(Encoder *e, const TokenizerJson *t) {
    const Json *j = &t->json;
    const int model = json_get(j, 0, "model"), type = json_get(j, model, "type");
    const int dropout = json_get(j, model, "dropout");
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    if (type >= 0 && !encode_is(t, type, "BPE")) { encode_refuse(t, "a model BPE", type); }
    for (int i = 0; i < 2; i++) {
        const int affix = json_get(j, model, affixes[i]);
        const bool empty = json_is(j, affix, JSON_STRING) && !j->values[affix].bytes;
        if (!encode_is_null(t, affix) && !empty) { encode_refuse(t, affixes[i], affix); }
    }
    if (!encode_is_null(t, dropout)) { encode_refuse(t, "no dropout", dropout); }
    e->whole_words = encode_flag(t, model, "ignore_merges", false);
    const int vocab = json_get(j, model, "vocab"), merges = json_get(j, model, "merges");
    if (!json_is(j, merges, JSON_ARRAY)) { encode_refuse(t, "a list of merges", merges); }
    for (int i = json_first(j, vocab); i >= 0; i = json_next(j, vocab, i)) {
        encoder_add_word(e, tokenizer_json_id(t, i));
    }
    TextBuffer joined = {};
    int32_t rank = 0;
    for (int i = json_first(j, merges); i >= 0; i = json_next(j, merges, i)) {
        encode_read_merge(e, t, i, rank++, &joined);
    }
    free(joined.text);
}

// Ends the program (EXIT_INPUT) unless a tokenizer.json has a tokenizer's tokens. Which of them
// ends texts is known from the tokenizer.
static inline void encode_check_same(const Tokenizer *t, const TokenizerJson *json) {
    size_t size;
    unsigned char *text = tokenizer_json_text(json, &size);
    const TokenizerId id = {.vocab = json->vocab,
                            .hash = tokenizer_hash(json->vocab, t->eot, text, size)};
    free(text);
    if (tokenizer_same(id, t->id)) { return; }
    die(EXIT_INPUT, ENCODE_HINT,
        "%s: expected the tokens of %s (" TOKENIZER_ID "), found others (" TOKENIZER_ID ")",
        json->path, t->path, TOKENIZER_ID_OF(t->id), TOKENIZER_ID_OF(id));
}
// Opens the encoder of a tokenizer.json, which has the tokens of `tokenizer`.
static inline Encoder encode_open_json(const Tokenizer *tokenizer, const char *path) {
    TokenizerJson t = tokenizer_json_open(path);
    const Json *j = &t.json;
    const int model = json_get(j, 0, "model");
    encode_check_same(tokenizer, &t);
    Encoder e = encoder_open(tokenizer, json_members(j, json_get(j, 0, "added_tokens")),
                             json_members(j, json_get(j, model, "vocab")),
                             json_members(j, json_get(j, model, "merges")));
    encode_each(&e, &t, json_get(j, 0, "normalizer"), "normalizers", encode_read_normalizer);
    encode_each(&e, &t, json_get(j, 0, "pre_tokenizer"), "pretokenizers", encode_read_cut);
    encode_each(&e, &t, json_get(j, 0, "post_processor"), "processors", encode_read_post_processor);
    if (!e.byte_level) {
        encode_refuse(&t, "a pre_tokenizer ByteLevel", json_get(j, 0, "pre_tokenizer"));
    }
    encode_read_added(&e, &t);
    encode_read_model(&e, &t);
    tokenizer_json_close(&t);
    return e;
}

// -------------------------------------------------------------------------------------------------
// Other tokenizers

// Finds the merges of GPT-2's tokenizer file. It has none, but a token's id is its rank: the merge
// that makes a token joins the two tokens that its bytes become by the merges before.
static inline Encoder encode_merges_of_gpt2(const Tokenizer *t) {
    Encoder e = encoder_open(t, 1, t->vocab, t->vocab);
    token_table_add(&e.added[ADDED_LITERAL], t, t->eot);
    for (int32_t id = 0; id < t->eot; id++) {
        int length;
        const unsigned char *text = tokenizer_decode(t, id, &length);
        encoder_add_word(&e, id);
        if (length == 1) { continue; }
        encoder_split(&e, (const char *)text, (const char *)text + length);
        const int32_t second = e.bpe.part[0].after;
        if (second < 0 || e.bpe.part[second].after >= 0) {
            die(EXIT_INPUT, ENCODE_HINT, "%s: expected GPT-2's tokens, found another one of id %d",
                t->path, (int)id);
        }
        bpe_add(&e.bpe, e.bpe.part[0].token, e.bpe.part[second].token, id, id);
    }
    return e;
}
static inline Encoder encode_open_gpt2(const Tokenizer *t) {
    Encoder e = encode_merges_of_gpt2(t);
    if (!words_open(&e.cut[e.cuts++], WORDS_GPT2)) {
        die(EXIT_RESOURCES, NULL, "PCRE2 cannot read GPT-2's pattern");
    }
    return e;
}

// Returns whether token i is the byte i, for all of them.
static inline bool encode_has_bytes(const Tokenizer *t) {
    bool are = t->vocab == BYTE_TOKENS || (!t->from_file && t->vocab > 0);
    for (int32_t i = 0; are && i < t->vocab; i++) {
        int length;
        const unsigned char *bytes = tokenizer_decode(t, i, &length);
        are = length == 1 && bytes[0] == i;
    }
    return are;
}
static inline int64_t encode_bytes(const Tokenizer *t, const char *text, int64_t bytes,
                                   int32_t *tokens, int64_t most) {
    if (bytes > most) { encode_too_many(most); }
    for (int64_t i = 0; i < bytes; i++) {
        tokens[i] = (unsigned char)text[i];
        if (tokens[i] >= t->vocab) {
            die(EXIT_INPUT, ENCODE_HINT,
                "expected a text of bytes below %d, the size of the vocabulary, found byte %d",
                (int)t->vocab, (int)tokens[i]);
        }
    }
    return bytes;
}

// Writes the name of the tokenizer.json beside a tokenizer.bin. Returns false if there is none.
static inline bool encode_beside(const char *path, char *beside, size_t bytes) {
    const size_t n = strlen(path);
    const bool bin = n > 4 && n < bytes - 2 && !strcmp(path + n - 4, ".bin");
    snprintf(beside, bytes, "%.*s.json", (int)(bin ? n - 4 : 0), path);
    return bin && !access(beside, R_OK);
}
// Opens the encoder of a tokenizer whose tokens are no bytes; `t` must stay open.
static inline Encoder encode_open(const Tokenizer *t) {
    if (!t->from_file) {
        die(EXIT_INPUT, ENCODE_HINT, "expected a --tokenizer to encode a text with, found none");
    }
    if (t->from_json) { return encode_open_json(t, t->path); }
    if (tokenizer_same(t->id, gpt2_tokenizer)) { return encode_open_gpt2(t); }
    char beside[1100];
    if (!encode_beside(t->path, beside, sizeof beside)) {
        die(EXIT_INPUT, ENCODE_HINT,
            "%s: expected GPT-2's tokens, bytes, or a tokenizer.json beside it (*.json instead of "
            "*.bin), found other tokens (" TOKENIZER_ID ") whose merges are not in the file",
            t->path, TOKENIZER_ID_OF(t->id));
    }
    return encode_open_json(t, beside);
}

// Writes the tokens of text[bytes] and returns how many; tokens[most] with
// most = tokenizer_encode_most(bytes) always has space for them. Ends the program (EXIT_INPUT) if
// the tokenizer cannot encode, or if there are more tokens than `most`.
static inline int64_t tokenizer_encode(const Tokenizer *t, const char *text, int64_t bytes,
                                       int32_t *tokens, int64_t most) {
    if (encode_has_bytes(t)) { return encode_bytes(t, text, bytes, tokens, most); }
    Encoder e = encode_open(t);
    const int64_t count = encoder_encode(&e, text, bytes, tokens, most);
    encoder_close(&e);
    return count;
}

#endif
