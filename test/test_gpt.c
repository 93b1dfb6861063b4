// test_gpt.c: proves the model. Logits, loss, all 16 gradients and 10 steps of three optimizers
// agree with PyTorch's numbers (test/golden, made by make_golden.py), whatever the micro-batch,
// with recomputation and, more loosely, in bf16. The tensor table covers every parameter once,
// files lie as llm.c's, initial values are what the banner says, and every descriptor is the model
// that its name promises. What must end the program runs in a child, whose exit code and message
// are checked.
#include "model/presets.h"
#include "zero.h"
#include "ops/cpu/ops_cpu.h"
#include "checkpoint/checkpoint.h"
#include "run/generate.h"
#include "pipeline.h"

#include "harness.h"
#include "policies.h" // ZERO_STAGE

// -------------------------------------------------------------------------------------------------
// The golden files

enum {
    B = 3,
    T = 20,
    V = 101,
    VP = 128,
    C = 48,
    LAYERS = 3,
    MAX_T = 24,
    UPDATES = 10,
    RUNS = 3,
    STORED = 92208
};
static const char *const model_path = "test/golden/gpt_tiny_model.bin";
static struct {
    int32_t x[B][T], y[B][T];
    float logits[B][T][V], loss, gradients[STORED];
    double losses[4][UPDATES], norms[4][UPDATES]; // runs 0..2 on (x, y), run 3 on the shard
} golden;

static void read_all(FILE *f, void *to, size_t bytes) {
    assert_int_equal(fread(to, 1, bytes, f), bytes);
}
static int read_golden(void **state) {
    (void)state;
    int32_t header[256];
    FILE *f = fopen("test/golden/gpt_tiny.bin", "rb"); // from the root of the repository
    assert_non_null(f);
    read_all(f, header, sizeof header);
    assert_true(header[0] == 20240327 && header[1] == 2 && header[2] == B && header[3] == T);
    read_all(f, golden.x, sizeof golden.x);
    read_all(f, golden.y, sizeof golden.y);
    read_all(f, golden.logits, sizeof golden.logits);
    read_all(f, &golden.loss, sizeof golden.loss);
    read_all(f, golden.gradients, sizeof golden.gradients);
    read_all(f, golden.losses, RUNS * UPDATES * sizeof(double));
    read_all(f, golden.norms, RUNS * UPDATES * sizeof(double));
    read_all(f, golden.losses[3], UPDATES * sizeof(double));
    read_all(f, golden.norms[3], UPDATES * sizeof(double));
    assert_int_equal(fgetc(f), EOF);
    fclose(f);
    return 0;
}

// The batch (x, y) as a data set of three windows that do not overlap: x[0..T) and y[T-1] of each.
static uint16_t batch_tokens[B * (T + 1)];
static TokenShard batch_shard = {.tokens = {batch_tokens, 2}, .count = B * (T + 1)};
static uint64_t batch_table[B];
static Dataset batch_dataset(void) {
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) { batch_tokens[b * (T + 1) + t] = (uint16_t)golden.x[b][t]; }
        batch_tokens[b * (T + 1) + T] = (uint16_t)golden.y[b][T - 1];
        batch_table[b] = ((uint64_t)(b * (T + 1)) << TARGET_BITS) | T;
    }
    const DatasetOptions options = {"--train", T, V, 0, WINDOWS_DOCUMENT, false, 0, 0};
    Dataset d;
    memset(&d, 0, sizeof d);
    d.options = options;
    d.shards = &batch_shard;
    d.shard_count = 1;
    d.tokens = B * (T + 1);
    d.windows = B;
    d.table = batch_table;
    return d;
}

// -------------------------------------------------------------------------------------------------
// A rig: everything that trains the golden model on one rank

static Comm comm;
static Group world;
typedef struct {
    int rows; // of a micro-batch
    bool recompute, sgd;
    DType dtype;
} Setting;
typedef struct {
    Setting setting;
    GptModel model;
    Program program;
    Stream stream;
    Placement placement;
    Store store;
    Executor executor;
    Dataset batch;
    double sample_losses[B];
} Rig;

static const ZeroPolicy plain = ZERO_STAGE(0, false, NULL);
static Program program_of(const GptModel *m, Setting setting, bool training) {
    Program p;
    memset(&p, 0, sizeof p);
    Placement placement = pipeline_placement("1", m->units, 1);
    p.map = test_unit_map(m, &plain, &placement, false);
    p.ranks = 1;
    placement_free(&placement);
    p.rank = calloc(1, sizeof(Schedule));
    schedule_sequential(&p, B, setting.rows, training);
    if (training && setting.recompute) { schedule_lower_recompute(&p); }
    zero_lower(&p, training);
    return p;
}
static Rig *rig_make(Setting setting) {
    Rig *r = calloc(1, sizeof *r);
    DType file_dtype;
    size_t unused[2];
    r->setting = setting;
    r->model = gpt_model(model_file_config(model_path, &file_dtype));
    assert_int_equal(file_dtype, DTYPE_FP32);
    r->program = program_of(&r->model, setting, true);
    r->stream.threads = 2;
    ops_open(&r->stream, 0, setting.dtype);
    OpsShape shape = {setting.rows, T, C, 3, V, VP, LOGITS_PLENTY};
    r->stream.workspace_bytes = ops_workspace_bytes(shape, r->stream.threads);
    r->stream.workspace = ops_alloc(r->stream.workspace_bytes);
    r->placement = pipeline_placement("1", r->model.units, 1);
    const MixedPrecision precision = {setting.dtype, DTYPE_FP32};
    r->store = store_of_plan(
        state_plan(&r->model, &world, &r->placement, &plain, precision, &optimizers[setting.sgd]));
    store_allocate(&r->store, &comm, &r->stream);
    ExecutorShape works;
    memset(&works, 0, sizeof works);
    works.dtype = setting.dtype;
    works.rows = setting.rows;
    works.T = T;
    works.recompute = setting.recompute;
    works.logits = LOGITS_PLENTY;
    works.clip.clips = CLIPS_NOTHING;
    works.clip.stages = 1;
    works.clip.function = CLIP_ABADI;
    works.units = units_range(0, r->model.units);
    works.limits = r->program.limits[0];
    r->executor = executor_plan(&r->model, works, &unused[0], &unused[1]);
    executor_allocate(&r->executor, &r->program.map, &r->store, &comm, &r->stream, B, B,
                      r->program.micro_batches);
    model_file_load(model_path, &r->store, file_dtype);
    r->batch = batch_dataset();
    return r;
}
static void rig_free(Rig *r) {
    ops_free(r->stream.workspace);
    executor_free(&r->executor);
    store_free(&r->store);
    placement_free(&r->placement);
    program_free(&r->program);
    free(r);
}
static double rig_loss(const Rig *r) {
    double sum = 0;
    for (int b = 0; b < B; b++) { sum += r->sample_losses[b]; }
    return sum / (B * T);
}
// Forward and backward of step k on the data; returns the norm. *at is where the updates begin.
static double rig_gradients(Rig *r, const Dataset *data, int64_t k, int *at) {
    Pass pass = {.data = data,
                 .first_sample = k * B,
                 .samples = B,
                 .sample_losses = r->sample_losses,
                 .scale = (float)(1.0 / (B * T)),
                 .training = true};
    double norm = -1;
    *at = 0;
    executor_run(&r->executor, &r->program.rank[0], at, &pass, NULL, k, &norm);
    return norm;
}
static void rig_update(Rig *r, int at, OptimizerStep optimizer) {
    Pass pass = {
        .data = &r->batch, .samples = B, .sample_losses = r->sample_losses, .training = true};
    executor_run(&r->executor, &r->program.rank[0], &at, &pass, &optimizer, 0, NULL);
    assert_int_equal(at, r->program.rank[0].count);
}
// Gradients of the whole model in file order.
static float *rig_file_gradients(const Rig *r) {
    float *all = malloc(STORED * sizeof(float));
    for (int storage = 0; storage < r->model.storages; storage++) {
        TensorPart parts[MOST_TENSORS];
        int n = gpt_storage_parts(&r->model, storage, parts);
        for (int i = 0; i < n; i++) {
            const float *from =
                (const float *)(void *)store_full(&r->store, STATE_GRADIENT, storage) +
                parts[i].offset;
            memcpy(all + model_file_offset(&r->model, parts[i].tensor, parts[i].layer), from,
                   (size_t)parts[i].elements * sizeof(float));
        }
    }
    return all;
}

