// profile.h: --profile-steps, where the time of some steps goes: by kind of action and of unit.
//
// On a GPU it is the time between events in its stream, and everything is launched one by one, with the same results; a profiler that
// captures these steps (nsys) sees the actions as ranges. On the processor it is the clock's. Rank 0 prints a table and logs the event
// "profile" (docs/formats.md).
#ifndef PROFILE_H
#define PROFILE_H

#include "report.h" // the log, the progress bar

enum { PROFILE_EMBEDDING, PROFILE_BLOCK, PROFILE_HEAD, PROFILE_STATES, PROFILE_PLACES };
static const char *const profile_place_names[PROFILE_PLACES] = {"embedding", "block", "head", "states"};
typedef struct {
    int64_t first, last, steps; // to profile, from 1, 0: none; profiled so far
    int actions;                // of a step
    OpsMark **marks;            // [actions + 1]
    double seconds[ACTION_KINDS][PROFILE_PLACES], total_s;
    int64_t count[ACTION_KINDS][PROFILE_PLACES];
} Profile;

static inline Profile profile_make(const Options *o, int actions) {
    Profile p;
    memset(&p, 0, sizeof p);
    options_profile_steps(o, &p.first, &p.last);
    if (!p.first) { return p; }
    p.actions = actions;
    p.marks = (OpsMark **)checked_calloc((size_t)actions + 1, sizeof(OpsMark *), "profile");
    for (int i = 0; i <= actions; i++) { p.marks[i] = ops_mark_make(); }
    return p;
}
static inline void profile_begin(Profile *p, Executor *e, int64_t step) {
    if (step < p->first || step > p->last) { return; }
    ops_wait(e->stream); // for what is left of the step before
    if (!p->steps) { ops_profiler(true); }
    e->marks = p->marks;
}
static inline int profile_place(const Executor *e, const Action *a) {
    return a->unit < 0 ? PROFILE_STATES : a->unit == 0 ? PROFILE_EMBEDDING : a->unit < e->model->units - 1 ? PROFILE_BLOCK : PROFILE_HEAD;
}
// After the first `ran` actions of a step (an update that is skipped does not run).
static inline void profile_end(Profile *p, Executor *e, const Schedule *schedule, int ran) {
    if (!e->marks) { return; }
    ops_mark(e->stream, e->marks[ran]);
    ops_wait(e->stream);
    for (int i = 0; i < ran; i++) {
        const Action *a = &schedule->actions[i];
        p->seconds[a->kind][profile_place(e, a)] += ops_mark_seconds(e->stream, p->marks[i], p->marks[i + 1]);
        p->count[a->kind][profile_place(e, a)]++;
    }
    p->total_s += ops_mark_seconds(e->stream, p->marks[0], p->marks[ran]);
    p->steps++, e->marks = NULL;
}

static inline void profile_tell(const Profile *p, Log *log) {
    double ms = 1000 / (double)p->steps;
    TextBuffer line = {NULL, 0, 0};
    printf("profile of %" PRId64 " steps from step %" PRId64 " on, rank 0: %.3f ms a step\n", p->steps, p->first, p->total_s * ms);
    text_add(&line, "{\"event\":\"profile\",\"first\":%" PRId64 ",\"steps\":%" PRId64, p->first, p->steps);
    json_add_field(&line, "ms", p->total_s * ms);
    const char *separator = ",\"actions\":[";
    for (int i = 0; i < ACTION_KINDS * PROFILE_PLACES; i++) {
        int kind = i / PROFILE_PLACES, place = i % PROFILE_PLACES;
        double seconds = p->seconds[kind][place];
        int64_t count = ceil_div(p->count[kind][place], p->steps);
        if (!count) { continue; }
        printf("  %-15s %-9s %6" PRId64 " x %10.3f ms %5.1f %%\n", action_names[kind], profile_place_names[place], count, seconds * ms,
               100 * seconds / p->total_s);
        text_add(&line, "%s{\"action\":\"%s\",\"unit\":\"%s\",\"count\":%" PRId64, separator, action_names[kind], profile_place_names[place], count);
        json_add_field(&line, "ms", seconds * ms), text_add(&line, "}");
        separator = ",";
    }
    text_add(&line, "]}");
    log_line(log, &line);
}
// Tells, once: after the last of the steps, or at the end of a run that was shorter. Rank 0 speaks.
static inline void profile_report(Profile *p, int rank, ProgressBar *bar, Log *log) {
    if (!p->first) { return; }
    if (p->steps) { ops_profiler(false); }
    if (rank == 0 && !p->steps) {
        fprintf(stderr, "warning: nothing is profiled: the run has no step from %" PRId64 " to %" PRId64 "\n", p->first, p->last);
    } else if (rank == 0) {
        progress_break(bar);
        profile_tell(p, log);
    }
    for (int i = 0; i <= p->actions; i++) { ops_mark_free(p->marks[i]); }
    free(p->marks);
    memset(p, 0, sizeof *p);
}

#endif
