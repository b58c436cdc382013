# cython: language_level=3
"""Messages become columns: the bytes of segments and journal files, row by row into buffers that Arrow takes as they are.

Theory of operation. A `ColumnBuilder` holds one buffer a column and collects one batch. The loops over slots and journal
rows run without the GIL; they stop where Python is needed, and where a batch is full:

    DONE     nothing is left
    FULL     the batch is: `finish` it, then go on where the loop stopped
    STORED   the payload is in the message store: `fetch` is asked for it
    BAD      bytes that do not check out: they go to `damaged`, and the loop goes on behind them

Heads repeat, so they are not a column: a row has the number of its head among those of the batch, which are told apart by a
hash table. What is in a head is decoded once for each of them, by the reader.

Offsets into bodies and heads have 32 bits, as Arrow's `binary` has. A batch is full before they run out: one payload is below
2 GiB, and a second one is not begun above `most_bytes`.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

from warren.kernel.entry cimport IN_STORE, PERSISTENT
from warren.kernel.overlay cimport Row

cdef extern from "crc32c.h" nogil:
    void warren_crc_init()
    uint32_t warren_crc(uint32_t crc, const void *data, size_t size)

warren_crc_init()

cdef enum:
    SLOT = 64
    BODY_PREFIX = 16
    RECORD_PREFIX = 8
    PUBLISH = 1
    PUBLISH_FIXED = 24
    TARGET = 16
    PRESENT = 0x80
    HAS_PRODUCER = 1
    PAYLOAD_IN_STORE = 2

cdef enum:
    DONE = 0
    FULL = 1
    STORED = 2
    BAD = 3
    NO_MEMORY = 4

cdef struct Buffer:
    unsigned char *data
    size_t size
    size_t room


cdef int _grow(Buffer *buffer, size_t more) noexcept nogil:
    """Room for `more` bytes; -1: there is no memory."""
    cdef size_t room
    cdef unsigned char *data
    if buffer.size + more <= buffer.room:
        return 0
    room = max(buffer.size + more, buffer.room + (buffer.room >> 1), <size_t>4096)
    data = <unsigned char *>realloc(buffer.data, room)
    if data == NULL:
        return -1
    buffer.data = data
    buffer.room = room
    return 0


cdef class Memory:
    """The bytes of a finished column: read-only, freed with the last one who looks at them."""

    cdef unsigned char *data
    cdef Py_ssize_t size

    def __dealloc__(self):
        free(self.data)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, 1, flags)

    def __len__(self):
        return self.size


cdef Memory _memory(Buffer *buffer):
    """Give the bytes of a buffer away; it is empty then."""
    cdef Memory memory = Memory.__new__(Memory)
    if buffer.data == NULL and _grow(buffer, 8) < 0:
        raise MemoryError()
    memory.data = buffer.data
    memory.size = buffer.size
    buffer.data = NULL
    buffer.size = buffer.room = 0
    return memory


cdef bint _within(const uint64_t *pairs, Py_ssize_t n, uint64_t seq) noexcept nogil:
    """Is `seq` in one of n sorted ranges first, count?"""
    cdef Py_ssize_t low = 0, high = n, middle
    while low < high:
        middle = (low + high) >> 1
        if pairs[2 * middle] <= seq:
            low = middle + 1
        else:
            high = middle
    return low > 0 and seq - pairs[2 * low - 2] < pairs[2 * low - 1]


cdef bint _blank(const unsigned char *p) noexcept nogil:
    cdef int i
    cdef uint64_t word
    for i in range(8):
        memcpy(&word, p + i * 8, 8)
        if word:
            return False
    return True


cdef bint _is_target(const unsigned char *content, uint32_t length, uint64_t sid, uint64_t seq) noexcept nogil:
    """Does this publish record say that the message went to this queue, any level of it, under this seq_id?"""
    cdef uint16_t count
    cdef uint64_t found[2]
    cdef Py_ssize_t i
    memcpy(&count, content + 2, 2)
    if PUBLISH_FIXED + <uint64_t>count * TARGET > length:
        return False
    for i in range(count):
        memcpy(found, content + PUBLISH_FIXED + i * TARGET, TARGET)
        if found[0] >> 8 == sid >> 8 and found[1] == seq:
            return True
    return False


cdef class ColumnBuilder:
    """Collects a batch of at most `most_rows` rows and, but for one large one, `most_bytes` of bodies.

    Without `payloads` no payload is looked at: the column size is that of the payload then, not of the body, and the columns
    head and body have no meaning. Without `bodies` those are not copied. Messages published before `since` or not before `until` (microseconds) are left out."""

    cdef readonly Py_ssize_t rows
    cdef Py_ssize_t most_rows
    cdef Py_ssize_t fixed_room                  # rows that the columns of fixed width have room for
    cdef size_t most_bytes
    cdef bint payloads
    cdef bint bodies
    cdef uint64_t since
    cdef uint64_t until
    cdef Buffer seq, published, expiry, size, source, offset, head, body_end, body
    cdef readonly bint has_expiry               # some row of the batch has one
    cdef Buffer heads, head_end                 # the distinct heads: their bytes, and where each ends
    cdef Py_ssize_t head_count
    cdef uint32_t *table                        # by hash: number of a head plus one
    cdef Py_ssize_t table_size
    cdef Py_ssize_t place                       # where a loop stopped

    def __cinit__(self, Py_ssize_t most_rows, size_t most_bytes, bint payloads=True, bint bodies=True, uint64_t since=0,
                  until=None):
        self.most_rows = most_rows
        self.most_bytes = most_bytes
        self.payloads = payloads or bodies
        self.bodies = bodies
        self.since = since
        self.until = 0xFFFFFFFFFFFFFFFF if until is None else until
        self.table_size = 64
        while self.table_size < 2 * most_rows:
            self.table_size *= 2
        self.table = <uint32_t *>calloc(self.table_size, sizeof(uint32_t))
        if self.table == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.table)
        free(self.seq.data)
        free(self.published.data)
        free(self.expiry.data)
        free(self.size.data)
        free(self.source.data)
        free(self.offset.data)
        free(self.head.data)
        free(self.body_end.data)
        free(self.body.data)
        free(self.heads.data)
        free(self.head_end.data)

    @property
    def body_bytes(self):
        return self.body.size

    # -- one row -----------------------------------------------------------------------------------------------------

    cdef int widen(self) noexcept nogil:
        """Room for one more row in the columns of fixed width; NO_MEMORY where there is none."""
        cdef Py_ssize_t more
        if self.rows < self.fixed_room:
            return DONE
        more = min(max(self.rows, 256), self.most_rows)
        if (_grow(&self.seq, more * 8) < 0 or _grow(&self.published, more * 8) < 0 or _grow(&self.expiry, more * 8) < 0
                or _grow(&self.offset, more * 8) < 0 or _grow(&self.size, more * 4) < 0
                or _grow(&self.source, more * 4) < 0 or _grow(&self.head, more * 4) < 0
                or _grow(&self.body_end, (more + 1) * 4) < 0):
            return NO_MEMORY
        self.fixed_room = self.rows + more
        return DONE

    cdef int put(self, uint64_t seq, uint64_t published, uint64_t expiry, uint32_t size, uint32_t head,
                 int32_t source, int64_t offset) noexcept nogil:
        """A row without its body."""
        cdef int why = self.widen()
        cdef uint32_t end
        if why != DONE:
            return why
        memcpy(self.seq.data + self.seq.size, &seq, 8)
        memcpy(self.published.data + self.published.size, &published, 8)
        memcpy(self.expiry.data + self.expiry.size, &expiry, 8)
        memcpy(self.offset.data + self.offset.size, &offset, 8)
        memcpy(self.size.data + self.size.size, &size, 4)
        memcpy(self.source.data + self.source.size, &source, 4)
        memcpy(self.head.data + self.head.size, &head, 4)
        if self.body_end.size == 0:
            memset(self.body_end.data, 0, 4)
            self.body_end.size = 4
        end = <uint32_t>self.body.size
        memcpy(self.body_end.data + self.body_end.size, &end, 4)
        self.seq.size += 8
        self.published.size += 8
        self.expiry.size += 8
        self.offset.size += 8
        self.size.size += 4
        self.source.size += 4
        self.head.size += 4
        self.body_end.size += 4
        self.rows += 1
        if expiry:
            self.has_expiry = True
        return DONE

    cdef int number_of(self, const unsigned char *head, uint32_t size, uint32_t *number) noexcept nogil:
        """The number of a head in this batch."""
        cdef uint32_t start, end
        cdef Py_ssize_t at = warren_crc(0, head, size) & (self.table_size - 1)
        while self.table[at]:
            number[0] = self.table[at] - 1
            start = 0
            if number[0]:
                memcpy(&start, self.head_end.data + 4 * (number[0] - 1), 4)
            memcpy(&end, self.head_end.data + 4 * number[0], 4)
            if end - start == size and memcmp(self.heads.data + start, head, size) == 0:
                return DONE
            at = (at + 1) & (self.table_size - 1)
        if _grow(&self.heads, size) < 0 or _grow(&self.head_end, 4) < 0:
            return NO_MEMORY
        memcpy(self.heads.data + self.heads.size, head, size)
        self.heads.size += size
        end = <uint32_t>self.heads.size
        memcpy(self.head_end.data + self.head_end.size, &end, 4)
        self.head_end.size += 4
        number[0] = <uint32_t>self.head_count
        self.head_count += 1
        self.table[at] = <uint32_t>self.head_count
        return DONE

    cdef int take(self, uint64_t seq, uint64_t published, uint64_t expiry, const unsigned char *payload, uint32_t size,
                  int32_t source, int64_t offset) noexcept nogil:
        """A row with its payload, of which the checksum is true."""
        cdef uint32_t head_size
        if size < 4:
            return BAD
        memcpy(&head_size, payload, 4)
        if head_size > size - 4:
            return BAD
        return self.take_parts(seq, published, expiry, payload + 4, head_size, payload + 4 + head_size,
                               size - 4 - head_size, source, offset)

    cdef int take_parts(self, uint64_t seq, uint64_t published, uint64_t expiry, const unsigned char *head,
                        uint32_t head_size, const unsigned char *body, uint32_t size, int32_t source,
                        int64_t offset) noexcept nogil:
        cdef uint32_t number = 0
        cdef int why
        if self.rows >= self.most_rows or (self.rows and self.bodies and self.body.size + size > self.most_bytes):
            return FULL
        if self.rows and self.heads.size > self.most_bytes:
            return FULL
        why = self.number_of(head, head_size, &number)
        if why != DONE:
            return why
        if self.bodies:
            if _grow(&self.body, size) < 0:
                return NO_MEMORY
            memcpy(self.body.data + self.body.size, body, size)
            self.body.size += size
        return self.put(seq, published, expiry, size, number, source, offset)

    # -- segments ----------------------------------------------------------------------------------------------------

    def add_segment(self, const unsigned char[::1] slots not None, const unsigned char[::1] bodies, uint64_t first_seq,
                    Py_ssize_t from_slot, uint64_t sid, uint32_t boot, const unsigned char[::1] wanted not None,
                    bint expected, int32_t source, fetch, list damaged not None):
        """The wanted slots of a segment, from `from_slot` on: `slots` are its slots, `bodies` its .qs, `wanted` has a bit a
        slot. `fetch` is called with a msg_id and returns (payload, source, offset), or None. With `expected` every wanted
        slot has to be there; else those that were never written, and transient ones of another boot, are passed over.

        What does not check out goes to `damaged` as (slot, offset in .qs), with offset -1 for the slot itself and -2 for
        one whose payload the message store does not have. Returns the slot to go on with, or -1: the segment is done."""
        cdef Py_ssize_t n = slots.shape[0] // SLOT
        cdef Py_ssize_t have = 0 if bodies is None else bodies.shape[0]
        cdef const unsigned char *p = &slots[0] if slots.shape[0] else NULL
        cdef const unsigned char *q = &bodies[0] if have else NULL
        cdef const unsigned char *bits = &wanted[0] if wanted.shape[0] else NULL
        cdef uint64_t place, expiry, published
        cdef int why
        n = min(n, wanted.shape[0] * 8)
        self.place = from_slot
        while True:
            with nogil:
                why = self.slots(p, n, q, have, first_seq, sid, boot, bits, expected, source)
            if why == DONE:
                if expected:
                    _beyond(bits, wanted.shape[0] * 8, max(n, from_slot), damaged)
                return -1
            if why == FULL:
                return self.place
            if why == NO_MEMORY:
                raise MemoryError()
            if why == STORED:
                memcpy(&expiry, p + self.place * SLOT + 40, 8)
                memcpy(&published, p + self.place * SLOT + 48, 8)
                why = self.fetched(fetch, PyBytes_FromStringAndSize(<char *>p + self.place * SLOT + 16, 16),
                                   first_seq + self.place, published, expiry)
                if why == FULL:
                    return self.place
                if why == BAD:
                    damaged.append((self.place, -2))
            else:
                memcpy(&place, p + self.place * SLOT + 16, 8)
                damaged.append((self.place, -1 if not _sound_slot(p + self.place * SLOT, sid, first_seq + self.place)
                                else <int64_t>place))
            self.place += 1

    cdef int slots(self, const unsigned char *p, Py_ssize_t n, const unsigned char *bodies, Py_ssize_t have,
                   uint64_t first_seq, uint64_t sid, uint32_t boot, const unsigned char *wanted, bint expected,
                   int32_t source) noexcept nogil:
        """The loop of `add_segment`; `place` is the slot where it stopped."""
        cdef const unsigned char *slot
        cdef const unsigned char *body
        cdef uint64_t seq, expiry, published, offset
        cdef uint32_t slot_boot, size, found_size, crc
        cdef int why
        while self.place < n:
            if not wanted[self.place >> 3] & (1 << (self.place & 7)):
                self.place += 8 if not self.place & 7 and not wanted[self.place >> 3] else 1
                continue
            slot = p + self.place * SLOT
            seq = first_seq + self.place
            if not _sound_slot(slot, sid, seq):
                if not expected and _blank(slot):
                    self.place += 1
                    continue
                return BAD
            memcpy(&slot_boot, slot + 12, 4)
            memcpy(&published, slot + 48, 8)
            if not slot[8] & PERSISTENT and slot_boot != boot:
                if expected:
                    return BAD
                self.place += 1
                continue
            if published < self.since or published >= self.until:
                self.place += 1
                continue
            memcpy(&expiry, slot + 40, 8)
            if not self.payloads:
                if self.rows >= self.most_rows:
                    return FULL
                memcpy(&size, slot + 32, 4)
                why = self.put(seq, published, expiry, size, 0, source, SLOT + self.place * SLOT)
            elif slot[8] & IN_STORE:
                return STORED
            else:
                memcpy(&offset, slot + 16, 8)
                memcpy(&size, slot + 32, 4)
                if offset > <uint64_t>have or have - offset < BODY_PREFIX + <uint64_t>size:
                    return BAD
                body = bodies + offset
                memcpy(&found_size, body, 4)
                memcpy(&crc, body + 4, 4)
                if (found_size != size or memcmp(body + 8, &seq, 8) != 0
                        or warren_crc(warren_crc(warren_crc(0, &sid, 8), &seq, 8), body + BODY_PREFIX, size) != crc):
                    return BAD
                why = self.take(seq, published, expiry, body + BODY_PREFIX, size, source, <int64_t>offset)
            if why != DONE:
                return why
            self.place += 1
        return DONE

    cdef int fetched(self, fetch, bytes msg_id, uint64_t seq, uint64_t published, uint64_t expiry) except -1:
        """A row whose payload comes from the message store."""
        cdef bytes payload
        cdef int why
        if self.rows >= self.most_rows:
            return FULL
        found = fetch(msg_id)
        if found is None:
            return BAD
        payload, source, offset = found
        why = self.take(seq, published, expiry, <const unsigned char *>PyBytes_AS_STRING(payload),
                        <uint32_t>PyBytes_GET_SIZE(payload), source, offset)
        if why == NO_MEMORY:
            raise MemoryError()
        return why

    # -- journal files -----------------------------------------------------------------------------------------------

    def add_rows(self, bytes rows not None, Py_ssize_t from_row, const unsigned char[::1] data not None, uint32_t file,
                 uint64_t sid, bytes wanted not None, int32_t source, fetch, list damaged not None):
        """The publish records of packed overlay rows that lie in journal file `file`, whose bytes are `data`, and whose seq_id
        is in `wanted` (packed pairs). What does not check out goes to `damaged` as (seq_id, offset, its payload is not in
        the message store). Returns the row to go on with, or -1."""
        cdef Py_ssize_t n = PyBytes_GET_SIZE(rows) // <Py_ssize_t>sizeof(Row), have = data.shape[0]
        cdef Row *row = <Row *>PyBytes_AS_STRING(rows)
        cdef const unsigned char *p = &data[0] if have else NULL
        cdef const uint64_t *pairs = <const uint64_t *>PyBytes_AS_STRING(wanted)
        cdef Py_ssize_t pair_count = PyBytes_GET_SIZE(wanted) // 16
        cdef const unsigned char *content
        cdef uint64_t expiry, published
        cdef uint32_t length
        cdef int why
        self.place = from_row
        while True:
            with nogil:
                why = self.records(row, n, p, have, file, sid, pairs, pair_count, source)
            if why == DONE:
                return -1
            if why == FULL:
                return self.place
            if why == NO_MEMORY:
                raise MemoryError()
            if why == STORED:
                content = p + row[self.place].offset + RECORD_PREFIX
                length = row[self.place].size - RECORD_PREFIX
                memcpy(&published, content + 8, 8)
                memcpy(&expiry, content + 16, 8)
                why = self.fetched(fetch, PyBytes_FromStringAndSize(<char *>_payload(content, length), 16), row[self.place].seq,
                                   published, expiry)
                if why == FULL:
                    return self.place
                if why == BAD:
                    damaged.append((row[self.place].seq, row[self.place].offset, True))
            else:
                damaged.append((row[self.place].seq, row[self.place].offset, False))
            self.place += 1

    cdef int records(self, const Row *row, Py_ssize_t n, const unsigned char *data, Py_ssize_t have, uint32_t file,
                     uint64_t sid, const uint64_t *pairs, Py_ssize_t pair_count, int32_t source) noexcept nogil:
        """The loop of `add_rows`; `place` is the row where it stopped."""
        cdef const unsigned char *p
        cdef const unsigned char *payload
        cdef uint64_t expiry, published, room
        cdef uint32_t length, crc, found, size
        cdef int why
        while self.place < n:
            if row[self.place].file != file or not _within(pairs, pair_count, row[self.place].seq):
                self.place += 1
                continue
            room = row[self.place].size
            if row[self.place].offset + room > <uint64_t>have or room < RECORD_PREFIX + PUBLISH_FIXED + TARGET:
                return BAD
            p = data + row[self.place].offset
            memcpy(&length, p, 4)
            memcpy(&crc, p + 4, 4)
            if length + <uint64_t>RECORD_PREFIX != room or p[RECORD_PREFIX] != PUBLISH:
                return BAD
            found = warren_crc(0, p + RECORD_PREFIX, length)
            if found != crc and ~found != crc:      # inverted: it is part of a group
                return BAD
            p += RECORD_PREFIX
            if not _is_target(p, length, sid, row[self.place].seq):
                return BAD      # a message of another queue: whoever planned this had no business with it
            memcpy(&published, p + 8, 8)
            memcpy(&expiry, p + 16, 8)
            if published < self.since or published >= self.until:
                self.place += 1
                continue
            memcpy(&size, p + 4, 4)
            payload = _payload(p, length)
            if payload == NULL or payload - p + <uint64_t>size > length or (p[1] & PAYLOAD_IN_STORE and size < 20):
                return BAD
            if not self.payloads:
                if self.rows >= self.most_rows:
                    return FULL
                if p[1] & PAYLOAD_IN_STORE:
                    memcpy(&size, payload + 16, 4)
                why = self.put(row[self.place].seq, published, expiry, size, 0, source, row[self.place].offset)
            else:
                if p[1] & PAYLOAD_IN_STORE:
                    return STORED
                why = self.take(row[self.place].seq, published, expiry, payload, size, source, row[self.place].offset)
            if why != DONE:
                return why
            self.place += 1
        return DONE

    # -- from elsewhere ----------------------------------------------------------------------------------------------

    def add_message(self, uint64_t seq, uint64_t published, uint64_t expiry, bytes head not None, bytes body not None,
                    int32_t source, int64_t offset):
        """A message that Python has at hand. False: the batch is full."""
        cdef int why
        if published < self.since or published >= self.until:
            return True
        if not self.payloads:
            why = FULL if self.rows >= self.most_rows else self.put(
                seq, published, expiry, <uint32_t>(4 + PyBytes_GET_SIZE(head) + PyBytes_GET_SIZE(body)), 0, source, offset)
        else:
            why = self.take_parts(seq, published, expiry, <const unsigned char *>PyBytes_AS_STRING(head),
                                  <uint32_t>PyBytes_GET_SIZE(head), <const unsigned char *>PyBytes_AS_STRING(body),
                                  <uint32_t>PyBytes_GET_SIZE(body), source, offset)
        if why == NO_MEMORY:
            raise MemoryError()
        return why != FULL

    def finish(self):
        """The columns by name; the builder is empty then. `heads` are the distinct heads, which the column `head` numbers, one
        behind the other, and `head_end` says where each of them ends."""
        if self.body_end.size == 0 and self.widen() == DONE:
            memset(self.body_end.data, 0, 4)
            self.body_end.size = 4
        columns = {
            "seq": _memory(&self.seq),
            "published": _memory(&self.published),
            "expiry": _memory(&self.expiry),
            "size": _memory(&self.size),
            "source": _memory(&self.source),
            "offset": _memory(&self.offset),
            "head": _memory(&self.head),
            "body_end": _memory(&self.body_end),
            "body": _memory(&self.body),
            "heads": _memory(&self.heads),
            "head_end": _memory(&self.head_end),
        }
        self.rows = self.fixed_room = 0
        self.has_expiry = False
        if self.head_count:
            memset(self.table, 0, self.table_size * sizeof(uint32_t))
        self.head_count = 0
        return columns


cdef bint _sound_slot(const unsigned char *p, uint64_t sid, uint64_t seq) noexcept nogil:
    cdef uint32_t crc
    cdef uint64_t found
    memcpy(&found, p, 8)
    memcpy(&crc, p + 60, 4)
    return found == seq and p[8] & PRESENT and warren_crc(warren_crc(0, &sid, 8), p, 60) == crc


cdef inline const unsigned char *_payload(const unsigned char *p, uint64_t length) noexcept nogil:
    """Where the payload of a publish record, or its msg_id, begins; the type byte is at `p`. NULL: behind its end."""
    cdef uint16_t targets
    cdef uint64_t start
    memcpy(&targets, p + 2, 2)
    start = PUBLISH_FIXED + <uint64_t>targets * TARGET
    if p[1] & HAS_PRODUCER:
        start += 9 + p[start + 8] if start + 9 <= length else length
    return p + start if start <= length else NULL


cdef int _beyond(const unsigned char *bits, Py_ssize_t n, Py_ssize_t at, list damaged) except -1:
    """Slots that are expected, but the file ends before them."""
    while at < n:
        if bits[at >> 3] & (1 << (at & 7)):
            damaged.append((at, -1))
        at += 1
    return 0


def in_ranges(const unsigned char[::1] seqs not None, bytes pairs not None):
    """A bit for each seq_id (packed, u64): is it in one of the ranges (packed first, count; sorted)? As Arrow has booleans."""
    cdef Py_ssize_t n = seqs.shape[0] // 8, i
    cdef const uint64_t *seq = <const uint64_t *>&seqs[0] if n else NULL
    cdef const uint64_t *ranges = <const uint64_t *>PyBytes_AS_STRING(pairs)
    cdef Py_ssize_t count = PyBytes_GET_SIZE(pairs) // 16
    cdef bytes out = PyBytes_FromStringAndSize(NULL, (n + 7) // 8)
    cdef unsigned char *bits = <unsigned char *>PyBytes_AS_STRING(out)
    with nogil:
        memset(bits, 0, (n + 7) // 8)
        for i in range(n):
            if _within(ranges, count, seq[i]):
                bits[i >> 3] |= 1 << (i & 7)
    return out


def numbers_at(const unsigned char[::1] seqs not None, bytes table not None):
    """A number for each seq_id (packed, u64): that of `table` (packed seq_id, number; sorted), else 0. As packed i32."""
    cdef Py_ssize_t n = seqs.shape[0] // 8, i, low, high, middle
    cdef const uint64_t *seq = <const uint64_t *>&seqs[0] if n else NULL
    cdef const uint64_t *rows = <const uint64_t *>PyBytes_AS_STRING(table)
    cdef Py_ssize_t count = PyBytes_GET_SIZE(table) // 16
    cdef bytes out = PyBytes_FromStringAndSize(NULL, n * 4)
    cdef int32_t *numbers = <int32_t *>PyBytes_AS_STRING(out)
    with nogil:
        for i in range(n):
            low = 0
            high = count
            while low < high:
                middle = (low + high) >> 1
                if rows[2 * middle] < seq[i]:
                    low = middle + 1
                else:
                    high = middle
            numbers[i] = <int32_t>rows[2 * low + 1] if low < count and rows[2 * low] == seq[i] else 0
    return out
