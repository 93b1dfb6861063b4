// heads_cuda.cuh: rotary positions, and the norm of each head of q and k, on a GPU. Part of
// ops_cuda.cuh. The contract is ops.h.
//
// Plan     A warp takes a token, or a head of one for the norms; each lane has up to 4 pairs of
//          elements, and computes their cosines and sines. The table of frequencies is an argument
//          of the kernel.
#ifndef HEADS_CUDA_CUH
#define HEADS_CUDA_CUH

enum { LANE_PAIRS = ROTARY_PAIRS / 32 }; // pairs of a lane, at most

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

// A warp takes a token. A lane computes the turns of WIDE pairs once, and turns them in every head;
// so many lanes share a head, and the others take the next heads.
template <class R> __global__ void rotary_kernel(R *qkv, AttentionShape a, Rotary r, bool back) {
    const int pairs = (int)a.D / 2, lanes = (pairs + WIDE - 1) / WIDE, at_once = 32 / lanes,
              lane = (int)threadIdx.x % 32, p = lane % lanes * WIDE, first = lane / lanes,
              left = pairs - p;
    const int64_t n = warp_index();
    if (n >= a.rows * a.T || first >= at_once) { return; }
    Turn turn[WIDE];
    float low[WIDE], high[WIDE];
    UNROLL for (int j = 0; j < WIDE; j++) {
        turn[j] = turn_of(r, a, n, j < left ? p + j : p, back);
    }
    R *token = qkv + n * (a.heads + 2 * a.kv_heads) * a.D + p;
    for (int64_t head = first; head < a.heads + a.kv_heads; head += at_once) {
        R *x = token + head * a.D;
        read_numbers<WIDE>(low, x, left);
        read_numbers<WIDE>(high, x + pairs, left);
        UNROLL for (int j = 0; j < WIDE; j++) {
            const float turned = turned_low(turn[j], low[j], high[j]);
            high[j] = turned_high(turn[j], low[j], high[j]);
            low[j] = turned;
        }
        write_numbers<WIDE>(x, low, left);
        write_numbers<WIDE>(x + pairs, high, left);
    }
}
static_assert(32 * WIDE >= ROTARY_PAIRS, "a warp has lanes for all pairs of a head");
static inline void ops_rotary(Stream *s, Real *qkv, AttentionShape a, const Rotary *r, bool back) {
    LAUNCH_REAL(s, rotary_kernel, blocks_for(a.rows * a.T, WARPS), qkv, a, *r, back);
}

// --- norms of heads ------------------------------------------------------------------------------
// Which head of which token a warp has: of queries, of keys, or of values, which are copied.
typedef struct {
    int64_t n, head, at; // at: where the head begins in (rows, T, heads of all three, D)
    bool is_value, there;
} WarpHead;
__device__ WarpHead warp_head(const AttentionShape &a) {
    const int64_t all = a.heads + 2 * a.kv_heads, i = warp_index();
    WarpHead h = {};
    h.n = i / all;
    h.head = i % all;
    h.at = i * a.D;
    h.is_value = h.head >= a.heads + a.kv_heads;
    h.there = h.n < a.rows * a.T;
    return h;
}
template <class R> __device__ void copy_head(R *to, const R *from, int64_t D) {
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) { write(to + d, read(from + d)); }
}
template <class R>
__global__ void head_norm_kernel(R *out, float *rstd, const R *in, const R *q_weight,
                                 const R *k_weight, AttentionShape a, Rotary rotary, float eps,
                                 float scale) {
    const WarpHead h = warp_head(a);
    const int64_t lane = threadIdx.x % 32, pairs = a.D / 2;
    if (!h.there) { return; } // whole warps return
    if (h.is_value) {
        copy_head(out + h.at, in + h.at, a.D);
        return;
    }
    const R *x = in + h.at, *weight = h.head < a.heads ? q_weight : k_weight;
    float squares = 0.0f;
    for (int64_t d = lane; d < a.D; d += 32) { squares += read(x + d) * read(x + d); }
    const float r = 1.0f / sqrtf(warp_sum(squares) / (float)a.D + eps);
    for (int64_t p = lane; p < pairs; p += 32) {
        const Turn t = turn_of(rotary, a, h.n, p, false);
        const float low = read(x + p) * r * scale * gain(weight, p),
                    high = read(x + pairs + p) * r * scale * gain(weight, pairs + p);
        write(out + h.at + p, turned_low(t, low, high));
        write(out + h.at + pairs + p, turned_high(t, low, high));
    }
    if (lane == 0) { rstd[h.n * (a.heads + a.kv_heads) + h.head] = r; }
}
static inline int64_t head_norm_blocks(const AttentionShape *a) {
    return blocks_for(a->rows * a->T * (a->heads + 2 * a->kv_heads), WARPS);
}
static inline void ops_head_norm_forward(Stream *s, Real *out, float *rstd, const Real *in,
                                         const Real *q_weight, const Real *k_weight,
                                         const HeadNorm *h) {
    LAUNCH_REAL(s, head_norm_kernel, (unsigned)head_norm_blocks(&h->shape), out, rstd, in, q_weight,
                k_weight, h->shape, *h->rotary, h->eps, h->scale);
}

