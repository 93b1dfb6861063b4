// matmul_choices.h: which algorithm of the GPU's library computes each matrix product of a run. An
// algorithm decides the order of a sum, and so the last bits of a result. Therefore rank 0 times
// the algorithms for all ranks before the first step, and a resumed run uses the choices in its
// checkpoint. Two runs may choose differently; with --autotune 0 neither chooses. On a CPU there is
// no choice, and these functions do nothing.
#ifndef MATMUL_CHOICES_H
#define MATMUL_CHOICES_H

#include "base/base.h"
#include "base/readable.h"
#include "checkpoint/checkpoint.h"
#include "comm/comm.h"
#include "comm/records.h"
#include "executor/activations.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "options.h"
#include "plan/unit_times.h"

// Collects the products that any rank uses, each once. All ranks call it and get the same list.
static inline void matmuls_of_all_ranks(Comm *comm, const MatmulChoices *mine, MatmulChoices *all) {
    all->count = 0;
    for (int rank = 0; rank < comm->ranks; rank++) {
        MatmulChoices seen = *mine;
        comm_broadcast(comm, &seen, sizeof seen, rank);
        for (int i = 0; i < seen.count && all->count < MATMUL_CHOICES; i++) {
            bool known = false;
            for (int k = 0; k < all->count && !known; k++) {
                known = !memcmp(&seen.choice[i], &all->choice[k], sizeof(MatmulChoice));
            }
            if (!known) { all->choice[all->count++] = seen.choice[i]; }
        }
    }
}
// Reads the choices of the newest checkpoint of `out`, if they are for the same device and library.
// All ranks call it and get those that rank 0 finds.
static inline void matmuls_of_checkpoint(const Options *o, Comm *comm, const char *library,
                                         MatmulChoices *choices) {
    choices->count = 0;
    if (comm->rank == 0 && !checkpoint_matmuls(o->out, library, choices) && o->autotune) {
        printf("note: matrix products are timed anew: the checkpoint has no choices for %s, so the "
               "last bits may differ\n",
               library);
    }
    comm_broadcast(comm, choices, sizeof *choices, 0);
}
// Chooses algorithms for all products that the units of this model use. All ranks call it, before
// the states are allocated.
static inline void matmuls_choose(MatmulChoices *choices, const Options *o, const GptModel *m,
                                  const ExecutorShape *shape, double flops_per_s, Stream *s,
                                  Comm *comm) {
    static MatmulChoices wanted, seen, made;
    char library[160];
    // a private step has the same products, except for those of weight gradients
    ExecutorShape plain = *shape;
    ops_matmul_library(library, sizeof library);
    choices->count = 0;
    if (!*library) { return; }
    if (o->resume) { matmuls_of_checkpoint(o, comm, library, choices); }
    ops_matmuls_use(s, choices);
    memset(&plain.clip, 0, sizeof plain.clip);
    time_units(NULL, m, &plain, flops_per_s, s);
    ops_matmuls_seen(s, &seen);
    matmuls_of_all_ranks(comm, &seen, &wanted);
    const double start = seconds_now();
    MatmulGain gain = {0, 0, 0, 0};
    made.count = 0;
    if (comm->rank == 0 && wanted.count && o->autotune) {
        gain = ops_matmuls_time(s, &wanted, &made);
        printf("matmuls    %d products timed in %s: %s by the first suggestions of %s, %s as "
               "chosen, %d without their epilogue\n",
               gain.products, readable_step(seconds_now() - start).at,
               readable_step(gain.first_s).at, library, readable_step(gain.chosen_s).at,
               gain.apart);
    }
    comm_broadcast(comm, &made, sizeof made, 0);
    for (int i = 0; i < made.count && choices->count < MATMUL_CHOICES; i++) {
        choices->choice[choices->count++] = made.choice[i];
    }
    ops_matmuls_use(s, choices);
}

#endif
