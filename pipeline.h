// pipeline.h: builds pipeline schedules. A plan (stages of units on ranks, a kind of schedule,
// micro-batches) becomes the compute and message actions of a step, as data (schedule.h).
//
// Rows       Micro-batch m holds the samples [m micro_rows, (m + 1) micro_rows) of the step, as far
//            as there are so many. The replicas of a stage take nearly equal parts of them in order
//            (part_begin), so stages of unequal width exchange n to m messages: one for each pair
//            of a sender and a receiver whose rows overlap. A replica without rows computes
//            nothing, sends nothing, and still has all compute actions, with 0 rows: it takes part
//            in what its stage gathers and reduces.
// Kinds      GPipe (arXiv 1811.06965): all forwards, then all backwards, both in the order of the
//            micro-batches, so that gradients are added in one order whatever the schedule. DAPPLE
//            (arXiv 2007.01045, section 3): stage i of S begins with K_i forwards, then takes
//            turns, one backward and one forward, then drains. K_i = min(S - i, D) (policy A) or
//            min(2 (S - i) - 1, D) (policy B), D micro-batches fit the memory. GPipe is the same
//            with K_i = M: one rule builds both, the next action is a forward while fewer than K_i
//            micro-batches are live. Zero bubble (arXiv 2401.10241): weight parts wait for a moment
//            when neither a gradient nor an input is there; memory is bounded as on DAPPLE's first
//            stage, S micro-batches, on all of them.
// Messages   All stages are played in lockstep, an action of theirs taking one tick, and every list
//            is what one rank sees of that one history, in which a message is one event at both
//            ends: so no wait is circular even when SEND and RECV wait for each other. A message is
//            due as soon as it is made and the receiver has a place for it: the inputs of one
//            micro-batch more than are live, and the gradients of two, so the next one travels
//            while the present one computes. A gradient is awaited before the action beside which
//            it is made: where receives are posted and not waited for, it travels while that action
//            runs.
#ifndef PIPELINE_H
#define PIPELINE_H

#include "store/group.h" // Placement
#include "schedule.h"    // actions

// order of --pipeline-schedule
typedef enum { PIPELINE_GPIPE, PIPELINE_DAPPLE, PIPELINE_ZERO_BUBBLE } PipelineKind;
static const char *const pipeline_kind_names[] = {"gpipe", "dapple", "zero-bubble"};
typedef enum { WARMUP_A, WARMUP_B } Warmup; // order of --pipeline-warmup
typedef struct {
    Placement placement;
    PipelineKind kind;
    Warmup warmup;      // of DAPPLE
    int64_t micro_rows; // samples of a micro-batch, all replicas of a stage together
    int micro_batches;  // M
    // D: micro-batches whose activations fit a rank's memory; INT64_MAX: no bound
    int64_t depth;
    // only block inputs are kept (schedule_lower_recompute, which the caller calls)
    bool recompute;
    Clips clips; // of a step that trains
} PipelinePlan;

// micro-batches whose message may be there before there is a place for their activations
enum { RECEIVED_AHEAD = 1 };

// -------------------------------------------------------------------------------------------------
// --pipeline

