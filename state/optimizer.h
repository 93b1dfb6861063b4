// optimizer.h: the optimizers, one row each. Everything else asks the row: which states are planned
// and saved, what they cost, which kernel updates (update.h), what --optimizer and its flags take.
//
// To add an optimizer, add its row, its kernels ops_NAME and ops_NAME_host (ops.h: for the device
// and for the host), and its flags to the table in options.h. One that needs whole matrices updates
// the blocks in two parts, with Newton-Schulz between them (state/matrices.h).
//   name        as in --optimizer, and in checkpoints
//   moments     how many fp32 states it keeps for each parameter; checkpoints number them
//   cut         what a rank's part of a storage consists of: any elements, or whole matrices
//   directions  the kernel of the first part of an update in two parts; NULL: it has one part
//   others      the optimizer of the tensors that this one does not take (1-D ones, wte, wpe, if it
//               needs matrices), whose moments are among these; "" if it takes all
//   flags       the flags that it uses. Optimizers without them refuse them (option_pairs.h)
#ifndef OPTIMIZER_H
#define OPTIMIZER_H

#include "base/base.h"

typedef enum { CUT_ELEMENTS, CUT_MATRICES } OptimizerCut;
// clang-format off
//    name   moments  cut           directions            others   flags
#define OPTIMIZER_TABLE(X)                                                                         \
    X(adamw, 2,       CUT_ELEMENTS, ops_adamw_direction,  "",      "beta1 beta2 eps nesterov")     \
    X(sgd,   1,       CUT_ELEMENTS, NULL,                 "",      "momentum nesterov")            \
    X(muon,  2,       CUT_MATRICES, ops_muon_direction,   "adamw", "beta1 beta2 eps muon-lr "      \
      "muon-momentum muon-steps muon-weight-decay muon-momentum-warmup")
// clang-format on

typedef struct {
    const char *name;
    int moments;
    OptimizerCut cut;
    const char *others, *flags;
} Optimizer;
#define OPTIMIZER_ROW(NAME, COUNT, CUT, DIRECTIONS, OTHERS, FLAGS)                                 \
    {.name = #NAME, .moments = (COUNT), .cut = (CUT), .others = (OTHERS), .flags = (FLAGS)},
static const Optimizer optimizers[] = {OPTIMIZER_TABLE(OPTIMIZER_ROW)};
// The choices of --optimizer: the names, with a bar before each but the first.
#define OPTIMIZER_CHOICE(NAME, ...) "|" #NAME
#define OPTIMIZER_CHOICES (&(OPTIMIZER_TABLE(OPTIMIZER_CHOICE))[1])

enum { MOMENTS = 2 };        // most that one keeps
enum { OPTIMIZER_NAME = 8 }; // bytes of the longest name, at least

// Returns the row of an optimizer; of a name that no row has, the first one.
static inline int optimizer_named(const char *name) {
    int row = (int)(sizeof optimizers / sizeof *optimizers) - 1;
    while (row && strcmp(optimizers[row].name, name)) { row--; }
    return row;
}
static const char *const moment_names[MOMENTS] = {"m", "v"};

// Returns the optimizer of what `o` leaves to others: itself, if it takes all tensors.
static inline const Optimizer *optimizer_of_others(const Optimizer *o) {
    const Optimizer *other = optimizers;
    if (!*o->others) { return o; }
    while (strcmp(other->name, o->others)) { other++; }
    return other;
}
// Does a flag belong to another optimizer than this one?
static inline bool optimizer_lacks(const Optimizer *o, const char *flag) {
    const char *at = strstr(o->flags, flag);
    const size_t n = strlen(flag);
    return !at || (at > o->flags && at[-1] != ' ') || (at[n] && at[n] != ' ');
}
// Returns the bytes of memory that an update of one parameter reads and writes: the gradient is
// read, the master and the moments are read and written.
static inline double optimizer_update_bytes(const Optimizer *o) {
    return (double)sizeof(float) * (1 + 2 * (1 + o->moments));
}

#endif