// -------------------------------------------------------------------------------------------------
// Against PyTorch

static double largest(const float *x, int64_t n) {
    double most = 0;
    for (int64_t i = 0; i < n; i++) { most = fmax(most, fabs((double)x[i])); }
    return most;
}
static void check_close(const char *what, const float *found, const float *expected, int64_t n,
                        double tolerance) {
    double scale = largest(expected, n);
    for (int64_t i = 0; i < n; i++) {
        double error = fabs((double)found[i] - (double)expected[i]);
        if (!(error <= tolerance * scale)) {
            fail_msg("%s[%d]: expected %g, found %g, largest %g", what, (int)i, (double)expected[i],
                     (double)found[i], scale);
        }
    }
}
static void check_number(const char *what, int step, double found, double expected,
                         double tolerance) {
    if (!(fabs(found - expected) <= tolerance * fabs(expected))) {
        fail_msg("%s of step %d: expected %.9g, found %.9g", what, step, expected, found);
    }
}

// fp32: an fp32 sum of some hundred terms is good to about 1e-6; a dozen of them in a row leave
// 1e-5; 1e-4 has room. The loss is a mean of 60 numbers and better. bf16: a parameter or boundary
// is rounded by up to 2^-9 = 0.2 %. 60 rows average the loss; a gradient's element has several such
// roundings on its path, and is compared with the largest of its tensor: 2 %.
static const double LOSS_FP32 = 1e-5, GRADIENT_FP32 = 1e-4, NORM_FP32 = 1e-5, LOSS_BF16 = 1e-3,
                    GRADIENT_BF16 = 2e-2;

static void test_logits(void **state) {
    (void)state;
    for (int recompute = 0; recompute < 2; recompute++) {
        Setting setting = {3, recompute, false, DTYPE_FP32};
        Rig *r = rig_make(setting);
        float logits[VP];
        for (int i = 0; i < B * T; i++) {
            executor_logits(&r->executor, &r->placement, golden.x[i / T], 0, i % T + 1, logits);
            check_close("logits", logits, golden.logits[i / T][i % T], V, GRADIENT_FP32);
        }
        rig_free(r);
    }
}

static const Setting settings[] = {
    {3, false, false, DTYPE_FP32}, {3, true, false, DTYPE_FP32}, {2, false, false, DTYPE_FP32},
    {1, false, false, DTYPE_FP32}, {2, true, true, DTYPE_FP32},  {1, true, false, DTYPE_FP32},
    {3, false, false, DTYPE_BF16}, {2, true, false, DTYPE_BF16}, {1, false, true, DTYPE_BF16},
};
enum { SETTINGS = (int)(sizeof settings / sizeof settings[0]) };

// Rows that belong to no token and positions that were not used get exactly no gradient.
static void check_unused_rows(const float *gradients) {
    for (int64_t i = V * C; i < VP * C; i++) { assert_true(gradients[i] == 0); }
    const float *wpe = gradients + VP * C;
    for (int64_t i = T * C; i < MAX_T * C; i++) { assert_true(wpe[i] == 0); }
}
static void check_gradients(const Rig *r) {
    float *found = rig_file_gradients(r);
    double tolerance = r->setting.dtype == DTYPE_BF16 ? GRADIENT_BF16 : GRADIENT_FP32;
    for (int t = 0; t < GPT2_TENSORS; t++) {
        int64_t from = model_file_offset(&r->model, t, 0),
                to = t + 1 < GPT2_TENSORS ? model_file_offset(&r->model, (t + 1), 0) : STORED;
        check_close(gpt2_tensors[t].name, found + from, golden.gradients + from, to - from,
                    tolerance);
    }
    check_unused_rows(found);
    free(found);
}
// Twice: the second pass must not see the first one's sums.
static void test_loss_and_gradients(void **state) {
    (void)state;
    for (int i = 0; i < SETTINGS; i++) {
        Rig *r = rig_make(settings[i]);
        bool bf16 = settings[i].dtype == DTYPE_BF16;
        int at;
        for (int pass = 0; pass < 2; pass++) {
            double norm = rig_gradients(r, &r->batch, 0, &at);
            check_number("loss", i, rig_loss(r), (double)golden.loss, bf16 ? LOSS_BF16 : LOSS_FP32);
            check_number("norm", i, norm, golden.norms[0][0], bf16 ? GRADIENT_BF16 : NORM_FP32);
            check_gradients(r);
        }
        rig_free(r);
    }
}
// Recomputation repeats the same arithmetic on the same numbers: the same bits.
static void test_recompute_changes_no_bit(void **state) {
    (void)state;
    for (int dtype = DTYPE_FP32; dtype <= DTYPE_BF16; dtype++) {
        float *gradients[2];
        for (int recompute = 0; recompute < 2; recompute++) {
            Setting setting = {2, recompute, false, (DType)dtype};
            Rig *r = rig_make(setting);
            int at;
            rig_gradients(r, &r->batch, 0, &at);
            gradients[recompute] = rig_file_gradients(r);
            rig_free(r);
        }
        assert_memory_equal(gradients[0], gradients[1], STORED * sizeof(float));
        free(gradients[0]);
        free(gradients[1]);
    }
}
// A validation pass has the losses of a training pass and leaves the gradients alone.
static void test_evaluation(void **state) {
    (void)state;
    for (int i = 0; i < SETTINGS; i++) {
        Rig *r = rig_make(settings[i]);
        Program evaluation = program_of(&r->model, settings[i], false);
        Pass pass = {.data = &r->batch, .samples = B, .sample_losses = r->sample_losses};
        int at = 0;
        executor_run(&r->executor, &evaluation.rank[0], &at, &pass, NULL, 0, NULL);
        check_number("loss", i, rig_loss(r), (double)golden.loss,
                     settings[i].dtype == DTYPE_BF16 ? LOSS_BF16 : LOSS_FP32);
        assert_true(
            largest((const float *)(void *)store_full(&r->store, STATE_GRADIENT, 0), STORED) == 0);
        pass.samples = 1; // the last batch of a validation may be short: rows beyond are left out
        r->sample_losses[1] = r->sample_losses[2] = -7;
        at = 0;
        executor_run(&r->executor, &evaluation.rank[0], &at, &pass, NULL, 0, NULL);
        assert_true(r->sample_losses[0] > 0 && r->sample_losses[1] == -7 &&
                    r->sample_losses[2] == -7);
        program_free(&evaluation);
        rig_free(r);
    }
}

static OptimizerStep optimizer_of(int run, double norm) {
    OptimizerStep adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0, 1, 0, round_to_nearest()},
                  sgd = {0.05f, 0, 0, 0, 0.1f, 0.9f, 1, 0, round_to_nearest()};
    OptimizerStep o = run == 2 ? sgd : adamw;
    bool clip = run == 1 || run == 3;
    o.grad_scale = clip ? (float)fmin(1, 1 / norm) : 1.0f;
    return o;
}
// Each step's rounding feeds the next: Adam divides by sqrt(v), so elements whose gradient is near
// zero move by lr either way.
static void check_run(int run, Setting setting, double loss_tolerance, double norm_tolerance) {
    setting.sgd = run == 2;
    Rig *r = rig_make(setting);
    DatasetOptions options = {"--train", T, V, 0, WINDOWS_CONTINUOUS, false, 0, 0};
    Dataset shard = dataset_open("test/golden/gpt_tiny_tokens.bin", options);
    for (int k = 0; k < UPDATES; k++) {
        int at;
        double norm = rig_gradients(r, run == 3 ? &shard : &r->batch, k, &at);
        check_number("loss", k, rig_loss(r), golden.losses[run][k], loss_tolerance);
        check_number("norm", k, norm, golden.norms[run][k], norm_tolerance);
        rig_update(r, at, optimizer_of(run, norm));
    }
    // the padding stays out of it
    for (int64_t i = V * C; i < VP * C; i++) {
        assert_true(store_floats(&r->store, STATE_MASTER, 0, 0)[i] == 0);
    }
    for (int s = 0; s < r->model.storages; s++) {
        assert_int_equal(r->store.flight.progress[s].updates, UPDATES);
    }
    rig_free(r);
}
static void test_ten_steps(void **state) {
    (void)state;
    for (int run = 0; run < 4; run++) {
        for (int rows = 1; rows <= B; rows++) {
            Setting setting = {rows, rows == 2, false, DTYPE_FP32};
            check_run(run, setting, LOSS_FP32, GRADIENT_FP32);
        }
    }
}
// 1e-2 after ten steps: the weights that are used are rounded anew each step (the masters are not).
static void test_ten_steps_in_bf16(void **state) {
    (void)state;
    for (int run = 0; run < 4; run++) {
        Setting setting = {2, run == 1, false, DTYPE_BF16};
        check_run(run, setting, 1e-2, 4e-2);
    }
}

