// sizes.h: how long sequences and how large steps are in a forecast whose flags do not say it.
//
// With --cluster no run starts from the flags, so the defaults of a run need not count: sequences
// are as long as those that such models were trained on, and a step has as many tokens as GPT-3 of
// that size had. A forecast for these ranks is one of the run that the same flags start: it has
// that run's defaults. Both are printed.
#ifndef SIZES_H
#define SIZES_H

#include "base/base.h"
#include "base/files.h"
#include "base/readable.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "options.h"
#include "plan/plan.h"

enum { SIZES_LENGTH = 2048, SIZES_ROUND = 1 << 17 }; // tokens: of GPT-3; batches are multiples
#define SIZES_LEAST_PARAMETERS 1e8                   // of models that the table speaks of

// Table 2.1 of arXiv 2005.14165: parameters, and tokens of a step (there 0.5M, 1M, 2M, 3.2M).
static const double sizes_gpt3[][2] = {
    {125e6, 524288},  {760e6, 524288}, {1.3e9, 1048576}, {2.7e9, 1048576},
    {6.7e9, 2097152}, {13e9, 2097152}, {175e9, 3276800},
};
// Sequences of pretraining that are shorter than the model's positions: Llama 3 (arXiv 2407.21783,
// section 3.4), Qwen2.5 and Qwen3 (arXiv 2412.15115, 2505.09388: the first stages).
static inline int64_t sizes_trained_length(const GptConfig *c) {
    const char *arch = architectures[c->arch].name;
    const int64_t most = !strncmp(arch, "llama", 5)  ? 8192
                         : !strncmp(arch, "qwen", 4) ? 4096
                                                     : INT64_MAX;
    return min_i64(c->max_seq_len, most);
}
// Returns the tokens of a step of a model: the table, interpolated on logarithmic scales.
static inline int64_t sizes_batch_tokens(double parameters) {
    const int rows = LENGTH_OF(sizes_gpt3);
    int i = 1;
    while (i < rows - 1 && parameters > sizes_gpt3[i][0]) { i++; }
    const double *low = sizes_gpt3[i - 1], *high = sizes_gpt3[i];
    const double at = log(parameters / low[0]) / log(high[0] / low[0]);
    const double tokens = low[1] * pow(high[1] / low[1], fmin(fmax(at, 0), 1));
    return max_i64(1, llround(tokens / SIZES_ROUND)) * SIZES_ROUND;
}

// Sets --seq-len where it may be chosen, for a model of --cluster. A --batch-tokens that is given
// stays a whole number of samples for each rank and of micro-batches.
static inline void sizes_choose_length(Config *c, GptConfig *model, int ranks) {
    Options *o = &c->options;
    const bool *given = c->given.at;
    const bool free_length = strchr(o->model, '=') && !strstr(o->model, "positions=");
    if (!ranks || given[OPTION_INDEX_seq_len]) { return; }
    if (free_length && gpt_model(*model).parameters < SIZES_LEAST_PARAMETERS) { return; }
    const int64_t length = free_length ? (int64_t)SIZES_LENGTH : sizes_trained_length(model),
                  rows = given[OPTION_INDEX_micro_batch] ? o->micro_batch : 1;
    if (o->batch_tokens % (length * ranks) || o->batch_tokens / length % rows) { return; }
    o->seq_len = length;
    if (free_length) { model->max_seq_len = length; }
    c->chosen_length = true;
}
// Sets --batch-tokens where it may be chosen. Where the micro-batch is not searched for, a flag
// that gives a part of the step (sequences, micro-batches) gives the step: one micro-batch for each
// rank.
static inline void sizes_choose_batch(Config *c, const GptConfig *model, int ranks) {
    Options *o = &c->options;
    const bool *given = c->given.at, searches = options_searches(o);
    const bool part = given[OPTION_INDEX_seq_len] || given[OPTION_INDEX_micro_batch];
    const double parameters = (double)gpt_model(*model).parameters;
    if (!*o->cluster || given[OPTION_INDEX_batch_tokens] || given[OPTION_INDEX_micro_batches] ||
        (part && !searches) || parameters < SIZES_LEAST_PARAMETERS) {
        return;
    }
    const int64_t each =
        ranks * (given[OPTION_INDEX_micro_batch] ? o->micro_batch : 1) * o->seq_len;
    o->batch_tokens = max_i64(1, llround((double)sizes_batch_tokens(parameters) / each)) * each;
    c->chosen_batch = true;
}
// Prints the sizes that no flag has given. tokens: of a step.
static inline void sizes_print(const Config *c, int64_t tokens) {
    const bool *given = c->given.at, length = !given[OPTION_INDEX_seq_len],
               batch = !given[OPTION_INDEX_batch_tokens] && !given[OPTION_INDEX_micro_batches] &&
                       (c->chosen_batch || !given[OPTION_INDEX_micro_batch]);
    for (int chosen = 1; chosen >= 0; chosen--) {
        const bool T = length && c->chosen_length == chosen, S = batch && c->chosen_batch == chosen;
        if (!T && !S) { continue; }
        const Text of = text_of("--seq-len %" PRId64, c->options.seq_len),
                   step = text_of("--batch-tokens %" PRId64, tokens);
        print_row("sizes", "%s%s%s: not given, %s", T ? of.at : "", T && S ? ", " : "",
                  S ? step.at : "", chosen ? "as such models are trained" : "the run's default");
    }
}

#endif
