// privacy.h: the guarantee of a private run, and how much of it the run has spent.
//
// Promise  Checkpoints and printed values do not reveal whether one window (--dp-unit document: one
//          document) was in the training data, up to epsilon and delta. Each step takes each of W
//          windows with probability q = S / W, where S is the number of samples that --batch-tokens
//          holds. It clips their gradients to R, adds noise of sigma R, and divides by S, whatever
//          number was drawn.
// Noise    --dp-noise, or found for --dp-epsilon and the run's steps. A step that would exceed
//          --dp-epsilon is not taken.
// Cap      A step takes at most `most` samples, 6.5 standard deviations or more above S. A sample
//          can decide which others exceed the cap, and that would reveal it. The probability is so
//          low that over MOST_STEPS this adds less than CAP_SHARE of delta. If W exceeds the cap,
//          this share is subtracted from delta beforehand.
// History  One line of each checkpoint's manifest: the settings of its private steps. A run resumes
//          only with the same settings. So each step is in the account, under its own rules.
// Parts    Cyclic micro-batches compute with different versions of the parameters (cyclic.h). So
//          the micro-batch of a sample (its part) is drawn too, independently of other samples: no
//          sample moves another one to another version. Each part has its own cap.
#ifndef PRIVACY_H
#define PRIVACY_H

#include "base/base.h"
#include "base/files.h"
#include "base/readable.h"
#include "comm/comm.h"
#include "comm/records.h"
#include "options.h"
#include "privacy/accountant.h"
#include "privacy/accountant_prv.h"

typedef struct {
    bool on;         // private; if false, nothing below is valid
    bool restarts;   // --resume without a checkpoint yet: from step 0 on, with the key and record
    bool rdp, shown; // --dp-accountant, --dp-show-private
    // W (0: unknown, the run trains nothing); S, the mean number of samples of a step
    int64_t windows, samples;
    // limit of a step's samples; cyclic micro-batches of a step (else 1); limit of the samples of
    // each
    int64_t most, parts, most_of_part;
    // noise in thresholds; delta; threshold R; --dp-epsilon (0: none)
    double sigma, delta, clip, target;
    // values of the options; document: windows of a document; tokens: of a window
    int64_t style, function, unit, document, relation, tokens;
    // steps of the run; those of them that keep the target
    int64_t steps, allowed;
    uint32_t key[8];
    // hashes: of the key; of the training data, and of what all ranks multiply with (the caller
    // sets these two before privacy_begin()); of flags, data and products
    uint64_t fingerprint, data, products, path;
    // what multiplied in the steps of the checkpoint ("": unknown), and does here
    // (ops_arithmetic())
    char arithmetic[2][200];
    int ledger; // descriptor of OUT/dp_steps on rank 0, or -1; its content:
    // number of steps that have drawn noise; the first step (from 0) with the last one's path
    int64_t taken, since;
    uint64_t drawn;     // path of the last step that has drawn noise
    int64_t last_steps; // arguments and result of the last privacy_epsilon()
    PrivacyLoss last_loss;
} Privacy;

enum { PRIVACY_HISTORY_MAX = 600 };
static const double CAP_SHARE = 1e-5;
// limit of CPU time for finding a run's noise or steps when it begins; tests set less
static double account_run_seconds = 600;

// Times and traffic depend on the number of drawn samples. Where they must be hidden, everything
// that a run prints, logs or writes follows these rules (docs/privacy.md):
//   figures  two digits of means over the run. That of a step's time is renewed only where twice as
//            many steps have been made (8, 16, 32, ...), so that the difference of two of them says
//            nothing of a single step; before the first of these, the predicted time stands there.
//   clocks   events and files have the time at which the program started (files_time).
//   lines    which steps are printed depends on their numbers alone.
static inline bool privacy_hides(const Privacy *p) { return p->on && !p->shown; }
static inline double privacy_rounded(double x) {
    char digits[32];
    snprintf(digits, sizeof digits, "%.1e", x); // products with powers of ten would leave more
    return strtod(digits, NULL);
}

// The time of a step that a private run publishes.
typedef struct {
    double seconds; // 0: none yet
    int64_t steps;  // it is the mean of so many
} PublicTime;
enum { PUBLIC_STEPS = 8 }; // the fewest that a mean is of
// Returns it. steps, sum_s: number and time of the steps so far; predicted_s: time of a step.
static inline double public_step_time(PublicTime *t, int64_t steps, double sum_s,
                                      double predicted_s) {
    if (steps >= max_i64(PUBLIC_STEPS, 2 * t->steps)) {
        t->seconds = privacy_rounded(sum_s / (double)steps);
        t->steps = steps;
    }
    return t->seconds > 0 ? t->seconds : privacy_rounded(predicted_s);
}

