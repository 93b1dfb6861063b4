// test_privacy.c: proves that a private run keeps what it promises: the noise that is found keeps
// epsilon and no step exceeds it; a batch is cut so seldom that delta does not tell; a history
// holds every setting exactly and no other setting goes on from it; the key is in its file alone,
// readable by its owner, and nothing resumes without it; steps that drew noise are not drawn again
// under other flags; what is claimed is rounded up.
#include "ops/cpu/ops_cpu.h"
#include "cli/option_parser.h"
#include "run/privacy_ledger.h"
#include "report/privacy_report.h"

#include "harness.h"

static Comm comm;
static char folder[] = "/tmp/test_privacy_XXXXXX";

static uint64_t seed, drawn;
static uint64_t draw(uint64_t below) { return random_u64(seed, 1, drawn++) % below; }
static void choose_seed(void) { seed = test_seed((uint64_t)time(NULL)); }

// -------------------------------------------------------------------------------------------------
// Runs: a command line, and what the data are

static const char KEY[] = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
typedef struct {
    char text[2048], *words[40];
    Options options;
    OptionsGiven given;
    Privacy p;
} Run;
__attribute__((format(printf, 2, 3))) static void parse_run(Run *r, const char *format, ...) {
    va_list args;
    int count = 1;
    va_start(args, format);
    vsnprintf(r->text, sizeof r->text, format, args);
    va_end(args);
    r->words[0] = r->text + sizeof r->text - 1;
    for (char *rest = r->text, *word; (word = strsep(&rest, " "));) { r->words[count++] = word; }
    options_parse(&r->options, &r->given, count, r->words);
}
enum { WINDOWS = 975, SAMPLES = 12, STEPS = 50 };
static void plan_run(Run *r) {
    r->p = privacy_plan(&r->options, &r->given, WINDOWS, SAMPLES,
                        r->options.steps >= 0 ? r->options.steps : STEPS, &comm);
}

// A body for run_child: a line that is planned, and begun from a history at a step where there is
// one.
typedef struct {
    const char *line, *history;
    int64_t windows, samples, steps, step;
} Case;
static void run_case(const void *argument) {
    const Case *c = (const Case *)argument;
    Run r;
    parse_run(&r, "%s", c->line);
    r.p = privacy_plan(&r.options, &r.given, c->windows, c->samples, c->steps, &comm);
    if (c->history) { privacy_begin(&r.p, &r.options, &r.given, c->history, c->step, &comm); }
}
static void check_case(Case c, int code, const char *first, const char *second) {
    char message[4096];
    int found = run_child(run_case, &c, message, sizeof message);
    if (found != code || !strstr(message, first) || !strstr(message, second)) {
        fail_msg("\"%s\" from \"%s\": expected exit code %d, \"%s\" and \"%s\", found %d: %s",
                 c.line, c.history ? c.history : "", code, first, second, found, message);
    }
}
static void check_begun(const char *line, const char *history, int64_t step, int code,
                        const char *first, const char *second) {
    Case c = {line, history, WINDOWS, SAMPLES, STEPS, step};
    check_case(c, code, first, second);
}

