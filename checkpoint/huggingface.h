// huggingface.h: models as folders of Hugging Face: config.json and safetensors, read by --model
// and written by --export. `hf_gpt2` and `hf_llama` say which of their tensors are in which of
// ours. Source: huggingface/transformers, models/{gpt2,llama,qwen2,qwen3}.
#ifndef HUGGINGFACE_H
#define HUGGINGFACE_H

#include "base/base.h"
#include "base/files.h"
#include "base/json.h"
#include "checkpoint/huggingface_config.h"
#include "checkpoint/model_file.h"
#include "checkpoint/safetensors.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "state/gather.h"
#include "state/planned.h"
#include "state/store.h"

#include <glob.h> // other files of weights

// --- tensors -------------------------------------------------------------------------------------
// One of our tensors, or one range of its rows (architecture.h: RowRange), and its name there: %d
// is the layer, and after it %d is the expert.
typedef struct {
    const char *tensor, *range; // range NULL: the whole tensor
    const char *name;
    bool transposed; // there: (inputs, outputs)
} HfPart;
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
// What blocks with experts have beside these
static const HfPart hf_mixtral[] = {
    {"routerw", NULL, "model.layers.%d.block_sparse_moe.gate.weight", false},
    {"expertgateupw", "gate", "model.layers.%d.block_sparse_moe.experts.%d.w1.weight", false},
    {"expertgateupw", "up", "model.layers.%d.block_sparse_moe.experts.%d.w3.weight", false},
    {"expertdownw", NULL, "model.layers.%d.block_sparse_moe.experts.%d.w2.weight", false},
};
static const HfPart hf_qwen3_moe[] = {
    {"routerw", NULL, "model.layers.%d.mlp.gate.weight", false},
    {"expertgateupw", "gate", "model.layers.%d.mlp.experts.%d.gate_proj.weight", false},
    {"expertgateupw", "up", "model.layers.%d.mlp.experts.%d.up_proj.weight", false},
    {"expertdownw", NULL, "model.layers.%d.mlp.experts.%d.down_proj.weight", false},
};
static const HfPart hf_granite[] = {
    {"routerw", NULL, "model.layers.%d.block_sparse_moe.router.layer.weight", false},
    {"expertgateupw", NULL, "model.layers.%d.block_sparse_moe.input_linear.weight", false},
    {"expertdownw", NULL, "model.layers.%d.block_sparse_moe.output_linear.weight", false},
    {"sharedgateupw", NULL, "model.layers.%d.shared_mlp.input_linear.weight", false},
    {"shareddownw", NULL, "model.layers.%d.shared_mlp.output_linear.weight", false},
};
typedef struct {
    const HfPart *parts;
    int count;
} HfParts;
static inline HfParts hf_parts_of(const GptModel *m) {
    const HfParts gpt2 = {hf_gpt2, LENGTH_OF(hf_gpt2)}, llama = {hf_llama, LENGTH_OF(hf_llama)};
    return strcmp(m->arch->name, "gpt2") ? llama : gpt2;
}
static inline HfParts hf_experts_of(const GptModel *m) {
    const HfParts none = {NULL, 0}, mixtral = {hf_mixtral, LENGTH_OF(hf_mixtral)},
                  qwen = {hf_qwen3_moe, LENGTH_OF(hf_qwen3_moe)};
    const HfParts granite = {hf_granite, LENGTH_OF(hf_granite)};
    return !m->arch->experts                ? none
           : m->config.shared_experts       ? granite
           : strcmp(m->arch->name, "qwen3") ? mixtral
                                            : qwen;
}
// Returns the elements of a tensor of one layer that are in the file.
static inline int64_t hf_elements(const GptModel *m, int tensor) {
    return m->arch->tensors[tensor].init == INIT_BALANCED ? 0 : gpt_real_elements(m, tensor);
}

