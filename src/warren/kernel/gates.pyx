# cython: language_level=3
"""Gates at which threads wait, opened many at a time; behind them a turnstile, which they pass one by one.

Threads of Python run one at a time. If all gates were opened at once, each thread would be woken, find the GIL taken, and
go to sleep again for it: with 64 of them that is most of the cost of a group commit (docs/decisions/0011). So:

1. Who went through the turnstile has the turn until it waits again, at a gate or for the disk (`write_and_sync`). Nobody
   waits longer than 30 us for a turn: a thread may also go away and do something else. Then the GIL decides, as always.
2. Of those whose gates are open one is awake and watches for its turn, without the GIL; the others sleep. Who gives its
   turn wakes another one, so that it is ready when the first has gone through: waking up overlaps with work.
3. Who comes back from the disk goes first: many wait for what it has to say.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno


cdef extern from "turnstile.h" nogil:
    ctypedef long off_t
    ctypedef struct gate_t:
        pass
    int turnstile_init()
    void gate_init(gate_t *gate)
    void gate_destroy(gate_t *gate)
    void gate_open(gate_t *gate, int at_front)
    void start_line()
    int gate_wait(gate_t *gate)
    void gate_leave(gate_t *gate)
    int write_and_sync_turn(int fd, const char *data, size_t size, off_t offset)


if turnstile_init():
    raise MemoryError()


cdef class Gate:
    """Shut at first. It is opened once, for one thread."""

    cdef gate_t _gate

    def __cinit__(self):
        gate_init(&self._gate)

    def __dealloc__(self):
        gate_leave(&self._gate)  # its thread may have been called away before it came here
        gate_destroy(&self._gate)

    def wait(self):
        """Return when the gate was opened and it is this thread's turn. Raises what a signal handler raises, such as
        KeyboardInterrupt; then the gate is of no use any more."""
        cdef int failed
        while True:
            with nogil:
                failed = gate_wait(&self._gate)
            if not failed:
                return
            try:
                PyErr_CheckSignals()
            except BaseException:
                gate_leave(&self._gate)
                raise


def open_gates(list gates not None, Gate first=None):
    """Open all of them, in order, and `first` before those that are open already."""
    cdef Gate gate
    for gate in gates:
        gate_open(&gate._gate, False)
    if first is not None:
        gate_open(&first._gate, True)
    start_line()


def write_and_sync(int fd, data, off_t offset):
    """`pwrite` of everything and `fdatasync`, in one call, so that the GIL is waited for once. Raises OSError."""
    cdef Py_buffer view
    cdef int failed
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            failed = write_and_sync_turn(fd, <const char *>view.buf, view.len, offset)
        if failed:
            PyErr_SetFromErrno(OSError)
    finally:
        PyBuffer_Release(&view)
