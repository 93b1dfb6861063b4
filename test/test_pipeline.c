// test_pipeline.c: proves pipeline.h: what --pipeline accepts and refuses; that every plan of a small model on few ranks makes a valid program
// that holds as many micro-batches as the paper says and has the bubble it says.
#include "ops_cpu.h"
#include "zero.h"

#include "pipeline.h"

#include <setjmp.h> // cmocka needs it
#include <stddef.h> // cmocka needs it

#include <cmocka.h> // after the headers it needs

static const ZeroPolicy plain = {0, 1, false, false, false, {8, 256}, {4, 256}, false, false};
static Program empty_program(int layers, int ranks, const ZeroPolicy *policy) {
    GptConfig config = {layers, 1, 4, 8, 128, 4};
    GptModel m = gpt_model(config);
    Program p;
    memset(&p, 0, sizeof p);
    p.map = unit_map(&m, policy, ranks, false), p.ranks = ranks;
    p.rank = (Schedule *)calloc((size_t)ranks, sizeof(Schedule));
    return p;
}
static const PipelineKind kinds[4] = {PIPELINE_GPIPE, PIPELINE_DAPPLE, PIPELINE_DAPPLE, PIPELINE_ZERO_BUBBLE}; // the third with policy B
static PipelinePlan plan_of(const char *text, int units, int ranks, PipelineKind kind, Warmup warmup, int64_t rows, int M) {
    PipelinePlan plan = {pipeline_placement(text, units, ranks), kind, warmup, rows, M, INT64_MAX, false};
    return plan;
}
static void test_valid(void **state) {
    (void)state;
    char error[400];
    const char *texts[] = {"4", "2", "1", "1:1,2:2,3:1", "2:1,4:3", "5:3,1:1"};
    for (int i = 0; i < 6 * 8 * 4; i++) {
        PipelinePlan plan = plan_of(texts[i % 6], 6, 4,
                                    i / 48 == 0   ? PIPELINE_GPIPE
                                    : i / 48 == 3 ? PIPELINE_ZERO_BUBBLE
                                                  : PIPELINE_DAPPLE,
                                    i / 48 == 2 ? WARMUP_B : WARMUP_A, 3, 1 + i / 6 % 8);
        Program p = empty_program(4, 4, &plain);
        schedule_pipeline(&p, &plan, 3 * plan.micro_batches - 1, true);
        zero_lower(&p, &plain, true);
        if (!schedule_validate(&p, error, sizeof error)) { fail_msg("%d: %s M %d kind %d: %s", i, texts[i % 6], plan.micro_batches, plan.kind, error); }
        placement_free(&plan.placement), program_free(&p);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Times

// Every stage costs 1 forward, 1 for its input gradients and 1 for its weight gradients, whatever units it has.
typedef struct {
    const PipelinePlan *plan;
    double message;
} Even;
static ActionCost even_cost(const void *context, int rank, const Action *a) {
    const Even *even = (const Even *)context;
    ActionCost cost = {0, 0};
    if (action_sends(a->kind)) { cost.message_s = even->message; }
    if (!action_computes(a->kind)) { return cost; }
    const Stage *stage = &even->plan->placement.stage[placement_stage_of_unit(&even->plan->placement, a->unit)];
    (void)rank;
    bool embedding = stage->first_unit == 0; // it has no input gradient: others' cost more
    cost.compute_s = 1.0 / (stage->units - (a->kind == ACT_BACKWARD_INPUT && embedding));
    if (a->kind == ACT_BACKWARD_WEIGHT && embedding && stage->units == 1) { cost.compute_s = 2; }
    return cost;
}
static double bubble(const Program *p, const Even *even) {
    double *busy = (double *)calloc((size_t)p->ranks, sizeof(double)), all = 0, end = schedule_simulate(p, even_cost, even, busy);
    for (int r = 0; r < p->ranks; r++) { all += busy[r]; }
    free(busy);
    return 1 - all / (end * p->ranks);
}
// Even stages and no cost of messages: (S - 1) / (M + S - 1) of a step is idle in GPipe and DAPPLE. Where a third of the work can wait for
// the bubbles, and fills them: (S - 1) / (3 M + S - 1).
static void test_bubbles(void **state) {
    (void)state;
    for (int i = 0; i < 9 * 24 * 4; i++) {
        int S = i / 24 % 9 + 1, M = 1 + i % 24, kind = i / 216;
        char text[16];
        snprintf(text, sizeof text, "%d", S);
        PipelinePlan plan = plan_of(text, 10, S, kinds[kind], kind == 2 ? WARMUP_B : WARMUP_A, 1, M);
        Even even = {&plan, 0};
        Program p = empty_program(8, S, &plain);
        schedule_pipeline(&p, &plan, M, true);
        double found = bubble(&p, &even), expected = (double)(S - 1) / (M + S - 1), filled = (double)(S - 1) / (3 * M + S - 1);
        bool zero = plan.kind == PIPELINE_ZERO_BUBBLE;
        if (!zero || M >= S) { assert_true(fabs(found - (zero ? filled : expected)) < 1e-12); }
        if (zero) { assert_true(found <= expected + 1e-12); }
        placement_free(&plan.placement), program_free(&p);
    }
}
// The planner replays thousands of schedules.
static void test_speed(void **state) {
    (void)state;
    const struct {
        int stages, micro_batches;
        double most; // seconds of both
    } cases[] = {{16, 64, 0.01}, {64, 1024, 1}};
    for (int i = 0; i < 2; i++) {
        int S = cases[i].stages, M = cases[i].micro_batches;
        char text[16];
        snprintf(text, sizeof text, "%d", S);
        PipelinePlan plan = plan_of(text, S, S, PIPELINE_DAPPLE, WARMUP_A, 1, M);
        Even even = {&plan, 0};
        Program p = empty_program(S - 2, S, &plain);
        double start = seconds_now();
        schedule_pipeline(&p, &plan, M, true);
        assert_true(fabs(bubble(&p, &even) - (double)(S - 1) / (M + S - 1)) < 1e-9);
        double took = seconds_now() - start;
        print_message("%d stages, %d micro-batches: built and simulated in %.3f ms\n", S, M, 1e3 * took);
        assert_true(took < cases[i].most);
        placement_free(&plan.placement), program_free(&p);
    }
}
int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_valid),
        cmocka_unit_test(test_bubbles),
        cmocka_unit_test(test_speed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
