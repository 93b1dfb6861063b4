// test_options.c: proves that every flag of the table parses in every form, has its default,
// accepts its bounds and refuses what lies beyond; that whatever is wrong ends with exit code 2 and
// a message that names the flag; that every pair of the pair table can be met; that --help and
// --compat leave nothing out; that flags of other programs get their hint; and how a file of flags
// is read. Each command line below is parsed for real.
#include "ops/cpu/ops_cpu.h"
#include "cli/option_help.h"
#include "cli/option_parser.h"

#include "harness.h"

// -------------------------------------------------------------------------------------------------
// Command lines, written as one text: arguments are separated by spaces, ~ stands for a space and
// '' for an empty argument

typedef struct {
    int count;
    char *arguments[20], text[2048];
} Line;
static void line_make(Line *l, const char *text) {
    snprintf(l->text, sizeof l->text, "%s", text);
    l->count = 0;
    l->arguments[l->count++] = (char *)(uintptr_t) "train_gpt";
    for (char *rest = l->text, *word; (word = strsep(&rest, " "));) {
        for (char *c = word; *c; c++) { *c = *c == '~' ? ' ' : *c; }
        if (!strcmp(word, "''")) {
            *word = 0;
        } else if (!*word) {
            continue;
        }
        assert_true(l->count < 19);
        l->arguments[l->count++] = word;
    }
    l->arguments[l->count] = NULL;
}
static void parse_line(const void *text) {
    Line line;
    Options options;
    OptionsGiven given;
    line_make(&line, (const char *)text);
    options_parse(&options, &given, line.count, line.arguments);
}
static void check_refused(const char *text, const char *first, const char *second) {
    char message[4096];
    int code = run_child(parse_line, text, message, sizeof message);
    bool once = strstr(message, "train_gpt: ") &&
                !strstr(strstr(message, "train_gpt: ") + 1, "train_gpt: ");
    if (code != EXIT_INPUT || !strstr(message, first) || !strstr(message, second) || !once) {
        fail_msg("\"%.300s\": expected exit code 2, \"%s\" and \"%s\", found %d: %s", text, first,
                 second, code, message);
    }
}
// four live at a time
__attribute__((format(printf, 1, 2))) static const char *line_of(const char *format, ...) {
    static char texts[4][1600];
    static int turn;
    va_list args;
    turn = (turn + 1) % 4;
    va_start(args, format);
    vsnprintf(texts[turn], sizeof texts[turn], format, args);
    va_end(args);
    return texts[turn];
}
static const char *flag_of(const OptionSpec *spec) { return line_of("--%s", spec->name); }

// Parses a line that must be accepted (a child first, so that a refusal is reported and does not
// end the tests).
static void parse(Line *line, Options *options, OptionsGiven *given, const char *text) {
    char message[4096];
    int code = run_child(parse_line, text, message, sizeof message);
    if (code) {
        fail_msg("\"%s\": expected to be accepted, found exit code %d: %s", text, code, message);
    }
    line_make(line, text);
    options_parse(options, given, line->count, line->arguments);
}
// The one option of the line, without the pair table: its value as text.
static const char *value_of(const OptionSpec *spec, const char *text) {
    Options options;
    OptionsGiven given;
    Line line;
    char *value = (char *)(uintptr_t)line_of("%s", "");
    memset(&options, 0, sizeof options);
    memset(&given, 0, sizeof given);
    line_make(&line, text);
    for (int i = 1; i < line.count;) {
        i += option_take(&options, &given, line.arguments[i], line.arguments[i + 1]);
    }
    assert_true(given.at[spec - option_specs]);
    option_value_text(&options, spec, value, 1600);
    return value;
}
static bool is_number(const OptionSpec *spec) {
    return spec->kind == OPTION_INT || spec->kind == OPTION_NUM || spec->kind == OPTION_POWER;
}

// -------------------------------------------------------------------------------------------------
// The table itself