// Files of a run's folder.
static void path_of(char *path, size_t bytes, const char *name) {
    snprintf(path, bytes, "%s/%s", folder, name);
}
static void read_whole(const char *name, char *text, size_t bytes) {
    char path[200];
    path_of(path, sizeof path, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    text[fread(text, 1, bytes - 1, f)] = 0;
    fclose(f);
}
static void write_whole(const char *name, const char *text, mode_t mode) {
    char path[200];
    path_of(path, sizeof path, name);
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}
static void write_ledger(int64_t taken, int64_t since, uint64_t path) {
    char text[100];
    snprintf(text, sizeof text, "%020" PRId64 " %020" PRId64 " %016" PRIx64 "\n", taken, since,
             path);
    write_whole("dp_steps", text, 0600);
}

// -------------------------------------------------------------------------------------------------
// Plans

// Who begins a run that takes long to account is told so; and it ends, where it is not to take
// longer.
static void test_accounting_that_takes_long(void **state) {
    (void)state;
    const Case of_noise = {"--dp-noise 1", NULL, 1000 * WINDOWS, SAMPLES, 100000000, 0};
    const Case finds_noise = {"--dp-epsilon 8", NULL, 1000 * WINDOWS, SAMPLES, 100000000, 0};
    const Case finds_steps = {
        "--dp-epsilon 1 --dp-noise 1", NULL, 1000 * WINDOWS, SAMPLES, 100000000, 0};
    const char *first = "to account for 100000000 private steps takes";
    const double note = account_note, limit = account_run_seconds;
    account_note = 0;
    account_run_seconds = 0.02;
    check_case(of_noise, EXIT_DONE, "", "");
    check_case(finds_noise, EXIT_INPUT, first,
               "takes more than 0.02 s\n  hint: ask for fewer steps");
    check_case(finds_steps, EXIT_INPUT, first, "takes more than 0.02 s");
    check_case(finds_noise, EXIT_INPUT, "note: ", "takes a while");
    account_note = note;
    account_run_seconds = limit;
}
static void test_not_private(void **state) {
    (void)state;
    Run r;
    parse_run(&r, "--steps 5");
    plan_run(&r);
    assert_false(r.p.on);
    assert_true(privacy_allowed_steps(&r.p) == INT64_MAX);
    privacy_begin(&r.p, &r.options, &r.given, "", 0, &comm);
    char history[PRIVACY_HISTORY_MAX];
    TextBuffer line = {};
    privacy_history(&r.p, 5, history);
    assert_string_equal(history, "none");
    json_add_privacy(&line, &r.p, 5);
    assert_null(line.text); // nothing is added
}
static void test_plan(void **state) {
    (void)state;
    Run r;
    parse_run(&r, "--dp-noise 1.1");
    plan_run(&r);
    assert_true(r.p.on && r.p.sigma == 1.1 && r.p.delta == 0.1 / WINDOWS && r.p.clip == 1 &&
                r.p.style == DP_UNIT && r.p.document == 1);
    assert_int_equal(privacy_allowed_steps(&r.p), STEPS);
    PrivacySetting s = {(double)SAMPLES / WINDOWS, 1.1, r.p.delta, STEPS, false, false, 1};
    PrivacyLoss expected = account_epsilon(&s, NAN), found = privacy_epsilon(&r.p, STEPS);
    // delta is shorter by CAP_SHARE
    assert_true(found.high >= expected.low && found.high < expected.high + 1e-3);
    assert_true(privacy_epsilon(&r.p, STEPS).high == found.high); // the same again
    // nothing can be cut: nothing is taken off
    r.p.most = r.p.most_of_part = WINDOWS;
    assert_true(privacy_setting(&r.p, 1).delta == 0.1 / WINDOWS);
    assert_true(privacy_epsilon(&r.p, STEPS - 10).high < found.low &&
                privacy_epsilon(&r.p, 0).high == 0);
    parse_run(&r, "--dp-noise 1 --dp-delta 1e-6 --dp-neighbours replace-one --dp-unit document "
                  "--windows document --dp-windows-per-document 3");
    plan_run(&r);
    s = privacy_setting(&r.p, 7);
    assert_true(s.replace_one && s.windows == 3 && s.steps == 7 && s.delta < 1e-6 &&
                s.delta > 0.9999e-6 && !s.rdp);
    parse_run(&r, "--dp-noise 0");
    plan_run(&r);
    assert_true(r.p.on && isinf(privacy_epsilon(&r.p, 1).high) &&
                isinf(privacy_epsilon(&r.p, 1).low) && privacy_epsilon(&r.p, 0).high == 0);
    parse_run(&r, "--dp-noise 0.05"); // too little for a number
    plan_run(&r);
    assert_true(isinf(privacy_epsilon(&r.p, 1).high));
    parse_run(&r, "--dp-noise 1 --steps 0"); // no data were opened
    r.p = privacy_plan(&r.options, &r.given, 0, SAMPLES, 0, &comm);
    assert_true(r.p.on && r.p.most > SAMPLES && r.p.allowed == 0);
}
static void test_refused_plans(void **state) {
    (void)state;
    const Case many = {"--dp-noise 1", NULL, 11, 12, 5, 0};
    const Case all = {"--dp-noise 1", NULL, 12, 12, 5, 0};
    const Case none = {"--dp-noise 1", NULL, 0, 12, 5, 0};
    const Case little = {"--dp-epsilon 1e-6 --dp-delta 1e-30", NULL, 12, 12, 1000000, 0};
    const Case spent = {"--dp-epsilon 0.01 --dp-noise 0.5", NULL, 12, 12, 5, 0};
    const Case tiny = {"--dp-epsilon 100 --dp-noise 0.05", NULL, 12, 12, 5, 0};
    const Case longer = {"--dp-noise 1", NULL, 1000, 12, 2000000000, 0};
    check_case(many, EXIT_INPUT, "--batch-tokens stands for 12 samples, --train has 11 windows",
               "smaller --batch-tokens");
    check_case(all, EXIT_DONE, "", "");
    check_case(none, EXIT_INPUT, "--train has 0 windows", "");
    check_case(little, EXIT_INPUT, "no noise keeps --dp-epsilon 1e-06", "fewer --steps");
    check_case(tiny, EXIT_INPUT, "not one step with --dp-noise 0.05 keeps --dp-epsilon 100", "");
    check_case(spent, EXIT_INPUT, "not one step with --dp-noise 0.5 keeps --dp-epsilon 0.01", "");
    check_case(longer, EXIT_INPUT, "2000000000 private steps", "fewer --steps");
}
// Body for run_child: a delta, of data with so many units.
typedef struct {
    const char *line;
    int64_t units;
} DeltaCase;
static void run_delta(const void *argument) {
    const DeltaCase *c = (const DeltaCase *)argument;
    Run r;
    parse_run(&r, "%s", c->line);
    privacy_check_delta(&r.options, c->units);
}
static void test_delta_of_a_unit(void **state) {
    (void)state;
    static const char documents[] =
        "--dp-noise 1 --dp-unit document --windows document --dp-delta 0.3";
    static const struct {
        DeltaCase is;
        const char *first, *second; // of the message; NULL: accepted
    } cases[] = {
        {{"--dp-noise 1 --dp-delta 0.25", 4}, NULL, NULL},
        {{"--dp-noise 1 --dp-delta 1e-3", 0}, NULL, NULL}, // the data is not known
        {{"--dp-noise 1", 1000000}, NULL, NULL},
        {{"--dp-noise 1 --dp-delta 0.2501", 4},
         "--dp-delta 0.2501 is above 1 / units, 0.25",
         "4 windows"},
        {{"--dp-epsilon 1 --dp-delta 1e-3", 1001}, "above 1 / units, 0.000999", "1001 windows"},
        {{documents, 3}, NULL, NULL},
        {{documents, 4}, "above 1 / units, 0.25", "4 documents"},
    };
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        char message[4096];
        const bool good = !cases[i].first;
        const int found = run_child(run_delta, &cases[i].is, message, sizeof message);
        assert_int_equal(found, good ? EXIT_DONE : EXIT_INPUT);
        if (good) { continue; }
        assert_non_null(strstr(message, cases[i].first));
        assert_non_null(strstr(message, cases[i].second));
        assert_non_null(strstr(message, "better a tenth of it"));
    }
}
static void test_noise_is_found(void **state) {
    (void)state;
    const int one = (int)draw(2); // of the two, or both
    for (int rdp = 0; rdp < 2; rdp++) {
        if (rdp != one && !all_tests()) { continue; }
        Run r;
        parse_run(&r, "--dp-epsilon 2 --dp-delta 1e-5 --dp-accountant %s", rdp ? "rdp" : "prv");
        plan_run(&r);
        assert_true(r.p.sigma > 0.3 && r.p.sigma < 2);
        assert_int_equal(privacy_allowed_steps(&r.p), STEPS);
        assert_true(privacy_epsilon(&r.p, STEPS).high <= 2 &&
                    privacy_epsilon(&r.p, STEPS).high > 1.99);
        r.p.sigma -= 0.001;
        r.p.last_steps = 0;
        assert_true(privacy_epsilon(&r.p, STEPS).low > 2 || rdp); // no lower end is known by rdp
        assert_true(privacy_epsilon(&r.p, STEPS).high > 2);
    }
}
// Noise and a target: steps until it, not one more.
static void test_steps_stop_before_the_target(void **state) {
    (void)state;
    Run r;
    parse_run(&r, "--dp-epsilon 1 --dp-noise 0.8 --dp-delta 1e-5 --steps 4000");
    plan_run(&r);
    int64_t allowed = privacy_allowed_steps(&r.p);
    assert_true(r.p.sigma == 0.8 && allowed > 0 && allowed < 4000);
    assert_true(privacy_epsilon(&r.p, allowed).high <= 1 &&
                privacy_epsilon(&r.p, allowed + 2 + allowed / 1000).high > 1);
}
// What lies above the cap, added up, times all steps that there can be, against the share of delta
// that is set aside for it.
static void test_cap(void **state) {
    (void)state;
    static const double cases[][3] = {{1, 1000, 1e-4},  {12, 975, 1e-4},   {12, 12, 1e-2},
                                      {512, 1e6, 1e-7}, {100, 150, 1e-10}, {4096, 1e9, 1e-12}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const double S = cases[i][0], W = cases[i][1], delta = cases[i][2], q = S / W;
        for (int64_t document = 1; document < 9; document += 7) {
            int64_t most = privacy_most_samples((int64_t)S, (int64_t)W, document, delta);
            assert_true(most == (int64_t)W || (double)most >= S + 6.5 * sqrt(S * (1 - q)));
            // not far more than it needs
            assert_true(most <= (int64_t)W &&
                        (double)most <= S + 14 * sqrt(S) + 45 + (double)document);
            long double above = 0;
            // others than the document's
            for (int64_t n = most - document + 1;
                 n <= (int64_t)W && n < most + 20000 && most < (int64_t)W; n++) {
                above += expl(lgammal((long double)W + 1) - lgammal((long double)n + 1) -
                              lgammal((long double)W - n + 1) + n * logl((long double)q) +
                              ((long double)W - n) * log1pl(-(long double)q));
            }
            if (above * MOST_STEPS > CAP_SHARE * delta) {
                fail_msg("S %g W %g delta %g: %" PRId64 " is exceeded with %Lg", S, W, delta, most,
                         above);
            }
        }
    }
    // unknown windows: no less
    assert_true(privacy_most_samples(100, 0, 1, 1e-6) >=
                privacy_most_samples(100, 100000, 1, 1e-6));
}

