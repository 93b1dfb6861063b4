// cluster.h: --cluster "8x8,gpu=h100" or "2x8+1x4,intra=25,inter=3,gather=1,latency=20": nodes x
// ranks of a node, several times where nodes differ, then keys in any order. Nodes may be slower
// than others: 1x8+1x8*0.5 is a second node whose ranks have half of the speed. It describes ranks
// that are not there, for --dry-run, --plan and --fit. All rates come from it: gpu= stands for
// every rate of a kind of GPU, other keys take the place of single ones, and who needs a rate that
// is missing asks for it (cluster_need).
#ifndef CLUSTER_H
#define CLUSTER_H

#include "base/base.h"

#include <ctype.h>   // isdigit
#include <strings.h> // strncasecmp

// Nodes with equally many ranks each, of one speed, which is a share of the rates that the keys
// give for computing. Ranks are numbered node by node, part by part.
typedef struct {
    int nodes, ranks;
    double speed;
} ClusterPart;
enum { CLUSTER_PARTS = 8, CLUSTER_RANKS = 16384 };
typedef struct {
    // ranks: of the largest node; 0 x 0: no --cluster
    int nodes, ranks, all_ranks;
    int parts;
    ClusterPart part[CLUSTER_PARTS];
    // row of cluster_gpus, counted from 1; 0: none
    double gpu;
    // in the units of the keys; 0: not given
    double intra, inter, gather, latency, tflops, peak, half, attention, memory, capacity, overlap;
    double link, host, disk;
} Cluster;
// What gpu= stands for: the figures of the maker, with typical machines around the GPU, and the
// shares of them that training reaches. A rate is a figure times its share.
typedef struct {
    const char *name;
    Cluster figures;    // inter: GB/s of a node's link for each of its GPUs
    double products;    // share of tflops
    double attention;   // the same for attention; 0: as products
    const char *source; // of the share of products
} ClusterGpu;
// Shares of memory, link and host, and of intra and inter: assumed, for all kinds of GPU.
#define CLUSTER_COPIES 0.8
#define CLUSTER_MESSAGES 0.8
// tflops: dense products of bf16 (V100: fp16). memory, capacity: GB/s, and GiB that a program can
// take. intra: NVLink, or else PCIe, in one direction. link: PCIe, in one direction. host: the
// memory channels of both CPUs, divided by the GPUs of a node. inter: nodes of DGX B200, H200, H100
// and A100 have a port of 400 (A100: 200) Gbit/s for each GPU, DGX-2 one of 100 for two; L40S: 100.
// Large products alone reach 0.869 of an A100, 0.803 of an H100 and 0.776 of a B200 (S. Bekman,
// Machine Learning Engineering, "Maximum achievable matmul FLOPS"); in training they reach less:
// products, and half (tokens of a micro-step at which they reach half of that), are fitted to
// published runs (scripts/published_runs.py; V100: scripts/zeropp_bars.py). attention: what
// FlashAttention-2 reaches, at least 0.5 of an A100 (abstract of arXiv 2307.08691) and 0.35 of an
// H100 (abstract of arXiv 2407.08608). On V100 it is part of the fitted products.
static const ClusterGpu cluster_gpus[] = {
    {.name = "v100",
     .figures = {.intra = 150,
                 .inter = 6.25,
                 .latency = 20,
                 .tflops = 125,
                 .half = 1947,
                 .memory = 900,
                 .capacity = 31,
                 .link = 16,
                 .host = 16},
     .products = 1.0,
     .source = "fitted to the bars of ZeRO++"},
    {.name = "a100",
     .figures = {.intra = 300,
                 .inter = 25,
                 .latency = 20,
                 .tflops = 312,
                 .half = 465,
                 .memory = 2039,
                 .capacity = 79,
                 .link = 32,
                 .host = 51},
     .products = 0.785,
     .attention = 0.5,
     .source = "fitted to MPT"},
    {.name = "l40s",
     .figures = {.intra = 32,
                 .inter = 12.5,
                 .latency = 20,
                 .tflops = 362,
                 .half = 465,
                 .memory = 864,
                 .capacity = 44,
                 .link = 32,
                 .host = 57},
     .products = 0.785,
     .attention = 0.5,
     .source = "assumed, as of a100"},
    {.name = "h100",
     .figures = {.intra = 450,
                 .inter = 50,
                 .latency = 20,
                 .tflops = 989,
                 .half = 1374,
                 .memory = 3350,
                 .capacity = 79,
                 .link = 64,
                 .host = 76},
     .products = 0.657,
     .attention = 0.35,
     .source = "fitted to MPT"},
    {.name = "h200",
     .figures = {.intra = 450,
                 .inter = 50,
                 .latency = 20,
                 .tflops = 989,
                 .half = 1374,
                 .memory = 4800,
                 .capacity = 139,
                 .link = 64,
                 .host = 89},
     .products = 0.657,
     .attention = 0.35,
     .source = "assumed, as of h100"},
    {.name = "b200",
     .figures = {.intra = 900,
                 .inter = 50,
                 .latency = 20,
                 .tflops = 2250,
                 .half = 1374,
                 .memory = 8000,
                 .capacity = 178,
                 .link = 64,
                 .host = 89},
     .products = 0.657,
     .attention = 0.35,
     .source = "assumed, as of h100"},
};
enum { CLUSTER_GPUS = LENGTH_OF(cluster_gpus) };
enum {
    CLUSTER_GPU,
    CLUSTER_INTRA,
    CLUSTER_INTER,
    CLUSTER_GATHER,
    CLUSTER_LATENCY,
    CLUSTER_TFLOPS,
    CLUSTER_PEAK,
    CLUSTER_HALF,
    CLUSTER_ATTENTION,
    CLUSTER_MEMORY,
    CLUSTER_CAPACITY,
    CLUSTER_OVERLAP,
    CLUSTER_LINK,
    CLUSTER_HOST,
    CLUSTER_DISK,
    CLUSTER_KEYS
};
// A key of --cluster: `fallback` is its value if it is not given.
typedef struct {
    const char *name;
    size_t offset; // of a double in Cluster
    double low, high, fallback;
    const char *help;
} ClusterKey;
static const ClusterKey cluster_keys[CLUSTER_KEYS] = {
    {"gpu", offsetof(Cluster, gpu), 0, 0, 0,
     "a100, b200, h100, h200, l40s or v100: all rates of one, but for the keys that are given"},
    {"intra", offsetof(Cluster, intra), 1e-6, 1e6, INFINITY,
     "GB/s that a rank sends inside its node"},
    {"inter", offsetof(Cluster, inter), 1e-6, 1e6, INFINITY,
     "GB/s of a node's link, in each direction"},
    {"gather", offsetof(Cluster, gather), 1e-6, 1e6, 0,
     "GB/s into a node that many send single messages to (inter)"},
    {"latency", offsetof(Cluster, latency), 0, 1e9, 0, "microseconds of a message (0)"},
    {"tflops", offsetof(Cluster, tflops), 1e-6, 1e6, 0, "TFLOP/s of a rank's matrix products"},
    {"peak", offsetof(Cluster, peak), 1e-6, 1e6, 0, "TFLOP/s of which MFU is a share (tflops)"},
    {"half", offsetof(Cluster, half), 0, 1e9, 0,
     "tokens in a micro-step at which products reach half of that (0)"},
    {"attention", offsetof(Cluster, attention), 1e-6, 1e6, 0,
     "TFLOP/s of a rank's attention (as products)"},
    {"memory", offsetof(Cluster, memory), 1e-6, 1e6, 0, "GB/s of a rank's memory"},
    {"capacity", offsetof(Cluster, capacity), 1e-6, 1e6, 0,
     "GiB of a rank's device: what a run must fit into"},
    {"overlap", offsetof(Cluster, overlap), 0, 1, 1,
     "share of its speed with which a rank computes beside its messages (1)"},
    {"link", offsetof(Cluster, link), 1e-6, 1e6, 0,
     "GB/s between a rank's device and its host, each way"},
    {"host", offsetof(Cluster, host), 1e-6, 1e6, 0, "GB/s of a rank's part of the host's memory"},
    {"disk", offsetof(Cluster, disk), 1e-6, 1e6, 0,
     "GB/s that a rank reads and writes at once, together"},
};

