// log.h: what rank 0 reports while the run goes on: JSON lines for programs (--log; docs/formats.md
// has the names), and lines or a progress bar for people. Values that are not finite were not
// measured or must not be shown.
#ifndef LOG_H
#define LOG_H

#include "base/base.h"
#include "base/files.h"
#include "base/process.h"
#include "base/readable.h"
#include "options.h"
#include "report/tensorboard.h"

// -------------------------------------------------------------------------------------------------
// JSON
typedef struct {
    bool terminal, drawn; // drawn: a line is drawn and not ended
    int64_t steps, first; // last step of the run; steps done before it (resumed)
    int64_t every;        // --log-every
    int64_t stride;       // of lines without it, in private runs: steps; 0: a second
    double step_s, shown; // average of a step; time of the last plain line
    double predicted_s;   // of a step; 0: the run's time has been printed
} ProgressBar;
typedef struct {
    FILE *file;      // NULL: no log
    EventFile board; // the same for TensorBoard
    bool failed;     // a write failed (disk full): warned once, training continues
    ProgressBar bar;
} Log;

// Full precision. JSON has no infinities: they become null.
static inline void json_add_number(TextBuffer *t, double x) {
    if (isfinite(x)) {
        text_add(t, "%.17g", x);
    } else {
        text_add(t, "null");
    }
}
static inline void json_add_field(TextBuffer *t, const char *name, double x) {
    text_add(t, ",\"%s\":", name);
    json_add_number(t, x);
}
// Returns the bytes of the character at the start of UTF-8 text, 1 to 4. Returns 0 if the bytes are
// no UTF-8 character: a wrong or missing continuation, a longer form than needed, half of a
// surrogate pair, or a code above U+10FFFF (RFC 3629). The text ends with 0.
static inline int utf8_length(const unsigned char *s) {
    static const unsigned first[] = {0, 0, 0x80, 0x800, 0x10000};
    static const struct {
        unsigned char below;
        int length;
    } leads[] = {{0x80, 1}, {0xc2, 0}, {0xe0, 2}, {0xf0, 3}, {0xf5, 4}};
    int lead = 0;
    while (lead < 5 && s[0] >= leads[lead].below) { lead++; }
    const int length = lead < 5 ? leads[lead].length : 0;
    unsigned code = length < 2 ? s[0] : s[0] & (0xffu >> (length + 1));
    for (int i = 1; i < length; i++) {
        if ((s[i] & 0xc0) != 0x80) { return 0; }
        code = code << 6 | (s[i] & 0x3fu);
    }
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    return length > 1 && (code < first[length] || surrogate || code > 0x10ffff) ? 0 : length;
}
// Writes any bytes as a JSON string in UTF-8. A byte that is no part of a character becomes \udc80
// to \udcff, half of a surrogate pair. No valid text contains these, so the bytes can be restored
// (as by Python's os.fsencode).
static inline void json_add_string(TextBuffer *t, const char *text) {
    text_add(t, "\"");
    for (const unsigned char *s = (const unsigned char *)text; *s;) {
        const int length = utf8_length(s);
        if (length == 0) {
            text_add(t, "\\udc%02x", *s);
        } else if (*s == '"' || *s == '\\') {
            text_add(t, "\\%c", *s);
        } else if (*s < 32) {
            text_add(t, "\\u%04x", *s);
        } else {
            text_add(t, "%.*s", length, (const char *)s);
        }
        s += length ? length : 1;
    }
    text_add(t, "\"");
}
static inline void json_add_flags(TextBuffer *t, const Options *o) {
    text_add(t, "{");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        char value[1100];
        option_value_text(o, spec, value, sizeof value);
        text_add(t, "%s\"%s\":", i ? "," : "", spec->name);
        if (spec->kind == OPTION_TEXT || spec->kind == OPTION_PICK || spec->kind == OPTION_SECRET) {
            json_add_string(t, value);
        } else {
            text_add(t, "%s", value);
        }
    }
    text_add(t, "}");
}

// Opens the log. A new run starts a new file. A resumed run appends, on a new line if a kill has
// cut off the last one.
static inline Log log_open(const char *path, bool resumed) {
    Log log = {};
    if (!*path) { return log; }
    log.file = fopen(path, resumed ? "ab+" : "wb");
    if (!log.file) {
        die(EXIT_INPUT, "--log names a file that can be written", "cannot write %s: %s", path,
            strerror(errno));
    }
    if (resumed && !fseek(log.file, -1, SEEK_END) && fgetc(log.file) != '\n') {
        fseek(log.file, 0, SEEK_END);
        fputc('\n', log.file);
    }
    return log;
}
// Notes whether a write failed, and warns of the first one.
static inline void log_check(Log *log, bool bad) {
    if (bad && !log->failed) {
        fprintf(stderr, "warning: cannot write the log: %s; training goes on\n", strerror(errno));
    }
    log->failed |= bad;
}
// Writes one line and frees its text.
static inline void log_line(Log *log, TextBuffer *t) {
    if (log->file) {
        log_check(log, fprintf(log->file, "%s\n", t->text) < 0 || fflush(log->file));
        file_hide_time(fileno(log->file));
    }
    free(t->text);
    memset(t, 0, sizeof *t);
}
// The same, after the brace that ends the line's object.
static inline void log_object(Log *log, TextBuffer *t) {
    text_add(t, "}");
    log_line(log, t);
}

