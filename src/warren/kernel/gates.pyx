# cython: language_level=3
"""Gates at which threads wait, opened many at a time.

A gate is opened without the GIL. Whoever opened it under the GIL, as by `threading.Lock.release`, would wake threads that
find the GIL taken and go to sleep again: two switches for each, and the opener is pushed aside by every one of them.
With 64 threads at their gates that is more than half of the cost of a group commit (docs/decisions/0011).
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EINTR, errno
from libc.stdlib cimport free, malloc


cdef extern from "semaphore.h" nogil:
    ctypedef struct sem_t:
        pass
    int sem_init(sem_t *semaphore, int shared, unsigned int value)
    int sem_destroy(sem_t *semaphore)
    int sem_wait(sem_t *semaphore)
    int sem_post(sem_t *semaphore)


cdef class Gate:
    """Shut at first. It lets one thread through for each time that it is opened."""

    cdef sem_t _semaphore

    def __cinit__(self):
        sem_init(&self._semaphore, 0, 0)

    def __dealloc__(self):
        sem_destroy(&self._semaphore)

    def wait(self):
        """Return when the gate was opened. Raises what a signal handler raises, such as KeyboardInterrupt."""
        cdef int failed
        while True:
            with nogil:
                failed = sem_wait(&self._semaphore)
            if not failed:
                return
            if errno == EINTR:
                PyErr_CheckSignals()


def open_gates(list gates not None):
    """Open all of them, in order. Requires: no lock is held that those who wait take next."""
    cdef Py_ssize_t count = len(gates), i
    cdef sem_t **semaphores
    if not count:
        return
    semaphores = <sem_t **>malloc(count * sizeof(sem_t *))
    if semaphores == NULL:
        raise MemoryError()
    try:
        for i in range(count):
            semaphores[i] = &(<Gate?>gates[i])._semaphore  # `gates` keeps them alive
        with nogil:
            for i in range(count):
                sem_post(semaphores[i])
    finally:
        free(semaphores)
