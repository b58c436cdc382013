# Whether a publish record of the journal holds what it says. A checksum that fits by chance, by a bug or by somebody's hand
# must not lead a reader out of the file, so whoever reads a record asks this after the checksum.

from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    _FIXED = 24             # type .. expiry
    _TARGET = 16            # sid and seq_id
    _PRODUCER = 1           # flags
    _STORED = 2
    _STORED_BYTES = 24      # msg_id, size, body size


cdef inline bint publish_is_whole(const unsigned char *p, uint64_t length) noexcept nogil:
    """`p` is at the type byte of a publish record of `length` bytes."""
    cdef uint16_t targets
    cdef uint32_t payload, head
    cdef uint64_t start
    if length < _FIXED:
        return False
    memcpy(&targets, p + 2, 2)
    memcpy(&payload, p + 4, 4)
    start = _FIXED + <uint64_t>targets * _TARGET
    if p[1] & _PRODUCER:
        if start + 9 > length:
            return False
        start += 9 + p[start + 8]
    if start + payload > length:
        return False
    if p[1] & _STORED:
        return payload >= _STORED_BYTES
    if payload < 4:
        return False
    memcpy(&head, p + start, 4)
    return head <= payload - 4
