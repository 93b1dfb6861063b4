// privacy.h: what a private run promises, and what it has spent of it.
//
// Promise  whoever sees the checkpoints and what is printed cannot tell whether one window (--dp-unit document: one document) was in the
//          training data, but for epsilon and delta. Each step takes each of W windows with probability q = S / W, S being the samples that
//          --batch-tokens stands for; clips its gradient to R, adds noise of sigma R, and divides by S, whatever number was drawn.
// Noise    --dp-noise, or found for --dp-epsilon and the run's steps. A step that would exceed --dp-epsilon is not taken.
// Cap      a step takes `most` samples at most: 6.5 standard deviations or more above S, so seldom met that what it could add to delta (which
//          others are cut tells whether a sample was there) is below CAP_SHARE of it over 10^9 steps. This share is taken off beforehand.
// History  one line of each checkpoint's manifest: the settings under which its steps were taken. A run that resumes has the same, or does
//          not begin: no step leaves the account, and none is counted by another's rule.
// Key      of noise and samples: 32 bytes of the operating system, in OUT/dp_key, which only its owner may read. Steps that were lost
//          after a checkpoint are taken again with the same key: they draw the same samples and noise, give what they gave, and count
//          once. So resuming without the key is refused. It is never printed; checkpoints hold a fingerprint.
#ifndef PRIVACY_H
#define PRIVACY_H

#include "accountant.h" // epsilon
#include "comm.h"       // rank 0 decides, the others are told
#include "noise.h"      // keys
#include "options.h"    // --dp-...

#include <fcntl.h> // open

typedef struct {
    bool on;                                           // else nothing below counts
    bool rdp, shown;                                   // --dp-accountant, --dp-show-private
    int64_t windows, samples;                          // of the training data (W); of a step, on average (S)
    int64_t most;                                      // samples of a step at most
    double sigma, delta, clip, target;                 // noise in thresholds; delta; threshold R; --dp-epsilon, 0: there is none
    int64_t style, function, unit, document, relation; // as options have them; document: windows of one
    int64_t steps, allowed;                            // of the run; until the target is reached
    uint32_t key[8];
    uint64_t fingerprint; // of the key
    int64_t told_steps;   // the last answer
    PrivacyLoss told;
} Privacy;

enum { PRIVACY_HISTORY_MAX = 600 };
static const double CAP_SHARE = 1e-5, CAP_STEPS = 1e9, CAP_DEVIATIONS = 6.5;

// ---------------------------------------------------------------------------------------------------------------------
// The plan

// Samples of a step at most. windows 0: not known yet, an upper bound for memory. A binomial number of mean S is c or more with probability
// exp(-S h(c / S - 1)) at most, h(u) = (1 + u) ln(1 + u) - u (Chernoff).
static inline int64_t privacy_most_samples(int64_t samples, int64_t windows, double delta) {
    double S = (double)samples, wanted = log(CAP_SHARE * (delta > 0 ? delta : 1e-12) / CAP_STEPS), c = S + CAP_DEVIATIONS * sqrt(S);
    for (double u = c / S - 1; S * ((1 + u) * log1p(u) - u) < -wanted; u = c / S - 1) { c += 1 + S / 1000; }
    int64_t most = (int64_t)ceil(c);
    return windows ? min_i64(windows, most) : most;
}

static inline PrivacySetting privacy_setting(const Privacy *p, int64_t steps) {
    PrivacySetting s;
    memset(&s, 0, sizeof s);
    s.q = (double)p->samples / (double)p->windows, s.sigma = p->sigma, s.delta = p->delta * (1 - CAP_SHARE);
    s.steps = steps, s.rdp = p->rdp, s.replace_one = p->relation == DP_REPLACE_ONE, s.windows = (int)p->document;
    return s;
}

