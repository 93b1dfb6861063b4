// test_schedule.c: proves that schedule.h and the lowerings of zero.h make valid programs for every
// small layout and stage, that the validator refuses each kind of hand-made damage for the right
// reason, that the simulator gives the times one works out with a pencil, that the printer leaves
// nothing out, that each sample is dealt to exactly one rank, and how often and how far ahead
// parameters travel.
#include "ops/cpu/ops_cpu.h"
#include "pipeline.h"
#include "zero.h"
#include "schedule/simulator.h"
#include "schedule/validator.h"
#include "mutations.h"
#include "simulated_times.h"
#include "policies.h" // ZERO_STAGE

#include "harness.h"

// -------------------------------------------------------------------------------------------------
// Making programs, as train_gpt.c does

static const ZeroPolicy plain = ZERO_STAGE(0, false, NULL);
static const ZeroPolicy stage_two = ZERO_STAGE(2, true, NULL);
// with secondary copies on pairs of ranks
static const ZeroPolicy stage_three = ZERO_POLICY(3, 2, false, true, false, NULL, NULL);
// The moments of all storages on the host: the device updates them, or the host does.
static unsigned char moments[] = {6, 6, 6, 6, 6};
static const Offload coming = OFFLOAD(moments, false, NULL, false, false),
                     far_away = OFFLOAD(moments, true, NULL, false, false);
// all of these on disk
static const Offload stored = OFFLOAD(moments, false, moments, false, false),
                     stored_far = OFFLOAD(moments, true, moments, false, false);
// Gradients, of up to 4 blocks.
static unsigned char gradients[] = {32, 32, 32, 32, 32, 32, 32};
static const Offload sums = OFFLOAD(gradients, false, NULL, true, false);
// All, of delayed updates.
static unsigned char everything[] = {39, 39, 39, 39, 39, 39, 39};
static const Offload one_step_late = OFFLOAD(everything, true, NULL, true, true);
static const ZeroPolicy delayed = ZERO_STAGE(2, true, &one_step_late);
static const ZeroPolicy far_sums = ZERO_STAGE(2, true, &sums);
static const ZeroPolicy device_updates = ZERO_STAGE(0, false, &coming);
// The same with the parameters and the activations of 4 blocks.
enum {
    FAR_STATES = 1 << STATE_MOMENT | 1 << (STATE_MOMENT + 1),
    STASH_BLOCK = FAR_STATES | 1 << STATE_PARAMETERS | 1 << STATE_ACTIVATIONS
};
static unsigned char all_kinds[] = {FAR_STATES,  FAR_STATES,  STASH_BLOCK, STASH_BLOCK,
                                    STASH_BLOCK, STASH_BLOCK, FAR_STATES};
static const Offload all_on_host = OFFLOAD(all_kinds, true, NULL, false, false);
static const ZeroPolicy everything_far = ZERO_STAGE(0, false, &all_on_host);
static const ZeroPolicy host_updates = ZERO_STAGE(0, false, &far_away);
static const ZeroPolicy device_reads = ZERO_STAGE(0, false, &stored);
static const ZeroPolicy host_reads = ZERO_STAGE(0, false, &stored_far);
static const ZeroPolicy quantized = ZERO_POLICY(2, 1, true, true, false, NULL, NULL);
typedef enum { NOT_CLIPPED, CLIPPED_BY_UNIT, CLIPPED_FLAT, CLIP_STYLES } ClipStyle;
static Program empty_program_of(const GptModel *m, int ranks, const ZeroPolicy *policy,
                                ClipStyle style) {
    Program p;
    memset(&p, 0, sizeof p);
    Placement placement = pipeline_placement("1", m->units, ranks);
    p.map = test_unit_map(m, policy, &placement, style != NOT_CLIPPED);
    placement_free(&placement);
    p.ranks = ranks;
    p.rank = calloc((size_t)ranks, sizeof(Schedule));
    return p;
}
static Program empty_program(int layers, int ranks, const ZeroPolicy *policy, ClipStyle style) {
    const GptModel m = gpt_model(config_of(0, layers));
    return empty_program_of(&m, ranks, policy, style);
}
// How the samples of a step are computed.
typedef struct {
    int64_t samples, rows;
    bool recompute;
    ClipStyle style;
} Work;
static Program lowered(const GptModel *m, int ranks, const ZeroPolicy *policy, Work work) {
    Program p = empty_program_of(m, ranks, policy, work.style);
    schedule_sequential(&p, work.samples, work.rows, true);
    if (work.recompute) {
        schedule_lower_recompute(&p);
        p.map.stash_inputs = p.map.stash != NULL;
    }
    if (work.style == CLIPPED_FLAT) { schedule_lower_clip(&p); }
    zero_lower(&p, true);
    schedule_lower_stash(&p);
    return p;
}
// A pass that does not train, over the same samples.
static Program evaluated(const GptModel *m, int ranks, const ZeroPolicy *policy, Work work) {
    Program p = empty_program_of(m, ranks, policy, work.style);
    p.map.stash_inputs = work.recompute && p.map.stash;
    schedule_sequential(&p, work.samples, work.rows, false);
    zero_lower(&p, false);
    return p;
}
static Program clipped(int layers, int ranks, int64_t samples, int64_t rows, bool recompute,
                       const ZeroPolicy *policy, ClipStyle style) {
    const GptModel m = gpt_model(config_of(0, layers));
    const Work work = {samples, rows, recompute, style};
    return lowered(&m, ranks, policy, work);
}
static Program sharded(int layers, int ranks, int64_t samples, int64_t rows, bool recompute,
                       const ZeroPolicy *policy) {
    return clipped(layers, ranks, samples, rows, recompute, policy, NOT_CLIPPED);
}
// Storages 0 to 6: wte, 4 blocks that share slots, lnf, the head's table.
static Program evaluation(void) {
    const GptModel m = gpt_model(config_of(gpt_architecture("llama", 5, 0, false), 4));
    const Work work = {4, 1, false, NOT_CLIPPED};
    return evaluated(&m, 2, &stage_three, work);
}
static Program sequential(int layers, int ranks, int64_t samples, int64_t rows, bool recompute) {
    return sharded(layers, ranks, samples, rows, recompute, &plain);
}

// A pipeline by hand. Two units a stage. Per rank a text of steps, a letter and the micro-batch:
//   F B    forward and backward of the stage's units     S R    output to the next stage, input
//          from the one before
//   s r    gradient to the stage before, from the next one
static void add_stage(Schedule *s, char step, int micro, int stage) {
    int first = 2 * stage, last = first + 1;
    Action a = action_make(ACT_FORWARD, first, -1, micro);
    a.first_row = 2 * micro;
    a.rows = 2;
    switch (step) {
    case 'F':
        schedule_add(s, a);
        a.unit = last;
        schedule_add(s, a);
        return;
    case 'B':
        for (a.unit = last; a.unit >= first; a.unit--) {
            a.kind = ACT_BACKWARD_INPUT;
            if (a.unit) { schedule_add(s, a); }
            a.kind = ACT_BACKWARD_WEIGHT;
            schedule_add(s, a);
        }
        return;
    case 'S':
        a.kind = ACT_SEND_FORWARD;
        a.unit = last;
        a.peer = stage + 1;
        break;
    case 'R':
        a.kind = ACT_RECV_FORWARD;
        a.unit = first - 1;
        a.peer = stage - 1;
        break;
    case 's':
        a.kind = ACT_SEND_BACKWARD;
        a.unit = first;
        a.peer = stage - 1;
        break;
    default:
        a.kind = ACT_RECV_BACKWARD;
        a.unit = last + 1;
        a.peer = stage + 1;
        break;
    }
    schedule_add(s, a);
}
static Program pipeline(int stages, const char *const steps[]) {
    Program p = empty_program(2 * stages - 2, stages, &plain, NOT_CLIPPED);
    for (int r = 0; r < stages; r++) {
        for (const char *c = steps[r]; *c; c++) {
            if (*c != ' ') {
                add_stage(&p.rank[r], *c, c[1] - '0', r);
                c++;
            }
        }
    }
    const Limits limits = {2, 2, 2, 1, 0};
    p.micro_batches = 2;
    p.samples = 4;
    program_limit(&p, limits);
    ((StorageRow *)(uintptr_t)p.map.rows)[0].tied = true; // the first and the last stage use wte
    zero_lower(&p, true);
    return p;
}
static const char *const two_stages[] = {"F0 S0 F1 S1 r0 B0 r1 B1", "R0 F0 B0 R1 s0 F1 B1 s1"};
static const char *const three_stages[] = {
    "F0 S0 F1 S1 r0 B0 r1 B1", "R0 F0 S0 R1 F1 S1 r0 B0 s0 r1 B1 s1", "R0 F0 R1 F1 B0 s0 B1 s1"};
// Natural, but each waits for the other: rank 0 sends an activation while rank 1 sends a gradient.
static const char *const crossing_sends[] = {"F0 S0 F1 S1 r0 B0 r1 B1", "R0 F0 B0 s0 R1 F1 B1 s1"};
static const char *const crossing_receives[] = {"F0 r0 S0 B0 F1 S1 r1 B1",
                                                "R0 F0 B0 s0 R1 F1 B1 s1"};

// A pipeline by pipeline.h: 3 micro-batches of 3 samples in stages of 2 units, on 3 ranks. split:
// the first stage on rank 0, its outputs go to ranks 1 (1 sample of each micro-batch) and 2 (2
// samples); else the first stage on ranks 0 and 1, and both send to rank 2.
static Program built(bool split, PipelineKind kind, bool recompute, ClipStyle style) {
    Program p = empty_program(2, 3, &plain, style);
    PipelinePlan plan = {pipeline_placement(split ? "2:1,2:2" : "2:2,2:1", 4, 3),
                         kind,
                         WARMUP_A,
                         3,
                         3,
                         INT64_MAX,
                         recompute,
                         CLIPS_NOTHING};
    schedule_pipeline(&p, &plan, 9, true);
    if (recompute) { schedule_lower_recompute(&p); }
    if (style == CLIPPED_FLAT) { schedule_lower_clip(&p); }
    ((StorageRow *)(uintptr_t)p.map.rows)[0].tied = true;
    zero_lower(&p, true);
    placement_free(&plan.placement);
    return p;
}

// A pipeline that clips: 3 micro-batches of 3 samples, 4 units. By unit: rank 0, then 1 and 2, with
// 2 units each; by stage: ranks 0 and 1, then 2; by the norm of all: stages of 1, 2 and 1 units, a
// rank each.
static Program private_pipeline(Clips clips, const char *arch) {
    const char *const text = clips == CLIPS_UNITS    ? "2:1,2:2"
                             : clips == CLIPS_STAGES ? "2:2,2:1"
                                                     : "1:1,2:1,1:1";
    const GptModel m = gpt_model(config_of(gpt_architecture(arch, strlen(arch), -1, false), 2));
    PipelinePlan plan = {
        pipeline_placement(text, 4, 3), PIPELINE_DAPPLE, WARMUP_A, 3, 3, INT64_MAX, false, clips};
    Program p;
    memset(&p, 0, sizeof p);
    p.map = test_unit_map(&m, &plain, &plan.placement, true);
    p.ranks = 3;
    p.rank = calloc(3, sizeof(Schedule));
    schedule_pipeline(&p, &plan, 9, true);
    zero_lower(&p, true);
    placement_free(&plan.placement);
    return p;
}

typedef enum {
    BASE_PLAIN,
    BASE_RECOMPUTE,
    BASE_RANKS,
    BASE_GRADIENTS,
    BASE_PARAMETERS,
    BASE_FLAT,
    BASE_TWO,
    BASE_THREE,
    BASE_SENDS,
    BASE_RECEIVES,
    BASE_SPLIT,
    BASE_JOIN,
    BASE_REMADE,
    BASE_STAGE_CLIP,
    BASE_TIED,
    BASE_TIED_STAGES,
    BASE_TIED_ALL,
    BASE_UNTIED_ALL,
    BASE_DEVICE_UPDATES,
    BASE_HOST_UPDATES,
    BASE_SUMS,
    BASE_SUMS_ALONE,
    BASE_DELAYED,
    BASE_DEVICE_READS,
    BASE_HOST_READS,
    BASE_FAR,
    BASE_FAR_INPUTS,
    BASE_BUCKETS,
    BASE_EVALUATION,
    BASE_ZERO_BUBBLE
} Base;
static Program base_program(Base base) {
    switch (base) {
    // units 0..3, storages 0..4, micro-batches 0 and 1
    case BASE_PLAIN: return sequential(2, 1, 4, 2, false);
    case BASE_RECOMPUTE: return sequential(2, 1, 4, 2, true);
    case BASE_RANKS: return sequential(2, 2, 4, 1, false);
    // units 0..5, storages 0..6: blocks 2 and 4 share a room, 3 and 5
    case BASE_GRADIENTS: return sharded(4, 2, 4, 1, false, &stage_two);
    case BASE_PARAMETERS: return sharded(4, 2, 4, 1, false, &stage_three);
    case BASE_FLAT: return clipped(2, 1, 4, 2, false, &plain, CLIPPED_FLAT);
    case BASE_TWO: return pipeline(2, two_stages);
    case BASE_THREE: return pipeline(3, three_stages);
    case BASE_SENDS: return pipeline(2, crossing_sends);
    case BASE_RECEIVES: return pipeline(2, crossing_receives);
    case BASE_SPLIT: return built(true, PIPELINE_DAPPLE, false, NOT_CLIPPED);
    case BASE_JOIN: return built(false, PIPELINE_DAPPLE, false, NOT_CLIPPED);
    case BASE_REMADE: return built(true, PIPELINE_DAPPLE, true, NOT_CLIPPED);
    case BASE_STAGE_CLIP: return built(true, PIPELINE_DAPPLE, false, CLIPPED_FLAT);
    case BASE_TIED: return private_pipeline(CLIPS_UNITS, "gpt2");
    case BASE_TIED_STAGES: return private_pipeline(CLIPS_STAGES, "gpt2");
    case BASE_TIED_ALL: return private_pipeline(CLIPS_ALL, "gpt2");
    case BASE_UNTIED_ALL: return private_pipeline(CLIPS_ALL, "nano");
    // pieces: 2 of storage 0, 1 of each of the others
    case BASE_DEVICE_UPDATES: return sharded(2, 1, 4, 2, false, &device_updates);
    case BASE_HOST_UPDATES: return sharded(2, 1, 4, 2, false, &host_updates);
    case BASE_SUMS: return sharded(4, 2, 4, 1, false, &far_sums);
    case BASE_DELAYED: return sharded(4, 2, 4, 1, false, &delayed);
    case BASE_SUMS_ALONE: return sharded(4, 1, 4, 2, false, &far_sums);
    case BASE_DEVICE_READS: return sharded(2, 1, 4, 2, false, &device_reads);
    case BASE_HOST_READS: return sharded(2, 1, 4, 2, false, &host_reads);
    case BASE_FAR: return sharded(4, 1, 4, 2, false, &everything_far);
    case BASE_FAR_INPUTS: return sharded(4, 1, 4, 2, true, &everything_far);
    case BASE_BUCKETS: return sharded(4, 2, 4, 1, false, &quantized);
    case BASE_EVALUATION: return evaluation();
    default: return built(true, PIPELINE_ZERO_BUBBLE, false, NOT_CLIPPED);
    }
}

