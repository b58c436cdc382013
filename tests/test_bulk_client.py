"""The bulk client: its scanner against a model and against pamqp's frames, then the whole of it against a broker."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.broker_clients import unique
from warren.amqp.bulk_client import Address, Batch, BrokerClosedError, connect, encoded_properties
from warren.amqp.methods import encode
from warren.kernel.client_scanner import (
    CONFIRMS,
    CONTENT,
    DELIVERIES,
    METHOD,
    ClientScanner,
    ack_frames,
    bucket,
    bucket_start,
)
from warren.kernel.frame_writer import HEARTBEAT_FRAME, ack_frame, content, method_frame, nack_frame
from warren.testing import running_broker

PLAIN_HEAD = b"\0\0\0\0"  # no exchange, no routing key, no properties


def delivery(channel: int, tag: int, body: bytes, redelivered: bool = False, frame_max: int = 4096) -> bytes:
    method = encode(
        "basic.deliver", consumer_tag="c", delivery_tag=tag, redelivered=redelivered, exchange="", routing_key="q"
    )
    return content(channel, method, PLAIN_HEAD, body, frame_max)


def feed(scanner: ClientScanner, data: bytes, cuts: list[int]) -> list[tuple]:
    """As a connection would: what was cut is kept for the next part."""
    events = []
    rest = b""
    places = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    begin = 0
    for place in places:
        part = rest + data[begin:place]
        events += scanner.scan(part, len(part), 0)
        rest = part[scanner.consumed :]
        begin = place
    assert rest == b""
    return events


# ---- the scanner ----


@given(
    st.lists(st.tuples(st.integers(1, 3), st.binary(max_size=9000), st.booleans()), max_size=12),
    st.lists(st.integers(0, 60000), max_size=8),
)
def test_however_the_bytes_are_cut_every_delivery_is_told_once_and_in_order(messages, cuts):
    scanner = ClientScanner(4096)
    for channel in (1, 2, 3):
        scanner.collect(channel, channel != 3)
    tags = {1: 0, 2: 0, 3: 0}
    data = b""
    for channel, body, redelivered in messages:
        tags[channel] += 1
        data += delivery(channel, tags[channel], body, redelivered) + HEARTBEAT_FRAME
    events = feed(scanner, data, cuts)
    assert {event[0] for event in events} <= {DELIVERIES}
    for channel in (1, 2, 3):
        mine = [event for event in events if event[1] == channel]
        sent = [(body, again) for number, body, again in messages if number == channel]
        told = 0
        for _, _, last_tag, count, _, _, _ in mine:
            told += count
            assert last_tag == told
        assert told == len(sent)
        assert sum(event[4] for event in mine) == sum(len(body) for body, _ in sent)
        assert sum(event[5] for event in mine) == sum(again for _, again in sent)
        if channel == 3:
            assert all(event[6] is None for event in mine)
        else:
            assert [body for event in mine for body in event[6]] == [body for body, _ in sent]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans()), max_size=40), st.lists(st.integers(0, 900))
)
def test_confirms_settle_each_publish_once_in_whatever_order_they_come(answers, cuts):
    scanner = ClientScanner()
    settled: dict[int, bool] = {}  # number -> was it nacked
    data = b""
    for tag, multiple, nack in answers:
        fresh = [each for each in (range(1, tag + 1) if multiple else (tag,)) if each not in settled]
        # A broker says nothing twice, and the tag of a multiple confirm is one that was open.
        if tag in settled:
            continue
        settled |= dict.fromkeys(fresh, nack)
        data += (nack_frame if nack else ack_frame)(1, tag, multiple)
    events = feed(scanner, data, cuts)
    assert {event[0] for event in events} <= {CONFIRMS}
    assert sum(event[2] for event in events) == len(settled)
    nacked = {each for event in events for first, last in event[4] for each in range(first, last + 1)}
    assert nacked == {number for number, nack in settled.items() if nack}
    floor = next(number for number in range(1, 100) if number not in settled) - 1
    assert (events[-1][3] if events else 0) == floor


def test_a_confirm_that_comes_twice_is_refused():
    scanner = ClientScanner()
    frame = ack_frame(1, 1, False)
    scanner.scan(frame, len(frame), 0)
    with pytest.raises(ValueError, match="publish 1 was confirmed twice"):
        scanner.scan(frame, len(frame), 0)


def test_methods_come_behind_the_deliveries_that_were_sent_before_them():
    data = delivery(1, 1, b"a") + method_frame(1, encode("basic.cancel-ok", consumer_tag="c")) + delivery(1, 2, b"b")
    events = ClientScanner().scan(data, len(data), 0)
    assert [event[0] for event in events] == [DELIVERIES, METHOD, DELIVERIES]
    assert events[1][2:] == (60, 31, b"\x01c")
    assert [event[2] for event in events if event[0] == DELIVERIES] == [1, 2]


def test_a_return_comes_with_its_properties_and_its_body():
    method = encode("basic.return", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="gone")
    data = content(1, method, b"\0\0" + encoded_properties(priority=3), b"x" * 10000, 4096)
    (event,) = ClientScanner(4096).scan(data, len(data), 0)
    assert event == (CONTENT, 1, 50, method[4:], encoded_properties(priority=3), b"x" * 10000)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (method_frame(1, b"\0\x3c\0\x3c")[:-1] + b"\0", "ends in 0x00"),
        (method_frame(1, b"\0\x3c\0\x3c"), "ends in the middle"),
        (b"\x05\0\1\0\0\0\0\xce", "type 5"),
        (b"\x03\0\1\0\0\0\x01x\xce", "nothing announced"),
        (b"\x01\0\1\0\1\0\0", "frame_max is 4096"),
        (delivery(1, 1, b"abc")[:-11] + method_frame(1, encode("basic.qos-ok")), "in the middle of a message"),
    ],
    ids=["end octet", "cut method", "frame type", "body without header", "too large", "method within a message"],
)
def test_what_no_broker_may_send_is_refused(data, text):
    with pytest.raises(ValueError, match=text):
        ClientScanner(4096).scan(data, len(data), 0)


@given(st.integers(0, 2**41 - 1))
def test_a_bucket_is_exact_below_64_us_and_a_32nd_wide_above(value):
    number = bucket(value)
    start = bucket_start(number)
    assert start <= value
    assert value == start if value < 64 else (value - start) * 32 <= value
    assert number == 0 or bucket_start(number - 1) < start


def test_the_age_of_a_stamped_body_is_counted():
    scanner = ClientScanner()
    scanner.stamped = True
    data = delivery(1, 1, struct.pack(">Q", 1000)) + delivery(1, 2, struct.pack(">Q", 1007) + b"rest")
    scanner.scan(data, len(data), 1010)
    counted = scanner.ages_counted()
    assert (counted[10], counted[3], sum(counted)) == (1, 1, 2)


@given(st.integers(0, 50), st.integers(0, 300), st.integers(1, 40))
def test_acks_after_every_nth_message_are_those_of_a_client_that_acks_one_by_one(acked, more, every):
    last = acked + more
    frames, upto = ack_frames(7, acked, last, every)
    expected = [ack_frame(7, tag, every > 1) for tag in range(acked + every, last + 1, every)]
    assert frames == b"".join(expected)
    assert upto == acked + len(expected) * every


# ---- the client ----


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://", Address("localhost", 5672, "guest", "guest", "/", False)),
        ("amqp://broker/", Address("broker", 5672, "guest", "guest", "/", False)),
        ("amqp://broker/%2F", Address("broker", 5672, "guest", "guest", "/", False)),
        ("amqp://me:p%40ss@broker:1/a%2Fb", Address("broker", 1, "me", "p@ss", "a/b", False)),
        ("amqps://broker/v", Address("broker", 5671, "guest", "guest", "v", True)),
    ],
)
def test_an_address_is_read_as_other_clients_read_it(url, expected):
    assert Address.parse(url) == expected


def test_an_address_that_is_none_is_refused_with_an_example():
    with pytest.raises(ValueError, match=r"'http://x' is no AMQP address; it looks like amqp://"):
        Address.parse("http://x")


@pytest.fixture(scope="module")
def broker():
    with running_broker() as running:
        yield running


def test_what_is_published_with_confirms_arrives_in_order_whatever_its_size(broker, scale):
    bodies = [b"%d" % number for number in range(scale.scale(20000))] + [b"", b"x" * 300_000, b"last"]

    async def main() -> list[bytes]:
        queue = unique("bulk")
        found: list[bytes] = []
        enough = asyncio.Event()

        def came(batch: Batch) -> None:
            assert batch.bodies is not None
            assert len(batch.bodies) == batch.messages
            found.extend(batch.bodies)
            if len(found) == len(bodies):
                enough.set()

        async with await connect(broker.url) as connection:
            publisher, consumer = await connection.channel(), await connection.channel()
            assert await publisher.declare(queue) == 0
            await publisher.confirm_select()
            await consumer.qos(500)
            await consumer.consume(queue, came, ack_every=100, collect=True)
            await publisher.publish_many(bodies, routing_key=queue, persistent=True, window=1000)
            await publisher.settled()
            assert (publisher.published, publisher.confirmed, publisher.unconfirmed) == (len(bodies), len(bodies), 0)
            assert publisher.confirmed_up_to == len(bodies)
            await asyncio.wait_for(enough.wait(), 20)
            assert consumer.delivered_bytes == sum(map(len, bodies))
            consumer.ack_all()
            await consumer.synchronise()
            assert broker.queue_info(queue)["messages"] == 0
            await publisher.delete(queue)
        return found

    assert asyncio.run(main()) == bodies


def test_acks_come_after_every_nth_message_and_the_rest_goes_back(broker):
    async def main() -> None:
        queue = unique("bulk")
        async with await connect(broker.url) as connection:
            channel = await connection.channel()
            await channel.declare(queue)
            await channel.publish_many([b"x"] * 25, routing_key=queue)
            enough = asyncio.Event()
            await channel.consume(queue, lambda batch: enough.set() if batch.last_tag == 25 else None, ack_every=10)
            await asyncio.wait_for(enough.wait(), 20)
            await channel.synchronise()
            assert (channel.acked_tag, channel.last_tag) == (20, 25)
            assert broker.queue_info(queue)["messages_unacknowledged"] == 5
            await channel.close()
            other = await connection.channel()
            assert await other.declare(queue, passive=True) == 5
            assert await other.purge(queue) == 5
            assert await other.delete(queue) == 0

    asyncio.run(main())


def test_a_queue_that_rejects_makes_nacks_with_their_numbers(broker):
    async def main() -> None:
        queue = unique("bulk")
        async with await connect(broker.url) as connection:
            channel = await connection.channel()
            await channel.declare(queue, arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
            await channel.confirm_select()
            await channel.publish_many([b"x"] * 5, routing_key=queue)
            await channel.settled()
            nacked = {each for first, last in channel.nacked for each in range(first, last + 1)}
            assert nacked == {4, 5}
            await channel.delete(queue)

    asyncio.run(main())


def test_a_mandatory_message_without_a_queue_comes_back(broker):
    async def main() -> None:
        async with await connect(broker.url) as connection:
            channel = await connection.channel()
            await channel.confirm_select()
            properties = encoded_properties(message_id="7")
            await channel.publish_many([b"lost"], routing_key="nowhere", properties=properties, mandatory=True)
            await channel.settled()
            assert channel.returned == [(properties, b"lost")]

    asyncio.run(main())


def test_a_refused_request_raises_the_brokers_words_and_only_its_channel_is_gone(broker):
    async def main() -> None:
        async with await connect(broker.url) as connection:
            channel = await connection.channel()
            with pytest.raises(BrokerClosedError, match="NOT_FOUND - no queue 'not there'") as caught:
                await channel.declare("not there", passive=True)
            assert caught.value.code == 404
            with pytest.raises(BrokerClosedError):
                channel.send(b"", 0)
            again = await connection.channel()
            assert again.number == channel.number
            await again.confirm_select()
            await again.publish_many([b"x"] * 3, routing_key="nowhere")
            await again.settled()
            assert again.confirmed_up_to == 3

    asyncio.run(main())


def test_a_wrong_password_and_an_unknown_vhost_are_told(broker):
    with pytest.raises(BrokerClosedError, match="ACCESS_REFUSED"):
        asyncio.run(connect(broker.vhost_url("/", password="wrong")))
    with pytest.raises(BrokerClosedError, match="nowhere"):
        asyncio.run(connect(broker.vhost_url("nowhere")))


def test_who_waits_hears_that_the_broker_is_gone():
    async def main() -> None:
        stack = contextlib.ExitStack()
        running = stack.enter_context(running_broker())
        connection = await connect(running.url)
        channel = await connection.channel()
        await channel.confirm_select()
        channel.published += 1  # a confirm that never comes
        waiting = asyncio.create_task(channel.settled())
        await asyncio.to_thread(stack.close)
        with pytest.raises((BrokerClosedError, ConnectionError)):
            await asyncio.wait_for(waiting, 20)
        assert not connection.is_open
        with pytest.raises((BrokerClosedError, ConnectionError)):
            await connection.channel()
        await connection.close()

    asyncio.run(main())


def test_a_server_that_speaks_something_else_is_told_from_a_broker():
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(8)
            writer.write(b"AMQP\x00\x01\x00\x00")
            await writer.drain()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError, match="does not speak AMQP 0-9-1"):
            await connect(f"amqp://127.0.0.1:{port}/")
        server.close()
        await server.wait_closed()

    asyncio.run(main())
