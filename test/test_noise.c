// test_noise.c: the noise of private training. The cipher against RFC 8439 and libsodium, the
// normal numbers against their formula in double and against their distribution, the grid, slices,
// keys. Keys are fixed, so nothing here passes or fails by chance: a bound of k standard deviations
// says how strange a right generator would have to be for us to have picked it. Seen red when
// broken on purpose: deviation halved (moments, bins, tails), cosine for both of a pair
// (correlation), the last stage of the transposition left out (tiles, slices), a step's upper half
// left out (streams), no grid (grid), a tile counted from 0 (slices).
#include "ops/cpu/ops_cpu.h"
#ifdef USE_SODIUM
#include <sodium.h> // a second opinion
#endif

#include "harness.h"

static const uint32_t some_key[8] = {0x9e3779b9, 0x7f4a7c15, 0xbf58476d, 0x1ce4e5b9,
                                     0x94d049bb, 0x133111eb, 0xc2b2ae3d, 0x27d4eb4f};
static NoiseStream stream_of(uint32_t domain, uint32_t part, uint64_t step) {
    NoiseStream s = {{0}, domain, part, step};
    memcpy(s.key, some_key, sizeof s.key);
    return s;
}
static Stream team(int threads) {
    Stream s = {threads, NULL, NULL, 0, NULL};
    return s;
}
static float *numbers(int64_t n) {
    return (float *)checked_calloc((size_t)n, sizeof(float), "numbers");
}
static uint32_t random_word(uint64_t stream, int64_t i) {
    return (uint32_t)(random_u64(99, stream, (uint64_t)i) >> 32);
}

// -------------------------------------------------------------------------------------------------
// The cipher