// -------------------------------------------------------------------------------------------------
// Accepted

static void test_sequential_programs_are_valid(void **state) {
    (void)state;
    char error[900];
    for (int i = 0; i < 4 * 4 * 9 * 4 * 2; i++) {
        int layers = 1 + i % 4, ranks = 1 + i / 4 % 4, samples = 1 + i / 16 % 9,
            rows = 1 + i / 144 % 4, recompute = i / 576;
        unsigned char kinds[16];
        const Offload offload = OFFLOAD(kinds, samples % 2, NULL, false, false);
        const Offload *const of_sums[] = {&sums, &one_step_late},
                             *far[] = {NULL, NULL, &offload, of_sums[samples % 2]};
        // stages, with and without a partition, and quantized, or with blocks, or sums, on the host
        for (int j = 0; j < 4 * 2 * 4; j++) {
            const bool quantized = j / 8 == 1, partition = j / 4 % 2;
            ZeroPolicy policy =
                ZERO_POLICY(j % 4, partition ? ranks : 1, quantized,
                            ceil_div(samples, ranks) > rows, false, NULL, far[j / 8]);
            const GptModel m =
                gpt_model((quantized ? dense_config_of : config_of)(i / 4 + j, layers));
            const Work work = {samples, rows, recompute, NOT_CLIPPED};
            for (int s = 0; s < m.storages; s++) {
                kinds[s] = gpt_storage_is_block(&m, s) ? STASH_BLOCK : FAR_STATES;
            }
            Program programs[] = {lowered(&m, ranks, &policy, work),
                                  evaluated(&m, ranks, &policy, work)};
            for (int k = 0; k < 2; k++) {
                if (!schedule_validate(&programs[k], error, sizeof error)) {
                    fail_msg("%s layers %d ranks %d samples %d rows %d recompute %d policy %d: %s",
                             m.arch->name, layers, ranks, samples, rows, recompute, j, error);
                }
                program_free(&programs[k]);
            }
        }
    }
}
// Clipping changes neither which collectives there are nor their order, whatever a rank has samples
// for; flat clipping lets reductions wait while gathers go on, and the next gather of wte waits
// while it is lent. Of no samples at all there is one micro-batch.
static const Action *next_collective(const Schedule *s, int *i, bool gathers, bool reductions) {
    for (; *i < s->count; (*i)++) {
        ActionKind kind = s->actions[*i].kind;
        if ((gathers && kind == ACT_PREFETCH) ||
            (reductions && (kind == ACT_REDUCE || kind == ACT_NORM || kind == ACT_UPDATE))) {
            return &s->actions[(*i)++];
        }
    }
    return NULL;
}
static void check_same_collectives(const Program *p, const Program *q, bool gathers,
                                   bool reductions) {
    for (int r = 0; r < p->ranks; r++) {
        const Action *a, *b;
        int i = 0, j = 0;
        do {
            a = next_collective(&p->rank[r], &i, gathers, reductions);
            b = next_collective(&q->rank[r], &j, gathers, reductions);
            assert_int_equal(a != NULL, b != NULL);
            if (a && b) {
                assert_int_equal(a->kind, b->kind);
                assert_int_equal(a->storage, b->storage);
                assert_int_equal(a->micro, b->micro);
                assert_int_equal(a->secondary, b->secondary);
            }
        } while (a);
    }
}
static void test_clipped_programs_are_valid(void **state) {
    (void)state;
    char error[400];
    for (int i = 0; i < 3 * 4 * 7 * 3 * 4 * 2; i++) {
        int layers = 1 + i % 3, ranks = 1 + i / 3 % 4, samples = i / 12 % 7, rows = 1 + i / 84 % 3,
            stage = i / 252 % 4;
        ClipStyle style = i / 1008 ? CLIPPED_FLAT : CLIPPED_BY_UNIT;
        // logits are made again for the gradient of wte
        bool keeps_gathered = style == CLIPPED_BY_UNIT && i / 5 % 2;
        ZeroPolicy policy =
            ZERO_POLICY(stage, stage == 3 ? ranks : 1, false, ceil_div(samples, ranks) > rows,
                        keeps_gathered, NULL, NULL);
        const GptModel m = gpt_model(config_of(i / 7, layers));
        Work work = {samples, rows, style == CLIPPED_BY_UNIT && i % 2, style};
        keeps_gathered &= gpt_is_tied(&m);
        policy.keeps_gathered = keeps_gathered;
        Program p = lowered(&m, ranks, &policy, work);
        policy.keeps_gathered = false;
        work.style = NOT_CLIPPED;
        Program q = lowered(&m, ranks, &policy, work);
        if (!schedule_validate(&p, error, sizeof error)) {
            fail_msg("%s layers %d ranks %d samples %d rows %d stage %d style %d: %s", m.arch->name,
                     layers, ranks, samples, rows, stage, style, error);
        }
        if (style == CLIPPED_BY_UNIT && !keeps_gathered) {
            check_same_collectives(&p, &q, true, true);
        }
        check_same_collectives(&p, &q, true, false);
        check_same_collectives(&p, &q, false, true);
        program_free(&p);
        program_free(&q);
    }
}
static void test_pipelines_are_valid(void **state) {
    (void)state;
    char error[400];
    for (int base = BASE_TWO; base <= BASE_ZERO_BUBBLE; base++) {
        if (base == BASE_SENDS || base == BASE_RECEIVES) { continue; } // these are not
        Program p = base_program((Base)base);
        if (!schedule_validate(&p, error, sizeof error)) {
            fail_msg("program %d: %s", base, error);
        }
        program_free(&p);
    }
}

// -------------------------------------------------------------------------------------------------
// Refused: one change each, to an action named by rank, kind, unit or storage (-1: any) and
// micro-batch (-1: any): the first one of that name, or the last one (LAST).
enum { LAST = -2 };

typedef enum {
    NOTHING,
    DROP,
    REPEAT,
    SWAP,
    TO_FRONT,
    TO_END,
    MOVE_UP,
    MOVE_DOWN,
    DROP_MESSAGE, // of the action; MOVE_UP, MOVE_DOWN: `value` places
    REPEAT_MESSAGE,
    MESSAGE_ROWS,
    MESSAGE_FIRST_ROW,
    MESSAGE_MICRO,
    MESSAGE_UNIT, // = value, at both ends
    UNIT,
    STORAGE,
    MICRO,
    ROWS,
    FIRST_ROW,
    VERSION,
    PEER,
    COPIES,
    KIND, // = value
    SLOTS,
    INPUTS,
    GRADIENTS,
    WORKS,
    CLIPS, // of the rank = value
    REMAKES,
    MICRO_BATCHES, // of the program = value
} Change;
typedef struct {
    const char *name;
    Base base;
    int rank;
    ActionKind kind;
    int where, micro;
    Change change;
    int value;
    const char *expected;
} Damage;

