// checkpoint.h: saving and loading checkpoints. docs/formats.md describes every byte.
//
// Checkpoint  A folder OUT/step_00000020 (folders.h) with one state file for each rank
//             (state_file.h), and a manifest (manifest.h).
// Atomic      Everything is written into OUT/step_00000020.tmp with fsync, the manifest last; then
//             the folder is renamed. A kill at any instant loses no complete checkpoint.
// Calls       All ranks call these functions, and agree on the outcome.
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "state/folders.h"    // where checkpoints are
#include "state/manifest.h"   // what they are
#include "state/state_file.h" // their states

// What a rank reports about its state file.
typedef struct {
    double failed, bytes, checksum_high, checksum_low;
} StateReport;

static inline int manifest_write(const char *folder, const Store *s, const Progress *p,
                                 const char *flags, const StateReport *reports) {
    TextBuffer t = {NULL, 0, 0};
    text_add(&t, "train_gpt checkpoint 1\n");
    manifest_add_model(&t, s->model, s->optimizer);
    text_add(&t, "step %" PRId64 "\nposition %" PRId64 "\nupdates %" PRId64 "\n", p->step,
             p->position, p->updates);
    if (s->pending) { text_add(&t, "pending %a\n", p->pending_norm); }
    if (p->delinked) {
        text_add(&t, "delinked %" PRId64 "\nrestarted %" PRId64 "\n", p->delinked, p->restarted);
    }
    // the losses of private steps are not published in checkpoints
    bool shown = !*p->privacy || !strcmp(p->privacy, "none");
    const OutlierWindow empty = {0, {0}};
    manifest_add_window(&t, "losses", shown ? &p->loss : &empty);
    manifest_add_window(&t, "norms", shown ? &p->norm : &empty);
    text_add(&t, "privacy %s\nflags %s\nfiles %d\n", *p->privacy ? p->privacy : "none", flags,
             s->comm->ranks);
    for (int r = 0; r < s->comm->ranks; r++) {
        text_add(&t, "file%d %.0f %08lx%08lx\n", r, reports[r].bytes,
                 (unsigned long)reports[r].checksum_high, (unsigned long)reports[r].checksum_low);
    }
    manifest_add_matmuls(&t, p->matmuls);
    Checksum sum = checksum_begin();
    checksum_add(&sum, t.text, t.length);
    char seal[64];
    manifest_seal(seal, sizeof seal, &sum);
    text_add(&t, "%s", seal);
    char path[1100];
    snprintf(path, sizeof path, "%s/manifest", folder);
    FileWriter w;
    writer_open(&w, path);
    writer_add(&w, t.text, t.length);
    free(t.text);
    return writer_close(&w);
}

