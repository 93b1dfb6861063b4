// quantize_cpu.h: quantization on the CPU. The contract is in ops.h, the format in quantize.h.
//
// Plan     Numbers are processed in tiles that stay in the L1 cache. They have one of four sources:
//          fp32 (read in place), bf16, a sum of records, or gradients with error feedback. A block
//          that fits a tile is read once. The tiles of a longer block are made twice, for the
//          extreme and for the codes, so no buffer larger than a tile is needed. Codes are int8
//          internally; 4-bit codes are packed and unpacked.
// Threads  Encoding is cut by blocks, decoding by tiles. An element is computed alike whichever
//          thread takes it.
#ifndef QUANTIZE_CPU_H
#define QUANTIZE_CPU_H

#include "ops/cpu/device_cpu.h" // the team, polling

enum { QUANT_TILE = 2048 };

static inline void poll_after_element(Stream *s, int64_t end) {
    if (end % ((int64_t)BLOCK * BLOCKS_A_POLL) == 0) { poll_messages(s); }
}

// --- codes of a part of a block ------------------------------------------------------------------
static inline void pack_nibbles(uint8_t *out, const int8_t *codes, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) {
        out[i] = (uint8_t)((codes[2 * i] + 8) | (codes[2 * i + 1] + 8) << 4);
    }
    if (n % 2) { out[n / 2] = (uint8_t)(codes[n - 1] + 8); }
}
static inline void unpack_nibbles(int8_t *codes, const uint8_t *in, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) {
        codes[2 * i] = (int8_t)((in[i] & 15) - 8);
        codes[2 * i + 1] = (int8_t)((in[i] >> 4) - 8);
    }
    if (n % 2) { codes[n - 1] = (int8_t)((in[n / 2] & 15) - 8); }
}
// Without `omp simd`, whose reductions end with a pass through memory.
static inline uint32_t highest_rank(uint32_t highest, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        highest = quant_rank(x[i]) > highest ? quant_rank(x[i]) : highest;
    }
    return highest;
}
static inline void encode_part(int8_t *codes, const float *x, int64_t n, float inverse, int bits) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) { codes[i] = (int8_t)quant_code(x[i], inverse, bits); }
}

// The records of a tile, which holds whole blocks or is a part of one block.
typedef struct {
    int64_t part;   // elements of each block that are in the tile
    int64_t first;  // byte at which the record of its first block starts
    int64_t codes;  // byte within a record at which the part's codes start
    int64_t record; // bytes from one record to the next
} TileRecords;
static inline TileRecords tile_records(int64_t tile, QuantFormat f) {
    const TileRecords r = {min_i64(f.block, QUANT_TILE), quant_bytes(f, tile / f.block * f.block),
                           4 + tile % f.block * f.bits / 8, quant_bytes(f, f.block)};
    return r;
}

// --- reading records -----------------------------------------------------------------------------
static inline float read_part(const int8_t **codes, int8_t *unpacked, const uint8_t *record,
                              const TileRecords *r, int64_t n, QuantFormat f) {
    float d;
    memcpy(&d, record, 4);
    if (f.bits == 4) { unpack_nibbles(unpacked, record + r->codes, n); }
    *codes = f.bits == 8 ? (const int8_t *)record + r->codes : unpacked;
    return d;
}
static inline void value_tile(void *out, DType dtype, const void *in, int64_t begin, int64_t end,
                              QuantFormat f) {
    const TileRecords r = tile_records(begin, f);
    const uint8_t *record = (const uint8_t *)in + r.first;
    int8_t unpacked[QUANT_TILE];
    for (int64_t at = begin; at < end; at += r.part, record += r.record) {
        const int8_t *codes;
        const int64_t n = min_i64(r.part, end - at);
        const float d = read_part(&codes, unpacked, record, &r, n, f);
        if (dtype == DTYPE_FP32) {
            float *y = (float *)out + at;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) { y[i] = quant_value(codes[i], d); }
        } else {
            uint16_t *y = (uint16_t *)out + at;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) { y[i] = quant_value_bf16(codes[i], d); }
        }
    }
}
static inline void sum_tile(float *sum, bool accumulate, const void *in, int64_t stride, int count,
                            int64_t begin, int64_t end, QuantFormat f) {
    const TileRecords r = tile_records(begin, f);
    int8_t unpacked[QUANT_TILE];
    if (!accumulate) { memset(sum, 0, (size_t)(end - begin) * sizeof(float)); }
    for (int k = 0; k < count; k++) {
        const uint8_t *record = (const uint8_t *)in + k * stride + r.first;
        for (int64_t at = begin; at < end; at += r.part, record += r.record) {
            const int8_t *codes;
            const int64_t n = min_i64(r.part, end - at);
            const float d = read_part(&codes, unpacked, record, &r, n, f);
            float *y = sum + (at - begin);
#pragma omp simd
            for (int64_t i = 0; i < n; i++) { y[i] = quant_add(y[i], codes[i], d); }
        }
    }
}
static inline void ops_dequantize(Stream *s, void *out, DType dtype, const void *in, int64_t n,
                                  QuantFormat f) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t tile = 0; tile < n; tile += QUANT_TILE) {
        value_tile(out, dtype, in, tile, min_i64(n, tile + QUANT_TILE), f);
        poll_after_element(s, tile + QUANT_TILE);
    }
}
static inline void ops_dequantize_sum(Stream *s, float *out, bool accumulate, const void *in,
                                      int64_t stride, int count, int64_t n, QuantFormat f) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t tile = 0; tile < n; tile += QUANT_TILE) {
        sum_tile(out + tile, accumulate, in, stride, count, tile, min_i64(n, tile + QUANT_TILE), f);
        poll_after_element(s, tile + QUANT_TILE);
    }
}

