// test_pipeline.c: proves pipeline.h: what --pipeline accepts and refuses; that every plan of a
// small model on few ranks makes a valid program that holds as many micro-batches as the paper says
// and has the bubble it says. And timeline.h: what it draws. Damaged pipelines are among those of
// test_schedule.c.
#include "ops/cpu/ops_cpu.h"
#include "mutations.h"
#include "pipeline.h"
#include "report/timeline.h"
#include "zero.h"

#include "harness.h"
#include "policies.h" // ZERO_STAGE
#include "schedule/simulator.h"
#include "schedule/validator.h"

static const ZeroPolicy plain = ZERO_STAGE(0, false, NULL), stage_two = ZERO_STAGE(2, true, NULL),
                        stage_three = ZERO_STAGE(3, true, NULL);
// Activations of 4 blocks on the host.
static unsigned char stashed_blocks[] = {0,
                                         0,
                                         1 << STATE_ACTIVATIONS,
                                         1 << STATE_ACTIVATIONS,
                                         1 << STATE_ACTIVATIONS,
                                         1 << STATE_ACTIVATIONS,
                                         0};
static const Offload stashed = OFFLOAD(stashed_blocks, false, NULL, false, false);
static const ZeroPolicy quantized = ZERO_POLICY(0, 1, true, true, false, NULL, NULL),
                        quantized_two = ZERO_POLICY(2, 1, true, true, false, NULL, NULL);
static const ZeroPolicy stashing = ZERO_STAGE(0, false, &stashed);
static Program empty_program_of(const GptModel *m, const Placement *placement, int ranks,
                                const ZeroPolicy *policy, bool clips) {
    Program p;
    memset(&p, 0, sizeof p);
    p.map = test_unit_map(m, policy, placement, clips);
    p.ranks = ranks;
    p.rank = (Schedule *)calloc((size_t)ranks, sizeof(Schedule));
    return p;
}
static Program empty_program(const Placement *placement, int layers, int ranks,
                             const ZeroPolicy *policy) {
    const GptModel m = gpt_model(config_of(0, layers));
    return empty_program_of(&m, placement, ranks, policy, false);
}
// the third with policy B
static const PipelineKind kinds[4] = {PIPELINE_GPIPE, PIPELINE_DAPPLE, PIPELINE_DAPPLE,
                                      PIPELINE_ZERO_BUBBLE};
static PipelinePlan plan_of(const char *text, int units, int ranks, PipelineKind kind,
                            Warmup warmup, int64_t rows, int M) {
    PipelinePlan plan = {pipeline_placement(text, units, ranks),
                         kind,
                         warmup,
                         rows,
                         M,
                         INT64_MAX,
                         false,
                         CLIPS_NOTHING};
    return plan;
}

// -------------------------------------------------------------------------------------------------
// --pipeline

