// tokenizer_encode.h: the tokens of a text.
#ifndef TOKENIZER_ENCODE_H
#define TOKENIZER_ENCODE_H

#include "model/tokenizer.h" // the texts of tokens

#define ENCODE_HINT                                                                                \
    "give --tokenizer a file whose text can be encoded: a tokenizer.json with byte-level BPE, "    \
    "GPT-2's tokenizer file, or a vocabulary of bytes"

// Returns how many tokens a text of so many bytes has at most: 4 for a byte, since a byte that is
// not UTF-8 becomes a character of 3 bytes, and a space may be put in front of a word; and one that
// the tokenizer puts in front.
static inline int64_t tokenizer_encode_most(int64_t bytes) { return 4 * bytes + 2; }

static inline int64_t encode_bytes(const Tokenizer *t, const char *text, int64_t bytes,
                                   int32_t *tokens) {
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

// Writes the tokens of text[bytes] and returns how many; tokens[most] with
// most = tokenizer_encode_most(bytes) always has space for them. Ends the program (EXIT_INPUT) if
// the tokenizer cannot encode, or if there are more tokens than `most`.
static inline int64_t tokenizer_encode(const Tokenizer *t, const char *text, int64_t bytes,
                                       int32_t *tokens, int64_t most) {
    if (!encode_has_bytes(t)) {
        die(EXIT_INPUT, ENCODE_HINT, "%s: a text cannot be encoded",
            t->path ? t->path : "without a tokenizer file");
    }
    if (bytes > most) {
        die(EXIT_INPUT, NULL, "expected a text of at most %" PRId64 " tokens, found %" PRId64, most,
            bytes);
    }
    return encode_bytes(t, text, bytes, tokens);
}

#endif