// -------------------------------------------------------------------------------------------------
// The tensor table

static GptModel model_from(const char *text, int64_t seq_len) {
    GptConfig config = {0, 0, 0, 0, 0, 0};
    assert_true(gpt_config_from_descriptor(&config, text, seq_len));
    return gpt_model(config);
}
static void test_parameter_counts(void **state) {
    (void)state;
    GptModel gpt2 = model_from("gpt2:124M", 64),
             tiny = model_from("layers=3,heads=3,channels=48,vocab=101", MAX_T);
    assert_int_equal(gpt2.parameters, 124475904); // llm.c's number, 50304 rows of wte
    assert_int_equal(tiny.parameters, STORED);
    assert_true(gpt2.units == 14 && gpt2.storages == 15);
}
// llm.c's order on disk; offsets worked out by hand for L = 3, C = 48: C^2 = 2304.
static void test_file_offsets(void **state) {
    (void)state;
    static const int64_t expected[GPT2_TENSORS] = {0,     6144,  7296,  7440,  7584,  28320,
                                                   28752, 35664, 35808, 35952, 36096, 63744,
                                                   64320, 91968, 92112, 92160};
    GptModel m = model_from("layers=3,heads=3,channels=48,vocab=101", MAX_T);
    for (int t = 0; t < GPT2_TENSORS; t++) {
        assert_int_equal(model_file_offset(&m, t, 0), expected[t]);
    }
    assert_int_equal(model_file_offset(&m, QKVW, 2), 7584 + 2 * 3 * 2304);
    assert_int_equal(model_file_offset(&m, FCPROJB, 1), 91968 + 48);
}
// Every element of every storage belongs to one part, and every element of the file to one part.
static void test_parts_cover_everything_once(void **state) {
    (void)state;
    static const char *const models[] = {"layers=3,heads=3,channels=48,vocab=101",
                                         "layers=1,heads=1,channels=1,vocab=1",
                                         "layers=5,heads=7,channels=21,vocab=300"};
    for (int i = 0; i < 3; i++) {
        GptModel m = model_from(models[i], 9);
        unsigned char *file = calloc((size_t)m.parameters, 1);
        int64_t stored = 0;
        for (int storage = 0; storage < m.storages; storage++) {
            TensorPart parts[MOST_TENSORS];
            int n = gpt_storage_parts(&m, storage, parts);
            int64_t at = 0;
            for (int p = 0; p < n; p++) {
                assert_int_equal(parts[p].offset, at); // no hole, no overlap
                at += parts[p].elements;
                for (int64_t e = 0; e < parts[p].elements; e++) {
                    file[model_file_offset(&m, parts[p].tensor, parts[p].layer) + e]++;
                }
            }
            assert_int_equal(at, gpt_storage_elements(&m, storage));
            stored += at;
        }
        assert_int_equal(stored, m.parameters);
        for (int64_t e = 0; e < m.parameters; e++) { assert_int_equal(file[e], 1); }
        free(file);
    }
}
// Decay is for 2-D tensors: those with more than one row.
static void test_decay_is_for_matrices(void **state) {
    (void)state;
    for (int t = 0; t < GPT2_TENSORS; t++) {
        assert_int_equal(gpt2_tensors[t].rows.times > 0, gpt2_tensors[t].init >= INIT_NORMAL);
    }
}

// -------------------------------------------------------------------------------------------------
// Initial values

static float *initial_values(const GptModel *m, uint64_t seed, int threads) { // in file order
    float *all = calloc((size_t)m->parameters, sizeof(float)),
          *one = malloc((size_t)m->parameters * sizeof(float));
    omp_set_num_threads(threads);
    for (int storage = 0; storage < m->storages; storage++) {
        TensorPart parts[MOST_TENSORS];
        int n = gpt_storage_parts(m, storage, parts);
        memset(one, 0, (size_t)m->parameters * sizeof(float));
        // in pieces, others for each number of threads
        for (int64_t at = 0, end, n_all = gpt_storage_elements(m, storage); at < n_all; at = end) {
            end = min_i64(at + 5000 * threads - 1, n_all);
            gpt_initialise(m, storage, seed, at, end, one + at);
        }
        for (int i = 0; i < n; i++) {
            memcpy(all + model_file_offset(m, parts[i].tensor, parts[i].layer),
                   one + parts[i].offset, (size_t)parts[i].elements * sizeof(float));
        }
    }
    free(one);
    return all;
}
// Five standard errors: a right program fails once in two million times, and the seeds are fixed.
static void check_moments(const char *name, const float *x, int64_t n, double deviation) {
    double sum = 0, squares = 0, inside = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += (double)x[i];
        squares += (double)x[i] * (double)x[i];
        inside += fabs((double)x[i]) < deviation;
    }
    double mean = sum / (double)n, found = sqrt(squares / (double)n), error = 5 / sqrt((double)n);
    if (fabs(mean) > error * deviation) { fail_msg("%s: mean %g", name, mean); }
    if (fabs(found / deviation - 1) > error / sqrt(2.0)) {
        fail_msg("%s: deviation %g, expected %g", name, found, deviation);
    }
    // normal, not just any
    if (fabs(inside / (double)n - 0.682689) > error * 0.47) {
        fail_msg("%s: %g of the values within one deviation", name, inside / (double)n);
    }
}
static void test_initial_distribution(void **state) {
    (void)state;
    GptModel m = model_from("layers=2,heads=4,channels=64,vocab=500", 64);
    for (uint64_t seed = 1; seed <= 3; seed++) {
        float *x = initial_values(&m, seed, 2);
        for (int t = 0; t < GPT2_TENSORS; t++) {
            TensorInit init = gpt2_tensors[t].init;
            const float *values = x + model_file_offset(&m, t, 0);
            int64_t n = m.tensor_elements[t] * (gpt2_tensors[t].storage == STORAGE_BLOCK ? 2 : 1),
                    used = t == WTE ? 500 * 64 : n;
            for (int64_t i = 0; i < n && init < INIT_NORMAL; i++) {
                assert_true(values[i] == (init == INIT_ONE ? 1.0f : 0.0f));
            }
            // 0.02 / sqrt(2 L)
            if (init >= INIT_NORMAL) {
                check_moments(gpt2_tensors[t].name, values, used,
                              init == INIT_RESIDUAL ? 0.01 : 0.02);
            }
            // padding rows
            for (int64_t i = used; i < n; i++) { assert_true(values[i] == 0); }
        }
        free(x);
    }
}
// A function of (seed, tensor, element over all layers) alone. With 5 channels pairs of normals
// straddle layers.
static void test_initial_values_by_element(void **state) {
    (void)state;
    GptModel m = model_from("layers=3,heads=1,channels=5,vocab=7", 3);
    float *x = initial_values(&m, 99, 2);
    for (int t = 0; t < GPT2_TENSORS; t++) {
        if (gpt2_tensors[t].init < INIT_NORMAL) { continue; }
        double scale = gpt2_tensors[t].init == INIT_RESIDUAL ? 0.02 / sqrt(6.0) : 0.02;
        int64_t n = t == WTE
                        ? 7 * 5
                        : m.tensor_elements[t] * (gpt2_tensors[t].storage == STORAGE_BLOCK ? 3 : 1);
        for (int64_t i = 0; i < n; i++) {
            double z[2];
            random_normal_pair(99, (uint64_t)t, (uint64_t)(i / 2), z);
            assert_true(x[model_file_offset(&m, t, 0) + i] == (float)(scale * z[i % 2]));
        }
    }
    free(x);
}
static void test_initial_values_depend_on_the_seed_only(void **state) {
    (void)state;
    GptModel m = model_from("layers=3,heads=1,channels=5,vocab=70", 3);
    float *one = initial_values(&m, 7, 1), *three = initial_values(&m, 7, 3),
          *other = initial_values(&m, 8, 1);
    assert_memory_equal(one, three, (size_t)m.parameters * sizeof(float));
    for (int t = 0; t < GPT2_TENSORS; t++) {
        int64_t at = model_file_offset(&m, t, 0), same = 0;
        for (int64_t i = 0; i < 5; i++) { same += one[at + i] == other[at + i]; }
        assert_int_equal(same, gpt2_tensors[t].init < INIT_NORMAL ? 5 : 0);
    }
    free(one);
    free(three);
    free(other);
}

