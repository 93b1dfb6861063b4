// generate.h: how text is generated: the passes of one sequence through all stages, and how the
// next token is chosen. No schedule is used. The first pass computes all tokens so far, and each
// block keeps their keys and values; a later pass computes the newest token alone.
#ifndef GENERATE_H
#define GENERATE_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "executor/activations.h"
#include "executor/compute.h"
#include "executor/executor.h"
#include "model/gpt.h"
#include "model/unit.h"
#include "ops/ops.h"
#include "state/planned.h"
#include "state/store.h"

// -------------------------------------------------------------------------------------------------
// Logits

// Runs this stage's units on the tokens first .. n - 1 of one sequence; the keys and values of
// earlier ones are kept. Reads activation set 0, or input buffer 0; leaves output buffer 0, or
// logits(Vp) on the host. All ranks of the stage call it.
static inline void executor_stage_forward(Executor *e, int64_t first, int64_t n, float *logits) {
    const GptModel *m = e->model;
    for (int unit = 0; unit < m->units; unit++) {
        if (!executor_has(&e->shape, unit)) { continue; }
        Work w = executor_work(e, unit, 0, 1, n - first);
        w.first = first;
        w.cache = e->caches[unit];
        int storages[2], count = gpt_unit_storages(m, w.unit, storages);
        for (int i = 0; i < count; i++) {
            int64_t version = store_now(e->store, storages[i]);
            if (e->store->plan.rows[storages[i]].gathers) {
                executor_prefetch(e, storages[i], version, true);
            }
            w.states.params[gpt_storage_class(m, storages[i])] =
                executor_acquire(e, storages[i], version, e->map->rows[storages[i]].param_slot);
        }
        run_forward(e, &w);
        if (w.unit == m->units - 1) {
            executor_logits_of_rows(
                e, &w.states,
                real_at_const(head_classified(m, &w.acts->unit[unit]), (w.N - 1) * gpt_width(m)), 1,
                0, m->config.padded_vocab, logits);
        }
    }
}
// Computes logits(Vp), on the host, of the token that follows tokens(n), n <= T, if the keys and
// values of the first `first` tokens are kept. The passes of one sequence go on from each other;
// with first = 0 a sequence begins. Without --prompt or --sample-every nothing is kept, and first
// must be 0. The first rank of each stage sends the sequence on. Every rank calls it and gets the
// same result.
static inline void executor_logits(Executor *e, const Placement *placement, const int32_t *tokens,
                                   int64_t first, int64_t n, float *logits) {
    const size_t bytes = ((n - first) * gpt_width(e->model)) * dtype_size(e->shape.dtype);
    const int mine = placement_stage_of_rank(placement, e->comm->rank),
              last = placement->stages - 1;
    const Stage *stage = &placement->stage[mine];
    const CommLabel label = {"activations", stage->first_unit, e->comm->step};
    if (e->acts[0].tokens) {
        ops_from_host(e->stream, e->acts[0].tokens, tokens + first, (n - first) * sizeof(int32_t));
    }
    bool leads = stage->ranks[0] == e->comm->rank;
    if (leads && mine) {
        CommRequest r = comm_receive_begin(e->comm, label, stage[-1].ranks[0], e->input[0], bytes);
        comm_wait(e->comm, &r);
    }
    executor_stage_forward(e, first, n, logits);
    if (leads && mine < last) {
        CommRequest r = comm_send_begin(e->comm, label, stage[1].ranks[0], e->output[0], bytes);
        comm_wait(e->comm, &r);
    }
    if (last) {
        comm_broadcast(e->comm, logits, e->model->config.padded_vocab * sizeof(float),
                       placement->stage[last].ranks[0]);
    }
}

// -------------------------------------------------------------------------------------------------
// Choosing tokens

