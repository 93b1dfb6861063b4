// huggingface.h: models as folders of Hugging Face: config.json and safetensors, read by --model
// and written by --export. `hf_models` says which of their tensors are in which of ours.
// Source: huggingface/transformers, models/{gpt2,llama,qwen2,qwen3}.
#ifndef HUGGINGFACE_H
#define HUGGINGFACE_H

#include "model/model_file.h"  // states, writing files
#include "model/safetensors.h" // reading tensors

#define HUGGINGFACE_HINT                                                                           \
    "--model takes folders of Hugging Face's GPT-2, Llama, Qwen2 and Qwen3 models, and what "      \
    "--export wrote"

// --- tensors -------------------------------------------------------------------------------------
// One of our tensors, or one range of its rows (architecture.h: RowRange), and its name there; %d
// is the layer.
typedef struct {
    const char *tensor, *range; // range NULL: the whole tensor
    const char *name;
    bool transposed; // there: (inputs, outputs)
} HfPart;
typedef struct {
    const char *arch, *model_type, *class_name, *activation;
    const HfPart *parts;
    int count;
} HfModel;

static const HfPart hf_gpt2[] = {
    {"wte", NULL, "transformer.wte.weight", false},
    {"wpe", NULL, "transformer.wpe.weight", false},
    {"ln1w", NULL, "transformer.h.%d.ln_1.weight", false},
    {"ln1b", NULL, "transformer.h.%d.ln_1.bias", false},
    {"qkvw", NULL, "transformer.h.%d.attn.c_attn.weight", true},
    {"qkvb", NULL, "transformer.h.%d.attn.c_attn.bias", false},
    {"attprojw", NULL, "transformer.h.%d.attn.c_proj.weight", true},
    {"attprojb", NULL, "transformer.h.%d.attn.c_proj.bias", false},
    {"ln2w", NULL, "transformer.h.%d.ln_2.weight", false},
    {"ln2b", NULL, "transformer.h.%d.ln_2.bias", false},
    {"fcw", NULL, "transformer.h.%d.mlp.c_fc.weight", true},
    {"fcb", NULL, "transformer.h.%d.mlp.c_fc.bias", false},
    {"fcprojw", NULL, "transformer.h.%d.mlp.c_proj.weight", true},
    {"fcprojb", NULL, "transformer.h.%d.mlp.c_proj.bias", false},
    {"lnfw", NULL, "transformer.ln_f.weight", false},
    {"lnfb", NULL, "transformer.ln_f.bias", false},
};
// Llama's names; a model leaves out what its architecture does not have.
static const HfPart hf_llama[] = {
    {"wte", NULL, "model.embed_tokens.weight", false},
    {"ln1w", NULL, "model.layers.%d.input_layernorm.weight", false},
    {"qkvw", "q", "model.layers.%d.self_attn.q_proj.weight", false},
    {"qkvw", "k", "model.layers.%d.self_attn.k_proj.weight", false},
    {"qkvw", "v", "model.layers.%d.self_attn.v_proj.weight", false},
    {"qkvb", "q", "model.layers.%d.self_attn.q_proj.bias", false},
    {"qkvb", "k", "model.layers.%d.self_attn.k_proj.bias", false},
    {"qkvb", "v", "model.layers.%d.self_attn.v_proj.bias", false},
    {"qnormw", NULL, "model.layers.%d.self_attn.q_norm.weight", false},
    {"knormw", NULL, "model.layers.%d.self_attn.k_norm.weight", false},
    {"attprojw", NULL, "model.layers.%d.self_attn.o_proj.weight", false},
    {"ln2w", NULL, "model.layers.%d.post_attention_layernorm.weight", false},
    {"gateupw", "gate", "model.layers.%d.mlp.gate_proj.weight", false},
    {"gateupw", "up", "model.layers.%d.mlp.up_proj.weight", false},
    {"downw", NULL, "model.layers.%d.mlp.down_proj.weight", false},
    {"fcw", NULL, "model.layers.%d.mlp.fc_proj.weight", false},
    {"fcprojw", NULL, "model.layers.%d.mlp.down_proj.weight", false},
    {"lnfw", NULL, "model.norm.weight", false},
    {"headw", NULL, "lm_head.weight", false},
};
// nano is a type of our own, which only this program reads.
static const HfModel hf_models[] = {
    {"gpt2", "gpt2", "GPT2LMHeadModel", "gelu_new", hf_gpt2, LENGTH_OF(hf_gpt2)},
    {"llama", "llama", "LlamaForCausalLM", "silu", hf_llama, LENGTH_OF(hf_llama)},
    {"qwen2", "qwen2", "Qwen2ForCausalLM", "silu", hf_llama, LENGTH_OF(hf_llama)},
    {"qwen3", "qwen3", "Qwen3ForCausalLM", "silu", hf_llama, LENGTH_OF(hf_llama)},
    {"nano", "train_gpt_nano", "NanoForCausalLM", "relu2", hf_llama, LENGTH_OF(hf_llama)},
};
static inline const HfModel *hf_model_of(const GptModel *m) {
    const HfModel *model = hf_models;
    while (strcmp(model->arch, m->arch->name)) { model++; }
    return model;
}

