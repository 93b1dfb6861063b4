// experts_cpu.h: mixtures of experts on the CPU: the router, copies of rows to experts and back,
// the matrix products of experts. The contract is ops.h.
#ifndef EXPERTS_CPU_H
#define EXPERTS_CPU_H

#include "ops/cpu/matmul_cpu.h" // products, the team, polling

// --- router --------------------------------------------------------------------------------------
TYPED void router_logits(const DType type, float *z, const Real *x, const Real *weight, int64_t E,
                         int64_t C) {
    for (int64_t e = 0; e < E; e++) {
        const Real *w = real_at_const(weight, e * C);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) { sum += load_real(type, x, c) * load_real(type, w, c); }
        z[e] = sum;
    }
}
// Turns the logits of a group into p, and returns the log of their sum.
static inline float router_softmax(float *z, int64_t n) {
    float most = -INFINITY;
    double sum = 0;
    for (int64_t e = 0; e < n; e++) { most = fmaxf(most, z[e]); }
    for (int64_t e = 0; e < n; e++) {
        z[e] = expf(z[e] - most);
        sum += z[e];
    }
    for (int64_t e = 0; e < n; e++) { z[e] = (float)(z[e] / sum); }
    return sum > 0 ? most + (float)log(sum) : NAN;
}
// Writes the top_k experts of a group, from the largest p + bias on, and their weights.
static inline void router_choose(int32_t *chosen, float *weight, const float *p, const Real *bias,
                                 int64_t first, const Router *r) {
    const int64_t n = r->experts / r->groups;
    float sum = 0.0f;
    for (int64_t j = 0; j < r->top_k; j++) {
        int64_t best = -1;
        float most = 0;
        for (int64_t e = 0; e < n; e++) {
            float b = 0;
            bool taken = false;
            reals_to_floats(&b, real_at_const(bias, first + e), 1);
            for (int64_t i = 0; i < j; i++) { taken = taken || chosen[i] == first + e; }
            // a p that is no number is chosen last, and every choice has an expert
            if (!taken && (best < 0 || p[e] + b > most)) {
                best = e;
                most = p[e] + b;
            }
        }
        chosen[j] = (int32_t)(first + best);
        weight[j] = p[best];
        sum += p[best];
    }
    for (int64_t j = 0; j < r->top_k && r->groups == 1; j++) { weight[j] /= sum; }
}
// Counts the rows of each expert, and gives each choice its row.
static inline void route_place(Route route, int32_t *loads, int64_t experts) {
    const int64_t n = route.N * route.choices;
    int64_t *next = new_array(int64_t, experts, "routes");
    memset(loads, 0, (size_t)experts * sizeof *loads);
    for (int64_t i = 0; i < n; i++) { loads[route.expert[i]]++; }
    for (int64_t e = 1; e < experts; e++) { next[e] = next[e - 1] + loads[e - 1]; }
    for (int64_t i = 0; i < n; i++) { route.place[i] = (int32_t)next[route.expert[i]]++; }
    free(next);
}
static inline void ops_route(Stream *s, Route route, int32_t *loads, float *p, const Real *in,
                             const Real *weight, const Real *bias, int64_t C, Router router) {
    const int64_t E = router.experts, each = E / router.groups;
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t t = 0; t < route.N; t++) {
        FOR_TYPE(router_logits, p + t * E, real_at_const(in, t * C), weight, E, C);
        for (int64_t g = 0; g < router.groups; g++) {
            const int64_t at = t * route.choices + g * router.top_k;
            route.lse[t * route.choices + g] = router_softmax(p + t * E + g * each, each);
            router_choose(route.expert + at, route.weight + at, p + t * E + g * each, bias,
                          g * each, &router);
        }
        poll_after_wide_row(s, t, E * C);
    }
    route_place(route, loads, E);
}

