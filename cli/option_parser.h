// option_parser.h: reads the flags of a command line, and of a file (--config).
//
// Forms: --name value, --name=value, -x value. A FLAG may stand alone (--dry-run) or take 0 or 1
// (--resume 0). The last value of a repeated flag counts, so flags appended to a command change it.
// A file has a flag on each line, in any of these forms or without the hyphens; # begins a comment.
// What the command line says counts more. Any mistake (unknown name, bad number, value out of
// range, impossible combination) ends the program with exit code 2 before anything is allocated.
// One message then says what to change.
#ifndef OPTION_PARSER_H
#define OPTION_PARSER_H

#include "base/base.h"
#include "base/files.h"
#include "cli/option_hints.h"
#include "options.h"
#include "plan/cluster.h"
#include "plan/option_pairs.h"

static inline const OptionSpec *option_find(const char *argument, size_t length) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        const char *name = option_specs[i].name, *letter = option_specs[i].letter;
        if (length > 2 && !strncmp(argument, "--", 2) && strlen(name) == length - 2 &&
            !strncmp(argument + 2, name, length - 2)) {
            return &option_specs[i];
        }
        if (length > 1 && argument[1] != '-' && strlen(letter) == length - 1 &&
            !strncmp(argument + 1, letter, length - 1)) {
            return &option_specs[i];
        }
    }
    return NULL;
}

// Returns the hint on a bad value: what the option means.
static inline const char *option_meaning(const OptionSpec *spec) {
    static char text[400];
    snprintf(text, sizeof text, "%s%sthe default is %s", spec->help, *spec->help ? "; " : "",
             *spec->fallback ? spec->fallback : "none");
    return text;
}

static inline int64_t option_pick(const OptionSpec *spec, const char *text) {
    const char *choice = spec->choices;
    for (int64_t i = 0;; i++) {
        size_t n = strcspn(choice, "|");
        if (strlen(text) == n && !strncmp(choice, text, n)) { return i; }
        if (!choice[n]) { break; }
        choice += n + 1;
    }
    die(EXIT_INPUT, option_meaning(spec), "--%s takes one of %s, found \"%.80s\"", spec->name,
        spec->choices, text);
}

// Parses a value and stores it. Ends the program (EXIT_INPUT) if it is malformed or out of range.
static inline void option_set(Options *options, const OptionSpec *spec, const char *text) {
    void *slot = option_slot(options, spec);
    if (strlen(text) > OPTION_TEXT_MAX) {
        die(EXIT_INPUT, "shorten it", "--%s takes at most %d characters, found %zu", spec->name,
            OPTION_TEXT_MAX, strlen(text));
    }
    if (spec->kind == OPTION_TEXT || spec->kind == OPTION_SECRET) {
        *(const char **)slot = text;
        return;
    }
    if (spec->kind == OPTION_PICK) {
        *(int64_t *)slot = option_pick(spec, text);
        return;
    }
    char *end = NULL;
    errno = 0;
    double value = strtod(text, &end);
    bool whole = spec->kind != OPTION_NUM;
    if (end == text || *end || errno == ERANGE || !isfinite(value) ||
        (whole && value != floor(value))) {
        const Text hint = text_of("digits alone, such as %s; %s",
                                  whole ? "1000 or 1e3" : "0.1 or 1e-1", option_meaning(spec));
        die(EXIT_INPUT, hint.at, "--%s takes a %s, found \"%.80s\"", spec->name,
            whole ? "whole number" : "number", text);
    }
    if (value < spec->low || value > spec->high) {
        die(EXIT_INPUT, option_meaning(spec), "--%s must be from %.15g to %.15g, found %.80s",
            spec->name, spec->low, spec->high, text);
    }
    if (spec->kind == OPTION_POWER && ((int64_t)value & ((int64_t)value - 1))) {
        die(EXIT_INPUT, option_meaning(spec), "--%s takes a power of two, found %.80s", spec->name,
            text);
    }
    if (whole) {
        *(int64_t *)slot = (int64_t)value;
    } else {
        *(double *)slot = value;
    }
}

// Overwrites a secret with asterisks, in place.
static inline void option_mask(const char *secret) {
    memset((char *)(uintptr_t)secret, '*', strlen(secret));
}

