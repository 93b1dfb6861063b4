// words.h: how a text is cut into words before byte pair encoding, which never joins two words. The
// tokenizer's file says it by a regular expression, which PCRE2 matches.
//
// The file means the expression as Oniguruma reads it, which the PyPI package tokenizers uses.
// Only what both read alike is taken:
//
//   characters, [...], |, (...), (?:...), looking ahead and behind, ? * + and {n,m}
//   (?i:...)         of ASCII letters, where no single character stands for two (ss is no ß)
//   \p{..} \P{..}    categories, of one or two letters; \d is \p{Nd}
//   \s \S .          written out, since to PCRE2 U+180E is a space, and the end of a line depends
//   \r \n \t         and the other signs of ASCII behind a backslash
//
// Letters are those of PCRE2's version of Unicode.
#ifndef WORDS_H
#define WORDS_H

#include "base/base.h"
#include "base/files.h"
#include "text/utf8.h"
#ifdef USE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h> // regular expressions
#endif

#define WORDS_GPT2                                                                                 \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

// How a text is cut: what matches is a word, and so is what is between two matches.
typedef struct {
    void *code, *match; // PCRE2's; NULL: all is one word
    bool only;          // what is between two matches is dropped
} WordCut;

#ifdef USE_PCRE2

// Returns PCRE2's form of a pattern; NULL if it has none, or if it matches an empty text. Neither
// its machine code (JIT) nor its own possessive quantifiers: in version 10.42 either is wrong for
// some patterns, as [abc]+(?:de)?+\P{L}+ and (?>\p{L}++|[a-z]{1,3}?)s, and neither is much faster.
static inline pcre2_code *words_compile(const char *pattern, size_t bytes) {
    int error;
    size_t at;
    uint32_t empty = 1;
    pcre2_code *code =
        pcre2_compile((PCRE2_SPTR)pattern, bytes, PCRE2_UTF | PCRE2_UCP | PCRE2_NO_AUTO_POSSESS,
                      &error, &at, NULL);
    if (code) { pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &empty); }
    if (!empty) { return code; }
    pcre2_code_free(code);
    return NULL;
}

// -------------------------------------------------------------------------------------------------
// From Oniguruma's expressions to PCRE2's. Each function takes the begin of a text that ends with a
// zero byte, and returns how many bytes of it are understood: 0 if none. It adds what they mean.

#define WORDS_LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#define WORDS_DIGITS "0123456789"
enum { WORDS_GROUPS = 100 }; // most groups in each other

typedef struct {
    TextBuffer out;
    bool in_class; // behind a [
    int groups;    // that are open
    size_t begin[WORDS_GROUPS];
} WordsPattern;