static const Damage damages[] = {
    // buckets
    {"a storage of a bucket is left out", BASE_BUCKETS, 0, ACT_REDUCE, 4, 0, DROP, 0,
     "REDUCE unit -1 storage 3 micro-batch 0: deadlock"},
    {"a bucket begins in the middle", BASE_BUCKETS, 0, ACT_REDUCE, 6, 0, DROP, 0,
     "REDUCE unit -1 storage 5 micro-batch 0: deadlock"},
    {"a bucket of two micro-batches", BASE_BUCKETS, 0, ACT_REDUCE, 0, 0, DROP, 0,
     "REDUCE unit -1 storage 6 micro-batch 1: deadlock"},
    // passes that do not train
    {"a pass without a gather", BASE_EVALUATION, 0, ACT_PREFETCH, 6, -1, DROP, 0,
     "PREFETCH unit -1 storage 0 micro-batch -1: deadlock"},
    {"a pass without parameters", BASE_EVALUATION, 1, ACT_ACQUIRE, 3, -1, DROP, 0,
     "FORWARD unit 3 storage -1 micro-batch 0: not there, or not complete: acquired parameters (3, "
     "0)"},
    {"a pass that keeps a slot", BASE_EVALUATION, 1, ACT_RELEASE, 3, -1, DROP, 0,
     "PREFETCH unit -1 storage 1 micro-batch -1: the place is taken: a slot of parameters (1, 0)"},
    {"a pass that keeps parameters", BASE_EVALUATION, 1, ACT_RELEASE, 6, LAST, DROP, 0,
     "at the end: unit -1 storage -1 micro-batch -1: left over"},
    {"a pass without a unit", BASE_EVALUATION, 0, ACT_FORWARD, 2, 1, DROP, 0,
     "FORWARD unit 3 storage -1 micro-batch 1: not there, or not complete: the input of a unit (3, "
     "0)"},
    {"a pass of one rank in another order", BASE_EVALUATION, 1, ACT_PREFETCH, 0, -1, SWAP, 0,
     "rank 0: PREFETCH unit -1 storage 0 micro-batch -1: deadlock"},
    // rows and samples
    {"backward of other rows", BASE_PLAIN, 0, ACT_BACKWARD_INPUT, 1, 0, ROWS, 1,
     "BACKWARD_INPUT unit 1 storage -1 micro-batch 0: not there, or not complete: activations (1, "
     "0)"},
    {"backward from another row", BASE_PLAIN, 0, ACT_BACKWARD_WEIGHT, 1, 0, FIRST_ROW, 1,
     "BACKWARD_WEIGHT unit 1 storage -1 micro-batch 0: not there, or not complete: activations (1, "
     "0)"},
    {"negative first row", BASE_PLAIN, 0, ACT_FORWARD, 1, 0, FIRST_ROW, -1,
     "a field is out of range"},
    {"rows beyond the step", BASE_PLAIN, 0, ACT_FORWARD, 1, 1, FIRST_ROW, 3,
     "a field is out of range"},
    {"a sample twice", BASE_PLAIN, 0, ACT_FORWARD, 0, 1, FIRST_ROW, 1,
     "FORWARD unit 1 storage -1 micro-batch 1: not there, or not complete: the input of a unit (1, "
     "0)"},
    {"no weight buffers", BASE_PLAIN, 0, ACT_FORWARD, 0, 0, WORKS, 0,
     "BACKWARD_INPUT unit 3 storage -1 micro-batch 0: there is no place for what the weight part "
     "needs"},
    {"another order of reductions", BASE_RANKS, 1, ACT_REDUCE, 1, -1, SWAP, 0,
     "rank 0: REDUCE unit -1 storage 1 micro-batch -1: deadlock"},
    // compute
    {"no embedding forward", BASE_PLAIN, 0, ACT_FORWARD, 0, 0, DROP, 0,
     "FORWARD unit 1 storage -1 micro-batch 0: not there, or not complete: the input of a unit (1, "
     "0)"},
    {"no block forward", BASE_PLAIN, 0, ACT_FORWARD, 1, 1, DROP, 0,
     "FORWARD unit 2 storage -1 micro-batch 1: not there, or not complete: the input of a unit (2, "
     "0)"},
    {"no head forward", BASE_PLAIN, 0, ACT_FORWARD, 3, 0, DROP, 0,
     "BACKWARD_INPUT unit 3 storage -1 micro-batch 0: not there, or not complete: activations (3, "
     "0)"},
    {"no head backward", BASE_PLAIN, 0, ACT_BACKWARD_INPUT, 3, 0, DROP, 0,
     "BACKWARD_WEIGHT unit 3 storage -1 micro-batch 0: none is taken: places of weight parts"},
    {"no block backward input", BASE_PLAIN, 0, ACT_BACKWARD_INPUT, 1, 1, DROP, 0,
     "BACKWARD_WEIGHT unit 1 storage -1 micro-batch 1: none is taken: places of weight parts"},
    {"no first block's backward weight", BASE_PLAIN, 0, ACT_BACKWARD_WEIGHT, 0, 1, DROP, 0,
     "REDUCE unit -1 storage 1 micro-batch -1: not there, or not complete: a gradient (-2, 0)"},
    {"no block backward weight", BASE_PLAIN, 0, ACT_BACKWARD_WEIGHT, 2, 1, DROP, 0,
     "REDUCE unit -1 storage 3 micro-batch -1: not there, or not complete: a gradient (-4, 0)"},
    {"no embedding backward", BASE_PLAIN, 0, ACT_BACKWARD_WEIGHT, 0, 0, DROP, 0,
     "FORWARD unit 0 storage -1 micro-batch 1: the place is taken: activations (0, 0)"},
    // to its forward, where wte and wpe are held
    {"embedding backward before the block's", BASE_PLAIN, 0, ACT_BACKWARD_WEIGHT, 0, 0, MOVE_UP, 25,
     "BACKWARD_WEIGHT unit 0 storage -1 micro-batch 0: not there, or not complete: activations (0, "
     "0)"},
    {"forward twice", BASE_PLAIN, 0, ACT_FORWARD, 1, 0, REPEAT, 0,
     "FORWARD unit 1 storage -1 micro-batch 0: the place is taken: activations (1, 0)"},
    {"backward input twice", BASE_PLAIN, 0, ACT_BACKWARD_INPUT, 2, 0, REPEAT, 0,
     "BACKWARD_INPUT unit 2 storage -1 micro-batch 0: all are taken: places of weight parts"},
    {"backward weight twice", BASE_PLAIN, 0, ACT_BACKWARD_WEIGHT, 2, 0, REPEAT, 0,
     "BACKWARD_WEIGHT unit 2 storage -1 micro-batch 0: not there, or not complete: activations (2, "
     "0)"},
    // over its input part and the release
    {"weight before input", BASE_PLAIN, 0, ACT_BACKWARD_WEIGHT, 2, 0, MOVE_UP, 2,
     "BACKWARD_WEIGHT unit 2 storage -1 micro-batch 0: none is taken: places of weight parts"},
    {"backward before forward", BASE_PLAIN, 0, ACT_FORWARD, 3, 0, SWAP, 0,
     "BACKWARD_INPUT unit 3 storage -1 micro-batch 0: not there, or not complete: activations (3, "
     "0)"},
    {"backward of the wrong unit", BASE_PLAIN, 0, ACT_BACKWARD_INPUT, 3, 0, UNIT, 2,
     "BACKWARD_INPUT unit 2 storage -1 micro-batch 0: not there, or not complete: acquired "
     "parameters (3, 0)"},
    {"forward of the other micro-batch", BASE_PLAIN, 0, ACT_FORWARD, 1, 0, MICRO, 1,
     "FORWARD unit 1 storage -1 micro-batch 1: not there, or not complete: the input of a unit (1, "
     "0)"},
    {"unit too large", BASE_PLAIN, 0, ACT_FORWARD, 1, 0, UNIT, 4, "a field is out of range"},
    {"unit missing", BASE_PLAIN, 0, ACT_FORWARD, 1, 0, UNIT, -1, "a field is out of range"},
    {"micro-batch too large", BASE_PLAIN, 0, ACT_FORWARD, 0, 0, MICRO, 2,
     "a field is out of range"},
    {"micro-batch negative", BASE_PLAIN, 0, ACT_BACKWARD_WEIGHT, 0, 0, MICRO, -1,
     "a field is out of range"},
    {"no rows", BASE_PLAIN, 0, ACT_FORWARD, 1, 0, ROWS, 0,
     "FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a unit (2, "
     "0)"},
    {"negative rows", BASE_PLAIN, 0, ACT_BACKWARD_INPUT, 1, 0, ROWS, -2, "a field is out of range"},
    {"fewer micro-batches than used", BASE_PLAIN, 0, ACT_FORWARD, 0, 0, MICRO_BATCHES, 1,
     "a field is out of range"},
    {"no slots", BASE_PLAIN, 0, ACT_FORWARD, 0, 0, SLOTS, 0,
     "FORWARD unit 0 storage -1 micro-batch 0: there is no place for activations"},
    {"not recomputed", BASE_RECOMPUTE, 0, ACT_RECOMPUTE, 2, 0, DROP, 0,
     "BACKWARD_INPUT unit 2 storage -1 micro-batch 0: not there, or not complete: recomputed "
     "activations (0, 0)"},
    {"recomputed too late", BASE_RECOMPUTE, 0, ACT_RECOMPUTE, 1, 1, SWAP, 0,
     "BACKWARD_INPUT unit 1 storage -1 micro-batch 1: not there, or not complete: recomputed "
     "activations (0, 0)"},
    {"another block recomputed before the weight part", BASE_RECOMPUTE, 0, ACT_BACKWARD_WEIGHT, 2,
     0, MOVE_DOWN, 2,
     "BACKWARD_WEIGHT unit 2 storage -1 micro-batch 0: not there, or not complete: recomputed "
     "activations (0, 0)"},
    {"recomputed before its forward", BASE_RECOMPUTE, 0, ACT_FORWARD, 1, 0, KIND, ACT_RECOMPUTE,
     "RECOMPUTE unit 1 storage -1 micro-batch 0: not there, or not complete: activations (1, 0)"},
    {"recomputed for the other micro-batch", BASE_RECOMPUTE, 0, ACT_RECOMPUTE, 1, 0, MICRO, 1,
     "RECOMPUTE unit 1 storage -1 micro-batch 1: not there, or not complete: activations (1, 0)"},
    // parameters
    {"not acquired", BASE_PLAIN, 0, ACT_ACQUIRE, 2, -1, DROP, 0,
     "FORWARD unit 1 storage -1 micro-batch 0: not there, or not complete: acquired parameters (2, "
     "0)"},
    {"not acquired on rank 1", BASE_RANKS, 1, ACT_ACQUIRE, 4, -1, DROP, 0,
     "rank 1: FORWARD unit 3 storage -1 micro-batch 0: not there, or not complete: acquired "
     "parameters (4, 0)"},
    {"acquired too late", BASE_PLAIN, 0, ACT_ACQUIRE, 3, -1, SWAP, 0,
     "FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: acquired parameters (3, "
     "0)"},
    {"acquired twice", BASE_PLAIN, 0, ACT_ACQUIRE, 1, -1, REPEAT, 0,
     "ACQUIRE unit -1 storage 1 micro-batch -1: the place is taken: acquired parameters (1, 0)"},
    {"acquired another storage", BASE_PLAIN, 0, ACT_ACQUIRE, 2, -1, STORAGE, 3,
     "FORWARD unit 1 storage -1 micro-batch 0: not there, or not complete: acquired parameters (2, "
     "0)"},
    {"acquired no storage", BASE_PLAIN, 0, ACT_ACQUIRE, 2, -1, STORAGE, -1,
     "a field is out of range"},
    {"acquired storage too large", BASE_PLAIN, 0, ACT_ACQUIRE, 2, -1, STORAGE, 5,
     "a field is out of range"},
    {"acquired the next version", BASE_PLAIN, 0, ACT_ACQUIRE, 2, -1, VERSION, 1,
     "ACQUIRE unit -1 storage 2 micro-batch -1: not there, or not complete: parameters (-3, 0)"},
    {"acquired the version before", BASE_PLAIN, 0, ACT_ACQUIRE, 0, -1, VERSION, -1,
     "ACQUIRE unit -1 storage 0 micro-batch -1: not there, or not complete: parameters (-1, 0)"},
    {"not released", BASE_PLAIN, 0, ACT_RELEASE, 2, -1, DROP, 0,
     "ACQUIRE unit -1 storage 2 micro-batch -1: the place is taken: acquired parameters (2, 0)"},
    {"released twice", BASE_PLAIN, 0, ACT_RELEASE, 4, -1, REPEAT, 0,
     "RELEASE unit -1 storage 4 micro-batch -1: not there, or not complete: acquired parameters "
     "(4, 0)"},
    {"released too early", BASE_PLAIN, 0, ACT_RELEASE, 2, -1, MOVE_UP, 1,
     "FORWARD unit 1 storage -1 micro-batch 0: not there, or not complete: acquired parameters (2, "
     "0)"},
    {"released another storage", BASE_PLAIN, 0, ACT_RELEASE, 2, -1, STORAGE, 3,
     "RELEASE unit -1 storage 3 micro-batch -1: not there, or not complete: acquired parameters "
     "(3, 0)"},
    {"acquired after the update", BASE_PLAIN, 0, ACT_ACQUIRE, 2, -1, TO_END, 0,
     "FORWARD unit 1 storage -1 micro-batch 0: not there, or not complete: acquired parameters (2, "
     "0)"},
    {"held at the end", BASE_PLAIN, 0, ACT_PREFETCH, 2, -1, KIND, ACT_ACQUIRE,
     "ACQUIRE unit -1 storage 2 micro-batch -1: not there, or not complete: parameters (-3, 0)"},
    // gradients and updates
    {"no reduction", BASE_PLAIN, 0, ACT_REDUCE, 3, -1, DROP, 0,
     "NORM unit -1 storage -1 micro-batch -1: not there, or not complete: the sum of a gradient "
     "(3, 0)"},
    {"no reduction on rank 1", BASE_RANKS, 1, ACT_REDUCE, 0, -1, DROP, 0,
     "rank 0: REDUCE unit -1 storage 0 micro-batch -1: deadlock"},
    {"reduced twice", BASE_PLAIN, 0, ACT_REDUCE, 3, -1, REPEAT, 0,
     "REDUCE unit -1 storage 3 micro-batch -1: not there, or not complete: a gradient (-4, 0)"},
    {"reduced before any contribution", BASE_PLAIN, 0, ACT_REDUCE, 2, -1, TO_FRONT, 0,
     "REDUCE unit -1 storage 2 micro-batch -1: not there, or not complete: a gradient (-3, 0)"},
    {"wte reduced before any", BASE_PLAIN, 0, ACT_REDUCE, 0, -1, TO_FRONT, 0,
     "REDUCE unit -1 storage 0 micro-batch -1: not there, or not complete: a gradient (-1, 0)"},
    {"reduced before the last one", BASE_PLAIN, 0, ACT_REDUCE, 4, -1, MOVE_UP, 1,
     "REDUCE unit -1 storage 4 micro-batch -1: not there, or not complete: a gradient (-5, 0)"},
    {"reduced another storage", BASE_PLAIN, 0, ACT_REDUCE, 4, -1, STORAGE, 3,
     "REDUCE unit -1 storage 3 micro-batch -1: not there, or not complete: a gradient (-4, 0)"},
    {"reduced no storage", BASE_PLAIN, 0, ACT_REDUCE, 4, -1, STORAGE, 5, "a field is out of range"},
    {"no norm", BASE_PLAIN, 0, ACT_NORM, -1, -1, DROP, 0,
     "UPDATE unit -1 storage 0 micro-batch -1: not there, or not complete: the norm of the "
     "gradient (0, 0)"},
    {"no norm on rank 0 of 2", BASE_RANKS, 0, ACT_NORM, -1, -1, DROP, 0,
     "rank 0: UPDATE unit -1 storage 0 micro-batch -1: not there, or not complete: the norm of the "
     "gradient (0, 0)"},
    {"norm twice", BASE_PLAIN, 0, ACT_NORM, -1, -1, REPEAT, 0,
     "NORM unit -1 storage -1 micro-batch -1: deadlock"},
    {"norm before the last reduction", BASE_PLAIN, 0, ACT_NORM, -1, -1, MOVE_UP, 3,
     "NORM unit -1 storage -1 micro-batch -1: not there, or not complete: the sum of a gradient "
     "(0, 0)"},
    {"update before the norm", BASE_PLAIN, 0, ACT_NORM, -1, -1, SWAP, 0,
     "UPDATE unit -1 storage 0 micro-batch -1: not there, or not complete: the norm of the "
     "gradient (0, 0)"},
    {"update before everything", BASE_PLAIN, 0, ACT_UPDATE, 2, -1, TO_FRONT, 0,
     "UPDATE unit -1 storage 2 micro-batch -1: not there, or not complete: the norm of the "
     "gradient (0, 0)"},
    {"no update", BASE_PLAIN, 0, ACT_UPDATE, 1, -1, DROP, 0,
     "PREFETCH unit -1 storage 1 micro-batch -1: not there, or not complete: the newest version "
     "(1, 0)"},
    {"no update on rank 1", BASE_RANKS, 1, ACT_UPDATE, 1, -1, DROP, 0,
     "rank 1: PREFETCH unit -1 storage 1 micro-batch -1: not there, or not complete: the newest "
     "version (1, 0)"},
    {"updated twice", BASE_PLAIN, 0, ACT_UPDATE, 0, -1, REPEAT, 0,
     "UPDATE unit -1 storage 0 micro-batch -1: not there, or not complete: the sum of a gradient "
     "(0, 0)"},
    {"updated another storage", BASE_PLAIN, 0, ACT_UPDATE, 3, -1, STORAGE, 4,
     "PREFETCH unit -1 storage 3 micro-batch -1: not there, or not complete: the newest version "
     "(3, 0)"},
    {"updated while held", BASE_PLAIN, 0, ACT_RELEASE, 1, LAST, TO_END, 0,
     "UPDATE unit -1 storage 1 micro-batch -1: the place is taken: acquired parameters (1, 0)"},
    {"never released", BASE_PLAIN, 0, ACT_RELEASE, 3, LAST, DROP, 0,
     "UPDATE unit -1 storage 3 micro-batch -1: the place is taken: acquired parameters (3, 0)"},
    // stage 2: gradients that leave in each micro-batch, from rooms that blocks share
    {"not reduced in a micro-batch", BASE_GRADIENTS, 0, ACT_REDUCE, 3, 0, DROP, 0,
     "REDUCE unit -1 storage 2 micro-batch 0: deadlock"},
    {"not reduced before the next takes its room", BASE_GRADIENTS, 0, ACT_REDUCE, 5, 0, DROP, 0,
     "REDUCE unit -1 storage 4 micro-batch 0: deadlock"},
    {"wte not reduced in the first micro-batch", BASE_GRADIENTS, 1, ACT_REDUCE, 0, 0, DROP, 0,
     "rank 0: REDUCE unit -1 storage 0 micro-batch 0: deadlock"},
    {"reduced as another micro-batch", BASE_GRADIENTS, 0, ACT_REDUCE, 3, 0, MICRO, 1,
     "REDUCE unit -1 storage 3 micro-batch 1: not there, or not complete: a gradient (1, 0)"},
    {"reduced in no micro-batch", BASE_GRADIENTS, 0, ACT_REDUCE, 3, 0, MICRO, -1,
     "a field is out of range"},
    {"reduced twice in a micro-batch", BASE_GRADIENTS, 0, ACT_REDUCE, 3, 1, REPEAT, 0,
     "REDUCE unit -1 storage 3 micro-batch 1: deadlock"},
    {"other reductions of a micro-batch on a rank", BASE_GRADIENTS, 1, ACT_REDUCE, 1, 0, SWAP, 0,
     "rank 0: REDUCE unit -1 storage 1 micro-batch 0: deadlock"},
    {"gathered before the update", BASE_GRADIENTS, 0, ACT_UPDATE, 3, -1, SWAP, 0,
     "PREFETCH unit -1 storage 3 micro-batch -1: not there, or not complete: the newest version "
     "(3, 0)"},
    // stage 3: parameters that come for each use, into rooms that blocks share
    {"not gathered", BASE_PARAMETERS, 0, ACT_PREFETCH, 3, -1, DROP, 0,
     "PREFETCH unit -1 storage 4 micro-batch -1: deadlock"},
    {"not gathered the last time", BASE_PARAMETERS, 1, ACT_PREFETCH, 3, LAST, DROP, 0,
     "rank 0: PREFETCH unit -1 storage 3 micro-batch -1: deadlock"},
    {"used before it is gathered", BASE_PARAMETERS, 0, ACT_ACQUIRE, 4, -1, MOVE_UP, 8,
     "ACQUIRE unit -1 storage 4 micro-batch -1: not there, or not complete: a slot of parameters "
     "(0, 0)"},
    {"gathered twice", BASE_PARAMETERS, 0, ACT_PREFETCH, 1, -1, REPEAT, 0,
     "PREFETCH unit -1 storage 1 micro-batch -1: deadlock"},
    {"gathered into a room in use", BASE_PARAMETERS, 0, ACT_PREFETCH, 4, -1, MOVE_UP, 1,
     "PREFETCH unit -1 storage 4 micro-batch -1: the place is taken: a slot of parameters (0, 0)"},
    {"gathered while it is held", BASE_PARAMETERS, 0, ACT_RELEASE, 0, -1, TO_END, 0,
     "PREFETCH unit -1 storage 0 micro-batch -1: the place is taken: acquired parameters (0, 0)"},
    {"gathered the next version", BASE_PARAMETERS, 0, ACT_PREFETCH, 2, -1, VERSION, 1,
     "PREFETCH unit -1 storage 2 micro-batch -1: not there, or not complete: the newest version "
     "(2, 0)"},
    {"gathered for nobody", BASE_PARAMETERS, 0, ACT_UPDATE, 6, -1, KIND, ACT_PREFETCH,
     "PREFETCH unit -1 storage 6 micro-batch -1: deadlock"},
    {"gathered no storage", BASE_PARAMETERS, 0, ACT_PREFETCH, 2, -1, STORAGE, 7,
     "a field is out of range"},
    {"copies that nobody has made", BASE_PARAMETERS, 0, ACT_PREFETCH, 2, -1, COPIES, 1,
     "PREFETCH unit -1 storage 2 micro-batch -1: not there, or not complete: secondary copies (2, "
     "0)"},
    {"copies on one rank only", BASE_PARAMETERS, 1, ACT_PREFETCH, 4, LAST, COPIES, 0,
     "rank 1: at the end: unit -1 storage -1 micro-batch -1: collectives of storage 4 differ from "
     "those of rank 0"},
    {"gathers in another order", BASE_PARAMETERS, 1, ACT_PREFETCH, 2, -1, SWAP, 0,
     "rank 0: PREFETCH unit -1 storage 2 micro-batch -1: deadlock"},
    {"a gather before a reduction", BASE_PARAMETERS, 1, ACT_PREFETCH, 1, LAST, MOVE_UP, 6,
     "rank 0: REDUCE unit -1 storage 5 micro-batch 0: deadlock"},
    // states on the host
    {"a piece that does not come", BASE_DEVICE_UPDATES, 0, ACT_FETCH, 2, -1, DROP, 0,
     "UPDATE unit -1 storage 2 micro-batch -1: not there, or not complete: a piece of states (2, "
     "0)"},
    {"a piece twice", BASE_DEVICE_UPDATES, 0, ACT_FETCH, 0, -1, REPEAT, 0,
     "FETCH unit -1 storage 0 micro-batch -1: not there, or not complete: the number of pieces (1, "
     "0)"},
    {"a piece that stays", BASE_DEVICE_UPDATES, 0, ACT_EVICT, 0, -1, DROP, 0,
     "FETCH unit -1 storage 1 micro-batch -1: all are taken: slots of pieces"},
    {"the last piece stays", BASE_DEVICE_UPDATES, 0, ACT_EVICT, 4, -1, DROP, 0,
     "at the end: unit -1 storage -1 micro-batch -1: left over"},
    {"a piece goes before its update", BASE_DEVICE_UPDATES, 0, ACT_EVICT, 2, -1, MOVE_UP, 1,
     "EVICT unit -1 storage 2 micro-batch -1: not there, or not complete: a piece of states (2, "
     "0)"},
    {"a piece without update", BASE_DEVICE_UPDATES, 0, ACT_UPDATE, 0, LAST, DROP, 0,
     "EVICT unit -1 storage 0 micro-batch -1: not there, or not complete: a piece of states (0, "
     "1)"},
    {"a gradient that does not leave", BASE_HOST_UPDATES, 0, ACT_EVICT, 2, -1, DROP, 0,
     "UPDATE unit -1 storage 2 micro-batch -1: not there, or not complete: a piece of states (2, "
     "0)"},
    {"a gradient leaves before the norm", BASE_HOST_UPDATES, 0, ACT_EVICT, 0, -1, MOVE_UP, 1,
     "EVICT unit -1 storage 0 micro-batch -1: not there, or not complete: the norm of the gradient "
     "(0, 0)"},
    {"parameters that do not come", BASE_HOST_UPDATES, 0, ACT_FETCH, 4, -1, DROP, 0,
     "PREFETCH unit -1 storage 4 micro-batch -1: not there, or not complete: the newest version "
     "(4, 0)"},
    {"parameters that do not come for a use", BASE_FAR, 0, ACT_PREFETCH, 3, LAST, DROP, 0,
     "ACQUIRE unit -1 storage 3 micro-batch -1: not there, or not complete: a slot of parameters "
     "(1, 0)"},
    {"parameters into a room in use", BASE_FAR, 0, ACT_PREFETCH, 4, -1, MOVE_UP, 2,
     "PREFETCH unit -1 storage 4 micro-batch -1: the place is taken: a slot of parameters (0, 0)"},
    {"activations that do not leave", BASE_FAR, 0, ACT_EVICT_STASH, -1, -1, DROP, 0,
     "FETCH_STASH unit 1 storage -1 micro-batch 0: not there, or not complete: activations on the "
     "host (1, 0)"},
    {"activations that do not come back", BASE_FAR, 0, ACT_FETCH_STASH, -1, LAST, DROP, 0,
     "BACKWARD_INPUT unit 1 storage -1 micro-batch 1: not there, or not complete: a slot of the "
     "stash (1, 0)"},
    {"activations that come too early", BASE_FAR, 0, ACT_FETCH_STASH, -1, -1, MOVE_UP, 4,
     "BACKWARD_INPUT unit 4 storage -1 micro-batch 0: not there, or not complete: a slot of the "
     "stash (0, 0)"},
    {"activations that nobody has made", BASE_FAR, 0, ACT_FETCH_STASH, -1, -1, TO_FRONT, 0,
     "FETCH_STASH unit 2 storage -1 micro-batch 0: not there, or not complete: activations on the "
     "host (2, 0)"},
    {"an input that does not leave", BASE_FAR_INPUTS, 0, ACT_EVICT_STASH, -1, -1, DROP, 0,
     "FETCH_STASH unit 1 storage -1 micro-batch 0: not there, or not complete: activations on the "
     "host (1, 0)"},
    {"an input that does not come back", BASE_FAR_INPUTS, 0, ACT_FETCH_STASH, -1, LAST, DROP, 0,
     "RECOMPUTE unit 1 storage -1 micro-batch 1: not there, or not complete: a slot of the stash "
     "(1, 0)"},
    {"an input that comes too early", BASE_FAR_INPUTS, 0, ACT_FETCH_STASH, -1, -1, MOVE_UP, 4,
     "BACKWARD_INPUT unit 4 storage -1 micro-batch 0: not there, or not complete: a slot of the "
     "stash (0, 0)"},
    {"an input before it is made", BASE_FAR_INPUTS, 0, ACT_EVICT_STASH, -1, -1, TO_FRONT, 0,
     "EVICT_STASH unit 1 storage -1 micro-batch 0: not there, or not complete: a slot of the stash "
     "(1, 0)"},
    {"parameters before their update", BASE_HOST_UPDATES, 0, ACT_FETCH, 2, -1, MOVE_UP, 1,
     "FETCH unit -1 storage 2 micro-batch -1: not there, or not complete: a piece of states (2, "
     "0)"},
    // sums of gradients on the host: of two ranks, and of one, where they come back
    {"a sum that does not leave", BASE_SUMS, 0, ACT_EVICT_SUM, 5, -1, DROP, 0,
     "NORM unit -1 storage -1 micro-batch -1: not there, or not complete: the sum on the host (5, "
     "0)"},
    {"a sum of wte that does not leave", BASE_SUMS, 0, ACT_EVICT_SUM, 0, -1, DROP, 0,
     "NORM unit -1 storage -1 micro-batch -1: not there, or not complete: the sum on the host (0, "
     "0)"},
    {"a sum that leaves twice", BASE_SUMS, 1, ACT_EVICT_SUM, 4, -1, REPEAT, 0,
     "rank 1: EVICT_SUM unit -1 storage 4 micro-batch -1: not there, or not complete: a gradient "
     "(0, 0)"},
    {"a sum that leaves before it is one", BASE_SUMS, 0, ACT_EVICT_SUM, 6, -1, TO_FRONT, 0,
     "EVICT_SUM unit -1 storage 6 micro-batch -1: not there, or not complete: a gradient (-7, 0)"},
    {"the last sum stays", BASE_SUMS, 0, ACT_EVICT_SUM, 0, LAST, DROP, 0,
     "NORM unit -1 storage -1 micro-batch -1: not there, or not complete: the sum on the host (0, "
     "0)"},
    {"a piece of a gradient before the norm", BASE_SUMS, 0, ACT_FETCH, 0, -1, MOVE_UP, 1,
     "FETCH unit -1 storage 0 micro-batch -1: not there, or not complete: the norm of the gradient "
     "(0, 0)"},
    {"a sum that does not come back", BASE_SUMS_ALONE, 0, ACT_FETCH_SUM, 5, -1, DROP, 0,
     "REDUCE unit -1 storage 5 micro-batch 1: not there, or not complete: a gradient (1, 0)"},
    {"a sum that comes back twice", BASE_SUMS_ALONE, 0, ACT_FETCH_SUM, 3, -1, REPEAT, 0,
     "FETCH_SUM unit -1 storage 3 micro-batch -1: the place is taken: a gradient (1, 0)"},
    {"a sum that comes into a room in use", BASE_SUMS_ALONE, 0, ACT_FETCH_SUM, 3, -1, MOVE_UP, 3,
     "FETCH_SUM unit -1 storage 3 micro-batch -1: the place is taken: a gradient (1, 0)"},
    // updates by the gradient of the step before
    {"a delayed update after its gradient", BASE_DELAYED, 0, ACT_UPDATE, 6, -1, MOVE_DOWN, 60,
     "UPDATE unit -1 storage 6 micro-batch -1: not there, or not complete: the sum on the host (6, "
     "0)"},
    {"no delayed update", BASE_DELAYED, 0, ACT_UPDATE, 3, -1, DROP, 0,
     "FETCH unit -1 storage 3 micro-batch -1: not there, or not complete: a piece of states (3, "
     "0)"},
    {"a delayed update twice", BASE_DELAYED, 1, ACT_UPDATE, 2, -1, REPEAT, 0,
     "rank 1: UPDATE unit -1 storage 2 micro-batch -1: not there, or not complete: the sum on the "
     "host (2, 0)"},
    {"fetched before the last use", BASE_DELAYED, 0, ACT_FETCH, 2, -1, TO_FRONT, 0,
     "FETCH unit -1 storage 2 micro-batch -1: not there, or not complete: a piece of states (2, "
     "0)"},
    {"new parameters that stay there", BASE_DELAYED, 0, ACT_FETCH, 4, -1, DROP, 0,
     "PREFETCH unit -1 storage 4 micro-batch -1: not there, or not complete: the newest version "
     "(4, 0)"},
    // states on disk
    {"a piece that is not read", BASE_DEVICE_READS, 0, ACT_READ, 2, -1, DROP, 0,
     "FETCH unit -1 storage 2 micro-batch -1: not there, or not complete: a piece from the disk "
     "(2, 0)"},
    {"a piece that the host does not read", BASE_HOST_READS, 0, ACT_READ, 2, -1, DROP, 0,
     "UPDATE unit -1 storage 2 micro-batch -1: not there, or not complete: a piece from the disk "
     "(2, 0)"},
    {"a piece read twice", BASE_DEVICE_READS, 0, ACT_READ, 1, -1, REPEAT, 0,
     "READ unit -1 storage 1 micro-batch -1: not there, or not complete: the number of pieces (0, "
     "1)"},
    {"a piece read early", BASE_HOST_READS, 0, ACT_READ, 3, -1, TO_FRONT, 0,
     "READ unit -1 storage 2 micro-batch -1: all are taken: buffers of the disk"},
    {"a piece that is not written", BASE_DEVICE_READS, 0, ACT_WRITE, 0, -1, DROP, 0,
     "READ unit -1 storage 3 micro-batch -1: all are taken: buffers of the disk"},
    {"the last piece is not written", BASE_HOST_READS, 0, ACT_WRITE, 4, -1, DROP, 0,
     "at the end: unit -1 storage -1 micro-batch -1: left over"},
    {"a piece written before it is back", BASE_DEVICE_READS, 0, ACT_WRITE, 2, -1, MOVE_UP, 1,
     "WRITE unit -1 storage 2 micro-batch -1: not there, or not complete: a piece from the disk "
     "(2, 0)"},
    {"a piece written twice", BASE_HOST_READS, 0, ACT_WRITE, 4, -1, REPEAT, 0,
     "WRITE unit -1 storage 4 micro-batch -1: not there, or not complete: the number of pieces (4, "
     "4)"},
    // clipping by the norm over all units
    {"no clipping", BASE_FLAT, 0, ACT_CLIP, 0, 0, DROP, 0,
     "BACKWARD_WEIGHT unit 3 storage -1 micro-batch 0: not there, or not complete: factors of "
     "samples (0, 0)"},
    {"clipped twice", BASE_FLAT, 0, ACT_CLIP, 0, 1, REPEAT, 0,
     "CLIP unit 0 storage -1 micro-batch 1: the place is taken: samples (-1, 1)"},
    {"clipped before the last input part", BASE_FLAT, 0, ACT_CLIP, 0, 0, MOVE_UP, 2,
     "CLIP unit 0 storage -1 micro-batch 0: not there, or not complete: norms of samples (0, 0)"},
    {"a weight part before clipping", BASE_FLAT, 0, ACT_BACKWARD_WEIGHT, 3, 0, MOVE_UP, 1,
     "BACKWARD_WEIGHT unit 3 storage -1 micro-batch 0: not there, or not complete: factors of "
     "samples (0, 0)"},
    {"clipped for the other micro-batch", BASE_FLAT, 0, ACT_CLIP, 0, 0, MICRO, 1,
     "CLIP unit 0 storage -1 micro-batch 1: not there, or not complete: norms of samples (0, 0)"},
    // messages
    {"sends that cross", BASE_SENDS, 0, ACT_FORWARD, 0, 0, NOTHING, 0, "deadlock"},
    {"receives that wait for each other", BASE_RECEIVES, 0, ACT_FORWARD, 0, 0, NOTHING, 0,
     "deadlock"},
    {"activation not sent", BASE_TWO, 0, ACT_SEND_FORWARD, 1, 0, DROP, 0, "deadlock"},
    {"activation not received", BASE_TWO, 1, ACT_RECV_FORWARD, 1, 1, DROP, 0,
     "rank 0: SEND_FORWARD unit 1 storage -1 micro-batch 1: deadlock"},
    {"gradient not sent", BASE_TWO, 1, ACT_SEND_BACKWARD, 2, 1, DROP, 0, "deadlock"},
    {"gradient not received", BASE_TWO, 0, ACT_RECV_BACKWARD, 2, 0, DROP, 0,
     "BACKWARD_INPUT unit 1 storage -1 micro-batch 0: not there, or not complete: the gradient of "
     "its output (2, 0)"},
    {"last gradient neither sent nor received", BASE_TWO, 0, ACT_RECV_BACKWARD, 2, 1, DROP_MESSAGE,
     0,
     "BACKWARD_INPUT unit 1 storage -1 micro-batch 1: not there, or not complete: the gradient of "
     "its output (2, 1)"},
    {"activation neither sent nor received", BASE_TWO, 0, ACT_SEND_FORWARD, 1, 0, DROP_MESSAGE, 0,
     "rank 1: FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"sent to itself", BASE_TWO, 0, ACT_SEND_FORWARD, 1, 0, PEER, 0,
     "SEND_FORWARD unit 1 storage -1 micro-batch 0: deadlock"},
    {"sent to nobody", BASE_TWO, 0, ACT_SEND_FORWARD, 1, 0, PEER, -1, "(peer -1)"},
    {"sent beyond the last rank", BASE_TWO, 0, ACT_SEND_FORWARD, 1, 0, PEER, 2, "(peer 2)"},
    {"received from the wrong rank", BASE_THREE, 1, ACT_RECV_FORWARD, 1, 1, PEER, 2, "deadlock"},
    {"sent to the wrong rank", BASE_THREE, 1, ACT_SEND_BACKWARD, 2, 0, PEER, 2, "deadlock"},
    {"more rows sent than received", BASE_TWO, 0, ACT_SEND_FORWARD, 1, 0, ROWS, 3, "deadlock"},
    {"other rows received than sent", BASE_TWO, 0, ACT_RECV_BACKWARD, 2, 1, FIRST_ROW, 1,
     "deadlock"},
    {"sent as another micro-batch", BASE_TWO, 0, ACT_SEND_FORWARD, 1, 0, MICRO, 1, "deadlock"},
    {"received as another micro-batch", BASE_THREE, 2, ACT_RECV_FORWARD, 3, 0, MICRO, 1,
     "deadlock"},
    {"received as another unit", BASE_TWO, 1, ACT_RECV_FORWARD, 1, 0, UNIT, 2, "deadlock"},
    {"sent as a gradient", BASE_TWO, 0, ACT_SEND_FORWARD, 1, 0, KIND, ACT_SEND_BACKWARD,
     "deadlock"},
    {"unit of a message out of range", BASE_TWO, 1, ACT_SEND_BACKWARD, 2, 0, UNIT, 9, "deadlock"},
    {"output sent before it is computed", BASE_TWO, 0, ACT_SEND_FORWARD, 1, 0, TO_FRONT, 0,
     "SEND_FORWARD unit 1 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"gradient sent before it is computed", BASE_THREE, 2, ACT_SEND_BACKWARD, 4, 0, MOVE_UP, 10,
     "SEND_BACKWARD unit 4 storage -1 micro-batch 0: not there, or not complete: the gradient of "
     "its output (4, 0)"},
    {"sent after the norm", BASE_TWO, 1, ACT_SEND_BACKWARD, 2, 1, TO_END, 0, "deadlock"},
    {"too few slots for a pipeline", BASE_TWO, 0, ACT_FORWARD, 0, 0, SLOTS, 1,
     "FORWARD unit 0 storage -1 micro-batch 1: the place is taken: activations (0, 0)"},
    // stages of unequal width: 2 units each. SPLIT: rank 0, then 1 and 2. JOIN: ranks 0 and 1, then
    // 2. Micro-batch 0 has samples 0..2, of which the first replica of two has sample 0, the second
    // samples 1 and 2
    {"a part of an input missing", BASE_JOIN, 2, ACT_RECV_FORWARD, 1, 0, DROP_MESSAGE, 0,
     "rank 2: FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"the only part of an input missing", BASE_SPLIT, 2, ACT_RECV_FORWARD, 1, 2, DROP_MESSAGE, 0,
     "rank 2: FORWARD unit 2 storage -1 micro-batch 2: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"a part of a gradient missing", BASE_SPLIT, 0, ACT_RECV_BACKWARD, 2, 1, DROP_MESSAGE, 0,
     "rank 0: BACKWARD_INPUT unit 1 storage -1 micro-batch 1: not there, or not complete: the "
     "gradient of its output (2, 1)"},
    {"a part sent and not received", BASE_JOIN, 2, ACT_RECV_FORWARD, 1, 1, DROP, 0, "deadlock"},
    {"a part received and not sent", BASE_SPLIT, 2, ACT_SEND_BACKWARD, 2, 0, DROP, 0, "deadlock"},
    {"a part of a part", BASE_SPLIT, 2, ACT_RECV_FORWARD, 1, 0, MESSAGE_ROWS, 1,
     "rank 2: FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"a part of a part of a gradient", BASE_SPLIT, 2, ACT_SEND_BACKWARD, 2, 0, MESSAGE_ROWS, 1,
     "BACKWARD_INPUT unit 1 storage -1 micro-batch 0: not there, or not complete: the gradient of "
     "its output (2, 0)"},
    {"a part twice", BASE_JOIN, 2, ACT_RECV_FORWARD, 1, 0, REPEAT_MESSAGE, 0,
     "rank 2: FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"a part of a gradient twice", BASE_SPLIT, 2, ACT_SEND_BACKWARD, 2, 2, REPEAT_MESSAGE, 0,
     "rank 0: BACKWARD_INPUT unit 1 storage -1 micro-batch 2: not there, or not complete: the "
     "gradient of its output (2, 0)"},
    {"a part that covers another", BASE_SPLIT, 1, ACT_RECV_FORWARD, 1, 0, MESSAGE_ROWS, 2,
     "rank 1: FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"rows that the sender does not compute", BASE_JOIN, 0, ACT_SEND_FORWARD, 1, 0, MESSAGE_ROWS, 2,
     "rank 0: SEND_FORWARD unit 1 storage -1 micro-batch 0: not there, or not complete: the input "
     "of a unit (2, 0)"},
    {"rows from others of the sender's", BASE_JOIN, 1, ACT_SEND_FORWARD, 1, 1, MESSAGE_FIRST_ROW, 3,
     "SEND_FORWARD unit 1 storage -1 micro-batch 1: not there, or not complete: the input of a "
     "unit (2, 1)"},
    {"gradients that the sender does not compute", BASE_SPLIT, 1, ACT_SEND_BACKWARD, 2, 1,
     MESSAGE_ROWS, 2,
     "rank 1: SEND_BACKWARD unit 2 storage -1 micro-batch 1: not there, or not complete: the "
     "gradient of its output (2, 1)"},
    {"gradients of rows that the receiver does not compute", BASE_JOIN, 2, ACT_SEND_BACKWARD, 2, 0,
     MESSAGE_FIRST_ROW, 1,
     "rank 0: BACKWARD_INPUT unit 1 storage -1 micro-batch 0: not there, or not complete: the "
     "gradient of its output (2, 0)"},
    {"a message of no rows", BASE_SPLIT, 1, ACT_RECV_FORWARD, 1, 0, MESSAGE_ROWS, 0,
     "FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a unit (2, "
     "0)"},
    {"rows of another micro-batch", BASE_SPLIT, 1, ACT_RECV_FORWARD, 1, 0, MESSAGE_FIRST_ROW, 3,
     "SEND_FORWARD unit 1 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"another micro-batch's message", BASE_SPLIT, 1, ACT_RECV_FORWARD, 1, 0, MESSAGE_MICRO, 1,
     "rank 0: SEND_FORWARD unit 1 storage -1 micro-batch 1: not there, or not complete: the input "
     "of a unit (2, 1)"},
    {"a message of no micro-batch", BASE_SPLIT, 1, ACT_RECV_FORWARD, 1, 0, MESSAGE_MICRO, 3,
     "a field is out of range"},
    {"the output of the unit before", BASE_SPLIT, 1, ACT_RECV_FORWARD, 1, 0, MESSAGE_UNIT, 0,
     "rank 1: FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"the gradient of the unit after", BASE_SPLIT, 1, ACT_SEND_BACKWARD, 2, 0, MESSAGE_UNIT, 3,
     "BACKWARD_INPUT unit 1 storage -1 micro-batch 0: not there, or not complete: the gradient of "
     "its output (2, 0)"},
    {"sent to the other replica", BASE_SPLIT, 0, ACT_SEND_FORWARD, 1, 0, PEER, 2, "deadlock"},
    {"received from the other replica", BASE_JOIN, 2, ACT_RECV_FORWARD, 1, 0, PEER, 1, "deadlock"},
    {"one end of other rows", BASE_JOIN, 2, ACT_RECV_FORWARD, 1, 0, ROWS, 2, "deadlock"},
    {"one end from another row", BASE_SPLIT, 0, ACT_RECV_BACKWARD, 2, 0, FIRST_ROW, 1, "deadlock"},
    {"one end of another micro-batch", BASE_JOIN, 1, ACT_SEND_FORWARD, 1, 2, MICRO, 1, "deadlock"},
    {"an input sent as a gradient", BASE_SPLIT, 0, ACT_SEND_FORWARD, 1, 1, KIND, ACT_SEND_BACKWARD,
     "deadlock"},
    {"sent before it is computed", BASE_JOIN, 1, ACT_SEND_FORWARD, 1, 0, TO_FRONT, 0,
     "rank 1: SEND_FORWARD unit 1 storage -1 micro-batch 0: not there, or not complete: the input "
     "of a unit (2, 0)"},
    {"a gradient sent before it is computed", BASE_SPLIT, 2, ACT_SEND_BACKWARD, 2, 0, MOVE_UP, 4,
     "SEND_BACKWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the gradient of "
     "its output (2, 0)"},
    {"a gradient sent at the end of the step", BASE_SPLIT, 2, ACT_SEND_BACKWARD, 2, 0, TO_END, 0,
     "deadlock"},
    {"an input received before a gradient is sent", BASE_JOIN, 2, ACT_SEND_BACKWARD, 2, 0,
     MOVE_DOWN, 40, "deadlock"},
    {"received after its use", BASE_JOIN, 2, ACT_RECV_FORWARD, 1, 0, MOVE_DOWN, 5,
     "rank 2: FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"a slot less than policy A takes", BASE_SPLIT, 0, ACT_FORWARD, 0, 0, SLOTS, 1,
     "rank 0: FORWARD unit 0 storage -1 micro-batch 1: the place is taken: activations (0, 0)"},
    {"no place for the input that comes ahead", BASE_SPLIT, 2, ACT_FORWARD, 2, 0, INPUTS, 1,
     "rank 2: BACKWARD_INPUT unit 2 storage -1 micro-batch 0: not there, or not complete: the "
     "input of a unit (2, 0)"},
    {"no place for a gradient", BASE_JOIN, 1, ACT_FORWARD, 0, 0, GRADIENTS, 0,
     "rank 1: RECV_BACKWARD unit 2 storage -1 micro-batch 0: there is no place for the gradient of "
     "its output"},
    {"a replica without the last weight part", BASE_SPLIT, 2, ACT_BACKWARD_WEIGHT, 2, 2, DROP, 0,
     "rank 2: REDUCE unit -1 storage 3 micro-batch -1: not there, or not complete: a gradient (-4, "
     "0)"},
    {"a replica of other rows", BASE_SPLIT, 2, ACT_FORWARD, 2, 0, FIRST_ROW, 0,
     "rank 2: FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"a replica with a row less", BASE_SPLIT, 2, ACT_FORWARD, 2, 0, ROWS, 1,
     "rank 2: FORWARD unit 2 storage -1 micro-batch 0: not there, or not complete: the input of a "
     "unit (2, 0)"},
    {"a stage that does not meet the others", BASE_SPLIT, 1, ACT_NORM, -1, -1, DROP, 0,
     "rank 1: UPDATE unit -1 storage 0 micro-batch -1: not there, or not complete: the norm of the "
     "gradient (0, 0)"},
    {"wte not reduced on the last stage", BASE_SPLIT, 2, ACT_REDUCE, 0, -1, DROP, 0,
     "rank 0: REDUCE unit -1 storage 0 micro-batch -1: deadlock"},
    {"wte reduced in another order on a replica", BASE_SPLIT, 2, ACT_REDUCE, 3, -1, MOVE_DOWN, 2,
     "rank 0: RECV_BACKWARD unit 2 storage -1 micro-batch 2: deadlock"},
    {"wte reduced before the last gradient is sent", BASE_TWO, 1, ACT_REDUCE, 0, -1, MOVE_UP, 1,
     "RECV_BACKWARD unit 2 storage -1 micro-batch 1: deadlock"},
    {"wte not gathered on the last stage", BASE_JOIN, 2, ACT_PREFETCH, 0, -1, DROP, 0,
     "rank 0: PREFETCH unit -1 storage 0 micro-batch -1: deadlock"},
    {"a storage of another stage updated", BASE_SPLIT, 0, ACT_UPDATE, 2, -1, STORAGE, 3,
     "rank 0: UPDATE unit -1 storage 3 micro-batch -1: a field is out of range"},
    {"remade for the next micro-batch", BASE_REMADE, 0, ACT_RECOMPUTE, 1, 0, MICRO, 1,
     "rank 0: RECOMPUTE unit 1 storage -1 micro-batch 1: not there, or not complete: activations "
     "(1, 1)"},
    {"not remade in a pipeline", BASE_REMADE, 2, ACT_RECOMPUTE, 2, 1, DROP, 0,
     "rank 2: BACKWARD_INPUT unit 2 storage -1 micro-batch 1: not there, or not complete: "
     "recomputed activations (0, 0)"},
    {"remade, then overwritten by a forward", BASE_REMADE, 0, ACT_RECOMPUTE, 1, 1, MOVE_UP, 3,
     "rank 0: BACKWARD_INPUT unit 1 storage -1 micro-batch 1: not there, or not complete: "
     "recomputed activations (0, 0)"},
    {"activations of zero bubble remade", BASE_ZERO_BUBBLE, 0, ACT_FORWARD, 0, 0, REMAKES, 1,
     "BACKWARD_INPUT unit 2 storage -1 micro-batch 0: not there, or not complete: recomputed "
     "activations (0, 0)"},
    {"a weight part before its input part", BASE_ZERO_BUBBLE, 1, ACT_BACKWARD_WEIGHT, 3, 0,
     TO_FRONT, 0,
     "BACKWARD_WEIGHT unit 3 storage -1 micro-batch 0: not there, or not complete: activations (3, "
     "0)"},
    {"no place for weight parts that wait", BASE_ZERO_BUBBLE, 2, ACT_FORWARD, 2, 0, WORKS, 1,
     "BACKWARD_INPUT unit 2 storage -1 micro-batch 0: all are taken: places of weight parts"},
    {"no clipping of a stage", BASE_STAGE_CLIP, 0, ACT_CLIP, 0, 1, DROP, 0,
     "rank 0: BACKWARD_WEIGHT unit 1 storage -1 micro-batch 1: not there, or not complete: factors "
     "of samples (0, 0)"},
    {"clipped as another micro-batch", BASE_STAGE_CLIP, 1, ACT_CLIP, 2, 0, MICRO, 1,
     "rank 1: CLIP unit 2 storage -1 micro-batch 1: not there, or not complete: norms of samples "
     "(0, 0)"},
    {"clipped before the norms of the stage", BASE_STAGE_CLIP, 2, ACT_CLIP, 2, 1, MOVE_UP, 3,
     "rank 2: CLIP unit 2 storage -1 micro-batch 1: not there, or not complete: norms of samples "
     "(0, 0)"},
    // clipping across stages. TIED: rank 0, then 1 and 2; TIED_STAGES: 0 and 1, then 2; TIED_ALL:
    // one after another. The head is unit 3
    {"a norm not sent", BASE_TIED, 1, ACT_SEND_NORM, 3, 0, DROP, 0, "deadlock"},
    {"a norm not received", BASE_TIED, 0, ACT_RECV_NORM, 3, 1, DROP, 0,
     "CLIP unit 0 storage -1 micro-batch 1: not there, or not complete: norms of another stage (3, "
     "1)"},
    {"a norm neither sent nor received", BASE_TIED, 0, ACT_RECV_NORM, 3, 0, DROP_MESSAGE, 0,
     "rank 0: CLIP unit 0 storage -1 micro-batch 0: not there, or not complete: norms of another "
     "stage (3, 0)"},
    {"a norm of some samples only", BASE_TIED, 2, ACT_SEND_NORM, 3, 1, MESSAGE_ROWS, 1,
     "CLIP unit 0 storage -1 micro-batch 1: not there, or not complete: norms of another stage (3, "
     "1)"},
    {"a norm of another stage missing", BASE_TIED_ALL, 1, ACT_SEND_NORM, 2, 1, DROP_MESSAGE, 0,
     "CLIP unit 0 storage -1 micro-batch 1: not there, or not complete: norms of another stage (2, "
     "1)"},
    {"a norm twice", BASE_TIED, 2, ACT_SEND_NORM, 3, 0, REPEAT_MESSAGE, 0,
     "rank 0: CLIP unit 0 storage -1 micro-batch 0: not there, or not complete: norms of another "
     "stage (3, 0)"},
    {"a norm sent before it is known", BASE_TIED_ALL, 2, ACT_SEND_NORM, 3, 0, MOVE_UP, 3,
     "SEND_NORM unit 3 storage -1 micro-batch 0: not there, or not complete: norms of samples (0, "
     "0)"},
    {"a norm after it is used", BASE_TIED_ALL, 0, ACT_CLIP, 0, 0, MOVE_UP, 1,
     "CLIP unit 0 storage -1 micro-batch 0: not there, or not complete: norms of another stage (2, "
     "0)"},
    {"factors made before the stage's own norms", BASE_TIED, 0, ACT_CLIP, 0, 0, MOVE_UP, 3,
     "CLIP unit 0 storage -1 micro-batch 0: not there, or not complete: the gradient of its output "
     "(-2, 0)"},
    {"norms of another micro-batch", BASE_TIED, 1, ACT_SEND_NORM, 3, 0, MESSAGE_MICRO, 1,
     "SEND_NORM unit 3 storage -1 micro-batch 1: not there, or not complete: the head's part of "
     "norms (0, 1)"},
    {"norms of a stage that has a group of its own", BASE_TIED_STAGES, 2, ACT_SEND_NORM, 3, 0,
     MESSAGE_UNIT, 2,
     "CLIP unit 0 storage -1 micro-batch 0: not there, or not complete: norms of another stage (3, "
     "0)"},
    {"norms of other rows", BASE_TIED_STAGES, 2, ACT_SEND_NORM, 3, 0, MESSAGE_ROWS, 2,
     "CLIP unit 0 storage -1 micro-batch 0: not there, or not complete: norms of another stage (3, "
     "0)"},
    {"no factors are made", BASE_TIED, 0, ACT_CLIP, 0, 1, DROP, 0,
     "BACKWARD_WEIGHT unit 0 storage -1 micro-batch 1: not there, or not complete: factors of "
     "samples (0, 1)"},
    {"factors made before the embedding's gradient is there", BASE_TIED_ALL, 0, ACT_RECV_BACKWARD,
     1, 0, DROP_MESSAGE, 0,
     "CLIP unit 0 storage -1 micro-batch 0: not there, or not complete: the gradient of its output "
     "(1, 0)"},
    {"a factor sent before it is made", BASE_TIED, 0, ACT_SEND_FACTOR, 3, 0, MOVE_UP, 3,
     "SEND_FACTOR unit 3 storage -1 micro-batch 0: not there, or not complete: factors of samples "
     "(0, 0)"},
    {"a factor not sent", BASE_TIED_STAGES, 1, ACT_SEND_FACTOR, 3, 2, DROP, 0, "deadlock"},
    {"a factor not received", BASE_TIED_STAGES, 2, ACT_RECV_FACTOR, 3, 1, DROP, 0,
     "TIED unit 3 storage -1 micro-batch 1: not there, or not complete: received factors (3, 1)"},
    {"a factor neither sent nor received", BASE_TIED_STAGES, 2, ACT_RECV_FACTOR, 3, 1, DROP_MESSAGE,
     0,
     "rank 2: TIED unit 3 storage -1 micro-batch 1: not there, or not complete: received factors "
     "(3, 1)"},
    {"a factor of some samples only", BASE_TIED_STAGES, 1, ACT_SEND_FACTOR, 3, 0, MESSAGE_ROWS, 1,
     "TIED unit 3 storage -1 micro-batch 0: not there, or not complete: received factors (3, 0)"},
    {"a factor twice", BASE_TIED, 2, ACT_RECV_FACTOR, 3, 1, REPEAT_MESSAGE, 0,
     "rank 2: TIED unit 3 storage -1 micro-batch 1: not there, or not complete: received factors "
     "(3, 1)"},
    {"a stage without its factors", BASE_TIED_ALL, 1, ACT_RECV_FACTOR, 2, 0, DROP_MESSAGE, 0,
     "rank 1: BACKWARD_WEIGHT unit 2 storage -1 micro-batch 0: not there, or not complete: "
     "received factors (2, 0)"},
    {"a stage that sums before its factors come", BASE_TIED_ALL, 1, ACT_BACKWARD_WEIGHT, 2, 0,
     MOVE_UP, 12,
     "BACKWARD_WEIGHT unit 2 storage -1 micro-batch 0: not there, or not complete: received "
     "factors (2, 0)"},
    {"a classifier that sums before its factors come", BASE_UNTIED_ALL, 2, ACT_BACKWARD_WEIGHT, 3,
     0, MOVE_UP, 12,
     "BACKWARD_WEIGHT unit 3 storage -1 micro-batch 0: not there, or not complete: received "
     "factors (3, 0)"},
    {"the classifier's part before its factor", BASE_TIED, 1, ACT_TIED, 3, 0, MOVE_UP, 10,
     "TIED unit 3 storage -1 micro-batch 0: not there, or not complete: received factors (3, 0)"},
    {"no classifier's part", BASE_TIED, 1, ACT_TIED, 3, 1, DROP, 0,
     "rank 1: REDUCE unit -1 storage 0 micro-batch -1: not there, or not complete: a gradient (-1, "
     "0)"},
    {"the classifier's part twice", BASE_TIED_ALL, 2, ACT_TIED, 3, 1, REPEAT, 0,
     "REDUCE unit -1 storage 0 micro-batch -1: not there, or not complete: a gradient (-1, 0)"},
    {"the classifier's part of other rows", BASE_TIED, 2, ACT_TIED, 3, 1, ROWS, 1,
     "TIED unit 3 storage -1 micro-batch 1: not there, or not complete: the head's part of norms "
     "(0, 1)"},
    {"wte leaves before the classifier's part", BASE_TIED, 2, ACT_TIED, 3, 2, MOVE_DOWN, 1,
     "REDUCE unit -1 storage 0 micro-batch -1: not there, or not complete: a gradient (-1, 0)"},
    {"no place for what waits for factors", BASE_TIED, 1, ACT_FORWARD, 3, 0, CLIPS, 1,
     "rank 1: TIED unit 3 storage -1 micro-batch 0: not there, or not complete: the head's part of "
     "norms (0, 0)"},
    {"no place for norms", BASE_TIED, 0, ACT_FORWARD, 0, 0, CLIPS, 0,
     "rank 0: RECV_NORM unit 3 storage -1 micro-batch 0: there is no place for norms of another "
     "stage"},
    {"no place for a stage's norms", BASE_TIED_ALL, 1, ACT_FORWARD, 1, 0, CLIPS, 1,
     "rank 1: BACKWARD_WEIGHT unit 2 storage -1 micro-batch 0: not there, or not complete: norms "
     "of samples (2, 0)"},
    {"no clipping of a stage of a pipeline", BASE_TIED_STAGES, 2, ACT_CLIP, 2, 0, DROP, 0,
     "rank 2: BACKWARD_WEIGHT unit 3 storage -1 micro-batch 0: not there, or not complete: factors "
     "of samples (0, 0)"},
};
enum { DAMAGES = (int)(sizeof damages / sizeof damages[0]) };

