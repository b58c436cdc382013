"""Messages of which not all has come: what they may cost, and whom they are refused."""

from __future__ import annotations

import struct
from typing import Any

import pamqp.base
import pamqp.body
import pamqp.commands
import pamqp.frame
import pamqp.header
import pytest

from tests.broker_clients import RawClient, eventually, unique
from warren.kernel.frames import PUBLISH, FrameScanner
from warren.testing import RunningBroker

MIB = 1024 * 1024


def a_frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def begun(channel: int, announced: int, part: bytes = b"", properties: bytes = b"\0\0") -> bytes:
    """A publish to the default exchange, as far as `part` of its body."""
    method = a_frame(1, channel, struct.pack(">HH", 60, 40) + b"\0\0\0\1q\0")
    header = a_frame(2, channel, struct.pack(">HHQ", 60, 0, announced) + properties)
    return method + header + (a_frame(3, channel, part) if part else b"")


# ---- the scanner ----


def test_unfinished_messages_of_all_channels_together_have_a_limit():
    scanner = FrameScanner(frame_max=0, max_message_size=40 * MIB)
    part = bytes(35 * MIB)
    for channel in (1, 2):
        assert scanner.feed(begun(channel, 40 * MIB, part), 0) == []
        assert scanner.error is None, "as much as a largest message and something beside it"
    scanner.feed(begun(3, 40 * MIB, part), 0)
    assert scanner.error == (
        506,
        f"3 unfinished messages on the channels of this connection have more than {104 * MIB} bytes: finish some before "
        "beginning others",
        60,
        40,
    )
    assert (scanner.buffered, scanner.under_way) == (0, 0)


def test_long_heads_of_unfinished_messages_count_too():
    scanner = FrameScanner(frame_max=0, max_message_size=10)
    long = struct.pack(">HI", 0x2000, 8 * MIB + 7) + b"\1hx" + struct.pack(">I", 8 * MIB) + bytes(8 * MIB)
    refused = [
        channel for channel in range(1, 9) if scanner.feed(begun(channel, 1, properties=long), 0) or scanner.error
    ]
    assert refused == [8], "the first seven have 56 MiB"


def test_the_largest_message_is_taken_whatever_it_has_in_front_of_it():
    scanner = FrameScanner(frame_max=0, max_message_size=10)
    long = struct.pack(">HI", 0x2000, 65 * MIB + 7) + b"\1hx" + struct.pack(">I", 65 * MIB) + bytes(65 * MIB)
    assert scanner.feed(begun(1, 10, bytes(4), long), 0) == []
    assert scanner.error is None
    [(kind, *_)] = scanner.feed(a_frame(3, 1, bytes(6)), 0)
    assert kind == PUBLISH


def test_thousands_of_channels_that_interleave_small_messages_never_notice():
    scanner = FrameScanner()
    channels = range(1, 2048)
    for _ in range(2):
        scanner.feed(b"".join(begun(channel, 16384, bytes(8192)) for channel in channels), 0)
        assert scanner.under_way == len(channels)
        events = scanner.feed(b"".join(a_frame(3, channel, bytes(8192)) for channel in channels), 0)
        assert (len(events), scanner.under_way, scanner.buffered, scanner.error) == (len(channels), 0, 0, None)


def test_the_scanner_knows_which_unfinished_messages_have_no_channel():
    scanner = FrameScanner()
    assert scanner.stray({}) == 0
    scanner.feed(begun(5, 10), 0)
    assert (scanner.stray({}), scanner.stray({5: None}), scanner.under_way) == (5, 0, 1)
    scanner.feed(begun(6, 10, b"part"), 0)
    assert (scanner.stray({5: None}), scanner.stray({5: None, 6: None}), scanner.under_way) == (6, 0, 2)
    scanner.forget(6)  # the rest of it is swallowed
    assert (scanner.stray({5: None}), scanner.under_way) == (0, 1)
    scanner.feed(a_frame(3, 5, bytes(10)), 0)
    assert (scanner.stray({}), scanner.under_way) == (0, 0)


