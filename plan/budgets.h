// budgets.h: does a plan fit? Into the memory and disk space that this machine has, and into
// --device-memory and --host-memory. Ranks share machines and devices, so all ranks call these
// functions and get the same answer. A run that does not fit ends before anything is allocated
// (EXIT_RESOURCES), with what would help.
#ifndef BUDGETS_H
#define BUDGETS_H

#include "base/base.h"
#include "base/files.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "ops/ops.h"
#include "options.h"
#include "pipeline.h"
#include "plan/option_pairs.h"
#include "plan/plan.h"
#include "plan/plan_make.h"
#include "plan/state_plan.h"
#include "plan/system.h"
#include "state/disk.h"
#include "state/planned.h"
#include "state/policy.h"

// Returns a number of every rank; the caller frees it. All ranks call it.
static inline double *number_of_ranks(Comm *comm, double mine) {
    double *all = new_array(double, comm->ranks, "budgets");
    comm_all_gather_small(comm, &mine, all, sizeof mine);
    return all;
}
// Returns the sum of a number over the ranks of this machine. All ranks call it.
static inline double sum_of_host(Comm *comm, double mine) {
    double *all = number_of_ranks(comm, mine), sum = 0;
    for (int r = 0; r < comm->ranks; r++) {
        sum += strcmp(comm->peers[r].place.host, comm->peers[comm->rank].place.host) ? 0 : all[r];
    }
    free(all);
    return sum;
}
// Returns the largest of a number over all ranks. All ranks call it.
static inline double most_of_ranks(Comm *comm, double mine) {
    double *all = number_of_ranks(comm, mine), most = mine;
    for (int r = 0; r < comm->ranks; r++) { most = fmax(most, all[r]); }
    free(all);
    return most;
}

// -------------------------------------------------------------------------------------------------
// The memory that there is

// How many bytes all ranks that share this rank's memory (the device's, or else the machine's)
// still need; that as a multiple of this rank's need, since ranks of other stages need other
// amounts; and how many bytes are available.
typedef struct {
    int sharers;
    double needed, shares, there;
} MemoryNeed;

