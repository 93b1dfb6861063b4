// checkpoint.h: saving and loading checkpoints. docs/formats.md describes every byte.
//
// Checkpoint  A folder OUT/step_00000020 (folders.h) with one state file for each rank
//             (state_file.h), and a manifest (manifest.h).
// Atomic      Everything is written into OUT/step_00000020.tmp with fsync, the manifest last; then
//             the folder is renamed. A kill at any instant loses no complete checkpoint.
// Calls       All ranks call these functions, and agree on the outcome.
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "base/base.h"
#include "base/files.h"
#include "checkpoint/folders.h"
#include "checkpoint/manifest.h"
#include "checkpoint/model_file.h"
#include "checkpoint/state_file.h"
#include "comm/comm.h"
#include "comm/records.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/gpt.h"
#include "ops/ops.h"
#include "state/gather.h"
#include "state/optimizer.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"
#include "state/update.h"

// What a rank reports about its state file.
typedef struct {
    double failed, bytes, checksum_high, checksum_low;
} StateReport;

static inline int manifest_write(const char *folder, const Store *s, const Progress *p,
                                 const char *flags, const StateReport *reports) {
    TextBuffer t = {};
    text_add(&t, "train_gpt checkpoint 1\n");
    manifest_add_model(&t, s->plan.model, s->plan.optimizer);
    text_add(&t, "step %" PRId64 "\nposition %" PRId64 "\nupdates %" PRId64 "\n", p->step,
             p->position, p->updates);
    if (p->step && isfinite(p->lr)) { text_add(&t, "lr %.17g\n", p->lr); }
    if (s->flight.pending) { text_add(&t, "pending %a\n", p->pending_norm); }
    if (p->delinked) {
        text_add(&t, "delinked %" PRId64 "\nrestarted %" PRId64 "\n", p->delinked, p->restarted);
    }
    // the losses of private steps are not published in checkpoints
    bool shown = !*p->privacy || !strcmp(p->privacy, "none");
    const OutlierWindow empty = {};
    manifest_add_window(&t, "losses", shown ? &p->loss : &empty);
    manifest_add_window(&t, "norms", shown ? &p->norm : &empty);
    text_add(&t, "compute %s\n", dtype_name(ops_compute()));
    manifest_add_text(&t, "products", p->products);
    manifest_add_text(&t, "order", p->order);
    manifest_add_text(&t, "tokenizer", p->tokenizer);
    text_add(&t, "privacy %s\nflags %s\nfiles %d\n", *p->privacy ? p->privacy : "none", flags,
             s->memory.comm->ranks);
    for (int r = 0; r < s->memory.comm->ranks; r++) {
        text_add(&t, "file%d %.0f %08lx%08lx\n", r, reports[r].bytes,
                 (unsigned long)reports[r].checksum_high, (unsigned long)reports[r].checksum_low);
    }
    manifest_add_matmuls(&t, p->matmuls);
    text_add(&t, "%s", manifest_seal(t.text, t.length).at);
    FileWriter w;
    writer_open(&w, text_of("%s/manifest", folder).at);
    writer_add(&w, t.text, t.length);
    free(t.text);
    return writer_close(&w);
}
static inline Text state_file_path(const char *folder, int64_t file) {
    return text_of("%s/state_%05" PRId64, folder, file);
}