static int find_action(const Schedule *s, const Damage *d) {
    int found = -1;
    for (int i = 0; i < s->count; i++) {
        const Action *a = &s->actions[i];
        bool place = d->where < 0 || a->unit == d->where || a->storage == d->where;
        bool match = a->kind == d->kind && place && (d->micro < 0 || a->micro == d->micro);
        if (match && (found < 0 || d->micro == LAST)) { found = i; }
    }
    if (found < 0) { fail_msg("%s: there is no such action", d->name); }
    return found;
}
static void move_action(Schedule *s, int from, int to) {
    Action a = s->actions[from];
    for (int i = from; i != to; i += to > from ? 1 : -1) {
        s->actions[i] = s->actions[to > from ? i + 1 : i - 1];
    }
    s->actions[to] = a;
}
static void drop_action(Schedule *s, int i) {
    move_action(s, i, s->count - 1);
    s->count--;
}
static void repeat_action(Schedule *s, int i) {
    schedule_add(s, s->actions[i]);
    move_action(s, s->count - 1, i);
}
// The other end of a message.
static int find_end(const Program *p, int rank, Action a) {
    ActionKind kind = action_sends(a.kind) ? (ActionKind)(a.kind + 1) : (ActionKind)(a.kind - 1);
    for (int i = 0; i < p->rank[a.peer].count; i++) {
        const Action *b = &p->rank[a.peer].actions[i];
        if (b->kind == kind && b->peer == rank && b->unit == a.unit && b->micro == a.micro &&
            b->first_row == a.first_row) {
            return i;
        }
    }
    fail_msg("a message has one end");
    return -1;
}
static void damage_message(Program *p, const Damage *d, int i) {
    Schedule *s = &p->rank[d->rank], *t = &p->rank[s->actions[i].peer];
    int j = find_end(p, d->rank, s->actions[i]);
    Action *a = &s->actions[i], *b = &t->actions[j];
    switch (d->change) {
    case DROP_MESSAGE: drop_action(s, i), drop_action(t, j); break;
    case REPEAT_MESSAGE: repeat_action(s, i), repeat_action(t, j); break;
    case MESSAGE_ROWS: a->rows = b->rows = d->value; break;
    case MESSAGE_FIRST_ROW: a->first_row = b->first_row = d->value; break;
    case MESSAGE_MICRO: a->micro = b->micro = d->value; break;
    default: a->unit = b->unit = d->value; break;
    }
}
static void damage(Program *p, const Damage *d) {
    Schedule *s = &p->rank[d->rank];
    int i = find_action(s, d);
    Action *a = &s->actions[i];
    switch (d->change) {
    case NOTHING: break;
    case DROP: drop_action(s, i); break;
    case REPEAT: repeat_action(s, i); break;
    case SWAP: move_action(s, i, i + 1); break;
    case TO_FRONT: move_action(s, i, 0); break;
    case TO_END: move_action(s, i, s->count - 1); break;
    case MOVE_UP: move_action(s, i, i - d->value); break;
    case MOVE_DOWN: move_action(s, i, i + d->value); break;
    case DROP_MESSAGE:
    case REPEAT_MESSAGE:
    case MESSAGE_ROWS:
    case MESSAGE_FIRST_ROW:
    case MESSAGE_MICRO:
    case MESSAGE_UNIT: damage_message(p, d, i); break;
    case UNIT: a->unit = d->value; break;
    case STORAGE: a->storage = d->value; break;
    case MICRO: a->micro = d->value; break;
    case ROWS: a->rows = d->value; break;
    case FIRST_ROW: a->first_row = d->value; break;
    case VERSION: a->version = d->value; break;
    case PEER: a->peer = d->value; break;
    case COPIES: a->secondary = d->value; break;
    case KIND: a->kind = (ActionKind)d->value; break;
    case SLOTS: p->limits[d->rank].in_flight = d->value; break;
    case INPUTS: p->limits[d->rank].inputs = d->value; break;
    case GRADIENTS: p->limits[d->rank].gradients = d->value; break;
    case WORKS: p->limits[d->rank].works = d->value; break;
    case CLIPS: p->limits[d->rank].clips = d->value; break;
    case REMAKES: p->recompute = d->value; break;
    case MICRO_BATCHES: p->micro_batches = d->value; break;
    }
}
static void test_damage_is_refused(void **state) {
    (void)state;
    int wrong = 0;
    for (int i = 0; i < DAMAGES; i++) {
        const Damage *d = &damages[i];
        Program p = base_program(d->base);
        damage(&p, d);
        char error[400];
        bool valid = schedule_validate(&p, error, sizeof error);
        bool good = !valid && strstr(error, d->expected) && strstr(error, "rank ");
        if (!good) {
            print_error("%s: expected \"%s\", found %s\"%s\"\n", d->name, d->expected,
                        valid ? "VALID " : "", error);
            wrong++;
        }
        program_free(&p);
    }
    assert_int_equal(wrong, 0);
}