static void from_hex(unsigned char *out, const char *hex) {
    for (unsigned byte; sscanf(hex, "%2x", &byte) == 1; hex += 2) { *out++ = (unsigned char)byte; }
}
static void words_from_hex(uint32_t *words, const char *hex) { // little-endian, as the machine
    unsigned char bytes[64];
    from_hex(bytes, hex);
    memcpy(words, bytes, strlen(hex) / 2);
}
#define ZEROS8 "0000000000000000"
static void test_block(void **state) {
    (void)state;
    static const struct {
        const char *key, *nonce;
        uint32_t counter;
        const char *block;
    } vectors[] = {
        // section 2.3.2
        {"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
         "000000090000004a00000000", 1,
         "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d"
         "98b02a2b5129cd1de164eb9cbd083e8a2503c4e"},
        // appendix A.1, 1 to 5
        {ZEROS8 ZEROS8 ZEROS8 ZEROS8, ZEROS8 "00000000", 0,
         "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb"
         "8d84a376a43b8f41518a11cc387b669b2ee6586"},
        {ZEROS8 ZEROS8 ZEROS8 ZEROS8, ZEROS8 "00000000", 1,
         "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b07"
         "4d839d531ed1f28510afb45ace10a1f4b794d6f"},
        {ZEROS8 ZEROS8 ZEROS8 "0000000000000001", ZEROS8 "00000000", 1,
         "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a8eca00bbb4a73bdad192b5c42"
         "f73f2fd4e273644c8b36125a64addeb006c13a0"},
        {"00ff000000000000" ZEROS8 ZEROS8 ZEROS8, ZEROS8 "00000000", 2,
         "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca13b25aa26cb4a648cb9b9d1be"
         "65b2c0924a66c54d545ec1b7374f4872e99f096"},
        {ZEROS8 ZEROS8 ZEROS8 ZEROS8, ZEROS8 "00000002", 0,
         "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c78a970e0e955c14f3a88e741b9"
         "7c286f75f8fc299e8148362fa198a39531bed6d"},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        uint32_t key[8], nonce[3], expected[16], block[16];
        words_from_hex(key, vectors[i].key);
        words_from_hex(nonce, vectors[i].nonce);
        words_from_hex(expected, vectors[i].block);
        chacha20_block(block, key, vectors[i].counter, nonce);
        assert_memory_equal(block, expected, sizeof block);
    }
}
static void test_encryption(void **state) { // section 2.4.2
    (void)state;
    const char text[] = "Ladies and Gentlemen of the class of '99: If I could offer you only one "
                        "tip for the future, sunscreen would be it.";
    unsigned char expected[128];
    uint32_t key[8], nonce[3], blocks[32];
    words_from_hex(key, "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f");
    words_from_hex(nonce, "000000000000004a00000000");
    from_hex(expected, "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524"
                       "733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
                       "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab77937365af90bbf74a"
                       "35be6b40b8eedf2785e42874d");
    for (uint32_t i = 0; i < 2; i++) { chacha20_block(blocks + 16 * i, key, 1 + i, nonce); }
    for (size_t i = 0; i < strlen(text); i++) {
        assert_int_equal((unsigned char)text[i] ^ ((unsigned char *)blocks)[i], expected[i]);
    }
}
static void test_tiles(void **state) { // vectors of blocks are blocks, also where the counter ends
    (void)state;
    const uint32_t counters[] = {0, 1, 63, 0x7ffffff0, 0xffffffc0};
    for (int i = 0; i < 5; i++) {
        NoiseStream s =
            stream_of(NOISE_GRADIENT, random_word(1, i) >> 8, random_u64(99, 2, (uint64_t)i));
        uint32_t nonce[3], first[16], words[NOISE_TILE], block[16];
        noise_nonce(nonce, &s);
        chacha20_state(first, s.key, counters[i], nonce);
        noise_tile(words, first);
        for (uint32_t b = 0; b < NOISE_TILE / 16; b++) {
            noise_words(block, &s, counters[i] + b);
            assert_memory_equal(words + 16 * b, block, sizeof block);
        }
    }
}
static void test_second_opinion(void **state) { // of libsodium
    (void)state;
#ifdef USE_SODIUM
    static uint32_t expected[NOISE_TILE], words[NOISE_TILE];
    static const unsigned char zeros[sizeof expected];
    assert_true(sodium_init() >= 0);
    for (int i = 0; i < 300; i++) {
        NoiseStream s = stream_of(random_word(3, i) >> 24, random_word(4, i) >> 8,
                                  random_u64(99, 5, (uint64_t)i));
        for (int k = 0; k < 8; k++) { s.key[k] = random_word(6, 8 * i + k); }
        uint32_t nonce[3], first[16];
        const uint32_t counter = random_word(7, i) >> (i % 3 ? 1 : 20);
        noise_nonce(nonce, &s);
        chacha20_state(first, s.key, counter, nonce);
        noise_tile(words, first);
        crypto_stream_chacha20_ietf_xor_ic((unsigned char *)expected, zeros, sizeof zeros,
                                           (unsigned char *)nonce, counter, (unsigned char *)s.key);
        assert_memory_equal(words, expected, sizeof words);
        noise_words(words, &s, counter);
        assert_memory_equal(words, expected, 16 * sizeof *words);
    }
#else
    skip();
#endif
}
// what differs in anything has another nonce, and none is lost
static void test_streams(void **state) {
    (void)state;
    const uint32_t domains[] = {1, 2, 3, 255}, parts[] = {0, 1, 0x800000, 0xffffff};
    const uint64_t steps[] = {0, 1, 0xffffffff, UINT64_C(1) << 32, UINT64_MAX};
    uint32_t nonces[4 * 4 * 5][3];
    int count = 0;
    for (int i = 0; i < 4 * 4 * 5; i++, count++) {
        NoiseStream s = stream_of(domains[i % 4], parts[i / 4 % 4], steps[i / 16]);
        noise_nonce(nonces[count], &s);
        for (int k = 0; k < count; k++) {
            assert_memory_not_equal(nonces[k], nonces[count], sizeof nonces[0]);
        }
    }
    NoiseStream s = stream_of(NOISE_SAMPLING, 0x123456, UINT64_C(0x89abcdef01234567));
    noise_nonce(nonces[0], &s);
    assert_true(nonces[0][0] == 0x02123456 && nonces[0][1] == 0x01234567 &&
                nonces[0][2] == 0x89abcdef);
}

// -------------------------------------------------------------------------------------------------
// Normal numbers

