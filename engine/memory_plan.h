// memory_plan.h: plans where the states of a run will be stored, and how much memory they will
// need: for the model that the run begins with, and for the delinked model that follows, if any.
// All of this happens before anything is allocated.
//
// Order  The store and its schedules are planned with all states on the device. What exceeds the
//        device's budget is offloaded to the host, what exceeds the host's budget to the disk
//        (offload.h), and store and schedules are planned again. The model that follows
//        (forecast_delinked) is planned in the same way, its needs are noted, and its plan is
//        freed. So a model that does not fit is known before the first step, and the delinking
//        (train_gpt.c: delink) finds the same plan again.
// Disk   Two files are used in turns, by models of even and odd number. Each is as long as the
//        largest need of its models (state/disk.h).
#ifndef MEMORY_PLAN_H
#define MEMORY_PLAN_H

#include "engine/trainer.h" // the state of a run
#include "offload.h"        // which states are offloaded

static inline void setup_store(Trainer *t) {
    const Options *o = &t->options;
    const bool accumulates = t->plan.placement.stages > 1
                                 ? t->most_samples > t->plan.micro_rows
                                 : ceil_div(t->most_samples, t->ranks->n) > t->shape.rows;
    ZeroPolicy policy = zero_policy(o, accumulates, t->shape.clip.again);
    if (t->cyclic.rule) { policy.p2p = &t->p2p; }
    if (t->offload.host) { policy.offload = &t->offload; }
    t->store = store_plan(&t->model, t->ranks, &t->plan.placement, policy, t->dtype,
                          (DType)o->reduce_dtype, &optimizers[o->optimizer]);
    t->store.stochastic = o->stochastic_rounding;
    t->store.seed = (uint64_t)o->seed;
    t->store.file = &t->files[t->number];
}
static inline void setup_schedule(Trainer *t) {
    t->program = make_program(t, t->samples, true);
    t->evaluation = make_program(t, t->samples, false);
    t->shape.stash = t->evaluation.map.stash;
    const int me = t->ranks->me % t->program.ranks;
    t->shape.limits = limits_of_both(t->cyclic.rule ? t->shape.limits : t->program.limits[me],
                                     t->evaluation.limits[me]);
    if (t->cyclic.rule) {
        // all ranks have the same program
        if (t->ranks->me == 0) { cyclic_check(&t->program, &t->cyclic, &t->model); }
    } else {
        schedule_check(&t->program);
    }
    // the fewest and most samples that a private step may draw
    const int64_t extremes[] = {0, t->most_samples};
    for (int i = 0; t->privacy.on && !t->cyclic.rule && i < 2; i++) {
        Program p = make_program(t, extremes[i], true);
        t->shape.limits = limits_of_both(t->shape.limits, p.limits[t->ranks->me % p.ranks]);
        schedule_check(&p);
        program_free(&p);
    }
}

// Collects what predictions and reports of the run need.
static inline RunFacts run_facts(Trainer *t) {
    RunFacts facts = {&t->options,     &t->model,         &t->comm,
                      &t->cluster,     t->ranks,          &t->program,
                      &t->rates,       &t->predicted,     &t->train,
                      &t->store,       t->stream.threads, t->samples,
                      t->most_samples, t->steps,          t->shape,
                      &t->privacy,     &t->cyclic,        t->later.parameters ? &t->later : NULL,
                      t->files,        &t->given};
    return facts;
}

