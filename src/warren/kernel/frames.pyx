# cython: language_level=3
"""AMQP 0-9-1 as bytes: a receive buffer becomes events. Entries become frames in frame_writer.pyx, and are found here.

    frame        = type (1 byte) channel (2) size (4) payload (size) 0xCE
    type         = 1 method | 2 content header | 3 content body | 8 heartbeat
    a publish    = method frame 60,40, header frame, body frames until the announced size is there

Rules:

1. One call a receive buffer. A publish costs an Entry and its body; nothing else of it becomes a Python object as long as
   exchange, key and properties are those of the message before it on its channel.
2. Bytes are copied once, from the receive buffer into the body. Only a frame that a receive buffer cut is copied twice.
3. What a client announces is no reason to allocate: room grows, by doubling, with what came.
4. Nothing a client sends raises. What the protocol forbids sets `error`, and the scanner is deaf from then on: the bytes
   behind a broken frame mean nothing. Codes and texts are RabbitMQ's where it has one, as clients and people know them.
5. Contents under way may wait for their rest for ever, on every channel: together they have a limit.
6. Properties are checked here, once, tables and all, so that no later reader of a stored head finds it malformed.

Only the methods that come once a message are decoded: publish and ack. All others are for those who know methods.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE, _PyBytes_Resize
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy

from warren.kernel.entry cimport Entry
from warren.kernel.property_list cimport read_properties
from warren.kernel.wire cimport (
    BASIC_ACK, BASIC_PUBLISH, CLASS_BASIC, CONTENT_BYTES, FRAME_BODY, FRAME_BYTES, FRAME_END, FRAME_HEADER, FRAME_HEARTBEAT, FRAME_METHOD, HEADER_BYTES, read16, read32, read64,
)

# The other direction: a user of frames finds both here.
from warren.kernel.frame_writer import (
    HEARTBEAT_FRAME, ack_frame, content, deliveries, method_frame, nack_frame, publishes,
)

cdef extern from "Python.h":
    # The same functions on bare references: bytes can be resized only while there is no second one.
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *start, Py_ssize_t n) except NULL
    char *bytes_start "PyBytes_AS_STRING"(PyObject *data) noexcept
    Py_ssize_t bytes_size "PyBytes_GET_SIZE"(PyObject *data) noexcept

# The first member of an event.
cdef enum:
    _METHOD = 1
    _PUBLISH = 2
    _ACK = 3
    _HEARTBEAT = 4
    _TOO_LARGE = 5

METHOD = _METHOD
PUBLISH = _PUBLISH
ACK = _ACK
HEARTBEAT = _HEARTBEAT
TOO_LARGE = _TOO_LARGE

cdef enum:
    FRAME_ERROR = 501
    SYNTAX_ERROR = 502
    CHANNEL_ERROR = 504
    UNEXPECTED_FRAME = 505
    RESOURCE_ERROR = 506

    KEPT_BUFFER = 65536         # a larger buffer for a cut frame is given back when the frame is done
    KEPT_HEAD = 4096            # a longer head is not kept for the next message: thousands of channels may have one
    FIRST_ROOM = 4096           # for a body of several frames

# Contents of several channels may be under way at once: a largest message, and so many bytes beside it.
cdef uint64_t BESIDE_LARGEST = 64 * 1024 * 1024
# An Entry counts its payload in 32 bits: neither a body nor a frame may come near them, whatever was configured.
cdef uint64_t SIZE_LIMIT = 0x40000000

cdef enum:
    EXPECT_METHOD = 0
    EXPECT_HEADER = 1
    EXPECT_BODY = 2
    SWALLOW_HEADER = 3          # of a message that nobody wants any more: the channel failed while it was under way
    SWALLOW_BODY = 4            # the same, or of a message that was too large


@cython.final
@cython.no_gc
cdef class _Channel:
    """What is known of a channel that published: its last publish, and the content that is under way."""

    cdef uint16_t number
    cdef int stage
    cdef uint32_t version           # counts the changes of `arguments`
    cdef uint8_t bits
    cdef uint8_t flags              # of an entry with `head`, and its level
    cdef uint8_t level
    cdef uint32_t property_flags
    cdef bytes arguments            # of the last publish, raw
    cdef str exchange               # decoded from them when an event needs it
    cdef str routing_key
    cdef bytes head                 # of the last message; None after a change of `arguments`
    cdef PyObject *body             # bytes with room for more than came; NULL while no frame of it did
    cdef uint64_t announced
    cdef uint64_t received

    def __cinit__(self, uint16_t number):
        self.number = number

    cdef int set_arguments(self, const uint8_t *p, Py_ssize_t n) except -1:
        """Take over the arguments of a publish; returns 1 where they are malformed."""
        cdef Py_ssize_t key_at
        if n < 5:
            return 1
        key_at = 3 + p[2]
        if key_at + 2 > n or key_at + 2 + p[key_at] != n:
            return 1
        self.arguments = PyBytes_FromStringAndSize(<const char *>p, n)
        self.bits = p[n - 1] & 3
        self.exchange = None
        self.head = None
        self.version += 1
        return 0

    cdef int decode_names(self) except -1:
        cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(self.arguments)
        cdef Py_ssize_t key_at = 3 + p[2]
        self.exchange = PyUnicode_DecodeUTF8(<const char *>p + 3, p[2], "surrogateescape")
        self.routing_key = PyUnicode_DecodeUTF8(<const char *>p + key_at + 1, p[key_at], "surrogateescape")
        return 0

    cdef int set_head(self, const uint8_t *properties, Py_ssize_t n) except -1:
        """Take over the properties of a message, most often those of the last one; returns 1 where they are malformed."""
        cdef Py_ssize_t route_bytes = PyBytes_GET_SIZE(self.arguments) - 3      # without the ticket and the bits
        cdef uint8_t flags, level
        cdef char *head
        if (
            self.head is not None
            and PyBytes_GET_SIZE(self.head) == route_bytes + n
            and memcmp(PyBytes_AS_STRING(self.head) + route_bytes, properties, n) == 0
        ):
            return 0
        if not read_properties(properties, n, &flags, &level):
            return 1
        self.head = PyBytes_FromStringAndSize(NULL, route_bytes + n)
        head = PyBytes_AS_STRING(self.head)
        memcpy(head, PyBytes_AS_STRING(self.arguments) + 2, route_bytes)
        memcpy(head + route_bytes, properties, n)
        self.flags = flags
        self.level = level
        self.property_flags = read16(properties)
        return 0

    cdef int add_body(self, const uint8_t *p, Py_ssize_t n) except -1:
        """Append to the body. Its room doubles but never passes the announced size, so that at the end it is exact."""
        cdef uint64_t wanted = self.received + n, room
        if self.body == NULL:
            self.body = new_bytes(NULL, min(self.announced, max(wanted, <uint64_t>FIRST_ROOM)))
        else:
            room = bytes_size(self.body)
            if wanted > room:
                _PyBytes_Resize(&self.body, min(self.announced, max(wanted, 2 * room)))
        memcpy(bytes_start(self.body) + self.received, p, n)
        self.received = wanted
        return 0

    cdef object take_body(self):
        """The whole body, and the channel has none any more."""
        body = <object>self.body
        Py_XDECREF(self.body)
        self.body = NULL
        return body

    cdef bint is_under_way(self) noexcept:
        return self.stage == EXPECT_HEADER or self.stage == EXPECT_BODY

    cdef void drop_body(self) noexcept:
        Py_XDECREF(self.body)
        self.body = NULL

    def __dealloc__(self):
        Py_XDECREF(self.body)


@cython.final
cdef class FrameScanner:
    """One connection's bytes in, its events out.

    >>> received = publishes(1, b"", b"orders", 0, bytes(2), [b"a", b"b"], 4096)
    >>> scanner = FrameScanner()
    >>> [(kind, channel, exchange, routing_key, bits, property_flags, entries)] = scanner.feed(received, 0)
    >>> kind == PUBLISH, channel, routing_key, [entry.body for entry in entries]
    (True, 1, 'orders', [b'a', b'b'])

    Events, each a tuple:

        METHOD, channel, class id, method id, arguments        any method but publish and ack
        PUBLISH, channel, exchange, routing key, bits (1 mandatory, 2 immediate), property flags, entries
        ACK, channel, acks (2 * delivery tag, + 1 for multiple)
        HEARTBEAT,
        TOO_LARGE, channel, announced size                     its body is swallowed
    """

    cdef public uint32_t frame_max      # bytes; 0: none was agreed on
    cdef public uint32_t highest_channel    # 0 until the connection is open: no content is buffered before a login
    cdef readonly object error          # reply code, text without the name of the code, class id, method id
    cdef uint64_t largest_body
    cdef uint8_t *rest                  # the frame that the last receive buffer cut
    cdef uint64_t rest_bytes
    cdef uint64_t rest_room
    cdef uint64_t partial               # bytes of contents under way, of all channels
    cdef readonly uint64_t under_way    # how many these are: begun by their method, neither complete nor dropped
    cdef uint64_t now
    cdef dict channels
    cdef _Channel current               # the one looked up last
    cdef list events
    # The last event, while it can take more; all of it is reset by every other event.
    cdef int open_kind
    cdef uint16_t open_channel
    cdef uint32_t open_version
    cdef uint32_t open_flags
    cdef list open_list

    def __cinit__(self):
        self.rest = NULL

    def __init__(self, uint32_t frame_max=131072, max_message_size=134217728):
        self.frame_max = frame_max
        self.max_message_size = max_message_size
        self.highest_channel = 65535
        self.error = None
        self.channels = {}

    def __dealloc__(self):
        free(self.rest)

    @property
    def max_message_size(self):
        """The largest body, in bytes, that is taken."""
        return self.largest_body

    @max_message_size.setter
    def max_message_size(self, size):
        self.largest_body = min(size, SIZE_LIMIT)

    @property
    def buffered(self):
        """Bytes kept for later: of a frame that is not complete, and of contents that are not."""
        return self.rest_bytes + self.partial

    def stray(self, dict channels not None):
        """A channel with a content under way that is not among `channels`; 0: there is none."""
        cdef _Channel channel = self.current
        if self.under_way == 1 and channel is not None and channel.is_under_way():
            return 0 if channel.number in channels else channel.number      # what a receive buffer cut: most often
        for channel in self.channels.values():
            if channel.is_under_way() and channel.number not in channels:
                return channel.number
        return 0

    def feed(self, data not None, uint64_t now):
        """The events of what was received; `now`, in microseconds, is when its messages were published."""
        cdef Py_buffer view
        cdef list events = []
        if self.error is not None:
            return events
        self.events = events
        self.now = now
        self.open_kind = 0
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            self.scan(<const uint8_t *>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
            self.events = None
            self.open_list = None
        return events

    def forget(self, uint16_t channel):
        """The channel was closed, by either side: drop what is known of it, a content under way included.

        A client that publishes on does not know yet. What is still to come of that content is swallowed, up to the next
        method: to the client it was no error.
        """
        cdef _Channel known = self.channels.get(channel)
        if known is None:
            return
        if known.stage == EXPECT_METHOD:
            del self.channels[channel]
            if self.current is known:
                self.current = None
        elif known.stage == EXPECT_HEADER:
            self.under_way -= 1
            known.stage = SWALLOW_HEADER
        elif known.stage == EXPECT_BODY:
            self.under_way -= 1
            self.partial -= PyBytes_GET_SIZE(known.head) + known.received
            known.drop_body()
            known.stage = SWALLOW_BODY

    # -- frames --

    cdef int scan(self, const uint8_t *p, Py_ssize_t length) except -1:
        cdef uint64_t at = 0, n = length, size
        cdef int failed
        if self.rest_bytes:
            if self.rest_bytes < HEADER_BYTES:
                at = min(HEADER_BYTES - self.rest_bytes, n)
                self.keep(p, at)
                if self.rest_bytes < HEADER_BYTES:
                    return 0
                if self.is_too_large(self.rest):
                    return 0
            size = FRAME_BYTES + <uint64_t>read32(self.rest + 3) - self.rest_bytes      # still to come
            size = min(size, n - at)
            self.keep(p + at, size)
            at += size
            if self.rest_bytes < FRAME_BYTES + <uint64_t>read32(self.rest + 3):
                return 0
            self.rest_bytes = 0
            failed = self.frame(self.rest)
            if self.rest_room > KEPT_BUFFER:
                free(self.rest)
                self.rest = NULL
                self.rest_room = 0
            if failed:
                return 0
        while n - at >= HEADER_BYTES:
            if self.is_too_large(p + at):
                return 0
            size = FRAME_BYTES + <uint64_t>read32(p + at + 3)
            if n - at < size:
                break
            if self.frame(p + at):
                return 0
            at += size
        self.keep(p + at, n - at)
        return 0

    cdef int keep(self, const uint8_t *p, uint64_t n) except -1:
        cdef uint8_t *grown
        cdef uint64_t room
        if n == 0:
            return 0
        if self.rest_bytes + n > self.rest_room:
            room = max(self.rest_bytes + n, 2 * self.rest_room)
            grown = <uint8_t *>realloc(self.rest, room)
            if grown == NULL:
                raise MemoryError()
            self.rest = grown
            self.rest_room = room
        memcpy(self.rest + self.rest_bytes, p, n)
        self.rest_bytes += n
        return 0

    cdef bint is_too_large(self, const uint8_t *frame) except -1:
        """Decided by the first seven bytes: the payload of such a frame is not waited for."""
        cdef uint64_t size = read32(frame + 3)
        cdef uint64_t most = SIZE_LIMIT
        if self.frame_max >= FRAME_BYTES and self.frame_max - FRAME_BYTES < most:
            most = self.frame_max - FRAME_BYTES
        if size <= most:
            return False
        self.fail(FRAME_ERROR, f"type {frame[0]}, all octets = <<>>: {{frame_too_large,{size},{most}}}")
        return True

    cdef int frame(self, const uint8_t *frame) except -1:
        """One complete frame; returns 1 after an error."""
        cdef uint32_t kind = frame[0], number = read16(frame + 1), n = read32(frame + 3)
        cdef const uint8_t *p = frame + HEADER_BYTES
        cdef _Channel channel
        if p[n] != FRAME_END:
            return self.bad_frame(frame, f"{{invalid_frame_end_marker,{p[n]}}}")
        if number > self.highest_channel:
            if self.highest_channel == 0:
                return self.fail(UNEXPECTED_FRAME, f"type {kind}, {_octets(p, n)}")
            return self.fail(CHANNEL_ERROR, f"channel {number} is above the negotiated {self.highest_channel}")
        if kind == FRAME_METHOD and n >= 4:
            return self.method(number, p, n)
        if kind == FRAME_HEARTBEAT and n == 0:
            if number != 0:
                return self.fail(UNEXPECTED_FRAME, "type 8, all octets = <<>>")
            return self.emit((HEARTBEAT,))
        if kind != FRAME_BODY and (kind != FRAME_HEADER or n < CONTENT_BYTES):
            return self.bad_frame(frame, "unknown_frame")
        if number == 0:
            return self.fail(UNEXPECTED_FRAME, f"type {kind}, {_octets(p, n)}")
        channel = self.find(number)
        if channel is None or channel.stage == EXPECT_METHOD:
            return self.fail(UNEXPECTED_FRAME, "expected method frame, got non method frame instead")
        if kind == FRAME_HEADER:
            if channel.stage == EXPECT_HEADER or channel.stage == SWALLOW_HEADER:
                return self.header(channel, p, n)
        elif channel.stage == EXPECT_BODY or channel.stage == SWALLOW_BODY:
            return self.body(channel, p, n)
        return self.out_of_turn(channel)

    cdef int method(self, uint32_t number, const uint8_t *p, uint32_t n) except -1:
        cdef uint32_t class_id = read16(p), method_id = read16(p + 2)
        cdef _Channel channel = None
        cdef uint64_t tag
        p += 4
        n -= 4
        if number != 0:
            channel = self.find(number)
            if channel is not None and channel.stage != EXPECT_METHOD:
                # Who is told, in the middle of a message, that it is in vain may leave it at that.
                if channel.stage != SWALLOW_HEADER and channel.stage != SWALLOW_BODY:
                    return self.out_of_turn(channel)
                channel.stage = EXPECT_METHOD
            if class_id == CLASS_BASIC and method_id == BASIC_PUBLISH:
                if channel is None:
                    channel = _Channel(number)
                    self.channels[number] = channel
                    self.current = channel
                if (
                    channel.arguments is None
                    or PyBytes_GET_SIZE(channel.arguments) != n
                    or memcmp(PyBytes_AS_STRING(channel.arguments), p, n) != 0
                ) and channel.set_arguments(p, n):
                    return self.undecodable(BASIC_PUBLISH, p, n)
                channel.stage = EXPECT_HEADER
                self.under_way += 1
                return 0
            if class_id == CLASS_BASIC and method_id == BASIC_ACK:
                if n != 9:
                    return self.undecodable(BASIC_ACK, p, n)
                if self.open_kind != _ACK or self.open_channel != number:
                    self.open_list = []
                    self.emit((ACK, number, self.open_list))
                    self.open_kind = _ACK
                    self.open_channel = number
                tag = read64(p)
                if tag < 0x7FFFFFFFFFFFFFFF:
                    self.open_list.append(2 * tag + (p[8] & 1))
                else:
                    self.open_list.append(2 * <object>tag + (p[8] & 1))
                return 0
        return self.emit((METHOD, number, class_id, method_id, PyBytes_FromStringAndSize(<const char *>p, n)))

    cdef int header(self, _Channel channel, const uint8_t *p, uint32_t n) except -1:
        cdef uint32_t class_id = read16(p), weight = read16(p + 2)
        cdef uint64_t size = read64(p + 4)
        if weight != 0:
            return self.fail(
                FRAME_ERROR, f"content header with weight {weight}, it must be 0", CLASS_BASIC, BASIC_PUBLISH
            )
        if class_id != CLASS_BASIC:
            return self.fail(
                UNEXPECTED_FRAME,
                f"expected content header for class 60, got one for class {class_id} instead",
                CLASS_BASIC,
                BASIC_PUBLISH,
            )
        channel.announced = size
        channel.received = 0
        if channel.stage == SWALLOW_HEADER:
            channel.stage = SWALLOW_BODY if size else EXPECT_METHOD
            return 0
        if size > self.largest_body:
            self.under_way -= 1
            channel.stage = SWALLOW_BODY
            return self.emit((TOO_LARGE, channel.number, size))
        if channel.set_head(p + CONTENT_BYTES, n - CONTENT_BYTES):
            return self.fail(
                SYNTAX_ERROR,
                f"malformed properties, {_octets(p + CONTENT_BYTES, n - CONTENT_BYTES)}",
                CLASS_BASIC,
                BASIC_PUBLISH,
            )
        if size == 0:
            return self.publish(channel, b"")
        channel.stage = EXPECT_BODY
        self.partial += PyBytes_GET_SIZE(channel.head)
        return self.is_too_much()

    cdef int body(self, _Channel channel, const uint8_t *p, uint32_t n) except -1:
        if n > channel.announced - channel.received:
            return self.fail(
                FRAME_ERROR, "content body frame exceeds remaining content size", CLASS_BASIC, BASIC_PUBLISH
            )
        if channel.stage == SWALLOW_BODY:
            channel.received += n
            if channel.received == channel.announced:
                channel.stage = EXPECT_METHOD
            return 0
        if n == channel.announced:      # the common case: all of it in one frame
            self.partial -= PyBytes_GET_SIZE(channel.head)
            return self.publish(channel, PyBytes_FromStringAndSize(<const char *>p, n))
        if n == 0:      # nothing to keep; room that is made for nothing would be taken for that of the next message
            return 0
        channel.add_body(p, n)
        self.partial += n
        if channel.received < channel.announced:
            return self.is_too_much()
        self.partial -= PyBytes_GET_SIZE(channel.head) + channel.received
        return self.publish(channel, channel.take_body())

    cdef int is_too_much(self) except -1:
        """Not reading on would not help: the rest that the contents under way need would not come either."""
        cdef uint64_t most = self.largest_body + BESIDE_LARGEST
        if self.partial <= most or self.under_way < 2:
            return 0
        text = f"{self.under_way} unfinished messages on the channels of this connection have more than {most} bytes: "
        return self.fail(RESOURCE_ERROR, text + "finish some before beginning others", CLASS_BASIC, BASIC_PUBLISH)

    # -- events --

    cdef int publish(self, _Channel channel, bytes body) except -1:
        """A content is complete."""
        cdef Entry entry = Entry.__new__(Entry)
        channel.stage = EXPECT_METHOD
        self.under_way -= 1
        entry.head = channel.head
        entry.body = body
        entry.published_at = self.now
        entry.body_size = <uint32_t>PyBytes_GET_SIZE(body)
        entry.size = 4 + <uint32_t>PyBytes_GET_SIZE(channel.head) + entry.body_size
        entry.flags = channel.flags
        entry.level = channel.level
        if (
            self.open_kind != _PUBLISH
            or self.open_channel != channel.number
            or self.open_version != channel.version
            or self.open_flags != channel.property_flags
        ):
            if channel.exchange is None:
                channel.decode_names()
            self.open_list = []
            self.emit((
                PUBLISH, channel.number, channel.exchange, channel.routing_key, channel.bits, channel.property_flags,
                self.open_list,
            ))
            self.open_kind = _PUBLISH
            self.open_channel = channel.number
            self.open_version = channel.version
            self.open_flags = channel.property_flags
        self.open_list.append(entry)
        if PyBytes_GET_SIZE(channel.head) > KEPT_HEAD:
            channel.head = None
        return 0

    cdef int emit(self, tuple event) except -1:
        self.events.append(event)
        self.open_kind = 0
        return 0

    cdef _Channel find(self, uint32_t number):
        cdef _Channel channel = self.current
        if channel is None or channel.number != number:
            channel = self.channels.get(number)
            if channel is not None:
                self.current = channel
        return channel

    # -- errors: each returns 1 --

    cdef int fail(self, int code, str text, int class_id=0, int method_id=0) except -1:
        self.error = (code, text, class_id, method_id)
        free(self.rest)
        self.rest = NULL
        self.rest_bytes = self.rest_room = 0
        self.partial = self.under_way = 0
        self.channels = {}
        self.current = None
        return 1

    cdef int bad_frame(self, const uint8_t *frame, str reason) except -1:
        cdef uint32_t n = read32(frame + 3)
        return self.fail(FRAME_ERROR, f"type {frame[0]}, {_octets(frame + HEADER_BYTES, n)}: {reason}")

    cdef int undecodable(self, int method_id, const uint8_t *p, uint32_t n) except -1:
        cdef bytes start = p[:min(n, <uint32_t>128)]    # more would not fit into a reply text, which is a short string
        return self.fail(FRAME_ERROR, f"cannot decode <<{','.join(map(str, start))}>>", CLASS_BASIC, method_id)

    cdef int out_of_turn(self, _Channel channel) except -1:
        return self.fail(
            UNEXPECTED_FRAME,
            "expected content header for class 60, got non content header frame instead"
            if channel.stage == EXPECT_HEADER or channel.stage == SWALLOW_HEADER
            else "expected content body, got non content body frame instead",
            CLASS_BASIC,
            BASIC_PUBLISH,
        )


cdef str _octets(const uint8_t *p, uint32_t n):
    """The first bytes of a payload, written as Erlang does."""
    cdef str count = "all" if n <= 16 else "first 16"
    cdef bytes start = p[:min(n, <uint32_t>16)]
    if start and start.isascii() and start.decode("ascii").isprintable():
        return f'{count} octets = <<"{start.decode("ascii")}">>'
    return f"{count} octets = <<{','.join(map(str, start))}>>"
