# cython: language_level=3
"""A set of 64-bit numbers kept as sorted, disjoint ranges: a million neighbours cost 16 bytes."""

from libc.stdlib cimport free, realloc
from libc.string cimport memmove, memcpy
from libc.stdint cimport uint64_t


cdef class RangeSet:
    def __cinit__(self):
        self.rows = NULL
        self.n = 0
        self.room = 0
        self.items = 0

    def __init__(self, pairs=()):
        """`pairs` is flat: first, count, first, count, ..."""
        self.add_pairs(pairs)

    def __dealloc__(self):
        free(self.rows)

    def __len__(self):
        return self.items

    def __bool__(self):
        return self.n > 0

    def __contains__(self, uint64_t value):
        return self.contains(value)

    def __iter__(self):
        cdef Py_ssize_t i
        cdef uint64_t value
        for i in range(self.n):
            for value in range(self.rows[i].first, self.rows[i].stop):
                yield value

    def __eq__(self, other):
        return isinstance(other, RangeSet) and self.pairs() == (<RangeSet>other).pairs()

    def __repr__(self):
        return f"RangeSet({self.pairs()})"

    cdef Py_ssize_t find(self, uint64_t value) noexcept:
        """Index of the first range whose stop lies above `value`; n where there is none."""
        cdef Py_ssize_t low = 0, high = self.n, middle
        while low < high:
            middle = (low + high) >> 1
            if self.rows[middle].stop <= value:
                low = middle + 1
            else:
                high = middle
        return low

    cdef bint contains(self, uint64_t value) noexcept:
        cdef Py_ssize_t at = self.find(value)
        return at < self.n and self.rows[at].first <= value

    cdef int splice(self, Py_ssize_t at, Py_ssize_t drop, Range *put, Py_ssize_t count) except -1:
        cdef Py_ssize_t wanted = self.n - drop + count
        cdef Range *rows
        if wanted > self.room:
            self.room = max(4, wanted + (wanted >> 1))
            rows = <Range *>realloc(self.rows, self.room * sizeof(Range))
            if rows == NULL:
                raise MemoryError()
            self.rows = rows
        if drop != count:
            memmove(&self.rows[at + count], &self.rows[at + drop], (self.n - at - drop) * sizeof(Range))
        if count:
            memcpy(&self.rows[at], put, count * sizeof(Range))
        self.n = wanted
        return 0

    cpdef uint64_t add(self, uint64_t first, uint64_t count) except? 0xFFFFFFFFFFFFFFFF:
        """Add [first, first + count); returns how many were new."""
        cdef uint64_t stop = first + count
        cdef uint64_t before = self.items
        cdef Py_ssize_t low, high
        cdef Range merged
        if count == 0:
            return 0
        if self.n and self.rows[self.n - 1].stop <= first:      # the common case: at the end
            if self.rows[self.n - 1].stop == first:
                self.rows[self.n - 1].stop = stop
            else:
                merged.first = first
                merged.stop = stop
                self.splice(self.n, 0, &merged, 1)
            self.items += count
            return count
        low = self.find(first)
        if low > 0 and self.rows[low - 1].stop == first:
            low -= 1
        merged.first = first
        merged.stop = stop
        high = low
        while high < self.n and self.rows[high].first <= stop:
            self.items -= self.rows[high].stop - self.rows[high].first
            if self.rows[high].first < merged.first:
                merged.first = self.rows[high].first
            if self.rows[high].stop > merged.stop:
                merged.stop = self.rows[high].stop
            high += 1
        self.items += merged.stop - merged.first
        self.splice(low, high - low, &merged, 1)
        return self.items - before

    cpdef uint64_t remove(self, uint64_t first, uint64_t count) except? 0xFFFFFFFFFFFFFFFF:
        """Remove [first, first + count); returns how many were there."""
        cdef uint64_t stop = first + count
        cdef uint64_t before = self.items
        cdef Range left[2]
        cdef Py_ssize_t keep = 0, low, high
        if count == 0 or self.n == 0:
            return 0
        low = self.find(first)
        high = low
        while high < self.n and self.rows[high].first < stop:
            self.items -= self.rows[high].stop - self.rows[high].first
            if self.rows[high].first < first:
                left[keep].first = self.rows[high].first
                left[keep].stop = first
                self.items += first - left[keep].first
                keep += 1
            if self.rows[high].stop > stop:
                left[keep].first = stop
                left[keep].stop = self.rows[high].stop
                self.items += left[keep].stop - stop
                keep += 1
            high += 1
        self.splice(low, high - low, left, keep)
        return before - self.items

    def add_pairs(self, pairs):
        """Add a flat list first, count, first, count, ...; returns how many were new."""
        cdef uint64_t fresh = 0
        cdef Py_ssize_t i
        cdef list flat = list(pairs)
        for i in range(0, len(flat), 2):
            fresh += self.add(flat[i], flat[i + 1])
        return fresh

    def remove_pairs(self, pairs):
        """Remove a flat list first, count, ...; returns how many were there."""
        cdef uint64_t gone = 0
        cdef Py_ssize_t i
        cdef list flat = list(pairs)
        for i in range(0, len(flat), 2):
            gone += self.remove(flat[i], flat[i + 1])
        return gone

    def pairs(self, first=0, stop=None):
        """The part in [first, stop) as a flat list first, count, ..."""
        cdef list out = []
        cdef uint64_t low = first
        cdef uint64_t high = 0xFFFFFFFFFFFFFFFF if stop is None else stop
        cdef Py_ssize_t at = self.find(low)
        cdef uint64_t a, b
        while low < high and at < self.n and self.rows[at].first < high:
            a = max(low, self.rows[at].first)
            b = min(high, self.rows[at].stop)
            out.append(a)
            out.append(b - a)
            at += 1
        return out

    def gaps(self, uint64_t first, uint64_t stop):
        """What of [first, stop) is not in the set, as a flat list first, count, ..."""
        cdef list out = []
        cdef Py_ssize_t at = self.find(first)
        cdef uint64_t cursor = first
        while at < self.n and self.rows[at].first < stop:
            if self.rows[at].first > cursor:
                out.append(cursor)
                out.append(self.rows[at].first - cursor)
            cursor = self.rows[at].stop
            at += 1
        if cursor < stop:
            out.append(cursor)
            out.append(stop - cursor)
        return out

    def copy(self):
        return RangeSet(self.pairs())

    def clear(self):
        self.n = 0
        self.items = 0

    def first(self):
        """The smallest number. Requires: not empty."""
        if self.n == 0:
            raise ValueError("first() of an empty RangeSet")
        return self.rows[0].first

    def stop(self):
        """The largest number plus one. Requires: not empty."""
        if self.n == 0:
            raise ValueError("stop() of an empty RangeSet")
        return self.rows[self.n - 1].stop

    def range_count(self):
        return self.n

    def count_in(self, uint64_t first, uint64_t stop):
        """How many members lie in [first, stop)."""
        cdef Py_ssize_t at = self.find(first)
        cdef uint64_t total = 0
        while first < stop and at < self.n and self.rows[at].first < stop:
            total += min(stop, self.rows[at].stop) - max(first, self.rows[at].first)
            at += 1
        return total
