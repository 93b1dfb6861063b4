// base.h: what all other files need: ending with a message and an exit code, element types,
// counter-based random numbers, exact sums, checksums, clocks, checked integers.
//
// Failure rules (for the whole program): a user's mistake, a bad file or a lack of resources ends
// in die(). Its message goes to stderr, once, and has rank, host, file:line, what was expected,
// what was found, and a hint. assert() is for programmer errors only.
#ifndef BASE_H
#define BASE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE // binding to cores, memrchr; before the first system header
#endif

#include <assert.h>   // programmer errors
#include <errno.h>    // strerror in messages
#include <inttypes.h> // PRId64
#include <stddef.h>   // offsetof
#include <math.h>     // Box-Muller
#include <signal.h>   // how other ranks end this one
#include <stdarg.h>   // die(...)
#include <stdbool.h>  // bool in C11
#include <stdint.h>   // fixed widths for file formats
#include <stdio.h>    // messages
#include <stdlib.h>   // exit, malloc
#include <string.h>   // memcpy
#include <time.h>     // clock_gettime
#include <unistd.h>   // gethostname

// -------------------------------------------------------------------------------------------------
// Exit codes: a fixed interface for scripts.
enum { EXIT_DONE = 0, EXIT_INPUT = 2, EXIT_RESOURCES = 3, EXIT_PEER = 4 };

// The rank that messages name. comm.h sets it as soon as MPI runs; from then on `abort_job` ends
// all ranks, so that none waits for a rank that has ended. Most mistakes are found by all ranks at
// once, so rank 0 reports first and the others wait before they do.
typedef struct {
    int rank, ranks;
    void (*abort_job)(int code); // NULL before the job has started
    const char *place;           // begin of messages: the line of a file that is being read
} Speaker;
static Speaker speaker = {.rank = 0, .ranks = 1, .abort_job = NULL, .place = ""};

// Replaces what could drive a terminal: a message may have the name of a file. U+0080 to U+009F
// (0xc2 and one byte) are control characters, too.
static inline void show_plainly(char *text) {
    for (unsigned char *c = (unsigned char *)text; *c; c++) {
        const bool wide = c[0] == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0;
        if (wide || *c < ' ' || *c == 127) { *c = '?'; }
        if (wide) { c[1] = '?'; }
    }
}

// Prints a message with an optional hint, and ends all ranks with the exit code `code`.
#define die(code, hint, ...) die_at(__FILE__, __LINE__, (code), (hint), __VA_ARGS__)
__attribute__((noreturn, format(printf, 5, 6))) static inline void
die_at(const char *file, int line, int code, const char *hint, const char *format, ...) {
    // if rank 0, or else a rank before this one, found the same, it ends this rank meanwhile: by a
    // SIGTERM, for which a run that could still stop gracefully has a handler
    signal(SIGTERM, SIG_DFL);
    if (speaker.rank) { usleep(1250000 + 250000 * (speaker.rank < 9 ? speaker.rank : 9)); }
    char host[64] = "?";
    gethostname(host, sizeof host - 1);
    char message[2048], advice[1800];
    va_list args;
    va_start(args, format);
    const int n = snprintf(message, sizeof message, "%s", speaker.place);
    vsnprintf(message + n, sizeof message - (size_t)n, format, args);
    va_end(args);
    snprintf(advice, sizeof advice, "%s", hint ? hint : "");
    show_plainly(message);
    show_plainly(advice);
    const char *name = strrchr(file, '/') ? strrchr(file, '/') + 1 : file;
    fflush(stdout);
    if (speaker.abort_job) { usleep(100000); } // mpirun may bring both streams in another order
    fprintf(stderr, "train_gpt: rank %d on %s, %s:%d: %s%s%s\n", speaker.rank, host, name, line,
            message, *advice ? "\n  hint: " : "", advice);
    fflush(stderr);
    if (speaker.abort_job) { speaker.abort_job(code); }
    _exit(code); // not exit(): MPI's exit handlers may wait for peers that are gone
}