// Saves OUT/step_N, and writes its path to *path. A failure (disk full, folder missing) is a
// warning: returns false, and training continues. All ranks call it.
static inline bool checkpoint_save(const char *out, Store *s, const Progress *p, const char *flags,
                                   Text *path) {
    Comm *comm = s->memory.comm;
    const bool first = comm->rank == 0;
    store_wait_all(s);
    for (int i = 0; i < s->plan.model->storages; i++) { store_forget_errors(s, i); }
    *path = checkpoint_folder(out, p->step, "");
    int turn = first ? checkpoint_half_make(out, p->step) : 0;
    comm_broadcast(comm, &turn, sizeof turn, 0);
    const int made = turn < 0 ? -turn : 0;
    const Text temporary = checkpoint_half(out, p->step, turn);
    uint64_t bytes = 0, checksum = 0;
    int error =
        made ? made
             : state_file_write(state_file_path(temporary.at, comm->rank).at, s, &bytes, &checksum);
    StateReport mine = {(double)error, (double)bytes, (double)(checksum >> 32),
                        (double)(checksum & 0xffffffffu)};
    StateReport *reports = new_array(StateReport, comm->ranks, "checkpoint");
    comm_all_gather_small(comm, &mine, reports, sizeof mine);
    for (int r = 0; r < comm->ranks && !error; r++) { error = (int)reports[r].failed; }
    if (first && !error) { error = manifest_write(temporary.at, s, p, flags, reports); }
    if (first && !error) { error = folder_publish(temporary.at, path->at, out); }
    comm_broadcast(comm, &error, sizeof error, 0);
    if (first && error) {
        if (!made) { folder_remove(temporary.at); }
        fprintf(
            stderr,
            "warning: checkpoint %s not saved: %s; training goes on, the exit code will be %d\n",
            path->at,
            error == STATE_NOT_FINITE ? "a weight or a moment is NaN or infinite" : strerror(error),
            EXIT_RESOURCES);
    }
    free(reports);
    return !error;
}
// Reads the state files that a manifest lists. filled: [kinds][storages] elements that were read.
static inline bool checkpoint_load_states(const char *folder, const char *manifest, int64_t files,
                                          Store *s, const GptModel *from, int64_t *filled,
                                          Text *why) {
    for (int64_t i = 0; i < files; i++) {
        uint64_t bytes = 0, checksum = 0;
        if (!manifest_file(manifest, i, &bytes, &checksum)) {
            *why = text_of("%s/manifest: no entry for file %" PRId64, folder, i);
            return false;
        }
        if (!state_file_read(state_file_path(folder, i).at, s, from,
                             i % s->memory.comm->ranks == s->memory.comm->rank, bytes, checksum,
                             filled, why)) {
            return false;
        }
    }
    return states_are_whole(folder, s, from, filled, why);
}
// Fills store and progress from one checkpoint, of model `from`. A run that resumes passes the
// store's own model. Otherwise a new run begins with the checkpoint, in which as many blocks share
// or fewer: it counts its own steps, has no version before the first one, and no pending gradient.
// Each rank reads what it needs, and verifies its part of the files. So the checkpoint is valid
// only if the result is true on all ranks. Returns false, with the reason, if it is incomplete,
// invalid or of another model.
static inline bool checkpoint_load(const char *folder, Store *s, const GptModel *from, Progress *p,
                                   Text *why) {
    const bool resumes = from == s->plan.model;
    char *text = manifest_read(folder, why);
    if (!text) { return false; }
    TextBuffer model = {};
    manifest_add_model(&model, from, s->plan.optimizer);
    const char *line = manifest_line(text, "model");
    const int length = line ? (int)strcspn(line, "\n") : 0;
    int64_t files = 0, *filled = new_array(int64_t, 2 * FILE_KINDS * from->storages, "checkpoint");
    const GptModel whole = gpt_model_whole(from);
    bool good = line && !strncmp(line, model.text + strlen("model "), length + 1);
    if (!good) {
        const Text difference =
            manifest_difference(line ? line : "", model.text + strlen("model "));
        *why = text_of("%s: %s: of another model or optimizer: %.*s", folder, difference.at,
                       line ? length : 1, line ? line : "?");
    } else if (!manifest_progress(text, p, &files)) {
        *why = text_of("%s/manifest: a field is missing or out of range", folder);
        good = false;
    }
    for (int i = 0; good && i < s->plan.model->storages; i++) {
        s->flight.progress[i].version = resumes ? p->step : 0; // where versions count steps
    }
    good = good && checkpoint_load_states(folder, text, files, s, &whole, filled, why);
    const char *pending = good ? manifest_line(text, "pending") : NULL;
    p->pending_norm = pending ? strtod(pending, NULL) : 0;
    s->flight.pending =
        resumes && pending && store_delays(&s->plan) && filled[STATE_GRADIENT * from->storages] > 0;
    // what no micro-batch of that run used in an older version has none there
    for (int i = 0; i < s->plan.model->storages; i++) {
        s->flight.progress[i].knows_previous =
            resumes && filled[STATE_PREVIOUS * from->storages + i] > 0;
    }
    free(filled);
    free(model.text);
    free(text);
    return good;
}

