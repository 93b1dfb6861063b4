// test_rates.c: what the program measures of a machine, by a clock that the test sets: each look at
// it moves it on, and at chosen looks it leaps, as for a process that others interrupt. So nothing
// here depends on how fast the machine is, or on what else it does.
#include "ops/cpu/ops_cpu.h"
#include "plan/forecast.h"
#include "plan/rates.h"
#include "plan/unit_times.h"
#include "base/readable.h"

#include "harness.h"

// So long that a product of the first size ends the search for a larger one.
static const double PRODUCT_S = 2e-3;
static int64_t looks, leap_at, slow_from; // leap_at, slow_from: numbers of looks; -1: never
static double clock_s, look_s, leap_s;
// Takes the place of the C library's.
int clock_gettime(clockid_t id, struct timespec *t) {
    (void)id;
    clock_s += look_s * (slow_from >= 0 && looks >= slow_from ? 1000 : 1);
    if (looks++ == leap_at) { clock_s += leap_s; }
    t->tv_sec = (time_t)clock_s;
    t->tv_nsec = (long)((clock_s - floor(clock_s)) * 1e9);
    return 0;
}
static void set_clock(double of_look, int64_t leap, double leap_seconds) {
    looks = 0;
    clock_s = 0;
    look_s = of_look;
    leap_at = leap;
    leap_s = leap_seconds;
    slow_from = -1;
}
static Stream stream(void) {
    Stream s = {1, NULL, NULL, 0, NULL};
    ops_open(&s, 0, DTYPE_FP32);
    return s;
}
static void assert_near(double x, double expected) {
    if (!(fabs(x - expected) <= 0.01 * expected)) { fail_msg("%g, expected %g", x, expected); }
}

