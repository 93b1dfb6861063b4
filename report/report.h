// report.h: what rank 0 reports of the whole run: predictions at its start, of delinking, and
// predicted against measured values at its end. They go to the terminal for people, and to the log
// as JSON lines for programs (docs/formats.md has the names).
#ifndef REPORT_H
#define REPORT_H

#include "base/base.h"
#include "base/figures.h"
#include "base/files.h"
#include "base/process.h"
#include "base/readable.h"
#include "checkpoint/manifest.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/mpi.h"
#include "comm/records.h"
#include "cyclic.h"
#include "dataloader.h"
#include "model/config.h"
#include "model/unit.h"
#include "ops/ops.h"
#include "options.h"
#include "plan/budgets.h"
#include "plan/cluster.h"
#include "plan/costs.h"
#include "plan/forecast.h"
#include "plan/memory_plan.h"
#include "plan/plan.h"
#include "plan/rates.h"
#include "plan/sizes.h"
#include "plan/system.h"
#include "planner/fit.h"
#include "planner/plan_answer.h"
#include "privacy/privacy.h"
#include "report/log.h"
#include "report/privacy_report.h"
#include "report/timeline.h"
#include "schedule/order.h"
#include "schedule/schedule.h"
#include "schedule/simulator.h"
#include "state/disk.h"
#include "state/layout.h"
#include "state/learning_rate.h"
#include "state/planned.h"
#include "state/policy.h"
#include "state/store.h"
#include "zero.h"

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
                            .in = p->copied.to_device,
                            .out = p->copied.to_host,
                            .disk = disk,
                            .read = p->stored,
                            .written = p->stored};
    return f;
}
// Adds an object, which the caller ends.
static inline void json_add_predicted(TextBuffer *line, Prediction p, int64_t disk) {
    text_add(line, "{\"memory\":");
    json_add_memory(line, p.memory, p.host);
    text_add(line, ",\"traffic\":");
    json_add_traffic(line, p.traffic);
    text_add(line, ",\"offload\":");
    json_add_offload(line, predicted_offload(&p, disk));
    if (p.most_rows) { text_add(line, ",\"all_to_all_most\":%" PRId64, p.most_rows); }
    if (p.uneven.most > 0) { json_add_uneven(line, &p.uneven); }
    json_add_field(line, "step_ms", p.step_s * 1000);
    json_add_field(line, "idle", p.idle);
}

static const char *const link_places[LINK_KINDS] = {"inside a node", "between nodes"};
// The rows of the table of memory. What takes nothing has no row.
static inline void print_bytes(const char *name, double predicted) {
    if (predicted > 0) { printf("  %-14s %16s\n", name, readable_column(predicted).at); }
}
static inline void print_memory(const Prediction *p) {
    for (int k = 0; k < MEMORY_KINDS; k++) { print_bytes(memory_names[k], p->memory[k]); }
    print_bytes("device", memory_device(p->memory));
    print_bytes("host", p->host);
}
static inline void print_traffic(int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    for (int k = 0; k < COMM_KINDS; k++) {
        const char *separator = "";
        if (traffic[k][LINK_INTRA] + traffic[k][LINK_INTER] == 0) { continue; }
        printf("  %-14s", comm_kind_names[k]);
        for (int l = 0; l < LINK_KINDS; l++) {
            if (traffic[k][l] == 0) { continue; }
            printf("%s %16s %s", separator, readable_column((double)traffic[k][l]).at,
                   link_places[l]);
            separator = ",";
        }
        printf("\n");
    }
}
// Prints what all-to-all sends where the loads of experts are not even, as the table has it, and
// what that does to a step.
static inline void print_most_rows(const Prediction *p) {
    if (p->most_rows) {
        printf("  rows of experts: as for even loads; at most %s\n",
               readable_bytes((double)p->most_rows).at);
    }
    if (p->uneven.most > 0) { print_uneven(stdout, &p->uneven); }
}
// Prints the sums of these rows instead of the table. when: "", or since when they hold.
static inline void print_memory_sum(const Prediction *p, const char *when) {
    print_row("memory", "%s of the device, %s of the host%s, predicted for rank 0%s",
              readable_bytes((double)memory_device(p->memory)).at,
              readable_bytes((double)p->host).at, when, *when ? "" : " (see --dry-run)");
}
static inline void print_traffic_sum(int64_t traffic[COMM_KINDS][LINK_KINDS]) {
    double sent[LINK_KINDS] = {0};
    for (int k = 0; k < COMM_KINDS * LINK_KINDS; k++) {
        sent[k % LINK_KINDS] += traffic[k / LINK_KINDS][k % LINK_KINDS];
    }
    for (int l = 0; l < LINK_KINDS; l++) {
        if (sent[l] == 0) { continue; }
        print_row("traffic", "%s %s, predicted for a step of rank 0", readable_bytes(sent[l]).at,
                  link_places[l]);
    }
}