// A number of at most 9 digits at *text, which moves on; -1: none.
static inline int pipeline_number(const char **text) {
    int value = 0, digits = 0;
    for (; **text >= '0' && **text <= '9' && digits < 10; digits++, ++*text) {
        value = digits < 9 ? 10 * value + (**text - '0') : -1;
    }
    return digits ? value : -1;
}
// N stages, as even as possible by the number of units, the first ones taking one more where units
// remain; each with as many ranks.
static inline bool pipeline_even(int stages, int units, int ranks, Placement *out, char *error,
                                 size_t error_bytes) {
    if (stages < 1 || stages > units) {
        snprintf(
            error, error_bytes,
            "%d stages, but the model has %d units (embedding, blocks, head): give 1 to %d stages",
            stages, units, units);
        return false;
    }
    if (ranks % stages) {
        snprintf(error, error_bytes,
                 "%d ranks are not %d stages of equally many: start a multiple of %d ranks, or "
                 "give units:replicas for each stage",
                 ranks, stages, stages);
        return false;
    }
    *out = placement_make(stages);
    for (int s = 0, unit = 0; s < stages; s++) {
        out->stage[s].first_unit = unit;
        out->stage[s].units = units / stages + (s < units % stages);
        out->stage[s].replicas = ranks / stages;
        unit += out->stage[s].units;
    }
    return true;
}
// "units:replicas,..."
static inline bool pipeline_stages(const char *text, int units, int ranks, Placement *out,
                                   char *error, size_t error_bytes) {
    int stages = 1, s = 0;
    int64_t all_units = 0, all_ranks = 0;
    const char *c = text;
    for (const char *comma = text; *comma; comma++) { stages += *comma == ','; }
    *out = placement_make(stages);
    for (; s < stages; s++, c++) {
        Stage *stage = &out->stage[s];
        stage->first_unit = (int)min_i64(all_units, units);
        stage->units = pipeline_number(&c);
        stage->replicas = *c == ':' ? (c++, pipeline_number(&c)) : -1;
        if (stage->units < 1 || stage->replicas < 1 || *c != (s + 1 < stages ? ',' : 0)) { break; }
        all_units += stage->units;
        all_ranks += stage->replicas;
    }
    if (s < stages) {
        snprintf(error, error_bytes,
                 "stage %d is not units:replicas, two numbers from 1 on: write e.g. 5:3,3:1", s);
    } else if (all_units != units) {
        snprintf(error, error_bytes,
                 "the units of the stages add up to %" PRId64
                 ": make them add up to the model's %d (embedding, %d blocks, head)",
                 all_units, units, units - 2);
    } else if (all_ranks != ranks) {
        snprintf(error, error_bytes,
                 "the replicas of the stages add up to %" PRId64
                 ": make them add up to the %d ranks, or start as many",
                 all_ranks, ranks);
    } else {
        return true;
    }
    placement_free(out);
    return false;
}
// What --pipeline says, of a model of so many units (blocks + 2): "N" even stages, or
// "units:replicas,..." for each. Ranks are dealt in order. False, and a text that says what to
// change, for anything else ("auto" is the planner's). Pure, but for memory: placement_free().
static inline bool pipeline_parse(const char *text, int units, int ranks, Placement *out,
                                  char *error, size_t error_bytes) {
    const char *end = text;
    int stages = pipeline_number(&end);
    memset(out, 0, sizeof *out);
    bool good = stages >= 0 && !*end ? pipeline_even(stages, units, ranks, out, error, error_bytes)
                                     : pipeline_stages(text, units, ranks, out, error, error_bytes);
    for (int s = 0, rank = 0; good && s < out->stages; s++) {
        Stage *stage = &out->stage[s];
        stage->ranks = (int *)checked_malloc((size_t)stage->replicas * sizeof(int), "placement");
        for (int i = 0; i < stage->replicas; i++) { stage->ranks[i] = rank++; }
    }
    return good;
}
// The same for the program: ends it where the text is wrong.
static inline Placement pipeline_placement(const char *text, int units, int ranks) {
    Placement placement;
    char error[300];
    if (!pipeline_parse(text, units, ranks, &placement, error, sizeof error)) {
        die(EXIT_INPUT, "--pipeline N, or units:replicas per stage, e.g. 5:3,3:1",
            "--pipeline %.100s: %s", text, error);
    }
    return placement;
}

// -------------------------------------------------------------------------------------------------
// Plans