// -------------------------------------------------------------------------------------------------
// Descriptors

// "gpt3:6.7B" -> 6.7e9; 0 where the name has no size.
static double size_in_name(const char *name) {
    const char *colon = strchr(name, ':');
    char unit = 0;
    double size = 0;
    if (!colon || sscanf(colon + 1, "%lf%c", &size, &unit) != 2) { return 0; }
    return size * (unit == 'B' ? 1e9 : 1e6);
}
static void test_every_descriptor(void **state) {
    (void)state;
    for (int i = 0; i < GPT_DESCRIPTORS; i++) {
        const GptDescriptor *d = &gpt_descriptors[i];
        GptModel m = model_from(d->name, 64);
        const GptConfig *c = &m.config;
        gpt_config_check(c, d->name); // ends the program if it is impossible
        const bool gpt2 = !strcmp(m.arch->name, "gpt2") && !c->experts;
        assert_true(!gpt2 || (c->vocab == 50257 && c->channels % c->heads == 0));
        assert_int_equal(c->padded_vocab, round_up(c->vocab, VOCAB_PADDING));
        double named = size_in_name(d->name),
               unpadded = (double)(m.parameters - (c->padded_vocab - c->vocab) * c->channels);
        // names are rounded to two or three digits; gpt2:350M is 355 M, gpt3:350M 356 M
        if (gpt2 && named > 0 && fabs(unpadded / named - 1) > 0.02) {
            fail_msg("%s has %g parameters", d->name, unpadded);
        }
        const bool longer = !strncmp(d->name, "gpt3:", 5) || !strncmp(d->name, "gpt:", 4);
        assert_true(!gpt2 || c->max_seq_len == (longer ? 2048 : 1024));
        if (d->name[0] == 'd') { assert_int_equal(atoi(d->name + 1), c->layers); }
        for (int j = 0; j < i; j++) { assert_string_not_equal(d->name, gpt_descriptors[j].name); }
    }
}
// Counts of today's models, which their names only hint at (transformers' and litgpt's).
static void test_parameters_of_presets(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int64_t parameters;
    } presets[] = {{"llama3.2:1B", 1235814400},
                   {"llama3.2:3B", 3212749824},
                   {"llama3.1:8B", 8030261248},
                   {"llama3:70B", 70553706496},
                   {"llama3:8B", 8030261248},
                   {"qwen2.5:0.5B", 494032768},
                   {"qwen2.5:1.5B", 1543714304},
                   {"qwen2.5:7B", 7615616512},
                   {"qwen3:0.6B", 596049920},
                   {"qwen3:1.7B", 1720574976},
                   {"qwen3:4B", 4022468096},
                   {"qwen3:8B", 8190735360},
                   {"nano:d12", 2 * 32768 * 768 + 12 * 7077888}};
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        assert_int_equal(model_from(presets[i].name, 64).parameters, presets[i].parameters);
    }
}
static void test_other_spellings(void **state) {
    (void)state;
    GptConfig a, b; // with what the compiler leaves between their fields
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    assert_true(gpt_config_from_descriptor(&a, "d12", 64) &&
                gpt_config_from_descriptor(&b, "gpt2:d12", 64));
    assert_memory_equal(&a, &b, sizeof a);
    static const char *const files[] = {"",           "d13",       "gpt2",     "gpt2:124",
                                        "gpt2:124M ", "model.bin", "gpt3:d12", "D12"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        assert_false(gpt_config_from_descriptor(&a, files[i], 64));
    }
}
static void test_pairs(void **state) {
    (void)state;
    typedef struct {
        const char *text;
        int64_t seq_len;
        GptConfig expected; // layers, heads, channels, vocab, padded, positions
    } Case;
    static const Case cases[] = {
        {"layers=6,heads=6,channels=384,vocab=256", 128, {6, 6, 384, 256, 256, 128}},
        {"vocab=257,channels=8,layers=1,heads=2", 1, {1, 2, 8, 257, 384, 1}},
        {"channels=64,heads=4,layers=2", 1024, {2, 4, 64, 50257, 50304, 1024}},
        {"layers=1,heads=1,channels=1,vocab=1", 7, {1, 1, 1, 1, 128, 7}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        GptConfig found;
        const GptConfig expected = gpt_config_complete(cases[i].expected);
        assert_true(gpt_config_from_descriptor(&found, cases[i].text, cases[i].seq_len));
        assert_memory_equal(&found, &expected, sizeof found);
    }
}

static void read_descriptor(const void *text) {
    GptConfig config;
    gpt_config_from_descriptor(&config, (const char *)text, 64);
}
static void test_bad_pairs_are_refused(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        // text, words of the message
        {"layers=0,heads=1,channels=1", "cannot read \"layers=0"},
        {"layers=-1,heads=1,channels=1", "cannot read \"layers=-1"},
        {"layers=6", "impossible: layers=6 heads=0 channels=0"},
        {"vocab=256", "impossible: layers=0"},
        {"layers=6,channels=64", "heads=0"},
        {"layers=6,heads=2", "channels=0"},
        {"heads=5,layers=1,channels=64", "impossible: layers=1 heads=5 channels=64"},
        {"heads=128,layers=1,channels=64", "impossible"},
        {"layers=1,layers=2,heads=1,channels=64", "cannot read \"layers=2"},
        {"layers=1,heads=1,channels=64,vocab=5,vocab=5", "cannot read \"vocab=5\""},
        {"layers=99999999999999999999,heads=1,channels=64", "cannot read"},
        {"layers=1,heads=1,channels=99999999999999999999", "cannot read"},
        {"layers=1,heads=99999999999999999999,channels=64", "cannot read"},
        {"layers=1,heads=1,channels=64,vocab=99999999999999999999", "cannot read"},
        {"layers=-99999999999999999999,heads=1,channels=64", "cannot read"},
        {"layers=10001,heads=1,channels=64", "impossible"},
        {"layers=1,heads=1,channels=2097152", "impossible"},
        {"layers=1,heads=1,channels=64,vocab=16777217", "impossible"},
        {"bogus=3", "cannot read \"bogus=3\""},
        {"layers=1,heads=1,channels=64,bogus=3", "cannot read \"bogus=3\""},
        {"layer=1,heads=1,channels=64", "cannot read"},
        {"layerss=1,heads=1,channels=64", "cannot read"},
        {"Layers=1,heads=1,channels=64", "cannot read"},
        {"layers=,heads=1,channels=64", "cannot read"},
        {"layers=x,heads=1,channels=64", "cannot read"},
        {"layers=6x,heads=1,channels=64", "cannot read"},
        {"layers=6.5,heads=1,channels=64", "cannot read"},
        {"layers=1e3,heads=1,channels=64", "cannot read"},
        {"layers=0x10,heads=1,channels=64", "cannot read"},
        {"layers=1,,heads=1,channels=64", "cannot read"},
        {",layers=1,heads=1,channels=64", "cannot read"},
        {"layers=1;heads=1,channels=64", "cannot read"},
        {"layers=1,heads=1,channels=64,", "cannot read"},
        {"layers=1,heads=1,channels", "cannot read \"channels\""},
        {"layers==1", "cannot read"},
        {"arch=gpt3,layers=1,heads=1,channels=4", "cannot read \"arch=gpt3"},
        {"arch=gpt2,arch=gpt2,layers=1,heads=1,channels=4", "cannot read \"arch=gpt2"},
        {"=", "cannot read"},
        {"=1", "cannot read"},
        {"./folder=a/model.bin", "cannot read"},
    };
    int wrong = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char message[4096];
        int code = run_child(read_descriptor, cases[i][0], message, sizeof message);
        if (code != EXIT_INPUT || !strstr(message, cases[i][1])) {
            print_error("\"%s\": exit code %d, \"%s\" in: %s\n", cases[i][0], code, cases[i][1],
                        message);
            wrong++;
        }
    }
    assert_int_equal(wrong, 0);
}

