// figures.h: what the program reports, as rows. One row has a figure's key in JSON and its text for
// people; the log, lines and tables, and TensorBoard are made from it. Also how JSON is written.
#ifndef FIGURES_H
#define FIGURES_H

#include "base/base.h"
#include "base/files.h"
#include "base/json.h"
#include "base/readable.h"

// A row: "KEY=TEXT"; "KEY?TEXT" whose text is shown if the value is finite; "KEY", which is in JSON
// alone; "=TEXT", for people alone. The text is printf's for a double, or has one of these
// conversions: %T a time in ms, %C a count, %P and %Q a share in percent with no or one digit, %B
// bytes in a column, %G bytes as a number of GiB.
typedef struct {
    const char *name;
    double value; // not finite: not measured, or not to be shown; null in JSON
} Figure;

static inline Figure figure(const char *name, double value) {
    const Figure row = {name, value};
    return row;
}
// Returns the key; "" if the row is for people alone.
static inline Text figure_key(const Figure *f) {
    return text_of("%.*s", (int)strcspn(f->name, "=?"), f->name);
}
// Prints a value in such a text.
static inline void print_figure(FILE *to, const char *text, double value) {
    Text format = text_of("%s", text);
    char *at = format.at + strcspn(format.at, "%");
    at += strcspn(at, "TCPQBGefg");
    const char conversion = *at;
    if (conversion == 'G') { *at = 'f'; }
    if (!conversion || strchr("Gefg", conversion)) {
        fprintf(to, format.at, conversion == 'G' ? gibibytes(value) : value);
        return;
    }
    *at = 's';
    fprintf(to, format.at,
            (conversion == 'T'   ? readable_step(value / 1000)
             : conversion == 'C' ? readable_count(value)
             : conversion == 'B' ? readable_column(value)
                                 : readable_share(value, conversion == 'Q'))
                .at);
}
static inline void print_figures(FILE *to, const Figure *rows, int count) {
    for (int i = 0; i < count; i++) {
        const char *text = strpbrk(rows[i].name, "=?");
        const bool shown = text && (*text == '=' || isfinite(rows[i].value));
        if (shown) { print_figure(to, text + 1, rows[i].value); }
    }
}

// -------------------------------------------------------------------------------------------------
// JSON

// Full precision. JSON has no infinities: they become null.
static inline void json_add_number(TextBuffer *t, double x) {
    text_add(t, isfinite(x) ? "%.17g" : "null", x);
}
// Adds a member to an object.
static inline void json_add_field(TextBuffer *t, const char *key, double x) {
    text_add(t, "%s\"%s\":", t->text[t->length - 1] == '{' ? "" : ",", key);
    json_add_number(t, x);
}
static inline void json_add_figures(TextBuffer *t, const Figure *rows, int count) {
    for (int i = 0; i < count; i++) {
        const Text key = figure_key(&rows[i]);
        if (*key.at) { json_add_field(t, key.at, rows[i].value); }
    }
}
// Writes any bytes as a JSON string in UTF-8. A byte that is no part of a character becomes \udc80
// to \udcff, half of a surrogate pair. No valid text contains these, so the bytes can be restored
// (as by Python's os.fsencode).
static inline void json_add_string(TextBuffer *t, const char *text) {
    text_add(t, "\"");
    for (const char *s = text, *end = text + strlen(text); s < end;) {
        const Character c = character_at(s, end);
        const int bytes = c.code < 0 ? 1 : c.bytes;
        if (c.code < 0) {
            text_add(t, "\\udc%02x", (unsigned char)*s);
        } else if (*s == '"' || *s == '\\') {
            text_add(t, "\\%c", *s);
        } else if (c.code < 32) {
            text_add(t, "\\u%04x", (unsigned)c.code);
        } else {
            text_add(t, "%.*s", bytes, s);
        }
        s += bytes;
    }
    text_add(t, "\"");
}

#endif
