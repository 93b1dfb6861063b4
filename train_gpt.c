// train_gpt: pretrains GPT models. One program:
//
//     mpirun -np RANKS ./train_gpt [--flag value ...]
//
// Reading order: this file from the bottom (main is the recipe) to the top; then the folders in the
// order of docs/source.md, which says what each file is for. A folder is a layer: a file includes
// only files of its own folder and of those below it. train_gpt.cu adds the GPU's operations, and
// includes this file.
#ifndef OPS_IMPLEMENTATION // train_gpt.cu defines its own
#include "comm/comm.h"
#include "ops/cpu/ops_cpu.h"
// Allocates the staging memory for collectives over up to `elements` fp32 elements, sent as `wire`.
// Records of bytes and messages between two ranks need none, since MPI reads and writes the CPU's
// memory. Every rank calls it once.
static void transport_open(Comm *c, Stream *s, DType wire, int64_t elements, size_t records,
                           const CommTraffic *traffic) {
    size_t bytes = comm_staging_bytes(&c->everyone, wire, elements, COMM_STAGING_BYTES);
    (void)s;
    (void)records;
    (void)traffic;
    comm_allocate(c, bytes ? memory_take(MEMORY_BUFFERS, bytes, "messages") : NULL, bytes);
}
#endif
#include "base/base.h"
#include "base/files.h"
#include "base/process.h"
#include "base/spin.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/folders.h"
#include "checkpoint/huggingface.h"
#include "checkpoint/huggingface_config.h"
#include "checkpoint/huggingface_tokenizer.h"
#include "checkpoint/manifest.h"
#include "checkpoint/model_file.h"
#include "cli/option_parser.h"
#include "cli/outputs.h"
#include "cli/version.h"
#include "comm/group.h"
#include "comm/progress.h"
#include "comm/records.h"
#include "cyclic.h"
#include "dataloader.h"
#include "dp.h"
#include "executor/activations.h"
#include "executor/compute.h"
#include "executor/overlap.h"
#include "model/gpt.h"
#include "ops/noise.h"
#include "ops/ops.h"
#include "options.h"
#include "pipeline.h"
#include "plan/budgets.h"
#include "plan/cluster.h"
#include "plan/memory_plan.h"
#include "plan/option_pairs.h"
#include "plan/plan.h"
#include "plan/plan_make.h"
#include "plan/rates.h"
#include "plan/sizes.h"
#include "plan/system.h"
#include "planner/auto_stages.h"
#include "planner/fit.h"
#include "planner/fit_answer.h"
#include "planner/plan_answer.h"
#include "privacy/accountant.h"
#include "privacy/privacy.h"
#include "pseudo.h"
#include "report/log.h"
#include "report/privacy_report.h"
#include "report/profile.h"
#include "report/report.h"
#include "report/tensorboard.h"
#include "run/between_steps.h"
#include "run/data.h"
#include "run/matmul_choices.h"
#include "run/privacy_ledger.h"
#include "run/prompt.h"
#include "cli/read_model.h"
#include "run/trainer.h"
#include "schedule/schedule.h"
#include "state/disk.h"
#include "state/gather.h"
#include "state/layout.h"
#include "state/planned.h"
#include "state/store.h"
#include "state/update.h"
#include "text/tokenizer.h"

// What main makes, in this order, each part from those above it.
typedef struct {
    int argc;
    char **argv;
    char command[8192]; // the command line, for the manifest
    Comm comm;
    Stream stream;
    Config config;         // what is asked
    ModelSpec spec;        // of which model
    HfKept kept;           // of the model's folder, for --export
    Data data;             // with which data
    Machine machine;       // on which ranks
    RunPlans plans;        // what will happen
    Run run;               // what happens
    MatmulChoices matmuls; // algorithms of the device's library
    FILE *answers;         // where --prompt prints: standard output; NULL: nowhere
} Job;

// -------------------------------------------------------------------------------------------------
// What is asked, and the plans