// -------------------------------------------------------------------------------------------------
// Random single mutations of drawn programs

typedef enum {
    DRAWN_SEQUENTIAL,
    DRAWN_PARTS,
    DRAWN_DEVICE_UPDATES,
    DRAWN_HOST_UPDATES,
    DRAWN_DEVICE_READS,
    DRAWN_HOST_READS,
    DRAWN_SUMS,
    DRAWN_DELAYED,
    DRAWN_STASH,
    DRAWN_MUON,
    DRAWN_MUON_OFFLOAD,
    DRAWN_UNIT_CLIP,
    DRAWN_FLAT_CLIP,
    DRAWN_EVALUATION,
    DRAWN_GPIPE,
    DRAWN_DAPPLE,
    DRAWN_DAPPLE_PARTS,
    DRAWN_ZERO_BUBBLE,
    DRAWN_CLIPS_UNITS,
    DRAWN_CLIPS_STAGES,
    DRAWN_CLIPS_ALL,
    DRAWN_KINDS
} DrawnKind;
static const char *const drawn_names[] = {"sequential, ZeRO 0 to 3",
                                          "blocks in parts",
                                          "offload, device updates",
                                          "offload, host updates",
                                          "disk, device updates",
                                          "disk, host updates",
                                          "offload, sums",
                                          "offload, delayed",
                                          "offload, activations",
                                          "Muon",
                                          "Muon, offload",
                                          "private, unit",
                                          "private, flat",
                                          "evaluation",
                                          "gpipe",
                                          "dapple",
                                          "dapple, blocks in parts",
                                          "zero-bubble",
                                          "pipeline, private, unit",
                                          "pipeline, private, stage",
                                          "pipeline, private, flat"};
