"""AMQP 0-9-1, inbound: what pamqp writes is read, and no bytes whatever bring the scanner down."""

from __future__ import annotations

import contextlib
import doctest
import itertools
import random
import struct
import sys
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pamqp import body, commands, frame, header, heartbeat

from warren.kernel.entry import PERSISTENT
from warren.kernel.frames import (
    ACK,
    HEARTBEAT,
    HEARTBEAT_FRAME,
    METHOD,
    PUBLISH,
    TOO_LARGE,
    FrameScanner,
    ack_frame,
    method_frame,
    publishes,
)
from warren.queueing.properties import MAX_TABLE_DEPTH, decode_head, encode_head

NO_PROPERTIES = b"\0\0"
FRAME_MAX = 4096
NOW = 1_700_000_000_000_000
Basic = commands.Basic


# ---- frames by hand ----


def a_frame(kind: int, channel: int, payload: bytes, end: bytes = b"\xce") -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


def publish_method(channel: int = 1, exchange: bytes = b"", key: bytes = b"orders", bits: int = 0) -> bytes:
    arguments = bytes(2) + bytes((len(exchange),)) + exchange + bytes((len(key),)) + key + bytes((bits,))
    return a_frame(1, channel, struct.pack(">HH", 60, 40) + arguments)


def content_header(size: int, properties: bytes = NO_PROPERTIES, channel: int = 1, class_id: int = 60, weight: int = 0):
    return a_frame(2, channel, struct.pack(">HHQ", class_id, weight, size) + properties)


def content_body(part: bytes, channel: int = 1) -> bytes:
    return a_frame(3, channel, part)


def short(text: bytes) -> bytes:
    return bytes((len(text),)) + text


def readable(events: list[tuple]) -> list[tuple]:
    """Events with neighbours that may be merged taken apart, and entries as what is in them: fit to be compared."""
    flat: list[tuple] = []
    for kind, *rest in events:
        if kind == PUBLISH:
            *route, entries = rest
            flat += [
                (kind, *route, e.seq, e.head, e.body, e.size, e.flags, e.level, e.published_at, e.expiry)
                for e in entries
            ]
        elif kind == ACK:
            flat += [(kind, rest[0], ack) for ack in rest[1]]
        else:
            flat.append((kind, *rest))
    return flat


def scan(data: bytes, **settings: int) -> tuple[list[tuple], FrameScanner]:
    scanner = FrameScanner(**settings)
    return scanner.feed(data, NOW), scanner


# ---- inbound: events ----


def test_a_publish_of_another_program_becomes_an_entry():
    properties = Basic.Properties(
        content_type="text/plain", headers={"a": [1, "b", None]}, delivery_mode=2, priority=7, message_id="m-1"
    )
    data = (
        frame.marshal(Basic.Publish(exchange="amq.topic", routing_key="orders.new", mandatory=True), 9)
        + frame.marshal(header.ContentHeader(body_size=5, properties=properties), 9)
        + frame.marshal(body.ContentBody(b"hello"), 9)
    )
    events, scanner = scan(data)
    assert scanner.error is None
    [(kind, channel, exchange, key, bits, flags, [entry])] = events
    assert (kind, channel, exchange, key, bits) == (PUBLISH, 9, "amq.topic", "orders.new", 1)
    assert flags == 0x8000 | 0x2000 | 0x1000 | 0x0800 | 0x0080
    assert entry.body == b"hello"
    assert entry.head == short(b"amq.topic") + short(b"orders.new") + properties.marshal()
    assert (entry.flags, entry.level, entry.seq, entry.expiry) == (PERSISTENT, 7, 0, 0)
    assert entry.published_at == NOW
    assert entry.size == 4 + len(entry.head) + 5
    assert decode_head(entry.head).properties["message_id"] == "m-1"
    assert scanner.buffered == 0


def test_a_head_from_the_network_is_the_head_that_the_library_stores():
    head = encode_head("", "orders", persistent=True, priority=3)
    events, _ = scan(publishes(1, b"", b"orders", 0, head[len(short(b"") + short(b"orders")) :], [b"x"], 0))
    assert events[0][6][0].head == head


