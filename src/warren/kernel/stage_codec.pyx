# cython: language_level=3
"""The records of a stage (`storage/stage_file.py`):

    record = u32 size of payload, u32 CRC of payload, payload
    payload = u32 size of head, head, body
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

cdef extern from "crc32c.h" nogil:
    void warren_crc_init()
    uint32_t warren_crc(uint32_t crc, const void *data, size_t size)

warren_crc_init()

cdef enum:
    PREFIX = 8

STAGE_PREFIX_BYTES = PREFIX


def encode_stage(list heads not None, const unsigned char[::1] numbers not None, const unsigned char[::1] ends not None,
                 const unsigned char[::1] bodies not None):
    """The records of some rows, as one piece, from columns as Arrow has them: a row is the number (i32) of its head among
    `heads`, and its body lies in `bodies` between two `ends` (i32, one more than there are rows). They come from afar:
    raises ValueError where they point elsewhere."""
    cdef Py_ssize_t n = numbers.shape[0] // 4, count = len(heads), have = bodies.shape[0], i
    cdef const unsigned char *number_at = &numbers[0] if n else NULL
    cdef const unsigned char *end_at = &ends[0] if ends.shape[0] else NULL
    cdef const unsigned char *body_at = &bodies[0] if have else NULL
    cdef const char **head_at
    cdef unsigned char *p
    cdef uint32_t *head_sizes
    cdef uint64_t total = 0
    cdef bytes head, out
    cdef bint sound = ends.shape[0] >= 4 * (n + 1)
    head_at = <const char **>malloc((count + 1) * sizeof(char *))
    head_sizes = <uint32_t *>malloc((count + 1) * sizeof(uint32_t))
    try:
        if head_at == NULL or head_sizes == NULL:
            raise MemoryError()
        for i in range(count):
            head = heads[i]
            head_at[i] = PyBytes_AS_STRING(head)
            head_sizes[i] = <uint32_t>PyBytes_GET_SIZE(head)
        if sound:
            with nogil:
                sound = _measure(number_at, end_at, n, count, have, head_sizes, &total)
        if not sound:
            raise ValueError("rows of a stage point to a head or a body that is not there")
        out = PyBytes_FromStringAndSize(NULL, total)
        p = <unsigned char *>PyBytes_AS_STRING(out)
        with nogil:
            _write(p, number_at, end_at, n, body_at, head_at, head_sizes)
    finally:
        free(head_at)
        free(head_sizes)
    return out


cdef bint _measure(const unsigned char *numbers, const unsigned char *ends, Py_ssize_t n, Py_ssize_t heads, Py_ssize_t have,
                   const uint32_t *head_sizes, uint64_t *total) noexcept nogil:
    """How many bytes the records have; False: the columns do not fit together."""
    cdef Py_ssize_t i
    cdef int32_t number, start, end
    memcpy(&start, ends, 4)
    if start < 0:
        return False
    for i in range(n):
        memcpy(&number, numbers + 4 * i, 4)
        memcpy(&end, ends + 4 * (i + 1), 4)
        if number < 0 or number >= heads or end < start or end > have:
            return False
        total[0] += PREFIX + 4 + head_sizes[number] + <uint64_t>(end - start)
        start = end
    return True


cdef void _write(unsigned char *p, const unsigned char *numbers, const unsigned char *ends, Py_ssize_t n,
                 const unsigned char *bodies, const char **heads, const uint32_t *head_sizes) noexcept nogil:
    cdef Py_ssize_t i
    cdef int32_t number, start, end
    cdef uint32_t size, crc, head_size
    memcpy(&start, ends, 4)
    for i in range(n):
        memcpy(&number, numbers + 4 * i, 4)
        memcpy(&end, ends + 4 * (i + 1), 4)
        head_size = head_sizes[number]
        size = 4 + head_size + <uint32_t>(end - start)
        memcpy(p, &size, 4)
        memcpy(p + PREFIX, &head_size, 4)
        memcpy(p + PREFIX + 4, heads[number], head_size)
        if end > start:
            memcpy(p + PREFIX + 4 + head_size, bodies + start, end - start)
        crc = warren_crc(0, p + PREFIX, size)
        memcpy(p + 4, &crc, 4)
        p += PREFIX + size
        start = end


def decode_stage(bytes data not None, Py_ssize_t most, list heads not None, list counts not None, list bodies not None,
                 list ends not None):
    """Up to `most` whole records: their heads, with how many records in a row have each, their bodies, and where each record
    ends in `data`. Returns 0, or, when the next record is not whole, how many bytes it has with its prefix (0 too if not
    even that is there); -1: it is damaged."""
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef const unsigned char *p
    cdef Py_ssize_t have = PyBytes_GET_SIZE(data), at = 0, done = 0, run = 0
    cdef uint32_t size, crc, head_size
    cdef bytes head = None
    cdef Py_ssize_t answer = 0
    while done < most and have - at >= PREFIX:
        p = start + at
        memcpy(&size, p, 4)
        memcpy(&crc, p + 4, 4)
        if have - at - PREFIX < <Py_ssize_t>size:
            answer = PREFIX + <Py_ssize_t>size
            break
        if size < 4 or warren_crc(0, p + PREFIX, size) != crc:
            answer = -1
            break
        memcpy(&head_size, p + PREFIX, 4)
        if head_size > size - 4:
            answer = -1
            break
        if head is None or head_size != PyBytes_GET_SIZE(head) or memcmp(
                PyBytes_AS_STRING(head), p + PREFIX + 4, head_size) != 0:
            if run:
                counts.append(run)
            run = 0
            head = PyBytes_FromStringAndSize(<char *>p + PREFIX + 4, head_size)
            heads.append(head)
        bodies.append(PyBytes_FromStringAndSize(<char *>p + PREFIX + 4 + head_size, size - 4 - head_size))
        at += PREFIX + size
        ends.append(at)
        run += 1
        done += 1
    if run:
        counts.append(run)
    return answer
