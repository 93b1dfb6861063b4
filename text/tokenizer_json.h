// tokenizer_json.h: the text of each token from a Hugging Face tokenizer.json with byte-level BPE,
// as GPT-2, Llama 3 and Qwen have (decoding only). The file is untrusted.
//
//   model.vocab    {"token": id}; each character of a token stands for one byte (GPT-2's alphabet)
//   added_tokens   [{"id": id, "content": "text"}]; they count where both have an id
//   everything else, as merges and normalizers, serves encoding and is not read
// An id without a token, below the largest one, has the text [ID]. Texts end with the token that
// --end-of-text or eos_token of tokenizer_config.json beside the file names.
#ifndef TOKENIZER_JSON_H
#define TOKENIZER_JSON_H

#include "base/base.h"
#include "base/files.h"
#include "base/json.h"
#include "text/shard_file.h"

#define TOKENIZER_HINT                                                                             \
    "--tokenizer takes llm.c's gpt2_tokenizer.bin, or a tokenizer.json with byte-level BPE; "      \
    "scripts/prepare_data.py writes both"

enum { TOKEN_BYTES_MAX = 65535, TOKEN_LONG = 256, ALPHABET_END = 0x144 };
// What ends a text where nothing says it: the first of these that is among the added tokens.
static const char *const end_of_text_names[] = {
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<\xef\xbd\x9c"
    "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>"};

// The tokens of a file.
typedef struct {
    const char *path;
    Json json;
    int32_t vocab;
    int *value;  // [vocab] index of the JSON value that has the token's text; -1: none
    bool *added; // [vocab] it is an added token, whose text is literal
    int16_t bytes_of[ALPHABET_END]; // the byte for which a character stands; -1: none
    unsigned char *scratch;         // space for the longest string of the file
} TokenizerJson;

__attribute__((noreturn)) static inline void
tokenizer_json_refuse(const TokenizerJson *t, const char *expected, int value) {
    const JsonValue *v = value < 0 ? NULL : &t->json.values[value];
    const char *text = !v ? "nothing" : v->name ? v->name : v->text ? v->text : "nothing";
    const size_t bytes = !v ? strlen(text) : v->name ? v->name_bytes : v->bytes;
    die(EXIT_INPUT, TOKENIZER_HINT, "%s: expected %s, found %.*s", t->path, expected,
        (int)min_i64((int64_t)bytes, 40), text);
}

// Returns the character of GPT-2's alphabet for a byte: one that can be seen stands for itself; the
// others, in order, are the characters from 0x100 on.
static inline int tokenizer_json_character(int byte) {
    const bool seen = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
    return seen ? byte : 0x100 + (byte <= 0x20 ? byte : byte <= 0xa0 ? byte - 0x5e : 0x43);
}
static inline void tokenizer_json_alphabet(TokenizerJson *t) {
    memset(t->bytes_of, -1, sizeof t->bytes_of);
    for (int byte = 0; byte < 256; byte++) {
        t->bytes_of[tokenizer_json_character(byte)] = (int16_t)byte;
    }
}

// Returns the id that a JSON number is.
static inline int32_t tokenizer_json_id(const TokenizerJson *t, int value) {
    const double id = json_is(&t->json, value, JSON_NUMBER) ? t->json.values[value].number : -1;
    if (!(id >= 0 && id < DATA_VOCAB_MAX && id == floor(id))) {
        tokenizer_json_refuse(t, "an id of a token, from 0 to 16777215", value);
    }
    return (int32_t)id;
}

