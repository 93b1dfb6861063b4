// huggingface.h: models as folders of Hugging Face: config.json and safetensors, read by --model
// and written by --export. `hf_models` says which of their tensors are in which of ours.
// Source: huggingface/transformers, models/{gpt2,llama,qwen2,qwen3}.
#ifndef HUGGINGFACE_H
#define HUGGINGFACE_H

#include "model/model_file.h"  // states, writing files
#include "model/safetensors.h" // reading tensors

#include <glob.h> // other files of weights

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

// --- config.json ---------------------------------------------------------------------------------
// Every key that transformers 5 reads, with its default there: a missing key has the same value
// here. A key that would change what is computed, and that this program does not compute, is
// refused by name.
enum {
    HF_GPT2 = 1,
    HF_LLAMA = 2,
    HF_QWEN2 = 4,
    HF_QWEN3 = 8,
    HF_NANO = 16,
    HF_QWEN = HF_QWEN2 | HF_QWEN3,
    HF_ROTARY = HF_LLAMA | HF_QWEN | HF_NANO,
    HF_ALL = HF_GPT2 | HF_ROTARY
};
typedef enum {
    HF_SIZE,   // a whole number of at least 1, for a field; 0 stands for null
    HF_NUMBER, // a number over 0, for a field
    HF_MUST,   // one of `values`, and each element of a list
    HF_READ,   // by huggingface_config, hf_rotary or hf_keep
    HF_UNUSED  // changes nothing, whatever it is
} HfKind;
typedef struct {
    int types; // of models
    HfKind kind;
    const char *names, *values; // separated by spaces. names: for a field, of the same thing
    double otherwise;           // for a field: if the key is missing
    size_t field;               // offset in GptConfig
} HfKey;
#define HF_FIELD(of, is, called, to, missing)                                                      \
    {                                                                                              \
        .types = of, .kind = is, .names = called, .otherwise = missing,                            \
        .field = offsetof(GptConfig, to)                                                           \
    }
#define HF_KEYS(of, is, called, among)                                                             \
    { .types = of, .kind = is, .names = called, .values = among }