// Sets the ranks that the plan is for: those of the run, or those of --cluster.
static void choose_ranks(Machine *m, const Options *o, const Comm *comm) {
    m->cluster = cluster_parse(o->cluster);
    m->ranks = &comm->everyone;
    if (m->cluster.nodes) {
        m->cluster_ranks = cluster_group(&m->cluster);
        m->ranks = &m->cluster_ranks;
    }
}
// Takes nothing of this machine into the forecast for --cluster: products are in the model's dtype,
// and a rank has the threads that are asked for. Nothing is computed here.
static void forecast_elsewhere(Job *j) {
    ops_compute_in(j->spec.dtype);
    j->machine.threads = (int)max_i64(1, j->config.options.threads);
}
// Opens the device for the model, and binds threads to the cores that are near it.
static void open_device(Job *j) {
    ops_open(&j->stream, j->comm.local_rank, j->spec.dtype);
    // All ranks compute alike, on different CPUs too.
    ops_compute_in(comm_agree_max(&j->comm, ops_compute() == DTYPE_FP32) ? DTYPE_FP32 : DTYPE_BF16);
    if (j->stream.device) { // start() did not know the device yet
        char near_cores[256];
        ops_near_cores(near_cores, sizeof near_cores);
        j->stream.threads = comm_bind_to_cores(&j->comm, j->config.options.threads, near_cores);
    }
    j->machine.threads = j->stream.threads;
    if (j->machine.cluster.nodes) { forecast_elsewhere(j); }
}
// --pipeline auto and --plan: the planner measures, prints its choice, and writes it into the
// configuration.
static void choose_stages_of_model(Job *j) {
    Config *c = &j->config;
    const Options *o = &c->options;
    if (o->plan && !o->json && j->comm.rank == 0) {
        sizes_print(c, planner_tokens(o, j->machine.ranks->n));
    }
    plan_run(c, &j->spec, &j->machine, &j->comm, &j->stream, &j->machine.rates);
}
// Decides which units each rank computes.
static void choose_stages(Job *j) {
    Options *o = &j->config.options;
    PipelinePlan *p = &j->config.pipeline;
    if (options_plans(o)) {
        choose_stages_of_model(j);
        return;
    }
    p->depth = INT64_MAX;
    p->placement = pipeline_placement(o->pipeline, j->spec.model.units, j->machine.ranks->n);
    p->kind = (PipelineKind)o->pipeline_schedule;
    p->warmup = (Warmup)o->pipeline_warmup;
    p->recompute = o->recompute == RECOMPUTE_BLOCK;
}
// --fit, and --plan and --pipeline auto of models with experts: chooses the flags. The samples of a
// step are those of the flags as they are.
static void choose_flags(Job *j) {
    Config *c = &j->config;
    Options *o = &c->options;
    const int ranks = j->machine.ranks->n;
    c->pipeline.placement =
        pipeline_placement(options_plans(o) ? "1" : o->pipeline, j->spec.model.units, ranks);
    c->pipeline.depth = INT64_MAX;
    c->samples = config_samples(c, &j->spec.model, ranks);
    placement_free(&c->pipeline.placement);
    fit_run(c, &j->machine, &j->spec, &j->comm, &j->stream, o->fit ? fit_print : fit_print_plan);
    j->spec.model = gpt_model_divided(&j->spec.model, o->expert_parallel, o->moe_buffer);
    c->given.at[OPTION_INDEX_expert_parallel] = true; // from now on
}
// Returns whether --dry-run can tell what a private run promises: its training data is here, and no
// checkpoint says how it goes on.
static bool forecasts_privacy(const Config *c) {
    const Options *o = &c->options;
    glob_t names;
    if (!o->dry_run || !o->steps || o->resume || !options_private(o, &c->given)) { return false; }
    const bool found = !data_glob(o->train, &names);
    globfree(&names);
    return found;
}
// Returns the last step of a run: --steps, or how far one pass over the data goes from here.
static int64_t last_step(const Config *c, const Dataset *train, const Progress *p) {
    if (c->options.steps >= 0) { return c->options.steps; }
    return p->step + max_i64(train->windows - p->position, 0) / c->samples;
}
// Chooses what the flags leave open, and opens the data. --dry-run opens none, but for
// forecasts_privacy().
static void configure(Job *j) {
    Config *c = &j->config;
    Options *o = &c->options;
    const int ranks = j->machine.ranks->n;
    choose_stages(j);
    c->samples = config_samples(c, &j->spec.model, ranks);
    if (o->cyclic) { // a resumed private run must use the same number of stages
        CyclicPlan cyclic = cyclic_plan(o, &j->spec.model, ranks, c->samples, o->micro_batch);
        o->cyclic_stages = cyclic.N;
        cyclic_free(&cyclic);
    }
    const bool runs = !o->dry_run && !o->show_schedule;
    if (runs || forecasts_privacy(c)) { j->data = open_data(c, &j->spec, !runs); }
    const Dataset *train = &j->data.train;
    const Progress begin = {};
    const int64_t steps = last_step(c, train, &begin);
    if (runs && steps == 0 && o->steps) {
        die(EXIT_INPUT, "give --steps N, more data or a smaller --batch-tokens",
            "--steps -1 is one epoch: a step of %" PRId64 " samples is more than the %" PRId64
            " windows of --train %s",
            c->samples, train->windows, o->train);
    }
    if (runs) { c->steps = steps; }
    if (o->steps) { // without training there is nothing to protect
        privacy_check_delta(o, o->dp_unit == DP_DOCUMENT ? train->documents : train->windows);
        c->privacy = privacy_plan(o, &c->given, train->windows, c->samples,
                                  train->windows ? steps : 0, &j->comm);
    }
}
// Opens the messages that a plan needs, and the groups with which links are measured. All ranks
// call it.
static void connect_ranks(Machine *m, const Plan *plan, Comm *comm, Stream *stream) {
    const StatePlan *s = &plan->store;
    CommTraffic traffic =
        executor_traffic(&plan->model, &plan->shape, &plan->pipeline.placement, comm->rank,
                         &plan->program, &plan->evaluation, cyclic_turns(&plan->cyclic));
    transport_open(comm, stream, s->wire, store_most_elements(s), s->exchange_bytes, &traffic);
    free(traffic.peers);
    memcpy(m->taken, memory_taken, sizeof m->taken);
    m->world = process_group_of_all(m->ranks);
    process_group_join(comm, &m->world);
}
// Plans the run: first with all states on the device, which says what messages there will be; with
// these the machine is measured; then within its budgets.
static void plan_job(Job *j) {
    Machine *m = &j->machine;
    Plan *draft = plan_make(&j->config, m, &j->spec);
    if (!m->cluster.nodes) { connect_ranks(m, draft, &j->comm, &j->stream); }
    find_rates(&m->rates, &m->cluster, &j->stream, &j->comm, &m->world, j->spec.dtype);
    j->plans.first = draft;
    j->plans.asked = &j->spec;
    plan_within_budgets(&j->plans, &j->config, m, &j->comm, &j->stream);
}

