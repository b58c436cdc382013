# cython: language_level=3
"""The heads of many messages become columns: where they were published to, and their AMQP properties.

    head = u8 length, exchange, u8 length, routing key, u16 flags (big-endian), the value of each property whose flag is set,
           and with the flag 0x0002 keys of BCC and u32 their size in bytes, which nobody is shown

`HeadColumns` walks over each head once and notes where its fields are. A column is made from these places when it is asked
for, as the buffers that Arrow wants: a bit a value that says whether it is there, offsets, bytes. A head that cannot be read
has no field at all: it was stored as it came.

Header tables become maps of text to text. Those of texts, integers and booleans are written here; for a batch with any other
kind of value (lists, tables, times, ...) the caller decodes the raw tables itself.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cdef enum:
    FIELDS = 16             # exchange, routing key, then the 14 properties in the order of their flags
    SHORT = 0
    OCTET = 1
    TABLE = 2
    TIME = 3
    NUMBER_BYTES = 24       # the longest integer as text

cdef uint64_t LAST_SECOND = 253402300799        # of the year 9999, where calendars end

EXCHANGE = 0
ROUTING_KEY = 1
PROPERTIES = ("content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id", "reply_to",
              "expiration", "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id")

cdef int[FIELDS] KINDS
KINDS[:] = [SHORT, SHORT, SHORT, SHORT, TABLE, OCTET, OCTET, SHORT, SHORT, SHORT, SHORT, TIME, SHORT, SHORT, SHORT, SHORT]

cdef struct Place:
    uint32_t start
    int32_t size            # -1: the field is not there


cdef inline uint32_t _u32(const unsigned char *p) noexcept nogil:
    return <uint32_t>p[0] << 24 | <uint32_t>p[1] << 16 | <uint32_t>p[2] << 8 | p[3]


cdef inline uint64_t _u64(const unsigned char *p) noexcept nogil:
    return <uint64_t>_u32(p) << 32 | _u32(p + 4)


cdef bint _split(const unsigned char *p, uint32_t start, uint32_t stop, Place *places) noexcept nogil:
    """Note where the fields of one head are; False for what is none."""
    cdef uint32_t at = start, size
    cdef uint16_t flags = 0
    cdef int field
    for field in range(FIELDS):
        if field == 2:
            if stop - at < 2:
                return False
            flags = <uint16_t>(p[at] << 8 | p[at + 1])
            at += 2
            if flags & 1:
                return False
            if flags & 2:
                if stop - at < 4:
                    return False
                size = _u32(p + stop - 4)
                if stop - at - 4 < size:
                    return False
                stop -= 4 + size
        if field >= 2 and not flags & (0x8000 >> (field - 2)):
            places[field].size = -1
            continue
        if KINDS[field] == SHORT:
            if stop - at < 1:
                return False
            size = p[at]
            at += 1
        elif KINDS[field] == OCTET:
            size = 1
        elif KINDS[field] == TIME:
            size = 8
        else:
            if stop - at < 4:
                return False
            size = _u32(p + at)
            at += 4
        if stop - at < size or size > 0x7FFFFFFF:
            return False
        places[field].start = at
        places[field].size = <int32_t>size
        at += size
    return at == stop


cdef class HeadColumns:
    """The fields of heads, whose bytes lie one behind the other in `data` and end where `ends` (packed u32) says."""

    cdef readonly Py_ssize_t count
    cdef const unsigned char[::1] data
    cdef const unsigned char *bytes
    cdef Place *places

    def __cinit__(self, const unsigned char[::1] data not None, const unsigned char[::1] ends not None):
        cdef Py_ssize_t i, field
        cdef uint32_t start = 0, stop
        self.count = ends.shape[0] // 4
        self.data = data
        self.bytes = &data[0] if data.shape[0] else NULL
        self.places = <Place *>malloc(max(self.count, 1) * FIELDS * sizeof(Place))
        if self.places == NULL:
            raise MemoryError()
        with nogil:
            for i in range(self.count):
                memcpy(&stop, &ends[0] + 4 * i, 4)
                if not _split(self.bytes, start, stop, self.places + i * FIELDS):
                    for field in range(FIELDS):
                        self.places[i * FIELDS + field].size = -1
                start = stop

    def __dealloc__(self):
        free(self.places)

    def raw(self, int field):
        """The bytes of a field of each head; None where it is not there."""
        cdef list out = []
        cdef Py_ssize_t i
        cdef Place place
        for i in range(self.count):
            place = self.places[i * FIELDS + field]
            out.append(None if place.size < 0 else PyBytes_FromStringAndSize(<char *>self.bytes + place.start, place.size))
        return out

    def text(self, int field):
        """(validity, offsets, bytes) of a text. None: some of it is not ASCII, and may not be UTF-8."""
        cdef Py_ssize_t i
        cdef Place place
        cdef uint64_t total = 0
        cdef int32_t end = 0
        cdef bytes valid = _zeros(self.count), offsets, out
        cdef unsigned char *bits = <unsigned char *>PyBytes_AS_STRING(valid)
        cdef unsigned char *target
        cdef unsigned char *ends
        cdef unsigned char high = 0
        for i in range(self.count):
            if self.places[i * FIELDS + field].size > 0:
                total += self.places[i * FIELDS + field].size
        offsets = PyBytes_FromStringAndSize(NULL, 4 * (self.count + 1))
        out = PyBytes_FromStringAndSize(NULL, total)
        target = <unsigned char *>PyBytes_AS_STRING(out)
        ends = <unsigned char *>PyBytes_AS_STRING(offsets)
        memset(ends, 0, 4)
        with nogil:
            for i in range(self.count):
                place = self.places[i * FIELDS + field]
                if place.size >= 0:
                    bits[i >> 3] |= 1 << (i & 7)
                    memcpy(target + end, self.bytes + place.start, place.size)
                    end += place.size
                memcpy(ends + 4 * (i + 1), &end, 4)
            for i in range(<Py_ssize_t>total):
                high |= target[i]
        return None if high & 0x80 else (valid, offsets, out)

    def octets(self, int field):
        """(validity, values as packed i32) of a property of one byte."""
        cdef Py_ssize_t i
        cdef Place place
        cdef bytes valid = _zeros(self.count)
        cdef bytes values = PyBytes_FromStringAndSize(NULL, 4 * self.count)
        cdef int32_t *out = <int32_t *>PyBytes_AS_STRING(values)
        for i in range(self.count):
            place = self.places[i * FIELDS + field]
            out[i] = 0
            if place.size >= 0:
                PyBytes_AS_STRING(valid)[i >> 3] |= 1 << (i & 7)
                out[i] = self.bytes[place.start]
        return valid, values

    def moments(self, int field):
        """(validity, microseconds since 1970 as packed i64) of a time. Many clients send milliseconds; as seconds they would
        be in years that no calendar has. What is neither is not there."""
        cdef Py_ssize_t i
        cdef Place place
        cdef uint64_t seconds
        cdef bytes valid = _zeros(self.count)
        cdef bytes values = PyBytes_FromStringAndSize(NULL, 8 * self.count)
        cdef int64_t *out = <int64_t *>PyBytes_AS_STRING(values)
        for i in range(self.count):
            place = self.places[i * FIELDS + field]
            out[i] = 0
            if place.size < 0:
                continue
            seconds = _u64(self.bytes + place.start)
            if seconds <= LAST_SECOND:
                out[i] = <int64_t>(seconds * 1000000)
            elif seconds // 1000 <= LAST_SECOND:
                out[i] = <int64_t>(seconds * 1000)
            else:
                continue
            PyBytes_AS_STRING(valid)[i >> 3] |= 1 << (i & 7)
        return valid, values

    def maps(self, int field):
        """Tables as (validity, offsets of maps, offsets of names, names, offsets of values, values). None: some table has a
        value that is no text, integer or boolean, or a text that is not ASCII."""
        cdef Py_ssize_t i, pairs = 0
        cdef Place place
        cdef uint64_t room = 0
        cdef bytes valid = _zeros(self.count), tables, name_ends, names, value_ends, values
        cdef int32_t at = 0
        cdef Py_ssize_t most = 0
        cdef _Writer writer
        for i in range(self.count):
            place = self.places[i * FIELDS + field]
            if place.size >= 0:
                room += place.size
        most = <Py_ssize_t>(room // 3)          # a pair has at least a length, a type and a byte
        tables = PyBytes_FromStringAndSize(NULL, 4 * (self.count + 1))
        name_ends = PyBytes_FromStringAndSize(NULL, 4 * (most + 1))
        value_ends = PyBytes_FromStringAndSize(NULL, 4 * (most + 1))
        names = PyBytes_FromStringAndSize(NULL, room)
        values = PyBytes_FromStringAndSize(NULL, room * 8 + NUMBER_BYTES)
        writer.name_ends = <int32_t *>PyBytes_AS_STRING(name_ends)
        writer.value_ends = <int32_t *>PyBytes_AS_STRING(value_ends)
        writer.names = <unsigned char *>PyBytes_AS_STRING(names)
        writer.values = <unsigned char *>PyBytes_AS_STRING(values)
        writer.name_end = writer.value_end = writer.pairs = 0
        writer.name_ends[0] = writer.value_ends[0] = 0
        memset(PyBytes_AS_STRING(tables), 0, 4)
        for i in range(self.count):
            place = self.places[i * FIELDS + field]
            if place.size >= 0:
                if not _write_table(self.bytes + place.start, <uint32_t>place.size, &writer):
                    return None
                PyBytes_AS_STRING(valid)[i >> 3] |= 1 << (i & 7)
            at = <int32_t>writer.pairs
            memcpy(PyBytes_AS_STRING(tables) + 4 * (i + 1), &at, 4)
        pairs = writer.pairs
        return (valid, tables, name_ends[:4 * (pairs + 1)], names[:writer.name_end], value_ends[:4 * (pairs + 1)],
                values[:writer.value_end])


cdef struct _Writer:
    int32_t *name_ends
    int32_t *value_ends
    unsigned char *names
    unsigned char *values
    int32_t name_end
    int32_t value_end
    Py_ssize_t pairs


cdef bint _ascii(const unsigned char *p, uint32_t size) noexcept nogil:
    cdef uint32_t i
    cdef unsigned char high = 0
    for i in range(size):
        high |= p[i]
    return not high & 0x80


cdef bint _write_table(const unsigned char *p, uint32_t size, _Writer *out) noexcept nogil:
    """Append the pairs of a table; False for one that has to be decoded elsewhere, or is none."""
    cdef uint32_t at = 0, length
    cdef const unsigned char *text = NULL
    cdef char[NUMBER_BYTES] number
    cdef unsigned char kind
    cdef int written
    while at < size:
        length = p[at]
        if size - at < length + 2 or not _ascii(p + at + 1, length):
            return False
        memcpy(out.names + out.name_end, p + at + 1, length)
        out.name_end += <int32_t>length
        at += 1 + length
        kind = p[at]
        at += 1
        if kind == c'S':
            if size - at < 4:
                return False
            length = _u32(p + at)
            at += 4
            if size - at < length or not _ascii(p + at, length):
                return False
            memcpy(out.values + out.value_end, p + at, length)
            out.value_end += <int32_t>length
            at += length
        elif kind == c't':
            if size - at < 1:
                return False
            if p[at]:
                memcpy(out.values + out.value_end, b"true", 4)
                out.value_end += 4
            else:
                memcpy(out.values + out.value_end, b"false", 5)
                out.value_end += 5
            at += 1
        elif kind == c'I' or kind == c'l':
            length = 4 if kind == c'I' else 8
            if size - at < length:
                return False
            if length == 4:
                written = snprintf(number, NUMBER_BYTES, "%lld", <long long><int32_t>_u32(p + at))
            else:
                written = snprintf(number, NUMBER_BYTES, "%lld", <long long><int64_t>_u64(p + at))
            memcpy(out.values + out.value_end, number, written)
            out.value_end += written
            at += length
        else:
            return False
        out.pairs += 1
        out.name_ends[out.pairs] = out.name_end
        out.value_ends[out.pairs] = out.value_end
    return True


cdef bytes _zeros(Py_ssize_t count):
    cdef bytes out = PyBytes_FromStringAndSize(NULL, (count + 7) // 8)
    memset(PyBytes_AS_STRING(out), 0, PyBytes_GET_SIZE(out))
    return out
