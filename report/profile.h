// profile.h: --profile-steps: how long each kind of action takes, by kind of unit, in a few steps.
//
// On a GPU the time of an action is that between two events in its stream. Block work is then
// launched kernel by kernel, with the same results. A profiler that captures these steps (nsys)
// sees the actions as ranges. On the CPU it is the clock's time. Rank 0 prints a table and logs the
// event "profile" (docs/formats.md).
#ifndef PROFILE_H
#define PROFILE_H

#include "base/base.h"
#include "base/figures.h"
#include "base/files.h"
#include "base/readable.h"
#include "comm/comm.h"
#include "comm/records.h"
#include "executor/activations.h"
#include "model/architecture.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "options.h"
#include "report/log.h"
#include "report/timeline.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "schedule/simulator.h"

enum { PROFILE_STATES = UNIT_CLASSES, PROFILE_PLACES }; // after the unit classes: actions of states
static const char *const profile_place_names[PROFILE_PLACES] = {"embedding", "block", "head",
                                                                "states"};
typedef struct {
    // first, last step to profile, counted from 1 (0: none); steps profiled so far
    int64_t first, last, steps;
    int actions;     // most actions of a step
    OpsMark **marks; // [actions][2]
    bool *marked;    // [actions] whether the action has run in this step
    // [actions] of the last profiled step, relative to the end of its NORM, where all ranks meet
    ActionTime *times;
    double seconds[ACTION_KINDS][PROFILE_PLACES], total_s;
    int64_t count[ACTION_KINDS][PROFILE_PLACES];
} Profile;

static inline Profile profile_make(const Options *o, int actions) {
    Profile p = {};
    options_profile_steps(o, &p.first, &p.last);
    if (!p.first) { return p; }
    p.actions = actions;
    p.times = new_array(ActionTime, actions, "profile");
    p.marks = new_array(OpsMark *, 2 * actions, "profile");
    p.marked = new_array(bool, actions, "profile");
    for (int i = 0; i < 2 * actions; i++) { p.marks[i] = ops_mark_make(); }
    return p;
}
static inline void profile_begin(Profile *p, Executor *e, int64_t step) {
    if (step < p->first || step > p->last) { return; }
    ops_wait(e->stream); // for work of the step before
    if (!p->steps) {
        p->first = step; // a resumed run may begin after the one that was asked for
        ops_profiler(true);
    }
    memset(p->marked, 0, p->actions * sizeof(bool));
    e->marks = p->marks;
    e->marked = p->marked;
}
static inline int profile_place(const Executor *e, const Action *a) {
    return a->unit < 0 ? (int)PROFILE_STATES : (int)gpt_unit_class(e->model, a->unit);
}
// Ends the profile of a step. Actions that did not run are left out: a skipped update, and in
// cyclic windows the actions of other steps.
static inline void profile_end(Profile *p, Executor *e, const Schedule *schedule) {
    double met = 0, last = 0;
    int first = -1; // action that has run
    if (!e->marks) { return; }
    ops_wait(e->stream);
    memset(p->times, 0, p->actions * sizeof(ActionTime));
    for (int i = 0; i < schedule->count; i++) {
        if (!p->marked[i]) { continue; }
        const Action *a = &schedule->actions[i];
        ActionTime *time = &p->times[i];
        if (first < 0) { first = i; }
        OpsMark *origin = p->marks[2 * first];
        time->begin_s = ops_mark_seconds(e->stream, origin, p->marks[2 * i]);
        time->end_s = ops_mark_seconds(e->stream, origin, p->marks[2 * i + 1]);
        if (a->kind == ACT_NORM) { met = time->end_s; }
        p->seconds[a->kind][profile_place(e, a)] += time->end_s - time->begin_s;
        p->count[a->kind][profile_place(e, a)]++;
        last = time->end_s;
    }
    p->total_s += last;
    for (int i = 0; i < schedule->count; i++) {
        if (!p->marked[i]) { continue; }
        p->times[i].begin_s -= met;
        p->times[i].end_s -= met;
    }
    p->steps++;
    e->marks = NULL;
}

