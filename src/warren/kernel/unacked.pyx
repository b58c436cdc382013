# cython: language_level=3
"""What a channel has delivered and its client has not settled yet, by delivery tag.

Rows of 24 bytes lie in one array in the order of their tags: rows are added at its end and, most often, settled at its
start, so the array slides. Tags of neighbours mostly follow each other; then a tag's row is found by subtraction, else
by halving.

Rules:

1. A tag is used once. Deliveries that need no ack use up tags too, and leave no row.
2. A row that is settled in the middle stays, marked, until those before it are settled or room is needed. So one message
   that a client never settles costs one row, however many are settled after it.
3. A tag that is not outstanding settles nothing, also with `multiple`: RabbitMQ takes it for an error of the client.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove

from warren.kernel.entry cimport Entry  # its layout is compiled in

cdef enum:
    FIRST_ROOM = 64         # rows
    KEPT_ROOM = 4096        # rows; a larger array is given back when it is empty


cdef struct Row:
    uint64_t mark           # 2 * tag, + 1 when it is settled
    uint64_t seq
    uint32_t queue
    uint32_t consumer


cdef class Unacked:
    """
    >>> from warren.kernel.entry import Entry
    >>> unacked = Unacked()
    >>> unacked.add(7, 1, [Entry(100, b"", b""), Entry(101, b"", b"")])
    1
    >>> unacked.ack(2, True)
    [(7, 1, [100, 101])]
    """

    cdef Row *rows
    cdef Py_ssize_t start       # of the rows that are in use
    cdef Py_ssize_t stop
    cdef Py_ssize_t room_rows
    cdef Py_ssize_t live        # rows that are not settled
    cdef readonly uint64_t next_tag
    # The group that is being collected.
    cdef list seqs              # None: none is
    cdef uint32_t queue
    cdef uint32_t consumer

    def __cinit__(self):
        self.rows = NULL
        self.next_tag = 1

    def __dealloc__(self):
        free(self.rows)

    def __len__(self):
        return self.live

    def add(self, uint32_t queue, uint32_t consumer, list entries not None):
        """Record deliveries, in their order; returns the tag of the first. `queue` and `consumer` are the caller's."""
        cdef uint64_t tag = self.next_tag
        cdef Row *row
        self.reserve(len(entries))
        for item in entries:
            row = &self.rows[self.stop]
            row.seq = (<Entry?>item).seq
            row.mark = 2 * self.next_tag
            row.queue = queue
            row.consumer = consumer
            self.stop += 1
            self.live += 1
            self.next_tag += 1
        return tag

    def skip(self, uint64_t count):
        """Use up tags for deliveries that need no ack; returns the first."""
        cdef uint64_t tag = self.next_tag
        self.next_tag += count
        return tag

    def ack(self, uint64_t tag, bint multiple):
        """Settle `tag`, or with `multiple` all up to and with it (0: all that there are).

        Returns (queue, consumer, seq_ids) in the order of delivery, neighbours of one queue and consumer together; None
        when the tag is not outstanding.
        """
        cdef list groups = []
        if not self.settle(tag, multiple, groups):
            return None
        self.tidy()
        return groups

    def ack_all(self, list acks not None):
        """Settle what an ACK event of the scanner lists: 2 * tag, + 1 for multiple. Returns the groups as `ack` does,
        and the first tag that was not outstanding, or None; what stands behind that one is not settled.

        >>> from warren.kernel.entry import Entry
        >>> unacked = Unacked()
        >>> unacked.add(7, 1, [Entry(100, b"", b""), Entry(101, b"", b""), Entry(102, b"", b"")])
        1
        >>> unacked.ack_all([2 * 2, 2 * 1, 2 * 9])
        ([(7, 1, [101, 100])], 9)
        """
        cdef list groups = []
        cdef uint64_t coded
        unknown = None
        for item in acks:
            if item > 0xFFFFFFFFFFFFFFFF:       # twice a tag that nobody was given
                unknown = item >> 1
                break
            coded = item
            if not self.settle(coded >> 1, coded & 1, groups):
                unknown = coded >> 1
                break
        self.tidy()
        return groups, unknown

    def drain(self):
        """All that is outstanding, the oldest first; then nothing is."""
        cdef list groups = []
        self.settle(0, True, groups)
        self.tidy()
        return groups

    def __contains__(self, uint64_t tag):
        """Is it outstanding?"""
        return self.find(tag) >= 0

    def tags(self, uint64_t above=0, uint64_t last=0xFFFFFFFFFFFFFFFF):
        """The tags that are outstanding, of those above `above`, up to and with `last`; only these are walked over."""
        cdef list found = []
        cdef Py_ssize_t low = self.start, high = self.stop, middle
        while low < high:
            middle = (low + high) >> 1
            if self.rows[middle].mark >> 1 <= above:
                low = middle + 1
            else:
                high = middle
        while low < self.stop and self.rows[low].mark >> 1 <= last:
            if not self.rows[low].mark & 1:
                found.append(self.rows[low].mark >> 1)
            low += 1
        return found

    def first(self):
        """The lowest tag that is outstanding; 0: none is."""
        cdef Py_ssize_t i
        for i in range(self.start, self.stop):
            if not self.rows[i].mark & 1:
                return self.rows[i].mark >> 1
        return 0

    def room(self):
        """How many rows there is memory for."""
        return self.room_rows

    cdef bint settle(self, uint64_t tag, bint multiple, list groups) except -1:
        cdef Py_ssize_t at, i
        if tag == 0 and multiple:
            at = self.stop - 1
        else:
            at = self.find(tag)
            if at < 0:
                return False
        for i in range(self.start if multiple else at, at + 1):
            if not self.rows[i].mark & 1:
                self.collect(&self.rows[i], groups)
        while self.start < self.stop and self.rows[self.start].mark & 1:
            self.start += 1
        return True

    cdef int collect(self, Row *row, list groups) except -1:
        if self.seqs is None or row.queue != self.queue or row.consumer != self.consumer:
            self.seqs = []
            self.queue = row.queue
            self.consumer = row.consumer
            groups.append((row.queue, row.consumer, self.seqs))
        self.seqs.append(row.seq)
        row.mark |= 1
        self.live -= 1
        return 0

    cdef Py_ssize_t find(self, uint64_t tag) noexcept:
        """The row of a tag that is outstanding, else -1."""
        cdef Py_ssize_t low = self.start, high = self.stop, middle
        cdef uint64_t first, ahead
        if low == high:
            return -1
        first = self.rows[low].mark >> 1
        if tag < first or tag > self.rows[high - 1].mark >> 1:
            return -1
        ahead = tag - first
        # Tags only grow: a row lies at most as far from the first as its tag does, and just there if none was skipped.
        if ahead < <uint64_t>(high - low):
            high = low + <Py_ssize_t>ahead + 1
        if self.rows[high - 1].mark >> 1 == tag:
            low = high - 1
        while low < high - 1:
            middle = (low + high) >> 1
            if self.rows[middle].mark >> 1 <= tag:
                low = middle
            else:
                high = middle
        return low if self.rows[low].mark == 2 * tag else -1

    cdef void tidy(self) noexcept:
        """After settling: no group is open, and an empty array begins anew."""
        self.seqs = None
        if self.live == 0:
            self.start = self.stop = 0
            if self.room_rows > KEPT_ROOM:
                free(self.rows)
                self.rows = NULL
                self.room_rows = 0

    cdef int reserve(self, Py_ssize_t count) except -1:
        """Room for `count` more rows. Settled ones are dropped first; half of the array is free after that, so a row is
        moved a bounded number of times."""
        cdef Py_ssize_t i, kept = 0, room = max(self.room_rows, <Py_ssize_t>FIRST_ROOM)
        cdef Row *rows
        if self.stop + count <= self.room_rows:
            return 0
        while room < 2 * (self.live + count):
            room *= 2
        if room > self.room_rows:
            rows = <Row *>realloc(self.rows, room * sizeof(Row))
            if rows == NULL:
                raise MemoryError()
            self.rows = rows
            self.room_rows = room
        if self.live == self.stop - self.start:
            memmove(self.rows, &self.rows[self.start], self.live * sizeof(Row))
        else:
            for i in range(self.start, self.stop):
                if not self.rows[i].mark & 1:
                    self.rows[kept] = self.rows[i]
                    kept += 1
        self.start = 0
        self.stop = self.live
        return 0