// -------------------------------------------------------------------------------------------------
// Opening a run: memory, weights, privacy

static void open_executor(Run *r) {
    const Plan *p = r->plan;
    const Options *o = run_options(r);
    const int rank = r->comm->rank;
    size_t unused[2];
    r->executor = executor_plan(&p->model, p->shape, &unused[0], &unused[1]);
    Program longest = plan_program(p, p->most_samples, true);
    const int micro_batches = (int)max_i64(longest.micro_batches, p->evaluation.micro_batches);
    int64_t first, mine = max_i64(schedule_rows(&longest.rank[rank], &first),
                                  schedule_rows(&p->evaluation.rank[rank], &first));
    mine = max_i64(mine, p->cyclic.rule ? r->privacy.most_of_part : 0);
    // this rank may get more of a smaller batch than of the largest one
    mine =
        max_i64(mine, p->pipeline.placement.stages > 1 ? p->most_samples
                                                       : ceil_div(p->most_samples, r->comm->ranks));
    executor_allocate(&r->executor, &p->program.map, &r->store, r->comm, r->stream, p->most_samples,
                      mine, micro_batches);
    executor_follow(&r->executor, &longest, &p->program.map, p->cyclic.rule ? &p->cyclic : NULL);
    executor_follow(&r->executor, &p->evaluation, &p->evaluation.map, NULL);
    if (p->cyclic.rule) {
        overlap_open(&r->executor, &longest, &p->cyclic, o->grad_clip,
                     o->cyclic_clip ? o->grad_clip / sqrt((double)p->model.storages) : 0);
    }
    // ranks that take turns have run every kind of schedule after N steps
    int actions = longest.rank[rank].count;
    for (int step = 1; step < p->cyclic.N; step++) {
        actions = (int)max_i64(actions, step_schedule(r, step)->count);
    }
    r->profile = profile_make(o, actions);
    program_free(&longest);
}
// Takes the memory of the states that the plan says. All ranks call it.
static void open_states(Run *r, DiskFile *file) {
    const Plan *p = r->plan;
    r->store.memory.file = file;
    r->stream->workspace_bytes = executor_workspace_bytes(&p->model, &p->shape, r->stream->threads);
    r->stream->workspace = memory_take(MEMORY_BUFFERS, r->stream->workspace_bytes, "workspace");
    store_allocate(&r->store, r->comm, r->stream);
}
// Opens a run of a plan: takes the memory and disk space that it says, and nothing more. The plan's
// store belongs to the run from then on. All ranks call it.
static void run_open(Run *r, const RunPlans *plans, Job *j) {
    r->plan = plans->first;
    r->comm = &j->comm;
    r->stream = &j->stream;
    r->data = &j->data;
    r->journal.health.good = r->journal.health.saved = r->journal.health.validated = -1;
    r->privacy = j->config.privacy;
    r->store = store_of_plan(r->plan->store);
    r->progress.matmuls = &j->matmuls;
    if (*run_options(r)->out && r->comm->rank == 0) {
        snprintf(r->stop_file, sizeof r->stop_file, "%s/stop", run_options(r)->out);
    }
    store_join(&r->store.plan, r->comm);
    for (int i = 0; i < 2; i++) {
        disk_take_file(&r->files[i], run_options(r)->offload_dir, plans->file_bytes[i]);
    }
    open_states(r, &r->files[0]);
    open_executor(r);
    r->windows = new_array(int64_t, 2 * (size_t)drawn_words(r->plan), "samples");
}

