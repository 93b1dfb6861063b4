// accountant.h: how far "this sample was in the data" and "it was not" can be distinguished after T
// private steps: epsilon for a given delta.
//
// A step samples every sequence with probability q (Poisson). It adds up clipped gradients of norm
// at most R, and noise of standard deviation sigma R. Take R = 1 and the only direction that
// matters. Then the output is z ~ N(0, sigma^2) or, with the sample in the data, z ~ P:
//     add-remove     P = (1 - q) N(0, sigma^2) + q N(1, sigma^2)   against
//                    Q = N(0, sigma^2), and Q against P: the worse of both
//     replace-one    P as above   against
//                    Q = (1 - q) N(0, sigma^2) + q N(-1, sigma^2): symmetric
// If a document of k windows is protected, each of them is sampled with probability q, and the
// sampled ones add up. N(1) becomes the mixture of N(j) with the binomial probabilities of j of k
// (arXiv 2407.07737), and N(-1) that of N(-j). The worst case is that all gradients have the same
// direction (replace-one: opposite directions): delta is a convex function of P/N(0) and Q/N(0),
// whose terms then depend on each other most (Kahane's inequality). The privacy loss of an output
// is L(z) = ln P(z)/Q(z), which grows with z. T steps lose the sum of T independent losses, and
//     delta(epsilon) = E[1 - exp(epsilon - L_1 - ... - L_T)]+ ,  each L_t of z ~ P.
// A cap on the batch at its mean + 6.5 standard deviations changes none of the digits
// (dp-accounting's events for truncated sampling).
//
// rdp: Renyi divergences of a step, times T, converted (arXiv 1908.10530, 2004.00010 proposition
// 12) at the orders that dp-accounting tries. At fractional orders the series is summed with
// absolute values, as there. This is an upper bound, up to several times too high at small q.
//
// prv: the distribution of the sum itself (accountant_prv.h): an interval [low, high] that contains
// epsilon; high is claimed.
#ifndef ACCOUNTANT_H
#define ACCOUNTANT_H

#include "base/base.h"
#include "privacy/accountant_prv.h"

// -------------------------------------------------------------------------------------------------
// rdp: Renyi divergences

enum { RDP_ORDERS = 99 + 53 + 4 }; // 1.1, 1.2 ... 10.9, 11, 12 ... 63, 128, 256, 512, 1024
static inline double rdp_order(int i) {
    return i < 99 ? (double)(11 + i) / 10 : i < 152 ? i - 88 : (128 << (i - 152));
}

static inline double log_add_exp(double a, double b) { // of logarithms; -INFINITY: of 0
    double most = fmax(a, b);
    return most == -INFINITY ? most : most + log1p(exp(fmin(a, b) - most));
}
static inline double log_erfc(double x) { // asymptotic series for large x
    double v = 1 / (2 * x * x);
    return x < 20 ? log(erfc(x))
                  : -x * x - log(x * 1.7724538509055160) + log1p(-v * (1 - 3 * v * (1 - 5 * v)));
}
// ln of the absolute value of the binomial coefficient
static inline double log_binomial(double n, double k) {
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1);
}