@pytest.mark.parametrize("announced", [0, 100], ids=["empty", "too large"])
def test_a_message_that_is_not_kept_is_not_under_way(announced):
    scanner = FrameScanner(max_message_size=10)
    scanner.feed(begun(1, announced), 0)
    assert (scanner.under_way, scanner.buffered, scanner.stray({})) == (0, 0, 0)


def test_a_message_is_as_long_as_announced_after_one_that_had_an_empty_frame():
    """What was made room for with the empty frame was taken for the next message's, with whatever was in that memory."""
    scanner = FrameScanner()
    long, short = b"l" * 5000, b"0123456789"
    received = begun(1, len(long)) + a_frame(3, 1, b"") + a_frame(3, 1, long)
    received += begun(1, len(short), short[:5]) + a_frame(3, 1, b"") + a_frame(3, 1, short[5:])
    [(kind, *_, entries)] = scanner.feed(received, 0)
    assert kind == PUBLISH
    assert [(entry.body, entry.body_size) for entry in entries] == [(long, 5000), (short, 10)]
    assert (scanner.under_way, scanner.buffered, scanner.error) == (0, 0, None)


# ---- the broker ----


def the_connection(broker: RunningBroker) -> Any:
    [served] = broker.call(lambda: list(broker.broker.vhosts["/"].connections))
    return served


def test_a_message_on_a_channel_that_is_not_open_is_refused_before_its_body_comes(broker):
    with RawClient(broker) as client:
        client.socket.sendall(begun(7, 100 * MIB))
        _, close = client.expect("Connection.Close")
        assert (close.reply_code, close.reply_text) == (504, "CHANNEL_ERROR - expected 'channel.open'")
        assert (close.class_id, close.method_id) == (60, 40)


def test_a_message_that_begins_in_the_same_breath_as_its_channel_is_served(broker):
    queue = unique()
    with RawClient(broker) as client:
        client.open(1)
        client.call(1, pamqp.commands.Queue.Declare(queue=queue, exclusive=True), "Queue.DeclareOk")
        opening = pamqp.frame.marshal(pamqp.commands.Channel.Open(), 2)
        method = pamqp.frame.marshal(pamqp.commands.Basic.Publish(routing_key=queue), 2)
        client.socket.sendall(opening + method)
        client.expect("Channel.OpenOk")
        client.send(2, pamqp.header.ContentHeader(body_size=4), pamqp.body.ContentBody(b"body"))
        client.call(2, pamqp.commands.Channel.Close(0, "", 0, 0), "Channel.CloseOk")
        answer = client.call(1, pamqp.commands.Queue.Declare(queue=queue, passive=True), "Queue.DeclareOk")
        assert answer.message_count == 1


def test_an_alarm_stops_a_publisher_in_the_middle_of_a_message_and_its_end_lets_it_finish(broker):
    queue = unique()
    vhost = broker.broker.vhosts["/"]
    with RawClient(broker, capabilities={"connection.blocked": True}) as client:
        client.open(1)
        client.call(1, pamqp.commands.Queue.Declare(queue=queue, exclusive=True), "Queue.DeclareOk")
        served = the_connection(broker)
        broker.call(lambda: vhost.set_alarm("memory", True))
        try:
            client.send(
                1,
                pamqp.commands.Basic.Publish(routing_key=queue),
                pamqp.header.ContentHeader(body_size=200_000),
                pamqp.body.ContentBody(bytes(100_000)),
            )
            client.expect("Connection.Blocked")
            assert broker.call(lambda: served.flow.waits) == ["resources"]
            client.send(1, pamqp.body.ContentBody(bytes(100_000)))
        finally:
            broker.call(lambda: vhost.set_alarm("memory", False))
        client.expect("Connection.Unblocked")
        eventually(lambda: broker.queue_info(queue)["messages_ready"] == 1)
        assert broker.call(lambda: served.flow.waits) == []