// -------------------------------------------------------------------------------------------------
// Histories

#define LINE "--dp-noise 1.1 --dp-key "
static void make_history(char *text, int64_t steps) {
    Run r;
    parse_run(&r, LINE "%s", KEY);
    plan_run(&r);
    privacy_begin(&r.p, &r.options, &r.given, "", 0, &comm);
    privacy_history(&r.p, steps, text);
    write_ledger(steps, 0, 0);
}
static void test_history(void **state) {
    (void)state;
    char text[PRIVACY_HISTORY_MAX], expected[600], resume[200];
    uint32_t key[8];
    make_history(text, 20);
    noise_key_from_hex(key, KEY);
    snprintf(expected, sizeof expected,
             "windows=975 samples=12 sigma=1.1 delta=0.00010256410256410257 clip=1 style=unit "
             "function=abadi unit=sequence windows_per_document=1 "
             "neighbours=add-remove key=%016" PRIx64 " steps=20",
             noise_fingerprint(key));
    assert_string_equal(text, expected);
    assert_null(strstr(text, "0001020304")); // the key is not in it
    snprintf(resume, sizeof resume, "--resume --out %s --steps 50 " LINE "%s", folder, KEY);
    check_begun(resume, text, 20, EXIT_DONE, "", "");
}
// What differs is named, with both values.
static void test_changed_settings_are_refused(void **state) {
    (void)state;
    static const char *const changes[][3] = {
        {"--dp-noise 1.2",
         "--dp-noise with --resume: the checkpoint's private steps were taken with sigma 1.1, and "
         "this run would take 1.2",
         "begin anew"},
        {"--dp-noise 1.1000000000000001", "", ""}, // the same number
        {"--dp-noise 1.1000000000000003",
         "with sigma 1.1, and this run would take 1.1000000000000003", ""},
        {"--dp-noise 1.1 --dp-delta 1e-5", "--dp-delta with --resume", "take 1e-05"},
        {"--dp-noise 1.1 --dp-clip 0.5", "--dp-clip with --resume",
         "clip 1, and this run would take 0.5"},
        {"--dp-noise 1.1 --dp-clip-style flat", "--dp-clip-style with --resume",
         "style unit, and this run would take flat"},
        {"--dp-noise 1.1 --dp-clip-function automatic", "--dp-clip-function with --resume",
         "abadi"},
        {"--dp-noise 1.1 --dp-unit document --windows document", "--dp-unit with --resume",
         "unit sequence, and this run would take document"},
        {"--dp-noise 1.1 --dp-neighbours replace-one", "--dp-neighbours with --resume",
         "add-remove"},
    };
    char text[PRIVACY_HISTORY_MAX], line[400];
    make_history(text, 20);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        snprintf(line, sizeof line, "--resume --out %s --dp-key %s %s", folder, KEY, changes[i][0]);
        check_begun(line, text, 20, *changes[i][1] ? EXIT_INPUT : EXIT_DONE, changes[i][1],
                    changes[i][2]);
    }
    snprintf(line, sizeof line, "--resume --out %s --dp-noise 1.1 --dp-key %064d", folder, 0);
    check_begun(line, text, 20, EXIT_INPUT, "--dp-key with --resume", "key ");
    snprintf(line, sizeof line, "--resume --out %s " LINE "%s", folder, KEY);
    const Case data = {line, text, WINDOWS + 1, SAMPLES, STEPS, 20},
               batch = {line, text, WINDOWS, SAMPLES + 1, STEPS, 20};
    check_case(data, EXIT_INPUT, "--train with --resume",
               "windows 975, and this run would take 976");
    check_case(batch, EXIT_INPUT, "--batch-tokens with --resume",
               "samples 12, and this run would take 13");
    check_begun(line, text, 19, EXIT_INPUT,
                "checkpoint of step 19 has a privacy history of 20 steps", "");
    // another account of the same steps
    snprintf(line, sizeof line, "--resume --out %s --dp-accountant rdp " LINE "%s", folder, KEY);
    check_begun(line, text, 20, EXIT_DONE, "", "");
}
static void test_private_and_not(void **state) {
    (void)state;
    char text[PRIVACY_HISTORY_MAX], line[400];
    make_history(text, 20);
    snprintf(line, sizeof line, "--resume --out %s", folder);
    check_begun(line, text, 20, EXIT_INPUT, "the checkpoint is of a private run", "--dp-... flags");
    check_begun(line, "none", 20, EXIT_DONE, "", "");
    const Case looks = {line, text, 0, SAMPLES, 0, 20}; // without a step nothing is given away
    check_case(looks, EXIT_DONE, "", "");
    snprintf(line, sizeof line, "--resume --out %s " LINE "%s", folder, KEY);
    check_begun(line, "none", 20, EXIT_INPUT, "the checkpoint is of a run without privacy",
                "begin anew");
}
// --dp-epsilon alone goes on with the noise of the history, for as many steps as that allows.
static void test_noise_is_kept(void **state) {
    (void)state;
    char text[PRIVACY_HISTORY_MAX];
    make_history(text, 20);
    const int one = (int)draw(2); // of the two, or both
    for (int more = 0; more < 2; more++) {
        if (more != one && !all_tests()) { continue; }
        Run r;
        parse_run(&r, "--resume --out %s --dp-epsilon 1 --steps %d --dp-key %s", folder,
                  more ? 100000 : 60, KEY);
        plan_run(&r);
        assert_true(r.p.sigma == 0); // not searched for
        privacy_begin(&r.p, &r.options, &r.given, text, 20, &comm);
        int64_t allowed = privacy_allowed_steps(&r.p);
        assert_true(r.p.sigma == 1.1 && privacy_epsilon(&r.p, allowed).high <= 1);
        assert_true(more ? allowed < 100000 &&
                               privacy_epsilon(&r.p, allowed + 2 + allowed / 1000).high > 1
                         : allowed == 60);
        privacy_end(&r.p, &r.options);
    }
    Run r;
    // spent before: what was taken was taken
    parse_run(&r, "--resume --out %s --dp-epsilon 0.001 --steps 60 --dp-key %s", folder, KEY);
    plan_run(&r);
    privacy_begin(&r.p, &r.options, &r.given, text, 20, &comm);
    assert_int_equal(privacy_allowed_steps(&r.p), 20);
    privacy_end(&r.p, &r.options);
}
// Whatever the line of a manifest says, the program goes on only from the very same settings.
static void test_forged_histories(void **state) {
    (void)state;
    char text[PRIVACY_HISTORY_MAX], forged[PRIVACY_HISTORY_MAX], line[400];
    make_history(text, 20);
    snprintf(line, sizeof line, "--resume --out %s " LINE "%s", folder, KEY);
    for (int i = 0; i < 150; i++) {
        size_t at = draw(strlen(text));
        snprintf(forged, sizeof forged, "%s", text);
        do { forged[at] = (char)(1 + draw(255)); } while (forged[at] == text[at]);
        check_begun(line, forged, 20, EXIT_INPUT, "train_gpt: ", "");
    }
    static const char *const others[] = {"x",     "=",      " ",          "windows=975",
                                         "none ", "sigma=", "nonesense=1"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        check_begun(line, others[i], 20, EXIT_INPUT, "train_gpt: ", "");
    }
    static const char *const noises[] = {"sigma=nan",   "sigma=-1.1", "sigma=0",
                                         "sigma=1e999", "sigma=0.05", "sigma=1.1x",
                                         "sigma=",      "sigma",      "tau=1"};
    // which takes its noise from there
    snprintf(line, sizeof line, "--resume --out %s --dp-epsilon 1 --dp-key %s", folder, KEY);
    for (size_t i = 0; i < sizeof noises / sizeof noises[0]; i++) {
        check_begun(line, noises[i], 20, EXIT_INPUT, "--dp-epsilon needs noise", "");
    }
    for (int i = 0; i < 300; i++) { // texts come back as the numbers that they were
        PrivacyText t;
        uint64_t bits = draw(UINT64_MAX);
        double x, back;
        memcpy(&x, &bits, 8);
        if (!isfinite(x)) { continue; }
        privacy_text(&t, "x", "x", x);
        back = strtod(t.value, NULL);
        assert_memory_equal(&back, &x, 8);
        assert_true(strlen(t.value) < sizeof t.value - 1);
    }
}