// Are the stages all of the units once, and all of the ranks once?
static inline bool pipeline_check_placement(const Placement *placement, int units, int ranks) {
    bool *taken = (bool *)checked_calloc((size_t)ranks, sizeof(bool), "placement"),
         good = placement->stages > 0;
    int unit = 0, all = 0;
    for (int s = 0; good && s < placement->stages; s++) {
        const Stage *stage = &placement->stage[s];
        good = stage->first_unit == unit && stage->units > 0 && stage->replicas > 0;
        unit += stage->units;
        for (int i = 0; good && i < stage->replicas; i++, all++) {
            int r = stage->ranks[i];
            good = r >= 0 && r < ranks && !taken[r];
            if (good) { taken[r] = true; }
        }
    }
    free(taken);
    return good && unit == units && all == ranks;
}
// Can a schedule be made of this plan? False, and a text that says what to change. Pure.
static inline bool pipeline_check(const PipelinePlan *plan, int units, int ranks, int64_t samples,
                                  char *error, size_t error_bytes) {
    const char *wrong = NULL;
    if (!pipeline_check_placement(&plan->placement, units, ranks)) {
        wrong = "the stages must hold each unit once, in order, and each rank once";
    }
    if (plan->micro_batches < 1 || plan->micro_rows < 1) {
        wrong = "give at least one micro-batch (--micro-batches) of at least one sample "
                "(--micro-batch)";
    }
    if (!wrong && (samples < 0 || ceil_div(samples, plan->micro_rows) > plan->micro_batches)) {
        wrong = "the samples of a step do not fit its micro-batches: raise --micro-batches or "
                "--micro-batch";
    }
    if (plan->depth < 1) {
        wrong = "no micro-batch fits the memory: choose a smaller --micro-batch or more stages";
    }
    if (plan->kind == PIPELINE_GPIPE && plan->depth < plan->micro_batches) {
        wrong = "gpipe holds all micro-batches of a step, and so many do not fit the memory: "
                "choose --pipeline-schedule dapple or fewer --micro-batches";
    }
    if (plan->kind == PIPELINE_ZERO_BUBBLE && plan->recompute) {
        wrong = "zero-bubble keeps activations until the weight parts run: choose --recompute none "
                "or --pipeline-schedule dapple";
    }
    if (plan->kind == PIPELINE_ZERO_BUBBLE && plan->clips) {
        wrong = "zero-bubble does not clip: choose --pipeline-schedule dapple";
    }
    if (wrong) { snprintf(error, error_bytes, "%s", wrong); }
    return !wrong;
}
// K_i: forwards that a stage begins with (section 3.2 of the paper; the whole step's for GPipe).
static inline int64_t pipeline_warmup(const PipelinePlan *plan, int stage) {
    const int64_t below = plan->placement.stages - stage;
    return plan->kind == PIPELINE_GPIPE ? plan->micro_batches
           : plan->warmup == WARMUP_B   ? 2 * below - 1
                                        : below;
}
// Micro-batches whose activations a stage holds at once: as many, or, where weight parts wait,
// those of the first stage.
static inline int64_t pipeline_live(const PipelinePlan *plan, int stage) {
    int64_t live = pipeline_warmup(plan, stage);
    if (plan->kind == PIPELINE_ZERO_BUBBLE) { live = plan->placement.stages; }
    // one's factors are on their way
    if (plan->clips == CLIPS_ALL && plan->placement.stages > 1) {
        live = max_i64(live, plan->placement.stages + 1);
    }
    return min_i64(min_i64(live, plan->depth), plan->micro_batches);
}
// The plan for a step of so many samples: as few micro-batches as hold them, at least one; of a
// private step, whose samples are drawn, equal parts.
static inline PipelinePlan pipeline_of_batch(const PipelinePlan *plan, int64_t samples) {
    PipelinePlan p = *plan;
    p.micro_batches = (int)min_i64(max_i64(1, ceil_div(samples, p.micro_rows)), SCHEDULE_MAX);
    if (p.clips) { p.micro_rows = max_i64(1, ceil_div(samples, p.micro_batches)); }
    return p;
}
// The part of a micro-batch that replica `index` of `replicas` computes: its first sample in the
// step; rows = that of the next minus it.
static inline int64_t pipeline_first_row(const PipelinePlan *plan, int64_t samples, int micro,
                                         int replicas, int index) {
    int64_t begin = min_i64(micro * plan->micro_rows, samples),
            end = min_i64(begin + plan->micro_rows, samples);
    return begin + part_begin(end - begin, replicas, index);
}

// -------------------------------------------------------------------------------------------------
// Building

