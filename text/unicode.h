// unicode.h: the characters of a text in UTF-8, their classes, and the normal form NFC.
#ifndef UNICODE_H
#define UNICODE_H

#include "base/base.h"
#include "base/files.h"
#include "base/json.h"
#include "text/unicode_classes.h"
#include "text/unicode_normal.h"

// -------------------------------------------------------------------------------------------------
// Characters

static inline void text_add_bytes(TextBuffer *t, const char *bytes, int64_t n) {
    if (t->length + (size_t)n > t->capacity) {
        t->capacity = 2 * (t->length + (size_t)n);
        t->text = resize_array(char, t->text, (int64_t)t->capacity, "a text");
    }
    if (n) { memcpy(t->text + t->length, bytes, (size_t)n); }
    t->length += (size_t)n;
}
static inline void text_add_character(TextBuffer *t, int32_t code) {
    unsigned char utf8[4];
    text_add_bytes(t, (const char *)utf8, json_put_utf8(code, utf8));
}

// A character and its length in bytes. code -1: the bytes are not UTF-8, and are the longest
// begin of a character, or one byte; 0 bytes: the end of the text.
typedef struct {
    int32_t code;
    int bytes;
} Character;
static inline Character character_at(const char *text, const char *end) {
    const unsigned char *at = (const unsigned char *)text;
    const unsigned first = text < end ? *at : 0;
    Character c = {.code = text < end ? (int32_t)first : -1, .bytes = text < end};
    if (first < 0x80) { return c; }
    const int more = first < 0xc2 || first > 0xf4 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
    // the second byte is limited: no longer form than needed, no surrogate, no code above 0x10ffff
    unsigned low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    unsigned high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    int32_t code = (int32_t)(first & (0x3fu >> more));
    while (c.bytes <= more && c.bytes < end - text && at[c.bytes] >= low && at[c.bytes] <= high) {
        code = code << 6 | (at[c.bytes++] & 0x3f);
        low = 0x80;
        high = 0xbf;
    }
    c.code = more && c.bytes > more ? code : -1;
    return c;
}

// Adds a text with U+FFFD for what is not UTF-8, as Python's decode("utf-8", "replace") and Rust's
// from_utf8_lossy() do: one for each longest begin of a character, and for each other byte.
static inline void text_add_valid(TextBuffer *t, const char *bytes, int64_t n) {
    for (const char *at = bytes, *end = bytes + n; at < end;) {
        const Character c = character_at(at, end);
        if (c.code < 0) {
            text_add_character(t, 0xfffd);
        } else {
            text_add_bytes(t, at, c.bytes);
        }
        at += c.bytes;
    }
}

// Returns the last of the ranges that begins at or below `code`. A range is a number whose upper
// bits are its first code point.
static inline uint32_t range_of(const uint32_t *ranges, int count, int shift, int32_t code) {
    int low = 0;
    for (int step = count; step > 1;) { // the range is in ranges[low ... low + step - 1]
        const int half = step / 2;
        const bool upper = ranges[low + half] >> shift <= (uint32_t)code;
        low += upper ? half : 0;
        step = upper ? step - half : half;
    }
    return ranges[low];
}
// Returns the class of a character: CHARACTER_OTHER for none.
static inline int character_class(int32_t code) {
    enum { COUNT = sizeof unicode_classes / sizeof *unicode_classes };
    return code < 0 ? CHARACTER_OTHER : (int)(range_of(unicode_classes, COUNT, 3, code) & 7);
}
static inline int character_combining(int32_t code) {
    enum { COUNT = sizeof unicode_combining / sizeof *unicode_combining };
    return (int)(range_of(unicode_combining, COUNT, 8, code) & 255);
}

// -------------------------------------------------------------------------------------------------
// NFC (Unicode Standard Annex 15): each character is taken apart, marks are put into an order, and
// what can be composed is composed.

enum {
    PAIRS = sizeof unicode_pairs / sizeof *unicode_pairs,
    SINGLES = sizeof unicode_singles / sizeof *unicode_singles,
    // syllables of Hangul: their parts follow each other, and so do they
    HANGUL = 0xac00,
    HANGUL_L = 0x1100,
    HANGUL_V = 0x1161,
    HANGUL_T = 0x11a7,
    HANGUL_LS = 19,
    HANGUL_VS = 21,
    HANGUL_TS = 28,
    HANGULS = HANGUL_LS * HANGUL_VS * HANGUL_TS
};

// Characters between decomposition and composition.
typedef struct {
    // combining class << 56 | index in `of` << 24 | code: sorted, marks are in order
    uint64_t *of;
    int64_t count, capacity;
    uint64_t pairs[PAIRS]; // first part << 42 | second part << 21 | what they make; sorted
    int pair_count;
} Normalizer;

static inline int compare_u64(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}
static inline int32_t normal_code(uint64_t character) { return (int32_t)(character & 0xffffff); }
static inline int normal_class(uint64_t character) { return (int)(character >> 56); }

