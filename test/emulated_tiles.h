// emulated_tiles.h: the intrinsics of AMX's tiles without AMX, so that what is built on them
// (gemm_tiles.h, attention_cpu.h) is tested on every CPU that has AVX512-BF16. TEST_TILES=1
// (environment) uses them. Files of tests include this before anything else; on a CPU that has AMX
// it changes nothing.
//
// Source: Intel's Software Developer's Manual, volume 2, TILELOADD, TDPBF16PS and TILESTORED. All
// tiles must be whole: the shape that tiles_begin() sets.
#ifndef EMULATED_TILES_H
#define EMULATED_TILES_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined __AVX512BF16__ && !defined __AMX_BF16__ && !defined __cplusplus
#define EMULATED_TILES
#include <immintrin.h>
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(shape) emulated_tiles_begin(shape)
#define _tile_release() emulated_tiles_end()
#define _tile_loadd(tile, from, stride) emulated_tile_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_tile_store(tile, to, stride)
#define _tile_zero(tile) emulated_tile_zero(tile)
#define _tile_dpbf16ps(sums, a, b) emulated_tile_multiply(sums, a, b)

static _Thread_local struct {
    __m512i row[8][16];
    bool ready; // else the CPU raises a fault
} emulated_tiles;

static inline bool tiles_are_emulated(void) { return getenv("TEST_TILES") != NULL; }
static inline void emulated_tiles_begin(const void *shape) {
    const uint8_t *bytes = (const uint8_t *)shape;
    for (int i = 0; i < 8; i++) {
        if (bytes[0] != 1 || bytes[16 + 2 * i] != 64 || bytes[48 + i] != 16) { abort(); }
    }
    memset(&emulated_tiles, 0xff, sizeof emulated_tiles); // what is not set is NaN
    emulated_tiles.ready = true;
}
static inline void emulated_tiles_end(void) { emulated_tiles.ready = false; }
static inline __m512i *emulated_tile(int tile) {
    if (!emulated_tiles.ready) { abort(); }
    return emulated_tiles.row[tile];
}
static inline void emulated_tile_load(int tile, const void *from, int64_t stride) {
    __m512i *row = emulated_tile(tile);
    for (int i = 0; i < 16; i++) { row[i] = _mm512_loadu_si512((const char *)from + i * stride); }
}
static inline void emulated_tile_store(int tile, void *to, int64_t stride) {
    const __m512i *row = emulated_tile(tile);
    for (int i = 0; i < 16; i++) { _mm512_storeu_si512((char *)to + i * stride, row[i]); }
}
static inline void emulated_tile_zero(int tile) { memset(emulated_tile(tile), 0, 1024); }
// sums(16, 16) += a(16, 32) b, where b has pairs of rows: (16, 16 pairs)
static inline void emulated_tile_multiply(int sums, int a, int b) {
    __m512i *to = emulated_tile(sums);
    const __m512i *left = emulated_tile(a), *right = emulated_tile(b);
    for (int i = 0; i < 16; i++) {
        const uint32_t *pairs = (const uint32_t *)(const void *)&left[i];
        __m512 sum = (__m512)to[i];
        for (int k = 0; k < 16; k++) {
            const __m512i pair = _mm512_set1_epi32((int)pairs[k]);
            sum = _mm512_dpbf16_ps(sum, (__m512bh)pair, (__m512bh)right[k]);
        }
        to[i] = (__m512i)sum;
    }
}
#endif

#endif
