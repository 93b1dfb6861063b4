// counts.h: what the tests of messages count, and how all ranks report it.
#ifndef TEST_COUNTS_H
#define TEST_COUNTS_H

#include "comm/comm.h"

static Comm comm;
static int passed, failed;     // checks of this rank
static int groups, red_groups; // groups of cases, a line each, over all ranks

// All ranks: one line for the tests since the last one.
static void report(const char *name) {
    static int passed_before, failed_before;
    int mine[2] = {passed - passed_before, failed - failed_before}, sum[2] = {0, 0};
    int *all = (int *)checked_malloc((size_t)comm.ranks * sizeof mine, "counts");
    comm_all_gather_small(&comm, mine, all, sizeof mine);
    for (int r = 0; r < comm.ranks; r++) {
        sum[0] += all[2 * r];
        sum[1] += all[2 * r + 1];
    }
    if (comm.rank == 0) {
        printf("%-58s %7d ok %5d failed\n", name, sum[0], sum[1]);
        fflush(stdout);
    }
    free(all);
    passed_before = passed;
    failed_before = failed;
    groups++;
    red_groups += sum[1] > 0;
}

#endif
