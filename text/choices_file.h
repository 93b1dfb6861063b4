// choices_file.h: llm.c's files of multiple choices (HellaSwag): a context and four completions.
// They are untrusted: everything is checked before it is read.
//
//   file    little-endian, with a header of 256 int32: magic 20240522, version 1, number of
//   examples,
//           bytes of the longest; then the examples as uint16 words: a mark, bytes, number, the
//           index
//           of the right completion, number of completions, then the context and the completions,
//           each with its length
#ifndef CHOICES_FILE_H
#define CHOICES_FILE_H

#include "base/base.h"
#include "base/files.h"
#include "text/shard_file.h"

enum {
    CHOICES_MAGIC = 20240522,
    CHOICES = 4,           // completions of an example
    CHOICES_START = 65535, // begins an example
    CHOICES_MOST = 65536   // limit of examples: their number is a uint16
};
#define CHOICES_HINT                                                                               \
    "--hellaswag takes llm.c's hellaswag_val.bin; the file is damaged or another one"

// The file while it is read. Positions count its words after the header. Everything is checked
// before it is read.
typedef struct {
    const char *path;
    const uint16_t *words;
    int64_t end;     // words of the file; inside an example: the example's end
    int64_t example; // its number, which the file repeats
} ChoiceFile;

static inline int64_t choices_byte(int64_t at) { return DATA_HEADER_BYTES + 2 * at; }

// Returns the word at `at`. Ends the program unless low <= word <= high.
static inline int64_t choices_word(const ChoiceFile *f, int64_t at, const char *what, int64_t low,
                                   int64_t high) {
    if (at >= f->end) {
        die(EXIT_INPUT, CHOICES_HINT,
            "%s: example %" PRId64 ": expected %s at byte %" PRId64 ", found the end", f->path,
            f->example, what, choices_byte(at));
    }
    int64_t word = f->words[at];
    if (word < low || word > high) {
        die(EXIT_INPUT, CHOICES_HINT,
            "%s: example %" PRId64 ": expected %s (%" PRId64 " to %" PRId64 ") at byte %" PRId64
            ", found %" PRId64,
            f->path, f->example, what, low, high, choices_byte(at), word);
    }
    return word;
}

// Some tokens of the file.
typedef struct {
    const uint16_t *tokens;
    int64_t count;
} ChoiceTokens;
typedef struct {
    ChoiceTokens context, completion[CHOICES];
    int right; // the completion that is right
} ChoiceExample;

// Checks a length and that many tokens at *at, and moves *at behind them.
static inline ChoiceTokens choices_tokens(const ChoiceFile *f, int64_t *at, const char *what,
                                          int32_t vocab) {
    const int64_t count = choices_word(f, *at, what, 1, f->end - *at - 1), begin = *at + 1;
    for (*at = begin; *at < begin + count; (*at)++) {
        choices_word(f, *at, "a token", 0, vocab - 1);
    }
    const ChoiceTokens tokens = {f->words + begin, count};
    return tokens;
}
// Reads the example at word `at`. Returns the position of the next example.
static inline int64_t choices_example(ChoiceFile f, int64_t at, int32_t vocab, ChoiceExample *e) {
    const int64_t begin = at;
    choices_word(&f, at++, "the mark of an example", CHOICES_START, CHOICES_START);
    const int64_t bytes = choices_word(&f, at++, "the bytes of an example", 2, 2 * (f.end - begin));
    f.end = begin + bytes / 2;
    choices_word(&f, at++, "the number of the example", f.example, f.example);
    e->right = (int)choices_word(&f, at++, "a label", 0, CHOICES - 1);
    choices_word(&f, at++, "the number of completions", CHOICES, CHOICES);
    e->context = choices_tokens(&f, &at, "the length of a context", vocab);
    for (int c = 0; c < CHOICES; c++) {
        e->completion[c] = choices_tokens(&f, &at, "the length of a completion", vocab);
    }
    if (2 * (at - begin) != bytes) {
        die(EXIT_INPUT, CHOICES_HINT,
            "%s: example %" PRId64 ": expected its %" PRId64
            " bytes to hold %d completions, found more than they need",
            f.path, f.example, bytes, CHOICES);
    }
    return at;
}
// Checks the header. Returns the number of examples; *longest is the size of the largest, in bytes.
static inline int64_t choices_header(const char *path, const void *map, int64_t *longest) {
    int32_t header[4];
    memcpy(header, map, sizeof header);
    data_check_header(path, header, "multiple choices", CHOICES_MAGIC,
                      "version 1 of multiple choices", 1, CHOICES_HINT);
    if (header[2] < 1 || header[2] > CHOICES_MOST) {
        die(EXIT_INPUT, CHOICES_HINT, "%s: expected 1 to %d examples, found %d", path, CHOICES_MOST,
            header[2]);
    }
    *longest = header[3];
    return header[2];
}

#endif