// -------------------------------------------------------------------------------------------------
// The start

// --show-schedule: prints the planned time of each action, and the action list. Ends the program
// (EXIT_RESOURCES) if the trace could not be written.
static inline void show_schedule(const Plan *p) {
    ActionTime **times = schedule_times(&p->program);
    StageStores stages = stage_stores_make(p);
    predict_step(p, &stages, NULL, times);
    stage_stores_free(&stages);
    const char *trace = p->config->options.trace;
    const int error = schedule_show_times(&p->program, times, "planned", trace);
    schedule_print(stdout, &p->program);
    if (cyclic_turns(&p->cyclic)) {
        printf("This is step 0. Micro-batch i of step t is the ((t N + i) modulo (N - j))-th's of "
               "stage j's ranks, all from 0\n");
    }
    for (int r = 0; r < p->program.ranks && p->cyclic.mode == CYCLIC_DATA && p->cyclic.rule; r++) {
        Order order = window_order(&p->program, &p->cyclic, &p->model, r);
        order_print(stdout, &order, &p->program.rank[r], r);
        order_free(&order);
    }
    schedule_times_free(&p->program, times);
    if (error) { die(EXIT_RESOURCES, NULL, "cannot write --trace %s: %s", trace, strerror(error)); }
}
// Returns whether ranks sum gradients more often than at their stage of ZeRO, because these leave
// the device.
static inline bool offload_sums_often(const StatePlan *s) {
    bool found = false;
    for (int i = 0; i < s->model->storages; i++) {
        found |= s->rows[i].owners->all.n > 1 && s->rows[i].reduces_often;
    }
    return found && s->policy.stage < 2 && zero_gradient_stage(s) >= 2;
}
static inline void print_offload(const Plan *plan, int64_t disk) {
    const Prediction *p = &plan->predicted;
    const Offload *o = plan->store.policy.offload;
    int some = 0;
    if (!o) { return; }
    for (int i = 0; i < plan->model.storages; i++) {
        some += plan->store.rows[i].host && store_holds(&plan->store, i);
    }
    print_row("offload",
              "%.3f MiB of the host are for states of %d of %d storages, updated by the %s; a "
              "step moves %.3f MiB to the device, %.3f MiB to the host",
              mebibytes(p->offloaded), some, plan->model.storages,
              o->cpu_update ? "host" : "device", mebibytes(p->copied.to_device),
              mebibytes(p->copied.to_host));
    if (offload_sums_often(&plan->store)) {
        print_row("offload", "gradients leave the device, so ranks sum them in each micro-batch, "
                             "as with --zero 2");
    }
    if (p->stored) {
        print_row("offload",
                  "%.3f MiB more are on disk, in %s; a step reads and writes all of it, at "
                  "%.0f MB/s",
                  mebibytes(p->stored), o->folder, plan->machine->rates.disk_bytes_per_s / 1e6);
    }
    if (disk > p->stored) {
        print_row("offload", "%.3f MiB of %s are taken for the blocks' own states",
                  mebibytes(disk - p->stored), o->folder);
    }
}
// Prints the predictions for the delinked model. table: the memory of each kind, too.
static inline void print_later(const Plan *plan, bool table) {
    if (!plan) { return; }
    const Prediction *p = &plan->predicted;
    print_row("delinked",
              "%.1f M parameters, predicted %s a step; %.3f MiB of the host at the switch only",
              plan->model.parameters / 1e6, readable_step(p->step_s).at,
              mebibytes(plan->config->delink_bytes));
    if (table) {
        printf("memory of rank 0 from then on:\n");
        print_memory(p);
    } else {
        print_memory_sum(p, " from then on");
    }
    if (p->offloaded) {
        print_row("offload",
                  "then %.3f MiB of the host are for states; a step moves %.3f MiB to the device, "
                  "%.3f MiB to the host",
                  mebibytes(p->offloaded), mebibytes(p->copied.to_device),
                  mebibytes(p->copied.to_host));
    }
    if (p->stored) {
        print_row("offload", "then %.3f MiB are on disk; a step reads and writes all of it",
                  mebibytes(p->stored));
    }
}
static inline void print_zero(const ZeroPolicy *z) {
    TextBuffer text = {NULL, 0, 0};
    text_add(&text, "stage %d", z->stage);
    if (z->quantized_weights) {
        text_add(&text, ", weights in INT8 blocks of %" PRId64, z->weights.block);
    }
    if (z->partition > 1) {
        text_add(&text, ", copies inside partitions of %d ranks", z->partition);
    }
    if (z->quantized_gradients) {
        text_add(&text, ", gradients in INT%d blocks of %" PRId64 "%s", z->gradients.bits,
                 z->gradients.block, z->feedback ? ", errors fed back" : "");
    }
    print_row("ZeRO", "%s", text.text);
    free(text.text);
}
// What was measured with gradients that are one step old (docs/results/cyclic.md, C3): runs of up
// to 3000 steps were behind plain training at each rule's best rate, those of 8000 and more were
// not. Shorter runs than a hundred steps are trials, of which nobody expects a good loss.
enum { DELAY_TRIAL = 100, DELAY_MANY_STEPS = 5000 };
// Prints where a delay is known to cost loss. The limits of stability are those of docs/cyclic.md.
static inline void print_delay_notes(const Options *o, int64_t steps) {
    const bool v1 = o->cyclic == CYCLIC_V1;
    const double b = o->momentum;
    if (!o->cyclic || steps < DELAY_TRIAL) { return; }
    if (v1 && !o->nesterov && !strcmp(optimizers[o->optimizer].name, "sgd") && b >= 0.5) {
        printf("note: with --momentum %g, --cyclic v1 is stable up to 1/%.0f of the learning rate "
               "of plain training (1/2 with --momentum 0): tune --lr again\n",
               b, 2 * (1 + b) / (1 - b));
    }
    if (steps < DELAY_MANY_STEPS) {
        printf("note: --cyclic %s in %" PRId64 " steps: in runs of up to 3000 steps its loss was "
               "%s behind plain training; more and smaller steps %sclosed the gap\n",
               v1 ? "v1" : "v2", steps, v1 ? "2 to 18 %" : "1 to 15 %",
               v1 && !o->nesterov ? "and --nesterov " : "");
    }
}
// Prints the learning rate: its peak, and how it gets there and goes on.
static inline void print_rate(const Options *o) {
    static const char *const falls[] = {"by a cosine", "linearly", "", "by 1 - sqrt", "linearly"};
    const bool late = o->lr_schedule == LR_WSD || o->lr_schedule == LR_WSD_LINEAR;
    TextBuffer row = {NULL, 0, 0};
    if (o->warmup) { text_add(&row, "%" PRId64 " steps of warm-up to ", o->warmup); }
    text_add(&row, "%.10g, ", o->lr);
    if (rate_is_constant(o)) {
        text_add(&row, "constant");
    } else {
        if (late) { text_add(&row, "in the last %.4g of the steps ", o->lr_last_part); }
        text_add(&row, "%s%s to %.10g at the last step", late ? "" : "then ", falls[o->lr_schedule],
                 o->lr * o->final_lr_fraction);
    }
    print_row("lr", "%s", row.text);
    free(row.text);
}
// Prints that --train is given without --val, and what to do about it: shards for validation have
// "val" in the place of the last "train" in a name, as scripts/prepare_data.py writes them.
static inline void print_no_validation(const Options *o) {
    const char *part = NULL;
    for (const char *at = o->train; (at = strstr(at, "train")); at++) { part = at; }
    const int before = part ? (int)(part - o->train) : 0;
    const Text val = text_of("%.*sval%s", before, o->train, part ? part + strlen("train") : "");
    glob_t names;
    const bool there = part && !data_glob(val.at, &names);
    if (part) { globfree(&names); }
    const Text todo =
        there  ? text_of("--val '%s' would use the shards beside these", val.at)
        : part ? text_of("scripts/prepare_data.py writes %s, which is not there", val.at)
               : text_of("scripts/prepare_data.py writes NAME_val_*.bin beside NAME_train_*.bin");
    print_row("data",
              "no validation%s: --train is given without --val. %s; --val-every 0 asks for none",
              *o->hellaswag ? " but --hellaswag" : "", todo.at);
}
// Prints which flags that are given have no effect, although no other flag forbids them.
static inline void print_useless(const Config *c) {
    const Options *o = &c->options;
    const bool *given = c->given.at;
    if (given[OPTION_INDEX_lr_schedule] && !given[OPTION_INDEX_final_lr_fraction] &&
        o->lr_schedule != LR_CONSTANT && rate_is_constant(o)) {
        printf(
            "note: --lr-schedule has no effect: the rate ends at --final-lr-fraction 1 of --lr\n");
    }
    if (o->lr_schedule == LR_CONSTANT && o->final_lr_fraction != 1) {
        printf("note: --final-lr-fraction has no effect with --lr-schedule constant\n");
    }
    if (c->privacy.on && !o->shuffle) {
        printf("note: --shuffle 0 has no effect: a private step draws its samples at random\n");
    }
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
               " step%s the learning rate is %.10g, not yet --lr %.10g\n",
               o->warmup, c->steps, plural(c->steps), learning_rate(o, c->steps - 1, c->steps),
               o->lr);
    }
    print_delay_notes(o, c->steps);
    print_useless(c);
    if (o->dry_run) { sizes_print(c, c->samples * o->seq_len); }
    if (!o->dry_run && o->steps && *o->val && o->val_every &&
        dataset_shares_file(o->train, o->val)) {
        printf("note: --val has a file of --train: the validation loss is that of training data\n");
    }
    if (c->steps > 0 && !o->dry_run && !o->save_every && !*o->export_file) {
        print_row("saves", *o->out
                               ? "nothing unless it is stopped: --save-every N saves checkpoints"
                               : "nothing: --out FOLDER --save-every N save checkpoints");
    }
    if (!*o->val) { print_no_validation(o); }
    if (o->steps && c->given.at[OPTION_INDEX_val] && !c->given.at[OPTION_INDEX_train]) {
        print_row("data", "training on the default, %s: --val is given without --train", o->train);
    }
    if (!o->dry_run && o->steps) {
        print_row("data", "%" PRId64 " training tokens in %d shard%s", train->tokens,
                  train->shard_count, plural(train->shard_count));
    }
}
static inline void print_model(const Plan *p) {
    const GptConfig *c = &p->model.config;
    const char *name = p->config->options.model;
    TextBuffer row = {NULL, 0, 0};
    if (!strchr(name, '=')) { text_add(&row, "%s: ", name); } // the row has what a list of keys has
    if (c->theta > 0) { text_add(&row, "%s, ", p->model.arch->name); }
    text_add(&row, "%" PRId64 " layer%s, %" PRId64 " head%s", c->layers, plural(c->layers),
             c->heads, plural(c->heads));
    if (c->kv_heads != c->heads) { text_add(&row, " (%" PRId64 " of keys)", c->kv_heads); }
    text_add(&row, ", %" PRId64 " channels, vocabulary %" PRId64, c->channels, c->vocab);
    if (c->padded_vocab != c->vocab) { text_add(&row, " (padded %" PRId64 ")", c->padded_vocab); }
    const double unit = p->model.parameters < 50000 ? 1e3 : 1e6;
    text_add(&row, ", %" PRId64 " positions; %.1f %s parameters, %s", c->max_seq_len,
             p->model.parameters / unit, unit < 1e6 ? "K" : "M", dtype_name(p->dtype));
    if (ops_compute() != p->dtype) {
        text_add(&row, ", products in %s", dtype_name(ops_compute()));
    }
    print_row("model", "%s", row.text);
    free(row.text);
}
static inline void print_machine(const Machine *m, const Comm *comm) {
    const double gflops = m->rates.flops_per_s / 1e9, peak = m->rates.peak_flops_per_s / 1e9;
    if (m->cluster.nodes) {
        TextBuffer slower = {};
        text_add(&slower, "%s", "");
        for (int p = 0; p < m->cluster.parts; p++) {
            const ClusterPart *part = &m->cluster.part[p];
            if (part->speed == 1) { continue; }
            text_add(&slower, ", %d of them at %g of it", part->nodes * part->ranks, part->speed);
        }
        print_row("placement",
                  "%d rank%s on %d node%s of --cluster; %.1f GFLOP/s matrix-multiply peak a rank%s",
                  m->ranks->n, plural(m->ranks->n), m->cluster.nodes, plural(m->cluster.nodes),
                  gflops, slower.text);
        free(slower.text);
    } else {
        print_row("placement",
                  "%d rank%s on %d node%s, %d thread%s each, %s%s; %.1f GFLOP/s %s peak a "
                  "rank%s%s, %.1f in products",
                  comm->ranks, plural(comm->ranks), comm->nodes, plural(comm->nodes), m->threads,
                  plural(m->threads), HAS_MPI ? "messages by " : "built without MPI",
                  HAS_MPI ? comm->transport.name : "", peak,
                  rates_are_assumed() ? "assumed" : "measured",
                  *m->rates.instructions ? " by " : "", m->rates.instructions, gflops);
    }
    if (*m->rates.device) {
        const char *reason = ops_attention_reason();
        print_row("device", "%s; MFU is the share of %.4g TFLOP/s; attention: %s%s%s%s",
                  m->rates.device, m->rates.peak_flops_per_s / 1e12, ops_attention(),
                  *reason ? " (cuDNN: " : "", reason, *reason ? ")" : "");
    }
}
static inline StepWork plan_work(const Plan *p) {
    return step_work(&p->model, p->config->samples, p->shape.T, p->machine->rates.peak_flops_per_s,
                     p->machine->ranks->n);
}
// Returns what the step of a plan for --cluster means.
static inline Forecast forecast_of_plan(const Plan *p) {
    StageStores stages = stage_stores_make(p);
    const double most = plan_most_bytes(p, &stages);
    stage_stores_free(&stages);
    return forecast_make(plan_work(p), p->predicted.step_s, most,
                         planner_memory(&p->machine->cluster, &p->config->options));
}
static inline void print_forecast_of_plan(const RunPlans *plans) {
    const Plan *p = plans->first;
    const Options *o = &p->config->options;
    if (!p->machine->cluster.nodes) { return; }
    const Forecast f = forecast_of_plan(p);
    print_gpu(stdout, &p->machine->cluster);
    print_forecast(stdout, &f, (double)o->steps * p->config->samples * p->shape.T,
                   forecast_fits(&f) ? "" : fit_remedy(p, plans->asked, f.memory));
}
static inline void print_step(const Plan *p) {
    const int64_t samples = p->config->samples, rows = p->shape.rows;
    const int micro = p->program.micro_batches, actions = plan_schedule(p)->count;
    print_row("step",
              "%" PRId64 " sample%s of %" PRId64 " tokens; %d micro-step%s of up to %" PRId64
              " sample%s a rank; schedule of %d action%s",
              samples, plural(samples), p->shape.T, micro, plural(micro), rows, plural(rows),
              actions, plural(actions));
}
// What an optimizer of whole matrices does in a step: of all ranks, of this one, and the share of
// the predicted step that this one takes.
typedef struct {
    int64_t all, mine;
    double share;
} MatricesForecast;
static inline MatricesForecast forecast_matrices(const Plan *p) {
    const StatePlan *s = &p->store;
    const Costs costs = {.program = &p->program,
                         .rates = p->machine->rates,
                         .iterations = (double)p->config->options.muon_steps};
    MatricesForecast f = {0, 0, 0};
    double seconds = 0;
    for (int i = 0; s->matrices.count && i < p->model.storages; i++) {
        const int me = s->rows[i].owners->all.me;
        for (int k = 0; k < s->matrices.count; k++) {
            f.all += s->rows[i].exchange.home[k] >= 0;
            f.mine += me >= 0 && s->rows[i].exchange.home[k] == me;
        }
        if (me >= 0) { seconds += matrices_seconds(&costs, s, i); }
    }
    seconds *= slowness_of_rank(&costs, 0);
    f.share = p->predicted.step_s > 0 ? seconds / p->predicted.step_s : 0;
    return f;
}
static inline void print_matrices(const Plan *p) {
    const MatricesForecast f = forecast_matrices(p);
    const int64_t iterations = p->config->options.muon_steps;
    if (!f.all) { return; }
    print_row("optimizer",
              "%" PRId64 " matrices of blocks are made orthogonal by %" PRId64
              " iteration%s, %" PRId64 " of them by rank 0: %.2f %% of a step, predicted",
              f.all, iterations, plural(iterations), f.mine, 100 * f.share);
}
// What --dry-run finds of the memory of this machine (or of its GPU), for the model of the run that
// needs most.
typedef struct {
    MemoryNeed need;
    bool fits; // on the machines of all ranks
} MemoryHere;
// All ranks call it.
static inline MemoryHere memory_here(const RunPlans *plans, Comm *comm) {
    MemoryHere memory = {.need = memory_need(plans->first, comm),
                         .fits = memory_fits_all(plans->first, comm)};
    if (!plans->later) { return memory; }
    const MemoryNeed later = memory_need(plans->later, comm);
    if (later.needed > memory.need.needed) { memory.need = later; }
    memory.fits &= memory_fits_all(plans->later, comm);
    return memory;
}
// Where it does not fit, check_memory() says so.
static inline void print_memory_here(const MemoryHere *memory) {
    const MemoryNeed *n = &memory->need;
    if (!memory->fits || isinf(n->there)) { return; }
    print_row("memory", "fits: %d rank%s on this %s need%s %.2f GiB more, %.2f GiB are available",
              n->sharers, plural(n->sharers), ops_memory_apart() ? "GPU" : "machine",
              n->sharers == 1 ? "s" : "", gibibytes(n->needed), gibibytes(n->there));
}
// Prints what will happen. --dry-run: with a table of memory and traffic; at the start of a run in
// one line of each.
// memory: what --dry-run found of this machine's memory; NULL: it did not look.
static inline void print_start(const RunPlans *plans, const Dataset *train, const Comm *comm,
                               const MemoryHere *memory) {
    const Plan *p = plans->first;
    const bool table = p->config->options.dry_run, alone = p->machine->ranks->n == 1;
    Prediction predicted = p->predicted;
    print_model(p);
    print_machine(p->machine, comm);
    print_zero(&p->store.policy);
    print_matrices(p);
    print_step(p);
    if (p->config->steps > 0) { print_rate(&p->config->options); }
    if (table) {
        printf("predicted  %s a step; memory of rank 0:\n", readable_step(predicted.step_s).at);
        print_memory(&predicted);
    } else {
        print_memory_sum(&predicted, "");
    }
    print_offload(p, plans->file_bytes[0] + plans->file_bytes[1]);
    if (table && !alone) {
        printf("predicted  traffic sent by rank 0, a step:\n");
        print_traffic(predicted.traffic);
        print_most_rows(&predicted);
    } else if (!alone) {
        print_traffic_sum(predicted.traffic);
    }
    print_forecast_of_plan(plans);
    if (memory) { print_memory_here(memory); }
    if (table) {
        Privacy privacy = p->config->privacy;
        privacy_print_plan(stdout, &privacy, &p->config->options);
    }
    print_later(plans->later, table);
    print_notes(p->config, train);
    output_flush();
}
static inline void json_add_matrices(TextBuffer *line, const Plan *p) {
    const MatricesForecast f = forecast_matrices(p);
    if (!f.all) { return; }
    text_add(line, ",\"matrices\":{\"all\":%" PRId64 ",\"here\":%" PRId64, f.all, f.mine);
    json_add_field(line, "of_step", f.share);
    text_add(line, "}");
}
// Is this word of a command line the key of a private run, or its flag? OUT/dp_key keeps the key.
static inline bool is_key_word(char **argv, int i) {
    return !strncmp(argv[i], "--dp-key=", 9) || !strcmp(argv[i], "--dp-key") ||
           (i && !strcmp(argv[i - 1], "--dp-key"));
}
static inline void json_add_command(TextBuffer *line, int argc, char **argv) {
    for (int i = 0; i < argc; i++) {
        if (is_key_word(argv, i)) { continue; }
        text_add(line, i ? "," : ",\"command\":[");
        json_add_string(line, argv[i]);
    }
    text_add(line, "]");
}
// memory: of --dry-run, or NULL. The caller ends the object.
static inline void json_add_start(TextBuffer *line, const RunPlans *plans, Privacy *privacy,
                                  const Comm *comm, const MemoryHere *memory) {
    const Plan *p = plans->first;
    const Machine *m = p->machine;
    const Options *o = &p->config->options;
    text_add(line,
             "{\"event\":\"start\",\"parameters\":%" PRId64
             ",\"ranks\":%d,\"transport\":\"%s\",\"compute\":\"%s\",\"flags\":",
             p->model.parameters, m->ranks->n, m->cluster.nodes ? "none" : comm->transport.name,
             dtype_name(ops_compute()));
    json_add_flags(line, o);
    if (!o->dry_run) { text_add(line, ",\"steps\":%" PRId64, p->config->steps); }
    text_add(line, ",\"device\":");
    json_add_string(line, m->rates.device);
    text_add(line, ",\"matmul\":\"%s\",\"attention\":\"%s\",\"attention_reason\":", ops_products(),
             ops_attention());
    json_add_string(line, ops_attention_reason());
    json_add_field(line, "peak_flops", m->rates.peak_flops_per_s);
    text_add(line, ",\"rates\":{\"flops\":");
    json_add_number(line, m->rates.flops_per_s);
    json_add_field(line, "memory", m->rates.bytes_per_s);
    for (int l = 0; l < LINK_KINDS; l++) {
        json_add_field(line, comm_link_names[l], m->rates.message_bytes_per_s[l]);
    }
    json_add_field(line, "latency", m->rates.message_s[LINK_INTER]);
    json_add_field(line, "half", m->rates.half_tokens);
    json_add_field(line, "attention", m->rates.attention_flops_per_s);
    text_add(line, "},\"predicted\":");
    json_add_predicted(line, p->predicted, plans->file_bytes[0] + plans->file_bytes[1]);
    const Forecast forecast = forecast_of_plan(p);
    if (m->cluster.nodes) { json_add_forecast(line, &forecast); }
    if (memory) { text_add(line, ",\"fits\":%s", memory->fits ? "true" : "false"); }
    text_add(line, "}");
    if (plans->later) {
        const Plan *later = plans->later;
        text_add(line, ",\"delinked\":{\"parameters\":%" PRId64 ",\"passing\":%zu,\"predicted\":",
                 later->model.parameters, later->config->delink_bytes);
        json_add_predicted(line, later->predicted, later->predicted.stored);
        text_add(line, "}}");
    }
    json_add_matrices(line, p);
    json_add_privacy(line, privacy, privacy->allowed);
}