static ZeroPolicy drawn_policy(DrawnKind kind, int ranks, MutationDraw *d) {
    const int stage = mutation_draw(d, 4);
    ZeroPolicy policy = ZERO_POLICY(stage, stage == 3 && ranks % 2 == 0 ? 2 : 1,
                                    mutation_draw(d, 4) == 0, true, false, NULL, NULL);
    const Offload *const of[] = {[DRAWN_DEVICE_UPDATES] = &coming,
                                 [DRAWN_HOST_UPDATES] = &far_away,
                                 [DRAWN_DEVICE_READS] = &stored,
                                 [DRAWN_HOST_READS] = &stored_far,
                                 [DRAWN_SUMS] = &sums,
                                 [DRAWN_DELAYED] = &one_step_late,
                                 [DRAWN_STASH] = &all_on_host,
                                 [DRAWN_MUON_OFFLOAD] = &coming,
                                 [DRAWN_KINDS] = NULL};
    policy.offload = of[kind];
    policy.matrices = kind == DRAWN_MUON || kind == DRAWN_MUON_OFFLOAD;
    return policy;
}
// Blocks of so many parts, with messages between them.
static void cut_blocks(Program *p, int parts) {
    p->map.parts = parts;
    schedule_lower_parts(p);
}
static Program drawn_pipeline(DrawnKind kind, const GptModel *m, int ranks, bool trains,
                              MutationDraw *d) {
    // units of the first stage, which has `wide` ranks
    const int first = 1 + mutation_draw(d, m->units - 1), wide = 1 + mutation_draw(d, ranks - 1);
    const Clips clips = kind == DRAWN_CLIPS_UNITS    ? CLIPS_UNITS
                        : kind == DRAWN_CLIPS_STAGES ? CLIPS_STAGES
                        : kind == DRAWN_CLIPS_ALL    ? CLIPS_ALL
                                                     : CLIPS_NOTHING;
    const PipelineKind built = kind == DRAWN_GPIPE         ? PIPELINE_GPIPE
                               : kind == DRAWN_ZERO_BUBBLE ? PIPELINE_ZERO_BUBBLE
                                                           : PIPELINE_DAPPLE;
    ZeroPolicy policy = drawn_policy(DRAWN_SEQUENTIAL, ranks, d);
    policy.quantized_gradients &= !m->arch->experts;
    policy.partition = 1;
    char text[40];
    snprintf(text, sizeof text, "%d:%d,%d:%d", first, wide, m->units - first, ranks - wide);
    PipelinePlan plan = {.placement = pipeline_placement(text, m->units, ranks),
                         .kind = built,
                         .warmup = mutation_draw(d, 2) ? WARMUP_A : WARMUP_B,
                         .micro_rows = 1 + mutation_draw(d, 4),
                         .micro_batches = 1 + mutation_draw(d, 4),
                         .depth = INT64_MAX,
                         .clips = clips};
    Program p;
    memset(&p, 0, sizeof p);
    p.map = test_unit_map(m, &policy, &plan.placement, clips != CLIPS_NOTHING);
    p.ranks = ranks;
    p.rank = calloc((size_t)ranks, sizeof(Schedule));
    const bool recompute = !clips && built != PIPELINE_ZERO_BUBBLE && mutation_draw(d, 2) &&
                           kind != DRAWN_DAPPLE_PARTS;
    plan.recompute = recompute;
    schedule_pipeline(&p, &plan, plan.micro_rows * plan.micro_batches - mutation_draw(d, 2),
                      trains);
    if (recompute && trains) { schedule_lower_recompute(&p); }
    zero_lower(&p, trains);
    if (kind == DRAWN_DAPPLE_PARTS) { cut_blocks(&p, 2 + mutation_draw(d, 2)); }
    placement_free(&plan.placement);
    return p;
}
static Program drawn_program(DrawnKind kind, uint64_t seed) {
    MutationDraw d = {seed, 0};
    const int layers = 2 + mutation_draw(&d, kind == DRAWN_STASH ? 3 : 2),
              ranks = 1 + mutation_draw(&d, 3);
    const bool few = kind == DRAWN_DEVICE_UPDATES || kind == DRAWN_HOST_UPDATES ||
                     kind == DRAWN_DEVICE_READS || kind == DRAWN_HOST_READS ||
                     kind == DRAWN_MUON_OFFLOAD;
    // of models with 5 storages, a tied table and 2 blocks, all states are on the host
    const GptModel m =
        few ? gpt_model(config_of(0, 2))
            : gpt_model(config_of(mutation_draw(&d, ARCHITECTURES),
                                  kind == DRAWN_SUMS || kind == DRAWN_DELAYED ? 4 : layers));
    const bool flat = kind == DRAWN_FLAT_CLIP;
    const Work work = {.samples = 1 + mutation_draw(&d, 9),
                       .rows = 1 + mutation_draw(&d, 3),
                       .recompute = !flat && mutation_draw(&d, 2) && kind != DRAWN_PARTS,
                       .style = flat                      ? CLIPPED_FLAT
                                : kind == DRAWN_UNIT_CLIP ? CLIPPED_BY_UNIT
                                                          : NOT_CLIPPED};
    if (kind >= DRAWN_GPIPE || (kind == DRAWN_EVALUATION && seed % 2)) {
        return drawn_pipeline(kind, &m, ranks + 1, kind != DRAWN_EVALUATION, &d);
    }
    ZeroPolicy policy = drawn_policy(kind, ranks, &d);
    policy.quantized_gradients &= !m.arch->experts; // which are refused together
    Program p = kind == DRAWN_EVALUATION ? evaluated(&m, ranks, &policy, work)
                                         : lowered(&m, ranks, &policy, work);
    if (kind == DRAWN_PARTS || (kind == DRAWN_EVALUATION && seed % 4 == 0)) {
        cut_blocks(&p, 2 + mutation_draw(&d, 2));
    }
    return p;
}
static void test_mutations_are_refused_or_harmless(void **state) {
    (void)state;
    const uint64_t seed = test_seed(1) << 20;
    const int programs = 25, each = all_tests() ? 2000 : 20;
    for (int kind = 0; kind < DRAWN_KINDS; kind++) {
        const MutationCase of = {.cyclic = NULL};
        Verdicts sum = {.all = 0};
        for (int i = 0; i < programs; i++) {
            char error[900];
            Program p = drawn_program((DrawnKind)kind, seed + i);
            if (!schedule_validate(&p, error, sizeof error)) {
                fail_msg("%s %d: %s", drawn_names[kind], i, error);
            }
            mutate_program(&p, &of, drawn_names[kind], each, seed + i, &sum);
            program_free(&p);
        }
        mutations_print(drawn_names[kind], &sum);
    }
}
// A short buffer for the message is no harm.
static void test_error_is_cut_to_its_buffer(void **state) {
    (void)state;
    Program p = base_program(BASE_SENDS);
    char error[16];
    memset(error, 'x', sizeof error);
    assert_false(schedule_validate(&p, error, 12));
    assert_int_equal(strlen(error), 11);
    assert_int_equal(error[12], 'x');
    program_free(&p);
}

