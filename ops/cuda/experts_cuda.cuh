// experts_cuda.cuh: mixtures of experts on a GPU: the router, copies of rows to experts and back,
// the matrix products of experts. The contract is ops.h.
//
// Counts     The host starts a product for each expert that has rows, so it must know how many
//            these are. A kernel writes them to memory of the host, and ops_wait_loads() waits for
//            that kernel alone, while the device copies rows to experts. That is one wait for each
//            forward pass of a block; backward passes know the counts.
// Cost       An expert's product is a call of cuBLASLt, some 5 us of the host, and none is recorded
//            as a graph, because its size varies: experts of less than some hundred rows wait for
//            launches. Their GELU is a kernel of its own, over all rows.
// Order      Rows are sorted by expert (order_tokens), and sums have one order, fixed by the shape:
//            a token's choice of experts depends on no other token.
#ifndef EXPERTS_CUDA_CUH
#define EXPERTS_CUDA_CUH

#include "ops/cuda/device_cuda.cuh" // launching kernels
#include "ops/cuda/matmul_cuda.cuh" // products

enum {
    FOUR = 4,           // channels that a thread of a router's kernels takes
    LOGITS_TILE = 32,   // tokens, experts and channels of a tile of logits
    LOGITS_STRIDE = 36, // of a row in shared memory: eight rows are in all banks
    INPUT_TOKENS = 8,   // of a block of the gradient of a router's input,
    INPUT_EXPERTS = 64, // and experts at a time
    WEIGHT_EXPERTS = 8, // of a block of the gradient of a router's weights,
    WEIGHT_CHANNELS = 32 * FOUR,
    WEIGHT_BLOCKS = 512, // that a GPU is given, where the tokens suffice
    WEIGHT_TOKENS = 64   // of a block, at least
};

