// safetensors.h: reads tensors from files of Hugging Face's safetensors format, one or several with
// an index. The files are untrusted: every length is checked before it is used. Source of the
// format: huggingface/safetensors, README.md.
//
//   8 bytes   n, the length of the header, little-endian
//   n bytes   a JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end]}
//   the rest  the tensors, row-major, without holes
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include "base/base.h"
#include "base/files.h"
#include "base/json.h"

#define SAFETENSORS_HINT "the file is cut off, damaged, or of another format"
enum { SAFETENSORS_HEADER = 100000000, SAFETENSORS_FILES = 10000 }; // at most

typedef enum { TENSOR_F32, TENSOR_BF16, TENSOR_F16, TENSOR_DTYPES } TensorDtype;
static const struct {
    const char *name;
    int bytes;
} tensor_dtypes[TENSOR_DTYPES] = {{"F32", 4}, {"BF16", 2}, {"F16", 2}};

typedef struct {
    Text path;
    char *map;
    size_t bytes, data; // of the file; where its tensors begin
    Json header;
    JsonNames tensors;
} SafetensorsFile;
typedef struct {
    SafetensorsFile *files;
    int count;
    Json index;      // empty without an index
    JsonNames where; // of its weight_map
} Safetensors;
// A tensor of at most three dimensions. A vector has one row; the rows of matrices that are stacked
// are counted together.
typedef struct {
    const char *at;
    TensorDtype dtype;
    int64_t matrices, rows, cols; // matrices: that are stacked; 0: it has two dimensions or one
} SafeTensor;

