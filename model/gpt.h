// gpt.h: the model: an architecture (architecture.h) with dimensions (config.h). This file says
// which units and storages it has, and where its tensors are in them.
//
// Units     are what a schedule computes: 0 is the embedding, 1..L are the blocks, and L + 1 is the
//           head (final layernorm and classifier).
// Storages  are contiguous buffers of parameters: wte | wpe | one per block | experts, one per
//           block | lnf. Each unit uses some: the embedding {wte, wpe}, a block its own, the head
//           {lnf, wte}. The embedding and the head use the same wte; that is the tie. Blocks may
//           share a storage in the same way (GptShare; pseudo.h), which only reduces the number of
//           storages. All code that shards, gathers, saves or moves parameters refers to storages
//           by number.
// Tensors   are parts of a storage. In memory the tensors of a block are contiguous; on disk, in
//           llm.c's format, all layers of a tensor are.
#ifndef GPT_H
#define GPT_H

#include "base/base.h"
#include "model/architecture.h"
#include "model/architectures.h"
#include "model/config.h"
#include "ops/ops.h"

// -------------------------------------------------------------------------------------------------
// Tensors and storages
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
    const Architecture *arch;
    GptShare share;
    int units, storages;                     // L + 2; distinct blocks + 3 (GPT-2)
    int first_block, first_after;            // first storage of the blocks, and of the head
    int blocks;                              // distinct blocks, with a storage each; then experts'
    StorageClass single[STORAGE_CLASSES];    // classes of the storages that are not blocks'
    int64_t quantity[QUANTITIES];            // for dimensions
    int classifier;                          // storage of its table: wte's, or its own
    Rotary rotary;                           // frequencies of rotary positions, if it has them
    int64_t tensor_elements[MOST_TENSORS];   // of one layer
    int64_t tensor_offset[MOST_TENSORS];     // inside its storage
    int64_t class_elements[STORAGE_CLASSES]; // of one storage
    int64_t parameters; // in all storages of all ranks, with vocabulary padding
    int expert_rank;    // of the ranks that experts are divided over: which one this is
} GptModel;

static inline int64_t gpt_dim(const GptModel *m, Dim d) { return d.times * m->quantity[d.of]; }
static inline int64_t gpt_dim_or_one(const GptModel *m, Dim d) {
    return d.times ? gpt_dim(m, d) : 1;
}
// Returns the elements of one token at the boundary of a unit.
static inline int64_t gpt_width(const GptModel *m) { return m->config.channels; }
// Is a storage of this class one that each block has?
static inline bool class_is_blocks(StorageClass c) {
    return c == STORAGE_BLOCK || c == STORAGE_EXPERTS;
}
static inline StorageClass tensor_class(const GptModel *m, int tensor) {
    return m->arch->tensors[tensor].storage;
}
// Returns how many layers have a tensor of their own: all, or 1 outside blocks; 0 if the model does
// not have the tensor.
static inline int64_t gpt_tensor_layers(const GptModel *m, int tensor) {
    const StorageClass c = tensor_class(m, tensor);
    if (!m->tensor_elements[tensor]) { return 0; }
    return class_is_blocks(c) ? m->config.layers : c != NO_STORAGE;
}
static inline const UnitSpec *gpt_unit_spec(const GptModel *m, UnitClass c) {
    return &m->arch->units[c];
}

