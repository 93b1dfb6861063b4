// gpt.h: the model. Its architecture is exactly GPT-2's: learned positions, pre-layernorm blocks,
// tanh GELU, and a head tied to wte.
//
// Units     are what a schedule computes: 0 is the embedding, 1..L are the blocks, and L + 1 is the
//           head (final layernorm and classifier).
// Storages  are contiguous buffers of parameters: wte | wpe | one per block | lnf. Each unit uses
//           some: the embedding {wte, wpe}, a block its own, the head {lnf, wte}. The embedding and
//           the head use the same wte; that is the tie. Blocks may share a storage in the same way
//           (GptShare; pseudo.h), which only reduces the number of storages. All code that shards,
//           gathers, saves or moves parameters refers to storages by number.
// Tensors   are described by one table, tensor_specs: name, class of storage, shape, decay, initial
//           values. Its order is llm.c's order on disk, where all layers of a tensor are
//           contiguous. In memory a block's tensors are contiguous.
// Backward  has two parts. The input part computes the gradient of the unit's input, without the
//           gradients of parameters. The weight part computes those. It may run any time later,
//           from what the input part left in BlockGradients. One exception: the head's input part
//           also computes the gradient of wte, because its logits exist only for a chunk of rows at
//           a time. (dp.h has another exception.)
//
// Activations are (N, ...) with N = rows * T, where rows are the sequences of the current action.
#ifndef GPT_H
#define GPT_H

#include "ops/ops.h" // the arithmetic

// -------------------------------------------------------------------------------------------------
// Configuration and descriptors
enum { GPT_LAYERS = 10000 }; // at most
typedef struct {
    int64_t layers, heads, channels, vocab, padded_vocab, max_seq_len;
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
    double bytes = (double)rows * (double)T * (double)c->channels * (double)(c->layers + 2) * 128;
    if (bytes > 0x1p60) {
        die(EXIT_INPUT, "choose a smaller --micro-batch, --seq-len or --model",
            "%" PRId64 " sequences of %" PRId64 " tokens take up to %.0e bytes", rows, T, bytes);
    }
}

// Parses "layers=6,heads=6,channels=384,vocab=256": in any order, each key at most once. vocab may
// be missing; then it is GPT-2's. Errors end with EXIT_INPUT.
static inline GptConfig gpt_config_from_pairs(const char *text, int64_t seq_len) {
    GptConfig c = {0, 0, 0, 0, 0, 0};
    const char *names[] = {"layers", "heads", "channels", "vocab"};
    int64_t *slots[] = {&c.layers, &c.heads, &c.channels, &c.vocab};
    for (const char *p = text; *p;) {
        int i = 0;
        size_t n = strcspn(p, "=");
        while (i < 4 && (strlen(names[i]) != n || strncmp(p, names[i], n))) { i++; }
        char *end = NULL;
        long long value = i < 4 && p[n] == '=' ? strtoll(p + n + 1, &end, 10) : 0;
        if (i == 4 || p[n] != '=' || end == p + n + 1 || (*end && (*end != ',' || !end[1])) ||
            *slots[i] || value < 1 || value > 1 << 25) {
            die(EXIT_INPUT, "for example \"layers=6,heads=6,channels=384,vocab=256\"",
                "--model \"%.100s\": cannot read \"%.40s\"", text, p);
        }
        *slots[i] = value;
        p = *end ? end + 1 : end;
    }
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
        GptConfig c = {
            d->layers,     d->heads, d->channels, GPT2_VOCAB, round_up(GPT2_VOCAB, VOCAB_PADDING),
            d->max_seq_len};
        *config = c;
        return true;
    }
    return false;
}

// -------------------------------------------------------------------------------------------------
// Tensors and storages
typedef enum { UNIT_EMBEDDING, UNIT_BLOCK, UNIT_HEAD, UNIT_CLASSES } UnitClass;
typedef enum { STORAGE_WTE, STORAGE_WPE, STORAGE_BLOCK, STORAGE_LNF, STORAGE_CLASSES } StorageClass;
typedef enum {
    WTE,
    WPE,
    LN1W,
    LN1B,
    QKVW,
    QKVB,
    ATTPROJW,
    ATTPROJB,
    LN2W,
    LN2B,
    FCW,
    FCB,
    FCPROJW,
    FCPROJB,
    LNFW,
    LNFB,
    TENSORS
} TensorId;
// Random values are 0.02 z, or 0.02 z / sqrt(2 L) for the layers that write to the residual stream.
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL, INIT_RESIDUAL } TensorInit;