// --- router --------------------------------------------------------------------------------------
// z(N, E) = in(N, C) weight(E, C)^T. A block takes a tile; a thread adds two tokens x two experts.
template <class R>
__global__ void router_logits_kernel(float *z, const R *in, const R *weight, int64_t N, int64_t E,
                                     int64_t C) {
    alignas(16) __shared__ float tokens[LOGITS_TILE][LOGITS_STRIDE],
        experts[LOGITS_TILE][LOGITS_STRIDE];
    const int row = (int)threadIdx.x / 8, column = (int)threadIdx.x % 8 * FOUR, // of what it reads
        x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;                   // of what it adds
    const int64_t t = (int64_t)blockIdx.x * LOGITS_TILE, e = (int64_t)blockIdx.y * LOGITS_TILE;
    float sum[2][2] = {};
    for (int64_t first = 0; first < C; first += LOGITS_TILE) {
        const int64_t c = first + column;
        float a[FOUR], b[FOUR];
        read_numbers<FOUR>(a, in + (t + row) * C + c, t + row < N ? C - c : 0);
        read_numbers<FOUR>(b, weight + (e + row) * C + c, e + row < E ? C - c : 0);
        write_numbers<FOUR>(&tokens[row][column], a, FOUR);
        write_numbers<FOUR>(&experts[row][column], b, FOUR);
        __syncthreads();
        UNROLL for (int i = 0; i < LOGITS_TILE; i += FOUR) {
            float of_token[2][FOUR], of_expert[2][FOUR];
            UNROLL for (int k = 0; k < 2; k++) {
                read_parts<FOUR>(of_token[k], &tokens[y + 16 * k][i]);
                read_parts<FOUR>(of_expert[k], &experts[x + 16 * k][i]);
            }
            UNROLL for (int k = 0; k < 4 * FOUR; k++) {
                sum[k / 2 % 2][k % 2] += of_token[k / 2 % 2][k / 4] * of_expert[k % 2][k / 4];
            }
        }
        __syncthreads();
    }
    for (int k = 0; k < 4; k++) {
        const int64_t token = t + y + 16 * (k / 2), expert = e + x + 16 * (k % 2);
        if (token < N && expert < E) { z[token * E + expert] = sum[k / 2][k % 2]; }
    }
}
// Does expert a of this value come before expert b?
__device__ bool comes_before(float value_a, int a, float value_b, int b) {
    return value_a > value_b || (value_a == value_b && a < b);
}
// What experts are chosen by. What is no number is chosen last.
template <class R> __device__ float choice_value(float p, const R *bias) {
    const float value = p + read(bias);
    return value != value ? -INFINITY : value;
}
// A warp turns the logits of a group into p, and returns the log of their sum, in all lanes.
__device__ float router_softmax(float *z, int n) {
    float most = -INFINITY;
    double sum = 0.0;
    for (int e = (int)threadIdx.x % 32; e < n; e += 32) { most = fmaxf(most, z[e]); }
    most = lanes_reduce(most, 32, true);
    for (int e = (int)threadIdx.x % 32; e < n; e += 32) {
        z[e] = expf(z[e] - most);
        sum += z[e];
    }
    sum = warp_sum(sum);
    for (int e = (int)threadIdx.x % 32; e < n; e += 32) { z[e] = (float)(z[e] / sum); }
    __syncwarp();
    return sum > 0.0 ? most + (float)log(sum) : NAN;
}
// A warp takes a token. Each choice is the first of the experts that come after the one before it.
template <class R>
__global__ void router_choose_kernel(Route route, float *p, const R *bias, Router r) {
    const int lane = (int)threadIdx.x % 32, n = (int)(r.experts / r.groups);
    const int64_t t = warp_index();
    if (t >= route.N) { return; }
    p += t * r.experts;
    for (int64_t g = 0; g < r.groups; g++, p += n, bias += n) {
        const int64_t at = t * route.choices + g * r.top_k;
        const float lse = router_softmax(p, n);
        float last = INFINITY, sum = 0.0f;
        int last_expert = -1;
        for (int64_t j = 0; j < r.top_k; j++) {
            float best = -INFINITY;
            int expert = n;
            for (int e = lane; e < n; e += 32) {
                const float value = choice_value(p[e], bias + e);
                if (comes_before(last, last_expert, value, e) &&
                    comes_before(value, e, best, expert)) {
                    best = value;
                    expert = e;
                }
            }
            for (int d = 16; d > 0; d >>= 1) {
                const float other = __shfl_xor_sync(ALL_LANES, best, d);
                const int other_expert = __shfl_xor_sync(ALL_LANES, expert, d);
                if (comes_before(other, other_expert, best, expert)) {
                    best = other;
                    expert = other_expert;
                }
            }
            last = best;
            last_expert = expert;
            sum += p[expert];
            if (lane == 0) {
                route.expert[at + j] = (int32_t)(g * n + expert);
                route.weight[at + j] = p[expert];
            }
        }
        if (lane != 0) { continue; }
        route.lse[t * route.choices + g] = lse;
        for (int64_t j = 0; j < r.top_k && r.groups == 1; j++) { route.weight[at + j] /= sum; }
    }
}
// Returns how many of the n choices, in their order, are of experts before this one.
__device__ int choices_before(const int32_t *expert, const int32_t *order, int n, int before) {
    int first = 0, end = n;
    while (first < end) {
        const int middle = first + (end - first) / 2;
        if (expert[order[middle]] < before) {
            first = middle + 1;
        } else {
            end = middle;
        }
    }
    return first;
}
__global__ void route_loads_kernel(int32_t *loads, const int32_t *expert, const int32_t *order,
                                   int n, int64_t experts) {
    const int64_t e = thread_index();
    if (e >= experts) { return; }
    loads[e] =
        choices_before(expert, order, n, (int)e + 1) - choices_before(expert, order, n, (int)e);
}
__global__ void route_place_kernel(int32_t *place, const int32_t *order, int64_t n) {
    const int64_t i = thread_index();
    if (i < n) { place[order[i]] = (int32_t)i; }
}
static inline void ops_route(Stream *s, Route route, int32_t *loads, float *p, const Real *in,
                             const Real *weight, const Real *bias, int64_t C, Router router) {
    const int64_t n = route.N * route.choices, E = router.experts;
    const dim3 tiles(blocks_for(route.N, LOGITS_TILE), blocks_for(E, LOGITS_TILE));
    LAUNCH_REAL(s, router_logits_kernel, tiles, p, in, weight, route.N, E, C);
    LAUNCH_REAL(s, router_choose_kernel, blocks_for(route.N, WARPS), route, p, bias, router);
    const int32_t *order = order_tokens(s, (int32_t *)scratch(s), route.expert, 1, n, E);
    launch(s, route_loads_kernel, blocks_for(E, THREADS), loads, route.expert, order, (int)n, E);
    mark_loads(s);
    launch(s, route_place_kernel, blocks_for(n, THREADS), route.place, order, n);
}

