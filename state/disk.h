// disk.h: a file for optimizer states that neither device nor host has space for (update.h),
// and the buffers for its pieces.
//
// File     One for each rank, in the folder of --offload-dir; two if a delinked model follows in
//          the run (pseudo.h). Its name is removed as soon as it is open, so nothing is left
//          however a run ends. All of it is allocated before anything is written, so a full disk is
//          found before the first step. It bypasses the page cache (O_DIRECT) where the file system
//          allows that.
// Buffers  in host memory. Each has a thread, which handles the buffer's requests in order. So a
//          piece is written before the next one is read into its buffer, and several requests are
//          in progress at once, which disks need. Threads, not io_uring: four of them are as fast,
//          need no library, and work where containers forbid io_uring.
// Errors   A transfer that ends early is continued where it ended. A failure is recorded, and
//          reported by the next wait for the buffer: it ends all ranks (exit code 3).
#ifndef STORE_DISK_H
#define STORE_DISK_H

#include "base/base.h"
#include "state/policy.h"

#include <fcntl.h>       // O_DIRECT
#include <pthread.h>     // a thread for each buffer
#include <signal.h>      // signals are not for these threads
#include <sys/stat.h>    // size of the file
#include <sys/statvfs.h> // free space

enum {
    DISK_GRAIN = 4096, // alignment of offsets, addresses and lengths
    DISK_REQUESTS = 4, // most requests that wait for a buffer
    DISK_TRIES = 100,  // attempts of a transfer that makes no progress
};
#ifndef DISK_READ // tests inject faults here
#define DISK_READ pread
#define DISK_WRITE pwrite
#endif
#ifndef DISK_ALLOCATE
#define DISK_ALLOCATE posix_fallocate
#endif

typedef struct {
    char *memory;
    int64_t at, bytes;
    bool writes;
} DiskRequest;
typedef struct {
    const char *folder;
    int file;
    bool there, direct;
    int64_t bytes, taken; // as requested; as allocated
} DiskFile;
typedef struct Disk Disk;
typedef struct {
    Disk *disk;
    char *at; // the buffer's memory
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; // asked, done, ends
    DiskRequest request[DISK_REQUESTS];
    int64_t asked, done; // number of requests so far; `done` modulo DISK_REQUESTS is the next
    bool ends;
    DiskRequest failed; // first failed request; bytes 0: none failed
    int64_t found;      // bytes of it that were transferred
    int error;          // errno; 0: end of file
} DiskBuffer;
struct Disk {
    const DiskFile *file;
    bool open;
    int64_t bytes; // bytes of the file in use
    DiskBuffer buffer[DISK_PIECES];
};

// Returns the free bytes of a folder for users other than root; negative if they cannot be
// determined.
static inline double disk_free(const char *folder) {
    struct statvfs there;
    return statvfs(folder, &there) ? -1 : (double)there.f_bavail * (double)there.f_frsize;
}

// Returns the first aligned address in memory.
static inline char *disk_align(char *memory) {
    return memory + (DISK_GRAIN - (uintptr_t)memory % DISK_GRAIN) % DISK_GRAIN;
}