static inline void profile_print(const Profile *p, Log *log) {
    double ms = 1000 / (double)p->steps, waited = p->total_s;
    TextBuffer line = {NULL, 0, 0};
    printf("profile of %" PRId64 " steps from step %" PRId64 " on, rank 0: %s a step\n", p->steps,
           p->first, readable_step(p->total_s / p->steps).at);
    text_add(&line, "{\"event\":\"profile\",\"first\":%" PRId64 ",\"steps\":%" PRId64, p->first,
             p->steps);
    json_add_field(&line, "ms", p->total_s * ms);
    const char *separator = ",\"actions\":[";
    for (int i = 0; i < ACTION_KINDS * PROFILE_PLACES; i++) {
        int kind = i / PROFILE_PLACES, place = i % PROFILE_PLACES;
        double seconds = p->seconds[kind][place];
        int64_t count = ceil_div(p->count[kind][place], p->steps);
        if (!count) { continue; }
        waited -= seconds;
        const char *name = action_name((ActionKind)kind);
        const Figure rows[] = {{"count= %6.0f x", (double)count},
                               {"ms= %13T", seconds * ms},
                               {"= %7Q\n", seconds / p->total_s}};
        printf("  %-15s %-9s", name, profile_place_names[place]);
        print_figures(stdout, rows, LENGTH_OF(rows));
        text_add(&line, "%s{\"action\":\"%s\",\"unit\":\"%s\"", separator, name,
                 profile_place_names[place]);
        json_add_figures(&line, rows, LENGTH_OF(rows));
        text_add(&line, "}");
        separator = ",";
    }
    printf("  %-27s          %13s %5.1f %%\n", "waiting for other stages",
           readable_step(waited / p->steps).at, 100 * waited / p->total_s);
    text_add(&line, "]");
    json_add_field(&line, "waiting_ms", waited * ms);
    log_object(log, &line);
}
// Collects the times of all ranks in the last profiled step. Rank 0 draws them if the pipeline has
// several stages, and writes a trace file if `trace` names one. Returns false, with a warning, if
// that could not be written. All ranks call it.
static inline bool profile_draw(const Profile *p, Comm *comm, const Program *program,
                                const char *trace) {
    int64_t *part = new_array(int64_t, comm->ranks + 1, "profile");
    for (int r = 0; r < comm->ranks; r++) { part[r + 1] = part[r] + 2 * program->rank[r].count; }
    double *all = new_array(double, part[comm->ranks], "profile");
    memcpy(all + part[comm->rank], p->times, program->rank[comm->rank].count * sizeof(ActionTime));
    comm_all_gather_doubles(comm, all, part);
    ActionTime **times = schedule_times(program);
    for (int r = 0; r < comm->ranks; r++) {
        memcpy(times[r], all + part[r], program->rank[r].count * sizeof(ActionTime));
    }
    const int error = comm->rank == 0 ? schedule_show_times(program, times, "measured", trace) : 0;
    if (error) {
        fprintf(stderr, "warning: cannot write --trace %s: %s\n", trace, strerror(error));
    }
    schedule_times_free(program, times);
    free_all(all, part);
    return !error;
}
// Reports once: after the last profiled step, or at the end of a shorter run. Rank 0 prints.
// Returns false, with a warning, if the trace could not be written. All ranks call it.
static inline bool profile_report(Profile *p, Comm *comm, const Program *program, const char *trace,
                                  Log *log) {
    const int rank = comm->rank;
    if (!p->first) { return true; }
    if (p->steps) { ops_profiler(false); }
    if (rank == 0 && !p->steps) {
        fprintf(stderr,
                "warning: nothing is profiled: the run has no step from %" PRId64 " to %" PRId64
                "\n",
                p->first, p->last);
    } else if (rank == 0) {
        log_break(log);
        profile_print(p, log);
    }
    const bool written = !p->steps || profile_draw(p, comm, program, trace);
    for (int i = 0; i < 2 * p->actions; i++) { ops_mark_free(p->marks[i]); }
    free_all(p->marks, p->marked, p->times);
    memset(p, 0, sizeof *p);
    return written;
}

#endif