// From the flags and the training data (windows 0: they are not there, nothing is promised); finds the noise of a run that does not resume.
// All ranks call it. Ends the program where no promise can be kept.
static inline Privacy privacy_plan(const Options *o, const OptionsGiven *given, int64_t windows, int64_t samples, int64_t steps, Comm *comm) {
    Privacy p;
    memset(&p, 0, sizeof p);
    p.on = options_private(o, given);
    if (!p.on) { return p; }
    if (windows && samples > windows) {
        die(EXIT_INPUT, "use a smaller --batch-tokens or --seq-len, or more data",
            "a private step expects %" PRId64 " samples, and the training data have %" PRId64 " windows", samples, windows);
    }
    p.rdp = o->dp_accountant == DP_RDP, p.shown = o->dp_show_private;
    p.windows = windows, p.samples = samples, p.sigma = o->dp_noise, p.clip = o->dp_clip, p.target = o->dp_epsilon;
    p.delta = o->dp_delta > 0 ? o->dp_delta : windows ? 0.1 / (double)windows : 0;
    p.style = o->dp_clip_style, p.function = o->dp_clip_function, p.unit = o->dp_unit, p.relation = o->dp_neighbours;
    p.document = o->dp_unit == DP_DOCUMENT ? o->dp_windows_per_document : 1;
    p.steps = p.allowed = steps, p.most = privacy_most_samples(samples, windows, p.delta);
    if (!windows || given->at[OPTION_INDEX_dp_noise] || o->resume) { return p; }
    PrivacySetting setting = privacy_setting(&p, max_i64(steps, 1));
    if (comm->rank == 0) { p.sigma = account_sigma(&setting, p.target); }
    comm_broadcast(comm, &p.sigma, sizeof p.sigma, 0);
    if (isinf(p.sigma)) {
        die(EXIT_INPUT, "ask for more, sample less of the data in a step, or take fewer steps", "no noise keeps --dp-epsilon %g over %" PRId64 " steps",
            p.target, steps);
    }
    return p;
}

// What so many steps give away: `high` is claimed. Rank 0 alone calls it; a number of steps is accounted once.
static inline PrivacyLoss privacy_epsilon(Privacy *p, int64_t steps) {
    PrivacyLoss nothing = {0, 0}, all = {INFINITY, INFINITY};
    if (steps == 0) { return nothing; }
    if (p->sigma < LEAST_SIGMA || !p->windows) { return all; }
    PrivacySetting setting = privacy_setting(p, steps);
    if (steps != p->told_steps) { p->told = account_epsilon(&setting, (double)NAN), p->told_steps = steps; }
    return p->told;
}
// Steps of the whole run that may be taken: at most `steps`, fewer where the target comes first.
static inline int64_t privacy_allowed_steps(const Privacy *p) { return p->on ? p->allowed : INT64_MAX; }

// ---------------------------------------------------------------------------------------------------------------------
// The history

static const char *const privacy_styles[] = {"flat", "unit", "stage"}, *const privacy_functions[] = {"abadi", "automatic"};
static const char *const privacy_units[] = {"sequence", "document"}, *const privacy_relations[] = {"add-remove", "replace-one"};