// Parses the flag `argument`, whose value may be `next`. Returns how many arguments it used (1 or
// 2).
static inline int option_take(Options *options, OptionsGiven *given, const char *argument,
                              const char *next) {
    const char *equals = strchr(argument, '=');
    size_t length =
        equals && !strncmp(argument, "--", 2) ? (size_t)(equals - argument) : strlen(argument);
    const OptionSpec *spec = *argument == '-' ? option_find(argument, length) : NULL;
    if (!spec) { option_unknown(argument); }
    bool *again = &given->at[spec - option_specs];
    if (*again && spec->kind == OPTION_SECRET) {
        option_mask(*(const char **)option_slot(options, spec));
    }
    *again = true;
    if (argument[length] == '=') {
        option_set(options, spec, argument + length + 1);
        return 1;
    }
    if (spec->kind == OPTION_FLAG && next && *next != '-' && strcmp(next, "0") &&
        strcmp(next, "1")) {
        die(EXIT_INPUT, "alone it means 1", "--%s takes 0 or 1, found \"%.80s\"", spec->name, next);
    }
    bool bare = spec->kind == OPTION_FLAG && (!next || *next == '-');
    if (bare) {
        option_set(options, spec, "1");
        return 1;
    }
    if (!next || (*next == '-' && option_find(next, strlen(next)))) {
        die(EXIT_INPUT, option_meaning(spec), "--%s needs a value, found %s", spec->name,
            next ? next : "the end");
    }
    option_set(options, spec, next);
    return 2;
}

// -------------------------------------------------------------------------------------------------
// --config

enum { CONFIG_BYTES = 1 << 16 }; // a file of flags is shorter

// Removes white space at the end of a text, and returns where it begins after white space.
static inline char *trim(char *text) {
    for (size_t n = strlen(text); n && isspace((unsigned char)text[n - 1]);) { text[--n] = 0; }
    while (isspace((unsigned char)*text)) { text++; }
    return text;
}
// Takes the flag of a line: "lr 3e-4", "--lr 3e-4", "lr = 3e-4", "dry-run", "train 'a b.bin'".
static inline void option_take_line(Options *options, OptionsGiven *given, char *line) {
    for (char *c = line; (c = strchr(c, '#')); c++) { // a comment; # inside of a word is none
        if (c == line || isspace((unsigned char)c[-1])) { *c = 0; }
    }
    char name[OPTION_TEXT_MAX], *text = trim(line), *value = text + strcspn(text, " \t=");
    snprintf(name, sizeof name, "%s%.*s", *text == '-' ? "" : "--", (int)(value - text), text);
    if (!*text) { return; }
    value = trim(value);
    const bool equals = *value == '=';
    if (equals) { value = trim(value + 1); }
    const int words = equals || *value ? 2 : 1;
    const size_t n = strlen(value);
    if (n > 1 && strchr("'\"", *value) && value[n - 1] == *value) {
        value[n - 1] = 0;
        value++;
    }
    if (!strcmp(name, "--config")) {
        die(EXIT_INPUT, "write the flags of both into one file", "a file of flags names another");
    }
    if (option_take(options, given, name, words == 2 ? value : NULL) != words) {
        die(EXIT_INPUT, "alone it means 1", "%s takes 0 or 1, found \"%.80s\"", name, value);
    }
}
static inline void options_read_file(Options *options, OptionsGiven *given, const char *path) {
    static char text[CONFIG_BYTES]; // options point into it
    static char place[OPTION_TEXT_MAX + 16];
    FILE *f = open_regular(path);
    const size_t bytes = f ? fread(text, 1, sizeof text, f) : 0;
    if (!f) {
        die(EXIT_INPUT, "name a file with a flag on each line, such as: lr 3e-4",
            "--config %s: cannot read it: %s", path, strerror(errno));
    }
    fclose(f);
    if (bytes == sizeof text || memchr(text, 0, bytes)) {
        die(EXIT_INPUT, "name a file with a flag on each line, such as: lr 3e-4",
            "--config %s: expected a text of less than %d bytes", path, CONFIG_BYTES);
    }
    text[bytes] = 0;
    char *rest = text;
    speaker.place = place;
    for (int number = 1; rest; number++) {
        snprintf(place, sizeof place, "%s:%d: ", path, number);
        option_take_line(options, given, strsep(&rest, "\n"));
    }
    speaker.place = "";
}

// -------------------------------------------------------------------------------------------------
// All flags

