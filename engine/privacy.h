// privacy.h: the guarantee of a private run, and how much of it the run has spent.
//
// Promise  Checkpoints and printed values do not reveal whether one window (--dp-unit document: one
//          document) was in the training data, up to epsilon and delta. Each step takes each of W
//          windows with probability q = S / W, where S is the number of samples that --batch-tokens
//          holds. It clips their gradients to R, adds noise of sigma R, and divides by S, whatever
//          number was drawn.
// Noise    --dp-noise, or found for --dp-epsilon and the run's steps. A step that would exceed
//          --dp-epsilon is not taken.
// Cap      A step takes at most `most` samples, 6.5 standard deviations or more above S. A sample
//          can decide which others exceed the cap, and that would reveal it. The probability is so
//          low that over MOST_STEPS this adds less than CAP_SHARE of delta. If W exceeds the cap,
//          this share is subtracted from delta beforehand.
// History  One line of each checkpoint's manifest: the settings of its private steps. A run resumes
//          only with the same settings. So each step is in the account, under its own rules.
// Parts    Cyclic micro-batches compute with different versions of the parameters (cyclic.h). So
//          the micro-batch of a sample (its part) is drawn too, independently of other samples: no
//          sample moves another one to another version. Each part has its own cap.
// Key      The key of noise and samples: 32 bytes from the operating system, kept in OUT/dp_key,
//          which only its owner may read. Steps lost after a checkpoint are repeated with the same
//          key. They draw the same samples and noise and give the same results, so they count once.
//          So a resume without the key is refused. The key is never printed; checkpoints hold a
//          fingerprint.
// Replay   The same noise around two different gradients would reveal their difference. The file
//          OUT/dp_steps records how many steps have drawn noise, and from which step on they had
//          the flags and data of the last one (as a fingerprint). If such steps follow the
//          checkpoint, a run starts only with the flags and data of all of them. Two runs that
//          resume from copies of one OUT cannot detect each other: do not do that.
#ifndef PRIVACY_H
#define PRIVACY_H

#include "base/accountant.h" // epsilon
#include "comm/comm.h"       // rank 0 decides and sends its decisions
#include "ops/noise.h"       // keys
#include "options.h"         // --dp-...
#include "base/files.h"      // files in OUT

typedef struct {
    bool on;         // private; if false, nothing below is valid
    bool rdp, shown; // --dp-accountant, --dp-show-private
    // W (0: unknown, the run trains nothing); S, the mean number of samples of a step
    int64_t windows, samples;
    // limit of a step's samples; cyclic micro-batches of a step (else 1); limit of the samples of
    // each
    int64_t most, parts, most_of_part;
    // noise in thresholds; delta; threshold R; --dp-epsilon (0: none)
    double sigma, delta, clip, target;
    // values of the options; document: windows of a document
    int64_t style, function, unit, document, relation;
    // steps of the run; those of them that keep the target
    int64_t steps, allowed;
    uint32_t key[8];
    // hashes: of the key; of the training data (the caller sets it before privacy_begin()); of
    // flags and data
    uint64_t fingerprint, data, path;
    int ledger; // descriptor of OUT/dp_steps on rank 0, or -1; its content:
    // number of steps that have drawn noise; the first step (from 0) with the last one's path
    int64_t taken, since;
    uint64_t drawn;     // path of the last step that has drawn noise
    int64_t last_steps; // arguments and result of the last privacy_epsilon()
    PrivacyLoss last_loss;
} Privacy;

enum { PRIVACY_HISTORY_MAX = 600, PRIVACY_JSON_MAX = 1200 };
static const double CAP_SHARE = 1e-5;
// limit of CPU time for finding a run's noise or steps when it begins; tests set less
static double account_run_seconds = 600;

// -------------------------------------------------------------------------------------------------
// Epsilon

// Returns the limit of a step's samples if it takes `mean` on average. The tail of the Poisson
// distribution, by Chernoff's bound, is above that of the binomial distribution of any number of
// windows.
static inline int64_t privacy_most_samples(double mean, int64_t windows, int64_t document,
                                           double delta) {
    double seldom = log(CAP_SHARE * delta / MOST_STEPS);
    int64_t others = (int64_t)ceil(mean + ceil(6.5 * sqrt(mean)));
    while ((double)others - mean - (double)others * log((double)others / mean) > seldom) {
        others++;
    }
    return windows ? min_i64(others + document, windows) : others + document;
}