enum { UNITS = 6, RANKS = 4 }; // of the model and the job that the texts are for
typedef struct {
    const char *text, *expected; // as the stages are written back; or of the refusal
    bool good;
} ShownText;
static const ShownText texts[] = {
    {"1", "6:4", true},
    {"2", "3:2,3:2", true},
    {"4", "2:1,2:1,1:1,1:1", true}, // the first stages take the units that remain
    {"0002", "3:2,3:2", true},
    {"5:3,1:1", "5:3,1:1", true},
    {"1:1,1:1,1:1,3:1", "1:1,1:1,1:1,3:1", true},
    {"6:4", "6:4", true},
    {"", "stage 0 is not units:replicas", false},
    {"auto", "stage 0 is not units:replicas", false},
    {"0", "0 stages", false},
    {"3", "4 ranks are not 3 stages of equally many", false},
    {"7", "give 1 to 6 stages", false},
    {"-1", "stage 0 is not", false},
    {"+2", "stage 0 is not", false},
    {" 2", "stage 0 is not", false},
    {"2 ", "stage 0 is not", false},
    {"2.0", "stage 0 is not", false},
    {"1e1", "stage 0 is not", false},
    {"99999999999999999999", "stage 0 is not", false},
    {"18446744073709551618", "stage 0 is not", false},
    {"4294967299:3,1:1", "stage 0 is not", false},
    {"5:4294967299,1:1", "stage 0 is not", false},
    {"1000000000", "stage 0 is not", false},
    {"999999999", "999999999 stages", false},
    {"5:3,1", "stage 1 is not", false},
    {"5:3,1:", "stage 1 is not", false},
    {"5:3,", "stage 1 is not", false},
    {",5:3", "stage 0 is not", false},
    {"5:3,,1:1", "stage 1 is not", false},
    {"5:3;1:1", "stage 0 is not", false},
    {"5:3,1:1,", "stage 2 is not", false},
    {"5:3:1,1:1", "stage 0 is not", false},
    {":3,6:1", "stage 0 is not", false},
    {"6:0,0:4", "stage 0 is not", false},
    {"6:4,0:0", "stage 1 is not", false},
    {"5:3,-1:1", "stage 1 is not", false},
    {"5:3, 1:1", "stage 1 is not", false},
    {"4:3,1:1", "add up to 5: make them add up to the model's 6 (embedding, 4 blocks, head)",
     false},
    {"6:3,1:1", "the units of the stages add up to 7", false},
    {"5:3,1:2", "the replicas of the stages add up to 5: make them add up to the 4 ranks", false},
    {"5:1,1:1", "the replicas of the stages add up to 2", false},
    {"999999999:999999999,999999999:999999999,999999999:999999999", "add up to 2999999997", false},
};
static void write_placement(const Placement *p, char *text, size_t bytes) {
    size_t n = 0;
    for (int s = 0; s < p->stages && n < bytes; s++) {
        n += (size_t)snprintf(text + n, bytes - n, "%s%d:%d", s ? "," : "", p->stage[s].units,
                              p->stage[s].replicas);
    }
}
static void test_texts(void **state) {
    (void)state;
    int wrong = 0;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        Placement placement;
        char error[300] = "", back[300] = "";
        bool good = pipeline_parse(texts[i].text, UNITS, RANKS, &placement, error, sizeof error);
        if (good) {
            write_placement(&placement, back, sizeof back);
            assert_true(pipeline_check_placement(&placement, UNITS, RANKS));
            placement_free(&placement);
        }
        if (good != texts[i].good ||
            !(good ? !strcmp(back, texts[i].expected) : strstr(error, texts[i].expected) != NULL)) {
            print_error("\"%s\": expected %s, found %s%s\n", texts[i].text, texts[i].expected, back,
                        error);
            wrong++;
        }
    }
    assert_int_equal(wrong, 0);
}
// The units of a rank that has every second stage: which they are, which it receives and sends.
static void test_units_of_a_rank(void **state) {
    (void)state;
    Placement p = pipeline_placement("3:1,2:1,1:1,4:1", 10, 4);
    p.stage[2].ranks[0] = 0;
    p.stage[3].ranks[0] = 1;
    const RankUnits even = placement_units_of_rank(&p, 0), odd = placement_units_of_rank(&p, 1);
    const char *const drawn[2] = {"1110010000", "0001101111"};
    assert_int_equal(units_count(&even), 4);
    assert_int_equal(units_count(&odd), 6);
    assert_int_equal(units_first(&even), 0);
    assert_int_equal(units_first(&odd), 3);
    for (int u = 0; u < 10; u++) {
        const bool here = drawn[0][u] == '1', below = u && drawn[0][u - 1] == '1';
        assert_int_equal(units_have(&even, u), here);
        assert_int_equal(units_have(&odd, u), drawn[1][u] == '1');
        assert_int_equal(units_receiver(&even, u), u && here && !below ? 1 : -1);
        assert_int_equal(units_sender(&even, u), u == 3 ? 0 : u == 6 ? 1 : -1);
    }
    placement_free(&p);
}
// Texts by chance: none crashes; what is accepted is a placement, and the same when it is written
// back.
static void test_texts_by_chance(void **state) {
    (void)state;
    const char letters[] = "0123456,,,,::::11112223 -x%";
    int accepted = 0;
    for (uint64_t i = 0; i < 400000; i++) {
        char text[16] = "", back[64] = "", error[64];
        const int length = (int)(random_u64(11, i, 0) % 12);
        for (int k = 0; k < length; k++) {
            text[k] = letters[random_u64(11, i, (uint64_t)k + 1) % (sizeof letters - 1)];
        }
        const int units = 3 + (int)(i % 4), ranks = 1 + (int)(i / 4 % 4);
        Placement placement, again;
        if (!pipeline_parse(text, units, ranks, &placement, error, sizeof error)) {
            assert_true(strlen(error) > 10 && !placement.stage);
            continue;
        }
        assert_true(pipeline_check_placement(&placement, units, ranks));
        write_placement(&placement, back, sizeof back);
        assert_true(pipeline_parse(back, units, ranks, &again, error, sizeof error));
        for (int s = 0; s < placement.stages; s++) {
            assert_memory_equal(again.stage[s].ranks, placement.stage[s].ranks,
                                (size_t)again.stage[s].replicas * sizeof(int));
        }
        placement_free(&placement);
        placement_free(&again);
        accepted++;
    }
    assert_true(accepted > 1000);
}
static void parse_or_die(const void *text) {
    Placement placement = pipeline_placement((const char *)text, UNITS, RANKS);
    placement_free(&placement);
}
static void test_a_wrong_text_ends_the_program(void **state) {
    (void)state;
    char said[1000];
    assert_int_equal(run_child(parse_or_die, "5:3,1:1", said, sizeof said), EXIT_DONE);
    assert_int_equal(run_child(parse_or_die, "5:3,1:2", said, sizeof said), EXIT_INPUT);
    assert_non_null(strstr(said, "--pipeline 5:3,1:2: the replicas of the stages add up to 5"));
    assert_non_null(strstr(said, "hint: "));
}

// -------------------------------------------------------------------------------------------------
// Plans

