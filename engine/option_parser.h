// option_parser.h: reads the flags of a command line, and prints --help.
//
// Forms: --name value, --name=value, -x value. A FLAG may stand alone (--dry-run) or take 0 or 1
// (--resume 0). The last value of a repeated flag counts, so flags appended to a command change it.
// Any mistake (unknown name, bad number, value out of range, impossible combination) ends the
// program with exit code 2 before anything is allocated. One message then says what to change.
#ifndef OPTION_PARSER_H
#define OPTION_PARSER_H

#include "engine/cluster.h"      // --cluster
#include "engine/option_pairs.h" // what does not combine

static inline void options_print_help(FILE *to) {
    fprintf(to,
            "train_gpt: pretrains GPT models.   mpirun -np RANKS ./train_gpt [--flag value ...]\n");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        if (i == 0 || strcmp(spec->group, option_specs[i - 1].group)) {
            fprintf(to, "\n%s\n", spec->group);
        }
        char left[64];
        snprintf(left, sizeof left, "--%s%s%s", spec->name, *spec->letter ? ", -" : "",
                 spec->letter);
        fprintf(to, "  %-26s %s%s%s%s%s (default %s)\n", left, *spec->choices ? "<" : "",
                spec->choices, *spec->choices ? ">" : "", *spec->choices ? " " : "", spec->help,
                *spec->fallback ? spec->fallback : "none");
    }
    fprintf(to, "\nkeys of --cluster\n");
    for (int k = 0; k < CLUSTER_KEYS; k++) {
        fprintf(to, "  %-26s %s\n", cluster_keys[k].name, cluster_keys[k].help);
    }
    fprintf(to,
            "\nExit codes: 0 done, 2 bad input, 3 resources (memory, disk), 4 a peer was lost.\n");
}

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

// Returns the Levenshtein distance of two names, for the hint on unknown flags. Names are short.
static inline int option_distance(const char *a, const char *b) {
    int row[64], n = min_i64(strlen(b), 63);
    for (int j = 0; j <= n; j++) { row[j] = j; }
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) { best = row[j] + 1; }
            if (row[j - 1] + 1 < best) { best = row[j - 1] + 1; }
            row[j] = best;
        }
    }
    return row[n];
}

__attribute__((noreturn)) static inline void option_unknown(const char *argument) {
    const char *near_name = option_specs[0].name;
    char bare[64], hint[160];
    snprintf(bare, sizeof bare, "%.*s", (int)strcspn(argument, "="), argument);
    const char *wanted = bare + strspn(bare, "-");
    for (int i = 1; i < OPTION_COUNT; i++) {
        if (option_distance(wanted, option_specs[i].name) < option_distance(wanted, near_name)) {
            near_name = option_specs[i].name;
        }
    }
    snprintf(hint, sizeof hint, "the nearest is --%s; --help lists all", near_name);
    die(EXIT_INPUT, hint, "unknown flag %.80s", argument);
}

static inline int64_t option_pick(const OptionSpec *spec, const char *text) {
    const char *choice = spec->choices;
    for (int64_t i = 0;; i++) {
        size_t n = strcspn(choice, "|");
        if (strlen(text) == n && !strncmp(choice, text, n)) { return i; }
        if (!choice[n]) { break; }
        choice += n + 1;
    }
    die(EXIT_INPUT, "--help lists all flags", "--%s takes one of %s, found \"%.80s\"", spec->name,
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
        die(EXIT_INPUT, spec->help, "--%s takes a %s, found \"%.80s\"", spec->name,
            whole ? "whole number" : "number", text);
    }
    if (value < spec->low || value > spec->high) {
        die(EXIT_INPUT, spec->help, "--%s must be from %.15g to %.15g, found %.80s", spec->name,
            spec->low, spec->high, text);
    }
    if (spec->kind == OPTION_POWER && ((int64_t)value & ((int64_t)value - 1))) {
        die(EXIT_INPUT, spec->help, "--%s takes a power of two, found %.80s", spec->name, text);
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
        die(EXIT_INPUT, spec->help, "--%s needs a value, found %s", spec->name,
            next ? next : "the end");
    }
    option_set(options, spec, next);
    return 2;
}

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

// Fills the options from the command line. Ends the program on any mistake (EXIT_INPUT). All ranks
// call it with the same arguments.
static inline void options_parse(Options *options, OptionsGiven *given, int argc, char **argv) {
    memset(options, 0, sizeof *options);
    memset(given, 0, sizeof *given);
    for (int i = 0; i < OPTION_COUNT; i++) {
        option_set(options, &option_specs[i], option_specs[i].fallback);
    }
    for (int i = 1; i < argc;) {
        i += option_take(options, given, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
    }
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
    options_hide_secrets(options);
}

static inline bool options_ask_help(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) { return true; }
    }
    return false;
}

#endif
