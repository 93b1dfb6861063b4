// config.h: the dimensions of a model, and the descriptors that --model knows.
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include "model/architecture.h"

enum { GPT_LAYERS = 10000 }; // at most
// Llama 3.1's scaling of rotary frequencies; factor 0: none.
typedef struct {
    double factor, low, high;
    int64_t original; // positions of the model that was scaled
} RotaryScaling;
typedef struct {
    int64_t layers, heads, channels, vocab, padded_vocab, max_seq_len;
    int64_t arch; // row of architectures
    // 0: what the architecture says (gpt_config_complete)
    int64_t kv_heads, head_dim, ffn;
    double theta, eps;
    RotaryScaling scaling;
} GptConfig;

typedef struct {
    const char *name;
    int64_t layers, channels, heads, max_seq_len;
} GptDescriptor;

// GPT-2 by depth (llm.c's dN) and by size, and GPT-3's sizes. Head counts divide the channels. The
// paper's 13B has 5140 channels, which 40 heads do not divide; here it has 5120. gpt:100B is our
// own geometry: 12 * 80 * 10240^2 = 100.7e9.
static const GptDescriptor gpt_descriptors[] = {
    {"d6", 6, 384, 6, 1024},
    {"d12", 12, 768, 12, 1024},
    {"d24", 24, 1024, 16, 1024},
    {"d36", 36, 1280, 20, 1024},
    {"d48", 48, 1600, 25, 1024},
    {"d60", 60, 1920, 30, 1024},
    {"d72", 72, 2880, 30, 1024},
    {"d84", 84, 3456, 36, 1024},
    {"gpt2:124M", 12, 768, 12, 1024},
    {"gpt2:350M", 24, 1024, 16, 1024},
    {"gpt2:355M", 24, 1024, 16, 1024},
    {"gpt2:774M", 36, 1280, 20, 1024},
    {"gpt2:1558M", 48, 1600, 25, 1024},
    {"gpt3:125M", 12, 768, 12, 2048},
    {"gpt3:350M", 24, 1024, 16, 2048},
    {"gpt3:760M", 24, 1536, 16, 2048},
    {"gpt3:1.3B", 24, 2048, 16, 2048},
    {"gpt3:2.7B", 32, 2560, 32, 2048},
    {"gpt3:6.7B", 32, 4096, 32, 2048},
    {"gpt3:13B", 40, 5120, 40, 2048},
    {"gpt3:175B", 96, 12288, 96, 2048},
    {"gpt:100B", 80, 10240, 80, 2048},
};
enum {
    GPT_DESCRIPTORS = (int)(sizeof gpt_descriptors / sizeof gpt_descriptors[0]),
    GPT2_VOCAB = 50257,
    VOCAB_PADDING = 128
};

// Ends with EXIT_INPUT if no such model is possible. `source` names it in the message.
static inline void gpt_config_check(const GptConfig *c, const char *source) {
    const char *hint =
        "layers, heads, channels and vocab must be positive, and heads must divide channels";
    if (c->layers < 1 || c->layers > GPT_LAYERS || c->channels < 1 || c->channels > 1 << 20 ||
        c->heads < 1 || c->channels % c->heads || c->vocab < 1 || c->vocab > 1 << 24 ||
        c->padded_vocab < c->vocab || c->padded_vocab > 1 << 25 || c->max_seq_len < 1 ||
        c->max_seq_len > 1 << 24) {
        die(EXIT_INPUT, hint,
            "model %.100s is impossible: layers=%" PRId64 " heads=%" PRId64 " channels=%" PRId64
            " vocab=%" PRId64 " padded=%" PRId64 " max_seq_len=%" PRId64,
            source, c->layers, c->heads, c->channels, c->vocab, c->padded_vocab, c->max_seq_len);
    }
}

// Ends with EXIT_INPUT if `rows` sequences of T tokens exceed any memory. So the sizes of
// activations computed below cannot overflow.
static inline void gpt_work_check(const GptConfig *c, int64_t rows, int64_t T) {
    // an upper bound per token
    double bytes = rows * (double)T * c->channels * (c->layers + 2) * 128;
    if (bytes > 0x1p60) {
        die(EXIT_INPUT, "choose a smaller --micro-batch, --seq-len or --model",
            "%" PRId64 " sequences of %" PRId64 " tokens take up to %.0e bytes", rows, T, bytes);
    }
}

// Returns the row of architectures with this name of n characters; -1 if there is none.
static inline int gpt_architecture(const char *name, size_t n) {
    for (int i = 0; i < ARCHITECTURES; i++) {
        if (strlen(architectures[i].name) == n && !strncmp(architectures[i].name, name, n)) {
            return i;
        }
    }
    return -1;
}
// Parses "arch=gpt2,layers=6,heads=6,channels=384,vocab=256": in any order, each key at most once.
// arch may be missing; then it is gpt2. vocab may be missing; then it is GPT-2's. Errors end with
// EXIT_INPUT.
static inline GptConfig gpt_config_from_pairs(const char *text, int64_t seq_len) {
    GptConfig c = {.layers = 0};
    int64_t arch = 0;
    const char *names[] = {"layers", "heads", "channels", "vocab", "arch"};
    int64_t *slots[] = {&c.layers, &c.heads, &c.channels, &c.vocab, &arch};
    for (const char *p = text; *p;) {
        int i = 0;
        const size_t n = strcspn(p, "=");
        while (i < 5 && (strlen(names[i]) != n || strncmp(p, names[i], n))) { i++; }
        const char *value = p[n] ? p + n + 1 : p + n, *end = value + strcspn(value, ",");
        char *read = NULL;
        const int64_t number =
            i == 4 ? 1 + gpt_architecture(value, (size_t)(end - value)) : strtoll(value, &read, 10);
        if (i == 5 || p[n] != '=' || end == value || (i < 4 && read != end) || (*end && !end[1]) ||
            *slots[i] || number < 1 || number > 1 << 25) {
            die(EXIT_INPUT, "for example \"layers=6,heads=6,channels=384,vocab=256\"",
                "--model \"%.100s\": cannot read \"%.40s\"", text, p);
        }
        *slots[i] = number;
        p = *end ? end + 1 : end;
    }
    c.arch = max_i64(arch - 1, 0);
    if (!c.vocab) { c.vocab = GPT2_VOCAB; }
    c.padded_vocab = round_up(c.vocab, VOCAB_PADDING);
    c.max_seq_len = seq_len;
    gpt_config_check(&c, text);
    return c;
}

// Returns false if the text is not a descriptor. Then it is the name of a file.
static inline bool gpt_config_from_descriptor(GptConfig *config, const char *text,
                                              int64_t seq_len) {
    if (strchr(text, '=')) {
        *config = gpt_config_from_pairs(text, seq_len);
        return true;
    }
    const char *name = !strncmp(text, "gpt2:d", 6) ? text + 5 : text; // llm.c's other spelling
    for (int i = 0; i < GPT_DESCRIPTORS; i++) {
        const GptDescriptor *d = &gpt_descriptors[i];
        if (strcmp(name, d->name)) { continue; }
        const GptConfig c = {.layers = d->layers,
                             .heads = d->heads,
                             .channels = d->channels,
                             .vocab = GPT2_VOCAB,
                             .padded_vocab = round_up(GPT2_VOCAB, VOCAB_PADDING),
                             .max_seq_len = d->max_seq_len};
        *config = c;
        return true;
    }
    return false;
}

#endif
