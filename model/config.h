// config.h: the dimensions of a model, and how --model writes them.
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include "base/base.h"
#include "base/files.h"
#include "model/architecture.h"
#include "model/architectures.h"
#include "ops/ops.h"

enum {
    GPT_LAYERS = 10000, // at most
    GPT2_VOCAB = 50257,
    VOCAB_PADDING = 128
};
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
    // Experts in place of the MLP; 0: none. A token goes to the top_k experts of all, or of each of
    // `prototypes` equal groups (0: all are one group).
    int64_t experts, top_k, expert_ffn, prototypes;
    int64_t shared_experts, shared_expert_ffn; // beside them, to which all tokens go; width of each
    int64_t expert_ranks; // that the experts are divided over; 0: each rank has all
    // then: rows that are planned for each token of a rank; 0: as many as there can be
    int64_t expert_rows;
    double theta, eps;
    RotaryScaling scaling;
} GptConfig;

// Returns Llama 3.1's scaling by a factor.
static inline RotaryScaling llama3_scaling(double factor) {
    const RotaryScaling s = {.factor = factor, .low = 1, .high = 4, .original = 8192};
    return s;
}
// Returns the row of architectures with this name of n characters, with experts or without; tied: 1
// or 0, or -1 for its first row. -1 if there is none.
static inline int gpt_architecture(const char *name, size_t n, int tied, bool experts) {
    for (int i = 0; i < ARCHITECTURES; i++) {
        const Architecture *a = &architectures[i];
        if (strlen(a->name) == n && !strncmp(a->name, name, n) && a->experts == experts &&
            !a->exchanges && (tied < 0 || architecture_is_tied(a) == (tied > 0))) {
            return i;
        }
    }
    return -1;
}
// Fills in what is 0: heads that have keys and values of their own, heads that share the channels
// equally, and the architecture's defaults.
static inline GptConfig gpt_config_complete(GptConfig c) {
    const ArchitectureDefaults *d = &architectures[c.arch].defaults;
    if (!c.kv_heads) { c.kv_heads = c.heads; }
    if (!c.head_dim && c.heads) { c.head_dim = c.channels / c.heads; }
    if (c.experts && !c.top_k) { c.top_k = c.prototypes ? 1 : 2; }
    if (!c.ffn) { c.ffn = round_up((int64_t)(d->ffn * (double)c.channels), d->ffn_unit); }
    if (c.experts && !c.expert_ffn) { c.expert_ffn = c.ffn; }
    if (c.shared_experts && !c.shared_expert_ffn) { c.shared_expert_ffn = c.expert_ffn; }
    if (c.theta == 0) { c.theta = d->theta; }
    if (c.eps == 0) { c.eps = d->eps; }
    return c;
}

