/* Faults at operations on files, for tests/file_faults.py: loaded before libc (LD_PRELOAD).
 *
 * `faults_arm` names a folder, a set of operations, and what happens at the n-th of them below that folder. Everything else is
 * passed on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum operation { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, RENAME = 16, MAKE = 32, REMOVE = 64, TRUNCATE = 128, CLOSE = 256 };

enum action {
    FAIL_ONCE = 1,    /* one error, and nothing is done */
    FAIL_ALWAYS = 2,  /* errors from then on: the disk is gone */
    KILL_BEFORE = 3,  /* SIGKILL instead of the operation */
    KILL_AFTER = 4,
    KILL_HALF = 5,    /* half of a write, then SIGKILL */
    SHORT = 6,        /* reads and writes of half the length, from then on */
    SKIP = 7,         /* nothing is done, and success is reported: a disk that lies */
    FLIP = 8,         /* one bit of what is read or written is another */
    DELAY = 9,        /* each operation waits */
};

static struct {
    enum action action;
    int number;
    int operations;
    char folder[4096];
    int error;
    int microseconds;
    int count;
    int happened;
    int no_exchange;
} fault;

void faults_arm(int action, int number, int operations, const char *folder, int error, int microseconds) {
    fault.action = 0;
    strncpy(fault.folder, folder, sizeof fault.folder - 1);
    fault.number = number;
    fault.operations = operations;
    fault.error = error;
    fault.microseconds = microseconds;
    fault.count = fault.happened = 0;
    fault.action = action;
}

void faults_disarm(void) { fault.action = 0; }
int faults_happened(void) { return fault.happened; }
void faults_forbid_exchange(int forbid) { fault.no_exchange = forbid; }

static int below(const char *path) {
    size_t length = strlen(fault.folder);
    return fault.action && length && !strncmp(path, fault.folder, length);
}

static int file_below(int file) {
    char link[64], path[4200];
    if (!fault.action || file < 3) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static int path_below(int folder, const char *path) {
    if (!fault.action || !path) return 0;
    if (path[0] == '/') return below(path);
    return folder != AT_FDCWD && file_below(folder);
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* What happens at this operation: an action, or 0. */
static int at(enum operation operation) {
    if (!(fault.operations & operation)) return 0;
    int count = __sync_add_and_fetch(&fault.count, 1);
    if (fault.action == DELAY) {
        usleep(fault.microseconds);
        return 0;
    }
    int lasts = fault.action == FAIL_ALWAYS || fault.action == SHORT;
    if (lasts ? count < fault.number : count != fault.number) return 0;
    fault.happened = 1;
    return fault.action;
}

static int failed(void) {
    errno = fault.error;
    return -1;
}

#define REAL(name)                        \
    static __typeof__(&name) real = NULL; \
    if (!real) real = dlsym(RTLD_NEXT, #name)

/* An operation that has no bytes: `watched` says whether it is below the folder. */
#define PASS_ON(watched, operation, call)                                 \
    if (!(watched)) return call;                                          \
    switch (at(operation)) {                                              \
        case FAIL_ONCE: case FAIL_ALWAYS: return failed();                \
        case KILL_BEFORE: case KILL_HALF: die();                          \
        case KILL_AFTER: (void)!(call); die();                            \
        case SKIP: return 0;                                              \
        default: return call;                                             \
    }

int fsync(int file) { REAL(fsync); PASS_ON(file_below(file), SYNC, real(file)) }
int ftruncate64(int file, off64_t size) { REAL(ftruncate64); PASS_ON(file_below(file), TRUNCATE, real(file, size)) }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); PASS_ON(path_below(AT_FDCWD, path), MAKE, real(path, mode)) }
int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat); PASS_ON(path_below(folder, path), MAKE, real(folder, path, mode))
}
int unlink(const char *path) { REAL(unlink); PASS_ON(path_below(AT_FDCWD, path), REMOVE, real(path)) }
int rmdir(const char *path) { REAL(rmdir); PASS_ON(path_below(AT_FDCWD, path), REMOVE, real(path)) }
int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat); PASS_ON(path_below(folder, path), REMOVE, real(folder, path, flags))
}
int rename(const char *from, const char *to) {
    REAL(rename); PASS_ON(path_below(AT_FDCWD, from) || path_below(AT_FDCWD, to), RENAME, real(from, to))
}
int renameat(int old, const char *from, int new, const char *to) {
    REAL(renameat); PASS_ON(path_below(old, from) || path_below(new, to), RENAME, real(old, from, new, to))
}
int renameat2(int old, const char *from, int new, const char *to, unsigned flags) {
    REAL(renameat2);
    if (fault.no_exchange && flags == RENAME_EXCHANGE) {
        errno = EINVAL;
        return -1;
    }
    PASS_ON(path_below(old, from) || path_below(new, to), RENAME, real(old, from, new, to, flags))
}

