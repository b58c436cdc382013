from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t


cdef struct Row:
    uint64_t seq
    uint32_t file
    uint32_t offset
    uint32_t size
    uint8_t state
    uint8_t flags
    uint16_t overhead     # bytes of the record that are not body, or MANY


cdef enum:
    MANY = 0xFFFF # of overhead: so many, or the body is not in the record; the record itself says how large it is


cpdef enum:
    LIVE = 1      # in the queue or handed out
    ACKED = 2     # an ack is in the journal, not synced yet
    DEAD = 3      # the ack is synced
    GONE = 4      # a checkpoint moved it to a segment
    HIDDEN = 5    # published by a transaction that is not committed yet


cdef class Overlay:
    cdef Row *rows
    cdef Py_ssize_t n
    cdef Py_ssize_t room
    cdef Py_ssize_t start               # rows before it are dead or gone
    cdef readonly Py_ssize_t useless    # rows at or after start that are dead or gone
    cdef Py_ssize_t find(self, uint64_t seq) noexcept
    cdef int put(self, uint64_t seq, uint32_t file, uint32_t offset, uint32_t size, uint32_t overhead, uint8_t flags,
                 uint8_t state) except -1
    cdef uint64_t kill(self, uint64_t first, uint64_t count) noexcept
    cdef int tidy(self) except -1
    cdef tuple change(self, list pairs, uint8_t old, uint8_t new)
