// option_help.h: the table of flags as texts: --help of one screen, --help TOPIC with examples,
// --help all, a manual page (--help man), completion for bash (--help completion).
#ifndef OPTION_HELP_H
#define OPTION_HELP_H

#include "base/base.h"
#include "base/files.h"
#include "base/readable.h"
#include "comm/mpi.h"
#include "options.h"
#include "plan/cluster.h"
#include "state/optimizer.h"

#include <strings.h> // strcasecmp

// A group of the table. Each example is a command line that the parser accepts. picture: three
// lines, of a training system: what it does; else NULL.
typedef struct {
    const char *group, *title, *examples[2], *picture;
} HelpTopic;
static const HelpTopic help_topics[] = {
    {"data",
     "shards of tokens, sequences and batches",
     {"./train_gpt --train 'data/mine_train_*.bin' --val 'data/mine_val_*.bin' --seq-len 256",
      "mpirun -np 4 ./train_gpt --seq-len 1024 --micro-batch 8 --batch-tokens 524288"}},
    {"model",
     "which model: by name, by its dimensions, or from a file",
     {"./train_gpt --model gpt2:124M",
      "./train_gpt --model layers=6,heads=6,channels=384,vocab=256"}},
    {"run",
     "steps, checkpoints, validation, samples, logs, forecasts",
     {"./train_gpt --steps 2000 --out out/mine --save-every 500 --log out/mine/log.jsonl",
      "./train_gpt --dry-run --model gpt2:1558M --json"}},
    {"optimizer",
     "which optimizer, learning rate, clipping",
     {"./train_gpt --lr 6e-4 --warmup 700 --final-lr-fraction 0.1 --weight-decay 0.1",
      "./train_gpt --optimizer sgd --momentum 0.9 --lr 0.1 --lr-schedule constant"}},
    {"precision",
     "fp32 and bf16, recomputation, memory budgets, offloading",
     {"./train_gpt --dtype bf16 --recompute block",
      "./train_gpt --device-memory 16G --offload-dir /scratch --host-memory 64G"},
     "  device  [block 7][block 8]            --offload params: blocks come to the\n"
     "  host    [blocks 1 to 48, optimizer]   device while others compute, and their\n"
     "  disk    [what exceeds --host-memory]  gradients leave it\n"},
    {"ZeRO",
     "states divided over ranks, quantized messages (ZeRO++)",
     {"mpirun -np 8 ./train_gpt --zero 3 --dtype bf16",
      "mpirun -np 8 ./train_gpt --zero 3 --zero-quantized-weights --zero-quantized-gradients"},
     "  stage 1   rank 0: PP GG O.   rank 1: PP GG .O   P parameters, G gradients,\n"
     "  stage 2   rank 0: PP G. O.   rank 1: PP .G .O   O optimizer states, each\n"
     "  stage 3   rank 0: P. G. O.   rank 1: .P .G .O   in two parts; . elsewhere\n"},
    {"pipeline",
     "blocks divided over ranks, and the planner",
     {"mpirun -np 4 ./train_gpt --pipeline 4 --micro-batches 8",
      "./train_gpt --plan --model gpt2:1558M --cluster 2x8,gpu=h100"},
     "  rank 0 | F0 F1 .. B0 F2 B1 F3 B2 .. B3  the first blocks; F forward, B back\n"
     "  rank 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 ..  the others; of micro-batches 0 to 3,\n"
     "             time -->                     two dots: idle\n"},
    {"cyclic",
     "micro-batches delayed against each other",
     {"mpirun -np 4 ./train_gpt --cyclic v2", "./train_gpt --cyclic v1 --cyclic-stages 4"},
     "  rank 0 | F1 F2 F3 B3 B2 B1 F1 F2 ...  stages 1 to 3, forward and back: a rank\n"
     "  rank 1 | B2 B1 F1 F2 F3 B3 B2 B1 ...  is two slots behind the one before, so\n"
     "  rank 2 | F3 B3 B2 B1 F1 F2 F3 B3 ...  memory and messages are even in time\n"},
    {"pseudo",
     "blocks that share parameters, then separate",
     {"./train_gpt --share all --delink-at 1000 --steps 5000",
      "./train_gpt --share 4x3 --share-lr 1e-3"},
     "  first  [W][W][W][W]   --share all: all blocks are one, with the memory of one\n"
     "  then   [W][X][Y][Z]   from --delink-at on: copies of it, which train apart\n"
     "         time -->       and begin where the shared one ended\n"},
    {"experts",
     "mixtures of experts in place of MLPs",
     {"./train_gpt --model "
      "\"arch=llama,layers=6,heads=6,channels=384,experts=8,top_k=2,expert_ffn=512\"",
      "mpirun -np 4 ./train_gpt --model mixtral:8x7B --expert-parallel 4 --moe-balance bias"},
     "  token a -> router -> [expert 1] [expert 2] | [expert 3] [expert 4]  a token\n"
     "                          rank 0    |            rank 1      |     goes to its\n"
     "  token a <- sum of: weight x output  <---- weight x output           top_k\n"},
    {"privacy",
     "differentially private training",
     {"./train_gpt --dp-epsilon 3 --dp-delta 1e-6 --steps 1000 --out out/private",
      "./train_gpt --dp-account q=0.01,sigma=1,steps=1000,delta=1e-6"},
     "  sample 1's gradient --> cut to length R \\\n"
     "  sample 2's gradient --> cut to length R  > sum + noise --> update; epsilon\n"
     "  sample 3's gradient --> cut to length R /  of sigma R      grows with each\n"},
    {"cluster",
     "lost ranks, and clusters that are not there",
     {"./train_gpt --dry-run --zero 3 --cluster 24x16,gpu=v100",
      "mpirun -np 4 ./train_gpt --watchdog 60 --ranks-per-node 2"}},
};
enum { HELP_TOPICS = LENGTH_OF(help_topics) };
static const int help_most_used[] = {
    OPTION_INDEX_train,       OPTION_INDEX_val,          OPTION_INDEX_model, OPTION_INDEX_seq_len,
    OPTION_INDEX_micro_batch, OPTION_INDEX_batch_tokens, OPTION_INDEX_steps, OPTION_INDEX_lr,
    OPTION_INDEX_out,         OPTION_INDEX_resume,       OPTION_INDEX_dtype, OPTION_INDEX_zero,
    OPTION_INDEX_config,      OPTION_INDEX_dry_run};
