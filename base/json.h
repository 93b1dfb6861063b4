// json.h: reads untrusted JSON, such as the planner's profiles.
//
// Data       One array of values in the order of the text. The members of an array or object follow
//            it; `next` skips all of them. Strings stay in the text as they were written, with
//            their escapes: they are compared and shown, never interpreted.
// Invariants At most JSON_BYTES of text, at most JSON_DEPTH levels deep; every number is finite.
//            Nothing outside the text is read, whatever it contains.
#ifndef JSON_H
#define JSON_H

#include "base/base.h"
#include "base/files.h"

#include <ctype.h> // isdigit

enum { JSON_BYTES = 1 << 26, JSON_DEPTH = 64 };
// JSON_WORD: true, false or null
typedef enum { JSON_WORD, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonKind;

typedef struct {
    JsonKind kind;
    int next; // index of the value after this one and its members
    // in the text, not terminated. name: of a member of an object, else NULL; text: of a string,
    // word or number
    const char *name, *text;
    size_t name_bytes, bytes; // lengths of name and text
    double number;
} JsonValue;
typedef struct {
    char *text; // owned by this struct
    JsonValue *values;
    int count;
    int64_t capacity;
    const char *at, *end, *trouble; // reading position and end; the error, or NULL
} Json;

static inline void json_free(Json *j) {
    free(j->text);
    free(j->values);
    memset(j, 0, sizeof *j);
}
static inline bool json_fail(Json *j, const char *trouble) {
    if (!j->trouble) { j->trouble = trouble; }
    return false;
}
static inline char json_peek(Json *j) { // next character after white space; 0 at the end
    while (j->at < j->end && strchr(" \t\r\n", *j->at) && *j->at) { j->at++; }
    return (char)(j->at < j->end ? *j->at : 0);
}
static inline bool json_take(Json *j, char c) {
    bool there = json_peek(j) == c;
    j->at += there;
    return there;
}
static inline int json_add(Json *j, JsonKind kind) {
    j->values = grow_array(JsonValue, j->values, j->count, &j->capacity, "a JSON file");
    const JsonValue v = {.kind = kind, .text = j->at};
    j->values[j->count] = v;
    return j->count++;
}

static inline bool json_read_string(Json *j, const char **text, size_t *bytes) {
    if (!json_take(j, '"')) { return json_fail(j, "a string in \"quotes\" was expected"); }
    *text = j->at;
    for (; j->at < j->end && *j->at != '"'; j->at++) {
        if ((unsigned char)*j->at < ' ') {
            return json_fail(j, "a string holds a control character");
        }
        if (*j->at == '\\' && ++j->at == j->end) { break; }
    }
    if (j->at == j->end) { return json_fail(j, "a string does not end"); }
    *bytes = j->at++ - *text;
    return true;
}
// Skips digits. Returns 0, 1 or 2 (2: two or more).
static inline int json_digits(Json *j) {
    const char *from = j->at;
    while (j->at < j->end && isdigit((unsigned char)*j->at)) { j->at++; }
    return (int)min_i64(j->at - from, 2);
}
static inline bool json_read_number(Json *j, JsonValue *v) {
    char copy[64];
    const char *from = j->at;
    j->at += *j->at == '-';
    bool zero = j->at < j->end && *j->at == '0';
    int digits = json_digits(j);
    bool good = digits && !(zero && digits > 1);
    if (j->at < j->end && *j->at == '.') {
        j->at++;
        good = good && json_digits(j);
    }
    if (j->at < j->end && (*j->at == 'e' || *j->at == 'E')) {
        j->at++;
        j->at += j->at < j->end && (*j->at == '+' || *j->at == '-');
        good = good && json_digits(j);
    }
    v->bytes = j->at - from;
    if (!good || v->bytes >= sizeof copy) { return json_fail(j, "a number was expected"); }
    memcpy(copy, from, v->bytes);
    copy[v->bytes] = 0;
    v->number = strtod(copy, NULL);
    return isfinite(v->number) || json_fail(j, "a number is too large");
}
static inline bool json_read_word(Json *j, JsonValue *v) {
    static const char *const words[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(j->end - j->at) >= n && !memcmp(j->at, words[i], n)) {
            j->at += n;
            v->bytes = n;
            return true;
        }
    }
    return json_fail(j, "a value was expected");
}
static inline bool json_read(Json *j, int depth);
static inline bool json_read_members(Json *j, int depth, char close) {
    j->at++;
    if (json_take(j, close)) { return true; }
    do {
        const char *name = NULL;
        size_t bytes = 0;
        if (close == '}' && !(json_read_string(j, &name, &bytes) &&
                              (json_take(j, ':') || json_fail(j, "a ':' was expected")))) {
            return false;
        }
        int member = j->count;
        if (!json_read(j, depth + 1)) { return false; }
        j->values[member].name = name;
        j->values[member].name_bytes = bytes;
    } while (json_take(j, ','));
    return json_take(j, close) || json_fail(j, "a ',' or the end of the list was expected");
}
// Reads one value and its members, at most JSON_DEPTH levels deep.
static inline bool json_read(Json *j, int depth) {
    bool good;
    char c = json_peek(j);
    if (depth == JSON_DEPTH) { return json_fail(j, "it is nested too deeply"); }
    int me = json_add(j, c == '{'                                ? JSON_OBJECT
                         : c == '['                              ? JSON_ARRAY
                         : c == '"'                              ? JSON_STRING
                         : c == '-' || isdigit((unsigned char)c) ? JSON_NUMBER
                                                                 : JSON_WORD);
    switch (j->values[me].kind) {
    case JSON_OBJECT: good = json_read_members(j, depth, '}'); break;
    case JSON_ARRAY: good = json_read_members(j, depth, ']'); break;
    case JSON_STRING: good = json_read_string(j, &j->values[me].text, &j->values[me].bytes); break;
    case JSON_NUMBER: good = json_read_number(j, &j->values[me]); break;
    default: good = json_read_word(j, &j->values[me]);
    }
    j->values[me].next = j->count;
    return good;
}

