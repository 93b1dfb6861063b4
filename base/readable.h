// readable.h: numbers and rows for people: plurals, bytes, times, and rows that fit a terminal.
#ifndef READABLE_H
#define READABLE_H

#include "base/base.h"

#include <fcntl.h>     // open
#include <sys/ioctl.h> // the width of a terminal

enum { ROW_COLUMNS = 80, ROW_COLUMNS_LEAST = 40, ROW_LABEL = 11, READABLE_MAX = 48 };

// A short text, returned as a value.
typedef struct {
    char at[READABLE_MAX];
} Readable;

// Returns what must precede mpirun where this user types it: Open MPI refuses root, as in a
// container, without these settings.
static inline const char *root_needs(void) {
    const bool set = getenv("OMPI_ALLOW_RUN_AS_ROOT") && getenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM");
    return geteuid() || set ? "" : "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ";
}
// Returns the end of a noun that is counted: "1 node", "2 nodes".
static inline const char *plural(int64_t n) { return n == 1 ? "" : "s"; }

static inline double mebibytes(double bytes) { return bytes / 0x1p20; }
static inline double gibibytes(double bytes) { return bytes / 0x1p30; }
static inline Readable readable_bytes(double bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    Readable text;
    int unit = 0;
    for (; bytes >= 1024 && unit < 5; unit++) { bytes /= 1024; }
    snprintf(text.at, sizeof text.at, "%.*f %s", unit > 0, bytes, units[unit]);
    return text;
}
// Returns bytes for a column of a table: in MiB, from 16 GiB on in GiB.
static inline Readable readable_column(double bytes) {
    const bool large = bytes >= 0x1p34;
    Readable text;
    snprintf(text.at, sizeof text.at, "%.3f %s", large ? gibibytes(bytes) : mebibytes(bytes),
             large ? "GiB" : "MiB");
    return text;
}
// Returns a number with a unit that suits it: "351 K", "13.1 B".
static inline Readable readable_count(double n) {
    static const char units[] = " KMBT";
    Readable text;
    int unit = 0;
    for (; n >= 1000 && units[unit + 1]; unit++) { n /= 1000; }
    snprintf(text.at, sizeof text.at, unit ? "%.3g %c" : "%.3g", n, units[unit]);
    return text;
}
// Returns the time that a forecast gives, in one unit: "14.4 hours".
static inline Readable readable_duration(double seconds) {
    static const struct {
        double seconds;
        const char *name;
    } units[] = {{86400, "days"}, {3600, "hours"}, {60, "minutes"}, {0, "s"}};
    Readable text;
    int unit = 0;
    while (seconds < 2 * units[unit].seconds) { unit++; }
    const double of = units[unit].seconds > 0 ? units[unit].seconds : 1;
    snprintf(text.at, sizeof text.at, "%.3g %s", seconds / of, units[unit].name);
    return text;
}
// Returns the time of a step or of a part of it, in one unit: "11.84 ms", "3.52 s", "12.0 min".
static inline Readable readable_step(double seconds) {
    static const struct {
        double seconds, most; // of the unit; in the unit, where the next one begins
        const char *name;
    } units[] = {{0.001, 999.95, "ms"},
                 {1, 119.95, "s"},
                 {60, 119.95, "min"},
                 {3600, 47.95, "h"},
                 {86400, INFINITY, "d"}};
    Readable text;
    int unit = 0;
    while (seconds / units[unit].seconds >= units[unit].most) { unit++; }
    const double n = seconds / units[unit].seconds;
    const int digits = unit > 1 || n >= 99.995 ? 1 : n >= 0.9995 ? 2 : 3;
    snprintf(text.at, sizeof text.at, "%.*f %s", digits, n, units[unit].name);
    return text;
}
// Returns a rate in TFLOP/s; "" if it is not known.
static inline Readable readable_tflops(double rate) {
    Readable text = {""};
    if (isfinite(rate)) { snprintf(text.at, sizeof text.at, "%.3g", rate); }
    return text;
}
// Returns a share as a percentage: "51 %"; "- %" if it is not known.
static inline Readable readable_share(double share, int digits) {
    Readable text = {"- %"};
    if (isfinite(share)) { snprintf(text.at, sizeof text.at, "%.*f %%", digits, 100 * share); }
    return text;
}
// Returns whether a measurement agrees with a prediction, to a factor of two.
static inline bool prediction_holds(double predicted, double measured) {
    return predicted <= 2 * measured && measured <= 2 * predicted;
}
// Returns the time that a run will take: "52 s", "12 min 5 s", "3 h 20 min", "4 days 7 h". Times
// of more than some thousand years are all the same.
static inline Readable readable_span(double seconds) {
    static const struct {
        int64_t seconds;
        const char *name;
    } units[] = {{86400, "day"}, {3600, "h"}, {60, "min"}, {1, "s"}};
    Readable text;
    const int64_t whole = (int64_t)fmin(fmax(seconds, 0) + 0.5, 1e12);
    int i = 0;
    while (i < 3 && whole < units[i].seconds) { i++; }
    const int64_t n = whole / units[i].seconds, rest = whole % units[i].seconds;
    int used =
        snprintf(text.at, sizeof text.at, "%" PRId64 " %s%s", n, units[i].name, i ? "" : plural(n));
    const int64_t smaller = i < 3 ? rest / units[i + 1].seconds : 0;
    if (smaller) {
        snprintf(text.at + used, sizeof text.at - (size_t)used, " %" PRId64 " %s", smaller,
                 units[i + 1].name);
    }
    return text;
}
// Returns the time that is left as a clock shows it: "1:52", "3:20:15".
static inline Readable readable_clock(double seconds) {
    Readable text;
    const int64_t s = (int64_t)fmin(fmax(seconds, 0) + 0.5, 1e12);
    if (s < 3600) {
        snprintf(text.at, sizeof text.at, "%d:%02d", (int)(s / 60), (int)(s % 60));
    } else {
        snprintf(text.at, sizeof text.at, "%" PRId64 ":%02d:%02d", s / 3600, (int)(s / 60 % 60),
                 (int)(s % 60));
    }
    return text;
}
// Returns when `seconds` from now will be: "17:40", or "Tue 24 Nov 17:40" if that is another day;
// "" if the calendar does not reach so far.
static inline Readable readable_end(double seconds) {
    Readable text = {""};
    const time_t now = time(NULL), then = now + (time_t)fmin(seconds, 1e11);
    struct tm today, day;
    if (!localtime_r(&now, &today) || !localtime_r(&then, &day)) { return text; }
    const bool same = today.tm_yday == day.tm_yday && today.tm_year == day.tm_year;
    const bool soon = day.tm_year - today.tm_year < 2;
    strftime(text.at, sizeof text.at, same ? "%H:%M" : soon ? "%a %d %b %H:%M" : "%d %b %Y", &day);
    return text;
}

