// memory_plan.h: the plans of a run within its budgets: of the model that the run begins with, and
// of the delinked model that follows, if any. All of this happens before anything is allocated.
//
// Order  A plan is made with all states on the device. What exceeds the device's budget is
//        offloaded to the host, what exceeds the host's budget to the disk (offload.h), and the
//        plan is made again with these choices. Ranks agree on each choice. So a model that does
//        not fit is known before the first step.
// Disk   Two files are used in turns, by models of even and odd number. Each is as long as the
//        largest need of its models (state/disk.h).
#ifndef MEMORY_PLAN_H
#define MEMORY_PLAN_H

#include "base/base.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "executor/activations.h"
#include "model/gpt.h"
#include "offload.h"
#include "ops/ops.h"
#include "options.h"
#include "pipeline.h"
#include "plan/budgets.h"
#include "plan/cluster.h"
#include "plan/plan.h"
#include "plan/plan_make.h"
#include "plan/rates.h"
#include "plan/system.h"
#include "plan/unit_times.h"
#include "pseudo.h"
#include "state/planned.h"
#include "state/policy.h"

typedef struct {
    Plan *first, *later;    // later: after delinking; NULL: the run does not delink
    const ModelSpec *asked; // of the first plan
    Config config;          // of the later plan
    ModelSpec spec;         // the same
    Needs needs;
    int64_t file_bytes[2]; // size that the file of each model needs
} RunPlans;

// Returns what --offload allows. Activations stay on the device if samples are clipped (which may
// overwrite them), or if weight parts or parts of a block wait. With recomputation a block's input
// is offloaded instead of the activations inside.
static inline OffloadScope offload_scope(const Plan *p) {
    const Options *o = &p->config->options;
    const bool waits =
        (p->pipeline.placement.stages > 1 && p->pipeline.kind == PIPELINE_ZERO_BUBBLE) ||
        p->program.map.parts > 1;
    const bool automatic = o->offload == OFFLOAD_AUTO, stay = p->shape.clip.on || waits;
    const OffloadScope scope = {
        .store = &p->store,
        .parameters = automatic || o->offload >= OFFLOAD_PARAMS,
        .activations = !stay && (automatic || o->offload == OFFLOAD_ALL),
        .block_bytes = (int64_t)executor_stash_bytes(&p->shape, &p->model),
        .in_flight = p->shape.limits.in_flight,
        .units = p->shape.units,
        .inputs = p->shape.recompute,
    };
    return scope;
}
// Makes a plan again, after a change of what it is made from.
static inline void plan_again(Plan **plan, const Config *c, const ModelSpec *spec) {
    const Machine *machine = (*plan)->machine;
    plan_free(*plan);
    *plan = plan_make(c, machine, spec);
}

