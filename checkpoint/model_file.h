// model_file.h: writing single files, so that a kill leaves either the old or the new one; and
// model files. docs/formats.md describes every byte.
//
// Model file  llm.c's format (magic 20240326; version 3 fp32, version 5 bf16): read by --model,
//             written by --export.
#ifndef STORE_MODEL_FILE_H
#define STORE_MODEL_FILE_H

#include "base/base.h"
#include "base/files.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "state/gather.h"
#include "state/layout.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"

// -------------------------------------------------------------------------------------------------
// Writing a file: to PATH.tmp, which must be new or the remains of a crash, then fsync, then
// rename. The first error is kept, and the caller checks it once, at the end.
enum { WRITER_PIECE = 8 << 20, WRITER_SYNC = 64 << 20 };
typedef struct {
    FILE *file;
    Checksum sum;
    // bytes since the last fdatasync. Many short syncs, so that other ranks do not wait too long
    // for this one
    size_t unsynced;
    Text path, temporary;
    int error; // errno of the first failure
} FileWriter;

static inline void writer_open(FileWriter *w, const char *path) {
    memset(w, 0, sizeof *w);
    w->sum = checksum_begin();
    w->path = text_of("%s", path);
    w->temporary = text_of("%s.tmp", path);
    const int fd = file_create(w->temporary.at, 0666);
    w->file = fd >= 0 ? fdopen(fd, "wb") : NULL;
    if (!w->file) { w->error = errno; }
}
static inline void writer_add(FileWriter *w, const void *data, size_t bytes) {
    const char *p = (const char *)data;
    for (size_t n; bytes && !w->error; p += n, bytes -= n) {
        n = min_i64((int64_t)bytes, WRITER_PIECE);
        checksum_add(&w->sum, p, n);
        if (fwrite(p, 1, n, w->file) != n) { w->error = errno ? errno : EIO; }
        w->unsynced += n;
        if (w->unsynced > WRITER_SYNC) {
            if (!w->error && (fflush(w->file) || fdatasync(fileno(w->file)))) { w->error = errno; }
            w->unsynced = 0;
        }
        keep_alive();
    }
}
// Moves to an offset. All bytes before the end must be written in the end; the checksum is then
// meaningless.
static inline void writer_seek(FileWriter *w, int64_t offset) {
    if (!w->error && fseeko(w->file, (off_t)offset, SEEK_SET)) { w->error = errno; }
}
// Returns 0, or the errno of the first failure; then no file is left behind.
static inline int writer_close(FileWriter *w) {
    if (w->file) {
        if (!w->error && fflush(w->file)) { w->error = errno; }
        file_hide_time(fileno(w->file));
        if (!w->error && fsync(fileno(w->file))) { w->error = errno; }
        if (!w->error && rename(w->temporary.at, w->path.at)) { w->error = errno; }
        if (w->error) { unlink(w->temporary.at); }
        fclose(w->file); // all is on the disk
    }
    return w->error;
}
// -------------------------------------------------------------------------------------------------
// Model files
enum { MODEL_MAGIC = 20240326, MODEL_FP32 = 3, MODEL_BF16 = 5 };

// Returns the index, in the file, of the first element of a tensor's layer. All layers of a tensor
// are consecutive.
static inline int64_t model_file_offset(const GptModel *m, int tensor, int64_t layer) {
    int64_t at = 0;
    for (int t = 0; t < tensor; t++) { at += m->tensor_elements[t] * gpt_tensor_layers(m, t); }
    return at + layer * m->tensor_elements[tensor];
}

