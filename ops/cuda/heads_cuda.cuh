// heads_cuda.cuh: rotary positions, and the norm of each head of q and k, on a GPU. Part of
// ops_cuda.cuh. The contract is ops.h.
//
// Plan     A warp takes a token. Its lanes share its heads, and compute the cosines and sines of
//          their pairs once for all heads. The table of frequencies is an argument of the kernel.
#ifndef HEADS_CUDA_CUH
#define HEADS_CUDA_CUH

typedef struct {
    float cosine, sine;
} Turn;
// The turn of a pair at the position of token n. back: by the negative angle.
__device__ Turn turn_of(const Rotary &r, AttentionShape a, int64_t n, int64_t pair, bool back) {
    const float angle = (float)(a.first + n % a.T) * r.frequency[pair];
    const Turn t = {cosf(angle), back ? -sinf(angle) : sinf(angle)};
    return t;
}
__device__ float turned_low(Turn t, float low, float high) {
    return low * t.cosine - high * t.sine;
}
__device__ float turned_high(Turn t, float low, float high) {
    return high * t.cosine + low * t.sine;
}

// A warp takes a token. So many lanes, a power of two, have a head of queries, keys or values at a
// time; a lane has WIDE pairs of it, from p on, and their turns.
typedef struct {
    int64_t n, rows; // the token; tokens of all
    int lanes, first, p, left;
    Turn turn[WIDE];
} HeadLane;
__device__ HeadLane head_lane(const AttentionShape &a, const Rotary &r, bool back) {
    const int pairs = (int)a.D / 2;
    HeadLane l = {};
    l.n = warp_index();
    l.rows = a.rows * a.T;
    for (l.lanes = 1; l.lanes * WIDE < pairs;) { l.lanes *= 2; }
    l.first = (int)threadIdx.x % 32 / l.lanes;
    l.p = (int)threadIdx.x % l.lanes * WIDE;
    l.left = pairs - l.p;
    UNROLL for (int j = 0; j < WIDE; j++) {
        l.turn[j] = turn_of(r, a, l.n, j < l.left ? l.p + j : 0, back);
    }
    return l;
}
// The pairs of a lane: their lower and higher elements.
typedef struct {
    float low[WIDE], high[WIDE];
} Pairs;
template <class R> __device__ Pairs read_pairs(const R *head, const HeadLane &l, int64_t pairs) {
    Pairs x;
    read_numbers<WIDE>(x.low, head + l.p, l.left);
    read_numbers<WIDE>(x.high, head + pairs + l.p, l.left);
    return x;
}
template <class R>
__device__ void write_pairs(R *head, const Pairs &x, const HeadLane &l, int64_t pairs) {
    write_numbers<WIDE>(head + l.p, x.low, l.left);
    write_numbers<WIDE>(head + pairs + l.p, x.high, l.left);
}
__device__ void turn_pairs(Pairs *x, const HeadLane &l) {
    UNROLL for (int j = 0; j < WIDE; j++) {
        const float low = turned_low(l.turn[j], x->low[j], x->high[j]);
        x->high[j] = turned_high(l.turn[j], x->low[j], x->high[j]);
        x->low[j] = low;
    }
}
// x *= factor and the gain of a norm
template <class R>
__device__ void scale_pairs(Pairs *x, float factor, const R *weight, const HeadLane &l,
                            int64_t pairs) {
    Pairs gains;
    if (weight) { gains = read_pairs(weight, l, pairs); }
    UNROLL for (int j = 0; j < WIDE; j++) {
        x->low[j] *= factor * (weight ? gains.low[j] : 1.0f);
        x->high[j] *= factor * (weight ? gains.high[j] : 1.0f);
    }
}
// The sum of x y over a head.
__device__ float head_product(const Pairs &x, const Pairs &y, int lanes) {
    float sum = 0.0f;
    UNROLL for (int j = 0; j < WIDE; j++) { sum += x.low[j] * y.low[j] + x.high[j] * y.high[j]; }
    return lanes_reduce(sum, lanes, false);
}

