# cython: language_level=3
"""The bytes of the journal: records built straight into the buffer of the next commit, and read back.

    file   = file header, block*
    block  = "WBLK" u32 records, u64 lsn, u64 length of the records, u32 unused, u32 CRC of the 28 bytes before; record*
    record = u32 length, u32 CRC of what follows; u8 type, ...
             inside of a group the CRC is inverted

`docs/format.md` has the grammar of every type. Little-endian throughout.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy

from warren.kernel.entry cimport Entry, IN_STORE, PERSISTENT
from warren.kernel.overlay cimport LIVE, Overlay, Row
from warren.kernel.ranges cimport RangeSet
from warren.kernel.records cimport publish_is_whole

cdef extern from "crc32c.h" nogil:
    void warren_crc_init()
    uint32_t warren_crc(uint32_t crc, const void *data, size_t size)

warren_crc_init()

cdef enum:
    BLOCK_HEADER = 32
    PREFIX = 8            # length and CRC of a record
    PUBLISH_FIXED = 24    # type .. expiry of a publish record
    TARGET = 16           # sid and seq_id
    LAST_TYPE = 12
    HAS_PRODUCER = 1
    PAYLOAD_IN_STORE = 2
    STRIDE = 1024         # bytes between two sums that _Sums keeps
    POWERS = 36           # x^(2^k) mod P for k below this: enough for 2^32 bytes
    MOST_LIES = 64        # times the file

BLOCK_HEADER_BYTES = BLOCK_HEADER
RECORD_PREFIX_BYTES = PREFIX
PUBLISH_FIXED_BYTES = PUBLISH_FIXED
MOST_PRODUCER_BYTES = 255  # a record counts them in 8 bits
MOST_TARGETS = 4000       # of one publish record, which counts them in 16 bits

cpdef enum:
    PUBLISH = 1
    ACK = 2
    PURGE = 3
    REQUEUE = 4
    RESERVE = 5
    GROUP = 6
    CHECKOUT = 7
    SETTLE = 8
    LEASE = 9
    STAGE = 10
    DELAY = 11
    DEDUP = 12


cdef class RecordBuffer:
    """The records of the next commit. Requires: one thread at a time; `reset` after each `finish`."""

    cdef unsigned char *data
    cdef Py_ssize_t size
    cdef Py_ssize_t room
    cdef Py_ssize_t group          # where the open group's record begins; -1: none
    cdef readonly uint32_t file    # journal file that the block will go to
    cdef readonly uint64_t base    # offset of the block in it
    cdef readonly uint32_t count
    cdef readonly uint64_t lsn

    def __cinit__(self):
        self.data = NULL
        self.size = BLOCK_HEADER
        self.room = 0
        self.group = -1
        self.need(65536)

    def __dealloc__(self):
        free(self.data)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.size, 1, flags)

    cdef int need(self, Py_ssize_t more) except -1:
        cdef unsigned char *data
        if self.size + more > self.room:
            self.room = self.size + more + (self.room >> 1)
            data = <unsigned char *>realloc(self.data, self.room)
            if data == NULL:
                raise MemoryError()
            self.data = data
        return 0

    def reset(self, uint32_t file, uint64_t base):
        """Empty; the next block begins at `base` of journal file `file`."""
        cdef unsigned char *data
        self.size = BLOCK_HEADER
        self.count = 0
        self.group = -1
        self.file = file
        self.base = base
        if self.room > 4194304:
            data = <unsigned char *>realloc(self.data, 65536)
            if data != NULL:
                self.data = data
                self.room = 65536

    @property
    def empty(self):
        return self.count == 0

    def finish(self, uint64_t lsn):
        """Write the block's header; the buffer is then the block."""
        cdef uint32_t crc
        cdef uint64_t length = self.size - BLOCK_HEADER
        self.lsn = lsn
        memcpy(self.data, b"WBLK", 4)
        memcpy(self.data + 4, &self.count, 4)
        memcpy(self.data + 8, &lsn, 8)
        memcpy(self.data + 16, &length, 8)
        memcpy(self.data + 24, b"\0\0\0\0", 4)
        crc = warren_crc(0, self.data, 28)
        memcpy(self.data + 28, &crc, 4)

    def peek(self, uint64_t offset, Py_ssize_t size):
        """Bytes at a file offset that lies inside this block."""
        cdef Py_ssize_t at = offset - self.base
        if offset < self.base or at + size > self.size:
            raise ValueError("outside the block")
        return PyBytes_FromStringAndSize(<char *>self.data + at, size)

    cdef int seal(self, Py_ssize_t at) except -1:
        """Fill in length and CRC of the record that begins at `at` and ends at the end."""
        cdef uint32_t length = <uint32_t>(self.size - at - PREFIX)
        cdef uint32_t crc = warren_crc(0, self.data + at + PREFIX, length)
        if self.group < 0:
            self.count += 1
        else:       # so that a search behind damage takes no member of a group for a record of its own
            crc = ~crc
        memcpy(self.data + at, &length, 4)
        memcpy(self.data + at + 4, &crc, 4)
        return 0

    cdef Py_ssize_t publish(self, Entry entry, uint64_t *targets, uint16_t count, uint64_t publishing_id,
                            bytes producer) except -1:
        """One publish record for `count` pairs of sid and seq_id; where it begins."""
        cdef Py_ssize_t at = self.size
        cdef unsigned char *p
        cdef uint8_t flags = 0
        cdef uint32_t head_size, body_size, payload
        cdef uint8_t name_size
        if entry.flags & IN_STORE:
            flags |= PAYLOAD_IN_STORE
            payload = 24
        else:
            payload = entry.size
        if producer is not None:
            if PyBytes_GET_SIZE(producer) > MOST_PRODUCER_BYTES:
                raise ValueError(f"a producer's name of {PyBytes_GET_SIZE(producer)} bytes; at most {MOST_PRODUCER_BYTES} fit its record")
            flags |= HAS_PRODUCER
        self.need(PREFIX + PUBLISH_FIXED + count * TARGET + payload + 272)
        p = self.data + at + PREFIX
        p[0] = PUBLISH
        p[1] = flags
        memcpy(p + 2, &count, 2)
        memcpy(p + 4, &payload, 4)
        memcpy(p + 8, &entry.published_at, 8)
        memcpy(p + 16, &entry.expiry, 8)
        memcpy(p + 24, targets, count * TARGET)
        p += PUBLISH_FIXED + count * TARGET
        if producer is not None:
            name_size = <uint8_t>PyBytes_GET_SIZE(producer)
            memcpy(p, &publishing_id, 8)
            p[8] = name_size
            memcpy(p + 9, PyBytes_AS_STRING(producer), name_size)
            p += 9 + name_size
        if flags & PAYLOAD_IN_STORE:
            memcpy(p, PyBytes_AS_STRING(<bytes>entry.msg_id), 16)
            memcpy(p + 16, &entry.size, 4)
            memcpy(p + 20, &entry.body_size, 4)
        else:
            head_size = <uint32_t>PyBytes_GET_SIZE(<bytes>entry.head)
            body_size = <uint32_t>PyBytes_GET_SIZE(<bytes>entry.body)
            memcpy(p, &head_size, 4)
            memcpy(p + 4, PyBytes_AS_STRING(<bytes>entry.head), head_size)
            memcpy(p + 4 + head_size, PyBytes_AS_STRING(<bytes>entry.body), body_size)
        self.size = (p - self.data) + payload
        self.seal(at)
        return at

    def append_publishes(self, uint64_t sid, list entries not None, Overlay overlay not None, uint8_t state):
        """A publish record for each entry, to one queue; its place goes to `overlay`."""
        cdef Entry entry
        cdef uint64_t target[2]
        cdef Py_ssize_t at
        target[0] = sid
        for item in entries:
            entry = <Entry>item
            target[1] = entry.seq
            at = self.publish(entry, target, 1, 0, None)
            overlay.put(entry.seq, self.file, <uint32_t>(self.base + at), <uint32_t>(self.size - at),
                        <uint32_t>(self.size - at) - entry.body_size, entry.flags & IN_STORE, state)

    def append_fanout(self, Entry entry not None, list targets not None, uint8_t state, uint64_t publishing_id=0,
                      bytes producer=None):
        """One publish record for all `targets`: (sid, seq_id, overlay)."""
        cdef Py_ssize_t n = len(targets), at, i
        if n > MOST_TARGETS:
            raise ValueError(f"{n} targets in one record; there can be {MOST_TARGETS}")
        cdef bytearray packed = bytearray(n * TARGET)
        cdef uint64_t *pairs = <uint64_t *><unsigned char *>packed
        for i in range(n):
            sid, seq, _ = targets[i]
            pairs[2 * i] = sid
            pairs[2 * i + 1] = seq
        at = self.publish(entry, pairs, <uint16_t>n, publishing_id, producer)
        for i in range(n):
            (<Overlay>targets[i][2]).put(pairs[2 * i + 1], self.file, <uint32_t>(self.base + at),
                                         <uint32_t>(self.size - at), <uint32_t>(self.size - at) - entry.body_size,
                                         entry.flags & IN_STORE, state)

    def append_ranges(self, uint8_t kind, uint64_t sid, list pairs not None):
        """An ACK or PURGE of a flat list first, count, ..."""
        cdef Py_ssize_t at = self.size, i
        cdef uint32_t n = <uint32_t>(len(pairs) // 2)
        cdef uint64_t value
        cdef unsigned char *p
        self.need(PREFIX + 16 + n * 16)
        p = self.data + at + PREFIX
        p[0] = kind
        p[1] = p[2] = p[3] = 0
        memcpy(p + 4, &n, 4)
        memcpy(p + 8, &sid, 8)
        p += 16
        for i in range(2 * n):
            value = pairs[i]
            memcpy(p, &value, 8)
            p += 8
        self.size = p - self.data
        self.seal(at)

    def append_requeue(self, uint64_t sid, list counts not None):
        """Delivery counts of requeued messages: (seq_id, count)."""
        cdef Py_ssize_t at = self.size
        cdef uint32_t n = <uint32_t>len(counts), times
        cdef uint64_t seq
        cdef unsigned char *p
        self.need(PREFIX + 16 + n * 12)
        p = self.data + at + PREFIX
        p[0] = REQUEUE
        p[1] = p[2] = p[3] = 0
        memcpy(p + 4, &n, 4)
        memcpy(p + 8, &sid, 8)
        p += 16
        for pair in counts:
            seq = pair[0]
            times = pair[1]
            memcpy(p, &seq, 8)
            memcpy(p + 8, &times, 4)
            p += 12
        self.size = p - self.data
        self.seal(at)

    def append_reserve(self, uint64_t uid, uint64_t upto):
        """seq_ids below `upto` of queue `uid` may be handed out once this is synced."""
        cdef Py_ssize_t at = self.size
        cdef unsigned char *p
        self.need(PREFIX + 24)
        p = self.data + at + PREFIX
        p[0] = RESERVE
        p[1] = p[2] = p[3] = p[4] = p[5] = p[6] = p[7] = 0
        memcpy(p + 8, &uid, 8)
        memcpy(p + 16, &upto, 8)
        self.size = at + PREFIX + 24
        self.seal(at)

    def append_other(self, uint8_t kind, bytes body not None):
        """A record of a type whose body Python packs."""
        cdef Py_ssize_t at = self.size, n = PyBytes_GET_SIZE(body)
        self.need(PREFIX + 1 + n)
        self.data[at + PREFIX] = kind
        memcpy(self.data + at + PREFIX + 1, PyBytes_AS_STRING(body), n)
        self.size = at + PREFIX + 1 + n
        self.seal(at)

    def carry(self, uint64_t sid, bytes rows not None, bytes data not None, uint64_t base, Overlay overlay not None,
              list damaged not None):
        """Repeat the publish records of packed overlay rows, each for this one target, in the newest file; the seq_ids.
        The records lie in `data`, which begins at offset `base` of their file. Rows that are not LIVE any more are left
        out; a record that does not check out goes to `damaged` as (seq, offset, size)."""
        cdef Row *row = <Row *>PyBytes_AS_STRING(rows)
        cdef Row *now
        cdef Py_ssize_t i, n = PyBytes_GET_SIZE(rows) // <Py_ssize_t>sizeof(Row), have = PyBytes_GET_SIZE(data), at
        cdef unsigned char *record
        cdef uint32_t length
        cdef list carried = []
        for i in range(n):
            at = overlay.find(row[i].seq)
            now = &overlay.rows[at]
            if at == overlay.n or now.seq != row[i].seq or now.state != LIVE or now.file != row[i].file:
                continue
            if row[i].offset >= base and row[i].offset - base + row[i].size <= <uint64_t>have:
                record = <unsigned char *>PyBytes_AS_STRING(data) + (row[i].offset - base)
                memcpy(&length, record, 4)
                if length + PREFIX == row[i].size and _sound_publish(record, row[i].size):
                    self.append_carry(sid, row[i].seq, record, overlay)
                    carried.append(row[i].seq)
                    continue
            damaged.append((row[i].seq, row[i].offset, row[i].size))
        return carried

    cdef int append_carry(self, uint64_t sid, uint64_t seq, unsigned char *source, Overlay overlay) except -1:
        """Repeat a checked publish record for this one target in the newest file."""
        cdef Py_ssize_t at = self.size
        cdef unsigned char *payload
        cdef uint32_t payload_size, size
        cdef uint16_t one = 1
        cdef unsigned char *p
        payload = _payload(source + PREFIX, &payload_size)
        self.need(PREFIX + PUBLISH_FIXED + TARGET + payload_size)
        p = self.data + at + PREFIX
        memcpy(p, source + PREFIX, PUBLISH_FIXED)
        p[1] = p[1] & ~HAS_PRODUCER
        memcpy(p + 2, &one, 2)
        memcpy(p + 24, &sid, 8)
        memcpy(p + 32, &seq, 8)
        memcpy(p + 40, payload, payload_size)
        self.size = at + PREFIX + PUBLISH_FIXED + TARGET + payload_size
        self.seal(at)
        size = <uint32_t>(self.size - at)
        overlay.put(seq, self.file, <uint32_t>(self.base + at), size,
                    size - _body_size(source + PREFIX, payload, payload_size), 0, 1)

    def begin_group(self):
        """What is appended until `end_group` becomes one record under one CRC: all of it is replayed, or nothing."""
        if self.group >= 0:
            raise RuntimeError("a group is open")
        self.need(PREFIX + 4)
        self.group = self.size
        self.data[self.size + PREFIX] = GROUP
        self.data[self.size + PREFIX + 1] = self.data[self.size + PREFIX + 2] = self.data[self.size + PREFIX + 3] = 0
        self.size += PREFIX + 4

    def end_group(self):
        cdef Py_ssize_t at = self.group
        self.group = -1
        self.seal(at)


cdef inline unsigned char *_payload(unsigned char *p, uint32_t *size) noexcept nogil:
    """The payload of a publish record whose type byte is at `p`."""
    cdef uint16_t count
    memcpy(&count, p + 2, 2)
    memcpy(size, p + 4, 4)
    if p[1] & HAS_PRODUCER:
        p += 9 + p[PUBLISH_FIXED + count * TARGET + 8]
    return p + PUBLISH_FIXED + count * TARGET


cdef inline uint32_t _body_size(const unsigned char *p, const unsigned char *payload, uint32_t size) noexcept nogil:
    """Body bytes of a publish record whose type byte is at `p` and whose payload, of `size` bytes, at `payload`."""
    cdef uint32_t number
    if p[1] & PAYLOAD_IN_STORE:
        memcpy(&number, payload + 20, 4)
        return number
    memcpy(&number, payload, 4)
    return size - 4 - number


cdef class _Sums:
    """CRCs of any piece of a file, in a time that does not grow with the piece: a search behind damage meets lengths that
    mean nothing, and must neither sum over megabytes at each byte nor pass a large record over.

    A CRC is a remainder, so that of a piece is that of all up to its end, less that of all up to its start times
    x^(8 * length); the first two are at hand for every STRIDE bytes."""

    cdef const unsigned char *data      # from where the search began
    cdef Py_ssize_t start
    cdef uint32_t *sums
    cdef uint32_t powers[POWERS]
    cdef uint64_t lies, summed          # bytes of groups that had a true CRC and were not whole; bytes read to answer

    def __cinit__(self, bytes data not None, Py_ssize_t start):
        """Requires: `data` lives longer."""
        cdef Py_ssize_t i, n = (PyBytes_GET_SIZE(data) - start) // STRIDE
        self.data = <const unsigned char *>PyBytes_AS_STRING(data) + start
        self.start = start
        self.sums = <uint32_t *>realloc(NULL, (n + 1) * sizeof(uint32_t))
        if self.sums == NULL:
            raise MemoryError()
        self.sums[0] = 0
        for i in range(n):
            self.sums[i + 1] = warren_crc(self.sums[i], self.data + i * STRIDE, STRIDE)
        self.powers[0] = 0x40000000
        for i in range(1, POWERS):
            self.powers[i] = _times(self.powers[i - 1], self.powers[i - 1])

    def __dealloc__(self):
        free(self.sums)

    cdef uint32_t upto(self, Py_ssize_t at) noexcept:
        cdef Py_ssize_t i = at // STRIDE
        self.summed += at - i * STRIDE
        return warren_crc(self.sums[i], self.data + i * STRIDE, at - i * STRIDE)

    cdef uint32_t of(self, Py_ssize_t at, uint32_t length) noexcept:
        cdef uint32_t shift = 0x80000000, left = length
        cdef int k = 3
        at -= self.start
        if length <= 2 * STRIDE:
            self.summed += length
            return warren_crc(0, self.data + at, length)
        while left:
            if left & 1:
                shift = _times(self.powers[k], shift)
            left >>= 1
            k += 1
        return self.upto(at + length) ^ _times(shift, self.upto(at))


cdef uint32_t _times(uint32_t a, uint32_t b) noexcept nogil:
    """The product of two polynomials modulo that of CRC-32C; the highest bit is x^0."""
    cdef uint32_t product = 0, bit = 0x80000000
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ (<uint32_t>0x82F63B78 * (b & 1))
    return product


cdef bint _sound(const unsigned char *data, Py_ssize_t at, Py_ssize_t size, _Sums sums) noexcept:
    """Is there a whole record with a true CRC at `at`? With `sums`, in a search behind damage."""
    cdef const unsigned char *p = data + at
    cdef uint32_t length, crc
    if size - at < PREFIX + 2:
        return False
    memcpy(&length, p, 4)
    memcpy(&crc, p + 4, 4)
    p += PREFIX
    if length < 2 or length > size - at - PREFIX or p[0] == 0 or p[0] > LAST_TYPE:
        return False
    if sums is None:
        return warren_crc(0, p, length) == crc and _whole(p, length)
    if not _plausible(p, length) or sums.of(at + PREFIX, length) != crc:
        return False
    if p[0] != GROUP:
        return _whole(p, length)
    if sums.lies <= <uint64_t>size * MOST_LIES:         # to look through forged groups takes time
        if _whole(p, length):
            return True
        sums.lies += length
    return False


cdef bint _whole(const unsigned char *p, uint64_t length) noexcept nogil:
    """Does a record, whose type byte is at `p`, hold as much as it counts? See records.pxd."""
    cdef uint32_t n
    cdef uint64_t at
    if p[0] == PUBLISH:
        return publish_is_whole(p, length)
    if p[0] == RESERVE:
        return length >= 24
    if p[0] == ACK or p[0] == PURGE or p[0] == REQUEUE:
        if length < 16:
            return False
        memcpy(&n, p + 4, 4)
        return length >= 16 + <uint64_t>n * (12 if p[0] == REQUEUE else 16)
    if p[0] == GROUP:
        at = 4
        while at < length:
            if length - at < PREFIX + 2:
                return False
            memcpy(&n, p + at, 4)
            at += PREFIX
            if n < 2 or n > length - at or p[at] == GROUP or not _whole(p + at, n):
                return False
            at += n
    return True


cdef bint _sound_publish(const unsigned char *p, Py_ssize_t left) noexcept nogil:
    """Is there a whole publish record at `p`, be it in a group or not? For who knows its place."""
    cdef uint32_t length, crc, found
    if left < PREFIX + 2:
        return False
    memcpy(&length, p, 4)
    if length < 2 or length > left - PREFIX:
        return False
    memcpy(&crc, p + 4, 4)
    found = warren_crc(0, p + PREFIX, length)
    return (found == crc or ~found == crc) and p[PREFIX] == PUBLISH and publish_is_whole(p + PREFIX, length)


cdef bint _block(const unsigned char *p, Py_ssize_t left) noexcept nogil:
    """Is there a block header with a true CRC at `p`?"""
    cdef uint32_t crc
    if left < BLOCK_HEADER or memcmp(p, b"WBLK", 4) != 0:
        return False
    memcpy(&crc, p + 28, 4)
    return warren_crc(0, p, 28) == crc


def read_publishes(bytes rows not None, bytes data not None, uint64_t base, list entries not None, list damaged not None):
    """Entries, with their bodies, of packed overlay rows whose records lie in `data`, which begins at file offset
    `base`. A record that does not check out goes to `damaged` as (seq, offset, size)."""
    cdef Row *row = <Row *>PyBytes_AS_STRING(rows)
    cdef Py_ssize_t i, n = PyBytes_GET_SIZE(rows) // <Py_ssize_t>sizeof(Row), have = PyBytes_GET_SIZE(data)
    cdef unsigned char *start = <unsigned char *>PyBytes_AS_STRING(data)
    cdef unsigned char *p
    cdef unsigned char *payload
    cdef uint32_t payload_size, head_size, length
    cdef Entry entry
    cdef bytes last_head = b""
    for i in range(n):
        if row[i].offset < base or row[i].offset - base + row[i].size > <uint64_t>have:
            damaged.append((row[i].seq, row[i].offset, row[i].size))
            continue
        p = start + (row[i].offset - base)
        memcpy(&length, p, 4)
        if length + PREFIX != row[i].size or not _sound_publish(p, row[i].size):
            damaged.append((row[i].seq, row[i].offset, row[i].size))
            continue
        payload = _payload(p + PREFIX, &payload_size)
        entry = Entry.__new__(Entry)
        entry.seq = row[i].seq
        entry.flags = PERSISTENT
        memcpy(&entry.published_at, p + PREFIX + 8, 8)
        memcpy(&entry.expiry, p + PREFIX + 16, 8)
        if p[PREFIX + 1] & PAYLOAD_IN_STORE:
            entry.flags |= IN_STORE
            entry.msg_id = PyBytes_FromStringAndSize(<char *>payload, 16)
            memcpy(&entry.size, payload + 16, 4)
            memcpy(&entry.body_size, payload + 20, 4)
        else:
            memcpy(&head_size, payload, 4)
            entry.size = payload_size
            entry.body_size = payload_size - 4 - head_size
            if head_size == PyBytes_GET_SIZE(last_head) and memcmp(PyBytes_AS_STRING(last_head), payload + 4, head_size) == 0:
                entry.head = last_head
            else:
                last_head = PyBytes_FromStringAndSize(<char *>payload + 4, head_size)
                entry.head = last_head
            entry.body = PyBytes_FromStringAndSize(<char *>payload + 4 + head_size, entry.body_size)
        entries.append(entry)


def replay(bytes data not None, Py_ssize_t start, uint32_t file, dict overlays not None, dict acks not None,
           dict counts not None, dict reserved not None, list others not None, list damaged not None, list summed=None):
    """Apply a journal file from offset `start`.

    `overlays` holds an Overlay for each known sid; records of other sids are dropped. Acks go to the RangeSet of
    `acks` for the segments' part, and kill rows here. `counts` gets {sid: {seq: delivery count}}, `reserved`
    {uid: upto}, `others` (type, body) in order, also ("dedup", sid, producer, id). What cannot be read goes to
    `damaged` as (offset, length); reading goes on at the next block or record that checks out. `summed` gets the number
    of bytes that such a search read for its sums. Returns (last lsn, blocks, records, dropped records)."""
    cdef unsigned char *p = <unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t at = start, size = PyBytes_GET_SIZE(data), bad = -1, blocks = 0, records = 0, dropped = 0
    cdef uint64_t lsn = 0
    cdef uint32_t length
    cdef _Sums sums = None            # once there was damage
    while at < size:
        if _block(p + at, size - at):
            if bad >= 0:
                damaged.append((bad, at - bad))
                bad = -1
            memcpy(&lsn, p + at + 8, 8)
            blocks += 1
            at += BLOCK_HEADER
        elif _sound(p, at, size, sums):
            if bad >= 0:
                damaged.append((bad, at - bad))
                bad = -1
            memcpy(&length, p + at, 4)
            if not _apply(p, at, length, file, overlays, acks, counts, reserved, others):
                dropped += 1
            records += 1
            at += PREFIX + length
        else:
            if sums is None:
                sums = _Sums(data, at)
            bad = at if bad < 0 else bad
            at += 1
    if bad >= 0:
        while bad < size and p[size - 1] == 0:     # zeros at the end were never written
            size -= 1
        if bad < size:
            damaged.append((bad, size - bad))
    if summed is not None:
        summed.append(sums.summed if sums is not None else 0)
    return lsn, blocks, records, dropped


cdef bint _plausible(const unsigned char *p, uint32_t length) noexcept nogil:
    """Could a record of this length, as this module writes it, have its type byte at `p`? Looks at a few bytes only."""
    cdef uint32_t n
    cdef uint16_t count
    cdef uint64_t least
    if p[0] == PUBLISH:
        if length < PUBLISH_FIXED:
            return False
        memcpy(&count, p + 2, 2)
        memcpy(&n, p + 4, 4)
        least = PUBLISH_FIXED + <uint64_t>count * TARGET + n
        return least <= length and length <= least + 264
    if p[0] == RESERVE:
        return length == 24
    if p[0] == ACK or p[0] == PURGE or p[0] == REQUEUE:
        if length < 16:
            return False
        memcpy(&n, p + 4, 4)
        return length == 16 + <uint64_t>n * (12 if p[0] == REQUEUE else 16)
    if p[0] == GROUP:
        if length < 4 + PREFIX + 2:
            return length == 4
        memcpy(&n, p + 4, 4)
        return n <= length - 4 - PREFIX and p[4 + PREFIX] != GROUP and p[4 + PREFIX] <= LAST_TYPE
    return True


cdef bint _apply(unsigned char *data, Py_ssize_t at, uint32_t length, uint32_t file, dict overlays, dict acks,
                 dict counts, dict reserved, list others) except -1:
    """Apply one checked record; False when no queue knows it."""
    cdef unsigned char *p = data + at + PREFIX
    cdef uint8_t kind = p[0]
    cdef uint16_t targets
    cdef uint32_t n, inner, times, overhead
    cdef unsigned char *payload
    cdef uint64_t sid, seq, value
    cdef Py_ssize_t i, place
    cdef bint known = False
    if kind == PUBLISH:
        memcpy(&targets, p + 2, 2)
        payload = _payload(p, &n)
        overhead = length + PREFIX - _body_size(p, payload, n)
        for i in range(targets):
            memcpy(&sid, p + PUBLISH_FIXED + i * TARGET, 8)
            memcpy(&seq, p + PUBLISH_FIXED + i * TARGET + 8, 8)
            overlay = overlays.get(sid)
            if overlay is not None:
                known = True
                (<Overlay>overlay).put(seq, file, <uint32_t>at, length + PREFIX, overhead,
                                       IN_STORE if p[1] & PAYLOAD_IN_STORE else 0, 1)
                if p[1] & HAS_PRODUCER:
                    place = PUBLISH_FIXED + targets * TARGET
                    memcpy(&value, p + place, 8)
                    others.append((DEDUP, (sid, PyBytes_FromStringAndSize(<char *>p + place + 9, p[place + 8]), value)))
        return known
    if kind == ACK or kind == PURGE:
        memcpy(&n, p + 4, 4)
        memcpy(&sid, p + 8, 8)
        overlay = overlays.get(sid)
        if overlay is None:
            return False
        ranges = acks.get(sid)
        if ranges is None:
            ranges = acks[sid] = RangeSet()
        p += 16
        for i in range(n):
            memcpy(&seq, p, 8)
            memcpy(&value, p + 8, 8)
            p += 16
            (<Overlay>overlay).kill(seq, value)
            (<RangeSet>ranges).add(seq, value)
        return True
    if kind == REQUEUE:
        memcpy(&n, p + 4, 4)
        memcpy(&sid, p + 8, 8)
        if sid not in overlays:
            return False
        table = counts.setdefault(sid, {})
        p += 16
        for i in range(n):
            memcpy(&seq, p, 8)
            memcpy(&times, p + 8, 4)
            table[seq] = times
            p += 12
        return True
    if kind == RESERVE:
        memcpy(&sid, p + 8, 8)
        memcpy(&value, p + 16, 8)
        if reserved.get(sid, 0) < value:
            reserved[sid] = value
        return True
    if kind == GROUP:
        place = at + PREFIX + 4
        while place < at + PREFIX + <Py_ssize_t>length:
            memcpy(&inner, data + place, 4)
            _apply(data, place, inner, file, overlays, acks, counts, reserved, others)
            place += PREFIX + inner
        return True
    others.append((kind, PyBytes_FromStringAndSize(<char *>p + 1, length - 1)))
    return True