// Returns the setting for the accountant.
static inline PrivacySetting privacy_setting(const Privacy *p, int64_t steps) {
    // q; delta: reduced by the share of the cap, unless the cap cuts no batch
    double q = (double)p->samples / (double)p->windows,
           delta = p->most_of_part < p->windows ? p->delta * (1 - CAP_SHARE) : p->delta;
    PrivacySetting s = {
        q, p->sigma, delta, steps, p->rdp, p->relation == DP_REPLACE_ONE, (int)p->document};
    return s;
}
// Describes what the accountant computes, for users who wait.
enum { PRIVACY_QUESTION = 100 };
static inline const char *privacy_question(const PrivacySetting *s, char text[PRIVACY_QUESTION]) {
    snprintf(text, PRIVACY_QUESTION, "to account for %" PRId64 " private steps", s->steps);
    return text;
}
// Returns the epsilon of this many steps as an interval, of which `high` is claimed. Only rank 0
// calls it. The last result is cached.
static inline PrivacyLoss privacy_epsilon(Privacy *p, int64_t steps) {
    PrivacyLoss nothing = {0, 0}, all = {INFINITY, INFINITY};
    if (steps == 0) { return nothing; }
    if (p->sigma < LEAST_SIGMA) { return all; } // no meaningful epsilon
    if (steps != p->last_steps) {
        PrivacySetting s = privacy_setting(p, steps);
        char question[PRIVACY_QUESTION];
        account_watch(privacy_question(&s, question), 0);
        p->last_loss = account_epsilon(&s, NAN);
        p->last_steps = steps;
        // the search for noise or steps found a narrower interval below the target
        if (p->target > 0 && p->last_loss.high > p->target) {
            p->last_loss.high = fmin(p->last_loss.high, account_epsilon(&s, p->target).high);
        }
        account_unwatch();
    }
    return p->last_loss;
}
// Returns how many steps of the whole run may be taken, to keep the target.
static inline int64_t privacy_allowed_steps(const Privacy *p) {
    return p->on ? p->allowed : INT64_MAX;
}

// Finds the noise for the target. All ranks call it. Ends the program (EXIT_INPUT) if none
// suffices.
static inline void privacy_find_noise(Privacy *p, Comm *comm) {
    PrivacySetting s = privacy_setting(p, max_i64(p->steps, 1));
    if (comm->rank == 0) {
        char question[PRIVACY_QUESTION];
        account_watch(privacy_question(&s, question), account_run_seconds);
        p->sigma = account_sigma(&s, p->target);
        account_unwatch();
    }
    comm_broadcast(comm, &p->sigma, sizeof p->sigma, 0);
    if (isinf(p->sigma)) {
        die(EXIT_INPUT,
            "ask for more --dp-epsilon, or take fewer --steps or a smaller --batch-tokens",
            "no noise keeps --dp-epsilon %g over %" PRId64 " steps", p->target, p->steps);
    }
}
// Finds how many of the run's steps keep the target. All ranks call it.
static inline void privacy_find_allowed(Privacy *p, Comm *comm) {
    p->allowed = p->steps;
    if (p->target == 0 || p->steps == 0) { return; }
    PrivacySetting s = privacy_setting(p, p->steps);
    if (p->sigma < LEAST_SIGMA) {
        p->allowed = 0;
    } else if (comm->rank == 0) {
        char question[PRIVACY_QUESTION];
        account_watch(privacy_question(&s, question), account_run_seconds);
        if (account_epsilon(&s, p->target).high > p->target) {
            p->allowed = account_search(s, p->target, false, 0, p->steps);
        }
        account_unwatch();
    }
    comm_broadcast(comm, &p->allowed, sizeof p->allowed, 0);
}