// Parses text and takes ownership of it. Returns false if it is no JSON; `trouble` then says what
// was wrong at the character `at`.
static inline bool json_parse(Json *j, char *text, size_t bytes) {
    memset(j, 0, sizeof *j);
    j->text = text;
    j->at = text;
    j->end = text + bytes;
    return json_read(j, 0) &&
           (j->at == j->end || !json_peek(j) ? j->at == j->end || json_fail(j, "a zero byte")
                                             : json_fail(j, "the end was expected"));
}
// Reads a file. Ends the program (EXIT_INPUT) if it cannot be read or is no JSON; the hint is then
// `flag`.
static inline Json json_open(const char *flag, const char *path) {
    size_t bytes;
    char *text = read_file(path, flag, JSON_BYTES, &bytes);
    Json j;
    if (!json_parse(&j, text, bytes)) {
        int line = 1;
        for (const char *c = text; c < j.at; c++) { line += *c == '\n'; }
        die(EXIT_INPUT, flag, "%s is no JSON: line %d, byte %zu: %s", path, line,
            (size_t)(j.at - text), j.trouble);
    }
    return j;
}

// -------------------------------------------------------------------------------------------------
// Access. Values are identified by their index; -1 is no value, and has no members.
static inline bool json_is(const Json *j, int value, JsonKind kind) {
    return value >= 0 && j->values[value].kind == kind;
}
// Return the first member of a list, and the member after a member; -1 if there is none.
static inline int json_first(const Json *j, int list) {
    bool has = (json_is(j, list, JSON_ARRAY) || json_is(j, list, JSON_OBJECT)) &&
               j->values[list].next > list + 1;
    return has ? list + 1 : -1;
}
static inline int json_next(const Json *j, int list, int member) {
    return j->values[member].next < j->values[list].next ? j->values[member].next : -1;
}
static inline int json_members(const Json *j, int list) {
    int n = 0;
    for (int i = json_first(j, list); i >= 0; i = json_next(j, list, i)) { n++; }
    return n;
}
// Reads one UTF-16 unit, \uXXXX. Returns -1 if it is none.
static inline int64_t json_unit(const char *at, const char *end) {
    int64_t unit = 0;
    if (end - at < 6 || at[0] != '\\' || at[1] != 'u') { return -1; }
    for (int i = 2; i < 6; i++) {
        static const char digits[] = "0123456789abcdef";
        const char *digit = strchr(digits, tolower((unsigned char)at[i]));
        if (!digit || !*digit) { return -1; }
        unit = 16 * unit + (digit - digits);
    }
    return unit;
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
// Writes a character in UTF-8. Returns how many bytes: 1 to 4.
static inline int json_put_utf8(int64_t character, unsigned char *out) {
    const int more = character < 0x80 ? 0 : character < 0x800 ? 1 : character < 0x10000 ? 2 : 3;
    static const unsigned char first[] = {0, 0xc0, 0xe0, 0xf0};
    for (int i = more; i > 0; i--) {
        out[i] = (unsigned char)(0x80 | (character & 0x3f));
        character >>= 6;
    }
    out[0] = (unsigned char)(first[more] | character);
    return more + 1;
}
// Writes a string's text with its escapes replaced, in UTF-8, at most as many bytes as it has.
// Returns how many bytes; -1 if an escape means nothing.
static inline int64_t json_unescape(const char *text, size_t bytes, unsigned char *out) {
    static const char names[] = "\"\\/bfnrt", means[] = "\"\\/\b\f\n\r\t";
    unsigned char *to = out;
    for (const char *at = text, *end = text + bytes; at < end;) {
        if (*at != '\\') {
            *to++ = (unsigned char)*at++;
            continue;
        }
        const char *name = end - at > 1 && at[1] ? strchr(names, at[1]) : NULL;
        if (name) {
            *to++ = (unsigned char)means[name - names];
            at += 2;
            continue;
        }
        int64_t unit = json_unit(at, end);
        at += 6;
        if (unit >= 0xd800 && unit < 0xdc00) { // the first half of a pair
            const int64_t low = json_unit(at, end);
            unit = low >= 0xdc00 && low < 0xe000 ? 0x10000 + ((unit - 0xd800) << 10) + low - 0xdc00
                                                 : -1;
            at += 6;
        }
        if (unit < 0 || (unit >= 0xd800 && unit < 0xe000)) { return -1; }
        to += json_put_utf8(unit, to);
    }
    return to - out;
}
// Returns whether a string's text, which may have escapes, means `plain`.
static inline bool json_means(const char *text, size_t bytes, const char *plain) {
    unsigned char out[1024];
    const size_t n = strlen(plain);
    if (bytes == n && !memcmp(text, plain, n)) { return true; }
    if (bytes <= n || bytes > sizeof out || !memchr(text, '\\', bytes)) { return false; }
    return json_unescape(text, bytes, out) == (int64_t)n && !memcmp(out, plain, n);
}
// Returns the member `name` of an object, or -1. Of several, the last one counts.
static inline int json_get(const Json *j, int object, const char *name) {
    int found = -1;
    for (int i = json_is(j, object, JSON_OBJECT) ? json_first(j, object) : -1; i >= 0;
         i = json_next(j, object, i)) {
        if (json_means(j->values[i].name, j->values[i].name_bytes, name)) { found = i; }
    }
    return found;
}
// -------------------------------------------------------------------------------------------------
// The members of a list by their names, or by the texts that they are: sorted, for many look-ups.
typedef struct {
    const char *at; // without escapes, not terminated
    size_t bytes;
    int member;
} JsonName;
typedef struct {
    char *text;
    JsonName *names;
    int count;
} JsonNames;

static inline int json_name_order(const JsonName *a, const char *at, size_t bytes) {
    const size_t both = a->bytes < bytes ? a->bytes : bytes;
    const int order = both ? memcmp(a->at, at, both) : 0;
    return order ? order : (a->bytes > bytes) - (a->bytes < bytes);
}
static inline int compare_names(const void *a, const void *b) {
    const JsonName *x = (const JsonName *)a, *y = (const JsonName *)b;
    const int order = json_name_order(x, y->at, y->bytes);
    return order ? order : (x->member > y->member) - (x->member < y->member);
}
// What is no text counts as an empty one.
static inline JsonNames json_names(const Json *j, int list, bool texts) {
    JsonNames n = {};
    size_t all = 0;
    for (int i = json_first(j, list); i >= 0; i = json_next(j, list, i)) {
        all += texts ? j->values[i].bytes : j->values[i].name_bytes;
    }
    n.text = new_array(char, all + 1, "a JSON file");
    n.names = new_array(JsonName, json_members(j, list) + 1, "a JSON file");
    char *to = n.text;
    for (int i = json_first(j, list); i >= 0; i = json_next(j, list, i)) {
        const JsonValue *v = &j->values[i];
        const bool is_text = !texts || v->kind == JSON_STRING;
        const int64_t bytes =
            is_text ? json_unescape(texts ? v->text : v->name, texts ? v->bytes : v->name_bytes,
                                    (unsigned char *)to)
                    : 0;
        const JsonName name = {.at = to, .bytes = (size_t)max_i64(bytes, 0), .member = i};
        n.names[n.count++] = name;
        to += name.bytes;
    }
    qsort(n.names, (size_t)n.count, sizeof *n.names, compare_names);
    return n;
}
// Returns the member of this name, or -1. Of several, the last one counts.
static inline int json_names_get(const JsonNames *n, const char *name) {
    const size_t bytes = strlen(name);
    int low = 0, high = n->count; // the first name behind it is among these
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (json_name_order(&n->names[middle], name, bytes) > 0) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    const bool found = low && !json_name_order(&n->names[low - 1], name, bytes);
    return found ? n->names[low - 1].member : -1;
}
static inline void json_names_free(JsonNames *n) {
    free_all(n->text, n->names);
    memset(n, 0, sizeof *n);
}

// -------------------------------------------------------------------------------------------------
// Reads a JSON number that is a whole number from 0 to 2^53. Returns false if it is none.
static inline bool json_whole(const Json *j, int value, int64_t *out) {
    const double number = json_is(j, value, JSON_NUMBER) ? j->values[value].number : -1;
    *out = number >= 0 && number <= 0x1p53 ? (int64_t)number : -1;
    return *out >= 0 && (double)*out == number;
}
static inline bool json_text_is(const Json *j, int value, const char *text) {
    return json_is(j, value, JSON_STRING) &&
           json_means(j->values[value].text, j->values[value].bytes, text);
}
static inline bool json_word_is(const Json *j, int value, const char *word) {
    return json_is(j, value, JSON_WORD) && j->values[value].bytes == strlen(word) &&
           !memcmp(j->values[value].text, word, strlen(word));
}

#endif