// One product that takes an hour, or some milliseconds as on a busy machine, changes nothing.
static void test_slow_product(void **state) {
    (void)state;
    Stream s = stream();
    set_clock(PRODUCT_S, -1, 0);
    const double alone = measure_flops(&s);
    const int64_t all = looks;
    assert_true(all >= 2 * 2 * 3); // twice, at least three tries, of two looks each
    for (int64_t leap = 0; leap < all; leap++) {
        for (int k = 0; k < 2; k++) {
            set_clock(PRODUCT_S, leap, k ? 0.03 : 3600);
            assert_near(measure_flops(&s), alone);
        }
    }
    ops_close(&s);
}
static void test_slow_copy(void **state) {
    (void)state;
    Stream s = stream();
    set_clock(PRODUCT_S, -1, 0);
    const double alone = measure_bytes(&s);
    for (int64_t leap = 0; leap < 8; leap++) {
        set_clock(PRODUCT_S, leap, 3600);
        assert_near(measure_bytes(&s), alone);
    }
    ops_close(&s);
}
// The peak of the CPU's instructions, and its clock. By this test's clock a core makes 3e9 additions
// a second.
static void test_slow_instructions(void **state) {
    (void)state;
    Stream s = stream();
    set_clock(PEAK_TRY_S, -1, 0);
    const OpsPeak alone = ops_peak(&s);
    const int64_t all = looks;
    assert_true(*alone.instructions);
    assert_near(alone.limit, 3e9 * multipliers[gemm_multiplier(false)].per_cycle);
    for (int64_t leap = 0; leap < all; leap++) {
        set_clock(PEAK_TRY_S, leap, 3600);
        const OpsPeak peak = ops_peak(&s);
        assert_near(peak.limit, alone.limit);
        assert_near(peak.measured + 1, alone.measured + 1);
        assert_true(peak.measured <= peak.limit);
    }
    ops_close(&s);
}
// A peak is never above the limit, nor below the products; where its measurement collapses, it is
// the limit.
static void test_peak(void **state) {
    (void)state;
    Stream s = stream();
    const Comm comm = {.ranks = 1, .local_ranks = 1};
    for (int collapsed = 0; collapsed < 2; collapsed++) {
        Rates rates = {.flops_per_s = 1e9};
        set_clock(PEAK_TRY_S, -1, 0);
        if (collapsed) { slow_from = 2 * PEAK_TRIES; } // after the clock's measurement
        measure_peak(&rates, &s, &comm, DTYPE_FP32);
        const double limit = 3e9 * multipliers[gemm_multiplier(false)].per_cycle;
        assert_true(rates.peak_flops_per_s <= 1.01 * limit);
        assert_true(rates.peak_flops_per_s >= limit / 8);
        if (collapsed) { assert_near(rates.peak_flops_per_s, limit); }
    }
    Rates rates = {.flops_per_s = 1e18}; // a measurement that no core can have reached
    set_clock(PEAK_TRY_S, -1, 0);
    measure_peak(&rates, &s, &comm, DTYPE_FP32);
    assert_true(rates.flops_per_s <= rates.peak_flops_per_s);
    assert_true(rates.peak_flops_per_s < 1e13);
    ops_close(&s);
}
// Beside messages, whatever the device and whatever was measured: few launches, and no long time.
static void test_products_beside(void **state) {
    (void)state;
    const double rates[] = {1e-3, 3e8, 4.2e9, 3e11, 7e14, 2e15, 1e30},
                 messages[] = {0, 1e-6, 1e-3, 0.05, 3600};
    for (size_t r = 0; r < sizeof rates / sizeof *rates; r++) {
        for (size_t m = 0; m < sizeof messages / sizeof *messages; m++) {
            const ProductsBeside p = products_beside(messages[m], rates[r]);
            const double all_s = (double)p.count * product_flops(p.side) / rates[r];
            assert_true(p.side >= 256 && p.side <= 4096);
            assert_true(p.count >= 1 && p.count <= 1000);
            assert_true(p.count == 1 || all_s < 0.2);
        }
    }
    assert_int_equal(products_beside(0.01, 3e11).side, 256);
    assert_int_equal(products_beside(0.01, 7e14).side, 4096); // 2 million launches of 256^3 before
}
// No share above the whole, and times in units that a reader knows.
static void test_readable(void **state) {
    (void)state;
    assert_near(mfu_of(5e9, 1, 1e10), 0.5);
    assert_true(mfu_of(1e10, 1, 1e10) == 1);
    assert_true(isnan(mfu_of(6567e10, 1, 1e10)) && isnan(mfu_of(1, 1, 0)) &&
                isnan(mfu_of(0, 1, 1)));
    assert_string_equal(readable_share(mfu_of(6567e10, 1, 1e10), 0).at, "- %");
    assert_string_equal(readable_share(0.513, 0).at, "51 %");
    const StepWork work = {.flops = 6e12, .ranks = 4}, unknown = {.ranks = 4};
    assert_near(tflops_of(&work, 0.5), 3);
    assert_true(isnan(tflops_of(&unknown, 1)) && isnan(tflops_of(&work, 0)));
    assert_string_equal(readable_tflops(0.15971).at, "0.16");
    assert_string_equal(readable_tflops(NAN).at, "");
    assert_true(prediction_holds(1, 1.9) && prediction_holds(1.9, 1) && prediction_holds(2, 1));
    assert_false(prediction_holds(1, 2.1) || prediction_holds(2.1, 1) ||
                 prediction_holds(722, 0.01));
    const struct {
        double seconds;
        const char *text;
    } times[] = {{0, "0.000 ms"},      {12.3e-6, "0.012 ms"},  {0.01184, "11.84 ms"},
                 {0.1358, "135.8 ms"}, {0.99996, "1.00 s"},    {3.52, "3.52 s"},
                 {119.9, "119.9 s"},   {722, "12.0 min"},      {7196.9, "119.9 min"},
                 {7197.1, "2.0 h"},    {297811.5385, "3.4 d"}, {86400.0 * 5000, "5000.0 d"}};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        assert_string_equal(readable_step(times[i].seconds).at, times[i].text);
    }
}

// Of passes of two numbers of samples: 3 s and 2 s a sample are found again; what fits no such sum
// is counted by sample.
static void test_times_of_two_sizes(void **state) {
    (void)state;
    double many[UNIT_CLASSES][3], few[UNIT_CLASSES][3];
    for (int c = 0; c < UNIT_CLASSES; c++) {
        for (int k = 0; k < 3; k++) {
            many[c][k] = 3 + 2 * 8;
            few[c][k] = 3 + 2 * 2;
        }
    }
    few[UNIT_BLOCK][0] = 20; // longer, though fewer
    few[UNIT_BLOCK][1] = 1;  // shorter than their share
    const UnitTimes t = unit_times_between(8, many, 2, few),
                    one = unit_times_between(1, many, 1, few);
    assert_true(t.known && t.row_s[UNIT_HEAD][2] == 2 && t.pass_s[UNIT_HEAD][2] == 3);
    for (int k = 0; k < 2; k++) {
        assert_true(t.row_s[UNIT_BLOCK][k] == 19 / 8.0 && t.pass_s[UNIT_BLOCK][k] == 0);
    }
    assert_true(one.row_s[UNIT_HEAD][0] == 19 && one.pass_s[UNIT_HEAD][0] == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slow_product),      cmocka_unit_test(test_slow_copy),
        cmocka_unit_test(test_slow_instructions), cmocka_unit_test(test_peak),
        cmocka_unit_test(test_products_beside),   cmocka_unit_test(test_times_of_two_sizes),
        cmocka_unit_test(test_readable),
    };
    return cmocka_run_group_tests_name("rates", tests, NULL, NULL);
}
