// privacy_ledger.h: begin and end of a private run, and its files in OUT, which rank 0 keeps.
//
// Key      The key of noise and samples: 32 bytes from the operating system, kept in OUT/dp_key,
//          which only its owner may read. Steps lost after a checkpoint are repeated with the same
//          key. They draw the same samples and noise and give the same results, so they count once.
//          So a resume without the key is refused, also before the first checkpoint, if steps were
//          recorded. The key is never printed; checkpoints hold a fingerprint.
// Replay   The same noise around two different gradients would reveal their difference. The file
//          OUT/dp_steps records how many steps have drawn noise, and from which step on they had
//          the flags, settings and data of the last one (as a fingerprint). If such steps follow
//          the checkpoint, a run starts only with the flags and data of all of them. Two runs that
//          resume from copies of one OUT cannot detect each other: do not do that.
#ifndef PRIVACY_LEDGER_H
#define PRIVACY_LEDGER_H

#include "base/base.h"
#include "base/files.h"
#include "comm/comm.h"
#include "comm/records.h"
#include "dataloader.h"
#include "ops/noise.h"
#include "options.h"
#include "privacy/accountant.h"
#include "privacy/privacy.h"

// Writes a file that only its owner may read, completely or not at all.
static inline void privacy_write(const char *out, const char *name, const char *text) {
    char path[1100], temporary[1110];
    snprintf(path, sizeof path, "%s/%s", out, name);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    const int fd = file_create(temporary, 0600);
    size_t length = strlen(text);
    bool written = fd >= 0 && write(fd, text, length) == (ssize_t)length && !fsync(fd) &&
                   !rename(temporary, path) && !close(fd);
    if (!written) {
        const bool input = errno == EEXIST || errno == EISDIR; // something else has this name
        const char *hint = "without it the run could not be resumed";
        die(input ? EXIT_INPUT : EXIT_RESOURCES, hint, "cannot write %s: %s", path,
            strerror(errno));
    }
    sync_folder(out);
}
// Reads at most bytes - 1 bytes of a file. Returns false if there is no such file.
static inline bool privacy_read(const char *out, const char *name, char *text, size_t bytes) {
    char path[1100];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", out, name);
    const int fd = open_untrusted(path, O_NOFOLLOW, &info);
    const ssize_t n = fd >= 0 ? read(fd, text, bytes - 1) : -1;
    if (fd >= 0) { close(fd); }
    text[n > 0 ? n : 0] = 0;
    if (n >= 0 && (info.st_mode & 077)) {
        fprintf(stderr, "warning: %s can be read by others: chmod 600 it\n", path);
    }
    return n >= 0;
}

// Takes the key: --dp-key, the one in OUT (if the run goes on with it), or a new one.
static inline void privacy_take_key(Privacy *p, const Options *o, bool goes_on) {
    char text[80] = "";
    if (*o->dp_key) {
        fprintf(stderr,
                "warning: --dp-key is for tests: nothing is private from those who know the key\n");
        snprintf(text, sizeof text, "%s", o->dp_key);
    } else if (goes_on) {
        if (!privacy_read(o->out, "dp_key", text, sizeof text)) {
            die(EXIT_INPUT,
                "put the run's dp_key back there; without it, begin anew in another --out without "
                "--resume",
                "%s/dp_key cannot be read: with another key, steps that were lost after the "
                "checkpoint would be drawn anew and count twice",
                o->out);
        }
        text[strcspn(text, "\n")] = 0;
    } else {
        noise_key_make(p->key);
        noise_key_to_hex(text, p->key);
    }
    if (!noise_key_from_hex(p->key, text)) {
        die(EXIT_INPUT, "put the run's dp_key back there",
            "%s/dp_key is no key: expected 64 hexadecimal digits", o->out);
    }
    noise_wipe(text, sizeof text);
}
static inline void privacy_keep_key(const Privacy *p, const Options *o) {
    char text[66];
    noise_key_to_hex(text, p->key);
    text[64] = '\n';
    text[65] = 0;
    privacy_write(o->out, "dp_key", text);
    noise_wipe(text, sizeof text);
}