// Returns the storage of a class other than the blocks'. The architecture must have it.
static inline int gpt_storage_of_class(const GptModel *m, StorageClass c) {
    int i = 0;
    while (m->single[i] != c) { i++; }
    return i < m->first_block ? i : i + m->first_after - m->first_block;
}
// Returns how many rows the experts of a rank get for each token of a rank, at most.
static inline int64_t gpt_most_arrivals(const GptModel *m) {
    return gpt_expert_ranks(&m->config) *
           min_i64(gpt_choices(&m->config), m->quantity[OF_OWN_EXPERTS]);
}
// Is memory planned for fewer? Then rows may go to experts in pieces (executor/exchange.h).
static inline bool gpt_takes_pieces(const GptModel *m) {
    return m->quantity[OF_ARRIVALS] < gpt_most_arrivals(m);
}
static inline void gpt_set_quantities(GptModel *m) {
    const GptConfig *c = &m->config;
    m->quantity[OF_ONE] = 1;
    m->quantity[OF_CHANNELS] = c->channels;
    m->quantity[OF_VOCAB] = c->padded_vocab;
    m->quantity[OF_POSITIONS] = c->max_seq_len;
    m->quantity[OF_HEADS] = c->heads;
    m->quantity[OF_NORMED_HEADS] = c->heads + c->kv_heads;
    m->quantity[OF_HEAD_DIM] = c->head_dim;
    m->quantity[OF_Q] = c->heads * c->head_dim;
    m->quantity[OF_KV] = c->kv_heads * c->head_dim;
    m->quantity[OF_QKV] = (c->heads + 2 * c->kv_heads) * c->head_dim;
    m->quantity[OF_FFN] = c->ffn;
    m->quantity[OF_EXPERTS] = c->experts;
    m->quantity[OF_CHOICES] = gpt_choices(c);
    m->quantity[OF_EXPERT_FFN] = c->expert_ffn;
    m->quantity[OF_OWN_EXPERTS] = c->experts / gpt_expert_ranks(c);
    const int64_t most = gpt_most_arrivals(m);
    m->quantity[OF_ARRIVALS] = c->expert_rows ? min_i64(c->expert_rows, most) : most;
    m->quantity[OF_ROUTE] = ROUTE_PARTS * gpt_choices(c);
    m->quantity[OF_SHARED] = c->shared_experts > 0;
    m->quantity[OF_SHARED_FFN] = c->shared_experts * c->shared_expert_ffn;
}
// Returns the frequency of a pair of elements, scaled as Llama 3.1 does: long wavelengths by the
// factor, short ones not, those between in part (rope_type "llama3" of transformers).
static inline double rotary_frequency(const GptConfig *c, int64_t pair) {
    const double f = pow(c->theta, -2.0 * (double)pair / (double)c->head_dim),
                 wavelength = 2 * 3.14159265358979323846 / f;
    const RotaryScaling *s = &c->scaling;
    const double original = (double)s->original;
    if (s->factor == 0 || wavelength < original / s->high) { return f; }
    if (wavelength > original / s->low) { return f / s->factor; }
    const double part = (original / wavelength - s->low) / (s->high - s->low);
    return (1 - part) * f / s->factor + part * f;
}
static inline Rotary gpt_rotary(const GptConfig *c) {
    Rotary r = {};
    for (int64_t i = 0; c->theta > 0 && i < c->head_dim / 2; i++) {
        r.frequency[i] = (float)rotary_frequency(c, i);
    }
    return r;
}

