// log.h: what rank 0 reports while the run goes on: JSON lines for programs (--log; docs/formats.md
// has the names), and lines or a progress bar for people. Values that are not finite were not
// measured or must not be shown.
#ifndef LOG_H
#define LOG_H

#include "base/base.h"
#include "base/figures.h"
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

// Opens the log. A new run starts a new file. A resumed run, and --prompt behind the command of
// one, append, on a new line if a kill has cut off the last one.
static inline Log log_open(const char *path, bool appends) {
    Log log = {};
    if (!*path) { return log; }
    log.file = fopen(path, appends ? "ab+" : "wb");
    if (!log.file) {
        die(EXIT_INPUT, "--log names a file that can be written", "cannot write %s: %s", path,
            strerror(errno));
    }
    if (appends && !fseek(log.file, -1, SEEK_END) && fgetc(log.file) != '\n') {
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
    double loss, norm, lr, seconds, tokens, mfu, tflops, joules; // joules: since the start
    // of experts, if the model has any: the largest load in mean loads, and the loads' entropy
    double load_most, load_entropy;
    int64_t pieces;
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
static inline void progress_draw(ProgressBar *bar, int64_t step) {
    char drawn[16];
    const int width = sizeof drawn - 1;
    const int filled = bar->steps ? (int)(width * step / bar->steps) : width;
    memset(drawn, '.', sizeof drawn);
    memset(drawn, '#', (size_t)filled);
    printf("\r[%.*s] %" PRId64 "/%" PRId64, width, drawn, step, bar->steps);
    bar->drawn = true;
}
// rows: of the step, with texts for a line, or on a terminal for the bar
static inline void progress_step(ProgressBar *bar, const StepFacts *f, const Figure *rows,
                                 int count) {
    const double now = seconds_now();
    const Readable left = readable_clock((bar->steps - f->step) * bar->step_s);
    // at most one line a second for short steps; the log has all steps
    const bool due = bar->stride ? f->step % bar->stride == 0 : now - bar->shown >= 1;
    const bool shown = bar->every || f->step == bar->first + 1 || f->last || due;
    if (bar->terminal) {
        progress_draw(bar, f->step);
    } else if (shown) {
        bar->shown = now;
        printf("step %5" PRId64 "/%" PRId64, f->step, bar->steps);
    }
    if (bar->terminal || shown) {
        print_figures(stdout, rows, count);
        printf(bar->terminal ? "  %s left \033[K" : " | %s left\n", left.at);
    }
    output_flush_or_warn();
}

// -------------------------------------------------------------------------------------------------
// Events during training, reported by rank 0 on the terminal and in the log

// Begins an event of the log.
static inline TextBuffer json_event(const char *event, int64_t step) {
    TextBuffer line = {NULL, 0, 0};
    text_add(&line, "{\"event\":\"%s\",\"step\":%" PRId64, event, step);
    return line;
}
// Begins an event of the log with these values, which also go to TensorBoard.
static inline TextBuffer log_values(Log *log, const char *event, int64_t step, const Figure *rows,
                                    int count) {
    TextBuffer line = json_event(event, step);
    ProtoMessage values = {};
    const char *group = strcmp(event, "step") ? event : "train";
    for (int i = 0; i < count; i++) {
        const Text key = figure_key(&rows[i]);
        if (!*key.at) { continue; }
        json_add_field(&line, key.at, rows[i].value);
        if (isfinite(rows[i].value)) { values_add(&values, group, key.at, rows[i].value); }
    }
    if (log->board.file) { log_check(log, !event_file_add(&log->board, step, &values)); }
    return line;
}
static inline void log_event(Log *log, const char *event, int64_t step, const Figure *rows,
                             int count) {
    TextBuffer line = log_values(log, event, step, rows, count);
    log_object(log, &line);
    log_break(log);
    printf("step %5" PRId64, step);
    print_figures(stdout, rows, count);
    printf("\n");
}

static inline void report_step(const StepFacts *f, Log *log) {
    const bool shown = isfinite(f->loss), bar = log->bar.terminal;
    const Figure rows[] = {
        {bar     ? "loss?  loss %.4f"
         : shown ? "loss= | loss %8.6f"
                 : "loss= |",
         f->loss},
        {bar || !shown ? "grad_norm" : "grad_norm= norm %.3f", f->norm},
        {bar ? "lr" : "lr= lr %.2e", f->lr},
        {bar ? "ms" : "ms= | %8T", f->seconds * 1000},
        {bar ? "tokens_per_s=  %.0f tok/s" : "tokens_per_s= %6.0f tok/s", f->tokens / f->seconds},
        {bar ? "mfu=  MFU %P" : "mfu= MFU %4P", f->mfu},
        // where the peak is not known, or was measured too low
        {isfinite(f->mfu) ? "tflops"
         : bar            ? "tflops?  %.3g TFLOP/s"
                          : "tflops? %.3g TFLOP/s",
         f->tflops},
        {"joules", f->joules},
        {"expert_load_max", f->load_most},
        {"expert_load_entropy", f->load_entropy},
        {"expert_tokens_dropped", 0},
        {"expert_pieces", (double)f->pieces},
    };
    const int count = LENGTH_OF(rows) - (f->pieces ? 0 : isfinite(f->load_most) ? 1 : 4);
    progress_print_time(&log->bar, f);
    progress_measure(&log->bar, f);
    if (!progress_is_due(&log->bar, f)) { return; }
    progress_step(&log->bar, f, rows, count);
    TextBuffer line = log_values(log, "step", f->step, rows, count);
    for (int64_t i = 0; f->windows && i < f->samples; i++) {
        text_add(&line, "%s%" PRId64, i ? "," : ",\"samples\":[", f->windows[i]);
    }
    if (f->windows) { text_add(&line, f->samples ? "]" : ",\"samples\":[]"); }
    log_object(log, &line);
}
// bits, accuracy, epsilon: NAN if they are not known.
static inline void report_validation(int64_t step, double loss, double bits, double accuracy,
                                     double epsilon, int64_t targets, Log *log) {
    const Figure rows[] = {
        {"loss= | validation loss %.6f nats/token", loss},
        {"bits_per_byte? | %.4f bits/byte", bits},
        {"label_accuracy? | label accuracy %.4f", accuracy},
        {"epsilon? | epsilon %.4f", epsilon},
        {"= | %.0f tokens", (double)targets},
    };
    log_event(log, "val", step, rows, LENGTH_OF(rows));
}
static inline void report_choices(int64_t step, int64_t right, int64_t examples, Log *log) {
    const Figure rows[] = {
        {"accuracy= | hellaswag accuracy %.4f", right / (double)examples},
        {"correct= | %.0f of", (double)right},
        {"examples= %.0f examples", (double)examples},
    };
    log_event(log, "hellaswag", step, rows, LENGTH_OF(rows));
}
static inline void report_checkpoint(int64_t step, const char *path, Log *log) {
    log_break(log);
    printf("step %5" PRId64 " | checkpoint %s\n", step, path);
    TextBuffer line = json_event("checkpoint", step);
    text_add(&line, ",\"path\":");
    json_add_string(&line, path);
    log_object(log, &line);
}
// A text of the model. logged: it may be kept.
static inline void report_sample(int64_t step, const char *text, bool logged, Log *log) {
    log_break(log);
    printf("--- sample at step %" PRId64 " ---\n%s\n---\n", step, text);
    if (!logged) { return; }
    TextBuffer line = json_event("sample", step);
    text_add(&line, ",\"text\":");
    json_add_string(&line, text);
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
