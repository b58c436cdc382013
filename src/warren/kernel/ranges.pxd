from libc.stdint cimport uint64_t


cdef struct Range:
    uint64_t first
    uint64_t stop


cdef class RangeSet:
    cdef Range *rows
    cdef Py_ssize_t n
    cdef Py_ssize_t room
    cdef uint64_t items
    cdef Py_ssize_t find(self, uint64_t value) noexcept
    cdef bint contains(self, uint64_t value) noexcept
    cdef int splice(self, Py_ssize_t at, Py_ssize_t drop, Range *put, Py_ssize_t count) except -1
    cpdef uint64_t add(self, uint64_t first, uint64_t count) except? 0xFFFFFFFFFFFFFFFF
    cpdef uint64_t remove(self, uint64_t first, uint64_t count) except? 0xFFFFFFFFFFFFFFFF