// Computes the sizes and offsets of all tensors and storages. Allocates nothing. arch must outlive
// the model.
static inline GptModel gpt_model_of(const Architecture *arch, GptConfig config, GptShare share) {
    GptModel m = {};
    // distinct blocks
    const int64_t blocks = share.cycle ? share.cycle : ceil_div(config.layers, share.run);
    config = gpt_config_complete(config);
    m.config = config;
    m.arch = arch;
    m.share = share;
    m.units = (int)config.layers + 2;
    gpt_set_quantities(&m);
    m.rotary = gpt_rotary(&config);
    for (int t = 0; t < m.arch->tensor_count; t++) {
        const TensorSpec *spec = &m.arch->tensors[t];
        if (spec->storage == NO_STORAGE) { continue; }
        m.tensor_elements[t] = gpt_dim_or_one(&m, spec->copies) * gpt_dim_or_one(&m, spec->rows) *
                               gpt_dim(&m, spec->cols);
        m.tensor_offset[t] = m.class_elements[spec->storage];
        m.class_elements[spec->storage] += m.tensor_elements[t];
    }
    int singles = 0;
    for (int c = 0; c < STORAGE_CLASSES; c++) {
        if (c == STORAGE_BLOCK) { m.first_block = singles; }
        if (!class_is_blocks((StorageClass)c) && m.class_elements[c]) {
            m.single[singles++] = (StorageClass)c;
        }
    }
    m.blocks = (int)blocks;
    m.first_after = m.first_block + m.blocks * (m.class_elements[STORAGE_EXPERTS] ? 2 : 1);
    m.storages = singles + m.first_after - m.first_block;
    for (int c = 0; c < STORAGE_CLASSES; c++) {
        m.parameters += m.class_elements[c] * (class_is_blocks((StorageClass)c) ? blocks : 1) *
                        (c == STORAGE_EXPERTS ? gpt_expert_ranks(&config) : 1);
    }
    for (int t = 0; t < m.arch->tensor_count; t++) { // biases that choose experts are not trained
        const TensorSpec *spec = &m.arch->tensors[t];
        m.parameters -= spec->init == INIT_BALANCED && spec->storage != NO_STORAGE
                            ? m.tensor_elements[t] * blocks
                            : 0;
    }
    m.classifier = gpt_storage_of_class(&m, architecture_classifier(arch));
    return m;
}
static inline GptModel gpt_model_shared(GptConfig config, GptShare share) {
    return gpt_model_of(&architectures[config.arch], config, share);
}
// Returns whether the embedding and the classifier use one table.
static inline bool gpt_is_tied(const GptModel *m) { return architecture_is_tied(m->arch); }
// Returns the shape of attention for `rows` sequences of T tokens.
static inline AttentionShape gpt_attention(const GptModel *m, int64_t rows, int64_t T) {
    const GptConfig *c = &m->config;
    const AttentionShape shape = {
        .rows = rows, .T = T, .heads = c->heads, .kv_heads = c->kv_heads, .D = c->head_dim};
    return shape;
}
// Returns the model with all experts on each rank: as files have it.
static inline GptModel gpt_model_whole(const GptModel *m) {
    GptConfig config = m->config;
    config.expert_ranks = 0;
    return gpt_model_of(m->arch, config, m->share);
}
static inline GptModel gpt_model(GptConfig config) {
    return gpt_model_shared(config, GPT_SHARE_NONE);
}
// Returns the model with its experts divided over so many ranks, however they are now
// (gpt_divide_experts).
static inline GptModel gpt_model_divided(const GptModel *m, int64_t ranks, double buffer) {
    GptConfig config = m->config;
    if (!config.experts) { return *m; }
    config.arch = gpt_architecture(m->arch->name, strlen(m->arch->name), gpt_is_tied(m), true);
    config.expert_ranks = config.expert_rows = 0;
    return gpt_model_shared(gpt_divide_experts(config, ranks, buffer), m->share);
}