// Every way to write n as a sum of `parts` numbers from 1 on; index counts them. False: there is
// none with this index.
static bool composition(int n, int parts, int index, int *out) {
    for (int bits = 0; bits < 1 << (n - 1); bits++) { // a set bit i: a part ends after i + 1
        int at = 0, begin = 0;
        if (__builtin_popcount((unsigned)bits) != parts - 1 || index--) { continue; }
        for (int i = 0; i < n; i++) {
            if (i == n - 1 || (bits >> i & 1)) {
                out[at++] = i + 1 - begin;
                begin = i + 1;
            }
        }
        return true;
    }
    return false;
}
static int64_t expected_live(int kind, int S, int i, int64_t depth, int M) {
    int64_t live = kind == 0 ? M : kind == 1 ? S - i : kind == 2 ? 2 * (S - i) - 1 : S;
    return min_i64(min_i64(live, M), depth);
}
// Micro-batches that a rank holds at once, as one counts with a pencil.
static int64_t peak_live(const Schedule *s, int M) {
    int first[64], last[64];
    int64_t peak = 0;
    for (int m = 0; m < M; m++) { first[m] = last[m] = -1; }
    for (int i = 0; i < s->count; i++) {
        const Action *a = &s->actions[i];
        if (a->kind == ACT_FORWARD && first[a->micro] < 0) { first[a->micro] = i; }
        if (a->kind == ACT_BACKWARD_WEIGHT) { last[a->micro] = i; }
    }
    for (int i = 0; i < s->count; i++) {
        int64_t live = 0;
        for (int m = 0; m < M; m++) { live += first[m] <= i && i <= last[m]; }
        peak = max_i64(peak, live);
    }
    return peak;
}
static void check_peaks(const Program *p, const PipelinePlan *plan, int kind) {
    const int S = plan->placement.stages;
    for (int s = 0; s < S; s++) {
        for (int i = 0; i < plan->placement.stage[s].replicas; i++) {
            int r = plan->placement.stage[s].ranks[i];
            int64_t live = expected_live(kind, S, s, plan->depth, p->micro_batches),
                    found = peak_live(&p->rank[r], p->micro_batches);
            assert_int_equal(p->limits[r].in_flight, live);
            assert_true(kind == 3 ? found <= live : found == live);
        }
    }
}
// GPipe: no forward after a backward. DAPPLE: after its first backward a rank takes turns, until no
// forward is left.
static void check_turns(const Program *p, int kind) {
    for (int r = 0; r < p->ranks && kind < 3; r++) {
        const Action *before = NULL;
        bool backward = false;
        for (int i = 0; i < p->rank[r].count; i++) {
            const Action *a = &p->rank[r].actions[i];
            if (!action_computes(a->kind)) { continue; }
            bool forward = a->kind == ACT_FORWARD,
                 new_one = !before || before->micro != a->micro ||
                           (before->kind == ACT_FORWARD) != forward;
            if (forward && kind == 0) { assert_false(backward); }
            if (forward && new_one && backward) { assert_true(before->kind != ACT_FORWARD); }
            backward = backward || !forward;
            before = a;
        }
    }
}
// The messages of a boundary bring each sample of a micro-batch down and back once, in as few
// messages as there are overlaps.
static void check_messages(const Program *p, const PipelinePlan *plan) {
    for (int s = 0; s + 1 < plan->placement.stages; s++) {
        const int unit = plan->placement.stage[s + 1].first_unit;
        int64_t down = 0, back = 0, messages = 0;
        for (int r = 0; r < p->ranks; r++) {
            for (int i = 0; i < p->rank[r].count; i++) {
                const Action *a = &p->rank[r].actions[i];
                if (a->kind == ACT_RECV_FORWARD && a->unit == unit - 1) {
                    down += a->rows;
                    messages++;
                }
                if (a->kind == ACT_SEND_BACKWARD && a->unit == unit) {
                    back += a->rows;
                    messages++;
                }
            }
        }
        const int64_t overlaps =
            plan->placement.stage[s].replicas + plan->placement.stage[s + 1].replicas - 1;
        assert_int_equal(down, p->samples);
        assert_int_equal(back, p->samples);
        assert_true(messages <= 2 * p->micro_batches * overlaps);
    }
}
static void check_evaluation(const PipelinePlan *plan, const GptModel *m, int ranks,
                             int64_t samples, const ZeroPolicy *policy) {
    char error[900], text[100];
    Program p = empty_program_of(m, &plan->placement, ranks, policy, false);
    if (plan->recompute) { unit_map_recomputes(&p.map, &plan->placement); }
    schedule_pipeline(&p, plan, samples, false);
    zero_lower(&p, false);
    write_placement(&plan->placement, text, sizeof text);
    if (!schedule_validate(&p, error, sizeof error)) {
        fail_msg("%s %s M %d rows %d samples %d evaluated: %s", m->arch->name, text,
                 plan->micro_batches, (int)plan->micro_rows, (int)samples, error);
    }
    program_free(&p);
}
// With one place less a valid program is refused; or it computes the same, because micro-batches
// without rows need no place.
static void check_place_is_needed(const Program *p, int64_t *places, const char *what) {
    char error[400];
    const uint64_t values = values_at_end(p, NULL, NULL);
    --*places;
    if (schedule_validate(p, error, sizeof error)) {
        assert_true(values_at_end(p, NULL, NULL) == values);
    } else {
        assert_non_null(strstr(error, what));
    }
    ++*places;
}
// One plan, with everything that is lowered. tight: also that one place less is refused.
static void check_plan(const PipelinePlan *plan, int kind, const GptModel *m, int ranks,
                       int64_t samples, const ZeroPolicy *policy, bool clips, bool tight) {
    char error[900];
    const GptShare share = m->share;
    check_evaluation(plan, m, ranks, samples, policy);
    Program p = empty_program_of(m, &plan->placement, ranks, policy, false);
    schedule_pipeline(&p, plan, samples, true);
    check_peaks(&p, plan, kind);
    check_turns(&p, kind);
    check_messages(&p, plan);
    if (plan->recompute) {
        schedule_lower_recompute(&p);
        unit_map_recomputes(&p.map, &plan->placement);
    }
    if (clips) { schedule_lower_clip(&p); }
    zero_lower(&p, true);
    schedule_lower_stash(&p);
    if (!schedule_validate(&p, error, sizeof error)) {
        char text[100];
        write_placement(&plan->placement, text, sizeof text);
        fail_msg("%s %s share %d x %d M %d rows %d samples %d kind %d depth %d clips %d: %s",
                 m->arch->name, text, (int)share.run, (int)share.cycle, plan->micro_batches,
                 (int)plan->micro_rows, (int)samples, kind, (int)plan->depth, clips, error);
    }
    for (int r = 0; tight && r < ranks; r++) {
        check_place_is_needed(&p, &p.limits[r].in_flight, "activations");
    }
    program_free(&p);
}
// What --pipeline would say of these stages.
static void write_stages(char *text, size_t bytes, int stages, const int *units,
                         const int *replicas) {
    size_t n = 0;
    for (int s = 0; s < stages; s++) {
        n += (size_t)snprintf(text + n, bytes - n, "%s%d:%d", s ? "," : "", units[s], replicas[s]);
    }
}