// Fills the parameters: from a checkpoint, a model file, or the seed.
static void load_weights(Job *j) {
    Run *r = &j->run;
    const ModelSpec *spec = &j->spec;
    const Options *o = run_options(r);
    if (o->resume) {
        const Text path = checkpoint_resume(o->out, &r->store, &r->progress);
        r->first_step = r->journal.start_step = r->progress.step;
        r->journal.health.saved = r->progress.step;
        // a step may have another number of samples than before
        j->config.steps = j->plans.config.steps =
            last_step(&j->config, &j->data.train, &r->progress);
        if (r->comm->rank == 0) { report_resumed(path.at, &r->progress, r->plan->config); }
    } else if (spec->begun.units) {
        checkpoint_begin(o->model, &r->store, &spec->begun,
                         o->delink && o->delink_moments == DELINK_RESET, &r->progress);
    } else if (spec->huggingface) {
        huggingface_load(spec->file, &r->store);
    } else if (spec->file) {
        model_file_load(spec->file, &r->store, spec->file_dtype);
    } else {
        store_initialise(&r->store, o->seed);
        if (options_prompts(&r->plan->config->given) && r->comm->rank == 0) {
            fprintf(stderr, "warning: --prompt has new weights, which nothing has trained: those "
                            "of a run are in --model OUT, or with --resume 1 in --out\n");
        }
    }
}
// Notes what products depend on: of rank 0 for checkpoints, of all ranks for private steps. All
// ranks call it.
static void note_products(Run *r) {
    Privacy *p = &r->privacy;
    char *now = p->arithmetic[1];
    Checksum sum = checksum_begin();
    snprintf(p->arithmetic[0], sizeof p->arithmetic[0], "%s", r->progress.products);
    ops_arithmetic(now, sizeof p->arithmetic[1]);
    checksum_add(&sum, now, strlen(now));
    const int mine = (int)(checksum_end(&sum) & 0x7fffffff);
    p->products = (uint64_t)comm_agree_min(r->comm, mine) << 32;
    p->products |= (uint64_t)comm_agree_max(r->comm, mine);
    snprintf(r->progress.products, sizeof r->progress.products, "%s", now);
}
// Notes the order of samples, and the tokenizer, for checkpoints; those of the checkpoint that the
// run resumes from are compared. Rank 0 needs it, which writes manifests.
static void note_data(Run *r) {
    Progress *p = &r->progress;
    const Tokenizer *t = &r->data->tokenizer;
    char *path = t->path ? realpath(t->path, NULL) : NULL;
    if (r->comm->rank) { return; }
    if (!r->privacy.on && run_options(r)->resume && r->plan->config->steps > p->step) {
        order_check(p->order, &r->data->train, p->position);
    }
    if (r->data->train.tokens) { order_text(&r->data->train, p->order, sizeof p->order); }
    if (path) {
        snprintf(p->tokenizer, sizeof p->tokenizer, "%d %016" PRIx64 " %s", t->id.vocab, t->id.hash,
                 path);
    }
    free(path);
}
// Starts the privacy guarantee, after the weights are loaded: a resumed run continues with the same
// noise and key, and with the privacy that was already spent.
static void begin_privacy(Run *r) {
    Privacy *p = &r->privacy;
    const Config *c = r->plan->config;
    if (p->on && r->comm->rank == 0 && *c->options.out) {
        p->data = dataset_checksum(&r->data->train);
    }
    note_products(r);
    note_data(r);
    p->restarts = c->restarts;
    privacy_begin(p, &c->options, &c->given, r->progress.privacy, r->progress.step, r->comm);
    r->end = min_i64(c->steps, privacy_allowed_steps(p));
    if (!p->on) { return; }
    r->store.plan.noise.on = true;
    r->store.plan.noise.deviation = (float)(p->sigma * p->clip);
    r->store.plan.noise.scale = (float)(1.0 / p->samples);
    memcpy(r->store.plan.noise.key, p->key, sizeof p->key);
    if (r->comm->rank == 0) {
        privacy_print_start(stdout, p);
        printf(
            "clipping   the arithmetic of norms leaves %.1f %% of the speed without privacy, at "
            "most; micro-steps of up to %" PRId64 " samples\n",
            100 * clip_speed_limit(&r->plan->shape.clip, &r->plan->model, (double)r->plan->shape.T),
            r->plan->shape.rows);
    }
}

