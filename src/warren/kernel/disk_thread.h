/* A thread that writes and syncs one block at a time, without the GIL: see DiskThread in gates.pyx. */
#ifndef WARREN_DISK_THREAD_H
#define WARREN_DISK_THREAD_H

#include <signal.h>

#include "turnstile.h"

#define COLLECT_NS 50000 /* so long somebody who passes by may collect, before the deputy is woken for it */

enum { IDLE, WRITING, WRITTEN };

typedef struct {
    pthread_t thread;
    sem_t work;      /* a block is there, or `stop` was set */
    int is_started;
    unsigned era;    /* of the turnstile when the thread was started: in the child of a fork it is not there */
    int stop;
    /* Below: of the thread while `state` is WRITING, of the others else. `state` and `deputy` change under the turnstile's lock. */
    atomic_int state;
    gate_t *deputy;  /* opened when nobody collects what was written */
    int fd;
    const char *data;
    size_t size;
    off_t offset;
    int failed;      /* an errno */
} disk_thread_t;

/* Without the lock: it is asked for with every call. */
static int disk_is_written(disk_thread_t *disk) { return atomic_load_explicit(&disk->state, memory_order_acquire) == WRITTEN; }

/* The deputy's gate is opened in the same piece under the lock in which it is seen that nobody collected: after that, its thread may
   be gone. */
static void call_deputy(disk_thread_t *disk) {
    lock();
    if (disk->state == WRITTEN && disk->deputy != NULL) {
        put_in_line(disk->deputy, 1);
        disk->deputy = NULL;
    }
    unlock();
    start_line();
}

static int is_anybody_passing(void) {
    lock();
    int passing = turnstile.awake > 0 || atomic_load_explicit(&turnstile.owner, memory_order_relaxed) != 0;
    unlock();
    return passing;
}

/* 0: there is more to do already. */
static int wait_for_collector(disk_thread_t *disk) {
    struct timespec until;
    uint64_t end = now_ns() + COLLECT_NS;
    until.tv_sec = (time_t)(end / 1000000000u);
    until.tv_nsec = (long)(end % 1000000000u);
    while (sem_clockwait(&disk->work, CLOCK_MONOTONIC, &until)) {
        if (errno != EINTR) return -1;
    }
    return 0;
}

static int is_writing(disk_thread_t *disk) {
    lock();
    int writing = disk->state == WRITING;
    unlock();
    return writing;
}

static void *disk_loop(void *argument) {
    disk_thread_t *disk = argument;
    do {
        while (sem_wait(&disk->work)) continue;
        while (is_writing(disk)) {
            int failed = write_and_sync(disk->fd, disk->data, disk->size, disk->offset);
            lock();
            disk->failed = failed;
            disk->state = WRITTEN;
            unlock();
            /* A post may be one of before: the thread that writes does not always sleep before it finds more to do. */
            if (is_anybody_passing()) while (!wait_for_collector(disk) && disk_is_written(disk) && !disk->stop) continue;
            call_deputy(disk);
        }
    } while (!disk->stop);
    return NULL;
}

/* 0, or an errno. Signals are for the threads of the program. */
static int disk_start(disk_thread_t *disk) {
    sigset_t all, before;
    if (disk->is_started && disk->era == turnstile.era) return 0;
    sem_init(&disk->work, 0, 0);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int failed = pthread_create(&disk->thread, NULL, disk_loop, disk);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    disk->is_started = !failed;
    disk->era = turnstile.era;
    return failed;
}

static void disk_submit(disk_thread_t *disk, gate_t *deputy) {
    lock();
    disk->state = WRITING;
    disk->deputy = deputy;
    unlock();
    sem_post(&disk->work);
}

/* Whether it took `deputy`; if not, there is nothing to wait for. */
static int disk_appoint(disk_thread_t *disk, gate_t *deputy) {
    lock();
    int writing = disk->state == WRITING;
    if (writing) disk->deputy = deputy;
    unlock();
    return writing;
}

/* 0, or the errno of what failed. Requires: it is written. */
static int disk_collect(disk_thread_t *disk) {
    lock();
    disk->state = IDLE;
    disk->deputy = NULL;
    unlock();
    return disk->failed;
}

/* What is being written is finished first. */
static void disk_stop(disk_thread_t *disk) {
    if (!disk->is_started || disk->era != turnstile.era) return;
    disk->stop = 1;
    sem_post(&disk->work);
    pthread_join(disk->thread, NULL);
    sem_destroy(&disk->work);
    disk->is_started = 0;
    disk->stop = 0;
}

#endif
