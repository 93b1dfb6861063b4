// encoder.h: the tokens of a text, step by step:
//
//   1. bytes that are not UTF-8 become U+FFFD
//   2. added tokens, such as <|endoftext|>, are cut out: those that the file does not normalize
//      first, then, of the normalized text, the others. Of two that begin at the same place the
//      longer one counts
//   3. what is between them is cut into words (words.h)
//   4. each word is encoded by itself: byte pair encoding (bpe.h)
//
// The same as in the PyPI package tokenizers, in this order.
#ifndef ENCODER_H
#define ENCODER_H

#include "base/base.h"
#include "base/files.h"
#include "base/json.h"
#include "text/bpe.h"
#include "text/tokenizer.h"
#include "text/utf8.h"
#include "text/words.h"

enum { ENCODER_CUTS = 8, ENCODER_BYTES = 1 << 26 }; // most cuts; bytes of a text

// Added tokens: before or after normalization.
typedef enum { ADDED_LITERAL, ADDED_NORMALIZED, ADDED_SETS } AddedSet;
// The white space before or after an added token belongs to it.
enum { STRIP_LEFT = 1, STRIP_RIGHT = 2 };

typedef struct {
    const Tokenizer *tokenizer;
    int32_t front; // token in front of each text; -1: none
    TokenTable added[ADDED_SETS];
    unsigned char *strip; // [vocabulary] of added tokens
    bool nfc;             // the text is normalized
    WordCut cut[ENCODER_CUTS];
    int cuts;
    bool byte_level;     // the last cut is the one after which characters stand for bytes
    bool space_in_front; // of what the last cut gets
    bool whole_words;    // a word that is a token is not merged from parts
    TokenTable words;
    int32_t byte_token[256]; // -1: none
    Bpe bpe;
    // of one text
    TextBuffer text, normal, spaced;
    int32_t *tokens;
    int64_t count, most;
} Encoder;

static inline Encoder encoder_open(const Tokenizer *t, int64_t added, int64_t words,
                                   int64_t merges) {
    Encoder e = {.tokenizer = t, .front = -1};
    for (int set = 0; set < ADDED_SETS; set++) { e.added[set] = token_table(added); }
    e.strip = new_array(unsigned char, t->vocab, "the tokenizer");
    e.words = token_table(words);
    memset(e.byte_token, -1, sizeof e.byte_token);
    e.bpe = bpe_open(merges);
    return e;
}
static inline void encoder_close(Encoder *e) {
    for (int i = 0; i < e->cuts; i++) { words_close(&e->cut[i]); }
    free_all(e->added[0].token, e->added[1].token, e->strip, e->words.token, e->text.text,
             e->normal.text, e->spaced.text);
    bpe_close(&e->bpe);
    memset(e, 0, sizeof *e);
}
static inline void encoder_add_word(Encoder *e, int32_t token) {
    int length;
    const unsigned char *text = tokenizer_decode(e->tokenizer, token, &length);
    token_table_add(&e->words, e->tokenizer, token);
    if (length == 1) { e->byte_token[text[0]] = token; }
}

__attribute__((noreturn)) static inline void encode_too_many(int64_t most) {
    die(EXIT_INPUT, "give a shorter text",
        "expected a text of at most %" PRId64 " tokens, found more", most);
}
static inline void encode_token(Encoder *e, int32_t token) {
    if (e->count == e->most) { encode_too_many(e->most); }
    e->tokens[e->count++] = token;
}

// Merges the bytes of a word as far as possible.
static inline void encoder_split(Encoder *e, const char *at, const char *end) {
    e->bpe.parts = 0;
    for (; at < end; at++) {
        const int32_t token = e->byte_token[(unsigned char)*at];
        if (token < 0) {
            die(EXIT_INPUT, NULL, "the tokenizer has no token for the byte 0x%02x of the text",
                (unsigned)(unsigned char)*at);
        }
        bpe_append(&e->bpe, token);
    }
    bpe_join(&e->bpe);
}
static inline void encode_word(Encoder *e, const char *at, const char *end) {
    const int32_t whole = e->whole_words ? token_find(&e->words, e->tokenizer, at, end - at) : -1;
    if (whole >= 0) {
        encode_token(e, whole);
        return;
    }
    encoder_split(e, at, end);
    for (int32_t i = 0; i >= 0; i = e->bpe.part[i].after) { encode_token(e, e->bpe.part[i].token); }
}