static const char help_usage[] = MPIRUN "./train_gpt [--flag value ...]";
static const char help_exit_codes[] =
    "Exit codes: 0 done, 2 bad input, 3 resources (memory, disk), 4 a peer was lost.";
enum { HELP_INDENT = 30, HELP_SHORT_INDENT = 22 };

// -------------------------------------------------------------------------------------------------
// Parts

static inline void help_wrap(FILE *to, const char *text, int at) {
    print_words(to, text, at, HELP_INDENT, ROW_COLUMNS);
}
// Prints a flag on one line: of its help as many words as fit.
static inline void help_line(FILE *to, const OptionSpec *spec, const char *names) {
    const int width = ROW_COLUMNS - HELP_SHORT_INDENT;
    int n = (int)strcspn(spec->help, ";(");
    if (n > width) {
        for (n = width - 3; spec->help[n] != ' ';) { n--; }
    }
    const bool cut = spec->help[n] == ' ';
    while (n > 0 && spec->help[n - 1] == ' ') { n--; }
    fprintf(to, "  %-*s%.*s%s\n", HELP_SHORT_INDENT - 2, names, n, spec->help, cut ? " ..." : "");
}
static inline Text help_names(const OptionSpec *spec) {
    return text_of("--%s%s%s", spec->name, *spec->letter ? ", -" : "", spec->letter);
}
// Writes which values a flag takes.
static inline Text help_values(const OptionSpec *spec) {
    const char *kind = spec->kind == OPTION_NUM     ? "a number"
                       : spec->kind == OPTION_POWER ? "a power of two"
                                                    : "a whole number";
    switch (spec->kind) {
    case OPTION_FLAG: return text_of("0 or 1; alone: 1");
    case OPTION_PICK: return text_of("one of %s", spec->choices);
    case OPTION_SECRET:
    case OPTION_TEXT: return text_of("%s", *spec->choices ? spec->choices : "text");
    default:
        return text_of("%s%s%s from %.10g to %.10g", spec->choices, *spec->choices ? ": " : "",
                       kind, spec->low, spec->high);
    }
}
static inline const char *help_default(const OptionSpec *spec) {
    return *spec->fallback ? spec->fallback : "none";
}
// Writes what a flag means, after the optimizers that it belongs to if others do not have it.
static inline Text help_meaning(const OptionSpec *spec) {
    Text text = text_of("%s", "");
    bool lacked = false;
    for (size_t i = 0; i < sizeof optimizers / sizeof *optimizers; i++) {
        const bool lacks = optimizer_lacks(&optimizers[i], spec->name);
        if (!lacks) {
            text = text_of("%s%s%s", text.at, *text.at ? ", " : "of ", optimizers[i].name);
        }
        lacked = lacked || lacks;
    }
    return !*text.at || !lacked ? text_of("%s", spec->help)
                                : text_of("%s: %s", text.at, spec->help);
}
// Prints a flag, what it means, its values and its default.
static inline void help_flag(FILE *to, const OptionSpec *spec) {
    const int at = fprintf(to, "  %-*s", HELP_INDENT - 2, help_names(spec).at);
    help_wrap(to, *spec->help ? help_meaning(spec).at : "which one", at);
    fprintf(to, "%*s", HELP_INDENT, "");
    help_wrap(to, text_of("[default %s; %s]", help_default(spec), help_values(spec).at).at,
              HELP_INDENT);
}
static inline void help_cluster_keys(FILE *to) {
    fprintf(to, "\nkeys of --cluster\n");
    for (int k = 0; k < CLUSTER_KEYS; k++) {
        fprintf(to, "  %-26s %s\n", cluster_keys[k].name, cluster_keys[k].help);
    }
}

