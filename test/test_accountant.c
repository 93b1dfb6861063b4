// test_accountant.c: proves that epsilons are right: against tables of dp-accounting 0.6.0 and
// prv-accountant 0.2.0, closed forms (the Gaussian mechanism, a single step) and a direct integral
// (two steps); that the interval holds the exact value and is narrow; that epsilon moves the right
// way with each parameter; that sigma and steps that are asked for keep epsilon and the next ones
// do not; that nonsense is refused.
#include "privacy/accountant.h"

#include <sys/resource.h> // processor time of a child

#include "harness.h"

// Whether the i-th case of a table is tried: one in `of`, drawn by the seed, or all.
static bool tried(size_t i, size_t of) {
    static uint64_t seed;
    if (!seed) { seed = 1 + test_seed((uint64_t)time(NULL)); }
    return all_tests() || (i + seed) % of == 0;
}
static PrivacySetting setting(double q, double sigma, double steps, double delta,
                              bool replace_one) {
    PrivacySetting s = {q, sigma, delta, (int64_t)steps, false, replace_one, 1};
    return s;
}
static void check_close(const char *what, double found, double expected, double tolerance) {
    if (!(fabs(found - expected) <= tolerance)) {
        fail_msg("%s: expected %.9g to %g, found %.9g", what, expected, tolerance, found);
    }
}

// -------------------------------------------------------------------------------------------------
// Tables of dp-accounting and prv-accountant

static const struct {
    double q, sigma, at[7];
} divergences[] = {
    {1, 1.0, {1, 1.5, 2, 4, 8, 16, 32}},
    {0.1,
     2.0,
     {0.0028362283, 0.0043736583, 0.006003283, 0.01372543, 0.045291839, 1.6272023, 5.6608673}},
    {0.02,
     1.5,
     {2.2382435e-4, 3.4011758e-4, 4.5957035e-4, 9.7347444e-4, 0.0022850015, 3.0729464, 10.248104}},
    {0.01,
     1.0,
     {1.7181342e-4, 2.6463757e-4, 3.6315405e-4, 8.9364391e-4, 3.0878508, 11.246276, 27.321732}},
    {0.001,
     0.8,
     {3.7707261e-6, 5.7042018e-6, 7.6735307e-6, 1.7707299e-5, 5.1317278, 17.869414, 42.982598}},
};
static void test_divergences(void **state) {
    (void)state;
    static const double orders[7] = {2, 3, 4, 8, 16, 32, 64};
    for (size_t i = 0; i < sizeof divergences / sizeof divergences[0]; i++) {
        for (int j = 0; j < 7; j++) {
            double expected = divergences[i].at[j];
            check_close("divergence",
                        rdp_of_step(divergences[i].q, divergences[i].sigma, orders[j]), expected,
                        1e-6 * expected);
        }
    }
    check_close("fractional", rdp_of_step(0.01, 1, 1.5), 1.3237e-4, 1e-8); // five digits are known
    // Where the series has no digits left, orders between are still above the whole one below, and
    // below the one above.
    double below = rdp_of_step(1e-7, 1, 3), between = rdp_of_step(1e-7, 1, 3.5),
           above = rdp_of_step(1e-7, 1, 4);
    assert_true(0 < below && below < between && between < above);
}
static void test_orders(void **state) {
    (void)state;
    static const double some[][2] = {{0, 1.1},  {9, 2},     {98, 10.9}, {99, 11},
                                     {151, 63}, {152, 128}, {155, 1024}};
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        assert_true(rdp_order((int)some[i][0]) == some[i][1]);
    }
    assert_int_equal(RDP_ORDERS, 156);
}