// Offloads to the host what --offload names of a rank's states, and of the others what exceeds its
// device's budget by so many bytes. p: the rank's plan, with all states on the device.
static inline void choose_offload_of_rank(Config *c, const Plan *p, double excess) {
    const OffloadScope scope = offload_scope(p);
    if (c->options.offload >= OFFLOAD_OPTIMIZER) {
        offload_all(offload_tier(&c->offload, &scope, false));
        offload_keep_gradients(&c->offload, &p->store);
    }
    offload_until(offload_tier(&c->offload, &scope, false), excess);
}
// The same for the ranks of the other stages, where these are only predicted (--cluster, --fit).
static inline void choose_offload_of_stages(Config *c, const Plan *p, double budget) {
    StageStores stages = stage_stores_make(p);
    for (int i = 0; i < stages.stages; i++) {
        const Stage *stage = &p->pipeline.placement.stage[i];
        if (stage == p->stage) { continue; }
        const Plan other = plan_of_stage(p, stage, &stages.stores[i]);
        choose_offload_of_rank(c, &other, plan_stage_bytes(p, stage, &stages.stores[i]) - budget);
    }
    stage_stores_free(&stages);
}
// Chooses which states are offloaded to the host, given a plan with all states on the device. All
// ranks call it. comm NULL: a rank plans alone.
static inline void choose_offload(Config *c, const Plan *p, Comm *comm) {
    const Options *o = &c->options;
    const size_t n = p->model.storages;
    size_t memory[MEMORY_KINDS];
    predict_memory(p, p->shape.rows, p->shape.recompute, memory);
    const double budget = option_size("device-memory", o->device_memory),
                 excess = memory_device(memory) - budget;
    c->offload.host = new_array(unsigned char, n, "offload");
    c->offload.disk = NULL;
    c->offload.gradients =
        o->offload == OFFLOAD_AUTO && !c->privacy.on && !p->store.policy.quantized_gradients;
    c->offload.delays = o->offload_delay;
    c->offload.folder = o->offload_dir;
    do {
        choose_offload_of_rank(c, p, excess);
    } while (offload_agree(c->offload.host, comm, p->model.storages));
    if (p->machine->cluster.nodes) { choose_offload_of_stages(c, p, budget); }
}
// Returns the bytes by which host memory would exceed its budget with nothing on disk. SLACK allows
// for what the process still allocates before its memory is checked (check_budgets).
static inline double host_excess(const Plan *p) {
    const size_t SLACK = 1 << 20;
    return (double)(SLACK + plan_host_bytes(p)) + offload_disk_frees(&p->store) -
           option_size("host-memory", p->config->options.host_memory);
}
// Of the offloaded states, puts on disk what exceeds the host's budget; without a budget, or if
// `all`, everything. p: the plan as it is. All ranks call it.
static inline void choose_disk(Config *c, const Plan *p, bool all, Comm *comm) {
    const size_t n = p->model.storages;
    const OffloadScope scope = offload_scope(p);
    unsigned char *disk = new_array(unsigned char, n, "offload");
    if (c->offload.disk) { memcpy(disk, c->offload.disk, n); }
    free(c->offload.disk);
    c->offload.disk = disk;
    all = all || !*c->options.host_memory;
    const double excess = host_excess(p);
    if (all) { offload_all(offload_tier(&c->offload, &scope, true)); }
    do {
        if (!all) { offload_until(offload_tier(&c->offload, &scope, true), excess); }
    } while (offload_agree(c->offload.disk, comm, p->model.storages));
}