// All splits of 6 units over 1 to 4 ranks with all numbers of replicas, 1 to 8 micro-batches, the
// last one short; in turns bounded memory, recomputation, gradients that leave in each micro-batch,
// activations on the host, clipping by stages, blocks that share, also across stages; micro-batches
// of fewer samples than replicas, and empty ones.
static void test_all_plans(void **state) {
    (void)state;
    const GptShare shares[] = {GPT_SHARE_NONE, gpt_share(4, 4, 0), gpt_share(4, 2, 0),
                               gpt_share(4, 3, 0), gpt_share(4, 4, 2)};
    int plans = 0, units[6], replicas[4];
    for (int ranks = 1; ranks <= 4; ranks++) {
        for (int S = 1; S <= ranks; S++) {
            for (int a = 0; composition(6, S, a, units); a++) {
                for (int b = 0; composition(ranks, S, b, replicas); b++) {
                    char text[100];
                    write_stages(text, sizeof text, S, units, replicas);
                    for (int i = 0; i < 8 * 4 * 3 * 2; i++, plans++) {
                        const int M = 1 + i % 8, kind = i / 8 % 4, bound = i / 32 % 3,
                                  rows = 1 + plans / 8 % 5;
                        PipelinePlan plan = plan_of(text, 6, ranks, kinds[kind],
                                                    kind == 2 ? WARMUP_B : WARMUP_A, rows, M);
                        plan.depth = bound && kind ? bound : INT64_MAX;
                        plan.recompute = i / 96 && kind < 3;
                        int64_t samples =
                            max_i64(1, plans % 7 ? (int64_t)M * rows - plans % 3 : M / 2);
                        const bool clips = kind < 3 && !plan.recompute && plans / 2 % 2,
                                   stashes = kind < 3 && !clips && plans % 3 == 0;
                        const GptShare share =
                            clips || stashes ? GPT_SHARE_NONE : shares[plans / 8 % 5];
                        const bool codes = !stashes && plans % 5 == 0; // not with experts
                        const GptModel m = gpt_model_shared(
                            (codes ? dense_config_of : config_of)(plans / 3, 4), share);
                        check_plan(&plan, kind, &m, ranks, samples,
                                   stashes         ? &stashing
                                   : plans % 2     ? (plans % 5 ? &plain : &quantized)
                                   : plans / 4 % 2 ? (plans % 5 ? &stage_two : &quantized_two)
                                                   : &stage_three,
                                   clips, plans % 16 == 0);
                        placement_free(&plan.placement);
                    }
                }
            }
        }
    }
    assert_int_equal(plans, 84 * 192);
}
// Samples of messages of a kind to or from a unit, over all ranks.
static int64_t rows_of_kind(const Program *p, ActionKind kind, int unit) {
    int64_t rows = 0;
    for (int r = 0; r < p->ranks; r++) {
        for (int i = 0; i < p->rank[r].count; i++) {
            rows += p->rank[r].actions[i].kind == kind && p->rank[r].actions[i].unit == unit
                        ? p->rank[r].actions[i].rows
                        : 0;
        }
    }
    return rows;
}
// One plan that clips, of a model with a tied table or not. Each sample's norm comes
// to the first stage, and its factor back, once, from the stages that share a norm with it; with
// fewer places than the limits say, of which the last stage needs all, it is refused.
static void check_clipped_plan(const PipelinePlan *plan, int arch, int ranks, int64_t samples,
                               const ZeroPolicy *policy) {
    char error[900], text[100];
    const int S = plan->placement.stages, last = plan->placement.stage[S - 1].ranks[0];
    const GptModel m = gpt_model(config_of(arch, 4));
    const bool tied = gpt_is_tied(&m);
    Program p = empty_program_of(&m, &plan->placement, ranks, policy, true);
    schedule_pipeline(&p, plan, samples, true);
    if (plan->recompute) { schedule_lower_recompute(&p); }
    zero_lower(&p, true);
    write_placement(&plan->placement, text, sizeof text);
    if (!schedule_validate(&p, error, sizeof error)) {
        fail_msg("%s M %d rows %d samples %d kind %d clips %d: %s", text, plan->micro_batches,
                 (int)plan->micro_rows, (int)samples, plan->kind, plan->clips, error);
    }
    for (int s = 0; s < S; s++) {
        const Stage *stage = &plan->placement.stage[s];
        const bool sends = s && (plan->clips == CLIPS_ALL || (tied && s == S - 1));
        for (int kind = ACT_SEND_NORM; kind <= ACT_RECV_FACTOR; kind++) {
            assert_int_equal(
                rows_of_kind(&p, (ActionKind)kind, stage->first_unit + stage->units - 1),
                sends ? samples : 0);
        }
    }
    assert_int_equal(rows_of_kind(&p, ACT_TIED, 5), S > 1 && tied ? samples : 0);
    if (S > 1 && tied && plan->clips != CLIPS_ALL) {
        check_place_is_needed(&p, &p.limits[last].clips, "norms");
    }
    program_free(&p);
}
// All splits again, of steps that clip by unit, by stage and by the norm of all; of no samples,
// too.
static void test_clipped_plans(void **state) {
    (void)state;
    const int lengths[] = {1, 2, 3, 5, 8, 13};
    int plans = 0, units[6], replicas[4];
    for (int ranks = 2; ranks <= 4; ranks++) {
        for (int S = 1; S <= ranks; S++) {
            for (int a = 0; composition(6, S, a, units); a++) {
                for (int b = 0; composition(ranks, S, b, replicas); b++) {
                    char text[100];
                    write_stages(text, sizeof text, S, units, replicas);
                    for (int i = 0; i < 6 * 3 * 3; i++, plans++) {
                        const int M = lengths[i % 6], kind = i / 6 % 3, rows = 1 + plans / 8 % 5;
                        PipelinePlan plan = plan_of(text, 6, ranks, kinds[kind],
                                                    kind == 2 ? WARMUP_B : WARMUP_A, rows, M);
                        plan.clips = (Clips)(CLIPS_UNITS + i / 18);
                        plan.recompute = plan.clips == CLIPS_UNITS && plans % 3 == 0;
                        check_clipped_plan(
                            &plan, plans / 5, ranks,
                            M == 1 && plans % 2 ? 0 : (int64_t)M * rows - plans % 2 * (rows > 1),
                            plans % 2       ? &plain
                            : plans / 4 % 2 ? &stage_two
                                            : &stage_three);
                        placement_free(&plan.placement);
                    }
                }
            }
        }
    }
    assert_int_equal(plans, 83 * 54);
}
// Wide stages of unequal width: 11:5 and 15:1 of 16, and others, with remainders.
static void test_unequal_replicas(void **state) {
    (void)state;
    const char *const wide[] = {"3:11,3:5", "3:15,3:1",        "3:1,3:15",
                                "2:5,3:11", "1:7,2:1,2:5,1:3", "1:2,1:3,1:5,1:3,1:2,1:1"};
    const int units[] = {6, 6, 6, 5, 6, 6};
    for (int i = 0; i < 6 * 4 * 6; i++) {
        const int64_t rows[] = {1, 7, 16, 37, 64, 5};
        const int kind = i / 6 % 4;
        PipelinePlan plan = plan_of(wide[i % 6], units[i % 6], 16, kinds[kind],
                                    kind == 2 ? WARMUP_B : WARMUP_A, rows[i / 24], 5);
        const GptModel m = gpt_model(config_of(i / 6, units[i % 6] - 2));
        check_plan(&plan, kind, &m, 16, max_i64(1, 5 * rows[i / 24] - 3), &plain, false,
                   i % 5 == 0);
        placement_free(&plan.placement);
    }
    // parts of 16 samples: 1 1 2 1 2 1 2 1 2 1 2 and 3 3 3 3 4
    PipelinePlan plan = plan_of("3:11,3:5", 6, 16, PIPELINE_DAPPLE, WARMUP_A, 16, 1);
    Program p = empty_program(&plan.placement, 4, 16, &plain);
    schedule_pipeline(&p, &plan, 16, true);
    const int64_t expected[][3] = {{1, 1, 11}, {2, 1, 11}, {2, 1, 12}, {3, 1, 12}};
    int found = 0;
    for (int r = 1; r <= 3; r++) {
        for (int i = 0; i < p.rank[r].count; i++) {
            const Action *a = &p.rank[r].actions[i];
            if (a->kind != ACT_SEND_FORWARD) { continue; }
            assert_int_equal(r, expected[found][0]);
            assert_int_equal(a->rows, expected[found][1]);
            assert_int_equal(a->peer, expected[found][2]);
            found++;
        }
    }
    assert_int_equal(found, 4);
    placement_free(&plan.placement);
    program_free(&p);
}
// pipeline_feeds_all() says what the schedules are: has each pass over a block samples?
static void test_who_has_samples(void **state) {
    (void)state;
    uint64_t draw = test_seed(1);
    int fed = 0;
    for (int i = 0; i < 400; i++) {
        const int stages = 1 + (int)(mix64(draw++) % 3), layers = 4;
        const int64_t samples = 1 + (int64_t)(mix64(draw++) % 20),
                      rows = 1 + (int64_t)(mix64(draw++) % (uint64_t)samples);
        int units[3], replicas[3], ranks = stages + (int)(mix64(draw++) % 5);
        char text[100] = "";
        size_t at = 0;
        while (!composition(layers + 2, stages, (int)(mix64(draw++) % 10), units)) {}
        while (!composition(ranks, stages, (int)(mix64(draw++) % 20), replicas)) {}
        for (int s = 0; s < stages; s++) {
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%d:%d", s ? "," : "", units[s],
                                   replicas[s]);
        }
        const PipelinePlan plan = plan_of(text, layers + 2, ranks, PIPELINE_DAPPLE, WARMUP_A, rows,
                                          (int)ceil_div(samples, rows));
        Program p = empty_program(&plan.placement, layers, ranks, &plain);
        if (stages > 1) {
            schedule_pipeline(&p, &plan, samples, true);
        } else {
            schedule_sequential(&p, samples, ceil_div(rows, ranks), true);
        }
        bool all = true;
        for (int r = 0; r < ranks; r++) {
            for (int k = 0; k < p.rank[r].count; k++) {
                const Action *a = &p.rank[r].actions[k];
                const bool block = a->unit > 0 && a->unit <= layers;
                all = all && (a->kind != ACT_FORWARD || !block || a->rows > 0);
            }
        }
        if (pipeline_feeds_all(&plan, samples) != all) {
            fail_msg("%s: %d samples in micro-batches of %d", text, (int)samples, (int)rows);
        }
        fed += all;
        Placement placement = plan.placement;
        placement_free(&placement);
        program_free(&p);
    }
    assert_true(fed > 40 && fed < 360);
}
// Live micro-batches of DAPPLE do not grow with the number of micro-batches, and any order of ranks
// serves.
static void test_live_is_constant(void **state) {
    (void)state;
    for (int M = 8; M <= 64; M *= 2) {
        PipelinePlan plan = plan_of("1:1,2:2,2:2,1:1", 6, 6, PIPELINE_DAPPLE, WARMUP_A, 4, M);
        int swap = plan.placement.stage[0].ranks[0];
        plan.placement.stage[0].ranks[0] = plan.placement.stage[2].ranks[1];
        plan.placement.stage[2].ranks[1] = swap;
        Program p = empty_program(&plan.placement, 4, 6, &plain);
        schedule_pipeline(&p, &plan, 4 * M, true);
        const int64_t expected[6] = {2, 3, 3, 2, 4, 1}; // rank 4 has the first stage
        for (int r = 0; r < 6; r++) { assert_int_equal(peak_live(&p.rank[r], M), expected[r]); }
        placement_free(&plan.placement);
        program_free(&p);
    }
}
// Of three parts of an input the one in the middle is missing.
static void test_a_gap_is_refused(void **state) {
    (void)state;
    char error[400];
    PipelinePlan plan = plan_of("3:3,3:1", 6, 4, PIPELINE_DAPPLE, WARMUP_A, 3, 1);
    Program p = empty_program(&plan.placement, 4, 4, &plain);
    schedule_pipeline(&p, &plan, 3, true);
    zero_lower(&p, true);
    assert_true(schedule_validate(&p, error, sizeof error));
    for (int r = 1; r < 4; r += 2) { // both ends
        Schedule *s = &p.rank[r];
        int i = 0;
        while (!(s->actions[i].kind == (r == 1 ? ACT_SEND_FORWARD : ACT_RECV_FORWARD) &&
                 s->actions[i].first_row == 1)) {
            i++;
        }
        memmove(s->actions + i, s->actions + i + 1, (size_t)(--s->count - i) * sizeof(Action));
    }
    assert_false(schedule_validate(&p, error, sizeof error));
    assert_non_null(strstr(error,
                           "rank 3: FORWARD unit 3 storage -1 micro-batch 0: not there, or not "
                           "complete: the input of a unit"));
    placement_free(&plan.placement);
    program_free(&p);
}
static void visit_nothing(void *context, int rank, const Action *a, int peer) {
    (void)context;
    (void)rank;
    (void)a;
    (void)peer;
}
// Without training there are forwards and their messages, one micro-batch live.
static void test_evaluation(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        PipelinePlan plan = plan_of("2:2,3:1,1:1", 6, 4, kinds[kind], WARMUP_B, 3, 5);
        Program p = empty_program(&plan.placement, 4, 4, &plain);
        int at[4], forwards = 0;
        schedule_pipeline(&p, &plan, 14, false);
        assert_int_equal(walk_program(&p, at, false, visit_nothing, NULL), -1);
        for (int r = 0; r < 4; r++) {
            for (int i = 0; i < p.rank[r].count; i++) {
                ActionKind k = p.rank[r].actions[i].kind;
                assert_true(k == ACT_FORWARD || k == ACT_SEND_FORWARD || k == ACT_RECV_FORWARD);
                forwards += k == ACT_FORWARD;
            }
            assert_int_equal(p.limits[r].in_flight, 1);
        }
        assert_int_equal(forwards, 5 * (2 + 2 + 3 + 1));
        placement_free(&plan.placement);
        program_free(&p);
    }
}
static void test_bad_plans(void **state) {
    (void)state;
    for (int i = 0; i < 13; i++) {
        const char *const expected[] = {NULL,
                                        "micro-batch",
                                        "micro-batch",
                                        "do not fit its micro-batches",
                                        "no micro-batch fits",
                                        "gpipe holds all",
                                        "zero-bubble keeps",
                                        "each rank once",
                                        "each rank once",
                                        "each rank once",
                                        "each unit once",
                                        "each unit once",
                                        "do not fit"};
        char error[300] = "";
        PipelinePlan plan = plan_of("2:2,4:2", 6, 4, PIPELINE_GPIPE, WARMUP_A, 3, 4);
        int64_t samples = i == 3 ? 13 : i == 12 ? -1 : 12;
        if (i == 1) { plan.micro_batches = 0; }
        if (i == 2) { plan.micro_rows = 0; }
        if (i == 4) {
            plan.depth = 0;
            plan.kind = PIPELINE_DAPPLE;
        }
        if (i == 5) { plan.depth = 3; }
        if (i == 6) {
            plan.kind = PIPELINE_ZERO_BUBBLE;
            plan.recompute = true;
        }
        if (i == 7) { plan.placement.stage[1].ranks[0] = 1; } // in two stages
        if (i == 8) { plan.placement.stage[1].ranks[0] = 4; }
        if (i == 9) { plan.placement.stage[1].replicas = 1; }
        if (i == 10) { plan.placement.stage[1].units = 3; }
        if (i == 11) { plan.placement.stage[0].units = 0; }
        bool good = pipeline_check(&plan, 6, 4, samples, error, sizeof error);
        if (good != !expected[i] || (expected[i] && !strstr(error, expected[i]))) {
            fail_msg("%d: %s", i, error);
        }
        placement_free(&plan.placement);
    }
}

