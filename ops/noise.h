// noise.h: secret random numbers for privacy: ChaCha20 (RFC 8439), normal numbers computed from it,
// and the grid on which they are added. Both builds use this one definition and get the same bits:
// every multiply-add is an fmaf, so compilers have no choice of contraction.
//
// Stream  A NoiseStream is a key and a nonce, {domain << 24 | part, lower and upper half of the
//         step}. Its words are the key stream of RFC 8439 from block 0 on; each block has 16 words.
//         Domain, part and step are public. The key is not. The domains are:
//         gradient     Element i of storage `part` uses word i. The block counter is i / 16, so a
//                      storage must have fewer than 2^36 elements.
//         sampling     Draw i uses words 2i and 2i + 1. Part 0 draws the samples of a step. Draw i
//                      of part 1 assigns sample i to a micro-batch.
//         fingerprint  Words 0 and 1 identify a key. They reveal nothing about other streams,
//                      since no other use has this domain.
// Normal  Box-Muller on each pair of words (a, b): u = (a + (b' + 1/2) / 2^32) / 2^32, where b' is
//         b with its bytes reversed, angle = 2 pi (b >> 8) / 2^24, and z = sqrt(-2 ln u) {cos,
//         sin}(angle). The first byte of b' is the byte of b that the angle does not use; then the
//         angle's lowest bits follow. So 40 bits of the radius are independent of the angle, which
//         covers 7.5 sigma. Beyond that (one pair in 2^40) the radius continues to 9.5 sigma, but
//         depends on bits of the angle.
// Error   of z: at most 3e-7 of the radius r. If r < 1, also up to 2^-23 / r, since u is a float.
//         If r is about 2^-12, as for one pair in 2^25, the error is as large as r.
// Grid    x + deviation z is rounded to a multiple of a public power of two, D = 2^-12 to 2^-13 of
//         the deviation. The last bits of a plain floating-point sum reveal which x are possible
//         (arXiv 2107.10138, 2112.05307). On a grid, every point near x can be reached from every
//         x: about 2^50 of the 2^64 pairs lead to a point in the middle, and about 2^9 to a point
//         at 7.5 sigma. Only beyond 8.3 sigma, which one number in 10^16 reaches, are there points
//         that no pair leads to. From 2^11 deviations on, fp32 is coarser than D, and its own
//         numbers are the grid.
// Limits  z is not exactly normal, though the accountant assumes it; it is a function of 64 bits
//         with the error above, as in other libraries for private training. In this file no branch
//         and no address depends on a secret, but the time of a step may depend on its samples. The
//         program wipes its keys, but not copies that a compiler makes or that are swapped to disk.
#ifndef NOISE_H
#define NOISE_H

#include "base/base.h"

#include <sys/random.h> // getrandom, for keys

// What the noise of an element depends on, besides the element's number.
typedef struct {
    uint32_t key[8];
    // domain: the purpose, a NoiseDomain; part: a part of it below 2^24, such as a storage
    uint32_t domain, part;
    uint64_t step;
} NoiseStream;
typedef enum { NOISE_GRADIENT = 1, NOISE_SAMPLING, NOISE_FINGERPRINT } NoiseDomain;
enum { NOISE_BLOCK = 16 }; // words in a block

// --- ChaCha20 ------------------------------------------------------------------------------------
// The operands are words of one block, or vectors of the same word of several blocks.
#define CHACHA20_QUARTER(a, b, c, d)                                                               \
    (a += b, d ^= a, d = d << 16 | d >> 16, c += d, b ^= c, b = b << 12 | b >> 20, a += b, d ^= a, \
     d = d << 8 | d >> 24, c += d, b ^= c, b = b << 7 | b >> 25)
#define CHACHA20_TWO_ROUNDS(w)                                                                     \
    (CHACHA20_QUARTER(w[0], w[4], w[8], w[12]), CHACHA20_QUARTER(w[1], w[5], w[9], w[13]),         \
     CHACHA20_QUARTER(w[2], w[6], w[10], w[14]), CHACHA20_QUARTER(w[3], w[7], w[11], w[15]),       \
     CHACHA20_QUARTER(w[0], w[5], w[10], w[15]), CHACHA20_QUARTER(w[1], w[6], w[11], w[12]),       \
     CHACHA20_QUARTER(w[2], w[7], w[8], w[13]), CHACHA20_QUARTER(w[3], w[4], w[9], w[14]))
