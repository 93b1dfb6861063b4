// huggingface_tokenizer.h: the tokenizer that --export writes beside a model, so that transformers'
// AutoTokenizer has the ids with which the model was trained:
//
//   a tokenizer.json    that file, or the one beside a tokenizer.bin, byte for byte
//   GPT-2's tokens      a tokenizer.json is made: a token's id is the rank of its merge
//   bytes               a tokenizer.json without merges, if the model has all 256. Its end of text
//                       is the byte 0, which no text has
//   none is known       what the folder of --model has
//
// Of other tokens the merges are not known: a note says so.
#ifndef HUGGINGFACE_TOKENIZER_H
#define HUGGINGFACE_TOKENIZER_H

#include "base/base.h"
#include "base/figures.h"
#include "base/files.h"
#include "base/json.h"
#include "checkpoint/huggingface_config.h"
#include "model/config.h"
#include "model/gpt.h"
#include "text/bpe.h"
#include "text/encoder.h"
#include "text/tokenizer.h"
#include "text/tokenizer_encode.h"
#include "text/tokenizer_json.h"

#define HF_BYTE_LEVEL                                                                              \
    "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "              \
    "\"use_regex\": true}"

static inline void hf_take_file(HfKept *kept, int file, char *text, size_t bytes) {
    free(kept->file[file].text);
    const HfFile taken = {.text = text, .bytes = bytes};
    kept->file[file] = taken;
}
// Adds a token as tokenizer.json spells it.
static inline void hf_add_token(TextBuffer *text, const Tokenizer *t, int32_t id) {
    int length, n = 0;
    const unsigned char *bytes = tokenizer_decode(t, id, &length);
    unsigned char *spelled = new_array(unsigned char, 2 * length + 1, "the tokenizer");
    for (int i = 0; i < length; i++) {
        n += json_put_utf8(tokenizer_json_character(bytes[i]), spelled + n);
    }
    spelled[n] = 0;
    json_add_string(text, id == t->eot ? end_of_text_names[0] : (const char *)spelled);
    free(spelled);
}
static inline void hf_add_merges(TextBuffer *text, const Tokenizer *t) {
    Encoder e = encode_merges_of_gpt2(t);
    int32_t *slot = new_array(int32_t, t->vocab, "the tokenizer's merges"); // of a rank, and 1
    for (int64_t i = 0; i < e.bpe.slots; i++) {
        if (e.bpe.merge[i].made >= 0) { slot[e.bpe.merge[i].rank] = (int32_t)i + 1; }
    }
    const char *comma = "";
    for (int32_t rank = 0; rank < t->vocab; rank++) {
        if (!slot[rank]) { continue; }
        const BpeMerge *merge = &e.bpe.merge[slot[rank] - 1];
        text_add(text, "%s\n[", comma);
        hf_add_token(text, t, merge->left);
        text_add(text, ", ");
        hf_add_token(text, t, merge->right);
        text_add(text, "]");
        comma = ",";
    }
    free(slot);
    encoder_close(&e);
}
// Makes the tokenizer.json of GPT-2's tokens, or of bytes, which have no merges.
static inline TextBuffer hf_tokenizer_json(const Tokenizer *t, bool of_bytes) {
    TextBuffer text = {};
    text_add(&text,
             "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null,\n"
             "\"added_tokens\": [{\"id\": %d, \"content\": \"%s\", \"single_word\": false, "
             "\"lstrip\": false, \"rstrip\": false, \"normalized\": false, "
             "\"special\": true}],\n\"normalizer\": null,\n\"pre_tokenizer\": " HF_BYTE_LEVEL
             ",\n\"post_processor\": null,\n\"decoder\": " HF_BYTE_LEVEL
             ",\n\"model\": {\"type\": \"BPE\", \"vocab\": {",
             (int)t->eot, end_of_text_names[0]);
    for (int32_t id = 0; id < t->vocab; id++) {
        text_add(&text, "%s\n", id ? "," : "");
        hf_add_token(&text, t, id);
        text_add(&text, ": %d", (int)id);
    }
    text_add(&text, "},\n\"merges\": [");
    if (!of_bytes) { hf_add_merges(&text, t); }
    text_add(&text, "]}}\n");
    return text;
}
// The run has a tokenizer: that of the folder of --model does not count.
static inline void hf_drop_tokenizer(HfKept *kept) {
    for (int i = HF_TOKENIZER; i < LENGTH_OF(hf_files); i++) { hf_take_file(kept, i, NULL, 0); }
}
static inline bool hf_has_tokenizer(const HfKept *kept) {
    bool has = false;
    for (int i = HF_TOKENIZER; i < LENGTH_OF(hf_files); i++) { has = has || kept->file[i].text; }
    return has;
}
// Takes a tokenizer.json, and makes what AutoTokenizer reads beside it.
static inline void hf_take_tokenizer(HfKept *kept, const GptModel *m, char *json, size_t bytes,
                                     const char *end) {
    TextBuffer text = {};
    hf_drop_tokenizer(kept);
    hf_take_file(kept, HF_TOKENIZER, json, bytes);
    text_add(&text, "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n  \"bos_token\": ");
    json_add_string(&text, end);
    text_add(&text, ",\n  \"eos_token\": ");
    json_add_string(&text, end);
    text_add(&text,
             ",\n  \"model_max_length\": %" PRId64
             ",\n  \"clean_up_tokenization_spaces\": false\n}\n",
             m->config.max_seq_len);
    hf_take_file(kept, HF_TOKENIZER_CONFIG, text.text, text.length);
    if (!strcmp(m->arch->name, "qwen2")) {
        printf("note: AutoTokenizer of transformers 5 cuts words as Qwen does for every qwen2; "
               "PreTrainedTokenizerFast reads the exported tokenizer as it is\n");
    }
}
// Takes a tokenizer.json byte for byte. Ends the program (EXIT_INPUT) if it lies beside a
// tokenizer.bin and has other tokens; of kinds that the program does not read it cannot know.
static inline void hf_copy_tokenizer(HfKept *kept, const Tokenizer *t, const GptModel *m,
                                     const char *path) {
    HfFile file = {}, *old = &kept->file[HF_TOKENIZER];
    int length;
    const char *bytes = (const char *)tokenizer_decode(t, t->eot, &length);
    const Text end = text_of("%.*s", length, bytes);
    file.text = read_file(path, TOKENIZER_HINT, JSON_BYTES, &file.bytes);
    if (!t->from_json && strstr(file.text, "\"ByteLevel\"")) {
        TokenizerJson beside = tokenizer_json_open(path);
        encode_check_same(t, &beside);
        tokenizer_json_close(&beside);
    }
    if (old->text && old->bytes == file.bytes && !memcmp(old->text, file.text, file.bytes)) {
        free(file.text); // the folder's, with all that is beside it
        return;
    }
    hf_take_tokenizer(kept, m, file.text, file.bytes, end.at);
}
// Adds the run's tokenizer, and the token that ends its texts, to what --export writes. Rank 0
// calls it.
static inline void huggingface_keep_tokenizer(HfKept *kept, const Tokenizer *t, const GptModel *m) {
    const GptConfig *c = &m->config;
    const bool of_bytes = t->vocab == BYTE_TOKENS && encode_has_bytes(t), of_gpt2 = c->theta == 0;
    const bool known = t->from_file || (of_bytes && !hf_has_tokenizer(kept));
    char beside[1100];
    if (!kept->ids && (known || (of_gpt2 && t->eot == GPT2_EOT))) {
        TextBuffer ids = {}, generation = {};
        text_add(&ids, "  \"bos_token_id\": %d,\n  \"eos_token_id\": %d,\n", t->eot, t->eot);
        text_add(&generation, "{\n%.*s\n}\n", (int)ids.length - 2, ids.text);
        kept->ids = ids.text;
        hf_take_file(kept, HF_GENERATION, generation.text, generation.length);
    }
    if (known && t->vocab > c->vocab) {
        hf_drop_tokenizer(kept);
        printf("note: --export writes no tokenizer: %s has %d tokens, and the model %" PRId64 "\n",
               t->path, (int)t->vocab, c->vocab);
    } else if (t->from_json) {
        hf_copy_tokenizer(kept, t, m, t->path);
    } else if (t->path && encode_beside(t->path, beside, sizeof beside)) {
        hf_copy_tokenizer(kept, t, m, beside);
    } else if (known && (of_bytes || tokenizer_same(t->id, gpt2_tokenizer))) {
        const TextBuffer json = hf_tokenizer_json(t, of_bytes);
        hf_take_tokenizer(kept, m, json.text, json.length, end_of_text_names[0]);
    } else if (known) {
        hf_drop_tokenizer(kept);
        printf("note: --export writes no tokenizer: the merges of %s are not known; its "
               "tokenizer.json, beside it as %s, has them\n",
               t->path, beside);
    } else if (!hf_has_tokenizer(kept)) {
        printf("note: --export writes no tokenizer: none is known; --tokenizer names one\n");
    }
}

#endif