static void test_table_is_sound(void **state) {
    (void)state;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *a = &option_specs[i];
        assert_true(strlen(a->name) > 1 && strlen(a->name) < 60 && !strpbrk(a->name, " =_"));
        assert_true(!is_number(a) || a->low < a->high);
        assert_true(strlen(a->help) > 0 || strlen(a->choices) > 0);
        for (int j = 0; j < i; j++) {
            const OptionSpec *b = &option_specs[j];
            assert_string_not_equal(a->name, b->name);
            assert_true(!*a->letter || strcmp(a->letter, b->letter));
            assert_true(a->offset != b->offset);
        }
    }
}
// The fixed interface: names and letters of the first release (DESIGN.md section 3). Extend, never
// rename.
static void test_names_stay(void **state) {
    (void)state;
    static const char *const names[] = {
        "train/i",
        "val/j",
        "shuffle",
        "windows",
        "tokenizer",
        "seq-len/t",
        "micro-batch/b",
        "batch-tokens/d",
        "model/e",
        "steps/x",
        "out/o",
        "log",
        "json",
        "export",
        "dry-run",
        "fit",
        "compat",
        "val-every/v",
        "val-batches/m",
        "sample-every/s",
        "sample-tokens/g",
        "temperature",
        "save-every/n",
        "keep/nk",
        "resume/y",
        "seed",
        "threads",
        "optimizer",
        "momentum",
        "lr/l",
        "lr-schedule/k",
        "warmup/u",
        "final-lr-fraction/q",
        "weight-decay/c",
        "beta1",
        "beta2",
        "eps",
        "grad-clip",
        "skip-loss-z/sl",
        "skip-grad-z/sg",
        "dtype",
        "reduce-dtype",
        "recompute",
        "ranks-per-node",
        "show-schedule",
        "hellaswag",
        "dp-account",
        "dp-accountant",
        "dp-neighbours",
        "dp-epsilon",
        "dp-noise",
        "dp-delta",
        "dp-clip",
        "dp-clip-style",
        "dp-key",
        "dp-show-private",
        "dp-clip-function",
        "dp-unit",
        "dp-windows-per-document",
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        size_t n = strcspn(names[i], "/");
        const OptionSpec *spec = option_find(line_of("--%.*s", (int)n, names[i]), n + 2);
        if (!spec || strcmp(spec->letter, names[i][n] ? names[i] + n + 1 : "")) {
            fail_msg("--%s is not as it was", names[i]);
        }
    }
}
static void test_defaults(void **state) {
    (void)state;
    Options options;
    OptionsGiven given;
    Line line;
    parse(&line, &options, &given, "");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        char value[1600];
        option_value_text(&options, spec, value, sizeof value);
        assert_false(given.at[i]);
        if (!is_number(spec) && spec->kind != OPTION_FLAG) {
            assert_string_equal(value, spec->fallback);
            // both are short decimal texts
        } else {
            assert_true(strtod(value, NULL) == strtod(spec->fallback, NULL));
        }
        // what is printed can be given
        if (spec->kind != OPTION_TEXT && spec->kind != OPTION_SECRET) {
            assert_string_equal(value_of(spec, line_of("--%s=%s", spec->name, value)), value);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Every row

// Some value that the option takes, not its default.
static const char *other_value(const OptionSpec *spec) {
    switch (spec->kind) {
    case OPTION_SECRET:
    case OPTION_TEXT: return "some/where";
    case OPTION_PICK: return strrchr(spec->choices, '|') + 1; // the first choices are the defaults
    case OPTION_FLAG: return *spec->fallback == '0' ? "1" : "0";
    case OPTION_INT: return "3";
    case OPTION_POWER: return "64";
    default: return "0.25";
    }
}
static void test_every_form(void **state) {
    (void)state;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        const char *value = other_value(spec),
                   *shown = spec->kind == OPTION_SECRET ? "(secret)" : value;
        assert_string_equal(value_of(spec, line_of("--%s %s", spec->name, value)), shown);
        assert_string_equal(value_of(spec, line_of("--%s=%s", spec->name, value)), shown);
        if (*spec->letter) {
            assert_string_equal(value_of(spec, line_of("-%s %s", spec->letter, value)), shown);
        }
        // only long names take =
        if (*spec->letter) {
            check_refused(line_of("-%s=%s", spec->letter, value), "unknown flag", "--help");
        }
        if (spec->kind != OPTION_FLAG) { continue; }
        assert_string_equal(value_of(spec, line_of("--%s", spec->name)), "1");
        // alone, before another flag
        assert_string_equal(value_of(spec, line_of("--%s --out x", spec->name)), "1");
        assert_string_equal(value_of(spec, line_of("--%s=0", spec->name)), "0");
    }
}
static void test_every_choice(void **state) {
    (void)state;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        if (spec->kind != OPTION_PICK) { continue; }
        char choices[200], *rest = choices;
        snprintf(choices, sizeof choices, "%s", spec->choices);
        for (char *choice; (choice = strsep(&rest, "|"));) {
            assert_string_equal(value_of(spec, line_of("--%s %s", spec->name, choice)), choice);
            check_refused(line_of("--%s '%.*s'", spec->name, (int)strlen(choice) - 1, choice),
                          flag_of(spec), spec->choices);
            check_refused(line_of("--%s %sx", spec->name, choice), flag_of(spec), spec->choices);
        }
        check_refused(line_of("--%s ''", spec->name), flag_of(spec), spec->choices);
        check_refused(line_of("--%s 0", spec->name), flag_of(spec), spec->choices);
        check_refused(line_of("--%s=%s", spec->name, spec->choices), flag_of(spec), spec->choices);
    }
}
static void test_every_bound(void **state) {
    (void)state;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        if (!is_number(spec)) { continue; }
        bool whole = spec->kind != OPTION_NUM;
        double below = whole           ? spec->low - 1
                       : spec->low > 0 ? nextafter(spec->low, 0)
                                       : -1e-9,
               above = whole ? spec->high + 1 : nextafter(spec->high, INFINITY);
        for (int end = 0; end < 2; end++) {
            double bound = end ? spec->high : spec->low;
            const char *value = value_of(spec, line_of("--%s %.17g", spec->name, bound));
            // it is printed with ten digits
            assert_true(fabs(strtod(value, NULL) - bound) <= 1e-9 * fabs(bound));
        }
        check_refused(line_of("--%s %.17g", spec->name, below), flag_of(spec), "must be from");
        check_refused(line_of("--%s=%.17g", spec->name, above), flag_of(spec), "must be from");
    }
}
// Not a number, for every option that takes one.
static void test_no_numbers(void **state) {
    (void)state;
    static const char *const texts[] = {"12abc",  "''",   "nan",   "inf",   "-inf", "1e999",
                                        "-1e999", "five", "1,000", "1_000", "0x",   "1e",
                                        "--",     "3~",   ".",     "1.2.3"};
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        if (!is_number(spec)) { continue; }
        for (size_t j = 0; j < sizeof texts / sizeof texts[0]; j++) {
            check_refused(line_of("--%s %s", spec->name, texts[j]), flag_of(spec),
                          " number, found");
        }
        check_refused(line_of("--%s=", spec->name), flag_of(spec), " number, found \"\"");
        if (spec->kind != OPTION_NUM) {
            check_refused(line_of("--%s 1.5", spec->name), flag_of(spec),
                          "takes a whole number, found \"1.5\"");
        }
    }
}
static void test_every_flag_value(void **state) {
    (void)state;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        if (spec->kind != OPTION_FLAG) { continue; }
        check_refused(line_of("--%s=2", spec->name), flag_of(spec), "must be from 0 to 1");
        check_refused(line_of("--%s=-1", spec->name), flag_of(spec), "must be from 0 to 1");
        check_refused(line_of("--%s=0.5", spec->name), flag_of(spec), "whole number");
        check_refused(line_of("--%s=", spec->name), flag_of(spec), "whole number");
        check_refused(line_of("--%s=yes", spec->name), flag_of(spec), "whole number");
        check_refused(line_of("--%s yes", spec->name), "takes 0 or 1, found \"yes\"", "alone");
    }
}
static void test_missing_values(void **state) {
    (void)state;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        if (spec->kind != OPTION_FLAG) {
            check_refused(flag_of(spec), flag_of(spec), "needs a value");
        }
    }
}
// Of a flag that is given several times, in whatever forms, the last value counts; an earlier one
// is checked all the same.
static void test_the_last_one_wins(void **state) {
    (void)state;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        const char *first = spec->kind == OPTION_TEXT ? "else/where" : spec->fallback,
                   *last = other_value(spec);
        if (spec->kind == OPTION_SECRET) { continue; } // test_secrets_leave_the_command_line
        assert_string_equal(
            value_of(spec, line_of("--%s %s --%s %s", spec->name, first, spec->name, last)), last);
        assert_string_equal(
            value_of(spec, line_of("--%s=%s --%s %s", spec->name, first, spec->name, last)), last);
        assert_string_equal(
            value_of(spec, line_of("--%s %s --%s=%s", spec->name, first, spec->name, last)), last);
        assert_string_equal(value_of(spec, line_of("--%s=%s --%s=%s --%s=%s", spec->name, last,
                                                   spec->name, first, spec->name, last)),
                            last);
        if (!*spec->letter) { continue; }
        assert_string_equal(
            value_of(spec, line_of("--%s %s -%s %s", spec->name, first, spec->letter, last)), last);
        assert_string_equal(
            value_of(spec, line_of("-%s %s --%s=%s", spec->letter, first, spec->name, last)), last);
        assert_string_equal(
            value_of(spec, line_of("-%s %s -%s %s", spec->letter, first, spec->letter, last)),
            last);
    }
    check_refused("--steps ten --steps 10", "--steps", "whole number");
    // pairs see what counts
    check_refused("--out x --resume --out=", "--resume with --out", "add --out FOLDER");
    Options options;
    OptionsGiven given;
    Line line;
    parse(&line, &options, &given, "--resume --resume 0 --delink --delink=0 --zero 3 -z 0");
    assert_true(!options.resume && !options.delink && !options.zero);
}
static void test_long_values(void **state) {
    (void)state;
    char longest[OPTION_TEXT_MAX + 2];
    memset(longest, '7', sizeof longest);
    longest[OPTION_TEXT_MAX + 1] = 0;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        check_refused(line_of("--%s=%s", spec->name, longest), flag_of(spec),
                      "takes at most 900 characters, found 901");
        if (spec->kind == OPTION_TEXT) {
            assert_string_equal(value_of(spec, line_of("--%s %s", spec->name, longest + 1)),
                                longest + 1);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Single lines

typedef struct {
    const char *line, *name, *value;
} Accepted;
static const Accepted accepted[] = {
    {"--steps 20", "steps", "20"},
    {"-x -1", "steps", "-1"},
    {"--steps=0", "steps", "0"},
    {"--batch-tokens 1e6", "batch-tokens", "1000000"}, // whole, however it is written
    {"--steps +7", "steps", "7"},
    {"--steps 2.0", "steps", "2"},
    {"--warmup -0", "warmup", "0"},
    {"--lr .001", "lr", "0.001"},
    {"--lr 3e-4", "lr", "0.0003"},
    {"--eps=1e-12", "eps", "1e-12"},
    {"--seed 9000000000000000 --prompt x --temperature 1", "temperature", "1"},
    {"--sample-every 0 --top-k 5", "top-k", "5"}, // none is asked for
    {"-nk 3 -n 5 -o runs/a", "keep", "3"},
    {"-sl 4 -sg 5", "skip-grad-z", "5"},
    {"-y -o runs/a", "resume", "1"},
    {"-y 0", "resume", "0"},
    {"--resume --out runs/a", "out", "runs/a"},
    {"--shuffle 0 --resume 0", "shuffle", "0"},
    {"--model layers=6,heads=6,channels=384,vocab=256", "model",
     "layers=6,heads=6,channels=384,vocab=256"},
    {"--model=layers=6,heads=6", "model", "layers=6,heads=6"}, // the first = ends the name
    {"-e d12", "model", "d12"},
    {"--train=", "train", ""},
    {"--train ''", "train", ""},
    {"--out with~space", "out", "with space"},
    {"--dry-run --json", "json", "1"},
    {"--profile-steps 3:3 --steps 3", "profile-steps", "3:3"},
    {"--optimizer sgd --momentum 0", "optimizer", "sgd"},
    {"--dp-noise 1 --dp-key 000102030405060708090A0B0C0D0E0F101112131415161718191a1b1c1d1e1f",
     "dp-noise", "1"},
    {"--dp-noise 1e-6", "dp-noise", "1e-06"},
    // strtod's number syntax: hexadecimal and leading white space are harmless
    {"--steps 0x10", "steps", "16"},
    {"--steps ~5", "steps", "5"},
};
static void test_accepted_lines(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof accepted / sizeof accepted[0]; i++) {
        const Accepted *a = &accepted[i];
        Options options;
        OptionsGiven given;
        Line line;
        char value[1600];
        parse(&line, &options, &given, a->line);
        const OptionSpec *spec = option_find(line_of("--%s", a->name), strlen(a->name) + 2);
        assert_non_null(spec);
        option_value_text(&options, spec, value, sizeof value);
        if (strcmp(value, a->value) || !given.at[spec - option_specs]) {
            fail_msg("\"%s\": --%s is \"%s\"", a->line, a->name, value);
        }
    }
}

// A secret leaves the command line, which manifests hold and the command that resumes repeats.
static void test_secrets_leave_the_command_line(void **state) {
    (void)state;
    static const char key[] = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
    for (int form = 0; form < 4; form++) {
        Options options;
        OptionsGiven given;
        Line line;
        char message[4096];
        // the last one counts, and all are gone
        const char equals = form & 1 ? '=' : ' ', *before = form & 2 ? "--dp-key 0101 " : "";
        parse(&line, &options, &given,
              line_of("--dp-noise 1 %s--dp-key%c%s --steps 3", before, equals, key));
        assert_string_equal(options.dp_key, key);
        assert_int_equal(options.steps, 3);
        for (int i = 0; i < line.count; i++) { assert_null(strstr(line.arguments[i], "01")); }
        assert_string_equal(line.arguments[line.count - 2], "--steps"); // nothing else is gone
        run_child(parse_line, line_of("--dp-noise 1 --dp-key %sz", key), message, sizeof message);
        assert_null(strstr(message, "0001")); // nor is it in a message
        free((char *)(uintptr_t)options.dp_key);
    }
}

static const char *const refused[][3] = {
    // line, words of the message, more words
    {"--profile-steps 5", "--profile-steps takes two steps A:B", "found \"5\""},
    {"--profile-steps 0:3", "--profile-steps takes two steps A:B", "such as 3:5"},
    {"--profile-steps 5:3", "--profile-steps takes two steps A:B", "such as 3:5"},
    {"--profile-steps 1:2x", "--profile-steps takes two steps A:B", "such as 3:5"},
    {"--profile-steps 1:99999999999999999999", "--profile-steps takes two steps A:B",
     "such as 3:5"},
    {"--cluster 8 --dry-run", "--cluster begins with nodes x ranks", "found \"8\""},
    {"--cluster 1000000x8 --dry-run", "takes from 1 to 16384 ranks", "1000000x8: too many ranks"},
    {"--cluster 99999999999999999999x8 --dry-run", "--cluster takes from 1", "too many ranks"},
    {"--cluster 2x4294967297,gpu=h100 --dry-run", "--cluster takes from 1", ": too many ranks"},
    {"--cluster 1x1+1x2+1x1+1x2+1x1+1x2+1x1+1x2+1x1 --dry-run", "8 kinds", ": too many kinds"},
    {"--cluster 1x8+1x8,gpu=h100+a100 --dry-run", "--cluster mixes GPUs, h100 and a100", "*0.5"},
    {"--cluster 1x8,gpu=h100+1x8,gpu=A100 --dry-run", "it mixes GPUs, h100 and a100", "*0.5"},
    {"--cluster 1xv100+1xl40s --dry-run", "--cluster mixes GPUs, v100 and l40s", "one kind"},
    {"--cluster 1x8*h100+1x8*b200 --dry-run", "--cluster mixes GPUs, h100 and b200", "one kind"},
    {"--cluster 1x8,gpu=h100,gpu=h100 --dry-run", "--cluster has gpu twice", "2x8,gpu=h100"},
    {"--cluster x8 --dry-run", "--cluster begins with nodes x ranks", "2x8,intra=25"},
    {"--cluster 2x --dry-run", "--cluster begins with nodes x ranks", "2x8,intra=25"},
    {"--cluster -2x8 --dry-run", "--cluster begins with nodes x ranks", "2x8,intra=25"},
    {"--cluster 2x8x2 --dry-run", "--cluster begins with nodes x ranks", "2x8,intra=25"},
    {"--cluster 2x10000 --dry-run", "takes from 1 to 16384 ranks", "2x8,intra=25"},
    {"--cluster 0x8 --dry-run", "--cluster takes from 1 to 16384 ranks", "found 0x8\n"},
    {"--cluster 9999x9999 --dry-run", "--cluster takes from 1 to 16384 ranks", "found 9999x9999"},
    {"--cluster 2x8 --dry-run", "--cluster needs intra=", "GB/s"},
    {"--cluster 2x1 --dry-run", "--cluster needs inter=", "GB/s"},
    {"--cluster 2x8,intra=25 --dry-run", "--cluster needs inter=", "GB/s"},
    {"--cluster 2x8,intra=25,inter --dry-run", "--cluster takes keys with a number",
     "found \"inter\""},
    {"--cluster 2x8,intra=25,intre=3 --dry-run", "--cluster takes keys with a number",
     "found \"intre=3\""},
    {"--cluster 2x8,intra=25,inter=3, --dry-run", "--cluster takes keys with a number",
     "found \"\""},
    {"--cluster 2x8,intra=25,inter=3,inter=3 --dry-run", "--cluster has inter twice", "--help"},
    {"--cluster 2x8,gpu=h100,gpu=a100 --dry-run", "--cluster has gpu twice", "--help"},
    {"--cluster 2x8,gpu=h10 --dry-run", "--cluster takes gpu=a100, b200, h100", "found \"h10\""},
    {"--cluster 2x8,gpu= --dry-run", "--cluster takes gpu=a100, b200, h100", "found \"\""},
    {"--cluster 2x8,gpu=1 --dry-run", "--cluster takes gpu=a100, b200, h100", "found \"1\""},
    {"--cluster 2x8,gpu --dry-run", "--cluster takes keys with a number", "found \"gpu\""},
    {"--cluster 2x8,intra=25,inter=0 --dry-run", "--cluster takes inter from 1e-06 to 1e+06",
     "found \"0\""},
    {"--cluster 2x8,intra=25,inter=-3 --dry-run", "--cluster takes inter from", "found \"-3\""},
    {"--cluster 2x8,intra=25,inter=nan --dry-run", "--cluster takes inter from", "found \"nan\""},
    {"--cluster 2x8,intra=25,inter=1e999 --dry-run", "--cluster takes inter from",
     "found \"1e999\""},
    {"--cluster 2x8,intra=25,inter=3x --dry-run", "--cluster takes inter from", "found \"3x\""},
    {"--cluster 2x8,intra=25,inter=3,overlap=1.1 --dry-run", "--cluster takes overlap from 0 to 1",
     "found \"1.1\""},
    {"--step 5", "unknown flag --step\n", "--steps;"},
    {"--stesp=5", "unknown flag --stesp=5", "--steps;"},
    {"--lr-shedule linear", "unknown flag --lr-shedule", "--lr-schedule;"},
    {"--batchtokens 5", "unknown flag --batchtokens", "--batch-tokens;"},
    {"--weight_decay 0.1", "unknown flag --weight_decay", "--weight-decay;"},
    {"--reccompute block", "unknown flag --reccompute", "--recompute;"},
    {"--Steps 5", "unknown flag --Steps", "--steps;"},
    {"-steps 5", "unknown flag -steps", "--steps;"},
    {"---steps 5", "unknown flag ---steps", "--steps;"},
    {"--x 5", "unknown flag --x", "--help"}, // letters take one dash
    {"-zz", "unknown flag -zz", "--help"},
    {"-", "unknown flag -", "--help"},
    {"--", "unknown flag --", "--help"},
    {"--=5", "unknown flag --=5", "--help"},
    {"''", "unknown flag ", "--help"},
    {"steps 5", "unknown flag steps", "--steps;"},
    {"--steps 5 6", "unknown flag 6", "--help"},
    {"--steps --lr 1", "--steps needs a value", "found --lr"},
    {"--dry-run 2", "--dry-run takes 0 or 1, found \"2\"", "alone"},
    {"--steps 99999999999999999999", "--steps must be from -1 to 1000000000000",
     "99999999999999999999"},
    {"--steps 1e-400", "--steps takes a whole number", "1e-400"},
    {"--seed -1", "--seed must be from 0 to 9e+15", "found -1"},
    {"--seed 1e16", "--seed must be from", "found 1e16"},
    {"--dp-noise 1 --dp-key 0123", "--dp-key takes 64 hexadecimal digits, found 4 characters",
     "openssl rand"},
    {"--dp-noise 1 --dp-key 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1g",
     "--dp-key takes 64 hexadecimal digits, found other characters", "openssl rand"},
    {"--dp-noise 1 --dp-key 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2",
     "found 65 characters", "openssl rand"},
    {"--dp-noise 1 --dp-key 0x0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2",
     "--dp-key takes 64", "openssl rand"},
};
static void test_refused_lines(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        check_refused(refused[i][0], refused[i][1], refused[i][2]);
    }
}
// Texts longer than any buffer on the way to the message.
static void test_long_unknown_flags(void **state) {
    (void)state;
    char name[1001];
    memset(name, 'q', sizeof name);
    name[0] = name[1] = '-';
    name[1000] = 0;
    for (int n = 50; n <= 1000; n += 10) {
        check_refused(line_of("%.*s", n, name), "unknown flag --qqqq", "--help");
    }
    check_refused(line_of("%s=%.500s", name, name), "unknown flag --qqqq", "--help");
}
static void test_distance(void **state) {
    (void)state;
    static const struct {
        const char *a, *b;
        int distance;
    } cases[] = {
        {"", "", 0},         {"", "abc", 3},        {"abc", "", 3}, {"kitten", "sitting", 3},
        {"flaw", "lawn", 2}, {"steps", "steps", 0}, {"ab", "ba", 2}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(option_distance(cases[i].a, cases[i].b), cases[i].distance);
    }
}