// A dimension of a tensor is a multiple of one of these quantities.
typedef enum { OF_ONE, OF_CHANNELS, OF_VOCAB, OF_POSITIONS } DimOf;
typedef struct {
    const char *name;
    StorageClass storage;
    int rows_times;
    DimOf rows_of;
    int cols_times;
    DimOf cols_of;
    bool decay; // weight decay: 2-D tensors
    TensorInit init;
} TensorSpec;

static const TensorSpec tensor_specs[TENSORS] = {
    {"wte", STORAGE_WTE, 1, OF_VOCAB, 1, OF_CHANNELS, true, INIT_NORMAL},
    {"wpe", STORAGE_WPE, 1, OF_POSITIONS, 1, OF_CHANNELS, true, INIT_NORMAL},
    {"ln1w", STORAGE_BLOCK, 1, OF_ONE, 1, OF_CHANNELS, false, INIT_ONE},
    {"ln1b", STORAGE_BLOCK, 1, OF_ONE, 1, OF_CHANNELS, false, INIT_ZERO},
    {"qkvw", STORAGE_BLOCK, 3, OF_CHANNELS, 1, OF_CHANNELS, true, INIT_NORMAL},
    {"qkvb", STORAGE_BLOCK, 1, OF_ONE, 3, OF_CHANNELS, false, INIT_ZERO},
    {"attprojw", STORAGE_BLOCK, 1, OF_CHANNELS, 1, OF_CHANNELS, true, INIT_RESIDUAL},
    {"attprojb", STORAGE_BLOCK, 1, OF_ONE, 1, OF_CHANNELS, false, INIT_ZERO},
    {"ln2w", STORAGE_BLOCK, 1, OF_ONE, 1, OF_CHANNELS, false, INIT_ONE},
    {"ln2b", STORAGE_BLOCK, 1, OF_ONE, 1, OF_CHANNELS, false, INIT_ZERO},
    {"fcw", STORAGE_BLOCK, 4, OF_CHANNELS, 1, OF_CHANNELS, true, INIT_NORMAL},
    {"fcb", STORAGE_BLOCK, 1, OF_ONE, 4, OF_CHANNELS, false, INIT_ZERO},
    {"fcprojw", STORAGE_BLOCK, 1, OF_CHANNELS, 4, OF_CHANNELS, true, INIT_RESIDUAL},
    {"fcprojb", STORAGE_BLOCK, 1, OF_ONE, 1, OF_CHANNELS, false, INIT_ZERO},
    {"lnfw", STORAGE_LNF, 1, OF_ONE, 1, OF_CHANNELS, false, INIT_ONE},
    {"lnfb", STORAGE_LNF, 1, OF_ONE, 1, OF_CHANNELS, false, INIT_ZERO},
};

// Which blocks share a storage. With cycle = 0, `run` consecutive blocks do; otherwise block l uses
// storage l mod cycle of the blocks'.
typedef struct {
    int64_t run, cycle;
} GptShare;
static const GptShare GPT_SHARE_NONE = {1, 0};
// Returns whether any blocks share a storage.
static inline bool share_is(GptShare s) { return s.run > 1 || s.cycle; }
// Returns whether blocks that share a storage alternate with blocks of others. Then gradients of
// several storages are made at the same time: none is complete before its first block's part.
static inline bool share_alternates(GptShare s) { return s.cycle > 0; }
static inline bool share_same(GptShare a, GptShare b) {
    return a.run == b.run && a.cycle == b.cycle;
}
// Equal groups get equal numbers, so that share_same() can compare them.
static inline GptShare gpt_share(int64_t layers, int64_t run, int64_t cycle) {
    const GptShare all = {layers, 0}, runs = {run, 0}, cycles = {1, cycle};
    if (!cycle) { return runs; }
    return cycle == 1 ? all : cycle < layers ? cycles : GPT_SHARE_NONE;
}

typedef struct {
    GptConfig config;
    GptShare share;
    int units, storages;                     // L + 2; distinct blocks + 3
    int64_t tensor_elements[TENSORS];        // of one layer
    int64_t tensor_offset[TENSORS];          // inside its storage
    int64_t class_elements[STORAGE_CLASSES]; // of one storage
    int64_t parameters;                      // in all storages, with vocabulary padding
} GptModel;

