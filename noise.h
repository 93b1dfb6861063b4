// noise.h: random numbers that nobody can guess, for privacy: ChaCha20 (RFC 8439) and normal numbers made of it.
#ifndef NOISE_H
#define NOISE_H

#include "base.h" // random numbers that anybody can guess

// What the noise of some elements depends on, besides their numbers.
typedef struct {
    uint32_t key[8];
    uint32_t domain, part; // what the numbers are for (a NoiseDomain), and of which part of that, below 2^24: a storage
    uint64_t step;
} NoiseStream;
typedef enum { NOISE_GRADIENT = 1, NOISE_SAMPLING, NOISE_FINGERPRINT } NoiseDomain;

#endif
