from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef class Entry:
    cdef public object head             # bytes: exchange, routing key, raw AMQP properties; None when only on disk
    cdef public object body             # bytes; None when only on disk
    cdef public object msg_id           # 16 bytes when the payload lives in a message store, else None
    cdef public uint64_t seq            # the place in the queue, given once and for ever
    cdef public uint64_t expiry         # microseconds since the epoch; 0: never
    cdef public uint64_t published_at   # microseconds since the epoch
    cdef public uint64_t offset         # of the record in the segment's .qs, valid with IN_QS
    cdef public uint32_t size           # payload bytes: 4 + head + body; what it takes in RAM and on disk
    cdef public uint8_t flags
    cdef public uint8_t level           # priority level, in a queue that has them
    cdef public uint32_t body_size      # body bytes: what limits and statistics count, as RabbitMQ's do


cdef class Delivery:
    cdef public Entry entry
    cdef public object queue
    cdef public uint32_t delivery_count
    cdef public bint redelivered
    cdef public bint settled


cpdef enum:
    PERSISTENT = 1   # survives a restart: the queue is durable and the message persistent
    IN_STORE = 2     # the payload is in a message store, under msg_id
    IN_QS = 4        # the payload is in the segment's .qs, at offset
    SLOTTED = 8      # the position is on disk, in the segment's .qi
