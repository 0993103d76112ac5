/* Records the file system calls of a process and of its children, for the crash model (model.py).
 *
 * Load with LD_PRELOAD. CRASH_ROOT is the folder whose files count, CRASH_TRACE the file to append to. Every
 * call that changes a file or a name, or makes one durable, becomes one entry: kind, times of CLOCK_MONOTONIC
 * in ns at which the call began and ended, inode numbers, position, and the bytes or the names. An entry is
 * one write with O_APPEND, so entries of several threads and processes do not mix. Failed calls are left out.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { CREATE = 1, MKDIR, RENAME, UNLINK, RMDIR, WRITE, TRUNCATE, ALLOCATE, SYNC, SYNC_ALL };

struct entry {
    uint32_t kind;
    uint32_t durable; /* of WRITE: it had RWF_DSYNC; of SYNC: 1 is fdatasync */
    uint64_t began, ended;
    uint64_t inode, other; /* other: the replaced or removed inode, or 0 */
    uint64_t position;     /* of WRITE; new size of TRUNCATE and ALLOCATE */
    uint32_t first, second; /* lengths of the two byte strings after this head */
};

static int trace = -1;
static char root[4096];
static size_t root_length;
#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("CRASH_ROOT"), *file = getenv("CRASH_TRACE");
    if (!folder || !file) return;
    root_length = (size_t)snprintf(root, sizeof root, "%s/", folder);
    trace = (int)syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void tell(struct entry *e, const struct iovec *first, int count, const char *second) {
    int kept = errno;
    e->ended = now();
    struct iovec parts[1100];
    int n = 0;
    parts[n++] = (struct iovec){e, sizeof *e};
    e->first = 0;
    for (int i = 0; i < count && n < 1098; i++) {
        parts[n++] = first[i];
        e->first += (uint32_t)first[i].iov_len;
    }
    e->second = second ? (uint32_t)strlen(second) : 0;
    if (second) parts[n++] = (struct iovec){(void *)second, e->second};
    ssize_t wanted = (ssize_t)(sizeof *e + e->first + e->second);
    if (syscall(SYS_writev, trace, parts, n) != wanted) abort();
    errno = kept;
}

static void tell_names(struct entry *e, const char *first, const char *second) {
    struct iovec part = {(void *)first, strlen(first)};
    tell(e, &part, 1, second);
}

/* The absolute path if it lies in the root, else NULL. */
static const char *inside(int directory, const char *path, char *buffer) {
    if (trace < 0 || !path) return NULL;
    if (path[0] != '/') {
        char link[64];
        ssize_t length;
        if (directory == AT_FDCWD) {
            if (!getcwd(buffer, 4096)) return NULL;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            length = readlink(link, buffer, 4095);
            if (length < 0) return NULL;
            buffer[length] = 0;
        }
        size_t used = strlen(buffer);
        snprintf(buffer + used, 4096 - used, "/%s", path);
    } else
        snprintf(buffer, 4096, "%s", path);
    return strncmp(buffer, root, root_length) ? NULL : buffer + root_length;
}

static uint64_t inode_of(const char *path) {
    struct stat found;
    return path && lstat(path, &found) == 0 ? found.st_ino : 0;
}

/* The inode of an open file in the root, else 0. */
static uint64_t inode_in(int fd) {
    char link[64], path[4096];
    struct stat found;
    if (trace < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, root, root_length - 1) || (path[root_length - 1] && path[root_length - 1] != '/')) return 0;
    return fstat(fd, &found) == 0 ? found.st_ino : 0;
}

static int open_any(int directory, const char *path, int flags, mode_t mode) {
    char buffer[4096];
    int kept = errno;
    const char *name = inside(directory, path, buffer);
    uint64_t before = name ? inode_of(buffer) : 0;
    errno = kept;
    struct entry e = {.kind = CREATE, .began = now()};
    int fd = (int)syscall(SYS_openat, directory, path, flags | O_LARGEFILE, mode);
    if (fd < 0) { errno = errno; return fd; }
    if (name && (flags & O_CREAT) && !(flags & O_DIRECTORY)) {
        struct stat found;
        if (fstat(fd, &found) == 0 && found.st_ino != before) {
            e.inode = found.st_ino;
            tell_names(&e, name, NULL);
        }
    }
    if (name && (flags & O_TRUNC)) {
        struct entry cut = {.kind = TRUNCATE, .began = e.began, .inode = inode_in(fd)};
        if (cut.inode) tell(&cut, NULL, 0, NULL);
    }
    return fd;
}

#define MODE(flags, last) ({ mode_t m = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, last); m = va_arg(a, mode_t); va_end(a); } m; })
int open(const char *path, int flags, ...) { return open_any(AT_FDCWD, path, flags, MODE(flags, flags)); }
int open64(const char *path, int flags, ...) { return open_any(AT_FDCWD, path, flags, MODE(flags, flags)); }
int openat(int d, const char *path, int flags, ...) { return open_any(d, path, flags, MODE(flags, flags)); }
int openat64(int d, const char *path, int flags, ...) { return open_any(d, path, flags, MODE(flags, flags)); }