// Returns the bytes that this rank has yet to allocate, with micro-batches of `rows` samples.
// Shorter micro-batches may split a step into several micro-steps, for which the store has another
// layout.
static inline double memory_still_needed(const Plan *p, int64_t rows, bool recompute) {
    size_t memory[MEMORY_KINDS];
    const StatePlan *s = &p->store;
    const Config *c = p->config;
    ZeroPolicy policy = s->policy;
    if (s->placement->stages == 1 && rows != p->shape.rows) {
        policy.accumulates = (c->options.batch_tokens || c->privacy.on) &&
                             ceil_div(p->most_samples, p->machine->ranks->n) > rows;
    }
    Plan other = *p;
    other.store = state_plan_as(s, s->ranks, &policy);
    predict_memory(&other, rows, recompute, memory);
    other.shape.rows = rows;
    const size_t host = ops_memory_apart() ? 0 : plan_offloaded_bytes(&other);
    store_plan_free(&other.store);
    return memory_device(memory) + host - memory_device(p->machine->taken);
}
// All ranks call it and get the same result.
static inline MemoryNeed memory_need(const Plan *p, Comm *comm) {
    const bool apart = ops_memory_apart();
    const double mine = memory_still_needed(p, p->shape.rows, p->shape.recompute),
                 sum = sum_of_host(comm, mine);
    MemoryNeed need;
    need.sharers = apart ? comm->transport.sharing : comm->local_ranks;
    need.shares = apart ? need.sharers : sum / fmax(mine, 1);
    need.needed = need.shares * mine;
    need.there = apart ? ops_memory_available() : memory_available();
    return need;
}
static inline bool memory_fits(const Plan *p, Comm *comm) {
    const MemoryNeed need = memory_need(p, comm);
    return need.needed <= need.there;
}
// Returns the bytes of this machine's memory that the states take which its ranks keep on the host,
// where the device has a memory of its own. All ranks call it.
static inline double memory_offloaded(const Plan *p, Comm *comm) {
    return sum_of_host(comm, ops_memory_apart() ? plan_offloaded_bytes(p) : 0);
}
// Returns whether check_memory() accepts a plan on every machine. All ranks call it and get the
// same result.
static inline bool memory_fits_all(const Plan *p, Comm *comm) {
    const bool host = memory_offloaded(p, comm) <= memory_available(),
               fits = memory_fits(p, comm) && host;
    return comm_agree_min(comm, fits);
}
// Returns whether the run would fit with ZeRO stage `zero` over `ranks` ranks, of which as many as
// now share a machine.
static inline bool memory_fits_zero(const Plan *p, const MemoryNeed *need, int zero, int ranks) {
    Machine machine = *p->machine;
    Config config = *p->config;
    Group group = group_cluster(ranks / need->sharers, need->sharers);
    ModelSpec spec = {.model = p->model, .dtype = p->dtype};
    machine.ranks = &group;
    machine.cluster.nodes = group.nodes; // one schedule for all ranks
    memset(&machine.rates, 0, sizeof machine.rates);
    config.options.zero = zero;
    config.pipeline.placement = pipeline_placement("1", p->model.units, ranks);
    if (!config.options.batch_tokens) {
        config.samples = config_samples(&config, &p->model, ranks);
    }
    Plan *other = plan_make(&config, &machine, &spec);
    const double needed = memory_still_needed(other, other->shape.rows, other->shape.recompute);
    plan_free(other);
    placement_free(&config.pipeline.placement);
    group_free(&group);
    return need->shares * needed <= need->there;
}
// Writes with which ZeRO stage the run would fit, over as many ranks as now or over more. Returns
// the length, 0 if none is found.
static inline size_t memory_advice_zero(const Plan *p, const MemoryNeed *need, bool more,
                                        char *text, size_t bytes) {
    enum { RANKS = 1024 };
    const int now = need->sharers * (int)ceil_div(p->machine->ranks->n, need->sharers);
    Options asked = p->config->options;
    asked.zero = 3;
    if (p->pipeline.placement.stages > 1 || p->cyclic.rule || p->config->privacy.on ||
        options_clash(&asked, &p->config->given)) {
        return 0;
    }
    for (int64_t ranks = more ? 2 * now : now; ranks > 1 && ranks <= (more ? RANKS : now);
         ranks *= 2) {
        for (int zero = more ? 3 : (int)p->config->options.zero + 1; zero <= 3; zero++) {
            if (!memory_fits_zero(p, need, zero, (int)ranks)) { continue; }
            const Text over = text_of(" over %" PRId64 " ranks, %d on a %s", ranks, need->sharers,
                                      ops_memory_apart() ? "GPU" : "machine");
            return (size_t)snprintf(text, bytes, "--zero %d%s", zero, more ? over.at : "");
        }
    }
    return 0;
}
// Returns whether the run would fit without the scratch of cuDNN's attention.
static inline bool memory_fits_own_attention(const Plan *p, const MemoryNeed *need) {
    ops_own_attention(true);
    const double needed = memory_still_needed(p, p->shape.rows, p->shape.recompute);
    ops_own_attention(false);
    return need->shares * needed <= need->there;
}
// Writes as text which flags make the run fit: a ZeRO stage; or half of the micro-batch, again and
// again, without and with recomputation; or own attention; or more ranks.
static inline void memory_advice(const Plan *p, const MemoryNeed *need, char *text, size_t bytes) {
    const bool given = p->shape.recompute;
    char zero[100];
    size_t n = 0;
    if (memory_advice_zero(p, need, false, zero, sizeof zero)) {
        n += snprintf(text, bytes, "it fits with %s", zero);
    }
    // flat clipping excludes recomputation
    for (int recompute = given; recompute < (p->shape.clip.flat ? 1 : 2); recompute++) {
        int64_t rows = p->shape.rows;
        // --micro-batch is the size for all replicas of a stage
        const int64_t replicas =
            p->pipeline.placement.stages > 1 ? ceil_div(p->config->options.micro_batch, rows) : 1;
        while (rows && need->shares * memory_still_needed(p, rows, recompute) > need->there) {
            rows /= 2;
        }
        if (!rows) { continue; }
        n += snprintf(text + n, bytes - n, "%s%s", n ? ", or" : "it fits with",
                      recompute && !given ? " --recompute block" : "");
        if (rows < p->shape.rows) {
            n += snprintf(text + n, bytes - n, " --micro-batch %" PRId64, rows * replicas);
        }
    }
    if (memory_fits_own_attention(p, need)) {
        n += snprintf(text + n, bytes - n, "%sTRAIN_GPT_OWN_ATTENTION=1 in the environment",
                      n ? ", or " : "it fits with ");
    }
    if (!n) {
        const bool fits = memory_advice_zero(p, need, true, zero, sizeof zero);
        snprintf(text, bytes,
                 "no --micro-batch fits, nor does --recompute block help: %s%suse a smaller "
                 "--model or --seq-len, or fewer ranks on a machine",
                 fits ? zero : "", fits ? ", would fit; or " : "");
    }
}
// Ends the program if this machine's ranks do not fit into its GPUs or its memory. Otherwise the
// kernel would end it in the middle of the run. All ranks call it.
static inline void check_memory(const Plan *p, Comm *comm) {
    const double offloaded = memory_offloaded(p, comm), host = memory_available();
    char advice[400];
    if (offloaded > host) {
        die(EXIT_RESOURCES, "give a larger --device-memory, or fewer ranks on a machine",
            "offloaded states of this machine's ranks need %.2f GiB, %.2f GiB are available",
            offloaded / 0x1p30, host / 0x1p30);
    }
    const MemoryNeed need = memory_need(p, comm);
    if (need.needed <= need.there) { return; }
    memory_advice(p, &need, advice, sizeof advice);
    die(EXIT_RESOURCES, advice, "%d ranks on this %s need %.2f GiB more, %.2f GiB are available",
        need.sharers, ops_memory_apart() ? "GPU" : "machine", need.needed / 0x1p30,
        need.there / 0x1p30);
}
// Checks the disk space for offloaded states of all ranks of this machine; bytes: of this rank's
// files. They are allocated before the first step; this check only reports a lack earlier. All
// ranks call it.
static inline void check_disk(const char *folder, int64_t bytes, Comm *comm) {
    disk_check_folder(folder);
    const double needed = sum_of_host(comm, bytes), there = disk_free(folder);
    if (there >= 0 && needed > there) {
        die(EXIT_RESOURCES,
            "give it a folder with more space, or a larger --host-memory or --device-memory",
            "states of this machine's ranks need %.0f bytes of --offload-dir %s, of which %.0f are "
            "free",
            needed, folder, there);
    }
}