// What a stage has done, in micro-batches, which it works through in order.
typedef struct {
    int forwards, backwards, weights; // weights: all of them, then its places are free
    int inputs, gradients;            // received
    int deferred;                     // most backwards at once whose weight parts wait
    // of a group that crosses stages: the first stage has them, it has them, TIED has run
    int norms, factors, tied;
    Limits limits;
} StageRun;
typedef struct {
    Program *program;
    const PipelinePlan *plan;
    bool training;
    StageRun *run; // [stages]
} PipelineBuilder;
// BACKWARD: INPUT and WEIGHT, unit by unit
typedef enum { STAGE_WAITS, STAGE_FORWARD, STAGE_BACKWARD, STAGE_INPUT, STAGE_WEIGHT } StageAction;

static inline bool pipeline_crosses(const PipelineBuilder *b) {
    return b->training && b->plan->clips && b->plan->placement.stages > 1;
}
// Does this stage send its norms to the first one, and wait for factors? All, or the last one, for
// the classifier's part of wte.
static inline bool stage_sends_norms(const PipelineBuilder *b, int s) {
    return pipeline_crosses(b) && s &&
           (b->plan->clips == CLIPS_ALL || s == b->plan->placement.stages - 1);
}
// Is what the backward pass of the next micro-batch needs there, and room for what it leaves?
static inline bool stage_has_gradient(const PipelineBuilder *b, int s) {
    const StageRun *r = &b->run[s];
    bool there = r->backwards < (s + 1 < b->plan->placement.stages ? r->gradients : r->forwards);
    for (int q = 1; s == 0 && q < b->plan->placement.stages; q++) {
        there = there && (!stage_sends_norms(b, q) || r->backwards < b->run[q].norms);
    }
    const int kept = r->backwards - (b->plan->clips == CLIPS_ALL ? r->weights : r->tied);
    return there && (!stage_sends_norms(b, s) || kept < r->limits.clips);
}
// Is there a weight part that can run?
static inline bool stage_has_weight(const PipelineBuilder *b, int s) {
    const StageRun *r = &b->run[s];
    return r->weights < (b->plan->clips == CLIPS_ALL && s ? r->factors : r->backwards);
}
static inline bool stage_has_input(const PipelineBuilder *b, int s) {
    return b->run[s].forwards < (s ? b->run[s].inputs : b->plan->micro_batches);
}
// What stage s does in this tick.
static inline StageAction stage_next_of_two(const PipelineBuilder *b, int s) {
    const StageRun *r = &b->run[s];
    if (r->forwards < b->plan->micro_batches && r->forwards - r->weights < r->limits.in_flight) {
        return stage_has_input(b, s) ? STAGE_FORWARD : STAGE_WAITS;
    }
    return b->training && stage_has_gradient(b, s) ? STAGE_BACKWARD : STAGE_WAITS;
}
// The same of three: in turns as in DAPPLE, but weight parts run when nothing else can: no gradient
// is there, and no input, or no slot for it.
static inline StageAction stage_next_of_three(const PipelineBuilder *b, int s) {
    const StageRun *r = &b->run[s];
    bool turn = r->forwards < b->plan->micro_batches &&
                r->forwards - r->backwards < pipeline_warmup(b->plan, s);
    if (turn && stage_has_input(b, s) && r->forwards - r->weights < r->limits.in_flight) {
        return STAGE_FORWARD;
    }
    if (stage_has_gradient(b, s)) { return STAGE_INPUT; }
    return stage_has_weight(b, s) ? STAGE_WEIGHT : STAGE_WAITS;
}