// -------------------------------------------------------------------------------------------------
// Simulator: times that one works out by hand. Compute actions cost 1, or `row` each row.

typedef struct {
    double row, message, reduce, norm, update, gather;
    double slows; // of messages and reductions
} UnitCosts;
static ActionCost cost_of(const void *context, int rank, const Action *a) {
    const UnitCosts *c = (const UnitCosts *)context;
    ActionCost cost = {.slows = c->slows};
    (void)rank;
    if (action_computes(a->kind)) {
        cost.compute_s = c->row > 0 ? c->row * (double)a->rows : a->rows > 0;
    }
    if (action_is_message(a->kind)) { cost.message_s = c->message; }
    if (a->kind == ACT_REDUCE) { cost.message_s = c->reduce; }
    if (a->kind == ACT_NORM) { cost.compute_s = c->norm; }
    if (a->kind == ACT_UPDATE) { cost.compute_s = c->update; }
    if (a->kind == ACT_PREFETCH) { cost.message_s = c->gather; }
    return cost;
}
typedef struct {
    const char *name;
    int stages, ranks, samples, rows; // stages > 1: a pipeline
    UnitCosts costs;
    double end, busy[3];
} Timing;
static const Timing timings[] = {
    // one block, three units: 3 forwards, 2 backward inputs, 3 backward weights
    {"sequential", 1, 1, 1, 1, {0, 0, 0, 0, 0, 0}, 8, {8}},
    {"two micro-batches", 1, 1, 2, 1, {0, 0, 0, 0, 0, 0}, 16, {16}},
    {"cost by rows", 1, 1, 3, 2, {1, 0, 0, 0, 0, 0}, 24, {24}},
    {"norm and 4 updates", 1, 1, 1, 1, {0, 0, 0, 10, 1, 0}, 22, {22}},
    // REDUCE of lnf at 5, of the block at 7, of wpe and wte at 8, one after another beside the
    // compute
    {"hidden reductions", 1, 1, 1, 1, {0, 0, 0.5, 0, 0, 0}, 9, {8}},
    {"reductions at the end", 1, 1, 1, 1, {0, 0, 2, 0, 0, 0}, 13, {8}},
    {"slow reductions", 1, 1, 1, 1, {0, 0, 10, 1, 1, 0}, 50, {13}},
    // Half of the speed while the first two travel; or none: then the next actions begin at 15 and
    // 27. What travels after all computing slows nothing.
    {"reductions that slow", 1, 1, 1, 1, {0, 0, 0.5, 0, 0, 0, 0.5}, 9.5, {8.5}},
    {"reductions that stop", 1, 1, 1, 1, {0, 0, 10, 1, 1, 0, 1}, 53, {33}},
    // parameters of wte, wpe, the block and lnf come 1, 2, 3, 4 after NORM; forwards want the first
    // two, then the third, then the fourth
    {"hidden gathers", 1, 1, 1, 1, {0, 0, 0, 0, 0, 0.5}, 9, {8}},
    {"gathers that the next step waits for", 1, 1, 1, 1, {0, 0, 0, 0, 0, 1}, 10, {8}},
    {"slow gathers", 1, 1, 1, 1, {0, 0, 0, 0, 0, 10}, 46, {8}},
    // 3 samples on 2 ranks: rank 1 has two of them, both meet at its norm
    {"the slowest decides", 1, 2, 3, 1, {0, 0, 0, 0, 0, 0}, 16, {8, 16}},
    {"updates run side by side", 1, 2, 3, 1, {0, 0, 0, 1, 1, 0}, 21, {13, 21}},
    {"a rank without samples", 1, 2, 1, 1, {0, 0, 0, 1, 1, 0}, 13, {5, 13}},
    // F costs 2; B costs 3 on the first stage (no input gradient of the embedding), 4 on others.
    // See the steps above.
    {"bubble of two stages", 2, 0, 0, 0, {0, 0, 0, 0, 0, 0}, 17, {10, 12}},
    // messages take 1: R0 is there at 3, R1 received while rank 1 goes backward (5 to 9) and there
    // at 10, r0 at 10, r1 at 17
    {"with messages", 2, 0, 0, 0, {0, 1, 0, 0, 0, 0}, 20, {10, 12}},
    // F1 of rank 0 begins with the message of F0
    {"messages that slow", 2, 0, 0, 0, {0, 1, 0, 0, 0, 0, 0.5}, 20, {10.5, 12}},
    {"bubble of three stages", 3, 0, 0, 0, {0, 0, 0, 0, 0, 0}, 23, {10, 12, 12}},
};
static void test_simulated_times(void **state) {
    (void)state;
    int wrong = 0;
    for (size_t i = 0; i < sizeof timings / sizeof timings[0]; i++) {
        const Timing *t = &timings[i];
        Program p = t->stages == 2   ? pipeline(2, two_stages)
                    : t->stages == 3 ? pipeline(3, three_stages)
                                     : sequential(1, t->ranks, t->samples, t->rows, false);
        double busy[3] = {0, 0, 0}, end = schedule_simulate(&p, cost_of, &t->costs, busy);
        // the costs are small whole numbers and halves: exact in binary
        bool good = end == t->end;
        for (int r = 0; r < p.ranks; r++) { good = good && busy[r] == t->busy[r]; }
        if (!good) {
            print_error("%s: expected end %g busy %g %g %g, found %g busy %g %g %g\n", t->name,
                        t->end, t->busy[0], t->busy[1], t->busy[2], end, busy[0], busy[1], busy[2]);
            wrong++;
        }
        assert_true(schedule_simulate(&p, cost_of, &t->costs, NULL) == end);
        program_free(&p);
    }
    assert_int_equal(wrong, 0);
}

// The simulator plays with clocks of engines (simulator.h); an action must not begin before what it
// touches is ready.
static void test_simulated_times_follow_touches(void **state) {
    (void)state;
    const uint64_t seed = test_seed(1) << 20;
    for (int kind = 0; kind < DRAWN_KINDS; kind++) {
        for (int i = 0; i < (all_tests() ? 1000 : 25); i++) {
            Program p = drawn_program((DrawnKind)kind, seed + i);
            assert_times_follow_touches(drawn_names[kind], &p, NULL, NULL, seed + i);
            program_free(&p);
        }
    }
}