// A part of a tensor of one layer: which elements of ours it is, and its shape there.
typedef struct {
    const HfPart *part;
    Text name;
    int64_t begin, rows, cols; // begin: element of our tensor
    bool is_matrix;
} HfTensor;
static inline Text hf_name(const HfPart *part, int64_t layer) {
    const char *number = strstr(part->name, "%d");
    if (!number) { return text_of("%s", part->name); }
    return text_of("%.*s%" PRId64 "%s", (int)(number - part->name), part->name, layer, number + 2);
}
// Calls `visit` for each part of a tensor of a layer. Rows of vocabulary padding have no part.
static inline void hf_each_part(const GptModel *m, int tensor, int64_t layer,
                                void (*visit)(void *context, const HfTensor *t), void *context) {
    const HfModel *model = hf_model_of(m);
    const TensorSpec *spec = &m->arch->tensors[tensor];
    TensorRange ranges[MOST_RANGES];
    const int count = gpt_tensor_ranges(m, tensor, ranges);
    for (int i = 0; i < model->count; i++) {
        const HfPart *part = &model->parts[i];
        if (strcmp(part->tensor, spec->name)) { continue; }
        HfTensor t = {.part = part, .name = hf_name(part, layer), .cols = ranges[0].cols};
        for (int k = 0; k < count; k++) {
            const TensorRange *r = &ranges[k];
            if (part->range && strcmp(part->range, r->name)) { continue; }
            if (part->range) { t.begin = r->begin * r->cols; }
            t.rows += r->dim.of == OF_VOCAB ? m->config.vocab : r->rows;
        }
        t.is_matrix = spec->rows.times > 0;
        visit(context, &t);
    }
}

// Calls it for all parts of all tensors, in the order of the architecture's table.
static inline void hf_each_tensor(const GptModel *m,
                                  void (*visit)(void *context, const HfTensor *t), void *context) {
    for (int t = 0; t < m->arch->tensor_count; t++) {
        const int64_t layers = gpt_tensor_layers(m, t);
        for (int64_t l = 0; l < layers; l++) { hf_each_part(m, t, l, visit, context); }
    }
}