// Reports that blocks which shared parameters have their own now. Predictions hold from here on.
static inline void report_delink(const Plan *p, int64_t step, Log *log) {
    log_break(log);
    printf("step %5" PRId64 " | delinked: each of %" PRId64
           " blocks has its own parameters from here on, %.1f M in all\n",
           step, p->model.config.layers, p->model.parameters / 1e6);
    print_memory_sum(&p->predicted, " from here on");
    TextBuffer line = json_event("delink", step);
    text_add(&line, ",\"parameters\":%" PRId64 ",\"predicted\":", p->model.parameters);
    json_add_predicted(&line, p->predicted, p->predicted.stored);
    text_add(&line, "}");
    log_object(log, &line);
}

// -------------------------------------------------------------------------------------------------
// The end

// Seconds of this run: in `steps` steps, of these in waiting for messages, and between steps in
// reports. The first step also fills caches and opens connections: it counts only where it is the
// only one.
typedef struct {
    int64_t steps;
    double steps_s, waiting_s, report_s;
} Spent;
// What was measured over the steps of the plan. The caller gives `rounded` where times and traffic
// must be hidden (privacy_hides).
typedef struct {
    int64_t steps, traffic[COMM_KINDS][LINK_KINDS]; // bytes of a step
    size_t host;                                    // this process's peak, bytes
    OffloadFacts offload;
    double step_ms, idle, overhead, joules;
    int64_t mean_device; // device memory of a rank, the mean of all
} Measured;