// Computes the sizes and offsets of all tensors and storages. Allocates nothing.
static inline GptModel gpt_model_shared(GptConfig config, GptShare share) {
    GptModel m;
    // distinct blocks
    const int64_t blocks = share.cycle ? share.cycle : ceil_div(config.layers, share.run);
    memset(&m, 0, sizeof m);
    m.config = config;
    m.share = share;
    m.units = (int)config.layers + 2;
    m.storages = (int)blocks + 3;
    int64_t quantity[] = {1, config.channels, config.padded_vocab, config.max_seq_len};
    for (int t = 0; t < TENSORS; t++) {
        const TensorSpec *spec = &tensor_specs[t];
        m.tensor_elements[t] =
            spec->rows_times * quantity[spec->rows_of] * spec->cols_times * quantity[spec->cols_of];
        m.tensor_offset[t] = m.class_elements[spec->storage];
        m.class_elements[spec->storage] += m.tensor_elements[t];
    }
    for (int c = 0; c < STORAGE_CLASSES; c++) {
        m.parameters += m.class_elements[c] * (c == STORAGE_BLOCK ? blocks : 1);
    }
    return m;
}
static inline GptModel gpt_model(GptConfig config) {
    return gpt_model_shared(config, GPT_SHARE_NONE);
}

// Numbers of storages: 0 is wte, 1 is wpe, 2 and following are the blocks', the last is lnf.
static inline StorageClass gpt_storage_class(const GptModel *m, int storage) {
    return storage == 0                 ? STORAGE_WTE
           : storage == 1               ? STORAGE_WPE
           : storage == m->storages - 1 ? STORAGE_LNF
                                        : STORAGE_BLOCK;
}
static inline int64_t gpt_storage_elements(const GptModel *m, int storage) {
    return m->class_elements[gpt_storage_class(m, storage)];
}
static inline int gpt_storage_of_layer(const GptModel *m, int64_t layer) {
    return 2 + (int)(m->share.cycle ? layer % m->share.cycle : layer / m->share.run);
}
// The layers that use a block's storage: the first, and the one after `layer` (-1 after the last).
static inline int64_t gpt_first_layer(const GptModel *m, int storage) {
    return (storage - 2) * (m->share.cycle ? 1 : m->share.run);
}
static inline int64_t gpt_next_layer(const GptModel *m, int64_t layer) {
    const int64_t next = layer + (m->share.cycle ? m->share.cycle : 1);
    return next < m->config.layers &&
                   gpt_storage_of_layer(m, next) == gpt_storage_of_layer(m, layer)
               ? next
               : -1;
}
// Returns the storage of `from` that `storage` of `to` is copied from. Both models must have the
// same layers, and layers that share a storage in `to` must share one in `from`.
static inline int gpt_storage_source(const GptModel *from, const GptModel *to, int storage) {
    const StorageClass c = gpt_storage_class(to, storage);
    if (c == STORAGE_BLOCK) { return gpt_storage_of_layer(from, gpt_first_layer(to, storage)); }
    return c == STORAGE_LNF ? from->storages - 1 : storage;
}
// Returns the first unit that uses a storage.
static inline int gpt_unit_of_storage(const GptModel *m, int storage) {
    const StorageClass c = gpt_storage_class(m, storage);
    return c == STORAGE_BLOCK ? 1 + (int)gpt_first_layer(m, storage)
           : c == STORAGE_LNF ? m->units - 1
                              : 0;
}
// Returns the number of layers that share a storage; its gradient is the mean of their gradients.
// For wte it is 1: the gradients of its two uses are summed, since the model defines it as one
// tensor.
static inline int64_t gpt_storage_shared_by(const GptModel *m, int storage) {
    if (gpt_storage_class(m, storage) != STORAGE_BLOCK) { return 1; }
    const int64_t first = gpt_first_layer(m, storage);
    return m->share.cycle ? ceil_div(m->config.layers - first, m->share.cycle)
                          : min_i64(m->share.run, m->config.layers - first);
}

