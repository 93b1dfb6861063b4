// report.h: what rank 0 reports of the whole run: predictions at its start, of delinking, and
// predicted against measured values at its end. They go to the terminal for people, and to the log
// as JSON lines for programs (docs/formats.md has the names).
#ifndef REPORT_H
#define REPORT_H

#include "engine/log.h"            // the log
#include "engine/memory_plan.h"    // plans
#include "engine/privacy_report.h" // the promise
#include "engine/timeline.h"       // schedules with their times
#include "dataloader.h"            // shards

// -------------------------------------------------------------------------------------------------
// Memory, traffic and offloaded states
static inline void json_add_memory(TextBuffer *t, const size_t memory[MEMORY_KINDS], size_t host) {
    text_add(t, "{");
    for (int k = 0; k < MEMORY_KINDS; k++) {
        text_add(t, "\"%s\":%zu,", memory_names[k], memory[k]);
    }
    text_add(t, "\"device\":%zu,\"host\":%zu}", memory_device(memory), host);
}
static inline void json_add_traffic(TextBuffer *t, int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    int64_t total[LINK_KINDS] = {0};
    text_add(t, "{");
    for (int l = 0; l < LINK_KINDS; l++) {
        text_add(t, "\"%s\":{", comm_link_names[l]);
        for (int k = 0; k < COMM_KINDS; k++) {
            text_add(t, "%s\"%s\":%" PRId64, k ? "," : "", comm_kind_names[k], traffic[k][l]);
            total[l] += traffic[k][l];
        }
        text_add(t, "},");
    }
    text_add(t, "\"total\":{\"intra\":%" PRId64 ",\"inter\":%" PRId64 "}}", total[LINK_INTRA],
             total[LINK_INTER]);
}
// What is on the host and on disk, and the bytes of a step that move to and from the device, and
// from and to the disk.
typedef struct {
    size_t bytes;
    int64_t in, out, disk, read, written;
} OffloadFacts;
static inline void json_add_offload(TextBuffer *t, OffloadFacts f) {
    text_add(t,
             "{\"bytes\":%zu,\"in\":%" PRId64 ",\"out\":%" PRId64 ",\"disk\":%" PRId64
             ",\"read\":%" PRId64 ",\"written\":%" PRId64 "}",
             f.bytes, f.in, f.out, f.disk, f.read, f.written);
}
// disk: bytes of the run's files: those of this plan, and those reserved for the model that follows
static inline OffloadFacts predicted_offload(const Prediction *p, int64_t disk) {
    const OffloadFacts f = {.bytes = p->offloaded,
                            .in = p->moved[0],
                            .out = p->moved[1],
                            .disk = disk,
                            .read = p->stored,
                            .written = p->stored};
    return f;
}
static inline void json_add_predicted(TextBuffer *line, Prediction p, int64_t disk) {
    text_add(line, "{\"memory\":");
    json_add_memory(line, p.memory, p.host);
    text_add(line, ",\"traffic\":");
    json_add_traffic(line, p.traffic);
    text_add(line, ",\"offload\":");
    json_add_offload(line, predicted_offload(&p, disk));
    json_add_field(line, "step_ms", p.step_s * 1000);
    json_add_field(line, "idle", p.idle);
    text_add(line, "}");
}

static inline double mebibytes(double bytes) { return bytes / 1048576; }
// measured < 0: not known yet
static inline void print_bytes(const char *name, double predicted, double measured) {
    printf("  %-14s %12.3f MiB", name, mebibytes(predicted));
    if (measured >= 0) { printf(" predicted, %12.3f MiB measured", mebibytes(measured)); }
    printf("\n");
}
// measured: bytes of each kind, and of the host; NULL: not known yet
static inline void print_memory(const Prediction *p, const size_t *measured, double measured_host) {
    for (int k = 0; k < MEMORY_KINDS; k++) {
        print_bytes(memory_names[k], p->memory[k], measured ? (double)measured[k] : -1);
    }
    print_bytes("device", memory_device(p->memory),
                measured ? (double)memory_device(measured) : -1);
    print_bytes("host", p->host, measured ? measured_host : -1);
}
static inline void print_traffic(int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    for (int k = 0; k < COMM_KINDS; k++) {
        const double intra = traffic[k][LINK_INTRA], inter = traffic[k][LINK_INTER];
        if (intra + inter > 0) {
            printf("  %-14s %12.3f MiB inside a node, %12.3f MiB between nodes\n",
                   comm_kind_names[k], mebibytes(intra), mebibytes(inter));
        }
    }
}

// -------------------------------------------------------------------------------------------------
// The start