// --- reading -------------------------------------------------------------------------------------
// Returns whether --model is such a folder.
static inline bool huggingface_is(const char *path) {
    return !access(text_of("%s/config.json", path).at, F_OK) &&
           access(text_of("%s/manifest", path).at, F_OK);
}
typedef struct {
    Text path;
    Json json;
} HfConfig;
__attribute__((noreturn)) static inline void hf_refuse(const HfConfig *c, const char *key,
                                                       const char *why) {
    const int value = json_get(&c->json, 0, key);
    const JsonValue *v = value < 0 ? NULL : &c->json.values[value];
    const bool shown = v && (v->kind == JSON_STRING || v->kind == JSON_WORD);
    die(EXIT_INPUT, HUGGINGFACE_HINT, "%s: %s%s%.*s: %s", c->path.at, key, shown ? " " : "",
        shown ? (int)min_i64((int64_t)v->bytes, 60) : 0, shown ? v->text : "", why);
}
static inline bool hf_absent(const Json *j, int value) {
    return value < 0 || json_word_is(j, value, "null");
}
// Returns a member of an object that is a whole number of at least 1; 0 if it is not there and need
// not be.
static inline int64_t hf_whole(const HfConfig *c, int object, const char *key, bool needed) {
    const int value = json_get(&c->json, object, key);
    int64_t size = 0;
    if (hf_absent(&c->json, value) && !needed) { return 0; }
    if (!json_whole(&c->json, value, &size) || size < 1 || size > 1 << 25) {
        hf_refuse(c, key, "a whole number of at least 1 was expected");
    }
    return size;
}
static inline int64_t hf_size(const HfConfig *c, const char *key, bool needed) {
    return hf_whole(c, 0, key, needed);
}
static inline double hf_number(const HfConfig *c, int object, const char *key, double otherwise) {
    const int value = json_get(&c->json, object, key);
    if (hf_absent(&c->json, value)) { return otherwise; }
    if (!json_is(&c->json, value, JSON_NUMBER) || !(c->json.values[value].number > 0)) {
        hf_refuse(c, key, "a number over 0 was expected");
    }
    return c->json.values[value].number;
}
static inline void hf_expect_text(const HfConfig *c, const char *key, const char *text,
                                  const char *other) {
    const int value = json_get(&c->json, 0, key);
    if (hf_absent(&c->json, value) || json_text_is(&c->json, value, text) ||
        json_text_is(&c->json, value, other)) {
        return;
    }
    hf_refuse(c, key, text_of("this program computes %s", text).at);
}
// A key that is missing has the value that is expected.
static inline void hf_expect(const HfConfig *c, const char *key, bool value) {
    if (json_word_is(&c->json, json_get(&c->json, 0, key), value ? "false" : "true")) {
        hf_refuse(c, key, "this program does not compute it");
    }
}
// Reads how rotary frequencies are scaled: an object with its rope_type.
static inline RotaryScaling hf_scaling(const HfConfig *c, int object, const char *key) {
    const Json *j = &c->json;
    RotaryScaling none = {};
    if (hf_absent(j, object)) { return none; }
    int type = json_get(j, object, "rope_type");
    if (type < 0) { type = json_get(j, object, "type"); }
    if (hf_absent(j, type) || json_text_is(j, type, "default")) { return none; }
    if (!json_text_is(j, type, "llama3")) {
        hf_refuse(c, key, "of the ways to scale rotary positions, this program knows llama3");
    }
    const int64_t original = hf_whole(c, object, "original_max_position_embeddings", false);
    RotaryScaling scaling = llama3_scaling(hf_number(c, object, "factor", 8));
    scaling.low = hf_number(c, object, "low_freq_factor", scaling.low);
    scaling.high = hf_number(c, object, "high_freq_factor", scaling.high);
    if (original) { scaling.original = original; }
    return scaling;
}
static inline GptConfig hf_gpt2_config(const HfConfig *c) {
    hf_expect_text(c, "activation_function", "gelu_new", "gelu_pytorch_tanh");
    hf_expect(c, "scale_attn_weights", true);
    hf_expect(c, "scale_attn_by_inverse_layer_idx", false);
    hf_expect(c, "add_cross_attention", false);
    if (fabs(hf_number(c, 0, "layer_norm_epsilon", 1e-5) / 1e-5 - 1) > 1e-6) {
        hf_refuse(c, "layer_norm_epsilon", "this program computes 1e-5");
    }
    GptConfig config = {.layers = hf_size(c, "n_layer", true),
                        .heads = hf_size(c, "n_head", true),
                        .channels = hf_size(c, "n_embd", true),
                        .vocab = hf_size(c, "vocab_size", true),
                        .max_seq_len = hf_size(c, "n_positions", true)};
    const int64_t inner = hf_size(c, "n_inner", false);
    if (inner && inner != 4 * config.channels) {
        hf_refuse(c, "n_inner", "this program computes 4 n_embd");
    }
    return config;
}
static inline GptConfig hf_llama_config(const HfConfig *c, const char *activation) {
    const char *const never[] = {"attention_bias", "mlp_bias", "use_sliding_window"};
    const Json *j = &c->json;
    for (int i = 0; i < LENGTH_OF(never); i++) { hf_expect(c, never[i], false); }
    hf_expect_text(c, "hidden_act", activation, activation);
    if (hf_number(c, 0, "partial_rotary_factor", 1) != 1) {
        hf_refuse(c, "partial_rotary_factor", "this program turns whole heads");
    }
    const int parameters = json_get(j, 0, "rope_parameters"),
              scaling = json_get(j, 0, "rope_scaling");
    const bool newer = !hf_absent(j, parameters);
    GptConfig config = {.layers = hf_size(c, "num_hidden_layers", true),
                        .heads = hf_size(c, "num_attention_heads", true),
                        .channels = hf_size(c, "hidden_size", true),
                        .vocab = hf_size(c, "vocab_size", true),
                        .max_seq_len = hf_size(c, "max_position_embeddings", true),
                        .kv_heads = hf_size(c, "num_key_value_heads", false),
                        .head_dim = hf_size(c, "head_dim", false),
                        .ffn = hf_size(c, "intermediate_size", true),
                        .theta = 1e4};
    config.theta =
        hf_number(c, 0, "rope_theta", newer ? hf_number(c, parameters, "rope_theta", 1e4) : 1e4);
    config.eps = hf_number(c, 0, "rms_norm_eps", 1e-6);
    config.scaling = newer ? hf_scaling(c, parameters, "rope_parameters")
                           : hf_scaling(c, scaling, "rope_scaling");
    return config;
}
// Returns the model type of a configuration. Ends the program (EXIT_INPUT) if it is unknown.
static inline const HfModel *hf_model_type(const HfConfig *c) {
    for (int i = 0; i < LENGTH_OF(hf_models); i++) {
        const int type = json_get(&c->json, 0, "model_type");
        if (json_text_is(&c->json, type, hf_models[i].model_type)) { return &hf_models[i]; }
    }
    hf_refuse(c, "model_type", "this program knows gpt2, llama, qwen2 and qwen3");
}

