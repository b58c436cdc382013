# cython: language_level=3
"""AMQP 0-9-1 as a client receives it: deliveries and confirms in bulk, all else as methods.

Rules:

1. One call a receive buffer. A delivery that is only counted becomes no Python object at all, not even its body; one that
   is collected becomes its body. What came together on a channel is one event.
2. Nothing is copied but what is kept: the caller owns the buffer, and keeps the frame at its end that was cut.
3. Confirms are reckoned here, because a broker may send them out of order and singly: `floor` is the number up to which
   everything is settled.
4. What a broker may not send raises ValueError, and the connection is of no use from then on.

A stamped body begins with eight bytes, microseconds of the caller's clock: its age goes into a table of buckets, which are
exact below 64 us and a 32nd of their value wide above (`bucket_start`).
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from warren.kernel.wire cimport (
    BASIC_ACK, BASIC_DELIVER, BASIC_NACK, CLASS_BASIC, CONTENT_BYTES, FRAME_BODY, FRAME_BYTES, FRAME_END, FRAME_HEADER,
    FRAME_HEARTBEAT, FRAME_METHOD, HEADER_BYTES, put8, put16, put32, put64, read16, read32, read64,
)

# The first member of an event.
cdef enum:
    _METHOD = 1
    _DELIVERIES = 2
    _CONFIRMS = 3
    _CONTENT = 4

METHOD = _METHOD
DELIVERIES = _DELIVERIES
CONFIRMS = _CONFIRMS
CONTENT = _CONTENT

cdef enum:
    BASIC_RETURN = 50
    BASIC_GET_OK = 71
    ACK_BYTES = FRAME_BYTES + 13

    EXACT_BUCKETS = 64
    EXACT_BITS = 6
    STEPS = 32              # buckets between two powers of two
    STEP_BITS = 5
    HIGHEST_BIT = 40        # 2^41 us are 25 days
    BUCKETS = EXACT_BUCKETS + (HIGHEST_BIT - EXACT_BITS + 1) * STEPS

cdef enum:
    EXPECT_METHOD = 0
    EXPECT_HEADER = 1
    EXPECT_BODY = 2


cdef Py_ssize_t bucket_of(uint64_t value) noexcept nogil:
    cdef int bit = EXACT_BITS
    if value < EXACT_BUCKETS:
        return <Py_ssize_t>value
    while value >> (bit + 1) and bit < HIGHEST_BIT:
        bit += 1
    if value >> (bit + 1):
        return BUCKETS - 1
    return EXACT_BUCKETS + (bit - EXACT_BITS) * STEPS + ((value >> (bit - STEP_BITS)) & (STEPS - 1))


def bucket(uint64_t value):
    """The number of the bucket that a value falls into."""
    return bucket_of(value)


def bucket_start(Py_ssize_t number):
    """The least value of a bucket."""
    if not 0 <= number < BUCKETS:
        raise ValueError(f"there are {BUCKETS} buckets; {number} is none")
    if number < EXACT_BUCKETS:
        return number
    bit, step = divmod(number - EXACT_BUCKETS, STEPS)
    return (STEPS + step) << (bit + EXACT_BITS - STEP_BITS)


def ack_frames(uint16_t channel, uint64_t acked, uint64_t last, uint64_t every):
    """basic.ack for each `every` tags above `acked` up to `last`: what a client sends that acks after so many messages.

    Returns the frames and the tag up to which everything is acked by them.
    """
    cdef uint64_t count, number
    cdef bytes out
    cdef uint8_t *p
    if every == 0:
        raise ValueError("acks after every 0 messages: there is nothing to send")
    count = (last - acked) // every if last > acked else 0
    out = PyBytes_FromStringAndSize(NULL, count * ACK_BYTES)
    p = <uint8_t *>PyBytes_AS_STRING(out)
    for number in range(count):
        acked += every
        p = put32(put16(put8(p, FRAME_METHOD), channel), 13)
        p = put64(put16(put16(p, CLASS_BASIC), BASIC_ACK), acked)
        p = put8(put8(p, every > 1), FRAME_END)
    return out, acked


@cython.final
cdef class _Channel:
    """What is under way on a channel, and what of it is not told yet."""

    cdef uint16_t number
    cdef int stage
    cdef bint collecting            # bodies of deliveries are kept
    cdef bint delivering            # the content that is under way is of a basic.deliver
    cdef uint64_t announced
    cdef uint64_t received
    cdef uint32_t method_id         # of other content, with its method and properties
    cdef bytes method
    cdef bytes properties
    cdef bytes body                 # the only frame of it, else
    cdef bytearray parts

    cdef uint64_t tag               # of the delivery that is under way or the last one
    cdef bint redelivered
    cdef uint64_t batch             # deliveries that are not told yet, their bytes, how many came before
    cdef uint64_t batch_bytes
    cdef uint64_t batch_redelivered
    cdef list bodies

    cdef uint64_t floor             # every publish up to it is settled
    cdef set above                  # those that are settled above
    cdef uint64_t settled           # not told yet
    cdef list nacked                # ranges, first and last

    def __cinit__(self, uint16_t number):
        self.number = number
        self.above = set()
        self.nacked = []

    cdef int settle(self, uint64_t tag, bint multiple, bint nack) except -1:
        cdef uint64_t each
        if tag <= self.floor or (not multiple and tag in self.above):
            raise ValueError(f"channel {self.number}: publish {tag} was confirmed twice")
        if not multiple:
            self.settled += 1
            if nack:
                self.nacked.append((tag, tag))
            if tag != self.floor + 1:
                self.above.add(tag)
                return 0
            self.floor = tag
        elif not self.above:
            self.settled += tag - self.floor
            if nack:
                self.nacked.append((self.floor + 1, tag))
            self.floor = tag
        else:
            # Over those that are settled already, not over all below the tag: a broker may send any number.
            for each in sorted([each for each in self.above if each <= tag]):
                self.settle_between(self.floor, each, nack)
                self.above.discard(each)
                self.floor = each
            if self.floor < tag:
                self.settled += tag - self.floor
                if nack:
                    self.nacked.append((self.floor + 1, tag))
                self.floor = tag
        while self.above and self.floor + 1 in self.above:
            self.floor += 1
            self.above.discard(self.floor)
        return 0


    cdef int settle_between(self, uint64_t low, uint64_t high, bint nack) except -1:
        """All publishes above `low` and below `high`."""
        if high - low > 1:
            self.settled += high - low - 1
            if nack:
                self.nacked.append((low + 1, high - 1))
        return 0


@cython.final
cdef class ClientScanner:
    """Reads what a broker sends to one connection. Events are tuples:

    - (METHOD, channel, class id, method id, arguments)
    - (DELIVERIES, channel, last delivery tag, count, bytes of bodies, how many redelivered, bodies or None)
    - (CONFIRMS, channel, newly settled, floor, [(first, last) of those that were nacked])
    - (CONTENT, channel, method id, arguments, properties, body): basic.return and basic.get-ok

    Deliveries and confirms of a channel come before the methods that followed them.
    """

    cdef readonly Py_ssize_t consumed   # bytes of the last buffer that were whole frames
    cdef public uint32_t frame_max
    cdef public bint stamped
    cdef dict channels
    cdef _Channel last
    cdef _Channel delivering            # has deliveries that are not told yet
    cdef _Channel confirming
    cdef list events
    cdef uint64_t ages[BUCKETS]

    def __init__(self, uint32_t frame_max=131072):
        self.frame_max = frame_max
        self.channels = {}
        self.events = []
        memset(self.ages, 0, sizeof(self.ages))

    def collect(self, uint16_t channel, bint wanted):
        """Whether the bodies of deliveries on this channel are kept, or only counted. Between two messages only."""
        self.channel(channel).collecting = wanted

    def forget(self, uint16_t channel):
        """The channel is closed: a new one of this number begins at 1 again."""
        self.flush()
        self.channels.pop(channel, None)
        self.last = None

    def ages_counted(self):
        """How many stamped bodies had an age in each bucket."""
        cdef Py_ssize_t number
        return [self.ages[number] for number in range(BUCKETS)]

    def scan(self, buffer, Py_ssize_t end, uint64_t now):
        """The events of the whole frames before `end`. `consumed` says where the first one that was cut begins."""
        cdef Py_buffer view
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if not 0 <= end <= view.len:
                raise ValueError(f"the buffer has {view.len} bytes, not {end}")
            self.scan_frames(<const uint8_t *>view.buf, end, now)
        finally:
            PyBuffer_Release(&view)
        self.flush()
        events, self.events = self.events, []
        return events

    cdef _Channel channel(self, uint16_t number):
        cdef _Channel channel = self.last
        if channel is not None and channel.number == number:
            return channel
        channel = <_Channel>self.channels.get(number)
        if channel is None:
            channel = self.channels[number] = _Channel(number)
        self.last = channel
        return channel

    cdef int scan_frames(self, const uint8_t *p, Py_ssize_t end, uint64_t now) except -1:
        cdef Py_ssize_t at = 0, size
        cdef const uint8_t *payload
        cdef _Channel channel
        cdef uint8_t kind
        self.consumed = 0
        while end - at >= HEADER_BYTES:
            kind = p[at]
            size = read32(p + at + 3)
            if self.frame_max and size + FRAME_BYTES > self.frame_max:
                raise ValueError(f"a frame of {size + FRAME_BYTES} bytes, and frame_max is {self.frame_max}")
            if end - at < size + FRAME_BYTES:
                break
            payload = p + at + HEADER_BYTES
            if payload[size] != FRAME_END:
                raise ValueError(f"a frame ends in {payload[size]:#04x}, not in 0xce")
            if kind != FRAME_HEARTBEAT:
                channel = self.channel(read16(p + at + 1))
                if kind == FRAME_METHOD:
                    self.method(channel, payload, size)
                elif kind == FRAME_HEADER:
                    self.header(channel, payload, size)
                elif kind == FRAME_BODY:
                    self.body(channel, payload, size, now)
                else:
                    raise ValueError(f"a frame of type {kind}")
            at += size + FRAME_BYTES
            self.consumed = at
        return 0

    cdef int method(self, _Channel channel, const uint8_t *p, Py_ssize_t n) except -1:
        cdef uint32_t class_id, method_id
        cdef Py_ssize_t at
        if channel.stage != EXPECT_METHOD:
            raise ValueError(f"channel {channel.number}: a method in the middle of a message")
        if n < 4:
            raise ValueError(f"a method of {n} bytes")
        class_id = read16(p)
        method_id = read16(p + 2)
        if class_id == CLASS_BASIC:
            if method_id == BASIC_DELIVER:
                at = 5 + p[4] if n > 4 else n
                if n - at < 9:
                    raise ValueError("a basic.deliver that ends in the middle")
                if self.delivering is not channel:
                    self.flush()
                channel.tag = read64(p + at)
                channel.redelivered = p[at + 8] & 1
                channel.delivering = True
                channel.stage = EXPECT_HEADER
                return 0
            if method_id == BASIC_ACK or method_id == BASIC_NACK:
                if n < 13:
                    raise ValueError("a confirm that ends in the middle")
                if self.confirming is not channel:
                    self.flush()
                    self.confirming = channel
                channel.settle(read64(p + 4), p[12] & 1, method_id == BASIC_NACK)
                return 0
            if method_id == BASIC_RETURN or method_id == BASIC_GET_OK:
                channel.method_id = method_id
                channel.method = PyBytes_FromStringAndSize(<const char *>p + 4, n - 4)
                channel.delivering = False
                channel.stage = EXPECT_HEADER
                return 0
        self.flush()
        arguments = PyBytes_FromStringAndSize(<const char *>p + 4, n - 4)
        self.events.append((_METHOD, channel.number, class_id, method_id, arguments))
        return 0

    cdef int header(self, _Channel channel, const uint8_t *p, Py_ssize_t n) except -1:
        if channel.stage != EXPECT_HEADER or n < CONTENT_BYTES + 2:
            raise ValueError(f"channel {channel.number}: a content header of {n} bytes that nothing announced")
        channel.announced = read64(p + 4)
        channel.received = 0
        channel.body = b""
        channel.parts = None
        channel.stage = EXPECT_BODY
        if not channel.delivering:
            channel.properties = PyBytes_FromStringAndSize(<const char *>p + CONTENT_BYTES, n - CONTENT_BYTES)
        if channel.announced == 0:
            self.complete(channel)
        return 0

    cdef int body(self, _Channel channel, const uint8_t *p, Py_ssize_t n, uint64_t now) except -1:
        cdef uint64_t stamp
        if channel.stage != EXPECT_BODY or <uint64_t>n > channel.announced - channel.received:
            raise ValueError(f"channel {channel.number}: {n} bytes of a body that nothing announced")
        if self.stamped and channel.delivering and channel.received == 0 and n >= 8:
            stamp = read64(p)
            self.ages[bucket_of(now - stamp if now > stamp else 0)] += 1
        if channel.collecting or not channel.delivering:
            if <uint64_t>n == channel.announced:
                channel.body = PyBytes_FromStringAndSize(<const char *>p, n)
            else:
                if channel.parts is None:
                    channel.parts = bytearray()
                channel.parts += PyBytes_FromStringAndSize(<const char *>p, n)
        channel.received += n
        if channel.received == channel.announced:
            self.complete(channel)
        return 0

    cdef int complete(self, _Channel channel) except -1:
        channel.stage = EXPECT_METHOD
        if channel.parts is not None:
            channel.body = bytes(channel.parts)
            channel.parts = None
        if not channel.delivering:
            self.flush()
            self.events.append(
                (_CONTENT, channel.number, channel.method_id, channel.method, channel.properties, channel.body)
            )
            return 0
        if self.delivering is not channel:
            self.flush()
            self.delivering = channel
        channel.batch += 1
        channel.batch_bytes += channel.announced
        channel.batch_redelivered += channel.redelivered
        if channel.collecting:
            if channel.bodies is None:
                channel.bodies = []
            channel.bodies.append(channel.body)
        return 0

    cdef int flush(self) except -1:
        """Tell of the deliveries and confirms that were counted so far."""
        cdef _Channel channel = self.delivering
        cdef uint64_t last
        if channel is not None:
            self.delivering = None
            # One that is under way has its tag already; tags of a channel have no gaps.
            last = channel.tag - (channel.stage != EXPECT_METHOD and channel.delivering)
            self.events.append(
                (_DELIVERIES, channel.number, last, channel.batch, channel.batch_bytes, channel.batch_redelivered,
                 channel.bodies)
            )
            channel.batch = channel.batch_bytes = channel.batch_redelivered = 0
            channel.bodies = None
        channel = self.confirming
        if channel is not None:
            self.confirming = None
            self.events.append((_CONFIRMS, channel.number, channel.settled, channel.floor, channel.nacked))
            channel.settled = 0
            channel.nacked = []
        return 0