static void test_cluster(void **state) {
    (void)state;
    Cluster none = cluster_parse(""), few = cluster_parse("2x8,inter=3,intra=25"),
            one = cluster_parse("1x1"),
            all = cluster_parse("24x16,intra=1,inter=2,gather=3,latency=4,tflops=5,half=6,memory=7,"
                                "overlap=0.5,link=8,host=9,disk=10");
    const Cluster uneven = cluster_parse("2x8+1x8+2x4+1x1,intra=25,inter=3");
    const int nodes[] = {0, 2, 3, 4, 5}, first[] = {0, 16, 24, 28, 32}, ranks[] = {8, 8, 4, 4, 1};
    assert_true(uneven.nodes == 6 && uneven.ranks == 8 && uneven.all_ranks == 33);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(cluster_first_rank(&uneven, nodes[i]), first[i]);
        assert_int_equal(cluster_node_ranks(&uneven, nodes[i]), ranks[i]);
        assert_int_equal(cluster_node_of(&uneven, first[i] + ranks[i] - 1), nodes[i]);
    }
    const Cluster slow = cluster_parse("2x8+1x8*0.5+1x4*0.5,intra=25,inter=3");
    assert_true(slow.parts == 3 && cluster_is_alike(&uneven) && !cluster_is_alike(&slow));
    assert_true(cluster_slowness(&slow, 15) == 1 && cluster_slowness(&slow, 16) == 2 &&
                cluster_slowness(&slow, 27) == 2 && cluster_most_slowness(&slow) == 2);
    assert_int_equal(none.nodes, 0);
    assert_int_equal(few.nodes, 2);
    assert_int_equal(few.ranks, 8);
    assert_true(few.intra == 25 && few.inter == 3 && few.gather == 3 && few.latency == 0 &&
                few.tflops == 0 && few.half == 0 && few.memory == 0);
    assert_true(few.link == 0 && few.host == 0 && few.disk == 0);
    assert_true(few.overlap == 1 && isinf(one.inter) && isinf(one.intra)); // nobody sends anything
    assert_int_equal(all.nodes, 24);
    assert_int_equal(all.ranks, 16);
    assert_true(all.intra == 1 && all.inter == 2 && all.gather == 3 && all.latency == 4 &&
                all.tflops == 5 && all.half == 6 && all.memory == 7);
    assert_true(all.overlap == 0.5 && all.link == 8 && all.host == 9 && all.disk == 10);
}

