// report.h: the numbers that the program reports. Predictions before anything is allocated,
// progress during training, predicted against measured values at the end. They go to the terminal
// for people, and to the log as JSON lines for programs (docs/formats.md has the names).
//
// Predictions are sums over the action list. Memory follows from the planned layouts, traffic from
// the messages of each PREFETCH, REDUCE and SEND, and time from the simulator with the rates
// measured at start. Rank 0 prints and logs.
#ifndef REPORT_H
#define REPORT_H

#include "state/checkpoint.h"      // TextBuffer
#include "engine/costs.h"          // costs of actions
#include "engine/timeline.h"       // schedules with their times
#include "engine/cyclic_windows.h" // schedules that differ between steps
#include "options.h"               // the flags in the log header

#include <malloc.h> // malloc_trim

// -------------------------------------------------------------------------------------------------
// JSON
typedef struct {
    FILE *file;  // NULL: no log
    bool failed; // a write failed (disk full): warned once, training continues
} Log;

// Full precision. JSON has no infinities: they become null.
static inline void json_add_number(TextBuffer *t, double x) {
    if (isfinite(x)) {
        text_add(t, "%.17g", x);
    } else {
        text_add(t, "null");
    }
}
static inline void json_add_field(TextBuffer *t, const char *name, double x) {
    text_add(t, ",\"%s\":", name);
    json_add_number(t, x);
}
// Returns the bytes of the character at the start of UTF-8 text, 1 to 4. Returns 0 if the bytes are
// no UTF-8 character: a wrong or missing continuation, a longer form than needed, half of a
// surrogate pair, or a code above U+10FFFF (RFC 3629). The text ends with 0.
static inline int utf8_length(const unsigned char *s) {
    static const unsigned first[] = {0, 0, 0x80, 0x800, 0x10000};
    static const struct {
        unsigned char below;
        int length;
    } leads[] = {{0x80, 1}, {0xc2, 0}, {0xe0, 2}, {0xf0, 3}, {0xf5, 4}};
    int lead = 0;
    while (lead < 5 && s[0] >= leads[lead].below) { lead++; }
    const int length = lead < 5 ? leads[lead].length : 0;
    unsigned code = length < 2 ? s[0] : s[0] & (0xffu >> (length + 1));
    for (int i = 1; i < length; i++) {
        if ((s[i] & 0xc0) != 0x80) { return 0; }
        code = code << 6 | (s[i] & 0x3fu);
    }
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    return length > 1 && (code < first[length] || surrogate || code > 0x10ffff) ? 0 : length;
}
// Writes any bytes as a JSON string in UTF-8. A byte that is no part of a character becomes \udc80
// to \udcff, half of a surrogate pair. No valid text contains these, so the bytes can be restored
// (as by Python's os.fsencode).
static inline void json_add_string(TextBuffer *t, const char *text) {
    text_add(t, "\"");
    for (const unsigned char *s = (const unsigned char *)text; *s;) {
        const int length = utf8_length(s);
        if (length == 0) {
            text_add(t, "\\udc%02x", *s);
        } else if (*s == '"' || *s == '\\') {
            text_add(t, "\\%c", *s);
        } else if (*s < 32) {
            text_add(t, "\\u%04x", *s);
        } else {
            text_add(t, "%.*s", length, (const char *)s);
        }
        s += length ? length : 1;
    }
    text_add(t, "\"");
}
static inline void json_add_flags(TextBuffer *t, const Options *o) {
    text_add(t, "{");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        char value[1100];
        option_value_text(o, spec, value, sizeof value);
        text_add(t, "%s\"%s\":", i ? "," : "", spec->name);
        if (spec->kind == OPTION_TEXT || spec->kind == OPTION_PICK || spec->kind == OPTION_SECRET) {
            json_add_string(t, value);
        } else {
            text_add(t, "%s", value);
        }
    }
    text_add(t, "}");
}

// Opens the log. A new run starts a new file. A resumed run appends, on a new line if a kill has
// cut off the last one.
static inline Log log_open(const char *path, bool resumed) {
    Log log = {NULL, false};
    if (!*path) { return log; }
    log.file = fopen(path, resumed ? "ab+" : "wb");
    if (!log.file) {
        die(EXIT_INPUT, "--log names a file that can be written", "cannot write %s: %s", path,
            strerror(errno));
    }
    if (resumed && !fseek(log.file, -1, SEEK_END) && fgetc(log.file) != '\n') {
        fseek(log.file, 0, SEEK_END);
        fputc('\n', log.file);
    }
    return log;
}
// Writes one line and frees its text.
static inline void log_line(Log *log, TextBuffer *t) {
    if (log->file) {
        bool bad = fprintf(log->file, "%s\n", t->text) < 0 || fflush(log->file);
        if (bad && !log->failed) {
            fprintf(stderr, "warning: cannot write the log: %s; training goes on\n",
                    strerror(errno));
        }
        log->failed |= bad;
    }
    free(t->text);
    memset(t, 0, sizeof *t);
}

// -------------------------------------------------------------------------------------------------
// Predictions
typedef struct {
    // memory: bytes on the device; host: resident bytes of the process besides these
    size_t memory[MEMORY_KINDS], host;
    size_t offloaded; // part of host: offloaded states and activations
    int64_t moved[2]; // bytes moved in a step: to the device, to the host
    int64_t stored;   // bytes on disk; a step reads and writes all of them
    // bytes of this run's files: `stored`, and those reserved for the delinked model (pseudo.h)
    int64_t disk;
    int64_t traffic[COMM_KINDS][LINK_KINDS];
    double step_s, idle; // idle: share of the step in which this rank waits
    // part of host: states of the shared model that are there while blocks are delinked (pseudo.h)
    size_t passing;
    int64_t parameters;
} Prediction;
// The most that this rank needs of its device and of the host, over all models of the run.
typedef struct {
    double device, host;
    size_t offloaded; // part of host
} Needs;

// The run that predictions and reports describe.
typedef struct {
    const Options *options;
    const GptModel *model;
    const Comm *comm;
    const Cluster *cluster; // 0 x 0: no --cluster, the run's own ranks
    // ranks of the run or of --cluster, seen from the member `me` that the predictions are for
    const Group *ranks;
    const Program *program;
    const Rates *rates;
    Prediction *predicted;
    const Dataset *train;
    const Store *store; // at least its layout is planned
    int threads;
    int64_t samples, most_samples, steps; // samples of a step (expected, at most); steps of the run
    ExecutorShape shape;                  // of micro-steps
    Privacy *privacy;
    const CyclicPlan *cyclic; // its `program` is that of step 0
    // of the model after delinking; NULL: the run does not delink
    Prediction *later;
    const DiskFile *files; // [2] of this model and of the delinked one
    const OptionsGiven *given;
} RunFacts;

