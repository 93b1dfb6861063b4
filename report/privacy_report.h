// privacy_report.h: what rank 0 prints and logs of the guarantee of a private run.
#ifndef PRIVACY_REPORT_H
#define PRIVACY_REPORT_H

#include "base/base.h"
#include "base/figures.h"
#include "base/files.h"
#include "base/readable.h"
#include "options.h"
#include "privacy/accountant.h"
#include "privacy/accountant_prv.h"
#include "privacy/privacy.h"

// Rounds up, since the value is claimed. A multiple of `unit` up to rounding errors stays.
static inline double privacy_up(double x, double unit) {
    return ceil(x / unit * (1 - 1e-12)) * unit;
}
// delta, rounded up to three digits
static inline double privacy_delta_up(const Privacy *p) {
    return privacy_up(p->delta, pow(10, floor(log10(p->delta)) - 2));
}
static inline void privacy_protected(const Privacy *p, char *text, size_t bytes) {
    if (p->unit == DP_SEQUENCE) {
        snprintf(text, bytes, "each window of the training data (%" PRId64 " tokens)", p->tokens);
    } else {
        snprintf(text, bytes,
                 "each document of the training data (%" PRId64 " window%s of it, of %" PRId64
                 " tokens%s)",
                 p->document, p->document > 1 ? "s at most" : "", p->tokens,
                 p->document > 1 ? " each" : "");
    }
}
static inline void privacy_print_start(FILE *to, Privacy *p) {
    char protected_text[120];
    PrivacyText t[PRIVACY_SETTINGS];
    if (!p->on || p->windows == 0) { return; }
    privacy_settings(p, t);
    privacy_protected(p, protected_text, sizeof protected_text);
    if (p->sigma >= LEAST_SIGMA) {
        print_row_to(to, "privacy",
                     "epsilon %.4f at delta %.3g after %" PRId64 " steps, for %s, %s, by %s",
                     privacy_up(privacy_epsilon(p, p->allowed).high, 1e-4), privacy_delta_up(p),
                     p->allowed, protected_text, t[9].value, p->rdp ? "rdp" : "prv");
    } else {
        print_row_to(to, "privacy", "none: noise of %g hides nothing", p->sigma);
    }
    print_row_to(to, "",
                 "sampling rate q = %.6g (Poisson): %" PRId64 " samples of %" PRId64
                 " a step on average, %" PRId64 " at most",
                 p->samples / (double)p->windows, p->samples, p->windows, p->most);
    print_row_to(to, "",
                 "gradients clipped to %s (%s, %s), noise of sigma %.6g times that on "
                 "their sum",
                 t[4].value, t[5].value, t[6].value, p->sigma);
    if (p->shown) {
        print_row_to(to, "",
                     "losses, norms and samples of private steps are shown: who sees them "
                     "knows more than epsilon says");
    }
    if (p->allowed < p->steps) {
        print_row_to(to, "",
                     "stops after step %" PRId64 " of %" PRId64 ": the next exceeds epsilon %g",
                     p->allowed, p->steps, p->target);
    }
}
// Prints the same before a run (--dry-run), or why it is not known yet.
static inline void privacy_print_plan(FILE *to, Privacy *p, const Options *o) {
    if (p->on && o->resume) {
        print_row_to(to, "privacy",
                     "sigma, q and the steps so far are those of the checkpoint in --out %s: a run "
                     "that resumes prints them, and the epsilon of all its steps",
                     o->out);
    } else if (p->on && !p->windows) {
        print_row_to(to, "privacy",
                     "epsilon, sigma and q follow from the number of windows of --train %s, which "
                     "is no file here; --dp-account q=,epsilon=,steps=,delta= answers for numbers",
                     o->train);
    } else {
        privacy_print_start(to, p);
    }
}
// Prints, at the end, the guarantee after `steps` steps, its reasons, and what it does not cover.
static inline void privacy_print_statement(FILE *to, Privacy *p, int64_t steps) {
    char protected_text[120];
    if (!p->on || p->windows == 0) { return; }
    if (p->sigma < LEAST_SIGMA) {
        print_row_to(to, "privacy", "none: %" PRId64 " steps with noise of %g, which hides nothing",
                     steps, p->sigma);
        return;
    }
    PrivacyLoss loss = privacy_epsilon(p, steps);
    privacy_protected(p, protected_text, sizeof protected_text);
    print_row_to(to, "privacy", "after %" PRId64 " steps: epsilon <= %.4f at delta %.3g, for %s",
                 steps, privacy_up(loss.high, 1e-4), privacy_delta_up(p), protected_text);
    print_row_to(to, "", "neighbours: data sets that differ by %s (%s)",
                 p->relation == DP_ADD_REMOVE ? "one that is there or not" : "another in its place",
                 p->relation == DP_ADD_REMOVE ? "add-remove" : "replace-one");
    print_row_to(to, "",
                 "each step took each window with probability %.6g (Poisson) and added noise of "
                 "%.6g clipping thresholds",
                 p->samples / (double)p->windows, p->sigma);
    if (p->rdp) { print_row_to(to, "", "accounted by rdp, an upper bound"); }
    if (!p->rdp) {
        print_row_to(to, "", "accounted by prv: the exact value is between %.6f and %.6f", loss.low,
                     privacy_up(loss.high, 1e-6));
    }
    print_row_to(to, "",
                 "not counted: other runs on this data, such as a search for hyper-parameters; "
                 "time and memory that others on the machine can watch; rounding of sums before "
                 "noise; validation data, which must not be private; copies of a sample elsewhere "
                 "in the data");
    if (p->shown) {
        print_row_to(to, "",
                     "besides, losses, norms and samples were shown (--dp-show-private): for who "
                     "saw them epsilon does not hold");
    }
}
// Adds the same to an event: at the start for the allowed steps, at the end for those taken. Adds
// nothing if the run is not private. Values that depend on training data that was not opened
// (--dry-run) are null.
static inline void json_add_privacy(TextBuffer *line, Privacy *p, int64_t steps) {
    PrivacyText t[PRIVACY_SETTINGS];
    const bool known = p->windows > 0, keyed = p->fingerprint != 0,
               found = known || p->target == 0 || p->sigma > 0;
    const double nothing = NAN;
    PrivacyLoss loss = {nothing, nothing};
    if (!p->on) { return; }
    if (known) { loss = privacy_epsilon(p, steps); }
    const Figure rows[] = {{"steps", known ? steps : nothing},
                           {"epsilon", loss.high},
                           {"low", loss.low},
                           {"high", loss.high},
                           {"delta", p->delta},
                           {"target", p->target > 0 ? p->target : nothing},
                           {"sampling_rate", known ? p->samples / (double)p->windows : nothing},
                           {"samples", (double)p->samples},
                           {"most_samples", (double)p->most},
                           {"windows", known ? p->windows : nothing},
                           {"sigma", found ? p->sigma : nothing},
                           {"clip", p->clip},
                           {"windows_per_document", (double)p->document},
                           {"window_tokens", (double)p->tokens}};
    privacy_settings(p, t);
    text_add(line, ",\"privacy\":{\"sampling\":\"poisson\",\"accountant\":\"%s\"",
             p->rdp ? "rdp" : "prv");
    json_add_figures(line, rows, LENGTH_OF(rows));
    text_add(line,
             ",\"clip_style\":\"%s\",\"clip_function\":\"%s\",\"unit\":\"%s\",\"neighbours\":\"%"
             "s\",\"key\":%s%s%s}",
             t[5].value, t[6].value, t[7].value, t[9].value, keyed ? "\"" : "",
             keyed ? t[10].value : "null", keyed ? "\"" : "");
}

#endif