// Switches of the environment that change what a run computes or sends, so that they must be the
// same on all ranks (comm.h: comm_agree_environment).
typedef enum {
    ENVIRONMENT_NCCL_SHARED,
    ENVIRONMENT_OWN_ATTENTION,
    ENVIRONMENT_LIBRARY_PRODUCTS,
    ENVIRONMENT_UNTIMED, // measures nothing at start (plan/rates.h)
    ENVIRONMENT_SWITCHES
} Switch;
static const char *const environment_names[] = {"TRAIN_GPT_NCCL_SHARED", "TRAIN_GPT_OWN_ATTENTION",
                                                "TRAIN_GPT_LIBRARY_PRODUCTS", "TRAIN_GPT_UNTIMED"};
// Returns whether a switch is on: it is set, and not to 0.
static inline bool environment_asks(Switch which) {
    const char *text = getenv(environment_names[which]);
    return text && *text && strcmp(text, "0");
}

// Long loops outside of operations (reading, checking, writing files) call this now and then.
// Messages then advance, and other ranks see that this rank is alive. comm.h sets the hook.
static void (*keep_alive_hook)(void) = NULL;
static inline void keep_alive(void) {
    if (keep_alive_hook) { keep_alive_hook(); }
}

// Text assembled where snprintf is not allowed: in a signal handler.
typedef struct {
    char text[400];
    size_t length;
} SignalText;
static inline void signal_text_add(SignalText *t, const char *s) {
    while (*s && t->length < sizeof t->text - 1) { t->text[t->length++] = *s++; }
    t->text[t->length] = 0;
}
static inline void signal_text_add_int(SignalText *t, int64_t n) {
    char digits[24];
    int at = 23;
    digits[at] = 0;
    for (uint64_t rest = n < 0 ? -(uint64_t)n : (uint64_t)n; rest || at == 23; rest /= 10) {
        digits[--at] = (char)('0' + rest % 10);
    }
    if (n < 0) { digits[--at] = '-'; }
    signal_text_add(t, digits + at);
}
// Adds a text with %s, %d and PRId64, as printf would.
__attribute__((format(printf, 2, 3))) static inline void
signal_text_print(SignalText *t, const char *format, ...) {
    va_list values;
    va_start(values, format);
    for (const char *at = format; *at; at++) {
        char c[2] = {*at, 0};
        if (*at != '%') {
            signal_text_add(t, c);
        } else if (*++at == 's') {
            signal_text_add(t, va_arg(values, const char *));
        } else if (*at == 'd') {
            signal_text_add_int(t, va_arg(values, int));
        } else {
            signal_text_add_int(t, va_arg(values, int64_t));
            at += strlen(PRId64) - 1;
        }
    }
    va_end(values);
}
// Writes the text to stderr. A failure is ignored.
static inline void signal_text_write(const SignalText *t) {
    ssize_t written = write(STDERR_FILENO, t->text, t->length);
    (void)written;
}

#define LENGTH_OF(array) (int)(sizeof(array) / sizeof((array)[0]))

// calloc that ends the program (EXIT_RESOURCES) on failure. what: for the message.
static inline void *checked_calloc(size_t count, size_t size, const char *what) {
    void *p = calloc(count ? count : 1, size ? size : 1);
    if (!p) {
        die(EXIT_RESOURCES, "use a smaller model, micro-batch or sequence",
            "cannot allocate %zu x %zu bytes for %s", count, size, what);
    }
    return p;
}
static inline void *checked_malloc(size_t bytes, const char *what) {
    return checked_calloc(bytes, 1, what);
}
// Returns a new array of `count` elements of a type, all zero; free() frees it.
#define new_array(type, count, what) ((type *)checked_calloc((size_t)(count), sizeof(type), (what)))

// Returns an array with another number of elements; new ones are not set.
static inline void *checked_resize(void *array, int64_t count, size_t size, const char *what) {
    void *resized = realloc(array, (size_t)count * size);
    if (!resized) {
        die(EXIT_RESOURCES, NULL, "cannot allocate %" PRId64 " x %zu bytes for %s", count, size,
            what);
    }
    return resized;
}
#define resize_array(type, array, count, what)                                                     \
    ((type *)checked_resize(array, count, sizeof(type), what))

