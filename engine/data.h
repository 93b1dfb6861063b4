// data.h: opens the data of a run: shards for training and validation, multiple choices, and
// the one tokenizer of all of them.
#ifndef DATA_H
#define DATA_H

#include "engine/trainer.h" // the data of a run

// Returns the samples of one validation. Labelled samples are used once at most.
static inline int64_t validation_samples(const Config *c, const Dataset *val) {
    int64_t all = val->windows, asked = c->options.val_batches * c->samples;
    return asked < 0 || (val->labels && asked > all) ? all : asked;
}
// Returns the tokenizer file of the run, or NULL: --tokenizer, or one that is stored next to the
// shards, those for training first. --prompt also takes the one in the model's folder and, with
// GPT-2's vocabulary, the one next to the default shards. `path` (of `bytes` bytes) is space for
// its name.
static inline const char *find_tokenizer(const Config *c, const ModelSpec *spec, bool validates,
                                         char *path, size_t bytes) {
    const Options *o = &c->options;
    const bool prompts = options_prompts(&c->given), *given = c->given.at;
    const bool trains = o->steps || given[OPTION_INDEX_train];
    if (*o->tokenizer) { return o->tokenizer; }
    const char *file = trains ? tokenizer_find(o->train, path, bytes) : NULL;
    if (!file && (validates || (prompts && given[OPTION_INDEX_val]))) {
        file = tokenizer_find(o->val, path, bytes);
    }
    if (!file && prompts && spec->huggingface) {
        snprintf(path, bytes, "%s/tokenizer.json", spec->file);
        file = access(path, R_OK) ? NULL : path;
    }
    if (!file && prompts && spec->model.config.vocab == GPT2_EOT + 1) {
        file = tokenizer_find(o->train, path, bytes);
    }
    return file;
}
// Refuses data made by several tokenizers, or by one that does not fit the model: training or
// evaluating on them would mean nothing.
static inline void check_tokenizers(const Options *o, const Data *d, int32_t vocab,
                                    const char *file) {
    const Dataset *data[] = {&d->train, &d->val, &d->hellaswag};
    const char *names[] = {o->train, o->val, o->hellaswag};
    CommonTokenizer common = {};
    common_tokenizer_add(&common, d->tokenizer.id, "the file", file);
    for (int i = 0; i < 3; i++) {
        common_tokenizer_add(&common, data[i]->tokenizer, data[i]->options.flag, names[i]);
    }
    common_tokenizer_check_model(&common, vocab);
    for (int i = 0; i < 3; i++) { common_tokenizer_check(&common, data[i], names[i]); }
}
static inline Data open_data(const Config *c, const ModelSpec *spec) {
    const Options *o = &c->options;
    const int32_t vocab = (int32_t)spec->model.config.vocab;
    const bool validates = o->val_every && (*o->val || c->given.at[OPTION_INDEX_val]);
    char path[1100];
    Data d = {};
    const char *file = find_tokenizer(c, spec, validates, path, sizeof path);
    d.tokenizer = tokenizer_open(file, vocab);
    if (options_prompts(&c->given) && !d.tokenizer.vocab) {
        die(EXIT_INPUT, TOKENIZER_HINT,
            "--prompt: no tokenizer for the model's vocabulary of %d: --tokenizer is not given, "
            "and "
            "none is beside the shards or in the model's folder",
            vocab);
    }
    const DatasetOptions val = {.flag = "--val",
                                .T = o->seq_len,
                                .vocab = vocab,
                                .eot = d.tokenizer.eot,
                                .windows = WINDOWS_CONTINUOUS};
    DatasetOptions hellaswag = val, train = val;
    hellaswag.flag = "--hellaswag";
    train.flag = "--train";
    train.windows = o->windows == WINDOWS_DOCUMENT ? WINDOWS_DOCUMENT : WINDOWS_CONTINUOUS;
    train.shuffle = o->shuffle != 0;
    train.seed = o->seed;
    train.windows_per_document = o->dp_unit == DP_DOCUMENT ? o->dp_windows_per_document : 0;
    if (o->steps) { d.train = dataset_open(o->train, train); }
    if (validates) { d.val = dataset_open(o->val, val); }
    if (*o->hellaswag) { d.hellaswag = choices_open(o->hellaswag, hellaswag); }
    check_tokenizers(o, &d, vocab, file);
    if (validates) {
        d.val_bytes = dataset_target_bytes(&d.val, &d.tokenizer, validation_samples(c, &d.val));
    }
    return d;
}

#endif
