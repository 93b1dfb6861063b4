// huggingface_config.h: config.json of a folder of Hugging Face: which model it means, and what of
// it --export keeps.
// Source: huggingface/transformers 5: configurations and rotary positions of gpt2, llama, qwen2 and
// qwen3. test/make_huggingface_golden.py compares each key.
#ifndef HUGGINGFACE_CONFIG_H
#define HUGGINGFACE_CONFIG_H

#include "base/base.h"
#include "base/files.h"
#include "base/json.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"

#define HUGGINGFACE_HINT                                                                           \
    "--model takes folders of Hugging Face's GPT-2, Llama, Mixtral, Qwen2, Qwen3, Qwen3-MoE and "  \
    "GraniteMoeShared models, and what --export wrote"

// The types of models, in the order of the bits below. nano is a type of our own, which only this
// program reads.
typedef struct {
    const char *arch, *model_type, *class_name, *activation;
    bool experts, shared; // has experts; has some to which all tokens go
} HfModel;
static const HfModel hf_models[] = {
    {.arch = "gpt2",
     .model_type = "gpt2",
     .class_name = "GPT2LMHeadModel",
     .activation = "gelu_new"},
    {.arch = "llama",
     .model_type = "llama",
     .class_name = "LlamaForCausalLM",
     .activation = "silu"},
    {.arch = "qwen2",
     .model_type = "qwen2",
     .class_name = "Qwen2ForCausalLM",
     .activation = "silu"},
    {.arch = "qwen3",
     .model_type = "qwen3",
     .class_name = "Qwen3ForCausalLM",
     .activation = "silu"},
    {.arch = "nano",
     .model_type = "train_gpt_nano",
     .class_name = "NanoForCausalLM",
     .activation = "relu2"},
    {.arch = "llama",
     .model_type = "mixtral",
     .class_name = "MixtralForCausalLM",
     .activation = "silu",
     .experts = true},
    {.arch = "qwen3",
     .model_type = "qwen3_moe",
     .class_name = "Qwen3MoeForCausalLM",
     .activation = "silu",
     .experts = true},
    {.arch = "llama",
     .model_type = "granitemoeshared",
     .class_name = "GraniteMoeSharedForCausalLM",
     .activation = "silu",
     .experts = true,
     .shared = true},
};
// Returns the name of a type. Experts in groups have one of our own: transformers would read them
// as a single group.
static inline Text hf_type_name(const HfModel *model, bool groups) {
    return text_of("%s%s", groups ? "train_gpt_" : "", model->model_type);
}
// Returns the type of a model, or NULL if there is none.
static inline const HfModel *hf_model_of(const GptModel *m) {
    for (int i = 0; i < LENGTH_OF(hf_models); i++) {
        const HfModel *model = &hf_models[i];
        if (!strcmp(model->arch, m->arch->name) && model->experts == m->arch->experts &&
            model->shared == (m->config.shared_experts > 0)) {
            return model;
        }
    }
    return NULL;
}