// --- writing records -----------------------------------------------------------------------------
// The source of the numbers.
typedef struct {
    const void *in;
    DType dtype;
    int64_t stride;  // bytes between the records to be summed
    int count;       // number of records to be summed; 0 for plain numbers
    uint16_t *error; // NULL without error feedback
    float beta;
} QuantSource;
static inline const float *source_tile(const QuantSource *from, float *scratch, int64_t begin,
                                       int64_t end, QuantFormat f) {
    const float *x = (const float *)from->in;
    const uint16_t *x16 = (const uint16_t *)from->in, *error = from->error;
    if (!from->count && !error && from->dtype == DTYPE_FP32) { return x + begin; }
    if (from->count) {
        sum_tile(scratch, false, from->in, from->stride, from->count, begin, end, f);
    } else if (error) {
#pragma omp simd
        for (int64_t i = begin; i < end; i++) {
            scratch[i - begin] = x[i] + bf16_to_float(error[i]);
        }
    } else {
#pragma omp simd
        for (int64_t i = begin; i < end; i++) { scratch[i - begin] = bf16_to_float(x16[i]); }
    }
    return scratch;
}
static inline void update_error(uint16_t *error, float beta, const float *x, const int8_t *codes,
                                float d, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        error[i] = quant_error(bf16_to_float(error[i]), beta, x[i], codes[i], d);
    }
}
static inline void encode_tile(void *out, const QuantSource *from, const float *x, const float *d,
                               int8_t *unpacked, int64_t begin, int64_t end, QuantFormat f) {
    const TileRecords r = tile_records(begin, f);
    uint8_t *record = (uint8_t *)out + r.first;
    for (int64_t at = begin; at < end; at += r.part, record += r.record, x += r.part, d++) {
        const int64_t n = min_i64(r.part, end - at);
        int8_t *codes = f.bits == 8 ? (int8_t *)record + r.codes : unpacked;
        memcpy(record, d, 4);
        encode_part(codes, x, n, quant_inverse(*d), f.bits);
        if (f.bits == 4) { pack_nibbles(record + r.codes, codes, n); }
        if (from->error) { update_error(from->error + at, from->beta, x, codes, *d, n); }
    }
}
// Encodes a unit, which starts with a block: several blocks that fit a tile, or one block.
static inline void encode_unit(Stream *s, void *out, const QuantSource *from, int64_t begin,
                               int64_t end, QuantFormat f) {
    float scratch[QUANT_TILE], d[QUANT_TILE / QUANT_LEAST_BLOCK];
    int8_t unpacked[QUANT_TILE];
    uint32_t highest[QUANT_TILE / QUANT_LEAST_BLOCK] = {0};
    const float *x = NULL;
    for (int64_t tile = begin, next; tile < end; tile = next) {
        next = min_i64(end, tile + QUANT_TILE);
        x = source_tile(from, scratch, tile, next, f);
        for (int64_t at = tile, b = 0; at < next; at += f.block, b++) {
            highest[b] = highest_rank(highest[b], x + (at - tile), min_i64(f.block, next - at));
        }
        if (next < end) { poll_after_element(s, next); }
    }
    for (int64_t b = 0; b * f.block < end - begin; b++) { d[b] = quant_scale(highest[b], f.bits); }
    memset((uint8_t *)out + quant_bytes(f, end) - 4, 0, 4); // padding after the last code
    for (int64_t tile = begin, next; tile < end; tile = next) {
        next = min_i64(end, tile + QUANT_TILE);
        if (end - begin > QUANT_TILE) { x = source_tile(from, scratch, tile, next, f); }
        encode_tile(out, from, x, d, unpacked, tile, next, f);
        poll_after_element(s, next);
    }
}
static inline void encode(Stream *s, void *out, const QuantSource *from, int64_t n, QuantFormat f) {
    const int64_t unit = max_i64(f.block, QUANT_TILE);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t u = 0; u < ceil_div(n, unit); u++) {
        encode_unit(s, out, from, u * unit, min_i64(n, (u + 1) * unit), f);
    }
}
static inline void ops_quantize(Stream *s, void *out, const void *in, DType dtype, int64_t n,
                                QuantFormat f) {
    const QuantSource from = {in, dtype, 0, 0, NULL, 0.0f};
    encode(s, out, &from, n, f);
}
static inline void ops_requantize_sum(Stream *s, void *out, const void *in, int64_t stride,
                                      int count, int64_t n, QuantFormat f) {
    const QuantSource from = {in, DTYPE_FP32, stride, count, NULL, 0.0f};
    encode(s, out, &from, n, f);
}
static inline void ops_quantize_feedback(Stream *s, void *out, const float *in, uint16_t *error,
                                         float beta, int64_t n, QuantFormat f) {
    const QuantSource from = {in, DTYPE_FP32, 0, 0, error, beta};
    encode(s, out, &from, n, f);
}

#endif