// A warp takes a group of a token.
__global__ void router_dlogits_kernel(float *p, Route route, Router r, RouterLosses losses) {
    const int64_t i = warp_index(), t = i / r.groups, g = i % r.groups, n = r.experts / r.groups,
                  at = t * route.choices + g * r.top_k;
    const int lane = (int)threadIdx.x % 32;
    if (t >= route.N) { return; }
    const bool divided = r.groups == 1;
    const float *w = route.weight + at, *dw = route.dweight + at,
                *shares = losses.shares ? losses.shares + g * n : NULL;
    const float of_lse = 2.0f * losses.z * route.lse[t * route.choices + g];
    float chosen = 0.0f, all = 0.0f;
    p += t * r.experts + g * n;
    for (int64_t j = 0; j < r.top_k; j++) { chosen += w[j] * dw[j]; }
    for (int64_t e = lane; e < n && shares; e += 32) { all += p[e] * (losses.aux * shares[e]); }
    all = warp_sum(all);
    if (!divided) { all += chosen; }
    for (int64_t e = lane; e < n; e += 32) {
        p[e] *= (shares ? losses.aux * shares[e] : 0.0f) - all + of_lse;
    }
    __syncwarp();
    for (int64_t j = lane; j < r.top_k; j += 32) {
        p[route.expert[at + j] - g * n] += w[j] * (divided ? dw[j] - chosen : dw[j]);
    }
}
// dx = before + dlogits weight. A block takes INPUT_TOKENS tokens; a thread four channels of each.
template <class R>
__global__ void router_input_kernel(R *dx, const R *before, const float *dlogits, const R *weight,
                                    int64_t N, int64_t E, int64_t C) {
    __shared__ float factors[INPUT_TOKENS][INPUT_EXPERTS];
    const int64_t t = (int64_t)blockIdx.x * INPUT_TOKENS,
                  c = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * FOUR;
    float sum[INPUT_TOKENS][FOUR] = {};
    UNROLL for (int k = 0; k < INPUT_TOKENS; k++) {
        if (before && t + k < N) { read_numbers<FOUR>(sum[k], before + (t + k) * C + c, C - c); }
    }
    for (int64_t first = 0; first < E; first += INPUT_EXPERTS) {
        const int count = (int)least(INPUT_EXPERTS, E - first);
        for (int i = (int)threadIdx.x; i < INPUT_TOKENS * INPUT_EXPERTS; i += THREADS) {
            const int k = i / INPUT_EXPERTS, e = i % INPUT_EXPERTS;
            factors[k][e] = t + k < N && e < count ? dlogits[(t + k) * E + first + e] : 0.0f;
        }
        __syncthreads();
        for (int e = 0; e < count; e++) {
            float w[FOUR];
            read_numbers<FOUR>(w, weight + (first + e) * C + c, C - c);
            UNROLL for (int k = 0; k < INPUT_TOKENS; k++) {
                const float by = factors[k][e];
                UNROLL for (int j = 0; j < FOUR; j++) {
                    if (by != 0.0f) { sum[k][j] += by * w[j]; }
                }
            }
        }
        __syncthreads();
    }
    UNROLL for (int k = 0; k < INPUT_TOKENS; k++) {
        if (t + k < N) { write_numbers<FOUR>(dx + (t + k) * C + c, sum[k], C - c); }
    }
}
static inline void ops_route_backward_input(Stream *s, Real *dx, const Real *before, float *p,
                                            Route route, const Real *weight, int64_t C,
                                            Router router, RouterLosses losses) {
    launch(s, router_dlogits_kernel, blocks_for(route.N * router.groups, WARPS), p, route, router,
           losses);
    const dim3 grid(blocks_for(route.N, INPUT_TOKENS), blocks_for(C, THREADS * FOUR));
    LAUNCH_REAL(s, router_input_kernel, grid, dx, before, p, weight, route.N, router.experts, C);
}