// Cuts a text that is not empty, by `cut` and those after it, and encodes its words.
static inline void encode_words(Encoder *e, const char *at, const char *end, const WordCut *cut) {
    const WordCut *last = e->cut + e->cuts - 1;
    if (cut > last) {
        encode_word(e, at, end);
        return;
    }
    if (e->space_in_front && cut == last && *at != ' ') {
        e->spaced.length = 0;
        text_add_bytes(&e->spaced, " ", 1);
        text_add_bytes(&e->spaced, at, end - at);
        at = e->spaced.text;
        end = at + e->spaced.length;
    }
    for (int64_t done = 0, begin, stop; done < end - at; done = stop) {
        begin = done;
        words_find(cut, at, end - at, &begin, &stop);
        if (begin > done && !cut->only) { encode_words(e, at + done, at + begin, cut + 1); }
        if (stop > begin) { encode_words(e, at + begin, at + stop, cut + 1); }
    }
}

// Returns the longest added token at the begin of a text, and sets its length; -1 if there is none.
static inline int32_t encode_added_at(const Encoder *e, AddedSet set, const char *text,
                                      const char *end, int *length) {
    const TokenTable *table = &e->added[set];
    const unsigned char *bytes = (const unsigned char *)text;
    const int most = (int)min_i64(table->longest, end - text);
    uint64_t hash = FNV1A_BEGIN;
    int32_t found = -1;
    for (int n = 1; n <= most; n++) {
        hash = fnv1a(hash, bytes + n - 1, 1);
        const int32_t token = table->token[token_slot(table, e->tokenizer, hash, bytes, n)] - 1;
        found = token < 0 ? found : token;
        *length = token < 0 ? *length : n;
    }
    return found;
}
// Returns where the white space before `end` begins, at most back to `begin`, and where that at
// `begin` ends.
static inline const char *encode_space_before(const char *begin, const char *end) {
    const char *space = end;
    for (const char *at = end; at > begin;) {
        at--;
        if ((*at & 0xc0) == 0x80) { continue; } // inside of a character
        if (!character_is_space(character_at(at, end).code)) { break; }
        space = at;
    }
    return space;
}
static inline const char *encode_space_after(const char *begin, const char *end) {
    for (Character c; character_is_space((c = character_at(begin, end)).code);) {
        begin += c.bytes;
    }
    return begin;
}

static inline void encode_between(Encoder *e, const char *at, const char *end, AddedSet set);
// Cuts the added tokens of a set out of a text, and encodes what is between them.
static inline void encode_added(Encoder *e, const char *at, const char *end, AddedSet set) {
    const char *rest = at; // begin of what is not encoded yet
    while (at < end) {
        int length = 0;
        const int32_t token = encode_added_at(e, set, at, end, &length);
        if (token < 0) {
            at++;
            continue;
        }
        const bool left = e->strip[token] & STRIP_LEFT, right = e->strip[token] & STRIP_RIGHT;
        encode_between(e, rest, left ? encode_space_before(rest, at) : at, set);
        encode_token(e, token);
        at += length;
        rest = right ? encode_space_after(at, end) : at;
    }
    encode_between(e, rest, end, set);
}
static inline void encode_between(Encoder *e, const char *at, const char *end, AddedSet set) {
    if (at >= end) { return; }
    if (set == ADDED_NORMALIZED) {
        encode_words(e, at, end, e->cut);
        return;
    }
    if (e->nfc) {
        e->normal.length = 0;
        text_add_normal(&e->normal, at, end - at);
        at = e->normal.text;
        end = at + e->normal.length;
    }
    encode_added(e, at, end, ADDED_NORMALIZED);
}

// Writes the tokens of text[bytes] to tokens[most] and returns how many. Ends the program
// (EXIT_INPUT) if there are more.
static inline int64_t encoder_encode(Encoder *e, const char *text, int64_t bytes, int32_t *tokens,
                                     int64_t most) {
    if (bytes > ENCODER_BYTES) {
        die(EXIT_INPUT, NULL, "expected a text of at most %d bytes, found %" PRId64, ENCODER_BYTES,
            bytes);
    }
    e->tokens = tokens;
    e->most = most;
    e->count = 0;
    e->text.length = 0;
    text_add_valid(&e->text, text, bytes);
    if (e->front >= 0) { encode_token(e, e->front); }
    encode_added(e, e->text.text, e->text.text + e->text.length, ADDED_LITERAL);
    return e->count;
}

#endif