// -------------------------------------------------------------------------------------------------
// Delinking: from shared blocks to separate ones, between two steps: a transition from the run of
// one plan to the run of another.

static bool delink_due(const Run *r) {
    const Options *o = run_options(r);
    return share_is(r->plan->model.share) && options_switches(o) &&
           r->progress.step >= o->delink_at;
}
// Shrinks the files on disk to what the new model needs, and frees the other model's file.
static void give_back_files(Run *r, RunPlans *plans) {
    disk_free_file(&r->files[0]);
    disk_cut_file(&r->files[1], store_disk_bytes(&r->store.plan));
    plans->file_bytes[0] = 0;
    plans->file_bytes[1] = store_disk_bytes(&r->store.plan);
}
// Frees everything on the device, then allocates it again. In between, the states are on the host
// or on disk.
static void delink(Run *r, RunPlans *plans) {
    Store before = r->store;
    const int64_t moments = run_options(r)->delink_moments;
    store_wait_all(&before);
    ops_wait(r->stream);
    executor_free(&r->executor);
    float **packed = delink_pack(&before, moments);
    comm_share_none(r->comm);
    store_leave_states(&before);
    ops_free(r->stream->workspace);
    memcpy(memory_taken, r->plan->machine->taken, sizeof memory_taken);
    r->plan = plans->later;
    r->store = store_of_plan(r->plan->store);
    store_join(&r->store.plan, r->comm);
    const size_t passing = memory_on_host;
    open_states(r, &r->files[1]);
    delink_states(&r->store, &before, packed, moments, &r->progress);
    store_free(&before);
    memory_on_host -= passing;
    give_back_files(r, plans);
    open_executor(r);
    if (r->comm->rank == 0) { report_delink(r->plan, r->progress.step, &r->journal.log); }
    store_wait_all(&r->store);
    comm_reset_counters(r->comm);
    memset(&r->journal.spent, 0, sizeof r->journal.spent);
    r->journal.start_step = r->progress.step;
}