static const HfKey hf_keys[] = {
    HF_FIELD(HF_GPT2, HF_SIZE, "n_layer num_hidden_layers", layers, 12),
    HF_FIELD(HF_ROTARY, HF_SIZE, "num_hidden_layers", layers, 32),
    HF_FIELD(HF_GPT2, HF_SIZE, "n_head num_attention_heads", heads, 12),
    HF_FIELD(HF_ROTARY, HF_SIZE, "num_attention_heads", heads, 32),
    HF_FIELD(HF_GPT2, HF_SIZE, "n_embd hidden_size", channels, 768),
    HF_FIELD(HF_ROTARY, HF_SIZE, "hidden_size", channels, 4096),
    HF_FIELD(HF_GPT2, HF_SIZE, "vocab_size", vocab, 50257),
    HF_FIELD(HF_LLAMA | HF_NANO, HF_SIZE, "vocab_size", vocab, 32000),
    HF_FIELD(HF_QWEN, HF_SIZE, "vocab_size", vocab, 151936),
    HF_FIELD(HF_GPT2, HF_SIZE, "n_positions max_position_embeddings", max_seq_len, 1024),
    HF_FIELD(HF_LLAMA | HF_NANO, HF_SIZE, "max_position_embeddings", max_seq_len, 2048),
    HF_FIELD(HF_QWEN, HF_SIZE, "max_position_embeddings", max_seq_len, 32768),
    HF_FIELD(HF_GPT2, HF_SIZE, "n_inner", ffn, 0),
    HF_FIELD(HF_LLAMA | HF_NANO, HF_SIZE, "intermediate_size", ffn, 11008),
    HF_FIELD(HF_QWEN, HF_SIZE, "intermediate_size", ffn, 22016),
    HF_FIELD(HF_LLAMA | HF_NANO, HF_SIZE, "num_key_value_heads", kv_heads, 0),
    HF_FIELD(HF_QWEN, HF_SIZE, "num_key_value_heads", kv_heads, 32),
    HF_FIELD(HF_LLAMA | HF_QWEN2 | HF_NANO, HF_SIZE, "head_dim", head_dim, 0),
    HF_FIELD(HF_QWEN3, HF_SIZE, "head_dim", head_dim, 128),
    HF_FIELD(HF_ROTARY, HF_NUMBER, "rms_norm_eps", eps, 1e-6),
    HF_KEYS(HF_ALL, HF_READ, "model_type tie_word_embeddings", NULL),
    HF_KEYS(HF_ROTARY, HF_READ,
            "rope_theta rope_scaling rope_parameters original_max_position_embeddings", NULL),

    HF_KEYS(HF_GPT2, HF_MUST, "activation_function",
            "gelu_new gelu_pytorch_tanh gelu_fast gelu_accurate gelu_python_tanh"),
    HF_KEYS(HF_LLAMA | HF_QWEN, HF_MUST, "hidden_act", "silu swish"),
    HF_KEYS(HF_NANO, HF_MUST, "hidden_act", "relu2"),
    HF_KEYS(HF_GPT2, HF_MUST, "layer_norm_epsilon", "1e-5"),
    HF_KEYS(HF_GPT2, HF_MUST, "scale_attn_weights", "true"),
    HF_KEYS(HF_GPT2, HF_MUST, "scale_attn_by_inverse_layer_idx add_cross_attention", "false"),
    HF_KEYS(HF_LLAMA | HF_QWEN3 | HF_NANO, HF_MUST, "attention_bias", "false"),
    HF_KEYS(HF_LLAMA | HF_NANO, HF_MUST, "mlp_bias", "false"),
    HF_KEYS(HF_ROTARY, HF_MUST, "use_sliding_window", "false"),
    HF_KEYS(HF_ROTARY, HF_MUST, "layer_types", "null full_attention"),
    HF_KEYS(HF_ROTARY, HF_MUST, "partial_rotary_factor", "null 1"),
    HF_KEYS(HF_ALL, HF_MUST, "is_causal", "true"),
    // Other weights, sizes or types in place of those that the other keys name
    HF_KEYS(HF_ALL, HF_MUST,
            "quantization_config per_layer_config fusion_config transformers_weights "
            "configuration_files text_config decoder generator attribute_map default_theta "
            "default_rope_type _rope_type_labels _heterogeneity_spec",
            "null"),

    // Which tokens begin and end texts: --export keeps them
    HF_KEYS(HF_ALL, HF_READ, "bos_token_id eos_token_id pad_token_id", NULL),
    // Qwen2 has biases of q, k and v, whatever is said, and no Qwen has any in its MLP
    HF_KEYS(HF_QWEN2, HF_UNUSED, "attention_bias", NULL),
    HF_KEYS(HF_QWEN, HF_UNUSED, "mlp_bias", NULL),
    // Only layers of layer_types with a window, and use_sliding_window, would read them
    HF_KEYS(HF_ROTARY, HF_UNUSED, "sliding_window max_window_layers", NULL),
    // Dropout: this program trains without any
    HF_KEYS(HF_GPT2, HF_UNUSED, "resid_pdrop embd_pdrop attn_pdrop", NULL),
    HF_KEYS(HF_ROTARY, HF_UNUSED, "attention_dropout", NULL),
    // Classifiers and encoders, which are other models of the same type
    HF_KEYS(HF_GPT2, HF_UNUSED,
            "summary_type summary_use_proj summary_activation summary_proj_to_labels "
            "summary_first_dropout",
            NULL),
    HF_KEYS(HF_ALL, HF_UNUSED,
            "id2label label2id num_labels problem_type is_encoder_decoder classifier_dropout",
            NULL),
    // How the same is computed, stored or returned; the precision is that of the tensors
    HF_KEYS(HF_GPT2, HF_UNUSED, "reorder_and_upcast_attn", NULL),
    HF_KEYS(HF_ALL, HF_UNUSED,
            "use_cache dtype torch_dtype return_dict output_attentions output_hidden_states "
            "chunk_size_feed_forward gradient_checkpointing pretraining_tp "
            "attn_implementation _attn_implementation experts_implementation "
            "base_model_tp_plan base_model_pp_plan base_model_ep_plan base_model_fsdp_plan",
            NULL),
    // What it was made by and from, and how it would begin without weights
    HF_KEYS(HF_ALL, HF_UNUSED,
            "architectures auto_map transformers_version _name_or_path name_or_path "
            "initializer_range n_ctx task_specific_params",
            NULL),
};

