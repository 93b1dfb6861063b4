// model_names.h: what to type instead of a --model that does not exist.
#ifndef MODEL_NAMES_H
#define MODEL_NAMES_H

#include "base/base.h"
#include "base/files.h"
#include "cli/option_hints.h"
#include "model/config.h"
#include "model/presets.h"

#include <strings.h> // strcasecmp

static const char *const model_synonyms[][2] = {{"gpt2", "gpt2:124M"},
                                                {"gpt2-small", "gpt2:124M"},
                                                {"gpt2-medium", "gpt2:355M"},
                                                {"gpt2-large", "gpt2:774M"},
                                                {"gpt2-xl", "gpt2:1558M"}};

// Returns the name of a model that a text means: as Hugging Face calls it, or with another sign
// before its size, or in other letters, or without what is before the size. NULL if there is none.
static inline const char *model_nearest(const char *text) {
    const char *name = strrchr(text, '/') ? strrchr(text, '/') + 1 : text;
    for (int i = 0; i < LENGTH_OF(model_synonyms); i++) {
        if (!strcasecmp(name, model_synonyms[i][0])) { return model_synonyms[i][1]; }
    }
    const char *nearest = NULL;
    int least = 3;
    for (int i = 0; i < GPT_DESCRIPTORS; i++) {
        const char *known = gpt_descriptors[i].name, *size = strchr(known, ':');
        const bool only_size = size && !strcasecmp(size + 1, name);
        char plain[2][OPTION_NAME_MAX + 1];
        option_plain_name(name, plain[0]);
        option_plain_name(known, plain[1]);
        const int distance = only_size ? 0 : option_distance(plain[0], plain[1]);
        if (distance >= least) { continue; }
        least = distance;
        nearest = known;
    }
    return nearest;
}
// Ends the program (EXIT_INPUT) if sequences of seq_len tokens are longer than a model takes.
static inline void model_check_length(const GptConfig *config, int64_t seq_len, const char *text) {
    if (seq_len <= config->max_seq_len) { return; }
    const Text hint = text_of("give --seq-len %" PRId64 " or less, or a model of dimensions "
                              "(layers=..., heads=..., channels=...), which gets as many as asked",
                              config->max_seq_len);
    die(EXIT_INPUT, hint.at,
        "--seq-len %" PRId64 " is more than this model's %" PRId64
        " positions (max_seq_len of --model %s)",
        seq_len, config->max_seq_len, text);
}
// Ends the program (EXIT_INPUT) if --model is neither a name of a model nor that of a file.
static inline void model_check_name(const char *text) {
    char hint[600];
    size_t n = 0;
    const char *nearest = model_nearest(text);
    if (!access(text, F_OK) || errno != ENOENT) { return; }
    if (nearest) { n = (size_t)snprintf(hint, sizeof hint, "the nearest is %s; ", nearest); }
    n += (size_t)snprintf(hint + n, sizeof hint - n, "names are");
    for (int i = 0; i < GPT_DESCRIPTORS && n < sizeof hint; i++) {
        n += (size_t)snprintf(hint + n, sizeof hint - n, " %s", gpt_descriptors[i].name);
    }
    die(EXIT_INPUT, hint, "--model %.200s: there is no such name, file or folder", text);
}

#endif