// -------------------------------------------------------------------------------------------------
// Pairs

static const char *const clashes[][3] = {
    // line, the pair
    // 0 is private too
    {"--resume", "resume", "out"},
    {"--resume 1 --out=", "resume", "out"},
    {"--save-every 5", "save-every", "out"},
    {"--keep 3", "keep", "out"},
    {"--hellaswag file --val-every 0", "hellaswag", "val-every"},
    {"--json", "json", "dry-run"},
    {"--json --dry-run 0", "json", "dry-run"},
    {"--json --dry-run --show-schedule", "json", "show-schedule"},
    {"--dp-account x --dry-run", "dp-account", "dry-run"},
    {"--dp-account x --plan", "dp-account", "dry-run"},
    {"--dp-account x --show-schedule", "dp-account", "dry-run"},
    {"--dp-account x --fit", "dp-account", "dry-run"},
    {"--dp-account x --dp-noise 2", "dp-account", "dry-run"},
    {"--show-schedule --plan", "show-schedule", "plan"},
    {"--show-schedule --fit --dry-run", "show-schedule", "plan"},
    {"--prompt x --plan", "prompt", "dry-run"},
    {"--prompt - --dry-run", "prompt", "dry-run"},
    {"--prompt x --fit", "prompt", "fit"},
    {"--cluster 1x1", "cluster", "dry-run"},
    {"--cluster 1x1 --plan 0", "cluster", "dry-run"},
    {"--fit --plan", "fit", "plan"},
    {"--fit --pipeline auto", "fit", "pipeline"},
    {"--fit --cyclic v1", "fit", "cyclic"},
    {"--fit --dp-noise 1", "fit", "dp-noise"},
    {"--plan --dry-run --profile x --cluster 1x1", "plan", "dry-run"},
    {"--plan --profile x", "profile", "cluster"},
    {"--profile x", "profile", "plan"},
    {"--offload auto", "offload", "device-memory"},
    {"--offload optimizer --pipeline auto", "offload", "pipeline"},
    {"--offload auto --device-memory 1G --plan --profile x --cluster 1x1", "offload", "pipeline"},
    {"--offload params --zero 3 --zero-quantized-weights", "offload", "zero-quantized-weights"},
    {"--offload all --pipeline 2 --pipeline-schedule zero-bubble", "offload", "pipeline-schedule"},
    {"--offload all --dp-noise 1", "offload", "dp-noise"},
    {"--host-memory 1G", "host-memory", "offload"},
    {"--host-memory 1G --device-memory 1G --offload none", "host-memory", "offload"},
    {"--offload-update auto", "offload-update", "offload"},
    {"--offload-delay 1", "offload-delay", "offload"},
    {"--offload-delay 1 --device-memory 1G", "offload-delay", "offload"},
    {"--offload-delay 1 --offload optimizer --offload-update device", "offload-delay",
     "offload-update"},
    {"--offload-delay 1 --offload optimizer --dp-noise 1", "offload-delay", "dp-noise"},
    {"--offload-delay 1 --offload optimizer --zero 2 --zero-quantized-gradients 1", "offload-delay",
     "zero-quantized-gradients"},
    {"--offload-delay 1 --offload optimizer --share all --delink-at 5", "offload-delay",
     "delink-at"},
    {"--offload-delay 1 --offload optimizer --offload-dir /tmp", "offload-delay", "offload-dir"},
    {"--offload-dir /tmp", "offload-dir", "offload"},
    {"--lr-last-part 0.3", "lr-last-part", "lr-schedule"},
    {"--lr-schedule linear --lr-last-part 0.3", "lr-last-part", "lr-schedule"},
    {"--optimizer muon --offload optimizer --offload-update host", "offload-update", "optimizer"},
    {"--optimizer muon --offload optimizer --offload-delay 1", "offload-delay", "optimizer"},
    {"--optimizer muon --offload optimizer --offload-dir /tmp", "offload-dir", "optimizer"},
    {"--nesterov --optimizer muon", "nesterov", "optimizer"},
    {"--muon-lr 0.02", "muon-lr", "optimizer"},
    {"--muon-momentum 0.9 --optimizer sgd", "muon-momentum", "optimizer"},
    {"--muon-momentum-warmup 5", "muon-momentum-warmup", "optimizer"},
    {"--muon-steps 5 --optimizer adamw", "muon-steps", "optimizer"},
    {"--muon-weight-decay 0.1", "muon-weight-decay", "optimizer"},
    {"--momentum 0.9 --optimizer muon", "momentum", "optimizer"},
    {"--offload-dir /tmp --device-memory 1G --offload none", "offload-dir", "offload"},
    {"--cyclic v1 --offload optimizer", "cyclic", "offload"},
    {"--pipeline auto --pipeline-warmup a", "pipeline-warmup", "pipeline"},
    {"--pipeline auto --recompute none", "pipeline", "recompute"},
    {"--plan --recompute block", "plan", "recompute"},
    {"--pipeline auto --zero 3 --zero-hpz-partition-size 2", "pipeline", "zero-hpz-partition-size"},
    {"--cluster 1x1 --dry-run --ranks-per-node 0", "cluster", "ranks-per-node"},
    {"--momentum 0.9", "momentum", "optimizer"},
    {"--momentum 0.5 --optimizer adamw", "momentum", "optimizer"},
    {"--beta1 0.9 --optimizer sgd", "beta1", "optimizer"},
    {"--beta2 0.95 --optimizer sgd", "beta2", "optimizer"},
    {"--eps 1e-8 --optimizer=sgd", "eps", "optimizer"},
    {"--profile-steps 5:6 --steps 5", "profile-steps", "steps"},
    {"--sample-tokens 9", "sample-tokens", "sample-every"},
    {"--temperature 0.5", "temperature", "sample-every"},
    {"--top-k 5", "top-k", "sample-every"},
    {"--top-p 0.5 --val-every 5", "top-p", "sample-every"},
    {"--trace file", "trace", "profile-steps"},
    {"--pipeline auto --dp-noise 1", "pipeline", "dp-noise"},
    {"--pipeline auto --dp-epsilon 8", "pipeline", "dp-noise"},
    {"--plan --pipeline 2 --dp-noise 1", "pipeline", "dp-noise"},
    {"--pipeline 2 --pipeline-schedule zero-bubble --dp-noise 0", "pipeline-schedule", "dp-noise"},
    {"--pipeline-schedule gpipe", "pipeline-schedule", "pipeline"},
    {"--pipeline-warmup a --pipeline 1", "pipeline-warmup", "pipeline"},
    {"--pipeline 2 --pipeline-schedule gpipe --pipeline-warmup b", "pipeline-warmup",
     "pipeline-schedule"},
    {"--cyclic-mode single", "cyclic-mode", "cyclic"},
    {"--cyclic v1 --cyclic-slack 1", "cyclic-slack", "cyclic"},
    {"--cyclic-stages 2", "cyclic-stages", "cyclic"},
    {"--cyclic v1 --cyclic-clip storage", "cyclic-clip", "cyclic"},
    {"--cyclic-cut 3,3", "cyclic-cut", "cyclic"},
    {"--cyclic v2 --pipeline 2", "cyclic", "pipeline"},
    {"--cyclic v1 --plan", "cyclic", "pipeline"},
    {"--cyclic v2 --zero 1", "cyclic", "zero"},
    {"--cyclic v2 --zero-quantized-gradients", "cyclic", "zero-quantized-gradients"},
    {"--cyclic v2 --reduce-dtype bf16", "cyclic", "reduce-dtype"},
    {"--cyclic v2 --cyclic-mode model --dp-noise 1", "cyclic-mode", "dp-noise"},
    {"--cyclic v2 --dp-noise 1 --dp-clip-style flat", "dp-clip-style", "cyclic"},
    {"--cyclic v2 --grad-clip 1", "cyclic", "grad-clip"},
    {"--cyclic v1 --skip-loss-z 3", "cyclic", "skip-loss-z"},
    {"--cyclic v1 --skip-grad-z 3", "cyclic", "skip-grad-z"},
    {"--cyclic v1 --dry-run --cluster 1x1", "cyclic", "cluster"},
    {"--share-lr 1e-3", "share-lr", "share"},
    {"--share-lr 1e-3 --share all --lr 0", "share-lr", "lr"},
    {"--delink-at 5", "delink-at", "share"},
    {"--delink-at 5 --share none", "delink-at", "share"},
    {"--delink-at 5 --share all --delink", "delink-at", "delink"},
    {"--delink-at 5 --share all --profile-steps 1:2", "delink-at", "profile-steps"},
    {"--delink-moments reset", "delink-moments", "delink-at"},
    {"--delink-moments reset --share all", "delink-moments", "delink-at"},
    {"--delink-warmup 5", "delink-warmup", "delink-at"},
    {"--delink-warmup 5 --delink", "delink-warmup", "delink-at"},
    {"--share 2 --pipeline auto", "share", "pipeline"},
    {"--share 2 --plan", "share", "pipeline"},
    {"--share 2 --dp-epsilon 1", "share", "dp-noise"},
    {"--share 2 --delink-at 5 --cyclic v1", "delink-at", "cyclic"},
    {"--pipeline 2 --pipeline-schedule zero-bubble --recompute block", "pipeline-schedule",
     "recompute"},
    {"--profile-steps 3:4 --dp-noise 1", "profile-steps", "dp-noise"},
    {"--dtype fp32 --stochastic-rounding 1", "stochastic-rounding", "dtype"},
    {"--zero-quantized-weights", "zero-quantized-weights", "zero"},
    {"--zero 2 --zero-quantized-weights 1", "zero-quantized-weights", "zero"},
    {"-z 1 --zero-hpz-partition-size 2", "zero-hpz-partition-size", "zero"},
    {"--zero 3 --zero-gradient-bits 4", "zero-gradient-bits", "zero-quantized-gradients"},
    {"--zero 3 --zero-error-feedback", "zero-error-feedback", "zero-quantized-gradients"},
    {"--zero 3 --zero-quant-block 256", "zero-quant-block", "zero-quantized-weights"},
    {"--dp-delta 0", "dp-delta", "dp-noise"},
    {"--dp-delta 1e-6 --dp-epsilon 0", "dp-delta", "dp-noise"}, // 0 is off
    {"--dp-clip 1", "dp-clip", "dp-noise"},
    {"--dp-clip-style unit", "dp-clip-style", "dp-noise"},
    {"--dp-clip-function abadi", "dp-clip-function", "dp-noise"},
    {"--dp-unit sequence", "dp-unit", "dp-noise"},
    {"--dp-key=", "dp-key", "dp-noise"},
    {"--dp-show-private 0", "dp-show-private", "dp-noise"},
    {"--dp-show-private --dp-account x", "dp-show-private", "dp-noise"},
    {"--dp-accountant rdp", "dp-accountant", "dp-account"},
    {"--dp-neighbours add-remove", "dp-neighbours", "dp-account"},
    {"--dp-epsilon 8 --dp-noise 0", "dp-epsilon", "dp-noise"},
    {"--dp-epsilon 8 --dp-unit document", "dp-unit", "windows"},
    {"--dp-epsilon 8 --dp-unit document --windows continuous", "dp-unit", "windows"},
    {"--dp-epsilon 8 --dp-windows-per-document 1", "dp-windows-per-document", "dp-unit"},
    {"--dp-windows-per-document 1", "dp-windows-per-document", "dp-unit"},
    {"--dp-epsilon 8 --dp-unit document --windows document --dp-windows-per-document 2 "
     "--dp-accountant rdp",
     "dp-windows-per-document", "dp-accountant"},
    {"--dp-noise 1 --dp-clip-style flat --recompute block", "dp-clip-style", "recompute"},
    {"--dp-noise 1 --dp-clip-style stage --recompute block", "dp-clip-style", "recompute"},
    {"--dp-noise 1 --zero 3 --zero-quantized-gradients", "zero-quantized-gradients", "dp-noise"},
    {"--dp-epsilon 1 --zero-quantized-gradients", "zero-quantized-gradients", "dp-noise"},
    {"--dp-noise 0 --zero-quantized-gradients", "zero-quantized-gradients", "dp-noise"},
    {"--dp-epsilon 1 --reduce-dtype bf16", "reduce-dtype", "dp-noise"},
    {"--dp-noise 1 --reduce-dtype bf16", "reduce-dtype", "dp-noise"},
    {"--dp-epsilon 1 --skip-loss-z 5", "skip-loss-z", "dp-noise"},
    {"--dp-noise 1 --skip-grad-z 5", "skip-grad-z", "dp-noise"},
    {"--dp-account x --dp-neighbours replace-one --dp-accountant rdp", "dp-neighbours",
     "dp-accountant"},
    {"--moe-aux-coefficient 0.1", "moe-aux-coefficient", "moe-balance"},
    {"--moe-balance bias --moe-aux-coefficient 0.1", "moe-aux-coefficient", "moe-balance"},
    {"--moe-buffer 2", "moe-buffer", "expert-parallel"},
    {"--moe-balance aux --cyclic v1", "moe-balance", "cyclic"},
    {"--moe-balance bias --dp-noise 1", "moe-balance", "dp-noise"},
};
enum { CLASHES = (int)(sizeof clashes / sizeof clashes[0]) };
static void test_every_pair_is_refused(void **state) {
    (void)state;
    for (int i = 0; i < CLASHES; i++) {
        check_refused(clashes[i][0], line_of("--%s with --%s: ", clashes[i][1], clashes[i][2]),
                      "--compat");
    }
    for (int i = 0; i < OPTION_PAIRS; i++) { // and no pair without a line above
        bool met = false;
        for (int j = 0; j < CLASHES; j++) {
            met = met || (!strcmp(option_pairs[i].a, clashes[j][1]) &&
                          !strcmp(option_pairs[i].b, clashes[j][2]));
        }
        if (!met) {
            fail_msg("no command line for --%s with --%s", option_pairs[i].a, option_pairs[i].b);
        }
        assert_non_null(
            option_find(line_of("--%s", option_pairs[i].a), strlen(option_pairs[i].a) + 2));
        assert_non_null(
            option_find(line_of("--%s", option_pairs[i].b), strlen(option_pairs[i].b) + 2));
    }
}
// Each flag in the table of optimizers is refused by the optimizers that do not have it.
static void test_flags_of_other_optimizers_are_refused(void **state) {
    (void)state;
    const int rows = (int)(sizeof optimizers / sizeof *optimizers);
    for (int i = 0; i < rows; i++) {
        char flags[200], *rest = flags;
        snprintf(flags, sizeof flags, "%s", optimizers[i].flags);
        for (const char *flag; (flag = strtok_r(rest, " ", &rest));) {
            const OptionSpec *spec = option_find(line_of("--%s", flag), strlen(flag) + 2);
            assert_non_null(spec);
            for (int k = 0; k < rows; k++) {
                if (!optimizer_lacks(&optimizers[k], flag)) { continue; }
                check_refused(
                    line_of("--optimizer %s --%s %s", optimizers[k].name, flag, spec->fallback),
                    line_of("--%s with --optimizer: ", flag), "--help optimizer");
            }
        }
    }
}
static void test_near_misses_are_accepted(void **state) {
    (void)state;
    static const char *const lines[] = {
        "--resume 0",
        "--prompt x --steps 5 --sample-every 1",
        "--save-every 0",
        "--save-every 5 --out x",
        "--resume --out x",
        "--hellaswag file",
        "--val-every 0",
        "--json 0",
        "--optimizer sgd --momentum 0.5",
        "--optimizer sgd",
        "--beta1 0.8 --beta2 0.9 --eps 1e-6",
        "--optimizer muon --beta1 0.8 --beta2 0.9 --eps 1e-6 --muon-lr 0.01 --muon-momentum 0.9",
        "--optimizer muon --muon-momentum-warmup 5 --muon-steps 4 --muon-weight-decay 0",
        "--optimizer muon --offload optimizer --offload-update device",
        "--lr-schedule wsd --lr-last-part 0.3",
        "--lr-schedule wsd-linear --lr-last-part 1",
        "--warmup 6 --steps 5",
        "--profile-steps 2:3 --steps 0",
        "--warmup 5",
        "--warmup 5 --steps -1",
        "--json --dry-run 1",
        "--json --plan --profile x --cluster 1x1 --device-memory 16G --pipeline auto",
        "--plan --profile x --cluster 1x1 --pipeline 5:3,3:1 --pipeline-warmup b "
        "--pipeline-schedule dapple",
        "--pipeline 1",
        "--json --dp-account x --dp-accountant rdp",
        "--dp-account x --dp-neighbours replace-one",
        "--dp-epsilon 8",
        "--dp-noise 0",
        "--dp-epsilon 8 --dp-noise 1 --dp-delta 0 --dp-clip 0.5 --dp-clip-style flat "
        "--dp-clip-function automatic --dp-unit sequence --dp-show-private",
        "--dp-noise 1 --dp-accountant rdp",
        "--dp-noise 1 --dp-neighbours replace-one",
        "--dp-noise 1 --dp-unit document --windows document",
        "--dp-noise 1 --dp-unit document --windows document --dp-windows-per-document 4",
        "--dp-noise 1 --dp-unit document --windows document --dp-windows-per-document 1 "
        "--dp-accountant rdp",
        "--dp-noise 1 --recompute block --zero 3 --zero-quantized-weights "
        "--zero-hpz-partition-size 2",
        "--dp-clip-style unit --dp-noise 1 --recompute block",
        "--pipeline 3:1,3:1 --dp-epsilon 8 --dp-clip-style stage --pipeline-schedule gpipe",
        "--pipeline 2 --dp-noise 1 --dp-clip-style unit --recompute block --zero 3",
        "--dp-noise 1 --skip-loss-z 0 --skip-grad-z 0 --reduce-dtype fp32 --dtype bf16",
        "--skip-loss-z 5 --reduce-dtype bf16 --dp-epsilon 0",
        "--cluster=",
        "--share 2x3 --delink-at 5 --delink-moments reset --delink-warmup 2 --steps 6 --pipeline 2 "
        "--zero 3",
        "--share 4 --share-lr 1e-3 --lr 4e-3 --delink-at 5 --steps 6",
        "--share none --delink --delink-moments reset",
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        Options options;
        OptionsGiven given;
        Line line;
        parse(&line, &options, &given, lines[i]);
    }
}

