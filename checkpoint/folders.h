// folders.h: the folder of a run, OUT, with its lock and its checkpoints, and the folders of these.
// Only files that this program writes are removed, by their exact names, and no link is followed: a
// checkpoint may be a link to a folder elsewhere, which is read, but which --keep does not touch.
#ifndef FOLDERS_H
#define FOLDERS_H

#include "base/base.h"
#include "base/files.h"
#include "comm/comm.h"
#include "comm/records.h"

#include <dirent.h>      // folders
#include <sys/file.h>    // flock
#include <sys/syscall.h> // renameat2

static inline Text checkpoint_folder(const char *out, int64_t step, const char *suffix) {
    return text_of("%s/step_%08" PRId64 "%s", out, step, suffix);
}
// Returns what follows a prefix and a number of so many digits; NULL if the name does not begin so.
// Only the shortest numbers may begin with 0.
static inline const char *name_after_number(const char *name, const char *prefix, size_t least,
                                            size_t most) {
    const size_t n = strlen(prefix);
    if (strncmp(name, prefix, n)) { return NULL; }
    const size_t digits = strspn(name + n, "0123456789");
    const bool good = digits >= least && digits <= most && (digits == least || name[n] != '0');
    return good ? name + n + digits : NULL;
}
// Returns the step of a checkpoint's folder, if its name is exactly as checkpoint_folder() makes
// it; else -1. *rest: what follows the digits.
static inline int64_t checkpoint_step_of(const char *name, const char **rest) {
    *rest = name_after_number(name, "step_", 8, 18);
    return *rest ? strtoll(name + 5, NULL, 10) : -1;
}
// Returns the folder in which a step is written: step_00000020.tmp, or .2.tmp to .9.tmp if others
// exist that cannot be removed.
enum { HALVES = 9 };
static inline Text checkpoint_half(const char *out, int64_t step, int turn) {
    return checkpoint_folder(out, step, turn > 1 ? text_of(".%d.tmp", turn).at : ".tmp");
}
static inline bool checkpoint_is_half(const char *name) {
    const char *rest;
    if (checkpoint_step_of(name, &rest) < 0) { return false; }
    if (rest[0] == '.' && rest[1] >= '2' && rest[1] <= '0' + HALVES) { rest += 2; }
    return !strcmp(rest, ".tmp");
}
// Is this the name of a checkpoint's file: manifest, state_00000 ..., or one of these while it is
// written?
static inline bool checkpoint_file_name(const char *name) {
    const size_t n = strlen("manifest");
    const char *end =
        strncmp(name, "manifest", n) ? name_after_number(name, "state_", 5, 9) : name + n;
    return end && (!*end || !strcmp(end, ".tmp"));
}
// Removes a checkpoint's file from an open folder. Returns false if the file remains, or is none of
// a checkpoint.
static inline bool folder_remove_file(int folder, const char *name) {
    struct stat info;
    keep_alive();
    const bool there = !fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW);
    return checkpoint_file_name(name) && there && S_ISREG(info.st_mode) &&
           !unlinkat(folder, name, 0);
}
// Removes a checkpoint's folder, and in it the files that a checkpoint has. The manifest goes last,
// so that the remains of a folder with a manifest are still recognised. If the folder contains
// anything else it stays, with a warning. No link is followed.
static inline void folder_remove(const char *path) {
    struct stat info;
    if (lstat(path, &info)) { return; }
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (!d && !S_ISDIR(info.st_mode)) {
        const char *kind = file_kind_name(info.st_mode);
        fprintf(stderr, "warning: %s is left as it is: it is %s and no folder\n", path, kind);
        return;
    }
    bool foreign = false;
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *name = e->d_name;
        if (!strcmp(name, ".") || !strcmp(name, "..") || !strcmp(name, "manifest")) { continue; }
        if (!folder_remove_file(dirfd(d), name)) { foreign = true; }
    }
    if (d) {
        folder_remove_file(dirfd(d), "manifest");
        closedir(d);
    }
    if (!rmdir(path) || errno == ENOENT) { return; }
    const char *why = foreign ? "there is something in it that no checkpoint has" : strerror(errno);
    fprintf(stderr, "warning: %s cannot be removed: %s\n", path, why);
}
// Is this a folder, not a link to one, with a manifest in it?
static inline bool folder_has_manifest(const char *path) {
    struct stat folder, manifest;
    return !lstat(path, &folder) && S_ISDIR(folder.st_mode) &&
           !lstat(text_of("%s/manifest", path).at, &manifest) && S_ISREG(manifest.st_mode);
}
static inline int compare_i64_descending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}
// Lists the steps whose folders are named like checkpoints, newest first. The caller frees the
// list.
static inline int64_t *checkpoint_list(const char *out, int *count) {
    int64_t *steps = NULL, capacity = 0;
    *count = 0;
    DIR *d = opendir(out);
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *rest;
        const int64_t step = checkpoint_step_of(e->d_name, &rest);
        if (step < 0 || *rest) { continue; }
        steps = grow_array(int64_t, steps, *count, &capacity, "checkpoints");
        steps[(*count)++] = step;
    }
    if (d) { closedir(d); }
    if (steps) { qsort(steps, *count, sizeof *steps, compare_i64_descending); }
    return steps;
}