// -------------------------------------------------------------------------------------------------
// Progress during training. A terminal shows one line that is redrawn; otherwise a line is printed
// at most once a second.

// steps: of the run; first: those done before it; step_s: predicted time of a step.
// hides: lines must not tell when steps end.
static inline ProgressBar progress_bar(int64_t steps, int64_t first, double step_s, int64_t every,
                                       bool hides) {
    const ProgressBar bar = {.terminal = !every && terminal_columns() > 0,
                             .steps = steps,
                             .first = first,
                             .every = every,
                             .stride = hides ? max_i64(1, (int64_t)(1 / fmax(step_s, 1e-6))) : 0,
                             .step_s = step_s,
                             .predicted_s = step_s};
    return bar;
}
static inline void log_break(Log *log) { // call it before other output
    if (log->bar.drawn) { printf("\n"); }
    log->bar.drawn = false;
}

// A finished step, as rank 0 may show it.
typedef struct {
    int64_t step;
    bool last; // of this run: its end, or where it is stopped
    double loss, norm, lr, seconds, tokens, mfu, joules; // joules: since the start
    // [samples] windows that the step used; NULL: not to be shown
    const int64_t *windows;
    int64_t samples;
} StepFacts;
// Returns whether the step is printed and logged (--log-every).
static inline bool progress_is_due(const ProgressBar *bar, const StepFacts *f) {
    return !bar->every || f->step % bar->every == 0 || f->step == bar->first + 1 || f->last;
}
// Notes the time of a step: the mean of the first 50, then a moving average. Until the second step
// the predicted time stands in if it holds: the first step also fills caches and opens connections.
static inline void progress_measure(ProgressBar *bar, const StepFacts *f) {
    const int64_t done = f->step - bar->first;
    if (done >= 2 || !prediction_holds(bar->step_s, f->seconds)) {
        bar->step_s += (f->seconds - bar->step_s) / min_i64(max_i64(done - 1, 1), 50);
    }
}
// Prints, once, how long the steps of this run will take: as predicted, if the first step does not
// contradict that. One that takes longer than predicted leaves it to the second.
static inline void progress_print_time(ProgressBar *bar, const StepFacts *f) {
    const double predicted = bar->predicted_s;
    const int64_t steps = bar->steps - bar->first;
    const bool holds = prediction_holds(predicted, f->seconds),
               early = f->seconds > predicted && f->step == bar->first + 1 && !f->last;
    if (!predicted || (!holds && early)) { return; }
    const double step_s = holds ? predicted : f->seconds, seconds = fmax(steps * step_s, 1);
    const Readable end = readable_end(seconds);
    const bool long_run = seconds >= 3600 && *end.at;
    bar->predicted_s = 0;
    print_row("time", "%" PRId64 " step%s of %s, %s: about %s%s%s%s", steps, plural(steps),
              readable_step(step_s).at, holds ? "predicted" : "measured", readable_span(seconds).at,
              long_run ? ", ends around " : "", long_run ? end.at : "",
              holds ? "" : "; not as predicted: the machine seems busy");
}
static inline void progress_draw(ProgressBar *bar, const StepFacts *f, const char *left) {
    char drawn[16], loss[32] = "";
    const int width = sizeof drawn - 1;
    const int filled = bar->steps ? (int)(width * f->step / bar->steps) : width;
    memset(drawn, '.', sizeof drawn);
    memset(drawn, '#', (size_t)filled);
    drawn[width] = 0;
    if (isfinite(f->loss)) { snprintf(loss, sizeof loss, "  loss %.4f", f->loss); }
    printf("\r[%s] %" PRId64 "/%" PRId64 "%s  %.0f tok/s  MFU %s  %s left \033[K", drawn, f->step,
           bar->steps, loss, f->tokens / f->seconds, readable_share(f->mfu, 0).at, left);
    bar->drawn = true;
}
static inline void progress_step(ProgressBar *bar, const StepFacts *f) {
    const double now = seconds_now();
    const Readable left = readable_clock((bar->steps - f->step) * bar->step_s);
    // at most one line a second for short steps; the log has all steps
    const bool due = bar->stride ? f->step % bar->stride == 0 : now - bar->shown >= 1;
    const bool shown = bar->every || f->step == bar->first + 1 || f->last || due;
    if (bar->terminal) {
        progress_draw(bar, f, left.at);
    } else if (shown) {
        char loss[64] = "";
        if (isfinite(f->loss)) {
            snprintf(loss, sizeof loss, " | loss %8.6f norm %.3f", f->loss, f->norm);
        }
        bar->shown = now;
        printf("step %5" PRId64 "/%" PRId64 "%s%s lr %.2e | %8s %6.0f tok/s MFU %4s | %s left\n",
               f->step, bar->steps, loss, *loss ? "" : " |", f->lr, readable_step(f->seconds).at,
               f->tokens / f->seconds, readable_share(f->mfu, 0).at, left.at);
    }
    output_flush_or_warn();
}

