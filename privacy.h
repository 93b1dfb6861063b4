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
static const double CAP_SHARE = 1e-5;

// Samples of a step at most. windows 0: not known yet, an upper bound for memory.
static inline int64_t privacy_most_samples(int64_t samples, int64_t windows, int64_t document, double delta);

// From the flags and the training data; finds the noise of a run that does not resume. All ranks call it. Ends the program where no promise
// can be kept.
static inline Privacy privacy_plan(const Options *o, const OptionsGiven *given, int64_t windows, int64_t samples, int64_t steps, Comm *comm);

// When the weights are there: compares with the history of the checkpoint (`history` as it holds it, "" where there is no checkpoint) whose
// step this is, takes the key, counts the steps that are allowed. All ranks call it, of private runs and of others.
static inline void privacy_begin(Privacy *p, const Options *o, const OptionsGiven *given, const char *history, int64_t step, Comm *comm);

// What goes into the manifest of a checkpoint after so many steps: "none" for a run that is not private.
static inline void privacy_history(const Privacy *p, int64_t steps, char text[PRIVACY_HISTORY_MAX]);

// What so many steps give away: `high` is claimed. Rank 0 alone calls it; a number of steps is accounted once.
static inline PrivacyLoss privacy_epsilon(Privacy *p, int64_t steps);
// Steps of the whole run that may be taken: at most `steps`, fewer where the target comes first.
static inline int64_t privacy_allowed_steps(const Privacy *p) { return p->on ? p->allowed : INT64_MAX; }

// For rank 0: at start and at the end.
static inline void privacy_print_start(FILE *to, Privacy *p);
static inline void privacy_print_statement(FILE *to, Privacy *p, int64_t steps);
// Forgets the key.
static inline void privacy_end(Privacy *p);

#endif
