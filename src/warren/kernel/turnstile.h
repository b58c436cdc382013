/* The turnstile and its gates: see gates.pyx. Nothing here needs the GIL. */
#ifndef WARREN_TURNSTILE_H
#define WARREN_TURNSTILE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getcpu */
#endif
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TURN_NS 30000 /* nobody waits longer for a turn */
#define LOOKS 64      /* between two looks at the clock */
#define LOOKS_FOR_WAY 8 /* between two looks at the processor */
#define MOST_AWAKE 2  /* one that watches, one that comes after it */

enum { SHUT, OPEN, AWAKE, THROUGH };

typedef struct gate_t {
    sem_t woken;
    struct gate_t *next; /* of the line of open gates */
    int state;
    unsigned era;
} gate_t;

/* One for the process, as there is one GIL. */
static struct {
    atomic_flag lock;     /* for the line, `awake` and the states of gates; held for some instructions */
    gate_t *first, *last; /* the line: gates that are open, whose threads sleep */
    int awake;            /* threads that were woken and are not through */
    _Atomic uintptr_t owner; /* the thread that has the turn; 0: none */
    atomic_int processor;    /* that it got the turn on */
    atomic_int urgent;       /* threads that go before those at gates */
    unsigned era;            /* one more with each fork: gates of before are of threads that are not here */
} turnstile = {.lock = ATOMIC_FLAG_INIT};

static uintptr_t this_thread(void) { return (uintptr_t)pthread_self(); }

static void pause_a_moment(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static void lock(void) {
    for (int look = 1; atomic_flag_test_and_set_explicit(&turnstile.lock, memory_order_acquire); look++) {
        if (look % LOOKS) pause_a_moment();
        else sched_yield();
    }
}

static void unlock(void) { atomic_flag_clear_explicit(&turnstile.lock, memory_order_release); }

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* In the child of a fork there is no other thread. */
static void forget_threads(void) {
    unlock();
    turnstile.era++;
    turnstile.first = turnstile.last = NULL;
    turnstile.awake = 0;
    atomic_store(&turnstile.owner, 0);
    atomic_store(&turnstile.urgent, 0);
}

static int turnstile_init(void) { return pthread_atfork(NULL, NULL, forget_threads); }

static void gate_init(gate_t *gate) {
    sem_init(&gate->woken, 0, 0);
    gate->next = NULL;
    gate->state = SHUT;
    gate->era = turnstile.era;
}

static void gate_destroy(gate_t *gate) { sem_destroy(&gate->woken); }

/* Take the first of the line, to be woken, if fewer than `most` are awake. Requires: the lock. */
static gate_t *take_first(int most) {
    gate_t *gate = turnstile.first;
    if (gate == NULL || turnstile.awake >= most) return NULL;
    turnstile.first = gate->next;
    if (turnstile.first == NULL) turnstile.last = NULL;
    gate->state = AWAKE;
    turnstile.awake++;
    return gate;
}

/* Without the lock: it takes some microseconds. The gate is there as long as its thread waits for this. */
static void wake(gate_t *gate) {
    if (gate) sem_post(&gate->woken);
}

/* Requires: the lock. */
static void put_in_line(gate_t *gate, int at_front) {
    if (gate->state != SHUT || gate->era != turnstile.era) return;
    gate_t **link = at_front || turnstile.last == NULL ? &turnstile.first : &turnstile.last->next;
    gate->state = OPEN;
    gate->next = *link;
    *link = gate;
    if (gate->next == NULL) turnstile.last = gate;
}

static void gate_open(gate_t *gate, int at_front) {
    lock();
    put_in_line(gate, at_front);
    unlock();
}

/* See to it that one of the line is awake; from there on each wakes another one. */
static void start_line(void) {
    lock();
    gate_t *gate = take_first(1);
    unlock();
    wake(gate);
}

/* Whether watching for the turn keeps nobody from it: who has it runs on another processor. */
static int runs_elsewhere(void) {
    return atomic_load_explicit(&turnstile.owner, memory_order_relaxed) != 0 &&
           atomic_load_explicit(&turnstile.processor, memory_order_relaxed) != sched_getcpu();
}

static void await_turn(int is_urgent) {
    uint64_t end = now_ns() + TURN_NS;
    for (;;) {
        for (int look = 0; look < LOOKS; look++) {
            if (atomic_load_explicit(&turnstile.owner, memory_order_acquire) == 0 &&
                (is_urgent || atomic_load_explicit(&turnstile.urgent, memory_order_relaxed) == 0))
                return;
            if (look % LOOKS_FOR_WAY == 0 && !runs_elsewhere()) break;
            pause_a_moment();
        }
        if (now_ns() >= end) return;
        if (!runs_elsewhere()) sched_yield();
    }
}

static void set_owner(uintptr_t owner) {
    if (owner) atomic_store_explicit(&turnstile.processor, sched_getcpu(), memory_order_relaxed);
    atomic_store_explicit(&turnstile.owner, owner, memory_order_release);
}

/* Before a thread blocks; nothing happens where it has no turn. */
static void give_turn(void) {
    if (atomic_load_explicit(&turnstile.owner, memory_order_relaxed) != this_thread()) return;
    set_owner(0);
    lock();
    gate_t *gate = turnstile.awake ? take_first(MOST_AWAKE) : NULL;
    unlock();
    wake(gate);
}

/* For a thread that those at the gates wait for: it goes first. */
static void take_turn(void) {
    atomic_fetch_add(&turnstile.urgent, 1);
    await_turn(1);
    set_owner(this_thread());
    atomic_fetch_sub(&turnstile.urgent, 1);
}

/* A thread that was awake is through, or goes away: another one has to be awake. */
static void pass_on(gate_t *passed, int has_turn) {
    lock();
    if (has_turn) set_owner(this_thread());
    passed->state = THROUGH;
    turnstile.awake--;
    gate_t *gate = take_first(1);
    unlock();
    wake(gate);
}

/* 0, or -1 with errno of sem_wait; then call it again, or gate_leave. */
static int gate_wait(gate_t *gate) {
    give_turn();
    if (sem_wait(&gate->woken)) return -1;
    await_turn(0);
    pass_on(gate, 1);
    return 0;
}

/* Nobody waits at the gate any more. */
static void gate_leave(gate_t *gate) {
    if (gate->era != turnstile.era) return;
    lock();
    int state = gate->state;
    if (state == OPEN) {
        gate_t **link = &turnstile.first, *before = NULL;
        while (*link != gate) {
            before = *link;
            link = &before->next;
        }
        *link = gate->next;
        if (turnstile.last == gate) turnstile.last = before;
    }
    if (state != AWAKE) gate->state = THROUGH;
    unlock();
    if (state != AWAKE) return;
    while (sem_wait(&gate->woken)) continue; /* whoever took it from the line is about to wake it */
    pass_on(gate, 0);
}

/* All of `data`, and a sync. 0, or an errno. */
static int write_and_sync(int fd, const char *data, size_t size, off_t offset) {
    while (size) {
        ssize_t written = pwrite(fd, data, size, offset);
        if (written >= 0) {
            data += written;
            size -= (size_t)written;
            offset += written;
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return fdatasync(fd) ? errno : 0;
}

/* The same with the turn given meanwhile. 0, or -1 with errno. */
static int write_and_sync_turn(int fd, const char *data, size_t size, off_t offset) {
    give_turn();
    int failed = write_and_sync(fd, data, size, offset);
    take_turn();
    errno = failed;
    return failed ? -1 : 0;
}

#endif
