# cython: language_level=3
"""The records of a stage (`storage/stage_file.py`):

    record = u32 size of payload, u32 CRC of payload, payload
    payload = u32 size of head, head, body
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

cdef extern from "crc32c.h" nogil:
    void warren_crc_init()
    uint32_t warren_crc(uint32_t crc, const void *data, size_t size)

warren_crc_init()

cdef enum:
    PREFIX = 8

STAGE_PREFIX_BYTES = PREFIX


def encode_stage(list heads not None, list bodies not None):
    """The records of some rows, as one piece."""
    cdef Py_ssize_t n = len(heads), i
    cdef uint64_t total = 0
    cdef uint32_t head_size, body_size, size, crc
    cdef bytes head, body, out
    cdef unsigned char *p
    if len(bodies) != n:
        raise ValueError(f"{n} heads and {len(bodies)} bodies")
    for i in range(n):
        head = heads[i]
        body = bodies[i]
        total += PREFIX + 4 + PyBytes_GET_SIZE(head) + PyBytes_GET_SIZE(body)
    out = PyBytes_FromStringAndSize(NULL, total)
    p = <unsigned char *>PyBytes_AS_STRING(out)
    for i in range(n):
        head = heads[i]
        body = bodies[i]
        head_size = <uint32_t>PyBytes_GET_SIZE(head)
        body_size = <uint32_t>PyBytes_GET_SIZE(body)
        size = 4 + head_size + body_size
        memcpy(p, &size, 4)
        memcpy(p + PREFIX, &head_size, 4)
        memcpy(p + PREFIX + 4, PyBytes_AS_STRING(head), head_size)
        memcpy(p + PREFIX + 4 + head_size, PyBytes_AS_STRING(body), body_size)
        crc = warren_crc(0, p + PREFIX, size)
        memcpy(p + 4, &crc, 4)
        p += PREFIX + size
    return out


def decode_stage(bytes data not None, Py_ssize_t most, list heads not None, list bodies not None, list ends not None):
    """Up to `most` whole records: their heads (equal ones in a row are one object), bodies, and where each ends in `data`.
    Returns 0, or, when the next record is not whole, how many bytes it has with its prefix (0 too if not even that is
    there); -1: it is damaged."""
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef const unsigned char *p
    cdef Py_ssize_t have = PyBytes_GET_SIZE(data), at = 0, done = 0
    cdef uint32_t size, crc, head_size
    cdef bytes head = b""
    while done < most and have - at >= PREFIX:
        p = start + at
        memcpy(&size, p, 4)
        memcpy(&crc, p + 4, 4)
        if have - at - PREFIX < <Py_ssize_t>size:
            return PREFIX + <Py_ssize_t>size
        if size < 4 or warren_crc(0, p + PREFIX, size) != crc:
            return -1
        memcpy(&head_size, p + PREFIX, 4)
        if head_size > size - 4:
            return -1
        if head_size != PyBytes_GET_SIZE(head) or memcmp(PyBytes_AS_STRING(head), p + PREFIX + 4, head_size) != 0:
            head = PyBytes_FromStringAndSize(<char *>p + PREFIX + 4, head_size)
        heads.append(head)
        bodies.append(PyBytes_FromStringAndSize(<char *>p + PREFIX + 4 + head_size, size - 4 - head_size))
        at += PREFIX + size
        ends.append(at)
        done += 1
    return 0