enum { CHACHA20_ROUNDS = 20 };
IN_KERNELS_TOO static inline void chacha20_state(uint32_t state[16], const uint32_t key[8],
                                                 uint32_t counter, const uint32_t nonce[3]) {
    // the constant "expand 32-byte k"
    state[0] = 0x61707865;
    state[1] = 0x3320646e;
    state[2] = 0x79622d32;
    state[3] = 0x6b206574;
    for (int i = 0; i < 8; i++) { state[4 + i] = key[i]; }
    state[12] = counter;
    for (int i = 0; i < 3; i++) { state[13 + i] = nonce[i]; }
}
IN_KERNELS_TOO static inline void chacha20_block(uint32_t out[16], const uint32_t key[8],
                                                 uint32_t counter, const uint32_t nonce[3]) {
    uint32_t start[16];
    chacha20_state(start, key, counter, nonce);
    for (int i = 0; i < 16; i++) { out[i] = start[i]; }
    for (int round = 0; round < CHACHA20_ROUNDS; round += 2) { CHACHA20_TWO_ROUNDS(out); }
    for (int i = 0; i < 16; i++) { out[i] += start[i]; }
}

IN_KERNELS_TOO static inline void noise_nonce(uint32_t nonce[3], const NoiseStream *s) {
    nonce[0] = s->domain << 24 | s->part;
    nonce[1] = (uint32_t)s->step;
    nonce[2] = (uint32_t)(s->step >> 32);
}
// Writes the 16 words of a block of the stream.
IN_KERNELS_TOO static inline void noise_words(uint32_t out[NOISE_BLOCK], const NoiseStream *s,
                                              uint32_t block) {
    uint32_t nonce[3];
    noise_nonce(nonce, s);
    chacha20_block(out, s->key, block, nonce);
}

// --- normal numbers ------------------------------------------------------------------------------
// Returns -2 ln u of a normal number u <= 1. u = 2^e (1 + f) with 1 + f between sqrt(1/2) and
// sqrt(2), and a minimax polynomial gives ln(1 + f) / f.
IN_KERNELS_TOO static inline float noise_minus_2_ln(float u) {
    uint32_t bits;
    memcpy(&bits, &u, 4);
    // 0x3f3504f3 is sqrt(1/2), so the bits from 23 up are e
    const uint32_t from_half = bits - 0x3f3504f3u;
    const int32_t e = (int32_t)from_half >> 23;
    bits -= (uint32_t)e << 23;
    float f;
    memcpy(&f, &bits, 4);
    f -= 1.0f;
    float p = -0.1744471937417984f;
    p = fmaf(p, f, 0.28733691573143005f);
    p = fmaf(p, f, -0.2990453243255615f);
    p = fmaf(p, f, 0.33124786615371704f);
    p = fmaf(p, f, -0.39913666248321533f);
    p = fmaf(p, f, 0.5000414848327637f);
    p = fmaf(p, f, -0.6666837334632874f);
    p = fmaf(p, f, 0.9999997615814209f);
    p = fmaf(p, f, -2.0f);
    return fmaf((float)e, -1.3862943611f, p * f);
}
// cos and sin of turn / 2^24 turns: the nearest quarter turn, and t = -1/2 to 1/2 of a quarter from
// it.
IN_KERNELS_TOO static inline void noise_circle(uint32_t turn, float *cosine, float *sine) {
    const uint32_t quarter = (turn + (1u << 21)) >> 22;
    const float t = (float)(int32_t)(turn - (quarter << 22)) * 0x1p-22f, y = t * t;
    float s = -0.00460165785625577f, c = 0.0009037666022777557f;
    s = fmaf(s, y, 0.07968003302812576f);
    c = fmaf(c, y, -0.02086016535758972f);
    s = fmaf(s, y, -0.6459634900093079f);
    c = fmaf(c, y, 0.25366923213005066f);
    s = fmaf(s, y, 1.5707963705062866f);
    c = fmaf(c, y, -1.2337005138397217f);
    s = s * t;
    c = fmaf(c, y, 1.0f);
    const float along = quarter & 1 ? s : c, across = quarter & 1 ? c : s;
    *cosine = (quarter + 1) & 2 ? -along : along;
    *sine = quarter & 2 ? -across : across;
}
// Computes two independent normal numbers from two words.
IN_KERNELS_TOO static inline void noise_normals(uint32_t a, uint32_t b, float *z0, float *z1) {
    const uint32_t reversed = b << 24 | (b & 0xff00u) << 8 | (b >> 8 & 0xff00u) | b >> 24;
    const float u = fmaf((float)reversed + 0.5f, 0x1p-64f, (float)a * 0x1p-32f);
    const float radius = sqrtf(noise_minus_2_ln(u));
    float cosine, sine;
    noise_circle(b >> 8, &cosine, &sine);
    *z0 = radius * cosine;
    *z1 = radius * sine;
}