// Returns what --offload allows. Activations stay on the device if samples are clipped (which may
// overwrite them), or if weight parts wait. With recomputation a block's input is offloaded instead
// of the activations inside; a stage's first block has received its input, so it is left out.
static inline OffloadScope offload_scope(const Trainer *t) {
    const Options *o = &t->options;
    const bool waits = t->plan.placement.stages > 1 && t->plan.kind == PIPELINE_ZERO_BUBBLE,
               automatic = o->offload == OFFLOAD_AUTO;
    const bool stay = t->shape.clip.on || waits;
    const int64_t block = (int64_t)executor_stash_bytes(&t->shape, &t->model);
    const int first = t->shape.first + (o->recompute == RECOMPUTE_BLOCK);
    const OffloadScope scope = {&t->store,
                                automatic || o->offload >= OFFLOAD_PARAMS,
                                !stay && (automatic || o->offload == OFFLOAD_ALL),
                                block,
                                t->shape.limits.in_flight,
                                first,
                                t->shape.end};
    return scope;
}
// Plans the store and its schedules again, after a change of what is offloaded.
static inline void plan_again(Trainer *t) {
    store_free(&t->store);
    program_free(&t->program);
    program_free(&t->evaluation);
    setup_store(t);
    setup_schedule(t);
}
// Returns the bytes by which host memory would exceed its budget with nothing on disk. SLACK allows
// for what the process still allocates before its memory is checked (check_budgets).
static inline double host_excess(const Trainer *t) {
    const size_t SLACK = 1 << 20, states = store_host_bytes(&t->store) +
                                           store_scratch_bytes(&t->store) +
                                           executor_stash_all(&t->shape, &t->model);
    const OffloadScope scope = offload_scope(t);
    return (double)(t->resident + t->passing) + (double)(SLACK + states) +
           (double)offload_disk_frees(&scope, &t->offload) -
           option_size("host-memory", t->options.host_memory);
}
// Of the offloaded states, puts on disk what exceeds the host's budget, or, without a budget,
// everything.
static inline void place_on_disk(Trainer *t) {
    if (!t->offload.disk) {
        t->offload.disk = (unsigned char *)checked_calloc((size_t)t->model.storages, 1, "offload");
    }
    const bool all = !*t->options.host_memory || (t->spilled && share_is(t->model.share));
    const double excess = host_excess(t);
    const OffloadScope scope = offload_scope(t);
    if (all) { offload_all(offload_host(&t->offload, &scope)); }
    do {
        if (!all) { offload_fill(offload_host(&t->offload, &scope), excess); }
    } while (offload_agree(t->offload.disk, &t->comm, t->model.storages));
    plan_again(t);
}
// Notes the disk space that this model, the number-th of the run, needs. The first model that needs
// any measures the disk's rate.
static inline void note_disk(Trainer *t, int number) {
    if (!t->offload.disk) { return; }
    t->file_bytes[number] = max_i64(t->file_bytes[number], store_disk_bytes(&t->store));
    RunFacts facts = run_facts(t);
    if (!t->cluster.nodes) { check_disk(&facts, t->file_bytes[0] + t->file_bytes[1]); }
    if (!(t->rates.disk_bytes_per_s < (double)INFINITY)) {
        measure_disk(&t->rates, &t->cluster, &t->store, &t->comm);
    }
}
static inline void setup_disk(Trainer *t) {
    t->resident = (int64_t)host_bytes("VmRSS:");
    t->rates.disk_bytes_per_s = (double)INFINITY;
    place_on_disk(t);
    note_disk(t, 0);
}
static inline void replace_on_disk(Trainer *t) {
    place_on_disk(t);
    if (!t->cluster.nodes) { store_join(&t->store, &t->comm); }
}
// Puts more states on disk if the budget requires it: timing has made the process larger.
static inline void setup_disk_again(Trainer *t) {
    const OffloadScope scope = offload_scope(t);
    t->resident = (int64_t)host_bytes("VmRSS:");
    if (t->offload.disk && comm_agree_max(&t->comm, host_excess(t) > (double)offload_disk_frees(
                                                                         &scope, &t->offload))) {
        replace_on_disk(t);
    }
}
// Chooses which states are offloaded to the host, given a plan with all states on the device, and
// plans again.
static inline void place_offload(Trainer *t) {
    const Options *o = &t->options;
    size_t memory[MEMORY_KINDS];
    RunFacts facts = run_facts(t);
    predict_memory(&facts, t->shape.rows, o->recompute == RECOMPUTE_BLOCK, memory);
    const double excess =
        (double)memory_device(memory) - option_size("device-memory", o->device_memory);
    const ZeroPolicy *policy = &t->store.policy;
    t->offload.host = (unsigned char *)checked_calloc((size_t)t->model.storages, 1, "offload");
    t->offload.storages = t->model.storages;
    t->offload.gradients =
        o->offload == OFFLOAD_AUTO && !t->privacy.on && !policy->quantized_gradients;
    t->offload.delays = o->offload_delay;
    t->offload.folder = o->offload_dir;
    const OffloadScope scope = offload_scope(t);
    if (o->offload >= OFFLOAD_OPTIMIZER) {
        offload_all(offload_device(&t->offload, &scope));
        offload_keep_gradients(&t->offload, &t->store);
    }
    do {
        offload_fill(offload_device(&t->offload, &scope), excess);
    } while (offload_agree(t->offload.host, &t->comm, t->model.storages));
    plan_again(t);
}
// Sets up offloading. Whether the CPU or the device updates offloaded states is decided once for
// the run.
static inline void setup_offload(Trainer *t) {
    const Options *o = &t->options;
    if (!options_offloads(o)) { return; }
    measure_offload(&t->rates, &t->cluster, &t->stream);
    int cpu_update = o->offload_delay ? 1
                     : o->offload_update == UPDATE_AUTO
                         ? offload_host_is_faster(&t->rates, &t->store)
                         : o->offload_update == UPDATE_HOST;
    comm_broadcast(&t->comm, &cpu_update, sizeof cpu_update, 0);
    t->offload.cpu_update = cpu_update;
    place_offload(t);
    if (*o->offload_dir) { setup_disk(t); }
    if (!t->cluster.nodes) { store_join(&t->store, &t->comm); }
}