// Returns the configuration and precision of a model file. Ends the program (2) if it is not one,
// or is cut off.
static inline GptConfig model_file_config(const char *path, DType *dtype) {
    const char *hint = "--model takes a descriptor (d12, gpt2:124M, \"layers=6,...\") or a model "
                       "file of llm.c's version 3 or 5";
    size_t bytes;
    void *map = data_map_file(path, "a model file", hint, &bytes);
    int32_t h[8];
    memcpy(h, map, sizeof h);
    unmap_file(map);
    if (h[0] != MODEL_MAGIC || (h[1] != MODEL_FP32 && h[1] != MODEL_BF16)) {
        die(EXIT_INPUT, hint, "%s: expected magic %d and version 3 or 5, found %d and %d", path,
            MODEL_MAGIC, h[0], h[1]);
    }
    GptConfig c = {h[4], h[5], h[6], h[3], h[7], h[2]};
    gpt_config_check(&c, path);
    *dtype = h[1] == MODEL_BF16 ? DTYPE_BF16 : DTYPE_FP32;
    GptModel m = gpt_model(c);
    uint64_t expected = DATA_HEADER_BYTES + m.parameters * dtype_size(*dtype);
    if (bytes != expected) {
        die(EXIT_INPUT, "the file is cut off or of another format",
            "%s: expected %" PRIu64 " bytes, found %zu", path, expected, bytes);
    }
    return c;
}

// Names the tensor that an element of a storage belongs to, and its layer.
static inline Text model_tensor_name(const GptModel *m, int storage, int64_t element) {
    TensorPart parts[MOST_TENSORS];
    int i = gpt_storage_parts(m, storage, parts) - 1;
    while (i > 0 && parts[i].offset > element) { i--; }
    const char *name = m->arch->tensors[parts[i].tensor].name;
    return gpt_storage_is_block(m, storage) ? text_of("%s of layer %" PRId64, name, parts[i].layer)
                                            : text_of("%s", name);
}
// Says which number is NaN or infinite, of those that a file has of a tensor.
static inline Text model_not_finite(const char *path, const char *tensor, float number) {
    return text_of("%s: tensor %s has %s: a model with such a weight gives no loss", path, tensor,
                   isnan(number) ? "a NaN" : "an infinite number");
}
// Writes n numbers of a file, in state_piece, into the masters. Ends the program (2) if one of them
// is not finite. tensor: its name there; NULL: as model_tensor_name() says.
static inline void model_take(const Store *s, int storage, int64_t to, int64_t n, const char *path,
                              const char *tensor) {
    const int64_t bad = first_not_finite(state_piece.floats, n);
    if (bad < n) {
        int64_t first;
        store_own(&s->plan, storage, &first);
        const Text name = model_tensor_name(s->plan.model, storage, first + to + bad);
        const Text why = model_not_finite(path, tensor ? tensor : name.at, state_piece.floats[bad]);
        die(EXIT_INPUT, "the run that wrote it had diverged, or the file is damaged", "%s", why.at);
    }
    store_write_state(s, STATE_MASTER, storage, to, n, state_piece.floats);
}
// Copies elements of a model file, which begin at `from` in memory, to the masters of this rank's
// slice of a storage, from element `to` of the slice on.
typedef struct {
    const char *path, *from;
    DType dtype;
} ModelFilePart;
static inline void model_file_read(const Store *s, int storage, int64_t to, ModelFilePart part,
                                   int64_t elements) {
    const char *from = part.from;
    for (int64_t at = 0, n; at < elements; at += n, keep_alive()) {
        n = min_i64(elements - at, STATE_PIECE_FLOATS);
        if (part.dtype == DTYPE_FP32) { memcpy(state_piece.floats, from + 4 * at, (size_t)n * 4); }
        for (int64_t e = 0; part.dtype == DTYPE_BF16 && e < n; e++) {
            uint16_t half;
            memcpy(&half, from + 2 * (at + e), 2);
            state_piece.floats[e] = bf16_to_float(half);
        }
        model_take(s, storage, to + at, n, part.path, NULL);
    }
}
// Fills the masters from a model file, whose configuration the store's model must have. Every rank
// calls it.
static inline void model_file_load(const char *path, Store *s, DType dtype) {
    size_t bytes;
    char *map = (char *)data_map_file(path, "a model file", NULL, &bytes);
    for (int storage = 0; storage < s->plan.model->storages; storage++) {
        TensorPart parts[MOST_TENSORS];
        int64_t first;
        store_own(&s->plan, storage, &first);
        for (int i = gpt_storage_parts(s->plan.model, storage, parts) - 1; i >= 0; i--) {
            int64_t begin, count = store_own_part(&s->plan, storage, &parts[i], &begin);
            if (!count) { continue; }
            int64_t element = model_file_offset(s->plan.model, parts[i].tensor, parts[i].layer) +
                              begin - parts[i].offset;
            const ModelFilePart part = {
                path, map + DATA_HEADER_BYTES + (size_t)element * dtype_size(dtype), dtype};
            model_file_read(s, storage, begin - first, part, count);
        }
    }
    unmap_file(map);
    store_masters_changed(s);
}