// prv and replace: prv-accountant's estimate and dp-accounting's PLD, whose own errors are within
// the tolerances: 1e-3; 1 % for H and V.
static const struct {
    const char *name;
    double q, sigma, steps, delta, rdp, order, prv, replace, relative;
} rows[] = {
    {"A", 256.0 / 60000, 1.1, 14063, 1e-5, 2.5967, 8.1, 2.3817, 4.2215, 0},
    {"B", 0.01, 4.0, 10000, 1e-5, 1.0355, 17, 0.9469, 1.9932, 0},
    {"C", 0.01, 1.0, 1000, 1e-5, 2.1014, 7.8, 1.8282, 2.8434, 0},
    {"D", 0.001, 0.8, 10000, 1e-6, 1.7036, 8.2, 0.9472, 1.3252, 0},
    {"F", 0.0005, 0.6, 20000, 1e-7, 3.8262, 5.0, 2.9661, 3.1383, 0},
    {"H", 1e-4, 1.0, 100000, 1e-8, 0.8885, 18, 0.1994, 0.3350, 0.01},
    {"I", 0.02, 1.5, 500, 1e-6, 1.7188, 13, 1.5768, 2.7830, 0},
    {"K", 1, 10, 100, 1e-5, 4.7285, 5.4, 4.3772, 9.9973, 0},
    {"L", 1, 1, 1, 1e-5, 4.7285, 5.4, 4.3772, 9.9973, 0},
    {"V", 4.0802e-5, 0.614, 100000, 1.1e-10, 3.2301, 7.3, 1.711, 1.72, 0.01},
};
static void check_row(size_t i, bool replace_one) {
    PrivacySetting s = setting(rows[i].q, rows[i].sigma, rows[i].steps, rows[i].delta, replace_one);
    PrivacyLoss loss = account_epsilon(&s, NAN);
    double expected = replace_one ? rows[i].replace : rows[i].prv;
    check_close(rows[i].name, loss.high, expected, fmax(1e-3, rows[i].relative * expected));
    if (!(loss.low <= loss.high && loss.high - loss.low <= 0.002)) {
        fail_msg("%s: from %.9g to %.9g", rows[i].name, loss.low, loss.high);
    }
}
static void test_rows(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double order = 0;
        PrivacySetting s = setting(rows[i].q, rows[i].sigma, rows[i].steps, rows[i].delta, false);
        // of numbers with four digits
        check_close(rows[i].name, rdp_epsilon(&s, &order), rows[i].rdp, 6e-5);
        assert_true(order == rows[i].order);
        if (tried(i, 3)) { check_row(i, false); }
        if (tried(i + 1, 3)) { check_row(i, true); }
    }
}

// Several windows of a document, each sampled by itself: dp-accounting's mixtures of Gaussians
// (PLD, on grids of 1e-4 to 1e-3). It has no replace-one for them: that is checked by exact deltas
// below.
static void test_documents(void **state) {
    (void)state;
    // q, sigma, steps, delta, windows, epsilon
    static const double documents[][6] = {
        {0.01, 1, 1000, 1e-5, 2, 3.9791},     {0.1, 3, 50, 1e-5, 3, 3.32069},
        {0.3, 2, 1, 1e-4, 5, 4.82737},        {1, 8, 3, 1e-5, 4, 3.70864},
        {1e-6, 1, 1000, 1e-7, 1000, 0.23696}, {0.001, 0.8, 10000, 1e-6, 2, 1.9736},
        {0.001, 0.8, 10000, 1e-6, 4, 4.139},  {0.001, 0.8, 10000, 1e-6, 8, 8.942},
    };
    for (size_t i = 0; i < sizeof documents / sizeof documents[0]; i++) {
        if (!tried(i, 4)) { continue; }
        const double *d = documents[i];
        PrivacySetting s = setting(d[0], d[1], d[2], d[3], false);
        s.windows = (int)d[4];
        PrivacyLoss loss = account_epsilon(&s, NAN);
        check_close("document", loss.high, d[5], 1e-3);
        assert_true(loss.low <= loss.high && loss.high - loss.low <= 0.002);
    }
    // all of 70 windows: as one of 70 times the norm
    PrivacySetting one = setting(1, 3, 4, 1e-6, false), far = setting(1, 3.0 * 70, 4, 1e-6, false);
    far.windows = 70;
    check_close("70 windows", account_epsilon(&far, NAN).high, account_epsilon(&one, NAN).high,
                1e-3);
    PrivacySetting much = setting(0.9, 0.1, 10, 1e-6, false);
    much.windows = 1000; // beyond what its numbers hold: nothing is claimed
    PrivacyLoss none = account_epsilon(&much, NAN);
    assert_true(none.low == 0 && isinf(none.high));
}