// Sets how many updates the states have had.
static inline void store_count_updates(Store *s, const Progress *p) {
    for (int i = 0; i < s->plan.model->storages; i++) {
        s->flight.progress[i].updates = p->updates;
        s->flight.progress[i].restarted = gpt_storage_is_block(s->plan.model, i) ? p->restarted : 0;
    }
}
// Reads the model of a checkpoint's folder, and the name of the optimizer that trained it. Returns
// false if `folder` is no folder; ends the program (2) if it holds no valid checkpoint. All ranks
// call it.
static inline bool checkpoint_model(const char *folder, GptConfig *config, GptShare *share,
                                    char optimizer[OPTIMIZER_NAME]) {
    struct stat info;
    Text why = text_of("?");
    if (stat(folder, &info) || !S_ISDIR(info.st_mode)) { return false; }
    char *text = manifest_read(folder, &why);
    const bool good = text && manifest_model(text, config, share, optimizer);
    const char *line = text ? manifest_line(text, "model") : NULL;
    if (line && !good) {
        why = text_of("a model that this program does not know: %.*s", (int)strcspn(line, "\n"),
                      line);
    }
    if (!good) {
        die(EXIT_INPUT,
            "--model takes a descriptor, a model file, or the folder of a checkpoint or of Hugging "
            "Face (with config.json and safetensors)",
            "%s: no checkpoint: %s", folder, why.at);
    }
    gpt_config_check(config, folder);
    free(text);
    return true;
}
// Reads the model of a checkpoint. Returns false unless the manifest, and the files that this rank
// verifies, are complete.
static inline bool checkpoint_whole(const char *folder, const Comm *comm, GptConfig *config,
                                    GptShare *share) {
    Text why;
    char optimizer[OPTIMIZER_NAME], *text = manifest_read(folder, &why);
    int64_t files = 0;
    bool good = text && manifest_model(text, config, share, optimizer) &&
                manifest_int(text, "files", &files) && files <= MANIFEST_FILES;
    for (int64_t i = comm->rank; good && i < files; i += comm->ranks) {
        uint64_t bytes = 0, checksum = 0;
        good = manifest_file(text, i, &bytes, &checksum) &&
               state_file_whole(state_file_path(folder, i).at, bytes, checksum);
    }
    free(text);
    return good;
}
// Reads the model of the newest complete checkpoint of OUT. Returns false if none exists. All ranks
// call it.
static inline bool checkpoint_newest_model(const char *out, Comm *comm, GptConfig *config,
                                           GptShare *share) {
    int count;
    bool found = false;
    int64_t *steps = checkpoint_steps(out, comm, &count);
    for (int i = 0; i < count && !found; i++) {
        const Text path = checkpoint_folder(out, steps[i], "");
        found = comm_agree_min(comm, checkpoint_whole(path.at, comm, config, share));
    }
    free(steps);
    return found;
}
// Returns the folder of the model that --model names: the newest complete checkpoint where it names
// the --out of a run, otherwise what it names. Ends the program (2) if the run has no such
// checkpoint. All ranks call it.
static inline const char *checkpoint_chosen(const char *model, Comm *comm) {
    int count = 0;
    GptConfig config;
    GptShare share;
    const bool itself = !access(text_of("%s/manifest", model).at, F_OK) ||
                        !access(text_of("%s/config.json", model).at, F_OK);
    int64_t *steps = checkpoint_steps(model, comm, &count);
    const char *chosen = itself || !count ? model : NULL;
    for (int i = 0; !chosen && i < count; i++) {
        const Text path = checkpoint_folder(model, steps[i], "");
        const bool whole = comm_agree_min(comm, checkpoint_whole(path.at, comm, &config, &share));
        if (whole) { chosen = strdup(path.at); }
        if (comm->rank) { continue; }
        fprintf(stderr,
                whole ? "note: --model is %s\n"
                      : "warning: --model skips %s: it is incomplete, was changed, or has a "
                        "number that is NaN or infinite\n",
                path.at);
    }
    free(steps);
    if (!chosen) {
        die(EXIT_INPUT, "name another folder", "--model %s: none of its %d checkpoints is valid",
            model, count);
    }
    return chosen;
}
// Reads the choices of matrix products from the newest valid manifest of `out`. Returns false if
// they are not for this device and library.
static inline bool checkpoint_matmuls(const char *out, const char *library,
                                      MatmulChoices *choices) {
    int count;
    int64_t *steps = checkpoint_list(out, &count);
    char *text = NULL;
    for (int i = 0; i < count && !text; i++) {
        Text why;
        text = manifest_read(checkpoint_folder(out, steps[i], "").at, &why);
    }
    const bool found = text && manifest_matmuls(text, library, choices);
    free(text);
    free(steps);
    return found;
}
// Fills the store of a new run with the states of a checkpoint of model `from`, or ends the program
// (2). anew: the moments of blocks are reset. All ranks call it.
static inline void checkpoint_begin(const char *folder, Store *s, const GptModel *from, bool anew,
                                    Progress *p) {
    Progress of = {};
    Text why;
    bool good = checkpoint_load(folder, s, from, &of, &why);
    if (!comm_agree_min(s->memory.comm, good)) {
        die(EXIT_INPUT, "another checkpoint may be whole", "--model %s: %s", folder,
            good ? "not valid on another rank" : why.at);
    }
    p->updates = of.updates;
    p->restarted = anew ? of.updates : of.restarted;
    if (anew) { store_reset_blocks(s); }
    store_count_updates(s, p);
    store_masters_changed(s);
}
// Loads the newest valid checkpoint of OUT and returns its folder, or ends the program (2) if none
// is valid. All ranks call it.
static inline Text checkpoint_resume(const char *out, Store *s, Progress *p) {
    int count;
    int64_t *steps = checkpoint_steps(out, s->memory.comm, &count);
    const int rank = s->memory.comm->rank, ranks = s->memory.comm->ranks;
    Text newest = text_of("%s", ""); // why the newest one is not valid
    for (int i = 0; i < count; i++) {
        const Text path = checkpoint_folder(out, steps[i], "");
        Text why;
        const bool good = checkpoint_load(path.at, s, s->plan.model, p, &why);
        const int first_bad = comm_agree_min(s->memory.comm, good ? ranks : rank);
        if (first_bad == ranks) {
            store_count_updates(s, p);
            store_masters_changed(s);
            free(steps);
            return path;
        }
        if (first_bad == rank) {
            fprintf(stderr, "warning: rank %d skips checkpoint %s: %s\n", rank, path.at, why.at);
        }
        if (!good && !*newest.at) { newest = text_of("%s; ", why.at); }
    }
    const Text hint = text_of("%s--out must hold a checkpoint of this model; without --resume 1 a "
                              "new run starts",
                              newest.at);
    die(EXIT_INPUT, hint.at, "no valid checkpoint in %s (%d tried)", out, count);
}

#endif