/* One write; the bytes are those that the kernel took. Position -1: at the file's own place. */
static ssize_t write_any(int fd, const struct iovec *parts, int count, off_t position, int flags) {
    uint64_t inode = fd == trace ? 0 : inode_in(fd);
    struct entry e = {.kind = WRITE, .began = now(), .inode = inode, .durable = (flags & RWF_DSYNC) != 0};
    ssize_t done;
    if (position < 0)
        done = syscall(SYS_writev, fd, parts, count);
    else
        done = syscall(SYS_pwritev2, fd, parts, count, (unsigned long)position, 0ul, flags);
    if (done <= 0 || !inode) return done;
    if (position < 0) {
        /* O_APPEND and plain writes: the place after the call less what was written. */
        off_t end = lseek(fd, 0, SEEK_CUR);
        position = end - done;
    }
    e.position = (uint64_t)position;
    struct iovec taken[1024];
    int n = 0;
    size_t left = (size_t)done;
    for (int i = 0; i < count && left && n < 1024; i++) {
        taken[n] = parts[i];
        if (taken[n].iov_len > left) taken[n].iov_len = left;
        left -= taken[n].iov_len;
        n++;
    }
    tell(&e, taken, n, NULL);
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (trace < 0) return syscall(SYS_write, fd, data, size);
    struct iovec part = {(void *)data, size};
    uint64_t inode = inode_in(fd);
    if (!inode) return syscall(SYS_write, fd, data, size);
    return write_any(fd, &part, 1, -1, 0);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (trace < 0 || !inode_in(fd)) return syscall(SYS_writev, fd, parts, count);
    return write_any(fd, parts, count, -1, 0);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    struct iovec part = {(void *)data, size};
    return write_any(fd, &part, 1, at, 0);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return pwrite(fd, data, size, at); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return write_any(fd, parts, count, at, 0); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { return write_any(fd, parts, count, at, 0); }
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) { return write_any(fd, parts, count, at, flags); }
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) { return write_any(fd, parts, count, at, flags); }

int ftruncate(int fd, off_t size) {
    struct entry e = {.kind = TRUNCATE, .began = now(), .inode = inode_in(fd), .position = (uint64_t)size};
    int result = (int)syscall(SYS_ftruncate, fd, size);
    if (result == 0 && e.inode) tell(&e, NULL, 0, NULL);
    return result;
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

int fallocate(int fd, int mode, off_t at, off_t size) {
    struct entry e = {.kind = ALLOCATE, .began = now(), .inode = inode_in(fd), .position = (uint64_t)(at + size)};
    int result = (int)syscall(SYS_fallocate, fd, mode, at, size);
    if (result == 0 && e.inode && mode != FALLOC_FL_KEEP_SIZE) {
        if (mode != 0) abort(); /* the model knows no holes */
        tell(&e, NULL, 0, NULL);
    }
    return result;
}
int fallocate64(int fd, int mode, off64_t at, off64_t size) { return fallocate(fd, mode, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) { return fallocate(fd, 0, at, size) == 0 ? 0 : errno; }
int posix_fallocate64(int fd, off64_t at, off64_t size) { return posix_fallocate(fd, at, size); }

static int sync_one(int fd, int data_only) {
    struct entry e = {.kind = SYNC, .began = now(), .inode = inode_in(fd), .durable = (uint32_t)data_only};
    int result = (int)syscall(data_only ? SYS_fdatasync : SYS_fsync, fd);
    if (result == 0 && e.inode) tell(&e, NULL, 0, NULL);
    return result;
}
int fsync(int fd) { return sync_one(fd, 0); }
int fdatasync(int fd) { return sync_one(fd, 1); }
int syncfs(int fd) {
    struct entry e = {.kind = SYNC_ALL, .began = now(), .inode = inode_in(fd)};
    int result = (int)syscall(SYS_syncfs, fd);
    if (result == 0 && e.inode) tell(&e, NULL, 0, NULL);
    return result;
}

static int rename_any(int from, const char *old, int to, const char *new) {
    char one[4096], two[4096];
    const char *a = inside(from, old, one), *b = inside(to, new, two);
    struct entry e = {.kind = RENAME, .began = now(), .inode = a ? inode_of(one) : 0, .other = b ? inode_of(two) : 0};
    int result = (int)syscall(SYS_renameat2, from, old, to, new, 0);
    if (result == 0 && (a || b)) {
        if (!a || !b) abort(); /* nothing moves into or out of the root */
        tell_names(&e, a, b);
    }
    return result;
}
int rename(const char *old, const char *new) { return rename_any(AT_FDCWD, old, AT_FDCWD, new); }
int renameat(int from, const char *old, int to, const char *new) { return rename_any(from, old, to, new); }

static int unlink_any(int directory, const char *path, int flags) {
    char buffer[4096];
    const char *name = inside(directory, path, buffer);
    struct entry e = {.kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK, .began = now(), .other = name ? inode_of(buffer) : 0};
    int result = (int)syscall(SYS_unlinkat, directory, path, flags);
    if (result == 0 && name) tell_names(&e, name, NULL);
    return result;
}
int unlink(const char *path) { return unlink_any(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlink_any(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int d, const char *path, int flags) { return unlink_any(d, path, flags); }

static int mkdir_any(int directory, const char *path, mode_t mode) {
    char buffer[4096];
    const char *name = inside(directory, path, buffer);
    struct entry e = {.kind = MKDIR, .began = now()};
    int result = (int)syscall(SYS_mkdirat, directory, path, mode);
    if (result == 0 && name) {
        e.inode = inode_of(buffer);
        tell_names(&e, name, NULL);
    }
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdir_any(AT_FDCWD, path, mode); }
int mkdirat(int d, const char *path, mode_t mode) { return mkdir_any(d, path, mode); }

/* What the model does not know must not happen unseen. */
int link(const char *a, const char *b) {
    char buffer[4096];
    if (inside(AT_FDCWD, a, buffer) || inside(AT_FDCWD, b, buffer)) abort();
    return REAL(link)(a, b);
}
int truncate(const char *path, off_t size) {
    char buffer[4096];
    if (inside(AT_FDCWD, path, buffer)) abort();
    return REAL(truncate)(path, size);
}
