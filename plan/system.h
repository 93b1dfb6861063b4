// system.h: values from the operating system: the memory of this process and of the machine, and
// the energy that the CPU packages take.
#ifndef SYSTEM_H
#define SYSTEM_H

#include "ops/ops.h"

#include <malloc.h> // malloc_trim

static inline size_t memory_device(const size_t memory[MEMORY_KINDS]) {
    size_t sum = 0;
    for (int k = 0; k < MEMORY_KINDS; k++) { sum += memory[k]; }
    return sum;
}
// Returns the number in a line such as "VmHWM: 12 kB" of a file of the kernel; 0 if no line has the
// field.
static inline double kernel_number(const char *path, const char *field) {
    char line[256];
    double number = 0;
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) {
        if (!strncmp(line, field, strlen(field))) { number = atof(line + strlen(field)); }
    }
    if (f) { fclose(f); }
    return number;
}
// The same in bytes, for fields in kB.
static inline double kernel_bytes(const char *path, const char *field) {
    return 1024 * kernel_number(path, field);
}
// Returns the bytes of this process (VmRSS: now, VmHWM: at its peak) without its device memory.
// First returns the memory that the C library keeps after free() to the system.
static inline size_t host_bytes(const char *field) {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
    size_t all = (size_t)kernel_bytes("/proc/self/status", field),
           device = ops_memory_apart() ? 0 : memory_device(memory_taken);
    return all > device ? all - device : 0;
}
static inline double file_number(const char *path) { // first number of a file; NAN: none
    double value = NAN;
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%lf", &value) != 1) { value = NAN; }
    if (f) { fclose(f); }
    return value;
}
// Returns the bytes that the memory control group in `folder` still allows; INFINITY without a
// limit. Its usage includes inactive file pages. The kernel reclaims these before it refuses
// memory, so they count as available.
static inline double memory_group_available(const char *folder) {
    static const char *const versions[][3] = {
        {"memory.max", "memory.current", "inactive_file "},
        {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "}};
    double bytes = INFINITY;
    for (int i = 0; i < 2; i++) {
        char limit[1100], usage[1100], table[1100];
        snprintf(limit, sizeof limit, "%s/%s", folder, versions[i][0]);
        snprintf(usage, sizeof usage, "%s/%s", folder, versions[i][1]);
        snprintf(table, sizeof table, "%s/memory.stat", folder);
        // fmin ignores NAN
        bytes = fmin(bytes, file_number(limit) - file_number(usage) +
                                kernel_number(table, versions[i][2]));
    }
    return bytes;
}
// Returns how many cores the control group in `folder` may use on average; INFINITY without a
// quota.
static inline double cpu_group_quota(const char *folder) {
    char path[1100];
    double quota = NAN, period = NAN;
    snprintf(path, sizeof path, "%s/cpu.max", folder); // version 2: "QUOTA PERIOD" or "max PERIOD"
    FILE *f = fopen(path, "r");
    if (f) {
        if (fscanf(f, "%lf %lf", &quota, &period) != 2) { quota = NAN; }
        fclose(f);
    } else {
        snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder); // version 1; -1: none
        quota = file_number(path);
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
        period = file_number(path);
    }
    return quota > 0 && period > 0 ? quota / period : INFINITY;
}
// Returns the least that `limit` says of the control groups which this process belongs to, of their
// parents, and of the root that a container sees. controller: its name in version 1.
static inline double control_groups_least(const char *controller,
                                          double (*limit)(const char *folder)) {
    char line[512], folder[1024];
    FILE *f = fopen("/proc/self/cgroup", "r"); // lines such as "4:cpu,cpuacct:/path" and "0::/path"
    snprintf(folder, sizeof folder, "/sys/fs/cgroup/%s", controller);
    double least = fmin(limit("/sys/fs/cgroup"), limit(folder));
    while (f && fgets(line, sizeof line, f)) {
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        if (!path) { continue; }
        *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        bool mine = !names[1]; // version 2
        for (char *name = strtok(names + 1, ","); name; name = strtok(NULL, ",")) {
            mine |= !strcmp(name, controller);
        }
        for (; mine && *path == '/'; *strrchr(path, '/') = 0) {
            snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%s%s", names[1] ? "/" : "",
                     names[1] ? controller : "", path);
            least = fmin(least, limit(folder));
        }
    }
    if (f) { fclose(f); }
    return least;
}
// Returns the bytes still available to this process: the least that the machine and its control
// groups allow. INFINITY if no source reports a number.
static inline double memory_available(void) {
    double machine =
        kernel_bytes("/proc/meminfo", "MemAvailable:") + kernel_bytes("/proc/meminfo", "SwapFree:");
    return fmin(machine > 0 ? machine : INFINITY,
                control_groups_least("memory", memory_group_available));
}

// Measures the energy of the CPU packages since energy_meter(), by the counters of Linux's
// powercap, which wrap.
enum { ENERGY_PACKAGES = 64 };
typedef struct {
    const char *folder; // folder of the counters: /sys/class/powercap
    int packages;       // readable packages; 0: the machine reports no energy
    int number[ENERGY_PACKAGES];
    double range[ENERGY_PACKAGES], last[ENERGY_PACKAGES]; // counters in microjoules
    double joules;
} EnergyMeter;

// in microjoules, or NAN
static inline double energy_read(const EnergyMeter *m, int number, const char *name) {
    char path[160];
    snprintf(path, sizeof path, "%s/intel-rapl:%d/%s", m->folder, number, name);
    return file_number(path);
}
static inline EnergyMeter energy_meter(const char *folder) {
    EnergyMeter m = {};
    m.folder = folder;
    for (int i = 0; i < ENERGY_PACKAGES; i++) {
        double now = energy_read(&m, i, "energy_uj"),
               range = energy_read(&m, i, "max_energy_range_uj");
        if (isnan(now)) { continue; }
        m.number[m.packages] = i;
        m.last[m.packages] = now;
        m.range[m.packages++] = isnan(range) ? 0 : range;
    }
    return m;
}
// Returns the joules so far; NAN if the machine reports none. Call it more often than the counters
// wrap (minutes).
static inline double energy_joules(EnergyMeter *m) {
    for (int i = 0; i < m->packages; i++) {
        double now = energy_read(m, m->number[i], "energy_uj"), more = now - m->last[i];
        if (isnan(now)) { continue; }
        m->joules += (more < 0 ? more + m->range[i] : more) * 1e-6;
        m->last[i] = now;
    }
    return m->packages ? m->joules : NAN;
}

#endif
