// utf8.h: texts in UTF-8: bytes that are no UTF-8, white space, and the normal form NFC, which
// utf8proc makes.
#ifndef UTF8_H
#define UTF8_H

#include "base/base.h"
#include "base/files.h"
#include "base/json.h"
#ifdef USE_PCRE2
#include <utf8proc.h> // NFC
#endif

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

// Unicode's property White_Space.
static inline bool character_is_space(int32_t code) {
    return (code >= '\t' && code <= '\r') || (code >= 0x2000 && code <= 0x200a) || code == ' ' ||
           code == 0x85 || code == 0xa0 || code == 0x1680 || code == 0x2028 || code == 0x2029 ||
           code == 0x202f || code == 0x205f || code == 0x3000;
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

__attribute__((noreturn)) static inline void text_needs_libraries(void) {
    die(EXIT_INPUT,
        "install PCRE2 and utf8proc (Debian: libpcre2-dev and libutf8proc-dev; Fedora: pcre2-devel "
        "and utf8proc-devel) and make the program again, or give a vocabulary of bytes",
        "this program was made without PCRE2 and utf8proc, so it encodes a text only as bytes");
}

#ifdef USE_PCRE2

static inline int combining_class(int32_t code) {
    return utf8proc_get_property(code)->combining_class;
}
static inline int compare_u64(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}
// Puts a run of marks into the order of their combining classes; equal ones stay in theirs.
static inline void marks_order(int32_t *code, int64_t count) {
    uint64_t *key = new_array(uint64_t, count, "a text"); // class, index, code
    for (int64_t i = 0; i < count; i++) {
        key[i] = (uint64_t)combining_class(code[i]) << 56 | (uint64_t)i << 24 | (uint64_t)code[i];
    }
    qsort(key, (size_t)count, sizeof *key, compare_u64);
    for (int64_t i = 0; i < count; i++) { code[i] = (int32_t)(key[i] & 0xffffff); }
    free(key);
}

// Adds text[bytes] in normal form NFC. Two things are done here that
// utf8proc_map() does, too: it puts marks into order in a time that is the square of a run's
// length, and utf8proc before 2.9 takes U+11A7 for a part of the syllable before it.
static inline void text_add_normal(TextBuffer *t, const char *text, int64_t bytes) {
    const int64_t most = 2 * bytes; // a character of 2 bytes has at most 3 parts
    int32_t *code = new_array(int32_t, most, "a text");
    int64_t count = 0;
    Character c;
    for (const char *at = text; (c = character_at(at, text + bytes)).bytes; at += c.bytes) {
        count += utf8proc_decompose_char(c.code < 0 ? 0xfffd : c.code, code + count, most - count,
                                         UTF8PROC_DECOMPOSE, NULL);
    }
    for (int64_t at = 0, end; at < count; at = end) {
        bool sorted = true;
        for (end = at + 1; end < count && combining_class(code[end]); end++) {
            sorted &= combining_class(code[end - 1]) <= combining_class(code[end]);
        }
        const bool mark = combining_class(code[at]);
        if (!sorted) { marks_order(code + at + !mark, end - at - !mark); }
    }
    for (int64_t at = 0, end; at < count; at = end) {
        for (end = at + 1; end < count && code[end] != 0x11a7;) { end++; }
        const int64_t n = utf8proc_normalize_utf32(
            code + at, end - at, (utf8proc_option_t)(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
        for (int64_t i = 0; i < n; i++) { text_add_character(t, code[at + i]); }
    }
    free(code);
}

#else
static inline void text_add_normal(TextBuffer *t, const char *text, int64_t bytes) {
    (void)t;
    (void)text;
    (void)bytes;
    text_needs_libraries();
}
#endif

#endif