// With w = p / (sum of the chosen p): dlogit = w (dw - sum of w dw). With w = p, dp = dw.
static inline void router_dlogits(float *p, const Route *route, int64_t t, int64_t g,
                                  const Router *r, const RouterLosses *losses) {
    const int64_t n = r->experts / r->groups, first = g * n, at = t * route->choices + g * r->top_k;
    const bool divided = r->groups == 1;
    const float *w = route->weight + at, *dw = route->dweight + at,
                *shares = losses->shares ? losses->shares + first : NULL;
    float chosen = 0, all = 0;
    const float of_lse = 2 * losses->z * route->lse[t * route->choices + g];
    for (int64_t j = 0; j < r->top_k; j++) { chosen += w[j] * dw[j]; }
    for (int64_t e = 0; e < n && shares; e++) { all += p[e] * (losses->aux * shares[e]); }
    if (!divided) { all += chosen; }
    for (int64_t e = 0; e < n; e++) {
        p[e] *= (shares ? losses->aux * shares[e] : 0.0f) - all + of_lse;
    }
    for (int64_t j = 0; j < r->top_k; j++) {
        p[route->expert[at + j] - first] += w[j] * (divided ? dw[j] - chosen : dw[j]);
    }
}
// out = before (NULL: 0) + the sum of `count` rows, each times its weight (NULL: 1), in this order.
// Row j is number place[j]; without places (NULL) it is number j, and rows whose weight is 0 are
// not read.
TYPED void add_weighted_rows(const DType type, Real *out, const Real *before, const Real *rows,
                             const int32_t *place, const float *weight, int64_t count, int64_t C) {
    enum { COLUMNS = 256 };
    float sums[COLUMNS];
    for (int64_t first = 0; first < C; first += COLUMNS) {
        const int64_t n = min_i64(COLUMNS, C - first);
        for (int64_t c = 0; c < n; c++) {
            sums[c] = before ? load_real(type, before, first + c) : 0.0f;
        }
        for (int64_t j = 0; j < count; j++) {
            const Real *row = real_at_const(rows, (place ? place[j] : j) * C + first);
            const float w = weight ? weight[j] : 1.0f;
            if (!place && w == 0.0f) { continue; }
#pragma omp simd
            for (int64_t c = 0; c < n; c++) { sums[c] += w * load_real(type, row, c); }
        }
        store_part(type, real_at(out, first), sums, n);
    }
}
static inline void ops_route_backward_input(Stream *s, Real *dx, const Real *before, float *p,
                                            Route route, const Real *weight, int64_t C,
                                            Router router, RouterLosses losses) {
    const int64_t E = router.experts, each = E / router.groups;
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t t = 0; t < route.N; t++) {
        for (int64_t g = 0; g < router.groups; g++) {
            router_dlogits(p + t * E + g * each, &route, t, g, &router, &losses);
        }
        FOR_TYPE(add_weighted_rows, real_at(dx, t * C),
                 before ? real_at_const(before, t * C) : NULL, weight, NULL, p + t * E, E, C);
        poll_after_wide_row(s, t, E * C);
    }
}

TYPED void router_add_row(const DType type, float *dweight, float factor, const Real *x,
                          int64_t C) {
#pragma omp simd
    for (int64_t c = 0; c < C; c++) { dweight[c] += factor * load_real(type, x, c); }
}
// Loads are whole numbers times the odd part of the number of experts, so their sums are exact.
static inline void route_loads(float *dbias, Route route, const int32_t *loads, int64_t experts,
                               bool accumulate) {
    const int64_t n = route.N * route.choices;
    int64_t odd = experts;
    while (odd % 2 == 0) { odd /= 2; }
    for (int64_t e = 0; e < experts; e++) {
        const double above = (double)(loads[e] * odd) - (double)n / (double)(experts / odd);
        dbias[e] = (accumulate ? dbias[e] : 0.0f) + (float)above * LOAD_UNIT;
    }
}
static inline void ops_route_backward_weight(Stream *s, float *dweight, float *dbias,
                                             const float *dlogits, Route route,
                                             const int32_t *loads, const Real *in, int64_t C,
                                             Router router, bool accumulate) {
    const int64_t E = router.experts, slices = ceil_div(C, BLOCK);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t i = 0; i < E * slices; i++) {
        const int64_t e = i / slices, first = i % slices * BLOCK, n = min_i64(BLOCK, C - first);
        float *sums = dweight + e * C + first;
        for (int64_t c = 0; c < n && !accumulate; c++) { sums[c] = 0.0f; }
        for (int64_t t = 0; t < route.N; t++) {
            if (dlogits[t * E + e] == 0.0f) { continue; }
            FOR_TYPE(router_add_row, sums, dlogits[t * E + e], real_at_const(in, t * C + first), n);
        }
        poll_messages(s);
    }
    route_loads(dbias, route, loads, E, accumulate);
}