// --show-schedule: prints the planned time of each action, and the action list.
static inline void show_schedule(const Plan *p) {
    ActionTime **times = schedule_times(&p->program);
    predict_step(p, NULL, times);
    schedule_show_times(&p->program, times, "planned", p->config->options.trace);
    schedule_print(stdout, &p->program);
    if (cyclic_turns(&p->cyclic)) {
        printf("This is step 0. Micro-batch i of step t is the ((t N + i) modulo (N - j))-th's of "
               "stage j's ranks, all from 0\n");
    }
    schedule_times_free(&p->program, times);
}
static inline void print_offload(const Plan *plan, int64_t disk) {
    const Prediction *p = &plan->predicted;
    const Offload *o = plan->store.policy.offload;
    int some = 0;
    if (!o) { return; }
    for (int i = 0; i < plan->model.storages; i++) {
        some += o->host[i] && store_holds(&plan->store, i);
    }
    printf("offload    %.3f MiB of the host are for states of %d of %d storages, updated by the "
           "%s; a step moves %.3f MiB to the device, %.3f MiB to the host\n",
           mebibytes(p->offloaded), some, plan->model.storages, o->cpu_update ? "host" : "device",
           mebibytes(p->moved[0]), mebibytes(p->moved[1]));
    if (p->stored) {
        printf("offload    %.3f MiB more are on disk, in %s; a step reads and writes all of it, at "
               "%.0f MB/s\n",
               mebibytes(p->stored), o->folder, plan->machine->rates.disk_bytes_per_s / 1e6);
    }
    if (disk > p->stored) {
        printf("offload    %.3f MiB of %s are taken for the blocks' own states\n",
               mebibytes(disk - p->stored), o->folder);
    }
}
// Prints the predictions for the delinked model.
static inline void print_later(const Plan *plan) {
    if (!plan) { return; }
    const Prediction *p = &plan->predicted;
    printf("delinked   %.1f M parameters, predicted %.1f ms a step; memory of rank 0 from then on, "
           "%.3f MiB of the host at the switch only:\n",
           plan->model.parameters / 1e6, p->step_s * 1000, mebibytes(plan->config->passing));
    print_memory(p, NULL, 0);
    if (p->offloaded) {
        printf("offload    then %.3f MiB of the host are for states; a step moves %.3f MiB to the "
               "device, %.3f MiB to the host\n",
               mebibytes(p->offloaded), mebibytes(p->moved[0]), mebibytes(p->moved[1]));
    }
    if (p->stored) {
        printf("offload    then %.3f MiB are on disk; a step reads and writes all of it\n",
               mebibytes(p->stored));
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
static inline void print_notes(const Config *c, const Dataset *train) {
    const Options *o = &c->options;
    if (options_ends_shared(o)) {
        printf("note: blocks share to the end: --delink-at %" PRId64
               " is not before --steps %" PRId64 "\n",
               o->delink_at, o->steps);
    }
    if (c->steps > 0 && o->warmup > c->steps) {
        printf("note: --warmup %" PRId64 " is longer than the run: after its %" PRId64
               " steps the learning rate is %.10g, not yet --lr %.10g\n",
               o->warmup, c->steps, options_learning_rate(o, c->steps - 1, c->steps), o->lr);
    }
    if (!*o->val) {
        printf("data       no validation%s: --train is given without --val\n",
               *o->hellaswag ? " but --hellaswag" : "");
    }
    if (o->steps && c->given.at[OPTION_INDEX_val] && !c->given.at[OPTION_INDEX_train]) {
        printf("data       training on the default, %s: --val is given without --train\n",
               o->train);
    }
    if (!o->dry_run && o->steps) {
        printf("data       %" PRId64 " training tokens in %d shards, %" PRId64 " steps\n",
               train->tokens, train->shard_count, c->steps);
    }
}
static inline void print_model(const Plan *p) {
    const GptConfig *c = &p->model.config;
    printf("model      %s: %" PRId64 " layers, %" PRId64 " heads, %" PRId64
           " channels, vocabulary %" PRId64 " (padded %" PRId64 "), %" PRId64
           " positions; %.1f M parameters, %s, products in %s\n",
           p->config->options.model, c->layers, c->heads, c->channels, c->vocab, c->padded_vocab,
           c->max_seq_len, p->model.parameters / 1e6, dtype_name(p->dtype),
           dtype_name(ops_compute()));
}
static inline void print_machine(const Machine *m, const Comm *comm) {
    if (m->cluster.nodes) {
        printf("placement  %d ranks on %d nodes of --cluster; %.1f GFLOP/s matrix-multiply peak a "
               "rank\n",
               m->ranks->n, m->cluster.nodes, m->rates.flops_per_s / 1e9);
    } else {
        printf("placement  %d ranks on %d nodes, %d threads each, messages by %s; %.1f GFLOP/s "
               "measured matrix-multiply peak a rank\n",
               comm->ranks, comm->nodes, m->threads, comm->transport.name,
               m->rates.flops_per_s / 1e9);
    }
    if (*m->rates.device) {
        printf("device     %s; MFU is the share of %.4g TFLOP/s\n", m->rates.device,
               m->rates.peak_flops_per_s / 1e12);
    }
}
static inline void print_start(const RunPlans *plans, const Dataset *train, const Comm *comm) {
    const Plan *p = plans->first;
    Prediction predicted = p->predicted;
    print_model(p);
    print_machine(p->machine, comm);
    print_zero(&p->store.policy);
    printf("step       %" PRId64 " samples of %" PRId64 " tokens; %d micro-steps of up to %" PRId64
           " samples a rank; schedule of %d actions\n",
           p->config->samples, p->shape.T, p->program.micro_batches, p->shape.rows,
           plan_schedule(p)->count);
    printf("predicted  %.1f ms a step; memory of rank 0:\n", predicted.step_s * 1000);
    print_memory(&predicted, NULL, 0);
    print_offload(p, plans->file_bytes[0] + plans->file_bytes[1]);
    if (p->machine->ranks->n > 1) {
        printf("predicted  traffic sent by rank 0, a step:\n");
        print_traffic(predicted.traffic);
    }
    print_later(plans->later);
    print_notes(p->config, train);
    fflush(stdout);
}

static inline void json_add_privacy(TextBuffer *line, Privacy *p, int64_t steps) {
    char text[PRIVACY_JSON_MAX];
    privacy_json(p, steps, text);
    if (p->on) { text_add(line, ",\"privacy\":%s", text); }
}
static inline void json_add_start(TextBuffer *line, const RunPlans *plans, Privacy *privacy,
                                  const Comm *comm) {
    const Plan *p = plans->first;
    const Machine *m = p->machine;
    text_add(line,
             "{\"event\":\"start\",\"parameters\":%" PRId64
             ",\"ranks\":%d,\"transport\":\"%s\",\"compute\":\"%s\",\"flags\":",
             p->model.parameters, m->ranks->n, m->cluster.nodes ? "none" : comm->transport.name,
             dtype_name(ops_compute()));
    json_add_flags(line, &p->config->options);
    text_add(line, ",\"device\":");
    json_add_string(line, m->rates.device);
    text_add(line, ",\"matmul\":\"%s\",\"attention\":\"%s\"", ops_products(), ops_attention());
    json_add_field(line, "peak_flops", m->rates.peak_flops_per_s);
    text_add(line, ",\"rates\":{\"flops\":");
    json_add_number(line, m->rates.flops_per_s);
    json_add_field(line, "memory", m->rates.bytes_per_s);
    for (int l = 0; l < LINK_KINDS; l++) {
        json_add_field(line, comm_link_names[l], m->rates.message_bytes_per_s[l]);
    }
    json_add_field(line, "latency", m->rates.message_s[LINK_INTER]);
    text_add(line, "},\"predicted\":");
    json_add_predicted(line, p->predicted, plans->file_bytes[0] + plans->file_bytes[1]);
    if (plans->later) {
        const Plan *later = plans->later;
        text_add(line, ",\"delinked\":{\"parameters\":%" PRId64 ",\"passing\":%zu,\"predicted\":",
                 later->model.parameters, later->config->passing);
        json_add_predicted(line, later->predicted, later->predicted.stored);
        text_add(line, "}");
    }
    json_add_privacy(line, privacy, privacy->allowed);
    text_add(line, "}");
}

// Reports that blocks which shared parameters have their own now. Predictions hold from here on.
static inline void report_delink(const Plan *p, int64_t step, Log *log) {
    log_break(log);
    printf("step %5" PRId64 " | delinked: each of %" PRId64
           " blocks has its own parameters from here on, %.1f M in all; memory of rank 0:\n",
           step, p->model.config.layers, p->model.parameters / 1e6);
    print_memory(&p->predicted, NULL, 0);
    TextBuffer line = json_event("delink", step);
    text_add(&line, ",\"parameters\":%" PRId64 ",\"predicted\":", p->model.parameters);
    json_add_predicted(&line, p->predicted, p->predicted.stored);
    log_object(log, &line);
}

// -------------------------------------------------------------------------------------------------
// The end

// Seconds of this run: in steps, of these in waiting for messages, and between steps in reports.
typedef struct {
    double steps_s, waiting_s, report_s;
} Spent;
// What was measured over the steps of the plan. The caller gives `rounded` where times and traffic
// must be hidden (privacy_hides).
typedef struct {
    int64_t steps, traffic[COMM_KINDS][LINK_KINDS]; // bytes of a step
    size_t host;                                    // this process's peak, bytes
    OffloadFacts offload;
    double step_ms, idle, overhead, joules;
} Measured;

static inline void json_add_pair(TextBuffer *line, const char *name, double predicted,
                                 double measured) {
    text_add(line, ",\"%s\":{\"predicted\":", name);
    json_add_number(line, predicted);
    json_add_field(line, "measured", measured);
    text_add(line, "}");
}
static inline void json_add_end(TextBuffer *line, const Plan *p, int64_t disk, Measured *m) {
    Prediction predicted = p->predicted;
    text_add(line, "{\"event\":\"end\",\"memory\":{\"predicted\":");
    json_add_memory(line, predicted.memory, predicted.host);
    text_add(line, ",\"measured\":");
    json_add_memory(line, memory_taken, m->host);
    text_add(line, "},\"offload\":{\"predicted\":");
    json_add_offload(line, predicted_offload(&predicted, disk));
    text_add(line, ",\"measured\":");
    json_add_offload(line, m->offload);
    text_add(line, "},\"traffic\":{\"predicted\":");
    json_add_traffic(line, predicted.traffic);
    text_add(line, ",\"measured\":");
    json_add_traffic(line, m->traffic);
    text_add(line, "}");
    json_add_pair(line, "step_ms", predicted.step_s * 1000, m->step_ms);
    json_add_pair(line, "idle", predicted.idle, m->idle);
    json_add_field(line, "overhead", m->overhead);
    json_add_field(line, "energy_j", m->joules);
}
// Returns what was measured in `steps` steps since the counters were reset. files: [2] of the run.
static inline Measured measured_run(const Store *store, const DiskFile *files, const Comm *comm,
                                    bool hides, int64_t steps, Spent spent, double joules) {
    const int64_t each = max_i64(steps, 1);
    const bool hides_moves = hides && store->host[STATE_PARAMETERS].held;
    int64_t moved[2]; // parameters move in each micro-step, whose number is private
    Measured m = {};
    for (int k = 0; k < COMM_KINDS * LINK_KINDS; k++) {
        const int64_t bytes = comm->bytes[k / LINK_KINDS][k % LINK_KINDS] / each;
        m.traffic[k / LINK_KINDS][k % LINK_KINDS] = hides ? (int64_t)privacy_rounded(bytes) : bytes;
    }
    for (int way = 0; way < 2; way++) {
        const int64_t bytes = store->moved[way] / each;
        moved[way] = hides_moves ? (int64_t)privacy_rounded(bytes) : bytes;
    }
    const OffloadFacts offload = {.bytes = memory_on_host,
                                  .in = moved[0],
                                  .out = moved[1],
                                  .disk = files[0].taken + files[1].taken,
                                  .read = store->stored[0] / each,
                                  .written = store->stored[1] / each};
    m.steps = steps;
    m.offload = offload;
    m.host = host_bytes("VmHWM:");
    m.step_ms = 1000 * spent.steps_s / each;
    m.idle = steps ? spent.waiting_s / spent.steps_s : 0;
    m.overhead = steps ? spent.report_s / spent.steps_s : 0;
    m.joules = joules;
    if (hides) {
        m.step_ms = privacy_rounded(m.step_ms);
        m.idle = privacy_rounded(m.idle);
        m.overhead = privacy_rounded(m.overhead);
        m.joules = NAN;
    }
    return m;
}
// Reports predicted against measured values after step `step`. disk: predicted bytes of the files.
static inline void report_end(const Plan *plan, Measured *m, int64_t disk, Privacy *privacy,
                              int64_t step, Log *log) {
    const Prediction *p = &plan->predicted;
    log_break(log);
    printf("predicted against measured, rank 0: %.1f ms a step, %.1f ms measured; waiting %.1f %% "
           "of it, %.1f %% measured; memory:\n",
           p->step_s * 1000, m->step_ms, 100 * p->idle, 100 * m->idle);
    print_memory(p, memory_taken, m->host);
    if (plan->machine->ranks->n > 1) {
        printf("traffic a step, measured:\n");
        print_traffic(m->traffic);
    }
    if (p->offloaded) { print_bytes("offloaded", p->offloaded, memory_on_host); }
    TextBuffer line = {NULL, 0, 0};
    json_add_end(&line, plan, disk, m);
    json_add_privacy(&line, privacy, step);
    log_object(log, &line);
}

static inline void report_resumed(const char *path, const Progress *p, int64_t steps) {
    const char *compute = dtype_name(ops_compute());
    printf("resumed from %s: step %" PRId64 "\n", path, p->step);
    if (steps && steps < p->step) {
        printf("note: it has more than the run's %" PRId64 " steps: nothing is trained\n", steps);
    }
    if (strcmp(p->compute, "?") && strcmp(p->compute, compute)) {
        printf("note: it was trained with products in %s, now they are in %s: losses differ in "
               "their last digits from what they would have been\n",
               p->compute, compute);
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