// A slice of one of our tensors that is read from the files.
typedef struct {
    const Safetensors *files;
    const Store *store;
    const char *folder;
    int storage;
    int64_t to;         // element of this rank's slice of the storage
    int64_t begin, end; // elements of the tensor
} HfSlice;
// Finds a tensor, also without the prefix of the whole model. Ends the program (EXIT_INPUT) if it
// is missing, or has another shape.
static inline SafeTensor hf_find(const HfSlice *s, const HfTensor *t) {
    const int64_t rows = t->part->transposed ? t->cols : t->rows,
                  cols = t->part->transposed ? t->rows : t->cols;
    SafeTensor found;
    if (!safetensors_find(s->files, t->name.at, &found) &&
        !safetensors_find(s->files, strchr(t->name.at, '.') + 1, &found)) {
        die(EXIT_INPUT, SAFETENSORS_HINT, "%s: tensor %s is missing", s->folder, t->name.at);
    }
    // a vector is stored as one row
    if (found.rows * found.cols != rows * cols || (cols > 1 && found.cols != cols)) {
        die(EXIT_INPUT, SAFETENSORS_HINT,
            "%s: tensor %s is (%" PRId64 ", %" PRId64 "), expected (%" PRId64 ", %" PRId64 ")",
            s->folder, t->name.at, found.rows, found.cols, rows, cols);
    }
    return found;
}
static inline void hf_check_part(void *context, const HfTensor *t) {
    hf_find((const HfSlice *)context, t);
}
// Returns the configuration of a folder, and the precision of its tensors. Ends the program
// (EXIT_INPUT) if a file is bad, or if the model is one that this program does not compute.
static inline GptConfig huggingface_config(const char *folder, DType *dtype) {
    HfConfig c = {.path = text_of("%s/config.json", folder)};
    c.json = json_open(HUGGINGFACE_HINT, c.path.at);
    const HfModel *model = hf_model_type(&c);
    const bool gpt2 = !strcmp(model->arch, "gpt2");
    GptConfig config = gpt2 ? hf_gpt2_config(&c) : hf_llama_config(&c, model->activation);
    const int tie = json_get(&c.json, 0, "tie_word_embeddings");
    const bool tied = hf_absent(&c.json, tie) ? gpt2 : json_word_is(&c.json, tie, "true");
    config.arch = gpt_architecture(model->arch, strlen(model->arch), tied);
    if (config.arch < 0) { hf_refuse(&c, "tie_word_embeddings", "not with this model_type"); }
    config.padded_vocab = round_up(config.vocab, VOCAB_PADDING);
    gpt_config_check(&config, folder);
    json_free(&c.json);
    Safetensors files = safetensors_open(folder);
    *dtype = DTYPE_BF16;
    for (int i = 0; i < files.count; i++) {
        const Json *j = &files.files[i].header;
        for (int v = json_first(j, 0); v >= 0; v = json_next(j, 0, v)) {
            if (json_text_is(j, json_get(j, v, "dtype"), "F32")) { *dtype = DTYPE_FP32; }
        }
    }
    // a damaged configuration is found before memory is taken for it
    const GptModel m = gpt_model(config);
    HfSlice all = {.files = &files, .folder = folder};
    hf_each_tensor(&m, hf_check_part, &all);
    safetensors_close(&files);
    return gpt_config_complete(config);
}

