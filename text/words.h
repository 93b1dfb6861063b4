// words.h: how a text is cut into words before byte pair encoding, which never joins two words.
//
// Each tokenizer says it by a regular expression. There are few of them, so they are recognised as
// texts in a table, and what they match is written down once, for two families and for numbers:
//
//   GPT-2's      's 't 're 've 'm 'll 'd; letters; digits of any number; others: each of the three
//                with a space in front, if there is one
//   later ones   the same endings, also in capitals; letters, with any character in front that is
//                no letter, digit or end of a line; one to `digits` digits; others, with a space in
//                front and ends of lines behind; white space up to its last end of a line
//   both         white space: without its last character if more text follows; else all
//   numbers      digits, and what is between them
//
// A digit is any number of Unicode 16 (\p{N}). What the package tokenizers calls Digits has 13
// more, of Unicode 17.
#ifndef WORDS_H
#define WORDS_H

#include "text/unicode.h"
#include "text/unicode_classes.h"

typedef enum { WORDS_ALL, WORDS_GPT2, WORDS_LATER, WORDS_NUMBERS } WordsKind;
// How a text is cut. marks: they belong to letters; digits: the longest number, 0 for any length.
typedef struct {
    WordsKind kind;
    bool marks;
    int digits;
    const char *pattern; // in a tokenizer.json, with JSON's escapes replaced
} WordPattern;

#define ENDINGS "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
#define SPACES "\\s+(?!\\S)|\\s+"
static const WordPattern words_patterns[] = {
    {.kind = WORDS_GPT2,
     .pattern = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|" SPACES},
    // Llama 3
    {.kind = WORDS_LATER,
     .digits = 3,
     .pattern = ENDINGS "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
                        " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|" SPACES},
    // Qwen 2, 2.5 and 3
    {.kind = WORDS_LATER,
     .digits = 1,
     .pattern = ENDINGS "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
                        " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|" SPACES},
    // Qwen 3.5
    {.kind = WORDS_LATER,
     .marks = true,
     .digits = 1,
     .pattern = ENDINGS "[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|"
                        " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|" SPACES},
    // GPT-4, in two forms, and nanochat
    {.kind = WORDS_LATER,
     .digits = 3,
     .pattern = ENDINGS "[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}|"
                        " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|" SPACES},
    {.kind = WORDS_LATER,
     .digits = 3,
     .pattern = "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}|"
                " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|" SPACES},
    {.kind = WORDS_LATER,
     .digits = 2,
     .pattern = "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,2}|"
                " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|" SPACES},
    {.kind = WORDS_NUMBERS, .digits = 3, .pattern = "\\p{N}{1,3}"},
    {.kind = WORDS_NUMBERS, .digits = 1, .pattern = "\\p{N}"},
};

// Returns the row of a pattern; NULL if it is unknown.
static inline const WordPattern *words_find(const char *pattern, int64_t bytes) {
    enum { COUNT = sizeof words_patterns / sizeof *words_patterns };
    for (int i = 0; i < COUNT; i++) {
        const char *known = words_patterns[i].pattern;
        if ((int64_t)strlen(known) == bytes && !memcmp(known, pattern, (size_t)bytes)) {
            return &words_patterns[i];
        }
    }
    return NULL;
}

// What a character is in a pattern.
typedef enum { SIGN_END, SIGN_LETTER, SIGN_DIGIT, SIGN_OTHER, SIGN_SPACE } Sign;
static inline Sign words_sign(const WordPattern *w, Character c) {
    // by class
    static const Sign signs[] = {SIGN_OTHER, SIGN_LETTER, SIGN_DIGIT, SIGN_OTHER, SIGN_SPACE};
    const int class_of = character_class(c.code);
    if (!c.bytes) { return SIGN_END; }
    return class_of == CHARACTER_MARK && w->marks ? SIGN_LETTER : signs[class_of];
}
static inline bool ends_line(Character c) { return c.code == '\r' || c.code == '\n'; }

// Returns where a run of at most `most` characters of this sign ends (0: of any length).
static inline const char *words_run(const WordPattern *w, Sign sign, const char *at,
                                    const char *end, int most) {
    for (int n = 0; !most || n < most; n++) {
        const Character c = character_at(at, end);
        if (words_sign(w, c) != sign) { break; }
        at += c.bytes;
    }
    return at;
}

// Returns where the first digit is.
static inline const char *words_digit(const WordPattern *w, const char *at, const char *end) {
    for (Character c; at < end; at += c.bytes) {
        c = character_at(at, end);
        if (words_sign(w, c) == SIGN_DIGIT) { break; }
    }
    return at;
}

// Returns where an ending such as 's ends; `at` if there is none.
static inline const char *words_ending(const WordPattern *w, const char *at, const char *end) {
    static const char *const endings[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    // the long s is an s in another case
    const bool any_case = w->kind == WORDS_LATER;
    if (any_case && end - at >= 3 && !memcmp(at, "'\xc5\xbf", 3)) { return at + 3; }
    for (int i = 0; i < 7 && at < end && *at == '\''; i++) {
        const int n = (int)strlen(endings[i]);
        int same = 0;
        while (same < n && same + 1 < end - at &&
               (any_case ? tolower((unsigned char)at[1 + same]) : at[1 + same]) ==
                   endings[i][same]) {
            same++;
        }
        if (same == n) { return at + 1 + n; }
    }
    return at;
}

// Returns where a word of white space ends.
static inline const char *words_space(const WordPattern *w, const char *at, const char *end) {
    const char *last = at, *line = NULL;
    const char *stop = at;
    for (Character c; words_sign(w, c = character_at(stop, end)) == SIGN_SPACE; stop += c.bytes) {
        last = stop;
        line = ends_line(c) ? stop + c.bytes : line;
    }
    if (w->kind == WORDS_LATER && line) { return line; }
    return stop == end || last == at ? stop : last;
}

// Returns where the word ends that begins at `at`, which is before `end`.
static inline const char *words_end(const WordPattern *w, const char *at, const char *end) {
    const Character c = character_at(at, end), d = character_at(at + c.bytes, end);
    const Sign sign = words_sign(w, c), next = words_sign(w, d);
    if (w->kind == WORDS_ALL) { return end; }
    if (w->kind == WORDS_NUMBERS && sign != SIGN_DIGIT) { return words_digit(w, at, end); }
    if (w->kind == WORDS_NUMBERS) { return words_run(w, SIGN_DIGIT, at, end, w->digits); }
    const char *ending = words_ending(w, at, end);
    if (ending > at) { return ending; }
    const bool later = w->kind == WORDS_LATER, space = c.code == ' ';
    const int class_of = character_class(c.code);
    const bool in_front =
        later ? class_of != CHARACTER_LETTER && class_of != CHARACTER_NUMBER && !ends_line(c)
              : space;
    const char *second = at + c.bytes;
    if (in_front && next == SIGN_LETTER) { return words_run(w, SIGN_LETTER, second, end, 0); }
    if (sign == SIGN_LETTER) { return words_run(w, SIGN_LETTER, at, end, 0); }
    if (sign == SIGN_DIGIT) { return words_run(w, SIGN_DIGIT, at, end, w->digits); }
    if (!later && space && next == SIGN_DIGIT) { return words_run(w, next, second, end, 0); }
    if (sign == SIGN_SPACE && !(space && next == SIGN_OTHER)) { return words_space(w, at, end); }
    const char *stop = words_run(w, SIGN_OTHER, space ? second : at, end, 0);
    while (later && stop < end && (*stop == '\r' || *stop == '\n')) { stop++; }
    return stop;
}

#endif