// Calls for the tokens of the file. With `value` unset it only finds the vocabulary.
static inline void tokenizer_json_add(TokenizerJson *t, int32_t id, int value, bool added) {
    if (!t->value) {
        t->vocab = id >= t->vocab ? id + 1 : t->vocab;
        return;
    }
    if (t->value[id] >= 0 && t->added[id] == added) {
        tokenizer_json_refuse(t, "each id once", value);
    }
    if (t->value[id] >= 0) { return; } // an added token, which is in the model too
    t->value[id] = value;
    t->added[id] = added;
}
static inline void tokenizer_json_walk(TokenizerJson *t) {
    const Json *j = &t->json;
    const int added = json_get(j, 0, "added_tokens");
    const int vocab = json_get(j, json_get(j, 0, "model"), "vocab");
    if (!json_is(j, vocab, JSON_OBJECT)) {
        tokenizer_json_refuse(t, "an object model.vocab, as of byte-level BPE", vocab);
    }
    for (int i = json_first(j, added); i >= 0; i = json_next(j, added, i)) {
        const int content = json_get(j, i, "content");
        if (!json_is(j, content, JSON_STRING)) {
            tokenizer_json_refuse(t, "a text as content of each added token", content);
        }
        tokenizer_json_add(t, tokenizer_json_id(t, json_get(j, i, "id")), content, true);
    }
    for (int i = json_first(j, vocab); i >= 0; i = json_next(j, vocab, i)) {
        tokenizer_json_add(t, tokenizer_json_id(t, i), i, false);
    }
}

// Turns the characters of a token in text[bytes] into the bytes for which they stand. Returns how
// many; -1 if a character stands for none.
static inline int64_t tokenizer_json_bytes(const TokenizerJson *t, unsigned char *text,
                                           int64_t bytes) {
    int64_t n = 0;
    for (int64_t at = 0; at < bytes;) {
        int character = text[at++];
        if (character >= 0xc2 && character < 0xe0 && at < bytes && (text[at] & 0xc0) == 0x80) {
            character = (character & 0x1f) << 6 | (text[at++] & 0x3f);
        } else if (character >= 0x80) {
            return -1;
        }
        if (character >= ALPHABET_END || t->bytes_of[character] < 0) { return -1; }
        text[n++] = (unsigned char)t->bytes_of[character];
    }
    return n;
}

// Writes the length of a token as in a tokenizer file: in one byte, or from TOKEN_LONG on in two
// behind a zero. Returns how many bytes that is.
static inline int token_put_length(int64_t length, unsigned char *out) {
    const bool few = length < TOKEN_LONG;
    out[0] = (unsigned char)(few ? length : 0);
    if (few) { return 1; }
    out[1] = (unsigned char)(length & 255);
    out[2] = (unsigned char)(length >> 8);
    return 3;
}
// Writes a token as in a tokenizer file: its length and its bytes. Returns how many bytes that is.
static inline int tokenizer_json_token(const TokenizerJson *t, int32_t id, unsigned char *out) {
    const int value = t->value[id];
    if (value < 0) {
        out[0] = (unsigned char)snprintf((char *)out + 1, TOKEN_LONG - 1, "[%d]", (int)id);
        return 1 + out[0];
    }
    const JsonValue *v = &t->json.values[value];
    int64_t n = t->added[id] ? json_unescape(v->text, v->bytes, t->scratch)
                             : json_unescape(v->name, v->name_bytes, t->scratch);
    if (n > 0 && !t->added[id]) { n = tokenizer_json_bytes(t, t->scratch, n); }
    if (n < 0) { tokenizer_json_refuse(t, "tokens in GPT-2's alphabet (byte-level BPE)", value); }
    if (n < 1 || n > TOKEN_BYTES_MAX) {
        tokenizer_json_refuse(t, "tokens of 1 to 65535 bytes", value);
    }
    const int head = token_put_length(n, out);
    memcpy(out + head, t->scratch, (size_t)n);
    return head + (int)n;
}