// One block on one rank at stage 3; what takes time costs 1. Gathers of wte, wpe, the block and lnf
// begin with the step, that of wte for the head at 4 and that of the block for its backward at 5:
// so forwards begin at 2, 3 and 5, the backward of the head at 6 and that of the block at 8.
static void test_simulated_gathers(void **state) {
    (void)state;
    const UnitCosts costs = {0, 0, 0, 0, 0, 1};
    const ZeroPolicy policy = ZERO_STAGE(3, false, NULL);
    Program p = sharded(1, 1, 1, 1, false, &policy);
    double busy;
    assert_true(schedule_simulate(&p, cost_of, &costs, &busy) == 11);
    assert_true(busy == 8);
    program_free(&p);
}

// -------------------------------------------------------------------------------------------------
// Printer

// The line must say all that the action says.
static void check_printed(const char *line, int index, const Action *a) {
    char expected[64];
    snprintf(expected, sizeof expected, "%d %s ", index, action_name(a->kind));
    if (!strstr(line, expected) && !(a->kind == ACT_NORM && strstr(line, "NORM"))) {
        fail_msg("no \"%s\" in: %s", expected, line);
    }
    snprintf(expected, sizeof expected, " unit %-3d micro-batch %-3d samples %d..%d", a->unit,
             (int)a->micro, (int)a->first_row, (int)(a->first_row + a->rows - 1));
    if (!strstr(line, expected) != (a->unit < 0)) { fail_msg("\"%s\" and: %s", expected, line); }
    snprintf(expected, sizeof expected, " storage %-3d version %d", a->storage, (int)a->version);
    if (!strstr(line, expected) != (a->storage < 0)) { fail_msg("\"%s\" and: %s", expected, line); }
    snprintf(expected, sizeof expected, " peer %d", a->peer);
    if (!strstr(line, expected) != (a->peer < 0)) { fail_msg("\"%s\" and: %s", expected, line); }
}
static void test_printer_shows_each_action_once(void **state) {
    (void)state;
    for (int base = BASE_PLAIN; base <= BASE_THREE; base++) {
        Program p = base_program((Base)base);
        char *text = NULL, *line, *rest, expected[64];
        size_t bytes;
        FILE *f = open_memstream(&text, &bytes);
        schedule_print(f, &p);
        fclose(f);
        rest = text;
        for (int r = 0; r < p.ranks; r++) {
            snprintf(expected, sizeof expected, "rank %d: %d actions", r, p.rank[r].count);
            assert_string_equal(strsep(&rest, "\n"), expected);
            for (int i = 0; i < p.rank[r].count; i++) {
                assert_non_null(line = strsep(&rest, "\n"));
                check_printed(line, i, &p.rank[r].actions[i]);
            }
        }
        assert_string_equal(rest, ""); // nothing after the last action
        free(text);
        program_free(&p);
    }
}

// -------------------------------------------------------------------------------------------------
// Dealing

// Every unit's every kind of compute sees each sample exactly once over the ranks, in order, at
// most `rows` at a time.
static void check_dealing(const Program *p, int64_t samples, int64_t rows, int unit,
                          ActionKind kind) {
    int64_t next = 0, low = samples, high = 0;
    for (int r = 0; r < p->ranks; r++) {
        int64_t mine = next;
        int micro = 0;
        for (int i = 0; i < p->rank[r].count; i++) {
            const Action *a = &p->rank[r].actions[i];
            if (a->kind != kind || a->unit != unit || !a->rows) { continue; }
            assert_int_equal(a->first_row, next);
            assert_in_range(a->rows, 1, rows);
            assert_int_equal(a->micro, micro++);
            next += a->rows;
        }
        assert_true(micro <= p->micro_batches);
        low = min_i64(low, next - mine);
        high = max_i64(high, next - mine);
    }
    assert_int_equal(next, samples);
    assert_true(high - low <= 1); // nearly equal parts
}
static void test_samples_are_dealt_once(void **state) {
    (void)state;
    for (int i = 0; i < 5 * 12 * 4; i++) {
        int ranks = 1 + i % 5, samples = 1 + i / 5 % 12, rows = 1 + i / 60;
        Program p = sequential(1, ranks, samples, rows, true);
        for (int unit = 0; unit < 3; unit++) {
            check_dealing(&p, samples, rows, unit, ACT_FORWARD);
            check_dealing(&p, samples, rows, unit, ACT_BACKWARD_WEIGHT);
            if (unit) { check_dealing(&p, samples, rows, unit, ACT_BACKWARD_INPUT); }
        }
        check_dealing(&p, samples, rows, 1, ACT_RECOMPUTE);
        program_free(&p);
    }
}
// Without training there are forwards only, of the same samples.
static void test_evaluation_is_forward_only(void **state) {
    (void)state;
    Program p = empty_program(2, 3, &plain, NOT_CLIPPED);
    schedule_sequential(&p, 7, 2, false);
    for (int unit = 0; unit < 4; unit++) { check_dealing(&p, 7, 2, unit, ACT_FORWARD); }
    for (int r = 0; r < 3; r++) {
        for (int i = 0; i < p.rank[r].count; i++) {
            assert_int_equal(p.rank[r].actions[i].kind, ACT_FORWARD);
        }
    }
    program_free(&p);
}
// Collectives are matched by their order, so every rank must reduce in the same order, with or
// without samples.
static void test_reductions_have_one_order(void **state) {
    (void)state;
    for (int samples = 1; samples <= 5; samples++) {
        Program p = sequential(3, 4, samples, 1, false);
        const int expected[6] = {5, 4, 3, 2, 1, 0};
        for (int r = 0; r < 4; r++) {
            int n = 0;
            for (int i = 0; i < p.rank[r].count; i++) {
                if (p.rank[r].actions[i].kind == ACT_REDUCE) {
                    assert_int_equal(p.rank[r].actions[i].storage, expected[n++]);
                }
            }
            assert_int_equal(n, 6);
        }
        program_free(&p);
    }
}

// At stage 3 a storage is gathered for each unit's forward and again for its backward, which the
// head has at once and the embedding does without: in each micro-batch, also of a rank without
// samples. The first gather of a step is from all ranks, the others from the copies. Never do more
// than two blocks travel or stay at once.
static void check_gathers(const Program *p, int rank) {
    int gathers[8] = {0}, blocks = 0, last = p->map.storages - 1;
    for (int i = 0; i < p->rank[rank].count; i++) {
        const Action *a = &p->rank[rank].actions[i];
        bool block = a->storage > 1 && a->storage < last;
        if (a->kind == ACT_PREFETCH) {
            assert_int_equal(a->secondary, gathers[a->storage]++ > 0);
            blocks += block;
        }
        if (a->kind == ACT_RELEASE) { blocks -= block; }
        assert_true(blocks <= SHARED_SLOTS);
    }
    for (int s = 0; s <= last; s++) {
        assert_int_equal(gathers[s], (s == 1 || s == last ? 1 : 2) * p->micro_batches);
    }
}
static void test_gathers_of_a_step(void **state) {
    (void)state;
    for (int samples = 1; samples <= 9; samples++) {
        Program p = sharded(5, 4, samples, 1, samples % 2, &stage_three);
        for (int r = 0; r < 4; r++) { check_gathers(&p, r); }
        program_free(&p);
    }
}

// What a kind is agrees with its name: the simulator, the drawings and the queue of deferred
// operations know kinds by these bits alone.
static bool begins(const char *name, const char *with) {
    return !strncmp(name, with, strlen(with));
}
static void test_kinds_are_what_they_are_called(void **state) {
    (void)state;
    for (int k = 0; k < ACTION_KINDS; k++) {
        const ActionRow *row = &action_table[k];
        const bool sends = begins(row->name, "SEND_"), receives = begins(row->name, "RECV_"),
                   moves = begins(row->name, "FETCH") || begins(row->name, "EVICT"),
                   on_disk = !strcmp(row->name, "READ") || !strcmp(row->name, "WRITE");
        const bool good = action_sends((ActionKind)k) == sends &&
                          action_is((ActionKind)k, RECEIVES) == receives &&
                          action_is((ActionKind)k, MOVES) == moves &&
                          action_is((ActionKind)k, ON_DISK) == on_disk;
        if (!good) { fail_msg("%s is another kind than its name says", row->name); }
        if (!sends) { continue; }
        const unsigned differ = SENDS | RECEIVES;
        const ActionRow *other = &action_table[k + 1];
        assert_string_equal(row->name + 5, other->name + 5);
        assert_int_equal(row->is & ~differ, other->is & ~differ);
    }
}

// Returns what a member of a storage's owners has of a matrix.
static int64_t part_that(const StatePlan *s, int storage, int part, int member) {
    int64_t begin;
    return part_of_slice(&s->matrices.part[part], s->rows[storage].slices[SLICES_WHOLE], member,
                         &begin);
}
// Counts what travels home, in elements, if of ranks with equal work the first one were the home.
static int64_t moved_to_first_ranks(const StatePlan *s) {
    int64_t moved = 0;
    for (int i = s->model->first_block; i < s->model->first_after; i = s->rows[i].wave + 1) {
        double work[16] = {0}, flops[64][MOST_PARTS];
        const int n = s->ranks->n, end = s->rows[i].wave;
        for (int left = (end - i + 1) * s->matrices.count, first = 1; left; left--, first = 0) {
            int home = 0, storage = -1, part = -1;
            for (int k = i; k <= end; k++) {
                for (int j = 0; j < s->matrices.count; j++) {
                    const StoragePart *p = &s->matrices.part[j];
                    if (first) {
                        flops[k - i][j] = p->is_matrix ? orthogonalise_flops(p->rows, p->cols) : 0;
                    }
                    if (storage < 0 || flops[k - i][j] > flops[storage - i][part]) {
                        storage = k;
                        part = j;
                    }
                }
            }
            for (int r = 1; r < n; r++) { home = work[r] < work[home] ? r : home; }
            for (int r = 0; r < n && flops[storage - i][part] > 0; r++) {
                moved += r == home ? 0 : part_that(s, storage, part, r);
            }
            work[home] += flops[storage - i][part];
            flops[storage - i][part] = 0;
        }
    }
    return moved;
}
// All ranks agree on the homes of matrices, whose work is even. What the busiest rank sends or
// receives is what the exchanges of all ranks say. Homes have parts of their matrices: of all that
// would travel to the first ranks, much stays.
static void test_homes_of_matrices(void **state) {
    (void)state;
    MutationDraw d = {test_seed(1), 0};
    int64_t moved = 0, to_first = 0;
    for (int drawn = 0; drawn < 30; drawn++) {
        const int nodes = 1 + mutation_draw(&d, 3), per = 1 + mutation_draw(&d, 4), n = nodes * per;
        GptConfig config =
            dense_config_of(mutation_draw(&d, ARCHITECTURES), 1 + mutation_draw(&d, 6));
        config.channels = 64;
        const GptModel m = gpt_model(config);
        Placement placement = placement_even(m.units, 1);
        placement.stage[0].replicas = n;
        placement_take_ranks(&placement);
        ZeroPolicy policy = ZERO_STAGE(mutation_draw(&d, 4), true, NULL);
        policy.matrices = true;
        const MixedPrecision fp32 = {DTYPE_FP32, DTYPE_FP32};
        Group seen[12];
        StatePlan plan[12];
        for (int me = 0; me < n; me++) {
            seen[me] = group_cluster(nodes, per);
            seen[me].me = me;
            plan[me] = state_plan(&m, &seen[me], &placement, &policy, fp32, &optimizers[2]);
        }
        to_first += moved_to_first_ranks(&plan[0]);
        double work[12] = {0}, largest = 0;
        for (int i = m.first_block; i < m.first_after; i++) {
            int64_t sent[12][LINK_KINDS] = {{0}}, got[12][LINK_KINDS] = {{0}};
            for (int me = 0; me < n; me++) {
                const MatrixExchange *e = &plan[me].rows[i].exchange;
                assert_memory_equal(e->home, plan[0].rows[i].exchange.home, sizeof e->home);
                for (int r = 0; r < n; r++) {
                    if (r == me) { continue; }
                    const CommLink link = group_link(&seen[me], me, r);
                    sent[me][link] += slice_length(e->to, r) * 4;
                    got[me][link] += slice_length(e->from, r) * 4;
                    moved += slice_length(e->to, r);
                }
            }
            for (int me = 0; me < n; me++) {
                int64_t busiest[LINK_KINDS];
                matrices_busiest(&plan[me].matrices, &plan[me].rows[i], busiest);
                for (int l = 0; l < LINK_KINDS; l++) {
                    int64_t most = 0;
                    for (int r = 0; r < n; r++) {
                        most = max_i64(most, max_i64(sent[r][l], got[r][l]));
                    }
                    assert_true(busiest[l] == most);
                }
            }
            for (int k = 0; k < plan[0].matrices.count; k++) {
                const StoragePart *p = &plan[0].matrices.part[k];
                if (!p->is_matrix) { continue; }
                const double flops = orthogonalise_flops(p->rows, p->cols);
                work[plan[0].rows[i].exchange.home[k]] += flops;
                largest = fmax(largest, flops);
            }
            if (i < plan[0].rows[i].wave) { continue; }
            for (int r = 0; r < n; r++) {
                for (int q = 0; q < n; q++) { assert_true(work[r] - work[q] <= largest); }
            }
            memset(work, 0, sizeof work);
        }
        for (int me = 0; me < n; me++) {
            store_plan_free(&plan[me]);
            group_free(&seen[me]);
        }
        placement_free(&placement);
    }
    print_message("homes have parts of their matrices: %.2f of what would travel\n",
                  (double)moved / (double)to_first);
    assert_true((double)moved < 0.9 * (double)to_first);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds_are_what_they_are_called),
        cmocka_unit_test(test_sequential_programs_are_valid),
        cmocka_unit_test(test_pipelines_are_valid),
        cmocka_unit_test(test_damage_is_refused),
        cmocka_unit_test(test_mutations_are_refused_or_harmless),
        cmocka_unit_test(test_clipped_programs_are_valid),
        cmocka_unit_test(test_error_is_cut_to_its_buffer),
        cmocka_unit_test(test_simulated_times),
        cmocka_unit_test(test_simulated_times_follow_touches),
        cmocka_unit_test(test_simulated_gathers),
        cmocka_unit_test(test_printer_shows_each_action_once),
        cmocka_unit_test(test_samples_are_dealt_once),
        cmocka_unit_test(test_evaluation_is_forward_only),
        cmocka_unit_test(test_reductions_have_one_order),
        cmocka_unit_test(test_gathers_of_a_step),
        cmocka_unit_test(test_homes_of_matrices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