// -------------------------------------------------------------------------------------------------
// Exact deltas of one step and of two

typedef struct {
    double q, sigma;
    bool replace_one, turned;
    int windows;
} Pair;
static long double normal_tail(long double u) { return 0.5L * erfcl(u / sqrtl(2)); }
static long double chance(const Pair *p, int j) { // that j windows are sampled
    long double c = 1;
    for (int i = 0; i < j; i++) {
        c *= (long double)(p->windows - i) / (i + 1) * (long double)p->q;
    }
    for (int i = j; i < p->windows; i++) { c *= 1 - (long double)p->q; }
    return c;
}
// of the mixture of normals at 0, 1, ... windows to the one at 0
static long double ratio(const Pair *p, long double z) {
    long double sum = 0;
    for (int j = 0; j <= p->windows; j++) {
        sum += chance(p, j) *
               expl(j * (z - 0.5L * j) / ((long double)p->sigma * (long double)p->sigma));
    }
    return sum;
}
static long double reference_loss(const Pair *p, long double z) {
    long double loss = logl(ratio(p, z)) - (p->replace_one ? logl(ratio(p, -z)) : 0);
    return p->turned ? -loss : loss;
}
// mass above z; side -1: below
static long double mixture_tail(const Pair *p, long double z, long double at, int side) {
    long double sum = 0;
    for (int j = 0; j <= p->windows; j++) {
        sum += chance(p, j) * normal_tail(side * (z - j * at) / (long double)p->sigma);
    }
    return sum;
}
// The output at which the loss is epsilon: it is above that on one side.
static long double output_at(const Pair *p, long double epsilon) {
    long double from = -60 * (long double)p->sigma - 60, to = -from, sign = p->turned ? -1 : 1;
    for (int i = 0; i < 80; i++) {
        long double middle = (from + to) / 2;
        if (sign * (reference_loss(p, middle) - epsilon) > 0) {
            to = middle;
        } else {
            from = middle;
        }
    }
    return to;
}
// P's mass where the loss is above epsilon less exp(epsilon) times Q's.
static long double delta_of_step(const Pair *p, long double epsilon) {
    const int side = p->turned ? -1 : 1; // where the loss is above epsilon
    long double at = output_at(p, epsilon), mixed = mixture_tail(p, at, 1, side);
    long double other = p->replace_one ? mixture_tail(p, at, -1, side)
                                       : normal_tail(side * at / (long double)p->sigma);
    return p->turned ? other - expl(epsilon) * mixed : mixed - expl(epsilon) * other;
}
// What the outputs z of a first step, and the second, add.
static long double delta_after(const Pair *p, long double epsilon, long double z) {
    long double v = (long double)p->sigma * (long double)p->sigma, loss = reference_loss(p, z);
    long double density = expl(-z * z / (2 * v)) / sqrtl(2 * 3.14159265358979323846L * v);
    return density * (p->turned ? 1 : ratio(p, z)) * delta_of_step(p, epsilon - loss);
}
// The same of two steps: over the first one's outputs, by Gauss-Legendre's rule. Where the first
// step uses epsilon up what the second adds bends, within q of it: panels grow with the distance
// from there.
static long double delta_of_two(const Pair *p, long double epsilon) {
    enum { POINTS = 3 };
    static const long double at[POINTS] = {-0.774596669241483377L, 0, 0.774596669241483377L};
    static const long double weight[POINTS] = {5.0L / 18, 8.0L / 18, 5.0L / 18};
    const long double end = 12 * (long double)p->sigma + p->windows;
    const long double bend = fmaxl(-end, fminl(end, output_at(p, epsilon)));
    long double sum = 0;
    for (int side = -1; side <= 1; side += 2) {
        for (long double away = 0, width = 0; away < end - side * bend; away += width) {
            width = fminl(end / 500, fmaxl(1e-9L, away / 10));
            for (int i = 0; i < POINTS; i++) {
                sum += width * weight[i] *
                       delta_after(p, epsilon, bend + side * (away + width * (1 + at[i]) / 2));
            }
        }
    }
    return sum;
}
// Delta falls with epsilon: at `low` it must not be below, at `high` not above the one that was
// asked for. 1e-9: rounding of the reference.
static void check_deltas(const PrivacySetting *s, PrivacyLoss loss) {
    long double at[2] = {0, 0};
    for (int end = 0; end < 2; end++) {
        // the worse of both directions
        for (int turned = 0; turned < (s->replace_one ? 1 : 2); turned++) {
            Pair p = {s->q, s->sigma, s->replace_one, turned == 1, s->windows};
            long double epsilon = (long double)(end ? loss.high : loss.low);
            at[end] = fmaxl(at[end],
                            s->steps == 1 ? delta_of_step(&p, epsilon) : delta_of_two(&p, epsilon));
        }
    }
    bool right = (loss.low == 0 || at[0] >= (long double)(s->delta * (1 - 1e-9))) &&
                 at[1] <= (long double)(s->delta * (1 + 1e-9));
    if (!right || loss.high - loss.low > 0.002) {
        fail_msg("q %g sigma %g steps %d delta %g replace %d windows %d: from %.9g to %.9g, with "
                 "deltas %.9Lg and %.9Lg",
                 s->q, s->sigma, (int)s->steps, s->delta, s->replace_one, s->windows, loss.low,
                 loss.high, at[0], at[1]);
    }
}
static const struct {
    double q, sigma, delta;
    int windows;
} exact[] = {{0.3, 0.7, 1e-3, 1}, {0.01, 0.5, 1e-6, 2},   {0.9, 2, 1e-9, 1},  {0.001, 0.4, 1e-5, 1},
             {0.5, 3, 0.01, 1},   {1, 1.3, 1e-12, 1},     {0.1, 1, 0.2, 1},   {0.01, 0.5, 1e-6, 1},
             {0.3, 2, 1e-4, 5},   {0.001, 1.5, 1e-6, 60}, {0.5, 9, 1e-9, 40}, {1, 4, 1e-5, 3}};