// -------------------------------------------------------------------------------------------------
// Files

static int forget_files(void **state) {
    (void)state;
    static const char *const names[] = {"dp_key", "dp_steps", "dp_key.tmp", "dp_steps.tmp"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[200];
        path_of(path, sizeof path, names[i]);
        unlink(path);
        rmdir(path);
    }
    return 0;
}
static void begin_run(Run *r, const char *line, const char *history, int64_t step) {
    parse_run(r, "--out %s %s", folder, line);
    plan_run(r);
    privacy_begin(&r->p, &r->options, &r->given, history, step, &comm);
}
// Steps that draw noise, and the history of the checkpoint after them.
static void take_steps(Run *r, int64_t first, int64_t end, char history[PRIVACY_HISTORY_MAX]) {
    for (int64_t step = first; step < end; step++) { privacy_note(&r->p, step); }
    privacy_sync(&r->p);
    privacy_history(&r->p, end, history);
}
static void resume_run(Run *r, const char *flags, const char *history, int64_t step) {
    char line[300];
    snprintf(line, sizeof line, "--resume --dp-noise 1%s", flags);
    begin_run(r, line, history, step);
}
// What a resume from `step` says: "" where it begins.
static void check_resumed(const char *flags, const char *of_run, int64_t step, const char *first,
                          const char *second) {
    char line[400], history[PRIVACY_HISTORY_MAX], *steps;
    snprintf(history, sizeof history, "%s", of_run);
    assert_non_null(steps = strstr(history, "steps="));
    snprintf(steps, 30, "steps=%" PRId64, step);
    snprintf(line, sizeof line, "--out %s --resume --dp-noise 1%s", folder, flags);
    check_begun(line, history, step, *first ? EXIT_INPUT : EXIT_DONE, first, second);
}
static void test_key_is_kept(void **state) {
    (void)state;
    Run first, second, resumed;
    char text[200], history[PRIVACY_HISTORY_MAX], hex[65], path[200];
    struct stat info;
    mode_t mask = umask(0);
    begin_run(&first, "--dp-noise 1", "", 0);
    umask(mask);
    read_whole("dp_key", text, sizeof text);
    noise_key_to_hex(hex, first.p.key);
    assert_int_equal(strlen(text), 65);
    assert_true(!strncmp(text, hex, 64) && text[64] == '\n');
    path_of(path, sizeof path, "dp_key");
    assert_true(!stat(path, &info) && (info.st_mode & 07777) == 0600);
    path_of(path, sizeof path, "dp_key.tmp");
    assert_int_equal(access(path, F_OK), -1);
    take_steps(&first, 0, 3, history);
    begin_run(&resumed, "--resume --dp-noise 1", history, 3);
    assert_memory_equal(resumed.p.key, first.p.key, 32);
    begin_run(&second, "--dp-noise 1", "", 0); // anew: another one
    assert_memory_not_equal(second.p.key, first.p.key, 32);
    check_begun("--out x --resume --dp-noise 1", history, 3, EXIT_INPUT, "x/dp_key cannot be read",
                "count twice");
    privacy_end(&first.p, &first.options);
    privacy_end(&second.p, &second.options);
    privacy_end(&resumed.p, &resumed.options);
    for (int i = 0; i < 8; i++) { assert_true(first.p.key[i] == 0); }
}
// A key from the command line is kept too, but takes the place of no other.
static void test_given_key(void **state) {
    (void)state;
    Run run;
    char text[200], history[PRIVACY_HISTORY_MAX], line[400];
    snprintf(line, sizeof line, "--dp-noise 1 --dp-key %s", KEY);
    begin_run(&run, line, "", 0);
    assert_string_equal(run.options.dp_key, KEY);
    read_whole("dp_key", text, sizeof text);
    assert_true(!strncmp(text, KEY, 64));
    take_steps(&run, 0, 3, history);
    snprintf(line, sizeof line, "--out %s --resume --dp-noise 1", folder);
    check_begun(line, history, 3, EXIT_DONE, "", ""); // not given again
    snprintf(line, sizeof line, "--out %s --resume --dp-noise 1 --dp-key %064d", folder, 7);
    check_begun(line, history, 3, EXIT_INPUT, "--dp-key with --resume", "");
    read_whole("dp_key", text, sizeof text);
    assert_true(!strncmp(text, KEY, 64)); // still there
    privacy_end(&run.p, &run.options);
    assert_true(run.options.dp_key[0] == 0);
}
static void test_bad_key_files(void **state) {
    (void)state;
    static const char *const texts[] = {
        "",
        "\n",
        "00",
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1\n",
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1g\n",
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00\n",
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00000000000000000000000000"
        "0000000000000000000000000000000000"};
    char line[400], history[PRIVACY_HISTORY_MAX], path[200];
    make_history(history, 3);
    snprintf(line, sizeof line, "--out %s --resume --dp-noise 1.1", folder);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        write_whole("dp_key", texts[i], 0600);
        check_begun(line, history, 3, EXIT_INPUT, "dp_key is no key", "64 hexadecimal digits");
    }
    write_whole("dp_key", KEY, 0640);
    check_begun(line, history, 3, EXIT_DONE, "dp_key can be read by others", "chmod 600");
    write_whole("dp_key", KEY, 0600); // without a line's end
    check_begun(line, history, 3, EXIT_DONE, "", "");
    path_of(path, sizeof path, "dp_key");
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0); // nobody waits for it
    check_begun(line, history, 3, EXIT_INPUT, "cannot be read", "");
    unlink(path);
    assert_int_equal(symlink("/dev/zero", path), 0);
    check_begun(line, history, 3, EXIT_INPUT, "cannot be read", "");
    unlink(path);
    assert_int_equal(mkdir(path, 0700), 0);
    check_begun(line, history, 3, EXIT_INPUT, "cannot be read", "");
    assert_int_equal(rmdir(path), 0);
}
// Steps 4 and 5 drew noise after the checkpoint of step 3.
static void test_lost_steps(void **state) {
    (void)state;
    static const char *const same[] = {"", "--zero 2 --micro-batch 1 --recompute block --threads 2",
                                       "--val-every 3 --save-every 2 --keep 1 --log x",
                                       "--steps 400", "--watchdog 3 --dp-accountant rdp",
                                       // names: what they hold is in the data's checksum
                                       "--train other_*.bin --tokenizer x", "--dp-epsilon 7"};
    static const char *const other[] = {"--lr 1e-3",       "--weight-decay 0.1",
                                        "--grad-clip 0.5", "--seed 7",
                                        "--shuffle 0",     "--dtype bf16",
                                        "--model d24",     "--optimizer sgd",
                                        "--warmup 3",      "--zero 3 --zero-quantized-weights"};
    Run run;
    char history[PRIVACY_HISTORY_MAX], line[500], text[100];
    begin_run(&run, "--dp-noise 1", "", 0);
    for (int64_t step = 0; step < 5; step++) { privacy_note(&run.p, step); }
    read_whole("dp_steps", text, sizeof text);
    assert_int_equal(strtoll(text, NULL, 10), 5);
    privacy_history(&run.p, 3, history);
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        snprintf(line, sizeof line, "--out %s --resume --dp-noise 1 %s", folder, same[i]);
        line[strlen(line) - (*same[i] ? 0 : 1)] = 0;
        check_begun(line, history, 3, EXIT_DONE, "", "");
    }
    for (size_t i = 0; i < sizeof other / sizeof other[0]; i++) {
        snprintf(line, sizeof line, "--out %s --resume --dp-noise 1 %s", folder, other[i]);
        check_begun(line, history, 3, EXIT_INPUT,
                    "steps 4 to 5 have drawn noise after this checkpoint, under other flags",
                    "give the flags");
    }
    snprintf(line, sizeof line, "--out %s --resume --dp-noise 1 --steps 40 --final-lr-fraction 0.1",
             folder);
    check_begun(line, history, 3, EXIT_INPUT, "under other flags", "");
    read_whole("dp_steps", text, sizeof text);
    assert_int_equal(strtoll(text, NULL, 10), 5); // they are still known after those that went on
    // takes the fourth step once more, and is stopped: the fifth has still drawn noise
    Run again;
    parse_run(&again, "--out %s --resume --dp-noise 1", folder);
    plan_run(&again);
    privacy_begin(&again.p, &again.options, &again.given, history, 3, &comm);
    privacy_note(&again.p, 3);
    privacy_end(&again.p, &again.options);
    read_whole("dp_steps", text, sizeof text);
    assert_int_equal(strtoll(text, NULL, 10), 5);
    privacy_history(&run.p, 5, history);
    snprintf(line, sizeof line, "--out %s --resume --dp-noise 1 --lr 1e-3", folder);
    check_begun(line, history, 5, EXIT_DONE, "", ""); // nothing was lost: flags may change
    // these took no step, so the fifth is still its first owner's
    check_resumed("", history, 4, "", "");
    check_resumed(" --lr 1e-3", history, 4, "steps 5 to 5 have drawn noise", "give the flags");
    privacy_end(&run.p, &run.options);
}
// Flags that change twice, with checkpoints that are lost: a step draws noise under one path only.
static void test_flags_that_change(void **state) {
    (void)state;
    Run run, changed, back;
    char history[PRIVACY_HISTORY_MAX], text[100], expected[100];
    begin_run(&run, "--dp-noise 1", "", 0);
    take_steps(&run, 0, 5, history);
    resume_run(&changed, " --lr 1e-3", history, 5);
    check_resumed("", history, 3, "", ""); // nothing was drawn under the new flags
    take_steps(&changed, 5, 8, history);
    snprintf(expected, sizeof expected, "%020d %020d %016" PRIx64 "\n", 8, 5, changed.p.path);
    read_whole("dp_steps", text, sizeof text);
    assert_string_equal(text, expected);
    check_resumed(" --lr 1e-3", history, 6, "", "");
    check_resumed(" --lr 1e-3", history, 5, "", "");
    check_resumed(" --lr 1e-3", history, 4,
                  "steps 5 to 8 have drawn noise after this checkpoint, under other flags",
                  "go on from a later one");
    check_resumed("", history, 4,
                  "steps 5 to 8 have drawn noise after this checkpoint, under other flags",
                  "go on from a later one");
    check_resumed("", history, 5,
                  "steps 6 to 8 have drawn noise after this checkpoint, under other flags",
                  "give the flags");
    resume_run(&back, "", history, 8);
    take_steps(&back, 8, 9, history);
    check_resumed("", history, 8, "", ""); // the first flags again: of these steps only
    check_resumed("", history, 7, "steps 8 to 9", "go on from a later one");
    check_resumed("", history, 2, "steps 3 to 9", "go on from a later one");
    check_resumed(" --lr 1e-3", history, 6, "steps 7 to 9", "go on from a later one");
    check_resumed(" --lr 1e-2", history, 9, "", "");
    privacy_end(&run.p, &run.options);
    privacy_end(&changed.p, &changed.options);
    privacy_end(&back.p, &back.options);
}
// The same flags with other data.
static void test_data_that_change(void **state) {
    (void)state;
    Run run, other;
    char history[PRIVACY_HISTORY_MAX];
    parse_run(&run, "--out %s --dp-noise 1", folder);
    plan_run(&run);
    run.p.data = 7;
    privacy_begin(&run.p, &run.options, &run.given, "", 0, &comm);
    take_steps(&run, 0, 5, history);
    check_resumed("", history, 4, "steps 5 to 5 have drawn noise", "flags and data"); // of data 0
    check_resumed("", history, 5, "", "");
    privacy_history(&run.p, 4, history);
    parse_run(&other, "--out %s --resume --dp-noise 1", folder);
    plan_run(&other);
    other.p.data = 7;
    privacy_begin(&other.p, &other.options, &other.given, history, 4, &comm);
    privacy_end(&run.p, &run.options);
    privacy_end(&other.p, &other.options);
}
static void test_bad_ledgers(void **state) {
    (void)state;
    static const char good[] = "00000000000000000005 00000000000000000000 0123456789abcdef\n";
    static const char *const texts[] = {
        "",
        "5",
        "00000000000000000005 0123456789abcdef\n",
        "00000000000000000005 00000000000000000000 0123456789abcdef",
        "00000000000000000005 00000000000000000000 0123456789abcdef\n\n",
        "00000000000000000005 00000000000000000006 0123456789abcdef\n",
        "00000000000000000005 -0000000000000000001 0123456789abcdef\n",
        "-0000000000000000005 -0000000000000000005 0123456789abcdef\n",
        "99999999999999999999 00000000000000000000 0123456789abcdef\n",
        "00000000000000000005 00000000000000000000 0123456789ABCDEF\n",
        "00000000000000000005 00000000000000000000 -123456789abcdef\n",
        "                   5                    0 0123456789abcdef\n"};
    Run run;
    char history[PRIVACY_HISTORY_MAX], path[200], text[100];
    begin_run(&run, "--dp-noise 1", "", 0);
    take_steps(&run, 0, 5, history);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        write_whole("dp_steps", texts[i], 0600);
        check_resumed("", history, 5, "dp_steps is damaged", "put the run's dp_steps back");
    }
    for (int i = 0; i < 60; i++) { // what is read is what was written, or is refused
        snprintf(text, sizeof text, "%s", good);
        text[draw(LEDGER_BYTES)] = (char)(1 + draw(255));
        write_whole("dp_steps", text, 0600);
        Privacy p;
        char again[LEDGER_BYTES + 1];
        if (ledger_parse(&p, text)) {
            ledger_text(&p, again);
            assert_string_equal(again, text);
        } else {
            check_resumed("", history, 5, "dp_steps is damaged", "");
        }
    }
    write_ledger(4, 0, run.p.path);
    check_resumed("", history, 5,
                  "dp_steps is of another run or time: it knows of 4 steps, the checkpoint has 5",
                  "");
    path_of(path, sizeof path, "dp_steps");
    unlink(path);
    check_resumed("", history, 5, "dp_steps cannot be read", "begin anew");
    assert_int_equal(symlink("/dev/zero", path), 0);
    check_resumed("", history, 5, "dp_steps cannot be read", "");
    privacy_end(&run.p, &run.options);
}
// The rate depends on the number of steps where it does not stay as it is.
static void test_steps_and_rate(void **state) {
    (void)state;
    static const char *const schedules[][2] = {
        {"", "equal"},
        {"--lr-schedule constant --final-lr-fraction 0", "equal"},
        {"--final-lr-fraction 0", "differ"}};
    for (size_t i = 0; i < 3; i++) {
        Run a, b;
        parse_run(&a, "--dp-noise 1 --steps 10%s%s", *schedules[i][0] ? " " : "", schedules[i][0]);
        parse_run(&b, "--dp-noise 1 --steps 20%s%s", *schedules[i][0] ? " " : "", schedules[i][0]);
        assert_string_equal(
            privacy_path(&a.options, 1, 2) == privacy_path(&b.options, 1, 2) ? "equal" : "differ",
            schedules[i][1]);
    }
}

