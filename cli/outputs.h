// outputs.h: checks that the files a run writes besides --out overwrite no input and no other
// output.
//
// Checked    --log, --trace and --export, before anything is written: against each other, the
//            shards of --train and --val, --hellaswag, the tokenizer, --model, and the files of
//            --out and of checkpoints. Files are compared by device and inode, so links and other
//            spellings of a path do not matter; files that do not exist yet by their resolved
//            paths.
// Kinds      --log and --trace also accept pipes and character devices (/dev/null, /dev/stdout).
//            --export makes a new file and renames it, so it replaces regular files only; without
//            .bin it makes a folder, or files in one.
#ifndef OUTPUTS_H
#define OUTPUTS_H

#include "base/base.h"
#include "base/files.h"
#include "checkpoint/folders.h"
#include "checkpoint/huggingface.h"
#include "dataloader.h"
#include "options.h"
#include "text/tokenizer.h"

enum { OUTPUTS = 3, OWN_NAMES = 10 };
static const char *const out_own_names[OWN_NAMES] = {
    "lock",         "stop",           "dp_key",        "dp_key.tmp",         "dp_steps",
    "dp_steps.tmp", "tokenizer.json", "tokenizer.bin", "tokenizer.json.tmp", "tokenizer.bin.tmp"};

typedef struct {
    const char *flag, *path;
    bool renamed; // written as PATH.tmp, then renamed
    bool folder;  // a new folder
} Output;
// One file that an output writes.
typedef struct {
    const Output *output;
    const char *path;
    FileIdentity file;
} Written;

// Returns what --export writes: a file; a new folder; or, in a folder that exists, the file with
// the tensors.
static inline Output output_of_model(const char *path) {
    static char written[PATH_BYTES];
    struct stat info;
    Output output = {.flag = "--export", .path = path, .renamed = true};
    if (!*path || export_is_file(path)) { return output; }
    output.folder = stat(path, &info) || !S_ISDIR(info.st_mode);
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') { n--; } // also "new/" is a folder to be made
    snprintf(written, sizeof written, "%.*s%s", (int)n, path,
             output.folder ? "" : "/model.safetensors");
    output.path = written;
    return output;
}
// Lists the outputs that the flags request. Returns their number.
static inline int outputs_of(const Options *o, Output outputs[OUTPUTS]) {
    const Output log = {.flag = "--log", .path = o->log};
    const Output trace = {.flag = "--trace", .path = o->trace};
    const Output all[OUTPUTS] = {log, trace, output_of_model(o->export_file)};
    const bool shows = options_only_prints(o), answers = o->plan || o->compat || *o->dp_account;
    const bool traces = o->show_schedule && !answers;
    int n = 0;
    for (int i = 0; i < OUTPUTS; i++) {
        const bool writes = !shows || (traces && all[i].path == o->trace);
        if (writes && *all[i].path) { outputs[n++] = all[i]; }
    }
    return n;
}

static inline void output_refuse_file(const Written *w, const char *flag, const char *path) {
    const FileIdentity other = file_identity(path);
    if (!file_same(&w->file, &other)) { return; }
    die(EXIT_INPUT, "give it a file of its own", "%s %s would write over %s of %s", w->output->flag,
        w->path, path, flag);
}
// Refuses the shards of a pattern and the tokenizer in their folder.
static inline void output_refuse_shards(const Written *w, const char *flag, const char *pattern) {
    glob_t names;
    char tokenizer[1100];
    const size_t count = data_glob(pattern, &names) ? 0 : names.gl_pathc;
    for (size_t i = 0; i < count; i++) { output_refuse_file(w, flag, names.gl_pathv[i]); }
    globfree(&names);
    const bool beside = tokenizer_find(pattern, tokenizer, sizeof tokenizer);
    if (beside) { output_refuse_file(w, flag, tokenizer); }
}
// Refuses what --out contains or will contain: this program's files by their names, everything in
// checkpoints, and the folder itself.
static inline void output_refuse_out(const Written *w, const char *out) {
    char path[1100], folder[PATH_BYTES];
    const char *flag = w->output->flag;
    if (!*out) { return; }
    for (int i = 0; i < OWN_NAMES; i++) {
        snprintf(path, sizeof path, "%s/%s", out, out_own_names[i]);
        output_refuse_file(w, "--out", path);
    }
    if (!path_resolve(out, folder)) { return; }
    const bool itself = !strcmp(folder, w->file.path);
    if (itself) { die(EXIT_INPUT, "name a file", "%s %s is the folder of --out", flag, w->path); }
    if (!path_in(w->file.path, folder)) { return; }
    const char *rest = "", *name = w->file.path + (strcmp(folder, "/") ? strlen(folder) : 0) + 1;
    const size_t length = strcspn(name, "/");
    snprintf(path, sizeof path, "%.*s", (int)min_i64(length, 1000), name);
    const bool earlier = !name[length] && !strncmp(name, "earlier-", strlen("earlier-"));
    if (earlier || (checkpoint_step_of(path, &rest) >= 0 && !*rest) || checkpoint_is_half(path)) {
        die(EXIT_INPUT, "give it a file beside the checkpoints",
            "%s %s is in a checkpoint's folder of --out", flag, w->path);
    }
}
// Refuses a file of any checkpoint: of --model FOLDER, of an earlier run, or of a moved one.
static inline void output_refuse_checkpoint(const Written *w) {
    static const char magic[] = "train_gpt checkpoint ";
    char manifest[PATH_BYTES + 16], begin[sizeof magic] = "";
    if (!*w->file.path || !checkpoint_file_name(path_name(w->file.path))) { return; }
    snprintf(manifest, sizeof manifest, "%s", w->file.path);
    path_cut(manifest);
    strcat(manifest, "/manifest");
    FILE *f = open_regular(manifest);
    if (!f) { return; }
    const size_t n = fread(begin, 1, sizeof magic - 1, f);
    fclose(f);
    if (n != sizeof magic - 1 || strcmp(begin, magic)) { return; }
    die(EXIT_INPUT, "give it a file of its own", "%s %s is a file of a checkpoint", w->output->flag,
        w->path);
}

