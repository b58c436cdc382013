/* A thread that writes and syncs one block at a time, without the GIL: see DiskThread in gates.pyx. */
#ifndef WARREN_DISK_THREAD_H
#define WARREN_DISK_THREAD_H

#include <signal.h>

#include "keeper.h"

#define COLLECT_NS 50000 /* so long somebody who passes by may collect, before the deputy is woken for it; and so long it may give more */

enum { IDLE, WRITING, WRITTEN };

typedef struct {
    pthread_t thread;
    sem_t work;      /* posted once if `is_asleep`: a block is there, or `stop` was set */
    int is_asleep;   /* changes under the turnstile's lock */
    int is_started;
    unsigned era;    /* of the turnstile when the thread was started: in the child of a fork it is not there */
    atomic_int stop;
    /* Below: of the thread while `state` is WRITING, of the others else. `state` and `deputy` change under the turnstile's lock. */
    atomic_int state;
    gate_t *deputy;  /* opened when nobody collects what was written */
    int fd;
    const char *data;
    size_t size;
    off_t offset;
    int failed;      /* an errno */
    seat_t seat;     /* of the thread */
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

/* Whether `state` is another one within COLLECT_NS. The thread stays awake for it: to sleep and be woken takes a fifth of the time of a
   write. And the kernel leaves those who pass by together on one processor, where they are best off, if the other one is not idle. */
static int watch(disk_thread_t *disk, int state) {
    uint64_t end = now_ns() + COLLECT_NS;
    do {
        for (int look = 0; look < LOOKS; look++) {
            if (atomic_load_explicit(&disk->state, memory_order_acquire) != state || disk->stop) return 1;
            if (look % LOOKS_FOR_WAY == 0 && !runs_elsewhere()) sched_yield();
            pause_a_moment();
        }
    } while (now_ns() < end);
    return 0;
}

/* Whether there is a block; if not, the thread shall stop. */
static int await_block(disk_thread_t *disk) {
    for (;;) {
        lock();
        int writing = disk->state == WRITING;
        if (!writing && !disk->stop) disk->is_asleep = 1;
        unlock();
        if (writing) return 1;
        if (disk->stop) return 0;
        while (sem_wait(&disk->work)) continue;
    }
}

static void *disk_loop(void *argument) {
    disk_thread_t *disk = argument;
    pthread_setname_np(pthread_self(), "warren-disk");
    seat_init(&disk->seat);
    while (await_block(disk)) {
        write_begins(&disk->seat);
        int failed = write_and_sync(disk->fd, disk->data, disk->size, disk->offset);
        write_ended(&disk->seat);
        lock();
        disk->failed = failed;
        disk->state = WRITTEN;
        unlock();
        if (!is_anybody_passing() || !watch(disk, WRITTEN) || disk->stop) { /* stopped: nobody may pass by any more */
            call_deputy(disk);
            watch(disk, WRITTEN);
        }
        watch(disk, IDLE); /* who collects gives the next one soon, if there is one */
    }
    return NULL;
}

/* 0, or an errno. Signals are for the threads of the program. */
static int disk_start(disk_thread_t *disk) {
    sigset_t all, before;
    if (disk->is_started && disk->era == turnstile.era) return 0;
    sem_init(&disk->work, 0, 0);
    disk->is_asleep = 0;
    disk->stop = 0; /* a fork may have come in the middle of anything */
    disk->state = IDLE;
    disk->deputy = NULL;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int failed = pthread_create(&disk->thread, NULL, disk_loop, disk);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    disk->is_started = !failed;
    disk->era = turnstile.era;
    return failed;
}

/* Requires: the lock. It is let go. */
static void unlock_and_wake(disk_thread_t *disk) {
    int was_asleep = disk->is_asleep;
    disk->is_asleep = 0;
    unlock();
    if (was_asleep) sem_post(&disk->work);
}

static void disk_submit(disk_thread_t *disk, gate_t *deputy) {
    lock();
    disk->state = WRITING;
    disk->deputy = deputy;
    unlock_and_wake(disk);
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
    lock();
    disk->stop = 1;
    unlock_and_wake(disk);
    pthread_join(disk->thread, NULL);
    sem_destroy(&disk->work);
    disk->is_started = 0;
    disk->stop = 0;
}

#endif
