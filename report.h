// report.h: the numbers the program always tells. Predictions before anything is allocated, progress in the loop, predicted
// against measured at the end; for people on the terminal, and as JSON lines for programs (names in docs/formats.md).
//
// Predictions are sums over the action list: memory from the layouts that will be carved, traffic from what each PREFETCH and REDUCE
// will send, time from the simulator with the rates measured at start. Rank 0 speaks.
#ifndef REPORT_H
#define REPORT_H

#include "checkpoint.h" // TextBuffer
#include "executor.h"   // what is predicted
#include "options.h"    // the flags in the log header

// ---------------------------------------------------------------------------------------------------------------------
// JSON
typedef struct {
    FILE *file;  // NULL: no log
    bool failed; // a write failed (disk full): warned once, training goes on
} Log;

static inline void json_add_number(TextBuffer *t, double x) { // full precision; JSON has no infinities
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
static inline void json_add_string(TextBuffer *t, const char *s) {
    text_add(t, "\"");
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\') {
            text_add(t, "\\%c", c);
        } else if (c < 32) {
            text_add(t, "\\u%04x", c);
        } else {
            text_add(t, "%c", c);
        }
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

// A new run starts a new file; a resumed one adds to it, after what a kill may have left of its last line.
static inline Log log_open(const char *path, bool resumed) {
    Log log = {NULL, false};
    if (!*path) { return log; }
    log.file = fopen(path, resumed ? "ab+" : "wb");
    if (!log.file) { die(EXIT_INPUT, "--log names a file that can be written", "cannot write %s: %s", path, strerror(errno)); }
    if (resumed && !fseek(log.file, -1, SEEK_END) && fgetc(log.file) != '\n') { fseek(log.file, 0, SEEK_END), fputc('\n', log.file); }
    return log;
}
// Writes one line and frees it.
static inline void log_line(Log *log, TextBuffer *t) {
    if (log->file) {
        bool bad = fprintf(log->file, "%s\n", t->text) < 0 || fflush(log->file);
        if (bad && !log->failed) { fprintf(stderr, "warning: cannot write the log: %s; training goes on\n", strerror(errno)); }
        log->failed |= bad;
    }
    free(t->text);
    memset(t, 0, sizeof *t);
}

// ---------------------------------------------------------------------------------------------------------------------
// Rates that predicted times refer to: of this machine, measured at start with all ranks at work, or of --cluster (what it does not tell
// is measured here)
typedef struct {
    double flops_per_s;                     // matrix products of this rank, its threads
    double bytes_per_s;                     // streaming memory
    double message_bytes_per_s[LINK_KINDS]; // that a rank sends inside its node, and to other nodes, while all others do the same
    double peak_flops_per_s;                // what MFU refers to: the same, or what the device's maker states
    const char *device;                     // its name; "": the processor
    double message_s[LINK_KINDS];           // latency
    double half_tokens;                     // in a micro-step, at which products reach half of their rate
    double lost;                            // share of a message's time that its rank cannot compute in
} Rates;

static inline double measure_products(Stream *s, int64_t N) { // of matrices (N, N)
    size_t bytes = (size_t)(N * N) * ops_real_bytes();
    Real *a = (Real *)ops_alloc(bytes), *b = (Real *)ops_alloc(bytes), *c = (Real *)ops_alloc(bytes);
    if (!a || !b || !c) { die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", bytes); }
    double best = 0, start = seconds_now();
    for (int unbeaten = 0; unbeaten < 4 && seconds_now() - start < 0.5; unbeaten++) { // a busy machine takes longer to show its best
        double t = seconds_now();
        ops_matmul_forward(s, c, NULL, a, b, NULL, N, N, N);
        ops_wait(s);
        double rate = 2.0 * (double)(N * N * N) / (seconds_now() - t);
        if (rate > best) { best = rate, unbeaten = 0; }
    }
    ops_free(a), ops_free(b), ops_free(c);
    return best;
}
static inline double measure_flops(Stream *s) { // by products that take a few milliseconds: large ones where the device is fast
    int64_t N = 1024;
    double best = measure_products(s, N);
    for (; N < 8192 && 2.0 * (double)(N * N * N) / best < 0.002; best = measure_products(s, N)) { N *= 2; }
    return best;
}
static inline double measure_bytes(Stream *s) {
    size_t bytes = (size_t)16 << 20;
    char *a = (char *)ops_alloc(bytes), *b = (char *)ops_alloc(bytes);
    if (!a || !b) { die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", bytes); }
    double best = 0;
    for (int i = 0; i < 4; i++) {
        double t = seconds_now();
        ops_copy(s, b, a, bytes);
        ops_wait(s);
        best = fmax(best, 2.0 * (double)bytes / (seconds_now() - t));
    }
    ops_free(a), ops_free(b);
    return best;
}
// Seconds of a sum of n elements over the group, the best of a few, while other groups do the same: ranks share links.
static inline double measure_sum(Stream *s, Comm *comm, const Group *group, float *data, int64_t n, int64_t sent[LINK_KINDS]) {
    int64_t *bounds = (int64_t *)checked_malloc(((size_t)group->n + 1) * sizeof(int64_t), "bounds");
    double best = INFINITY;
    for (int i = 0; i <= group->n; i++) { bounds[i] = part_begin(n, group->n, i); }
    comm_bytes_sent(COMM_ALL_REDUCE, group, group->me, bounds, 4, sent);
    for (int i = 0; i < 3; i++) {
        comm_barrier(comm);
        double t = seconds_now();
        comm_wait(comm, comm_all_reduce(comm, group, data, bounds, DTYPE_FP32));
        ops_wait(s);
        comm_barrier(comm);
        best = fmin(best, seconds_now() - t);
    }
    free(bounds);
    return best;
}
// Messages of a link, by sums over a group that goes over it: short ones show the latency of their two phases, longer ones the rate.
static inline void measure_messages(Rates *rates, CommLink link, Stream *s, Comm *comm, const Group *group, int64_t n) {
    const int64_t few = 1 << 10;
    int64_t sent[LINK_KINDS] = {0, 0}, ignored[LINK_KINDS] = {0, 0};
    rates->message_bytes_per_s[link] = INFINITY, rates->message_s[link] = 0;
    if (group->n == 1) { return; }
    float *data = (float *)ops_alloc((size_t)n * 4);
    if (!data) { die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", (size_t)n * 4); }
    double shorter = measure_sum(s, comm, group, data, few, ignored), longer = measure_sum(s, comm, group, data, n, sent);
    rates->message_s[link] = fmin(shorter, longer / 2) / 2;
    rates->message_bytes_per_s[link] = (double)(sent[LINK_INTRA] + sent[LINK_INTER]) / (longer - fmin(shorter, longer / 2));
    comm_reset_counters(comm);
    ops_free(data);
}

// The kernel's record of this process's memory begins anew: buffers of measurements do not belong to the run. Failing is harmless.
static inline void forget_peak_memory(void) {
    FILE *f = fopen("/proc/self/clear_refs", "w");
    if (f) { fputs("5", f), fclose(f); }
}
static inline void measure_rates(Rates *rates, Stream *s, Comm *comm, const ZeroGroups *groups, DType dtype) {
    comm_barrier(comm);
    rates->flops_per_s = measure_flops(s);
    rates->bytes_per_s = measure_bytes(s);
    const Group *all = groups->all, *between = groups->across.n > 1 ? &groups->across : &groups->node;
    measure_messages(rates, LINK_INTRA, s, comm, &groups->node, 1 << 20);
    rates->message_bytes_per_s[LINK_INTER] = INFINITY;
    if (group_link(all, 0, all->n - 1) == LINK_INTER) { measure_messages(rates, LINK_INTER, s, comm, between, 1 << 18); } // may be a slow link
    rates->device = ops_device(&rates->peak_flops_per_s);
    if (dtype != DTYPE_BF16 || rates->peak_flops_per_s == 0) { rates->peak_flops_per_s = rates->flops_per_s; }
    forget_peak_memory();
}
static inline void cluster_rates(Rates *rates, const Cluster *c, Stream *s) {
    rates->flops_per_s = rates->peak_flops_per_s = c->tflops > 0 ? c->tflops * 1e12 : measure_flops(s);
    rates->bytes_per_s = c->memory > 0 ? c->memory * 1e9 : measure_bytes(s);
    rates->message_bytes_per_s[LINK_INTRA] = c->intra * 1e9, rates->message_bytes_per_s[LINK_INTER] = c->inter * 1e9 / c->ranks;
    rates->message_s[LINK_INTRA] = rates->message_s[LINK_INTER] = c->latency * 1e-6, rates->half_tokens = c->half, rates->lost = 1 - c->overlap;
    rates->device = "";
}
static inline void find_rates(Rates *rates, const Cluster *cluster, Stream *s, Comm *comm, const ZeroGroups *groups, DType dtype) {
    memset(rates, 0, sizeof *rates);
    if (cluster->nodes) {
        cluster_rates(rates, cluster, s);
    } else {
        measure_rates(rates, s, comm, groups, dtype);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Predictions
typedef struct {
    size_t memory[MEMORY_KINDS], host; // host: resident bytes of the process besides these
    int64_t traffic[COMM_KINDS][LINK_KINDS];
    double step_s, idle; // idle: share of the step in which this rank waits
} Prediction;

// What predictions and reports of a run are about.
typedef struct {
    const Options *options;
    const GptModel *model;
    const Comm *comm;
    const Cluster *cluster; // 0 x 0: the run's own ranks
    const Group *ranks;     // of the run, or of the cluster: predictions are for them, seen from their member `me`
    const Program *program;
    const Rates *rates;
    Prediction *predicted;
    const Dataset *train;
    const Store *store; // planned
    int threads;
    int64_t samples, most_samples, steps; // of a step, as expected and at most; of the run
    ExecutorShape shape;                  // of micro-steps
    Privacy *privacy;
} RunFacts;

// Bytes of each kind on this rank, with micro-batches of `rows` samples.
static inline void predict_memory(const RunFacts *run, int64_t rows, bool recompute, size_t memory[MEMORY_KINDS]) {
    ExecutorShape shape = run->shape;
    shape.rows = rows, shape.recompute = recompute;
    Executor counted = executor_plan(run->model, shape, &memory[MEMORY_ACTIVATIONS], &memory[MEMORY_BUFFERS]);
    executor_free(&counted);
    memory[MEMORY_PARAMETERS] = memory[MEMORY_GRADIENTS] = memory[MEMORY_OPTIMIZER] = 0;
    store_predict(run->store, memory);
    memory[MEMORY_BUFFERS] += memory_taken[MEMORY_BUFFERS] + executor_workspace_bytes(run->model, &shape, run->threads); // what messages take was taken first
}

// What an action of a storage sends; returns how many messages.
static inline int action_messages(const Store *store, const Action *a, ZeroMessage m[2]) {
    if (a->kind == ACT_REDUCE) { return store_reduce_messages(store, a->storage, m); }
    m[0] = store_gather_message(store, a->storage, a->near);
    return a->kind == ACT_PREFETCH;
}
// Traffic of one step: what each PREFETCH and REDUCE of this rank's schedule will send.
static inline void predict_traffic(const Schedule *schedule, const Store *store, int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    for (int i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        ZeroMessage m[2];
        for (int k = a->storage >= 0 ? action_messages(store, a, m) - 1 : -1; k >= 0; k--) {
            comm_bytes_sent(m[k].kind, m[k].group, m[k].group->me, m[k].bounds, m[k].element_bytes, traffic[m[k].kind]);
        }
    }
}

// Costs of one action for the simulator.
typedef struct {
    const GptModel *model;
    const Store *store;
    Rates rates;
    double T;
    ClipPolicy clip;
} Costs;
// A PREFETCH or REDUCE of this rank: its messages, level by level, and what is made into records and from them.
static inline ActionCost message_cost(const Costs *c, const Action *a) { // of this rank: it stands for all
    ZeroMessage m[2];
    ActionCost cost = {store_coding_bytes(c->store, a->storage, a->kind == ACT_REDUCE, a->near) / c->rates.bytes_per_s, 0};
    for (int k = action_messages(c->store, a, m) - 1; k >= 0; k--) {
        const Group *g = m[k].group;
        int64_t sent[LINK_KINDS] = {0, 0};
        comm_bytes_sent(m[k].kind, g, g->me, m[k].bounds, m[k].element_bytes, sent);
        for (int l = 0; l < LINK_KINDS; l++) { cost.message_s += (double)sent[l] / c->rates.message_bytes_per_s[l]; }
        bool spans = group_link(g, 0, g->n - 1) == LINK_INTER, inside = g->n > 1 && (g->nodes > 1 || !spans);
        cost.message_s += (spans ? c->rates.message_s[LINK_INTER] : 0) + (inside ? c->rates.message_s[LINK_INTRA] : 0);
    }
    cost.compute_s += c->rates.lost * cost.message_s;
    return cost;
}
static inline ActionCost action_cost(const void *context, int rank, const Action *a) {
    const Costs *c = (const Costs *)context;
    (void)rank;
    double tokens = (double)a->rows * c->T, C = (double)c->model->config.channels, ranks = c->store->groups.all->n;
    double elements = a->storage >= 0 ? (double)gpt_storage_elements(c->model, a->storage) : 0;
    bool head = a->unit == c->model->units - 1, block = a->unit > 0 && !head;
    double products_per_s = c->rates.flops_per_s * tokens / (tokens + c->rates.half_tokens);
    double product = block ? gpt_block_forward_flops(c->model, tokens, c->T) / products_per_s : 0;
    double classifier = head ? gpt_head_forward_flops(c->model, tokens) / products_per_s : 0;
    double pass = tokens * C * 4 / c->rates.bytes_per_s; // one pass over a (N, C) tensor
    double norms = a->unit >= 0 ? clip_norm_flops(&c->clip, c->model, a->unit, (double)a->rows, c->T) / products_per_s : 0;
    double tied = c->clip.on ? gpt_head_forward_flops(c->model, tokens) / products_per_s : 0; // the gradient of wte is made with the embedding's
    ActionCost cost = {0, 0};
    switch (a->kind) {
    case ACT_FORWARD:
    case ACT_RECOMPUTE: cost.compute_s = product + (block ? 20 : 2) * pass; break;
    case ACT_BACKWARD_INPUT: cost.compute_s = product + (c->clip.on ? 2 : 3) * classifier + (c->clip.flat ? norms : 0) + (block ? 20 : 6) * pass; break;
    case ACT_BACKWARD_WEIGHT: cost.compute_s = product + (a->unit ? 0 : tied) + (c->clip.flat ? 0 : norms) + 4 * pass; break;
    case ACT_CLIP: cost.compute_s = norms; break;
    case ACT_PREFETCH:
    case ACT_REDUCE: return message_cost(c, a);
    case ACT_ACQUIRE:
        cost.compute_s = store_converts(c->store->dtype) ? elements * (double)(dtype_size(c->store->dtype) + ops_real_bytes()) / c->rates.bytes_per_s : 0;
        break;
    case ACT_NORM: cost.compute_s = (double)c->model->parameters * (c->clip.on ? 12 : 4) / ranks / c->rates.bytes_per_s; break; // with its noise
    case ACT_UPDATE: cost.compute_s = elements * (c->store->adam ? 28 : 20) / ranks / c->rates.bytes_per_s; break;
    default: break;
    }
    return cost;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tables and JSON of memory and traffic
static inline size_t memory_device(const size_t memory[MEMORY_KINDS]) {
    size_t sum = 0;
    for (int k = 0; k < MEMORY_KINDS; k++) { sum += memory[k]; }
    return sum;
}
static inline void json_add_memory(TextBuffer *t, const size_t memory[MEMORY_KINDS], size_t host) {
    text_add(t, "{");
    for (int k = 0; k < MEMORY_KINDS; k++) { text_add(t, "\"%s\":%zu,", memory_names[k], memory[k]); }
    text_add(t, "\"device\":%zu,\"host\":%zu}", memory_device(memory), host);
}
static inline void json_add_traffic(TextBuffer *t, int64_t traffic[COMM_KINDS][LINK_KINDS], const int64_t total[LINK_KINDS]) {
    text_add(t, "{");
    for (int l = 0; l < LINK_KINDS; l++) {
        text_add(t, "\"%s\":{", comm_link_names[l]);
        for (int k = 0; k < COMM_KINDS; k++) { text_add(t, "%s\"%s\":%" PRId64, k ? "," : "", comm_kind_names[k], traffic[k][l]); }
        text_add(t, "},");
    }
    text_add(t, "\"total\":{\"intra\":%" PRId64 ",\"inter\":%" PRId64 "}}", total[0], total[1]);
}
static inline void traffic_total(int64_t traffic[COMM_KINDS][LINK_KINDS], int64_t total[LINK_KINDS]) {
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
static inline void print_memory(const size_t predicted[MEMORY_KINDS], size_t host, const size_t *measured, double measured_host) {
    for (int k = 0; k < MEMORY_KINDS; k++) { print_bytes(memory_names[k], (double)predicted[k], measured ? (double)measured[k] : -1); }
    print_bytes("device", (double)memory_device(predicted), measured ? (double)memory_device(measured) : -1);
    print_bytes("host", (double)host, measured ? measured_host : -1);
}
static inline void print_traffic(int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    for (int k = 0; k < COMM_KINDS; k++) {
        if (traffic[k][0] + traffic[k][1]) {
            printf("  %-14s %12.3f MiB inside a node, %12.3f MiB between nodes\n", comm_kind_names[k], (double)traffic[k][0] / 1048576,
                   (double)traffic[k][1] / 1048576);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What the operating system knows

// The number in a line such as "VmHWM: 12 kB" of one of the kernel's tables; 0 where there is none.
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
static inline double kernel_bytes(const char *path, const char *field) { return 1024 * kernel_number(path, field); } // of one in kB
// Bytes of this process (VmRSS: now, VmHWM: at its peak) besides what it took as device memory.
static inline size_t host_bytes(const char *field) {
    size_t all = (size_t)kernel_bytes("/proc/self/status", field), device = ops_memory_apart() ? 0 : memory_device(memory_taken);
    return all > device ? all - device : 0;
}
static inline double file_number(const char *path) { // its first number; NAN where there is none
    double value = NAN;
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%lf", &value) != 1) { value = NAN; }
    if (f) { fclose(f); }
    return value;
}
// Bytes that the control group with its files in `folder` still allows; INFINITY where it sets no limit. Its usage counts file
// pages that nobody used lately, which the kernel gives up before it refuses anything: they are available.
static inline double memory_group_available(const char *folder) {
    static const char *const versions[][3] = {{"memory.max", "memory.current", "inactive_file "},
                                              {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "}};
    double bytes = INFINITY;
    for (int i = 0; i < 2; i++) {
        char limit[1100], usage[1100], table[1100];
        snprintf(limit, sizeof limit, "%s/%s", folder, versions[i][0]), snprintf(usage, sizeof usage, "%s/%s", folder, versions[i][1]);
        snprintf(table, sizeof table, "%s/memory.stat", folder);
        bytes = fmin(bytes, file_number(limit) - file_number(usage) + kernel_number(table, versions[i][2])); // fmin passes over a NAN
    }
    return bytes;
}
// Bytes that this machine, or the container or group this process is in, still has; INFINITY where nothing tells.
static inline double memory_available(void) {
    double machine = kernel_bytes("/proc/meminfo", "MemAvailable:") + kernel_bytes("/proc/meminfo", "SwapFree:"), bytes = machine > 0 ? machine : INFINITY;
    bytes = fmin(bytes, fmin(memory_group_available("/sys/fs/cgroup"), memory_group_available("/sys/fs/cgroup/memory")));
    char line[512];
    FILE *f = fopen("/proc/self/cgroup", "r"); // lines such as "4:memory:/path" and "0::/path"
    while (f && fgets(line, sizeof line, f)) {
        char *kind = strchr(line, ':'), *path = kind ? strchr(kind + 1, ':') : NULL, folder[1024];
        if (!path || (strncmp(kind, "::", 2) && strncmp(kind, ":memory:", 8))) { continue; }
        snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%.*s", path == kind + 1 ? "" : "/memory", (int)strcspn(path + 1, "\n"), path + 1);
        bytes = fmin(bytes, memory_group_available(folder));
    }
    if (f) { fclose(f); }
    return bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// All of it

// Everything the startup table says, before anything of it is allocated.
static inline void predict(const RunFacts *run) {
    Prediction *p = run->predicted;
    Costs costs = {run->model, run->store, *run->rates, (double)run->options->seq_len, run->shape.clip};
    double *busy = (double *)checked_calloc((size_t)run->program->ranks, sizeof(double), "prediction");
    predict_memory(run, run->shape.rows, run->options->recompute == RECOMPUTE_BLOCK, p->memory);
    p->host = host_bytes("VmRSS:");
    predict_traffic(&run->program->rank[run->ranks->me], run->store, p->traffic);
    p->step_s = schedule_simulate(run->program, action_cost, &costs, busy);
    p->idle = p->step_s > 0 ? 1 - busy[run->ranks->me] / p->step_s : 0;
    free(busy);
}

// ---------------------------------------------------------------------------------------------------------------------
// Does it fit?
static inline int memory_sharers(const RunFacts *run) { return ops_memory_apart() ? run->comm->transport.sharing : run->comm->local_ranks; }
// By all ranks on this memory, with micro-batches of `rows` samples: shorter ones may make micro-steps of a step, for which the store has
// another layout.
static inline double memory_still_needed(const RunFacts *run, int64_t rows, bool recompute) {
    size_t memory[MEMORY_KINDS];
    const Store *s = run->store;
    ZeroPolicy policy = s->policy;
    policy.accumulates = (run->options->batch_tokens || run->privacy->on) && ceil_div(run->most_samples, run->ranks->n) > rows;
    Store planned = store_plan(run->model, s->groups.all, policy, s->dtype, s->wire, s->adam);
    RunFacts facts = *run;
    facts.store = &planned;
    predict_memory(&facts, rows, recompute, memory);
    store_free(&planned);
    return (double)(memory_device(memory) - memory_device(memory_taken)) * memory_sharers(run);
}
// Which flags would make the run fit into `there` bytes, as text: the micro-batch halved until it does, without and with recomputation.
static inline void memory_advice(const RunFacts *run, double there, char *text, size_t bytes) {
    bool given = run->options->recompute == RECOMPUTE_BLOCK;
    size_t n = 0;
    for (int recompute = given; recompute < (run->shape.clip.flat ? 1 : 2); recompute++) { // flat clipping goes without
        int64_t rows = run->shape.rows;
        while (rows && memory_still_needed(run, rows, recompute) > there) { rows /= 2; }
        if (!rows) { continue; }
        n += (size_t)snprintf(text + n, bytes - n, "%s%s", n ? ", or" : "it fits with", recompute && !given ? " --recompute block" : "");
        if (rows < run->shape.rows) { n += (size_t)snprintf(text + n, bytes - n, " --micro-batch %" PRId64, rows); }
    }
    if (!n) {
        snprintf(text, bytes, "no --micro-batch fits, nor does --recompute block help: use a smaller --model or --seq-len, or fewer ranks on a machine");
    }
}
// Ends the program where this machine's ranks do not fit into its GPUs, or into itself: better now than by the kernel, in the middle.
static inline void check_memory(const RunFacts *run) {
    double needed = memory_still_needed(run, run->shape.rows, run->options->recompute == RECOMPUTE_BLOCK);
    double there = ops_memory_apart() ? ops_memory_available() : memory_available();
    if (needed <= there) { return; }
    char advice[400];
    memory_advice(run, there, advice, sizeof advice);
    die(EXIT_RESOURCES, advice, "%d ranks on this %s need %.2f GiB more, %.2f GiB are available", memory_sharers(run), ops_memory_apart() ? "GPU" : "machine",
        needed / 0x1p30, there / 0x1p30);
}

// Energy of the processor packages since the meter was made, from the counters of Linux's powercap; they wrap.
enum { ENERGY_PACKAGES = 64 };
typedef struct {
    const char *folder; // where the counters are: /sys/class/powercap
    int packages;       // that can be read; 0: the machine does not tell
    int number[ENERGY_PACKAGES];
    double range[ENERGY_PACKAGES], last[ENERGY_PACKAGES]; // in microjoules
    double joules;
} EnergyMeter;

static inline double energy_read(const EnergyMeter *m, int number, const char *name) { // microjoules, or NAN
    char path[160];
    snprintf(path, sizeof path, "%s/intel-rapl:%d/%s", m->folder, number, name);
    return file_number(path);
}
static inline EnergyMeter energy_meter(const char *folder) {
    EnergyMeter m;
    memset(&m, 0, sizeof m);
    m.folder = folder;
    for (int i = 0; i < ENERGY_PACKAGES; i++) {
        double now = energy_read(&m, i, "energy_uj"), range = energy_read(&m, i, "max_energy_range_uj");
        if (isnan(now)) { continue; }
        m.number[m.packages] = i, m.last[m.packages] = now, m.range[m.packages++] = isnan(range) ? 0 : range;
    }
    return m;
}
// Joules so far; NAN where the machine does not tell. To be called more often than the counters wrap (minutes).
static inline double energy_joules(EnergyMeter *m) {
    for (int i = 0; i < m->packages; i++) {
        double now = energy_read(m, m->number[i], "energy_uj"), more = now - m->last[i];
        if (isnan(now)) { continue; }
        m->joules += (more < 0 ? more + m->range[i] : more) * 1e-6, m->last[i] = now;
    }
    return m->packages ? m->joules : NAN;
}

// ---------------------------------------------------------------------------------------------------------------------
// Progress in the loop: on a terminal one line that is drawn again, otherwise at most one line a second
typedef struct {
    bool terminal, drawn; // a line is drawn and not ended
    int64_t steps, first; // of the run; done before it (resumed)
    double ms, shown;     // moving average; when a plain line was printed last
} ProgressBar;

// mpirun gives its ranks a terminal of their own even when its output goes into a file, so its own output counts too.
static inline bool output_is_terminal(void) {
    char link[64], target[64];
    snprintf(link, sizeof link, "/proc/%d/fd/1", (int)getppid());
    ssize_t n = readlink(link, target, sizeof target - 1);
    return isatty(STDOUT_FILENO) && n > 0 && (!strncmp(target, "/dev/pts/", 9) || !strncmp(target, "/dev/tty", 8));
}

// NAN for a loss and a norm that are nobody's business.
static inline void progress_step(ProgressBar *bar, int64_t step, double loss, double norm, double lr, double ms, double tokens_per_s, double mfu) {
    bar->ms = step - bar->first <= 1 ? ms : 0.9 * bar->ms + 0.1 * ms;
    double left = (double)(bar->steps - step) * bar->ms / 1000;
    double now = seconds_now();
    bool shown = step == bar->first + 1 || step == bar->steps || now - bar->shown >= 1; // short steps: a line a second; the log has all
    if (!bar->terminal && !shown) { return; }
    bar->shown = now;
    char private_parts[64] = "";
    if (!bar->terminal) {
        if (isfinite(loss)) { snprintf(private_parts, sizeof private_parts, " | loss %8.6f | norm %8.4f", loss, norm); }
        printf("step %5" PRId64 "/%" PRId64 "%s | lr %.2e | %8.2f ms | %7.0f tok/s | %4.1f %% of matmul peak | %.0f s left\n", step, bar->steps, private_parts,
               lr, ms, tokens_per_s, 100 * mfu, left);
        fflush(stdout);
        return;
    }
    if (isfinite(loss)) { snprintf(private_parts, sizeof private_parts, "  loss %.4f", loss); }
    char drawn[31];
    int filled = bar->steps ? (int)(30 * step / bar->steps) : 30;
    for (int i = 0; i < 30; i++) { drawn[i] = i < filled ? '#' : '.'; }
    drawn[30] = 0;
    printf("\r[%s] %" PRId64 "/%" PRId64 "%s  %.0f tok/s  MFU %.0f %%  %d:%02d left \033[K", drawn, step, bar->steps, private_parts, tokens_per_s, 100 * mfu,
           (int)left / 60, (int)left % 60);
    bar->drawn = true;
    fflush(stdout);
}
static inline void progress_break(ProgressBar *bar) { // before other text
    if (bar->drawn) { printf("\n"); }
    bar->drawn = false;
}

// ---------------------------------------------------------------------------------------------------------------------
// Events in the loop, of rank 0: on the terminal and in the log. What is not finite was not measured, or is not to be told.
typedef struct {
    int64_t step;
    double loss, norm, lr, seconds, tokens, mfu, joules; // joules: since the start
    const int64_t *windows;                              // [samples] that the step took; NULL: not to be told
    int64_t samples;
} StepFacts;
static inline void report_step(const StepFacts *f, ProgressBar *bar, Log *log) {
    progress_step(bar, f->step, f->loss, f->norm, f->lr, f->seconds * 1000, f->tokens / f->seconds, f->mfu);
    TextBuffer line = {NULL, 0, 0};
    text_add(&line, "{\"event\":\"step\",\"step\":%" PRId64, f->step);
    json_add_field(&line, "loss", f->loss), json_add_field(&line, "grad_norm", f->norm), json_add_field(&line, "lr", f->lr);
    json_add_field(&line, "ms", f->seconds * 1000), json_add_field(&line, "tokens_per_s", f->tokens / f->seconds), json_add_field(&line, "mfu", f->mfu);
    json_add_field(&line, "joules", f->joules);
    if (f->windows) {
        text_add(&line, ",\"samples\":[");
        for (int64_t i = 0; i < f->samples; i++) { text_add(&line, "%s%" PRId64, i ? "," : "", f->windows[i]); }
        text_add(&line, "]");
    }
    text_add(&line, "}");
    log_line(log, &line);
}

static inline void report_validation(int64_t step, double loss, double bits, double accuracy, double epsilon, int64_t targets, ProgressBar *bar, Log *log) {
    progress_break(bar);
    printf("step %5" PRId64 " | validation loss %.6f nats/token", step, loss);
    if (isfinite(bits)) { printf(" | %.4f bits/byte", bits); }
    if (isfinite(accuracy)) { printf(" | label accuracy %.4f", accuracy); }
    if (isfinite(epsilon)) { printf(" | epsilon %.4f", epsilon); }
    printf(" | %" PRId64 " tokens\n", targets);
    TextBuffer line = {NULL, 0, 0};
    text_add(&line, "{\"event\":\"val\",\"step\":%" PRId64, step);
    json_add_field(&line, "loss", loss), json_add_field(&line, "bits_per_byte", bits), json_add_field(&line, "label_accuracy", accuracy);
    json_add_field(&line, "epsilon", epsilon);
    text_add(&line, "}");
    log_line(log, &line);
}

static inline void report_choices(int64_t step, int64_t right, int64_t examples, ProgressBar *bar, Log *log) {
    double accuracy = (double)right / (double)examples;
    progress_break(bar);
    printf("step %5" PRId64 " | hellaswag accuracy %.4f | %" PRId64 " of %" PRId64 " examples\n", step, accuracy, right, examples);
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

// One word as a shell reads it.
static inline void print_shell_word(const char *word) {
    bool plain = *word && strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=,:+@%") == strlen(word);
    printf(plain ? " " : " '");
    for (; *word; word++) { printf(*word == '\'' ? "'\\''" : "%c", *word); }
    if (!plain) { printf("'"); }
}

// ---------------------------------------------------------------------------------------------------------------------
// Reports of the whole run: at its start, at its end, and after a graceful stop
static inline void print_start(const RunFacts *run) {
    const Options *o = run->options;
    const GptConfig *c = &run->model->config;
    Prediction *p = run->predicted;
    printf("model      %s: %" PRId64 " layers, %" PRId64 " heads, %" PRId64 " channels, vocabulary %" PRId64 " (padded %" PRId64 "), %" PRId64
           " positions; %.1f M parameters, %s\n",
           o->model, c->layers, c->heads, c->channels, c->vocab, c->padded_vocab, c->max_seq_len, (double)run->model->parameters / 1e6,
           dtype_name(run->store->dtype));
    if (run->cluster->nodes) {
        printf("placement  %d ranks on %d nodes of --cluster; %.1f GFLOP/s matrix-multiply peak a rank\n", run->ranks->n, run->cluster->nodes,
               run->rates->flops_per_s / 1e9);
    } else {
        printf("placement  %d ranks on %d nodes, %d threads each, messages by %s; %.1f GFLOP/s measured matrix-multiply peak a rank\n", run->comm->ranks,
               run->comm->nodes, run->threads, run->comm->transport.name, run->rates->flops_per_s / 1e9);
    }
    if (*run->rates->device) { printf("device     %s; MFU is the share of %.4g TFLOP/s\n", run->rates->device, run->rates->peak_flops_per_s / 1e12); }
    const ZeroPolicy *z = &run->store->policy;
    printf("ZeRO       stage %d", z->stage);
    if (z->quantized_weights) { printf(", weights in INT8 blocks of %" PRId64, z->weights.block); }
    if (z->partition > 1) { printf(", copies inside partitions of %d ranks", z->partition); }
    if (z->quantized_gradients) {
        printf(", gradients in INT%d blocks of %" PRId64 "%s", z->gradients.bits, z->gradients.block, z->feedback ? ", errors fed back" : "");
    }
    printf("\n");
    printf("step       %" PRId64 " samples of %" PRId64 " tokens; %d micro-steps of up to %" PRId64 " samples a rank; schedule of %d actions\n", run->samples,
           o->seq_len, run->program->micro_batches, run->shape.rows, run->program->rank[run->ranks->me].count);
    printf("predicted  %.1f ms a step; memory of rank 0:\n", p->step_s * 1000);
    print_memory(p->memory, p->host, NULL, 0);
    if (run->ranks->n > 1) { printf("predicted  traffic sent by rank 0, a step:\n"), print_traffic(p->traffic); }
    if (!o->dry_run && o->steps) {
        printf("data       %" PRId64 " training tokens in %d shards, %" PRId64 " steps\n", run->train->tokens, run->train->shard_count, run->steps);
    }
    fflush(stdout);
}

static inline void json_add_predicted(Prediction *p, TextBuffer *line) {
    int64_t total[LINK_KINDS];
    traffic_total(p->traffic, total);
    text_add(line, "{\"memory\":"), json_add_memory(line, p->memory, p->host);
    text_add(line, ",\"traffic\":"), json_add_traffic(line, p->traffic, total);
    json_add_field(line, "step_ms", p->step_s * 1000), json_add_field(line, "idle", p->idle);
    text_add(line, "}");
}

static inline void json_add_privacy(Privacy *p, int64_t steps, TextBuffer *line) {
    char text[PRIVACY_JSON_MAX];
    privacy_json(p, steps, text);
    if (p->on) { text_add(line, ",\"privacy\":%s", text); }
}
static inline void json_add_start(const RunFacts *run, TextBuffer *line) {
    text_add(line, "{\"event\":\"start\",\"parameters\":%" PRId64 ",\"ranks\":%d,\"transport\":\"%s\",\"flags\":", run->model->parameters, run->ranks->n,
             run->cluster->nodes ? "none" : run->comm->transport.name);
    json_add_flags(line, run->options);
    text_add(line, ",\"device\":"), json_add_string(line, run->rates->device);
    json_add_field(line, "peak_flops", run->rates->peak_flops_per_s);
    text_add(line, ",\"rates\":{\"flops\":"), json_add_number(line, run->rates->flops_per_s);
    json_add_field(line, "memory", run->rates->bytes_per_s);
    for (int l = 0; l < LINK_KINDS; l++) { json_add_field(line, comm_link_names[l], run->rates->message_bytes_per_s[l]); }
    json_add_field(line, "latency", run->rates->message_s[LINK_INTER]);
    text_add(line, "},\"predicted\":"), json_add_predicted(run->predicted, line);
    json_add_privacy(run->privacy, run->privacy->allowed, line);
    text_add(line, "}");
}

static inline void print_start_json(const RunFacts *run) { // --dry-run --json
    TextBuffer line = {NULL, 0, 0};
    json_add_start(run, &line);
    printf("%s\n", line.text);
    free(line.text);
}

// Seconds of this run's steps, of these waiting for messages, and between steps telling about them.
typedef struct {
    double steps_s, waiting_s, telling_s;
} Spent;

// Predicted against measured, on the terminal and in the log, after `steps` steps that ended with `step`.
static inline void report_end(const RunFacts *run, int64_t step, int64_t steps, Spent spent, double energy, ProgressBar *bar, Log *log) {
    Prediction *p = run->predicted;
    int64_t total[2][LINK_KINDS], per_step[COMM_KINDS][LINK_KINDS];
    for (int k = 0; k < COMM_KINDS; k++) {
        for (int l = 0; l < LINK_KINDS; l++) { per_step[k][l] = run->comm->bytes[k][l] / max_i64(steps, 1); }
    }
    traffic_total(p->traffic, total[0]), traffic_total(per_step, total[1]);
    size_t host = host_bytes("VmHWM:");
    double step_ms = 1000 * spent.steps_s / (double)max_i64(steps, 1), idle = steps ? spent.waiting_s / spent.steps_s : 0;
    if (run->comm->rank) { return; }
    progress_break(bar);
    printf("predicted against measured, rank 0: %.1f ms a step, %.1f ms measured; waiting %.1f %% of it, %.1f %% measured; memory:\n", p->step_s * 1000,
           step_ms, 100 * p->idle, 100 * idle);
    print_memory(p->memory, p->host, memory_taken, (double)host);
    if (run->comm->ranks > 1) { printf("traffic a step, measured:\n"), print_traffic(per_step); }
    TextBuffer line = {NULL, 0, 0};
    text_add(&line, "{\"event\":\"end\",\"memory\":{\"predicted\":"), json_add_memory(&line, p->memory, p->host);
    text_add(&line, ",\"measured\":"), json_add_memory(&line, memory_taken, host);
    text_add(&line, "},\"traffic\":{\"predicted\":"), json_add_traffic(&line, p->traffic, total[0]);
    text_add(&line, ",\"measured\":"), json_add_traffic(&line, per_step, total[1]);
    text_add(&line, "},\"step_ms\":{\"predicted\":"), json_add_number(&line, p->step_s * 1000);
    json_add_field(&line, "measured", step_ms);
    text_add(&line, "},\"idle\":{\"predicted\":"), json_add_number(&line, p->idle);
    json_add_field(&line, "measured", idle);
    text_add(&line, "}"), json_add_field(&line, "overhead", steps ? spent.telling_s / spent.steps_s : 0);
    json_add_field(&line, "energy_j", energy);
    json_add_privacy(run->privacy, step, &line);
    text_add(&line, "}");
    log_line(log, &line);
}

// After a graceful stop: the command that goes on.
static inline void print_resume_command(int64_t step, int ranks, int argc, char **argv) {
    printf("stopped at step %" PRId64 ". To go on: mpirun -np %d", step, ranks);
    for (int i = 0; i < argc; i++) {
        bool resume_flag = !strcmp(argv[i], "--resume") || !strcmp(argv[i], "-y");
        if (resume_flag) {
            i += i + 1 < argc && (!strcmp(argv[i + 1], "0") || !strcmp(argv[i + 1], "1"));
            continue;
        }
        if (!strcmp(argv[i], "--dp-key")) { // OUT has it
            i++;
            continue;
        }
        if (!strncmp(argv[i], "--resume=", 9) || !strncmp(argv[i], "--dp-key=", 9)) { continue; }
        print_shell_word(argv[i]);
    }
    printf(" --resume 1\n");
}

#endif
