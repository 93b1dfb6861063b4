// learning_rate.h: the learning rate of each step, as the flags say it (--lr, --lr-schedule,
// --warmup). Blocks that share parameters, and those that were just delinked, have a factor of it
// (pseudo.h: delink_rate).
#ifndef LEARNING_RATE_H
#define LEARNING_RATE_H

#include "base/base.h"
#include "options.h"

// Returns a rate with this peak in a step (counted from 0) of a run of `steps` steps.
static inline double learning_rate_with_peak(const Options *o, double peak, int64_t step,
                                             int64_t steps) {
    if (step < o->warmup) { return peak * (step + 1) / o->warmup; }
    double last = peak * o->final_lr_fraction,
           done = (step - o->warmup) / (double)max_i64(steps - o->warmup, 1);
    double from = (1 - o->lr_last_part) * steps;
    switch (o->lr_schedule) {
    case LR_COSINE: return last + (peak - last) * 0.5 * (1 + cos(3.141592653589793 * done));
    case LR_LINEAR: return peak + (last - peak) * done;
    case LR_WSD:
        return step < from ? peak
                           : last + (peak - last) * (1 - sqrt((step - from) / (steps - from)));
    case LR_WSD_LINEAR:
        return step < from ? peak : peak + (last - peak) * (step - from) / (steps - from);
    default: return peak;
    }
}
// Returns whether the rate stays at its peak after the warm-up.
static inline bool rate_is_constant(const Options *o) {
    return o->lr_schedule == LR_CONSTANT || o->final_lr_fraction == 1;
}
// Returns the learning rate of a step, and how much of its peak that is.
static inline double learning_rate(const Options *o, int64_t step, int64_t steps) {
    return learning_rate_with_peak(o, o->lr, step, steps);
}
static inline double learning_rate_share(const Options *o, int64_t step, int64_t steps) {
    return learning_rate_with_peak(o, 1, step, steps);
}

#endif
