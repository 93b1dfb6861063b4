// fft.h: FFT of n = 2^k complex numbers, in place, in long double; and convolutions by it. The
// frequencies are in bit-reversed order, as the inverse expects.
//
// The FFT is our own, 40 lines: FFTW would be a dependency that CI has to install, and it states no
// such bound.
#ifndef FFT_H
#define FFT_H

#include "base/base.h"

typedef struct {
    long double re, im;
} FftNumber;

static inline FftNumber fft_product(FftNumber a, FftNumber b) {
    FftNumber c = {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    return c;
}
// Returns the roots of unity of all sizes up to n; those of size m are at [m / 2, m).
static inline FftNumber *fft_roots(int64_t n) {
    FftNumber *roots = new_array(FftNumber, n, "roots of unity");
    for (int64_t k = 0; k < n / 2; k++) {
        long double angle = -6.283185307179586476925286766559L * (long double)k / (long double)n;
        roots[n / 2 + k].re = cosl(angle);
        roots[n / 2 + k].im = sinl(angle);
    }
    for (int64_t i = n / 2 - 1; i > 0; i--) { roots[i] = roots[2 * i]; }
    return roots;
}
// Halves the size depth first, so that small transforms stay in the cache.
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
static inline void fft_inverse(FftNumber *a, int64_t n, const FftNumber *roots) { // result times n
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
static inline FftNumber fft_power(FftNumber a, int64_t exponent) { // exponent >= 1
    FftNumber result = {1, 0};
    for (; exponent > 1; exponent /= 2, a = fft_product(a, a)) {
        if (exponent % 2) { result = fft_product(result, a); }
    }
    return fft_product(result, a);
}
// Replaces re and im, each a real sequence, by n times the circular convolution of `times` copies
// of itself.
static inline void fft_convolve(FftNumber *a, int64_t n, int64_t times, const FftNumber *roots) {
    fft_forward(a, n, roots);
    // where j is frequency f, first + last - j is frequency -f
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

#endif