// -------------------------------------------------------------------------------------------------
// Epsilon

// Returns the limit of a step's samples if it takes `mean` on average. The tail of the Poisson
// distribution, by Chernoff's bound, is above that of the binomial distribution of any number of
// windows.
static inline int64_t privacy_most_samples(double mean, int64_t windows, int64_t document,
                                           double delta) {
    double seldom = log(CAP_SHARE * delta / MOST_STEPS);
    int64_t others = (int64_t)ceil(mean + ceil(6.5 * sqrt(mean)));
    while (others - mean - others * log(others / mean) > seldom) { others++; }
    return windows ? min_i64(others + document, windows) : others + document;
}

// Returns the setting for the accountant.
static inline PrivacySetting privacy_setting(const Privacy *p, int64_t steps) {
    // q; delta: reduced by the share of the cap, unless the cap cuts no batch
    double q = p->samples / (double)p->windows,
           delta = p->most_of_part < p->windows ? p->delta * (1 - CAP_SHARE) : p->delta;
    PrivacySetting s = {
        q, p->sigma, delta, steps, p->rdp, p->relation == DP_REPLACE_ONE, (int)p->document};
    return s;
}
// Watches how long the accountant takes, and describes for users who wait what it computes.
static inline void privacy_watch(int64_t steps, double most_s) {
    static char question[100];
    snprintf(question, sizeof question, "to account for %" PRId64 " private steps", steps);
    account_watch(question, most_s);
}

// Returns the epsilon of this many steps as an interval, of which `high` is claimed. Only rank 0
// calls it. The last result is cached.
static inline PrivacyLoss privacy_epsilon(Privacy *p, int64_t steps) {
    PrivacyLoss nothing = {0, 0}, all = {INFINITY, INFINITY};
    if (steps == 0) { return nothing; }
    if (p->sigma < LEAST_SIGMA) { return all; } // no meaningful epsilon
    if (steps != p->last_steps) {
        PrivacySetting s = privacy_setting(p, steps);
        privacy_watch(s.steps, 0);
        p->last_loss = account_epsilon(&s, NAN);
        p->last_steps = steps;
        // the search for noise or steps found a narrower interval below the target
        if (p->target > 0 && p->last_loss.high > p->target) {
            p->last_loss.high = fmin(p->last_loss.high, account_epsilon(&s, p->target).high);
        }
        account_unwatch();
    }
    return p->last_loss;
}
// Returns how many steps of the whole run may be taken, to keep the target.
static inline int64_t privacy_allowed_steps(const Privacy *p) {
    return p->on ? p->allowed : INT64_MAX;
}

// Finds the noise for the target. All ranks call it. Ends the program (EXIT_INPUT) if none
// suffices.
static inline void privacy_find_noise(Privacy *p, Comm *comm) {
    PrivacySetting s = privacy_setting(p, max_i64(p->steps, 1));
    if (comm->rank == 0) {
        privacy_watch(s.steps, account_run_seconds);
        p->sigma = account_sigma(&s, p->target);
        account_unwatch();
    }
    comm_broadcast(comm, &p->sigma, sizeof p->sigma, 0);
    if (isinf(p->sigma)) {
        die(EXIT_INPUT,
            "ask for more --dp-epsilon, or take fewer --steps or a smaller --batch-tokens",
            "no noise keeps --dp-epsilon %g over %" PRId64 " steps", p->target, p->steps);
    }
}
// Finds how many of the run's steps keep the target. All ranks call it.
static inline void privacy_find_allowed(Privacy *p, Comm *comm) {
    p->allowed = p->steps;
    if (p->target == 0 || p->steps == 0) { return; }
    PrivacySetting s = privacy_setting(p, p->steps);
    if (p->sigma < LEAST_SIGMA) {
        p->allowed = 0;
    } else if (comm->rank == 0) {
        privacy_watch(s.steps, account_run_seconds);
        if (account_epsilon(&s, p->target).high > p->target) {
            p->allowed = account_search(s, p->target, false, 0, p->steps);
        }
        account_unwatch();
    }
    comm_broadcast(comm, &p->allowed, sizeof p->allowed, 0);
}

