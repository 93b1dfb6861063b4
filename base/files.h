// files.h: operations on files and paths that may not be what they seem: opens only regular files,
// creates only new files, and finds out whether two paths lead to one file.
//
// No function here writes through a symbolic link, or removes the file that a link leads to.
#ifndef FILES_H
#define FILES_H

#include "base/base.h"

#include <fcntl.h>    // open
#include <signal.h>   // reading a mapped file may fail
#include <sys/file.h> // flock
#include <sys/mman.h> // mmap
#include <sys/stat.h> // kinds of files

enum { PATH_BYTES = 4096, PATH_LINKS = 40 }; // as Linux limits them

// A path in a folder that an option names, or the reason of a failure.
typedef struct {
    char at[1600];
} Text;
__attribute__((format(printf, 1, 2))) static inline Text text_of(const char *format, ...) {
    Text t;
    va_list values;
    va_start(values, format);
    vsnprintf(t.at, sizeof t.at, format, values);
    va_end(values);
    return t;
}

// A text that grows.
typedef struct {
    char *text;
    size_t length, capacity;
} TextBuffer;
__attribute__((format(printf, 2, 3))) static inline void text_add(TextBuffer *t, const char *format,
                                                                  ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (t->length + n + 1 > t->capacity) {
        t->capacity = 2 * t->capacity + n + 1024;
        t->text = (char *)realloc(t->text, t->capacity);
        if (!t->text) { die(EXIT_RESOURCES, NULL, "cannot hold a text of %zu bytes", t->capacity); }
    }
    va_start(args, format);
    vsnprintf(t->text + t->length, n + 1, format, args);
    va_end(args);
    t->length += n;
}

static inline const char *file_kind_name(mode_t mode) {
    switch (mode & S_IFMT) {
    case S_IFREG: return "a file";
    case S_IFDIR: return "a folder";
    case S_IFLNK: return "a symbolic link";
    case S_IFIFO: return "a pipe";
    case S_IFSOCK: return "a socket";
    default: return "a device";
    }
}
// Opens an untrusted file for reading. flags: more of open()'s. Returns -1 with errno if it is no
// regular file: opening a pipe would block, and a device has no end.
static inline int open_untrusted(const char *path, int flags, struct stat *info) {
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | flags);
    if (fd < 0 || (!fstat(fd, info) && S_ISREG(info->st_mode))) { return fd; }
    close(fd);
    errno = S_ISDIR(info->st_mode) ? EISDIR : ENOTSUP;
    return -1;
}
static inline FILE *open_regular(const char *path) {
    struct stat info;
    const int fd = open_untrusted(path, 0, &info);
    return fd < 0 ? NULL : fdopen(fd, "rb");
}
// Returns an untrusted file's content, followed by a 0 that `bytes` does not count; the caller
// frees it. Ends the program (EXIT_INPUT) if it cannot be read, or has more than `most` bytes.
static inline char *read_file(const char *path, const char *hint, size_t most, size_t *bytes) {
    FILE *f = open_regular(path);
    struct stat info;
    if (!f) {
        const bool kind = errno == ENOTSUP && !stat(path, &info);
        die(EXIT_INPUT, hint, "cannot read %s: %s%s", path, kind ? "it is " : "",
            kind ? file_kind_name(info.st_mode) : strerror(errno));
    }
    fstat(fileno(f), &info);
    *bytes = (size_t)info.st_size;
    if (*bytes > most) { die(EXIT_INPUT, hint, "%s is larger than %zu bytes", path, most); }
    char *text = (char *)checked_malloc(*bytes + 1, "a file");
    const size_t got = fread(text, 1, *bytes, f);
    const bool bad = got != *bytes;
    fclose(f);
    if (bad) { die(EXIT_INPUT, hint, "cannot read %s", path); }
    return text;
}
// Creates a new file for writing. Returns -1 with errno on failure. Removes a regular file of this
// name first (a crash may have left it), unless another program still writes it: errno EBUSY.
// Anything else of this name stays, with errno EEXIST. Rename the file before it is closed: closing
// ends its lock.
static inline int file_create(const char *path, mode_t mode) {
    struct stat info;
    const int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    const bool left = !lstat(path, &info) && S_ISREG(info.st_mode);
    const int old = left ? open(path, O_RDONLY | flags) : -1;
    const bool busy = old >= 0 && flock(old, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK;
    if (left && !busy) { unlink(path); }
    if (old >= 0) { close(old); }
    const int fd = busy ? -1 : open(path, O_RDWR | O_CREAT | O_EXCL | flags, mode);
    const bool held = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK;
    const bool gone = fd >= 0 && !fstat(fd, &info) && !info.st_nlink;
    if (fd >= 0 && (held || gone)) { close(fd); }
    if (busy || held || gone) { errno = EBUSY; }
    return busy || held || gone ? -1 : fd;
}
// The time that files of this run get as the time of their last change; 0: the true one. Private
// runs set it, whose steps take as long as their samples are many.
static time_t files_time;
static inline void file_hide_time(int fd) {
    const struct timespec times[2] = {{.tv_sec = files_time}, {.tv_sec = files_time}};
    if (files_time && fd >= 0) { futimens(fd, times); }
}
static inline void folder_hide_time(const char *path) {
    const struct timespec times[2] = {{.tv_sec = files_time}, {.tv_sec = files_time}};
    if (files_time) { utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW); }
}
static inline void sync_folder(const char *path) { // makes renames in the folder durable, if it can
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) { return; }
    fsync(fd);
    close(fd);
}

