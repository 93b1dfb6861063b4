// fit_answer.h: what --fit has found: the fastest ways to run, as a table or as JSON; the answer of
// --plan and --pipeline auto of models with experts, which choose as --fit does, without
// offloading. Each forecast is that of a plan that was made: --dry-run gives the same for the flags
// that are printed.
#ifndef FIT_ANSWER_H
#define FIT_ANSWER_H

#include "base/base.h"
#include "base/figures.h"
#include "base/files.h"
#include "base/readable.h"
#include "comm/group.h"
#include "model/config.h"
#include "model/gpt.h"
#include "options.h"
#include "pipeline.h"
#include "plan/forecast.h"
#include "plan/plan.h"
#include "plan/plan_make.h"
#include "plan/sizes.h"
#include "planner/fit.h"
#include "planner/plan_answer.h"

// -------------------------------------------------------------------------------------------------
// --fit

static inline Forecast fit_forecast(const Fit *f, const FitResult *r) {
    const int64_t T = f->config->options.seq_len;
    const StepWork work = step_work(&f->spec->model, f->config->samples, T,
                                    f->machine.rates.peak_flops_per_s, f->machine.ranks->n);
    return forecast_make(work, r->step_s, r->device, f->memory);
}
// Writes what is reported of a way to run: FIT_SENT rows, and what a rank sends.
enum { FIT_SENT = 5, FIT_FIGURES = FIT_SENT + LINK_KINDS };
typedef struct {
    Figure row[FIT_FIGURES];
} FitFigures;
static inline FitFigures fit_figures(const Fit *f, const FitResult *r) {
    const Forecast forecast = fit_forecast(f, r);
    const FitFigures figures = {{
        {"step_ms=%10T", 1e3 * r->step_s},
        {"tokens_per_s= %8C", forecast.tokens_per_s},
        {"mfu= %7Q", forecast.mfu},
        {"memory= %6.1G GiB", rint(r->device)},
        {"host", rint(r->host)},
        {"intra= %10.2G GiB", (double)r->sent[LINK_INTRA]},
        {"inter= %10.2G GiB", (double)r->sent[LINK_INTER]},
    }};
    return figures;
}
// Writes how uneven loads of experts change the step of a way. Returns false if no rows are sent.
static inline bool fit_uneven(const Fit *f, const FitResult *r, UnevenStep *step) {
    Config c = *f->config;
    Machine unknown = f->machine;
    Plan *p = r->way.expert_parallel > 1 ? fit_make(f, &r->way, &c, &unknown) : NULL;
    if (!p) { return false; }
    unknown.rates = f->machine.rates;
    StageStores stages = stage_stores_make(p);
    *step = predict_uneven(p, &stages);
    stage_stores_free(&stages);
    fit_free(p, &c);
    return true;
}
static inline void fit_print_json(const Fit *f) {
    const int64_t T = f->config->options.seq_len;
    TextBuffer t = {};
    text_add(&t, "{\"tried\":%d,\"seq_len\":%" PRId64 ",\"batch_tokens\":%" PRId64 ",\"best\":[",
             f->tried, T, f->config->samples * T);
    for (int i = 0; i < f->found; i++) {
        const FitResult *r = &f->best[i];
        char flags[2 * FIT_TEXT];
        UnevenStep step;
        const FitFigures figures = fit_figures(f, r);
        fit_text(f, &r->way, flags, sizeof flags);
        text_add(&t, "%s{\"flags\":\"%s\",\"fits\":%s", i ? "," : "", flags,
                 r->device <= f->memory ? "true" : "false");
        json_add_figures(&t, figures.row, FIT_SENT);
        if (fit_uneven(f, r, &step)) { json_add_uneven(&t, &step); }
        text_add(&t, ",\"traffic\":{");
        json_add_figures(&t, figures.row + FIT_SENT, LINK_KINDS);
        text_add(&t, "}}");
    }
    printf("%s]}\n", t.text);
    free(t.text);
}
// Prints the ways as a table, and what the first one means.
static inline void fit_print_table(const Fit *f, const char *label) {
    const Options *o = &f->config->options;
    sizes_print(f->config, f->config->samples * o->seq_len);
    print_row(label, "%d ways to run were planned; the fastest that fit:", f->tried);
    printf("      step   tokens/s    MFU   memory     sent in a node, between nodes   flags\n");
    for (int i = 0; i < f->found; i++) {
        char flags[2 * FIT_TEXT];
        const FitFigures figures = fit_figures(f, &f->best[i]);
        fit_text(f, &f->best[i].way, flags, sizeof flags);
        print_figures(stdout, figures.row, FIT_FIGURES);
        printf("       %s\n", flags);
    }
    const Forecast forecast = fit_forecast(f, &f->best[0]);
    print_gpu(stdout, &f->machine.cluster);
    print_forecast(stdout, &forecast, (double)o->steps * f->config->samples * o->seq_len, "");
}
static inline void fit_print_uneven(const Fit *f) {
    UnevenStep step;
    if (fit_uneven(f, &f->best[0], &step)) { print_uneven(stdout, &step); }
}
static inline void fit_print(const Fit *f) {
    if (f->config->options.json) {
        fit_print_json(f);
        return;
    }
    fit_print_table(f, "fit");
    fit_print_uneven(f);
}

// -------------------------------------------------------------------------------------------------
// --plan of models with experts