static inline void json_add_pair(TextBuffer *line, const char *name, double predicted,
                                 double measured) {
    text_add(line, ",\"%s\":{\"predicted\":", name);
    json_add_number(line, predicted);
    json_add_field(line, "measured", measured);
    text_add(line, "}");
}
// Returns the TFLOP/s of a rank if a step of the plan takes step_s.
static inline double plan_tflops(const Plan *p, double step_s) {
    const StepWork work = plan_work(p);
    return tflops_of(&work, step_s);
}
static inline void json_add_end(TextBuffer *line, const Plan *p, int64_t disk, Measured *m) {
    Prediction predicted = p->predicted;
    text_add(line, "{\"event\":\"end\",\"memory\":{\"predicted\":");
    json_add_memory(line, predicted.memory, predicted.host);
    text_add(line, ",\"measured\":");
    json_add_memory(line, memory_taken, m->host);
    json_add_field(line, "mean", (double)m->mean_device);
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
    json_add_pair(line, "tflops", plan_tflops(p, predicted.step_s),
                  plan_tflops(p, m->step_ms / 1000));
    json_add_pair(line, "idle", predicted.idle, m->idle);
    json_add_field(line, "overhead", m->overhead);
    json_add_field(line, "energy_j", m->joules);
}
// Returns the device memory of a rank, the mean of all, in bytes. All ranks call it.
static inline int64_t mean_device_bytes(Comm *comm) {
    const double mine = (double)memory_device(memory_taken);
    double *all = new_array(double, comm->ranks, "memory of ranks"), sum = 0;
    comm_all_gather_small(comm, &mine, all, sizeof mine);
    for (int r = 0; r < comm->ranks; r++) { sum += all[r]; }
    free(all);
    return (int64_t)(sum / comm->ranks);
}
// Returns what was measured in `steps` steps since the counters were reset. files: [2] of the run.
// All ranks call it.
static inline Measured measured_run(const Store *store, const DiskFile *files, Comm *comm,
                                    bool hides, int64_t steps, Spent spent, double joules) {
    const int64_t each = max_i64(steps, 1);
    const bool hides_moves = hides && store->plan.host[STATE_PARAMETERS].held;
    Measured m = {};
    for (int k = 0; k < COMM_KINDS * LINK_KINDS; k++) {
        const int64_t bytes = comm->bytes[k / LINK_KINDS][k % LINK_KINDS] / each;
        m.traffic[k / LINK_KINDS][k % LINK_KINDS] = hides ? (int64_t)privacy_rounded(bytes) : bytes;
    }
    const int64_t in = store->flight.copied.to_device / each,
                  out = store->flight.copied.to_host / each;
    // parameters move in each micro-step, whose number is private
    const OffloadFacts offload = {.bytes = memory_on_host,
                                  .in = hides_moves ? (int64_t)privacy_rounded(in) : in,
                                  .out = hides_moves ? (int64_t)privacy_rounded(out) : out,
                                  .disk = files[0].taken + files[1].taken,
                                  .read = store->flight.disk_read / each,
                                  .written = store->flight.disk_written / each};
    m.steps = steps;
    m.offload = offload;
    m.host = host_bytes("VmHWM:");
    m.mean_device = mean_device_bytes(comm);
    m.step_ms = 1000 * spent.steps_s / max_i64(spent.steps, 1);
    m.idle = steps ? spent.waiting_s / spent.steps_s : 0;
    m.overhead = steps ? spent.report_s / spent.steps_s : 0;
    m.joules = joules;
    if (hides) {
        m.host = (size_t)privacy_rounded((double)m.host); // the largest batch touched most of it
        m.step_ms = privacy_rounded(m.step_ms);
        m.idle = privacy_rounded(m.idle);
        m.overhead = privacy_rounded(m.overhead);
        m.joules = NAN;
    }
    return m;
}
// The rows of the table at the end. What is 0 in both columns has no row.
static inline void print_pair(const char *name, const char *predicted, const char *measured) {
    printf("  %-30s %14s %14s\n", name, predicted, measured);
}
static inline void print_bytes_pair(const char *name, double predicted, double measured) {
    if (predicted + measured > 0) {
        print_pair(name, readable_column(predicted).at, readable_column(measured).at);
    }
}
static inline void print_end(const Plan *plan, Measured *m) {
    const Prediction *p = &plan->predicted;
    print_pair("rank 0", "predicted", "measured");
    if (m->steps) {
        const bool alone = plan->machine->ranks->n == 1;
        char idle[2][32];
        snprintf(idle[0], sizeof idle[0], "%.1f %%", 100 * p->idle);
        snprintf(idle[1], sizeof idle[1], "%.1f %%", 100 * m->idle);
        const double measured = m->step_ms / 1000;
        const bool holds = prediction_holds(p->step_s, measured);
        print_pair("step", holds ? readable_step(p->step_s).at : "(machine busy)",
                   readable_step(measured).at);
        print_pair("TFLOP/s of a rank",
                   holds ? readable_tflops(plan_tflops(plan, p->step_s)).at : "",
                   readable_tflops(plan_tflops(plan, measured)).at);
        if (!alone) { print_pair("waiting for messages", idle[0], idle[1]); }
    }
    for (int k = 0; k < MEMORY_KINDS; k++) {
        print_bytes_pair(memory_names[k], p->memory[k], memory_taken[k]);
    }
    print_bytes_pair("device", memory_device(p->memory), memory_device(memory_taken));
    print_bytes_pair("host", p->host, m->host);
    print_bytes_pair("of it offloaded states", p->offloaded, p->offloaded ? memory_on_host : 0);
    for (int k = 0; k < COMM_KINDS * LINK_KINDS && m->steps; k++) {
        const int kind = k / LINK_KINDS, link = k % LINK_KINDS;
        char name[64];
        snprintf(name, sizeof name, "%s %s", comm_kind_names[kind], link_places[link]);
        print_bytes_pair(name, p->traffic[kind][link], m->traffic[kind][link]);
    }
}
// Reports predicted against measured values after step `step`. disk: predicted bytes of the files.
static inline void report_end(const Plan *plan, Measured *m, int64_t disk, Privacy *privacy,
                              int64_t step, Log *log) {
    log_break(log);
    print_end(plan, m);
    TextBuffer line = {NULL, 0, 0};
    json_add_end(&line, plan, disk, m);
    json_add_privacy(&line, privacy, step);
    log_object(log, &line);
}