// Returns the same list on all ranks, as rank 0 finds it. All ranks call it.
static inline int64_t *checkpoint_steps(const char *out, Comm *comm, int *count) {
    int64_t *steps = comm->rank == 0 ? checkpoint_list(out, count) : NULL;
    comm_broadcast(comm, count, sizeof *count, 0);
    if (!steps) { steps = new_array(int64_t, *count + 1, "checkpoints"); }
    comm_broadcast(comm, steps, *count * sizeof *steps, 0);
    return steps;
}

// Makes a folder, and the missing ones above it. Returns 0 or an errno.
static inline int folder_make(const char *out) {
    Text path = text_of("%s", out);
    for (char *end = path.at; *end;) { // one parent after another, then the folder itself
        end += 1 + strcspn(end + 1, "/");
        char next = *end;
        *end = 0;
        if (mkdir(path.at, 0777) && errno != EEXIST) { return errno; }
        *end = next;
    }
    struct stat info;
    return stat(path.at, &info) ? errno : S_ISDIR(info.st_mode) ? 0 : ENOTDIR;
}

// Takes the lock of OUT, for as long as the process lives: a second run in the same folder ends
// here (2).
static inline void out_folder_lock(const char *out) {
    const Text path = text_of("%s/lock", out);
    struct stat info;
    const mode_t mode = lstat(path.at, &info) ? S_IFREG : info.st_mode;
    if (!S_ISREG(mode)) {
        die(EXIT_INPUT, "remove it: the program makes a file of this name", "%s is %s", path.at,
            file_kind_name(mode));
    }
    const int fd = open(path.at, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd < 0) {
        die(EXIT_RESOURCES, "--out must be writable", "cannot write into %s: %s", out,
            strerror(errno));
    }
    if (!flock(fd, LOCK_EX | LOCK_NB)) { return; }
    if (errno == EWOULDBLOCK) {
        die(EXIT_INPUT, "give each run its own --out", "another run is using %s", out);
    }
    die(EXIT_RESOURCES, "choose a file system for --out that has locks", "cannot lock %s: %s",
        path.at, strerror(errno));
}
// Refuses a folder named OUT/stop: it would stop each run after its first step, and could not be
// removed.
static inline void out_folder_check_stop(const char *out) {
    const Text path = text_of("%s/stop", out);
    struct stat info;
    if (!stat(path.at, &info) && S_ISDIR(info.st_mode)) {
        die(EXIT_INPUT, "remove it: a file of this name stops a run", "%s is a folder", path.at);
    }
}
// Returns whether OUT has no checkpoint, whole or damaged, nor what a name suggests to be one. What
// a crash has left half-written does not count.
static inline bool out_folder_has_none(const char *out) {
    DIR *d = opendir(out);
    bool none = d || errno == ENOENT;
    for (struct dirent *e; d && (e = readdir(d));) {
        none &= strncmp(e->d_name, "step_", 5) || checkpoint_is_half(e->d_name);
    }
    if (d) { closedir(d); }
    return none;
}
// Removes what a crash has left half-written, and warns of names that resemble a checkpoint's but
// are none.
static inline void out_folder_clean(const char *out) {
    Text odd;
    int64_t odds = 0;
    DIR *d = opendir(out);
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *rest, *name = e->d_name;
        const Text path = text_of("%s/%s", out, name);
        const bool half = checkpoint_is_half(name);
        const bool whole = checkpoint_step_of(name, &rest) >= 0 && !*rest;
        if (half) { folder_remove(path.at); }
        if (half || whole || strncmp(name, "step_", 5)) { continue; }
        if (!odds++) { odd = path; }
    }
    if (d) { closedir(d); }
    if (!odds) { return; }
    fprintf(stderr, "warning: %s", odd.at);
    if (odds > 1) { fprintf(stderr, " and %" PRId64 " others of %s", odds - 1, out); }
    fprintf(stderr, ": no checkpoint has such a name (step_00000020 has); left as found\n");
}
// Makes a new folder OUT/earlier-N.
static inline Text earlier_folder_make(const char *out) {
    enum { EARLIER_MOST = 1000000 };
    for (int n = 1;; n++) {
        const Text path = text_of("%s/earlier-%d", out, n);
        if (!mkdir(path.at, 0777)) { return path; }
        if (errno == EEXIST && n < EARLIER_MOST) { continue; }
        die(EXIT_RESOURCES, "an earlier run's checkpoints belong there: choose another --out",
            "cannot make %s: %s", path.at, strerror(errno));
    }
}
// Moves an entry of OUT into a folder of OUT. A link with a relative target is made again. Returns
// 0 or an errno.
static inline int earlier_move(const char *out, const char *name, const char *folder) {
    char target[PATH_BYTES + 4] = "../";
    const Text from = text_of("%s/%s", out, name), to = text_of("%s/%s", folder, name);
    const ssize_t n = readlink(from.at, target + 3, PATH_BYTES);
    if (n <= 0 || n == PATH_BYTES || target[3] == '/') {
        return rename(from.at, to.at) ? errno : 0;
    }
    target[3 + n] = 0;
    return symlink(target, to.at) || unlink(from.at) ? errno : 0;
}
// Moves the checkpoints of an earlier run, with its key and record of private steps, to
// OUT/earlier-N, so that nothing is lost or mixed up.
static inline void out_folder_set_aside(const char *out) {
    // Key and record go first: a private run cannot continue without them.
    static const char *const along[] = {"dp_key", "dp_steps"};
    int count;
    int64_t *steps = checkpoint_list(out, &count);
    if (!count) { return; }
    const Text folder = earlier_folder_make(out);
    for (int i = 0; i < count + 2; i++) {
        const Text name =
            i < 2 ? text_of("%s", along[i]) : text_of("step_%08" PRId64, steps[i - 2]);
        const int error = earlier_move(out, name.at, folder.at);
        if (error && (i >= 2 || error != ENOENT)) {
            die(EXIT_RESOURCES, "choose another --out", "cannot move %s/%s to %s: %s", out, name.at,
                folder.at, strerror(error));
        }
    }
    printf("note: %d checkpoints of an earlier run moved to %s (to go on from them: --resume 1)\n",
           count, folder.at);
    free(steps);
}
// Makes OUT, locks and cleans it, and moves the checkpoints of an earlier run away unless this run
// resumes it. Rank 0 calls it.
static inline void out_folder_prepare(const char *out, bool resume) {
    int error = folder_make(out);
    if (error) {
        die(error == ENOSPC || error == EDQUOT || error == EROFS ? EXIT_RESOURCES : EXIT_INPUT,
            "--out names a folder that can be made", "cannot make %s: %s", out, strerror(error));
    }
    out_folder_lock(out);
    out_folder_check_stop(out);
    out_folder_clean(out);
    if (!resume) { out_folder_set_aside(out); }
}

