// unit_times.h: the seconds of samples in the model's units. The units themselves are timed if
// that takes little time and memory, since the balance of stages depends on them. One block stands
// for all.
#ifndef UNIT_TIMES_H
#define UNIT_TIMES_H

#include "base/base.h"
#include "comm/group.h"
#include "executor/activations.h"
#include "executor/compute.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "ops/ops.h"
#include "plan/rates.h"
#include "plan/system.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"

// Allocates zeros. The values do not matter, except that arithmetic with NaNs is slow.
static inline void *costs_take(Stream *s, size_t bytes) {
    void *p = ops_alloc(bytes);
    if (!p) {
        die(EXIT_RESOURCES, "use a smaller --micro-batch",
            "cannot allocate %zu bytes to time the model's units", bytes);
    }
    ops_zero(s, p, bytes);
    return p;
}
// Fills tokens with ids of which hardly two are the same, as in text.
static inline void spread_tokens(Stream *s, int32_t *tokens, int64_t n, int64_t vocab) {
    int32_t *ids = new_array(int32_t, n, "tokens");
    for (int64_t i = 0; i < n; i++) { ids[i] = (int32_t)(i * 7919 % vocab); }
    ops_from_host(s, tokens, ids, n * sizeof(int32_t));
    ops_wait(s);
    free(ids);
}
// Runs a unit's forward, input and weight part once. seconds[kind] receives the time of each.
static inline void time_unit(Executor *e, Work *w, double seconds[3]) {
    const ActionKind kinds[] = {ACT_FORWARD, ACT_BACKWARD_INPUT, ACT_BACKWARD_WEIGHT};
    Pass pass = {};
    for (int k = 0; k < 3; k++) {
        double start = seconds_now();
        w->kind = kinds[k];
        if (w->unit || w->kind != ACT_BACKWARD_INPUT) { run_work(e, w, &pass); }
        ops_wait(e->stream);
        seconds[kinds[k]] = seconds_now() - start;
    }
}
static inline int compare_seconds(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
enum { TIMED_ROUNDS = 7 };
// CPU seconds of this process, all threads together.
static inline double seconds_computed(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
// Returns by how much the units take longer in the long run than `once`, the seconds of one round.
// A quota lets a rank run in bursts, which a short measurement takes for its speed: 1 unless the
// CPU was taken away for a good part of the time. A device has no quota.
static inline double time_shared(Executor *e, Work *work, double once) {
    const double least_s = 0.15, mostly = 0.9, start = seconds_now(), computed = seconds_computed();
    double seconds[3], spent = 0, bf16;
    int rounds = 0;
    if (*ops_device(&bf16) || isinf(control_groups_least("cpu", cpu_group_quota))) { return 1; }
    for (; spent < least_s; rounds++) {
        for (int u = 0; u < UNIT_CLASSES; u++) { time_unit(e, &work[u], seconds); }
        spent = seconds_now() - start;
    }
    return seconds_computed() - computed < mostly * spent ? fmax(1, spent / rounds / once) : 1;
}
// Runs the units in turns for a while. median receives that of each one's seconds. Returns the sum
// of these.
static inline double time_rounds(Executor *e, Work *work, double most_s,
                                 double median[UNIT_CLASSES][3]) {
    double seconds[TIMED_ROUNDS][UNIT_CLASSES][3], sorted[TIMED_ROUNDS] = {0};
    int rounds = 0;
    double once = 0;
    for (double start = seconds_now();
         rounds < 2 || (rounds < TIMED_ROUNDS && seconds_now() - start < most_s); rounds++) {
        for (int u = 0; u < UNIT_CLASSES; u++) { time_unit(e, &work[u], seconds[rounds][u]); }
    }
    // the median, because others may use the machine now and then
    for (int i = 0; i < UNIT_CLASSES * 3; i++) {
        for (int r = 0; r < rounds; r++) { sorted[r] = seconds[r][i / 3][i % 3]; }
        qsort(sorted, rounds, sizeof *sorted, compare_seconds);
        median[i / 3][i % 3] = sorted[(rounds - 1) / 2];
        once += sorted[(rounds - 1) / 2];
    }
    return once;
}
// Returns what a pass takes whatever its samples, and what each sample adds, from the seconds of
// passes of two numbers of samples. Those of many are kept exactly; if fewer samples take longer,
// or the same number was timed, all is counted by sample.
static inline UnitTimes unit_times_between(int64_t many, double of_many[UNIT_CLASSES][3],
                                           int64_t few, double of_few[UNIT_CLASSES][3]) {
    UnitTimes times = {.known = true};
    for (int c = 0; c < UNIT_CLASSES; c++) {
        for (int k = 0; k < 3; k++) {
            const double mean = of_many[c][k] / (double)many, more = of_many[c][k] - of_few[c][k];
            const double each = few < many && more > 0 ? more / (double)(many - few) : mean;
            times.row_s[c][k] = fmin(mean, each);
            times.pass_s[c][k] = of_many[c][k] - (double)many * times.row_s[c][k];
        }
    }
    return times;
}
// Times the units with `rows` samples, and with a quarter of them. work: of `rows` samples; it is
// changed.
static inline UnitTimes time_sizes(Executor *e, Work *work, int64_t rows, double most_s) {
    const int64_t fewer = max_i64(1, rows / 4);
    double all[UNIT_CLASSES][3], part[UNIT_CLASSES][3];
    const double longer = time_shared(e, work, time_rounds(e, work, most_s, all));
    memcpy(part, all, sizeof part);
    if (fewer < rows) {
        for (int u = 0; u < UNIT_CLASSES; u++) {
            work[u].rows = fewer;
            work[u].N = fewer * work[u].T;
        }
        time_rounds(e, work, most_s / 2, part);
    }
    for (int i = 0; i < UNIT_CLASSES * 3; i++) {
        all[i / 3][i % 3] *= longer;
        part[i / 3][i % 3] *= longer;
    }
    return unit_times_between(rows, all, fewer, part);
}
// Times the embedding, one block and the head with micro-batches of shape->rows samples, or fewer
// if these take long, and with a quarter of them. Does nothing if even one sample takes very long,
// or if the times are known. times = NULL: runs each unit once without timing, so that the device's
// library sees its products. All ranks call it at the same time.
static inline void time_units(UnitTimes *times, const GptModel *m, const ExecutorShape *shape,
                              double flops_per_s, Stream *s) {
    const double MOST_S = 0.3;
    double seconds[3];
    if (times && times->known) { return; }
    GptConfig config = m->config;
    config.layers = 1;
    GptModel one = gpt_model(config);
    ExecutorShape small = *shape;
    small.units = units_range(0, one.units);
    small.limits = limits_of_one();
    while (small.rows > 1 &&
           gpt_step_flops(&one, small.rows * small.T, small.T) > MOST_S * flops_per_s) {
        small.rows /= 2;
    }
    if (times) { memset(times, 0, sizeof *times); }
    if (gpt_step_flops(&one, small.T, small.T) > 10 * MOST_S * flops_per_s) { return; }
    size_t activations, buffers;
    Executor e = executor_plan(&one, small, &activations, &buffers);
    executor_place(&e, costs_take(s, activations), costs_take(s, buffers));
    Stream mine = *s;
    mine.workspace_bytes = executor_workspace_bytes(&one, &small, s->threads);
    mine.workspace = costs_take(s, mine.workspace_bytes);
    e.stream = &mine;
    spread_tokens(s, e.acts[0].tokens, small.rows * small.T, config.vocab);
    spread_tokens(s, e.acts[0].targets, small.rows * small.T, config.vocab);
    Work work[UNIT_CLASSES];
    void *states[2 * STORAGE_CLASSES] = {NULL};
    for (int c = 0; c < STORAGE_CLASSES; c++) {
        const size_t n = one.class_elements[c];
        states[2 * c] = costs_take(s, n * ops_real_bytes());
        states[2 * c + 1] = costs_take(s, n * sizeof(float));
    }
    for (int u = 0; u < UNIT_CLASSES; u++) {
        work[u] = executor_work(&e, u, 0, small.rows, small.T);
        for (int c = 0; c < STORAGE_CLASSES; c++) {
            work[u].states.params[c] = (const Real *)states[2 * c];
            work[u].states.grads[c] = (float *)states[2 * c + 1];
            work[u].states.accumulate[c] = true;
        }
        time_unit(&e, &work[u], seconds);
    }
    if (times) { *times = time_sizes(&e, work, small.rows, MOST_S); }
    for (int c = 0; c < 2 * STORAGE_CLASSES; c++) { ops_free(states[c]); }
    ops_free(mine.workspace);
    executor_free(&e);
    forget_peak_memory();
}

#endif
