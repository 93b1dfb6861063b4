// accountant.h: what differs between "this sample was in the data" and "it was not" after T private
// steps: epsilon for a given delta.
//
// A step samples every sequence with probability q (Poisson), adds up clipped gradients of norm at
// most R and noise of standard deviation sigma R. With R = 1 and in the only direction that matters
// the output is z ~ N(0, sigma^2), or, where the sample is in the data,
//     add-remove     P = (1 - q) N(0, sigma^2) + q N(1, sigma^2)    against    Q = N(0, sigma^2),
//                    and Q against P: the worse of both
//     replace-one    P as above                                     against    Q = (1 - q) N(0,
//                                                                   sigma^2) + q N(-1, sigma^2),
//                                                                   symmetric
// Where a document of k windows is protected, each of them sampled with probability q, as many as
// take part add up: N(1) becomes the mixture of N(j) with the chances of j of k (arXiv 2407.07737),
// N(-1) that of N(-j). Nothing is worse than all gradients in one direction (replace-one: in two
// opposite ones), since delta is a convex function of P/N(0) and Q/N(0), whose terms then depend on
// each other most (Kahane's inequality). The privacy loss of an output is L(z) = ln P(z)/Q(z),
// which grows with z. T steps lose the sum of T independent losses, and
//     delta(epsilon) = E[1 - exp(epsilon - L_1 - ... - L_T)]+ ,  each L_t of z ~ P.
// A cap on the batch at its mean + 6.5 standard deviations changes none of the digits
// (dp-accounting's events for truncated sampling).
//
// rdp: Renyi divergences of a step, times T, converted (arXiv 1908.10530, 2004.00010 proposition
// 12) at the orders that dp-accounting tries; at fractional orders the series is summed with
// absolute values, as there. An upper bound, up to several times too high at small q.
//
// prv: the distribution of the sum itself, by FFT (as arXiv 2106.02848), with an interval [low,
// high] that holds epsilon; high is the claim. delta(epsilon) can only grow when losses or their
// mass grow, or when U = exp(-L) is spread with its mean kept (the bracket is convex in U); in the
// other direction it can only fall. So, with the losses x_i = first + i h as a grid (arXiv
// 2207.04380 for the upper end):
//     high   what lies between x_i and x_i+1 is split over both so that P's and Q's mass stay;
//            losses beyond the grid are infinite
//     low    what lies left and right of x_i is merged into x_i, as much of the left as the right
//            can lift to x_i
// Both are wrong by about T h^2, of opposite signs: the grid is refined until they meet. The masses
// are integrals of positive functions (Gauss-Legendre, three points on panels so short that its
// error is far below ROUNDING_OF_MASS), so nothing cancels. The sum of T losses is a circular
// convolution. Masses are multiplied by exp(theta x) before it (tilted: theta + 1 is the order at
// which Renyi would convert), which puts the sum's bulk where epsilon is: errors are then relative
// to delta, however small delta is, where an untilted FFT has a floor. Bounds that the interval
// carries:
//     masses, tilt    relative errors e of each mass: a factor (1 + e)^T of delta
//     grid            a computed grid point is off by rounding, T times: added to epsilon
//     window          what lies outside of the N grid points that are kept comes back elsewhere:
//                     Chernoff's bound of its tilted mass
//     beyond the grid MASS_BEYOND of delta: the high end counts such losses as infinite, the low
//     end leaves them out
//     FFT             ||error||_2 <= 13 u log2(N) ||data||_2 (Higham, Accuracy and Stability,
//                     theorem 24.2; roots of unity to 7 u), times T for the power; in long double,
//                     as T and a heavy tail multiply it: u = 2^-64 on x86
// A grid of width h moves the tilted sum by some (1 + theta) T h^2, so windows are planned, and
// FFTs begun, on grids where that is little beside the window. Where 2^22 points are too few for it
// (epsilon is far above 1000 then), Renyi's bound of the grid of one step is the answer, and its
// low end is 0. Work is bounded by numbers of points: no answer depends on the time that it took.
// An own FFT of 40 lines: FFTW would be a dependency that CI has to install, for a tenth of the
// time, and states no such bound.
#ifndef ACCOUNTANT_H
#define ACCOUNTANT_H

#include "support/base.h" // die

#include <float.h> // LDBL_EPSILON

typedef struct {
    double q, sigma, delta; // (0, 1]; noise over clipping threshold; (0, 1)
    int64_t steps;
    bool rdp, replace_one; // else prv, add-remove
    // of a document, which is protected then: each is sampled by itself; 1 where rdp
    int windows;
} PrivacySetting;

typedef struct {
    double low, high; // epsilon is between; high is what may be claimed. rdp knows no lower end: 0
} PrivacyLoss;

// -------------------------------------------------------------------------------------------------
// rdp

enum { RDP_ORDERS = 99 + 53 + 4 }; // 1.1, 1.2 ... 10.9, 11, 12 ... 63, 128, 256, 512, 1024
static inline double rdp_order(int i) {
    return i < 99 ? (double)(11 + i) / 10 : i < 152 ? i - 88 : (double)(128 << (i - 152));
}

