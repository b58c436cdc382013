/* On a machine of two processors: a thread that keeps the disk's processor from being idle while a crowd of threads waits for the disk.

   The kernel likes to wake threads on an idle processor. For those of the crowd, which pass the turnstile one by one, that takes three
   times as long as to be woken where the others are (docs/decisions/0011). So the thread for the disk and the keeper stay on the processor that has the
   interrupts of the disk, and the crowd finds that there is only one left. No thread of the program is bound to anything.

   The keeper is for a machine that has nothing else to do. Before it begins, and each second, it rests for a moment and looks how much other
   processes compute; where they do, it rests for another second. With more than two processors there is always an idle one: then there is no keeper. */
#ifndef WARREN_KEEPER_H
#define WARREN_KEEPER_H

#include <stdio.h>
#include <sys/resource.h>

#include "turnstile.h"

#define KEEP_NS 300000       /* so long it stays awake for one write */
#define KEEPER_PAUSES 20     /* between two looks whether another thread wants its processor: half a microsecond */
#define LOOK_NS 100000000    /* so long it looks what others do; the kernel counts in hundredths of a second */
#define SURE_NS 1000000000   /* so long it does not look again */
#define QUIET_NS 40000000    /* of a look, that others may use: the kernel itself needs up to 30 for the disk */
#define IDLE_SECONDS 1       /* without a write, and its thread ends */
#define KNOWN 16             /* writes, after which it is known where the disk's interrupts are */
#define MOST_KNOWN 64        /* the older ones count less */

/* One for the process, as there is one crowd: that of the GIL. */
static struct {
    sem_t work;             /* posted once if `is_asleep` */
    atomic_int is_started;
    atomic_int is_asleep;
    atomic_int processor;   /* that it is to keep */
    atomic_uint writes;     /* one more with each */
    _Atomic uint64_t rests_until;
    uint64_t sure_until;    /* of the thread */
} keeper;

/* Where a thread for the disk is, and where its writes ended: the interrupts are there. It belongs to that thread. */
typedef struct {
    int is_of_two;          /* processors; else there is nothing to keep */
    int processors[2];
    int ended[2];           /* so many writes on either, of those that were free to */
    int bound;              /* the processor it is bound to, or -1 */
} seat_t;

static int bind_to(int processor) {
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(processor, &here);
    return sched_setaffinity(0, sizeof here, &here);
}

/* Processor time that others have used up to now, from some moment on: what was neither idle nor this process's. 0, or -1: nobody knows. */
static int others_ns(uint64_t *others) {
    unsigned long long idle, io;
    struct timespec mine;
    FILE *file = fopen("/proc/stat", "re");
    if (file == NULL) return -1;
    int found = fscanf(file, "cpu %*u %*u %*u %llu %llu", &idle, &io);
    fclose(file);
    if (found != 2 || clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &mine)) return -1;
    *others = now_ns() * (uint64_t)sysconf(_SC_NPROCESSORS_ONLN);
    *others -= (idle + io) * (1000000000u / (uint64_t)sysconf(_SC_CLK_TCK));
    *others -= (uint64_t)mine.tv_sec * 1000000000u + (uint64_t)mine.tv_nsec;
    return 0;
}

/* Whether others leave the machine to this process. Meanwhile it rests: who is kept off the processors is not seen to use them. */
static int is_quiet(void) {
    struct timespec look = {.tv_nsec = LOOK_NS};
    uint64_t before, after;
    if (others_ns(&before)) return 0;
    while (nanosleep(&look, &look)) continue;
    if (others_ns(&after)) return 0;
    return (int64_t)(after - before) < QUIET_NS;
}

static void look_around(void) {
    keeper.rests_until = UINT64_MAX;
    int quiet = is_quiet();
    keeper.sure_until = now_ns() + SURE_NS;
    keeper.rests_until = quiet ? 0 : keeper.sure_until;
}

static void keep(void) {
    unsigned seen = keeper.writes;
    uint64_t now = now_ns(), end = now + KEEP_NS;
    while (now < end && now < keeper.sure_until) {
        sched_yield();
        for (int pause = 0; pause < KEEPER_PAUSES; pause++) pause_a_moment();
        now = now_ns();
        if (seen != keeper.writes) end = now + KEEP_NS;
        seen = keeper.writes;
    }
}