// Renames a finished folder to its final name. If another entry has that name (an older checkpoint
// of the same step, or a foreign one), the two are exchanged atomically, and the program's own
// files in the other are removed.
static inline int folder_publish(const char *temporary, const char *path, const char *out) {
    sync_folder(temporary);
    folder_hide_time(temporary);
    int error = 0;
    if (rename(temporary, path)) {
        error = syscall(SYS_renameat2, AT_FDCWD, temporary, AT_FDCWD, path, 2 /* RENAME_EXCHANGE */)
                    ? errno
                    : 0;
        if (!error) { folder_remove(temporary); }
    }
    folder_hide_time(out);
    sync_folder(out);
    return error;
}

// Keeps the newest `keep` checkpoints up to `saved`, and the newest that is known to be good (-1:
// none), even if it is older: those before it are removed, of others a resume may have need. Later
// steps are left alone: they belong to a run that continued differently. Links to folders
// elsewhere, and folders without a manifest, are left alone too and do not count.
static inline void checkpoints_prune(const char *out, int64_t saved, int64_t keep, int64_t good) {
    int count;
    int64_t *steps = checkpoint_list(out, &count);
    for (int64_t i = 0, kept = 0; keep && i < count; i++) {
        const Text path = checkpoint_folder(out, steps[i], "");
        const bool counts = steps[i] <= saved && folder_has_manifest(path.at);
        if (counts && ++kept > keep && steps[i] < good) { folder_remove(path.at); }
    }
    folder_hide_time(out);
    free(steps);
}
// Makes an empty folder for a checkpoint to be written. Returns the number in its name
// (checkpoint_half), or minus an errno.
static inline int checkpoint_half_make(const char *out, int64_t step) {
    for (int turn = 1;; turn++) {
        const Text path = checkpoint_half(out, step, turn);
        folder_remove(path.at);
        if (!mkdir(path.at, 0777)) { return turn; }
        if (errno != EEXIST || turn == HALVES) { return -errno; }
    }
}

// Is a checkpoint's folder directly in OUT?
static inline bool checkpoint_lies_in(const char *folder, const char *out) {
    char *path = realpath(folder, NULL), *there = realpath(out, NULL);
    const size_t n = there ? strlen(there) : 0;
    const bool lies = path && there && !strncmp(path, there, n) && path + n == strrchr(path, '/');
    free(path);
    free(there);
    return lies;
}

#endif