// Writes the elements begin .. begin + count - 1 of a storage (in state_piece) to the positions of
// their tensors in the file. The file has every layer, shared or not.
static inline void model_file_write_piece(void *writer, const StatePlan *s, int storage,
                                          int64_t begin, int64_t count) {
    FileWriter *w = (FileWriter *)writer;
    TensorPart parts[MOST_TENSORS];
    const int64_t size = dtype_size(s->dtype);
    const bool block = gpt_storage_is_block(s->model, storage);
    int n = gpt_storage_parts(s->model, storage, parts);
    for (int i = 0; i < n; i++) {
        int64_t low = max_i64(begin, parts[i].offset),
                high = min_i64(begin + count, parts[i].offset + parts[i].elements);
        for (int64_t layer = parts[i].layer; low < high && layer >= 0;
             layer = block ? gpt_next_layer(s->model, layer) : -1) {
            writer_seek(w,
                        DATA_HEADER_BYTES + (model_file_offset(s->model, parts[i].tensor, layer) +
                                             low - parts[i].offset) *
                                                size);
            writer_add(w, state_piece.bytes + (low - begin) * size, (high - low) * size);
        }
    }
}
// Sends a storage's slices from their owners to rank 0, which writes them with `write`, a piece at
// a time, so that no rank needs memory for more. Owners and rank 0 call it; w is NULL on other
// ranks.
typedef void (*PieceWriter)(void *w, const StatePlan *s, int storage, int64_t begin, int64_t count);
static inline void model_write_storage(void *w, PieceWriter write, Store *s, int storage) {
    const ProcessGroup *process_group = s->plan.rows[storage].owners;
    const int64_t *bounds = store_slices(&s->plan, storage), size = dtype_size(s->plan.dtype),
                  most = STATE_PIECE / size;
    for (int i = 0; i < process_group->all.n; i++) {
        const int ends[2] = {0, process_group->all.ranks[i]};
        const bool owner = s->memory.comm->rank == ends[1];
        if (!w && !owner) { continue; }
        Group pair =
            group_make(ends, ends[1] ? 2 : 1, s->memory.comm->rank, s->memory.comm->node_of);
        for (int64_t at = bounds[i], n; at < bounds[i + 1]; at += n) {
            n = min_i64(most, bounds[i + 1] - at);
            if (owner) {
                store_read_state(s, STATE_PARAMETERS, storage, at - bounds[i], n,
                                 state_piece.bytes);
            }
            comm_broadcast_in(s->memory.comm, &pair, state_piece.bytes, n * size, pair.n - 1);
            if (w) { write(w, &s->plan, storage, at, n); }
        }
        group_free(&pair);
    }
}
// Writes the model in the precision of its working parameters. Returns 0 or an errno. All ranks
// call it; rank 0 writes.
static inline int model_file_write(const char *path, Store *s) {
    const GptConfig *c = &s->plan.model->config;
    int32_t header[256] = {MODEL_MAGIC,
                           s->plan.dtype == DTYPE_BF16 ? MODEL_BF16 : MODEL_FP32,
                           (int32_t)c->max_seq_len,
                           (int32_t)c->vocab,
                           (int32_t)c->layers,
                           (int32_t)c->heads,
                           (int32_t)c->channels,
                           (int32_t)c->padded_vocab};
    bool writes = s->memory.comm->rank == 0;
    FileWriter w;
    if (writes) {
        writer_open(&w, path);
        writer_add(&w, header, sizeof header);
    }
    for (int storage = 0; storage < s->plan.model->storages; storage++) {
        model_write_storage(writes ? &w : NULL, model_file_write_piece, s, storage);
    }
    return writes ? writer_close(&w) : 0;
}

#endif
