// timeline.h: draws a schedule with its times, predicted (schedule_simulate_times) or measured: as
// rows of text for a terminal, and as a trace for chrome://tracing or Perfetto.
//
// Times      [rank][action], in seconds on one clock. An action that was not timed has begin = end.
// Cells      Neighbouring compute actions of a rank for one micro-batch are one cell: F forward, B
//            backward (with the weight parts that follow at once), W weight parts that run apart
//            from it, U an update. A cell is drawn as its letter, the micro-batch's number where
//            that fits, and '-' up to its end; '.' is idle. So "F3--B0------.." reads: forward of
//            micro-batch 3, backward of 0, a bubble.
#ifndef TIMELINE_H
#define TIMELINE_H

#include "base/base.h"
#include "base/readable.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "schedule/simulator.h"

typedef struct {
    char letter;
    int micro;
    double begin_s, end_s;
} TimelineCell;

// Finds the next cell of a rank from action *i on, and moves *i behind it. Returns false if there
// is none.
static inline bool timeline_cell(const Schedule *s, const ActionTime *times, int *i,
                                 TimelineCell *cell) {
    memset(cell, 0, sizeof *cell);
    for (; *i < s->count; ++*i) {
        const Action *a = &s->actions[*i];
        char letter = action_table[a->kind].letter;
        if (!letter || times[*i].end_s <= times[*i].begin_s) { continue; }
        bool joins = cell->micro == a->micro &&
                     (letter == cell->letter || (cell->letter == 'B' && letter == 'W'));
        if (cell->letter && !joins) { return true; }
        if (!cell->letter) {
            cell->letter = letter;
            cell->micro = a->micro;
            cell->begin_s = times[*i].begin_s;
        }
        cell->end_s = times[*i].end_s;
    }
    return cell->letter != 0;
}
// Sets *begin to when the first cell of all ranks begins, *end to when the last one ends; 0 if no
// action was timed.
static inline void timeline_span(const Program *p, ActionTime *const *times, double *begin,
                                 double *end) {
    TimelineCell cell;
    bool any = false;
    *begin = *end = 0;
    for (int r = 0; r < p->ranks; r++) {
        for (int i = 0; timeline_cell(&p->rank[r], times[r], &i, &cell); any = true) {
            *begin = any ? fmin(*begin, cell.begin_s) : cell.begin_s;
            *end = any ? fmax(*end, cell.end_s) : cell.end_s;
        }
    }
}
static inline void timeline_draw(char *row, int columns, const TimelineCell *cell, double begin,
                                 double span) {
    int from = (int)((cell->begin_s - begin) / span * columns + 0.5),
        to = (int)((cell->end_s - begin) / span * columns + 0.5);
    char label[16];
    int length = snprintf(label, sizeof label, "%c%d", cell->letter, cell->micro);
    // part of a number would be another number
    if (cell->micro < 0 || length > to - from) { length = 1; }
    for (int c = from; c < to; c++) { row[c] = c - from < length ? label[c - from] : '-'; }
}
// Prints one row for each rank, `columns` wide, with the share of time in which the rank is busy.
static inline void schedule_timeline(FILE *to, const Program *p, ActionTime *const *times,
                                     int columns) {
    double begin, end;
    timeline_span(p, times, &begin, &end);
    char *row = new_array(char, columns + 1, "timeline");
    fprintf(to, "F forward, B backward, W weight gradients, U update, . idle; %s, %s a column\n",
            readable_step(end - begin).at, readable_step((end - begin) / columns).at);
    for (int r = 0; r < p->ranks; r++) {
        double busy = 0;
        TimelineCell cell;
        memset(row, '.', columns);
        row[columns] = 0;
        for (int i = 0; timeline_cell(&p->rank[r], times[r], &i, &cell);) {
            timeline_draw(row, columns, &cell, begin, end - begin);
            busy += cell.end_s - cell.begin_s;
        }
        fprintf(to, "rank %-3d |%s| %3.0f %% busy\n", r, row,
                end > begin ? 100 * busy / (end - begin) : 0.0);
    }
    free(row);
}

static inline void trace_action(FILE *to, int rank, const Action *a, ActionTime time) {
    bool computes = action_computes(a->kind) || a->kind == ACT_UPDATE || a->kind == ACT_NORM;
    fprintf(to, ",\n{\"name\":\"%s", action_name(a->kind));
    if (a->unit >= 0) { fprintf(to, " %d.%" PRId64, a->unit, a->micro); }
    fprintf(
        to,
        "\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"args\":{",
        computes ? "compute" : "messages", rank, !computes, 1e6 * time.begin_s,
        1e6 * (time.end_s - time.begin_s));
    fprintf(to,
            "\"unit\":%d,\"storage\":%d,\"micro_batch\":%" PRId64 ",\"first_row\":%" PRId64
            ",\"rows\":%" PRId64 ",\"peer\":%d}}",
            a->unit, a->storage, a->micro, a->first_row, a->rows, a->peer);
}
// Writes every action that takes time as JSON in Chrome's trace format. A process of the trace is a
// rank; its threads are compute (0) and messages (1).
static inline void schedule_trace(FILE *to, const Program *p, ActionTime *const *times) {
    fprintf(to, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    for (int r = 0; r < p->ranks; r++) {
        fprintf(to,
                "%s\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank "
                "%d\"}}",
                r ? "," : "", r, r);
        for (int t = 0; t < 2; t++) {
            fprintf(to,
                    ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{"
                    "\"name\":\"%s\"}}",
                    r, t, t ? "messages" : "compute");
        }
        for (int i = 0; i < p->rank[r].count; i++) {
            if (times[r][i].end_s > times[r][i].begin_s) {
                trace_action(to, r, &p->rank[r].actions[i], times[r][i]);
            }
        }
    }
    fprintf(to, "\n]}\n");
}

// Draws a program of several stages on the terminal, and writes the trace to the file `trace` ("":
// no file). Returns 0, or the errno of a file that could not be written.
static inline int schedule_show_times(const Program *p, ActionTime *const *times, const char *what,
                                      const char *trace) {
    bool stages = false;
    for (int i = 0; i < p->rank[0].count; i++) {
        stages = stages || action_is_message(p->rank[0].actions[i].kind);
    }
    if (stages) {
        printf("timeline   %s: ", what);
        schedule_timeline(stdout, p, times, 100);
    }
    if (!*trace) { return 0; }
    FILE *f = fopen(trace, "w");
    if (!f) { return errno; }
    schedule_trace(f, p, times);
    const bool bad = ferror(f);
    return fclose(f) ? errno : bad ? EIO : 0;
}

#endif