// -------------------------------------------------------------------------------------------------
// Texts for the user

// What --help TOPIC prints; the caller frees it.
static char *help_of(const char *topic) {
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    options_help(f, topic);
    fclose(f);
    return text;
}
static void test_help_prints_every_flag(void **state) {
    (void)state;
    char *text = help_of("all");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        const char *at = strstr(
            text, line_of("\n  --%s%s%s ", spec->name, *spec->letter ? ", -" : "", spec->letter));
        if (!at) { fail_msg("--%s is not in --help", spec->name); }
        char *row = strndup(at + 1, strcspn(at + 1, "\n"));
        bool all = strstr(row, spec->help) && strstr(row, spec->choices) &&
                   strstr(row, line_of("(default %s)", *spec->fallback ? spec->fallback : "none"));
        if (!all) { fail_msg("--%s: something is missing in: %s", spec->name, row); }
        assert_non_null(strstr(text, line_of("\n%s\n", spec->group)));
        free(row);
    }
    assert_non_null(strstr(text, "Exit codes: 0 done, 2 bad input, 3 resources"));
    free(text);
}
static void test_help_is_one_screen(void **state) {
    (void)state;
    char *text = help_of(""), *rest = text, *line;
    int lines = 0;
    for (int i = 0; i < HELP_TOPICS; i++) { assert_non_null(strstr(text, help_topics[i].group)); }
    assert_non_null(strstr(text, "\n  --lr, -l "));
    assert_non_null(strstr(text, "Exit codes: 0 done, 2 bad input"));
    while ((line = strsep(&rest, "\n"))) {
        lines++;
        assert_true(strlen(line) <= 80);
    }
    assert_true(lines <= 24);
    free(text);
}
// A topic has its flags with values and defaults, and examples that are accepted.
static void test_help_of_every_topic(void **state) {
    (void)state;
    int flags = 0;
    for (int t = 0; t < HELP_TOPICS; t++) {
        const HelpTopic *topic = &help_topics[t];
        char *text = help_of(line_of("%c%s", toupper(*topic->group), topic->group + 1));
        for (int i = 0; i < OPTION_COUNT; i++) {
            const OptionSpec *spec = &option_specs[i];
            if (strcmp(spec->group, topic->group)) { continue; }
            flags++;
            assert_non_null(strstr(text, line_of("\n  --%s", spec->name)));
            char *one = help_of(spec->name);
            assert_non_null(strstr(text, one));
            assert_non_null(strstr(one, is_number(spec) ? " from " : "["));
            assert_non_null(strstr(one, "default "));
            if (*spec->letter) {
                char *same = help_of(line_of("-%s", spec->letter));
                assert_non_null(strstr(one, same)); // model is a topic, too
                free(same);
            }
            free(one);
        }
        if (topic->picture) {
            int lines = 0;
            assert_non_null(strstr(text, topic->picture));
            for (const char *at = topic->picture; *at; at += strcspn(at, "\n") + 1, lines++) {
                assert_true(strcspn(at, "\n") <= 80);
            }
            assert_int_equal(lines, 3);
        }
        for (int i = 0; i < 2; i++) {
            const char *example = topic->examples[i], *line = strstr(example, "./train_gpt ");
            Options options;
            OptionsGiven given;
            Line parsed;
            assert_non_null(strstr(text, line_of("\n  %s\n", example)));
            parse(&parsed, &options, &given, line + strlen("./train_gpt "));
        }
        free(text);
    }
    assert_int_equal(flags, OPTION_COUNT); // each group is a topic
}
static void ask_for_help(const void *topic) { options_help(stdout, (const char *)topic); }
static void test_help_of_nothing(void **state) {
    (void)state;
    static const char *const topics[] = {"1", "--lr", "learning-rate", "datas", "%s%n", " "};
    for (size_t i = 0; i < sizeof topics / sizeof topics[0]; i++) {
        char message[4096];
        assert_int_equal(run_child(ask_for_help, topics[i], message, sizeof message), EXIT_INPUT);
        assert_non_null(strstr(message, "there is no such topic"));
        assert_non_null(strstr(message, "data, model, run"));
    }
}
static void test_manual_and_completion_have_every_flag(void **state) {
    (void)state;
    char *manual = help_of("man"), *completion = help_of("completion");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        char name[100] = "\\-\\-";
        int n = 4;
        for (const char *c = spec->name; *c; c++) {
            if (*c == '-') { name[n++] = '\\'; }
            name[n++] = *c;
        }
        name[n] = 0;
        assert_non_null(strstr(manual, line_of(".B \"%s", name)));
        assert_non_null(strstr(completion, line_of(" --%s", spec->name)));
        if (spec->kind != OPTION_PICK) { continue; }
        assert_non_null(
            strstr(completion, line_of("--%s) words='%s' ;;", spec->name, spec->choices)));
    }
    free(manual);
    free(completion);
}

