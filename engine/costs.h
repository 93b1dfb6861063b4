// costs.h: what an action costs. It finds how fast this rank computes and sends (measured at start
// with all ranks at work, or given by --cluster), and what that makes of each action of a schedule.
// engine/simulator.h adds the costs up.
//
// Units      The model's units themselves are timed (UnitTimes) if that takes little time and
//            memory, since the balance of stages depends on them. One block stands for all.
//            Otherwise (in private runs, and for ranks that are not present) a unit's time follows
//            from its arithmetic and the rate of matrix products.
#ifndef COSTS_H
#define COSTS_H

#include "engine/executor.h" // what costs
#include "offload.h"         // what moves between host and device
#include "engine/planner.h"  // plans of stages

// -------------------------------------------------------------------------------------------------
// Rates for predicted times: of this machine, measured at start with all ranks at work, or of
// --cluster (what it does not give is measured here)
enum { TIMED_ROUNDS = 7 };
typedef struct {
    bool known;
    double row_s[UNIT_CLASSES][3]; // seconds of a sample: FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
} UnitTimes;
typedef struct {
    double flops_per_s; // matrix products on this rank, with all its threads
    double bytes_per_s; // streaming memory
    // rate at which a rank sends inside its node, and to other nodes, while all others do the same
    double message_bytes_per_s[LINK_KINDS];
    // peak that MFU refers to: flops_per_s, or what the device's maker states
    double peak_flops_per_s;
    const char *device;           // its name; "": the CPU
    double message_s[LINK_KINDS]; // latency
    // tokens of a micro-step with which products reach half of their rate
    double half_tokens;
    // share of a message's time in which its rank cannot compute, because its cores move the bytes
    double lost[LINK_KINDS];
    // rates between host and device, in each direction; of the host's memory with this rank's
    // threads (offload.h); 0: not measured
    double link_bytes_per_s, host_bytes_per_s;
    // rate of the disk, read and written at the same time by all ranks, both directions together;
    // 0: not measured
    double disk_bytes_per_s;
    // Host and device have separate memories, and copies between them run in parallel with
    // computing.
    bool apart;
    UnitTimes units;
} Rates;