// The actions of all replicas of a stage for one micro-batch: of this kind for these units, which
// may go down.
static inline void stage_add(PipelineBuilder *b, int s, ActionKind kind, int first, int last,
                             int micro) {
    const Stage *stage = &b->plan->placement.stage[s];
    for (int i = 0; i < stage->replicas; i++) {
        Action a = action_make(kind, first, -1, micro);
        a.first_row = pipeline_first_row(b->plan, b->program->samples, micro, stage->replicas, i);
        a.rows = pipeline_first_row(b->plan, b->program->samples, micro, stage->replicas, i + 1) -
                 a.first_row;
        for (; first <= last ? a.unit <= last : a.unit >= last; a.unit += first <= last ? 1 : -1) {
            schedule_add(&b->program->rank[stage->ranks[i]], a);
        }
    }
}
static inline void stage_add_backward(PipelineBuilder *b, int s, StageAction what, int micro) {
    const int first = b->plan->placement.stage[s].first_unit,
              last = first + b->plan->placement.stage[s].units - 1, clips = b->plan->clips;
    const bool input = what != STAGE_WEIGHT, weight = what != STAGE_INPUT,
               waits = clips >= CLIPS_STAGES || !weight;
    for (int unit = last; unit >= first && input; unit--) {
        // the embedding has no input gradient
        if (unit > 0) { stage_add(b, s, ACT_BACKWARD_INPUT, unit, unit, micro); }
        if (unit == 0 && clips == CLIPS_UNITS && pipeline_crosses(b)) {
            stage_add(b, s, ACT_CLIP, unit, unit, micro);
        }
        if (!waits) { stage_add(b, s, ACT_BACKWARD_WEIGHT, unit, unit, micro); }
    }
    if (input && (clips == CLIPS_STAGES || (clips == CLIPS_ALL && s == 0))) {
        stage_add(b, s, ACT_CLIP, first, first, micro);
    }
    if (weight && (waits || !input)) { stage_add(b, s, ACT_BACKWARD_WEIGHT, last, first, micro); }
}
static inline void stage_run(PipelineBuilder *b, int s, StageAction what) {
    const Stage *stage = &b->plan->placement.stage[s];
    StageRun *r = &b->run[s];
    if (what == STAGE_WAITS) { return; }
    if (what == STAGE_FORWARD) {
        stage_add(b, s, ACT_FORWARD, stage->first_unit, stage->first_unit + stage->units - 1,
                  r->forwards);
    } else {
        stage_add_backward(b, s, what, what == STAGE_WEIGHT ? r->weights : r->backwards);
    }
    r->forwards += what == STAGE_FORWARD;
    r->backwards += what == STAGE_BACKWARD || what == STAGE_INPUT;
    r->deferred = (int)max_i64(r->deferred, r->backwards - r->weights);
    r->weights += what == STAGE_BACKWARD || what == STAGE_WEIGHT || !b->training;
}
// The classifier's part of wte, on the last stage, of micro-batches whose factors have come: after
// what the stage does in the tick, so that they have the time of an action to arrive. Returns
// whether there was any.
static inline bool stage_run_tied(PipelineBuilder *b) {
    const int last = b->plan->placement.stages - 1, head = b->program->map.units - 1;
    StageRun *r = &b->run[last];
    const int ready = b->plan->clips == CLIPS_ALL ? r->weights : r->factors, before = r->tied;
    for (; stage_sends_norms(b, last) && r->tied < ready; r->tied++) {
        stage_add(b, last, ACT_TIED, head, head, r->tied);
    }
    return r->tied > before;
}
// What stages tell each other of a micro-batch, of a kind that is sent: one message for each pair
// of replicas with rows in common. Both ends of it are added, or one.
typedef enum { BOTH_ENDS, RECEIVERS, SENDERS } MessageEnds;
static inline void stage_cross(PipelineBuilder *b, int from, int to, ActionKind kind, int unit,
                               int micro, MessageEnds ends) {
    const Stage *sender = &b->plan->placement.stage[from],
                *receiver = &b->plan->placement.stage[to];
    Action a = action_make(kind, unit, -1, micro);
    for (int i = 0, j = 0; i < sender->replicas && j < receiver->replicas;) {
        // rows of replica i of the sender and j of the receiver: from the first on, up to the
        // second
        int64_t out[2], in[2];
        for (int k = 0; k < 2; k++) {
            out[k] =
                pipeline_first_row(b->plan, b->program->samples, micro, sender->replicas, i + k);
            in[k] =
                pipeline_first_row(b->plan, b->program->samples, micro, receiver->replicas, j + k);
        }
        a.first_row = max_i64(out[0], in[0]);
        a.rows = min_i64(out[1], in[1]) - a.first_row;
        if (a.rows > 0) {
            a.kind = kind;
            a.peer = receiver->ranks[j];
            if (ends != RECEIVERS) { schedule_add(&b->program->rank[sender->ranks[i]], a); }
            a.kind = (ActionKind)(kind + 1);
            a.peer = sender->ranks[i];
            if (ends != SENDERS) { schedule_add(&b->program->rank[receiver->ranks[j]], a); }
        }
        i += out[1] <= in[1];
        j += in[1] <= out[1];
    }
}
// From stage s to s + 1, what the last unit of s puts out; or back, the gradient of the first unit
// of s + 1.
static inline void stage_send_down(PipelineBuilder *b, int s, int micro) {
    stage_cross(b, s, s + 1, ACT_SEND_FORWARD, b->plan->placement.stage[s + 1].first_unit - 1,
                micro, BOTH_ENDS);
}
static inline void stage_send_back(PipelineBuilder *b, int s, int micro, MessageEnds ends) {
    stage_cross(b, s + 1, s, ACT_SEND_BACKWARD, b->plan->placement.stage[s + 1].first_unit, micro,
                ends);
}
// All messages between stages s and s + 1 that are made and have a place.
static inline void stage_messages(PipelineBuilder *b, int s) {
    StageRun *above = &b->run[s], *below = above + 1;
    while (below->inputs < above->forwards &&
           below->inputs - below->weights < below->limits.inputs) {
        stage_send_down(b, s, below->inputs++);
    }
    while (above->gradients < below->backwards &&
           above->gradients - above->weights < above->limits.gradients) {
        stage_send_back(b, s, above->gradients++, BOTH_ENDS);
    }
}
// The same between the first stage and stage s: factors, after which a place may be free, and
// norms.
static inline void stage_norm_messages(PipelineBuilder *b, int s) {
    const Stage *stage = &b->plan->placement.stage[s];
    StageRun *first = &b->run[0], *r = &b->run[s];
    const int unit = stage->first_unit + stage->units - 1;
    while (r->factors < first->backwards) {
        stage_cross(b, 0, s, ACT_SEND_FACTOR, unit, r->factors++, BOTH_ENDS);
    }
    while (r->norms < r->backwards && r->norms - first->weights < first->limits.clips) {
        stage_cross(b, s, 0, ACT_SEND_NORM, unit, r->norms++, BOTH_ENDS);
    }
}
// Does a gradient that stage s + 1 makes in this tick have a place on stage s already? Then s
// awaits it before its own action of the tick, beside which it travels. Who waits so waits for
// stages below it only, which wait for those below them: no circle.
static inline bool stage_awaits(const PipelineBuilder *b, int s, StageAction below_does) {
    const StageRun *above = &b->run[s], *below = above + 1;
    const bool made = below_does == STAGE_BACKWARD || below_does == STAGE_INPUT;
    return made && above->gradients == below->backwards &&
           above->gradients - above->weights < above->limits.gradients;
}
// What each rank must have room for.
static inline Limits stage_limits(const PipelineBuilder *b, int s) {
    const PipelinePlan *plan = b->plan;
    const bool all = pipeline_crosses(b) && plan->clips == CLIPS_ALL;
    const int stages = plan->placement.stages;
    const int64_t live = b->training ? pipeline_live(plan, s) : 1,
                  kept = plan->kind == PIPELINE_ZERO_BUBBLE || all ? live : 1;
    Limits limits = {live, 0, 0, 1, 0};
    if (s) { limits.inputs = min_i64(live + RECEIVED_AHEAD, plan->micro_batches); }
    if (s + 1 < stages) { limits.gradients = min_i64(kept + RECEIVED_AHEAD, plan->micro_batches); }
    if (b->training && plan->clips >= CLIPS_STAGES) {
        limits.works = plan->placement.stage[s].units;
    }
    // a factor comes S - 1 ticks after its norm has left, and is used one later
    if (stage_sends_norms(b, s) || (s == 0 && pipeline_crosses(b))) {
        // backward passes
        const int64_t meanwhile = plan->kind == PIPELINE_GPIPE ? stages : stages / 2;
        limits.clips = all ? live : min_i64(meanwhile + 1, plan->micro_batches);
    }
    return limits;
}
// Do input and weight parts of a micro-batch run apart?
static inline bool pipeline_splits(const PipelineBuilder *b) {
    return b->training && (b->plan->kind == PIPELINE_ZERO_BUBBLE ||
                           (pipeline_crosses(b) && b->plan->clips == CLIPS_ALL));
}
static inline bool pipeline_done(const PipelineBuilder *b) {
    bool done = true;
    for (int s = 0; s < b->plan->placement.stages; s++) {
        done = done && b->run[s].weights == b->plan->micro_batches;
    }
    const int last = b->plan->placement.stages - 1;
    return done && (!stage_sends_norms(b, last) || b->run[last].tied == b->plan->micro_batches);
}
static inline void pipeline_set_limits(const PipelineBuilder *b) {
    for (int s = 0; s < b->plan->placement.stages; s++) {
        const Stage *stage = &b->plan->placement.stage[s];
        StageRun *r = &b->run[s];
        if (pipeline_splits(b)) {
            r->limits.works = (int64_t)max_i64(1, r->deferred) * stage->units;
        }
        for (int i = 0; i < stage->replicas; i++) {
            b->program->limits[stage->ranks[i]] = r->limits;
        }
    }
}