// What goes into the manifest of a checkpoint after so many steps: "none" for a run that is not private.
static inline void privacy_history(const Privacy *p, int64_t steps, char text[PRIVACY_HISTORY_MAX]) {
    snprintf(text, PRIVACY_HISTORY_MAX, "none");
    if (!p->on) { return; }
    snprintf(text, PRIVACY_HISTORY_MAX,
             "steps %" PRId64 " samples %" PRId64 " windows %" PRId64 " sigma %a delta %a clip %a style %s function %s unit %s document %" PRId64
             " neighbours %s key %016" PRIx64,
             steps, p->samples, p->windows, p->sigma, p->delta, p->clip, privacy_styles[p->style], privacy_functions[p->function], privacy_units[p->unit],
             p->document, privacy_relations[p->relation], p->fingerprint);
}
// The word that follows a name in a history, "" where there is none.
static inline void privacy_history_word(const char *history, const char *name, char word[64]) {
    size_t length = strlen(name);
    *word = 0;
    for (const char *at = history; at; at = strchr(at, ' ') ? strchr(at, ' ') + 1 : NULL) {
        if (!strncmp(at, name, length) && at[length] == ' ') {
            snprintf(word, 64, "%.*s", (int)strcspn(at + length + 1, " "), at + length + 1);
            return;
        }
    }
}
// Compares what two histories say of each setting; ends the program where they differ.
static inline void privacy_compare(const char *before, const char *now) {
    static const char *const names[][2] = {{"samples", "--batch-tokens"},
                                           {"windows", "--train and --seq-len"},
                                           {"sigma", "--dp-noise"},
                                           {"delta", "--dp-delta"},
                                           {"clip", "--dp-clip"},
                                           {"style", "--dp-clip-style"},
                                           {"function", "--dp-clip-function"},
                                           {"unit", "--dp-unit"},
                                           {"document", "--dp-windows-per-document"},
                                           {"neighbours", "--dp-neighbours"},
                                           {"key", "--dp-key, or the file dp_key in --out"},
                                           {"steps", "the checkpoint"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char old_word[64], new_word[64], hint[160];
        privacy_history_word(before, names[i][0], old_word), privacy_history_word(now, names[i][0], new_word);
        bool number = !strcmp(names[i][0], "sigma") || !strcmp(names[i][0], "delta") || !strcmp(names[i][0], "clip");
        if (!strcmp(old_word, new_word)) { continue; }
        snprintf(hint, sizeof hint, "what was spent is accounted for one setting: give %s as before", names[i][1]);
        if (number) { // written in hexadecimal, to be exact
            snprintf(old_word, sizeof old_word, "%.10g", strtod(old_word, NULL)), snprintf(new_word, sizeof new_word, "%.10g", strtod(new_word, NULL));
        }
        die(EXIT_INPUT, hint, "this private run has %s %s, its checkpoint %s", names[i][0], new_word, *old_word ? old_word : "does not say");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The key. Rank 0 has the file.

static inline void privacy_key_read(Privacy *p, const char *path) {
    char hex[66] = "";
    FILE *f = fopen(path, "r");
    bool good = f && fgets(hex, sizeof hex, f);
    if (f) { fclose(f); }
    hex[strcspn(hex, "\n")] = 0;
    good = good && noise_key_from_hex(p->key, hex);
    noise_wipe(hex, sizeof hex);
    if (!good) {
        die(EXIT_INPUT, "restore the file: with another key the steps after the checkpoint would be drawn anew, and count twice",
            "cannot read the private run's key from %s: %s", path, f ? "it is no key of 64 hexadecimal digits" : strerror(errno));
    }
}
static inline void privacy_key_write(const Privacy *p, const char *out, const char *path) {
    char hex[66], temporary[1110];
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    unlink(temporary);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    noise_key_to_hex(hex, p->key);
    hex[64] = '\n';
    bool good = fd >= 0 && write(fd, hex, 65) == 65 && !fsync(fd);
    if (fd >= 0) { close(fd); }
    noise_wipe(hex, sizeof hex);
    if (!good || rename(temporary, path)) {
        die(EXIT_RESOURCES, "--out must be writable", "cannot write the private run's key into %s: %s", out, strerror(errno));
    }
}
static inline void privacy_take_key(Privacy *p, const Options *o, bool resumes, Comm *comm) {
    char path[1100];
    snprintf(path, sizeof path, "%s/dp_key", o->out);
    if (comm->rank == 0 && *o->dp_key) {
        fprintf(stderr, "warning: --dp-key is for tests: who can read the command line knows the noise\n");
        noise_key_from_hex(p->key, o->dp_key);
    } else if (comm->rank == 0 && resumes) {
        privacy_key_read(p, path);
    } else if (comm->rank == 0) {
        noise_key_make(p->key);
        if (*o->out) { privacy_key_write(p, o->out, path); }
    }
    comm_broadcast(comm, p->key, sizeof p->key, 0);
    p->fingerprint = noise_fingerprint(p->key);
}

// When the weights are there: compares with the history of the checkpoint (`history` as it holds it, "" where there is no checkpoint) whose
// step this is, takes the key, counts the steps that are allowed. All ranks call it, of private runs and of others.
static inline void privacy_begin(Privacy *p, const Options *o, const OptionsGiven *given, const char *history, int64_t step, Comm *comm) {
    bool resumes = *history != 0, was_private = resumes && strcmp(history, "none") != 0;
    if (resumes && was_private != p->on) {
        die(EXIT_INPUT, "an --export of the weights can go on otherwise, as --model", "the checkpoint is of a run that is %s, and this one is %s",
            was_private ? "private" : "not private", p->on ? "private" : "not");
    }
    if (!p->on) { return; }
    if (comm->rank == 0 && given->at[OPTION_INDEX_dp_noise] && o->dp_noise < LEAST_SIGMA) {
        fprintf(stderr, "warning: --dp-noise %g: nothing is private\n", o->dp_noise);
    }
    privacy_take_key(p, o, was_private, comm);
    if (was_private) {
        char word[64], now[PRIVACY_HISTORY_MAX];
        privacy_history_word(history, "sigma", word);
        if (!given->at[OPTION_INDEX_dp_noise]) { p->sigma = strtod(word, NULL); }
        privacy_history(p, step, now);
        privacy_compare(history, now);
    }
    if (comm->rank == 0 && p->target > 0 && privacy_epsilon(p, p->steps).high > p->target) {
        PrivacySetting setting = privacy_setting(p, 0);
        p->allowed = p->sigma < LEAST_SIGMA ? 0 : min_i64(p->steps, account_steps(&setting, p->target));
    }
    comm_broadcast(comm, &p->allowed, sizeof p->allowed, 0);
}
// Forgets the key.
static inline void privacy_end(Privacy *p) { noise_wipe(p->key, sizeof p->key); }

// ---------------------------------------------------------------------------------------------------------------------
// What rank 0 says of it

static inline void privacy_print_unit(FILE *to, const Privacy *p) {
    if (p->unit == DP_SEQUENCE) {
        fprintf(to, "one window of the training data");
    } else {
        fprintf(to, "one document, of %" PRId64 " windows at most", p->document);
    }
    fprintf(to, p->relation == DP_REPLACE_ONE ? ", another in its place" : ", there or not");
}
static inline void privacy_print_epsilon(FILE *to, Privacy *p, int64_t steps) {
    double epsilon = privacy_epsilon(p, steps).high;
    if (isfinite(epsilon)) {
        fprintf(to, "epsilon %.4f at delta %g", epsilon, p->delta);
    } else {
        fprintf(to, "no epsilon: nothing is private");
    }
}
static inline void privacy_print_start(FILE *to, Privacy *p) {
    fprintf(to, "privacy    of "), privacy_print_unit(to, p);
    fprintf(to, "; each step takes each of %" PRId64 " windows with probability %.4g: %" PRId64 " on average, %" PRId64 " at most\n", p->windows,
            (double)p->samples / (double)p->windows, p->samples, p->most);
    fprintf(to, "           gradients clipped to %g (%s, %s), noise of %.4f times that; after %" PRId64 " steps ", p->clip, privacy_styles[p->style],
            privacy_functions[p->function], p->sigma, p->allowed);
    privacy_print_epsilon(to, p, p->allowed);
    fprintf(to, "\n");
    if (p->allowed < p->steps) { fprintf(to, "           the run stops there: another step would exceed --dp-epsilon %g\n", p->target); }
    if (p->shown) { fprintf(to, "           losses, norms and samples of private steps are shown: who sees them knows more than epsilon says\n"); }
}
static inline void privacy_print_statement(FILE *to, Privacy *p, int64_t steps) {
    if (!p->on) { return; }
    fprintf(to, "privacy of this run: "), privacy_print_epsilon(to, p, steps);
    fprintf(to, "\n  unit        "), privacy_print_unit(to, p);
    fprintf(to, "\n  mechanism   %" PRId64 " steps, Poisson sampling with probability %.6g, noise of %.4f clipping thresholds\n", steps,
            (double)p->samples / (double)p->windows, p->sigma);
    fprintf(to, "  accountant  %s\n", p->rdp ? "Renyi divergences" : "privacy loss distribution, the upper end of a certified interval");
    fprintf(to, "  left out    runs that chose hyper-parameters on these data, time and memory as a side channel, validation on private data\n");
}

#endif
