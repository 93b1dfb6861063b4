// test_checkpoint.c: proves that what is saved comes back bit for bit, states and progress, and
// model files too; that no torn, changed, forged or foreign file is taken for a checkpoint, nor
// ends the program by a signal; that a failed save (read-only folder, full disk at every page)
// leaves the older checkpoint as it was and nothing half-written; and that a folder is locked,
// cleaned, pruned and set aside as promised. Random places come from TEST_SEED (printed). What ends
// the program runs in a child.
#define STATE_PIECE 4100 // so that states go in many
#include "ops/cpu/ops_cpu.h"
#include "checkpoint/checkpoint.h"
#include "pipeline.h"
#include "pseudo.h"

#include <ftw.h>       // clearing folders
#include <signal.h>    // kill
#include <sys/mount.h> // a small disk
#include <sys/prctl.h> // children that end with us

#include "harness.h"
#include "policies.h" // ZERO_STAGE

// -------------------------------------------------------------------------------------------------
// Folders and files

static char base[200], out[256]; // of all tests; of the test that runs

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *ftw) {
    (void)info;
    (void)kind;
    (void)ftw;
    return remove(path);
}
static void remove_tree(const char *path) { nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }
static int fresh(void **state) {
    (void)state;
    remove_tree(out);
    return mkdir(out, 0755);
}
// under out; four live at a time
__attribute__((format(printf, 1, 2))) static const char *path_of(const char *format, ...) {
    static char paths[4][1100];
    static int turn;
    va_list args;
    turn = (turn + 1) % 4;
    int n = snprintf(paths[turn], 300, "%s/", out);
    va_start(args, format);
    vsnprintf(paths[turn] + n, sizeof paths[turn] - 300, format, args);
    va_end(args);
    return paths[turn];
}
static bool exists(const char *path) { return access(path, F_OK) == 0; }

typedef struct {
    unsigned char *data;
    size_t bytes;
} Bytes;
static Bytes read_bytes(const char *path) {
    Bytes b = {NULL, 0};
    FILE *f = fopen(path, "rb");
    if (!f) { fail_msg("cannot open %s", path); }
    fseek(f, 0, SEEK_END);
    b.bytes = (size_t)ftell(f);
    rewind(f);
    b.data = malloc(b.bytes + 1);
    assert_int_equal(fread(b.data, 1, b.bytes, f), b.bytes);
    b.data[b.bytes] = 0;
    fclose(f);
    return b;
}
static void write_file(const char *path, const void *data, size_t bytes) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

static void check_child(void (*body)(const void *), const char *argument, int code,
                        const char *words) {
    char message[4096];
    int found = run_child(body, argument, message, sizeof message);
    if (found != code || !strstr(message, words)) {
        fail_msg("%s: expected exit code %d and \"%s\", found %d: %s", argument, code, words, found,
                 message);
    }
}

// -------------------------------------------------------------------------------------------------
// Random places

static uint64_t seed, drawn;
static size_t draw(size_t below) { return (size_t)(random_u64(seed, 1, drawn++) % below); }
static void choose_seed(void) { seed = test_seed((uint64_t)time(NULL)); }

// -------------------------------------------------------------------------------------------------
// Stores: a state file of 105 KB, so 26 pages

static Comm comm;
static Group world;
static Placement placement;
static Stream stream;
static GptModel model;
static const GptConfig config = {2, 1, 16, 50, 128, 8};

static Store make_store_of(const GptModel *m, DType dtype, bool adam) {
    const ZeroPolicy plain = ZERO_STAGE(0, false, NULL);
    placement_free(&placement);
    placement = pipeline_placement("1", m->units, 1);
    const MixedPrecision precision = {dtype, DTYPE_FP32};
    Store s = {.plan =
                   state_plan(m, &world, &placement, &plain, precision, &optimizers[adam ? 0 : 1])};
    store_allocate(&s, &comm, &stream);
    return s;
}
static Store make_store(DType dtype, bool adam) { return make_store_of(&model, dtype, adam); }
// Every state gets its own numbers, of every exponent that is not of infinities and NaNs: files
// hold bits.
static void fill_store(Store *s, uint64_t number) {
    for (int kind = 0; kind < STATE_PREVIOUS; kind++) {
        float *x = store_floats(s, (StateKind)kind, 0, 0);
        for (int64_t i = 0; x && i < model.parameters; i++) {
            uint32_t bits = (uint32_t)random_u64(number, (uint64_t)kind, (uint64_t)i);
            bits ^= (bits & 0x7f800000u) == 0x7f800000u ? 0x00800000u : 0;
            memcpy(&x[i], &bits, 4);
        }
    }
    store_masters_changed(s);
}
// Whole chunks, equally many, but for the last slices; no shorter ones would do.
static void test_slices(void **state) {
    (void)state;
    const int64_t sizes[] = {0, 1, 255, 256, 257, 1536, 28272, 786432, 7087872, 38633472};
    for (int i = 0; i < 10; i++) {
        for (int n = 1; n <= 70; n++) {
            int64_t b[71];
            store_bounds(sizes[i], n, NORM_CHUNK, b);
            assert_true(b[0] == 0 && b[n] == sizes[i]);
            for (int r = 0; r < n; r++) {
                assert_true(b[r + 1] == min_i64((r + 1) * b[1], sizes[i]) &&
                            (b[r] % NORM_CHUNK == 0 || b[r] == sizes[i]));
            }
            assert_int_equal(b[1], store_slice(sizes[i], n, NORM_CHUNK));
            assert_int_equal(bounds_padded(b, n), store_padded(sizes[i], n, NORM_CHUNK));
            assert_true(bounds_padded(b, n) >= sizes[i] &&
                        bounds_padded(b, n) - sizes[i] < n * NORM_CHUNK);
            assert_true(n > 1 || bounds_padded(b, n) == sizes[i]);
        }
    }
}
static bool same_states(const Store *a, const Store *b) {
    size_t bytes = (size_t)model.parameters * sizeof(float);
    for (int kind = 0; kind < STATE_PREVIOUS; kind++) { // storages lie one after another
        const float *x = store_floats(a, (StateKind)kind, 0, 0),
                    *y = store_floats(b, (StateKind)kind, 0, 0);
        if (x && memcmp(x, y, bytes)) { return false; }
    }
    return true;
}
static Progress make_progress(int64_t step, int64_t values) {
    Progress p;
    memset(&p, 0, sizeof p);
    p.step = step;
    p.position = 7 * step + 3;
    p.updates = step - 1;
    p.loss.count = values;
    p.norm.count = 2 * values;
    // denormals too
    for (int i = 0; i < OUTLIER_WINDOW && i < values; i++) {
        p.loss.values[i] = ldexp(-1.0 / 3.0 - i, 10 * i - 1070);
    }
    for (int i = 0; i < OUTLIER_WINDOW && i < 2 * values; i++) { p.norm.values[i] = 0.1 * i; }
    snprintf(p.privacy, sizeof p.privacy, "none");
    snprintf(p.compute, sizeof p.compute, "fp32");
    return p;
}