__attribute__((noreturn)) static inline void output_refuse_place(const Output *o, const char *why) {
    die(EXIT_INPUT, "name a file in a folder that exists and is writable", "cannot write %s %s: %s",
        o->flag, o->path, why);
}
// Ends the program (EXIT_INPUT) now if the file could not be written later, after hours of
// training.
static inline void output_check_place(const Written *w, const char *out) {
    const Output *output = w->output;
    const FileIdentity *f = &w->file;
    char folder[PATH_BYTES + 2], made[PATH_BYTES];
    struct stat entry;
    if (!*f->path && !f->there) { output_refuse_place(output, strerror(ENOENT)); }
    if (w->path[strlen(w->path) - 1] == '/') { output_refuse_place(output, strerror(EISDIR)); }
    const bool there = output->renamed ? !lstat(w->path, &entry) : f->there;
    const mode_t mode = !there ? S_IFREG : output->renamed ? entry.st_mode : f->info.st_mode;
    const bool takes = S_ISREG(mode) || (!output->renamed && (S_ISFIFO(mode) || S_ISCHR(mode)));
    if (there && output->folder) { output_refuse_place(output, "a file is in the folder's place"); }
    if (!takes) { output_refuse_place(output, file_kind_name(mode)); }
    if (there && !output->renamed) {
        if (access(w->path, W_OK)) { output_refuse_place(output, strerror(errno)); }
        return;
    }
    strcpy(folder, f->path);
    path_cut(folder);
    const bool above =
        *out && path_resolve(out, made) && (!strcmp(made, folder) || path_in(made, folder));
    if (above && access(folder, F_OK)) { return; } // will be created for --out
    strcat(folder, "/.");                          // fails if it is not a folder
    if (access(folder, W_OK)) { output_refuse_place(output, strerror(errno)); }
}

static inline void output_check_inputs(const Written *w, const Options *o) {
    output_refuse_shards(w, "--train", o->train);
    output_refuse_shards(w, "--val", o->val);
    const char *const flags[] = {"--hellaswag", "--tokenizer", "--model", "--config"};
    const char *const paths[] = {o->hellaswag, o->tokenizer, o->model, o->config};
    for (int i = 0; i < 4; i++) {
        const bool there = *paths[i] && !access(paths[i], F_OK); // --model may be a descriptor
        if (there) { output_refuse_file(w, flags[i], paths[i]); }
    }
    const Text tensors = text_of("%s/model.safetensors", o->model);
    if (!access(tensors.at, F_OK)) { output_refuse_file(w, "--model", tensors.at); }
    output_refuse_out(w, o->out);
    output_refuse_checkpoint(w);
}
// Ends the program (EXIT_INPUT), before anything is written, if an output would overwrite another
// file of the run or cannot be written. Only rank 0 calls it, which writes the outputs.
static inline void outputs_check(const Options *o) {
    Output outputs[OUTPUTS];
    Written files[2 * OUTPUTS];
    char temporary[OUTPUTS][OPTION_TEXT_MAX + 8];
    const int n = outputs_of(o, outputs);
    int written = 0;
    for (int i = 0; i < n; i++) {
        const Output *output = &outputs[i];
        snprintf(temporary[i], sizeof temporary[i], "%s.tmp", output->path);
        const int names = output->renamed ? 2 : 1;
        for (int half = 0; half < names; half++) {
            Written *w = &files[written++];
            w->output = output;
            w->path = half ? temporary[i] : output->path;
            w->file = file_identity(w->path);
        }
    }
    for (int i = 0; i < written; i++) {
        output_check_inputs(&files[i], o);
        for (int j = 0; j < i; j++) {
            const Written *other = &files[j];
            if (other->output == files[i].output) { continue; }
            output_refuse_file(&files[i], other->output->flag, other->path);
        }
    }
    for (int i = 0; i < written; i++) { output_check_place(&files[i], o->out); }
}

#endif
