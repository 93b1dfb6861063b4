// quantize.h: numbers in 8 or 4 bits for messages: the format, and its arithmetic, one definition
// for both builds. Operations: ops.h.
//
// Record     of a block of `block` consecutive elements: [fp32 scale d | codes | zeros up to a
//            multiple of 4 bytes]. 8 bits: a code is two's complement. 4 bits: code + 8; element 2i
//            is the low half of byte i, 2i + 1 the high half. The last block may be short.
// Layout     Records lie one after another, and all but the last have one size: a slice that begins
//            with a block begins at quant_bytes(f, its first element). Records are aligned to 4
//            bytes.
// Scale      The extreme e is the value of largest magnitude, the negative one of two. d = e /
//            -2^(bits-1), so e itself has the code -2^(bits-1), the one that has no opposite: e
//            comes back exactly, and a value near -e errs by at most |d|.
// Value      d * code. Sums are fp32 and begin with 0: sum = fma(code, d, sum).
// Edges      |e| < 2^-100: d = 0, and all is 0. A NaN or an infinity in the block: d is a NaN, so
//            all values are (and all codes the largest).
#ifndef QUANTIZE_H
#define QUANTIZE_H

#include "support/base.h" // IN_KERNELS_TOO

enum { QUANT_LEAST_BLOCK = 16, QUANT_MOST_BLOCK = 1 << 30 };
typedef struct {
    int bits;      // 8 or 4
    int64_t block; // elements of a record: a power of two
} QuantFormat;

// Of the records of n elements that begin with a block; the codes of a whole block fill whole
// words.
IN_KERNELS_TOO static inline int64_t quant_bytes(QuantFormat f, int64_t n) {
    return 4 * ((n + f.block - 1) / f.block + (n * f.bits + 31) / 32);
}

// Orders numbers as candidates for the extreme: bits rotated by one, so the magnitude counts first,
// then the sign. NaN and infinity are above all others. A maximum of integers has one result in any
// order.
IN_KERNELS_TOO static inline uint32_t quant_rank(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits << 1 | bits >> 31;
}
IN_KERNELS_TOO static inline float quant_scale(uint32_t rank_of_extreme, int bits) {
    // 27: the exponent of 2^-100
    const bool finite = rank_of_extreme < 0xff000000u, tiny = rank_of_extreme < 27u << 24;
    uint32_t pattern = finite ? rank_of_extreme >> 1 | rank_of_extreme << 31 : 0x7fc00000u;
    float x;
    memcpy(&x, &pattern, 4);
    if (!finite) { return x; } // the same NaN everywhere
    return tiny ? 0.0f : x * (bits == 8 ? -0x1p-7f : -0x1p-3f);
}
// normal: |d| is 2^-107 to 2^125
IN_KERNELS_TOO static inline float quant_inverse(float d) { return d == 0.0f ? 0.0f : 1.0f / d; }
IN_KERNELS_TOO static inline int quant_code(float x, float inverse, int bits) {
    // cuts what rounds to -e / d, and a NaN; no x goes beyond e
    const float most = bits == 8 ? 127.0f : 7.0f;
    float code = x * inverse;
    uint32_t pattern;
    // rounds to nearest even, and leaves an integer in the lower bits
    code = (code < most ? code : most) + 0x1.8p23f;
    memcpy(&pattern, &code, 4);
    return (int)(pattern - 0x4b400000u);
}
IN_KERNELS_TOO static inline float quant_value(int code, float d) { return d * (float)code; }
IN_KERNELS_TOO static inline uint16_t quant_value_bf16(int code, float d) {
    return d == d ? number_to_bf16(quant_value(code, d)) : 0x7fc0u;
}
IN_KERNELS_TOO static inline float quant_add(float sum, int code, float d) {
    return fmaf((float)code, d, sum);
}

// Error feedback (arXiv 2407.04480): what of x was lost goes into the average that is added to the
// next x. A block of NaN leaves 0: a NaN would stay for ever.
IN_KERNELS_TOO static inline uint16_t quant_error(float error, float beta, float x, int code,
                                                  float d) {
    return d == d ? number_to_bf16(fmaf(beta, fmaf((float)-code, d, x), (1.0f - beta) * error)) : 0;
}

#endif