static void test_one_step(void **state) {
    (void)state;
    for (size_t i = 0; i < 2 * sizeof exact / sizeof exact[0]; i++) {
        if (!tried(i, 5)) { continue; }
        PrivacySetting s =
            setting(exact[i / 2].q, exact[i / 2].sigma, 1, exact[i / 2].delta, i % 2);
        s.windows = exact[i / 2].windows;
        check_deltas(&s, account_epsilon(&s, NAN));
    }
}
static void test_two_steps(void **state) {
    (void)state;
    for (size_t i = 0; i < 2 * (all_tests() ? sizeof exact / sizeof exact[0] : 2); i++) {
        if (!tried(i, 3)) { continue; }
        PrivacySetting s =
            setting(exact[i / 2].q, exact[i / 2].sigma, 2, exact[i / 2].delta, i % 2);
        s.windows = exact[i / 2].windows;
        check_deltas(&s, account_epsilon(&s, NAN));
    }
}
// Every sample in every step: the Gaussian mechanism with mu = sqrt(steps) / sigma (twice that for
// replace-one).
static double gaussian_epsilon(long double mu, long double delta) {
    long double from = 0, to = 2000;
    for (int i = 0; i < 200; i++) {
        long double e = (from + to) / 2, found = normal_tail(e / mu - mu / 2) -
                                                 expl(e + logl(normal_tail(e / mu + mu / 2)));
        if (found > delta) {
            from = e;
        } else {
            to = e;
        }
    }
    return (double)to;
}
static void test_gaussian(void **state) {
    (void)state;
    static const double cases[][3] = {{10, 100, 1e-5},      {1, 1, 1e-5},     {5, 1, 1e-30},
                                      {100, 1000000, 1e-8}, {300, 400, 1e-3}, {2, 12, 1e-15}};
    assert_true(fabs(gaussian_epsilon(1, 1e-5L) - 4.3771781) < 1e-7);
    for (size_t i = 0; i < 2 * (all_tests() ? sizeof cases / sizeof cases[0] : 3); i++) {
        const double *c = cases[i / 2];
        PrivacySetting s = setting(1, c[0], c[1], c[2], i % 2);
        PrivacyLoss loss = account_epsilon(&s, NAN);
        double expected = gaussian_epsilon(
            (i % 2 ? 2 : 1) * sqrtl((long double)c[1]) / (long double)c[0], (long double)c[2]);
        if (!(loss.low <= expected && expected <= loss.high && loss.high - loss.low <= 0.002)) {
            fail_msg("sigma %g steps %g delta %g replace %d: %.9g is not from %.9g to %.9g", c[0],
                     c[1], c[2], (int)(i % 2), expected, loss.low, loss.high);
        }
    }
}