// A part of a tensor of one layer: which elements of ours it is, and its shape there.
typedef struct {
    const HfPart *part;
    Text name;
    int64_t begin, rows, cols; // begin: element of our tensor
    bool is_matrix;
    int64_t matrices; // that are stacked: all experts'; then rows are those of all. 0: it is one
} HfTensor;
// Is one tensor there what is a matrix of each expert here?
static inline bool hf_stacks(const HfPart *part, const TensorSpec *spec) {
    const char *layer = strstr(part->name, "%d");
    return spec->copies.times && layer && !strstr(layer + 1, "%d");
}
static inline Text hf_name(const HfPart *part, int64_t layer, int64_t expert) {
    Text name = text_of("%s", part->name);
    for (int i = 0; i < 2; i++) {
        const char *number = strstr(name.at, "%d");
        if (!number) { break; }
        const Text begin = text_of("%.*s", (int)(number - name.at), name.at);
        name = text_of("%s%" PRId64 "%s", begin.at, i ? expert : layer, number + 2);
    }
    return name;
}
typedef void HfVisit(void *context, const HfTensor *t);
// Calls `visit` for those of `all` that are parts of a copy of a tensor.
static inline void hf_parts_of_copy(const GptModel *m, const HfParts all, int tensor, int64_t layer,
                                    int64_t copy, HfVisit *visit, void *context) {
    const TensorSpec *spec = &m->arch->tensors[tensor];
    TensorRange ranges[MOST_RANGES];
    const int count = gpt_tensor_ranges(m, tensor, ranges);
    for (int i = 0; i < all.count; i++) {
        const HfPart *part = &all.parts[i];
        if (strcmp(part->tensor, spec->name)) { continue; }
        HfTensor t = {.part = part, .name = hf_name(part, layer, copy), .cols = ranges[0].cols};
        for (int k = 0; k < count; k++) {
            const TensorRange *r = &ranges[k];
            if (part->range && strcmp(part->range, r->name)) { continue; }
            if (part->range) { t.begin = r->begin * r->cols; }
            t.rows += r->dim.of == OF_VOCAB ? m->config.vocab : r->rows;
        }
        const int64_t copies = gpt_dim_or_one(m, spec->copies);
        t.begin += copy % copies * (m->tensor_elements[tensor] / copies);
        t.is_matrix = spec->rows.times > 0;
        if (hf_stacks(part, spec)) { // with the first of this rank's
            if (copy % copies) { continue; }
            t.matrices = m->config.experts;
            t.begin = -m->expert_rank * m->tensor_elements[tensor];
            t.rows *= t.matrices;
        }
        visit(context, &t);
    }
}
// Calls `visit` for each part of a tensor of a layer. Rows of vocabulary padding have no part.
static inline void hf_each_part(const GptModel *m, int tensor, int64_t layer, HfVisit *visit,
                                void *context) {
    const Dim of_expert = m->arch->tensors[tensor].copies;
    const int64_t copies = gpt_dim_or_one(m, of_expert),
                  first = of_expert.times ? m->expert_rank * copies : 0;
    for (int64_t copy = first; copy < first + copies; copy++) {
        hf_parts_of_copy(m, hf_parts_of(m), tensor, layer, copy, visit, context);
        hf_parts_of_copy(m, hf_experts_of(m), tensor, layer, copy, visit, context);
    }
}