// Returns the columns of the terminal that output goes to; 0 if it goes elsewhere. mpirun gives its
// ranks a terminal even when its own output goes to a file, so mpirun's output is checked too.
static inline int terminal_columns(void) {
    char link[64], target[64];
    struct winsize size = {};
    snprintf(link, sizeof link, "/proc/%d/fd/1", getppid());
    const ssize_t n = readlink(link, target, sizeof target - 1);
    if (!isatty(STDOUT_FILENO) || n <= 0) { return 0; }
    target[n] = 0;
    if (strncmp(target, "/dev/pts/", 9) && strncmp(target, "/dev/tty", 8)) { return 0; }
    const int fd = open(target, O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0 && ioctl(fd, TIOCGWINSZ, &size)) { size.ws_col = 0; }
    if (fd >= 0) { close(fd); }
    return size.ws_col >= ROW_COLUMNS_LEAST ? size.ws_col : (int)ROW_COLUMNS;
}
// Prints words from column `at` on, where a space precedes them unless it is `indent`, and breaks
// lines before `columns`; the next ones begin at `indent`.
static inline void print_words(FILE *to, const char *text, int at, int indent, int columns) {
    for (const char *word = text + strspn(text, " "); *word; word += strspn(word, " ")) {
        const int n = (int)strcspn(word, " ");
        const bool breaks = at > indent && at + 1 + n > columns;
        if (breaks) { fprintf(to, "\n%*s", indent, ""); }
        at = breaks ? indent : at;
        at += fprintf(to, "%s%.*s", at > indent ? " " : "", n, word);
        word += n;
    }
    fputs("\n", to);
}
// Prints "label      text", broken at spaces so that its lines fit the terminal, or ROW_COLUMNS.
// Lines after the first begin below the text.
__attribute__((format(printf, 3, 4))) static inline void print_row_to(FILE *to, const char *label,
                                                                      const char *format, ...) {
    char text[4096];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    const int columns = to == stdout ? terminal_columns() : 0;
    print_words(to, text, fprintf(to, "%-*s", ROW_LABEL, label), ROW_LABEL,
                columns ? columns : ROW_COLUMNS);
}
#define print_row(...) print_row_to(stdout, __VA_ARGS__)

#endif