def test_publishes_that_follow_each_other_to_one_place_are_one_event_and_share_their_head():
    bodies = [b"%d" % number for number in range(100)]
    events, _ = scan(publishes(1, b"ex", b"key", 2, b"\x10\x00\x02", bodies, FRAME_MAX))
    [(kind, channel, exchange, key, bits, flags, entries)] = events
    assert (kind, channel, exchange, key, bits, flags) == (PUBLISH, 1, "ex", "key", 2, 0x1000)
    assert [entry.body for entry in entries] == bodies
    assert len({id(entry.head) for entry in entries}) == 1


@pytest.mark.parametrize(
    "between",
    [
        publishes(1, b"ex", b"other", 0, NO_PROPERTIES, [b"-"], 0),
        publishes(1, b"other", b"key", 0, NO_PROPERTIES, [b"-"], 0),
        publishes(1, b"ex", b"key", 1, NO_PROPERTIES, [b"-"], 0),
        publishes(1, b"ex", b"key", 0, b"\x08\x00\x05", [b"-"], 0),
        publishes(2, b"ex", b"key", 0, NO_PROPERTIES, [b"-"], 0),
        ack_frame(1, 5, False),
        ack_frame(2, 5, False),
        HEARTBEAT_FRAME,
        method_frame(1, b"\0\x14\0\x28"),
    ],
    ids=["key", "exchange", "bits", "property flags", "channel", "ack", "ack elsewhere", "heartbeat", "method"],
)
def test_publishes_with_something_between_them_are_separate_events_in_order(between):
    one = publishes(1, b"ex", b"key", 0, NO_PROPERTIES, [b"1"], 0)
    two = publishes(1, b"ex", b"key", 0, NO_PROPERTIES, [b"2"], 0)
    events, scanner = scan(one + between + two)
    assert scanner.error is None
    assert len(events) == 3
    assert [entry.body for entry in events[0][6]] == [b"1"]
    assert [entry.body for entry in events[2][6]] == [b"2"]


def test_messages_with_other_values_of_the_same_properties_are_one_event_with_their_own_heads():
    data = b"".join(publishes(1, b"", b"q", 0, b"\x18\x00\x02" + bytes((level,)), [b"x"], 0) for level in (1, 9, 9))
    [(*_, entries)], _ = scan(data)
    assert [entry.level for entry in entries] == [1, 9, 9]
    assert [entry.head[-1] for entry in entries] == [1, 9, 9]
    assert entries[1].head is entries[2].head


def test_a_message_is_persistent_only_with_delivery_mode_2():
    for mode, flags in ((0, 0), (1, 0), (2, PERSISTENT), (3, 0)):
        events, _ = scan(publishes(1, b"", b"q", 0, b"\x10\x00" + bytes((mode,)), [b""], 0))
        assert events[0][6][0].flags == flags


def test_names_that_are_not_utf8_come_back_as_they_were():
    events, _ = scan(publishes(1, b"\xff\xfe", "käse".encode() + b"\x80", 0, NO_PROPERTIES, [b""], 0))
    assert events[0][2].encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert events[0][3].encode("utf-8", "surrogateescape") == "käse".encode() + b"\x80"