static inline void normalizer_open(Normalizer *n) {
    memset(n, 0, sizeof *n);
    for (int i = 0; i < PAIRS; i++) {
        const uint64_t pair = unicode_pairs[i], first = pair >> 21 & 0xfffff;
        const uint64_t second = pair >> 1 & 0xfffff;
        if (pair & 1) { n->pairs[n->pair_count++] = first << 42 | second << 21 | pair >> 41; }
    }
    qsort(n->pairs, (size_t)n->pair_count, sizeof *n->pairs, compare_u64);
}

static inline void normalizer_close(Normalizer *n) {
    free(n->of);
    memset(n, 0, sizeof *n);
}

// Returns the index of the first number of a sorted array that is not below `least`.
static inline int first_at_least(const uint64_t *sorted, int count, uint64_t least) {
    int low = 0;
    for (int high = count; low < high;) {
        const int middle = (low + high) / 2;
        if (sorted[middle] < least) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Adds a character, taken apart. A part may have parts.
static inline void normal_add(Normalizer *n, int32_t code) {
    const int pair = first_at_least(unicode_pairs, PAIRS, (uint64_t)code << 41);
    const int single = first_at_least(unicode_singles, SINGLES, (uint64_t)code << 20);
    const int syllable = code - HANGUL;
    if (pair < PAIRS && unicode_pairs[pair] >> 41 == (uint64_t)code) {
        normal_add(n, (int32_t)(unicode_pairs[pair] >> 21 & 0xfffff));
        normal_add(n, (int32_t)(unicode_pairs[pair] >> 1 & 0xfffff));
    } else if (single < SINGLES && unicode_singles[single] >> 20 == (uint64_t)code) {
        normal_add(n, (int32_t)(unicode_singles[single] & 0xfffff));
    } else if (syllable >= 0 && syllable < HANGULS) {
        normal_add(n, HANGUL_L + syllable / (HANGUL_VS * HANGUL_TS));
        normal_add(n, HANGUL_V + syllable / HANGUL_TS % HANGUL_VS);
        if (syllable % HANGUL_TS) { normal_add(n, HANGUL_T + syllable % HANGUL_TS); }
    } else {
        n->of = grow_array(uint64_t, n->of, n->count, &n->capacity, "a text");
        n->of[n->count] =
            (uint64_t)character_combining(code) << 56 | (uint64_t)n->count << 24 | (uint64_t)code;
        n->count++;
    }
}

// Puts each run of marks into the order of their combining classes.
static inline void normal_order(Normalizer *n) {
    for (int64_t begin = 0, end; begin < n->count; begin = end) {
        end = begin + 1;
        if (!normal_class(n->of[begin])) { continue; }
        while (end < n->count && normal_class(n->of[end])) { end++; }
        qsort(n->of + begin, (size_t)(end - begin), sizeof *n->of, compare_u64);
    }
}

// Returns what two characters make; -1 if they do not compose.
static inline int32_t normal_pair(const Normalizer *n, int32_t first, int32_t second) {
    const int l = first - HANGUL_L, v = second - HANGUL_V, t = second - HANGUL_T;
    if (l >= 0 && l < HANGUL_LS && v >= 0 && v < HANGUL_VS) {
        return HANGUL + (l * HANGUL_VS + v) * HANGUL_TS;
    }
    const int syllable = first - HANGUL;
    if (syllable >= 0 && syllable < HANGULS && syllable % HANGUL_TS == 0 && t > 0 &&
        t < HANGUL_TS) {
        return first + t;
    }
    const uint64_t key = (uint64_t)first << 42 | (uint64_t)second << 21;
    const int i = first_at_least(n->pairs, n->pair_count, key);
    return i < n->pair_count && n->pairs[i] >> 21 == key >> 21 ? (int32_t)(n->pairs[i] & 0x1fffff)
                                                               : -1;
}

// Composes: a character joins the last one of class 0 before it, unless one between them that has
// stayed is of class 0, or of a class that is not lower.
static inline void normal_compose(Normalizer *n) {
    int64_t kept = 0, starter = -1;
    for (int64_t i = 0; i < n->count; i++) {
        const int order = normal_class(n->of[i]);
        const bool free_way = kept == starter + 1 || normal_class(n->of[kept - 1]) < order;
        const int32_t made = starter >= 0 && free_way ? normal_pair(n, normal_code(n->of[starter]),
                                                                    normal_code(n->of[i]))
                                                      : -1;
        if (made >= 0) {
            n->of[starter] = (uint64_t)made; // its class is 0
            continue;
        }
        starter = order ? starter : kept;
        n->of[kept++] = n->of[i];
    }
    n->count = kept;
}

// Adds text[bytes], which is valid UTF-8, in normal form NFC.
static inline void text_add_normal(TextBuffer *t, Normalizer *n, const char *text, int64_t bytes) {
    n->count = 0;
    for (const char *at = text, *end = text + bytes; at < end;) {
        const Character c = character_at(at, end);
        normal_add(n, c.code < 0 ? 0xfffd : c.code);
        at += c.bytes;
    }
    normal_order(n);
    normal_compose(n);
    for (int64_t i = 0; i < n->count; i++) { text_add_character(t, normal_code(n->of[i])); }
}

#endif
