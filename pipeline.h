// pipeline.h: builds pipeline schedules. A plan (stages of units on ranks, a kind of schedule,
// micro-batches) becomes the compute and message actions of one step, as data (schedule.h).
//
// Rows       Micro-batch m has the samples [m micro_rows, (m + 1) micro_rows) of the step, as far
//            as the step has so many. The replicas of a stage take nearly equal parts of them in
//            order (part_begin). So stages of different width exchange one message for each pair of
//            a sender and a receiver whose rows overlap. A replica without rows sends nothing, but
//            it still has all compute actions, with 0 rows, because it takes part in the
//            collectives of its stage.
// Kinds      GPipe (arXiv 1811.06965): all forwards, then all backwards. Both run in the order of
//            the micro-batches, so that every schedule adds gradients in the same order.
//            DAPPLE (arXiv 2007.01045, section 3): stage i of S begins with K_i forwards, then
//            alternates one backward and one forward, then runs the remaining backwards. K_i =
//            min(S - i, D) (policy A) or min(2 (S - i) - 1, D) (policy B), where D micro-batches
//            fit the memory. GPipe has K_i = M (all micro-batches), so one rule builds both: the
//            next action is a forward while fewer than K_i micro-batches are live.
//            Zero bubble (arXiv 2401.10241): a weight part waits until neither a gradient nor an
//            input is available. All stages hold at most S micro-batches, as DAPPLE's first stage
//            does.
// Messages   All stages are simulated in lockstep; one action of a stage takes one tick. Each
//            rank's list is what this rank sees of that one history, in which a message is a single
//            event at both ends. So no wait is circular, even when SEND and RECV wait for each
//            other. A message is sent as soon as it is made and the receiver has a buffer for it. A
//            stage has buffers for the inputs of one micro-batch more than are live, and for two
//            gradients. So the next message travels while the stage computes. The RECV of a
//            gradient precedes the action during which the gradient is made. Where receives are
//            posted without waiting, it travels while that action runs.
#ifndef PIPELINE_H
#define PIPELINE_H

#include "base/base.h"
#include "comm/group.h"
#include "comm/mpi.h"
#include "dp.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"

// in the order of --pipeline-schedule's choices
typedef enum { PIPELINE_GPIPE, PIPELINE_DAPPLE, PIPELINE_ZERO_BUBBLE } PipelineKind;
static const char *const pipeline_kind_names[] = {"gpipe", "dapple", "zero-bubble"};
typedef enum { WARMUP_A, WARMUP_B } Warmup; // in the order of --pipeline-warmup's choices
typedef struct {
    Placement placement;
    PipelineKind kind;
    Warmup warmup;      // policy of the warm-up; GPipe ignores it
    int64_t micro_rows; // samples of a micro-batch, over all replicas of a stage
    int micro_batches;  // M
    // D: micro-batches whose activations fit a rank's memory; INT64_MAX: no limit
    int64_t depth;
    // only block inputs are kept; the caller calls schedule_lower_recompute
    bool recompute;
    Clips clips; // clipping in a training step
} PipelinePlan;

// Micro-batches that may be received before the stage has memory for their activations.
enum { RECEIVED_AHEAD = 1 };

// -------------------------------------------------------------------------------------------------
// --pipeline