static inline void hf_read_part(void *context, const HfTensor *t) {
    const HfSlice *s = (const HfSlice *)context;
    const int64_t low = max_i64(s->begin, t->begin),
                  high = min_i64(s->end, t->begin + t->rows * t->cols);
    if (low >= high) { return; }
    const SafeTensor from = hf_find(s, t);
    for (int64_t at = low, n; at < high; at += n, keep_alive()) {
        n = min_i64(high - at, STATE_PIECE_FLOATS);
        for (int64_t e = 0; e < n; e++) {
            const int64_t i = at + e - t->begin, row = i / t->cols, col = i % t->cols;
            state_piece.floats[e] =
                tensor_element(&from, t->part->transposed ? col * t->rows + row : i);
        }
        store_write_state(s->store, STATE_MASTER, s->storage, s->to + at - s->begin, n,
                          state_piece.floats);
    }
}
// Fills the masters from a folder, whose configuration the store's model must have. Each rank reads
// its own slices. Every rank calls it.
static inline void huggingface_load(const char *folder, Store *s) {
    Safetensors files = safetensors_open(folder);
    for (int storage = 0; storage < s->model->storages; storage++) {
        TensorPart parts[MOST_TENSORS];
        int64_t first;
        store_own(s, storage, &first);
        for (int i = gpt_storage_parts(s->model, storage, parts) - 1; i >= 0; i--) {
            int64_t begin, count = store_own_part(s, storage, &parts[i], &begin);
            if (!count) { continue; }
            HfSlice slice = {.files = &files,
                             .store = s,
                             .folder = folder,
                             .storage = storage,
                             .to = begin - first,
                             .begin = begin - parts[i].offset,
                             .end = begin - parts[i].offset + count};
            hf_each_part(s->model, parts[i].tensor, parts[i].layer, hf_read_part, &slice);
        }
    }
    safetensors_close(&files);
    store_masters_changed(s);
}

// --- writing -------------------------------------------------------------------------------------
// A safetensors file that is written in any order: it is mapped, with its space reserved.
typedef struct {
    const Store *store;
    Text path, temporary;
    TextBuffer header;
    char *map;
    size_t data, bytes; // where the tensors begin; of all tensors
    int fd, error;      // error: errno of the first failure
    // the part of a tensor's layer that is being written: its elements, and where they are
    int64_t low, high;
    const char *from;
    size_t to; // in the tensors: element 0 of the layer
} TensorWriter;