enum { GENERATION_BYTES = 1 << 20 }; // of a generation_config.json, at most
typedef struct {
    Text path;
    Json json;
} HfConfig;
// Takes the next word of a text. Returns false at its end.
static inline bool hf_word(const char **words, char word[64]) {
    int n = 0;
    const bool there = sscanf(*words, "%63s%n", word, &n) == 1;
    *words += n;
    return there;
}
// Is a name, as JSON has it, one of these?
static inline bool hf_lists(const char *names, const JsonValue *v) {
    char name[64];
    while (hf_word(&names, name)) {
        if (json_means(v->name, v->name_bytes, name)) { return true; }
    }
    return false;
}
__attribute__((noreturn)) static inline void hf_refuse(const HfConfig *c, int object,
                                                       const char *key, const char *why) {
    const int value = json_get(&c->json, object, key);
    const JsonValue *v = value < 0 ? NULL : &c->json.values[value];
    const bool shown = v && v->kind <= JSON_STRING;
    die(EXIT_INPUT, HUGGINGFACE_HINT, "%s: %s%s%.*s: %s", c->path.at, key, shown ? " " : "",
        shown ? (int)min_i64((int64_t)v->bytes, 60) : 0, shown ? v->text : "", why);
}
// Returns a member of an object that is a whole number of at least 1.
static inline int64_t hf_size(const HfConfig *c, int object, const char *key) {
    int64_t size = 0;
    if (!json_whole(&c->json, json_get(&c->json, object, key), &size) || size < 1 ||
        size > 1 << 25) {
        hf_refuse(c, object, key, "a whole number of at least 1 was expected");
    }
    return size;
}
static inline double hf_number(const HfConfig *c, int object, const char *key) {
    const int value = json_get(&c->json, object, key);
    if (!json_is(&c->json, value, JSON_NUMBER) || !(c->json.values[value].number > 0)) {
        hf_refuse(c, object, key, "a number over 0 was expected");
    }
    return c->json.values[value].number;
}
// Reads a field by the only one of its names that is there.
static inline void hf_read_field(const HfConfig *c, const HfKey *key, GptConfig *config) {
    const Json *j = &c->json;
    char name[64], found[64] = "";
    for (const char *names = key->names; hf_word(&names, name);) {
        if (json_get(j, 0, name) < 0) { continue; }
        if (*found) { hf_refuse(c, 0, name, text_of("%s is there, too", found).at); }
        strcpy(found, name);
    }
    char *field = (char *)config + key->field;
    if (key->kind == HF_NUMBER) {
        *(double *)field = *found ? hf_number(c, 0, found) : key->otherwise;
        return;
    }
    const bool can_be_null = key->field == offsetof(GptConfig, kv_heads) || key->otherwise == 0;
    const bool null = can_be_null && *found && json_word_is(j, json_get(j, 0, found), "null");
    *(int64_t *)field = null ? 0 : *found ? hf_size(c, 0, found) : (int64_t)key->otherwise;
}
// Is a value one of these words? Those that are words or numbers in JSON, too, are no strings.
static inline bool hf_is_one_of(const Json *j, int value, const char *words) {
    char word[64];
    if (json_is(j, value, JSON_ARRAY)) {
        bool all = true;
        for (int i = json_first(j, value); i >= 0; i = json_next(j, value, i)) {
            all = all && json_is(j, i, JSON_STRING) && hf_is_one_of(j, i, words);
        }
        return all;
    }
    while (hf_word(&words, word)) {
        char *end = word;
        const double number = strtod(word, &end);
        const bool is_word =
            !strcmp(word, "true") || !strcmp(word, "false") || !strcmp(word, "null");
        if (!*end ? json_is(j, value, JSON_NUMBER) &&
                        fabs(j->values[value].number / number - 1) <= 1e-6
            : is_word ? json_word_is(j, value, word)
                      : json_text_is(j, value, word)) {
            return true;
        }
    }
    return false;
}
static inline void hf_check_keys(const HfConfig *c, int object, const HfKey *key) {
    char name[64];
    for (const char *names = key->names; hf_word(&names, name);) {
        const int value = json_get(&c->json, object, name);
        if (value < 0 || hf_is_one_of(&c->json, value, key->values)) { continue; }
        hf_refuse(c, object, name, text_of("this program computes only: %s", key->values).at);
    }
}
static inline bool hf_known(int type, const JsonValue *v) {
    bool known = false;
    for (int i = 0; i < LENGTH_OF(hf_keys) && !known; i++) {
        known = (hf_keys[i].types & type) && hf_lists(hf_keys[i].names, v);
    }
    return known;
}
// Says which keys nobody reads: perhaps newer than this table, perhaps misspelled.
static inline void hf_warn_unknown(const HfConfig *c, int type) {
    const Json *j = &c->json;
    TextBuffer unknown = {};
    for (int i = json_first(j, 0); i >= 0; i = json_next(j, 0, i)) {
        const JsonValue *v = &j->values[i];
        if (hf_known(type, v) || unknown.length > 500) { continue; }
        text_add(&unknown, " %.*s", (int)min_i64((int64_t)v->name_bytes, 60), v->name);
    }
    if (unknown.length && speaker.rank == 0) {
        show_plainly(unknown.text);
        fprintf(stderr, "warning: %s has keys that change nothing here:%s\n", c->path.at,
                unknown.text);
    }
    free(unknown.text);
}
// Reads base and scaling of rotary positions as transformers does: rope_scaling, the older name,
// counts if it says anything, else rope_parameters; and what they say counts more than the keys
// beside them, but for the positions before the scaling.
static inline void hf_rotary(const HfConfig *c, GptConfig *config) {
    static const HfKey part = HF_KEYS(HF_ROTARY, HF_MUST, "partial_rotary_factor", "null 1");
    static const char known[] = "rope_theta rope_type type factor low_freq_factor high_freq_factor "
                                "original_max_position_embeddings partial_rotary_factor";
    const char *original = "original_max_position_embeddings", *key = "rope_scaling";
    const Json *j = &c->json;
    int rope = json_get(j, 0, key);
    if (rope < 0 || json_word_is(j, rope, "null") ||
        (json_is(j, rope, JSON_OBJECT) && !json_members(j, rope))) {
        key = "rope_parameters";
        rope = json_get(j, 0, key);
    }
    const bool none = rope < 0 || json_word_is(j, rope, "null");
    if (!none && !json_is(j, rope, JSON_OBJECT)) { hf_refuse(c, 0, key, "an object was expected"); }
    for (int i = json_first(j, rope); i >= 0; i = json_next(j, rope, i)) {
        const JsonValue *v = &j->values[i];
        if (hf_lists(known, v)) { continue; }
        const int n = (int)min_i64((int64_t)v->name_bytes, 60);
        hf_refuse(c, 0, key, text_of("this program does not know its %.*s", n, v->name).at);
    }
    hf_check_keys(c, rope, &part);
    const int inside = json_get(j, rope, "rope_theta"), beside = json_get(j, 0, "rope_theta");
    config->theta = inside >= 0   ? hf_number(c, rope, "rope_theta")
                    : beside >= 0 ? hf_number(c, 0, "rope_theta")
                                  : 1e4;
    int type = json_get(j, rope, "rope_type");
    if (type < 0) { type = json_get(j, rope, "type"); }
    if (type < 0 || json_text_is(j, type, "default")) { return; }
    if (!json_text_is(j, type, "llama3")) {
        hf_refuse(c, 0, key, "of the ways to scale rotary positions, this program knows llama3");
    }
    config->scaling.factor = hf_number(c, rope, "factor");
    config->scaling.low = hf_number(c, rope, "low_freq_factor");
    config->scaling.high = hf_number(c, rope, "high_freq_factor");
    config->scaling.original = json_get(j, 0, original) >= 0      ? hf_size(c, 0, original)
                               : json_get(j, rope, original) >= 0 ? hf_size(c, rope, original)
                                                                  : config->max_seq_len;
}
// What --export keeps of the folder that a model came from.
typedef struct {
    char *ids;        // lines of config.json; NULL: the model came from elsewhere
    char *generation; // generation_config.json; NULL: there was none
    size_t bytes;     // of generation
} HfKept;
static inline HfKept hf_keep(const HfConfig *c, const char *folder) {
    static const char *const names[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    const Text path = text_of("%s/generation_config.json", folder);
    const Json *j = &c->json;
    TextBuffer ids = {};
    text_add(&ids, "%s", "");
    for (int i = 0; i < LENGTH_OF(names); i++) {
        const int value = json_get(j, 0, names[i]);
        const bool list = json_is(j, value, JSON_ARRAY);
        if (value < 0) { continue; }
        text_add(&ids, "  \"%s\": %s", names[i], list ? "[" : "");
        for (int v = list ? json_first(j, value) : value, n = 0; v >= 0;
             v = list ? json_next(j, value, v) : -1) {
            if (!json_is(j, v, JSON_NUMBER) && !json_word_is(j, v, "null")) {
                hf_refuse(c, 0, names[i], "the number of a token was expected");
            }
            text_add(&ids, "%s%.*s", n++ ? ", " : "", (int)j->values[v].bytes, j->values[v].text);
        }
        text_add(&ids, "%s,\n", list ? "]" : "");
    }
    HfKept kept = {.ids = ids.text};
    if (!access(path.at, F_OK)) {
        kept.generation = read_file(path.at, HUGGINGFACE_HINT, GENERATION_BYTES, &kept.bytes);
    }
    return kept;
}

// Returns the row of hf_models that a configuration is of. Ends the program (EXIT_INPUT) if there is
// none.
static inline int hf_model_type(const HfConfig *c) {
    for (int i = 0; i < LENGTH_OF(hf_models); i++) {
        const int type = json_get(&c->json, 0, "model_type");
        if (json_text_is(&c->json, type, hf_models[i].model_type)) { return i; }
    }
    hf_refuse(c, 0, "model_type", "this program knows gpt2, llama, qwen2 and qwen3");
}
static inline GptConfig hf_read_config(const HfConfig *c) {
    const Json *j = &c->json;
    const int row = hf_model_type(c), type = 1 << row, tie = json_get(j, 0, "tie_word_embeddings");
    GptConfig config = {};
    for (int i = 0; i < LENGTH_OF(hf_keys); i++) {
        if (!(hf_keys[i].types & type)) { continue; }
        if (hf_keys[i].kind <= HF_NUMBER) { hf_read_field(c, &hf_keys[i], &config); }
        if (hf_keys[i].kind == HF_MUST) { hf_check_keys(c, 0, &hf_keys[i]); }
    }
    if (type & HF_ROTARY) { hf_rotary(c, &config); }
    if (type == HF_GPT2 && config.ffn && config.ffn != 4 * config.channels) {
        hf_refuse(c, 0, "n_inner", "this program computes 4 n_embd");
    }
    if (tie >= 0 && !json_word_is(j, tie, "true") && !json_word_is(j, tie, "false")) {
        hf_refuse(c, 0, "tie_word_embeddings", "true or false was expected");
    }
    const bool tied = tie < 0 ? type == HF_GPT2 : json_word_is(j, tie, "true");
    config.arch = gpt_architecture(hf_models[row].arch, strlen(hf_models[row].arch), tied);
    if (config.arch < 0) { hf_refuse(c, 0, "tie_word_embeddings", "not with this model_type"); }
    config.padded_vocab = round_up(config.vocab, VOCAB_PADDING);
    hf_warn_unknown(c, type);
    return config;
}

// --- reading -------------------------------------------------------------------------------------
// Returns whether --model is such a folder.
static inline bool huggingface_is(const char *path) {
    return !access(text_of("%s/config.json", path).at, F_OK) &&
           access(text_of("%s/manifest", path).at, F_OK);
}
// A slice of one of our tensors that is read from the files.
typedef struct {
    const Safetensors *files;
    const Store *store;
    const char *folder;
    const HfModel *model;
    bool tied, bf16; // of the model; of all tensors that were checked
    int storage;
    int64_t to;         // element of this rank's slice of the storage
    int64_t begin, end; // elements of the tensor
} HfSlice;
// Looks for a tensor, with and without the prefix of the model inside, as transformers does.
static inline bool hf_look(const HfSlice *s, const char *name, SafeTensor *found) {
    const char *inside = s->model->parts[0].name; // its first word
    const int n = (int)(strchr(inside, '.') + 1 - inside);
    const Text other = strncmp(name, inside, (size_t)n) ? text_of("%.*s%s", n, inside, name)
                                                        : text_of("%s", name + n);
    SafeTensor second;
    const bool one = safetensors_find(s->files, name, found),
               two = safetensors_find(s->files, other.at, &second);
    if (one && two) {
        die(EXIT_INPUT, "leave one of them out", "%s: tensor %s is there, and as %s, too",
            s->folder, name, other.at);
    }
    if (two) { *found = second; }
    return one || two;
}
// Finds a tensor. Ends the program (EXIT_INPUT) if it is missing, or has another shape.
static inline SafeTensor hf_find(const HfSlice *s, const HfTensor *t) {
    const int64_t rows = t->part->transposed ? t->cols : t->rows,
                  cols = t->part->transposed ? t->rows : t->cols;
    SafeTensor found;
    if (!hf_look(s, t->name.at, &found)) {
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
    HfSlice *s = (HfSlice *)context;
    const SafeTensor found = hf_find(s, t);
    s->bf16 = s->bf16 && found.dtype == TENSOR_BF16;
    // transformers ties the head only if it is missing, or the same
    SafeTensor head;
    if (!strcmp(t->part->tensor, "wte") && s->tied && hf_look(s, "lm_head.weight", &head) &&
        !tensors_equal(&head, &found)) {
        die(EXIT_INPUT, "give tie_word_embeddings false, or leave lm_head.weight out",
            "%s: tie_word_embeddings is true, but lm_head.weight differs from %s", s->folder,
            t->name.at);
    }
}
// Refuses a folder with weights that transformers would take first.
static inline void hf_refuse_others(const char *folder) {
    glob_t others = {};
    const Text adapter = text_of("%s/adapter_config.json", folder);
    if (!glob(text_of("%s/shard-*-model-*-of-*.safetensors", folder).at, 0, NULL, &others) ||
        !access(adapter.at, F_OK)) {
        die(EXIT_INPUT, HUGGINGFACE_HINT, "%s: this program reads model.safetensors alone",
            others.gl_pathc ? others.gl_pathv[0] : adapter.at);
    }
    globfree(&others);
}
// Returns the configuration of a folder, and the precision of its tensors. Ends the program
// (EXIT_INPUT) if a file is bad, or if the model is one that this program does not compute.
// kept: what --export is to keep of it, or NULL.
static inline GptConfig huggingface_config(const char *folder, DType *dtype, HfKept *kept) {
    HfConfig c = {.path = text_of("%s/config.json", folder)};
    c.json = json_open(HUGGINGFACE_HINT, c.path.at);
    const GptConfig config = hf_read_config(&c);
    gpt_config_check(&config, folder);
    if (kept) { *kept = hf_keep(&c, folder); }
    json_free(&c.json);
    hf_refuse_others(folder);
    // a damaged configuration is found before memory is taken for it
    Safetensors files = safetensors_open(folder);
    const GptModel m = gpt_model(config);
    HfSlice all = {.files = &files,
                   .folder = folder,
                   .model = hf_model_of(&m),
                   .tied = gpt_is_tied(&m),
                   .bf16 = true};
    hf_each_tensor(&m, hf_check_part, &all);
    safetensors_close(&files);
    *dtype = all.bf16 ? DTYPE_BF16 : DTYPE_FP32;
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
        model_take(s->store, s->storage, s->to + at - s->begin, n, s->folder, t->name.at);
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
                             .model = hf_model_of(s->model),
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
        file_hide_time(w->fd);
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
static inline int hf_write_text(const char *folder, const char *name, const char *text,
                                size_t bytes) {
    FileWriter w;
    writer_open(&w, text_of("%s/%s", folder, name).at);
    writer_add(&w, text, bytes);
    return writer_close(&w);
}
static inline int hf_write_config(const Store *s, const char *folder, const HfKept *kept) {
    const GptModel *m = s->model;
    const HfModel *model = hf_model_of(m);
    TextBuffer t = {};
    text_add(&t, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n",
             model->class_name, model->model_type);
    if (m->config.theta > 0) {
        hf_add_llama_keys(&t, m, model);
    } else {
        hf_add_gpt2_keys(&t, &m->config);
    }
    text_add(&t,
             "  \"vocab_size\": %" PRId64 ",\n  \"tie_word_embeddings\": %s,\n"
             "  \"initializer_range\": 0.02,\n%s  \"torch_dtype\": \"%s\"\n}\n",
             m->config.vocab, gpt_is_tied(m) ? "true" : "false",
             kept->ids ? kept->ids : "  \"bos_token_id\": null,\n  \"eos_token_id\": null,\n",
             s->dtype == DTYPE_BF16 ? "bfloat16" : "float32");
    int error = 0;
    if (kept->generation) {
        error = hf_write_text(folder, "generation_config.json", kept->generation, kept->bytes);
    }
    if (!error) { error = hf_write_text(folder, "config.json", t.text, t.length); }
    free(t.text);
    return error;
}
// Writes the model in the precision of its working parameters as a folder, which may exist already.
// The tensors come first, so a new folder with a config.json is complete. Returns 0 or an errno.
// All ranks call it; rank 0 writes.
static inline int huggingface_write(const char *folder, const HfKept *kept, Store *s) {
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
    if (!error) { error = hf_write_config(s, folder, kept); }
    folder_hide_time(folder);
    sync_folder(folder);
    return error;
}

// Returns whether --export PATH is a file of llm.c, and not such a folder.
static inline bool export_is_file(const char *path) {
    const size_t n = strlen(path);
    return n > 4 && !strcmp(path + n - 4, ".bin");
}
// Writes the model to the file or folder of --export. Returns 0 or an errno. All ranks call it.
static inline int export_write(const char *path, const HfKept *kept, Store *s) {
    return export_is_file(path) ? model_file_write(path, s) : huggingface_write(path, kept, s);
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