// --- the grid ------------------------------------------------------------------------------------
typedef struct {
    float deviation, scale, grid, inverse; // grid: D; inverse: 1 / D
} NoiseScale;
static inline NoiseScale noise_scale(float deviation, float scale) { // deviation > 0
    uint32_t bits;
    memcpy(&bits, &deviation, 4);
    bits &= 0x7f800000u; // a power of two; D below; D and 1 / D must be normal numbers
    bits = (bits > 13u << 23 ? bits : 13u << 23) - (12u << 23);
    NoiseScale n = {deviation, scale, 0, 0};
    memcpy(&n.grid, &bits, 4);
    n.inverse = 1.0f / n.grid;
    return n;
}
// Returns scale * (x + deviation z), rounded to the grid.
IN_KERNELS_TOO static inline float noise_add(float x, float z, NoiseScale n) {
    const float sum = fmaf(n.deviation, z, x), points = sum * n.inverse;
    return n.scale * (fabsf(points) < 0x1p23f ? rintf(points) * n.grid : sum);
}

// --- draws: uniform numbers in (0, 1], multiples of 2^-53 ----------------------------------------
typedef struct {
    NoiseStream stream;
    uint32_t words[NOISE_BLOCK], block;
    int used;
} NoiseDraws;
static inline NoiseDraws noise_draws(NoiseStream stream) {
    NoiseDraws d;
    memset(&d, 0, sizeof d);
    d.stream = stream;
    d.used = NOISE_BLOCK;
    return d;
}
static inline double noise_uniform(NoiseDraws *d) {
    if (d->used == NOISE_BLOCK) {
        noise_words(d->words, &d->stream, d->block++);
        d->used = 0;
    }
    const uint64_t high = d->words[d->used++], low = d->words[d->used++];
    return (double)((high << 21 | low >> 11) + 1) * 0x1p-53;
}

// --- keys ----------------------------------------------------------------------------------------
// Also clears memory that is not read again, which a compiler may skip with memset().
static inline void noise_wipe(void *secret, size_t bytes) { explicit_bzero(secret, bytes); }
// Makes a random key. Ends with EXIT_RESOURCES if the system cannot provide one.
static inline void noise_key_make(uint32_t key[8]) {
    size_t have = 0;
    while (have < 32) {
        const ssize_t got = getrandom((char *)key + have, 32 - have, 0);
        if (got < 0 && errno != EINTR) {
            die(EXIT_RESOURCES, "", "the system has no random numbers for a key: %s",
                strerror(errno));
        }
        have += got > 0 ? (size_t)got : 0;
    }
}
// Writes the key as 64 hex digits: its bytes in the order of RFC 8439, the lowest byte of a word
// first.
static inline void noise_key_to_hex(char hex[65], const uint32_t key[8]) {
    unsigned char bytes[32];
    for (int i = 0; i < 32; i++) { bytes[i] = (unsigned char)(key[i / 4] >> i % 4 * 8); }
    bytes_to_hex(hex, bytes, sizeof bytes);
    noise_wipe(bytes, sizeof bytes);
}
// Returns false, and a key of zeros, if hex is not a key.
static inline bool noise_key_from_hex(uint32_t key[8], const char *hex) {
    unsigned char bytes[32];
    const bool good = bytes_from_hex(bytes, hex, sizeof bytes) && !hex[64];
    memset(key, 0, 32);
    for (int i = 0; good && i < 32; i++) { key[i / 4] |= (uint32_t)bytes[i] << i % 4 * 8; }
    noise_wipe(bytes, sizeof bytes);
    return good;
}
// Returns a number that identifies the key but reveals nothing about it.
static inline uint64_t noise_fingerprint(const uint32_t key[8]) {
    NoiseStream s = {{0}, NOISE_FINGERPRINT, 0, 0};
    uint32_t words[NOISE_BLOCK];
    memcpy(s.key, key, sizeof s.key);
    noise_words(words, &s, 0);
    const uint64_t fingerprint = (uint64_t)words[1] << 32 | words[0];
    noise_wipe(&s, sizeof s);
    noise_wipe(words, sizeof words);
    return fingerprint;
}

#endif