// Chooses what is offloaded, given a plan with all states on the device, and makes the plan again
// with it. Whether the CPU or the device updates offloaded states is decided once for the run
// (c->offload.cpu_update). All ranks call it. comm NULL: a rank plans alone.
static inline void plan_offloaded(Plan **plan, Config *c, const ModelSpec *spec, Comm *comm) {
    if (!options_offloads(&c->options)) { return; }
    choose_offload(c, *plan, comm);
    plan_again(plan, c, spec);
    if (!*c->options.offload_dir) { return; }
    choose_disk(c, *plan, false, comm);
    plan_again(plan, c, spec);
}
// Returns whether the CPU updates offloaded states.
static inline bool choose_updater(const Options *o, const Rates *rates, const StatePlan *s) {
    return o->offload_delay                   ? true
           : s->policy.matrices               ? false // the device makes them orthogonal
           : o->offload_update == UPDATE_AUTO ? offload_host_is_faster(rates, s)
                                              : o->offload_update == UPDATE_HOST;
}
// Measures what offloading costs, and decides who updates offloaded states.
static inline void measure_and_choose_updater(Config *c, const Plan *p, Rates *rates,
                                              Stream *stream, Comm *comm) {
    const Options *o = &c->options;
    if (!options_offloads(o)) { return; }
    if (!p->machine->cluster.nodes) { measure_offload(rates, stream); }
    int cpu_update = choose_updater(o, rates, &p->store);
    comm_broadcast(comm, &cpu_update, sizeof cpu_update, 0);
    c->offload.cpu_update = cpu_update;
}
// Ends the program (EXIT_INPUT) if what is predicted for --cluster moves states at a rate that is
// not given.
static inline void check_cluster_moves(const Options *o, const Cluster *c, const Prediction *p) {
    if (!*o->cluster) { return; }
    if (p->copied.to_device + p->copied.to_host + p->offloaded > 0) {
        cluster_need(c, CLUSTER_LINK);
        cluster_need(c, CLUSTER_HOST);
    }
    if (p->stored) { cluster_need(c, CLUSTER_DISK); }
}
// Notes the disk space that the number-th model of the run needs. The first model that needs any
// measures the disk's rate. All ranks call it.
static inline void note_disk(RunPlans *plans, int number, const Plan *p, Rates *rates, Comm *comm) {
    const Offload *o = p->store.policy.offload;
    if (!o || !o->disk) { return; }
    plans->file_bytes[number] = max_i64(plans->file_bytes[number], store_disk_bytes(&p->store));
    if (p->machine->cluster.nodes) { return; }
    check_disk(o->folder, plans->file_bytes[0] + plans->file_bytes[1], comm);
    if (!(rates->disk_bytes_per_s < INFINITY)) { measure_disk(rates, &p->store, comm); }
}
// Plans the delinked model that follows in this run.
static inline void plan_delinked(RunPlans *plans, Rates *rates, Comm *comm) {
    const Plan *now = plans->first;
    const Options *o = &now->config->options;
    plans->config = *now->config;
    plans->config.offload.host = plans->config.offload.disk = NULL;
    plans->config.delink_bytes = delink_host_bytes(&now->store, o->delink_moments);
    plans->spec = *plans->asked;
    plans->spec.model = gpt_model(plans->asked->model.config);
    plans->later = plan_make(&plans->config, now->machine, &plans->spec);
    plan_offloaded(&plans->later, &plans->config, &plans->spec, comm);
    note_disk(plans, 1, plans->later, rates, comm);
    if (plans->config.offload.disk) { plan_again(&plans->later, &plans->config, &plans->spec); }
    needs_add(&plans->needs, &plans->later->predicted);
    if (!o->dry_run && !o->show_schedule) { check_memory(plans->later, comm); }
}
// Makes the final plan of the first model, with all that is known now, and that of the model that
// follows.
static inline void plan_models(RunPlans *plans, Config *c, Rates *rates, Comm *comm) {
    memset(&plans->needs, 0, sizeof plans->needs);
    memset(plans->file_bytes, 0, sizeof plans->file_bytes);
    plan_again(&plans->first, c, plans->asked);
    needs_add(&plans->needs, &plans->first->predicted);
    note_disk(plans, 0, plans->first, rates, comm);
    plan_free(plans->later);
    free_all(plans->config.offload.host, plans->config.offload.disk);
    plans->later = NULL;
    plans->config.offload.host = plans->config.offload.disk = NULL;
    if (options_switches(&c->options) && share_is(plans->asked->model.share) &&
        !options_ends_shared(&c->options)) {
        plan_delinked(plans, rates, comm);
    }
}
// Returns the bytes of host memory that this process takes anyway. Those of a process on --cluster
// are not known: 0.
static inline size_t machine_resident(const Machine *machine) {
    return machine->cluster.nodes ? 0 : host_bytes("VmRSS:");
}
// Makes the plans of the run from a draft: its first plan, with all states on the device. *c
// receives which states are offloaded, *machine what is measured for that, and the time of the
// model's units. All ranks call it. Ends the program (EXIT_RESOURCES) if budgets cannot be kept.
static inline void plan_within_budgets(RunPlans *plans, Config *c, Machine *machine, Comm *comm,
                                       Stream *stream) {
    const Options *o = &c->options;
    const ModelSpec *spec = plans->asked;
    Rates *rates = &machine->rates;
    measure_and_choose_updater(c, plans->first, rates, stream, comm);
    machine->resident = machine_resident(machine);
    plan_offloaded(&plans->first, c, spec, comm);
    note_disk(plans, 0, plans->first, rates, comm);
    const bool times = !c->privacy.on && !machine->cluster.nodes && !options_prompts(&c->given) &&
                       !rates_are_assumed();
    if (times && memory_fits(plans->first, comm)) {
        time_units(&rates->units, &spec->model, &plans->first->shape, rates->flops_per_s, stream);
    }
    // timing has made the process larger
    machine->resident = machine_resident(machine);
    if (c->offload.disk) {
        const double frees = offload_disk_frees(&plans->first->store);
        if (comm_agree_max(comm, host_excess(plans->first) > frees)) {
            choose_disk(c, plans->first, false, comm);
        }
    }
    plan_models(plans, c, rates, comm);
    // if the host cannot hold the states of two models, those of the shared model go to disk
    const double host = most_of_ranks(comm, plans->needs.host);
    if (c->offload.disk && plans->later && host > option_size("host-memory", o->host_memory)) {
        choose_disk(c, plans->first, true, comm);
        plan_models(plans, c, rates, comm);
    }
    check_cluster_moves(o, &machine->cluster, &plans->first->predicted);
    plan_prove(plans->first);
    if (plans->later) {
        check_cluster_moves(o, &machine->cluster, &plans->later->predicted);
        plan_prove(plans->later);
    }
    check_budgets(o, &plans->needs, comm);
}

#endif