// Refuses a delta above 1 / units, which promises nothing: a run that publishes one unit, drawn by
// chance, as it is, would keep it. units: windows or documents of the training data (--dp-unit).
static inline void privacy_check_delta(const Options *o, int64_t units) {
    if (!(o->dp_delta * (double)units > 1)) { return; }
    const Text hint = text_of("give at most %.3g, better a tenth of it, or leave --dp-delta out",
                              1.0 / (double)units);
    const char *unit = o->dp_unit == DP_DOCUMENT ? "document" : "window";
    die(EXIT_INPUT, hint.at,
        "--dp-delta %g is above 1 / units, %.3g: --train has %" PRId64 " %s%s, and a run that "
        "publishes one of them as it is would keep such a promise",
        o->dp_delta, 1.0 / (double)units, units, unit, plural(units));
}

// Plans privacy from the flags and the training data (windows 0: not opened). A run that does not
// resume gets its noise here. All ranks call it. Ends the program (EXIT_INPUT) if the guarantee
// cannot be kept.
static inline Privacy privacy_plan(const Options *o, const OptionsGiven *given, int64_t windows,
                                   int64_t samples, int64_t steps, Comm *comm) {
    Privacy p = {};
    p.ledger = -1;
    p.on = options_private(o, given);
    p.steps = p.allowed = steps;
    if (!p.on) { return p; }
    p.rdp = o->dp_accountant == DP_RDP;
    p.shown = o->dp_show_private != 0;
    p.windows = windows;
    p.samples = samples;
    p.sigma = o->dp_noise;
    p.clip = o->dp_clip;
    p.target = o->dp_epsilon;
    p.delta = o->dp_delta > 0 ? o->dp_delta : windows ? 0.1 / windows : NAN;
    p.style = o->dp_clip_style;
    p.function = o->dp_clip_function;
    p.unit = o->dp_unit;
    p.relation = o->dp_neighbours;
    p.document = o->dp_unit == DP_DOCUMENT ? o->dp_windows_per_document : 1;
    p.tokens = o->seq_len;
    p.parts = o->cyclic ? max_i64(1, o->cyclic_stages) : 1;
    const double parts = p.parts, delta = windows || o->dp_delta > 0 ? p.delta : 1e-12;
    p.most_of_part = privacy_most_samples(samples / parts, windows, p.document, delta / parts);
    p.most = p.parts * p.most_of_part;
    if (windows) { p.most = min_i64(p.most, windows); }
    if (windows == 0 && steps == 0) { return p; }
    if (samples > windows) {
        die(EXIT_INPUT, "choose a smaller --batch-tokens, or more training data",
            "a private step takes each window with probability samples / windows, at most 1: "
            "--batch-tokens stands for %" PRId64 " samples, --train has %" PRId64 " windows",
            samples, windows);
    }
    if (steps > MOST_STEPS) {
        die(EXIT_INPUT, "choose fewer --steps",
            "%" PRId64 " private steps: %g are accounted at most", steps, MOST_STEPS);
    }
    if (o->resume) { return p; }
    if (!given->at[OPTION_INDEX_dp_noise]) { privacy_find_noise(&p, comm); }
    privacy_find_allowed(&p, comm);
    if (p.allowed == 0 && steps) {
        die(EXIT_INPUT, "ask for more of either",
            "not one step with --dp-noise %g keeps --dp-epsilon %g", p.sigma, p.target);
    }
    return p;
}

// -------------------------------------------------------------------------------------------------
// History: "name=value" for each setting, then steps=; or "none"