// Saves, and takes what it says on stderr.
static char said[4096];
static bool save(Store *s, const Progress *p, int64_t keep, char path[1100]) {
    Text folder;
    FILE *f = tmpfile();
    int before = dup(STDERR_FILENO);
    fflush(stderr);
    dup2(fileno(f), STDERR_FILENO);
    bool saved = checkpoint_save(out, s, p, "--steps 5 --lr 1e-3", &folder);
    if (saved) { checkpoints_prune(out, p->step, keep, p->step); }
    strcpy(path, folder.at);
    fflush(stderr);
    dup2(before, STDERR_FILENO);
    close(before);
    rewind(f);
    said[fread(said, 1, sizeof said - 1, f)] = 0;
    fclose(f);
    return saved;
}
static void save_step(Store *s, int64_t step, int64_t keep) {
    char path[1100];
    Progress p = make_progress(step, 5);
    fill_store(s, (uint64_t)step);
    if (!save(s, &p, keep, path)) { fail_msg("not saved: %s", said); }
}
static bool load(const char *folder, Store *s, Progress *p) {
    Text why = {""};
    memset(p, 0, sizeof *p);
    bool loaded = checkpoint_load(folder, s, s->plan.model, p, &why);
    assert_int_equal(loaded, !*why.at); // a refusal has a reason
    return loaded;
}
// The checkpoint of this step is there and is what save_step saved.
static void check_step(int64_t step) {
    Store expected = make_store(DTYPE_FP32, true), found = make_store(DTYPE_FP32, true);
    Progress p, q = make_progress(step, 5);
    fill_store(&expected, (uint64_t)step);
    if (!load(path_of("step_%08d", (int)step), &found, &p)) {
        fail_msg("step %d does not load", (int)step);
    }
    assert_true(same_states(&expected, &found));
    assert_memory_equal(&p, &q, sizeof p);
    store_free(&expected);
    store_free(&found);
}

// -------------------------------------------------------------------------------------------------
// There and back

static void check_round_trip(DType dtype, bool adam, int64_t values) {
    char path[1100];
    Store saved = make_store(dtype, adam), loaded = make_store(dtype, adam);
    Progress p = make_progress(20 + values, values), q;
    fill_store(&saved, (uint64_t)values);
    assert_true(save(&saved, &p, 0, path));
    assert_string_equal(path, path_of("step_%08d", 20 + (int)values));
    assert_string_equal(said, "");
    assert_false(exists(path_of("step_%08d.tmp", 20 + (int)values)));
    assert_true(load(path, &loaded, &q));
    assert_true(same_states(&saved, &loaded));
    assert_memory_equal(&p, &q, sizeof p);
    store_free(&saved);
    store_free(&loaded);
}
static void test_round_trip(void **state) {
    (void)state;
    const int64_t values[] = {0, 1, 63, 64, 127, 128, 129, 5000}; // around the window
    for (int i = 0; i < 8; i++) {
        check_round_trip((DType)(i & 1), i & 2, values[i]);
        check_round_trip((DType)(~i & 1), ~i & 2, values[i] + 10000);
    }
}
// Resuming: the newest valid one; the counters of the moments and the bf16 parameters follow.
static void test_resume(void **state) {
    (void)state;
    Store s = make_store(DTYPE_BF16, true), t = make_store(DTYPE_BF16, true);
    for (int step = 10; step <= 12; step++) { save_step(&s, step, 0); }
    Progress p = make_progress(0, 0), expected = make_progress(12, 5);
    assert_string_equal(checkpoint_resume(out, &t, &p).at, path_of("step_00000012"));
    assert_true(same_states(&s, &t));
    assert_memory_equal(&p, &expected, sizeof p);
    assert_memory_equal(store_full(&s, STATE_PARAMETERS, 0), store_full(&t, STATE_PARAMETERS, 0),
                        (size_t)model.parameters * 2);
    for (int i = 0; i < model.storages; i++) { assert_int_equal(t.flight.progress[i].updates, 11); }
    store_free(&s);
    store_free(&t);
}
static Store *resumed_store;
static Progress resumed_progress;
static void resume_from(const void *expected) { // the warnings go to the child's stderr
    const Text path = checkpoint_resume(out, resumed_store, &resumed_progress);
    _exit(strcmp(path.at, expected) ? 99 : EXIT_DONE);
}
static void test_resume_skips_what_is_torn(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true), t = make_store(DTYPE_FP32, true);
    resumed_store = &t;
    check_child(resume_from, "", EXIT_INPUT, "no valid checkpoint");
    for (int step = 10; step <= 12; step++) { save_step(&s, step, 0); }
    assert_int_equal(truncate(path_of("step_00000012/state_00000"), 50000), 0);
    check_child(resume_from, path_of("step_00000011"), EXIT_DONE,
                "warning: rank 0 skips checkpoint");
    assert_int_equal(unlink(path_of("step_00000011/manifest")), 0);
    check_child(resume_from, path_of("step_00000010"), EXIT_DONE, "step_00000011");
    assert_int_equal(unlink(path_of("step_00000010/state_00000")), 0);
    check_child(resume_from, "", EXIT_INPUT, "(3 tried)");
    store_free(&s);
    store_free(&t);
}
static void test_other_models_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *what;
        GptConfig config;
        bool adam;
    } others[] = {
        {"layers", {3, 1, 16, 50, 128, 8}, true},     {"heads", {2, 2, 16, 50, 128, 8}, true},
        {"channels", {2, 1, 32, 50, 128, 8}, true},   {"vocab", {2, 1, 16, 51, 128, 8}, true},
        {"padded", {2, 1, 16, 50, 256, 8}, true},     {"positions", {2, 1, 16, 50, 128, 9}, true},
        {"optimizer", {2, 1, 16, 50, 128, 8}, false},
    };
    Store s = make_store(DTYPE_FP32, true);
    save_step(&s, 4, 0);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        GptModel other = gpt_model(others[i].config);
        Store t = make_store_of(&other, DTYPE_FP32, others[i].adam);
        Progress p;
        Text why = {""};
        bool loaded = checkpoint_load(path_of("step_00000004"), &t, t.plan.model, &p, &why);
        if (loaded || !strstr(why.at, "another model or optimizer")) {
            fail_msg("another %s: %s", others[i].what, loaded ? "loaded" : why.at);
        }
        store_free(&t);
    }
    check_step(4);
    store_free(&s);
}

// -------------------------------------------------------------------------------------------------
// Damage