static void test_compat_prints_every_pair(void **state) {
    (void)state;
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    options_print_compat(f);
    fclose(f);
    for (int i = 0; i < OPTION_PAIRS; i++) {
        const OptionPair *pair = &option_pairs[i];
        assert_non_null(
            strstr(text, line_of("--%-12s with --%-12s %s\n", pair->a, pair->b, pair->why)));
    }
    free(text);
}
static void test_help_is_found_anywhere(void **state) {
    (void)state;
    static const struct {
        const char *line, *topic; // NULL: no help
    } cases[] = {{"--help", ""},
                 {"-h", ""},
                 {"--bogus --help", ""},
                 {"--steps 5 -h", ""},
                 {"", NULL},
                 {"--steps 5", NULL},
                 {"--helpx", NULL},
                 {"-help", NULL},
                 {"--help zero", "zero"},
                 {"-h all", "all"},
                 {"--help=man", "man"},
                 {"--help --lr 3", "lr"},
                 {"--help -l 3", "-l"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Line line;
        line_make(&line, cases[i].line);
        const char *topic = options_ask_help(line.count, line.arguments);
        assert_int_equal(topic == NULL, cases[i].topic == NULL);
        if (topic) { assert_string_equal(topic, cases[i].topic); }
    }
}

// -------------------------------------------------------------------------------------------------
// Flags of other programs

static void test_synonyms(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof option_synonyms / sizeof option_synonyms[0]; i++) {
        const OptionSynonym *s = &option_synonyms[i];
        char names[600], *rest = names, *name;
        snprintf(names, sizeof names, "%s", s->names);
        while ((name = strsep(&rest, " "))) {
            char plain[OPTION_NAME_MAX + 1];
            option_plain_name(name, plain);
            assert_string_equal(plain, name);
            assert_string_equal(option_synonym(name), s->instead); // no name is there twice
            if (option_find(line_of("--%s", name), strlen(name) + 2)) {
                fail_msg("--%s is a flag", name);
            }
        }
        for (const char *flag = s->instead; (flag = strstr(flag, "--")); flag += 2) {
            const size_t n = 2 + strspn(flag + 2, "abcdefghijklmnopqrstuvwxyz-0123456789");
            const bool other = !strncmp(flag, "--hostfile", n) || !strncmp(flag, "--help", n);
            if (!other && !option_find(flag, n)) { fail_msg("there is no %.*s", (int)n, flag); }
        }
    }
}
static void test_plain_names(void **state) {
    (void)state;
    static const char *const cases[][2] = {{"--lr", "lr"},
                                           {"-lr=3", "lr"},
                                           {"\u2013lr", "lr"},
                                           {"\u2014\u2014lr", "lr"},
                                           {"\u2212lr", "lr"},
                                           {"--A_b.C", "a-b-c"},
                                           {"", ""},
                                           {"--", ""},
                                           {"lr", "lr"},
                                           {"\xe2", "\xe2"},
                                           {"\xe2\x80", "\xe2\x80"},
                                           {"=5", ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[OPTION_NAME_MAX + 1];
        option_plain_name(cases[i][0], name);
        assert_string_equal(name, cases[i][1]);
    }
}
// -------------------------------------------------------------------------------------------------
// Files of flags

// Writes the text into a file, of the name that CONFIG stands for.
#define CONFIG "/tmp/test_options_%d.cfg"
static const char *config_file(const char *text, size_t bytes) {
    const char *path = line_of(CONFIG, (int)getpid());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
    return path;
}
static const char *const files_accepted[][4] = {
    // file, command line behind --config FILE, name, value
    {"lr 1e-3", "", "lr", "0.001"},
    {"--lr 1e-3\n", "", "lr", "0.001"},
    {"--lr=1e-3\n", "", "lr", "0.001"},
    {"lr = 1e-3\r\n", "", "lr", "0.001"},
    {"-l 1e-3", "", "lr", "0.001"},
    {"# lr 5\n\n  \t lr\t1e-3  # peak\n#", "", "lr", "0.001"},
    {"lr 5\nlr 1e-3", "", "lr", "0.001"},
    {"lr 5", "--lr 1e-3", "lr", "0.001"},
    {"lr 5", "-l 1e-3 --steps 5", "lr", "0.001"},
    {"lr 5\nsteps 7", "--lr 1e-3", "steps", "7"},
    {"train 'data/a b_*.bin'", "", "train", "data/a b_*.bin"},
    {"train data/a#1.bin", "", "train", "data/a#1.bin"},
    {"model layers=6,heads=6", "", "model", "layers=6,heads=6"},
    {"train \"\"", "", "train", ""},
    {"train =", "", "train", ""},
    {"dry-run", "", "dry-run", "1"},
    {"--dry-run\nlr 1", "", "dry-run", "1"},
    {"shuffle 0", "", "shuffle", "0"},
    {"steps -1", "", "steps", "-1"},
    {"", "", "steps", "-1"},
    {"dp-noise 1\ndp-key 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f", "",
     "dp-key", "(secret)"},
};
static void test_files_accepted(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof files_accepted / sizeof files_accepted[0]; i++) {
        const char *const *c = files_accepted[i];
        Options options;
        OptionsGiven given;
        Line line;
        char value[1600];
        const char *path = config_file(c[0], strlen(c[0]));
        parse(&line, &options, &given, line_of("--config %s %s", path, c[1]));
        const OptionSpec *spec = option_find(line_of("--%s", c[2]), strlen(c[2]) + 2);
        option_value_text(&options, spec, value, sizeof value);
        assert_string_equal(value, c[3]);
        assert_int_equal(given.at[spec - option_specs], *c[0] != 0);
        assert_string_equal(speaker.place, "");
        unlink(path);
    }
}
static const char *const files_refused[][3] = {
    // file, words of the message, more words
    {"steps 5\n\nlr x", ".cfg:3: --lr takes a number, found \"x\"", "hint"},
    {"learning_rate 3", ".cfg:1: unknown flag --learning_rate", "--lr"},
    {"lr", ".cfg:1: --lr needs a value", "hint"},
    {"lr =", ".cfg:1: --lr takes a number, found \"\"", "hint"},
    {"shuffle yes", ".cfg:1: --shuffle takes 0 or 1", "alone"},
    {"shuffle -3", ".cfg:1: --shuffle takes 0 or 1, found \"-3\"", "alone"},
    {"= 5", ".cfg:1: unknown flag --", "--help"},
    {"lr 1\nconfig other", ".cfg:2: a file of flags names another", "one file"},
    {"lr 1\n--config=other", ".cfg:2: a file of flags names another", "one file"},
    {"{\"zero_optimization\": 1}", ".cfg:1: unknown flag --{", "--help"},
    {"save-every 5", "train_gpt: rank 0", "--save-every with --out"},
};
static void test_files_refused(void **state) {
    (void)state;
    static char large[CONFIG_BYTES + 1];
    for (size_t i = 0; i < sizeof files_refused / sizeof files_refused[0]; i++) {
        const char *path = config_file(files_refused[i][0], strlen(files_refused[i][0]));
        check_refused(line_of("--config %s", path), files_refused[i][1], files_refused[i][2]);
    }
    memset(large, '\n', sizeof large);
    check_refused(line_of("--config %s", config_file(large, CONFIG_BYTES)), "expected a text", "");
    check_refused(line_of("--config %s", config_file("lr 1\0", 5)), "expected a text", "");
    unlink(line_of(CONFIG, (int)getpid()));
    check_refused("--config /", "--config /: cannot read it", "a flag on each line");
    check_refused("--config /dev/zero", "cannot read it", "a flag on each line");
    check_refused("--config /nowhere/x", "No such file", "a flag on each line");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table_is_sound),
        cmocka_unit_test(test_names_stay),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_every_form),
        cmocka_unit_test(test_every_choice),
        cmocka_unit_test(test_every_bound),
        cmocka_unit_test(test_no_numbers),
        cmocka_unit_test(test_every_flag_value),
        cmocka_unit_test(test_missing_values),
        cmocka_unit_test(test_the_last_one_wins),
        cmocka_unit_test(test_long_values),
        cmocka_unit_test(test_accepted_lines),
        cmocka_unit_test(test_secrets_leave_the_command_line),
        cmocka_unit_test(test_refused_lines),
        cmocka_unit_test(test_long_unknown_flags),
        cmocka_unit_test(test_distance),
        cmocka_unit_test(test_cluster),
        cmocka_unit_test(test_every_pair_is_refused),
        cmocka_unit_test(test_flags_of_other_optimizers_are_refused),
        cmocka_unit_test(test_near_misses_are_accepted),
        cmocka_unit_test(test_help_prints_every_flag),
        cmocka_unit_test(test_help_is_one_screen),
        cmocka_unit_test(test_help_of_every_topic),
        cmocka_unit_test(test_help_of_nothing),
        cmocka_unit_test(test_manual_and_completion_have_every_flag),
        cmocka_unit_test(test_compat_prints_every_pair),
        cmocka_unit_test(test_help_is_found_anywhere),
        cmocka_unit_test(test_synonyms),
        cmocka_unit_test(test_plain_names),
        cmocka_unit_test(test_files_accepted),
        cmocka_unit_test(test_files_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