// Returns ln E_Q[(P/Q)^n] for an integer order n. It sums the binomial sum less 1, whose terms are
// all positive.
static inline double rdp_log_moment_whole(double q, double sigma, int n) {
    double sum = -INFINITY;
    for (int k = 2; k <= n; k++) {
        double c = k * (k - 1) / (2 * sigma * sigma);
        sum = log_add_exp(sum, log_binomial(n, k) + (n - k) * log1p(-q) + k * log(q) + c +
                                   log(-expm1(-c)));
    }
    return log_add_exp(0, sum);
}
// The same for fractional orders: two series, of the integrals below and above the point where both
// parts of P are equal.
static inline double rdp_log_moment(double q, double sigma, double order) {
    double before[2] = {-INFINITY, -INFINITY};
    double sum = -INFINITY, wide = 1 / (sqrt(2.0) * sigma),
           middle = sigma * sigma * log(1 / q - 1) + 0.5;
    for (int i = 0; i < 1000; i++) {
        double j = order - i, binomial = log_binomial(order, i) - log(2.0);
        double below = binomial + i * log(q) + j * log1p(-q) + i * (i - 1) * wide * wide +
                       log_erfc((i - middle) * wide);
        double above = binomial + j * log(q) + i * log1p(-q) + j * (j - 1) * wide * wide +
                       log_erfc((middle - j) * wide);
        sum = log_add_exp(sum, log_add_exp(below, above));
        if (below < before[0] && above < before[1] && fmax(below, above) < sum - 30) { return sum; }
        before[0] = below;
        before[1] = above;
    }
    return INFINITY; // the series does not converge: another order serves
}
// Returns the Renyi divergence of one step.
static inline double rdp_of_step(double q, double sigma, double order) {
    if (q == 1) { return order / (2 * sigma * sigma); }
    int whole = (int)order;
    double below = rdp_log_moment_whole(q, sigma, whole), part = order - whole,
           log_moment = part ? rdp_log_moment(q, sigma, order) : below;
    // Near 0 the series is lost in rounding. The logarithm of the moments is convex in the order,
    // so the chord between integer orders is an upper bound.
    if (part && log_moment < 1e-9) {
        log_moment = (1 - part) * below + part * rdp_log_moment_whole(q, sigma, whole + 1);
    }
    return log_moment / (order - 1);
}
// Returns the upper bound of epsilon over all orders. *best: the order that gives it, if not NULL.
static inline double rdp_epsilon(const PrivacySetting *s, double *best) {
    double least = INFINITY;
    for (int i = 0; i < RDP_ORDERS; i++) {
        double order = rdp_order(i), r = s->steps * rdp_of_step(s->q, s->sigma, order);
        // 0: by the total variation distance
        double epsilon = s->delta * s->delta + expm1(-r) > 0
                             ? 0
                             : r + log1p(-1 / order) - log(s->delta * order) / (order - 1);
        if (epsilon < least) {
            least = epsilon;
            if (best) { *best = order; }
        }
    }
    return fmax(least, 0);
}

// -------------------------------------------------------------------------------------------------
// Answers

static const double LEAST_SIGMA = 0.1, MOST_SIGMA = 1e4, SIGMA_STEP = 1e-4, MOST_STEPS = 1e9;

// Returns the epsilon of a setting by its accountant. With a `target` (else NAN) the interval is
// only as narrow as the comparison needs.
static inline PrivacyLoss account_epsilon(const PrivacySetting *s, double target) {
    PrivacyLoss loss = {0, INFINITY};
    if (s->rdp) { loss.high = rdp_epsilon(s, NULL); }
    return s->rdp ? loss : prv_epsilon(s, target);
}

// Returns the last number of units that keeps epsilon, or one that is short of it by less than 1 in
// 10,000. `keeps` keeps epsilon, `fails` does not. A unit is SIGMA_STEP of sigma, or one step.
// Every second guess interpolates the epsilons of both (0: unknown); the others halve the range.
static inline int64_t account_search(PrivacySetting s, double epsilon, bool of_sigma, int64_t keeps,
                                     int64_t fails) {
    double at_keeps = 0, at_fails = 0;
    for (int tries = 0; llabs(keeps - fails) > max_i64(1, min_i64(keeps, fails) / 10000); tries++) {
        double part = tries % 2 && at_keeps > 0 && at_fails > 0
                          ? log(epsilon / at_keeps) / log(at_fails / at_keeps)
                          : 0.5;
        double guess = exp((1 - part) * log((double)max_i64(keeps, 1)) + part * log((double)fails));
        int64_t middle =
            max_i64(min_i64(keeps, fails) + 1, min_i64(max_i64(keeps, fails) - 1, (int64_t)guess));
        if (of_sigma) {
            s.sigma = middle * SIGMA_STEP;
        } else {
            s.steps = middle;
        }
        PrivacyLoss loss = account_epsilon(&s, epsilon);
        if (loss.high <= epsilon) {
            keeps = middle;
            at_keeps = loss.high;
        } else {
            fails = middle;
            at_fails = isinf(loss.high) ? 0 : loss.high;
        }
    }
    return keeps;
}
// Returns the smallest sigma, to 1e-4, with which the setting keeps epsilon; INFINITY if none does.
static inline double account_sigma(const PrivacySetting *s, double epsilon) {
    PrivacySetting most = *s;
    most.sigma = MOST_SIGMA;
    if (account_epsilon(&most, epsilon).high > epsilon) { return INFINITY; }
    return SIGMA_STEP * account_search(*s, epsilon, true, (int64_t)(MOST_SIGMA / SIGMA_STEP),
                                       (int64_t)(LEAST_SIGMA / SIGMA_STEP) - 1);
}
// Returns the largest number of steps, to 1 in 10,000, that keeps epsilon; 0 if not even one does.
static inline int64_t account_steps(const PrivacySetting *s, double epsilon) {
    return account_search(*s, epsilon, false, 0, (int64_t)MOST_STEPS + 1);
}