__attribute__((noreturn)) static inline void
safetensors_refuse(const SafetensorsFile *f, const JsonValue *tensor, const char *why) {
    if (!tensor) { die(EXIT_INPUT, SAFETENSORS_HINT, "%s: %s", f->path.at, why); }
    die(EXIT_INPUT, SAFETENSORS_HINT, "%s: tensor %.*s: %s", f->path.at,
        (int)min_i64((int64_t)tensor->name_bytes, 80), tensor->name, why);
}
// Reads where a tensor is in the data of its file. Ends the program (EXIT_INPUT) if it is outside.
static inline void safetensors_range(const SafetensorsFile *f, int value, int64_t range[2]) {
    const Json *j = &f->header;
    const int offsets = json_get(j, value, "data_offsets"), first = json_first(j, offsets),
              second = first < 0 ? -1 : json_next(j, offsets, first);
    if (json_members(j, offsets) != 2 || !json_whole(j, first, &range[0]) ||
        !json_whole(j, second, &range[1]) || range[0] > range[1] ||
        range[1] > (int64_t)(f->bytes - f->data)) {
        safetensors_refuse(f, &j->values[value], "its data_offsets are not in the file");
    }
}
static inline int compare_ranges(const void *a, const void *b) {
    const int64_t *x = (const int64_t *)a, *y = (const int64_t *)b;
    return x[0] != y[0] ? (x[0] < y[0] ? -1 : 1) : (x[1] > y[1]) - (x[1] < y[1]);
}
// Refuses a file whose tensors do not fill it, one after another.
static inline void safetensors_check_ranges(const SafetensorsFile *f) {
    const Json *j = &f->header;
    const int count = json_members(j, 0);
    int64_t *ranges = new_array(int64_t, 2 * (size_t)count + 2, "safetensors"), at = 0;
    int n = 0;
    for (int i = json_first(j, 0); i >= 0; i = json_next(j, 0, i)) {
        const JsonValue *v = &j->values[i];
        if (v->name_bytes == 12 && !memcmp(v->name, "__metadata__", 12)) { continue; }
        safetensors_range(f, i, ranges + 2 * (size_t)n++);
    }
    qsort(ranges, (size_t)n, 2 * sizeof *ranges, compare_ranges);
    for (int i = 0; i < n; i++) {
        if (ranges[2 * i] != at) {
            safetensors_refuse(f, NULL, "its tensors have holes between them, or overlap");
        }
        at = ranges[2 * i + 1];
    }
    free(ranges);
    if (at != (int64_t)(f->bytes - f->data)) {
        safetensors_refuse(f, NULL, "it is not as long as its tensors");
    }
}
static inline void safetensors_open_file(SafetensorsFile *f, Text path) {
    uint64_t length = 0;
    f->path = path;
    f->map = (char *)map_file(path.at, "a safetensors file", SAFETENSORS_HINT, 8, &f->bytes);
    memcpy(&length, f->map, 8);
    if (length > SAFETENSORS_HEADER || length > f->bytes - 8) {
        safetensors_refuse(f, NULL, "its header is longer than the file, or than 100 MB");
    }
    f->data = 8 + (size_t)length;
    char *text = new_array(char, (size_t)length + 1, "safetensors");
    memcpy(text, f->map + 8, (size_t)length);
    if (!json_parse(&f->header, text, (size_t)length)) {
        die(EXIT_INPUT, SAFETENSORS_HINT, "%s: its header is no JSON: %s", path.at,
            f->header.trouble);
    }
    if (!json_is(&f->header, 0, JSON_OBJECT)) {
        safetensors_refuse(f, NULL, "its header is no JSON object");
    }
    safetensors_check_ranges(f);
    f->tensors = json_names(&f->header, 0, false);
}
// Opens the files that an index names, each once, in the order of their names.
static inline void safetensors_open_index(Safetensors *s, const char *folder, const char *path) {
    s->index = json_open(SAFETENSORS_HINT, path);
    const Json *index = &s->index;
    const int map = json_get(index, 0, "weight_map");
    if (!json_is(index, map, JSON_OBJECT)) {
        die(EXIT_INPUT, SAFETENSORS_HINT, "%s: it has no weight_map", path);
    }
    JsonNames files = json_names(index, map, true);
    s->where = json_names(index, map, false);
    s->files =
        new_array(SafetensorsFile, min_i64(files.count, SAFETENSORS_FILES) + 1, "safetensors");
    for (int i = 0; i < files.count; i++) {
        const JsonName *n = &files.names[i];
        const JsonValue *v = &index->values[n->member];
        if (i && !json_name_order(n - 1, n->at, n->bytes)) { continue; }
        const Text name = text_of("%.*s", (int)min_i64((int64_t)n->bytes, 200), n->at);
        if (!*name.at || strchr(name.at, '/') || name.at[0] == '.') {
            die(EXIT_INPUT, SAFETENSORS_HINT, "%s: %.*s is no name of a file beside it", path,
                (int)min_i64((int64_t)v->bytes, 200), v->bytes ? v->text : "");
        }
        if (s->count == SAFETENSORS_FILES) {
            die(EXIT_INPUT, SAFETENSORS_HINT, "%s: more than %d files", path, SAFETENSORS_FILES);
        }
        safetensors_open_file(&s->files[s->count++], text_of("%s/%s", folder, name.at));
    }
    json_names_free(&files);
}
// Opens model.safetensors of a folder, or the files of its index. Ends the program (EXIT_INPUT) if
// one of them is bad.
static inline Safetensors safetensors_open(const char *folder) {
    Safetensors s = {};
    const Text one = text_of("%s/model.safetensors", folder),
               index = text_of("%s/model.safetensors.index.json", folder);
    if (access(one.at, F_OK) && !access(index.at, F_OK)) {
        safetensors_open_index(&s, folder, index.at);
    } else {
        s.files = new_array(SafetensorsFile, 1, "safetensors");
        s.count = 1;
        safetensors_open_file(&s.files[0], one);
    }
    return s;
}
static inline void safetensors_close(Safetensors *s) {
    for (int i = 0; i < s->count; i++) {
        unmap_file(s->files[i].map);
        json_free(&s->files[i].header);
        json_names_free(&s->files[i].tensors);
    }
    free(s->files);
    json_free(&s->index);
    json_names_free(&s->where);
    memset(s, 0, sizeof *s);
}

