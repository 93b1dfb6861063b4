// accountant_prv.h: epsilon of private steps by the distribution of their privacy losses. What a
// privacy loss is, is in accountant.h.
//
// prv: the distribution of the sum itself, by FFT (as arXiv 2106.02848). The result is an interval
// [low, high] that contains epsilon; high is claimed. delta(epsilon) can only grow if losses or
// their mass grow, or if U = exp(-L) is spread while its mean stays (the bracket is convex in U).
// The reverse changes can only lower it. So losses are moved to the grid x_i = first + i h (arXiv
// 2207.04380 for the upper end):
//     high   The mass between x_i and x_i+1 is split over both points so that the masses of P and Q
//            stay. Losses beyond the grid are infinite.
//     low    Mass on the left and right of x_i is merged into x_i: as much from the left as the
//            mass from the right can lift to x_i.
// Both are wrong by about T h^2, with opposite signs. The grid is refined until they meet. The
// masses are integrals of positive functions, so nothing cancels. They use Gauss-Legendre
// quadrature with three points, on panels so short that its error is far below ROUNDING_OF_MASS.
// The sum of T losses is a circular convolution. Before it, masses are multiplied by exp(theta x)
// (tilted; theta + 1 is the order at which Renyi's bound would convert). This puts the bulk of the
// sum where epsilon is. Errors are then relative to delta, however small delta is; an FFT without
// tilt has a floor. The interval includes bounds of these errors:
//     masses, tilt      relative errors e of each mass: a factor (1 + e)^T of delta
//     grid              rounding of a computed grid point, T times: added to epsilon
//     window            mass outside the N grid points that are kept wraps around: Chernoff's bound
//                       of its tilted mass
//     beyond the grid   MASS_BEYOND of delta: the high end counts such losses as infinite, the low
//                       end leaves them out
//     FFT               ||error||_2 <= 13 u log2(N) ||data||_2 (Higham, Accuracy and Stability,
//                       theorem 24.2; roots of unity to 7 u), times T for the power. It runs in
//                       long double, as T and a heavy tail multiply the error: u = 2^-64 on x86
// A grid of width h moves the tilted sum by about (1 + theta) T h^2. So windows are planned, and
// FFTs begun, on grids where this is small against the window. If that takes more than 2^22 points
// (epsilon is far above 1000 then), the result is Renyi's bound, from the grid of one step, with
// low end 0. Work is bounded by numbers of points, so no result depends on the time it took.
#ifndef ACCOUNTANT_PRV_H
#define ACCOUNTANT_PRV_H

#include "base/base.h"
#include "privacy/fft.h"

#include <float.h> // LDBL_EPSILON

typedef struct {
    double q, sigma, delta; // in (0, 1]; noise over clipping threshold; in (0, 1)
    int64_t steps;
    bool rdp, replace_one; // rdp: else prv; replace_one: else add-remove
    // windows of a protected document, each sampled independently; 1 for rdp
    int windows;
} PrivacySetting;

typedef struct {
    double low, high; // epsilon is in [low, high]; high may be claimed. low is 0 for rdp
} PrivacyLoss;

// -------------------------------------------------------------------------------------------------
// prv: losses of one step

// relative rounding errors: of a double; of an integral with its exponentials
static const double ROUNDING = 0x1p-53, ROUNDING_OF_MASS = 1e-12;
// share of epsilon that rounding down may take from the low end
static const double ALIGNED = 1e-5;
// share of delta that losses beyond the grid may add
static const double MASS_BEYOND = 1e-5;

// Losses of one step in bins of equal width h. The surplus of a bin is its mass of P minus exp(x_i)
// times its mass of Q. The deficit is exp(x_i+1) times its mass of Q minus its mass of P. Neither
// is negative.
typedef struct {
    double first, h;
    int64_t bins, middle;      // middle: the bin with the most mass
    double *surplus, *deficit; // [bins] of one allocation
    double below, above;       // mass of P beyond the ends
} Losses;