// Transfers a whole request, or records the failure in the buffer.
static inline void disk_transfer(DiskBuffer *buffer, const DiskRequest *r) {
    const int file = buffer->disk->file->file;
    int64_t done = 0;
    for (int tries = 0; done < r->bytes; tries++) {
        const size_t left = (size_t)(r->bytes - done);
        const ssize_t n = r->writes ? DISK_WRITE(file, r->memory + done, left, r->at + done)
                                    : DISK_READ(file, r->memory + done, left, r->at + done);
        const bool again = n > 0 || (n < 0 && (errno == EINTR || errno == EAGAIN));
        if (!again || tries == DISK_TRIES) {
            buffer->error = n < 0 ? errno : 0;
            buffer->found = done;
            buffer->failed = *r;
            return;
        }
        if (n >= (ssize_t)left) { return; }
        // direct transfers must begin at a whole block
        if (n >= DISK_GRAIN) {
            done += n / DISK_GRAIN * DISK_GRAIN;
            tries = 0;
        }
    }
}
static inline void *disk_work(void *of) {
    DiskBuffer *buffer = (DiskBuffer *)of;
    pthread_mutex_lock(&buffer->lock);
    for (;;) {
        while (buffer->done == buffer->asked && !buffer->ends) {
            pthread_cond_wait(&buffer->changed, &buffer->lock);
        }
        if (buffer->done == buffer->asked) { break; }
        const DiskRequest r = buffer->request[buffer->done % DISK_REQUESTS];
        const bool works = !buffer->failed.bytes;
        pthread_mutex_unlock(&buffer->lock);
        if (works) { disk_transfer(buffer, &r); }
        pthread_mutex_lock(&buffer->lock);
        buffer->done++;
        pthread_cond_broadcast(&buffer->changed);
    }
    pthread_mutex_unlock(&buffer->lock);
    return NULL;
}

// Waits until at most `left` requests of a buffer are in progress. Messages between ranks advance
// meanwhile. Ends the program (3) if a request has failed.
static inline void disk_wait_for(DiskBuffer *buffer, int64_t left) {
    const long SOON = 200000; // nanoseconds
    pthread_mutex_lock(&buffer->lock);
    while (buffer->asked - buffer->done > left) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += SOON;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&buffer->changed, &buffer->lock, &until);
        if (buffer->asked - buffer->done <= left) { break; }
        pthread_mutex_unlock(&buffer->lock);
        keep_alive();
        pthread_mutex_lock(&buffer->lock);
    }
    const DiskRequest f = buffer->failed;
    pthread_mutex_unlock(&buffer->lock);
    if (f.bytes) {
        die(EXIT_RESOURCES, "is the disk full, or broken? Checkpoints in --out are whole",
            "cannot %s the file in --offload-dir %s at byte %" PRId64 ": %" PRId64
            " bytes expected, %" PRId64 " found: %s",
            f.writes ? "write" : "read", buffer->disk->file->folder, f.at, f.bytes, buffer->found,
            buffer->error ? strerror(buffer->error) : "it ends there, or gets no further");
    }
}
static inline void disk_wait(DiskBuffer *buffer) { disk_wait_for(buffer, 0); }
// Starts a transfer between a buffer and the file, after the buffer's earlier requests. at, bytes:
// multiples of DISK_GRAIN.
static inline void disk_start(DiskBuffer *buffer, int64_t at, int64_t bytes, bool writes) {
    const DiskRequest r = {buffer->at, at, bytes, writes};
    assert(at % DISK_GRAIN == 0 && bytes % DISK_GRAIN == 0 && at + bytes <= buffer->disk->bytes);
    disk_wait_for(buffer, DISK_REQUESTS - 1);
    pthread_mutex_lock(&buffer->lock);
    buffer->request[buffer->asked++ % DISK_REQUESTS] = r;
    pthread_cond_broadcast(&buffer->changed);
    pthread_mutex_unlock(&buffer->lock);
}

