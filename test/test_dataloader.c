// test_dataloader.c: the data room against slow, obvious references. Every shard and tokenizer is
// written here, into a temporary folder, byte by byte; what must end the program runs in a child,
// whose exit code and message are checked.
#include "dataloader.h"

#include <unistd.h> // fork, ftruncate

#include "harness.h"

// The program keeps its data sets until it ends.
static void dataset_close(Dataset *ds) {
    for (int i = 0; i < ds->shard_count; i++) { unmap_file(ds->shards[i].map); }
    free(ds->shards);
    free(ds->table);
    free(ds->rows);
    memset(ds, 0, sizeof *ds);
}

// -------------------------------------------------------------------------------------------------
// Writing files

static char folder[256];

static const char *path_of(const char *name) { // two live at a time
    static char paths[2][512];
    static int turn;
    turn ^= 1;
    snprintf(paths[turn], sizeof paths[turn], "%s/%s", folder, name);
    return paths[turn];
}
static void write_file(const char *name, const void *data, size_t bytes) {
    FILE *f = fopen(path_of(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}
static void write_shard_as(const char *name, int32_t magic, int32_t version, int32_t claimed,
                           const uint16_t *tokens, int64_t count) {
    size_t bytes = 1024 + 2 * (size_t)count;
    unsigned char *data = calloc(bytes, 1);
    int32_t header[3] = {magic, version, claimed};
    memcpy(data, header, sizeof header);
    if (count) { memcpy(data + 1024, tokens, 2 * (size_t)count); }
    write_file(name, data, bytes);
    free(data);
}
static void write_labelled(const char *name, int32_t labels, int32_t first, const uint16_t *tokens,
                           int64_t count) {
    unsigned char data[2048] = {0};
    int32_t header[5] = {20240520, 1, (int32_t)count, labels, first};
    memcpy(data, header, sizeof header);
    memcpy(data + 1024, tokens, 2 * (size_t)count);
    write_file(name, data, 1024 + 2 * (size_t)count);
}
static void write_shard(const char *name, const uint16_t *tokens, int64_t count) {
    write_shard_as(name, 20240520, 1, (int32_t)count, tokens, count);
}
static void clear_folder(void) {
    glob_t found;
    if (glob(path_of("*"), 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) {
            if (unlink(found.gl_pathv[i]) != 0) { rmdir(found.gl_pathv[i]); }
        }
        globfree(&found);
    }
}
static int make_folder(void **state) {
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/test_dataloader.XXXXXX", base ? base : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}
static int remove_folder(void **state) {
    (void)state;
    clear_folder();
    return rmdir(folder);
}
static int fresh(void **state) {
    (void)state;
    clear_folder();
    return 0;
}

static DatasetOptions options_of(int64_t T, WindowKind windows, bool shuffle, uint64_t seed) {
    DatasetOptions o = {"--train", T, 1000, 7, windows, shuffle, seed, 0};
    return o;
}
static Dataset open_all(int64_t T, WindowKind windows, bool shuffle, uint64_t seed) {
    return dataset_open(path_of("*.bin"), options_of(T, windows, shuffle, seed));
}
static void count_up(uint16_t *tokens, int64_t n, int first) {
    for (int64_t i = 0; i < n; i++) { tokens[i] = (uint16_t)(first + i); }
}

// -------------------------------------------------------------------------------------------------
// What tells data apart

static uint64_t checksum_of(WindowKind windows, int32_t eot) {
    DatasetOptions o = options_of(4, windows, false, 0);
    o.eot = eot;
    Dataset ds = dataset_open(path_of("*.bin"), o);
    uint64_t sum = dataset_checksum(&ds);
    dataset_close(&ds);
    return sum;
}
static void test_checksum(void **state) {
    (void)state;
    uint16_t tokens[500];
    for (int i = 0; i < 500; i++) { tokens[i] = (uint16_t)(i * i % 11); }
    write_shard("a.bin", tokens, 500);
    const uint64_t continuous = checksum_of(WINDOWS_CONTINUOUS, 7),
                   documents = checksum_of(WINDOWS_DOCUMENT, 5);
    assert_true(continuous == checksum_of(WINDOWS_CONTINUOUS, 5)); // nothing depends on end-of-text
    assert_true(continuous != documents && documents != checksum_of(WINDOWS_DOCUMENT, 9));
    for (int i = 0; i < 500; i += 7) { // each token counts
        tokens[i]++;
        write_shard("a.bin", tokens, 500);
        assert_true(checksum_of(WINDOWS_CONTINUOUS, 7) != continuous);
        tokens[i]--;
    }
    write_shard("a.bin", tokens, 499);
    assert_true(checksum_of(WINDOWS_CONTINUOUS, 7) != continuous);
    clear_folder();
    // other files, the same stream
    write_shard("x.bin", tokens, 123);
    write_shard("y.bin", tokens + 123, 377);
    assert_true(checksum_of(WINDOWS_CONTINUOUS, 7) == continuous &&
                checksum_of(WINDOWS_DOCUMENT, 5) == documents);
    clear_folder();
    write_shard("y.bin", tokens, 123);
    write_shard("x.bin", tokens + 123, 377); // in another order
    assert_true(checksum_of(WINDOWS_CONTINUOUS, 7) != continuous);
}

// -------------------------------------------------------------------------------------------------
// Samples of continuous windows

static void test_sample_by_hand(void **state) {
    (void)state;
    const uint16_t tokens[10] = {10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
    write_shard("a.bin", tokens, 10);
    Dataset ds = open_all(4, WINDOWS_CONTINUOUS, false, 0);
    int32_t inputs[16], targets[16];
    dataset_fill(&ds, 0, 4, inputs, targets);
    const int32_t expected_inputs[16] = {10, 11, 12, 13, 14, 15, 16, 17,
                                         18, 19, 10, 11, 12, 13, 14, 15};
    const int32_t expected_targets[16] = {11, 12, 13, 14, 15, 16, 17, 18,
                                          19, 10, 11, 12, 13, 14, 15, 16};
    assert_memory_equal(inputs, expected_inputs, sizeof inputs);
    assert_memory_equal(targets, expected_targets, sizeof targets);
    assert_int_equal(ds.tokens, 10);
    assert_int_equal(ds.windows, 2); // 10 tokens: 0..4 and 4..8
    assert_int_equal(dataset_targets(&ds, 2), 4);
    dataset_close(&ds);
}

static void check_samples(const Dataset *ds, const uint16_t *stream, int64_t n, int64_t T,
                          int64_t samples) {
    assert_int_equal(ds->tokens, n);
    int32_t *inputs = malloc((size_t)(samples * T) * 4),
            *targets = malloc((size_t)(samples * T) * 4);
    dataset_fill(ds, 0, samples, inputs, targets);
    for (int64_t g = 0; g < samples; g++) {
        for (int64_t t = 0; t < T; t++) {
            assert_int_equal(inputs[g * T + t], stream[(g * T + t) % n]);
            assert_int_equal(targets[g * T + t], stream[(g * T + t + 1) % n]);
        }
    }
    free(inputs);
    free(targets);
}
// Every n from 2 and every T, T > n too, the stream cut into four shards at random places (some of
// them empty).
static void test_sample_rule(void **state) {
    (void)state;
    uint16_t stream[24];
    count_up(stream, 24, 100);
    const char *names[4] = {"s0.bin", "s1.bin", "s2.bin", "s3.bin"};
    for (int64_t n = 2; n <= 24; n++) {
        int64_t cut[5] = {0, 0, 0, 0, n};
        for (int i = 1; i < 4; i++) {
            cut[i] = cut[i - 1] + (int64_t)(random_u64(1, (uint64_t)n, (uint64_t)i) %
                                            (uint64_t)(n - cut[i - 1] + 1));
        }
        for (int i = 0; i < 4; i++) { write_shard(names[i], stream + cut[i], cut[i + 1] - cut[i]); }
        for (int64_t T = 1; T <= 60; T++) {
            Dataset ds = open_all(T, WINDOWS_CONTINUOUS, false, 0);
            check_samples(&ds, stream, n, T, 2 * n + 3);
            assert_int_equal(ds.windows, (n - 1) / T);
            dataset_close(&ds);
        }
    }
}
static void test_far_samples(void **state) { // g T does not fit into 64 bits
    (void)state;
    uint16_t stream[13];
    count_up(stream, 13, 0);
    write_shard("a.bin", stream, 13);
    int64_t T = 1000003;
    int32_t *inputs = malloc((size_t)T * 4), *targets = malloc((size_t)T * 4);
    Dataset ds = open_all(T, WINDOWS_CONTINUOUS, false, 0);
    for (int64_t g = INT64_MAX - 5; g < INT64_MAX; g++) {
        dataset_fill(&ds, g, 1, inputs, targets);
        int64_t begin = (int64_t)((unsigned __int128)g * (unsigned __int128)T % 13);
        assert_int_equal(inputs[0], begin);
        assert_int_equal(inputs[T - 1], (begin + T - 1) % 13);
        assert_int_equal(targets[T - 1], (begin + T) % 13);
    }
    dataset_close(&ds);
    free(inputs);
    free(targets);
}
// bytes of the name, whatever the locale; one sample over four shards
static void test_name_order(void **state) {
    (void)state;
    const uint16_t a = 1, b = 2, c = 3, d = 4;
    write_shard("B.bin", &a, 1);
    write_shard("_.bin", &b, 1);
    write_shard("a10.bin", &c, 1);
    write_shard("a9.bin", &d, 1);
    Dataset ds = open_all(4, WINDOWS_CONTINUOUS, false, 0);
    int32_t inputs[4], targets[4];
    const int32_t expected_inputs[4] = {1, 2, 3, 4}, expected_targets[4] = {2, 3, 4, 1};
    dataset_fill(&ds, 0, 1, inputs, targets);
    assert_memory_equal(inputs, expected_inputs, sizeof inputs);
    assert_memory_equal(targets, expected_targets, sizeof targets);
    dataset_close(&ds);
    // a list is sorted too
    ds = dataset_open(path_of("{a9,B}.bin"), options_of(1, WINDOWS_CONTINUOUS, false, 0));
    dataset_fill(&ds, 0, 2, inputs, targets);
    assert_int_equal(ds.tokens, 2);
    assert_int_equal(inputs[0], 1);
    assert_int_equal(inputs[1], 4);
    dataset_close(&ds);
}
static void write_sparse(const char *name, int32_t count, uint16_t last) {
    write_shard_as(name, 20240520, 1, count, NULL, 0);
    FILE *f = fopen(path_of(name), "r+b");
    assert_non_null(f);
    int64_t end = 1024 + 2 * (int64_t)count;
    if (ftruncate(fileno(f), end) != 0) {
        fclose(f);
        skip();
    }
    assert_int_equal(fseeko(f, end - 2, SEEK_SET), 0);
    assert_int_equal(fwrite(&last, 2, 1, f), 1);
    assert_int_equal(fclose(f), 0);
}
// files over 2 GiB and more than 2^31 tokens; sparse, so they take no room
static void test_large_files(void **state) {
    (void)state;
    const int32_t each = 1100000000; // more than 2^31 bytes in a file, 2^31 tokens in both
    write_sparse("a.bin", each, 11);
    write_sparse("b.bin", each, 12);
    DatasetOptions o = options_of(4, WINDOWS_CONTINUOUS, false, 0);
    o.vocab = 65536; // every uint16 is a token: nothing to scan
    Dataset ds = dataset_open(path_of("*.bin"), o);
    assert_true(ds.tokens == INT64_C(2200000000));
    for (int i = 0; i < 2; i++) {
        int32_t inputs[4], targets[4];
        dataset_fill(&ds, (i + 1) * (int64_t)each / 4 - 1, 1, inputs, targets);
        assert_int_equal(inputs[2], 0);
        assert_int_equal(inputs[3], 11 + i);
        assert_int_equal(targets[2], 11 + i);
        assert_int_equal(targets[3], 0);
    }
    dataset_close(&ds);
}
static void test_fill_windows(void **state) { // an explicit list, and fill in pieces = fill at once
    (void)state;
    uint16_t stream[50];
    count_up(stream, 50, 200);
    write_shard("a.bin", stream, 50);
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        Dataset ds = open_all(3, WINDOWS_CONTINUOUS, shuffle, 5);
        int32_t whole[2][60], inputs[60], targets[60];
        int64_t windows[20];
        dataset_fill(&ds, 11, 20, whole[0], whole[1]);
        for (int i = 0; i < 20; i++) {
            dataset_fill(&ds, 11 + i, 1, inputs + 3 * i, targets + 3 * i);
            windows[i] = dataset_window(&ds, 11 + i);
        }
        assert_memory_equal(inputs, whole[0], sizeof inputs);
        assert_memory_equal(targets, whole[1], sizeof targets);
        dataset_fill_windows(&ds, windows, 20, inputs, targets);
        assert_memory_equal(inputs, whole[0], sizeof inputs);
        assert_memory_equal(targets, whole[1], sizeof targets);
        dataset_close(&ds);
    }
}

// -------------------------------------------------------------------------------------------------
// Shuffling

static void check_bijective(uint64_t key, int64_t W) {
    unsigned char *seen = calloc((size_t)W, 1);
    for (int64_t x = 0; x < W; x++) {
        int64_t y = permutation(key, W, x);
        assert_true(y >= 0 && y < W);
        assert_false(seen[y]);
        seen[y] = 1;
    }
    free(seen);
}
static void test_permutation_is_bijective(void **state) {
    (void)state;
    for (int64_t W = 1; W <= 200; W++) {
        for (uint64_t key = 0; key < 20; key++) { check_bijective(mix64(key), W); }
    }
    const int64_t large[] = {1009, 4096, 65535, 65537, 99991, 1 << 17};
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        check_bijective(mix64(i), large[i]);
    }
}
// Sum of (found - expected)^2 / expected; its mean is the degrees of freedom f, its deviation
// sqrt(2 f).
static double chi_square(const int *counts, int cells, double expected) {
    double sum = 0;
    for (int i = 0; i < cells; i++) {
        sum += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    return sum;
}
static void assert_chi_square(const int *counts, int cells, double expected, double freedom) {
    double found = chi_square(counts, cells, expected), deviation = sqrt(2 * freedom);
    if (found > freedom + 5 * deviation || found < freedom - 5 * deviation) {
        fail_msg("chi-square %g with %g degrees of freedom", found, freedom);
    }
}
// all 6, 24 and 120 orders of 3, 4 and 5 windows are equally frequent
static void test_permutation_small_is_uniform(void **state) {
    (void)state;
    for (int W = 3; W <= 5; W++) {
        int counts[3125] = {0}, seen[3125], orders = 0, factorial = W == 3 ? 6 : W == 4 ? 24 : 120;
        for (uint64_t e = 0; e < 24000; e++) {
            int code = 0;
            for (int x = 0; x < W; x++) {
                code = code * W + (int)permutation(random_u64(3, 4, e), W, x);
            }
            counts[code]++;
        }
        for (int i = 0; i < 3125; i++) {
            if (counts[i]) { seen[orders++] = counts[i]; }
        }
        assert_int_equal(orders, factorial);
        assert_chi_square(seen, factorial, 24000.0 / factorial, factorial - 1);
    }
}
static void test_permutation_large_is_uniform(void **state) {
    (void)state;
    const int W = 10007, epochs = 16;
    int cells[256] = {0}, steps[64] = {0}, fixed = 0, order[2] = {0, 0};
    for (uint64_t e = 0; e < (uint64_t)epochs; e++) {
        int64_t before = permutation(mix64(e), W, W - 1);
        for (int64_t x = 0; x < W; x++) {
            int64_t y = permutation(mix64(e), W, x);
            cells[x * 16 / W * 16 + y * 16 / W]++;  // where does it go
            steps[(y - before + W) % W * 64 / W]++; // how far from its neighbour
            // the epoch before says nothing
            if (e) { order[y > permutation(mix64(e - 1), W, x)]++; }
            fixed += y == x;
            before = y;
        }
    }
    // rows and columns are full: 15 x 15 are free
    assert_chi_square(cells, 256, W * epochs / 256.0, 225);
    assert_chi_square(steps, 64, W * epochs / 64.0, 63);
    assert_true(abs(order[0] - order[1]) < 5 * sqrt(W * epochs));
    assert_in_range(fixed, 2, 36); // 16 expected, deviation 4
}
static void test_shuffled_epochs(void **state) {
    (void)state;
    uint16_t stream[100];
    count_up(stream, 100, 0);
    write_shard("a.bin", stream, 60);
    write_shard("b.bin", stream + 60, 40);
    Dataset ds = open_all(3, WINDOWS_CONTINUOUS, true, 42),
            other = open_all(3, WINDOWS_CONTINUOUS, true, 43);
    const int64_t W = 33; // (100 - 1) div 3
    assert_int_equal(ds.windows, W);
    int same_epoch = 0, same_seed = 0, same_place = 0;
    for (int64_t e = 0; e < 10; e++) {
        unsigned char seen[33] = {0};
        for (int64_t i = 0; i < W; i++) {
            int32_t inputs[3], targets[3];
            dataset_fill(&ds, e * W + i, 1, inputs, targets);
            int64_t w = inputs[0] / 3;
            for (int t = 0; t < 3; t++) { // a whole window that does not wrap
                assert_int_equal(inputs[t], w * 3 + t);
                assert_int_equal(targets[t], w * 3 + t + 1);
            }
            assert_int_equal(w, dataset_window(&ds, e * W + i));
            assert_int_equal(dataset_targets(&ds, e * W + i), 3);
            assert_false(seen[w]);
            seen[w] = 1;
            same_epoch += w == dataset_window(&ds, (e + 1) * W + i);
            same_seed += w == dataset_window(&other, e * W + i);
            same_place += w == i;
        }
    }
    assert_in_range(same_epoch, 0, 30); // 10 expected of each, 330 if nothing changed
    assert_in_range(same_seed, 0, 30);
    assert_in_range(same_place, 0, 30);
    dataset_close(&ds);
    dataset_close(&other);
}

// -------------------------------------------------------------------------------------------------
// Poisson sampling. The key is fixed, so nothing passes or fails by chance: 5 standard deviations
// say how strange a right sampler would be. Seen red when broken on purpose: a gap one longer, ln(1
// - q) taken as -q, the first ones kept of more than the cap, the step left out.

static Dataset only_windows(int64_t windows) {
    Dataset ds;
    memset(&ds, 0, sizeof ds);
    ds.windows = windows;
    return ds;
}
static NoiseStream sampling(uint64_t step) {
    NoiseStream s = {{1, 2, 3, 4, 5, 6, 7, 8}, NOISE_SAMPLING, 0, step};
    return s;
}
// ascending, so each at most once
static int64_t sample_checked(const Dataset *ds, double q, int64_t cap, uint64_t step,
                              int64_t *windows) {
    const int64_t count = dataset_sample_poisson(ds, q, cap, sampling(step), windows);
    assert_true(count >= 0 && count <= cap);
    for (int64_t i = 0; i < count; i++) {
        assert_true(windows[i] < ds->windows && windows[i] > (i ? windows[i - 1] : -1));
    }
    return count;
}
static void assert_near(double found, double expected, double deviation) {
    if (!(fabs(found - expected) <= 5 * deviation)) {
        fail_msg("%.6g, expected %.6g, with a standard deviation of %.3g", found, expected,
                 deviation);
    }
}

// the size of a sample is binomial, each window comes equally often, steps know nothing of each
// other
static void test_poisson_frequencies(void **state) {
    (void)state;
    enum { W = 1000, STEPS = 3000 };
    const double rates[] = {0.003, 0.05, 0.5, 0.97};
    const Dataset ds = only_windows(W);
    int64_t windows[W];
    for (int k = 0; k < 4; k++) {
        const double q = rates[k], variance = W * q * (1 - q);
        double sum = 0, squares = 0, uneven = 0, again = 0, times[W] = {0};
        bool last[W] = {false};
        for (uint64_t step = 0; step < STEPS; step++) {
            const double count = (double)sample_checked(&ds, q, W, step, windows);
            bool now[W] = {false};
            sum += count;
            squares += (count - W * q) * (count - W * q);
            for (int64_t i = 0; i < (int64_t)count; i++) {
                times[windows[i]]++;
                now[windows[i]] = true;
                again += last[windows[i]];
            }
            memcpy(last, now, sizeof last);
        }
        for (int w = 0; w < W; w++) {
            uneven += (times[w] - STEPS * q) * (times[w] - STEPS * q) / (STEPS * q * (1 - q));
        }
        assert_near(sum / STEPS, W * q, sqrt(variance / STEPS));
        assert_near(squares / STEPS, variance,
                    variance * sqrt(2.0 / STEPS + 1 / (STEPS * variance)));
        assert_near(uneven, W, sqrt(2.0 * W + W / (STEPS * q * (1 - q))));
        // two pairs share a step
        assert_near(again, (STEPS - 1) * W * q * q,
                    sqrt((STEPS - 1) * W * (q * q * (1 - q * q) + 2 * q * q * q * (1 - q))));
    }
}
// against the same draws, counted out: a gap is longer than g where u <= (1 - q)^(g + 1)
static void test_poisson_gaps(void **state) {
    (void)state;
    enum { W = 20000, MOST = 40 };
    const double rates[] = {0.9, 0.3, 0.02, 0.001};
    const Dataset ds = only_windows(W);
    static int64_t windows[W];
    for (int k = 0; k < 4; k++) {
        const double q = rates[k];
        const int64_t count = sample_checked(&ds, q, W, 7, windows);
        NoiseDraws draws = noise_draws(sampling(7));
        double lengths[MOST] = {0}, square = 0, bins = 0;
        for (int64_t i = 0, at = 0; i <= count; i++, at++) {
            const double u = noise_uniform(&draws);
            int64_t gap = 0;
            for (double longer = 1 - q; u <= longer && at + gap < W; longer *= 1 - q) { gap++; }
            at += gap;
            assert_int_equal(at, i < count ? windows[i] : W);
            if (i < count && gap < MOST) { lengths[gap]++; }
        }
        for (int g = 0; g < MOST; g++) {
            const double expected = (double)count * q * pow(1 - q, g);
            if (expected >= 5) {
                bins++;
                square += (lengths[g] - expected) * (lengths[g] - expected) / expected;
            }
        }
        assert_near(square, bins, sqrt(2 * bins + 1));
    }
}
static void test_poisson_edges(void **state) {
    (void)state;
    enum { MOST = 1000 };
    const int64_t sizes[] = {1, 2, 17, MOST};
    int64_t windows[MOST];
    for (int k = 0; k < 4; k++) { // all of them, at every step
        const Dataset ds = only_windows(sizes[k]);
        for (uint64_t step = 0; step < 200; step++) {
            assert_int_equal(sample_checked(&ds, 1.0, sizes[k], step, windows), sizes[k]);
            assert_int_equal(sample_checked(&ds, 1.0 - 0x1p-53, MOST, step, windows), sizes[k]);
        }
    }
    const Dataset large = only_windows((INT64_C(1) << 40) - 1), none = only_windows(0);
    double sum = 0, upper = 0;
    for (uint64_t step = 0; step < 2000; step++) { // 2 of 10^12
        const int64_t count = sample_checked(&large, 0x1p-39, MOST, step, windows);
        sum += (double)count;
        for (int64_t i = 0; i < count; i++) { upper += windows[i] >= INT64_C(1) << 39; }
        assert_int_equal(sample_checked(&large, 1e-300, MOST, step, windows), 0);
        assert_int_equal(sample_checked(&large, 5e-324, MOST, step, windows), 0);
        assert_int_equal(sample_checked(&none, 0.5, MOST, step, windows), 0);
    }
    assert_near(sum, 4000, sqrt(4000));
    assert_near(upper, sum / 2, sqrt(sum / 4));
}
// of more than the cap each is left out equally often; a cap that is not met changes nothing
static void test_poisson_choice(void **state) {
    (void)state;
    enum { W = 400, CAP = 50, STEPS = 3000 };
    const double q = 0.5, kept = (double)CAP / W;
    const Dataset ds = only_windows(W);
    int64_t windows[W], all[W];
    double times[W] = {0}, uneven = 0, early = 0;
    for (uint64_t step = 0; step < STEPS; step++) {
        const int64_t count = sample_checked(&ds, q, W, step, all);
        // 15 standard deviations below the mean
        assert_int_equal(sample_checked(&ds, q, CAP, step, windows), CAP);
        for (int64_t i = 0; i < CAP; i++) {
            times[windows[i]]++;
            early += windows[i] < W / 2;
        }
        assert_int_equal(sample_checked(&ds, q, count, step, windows), count);
        assert_memory_equal(windows, all, (size_t)count * sizeof *all);
    }
    for (int w = 0; w < W; w++) {
        uneven +=
            (times[w] - STEPS * kept) * (times[w] - STEPS * kept) / (STEPS * kept * (1 - kept));
    }
    assert_near(uneven, W, sqrt(2.0 * W));
    assert_near(early, STEPS * CAP / 2.0, sqrt(STEPS * CAP / 4.0));
}
// one answer for all who ask; another one for another key, step or domain
static void test_poisson_streams(void **state) {
    (void)state;
    enum { W = 5000 };
    write_shard("a.bin", (const uint16_t[]){1, 2, 3, 4, 5, 6, 7, 8, 9}, 9);
    Dataset shuffled = open_all(1, WINDOWS_CONTINUOUS, true, 77);
    const Dataset ds = only_windows(W), eight = only_windows(8);
    NoiseStream streams[5] = {sampling(3), sampling(3), sampling(4), sampling(3), sampling(3)};
    static int64_t windows[5][W];
    int64_t counts[5];
    streams[3].key[0]++;
    streams[4].domain = NOISE_GRADIENT;
    for (int i = 0; i < 5; i++) {
        counts[i] = dataset_sample_poisson(&ds, 0.1, W, streams[i], windows[i]);
    }
    assert_true(counts[0] == counts[1]);
    assert_memory_equal(windows[0], windows[1], (size_t)counts[0] * sizeof **windows);
    for (int i = 2; i < 5; i++) {
        double both = 0;
        for (int64_t a = 0, b = 0; a < counts[0] && b < counts[i];
             windows[0][a] < windows[i][b] ? a++ : b++) {
            both += windows[0][a] == windows[i][b];
        }
        assert_near(both, W * 0.01, sqrt(W * 0.01)); // as many as two independent samples share
    }
    for (uint64_t step = 0; step < 50; step++) { // the order of epochs is not in it
        const int64_t count = sample_checked(&shuffled, 0.5, 8, step, windows[0]);
        assert_int_equal(sample_checked(&eight, 0.5, 8, step, windows[1]), count);
        assert_memory_equal(windows[0], windows[1], (size_t)count * sizeof **windows);
    }
    dataset_close(&shuffled);
}

// -------------------------------------------------------------------------------------------------
// Document windows (7 is end-of-text)

static void test_documents_by_hand(void **state) {
    (void)state;
    const uint16_t a[] = {1, 2, 7, 10, 11, 12, 13}, b[] = {14, 7, 7, 20, 21, 22, 23, 7};
    write_shard("a.bin", a, 7);
    write_shard("b.bin", b, 8);
    // documents: {1 2} {7 10 11 12 13 | 14} over the border {7} {7 20 21 22 23} {7}
    const int32_t expected[5][2][3] = {
        {{1, 2, 7}, {2, -1, -1}},    {{7, 10, 11}, {10, 11, 12}}, {{12, 13, 14}, {13, 14, -1}},
        {{7, 20, 21}, {20, 21, 22}}, {{22, 23, 7}, {23, -1, -1}},
    };
    const int real[5] = {1, 3, 2, 3, 1};
    Dataset ds = open_all(3, WINDOWS_DOCUMENT, false, 0);
    assert_int_equal(ds.windows, 5);
    assert_int_equal(ds.documents, 3); // those of one token have no window
    for (int64_t g = 0; g < 12; g++) { // wraps
        int32_t inputs[3], targets[3];
        dataset_fill(&ds, g, 1, inputs, targets);
        assert_memory_equal(inputs, expected[g % 5][0], sizeof inputs);
        assert_memory_equal(targets, expected[g % 5][1], sizeof targets);
        assert_int_equal(dataset_targets(&ds, g), real[g % 5]);
        assert_int_equal(dataset_window_targets(&ds, g % 5), real[g % 5]);
    }
    dataset_close(&ds);
}
// A stream of documents of random lengths (1 and multiples of T among them) against a loop over its
// documents.
static void check_documents(const uint16_t *stream, int64_t n, int64_t T, bool shuffle) {
    Dataset ds = open_all(T, WINDOWS_DOCUMENT, shuffle, 9);
    int64_t window = 0, all = 0, sum = 0;
    int32_t *inputs = malloc((size_t)T * 4), *targets = malloc((size_t)T * 4);
    for (int64_t begin = 0, end; begin < n; begin = end) {
        for (end = begin + 1; end < n && stream[end] != 7; end++) {}
        for (int64_t at = begin; at < end - 1; at += T, window++) {
            dataset_fill_window(&ds, window, inputs, targets);
            int64_t real = 0;
            for (int64_t t = 0; t < T; t++) {
                assert_int_equal(inputs[t], at + t < end ? stream[at + t] : 7);
                assert_int_equal(targets[t], at + t + 1 < end ? stream[at + t + 1] : -1);
                real += targets[t] != -1;
            }
            assert_true(real >= 1);
            assert_int_equal(dataset_window_targets(&ds, window), real);
            all += real;
        }
    }
    assert_int_equal(ds.windows, window);
    // an epoch has each window once
    for (int64_t i = 0; i < window; i++) { sum += dataset_targets(&ds, 3 * window + i); }
    assert_int_equal(sum, all);
    free(inputs);
    free(targets);
    dataset_close(&ds);
}
static void test_documents(void **state) {
    (void)state;
    enum { N = 6000 };
    static uint16_t stream[N];
    for (int i = 0; i < N; i++) { stream[i] = (uint16_t)(8 + random_u64(1, 2, (uint64_t)i) % 900); }
    uint64_t k = 0;
    // short documents, sometimes one of 1 token or of a few hundred
    for (int64_t i = 5; i < N; k++) {
        stream[i] = 7;
        uint64_t r = random_u64(3, 4, k);
        i += 1 + (int64_t)(r % 10 == 0 ? r / 10 % 700 : r / 10 % 17);
    }
    write_shard("a.bin", stream, 1000);
    write_shard("b.bin", stream + 1000, 3001);
    write_shard("c.bin", stream + 4001, N - 4001);
    const int64_t lengths[] = {1, 2, 3, 4, 8, 64, 1000, 7000};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        check_documents(stream, N, lengths[i], false);
        check_documents(stream, N, lengths[i], true);
    }
}
static void test_documents_shuffled(void **state) {
    (void)state;
    uint16_t stream[90];
    for (int i = 0; i < 90; i++) { stream[i] = (uint16_t)(i % 9 ? 100 + i : 7); }
    write_shard("a.bin", stream, 90);
    Dataset ds = open_all(4, WINDOWS_DOCUMENT, true, 1); // ten documents of 9: two windows each
    assert_int_equal(ds.windows, 20);
    int same = 0, ordered = 0;
    for (int64_t e = 0; e < 10; e++) {
        unsigned char seen[20] = {0};
        for (int64_t i = 0; i < 20; i++) {
            int64_t w = dataset_window(&ds, 20 * e + i);
            assert_in_range(w, 0, 19);
            assert_false(seen[w]);
            seen[w] = 1;
            same += w == dataset_window(&ds, 20 * (e + 1) + i);
            ordered += w == i;
        }
    }
    assert_in_range(same, 0, 30);
    assert_in_range(ordered, 0, 30);
    dataset_close(&ds);
}
// the first ones of each document, in the order they have without a limit
static void test_windows_per_document(void **state) {
    (void)state;
    uint16_t stream[400];
    for (int i = 0; i < 400; i++) { stream[i] = (uint16_t)(8 + i); }
    int begins[400], count = 0;
    for (int i = 3; i < 400; i += 1 + (int)(random_u64(5, 6, (uint64_t)i) % 60)) {
        begins[count++] = i;
        stream[i] = 7;
    }
    write_shard("a.bin", stream, 150);
    write_shard("b.bin", stream + 150, 250);
    Dataset all = open_all(4, WINDOWS_DOCUMENT, false, 0);
    for (int64_t most = 1; most <= 20; most++) {
        DatasetOptions o = options_of(4, WINDOWS_DOCUMENT, most % 2, 3);
        o.windows_per_document = most;
        Dataset ds = dataset_open(path_of("*.bin"), o);
        int64_t kept = 0, taken = 0;
        for (int64_t w = 0, document = -2; w < all.windows; w++) {
            const int64_t at = (int64_t)(all.table[w] >> TARGET_BITS);
            int64_t now = -1; // the document in front of the first end-of-text
            while (now + 1 < count && begins[now + 1] <= at) { now++; }
            taken = now == document ? taken + 1 : 1;
            document = now;
            if (taken <= most) {
                assert_true(kept < ds.windows && ds.table[kept] == all.table[w]);
                kept++;
            }
        }
        assert_int_equal(ds.windows, kept);
        dataset_close(&ds);
    }
    dataset_close(&all);
}
static void test_largest_token(void **state) { // wherever it lies, of lengths around a block
    (void)state;
    enum { MOST = 600 };
    uint16_t tokens[MOST];
    uint32_t wide[MOST];
    const Tokens narrow_view = {tokens, 2}, wide_view = {wide, 4};
    assert_int_equal(largest_token(narrow_view, 0), -1);
    for (int64_t count = 1; count <= MOST; count += count < 5 ? 1 : 53) {
        for (int64_t at = 0; at < count; at++) {
            for (int64_t i = 0; i < MOST; i++) {
                tokens[i] = i < count ? (uint16_t)(i % 7) : 65535;
            }
            tokens[at] = (uint16_t)(at % 2 ? 65535 : 40000);
            assert_int_equal(largest_token(narrow_view, count), tokens[at]);
            for (int64_t i = 0; i < MOST; i++) { wide[i] = 60001u * tokens[i]; }
            assert_int_equal(largest_token(wide_view, count), (int64_t)wide[at]);
        }
    }
    memset(tokens, 0, sizeof tokens);
    assert_int_equal(largest_token(narrow_view, MOST), 0);
}
static void test_find_token(void **state) { // every place, inside and outside of whole blocks
    (void)state;
    static uint16_t tokens[1100];
    static uint32_t wide[1100];
    const Tokens views[] = {{tokens, 2}, {wide, 4}};
    for (int k = 0; k < 2; k++) {
        const int64_t id = k ? UINT32_MAX - 9 : 500, most = k ? UINT32_MAX : 65535;
        for (int64_t i = 0; i < 1100; i++) {
            tokens[i] = 500;
            wide[i] = UINT32_MAX - 9;
            assert_int_equal(find_token(views[k], 1100, id, most), i);
            assert_int_equal(find_token(views[k], 1100, id, id), i);
            assert_int_equal(find_token(views[k], 1100, id + 1, most), 1100);
            assert_int_equal(find_token(views[k], i, id, id), i);
            tokens[i] = 0;
            wide[i] = 500;
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Labelled shards: three images of three pixels, whose labels are 500, 501 and 500

static const uint16_t images[] = {7, 1, 2, 3, 500, 7, 4, 5, 6, 501, 7, 1, 1, 1, 500};
static void test_labelled(void **state) { // one window each, whatever was asked for
    (void)state;
    write_labelled("a.bin", 2, 500, images, 8);
    write_labelled("b.bin", 2, 500, images + 8, 7);
    for (int64_t T = 4; T <= 6; T++) {
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            Dataset ds = open_all(T, WINDOWS_CONTINUOUS, shuffle, 3);
            assert_int_equal(ds.windows, 3);
            assert_int_equal(ds.labels, 2);
            assert_int_equal(ds.first_label, 500);
            for (int64_t g = 0; g < 6; g++) {
                int32_t inputs[6], targets[6];
                int64_t w = dataset_window(&ds, g);
                dataset_fill(&ds, g, 1, inputs, targets);
                assert_int_equal(dataset_targets(&ds, g), 4);
                for (int64_t t = 0; t < T; t++) {
                    assert_int_equal(inputs[t], t < 5 ? images[5 * w + t] : 7);
                    assert_int_equal(targets[t], t < 4 ? images[5 * w + t + 1] : -1);
                }
            }
            dataset_close(&ds);
        }
    }
    // the same tokens without the mark
    write_shard("a.bin", images, 8);
    write_shard("b.bin", images + 8, 7);
    Dataset ds = open_all(4, WINDOWS_CONTINUOUS, false, 0);
    assert_int_equal(ds.labels, 0);
    assert_int_equal(ds.options.windows, WINDOWS_CONTINUOUS);
    dataset_close(&ds);
}

// -------------------------------------------------------------------------------------------------
// Choices

typedef struct {
    uint16_t words[4096];
    int64_t count;
    int32_t header[4];
} ChoiceImage;
static void put_word(ChoiceImage *image, int64_t word) {
    image->words[image->count++] = (uint16_t)word;
}
// Appends an example whose tokens count up from `token`.
static void put_example(ChoiceImage *image, int label, int context, const int completions[4],
                        int token) {
    int64_t begin = image->count;
    const int64_t head[6] = {65535, 0, image->header[2]++, label, 4, context};
    for (int i = 0; i < 6; i++) { put_word(image, head[i]); }
    for (int i = 0; i < context; i++) { put_word(image, token++); }
    for (int c = 0; c < 4; c++) {
        put_word(image, completions[c]);
        for (int i = 0; i < completions[c]; i++) { put_word(image, token++); }
    }
    int32_t bytes = 2 * (int32_t)(image->count - begin);
    image->words[begin + 1] = (uint16_t)bytes;
    image->header[3] = bytes > image->header[3] ? bytes : image->header[3];
}
static ChoiceImage choice_image(void) { // two examples
    ChoiceImage image = {{0}, 0, {20240522, 1, 0, 0}};
    put_example(&image, 2, 3, (const int[4]){2, 1, 4, 3}, 100);
    put_example(&image, 0, 1, (const int[4]){1, 2, 1, 1}, 200);
    return image;
}
static void write_choices(const char *name, const ChoiceImage *image) {
    static unsigned char data[1024 + sizeof image->words];
    memset(data, 0, 1024);
    memcpy(data, image->header, sizeof image->header);
    memcpy(data + 1024, image->words, 2 * (size_t)image->count);
    write_file(name, data, 1024 + 2 * (size_t)image->count);
}
static Dataset open_choices_of(int64_t T) {
    DatasetOptions o = options_of(T, WINDOWS_CONTINUOUS, false, 0);
    o.flag = "--hellaswag";
    o.eot = -1; // not known: padding is a token all the same
    return choices_open(path_of("c.bin"), o);
}
static void test_choices_by_hand(void **state) {
    (void)state;
    ChoiceImage image = choice_image();
    write_choices("c.bin", &image);
    const int32_t inputs[8][6] = {{100, 101, 102, 103, 104, 0},   {100, 101, 102, 105, 0, 0},
                                  {100, 101, 102, 106, 107, 108}, {100, 101, 102, 110, 111, 112},
                                  {200, 201, 0, 0, 0, 0},         {200, 202, 203, 0, 0, 0},
                                  {200, 204, 0, 0, 0, 0},         {200, 205, 0, 0, 0, 0}};
    const int32_t targets[8][6] = {{-1, -1, 103, 104, -1, -1},   {-1, -1, 105, -1, -1, -1},
                                   {-1, -1, 106, 107, 108, 109}, {-1, -1, 110, 111, 112, -1},
                                   {201, -1, -1, -1, -1, -1},    {202, 203, -1, -1, -1, -1},
                                   {204, -1, -1, -1, -1, -1},    {205, -1, -1, -1, -1, -1}};
    const int real[8] = {2, 1, 4, 3, 1, 2, 1, 1};
    // the longest row has 6 targets: longer ones are not computed
    for (int64_t T = 6; T <= 1000; T += 994) {
        Dataset ds = open_choices_of(T);
        assert_int_equal(ds.options.T, 6);
        assert_int_equal(ds.windows, 8);
        int32_t found[2][48];
        dataset_fill(&ds, 0, 8, found[0], found[1]);
        for (int w = 0; w < 8; w++) {
            assert_memory_equal(found[0] + 6 * w, inputs[w], sizeof inputs[w]);
            assert_memory_equal(found[1] + 6 * w, targets[w], sizeof targets[w]);
            assert_int_equal(dataset_targets(&ds, w), real[w]);
            assert_int_equal(ds.rows[w].right, w == 2 || w == 4);
        }
        dataset_close(&ds);
    }
}
// against a loop over the words that were written
static void test_choices_of_all_lengths(void **state) {
    (void)state;
    ChoiceImage image = {{0}, 0, {20240522, 1, 0, 0}};
    int lengths[60][5];
    for (int e = 0; e < 60; e++) {
        for (int i = 0; i < 5; i++) {
            lengths[e][i] = 1 + (int)(random_u64(5, (uint64_t)e, (uint64_t)i) % 9);
        }
        put_example(&image, e % 4, lengths[e][0], lengths[e] + 1, 10 * e);
    }
    write_choices("c.bin", &image);
    Dataset ds = open_choices_of(17);
    int64_t T = ds.options.T;
    for (int e = 0; e < 60; e++) {
        int token = 10 * e + lengths[e][0]; // first of the completion
        for (int c = 0; c < 4; token += lengths[e][++c]) {
            int32_t inputs[17], targets[17];
            int context = lengths[e][0], count = lengths[e][1 + c];
            dataset_fill(&ds, 4 * e + c, 1, inputs, targets);
            assert_int_equal(dataset_targets(&ds, 4 * e + c), count);
            for (int t = 0; t < T; t++) {
                int at = t + 1 - context; // of the target in the completion
                if (t < context) { assert_int_equal(inputs[t], 10 * e + t); }
                if (at > 0 && at <= count && t < T) { assert_int_equal(inputs[t], token + at - 1); }
                assert_int_equal(targets[t], at >= 0 && at < count ? token + at : -1);
            }
        }
    }
    dataset_close(&ds);
}
static void test_choosing(void **state) { // the lowest mean, the first of equal ones
    (void)state;
    // completions of 2, 1, 4, 3 tokens (third right); of 1, 2, 1, 1 (first right)
    ChoiceImage image = choice_image();
    write_choices("c.bin", &image);
    Dataset ds = open_choices_of(6);
    const struct {
        double losses[8];
        int correct;
    } cases[] = {{{2, 1, 3.9, 3, 1, 2, 1, 1}, 2},
                 {{2, 1, 4, 3, 1, 2.1, 1.1, 1}, 1},
                 {{2, 1, 3.9, 2, 1, 1.9, 1, 1}, 0},
                 {{9, 9, 9, 9, 1, 1, 1, 1}, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Choice choice = {0, false};
        int correct = 0;
        for (int w = 0; w < 8; w++) { correct += choice_add(&choice, &ds, w, cases[i].losses[w]); }
        assert_int_equal(correct, cases[i].correct);
    }
    dataset_close(&ds);
}

// -------------------------------------------------------------------------------------------------
// Tokenizers

// Five tokens: "hi", newline, "\x1b[2J" (clears a terminal), 255 letters x, and one whose text is
// "<eot>".
static size_t tokenizer_image(unsigned char *data, int32_t version, int32_t vocab, int32_t eot) {
    memset(data, 0, 1024);
    int32_t header[4] = {20240328, version, vocab, eot};
    memcpy(data, header, sizeof header);
    static const char text[] = "\2hi\1\n\4\x1b[2J";
    size_t at = 1024;
    memcpy(data + at, text, sizeof text - 1);
    at += sizeof text - 1;
    data[at++] = 255;
    memset(data + at, 'x', 255);
    at += 255;
    memcpy(data + at, "\5<eot>", 6);
    return at + 6;
}
static void assert_token(const Tokenizer *t, int32_t id, const char *text, int bytes) {
    int length;
    const unsigned char *found = tokenizer_decode(t, id, &length);
    assert_int_equal(length, strlen(text));
    assert_memory_equal(found, text, strlen(text));
    assert_int_equal(tokenizer_bytes(t, id), bytes);
}
static void test_tokenizer_2(void **state) {
    (void)state;
    unsigned char data[2048];
    write_file("t.bin", data, tokenizer_image(data, 2, 5, 4));
    Tokenizer t = tokenizer_open(path_of("t.bin"), 5);
    assert_int_equal(t.vocab, 5);
    assert_int_equal(t.eot, 4);
    assert_token(&t, 0, "hi", 2);
    assert_token(&t, 1, "\n", 1);
    assert_token(&t, 2, "\x1b[2J", 4);
    assert_token(&t, 4, "<eot>", 0);
    assert_int_equal(tokenizer_bytes(&t, 3), 255);
    const int32_t unknown[] = {-1, 5, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        int length = 1;
        assert_null(tokenizer_decode(&t, unknown[i], &length));
        assert_int_equal(length, 0);
        assert_int_equal(tokenizer_bytes(&t, unknown[i]), 0);
    }
    const int32_t targets[] = {0, -1, 3, 4, 2, 0, 77};
    assert_int_equal(tokenizer_count_bytes(&t, targets, 7), 2 + 0 + 255 + 0 + 4 + 2 + 0);
    tokenizer_close(&t);
}
static void test_tokenizer_1(void **state) { // version 1: no id, 50256 is end-of-text
    (void)state;
    enum { V = 50257, BYTES = 1024 + 2 * V };
    unsigned char *data = calloc(BYTES, 1);
    int32_t header[4] = {20240328, 1, V, 3};
    memcpy(data, header, sizeof header);
    for (int i = 0; i < V; i++) {
        data[1024 + 2 * i] = 1;
        data[1024 + 2 * i + 1] = (unsigned char)(i * 7);
    }
    write_file("t.bin", data, BYTES);
    Tokenizer t = tokenizer_open(path_of("t.bin"), V);
    assert_int_equal(t.eot, 50256);
    int length;
    assert_int_equal(tokenizer_decode(&t, 50255, &length)[0], (unsigned char)(50255 * 7));
    assert_int_equal(tokenizer_bytes(&t, 50255), 1);
    assert_int_equal(tokenizer_bytes(&t, 50256), 0);
    tokenizer_close(&t);
    free(data);
}
static void test_no_tokenizer(void **state) {
    (void)state;
    const int32_t targets[] = {0, 65, -1, 255, 255};
    Tokenizer t = tokenizer_open(NULL, 256); // bytes
    assert_int_equal(t.eot, 0);
    assert_int_equal(tokenizer_count_bytes(&t, targets, 5), 4);
    assert_token(&t, 65, "A", 1);
    tokenizer_close(&t);
    t = tokenizer_open(NULL, 100);
    assert_int_equal(tokenizer_count_bytes(&t, targets, 5), 2);
    tokenizer_close(&t);
    t = tokenizer_open(NULL, 257); // unknown
    assert_int_equal(t.eot, -1);
    assert_int_equal(tokenizer_count_bytes(&t, targets, 5), 0);
    tokenizer_close(&t);
    t = tokenizer_open(NULL, 50257);
    assert_int_equal(t.eot, 50256);
    tokenizer_close(&t);
}
// Version 3: a zero, two bytes of length, and 256 bytes or more; "a" and the end.
static size_t long_image(unsigned char *data, int32_t version, int length) {
    static const int32_t vocab = 3, eot = 2;
    const int32_t header[4] = {20240328, version, vocab, eot};
    memset(data, 0, 1024);
    memcpy(data, header, sizeof header);
    memcpy(data + 1024, "\1a\0", 3);
    data[1027] = (unsigned char)(length & 255);
    data[1028] = (unsigned char)(length >> 8);
    memset(data + 1029, 'x', (size_t)length);
    memcpy(data + 1029 + length, "\3end", 4);
    return 1033 + (size_t)length;
}
static void test_tokenizer_3(void **state) {
    (void)state;
    static unsigned char data[1 << 17];
    static const int lengths[] = {256, 257, 512, 4096, 65535};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        write_file("t.bin", data, long_image(data, 3, lengths[i]));
        Tokenizer t = tokenizer_open(path_of("t.bin"), 3);
        int length;
        assert_token(&t, 0, "a", 1);
        assert_token(&t, 2, "end", 0);
        const unsigned char *text = tokenizer_decode(&t, 1, &length);
        assert_int_equal(length, lengths[i]);
        assert_true(text[0] == 'x' && text[length - 1] == 'x');
        assert_int_equal(tokenizer_bytes(&t, 1), lengths[i]);
        tokenizer_close(&t);
    }
    write_file("t.bin", data, tokenizer_image(data, 3, 5, 4)); // without a long token
    Tokenizer t = tokenizer_open(path_of("t.bin"), 5);
    assert_token(&t, 0, "hi", 2);
    tokenizer_close(&t);
}
// the numbers that the authors of FNV-1a published; the rest by scripts/prepare_data.py
static void test_tokenizer_hash(void **state) {
    (void)state;
    const uint64_t begin = UINT64_C(0xcbf29ce484222325);
    assert_true(fnv1a(begin, "", 0) == begin);
    assert_true(fnv1a(begin, "a", 1) == UINT64_C(0xaf63dc4c8601ec8c));
    assert_true(fnv1a(begin, "foobar", 6) == UINT64_C(0x85944171f73967e8));
    unsigned char data[2048] = {0};
    const int32_t header[4] = {20240328, 2, 256, 0};
    memcpy(data, header, sizeof header);
    for (int i = 0; i < 256; i++) {
        data[1024 + 2 * i] = 1;
        data[1025 + 2 * i] = (unsigned char)i;
    }
    write_file("t.bin", data, 1024 + 512);
    Tokenizer t = tokenizer_open(path_of("t.bin"), 256);
    assert_int_equal(t.id.vocab, 256);
    assert_true(t.id.hash == UINT64_C(0xb715322a49066dea));
    tokenizer_close(&t);
    const size_t bytes = tokenizer_image(data, 2, 5, 4);
    write_file("t.bin", data, bytes);
    Tokenizer same = tokenizer_open(path_of("t.bin"), 5);
    data[bytes - 1] ^= 1;
    write_file("t.bin", data, bytes);
    Tokenizer text = tokenizer_open(path_of("t.bin"), 5);
    write_file("t.bin", data, tokenizer_image(data, 2, 5, 3));
    Tokenizer end = tokenizer_open(path_of("t.bin"), 5);
    // each of its bytes counts, and what ends a text
    assert_true(same.id.hash != text.id.hash && same.id.hash != end.id.hash);
    tokenizer_close(&same);
    tokenizer_close(&text);
    tokenizer_close(&end);
    t = tokenizer_open(NULL, 256);
    assert_int_equal(t.id.vocab, 0); // of no file nothing is known
    tokenizer_close(&t);
}
static void test_tokenizer_find(void **state) {
    (void)state;
    char found[512];
    assert_int_equal(mkdir(path_of("a_train_b"), 0700), 0);
    const char *const names[] = {"x_tokenizer.bin", "x_train_tokenizer.bin", "a_tokenizer.bin",
                                 "a_train_b/x_tokenizer.bin"};
    for (int i = 0; i < 4; i++) { write_file(names[i], "", 0); }
    static const struct {
        const char *shards, *file; // NULL: none
    } cases[] = {{"x_train_*.bin", "x_tokenizer.bin"},
                 {"x_val_000000.bin", "x_tokenizer.bin"},
                 {"x_train_val_1.bin", "x_train_tokenizer.bin"}, // the last of them
                 {"a_train_b/x_train_*.bin", "a_train_b/x_tokenizer.bin"},
                 {"a_train_b/x.bin", NULL},
                 {"y_train_0.bin", NULL},
                 {"x.bin", NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *file = tokenizer_find(path_of(cases[i].shards), found, sizeof found);
        if (!cases[i].file) {
            assert_null(file);
        } else {
            assert_string_equal(file, path_of(cases[i].file));
        }
    }
    assert_int_equal(unlink(path_of(names[3])), 0);
}
static void test_print(void **state) {
    (void)state;
    unsigned char data[2048];
    size_t bytes = tokenizer_image(data, 2, 6, 4);
    memcpy(data + bytes, "\6\t\x7f\xe2\x82\0\r", 7); // half a character, a zero byte
    write_file("t.bin", data, bytes + 7);
    Tokenizer t = tokenizer_open(path_of("t.bin"), 6);
    FILE *f = fopen(path_of("printed"), "w+b");
    assert_non_null(f);
    const int32_t ids[] = {0, 1, 2, 4, 5, 99, -1};
    for (int i = 0; i < 7; i++) { tokenizer_print(&t, ids[i], f); }
    rewind(f);
    char found[256] = {0};
    assert_true(fread(found, 1, sizeof found - 1, f) > 0);
    assert_string_equal(found, "hi\n\\x1b[2J<eot>\t\\x7f\xe2\x82\\x00\\x0d[99][-1]");
    fclose(f);
    tokenizer_close(&t);
}

// -------------------------------------------------------------------------------------------------
// Bad files: exit code 2 and a message that names the file

static void open_shards(const char *path) {
    Dataset ds = dataset_open(path, options_of(4, WINDOWS_CONTINUOUS, false, 0));
    dataset_close(&ds);
}
static void open_shuffled(const char *path) {
    Dataset ds = dataset_open(path, options_of(4, WINDOWS_CONTINUOUS, true, 0));
    dataset_close(&ds);
}
static void open_documents(const char *path) {
    Dataset ds = dataset_open(path, options_of(4, WINDOWS_DOCUMENT, false, 0));
    dataset_close(&ds);
}
static void open_documents_bad_eot(const char *path) {
    DatasetOptions o = options_of(4, WINDOWS_DOCUMENT, false, 0);
    o.eot = 50256;
    Dataset ds = dataset_open(path, o);
    dataset_close(&ds);
}
static void open_bad_length(const char *path) {
    Dataset ds = dataset_open(path, options_of(0, WINDOWS_CONTINUOUS, false, 0));
    dataset_close(&ds);
}
static void open_tokenizer(const char *path) {
    Tokenizer t = tokenizer_open(path, 5);
    tokenizer_close(&t);
}

typedef struct {
    void (*open)(const char *path);
    const char *path;
} Attempt;
static void make_attempt(const void *argument) {
    const Attempt *a = (const Attempt *)argument;
    a->open(a->path);
}
// Opens a path in a child; returns its exit code. What it says goes to message(4096).
static int attempt_in_child(void (*open)(const char *), const char *path, char *message) {
    const Attempt a = {open, path};
    return run_child(make_attempt, &a, message, 4096);
}
static void assert_refused(void (*attempt)(const char *), const char *name, const char *words) {
    char message[4096], path[512];
    snprintf(path, sizeof path, "%s", path_of(name));
    int code = attempt_in_child(attempt, path, message);
    if (code != EXIT_INPUT || !strstr(message, path) || !strstr(message, words)) {
        fail_msg("%s: expected exit code 2 and a message with \"%s\", found %d: %s", path, words,
                 code, message);
    }
}
static void assert_accepted(void (*attempt)(const char *), const char *name) {
    char message[4096];
    int code = attempt_in_child(attempt, path_of(name), message);
    if (code != 0) { fail_msg("%s: expected success, found %d: %s", name, code, message); }
}

static void test_bad_shards(void **state) {
    (void)state;
    const uint16_t tokens[6] = {1, 2, 3, 4, 999, 6}, large[6] = {1, 2, 3, 4, 1000, 6};
    assert_refused(open_shards, "none-*.bin", "make data");
    assert_refused(open_shards, "none.bin", "scripts/prepare_data.py");
    write_shard("good", tokens, 6);
    assert_accepted(open_shards, "good");
    write_shard_as("magic", 20240326, 1, 6, tokens, 6);
    assert_refused(open_shards, "magic", "found magic 20240326");
    write_shard_as("llama", 20240801, 7, 6, tokens, 6);
    assert_refused(open_shards, "llama", "expected 1048 bytes for 6 tokens, found 1036");
    write_shard_as("llama1", 20240801, 1, 6, tokens, 6);
    assert_refused(open_shards, "llama1", "or 2 (32 bits), found 1");
    write_shard_as("version", 20240520, 3, 6, tokens, 6);
    assert_refused(open_shards, "version", "or 2 (32 bits), found 3");
    write_shard_as("negative", 20240520, 1, -6, tokens, 6);
    assert_refused(open_shards, "negative", "found -6");
    write_shard_as("short", 20240520, 1, 7, tokens, 6);
    assert_refused(open_shards, "short", "expected 1038 bytes for 7 tokens, found 1036");
    write_shard_as("long", 20240520, 1, 5, tokens, 6);
    assert_refused(open_shards, "long", "expected 1034 bytes for 5 tokens, found 1036");
    write_shard_as("huge", 20240520, 1, INT32_MAX, tokens, 6);
    assert_refused(open_shards, "huge", "found 1036");
    write_shard("vocab", large, 6);
    assert_refused(open_shards, "vocab", "vocabulary of 1000, found 1000 at token 4");
    write_file("empty", tokens, 0);
    assert_refused(open_shards, "empty", "found a file of 0 bytes");
    write_file("stub", tokens, 12);
    assert_refused(open_shards, "stub", "found a file of 12 bytes");
    write_shard("two", tokens, 2);
    assert_accepted(open_shards, "two");
    write_shard("one", tokens, 1);
    assert_refused(open_shards, "one", "at least 2 tokens, found 1");
    write_shard("nothing", tokens, 0);
    assert_refused(open_shards, "nothing", "at least 2 tokens, found 0");
    assert_int_equal(mkdir(path_of("directory"), 0700), 0);
    assert_refused(open_shards, "directory", "found a directory");
    assert_int_equal(mkfifo(path_of("fifo"), 0600), 0);
    assert_refused(open_shards, "fifo", "found no regular file"); // and does not wait for a writer
    assert_int_equal(symlink("nowhere", path_of("link")), 0);
    assert_refused(open_shards, "link", "cannot open");
}
// A shard of 32-bit tokens.
static void write_wide(const char *name, int32_t magic, int32_t version, const uint32_t *tokens,
                       int32_t count, size_t bytes) {
    unsigned char data[2048] = {0};
    const int32_t header[3] = {magic, version, count};
    memcpy(data, header, sizeof header);
    memcpy(data + 1024, tokens, 4 * (size_t)count);
    write_file(name, data, bytes);
}
// A shard of 8 pages that changes after it was opened, and is read on.
enum { CHANGED_PAGES = 8, CHANGED_T = 16 };
static void read_changed(const char *path, off_t bytes, int64_t window) {
    static int32_t inputs[CHANGED_T], targets[CHANGED_T];
    Dataset ds = dataset_open(path, options_of(CHANGED_T, WINDOWS_CONTINUOUS, false, 0));
    assert_int_equal(truncate(path, bytes), 0);
    dataset_fill_window(&ds, window, inputs, targets);
}
static void read_page_that_is_gone(const char *path) { read_changed(path, 4096, 500); }
static void read_page_that_is_cut(const char *path) { read_changed(path, 4096 + 100, 98); }
static void read_before_the_cut(const char *path) { read_changed(path, 4096, 0); }
static void read_all_gone(const char *path) { read_changed(path, 0, 0); }
static void read_larger_token(const char *path) {
    static int32_t inputs[CHANGED_T], targets[CHANGED_T];
    Dataset ds = dataset_open(path, options_of(CHANGED_T, WINDOWS_CONTINUOUS, false, 0));
    FILE *f = fopen(path, "r+b");
    fseek(f, 1024 + 1, SEEK_SET);
    fputc(0x7f, f);
    fclose(f);
    dataset_fill_window(&ds, 0, inputs, targets);
}
static void read_replaced(const char *path) {
    static int32_t inputs[CHANGED_T], targets[CHANGED_T];
    Dataset ds = dataset_open(path, options_of(CHANGED_T, WINDOWS_CONTINUOUS, false, 0));
    char other[600];
    snprintf(other, sizeof other, "%s.other", path);
    FILE *f = fopen(other, "wb");
    fclose(f);
    if (rename(other, path)) { _exit(1); }
    dataset_fill_window(&ds, 500, inputs, targets);
}
static void test_changed_shards(void **state) {
    (void)state;
    enum { COUNT = (CHANGED_PAGES * 4096 - 1024) / 2 };
    static uint16_t tokens[COUNT];
    static void (*const attempts[])(const char *) = {read_page_that_is_gone, read_page_that_is_cut,
                                                     read_before_the_cut, read_all_gone,
                                                     read_larger_token};
    for (int i = 0; i < COUNT; i++) { tokens[i] = (uint16_t)(i % 100); }
    for (size_t i = 0; i < sizeof attempts / sizeof *attempts; i++) {
        write_shard("changed", tokens, COUNT);
        assert_refused(attempts[i], "changed", "cut off or changed");
    }
    write_shard("changed", tokens, COUNT);
    assert_accepted(read_replaced, "changed");
}
static void test_wide_shards(void **state) {
    (void)state;
    const uint32_t tokens[6] = {1, 70000, 7, 65536, 7, 99999};
    const uint16_t narrow[3] = {2, 3, 4};
    write_wide("a.bin", 20240520, 2, tokens, 6, 1048);
    write_shard("b.bin", narrow, 3);
    write_wide("c.bin", 20240801, 7, tokens, 3, 1036); // llm.c's
    DatasetOptions o = options_of(3, WINDOWS_CONTINUOUS, false, 0);
    o.vocab = 100000;
    Dataset ds = dataset_open(path_of("*.bin"), o);
    const int32_t expected[12] = {1, 70000, 7, 65536, 7, 99999, 2, 3, 4, 1, 70000, 7};
    assert_int_equal(ds.tokens, 12);
    assert_int_equal(ds.largest, 99999);
    for (int i = 0; i < 12; i++) { assert_int_equal(dataset_token(&ds, i), expected[i]); }
    dataset_close(&ds);
    o.windows = WINDOWS_DOCUMENT;
    ds = dataset_open(path_of("a.bin"), o);
    assert_int_equal(ds.windows, 3); // before, at and after the first end-of-text
    dataset_close(&ds);
    const uint32_t far[3] = {1, 2, 0x80000001u}; // negative as an int32
    write_wide("far", 20240520, 2, far, 3, 1036);
    assert_refused(open_shards, "far", "vocabulary of 1000, found 2147483649 at token 2");
    write_wide("cut", 20240520, 2, far, 3, 1035);
    assert_refused(open_shards, "cut", "expected 1036 bytes for 3 tokens, found 1035");
}
static void test_bad_options(void **state) {
    (void)state;
    const uint16_t tokens[5] = {1, 2, 3, 4, 5}, ends[5] = {7, 7, 7, 7, 7},
                   document[5] = {7, 2, 3, 4, 5};
    write_shard("five", tokens, 5);
    assert_accepted(open_shuffled, "five"); // T = 4: one whole window
    write_shard("four", tokens, 4);
    assert_refused(open_shuffled, "four", "found 4 tokens");
    assert_refused(open_documents, "five", "begin with token 7, found none");
    write_shard("ends", ends, 5);
    assert_refused(open_documents, "ends", "only documents of 1 token");
    write_shard("document", document, 5);
    assert_accepted(open_documents, "document");
    char message[4096];
    assert_int_equal(attempt_in_child(open_documents_bad_eot, path_of("document"), message),
                     EXIT_INPUT);
    assert_non_null(strstr(message, "--tokenizer"));
    assert_int_equal(attempt_in_child(open_bad_length, path_of("document"), message), EXIT_INPUT);
    assert_non_null(strstr(message, "--seq-len"));
}
// A shard of six tokens, the largest 6, with words 5 to 8.
static void write_declared(const char *name, int32_t mark, int32_t vocab, uint64_t hash) {
    unsigned char data[1024 + 12] = {0};
    const int32_t header[9] = {
        20240520, 1, 6, 0, 0, mark, vocab, (int32_t)(uint32_t)hash, (int32_t)(hash >> 32)};
    const uint16_t tokens[6] = {1, 2, 3, 4, 5, 6};
    memcpy(data, header, sizeof header);
    memcpy(data + 1024, tokens, sizeof tokens);
    write_file(name, data, sizeof data);
}
static void test_tokenizers_of_shards(void **state) {
    (void)state;
    const uint64_t one = UINT64_C(0xfedcba9876543210);
    write_declared("t0", 20240328, 7, one);
    Dataset ds = dataset_open(path_of("t0"), options_of(4, WINDOWS_CONTINUOUS, false, 0));
    assert_int_equal(ds.tokenizer.vocab, 7);
    assert_true(ds.tokenizer.hash == one);
    assert_int_equal(ds.largest, 6);
    dataset_close(&ds);
    const int32_t bad[] = {0, -1, (1 << 24) + 1, INT32_MIN, INT32_MAX};
    for (int i = 0; i < 5; i++) {
        write_declared("bad", 20240328, bad[i], one);
        assert_refused(open_shards, "bad",
                       "expected a tokenizer of 1 to 16777216 tokens in word 6");
        write_declared("other", 20240329, bad[i], one); // another program's words
        assert_accepted(open_shards, "other");
    }
    write_declared("small", 20240328, 6, one);
    assert_refused(open_shards, "small",
                   "expected tokens below 6, the vocabulary of its tokenizer, found 6");
    write_declared("t1", 0, 0, 0); // an older one
    write_declared("t2", 20240328, 7, one);
    assert_accepted(open_shards, "t?");
    const uint64_t others[] = {one + 1, one ^ UINT64_C(1) << 63, one, 0};
    for (int i = 0; i < 4; i++) {
        write_declared("t3", 20240328, i == 2 ? 8 : 7, others[i]);
        char message[4096];
        assert_int_equal(attempt_in_child(open_shards, path_of("t?"), message), EXIT_INPUT);
        assert_non_null(strstr(message, "t3: expected tokens of one tokenizer (7 tokens, hash "
                                        "fedcba9876543210), found another one ("));
    }
}
static void test_bad_labels(void **state) {
    (void)state;
    write_labelled("good", 2, 500, images, 15);
    assert_accepted(open_shards, "good"); // T = 4 is just enough
    assert_accepted(open_shuffled, "good");
    const int32_t bad[][2] = {{-1, 500}, {2, -1}, {501, 500}, {INT32_MAX, INT32_MAX}, {1, 1000}};
    for (int i = 0; i < 5; i++) {
        write_labelled("bad", bad[i][0], bad[i][1], images, 15);
        assert_refused(open_shards, "bad", "expected labels below the vocabulary of 1000");
    }
    write_labelled("other", 1, 500, images, 15);
    assert_refused(
        open_shards, "other",
        "expected a label (500 to 500) at the end of the document at token 5, found 501");
    write_labelled("before", 2, 501, images, 15);
    assert_refused(
        open_shards, "before",
        "expected a label (501 to 502) at the end of the document at token 0, found 500");
    write_labelled("cut", 2, 500, images, 14);
    assert_refused(open_shards, "cut", "document at token 10, found 1");
    write_labelled("headless", 2, 500, images + 1, 4);
    assert_refused(open_shards, "headless", "begin with token 7, found none");
    const uint16_t large[] = {7, 1, 500, 7, 1, 2, 3, 4, 501};
    write_labelled("large", 2, 500, large, 9);
    assert_refused(open_shards, "large",
                   "expected --seq-len 5 at least, for the document at token 3, found 4");
    write_labelled("mixed-0", 2, 500, images, 15);
    write_shard("mixed-1", images, 15);
    char message[4096];
    assert_int_equal(attempt_in_child(open_shards, path_of("mixed-?"), message), EXIT_INPUT);
    assert_non_null(strstr(message, "mixed-1: expected 2 labels from token 500 on, as in"));
}
static void open_choices(const char *path) {
    Dataset ds = choices_open(path, options_of(6, WINDOWS_CONTINUOUS, false, 0));
    dataset_close(&ds);
}
static void assert_choices_refused(const ChoiceImage *image, const char *words) {
    write_choices("bad", image);
    assert_refused(open_choices, "bad", words);
}
static void test_bad_choices(void **state) {
    (void)state;
    // words 0 ..: 65535 46 0 2 4 | 3 100 101 102 | 2 103 104 | 1 105 | 4 ... | 3 ... | 65535 ...
    ChoiceImage good = choice_image();
    write_choices("good", &good);
    assert_accepted(open_choices, "good");
    assert_refused(open_choices, "none", "cannot open");
    const struct {
        int word; // of the header, or -1 - word of the examples
        int32_t value;
        const char *words;
    } cases[] = {
        {0, 20240520, "found magic 20240520"},
        {1, 2, "version 1 of multiple choices, found 2"},
        {2, 0, "expected 1 to 65536 examples, found 0"},
        {2, -1, "expected 1 to 65536 examples, found -1"},
        {2, INT32_MAX, "expected 1 to 65536 examples"},
        {2, 1, "expected a longest example of 46 bytes and the end at byte 1070"},
        {2, 3, "example 2: expected the mark of an example at byte 1102, found the end"},
        {2, 65536, "example 2: expected the mark of an example at byte 1102, found the end"},
        {3, 44, "expected a longest example of 44 bytes"},
        {3, INT32_MAX, "expected a longest example of 2147483647 bytes"},
        {-1, 65534,
         "example 0: expected the mark of an example (65535 to 65535) at byte 1024, found 65534"},
        {-2, 0, "example 0: expected the bytes of an example (2 to 78) at byte 1026, found 0"},
        {-2, 2, "example 0: expected the number of the example at byte 1028, found the end"},
        {-2, 44, "example 0: expected the length of a completion (1 to 2) at byte 1062, found 3"},
        {-2, 47, "example 0: expected its 47 bytes to hold 4 completions"},
        {-2, 48, "example 0: expected its 48 bytes to hold 4 completions"},
        {-2, 65535, "example 0: expected the bytes of an example (2 to 78)"},
        {-3, 1, "example 0: expected the number of the example (0 to 0)"},
        {-4, 4, "example 0: expected a label (0 to 3) at byte 1030, found 4"},
        {-5, 3, "expected the number of completions (4 to 4)"},
        {-5, 65535, "expected the number of completions (4 to 4)"},
        {-6, 0, "expected the length of a context (1 to 17) at byte 1034, found 0"},
        {-6, 18, "expected the length of a context (1 to 17)"},
        {-6, 65535, "expected the length of a context (1 to 17)"},
        {-7, 1000, "example 0: expected a token (0 to 999) at byte 1036, found 1000"},
        {-10, 0, "expected the length of a completion (1 to 13) at byte 1042, found 0"},
        {-10, 14, "expected the length of a completion (1 to 13)"},
        {-11, 65535, "example 0: expected a token (0 to 999)"},
        {-24, 0, "example 1: expected the mark of an example"},
        {-26, 0, "example 1: expected the number of the example (1 to 1)"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ChoiceImage image = good;
        if (cases[i].word >= 0) { image.header[cases[i].word] = cases[i].value; }
        if (cases[i].word < 0) { image.words[-1 - cases[i].word] = (uint16_t)cases[i].value; }
        assert_choices_refused(&image, cases[i].words);
    }
    ChoiceImage image = good;
    // every shorter file
    for (image.count = 0; image.count < good.count; image.count++) {
        assert_choices_refused(&image, "example ");
    }
    put_word(&image, 0);
    put_word(&image, 0);
    assert_choices_refused(&image, "and the end at byte 1102, found 46 and 1106");
    image = good;
    put_example(&image, 3, 5, (const int[4]){1, 3, 1, 1}, 0);
    assert_choices_refused(&image, "expected --seq-len 7 at least, for its longest row, found 6");
    write_file("stub", good.header, 12);
    assert_refused(open_choices, "stub", "a header of 1024 bytes");
}
static void test_fuzz_choices(void **state) { // damaged words: refused or read, never a crash
    (void)state;
    for (uint64_t i = 0; i < 300; i++) {
        char message[4096];
        ChoiceImage image = choice_image();
        for (uint64_t k = 0; k < 1 + i % 3; k++) {
            uint64_t r = random_u64(78, i, k);
            // any, or a small number
            image.words[r % (uint64_t)image.count] = (uint16_t)(r >> (r >> 63 ? 32 : 45));
        }
        write_choices("f", &image);
        int code = attempt_in_child(open_choices, path_of("f"), message);
        if (code != 0 && code != EXIT_INPUT) { fail_msg("case %d: %d: %s", (int)i, code, message); }
    }
}
static void test_bad_tokenizers(void **state) {
    (void)state;
    unsigned char data[4096] = {0};
    size_t bytes = tokenizer_image(data, 2, 5, 4);
    write_file("good", data, bytes);
    assert_accepted(open_tokenizer, "good");
    assert_refused(open_tokenizer, "none", "cannot open");
    for (size_t cut = 0; cut < bytes; cut += cut < 1020 ? 255 : 1) { // every shorter file
        write_file("cut", data, cut);
        assert_refused(open_tokenizer, "cut",
                       cut < 1024 ? "a header of 1024 bytes" : "found the end of the file");
    }
    write_file("long", data, bytes + 1);
    assert_refused(open_tokenizer, "long", "expected the end of the file after 5 tokens");
    write_file("longer", data, 4096);
    assert_refused(open_tokenizer, "longer", "expected the end of the file after 5 tokens");
    data[1024] = 0;
    write_file("zero", data, bytes);
    assert_refused(open_tokenizer, "zero", "for token 0 of 5, found none");
    write_file("version", data, tokenizer_image(data, 4, 5, 4));
    assert_refused(open_tokenizer, "version", "version 1 to 3, found 4");
    const size_t whole = long_image(data, 3, 256);
    for (size_t cut = 1024; cut < whole; cut++) {
        write_file("cut", data, cut);
        assert_refused(open_tokenizer, "cut", "found the end of the file");
    }
    write_file("more", data, whole + 1);
    assert_refused(open_tokenizer, "more", "expected the end of the file after 3 tokens");
    write_file("short", data, long_image(data, 3, 255)); // has a length of one byte
    assert_refused(open_tokenizer, "short", "1 to 65535 bytes for token 1 of 3, found none");
    write_file("older", data, long_image(data, 2, 256));
    assert_refused(open_tokenizer, "older", "1 to 255 bytes for token 1 of 3, found none");
    write_file("eot", data, tokenizer_image(data, 2, 5, 5));
    assert_refused(open_tokenizer, "eot", "below the vocabulary of 5, found 5");
    write_file("eot-", data, tokenizer_image(data, 2, 5, -1));
    assert_refused(open_tokenizer, "eot-", "below the vocabulary of 5, found -1");
    write_file("version1", data, tokenizer_image(data, 1, 5, 4));
    assert_refused(open_tokenizer, "version1", "below the vocabulary of 5, found 50256");
    const int32_t vocabs[] = {0, -1, INT32_MIN, INT32_MAX, (1 << 24) + 1};
    for (int i = 0; i < 5; i++) {
        write_file("vocab", data, tokenizer_image(data, 2, vocabs[i], 0));
        assert_refused(open_tokenizer, "vocab", "a vocabulary of 1 to 16777216");
    }
    tokenizer_image(data, 2, 1, 0);
    data[1024] = 255; // the longest file that one token can make, and one byte more
    write_file("largest", data, 1024 + 256);
    assert_accepted(open_tokenizer, "largest");
    write_file("larger", data, 1024 + 257);
    assert_refused(open_tokenizer, "larger", "expected the end of the file after 1 tokens");
    write_shard("shard", NULL, 0);
    assert_refused(open_tokenizer, "shard", "found magic 20240520");
}
#define GOLDEN_JSON "test/golden/tokenizer_tiny.json"
static void test_tokenizer_json(void **state) {
    (void)state;
    Tokenizer t = tokenizer_open(GOLDEN_JSON, 101);
    assert_int_equal(t.vocab, 101);
    assert_int_equal(t.eot, 0);
    assert_token(&t, 0, "<|endoftext|>", 0);
    assert_token(&t, 8, "\\", 1); // escaped in the file
    assert_token(&t, 85, " caf\xc3\xa9", 6);
    assert_token(&t, 86, " \xe2\x80\x94", 4);
    assert_token(&t, 29, "\n", 1);
    assert_token(&t, 99, "[99]", 4); // no token has this id
    assert_token(&t, 100, "<|caf\xc3\xa9|>", 9);
    unsigned char data[4096] = {0}; // the same tokens in a file of the other kind: the same hash
    const int32_t header[4] = {20240328, 2, t.vocab, t.eot};
    const size_t text = t.begin[100] + 1 + (size_t)t.text[t.begin[100]];
    memcpy(data, header, sizeof header);
    memcpy(data + 1024, t.text, text);
    write_file("same.bin", data, 1024 + text);
    Tokenizer same = tokenizer_open(path_of("same.bin"), 101);
    assert_true(tokenizer_same(same.id, t.id));
    tokenizer_close(&same);
    tokenizer_close(&t);
}
static void test_bad_tokenizer_json(void **state) {
    (void)state;
    static const struct {
        const char *json, *words; // NULL: it is good
    } cases[] = {
        {"'added_tokens':[{'id':1,'content':'</s>'}],'model':{'vocab':{'a':0}}", NULL},
        {"'added_tokens':[{'id':1,'content':'</s>'}],'model':{'vocab':{'\\u0061':0}}", NULL},
        {"'added_tokens':[{'id':0,'content':'</s>'}],'model':{'vocab':{'</s>':0}}", NULL},
        {"'model':{'vocab':{'a':0}}", "an added token that ends texts"},
        {"'added_tokens':[{'id':1,'content':'x'}],'model':{'vocab':{}}", "such as <|endoftext|>"},
        {"'model':{'vocab':[['a',0]]}", "an object model.vocab"},
        {"'model':3", "an object model.vocab"},
        {"'added_tokens':[{'id':1}],'model':{'vocab':{}}", "a text as content"},
        {"'added_tokens':[7],'model':{'vocab':{}}", "a text as content"},
        {"'added_tokens':[{'content':'x'}],'model':{'vocab':{}}", "an id of a token"},
        {"'model':{'vocab':{'a':-1}}", "an id of a token, from 0 to 16777215, found a"},
        {"'model':{'vocab':{'a':0.5}}", "an id of a token"},
        {"'model':{'vocab':{'a':16777216}}", "an id of a token"},
        {"'model':{'vocab':{'a':'0'}}", "an id of a token"},
        {"'model':{'vocab':{'a':1e300}}", "an id of a token"},
        {"'model':{'vocab':{'a':2,'b':2}}", "each id once, found b"},
        {"'model':{'vocab':{'':0}}", "tokens of 1 to 65535 bytes"},
        {"'model':{'vocab':{'a b':0}}", "in GPT-2's alphabet"},
        {"'model':{'vocab':{'\xe2\x96\x81the':0}}", "in GPT-2's alphabet"},
        {"'model':{'vocab':{'\xc3':0}}", "in GPT-2's alphabet"},
        {"'model':{'vocab':{'\\ud800':0}}", "in GPT-2's alphabet"},
        {"'model':{'vocab':{'\\u00':0}}", "in GPT-2's alphabet"},
        {"'model':{'vocab':{'a':0}", "is no JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[2048];
        memset(json, ' ', sizeof json); // the smallest data file has 1024 bytes
        json[0] = '{';
        for (const char *c = cases[i].json; *c; c++) {
            json[1 + (c - cases[i].json)] = (char)(*c == '\'' ? '"' : *c);
        }
        json[sizeof json - 1] = '}';
        write_file("t.json", json, sizeof json);
        if (cases[i].words) {
            assert_refused(open_tokenizer, "t.json", cases[i].words);
        } else {
            assert_accepted(open_tokenizer, "t.json");
        }
    }
}
static void test_fuzz(void **state) { // damaged headers and texts: refused or read, never a crash
    (void)state;
    unsigned char data[2048], shard[1024 + 40] = {0};
    int32_t header[9] = {20240520, 1, 20, 0, 0, 20240328, 1000, 1, 2};
    for (uint64_t i = 0; i < 300; i++) {
        char message[4096];
        bool tokens = i % 3 == 0;
        size_t bytes = tokens ? sizeof shard : tokenizer_image(data, 2, 5, 4);
        unsigned char *file = tokens ? shard : data;
        if (tokens) {
            memset(shard, 0, sizeof shard);
            memcpy(shard, header, sizeof header);
        }
        for (uint64_t k = 0; k < 1 + i % 4; k++) {
            uint64_t r = random_u64(77, i, k), at = r % (tokens ? 36 : 40);
            file[tokens || at < 16 ? at : 1024 + at - 16] = (unsigned char)(r >> 32);
        }
        write_file("f", file, bytes);
        int code = attempt_in_child(tokens ? open_shards : open_tokenizer, path_of("f"), message);
        if (code != 0 && code != EXIT_INPUT) { fail_msg("case %d: %d: %s", (int)i, code, message); }
    }
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup(name, fresh)
    const struct CMUnitTest tests[] = {
        TEST(test_checksum),
        TEST(test_sample_by_hand),
        TEST(test_sample_rule),
        TEST(test_far_samples),
        TEST(test_name_order),
        TEST(test_large_files),
        TEST(test_fill_windows),
        TEST(test_permutation_is_bijective),
        TEST(test_permutation_small_is_uniform),
        TEST(test_permutation_large_is_uniform),
        TEST(test_shuffled_epochs),
        TEST(test_poisson_frequencies),
        TEST(test_poisson_gaps),
        TEST(test_poisson_edges),
        TEST(test_poisson_choice),
        TEST(test_poisson_streams),
        TEST(test_documents_by_hand),
        TEST(test_documents),
        TEST(test_documents_shuffled),
        TEST(test_windows_per_document),
        TEST(test_find_token),
        TEST(test_largest_token),
        TEST(test_labelled),
        TEST(test_choices_by_hand),
        TEST(test_choices_of_all_lengths),
        TEST(test_choosing),
        TEST(test_tokenizer_2),
        TEST(test_tokenizer_3),
        TEST(test_tokenizer_1),
        TEST(test_no_tokenizer),
        TEST(test_tokenizer_hash),
        TEST(test_tokenizer_find),
        TEST(test_print),
        TEST(test_bad_shards),
        TEST(test_changed_shards),
        TEST(test_wide_shards),
        TEST(test_bad_options),
        TEST(test_tokenizers_of_shards),
        TEST(test_bad_labels),
        TEST(test_bad_choices),
        TEST(test_fuzz_choices),
        TEST(test_bad_tokenizers),
        TEST(test_tokenizer_json),
        TEST(test_bad_tokenizer_json),
        TEST(test_fuzz),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