// sums(E, C) [+]= dlogits^T in of the tokens from blockIdx.z * each on. A warp takes every eighth
// of them, a lane four channels. accumulate: only if all tokens are in one part.
template <class R>
__global__ void router_weight_kernel(float *sums, const float *dlogits, const R *in, int64_t N,
                                     int64_t E, int64_t C, int64_t each, bool accumulate) {
    __shared__ float of_warps[WARPS][WEIGHT_EXPERTS][WEIGHT_CHANNELS];
    const int warp = (int)threadIdx.x / 32, column = (int)threadIdx.x % 32 * FOUR;
    const int64_t first = (int64_t)blockIdx.x * WEIGHT_CHANNELS, left = C - first - column,
                  expert = (int64_t)blockIdx.y * WEIGHT_EXPERTS,
                  end = least((int64_t)(blockIdx.z + 1) * each, N);
    float sum[WEIGHT_EXPERTS][FOUR] = {};
    for (int64_t t = (int64_t)blockIdx.z * each + warp; t < end; t += WARPS) {
        float x[FOUR];
        read_numbers<FOUR>(x, in + t * C + first + column, left);
        UNROLL for (int k = 0; k < WEIGHT_EXPERTS; k++) {
            const float by = expert + k < E ? dlogits[t * E + expert + k] : 0.0f;
            UNROLL for (int j = 0; j < FOUR; j++) {
                if (by != 0.0f) { sum[k][j] += by * x[j]; }
            }
        }
    }
    UNROLL for (int k = 0; k < WEIGHT_EXPERTS; k++) {
        write_numbers<FOUR>(&of_warps[warp][k][column], sum[k], FOUR);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < WEIGHT_EXPERTS * WEIGHT_CHANNELS; i += THREADS) {
        const int64_t e = expert + i / WEIGHT_CHANNELS, c = first + i % WEIGHT_CHANNELS;
        if (e >= E || c >= C) { continue; }
        float *to = sums + ((int64_t)blockIdx.z * E + e) * C + c, total = accumulate ? *to : 0.0f;
        for (int w = 0; w < WARPS; w++) {
            total += of_warps[w][i / WEIGHT_CHANNELS][i % WEIGHT_CHANNELS];
        }
        *to = total;
    }
}
__global__ void router_weight_finish_kernel(float *dweight, const float *sums, int64_t parts,
                                            int64_t n, bool accumulate) {
    const int64_t i = thread_index();
    if (i >= n) { return; }
    float total = accumulate ? dweight[i] : 0.0f;
    for (int64_t part = 0; part < parts; part++) { total += sums[part * n + i]; }
    dweight[i] = total;
}
// Parts of the tokens, equally many in each, whose sums are added afterwards: at most so many.
static inline int64_t router_parts_most(int64_t N, int64_t E, int64_t C) {
    const int64_t blocks = max_i64(1, ceil_div(C, WEIGHT_CHANNELS) * ceil_div(E, WEIGHT_EXPERTS));
    return min_i64(ceil_div(WEIGHT_BLOCKS, blocks), ceil_div(N, WEIGHT_TOKENS));
}
static inline int64_t router_parts(int64_t N, int64_t E, int64_t C) {
    return N ? ceil_div(N, ceil_div(N, router_parts_most(N, E, C))) : 1;
}
// Enough for fewer rows, too, of which there may be more parts.
static inline int64_t experts_scratch_bytes(OpsShape shape) {
    const int64_t N = shape.rows * shape.T, parts = router_parts_most(N, shape.experts, shape.C);
    return max_i64(order_numbers(N * shape.choices),
                   parts > 1 ? parts * shape.experts * shape.C : 0) *
           4;
}
// Loads are whole numbers times the odd part of the number of experts, so their sums are exact.
__global__ void balance_gradient_kernel(float *dbias, const int32_t *loads, int64_t n,
                                        int64_t experts, int64_t odd, bool accumulate) {
    const int64_t e = thread_index();
    if (e >= experts) { return; }
    const double above = (double)(loads[e] * odd) - (double)n / (double)(experts / odd);
    dbias[e] = (accumulate ? dbias[e] : 0.0f) + (float)above * LOAD_UNIT;
}
static inline void ops_route_backward_weight(Stream *s, float *dweight, float *dbias,
                                             const float *dlogits, Route route,
                                             const int32_t *loads, const Real *in, int64_t C,
                                             Router router, bool accumulate) {
    const int64_t E = router.experts, N = route.N, parts = router_parts(N, E, C),
                  each = ceil_div(N, parts);
    float *sums = parts > 1 ? (float *)scratch(s) : dweight;
    assert(parts == 1 || parts * E * C * (int64_t)sizeof *sums <= scratch_bytes(s));
    const dim3 grid(blocks_for(C, WEIGHT_CHANNELS), blocks_for(E, WEIGHT_EXPERTS), (unsigned)parts);
    LAUNCH_REAL(s, router_weight_kernel, grid, sums, dlogits, in, N, E, C, each,
                accumulate && parts == 1);
    if (parts > 1) {
        launch(s, router_weight_finish_kernel, blocks_for(E * C, THREADS), dweight, sums, parts,
               E * C, accumulate);
    }
    int64_t odd = E;
    while (odd % 2 == 0) { odd /= 2; }
    launch(s, balance_gradient_kernel, blocks_for(E, THREADS), dbias, loads, N * route.choices, E,
           odd, accumulate);
}

