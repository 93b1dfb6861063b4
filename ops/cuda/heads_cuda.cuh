// heads_cuda.cuh: rotary positions, and the norm of each head of q and k, on a GPU. Part of
// ops_cuda.cuh. The contract is ops.h.
//
// Plan     A warp takes a token. So many of its lanes, a power of two, have a head of queries, keys
//          or values at a time, each lane EACH pairs of it. The cosines and sines of these pairs
//          are computed once for all heads. The table of frequencies is an argument of the kernel.
// Reads    Each kernel is made twice. WHOLE is for heads whose pairs come in whole pieces, at
//          multiples of 16 bytes: it has no branches around its reads, so none waits for another.
#ifndef HEADS_CUDA_CUH
#define HEADS_CUDA_CUH

enum { HEAD_NORM_PARTS = 256 }; // partial sums of a weight's gradient, at most

// EACH pairs: their lower and higher elements.
typedef struct {
    float low[EACH], high[EACH];
} Pairs;
typedef struct {
    int lanes, first; // of a head; the first head that this lane has
    int p, left;      // its pairs, from p on; how many the head has from there on
    Pairs turn;       // their cosines (low) and sines (high) at the lane's token
} HeadLane;
__device__ HeadLane head_lane(int D) {
    HeadLane l = {};
    for (l.lanes = 1; l.lanes * EACH < D / 2;) { l.lanes *= 2; }
    l.first = (int)threadIdx.x % 32 / l.lanes;
    l.p = (int)threadIdx.x % l.lanes * EACH;
    l.left = D / 2 - l.p;
    return l;
}
static_assert(32 * EACH >= ROTARY_PAIRS, "a warp has lanes for all pairs of a head");
// Computes the turns at the position of token n. back: by the negative angles.
__device__ void find_turns(HeadLane *l, const AttentionShape &a, const Rotary &r, int64_t n,
                           bool back) {
    const float position = (float)(a.first + n % a.T);
    UNROLL for (int j = 0; j < EACH; j++) {
        const float angle = position * r.frequency[j < l->left ? l->p + j : 0];
        sincosf(back ? -angle : angle, &l->turn.high[j], &l->turn.low[j]);
    }
}
__device__ void turn_pairs(Pairs *x, const HeadLane &l) {
    UNROLL for (int j = 0; j < EACH; j++) {
        const float low = x->low[j] * l.turn.low[j] - x->high[j] * l.turn.high[j];
        x->high[j] = x->high[j] * l.turn.low[j] + x->low[j] * l.turn.high[j];
        x->low[j] = low;
    }
}
// Returns the lane's pairs of the head at p; zeros beyond its end.
template <bool WHOLE, class R>
__device__ Pairs read_pairs(const R *p, int pairs, const HeadLane &l) {
    Pairs x;
    if (WHOLE) { // lanes beyond the end read, too
        const R *from = p + (l.left > 0 ? l.p : 0);
        read_parts<EACH>(x.low, from);
        read_parts<EACH>(x.high, from + pairs);
    } else {
        read_numbers<EACH>(x.low, p + l.p, l.left);
        read_numbers<EACH>(x.high, p + pairs + l.p, l.left);
    }
    UNROLL for (int j = 0; j < EACH; j++) {
        const bool mine = j < l.left;
        x.low[j] = mine ? x.low[j] : 0.0f;
        x.high[j] = mine ? x.high[j] : 0.0f;
    }
    return x;
}
template <class R> __device__ void write_pairs(R *p, int pairs, const HeadLane &l, const Pairs &x) {
    write_numbers<EACH>(p + l.p, x.low, l.left);
    write_numbers<EACH>(p + pairs + l.p, x.high, l.left);
}
// x *= factor and the gain of a norm
template <bool WHOLE, class R>
__device__ void scale_pairs(Pairs *x, float factor, const R *weight, const HeadLane &l, int pairs) {
    Pairs gains;
    if (weight) { gains = read_pairs<WHOLE>(weight, pairs, l); }
    UNROLL for (int j = 0; j < EACH; j++) {
        x->low[j] *= factor * (weight ? gains.low[j] : 1.0f);
        x->high[j] *= factor * (weight ? gains.high[j] : 1.0f);
    }
}
// The sum of x y over a head.
__device__ float head_product(const Pairs &x, const Pairs &y, int lanes) {
    float sum = 0.0f;
    UNROLL for (int j = 0; j < EACH; j++) { sum += x.low[j] * y.low[j] + x.high[j] * y.high[j]; }
    return lanes_reduce(sum, lanes, false);
}
// places: the addresses of all arrays of a kernel, or-ed.
#define LAUNCH_HEADS(s, kernel, grid, shape, places, ...)                                          \
    FOR_REAL(launch(s, (shape).D / 2 % EACH || (places) % 16 ? kernel<false, R> : kernel<true, R>, \
                    grid, __VA_ARGS__))