// P as a mixture of normal distributions: weight[j] times N(j, v).
enum { PRIVACY_MOST_WINDOWS = 1024 };
typedef struct {
    const PrivacySetting *s;
    double v, end;                           // sigma^2; outputs beyond +-end are negligible
    int parts;                               // highest j that matters between the ends
    double weight[PRIVACY_MOST_WINDOWS + 1]; // of all parts, 0 .. windows
} Mixture;

static inline double normal_above(double u) { return 0.5 * erfc(u * 0.70710678118654752); }
// Returns the mass of P above z or, with sign -1, of its mirror image below -z.
static inline double mass_beyond(const Mixture *m, double z, int sign) {
    double mass = 0;
    for (int j = 0; j <= m->s->windows; j++) {
        mass += m->weight[j] * normal_above((z - sign * j) / m->s->sigma);
    }
    return mass;
}
// Returns the density of N(0, v) at z times the sum of weight[j] |w_j(z) - w_j(anchor)|. Here
// w_j(z) = exp(j (z - j/2) / v) is the ratio of N(j, v) to N(0, v).
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
    if (more > -0.5) { return log1p(more); } // each formula where it does not cancel
    for (int j = 1; j <= m->parts; j++) { all += m->weight[j] * exp(j * (z - 0.5 * j) / m->v); }
    return log(all);
}
// Returns the privacy loss of the output z.
static inline double loss_of(const Mixture *m, double z) {
    return loss_to_nothing(m, z) - (m->s->replace_one ? loss_to_nothing(m, -z) : 0);
}

// Builds the mixture. Its weights are the probabilities of j of k. Beyond +end the mass of P is
// MASS_BEYOND of delta, and that of N(0, v) is less. A part with so high a j that it adds nothing
// to P at the end, where it adds most, adds nothing anywhere and is dropped.
static inline Mixture mixture_make(const PrivacySetting *s) {
    Mixture m = {.s = s, .v = s->sigma * s->sigma, .parts = s->windows};
    long double q = (long double)s->q, k = s->windows;
    for (int j = 0; j <= s->windows; j++) {
        long double chances = lgammal(k + 1) - lgammal(j + 1.0L) - lgammal(k - j + 1) +
                              j * logl(q) + (j < s->windows ? (k - j) * log1pl(-q) : 0);
        m.weight[j] = (double)expl(chances);
    }
    double beyond = MASS_BEYOND * s->delta / s->steps, from = 0,
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
    double most = -INFINITY, last; // ln of a part's ratio to N(0, v) at the end
    for (int j = 1; j <= s->windows; j++) {
        most = fmax(most, log(m.weight[j]) + j * (m.end - 0.5 * j) / m.v);
    }
    do {
        last = log(m.weight[m.parts]) + m.parts * (m.end - 0.5 * m.parts) / m.v;
    } while (last < most - 50 && m.parts--);
    return m;
}