// -------------------------------------------------------------------------------------------------
// Times

// Every stage costs 1 forward, 1 for its input gradients and 1 for its weight gradients, whatever
// units it has.
typedef struct {
    const PipelinePlan *plan;
    double message;
} Even;
static ActionCost even_cost(const void *context, int rank, const Action *a) {
    const Even *even = (const Even *)context;
    ActionCost cost = {0, 0};
    if (action_sends(a->kind)) { cost.message_s = even->message; }
    if (!action_computes(a->kind)) { return cost; }
    const Stage *stage =
        &even->plan->placement.stage[placement_stage_of_unit(&even->plan->placement, a->unit)];
    (void)rank;
    bool embedding = stage->first_unit == 0; // it has no input gradient: others' cost more
    cost.compute_s = 1.0 / (stage->units - (a->kind == ACT_BACKWARD_INPUT && embedding));
    if (a->kind == ACT_BACKWARD_WEIGHT && embedding && stage->units == 1) { cost.compute_s = 2; }
    return cost;
}
static double bubble(const Program *p, const Even *even) {
    double *busy = (double *)calloc((size_t)p->ranks, sizeof(double)), all = 0,
           end = schedule_simulate(p, even_cost, even, busy);
    for (int r = 0; r < p->ranks; r++) { all += busy[r]; }
    free(busy);
    return 1 - all / (end * p->ranks);
}
// Even stages and no cost of messages: (S - 1) / (M + S - 1) of a step is idle in GPipe and DAPPLE.
// Where a third of the work can wait for the bubbles, and fills them: (S - 1) / (3 M + S - 1).
static void test_bubbles(void **state) {
    (void)state;
    for (int i = 0; i < 9 * 24 * 4; i++) {
        int S = i / 24 % 9 + 1, M = 1 + i % 24, kind = i / 216;
        char text[16];
        snprintf(text, sizeof text, "%d", S);
        PipelinePlan plan =
            plan_of(text, 10, S, kinds[kind], kind == 2 ? WARMUP_B : WARMUP_A, 1, M);
        Even even = {&plan, 0};
        Program p = empty_program(&plan.placement, 8, S, &plain);
        schedule_pipeline(&p, &plan, M, true);
        double found = bubble(&p, &even), expected = (double)(S - 1) / (M + S - 1),
               filled = (double)(S - 1) / (3 * M + S - 1);
        bool zero = plan.kind == PIPELINE_ZERO_BUBBLE;
        if (!zero || M >= S) { assert_true(fabs(found - (zero ? filled : expected)) < 1e-12); }
        if (zero) { assert_true(found <= expected + 1e-12); }
        placement_free(&plan.placement);
        program_free(&p);
    }
}
// The sizes that the planner replays thousands of times.
static void test_large(void **state) {
    (void)state;
    const int sizes[][2] = {{16, 64}, {64, 1024}}; // stages, micro-batches
    for (int i = 0; i < 2; i++) {
        const int S = sizes[i][0], M = sizes[i][1];
        char text[16];
        snprintf(text, sizeof text, "%d", S);
        PipelinePlan plan = plan_of(text, S, S, PIPELINE_DAPPLE, WARMUP_A, 1, M);
        Even even = {&plan, 0};
        Program p = empty_program(&plan.placement, S - 2, S, &plain);
        schedule_pipeline(&p, &plan, M, true);
        assert_true(fabs(bubble(&p, &even) - (double)(S - 1) / (M + S - 1)) < 1e-9);
        placement_free(&plan.placement);
        program_free(&p);
    }
}