// Saves OUT/step_N. A failure (disk full, folder missing) is a warning: returns false, and training
// continues. All ranks call it.
static inline bool checkpoint_save(const char *out, Store *s, const Progress *p, int64_t keep,
                                   const char *flags, char *path, size_t path_bytes) {
    char temporary[1100], file[1200];
    Comm *comm = s->comm;
    store_wait_all(s);
    for (int storage = 0; storage < s->model->storages; storage++) {
        store_forget_errors(s, storage);
    }
    checkpoint_folder(path, path_bytes, out, p->step, "");
    int turn = comm->rank == 0 ? checkpoint_half_make(out, p->step) : 0;
    comm_broadcast(comm, &turn, sizeof turn, 0);
    const int made = turn < 0 ? -turn : 0;
    checkpoint_half(temporary, sizeof temporary, out, p->step, turn);
    snprintf(file, sizeof file, "%s/state_%05d", temporary, comm->rank);
    uint64_t bytes = 0, checksum = 0;
    int error = made ? made : state_file_write(file, s, &bytes, &checksum);
    StateReport mine = {(double)error, (double)bytes, (double)(checksum >> 32),
                        (double)(checksum & 0xffffffffu)};
    StateReport *reports = new_array(StateReport, comm->ranks, "checkpoint");
    comm_all_gather_small(comm, &mine, reports, sizeof mine);
    for (int r = 0; r < comm->ranks && !error; r++) { error = (int)reports[r].failed; }
    if (comm->rank == 0 && !error) { error = manifest_write(temporary, s, p, flags, reports); }
    if (comm->rank == 0 && !error) { error = folder_publish(temporary, path, out); }
    comm_broadcast(comm, &error, sizeof error, 0);
    if (comm->rank == 0 && error) {
        if (!made) { folder_remove(temporary); }
        fprintf(
            stderr,
            "warning: checkpoint %s not saved: %s; training goes on, the exit code will be %d\n",
            path, strerror(error), EXIT_RESOURCES);
    }
    if (comm->rank == 0 && !error) { checkpoints_prune(out, p->step, keep); }
    free(reports);
    return !error;
}
// Fills store and progress from one checkpoint, of model `from`. A run that resumes passes the
// store's own model. Otherwise a new run begins with the checkpoint, in which as many blocks share
// or fewer: it counts its own steps, has no version before the first one, and no pending gradient.
// Each rank reads what it needs, and verifies its part of the files. So the checkpoint is valid
// only if the result is true on all ranks. Returns false, with the reason, if it is incomplete,
// invalid or of another model.
static inline bool checkpoint_load(const char *folder, Store *s, const GptModel *from, Progress *p,
                                   char *why, size_t why_bytes) {
    const bool resumes = from == s->model;
    char *text = manifest_read(folder, why, why_bytes);
    if (!text) { return false; }
    TextBuffer model = {NULL, 0, 0};
    manifest_add_model(&model, from, s->optimizer);
    const char *line = manifest_line(text, "model");
    int64_t files = 0, *filled = new_array(int64_t, FILE_KINDS * from->storages, "checkpoint");
    bool same = line && !strncmp(line, model.text + strlen("model "), strcspn(line, "\n") + 1);
    if (!same) {
        snprintf(why, why_bytes, "%s: of another model or optimizer: %.*s", folder,
                 line ? (int)strcspn(line, "\n") : 1, line ? line : "?");
    }
    bool good = same && manifest_progress(text, p, &files);
    for (int i = 0; good && s->version && i < s->model->storages; i++) {
        s->version[i] = resumes ? p->step : 0;
    }
    if (same && !good) {
        snprintf(why, why_bytes, "%s/manifest: a field is missing or out of range", folder);
    }
    for (int64_t i = 0; good && i < files; i++) {
        char path[1200];
        snprintf(path, sizeof path, "%s/state_%05" PRId64, folder, i);
        uint64_t bytes = 0, checksum = 0;
        good = manifest_file(text, i, &bytes, &checksum);
        if (!good) {
            snprintf(why, why_bytes, "%s/manifest: no entry for file %" PRId64, folder, i);
        }
        good = good && state_file_read(path, s, from, i % s->comm->ranks == s->comm->rank, bytes,
                                       checksum, filled, why, why_bytes);
    }
    good = good && states_are_whole(folder, s, from, filled, why, why_bytes);
    const char *pending = good ? manifest_line(text, "pending") : NULL;
    p->pending_norm = pending ? strtod(pending, NULL) : 0;
    s->pending =
        resumes && pending && store_delays(s) && filled[STATE_GRADIENT * from->storages] > 0;
    // storage 0 (wte) stands for all: if any stage is delayed, the first one is
    s->knows_previous = resumes && filled[STATE_PREVIOUS * from->storages] > 0;
    free(filled);
    free(model.text);
    free(text);
    return good;
}