// Storages are numbered in the order of their classes, without classes that the architecture does
// not have. So those of the embedding come first, then those of the blocks, then those of the head.
static inline bool gpt_storage_is_block(const GptModel *m, int storage) {
    return storage >= m->first_block && storage < m->first_after;
}
static inline StorageClass gpt_storage_class(const GptModel *m, int storage) {
    if (gpt_storage_is_block(m, storage)) {
        return storage < m->first_block + m->blocks ? STORAGE_BLOCK : STORAGE_EXPERTS;
    }
    return m
        ->single[storage < m->first_block ? storage : storage - m->first_after + m->first_block];
}
// A range of a storage, and where it is in the storage of the whole model.
typedef struct {
    int64_t begin, count, whole;
} StorageRun;
// Writes the runs of elements begin .. begin + count - 1 of a storage, and returns their number.
static inline int gpt_storage_runs(const GptModel *m, int storage, int64_t begin, int64_t count,
                                   StorageRun out[MOST_TENSORS]) {
    const StorageRun all = {begin, count, begin};
    const int64_t ranks = gpt_expert_ranks(&m->config);
    int n = 0;
    out[0] = all;
    if (ranks == 1 || gpt_storage_class(m, storage) != STORAGE_EXPERTS) { return 1; }
    for (int t = 0; t < m->arch->tensor_count; t++) {
        const int64_t offset = m->tensor_offset[t], elements = m->tensor_elements[t],
                      low = max_i64(begin, offset),
                      high = min_i64(begin + count, offset + elements);
        if (tensor_class(m, t) != STORAGE_EXPERTS || low >= high) { continue; }
        const StorageRun run = {low, high - low,
                                ranks * offset + m->expert_rank * elements + low - offset};
        out[n++] = run;
    }
    return n;
}
static inline int64_t gpt_storage_elements(const GptModel *m, int storage) {
    return m->class_elements[gpt_storage_class(m, storage)];
}
static inline int gpt_storage_of_layer(const GptModel *m, int64_t layer) {
    return m->first_block + (int)(m->share.cycle ? layer % m->share.cycle : layer / m->share.run);
}
static inline int gpt_layer_storage(const GptModel *m, int64_t layer, StorageClass c) {
    return gpt_storage_of_layer(m, layer) + (c == STORAGE_EXPERTS ? m->blocks : 0);
}
// The layers that use a block's storage: the first, and the one after `layer` (-1 after the last).
static inline int64_t gpt_first_layer(const GptModel *m, int storage) {
    return (storage - m->first_block) % m->blocks * (m->share.cycle ? 1 : m->share.run);
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
    if (gpt_storage_is_block(to, storage)) {
        return gpt_layer_storage(from, gpt_first_layer(to, storage),
                                 gpt_storage_class(to, storage));
    }
    return storage < to->first_block ? storage : storage + from->storages - to->storages;
}
// Returns the first unit that uses a storage.
static inline int gpt_unit_of_storage(const GptModel *m, int storage) {
    if (gpt_storage_is_block(m, storage)) { return 1 + (int)gpt_first_layer(m, storage); }
    return storage < m->first_block ? 0 : m->units - 1;
}
// Returns the number of layers that share a storage; its gradient is the mean of their gradients.
// For wte it is 1: the gradients of its two uses are summed, since the model defines it as one
// tensor.
static inline int64_t gpt_storage_shared_by(const GptModel *m, int storage) {
    if (!gpt_storage_is_block(m, storage)) { return 1; }
    const int64_t first = gpt_first_layer(m, storage);
    return m->share.cycle ? ceil_div(m->config.layers - first, m->share.cycle)
                          : min_i64(m->share.run, m->config.layers - first);
}

static inline UnitClass gpt_unit_class(const GptModel *m, int unit) {
    return unit == 0 ? UNIT_EMBEDDING : unit < m->units - 1 ? UNIT_BLOCK : UNIT_HEAD;
}
// Returns the storage of a class that a unit uses.
static inline int gpt_unit_storage(const GptModel *m, int unit, StorageClass c) {
    return class_is_blocks(c) ? gpt_layer_storage(m, unit - 1, c) : gpt_storage_of_class(m, c);
}
// Writes the storages that a unit uses, and returns their number (1 or 2).
static inline int gpt_unit_storages(const GptModel *m, int unit, int storages[2]) {
    const StorageClass *uses = gpt_unit_spec(m, gpt_unit_class(m, unit))->storages;
    storages[0] = gpt_unit_storage(m, unit, uses[0]);
    if (uses[1] == NO_STORAGE) { return 1; }
    storages[1] = gpt_unit_storage(m, unit, uses[1]);
    return 2;
}