// Parses --dp-account: q, delta and two of sigma, steps and epsilon, each once, in any order, and
// optionally windows. Ends the program (EXIT_INPUT) on anything else.
enum {
    ACCOUNT_Q,
    ACCOUNT_DELTA,
    ACCOUNT_SIGMA,
    ACCOUNT_STEPS,
    ACCOUNT_EPSILON,
    ACCOUNT_WINDOWS,
    ACCOUNT_KEYS
};
static const char *const ACCOUNT_HINT =
    "such as q=0.01,sigma=1,steps=1000,delta=1e-5; epsilon= in the place of sigma or steps asks "
    "for that; windows=: of a document";
static inline void account_parse(const char *text, double value[ACCOUNT_KEYS]) {
    static const char *const keys[ACCOUNT_KEYS] = {"q",     "delta",   "sigma",
                                                   "steps", "epsilon", "windows"};
    const double low[ACCOUNT_KEYS] = {1e-12, 1e-100, LEAST_SIGMA, 1, 1e-6, 1};
    const double high[ACCOUNT_KEYS] = {1,          0.999999, MOST_SIGMA,
                                       MOST_STEPS, 1000,     PRIVACY_MOST_WINDOWS};
    char copy[1000], *rest = copy, *end = NULL;
    int given = 0;
    snprintf(copy, sizeof copy, "%s", text);
    for (int i = 0; i < ACCOUNT_KEYS; i++) { value[i] = NAN; }
    for (char *item; (item = strsep(&rest, ",")); given++) {
        int i = 0;
        size_t length = strcspn(item, "=");
        while (i < ACCOUNT_KEYS && (strlen(keys[i]) != length || strncmp(item, keys[i], length))) {
            i++;
        }
        if (i == ACCOUNT_KEYS || !item[length]) {
            die(EXIT_INPUT, ACCOUNT_HINT,
                "--dp-account takes q=, delta=, sigma=, steps=, epsilon=, windows=, found "
                "\"%.80s\"",
                item);
        }
        if (!isnan(value[i])) {
            die(EXIT_INPUT, ACCOUNT_HINT, "--dp-account: %s= is given twice", keys[i]);
        }
        bool whole = i == ACCOUNT_STEPS || i == ACCOUNT_WINDOWS;
        value[i] = strtod(item + length + 1, &end);
        if (end == item + length + 1 || *end || !(value[i] >= low[i] && value[i] <= high[i]) ||
            (whole && value[i] != floor(value[i]))) {
            const char *kind = whole ? "whole number" : "number";
            die(EXIT_INPUT, ACCOUNT_HINT,
                "--dp-account: %s must be a %s from %g to %g, found \"%.80s\"", keys[i], kind,
                low[i], high[i], item + length + 1);
        }
    }
    if (given - !isnan(value[ACCOUNT_WINDOWS]) != 4 || isnan(value[ACCOUNT_Q]) ||
        isnan(value[ACCOUNT_DELTA])) {
        die(EXIT_INPUT, ACCOUNT_HINT,
            "--dp-account needs q=, delta= and two of sigma=, steps=, epsilon=, found \"%.200s\"",
            text);
    }
}
// After account_note seconds a note says that the result may take longer. Some results would take
// many minutes (documents of many windows): if there is a limit, the program ends then. Both are
// seconds of CPU time, and no result depends on them. Tests set less.
static double account_note = 2;
static double account_seconds = 120; // limit of --dp-account
static struct {
    const char *question;
    double limit; // 0: no limit
    clock_t begin;
    bool announced;
    void (*hook)(void); // the hook of comm.h
} account_clock;
// Called through keep_alive(): prints the note, ends the program at the limit, calls comm.h's hook.
static inline void account_in_time(void) {
    const double seconds = (double)(clock() - account_clock.begin) / CLOCKS_PER_SEC;
    if (account_clock.limit > 0 && seconds > account_clock.limit) {
        die(EXIT_INPUT,
            "ask for fewer steps, more noise or more epsilon; --dp-accountant rdp answers at once, "
            "where it can, with a higher epsilon",
            "%.250s takes more than %g s", account_clock.question, account_clock.limit);
    }
    if (seconds > account_note && !account_clock.announced) {
        account_clock.announced = true;
        fprintf(stderr, "note: %.250s takes a while, mostly less than a minute of CPU time",
                account_clock.question);
        if (account_clock.limit > 0) {
            fprintf(stderr, "; it ends after %g s", account_clock.limit);
        }
        fprintf(stderr, "\n");
    }
    if (account_clock.hook) { account_clock.hook(); }
}
// Begins to watch the time of a computation that `question` describes; limit 0: no limit.
static inline void account_watch(const char *question, double limit) {
    account_clock.question = question;
    account_clock.limit = limit;
    account_clock.begin = clock();
    account_clock.hook = keep_alive_hook;
    keep_alive_hook = account_in_time;
}
static inline void account_unwatch(void) { keep_alive_hook = account_clock.hook; }
// Prints the answer to --dp-account as a table, or as one JSON object.
static inline void account_answer(FILE *to, const char *text, bool rdp, bool replace_one,
                                  bool json) {
    const char *accountant = rdp ? "rdp" : "prv",
               *neighbours = replace_one ? "replace-one" : "add-remove";
    double value[ACCOUNT_KEYS], *sigma = &value[ACCOUNT_SIGMA], target;
    account_parse(text, value);
    char question[300];
    snprintf(question, sizeof question, "--dp-account: to answer %.200s", text);
    account_watch(question, account_seconds);
    target = value[ACCOUNT_EPSILON];
    int windows = isnan(value[ACCOUNT_WINDOWS]) ? 1 : (int)value[ACCOUNT_WINDOWS];
    int64_t steps = isnan(value[ACCOUNT_STEPS]) ? 0 : (int64_t)value[ACCOUNT_STEPS];
    PrivacySetting s = {.q = value[ACCOUNT_Q],
                        .sigma = *sigma,
                        .delta = value[ACCOUNT_DELTA],
                        .steps = steps,
                        .rdp = rdp,
                        .replace_one = replace_one,
                        .windows = windows};
    if (rdp && windows > 1) {
        die(EXIT_INPUT, "leave --dp-accountant out", "--dp-account: windows=%d is accounted by prv",
            windows);
    }
    if (isnan(*sigma)) { s.sigma = account_sigma(&s, target); }
    if (s.steps == 0) { s.steps = account_steps(&s, target); }
    if (isinf(s.sigma) || s.steps == 0) {
        die(EXIT_INPUT, "ask for more epsilon or delta, or sample less",
            "--dp-account: no %s keeps epsilon %g", isinf(s.sigma) ? "sigma" : "step", target);
    }
    // with a target: as the search decided; NAN: as narrow as possible
    PrivacyLoss loss = account_epsilon(&s, target);
    account_unwatch();
    if (!isfinite(loss.high)) {
        die(EXIT_INPUT, "ask for more sigma, more delta or fewer windows",
            "--dp-account: %.200s has no epsilon that could be claimed", text);
    }
    if (json) {
        fprintf(to,
                "{\"epsilon\":%.17g,\"low\":%.17g,\"high\":%.17g,\"delta\":%.17g,\"q\":%.17g,"
                "\"sigma\":%.17g,\"steps\":%" PRId64,
                loss.high, loss.low, loss.high, s.delta, s.q, s.sigma, s.steps);
        fprintf(to, ",\"windows\":%d,\"accountant\":\"%s\",\"neighbours\":\"%s\"}\n", windows,
                accountant, neighbours);
        return;
    }
    double claimed = ceil(loss.high * 1e6) / 1e6;
    fprintf(to, "epsilon    %.6f (by %s; certainly between %.6f and %.6f)\n", claimed, accountant,
            floor(loss.low * 1e6) / 1e6, claimed);
    fprintf(to, "delta      %g\nneighbours %s\n", s.delta, neighbours);
    if (windows > 1) { fprintf(to, "protects   a document of up to %d windows\n", windows); }
    fprintf(to,
            "of         %" PRId64 " steps that sample with probability %g (Poisson) and add noise "
            "of %g clipping thresholds\n",
            s.steps, s.q, s.sigma);
}

#endif
