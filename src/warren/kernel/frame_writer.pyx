# cython: language_level=3
"""AMQP 0-9-1, outbound: entries and methods become frames.

Sizes are added up first, and one bytes object of that size is then filled. Exchange, routing key and properties are
copied from the stored head as they are; nothing is decoded to be sent. Only the keys of BCC, behind the properties of a
few heads, are left out.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from warren.kernel.entry cimport Entry  # its layout is compiled in
from warren.kernel.ranges cimport RangeSet
from warren.kernel.wire cimport (
    BASIC_ACK, BASIC_DELIVER, BASIC_NACK, BASIC_PUBLISH, CLASS_BASIC, CONTENT_BYTES, FRAME_BODY, FRAME_BYTES, FRAME_END,
    FRAME_HEADER, FRAME_METHOD, put8, put16, put32, put64, put_bytes,
)

cdef enum:
    BLIND = 0x02            # of the lower byte of the flags: keys of BCC are behind the properties

HEARTBEAT_FRAME = b"\x08\x00\x00\x00\x00\x00\x00\xce"


cdef Py_ssize_t body_limit(uint32_t frame_max) except -1:
    """The largest payload of a body frame."""
    if frame_max == 0:
        return 0x7FFFFFFF
    if frame_max <= FRAME_BYTES:
        raise ValueError(f"frame_max is {frame_max}; a frame that carries something has more than {FRAME_BYTES} bytes")
    return frame_max - FRAME_BYTES


cdef inline Py_ssize_t body_bytes(Py_ssize_t n, Py_ssize_t limit) noexcept:
    """What the body frames of `n` bytes take up."""
    return n + FRAME_BYTES * ((n + limit - 1) // limit if n > limit else n > 0)


cdef inline uint8_t *put_start(uint8_t *p, uint32_t kind, uint32_t channel, uint32_t n) noexcept:
    return put32(put16(put8(p, kind), channel), n)


cdef uint8_t *put_content(uint8_t *p, uint32_t channel, const char *properties, Py_ssize_t property_bytes,
                          bint blind, const char *body, Py_ssize_t n, Py_ssize_t limit) noexcept:
    """The header frame and the body frames. `blind`: the flag that is ours alone is cleared."""
    cdef Py_ssize_t part
    p = put_start(p, FRAME_HEADER, channel, CONTENT_BYTES + property_bytes)
    p = put64(put16(put16(p, CLASS_BASIC), 0), n)
    p = put8(put_bytes(p, properties, property_bytes), FRAME_END)
    if blind:
        p[-property_bytes] &= ~<uint8_t>BLIND
    while n > 0:
        part = min(n, limit)
        p = put_start(p, FRAME_BODY, channel, part)
        p = put8(put_bytes(p, body, part), FRAME_END)
        body += part
        n -= part
    return p


cdef Py_ssize_t route_end(object head) except -1:
    """Where the exchange and the routing key of a stored head end and its properties begin."""
    cdef const uint8_t *p
    cdef Py_ssize_t n, at
    if type(head) is not bytes:
        raise TypeError(f"a head is bytes, not {type(head).__name__}; it must be in RAM to be sent")
    n = PyBytes_GET_SIZE(head)
    p = <const uint8_t *>PyBytes_AS_STRING(head)
    if n > 0:
        at = 1 + p[0]
        if at < n:
            at += 1 + p[at]
            if at + 2 <= n:
                return at
    raise ValueError(f"{(<bytes>head)[:40].hex(' ')} is no message head")


cdef Py_ssize_t properties_end(object head, Py_ssize_t route) except -1:
    """Where the properties end that begin at `route`: with the head, but for the keys of BCC."""
    cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(head)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(head), hidden
    if not p[route + 1] & BLIND:
        return n
    if n >= route + 2 + 4:
        hidden = 4 + (<Py_ssize_t>p[n - 4] << 24 | p[n - 3] << 16 | p[n - 2] << 8 | p[n - 1])
        if n - hidden >= route + 2:
            return n - hidden
    raise ValueError(f"{(<bytes>head)[:40].hex(' ')} is no message head: it is shorter than its keys of BCC")


def fitting(list entries not None, uint64_t most_bytes):
    """How many of the first entries have bodies of at most so many bytes together; 1 where already the first has more."""
    cdef uint64_t total = 0
    cdef Py_ssize_t count = 0
    for item in entries:
        total += (<Entry?>item).body_size
        if total > most_bytes and count:
            break
        count += 1
    return count


def deliveries(uint16_t channel, bytes consumer_tag not None, uint64_t first_tag, list entries not None,
               uint64_t redelivered_below, RangeSet returned not None, uint32_t frame_max):
    """basic.deliver and its content for each entry, under the tags from `first_tag` on.

    Requires: each entry has its head and body in RAM.
    """
    cdef Py_ssize_t limit = body_limit(frame_max), tag_bytes = PyBytes_GET_SIZE(consumer_tag)
    cdef Py_ssize_t total = 0, route = 0, head_bytes = 0, each
    cdef bint any_returned = returned.n > 0, redelivered
    cdef PyObject *head = NULL
    cdef Entry entry
    cdef bytes out
    cdef uint8_t *p
    if tag_bytes > 255:
        raise ValueError(f"a consumer tag has up to 255 bytes, not {tag_bytes}")
    # Two frames; class, method, consumer tag, delivery tag, redelivered; class, weight, body size. The head is all else.
    each = 2 * FRAME_BYTES + 4 + 1 + tag_bytes + 8 + 1 + CONTENT_BYTES
    for item in entries:
        entry = <Entry?>item
        if <PyObject *>entry.head != head:      # neighbours often share it
            head_bytes = properties_end(entry.head, route_end(entry.head))
            head = <PyObject *>entry.head
        if type(entry.body) is not bytes:
            raise TypeError(f"{entry!r} has no body in RAM to be sent")
        total += each + head_bytes + body_bytes(PyBytes_GET_SIZE(entry.body), limit)
    out = PyBytes_FromStringAndSize(NULL, total)
    p = <uint8_t *>PyBytes_AS_STRING(out)
    head = NULL
    for item in entries:
        entry = <Entry>item
        if <PyObject *>entry.head != head:
            route = route_end(entry.head)
            head = <PyObject *>entry.head
            head_bytes = properties_end(entry.head, route)
        redelivered = entry.seq < redelivered_below or (any_returned and returned.contains(entry.seq))
        p = put_start(p, FRAME_METHOD, channel, 4 + 1 + tag_bytes + 8 + 1 + route)
        p = put8(put16(put16(p, CLASS_BASIC), BASIC_DELIVER), tag_bytes)
        p = put64(put_bytes(p, PyBytes_AS_STRING(consumer_tag), tag_bytes), first_tag)
        p = put8(put_bytes(put8(p, redelivered), PyBytes_AS_STRING(entry.head), route), FRAME_END)
        p = put_content(p, channel, PyBytes_AS_STRING(entry.head) + route, head_bytes - route,
                        head_bytes < PyBytes_GET_SIZE(entry.head), PyBytes_AS_STRING(entry.body), PyBytes_GET_SIZE(entry.body), limit)
        first_tag += 1
    return out


def content(uint16_t channel, bytes method not None, bytes head not None, bytes body not None, uint32_t frame_max):
    """A method that has content (get-ok, return), as a payload from its class id on, and the content."""
    cdef Py_ssize_t limit = body_limit(frame_max), route = route_end(head), method_bytes = PyBytes_GET_SIZE(method)
    cdef Py_ssize_t properties = properties_end(head, route) - route, n = PyBytes_GET_SIZE(body)
    cdef bytes out = PyBytes_FromStringAndSize(
        NULL, 2 * FRAME_BYTES + method_bytes + CONTENT_BYTES + properties + body_bytes(n, limit)
    )
    cdef uint8_t *p = put_start(<uint8_t *>PyBytes_AS_STRING(out), FRAME_METHOD, channel, method_bytes)
    p = put8(put_bytes(p, PyBytes_AS_STRING(method), method_bytes), FRAME_END)
    put_content(p, channel, PyBytes_AS_STRING(head) + route, properties, route + properties < PyBytes_GET_SIZE(head),
                PyBytes_AS_STRING(body), n, limit)
    return out


def method_frame(uint16_t channel, bytes payload not None):
    """One method, as a payload from its class id on."""
    cdef Py_ssize_t n = PyBytes_GET_SIZE(payload)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, FRAME_BYTES + n)
    cdef uint8_t *p = put_start(<uint8_t *>PyBytes_AS_STRING(out), FRAME_METHOD, channel, n)
    put8(put_bytes(p, PyBytes_AS_STRING(payload), n), FRAME_END)
    return out


cdef bytes settlement(uint32_t channel, uint32_t method_id, uint64_t tag, uint32_t bits):
    cdef bytes out = PyBytes_FromStringAndSize(NULL, FRAME_BYTES + 13)
    cdef uint8_t *p = put_start(<uint8_t *>PyBytes_AS_STRING(out), FRAME_METHOD, channel, 13)
    put8(put8(put64(put16(put16(p, CLASS_BASIC), method_id), tag), bits), FRAME_END)
    return out


def ack_frame(uint16_t channel, uint64_t tag, bint multiple):
    """basic.ack: to a publisher, or to a broker."""
    return settlement(channel, BASIC_ACK, tag, multiple)


def nack_frame(uint16_t channel, uint64_t tag, bint multiple):
    """basic.nack. Its requeue bit, which means nothing to a publisher, is set as RabbitMQ sets it: it is the default."""
    return settlement(channel, BASIC_NACK, tag, 2 | <uint32_t>multiple)


def publishes(uint16_t channel, bytes exchange not None, bytes routing_key not None, uint8_t bits,
              bytes properties not None, list bodies not None, uint32_t frame_max):
    """basic.publish and its content for each body: the client's side. `properties` are flags and values, raw."""
    cdef Py_ssize_t limit = body_limit(frame_max), total = 0, each, arguments
    cdef Py_ssize_t exchange_bytes = PyBytes_GET_SIZE(exchange), key_bytes = PyBytes_GET_SIZE(routing_key)
    cdef Py_ssize_t property_bytes = PyBytes_GET_SIZE(properties)
    cdef bytes out
    cdef uint8_t *p
    if exchange_bytes > 255 or key_bytes > 255:
        raise ValueError(f"an exchange and a routing key have up to 255 bytes, not {max(exchange_bytes, key_bytes)}")
    if property_bytes < 2:
        raise ValueError("properties begin with two bytes of flags; without any they are b'\\0\\0'")
    arguments = 4 + 2 + 1 + exchange_bytes + 1 + key_bytes + 1
    each = 2 * FRAME_BYTES + arguments + CONTENT_BYTES + property_bytes
    for body in bodies:
        if type(body) is not bytes:
            raise TypeError(f"a message body is bytes, not {type(body).__name__}")
        total += each + body_bytes(PyBytes_GET_SIZE(body), limit)
    out = PyBytes_FromStringAndSize(NULL, total)
    p = <uint8_t *>PyBytes_AS_STRING(out)
    for body in bodies:
        p = put_start(p, FRAME_METHOD, channel, arguments)
        p = put8(put16(put16(put16(p, CLASS_BASIC), BASIC_PUBLISH), 0), exchange_bytes)
        p = put8(put_bytes(p, PyBytes_AS_STRING(exchange), exchange_bytes), key_bytes)
        p = put8(put8(put_bytes(p, PyBytes_AS_STRING(routing_key), key_bytes), bits), FRAME_END)
        p = put_content(p, channel, PyBytes_AS_STRING(properties), property_bytes, False,
                        PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), limit)
    return out