// against noise.h's formula, within noise.h's error
static void check_pair(uint32_t a, uint32_t b) {
    float z0, z1;
    noise_normals(a, b, &z0, &z1);
    const double of_b = ((double)__builtin_bswap32(b) + 0.5) * 0x1p-32,
                 left = ((double)~a + (1.0 - of_b)) * 0x1p-32,
                 angle = 2 * M_PI * (b >> 8) * 0x1p-24;
    const double radius =
        sqrt(a < 1u << 30 ? -2 * log(((double)a + of_b) * 0x1p-32) : -2 * log1p(-left));
    const double error = 3e-7 * radius + (radius < 1 ? fmin(0x1p-23 / radius, 0x1p-12) : 0.0);
    if (!(fabs((double)z0 - radius * cos(angle)) <= error &&
          fabs((double)z1 - radius * sin(angle)) <= error)) {
        fail_msg("words %08x %08x: %.9g %.9g, expected %.9g %.9g within %.2g", a, b, (double)z0,
                 (double)z1, radius * cos(angle), radius * sin(angle), error);
    }
}
static void test_pairs(void **state) {
    (void)state;
    const uint32_t corners[] = {0,          1,          2,          255,        256,
                                0xffff,     0x00200000, 0x1fffffff, 0x20000000, 0x3fffffff,
                                0x40000000, 0x7fffffff, 0x80000000, 0xffffff00, 0xffffffff};
    enum { CORNERS = sizeof corners / sizeof corners[0] };
    for (int i = 0; i < CORNERS * CORNERS; i++) {
        check_pair(corners[i / CORNERS], corners[i % CORNERS]);
    }
    // a third as they come, a third far out, a third near the middle
    for (int64_t i = 0; i < 3000000; i++) {
        const uint32_t a = random_word(10, i), shift = (uint32_t)(i / 3 % 32);
        check_pair(i % 3 == 0 ? a : i % 3 == 1 ? a >> shift : ~(a >> shift), random_word(11, i));
    }
    float z0, z1, least, most;
    noise_normals(0, 0, &most, &z1);
    noise_normals(0xffffffff, 0, &least, &z1);
    assert_true(most > 9.49f && most < 9.5f && least >= 0 && least < 3e-4f);
    // beyond 40 bits the radius falls, once in a 256th of a turn
    for (uint32_t b = 0; b < 0x10000; b++) {
        noise_normals(0, b << 8, &z0, &z1);
        assert_true(hypotf(z0, z1) > 7.446f);
        noise_normals(0, b << 8 | 1, &z0, &z1);
        assert_true(hypotf(z0, z1) < 7.448f);
    }
}

// The noise of deviation 1 that n elements of a storage get.
static float *noise_of(uint32_t part, uint64_t step, int64_t n) {
    float *z = numbers(n);
    Stream s = team(2);
    ops_add_noise(&s, z, 0, n, stream_of(NOISE_GRADIENT, part, step), 1.0f, 1.0f);
    return z;
}
static double below(double x) { return 0.5 * erfc(-x / sqrt(2)); } // P(z < x)
enum { MANY = 1 << 22 };

static void test_moments(void **state) {
    (void)state;
    const double deviations[] = {1.0, 3.7, 1e-3}, scales[] = {1.0, 0.25, 7.0};
    // of a sum of powers, for one element
    const double expected[] = {0, 1, 0, 3}, variance[] = {1, 2, 15, 96};
    for (int k = 0; k < 3; k++) {
        double sums[4] = {0};
        float *x = numbers(MANY);
        Stream s = team(2);
        // x is kept, and is not in the noise
        for (int64_t i = 0; i < MANY; i++) { x[i] = 1000.0f * (float)deviations[k]; }
        ops_add_noise(&s, x, 0, MANY, stream_of(NOISE_GRADIENT, 1, (uint64_t)k),
                      (float)deviations[k], (float)scales[k]);
        for (int64_t i = 0; i < MANY; i++) {
            const double z = ((double)x[i] / scales[k] - 1000.0 * deviations[k]) / deviations[k];
            sums[0] += z;
            sums[1] += z * z;
            sums[2] += z * z * z;
            sums[3] += z * z * z * z;
        }
        // 5 standard deviations, and 1e-4 for the grid and the sum's rounding
        for (int power = 0; power < 4; power++) {
            assert_true(fabs(sums[power] / MANY - expected[power]) <=
                        5 * sqrt(variance[power] / MANY) + 1e-4);
        }
        free(x);
    }
}
// chi-square of 1000 bins of nearly equal probability; bins end between points of the grid
static void test_bins(void **state) {
    (void)state;
    enum { BINS = 1000 };
    double edges[BINS + 1], square = 0;
    int64_t counts[BINS] = {0};
    float *z = noise_of(2, 5, MANY);
    int bin = 1;
    edges[0] = -INFINITY;
    edges[BINS] = INFINITY;
    for (double x = -6 + 0x1p-13; bin < BINS; x += 0x1p-12) { // D is 2^-12
        if (below(x) * BINS >= bin) { edges[bin++] = x; }
    }
    for (int64_t i = 0; i < MANY; i++) {
        int low = 0, high = BINS;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if ((double)z[i] >= edges[middle]) {
                low = middle;
            } else {
                high = middle;
            }
        }
        counts[low]++;
    }
    for (int b = 0; b < BINS; b++) {
        const double expected = MANY * (below(edges[b + 1]) - below(edges[b]));
        square += ((double)counts[b] - expected) * ((double)counts[b] - expected) / expected;
    }
    assert_true(fabs(square - (BINS - 1)) <= 5 * sqrt(2.0 * (BINS - 1))); // too even is wrong too
    free(z);
}
static void test_tails(void **state) { // as many far out as there should be, on both sides
    (void)state;
    enum { ALL = 4 * MANY };
    float *z = noise_of(3, 6, ALL);
    for (double far = 2.5 + 0x1p-13; far < 5.1; far += 0.5) {
        int64_t above = 0, under = 0;
        for (int64_t i = 0; i < ALL; i++) {
            above += (double)z[i] > far;
            under += (double)z[i] < -far;
        }
        const double expected = ALL * below(-far), allowed = 5 * sqrt(expected) + 1;
        assert_true(fabs((double)above - expected) <= allowed &&
                    fabs((double)under - expected) <= allowed);
    }
    free(z);
}

