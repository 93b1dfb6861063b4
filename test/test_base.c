// test_base.c: the exact sum of base.h. Whatever the order of the terms, and however they are split
// among ranks, it has the same bits, and they are right. Draws for rounding: keys that differ in
// one bit have nothing in common.
#include "base/base.h"
#include "base/cores.h"
#include "base/files.h"

#include "harness.h"

enum { TERMS = 3000, PARTS = 7 };

// Not negative, of exponents from `low` to `high`.
static double term(uint64_t seed, int i, int low, int high) {
    double fraction = 1 + random_uniform(seed, 1, (uint64_t)i);
    return ldexp(fraction,
                 low + (int)(random_u64(seed, 2, (uint64_t)i) % (uint64_t)(high - low + 1)));
}
static ExactSum nothing(void) {
    ExactSum sum;
    memset(&sum, 0, sizeof sum);
    return sum;
}

static void test_order_does_not_matter(void **state) {
    (void)state;
    const int ranges[][2] = {{-20, 20}, {-1074, 1000}, {-300, -250}, {900, 1010}, {0, 0}};
    for (int r = 0; r < 5; r++) {
        for (uint64_t seed = 1; seed <= 20; seed++) {
            ExactSum forward = nothing(), backward = nothing(), joined = nothing(), part[PARTS];
            memset(part, 0, sizeof part);
            for (int i = 0; i < TERMS; i++) {
                exact_add(&forward, term(seed, i, ranges[r][0], ranges[r][1]));
                exact_add(&backward, term(seed, TERMS - 1 - i, ranges[r][0], ranges[r][1]));
                exact_add(&part[random_u64(seed, 3, (uint64_t)i) % PARTS],
                          term(seed, i, ranges[r][0], ranges[r][1]));
            }
            for (int k = 0; k < PARTS; k++) { exact_join(&joined, &part[k]); }
            double value = exact_value(forward);
            assert_true(value > 0 && value == exact_value(backward) &&
                        value == exact_value(joined));
        }
    }
}
// Terms of 24 bits whose sums a long double (64 bits) holds exactly.
static void test_value_is_right(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 50; seed++) {
        ExactSum sum = nothing();
        long double expected = 0;
        for (int i = 0; i < TERMS; i++) {
            double x = ldexp((double)(random_u64(seed, 1, (uint64_t)i) >> 40),
                             (int)(seed * 37 % 1800) - 1000);
            exact_add(&sum, x);
            expected += x;
        }
        assert_true(exact_value(sum) == (double)expected);
    }
    ExactSum sum = nothing();
    assert_true(exact_value(sum) == 0);
    exact_add(&sum, 0x1p-1074);
    exact_add(&sum, 0);
    assert_true(exact_value(sum) == 0x1p-1074);
    exact_add(&sum, 0x1p1000);
    assert_true(exact_value(sum) == 0x1p1000);
    for (int i = 0; i < 1 << 20; i++) { exact_add(&sum, 0x1.fffffffffffffp900); } // carries
    assert_true(exact_value(sum) == 0x1p1000);
    sum = nothing();
    for (int i = 0; i < 1 << 20; i++) { exact_add(&sum, 0x1.fffffffffffffp900); }
    assert_true(exact_value(sum) == 0x1.fffffffffffffp920);
}
static void test_no_numbers(void **state) {
    (void)state;
    const double strange[] = {INFINITY, NAN, -NAN};
    for (int i = 0; i < 3; i++) {
        ExactSum sum = nothing(), other = nothing();
        exact_add(&sum, 3);
        exact_add(&other, strange[i]);
        exact_join(&sum, &other);
        exact_add(&sum, 4);
        assert_true(isnan(exact_value(sum)));
    }
}

// Of two keys that differ in one bit, no draw is the other's at that place, nor at the place that
// differs in the same bit: 1 of 65536 is by accident.
static void test_rounding_draws(void **state) {
    (void)state;
    enum { N = 1 << 16 };
    const Rounding a = rounding_stochastic(1, 2, 3, 0);
    for (int bit = 0; bit < 16; bit++) {
        Rounding b = a;
        b.key ^= 1u << bit;
        int alike = 0, permuted = 0;
        for (int64_t i = 0; i < N; i++) {
            alike += rounding_draw(a, i) == rounding_draw(b, i);
            permuted += rounding_draw(a, i) == rounding_draw(b, i ^ 1 << bit);
        }
        assert_true(alike < 10 && permuted < 10);
    }
}