// -------------------------------------------------------------------------------------------------
// The budgets that flags give

// The most that this rank needs of its device and of the host, over all models of the run.
typedef struct {
    double device, host;
    size_t offloaded; // part of host
} Needs;
static inline void needs_add(Needs *needs, const Prediction *p) {
    needs->device = fmax(needs->device, memory_device(p->memory));
    if (p->host > needs->host) {
        needs->host = p->host;
        needs->offloaded = p->offloaded;
    }
}
// Ends the program if a rank needs more than --device-memory or --host-memory, after memory_plan.h
// has chosen what is offloaded. The unplanned part of host memory varies a little between runs. All
// ranks call it.
static inline void check_budgets(const Options *o, const Needs *needs, Comm *comm) {
    const double device = most_of_ranks(comm, needs->device),
                 host = most_of_ranks(comm, needs->host);
    const bool bare = *o->device_memory && !strpbrk(o->device_memory, "KMGTkmgt");
    char hint[240];
    snprintf(hint, sizeof hint, "%s%sthe smallest that fits is --device-memory %.0f%s",
             bare ? o->device_memory : "", bare ? " is a number of bytes, 24G has a unit; " : "",
             device,
             options_offloads(o) ? "; a smaller --micro-batch or --recompute block takes less"
                                 : " without --offload");
    if (device > option_size("device-memory", o->device_memory)) {
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

#endif
