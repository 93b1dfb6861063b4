// forecast.h: what a predicted step means for a run: tokens a second, MFU, days, and whether it
// fits the memory of a rank.
#ifndef FORECAST_H
#define FORECAST_H

#include "base/figures.h"
#include "base/files.h"
#include "base/readable.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "plan/cluster.h"

// The work of a step.
typedef struct {
    double tokens, flops; // of all ranks; flops 0: the model's arithmetic is not known
    double peak;          // flops per second that a rank can do
    int ranks;
} StepWork;
// Returns the work of a step of a model. peak: of a rank.
static inline StepWork step_work(const GptModel *m, int64_t samples, int64_t T, double peak,
                                 int ranks) {
    const double tokens = (double)(samples * T);
    const StepWork work = {.tokens = tokens,
                           .flops = gpt_step_flops(m, tokens, (double)T),
                           .peak = peak,
                           .ranks = ranks};
    return work;
}
typedef struct {
    double tokens_per_s;
    double tflops, mfu;    // of a rank; NAN: the model's arithmetic is not known
    double needed, memory; // bytes of the rank that needs most; of a device (INFINITY: not known)
} Forecast;

// Returns the rate of a rank in a step that takes step_s: the flops that the model needs, those of
// recomputation not counted, in 1e12 a second.
static inline double tflops_of(const StepWork *w, double step_s) {
    return w->flops > 0 && step_s > 0 ? w->flops / step_s / w->ranks * 1e-12 : (double)NAN;
}
// Returns the share of the peak at which a step of so many flops runs. NAN: not known; also where
// the step is faster than the peak, which then was measured too low.
static inline double mfu_of(double flops, double step_s, double peak) {
    const double share = flops / step_s / peak;
    return flops > 0 && peak > 0 && share <= 1 ? share : (double)NAN;
}
static inline Forecast forecast_make(StepWork work, double step_s, double needed, double memory) {
    const Forecast f = {.tokens_per_s = work.tokens / step_s,
                        .tflops = tflops_of(&work, step_s),
                        .mfu = mfu_of(work.flops, step_s, work.peak * work.ranks),
                        .needed = needed,
                        .memory = memory};
    return f;
}
static inline bool forecast_fits(const Forecast *f) { return f->needed <= f->memory; }

// A step of ranks that exchange rows of experts.
typedef struct {
    double most; // rows for which memory is planned (--moe-buffer), as a multiple of the mean
    // seconds of a step in which a rank waits for rows: if loads are even; if in each block the
    // busiest rank of each group has `most`
    double wait_s[2];
    double most_s; // seconds of the step, then
} UnevenStep;
static inline void print_uneven(FILE *to, const UnevenStep *s) {
    print_row_to(to, "experts",
                 "a rank waits %s of a step for rows, if loads are even; %s of %s, if in each "
                 "block some rank has %.4g times the mean load",
                 readable_step(s->wait_s[0]).at, readable_step(s->wait_s[1]).at,
                 readable_step(s->most_s).at, s->most);
}
// Adds the members of a JSON object.
static inline void json_add_uneven(TextBuffer *t, const UnevenStep *s) {
    json_add_field(t, "all_to_all_ms", 1e3 * s->wait_s[0]);
    json_add_field(t, "uneven", s->most);
    json_add_field(t, "uneven_all_to_all_ms", 1e3 * s->wait_s[1]);
    json_add_field(t, "uneven_step_ms", 1e3 * s->most_s);
}

// Prints what gpu= stands for: figures of the maker, and the share of each that is reached.
static inline void print_gpu(FILE *to, const Cluster *c) {
    const ClusterGpu *gpu = cluster_gpu(c);
    if (!gpu) { return; }
    const Cluster *f = &gpu->figures;
    fprintf(
        to,
        "rates      gpu=%s: %g TFLOP/s x %g x N / (N + %g) for N tokens (%s), attention x %g\n"
        "           memory of %g GiB, %g GB/s x %g; PCIe %g GB/s, host %g, x %g (assumed)\n"
        "           a rank sends %g GB/s inside its node, %g between nodes, x %g, after %g us\n",
        gpu->name, f->tflops, gpu->products, f->half, gpu->source,
        gpu->attention > 0 ? gpu->attention : gpu->products, f->capacity, f->memory, CLUSTER_COPIES,
        f->link, f->host, CLUSTER_COPIES, f->intra, f->inter, CLUSTER_MESSAGES, f->latency);
}
enum { FORECAST_FIGURES = 3 };
static inline void forecast_figures(const Forecast *f, Figure rows[FORECAST_FIGURES]) {
    rows[0] = figure("tokens_per_s=speed      %C tokens/s", f->tokens_per_s);
    rows[1] = figure("tflops?, %.4g TFLOP/s a rank", f->tflops);
    rows[2] = figure("mfu?, MFU %Q", f->mfu);
}
// Prints speed and memory. tokens: of the run; 0: not known. remedy: flags with which it would fit;
// "": none are known.
static inline void print_forecast(FILE *to, const Forecast *f, double tokens, const char *remedy) {
    const double run = tokens > 0 ? tokens : 1e9;
    Figure rows[FORECAST_FIGURES];
    forecast_figures(f, rows);
    print_figures(to, rows, FORECAST_FIGURES);
    fprintf(to, "; %s tokens take %s\n", readable_count(run).at,
            readable_duration(run / f->tokens_per_s).at);
    if (isinf(f->memory)) {
        fprintf(to,
                "memory     %s a rank; capacity= of --cluster, or --device-memory, says what it "
                "must fit\n",
                readable_bytes(f->needed).at);
    } else if (forecast_fits(f)) {
        fprintf(to, "memory     fits %s, %s to spare\n", readable_bytes(f->memory).at,
                readable_bytes(f->memory - f->needed).at);
    } else {
        fprintf(to, "memory     does not fit %s, by %s%s%s%s\n", readable_bytes(f->memory).at,
                readable_bytes(f->needed - f->memory).at, *remedy ? "; " : "", remedy,
                *remedy ? " would fit" : "");
    }
}
// Adds the members of a JSON object.
static inline void json_add_forecast(TextBuffer *t, const Forecast *f) {
    Figure rows[FORECAST_FIGURES];
    forecast_figures(f, rows);
    json_add_figures(t, rows, FORECAST_FIGURES);
    text_add(t, ",\"fits\":%s", forecast_fits(f) ? "true" : "false");
}

#endif