// Returns the output with this loss; it is above `from`, whose loss is smaller. In closed form for
// one window, else by Newton's method between bounds.
static inline double output_of(const Mixture *m, double loss, double from) {
    double q = m->s->q, v = m->v;
    if (m->s->windows == 1 && m->s->replace_one) {
        return v * (loss / 2 + asinh((1 - q) * sinh(loss / 2) / q * exp(0.5 / v)));
    }
    if (m->s->windows == 1) {
        return 0.5 + v * (loss > -0.5 ? log1p(expm1(loss) / q) : log((exp(loss) - (1 - q)) / q));
    }
    double to = m->end, z = from, at = loss_of(m, z);
    while (loss_of(m, to) < loss) { to *= 2; } // the last bin ends beyond the end of the outputs
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

// Adds the integrals of surplus and deficit from z to z + width. They belong to the bin between the
// outputs a and b; ea and eb are the exponentials of the losses of a and b.
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

// Computes the losses of P against Q, on a grid that begins `shift` bins below the least loss. If
// `turned`, those of Q against P: losses change sign, and surplus and deficit are exchanged.
static inline Losses losses_make(const Mixture *m, double h, double shift, bool turned) {
    double end = m->end, least = loss_of(m, -end), first = least - shift * h, a = -end, most = 0;
    Losses l = {.first = first, .h = h, .bins = 1 + (int64_t)ceil((loss_of(m, end) - least) / h)};
    l.surplus = new_array(double, 2 * l.bins, "privacy losses");
    l.deficit = l.surplus + l.bins;
    for (int64_t i = 0; i < l.bins; i++) {
        double b = output_of(m, first + (i + 1) * h, a), ea = exp(fmax(first + i * h, least)),
               eb = exp(first + (i + 1) * h);
        // steep: rate at which exponents change
        double steep = (m->parts + fmax(fabs(a), fabs(b))) / m->v, gain = 0, lack = 0;
        int64_t panels = (int64_t)fmin(fmax(ceil((b - a) * steep / 0.04), 1), 1e6),
                at = turned ? l.bins - 1 - i : i;
        double width = (b - a) / panels;
        for (int64_t k = 0; k < panels; k++) {
            if ((i + k) % 1024 == 0) { keep_alive(); } // other ranks wait
            losses_add_panel(m, a + k * width, width, a, b, ea, eb, &gain, &lack);
        }
        // the first point of the grid is below the least loss: adds the surplus of the mass of Q
        // there
        if (i == 0) { gain += (gain + lack) / (eb - ea) * (ea - exp(first)); }
        l.surplus[at] = turned ? lack / eb : gain;
        l.deficit[at] = turned ? gain / exp(first + i * h) : lack;
        if (gain + lack > most) {
            most = gain + lack;
            l.middle = at;
        }
        a = b;
    }
    l.above = mass_beyond(m, a, 1);
    l.below = mass_beyond(m, end, -1);
    if (turned) {
        l.first = -(first + l.bins * h);
        l.below = normal_above(a / m->s->sigma);
        l.above = normal_above(end / m->s->sigma);
    }
    return l;
}

// For the low end: merges share[i] of bin i into its right end and the rest into its left end. At
// each grid point the deficit from the left bin must not exceed the surplus from the right bin.
// Shares are computed from both ends, so that errors shrink as masses grow. They meet in the middle
// (the bin with the most mass), where a part is left over (or, if negative, is needed twice) and is
// rounded down. Returns this part.
static inline double losses_merge(const Losses *l, double *share) {
    double lift = 0, needed = 0; // share of the next bin that may go up; share that must go down
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
// Shifts the grid until the part that is left over moves epsilon by less than ALIGNED in T steps.
// This part changes its sign from bin to bin, so a shift below one bin suffices.
static inline Losses losses_align(const Mixture *m, double h, bool turned, double **share) {
    double at[2] = {0, 1};
    double rest[2] = {0, 0};
    double shift = 0;
    for (int tries = 0, side = 0;; tries++) {
        Losses l = losses_make(m, h, shift, turned);
        *share = new_array(double, l.bins, "privacy losses");
        double left = losses_merge(&l, *share) * (l.middle % 2 ? -1 : 1),
               lost =
                   (double)m->s->steps * fabs(left) * (l.surplus[l.middle] + l.deficit[l.middle]);
        if (lost < ALIGNED || tries == 12) { return l; }
        if (tries == 0) {
            rest[0] = left;
            rest[1] = -left;
        }
        // the end that moves: regula falsi, where an end that stays twice has half the weight
        int now = (left > 0) != (rest[0] > 0);
        if (tries > 1 && now == side) { rest[!now] /= 2; }
        side = now;
        at[now] = shift;
        rest[now] = left;
        shift = (at[0] * rest[1] - at[1] * rest[0]) / (rest[1] - rest[0]);
        free(l.surplus);
        free(*share);
    }
}

// The losses of one step as masses at the grid points first + i h.
enum { END_LOW, END_HIGH };
typedef struct {
    double first, h, infinite; // infinite: mass of losses that count as infinite, for END_HIGH
    int64_t points;
    double *mass[2]; // [points] of END_LOW, END_HIGH: one allocation
} LossGrid;
static inline LossGrid grid_make(const Mixture *m, double h, bool turned) {
    double *share, part = 1 / -expm1(-h), less = exp(-h);
    Losses l = losses_align(m, h, turned, &share);
    LossGrid g = {.first = l.first, .h = h, .infinite = l.above, .points = l.bins + 1};
    g.mass[END_LOW] = new_array(double, 2 * g.points, "privacy losses");
    g.mass[END_HIGH] = g.mass[END_LOW] + g.points;
    g.mass[END_HIGH][0] = l.below;
    for (int64_t i = 0; i < l.bins; i++) {
        double up = part * l.surplus[i], down = part * less * l.deficit[i];
        g.mass[END_HIGH][i] += down;
        g.mass[END_HIGH][i + 1] += up;
        g.mass[END_LOW][i] += (1 - share[i]) * (up + down);
        g.mass[END_LOW][i + 1] += share[i] * (up + down);
    }
    free(l.surplus);
    free(share);
    return g;
}

// -------------------------------------------------------------------------------------------------
// prv: the sum of the losses of all steps

// Returns ln of the sum of masses times exp(theta x). Terms are relative to the end of the grid
// where exp(theta x) is largest. The mass there is so large that underflowing terms do not matter.
static inline double grid_log_moment(const LossGrid *g, int end, double theta) {
    const double *mass = g->mass[end];
    int64_t first = 0, last = g->points - 1;
    while (first < last && mass[first] == 0) { first++; }
    while (first < last && mass[last] == 0) { last--; }
    long double sum = 0;
    int64_t from = theta > 0 ? last : first;
    keep_alive();
    for (int64_t i = first; i <= last; i++) {
        sum += (long double)(mass[i] * exp(theta * (i - from) * g->h));
    }
    return theta * (g->first + from * g->h) + (sum > 0 ? (double)logl(sum) : -INFINITY);
}
// Objective of golden-section searches over t > 0: ln of Chernoff's bound, with parameter t, of the
// probability that the sum, tilted by theta, is at least `epsilon`. With epsilon NAN: the loss that
// the tilted sum exceeds with probability exp(-far) at most. sign -1: the same for the lower end.
static const double FAR = 16;
typedef struct {
    const LossGrid *g;
    double T, theta, base, sign, epsilon, far;
} Chernoff;
static inline double chernoff(const Chernoff *c, double t) {
    double grown = c->T * (grid_log_moment(c->g, END_HIGH, c->theta + c->sign * t) - c->base);
    return isnan(c->epsilon) ? (grown + c->far) / t : grown - t * c->epsilon;
}
// Returns the t, 0 < t <= most, that minimises chernoff(), which falls and then rises with ln t.
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

// Bounds of the errors of T steps' masses, tilted by theta: delta has a factor exp(mass), and
// `grid` is added to epsilon.
typedef struct {
    double mass, grid;
} LossErrors;
static inline LossErrors loss_errors(const Mixture *m, const LossGrid *g, double theta) {
    const double T = (double)m->s->steps;
    const double far = fmax(fabs(g->first), fabs(g->first + g->points * g->h));
    // rate at which a loss changes: times the relative error of an output, the error of its loss
    const double steep = m->parts * m->end / m->v;
    LossErrors e = {T * (ROUNDING_OF_MASS + 8 * ROUNDING * (theta * far + steep)),
                    T * 8 * ROUNDING * (far + steep + 1)};
    return e;
}
// Returns an upper bound of epsilon from one moment of the high end, without the distribution of
// the sum: Renyi's bound of order theta + 1. It uses, for all x >= 0,
//     1 - exp(-x) <= exp(theta x) theta^theta / (1 + theta)^(1 + theta).
static inline double moment_epsilon(const Mixture *m, const LossGrid *g, double theta) {
    const double T = m->s->steps, rest = m->s->delta - T * g->infinite;
    const LossErrors e = loss_errors(m, g, theta);
    if (!(rest > 0)) { return INFINITY; }
    const double most = theta * log(theta) - (1 + theta) * log1p(theta);
    const double moment = T * grid_log_moment(g, END_HIGH, theta) + e.mass;
    return fmax(0, (moment + most - log(rest)) / theta) + e.grid;
}

// How the sum of one direction (P against Q, or `turned`) is computed: tilted by exp(theta x), in
// the window `from` .. `to`. Chernoff's bounds of the mass on its left and right use theta - left
// and theta + right. None of these values has to be exact: the bounds hold for any choice.
typedef struct {
    // below: epsilon turned out to be left of the window, which then moves
    bool turned, below;
    double range, theta, left, right, from, to; // range: of one step's losses
    PrivacyLoss loss;
} Direction;

// Plans tilt and window from a grid of one step.
static inline void direction_plan(Direction *d, const Mixture *m, const LossGrid *g) {
    // limit of tilts that keeps them finite
    const double T = (double)m->s->steps, most = 1000 / (g->first + g->points * g->h);
    Chernoff c = {.g = g,
                  .T = T,
                  .base = grid_log_moment(g, END_HIGH, 0),
                  .sign = 1,
                  .epsilon = NAN,
                  .far = -log(m->s->delta)};
    d->loss.high = fmin(d->loss.high, moment_epsilon(m, g, chernoff_best(&c, most)));
    c.epsilon = d->loss.high;
    d->theta = chernoff_best(&c, most);
    Chernoff right = c;
    right.theta = d->theta;
    right.base = grid_log_moment(g, END_HIGH, d->theta);
    right.epsilon = NAN;
    right.far = FAR;
    Chernoff left = right;
    left.sign = -1;
    d->right = chernoff_best(&right, 1e9);
    d->left = chernoff_best(&left, 1e9);
    d->to = chernoff(&right, d->right);
    d->from = -chernoff(&left, d->left);
}

// The tilted masses of the sum: re of the low end, im of the high end.
typedef struct {
    FftNumber *mass; // [n] of the losses from + k h
    int64_t n;
    double from, h, theta;
    double scale; // ln of the factor of a tilted mass at loss 0
    // tilted mass outside the window; bound of the FFT's error, as the norm over all masses
    double beyond[2], error;
} LossSum;

// Computes the sum of `steps` losses by FFT, in a window of n points.
static inline LossSum sum_make(const LossGrid *g, const Direction *d, int64_t steps, int64_t n) {
    double T = steps, base = grid_log_moment(g, END_HIGH, d->theta), norm = 0;
    int64_t start = (int64_t)floor((d->from - T * g->first) / g->h);
    LossSum sum = {.n = n,
                   .from = T * g->first + start * g->h,
                   .h = g->h,
                   .theta = d->theta,
                   .scale = T * base};
    FftNumber *ring = new_array(FftNumber, n, "privacy losses"), *roots = fft_roots(n);
    for (int64_t i = 0; i < g->points; i++) {
        double half = exp((d->theta * (g->first + i * g->h) - base) / 2);
        ring[i % n].re += g->mass[END_LOW][i] * half * half;
        ring[i % n].im += g->mass[END_HIGH][i] * half * half;
    }
    for (int64_t i = 0; i < n; i++) {
        norm += (double)(ring[i].re * ring[i].re + ring[i].im * ring[i].im);
    }
    fft_convolve(ring, n, steps, roots);
    free(roots);
    sum.mass = new_array(FftNumber, n, "privacy losses");
    for (int64_t k = 0; k < n; k++) {
        FftNumber m = ring[((start + k) % n + n) % n];
        sum.mass[k].re = fmaxl(m.re, 0) / (double)n;
        sum.mass[k].im = fmaxl(m.im, 0) / (double)n;
    }
    free(ring);
    double unit = LDBL_EPSILON / 2, relative = 13 * unit * log2((double)n),
           grown = exp(T * relative * sqrt(n * norm)); // bound for a frequency above 1
    // 4: two sequences share re and im, in both transforms
    sum.error = 4 * (T + 1) * (relative + 3 * unit) * sqrt(norm) * grown;
    sum.beyond[END_HIGH] = exp(T * (grid_log_moment(g, END_HIGH, d->theta + d->right) - base) -
                               d->right * (sum.from + n * g->h));
    sum.beyond[END_LOW] =
        sum.beyond[END_HIGH] + exp(T * (grid_log_moment(g, END_LOW, d->theta - d->left) - base) +
                                   d->left * (sum.from - (n / 9) * g->h));
    return sum;
}

// Returns the epsilon at which delta(epsilon) of one end, with all its bounds, falls below delta.
// factor: bound of the errors of masses; infinite: bound of the mass beyond the grid.
static inline double sum_epsilon(const LossSum *sum, int end, double delta, double factor,
                                 double infinite) {
    double r = exp(-sum->theta * sum->h), shrink = exp(-sum->h), rest = -expm1(-sum->h),
           square = r * r, fall = -expm1(-2 * sum->theta * sum->h);
    // The norm of the weights exp(-theta y) (1 - exp(-y)) over the grid is at most that of
    // exp(-theta y) min(1, y).
    double weights =
        sqrt(fmin(sum->h * sum->h * square * (1 + square) / (fall * fall * fall), (double)sum->n));
    int64_t start = end == END_HIGH ? sum->n - 1 : sum->n - 1 - sum->n / 9;
    double slack = (end == END_HIGH ? 1 : -1) * (sum->beyond[end] + sum->error * weights),
           above = 0, gained = 0, before = 0, unknown = end == END_HIGH ? INFINITY : 0;
    for (int64_t k = start; k >= 0; k--) {
        double x = sum->from + k * sum->h;
        // above, gained: sums over all y > x of tilted masses times exp(-theta (y - x)); in gained
        // also times 1 - exp(x - y)
        gained = r * (shrink * gained + rest * above);
        above = (double)(end == END_HIGH ? sum->mass[k].im : sum->mass[k].re) + r * above;
        double more = gained + slack,
               value = infinite +
                       (more > 0 ? factor * exp(sum->scale - sum->theta * x + log(more)) : unknown);
        if (value > delta && k == start) { return end == END_HIGH ? INFINITY : x; }
        // delta is linear in exp(epsilon) between grid points
        if (value > delta) { return x + log1p((value - delta) / (value - before) * expm1(sum->h)); }
        if (x <= 0) { return 0; }
        before = value;
    }
    return end == END_HIGH ? sum->from : 0; // epsilon is below the window
}

// Returns whether the error of the grid, about (1 + theta) T h^2 in the tilted sum, is at most
// `share` of the window.
static inline bool direction_fits(const Direction *d, const PrivacySetting *s, double h,
                                  double share) {
    return (1 + d->theta) * s->steps * h * h <= share * (d->to - d->from);
}
enum { START_BINS = 1 << 13, MOST_START_BINS = 1 << 17 };
static inline Direction direction_start(const Mixture *m, bool turned) {
    double range = loss_of(m, m->end) - loss_of(m, -m->end);
    Direction d = {.turned = turned, .range = range, .loss = {0, INFINITY}};
    for (int64_t bins = START_BINS; bins <= MOST_START_BINS; bins *= 4) {
        LossGrid g = grid_make(m, range / bins, turned);
        direction_plan(&d, m, &g);
        free(g.mass[END_LOW]);
        if (direction_fits(&d, m->s, range / bins, 1.0 / 64)) { break; }
    }
    return d;
}
static inline double direction_width(const Direction *d, int64_t n) {
    return fmax((d->to - d->from) * 9 / 8 / n, d->range / (4 * n));
}
// Returns the grid whose n points span the window and an eighth more. The grid of one step has at
// most 4 n points.
static inline LossGrid direction_grid(const Direction *d, const Mixture *m, int64_t n) {
    return grid_make(m, direction_width(d, n), d->turned);
}
// Narrows the interval of a direction by an FFT over n points.
static inline void direction_refine(Direction *d, const Mixture *m, int64_t n) {
    const PrivacySetting *s = m->s;
    LossGrid g = direction_grid(d, m, n);
    if (g.points < 1 << 16 || d->below) {
        double width = d->to - d->from;
        direction_plan(d, m, &g);
        if (d->to - d->from > width) {
            free(g.mass[END_LOW]);
            g = direction_grid(d, m, n);
        }
    }
    LossSum sum = sum_make(&g, d, s->steps, n);
    const LossErrors e = loss_errors(m, &g, d->theta);
    double high = sum_epsilon(&sum, END_HIGH, s->delta, exp(e.mass), s->steps * g.infinite);
    d->below = high > 0 && high == sum.from;
    d->loss.high = fmin(d->loss.high, e.grid + high);
    d->loss.low =
        fmax(d->loss.low, -e.grid + sum_epsilon(&sum, END_LOW, s->delta, exp(-e.mass), 0));
    free(g.mass[END_LOW]);
    free(sum.mass);
}

enum {
    PRV_LEAST_POINTS = 1 << 12,
    PRV_MOST_POINTS = 1 << 22,
    PRV_MOST_COMPARED = 1 << 20,
    PRV_MANY_POINTS = 1 << 18
};
static const double PRV_WIDTH[2] = {5e-4, 1e-4}; // of the interval: for a result; a comparison
// Returns the least useful number of points. If it exceeds `most`, no grid serves so many steps,
// and the moments' bound is the result.
static inline int64_t prv_first_points(const Direction *d, int directions, const PrivacySetting *s,
                                       int64_t most) {
    int64_t n = PRV_LEAST_POINTS;
    for (int i = 0; i < directions; i++) {
        while (n <= most && !direction_fits(&d[i], s, direction_width(&d[i], n), 0.25)) { n *= 2; }
    }
    return n;
}
static inline PrivacyLoss prv_worse(const Direction *d, int directions) { // over both directions
    PrivacyLoss loss = d[0].loss;
    if (directions == 1) { return loss; }
    loss.low = fmax(loss.low, d[1].loss.low);
    loss.high = fmax(loss.high, d[1].loss.high);
    return loss;
}
// Returns the interval of epsilon. Refines grids until the interval is narrow, or excludes `target`
// (NAN: no target). The width falls with h^2, which determines the next number of points. Work is
// bounded; an interval at that bound is wider, but still contains epsilon.
static inline PrivacyLoss prv_epsilon(const PrivacySetting *s, double target) {
    const int directions = s->replace_one || s->q == 1 ? 1 : 2; // the others are symmetric
    const bool compares = !isnan(target);
    const double width = PRV_WIDTH[compares];
    const int64_t most_points = compares ? PRV_MOST_COMPARED : PRV_MOST_POINTS;
    PrivacyLoss loss = {0, INFINITY};
    Mixture m = mixture_make(s);
    if (!(loss_of(&m, m.end) < 700)) { return loss; } // beyond that, exponentials are not finite
    Direction d[2] = {direction_start(&m, false), direction_start(&m, true)};
    loss = prv_worse(d, directions);
    const int64_t first = prv_first_points(d, directions, s, most_points);
    for (int64_t n = first, moves = 0; n <= most_points && loss.high - loss.low > width;) {
        if (loss.high <= target || loss.low > target) { break; }
        bool moved = false;
        for (int i = 0; i < directions; i++) {
            // if not, the other direction is worse
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

#endif