// Messages beside compute: two stages, two micro-batches, 1 for each forward, 2 for each backward,
// messages 0.5. Stage 1 receives its second input while it computes, so it waits only for the
// first; the gradients come back while stage 0 has nothing to do.
static void test_messages_overlap(void **state) {
    (void)state;
    PipelinePlan plan = plan_of("2", 6, 2, PIPELINE_DAPPLE, WARMUP_A, 1, 2);
    Even even = {&plan, 0.5};
    Program p = empty_program(&plan.placement, 4, 2, &plain);
    schedule_pipeline(&p, &plan, 2, true);
    double busy[2];
    // 1 + 0.5, then 1 + 2 + 1 + 2, 0.5 + 2
    assert_true(fabs(schedule_simulate(&p, even_cost, &even, busy) - 10) < 1e-12);
    assert_true(fabs(busy[0] - 6) < 1e-12 && fabs(busy[1] - 6) < 1e-12);
    placement_free(&plan.placement);
    program_free(&p);
}
// Messages to one receiver, or from one sender, go one after another: the second input comes at 1 +
// 0.5 + 0.5, the second gradient at 5 + 1.
static void test_links_carry_one_message(void **state) {
    (void)state;
    PipelinePlan plan = plan_of("3:2,3:1", 6, 3, PIPELINE_DAPPLE, WARMUP_A, 2, 1);
    Even even = {&plan, 0.5};
    Program p = empty_program(&plan.placement, 4, 3, &plain);
    schedule_pipeline(&p, &plan, 2, true);
    assert_true(fabs(schedule_simulate(&p, even_cost, &even, NULL) - 8) < 1e-12);
    placement_free(&plan.placement);
    program_free(&p);
}
// Only messages of norms and factors take time, and the last unit's weight part takes 1: it waits
// for its factors, and these for CLIP, which waits for all norms.
static ActionCost clip_cost(const void *context, int rank, const Action *a) {
    const double *message_s = (const double *)context; // of a norm, of a factor
    const double seconds = a->kind == ACT_SEND_NORM     ? message_s[0]
                           : a->kind == ACT_SEND_FACTOR ? message_s[1]
                                                        : 0;
    const ActionCost cost = {a->kind == ACT_BACKWARD_WEIGHT && a->unit == 5, seconds};
    (void)rank;
    return cost;
}
static void test_norms_and_factors_are_awaited(void **state) {
    (void)state;
    const GptModel m = gpt_model(config_of(0, 4));
    for (int i = 0; i < 4; i++) {
        const double message_s[] = {i & 1, i & 2};
        PipelinePlan plan = plan_of("2", 6, 2, PIPELINE_DAPPLE, WARMUP_A, 1, 1);
        plan.clips = CLIPS_ALL;
        Program p = empty_program_of(&m, &plan.placement, 2, &plain, true);
        schedule_pipeline(&p, &plan, 1, true);
        assert_true(schedule_simulate(&p, clip_cost, message_s, NULL) == i + 1);
        placement_free(&plan.placement);
        program_free(&p);
    }
}
// Steps do not overlap, where nothing meets at a norm either.
static void test_steps_are_apart(void **state) {
    (void)state;
    PipelinePlan plan = plan_of("2", 6, 2, PIPELINE_DAPPLE, WARMUP_A, 1, 4);
    Even even = {&plan, 0};
    Program p = empty_program(&plan.placement, 4, 2, &plain);
    schedule_pipeline(&p, &plan, 4, false);
    assert_true(fabs(schedule_simulate(&p, even_cost, &even, NULL) - 5) < 1e-12);
    placement_free(&plan.placement);
    program_free(&p);
}
// Policy B lets messages that take as long as a forward travel while its stages compute; policy A
// waits for them.
static void test_policies(void **state) {
    (void)state;
    double end[2];
    for (int b = 0; b < 2; b++) {
        PipelinePlan plan = plan_of("4", 6, 4, PIPELINE_DAPPLE, b ? WARMUP_B : WARMUP_A, 1, 16);
        Even even = {&plan, 1};
        Program p = empty_program(&plan.placement, 4, 4, &plain);
        schedule_pipeline(&p, &plan, 16, true);
        end[b] = schedule_simulate(&p, even_cost, &even, NULL);
        placement_free(&plan.placement);
        program_free(&p);
    }
    assert_true(end[1] < 0.9 * end[0]);
}