static inline int64_t words_copy(const char *at, size_t bytes, WordsPattern *w) {
    text_add_bytes(&w->out, at, (int64_t)bytes);
    return (int64_t)bytes;
}
static inline int64_t words_escape(const char *at, WordsPattern *w) {
    // \p at both ends, so that a - beside it begins no range
    static const char space[] = "\\p{Z}\\t-\\r\\x{85}\\p{Z}";
    const char c = at[1];
    if (c == 's' || (c == 'S' && !w->in_class)) {
        text_add(&w->out, w->in_class ? "%s" : c == 's' ? "[%s]" : "[^%s]", space);
        return 2;
    }
    if (c == 'p' || c == 'P') {
        const size_t letters = at[2] == '{' ? strspn(at + 3, WORDS_LETTERS) : 0;
        const bool good = (letters == 1 || letters == 2) && at[3 + letters] == '}';
        return good ? words_copy(at, letters + 4, w) : 0;
    }
    return c && (strchr("drnt", c) || ispunct((unsigned char)c)) ? words_copy(at, 2, w) : 0;
}
// {n}, {n,} and {n,m}. A + behind it has two meanings, and so has a ? behind {n}.
static inline int64_t words_interval(const char *at, WordsPattern *w) {
    size_t n = 1 + strspn(at + 1, WORDS_DIGITS);
    const bool comma = n > 1 && at[n] == ',';
    if (comma) { n += 1 + strspn(at + n + 1, WORDS_DIGITS); }
    const bool good = n > 1 && at[n] == '}' && at[n + 1] != '+' && (comma || at[n + 1] != '?');
    return good ? words_copy(at, n + 1, w) : 0;
}
// (?i:...), up to its end. To Oniguruma one character may be two letters in another case: ss, st,
// ff, fi, fl.
static inline int64_t words_caseless(const char *at, WordsPattern *w) {
    const size_t n = 4 + strspn(at + 4, WORDS_LETTERS "'|-[]");
    bool in_class = false;
    for (size_t i = 4; i < n; i++) {
        const bool two = strchr("sSfF", at[i]) && at[i + 1] != '|' && at[i + 1] != ')';
        if (in_class ? at[i] == '[' : at[i] == ']' || two) { return 0; }
        in_class = at[i] == '[' || (in_class && at[i] != ']');
    }
    return at[n] == ')' && !in_class ? words_copy(at, n, w) : 0;
}
static inline int64_t words_begin_group(const char *at, WordsPattern *w) {
    static const char *const groups[] = {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"};
    if (w->groups == WORDS_GROUPS) { return 0; }
    w->begin[w->groups++] = w->out.length;
    if (!strncmp(at, "(?i:", 4)) { return words_caseless(at, w); }
    for (int i = 0; i < 6; i++) {
        const size_t n = strlen(groups[i]);
        if (!strncmp(at, groups[i], n)) { return words_copy(at, n, w); }
    }
    return at[1] == '?' || at[1] == '*' ? 0 : words_copy(at, 1, w);
}
// The engines leave the repetition of an empty text in two ways.
static inline int64_t words_end_group(const char *at, WordsPattern *w) {
    if (!w->groups) { return 0; }
    const size_t begin = w->begin[--w->groups];
    words_copy(at, 1, w);
    if (!at[1] || !strchr("*+{", at[1])) { return 1; }
    pcre2_code *group = words_compile(w->out.text + begin, w->out.length - begin);
    const bool good = group != NULL;
    pcre2_code_free(group);
    return good;
}
static inline int64_t words_part(const char *at, WordsPattern *w) {
    if (*at == '\\') { return words_escape(at, w); }
    if (w->in_class) {
        w->in_class = *at != ']';
        return *at == '[' || !strncmp(at, "&&", 2) ? 0 : words_copy(at, 1, w);
    }
    switch (*at) {
    case '[': {
        const size_t n = at[1] == '^' ? 2 : 1;
        w->in_class = at[n] != ']';
        return w->in_class ? words_copy(at, n, w) : 0;
    }
    case '(': return words_begin_group(at, w);
    case ')': return words_end_group(at, w);
    case '{': return words_interval(at, w);
    case '.': text_add(&w->out, "[^\\n]"); return 1;
    case '^':
    case '$': return 0;
    default: return words_copy(at, 1, w);
    }
}

// -------------------------------------------------------------------------------------------------
// Cuts

// Opens a cut by a pattern, which ends with a zero byte. Returns false for one that is not
// understood, or that matches an empty text.
static inline bool words_open(WordCut *w, const char *pattern) {
    WordsPattern p = {};
    int64_t n = 1;
    for (const char *at = pattern; *at && n; at += n) { n = words_part(at, &p); }
    pcre2_code *code = n ? words_compile(p.out.text, p.out.length) : NULL;
    free(p.out.text);
    if (!code) { return false; }
    w->code = code;
    w->match = pcre2_match_data_create(1, NULL);
    if (!w->match) { die(EXIT_RESOURCES, NULL, "cannot allocate the pattern of words"); }
    return true;
}
static inline void words_close(WordCut *w) {
    pcre2_code_free((pcre2_code *)w->code);
    pcre2_match_data_free((pcre2_match_data *)w->match);
}

// Finds the first match at or after text[*begin], of a text in UTF-8, and sets where it begins and
// ends: both at `bytes` if there is none.
static inline void words_find(const WordCut *w, const char *text, int64_t bytes, int64_t *begin,
                              int64_t *end) {
    *end = bytes;
    if (!w->code) { return; }
    const int found =
        pcre2_match((pcre2_code *)w->code, (PCRE2_SPTR)text, (size_t)bytes, (size_t)*begin,
                    PCRE2_NO_UTF_CHECK, (pcre2_match_data *)w->match, NULL);
    if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
        unsigned char message[200];
        pcre2_get_error_message(found, message, sizeof message);
        die(EXIT_INPUT, "give a shorter text, or another --tokenizer",
            "cannot cut the text by the tokenizer's pattern: %s", (char *)message);
    }
    const size_t *const at = pcre2_get_ovector_pointer((pcre2_match_data *)w->match);
    *begin = found < 0 ? bytes : (int64_t)at[0];
    *end = found < 0 ? bytes : (int64_t)at[1];
}

#else
static inline bool words_open(WordCut *w, const char *pattern) {
    (void)w;
    (void)pattern;
    text_needs_libraries();
}
static inline void words_close(WordCut *w) { (void)w; }
static inline void words_find(const WordCut *w, const char *text, int64_t bytes, int64_t *begin,
                              int64_t *end) {
    (void)w;
    (void)text;
    (void)begin;
    *end = bytes;
}
#endif

#endif