static const char *const files[2] = {"step_00000004/state_00000", "step_00000004/manifest"};
static bool loads(Store *s) { // and if so, the right things
    Progress p;
    if (!load(path_of("step_00000004"), s, &p)) { return false; }
    check_step(4);
    return true;
}
static void test_torn_files_are_refused(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    Progress p = make_progress(4, 200); // full windows: the manifest has several pages
    char path[1100];
    fill_store(&s, 4);
    assert_true(save(&s, &p, 0, path));
    for (int f = 0; f < 2; f++) {
        Bytes whole = read_bytes(path_of("%s", files[f]));
        assert_true(whole.bytes > 4096);
        size_t pages = (whole.bytes - 1) / 4096 + 1;
        for (size_t i = 0; i < pages + 50; i++) {
            size_t length = i < pages ? 4096 * i : i == pages ? whole.bytes - 1 : draw(whole.bytes);
            write_file(path_of("%s", files[f]), whole.data, length);
            if (load(path, &s, &p)) {
                fail_msg("%s cut to %zu of %zu bytes loads", files[f], length, whole.bytes);
            }
        }
        whole.data[whole.bytes] = '\n'; // one byte too many
        write_file(path_of("%s", files[f]), whole.data, whole.bytes + 1);
        if (load(path, &s, &p)) { fail_msg("%s with a byte too many loads", files[f]); }
        unlink(path_of("%s", files[f]));
        assert_false(load(path, &s, &p));
        write_file(path_of("%s", files[f]), whole.data, whole.bytes);
        assert_true(load(path, &s, &p));
        free(whole.data);
    }
    store_free(&s);
}
// A state file with one byte changed is always refused. So is a manifest, or the change has no
// meaning (a capital hexadecimal digit of its checksum): then everything is as it was.
static void test_changed_bytes_are_refused(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    save_step(&s, 4, 0);
    for (int f = 0; f < 2; f++) {
        Bytes whole = read_bytes(path_of("%s", files[f]));
        for (int i = 0; i < 1000; i++) {
            // all of the headers
            size_t at = i < 300 && (size_t)i < whole.bytes ? (size_t)i : draw(whole.bytes);
            unsigned char change = (unsigned char)(1 + draw(255));
            whole.data[at] ^= change;
            write_file(path_of("%s", files[f]), whole.data, whole.bytes);
            whole.data[at] ^= change;
            if (!loads(&s)) { continue; }
            // 26: the last line
            if (f == 0 || at < whole.bytes - 26) {
                fail_msg("%s with byte %zu changed by %d loads", files[f], at, change);
            }
        }
        write_file(path_of("%s", files[f]), whole.data, whole.bytes);
        assert_true(loads(&s));
        free(whole.data);
    }
    store_free(&s);
}