static inline int64_t gpt_groups(const GptConfig *c) { return max_i64(1, c->prototypes); }
// Returns how many experts a token goes to.
static inline int64_t gpt_choices(const GptConfig *c) { return gpt_groups(c) * c->top_k; }
static inline Router gpt_router(const GptConfig *c) {
    const Router r = {.experts = c->experts, .groups = gpt_groups(c), .top_k = c->top_k};
    return r;
}
// Divides the experts over so many ranks, which plan for `buffer` times the mean number of rows
// (0: for the most that there can be). Ends with EXIT_INPUT if that is not possible.
static inline GptConfig gpt_divide_experts(GptConfig c, int64_t ranks, double buffer) {
    const Architecture *a = &architectures[c.arch];
    if (ranks == 1 || !c.experts) { return c; }
    if (c.experts % ranks) {
        die(EXIT_INPUT, "give a number that divides the experts",
            "--expert-parallel %" PRId64 ": there are %" PRId64 " experts", ranks, c.experts);
    }
    c.expert_ranks = ranks;
    c.expert_rows = (int64_t)ceil(buffer * (double)gpt_choices(&c));
    while (!architectures[c.arch].exchanges || strcmp(architectures[c.arch].name, a->name) ||
           architecture_is_tied(&architectures[c.arch]) != architecture_is_tied(a)) {
        c.arch = (c.arch + 1) % ARCHITECTURES;
    }
    return c;
}
static inline int64_t gpt_expert_ranks(const GptConfig *c) { return max_i64(1, c->expert_ranks); }
// Ends with EXIT_INPUT if blocks cannot have such experts.
static inline void gpt_experts_check(const GptConfig *c, const char *source) {
    const int64_t groups = gpt_groups(c);
    if (!c->experts) {
        if (!c->top_k && !c->expert_ffn && !c->prototypes && !c->shared_experts &&
            !c->shared_expert_ffn) {
            return;
        }
        die(EXIT_INPUT, "give experts, as in \"arch=llama,experts=8,top_k=2,expert_ffn=512\"",
            "model %.100s: top_k, expert_ffn, prototypes, shared_experts and shared_expert_ffn are "
            "of blocks with experts",
            source);
    }
    if (c->shared_expert_ffn && !c->shared_experts) {
        die(EXIT_INPUT, "give shared_experts=1, or leave it out",
            "model %.100s: shared_expert_ffn is the width of shared_experts", source);
    }
    if (c->shared_experts > 1 << 10 || c->shared_experts * c->shared_expert_ffn > 1 << 22) {
        die(EXIT_INPUT, "together they have at most 4194304 columns",
            "model %.100s is impossible: shared_experts=%" PRId64 " shared_expert_ffn=%" PRId64,
            source, c->shared_experts, c->shared_expert_ffn);
    }
    if (c->experts > 1 << 16 || c->experts % groups || c->top_k < 1 ||
        c->top_k > c->experts / groups || gpt_choices(c) > 1024 || c->expert_ffn > 1 << 22) {
        die(EXIT_INPUT,
            "prototypes must divide experts, and top_k be at most the experts of each of them",
            "model %.100s is impossible: experts=%" PRId64 " prototypes=%" PRId64 " top_k=%" PRId64
            " expert_ffn=%" PRId64,
            source, c->experts, groups, c->top_k, c->expert_ffn);
    }
}
// Ends with EXIT_INPUT if no such model is possible. `source` names it in the message.
static inline void gpt_config_check(const GptConfig *config, const char *source) {
    const GptConfig complete = gpt_config_complete(*config), *c = &complete;
    const bool rotary = architectures[c->arch].defaults.theta > 0;
    gpt_experts_check(c, source);
    const char *hint =
        "layers, heads, channels and vocab must be positive, and heads must divide channels";
    if (c->layers < 1 || c->layers > GPT_LAYERS || c->channels < 1 || c->channels > 1 << 20 ||
        c->heads < 1 || (!config->head_dim && c->channels % c->heads) || c->vocab < 1 ||
        c->vocab > 1 << 24 || c->padded_vocab < c->vocab || c->padded_vocab > 1 << 25 ||
        c->max_seq_len < 1 || c->max_seq_len > 1 << 24) {
        die(EXIT_INPUT, hint,
            "model %.100s is impossible: layers=%" PRId64 " heads=%" PRId64 " channels=%" PRId64
            " vocab=%" PRId64 " padded=%" PRId64 " max_seq_len=%" PRId64,
            source, c->layers, c->heads, c->channels, c->vocab, c->padded_vocab, c->max_seq_len);
    }
    if (!rotary &&
        (c->kv_heads != c->heads || c->head_dim * c->heads != c->channels ||
         c->ffn != 4 * c->channels || c->theta != 0 || c->eps != 0 || c->scaling.factor != 0)) {
        die(EXIT_INPUT, "give arch=llama, qwen2, qwen3 or nano with these keys",
            "model %.100s: GPT-2 has no kv_heads, head_dim, ffn, theta, eps and rope_factor of its "
            "own",
            source);
    }
    if (!rotary) { return; }
    const RotaryScaling *s = &c->scaling;
    if (s->factor != 0 && !(s->factor > 0 && s->low > 0 && s->high > s->low &&
                            isfinite(s->factor * s->high) && s->original >= 1)) {
        die(EXIT_INPUT, "the factor must be over 0, and the high one over the low one",
            "model %.100s: its rotary positions cannot be scaled by %g (low %g, high %g, %" PRId64
            " positions)",
            source, s->factor, s->low, s->high, s->original);
    }
    hint = "kv_heads must divide heads, head_dim must be even and at most 256, theta over 1, and "
           "eps over 0";
    if (c->kv_heads < 1 || c->heads % c->kv_heads || c->heads > 1 << 16 || c->head_dim < 2 ||
        c->head_dim % 2 || c->head_dim > 2 * ROTARY_PAIRS || c->ffn < 1 || c->ffn > 1 << 22 ||
        !(c->theta > 1 && c->theta < 1e12) || !(c->eps > 0 && c->eps < 1)) {
        die(EXIT_INPUT, hint,
            "model %.100s is impossible: heads=%" PRId64 " kv_heads=%" PRId64 " head_dim=%" PRId64
            " ffn=%" PRId64 " theta=%g eps=%g",
            source, c->heads, c->kv_heads, c->head_dim, c->ffn, c->theta, c->eps);
    }
}

