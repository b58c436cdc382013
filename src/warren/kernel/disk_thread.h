/* A thread that writes and syncs one block at a time, without the GIL: see DiskThread in gates.pyx. */
#ifndef WARREN_DISK_THREAD_H
#define WARREN_DISK_THREAD_H

#include <signal.h>
#include <sys/resource.h>

#include "turnstile.h"

#define COLLECT_NS 50000 /* so long somebody who passes by may collect, before the deputy is woken for it; and so long it may give more */
#define KEEP_NS 300000   /* so long the keeper stays awake for one write */
#define KEEPER_PAUSES 20 /* between two looks whether somebody else wants its processor: half a microsecond */
#define WATCHED 16       /* writes, after which it is known where the disk's interrupts are */

enum { IDLE, WRITING, WRITTEN };

/* On a machine of two processors, a second thread, which keeps the disk's processor from being idle while the disk is waited for. The kernel
   would wake the program's threads there, and that takes three times as long as to wake them, one by one, where they are. It yields all
   the time and is nice, so whoever else wants the processor has it within a microsecond. With more processors there is always an idle one: then
   there is no keeper. All of this belongs to the thread for the disk. */
typedef struct {
    pthread_t thread;
    int is_started;
    sem_t work;           /* posted once if `is_asleep`: a write begins, or `stop` was set */
    atomic_int is_asleep;
    atomic_int stop;
    atomic_uint writes;   /* began since the start */
    int processors[2];    /* the two that there are; [0] is -1 if there are not two */
    int ended[2];         /* writes that ended on either; those of before the start count half */
} keeper_t;

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
    keeper_t keeper;
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

static void *keeper_loop(void *argument) {
    keeper_t *keeper = argument;
    pthread_setname_np(pthread_self(), "warren-keeper");
    setpriority(PRIO_PROCESS, (id_t)gettid(), 19);
    while (!keeper->stop) {
        unsigned seen = keeper->writes;
        uint64_t now = now_ns(), end = now + KEEP_NS;
        while (now < end && !keeper->stop) {
            sched_yield();
            for (int pause = 0; pause < KEEPER_PAUSES; pause++) pause_a_moment();
            now = now_ns();
            if (seen != keeper->writes) end = now + KEEP_NS;
            seen = keeper->writes;
        }
        atomic_store(&keeper->is_asleep, 1);
        while (sem_wait(&keeper->work)) continue;
    }
    return NULL;
}

static void keeper_init(keeper_t *keeper) {
    cpu_set_t allowed;
    keeper->is_started = 0;
    keeper->writes = 0;
    keeper->processors[0] = -1;
    if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) != 2) return;
    for (int processor = 0, found = 0; found < 2; processor++)
        if (CPU_ISSET(processor, &allowed)) keeper->processors[found++] = processor;
    keeper->ended[0] /= 2;
    keeper->ended[1] /= 2;
}

/* This thread, and its keeper, which inherits that, stay on the processor on which most writes ended: the interrupts of the disk are there. */
static void keeper_start(keeper_t *keeper) {
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(keeper->processors[keeper->ended[1] > keeper->ended[0]], &here);
    if (sched_setaffinity(0, sizeof here, &here)) return;
    sem_init(&keeper->work, 0, 0);
    keeper->is_asleep = 0;
    keeper->stop = 0;
    keeper->is_started = !pthread_create(&keeper->thread, NULL, keeper_loop, keeper);
    if (!keeper->is_started) sem_destroy(&keeper->work);
}

static void keeper_stop(keeper_t *keeper) {
    if (!keeper->is_started) return;
    keeper->stop = 1;
    sem_post(&keeper->work);
    pthread_join(keeper->thread, NULL);
    sem_destroy(&keeper->work);
    keeper->is_started = 0;
}

static void write_begins(keeper_t *keeper) {
    keeper->writes++;
    if (keeper->is_started && atomic_exchange(&keeper->is_asleep, 0)) sem_post(&keeper->work);
}

static void write_ended(keeper_t *keeper) {
    if (keeper->writes > WATCHED || keeper->processors[0] < 0) return;
    keeper->ended[sched_getcpu() == keeper->processors[1]]++;
    if (keeper->writes == WATCHED) keeper_start(keeper);
}

static void *disk_loop(void *argument) {
    disk_thread_t *disk = argument;
    pthread_setname_np(pthread_self(), "warren-disk");
    keeper_init(&disk->keeper);
    while (await_block(disk)) {
        write_begins(&disk->keeper);
        int failed = write_and_sync(disk->fd, disk->data, disk->size, disk->offset);
        write_ended(&disk->keeper);
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
    keeper_stop(&disk->keeper);
    return NULL;
}

/* 0, or an errno. Signals are for the threads of the program. */
static int disk_start(disk_thread_t *disk) {
    sigset_t all, before;
    if (disk->is_started && disk->era == turnstile.era) return 0;
    sem_init(&disk->work, 0, 0);
    disk->is_asleep = 0;
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