// Plans privacy from the flags and the training data (windows 0: not opened). A run that does not
// resume gets its noise here. All ranks call it. Ends the program (EXIT_INPUT) if the guarantee
// cannot be kept.
static inline Privacy privacy_plan(const Options *o, const OptionsGiven *given, int64_t windows,
                                   int64_t samples, int64_t steps, Comm *comm) {
    Privacy p;
    memset(&p, 0, sizeof p);
    p.ledger = -1;
    p.on = options_private(o, given);
    p.steps = p.allowed = steps;
    if (!p.on) { return p; }
    p.rdp = o->dp_accountant == DP_RDP;
    p.shown = o->dp_show_private != 0;
    p.windows = windows;
    p.samples = samples;
    p.sigma = o->dp_noise;
    p.clip = o->dp_clip;
    p.target = o->dp_epsilon;
    p.delta = o->dp_delta > 0 ? o->dp_delta : windows ? 0.1 / (double)windows : (double)NAN;
    p.style = o->dp_clip_style;
    p.function = o->dp_clip_function;
    p.unit = o->dp_unit;
    p.relation = o->dp_neighbours;
    p.document = o->dp_unit == DP_DOCUMENT ? o->dp_windows_per_document : 1;
    p.parts = o->cyclic ? max_i64(1, o->cyclic_stages) : 1;
    const double parts = (double)p.parts, delta = windows || o->dp_delta > 0 ? p.delta : 1e-12;
    p.most_of_part =
        privacy_most_samples((double)samples / parts, windows, p.document, delta / parts);
    p.most = p.parts * p.most_of_part;
    if (windows) { p.most = min_i64(p.most, windows); }
    if (windows == 0 && steps == 0) { return p; }
    if (samples > windows) {
        die(EXIT_INPUT, "choose a smaller --batch-tokens, or more training data",
            "a private step takes each window with probability samples / windows, at most 1: "
            "--batch-tokens stands for %" PRId64 " samples, --train has %" PRId64 " windows",
            samples, windows);
    }
    if ((double)steps > MOST_STEPS) {
        die(EXIT_INPUT, "choose fewer --steps",
            "%" PRId64 " private steps: %g are accounted at most", steps, MOST_STEPS);
    }
    if (o->resume) { return p; }
    if (!given->at[OPTION_INDEX_dp_noise]) { privacy_find_noise(&p, comm); }
    privacy_find_allowed(&p, comm);
    if (p.allowed == 0 && steps) {
        die(EXIT_INPUT, "ask for more of either",
            "not one step with --dp-noise %g keeps --dp-epsilon %g", p.sigma, p.target);
    }
    return p;
}

// -------------------------------------------------------------------------------------------------
// History: "name=value" for each setting, then steps=; or "none"

