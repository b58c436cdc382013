# What both directions of AMQP 0-9-1 share: its numbers, and integers in network byte order.
#
# The put functions return where the next byte goes, so that they can be written into each other.

from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static inline uint32_t read16(const uint8_t *p) { return (uint32_t)p[0] << 8 | p[1]; }
    static inline uint32_t read32(const uint8_t *p) { return read16(p) << 16 | read16(p + 2); }
    static inline uint64_t read64(const uint8_t *p) { return (uint64_t)read32(p) << 32 | read32(p + 4); }
    static inline uint8_t *put8(uint8_t *p, uint32_t v) { *p = (uint8_t)v; return p + 1; }
    static inline uint8_t *put16(uint8_t *p, uint32_t v) { return put8(put8(p, v >> 8), v); }
    static inline uint8_t *put32(uint8_t *p, uint32_t v) { return put16(put16(p, v >> 16), v); }
    static inline uint8_t *put64(uint8_t *p, uint64_t v) { return put32(put32(p, (uint32_t)(v >> 32)), (uint32_t)v); }
    static inline uint8_t *put_bytes(uint8_t *p, const void *from, Py_ssize_t n) { memcpy(p, from, n); return p + n; }
    """
    uint32_t read16(const uint8_t *p) noexcept nogil
    uint32_t read32(const uint8_t *p) noexcept nogil
    uint64_t read64(const uint8_t *p) noexcept nogil
    uint8_t *put8(uint8_t *p, uint32_t v) noexcept nogil
    uint8_t *put16(uint8_t *p, uint32_t v) noexcept nogil
    uint8_t *put32(uint8_t *p, uint32_t v) noexcept nogil
    uint8_t *put64(uint8_t *p, uint64_t v) noexcept nogil
    uint8_t *put_bytes(uint8_t *p, const void *start, Py_ssize_t n) noexcept nogil


cdef enum:
    FRAME_METHOD = 1
    FRAME_HEADER = 2
    FRAME_BODY = 3
    FRAME_HEARTBEAT = 8
    FRAME_END = 0xCE
    HEADER_BYTES = 7            # of a frame, in front of its payload
    FRAME_BYTES = 8             # the same and the end octet: what a frame costs
    CONTENT_BYTES = 12          # class, weight and body size, in front of the properties

    CLASS_BASIC = 60
    BASIC_PUBLISH = 40
    BASIC_DELIVER = 60
    BASIC_ACK = 80
    BASIC_NACK = 120