// Is a search like that of --fit made for these flags and this model?
static inline bool fit_is_asked(const Options *o, const GptModel *m) {
    return o->fit || (options_searches(o) && m->config.experts);
}
// Returns the share of all ranks' time in which they do not compute.
static inline double way_bubble(const Plan *p, const StageStores *stages) {
    double *busy = new_array(double, p->program.ranks, "prediction"), computing = 0;
    const double step_s = predict_step(p, stages, busy, NULL);
    for (int r = 0; r < p->program.ranks; r++) { computing += busy[r]; }
    free(busy);
    return max_f64(0, 1 - computing / (p->program.ranks * step_s)); // not by rounding
}
static inline void json_add_stages(TextBuffer *t, const Placement *placement) {
    text_add(t, "\"stages\":[");
    for (int s = 0; s < placement->stages; s++) {
        const Stage *stage = &placement->stage[s];
        json_add_stage(t, s, stage->units, stage->replicas, stage->ranks);
    }
    text_add(t, "]");
}
static inline void json_add_stage_memory(TextBuffer *t, const Plan *p, const StageStores *stages) {
    const int count = p->pipeline.placement.stages;
    double *bytes = new_array(double, count, "prediction");
    plan_stages_bytes(p, stages, bytes);
    for (int s = 0; s < count; s++) { text_add(t, "%s%.0f", s ? "," : "[", bytes[s]); }
    text_add(t, "]");
    free(bytes);
}
// Adds the members of a way's JSON object, as --plan has them, without the braces.
static inline void json_add_way(TextBuffer *t, const Fit *f, const FitResult *r) {
    const FitWay *w = &r->way;
    Config c = *f->config;
    Machine unknown = f->machine;
    Plan *p = fit_make(f, w, &c, &unknown);
    char flags[2 * FIT_TEXT];
    const char warmup = w->warmup == WARMUP_B ? 'b' : 'a';
    const Forecast forecast = fit_forecast(f, r);
    unknown.rates = f->machine.rates; // now the rates are known
    fit_text(f, w, flags, sizeof flags);
    StageStores stages = stage_stores_make(p);
    json_add_stages(t, &p->pipeline.placement);
    text_add(t,
             ",\"micro_batches\":%d,\"micro_batch\":%" PRId64 ",\"recompute\":%s,\"warmup\":\"%c\","
             "\"schedule\":\"%s\",\"zero\":%" PRId64 ",\"expert_parallel\":%" PRId64
             ",\"predicted\":{",
             p->pipeline.micro_batches, p->pipeline.micro_rows, w->recompute ? "true" : "false",
             warmup, pipeline_kind_names[w->schedule], w->zero, w->expert_parallel);
    json_add_field(t, "step_ms", 1e3 * r->step_s);
    json_add_field(t, "bubble", way_bubble(p, &stages));
    json_add_forecast(t, &forecast);
    if (w->expert_parallel > 1) {
        const UnevenStep step = predict_uneven(p, &stages);
        json_add_uneven(t, &step);
    }
    text_add(t, ",\"memory\":");
    json_add_stage_memory(t, p, &stages);
    text_add(t, "},\"flags\":\"%s\"", flags);
    stage_stores_free(&stages);
    fit_free(p, &c);
}
static inline void fit_print_plan_json(const Fit *f) {
    const int64_t T = f->config->options.seq_len;
    TextBuffer t = {};
    text_add(&t, "{");
    json_add_way(&t, f, &f->best[0]);
    text_add(&t, ",\"alternatives\":[");
    for (int i = 1; i < f->found; i++) {
        const bool one = !strcmp(f->best[i].way.pipeline, "1");
        text_add(&t, "%s{\"name\":\"%s\",", i > 1 ? "," : "", one ? "data parallel" : "runner-up");
        json_add_way(&t, f, &f->best[i]);
        text_add(&t, "}");
    }
    text_add(&t, "],\"one_rank_ms\":%.17g,\"seq_len\":%" PRId64 ",\"batch_tokens\":%" PRId64,
             1e3 * f->one_rank_s, T, f->config->samples * T);
    printf("%s}\n", t.text);
    free(t.text);
}
// Prints the stages of the first way.
static inline void fit_print_stages(const Fit *f) {
    Config c = *f->config;
    Machine unknown = f->machine;
    Plan *p = fit_make(f, &f->best[0].way, &c, &unknown);
    const Placement *placement = &p->pipeline.placement;
    double *bytes = new_array(double, placement->stages, "prediction");
    StageStores stages = stage_stores_make(p);
    plan_stages_bytes(p, &stages, bytes);
    stage_stores_free(&stages);
    printf("stage   units   memory MiB  ranks\n");
    for (int s = 0; s < placement->stages; s++) {
        const Stage *stage = &placement->stage[s];
        printf("%5d %4d-%-4d %10.1f  ", s, stage->first_unit, stage->first_unit + stage->units - 1,
               mebibytes(bytes[s]));
        print_ranges(stdout, stage->ranks, stage->replicas);
        printf("\n");
    }
    free(bytes);
    fit_free(p, &c);
}
// Prints the answer of --plan, or what --pipeline auto has chosen.
static inline void fit_print_plan(const Fit *f) {
    const Options *o = &f->config->options;
    char flags[2 * FIT_TEXT];
    if (o->json) {
        if (o->plan) { fit_print_plan_json(f); }
        return;
    }
    fit_print_table(f, "plan");
    fit_print_uneven(f);
    fit_print_stages(f);
    fit_text(f, &f->best[0].way, flags, sizeof flags);
    printf("flags      %s\n", flags);
}

#endif
