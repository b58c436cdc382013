# cython: language_level=3
"""Where in the journal the messages of one queue are, until a checkpoint moves them to segments.

24 bytes a message, sorted by seq_id; bounded by the journal's size, because a checkpoint removes rows and dead rows
are squeezed out. The states of a row:

    HIDDEN -> LIVE -> ACKED -> DEAD         a message that is acked before the checkpoint
              LIVE -> GONE                  one that a checkpoint wrote to its segment
              LIVE -> ACKED -> GONE         the same, with its ack under way: the segment takes the ack over
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

ROW_BYTES = sizeof(Row)


cdef inline int _pair(list out, uint64_t first, uint64_t stop) except -1:
    out.append(first)
    out.append(stop - first)
    return 0


cdef class Overlay:
    def __cinit__(self):
        self.rows = NULL
        self.n = 0
        self.room = 0
        self.start = 0
        self.useless = 0

    def __dealloc__(self):
        free(self.rows)

    def __len__(self):
        """Rows that are LIVE, ACKED or HIDDEN."""
        return self.n - self.start - self.useless

    cdef Py_ssize_t find(self, uint64_t seq) noexcept:
        """Index of the first row at or after `seq`."""
        cdef Py_ssize_t low = self.start, high = self.n, middle
        if low < high and self.rows[low].seq >= seq:
            return low
        while low < high:
            middle = (low + high) >> 1
            if self.rows[middle].seq < seq:
                low = middle + 1
            else:
                high = middle
        return low

    cdef int put(self, uint64_t seq, uint32_t file, uint32_t offset, uint32_t size, uint32_t overhead, uint8_t flags,
                 uint8_t state) except -1:
        """A new row, or a new place for one that is there. A dead row stays dead. `overhead`: bytes of the record that
        are not body."""
        cdef Py_ssize_t at
        cdef Row *rows
        cdef uint16_t many = <uint16_t>min(overhead, <uint32_t>MANY)
        if self.n == self.room:
            self.room = max(16, self.room + (self.room >> 1))
            rows = <Row *>realloc(self.rows, self.room * sizeof(Row))
            if rows == NULL:
                raise MemoryError()
            self.rows = rows
        at = self.n
        if at > self.start and self.rows[at - 1].seq >= seq:
            at = self.find(seq)
            if self.rows[at].seq == seq:
                if self.rows[at].state in (LIVE, ACKED, HIDDEN):
                    self.rows[at].file = file
                    self.rows[at].offset = offset
                    self.rows[at].size = size
                    self.rows[at].overhead = many
                return 0
            memmove(&self.rows[at + 1], &self.rows[at], (self.n - at) * sizeof(Row))
        self.rows[at].seq = seq
        self.rows[at].file = file
        self.rows[at].offset = offset
        self.rows[at].size = size
        self.rows[at].flags = flags
        self.rows[at].state = state
        self.rows[at].overhead = many
        self.n += 1
        return 0

    cdef uint64_t kill(self, uint64_t first, uint64_t count) noexcept:
        """Rows in the range become DEAD at once (replay); how many were alive."""
        cdef Py_ssize_t at = self.find(first)
        cdef uint64_t killed = 0
        while at < self.n and self.rows[at].seq - first < count:
            if self.rows[at].state in (LIVE, ACKED, HIDDEN):
                self.rows[at].state = DEAD
                self.useless += 1
                killed += 1
            at += 1
        return killed

    cdef int tidy(self) except -1:
        """Step over the useless head; squeeze the rest when more than half of it is useless."""
        cdef Py_ssize_t at, put
        cdef Row *rows
        while self.start < self.n and self.rows[self.start].state in (DEAD, GONE):
            self.start += 1
            self.useless -= 1
        if self.start == self.n:
            self.start = self.n = 0
        elif (self.start + self.useless) * 2 > self.n and self.n > 64:
            put = 0
            for at in range(self.start, self.n):
                if self.rows[at].state not in (DEAD, GONE):
                    self.rows[put] = self.rows[at]
                    put += 1
            self.n = put
            self.start = 0
            self.useless = 0
        if self.room > 1024 and self.n * 4 < self.room:
            self.room = max(16, self.n * 2)
            rows = <Row *>realloc(self.rows, self.room * sizeof(Row))
            if rows != NULL:
                self.rows = rows
        return 0

    def add(self, uint64_t seq, uint32_t file, uint32_t offset, uint32_t size, uint8_t flags=0, uint8_t state=LIVE):
        self.put(seq, file, offset, size, 0, flags, state)

    def locate(self, uint64_t seq):
        """(file, offset, size, flags) of a row that is not dead or gone; else None."""
        cdef Py_ssize_t at = self.find(seq)
        if at < self.n and self.rows[at].seq == seq and self.rows[at].state not in (DEAD, GONE):
            return self.rows[at].file, self.rows[at].offset, self.rows[at].size, self.rows[at].flags
        return None

    def ack(self, list pairs not None):
        """An ack of `pairs` (flat: first, count, ...) is in the journal: LIVE becomes ACKED. Returns two flat lists:
        what was found here, and what was not and may be in a segment."""
        return self.change(pairs, LIVE, ACKED)

    def reveal(self, list pairs not None):
        """The transaction is committed: HIDDEN becomes LIVE."""
        return self.change(pairs, HIDDEN, LIVE)

    def ack_synced(self, list pairs not None):
        """The acks are safe: ACKED becomes DEAD. Returns what a checkpoint took away in between."""
        missing = self.change(pairs, ACKED, DEAD)[1]
        self.tidy()
        return missing

    cdef tuple change(self, list pairs, uint8_t old, uint8_t new):
        cdef list found = []
        cdef list missing = []
        cdef Py_ssize_t i, at
        cdef uint64_t first, stop, cursor, seq, run
        for i in range(0, len(pairs), 2):
            first = pairs[i]
            stop = first + <uint64_t>pairs[i + 1]
            at = self.find(first)
            cursor = first                   # everything in [first, cursor) has been accounted for
            run = 0
            while at < self.n and self.rows[at].seq < stop:
                if self.rows[at].state == old:
                    seq = self.rows[at].seq
                    self.rows[at].state = new
                    if new == DEAD:
                        self.useless += 1
                    if seq != cursor:
                        if run:
                            _pair(found, cursor - run, cursor)
                            run = 0
                        _pair(missing, cursor, seq)
                    run += 1
                    cursor = seq + 1
                at += 1
            if run:
                _pair(found, cursor - run, cursor)
            if cursor < stop:
                _pair(missing, cursor, stop)
        return found, missing

    def rows_upto(self, uint32_t file):
        """Packed rows that are still needed and lie in journal files up to `file`."""
        cdef Py_ssize_t at, count = 0
        cdef bytes out
        cdef Row *target
        for at in range(self.start, self.n):
            if self.rows[at].file <= file and self.rows[at].state not in (DEAD, GONE):
                count += 1
        out = PyBytes_FromStringAndSize(NULL, count * sizeof(Row))
        target = <Row *>PyBytes_AS_STRING(out)
        for at in range(self.start, self.n):
            if self.rows[at].file <= file and self.rows[at].state not in (DEAD, GONE):
                target[0] = self.rows[at]
                target += 1
        return out

    def bytes_upto(self, uint32_t file):
        """Journal bytes of those rows."""
        cdef Py_ssize_t at
        cdef uint64_t total = 0
        for at in range(self.start, self.n):
            if self.rows[at].file <= file and self.rows[at].state not in (DEAD, GONE):
                total += self.rows[at].size
        return total

    def rows_between(self, uint64_t first, uint64_t stop, Py_ssize_t limit):
        """Packed LIVE rows of [first, stop), at most `limit`."""
        cdef Py_ssize_t at = self.find(first), count = 0, i
        cdef bytes out
        cdef Row *target
        i = at
        while i < self.n and self.rows[i].seq < stop and count < limit:
            if self.rows[i].state == LIVE:
                count += 1
            i += 1
        out = PyBytes_FromStringAndSize(NULL, count * sizeof(Row))
        target = <Row *>PyBytes_AS_STRING(out)
        i = 0
        while i < count:
            if self.rows[at].state == LIVE:
                target[i] = self.rows[at]
                i += 1
            at += 1
        return out

    def count_between(self, uint64_t first, uint64_t stop):
        """LIVE rows in [first, stop)."""
        cdef Py_ssize_t at = self.find(first), count = 0
        while at < self.n and self.rows[at].seq < stop:
            if self.rows[at].state == LIVE:
                count += 1
            at += 1
        return count

    def moved(self, bytes rows not None):
        """A checkpoint wrote `rows` to segments: they are GONE from here. Returns two flat lists: those whose ack is
        under way, and those whose ack was synced meanwhile."""
        cdef list acked = []
        cdef list dead = []
        cdef Py_ssize_t i, at
        cdef Py_ssize_t n = PyBytes_GET_SIZE(rows) // <Py_ssize_t>sizeof(Row)
        cdef Row *row = <Row *>PyBytes_AS_STRING(rows)
        at = self.find(row[0].seq) if n else 0
        for i in range(n):
            while at < self.n and self.rows[at].seq < row[i].seq:
                at += 1
            if at < self.n and self.rows[at].seq == row[i].seq and self.rows[at].state != GONE:
                if self.rows[at].state == DEAD:
                    _extend(dead, row[i].seq)
                    self.rows[at].state = GONE
                else:
                    if self.rows[at].state == ACKED:
                        _extend(acked, row[i].seq)
                    self.rows[at].state = GONE
                    self.useless += 1
            else:       # dead and squeezed out while the checkpoint ran
                _extend(dead, row[i].seq)
        self.tidy()
        return acked, dead

    def settled(self, bytes rows not None):
        """Those of packed `rows` whose ack was synced since they were taken, as a flat list first, count, ... Requires: they
        were not `moved`."""
        cdef list dead = []
        cdef Py_ssize_t i, at
        cdef Py_ssize_t n = PyBytes_GET_SIZE(rows) // <Py_ssize_t>sizeof(Row)
        cdef Row *row = <Row *>PyBytes_AS_STRING(rows)
        at = self.find(row[0].seq) if n else 0
        for i in range(n):
            while at < self.n and self.rows[at].seq < row[i].seq:
                at += 1
            if at == self.n or self.rows[at].seq != row[i].seq or self.rows[at].state in (DEAD, GONE):
                _extend(dead, row[i].seq)
        return dead

    def forget(self, uint64_t first, uint64_t count):
        """Drop rows without a trace: replay found them in a segment already, or their journal bytes are damaged."""
        cdef uint64_t dropped = self.kill(first, count)
        self.tidy()
        return dropped

    def squeeze(self):
        """Give back what replay left useless."""
        self.tidy()

    def live_totals(self):
        """LIVE rows, and the body bytes of those that are not `unmeasured_rows`."""
        cdef Py_ssize_t at
        cdef uint64_t count = 0, total = 0
        for at in range(self.start, self.n):
            if self.rows[at].state == LIVE:
                count += 1
                if self.rows[at].overhead != MANY and not self.rows[at].flags & 2:
                    total += self.rows[at].size - self.rows[at].overhead
        return count, total

    def unmeasured_rows(self):
        """Packed LIVE rows of which only the record says how large the body is: those whose payload is in the message
        store, and those with very long heads or very many targets."""
        cdef list out = []
        cdef Py_ssize_t at
        for at in range(self.start, self.n):
            if self.rows[at].state == LIVE and (self.rows[at].overhead == MANY or self.rows[at].flags & 2):
                out.append(PyBytes_FromStringAndSize(<char *>&self.rows[at], sizeof(Row)))
        return b"".join(out)

    def last_seq(self):
        """The highest seq_id of any row, dead ones too; -1 without rows."""
        return -1 if self.n == 0 else self.rows[self.n - 1].seq

    def first_seq(self):
        """The lowest seq_id that is needed; None where there is none."""
        cdef Py_ssize_t at
        for at in range(self.start, self.n):
            if self.rows[at].state not in (DEAD, GONE):
                return self.rows[at].seq
        return None


cdef int _extend(list out, uint64_t seq) except -1:
    """Add `seq` to a flat list of pairs."""
    cdef Py_ssize_t n = len(out)
    if n and <uint64_t>out[n - 2] + <uint64_t>out[n - 1] == seq:
        out[n - 1] = out[n - 1] + 1
    else:
        out.append(seq)
        out.append(1)
    return 0


def unpack_rows(bytes rows not None):
    """Packed rows as tuples (seq, file, offset, size, flags)."""
    cdef list out = []
    cdef Py_ssize_t i
    cdef Row *row = <Row *>PyBytes_AS_STRING(rows)
    for i in range(PyBytes_GET_SIZE(rows) // <Py_ssize_t>sizeof(Row)):
        out.append((row[i].seq, row[i].file, row[i].offset, row[i].size, row[i].flags))
    return out


def split_rows(bytes rows not None, uint64_t segment_size, uint64_t most_bytes):
    """Cut packed rows where the journal file or the segment changes, where a span of journal would go over
    `most_bytes`, or where the offsets step back. Yields (segment, file, span start, span stop, rows)."""
    cdef list out = []
    cdef Row *row = <Row *>PyBytes_AS_STRING(rows)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(rows) // <Py_ssize_t>sizeof(Row)
    cdef Py_ssize_t i = 0, j
    cdef uint64_t segment, stop
    while i < n:
        segment = row[i].seq // segment_size
        stop = row[i].offset + row[i].size
        j = i + 1
        while (j < n and row[j].file == row[i].file and row[j].seq // segment_size == segment
               and row[j].offset >= row[j - 1].offset and row[j].offset + row[j].size - row[i].offset <= most_bytes):
            stop = row[j].offset + row[j].size
            j += 1
        out.append((segment, row[i].file, row[i].offset, stop, rows[i * sizeof(Row):j * sizeof(Row)]))
        i = j
    return out


def row_pairs(bytes rows not None):
    """The seq_ids of packed rows as a flat list first, count, ..."""
    cdef list out = []
    cdef Py_ssize_t i
    cdef uint64_t first = 0, following = 0
    cdef Py_ssize_t n = PyBytes_GET_SIZE(rows) // <Py_ssize_t>sizeof(Row)
    cdef Row *row = <Row *>PyBytes_AS_STRING(rows)
    for i in range(n):
        if i and row[i].seq == following:
            following += 1
            continue
        if i:
            _pair(out, first, following)
        first = row[i].seq
        following = first + 1
    if n:
        _pair(out, first, following)
    return out