// -------------------------------------------------------------------------------------------------
// The recipe

// Reads the flags, and finds this rank's place among the others.
static void start(Job *j, int argc, char **argv) {
    Options *o = &j->config.options;
    j->argc = argc;
    j->argv = argv;
    comm_start(&j->comm, &j->argc, &j->argv);
    if (print_help_or_version(j->argc, j->argv, j->comm.rank == 0)) {
        output_end(true);
        comm_end(&j->comm);
        exit(EXIT_DONE);
    }
    options_parse(o, &j->config.given, j->argc, j->argv);
    if (options_prompts(&j->config.given)) { j->answers = prompt_take_output(); }
    if (j->comm.rank == 0) { outputs_check(o); }
    comm_agree_environment(&j->comm);
    comm_place(&j->comm, (int)o->ranks_per_node);
    j->comm.timeout_s = o->watchdog;
    const int cores = omp_get_num_procs(); // before the rank is bound to its part of them
    j->stream.threads = comm_bind_to_cores(&j->comm, o->threads, NULL);
    spin_follow_load(j->stream.threads, cores);
    j->stream.progress = comm_progress;
    for (int i = 1, n = 0; i < j->argc && n < (int)sizeof j->command; i++) {
        n += snprintf(j->command + n, sizeof j->command - (size_t)n, "%s%s", i > 1 ? " " : "",
                      j->argv[i]);
    }
    // one line in the manifest
    for (char *c = j->command; *c; c++) { *c = *c < ' ' ? ' ' : *c; }
}
// Runs the modes that print and need no model. Returns true if the run was in such a mode.
static bool print_without_model(const Config *c, const Comm *comm) {
    const Options *o = &c->options;
    if (!(o->compat || *o->dp_account || (o->plan && *o->profile))) { return false; }
    if (comm->rank) { return true; }
    if (o->compat) {
        options_print_compat(stdout);
    } else if (o->plan) {
        planner_main(stdout, o, &c->given);
    } else {
        account_answer(stdout, o->dp_account, o->dp_accountant == DP_RDP,
                       o->dp_neighbours == DP_REPLACE_ONE, o->json);
    }
    return true;
}
// Prints the plan, for --dry-run and --show-schedule. memory: see print_start().
static void print_plan(const RunPlans *plans, Privacy privacy, const Data *data, const Comm *comm,
                       const MemoryHere *memory) {
    const Options *o = &plans->first->config->options;
    if (o->show_schedule) {
        show_schedule(plans->first);
    } else if (o->json) {
        TextBuffer line = {};
        json_add_start(&line, plans, &privacy, comm, memory);
        printf("%s}\n", line.text);
        free(line.text);
    } else {
        print_start(plans, &data->train, comm, memory);
    }
}
// The same. --dry-run of the ranks that there are ends the program as the run would
// (EXIT_RESOURCES) if they do not fit. All ranks call it.
static void answer_plans(const RunPlans *plans, Privacy privacy, const Data *data, Comm *comm) {
    const Options *o = &plans->first->config->options;
    const bool here = o->dry_run && !o->show_schedule && !*o->cluster;
    MemoryHere memory = {};
    if (here) { memory = memory_here(plans, comm); }
    if (comm->rank == 0) { print_plan(plans, privacy, data, comm, here ? &memory : NULL); }
    if (!here || memory.fits) { return; }
    output_flush();
    comm_barrier(comm); // what is printed comes before the message
    check_memory(plans->first, comm);
    if (plans->later) { check_memory(plans->later, comm); }
}