// Calls it for all parts of all tensors, in the order of the architecture's table.
static inline void hf_each_tensor(const GptModel *m, HfVisit *visit, void *context) {
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
// A slice of one of our tensors that is read from the files.
typedef struct {
    const Safetensors *files;
    const Store *store;
    const char *folder;
    const char *inside; // name of a tensor with the prefix of the model inside
    bool tied, bf16;    // of the model; of all tensors that were checked
    int storage;
    int64_t to;         // element of this rank's slice of the storage
    int64_t begin, end; // elements of the tensor
} HfSlice;
// Looks for a tensor, with and without the prefix of the model inside, as transformers does.
static inline bool hf_look(const HfSlice *s, const char *name, SafeTensor *found) {
    const int n = (int)(strchr(s->inside, '.') + 1 - s->inside);
    const Text other = strncmp(name, s->inside, (size_t)n) ? text_of("%.*s%s", n, s->inside, name)
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
    if (found.rows * found.cols != rows * cols || (cols > 1 && found.cols != cols) ||
        found.matrices != t->matrices) {
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
// Refuses tensors of a block, or of an expert, behind the last one that config.json has.
static inline void hf_refuse_behind(const HfSlice *s, const GptModel *m, const HfParts all,
                                    int64_t layer, int64_t expert) {
    SafeTensor found;
    for (int i = 0; i < all.count; i++) {
        const HfPart *part = &all.parts[i];
        const Text name = hf_name(part, layer, expert);
        const char *number = strstr(part->name, "%d");
        if (expert && !strstr(number + 1, "%d")) { continue; } // all are in one
        if (strcmp(name.at, part->name) && hf_look(s, name.at, &found)) {
            die(EXIT_INPUT, HUGGINGFACE_HINT,
                "%s: config.json has %" PRId64 " layers%s, but tensor %s is there", s->folder,
                m->config.layers,
                expert ? text_of(" of %" PRId64 " experts", m->config.experts).at : "", name.at);
        }
    }
}
static inline void hf_refuse_more(const HfSlice *s, const GptModel *m) {
    const HfParts experts = hf_experts_of(m), each = {experts.parts + 1, experts.count - 1};
    hf_refuse_behind(s, m, hf_parts_of(m), m->config.layers, 0);
    if (!experts.count) { return; }
    hf_refuse_behind(s, m, experts, m->config.layers, 0);
    for (int64_t l = 0; l < m->config.layers; l++) { // but the router, which all share
        hf_refuse_behind(s, m, each, l, m->config.experts);
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
                   .inside = hf_parts_of(&m).parts[0].name,
                   .tied = gpt_is_tied(&m),
                   .bf16 = true};
    hf_each_tensor(&m, hf_check_part, &all);
    hf_refuse_more(&all, &m);
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
    for (int storage = 0; storage < s->plan.model->storages; storage++) {
        TensorPart parts[MOST_TENSORS];
        int64_t first;
        store_own(&s->plan, storage, &first);
        for (int i = gpt_storage_parts(s->plan.model, storage, parts) - 1; i >= 0; i--) {
            int64_t begin, count = store_own_part(&s->plan, storage, &parts[i], &begin);
            if (!count) { continue; }
            HfSlice slice = {.files = &files,
                             .store = s,
                             .folder = folder,
                             .inside = hf_parts_of(s->plan.model).parts[0].name,
                             .storage = storage,
                             .to = begin - first,
                             .begin = begin - parts[i].offset,
                             .end = begin - parts[i].offset + count};
            hf_each_part(s->plan.model, parts[i].tensor, parts[i].layer, hf_read_part, &slice);
        }
    }
    safetensors_close(&files);
    store_masters_changed(s);
}

// --- writing -------------------------------------------------------------------------------------
// A safetensors file that is written in any order: it is mapped, with its space reserved.
typedef struct {
    const StatePlan *store;
    Text path, temporary;
    TextBuffer header;
    char *map;
    size_t data, bytes; // where the tensors begin; of all tensors
    int fd, error;      // error: errno of the first failure
    bool biased;        // experts are chosen with biases, which no file has
    // the part of a tensor's layer that is being written: its elements, and where they are
    int64_t low, high;
    const char *from;
    size_t to; // in the tensors: element 0 of the layer
} TensorWriter;

// Returns the first byte of a tensor's layer among all tensors. Padding is left out.
static inline size_t hf_offset(const StatePlan *s, int tensor, int64_t layer) {
    const GptModel *m = s->model;
    int64_t elements = 0;
    for (int t = 0; t < tensor; t++) { elements += hf_elements(m, t) * gpt_tensor_layers(m, t); }
    elements += layer * hf_elements(m, tensor);
    return (size_t)elements * dtype_size(s->dtype);
}
static inline void hf_add_header(void *context, const HfTensor *t) {
    TensorWriter *w = (TensorWriter *)context;
    const bool turned = t->part->transposed, bf16 = w->store->dtype == DTYPE_BF16;
    const size_t bytes = (size_t)(t->rows * t->cols) * dtype_size(w->store->dtype);
    text_add(&w->header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name.at,
             bf16 ? "BF16" : "F32");
    if (t->matrices) { text_add(&w->header, "%" PRId64 ",", t->matrices); }
    text_add(&w->header, "%" PRId64, turned ? t->cols : t->rows / max_i64(1, t->matrices));
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
static inline void hf_write_piece(void *writer, const StatePlan *s, int storage, int64_t begin,
                                  int64_t count) {
    TensorWriter *w = (TensorWriter *)writer;
    TensorPart parts[MOST_TENSORS];
    const bool block = gpt_storage_is_block(s->model, storage);
    const int n = gpt_storage_parts(s->model, storage, parts);
    for (int i = 0; i < n && !w->error; i++) {
        const int64_t first = max_i64(begin, parts[i].offset);
        w->low = first - parts[i].offset;
        w->high = min_i64(begin + count - parts[i].offset, parts[i].elements);
        w->from = state_piece.bytes + (size_t)(first - begin) * dtype_size(s->dtype);
        const bool bias = s->model->arch->tensors[parts[i].tensor].init == INIT_BALANCED;
        for (int64_t e = (w->high - w->low) * (int64_t)dtype_size(s->dtype); bias && e > 0; e--) {
            w->biased |= w->from[e - 1] != 0;
        }
        for (int64_t layer = parts[i].layer; w->low < w->high && layer >= 0;
             layer = block ? gpt_next_layer(s->model, layer) : -1) {
            w->to = hf_offset(s, parts[i].tensor, layer);
            hf_each_part(s->model, parts[i].tensor, layer, hf_write_part, w);
        }
    }
    keep_alive();
}
// Makes the header, and the file with its space.
static inline void hf_writer_open(TensorWriter *w, const StatePlan *s, const char *folder) {
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

static inline void hf_add_experts_keys(TextBuffer *t, const GptModel *m) {
    const GptConfig *c = &m->config;
    const bool qwen = !strcmp(m->arch->name, "qwen3");
    if (!c->experts) { return; }
    text_add(t, "  \"%s\": %" PRId64 ",\n  \"num_experts_per_tok\": %" PRId64 ",\n",
             qwen ? "num_experts" : "num_local_experts", c->experts, c->top_k);
    if (c->prototypes > 1) { text_add(t, "  \"prototypes\": %" PRId64 ",\n", c->prototypes); }
    if (c->shared_experts) {
        text_add(t,
                 "  \"shared_intermediate_size\": %" PRId64 ",\n  \"embedding_multiplier\": 1.0,\n"
                 "  \"residual_multiplier\": 1.0,\n  \"logits_scaling\": 1.0,\n"
                 "  \"attention_multiplier\": %.17g,\n",
                 c->shared_experts * c->shared_expert_ffn, 1 / sqrt((double)c->head_dim));
    } else if (qwen) {
        text_add(t,
                 "  \"moe_intermediate_size\": %" PRId64 ",\n  \"norm_topk_prob\": true,\n"
                 "  \"decoder_sparse_step\": 1,\n  \"mlp_only_layers\": [],\n",
                 c->expert_ffn);
    } else {
        text_add(t, "  \"sliding_window\": null,\n");
    }
}
// Adds the keys of config.json that all types but GPT-2 have.
static inline void hf_add_llama_keys(TextBuffer *t, const GptModel *m, const HfModel *model) {
    const GptConfig *c = &m->config;
    const RotaryScaling *r = &c->scaling;
    hf_add_experts_keys(t, m);
    text_add(t,
             "  \"hidden_size\": %" PRId64 ",\n  \"intermediate_size\": %" PRId64
             ",\n  \"num_hidden_layers\": %" PRId64 ",\n  \"num_attention_heads\": %" PRId64
             ",\n  \"num_key_value_heads\": %" PRId64 ",\n  \"head_dim\": %" PRId64
             ",\n  \"max_position_embeddings\": %" PRId64 ",\n  \"rms_norm_eps\": %.17g,\n",
             c->channels, c->experts ? c->expert_ffn : c->ffn, c->layers, c->heads, c->kv_heads,
             c->head_dim, c->max_seq_len, c->eps);
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
    const int error = writer_close(&w);
    if (error) { fprintf(stderr, "warning: cannot write %s: %s\n", w.path.at, strerror(error)); }
    return error;
}
static inline int hf_write_config(const StatePlan *s, const char *folder, const HfKept *kept) {
    const GptModel *m = s->model;
    const HfModel *model = hf_model_of(m);
    TextBuffer t = {};
    text_add(&t, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n",
             model->class_name, hf_type_name(model, m->config.prototypes > 1).at);
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
    for (int i = 0; !error && i < LENGTH_OF(hf_files); i++) {
        const HfFile *file = &kept->file[i];
        const Text path = text_of("%s/%s", folder, hf_files[i]);
        if (file->text) {
            error = hf_write_text(folder, hf_files[i], file->text, file->bytes);
        } else if (!access(path.at, F_OK)) {
            fprintf(stderr, "warning: %s stays as it is; is it of this model?\n", path.at);
        }
    }
    if (!error) { error = hf_write_text(folder, "config.json", t.text, t.length); }
    free(t.text);
    return error;
}
// Writes the model in the precision of its working parameters as a folder, which may exist already.
// The tensors come first, so a new folder with a config.json is complete. Returns 0 or an errno.
// All ranks call it; rank 0 writes.
static inline int huggingface_write(const char *folder, const HfKept *kept, Store *s) {
    const bool writes = s->memory.comm->rank == 0;
    TensorWriter w = {};
    if (writes) {
        const int made = mkdir(folder, 0777) && errno != EEXIST ? errno : 0;
        hf_writer_open(&w, &s->plan, folder);
        if (made) { w.error = made; }
    }
    for (int storage = 0; storage < s->plan.model->storages; storage++) {
        model_write_storage(writes ? &w : NULL, hf_write_piece, s, storage);
    }
    if (!writes) { return 0; }
    if (w.biased) {
        fprintf(stderr,
                "warning: %s: the biases that choose experts (--moe-balance bias) have no place "
                "there: the model will choose without them\n",
                folder);
    }
    int error = hf_writer_close(&w);
    if (!error) { error = hf_write_config(&s->plan, folder, kept); }
    folder_hide_time(folder);
    sync_folder(folder);
    return error;
}

// Returns whether --export PATH is a file of llm.c, and not such a folder.
static inline bool export_is_file(const char *path) {
    const size_t n = strlen(path);
    return n > 4 && !strcmp(path + n - 4, ".bin");
}
static inline bool export_is_folder(const char *path) { return *path && !export_is_file(path); }
// Writes the model to the file or folder of --export. Returns 0 or an errno. All ranks call it.
static inline int export_write(const char *path, const HfKept *kept, Store *s) {
    return export_is_file(path) ? model_file_write(path, s) : huggingface_write(path, kept, s);
}
// Ends the program (EXIT_INPUT) if the model cannot be written there.
static inline void export_check(const char *path, const GptModel *m) {
    const bool gpt2 = !strcmp(m->arch->name, "gpt2");
    if (*path && !hf_model_of(m)) {
        die(EXIT_INPUT, "leave --export out", "--export %s: Hugging Face has no %s with %sexperts",
            path, gpt2 ? "GPT-2" : m->arch->name, m->config.shared_experts ? "shared " : "");
    }
    if (*path && export_is_file(path) && !gpt2) {
        die(EXIT_INPUT, "give the name of a folder, without .bin",
            "--export %s: llm.c's files have GPT-2 models only, and this is %s", path,
            m->arch->name);
    }
    if (*path && gpt_expert_ranks(&m->config) > 1) {
        die(EXIT_INPUT, "export from the checkpoint, by a run without --expert-parallel",
            "--export %s: no rank has all experts", path);
    }
}

#endif
