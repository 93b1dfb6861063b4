// noise_cpu.h: noise on the CPU. The contract is in ops.h, the definition of the numbers in
// noise.h.
//
// Plan    Words are made in tiles that stay in the L1 cache. ChaCha20 computes as many blocks at a
//         time as a vector has lanes, one block per lane; with AVX-512 two such vectors at a time.
//         Then the words are transposed into the stream's order. A loop over pairs of words
//         computes the normal numbers and adds them.
//         Words beyond the last element are discarded, so no element depends on where a slice
//         starts or ends.
// Cipher  It is our own instead of libsodium's. On AVX-512, libsodium's stream (which uses AVX2)
//         would make the whole operation take 1.65 times as long; with AVX2 the two are equally
//         fast. test_noise.c compares it with libsodium and with the vectors of RFC 8439. No branch
//         in it depends on a secret.
#ifndef NOISE_CPU_H
#define NOISE_CPU_H

#include "ops/cpu/device_cpu.h" // the team, polling, the vectors' width

// Words in a tile; BLOCK is a multiple of it. Chains of vectors that are computed side by side: in
// a chain each operation waits for the one before, so a second chain fills the gaps. Two chains
// need all 32 registers of AVX-512.
enum { NOISE_TILE = 1024, CHAINS = LANES == 16 ? 2 : 1 };
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

// On entry, w[i] has word i of each block; on return, blocks are contiguous. A stage moves the
// words in the first half of all positions to even positions, and those in the second half to odd
// ones. So the highest bit of a position becomes the lowest. After four stages, the bits of i are
// below those of the lane.
static inline void noise_transpose(Words w[NOISE_BLOCK]) {
    Words low = {0}, high = {0}; // lower and upper halves of two vectors, interleaved
    for (int l = 0; l < LANES; l++) {
        low[l] = (uint32_t)(l / 2 + l % 2 * LANES);
        high[l] = low[l] + LANES / 2;
    }
    for (int stage = 0; stage < 4; stage++) {
        Words from[NOISE_BLOCK];
        for (int i = 0; i < NOISE_BLOCK; i++) { from[i] = w[i]; }
        for (int i = 0; i < NOISE_BLOCK; i++) {
            w[i] =
                __builtin_shuffle(from[i / 2], from[i / 2 + NOISE_BLOCK / 2], i % 2 ? high : low);
        }
    }
}
static inline void noise_tile(uint32_t words[NOISE_TILE], const uint32_t first_state[NOISE_BLOCK]) {
    uint32_t state[NOISE_BLOCK];
    const Words zeros = {0};
    Words lane = zeros, w[CHAINS][NOISE_BLOCK];
    memcpy(state, first_state, sizeof state);
    for (int l = 0; l < LANES; l++) { lane[l] = (uint32_t)l; }
    for (int64_t at = 0; at < NOISE_TILE; at += LANES * NOISE_BLOCK * CHAINS) {
        for (int c = 0; c < CHAINS; c++) {
            for (int i = 0; i < NOISE_BLOCK; i++) { w[c][i] = zeros + state[i]; }
            w[c][12] += lane + (uint32_t)(c * LANES);
        }
        for (int round = 0; round < CHACHA20_ROUNDS; round += 2) {
            for (int c = 0; c < CHAINS; c++) { CHACHA20_TWO_ROUNDS(w[c]); }
        }
        for (int c = 0; c < CHAINS; c++, state[12] += LANES) {
            for (int i = 0; i < NOISE_BLOCK; i++) { w[c][i] += state[i]; }
            w[c][12] += lane;
            noise_transpose(w[c]);
        }
        memcpy(words + at, w, sizeof w);
    }
}
static inline void noise_add_tile(float *x, const uint32_t *words, int64_t n, NoiseScale scale) {
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) {
        float z0, z1;
        noise_normals(words[2 * i], words[2 * i + 1], &z0, &z1);
        x[2 * i] = noise_add(x[2 * i], z0, scale);
        x[2 * i + 1] = noise_add(x[2 * i + 1], z1, scale);
    }
    if (n % 2) {
        float z0, z1;
        noise_normals(words[n - 1], words[n], &z0, &z1);
        x[n - 1] = noise_add(x[n - 1], z0, scale);
    }
}
static inline void scale_block(float *x, int64_t n, float scale) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) { x[i] *= scale; }
}
static inline void ops_add_noise(Stream *s, float *x, int64_t first, int64_t n, NoiseStream noise,
                                 float deviation, float scale) {
    const NoiseScale how = noise_scale(deviation, scale);
    uint32_t nonce[3], start[NOISE_BLOCK];
    assert(first % NOISE_BLOCK == 0);
    noise_nonce(nonce, &noise);
    chacha20_state(start, noise.key, (uint32_t)(first / NOISE_BLOCK), nonce);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
        const int64_t end = min_i64(n, (b + 1) * BLOCK);
        for (int64_t at = b * BLOCK; at < end; at += NOISE_TILE) {
            uint32_t state[NOISE_BLOCK], words[NOISE_TILE];
            const int64_t count = min_i64(end - at, NOISE_TILE);
            if (deviation == 0.0f) {
                scale_block(x + at, count, scale);
                continue;
            }
            memcpy(state, start, sizeof state);
            state[12] += (uint32_t)(at / NOISE_BLOCK);
            noise_tile(words, state);
            noise_add_tile(x + at, words, count, how);
        }
        poll_after_block(s, b);
    }
}

#endif