// -------------------------------------------------------------------------------------------------
// What is told

// Returns what is printed, with one space for each break of a line. No line is longer than a row.
static char *printed(void (*print)(FILE *, Privacy *), Privacy *p) {
    char *text = NULL, *to;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    print(f, p);
    fclose(f);
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1) {
        assert_true(strcspn(line, "\n") <= ROW_COLUMNS);
    }
    to = text;
    for (const char *from = text; *from; from++) {
        const bool blank = *from == ' ' || *from == '\n';
        if (!blank || to == text || to[-1] != ' ') { *to++ = blank ? ' ' : *from; }
    }
    *to = '\0';
    return text;
}
static void print_end(FILE *f, Privacy *p) { privacy_print_statement(f, p, 20); }
static void check_words(const char *text, const char *const *words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!strstr(text, words[i])) { fail_msg("no \"%s\" in: %s", words[i], text); }
    }
}
// The object of a private run, of an event. The caller frees it.
static char *privacy_object(Privacy *p, int64_t steps) {
    TextBuffer line = {};
    json_add_privacy(&line, p, steps);
    return line.text;
}
static void test_texts(void **state) {
    (void)state;
    Run r;
    parse_run(&r,
              "--dp-noise 1.1 --dp-unit document --windows document --dp-windows-per-document 2 "
              "--dp-neighbours replace-one --dp-show-private --dp-key %s",
              KEY);
    plan_run(&r);
    privacy_begin(&r.p, &r.options, &r.given, "", 0, &comm);
    char *start = printed(privacy_print_start, &r.p), *end = printed(print_end, &r.p);
    static const char *const at_start[] = {
        "epsilon ",
        "at delta 0.000103 after 50 steps",
        "each document of the training data (2 windows at most of it, of 256 tokens each)",
        "replace-one",
        "by prv",
        "sampling rate q = 0.0123077 (Poisson): 12 samples of 975",
        "clipped to 1 (unit, abadi)",
        "noise of sigma 1.1 times that"};
    static const char *const at_end[] = {"after 20 steps: epsilon <= ",
                                         "at delta 0.000103",
                                         "each document",
                                         "another in its place (replace-one)",
                                         "0.0123077 (Poisson)",
                                         "noise of 1.1 clipping thresholds",
                                         "accounted by prv",
                                         "not counted:",
                                         "hyper-parameters",
                                         "validation data",
                                         "--dp-show-private"};
    check_words(start, at_start, sizeof at_start / sizeof at_start[0]);
    check_words(end, at_end, sizeof at_end / sizeof at_end[0]);
    double claimed = strtod(strstr(end, "<= ") + 3, NULL), exact = privacy_epsilon(&r.p, 20).high;
    assert_true(claimed >= exact && claimed < exact + 1.01e-4); // never rounded down
    char *json = privacy_object(&r.p, 20);
    static const char *const fields[] = {
        "\"privacy\":{\"sampling\":\"poisson\",\"accountant\":\"prv\",\"steps\":20,\"epsilon\":",
        "\"target\":null",
        "\"sampling_rate\":0.0123076923",
        "\"samples\":12,",
        "\"windows\":975,",
        "\"sigma\":1.1",
        "\"clip\":1,",
        "\"windows_per_document\":2,\"window_tokens\":256,",
        "\"clip_style\":\"unit\"",
        "\"clip_function\":\"abadi\"",
        "\"unit\":\"document\"",
        "\"neighbours\":\"replace-one\"",
        "\"key\":\""};
    check_words(json, fields, sizeof fields / sizeof fields[0]);
    // the key is told nowhere
    assert_null(strstr(start, "00010203"));
    assert_null(strstr(end, "00010203"));
    assert_null(strstr(json, "00010203"));
    free(json);
    free(start);
    free(end);
    privacy_end(&r.p, &r.options);
    parse_run(&r, "--dp-noise 0");
    plan_run(&r);
    privacy_begin(&r.p, &r.options, &r.given, "", 0, &comm);
    start = printed(privacy_print_start, &r.p);
    end = printed(print_end, &r.p);
    assert_non_null(strstr(start, "privacy none: noise of 0 hides nothing"));
    assert_string_equal(end, "privacy none: 20 steps with noise of 0, which hides nothing ");
    json = privacy_object(&r.p, 20);
    assert_non_null(strstr(json, "\"epsilon\":null"));
    free(json);
    free(start);
    free(end);
}
static void test_object_without_data(void **state) { // of --dry-run
    (void)state;
    Run r;
    for (int stated = 0; stated < 2; stated++) {
        parse_run(&r, "--dry-run %s",
                  stated ? "--dp-noise 1.5 --dp-delta 0.25 --dp-clip 2" : "--dp-epsilon 3");
        r.p = privacy_plan(&r.options, &r.given, 0, SAMPLES, 0, &comm);
        char *json = privacy_object(&r.p, 0);
        static const char *const always[] = {
            "\"steps\":null,\"epsilon\":null,\"low\":null,\"high\":null,",
            "\"sampling_rate\":null,\"samples\":12,\"most_samples\":", "\"windows\":null,",
            "\"clip_style\":\"unit\"", "\"key\":null}"};
        static const char *const found[] = {"\"delta\":0.25,\"target\":null,",
                                            "\"sigma\":1.5,\"clip\":2,"};
        static const char *const asked[] = {"\"delta\":null,\"target\":3,",
                                            "\"sigma\":null,\"clip\":1,"};
        check_words(json, always, sizeof always / sizeof always[0]);
        check_words(json, stated ? found : asked, 2);
        free(json);
    }
    parse_run(&r, "--dry-run --dp-noise 0");
    r.p = privacy_plan(&r.options, &r.given, 0, SAMPLES, 0, &comm);
    char *json = privacy_object(&r.p, 0);
    assert_non_null(strstr(json, "\"sigma\":0,"));
    free(json);
}
static void test_rounding_up(void **state) {
    (void)state;
    static const double cases[][3] = {{1.00001, 1e-4, 1.0001},
                                      {2.5, 0.5, 2.5},
                                      {0.81234999, 1e-4, 0.8124},
                                      {0, 1e-4, 0},
                                      {0.3, 0.1, 0.3}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_true(fabs(privacy_up(cases[i][0], cases[i][1]) - cases[i][2]) < 1e-12);
    }
    for (int i = 0; i < 1000; i++) {
        Privacy p;
        char text[40];
        p.delta = pow(10, -1 - i % 30); // three digits are enough: these stay
        assert_true(fabs(privacy_delta_up(&p) / p.delta - 1) < 1e-9);
        p.delta = exp(-60 * random_uniform(seed, 2, (uint64_t)i));
        snprintf(text, sizeof text, "%.3g", privacy_delta_up(&p));
        assert_true(strtod(text, NULL) >= p.delta * (1 - 1e-12) &&
                    strtod(text, NULL) < p.delta * 1.011);
    }
}
static void test_warnings(void **state) {
    (void)state;
    check_begun(
        "--dp-noise 0 --dp-key 0000000000000000000000000000000000000000000000000000000000000000 "
        "--dp-show-private --train a --val a",
        NULL, 0, EXIT_DONE, "", "");
    static const char *const lines[][2] = {
        {"--dp-noise 0", "hides nothing"},
        {"--dp-noise 1 --dp-show-private", "epsilon does not hold"},
        {"--dp-noise 1 --train a --val a", "--val is the training data"},
        {"--dp-noise 1 --dp-key 0000000000000000000000000000000000000000000000000000000000000000",
         "--dp-key is for tests"}};
    for (size_t i = 0; i < 4; i++) {
        char history[PRIVACY_HISTORY_MAX], line[300];
        Run r;
        forget_files(NULL);
        begin_run(&r, lines[i][0], "", 0);
        take_steps(&r, 0, 3, history);
        snprintf(line, sizeof line, "--resume --out %s %s", folder, lines[i][0]);
        check_begun(line, history, 3, EXIT_DONE, "warning: ", lines[i][1]);
        privacy_end(&r.p, &r.options);
    }
}