def test_acks_that_follow_each_other_are_one_event():
    tags = [1, 2, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
    data = b"".join(ack_frame(3, tag, tag == 2) for tag in tags)
    events, _ = scan(data + ack_frame(4, 1, True) + ack_frame(3, 9, False))
    assert events == [(ACK, 3, [2 * tag + (tag == 2) for tag in tags]), (ACK, 4, [3]), (ACK, 3, [18])]


def test_other_methods_are_handed_on_raw():
    declare = commands.Queue.Declare(queue="orders", durable=True)
    events, _ = scan(frame.marshal(declare, 2) + frame.marshal(commands.Connection.CloseOk(), 0))
    assert events == [(METHOD, 2, 50, 10, declare.marshal()), (METHOD, 0, 10, 51, b"")]


def test_publish_and_ack_on_channel_0_are_left_to_the_connection():
    events, scanner = scan(publish_method(0) + ack_frame(0, 1, False))
    assert [event[:4] for event in events] == [(METHOD, 0, 60, 40), (METHOD, 0, 60, 80)]
    assert scanner.error is None


def test_a_heartbeat_is_an_event():
    assert scan(frame.marshal(heartbeat.Heartbeat(), 0))[0] == [(HEARTBEAT,)]


def test_an_empty_message_is_complete_with_its_header():
    events, scanner = scan(publish_method() + content_header(0))
    assert [entry.body for entry in events[0][6]] == [b""]
    assert scanner.feed(publish_method() + content_header(0), NOW)[0][6][0].body == b""


def test_contents_of_several_channels_may_be_mixed():
    data = (
        publish_method(1, key=b"a")
        + publish_method(2, key=b"b")
        + content_header(4, channel=2)
        + content_header(6, channel=1)
        + content_body(b"12", 1)
        + content_body(b"ab", 2)
        + content_body(b"", 1)
        + HEARTBEAT_FRAME
        + content_body(b"3456", 1)
        + content_body(b"cd", 2)
    )
    events, scanner = scan(data)
    assert scanner.error is None
    assert [event[0] for event in events] == [HEARTBEAT, PUBLISH, PUBLISH]
    assert [(event[1], event[3], event[6][0].body) for event in events[1:]] == [(1, "a", b"123456"), (2, "b", b"abcd")]
    assert scanner.buffered == 0


def test_a_body_of_many_frames_is_joined_and_held_by_nobody_else():
    whole = random.Random(1).randbytes(100_000)
    data = b"".join(content_body(whole[at : at + 77]) for at in range(0, len(whole), 77))
    events, scanner = scan(publish_method() + content_header(len(whole)) + data)
    joined = events[0][6][0].body
    assert joined == whole
    del events
    assert sys.getrefcount(joined) == 2
    assert scanner.buffered == 0


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_fed(kind):
    assert scan(kind(ack_frame(1, 1, False)))[0] == [(ACK, 1, [2])]


# ---- inbound: limits ----


def test_a_message_that_is_too_large_is_told_once_and_swallowed():
    scanner = FrameScanner(max_message_size=10)
    assert scanner.feed(publish_method() + content_header(11), NOW) == [(TOO_LARGE, 1, 11)]
    assert scanner.feed(content_body(b"12345"), NOW) == []
    assert scanner.buffered == 0
    events = scanner.feed(content_body(b"678901") + publishes(1, b"", b"q", 0, NO_PROPERTIES, [b"1234567890"], 0), NOW)
    assert [event[0] for event in events] == [PUBLISH]
    assert scanner.error is None


def test_a_client_may_leave_a_message_that_is_too_large_unfinished():
    for method in (b"\0\x14\0\x28", b"\0\x14\0\x29"):
        data = publish_method() + content_header(11) + content_body(b"12345") + method_frame(1, method)
        events, scanner = scan(data, max_message_size=10)
        assert [event[0] for event in events] == [TOO_LARGE, METHOD]
        assert scanner.error is None


def test_the_message_limit_can_be_set_later():
    scanner = FrameScanner()
    assert scanner.max_message_size == 134217728
    scanner.max_message_size = 2
    assert scanner.feed(publish_method() + content_header(3), NOW) == [(TOO_LARGE, 1, 3)]


def test_no_setting_lets_sizes_run_over_the_32_bits_of_an_entry():
    scanner = FrameScanner(frame_max=0, max_message_size=2**64)
    assert scanner.max_message_size <= 2**31
    assert scanner.feed(publish_method() + content_header(2**32 + 1), NOW) == [(TOO_LARGE, 1, 2**32 + 1)]
    scanner.feed(struct.pack(">BHI", 3, 1, 2**32 - 1), NOW)
    assert scanner.error is not None


def test_a_frame_of_just_the_agreed_size_passes_and_one_byte_more_does_not():
    head = publish_method() + content_header(100_000)
    events, scanner = scan(head + content_body(bytes(FRAME_MAX - 8)), frame_max=FRAME_MAX)
    assert (events, scanner.error) == ([], None)
    # Its first seven bytes are enough.
    _, scanner = scan(head + content_body(bytes(FRAME_MAX - 7))[:7], frame_max=FRAME_MAX)
    assert scanner.error == (
        501, "type 3, all octets = <<>>: {frame_too_large,4089,4088}", 0, 0
    )  # fmt: skip
    _, scanner = scan(head + content_body(bytes(90_000)), frame_max=0)
    assert scanner.error is None


def test_the_frame_limit_can_be_set_after_tuning():
    scanner = FrameScanner(frame_max=FRAME_MAX)
    scanner.frame_max = 8192
    assert scanner.feed(method_frame(0, bytes(8000)), NOW)[0][0] == METHOD


def test_an_announced_body_takes_no_memory_before_it_comes():
    scanner = FrameScanner(frame_max=0)
    tracemalloc.start()
    try:
        scanner.feed(publish_method() + content_header(128 << 20) + content_body(b"x" * 10), NOW)
        scanner.feed(struct.pack(">BHI", 3, 1, 100 << 20) + b"y" * 100, NOW)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert scanner.buffered == len(short(b"") + short(b"orders") + NO_PROPERTIES) + 10 + 107


def test_a_huge_frame_in_small_pieces_takes_linear_time(scale):
    size = scale.scale(64) << 20
    data = memoryview(publish_method() + content_header(size) + content_body(bytes(size)))
    scanner = FrameScanner(frame_max=0)
    events = []
    for at in range(
        0, len(data), 2048
    ):  # copying all that came with each piece would not end before the test's timeout
        events += scanner.feed(data[at : at + 2048], NOW)
    assert len(events[0][6][0].body) == size
    assert scanner.buffered == 0


def test_what_is_kept_for_later_is_counted():
    scanner = FrameScanner()
    head = len(short(b"") + short(b"orders") + NO_PROPERTIES)
    scanner.feed(publish_method() + content_header(10), NOW)
    assert scanner.buffered == head
    scanner.feed(content_body(b"1234"), NOW)
    assert scanner.buffered == head + 4
    scanner.feed(b"\x03\0\1", NOW)
    assert scanner.buffered == head + 4 + 3
    scanner.feed(content_body(b"567890")[3:], NOW)
    assert scanner.buffered == 0


def test_a_forgotten_channel_begins_anew():
    scanner = FrameScanner()
    scanner.feed(publish_method() + content_header(10) + content_body(b"1234"), NOW)
    scanner.feed(publish_method(2) + content_header(10, channel=2), NOW)
    scanner.forget(1)
    scanner.forget(3)
    scanner.forget(2)
    assert scanner.buffered == 0
    events = scanner.feed(publishes(1, b"", b"orders", 0, NO_PROPERTIES, [b"x"], 0), NOW)
    assert [entry.body for entry in events[0][6]] == [b"x"]
    assert scanner.error is None


@pytest.mark.parametrize("sent", range(1, 5))
def test_the_rest_of_a_message_on_a_channel_that_was_closed_meanwhile_is_swallowed(sent):
    """The client publishes on until it has seen channel.close, and that is no error."""
    message = [publish_method(), content_header(6), content_body(b"123"), content_body(b"456")]
    scanner = FrameScanner()
    scanner.feed(b"".join(message[:sent]), NOW)
    scanner.forget(1)
    scanner.forget(1)
    assert scanner.buffered == 0
    assert scanner.feed(b"".join(message[sent:]), NOW) == []
    events = scanner.feed(b"".join(message) + method_frame(1, b"\0\x14\0\x29"), NOW)
    assert [event[0] for event in events] == [PUBLISH, METHOD]
    assert (scanner.error, scanner.buffered) == (None, 0)


@pytest.mark.parametrize("sent", range(1, 4))
def test_a_message_on_a_channel_that_was_closed_meanwhile_may_stay_unfinished(sent):
    message = [publish_method(), content_header(6), content_body(b"123")]
    scanner = FrameScanner()
    scanner.feed(b"".join(message[:sent]), NOW)
    scanner.forget(1)
    assert [event[0] for event in scanner.feed(method_frame(1, b"\0\x14\0\x29"), NOW)] == [METHOD]
    assert scanner.error is None


@pytest.mark.parametrize(
    ("sent", "out_of_turn"),
    [(publish_method(), content_body(b"x")), (publish_method() + content_header(6), content_header(6))],
    ids=["body before header", "two headers"],
)
def test_what_is_swallowed_must_still_be_in_turn(sent, out_of_turn):
    scanner = FrameScanner()
    scanner.feed(sent, NOW)
    scanner.forget(1)
    assert scanner.feed(out_of_turn, NOW) == []
    assert scanner.error is not None
    assert scanner.error[0] == 505


def test_a_long_head_is_not_kept_when_its_message_is_done():
    long_head = b"\x20\0" + struct.pack(">I", 5005 + 2) + b"\1a" + b"S" + struct.pack(">I", 5000) + bytes(5000)
    events, scanner = scan(publishes(1, b"", b"q", 0, long_head, [b"x", b"y"], 0))
    assert scanner.error is None
    one, two = (entry.head for entry in events[0][6])
    assert one == two
    del events
    assert sys.getrefcount(two) == 2


# ---- inbound: errors ----

EXPECTED_METHOD = (505, "expected method frame, got non method frame instead", 0, 0)
EXPECTED_HEADER = (
    505,
    "expected content header for class 60, got non content header frame instead",
    60,
    40,
)
EXPECTED_BODY = (505, "expected content body, got non content body frame instead", 60, 40)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (content_header(1), EXPECTED_METHOD),
        (content_body(b"x"), EXPECTED_METHOD),
        (publishes(1, b"", b"q", 0, NO_PROPERTIES, [b"x"], 0) + content_body(b"x"), EXPECTED_METHOD),
        (publish_method() + content_body(b"x"), EXPECTED_HEADER),
        (publish_method() + publish_method(), EXPECTED_HEADER),
        (publish_method() + ack_frame(1, 1, False), EXPECTED_HEADER),
        (publish_method() + content_header(2) + content_header(2), EXPECTED_BODY),
        (publish_method() + content_header(2) + method_frame(1, b"\0\x14\0\x28"), EXPECTED_BODY),
        (publish_method() + content_header(2) + content_body(b"x") + publish_method(), EXPECTED_BODY),
        (
            publish_method() + content_header(2, class_id=50),
            (505, "expected content header for class 60, got one for class 50 instead", 60, 40),
        ),
        (
            publish_method() + content_header(2, weight=1),
            (501, "content header with weight 1, it must be 0", 60, 40),
        ),
        (
            publish_method() + content_header(2) + content_body(b"123"),
            (501, "content body frame exceeds remaining content size", 60, 40),
        ),
        (
            publish_method() + content_header(2) + content_body(b"1") + content_body(b"23"),
            (501, "content body frame exceeds remaining content size", 60, 40),
        ),
        (
            publish_method() + content_header(2, b"\0"),
            (502, "malformed properties, all octets = <<0>>", 60, 40),
        ),
        (a_frame(8, 1, b""), (505, "type 8, all octets = <<>>", 0, 0)),
        (a_frame(8, 0, b"x"), (501, 'type 8, all octets = <<"x">>: unknown_frame', 0, 0)),
        (a_frame(3, 0, b"\1\2"), (505, "type 3, all octets = <<1,2>>", 0, 0)),
        (a_frame(4, 1, bytes(17)), (501, f"type 4, first 16 octets = <<{'0,' * 15}0>>: unknown_frame", 0, 0)),
        (a_frame(1, 1, b"\0\x3c\0"), (501, "type 1, all octets = <<0,60,0>>: unknown_frame", 0, 0)),
        (a_frame(2, 1, b"\0\x3c"), (501, "type 2, all octets = <<0,60>>: unknown_frame", 0, 0)),
        (
            a_frame(1, 1, b"\0\x14\0\x28", b"\xcd"),
            (501, "type 1, all octets = <<0,20,0,40>>: {invalid_frame_end_marker,205}", 0, 0),
        ),
        (a_frame(1, 1, b"\0\x3c\0\x50" + bytes(8)), (501, "cannot decode <<0,0,0,0,0,0,0,0>>", 60, 80)),
        (a_frame(1, 1, b"\0\x3c\0\x28" + b"\0\0\5ab"), (501, "cannot decode <<0,0,5,97,98>>", 60, 40)),
    ],
)  # fmt: skip
def test_what_the_protocol_forbids_is_a_connection_error_and_what_came_before_it_counts(data, error):
    before = ack_frame(7, 1, False)
    events, scanner = scan(before + data + before)
    assert events[0] == (ACK, 7, [2])
    assert all(event[0] != ACK for event in events[1:])
    assert scanner.error == error
    assert scanner.feed(before, NOW) == []
    assert scanner.buffered == 0