// Plans another model in place of the current one, whose plans the caller keeps: the store, its
// schedules, what is on the host and on disk. passing: bytes of host memory that the previous
// model's states take while they are converted. Repeated calls give the same plan.
static inline void plan_model(Trainer *t, GptModel model, size_t passing) {
    t->model = model;
    t->offload.host = t->offload.disk = NULL;
    t->passing = (int64_t)passing;
    setup_store(t);
    setup_schedule(t);
    if (options_offloads(&t->options)) { place_offload(t); }
    if (t->offload.host && *t->options.offload_dir) { place_on_disk(t); }
}
// Predicts what the delinked model that follows in this run will need, and restores the current
// plan.
static inline void forecast_delinked(Trainer *t) {
    const GptModel now = t->model;
    const Store store = t->store;
    const Program program = t->program, evaluation = t->evaluation;
    const ExecutorShape shape = t->shape;
    const Offload offload = t->offload;
    const size_t passing = delink_host_bytes(&store, t->options.delink_moments);
    plan_model(t, gpt_model(now.config), passing);
    note_disk(t, 1);
    RunFacts facts = run_facts(t);
    facts.predicted = &t->later;
    predict(&facts);
    t->later.passing = passing;
    t->later.host += passing;
    needs_add(&t->needs, &t->later);
    if (!t->options.dry_run && !t->options.show_schedule) { check_memory(&facts); }
    store_free(&t->store);
    program_free(&t->program);
    program_free(&t->evaluation);
    free(t->offload.host);
    free(t->offload.disk);
    t->passing = 0;
    t->model = now;
    t->store = store;
    t->program = program;
    t->evaluation = evaluation;
    t->shape = shape;
    t->offload = offload;
}
// Predicts what the run will need: this model, and the one that follows.
static inline void forecast_run(Trainer *t) {
    RunFacts facts = run_facts(t);
    memset(&t->needs, 0, sizeof t->needs);
    memset(t->file_bytes, 0, sizeof t->file_bytes);
    predict(&facts);
    needs_add(&t->needs, &t->predicted);
    note_disk(t, 0);
    if (options_switches(&t->options) && share_is(t->model.share) &&
        !options_ends_shared(&t->options)) {
        forecast_delinked(t);
    }
    t->predicted.disk = t->file_bytes[0] + t->file_bytes[1];
}
// If the host cannot hold the states of two models during delinking, puts those of the shared model
// on disk. Returns true if the plans changed.
static inline bool spill_to_disk(Trainer *t) {
    RunFacts facts = run_facts(t);
    const double host = most_of_ranks(&facts, t->needs.host);
    if (!t->offload.disk || !t->later.parameters ||
        host <= option_size("host-memory", t->options.host_memory)) {
        return false;
    }
    t->spilled = true;
    replace_on_disk(t);
    return true;
}

#endif