// Tensors that may have a learning rate of their own.
typedef enum {
    RATE_EMBEDDING,
    RATE_HEAD,
    RATE_VECTORS,
    RATE_MATRICES,
    RATE_BALANCE, // of the biases that choose experts, which no optimizer updates
    RATE_KINDS
} RateKind;
static inline RateKind tensor_rate(const TensorSpec *t) {
    return t->init == INIT_BALANCED      ? RATE_BALANCE
           : !t->rows.times              ? RATE_VECTORS
           : class_is_blocks(t->storage) ? RATE_MATRICES
           : t->storage == STORAGE_HEAD  ? RATE_HEAD
                                         : RATE_EMBEDDING;
}
// The part of a storage that holds one tensor. Initialisation, weight decay and files work on
// these.
typedef struct {
    int tensor;     // row of the architecture's table
    int64_t layer;  // first layer that uses it; 0 outside blocks
    int64_t offset; // within the storage
    int64_t elements;
    int64_t number; // of its first element in the tensor, over all layers
    bool decays;    // weight decay applies
    RateKind rate;
} TensorPart;
// Returns which of the equal pieces of a tensor over all layers this rank has of a layer.
static inline int64_t gpt_tensor_place(const GptModel *m, int tensor, int64_t layer) {
    if (tensor_class(m, tensor) != STORAGE_EXPERTS) { return layer; }
    return layer * gpt_expert_ranks(&m->config) + m->expert_rank;
}
// Writes the parts of a storage in order, and returns their number.
static inline int gpt_storage_parts(const GptModel *m, int storage,
                                    TensorPart parts[MOST_TENSORS]) {
    int n = 0;
    const StorageClass wanted = gpt_storage_class(m, storage);
    const int64_t layer = class_is_blocks(wanted) ? gpt_first_layer(m, storage) : 0;
    for (int t = 0; t < m->arch->tensor_count; t++) {
        if (m->arch->tensors[t].storage != wanted || !m->tensor_elements[t]) { continue; }
        const TensorPart part = {
            .tensor = t,
            .layer = layer,
            .offset = m->tensor_offset[t],
            .elements = m->tensor_elements[t],
            .number = m->tensor_elements[t] * gpt_tensor_place(m, t, layer),
            .decays = m->arch->tensors[t].rows.times > 0,
            .rate = tensor_rate(&m->arch->tensors[t]),
        };
        parts[n++] = part;
    }
    return n;
}
// A run of a tensor's rows, and the columns of the tensor; 1 for a vector.
typedef struct {
    const char *name; // NULL: the tensor has no parts, and this is all of it
    Dim dim;          // what its number of rows follows from
    int64_t begin, rows, cols;
} TensorRange;
// Writes the ranges of a tensor in order, and returns their number, at least 1.
static inline int gpt_tensor_ranges(const GptModel *m, int tensor, TensorRange out[MOST_RANGES]) {
    const TensorSpec *spec = &m->arch->tensors[tensor];
    const bool matrix = spec->rows.times > 0;
    const RowRange whole = {NULL, matrix ? spec->rows : spec->cols};
    int n = 0;
    for (int64_t at = 0; n < MOST_RANGES && (n == 0 || spec->ranges[n].name); n++) {
        const RowRange *r = spec->ranges[0].name ? &spec->ranges[n] : &whole;
        const TensorRange range = {.name = r->name,
                                   .dim = r->rows,
                                   .begin = at,
                                   .rows = gpt_dim(m, r->rows),
                                   .cols = matrix ? gpt_dim(m, spec->cols) : 1};
        out[n] = range;
        at += range.rows;
    }
    return n;
}
// A part of a storage: one range of a tensor.
typedef struct {
    int64_t offset, rows, cols; // offset: within the storage
    bool is_matrix;
} StoragePart;
enum { MOST_PARTS = MOST_TENSORS + 4 };
// Writes all ranges of a storage's tensors in order, and returns their number.
static inline int gpt_storage_ranges(const GptModel *m, int storage, StoragePart out[MOST_PARTS]) {
    TensorPart parts[MOST_TENSORS];
    int n = 0;
    for (int i = 0, count = gpt_storage_parts(m, storage, parts); i < count; i++) {
        TensorRange ranges[MOST_RANGES];
        const int of_tensor = gpt_tensor_ranges(m, parts[i].tensor, ranges);
        for (int k = 0; k < of_tensor; k++) {
            const TensorRange *r = &ranges[k];
            const StoragePart part = {.offset = parts[i].offset + r->begin * r->cols,
                                      .rows = r->rows,
                                      .cols = r->cols,
                                      .is_matrix = parts[i].decays};
            assert(n < MOST_PARTS);
            out[n++] = part;
        }
    }
    return n;
}
// Returns the elements of a tensor that are parameters: all but rows of vocabulary padding, which
// come last and stay zero.
static inline int64_t gpt_real_elements(const GptModel *m, int tensor) {
    return m->arch->tensors[tensor].rows.of == OF_VOCAB
               ? m->tensor_elements[tensor] / m->config.padded_vocab * m->config.vocab
               : m->tensor_elements[tensor];
}