// --- rows to experts, and back -------------------------------------------------------------------
static inline void ops_dispatch(Stream *s, Real *rows, const Real *in, Route route, int64_t C) {
    const size_t bytes = (size_t)C * ops_real_bytes();
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t i = 0; i < route.N * route.choices; i++) {
        memcpy(real_at(rows, route.place[i] * C), real_at_const(in, i / route.choices * C), bytes);
        poll_after_row(s, i);
    }
}
static inline void ops_dispatch_backward(Stream *s, Real *dx, const Real *before, const Real *drows,
                                         Route route, int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t t = 0; t < route.N; t++) {
        FOR_TYPE(add_weighted_rows, real_at(dx, t * C),
                 before ? real_at_const(before, t * C) : NULL, drows,
                 route.place + t * route.choices, NULL, route.choices, C);
        poll_after_row(s, t);
    }
}
static inline void ops_combine_rows(Stream *s, Real *out, const Real *rows, Route route,
                                    int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t t = 0; t < route.N; t++) {
        const int64_t at = t * route.choices;
        FOR_TYPE(add_weighted_rows, real_at(out, t * C), NULL, rows, route.place + at,
                 route.weight + at, route.choices, C);
        poll_after_row(s, t);
    }
}
TYPED void combine_row_backward(const DType type, Real *drow, float *dweight, const Real *dout,
                                const Real *row, float weight, int64_t C) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < C; c++) { sum += load_real(type, dout, c) * load_real(type, row, c); }
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        store_real(type, drow, c, weight * load_real(type, dout, c));
    }
    *dweight = sum;
}
static inline void ops_combine_rows_backward(Stream *s, Real *drows, const Real *dout,
                                             const Real *rows, Route route, int64_t C) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t i = 0; i < route.N * route.choices; i++) {
        const int64_t row = route.place[i] * C;
        FOR_TYPE(combine_row_backward, real_at(drows, row), &route.dweight[i],
                 real_at_const(dout, i / route.choices * C), real_at_const(rows, row),
                 route.weight[i], C);
        poll_after_row(s, i);
    }
}

// --- experts -------------------------------------------------------------------------------------
static inline void ops_experts_forward(Stream *s, Real *out, Real *gelu, const Real *in,
                                       const Real *weight, ExpertRows rows, int64_t C, int64_t OC,
                                       bool one) {
    int64_t row = 0;
    for (int64_t i = 0; i < rows.sources * rows.experts; row += rows.counts[i++]) {
        const int64_t n = rows.counts[i];
        Real *y = real_at(out, row * OC), *active = gelu ? real_at(gelu, row * OC) : NULL;
        const Real *x = real_at_const(in, row * C),
                   *w = real_at_const(weight, i % rows.experts * OC * C);
        if (one && n) { // generated text
            ops_vector_forward(s, y, active, x, w, NULL, C, OC);
        } else if (n) {
            ops_matmul_forward(s, y, active, x, w, NULL, n, C, OC);
        }
    }
}
static inline void ops_experts_backward_input(Stream *s, Real *din, const Real *dout,
                                              const Real *weight, const Real *pre_gelu,
                                              ExpertRows rows, int64_t C, int64_t OC) {
    int64_t row = 0;
    for (int64_t i = 0; i < rows.sources * rows.experts; row += rows.counts[i++]) {
        if (!rows.counts[i]) { continue; }
        ops_matmul_backward_input(s, real_at(din, row * C), real_at_const(dout, row * OC),
                                  real_at_const(weight, i % rows.experts * OC * C),
                                  pre_gelu ? real_at_const(pre_gelu, row * C) : NULL,
                                  rows.counts[i], C, OC);
    }
}
static inline void ops_experts_backward_weight(Stream *s, float *dweight, const Real *dout,
                                               const Real *in, ExpertRows rows, int64_t C,
                                               int64_t OC, bool accumulate) {
    int64_t row = 0;
    for (int64_t i = 0; i < rows.sources * rows.experts; row += rows.counts[i++]) {
        ops_matmul_backward_weight(s, dweight + i % rows.experts * OC * C, NULL,
                                   real_at_const(dout, row * OC), real_at_const(in, row * C),
                                   rows.counts[i], C, OC, accumulate || i >= rows.experts);
    }
}

#endif