// As many steps as are accounted. Epsilon is known where each sample is in every step, and by the
// limit theorem to a percent where it is in few of them. A comparison is decided 4 percent away.
static void check_many(double q, double sigma, double steps, double delta, double known) {
    PrivacySetting s = setting(q, sigma, steps, delta, false);
    const PrivacyLoss above = account_epsilon(&s, 1.04 * known),
                      below = account_epsilon(&s, 0.96 * known);
    if (!(above.high <= 1.04 * known && below.low > 0.96 * known)) {
        fail_msg("q %g sigma %g steps %g: known %.9g; found %.9g to %.9g, and %.9g to %.9g", q,
                 sigma, steps, known, above.low, above.high, below.low, below.high);
    }
}
static void test_many_steps(void **state) {
    (void)state;
    if (tried(0, 2)) { check_many(1, 1e4, 1e9, 1e-8, gaussian_epsilon(sqrtl(1e9L) / 1e4L, 1e-8L)); }
    // q, sigma, steps
    const double at_random[][3] = {{1e-5, 1, 1e9}, {1e-4, 1, 1e8}, {1e-5, 10, 1e9}};
    for (size_t i = 0; i < 3; i++) {
        if (!(i == 0 ? tried(1, 2) : all_tests())) { continue; }
        const double *c = at_random[i];
        check_many(
            c[0], c[1], c[2], 1e-8,
            gaussian_epsilon((long double)(c[0] * sqrt(c[2] * expm1(1 / (c[1] * c[1])))), 1e-8L));
    }
}
static void test_steps_without_a_grid(void **state) { // an upper end within a thousandth, at once
    (void)state;
    const double sigmas[] = {0.1, 1, 10};
    for (int i = 0; i < 3; i++) {
        PrivacySetting s = setting(1, sigmas[i], 1e9, 1e-8, false);
        const long double mu = sqrtl(1e9L) / (long double)sigmas[i];
        const double least = (double)(mu * mu / 2); // delta is about 1/2 there
        PrivacyLoss loss = account_epsilon(&s, NAN);
        const double most = least + 6 * (double)mu; // and 1e-9 there
        assert_true(loss.low <= least && loss.high > least && loss.high < most * 1.001);
    }
}

