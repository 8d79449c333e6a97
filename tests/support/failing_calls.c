// A library to be preloaded that lets one system call on files of a folder fail, or kills the process at it.
//
//     faults_begin(folder, number, error): call `number` (from 1 on) that concerns the folder fails with `error`,
//                                          or the process is killed if `error` is 0; number 0 only counts
//     faults_end(): stop, and return how many calls there were
//
// A call concerns the folder if its path or the file of its descriptor is the folder or is inside of it. Processes that
// are started from this one do not fail, since they begin without a folder.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char watched[PATH_MAX];
static long number, calls;
static int failure;
static pid_t owner;
static char last[64 + PATH_MAX];

void faults_begin(const char* folder, long chosen, int error) {
    watched[0] = 0, calls = 0, number = chosen, failure = error, owner = getpid(), last[0] = 0;
    strncpy(watched, folder, sizeof watched - 1);
}

long faults_end(void) {
    watched[0] = 0;
    return calls;
}

const char* faults_last(void) { return last; }

static int inside(const char* path) {
    const size_t length = strlen(watched);
    return !strncmp(path, watched, length) && (path[length] == '/' || !path[length]);
}

static int concerns_descriptor(int descriptor, char* path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t size = readlink(link, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return inside(path);
}

// Return whether this call is to fail; errno is then set.
static int fails(const char* name, int descriptor, const char* path) {
    char found[PATH_MAX] = "";
    if (!watched[0] || getpid() != owner) return 0;
    const int saved = errno;
    const int absolute = path && path[0] == '/';
    const int concerned = absolute ? inside(path) : descriptor >= 0 ? concerns_descriptor(descriptor, found) : 0;
    errno = saved;
    if (!concerned || ++calls != number) return 0;
    snprintf(last, sizeof last, "%s %s", name, absolute ? path : found);
    if (!failure) kill(getpid(), SIGKILL);
    errno = failure;
    return 1;
}

#define REAL(name, ...) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))(__VA_ARGS__)
#define ON_PATH(name, descriptor, path, types, ...)                \
    int name types {                                               \
        return fails(#name, descriptor, path) ? -1 : REAL(name, __VA_ARGS__); \
    }

static mode_t mode_of(int flags, va_list arguments) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

#define OPEN(name)                                                         \
    int name(const char* path, int flags, ...) {                           \
        va_list arguments;                                                 \
        va_start(arguments, flags);                                        \
        const mode_t mode = mode_of(flags, arguments);                     \
        va_end(arguments);                                                 \
        return fails(#name, -1, path) ? -1 : REAL(name, path, flags, mode); \
    }
#define OPENAT(name)                                                                         \
    int name(int folder, const char* path, int flags, ...) {                                 \
        va_list arguments;                                                                   \
        va_start(arguments, flags);                                                          \
        const mode_t mode = mode_of(flags, arguments);                                       \
        va_end(arguments);                                                                   \
        return fails(#name, folder, path) ? -1 : REAL(name, folder, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
ON_PATH(mkdir, -1, path, (const char* path, mode_t mode), path, mode)
ON_PATH(mkdirat, folder, path, (int folder, const char* path, mode_t mode), folder, path, mode)
ON_PATH(rmdir, -1, path, (const char* path), path)
ON_PATH(unlink, -1, path, (const char* path), path)
ON_PATH(unlinkat, folder, path, (int folder, const char* path, int flags), folder, path, flags)
ON_PATH(rename, -1, to, (const char* from, const char* to), from, to)
ON_PATH(renameat, to_folder, to, (int from_folder, const char* from, int to_folder, const char* to), from_folder, from,
        to_folder, to)
ON_PATH(renameat2, to_folder, to,
        (int from_folder, const char* from, int to_folder, const char* to, unsigned flags), from_folder, from, to_folder,
        to, flags)
ON_PATH(link, -1, to, (const char* from, const char* to), from, to)
ON_PATH(linkat, to_folder, to, (int from_folder, const char* from, int to_folder, const char* to, int flags),
        from_folder, from, to_folder, to, flags)
ON_PATH(symlink, -1, path, (const char* target, const char* path), target, path)
ON_PATH(chmod, -1, path, (const char* path, mode_t mode), path, mode)
ON_PATH(fchmodat, folder, path, (int folder, const char* path, mode_t mode, int flags), folder, path, mode, flags)
ON_PATH(fchmod, descriptor, NULL, (int descriptor, mode_t mode), descriptor, mode)
ON_PATH(fsync, descriptor, NULL, (int descriptor), descriptor)
ON_PATH(fdatasync, descriptor, NULL, (int descriptor), descriptor)
ON_PATH(ftruncate, descriptor, NULL, (int descriptor, off_t size), descriptor, size)
ON_PATH(ftruncate64, descriptor, NULL, (int descriptor, off64_t size), descriptor, size)
ON_PATH(flock, descriptor, NULL, (int descriptor, int operation), descriptor, operation)
ON_PATH(fstat, descriptor, NULL, (int descriptor, struct stat* info), descriptor, info)
ON_PATH(fstat64, descriptor, NULL, (int descriptor, struct stat64* info), descriptor, info)
ON_PATH(utimensat, folder, path, (int folder, const char* path, const struct timespec times[2], int flags), folder,
        path, times, flags)

#define ON_DESCRIPTOR(name, types, ...)                                    \
    ssize_t name types {                                                   \
        return fails(#name, descriptor, NULL) ? -1 : REAL(name, __VA_ARGS__); \
    }

ON_DESCRIPTOR(write, (int descriptor, const void* bytes, size_t size), descriptor, bytes, size)
ON_DESCRIPTOR(pwrite, (int descriptor, const void* bytes, size_t size, off_t at), descriptor, bytes, size, at)
ON_DESCRIPTOR(pwrite64, (int descriptor, const void* bytes, size_t size, off64_t at), descriptor, bytes, size, at)
ON_DESCRIPTOR(writev, (int descriptor, const struct iovec* parts, int count), descriptor, parts, count)
ON_DESCRIPTOR(read, (int descriptor, void* bytes, size_t size), descriptor, bytes, size)
ON_DESCRIPTOR(pread, (int descriptor, void* bytes, size_t size, off_t at), descriptor, bytes, size, at)
ON_DESCRIPTOR(pread64, (int descriptor, void* bytes, size_t size, off64_t at), descriptor, bytes, size, at)

// Linux closes the descriptor whatever close returns.
int close(int descriptor) {
    const int failed = fails("close", descriptor, NULL), error = errno;
    const int result = REAL(close, descriptor);
    if (failed) errno = error;
    return failed ? -1 : result;
}