// -------------------------------------------------------------------------------------------------
// The file that a path leads to

static inline void path_cut(char *path) { // removes the last part
    char *slash = strrchr(path, '/');
    *(slash ? slash : path) = 0;
}
// Resolves a path to an absolute one without links, "." and "..". The file and folders above it
// need not exist. Returns false if the path leads nowhere: it is empty or too long, or has too many
// links.
static inline bool path_resolve(const char *path, char resolved[PATH_BYTES]) {
    char rest[2 * PATH_BYTES], joined[2 * PATH_BYTES], target[PATH_BYTES];
    int links = 0;
    resolved[0] = 0;
    if (!*path || strlen(path) >= PATH_BYTES) { return false; }
    if (*path != '/' && !getcwd(resolved, PATH_BYTES)) { return false; }
    if (!strcmp(resolved, "/")) { resolved[0] = 0; }
    strcpy(rest, path);
    for (char *at = rest, *next; *at; at = next) {
        const size_t length = strcspn(at, "/"), end = strlen(resolved);
        next = at + length + (at[length] == '/');
        at[length] = 0;
        if (!strcmp(at, "..")) { path_cut(resolved); }
        if (!*at || !strcmp(at, ".") || !strcmp(at, "..")) { continue; }
        if (end + length + 2 > PATH_BYTES) { return false; }
        snprintf(resolved + end, PATH_BYTES - end, "/%s", at);
        const ssize_t n = readlink(resolved, target, sizeof target - 1);
        if (n < 0) { continue; } // no link, or does not exist
        target[n] = 0;
        const int all = snprintf(joined, sizeof joined, "%s/%s", target, next);
        if (++links > PATH_LINKS || all >= (int)sizeof joined) { return false; }
        strcpy(rest, joined);
        next = rest;
        resolved[*target == '/' ? 0 : end] = 0;
    }
    if (!*resolved) { strcpy(resolved, "/"); }
    return true;
}

// Identifies a file: an existing one by its device and inode, any other by its resolved path.
typedef struct {
    struct stat info;      // valid if the file exists
    bool there;            // the file exists
    char path[PATH_BYTES]; // resolved; "": it leads nowhere
} FileIdentity;
static inline FileIdentity file_identity(const char *path) {
    FileIdentity f = {};
    f.there = !stat(path, &f.info);
    if (!path_resolve(path, f.path)) { f.path[0] = 0; }
    return f;
}
// Returns whether both are the status of one regular file, by whatever path or link it was found.
static inline bool stat_same(const struct stat *x, const struct stat *y) {
    return S_ISREG(x->st_mode) && x->st_dev == y->st_dev && x->st_ino == y->st_ino;
}
// Returns whether writing one file would change the other. Files that are not regular, such as
// /dev/null or a pipe, keep nothing.
static inline bool file_same(const FileIdentity *a, const FileIdentity *b) {
    if (a->there != b->there) { return false; }
    if (!a->there) { return *a->path && !strcmp(a->path, b->path); }
    return stat_same(&a->info, &b->info);
}
// Returns the name after the last slash of a resolved path.
static inline const char *path_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
// Returns whether a resolved path is inside a resolved folder, at any depth. A folder is not inside
// itself.
static inline bool path_in(const char *path, const char *folder) {
    const size_t n = strcmp(folder, "/") ? strlen(folder) : 0;
    return *folder && !strncmp(path, folder, n) && path[n] == '/' && path[n + 1];
}