static inline UnitClass gpt_unit_class(const GptModel *m, int unit) {
    return unit == 0 ? UNIT_EMBEDDING : unit < m->units - 1 ? UNIT_BLOCK : UNIT_HEAD;
}
// Writes the storages that a unit uses, and returns their number (1 or 2).
static inline int gpt_unit_storages(const GptModel *m, int unit, int storages[2]) {
    if (unit == 0) {
        storages[0] = 0;
        storages[1] = 1;
        return 2;
    }
    if (unit == m->units - 1) {
        storages[0] = m->storages - 1;
        storages[1] = 0;
        return 2;
    }
    storages[0] = gpt_storage_of_layer(m, unit - 1);
    return 1;
}

// The part of a storage that holds one tensor. Initialisation, weight decay and files work on
// these.
typedef struct {
    TensorId tensor;
    int64_t layer;  // first layer that uses it; 0 outside blocks
    int64_t offset; // within the storage
    int64_t elements;
} TensorPart;
// Writes the parts of a storage in order, and returns their number.
static inline int gpt_storage_parts(const GptModel *m, int storage, TensorPart parts[TENSORS]) {
    int n = 0;
    StorageClass wanted = gpt_storage_class(m, storage);
    const int64_t layer = wanted == STORAGE_BLOCK ? gpt_first_layer(m, storage) : 0;
    for (int t = 0; t < TENSORS; t++) {
        if (tensor_specs[t].storage != wanted) { continue; }
        TensorPart part = {(TensorId)t, layer, m->tensor_offset[t], m->tensor_elements[t]};
        parts[n++] = part;
    }
    return n;
}

