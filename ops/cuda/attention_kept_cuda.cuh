// attention_kept_cuda.cuh: attention of the queries of new tokens to keys and values that are kept,
// on a GPU. Part of ops_cuda.cuh. The contract is ops.h.
//
// Plan     A block has one head of one query. Its warps take the positions in turns, each with a
//          running softmax of its own; at the end their sums are brought to one maximum and added
//          in the order of the warps.
#ifndef ATTENTION_KEPT_CUDA_CUH
#define ATTENTION_KEPT_CUDA_CUH

#include "ops/cuda/attention_cuda.cuh" // limits of a head

enum { LANE_CHANNELS = HEAD_MOST / 32 }; // elements of a head that a lane has, at most

template <class R>
__global__ void keep_keys_kernel(R *keys, R *values, const R *qkv, int64_t most, AttentionShape a) {
    const int64_t i = thread_index(), kept = 2 * a.kv_heads * a.D, t = i / kept, d = i % a.D,
                  head = i % kept / a.D, kv = head % a.kv_heads;
    if (t >= a.T) { return; }
    R *to = head < a.kv_heads ? keys : values;
    write(to + (kv * most + a.first + t) * a.D + d,
          read(qkv + t * (a.heads + 2 * a.kv_heads) * a.D + (a.heads + head) * a.D + d));
}
static inline void ops_keep_keys(Stream *s, KeyCache cache, const Real *qkv, AttentionShape a) {
    assert(a.rows == 1 && a.first + a.T <= cache.most);
    LAUNCH_REAL(s, keep_keys_kernel, blocks_for(a.T * 2 * a.kv_heads * a.D, THREADS), cache.keys,
                cache.values, qkv, cache.most, a);
}

template <class R>
__global__ void attention_kept_kernel(R *out, const R *qkv, const R *keys, const R *values,
                                      int64_t most, AttentionShape a, float scale) {
    __shared__ float tops[WARPS], totals[WARPS], sums[WARPS][HEAD_MOST];
    const int64_t t = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32,
                  warp = threadIdx.x / 32, at = head * a.kv_heads / a.heads * most * a.D;
    const R *q = qkv + t * (a.heads + 2 * a.kv_heads) * a.D + head * a.D;
    float query[LANE_CHANNELS], sum[LANE_CHANNELS], top = -INFINITY, total = 0.0f;
    UNROLL for (int i = 0; i < LANE_CHANNELS; i++) {
        const int64_t d = lane + 32 * i;
        query[i] = d < a.D ? scale * read(q + d) : 0.0f;
        sum[i] = 0.0f;
    }
    for (int64_t k = warp; k <= a.first + t; k += WARPS) {
        const R *key = keys + at + k * a.D, *value = values + at + k * a.D;
        float score = 0.0f;
        UNROLL for (int i = 0; i < LANE_CHANNELS; i++) {
            const int64_t d = lane + 32 * i;
            if (d < a.D) { score += query[i] * read(key + d); }
        }
        score = warp_sum(score);
        const float highest = fmaxf(top, score), before = expf(top - highest),
                    weight = expf(score - highest);
        top = highest;
        total = total * before + weight;
        UNROLL for (int i = 0; i < LANE_CHANNELS; i++) {
            const int64_t d = lane + 32 * i;
            if (d < a.D) { sum[i] = sum[i] * before + weight * read(value + d); }
        }
    }
    UNROLL for (int i = 0; i < LANE_CHANNELS; i++) { sums[warp][lane + 32 * i] = sum[i]; }
    if (lane == 0) {
        tops[warp] = top;
        totals[warp] = total;
    }
    __syncthreads();
    float highest = tops[0]; // finite: the first warp has the first position
    for (int w = 1; w < WARPS; w++) { highest = fmaxf(highest, tops[w]); }
    for (int64_t d = threadIdx.x; d < a.D; d += THREADS) {
        float of_all = 0.0f, weights = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            const float factor = expf(tops[w] - highest);
            of_all += factor * sums[w][d];
            weights += factor * totals[w];
        }
        write(out + (t * a.heads + head) * a.D + d, of_all / weights);
    }
}
static inline void ops_attention_kept(Stream *s, Real *out, const Real *qkv, KeyCache cache,
                                      AttentionShape a) {
    assert(a.rows == 1);
    LAUNCH_REAL(s, attention_kept_kernel, dim3((unsigned)a.T, (unsigned)a.heads), out, qkv,
                cache.keys, cache.values, cache.most, a, attention_sizes(&a).scale);
}

#endif
