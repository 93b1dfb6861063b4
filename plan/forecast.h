// forecast.h: what a predicted step means for a run: tokens a second, MFU, days, and whether it
// fits the memory of a rank.
#ifndef FORECAST_H
#define FORECAST_H

#include "base/readable.h"
#include "plan/cluster.h"

typedef struct {
    double tokens_per_s;
    double mfu;            // NAN: the model's arithmetic is not known
    double needed, memory; // bytes of the rank that needs most; of a device (INFINITY: not known)
} Forecast;

// Returns the share of the peak at which a step of so many flops runs. NAN: not known; also where
// the step is faster than the peak, which then was measured too low.
static inline double mfu_of(double flops, double step_s, double peak) {
    const double share = flops / step_s / peak;
    return flops > 0 && peak > 0 && share <= 1 ? share : (double)NAN;
}
// tokens, flops: of a step that takes step_s seconds. peak: flops per second of all ranks.
static inline Forecast forecast_make(double tokens, double flops, double step_s, double peak,
                                     double needed, double memory) {
    const Forecast f = {.tokens_per_s = tokens / step_s,
                        .mfu = mfu_of(flops, step_s, peak),
                        .needed = needed,
                        .memory = memory};
    return f;
}
static inline bool forecast_fits(const Forecast *f) { return f->needed <= f->memory; }

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
// Prints speed and memory. tokens: of the run; 0: not known. remedy: flags with which it would fit;
// "": none are known.
static inline void print_forecast(FILE *to, const Forecast *f, double tokens, const char *remedy) {
    const double run = tokens > 0 ? tokens : 1e9;
    fprintf(to, "speed      %s tokens/s", readable_count(f->tokens_per_s).at);
    if (!isnan(f->mfu)) { fprintf(to, ", MFU %.1f %%", 100 * f->mfu); }
    fprintf(to, "; %s tokens take %s\n", readable_count(run).at,
            readable_duration(run / f->tokens_per_s).at);
    if (isinf(f->memory)) {
        fprintf(to,
                "memory     %.1f GiB a rank; capacity= of --cluster, or --device-memory, says "
                "what it must fit\n",
                gibibytes(f->needed));
    } else if (forecast_fits(f)) {
        fprintf(to, "memory     fits %.1f GiB, %.1f GiB to spare\n", gibibytes(f->memory),
                gibibytes(f->memory - f->needed));
    } else {
        fprintf(to, "memory     does not fit %.1f GiB, by %.1f GiB%s%s%s\n", gibibytes(f->memory),
                gibibytes(f->needed - f->memory), *remedy ? "; " : "", remedy,
                *remedy ? " would fit" : "");
    }
}
enum { FORECAST_JSON = 320 };
// Writes the members of a JSON object, each after a comma.
static inline const char *forecast_json(const Forecast *f, char text[FORECAST_JSON]) {
    int n = snprintf(text, FORECAST_JSON, ",\"tokens_per_s\":%.17g,\"mfu\":", f->tokens_per_s);
    n += snprintf(text + n, FORECAST_JSON - (size_t)n, isnan(f->mfu) ? "null" : "%.17g", f->mfu);
    snprintf(text + n, FORECAST_JSON - (size_t)n, ",\"fits\":%s",
             forecast_fits(f) ? "true" : "false");
    return text;
}

#endif