// Returns whether all nodes have equally many ranks.
static inline bool cluster_is_even(const Cluster *c) { return c->parts <= 1; }
// Returns whether all ranks compute equally fast.
static inline bool cluster_is_alike(const Cluster *c) {
    for (int p = 0; p < c->parts; p++) {
        if (c->part[p].speed != 1) { return false; }
    }
    return true;
}
// Returns the number of ranks of a node, the number of its first rank, and the node of a rank.
static inline int cluster_node_ranks(const Cluster *c, int node) {
    int p = 0;
    for (; node >= c->part[p].nodes; p++) { node -= c->part[p].nodes; }
    return c->part[p].ranks;
}
static inline int cluster_first_rank(const Cluster *c, int node) {
    int p = 0, first = 0;
    for (; node >= c->part[p].nodes; p++) {
        node -= c->part[p].nodes;
        first += c->part[p].nodes * c->part[p].ranks;
    }
    return first + node * c->part[p].ranks;
}
static inline int cluster_node_of(const Cluster *c, int rank) {
    int p = 0, nodes = 0;
    for (; rank >= c->part[p].nodes * c->part[p].ranks; p++) {
        rank -= c->part[p].nodes * c->part[p].ranks;
        nodes += c->part[p].nodes;
    }
    return nodes + rank / c->part[p].ranks;
}
// Returns the time that a rank takes to compute, in that of a rank of speed 1.
static inline double cluster_slowness(const Cluster *c, int rank) {
    int p = 0;
    for (; rank >= c->part[p].nodes * c->part[p].ranks; p++) {
        rank -= c->part[p].nodes * c->part[p].ranks;
    }
    return 1 / c->part[p].speed;
}
// Returns the same of the slowest rank.
static inline double cluster_most_slowness(const Cluster *c) {
    double most = 0;
    for (int p = 0; p < c->parts; p++) { most = fmax(most, 1 / c->part[p].speed); }
    return most;
}