// Returns a hash of the flags, data and products that determine what a step computes. Products in
// bf16 count with the instructions that make them: their sums, in another order, move activations
// by steps of bf16, which the grid does not hide. It leaves out the
// settings in the history, and flags that only decide which rank computes what: these change
// rounding alone, which the grid of noise_add() hides except for one element in thousands. It also
// leaves out names of data (--train, --tokenizer); the data's checksum, dataset_checksum(), is in
// it.
static inline uint64_t privacy_path(const Options *o, uint64_t data, uint64_t products) {
    static const char *const alike[] = {
        "train",        "val",  "tokenizer",     "micro-batch",       "recompute",
        "reduce-dtype", "zero", "micro-batches", "pipeline-schedule", "pipeline-warmup",
        "cyclic-mode"};
    // if so, the learning rate depends on the number of steps
    bool steps_matter = o->lr_schedule != LR_CONSTANT && o->final_lr_fraction != 1;
    Checksum sum = checksum_begin();
    checksum_add(&sum, &data, sizeof data);
    checksum_add(&sum, &products, sizeof products);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        bool other = !strcmp(spec->group, "privacy") || !strcmp(spec->group, "cluster");
        if (!strcmp(spec->group, "run")) {
            other = strcmp(spec->name, "seed") && !(steps_matter && !strcmp(spec->name, "steps"));
        }
        // in style stage, groups are the pipeline's stages
        other |= !strcmp(spec->name, "pipeline") && o->dp_clip_style != DP_STAGE;
        for (int j = 0; j < LENGTH_OF(alike); j++) { other |= !strcmp(spec->name, alike[j]); }
        char value[1100];
        option_value_text(o, spec, value, sizeof value);
        if (!other) { checksum_add(&sum, value, strlen(value) + 1); }
    }
    return checksum_end(&sum);
}
enum { LEDGER_BYTES = 59 };
// All ledgers have the same length, so that a new one overwrites the old one.
static inline void ledger_text(const Privacy *p, char text[LEDGER_BYTES + 1]) {
    snprintf(text, LEDGER_BYTES + 1, "%020" PRId64 " %020" PRId64 " %016" PRIx64 "\n", p->taken,
             p->since, p->drawn);
}
static inline bool ledger_parse(Privacy *p, const char *text) {
    char again[LEDGER_BYTES + 1];
    bool known = sscanf(text, "%20" SCNd64 " %20" SCNd64 " %16" SCNx64, &p->taken, &p->since,
                        &p->drawn) == 3;
    if (!known || p->since < 0 || p->since > p->taken || p->taken > MOST_STEPS) { return false; }
    ledger_text(p, again);
    return !strcmp(text, again);
}
// Records a step (from 0) before it draws noise, in one write that a kill cannot tear. If the
// record is written and the step is not taken, one step too many is guarded, which is harmless. The
// record is synced to disk when flags change and before a checkpoint. A step that is lost in a
// power failure without a sync was not seen by anyone.
static inline void privacy_note(Privacy *p, int64_t step) {
    char text[LEDGER_BYTES + 1];
    bool changed = p->drawn != p->path;
    if (changed) {
        p->drawn = p->path;
        p->since = step;
    }
    p->taken = max_i64(p->taken, step + 1);
    if (p->ledger < 0) { return; }
    ledger_text(p, text);
    if (pwrite(p->ledger, text, LEDGER_BYTES, 0) != LEDGER_BYTES ||
        (changed && fdatasync(p->ledger))) {
        die(EXIT_RESOURCES, "a step that draws noise must be noted before",
            "cannot write dp_steps into --out: %s", strerror(errno));
    }
    file_hide_time(p->ledger);
}
// Syncs the record to disk, before a checkpoint is written.
static inline void privacy_sync(const Privacy *p) {
    if (p->ledger >= 0 && fdatasync(p->ledger)) {
        die(EXIT_RESOURCES, "a checkpoint without it could not be resumed",
            "cannot write dp_steps into --out: %s", strerror(errno));
    }
}
// For a run that resumes after `step` steps: checks that all later steps that have drawn noise did
// so on the present path. A path changes only if no steps come after the checkpoint. So steps from
// `since` on had one path, and the step before `since` had another; no longer history is needed.
static inline void privacy_check_ledger(Privacy *p, const Options *o, int64_t step) {
    const char *lost = "put the run's dp_steps back there; without it, begin anew in another --out "
                       "without --resume";
    char text[LEDGER_BYTES + 2]; // 1 more, to detect a file that is too long
    if (!privacy_read(o->out, "dp_steps", text, sizeof text)) {
        die(EXIT_INPUT, lost,
            "%s/dp_steps cannot be read: steps that were lost after the checkpoint may have drawn "
            "noise under other flags",
            o->out);
    }
    if (!ledger_parse(p, text)) {
        die(EXIT_INPUT, lost,
            "%s/dp_steps is damaged: expected two numbers of 20 digits and one of 16 hexadecimal "
            "digits",
            o->out);
    }
    if (p->taken < step) {
        die(EXIT_INPUT, lost,
            "%s/dp_steps is of another run or time: it knows of %" PRId64
            " steps, the checkpoint has %" PRId64,
            o->out, p->taken, step);
    }
    if (p->taken > step && (p->since > step || p->drawn != p->path)) {
        const char *hint = !step ? "give the flags and data of the run that was stopped, or begin "
                                   "anew, with another key, without --resume"
                           : p->since > step
                               ? "flags were changed after this checkpoint: go on from a later "
                                 "one, or begin anew in another --out without --resume"
                               : "give the flags and data of the run that was stopped; once there "
                                 "is a checkpoint of its last step, they may change";
        const bool products = *p->arithmetic[0] && strcmp(p->arithmetic[0], p->arithmetic[1]);
        const Text other = products ? text_of("with other products (%s, here %s)", p->arithmetic[0],
                                              p->arithmetic[1])
                                    : text_of("under other flags, data or products");
        die(EXIT_INPUT, products ? "go on where products are computed as then" : hint,
            "steps %" PRId64 " to %" PRId64 " have drawn noise %s, %s: the same noise around other "
            "gradients would show them",
            step + 1, p->taken, step ? "after this checkpoint" : "before the first checkpoint",
            other.at);
    }
}
// Opens the record of steps; a run that does not go on with it creates it. Only rank 0 calls it.
static inline void privacy_open_ledger(Privacy *p, const Options *o, int64_t step, bool goes_on) {
    char text[LEDGER_BYTES + 1], path[1100], settings[PRIVACY_HISTORY_MAX];
    // without a checkpoint nothing else has the settings
    Checksum sum = checksum_begin();
    privacy_history(p, 0, settings);
    checksum_add(&sum, settings, strlen(settings));
    p->path = privacy_path(o, p->data ^ checksum_end(&sum), p->products);
    if (goes_on) {
        privacy_check_ledger(p, o, step);
    } else {
        p->taken = p->since = step;
        p->drawn = p->path;
        ledger_text(p, text);
        privacy_write(o->out, "dp_steps", text);
    }
    snprintf(path, sizeof path, "%s/dp_steps", o->out);
    p->ledger = open(path, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    if (p->ledger < 0) {
        die(EXIT_RESOURCES, "--out must be writable", "cannot write %s: %s", path, strerror(errno));
    }
}

// -------------------------------------------------------------------------------------------------
// Begin and end

static inline void privacy_warn(const Privacy *p, const Options *o, int64_t step) {
    if (p->allowed <= step && p->steps > step) {
        fprintf(stderr, "warning: no step is left that keeps --dp-epsilon %g\n", p->target);
    }
    if (p->sigma < LEAST_SIGMA) {
        fprintf(stderr, "warning: --dp-noise %g hides nothing: this run is not private\n",
                p->sigma);
    }
    if (p->shown) {
        fprintf(stderr, "warning: --dp-show-private: epsilon does not hold for who sees the "
                        "losses, norms and samples of steps\n");
    }
    if (o->val_every && dataset_shares_file(o->train, o->val)) {
        fprintf(stderr,
                "warning: --val is the training data: no epsilon covers what its loss reveals\n");
    }
}
// Called when the weights are loaded. Compares with the history of the checkpoint of this step ("":
// a new run), takes the key, and finds the allowed steps. All ranks call it, also in runs that are
// not private.
static inline void privacy_begin(Privacy *p, const Options *o, const OptionsGiven *given,
                                 const char *history, int64_t step, Comm *comm) {
    const bool resumes = *history != 0;
    if (resumes) { privacy_adopt(p, given, history, step); }
    if (!p->on || p->windows == 0) { return; }
    const Text record = text_of("%s/dp_steps", o->out);
    const bool goes_on = resumes || (p->restarts && !access(record.at, F_OK));
    if (comm->rank == 0) { privacy_take_key(p, o, goes_on); }
    comm_broadcast(comm, p->key, sizeof p->key, 0);
    p->fingerprint = noise_fingerprint(p->key);
    if (resumes) {
        privacy_compare(p, history, step);
        privacy_find_allowed(p, comm);
    }
    p->allowed = max_i64(p->allowed, step); // earlier steps are already taken
    if (comm->rank) { return; }
    if (*o->out && (!goes_on || *o->dp_key)) { privacy_keep_key(p, o); }
    if (*o->out) { privacy_open_ledger(p, o, step, goes_on); }
    privacy_warn(p, o, step);
}
// Wipes the key.
static inline void privacy_end(Privacy *p, const Options *o) {
    if (!p->on) { return; }
    noise_wipe(p->key, sizeof p->key);
    noise_wipe((char *)(uintptr_t)o->dp_key, strlen(o->dp_key));
    if (p->ledger >= 0) { close(p->ledger); }
    p->ledger = -1;
}

#endif