// -------------------------------------------------------------------------------------------------
// The tables of every architecture fit together. This is checked by reading the tables alone, so
// that a contributor's slip is named before anything computes.

// An architecture for these tests alone: attention and MLP side by side, each behind a layernorm of
// the block's input. So three operations read the input, and their gradients are added. It shares
// everything else with GPT-2.
enum { TOY_RES = VALUE_FIRST + 12, TOY_MLP };
static const ValueSpec toy_values[] = {
    BOUNDARIES,
    {.name = "ln1", .width = {1, OF_CHANNELS}, .gradient = GPT2_DLN1},
    {.name = "qkv", .width = {3, OF_CHANNELS}, .gradient = GPT2_DQKV},
    {.name = "att", .width = {1, OF_CHANNELS}, .gradient = GPT2_DLN1},
    {.name = "projection", .width = {1, OF_CHANNELS}, .gradient = GPT2_DRES},
    {.name = "ln2", .width = {1, OF_CHANNELS}, .gradient = GPT2_DLN2},
    {.name = "fc", .width = {4, OF_CHANNELS}, .gradient = GPT2_DFC},
    {.name = "gelu", .width = {4, OF_CHANNELS}},
    {.name = "mean1", .type = VALUE_FLOATS, .width = {1, OF_ONE}},
    {.name = "rstd1", .type = VALUE_FLOATS, .width = {1, OF_ONE}},
    {.name = "mean2", .type = VALUE_FLOATS, .width = {1, OF_ONE}},
    {.name = "rstd2", .type = VALUE_FLOATS, .width = {1, OF_ONE}},
    {.name = "lse", .type = VALUE_FLOATS, .width = {1, OF_HEADS}},
    // its buffer is shared with att and ln1, whose gradients are needed later
    {.name = "res", .width = {1, OF_CHANNELS}, .gradient = GPT2_DLN1},
    {.name = "mlp", .width = {1, OF_CHANNELS}, .gradient = GRADIENT_Y},
};
static const GradientSpec toy_gradients[] = {
    BOUNDARY_GRADIENTS,
    {.name = "dfc", .width = {4, OF_CHANNELS}},
    {.name = "dqkv", .width = {3, OF_CHANNELS}},
    {.name = "dres", .width = {1, OF_CHANNELS}},
    {.name = "dln2", .width = {1, OF_CHANNELS}},
    {.name = "dln1", .width = {1, OF_CHANNELS}},
};
static const OpNode toy_ops[] = {
    {.kind = OP_LAYERNORM,
     .in = {VALUE_X},
     .out = {GPT2_LN1},
     .stats = {GPT2_MEAN1, GPT2_RSTD1},
     .params = {LN1W, LN1B}},
    {.kind = OP_LINEAR, .in = {GPT2_LN1}, .out = {GPT2_QKV}, .params = {QKVW, QKVB}},
    {.kind = OP_ATTENTION, .in = {GPT2_QKV}, .out = {GPT2_ATT}, .stats = {GPT2_LSE}},
    {.kind = OP_LINEAR, .in = {GPT2_ATT}, .out = {GPT2_RES}, .params = {ATTPROJW, ATTPROJB}},
    {.kind = OP_ADD, .in = {GPT2_RES, VALUE_X}, .out = {TOY_RES}},
    {.kind = OP_LAYERNORM,
     .in = {VALUE_X},
     .out = {GPT2_LN2},
     .stats = {GPT2_MEAN2, GPT2_RSTD2},
     .params = {LN2W, LN2B}},
    {.kind = OP_LINEAR_GELU, .in = {GPT2_LN2}, .out = {GPT2_FC, GPT2_GELU}, .params = {FCW, FCB}},
    {.kind = OP_LINEAR_OF_GELU,
     .in = {GPT2_GELU, GPT2_FC},
     .out = {TOY_MLP},
     .params = {FCPROJW, FCPROJB}},
    {.kind = OP_ADD, .in = {TOY_MLP, TOY_RES}, .out = {VALUE_Y}},
};
static const Architecture toy = {
    .name = "toy",
    .tensors = gpt2_tensors,
    .tensor_count = GPT2_TENSORS,
    .units = {{UNIT_TABLES(gpt2_embedding), .storages = {STORAGE_WTE, STORAGE_WPE}},
              {UNIT_TABLES(toy), .storages = {STORAGE_BLOCK, NO_STORAGE}},
              {UNIT_TABLES(gpt2_head), .storages = {STORAGE_LNF, STORAGE_WTE}}},
};

// Another one: y = t + relu2(layernorm(v + x)), where t = u + 2 norm(x), and u and v are products of
// a norm(x). The gradients of t, its terms and relu2 lie in dy, and those of v and x in dvx, until
// something else belongs there.
enum { SUMS_WU = ATTPROJW, SUMS_WV = FCPROJW };
enum {
    SUMS_N0 = VALUE_FIRST,
    SUMS_N1,
    SUMS_U,
    SUMS_N2,
    SUMS_V,
    SUMS_VX,
    SUMS_N3,
    SUMS_RELU2,
    SUMS_T,
    SUMS_MEAN3,
    SUMS_RSTD0,
    SUMS_RSTD1,
    SUMS_RSTD2,
    SUMS_RSTD3
};
enum { SUMS_DN0 = GRADIENT_FIRST, SUMS_DN1, SUMS_DU, SUMS_DVX, SUMS_DN3 };
static const ValueSpec sums_values[] = {
    BOUNDARIES,
    {.name = "n0", .width = CHANNELS_X1, .gradient = SUMS_DN0},
    {.name = "n1", .width = CHANNELS_X1, .gradient = SUMS_DN1},
    {.name = "u", .width = CHANNELS_X1, .gradient = SUMS_DU},
    // the gradient of x lies there
    {.name = "n2", .width = CHANNELS_X1, .gradient = SUMS_DVX},
    // those of u and t lie there; that of t is not needed any more, and n3's is in t's buffer
    {.name = "v", .width = CHANNELS_X1, .gradient = GRADIENT_Y},
    {.name = "vx", .width = CHANNELS_X1, .gradient = SUMS_DVX},
    {.name = "n3", .width = CHANNELS_X1, .gradient = SUMS_DN3},
    {.name = "relu2", .width = CHANNELS_X1, .gradient = SUMS_DN1},
    {.name = "t", .width = CHANNELS_X1, .gradient = SUMS_DN3},
    {.name = "mean3", FLOAT_PER_TOKEN},
    {.name = "rstd0", FLOAT_PER_TOKEN},
    {.name = "rstd1", FLOAT_PER_TOKEN},
    {.name = "rstd2", FLOAT_PER_TOKEN},
    {.name = "rstd3", FLOAT_PER_TOKEN},
};
static const GradientSpec sums_gradients[] = {
    BOUNDARY_GRADIENTS,
    {.name = "dn0", .width = CHANNELS_X1},
    {.name = "dn1", .width = CHANNELS_X1},
    {.name = "du", .width = CHANNELS_X1},
    {.name = "dvx", .width = CHANNELS_X1},
    {.name = "dn3", .width = CHANNELS_X1},
};
#define SUMS_NORM(to, number)                                                                      \
    {                                                                                              \
        .kind = OP_RMSNORM, .in = {VALUE_X}, .out = {to}, .stats = {number}, .params = {           \
            NO_TENSOR,                                                                             \
            NO_TENSOR                                                                              \
        }                                                                                          \
    }