// -------------------------------------------------------------------------------------------------
// Events during training, reported by rank 0 on the terminal and in the log

// A value of an event: its key in the log (NULL: not there), its value, and its printf format on
// the terminal (NULL: not there).
typedef struct {
    const char *key;
    double value;
    const char *format;
} EventField;
// Begins an event of the log.
static inline TextBuffer json_event(const char *event, int64_t step) {
    TextBuffer line = {NULL, 0, 0};
    text_add(&line, "{\"event\":\"%s\",\"step\":%" PRId64, event, step);
    return line;
}
// Begins an event of the log with these values, which also go to TensorBoard.
static inline TextBuffer log_values(Log *log, const char *event, int64_t step,
                                    const EventField *fields, int count) {
    TextBuffer line = json_event(event, step);
    ProtoMessage values = {};
    const char *group = strcmp(event, "step") ? event : "train";
    for (int i = 0; i < count; i++) {
        const EventField *f = &fields[i];
        if (!f->key) { continue; }
        json_add_field(&line, f->key, f->value);
        if (isfinite(f->value)) { values_add(&values, group, f->key, f->value); }
    }
    if (log->board.file) { log_check(log, !event_file_add(&log->board, step, &values)); }
    return line;
}
static inline void log_event(Log *log, const char *event, int64_t step, const EventField *fields,
                             int count) {
    TextBuffer line = log_values(log, event, step, fields, count);
    log_object(log, &line);
    log_break(log);
    printf("step %5" PRId64, step);
    for (int i = 0; i < count; i++) {
        if (fields[i].format) { printf(fields[i].format, fields[i].value); }
    }
    printf("\n");
}

static inline void report_step(const StepFacts *f, Log *log) {
    const EventField fields[] = {
        {"loss", f->loss, NULL},
        {"grad_norm", f->norm, NULL},
        {"lr", f->lr, NULL},
        {"ms", f->seconds * 1000, NULL},
        {"tokens_per_s", f->tokens / f->seconds, NULL},
        {"mfu", f->mfu, NULL},
        {"joules", f->joules, NULL},
    };
    progress_print_time(&log->bar, f);
    progress_measure(&log->bar, f);
    if (!progress_is_due(&log->bar, f)) { return; }
    progress_step(&log->bar, f);
    TextBuffer line =
        log_values(log, "step", f->step, fields, (int)(sizeof fields / sizeof *fields));
    for (int64_t i = 0; f->windows && i < f->samples; i++) {
        text_add(&line, "%s%" PRId64, i ? "," : ",\"samples\":[", f->windows[i]);
    }
    if (f->windows) { text_add(&line, f->samples ? "]" : ",\"samples\":[]"); }
    log_object(log, &line);
}
// bits, accuracy, epsilon: NAN if they are not known.
static inline void report_validation(int64_t step, double loss, double bits, double accuracy,
                                     double epsilon, int64_t targets, Log *log) {
    const EventField fields[] = {
        {"loss", loss, " | validation loss %.6f nats/token"},
        {"bits_per_byte", bits, isfinite(bits) ? " | %.4f bits/byte" : NULL},
        {"label_accuracy", accuracy, isfinite(accuracy) ? " | label accuracy %.4f" : NULL},
        {"epsilon", epsilon, isfinite(epsilon) ? " | epsilon %.4f" : NULL},
        {NULL, (double)targets, " | %.0f tokens"},
    };
    log_event(log, "val", step, fields, sizeof fields / sizeof *fields);
}
static inline void report_choices(int64_t step, int64_t right, int64_t examples, Log *log) {
    const EventField fields[] = {
        {"accuracy", right / (double)examples, " | hellaswag accuracy %.4f"},
        {"correct", (double)right, " | %.0f of"},
        {"examples", (double)examples, " %.0f examples"},
    };
    log_event(log, "hellaswag", step, fields, sizeof fields / sizeof *fields);
}
static inline void report_checkpoint(int64_t step, const char *path, Log *log) {
    log_break(log);
    printf("step %5" PRId64 " | checkpoint %s\n", step, path);
    TextBuffer line = json_event("checkpoint", step);
    text_add(&line, ",\"path\":");
    json_add_string(&line, path);
    log_object(log, &line);
}

// Prints a space and a word, quoted for a shell if needed.
static inline void print_shell_word(const char *word) {
    bool plain =
        *word &&
        strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=,:+@%") ==
            strlen(word);
    printf(plain ? " " : " '");
    for (; *word; word++) { printf(*word == '\'' ? "'\\''" : "%c", *word); }
    if (!plain) { printf("'"); }
}

#endif