def test_the_text_of_an_error_does_not_grow_with_what_was_sent():
    _, scanner = scan(a_frame(1, 1, b"\0\x3c\0\x28" + b"\xff" * 3000))
    assert scanner.error is not None
    assert len(scanner.error[1]) < 600


@pytest.mark.parametrize(
    "arguments", [b"", b"\0\0", b"\0\0\0\0", b"\0\0\0\1\0", b"\0\0\0\0\0\0", b"\0\0\xff" + b"a" * 250]
)
def test_arguments_of_a_publish_that_end_too_early_or_too_late_are_refused(arguments):
    _, scanner = scan(a_frame(1, 1, b"\0\x3c\0\x28" + arguments))
    assert scanner.error is not None
    assert scanner.error[0] == 501
    assert scanner.error[2:] == (60, 40)


def test_frames_above_the_highest_channel_are_refused():
    scanner = FrameScanner()
    scanner.highest_channel = 2
    assert len(scanner.feed(ack_frame(2, 1, False) + ack_frame(3, 1, False), NOW)) == 1
    assert scanner.error == (504, "channel 3 is above the negotiated 2", 0, 0)


def test_before_a_connection_is_open_only_channel_0_is_heard():
    scanner = FrameScanner()
    scanner.highest_channel = 0
    assert len(scanner.feed(method_frame(0, b"\0\x0a\0\x0b") + content_body(b"x"), NOW)) == 1
    assert scanner.error == (505, 'type 3, all octets = <<"x">>', 0, 0)