// Forged: changed, and then given correct checksums. Never trusted further than it can be checked.
// the entry of the state file as it is now, in a manifest that had one of the same length
static void sign_state(char *text) {
    char entry[64], *at = strstr(text, "\nfile0 ");
    Bytes data = read_bytes(path_of("%s", files[0]));
    Checksum sum = checksum_begin();
    checksum_add(&sum, data.data, data.bytes);
    int n = snprintf(entry, sizeof entry, "\nfile0 %zu %016llx", data.bytes,
                     (unsigned long long)checksum_end(&sum));
    assert_true(at && at[n] == '\n');
    memcpy(at, entry, (size_t)n);
    free(data.data);
}
static void sign_manifest(char *text) {
    char *last = strstr(text, "\nchecksum ") + 1;
    Checksum sum = checksum_begin();
    checksum_add(&sum, text, (size_t)(last - text));
    sprintf(last, "checksum %016llx\n", (unsigned long long)checksum_end(&sum));
    write_file(path_of("%s", files[1]), text, strlen(text));
}
typedef struct {
    const char *from, *to;
} Forgery;
static const Forgery forgeries[] = {
    {"\nprivacy none\n", "\nprivacy \n"},
    {"\nstep 4\n", "\nstep -4\n"},
    {"\nstep 4\n", "\nstep four\n"},
    {"\nstep 4\n", "\nstep \n"},
    {"\nstep 4\n", "\nstep 4 5\n"},
    {"\nstep 4\n", "\n"},
    {"\nposition 31\n", "\nposition -1\n"},
    {"\nposition 31\n", "\nposition 31.5\n"},
    {"\nposition 31\n", "\nPosition 31\n"},
    {"\nupdates 3\n", "\nupdates -3\n"},
    {"\nupdates 3\n", "\n"},
    {"\nlosses 5 ", "\nlosses 6 "},
    {"\nlosses 5 ", "\nlosses 4 "},
    {"\nlosses 5 ", "\nlosses -5 "},
    {"\nlosses 5 ", "\nlosses -5\nrest "},
    {"\nlosses 5 ", "\nlosses 5 x"},
    {"\nlosses 5 ", "\nlosses "},
    {"\nlosses 5 ", "\nloss 5 "},
    {"\nnorms 10 ", "\nnorms 1000000000 "},
    {"\nnorms 10 ", "\nnorms 9 "},
    {"\nfiles 1\n", "\nfiles 0\n"},
    {"\nfiles 1\n", "\nfiles 2\n"},
    {"\nfiles 1\n", "\nfiles 99999999\n"},
    {"\nfiles 1\n", "\nfiles -1\n"},
    {"\nfiles 1\n", "\n"},
    {"\nfile0 ", "\nfile1 "},
    {"\nfile0 ", "\nfile0 x"},
    {"\nfile0 1", "\nfile0 2"},
    {"\nmodel layers=2", "\nmodel layers=3"},
    {"\nmodel ", "\nModel "},
    {",optimizer=adamw\n", ",optimizer=adamw,extra=1\n"},
};
static void test_forged_manifests_are_refused(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    save_step(&s, 4, 0);
    Bytes whole = read_bytes(path_of("%s", files[1]));
    for (int i = -1; i < (int)(sizeof forgeries / sizeof forgeries[0]); i++) {
        char text[20000];
        // -1: signed, not changed
        const char *from = i < 0 ? "step" : forgeries[i].from,
                   *to = i < 0 ? "step" : forgeries[i].to;
        const char *at = strstr((const char *)whole.data, from);
        if (!at) { fail_msg("no \"%s\" in the manifest", from); }
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - (const char *)whole.data),
                 (const char *)whole.data, to, at + strlen(from));
        sign_manifest(text);
        if (loads(&s) != (i < 0)) {
            fail_msg("\"%s\" for \"%s\": expected %s", to, from,
                     i < 0 ? "a checkpoint" : "a refusal");
        }
    }
    free(whole.data);
    store_free(&s);
}
// Files of older versions may have moments that were measured layer by layer, as kind 4: they are
// passed over, and all else is loaded.
static void test_reserved_states_are_passed_over(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    save_step(&s, 4, 0);
    Bytes manifest = read_bytes(path_of("%s", files[1])),
          whole = read_bytes(path_of("%s", files[0]));
    const int64_t lnf = model.storages - 1, elements = gpt_storage_elements(&model, (int)lnf),
                  kinds[] = {4, 6};
    char *text = (char *)manifest.data,
         *forged = calloc(whole.bytes + sizeof(StatePiece) + (size_t)elements * 4, 1);
    for (int k = 0; k < 2; k++) { // of a kind that there never was they are not
        StateHeader header;
        const StatePiece piece = {kinds[k], lnf, 0, elements};
        memcpy(&header, whole.data, sizeof header);
        const size_t table = sizeof header + (size_t)header.pieces * sizeof piece;
        header.pieces++;
        memcpy(forged, whole.data, table);
        memcpy(forged, &header, sizeof header);
        memcpy(forged + table, &piece, sizeof piece);
        memcpy(forged + table + sizeof piece, whole.data + table, whole.bytes - table);
        write_file(path_of("%s", files[0]), forged,
                   whole.bytes + sizeof piece + (size_t)elements * 4);
        sign_state(text);
        sign_manifest(text);
        assert_int_equal(loads(&s), kinds[k] == 4);
    }
    free(forged);
    free(manifest.data);
    free(whole.data);
    store_free(&s);
}
// Which blocks share comes back from a manifest; whatever else stands there is refused, also groups
// of different lengths, which older versions had.
static void test_shares(void **state) {
    (void)state;
    GptConfig of = config, read;
    GptShare share, back;
    char optimizer[OPTIMIZER_NAME], text[400];
    for (int round = 0; round < 300; round++) {
        of.layers = 1 + (int64_t)draw(12);
        const int64_t n = 1 + (int64_t)draw((size_t)of.layers);
        const bool cycles = round % 2;
        share = gpt_share(of.layers, n, cycles ? n : 0);
        GptModel m = gpt_model_shared(of, share);
        TextBuffer t = {NULL, 0, 0};
        manifest_add_model(&t, &m, &optimizers[0]);
        assert_true(manifest_model(t.text, &read, &back, optimizer) && read.layers == of.layers &&
                    share_same(share, back));
        free(t.text);
        int64_t users = 0;
        for (int i = 2; i < m.storages - 1; i++) {
            const int64_t before = users, first = gpt_first_layer(&m, i);
            for (int64_t l = first; l >= 0; l = gpt_next_layer(&m, l), users++) {
                assert_true(gpt_storage_of_layer(&m, l) == i &&
                            first == (cycles ? l % n : l / n * n));
            }
            assert_int_equal(gpt_storage_shared_by(&m, i), users - before);
        }
        assert_int_equal(users, of.layers);
    }
    static const char *const forged[] = {"",
                                         "0",
                                         "-1",
                                         "7",
                                         "2y",
                                         "0x",
                                         "7x",
                                         "0.0",
                                         "0.0.0.0.0.0.0",
                                         "1.1.1.1.1.1",
                                         "0.0.1.0.0.0",
                                         "0.0.3.3.0.0",
                                         "0.0.0.0.0.-1",
                                         "0..0.0.0.0",
                                         "0.0.0.0.0.",
                                         "all",
                                         "0.0.2.3.3.5"};
    for (size_t i = 0; i < sizeof forged / sizeof forged[0]; i++) {
        snprintf(text, sizeof text,
                 "model "
                 "layers=6,heads=2,channels=16,vocab=101,padded_vocab=128,max_seq_len=16,optimizer="
                 "adamw,share=%s\n",
                 forged[i]);
        assert_false(manifest_model(text, &read, &back, optimizer));
    }
}
// A manifest has at least one block, and no more than a model may have.
static void test_numbers_of_blocks(void **state) {
    (void)state;
    const int64_t layers[] = {1, GPT_LAYERS, 0, -1, GPT_LAYERS + 1, INT64_MAX};
    GptConfig read;
    GptShare share;
    char optimizer[OPTIMIZER_NAME];
    for (int i = 0; i < 6; i++) {
        const Text text = text_of("model layers=%" PRId64 ",heads=2,channels=16,vocab=101,"
                                  "padded_vocab=128,max_seq_len=16,optimizer=adamw\n",
                                  layers[i]);
        assert_int_equal(manifest_model(text.at, &read, &share, optimizer), i < 2);
    }
}
// A manifest names its architecture, unless it is the first; one that is unknown is refused.
static void test_architectures(void **state) {
    (void)state;
    const char *rest = "layers=6,heads=2,channels=16,vocab=101,padded_vocab=128,max_seq_len=16,"
                       "optimizer=adamw\n";
    const char *known[] = {"", "arch=gpt2,"}, *unknown[] = {"arch=gpt3,", "arch=,", "arch=gpt2"};
    GptConfig read;
    GptShare share;
    char optimizer[OPTIMIZER_NAME], text[400];
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof text, "model %s%s", known[i], rest);
        assert_true(manifest_model(text, &read, &share, optimizer) && read.arch == 0);
    }
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof text, "model %s%s", unknown[i], rest);
        assert_false(manifest_model(text, &read, &share, optimizer));
    }
}
// The history of private steps comes back as it was; what these steps lost is not told. A manifest
// from before there were any has none.
static void test_histories(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    Progress p = make_progress(4, 5), q;
    char path[1100], text[20000], longest[PRIVACY_HISTORY_MAX + 20];
    fill_store(&s, 4);
    snprintf(p.privacy, sizeof p.privacy, "windows=975 sigma=1.1 steps=4");
    assert_true(save(&s, &p, 0, path) && load(path, &s, &q));
    assert_string_equal(q.privacy, p.privacy);
    assert_true(q.loss.count == 0 && q.norm.count == 0);
    Bytes whole = read_bytes(path_of("%s", files[1]));
    assert_null(strstr((const char *)whole.data, "0x1."));
    memset(longest, 'x', sizeof longest);
    for (int more = 0; more < 2; more++) { // as long as it may be, and longer
        snprintf(text, sizeof text, "train_gpt checkpoint 1\nprivacy %.*s\n%s",
                 PRIVACY_HISTORY_MAX - 1 + more, longest,
                 strchr((const char *)whole.data, '\n') + 1);
        sign_manifest(text);
        assert_int_equal(load(path, &s, &q), !more);
        if (!more) { assert_int_equal(strlen(q.privacy), PRIVACY_HISTORY_MAX - 1); }
    }
    char *line = strstr((char *)whole.data, "privacy ");
    snprintf(text, sizeof text, "%.*s%s", (int)(line - (char *)whole.data),
             (const char *)whole.data, strchr(line, '\n') + 1);
    sign_manifest(text);
    assert_true(load(path, &s, &q));
    assert_string_equal(q.privacy, "none");
    free(whole.data);
    store_free(&s);
}
static void test_forged_pieces_are_refused(void **state) {
    (void)state;
    static const struct {
        // byte of the state file: the header, then pieces of { state, storage, begin, count }
        size_t at;
        int64_t value;
    } cases[] = {
        {0, 0},
        {8, 2},
        {8, 0},
        {16, 0},
        {16, 14},
        {16, 16},
        {16, 1000000000},
        {16, -1},
        {24, -1},
        {24, 3},
        {24, 2},
        {24, 1000},
        {32, -1},
        {32, 5},
        {32, 1000},
        {32, INT64_MAX},
        {40, -1},
        {40, 1},
        {40, INT64_MAX},
        {40, 2048},
        {48, -1},
        {48, 2049},
        {48, 2047},
        {48, 0},
        {48, INT64_MAX},
        {48, INT64_MIN},
        {24 + 14 * 32, 3},
        {32 + 14 * 32, -1},
        {48 + 14 * 32, 33},
    };
    Store s = make_store(DTYPE_FP32, true);
    save_step(&s, 4, 0);
    Progress p;
    Bytes whole = read_bytes(path_of("%s", files[0])), text = read_bytes(path_of("%s", files[1]));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t before;
        memcpy(&before, whole.data + cases[i].at, 8);
        assert_true(before != cases[i].value);
        memcpy(whole.data + cases[i].at, &cases[i].value, 8);
        write_file(path_of("%s", files[0]), whole.data, whole.bytes);
        memcpy(whole.data + cases[i].at, &before, 8);
        sign_state((char *)text.data);
        sign_manifest((char *)text.data);
        if (load(path_of("step_00000004"), &s, &p)) {
            fail_msg("word at byte %zu = %lld loads", cases[i].at, (long long)cases[i].value);
        }
    }
    write_file(path_of("%s", files[0]), whole.data, whole.bytes);
    sign_state((char *)text.data);
    sign_manifest((char *)text.data);
    assert_true(loads(&s)); // so it was the forgeries that were refused, not the signature
    free(whole.data);
    free(text.data);
    store_free(&s);
}
static void test_what_is_no_checkpoint(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    Progress p;
    assert_false(load(path_of("nothing"), &s, &p));
    assert_int_equal(mkdir(path_of("empty"), 0755), 0);
    assert_false(load(path_of("empty"), &s, &p));
    write_file(path_of("file"), "checksum 0000000000000000\n", 26);
    assert_false(load(path_of("file"), &s, &p));
    assert_int_equal(mkdir(path_of("empty/manifest"), 0755), 0);
    assert_false(load(path_of("empty"), &s, &p));
    static const char *const texts[] = {"",
                                        "\n",
                                        "\n\n",
                                        "checksum",
                                        "checksum 0\n",
                                        "\nchecksum 0\n",
                                        "\nchecksum \n",
                                        "checksum 0000000000000000"};
    assert_int_equal(rmdir(path_of("empty/manifest")), 0);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        write_file(path_of("empty/manifest"), texts[i], strlen(texts[i]));
        assert_false(load(path_of("empty"), &s, &p));
    }
    store_free(&s);
}