// -------------------------------------------------------------------------------------------------
// Mapped files. Reading one that was cut off meanwhile raises SIGBUS, or gives zeros where the file
// now ends in the middle of a page: the handler and mapped_check() end the program (EXIT_INPUT).
typedef struct MappedFile {
    struct MappedFile *next;
    const char *at;
    size_t bytes;
    dev_t device; // which file it is: another one may take its name, which changes nothing here
    ino_t inode;
    char path[];
} MappedFile;
static MappedFile *mapped_files;
static struct sigaction bus_before;

__attribute__((noreturn)) static inline void mapped_refuse(const MappedFile *f) {
    die(EXIT_INPUT, "files of a run must not change while it goes on: put the file back",
        "%s: expected %zu bytes as when it was opened, found a file that was cut off or changed",
        f->path, f->bytes);
}
// Ends the program if the file was cut off after it was mapped. Called after reading: what was read
// before the check is as in the file then.
static inline void mapped_check(const MappedFile *f) {
    struct stat now;
    const bool same = !stat(f->path, &now) && now.st_dev == f->device && now.st_ino == f->inode;
    if (same && (size_t)now.st_size < f->bytes) { mapped_refuse(f); }
}
// A read of a mapping cannot be repeated, and the program does not go on after it. So this handler
// may call what others must not: the signal did not come between, it is the read itself.
static inline void mapped_bus(int number, siginfo_t *info, void *context) {
    const char *at = (const char *)info->si_addr;
    (void)context;
    for (const MappedFile *f = mapped_files; f; f = f->next) {
        if (at >= f->at && (size_t)(at - f->at) < f->bytes) { mapped_refuse(f); }
    }
    sigaction(number, &bus_before, NULL); // of another cause: it comes again
}
static inline const MappedFile *mapped_add(const void *map, const char *path,
                                           const struct stat *info) {
    MappedFile *f =
        (MappedFile *)checked_malloc(sizeof(MappedFile) + strlen(path) + 1, "a mapped file");
    f->next = mapped_files;
    f->at = (const char *)map;
    f->bytes = (size_t)info->st_size;
    f->device = info->st_dev;
    f->inode = info->st_ino;
    strcpy(f->path, path);
    if (!mapped_files) {
        struct sigaction action = {};
        action.sa_sigaction = mapped_bus;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGBUS, &action, &bus_before);
    }
    return mapped_files = f;
}
// Checks and unmaps what map_file() mapped.
static inline void unmap_file(const void *map) {
    MappedFile **at = &mapped_files;
    while (*at && (*at)->at != map) { at = &(*at)->next; }
    if (!*at) { return; }
    MappedFile *f = *at;
    mapped_check(f);
    *at = f->next;
    munmap((void *)(uintptr_t)map, f->bytes);
    free(f);
    if (!mapped_files) { sigaction(SIGBUS, &bus_before, NULL); }
}

// The header of data files: 256 int32.
enum { DATA_HEADER_BYTES = 1024 };
// Maps a file read-only and sets *bytes. The file must be regular and have at least `least` bytes.
// unmap_file() unmaps it.
static inline void *map_file(const char *path, const char *what, const char *hint, int least,
                             size_t *bytes) {
    struct stat info;
    const int fd = open_untrusted(path, 0, &info);
    if (fd < 0 && (errno == EISDIR || errno == ENOTSUP)) {
        die(EXIT_INPUT, hint, "%s: expected %s, found %s", path, what,
            errno == EISDIR ? "a directory (a pattern such as DIR/*.bin names its files)"
                            : "no regular file");
    }
    if (fd < 0) { die(EXIT_INPUT, hint, "%s: cannot open %s: %s", path, what, strerror(errno)); }
    if (info.st_size < least) {
        die(EXIT_INPUT, hint,
            "%s: expected %s with a header of %d bytes, found a file of %" PRId64 " bytes", path,
            what, least, info.st_size);
    }
    *bytes = info.st_size;
    void *map = mmap(NULL, *bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) {
        die(EXIT_RESOURCES, "free address space or memory", "%s: cannot map %zu bytes: %s", path,
            *bytes, strerror(errno));
    }
    close(fd);
    mapped_add(map, path, &info);
    return map;
}
static inline void *data_map_file(const char *path, const char *what, const char *hint,
                                  size_t *bytes) {
    return map_file(path, what, hint, DATA_HEADER_BYTES, bytes);
}

#endif