# ---- inbound: properties ----


def taken(properties: bytes) -> bool:
    _, scanner = scan(publish_method() + content_header(0, properties))
    assert scanner.error is None or scanner.error[0] == 502
    return scanner.error is None


def readable_by_the_library(properties: bytes) -> bool:
    with contextlib.suppress(ValueError):
        decode_head(short(b"") + short(b"orders") + properties)
        return True
    return False


ALL_PROPERTIES = encode_head(
    "", "", persistent=True, priority=9, expiration_ms=5, content_type="text", content_encoding="gzip", type="t",
    correlation_id="c", reply_to="r", message_id="m", timestamp=1_700_000_000, user_id="u", app_id="a", cluster_id="x",
    headers={"list": [1, 2.5, None, True, b"raw", "text", 2**40, {"deep": [[], {}]}], "": {}},
)[2:]  # fmt: skip


def test_all_fourteen_properties_are_walked_over():
    events, scanner = scan(publishes(1, b"", b"", 0, ALL_PROPERTIES, [b"x"], 0))
    assert scanner.error is None
    entry = events[0][6][0]
    assert (entry.level, entry.flags) == (9, PERSISTENT)
    assert events[0][5] == 0xFFFC


def test_properties_that_end_anywhere_too_early_or_too_late_are_refused():
    assert taken(ALL_PROPERTIES)
    assert not any(taken(ALL_PROPERTIES[:size]) for size in range(len(ALL_PROPERTIES)))
    assert not taken(ALL_PROPERTIES + b"\0")


