// rates.h: how fast this rank computes, sends, and moves states: measured at start, with all ranks
// at work, or given by --cluster. With TRAIN_GPT_UNTIMED=1 nothing is measured and these are round
// numbers: a run of a second starts in half of the time.
#ifndef RATES_H
#define RATES_H

#include "base/base.h"
#include "base/cores.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/records.h"
#include "model/architecture.h"
#include "ops/ops.h"
#include "plan/cluster.h"
#include "state/disk.h"
#include "state/layout.h"
#include "state/optimizer.h"
#include "state/planned.h"
#include "state/policy.h"

// -------------------------------------------------------------------------------------------------
// Rates for predicted times: of this machine, measured at start with all ranks at work, or of
// --cluster
typedef struct {
    bool known;
    // seconds of FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT: of each sample, and of each pass,
    // however few its samples are
    double row_s[UNIT_CLASSES][3], pass_s[UNIT_CLASSES][3];
} UnitTimes;
// Returns the seconds of a pass of `rows` samples. kind: place in row_s.
static inline double unit_pass_s(const UnitTimes *t, int unit_class, int kind, double rows) {
    return rows > 0 ? rows * t->row_s[unit_class][kind] + t->pass_s[unit_class][kind] : 0;
}
typedef struct {
    double flops_per_s; // matrix products on this rank, with all its threads
    double bytes_per_s; // streaming memory
    // rate at which a rank sends inside its node, and to other nodes, while all others do the same
    double message_bytes_per_s[LINK_KINDS];
    // Peak that MFU refers to: what the instructions of products do at most on this rank's cores,
    // or what the device's maker states. No product is faster.
    double peak_flops_per_s;
    const char *instructions;     // of products on a CPU; "": not known
    const char *device;           // its name; "": the CPU
    double message_s[LINK_KINDS]; // latency
    // tokens of a micro-step with which products reach half of their rate
    double half_tokens;
    double attention_flops_per_s; // 0: attention is as fast as products of so many tokens
    // share of its speed that a rank which computes loses to a message: cores move the bytes
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
    Cluster unequal; // the nodes of ranks of unequal speeds; 0 nodes: all ranks are alike
} Rates;

static inline bool rates_are_assumed(void) { return environment_asks(ENVIRONMENT_UNTIMED); }
// Sets what measure_rates() would measure.
static inline void assume_rates(Rates *rates, DType dtype) {
    double maker;
    rates->device = ops_device(&maker);
    rates->instructions = "";
    if (!rates->units.known) { rates->flops_per_s = 1e11; }
    rates->peak_flops_per_s = dtype == DTYPE_BF16 && maker > 0 ? maker : rates->flops_per_s;
    rates->bytes_per_s = 5e10;
    for (int l = 0; l < LINK_KINDS; l++) { rates->message_bytes_per_s[l] = 1e9; }
}