// Does what can still fail before memory is taken, then opens the run.
static void prepare(Job *j) {
    Run *r = &j->run;
    const Options *o = &j->config.options;
    const Plan *plan = j->plans.first;
    const bool first = j->comm.rank == 0, saves = *o->out && !options_prompts(&j->config.given);
    if (first) { print_start(&j->plans, &j->data.train, &j->comm, NULL); }
    check_memory(plan, &j->comm);
    if (privacy_hides(&j->config.privacy)) { files_time = time(NULL); }
    if (first && export_is_folder(o->export_file)) {
        huggingface_keep_tokenizer(&j->kept, &j->data.tokenizer, &plan->model);
    }
    const EventFile board = event_file_open(first ? o->tensorboard : "");
    if (saves && first) { out_folder_prepare(o->out, o->resume != 0); }
    const int error = saves && first ? tokenizer_keep(&j->data.tokenizer, o->out) : 0;
    if (error) {
        fprintf(stderr, "warning: --prompt will need --tokenizer: it is not copied to %s: %s\n",
                o->out, strerror(error));
    }
    r->journal.log = log_open(first ? o->log : "",
                              o->resume || j->config.restarts || options_prompts(&j->config.given));
    r->journal.log.board = board;
    comm_barrier(&j->comm);
    matmuls_choose(&j->matmuls, o, &plan->model, &plan->shape, j->machine.rates.flops_per_s,
                   &j->stream, &j->comm);
    run_open(r, &j->plans, j);
    load_weights(j);
    begin_privacy(r);
    store_wait_all(&r->store);
    TextBuffer line = {};
    if (first) {
        json_add_start(&line, &j->plans, &r->privacy, &j->comm, NULL);
        json_add_command(&line, j->argc, j->argv);
        log_object(&r->journal.log, &line);
    }
    r->journal.log.bar = progress_bar(r->end, r->first_step, plan->predicted.step_s, o->log_every,
                                      privacy_hides(&r->privacy));
    r->journal.energy = energy_meter("/sys/class/powercap");
    comm_reset_counters(&j->comm);
}

static void train(Run *r, RunPlans *plans, const char *command) {
    if (r->plan->cyclic.rule) { r->executor.overlap->first_step = r->first_step; }
    catch_signals(r);
    between_steps(r, command);
    while (r->progress.step < r->end && !r->stopping) {
        if (delink_due(r)) { delink(r, plans); }
        train_step(r);
        between_steps(r, command);
    }
    if (r->stopping && *r->stop_file && unlink(r->stop_file) && errno != ENOENT) {
        fprintf(stderr, "warning: cannot remove %s, which stops each run: %s\n", r->stop_file,
                strerror(errno));
    }
}