// --- rows to experts, and back -------------------------------------------------------------------
template <class R>
__global__ void dispatch_kernel(R *rows, const R *in, const int32_t *place, int64_t n,
                                int64_t choices, int64_t C) {
    const RowPart at = row_part(C);
    float x[EACH];
    if (at.n >= n) { return; }
    read_numbers<EACH>(x, in + at.n / choices * C + at.c, C - at.c);
    write_numbers<EACH>(rows + place[at.n] * C + at.c, x, C - at.c);
}
static inline void ops_dispatch(Stream *s, Real *rows, const Real *in, Route route, int64_t C) {
    const int64_t n = route.N * route.choices;
    LAUNCH_REAL(s, dispatch_kernel, row_part_blocks(n, C), rows, in, route.place, n, route.choices,
                C);
}
// out = before (NULL: 0) + the sum of a token's rows, each times its weight (NULL: 1), in the order
// of its choices
template <class R>
__global__ void combine_rows_kernel(R *out, const R *before, const R *rows, const int32_t *place,
                                    const float *weight, int64_t N, int64_t choices, int64_t C) {
    const RowPart at = row_part(C);
    float x[EACH];
    float sum[EACH] = {};
    if (at.n >= N) { return; }
    if (before) { read_numbers<EACH>(sum, before + at.n * C + at.c, C - at.c); }
    for (int64_t i = at.n * choices; i < (at.n + 1) * choices; i++) {
        const float w = weight ? weight[i] : 1.0f;
        read_numbers<EACH>(x, rows + place[i] * C + at.c, C - at.c);
        UNROLL for (int j = 0; j < EACH; j++) { sum[j] += w * x[j]; }
    }
    write_numbers<EACH>(out + at.n * C + at.c, sum, C - at.c);
}
static inline void ops_dispatch_backward(Stream *s, Real *dx, const Real *before, const Real *drows,
                                         Route route, int64_t C) {
    const float *ones = NULL;
    LAUNCH_REAL(s, combine_rows_kernel, row_part_blocks(route.N, C), dx, before, drows, route.place,
                ones, route.N, route.choices, C);
}
static inline void ops_combine_rows(Stream *s, Real *out, const Real *rows, Route route,
                                    int64_t C) {
    const Real *nothing = NULL;
    LAUNCH_REAL(s, combine_rows_kernel, row_part_blocks(route.N, C), out, nothing, rows,
                route.place, route.weight, route.N, route.choices, C);
}
// A warp takes a choice.
template <class R>
__global__ void combine_rows_backward_kernel(R *drows, const R *dout, const R *rows, Route route,
                                             int64_t C) {
    const int64_t i = warp_index();
    const int lane = (int)threadIdx.x % 32;
    if (i >= route.N * route.choices) { return; }
    const int64_t row = route.place[i] * C, of_token = i / route.choices * C;
    const float w = route.weight[i];
    float dy[EACH], y[EACH], sum = 0.0f;
    for (int64_t c = lane * EACH; c < C; c += 32 * EACH) {
        read_numbers<EACH>(dy, dout + of_token + c, C - c);
        read_numbers<EACH>(y, rows + row + c, C - c);
        UNROLL for (int j = 0; j < EACH; j++) {
            sum += dy[j] * y[j];
            dy[j] *= w;
        }
        write_numbers<EACH>(drows + row + c, dy, C - c);
    }
    sum = warp_sum(sum);
    if (lane == 0) { route.dweight[i] = sum; }
}
static inline void ops_combine_rows_backward(Stream *s, Real *drows, const Real *dout,
                                             const Real *rows, Route route, int64_t C) {
    LAUNCH_REAL(s, combine_rows_backward_kernel, blocks_for(route.N * route.choices, WARPS), drows,
                dout, rows, route, C);
}

