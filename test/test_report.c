// test_report.c: what the program tells that no run can show everywhere: the energy meter against
// counters that are files of ours, memory against what the kernel says, words for a shell. The
// log's events are tested on the real program (test_train.py).
#include "ops/cpu/ops_cpu.h"
#include "report/report.h"

#include "harness.h"

static char folder[64] = "/tmp/test_report_XXXXXX";

static void counter(int package, const char *name, const char *text) {
    char path[160];
    snprintf(path, sizeof path, "%s/intel-rapl:%d", folder, package);
    mkdir(path, 0755);
    snprintf(path, sizeof path, "%s/intel-rapl:%d/%s", folder, package, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "%s\n", text);
    fclose(f);
}
static void forget(int package, const char *name) {
    char path[160];
    snprintf(path, sizeof path, "%s/intel-rapl:%d/%s", folder, package, name);
    unlink(path);
    *strrchr(path, '/') = 0;
    rmdir(path);
}

static void test_energy_of_all_packages(void **state) {
    (void)state;
    counter(0, "energy_uj", "5000000");
    counter(0, "max_energy_range_uj", "10000000");
    counter(3, "energy_uj", "100");
    counter(3, "max_energy_range_uj", "10000000");
    EnergyMeter m = energy_meter(folder);
    assert_int_equal(m.packages, 2);
    assert_true(energy_joules(&m) == 0);
    counter(0, "energy_uj", "7000000");
    counter(3, "energy_uj", "1000100");
    assert_true(fabs(energy_joules(&m) - 3) < 1e-12);
    assert_true(fabs(energy_joules(&m) - 3) < 1e-12); // counted once
    // wrapped: 3 J to the end of its range, 1 J more
    counter(0, "energy_uj", "1000000");
    assert_true(fabs(energy_joules(&m) - 7) < 1e-12);
    counter(0, "energy_uj", "nonsense"); // unreadable for once
    assert_true(fabs(energy_joules(&m) - 7) < 1e-12);
    counter(0, "energy_uj", "1500000");
    assert_true(fabs(energy_joules(&m) - 7.5) < 1e-12);
    for (int package = 0; package < 4; package += 3) {
        forget(package, "max_energy_range_uj"), forget(package, "energy_uj");
    }
}
static void test_energy_without_a_counter(void **state) {
    (void)state;
    EnergyMeter m = energy_meter(folder);
    assert_int_equal(m.packages, 0);
    assert_true(isnan(energy_joules(&m)));
}

static void test_memory_available(void **state) {
    (void)state;
    double available = memory_available(),
           total = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    assert_true(available > 0x1p20 && isfinite(available));
    assert_true(available < 4 * total); // swap comes on top
    assert_true(isnan(file_number("/nowhere")));
}

static void put(const char *name, const char *text) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}
static void take_away(const char *name) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(unlink(path), 0);
}

// What a control group allows more: its limit less its usage, of which the page cache nobody used
// lately does not count.
static void test_memory_of_a_group(void **state) {
    (void)state;
    assert_true(isinf(memory_group_available(folder)));
    put("memory.max", "1000\n");
    put("memory.current", "900\n");
    assert_true(memory_group_available(folder) == 100);
    put("memory.stat", "active_file 7\ninactive_file 300\nworkingset_refault_file 9\n");
    assert_true(memory_group_available(folder) == 400);
    put("memory.max", "max\n");
    assert_true(isinf(memory_group_available(folder)));
    put("memory.limit_in_bytes", "5000\n");
    put("memory.usage_in_bytes", "4000\n");
    // version 1: this group alone, and with those below it
    put("memory.stat", "inactive_file 1\ntotal_inactive_file 2000\n");
    assert_true(memory_group_available(folder) == 3000);
    const char *const names[] = {"memory.max", "memory.current", "memory.stat",
                                 "memory.limit_in_bytes", "memory.usage_in_bytes"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) { take_away(names[i]); }
}

// The cores that a group may use: of version 2 in one file, of version 1 in two.
static void test_quota_of_a_group(void **state) {
    (void)state;
    assert_true(isinf(cpu_group_quota(folder)));
    put("cpu.max", "max 100000\n");
    assert_true(isinf(cpu_group_quota(folder)));
    put("cpu.max", "4500 10000\n");
    assert_true(cpu_group_quota(folder) == 0.45);
    take_away("cpu.max");
    put("cpu.cfs_quota_us", "-1\n");
    put("cpu.cfs_period_us", "100000\n");
    assert_true(isinf(cpu_group_quota(folder)));
    put("cpu.cfs_quota_us", "150000\n");
    assert_true(cpu_group_quota(folder) == 1.5);
    take_away("cpu.cfs_quota_us");
    take_away("cpu.cfs_period_us");
    assert_true(control_groups_least("cpu", cpu_group_quota) > 0);
}

// What a shell reads is the word again.
static void test_shell_words(void **state) {
    (void)state;
    const char *const words[] = {
        "plain",        "",      "two words", "a'b", "$HOME `x` \"y\" \\", "*.bin", "tab\there",
        "--name=value", "{a,b}", "~",         "#"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        char command[400] = "printf %s", found[200];
        int saved = dup(STDOUT_FILENO);
        FILE *text = tmpfile();
        assert_non_null(text);
        fflush(stdout);
        dup2(fileno(text), STDOUT_FILENO);
        print_shell_word(words[i]);
        fflush(stdout);
        dup2(saved, STDOUT_FILENO);
        close(saved);
        rewind(text);
        size_t at = strlen(command), n = fread(command + at, 1, sizeof command - at - 1, text);
        command[at + n] = 0;
        fclose(text);
        FILE *shell = popen(command, "r");
        assert_non_null(shell);
        n = fread(found, 1, sizeof found - 1, shell);
        found[n] = 0;
        pclose(shell);
        assert_string_equal(found, words[i]);
    }
}

static int make_folder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : 1;
}
static int remove_folder(void **state) {
    (void)state;
    return rmdir(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_energy_of_all_packages),
        cmocka_unit_test(test_energy_without_a_counter),
        cmocka_unit_test(test_memory_available),
        cmocka_unit_test(test_memory_of_a_group),
        cmocka_unit_test(test_quota_of_a_group),
        cmocka_unit_test(test_shell_words),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