template <bool WHOLE, class R>
__global__ void __launch_bounds__(THREADS, 4)
    rotary_kernel(R *qkv, AttentionShape a, Rotary r, bool back) {
    const int64_t n = warp_index();
    const int turned = (int)(a.heads + a.kv_heads), D = (int)a.D;
    HeadLane l = head_lane(D);
    if (n >= a.rows * a.T || l.left <= 0) { return; }
    qkv += n * (turned + a.kv_heads) * D;
    find_turns(&l, a, r, n, back);
    for (int head = l.first; head < turned; head += 32 / l.lanes) {
        Pairs x = read_pairs<WHOLE>(qkv + head * D, D / 2, l);
        turn_pairs(&x, l);
        write_pairs(qkv + head * D, D / 2, l, x);
    }
}
static inline void ops_rotary(Stream *s, Real *qkv, AttentionShape a, const Rotary *r, bool back) {
    LAUNCH_HEADS(s, rotary_kernel, blocks_for(a.rows * a.T, WARPS), a, PLACE(qkv), qkv, a, *r,
                 back);
}

// --- norms of heads ------------------------------------------------------------------------------
// Lanes go on to heads that do not exist until all have finished, as they compute sums together.
template <bool WHOLE, class R>
__global__ void __launch_bounds__(THREADS, 3)
    head_norm_kernel(R *out, float *rstd, const R *in, const R *q_weight, const R *k_weight,
                     AttentionShape a, Rotary rotary, float eps, float scale) {
    const int64_t n = warp_index();
    const int normed = (int)(a.heads + a.kv_heads), all = normed + (int)a.kv_heads, D = (int)a.D;
    if (n >= a.rows * a.T) { return; } // whole warps return
    HeadLane l = head_lane(D);
    find_turns(&l, a, rotary, n, false);
    in += n * all * D;
    out += n * all * D;
    for (int next = 0; next < all; next += 32 / l.lanes) {
        const int head = next + l.first;
        Pairs x = read_pairs<WHOLE>(in + (head < all ? head : 0) * D, D / 2, l);
        const float r = 1.0f / sqrtf(head_product(x, x, l.lanes) / (float)D + eps);
        if (head < normed) {
            scale_pairs<WHOLE>(&x, r * scale, head < a.heads ? q_weight : k_weight, l, D / 2);
            turn_pairs(&x, l);
            if (l.p == 0) { rstd[n * normed + head] = r; }
        }
        if (head < all) { write_pairs(out + head * D, D / 2, l, x); }
    }
}
static inline void ops_head_norm_forward(Stream *s, Real *out, float *rstd, const Real *in,
                                         const Real *q_weight, const Real *k_weight,
                                         const HeadNorm *h) {
    LAUNCH_HEADS(s, head_norm_kernel, blocks_for(h->shape.rows * h->shape.T, WARPS), h->shape,
                 PLACE(out) | PLACE(in) | PLACE(q_weight) | PLACE(k_weight), out, rstd, in,
                 q_weight, k_weight, h->shape, *h->rotary, h->eps, h->scale);
}

// With h = x rstd and g = dout, turned back, * weight * scale: dx = rstd (g - h average(g h)).
template <bool WHOLE, class R>
__global__ void __launch_bounds__(THREADS, 3)
    head_norm_backward_kernel(R *din, const R *dout, const R *in, const R *q_weight,
                              const R *k_weight, const float *rstd, AttentionShape a, Rotary rotary,
                              float scale) {
    const int64_t n = warp_index();
    const int normed = (int)(a.heads + a.kv_heads), all = normed + (int)a.kv_heads, D = (int)a.D;
    if (n >= a.rows * a.T) { return; }
    HeadLane l = head_lane(D);
    find_turns(&l, a, rotary, n, true);
    in += n * all * D;
    dout += n * all * D;
    din += n * all * D;
    for (int next = 0; next < all; next += 32 / l.lanes) {
        const int head = next + l.first, at = (head < all ? head : 0) * D;
        Pairs g = read_pairs<WHOLE>(dout + at, D / 2, l);
        const Pairs x = read_pairs<WHOLE>(in + at, D / 2, l);
        if (head < normed) {
            turn_pairs(&g, l);
            scale_pairs<WHOLE>(&g, scale, head < a.heads ? q_weight : k_weight, l, D / 2);
        }
        const float product = head_product(g, x, l.lanes);
        if (head < normed) {
            const float r = rstd[n * normed + head], gh_mean = product * r / (float)D;
            UNROLL for (int j = 0; j < EACH; j++) {
                g.low[j] = r * (g.low[j] - x.low[j] * r * gh_mean);
                g.high[j] = r * (g.high[j] - x.high[j] * r * gh_mean);
            }
        }
        if (head < all) { write_pairs(din + at, D / 2, l, g); }
    }
}
static inline void ops_head_norm_backward_input(Stream *s, Real *din, const Real *dout,
                                                const Real *in, const Real *q_weight,
                                                const Real *k_weight, const float *rstd,
                                                const HeadNorm *h) {
    LAUNCH_HEADS(s, head_norm_backward_kernel, blocks_for(h->shape.rows * h->shape.T, WARPS),
                 h->shape, PLACE(din) | PLACE(dout) | PLACE(in) | PLACE(q_weight) | PLACE(k_weight),
                 din, dout, in, q_weight, k_weight, rstd, h->shape, *h->rotary, h->scale);
}