def test_flags_of_properties_that_do_not_exist_are_refused():
    assert not taken(b"\0\1")
    assert not taken(b"\0\1\0\0")
    assert not taken(b"\0\2")


def test_headers_may_be_in_each_other_as_deep_as_the_library_reads_them():
    for kind in (b"A", b"F"):
        for depth, expected in ((MAX_TABLE_DEPTH, True), (MAX_TABLE_DEPTH + 1, False), (5_000, False)):
            value = b""
            for _ in range(depth - 1):
                value = (b"\1a" if kind == b"F" else b"") + kind + struct.pack(">I", len(value)) + value
            if kind == b"A" and value:
                value = b"\1a" + value
            assert taken(b"\x20\0" + struct.pack(">I", len(value)) + value) is expected, (kind, depth)


@given(
    st.lists(st.tuples(st.integers(0, len(ALL_PROPERTIES) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, 3),
)
def test_the_scanner_takes_just_those_properties_that_the_library_can_read(changes, cut):
    properties = bytearray(ALL_PROPERTIES)
    for at, value in changes:
        properties[at] = value
    data = bytes(properties[: len(properties) - cut])
    assert taken(data) is readable_by_the_library(data)


@given(st.binary(max_size=40), st.sampled_from([0x2000, 0x2000 | 0x1000, 0x0040, 0x8000, 0xFFFC]))
def test_the_scanner_and_the_library_agree_on_arbitrary_properties(values, flags):
    data = struct.pack(">H", flags) + values
    assert taken(data) is readable_by_the_library(data)
    table = b"\x20\0" + struct.pack(">I", len(values)) + values
    assert taken(table) is readable_by_the_library(table)


# ---- inbound: all ways to cut and to break it ----

channels = st.sampled_from([1, 2, 65535])
bodies = st.binary(max_size=40) | st.integers(0, 3 * FRAME_MAX).map(bytes)
property_lists = st.sampled_from([NO_PROPERTIES, b"\x10\0\2", b"\x18\0\2\5", ALL_PROPERTIES])
names = st.sampled_from([b"", b"a", b"orders.new", b"\xff", b"n" * 255])
publishings = st.builds(
    publishes,
    channels,
    names,
    names,
    st.integers(0, 3),
    property_lists,
    st.lists(bodies, min_size=1, max_size=4),
    st.sampled_from([FRAME_MAX, 9, 64]),
)
others = st.one_of(
    st.builds(ack_frame, channels, st.integers(0, 2**64 - 1), st.booleans()),
    st.just(HEARTBEAT_FRAME),
    st.builds(method_frame, channels, st.binary(max_size=20).map(lambda arguments: b"\0\x32\0\x0a" + arguments)),
    st.builds(lambda channel: publish_method(channel) + content_header(2**40, channel=channel), channels).map(
        lambda too_large: too_large + method_frame(struct.unpack_from(">H", too_large, 1)[0], b"\0\x14\0\x28")
    ),
)
streams = st.lists(publishings | others, max_size=8).map(b"".join)


def cut_at(data: bytes, cuts: list[float]) -> list[bytes]:
    places = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(streams, st.lists(st.floats(0, 1), max_size=12))
def test_a_stream_means_the_same_wherever_it_is_cut(data, cuts):
    whole, scanner = scan(data)
    assert scanner.error is None
    assert scanner.buffered == 0
    in_parts = FrameScanner()
    events = [event for part in cut_at(data, cuts) for event in in_parts.feed(part, NOW)]
    assert readable(events) == readable(whole)
    assert (in_parts.error, in_parts.buffered) == (None, 0)


def test_a_stream_means_the_same_byte_by_byte():
    data = (
        publishes(1, b"ex", b"key", 1, ALL_PROPERTIES, [b"", b"x" * 100], 64)
        + HEARTBEAT_FRAME
        + ack_frame(1, 2**40, True)
    )
    whole, _ = scan(data)
    scanner = FrameScanner()
    events = [event for byte in data for event in scanner.feed(bytes((byte,)), NOW)]
    assert readable(events) == readable(whole)
    assert len(events) == 4


@given(
    streams,
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6),
    st.lists(st.floats(0, 1), max_size=4),
)
@example(b"", [(0.0, 0)], [])
def test_broken_bytes_end_in_events_or_an_error_and_mean_the_same_wherever_they_are_cut(data, changes, cuts):
    broken = bytearray(data)
    for place, value in changes:
        if broken:
            broken[int(place * len(broken))] = value
    whole, scanner = scan(bytes(broken))
    in_parts = FrameScanner()
    events = [event for part in cut_at(bytes(broken), cuts) for event in in_parts.feed(part, NOW)]
    assert readable(events) == readable(whole)
    assert (in_parts.error, in_parts.buffered) == (scanner.error, scanner.buffered)
    for event in events:
        if event[0] == PUBLISH:
            for entry in event[6]:
                decode_head(entry.head)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise(data):
    scan(data)
    scan(data, frame_max=0)
    scan(publish_method() + content_header(50) + data)


def test_the_example_of_the_scanner_is_right():
    runner = doctest.DocTestRunner()
    names = {"FrameScanner": FrameScanner, "publishes": publishes, "PUBLISH": PUBLISH}
    for test in doctest.DocTestFinder(recurse=False).find(FrameScanner, "FrameScanner", module=False, globs=names):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert runner.tries > 1