// Returns an array with space for one more element: the same, or a copy of twice the capacity if it
// is full.
static inline void *checked_grow(void *array, int64_t count, int64_t *capacity, size_t size,
                                 const char *what) {
    if (count < *capacity) { return array; }
    *capacity = *capacity ? 2 * *capacity : 16;
    return checked_resize(array, *capacity, size, what);
}
#define grow_array(type, array, count, capacity, what)                                             \
    ((type *)checked_grow(array, count, capacity, sizeof(type), what))

static inline void free_pointers(void *const *pointers, size_t count) {
    for (size_t i = 0; i < count; i++) { free(pointers[i]); }
}
// Frees each of these pointers.
#define free_all(...)                                                                              \
    do {                                                                                           \
        void *const pointers_[] = {__VA_ARGS__};                                                   \
        free_pointers(pointers_, sizeof pointers_ / sizeof *pointers_);                            \
    } while (0)

#ifdef __CUDACC__
#define IN_KERNELS_TOO __host__ __device__
#else
#define IN_KERNELS_TOO
#endif

// -------------------------------------------------------------------------------------------------
// Element types of stored and sent data. Accumulation is always fp32, norms are fp64.
typedef enum { DTYPE_FP32, DTYPE_BF16 } DType;
static inline size_t dtype_size(DType dtype) { return dtype == DTYPE_BF16 ? 2 : 4; }
static inline const char *dtype_name(DType dtype) { return dtype == DTYPE_BF16 ? "bf16" : "fp32"; }

// bf16 is the upper half of an fp32. Rounding is to nearest even unless stated otherwise, and a NaN
// stays a NaN.
IN_KERNELS_TOO static inline float bf16_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
// For numbers that are known not to be NaN. Loops with it are faster.
IN_KERNELS_TOO static inline uint16_t number_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
IN_KERNELS_TOO static inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)((bits >> 16) | 0x40u)
                                              : number_to_bf16(x);
}

// Returns the index of the first number that is NaN or infinite, or n.
static inline int64_t first_not_finite(const float *x, int64_t n) {
    enum { BLOCK = 1024 };
    const uint32_t exponent = 0x7f800000u;
    int64_t at = 0;
    for (; at + BLOCK <= n; at += BLOCK) { // no branch: the compiler makes vectors of it
        uint32_t found = 0;
        for (int i = 0; i < BLOCK; i++) {
            uint32_t bits;
            memcpy(&bits, &x[at + i], 4);
            found |= (bits & exponent) == exponent;
        }
        if (found) { break; }
    }
    while (at < n && isfinite(x[at])) { at++; }
    return at;
}