// Sets how many updates the states have had.
static inline void store_count_updates(Store *s, const Progress *p) {
    for (int i = 0; i < s->model->storages; i++) {
        s->updates[i] = p->updates;
        s->restarted[i] = gpt_storage_class(s->model, i) == STORAGE_BLOCK ? p->restarted : 0;
    }
}
// Reads the model of a checkpoint's folder. Returns false if `folder` is no folder; ends the
// program (2) if it holds no valid checkpoint. All ranks call it.
static inline bool checkpoint_model(const char *folder, GptConfig *config, GptShare *share) {
    struct stat info;
    char why[1400] = "", optimizer[8];
    if (stat(folder, &info) || !S_ISDIR(info.st_mode)) { return false; }
    char *text = manifest_read(folder, why, sizeof why);
    const bool good = text && manifest_model(text, config, share, optimizer);
    const char *line = text ? manifest_line(text, "model") : NULL;
    if (line && !good) {
        snprintf(why, sizeof why, "a model that this program does not know: %.*s",
                 (int)strcspn(line, "\n"), line);
    }
    if (!good) {
        die(EXIT_INPUT, "--model takes a descriptor, a model file, or the folder of a checkpoint",
            "%s: no checkpoint: %s", folder, why);
    }
    gpt_config_check(config, folder);
    free(text);
    return true;
}
// Reads the model of a checkpoint. Returns false unless the manifest, and the files that this rank
// verifies, are complete.
static inline bool checkpoint_whole(const char *folder, const Comm *comm, GptConfig *config,
                                    GptShare *share) {
    char why[1400], path[1200], optimizer[8];
    int64_t files = 0;
    char *text = manifest_read(folder, why, sizeof why);
    bool good = text && manifest_model(text, config, share, optimizer) &&
                manifest_int(text, "files", &files) && files <= MANIFEST_FILES;
    for (int64_t i = comm->rank; good && i < files; i += comm->ranks) {
        uint64_t bytes = 0, checksum = 0;
        snprintf(path, sizeof path, "%s/state_%05" PRId64, folder, i);
        good = manifest_file(text, i, &bytes, &checksum) && state_file_whole(path, bytes, checksum);
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
        char path[1100];
        checkpoint_folder(path, sizeof path, out, steps[i], "");
        found = comm_agree_min(comm, checkpoint_whole(path, comm, config, share));
    }
    free(steps);
    return found;
}
// Reads the choices of matrix products from the newest valid manifest of `out`. Returns false if
// they are not for this device and library.
static inline bool checkpoint_matmuls(const char *out, const char *library,
                                      MatmulChoices *choices) {
    int count;
    int64_t *steps = checkpoint_list(out, &count);
    char *text = NULL;
    for (int i = 0; i < count && !text; i++) {
        char path[1100], why[1400];
        checkpoint_folder(path, sizeof path, out, steps[i], "");
        text = manifest_read(path, why, sizeof why);
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
    Progress of;
    char why[1400] = "";
    memset(&of, 0, sizeof of);
    bool good = checkpoint_load(folder, s, from, &of, why, sizeof why);
    if (!comm_agree_min(s->comm, good)) {
        die(EXIT_INPUT, "another checkpoint may be whole", "--model %s: %s", folder,
            good ? "not valid on another rank" : why);
    }
    p->updates = of.updates;
    p->restarted = anew ? of.updates : of.restarted;
    for (int i = 0; anew && i < s->model->storages; i++) {
        if (gpt_storage_class(s->model, i) != STORAGE_BLOCK || !store_own_elements(s, i)) {
            continue;
        }
        store_clear_moments(s, i);
    }
    store_count_updates(s, p);
    store_masters_changed(s);
}
// Loads the newest valid checkpoint of OUT, or ends the program (2) if none is valid. All ranks
// call it.
static inline void checkpoint_resume(const char *out, Store *s, Progress *p, char *path,
                                     size_t path_bytes) {
    int count;
    int64_t *steps = checkpoint_steps(out, s->comm, &count);
    for (int i = 0; i < count; i++) {
        checkpoint_folder(path, path_bytes, out, steps[i], "");
        char why[1400] = "";
        bool good = checkpoint_load(path, s, s->model, p, why, sizeof why);
        if (comm_agree_min(s->comm, good)) {
            store_count_updates(s, p);
            store_masters_changed(s);
            free(steps);
            return;
        }
        if (!good) {
            fprintf(stderr, "warning: rank %d skips checkpoint %s: %s\n", s->comm->rank, path, why);
        }
    }
    die(EXIT_INPUT,
        "--out must hold a checkpoint of this model; without --resume 1 a new run starts",
        "no valid checkpoint in %s (%d tried)", out, count);
}

#endif