// Returns the elements of a storage that are parameters. Padding must be at the storage's end.
static inline int64_t gpt_storage_real_elements(const GptModel *m, int storage) {
    TensorPart parts[MOST_TENSORS];
    const TensorPart *last = &parts[gpt_storage_parts(m, storage, parts) - 1];
    return last->offset + gpt_real_elements(m, last->tensor);
}

// The deviation of a tensor's initial values.
static inline double tensor_deviation(const GptModel *m, const TensorSpec *spec) {
    const double deviation = spec->deviation > 0 ? spec->deviation : 0.02;
    switch (spec->init) {
    case INIT_RESIDUAL: return deviation / sqrt(2.0 * m->config.layers);
    case INIT_UNIFORM: return deviation / sqrt((double)m->config.channels);
    default: return deviation;
    }
}
// Writes elements first .. last - 1 of a tensor, in the numbering of all layers. `first` is that of
// values[0].
static inline void tensor_randomise(const TensorSpec *spec, double deviation, uint64_t seed,
                                    uint64_t tensor, int64_t first, int64_t last, float *values) {
#pragma omp parallel for schedule(static)
    for (int64_t pair = first / 2; pair < (last + 1) / 2; pair++) {
        double z[2];
        if (spec->init == INIT_UNIFORM) {
            random_uniform_pair(seed, tensor, pair, z);
        } else {
            random_normal_pair(seed, tensor, pair, z);
        }
        for (int64_t e = 2 * pair; e < 2 * pair + 2; e++) {
            if (e >= first && e < last) {
                values[e - first] = (float)(deviation * z[e - 2 * pair]);
            }
        }
    }
}
// Writes the initial values of elements begin .. end - 1 of a storage. They depend only on the
// seed, the tensor, and the element's number in the tensor over all layers.
static inline void gpt_initialise(const GptModel *m, int storage, uint64_t seed, int64_t begin,
                                  int64_t end, float *out) {
    TensorPart parts[MOST_TENSORS];
    int n = gpt_storage_parts(m, storage, parts);
    for (int i = 0; i < n; i++) {
        TensorPart part = parts[i];
        const TensorSpec *spec = &m->arch->tensors[part.tensor];
        // the wanted range, relative to the part
        int64_t low = max_i64(begin - part.offset, 0),
                high = min_i64(end - part.offset, part.elements);
        if (low >= high) { continue; }
        float *values = out + part.offset + low - begin;
        const int64_t real_ones = gpt_real_elements(m, part.tensor);
        int64_t first = part.number + low, last = part.number + min_i64(high, real_ones);
        for (int64_t e = 0; e < high - low; e++) { values[e] = spec->init == INIT_ONE; }
        if (spec->init < INIT_NORMAL) { continue; }
        tensor_randomise(spec, tensor_deviation(m, spec), seed, (uint64_t)part.tensor, first, last,
                         values);
    }
}

#endif