static const OpNode sums_ops[] = {
    SUMS_NORM(SUMS_N0, SUMS_RSTD0),
    SUMS_NORM(SUMS_N1, SUMS_RSTD1),
    {.kind = OP_LINEAR, .in = {SUMS_N1}, .out = {SUMS_U}, .params = {SUMS_WU, NO_TENSOR}},
    SUMS_NORM(SUMS_N2, SUMS_RSTD2),
    {.kind = OP_LINEAR, .in = {SUMS_N2}, .out = {SUMS_V}, .params = {SUMS_WV, NO_TENSOR}},
    {.kind = OP_ADD, .in = {SUMS_V, VALUE_X}, .out = {SUMS_VX}},
    {.kind = OP_LAYERNORM,
     .in = {SUMS_VX},
     .out = {SUMS_N3},
     .stats = {SUMS_MEAN3, SUMS_RSTD3},
     .params = {LN1W, LN1B}},
    {.kind = OP_RELU2, .in = {SUMS_N3}, .out = {SUMS_RELU2}},
    {.kind = OP_ADD, .in = {SUMS_U, SUMS_N0}, .out = {SUMS_T}},
    {.kind = OP_ADD, .in = {SUMS_T, SUMS_N0}, .out = {SUMS_T}},
    {.kind = OP_ADD, .in = {SUMS_T, SUMS_RELU2}, .out = {VALUE_Y}},
};
#define SUMS_MATRIX(title)                                                                         \
    {                                                                                              \
        .name = title, .storage = STORAGE_BLOCK, .rows = CHANNELS_X1, .cols = CHANNELS_X1,         \
        .init = INIT_NORMAL                                                                        \
    }
#define SUMS_NONE                                                                                  \
    { .storage = NO_STORAGE }
static const TensorSpec sums_tensors[GPT2_TENSORS] = {
    [WTE] = {.name = "wte",
             .storage = STORAGE_WTE,
             .rows = {1, OF_VOCAB},
             .cols = CHANNELS_X1,
             .init = INIT_NORMAL},
    [WPE] = {.name = "wpe",
             .storage = STORAGE_WPE,
             .rows = {1, OF_POSITIONS},
             .cols = CHANNELS_X1,
             .init = INIT_NORMAL},
    [LN1W] = {.name = "ln1w", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1, .init = INIT_ONE},
    [LN1B] = {.name = "ln1b", .storage = STORAGE_BLOCK, .cols = CHANNELS_X1},
    [QKVW] = SUMS_NONE,
    [QKVB] = SUMS_NONE,
    [SUMS_WU] = SUMS_MATRIX("wu"),
    [ATTPROJB... FCB] = SUMS_NONE,
    [SUMS_WV] = SUMS_MATRIX("wv"),
    [FCPROJB] = SUMS_NONE,
    [LNFW] = {.name = "lnfw", .storage = STORAGE_LNF, .cols = CHANNELS_X1, .init = INIT_ONE},
    [LNFB] = {.name = "lnfb", .storage = STORAGE_LNF, .cols = CHANNELS_X1},
};
static const Architecture sums = {
    .name = "sums",
    .tensors = sums_tensors,
    .tensor_count = GPT2_TENSORS,
    .units = {{UNIT_TABLES(gpt2_embedding), .storages = {STORAGE_WTE, STORAGE_WPE}},
              {UNIT_TABLES(sums), .storages = {STORAGE_BLOCK, NO_STORAGE}},
              {UNIT_TABLES(gpt2_head), .storages = {STORAGE_LNF, STORAGE_WTE}}},
};
// All architectures of the program, and these two.
enum { ALL_ARCHITECTURES = ARCHITECTURES + 2 };
static const Architecture *architecture(int i) {
    return i < ARCHITECTURES ? &architectures[i] : i == ARCHITECTURES ? &toy : &sums;
}

static void fits(bool holds, const Architecture *a, const UnitSpec *u, int row, const char *what) {
    if (!holds) { fail_msg("%s, unit %d, row %d: %s", a->name, (int)(u - a->units), row, what); }
}
static bool same_dim(Dim a, Dim b) { return a.times == b.times && a.of == b.of; }
// How many operands of each sort a kind has.
typedef struct {
    int in, out, stats, params;
} Arity;
static Arity arity_of(OpKindId kind) {
#define ARITY(KIND, FUNCTIONS, IN, OUT, STATS, PARAMS)                                             \
    {.in = (IN), .out = (OUT), .stats = (STATS), .params = (PARAMS)},
    static const Arity arity[] = {OP_TABLE(ARITY)};
    return arity[kind];
}
static void check_forward(const Architecture *a, const UnitSpec *u) {
    bool known[MOST_VALUES] = {true};
    for (int i = 0; i < u->op_count; i++) {
        const OpNode *n = &u->ops[i];
        const Arity k = arity_of(n->kind);
        for (int v = 0; v < k.in; v++) {
            fits(known[n->in[v]], a, u, i, "reads a value that no operation has made");
        }
        for (int v = 0; v < k.out; v++) { known[n->out[v]] = true; }
        for (int v = 0; v < k.stats && n->stats[v]; v++) {
            // routes and loads are made by one operation, and read by others
            const bool reads = a->experts && (n->kind != OP_ROUTER && n->kind < OP_CLASSIFIER &&
                                              (n->kind > OP_ROUTER || n->kind == OP_SWIGLU));
            fits(u->values[n->stats[v]].type == VALUE_FLOATS, a, u, i, "statistics are floats");
            fits(reads || !known[n->stats[v]], a, u, i, "has the statistics of another operation");
            known[n->stats[v]] = true;
        }
    }
    for (int v = VALUE_FIRST; v < u->value_count; v++) {
        fits(known[v], a, u, v, "no operation makes this value");
    }
}
static void check_backward(const Architecture *a, const UnitSpec *u) {
    bool known[MOST_VALUES] = {false, true};
    for (int i = u->op_count - 1; i >= 0; i--) {
        const OpNode *n = &u->ops[i];
        const bool adds = n->kind == OP_ADD_LAYERNORM || n->kind == OP_ADD_RMSNORM,
                   norms_alone = n->kind == OP_LAYERNORM || n->kind == OP_RMSNORM;
        // what a router gives has a gradient among its statistics
        const int outputs = adds ? 2 : n->kind == OP_CLASSIFIER || n->kind == OP_ROUTER ? 0 : 1;
        for (int v = 0; v < outputs; v++) {
            // the gradient of GELU's output is that of its input
            const int of =
                n->kind == OP_LINEAR_GELU || n->kind == OP_EXPERTS_GELU ? n->out[0] : n->out[v];
            const ValueSpec *value = &u->values[of];
            fits(known[of], a, u, i, "the gradient of its output is never made");
            const GradientSpec *g = &u->gradients[value->gradient];
            const bool as_wide = same_dim(g->width, value->width) && same_dim(g->rows, value->rows);
            fits(value->gradient && as_wide, a, u, i,
                 "the gradient of its output has no buffer of its width");
        }
        const bool sums = op_sum(n) != VALUE_X;
        if (op_kinds[n->kind].part[PART_BACKWARD_INPUT]) {
            // one that works in place turns the gradient that it finds
            fits(!known[op_x(n)] || adds || norms_alone || n->kind == OP_ROUTER ||
                     n->kind == OP_DISPATCH || op_x(n) == n->out[0],
                 a, u, i, "only norms and routing add to the gradient of another operation");
            known[op_x(n)] = true;
        }
        for (int v = 0; sums && v < 2; v++) { known[n->in[v]] = true; }
        if (n->kind == OP_EXCHANGE) { known[n->in[0]] = true; }
    }
    fits(known[VALUE_X] || u == a->units, a, u, 0, "nothing makes the gradient of the input");
    for (int g = GRADIENT_FIRST; g < u->gradient_count; g++) {
        const int kept_in = u->gradients[g].kept_in;
        fits(!kept_in || same_dim(u->values[kept_in].width, u->gradients[g].width), a, u, g,
             "this gradient is kept in a value of another width");
    }
}
static void check_shapes(const Architecture *a, const UnitSpec *u, int *uses) {
    for (int i = 0; i < u->op_count; i++) {
        const OpNode *n = &u->ops[i];
        const ValueSpec *in = &u->values[n->in[0]], *out = &u->values[n->out[0]];
        const bool linear =
            op_kinds[n->kind].flops && n->kind != OP_ATTENTION && n->kind != OP_CLASSIFIER;
        for (int p = 0; p < arity_of(n->kind).params; p++) {
            if (n->params[p] == NO_TENSOR) { continue; }
            const TensorSpec *t = &a->tensors[n->params[p]];
            uses[n->params[p]]++;
            fits(t->storage == u->storages[0] || t->storage == u->storages[1], a, u, i,
                 "a tensor's storage is not the unit's");
            fits(!linear || p || (same_dim(t->rows, out->width) && same_dim(t->cols, in->width)), a,
                 u, i, "a matrix is not (width of the output, width of the input)");
            fits(!linear || !p || (!t->rows.times && same_dim(t->cols, out->width)), a, u, i,
                 "a bias has another width than the output");
        }
    }
}
static void test_tables(void **state) {
    (void)state;
    for (int i = 0; i < ALL_ARCHITECTURES; i++) {
        const Architecture *a = architecture(i);
        int uses[MOST_TENSORS] = {0};
        assert_true(a->tensor_count <= MOST_TENSORS);
        for (int c = 0; c < UNIT_CLASSES; c++) {
            const UnitSpec *u = &a->units[c];
            assert_true(u->value_count <= MOST_VALUES && u->gradient_count <= MOST_GRADIENTS);
            check_forward(a, u);
            check_backward(a, u);
            check_shapes(a, u, uses);
        }
        for (int t = 0; t < a->tensor_count; t++) {
            const bool table = a->tensors[t].rows.of == OF_VOCAB; // may be tied
            if (a->tensors[t].storage == NO_STORAGE) { continue; }
            if (!uses[t] || uses[t] > 1 + table) {
                fail_msg("%s: tensor %s is used %d times", a->name, a->tensors[t].name, uses[t]);
            }
        }
    }
    for (int k = 0; k < OP_KINDS; k++) {
        assert_true(op_kinds[k].part[PART_FORWARD] || k == OP_CLASSIFIER || k == OP_EXCHANGE);
    }
}