// -------------------------------------------------------------------------------------------------
// Every key that transformers 5 reads, with its default there: a missing key has the same value
// here. A key that would change what is computed, and that this program does not compute, is
// refused by name.
enum {
    HF_GPT2 = 1,
    HF_LLAMA = 2,
    HF_QWEN2 = 4,
    HF_QWEN3 = 8,
    HF_NANO = 16,
    HF_MIXTRAL = 32,
    HF_QWEN3_MOE = 64,
    HF_GRANITE = 128,
    HF_EXPERTS = HF_MIXTRAL | HF_QWEN3_MOE | HF_GRANITE,
    HF_QWEN = HF_QWEN2 | HF_QWEN3,
    HF_ROTARY = HF_LLAMA | HF_QWEN | HF_NANO | HF_EXPERTS,
    HF_ALL = HF_GPT2 | HF_ROTARY
};
typedef enum {
    HF_SIZE,   // a whole number of at least 1, for a field; 0 stands for null
    HF_NUMBER, // a number over 0, for a field
    HF_MUST,   // one of `values`
    HF_EACH,   // null, or a list of nothing but `values`
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
    HF_FIELD(HF_ROTARY & ~HF_QWEN3_MOE, HF_SIZE, "num_hidden_layers", layers, 32),
    HF_FIELD(HF_QWEN3_MOE, HF_SIZE, "num_hidden_layers", layers, 24),
    HF_FIELD(HF_GPT2, HF_SIZE, "n_head num_attention_heads", heads, 12),
    HF_FIELD(HF_ROTARY, HF_SIZE, "num_attention_heads", heads, 32),
    HF_FIELD(HF_GPT2, HF_SIZE, "n_embd hidden_size", channels, 768),
    HF_FIELD(HF_ROTARY & ~HF_QWEN3_MOE, HF_SIZE, "hidden_size", channels, 4096),
    HF_FIELD(HF_QWEN3_MOE, HF_SIZE, "hidden_size", channels, 2048),
    HF_FIELD(HF_GPT2, HF_SIZE, "vocab_size", vocab, 50257),
    HF_FIELD(HF_LLAMA | HF_NANO | HF_MIXTRAL | HF_GRANITE, HF_SIZE, "vocab_size", vocab, 32000),
    HF_FIELD(HF_QWEN | HF_QWEN3_MOE, HF_SIZE, "vocab_size", vocab, 151936),
    HF_FIELD(HF_GPT2, HF_SIZE, "n_positions max_position_embeddings", max_seq_len, 1024),
    HF_FIELD(HF_LLAMA | HF_NANO | HF_GRANITE, HF_SIZE, "max_position_embeddings", max_seq_len,
             2048),
    HF_FIELD(HF_QWEN | HF_QWEN3_MOE, HF_SIZE, "max_position_embeddings", max_seq_len, 32768),
    HF_FIELD(HF_MIXTRAL, HF_SIZE, "max_position_embeddings", max_seq_len, 131072),
    HF_FIELD(HF_GPT2, HF_SIZE, "n_inner", ffn, 0),
    HF_FIELD(HF_LLAMA | HF_NANO, HF_SIZE, "intermediate_size", ffn, 11008),
    HF_FIELD(HF_QWEN, HF_SIZE, "intermediate_size", ffn, 22016),
    HF_FIELD(HF_MIXTRAL, HF_SIZE, "intermediate_size", expert_ffn, 14336),
    HF_FIELD(HF_QWEN3_MOE, HF_SIZE, "moe_intermediate_size", expert_ffn, 768),
    HF_FIELD(HF_GRANITE, HF_SIZE, "intermediate_size", expert_ffn, 11008),
    HF_FIELD(HF_GRANITE, HF_SIZE, "shared_intermediate_size", shared_expert_ffn, 0),
    HF_FIELD(HF_MIXTRAL, HF_SIZE, "num_local_experts num_experts", experts, 8),
    HF_FIELD(HF_GRANITE, HF_SIZE, "num_local_experts", experts, 8),
    HF_FIELD(HF_QWEN3_MOE, HF_SIZE, "num_experts num_local_experts", experts, 128),
    HF_FIELD(HF_EXPERTS, HF_SIZE, "prototypes", prototypes, 0),
    HF_FIELD(HF_MIXTRAL | HF_GRANITE, HF_SIZE, "num_experts_per_tok", top_k, 2),
    HF_FIELD(HF_QWEN3_MOE, HF_SIZE, "num_experts_per_tok", top_k, 8),
    HF_FIELD(HF_LLAMA | HF_NANO | HF_GRANITE, HF_SIZE, "num_key_value_heads", kv_heads, 0),
    HF_FIELD(HF_QWEN, HF_SIZE, "num_key_value_heads", kv_heads, 32),
    HF_FIELD(HF_MIXTRAL, HF_SIZE, "num_key_value_heads", kv_heads, 8),
    HF_FIELD(HF_QWEN3_MOE, HF_SIZE, "num_key_value_heads", kv_heads, 4),
    HF_FIELD(HF_LLAMA | HF_QWEN2 | HF_NANO | HF_EXPERTS, HF_SIZE, "head_dim", head_dim, 0),
    HF_FIELD(HF_QWEN3, HF_SIZE, "head_dim", head_dim, 128),
    HF_FIELD(HF_ROTARY & ~HF_MIXTRAL, HF_NUMBER, "rms_norm_eps", eps, 1e-6),
    HF_FIELD(HF_MIXTRAL, HF_NUMBER, "rms_norm_eps", eps, 1e-5),
    HF_KEYS(HF_ALL, HF_READ, "model_type tie_word_embeddings", NULL),
    HF_KEYS(HF_ROTARY, HF_READ,
            "rope_theta rope_scaling rope_parameters original_max_position_embeddings", NULL),

    HF_KEYS(HF_GPT2, HF_MUST, "activation_function",
            "gelu_new gelu_pytorch_tanh gelu_fast gelu_accurate gelu_python_tanh"),
    HF_KEYS(HF_LLAMA | HF_QWEN | HF_EXPERTS, HF_MUST, "hidden_act", "silu swish"),
    HF_KEYS(HF_NANO, HF_MUST, "hidden_act", "relu2"),
    HF_KEYS(HF_GPT2, HF_MUST, "layer_norm_epsilon", "1e-5"),
    HF_KEYS(HF_GPT2, HF_MUST, "scale_attn_weights", "true"),
    HF_KEYS(HF_GPT2, HF_MUST, "scale_attn_by_inverse_layer_idx add_cross_attention", "false"),
    HF_KEYS(HF_LLAMA | HF_QWEN3 | HF_NANO | HF_QWEN3_MOE | HF_GRANITE, HF_MUST, "attention_bias",
            "false"),
    HF_KEYS(HF_GRANITE, HF_MUST, "embedding_multiplier residual_multiplier logits_scaling", "1"),
    HF_KEYS(HF_GRANITE, HF_READ, "attention_multiplier", NULL),
    // Mixtral's windows need no other key; a layer without experts is another table
    HF_KEYS(HF_MIXTRAL, HF_MUST, "sliding_window", "null"),
    HF_KEYS(HF_QWEN3_MOE, HF_READ, "norm_topk_prob", NULL),
    HF_KEYS(HF_QWEN3_MOE, HF_MUST, "decoder_sparse_step", "1"),
    HF_KEYS(HF_QWEN3_MOE, HF_READ, "mlp_only_layers", NULL),
    // Noise of the router is of training there; how experts are balanced is a flag's here
    HF_KEYS(HF_EXPERTS, HF_MUST, "router_jitter_noise", "0"),
    HF_KEYS(HF_EXPERTS, HF_UNUSED, "router_aux_loss_coef output_router_logits", NULL),
    HF_KEYS(HF_QWEN3_MOE, HF_UNUSED, "intermediate_size", NULL),
    HF_KEYS(HF_EXPERTS, HF_UNUSED, "mlp_bias", NULL),
    HF_KEYS(HF_MIXTRAL, HF_UNUSED, "attention_bias", NULL),
    HF_KEYS(HF_LLAMA | HF_NANO, HF_MUST, "mlp_bias", "false"),
    HF_KEYS(HF_ROTARY, HF_MUST, "use_sliding_window", "false"),
    HF_KEYS(HF_ROTARY, HF_EACH, "layer_types", "full_attention"),
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
    HF_KEYS(HF_ROTARY & ~HF_MIXTRAL, HF_UNUSED, "sliding_window max_window_layers", NULL),
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
// Reads a field by its name, or by its other name, which must not mean something else.
static inline void hf_read_field(const HfConfig *c, const HfKey *key, GptConfig *config) {
    const Json *j = &c->json;
    char name[64], found[64] = "";
    for (const char *names = key->names; hf_word(&names, name);) {
        const int value = json_get(j, 0, name), first = *found ? json_get(j, 0, found) : -1;
        if (value < 0) { continue; }
        if (first >= 0 && j->values[first].number != j->values[value].number) {
            hf_refuse(c, 0, name, text_of("it differs from %s", found).at);
        }
        strcpy(found, name);
    }
    void *field = (char *)config + key->field;
    if (key->kind == HF_NUMBER) {
        *(double *)field = *found ? hf_number(c, 0, found) : key->otherwise;
        return;
    }
    const bool can_be_null = key->field == offsetof(GptConfig, kv_heads) || key->otherwise == 0;
    const bool null = can_be_null && *found && json_word_is(j, json_get(j, 0, found), "null");
    *(int64_t *)field = null ? 0 : *found ? hf_size(c, 0, found) : (int64_t)key->otherwise;
}
// Is a value one of these words? A word that JSON writes without quotes (a number, true, false,
// null) stands for that value, not for a text.
static inline bool hf_is_one_of(const Json *j, int value, const char *words) {
    char word[64];
    while (hf_word(&words, word)) {
        char *end = word;
        const double number = strtod(word, &end);
        const bool is_word =
            !strcmp(word, "true") || !strcmp(word, "false") || !strcmp(word, "null");
        if (!*end ? json_is(j, value, JSON_NUMBER) &&
                        fabs(j->values[value].number - number) <= 1e-6 * fabs(number)
            : is_word ? json_word_is(j, value, word)
                      : json_text_is(j, value, word)) {
            return true;
        }
    }
    return false;
}
static inline bool hf_fits(const Json *j, int value, const HfKey *key) {
    if (key->kind == HF_MUST) { return hf_is_one_of(j, value, key->values); }
    bool all = json_first(j, value) >= 0 || json_word_is(j, value, "null");
    for (int i = json_first(j, value); i >= 0; i = json_next(j, value, i)) {
        all = all && hf_is_one_of(j, i, key->values);
    }
    return all;
}
static inline void hf_check_keys(const HfConfig *c, int object, const HfKey *key) {
    char name[64];
    for (const char *names = key->names; hf_word(&names, name);) {
        const int value = json_get(&c->json, object, name);
        if (value < 0 || hf_fits(&c->json, value, key)) { continue; }
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
static inline void hf_rotary(const HfConfig *c, int types, GptConfig *config) {
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
    config->theta = inside >= 0           ? hf_number(c, rope, "rope_theta")
                    : beside >= 0         ? hf_number(c, 0, "rope_theta")
                    : types == HF_MIXTRAL ? 1e6
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
// What --export writes beside the model, as it was in the folder that the model came from.
enum { HF_GENERATION, HF_TOKENIZER, HF_TOKENIZER_CONFIG };
static const char *const hf_files[] = {"generation_config.json",
                                       "tokenizer.json",
                                       "tokenizer_config.json",
                                       "special_tokens_map.json",
                                       "added_tokens.json",
                                       "vocab.json",
                                       "merges.txt",
                                       "tokenizer.model",
                                       "chat_template.jinja"};
typedef struct {
    char *text; // NULL: none
    size_t bytes;
} HfFile;
typedef struct {
    char *ids;                        // lines of config.json; NULL: not known
    HfFile file[LENGTH_OF(hf_files)]; // of rank 0, which writes
} HfKept;
static inline HfKept hf_keep(const HfConfig *c, const char *folder) {
    static const char *const names[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
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
    for (int i = 0; speaker.rank == 0 && i < LENGTH_OF(hf_files); i++) {
        const Text path = text_of("%s/%s", folder, hf_files[i]);
        if (access(path.at, F_OK)) { continue; }
        kept.file[i].text = read_file(path.at, HUGGINGFACE_HINT, JSON_BYTES, &kept.file[i].bytes);
    }
    return kept;
}

// Of Qwen3's mixtures this program computes those where weights add up to 1, in every layer.
static inline void hf_check_qwen3_moe(const HfConfig *c) {
    const Json *j = &c->json;
    const char *divided = "norm_topk_prob", *dense = "mlp_only_layers";
    const int layers = json_get(j, 0, dense);
    if (!json_word_is(j, json_get(j, 0, divided), "true")) { // false, if it is missing
        hf_refuse(c, 0, divided, "this program computes only: true");
    }
    if (layers >= 0 && !json_word_is(j, layers, "null") &&
        !(json_is(j, layers, JSON_ARRAY) && json_first(j, layers) < 0)) {
        hf_refuse(c, 0, dense, "this program has experts in all layers or in none");
    }
}
// Of Granite's mixtures this program computes those with shared experts, whose scale of attention
// is that of others.
static inline void hf_read_granite(const HfConfig *c, GptConfig *config) {
    const char *scale = "attention_multiplier";
    const double width = config->head_dim
                             ? (double)config->head_dim
                             : (double)config->channels / (double)max_i64(1, config->heads);
    const double found = json_get(&c->json, 0, scale) < 0 ? 1 : hf_number(c, 0, scale);
    if (!config->shared_expert_ffn) {
        hf_refuse(c, 0, "shared_intermediate_size", "this program computes only: more than 0");
    }
    if (fabs(found * sqrt(width) - 1) > 1e-6) {
        hf_refuse(c, 0, scale, text_of("this program computes only: %.9g", 1 / sqrt(width)).at);
    }
    config->shared_experts = 1;
}
// Returns the row of hf_models that a configuration is of. Ends the program (EXIT_INPUT) if there
// is none.
static inline int hf_model_type(const HfConfig *c) {
    const int type = json_get(&c->json, 0, "model_type"),
              prototypes = json_get(&c->json, 0, "prototypes");
    for (int i = 0; i < LENGTH_OF(hf_models); i++) {
        const bool own = hf_models[i].experts && prototypes >= 0;
        if (json_text_is(&c->json, type, hf_type_name(&hf_models[i], own).at)) { return i; }
    }
    hf_refuse(c, 0, "model_type",
              "this program knows gpt2, llama, mixtral, qwen2, qwen3, qwen3_moe and "
              "granitemoeshared");
}
static inline GptConfig hf_read_config(const HfConfig *c) {
    const Json *j = &c->json;
    const int row = hf_model_type(c), type = 1 << row, tie = json_get(j, 0, "tie_word_embeddings");
    GptConfig config = {};
    for (int i = 0; i < LENGTH_OF(hf_keys); i++) {
        if (!(hf_keys[i].types & type)) { continue; }
        if (hf_keys[i].kind <= HF_NUMBER) { hf_read_field(c, &hf_keys[i], &config); }
        if (hf_keys[i].kind == HF_MUST || hf_keys[i].kind == HF_EACH) {
            hf_check_keys(c, 0, &hf_keys[i]);
        }
    }
    if (type & HF_ROTARY) { hf_rotary(c, type, &config); }
    if (type == HF_QWEN3_MOE) { hf_check_qwen3_moe(c); }
    if (type == HF_GRANITE) { hf_read_granite(c, &config); }
    if (type == HF_GPT2 && config.ffn && config.ffn != 4 * config.channels) {
        hf_refuse(c, 0, "n_inner", "this program computes 4 n_embd");
    }
    if (tie >= 0 && !json_word_is(j, tie, "true") && !json_word_is(j, tie, "false")) {
        hf_refuse(c, 0, "tie_word_embeddings", "true or false was expected");
    }
    const bool tied = tie < 0 ? type == HF_GPT2 : json_word_is(j, tie, "true");
    config.arch = gpt_architecture(hf_models[row].arch, strlen(hf_models[row].arch), tied,
                                   config.experts > 0);
    if (config.arch < 0) { hf_refuse(c, 0, "tie_word_embeddings", "not with this model_type"); }
    config.padded_vocab = round_up(config.vocab, VOCAB_PADDING);
    hf_warn_unknown(c, type);
    return config;
}

#endif