// -------------------------------------------------------------------------------------------------
// Pictures

static char *drawn(const char *stages, int M, int kind, double message, bool trace, int columns) {
    char *text = NULL;
    size_t bytes;
    const int ranks = strcmp(stages, "6:1") ? 2 : 1;
    PipelinePlan plan = plan_of(stages, 6, ranks, kinds[kind], WARMUP_A, 1, M);
    Even even = {&plan, message};
    Program p = empty_program(&plan.placement, 4, ranks, &plain);
    schedule_pipeline(&p, &plan, M, true);
    ActionTime **times = schedule_times(&p);
    schedule_simulate_times(&p, even_cost, &even, NULL, times);
    FILE *f = open_memstream(&text, &bytes);
    if (trace) { schedule_trace(f, &p, times); }
    if (!trace) { schedule_timeline(f, &p, times, columns); }
    fclose(f);
    schedule_times_free(&p, times);
    placement_free(&plan.placement);
    program_free(&p);
    return text;
}
static void test_timeline(void **state) {
    (void)state;
    const struct {
        int kind, columns;
        const char *rows;
    } pictures[] = {
        // no room for the numbers of forwards
        {0, 36,
         "rank 0   |F0-F1-F2-.........B0----B1----B2----|  75 % busy\nrank 1   "
         "|...F0-F1-F2-B0----B1----B2----......|  75 % busy\n"},
        {1, 36,
         "rank 0   |F0-F1-......B0----F2-B1----...B2----|  75 % busy\nrank 1   "
         "|...F0-B0----F1-B1----F2-B2----......|  75 % busy\n"},
        {3, 30,
         "rank 0   |F0-F1-...B0----F2-B1----B2----|  90 % busy\nrank 1   "
         "|...F0-B0-F1-B1-W0-F2-B2-W1-W2-|  90 % busy\n"},
        {1, 12, "rank 0   |FF..B0FB1.B2|  75 % busy\nrank 1   |.FB0FB1FB2..|  75 % busy\n"},
    };
    for (int i = 0; i < 4; i++) {
        char *text = drawn("3:1,3:1", 3, pictures[i].kind, 0, false, pictures[i].columns),
             *rows = strchr(text, '\n') + 1;
        assert_string_equal(rows, pictures[i].rows);
        free(text);
    }
    char *text = drawn("6:1", 11, 1, 0, false, 66); // a number that does not fit is left out
    assert_non_null(strstr(text, "F9B9--F-B10-|"));
    free(text);
}
// The trace has two threads' names and each rank's actions that take time: 3 micro-batches x 9
// compute actions, less the embedding's; messages.
static void test_trace(void **state) {
    (void)state;
    char *text = drawn("3:1,3:1", 3, 1, 0.5, true, 0);
    int compute = 0, messages = 0, depth = 0;
    for (const char *c = text; (c = strstr(c, "\"cat\":\"compute\"")) != NULL; c++) { compute++; }
    for (const char *c = text; (c = strstr(c, "\"cat\":\"messages\",\"ph\":\"X\"")) != NULL; c++) {
        messages++;
    }
    for (const char *c = text; *c; c++) {
        depth += (*c == '{' || *c == '[') - (*c == '}' || *c == ']');
        assert_true(depth > 0 || !strcmp(c, "}\n") || *c == '\n');
    }
    assert_int_equal(compute, 3 * 9 + 3 * 8);
    assert_true(messages >= 2 * 3);
    assert_null(strstr(text, "}\n{"));
    assert_null(strstr(text, "},\n\n"));
    assert_null(strstr(text, ",\n]"));
    assert_int_equal(strncmp(text, "{\"displayTimeUnit\"", 18), 0);
    assert_non_null(strstr(text, "{\"name\":\"FORWARD "
                                 "0.0\",\"cat\":\"compute\",\"ph\":\"X\",\"pid\":0,\"tid\":0,"
                                 "\"ts\":0.000,\"dur\":333333.333,\"args\":"));
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_units_of_a_rank),
        cmocka_unit_test(test_texts_by_chance),
        cmocka_unit_test(test_a_wrong_text_ends_the_program),
        cmocka_unit_test(test_all_plans),
        cmocka_unit_test(test_clipped_plans),
        cmocka_unit_test(test_unequal_replicas),
        cmocka_unit_test(test_who_has_samples),
        cmocka_unit_test(test_live_is_constant),
        cmocka_unit_test(test_a_gap_is_refused),
        cmocka_unit_test(test_evaluation),
        cmocka_unit_test(test_bad_plans),
        cmocka_unit_test(test_bubbles),
        cmocka_unit_test(test_large),
        cmocka_unit_test(test_messages_overlap),
        cmocka_unit_test(test_norms_and_factors_are_awaited),
        cmocka_unit_test(test_steps_are_apart),
        cmocka_unit_test(test_links_carry_one_message),
        cmocka_unit_test(test_policies),
        cmocka_unit_test(test_timeline),
        cmocka_unit_test(test_trace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