// With h = x rstd and g = dout, turned back, * weight * scale: dx = rstd (g - h average(g h)).
template <class R>
__global__ void head_norm_backward_kernel(R *din, const R *dout, const R *in, const R *q_weight,
                                          const R *k_weight, const float *rstd, AttentionShape a,
                                          Rotary rotary, float scale) {
    const WarpHead h = warp_head(a);
    const int64_t lane = threadIdx.x % 32, pairs = a.D / 2;
    if (!h.there) { return; }
    if (h.is_value) {
        copy_head(din + h.at, dout + h.at, a.D);
        return;
    }
    const R *x = in + h.at, *dy = dout + h.at, *weight = h.head < a.heads ? q_weight : k_weight;
    const float r = rstd[h.n * (a.heads + a.kv_heads) + h.head];
    float low[LANE_PAIRS], high[LANE_PAIRS], gx_sum = 0.0f;
    UNROLL for (int i = 0; i < LANE_PAIRS; i++) {
        const int64_t p = lane + 32 * i;
        if (p >= pairs) { continue; }
        const Turn t = turn_of(rotary, a, h.n, p, true);
        low[i] = turned_low(t, read(dy + p), read(dy + pairs + p)) * scale * gain(weight, p);
        high[i] =
            turned_high(t, read(dy + p), read(dy + pairs + p)) * scale * gain(weight, pairs + p);
        gx_sum += low[i] * read(x + p) + high[i] * read(x + pairs + p);
    }
    const float gh_mean = warp_sum(gx_sum) * r / (float)a.D;
    UNROLL for (int i = 0; i < LANE_PAIRS; i++) {
        const int64_t p = lane + 32 * i;
        if (p >= pairs) { continue; }
        write(din + h.at + p, r * (low[i] - read(x + p) * r * gh_mean));
        write(din + h.at + pairs + p, r * (high[i] - read(x + pairs + p) * r * gh_mean));
    }
}
static inline void ops_head_norm_backward_input(Stream *s, Real *din, const Real *dout,
                                                const Real *in, const Real *q_weight,
                                                const Real *k_weight, const float *rstd,
                                                const HeadNorm *h) {
    LAUNCH_REAL(s, head_norm_backward_kernel, (unsigned)head_norm_blocks(&h->shape), din, dout, in,
                q_weight, k_weight, rstd, h->shape, *h->rotary, h->scale);
}

// For part p = blockIdx.y, sums over tokens p * each .. (p + 1) * each - 1 and over the heads of q
// (blockIdx.z = 0) or of k: what they give to the gradient of the weight. Rows of threads take
// heads of tokens side by side; their sums are added in order.
template <class R>
__global__ void head_norm_partials_kernel(float *q_sums, float *k_sums, int64_t stride,
                                          const R *dout, const R *in, const float *rstd,
                                          AttentionShape a, Rotary rotary, float scale,
                                          int64_t each) {
    __shared__ float sums[2][COLUMN_ROWS][32];
    const bool of_k = blockIdx.z;
    const int64_t p = (int64_t)blockIdx.x * 32 + threadIdx.x, pairs = a.D / 2,
                  heads = of_k ? a.kv_heads : a.heads, first = of_k ? a.heads : 0,
                  end = least((blockIdx.y + 1) * each, a.rows * a.T) * heads;
    float low = 0.0f, high = 0.0f;
    for (int64_t i = blockIdx.y * each * heads + threadIdx.y; i < end && p < pairs;
         i += COLUMN_ROWS) {
        const int64_t n = i / heads, head = first + i % heads,
                      at = (n * (a.heads + 2 * a.kv_heads) + head) * a.D + p;
        const Turn t = turn_of(rotary, a, n, p, true);
        const float factor = rstd[n * (a.heads + a.kv_heads) + head] * scale,
                    dy_low = read(dout + at), dy_high = read(dout + at + pairs);
        low += turned_low(t, dy_low, dy_high) * (read(in + at) * factor);
        high += turned_high(t, dy_low, dy_high) * (read(in + at + pairs) * factor);
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