// -------------------------------------------------------------------------------------------------
// What always holds

static void test_monotonic(void **state) {
    (void)state;
    // a tenth more of each, or a window, moves epsilon by more than the interval
    for (size_t i = 0; i < 10; i++) {
        if (!tried(i, 2)) { continue; }
        PrivacySetting s = setting(0.02, 1.2, 300, 1e-5, i % 2), more = s;
        if (i / 2 == 0) { more.q *= 1.1; }
        if (i / 2 == 1) { more.steps = more.steps * 11 / 10; }
        if (i / 2 == 2) { more.sigma /= 1.1; }
        if (i / 2 == 3) { more.delta /= 1.1; }
        if (i / 2 == 4) { more.windows++; }
        assert_true(account_epsilon(&more, NAN).low > account_epsilon(&s, NAN).high);
        if (i / 2 == 4) { continue; }
        s.rdp = more.rdp = true;
        assert_true(account_epsilon(&more, NAN).high > account_epsilon(&s, NAN).high);
    }
    PrivacySetting add = setting(0.02, 1.2, 300, 1e-5, false),
                   replace = setting(0.02, 1.2, 300, 1e-5, true);
    assert_true(account_epsilon(&replace, NAN).low > account_epsilon(&add, NAN).high);
}
static void test_random_settings(void **state) {
    (void)state;
    for (uint64_t i = 0; i < (all_tests() ? 200 : 4); i++) {
        double u[4];
        for (uint64_t j = 0; j < 4; j++) { u[j] = random_uniform(7, i, j); }
        PrivacySetting s = setting(pow(10, -3 * u[0]), 0.6 + 3 * u[1], floor(pow(10, 3 * u[2])),
                                   pow(10, -2 - 8 * u[3]), false);
        PrivacyLoss loss = account_epsilon(&s, NAN);
        double bound = rdp_epsilon(&s, NULL);
        bool right = 0 <= loss.low && loss.low <= loss.high && loss.high <= bound + 0.002 &&
                     loss.low <= bound;
        if (!right || (loss.high < 20 && loss.high - loss.low > 0.002)) {
            fail_msg("q %g sigma %g steps %d delta %g: from %.9g to %.9g, rdp %.9g", s.q, s.sigma,
                     (int)s.steps, s.delta, loss.low, loss.high, bound);
        }
    }
}
static void test_seldom_sampled(void **state) { // not once, but with a probability below delta
    (void)state;
    for (int i = 0; i < 2; i++) {
        PrivacySetting s = setting(1e-12, 0.5, 1000, 1e-6, i);
        PrivacyLoss loss = account_epsilon(&s, NAN);
        assert_true(loss.low == 0 && loss.high < 1e-3);
    }
}
static void test_searches(void **state) {
    (void)state;
    // q, steps, delta, epsilon, sigma: rdp, prv
    static const double targets[][6] = {{1024.0 / 42061, 411, 8e-6, 8, 0.7183, 0.6828},
                                        {0.01, 1000, 1e-5, 1, 1.5131, 1.4146}};
    for (int i = all_tests() ? 0 : 1; i < 2; i++) {
        for (int rdp = 0; rdp < 2; rdp++) {
            PrivacySetting s = setting(targets[i][0], 0, targets[i][1], targets[i][2], false);
            s.rdp = rdp;
            s.sigma = account_sigma(&s, targets[i][3]);
            check_close("sigma", s.sigma, targets[i][rdp ? 4 : 5], 2e-4);
            assert_true(account_epsilon(&s, NAN).high <= targets[i][3] + 5e-4);
            int64_t steps = account_steps(&s, targets[i][3]);
            assert_true(steps >= s.steps && steps <= s.steps + 2 + s.steps / 1000);
        }
    }
    PrivacySetting never = setting(1, 0, 1e9, 1e-30, false);
    never.rdp = true;
    assert_true(isinf(account_sigma(&never, 0.001)));
    never.sigma = 1;
    never.steps = 0;
    assert_int_equal(account_steps(&never, 0.001), 0);
}