// -------------------------------------------------------------------------------------------------
// Many checkpoints in a folder

static void check_steps(const char *expected) { // newest first, as text
    int count;
    char found[200] = "";
    int64_t *steps = checkpoint_list(out, &count);
    for (int i = 0; i < count; i++) {
        snprintf(found + strlen(found), sizeof found - strlen(found), "%s%d", i ? " " : "",
                 (int)steps[i]);
    }
    free(steps);
    assert_string_equal(found, expected);
}
static void test_keep(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    // 8 .. 12: by number, not by name
    for (int step = 8; step <= 12; step++) { save_step(&s, step, 0); }
    check_steps("12 11 10 9 8");
    save_step(&s, 13, 3);
    check_steps("13 12 11");
    save_step(&s, 14, 1);
    check_steps("14");
    save_step(&s, 15, 9);
    check_steps("15 14");
    assert_false(exists(path_of("step_00000008")));
    check_step(14);
    check_step(15);
    store_free(&s);
}
// After a newer checkpoint turned out torn, training went on from an older one: what is saved now
// must not be pruned for it.
static void check_kept(const bool kept[4]) {
    for (int step = 1; step <= 4; step++) {
        assert_int_equal(exists(path_of("step_%08d", step)), kept[step - 1]);
    }
}
// What may still be needed stays: the newest good one, and without one everything.
static void test_keep_keeps_a_good_one(void **state) {
    (void)state;
    const bool all[4] = {true, true, true, true}, good[4] = {false, true, true, true},
               newest[4] = {false, false, false, true};
    Store s = make_store(DTYPE_FP32, true);
    for (int step = 1; step <= 4; step++) { save_step(&s, step, 0); }
    checkpoints_prune(out, 4, 1, -1);
    check_kept(all);
    checkpoints_prune(out, 2, 2, 2); // later steps are left alone and do not count
    check_kept(all);
    checkpoints_prune(out, 4, 1, 2);
    check_kept(good);
    checkpoints_prune(out, 4, 1, 4);
    check_kept(newest);
    store_free(&s);
}
// A checkpoint with a number that is not finite is not saved; one of an older program is skipped.
static void test_not_finite(void **state) {
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    Store s = make_store(DTYPE_FP32, true), t = make_store(DTYPE_FP32, true);
    resumed_store = &t;
    save_step(&s, 10, 0);
    for (int i = 0; i < 6; i++) {
        const StateKind kind = i % 2 ? STATE_MOMENT : STATE_MASTER;
        const int64_t at = i % 3 ? model.parameters - 1 : 0;
        float *x = &store_floats(&s, kind, 0, 0)[at], before = *x;
        char path[1100];
        Progress p = make_progress(11, 5);
        StateReport report = {};
        uint64_t bytes, checksum;
        *x = bad[i / 2];
        assert_false(save(&s, &p, 0, path));
        assert_non_null(strstr(said, "a weight or a moment is NaN or infinite"));
        assert_int_equal(mkdir(path, 0777), 0);
        assert_int_equal(
            state_file_write(path_of("step_00000011/state_00000"), &s, &bytes, &checksum),
            STATE_NOT_FINITE);
        report.bytes = (double)bytes;
        report.checksum_high = (double)(checksum >> 32);
        report.checksum_low = (double)(checksum & 0xffffffffu);
        assert_int_equal(manifest_write(path, &s, &p, "--steps 5", &report), 0);
        check_child(resume_from, path_of("step_00000010"), EXIT_DONE,
                    isnan(bad[i / 2]) ? "has a NaN" : "has an infinite number");
        check_child(resume_from, path_of("step_00000010"), EXIT_DONE, at ? "tensor lnfb" : "wte");
        GptConfig newest;
        GptShare share;
        assert_false(checkpoint_whole(path, &comm, &newest, &share));
        folder_remove(path);
        *x = before;
    }
    assert_true(checkpoint_whole(path_of("step_00000010"), &comm, &(GptConfig){}, &(GptShare){}));
    store_free(&s);
    store_free(&t);
}
static void test_keep_never_prunes_what_was_just_saved(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    save_step(&s, 20, 0);
    save_step(&s, 30, 0);
    assert_int_equal(truncate(path_of("step_00000030/state_00000"), 1000), 0);
    save_step(&s, 25, 1);
    check_step(25);
    store_free(&s);
}
static void test_same_step_again(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    save_step(&s, 6, 0);
    assert_int_equal(truncate(path_of("step_00000006/state_00000"), 1000), 0);
    save_step(&s, 6, 0);
    check_step(6);
    assert_false(exists(path_of("step_00000006.tmp")));
    store_free(&s);
}
static void test_names_that_are_no_checkpoints(void **state) {
    (void)state;
    static const char *const names[] = {"step_",
                                        "step_x",
                                        "step_5x",
                                        "step_-5",
                                        "step_00000005.tmp",
                                        "tep_5",
                                        "earlier-1",
                                        "lock",
                                        "xstep_5",
                                        "step_5",
                                        "step_+0000005",
                                        "step_ 0000005",
                                        "step_000000005",
                                        "step_99999999999999999999",
                                        "step_9223372036854775807"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        assert_int_equal(mkdir(path_of("%s", names[i]), 0755), 0);
    }
    check_steps("");
    assert_int_equal(mkdir(path_of("step_00000007"), 0755), 0);
    assert_int_equal(mkdir(path_of("step_123456789012"), 0755), 0);
    assert_int_equal(mkdir(path_of("step_100000000"), 0755), 0);
    int count;
    int64_t *steps = checkpoint_list(out, &count);
    assert_true(count == 3 && steps[0] == 123456789012 && steps[1] == 100000000 && steps[2] == 7);
    free(steps);
}