// The repetitions of a measurement. The shortest time counts, because others may use the machine
// now and then: it is repeated until the two shortest times agree, and never decided by one or two.
enum { REPEATED_AT_LEAST = 3, REPEATED_AT_MOST = 6 };
typedef struct {
    int times;
    double shortest, next; // seconds
} Repeated;
static inline Repeated repeated_start(void) {
    const Repeated none = {.times = 0, .shortest = INFINITY, .next = INFINITY};
    return none;
}
static inline void repeated_add(Repeated *r, double seconds) {
    r->times++;
    r->next = fmin(r->next, fmax(r->shortest, seconds));
    r->shortest = fmin(r->shortest, seconds);
}
// Returns whether the measurement should be repeated. Devices raise their clock at work, hence the
// least time. Times are counted as the shortest one: one that was interrupted must not end it.
static inline bool repeated_again(const Repeated *r) {
    const double differ = 0.03, least_s = 0.004, most_s = 0.5, total = r->times * r->shortest;
    return r->times < REPEATED_AT_LEAST ||
           (r->times < REPEATED_AT_MOST && total < most_s &&
            (total < least_s || r->next > (1 + differ) * r->shortest));
}

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
// Fills memory with random numbers. Products of zeros would need less power, and run faster.
static inline void fill_random(Stream *s, Real *to, size_t bytes) {
    enum { NUMBERS = 1 << 14 };
    const bool bf16 = ops_real_bytes() == sizeof(uint16_t);
    float *numbers = new_array(float, NUMBERS, "random numbers");
    for (int i = 0; i < NUMBERS; i++) {
        const float x = (float)(random_u64(1, 1, (uint64_t)i) >> 40) * 0x1p-24f - 0.5f;
        const uint16_t half = float_to_bf16(x);
        memcpy((char *)numbers + i * ops_real_bytes(), bf16 ? (const void *)&half : &x,
               ops_real_bytes());
    }
    size_t filled = (size_t)min_i64((int64_t)bytes, NUMBERS * (int64_t)ops_real_bytes());
    ops_from_host(s, to, numbers, filled);
    for (size_t more; filled < bytes; filled += more) {
        more = filled < bytes - filled ? filled : bytes - filled;
        ops_copy(s, (char *)(void *)to + filled, to, more);
    }
    ops_wait(s);
    free(numbers);
}
// Returns the flops per second of products of (N, N) matrices.
static inline double measure_products(Stream *s, int64_t N) {
    Stream products = stream_for_products(s);
    size_t bytes = (size_t)(N * N) * ops_real_bytes();
    Real *a = (Real *)ops_alloc(bytes), *b = (Real *)ops_alloc(bytes),
         *c = (Real *)ops_alloc(bytes);
    if (!a || !b || !c) { die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", bytes); }
    fill_random(s, a, bytes);
    fill_random(s, b, bytes);
    Repeated product = repeated_start();
    while (repeated_again(&product)) {
        double start = seconds_now();
        ops_matmul_forward(&products, c, NULL, a, b, NULL, N, N, N);
        ops_wait(&products);
        repeated_add(&product, seconds_now() - start);
    }
    ops_free(a);
    ops_free(b);
    ops_free(c);
    ops_free(products.workspace);
    return 2.0 * (double)(N * N * N) / product.shortest;
}
static inline double product_flops(int64_t N) { return 2.0 * (double)(N * N * N); }
// The same, the best of several sizes: up to products that take half a millisecond, large ones
// where the device is fast. A size that ends the search is measured again: others may have had the
// machine during all of its products.
static inline double measure_flops(Stream *s) {
    const double enough_s = 0.0005;
    double best = 0;
    int64_t N = 128;
    for (int enough = 0; enough < 2;) {
        best = fmax(best, measure_products(s, N));
        const bool longer = N < 8192 && product_flops(N) / best < enough_s;
        N *= longer ? 2 : 1;
        enough = longer ? 0 : enough + 1;
    }
    return best;
}
static inline double measure_bytes(Stream *s) {
    const size_t bytes = ops_copy_bytes();
    OpsMark *from = ops_mark_make(), *to = ops_mark_make(); // a device has a clock of its own
    char *a = (char *)ops_alloc(bytes), *b = (char *)ops_alloc(bytes);
    if (!a || !b) { die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", bytes); }
    Repeated copy = repeated_start();
    while (repeated_again(&copy)) {
        ops_mark(s, from);
        ops_copy(s, b, a, bytes);
        ops_mark(s, to);
        ops_wait(s);
        repeated_add(&copy, ops_mark_seconds(s, from, to));
    }
    ops_free(a);
    ops_free(b);
    ops_mark_free(from);
    ops_mark_free(to);
    return 2.0 * (double)bytes / copy.shortest;
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
// Returns the seconds of an all-reduce, the shortest of a fixed number: every start sends the same
// bytes, so that the difference of two runs is what their steps send.
static inline double measure_sum(const TimedSum *sum) {
    enum { SUMS = 4 };
    double shortest = INFINITY;
    for (int i = 0; i < SUMS; i++) {
        double start = seconds_now();
        CommRequest request = sum_begin(sum);
        comm_wait(sum->comm, &request);
        ops_wait(sum->stream);
        comm_barrier(sum->comm);
        shortest = fmin(shortest, seconds_now() - start);
    }
    return shortest;
}
// Begins messages that are timed beside matrix products. requests[2] receives what to wait for.
typedef void (*BeginMessages)(const void *messages, CommRequest *requests);
static inline void begin_sum(const void *sum, CommRequest *requests) {
    requests[0] = sum_begin((const TimedSum *)sum);
}
// The products that are timed beside messages: as many as take twice as long, but no more than are
// launched in a moment, and so large that a fast device does not wait for their launches.
typedef struct {
    int64_t side, count;
} ProductsBeside;
static inline ProductsBeside products_beside(double messages_s, double flops_per_s) {
    const double least_s = 1e-4, most_s = 0.1, most = 1000;
    ProductsBeside p = {.side = 256};
    while (p.side < 4096 && product_flops(p.side) / flops_per_s < least_s) { p.side *= 2; }
    const double wanted = fmin(2 * messages_s, most_s) * flops_per_s / product_flops(p.side);
    p.count = (int64_t)ceil(fmin(most, fmax(1, wanted)));
    return p;
}
// Returns the share of the messages' time that is lost to computing in parallel, because the cores
// move the bytes: it times matrix products with and without the messages. alone_s: seconds of the
// messages alone. All ranks call it.
static inline double measure_lost(BeginMessages begin, const void *messages, double alone_s,
                                  Comm *comm, Stream *s, double flops_per_s) {
    enum { PAIRS = 3 };
    const ProductsBeside products = products_beside(alone_s, flops_per_s);
    const int64_t side = products.side, square = side * side;
    const size_t bytes = (size_t)(3 * square) * ops_real_bytes();
    Real *matrix = (Real *)ops_alloc(bytes);
    double best[2] = {INFINITY, INFINITY};
    Stream with = stream_for_products(s);
    if (!matrix) { die(EXIT_RESOURCES, NULL, "cannot allocate %zu bytes", bytes); }
    fill_random(s, matrix, bytes);
    for (int i = 0; i < 2 * PAIRS; i++) {
        const bool beside = i % 2;
        comm_barrier(comm);
        double start = seconds_now();
        CommRequest requests[2] = {{.number = 0}, {.number = 0}};
        if (beside) { begin(messages, requests); }
        for (int64_t k = 0; k < products.count; k++) {
            ops_matmul_forward(&with, matrix, NULL, real_at(matrix, square),
                               real_at(matrix, 2 * square), NULL, side, side, side);
        }
        ops_wait(s);
        best[beside] = fmin(best[beside], seconds_now() - start);
        for (int r = 0; r < 2; r++) { comm_wait(comm, &requests[r]); }
    }
    ops_free(matrix);
    ops_free(with.workspace);
    // the messages may take longer than all products
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
    rates->lost[link] = measure_lost(begin_sum, &sum, longer, comm, s, rates->flops_per_s);
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
// Returns how many cores this rank can use at once, with its threads, beside the other ranks of its
// machine.
static inline double cores_of_this_rank(const Comm *comm, int threads) {
    cpu_set_t allowed;
    if (sched_getaffinity(getppid(), sizeof allowed, &allowed) &&
        sched_getaffinity(0, sizeof allowed, &allowed)) {
        return threads;
    }
    const int cores = cores_physical(&allowed), ranks = comm->local_ranks;
    return fmin(threads, cores < ranks ? cores / (double)ranks : (double)ceil_div(cores, ranks));
}
// Finds the peak. A measurement that is far below what the clock and the instructions allow was
// disturbed: then that limit stands for it.
static inline void measure_peak(Rates *rates, const Stream *s, const Comm *comm, DType dtype) {
    enum { DISTURBED = 8 };
    const OpsPeak peak = ops_peak(s);
    const double limit = peak.limit * cores_of_this_rank(comm, s->threads);
    double maker;
    rates->device = ops_device(&maker);
    rates->instructions = peak.instructions;
    if (limit > 0) {
        const bool disturbed = peak.measured * DISTURBED < limit;
        rates->flops_per_s = fmin(rates->flops_per_s, limit);
        rates->peak_flops_per_s = disturbed ? limit : fmin(peak.measured, limit);
        rates->peak_flops_per_s = fmax(rates->peak_flops_per_s, rates->flops_per_s);
    } else {
        rates->peak_flops_per_s = dtype == DTYPE_BF16 && maker > 0 ? maker : rates->flops_per_s;
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
    if (group_spans(all)) { measure_messages(rates, LINK_INTER, s, comm, between, 1 << 18); }
    measure_peak(rates, s, comm, dtype);
    forget_peak_memory();
}
// Returns the rates of a cluster. Those of moves to the host and the disk are infinite where they
// are not given; cluster_need() asks for them once something moves.
static inline Rates cluster_rates(const Cluster *c, DType dtype) {
    const ClusterGpu *gpu = cluster_gpu(c);
    if (gpu && dtype == DTYPE_FP32) {
        cluster_refuse("gpu=%s has the rates of bf16, and the model is fp32: give --dtype bf16",
                       gpu->name);
    }
    cluster_need(c, CLUSTER_TFLOPS);
    cluster_need(c, CLUSTER_MEMORY);
    Rates rates = {.flops_per_s = c->tflops * 1e12, .bytes_per_s = c->memory * 1e9};
    rates.peak_flops_per_s = c->peak * 1e12;
    rates.message_bytes_per_s[LINK_INTRA] = c->intra * 1e9;
    rates.message_bytes_per_s[LINK_INTER] = c->inter * 1e9 / c->ranks;
    rates.message_s[LINK_INTRA] = rates.message_s[LINK_INTER] = c->latency * 1e-6;
    rates.half_tokens = c->half;
    rates.attention_flops_per_s = c->attention * 1e12;
    rates.lost[LINK_INTRA] = rates.lost[LINK_INTER] = 1 - c->overlap;
    rates.link_bytes_per_s = c->link > 0 ? c->link * 1e9 : (double)INFINITY;
    rates.host_bytes_per_s = c->host > 0 ? c->host * 1e9 : (double)INFINITY;
    rates.disk_bytes_per_s = c->disk > 0 ? c->disk * 1e9 : (double)INFINITY;
    rates.apart = true;
    if (!cluster_is_alike(c)) { rates.unequal = *c; }
    rates.device = gpu ? gpu->name : "";
    rates.instructions = "";
    return rates;
}
// Measures copies between host and device, and updates on the host.
static inline void measure_offload(Rates *rates, Stream *s) {
    rates->apart = ops_memory_apart();
    rates->disk_bytes_per_s = INFINITY;
    if (rates_are_assumed()) {
        rates->link_bytes_per_s = 1e10;
        rates->host_bytes_per_s = 5e10;
        return;
    }
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
}
// Returns the bytes per second of this rank's disk: pieces are read and written in all buffers at
// once, as in a step.
static inline double measure_disk_of_rank(const StatePlan *s) {
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
static inline void measure_disk(Rates *rates, const StatePlan *s, Comm *comm) {
    double *all = new_array(double, comm->ranks, "rates");
    comm_barrier(comm);
    const double mine = !s->disk_buffer_bytes ? (double)INFINITY
                        : rates_are_assumed() ? 1e9
                                              : measure_disk_of_rank(s);
    comm_all_gather_small(comm, &mine, all, sizeof mine);
    rates->disk_bytes_per_s = mine;
    for (int r = 0; r < comm->ranks; r++) {
        rates->disk_bytes_per_s = fmin(rates->disk_bytes_per_s, all[r]);
    }
    free(all);
}
// Returns whether the host updates its states faster than they move to the device and back, by the
// rates of this rank. Both directions of the link work at once.
static inline bool offload_host_is_faster(const Rates *r, const StatePlan *s) {
    const double states = optimizer_state_bytes(s->optimizer, s->dtype),
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
// Returns the group of all ranks of a cluster, as rank 0 sees it.
static inline Group cluster_group(const Cluster *c) {
    int *node_of = new_array(int, c->all_ranks, "cluster");
    for (int r = 0; r < c->all_ranks; r++) { node_of[r] = cluster_node_of(c, r); }
    const Group g = group_make(NULL, c->all_ranks, 0, node_of);
    free(node_of);
    return g;
}
// Finds the rates of --cluster, or measures or assumes them. What the planner has timed before
// (plan_run) stays. All ranks call it.
static inline void find_rates(Rates *rates, const Cluster *cluster, Stream *s, Comm *comm,
                              const ProcessGroup *world, DType dtype) {
    if (cluster->nodes) {
        *rates = cluster_rates(cluster, dtype);
    } else if (rates_are_assumed()) {
        assume_rates(rates, dtype);
    } else {
        measure_rates(rates, s, comm, world, dtype);
    }
}

#endif