static int opened(enum operation operation, int watched) {
    if (!watched) return 0;
    switch (at(operation)) {
        case FAIL_ONCE: case FAIL_ALWAYS: return failed();
        case KILL_BEFORE: case KILL_HALF: case KILL_AFTER: die();
        default: return 0;
    }
}

#define MODE(flags)                          \
    mode_t mode = 0;                         \
    if (flags & (O_CREAT | O_TMPFILE)) {     \
        va_list rest;                        \
        va_start(rest, flags);               \
        mode = va_arg(rest, mode_t);         \
        va_end(rest);                        \
    }

int open64(const char *path, int flags, ...) {
    REAL(open64);
    MODE(flags)
    return opened(OPEN, path_below(AT_FDCWD, path)) ? -1 : real(path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    REAL(openat64);
    MODE(flags)
    return opened(OPEN, path_below(folder, path)) ? -1 : real(folder, path, flags, mode);
}
int close(int file) {
    REAL(close);
    int watched = file_below(file);
    int error = opened(CLOSE, watched);
    int result = real(file);
    if (error) return failed();
    return result;
}

static void flip(char *bytes, ssize_t length) {
    if (length > 0) bytes[(fault.number * 7919L) % length] ^= 1 << (fault.number % 8);
}

/* A write of `length` bytes: what is returned if it is not passed on, else -2. */
#define WRITING(file, bytes, length, again)                                                 \
    if (!file_below(file)) return again(bytes, length);                                     \
    switch (at(WRITE)) {                                                                    \
        case FAIL_ONCE: case FAIL_ALWAYS: return failed();                                  \
        case KILL_BEFORE: die();                                                            \
        case KILL_HALF: (void)!again(bytes, (length) / 2); die();                           \
        case KILL_AFTER: (void)!again(bytes, length); die();                                \
        case SHORT: return again(bytes, (length) > 1 ? (length) / 2 : (length));            \
        case SKIP: lseek(file, length, SEEK_CUR); return length;                            \
        case FLIP: {                                                                        \
            char *copy = malloc((length) + 1);                                              \
            memcpy(copy, bytes, length);                                                    \
            flip(copy, length);                                                             \
            ssize_t result = again(copy, length);                                           \
            free(copy);                                                                     \
            return result;                                                                  \
        }                                                                                   \
        default: return again(bytes, length);                                               \
    }

ssize_t write(int file, const void *bytes, size_t length) {
    REAL(write);
#define AGAIN(b, n) real(file, b, n)
    WRITING(file, bytes, length, AGAIN)
#undef AGAIN
}
ssize_t pwrite64(int file, const void *bytes, size_t length, off64_t offset) {
    REAL(pwrite64);
#define AGAIN(b, n) real(file, b, n, offset)
    WRITING(file, bytes, length, AGAIN)
#undef AGAIN
}

/* A read into the first of several buffers: all that Python's os.preadv is given here is one. */
#define READING(file, again)                                        \
    if (!file_below(file)) return again(length);                    \
    ssize_t result;                                                 \
    switch (at(READ)) {                                             \
        case FAIL_ONCE: case FAIL_ALWAYS: return failed();          \
        case KILL_BEFORE: case KILL_HALF: case KILL_AFTER: die();   \
        case SHORT: return again(length > 1 ? length / 2 : length); \
        case FLIP:                                                  \
            result = again(length);                                 \
            flip(bytes, result);                                    \
            return result;                                          \
        default: return again(length);                              \
    }

ssize_t read(int file, void *bytes, size_t length) {
    REAL(read);
#define AGAIN(n) real(file, bytes, n)
    READING(file, AGAIN)
#undef AGAIN
}
ssize_t pread64(int file, void *bytes, size_t length, off64_t offset) {
    REAL(pread64);
#define AGAIN(n) real(file, bytes, n, offset)
    READING(file, AGAIN)
#undef AGAIN
}
ssize_t preadv64(int file, const struct iovec *parts, int count, off64_t offset) {
    REAL(preadv64);
    if (count != 1) return real(file, parts, count, offset);
    void *bytes = parts->iov_base;
    size_t length = parts->iov_len;
#define AGAIN(n) real(file, &(struct iovec){bytes, n}, 1, offset)
    READING(file, AGAIN)
#undef AGAIN
}
ssize_t preadv64v2(int file, const struct iovec *parts, int count, off64_t offset, int flags) {
    REAL(preadv64v2);
    if (count != 1) return real(file, parts, count, offset, flags);
    void *bytes = parts->iov_base;
    size_t length = parts->iov_len;
#define AGAIN(n) real(file, &(struct iovec){bytes, n}, 1, offset, flags)
    READING(file, AGAIN)
#undef AGAIN
}