// Reads a number of at most 9 digits at *text and moves *text behind it. Returns -1 if there is
// none.
static inline int pipeline_number(const char **text) {
    int value = 0, digits = 0;
    for (; **text >= '0' && **text <= '9' && digits < 10; digits++, ++*text) {
        value = digits < 9 ? 10 * value + (**text - '0') : -1;
    }
    return digits ? value : -1;
}
// Makes N stages with the same number of ranks each. Their numbers of units are as even as
// possible; the first stages take the units that remain. Does not assign ranks (pipeline_parse
// does).
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
    *out = placement_even(units, stages);
    for (int s = 0; s < stages; s++) { out->stage[s].replicas = ranks / stages; }
    return true;
}
// Reads "units:replicas,...", one pair for each stage. Does not assign ranks (pipeline_parse does).
static inline bool pipeline_stages(const char *text, int units, int ranks, Placement *out,
                                   char *error, size_t error_bytes) {
    int stages = 1, s = 0;
    int64_t all_units = 0, all_ranks = 0;
    const char *c = text;
    for (const char *comma = text; *comma; comma++) { stages += *comma == ','; }
    *out = placement_make(stages);
    for (; s < stages; s++, c++) {
        Stage *stage = &out->stage[s];
        stage->first_unit = min_i64(all_units, units);
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
// Reads the value of --pipeline for a model of `units` units (blocks + 2): "N" even stages, or
// "units:replicas,..." for each stage. Ranks are assigned to stages in order. For any other text it
// returns false and writes a message that says what to change ("auto" is handled by the planner).
// Pure, apart from memory: the caller calls placement_free().
static inline bool pipeline_parse(const char *text, int units, int ranks, Placement *out,
                                  char *error, size_t error_bytes) {
    const char *end = text;
    int stages = pipeline_number(&end);
    memset(out, 0, sizeof *out);
    bool good = stages >= 0 && !*end ? pipeline_even(stages, units, ranks, out, error, error_bytes)
                                     : pipeline_stages(text, units, ranks, out, error, error_bytes);
    if (good) { placement_take_ranks(out); }
    return good;
}
// As pipeline_parse, but a wrong text ends the program (EXIT_INPUT).
static inline Placement pipeline_placement(const char *text, int units, int ranks) {
    Placement placement;
    char error[300];
    if (!pipeline_parse(text, units, ranks, &placement, error, sizeof error)) {
        die(EXIT_INPUT,
            HINT_ON_RANKS(ranks, "--pipeline N, or units:replicas per stage, e.g. 5:3,3:1"),
            "--pipeline %.100s: %s", text, error);
    }
    return placement;
}

// -------------------------------------------------------------------------------------------------
// Plans

// Returns whether the stages have each unit once, in order, and each rank once.
static inline bool pipeline_check_placement(const Placement *placement, int units, int ranks) {
    bool *taken = new_array(bool, ranks, "placement"), good = placement->stages > 0;
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
// Returns whether a schedule can be built from this plan, for a step of `samples` samples. If not,
// writes a message that says what to change. Pure.
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
// Returns K_i without the limit D: the forwards that a stage begins with (section 3.2 of the
// paper). For GPipe these are all forwards of the step.
static inline int64_t pipeline_warmup(const PipelinePlan *plan, int stage) {
    const int64_t below = plan->placement.stages - stage;
    return plan->kind == PIPELINE_GPIPE ? plan->micro_batches
           : plan->warmup == WARMUP_B   ? 2 * below - 1
                                        : below;
}
// Returns how many micro-batches' activations a stage holds at once: K_i, limited by D and M. Where
// weight parts wait (zero bubble, CLIPS_ALL) each stage holds at least as many as the first one.
static inline int64_t pipeline_live(const PipelinePlan *plan, int stage) {
    int64_t live = pipeline_warmup(plan, stage);
    if (plan->kind == PIPELINE_ZERO_BUBBLE) { live = plan->placement.stages; }
    // one more, whose factors are on their way
    if (plan->clips == CLIPS_ALL && plan->placement.stages > 1) {
        live = max_i64(live, plan->placement.stages + 1);
    }
    return min_i64(min_i64(live, plan->depth), plan->micro_batches);
}
// Returns the plan for a step of `samples` samples: as few micro-batches as hold them, but at least
// one. A private step draws a random number of samples, so its micro-batches get equal sizes.
static inline PipelinePlan pipeline_of_batch(const PipelinePlan *plan, int64_t samples) {
    PipelinePlan p = *plan;
    p.micro_batches = min_i64(max_i64(1, ceil_div(samples, p.micro_rows)), SCHEDULE_MAX);
    if (p.clips) { p.micro_rows = max_i64(1, ceil_div(samples, p.micro_batches)); }
    return p;
}
// Returns the first sample, as an index in the step, of the part of a micro-batch that replica
// `index` of `replicas` computes. The part ends where the next replica's begins.
static inline int64_t pipeline_first_row(const PipelinePlan *plan, int64_t samples, int micro,
                                         int replicas, int index) {
    int64_t begin = min_i64(micro * plan->micro_rows, samples),
            end = min_i64(begin + plan->micro_rows, samples);
    return begin + part_begin(end - begin, replicas, index);
}

// Returns whether each rank that computes blocks has samples of its own in all micro-batches of a
// step.
static inline bool pipeline_feeds_all(const PipelinePlan *plan, int64_t samples) {
    const Placement *p = &plan->placement;
    const Stage *first = &p->stage[0], *head = &p->stage[p->stages - 1];
    const int64_t n = first->replicas, rows = ceil_div(plan->micro_rows, n),
                  last = samples - (ceil_div(samples, plan->micro_rows) - 1) * plan->micro_rows;
    if (p->stages == 1) { // schedule_sequential(): each rank has a part of the step
        return samples / n > (ceil_div(ceil_div(samples, n), rows) - 1) * rows;
    }
    for (const Stage *s = first; s <= head; s++) {
        const bool blocks = s->units > 1 || (s != first && s != head);
        if (blocks && last < s->replicas) { return false; }
    }
    return true;
}

// -------------------------------------------------------------------------------------------------
// Equal parts: replicas that work beside each other, part by part, on equally many rows. Only
// collectives cross from one part to another.

// Does a pipeline divide into so many equal parts?
static inline bool pipeline_divides(const PipelinePlan *plan, int64_t samples, int parts) {
    bool whole = samples % parts == 0 && plan->micro_rows % parts == 0;
    for (int s = 0; s < plan->placement.stages; s++) {
        whole = whole && plan->placement.stage[s].replicas % parts == 0;
    }
    return whole;
}
// Returns the first part. Its ranks are numbered stage by stage; job_rank [ranks / parts] receives
// which ones they are. The caller calls placement_free().
static inline PipelinePlan pipeline_part(const PipelinePlan *plan, int parts, int *job_rank) {
    PipelinePlan part = *plan;
    part.micro_rows /= parts;
    part.placement = placement_make(plan->placement.stages);
    for (int s = 0; s < plan->placement.stages; s++) {
        const Stage *whole = &plan->placement.stage[s];
        part.placement.stage[s] = *whole;
        part.placement.stage[s].replicas /= parts;
        memcpy(job_rank, whole->ranks, part.placement.stage[s].replicas * sizeof(int));
        job_rank += part.placement.stage[s].replicas;
    }
    placement_take_ranks(&part.placement);
    return part;
}

// -------------------------------------------------------------------------------------------------
// Building

// What a stage has done so far, as numbers of micro-batches. It processes micro-batches in order.
typedef struct {
    int forwards, backwards, weights; // weights: all its weight parts; its buffers are free
    int inputs, gradients;            // messages that were received
    int deferred;                     // maximum number of backwards whose weight parts wait
    // clipping norms that cross stages: norms received by the first stage, factors received by this
    // one, TIED actions run
    int norms, factors, tied;
    Limits limits;
} StageRun;
typedef struct {
    Program *program;
    const PipelinePlan *plan;
    bool training;
    int stages;
    const Stage *stage; // [stages]
    StageRun *run;      // [stages]
    bool crosses, ties; // schedule.h: program_crosses, program_ties
    // the input and weight parts of a micro-batch run at separate times
    bool splits;
} PipelineBuilder;
// BACKWARD: the input and the weight part, unit by unit.
typedef enum { STAGE_WAITS, STAGE_FORWARD, STAGE_BACKWARD, STAGE_INPUT, STAGE_WEIGHT } StageAction;

// Returns whether this stage sends its norms to the first stage and waits for factors. With
// CLIPS_ALL all stages but the first do, otherwise only the last one, for the classifier's part of
// wte.
static inline bool stage_sends_norms(const PipelineBuilder *b, int s) {
    return b->crosses && s && (b->plan->clips == CLIPS_ALL || s == b->stages - 1);
}
// Returns whether the backward pass of the next micro-batch can run: its gradient (and on the first
// stage all norms from other stages) has arrived, and there is memory for what the pass keeps for
// clipping.
static inline bool stage_has_gradient(const PipelineBuilder *b, int s) {
    const StageRun *r = &b->run[s];
    bool there = r->backwards < (s + 1 < b->stages ? r->gradients : r->forwards);
    for (int q = 1; s == 0 && q < b->stages; q++) {
        there = there && (!stage_sends_norms(b, q) || r->backwards < b->run[q].norms);
    }
    const int kept = r->backwards - (b->plan->clips == CLIPS_ALL ? r->weights : r->tied);
    return there && (!stage_sends_norms(b, s) || kept < r->limits.clips);
}
// Returns whether a weight part can run.
static inline bool stage_has_weight(const PipelineBuilder *b, int s) {
    const StageRun *r = &b->run[s];
    return r->weights < (b->plan->clips == CLIPS_ALL && s ? r->factors : r->backwards);
}
static inline bool stage_has_input(const PipelineBuilder *b, int s) {
    return b->run[s].forwards < (s ? b->run[s].inputs : b->plan->micro_batches);
}
// Returns what stage s does in this tick, for schedules whose weight parts follow the input parts.
static inline StageAction stage_next_of_two(const PipelineBuilder *b, int s) {
    const StageRun *r = &b->run[s];
    if (r->forwards < b->plan->micro_batches && r->forwards - r->weights < r->limits.in_flight) {
        return stage_has_input(b, s) ? STAGE_FORWARD : STAGE_WAITS;
    }
    return b->training && stage_has_gradient(b, s) ? STAGE_BACKWARD : STAGE_WAITS;
}
// Returns what stage s does in this tick, for schedules that delay weight parts. Forwards and
// backwards alternate as in DAPPLE. A weight part runs when nothing else can: no gradient is
// available, and no input, or no memory for its activations.
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

// Returns the first row of a replica's part of a micro-batch.
static inline int64_t stage_row(const PipelineBuilder *b, const Stage *stage, int micro,
                                int replica) {
    return pipeline_first_row(b->plan, b->program->samples, micro, stage->replicas, replica);
}
// Adds actions of one kind for the units from `first` to `last`, which may be in descending order,
// on all replicas of a stage for one micro-batch.
static inline void stage_add(PipelineBuilder *b, int s, ActionKind kind, int first, int last,
                             int micro) {
    const Stage *stage = &b->stage[s];
    for (int i = 0; i < stage->replicas; i++) {
        Action a = action_make(kind, first, -1, micro);
        a.first_row = stage_row(b, stage, micro, i);
        a.rows = stage_row(b, stage, micro, i + 1) - a.first_row;
        for (; first <= last ? a.unit <= last : a.unit >= last; a.unit += first <= last ? 1 : -1) {
            schedule_add(&b->program->rank[stage->ranks[i]], a);
        }
    }
}
static inline void stage_add_backward(PipelineBuilder *b, int s, StageAction what, int micro) {
    const int first = b->stage[s].first_unit, last = first + b->stage[s].units - 1,
              clips = b->plan->clips;
    const bool input = what != STAGE_WEIGHT, weight = what != STAGE_INPUT,
               waits = clips >= CLIPS_STAGES || !weight;
    for (int unit = last; unit >= first && input; unit--) {
        // the embedding has no input gradient
        if (unit > 0) { stage_add(b, s, ACT_BACKWARD_INPUT, unit, unit, micro); }
        if (unit == 0 && clips == CLIPS_UNITS && b->crosses) {
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
    const Stage *stage = &b->stage[s];
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
    r->deferred = max_i64(r->deferred, r->backwards - r->weights);
    r->weights += what == STAGE_BACKWARD || what == STAGE_WEIGHT || !b->training;
}
// Adds TIED actions, the classifier's part of wte on the last stage, for the micro-batches whose
// factors have arrived. They run after the stage's action of the tick, so the factors have the time
// of one action to arrive. Returns whether there was any.
static inline bool stage_run_tied(PipelineBuilder *b) {
    const int last = b->stages - 1, head = b->program->map.units - 1;
    StageRun *r = &b->run[last];
    const int ready = b->plan->clips == CLIPS_ALL ? r->weights : r->factors, before = r->tied;
    for (; b->ties && r->tied < ready; r->tied++) {
        stage_add(b, last, ACT_TIED, head, head, r->tied);
    }
    return r->tied > before;
}
// Adds the messages of one kind (a SEND kind) between two stages for a micro-batch: one message for
// each pair of replicas with rows in common. Adds both ends of them, or one.
typedef enum { BOTH_ENDS, RECEIVERS, SENDERS } MessageEnds;
static inline void stage_cross(PipelineBuilder *b, int from, int to, ActionKind kind, int unit,
                               int micro, MessageEnds ends) {
    const Stage *sender = &b->stage[from], *receiver = &b->stage[to];
    Action a = action_make(kind, unit, -1, micro);
    for (int i = 0, j = 0; i < sender->replicas && j < receiver->replicas;) {
        // first and end of the rows of sender i, of receiver j
        int64_t out[2], in[2];
        for (int k = 0; k < 2; k++) {
            out[k] = stage_row(b, sender, micro, i + k);
            in[k] = stage_row(b, receiver, micro, j + k);
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
// Messages between stages s and s + 1: stage_send_down sends the output of the last unit of s;
// stage_send_back sends the input gradient of the first unit of s + 1.
static inline void stage_send_down(PipelineBuilder *b, int s, int micro) {
    stage_cross(b, s, s + 1, ACT_SEND_FORWARD, b->stage[s + 1].first_unit - 1, micro, BOTH_ENDS);
}
static inline void stage_send_back(PipelineBuilder *b, int s, int micro, MessageEnds ends) {
    stage_cross(b, s + 1, s, ACT_SEND_BACKWARD, b->stage[s + 1].first_unit, micro, ends);
}
// Adds all messages between stages s and s + 1 that are made and have a buffer at the receiver.
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
// Adds all messages between the first stage and stage s: factors, which may free buffers, then
// norms.
static inline void stage_norm_messages(PipelineBuilder *b, int s) {
    const Stage *stage = &b->stage[s];
    StageRun *first = &b->run[0], *r = &b->run[s];
    const int unit = stage->first_unit + stage->units - 1;
    while (r->factors < first->backwards) {
        stage_cross(b, 0, s, ACT_SEND_FACTOR, unit, r->factors++, BOTH_ENDS);
    }
    while (r->norms < r->backwards && r->norms - first->weights < first->limits.clips) {
        stage_cross(b, s, 0, ACT_SEND_NORM, unit, r->norms++, BOTH_ENDS);
    }
}
// Returns whether stage s + 1 makes a gradient in this tick for which stage s already has a buffer.
// Then s receives it before its own action of the tick, so it travels during that action. Such a
// stage waits only for the stage below it, which waits only for stages further below: no cycle.
static inline bool stage_awaits(const PipelineBuilder *b, int s, StageAction below_does) {
    const StageRun *above = &b->run[s], *below = above + 1;
    const bool made = below_does == STAGE_BACKWARD || below_does == STAGE_INPUT;
    return made && above->gradients == below->backwards &&
           above->gradients - above->weights < above->limits.gradients;
}
// Returns the limits of the ranks of stage s.
static inline Limits stage_limits(const PipelineBuilder *b, int s) {
    const PipelinePlan *plan = b->plan;
    const bool all = b->crosses && plan->clips == CLIPS_ALL;
    const int stages = plan->placement.stages;
    const int64_t live = b->training ? pipeline_live(plan, s) : 1,
                  kept = plan->kind == PIPELINE_ZERO_BUBBLE || all ? live : 1;
    Limits limits = {.in_flight = live, .works = 1};
    if (s) { limits.inputs = min_i64(live + RECEIVED_AHEAD, plan->micro_batches); }
    if (s + 1 < stages) { limits.gradients = min_i64(kept + RECEIVED_AHEAD, plan->micro_batches); }
    if (b->training && plan->clips >= CLIPS_STAGES) {
        limits.works = plan->placement.stage[s].units;
    }
    // A factor arrives S - 1 ticks after its norm has left, and is used one tick later.
    if (stage_sends_norms(b, s) || (s == 0 && b->crosses)) {
        // backward passes in that time
        const int64_t meanwhile = plan->kind == PIPELINE_GPIPE ? stages : stages / 2;
        limits.clips = all ? live : min_i64(meanwhile + 1, plan->micro_batches);
    }
    return limits;
}
static inline bool pipeline_done(const PipelineBuilder *b) {
    bool done = true;
    for (int s = 0; s < b->stages; s++) {
        done = done && b->run[s].weights == b->plan->micro_batches;
    }
    const int last = b->stages - 1;
    return done && (!b->ties || b->run[last].tied == b->plan->micro_batches);
}
static inline void pipeline_set_limits(const PipelineBuilder *b) {
    for (int s = 0; s < b->stages; s++) {
        const Stage *stage = &b->stage[s];
        StageRun *r = &b->run[s];
        if (b->splits) { r->limits.works = max_i64(1, r->deferred) * stage->units; }
        for (int i = 0; i < stage->replicas; i++) {
            b->program->limits[stage->ranks[i]] = r->limits;
        }
    }
}

// Builds the schedule of a step of `samples` samples. The caller has set the map, the ranks and
// empty lists of p; this fills the lists of all ranks and sets the limits. training = false:
// forwards only. A plan that pipeline_check() refuses ends the program (EXIT_INPUT).
static inline void schedule_pipeline(Program *p, const PipelinePlan *plan, int64_t samples,
                                     bool training) {
    const int stages = plan->placement.stages;
    char error[300];
    if (!pipeline_check(plan, p->map.units, p->ranks, samples, error, sizeof error)) {
        die(EXIT_INPUT, NULL, "pipeline: %s", error);
    }
    p->samples = samples;
    p->micro_batches = plan->micro_batches;
    p->forward_only = !training;
    if (training) { p->clips = plan->clips; }
    PipelineBuilder b = {.program = p,
                         .plan = plan,
                         .training = training,
                         .stages = stages,
                         .stage = plan->placement.stage,
                         .run = new_array(StageRun, stages, "pipeline"),
                         .crosses = program_crosses(p),
                         .ties = program_ties(p)};
    b.splits =
        training && (plan->kind == PIPELINE_ZERO_BUBBLE || (b.crosses && plan->clips == CLIPS_ALL));
    StageAction *next = new_array(StageAction, stages, "pipeline");
    bool *awaits = new_array(bool, stages, "pipeline");
    for (int s = 0; s < stages; s++) { b.run[s].limits = stage_limits(&b, s); }
    while (!pipeline_done(&b)) { // one tick
        bool moves = false;
        for (int s = 0; s < stages; s++) {
            next[s] = b.splits ? stage_next_of_three(&b, s) : stage_next_of_two(&b, s);
            moves = moves || next[s] != STAGE_WAITS;
        }
        for (int s = 0; s + 1 < stages; s++) {
            awaits[s] = stage_awaits(&b, s, next[s + 1]);
            if (awaits[s]) { stage_send_back(&b, s, b.run[s].gradients, RECEIVERS); }
        }
        for (int s = 0; s < stages; s++) { stage_run(&b, s, next[s]); }
        moves |= stage_run_tied(&b);
        // Some stage can always run: K_i does not grow from stage to stage, and norms and factors
        // do not wait for later micro-batches.
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
    free_all(b.run, next, awaits);
}

#endif
