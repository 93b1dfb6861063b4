// quantize.h: numbers in 8 or 4 bits for messages (ZeRO++, arXiv 2306.10209). It defines the format
// and its arithmetic for both builds. The operations are declared in ops.h.
//
// Record  The form of `block` consecutive elements: [fp32 scale d | codes | zeros up to a multiple
//         of 4 bytes]. An 8-bit code is in two's complement. 4 bits hold code + 8; element 2i is
//         the low half of byte i, element 2i + 1 the high half. The last block may be short.
// Layout  Records are contiguous, and all but the last have the same size. So a slice that starts
//         with element k, the first of a block, starts at byte quant_bytes(f, k). Records are
//         aligned to 4 bytes.
// Scale   The extreme e is the element of largest magnitude; of two with opposite signs it is the
//         negative one. d = e / -2^(bits-1). So e has the code -2^(bits-1), which has no positive
//         counterpart. e is exact after decoding, and a value near -e has an error of at most |d|.
// Value   d * code. Sums are in fp32 and start with 0: sum = fma(code, d, sum).
// Edges   If |e| < 2^-100, d = 0 and all values are 0. If the block holds a NaN or an infinity, d
//         is a NaN, so all values are NaN (and all codes are the largest).
#ifndef QUANTIZE_H
#define QUANTIZE_H

#include "base/base.h"

enum { QUANT_LEAST_BLOCK = 16, QUANT_MOST_BLOCK = 1 << 30 };
typedef struct {
    int bits;      // 8 or 4
    int64_t block; // elements in a record, a power of two
} QuantFormat;

// Returns the bytes of the records of n elements that start with a block. The codes of a whole
// block fill whole 32-bit words.
IN_KERNELS_TOO static inline int64_t quant_bytes(QuantFormat f, int64_t n) {
    return 4 * ((n + f.block - 1) / f.block + (n * f.bits + 31) / 32);
}

// Maps numbers to integers whose maximum is the extreme's. The bits are rotated by one, so the
// magnitude counts first, then the sign. NaN and infinity are above all others. A maximum of
// integers has the same result in any order.
IN_KERNELS_TOO static inline uint32_t quant_rank(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits << 1 | bits >> 31;
}
IN_KERNELS_TOO static inline float quant_scale(uint32_t rank_of_extreme, int bits) {
    // 27 is the biased exponent of 2^-100
    const bool finite = rank_of_extreme < 0xff000000u, tiny = rank_of_extreme < 27u << 24;
    uint32_t pattern = finite ? rank_of_extreme >> 1 | rank_of_extreme << 31 : 0x7fc00000u;
    float x;
    memcpy(&x, &pattern, 4);
    if (!finite) { return x; } // the same NaN in both builds
    return tiny ? 0.0f : x * (bits == 8 ? -0x1p-7f : -0x1p-3f);
}
// d is 0, NaN, or a normal number with |d| between 2^-107 and 2^125.
IN_KERNELS_TOO static inline float quant_inverse(float d) { return d == 0.0f ? 0.0f : 1.0f / d; }
IN_KERNELS_TOO static inline int quant_code(float x, float inverse, int bits) {
    // Limits what would round to the code of -e, and a NaN. No x is beyond e.
    const float most = bits == 8 ? 127.0f : 7.0f;
    float code = x * inverse;
    uint32_t pattern;
    // This sum rounds to nearest even and leaves an integer in the low bits.
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

// Error feedback (arXiv 2407.04480): the part of x that was lost enters the average that is added
// to the next x. For a block of NaN it returns 0, because a NaN in the error would stay forever.
IN_KERNELS_TOO static inline uint16_t quant_error(float error, float beta, float x, int code,
                                                  float d) {
    return d == d ? number_to_bf16(fmaf(beta, fmaf((float)-code, d, x), (1.0f - beta) * error)) : 0;
}

#endif