// Returns a copy of a stream with a workspace that is enough for plain products, for use before the
// run has one. The caller frees its workspace.
static inline Stream stream_for_products(const Stream *s) {
    const OpsShape least = {1, 1, 1, 1, 1, 1, 0};
    Stream with = *s;
    with.workspace_bytes = ops_workspace_bytes(least, s->threads);
    with.workspace = ops_alloc(with.workspace_bytes);
    if (!with.workspace) {
        die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", with.workspace_bytes);
    }
    return with;
}
// Returns the flops per second of products of (N, N) matrices.
static inline double measure_products(Stream *s, int64_t N) {
    Stream products = stream_for_products(s);
    size_t bytes = (size_t)(N * N) * ops_real_bytes();
    Real *a = (Real *)ops_alloc(bytes), *b = (Real *)ops_alloc(bytes),
         *c = (Real *)ops_alloc(bytes);
    if (!a || !b || !c) { die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", bytes); }
    double best = 0, start = seconds_now();
    // a busy machine needs more tries to show its best rate
    for (int unbeaten = 0; unbeaten < 4 && seconds_now() - start < 0.5; unbeaten++) {
        double t = seconds_now();
        ops_matmul_forward(&products, c, NULL, a, b, NULL, N, N, N);
        ops_wait(&products);
        double rate = 2.0 * (double)(N * N * N) / (seconds_now() - t);
        if (rate > best) {
            best = rate;
            unbeaten = 0;
        }
    }
    ops_free(a);
    ops_free(b);
    ops_free(c);
    ops_free(products.workspace);
    return best;
}
// The same, by products that take at least two milliseconds: large ones where the device is fast.
static inline double measure_flops(Stream *s) {
    int64_t N = 512;
    double best = measure_products(s, N);
    for (; N < 8192 && 2.0 * (double)(N * N * N) / best < 0.002; best = measure_products(s, N)) {
        N *= 2;
    }
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
    ops_free(a);
    ops_free(b);
    return best;
}
// An all-reduce over a group, to be timed while other groups do the same, because ranks share
// links.
typedef struct {
    Stream *stream;
    Comm *comm;
    const Group *group;
    float *data;
    int64_t *bounds; // [ranks of the group + 1]
} TimedSum;
static inline void sum_split(TimedSum *sum, int64_t n) {
    for (int i = 0; i <= sum->group->n; i++) { sum->bounds[i] = part_begin(n, sum->group->n, i); }
}
static const CommLabel MEASURING = {"measuring links", -1, 0};
static inline CommRequest sum_begin(const TimedSum *sum) {
    return comm_all_reduce_begin(sum->comm, MEASURING, sum->group, sum->data, sum->bounds,
                                 DTYPE_FP32);
}
// Returns the seconds of an all-reduce, the best of a few.
static inline double measure_sum(const TimedSum *sum) {
    double best = INFINITY;
    for (int i = 0; i < 3; i++) {
        comm_barrier(sum->comm);
        double start = seconds_now();
        CommRequest request = sum_begin(sum);
        comm_wait(sum->comm, &request);
        ops_wait(sum->stream);
        comm_barrier(sum->comm);
        best = fmin(best, seconds_now() - start);
    }
    return best;
}
// Returns the share of the all-reduce's time that is lost to computing in parallel: it times matrix
// products with and without the all-reduce. alone_s: seconds of the all-reduce alone.
static inline double measure_lost(const TimedSum *sum, double alone_s, double flops_per_s) {
    enum { SIDE = 256, PAIRS = 3 };
    const double product_s = 2.0 * SIDE * SIDE * SIDE / flops_per_s, most_s = 0.1;
    const int64_t products = (int64_t)ceil(fmin(2 * alone_s, most_s) / product_s);
    Real *matrix = (Real *)ops_alloc(3 * SIDE * SIDE * ops_real_bytes());
    double best[2] = {INFINITY, INFINITY};
    Stream with = stream_for_products(sum->stream);
    if (!matrix) { die(EXIT_RESOURCES, NULL, "cannot allocate matrices of %d x %d", SIDE, SIDE); }
    ops_zero(sum->stream, matrix, 3 * SIDE * SIDE * ops_real_bytes());
    for (int i = 0; i < 2 * PAIRS; i++) {
        const bool beside = i % 2;
        comm_barrier(sum->comm);
        double start = seconds_now();
        CommRequest request = {.number = 0};
        if (beside) { request = sum_begin(sum); }
        for (int64_t k = 0; k < products; k++) {
            ops_matmul_forward(&with, matrix, NULL, real_at(matrix, SIDE * SIDE),
                               real_at(matrix, 2 * SIDE * SIDE), NULL, SIDE, SIDE, SIDE);
        }
        ops_wait(sum->stream);
        best[beside] = fmin(best[beside], seconds_now() - start);
        comm_wait(sum->comm, &request);
    }
    ops_free(matrix);
    ops_free(with.workspace);
    // the sum may take longer than all products
    return fmin(1, fmax(0, best[1] - best[0]) / fmin(alone_s, best[1]));
}
// Measures the messages of a link by all-reduces over a group that uses it. Short ones show the
// latency of their two phases, longer ones the rate.
static inline void measure_messages(Rates *rates, CommLink link, Stream *s, Comm *comm,
                                    const Group *group, int64_t n) {
    int64_t sent[LINK_KINDS] = {0, 0};
    rates->message_bytes_per_s[link] = INFINITY;
    rates->message_s[link] = rates->lost[link] = 0;
    if (group->n == 1) { return; }
    TimedSum sum = {s, comm, group, (float *)ops_alloc((size_t)n * 4),
                    (int64_t *)checked_malloc(((size_t)group->n + 1) * sizeof(int64_t), "bounds")};
    if (!sum.data) { die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", (size_t)n * 4); }
    sum_split(&sum, 1 << 10);
    double shorter = measure_sum(&sum);
    sum_split(&sum, n);
    double longer = measure_sum(&sum);
    comm_bytes_sent(COMM_ALL_REDUCE, group, group->me, sum.bounds, 4, sent);
    rates->message_s[link] = fmin(shorter, longer / 2) / 2;
    rates->message_bytes_per_s[link] =
        (double)(sent[LINK_INTRA] + sent[LINK_INTER]) / (longer - fmin(shorter, longer / 2));
    // inside a node a message is a quick copy
    if (link == LINK_INTER) { rates->lost[link] = measure_lost(&sum, longer, rates->flops_per_s); }
    comm_reset_counters(comm);
    ops_free(sum.data);
    free(sum.bounds);
}

// Resets the kernel's record of this process's peak memory, because buffers of measurements do not
// belong to the run. Failing is harmless.
static inline void forget_peak_memory(void) {
    FILE *f = fopen("/proc/self/clear_refs", "w");
    if (f) {
        fputs("5", f);
        fclose(f);
    }
}
static inline void measure_rates(Rates *rates, Stream *s, Comm *comm, const ProcessGroup *world,
                                 DType dtype) {
    comm_barrier(comm);
    if (!rates->units.known) { rates->flops_per_s = measure_flops(s); }
    rates->bytes_per_s = measure_bytes(s);
    const Group *all = &world->all, *between = world->across.n > 1 ? &world->across : &world->node;
    measure_messages(rates, LINK_INTRA, s, comm, &world->node, 1 << 20);
    rates->message_bytes_per_s[LINK_INTER] = INFINITY;
    // less data, since the link may be slow
    if (group_link(all, 0, all->n - 1) == LINK_INTER) {
        measure_messages(rates, LINK_INTER, s, comm, between, 1 << 18);
    }
    rates->device = ops_device(&rates->peak_flops_per_s);
    if (dtype != DTYPE_BF16 || rates->peak_flops_per_s == 0) {
        rates->peak_flops_per_s = rates->flops_per_s;
    }
    forget_peak_memory();
}
static inline void cluster_rates(Rates *rates, const Cluster *c, Stream *s) {
    rates->flops_per_s = rates->peak_flops_per_s =
        c->tflops > 0 ? c->tflops * 1e12 : measure_flops(s);
    rates->bytes_per_s = c->memory > 0 ? c->memory * 1e9 : measure_bytes(s);
    rates->message_bytes_per_s[LINK_INTRA] = c->intra * 1e9;
    rates->message_bytes_per_s[LINK_INTER] = c->inter * 1e9 / c->ranks;
    rates->message_s[LINK_INTRA] = rates->message_s[LINK_INTER] = c->latency * 1e-6;
    rates->half_tokens = c->half;
    rates->lost[LINK_INTRA] = rates->lost[LINK_INTER] = 1 - c->overlap;
    rates->units.known = false; // they were timed on this machine
    rates->device = "";
}
// Measures copies between host and device, and updates on the host.
static inline void measure_offload(Rates *rates, const Cluster *c, Stream *s) {
    const size_t bytes = (size_t)16 << 20;
    const int64_t n = (int64_t)(bytes / (4 * sizeof(float)));
    bool pinned;
    char *there = (char *)ops_alloc_far(bytes, &pinned), *here = (char *)ops_alloc(bytes);
    if (!there || !here) { die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", bytes); }
    float *state = (float *)(void *)there;
    OptimizerStep o = {0, 0.9f, 0.95f, 1e-8f, 0, 0, 1, 1, round_to_nearest()};
    const UpdateSlice u = {
        .master = state,
        .moment = {state + n, state + 2 * n},
        .grad = state + 3 * n,
        .param = state,
        .dtype = DTYPE_FP32,
        .n = n,
    };
    rates->link_bytes_per_s = rates->host_bytes_per_s = 0;
    for (int i = 0; i < 4; i++) {
        double start = seconds_now();
        ops_from_host(s, here, there, bytes);
        ops_wait(s);
        const double moved = seconds_now();
        ops_adamw_host(s, u, o);
        rates->link_bytes_per_s = fmax(rates->link_bytes_per_s, (double)bytes / (moved - start));
        rates->host_bytes_per_s =
            fmax(rates->host_bytes_per_s, 28 * (double)n / (seconds_now() - moved));
    }
    ops_free_far(there, pinned);
    ops_free(here);
    forget_peak_memory();
    rates->apart = ops_memory_apart() || c->link > 0;
    if (c->link > 0) { rates->link_bytes_per_s = c->link * 1e9; }
    if (c->host > 0) { rates->host_bytes_per_s = c->host * 1e9; }
}
// Returns the bytes per second of this rank's disk: pieces are read and written in all buffers at
// once, as in a step.
static inline double measure_disk_of_rank(const Store *s) {
    const int64_t buffer_bytes = (int64_t)s->disk_buffer_bytes, most = (int64_t)64 << 20,
                  pieces = max_i64(1, min_i64(store_disk_bytes(s), most) / buffer_bytes);
    const size_t bytes = store_disk_buffers_bytes((size_t)buffer_bytes);
    bool pinned;
    Disk disk;
    DiskFile file = {NULL, 0, false, false, 0, 0};
    char *buffers = (char *)ops_alloc_far(bytes, &pinned);
    double start = 0;
    if (!buffers) { die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", bytes); }
    disk_take_file(&file, s->policy.offload->folder, pieces * buffer_bytes);
    disk_open(&disk, &file, pieces * buffer_bytes, disk_align(buffers), (size_t)buffer_bytes);
    for (int pass = 0; pass < 2; pass++) { // the first pass allocates the file's blocks
        start = seconds_now();
        for (int64_t i = 0; i < pieces; i++) {
            if (pass) {
                disk_start(&disk.buffer[i % DISK_PIECES], i * buffer_bytes, buffer_bytes, false);
            }
            disk_start(&disk.buffer[i % DISK_PIECES], i * buffer_bytes, buffer_bytes, true);
        }
        disk_wait_all(&disk);
    }
    const double seconds = seconds_now() - start;
    disk_close(&disk);
    disk_free_file(&file);
    ops_free_far(buffers, pinned);
    forget_peak_memory();
    return 2 * (double)(pieces * buffer_bytes) / seconds;
}
// Measures the disk on all ranks at the same time. The slowest rank counts, because all wait for
// it. All ranks call it.
static inline void measure_disk(Rates *rates, const Cluster *c, const Store *s, Comm *comm) {
    rates->disk_bytes_per_s = c->disk * 1e9;
    if (c->disk > 0) { return; }
    double *all = (double *)checked_calloc((size_t)comm->ranks, sizeof(double), "rates");
    comm_barrier(comm);
    const double mine = s->disk_buffer_bytes ? measure_disk_of_rank(s) : (double)INFINITY;
    comm_all_gather_small(comm, &mine, all, sizeof mine);
    rates->disk_bytes_per_s = mine;
    for (int r = 0; r < comm->ranks; r++) {
        rates->disk_bytes_per_s = fmin(rates->disk_bytes_per_s, all[r]);
    }
    free(all);
}
// Returns whether the host updates its states faster than they move to the device and back, by the
// rates of this rank. Both directions of the link work at once.
static inline bool offload_host_is_faster(const Rates *r, const Store *s) {
    const double states = (s->dtype == DTYPE_FP32 ? 0 : 4) + 4 * s->optimizer->moments,
                 parameters = (double)dtype_size(s->dtype), ways = r->apart ? 1 : 2;
    const double device = ways * states / r->link_bytes_per_s,
                 gradients = 4 + (s->dtype == DTYPE_FP32 ? parameters : 0);
    const double link =
        (ways > 1 ? gradients + parameters : fmax(gradients, parameters)) / r->link_bytes_per_s;
    // with one memory the arithmetic is the same in both cases
    return r->apart
               ? fmax(link, optimizer_update_bytes(s->optimizer) / r->host_bytes_per_s) < device
               : link < device;
}
// Finds the rates of --cluster, or measures them. What the planner has timed before (plan_run)
// stays. All ranks call it.
static inline void find_rates(Rates *rates, const Cluster *cluster, Stream *s, Comm *comm,
                              const ProcessGroup *world, DType dtype) {
    if (cluster->nodes) {
        cluster_rates(rates, cluster, s);
    } else {
        measure_rates(rates, s, comm, world, dtype);
    }
}

// -------------------------------------------------------------------------------------------------
// Allocates zeros. The values do not matter, except that arithmetic with NaNs is slow.
static inline void *costs_take(Stream *s, size_t bytes) {
    void *p = ops_alloc(bytes);
    if (!p) {
        die(EXIT_RESOURCES, "use a smaller --micro-batch",
            "cannot allocate %zu bytes to time the model's units", bytes);
    }
    ops_zero(s, p, bytes);
    return p;
}
// Fills tokens with ids of which hardly two are the same, as in text.
static inline void spread_tokens(Stream *s, int32_t *tokens, int64_t n, int64_t vocab) {
    int32_t *ids = (int32_t *)checked_malloc((size_t)n * sizeof(int32_t), "tokens");
    for (int64_t i = 0; i < n; i++) { ids[i] = (int32_t)(i * 7919 % vocab); }
    ops_from_host(s, tokens, ids, (size_t)n * sizeof(int32_t));
    ops_wait(s);
    free(ids);
}
// Runs a unit's forward, input and weight part once. seconds[kind] receives the time of each.
static inline void time_unit(Executor *e, Work *w, double seconds[3]) {
    const ActionKind kinds[] = {ACT_FORWARD, ACT_BACKWARD_INPUT, ACT_BACKWARD_WEIGHT};
    Pass pass;
    memset(&pass, 0, sizeof pass);
    for (int k = 0; k < 3; k++) {
        double start = seconds_now();
        w->kind = kinds[k];
        if (w->unit || w->kind != ACT_BACKWARD_INPUT) { run_work(e, w, &pass); }
        ops_wait(e->stream);
        seconds[kinds[k]] = seconds_now() - start;
    }
}
static inline int compare_seconds(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
// Runs the units in turns for a while. times->row_s receives the median of each one's seconds, for
// one sample.
static inline void time_rounds(Executor *e, Work *work, int64_t rows, double most_s,
                               UnitTimes *times) {
    double seconds[TIMED_ROUNDS][UNIT_CLASSES][3], sorted[TIMED_ROUNDS] = {0};
    int rounds = 0;
    for (double start = seconds_now();
         rounds < 2 || (rounds < TIMED_ROUNDS && seconds_now() - start < most_s); rounds++) {
        for (int u = 0; u < UNIT_CLASSES; u++) { time_unit(e, &work[u], seconds[rounds][u]); }
    }
    // the median, because others may use the machine now and then
    for (int i = 0; i < UNIT_CLASSES * 3; i++) {
        for (int r = 0; r < rounds; r++) { sorted[r] = seconds[r][i / 3][i % 3]; }
        qsort(sorted, (size_t)rounds, sizeof *sorted, compare_seconds);
        times->row_s[i / 3][i % 3] = sorted[(rounds - 1) / 2] / (double)rows;
    }
    times->known = true;
}
// Times the embedding, one block and the head with micro-batches of shape->rows samples, or fewer
// if these take long. Does nothing if even one sample takes very long, or if the times are known.
// times = NULL: runs each unit once without timing, so that the device's library sees its products.
// All ranks call it at the same time.
static inline void time_units(UnitTimes *times, const GptModel *m, const ExecutorShape *shape,
                              double flops_per_s, Stream *s) {
    const double MOST_S = 0.3;
    double seconds[3];
    if (times && times->known) { return; }
    GptConfig config = m->config;
    config.layers = 1;
    GptModel one = gpt_model(config);
    ExecutorShape small = *shape;
    small.first = 0;
    small.end = one.units;
    small.limits = limits_of_one();
    while (small.rows > 1 && gpt_step_flops(&one, (double)(small.rows * small.T), (double)small.T) >
                                 MOST_S * flops_per_s) {
        small.rows /= 2;
    }
    if (times) { memset(times, 0, sizeof *times); }
    if (gpt_step_flops(&one, (double)small.T, (double)small.T) > 10 * MOST_S * flops_per_s) {
        return;
    }
    size_t activations, buffers;
    Executor e = executor_plan(&one, small, &activations, &buffers);
    executor_place(&e, costs_take(s, activations), costs_take(s, buffers));
    Stream mine = *s;
    mine.workspace_bytes = executor_workspace_bytes(&one, &small, s->threads);
    mine.workspace = costs_take(s, mine.workspace_bytes);
    e.stream = &mine;
    spread_tokens(s, e.acts[0].tokens, small.rows * small.T, config.vocab);
    spread_tokens(s, e.acts[0].targets, small.rows * small.T, config.vocab);
    Work work[UNIT_CLASSES];
    void *states[2 * STORAGE_CLASSES] = {NULL};
    for (int c = 0; c < STORAGE_CLASSES; c++) {
        const size_t n = (size_t)one.class_elements[c];
        states[2 * c] = costs_take(s, n * ops_real_bytes());
        states[2 * c + 1] = costs_take(s, n * sizeof(float));
    }
    for (int u = 0; u < UNIT_CLASSES; u++) {
        work[u] = executor_work(&e, u, 0, small.rows, small.T);
        for (int c = 0; c < STORAGE_CLASSES; c++) {
            work[u].states.params[c] = (const Real *)states[2 * c];
            work[u].states.grads[c] = (float *)states[2 * c + 1];
            work[u].states.accumulate[c] = true;
        }
        time_unit(&e, &work[u], seconds);
    }
    if (times) { time_rounds(&e, work, small.rows, MOST_S, times); }
    for (int c = 0; c < 2 * STORAGE_CLASSES; c++) { ops_free(states[c]); }
    ops_free(mine.workspace);
    executor_free(&e);
    forget_peak_memory();
}

// -------------------------------------------------------------------------------------------------
// Plans of this run: --pipeline auto

// Computes the bytes of activations and of buffers of one sample in one unit, where up to `works`
// weight parts may wait.
static inline void unit_bytes(const GptModel *m, const ExecutorShape *shape, int unit,
                              int64_t works, size_t bytes[2]) {
    ExecutorShape alone = *shape;
    alone.rows = 1;
    alone.first = unit;
    alone.end = unit + 1;
    alone.recompute = false;
    alone.limits.works = works;
    Executor counted = executor_plan(m, alone, &bytes[0], &bytes[1]);
    executor_free(&counted);
}
// Returns the model for the planner. shape: of a micro-batch; its rows do not matter. states count as those of the
// optimizer.
static inline PlanModel plan_model_of_run(const GptModel *m, const ExecutorShape *shape,
                                          const Optimizer *optimizer, const UnitTimes *times) {
    PlanModel model = plan_model_make(m->units);
    // the gradient of a unit's output
    const double boundary = (double)(shape->T * gpt_width(m)) * (double)ops_real_bytes();
    // parameters in bf16 have a master copy
    const double master = shape->dtype == DTYPE_FP32 ? 0 : 4;
    model.states = ((double)dtype_size(shape->dtype) + 4 + master + 4 * optimizer->moments) / 4;
    // the mean of what crosses forward (activations) and backward (gradients)
    const double cut = (double)(shape->T * gpt_width(m)) *
                       (double)(dtype_size(shape->dtype) + ops_real_bytes()) / 2;
    for (int u = 0; u < m->units; u++) {
        const double *row_s = times->row_s[gpt_unit_class(m, u)];
        int storages[2], n = gpt_unit_storages(m, u, storages);
        double elements = 0;
        for (int i = 0; i < n; i++) { elements += (double)gpt_storage_elements(m, storages[i]); }
        size_t two[2], three[2];
        unit_bytes(m, shape, u, 2, two);
        unit_bytes(m, shape, u, 3, three);
        plan_model_add(&model, u, row_s[ACT_FORWARD],
                       row_s[ACT_BACKWARD_INPUT] + row_s[ACT_BACKWARD_WEIGHT], (double)two[0],
                       4 * elements);
        plan_model_split(&model, u, row_s[ACT_BACKWARD_WEIGHT],
                         (double)(three[1] - two[1]) + boundary);
        model.cut[u] = u ? cut : 0;
    }
    return model;
}
// Returns the seconds of a message to rank `to` and one from rank `from`, the best of a few, while
// all ranks do the same.
static inline double measure_exchange(Comm *comm, int to, int from, char *data, size_t bytes) {
    double best = INFINITY;
    for (int i = 0; i < 4; i++) {
        comm_barrier(comm);
        double start = seconds_now();
        CommRequest in = comm_receive_begin(comm, MEASURING, from, data + bytes, bytes),
                    out = comm_send_begin(comm, MEASURING, to, data, bytes);
        comm_wait(comm, &in);
        comm_wait(comm, &out);
        best = fmin(best, seconds_now() - start);
    }
    return best;
}
// Returns the cluster of this run for the planner: its ranks, and the measured links. All ranks
// call it and get what rank 0 measures. Ends the program (EXIT_INPUT) if nodes have different
// numbers of ranks.
static inline Cluster cluster_of_run(Comm *comm) {
    const size_t little = 1 << 10, much = 1 << 20;
    Cluster c = cluster_parse("1x1");
    c.nodes = comm->nodes;
    c.ranks = comm->ranks / comm->nodes;
    bool even = c.nodes * c.ranks == comm->ranks;
    for (int r = 0; r < comm->ranks; r++) { even = even && comm->node_of[r] == r / c.ranks; }
    if (!even) {
        die(EXIT_INPUT, "give the stages, or start as many ranks on each, node by node",
            "--pipeline auto: %d ranks are not equally many on %d nodes, in their order",
            comm->ranks, c.nodes);
    }
    char *data = (char *)checked_calloc(2, much, "measuring links");
    for (int between = 0; between < 2; between++) {
        // to the same rank of the next node; or to the next rank, which is on this node except for
        // the node's last rank
        const int step = between ? c.ranks : 1;
        if ((between && c.nodes == 1) || comm->ranks == 1) { continue; }
        const int to = (comm->rank + step) % comm->ranks,
                  from = (comm->rank + comm->ranks - step) % comm->ranks;
        double shorter = measure_exchange(comm, to, from, data, little),
               longer = measure_exchange(comm, to, from, data, much);
        const double rate = (double)(much - little) / fmax(longer - shorter, 1e-9) * 1e-9;
        if (between) {
            c.inter = c.gather = rate;
        } else {
            c.intra = rate;
        }
        c.latency = fmax(c.latency, 1e6 * shorter);
    }
    if (c.nodes == 1) { c.inter = c.gather = c.intra; }
    free(data);
    comm_reset_counters(comm);
    comm_broadcast(comm, &c, sizeof c, 0);
    return c;
}

// Runs the planner for this model, timed here, on these ranks or on --cluster, and writes its
// choice into the flags. Rank 0 prints it. All ranks call it. *rates receives what was timed;
// *depth receives how many micro-batches in flight the memory permits. The caller calls
// placement_free().
static inline Placement plan_run(Options *o, const OptionsGiven *given, const GptModel *m,
                                 DType dtype, const Cluster *given_cluster, Comm *comm, Stream *s,
                                 Rates *rates, int64_t *depth) {
    ExecutorShape shape;
    memset(&shape, 0, sizeof shape);
    shape.dtype = dtype;
    shape.rows = o->micro_batch;
    shape.T = o->seq_len;
    shape.logits = LOGITS_PLENTY;
    shape.end = m->units;
    shape.limits = limits_of_one();
    gpt_work_check(&m->config, shape.rows, shape.T);
    rates->flops_per_s = measure_flops(s);
    time_units(&rates->units, m, &shape, rates->flops_per_s, s);
    comm_broadcast(comm, &rates->units, sizeof rates->units, 0);
    if (!rates->units.known) {
        die(EXIT_INPUT, "give the stages",
            "--pipeline auto: one sample takes this CPU or GPU too long to time the model's units "
            "by it");
    }
    PlanModel model = plan_model_of_run(m, &shape, &optimizers[o->optimizer], &rates->units);
    Cluster cluster = given_cluster->nodes ? *given_cluster : cluster_of_run(comm);
    PlanTask task = planner_task(&model, &cluster, o, given);
    Plan best = planner_report(comm->rank || (o->json && !o->plan) ? NULL : stdout, &task, o);
    o->batch_tokens = task.samples * o->seq_len;
    o->micro_batch =
        best.stages > 1 ? best.micro_batch : ceil_div(best.micro_batch, task_ranks(&task));
    o->micro_batches = best.stages > 1 ? task.samples / best.micro_batch : 0;
    *depth = plan_depth(&task, &best);
    o->recompute = best.recompute ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
    o->pipeline_schedule = best.kind;
    o->pipeline_warmup = best.warmup;
    plan_model_free(&model);
    return plan_placement(&task, &best);
}

// -------------------------------------------------------------------------------------------------
// Actions

// Writes the collectives of a PREFETCH or REDUCE to m. Returns how many.
static inline int action_messages(const Store *store, const Action *a, ZeroMessage m[2]) {
    if (a->kind == ACT_REDUCE) { return store_reduce_messages(store, a->storage, m); }
    m[0] = store_gather_message(store, a->storage, a->near);
    return a->kind == ACT_PREFETCH;
}
// Returns how many elements a rank owns, as if all slices were equal.
static inline double store_share(const Store *s) {
    double elements = 0;
    for (int i = 0; i < s->model->storages; i++) {
        if (store_holds(s, i)) {
            elements +=
                (double)gpt_storage_elements(s->model, i) / store_process_group(s, i)->all.n;
        }
    }
    return elements;
}

// Context of action_cost, for the simulator.
typedef struct {
    const GptModel *model;
    const ExecutorShape *shape;
    const Store **stores; // [ranks of the program]
    Rates rates;
    double T;
    ClipPolicy clip;
} Costs;
static inline double slice_elements(const Costs *c, const Store *store, int storage) {
    return (double)gpt_storage_elements(c->model, storage) /
           store_process_group(store, storage)->all.n;
}
// Returns the cost of a move between host and device. It runs in parallel with computing if these
// memories are separate.
static inline ActionCost link_cost(const Costs *c, double bytes) {
    const double seconds = bytes / c->rates.link_bytes_per_s;
    ActionCost cost = {c->rates.apart ? 0 : seconds, c->rates.apart ? seconds : 0};
    return cost;
}
// Returns the cost of a PREFETCH or REDUCE on a rank: what is brought from its host, its messages
// on each kind of link, and the conversion to and from quantized records.
static inline ActionCost message_cost(const Costs *c, const Store *store, const Action *a) {
    const ActionCost nothing = {0, 0};
    ZeroMessage m[2];
    ActionCost cost =
        offload_brings(store, a)
            ? link_cost(c, slice_elements(c, store, a->storage) * (double)dtype_size(store->dtype))
            : nothing;
    cost.compute_s += store_coding_bytes(store, a->storage, a->kind == ACT_REDUCE, a->near) /
                      c->rates.bytes_per_s;
    for (int k = action_messages(store, a, m) - 1; k >= 0; k--) {
        const Group *g = m[k].group;
        int64_t sent[LINK_KINDS] = {0, 0};
        comm_bytes_sent(m[k].kind, g, g->me, m[k].bounds, m[k].element_bytes, sent);
        const bool spans = group_link(g, 0, g->n - 1) == LINK_INTER,
                   goes[LINK_KINDS] = {g->n > 1 && (g->nodes > 1 || !spans), spans};
        for (int l = 0; l < LINK_KINDS; l++) {
            const double seconds = (double)sent[l] / c->rates.message_bytes_per_s[l] +
                                   (goes[l] ? c->rates.message_s[l] : 0);
            cost.message_s += seconds;
            cost.compute_s += c->rates.lost[l] * seconds;
        }
    }
    return cost;
}
// Returns the seconds of an update, or of one piece if there are several. With p2p parameters only
// the owner updates.
static inline double update_seconds(const Costs *c, const Store *store, int storage) {
    const double elements = (double)gpt_storage_elements(c->model, storage) /
                            store_process_group(store, storage)->all.n;
    const bool far = store->pieces[storage] && store->policy.offload->cpu_update;
    return elements / (double)(store_delays(store) ? 1 : max_i64(1, store->pieces[storage])) *
           optimizer_update_bytes(store->optimizer) /
           (far ? c->rates.host_bytes_per_s : c->rates.bytes_per_s);
}
// Returns the cost of moving a piece between host and disk, in parallel with all else.
static inline ActionCost store_cost(const Costs *c, const Store *store, const Action *a) {
    const double bytes = (double)(store->disk_at[a->storage + 1] - store->disk_at[a->storage]) /
                         (double)max_i64(1, store->pieces[a->storage]);
    ActionCost cost = {0, bytes / c->rates.disk_bytes_per_s};
    return cost;
}
// Returns the cost of moving a piece between host and device.
static inline ActionCost move_cost(const Costs *c, const Store *store, const Action *a) {
    const double bytes = (double)offload_element_bytes(store, a->storage, a->kind == ACT_FETCH) /
                         (double)store->pieces[a->storage];
    return link_cost(c, slice_elements(c, store, a->storage) * bytes);
}
// Returns the cost of moving a sum of gradients. If it is added to another sum, the host adds.
static inline ActionCost sum_cost(const Costs *c, const Store *store, const Action *a) {
    const double elements = (double)gpt_storage_elements(c->model, a->storage) /
                            store_process_group(store, a->storage)->all.n;
    const bool adds = store_sum_place(store, a->storage) == SUM_IS_ADDED && store->sum_bytes;
    ActionCost cost = link_cost(c, elements * (double)sizeof(float));
    cost.compute_s += adds ? 12 * elements / c->rates.host_bytes_per_s : 0;
    return cost;
}
// Seconds of a compute action: as this machine's units were timed, else from the rates of products
// and of memory.
static inline double compute_seconds(const Costs *c, const Action *a) {
    if (c->rates.units.known && !c->clip.on) {
        const ActionKind kind = a->kind == ACT_RECOMPUTE ? ACT_FORWARD : a->kind;
        return (double)a->rows * c->rates.units.row_s[gpt_unit_class(c->model, a->unit)][kind];
    }
    double tokens = (double)a->rows * c->T, C = (double)gpt_width(c->model);
    bool head = a->unit == c->model->units - 1, block = a->unit > 0 && !head;
    // without rows: any rate
    double products_per_s =
        tokens > 0 ? c->rates.flops_per_s * tokens / (tokens + c->rates.half_tokens) : 1;
    double product =
        block ? gpt_forward_flops(c->model, UNIT_BLOCK, tokens, c->T) / products_per_s : 0;
    double classifier =
        head ? gpt_forward_flops(c->model, UNIT_HEAD, tokens, c->T) / products_per_s : 0;
    double pass = tokens * C * 4 / c->rates.bytes_per_s; // one pass over a (N, C) tensor
    double norms =
        a->unit >= 0
            ? clip_norm_flops(&c->clip, c->model, a->unit, (double)a->rows, c->T) / products_per_s
            : 0;
    // Where samples are clipped, the head's part of wte's gradient is made with the embedding's
    // part, or by TIED.
    double tied =
        c->clip.on ? gpt_forward_flops(c->model, UNIT_HEAD, tokens, c->T) / products_per_s : 0;
    const bool crosses = clip_crosses(&c->clip);
    if (crosses && (!a->unit || head)) {
        norms = head
                    ? clip_norm_flops(&c->clip, c->model, 0, (double)a->rows, c->T) / products_per_s
                    : 0;
    }
    double seconds = 0;
    switch (a->kind) {
    case ACT_FORWARD:
    case ACT_RECOMPUTE: seconds = product + (block ? 20 : 2) * pass; break;
    case ACT_BACKWARD_INPUT:
        seconds = product + (c->clip.on ? 2 : 3) * classifier + (c->clip.flat || head ? norms : 0) +
                  (block ? 20 : 6) * pass;
        break;
    case ACT_BACKWARD_WEIGHT:
        seconds = product + (a->unit || crosses ? 0 : tied) + (c->clip.flat || head ? 0 : norms) +
                  4 * pass;
        break;
    case ACT_CLIP: seconds = block ? 0 : norms; break;
    case ACT_TIED: seconds = tied; break;
    default: break;
    }
    return seconds;
}
// The cost of a message between two ranks.
static inline ActionCost p2p_cost(const Costs *c, const Store *store, int rank, const Action *a) {
    ActionCost cost = {0, 0};
    const CommLink link = group_link(store->ranks, rank, a->peer);
    const double bytes = (double)executor_message_bytes(c->shape, c->model, a),
                 seconds = bytes / c->rates.message_bytes_per_s[link] + c->rates.message_s[link];
    // half at each end: in an all-reduce a rank is both ends
    cost.compute_s = c->rates.lost[link] / 2 * seconds;
    cost.message_s = action_sends(a->kind) ? seconds : 0;
    return cost;
}
static inline ActionCost action_cost(const void *context, int rank, const Action *a) {
    const Costs *c = (const Costs *)context;
    const Store *store = c->stores[rank];
    const double elements =
        a->storage >= 0 ? (double)gpt_storage_elements(c->model, a->storage) : 0;
    ActionCost cost = {0, 0};
    if (action_is_message(a->kind)) { return p2p_cost(c, store, rank, a); }
    if (action_computes(a->kind)) {
        cost.compute_s = compute_seconds(c, a);
        return cost;
    }
    switch (a->kind) {
    case ACT_PREFETCH:
    case ACT_REDUCE:
        if (store->policy.p2p) { // a local sum, no collective
            cost.compute_s = 12 * elements / c->rates.bytes_per_s;
            return cost;
        }
        return message_cost(c, store, a);
    case ACT_ACQUIRE:
        cost.compute_s = store_converts(store->dtype)
                             ? elements * (double)(dtype_size(store->dtype) + ops_real_bytes()) /
                                   c->rates.bytes_per_s
                             : 0;
        break;
    // includes the noise
    case ACT_NORM:
        cost.compute_s = store_share(store) * (c->clip.on ? 12 : 4) / c->rates.bytes_per_s;
        break;
    case ACT_UPDATE:
        *(store_delays(store) && ops_memory_apart() ? &cost.message_s : &cost.compute_s) =
            update_seconds(c, store, a->storage);
        break;
    case ACT_FETCH:
    case ACT_EVICT: return move_cost(c, store, a);
    case ACT_FETCH_STASH:
    case ACT_EVICT_STASH: return link_cost(c, (double)executor_stash_bytes(c->shape, c->model));
    case ACT_FETCH_SUM:
    case ACT_EVICT_SUM: return sum_cost(c, store, a);
    case ACT_READ:
    case ACT_WRITE: return store_cost(c, store, a);
    default: break;
    }
    return cost;
}

#endif
