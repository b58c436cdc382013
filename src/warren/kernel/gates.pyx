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

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno


cdef extern from "disk_thread.h" nogil:
    ctypedef long off_t
    ctypedef struct gate_t:
        pass
    int turnstile_init()
    int keeper_init()
    void gate_init(gate_t *gate)
    void gate_destroy(gate_t *gate)
    void gate_open(gate_t *gate, int at_front)
    void start_line()
    int gate_wait(gate_t *gate)
    void gate_leave(gate_t *gate)
    ctypedef struct disk_thread_t:
        int fd
        const char *data
        size_t size
        off_t offset
    int disk_start(disk_thread_t *disk)
    void disk_submit(disk_thread_t *disk, gate_t *deputy)
    int disk_appoint(disk_thread_t *disk, gate_t *deputy)
    int disk_is_written(disk_thread_t *disk)
    int disk_collect(disk_thread_t *disk)
    void disk_stop(disk_thread_t *disk)
    int write_and_sync_turn(int fd, const char *data, size_t size, off_t offset)


if turnstile_init() or keeper_init():
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

    def leave(self):
        """Nobody comes to wait here any more: others do not have to wait for its thread to pass."""
        gate_leave(&self._gate)


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


@cython.no_gc_clear
cdef class DiskThread:
    """Writes and syncs one block at a time for a crowd of threads, and takes no GIL for it.

    If one of the crowd did it, it would come back on another processor than the one on which the others take turns, and wake them
    from there: three times as much work for the kernel (docs/decisions/0011). So whoever passes by looks whether the block `is_written`, and
    if it is, collects it and submits the next. If nobody passes by, the deputy's gate is opened: its thread has to collect.

    On a machine of two processors it stays on one of them, and has a second thread that keeps that one from being idle while it waits for
    the disk: an idle processor attracts the crowd (keeper.h).

    Requires: one caller at a time. The thread is started by the first `submit` and ends with `stop`.
    """

    cdef disk_thread_t _disk
    cdef Py_buffer _view
    cdef Gate _deputy  # kept alive as long as the thread may open it

    def __dealloc__(self):
        with nogil:
            disk_stop(&self._disk)
        PyBuffer_Release(&self._view)

    def submit(self, int fd, data, off_t offset, Gate deputy not None):
        """Begin to write. Requires: what was written before was collected. Raises OSError where no thread can be started."""
        cdef int failed = disk_start(&self._disk)
        if failed:
            raise OSError(failed, "no thread for the disk can be started")
        PyObject_GetBuffer(data, &self._view, PyBUF_SIMPLE)
        self._deputy = deputy
        self._disk.fd = fd
        self._disk.data = <const char *>self._view.buf
        self._disk.size = <size_t>self._view.len
        self._disk.offset = offset
        disk_submit(&self._disk, &deputy._gate)

    def appoint(self, Gate deputy not None):
        """The deputy went away: make it this one. False: the block is written, collect it."""
        if not disk_appoint(&self._disk, &deputy._gate):
            return False
        self._deputy = deputy
        return True

    def is_written(self):
        return bool(disk_is_written(&self._disk))

    def collect(self):
        """0, or the errno of what failed. Requires: `is_written`."""
        cdef int failed = disk_collect(&self._disk)
        PyBuffer_Release(&self._view)
        self._deputy = None
        return failed

    def stop(self):
        """Return when the block is written, and the thread has ended. The block counts as collected."""
        with nogil:
            disk_stop(&self._disk)
        if disk_is_written(&self._disk):
            self.collect()