// Makes an empty file without a name.
static inline int disk_new_file(const char *folder) {
    char path[1100];
    snprintf(path, sizeof path, "%s/train_gpt_XXXXXX", folder);
    const int file = mkstemp(path);
    if (file < 0) {
        die(EXIT_INPUT, "give it a folder that there is, and that can be written",
            "cannot make a file in --offload-dir %s: %s", folder, strerror(errno));
    }
    unlink(path);
    return file;
}
static inline void disk_check_folder(const char *folder) { close(disk_new_file(folder)); }
static inline void disk_look_at_file(DiskFile *f, int64_t bytes) {
    struct stat made;
    f->bytes = bytes;
    f->taken = fstat(f->file, &made) ? 0 : (int64_t)made.st_size;
}
// Makes the file with exactly so many bytes, all zero, or lengthens a shorter one. Ends the program
// (3) if the disk has too little space.
static inline void disk_take_file(DiskFile *f, const char *folder, int64_t bytes) {
    if (f->bytes >= bytes) { return; }
    if (!f->there) {
        f->folder = folder;
        f->file = disk_new_file(folder);
        f->there = true;
    }
    const int error = DISK_ALLOCATE(f->file, 0, bytes);
    if (error) {
        die(EXIT_RESOURCES,
            "give --offload-dir a folder with more free space, or a larger --host-memory",
            "cannot take %" PRId64 " bytes in --offload-dir %s, of which %.0f are free: %s", bytes,
            folder, disk_free(folder), strerror(error));
    }
    disk_look_at_file(f, bytes);
    const int flags = fcntl(f->file, F_GETFL);
    f->direct = flags >= 0 && !fcntl(f->file, F_SETFL, flags | O_DIRECT);
}
// Frees all but the first `bytes` bytes of the file, or all of it.
static inline void disk_cut_file(DiskFile *f, int64_t bytes) {
    if (f->bytes > bytes && !ftruncate(f->file, (off_t)bytes)) { disk_look_at_file(f, bytes); }
}
static inline void disk_free_file(DiskFile *f) {
    if (f->there) { close(f->file); }
    memset(f, 0, sizeof *f);
}
// Starts to use so many bytes of a file. buffers: DISK_PIECES times buffer_bytes, from a multiple
// of DISK_GRAIN on. d must not move until disk_close.
static inline void disk_open(Disk *d, const DiskFile *file, int64_t bytes, char *buffers,
                             size_t buffer_bytes) {
    sigset_t all, before;
    pthread_condattr_t clock; // of a clock that cannot be set
    memset(d, 0, sizeof *d);
    d->file = file;
    d->bytes = bytes;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    // signals are for the main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < DISK_PIECES; i++) {
        DiskBuffer *buffer = &d->buffer[i];
        buffer->disk = d;
        buffer->at = buffers + i * buffer_bytes;
        pthread_mutex_init(&buffer->lock, NULL);
        pthread_cond_init(&buffer->changed, &clock);
        const int error = pthread_create(&buffer->thread, NULL, disk_work, buffer);
        if (error) {
            die(EXIT_RESOURCES, "is there a limit of threads (ulimit -u)?",
                "cannot start a thread for --offload-dir: %s", strerror(error));
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_condattr_destroy(&clock);
    d->open = true;
}
static inline void disk_wait_all(Disk *d) {
    for (int i = 0; i < DISK_PIECES && d->open; i++) { disk_wait(&d->buffer[i]); }
}
static inline void disk_close(Disk *d) {
    for (int i = 0; i < DISK_PIECES && d->open; i++) {
        DiskBuffer *buffer = &d->buffer[i];
        pthread_mutex_lock(&buffer->lock);
        buffer->ends = true;
        pthread_cond_broadcast(&buffer->changed);
        pthread_mutex_unlock(&buffer->lock);
        pthread_join(buffer->thread, NULL);
        pthread_mutex_destroy(&buffer->lock);
        pthread_cond_destroy(&buffer->changed);
    }
    memset(d, 0, sizeof *d);
}

// Reads or writes any part of the file, aligned or not, through the first buffer. No request may be
// in progress.
static inline void disk_access(Disk *d, int64_t at, int64_t bytes, void *memory,
                               size_t buffer_bytes, bool writes) {
    DiskBuffer *buffer = &d->buffer[0];
    for (int64_t from = at, end = at + bytes, n; from < end; from += n) {
        const int64_t first = from / DISK_GRAIN * DISK_GRAIN,
                      length = min_i64(buffer_bytes, round_up(end, DISK_GRAIN) - first);
        char *there = (char *)memory + (from - at);
        n = min_i64(end, first + length) - from;
        const bool whole = from == first && n == length;
        if (!writes || !whole) {
            disk_start(buffer, first, length, false);
            disk_wait(buffer);
        }
        memcpy(writes ? buffer->at + (from - first) : there,
               writes ? there : buffer->at + (from - first), (size_t)n);
        if (writes) {
            disk_start(buffer, first, length, true);
            disk_wait(buffer);
        }
    }
}

#endif