// Predicts the bytes of each kind on this rank, with micro-batches of `rows` samples.
static inline void predict_memory(const RunFacts *run, int64_t rows, bool recompute,
                                  size_t memory[MEMORY_KINDS]) {
    ExecutorShape shape = run->shape;
    shape.rows = rows;
    shape.recompute = recompute;
    Executor counted =
        executor_plan(run->model, shape, &memory[MEMORY_ACTIVATIONS], &memory[MEMORY_BUFFERS]);
    executor_free(&counted);
    memory[MEMORY_PARAMETERS] = memory[MEMORY_GRADIENTS] = memory[MEMORY_OPTIMIZER] = 0;
    store_predict(run->store, memory);
    // buffers of messages are allocated already
    memory[MEMORY_BUFFERS] +=
        memory_taken[MEMORY_BUFFERS] + executor_workspace_bytes(run->model, &shape, run->threads);
}

// Adds the traffic of one step: all that PREFETCH, REDUCE and SEND of this rank's schedule send.
static inline void predict_program_traffic(const RunFacts *run, const Program *program,
                                           int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    const Schedule *schedule = &program->rank[run->ranks->me];
    const Store *store = run->store;
    for (int i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        ZeroMessage m[2];
        if (action_sends(a->kind)) {
            traffic[COMM_SEND][group_link(run->ranks, run->ranks->me, a->peer)] +=
                executor_message_bytes(&run->shape, run->model, a);
        }
        if (store->policy.p2p) { continue; } // no collectives
        for (int k = a->storage >= 0 ? action_messages(store, a, m) - 1 : -1; k >= 0; k--) {
            comm_bytes_sent(m[k].kind, m[k].group, m[k].group->me, m[k].bounds, m[k].element_bytes,
                            traffic[m[k].kind]);
        }
    }
}
// Predicts the traffic of a step. Where ranks take turns, this is the mean over their cycle of
// steps: the first rank, which is reported, has the same micro-batch in all steps, but its messages
// go to each rank of stage 1 in turn.
static inline void predict_traffic(const RunFacts *run, int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    const int steps = cyclic_turns(run->cyclic) ? cyclic_phases(run->cyclic, 1) : 1;
    predict_program_traffic(run, run->program, traffic);
    for (int step = 1; step < steps; step++) {
        Program window = cyclic_window(run->program, run->cyclic, step);
        predict_program_traffic(run, &window, traffic);
        cyclic_window_free(&window);
    }
    for (int l = 0; l < LINK_KINDS; l++) { traffic[COMM_SEND][l] /= steps; }
}