// Writes the initial values of elements begin .. end - 1 of a storage. They depend only on the
// seed, the tensor, and the element's number in the tensor over all layers.
static inline void gpt_initialise(const GptModel *m, int storage, uint64_t seed, int64_t begin,
                                  int64_t end, float *out) {
    TensorPart parts[TENSORS];
    int n = gpt_storage_parts(m, storage, parts);
    for (int i = 0; i < n; i++) {
        TensorPart part = parts[i];
        TensorInit init = tensor_specs[part.tensor].init;
        // the wanted range, relative to the part
        int64_t low = max_i64(begin - part.offset, 0),
                high = min_i64(end - part.offset, part.elements);
        if (low >= high) { continue; }
        float *values = out + part.offset + low - begin;
        double scale = init == INIT_RESIDUAL ? 0.02 / sqrt(2.0 * (double)m->config.layers) : 0.02;
        // rows of vocabulary padding stay zero
        int64_t real_ones =
            part.tensor == WTE ? m->config.vocab * m->config.channels : part.elements;
        int64_t first = part.layer * part.elements + low,
                last = part.layer * part.elements + min_i64(high, real_ones);
        for (int64_t e = 0; e < high - low; e++) { values[e] = init == INIT_ONE; }
        if (init < INIT_NORMAL) { continue; }
#pragma omp parallel for schedule(static)
        for (int64_t pair = first / 2; pair < (last + 1) / 2; pair++) {
            double z[2];
            random_normal_pair(seed, (uint64_t)part.tensor, (uint64_t)pair, z);
            for (int64_t e = 2 * pair; e < 2 * pair + 2; e++) {
                if (e >= first && e < last) {
                    values[e - first] = (float)(scale * z[e - 2 * pair]);
                }
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Floating-point operations of matrix products, for the MFU and for predictions. `tokens` tokens
// are computed in samples of T tokens.
static inline double gpt_block_forward_flops(const GptModel *m, double tokens, double T) {
    double C = (double)m->config.channels;
    return tokens * (2.0 * 12.0 * C * C + 2.0 * C * T); // causal attention: half of 2 * 2 T C
}
static inline double gpt_head_forward_flops(const GptModel *m, double tokens) {
    return tokens * 2.0 * (double)(m->config.padded_vocab * m->config.channels);
}
// A backward pass has two products for each product of the forward pass.
static inline double gpt_step_flops(const GptModel *m, double tokens, double T) {
    return 3.0 * ((double)m->config.layers * gpt_block_forward_flops(m, tokens, T) +
                  gpt_head_forward_flops(m, tokens));
}

// -------------------------------------------------------------------------------------------------
// Activations are carved from one buffer by an Arena. If base is NULL, the same code only counts
// bytes.
typedef struct {
    char *base;
    size_t used;
} Arena;
#ifndef PLACED_APART // gap between tensors, where the GPU emulation detects stray accesses
#define PLACED_APART(p, bytes) 0
#endif
static inline void *arena_take(Arena *a, size_t bytes) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += (bytes + 63) / 64 * 64 + PLACED_APART(p, bytes);
    return p;
}
static inline Real *arena_reals(Arena *a, int64_t n) {
    return (Real *)arena_take(a, (size_t)n * ops_real_bytes());
}
static inline float *arena_floats(Arena *a, int64_t n) {
    return (float *)arena_take(a, (size_t)n * sizeof(float));
}

// Returns the size of the operations' workspace for micro-batches of `rows` samples and chunks of
// at most `logits` rows of logits.
static inline size_t gpt_workspace_bytes(const GptModel *m, int64_t rows, int64_t T, int threads,
                                         int64_t logits) {
    OpsShape shape = {
        rows,  T, m->config.channels, m->config.heads, m->config.vocab, m->config.padded_vocab,
        logits};
    return ops_workspace_bytes(shape, threads);
}

// What a block's forward part saves for its backward parts.
typedef struct {
    Real *ln1, *qkv, *att, *res2, *ln2, *fc, *gelu; // (N,C) (N,3C) (N,C) (N,C) (N,C) (N,4C) (N,4C)
    float *mean1, *rstd1, *mean2, *rstd2, *lse;     // (N) each, (rows,NH,T)
} BlockActs;
static inline BlockActs gpt_block_acts(Arena *a, const GptConfig *c, int64_t N) {
    BlockActs b;
    int64_t C = c->channels;
    b.ln1 = arena_reals(a, N * C);
    b.qkv = arena_reals(a, N * 3 * C);
    b.att = arena_reals(a, N * C);
    b.res2 = arena_reals(a, N * C);
    b.ln2 = arena_reals(a, N * C);
    b.fc = arena_reals(a, N * 4 * C);
    b.gelu = arena_reals(a, N * 4 * C);
    b.mean1 = arena_floats(a, N);
    b.rstd1 = arena_floats(a, N);
    b.mean2 = arena_floats(a, N);
    b.rstd2 = arena_floats(a, N);
    b.lse = arena_floats(a, N * c->heads);
    return b;
}

// What a block's backward input part leaves for its weight part, which also needs dout.
typedef struct {
    Real *dfc, *dqkv, *dres2, *dln2, *dln1; // (N,4C) (N,3C) (N,C) (N,C) (N,C)
} BlockGradients;
static inline BlockGradients gpt_block_gradients(Arena *a, const GptConfig *c, int64_t N) {
    BlockGradients g;
    int64_t C = c->channels;
    g.dfc = arena_reals(a, N * 4 * C);
    g.dqkv = arena_reals(a, N * 3 * C);
    g.dres2 = arena_reals(a, N * C);
    g.dln2 = arena_reals(a, N * C);
    g.dln1 = arena_reals(a, N * C);
    return g;
}

typedef struct {
    Real *lnf, *dlnf;            // (N,C) each
    float *mean, *rstd, *losses; // (N) each; losses: -log p(target)
} HeadActs;
static inline HeadActs gpt_head_acts(Arena *a, const GptConfig *c, int64_t N) {
    HeadActs h;
    h.lnf = arena_reals(a, N * c->channels);
    h.dlnf = arena_reals(a, N * c->channels);
    h.mean = arena_floats(a, N);
    h.rstd = arena_floats(a, N);
    h.losses = arena_floats(a, N);
    return h;
}

// -------------------------------------------------------------------------------------------------
// Forward and backward of each kind of unit

// Parameters and gradients of a unit, by class of storage. accumulate says whether the gradient
// buffer already holds a contribution of this step.
typedef struct {
    const Real *params[STORAGE_CLASSES];
    float *grads[STORAGE_CLASSES];
    bool accumulate[STORAGE_CLASSES];
} UnitStates;
static inline const Real *unit_param(const GptModel *m, const UnitStates *u, TensorId t) {
    return real_at_const(u->params[tensor_specs[t].storage], m->tensor_offset[t]);
}
static inline float *unit_grad(const GptModel *m, const UnitStates *u, TensorId t) {
    return u->grads[tensor_specs[t].storage] + m->tensor_offset[t];
}

// x(N,C) = wte[token] + wpe[position]
static inline void gpt_embedding_forward(Stream *s, const GptModel *m, const UnitStates *u, Real *x,
                                         const int32_t *tokens, int64_t rows, int64_t T) {
    ops_embedding_forward(s, x, tokens, unit_param(m, u, WTE), unit_param(m, u, WPE), rows, T,
                          m->config.channels);
}
static inline void gpt_embedding_backward_weight(Stream *s, const GptModel *m, const UnitStates *u,
                                                 const Real *dx, const int32_t *tokens,
                                                 int64_t rows, int64_t T) {
    ops_embedding_backward(s, unit_grad(m, u, WTE), unit_grad(m, u, WPE), dx, tokens, NULL, rows, T,
                           m->config.channels, m->config.padded_vocab, m->config.max_seq_len,
                           u->accumulate[STORAGE_WTE], u->accumulate[STORAGE_WPE]);
}

// out(N,C) = block(x(N,C)). If out is NULL, only the activations are computed (recomputation).
static inline void gpt_block_forward(Stream *s, const GptModel *m, const UnitStates *u, Real *out,
                                     const Real *x, const BlockActs *a, int64_t rows, int64_t T) {
    int64_t C = m->config.channels, N = rows * T;
    ops_layernorm_forward(s, a->ln1, a->mean1, a->rstd1, NULL, x, NULL, unit_param(m, u, LN1W),
                          unit_param(m, u, LN1B), N, C);
    ops_matmul_forward(s, a->qkv, NULL, a->ln1, unit_param(m, u, QKVW), unit_param(m, u, QKVB), N,
                       C, 3 * C);
    ops_attention_forward(s, a->att, a->lse, a->qkv, rows, T, C, m->config.heads);
    ops_matmul_forward(s, a->res2, NULL, a->att, unit_param(m, u, ATTPROJW),
                       unit_param(m, u, ATTPROJB), N, C, C);
    ops_layernorm_forward(s, a->ln2, a->mean2, a->rstd2, a->res2, a->res2, x,
                          unit_param(m, u, LN2W), unit_param(m, u, LN2B), N, C);
    ops_matmul_forward(s, a->fc, a->gelu, a->ln2, unit_param(m, u, FCW), unit_param(m, u, FCB), N,
                       C, 4 * C);
    if (!out) { return; }
    ops_matmul_forward(s, out, NULL, a->gelu, unit_param(m, u, FCPROJW), unit_param(m, u, FCPROJB),
                       N, 4 * C, C);
    ops_residual(s, out, out, a->res2, N * C);
}

// Computes dx(N,C) from dout(N,C), and leaves in g what the weight part needs. dx and dout must be
// different buffers, because the weight part reads dout.
static inline void gpt_block_backward_input(Stream *s, const GptModel *m, const UnitStates *u,
                                            Real *dx, const Real *dout, const Real *x,
                                            const BlockActs *a, const BlockGradients *g,
                                            int64_t rows, int64_t T) {
    int64_t C = m->config.channels, N = rows * T;
    size_t bytes = (size_t)(N * C) * ops_real_bytes();
    ops_matmul_backward_input(s, g->dfc, dout, unit_param(m, u, FCPROJW), a->fc, N, 4 * C, C);
    ops_matmul_backward_input(s, g->dln2, g->dfc, unit_param(m, u, FCW), NULL, N, C, 4 * C);
    ops_copy(s, g->dres2, dout, bytes);
    ops_layernorm_backward_input(s, g->dres2, g->dln2, a->res2, unit_param(m, u, LN2W), a->mean2,
                                 a->rstd2, N, C);
    Real *datt = g->dln1; // its buffer is free until the gradient of ln1 is known
    ops_matmul_backward_input(s, datt, g->dres2, unit_param(m, u, ATTPROJW), NULL, N, C, C);
    ops_attention_backward(s, g->dqkv, datt, a->qkv, a->att, a->lse, rows, T, C, m->config.heads);
    ops_matmul_backward_input(s, g->dln1, g->dqkv, unit_param(m, u, QKVW), NULL, N, C, 3 * C);
    ops_copy(s, dx, g->dres2, bytes);
    ops_layernorm_backward_input(s, dx, g->dln1, x, unit_param(m, u, LN1W), a->mean1, a->rstd1, N,
                                 C);
}

// Computes the gradients of a block's parameters from what the input part left in g.
static inline void gpt_block_backward_weight(Stream *s, const GptModel *m, const UnitStates *u,
                                             const Real *dout, const Real *x, const BlockActs *a,
                                             const BlockGradients *g, int64_t rows, int64_t T) {
    int64_t C = m->config.channels, N = rows * T;
    bool more = u->accumulate[STORAGE_BLOCK];
    ops_matmul_backward_weight(s, unit_grad(m, u, FCPROJW), unit_grad(m, u, FCPROJB), dout, a->gelu,
                               N, 4 * C, C, more);
    ops_matmul_backward_weight(s, unit_grad(m, u, FCW), unit_grad(m, u, FCB), g->dfc, a->ln2, N, C,
                               4 * C, more);
    ops_layernorm_backward_weight(s, unit_grad(m, u, LN2W), unit_grad(m, u, LN2B), g->dln2, a->res2,
                                  a->mean2, a->rstd2, N, C, more);
    ops_matmul_backward_weight(s, unit_grad(m, u, ATTPROJW), unit_grad(m, u, ATTPROJB), g->dres2,
                               a->att, N, C, C, more);
    ops_matmul_backward_weight(s, unit_grad(m, u, QKVW), unit_grad(m, u, QKVB), g->dqkv, a->ln1, N,
                               C, 3 * C, more);
    ops_layernorm_backward_weight(s, unit_grad(m, u, LN1W), unit_grad(m, u, LN1B), g->dln1, x,
                                  a->mean1, a->rstd1, N, C, more);
}

// Computes the head's layernorm. The classifier belongs to the losses and the backward input part.
static inline void gpt_head_forward(Stream *s, const GptModel *m, const UnitStates *u,
                                    const Real *x, const HeadActs *h, int64_t N) {
    ops_layernorm_forward(s, h->lnf, h->mean, h->rstd, NULL, x, NULL, unit_param(m, u, LNFW),
                          unit_param(m, u, LNFB), N, m->config.channels);
}
// Computes only the losses (evaluation). logits is a buffer (N, Vp), or NULL if the workspace holds
// them.
static inline void gpt_head_losses(Stream *s, const GptModel *m, const UnitStates *u,
                                   const HeadActs *h, Real *logits, const int32_t *targets,
                                   int64_t N) {
    ops_classifier(s, h->losses, NULL, NULL, logits, h->lnf, unit_param(m, u, WTE), targets, N, N,
                   m->config.channels, m->config.vocab, m->config.padded_vocab, 0.0f, false);
}
// Computes dx(N,C) from h->dlnf, the gradient of the layernorm's output.
static inline void gpt_head_backward_lnf(Stream *s, const GptModel *m, const UnitStates *u,
                                         Real *dx, const Real *x, const HeadActs *h, int64_t N) {
    ops_zero(s, dx, (size_t)(N * m->config.channels) * ops_real_bytes());
    ops_layernorm_backward_input(s, dx, h->dlnf, x, unit_param(m, u, LNFW), h->mean, h->rstd, N,
                                 m->config.channels);
}
// Computes the losses, dx(N,C), and the head's contribution to the gradient of wte. `scale` is the
// weight of each token: 1 / tokens of the step.
static inline void gpt_head_backward_input(Stream *s, const GptModel *m, const UnitStates *u,
                                           Real *dx, const Real *x, const HeadActs *h,
                                           const int32_t *targets, int64_t N, float scale) {
    ops_classifier(s, h->losses, h->dlnf, unit_grad(m, u, WTE), NULL, h->lnf, unit_param(m, u, WTE),
                   targets, N, N, m->config.channels, m->config.vocab, m->config.padded_vocab,
                   scale, u->accumulate[STORAGE_WTE]);
    gpt_head_backward_lnf(s, m, u, dx, x, h, N);
}
// Computes the gradients of the final layernorm's parameters.
static inline void gpt_head_backward_weight(Stream *s, const GptModel *m, const UnitStates *u,
                                            const Real *x, const HeadActs *h, int64_t N) {
    ops_layernorm_backward_weight(s, unit_grad(m, u, LNFW), unit_grad(m, u, LNFB), h->dlnf, x,
                                  h->mean, h->rstd, N, m->config.channels,
                                  u->accumulate[STORAGE_LNF]);
}

#endif