// Means are published where twice as many steps have been made, and never of few.
static void test_public_step_time(void **state) {
    (void)state;
    PublicTime t = {};
    double sum = 0, at[100] = {0};
    for (int64_t steps = 1; steps < 100; steps++) {
        sum += 0.001 * (double)(1 + steps % 7);
        at[steps] = sum / (double)steps;
        const int64_t of = steps < 8 ? 0 : steps < 16 ? 8 : steps < 32 ? 16 : steps < 64 ? 32 : 64;
        const double shown = public_step_time(&t, steps, sum, 0.0123);
        assert_true(shown == privacy_rounded(of ? at[of] : 0.0123));
    }
    assert_true(public_step_time(&t, 1, 5.0, 0.5) < 0.01); // counted anew: the old one stays
}
int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_public_step_time),
        cmocka_unit_test(test_accounting_that_takes_long),
        cmocka_unit_test(test_not_private),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_refused_plans),
        cmocka_unit_test(test_delta_of_a_unit),
        cmocka_unit_test(test_noise_is_found),
        cmocka_unit_test(test_steps_stop_before_the_target),
        cmocka_unit_test(test_cap),
        cmocka_unit_test_setup(test_history, forget_files),
        cmocka_unit_test_setup(test_changed_settings_are_refused, forget_files),
        cmocka_unit_test_setup(test_private_and_not, forget_files),
        cmocka_unit_test_setup(test_noise_is_kept, forget_files),
        cmocka_unit_test_setup(test_forged_histories, forget_files),
        cmocka_unit_test_setup(test_key_is_kept, forget_files),
        cmocka_unit_test_setup(test_given_key, forget_files),
        cmocka_unit_test_setup(test_bad_key_files, forget_files),
        cmocka_unit_test_setup(test_lost_steps, forget_files),
        cmocka_unit_test_setup(test_flags_that_change, forget_files),
        cmocka_unit_test_setup(test_data_that_change, forget_files),
        cmocka_unit_test_setup(test_bad_ledgers, forget_files),
        cmocka_unit_test(test_steps_and_rate),
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_object_without_data),
        cmocka_unit_test(test_rounding_up),
        cmocka_unit_test_setup(test_warnings, forget_files),
    };
    choose_seed();
    assert_non_null(mkdtemp(folder));
    comm_start(&comm, &argc, &argv);
    comm_place(&comm, 0);
    comm_allocate(&comm, NULL, 0);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    comm_end(&comm);
    forget_files(NULL), rmdir(folder);
    return failed;
}