enum { PRIVACY_SETTINGS = 11 };
typedef struct {
    const char *name, *flag;
    char value[40];
} PrivacyText;
// Writes the shortest text with this value.
static inline void privacy_text(PrivacyText *t, const char *name, const char *flag, double value) {
    t->name = name;
    t->flag = flag;
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(t->value, sizeof t->value, "%.*g", digits, value);
        if (strtod(t->value, NULL) == value) { return; }
    }
}
static inline void privacy_pick(PrivacyText *t, const char *name, int index, int64_t value) {
    const OptionSpec *spec = &option_specs[index];
    t->name = name;
    t->flag = spec->name;
    option_choice_text(spec, value, t->value, sizeof t->value);
}
static inline void privacy_settings(const Privacy *p, PrivacyText t[PRIVACY_SETTINGS]) {
    privacy_text(&t[0], "windows", "train", (double)p->windows);
    privacy_text(&t[1], "samples", "batch-tokens", (double)p->samples);
    privacy_text(&t[2], "sigma", "dp-noise", p->sigma);
    privacy_text(&t[3], "delta", "dp-delta", p->delta);
    privacy_text(&t[4], "clip", "dp-clip", p->clip);
    privacy_pick(&t[5], "style", OPTION_INDEX_dp_clip_style, p->style);
    privacy_pick(&t[6], "function", OPTION_INDEX_dp_clip_function, p->function);
    privacy_pick(&t[7], "unit", OPTION_INDEX_dp_unit, p->unit);
    privacy_text(&t[8], "windows_per_document", "dp-windows-per-document", (double)p->document);
    privacy_pick(&t[9], "neighbours", OPTION_INDEX_dp_neighbours, p->relation);
    t[10].name = "key";
    t[10].flag = "dp-key";
    snprintf(t[10].value, sizeof t[10].value, "%016" PRIx64, p->fingerprint);
}
// Writes the history line for the manifest of a checkpoint after `steps` steps.
static inline void privacy_history(const Privacy *p, int64_t steps,
                                   char text[PRIVACY_HISTORY_MAX]) {
    PrivacyText t[PRIVACY_SETTINGS];
    size_t n = 0;
    snprintf(text, PRIVACY_HISTORY_MAX, "none");
    if (!p->on) { return; }
    privacy_settings(p, t);
    for (int i = 0; i < PRIVACY_SETTINGS; i++) {
        n += (size_t)snprintf(text + n, PRIVACY_HISTORY_MAX - n, "%s=%s ", t[i].name, t[i].value);
    }
    snprintf(text + n, PRIVACY_HISTORY_MAX - n, "steps=%" PRId64, steps);
}
// Reads the value of a name; "" if it is missing or too long.
static inline void history_value(const char *history, const char *name, char *value, size_t bytes) {
    size_t length = strlen(name);
    value[0] = 0;
    for (const char *word = history; *word; word += strcspn(word, " "), word += strspn(word, " ")) {
        size_t n = strcspn(word, " ");
        if (n <= length || strncmp(word, name, length) || word[length] != '=' ||
            n - length - 1 >= bytes) {
            continue;
        }
        snprintf(value, bytes, "%.*s", (int)(n - length - 1), word + length + 1);
    }
}

// Ends the program (EXIT_INPUT) if the checkpoint's steps were taken under other settings than this
// run's.
static inline void privacy_compare(const Privacy *p, const char *history, int64_t step) {
    const char *hint = "one account holds for one setting: give what the checkpoint has, or begin "
                       "anew in another --out without --resume";
    PrivacyText t[PRIVACY_SETTINGS];
    char value[40], steps[40];
    privacy_settings(p, t);
    for (int i = 0; i < PRIVACY_SETTINGS; i++) {
        history_value(history, t[i].name, value, sizeof value);
        if (strcmp(value, t[i].value)) {
            die(EXIT_INPUT, hint,
                "--%s with --resume: the checkpoint's private steps were taken with %s %s, and "
                "this run would take %s",
                t[i].flag, t[i].name, *value ? value : "(unknown)", t[i].value);
        }
    }
    history_value(history, "steps", value, sizeof value);
    snprintf(steps, sizeof steps, "%" PRId64, step);
    if (strcmp(value, steps)) {
        die(EXIT_INPUT, "the manifest was changed",
            "the checkpoint of step %s has a privacy history of %s steps", steps, value);
    }
}
// Checks that a private run resumes from a private one, and the reverse. Without --dp-noise the run
// keeps the noise of the checkpoint.
static inline void privacy_adopt(Privacy *p, const OptionsGiven *given, const char *history,
                                 int64_t step) {
    const char *hint = "begin anew in another --out without --resume";
    bool private_before = strcmp(history, "none") != 0;
    if (p->steps > step && private_before && !p->on) {
        die(EXIT_INPUT,
            "give the --dp-... flags again, or --model of an exported file to begin another run "
            "from it",
            "the checkpoint is of a private run: steps without privacy would undo what it "
            "promised");
    }
    if (p->steps > step && !private_before && p->on) {
        die(EXIT_INPUT, hint,
            "the checkpoint is of a run without privacy: what it has seen of the data cannot be "
            "hidden any more");
    }
    if (!p->on || !private_before || given->at[OPTION_INDEX_dp_noise]) { return; }
    char value[40], *end = value;
    history_value(history, "sigma", value, sizeof value);
    p->sigma = strtod(value, &end);
    if (end == value || *end || !(p->sigma >= LEAST_SIGMA && p->sigma <= MOST_SIGMA)) {
        die(EXIT_INPUT, hint,
            "--dp-epsilon needs noise, and the checkpoint's steps were taken with sigma %s",
            *value ? value : "(unknown)");
    }
}

