// test_disk.c: a file of rooms and threads (state/disk.h) does what an array would, whatever its
// transfers come to.
#include <sys/types.h>
static ssize_t some_read(int file, void *memory, unsigned long bytes, off_t at);
static ssize_t some_write(int file, const void *memory, unsigned long bytes, off_t at);
#define DISK_READ some_read
#define DISK_WRITE some_write
#include "state/disk.h"

#include "harness.h"

enum {
    SECTOR = 512,
    BLOCKS = 40,
    BUFFER_BLOCKS = 3,
    FILE_BYTES = BLOCKS * DISK_GRAIN,
    BUFFER_BYTES = BUFFER_BLOCKS * DISK_GRAIN
};
static char expected[FILE_BYTES];
static bool stops; // transfers stop early, or are interrupted, or both

// Each is drawn by lot from its number; threads may not share a random generator.
static size_t some_of(size_t bytes) {
    static uint64_t transfers;
    const uint64_t draw = random_u64(7, 11, __atomic_add_fetch(&transfers, 1, __ATOMIC_SEQ_CST));
    return !stops || draw % 4 == 0 ? bytes
           : draw % 4 == 1         ? 0
                                   : draw / 4 % (bytes / SECTOR + 1) * SECTOR;
}
static ssize_t some_read(int file, void *memory, unsigned long bytes, off_t at) {
    const size_t n = some_of(bytes);
    memset(memory, 0x55, bytes); // what has not come
    return n ? pread(file, memory, n, at) : (errno = EINTR, -1);
}
static ssize_t some_write(int file, const void *memory, unsigned long bytes, off_t at) {
    const size_t n = some_of(bytes);
    return n ? pwrite(file, memory, n, at) : (errno = EINTR, -1);
}

static void fill(char *memory, int64_t bytes, uint64_t draw) {
    for (int64_t i = 0; i < bytes; i++) { memory[i] = (char)random_u64(3, draw, (uint64_t)i); }
}
// Pieces come into rooms in turns, are changed there and go back, as in a step; parts of any length
// at any place in between.
static void check_against_array(void) {
    char *memory = (char *)calloc(1, (size_t)DISK_PIECES * BUFFER_BYTES + DISK_GRAIN),
         part[3 * BUFFER_BYTES];
    Disk d;
    DiskFile file = {NULL, 0, false, false, 0, 0};
    disk_take_file(&file, "/tmp", FILE_BYTES);
    disk_open(&d, &file, FILE_BYTES, disk_align(memory), BUFFER_BYTES);
    assert_int_equal(file.taken, FILE_BYTES);
    memset(expected, 0, FILE_BYTES);
    for (uint64_t round = 0; round < 60; round++) {
        for (int64_t piece = 0, at = 0; at < FILE_BYTES; piece++, at += BUFFER_BYTES) {
            DiskBuffer *buffer = &d.buffer[piece % DISK_PIECES];
            const int64_t bytes = min_i64(BUFFER_BYTES, FILE_BYTES - at);
            disk_start(buffer, at, bytes, false);
            disk_wait(buffer);
            assert_memory_equal(buffer->at, expected + at, (size_t)bytes);
            fill(expected + at, bytes, round * BLOCKS + (uint64_t)piece);
            memcpy(buffer->at, expected + at, (size_t)bytes);
            disk_start(buffer, at, bytes, true);
        }
        disk_wait_all(&d);
        const int64_t bytes = 1 + (int64_t)(random_u64(5, round, 0) % sizeof part),
                      at = (int64_t)(random_u64(5, round, 1) % (uint64_t)(FILE_BYTES - bytes));
        disk_access(&d, at, bytes, part, BUFFER_BYTES, false);
        assert_memory_equal(part, expected + at, (size_t)bytes);
        fill(part, bytes, round);
        memcpy(expected + at, part, (size_t)bytes);
        disk_access(&d, at, bytes, part, BUFFER_BYTES, true);
    }
    disk_close(&d);
    free(memory);
    disk_free_file(&file);
}
static void test_whole_transfers(void **state) {
    (void)state;
    stops = false;
    check_against_array();
}
static void test_transfers_that_stop(void **state) {
    (void)state;
    stops = true;
    check_against_array();
}
// A file gets longer and shorter, and has what it had; what it gets is zero.
static void test_lengths(void **state) {
    (void)state;
    DiskFile file = {NULL, 0, false, false, 0, 0};
    char *all = (char *)calloc(1, 4 * DISK_GRAIN), *memory = disk_align(all);
    const int64_t lengths[] = {2, 3, 1, 3}; // in blocks
    disk_take_file(&file, "/tmp", DISK_GRAIN);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        memset(memory, 1, DISK_GRAIN);
        assert_int_equal(pwrite(file.file, memory, DISK_GRAIN, 0), DISK_GRAIN);
        disk_take_file(&file, "/tmp", lengths[i] * DISK_GRAIN);
        disk_cut_file(&file, lengths[i] * DISK_GRAIN);
        assert_int_equal(file.taken, lengths[i] * DISK_GRAIN);
        assert_int_equal(pread(file.file, memory, 3 * DISK_GRAIN, 0), lengths[i] * DISK_GRAIN);
        for (int64_t k = 0; k < lengths[i] * DISK_GRAIN; k++) {
            assert_int_equal(memory[k], k < DISK_GRAIN);
        }
    }
    disk_free_file(&file);
    free(all);
    assert_false(file.there);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_whole_transfers),
                                       cmocka_unit_test(test_transfers_that_stop),
                                       cmocka_unit_test(test_lengths)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