// -------------------------------------------------------------------------------------------------
// Preparing the folder

static void prepare_new(const void *folder) { out_folder_prepare(folder, false); }
static void prepare_resume(const void *folder) { out_folder_prepare(folder, true); }

static void test_half_written_folders_are_removed(void **state) {
    (void)state;
    for (int resume = 0; resume < 2; resume++) {
        Store s = make_store(DTYPE_FP32, true);
        save_step(&s, 5, 0);
        assert_int_equal(mkdir(path_of("step_00000006.tmp"), 0755), 0);
        write_file(path_of("step_00000006.tmp/state_00000"), "half", 4);
        write_file(path_of("step_00000006.tmp/manifest.tmp"), "half", 4);
        assert_int_equal(mkdir(path_of("other.tmp"), 0755), 0);
        check_child(resume ? prepare_resume : prepare_new, out, EXIT_DONE, "");
        assert_false(exists(path_of("step_00000006.tmp")));
        assert_true(exists(path_of("other.tmp"))); // not ours
        if (resume) { check_step(5); }
        store_free(&s);
        fresh(NULL);
    }
}
static void test_earlier_runs_are_set_aside(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    for (int run = 1; run <= 3; run++) {
        save_step(&s, 5, 0);
        save_step(&s, 10 * run, 0);
        check_child(prepare_resume, out, EXIT_DONE, "");
        check_step(5);
        check_step(10 * run);
        // of a private run
        write_file(path_of("dp_key"), "key", 3);
        write_file(path_of("dp_steps"), "steps", 5);
        check_child(prepare_new, out, EXIT_DONE, "");
        check_steps("");
        assert_true(exists(path_of("earlier-%d/dp_key", run)) &&
                    exists(path_of("earlier-%d/dp_steps", run)));
        assert_false(exists(path_of("dp_key")) || exists(path_of("dp_steps")));
        Store t = make_store(DTYPE_FP32, true);
        Progress p;
        fill_store(&s, 5);
        assert_true(load(path_of("earlier-%d/step_00000005", run), &t, &p) && same_states(&s, &t));
        assert_true(exists(path_of("earlier-%d/step_%08d/manifest", run, 10 * run)));
        store_free(&t);
    }
    check_child(prepare_new, out, EXIT_DONE, ""); // nothing to set aside: no folder for it
    assert_false(exists(path_of("earlier-4")));
    store_free(&s);
}
// A process that holds the lock until it is killed.
static pid_t hold_lock(void) {
    int ends[2];
    char ready;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(20); // not to outlive a test that fails
        out_folder_prepare(out, false);
        if (write(ends[1], "x", 1) != 1) { _exit(1); }
        for (;;) { pause(); }
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &ready, 1), 1);
    close(ends[0]);
    return child;
}
static void test_lock(void **state) {
    (void)state;
    int status;
    pid_t other = hold_lock();
    Store s = make_store(DTYPE_FP32, true);
    save_step(&s, 5, 0);
    check_child(prepare_new, out, EXIT_INPUT, "another run is using");
    check_child(prepare_resume, out, EXIT_INPUT, out);
    check_step(5); // where it was
    kill(other, SIGKILL);
    waitpid(other, &status, 0);
    check_child(prepare_resume, out, EXIT_DONE, ""); // a dead run's lock is gone
    store_free(&s);
}
static void test_folders_that_cannot_be_made(void **state) {
    (void)state;
    write_file(path_of("file"), "x", 1);
    check_child(prepare_new, path_of("file"), EXIT_INPUT, "cannot make");
    check_child(prepare_new, path_of("file/folder"), EXIT_INPUT, "cannot make");
    check_child(prepare_new, path_of("missing/folder/"), EXIT_DONE, ""); // with those above it
    assert_true(exists(path_of("missing/folder/lock")));
    check_child(prepare_new, path_of("made"), EXIT_DONE, "");
    assert_true(exists(path_of("made/lock")));
}

// -------------------------------------------------------------------------------------------------
// Saves that fail