// -------------------------------------------------------------------------------------------------
// The texts

// Prints one screen: the flags that most people need, and the topics.
static inline void help_short(FILE *to) {
    fprintf(to, "train_gpt pretrains GPT models. %s\n\n", help_usage);
    for (int i = 0; i < LENGTH_OF(help_most_used); i++) {
        const OptionSpec *spec = &option_specs[help_most_used[i]];
        help_line(to, spec, help_names(spec).at);
    }
    Text topics = text_of("--help TOPIC explains the flags of a topic:");
    for (int i = 0; i < HELP_TOPICS; i++) {
        topics =
            text_of("%s %s%s", topics.at, help_topics[i].group, i + 1 < HELP_TOPICS ? "," : "");
    }
    fputs("\n", to);
    print_words(to, topics.at, 0, 0, ROW_COLUMNS);
    fprintf(to, "--help FLAG explains a flag, --help all lists all flags; --version;\n"
                "--compat lists which do not combine.\n");
    print_words(to, help_exit_codes, 0, 0, ROW_COLUMNS);
}
static inline void help_topic(FILE *to, const HelpTopic *topic) {
    fprintf(to, "%s: %s\n\n", topic->group, topic->title);
    if (topic->picture) { fprintf(to, "%s\n", topic->picture); }
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (!strcmp(option_specs[i].group, topic->group)) { help_flag(to, &option_specs[i]); }
    }
    if (!strcmp(topic->group, "cluster")) { help_cluster_keys(to); }
    fprintf(to, "\nexamples\n  %s\n  %s\n", topic->examples[0], topic->examples[1]);
    if (*root_needs()) { fprintf(to, "as root, mpirun needs before it: %s\n", root_needs()); }
}
// Prints every flag on one line.
static inline void options_print_help(FILE *to) {
    fprintf(to, "train_gpt: pretrains GPT models.   %s\n", help_usage);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        if (i == 0 || strcmp(spec->group, option_specs[i - 1].group)) {
            fprintf(to, "\n%s\n", spec->group);
        }
        fprintf(to, "  %-26s %s%s%s%s%s (default %s)\n", help_names(spec).at,
                *spec->choices ? "<" : "", spec->choices, *spec->choices ? ">" : "",
                *spec->choices ? " " : "", help_meaning(spec).at, help_default(spec));
    }
    help_cluster_keys(to);
    fprintf(to, "\n--help TOPIC (or -h): ranges and examples; --version.\n%s\n", help_exit_codes);
}
// Prints a text of a manual page: its program would take a hyphen for a soft one, and a period or
// an apostrophe at the begin of a line for a command.
static inline void help_man_text(FILE *to, const char *text) {
    for (const char *c = text; *c; c++) {
        fprintf(to, *c == '-' || *c == '\\' ? "\\%c" : "%c", *c);
    }
}
static inline void help_man(FILE *to) {
    fprintf(to, ".TH TRAIN_GPT 1\n.SH NAME\ntrain_gpt \\- pretrains GPT models\n.SH SYNOPSIS\n");
    help_man_text(to, help_usage);
    for (int t = 0; t < HELP_TOPICS; t++) {
        fprintf(to, "\n.SH %s\n", help_topics[t].group);
        for (int i = 0; i < OPTION_COUNT; i++) {
            const OptionSpec *spec = &option_specs[i];
            if (strcmp(spec->group, help_topics[t].group)) { continue; }
            fprintf(to, ".TP\n.B \"");
            help_man_text(to, help_names(spec).at);
            fprintf(to, "\"\n\\&");
            help_man_text(to, text_of("%s [default %s; %s]", help_meaning(spec).at,
                                      help_default(spec), help_values(spec).at)
                                  .at);
            fprintf(to, "\n");
        }
        fprintf(to, ".PP\nExamples:\n.nf\n");
        for (int i = 0; i < 2; i++) {
            fprintf(to, "\\&");
            help_man_text(to, help_topics[t].examples[i]);
            fprintf(to, "\n");
        }
        fprintf(to, ".fi");
    }
    fprintf(to, "\n.SH EXIT STATUS\n%s\n", help_exit_codes + strlen("Exit codes: "));
}
// Prints a completion for bash: flags and choices of the program, also behind mpirun; else names of
// files.
static inline void help_completion(FILE *to) {
    fprintf(to, "# source <(./train_gpt --help completion)\n"
                "_train_gpt() {\n"
                "    local word=${COMP_WORDS[COMP_CWORD]} i program=0 words=\n"
                "    for ((i = 0; i < COMP_CWORD; i++)); do\n"
                "        [[ ${COMP_WORDS[i]} != *train_gpt* ]] || program=1\n"
                "    done\n"
                "    ((program)) || return 0\n"
                "    case ${COMP_WORDS[COMP_CWORD - 1]} in\n"
                "    --help) words='all man completion");
    for (int t = 0; t < HELP_TOPICS; t++) { fprintf(to, " %s", help_topics[t].group); }
    fprintf(to, "' ;;\n");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        if (spec->kind != OPTION_PICK) { continue; }
        fprintf(to, "    --%s) words='%s' ;;\n", spec->name, spec->choices);
    }
    fprintf(to, "    *) [[ $word != -* ]] || words='--help --version");
    for (int i = 0; i < OPTION_COUNT; i++) { fprintf(to, " --%s", option_specs[i].name); }
    fprintf(to, "' ;;\n"
                "    esac\n"
                "    mapfile -t COMPREPLY < <(compgen -W \"${words//|/ }\" -- \"$word\")\n"
                "}\n"
                "complete -o default -F _train_gpt train_gpt train_gpt_cuda mpirun\n");
}