__attribute__((noreturn, format(printf, 1, 2))) static inline void
cluster_refuse(const char *format, ...) {
    char what[160];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    die(EXIT_INPUT,
        "such as --cluster 2x8,gpu=h100 or 2x8,intra=25,inter=3,tflops=100,memory=900; "
        "--help cluster has the keys",
        "--cluster %s", what);
}
// Ends the program (EXIT_INPUT) if a rate that a prediction needs is not given.
static inline void cluster_need(const Cluster *c, int key) {
    const ClusterKey *k = &cluster_keys[key];
    if (*(const double *)(const void *)((const char *)c + k->offset) > 0) { return; }
    die(EXIT_INPUT, "add it; gpu=h100 stands for all rates but the disk's",
        "--cluster needs %s=, %s: nothing is measured here for it", k->name, k->help);
}
// Returns the kind of GPU, NULL if none was named.
static inline const ClusterGpu *cluster_gpu(const Cluster *c) {
    return c->gpu > 0 ? &cluster_gpus[(int)c->gpu - 1] : NULL;
}
// Sets the rates that gpu= stands for, but for those that were given.
static inline void cluster_fill(Cluster *c, const bool seen[CLUSTER_KEYS]) {
    const ClusterGpu *gpu = cluster_gpu(c);
    if (!gpu) { return; }
    Cluster rates = gpu->figures;
    rates.peak = rates.tflops;
    rates.attention = rates.tflops * gpu->attention;
    rates.tflops *= gpu->products;
    rates.memory *= CLUSTER_COPIES;
    rates.link *= CLUSTER_COPIES;
    rates.host *= CLUSTER_COPIES;
    rates.intra *= CLUSTER_MESSAGES;
    rates.inter *= c->ranks * CLUSTER_MESSAGES;
    for (int k = 0; k < CLUSTER_KEYS; k++) {
        const size_t at = cluster_keys[k].offset;
        const double rate = *(const double *)(const void *)((const char *)&rates + at);
        if (!seen[k] && rate > 0) { *(double *)(void *)((char *)c + at) = rate; }
    }
}
// Returns the row of a kind of GPU, counted from 1. *end receives where its name ends.
static inline double cluster_find_gpu(const char *name, const char **end) {
    const size_t n = strcspn(name, ",");
    for (int i = 0; i < CLUSTER_GPUS; i++) {
        if (strlen(cluster_gpus[i].name) == n && !strncasecmp(cluster_gpus[i].name, name, n)) {
            *end = name + n;
            return i + 1;
        }
    }
    cluster_refuse("takes gpu=a100, b200, h100, h200, l40s or v100, found \"%.40s\"", name);
}
// Returns the number of a key. *end receives where it ends.
static inline double cluster_number(const ClusterKey *key, const char *number, const char **end) {
    char *behind = NULL;
    const double value = strtod(number, &behind);
    const bool bad = !isdigit((unsigned char)*number) || (*behind && *behind != ',');
    if (bad || !(value >= key->low && value <= key->high)) {
        cluster_refuse("takes %s from %g to %g, found \"%.40s\"", key->name, key->low, key->high,
                       number);
    }
    *end = behind;
    return value;
}
// Parses one "name=number" at the begin of the text. Returns where it ends.
static inline const char *cluster_take(Cluster *c, const char *text, bool seen[CLUSTER_KEYS]) {
    int k = 0;
    size_t length = strcspn(text, "=,");
    while (k < CLUSTER_KEYS && (strlen(cluster_keys[k].name) != length ||
                                strncmp(cluster_keys[k].name, text, length))) {
        k++;
    }
    if (k == CLUSTER_KEYS || text[length] != '=') {
        cluster_refuse("takes keys with a number, found \"%.40s\"", text);
    }
    const ClusterKey *key = &cluster_keys[k];
    const char *number = text + length + 1, *end = NULL;
    const double value =
        k == CLUSTER_GPU ? cluster_find_gpu(number, &end) : cluster_number(key, number, &end);
    if (seen[k]) { cluster_refuse("has %s twice", key->name); }
    seen[k] = true;
    *(double *)(void *)((char *)c + key->offset) = value;
    return end;
}
// Returns a cluster without ranks, whose rates are not given.
static inline Cluster cluster_empty(void) {
    Cluster c = {};
    for (int k = 0; k < CLUSTER_KEYS; k++) {
        *(double *)(void *)((char *)&c + cluster_keys[k].offset) = cluster_keys[k].fallback;
    }
    return c;
}
// Appends nodes with `ranks` ranks each, of this speed. Returns false if the cluster would have too
// many kinds of nodes or too many ranks.
static inline bool cluster_add(Cluster *c, int nodes, int ranks, double speed) {
    const int64_t all = c->all_ranks + (int64_t)nodes * ranks;
    if (nodes < 1 || ranks < 1 || all > CLUSTER_RANKS) { return false; }
    const ClusterPart *last = c->parts ? &c->part[c->parts - 1] : NULL;
    if (!last || last->ranks != ranks || last->speed != speed) {
        if (c->parts == CLUSTER_PARTS) { return false; }
        c->part[c->parts].ranks = ranks;
        c->part[c->parts++].speed = speed;
    }
    c->part[c->parts - 1].nodes += nodes;
    c->nodes += nodes;
    c->ranks = (int)max_i64(c->ranks, ranks);
    c->all_ranks = (int)all;
    return true;
}
// Parses "*0.5", which may follow the nodes. *end, where it begins, becomes where it ends.
static inline double cluster_take_speed(const char **end) {
    const char *number = *end + 1;
    char *behind = NULL;
    if (**end != '*') { return 1; }
    const double speed = strtod(number, &behind);
    if (!isdigit((unsigned char)*number) || !(speed >= 0.01 && speed <= 1)) {
        cluster_refuse("takes speeds of nodes from 0.01 to 1, found \"%.40s\"", number);
    }
    *end = behind;
    return speed;
}
// Returns a number of nodes or ranks; more than there can be are all alike.
static inline int cluster_count(const char *digits) {
    return (int)min_i64(strtoll(digits, NULL, 10), 2 * CLUSTER_RANKS);
}
// Parses "2x8+1x4" or "2x8+1x4*0.5" at the begin of the text. Returns where it ends.
static inline const char *cluster_take_nodes(Cluster *c, const char *text) {
    const char *const digits = "0123456789", *at = text, *end;
    for (;; at = end + 1) {
        const size_t nodes = strspn(at, digits),
                     ranks = at[nodes] == 'x' ? strspn(at + nodes + 1, digits) : 0;
        end = at + nodes + 1 + ranks;
        const double speed = nodes && ranks ? cluster_take_speed(&end) : 1;
        if (!nodes || !ranks || (*end && *end != ',' && *end != '+')) {
            cluster_refuse("begins with nodes x ranks of a node, found \"%.40s\"", at);
        }
        const int n = cluster_count(at), of_node = cluster_count(at + nodes + 1);
        if (!cluster_add(c, n, of_node, speed)) {
            const bool kinds = c->all_ranks + (int64_t)n * of_node <= CLUSTER_RANKS;
            cluster_refuse("takes from 1 to %d ranks and up to %d kinds of nodes, found %.40s%s",
                           CLUSTER_RANKS, CLUSTER_PARTS, text,
                           !n || !of_node ? ""
                           : kinds        ? ": too many kinds"
                                          : ": too many ranks");
        }
        if (*end != '+') { return end; }
    }
}
// Refuses a text that names two kinds of GPU, wherever it has them.
static inline void cluster_refuse_mixed(const char *text) {
    const ClusterGpu *named = NULL;
    const char *key = strstr(text, "gpu="), *twice = key ? strstr(key + 1, "gpu=") : NULL;
    for (const char *at = text; *at; at++) {
        for (int i = 0; i < CLUSTER_GPUS; i++) {
            const ClusterGpu *gpu = &cluster_gpus[i];
            const size_t n = strlen(gpu->name);
            if (strncasecmp(at, gpu->name, n) || isalnum((unsigned char)at[n])) { continue; }
            if (named && named != gpu) {
                cluster_refuse("%smixes GPUs, %s and %s: all nodes have one kind, but may be "
                               "slower, such as 1x8+1x8*0.5,gpu=h100",
                               twice ? "has gpu twice: it " : "", named->name, gpu->name);
            }
            named = gpu;
        }
    }
}
// Returns the cluster that the text describes; 0 x 0 if the text is empty. Ends the program
// (EXIT_INPUT) if the text is malformed.
static inline Cluster cluster_parse(const char *text) {
    const Cluster none = {};
    Cluster c = cluster_empty();
    bool seen[CLUSTER_KEYS] = {false};
    if (!*text) { return none; }
    cluster_refuse_mixed(text);
    const char *rest = cluster_take_nodes(&c, text);
    while (*rest) { rest = cluster_take(&c, rest + 1, seen); }
    cluster_fill(&c, seen);
    if (c.ranks > 1 && isinf(c.intra)) { cluster_refuse("needs intra=, the GB/s inside a node"); }
    if (c.nodes > 1 && isinf(c.inter)) { cluster_refuse("needs inter=, the GB/s between nodes"); }
    if (!seen[CLUSTER_GATHER]) { c.gather = c.inter; }
    if (!(c.peak > 0)) { c.peak = c.tflops; }
    return c;
}

#endif