// Returns the first byte of a tensor's layer among all tensors. Padding is left out.
static inline size_t hf_offset(const Store *s, int tensor, int64_t layer) {
    const GptModel *m = s->model;
    int64_t elements = 0;
    for (int t = 0; t < tensor; t++) {
        elements += gpt_real_elements(m, t) * gpt_tensor_layers(m, t);
    }
    elements += layer * gpt_real_elements(m, tensor);
    return (size_t)elements * dtype_size(s->dtype);
}
static inline void hf_add_header(void *context, const HfTensor *t) {
    TensorWriter *w = (TensorWriter *)context;
    const bool turned = t->part->transposed, bf16 = w->store->dtype == DTYPE_BF16;
    const size_t bytes = (size_t)(t->rows * t->cols) * dtype_size(w->store->dtype);
    text_add(&w->header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%" PRId64, t->name.at,
             bf16 ? "BF16" : "F32", turned ? t->cols : t->rows);
    if (t->is_matrix) { text_add(&w->header, ",%" PRId64, turned ? t->rows : t->cols); }
    text_add(&w->header, "],\"data_offsets\":[%zu,%zu]}", w->bytes, w->bytes + bytes);
    w->bytes += bytes;
}
static inline void hf_write_part(void *context, const HfTensor *t) {
    TensorWriter *w = (TensorWriter *)context;
    const size_t size = dtype_size(w->store->dtype);
    const int64_t low = max_i64(w->low, t->begin),
                  high = min_i64(w->high, t->begin + t->rows * t->cols);
    char *to = w->map + w->data + w->to + (size_t)t->begin * size;
    if (low >= high) { return; }
    const char *from = w->from + (size_t)(low - w->low) * size;
    if (!t->part->transposed) {
        memcpy(to + (size_t)(low - t->begin) * size, from, (size_t)(high - low) * size);
        return;
    }
    for (int64_t e = low; e < high; e++, from += size) {
        const int64_t row = (e - t->begin) / t->cols, col = (e - t->begin) % t->cols;
        memcpy(to + (size_t)(col * t->rows + row) * size, from, size);
    }
}
// Writes a piece of a storage (PieceWriter). The file has every layer, shared or not.
static inline void hf_write_piece(void *writer, const Store *s, int storage, int64_t begin,
                                  int64_t count) {
    TensorWriter *w = (TensorWriter *)writer;
    TensorPart parts[MOST_TENSORS];
    const bool block = gpt_storage_class(s->model, storage) == STORAGE_BLOCK;
    const int n = gpt_storage_parts(s->model, storage, parts);
    for (int i = 0; i < n && !w->error; i++) {
        const int64_t first = max_i64(begin, parts[i].offset);
        w->low = first - parts[i].offset;
        w->high = min_i64(begin + count - parts[i].offset, parts[i].elements);
        w->from = state_piece.bytes + (size_t)(first - begin) * dtype_size(s->dtype);
        for (int64_t layer = parts[i].layer; w->low < w->high && layer >= 0;
             layer = block ? gpt_next_layer(s->model, layer) : -1) {
            w->to = hf_offset(s, parts[i].tensor, layer);
            hf_each_part(s->model, parts[i].tensor, layer, hf_write_part, w);
        }
    }
    keep_alive();
}
// Makes the header, and the file with its space.
static inline void hf_writer_open(TensorWriter *w, const Store *s, const char *folder) {
    memset(w, 0, sizeof *w);
    w->store = s;
    w->path = text_of("%s/model.safetensors", folder);
    w->temporary = text_of("%s/model.safetensors.tmp", folder);
    text_add(&w->header, "{\"__metadata__\":{\"format\":\"pt\"}");
    hf_each_tensor(s->model, hf_add_header, w);
    text_add(&w->header, "}");
    while (w->header.length % 8) { text_add(&w->header, " "); }
    w->data = 8 + w->header.length;
    w->fd = file_create(w->temporary.at, 0666);
    if (w->fd < 0) {
        w->error = errno;
        return;
    }
    const uint64_t length = w->header.length;
    w->error = posix_fallocate(w->fd, 0, (off_t)(w->data + w->bytes));
    if (w->error) { return; }
    void *map = mmap(NULL, w->data + w->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, w->fd, 0);
    if (map == MAP_FAILED) {
        w->error = errno;
        return;
    }
    w->map = (char *)map;
    memcpy(w->map, &length, 8);
    memcpy(w->map + 8, w->header.text, (size_t)length);
}
// Returns 0, or the errno of the first failure; then no file is left behind.
static inline int hf_writer_close(TensorWriter *w) {
    if (w->map) {
        if (!w->error && msync(w->map, w->data + w->bytes, MS_SYNC)) { w->error = errno; }
        munmap(w->map, w->data + w->bytes);
    }
    if (w->fd >= 0) {
        if (!w->error && fsync(w->fd)) { w->error = errno; }
        if (!w->error && rename(w->temporary.at, w->path.at)) { w->error = errno; }
        if (w->error) { unlink(w->temporary.at); }
        close(w->fd);
    }
    free(w->header.text);
    return w->error;
}