// Returns the id of an added token; -1 if there is none.
static inline int32_t tokenizer_json_added(const TokenizerJson *t, const char *name) {
    const int list = json_get(&t->json, 0, "added_tokens");
    for (int i = json_first(&t->json, list); i >= 0; i = json_next(&t->json, list, i)) {
        if (json_text_is(&t->json, json_get(&t->json, i, "content"), name)) {
            return tokenizer_json_id(t, json_get(&t->json, i, "id"));
        }
    }
    return -1;
}
// Returns the end-of-text token where nothing names it, or -1.
static inline int32_t tokenizer_json_known_end(const TokenizerJson *t) {
    int32_t id = -1;
    for (int k = 0; id < 0 && k < LENGTH_OF(end_of_text_names); k++) {
        id = tokenizer_json_added(t, end_of_text_names[k]);
    }
    return id;
}
// Returns what tokenizer_config.json beside a file tokenizer.json calls its eos_token; "": nothing.
static inline Text tokenizer_json_eos(const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    const Text beside = text_of("%.*stokenizer_config.json", (int)(name - path), path);
    Text eos = text_of("%s", "");
    if (strcmp(name, "tokenizer.json") || access(beside.at, F_OK)) { return eos; }
    Json j = json_open(TOKENIZER_HINT, beside.at);
    int value = json_get(&j, 0, "eos_token");
    if (json_is(&j, value, JSON_OBJECT)) { value = json_get(&j, value, "content"); }
    if (value >= 0 && !json_word_is(&j, value, "null")) {
        const JsonValue *v = &j.values[value];
        const bool fits = v->kind == JSON_STRING && v->bytes < sizeof eos.at;
        const int64_t n = fits ? json_unescape(v->text, v->bytes, (unsigned char *)eos.at) : -1;
        if (n < 0) {
            die(EXIT_INPUT, TOKENIZER_HINT, "%s: expected a text as eos_token, found %.*s",
                beside.at, (int)min_i64((int64_t)v->bytes, 40), v->text);
        }
        eos.at[n] = 0;
    }
    json_free(&j);
    return eos;
}
// Returns the token that ends texts: `given`, from --end-of-text, or what tokenizer_config.json
// says, among the added tokens, else in the vocabulary. Where neither says it, the first of
// end_of_text_names that is an added token.
static inline int32_t tokenizer_json_end(const TokenizerJson *t, const char *given) {
    const bool asked = given && *given;
    const Text named = asked ? text_of("%s", given) : tokenizer_json_eos(t->path);
    int32_t id = *named.at ? tokenizer_json_added(t, named.at) : tokenizer_json_known_end(t);
    if (*named.at && id < 0) {
        const int vocab = json_get(&t->json, json_get(&t->json, 0, "model"), "vocab");
        const int value = json_get(&t->json, vocab, named.at);
        if (value < 0) {
            die(EXIT_INPUT, TOKENIZER_HINT, "%s: expected the token %s, which %s names, found none",
                t->path, named.at,
                asked ? "--end-of-text" : "eos_token of tokenizer_config.json beside it");
        }
        id = tokenizer_json_id(t, value);
    }
    if (id < 0) {
        die(EXIT_INPUT, "name the token that ends texts: --end-of-text TOKEN",
            "%s: expected an added token that ends texts, such as <|endoftext|> or </s>, found "
            "none",
            t->path);
    }
    return id;
}

// Opens a file and finds its tokens. Ends the program (EXIT_INPUT) if the file is bad.
static inline TokenizerJson tokenizer_json_open(const char *path) {
    TokenizerJson t = {};
    t.path = path;
    t.json = json_open(TOKENIZER_HINT, path);
    size_t longest = 0;
    for (int i = 0; i < t.json.count; i++) {
        const JsonValue *v = &t.json.values[i];
        longest = v->bytes > longest ? v->bytes : longest;
        longest = v->name_bytes > longest ? v->name_bytes : longest;
    }
    t.scratch = new_array(unsigned char, longest + 1, "the tokenizer");
    tokenizer_json_alphabet(&t);
    tokenizer_json_walk(&t);
    t.value = new_array(int, t.vocab + 1, "the tokenizer");
    t.added = new_array(bool, t.vocab + 1, "the tokenizer");
    memset(t.value, -1, (t.vocab + 1) * sizeof *t.value);
    tokenizer_json_walk(&t);
    return t;
}
static inline void tokenizer_json_close(TokenizerJson *t) {
    free_all(t->scratch, t->value, t->added);
    json_free(&t->json);
}

// Returns all tokens as in a tokenizer file, and sets the size of that.
static inline unsigned char *tokenizer_json_text(const TokenizerJson *t, size_t *size) {
    unsigned char *text = NULL;
    size_t all = 0, capacity = 0;
    for (int32_t id = 0; id < t->vocab; id++) {
        if (all + 3 + TOKEN_BYTES_MAX > capacity) {
            capacity = 2 * capacity + (1 << 18);
            text = resize_array(unsigned char, text, (int64_t)capacity, "the tokenizer");
        }
        all += (size_t)tokenizer_json_token(t, id, text + all);
    }
    *size = all;
    return text;
}

#endif