template <class R> __global__ void rotary_kernel(R *qkv, AttentionShape a, Rotary r, bool back) {
    const HeadLane l = head_lane(a, r, back);
    const int64_t turned = a.heads + a.kv_heads;
    if (l.n >= l.rows) { return; }
    R *token = qkv + l.n * (turned + a.kv_heads) * a.D;
    for (int64_t head = l.first; head < turned; head += 32 / l.lanes) {
        Pairs x = read_pairs(token + head * a.D, l, a.D / 2);
        turn_pairs(&x, l);
        write_pairs(token + head * a.D, x, l, a.D / 2);
    }
}
static_assert(32 * WIDE >= ROTARY_PAIRS, "a warp has lanes for all pairs of a head");
static inline void ops_rotary(Stream *s, Real *qkv, AttentionShape a, const Rotary *r, bool back) {
    LAUNCH_REAL(s, rotary_kernel, blocks_for(a.rows * a.T, WARPS), qkv, a, *r, back);
}

// --- norms of heads ------------------------------------------------------------------------------
template <class R>
__global__ void head_norm_kernel(R *out, float *rstd, const R *in, const R *q_weight,
                                 const R *k_weight, AttentionShape a, Rotary rotary, float eps,
                                 float scale) {
    HeadLane l = head_lane(a, rotary, false);
    const int64_t normed = a.heads + a.kv_heads, all = normed + a.kv_heads, pairs = a.D / 2;
    const int left = l.left;
    if (l.n >= l.rows) { return; } // whole warps return
    for (int64_t next = 0; next < all; next += 32 / l.lanes) {
        const int64_t head = next + l.first, at = (l.n * all + head) * a.D;
        l.left = head < all ? left : 0; // lanes without a head have zeros
        Pairs x = read_pairs(in + at, l, pairs);
        const float r = 1.0f / sqrtf(head_product(x, x, l.lanes) / (float)a.D + eps);
        if (head < normed) {
            scale_pairs(&x, r * scale, head < a.heads ? q_weight : k_weight, l, pairs);
            turn_pairs(&x, l);
            if (l.p == 0) { rstd[l.n * normed + head] = r; }
        }
        write_pairs(out + at, x, l, pairs);
    }
}
static inline void ops_head_norm_forward(Stream *s, Real *out, float *rstd, const Real *in,
                                         const Real *q_weight, const Real *k_weight,
                                         const HeadNorm *h) {
    LAUNCH_REAL(s, head_norm_kernel, blocks_for(h->shape.rows * h->shape.T, WARPS), out, rstd, in,
                q_weight, k_weight, h->shape, *h->rotary, h->eps, h->scale);
}

// With h = x rstd and g = dout, turned back, * weight * scale: dx = rstd (g - h average(g h)).
template <class R>
__global__ void head_norm_backward_kernel(R *din, const R *dout, const R *in, const R *q_weight,
                                          const R *k_weight, const float *rstd, AttentionShape a,
                                          Rotary rotary, float scale) {
    HeadLane l = head_lane(a, rotary, true);
    const int64_t normed = a.heads + a.kv_heads, all = normed + a.kv_heads, pairs = a.D / 2;
    const int left = l.left;
    if (l.n >= l.rows) { return; }
    for (int64_t next = 0; next < all; next += 32 / l.lanes) {
        const int64_t head = next + l.first, at = (l.n * all + head) * a.D;
        l.left = head < all ? left : 0;
        Pairs g = read_pairs(dout + at, l, pairs);
        const Pairs x = read_pairs(in + at, l, pairs);
        if (head < normed) {
            turn_pairs(&g, l);
            scale_pairs(&g, scale, head < a.heads ? q_weight : k_weight, l, pairs);
        }
        const float product = head_product(g, x, l.lanes);
        if (head < normed) {
            const float r = rstd[l.n * normed + head], gh_mean = product * r / (float)a.D;
            UNROLL for (int j = 0; j < WIDE; j++) {
                g.low[j] = r * (g.low[j] - x.low[j] * r * gh_mean);
                g.high[j] = r * (g.high[j] - x.high[j] * r * gh_mean);
            }
        }
        write_pairs(din + at, g, l, pairs);
    }
}
static inline void ops_head_norm_backward_input(Stream *s, Real *din, const Real *dout,
                                                const Real *in, const Real *q_weight,
                                                const Real *k_weight, const float *rstd,
                                                const HeadNorm *h) {
    LAUNCH_REAL(s, head_norm_backward_kernel, blocks_for(h->shape.rows * h->shape.T, WARPS), din,
                dout, in, q_weight, k_weight, rstd, h->shape, *h->rotary, h->scale);
}