enum { PRIVACY_SETTINGS = 11 };
typedef struct {
    const char *name, *flag;
    char value[40];
} PrivacyText;
// Writes the shortest text with this value.
static inline void privacy_text(PrivacyText *t, const char *name, const char *flag, double value) {
    t->name = name;
    t->flag = flag;
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(t->value, sizeof t->value, "%.*g", digits, value);
        if (strtod(t->value, NULL) == value) { return; }
    }
}
static inline void privacy_pick(PrivacyText *t, const char *name, int index, int64_t value) {
    const OptionSpec *spec = &option_specs[index];
    t->name = name;
    t->flag = spec->name;
    option_choice_text(spec, value, t->value, sizeof t->value);
}
static inline void privacy_settings(const Privacy *p, PrivacyText t[PRIVACY_SETTINGS]) {
    privacy_text(&t[0], "windows", "train", p->windows);
    privacy_text(&t[1], "samples", "batch-tokens", p->samples);
    privacy_text(&t[2], "sigma", "dp-noise", p->sigma);
    privacy_text(&t[3], "delta", "dp-delta", p->delta);
    privacy_text(&t[4], "clip", "dp-clip", p->clip);
    privacy_pick(&t[5], "style", OPTION_INDEX_dp_clip_style, p->style);
    privacy_pick(&t[6], "function", OPTION_INDEX_dp_clip_function, p->function);
    privacy_pick(&t[7], "unit", OPTION_INDEX_dp_unit, p->unit);
    privacy_text(&t[8], "windows_per_document", "dp-windows-per-document", p->document);
    privacy_pick(&t[9], "neighbours", OPTION_INDEX_dp_neighbours, p->relation);
    t[10].name = "key";
    t[10].flag = "dp-key";
    snprintf(t[10].value, sizeof t[10].value, "%016" PRIx64, p->fingerprint);
}
// Writes the history line for the manifest of a checkpoint after `steps` steps.
static inline void privacy_history(const Privacy *p, int64_t steps,
                                   char text[PRIVACY_HISTORY_MAX]) {
    PrivacyText t[PRIVACY_SETTINGS];
    size_t n = 0;
    snprintf(text, PRIVACY_HISTORY_MAX, "none");
    if (!p->on) { return; }
    privacy_settings(p, t);
    for (int i = 0; i < PRIVACY_SETTINGS; i++) {
        n += snprintf(text + n, PRIVACY_HISTORY_MAX - n, "%s=%s ", t[i].name, t[i].value);
    }
    snprintf(text + n, PRIVACY_HISTORY_MAX - n, "steps=%" PRId64, steps);
}
// Reads the value of a name; "" if it is missing or too long.
static inline void history_value(const char *history, const char *name, char *value, size_t bytes) {
    size_t length = strlen(name);
    value[0] = 0;
    for (const char *word = history; *word; word += strcspn(word, " "), word += strspn(word, " ")) {
        size_t n = strcspn(word, " ");
        if (n <= length || strncmp(word, name, length) || word[length] != '=' ||
            n - length - 1 >= bytes) {
            continue;
        }
        snprintf(value, bytes, "%.*s", (int)(n - length - 1), word + length + 1);
    }
}

// Ends the program (EXIT_INPUT) if the checkpoint's steps were taken under other settings than this
// run's.
static inline void privacy_compare(const Privacy *p, const char *history, int64_t step) {
    const char *hint = "one account holds for one setting: give what the checkpoint has, or begin "
                       "anew in another --out without --resume";
    PrivacyText t[PRIVACY_SETTINGS];
    char value[40], steps[40];
    privacy_settings(p, t);
    for (int i = 0; i < PRIVACY_SETTINGS; i++) {
        history_value(history, t[i].name, value, sizeof value);
        if (strcmp(value, t[i].value)) {
            die(EXIT_INPUT, hint,
                "--%s with --resume: the checkpoint's private steps were taken with %s %s, and "
                "this run would take %s",
                t[i].flag, t[i].name, *value ? value : "(unknown)", t[i].value);
        }
    }
    history_value(history, "steps", value, sizeof value);
    snprintf(steps, sizeof steps, "%" PRId64, step);
    if (strcmp(value, steps)) {
        die(EXIT_INPUT, "the manifest was changed",
            "the checkpoint of step %s has a privacy history of %s steps", steps, value);
    }
}
// Checks that a private run resumes from a private one, and the reverse. Without --dp-noise the run
// keeps the noise of the checkpoint.
static inline void privacy_adopt(Privacy *p, const OptionsGiven *given, const char *history,
                                 int64_t step) {
    const char *hint = "begin anew in another --out without --resume";
    bool private_before = strcmp(history, "none") != 0;
    if (p->steps > step && private_before && !p->on) {
        die(EXIT_INPUT,
            "give the --dp-... flags again, or --model of an exported file to begin another run "
            "from it",
            "the checkpoint is of a private run: steps without privacy would undo what it "
            "promised");
    }
    if (p->steps > step && !private_before && p->on) {
        die(EXIT_INPUT, hint,
            "the checkpoint is of a run without privacy: what it has seen of the data cannot be "
            "hidden any more");
    }
    if (!p->on || !private_before || given->at[OPTION_INDEX_dp_noise]) { return; }
    char value[40], *end = value;
    history_value(history, "sigma", value, sizeof value);
    p->sigma = strtod(value, &end);
    if (end == value || *end || !(p->sigma >= LEAST_SIGMA && p->sigma <= MOST_SIGMA)) {
        die(EXIT_INPUT, hint,
            "--dp-epsilon needs noise, and the checkpoint's steps were taken with sigma %s",
            *value ? value : "(unknown)");
    }
}

#endif