/* Until there is a write; 0: there was none for a long time. */
static int sleep_until_called(void) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += IDLE_SECONDS;
    atomic_store(&keeper.is_asleep, 1);
    while (sem_timedwait(&keeper.work, &end)) {
        if (errno == EINTR) continue;
        if (atomic_exchange(&keeper.is_asleep, 0)) return 0;
        while (sem_wait(&keeper.work)) continue; /* whoever saw that it was asleep is about to wake it */
        break;
    }
    return 1;
}

static void *keeper_loop(void *unused) {
    int processor = -1;
    (void)unused;
    pthread_setname_np(pthread_self(), "warren-keeper");
    setpriority(PRIO_PROCESS, 0, 19); /* of this thread */
    do {
        if (processor != keeper.processor) {
            processor = keeper.processor;
            if (bind_to(processor)) {
                keeper.rests_until = now_ns() + SURE_NS;
                break;
            }
        }
        if (now_ns() >= keeper.sure_until) look_around();
        if (now_ns() >= keeper.rests_until) keep();
    } while (sleep_until_called());
    atomic_store(&keeper.is_started, 0);
    return NULL;
}

static void forget_keeper(void) {
    sem_init(&keeper.work, 0, 0);
    keeper.is_started = 0;
    keeper.is_asleep = 0;
    keeper.rests_until = 0;
    keeper.sure_until = 0;
}

static int keeper_init(void) {
    forget_keeper();
    return pthread_atfork(NULL, NULL, forget_keeper);
}

/* Whether there is one that keeps the processor. */
static int call_keeper(int processor) {
    int expected = 0;
    pthread_t thread;
    keeper.processor = processor;
    keeper.writes++;
    if (atomic_compare_exchange_strong(&keeper.is_started, &expected, 1)) {
        if (pthread_create(&thread, NULL, keeper_loop, NULL)) {
            keeper.is_started = 0;
            return 0;
        }
        pthread_detach(thread);
    }
    if (atomic_exchange(&keeper.is_asleep, 0)) sem_post(&keeper.work);
    return 1;
}

static void seat_init(seat_t *seat) {
    cpu_set_t allowed;
    int processors[2];
    seat->bound = -1;
    seat->is_of_two = sched_getscheduler(0) == SCHED_OTHER && !sched_getaffinity(0, sizeof allowed, &allowed) && CPU_COUNT(&allowed) == 2;
    if (!seat->is_of_two) return;
    for (int processor = 0, found = 0; found < 2; processor++)
        if (CPU_ISSET(processor, &allowed)) processors[found++] = processor;
    if (processors[0] == seat->processors[0] && processors[1] == seat->processors[1]) return;
    memcpy(seat->processors, processors, sizeof processors);
    seat->ended[0] = seat->ended[1] = 0;
}

/* One of the two processors; below 0: both. */
static cpu_set_t mask_of(const seat_t *seat, int processor) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (int i = 0; i < 2; i++)
        if (processor < 0 || processor == seat->processors[i]) CPU_SET(seat->processors[i], &mask);
    return mask;
}

/* It is left alone once somebody else has changed what it, or the program's main thread, may run on. */
static void sit(seat_t *seat, int processor) {
    cpu_set_t allowed, of_main, expected = mask_of(seat, seat->bound), wanted = mask_of(seat, processor);
    seat->is_of_two = !sched_getaffinity(0, sizeof allowed, &allowed) && CPU_EQUAL(&allowed, &expected) &&
                      !sched_getaffinity(getpid(), sizeof of_main, &of_main) && CPU_ISSET(seat->processors[0], &of_main) &&
                      CPU_ISSET(seat->processors[1], &of_main);
    if (!seat->is_of_two) return;
    if (!sched_setaffinity(0, sizeof wanted, &wanted)) seat->bound = processor;
}

static void write_begins(seat_t *seat) {
    if (!seat->is_of_two) return;
    int processor = -1;
    if (seat->ended[0] + seat->ended[1] >= KNOWN && now_ns() >= keeper.rests_until) {
        processor = seat->bound >= 0 ? seat->bound : seat->processors[seat->ended[1] > seat->ended[0]];
        if (!call_keeper(processor)) processor = -1;
    }
    if (processor != seat->bound) sit(seat, processor);
}

static void write_ended(seat_t *seat) {
    if (!seat->is_of_two || seat->bound >= 0) return;
    if (seat->ended[0] + seat->ended[1] == MOST_KNOWN) {
        seat->ended[0] /= 2;
        seat->ended[1] /= 2;
    }
    seat->ended[sched_getcpu() == seat->processors[1]]++;
}

#endif