// -------------------------------------------------------------------------------------------------
// --dp-account

static void answer(const void *text) {
    account_answer(stdout, (const char *)text, true, false, true);
}
static void test_refused_texts(void **state) {
    (void)state;
    static const char *const texts[][2] = {
        {"", "found \"\""},
        {"q=0.01", "needs q="},
        {"q=0.01,sigma=1,steps=10", "needs q="},
        {"q=0.01,sigma=1,steps=10,delta=1e-5,epsilon=1", "needs q="},
        {"sigma=1,steps=10,delta=1e-5,epsilon=1", "needs q="},
        {"q=0.01,q=0.01,sigma=1,steps=10,delta=1e-5", "q= is given twice"},
        {"q=0.01,sigma=1,steps=10,delta=1e-5,", "found \"\""},
        {"q=0.01,sigma=1,steps=10,gamma=1e-5", "found \"gamma=1e-5\""},
        {"q=0.01,sigma=1,steps=10,delta", "found \"delta\""},
        {"q,sigma=1,steps=10,delta=1e-5", "found \"q\""},
        {"=1,sigma=1,steps=10,delta=1e-5", "found \"=1\""},
        {"q=,sigma=1,steps=10,delta=1e-5", "q must be a number from 1e-12 to 1, found \"\""},
        {"q=nan,sigma=1,steps=10,delta=1e-5", "q must be a number"},
        {"q=0,sigma=1,steps=10,delta=1e-5", "q must be a number"},
        {"q=1.1,sigma=1,steps=10,delta=1e-5", "q must be a number"},
        {"q=1,sigma=inf,steps=10,delta=1e-5", "sigma must be a number"},
        {"q=1,sigma=0,steps=10,delta=1e-5", "sigma must be a number"},
        {"q=1,sigma=1x,steps=10,delta=1e-5", "found \"1x\""},
        {"q=1,sigma=1,steps=1.5,delta=1e-5", "steps must be a whole number"},
        {"q=1,sigma=1,steps=0,delta=1e-5", "steps must be a whole number"},
        {"q=1,sigma=1,steps=1e10,delta=1e-5", "steps must be a whole number"},
        {"q=1,sigma=1,steps=10,delta=0", "delta must be a number"},
        {"q=1,sigma=1,steps=10,delta=1", "delta must be a number"},
        {"q=0.1,sigma=1,steps=1,delta=1e-5,windows=0",
         "windows must be a whole number from 1 to 1024, found \"0\""},
        {"q=0.1,sigma=1,steps=1,delta=1e-5,windows=1.5", "windows must be a whole number"},
        {"q=0.1,sigma=1,steps=1,delta=1e-5,windows=1025", "windows must be a whole number"},
        {"q=0.1,sigma=1,steps=1,windows=2", "needs q="},
        {"q=0.1,sigma=1,steps=1,delta=1e-5,windows=2", "windows=2 is accounted by prv"},
        {"q=1,sigma=1,delta=1e-30,epsilon=0.001", "no step keeps epsilon 0.001"},
        {"q=1,steps=1e9,delta=1e-30,epsilon=0.001", "no sigma keeps epsilon 0.001"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        char message[4096];
        int code = run_child(answer, texts[i][0], message, sizeof message);
        if (code != EXIT_INPUT || !strstr(message, texts[i][1])) {
            fail_msg("\"%s\": found exit code %d: %s", texts[i][0], code, message);
        }
    }
}
static void answer_by_prv(const void *text) {
    account_seconds = 0.5;
    account_answer(stdout, (const char *)text, false, false, true);
}
static void test_answers_that_take_long(void **state) { // are refused, after so long and no longer
    (void)state;
    static const char *const texts[] = {
        "q=0.5,sigma=10000,steps=1e9,delta=1e-5",   "q=1,sigma=0.1,steps=1e9,delta=1e-100",
        "q=1e-9,sigma=0.3,steps=1e9,delta=1e-12",   "q=1e-12,sigma=10000,steps=1,delta=1e-100",
        "q=0.01,epsilon=1e-6,steps=1e9,delta=1e-5", "q=1e-6,sigma=0.1,steps=1e9,delta=1e-5"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (!tried(i, 4)) { continue; }
        char message[4096];
        struct rusage used[2];
        getrusage(RUSAGE_CHILDREN, &used[0]);
        int code = run_child(answer_by_prv, texts[i], message, sizeof message);
        getrusage(RUSAGE_CHILDREN, &used[1]);
        double seconds = (double)(used[1].ru_utime.tv_sec - used[0].ru_utime.tv_sec) +
                         1e-6 * (double)(used[1].ru_utime.tv_usec - used[0].ru_utime.tv_usec);
        // A fast machine may find within the time that no noise suffices.
        bool refused =
            strstr(message, "takes more than 0.5 s") || strstr(message, "no sigma keeps");
        if (code != EXIT_INPUT || !refused) {
            fail_msg("\"%s\": found exit code %d: %s", texts[i], code, message);
        }
        assert_true(seconds < 3);
    }
}
static void answer_without_end(const void *text) {
    account_answer(stdout, (const char *)text, false, false, true);
}
static void answer_with_note(const void *text) {
    account_note = 0;
    account_answer(stdout, (const char *)text, false, false, true);
}
static void test_who_waits_reads_a_note(void **state) {
    (void)state;
    char message[4096];
    assert_int_equal(run_child(answer_with_note, "q=0.01,sigma=1,steps=1000,delta=1e-5", message,
                               sizeof message),
                     EXIT_DONE);
    const char *note = "note: --dp-account: to answer q=0.01,sigma=1,steps=1000,delta=1e-5 takes a "
                       "while, mostly less than a minute of CPU time; "
                       "it ends after 120 s\n";
    assert_string_equal(message, note); // one line
    assert_int_equal(run_child(answer_without_end, "q=1,sigma=0.1,steps=1,delta=1e-5,windows=1024",
                               message, sizeof message),
                     EXIT_INPUT);
    assert_non_null(strstr(message, "has no epsilon that could be claimed"));
}
static void test_answer(void **state) {
    (void)state;
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    account_answer(f, "delta=1e-5,steps=1e3,q=1e-2,sigma=1", true, false, true); // any order
    fclose(f);
    double epsilon = 0, low = 0, high = 0;
    assert_int_equal(
        sscanf(text, "{\"epsilon\":%lf,\"low\":%lf,\"high\":%lf,\"delta\":", &epsilon, &low, &high),
        3);
    check_close("epsilon", epsilon, 2.1014, 6e-5);
    assert_true(high == epsilon && low == 0);
    assert_non_null(strstr(text, ",\"q\":0.01,\"sigma\":1,\"steps\":1000,\"windows\":1,"
                                 "\"accountant\":\"rdp\",\"neighbours\":\"add-remove\"}\n"));
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_divergences),
        cmocka_unit_test(test_orders),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_documents),
        cmocka_unit_test(test_one_step),
        cmocka_unit_test(test_two_steps),
        cmocka_unit_test(test_gaussian),
        cmocka_unit_test(test_many_steps),
        cmocka_unit_test(test_steps_without_a_grid),
        cmocka_unit_test(test_monotonic),
        cmocka_unit_test(test_random_settings),
        cmocka_unit_test(test_seldom_sampled),
        cmocka_unit_test(test_searches),
        cmocka_unit_test(test_refused_texts),
        cmocka_unit_test(test_answer),
        cmocka_unit_test(test_answers_that_take_long),
        cmocka_unit_test(test_who_waits_reads_a_note),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
