// forecast.h: what a predicted step means for a run: tokens a second, MFU, days, and whether it
// fits the memory of a rank.
#ifndef FORECAST_H
#define FORECAST_H

#include "engine/cluster.h" // the GPU of a cluster

typedef struct {
    double tokens_per_s;
    double mfu;            // NAN: the model's arithmetic is not known
    double needed, memory; // bytes of the rank that needs most; of a device (INFINITY: not known)
} Forecast;

// tokens, flops: of a step that takes step_s seconds. peak: flops per second of all ranks.
static inline Forecast forecast_make(double tokens, double flops, double step_s, double peak,
                                     double needed, double memory) {
    const Forecast f = {.tokens_per_s = tokens / step_s,
                        .mfu = flops > 0 && peak > 0 ? flops / step_s / peak : (double)NAN,
                        .needed = needed,
                        .memory = memory};
    return f;
}
static inline bool forecast_fits(const Forecast *f) { return f->needed <= f->memory; }

enum { FORECAST_TEXT = 80 };
static inline double gibibytes(double bytes) { return bytes / 0x1p30; }
// Writes a number of tokens or seconds with a unit that suits it. Returns the text.
static inline const char *tokens_text(double n, char text[FORECAST_TEXT]) {
    static const char units[] = " KMBT";
    int unit = 0;
    for (; n >= 1000 && units[unit + 1]; unit++) { n /= 1000; }
    snprintf(text, FORECAST_TEXT, unit ? "%.3g %c" : "%.3g", n, units[unit]);
    return text;
}
static inline const char *duration_text(double seconds, char text[FORECAST_TEXT]) {
    static const struct {
        double seconds;
        const char *name;
    } units[] = {{86400, "days"}, {3600, "hours"}, {60, "minutes"}, {0, "s"}};
    int unit = 0;
    while (seconds < 2 * units[unit].seconds) { unit++; }
    const double of = units[unit].seconds > 0 ? units[unit].seconds : 1;
    snprintf(text, FORECAST_TEXT, "%.3g %s", seconds / of, units[unit].name);
    return text;
}

// Prints what gpu= stands for: figures of the maker, and the share of each that is reached.
static inline void print_gpu(FILE *to, const Cluster *c) {
    const ClusterGpu *gpu = cluster_gpu(c);
    if (!gpu) { return; }
    const Cluster *f = &gpu->figures;
    fprintf(
        to,
        "rates      gpu=%s: %g TFLOP/s x %g x N / (N + %g) for N tokens (%s); memory of %g GiB, "
        "%g GB/s x %g\n"
        "           a rank sends %g GB/s inside its node, %g between nodes, x %g, after %g us; "
        "PCIe %g GB/s, host %g, x %g (assumed)\n",
        gpu->name, f->tflops, gpu->products, f->half, gpu->source, f->capacity, f->memory,
        gpu->copies, f->intra, f->inter, gpu->messages, f->latency, f->link, f->host, gpu->copies);
}
// Prints speed and memory. tokens: of the run; 0: not known. remedy: flags with which it would fit;
// "": none are known.
static inline void print_forecast(FILE *to, const Forecast *f, double tokens, const char *remedy) {
    char rate[FORECAST_TEXT], many[FORECAST_TEXT], time[FORECAST_TEXT];
    const double run = tokens > 0 ? tokens : 1e9;
    fprintf(to, "speed      %s tokens/s", tokens_text(f->tokens_per_s, rate));
    if (!isnan(f->mfu)) { fprintf(to, ", MFU %.1f %%", 100 * f->mfu); }
    fprintf(to, "; %s tokens take %s\n", tokens_text(run, many),
            duration_text(run / f->tokens_per_s, time));
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
// Writes the members of a JSON object, each after a comma.
static inline const char *forecast_json(const Forecast *f, char text[4 * FORECAST_TEXT]) {
    int n = snprintf(text, 4 * FORECAST_TEXT, ",\"tokens_per_s\":%.17g,\"mfu\":", f->tokens_per_s);
    n += snprintf(text + n, FORECAST_TEXT, isnan(f->mfu) ? "null" : "%.17g", f->mfu);
    snprintf(text + n, FORECAST_TEXT, ",\"fits\":%s", forecast_fits(f) ? "true" : "false");
    return text;
}

#endif