// Reads dtype and shape of a tensor, which must have as many bytes as these say.
static inline SafeTensor safetensors_tensor(const SafetensorsFile *f, int value) {
    const Json *j = &f->header;
    const int shape = json_get(j, value, "shape"), dtype = json_get(j, value, "dtype");
    const JsonValue *v = &j->values[value];
    SafeTensor t = {.rows = 1};
    int64_t range[2];
    while (t.dtype < TENSOR_DTYPES && !json_text_is(j, dtype, tensor_dtypes[t.dtype].name)) {
        t.dtype = (TensorDtype)(t.dtype + 1);
    }
    if (t.dtype == TENSOR_DTYPES) {
        safetensors_refuse(f, v, "its dtype is none of F32, BF16 and F16");
    }
    const int dimensions = json_members(j, shape);
    int64_t size[3] = {1, 1, 1}; // from the last dimension on
    bool good = dimensions >= 1 && dimensions <= 3;
    for (int i = json_first(j, shape), k = dimensions; good && i >= 0; i = json_next(j, shape, i)) {
        good = json_whole(j, i, &size[--k]) && size[k] <= 1 << 28;
    }
    if (!good || size[1] * size[2] > 1 << 28) {
        safetensors_refuse(f, v, "its shape is none of a vector, a matrix or stacked matrices");
    }
    t.cols = size[0];
    t.rows = size[1] * size[2];
    t.matrices = dimensions == 3 ? size[2] : 0;
    safetensors_range(f, value, range);
    if (range[1] - range[0] != t.rows * t.cols * tensor_dtypes[t.dtype].bytes) {
        safetensors_refuse(f, v, "it has other bytes than its shape and dtype say");
    }
    t.at = f->map + f->data + range[0];
    return t;
}
// Returns the value of half-precision bits.
static inline float half_to_float(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 0    ? ldexp(fraction, -24)
                        : exponent == 31 ? (fraction ? NAN : INFINITY)
                                         : ldexp(1024 + fraction, exponent - 25);
    return (float)(bits >> 15 ? -size : size);
}
static inline float tensor_element(const SafeTensor *t, int64_t element) {
    float number;
    uint16_t half;
    if (t->dtype == TENSOR_F32) {
        memcpy(&number, t->at + 4 * element, 4);
        return number;
    }
    memcpy(&half, t->at + 2 * element, 2);
    return t->dtype == TENSOR_BF16 ? bf16_to_float(half) : half_to_float(half);
}

static inline bool tensors_equal(const SafeTensor *a, const SafeTensor *b) {
    if (a->rows != b->rows || a->cols != b->cols) { return false; }
    if (a->dtype == b->dtype) {
        return !memcmp(a->at, b->at, (size_t)(a->rows * a->cols * tensor_dtypes[a->dtype].bytes));
    }
    bool equal = true;
    for (int64_t i = 0; i < a->rows * a->cols && equal; i++) {
        equal = tensor_element(a, i) == tensor_element(b, i);
    }
    return equal;
}
// Finds a tensor by its name. Returns false if no file has it. Where several files have it, the
// index decides; transformers takes the last file, so both must mean the same.
static inline bool safetensors_find(const Safetensors *s, const char *name, SafeTensor *tensor) {
    const Json *j = &s->index;
    const int map = json_names_get(&s->where, name);
    const JsonValue *v = map < 0 ? NULL : &j->values[map];
    const SafetensorsFile *of = NULL, *last = NULL;
    SafeTensor other;
    for (int i = 0; i < s->count; i++) {
        const SafetensorsFile *f = &s->files[i];
        const int value = json_names_get(&f->tensors, name);
        if (value < 0) { continue; }
        last = f;
        other = safetensors_tensor(f, value);
        if (!of || !v || json_means(v->text, v->bytes, strrchr(f->path.at, '/') + 1)) {
            of = f;
            *tensor = other;
        }
    }
    if (v && !(of && json_means(v->text, v->bytes, strrchr(of->path.at, '/') + 1))) {
        die(EXIT_INPUT, SAFETENSORS_HINT, "%.*s has no tensor %s, which the index looks for there",
            (int)min_i64((int64_t)v->bytes, 200), v->text, name);
    }
    if (of != last && !tensors_equal(tensor, &other)) {
        die(EXIT_INPUT, "remove the copy that the index does not name",
            "tensor %s differs between %s, where the index looks for it, and %s", name, of->path.at,
            last->path.at);
    }
    return of;
}

#endif