// -------------------------------------------------------------------------------------------------
// Every architecture's gradients against differences of its loss: an oracle that knows nothing of
// the backward pass. Each tensor is moved along its own gradient and along a random direction.

enum { FD_ROWS = 2, FD_T = 8, FD_UNITS = 4, FD_HEAD = FD_UNITS - 1, FD_N = FD_ROWS * FD_T };
typedef struct {
    GptModel model;
    Stream stream;
    UnitStates states[FD_UNITS];
    UnitBuffers unit[FD_UNITS], gradients[FD_UNITS];
    Real *x[FD_UNITS + 1], *dx[FD_UNITS + 1];
    int32_t tokens[FD_N], targets[FD_N];
} Small;
static void small_carve(Small *s, Arena *a) {
    for (int u = 0; u < FD_UNITS; u++) {
        unit_carve_values(&s->unit[u], a, &s->model, gpt_unit_class(&s->model, u), FD_N);
        unit_carve_gradients(&s->gradients[u], a, &s->model, gpt_unit_class(&s->model, u), FD_N,
                             false);
        s->x[u + 1] = arena_reals(a, FD_N * gpt_width(&s->model));
        s->dx[u + 1] = arena_reals(a, FD_N * gpt_width(&s->model));
    }
}
// Returns a small model: with grouped keys and heads of an own width, if the architecture has them.
static GptModel small_model(const Architecture *arch) {
    const bool listed = arch >= architectures && arch < architectures + ARCHITECTURES;
    GptConfig config = gpt_config_from_pairs("layers=2,heads=2,channels=16,vocab=40", FD_T);
    if (listed && arch->defaults.theta > 0) {
        const GptConfig grouped = {.layers = 2,
                                   .heads = 4,
                                   .channels = 16,
                                   .vocab = 40,
                                   .padded_vocab = 128,
                                   .max_seq_len = FD_T,
                                   .kv_heads = 2,
                                   .head_dim = 6,
                                   .ffn = 24};
        config = grouped;
    }
    if (listed) { config = config_with(config, (int)(arch - architectures)); }
    config.top_k = config.experts; // else a step along the gradient may change the choice
    if (arch->exchanges) { arch = &architectures[config.arch]; } // it computes the same
    return gpt_model_of(arch, config, GPT_SHARE_NONE);
}
static Small *small_make(const Architecture *arch) {
    Small *s = calloc(1, sizeof *s);
    s->model = small_model(arch);
    s->stream.threads = 1;
    s->stream.workspace_bytes = gpt_workspace_bytes(&s->model, FD_ROWS, FD_T, 1, LOGITS_PLENTY);
    s->stream.workspace = ops_alloc(s->stream.workspace_bytes);
    Arena count = {NULL, 0};
    small_carve(s, &count);
    Arena arena = {(char *)ops_alloc(count.used), 0};
    small_carve(s, &arena);
    float *params[16], *grads[16];
    for (int i = 0; i < s->model.storages; i++) {
        const int64_t n = gpt_storage_elements(&s->model, i);
        params[i] = ops_alloc((size_t)n * sizeof(float));
        grads[i] = ops_alloc((size_t)n * sizeof(float));
        gpt_initialise(&s->model, i, 7, 0, n, params[i]);
        // larger values than at the start of a run, so that no gradient is lost in rounding
        for (int64_t e = 0; e < n; e++) {
            params[i][e] = 3 * params[i][e] + 0.04f * (float)(e % 7 - 3);
        }
    }
    for (int u = 0; u < FD_UNITS; u++) {
        int used[2];
        for (int k = gpt_unit_storages(&s->model, u, used) - 1; k >= 0; k--) {
            const StorageClass c = gpt_storage_class(&s->model, used[k]);
            s->states[u].params[c] = (const Real *)params[used[k]];
            s->states[u].grads[c] = grads[used[k]];
        }
    }
    // the head has written its part of a tied table before the embedding adds its own
    for (int c = 0; c < STORAGE_CLASSES; c++) {
        float *shared = s->states[FD_HEAD].grads[c];
        s->states[0].accumulate[c] = shared && shared == s->states[0].grads[c];
    }
    for (int i = 0; i < FD_N; i++) {
        s->tokens[i] = (i * 7 + 3) % 40;
        s->targets[i] = (i * 11 + 5) % 40;
    }
    return s;
}
static UnitCall small_call(Small *s, int u) {
    UnitCall c = {.stream = &s->stream, .model = &s->model, .states = &s->states[u]};
    c.unit = gpt_unit_spec(&s->model, gpt_unit_class(&s->model, u));
    c.buffers = s->unit[u];
    for (int g = GRADIENT_FIRST; g < c.unit->gradient_count; g++) {
        if (!c.buffers.gradient[g]) { c.buffers.gradient[g] = s->gradients[u].gradient[g]; }
    }
    c.buffers.value[VALUE_X] = s->x[u];
    c.buffers.value[VALUE_Y] = s->x[u + 1];
    c.buffers.gradient[GRADIENT_X] = s->dx[u];
    c.buffers.gradient[GRADIENT_Y] = s->dx[u + 1];
    c.tokens = s->tokens;
    c.targets = s->targets;
    c.rows = FD_ROWS;
    c.T = FD_T;
    return c;
}
static double small_loss(Small *s) {
    double sum = 0;
    for (int u = 0; u < FD_UNITS; u++) {
        UnitCall c = small_call(s, u);
        unit_pass(&c, PART_FORWARD);
        if (u == FD_HEAD) { unit_losses(&c, NULL); }
    }
    const float *losses = head_losses(&s->model, &s->unit[FD_HEAD]);
    for (int i = 0; i < FD_N; i++) { sum += (double)losses[i]; }
    return sum / FD_N;
}
static void small_backward(Small *s) {
    for (int u = FD_HEAD; u >= 0; u--) {
        UnitCall c = small_call(s, u);
        if (u == FD_HEAD) {
            const int table = unit_op(c.unit, OP_CLASSIFIER)->params[0];
            c.classifier.dweight = unit_grad(&s->model, &s->states[u], table);
            c.classifier.each = FD_N;
            c.classifier.scale = 1.0f / FD_N;
        }
        unit_pass(&c, PART_BACKWARD_INPUT);
        unit_pass(&c, PART_BACKWARD_WEIGHT);
    }
}
// The loss's slope along a direction, by a difference and by the gradient.
static void check_slope(Small *s, const char *name, float *x, const float *gradient,
                        const float *direction, int64_t n) {
    enum { MOST = 4096 };
    const double STEP = 1e-3;
    float kept[MOST];
    double length = 0, slope = 0, loss[2];
    assert_true(n <= MOST);
    memcpy(kept, x, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) { length += (double)direction[i] * (double)direction[i]; }
    length = sqrt(length);
    for (int64_t i = 0; i < n; i++) {
        slope += (double)gradient[i] * (double)direction[i] / length;
    }
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < n; i++) {
            x[i] = kept[i] + (float)((side ? -STEP : STEP) * (double)direction[i] / length);
        }
        loss[side] = small_loss(s);
    }
    memcpy(x, kept, (size_t)n * sizeof(float));
    const double found = (loss[0] - loss[1]) / (2 * STEP);
    if (!(fabs(found - slope) < 2e-3 + 0.02 * fabs(slope))) {
        fail_msg("%s of %s: the loss changes by %g, the gradient says %g", name,
                 s->model.arch->name, found, slope);
    }
}
static void test_gradients_are_slopes(void **state) {
    (void)state;
    for (int a = 0; a < ALL_ARCHITECTURES; a++) {
        Small *s = small_make(architecture(a));
        small_loss(s);
        small_backward(s);
        for (int t = 0; t < s->model.arch->tensor_count; t++) {
            const StorageClass c = tensor_class(&s->model, t);
            // loads are no gradient
            if (c == NO_STORAGE || s->model.arch->tensors[t].init == INIT_BALANCED) { continue; }
            const int u = c < STORAGE_BLOCK ? 0 : class_is_blocks(c) ? 1 : FD_HEAD;
            const int64_t n = gpt_real_elements(&s->model, t);
            float *x = (float *)(uintptr_t)unit_param(&s->model, &s->states[u], t),
                  *gradient = unit_grad(&s->model, &s->states[u], t), random[4096];
            for (int64_t i = 0; i < n; i++) { random[i] = (float)((i * 2654435761u >> 7) % 9) - 4; }
            check_slope(s, s->model.arch->tensors[t].name, x, gradient, gradient, n);
            check_slope(s, s->model.arch->tensors[t].name, x, gradient, random, n);
        }
    }
}