// For part p = blockIdx.y, sums over tokens p * each .. (p + 1) * each - 1 and over the heads of q
// (blockIdx.z = 0) or of k: what they give to the gradient of the weight. Rows of threads take
// tokens side by side; their sums are added in order.
template <class R>
__global__ void head_norm_partials_kernel(float *q_sums, float *k_sums, int64_t stride,
                                          const R *dout, const R *in, const float *rstd,
                                          AttentionShape a, Rotary rotary, float scale,
                                          int64_t each) {
    __shared__ float sums[2][COLUMN_ROWS][32];
    const bool of_k = blockIdx.z;
    const int64_t p = (int64_t)blockIdx.x * 32 + threadIdx.x, pairs = a.D / 2,
                  heads = of_k ? a.kv_heads : a.heads, first = of_k ? a.heads : 0,
                  end = p < pairs ? least((blockIdx.y + 1) * each, a.rows * a.T) : 0;
    float low = 0.0f, high = 0.0f;
    for (int64_t n = blockIdx.y * each + threadIdx.y; n < end; n += COLUMN_ROWS) {
        const Turn t = turn_of(rotary, a, n, p, true);
        for (int64_t head = first; head < first + heads; head++) {
            const int64_t at = (n * (a.heads + 2 * a.kv_heads) + head) * a.D + p;
            const float factor = rstd[n * (a.heads + a.kv_heads) + head] * scale,
                        dy_low = read(dout + at), dy_high = read(dout + at + pairs);
            low += turned_low(t, dy_low, dy_high) * (read(in + at) * factor);
            high += turned_high(t, dy_low, dy_high) * (read(in + at + pairs) * factor);
        }
    }
    sums[0][threadIdx.y][threadIdx.x] = low;
    sums[1][threadIdx.y][threadIdx.x] = high;
    __syncthreads();
    if (threadIdx.y > 1 || p >= pairs) { return; }
    // The first row of threads finishes the lower halves, the second the higher ones.
    float total = 0.0f, *to = of_k ? k_sums : q_sums;
    for (int y = 0; y < COLUMN_ROWS; y++) { total += sums[threadIdx.y][y][threadIdx.x]; }
    to[blockIdx.y * stride + threadIdx.y * pairs + p] = total;
}
static inline void head_norm_partials(Stream *s, float *q_sums, float *k_sums, int64_t stride,
                                      const Real *dout, const Real *in, const float *rstd,
                                      const HeadNorm *h, int64_t parts, int64_t each) {
    const dim3 grid(blocks_for(h->shape.D / 2, 32), (unsigned)parts, 2), block(32, COLUMN_ROWS);
    FOR_REAL(launch_with(s, head_norm_partials_kernel<R>, grid, block, 0, q_sums, k_sums, stride,
                         dout, in, rstd, h->shape, *h->rotary, h->scale, each));
}
static inline void ops_head_norm_backward_weight(Stream *s, float *dq_weight, float *dk_weight,
                                                 const Real *dout, const Real *in,
                                                 const float *rstd, const HeadNorm *h,
                                                 bool accumulate) {
    float *partials = (float *)scratch(s);
    const int64_t N = h->shape.rows * h->shape.T, D = h->shape.D,
                  each = max_i64(COLUMN_ROWS, ceil_div(N, COLUMN_PARTS)), parts = ceil_div(N, each);
    assert(parts * 2 * D * (int64_t)sizeof(float) <= scratch_bytes(s));
    head_norm_partials(s, partials, partials + D, 2 * D, dout, in, rstd, h, parts, each);
    column_finish(s, dq_weight, dk_weight, partials, parts, D, accumulate);
}

#endif