// -------------------------------------------------------------------------------------------------
// Files of rank 0

// Writes a file that only its owner may read, completely or not at all.
static inline void privacy_write(const char *out, const char *name, const char *text) {
    char path[1100], temporary[1110];
    snprintf(path, sizeof path, "%s/%s", out, name);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    const int fd = file_create(temporary, 0600);
    size_t length = strlen(text);
    bool written = fd >= 0 && write(fd, text, length) == (ssize_t)length && !fsync(fd) &&
                   !close(fd) && !rename(temporary, path);
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
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    ssize_t n =
        fd >= 0 && !fstat(fd, &info) && S_ISREG(info.st_mode) ? read(fd, text, bytes - 1) : -1;
    if (fd >= 0) { close(fd); }
    text[n > 0 ? n : 0] = 0;
    if (n >= 0 && (info.st_mode & 077)) {
        fprintf(stderr, "warning: %s can be read by others: chmod 600 it\n", path);
    }
    return n >= 0;
}

// Takes the key: --dp-key, the one in OUT (resume), or a new one.
static inline void privacy_take_key(Privacy *p, const Options *o) {
    char text[80] = "";
    if (*o->dp_key) {
        fprintf(stderr,
                "warning: --dp-key is for tests: nothing is private from those who know the key\n");
        snprintf(text, sizeof text, "%s", o->dp_key);
    } else if (o->resume) {
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

// Returns a hash of the flags and data that determine what a step computes. It leaves out the
// settings in the history, and flags that only decide which rank computes what: these change
// rounding alone, which the grid of noise_add() hides except for one element in thousands. It also
// leaves out names of data (--train, --tokenizer); the data's checksum, dataset_checksum(), is in
// it.
static inline uint64_t privacy_path(const Options *o, uint64_t data) {
    static const char *const alike[] = {
        "train",        "val",  "tokenizer",     "micro-batch",       "recompute",
        "reduce-dtype", "zero", "micro-batches", "pipeline-schedule", "pipeline-warmup",
        "cyclic-mode"};
    // if so, the learning rate depends on the number of steps
    bool steps_matter = o->lr_schedule != LR_CONSTANT && o->final_lr_fraction != 1;
    Checksum sum = checksum_begin();
    checksum_add(&sum, &data, sizeof data);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        bool other = !strcmp(spec->group, "privacy") || !strcmp(spec->group, "cluster");
        if (!strcmp(spec->group, "run")) {
            other = strcmp(spec->name, "seed") && !(steps_matter && !strcmp(spec->name, "steps"));
        }
        // in style stage, groups are the pipeline's stages
        other |= !strcmp(spec->name, "pipeline") && o->dp_clip_style != DP_STAGE;
        for (size_t j = 0; j < sizeof alike / sizeof alike[0]; j++) {
            other |= !strcmp(spec->name, alike[j]);
        }
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
    if (!known || p->since < 0 || p->since > p->taken || (double)p->taken > MOST_STEPS) {
        return false;
    }
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
        const char *hint = p->since > step
                               ? "flags were changed after this checkpoint: go on from a later "
                                 "one, or begin anew in another --out without --resume"
                               : "give the flags and data of the run that was stopped; once there "
                                 "is a checkpoint of its last step, they may change";
        die(EXIT_INPUT, hint,
            "steps %" PRId64 " to %" PRId64
            " have drawn noise after this checkpoint, under other flags: the same noise around "
            "other gradients would show them",
            step + 1, p->taken);
    }
}
// Opens the record of steps; a new run creates it. Only rank 0 calls it.
static inline void privacy_open_ledger(Privacy *p, const Options *o, int64_t step, bool resumes) {
    char text[LEDGER_BYTES + 1], path[1100];
    p->path = privacy_path(o, p->data);
    if (resumes) {
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
    if (o->val_every && !strcmp(o->train, o->val)) {
        fprintf(stderr,
                "warning: --val is the training data: no epsilon covers what its loss reveals\n");
    }
}
// Called when the weights are loaded. Compares with the history of the checkpoint of this step ("":
// a new run), takes the key, and finds the allowed steps. All ranks call it, also in runs that are
// not private.
static inline void privacy_begin(Privacy *p, const Options *o, const OptionsGiven *given,
                                 const char *history, int64_t step, Comm *comm) {
    bool resumes = *history != 0;
    if (resumes) { privacy_adopt(p, given, history, step); }
    if (!p->on || p->windows == 0) { return; }
    if (comm->rank == 0) { privacy_take_key(p, o); }
    comm_broadcast(comm, p->key, sizeof p->key, 0);
    p->fingerprint = noise_fingerprint(p->key);
    if (resumes) {
        privacy_compare(p, history, step);
        privacy_find_allowed(p, comm);
    }
    p->allowed = max_i64(p->allowed, step); // earlier steps are already taken
    if (comm->rank) { return; }
    if (*o->out && (!resumes || *o->dp_key)) { privacy_keep_key(p, o); }
    if (*o->out) { privacy_open_ledger(p, o, step, resumes); }
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

// -------------------------------------------------------------------------------------------------
// Reports, by rank 0

// Rounds up, since the value is claimed. A multiple of `unit` up to rounding errors stays.
static inline double privacy_up(double x, double unit) {
    return ceil(x / unit * (1 - 1e-12)) * unit;
}
// delta, rounded up to three digits
static inline double privacy_delta_up(const Privacy *p) {
    return privacy_up(p->delta, pow(10, floor(log10(p->delta)) - 2));
}
static inline void privacy_protected(const Privacy *p, char *text, size_t bytes) {
    if (p->unit == DP_SEQUENCE) {
        snprintf(text, bytes, "each window of the training data");
    } else {
        snprintf(text, bytes, "each document of the training data (%" PRId64 " window%s of it)",
                 p->document, p->document > 1 ? "s at most" : "");
    }
}
static inline void privacy_print_start(FILE *to, Privacy *p) {
    char protected_text[120];
    PrivacyText t[PRIVACY_SETTINGS];
    if (!p->on || p->windows == 0) { return; }
    privacy_settings(p, t);
    privacy_protected(p, protected_text, sizeof protected_text);
    if (p->sigma >= LEAST_SIGMA) {
        fprintf(to,
                "privacy    epsilon %.4f at delta %.3g after %" PRId64
                " steps, for %s (%s), by %s\n",
                privacy_up(privacy_epsilon(p, p->allowed).high, 1e-4), privacy_delta_up(p),
                p->allowed, protected_text, t[9].value, p->rdp ? "rdp" : "prv");
    } else {
        fprintf(to, "privacy    none: noise of %g hides nothing\n", p->sigma);
    }
    fprintf(to,
            "           sampling rate %.6g (Poisson): %" PRId64 " samples of %" PRId64
            " a step on average, %" PRId64 " at most\n",
            (double)p->samples / (double)p->windows, p->samples, p->windows, p->most);
    fprintf(to, "           gradients clipped to %s (%s, %s), noise of %s of that on their sum\n",
            t[4].value, t[5].value, t[6].value, t[2].value);
    if (p->shown) {
        fprintf(to, "           losses, norms and samples of private steps are shown: who sees "
                    "them knows more than epsilon says\n");
    }
    if (p->allowed < p->steps) {
        fprintf(to,
                "           stops after step %" PRId64 " of %" PRId64
                ": the next exceeds epsilon %g\n",
                p->allowed, p->steps, p->target);
    }
}
// Prints, at the end, the guarantee after `steps` steps, its reasons, and what it does not cover.
static inline void privacy_print_statement(FILE *to, Privacy *p, int64_t steps) {
    char protected_text[120];
    if (!p->on || p->windows == 0) { return; }
    if (p->sigma < LEAST_SIGMA) {
        fprintf(to, "privacy    none: %" PRId64 " steps with noise of %g, which hides nothing\n",
                steps, p->sigma);
        return;
    }
    PrivacyLoss loss = privacy_epsilon(p, steps);
    privacy_protected(p, protected_text, sizeof protected_text);
    fprintf(to, "privacy    after %" PRId64 " steps: epsilon <= %.4f at delta %.3g, for %s\n",
            steps, privacy_up(loss.high, 1e-4), privacy_delta_up(p), protected_text);
    fprintf(to, "           neighbours: data sets that differ by %s (%s)\n",
            p->relation == DP_ADD_REMOVE ? "one that is there or not" : "another in its place",
            p->relation == DP_ADD_REMOVE ? "add-remove" : "replace-one");
    fprintf(to,
            "           each step took each window with probability %.6g (Poisson) and added noise "
            "of %.6g clipping thresholds\n",
            (double)p->samples / (double)p->windows, p->sigma);
    if (p->rdp) { fprintf(to, "           accounted by rdp, an upper bound\n"); }
    if (!p->rdp) {
        fprintf(to, "           accounted by prv: the exact value is between %.6f and %.6f\n",
                loss.low, privacy_up(loss.high, 1e-6));
    }
    fprintf(to, "           not counted: other runs on this data, such as a search for "
                "hyper-parameters; time and memory that others on the machine can\n"
                "           watch; rounding of sums before noise; validation data, which must not "
                "be private; copies of a sample elsewhere in the data\n");
    if (p->shown) {
        fprintf(to, "           besides, losses, norms and samples were shown (--dp-show-private): "
                    "for who saw them epsilon does not hold\n");
    }
}
// Times and traffic depend on the number of drawn samples. Where they must be hidden, reports show
// two digits of their means over the run so far.
static inline bool privacy_hides(const Privacy *p) { return p->on && !p->shown; }
static inline double privacy_rounded(double x) {
    if (!(x > 0)) { return x; }
    double unit = pow(10, floor(log10(x)) - 1);
    return round(x / unit) * unit;
}
static inline int privacy_json_number(char *to, size_t bytes, const char *name, double x) {
    return isfinite(x) ? snprintf(to, bytes, ",\"%s\":%.17g", name, x)
                       : snprintf(to, bytes, ",\"%s\":null", name);
}
// Writes the same as a JSON object: at the start for the allowed steps, at the end for those taken.
// "null" if the run is not private. Values that depend on training data that was not opened
// (--dry-run) are null.
static inline void privacy_json(Privacy *p, int64_t steps, char text[PRIVACY_JSON_MAX]) {
    snprintf(text, PRIVACY_JSON_MAX, "null");
    if (!p->on) { return; }
    PrivacyText t[PRIVACY_SETTINGS];
    const bool known = p->windows > 0, found = known || p->target == 0 || p->sigma > 0;
    const double nothing = (double)NAN;
    PrivacyLoss loss = {nothing, nothing};
    if (known) { loss = privacy_epsilon(p, steps); }
    const struct {
        const char *name;
        double value;
    } numbers[] = {{"steps", known ? (double)steps : nothing},
                   {"epsilon", loss.high},
                   {"low", loss.low},
                   {"high", loss.high},
                   {"delta", p->delta},
                   {"target", p->target > 0 ? p->target : nothing},
                   {"sampling_rate", known ? (double)p->samples / (double)p->windows : nothing},
                   {"samples", (double)p->samples},
                   {"most_samples", (double)p->most},
                   {"windows", known ? (double)p->windows : nothing},
                   {"sigma", found ? p->sigma : nothing},
                   {"clip", p->clip},
                   {"windows_per_document", (double)p->document}};
    privacy_settings(p, t);
    size_t n =
        (size_t)snprintf(text, PRIVACY_JSON_MAX, "{\"sampling\":\"poisson\",\"accountant\":\"%s\"",
                         p->rdp ? "rdp" : "prv");
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        n += (size_t)privacy_json_number(text + n, PRIVACY_JSON_MAX - n, numbers[i].name,
                                         numbers[i].value);
    }
    snprintf(text + n, PRIVACY_JSON_MAX - n,
             ",\"clip_style\":\"%s\",\"clip_function\":\"%s\",\"unit\":\"%s\",\"neighbours\":\"%"
             "s\",\"key\":%s%s%s}",
             t[5].value, t[6].value, t[7].value, t[9].value, known ? "\"" : "",
             known ? t[10].value : "null", known ? "\"" : "");
}

#endif