// The parts of samples against the weight part of one sample at a time: squared norms, and the sum
// with factors, for the tensors of each unit's first storage.
static void check_sample_parts(Small *s, int u) {
    const StorageClass storage =
        gpt_unit_spec(&s->model, gpt_unit_class(&s->model, u))->storages[0];
    const int64_t n = s->model.class_elements[storage];
    float *grad = s->states[u].grads[storage], *expected = calloc((size_t)n, sizeof(float));
    const float factors[FD_ROWS] = {0.25f, 0.75f};
    double norms[FD_ROWS] = {0, 0}, squares[FD_ROWS] = {0, 0};
    Arena count = {NULL, 0};
    clip_carve_sums(&count, &s->model, gpt_unit_class(&s->model, u), FD_ROWS);
    Arena arena = {(char *)ops_alloc(count.used), 0};
    const UnitSums sums = clip_carve_sums(&arena, &s->model, gpt_unit_class(&s->model, u), FD_ROWS);
    UnitCall c = small_call(s, u), one = c;
    one.rows = 1;
    for (int b = 0; b < FD_ROWS; b++) {
        one.buffers = unit_buffers_from(&c, b * FD_T);
        unit_pass(&one, PART_BACKWARD_WEIGHT);
        for (int64_t i = 0; i < n; i++) {
            squares[b] += (double)grad[i] * (double)grad[i];
            expected[i] += factors[b] * grad[i];
        }
    }
    c.sums = &sums;
    c.norms = norms;
    c.factors = factors;
    unit_pass(&c, PART_SAMPLE_NORMS);
    unit_pass(&c, PART_SAMPLE_SUM);
    for (int b = 0; b < FD_ROWS; b++) {
        assert_true(fabs(norms[b] - squares[b]) <= 1e-4 * squares[b] && squares[b] > 0);
    }
    const double most = largest(expected, n);
    for (int64_t i = 0; i < n; i++) {
        assert_true(fabs((double)grad[i] - (double)expected[i]) <= 1e-5 * most);
    }
    free(expected);
    ops_free(arena.base);
}
static void test_parts_of_samples(void **state) {
    (void)state;
    for (int a = 0; a < ALL_ARCHITECTURES; a++) {
        Small *s = small_make(architecture(a));
        small_loss(s);
        small_backward(s);
        // a classifier of its own is not among the head's parts of samples (dp.h)
        const bool alone = s->model.class_elements[STORAGE_LNF] == 0;
        if (s->model.arch->experts) { continue; } // they are not clipped
        for (int u = 1; u <= FD_HEAD - alone; u++) { check_sample_parts(s, u); }
    }
}

// Each product of matrices counts: 24 C^2 + 2 C T for a token of a block, 2 C V for one of the head.
static void test_flops(void **state) {
    (void)state;
    const GptConfig config = {5, 3, 33, 250, 256, 40};
    const GptModel m = gpt_model(config);
    const double C = 33, V = 256, T = 17, tokens = 34;
    assert_true(gpt_forward_flops(&m, UNIT_EMBEDDING, tokens, T) == 0);
    assert_true(gpt_forward_flops(&m, UNIT_BLOCK, tokens, T) == tokens * (24 * C * C + 2 * C * T));
    assert_true(gpt_forward_flops(&m, UNIT_HEAD, tokens, T) == tokens * 2 * C * V);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_flops),
        cmocka_unit_test(test_gradients_are_slopes),
        cmocka_unit_test(test_parts_of_samples),
        cmocka_unit_test(test_logits),
        cmocka_unit_test(test_loss_and_gradients),
        cmocka_unit_test(test_recompute_changes_no_bit),
        cmocka_unit_test(test_evaluation),
        cmocka_unit_test(test_ten_steps),
        cmocka_unit_test(test_ten_steps_in_bf16),
        cmocka_unit_test(test_parameter_counts),
        cmocka_unit_test(test_file_offsets),
        cmocka_unit_test(test_parts_cover_everything_once),
        cmocka_unit_test(test_decay_is_for_matrices),
        cmocka_unit_test(test_initial_distribution),
        cmocka_unit_test(test_initial_values_by_element),
        cmocka_unit_test(test_initial_values_depend_on_the_seed_only),
        cmocka_unit_test(test_every_descriptor),
        cmocka_unit_test(test_parameters_of_presets),
        cmocka_unit_test(test_other_spellings),
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_bad_pairs_are_refused),
    };
    int everyone[] = {0};
    comm_start(&comm, &argc, &argv);
    comm_place(&comm, 0);
    comm_allocate(&comm, NULL, 0);
    world = group_make(everyone, 1, 0, comm.node_of);
    int failed = cmocka_run_group_tests(tests, read_golden, NULL);
    comm_end(&comm);
    return failed;
}