// Ends with EXIT_INPUT if `rows` sequences of T tokens exceed any memory. So the sizes of
// activations computed below cannot overflow.
static inline void gpt_work_check(const GptConfig *c, int64_t rows, int64_t T) {
    // an upper bound per token
    const int64_t experts = gpt_choices(c) * max_i64(c->expert_ffn, c->channels) + c->experts +
                            c->shared_experts * c->shared_expert_ffn,
                  widest = max_i64(max_i64(c->channels, experts / 4),
                                   max_i64(c->ffn / 4, c->heads * c->head_dim));
    double bytes = rows * (double)T * widest * (c->layers + 2) * 128;
    if (bytes > 0x1p60) {
        die(EXIT_INPUT, "choose a smaller --micro-batch, --seq-len or --model",
            "%" PRId64 " sequences of %" PRId64 " tokens take up to %.0e bytes", rows, T, bytes);
    }
}

// The keys of --model "key=value,...", and where their values go.
// rope_factor: Llama 3.1's scaling of the rotary frequencies. positions: sequences are at most as
// long; if missing, as long as --seq-len.
// ffn: of a block with experts, the width of each, unless expert_ffn says it.
enum { CONFIG_INTEGERS = 14 };
static const char *const gpt_keys[] = {"layers",
                                       "heads",
                                       "channels",
                                       "vocab",
                                       "kv_heads",
                                       "head_dim",
                                       "ffn",
                                       "positions",
                                       "experts",
                                       "top_k",
                                       "expert_ffn",
                                       "prototypes",
                                       "shared_experts",
                                       "shared_expert_ffn",
                                       "theta",
                                       "eps",
                                       "rope_factor",
                                       "tie",
                                       "arch"};