// Adds the keys of config.json that all types but GPT-2 have.
static inline void hf_add_llama_keys(TextBuffer *t, const GptModel *m, const HfModel *model) {
    const GptConfig *c = &m->config;
    const RotaryScaling *r = &c->scaling;
    text_add(t,
             "  \"hidden_size\": %" PRId64 ",\n  \"intermediate_size\": %" PRId64
             ",\n  \"num_hidden_layers\": %" PRId64 ",\n  \"num_attention_heads\": %" PRId64
             ",\n  \"num_key_value_heads\": %" PRId64 ",\n  \"head_dim\": %" PRId64
             ",\n  \"max_position_embeddings\": %" PRId64 ",\n  \"rms_norm_eps\": %.17g,\n",
             c->channels, c->ffn, c->layers, c->heads, c->kv_heads, c->head_dim, c->max_seq_len,
             c->eps);
    text_add(t, "  \"rope_theta\": %.17g,\n", c->theta);
    if (r->factor > 0) {
        text_add(t,
                 "  \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": %.17g, "
                 "\"low_freq_factor\": %.17g, \"high_freq_factor\": %.17g, "
                 "\"original_max_position_embeddings\": %" PRId64 "},\n",
                 r->factor, r->low, r->high, r->original);
    } else {
        text_add(t, "  \"rope_scaling\": null,\n");
    }
    text_add(t, "  \"hidden_act\": \"%s\",\n  \"attention_bias\": false,\n", model->activation);
    text_add(t, "  \"mlp_bias\": false,\n  \"use_sliding_window\": false,\n");
    text_add(t, "  \"attention_dropout\": 0.0,\n");
}
static inline void hf_add_gpt2_keys(TextBuffer *t, const GptConfig *c) {
    text_add(t,
             "  \"n_positions\": %" PRId64 ",\n  \"n_layer\": %" PRId64 ",\n  \"n_head\": %" PRId64
             ",\n  \"n_embd\": %" PRId64 ",\n  \"activation_function\": \"gelu_new\",\n"
             "  \"layer_norm_epsilon\": 1e-05,\n  \"resid_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n"
             "  \"attn_pdrop\": 0.0,\n",
             c->max_seq_len, c->layers, c->heads, c->channels);
}
static inline int hf_write_config(const Store *s, const char *folder) {
    const GptModel *m = s->model;
    const HfModel *model = hf_model_of(m);
    TextBuffer t = {};
    FileWriter w;
    text_add(&t, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n",
             model->class_name, model->model_type);
    if (m->config.theta > 0) {
        hf_add_llama_keys(&t, m, model);
    } else {
        hf_add_gpt2_keys(&t, &m->config);
    }
    text_add(&t,
             "  \"vocab_size\": %" PRId64 ",\n  \"tie_word_embeddings\": %s,\n"
             "  \"initializer_range\": 0.02,\n  \"bos_token_id\": null,\n"
             "  \"eos_token_id\": null,\n  \"torch_dtype\": \"%s\"\n}\n",
             m->config.vocab, gpt_is_tied(m) ? "true" : "false",
             s->dtype == DTYPE_BF16 ? "bfloat16" : "float32");
    writer_open(&w, text_of("%s/config.json", folder).at);
    writer_add(&w, t.text, t.length);
    free(t.text);
    return writer_close(&w);
}
// Writes the model in the precision of its working parameters as a folder, which may exist already.
// The tensors come first, so a new folder with a config.json is complete. Returns 0 or an errno.
// All ranks call it; rank 0 writes.
static inline int huggingface_write(const char *folder, Store *s) {
    const bool writes = s->comm->rank == 0;
    TensorWriter w = {};
    if (writes) {
        const int made = mkdir(folder, 0777) && errno != EEXIST ? errno : 0;
        hf_writer_open(&w, s, folder);
        if (made) { w.error = made; }
    }
    for (int storage = 0; storage < s->model->storages; storage++) {
        model_write_storage(writes ? &w : NULL, hf_write_piece, s, storage);
    }
    if (!writes) { return 0; }
    int error = hf_writer_close(&w);
    if (!error) { error = hf_write_config(s, folder); }
    sync_folder(folder);
    return error;
}

// Returns whether --export PATH is a file of llm.c, and not such a folder.
static inline bool export_is_file(const char *path) {
    const size_t n = strlen(path);
    return n > 4 && !strcmp(path + n - 4, ".bin");
}
// Writes the model to the file or folder of --export. Returns 0 or an errno. All ranks call it.
static inline int export_write(const char *path, Store *s) {
    return export_is_file(path) ? model_file_write(path, s) : huggingface_write(path, s);
}
// Ends the program (EXIT_INPUT) if the model cannot be written there.
static inline void export_check(const char *path, const GptModel *m) {
    if (*path && export_is_file(path) && strcmp(m->arch->name, "gpt2")) {
        die(EXIT_INPUT, "give the name of a folder, without .bin",
            "--export %s: llm.c's files have GPT-2 models only, and this is %s", path,
            m->arch->name);
    }
}

#endif