// The plan's schedule of a step of `samples` samples. p: its map, ranks and empty lists are there;
// all ranks' lists are filled. training = false: forwards only. A plan that pipeline_check()
// refuses ends the program.
static inline void schedule_pipeline(Program *p, const PipelinePlan *plan, int64_t samples,
                                     bool training) {
    const int stages = plan->placement.stages;
    char error[300];
    if (!pipeline_check(plan, p->map.units, p->ranks, samples, error, sizeof error)) {
        die(EXIT_INPUT, NULL, "pipeline: %s", error);
    }
    p->samples = samples;
    p->micro_batches = plan->micro_batches;
    PipelineBuilder b = {p, plan, training,
                         (StageRun *)checked_calloc((size_t)stages, sizeof(StageRun), "pipeline")};
    const bool of_three = pipeline_splits(&b);
    if (training) { p->clips = plan->clips; }
    StageAction *next =
        (StageAction *)checked_malloc((size_t)stages * sizeof(StageAction), "pipeline");
    bool *awaits = (bool *)checked_calloc((size_t)stages, sizeof(bool), "pipeline");
    for (int s = 0; s < stages; s++) { b.run[s].limits = stage_limits(&b, s); }
    while (!pipeline_done(&b)) { // one tick
        bool moves = false;
        for (int s = 0; s < stages; s++) {
            next[s] = of_three ? stage_next_of_three(&b, s) : stage_next_of_two(&b, s);
            moves = moves || next[s] != STAGE_WAITS;
        }
        for (int s = 0; s + 1 < stages; s++) {
            awaits[s] = stage_awaits(&b, s, next[s + 1]);
            if (awaits[s]) { stage_send_back(&b, s, b.run[s].gradients, RECEIVERS); }
        }
        for (int s = 0; s < stages; s++) { stage_run(&b, s, next[s]); }
        moves |= stage_run_tied(&b);
        // K_i does not grow from stage to stage, and norms and factors do not wait for later
        // micro-batches: some stage always can
        assert(moves);
        for (int s = 0; s + 1 < stages; s++) {
            if (awaits[s]) { stage_send_back(&b, s, b.run[s].gradients++, SENDERS); }
            stage_messages(&b, s);
        }
        for (int s = 1; s < stages; s++) {
            if (stage_sends_norms(&b, s)) { stage_norm_messages(&b, s); }
        }
    }
    program_limit(p, stage_limits(&b, 0));
    pipeline_set_limits(&b);
    free(b.run);
    free(next);
    free(awaits);
}

#endif