typedef struct {
    GptConfig config;
    int64_t tie;
    const char *arch; // its name, of arch_bytes characters; NULL: not given
    size_t arch_bytes;
    unsigned given; // bits of gpt_keys
} GptPairs;
// Reads the value of a key. Returns false if it is no such value.
static inline bool gpt_read_pair(GptPairs *pairs, int key, const char *value, size_t n) {
    const char *name = gpt_keys[key];
    GptConfig *c = &pairs->config;
    int64_t *integers[CONFIG_INTEGERS] = {&c->layers,
                                          &c->heads,
                                          &c->channels,
                                          &c->vocab,
                                          &c->kv_heads,
                                          &c->head_dim,
                                          &c->ffn,
                                          &c->max_seq_len,
                                          &c->experts,
                                          &c->top_k,
                                          &c->expert_ffn,
                                          &c->prototypes,
                                          &c->shared_experts,
                                          &c->shared_expert_ffn};
    char *end = NULL;
    if (key < CONFIG_INTEGERS) {
        const int64_t number = *integers[key] = strtoll(value, &end, 10);
        return end == value + n && number >= 1 && number <= 1 << 25;
    }
    if (!strcmp(name, "arch")) {
        pairs->arch = value;
        pairs->arch_bytes = n;
        return gpt_architecture(value, n, -1, false) >= 0;
    }
    if (!strcmp(name, "tie")) {
        pairs->tie = *value == '1';
        return n == 1 && (*value == '0' || *value == '1');
    }
    double *number = !strcmp(name, "theta") ? &c->theta
                     : !strcmp(name, "eps") ? &c->eps
                                            : &c->scaling.factor;
    *number = strtod(value, &end);
    return end == value + n && *number > 0 && *number < 1e15;
}
// Returns the row of architectures that the pairs name. Ends with EXIT_INPUT if it has no such row.
static inline int64_t gpt_pairs_architecture(const GptPairs *pairs, const char *text) {
    const char *name = pairs->arch ? pairs->arch : "gpt2";
    const size_t n = pairs->arch ? pairs->arch_bytes : 4;
    const bool experts = pairs->config.experts > 0;
    if (gpt_architecture(name, n, -1, experts) < 0) {
        die(EXIT_INPUT, "blocks of arch=gpt2, llama and qwen3 can have experts",
            "--model \"%.100s\": arch=%.*s has no experts", text, (int)n, name);
    }
    const int row = gpt_architecture(name, n, (int)pairs->tie, experts);
    if (row < 0) {
        die(EXIT_INPUT, text_of("leave tie out, or give tie=%d", !pairs->tie).at,
            "--model \"%.100s\": arch=%.*s always has %s", text, (int)n, name,
            pairs->tie ? "a classifier of its own" : "its classifier tied to the embedding");
    }
    return row;
}
// Parses "arch=llama,layers=6,heads=6,channels=384,vocab=256": in any order, each key at most once.
// Without arch it is gpt2, and without vocab GPT-2's. Errors end with EXIT_INPUT.
static inline GptConfig gpt_config_from_pairs(const char *text, int64_t seq_len) {
    GptPairs pairs = {.tie = -1};
    for (const char *p = text; *p;) {
        int key = 0;
        const size_t n = strcspn(p, "=");
        while (key < LENGTH_OF(gpt_keys) &&
               (strlen(gpt_keys[key]) != n || strncmp(p, gpt_keys[key], n))) {
            key++;
        }
        const char *value = p[n] ? p + n + 1 : p + n, *end = value + strcspn(value, ",");
        if (key == LENGTH_OF(gpt_keys) || p[n] != '=' || end == value || (*end && !end[1]) ||
            (pairs.given & 1u << key) ||
            !gpt_read_pair(&pairs, key, value, (size_t)(end - value))) {
            die(EXIT_INPUT, "for example \"layers=6,heads=6,channels=384,vocab=256\"",
                "--model \"%.100s\": cannot read \"%.40s\"", text, p);
        }
        pairs.given |= 1u << key;
        p = *end ? end + 1 : end;
    }
    GptConfig c = pairs.config;
    c.arch = gpt_pairs_architecture(&pairs, text);
    if (c.experts && c.ffn && c.expert_ffn) {
        die(EXIT_INPUT, "give expert_ffn alone",
            "--model \"%.100s\": ffn and expert_ffn are both the width of an expert", text);
    }
    if (!c.vocab) { c.vocab = GPT2_VOCAB; }
    c.padded_vocab = round_up(c.vocab, VOCAB_PADDING);
    if (!c.max_seq_len) { c.max_seq_len = seq_len; }
    if (c.scaling.factor > 0) { c.scaling = llama3_scaling(c.scaling.factor); }
    gpt_config_check(&c, text);
    return gpt_config_complete(c);
}

#endif