// -------------------------------------------------------------------------------------------------
// Small arithmetic
static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
// fmin and fmax, of numbers, without a call
static inline double min_f64(double a, double b) { return a < b ? a : b; }
static inline double max_f64(double a, double b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Returns where part `index` of `parts` contiguous, nearly equal parts of n things begins (index =
// parts: the end).
static inline int64_t part_begin(int64_t n, int64_t parts, int64_t index) {
    return n * index / parts;
}

static inline double seconds_now(void) { // monotonic: the wall clock may jump
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// -------------------------------------------------------------------------------------------------
// Counter-based random numbers. A value is a function of (seed, stream, index) alone, never of the
// rank, the layout or earlier draws. The mixer is splitmix64's finaliser (Steele et al. 2014),
// applied once for each input word.
IN_KERNELS_TOO static inline uint64_t mix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
static inline uint64_t random_u64(uint64_t seed, uint64_t stream, uint64_t index) {
    return mix64(mix64(mix64(seed) ^ stream) ^ index);
}
static inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) { // in [0, 1)
    return (random_u64(seed, stream, index) >> 11) * 0x1p-53;
}
// Two independent normal numbers (Box-Muller), from the uniform numbers 2*pair and 2*pair + 1 of
// the stream.
static inline void random_normal_pair(uint64_t seed, uint64_t stream, uint64_t pair,
                                      double out[2]) {
    double radius = sqrt(-2.0 * log(1.0 - random_uniform(seed, stream, 2 * pair)));
    double angle = 6.283185307179586 * random_uniform(seed, stream, 2 * pair + 1);
    out[0] = radius * cos(angle);
    out[1] = radius * sin(angle);
}
// Two independent uniform numbers with mean 0 and standard deviation 1.
static inline void random_uniform_pair(uint64_t seed, uint64_t stream, uint64_t pair,
                                       double out[2]) {
    for (int i = 0; i < 2; i++) {
        out[i] = sqrt(12.0) * (random_uniform(seed, stream, 2 * pair + i) - 0.5);
    }
}

// How elements first, first + 1, ... of a storage are rounded to bf16: to nearest even, or
// stochastically. Stochastic rounding rounds up with the probability that makes its mean exact, so
// that updates below the precision of bf16 still accumulate. docs/formats.md has the formula of a
// draw.
typedef struct {
    bool stochastic;
    uint64_t key;  // function of (seed, version, storage)
    int64_t first; // index in the whole storage, whichever rank owns the slice
} Rounding;
static inline Rounding round_to_nearest(void) {
    Rounding r = {false, 0, 0};
    return r;
}
static inline Rounding rounding_stochastic(uint64_t seed, int64_t version, int storage,
                                           int64_t first) {
    const uint64_t ROUNDING_STREAM = 0x726f756e64696e67u; // "rounding"
    const uint64_t of_version = random_u64(seed, ROUNDING_STREAM, version);
    Rounding r = {true, mix64(of_version ^ mix64((uint64_t)storage)), first};
    return r;
}
// 16 uniform bits. The element is mixed before it is combined with the key: with key ^ element
// alone, keys that differ in few bits would give the same draws to permuted elements.
IN_KERNELS_TOO static inline uint32_t rounding_draw(Rounding r, int64_t i) {
    return (uint32_t)(mix64(r.key ^ mix64(r.first + i)) >> 48);
}
IN_KERNELS_TOO static inline uint16_t round_stochastic(float x, Rounding r, int64_t i) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return finite ? (uint16_t)((bits + rounding_draw(r, i)) >> 16) : float_to_bf16(x);
}

// -------------------------------------------------------------------------------------------------
// An exact sum of doubles >= 0: a fixed-point number wide enough for every such double. So the sum
// does not depend on the order of the terms or on the rank that added them. limb[i] counts units of
// 2^(32 i - EXACT_POINT). Carries are deferred: exact_carry() must run at least once in 2^30 terms.
enum { EXACT_POINT = 1088, EXACT_LIMBS = (EXACT_POINT + 1024) / 32 + 2 };
typedef struct {
    int64_t limb[EXACT_LIMBS];
    int64_t strange; // terms that are infinite or NaN
} ExactSum;
// The parts of one term, for the three limbs from limb[first] on. first is -1 if the term is
// infinite or NaN.
typedef struct {
    int first;
    int64_t part[3];
} ExactTerm;
IN_KERNELS_TOO static inline ExactTerm exact_term(double x) {
    ExactTerm term = {-1, {0, 0, 0}};
    uint64_t bits;
    memcpy(&bits, &x, 8);
    const uint64_t exponent = bits >> 52 & 0x7ff;
    const uint64_t mantissa = (bits & 0xfffffffffffffu) | (uint64_t)(exponent > 0) << 52;
    if (exponent == 0x7ff) { return term; }
    const uint64_t place = (exponent ? exponent : 1) + EXACT_POINT - 1075;
    const uint64_t low = (mantissa & 0xffffffffu) << place % 32;
    const uint64_t high = (mantissa >> 32) << place % 32;
    term.first = (int)(place / 32);
    term.part[0] = low & 0xffffffffu;
    term.part[1] = (int64_t)((low >> 32) + (high & 0xffffffffu));
    term.part[2] = (int64_t)(high >> 32);
    return term;
}
static inline void exact_add(ExactSum *sum, double x) {
    const ExactTerm term = exact_term(x);
    if (term.first < 0) {
        sum->strange++;
        return;
    }
    for (int i = 0; i < 3; i++) { sum->limb[term.first + i] += term.part[i]; }
}
// Propagates carries. Each limb but the highest is then below 2^32, and 2^30 more terms may be
// added.
IN_KERNELS_TOO static inline void exact_carry(ExactSum *sum) {
    for (int i = 0; i + 1 < EXACT_LIMBS; i++) {
        sum->limb[i + 1] += sum->limb[i] >> 32;
        sum->limb[i] &= 0xffffffff;
    }
}
// Adds another sum.
static inline void exact_join(ExactSum *sum, const ExactSum *other) {
    ExactSum carried = *other;
    exact_carry(&carried);
    exact_carry(sum);
    for (int i = 0; i < EXACT_LIMBS; i++) { sum->limb[i] += carried.limb[i]; }
    sum->strange += other->strange;
}
// Returns the value of the three highest limbs; NaN if a term was infinite or NaN.
IN_KERNELS_TOO static inline double exact_value(ExactSum sum) {
    int top = 0;
    exact_carry(&sum);
    for (int i = 0; i < EXACT_LIMBS; i++) { top = sum.limb[i] ? i : top; }
    double value = 0;
    for (int i = top; i >= 0 && i > top - 3; i--) {
        value += ldexp((double)sum.limb[i], 32 * i - EXACT_POINT);
    }
    return sum.strange ? NAN : value;
}

// -------------------------------------------------------------------------------------------------
// Writes bytes as hexadecimal digits, two for each. `hex` has space for 2 n + 1 characters.
static inline void bytes_to_hex(char *hex, const unsigned char *bytes, size_t n) {
    for (size_t i = 0; i < n; i++) { snprintf(hex + 2 * i, 3, "%02x", bytes[i]); }
}
// Reads 2 n hexadecimal digits. Returns false if the text does not begin with them; nothing after
// the first other character is read.
static inline bool bytes_from_hex(unsigned char *bytes, const char *hex, size_t n) {
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    memset(bytes, 0, n);
    for (size_t i = 0; i < 2 * n; i++) {
        const char *digit = hex[i] ? strchr(digits, hex[i]) : NULL;
        if (!digit) { return false; }
        bytes[i / 2] = (unsigned char)(bytes[i / 2] << 4 | (digit - digits) % 16);
    }
    return true;
}

// -------------------------------------------------------------------------------------------------
// Checksum of files: four independent multiply-rotate lanes over 8-byte words (xxHash64's round).
// It runs at memory speed and is not cryptographic. Data may be added in any number of pieces; only
// their concatenation matters.
typedef struct {
    uint64_t lane[4], length;
    unsigned char tail[32];
} Checksum;
static inline uint64_t checksum_round(uint64_t lane, uint64_t word) {
    lane += word * 0xc2b2ae3d27d4eb4fu;
    lane = (lane << 31) | (lane >> 33);
    return lane * 0x9e3779b185ebca87u;
}
static inline Checksum checksum_begin(void) {
    Checksum c = {};
    for (int i = 0; i < 4; i++) { c.lane[i] = mix64(i); }
    return c;
}
static inline void checksum_block(Checksum *c, const unsigned char *p) { // 32 bytes
    for (int i = 0; i < 4; i++) {
        uint64_t word;
        memcpy(&word, p + 8 * i, 8);
        c->lane[i] = checksum_round(c->lane[i], word);
    }
}
static inline void checksum_add(Checksum *c, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    size_t held = c->length % 32;
    c->length += bytes;
    if (held) {
        size_t take = bytes < 32 - held ? bytes : 32 - held;
        memcpy(c->tail + held, p, take);
        p += take;
        bytes -= take;
        if (held + take < 32) { return; }
        checksum_block(c, c->tail);
    }
    for (; bytes >= 32; p += 32, bytes -= 32) { checksum_block(c, p); }
    if (bytes) { memcpy(c->tail, p, bytes); }
}
static inline uint64_t checksum_end(const Checksum *c) {
    uint64_t h = mix64(c->length);
    for (int i = 0; i < 4; i++) { h = checksum_round(h, c->lane[i]); }
    for (size_t i = 0; i < c->length % 32; i++) { h = checksum_round(h, c->tail[i]); }
    return mix64(h);
}

#endif