// Prints that the learning rate of the next step is above that of the checkpoint's last one, as
// where a run whose rate has fallen goes on for more steps: the same schedule, drawn out, is higher
// there.
static inline void print_rate_rise(const Options *o, const Progress *p, int64_t steps) {
    const double before = p->lr, next = learning_rate(o, p->step, steps);
    const bool muon = !strcmp(optimizers[o->optimizer].name, "muon"), warm = o->warmup > p->step;
    // a warm-up that goes on also rises, but from the same rate
    const double lower = fmin(next, learning_rate(o, p->step - 1, steps));
    if (p->step >= steps || !(lower > 1.01 * before)) { return; }
    const Text of_muon = text_of(" --muon-lr %.3g", o->muon_lr * before / o->lr);
    const Text ends = text_of(": its schedule now ends at step %" PRId64, steps);
    printf("note: the learning rate goes back up, from %.3g at step %" PRId64 " to %.3g%s. To stay "
           "at the rate that was reached, give --lr %.3g --lr-schedule constant%s%s\n",
           before, p->step, next, rate_is_constant(o) ? "" : ends.at, before,
           warm ? " --warmup 0" : "", muon ? of_muon.at : "");
}
static inline void report_resumed(const char *path, const Progress *p, const Config *c) {
    const char *compute = dtype_name(ops_compute());
    const int64_t steps = c->steps;
    printf("resumed from %s: step %" PRId64 "\n", path, p->step);
    if (steps && steps < p->step) {
        printf("note: it has more than the run's %" PRId64 " steps: nothing is trained\n", steps);
    }
    print_rate_rise(&c->options, p, steps);
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
    printf("stopped at step %" PRId64 ". To go on:", step);
    if (HAS_MPI) { printf(" %smpirun -np %d", root_needs(), ranks); }
    for (int i = 0; i < argc; i++) {
        if (!is_key_word(argv, i)) { print_shell_word(argv[i]); }
    }
    printf("%s\n", resumes ? "" : " --resume 1");
}

#endif
