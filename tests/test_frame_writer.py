"""AMQP 0-9-1, outbound: pamqp reads what is written as it was meant, and where it can it writes the same bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, frame, header, heartbeat

from warren.kernel.entry import Entry
from warren.kernel.frames import (
    HEARTBEAT_FRAME,
    FrameScanner,
    ack_frame,
    content,
    deliveries,
    method_frame,
    nack_frame,
    publishes,
)
from warren.kernel.ranges import RangeSet
from warren.queueing.properties import encode_head

NO_PROPERTIES = b"\0\0"
FRAME_MAX = 4096
Basic = commands.Basic

bodies = st.binary(max_size=40) | st.integers(0, 3 * FRAME_MAX).map(bytes)


def short(text: bytes) -> bytes:
    return bytes((len(text),)) + text


def a_frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def frames_of(data: bytes) -> list[tuple[int, object]]:
    """What pamqp reads: (channel, frame) each."""
    found = []
    while data:
        size, channel, value = frame.unmarshal(data)
        assert size <= FRAME_MAX or not isinstance(value, body.ContentBody)
        found.append((channel, value))
        data = data[size:]
    return found


@given(
    st.integers(1, 65535),
    st.text(max_size=20),
    st.integers(0, 2**62),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["", "amq.topic"]), st.sampled_from(["", "k"]), bodies)),
    st.integers(0, 9),
    st.sets(st.integers(0, 9)),
    st.sampled_from([0, FRAME_MAX, 100]),
)  # fmt: skip
def test_deliveries_are_read_by_another_program_as_they_were_meant(
    channel, tag, first, messages, below, returned, frame_max
):
    entries = [
        Entry(seq, encode_head(exchange, key, persistent=True, priority=seq), payload)
        for seq, exchange, key, payload in messages
    ]
    again = RangeSet([number for seq in returned for number in (seq, 1)])
    data = deliveries(channel, tag.encode(), first, entries, below, again, frame_max)
    limit = frame_max - 8 if frame_max else 2**31
    at = 0
    found = []
    while at < len(data):
        size, number, value = frame.unmarshal(data[at:])
        assert number == channel
        assert not isinstance(value, body.ContentBody) or 0 < len(value) <= limit
        found.append(value)
        at += size
    for number, (seq, exchange, key, payload) in enumerate(messages):
        method, head = found.pop(0), found.pop(0)
        assert isinstance(method, Basic.Deliver)
        assert (method.consumer_tag, method.delivery_tag) == (tag, first + number)
        assert (method.exchange, method.routing_key) == (exchange, key)
        assert method.redelivered is (seq < below or seq in returned)
        assert isinstance(head, header.ContentHeader)
        assert head.body_size == len(payload)
        assert (head.properties.delivery_mode, head.properties.priority) == (2, seq)
        parts = [found.pop(0).value for _ in range(-(-len(payload) // limit))]
        assert b"".join(parts) == payload
        assert all(len(part) == limit for part in parts[:-1])
    assert found == []


def test_what_a_scanner_took_is_delivered_byte_for_byte():
    properties = encode_head("", "", persistent=True, priority=9, type="t", headers={"a": [1, {}]})[2:]
    [(*_, entries)] = FrameScanner().feed(publishes(1, b"ex\xff", b"key", 0, properties, [b"hello"], 0), 0)
    deliver = struct.pack(">HH", 60, 60) + short(b"tag") + struct.pack(">QB", 1, 0) + short(b"ex\xff") + short(b"key")
    assert deliveries(5, b"tag", 1, entries, 0, RangeSet(), FRAME_MAX) == (
        a_frame(1, 5, deliver) + a_frame(2, 5, struct.pack(">HHQ", 60, 0, 5) + properties) + a_frame(3, 5, b"hello")
    )


def test_nothing_to_deliver_is_no_bytes():
    assert deliveries(1, b"", 1, [], 0, RangeSet(), FRAME_MAX) == b""


def test_deliveries_refuse_what_cannot_be_sent():
    head = encode_head("", "q", persistent=True)
    with pytest.raises(TypeError, match="no body in RAM"):
        deliveries(1, b"t", 1, [Entry(1, head, None)], 0, RangeSet(), 0)
    with pytest.raises(TypeError, match="must be in RAM"):
        deliveries(1, b"t", 1, [Entry(1, None, None)], 0, RangeSet(), 0)
    with pytest.raises(ValueError, match="no message head"):
        deliveries(1, b"t", 1, [Entry(1, b"\x05ab", b"")], 0, RangeSet(), 0)
    with pytest.raises(ValueError, match="up to 255 bytes, not 256"):
        deliveries(1, b"t" * 256, 1, [], 0, RangeSet(), 0)
    with pytest.raises(ValueError, match="frame_max is 8"):
        deliveries(1, b"t", 1, [], 0, RangeSet(), 8)
    with pytest.raises(TypeError):
        deliveries(1, b"t", 1, [object()], 0, RangeSet(), 0)  # type: ignore[list-item]


@pytest.mark.parametrize("size", [0, 1, FRAME_MAX - 8, FRAME_MAX - 7, 3 * FRAME_MAX])
def test_get_ok_and_return_carry_their_content(size):
    head = encode_head("amq.topic", "k", persistent=False)
    for value in (
        Basic.GetOk(delivery_tag=7, redelivered=True, exchange="amq.topic", routing_key="k", message_count=3),
        Basic.Return(reply_code=312, reply_text="NO_ROUTE", exchange="amq.topic", routing_key="k"),
    ):
        payload = struct.pack(">I", value.index) + value.marshal()
        found = frames_of(content(3, payload, head, b"x" * size, FRAME_MAX))
        assert {channel for channel, _ in found} == {3}
        method, head_frame, *parts = (item for _, item in found)
        assert dict(method) == dict(value)
        assert head_frame.body_size == size
        assert b"".join(part.value for part in parts) == b"x" * size
        assert len(parts) == -(-size // (FRAME_MAX - 8))


@pytest.mark.parametrize("multiple", [False, True])
@pytest.mark.parametrize("tag", [1, 2**63 - 1])
def test_confirms_are_the_bytes_of_another_program(tag, multiple):
    assert ack_frame(4, tag, multiple) == frame.marshal(Basic.Ack(tag, multiple), 4)
    assert nack_frame(4, tag, multiple) == frame.marshal(Basic.Nack(tag, multiple), 4)


def test_methods_and_heartbeats_are_the_bytes_of_another_program():
    value = commands.Queue.DeclareOk("orders", 3, 0)
    assert method_frame(2, struct.pack(">I", value.index) + value.marshal()) == frame.marshal(value, 2)
    assert frame.marshal(heartbeat.Heartbeat(), 0) == HEARTBEAT_FRAME


def test_publishes_are_the_bytes_of_another_program():
    properties = Basic.Properties(delivery_mode=2, content_type="text/plain")
    payloads = [b"", b"x", bytes(FRAME_MAX - 8), bytes(FRAME_MAX)]
    expected = b"".join(
        frame.marshal(Basic.Publish(exchange="amq.topic", routing_key="k", mandatory=True), 6)
        + frame.marshal(header.ContentHeader(body_size=len(payload), properties=properties), 6)
        + b"".join(
            frame.marshal(body.ContentBody(payload[at : at + FRAME_MAX - 8]), 6)
            for at in range(0, len(payload), FRAME_MAX - 8)
        )
        for payload in payloads
    )
    assert publishes(6, b"amq.topic", b"k", 1, properties.marshal(), payloads, FRAME_MAX) == expected


def test_publishes_refuse_what_cannot_be_sent():
    with pytest.raises(ValueError, match="not 256"):
        publishes(1, b"e" * 256, b"", 0, NO_PROPERTIES, [], 0)
    with pytest.raises(ValueError, match="two bytes of flags"):
        publishes(1, b"", b"", 0, b"", [], 0)
    with pytest.raises(TypeError, match="not str"):
        publishes(1, b"", b"", 0, NO_PROPERTIES, ["text"], 0)  # type: ignore[list-item]