// Of the numbers and of their squares: a pair shares its radius, so squares would tell.
static void check_unrelated(const char *what, const float *a, const float *b, int64_t n) {
    double product = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        const double x = (double)a[i], y = (double)b[i];
        product += x * y;
        squares += (x * x - 1) * (y * y - 1);
    }
    if (!(fabs(product) <= 5 * sqrt((double)n) && fabs(squares) <= 5 * 2 * sqrt((double)n))) {
        fail_msg("%s: sums of products %.1f and of squares %.1f deviations from 0", what,
                 product / sqrt((double)n), squares / 2 / sqrt((double)n));
    }
}
static void test_correlation(void **state) {
    (void)state;
    enum { N = 1 << 21 };
    const int64_t lags[] = {1, 2, 3, 8, 15, 16, 17, 256, 1024, 16384};
    float *z = noise_of(4, 7, N), *storage = noise_of(5, 7, N), *step = noise_of(4, 8, N),
          *later = noise_of(4, 7 + (UINT64_C(1) << 32), N), *domain = numbers(N);
    Stream s = team(1);
    ops_add_noise(&s, domain, 0, N, stream_of(NOISE_SAMPLING, 4, 7), 1.0f, 1.0f);
    for (int i = 0; i < 10; i++) { check_unrelated("neighbours", z, z + lags[i], N - lags[i]); }
    check_unrelated("storages", z, storage, N);
    check_unrelated("steps", z, step, N);
    check_unrelated("steps far apart", z, later, N);
    check_unrelated("domains", z, domain, N);
    NoiseStream other = stream_of(NOISE_GRADIENT, 4, 7);
    other.key[7] ^= 0x80000000; // the last bit of the key
    memset(domain, 0, N * sizeof *domain);
    ops_add_noise(&s, domain, 0, N, other, 1.0f, 1.0f);
    check_unrelated("keys", z, domain, N);
    free(z);
    free(storage);
    free(step);
    free(later);
    free(domain);
}

// -------------------------------------------------------------------------------------------------
// The operation