// Step 2 could not be saved: a warning says why, nothing is left of it, and step 1 is as it was.
static void check_failed(int error) {
    if (!strstr(said, "warning: checkpoint") || !strstr(said, "step_00000002") ||
        !strstr(said, strerror(error))) {
        fail_msg("no warning of %s: %s", strerror(error), said);
    }
    assert_false(exists(path_of("step_00000002")) || exists(path_of("step_00000002.tmp")));
    check_steps("1");
    check_step(1);
}
static void test_read_only_folder(void **state) {
    (void)state;
    char path[1100];
    Store s = make_store(DTYPE_FP32, true);
    Progress p = make_progress(2, 5);
    save_step(&s, 1, 0);
    assert_int_equal(chmod(out, 0555), 0);
    uid_t user = geteuid();
    if (user == 0) { assert_int_equal(seteuid(65534), 0); } // for root no folder is read-only
    bool saved = save(&s, &p, 1, path);
    if (user == 0) { assert_int_equal(seteuid(0), 0); }
    assert_int_equal(chmod(out, 0755), 0);
    assert_false(saved);
    check_failed(EACCES);
    store_free(&s);
}
static void test_missing_folder(void **state) {
    (void)state;
    char path[1100];
    Store s = make_store(DTYPE_FP32, true);
    Progress p = make_progress(2, 5);
    assert_int_equal(rmdir(out), 0);
    assert_false(save(&s, &p, 0, path));
    assert_non_null(strstr(said, strerror(ENOENT)));
    store_free(&s);
}
static bool fill_disk(size_t pages_left) { // with a file, until only so many pages are left
    static const char page[4096];
    unlink(path_of("ballast"));
    FILE *f = fopen(path_of("ballast"), "wb");
    setbuf(f, NULL);
    size_t pages = 0;
    while (fwrite(page, 1, sizeof page, f) == sizeof page) { pages++; }
    bool enough = pages >= pages_left &&
                  ftruncate(fileno(f), (off_t)((pages - pages_left) * sizeof page)) == 0;
    fclose(f);
    return enough;
}
// The disk gets full at every page of the state file and of the manifest in turn.
static void test_full_disk(void **state) {
    (void)state;
    char path[1100];
    if (mount("tmpfs", out, "tmpfs", 0, "size=512k")) {
        print_message("no small disk to fill (%s): skipped\n", strerror(errno));
        skip();
    }
    Store s = make_store(DTYPE_FP32, true);
    Progress p = make_progress(2, 5);
    size_t left = 0;
    save_step(&s, 1, 0);
    for (bool saved = false; !saved; left++) {
        assert_true(fill_disk(left));
        saved = save(&s, &p, 0, path);
        if (!saved) { check_failed(ENOSPC); }
        if (!saved && left % 4 == 0) { // model files likewise
            assert_int_equal(model_file_write(path_of("model.bin"), &s),
                             left * 4096 < 36096 ? ENOSPC : 0);
            assert_int_equal(exists(path_of("model.bin")), left * 4096 >= 36096);
            assert_false(exists(path_of("model.bin.tmp")));
            unlink(path_of("model.bin"));
        }
    }
    unlink(path_of("ballast"));
    check_steps("2 1");
    check_step(1);
    store_free(&s);
    assert_int_equal(umount(out), 0);
    assert_true(left > 26); // 26 pages of states and one of the manifest
}

// -------------------------------------------------------------------------------------------------
// Model files

// from the root of the repository
static const char *const golden = "test/golden/gpt_tiny_model.bin";
static bool same_files(const char *a, const char *b) {
    Bytes x = read_bytes(a), y = read_bytes(b);
    bool same = x.bytes == y.bytes && !memcmp(x.data, y.data, x.bytes);
    free(x.data);
    free(y.data);
    return same;
}
static void check_model_round_trip(DType dtype) {
    Store s = make_store(dtype, true), t = make_store(dtype, false);
    DType found;
    fill_store(&s, 3);
    assert_int_equal(model_file_write(path_of("a.bin"), &s), 0);
    Bytes file = read_bytes(path_of("a.bin"));
    const int32_t expected[10] = {20240326, dtype == DTYPE_BF16 ? 5 : 3, 8, 50, 2, 1, 16, 128, 0,
                                  0};
    assert_memory_equal(file.data, expected, sizeof expected);
    assert_int_equal(file.bytes, 1024 + (size_t)model.parameters * (dtype == DTYPE_BF16 ? 2 : 4));
    GptConfig c = model_file_config(path_of("a.bin"), &found);
    assert_memory_equal(&c, &config, sizeof c);
    assert_int_equal(found, dtype);
    model_file_load(path_of("a.bin"), &t, found);
    for (int64_t i = 0; i < model.parameters; i++) { // the masters of a bf16 file are its numbers
        const void *param = store_full(&s, STATE_PARAMETERS, 0);
        float value = dtype == DTYPE_BF16 ? bf16_to_float(((const uint16_t *)param)[i])
                                          : ((const float *)param)[i];
        assert_memory_equal(&store_floats(&t, STATE_MASTER, 0, 0)[i], &value, 4);
    }
    assert_memory_equal(store_full(&s, STATE_PARAMETERS, 0), store_full(&t, STATE_PARAMETERS, 0),
                        (size_t)model.parameters * dtype_size(dtype));
    assert_int_equal(model_file_write(path_of("b.bin"), &t), 0);
    assert_true(same_files(path_of("a.bin"), path_of("b.bin")));
    assert_false(exists(path_of("a.bin.tmp")));
    free(file.data);
    store_free(&s);
    store_free(&t);
}
static void test_model_round_trip(void **state) {
    (void)state;
    check_model_round_trip(DTYPE_FP32);
    check_model_round_trip(DTYPE_BF16);
}
// A file that another program wrote, byte for byte; and a tensor of it where llm.c has it.
static void test_golden_model(void **state) {
    (void)state;
    DType dtype;
    GptModel m = gpt_model(model_file_config(golden, &dtype));
    Store s = make_store_of(&m, dtype, true);
    model_file_load(golden, &s, dtype);
    assert_int_equal(model_file_write(path_of("again.bin"), &s), 0);
    assert_true(same_files(golden, path_of("again.bin")));
    Bytes file = read_bytes(golden);
    const char *fcb_of_layer_1 = (const char *)file.data + 1024 + 4 * (63744 + 192);
    assert_memory_equal(store_floats(&s, STATE_MASTER, 3, 0) + m.tensor_offset[FCB], fcb_of_layer_1,
                        192 * 4);
    free(file.data);
    store_free(&s);
}
static void open_model(const void *path) {
    DType dtype;
    model_file_config(path, &dtype);
}
static const struct {
    int word, value; // of the header
    const char *words;
} bad_headers[] = {
    {0, 0, "expected magic 20240326"},
    {0, 20240520, "expected magic 20240326"},
    {0, -1, "expected magic 20240326"},
    {1, 0, "version 3 or 5"},
    {1, 1, "version 3 or 5"},
    {1, 2, "version 3 or 5"},
    {1, 4, "version 3 or 5"},
    {1, 6, "version 3 or 5"},
    {1, -3, "version 3 or 5"},
    {1, 5, "bytes"}, // bf16 would be half as long
    {2, 0, "max_seq_len=0"},
    {2, -1, "max_seq_len=-1"},
    {2, INT32_MAX, "impossible"},
    {2, 9, "bytes"},
    {3, 0, "vocab=0"},
    {3, -5, "vocab=-5"},
    {3, 129, "padded=128"},
    {3, INT32_MAX, "impossible"},
    {4, 0, "layers=0"},
    {4, -2, "layers=-2"},
    {4, 3, "bytes"},
    {4, 10001, "impossible"},
    {4, INT32_MAX, "impossible"},
    {4, INT32_MIN, "impossible"},
    {5, 0, "heads=0"},
    {5, -1, "heads=-1"},
    {5, 3, "heads=3"},
    {5, 32, "heads=32"},
    {6, 0, "channels=0"},
    {6, -16, "channels=-16"},
    {6, 1 << 20, "bytes"},
    {6, INT32_MAX, "impossible"},
    {7, 0, "padded=0"},
    {7, 49, "padded=49"},
    {7, 1 << 25, "bytes"},
    {7, INT32_MAX, "impossible"},
    {7, INT32_MIN, "impossible"},
};
static void test_bad_headers_are_refused(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    assert_int_equal(model_file_write(path_of("good.bin"), &s), 0);
    Bytes file = read_bytes(path_of("good.bin"));
    int32_t *header = (int32_t *)file.data;
    for (size_t i = 0; i < sizeof bad_headers / sizeof bad_headers[0]; i++) {
        int32_t before = header[bad_headers[i].word];
        header[bad_headers[i].word] = bad_headers[i].value;
        write_file(path_of("bad.bin"), file.data, file.bytes);
        header[bad_headers[i].word] = before;
        check_child(open_model, path_of("bad.bin"), EXIT_INPUT, bad_headers[i].words);
        check_child(open_model, path_of("bad.bin"), EXIT_INPUT, path_of("bad.bin"));
    }
    check_child(open_model, path_of("good.bin"), EXIT_DONE, "");
    free(file.data);
    store_free(&s);
}
static void test_bad_lengths_are_refused(void **state) {
    (void)state;
    Store s = make_store(DTYPE_BF16, true);
    assert_int_equal(model_file_write(path_of("good.bin"), &s), 0);
    Bytes file = read_bytes(path_of("good.bin"));
    const size_t lengths[] = {0,
                              1,
                              32,
                              1023,
                              1024,
                              4096,
                              file.bytes - 4096,
                              file.bytes - 2,
                              file.bytes - 1,
                              file.bytes + 1};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        write_file(path_of("bad.bin"), file.data, lengths[i]); // a byte more: the 0 behind the data
        check_child(open_model, path_of("bad.bin"), EXIT_INPUT, path_of("bad.bin"));
    }
    check_child(open_model, path_of("none.bin"), EXIT_INPUT, "cannot open");
    check_child(open_model, out, EXIT_INPUT, "a directory");
    check_child(open_model, "/dev/zero", EXIT_INPUT, "no regular file");
    assert_int_equal(mkfifo(path_of("pipe.bin"), 0600), 0);
    check_child(open_model, path_of("pipe.bin"), EXIT_INPUT, "no regular file");
    free(file.data);
    store_free(&s);
}
static void test_model_files_that_cannot_be_written(void **state) {
    (void)state;
    Store s = make_store(DTYPE_FP32, true);
    assert_int_equal(model_file_write(path_of("missing/a.bin"), &s), ENOENT);
    assert_int_equal(mkdir(path_of("folder.bin"), 0755), 0);
    assert_int_equal(model_file_write(path_of("folder.bin"), &s), EISDIR);
    assert_false(exists(path_of("folder.bin.tmp")));
    store_free(&s);
}