static inline double log_add_exp(double a, double b) { // of terms; -INFINITY stands for 0
    double most = fmax(a, b);
    return most == -INFINITY ? most : most + log1p(exp(fmin(a, b) - most));
}
static inline double log_erfc(double x) { // far out by its asymptotic series
    double v = 1 / (2 * x * x);
    return x < 20 ? log(erfc(x))
                  : -x * x - log(x * 1.7724538509055160) + log1p(-v * (1 - 3 * v * (1 - 5 * v)));
}
// of its absolute value
static inline double log_binomial(double n, double k) {
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1);
}

// ln E_Q[(P/Q)^n] for whole orders n: the binomial sum less 1, whose terms are all positive.
static inline double rdp_log_moment_whole(double q, double sigma, int n) {
    double sum = -INFINITY;
    for (int k = 2; k <= n; k++) {
        double c = k * (k - 1) / (2 * sigma * sigma);
        sum = log_add_exp(sum, log_binomial(n, k) + (n - k) * log1p(-q) + k * log(q) + c +
                                   log(-expm1(-c)));
    }
    return log_add_exp(0, sum);
}
// The same for orders between: two series, of the integrals below and above the point where both
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
    return INFINITY; // another order will do
}
// Renyi divergence of one step.
static inline double rdp_of_step(double q, double sigma, double order) {
    if (q == 1) { return order / (2 * sigma * sigma); }
    int whole = (int)order;
    double below = rdp_log_moment_whole(q, sigma, whole), part = order - whole,
           log_moment = part ? rdp_log_moment(q, sigma, order) : below;
    // Near 0 the series is lost in rounding; the moments' logarithm is convex in the order, so the
    // chord is above it.
    if (part && log_moment < 1e-9) {
        log_moment = (1 - part) * below + part * rdp_log_moment_whole(q, sigma, whole + 1);
    }
    return log_moment / (order - 1);
}
// The order that gives it goes to *best, where that is wanted.
static inline double rdp_epsilon(const PrivacySetting *s, double *best) {
    double least = INFINITY;
    for (int i = 0; i < RDP_ORDERS; i++) {
        double order = rdp_order(i), r = (double)s->steps * rdp_of_step(s->q, s->sigma, order);
        // 0: by total variation
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
// prv: losses of one step

// relative; the second of integrals with their exponentials
static const double ROUNDING = 0x1p-53, ROUNDING_OF_MASS = 1e-12;
// of epsilon: what the low end may lose by being rounded down
static const double ALIGNED = 1e-5;
// of delta: what losses beyond the grid may add
static const double MASS_BEYOND = 1e-5;

// Losses of one step in bins of equal width h. A bin's surplus is its mass of P less exp(x_i) times
// its mass of Q, its deficit is exp(x_i+1) times its mass of Q less its mass of P: both positive.
typedef struct {
    double first, h;
    int64_t bins, middle;      // middle: the bin with most mass
    double *surplus, *deficit; // [bins]
    double below, above;       // mass of P beyond the ends
} Losses;

// P as a mixture of normals: weight[j] of N(j, v).
enum { PRIVACY_MOST_WINDOWS = 1024 };
typedef struct {
    const PrivacySetting *s;
    double v, end;                           // sigma^2; outputs beyond +-end do not count
    int parts;                               // the highest j that counts between the ends
    double weight[PRIVACY_MOST_WINDOWS + 1]; // of all
} Mixture;

static inline double normal_above(double u) { return 0.5 * erfc(u * 0.70710678118654752); }
// of P above z, or, with sign -1, below -z
static inline double mass_beyond(const Mixture *m, double z, int sign) {
    double mass = 0;
    for (int j = 0; j <= m->s->windows; j++) {
        mass += m->weight[j] * normal_above((z - sign * j) / m->s->sigma);
    }
    return mass;
}
// Density at z of N(0, v) times the sum of weight[j] |w_j(z) - w_j(anchor)|, where w_j(z) = exp(j
// (z - j/2) / v) is that of N(j, v) to it.
static inline double mass_against(const Mixture *m, double z, double anchor) {
    double sum = 0, more = fmax(z, anchor), apart = fabs(z - anchor) / m->v;
    for (int j = 1; j <= m->parts; j++) {
        sum += m->weight[j] * exp((j * (more - 0.5 * j) - 0.5 * z * z) / m->v) * -expm1(-j * apart);
    }
    return sum * (0.3989422804014327 / m->s->sigma);
}
static inline double loss_to_nothing(const Mixture *m, double z) { // ln P(z) / N(0, v)(z)
    double more = 0, all = m->weight[0];
    for (int j = 1; j <= m->parts; j++) { more += m->weight[j] * expm1(j * (z - 0.5 * j) / m->v); }
    if (more > -0.5) { return log1p(more); } // each where it does not cancel
    for (int j = 1; j <= m->parts; j++) { all += m->weight[j] * exp(j * (z - 0.5 * j) / m->v); }
    return log(all);
}
static inline double loss_of(const Mixture *m, double z) {
    return loss_to_nothing(m, z) - (m->s->replace_one ? loss_to_nothing(m, -z) : 0);
}

// The weights are the chances of j of k. The ends are where P has MASS_BEYOND left of delta, and
// N(0, v) less. A part that is so high that it adds nothing to P at the end, where it adds most,
// adds nothing anywhere.
static inline Mixture mixture_make(const PrivacySetting *s) {
    Mixture m = {s, s->sigma * s->sigma, 0, s->windows, {0}};
    long double q = (long double)s->q, k = s->windows;
    for (int j = 0; j <= s->windows; j++) {
        long double chances = lgammal(k + 1) - lgammal(j + 1.0L) - lgammal(k - j + 1) +
                              j * logl(q) + (j < s->windows ? (k - j) * log1pl(-q) : 0);
        m.weight[j] = (double)expl(chances);
    }
    double beyond = MASS_BEYOND * s->delta / (double)s->steps, from = 0,
           to = s->windows + s->sigma * sqrt(-2 * log(beyond));
    for (int i = 0; i < 60; i++) {
        double middle = (from + to) / 2;
        if (mass_beyond(&m, middle, 1) > beyond) {
            from = middle;
        } else {
            to = middle;
        }
    }
    m.end = to;
    double most = -INFINITY, last; // ln of what a part is at the end, to N(0, v)
    for (int j = 1; j <= s->windows; j++) {
        most = fmax(most, log(m.weight[j]) + j * (m.end - 0.5 * j) / m.v);
    }
    do {
        last = log(m.weight[m.parts]) + m.parts * (m.end - 0.5 * m.parts) / m.v;
    } while (last < most - 50 && m.parts--);
    return m;
}

// Where the loss is this: above `from`, where it is less. Closed for one window; else by Newton's
// method, between bounds.
static inline double output_of(const Mixture *m, double loss, double from) {
    double q = m->s->q, v = m->v;
    if (m->s->windows == 1 && m->s->replace_one) {
        return v * (loss / 2 + asinh((1 - q) * sinh(loss / 2) / q * exp(0.5 / v)));
    }
    if (m->s->windows == 1) {
        return 0.5 + v * (loss > -0.5 ? log1p(expm1(loss) / q) : log((exp(loss) - (1 - q)) / q));
    }
    double to = m->end, z = from, at = loss_of(m, z);
    while (loss_of(m, to) < loss) { to *= 2; } // the last bin ends beyond the outputs' end
    for (int i = 0; i < 200; i++) {
        double aside = 1e-6 * (1 + fabs(z)),
               next = z + (loss - at) / (loss_of(m, z + aside) - at) * aside;
        if (!(next > from && next < to)) { next = (from + to) / 2; }
        if (fabs(next - z) <= 4 * ROUNDING * fabs(z)) { break; }
        z = next;
        at = loss_of(m, z);
        if (at < loss) {
            from = z;
        } else {
            to = z;
        }
    }
    return z;
}

// Adds the integrals from z to z + width of a bin between the outputs a and b, whose losses have
// the exponentials ea and eb.
static inline void losses_add_panel(const Mixture *m, double z, double width, double a, double b,
                                    double ea, double eb, double *surplus, double *deficit) {
    static const double at[3] = {0.11270166537925831, 0.5, 0.88729833462074169},
                        weight[3] = {5.0 / 18, 8.0 / 18, 5.0 / 18};
    for (int i = 0; i < 3; i++) {
        double y = z + at[i] * width, gain = mass_against(m, y, a), lack = mass_against(m, y, b);
        if (m->s->replace_one) {
            gain += ea * mass_against(m, -y, -a);
            lack += eb * mass_against(m, -y, -b);
        }
        *surplus += weight[i] * width * gain;
        *deficit += weight[i] * width * lack;
    }
}

// The losses of P against Q, on a grid that begins `shift` bins before the least; or `turned`, of Q
// against P: they change sign, and surplus and deficit change places.
static inline Losses losses_make(const Mixture *m, double h, double shift, bool turned) {
    double end = m->end, least = loss_of(m, -end), first = least - shift * h, a = -end, most = 0;
    Losses l = {first, h, 1 + (int64_t)ceil((loss_of(m, end) - least) / h), 0, NULL, NULL, 0, 0};
    l.surplus = (double *)checked_calloc((size_t)l.bins, sizeof(double), "privacy losses");
    l.deficit = (double *)checked_calloc((size_t)l.bins, sizeof(double), "privacy losses");
    for (int64_t i = 0; i < l.bins; i++) {
        double b = output_of(m, first + (double)(i + 1) * h, a),
               ea = exp(fmax(first + (double)i * h, least)), eb = exp(first + (double)(i + 1) * h);
        // steep: how fast exponents change
        double steep = (m->parts + fmax(fabs(a), fabs(b))) / m->v, gain = 0, lack = 0;
        int64_t panels = (int64_t)fmin(fmax(ceil((b - a) * steep / 0.04), 1), 1e6),
                at = turned ? l.bins - 1 - i : i;
        double width = (b - a) / (double)panels;
        for (int64_t k = 0; k < panels; k++) {
            if ((i + k) % 1024 == 0) { keep_alive(); } // other ranks wait
            losses_add_panel(m, a + (double)k * width, width, a, b, ea, eb, &gain, &lack);
        }
        // the mass of Q, whose surplus is that above the grid's first point
        if (i == 0) { gain += (gain + lack) / (eb - ea) * (ea - exp(first)); }
        l.surplus[at] = turned ? lack / eb : gain;
        l.deficit[at] = turned ? gain / exp(first + (double)i * h) : lack;
        if (gain + lack > most) {
            most = gain + lack;
            l.middle = at;
        }
        a = b;
    }
    l.above = mass_beyond(m, a, 1);
    l.below = mass_beyond(m, end, -1);
    if (turned) {
        l.first = -(first + (double)l.bins * h);
        l.below = normal_above(a / m->s->sigma);
        l.above = normal_above(end / m->s->sigma);
    }
    return l;
}
static inline void losses_free(Losses *l) {
    free(l->surplus);
    free(l->deficit);
    l->surplus = l->deficit = NULL;
}

// For the low end: share[i] is how much of bin i is merged into its right end, the rest is merged
// into the left. What is merged must not lack mass of P: from both ends on, a bin lifts what its
// neighbour's other part can take, so errors shrink as masses grow. They meet in the middle (the
// bin with most mass), where a part is left over (negative: is wanted twice), which is rounded
// down. Returns this part.
static inline double losses_merge(const Losses *l, double *share) {
    double lift = 0, needed = 0; // share of the next bin that can go up; that has to stay down
    for (int64_t i = l->bins - 1; i > l->middle; i--) {
        share[i] = fmin(1, lift);
        lift = (1 - share[i]) * l->surplus[i] / l->deficit[i - 1];
    }
    for (int64_t i = 0; i < l->middle; i++) {
        share[i] = fmin(1 - needed, l->surplus[i + 1] / l->deficit[i]);
        needed = l->surplus[i + 1] > 0 ? share[i] * l->deficit[i] / l->surplus[i + 1] : 0;
    }
    share[l->middle] = fmin(1 - needed, lift);
    return 1 - needed - lift;
}
// Shifts the grid until so little is left over that T times it move epsilon by less than ALIGNED:
// the rest changes its sign from bin to bin, so a shift below 1 does it.
static inline Losses losses_align(const Mixture *m, double h, bool turned, double **share) {
    double at[2] = {0, 1};
    double rest[2] = {0, 0};
    double shift = 0;
    for (int tries = 0, side = 0;; tries++) {
        Losses l = losses_make(m, h, shift, turned);
        *share = (double *)checked_calloc((size_t)l.bins, sizeof(double), "privacy losses");
        double left = losses_merge(&l, *share) * (l.middle % 2 ? -1 : 1),
               lost =
                   (double)m->s->steps * fabs(left) * (l.surplus[l.middle] + l.deficit[l.middle]);
        if (lost < ALIGNED || tries == 12) { return l; }
        if (tries == 0) {
            rest[0] = left;
            rest[1] = -left;
        }
        // the end that moves: regula falsi, where an end that stays twice counts half
        int now = (left > 0) != (rest[0] > 0);
        if (tries > 1 && now == side) { rest[!now] /= 2; }
        side = now;
        at[now] = shift;
        rest[now] = left;
        shift = (at[0] * rest[1] - at[1] * rest[0]) / (rest[1] - rest[0]);
        losses_free(&l);
        free(*share);
    }
}

// The same as masses at the grid points first + i h.
enum { END_LOW, END_HIGH };
typedef struct {
    double first, h, infinite; // infinite: mass of losses that count as infinite, of the high end
    int64_t points;
    double *mass[2]; // [points] of END_LOW, END_HIGH
} LossGrid;
static inline LossGrid grid_make(const Mixture *m, double h, bool turned) {
    double *share, part = 1 / -expm1(-h), less = exp(-h);
    Losses l = losses_align(m, h, turned, &share);
    LossGrid g = {l.first, h, l.above, l.bins + 1, {NULL, NULL}};
    for (int e = 0; e < 2; e++) {
        g.mass[e] = (double *)checked_calloc((size_t)g.points, sizeof(double), "privacy losses");
    }
    g.mass[END_HIGH][0] = l.below;
    for (int64_t i = 0; i < l.bins; i++) {
        double up = part * l.surplus[i], down = part * less * l.deficit[i];
        g.mass[END_HIGH][i] += down;
        g.mass[END_HIGH][i + 1] += up;
        g.mass[END_LOW][i] += (1 - share[i]) * (up + down);
        g.mass[END_LOW][i + 1] += share[i] * (up + down);
    }
    losses_free(&l);
    free(share);
    return g;
}
static inline void grid_free(LossGrid *g) {
    free(g->mass[END_LOW]);
    free(g->mass[END_HIGH]);
}

// -------------------------------------------------------------------------------------------------
// FFT of n = 2^k complex numbers, in place; the frequencies come in bit-reversed order, which the
// inverse expects.

typedef struct {
    long double re, im;
} FftNumber;

static inline FftNumber fft_product(FftNumber a, FftNumber b) {
    FftNumber c = {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    return c;
}
// Roots of unity for every size up to n: those of size m are at [m / 2, m).
static inline FftNumber *fft_roots(int64_t n) {
    FftNumber *roots = (FftNumber *)checked_malloc((size_t)n * sizeof(FftNumber), "roots of unity");
    for (int64_t k = 0; k < n / 2; k++) {
        long double angle = -6.283185307179586476925286766559L * (long double)k / (long double)n;
        roots[n / 2 + k].re = cosl(angle);
        roots[n / 2 + k].im = sinl(angle);
    }
    for (int64_t i = n / 2 - 1; i > 0; i--) { roots[i] = roots[2 * i]; }
    return roots;
}
// Sizes are halved depth first, so that small ones stay in the cache.
static inline void fft_forward(FftNumber *a, int64_t n, const FftNumber *roots) {
    if (n == 1) { return; }
    if (n > 1 << 14) { keep_alive(); }
    const FftNumber *w = roots + n / 2;
    for (int64_t k = 0; k < n / 2; k++) {
        FftNumber x = a[k], y = a[k + n / 2], difference = {x.re - y.re, x.im - y.im};
        a[k].re = x.re + y.re;
        a[k].im = x.im + y.im;
        a[k + n / 2] = fft_product(difference, w[k]);
    }
    fft_forward(a, n / 2, roots);
    fft_forward(a + n / 2, n / 2, roots);
}
static inline void fft_inverse(FftNumber *a, int64_t n, const FftNumber *roots) { // times n
    if (n == 1) { return; }
    if (n > 1 << 14) { keep_alive(); }
    fft_inverse(a, n / 2, roots);
    fft_inverse(a + n / 2, n / 2, roots);
    const FftNumber *w = roots + n / 2;
    for (int64_t k = 0; k < n / 2; k++) {
        const FftNumber back = {w[k].re, -w[k].im};
        const FftNumber x = a[k], y = fft_product(a[k + n / 2], back);
        a[k].re = x.re + y.re;
        a[k].im = x.im + y.im;
        a[k + n / 2].re = x.re - y.re;
        a[k + n / 2].im = x.im - y.im;
    }
}
static inline FftNumber fft_power(FftNumber a, int64_t exponent) { // at least 1
    FftNumber result = {1, 0};
    for (; exponent > 1; exponent /= 2, a = fft_product(a, a)) {
        if (exponent % 2) { result = fft_product(result, a); }
    }
    return fft_product(result, a);
}
// Takes re and im, each a real sequence, to their circular convolutions with themselves `times`
// times, times n.
static inline void fft_convolve(FftNumber *a, int64_t n, int64_t times, const FftNumber *roots) {
    fft_forward(a, n, roots);
    // frequency -f is last + first - j where f is j
    for (int64_t first = 0, last = 0; first < n;
         first = last ? 2 * first : 1, last = 2 * first - 1) {
        for (int64_t j = first; 2 * j <= first + last; j++) {
            if (j % 4096 == 0) { keep_alive(); }
            FftNumber *x = &a[j], *y = &a[first + last - j];
            FftNumber of_re = {(x->re + y->re) / 2, (x->im - y->im) / 2},
                      of_im = {(x->im + y->im) / 2, (y->re - x->re) / 2};
            of_re = fft_power(of_re, times);
            of_im = fft_power(of_im, times);
            x->re = of_re.re - of_im.im;
            x->im = of_re.im + of_im.re;
            y->re = of_re.re + of_im.im;
            y->im = of_im.re - of_re.im;
        }
    }
    fft_inverse(a, n, roots);
}

// -------------------------------------------------------------------------------------------------
// prv: the sum of all steps' losses

// ln of the sum of masses times exp(theta x): relative to the end where this is largest, whose mass
// is so far from 0 that what underflows does not count.
static inline double grid_log_moment(const LossGrid *g, int end, double theta) {
    const double *mass = g->mass[end];
    int64_t first = 0, last = g->points - 1;
    while (first < last && mass[first] == 0) { first++; }
    while (first < last && mass[last] == 0) { last--; }
    long double sum = 0;
    int64_t from = theta > 0 ? last : first;
    keep_alive();
    for (int64_t i = first; i <= last; i++) {
        sum += (long double)(mass[i] * exp(theta * (double)(i - from) * g->h));
    }
    return theta * (g->first + (double)from * g->h) +
           (sum > 0 ? (double)logl(sum) : (double)-INFINITY);
}
// For golden sections: ln of the bound that Chernoff's t gives of the sum being `epsilon` or more,
// where sums are tilted by theta; or, with epsilon NAN, the loss that exp(-far) of the tilted sum
// reaches. sign -1: from the other end.
static const double FAR = 16;
typedef struct {
    const LossGrid *g;
    double T, theta, base, sign, epsilon, far;
} Chernoff;
static inline double chernoff(const Chernoff *c, double t) {
    double grown = c->T * (grid_log_moment(c->g, END_HIGH, c->theta + c->sign * t) - c->base);
    return isnan(c->epsilon) ? (grown + c->far) / t : grown - t * c->epsilon;
}
// The t > 0, at most `most`, with the least of it, which falls, then rises with ln t.
static inline double chernoff_best(const Chernoff *c, double most) {
    double from = log(1e-6), to = log(most), golden = 0.6180339887498949;
    double a = to - golden * (to - from), b = from + golden * (to - from);
    double at_a = chernoff(c, exp(a)), at_b = chernoff(c, exp(b));
    for (int left = 30; left; left--) {
        if (at_a <= at_b) {
            to = b;
            b = a;
            at_b = at_a;
            a = to - golden * (to - from);
            at_a = chernoff(c, exp(a));
        } else {
            from = a;
            a = b;
            at_a = at_b;
            b = from + golden * (to - from);
            at_b = chernoff(c, exp(b));
        }
    }
    return exp(a);
}

// Bounds of what is not exact in T steps' masses, tilted by theta: exp(mass) is a factor of delta,
// `grid` is added to epsilon.
typedef struct {
    double mass, grid;
} LossErrors;
static inline LossErrors loss_errors(const Mixture *m, const LossGrid *g, double theta) {
    const double T = (double)m->s->steps;
    const double far = fmax(fabs(g->first), fabs(g->first + (double)g->points * g->h));
    // how fast a loss changes: times a relative error of the output, its error
    const double steep = m->parts * m->end / m->v;
    LossErrors e = {T * (ROUNDING_OF_MASS + 8 * ROUNDING * (theta * far + steep)),
                    T * 8 * ROUNDING * (far + steep + 1)};
    return e;
}
// An upper bound of epsilon by one moment of the high end, without the sum's distribution: Renyi's
// of order theta + 1. For all x >= 0, 1 - exp(-x) <= exp(theta x) theta^theta / (1 + theta)^(1 +
// theta).
static inline double moment_epsilon(const Mixture *m, const LossGrid *g, double theta) {
    const double T = (double)m->s->steps, rest = m->s->delta - T * g->infinite;
    const LossErrors e = loss_errors(m, g, theta);
    if (!(rest > 0)) { return INFINITY; }
    const double most = theta * log(theta) - (1 + theta) * log1p(theta);
    const double moment = T * grid_log_moment(g, END_HIGH, theta) + e.mass;
    return fmax(0, (moment + most - log(rest)) / theta) + e.grid;
}

// How the sum of one direction is computed: tilted by exp(theta x), in a window from `from` to
// `to`, with Chernoff's bounds of what lies left and right of it taken at theta - left and theta +
// right. Nothing here has to be exact: the bounds hold for any choice.
typedef struct {
    // below: epsilon was found to lie left of the window, which then moves
    bool turned, below;
    double range, theta, left, right, from, to; // range: of one step's losses
    PrivacyLoss loss;
} Direction;

static inline void direction_plan(Direction *d, const Mixture *m, const LossGrid *g) {
    // tilts stay finite
    const double T = (double)m->s->steps, most = 1000 / (g->first + (double)g->points * g->h);
    Chernoff c = {g, T, 0, grid_log_moment(g, END_HIGH, 0), 1, NAN, -log(m->s->delta)};
    d->loss.high = fmin(d->loss.high, moment_epsilon(m, g, chernoff_best(&c, most)));
    c.epsilon = d->loss.high;
    d->theta = chernoff_best(&c, most);
    Chernoff right = {g, T, d->theta, grid_log_moment(g, END_HIGH, d->theta), 1, NAN, FAR};
    Chernoff left = right;
    left.sign = -1;
    d->right = chernoff_best(&right, 1e9);
    d->left = chernoff_best(&left, 1e9);
    d->to = chernoff(&right, d->right);
    d->from = -chernoff(&left, d->left);
}

// The sum's tilted masses, of the low end as re and of the high end as im.
typedef struct {
    FftNumber *mass; // [n] of the losses from + k h
    int64_t n;
    double from, h, theta;
    double scale; // ln of what a tilted mass at loss 0 counts
    // tilted mass outside of the window; bound of the FFT's error, as the norm of all masses
    double beyond[2], error;
} LossSum;

static inline LossSum sum_make(const LossGrid *g, const Direction *d, int64_t steps, int64_t n) {
    double T = (double)steps, base = grid_log_moment(g, END_HIGH, d->theta), norm = 0;
    int64_t start = (int64_t)floor((d->from - T * g->first) / g->h);
    LossSum sum = {NULL,   n, T * g->first + (double)start * g->h, g->h, d->theta, T * base,
                   {0, 0}, 0};
    FftNumber *ring = (FftNumber *)checked_calloc((size_t)n, sizeof(FftNumber), "privacy losses"),
              *roots = fft_roots(n);
    for (int64_t i = 0; i < g->points; i++) {
        double half = exp((d->theta * (g->first + (double)i * g->h) - base) / 2);
        ring[i % n].re += g->mass[END_LOW][i] * half * half;
        ring[i % n].im += g->mass[END_HIGH][i] * half * half;
    }
    for (int64_t i = 0; i < n; i++) {
        norm += (double)(ring[i].re * ring[i].re + ring[i].im * ring[i].im);
    }
    fft_convolve(ring, n, steps, roots);
    free(roots);
    sum.mass = (FftNumber *)checked_malloc((size_t)n * sizeof(FftNumber), "privacy losses");
    for (int64_t k = 0; k < n; k++) {
        FftNumber m = ring[((start + k) % n + n) % n];
        sum.mass[k].re = fmaxl(m.re, 0) / (double)n;
        sum.mass[k].im = fmaxl(m.im, 0) / (double)n;
    }
    free(ring);
    double unit = (double)LDBL_EPSILON / 2, relative = 13 * unit * log2((double)n),
           grown = exp(T * relative * sqrt((double)n * norm)); // of a frequency above 1
    // 4: two sequences that share re and im, both ways
    sum.error = 4 * (T + 1) * (relative + 3 * unit) * sqrt(norm) * grown;
    sum.beyond[END_HIGH] = exp(T * (grid_log_moment(g, END_HIGH, d->theta + d->right) - base) -
                               d->right * (sum.from + (double)n * g->h));
    sum.beyond[END_LOW] =
        sum.beyond[END_HIGH] + exp(T * (grid_log_moment(g, END_LOW, d->theta - d->left) - base) +
                                   d->left * (sum.from - (double)(n / 9) * g->h));
    return sum;
}

// Where delta(epsilon) of one end, with all its bounds, falls below delta. `factor` and `infinite`:
// bounds of masses' errors and beyond the grid.
static inline double sum_epsilon(const LossSum *sum, int end, double delta, double factor,
                                 double infinite) {
    double r = exp(-sum->theta * sum->h), shrink = exp(-sum->h), rest = -expm1(-sum->h),
           square = r * r, fall = -expm1(-2 * sum->theta * sum->h);
    // The norm of the weights exp(-theta y) (1 - exp(-y)) over the grid, at most that of exp(-theta
    // y) min(1, y).
    double weights =
        sqrt(fmin(sum->h * sum->h * square * (1 + square) / (fall * fall * fall), (double)sum->n));
    int64_t start = end == END_HIGH ? sum->n - 1 : sum->n - 1 - sum->n / 9;
    double slack = (end == END_HIGH ? 1 : -1) * (sum->beyond[end] + sum->error * weights),
           above = 0, gained = 0, before = 0, unknown = end == END_HIGH ? INFINITY : 0;
    for (int64_t k = start; k >= 0; k--) {
        double x = sum->from + (double)k * sum->h;
        // sums over all y > x of tilted masses times exp(-theta (y - x)), and of these times 1 -
        // exp(x - y)
        gained = r * (shrink * gained + rest * above);
        above = (double)(end == END_HIGH ? sum->mass[k].im : sum->mass[k].re) + r * above;
        double more = gained + slack,
               value = infinite +
                       (more > 0 ? factor * exp(sum->scale - sum->theta * x + log(more)) : unknown);
        if (value > delta && k == start) { return end == END_HIGH ? INFINITY : x; }
        // between grid points delta is linear in exp(epsilon)
        if (value > delta) { return x + log1p((value - delta) / (value - before) * expm1(sum->h)); }
        if (x <= 0) { return 0; }
        before = value;
    }
    return end == END_HIGH ? sum->from : 0; // it is below the window
}

// A grid moves the tilted sum by up to about (1 + theta) T h^2. Is that little beside the window?
static inline bool direction_fits(const Direction *d, const PrivacySetting *s, double h,
                                  double share) {
    return (1 + d->theta) * (double)s->steps * h * h <= share * (d->to - d->from);
}
enum { START_BINS = 1 << 13, MOST_START_BINS = 1 << 17 };
static inline Direction direction_start(const Mixture *m, bool turned) {
    double range = loss_of(m, m->end) - loss_of(m, -m->end);
    Direction d = {turned, false, range, 0, 0, 0, 0, 0, {0, INFINITY}};
    for (int64_t bins = START_BINS; bins <= MOST_START_BINS; bins *= 4) {
        LossGrid g = grid_make(m, range / (double)bins, turned);
        direction_plan(&d, m, &g);
        grid_free(&g);
        if (direction_fits(&d, m->s, range / (double)bins, 1.0 / 64)) { break; }
    }
    return d;
}
static inline double direction_width(const Direction *d, int64_t n) {
    return fmax((d->to - d->from) * 9 / 8 / (double)n, d->range / (double)(4 * n));
}
// The grid of n points that spans the window and an eighth more, with 4 n points for one step at
// most.
static inline LossGrid direction_grid(const Direction *d, const Mixture *m, int64_t n) {
    return grid_make(m, direction_width(d, n), d->turned);
}
// Narrows the direction's interval by an FFT over n points.
static inline void direction_refine(Direction *d, const Mixture *m, int64_t n) {
    const PrivacySetting *s = m->s;
    LossGrid g = direction_grid(d, m, n);
    if (g.points < 1 << 16 || d->below) {
        double width = d->to - d->from;
        direction_plan(d, m, &g);
        if (d->to - d->from > width) {
            grid_free(&g);
            g = direction_grid(d, m, n);
        }
    }
    LossSum sum = sum_make(&g, d, s->steps, n);
    const LossErrors e = loss_errors(m, &g, d->theta);
    double high = sum_epsilon(&sum, END_HIGH, s->delta, exp(e.mass), (double)s->steps * g.infinite);
    d->below = high > 0 && high == sum.from;
    d->loss.high = fmin(d->loss.high, e.grid + high);
    d->loss.low =
        fmax(d->loss.low, -e.grid + sum_epsilon(&sum, END_LOW, s->delta, exp(-e.mass), 0));
    grid_free(&g);
    free(sum.mass);
}

enum {
    PRV_LEAST_POINTS = 1 << 12,
    PRV_MOST_POINTS = 1 << 22,
    PRV_MOST_COMPARED = 1 << 20,
    PRV_MANY_POINTS = 1 << 18
};
static const double PRV_WIDTH[2] = {5e-4, 1e-4}; // of an answer; for a comparison
// The fewest points that are of use; more than `most`: so many steps have no grid, and the moments'
// bound is all there is.
static inline int64_t prv_first_points(const Direction *d, int directions, const PrivacySetting *s,
                                       int64_t most) {
    int64_t n = PRV_LEAST_POINTS;
    for (int i = 0; i < directions; i++) {
        while (n <= most && !direction_fits(&d[i], s, direction_width(&d[i], n), 0.25)) { n *= 2; }
    }
    return n;
}
static inline PrivacyLoss prv_worse(const Direction *d, int directions) { // of both directions
    PrivacyLoss loss = d[0].loss;
    if (directions == 1) { return loss; }
    loss.low = fmax(loss.low, d[1].loss.low);
    loss.high = fmax(loss.high, d[1].loss.high);
    return loss;
}
// Finer and finer grids until the interval is narrow, or until `target` is not in it any more (NAN:
// there is none). It narrows with h^2, which tells how many points it takes. The work is bounded;
// where that ends the interval is wider, and holds epsilon all the same.
static inline PrivacyLoss prv_epsilon(const PrivacySetting *s, double target) {
    const int directions = s->replace_one || s->q == 1 ? 1 : 2; // the others are symmetric
    const bool compares = !isnan(target);
    const double width = PRV_WIDTH[compares];
    const int64_t most_points = compares ? PRV_MOST_COMPARED : PRV_MOST_POINTS;
    PrivacyLoss loss = {0, INFINITY};
    Mixture m = mixture_make(s);
    if (!(loss_of(&m, m.end) < 700)) { return loss; } // and its exponential is not finite either
    Direction d[2] = {direction_start(&m, false), direction_start(&m, true)};
    loss = prv_worse(d, directions);
    const int64_t first = prv_first_points(d, directions, s, most_points);
    for (int64_t n = first, moves = 0; n <= most_points && loss.high - loss.low > width;) {
        if (loss.high <= target || loss.low > target) { break; }
        bool moved = false;
        for (int i = 0; i < directions; i++) {
            // else the other one is worse
            if (d[i].loss.high > loss.low) {
                direction_refine(&d[i], &m, n);
                moved |= d[i].below;
            }
            loss.low = fmax(loss.low, d[i].loss.low);
        }
        loss = prv_worse(d, directions);
        if (moved && moves++ < (n < PRV_MANY_POINTS ? 20 : 2)) { continue; }
        int64_t finer = 2, most = n == first ? 16 : compares ? 4 : most_points / n;
        while (finer < most && (double)(finer * finer) * width < loss.high - loss.low) {
            finer *= 2;
        }
        n *= n < most_points ? min_i64(finer, most_points / n) : 2;
    }
    return loss;
}

// -------------------------------------------------------------------------------------------------
// Answers

static const double LEAST_SIGMA = 0.1, MOST_SIGMA = 1e4, SIGMA_STEP = 1e-4, MOST_STEPS = 1e9;

// Epsilon of a setting, by its accountant; where only a comparison with `target` is wanted (else
// NAN), no narrower than that needs.
static inline PrivacyLoss account_epsilon(const PrivacySetting *s, double target) {
    PrivacyLoss loss = {0, INFINITY};
    if (s->rdp) { loss.high = rdp_epsilon(s, NULL); }
    return s->rdp ? loss : prv_epsilon(s, target);
}

// Between a number of units that keeps epsilon and one that does not, the last that does, or one
// that is short of it by less than 1 in 10,000. A unit: SIGMA_STEP of sigma, or a step. Both ends'
// epsilons (0: not known) tell where to look; every second time it is half way.
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
            s.sigma = (double)middle * SIGMA_STEP;
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
// The smallest sigma, to 1e-4, with which the setting keeps epsilon; INFINITY: none does.
static inline double account_sigma(const PrivacySetting *s, double epsilon) {
    PrivacySetting most = *s;
    most.sigma = MOST_SIGMA;
    if (account_epsilon(&most, epsilon).high > epsilon) { return INFINITY; }
    return SIGMA_STEP * (double)account_search(*s, epsilon, true,
                                               (int64_t)(MOST_SIGMA / SIGMA_STEP),
                                               (int64_t)(LEAST_SIGMA / SIGMA_STEP) - 1);
}
// The largest number of steps, to 1 in 10,000, with which it keeps epsilon; 0: not even one does.
static inline int64_t account_steps(const PrivacySetting *s, double epsilon) {
    return account_search(*s, epsilon, false, 0, (int64_t)MOST_STEPS + 1);
}

// What --dp-account says: q, delta and two of sigma, steps, epsilon, each once, in any order, and
// perhaps windows. Ends the program on anything else.
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
// Who waits is told after account_note seconds that it may take longer. Some answers would take
// many minutes (documents of many windows): where a limit is given the program ends then. Both are
// of this processor's time, and no number depends on them. Tests take less.
static double account_note = 2;
static double account_seconds = 120; // --dp-account's limit
static struct {
    const char *question;
    double limit; // 0: none
    clock_t begin;
    bool announced;
    void (*hook)(void); // comm.h's
} account_clock;
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
        fprintf(stderr, "note: %.250s takes a while, mostly less than a minute of processor time",
                account_clock.question);
        if (account_clock.limit > 0) {
            fprintf(stderr, "; it ends after %g s", account_clock.limit);
        }
        fprintf(stderr, "\n");
    }
    if (account_clock.hook) { account_clock.hook(); }
}
static inline void account_watch(const char *question, double limit) {
    account_clock.question = question;
    account_clock.limit = limit;
    account_clock.begin = clock();
    account_clock.hook = keep_alive_hook;
    keep_alive_hook = account_in_time;
}
static inline void account_unwatch(void) { keep_alive_hook = account_clock.hook; }
// Prints what --dp-account asks for as a table, or as one JSON object.
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
    PrivacySetting s = {value[ACCOUNT_Q], *sigma, value[ACCOUNT_DELTA], steps, rdp,
                        replace_one,      windows};
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
    // as the search decided; NAN: as narrow as it gets
    PrivacyLoss loss = account_epsilon(&s, target);
    account_unwatch();
    if (!isfinite(loss.high)) {
        die(EXIT_INPUT, "ask for more sigma, more delta or fewer windows",
            "--dp-account: %.200s has no epsilon that could be told", text);
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