static float *gradient(int64_t n) { // sizes from 2^-20 to 2^20
    float *x = numbers(n);
    for (int64_t i = 0; i < n; i++) {
        x[i] = ldexpf((float)(int32_t)random_word(20, i) * 0x1p-31f,
                      (int)(random_word(21, i) % 41) - 20);
    }
    return x;
}
// the same bits wherever a slice begins and ends, for any team, at any place in memory
static void test_slices(void **state) {
    (void)state;
    enum { N = 70003 };
    const int64_t lengths[] = {16, 32, 256, 1024, 4096 + 16, 30000};
    const int64_t begins[] = {0, 256, (INT64_C(1) << 33) - 1024, (INT64_C(1) << 36) - (1 << 17)};
    for (int k = 0; k < 4; k++) {
        const NoiseStream noise = stream_of(NOISE_GRADIENT, 9, (uint64_t)k);
        float *whole = gradient(N);
        Stream one = team(1);
        ops_add_noise(&one, whole, begins[k], N, noise, 0.3f, 0.1f);
        for (int i = 0; i < 6; i++) {
            float *x = gradient(N), *shifted = numbers(N + 2);
            Stream s = team(1 + i % 4);
            memcpy(shifted + 1, x, N * sizeof *x);
            shifted[N + 1] = 5.0f;
            for (int64_t at = 0; at < N; at += lengths[i]) {
                ops_add_noise(&s, shifted + 1 + at, begins[k] + at, min_i64(lengths[i], N - at),
                              noise, 0.3f, 0.1f);
            }
            ops_add_noise(&s, x, begins[k], N, noise, 0.3f, 0.1f);
            assert_memory_equal(x, whole, N * sizeof *x);
            assert_memory_equal(shifted + 1, whole, N * sizeof *x);
            assert_true(shifted[0] == 0.0f && shifted[N + 1] == 5.0f); // nothing beside it
            free(x);
            free(shifted);
        }
        free(whole);
    }
    for (int64_t n = 0; n < 40; n++) { // every short length
        float *x = gradient(40), *y = gradient(40), *z = gradient(40);
        Stream s = team(2);
        ops_add_noise(&s, x, 0, 40, stream_of(NOISE_GRADIENT, 9, 0), 0.3f, 0.1f);
        ops_add_noise(&s, y, 0, n, stream_of(NOISE_GRADIENT, 9, 0), 0.3f, 0.1f);
        assert_memory_equal(x, y, (size_t)n * sizeof *x);
        assert_memory_equal(y + n, z + n, (size_t)(40 - n) * sizeof *x);
        free(x);
        free(y);
        free(z);
    }
}
// each sum is the nearest point of the grid; what fp32 has no such points for is fp32's
static void test_grid(void **state) {
    (void)state;
    enum { N = 5000 };
    const float deviations[] = {1.0f, 1.5f, 0.9999f, 0x1p-20f, 3e-30f, 5e9f};
    const NoiseStream noise = stream_of(NOISE_GRADIENT, 10, 1);
    for (int k = 0; k < 6; k++) {
        const double grid = ldexp(1, ilogb((double)deviations[k]) - 12);
        float *x = gradient(N), *sum = gradient(N);
        int64_t near = 0;
        Stream s = team(1);
        // up to 2^20 deviations: some beyond the grid
        for (int64_t i = 0; i < N; i++) { sum[i] = x[i] = x[i] * deviations[k]; }
        ops_add_noise(&s, sum, 0, N, noise, deviations[k], 1.0f);
        for (int64_t i = 0; i < N; i++) {
            uint32_t words[16];
            float z[2];
            noise_words(words, &noise, (uint32_t)(i / 16));
            noise_normals(words[i % 16 / 2 * 2], words[i % 16 / 2 * 2 + 1], &z[0], &z[1]);
            const double exact = (double)x[i] + (double)deviations[k] * (double)z[i % 2],
                         unit = fmax(grid, fabs(exact) * 0x1p-23);
            if (fabs(exact) < 0x1p22 * grid) {
                near++;
                assert_true((double)sum[i] == grid * rint((double)sum[i] / grid));
            }
            // two roundings
            assert_true(fabs((double)sum[i] - exact) <= 0.5 * unit + fabs(exact) * 0x1p-24);
        }
        assert_true(near > N / 2 && near < N);
        x[0] = 0x1p100f;
        x[1] = -INFINITY;
        x[2] = NAN;
        ops_add_noise(&s, x, 0, 3, noise, deviations[k], 0.5f);
        assert_true(x[0] == 0x1p99f && x[1] == -INFINITY && isnan(x[2]));
        free(x);
        free(sum);
    }
}
static void test_no_deviation(void **state) { // then nothing is rounded but the product
    (void)state;
    enum { N = 20011 };
    float *x = gradient(N), *y = gradient(N);
    Stream s = team(3);
    // the sign of a zero, and the smallest numbers
    for (int64_t i = 0; i < N; i += 100) { x[i] = y[i] = i % 200 ? -0.0f : ldexpf(x[i], -120); }
    ops_add_noise(&s, y, 0, N, stream_of(NOISE_GRADIENT, 1, 1), 0.0f, 0.3f);
    for (int64_t i = 0; i < N; i++) { x[i] *= 0.3f; }
    assert_memory_equal(x, y, N * sizeof *x);
    free(x);
    free(y);
}
static int polls;
static void count_poll(void) { polls++; }
static void test_polls(void **state) {
    (void)state;
    float *x = numbers(300000);
    Stream s = {1, count_poll, NULL, 0, NULL};
    ops_add_noise(&s, x, 0, 300000, stream_of(NOISE_GRADIENT, 1, 1), 1.0f, 1.0f);
    assert_true(polls >= 1);
    free(x);
}