// -------------------------------------------------------------------------------------------------

static int make_base(void **state) {
    (void)state;
    const char *where = getenv("TMPDIR");
    snprintf(base, sizeof base, "%.150s/test_checkpoint.XXXXXX", where ? where : "/tmp");
    if (!mkdtemp(base) || chmod(base, 0755)) { return -1; }
    snprintf(out, sizeof out, "%s/out", base);
    return 0;
}
static int remove_base(void **state) {
    (void)state;
    if (umount2(out, MNT_DETACH)) { errno = 0; } // a test that failed may have left its disk
    remove_tree(base);
    return 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slices),
        cmocka_unit_test_setup(test_round_trip, fresh),
        cmocka_unit_test_setup(test_resume, fresh),
        cmocka_unit_test_setup(test_resume_skips_what_is_torn, fresh),
        cmocka_unit_test_setup(test_other_models_are_refused, fresh),
        cmocka_unit_test_setup(test_torn_files_are_refused, fresh),
        cmocka_unit_test_setup(test_changed_bytes_are_refused, fresh),
        cmocka_unit_test_setup(test_forged_manifests_are_refused, fresh),
        cmocka_unit_test_setup(test_histories, fresh),
        cmocka_unit_test(test_reserved_states_are_passed_over),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_numbers_of_blocks),
        cmocka_unit_test(test_architectures),
        cmocka_unit_test_setup(test_forged_pieces_are_refused, fresh),
        cmocka_unit_test_setup(test_what_is_no_checkpoint, fresh),
        cmocka_unit_test_setup(test_keep, fresh),
        cmocka_unit_test_setup(test_keep_keeps_a_good_one, fresh),
        cmocka_unit_test_setup(test_not_finite, fresh),
        cmocka_unit_test_setup(test_keep_never_prunes_what_was_just_saved, fresh),
        cmocka_unit_test_setup(test_same_step_again, fresh),
        cmocka_unit_test_setup(test_names_that_are_no_checkpoints, fresh),
        cmocka_unit_test_setup(test_half_written_folders_are_removed, fresh),
        cmocka_unit_test_setup(test_earlier_runs_are_set_aside, fresh),
        cmocka_unit_test_setup(test_lock, fresh),
        cmocka_unit_test_setup(test_folders_that_cannot_be_made, fresh),
        cmocka_unit_test_setup(test_read_only_folder, fresh),
        cmocka_unit_test_setup(test_missing_folder, fresh),
        cmocka_unit_test_setup(test_full_disk, fresh),
        cmocka_unit_test_setup(test_model_round_trip, fresh),
        cmocka_unit_test_setup(test_golden_model, fresh),
        cmocka_unit_test_setup(test_bad_headers_are_refused, fresh),
        cmocka_unit_test_setup(test_bad_lengths_are_refused, fresh),
        cmocka_unit_test_setup(test_model_files_that_cannot_be_written, fresh),
    };
    int everyone[] = {0};
    choose_seed();
    comm_start(&comm, &argc, &argv);
    comm_place(&comm, 0);
    comm_allocate(&comm, NULL, 0);
    world = group_make(everyone, 1, 0, comm.node_of);
    stream.threads = 1;
    model = gpt_model(config);
    int failed = cmocka_run_group_tests(tests, make_base, remove_base);
    comm_end(&comm);
    return failed;
}