// Returns why the model of a run that is at its end is of no use, or NULL. All ranks call it.
static const char *diverged(Run *r) {
    const bool trained = r->progress.step > r->first_step;
    const Health *h = &r->journal.health; // as rank 0 knows
    int lost[] = {h->lost, h->stuck};
    if (comm_agree_max(r->comm, trained && !store_is_finite(&r->store))) {
        return "a weight is NaN or infinite";
    }
    comm_broadcast(r->comm, lost, sizeof lost, 0);
    if (lost[0]) { return "the last loss is not finite"; }
    return lost[1] ? "the last updates were skipped, because their gradients are not finite" : NULL;
}
// Reports, exports the model, and wipes the key. Ends the program (EXIT_RESOURCES) if a file could
// not be written, or the run has diverged.
static void finish(Job *j) {
    Run *r = &j->run;
    Journal *journal = &r->journal;
    const Options *o = &j->config.options;
    const int64_t step = r->progress.step;
    const bool first = j->comm.rank == 0;
    store_wait_all(&r->store);
    const Program *program = step_program(r, step - 1);
    r->save_failed |= !profile_report(&r->profile, &j->comm, program, o->trace, &journal->log);
    Measured measured =
        measured_run(&r->store, r->files, &j->comm, privacy_hides(&r->privacy),
                     step - journal->start_step, journal->spent, energy_joules(&journal->energy));
    if (first) {
        report_end(r->plan, &measured, j->plans.file_bytes[0] + j->plans.file_bytes[1], &r->privacy,
                   step, &journal->log);
    }
    const char *useless = diverged(r);
    const int error =
        *o->export_file && !useless ? export_write(o->export_file, &j->kept, &r->store) : 0;
    if (*o->export_file && useless && first) {
        fprintf(stderr, "warning: %s is not written: %s\n", o->export_file, useless);
    }
    if (error) {
        fprintf(stderr, "train_gpt: cannot write %s: %s\n", o->export_file, strerror(error));
        r->save_failed = true;
    }
    if (first) { privacy_print_statement(stdout, &r->privacy, step); }
    privacy_end(&r->privacy, o);
    noise_wipe(r->store.plan.noise.key, sizeof r->store.plan.noise.key);
    if (r->stopping && step < r->end && first && *o->out) {
        print_resume_command(step, j->comm.ranks, j->argc, j->argv,
                             o->resume || j->config.restarts);
    } else if (r->stopping && step < r->end && first) {
        printf("stopped at step %" PRId64 ". Nothing is saved: --out names no folder\n", step);
    }
    signal(SIGTERM, SIG_DFL); // so that the other ranks end in silence
    const bool failed = comm_agree_max(&j->comm, r->save_failed || journal->log.failed);
    if (useless && first) { health_give_up(r, useless); }
    if (failed && !useless) {
        die(EXIT_RESOURCES, "a warning above names what is missing, and why",
            "the run is at its end, but not all of its files could be written");
    }
}

// --resume 1 before the first checkpoint: the run starts from the beginning, as the crashed one
// did. Not if there is nothing to train: what is asked for is then in a checkpoint.
static void restart_without_checkpoint(Job *j) {
    Config *c = &j->config;
    Options *o = &c->options;
    const bool trains = o->steps && !options_prompts(&c->given);
    c->restarts = o->resume && trains && j->comm.rank == 0 && out_folder_has_none(o->out);
    comm_broadcast(&j->comm, &c->restarts, sizeof c->restarts, 0);
    if (!c->restarts) { return; }
    o->resume = 0;
    if (j->comm.rank || options_only_prints(o)) { return; }
    printf("note: --resume 1, but %s has no checkpoint yet: the run starts from the beginning\n",
           o->out);
}

// Config, plan, run, report.
static void perform(Job *j) {
    const Options *o = &j->config.options;
    restart_without_checkpoint(j);
    choose_ranks(&j->machine, o, &j->comm);
    j->spec = read_model(&j->config, &j->machine, &j->kept, &j->comm);
    open_device(j);
    if (options_searches(o)) { check_experts(&j->config, &j->spec.model); }
    if (fit_is_asked(o, &j->spec.model)) {
        choose_flags(j);
    } else if (o->plan) {
        choose_stages_of_model(j);
        placement_free(&j->config.pipeline.placement);
    }
    if (o->plan || (o->fit && o->dry_run)) { return; }
    configure(j);
    plan_job(j);
    if (options_only_prints(o)) {
        answer_plans(&j->plans, j->config.privacy, &j->data, &j->comm);
        return;
    }
    prepare(j);
    if (options_prompts(&j->config.given)) {
        answer_prompts(&j->run, j->answers);
    } else {
        train(&j->run, &j->plans, j->command);
    }
    finish(j);
}

int main(int argc, char **argv) {
    static Job job; // static: too large for some stacks
    spin_restart(argv);
    process_keep_streams();
    start(&job, argc, argv);
    if (!print_without_model(&job.config, &job.comm)) { perform(&job); }
    if (!job.answers) { output_end(options_only_prints(&job.config.options)); }
    comm_end(&job.comm);
    return EXIT_DONE;
}