static void test_lists_of_cores(void **state) {
    (void)state;
    static const char *const good[] = {"0", "0-3", "2,5-6,9\n", "1023"}, *const bad[] = {
                                                                             "",     "\n",
                                                                             "x",    "3-1",
                                                                             "1024", "0-1024",
                                                                             "-1",   "1-",
                                                                             "1;2",  "1,-3"};
    const int counts[] = {1, 4, 4, 1};
    cpu_set_t set;
    for (int i = 0; i < 4; i++) {
        assert_true(cores_parse(good[i], &set));
        assert_int_equal(CPU_COUNT(&set), counts[i]);
    }
    assert_true(cores_parse(good[2], &set) && CPU_ISSET(2, &set) && CPU_ISSET(5, &set) &&
                CPU_ISSET(6, &set) && CPU_ISSET(9, &set));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_false(cores_parse(bad[i], &set));
    }
}
// Ranks have contiguous parts of the allowed cores, which do not overlap and leave none over; more
// ranks than cores share them all.
static void test_cores_of_ranks(void **state) {
    (void)state;
    cpu_set_t allowed, mine, seen, both;
    assert_true(cores_parse("1,3-6,10-12", &allowed));
    for (int ranks = 1; ranks <= 8; ranks++) {
        CPU_ZERO(&seen);
        for (int index = 0; index < ranks; index++) {
            assert_int_equal(cores_of_rank(&allowed, index, ranks, 0, &mine),
                             8 * (index + 1) / ranks - 8 * index / ranks);
            CPU_AND(&both, &mine, &seen);
            assert_int_equal(CPU_COUNT(&both), 0);
            CPU_OR(&seen, &seen, &mine);
        }
        assert_true(CPU_EQUAL(&seen, &allowed));
    }
    assert_int_equal(cores_of_rank(&allowed, 8, 9, 0, &mine), 1);
    assert_true(CPU_EQUAL(&mine, &allowed));
    // more threads than its part has cores
    assert_int_equal(cores_of_rank(&allowed, 1, 2, 5, &mine), 5);
    assert_true(CPU_EQUAL(&mine, &allowed));
    assert_int_equal(cores_of_rank(&allowed, 1, 2, 3, &mine), 3);
    assert_int_equal(CPU_COUNT(&mine), 4);
}

// What a crash left is replaced, also a hard link to somebody's file; what a writer has is not.
static void test_a_file_has_one_writer(void **state) {
    (void)state;
    char folder[] = "/tmp/test_base_XXXXXX", name[64], other[64], text[8] = "";
    assert_non_null(mkdtemp(folder));
    snprintf(name, sizeof name, "%s/name", folder);
    snprintf(other, sizeof other, "%s/other", folder);
    int fd = file_create(other, 0666);
    assert_int_equal(write(fd, "precious", 8), 8);
    close(fd);
    assert_int_equal(link(other, name), 0);
    fd = file_create(name, 0666);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "a", 1), 1);
    assert_int_equal(file_create(name, 0666), -1);
    assert_int_equal(errno, EBUSY);
    assert_int_equal(rename(name, other), 0); // with its lock; the name is free
    const int next = file_create(name, 0666);
    assert_true(next >= 0);
    close(fd);
    close(next);
    fd = open(other, O_RDONLY);
    assert_int_equal(read(fd, text, sizeof text), 1);
    close(fd);
    unlink(name);
    unlink(other);
    rmdir(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_file_has_one_writer), cmocka_unit_test(test_lists_of_cores),
        cmocka_unit_test(test_cores_of_ranks),        cmocka_unit_test(test_order_does_not_matter),
        cmocka_unit_test(test_value_is_right),        cmocka_unit_test(test_no_numbers),
        cmocka_unit_test(test_rounding_draws),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