// --- experts -------------------------------------------------------------------------------------
// out(rows, OUT) = in(rows, IN) times the matrix of each row's expert, of OUT x IN numbers in all,
// which is stored as (IN, OUT), or transposed.
static inline void multiply_rows(Stream *s, Real *out, const Real *in, const Real *weight,
                                 ExpertRows rows, int64_t IN, int64_t OUT, bool transposed) {
    int64_t row = 0;
    for (int64_t i = 0; i < rows.sources * rows.experts; row += rows.counts[i++]) {
        const Product x = {.m = OUT,
                           .n = rows.counts[i],
                           .k = IN,
                           .d = real_at(out, row * OUT),
                           .a = real_at_const(weight, i % rows.experts * OUT * IN),
                           .b = real_at_const(in, row * IN),
                           .a_transposed = transposed,
                           .rows_vary = true};
        if (x.n) { plain_matmul(s, &x, NULL); }
    }
}
static inline void ops_experts_forward(Stream *s, Real *out, Real *gelu, const Real *in,
                                       const Real *weight, ExpertRows rows, int64_t C, int64_t OC,
                                       bool) {
    multiply_rows(s, out, in, weight, rows, C, OC, true);
    if (gelu) { map_reals(s, Gelu(), gelu, out, NULL, expert_rows_sum(rows) * OC); }
}
static inline void ops_experts_backward_input(Stream *s, Real *din, const Real *dout,
                                              const Real *weight, const Real *pre_gelu,
                                              ExpertRows rows, int64_t C, int64_t OC) {
    multiply_rows(s, din, dout, weight, rows, OC, C, false);
    if (pre_gelu) { map_reals(s, GeluBackward(), din, din, pre_gelu, expert_rows_sum(rows) * C); }
}
static inline void ops_experts_backward_weight(Stream *s, float *dweight, const Real *dout,
                                               const Real *in, ExpertRows rows, int64_t C,
                                               int64_t OC, bool accumulate) {
    int64_t row = 0;
    for (int64_t i = 0; i < rows.sources * rows.experts; row += rows.counts[i++]) {
        float *sums = dweight + i % rows.experts * OC * C;
        const bool adds = accumulate || i >= rows.experts; // to another source's
        const Product x = {.m = C,
                           .n = OC,
                           .k = rows.counts[i],
                           .d = sums,
                           .a = real_at_const(in, row * C),
                           .b = real_at_const(dout, row * OC),
                           .b_transposed = true,
                           .out_fp32 = true,
                           .accumulate = adds,
                           .rows_vary = true};
        if (x.k) {
            plain_matmul(s, &x, NULL);
        } else if (!adds) {
            ops_zero(s, sums, (size_t)(OC * C) * sizeof *sums);
        }
    }
}

#endif