// -------------------------------------------------------------------------------------------------
// Tables and JSON of memory and traffic
static inline size_t memory_device(const size_t memory[MEMORY_KINDS]) {
    size_t sum = 0;
    for (int k = 0; k < MEMORY_KINDS; k++) { sum += memory[k]; }
    return sum;
}
static inline void json_add_memory(TextBuffer *t, const size_t memory[MEMORY_KINDS], size_t host) {
    text_add(t, "{");
    for (int k = 0; k < MEMORY_KINDS; k++) {
        text_add(t, "\"%s\":%zu,", memory_names[k], memory[k]);
    }
    text_add(t, "\"device\":%zu,\"host\":%zu}", memory_device(memory), host);
}
static inline void json_add_traffic(TextBuffer *t, int64_t traffic[COMM_KINDS][LINK_KINDS],
                                    const int64_t total[LINK_KINDS]) {
    text_add(t, "{");
    for (int l = 0; l < LINK_KINDS; l++) {
        text_add(t, "\"%s\":{", comm_link_names[l]);
        for (int k = 0; k < COMM_KINDS; k++) {
            text_add(t, "%s\"%s\":%" PRId64, k ? "," : "", comm_kind_names[k], traffic[k][l]);
        }
        text_add(t, "},");
    }
    text_add(t, "\"total\":{\"intra\":%" PRId64 ",\"inter\":%" PRId64 "}}", total[0], total[1]);
}
static inline void traffic_total(int64_t traffic[COMM_KINDS][LINK_KINDS],
                                 int64_t total[LINK_KINDS]) {
    for (int l = 0; l < LINK_KINDS; l++) {
        total[l] = 0;
        for (int k = 0; k < COMM_KINDS; k++) { total[l] += traffic[k][l]; }
    }
}
static inline void print_bytes(const char *name, double predicted, double measured) {
    printf("  %-14s %12.3f MiB", name, predicted / 1048576);
    if (measured >= 0) { printf(" predicted, %12.3f MiB measured", measured / 1048576); }
    printf("\n");
}
static inline void print_memory(const size_t predicted[MEMORY_KINDS], size_t host,
                                const size_t *measured, double measured_host) {
    for (int k = 0; k < MEMORY_KINDS; k++) {
        print_bytes(memory_names[k], (double)predicted[k], measured ? (double)measured[k] : -1);
    }
    print_bytes("device", (double)memory_device(predicted),
                measured ? (double)memory_device(measured) : -1);
    print_bytes("host", (double)host, measured ? measured_host : -1);
}
static inline void print_traffic(int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    for (int k = 0; k < COMM_KINDS; k++) {
        if (traffic[k][0] + traffic[k][1]) {
            printf("  %-14s %12.3f MiB inside a node, %12.3f MiB between nodes\n",
                   comm_kind_names[k], (double)traffic[k][0] / 1048576,
                   (double)traffic[k][1] / 1048576);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Values from the operating system

// Returns the number in a line such as "VmHWM: 12 kB" of a file of the kernel; 0 if no line has the
// field.
static inline double kernel_number(const char *path, const char *field) {
    char line[256];
    double number = 0;
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) {
        if (!strncmp(line, field, strlen(field))) { number = atof(line + strlen(field)); }
    }
    if (f) { fclose(f); }
    return number;
}
// The same in bytes, for fields in kB.
static inline double kernel_bytes(const char *path, const char *field) {
    return 1024 * kernel_number(path, field);
}
// Returns the bytes of this process (VmRSS: now, VmHWM: at its peak) without its device memory.
// First returns the memory that the C library keeps after free() to the system.
static inline size_t host_bytes(const char *field) {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
    size_t all = (size_t)kernel_bytes("/proc/self/status", field),
           device = ops_memory_apart() ? 0 : memory_device(memory_taken);
    return all > device ? all - device : 0;
}
static inline double file_number(const char *path) { // first number of a file; NAN: none
    double value = NAN;
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%lf", &value) != 1) { value = NAN; }
    if (f) { fclose(f); }
    return value;
}
// Returns the bytes that the memory control group in `folder` still allows; INFINITY without a
// limit. Its usage includes inactive file pages. The kernel reclaims these before it refuses
// memory, so they count as available.
static inline double memory_group_available(const char *folder) {
    static const char *const versions[][3] = {
        {"memory.max", "memory.current", "inactive_file "},
        {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "}};
    double bytes = INFINITY;
    for (int i = 0; i < 2; i++) {
        char limit[1100], usage[1100], table[1100];
        snprintf(limit, sizeof limit, "%s/%s", folder, versions[i][0]);
        snprintf(usage, sizeof usage, "%s/%s", folder, versions[i][1]);
        snprintf(table, sizeof table, "%s/memory.stat", folder);
        // fmin ignores NAN
        bytes = fmin(bytes, file_number(limit) - file_number(usage) +
                                kernel_number(table, versions[i][2]));
    }
    return bytes;
}
// Returns the bytes still available to this process: the least that the machine and its control
// groups allow. INFINITY if no source reports a number.
static inline double memory_available(void) {
    double machine = kernel_bytes("/proc/meminfo", "MemAvailable:") +
                     kernel_bytes("/proc/meminfo", "SwapFree:"),
           bytes = machine > 0 ? machine : INFINITY;
    bytes = fmin(bytes, fmin(memory_group_available("/sys/fs/cgroup"),
                             memory_group_available("/sys/fs/cgroup/memory")));
    char line[512];
    FILE *f = fopen("/proc/self/cgroup", "r"); // lines such as "4:memory:/path" and "0::/path"
    while (f && fgets(line, sizeof line, f)) {
        char *kind = strchr(line, ':'), *path = kind ? strchr(kind + 1, ':') : NULL, folder[1024];
        if (!path || (strncmp(kind, "::", 2) && strncmp(kind, ":memory:", 8))) { continue; }
        snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%.*s", path == kind + 1 ? "" : "/memory",
                 (int)strcspn(path + 1, "\n"), path + 1);
        bytes = fmin(bytes, memory_group_available(folder));
    }
    if (f) { fclose(f); }
    return bytes;
}

// -------------------------------------------------------------------------------------------------
// Predictions of a whole step

// The planned stores of all ranks. Ranks of a stage have equal plans: this rank's stands for its
// own stage, the first rank's for each other stage.
typedef struct {
    const Store **of_rank; // [ranks of the program] the store of each rank
    Store *stores;         // [stages] of the other stages
    Group *seen;           // [stages] all ranks, seen from the first rank of the stage
    int stages;
} StageStores;
static inline StageStores stage_stores_make(const RunFacts *run) {
    const Store *mine = run->store;
    const Placement *placement = mine->placement;
    StageStores s = {NULL, NULL, NULL, placement->stages};
    s.of_rank =
        (const Store **)checked_calloc((size_t)run->program->ranks, sizeof(Store *), "stages");
    s.stores = (Store *)checked_calloc((size_t)s.stages, sizeof(Store), "stages");
    s.seen = (Group *)checked_calloc((size_t)s.stages, sizeof(Group), "stages");
    for (int r = 0; r < run->program->ranks; r++) { s.of_rank[r] = mine; }
    for (int i = 0; i < s.stages; i++) {
        const Stage *stage = &placement->stage[i];
        bool my_own = false;
        for (int k = 0; k < stage->replicas; k++) {
            my_own = my_own || stage->ranks[k] == mine->ranks->ranks[mine->ranks->me];
        }
        if (my_own) { continue; }
        s.seen[i] = group_seen_from(mine->ranks, stage->ranks[0]);
        s.stores[i] = store_plan(run->model, &s.seen[i], placement, mine->policy, mine->dtype,
                                 mine->wire, mine->optimizer);
        for (int k = 0; k < stage->replicas; k++) {
            if (stage->ranks[k] < run->program->ranks) {
                s.of_rank[stage->ranks[k]] = &s.stores[i];
            }
        }
    }
    return s;
}
static inline void stage_stores_free(StageStores *s) {
    for (int i = 0; i < s->stages; i++) {
        if (s->seen[i].n) {
            store_free(&s->stores[i]);
            group_free(&s->seen[i]);
        }
    }
    free(s->of_rank);
    free(s->stores);
    free(s->seen);
}

// Returns the simulated time of a step that follows others, in seconds. Sets the computing time of
// each rank (busy) and the times of each action (times), if these are not NULL.
static inline double predict_step(const RunFacts *run, double *busy, ActionTime **times) {
    StageStores stages = stage_stores_make(run);
    Costs costs = {
        run->model,     &run->shape, stages.of_rank, *run->rates, (double)run->options->seq_len,
        run->shape.clip};
    double step_s = schedule_simulate_times(run->program, action_cost, &costs, busy, times);
    stage_stores_free(&stages);
    return step_s;
}
// --show-schedule: prints the planned time of each action, and the action list.
static inline void show_schedule(const RunFacts *run) {
    ActionTime **times = schedule_times(run->program);
    predict_step(run, NULL, times);
    schedule_show_times(run->program, times, "planned", run->options->trace);
    schedule_print(stdout, run->program);
    if (cyclic_turns(run->cyclic)) {
        printf("This is step 0. Micro-batch i of step t is the ((t N + i) modulo (N - j))-th's of "
               "stage j's ranks, all from 0\n");
    }
    schedule_times_free(run->program, times);
}
// Returns the bytes that this rank offloads to the host.
static inline size_t run_host_bytes(const RunFacts *run) {
    return store_host_bytes(run->store) + executor_stash_all(&run->shape, run->model);
}
// Makes all predictions of the startup table, before anything is allocated.
static inline void predict(const RunFacts *run) {
    Prediction *p = run->predicted;
    memset(p, 0, sizeof *p);
    p->parameters = run->model->parameters;
    double *busy =
        (double *)checked_calloc((size_t)run->program->ranks, sizeof(double), "prediction");
    predict_memory(run, run->shape.rows, run->options->recompute == RECOMPUTE_BLOCK, p->memory);
    p->offloaded = run_host_bytes(run);
    p->host = host_bytes("VmRSS:") + p->offloaded + store_scratch_bytes(run->store);
    offload_moves(run->store, &run->program->rank[run->ranks->me % run->program->ranks],
                  executor_stash_bytes(&run->shape, run->model), p->moved);
    p->stored = p->disk = store_disk_bytes(run->store);
    predict_traffic(run, p->traffic);
    p->step_s = predict_step(run, busy, NULL);
    p->idle = p->step_s > 0 ? 1 - busy[run->ranks->me] / p->step_s : 0;
    free(busy);
}

// -------------------------------------------------------------------------------------------------
// Does the run fit into memory?
// Returns how many ranks share this rank's memory: the device's, or else the machine's.
static inline int memory_sharers(const RunFacts *run) {
    return ops_memory_apart() ? run->comm->transport.sharing : run->comm->local_ranks;
}
// Returns the sum of a number over the ranks of this machine. All ranks call it.
static inline double memory_of_host(const RunFacts *run, double mine) {
    Comm *comm = (Comm *)(uintptr_t)run->comm;
    double *all = (double *)checked_calloc((size_t)comm->ranks, sizeof(double), "memory"), sum = 0;
    comm_all_gather_small(comm, &mine, all, sizeof mine);
    for (int r = 0; r < comm->ranks; r++) {
        sum += strcmp(comm->peers[r].place.host, comm->peers[comm->rank].place.host) ? 0 : all[r];
    }
    free(all);
    return sum;
}
// Returns the need of all ranks on this memory, as a multiple of this rank's: ranks of other stages
// need other amounts. All ranks call it.
static inline double memory_shares(const RunFacts *run, double mine) {
    const double sum = memory_of_host(run, mine);
    return ops_memory_apart() ? memory_sharers(run) : sum / fmax(mine, 1);
}
// Returns the bytes that this rank has yet to allocate, with micro-batches of `rows` samples.
// Shorter micro-batches may split a step into several micro-steps, for which the store has another
// layout.
static inline double memory_still_needed(const RunFacts *run, int64_t rows, bool recompute) {
    size_t memory[MEMORY_KINDS];
    const Store *s = run->store;
    ZeroPolicy policy = s->policy;
    if (s->placement->stages == 1 && rows != run->shape.rows) {
        policy.accumulates = (run->options->batch_tokens || run->privacy->on) &&
                             ceil_div(run->most_samples, run->ranks->n) > rows;
    }
    Store planned =
        store_plan(run->model, s->ranks, s->placement, policy, s->dtype, s->wire, s->optimizer);
    RunFacts facts = *run;
    facts.store = &planned;
    predict_memory(&facts, rows, recompute, memory);
    facts.shape.rows = rows;
    const size_t host = ops_memory_apart() ? 0 : run_host_bytes(&facts);
    store_free(&planned);
    return (double)(memory_device(memory) + host - memory_device(memory_taken));
}
// Writes as text which flags make the run fit into `there` bytes. Halves the micro-batch until it
// fits, without and with recomputation.
static inline void memory_advice(const RunFacts *run, double shares, double there, char *text,
                                 size_t bytes) {
    bool given = run->options->recompute == RECOMPUTE_BLOCK;
    size_t n = 0;
    // flat clipping excludes recomputation
    for (int recompute = given; recompute < (run->shape.clip.flat ? 1 : 2); recompute++) {
        int64_t rows = run->shape.rows;
        // --micro-batch is the size for all replicas of a stage
        const int64_t replicas =
            run->store->placement->stages > 1 ? ceil_div(run->options->micro_batch, rows) : 1;
        while (rows && shares * memory_still_needed(run, rows, recompute) > there) { rows /= 2; }
        if (!rows) { continue; }
        n += (size_t)snprintf(text + n, bytes - n, "%s%s", n ? ", or" : "it fits with",
                              recompute && !given ? " --recompute block" : "");
        if (rows < run->shape.rows) {
            n += (size_t)snprintf(text + n, bytes - n, " --micro-batch %" PRId64, rows * replicas);
        }
    }
    if (!n) {
        snprintf(text, bytes,
                 "no --micro-batch fits, nor does --recompute block help: use a smaller --model or "
                 "--seq-len, or fewer ranks on a machine");
    }
}
// Returns whether all ranks fit. The ranks on this memory need `needed` bytes, `shares` times this
// rank's need, of the `there` that are available. All ranks call it and get the same result.
static inline bool memory_look(const RunFacts *run, double *needed, double *shares, double *there) {
    const double mine =
        memory_still_needed(run, run->shape.rows, run->options->recompute == RECOMPUTE_BLOCK);
    *shares = memory_shares(run, mine);
    *needed = *shares * mine;
    *there = ops_memory_apart() ? ops_memory_available() : memory_available();
    return *needed <= *there;
}
static inline bool memory_fits(const RunFacts *run) {
    double needed, shares, there;
    return memory_look(run, &needed, &shares, &there);
}
// Checks the host memory for offloaded states of all ranks of this machine. All ranks call it.
static inline void check_host_memory(const RunFacts *run) {
    const double mine = ops_memory_apart() ? (double)run_host_bytes(run) : 0,
                 needed = memory_of_host(run, mine), there = memory_available();
    if (needed > there) {
        die(EXIT_RESOURCES, "give a larger --device-memory, or fewer ranks on a machine",
            "offloaded states of this machine's ranks need %.2f GiB, %.2f GiB are available",
            needed / 0x1p30, there / 0x1p30);
    }
}
// Checks the disk space for offloaded states of all ranks of this machine; bytes: this rank's
// files. They are allocated before the first step; this check only reports a lack earlier. All
// ranks call it.
static inline void check_disk(const RunFacts *run, int64_t bytes) {
    const char *folder = run->options->offload_dir;
    disk_check_folder(folder);
    const double needed = memory_of_host(run, (double)bytes), there = disk_free(folder);
    if (there >= 0 && needed > there) {
        die(EXIT_RESOURCES,
            "give it a folder with more space, or a larger --host-memory or --device-memory",
            "states of this machine's ranks need %.0f bytes of --offload-dir %s, of which %.0f are "
            "free",
            needed, folder, there);
    }
}
// Ends the program (EXIT_RESOURCES) if this machine's ranks do not fit into its GPUs or its memory.
// Otherwise the kernel would end it in the middle of the run. All ranks call it.
static inline void check_memory(const RunFacts *run) {
    double needed, shares, there;
    char advice[400];
    check_host_memory(run);
    if (memory_look(run, &needed, &shares, &there)) { return; }
    memory_advice(run, shares, there, advice, sizeof advice);
    die(EXIT_RESOURCES, advice, "%d ranks on this %s need %.2f GiB more, %.2f GiB are available",
        memory_sharers(run), ops_memory_apart() ? "GPU" : "machine", needed / 0x1p30,
        there / 0x1p30);
}

// Returns the largest of a number over all ranks. All ranks call it.
static inline double most_of_ranks(const RunFacts *run, double mine) {
    Comm *comm = (Comm *)(uintptr_t)run->comm;
    double *all = (double *)checked_calloc((size_t)comm->ranks, sizeof(double), "budgets"),
           most = mine;
    comm_all_gather_small(comm, &mine, all, sizeof mine);
    for (int r = 0; r < comm->ranks; r++) { most = fmax(most, all[r]); }
    free(all);
    return most;
}
static inline void needs_add(Needs *needs, const Prediction *p) {
    needs->device = fmax(needs->device, (double)memory_device(p->memory));
    if ((double)p->host > needs->host) {
        needs->host = (double)p->host;
        needs->offloaded = p->offloaded;
    }
}
// Ends the program (EXIT_RESOURCES) if a rank needs more than --device-memory or --host-memory,
// after offload.h has planned. The unplanned part of host memory varies a little between runs. All
// ranks call it.
static inline void check_budgets(const RunFacts *run, const Needs *needs) {
    const Options *o = run->options;
    const double device = most_of_ranks(run, needs->device), host = most_of_ranks(run, needs->host);
    const bool planned = o->plan || options_plans(o);
    char hint[200];
    snprintf(hint, sizeof hint, "the smallest that fits is --device-memory %.0f%s", device,
             options_offloads(o) ? "; a smaller --micro-batch or --recompute block takes less"
                                 : " without --offload");
    if (!planned && device > option_size("device-memory", o->device_memory)) {
        die(EXIT_RESOURCES, hint,
            "a rank needs %.0f bytes of its device%s, --device-memory gives %s", device,
            options_offloads(o) ? " with as much on the host as may be" : "", o->device_memory);
    }
    snprintf(hint, sizeof hint, "the smallest that fits is --host-memory %.0fM%s",
             ceil(host / 0x1p20) + 1,
             *o->offload_dir     ? " with all on disk that may be"
             : *o->device_memory ? ", or less with a larger --device-memory, or with --offload-dir"
                                 : "; with --device-memory, or --offload-dir, less lies there");
    if (host > option_size("host-memory", o->host_memory)) {
        die(EXIT_RESOURCES, hint,
            "a rank needs %.0f bytes of the host, %zu of them for offloaded states, --host-memory "
            "gives %s",
            host, needs->offloaded, o->host_memory);
    }
}

// Measures the energy of the CPU packages since energy_meter(), by the counters of Linux's
// powercap, which wrap.
enum { ENERGY_PACKAGES = 64 };
typedef struct {
    const char *folder; // folder of the counters: /sys/class/powercap
    int packages;       // readable packages; 0: the machine reports no energy
    int number[ENERGY_PACKAGES];
    double range[ENERGY_PACKAGES], last[ENERGY_PACKAGES]; // counters in microjoules
    double joules;
} EnergyMeter;

// in microjoules, or NAN
static inline double energy_read(const EnergyMeter *m, int number, const char *name) {
    char path[160];
    snprintf(path, sizeof path, "%s/intel-rapl:%d/%s", m->folder, number, name);
    return file_number(path);
}
static inline EnergyMeter energy_meter(const char *folder) {
    EnergyMeter m;
    memset(&m, 0, sizeof m);
    m.folder = folder;
    for (int i = 0; i < ENERGY_PACKAGES; i++) {
        double now = energy_read(&m, i, "energy_uj"),
               range = energy_read(&m, i, "max_energy_range_uj");
        if (isnan(now)) { continue; }
        m.number[m.packages] = i;
        m.last[m.packages] = now;
        m.range[m.packages++] = isnan(range) ? 0 : range;
    }
    return m;
}
// Returns the joules so far; NAN if the machine reports none. Call it more often than the counters
// wrap (minutes).
static inline double energy_joules(EnergyMeter *m) {
    for (int i = 0; i < m->packages; i++) {
        double now = energy_read(m, m->number[i], "energy_uj"), more = now - m->last[i];
        if (isnan(now)) { continue; }
        m->joules += (more < 0 ? more + m->range[i] : more) * 1e-6;
        m->last[i] = now;
    }
    return m->packages ? m->joules : NAN;
}

// -------------------------------------------------------------------------------------------------
// Progress during training. A terminal shows one line that is redrawn; otherwise a line is printed
// at most once a second.
typedef struct {
    bool terminal, drawn; // drawn: a line is drawn and not ended
    int64_t steps, first; // last step of the run; steps done before it (resumed)
    double ms, shown;     // moving average of a step; time of the last plain line
} ProgressBar;

// Returns whether output goes to a terminal. mpirun gives its ranks a terminal even when its own
// output goes to a file, so mpirun's output is checked too.
static inline bool output_is_terminal(void) {
    char link[64], target[64];
    snprintf(link, sizeof link, "/proc/%d/fd/1", (int)getppid());
    ssize_t n = readlink(link, target, sizeof target - 1);
    return isatty(STDOUT_FILENO) && n > 0 &&
           (!strncmp(target, "/dev/pts/", 9) || !strncmp(target, "/dev/tty", 8));
}

// loss and norm are NAN where they must not be shown.
static inline void progress_step(ProgressBar *bar, int64_t step, double loss, double norm,
                                 double lr, double ms, double tokens_per_s, double mfu) {
    bar->ms = step - bar->first <= 1 ? ms : 0.9 * bar->ms + 0.1 * ms;
    double left = (double)(bar->steps - step) * bar->ms / 1000;
    double now = seconds_now();
    // at most one line a second for short steps; the log has all steps
    bool shown = step == bar->first + 1 || step == bar->steps || now - bar->shown >= 1;
    if (!bar->terminal && !shown) { return; }
    bar->shown = now;
    char private_parts[64] = "";
    if (!bar->terminal) {
        if (isfinite(loss)) {
            snprintf(private_parts, sizeof private_parts, " | loss %8.6f | norm %8.4f", loss, norm);
        }
        printf("step %5" PRId64 "/%" PRId64
               "%s | lr %.2e | %8.2f ms | %7.0f tok/s | %4.1f %% of matmul peak | %.0f s left\n",
               step, bar->steps, private_parts, lr, ms, tokens_per_s, 100 * mfu, left);
        fflush(stdout);
        return;
    }
    if (isfinite(loss)) { snprintf(private_parts, sizeof private_parts, "  loss %.4f", loss); }
    char drawn[31];
    int filled = bar->steps ? (int)(30 * step / bar->steps) : 30;
    for (int i = 0; i < 30; i++) { drawn[i] = i < filled ? '#' : '.'; }
    drawn[30] = 0;
    printf("\r[%s] %" PRId64 "/%" PRId64 "%s  %.0f tok/s  MFU %.0f %%  %d:%02d left \033[K", drawn,
           step, bar->steps, private_parts, tokens_per_s, 100 * mfu, (int)left / 60,
           (int)left % 60);
    bar->drawn = true;
    fflush(stdout);
}
static inline void progress_break(ProgressBar *bar) { // call it before other output
    if (bar->drawn) { printf("\n"); }
    bar->drawn = false;
}

// -------------------------------------------------------------------------------------------------
// Events during training, reported by rank 0 on the terminal and in the log. Values that are not
// finite were not measured or must not be shown.
typedef struct {
    int64_t step;
    double loss, norm, lr, seconds, tokens, mfu, joules; // joules: since the start
    // [samples] windows that the step used; NULL: not to be shown
    const int64_t *windows;
    int64_t samples;
} StepFacts;
static inline void report_step(const StepFacts *f, ProgressBar *bar, Log *log) {
    progress_step(bar, f->step, f->loss, f->norm, f->lr, f->seconds * 1000, f->tokens / f->seconds,
                  f->mfu);
    TextBuffer line = {NULL, 0, 0};
    text_add(&line, "{\"event\":\"step\",\"step\":%" PRId64, f->step);
    json_add_field(&line, "loss", f->loss);
    json_add_field(&line, "grad_norm", f->norm);
    json_add_field(&line, "lr", f->lr);
    json_add_field(&line, "ms", f->seconds * 1000);
    json_add_field(&line, "tokens_per_s", f->tokens / f->seconds);
    json_add_field(&line, "mfu", f->mfu);
    json_add_field(&line, "joules", f->joules);
    if (f->windows) {
        text_add(&line, ",\"samples\":[");
        for (int64_t i = 0; i < f->samples; i++) {
            text_add(&line, "%s%" PRId64, i ? "," : "", f->windows[i]);
        }
        text_add(&line, "]");
    }
    text_add(&line, "}");
    log_line(log, &line);
}

static inline void report_validation(int64_t step, double loss, double bits, double accuracy,
                                     double epsilon, int64_t targets, ProgressBar *bar, Log *log) {
    progress_break(bar);
    printf("step %5" PRId64 " | validation loss %.6f nats/token", step, loss);
    if (isfinite(bits)) { printf(" | %.4f bits/byte", bits); }
    if (isfinite(accuracy)) { printf(" | label accuracy %.4f", accuracy); }
    if (isfinite(epsilon)) { printf(" | epsilon %.4f", epsilon); }
    printf(" | %" PRId64 " tokens\n", targets);
    TextBuffer line = {NULL, 0, 0};
    text_add(&line, "{\"event\":\"val\",\"step\":%" PRId64, step);
    json_add_field(&line, "loss", loss);
    json_add_field(&line, "bits_per_byte", bits);
    json_add_field(&line, "label_accuracy", accuracy);
    json_add_field(&line, "epsilon", epsilon);
    text_add(&line, "}");
    log_line(log, &line);
}

static inline void report_choices(int64_t step, int64_t right, int64_t examples, ProgressBar *bar,
                                  Log *log) {
    double accuracy = (double)right / (double)examples;
    progress_break(bar);
    printf("step %5" PRId64 " | hellaswag accuracy %.4f | %" PRId64 " of %" PRId64 " examples\n",
           step, accuracy, right, examples);
    TextBuffer line = {NULL, 0, 0};
    text_add(&line, "{\"event\":\"hellaswag\",\"step\":%" PRId64, step);
    json_add_field(&line, "accuracy", accuracy);
    text_add(&line, ",\"correct\":%" PRId64 ",\"examples\":%" PRId64 "}", right, examples);
    log_line(log, &line);
}

static inline void report_checkpoint(int64_t step, const char *path, ProgressBar *bar, Log *log) {
    progress_break(bar);
    printf("step %5" PRId64 " | checkpoint %s\n", step, path);
    TextBuffer line = {NULL, 0, 0};
    text_add(&line, "{\"event\":\"checkpoint\",\"step\":%" PRId64 ",\"path\":", step);
    json_add_string(&line, path);
    text_add(&line, "}");
    log_line(log, &line);
}

// Prints a space and a word, quoted for a shell if needed.
static inline void print_shell_word(const char *word) {
    bool plain =
        *word &&
        strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=,:+@%") ==
            strlen(word);
    printf(plain ? " " : " '");
    for (; *word; word++) { printf(*word == '\'' ? "'\\''" : "%c", *word); }
    if (!plain) { printf("'"); }
}

// -------------------------------------------------------------------------------------------------
// Reports of the whole run: at its start, at its end, and after a graceful stop
// Prints the predictions for the delinked model.
static inline void print_later(const Prediction *p) {
    if (!p) { return; }
    printf("delinked   %.1f M parameters, predicted %.1f ms a step; memory of rank 0 from then on, "
           "%.3f MiB of the host at the switch only:\n",
           (double)p->parameters / 1e6, p->step_s * 1000, (double)p->passing / 1048576);
    print_memory(p->memory, p->host, NULL, 0);
    if (p->offloaded) {
        printf("offload    then %.3f MiB of the host are for states; a step moves %.3f MiB to the "
               "device, %.3f MiB to the host\n",
               (double)p->offloaded / 1048576, (double)p->moved[0] / 1048576,
               (double)p->moved[1] / 1048576);
    }
    if (p->stored) {
        printf("offload    then %.3f MiB are on disk; a step reads and writes all of it\n",
               (double)p->stored / 1048576);
    }
}
static inline void print_offload(const RunFacts *run) {
    const Prediction *p = run->predicted;
    const Offload *o = run->store->policy.offload;
    int some = 0;
    if (!o) { return; }
    for (int i = 0; i < run->model->storages; i++) {
        some += o->host[i] && store_holds(run->store, i);
    }
    printf("offload    %.3f MiB of the host are for states of %d of %d storages, updated by the "
           "%s; a step moves %.3f MiB to the device, %.3f MiB to the host\n",
           (double)p->offloaded / 1048576, some, run->model->storages,
           o->cpu_update ? "host" : "device", (double)p->moved[0] / 1048576,
           (double)p->moved[1] / 1048576);
    if (p->stored) {
        printf("offload    %.3f MiB more are on disk, in %s; a step reads and writes all of it, at "
               "%.0f MB/s\n",
               (double)p->stored / 1048576, o->folder, run->rates->disk_bytes_per_s / 1e6);
    }
    if (p->disk > p->stored) {
        printf("offload    %.3f MiB of %s are taken for the blocks' own states\n",
               (double)(p->disk - p->stored) / 1048576, o->folder);
    }
}
static inline void print_zero(const ZeroPolicy *z) {
    printf("ZeRO       stage %d", z->stage);
    if (z->quantized_weights) { printf(", weights in INT8 blocks of %" PRId64, z->weights.block); }
    if (z->partition > 1) { printf(", copies inside partitions of %d ranks", z->partition); }
    if (z->quantized_gradients) {
        printf(", gradients in INT%d blocks of %" PRId64 "%s", z->gradients.bits,
               z->gradients.block, z->feedback ? ", errors fed back" : "");
    }
    printf("\n");
}
// Prints what a user may not expect of these flags.
static inline void print_notes(const RunFacts *run) {
    const Options *o = run->options;
    if (options_ends_shared(o)) {
        printf("note: blocks share to the end: --delink-at %" PRId64
               " is not before --steps %" PRId64 "\n",
               o->delink_at, o->steps);
    }
    if (run->steps > 0 && o->warmup > run->steps) {
        printf("note: --warmup %" PRId64 " is longer than the run: after its %" PRId64
               " steps the learning rate is %.10g, not yet --lr %.10g\n",
               o->warmup, run->steps, options_learning_rate(o, run->steps - 1, run->steps), o->lr);
    }
    if (!*o->val) {
        printf("data       no validation%s: --train is given without --val\n",
               *o->hellaswag ? " but --hellaswag" : "");
    }
    if (o->steps && run->given->at[OPTION_INDEX_val] && !run->given->at[OPTION_INDEX_train]) {
        printf("data       training on the default, %s: --val is given without --train\n",
               o->train);
    }
    if (!o->dry_run && o->steps) {
        printf("data       %" PRId64 " training tokens in %d shards, %" PRId64 " steps\n",
               run->train->tokens, run->train->shard_count, run->steps);
    }
}
static inline void print_start(const RunFacts *run) {
    const Options *o = run->options;
    const GptConfig *c = &run->model->config;
    Prediction *p = run->predicted;
    printf("model      %s: %" PRId64 " layers, %" PRId64 " heads, %" PRId64
           " channels, vocabulary %" PRId64 " (padded %" PRId64 "), %" PRId64
           " positions; %.1f M parameters, %s\n",
           o->model, c->layers, c->heads, c->channels, c->vocab, c->padded_vocab, c->max_seq_len,
           (double)run->model->parameters / 1e6, dtype_name(run->store->dtype));
    if (run->cluster->nodes) {
        printf("placement  %d ranks on %d nodes of --cluster; %.1f GFLOP/s matrix-multiply peak a "
               "rank\n",
               run->ranks->n, run->cluster->nodes, run->rates->flops_per_s / 1e9);
    } else {
        printf("placement  %d ranks on %d nodes, %d threads each, messages by %s; %.1f GFLOP/s "
               "measured matrix-multiply peak a rank\n",
               run->comm->ranks, run->comm->nodes, run->threads, run->comm->transport.name,
               run->rates->flops_per_s / 1e9);
    }
    if (*run->rates->device) {
        printf("device     %s; MFU is the share of %.4g TFLOP/s\n", run->rates->device,
               run->rates->peak_flops_per_s / 1e12);
    }
    print_zero(&run->store->policy);
    printf("step       %" PRId64 " samples of %" PRId64 " tokens; %d micro-steps of up to %" PRId64
           " samples a rank; schedule of %d actions\n",
           run->samples, o->seq_len, run->program->micro_batches, run->shape.rows,
           run->program->rank[run->ranks->me].count);
    printf("predicted  %.1f ms a step; memory of rank 0:\n", p->step_s * 1000);
    print_memory(p->memory, p->host, NULL, 0);
    print_offload(run);
    if (run->ranks->n > 1) {
        printf("predicted  traffic sent by rank 0, a step:\n");
        print_traffic(p->traffic);
    }
    print_later(run->later);
    print_notes(run);
    fflush(stdout);
}

static inline void json_add_offload(TextBuffer *t, size_t bytes, int64_t in, int64_t out,
                                    int64_t disk, int64_t read, int64_t written) {
    text_add(t,
             "{\"bytes\":%zu,\"in\":%" PRId64 ",\"out\":%" PRId64 ",\"disk\":%" PRId64
             ",\"read\":%" PRId64 ",\"written\":%" PRId64 "}",
             bytes, in, out, disk, read, written);
}
static inline void json_add_predicted(Prediction *p, TextBuffer *line) {
    int64_t total[LINK_KINDS];
    traffic_total(p->traffic, total);
    text_add(line, "{\"memory\":");
    json_add_memory(line, p->memory, p->host);
    text_add(line, ",\"traffic\":");
    json_add_traffic(line, p->traffic, total);
    text_add(line, ",\"offload\":");
    json_add_offload(line, p->offloaded, p->moved[0], p->moved[1], p->disk, p->stored, p->stored);
    json_add_field(line, "step_ms", p->step_s * 1000);
    json_add_field(line, "idle", p->idle);
    text_add(line, "}");
}
// Reports that blocks which shared parameters have their own now. Predictions hold from here on.
static inline void report_delink(const RunFacts *run, int64_t step, ProgressBar *bar, Log *log) {
    progress_break(bar);
    printf("step %5" PRId64 " | delinked: each of %" PRId64
           " blocks has its own parameters from here on, %.1f M in all; memory of rank 0:\n",
           step, run->model->config.layers, (double)run->model->parameters / 1e6);
    print_memory(run->predicted->memory, run->predicted->host, NULL, 0);
    TextBuffer line = {NULL, 0, 0};
    text_add(&line,
             "{\"event\":\"delink\",\"step\":%" PRId64 ",\"parameters\":%" PRId64 ",\"predicted\":",
             step, run->model->parameters);
    json_add_predicted(run->predicted, &line);
    text_add(&line, "}");
    log_line(log, &line);
}

static inline void json_add_privacy(Privacy *p, int64_t steps, TextBuffer *line) {
    char text[PRIVACY_JSON_MAX];
    privacy_json(p, steps, text);
    if (p->on) { text_add(line, ",\"privacy\":%s", text); }
}
static inline void json_add_start(const RunFacts *run, TextBuffer *line) {
    text_add(line,
             "{\"event\":\"start\",\"parameters\":%" PRId64
             ",\"ranks\":%d,\"transport\":\"%s\",\"flags\":",
             run->model->parameters, run->ranks->n,
             run->cluster->nodes ? "none" : run->comm->transport.name);
    json_add_flags(line, run->options);
    text_add(line, ",\"device\":");
    json_add_string(line, run->rates->device);
    text_add(line, ",\"matmul\":\"%s\",\"attention\":\"%s\"", ops_products(), ops_attention());
    json_add_field(line, "peak_flops", run->rates->peak_flops_per_s);
    text_add(line, ",\"rates\":{\"flops\":");
    json_add_number(line, run->rates->flops_per_s);
    json_add_field(line, "memory", run->rates->bytes_per_s);
    for (int l = 0; l < LINK_KINDS; l++) {
        json_add_field(line, comm_link_names[l], run->rates->message_bytes_per_s[l]);
    }
    json_add_field(line, "latency", run->rates->message_s[LINK_INTER]);
    text_add(line, "},\"predicted\":");
    json_add_predicted(run->predicted, line);
    if (run->later) {
        text_add(line, ",\"delinked\":{\"parameters\":%" PRId64 ",\"passing\":%zu,\"predicted\":",
                 run->later->parameters, run->later->passing);
        json_add_predicted(run->later, line);
        text_add(line, "}");
    }
    json_add_privacy(run->privacy, run->privacy->allowed, line);
    text_add(line, "}");
}

static inline void print_start_json(const RunFacts *run) { // --dry-run --json
    TextBuffer line = {NULL, 0, 0};
    json_add_start(run, &line);
    printf("%s\n", line.text);
    free(line.text);
}

// Seconds of this run: in steps, of these in waiting for messages, and between steps in reports.
typedef struct {
    double steps_s, waiting_s, report_s;
} Spent;

// Returns the bytes that a step moved to the device (way 0) or to the host (way 1). Parameters move
// in each micro-step, so a private run rounds the number.
static inline int64_t moved_per_step(const RunFacts *run, int way, int64_t steps) {
    const int64_t bytes = run->store->moved[way] / max_i64(steps, 1);
    const bool hides = privacy_hides(run->privacy) && run->store->host[STATE_PARAMETERS].held;
    return hides ? (int64_t)privacy_rounded((double)bytes) : bytes;
}
// Memory, offload and traffic of the log's last event, predicted and measured. per_step: measured
// bytes of a step; total: of all kinds, predicted and measured; host: this process's peak, bytes.
static inline void json_add_end(TextBuffer *line, const RunFacts *run,
                                int64_t per_step[COMM_KINDS][LINK_KINDS],
                                int64_t total[2][LINK_KINDS], int64_t steps, size_t host) {
    Prediction *p = run->predicted;
    const int64_t *stored = run->store->stored, each = max_i64(steps, 1),
                  disk = run->files[0].taken + run->files[1].taken;
    text_add(line, "{\"event\":\"end\",\"memory\":{\"predicted\":");
    json_add_memory(line, p->memory, p->host);
    text_add(line, ",\"measured\":");
    json_add_memory(line, memory_taken, host);
    text_add(line, "},\"offload\":{\"predicted\":");
    json_add_offload(line, p->offloaded, p->moved[0], p->moved[1], p->disk, p->stored, p->stored);
    text_add(line, ",\"measured\":");
    json_add_offload(line, memory_on_host, moved_per_step(run, 0, steps),
                     moved_per_step(run, 1, steps), disk, stored[0] / each, stored[1] / each);
    text_add(line, "},\"traffic\":{\"predicted\":");
    json_add_traffic(line, p->traffic, total[0]);
    text_add(line, ",\"measured\":");
    json_add_traffic(line, per_step, total[1]);
}
// Reports predicted against measured values, on the terminal and in the log, after `steps` steps of
// which the last was `step`.
static inline void report_end(const RunFacts *run, int64_t step, int64_t steps, Spent spent,
                              double energy, ProgressBar *bar, Log *log) {
    Prediction *p = run->predicted;
    const bool hides = privacy_hides(run->privacy);
    int64_t total[2][LINK_KINDS], per_step[COMM_KINDS][LINK_KINDS];
    for (int k = 0; k < COMM_KINDS; k++) {
        for (int l = 0; l < LINK_KINDS; l++) {
            per_step[k][l] = run->comm->bytes[k][l] / max_i64(steps, 1);
            if (hides) { per_step[k][l] = (int64_t)privacy_rounded((double)per_step[k][l]); }
        }
    }
    traffic_total(p->traffic, total[0]);
    traffic_total(per_step, total[1]);
    size_t host = host_bytes("VmHWM:");
    double step_ms = 1000 * spent.steps_s / (double)max_i64(steps, 1),
           idle = steps ? spent.waiting_s / spent.steps_s : 0;
    double overhead = steps ? spent.report_s / spent.steps_s : 0;
    if (hides) {
        step_ms = privacy_rounded(step_ms);
        idle = privacy_rounded(idle);
        overhead = privacy_rounded(overhead);
        energy = (double)NAN;
    }
    if (run->comm->rank) { return; }
    progress_break(bar);
    printf("predicted against measured, rank 0: %.1f ms a step, %.1f ms measured; waiting %.1f %% "
           "of it, %.1f %% measured; memory:\n",
           p->step_s * 1000, step_ms, 100 * p->idle, 100 * idle);
    print_memory(p->memory, p->host, memory_taken, (double)host);
    if (run->comm->ranks > 1) {
        printf("traffic a step, measured:\n");
        print_traffic(per_step);
    }
    if (p->offloaded) { print_bytes("offloaded", (double)p->offloaded, (double)memory_on_host); }
    TextBuffer line = {NULL, 0, 0};
    json_add_end(&line, run, per_step, total, steps, host);
    text_add(&line, "},\"step_ms\":{\"predicted\":");
    json_add_number(&line, p->step_s * 1000);
    json_add_field(&line, "measured", step_ms);
    text_add(&line, "},\"idle\":{\"predicted\":");
    json_add_number(&line, p->idle);
    json_add_field(&line, "measured", idle);
    text_add(&line, "}");
    json_add_field(&line, "overhead", overhead);
    json_add_field(&line, "energy_j", energy);
    json_add_privacy(run->privacy, step, &line);
    text_add(&line, "}");
    log_line(log, &line);
}

static inline void report_resumed(const char *path, int64_t step, int64_t steps) {
    printf("resumed from %s: step %" PRId64 "\n", path, step);
    if (steps && steps < step) {
        printf("note: it has more than the run's %" PRId64 " steps: nothing is trained\n", steps);
    }
}
// Prints the command that resumes the run after a graceful stop. resumes: argv has --resume
// already.
static inline void print_resume_command(int64_t step, int ranks, int argc, char **argv,
                                        bool resumes) {
    printf("stopped at step %" PRId64 ". To go on: mpirun -np %d", step, ranks);
    for (int i = 0; i < argc; i++) {
        if (!strcmp(argv[i], "--dp-key")) { // kept in OUT/dp_key
            i++;
            continue;
        }
        if (!strncmp(argv[i], "--dp-key=", 9)) { continue; }
        print_shell_word(argv[i]);
    }
    printf("%s\n", resumes ? "" : " --resume 1");
}

#endif
