/* A disk of SLOW_DISK_BYTES_PER_SECOND, put under a process by LD_PRELOAD: what was written since the last sync takes its
   time when it is synced, as with a real disk behind a page cache. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static atomic_llong unsynced;

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

static void take_time(void) {
    const char *text = getenv("SLOW_DISK_BYTES_PER_SECOND");
    long long rate = text ? atoll(text) : 0;
    long long bytes = atomic_exchange(&unsynced, 0);
    if (rate <= 0) return;
    struct timespec time = {bytes / rate, bytes % rate * 1000000000LL / rate};
    nanosleep(&time, NULL);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = next("pwrite64");
    ssize_t written = real(fd, data, size, offset);
    if (written > 0) atomic_fetch_add(&unsynced, written);
    return written;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

#define SYNC(name)                              \
    int name(int fd) {                          \
        static int (*real)(int);                \
        if (!real) real = next(#name);          \
        take_time();                            \
        return real(fd);                        \
    }

SYNC(fdatasync)
SYNC(fsync)
SYNC(syncfs)