// -------------------------------------------------------------------------------------------------
// What is asked for

// Returns what follows --help or -h, of a flag the name or the letter with its dash; "" if nothing
// does; NULL if the command line has neither.
static inline const char *options_ask_help(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "--help=", 7)) { return argv[i] + 7; }
        if (strcmp(argv[i], "--help") && strcmp(argv[i], "-h")) { continue; }
        const char *next = i + 1 < argc ? argv[i + 1] : "";
        return !strncmp(next, "--", 2) ? next + 2 : next;
    }
    return NULL;
}
static inline void help_flag_or_refuse(FILE *to, const char *name) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        const bool short_form = *name == '-' && *spec->letter && !strcmp(spec->letter, name + 1);
        if (short_form || !strcmp(spec->name, name)) {
            help_flag(to, spec);
            return;
        }
    }
    Text topics = text_of("all, man, completion, the name of a flag");
    for (int i = 0; i < HELP_TOPICS; i++) {
        topics = text_of("%s, %s", topics.at, help_topics[i].group);
    }
    die(EXIT_INPUT, topics.at, "--help %.80s: there is no such topic", name);
}
static inline void options_help(FILE *to, const char *topic) {
    static const struct {
        const char *name;
        void (*print)(FILE *);
    } whole[] = {{"", help_short},
                 {"all", options_print_help},
                 {"man", help_man},
                 {"completion", help_completion}};
    for (int i = 0; i < LENGTH_OF(whole); i++) {
        if (!strcmp(whole[i].name, topic)) {
            whole[i].print(to);
            return;
        }
    }
    for (int i = 0; i < HELP_TOPICS; i++) {
        if (!strcasecmp(help_topics[i].group, topic)) {
            help_topic(to, &help_topics[i]);
            return;
        }
    }
    help_flag_or_refuse(to, topic);
}

#endif