// Removes secrets from the command line, which others can see: in checkpoint manifests, in the
// printed resume command and in ps.
static inline void options_hide_secrets(Options *o) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        const char **slot = (const char **)option_slot(o, &option_specs[i]);
        if (option_specs[i].kind != OPTION_SECRET || !**slot) { continue; }
        const char *shown = *slot;
        *slot = strdup(shown);
        if (!*slot) { die(EXIT_RESOURCES, NULL, "cannot hold --%s", option_specs[i].name); }
        option_mask(shown);
    }
}

static inline void options_check_privacy(const Options *o) {
    size_t digits = strspn(o->dp_key, "0123456789abcdefABCDEF"), length = strlen(o->dp_key);
    if (length && (digits != length || length != 64)) { // the message does not show the key
        die(EXIT_INPUT,
            "openssl rand -hex 32 makes one; without --dp-key the operating system gives one, and "
            "nobody knows it",
            digits == length
                ? "--dp-key takes 64 hexadecimal digits, found %zu characters"
                : "--dp-key takes 64 hexadecimal digits, found other characters among %zu",
            length);
    }
}

// The default validation shards belong to the default training shards. A run with --train but
// without --val validates on --hellaswag alone, or not at all; --val is then empty.
static inline void options_choose_validation(Options *o, const OptionsGiven *given) {
    if (!o->val_every || !given->at[OPTION_INDEX_train] || given->at[OPTION_INDEX_val]) { return; }
    o->val = "";
    if (!*o->hellaswag) { o->val_every = 0; }
}

// Who asks for a cosine wants the rate to fall, as the recipes that name one have it.
static inline void options_choose_decay(Options *o, const OptionsGiven *given) {
    const bool asks = given->at[OPTION_INDEX_lr_schedule] && o->lr_schedule == LR_COSINE;
    if (asks && !given->at[OPTION_INDEX_final_lr_fraction]) { o->final_lr_fraction = 0.1; }
}

// --prompt neither trains nor validates nor writes what a run makes, whatever the other flags say:
// it may stand behind the command of a training run, whose exported model stays as it is, and whose
// log goes on (report/log.h). One sequence passes through the model.
static inline void options_choose_prompt(Options *o, const OptionsGiven *given) {
    if (!options_prompts(given)) { return; }
    o->steps = o->val_every = o->sample_every = o->save_every = 0;
    o->hellaswag = o->profile_steps = o->tensorboard = o->trace = o->export_file = "";
    if (!given->at[OPTION_INDEX_micro_batch]) { o->micro_batch = 1; }
}

// Sets the defaults, then what a file says unless `config` is empty, then what the command line
// says.
static inline void options_take(Options *options, OptionsGiven *given, const char *config, int argc,
                                char **argv) {
    memset(options, 0, sizeof *options);
    memset(given, 0, sizeof *given);
    for (int i = 0; i < OPTION_COUNT; i++) {
        option_set(options, &option_specs[i], option_specs[i].fallback);
    }
    if (*config) { options_read_file(options, given, config); }
    for (int i = 1; i < argc;) {
        i += option_take(options, given, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
    }
}
// Fills the options from the command line. Ends the program on any mistake (EXIT_INPUT). All ranks
// call it with the same arguments.
static inline void options_parse(Options *options, OptionsGiven *given, int argc, char **argv) {
    options_take(options, given, "", argc, argv);
    if (*options->config) { options_take(options, given, options->config, argc, argv); }
    int64_t steps[2];
    if (!options_profile_steps(options, &steps[0], &steps[1])) {
        die(EXIT_INPUT, "such as 3:5, both in it",
            "--profile-steps takes two steps A:B, the first at least 1, found \"%.80s\"",
            options->profile_steps);
    }
    const Cluster cluster = cluster_parse(options->cluster);
    // as in the build for GPUs
    if (cluster.gpu > 0 && !given->at[OPTION_INDEX_dtype]) { options->dtype = DTYPE_BF16; }
    option_size("device-memory", options->device_memory);
    option_size("host-memory", options->host_memory);
    options_check_privacy(options);
    const OptionPair *pair = options_clash(options, given);
    if (pair) {
        die(EXIT_INPUT, "--compat lists what does not combine", "--%s with --%s: %s", pair->a,
            pair->b, pair->why);
    }
    options_choose_validation(options, given);
    options_choose_decay(options, given);
    options_choose_prompt(options, given);
    options_hide_secrets(options);
}

#endif
