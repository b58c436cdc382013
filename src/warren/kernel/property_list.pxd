# The property list of a content header: is it sound, and what an entry takes from it.
#
# Inline, so that the scanner of clients' frames pays no call into another module for a message with new properties.

from libc.stdint cimport uint8_t, uint32_t

from warren.kernel.entry cimport PERSISTENT
from warren.kernel.wire cimport read16, read32

cdef enum:
    MAX_TABLE_DEPTH = 100       # as in queueing/properties.py, which reads what is let through here


cdef inline Py_ssize_t value_end(const uint8_t *p, Py_ssize_t at, Py_ssize_t n, int depth) noexcept nogil:
    """Where the typed value at `at` ends, -1 where it is none or runs over `n`."""
    cdef uint8_t kind = p[at]
    cdef Py_ssize_t size
    at += 1
    if kind == c"S" or kind == c"x" or kind == c"F" or kind == c"A":
        if n - at < 4:
            return -1
        size = read32(p + at)
        at += 4
        if n - at < size:
            return -1
        if kind == c"F" and not table_is_sound(p + at, size, depth + 1):
            return -1
        if kind == c"A" and not array_is_sound(p + at, size, depth + 1):
            return -1
    elif kind == c"I" or kind == c"i" or kind == c"f":
        size = 4
    elif kind == c"l" or kind == c"L" or kind == c"d" or kind == c"T":
        size = 8
    elif kind == c"t" or kind == c"b" or kind == c"B":
        size = 1
    elif kind == c"s" or kind == c"u":
        size = 2
    elif kind == c"D":
        size = 5
    elif kind == c"V" or kind == 0:
        size = 0
    else:
        return -1
    return at + size if n - at >= size else -1


cdef inline bint table_is_sound(const uint8_t *p, Py_ssize_t n, int depth) noexcept nogil:
    cdef Py_ssize_t at = 0
    if depth > MAX_TABLE_DEPTH:
        return False
    while at < n:
        at += 1 + p[at]
        if at >= n:
            return False
        at = value_end(p, at, n, depth)
        if at < 0:
            return False
    return True


cdef inline bint array_is_sound(const uint8_t *p, Py_ssize_t n, int depth) noexcept nogil:
    cdef Py_ssize_t at = 0
    if depth > MAX_TABLE_DEPTH:
        return False
    while at < n:
        at = value_end(p, at, n, depth)
        if at < 0:
            return False
    return True


cdef inline bint read_properties(const uint8_t *p, Py_ssize_t n, uint8_t *flags, uint8_t *level) noexcept nogil:
    """Walk over a property list; the entry's flags and level come from two of them. False: it is malformed.

    The two lowest flags are refused: AMQP 0-9-1 has no fifteenth property, so no second word of flags either, and
    RabbitMQ cannot read one.
    """
    cdef uint32_t present, number
    cdef Py_ssize_t at = 2, size
    flags[0] = 0
    level[0] = 0
    if n < 2:
        return False
    present = read16(p)
    if present & 3:
        return False
    for number in range(14):
        if not present & (0x8000 >> number):
            continue
        if number == 3 or number == 4:      # delivery mode, priority
            if at >= n:
                return False
            if number == 4:
                level[0] = p[at]
            elif p[at] == 2:
                flags[0] = PERSISTENT
            at += 1
        elif number == 2:                   # headers
            if n - at < 4:
                return False
            size = read32(p + at)
            at += 4
            if n - at < size or not table_is_sound(p + at, size, 1):
                return False
            at += size
        elif number == 9:                   # timestamp
            at += 8
        else:
            if at >= n:
                return False
            at += 1 + p[at]
        if at > n:
            return False
    return at == n