// How tokens are drawn: at a temperature (0: the likeliest token), among the top_k likeliest (0:
// all), of these among the fewest that have the probability top_p together (1: all); as a function
// of seed, step and the position of the token.
typedef struct {
    double temperature, top_p;
    int64_t top_k;
    uint64_t seed, step;
} Draws;
typedef struct {
    double weight; // e^(logit / temperature), of the likeliest token 1
    int32_t token;
} LikelyToken;
// The likelier one comes first, and of equal ones the smaller token.
static inline int compare_likely(const void *a, const void *b) {
    const LikelyToken *x = (const LikelyToken *)a, *y = (const LikelyToken *)b;
    if (x->weight != y->weight) { return x->weight > y->weight ? -1 : 1; }
    return (x->token > y->token) - (x->token < y->token);
}
static inline int compare_tokens(const void *a, const void *b) {
    const LikelyToken *x = (const LikelyToken *)a, *y = (const LikelyToken *)b;
    return (x->token > y->token) - (x->token < y->token);
}
// Keeps the tokens that top_k and top_p allow, in their order. Returns how many.
static inline int64_t keep_likely(Draws d, LikelyToken *c, int64_t n) {
    if ((d.top_k == 0 || d.top_k >= n) && d.top_p >= 1) { return n; }
    qsort(c, (size_t)n, sizeof *c, compare_likely);
    if (d.top_k) { n = min_i64(n, d.top_k); }
    double sum = 0, kept = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) { sum += c[i].weight; }
    while (count < n && (count == 0 || kept < d.top_p * sum)) { kept += c[count++].weight; }
    qsort(c, (size_t)count, sizeof *c, compare_tokens);
    return count;
}
static inline int32_t choose_token(Draws d, const float *logits, int64_t V, int64_t position) {
    int64_t best = 0;
    for (int64_t i = 1; i < V; i++) { best = logits[i] > logits[best] ? i : best; }
    if (d.temperature == 0) { return (int32_t)best; }
    LikelyToken *c = new_array(LikelyToken, (size_t)V, "sample");
    for (int64_t i = 0; i < V; i++) {
        c[i].weight = exp((logits[i] - (double)logits[best]) / d.temperature);
        c[i].token = (int32_t)i;
    }
    const int64_t n = keep_likely(d, c, V);
    double sum = 0;
    for (int64_t i = 0; i < n; i++) { sum += c[i].weight; }
    double draw = random_uniform(d.seed, d.step, (uint64_t)position) * sum;
    int32_t chosen = (int32_t)best;
    for (int64_t i = 0; i < n; i++) {
        draw -= c[i].weight;
        if (draw < 0) {
            chosen = c[i].token;
            break;
        }
    }
    free(c);
    return chosen;
}

// -------------------------------------------------------------------------------------------------
// Generating

// What passes took: those that compute all tokens of a sequence, and those of one more token.
typedef struct {
    int64_t tokens[2]; // computed
    double seconds[2];
} GenerateSpeed;
enum { SPEED_ALL, SPEED_ONE };
// Gets each token as soon as it is chosen; take NULL: nobody does.
typedef struct {
    void (*take)(void *state, int32_t token);
    void *state;
} TokenReader;
// Generates up to `count` tokens that follow prompt(given), 1 <= given <= T, and ends after the
// token `stop` (-1: none). Returns how many there are, with `stop`. When T tokens are full, the
// newer half of them goes on as a sequence of its own, computed anew. Adds to *speed. Every rank
// calls it and gets the same tokens; only a rank's own reader learns of them.
static inline int64_t executor_generate(Executor *e, const Placement *placement,
                                        const int32_t *prompt, int64_t given, int32_t stop,
                                        int32_t *out, int64_t count, Draws draws,
                                        TokenReader reader, GenerateSpeed *speed) {
    const int64_t T = e->shape.T;
    int64_t n = given, kept = 0, made = 0;
    int32_t *tokens = new_array(int32_t, T, "sample");
    memcpy(tokens, prompt, (size_t)given * sizeof(int32_t));
    while (made < count && (made == 0 || out[made - 1] != stop)) {
        const double start = seconds_now();
        const int pass = kept ? SPEED_ONE : SPEED_ALL;
        executor_logits(e, placement, tokens, kept, n, e->host_logits);
        out[made] = choose_token(draws, e->host_logits, e->model->config.vocab, made);
        speed->tokens[pass] += n - kept;
        speed->seconds[pass] += seconds_now() - start;
        if (reader.take) { reader.take(reader.state, out[made]); }
        kept = e->shape.generates ? n : 0;
        if (n == T) {
            memmove(tokens, tokens + T / 2, (T - T / 2) * sizeof(int32_t));
            n = T - T / 2;
            kept = 0;
        }
        tokens[min_i64(n, T - 1)] = out[made++];
        n = min_i64(n + 1, T);
    }
    free(tokens);
    return made;
}

#endif
