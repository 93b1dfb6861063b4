// system.h: values from the operating system: the memory of this process and of the machine, and
// the energy that the CPU packages take.
#ifndef SYSTEM_H
#define SYSTEM_H

#include "ops/ops.h" // memory of the device

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
// Returns the bytes still available to this process: the least that the machine and its control
// groups allow. INFINITY if no source reports a number.
static inline double memory_available(void) {
    double machine = kernel_bytes("/proc/meminfo", "MemAvailable:") +
                     kernel_bytes("/proc/meminfo", "SwapFree:"),
           bytes = machine > 0 ? machine : INFINITY;
    bytes = fmin(bytes, fmin(memory_group_available("/sys/fs/cgroup"),
                             memory_group_available("/sys/fs/cgroup/memory")));
    char line[512];
    FILE *f = fopen("/proc/self/cgroup", "r"); // lines such as "4:memory:/path" and "0::/path"
    while (f && fgets(line, sizeof line, f)) {
        char *kind = strchr(line, ':'), *path = kind ? strchr(kind + 1, ':') : NULL, folder[1024];
        if (!path || (strncmp(kind, "::", 2) && strncmp(kind, ":memory:", 8))) { continue; }
        snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%.*s", path == kind + 1 ? "" : "/memory",
                 (int)strcspn(path + 1, "\n"), path + 1);
        bytes = fmin(bytes, memory_group_available(folder));
    }
    if (f) { fclose(f); }
    return bytes;
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