// What tokens blockIdx.x * each .. (blockIdx.x + 1) * each - 1 give to the gradients of the weights
// of q and k. A warp takes every WARPS-th of them; its lanes' sums, then those of the warps, are
// added in order.
template <bool WHOLE, class R>
__global__ void __launch_bounds__(THREADS, 3)
    head_norm_partials_kernel(float *q_sums, float *k_sums, int64_t stride, const R *dout,
                              const R *in, const float *rstd, AttentionShape a, Rotary rotary,
                              float scale, int64_t each) {
    __shared__ float sums[WARPS][2][2 * ROTARY_PAIRS];
    const int64_t end = least((blockIdx.x + 1) * each, a.rows * a.T);
    const int normed = (int)(a.heads + a.kv_heads), all = normed + (int)a.kv_heads, D = (int)a.D,
              warp = (int)threadIdx.x / 32;
    HeadLane l = head_lane(D);
    Pairs sum[2] = {};
    for (int64_t n = blockIdx.x * each + warp; n < end; n += WARPS) {
        find_turns(&l, a, rotary, n, true);
        for (int head = l.first; head < normed; head += 32 / l.lanes) {
            const int64_t at = (n * all + head) * D;
            const float factor = rstd[n * normed + head] * scale;
            Pairs g = read_pairs<WHOLE>(dout + at, D / 2, l);
            const Pairs x = read_pairs<WHOLE>(in + at, D / 2, l);
            turn_pairs(&g, l);
            UNROLL for (int k = 0; k < 2; k++) {
                const float used = (head < a.heads) == (k == 0) ? factor : 0.0f;
                UNROLL for (int j = 0; j < EACH; j++) {
                    sum[k].low[j] += g.low[j] * (x.low[j] * used);
                    sum[k].high[j] += g.high[j] * (x.high[j] * used);
                }
            }
        }
    }
    UNROLL for (int k = 0; k < 2; k++) {
        for (int d = l.lanes; d < 32; d *= 2) {
            UNROLL for (int j = 0; j < EACH; j++) {
                sum[k].low[j] += __shfl_xor_sync(ALL_LANES, sum[k].low[j], d);
                sum[k].high[j] += __shfl_xor_sync(ALL_LANES, sum[k].high[j], d);
            }
        }
        if (l.first == 0) { write_pairs(sums[warp][k], D / 2, l, sum[k]); }
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < 2 * D; i += THREADS) {
        float total = 0.0f, *to = i < D ? q_sums : k_sums;
        for (int w = 0; w < WARPS; w++) { total += sums[w][i / D][i % D]; }
        to[blockIdx.x * stride + i % D] = total;
    }
}
static inline void head_norm_partials(Stream *s, float *q_sums, float *k_sums, int64_t stride,
                                      const Real *dout, const Real *in, const float *rstd,
                                      const HeadNorm *h, int64_t parts, int64_t each) {
    LAUNCH_HEADS(s, head_norm_partials_kernel, (unsigned)parts, h->shape, PLACE(dout) | PLACE(in),
                 q_sums, k_sums, stride, dout, in, rstd, h->shape, *h->rotary, h->scale, each);
}
static inline void ops_head_norm_backward_weight(Stream *s, float *dq_weight, float *dk_weight,
                                                 const Real *dout, const Real *in,
                                                 const float *rstd, const HeadNorm *h,
                                                 bool accumulate) {
    float *partials = (float *)scratch(s);
    const int64_t N = h->shape.rows * h->shape.T, D = h->shape.D,
                  each = max_i64(WARPS, ceil_div(N, HEAD_NORM_PARTS)), parts = ceil_div(N, each);
    assert(parts * 2 * D * (int64_t)sizeof(float) <= scratch_bytes(s));
    head_norm_partials(s, partials, partials + D, 2 * D, dout, in, rstd, h, parts, each);
    column_finish(s, dq_weight, dk_weight, partials, parts, D, accumulate);
}

#endif
