// cluster.h: --cluster "2x8,intra=25,inter=3,gather=1,latency=20": nodes x ranks of a node, then
// keys in any order. It describes ranks that are not there, for --dry-run and --plan.
#ifndef CLUSTER_H
#define CLUSTER_H

#include "base/base.h" // die

#include <ctype.h> // isdigit

typedef struct {
    // ranks: per node; 0 x 0: no --cluster
    int nodes, ranks;
    // in the units of the keys; tflops, memory, link, host and disk are 0 where measured instead
    double intra, inter, gather, latency, tflops, half, memory, overlap;
    double link, host, disk;
} Cluster;
enum {
    CLUSTER_INTRA,
    CLUSTER_INTER,
    CLUSTER_GATHER,
    CLUSTER_LATENCY,
    CLUSTER_TFLOPS,
    CLUSTER_HALF,
    CLUSTER_MEMORY,
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
    {"intra", offsetof(Cluster, intra), 1e-6, 1e6, INFINITY,
     "GB/s that a rank sends inside its node"},
    {"inter", offsetof(Cluster, inter), 1e-6, 1e6, INFINITY,
     "GB/s of a node's link, in each direction"},
    {"gather", offsetof(Cluster, gather), 1e-6, 1e6, 0,
     "GB/s into a node that many send single messages to (inter)"},
    {"latency", offsetof(Cluster, latency), 0, 1e9, 0, "microseconds of a message (0)"},
    {"tflops", offsetof(Cluster, tflops), 1e-6, 1e6, 0,
     "of a rank's large matrix products (as measured here)"},
    {"half", offsetof(Cluster, half), 0, 1e9, 0,
     "tokens in a micro-step at which products reach half of that (0)"},
    {"memory", offsetof(Cluster, memory), 1e-6, 1e6, 0,
     "GB/s of a rank's memory (as measured here)"},
    {"overlap", offsetof(Cluster, overlap), 0, 1, 1,
     "share of the time of messages in which a rank computes undisturbed (1)"},
    {"link", offsetof(Cluster, link), 1e-6, 1e6, 0,
     "GB/s between a rank's device and its host, each way (as measured here)"},
    {"host", offsetof(Cluster, host), 1e-6, 1e6, 0,
     "GB/s of a rank's part of the host's memory (as measured here)"},
    {"disk", offsetof(Cluster, disk), 1e-6, 1e6, 0,
     "GB/s that a rank reads and writes at once, together (as measured here)"},
};
enum { CLUSTER_RANKS = 16384 };

__attribute__((noreturn, format(printf, 1, 2))) static inline void
cluster_refuse(const char *format, ...) {
    char what[160];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    die(EXIT_INPUT,
        "such as --cluster 2x8,intra=25,inter=3,gather=1,latency=20; --help cluster has the keys",
        "--cluster %s", what);
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
    const char *number = text + length + 1;
    char *end = NULL;
    double value = strtod(number, &end);
    bool bad = !isdigit((unsigned char)*number) || (*end && *end != ',');
    if (bad || !(value >= key->low && value <= key->high)) {
        cluster_refuse("takes %s from %g to %g, found \"%.40s\"", key->name, key->low, key->high,
                       number);
    }
    if (seen[k]) { cluster_refuse("has %s twice", key->name); }
    seen[k] = true;
    *(double *)(void *)((char *)c + key->offset) = value;
    return end;
}
// Returns the cluster that the text describes; 0 x 0 if the text is empty. Ends the program
// (EXIT_INPUT) if the text is malformed.
static inline Cluster cluster_parse(const char *text) {
    Cluster c = {};
    bool seen[CLUSTER_KEYS] = {false};
    const char *const digits = "0123456789";
    if (!*text) { return c; }
    for (int k = 0; k < CLUSTER_KEYS; k++) {
        *(double *)(void *)((char *)&c + cluster_keys[k].offset) = cluster_keys[k].fallback;
    }
    size_t nodes = strspn(text, digits),
           ranks = text[nodes] == 'x' ? strspn(text + nodes + 1, digits) : 0;
    const char *rest = text + nodes + 1 + ranks;
    if (!nodes || nodes > 4 || !ranks || ranks > 4 || (*rest && *rest != ',')) {
        cluster_refuse("begins with nodes x ranks of a node, found \"%.40s\"", text);
    }
    c.nodes = atoi(text);
    c.ranks = atoi(text + nodes + 1);
    if (c.nodes * c.ranks < 1 || c.nodes * c.ranks > CLUSTER_RANKS) {
        cluster_refuse("takes from 1 to %d ranks, found %.9s", CLUSTER_RANKS, text);
    }
    while (*rest) { rest = cluster_take(&c, rest + 1, seen); }
    if (c.ranks > 1 && isinf(c.intra)) { cluster_refuse("needs intra=, the GB/s inside a node"); }
    if (c.nodes > 1 && isinf(c.inter)) { cluster_refuse("needs inter=, the GB/s between nodes"); }
    if (!seen[CLUSTER_GATHER]) { c.gather = c.inter; }
    return c;
}

#endif