// -------------------------------------------------------------------------------------------------
// Draws and keys

// uniform: in (0, 1], evenly spread, all 53 bits in use, in the order of the words
static void test_draws(void **state) {
    (void)state;
    enum { N = 1 << 18, BINS = 512 };
    NoiseDraws draws = noise_draws(stream_of(NOISE_SAMPLING, 0, 3));
    int64_t counts[BINS] = {0}, odd = 0;
    double square = 0;
    for (int64_t i = 0; i < N; i++) {
        uint32_t words[16];
        const double u = noise_uniform(&draws);
        noise_words(words, &draws.stream, (uint32_t)(i / 8));
        assert_true(
            u ==
            ldexp((double)(((uint64_t)words[i % 8 * 2] << 32 | words[i % 8 * 2 + 1]) >> 11) + 1,
                  -53));
        assert_true(u > 0 && u <= 1);
        counts[(int)(u * (1 - 1e-15) * BINS)]++;
        odd += (int64_t)ldexp(u, 53) & 1;
    }
    for (int b = 0; b < BINS; b++) {
        square += ((double)counts[b] - N / BINS) * ((double)counts[b] - N / BINS) / (N / BINS);
    }
    assert_true(fabs(square - (BINS - 1)) <= 5 * sqrt(2.0 * (BINS - 1)) &&
                fabs((double)odd - N / 2) <= 5 * sqrt(N / 4.0));
}
static void test_keys(void **state) {
    (void)state;
    const char *const bad[] = {"",
                               "0",
                               "g00102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
                               "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1",
                               "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f0",
                               "0x0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
                               " 00102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"};
    const uint32_t zeros[8] = {0}, counting[8] = {0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c,
                                                  0x13121110, 0x17161514, 0x1b1a1918, 0x1f1e1d1c};
    uint32_t key[8], again[8], words[16];
    char hex[65];
    // RFC 8439's order
    assert_true(noise_key_from_hex(
        key, "000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F"));
    assert_memory_equal(key, counting, sizeof key);
    noise_key_to_hex(hex, key);
    assert_string_equal(hex, "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        memset(key, 1, sizeof key);
        assert_false(noise_key_from_hex(key, bad[i]));
        assert_memory_equal(key, zeros, sizeof key); // no part of it
    }
    const NoiseStream fingerprint = stream_of(3, 0, 0);
    noise_words(words, &fingerprint, 0);
    assert_true(noise_fingerprint(some_key) == ((uint64_t)words[1] << 32 | words[0]) &&
                noise_fingerprint(some_key) != noise_fingerprint(counting));
    memset(key, 0, sizeof key);
    memset(again, 0, sizeof again);
    noise_key_make(key);
    noise_key_make(again);
    // whole keys. Chance spoils this one in 2^29 times
    for (int i = 0; i < 8; i++) { assert_true((key[i] || again[i]) && key[i] != again[i]); }
    noise_wipe(key, sizeof key);
    assert_memory_equal(key, zeros, sizeof key);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block),        cmocka_unit_test(test_encryption),
        cmocka_unit_test(test_tiles),        cmocka_unit_test(test_second_opinion),
        cmocka_unit_test(test_streams),      cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_moments),      cmocka_unit_test(test_bins),
        cmocka_unit_test(test_tails),        cmocka_unit_test(test_correlation),
        cmocka_unit_test(test_slices),       cmocka_unit_test(test_grid),
        cmocka_unit_test(test_no_deviation), cmocka_unit_test(test_polls),
        cmocka_unit_test(test_draws),        cmocka_unit_test(test_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
