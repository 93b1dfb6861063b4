// cores.h: assigns a machine's cores to ranks.
#ifndef CORES_H
#define CORES_H

#include "base/base.h"
#include <sched.h> // cpu_set_t

// Parses a set of cores such as "0-15,32-47", in the form of Linux's /sys. Returns false if the
// text is malformed or names no core.
static inline bool cores_parse(const char *list, cpu_set_t *set) {
    CPU_ZERO(set);
    while (*list && *list != '\n') {
        char *end = NULL;
        const long first = strtol(list, &end, 10);
        if (end == list || first < 0) { return false; }
        long last = first;
        if (*end == '-') {
            const char *number = end + 1;
            last = strtol(number, &end, 10);
            if (end == number) { return false; }
        }
        if (last < first || last >= CPU_SETSIZE) { return false; }
        for (long core = first; core <= last; core++) { CPU_SET((int)core, set); }
        if (*end != ',' && *end != '\n' && *end) { return false; }
        list = *end == ',' ? end + 1 : end;
    }
    return CPU_COUNT(set) > 0;
}
// Returns the number of cores in a set of CPUs: two hardware threads of a core count once.
static inline int cores_physical(const cpu_set_t *set) {
    int cores = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        char path[96], list[256] = "";
        cpu_set_t siblings;
        if (!CPU_ISSET(cpu, set)) { continue; }
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
                 cpu);
        FILE *f = fopen(path, "r");
        const bool known = f && fgets(list, sizeof list, f) && cores_parse(list, &siblings);
        if (f) { fclose(f); }
        int first = known ? 0 : cpu; // the first of its core that is in the set
        while (first < cpu && !(CPU_ISSET(first, set) && CPU_ISSET(first, &siblings))) { first++; }
        cores += first == cpu;
    }
    return cores;
}
// Selects the cores of rank `index` of the `ranks` that share the set `allowed`: a contiguous part
// of it. It is the whole set if there are more ranks than cores, or if the rank wants more threads
// than its part has cores. wanted: threads; 0: one for each core. Returns the rank's threads.
static inline int cores_of_rank(const cpu_set_t *allowed, int index, int ranks, int64_t wanted,
                                cpu_set_t *mine) {
    const int cores = CPU_COUNT(allowed);
    const bool enough = ranks <= cores;
    const int begin = enough ? (int)part_begin(cores, ranks, index) : 0;
    const int end = enough ? (int)part_begin(cores, ranks, index + 1) : cores;
    const int threads = wanted ? (int)wanted : enough ? end - begin : 1;
    if (threads > end - begin) {
        *mine = *allowed;
        return threads;
    }
    CPU_ZERO(mine);
    for (int core = 0, at = 0; core < CPU_SETSIZE; core++) {
        if (!CPU_ISSET(core, allowed)) { continue; }
        if (at >= begin && at < end) { CPU_SET(core, mine); }
        at++;
    }
    return threads;
}

#endif
