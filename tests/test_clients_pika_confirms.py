"""The broker with pika: confirms, returned messages, transactions."""

from __future__ import annotations

import asyncio

import pamqp.body
import pamqp.commands
import pamqp.header
import pika
import pika.channel
import pika.exceptions
import pika.spec
import pytest
from pika.adapters.asyncio_connection import AsyncioConnection

from tests.broker_clients import SECONDS, RawClient, connected, drain, parameters, publish, pump, settle, unique
from warren.testing import running_broker

Properties = pika.BasicProperties


# ---- confirms and returns ----


async def open_asyncio(broker) -> tuple[AsyncioConnection, pika.channel.Channel]:
    """A connection and a channel of pika's asyncio adapter."""
    loop = asyncio.get_running_loop()
    opened = loop.create_future()
    AsyncioConnection(
        parameters(broker),
        on_open_callback=opened.set_result,
        on_open_error_callback=lambda _, error: opened.set_exception(error),
    )
    connection = await asyncio.wait_for(opened, SECONDS)
    channel = loop.create_future()
    connection.channel(on_open_callback=channel.set_result)
    return connection, await asyncio.wait_for(channel, SECONDS)


async def close_asyncio(connection: AsyncioConnection) -> None:
    closed = asyncio.get_running_loop().create_future()
    connection.add_on_close_callback(lambda *_: closed.set_result(None))
    connection.close()
    await asyncio.wait_for(closed, SECONDS)


def test_many_pending_confirms_are_all_told_with_pikas_asyncio_adapter(broker, scale):
    count = scale.scale(5000)

    async def main() -> set[int]:
        connection, channel = await open_asyncio(broker)
        name = unique()
        declared = asyncio.get_running_loop().create_future()
        channel.queue_declare(name, durable=True, callback=declared.set_result)
        await asyncio.wait_for(declared, SECONDS)
        confirmed: set[int] = set()
        all_told = asyncio.Event()

        def told(frame) -> None:
            assert isinstance(frame.method, pika.spec.Basic.Ack)
            tag = frame.method.delivery_tag
            assert tag not in confirmed
            numbers = range(max(confirmed, default=0) + 1, tag + 1) if frame.method.multiple else [tag]
            confirmed.update(numbers)
            if len(confirmed) == count:
                all_told.set()

        channel.confirm_delivery(told)
        for number in range(count):
            channel.basic_publish("", name, b"%d" % number, Properties(delivery_mode=1 + number % 2))
        await asyncio.wait_for(all_told.wait(), SECONDS)
        got = asyncio.get_running_loop().create_future()
        bodies = []

        def on_message(_channel, method, _properties, body) -> None:
            bodies.append(body)
            if len(bodies) == count:
                channel.basic_ack(method.delivery_tag, multiple=True)
                got.set_result(None)

        channel.basic_consume(name, on_message)
        await asyncio.wait_for(got, SECONDS)
        assert bodies == [b"%d" % number for number in range(count)]
        deleted = asyncio.get_running_loop().create_future()
        channel.queue_delete(name, callback=deleted.set_result)
        await asyncio.wait_for(deleted, SECONDS)
        await close_asyncio(connection)
        return confirmed

    assert asyncio.run(main()) == set(range(1, count + 1))


def test_confirms_of_one_write_come_as_one_multiple_ack(broker):
    with RawClient(broker) as client:
        client.open(1)
        name = unique()
        client.call(1, pamqp.commands.Queue.Declare(queue=name, exclusive=True), "Queue.DeclareOk")
        client.call(1, pamqp.commands.Confirm.Select(), "Confirm.SelectOk")
        client.publish(1, name, *(b"%d" % number for number in range(50)))
        _, ack = client.expect("Basic.Ack")
        assert (ack.delivery_tag, ack.multiple) == (50, True)
        client.publish(1, name, b"one")
        _, ack = client.expect("Basic.Ack")
        assert (ack.delivery_tag, ack.multiple) == (51, False)


def test_an_unroutable_message_is_confirmed_and_a_mandatory_one_returned_before(broker):
    with RawClient(broker) as client:
        client.open(1)
        client.call(1, pamqp.commands.Confirm.Select(), "Confirm.SelectOk")
        client.publish(1, unique("nowhere"), b"lost")
        assert client.expect("Basic.Ack")[1].delivery_tag == 1
        client.send(
            1,
            pamqp.commands.Basic.Publish(routing_key="nowhere", mandatory=True),
            pamqp.header.ContentHeader(body_size=4),
            pamqp.body.ContentBody(b"back"),
        )
        returned = client.expect("Basic.Return")[1]
        assert (returned.reply_code, returned.reply_text, returned.routing_key) == (312, "NO_ROUTE", "nowhere")
        assert client.receive()[1].body_size == 4
        assert client.receive()[1].value == b"back"
        assert client.expect("Basic.Ack")[1].delivery_tag == 2


def test_mandatory_messages_without_confirms_are_returned_to_the_callback(channel):
    returned = []
    channel.add_on_return_callback(lambda _, method, properties, body: returned.append((method.reply_code, body)))
    channel.basic_publish("amq.direct", unique("nowhere"), b"back", mandatory=True)
    pump(channel.connection, lambda: returned)
    assert returned == [(312, b"back")]


def test_a_message_to_a_full_queue_is_nacked_and_the_next_one_gets_its_own_answer(broker):
    with RawClient(broker) as client:
        client.open(1)
        name = unique()
        arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
        client.call(1, pamqp.commands.Queue.Declare(queue=name, exclusive=True, arguments=arguments), "Queue.DeclareOk")
        client.call(1, pamqp.commands.Confirm.Select(), "Confirm.SelectOk")
        client.publish(1, name, b"1", b"2", b"3", b"4")
        client.publish(1, unique("nowhere"), b"5")
        told: dict[int, str] = {}
        while len(told) < 5:
            frame = client.receive()[1]
            assert frame.delivery_tag not in told, f"{frame.delivery_tag} was told twice"
            first = 1 if frame.multiple else frame.delivery_tag
            for number in range(first, frame.delivery_tag + 1):
                told.setdefault(number, frame.name)
        assert told == {1: "Basic.Ack", 2: "Basic.Ack", 3: "Basic.Nack", 4: "Basic.Nack", 5: "Basic.Ack"}
        client.call(1, pamqp.commands.Queue.Declare(queue=name, passive=True), "Queue.DeclareOk")


def test_a_rejected_message_is_never_confirmed_as_well(broker):
    with RawClient(broker) as client:
        client.open(1)
        name = unique()
        arguments = {"x-max-length": 0, "x-overflow": "reject-publish"}
        client.call(1, pamqp.commands.Queue.Declare(queue=name, exclusive=True, arguments=arguments), "Queue.DeclareOk")
        client.call(1, pamqp.commands.Confirm.Select(), "Confirm.SelectOk")
        client.publish(1, name, b"1")
        assert client.expect("Basic.Nack")[1].delivery_tag == 1
        # The next answer is that of the declare: nothing follows the nack.
        client.call(1, pamqp.commands.Queue.Declare(queue=name, passive=True), "Queue.DeclareOk")


def test_a_blocking_publisher_sees_the_nack_of_each_rejected_message(channel):
    name = unique()
    channel.queue_declare(name, exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    channel.confirm_delivery()
    publish(channel, name, b"1")
    for _ in range(3):
        with pytest.raises(pika.exceptions.NackError):
            publish(channel, name, b"2")
    assert drain(channel, name) == [b"1"]
    publish(channel, name, b"3")
    assert drain(channel, name) == [b"3"]


# ---- transactions ----


def test_a_transaction_is_seen_when_it_is_committed(channel, q):
    channel.tx_select()
    publish(channel, q, b"1", b"2")
    with_own = channel.connection.channel()
    assert with_own.basic_get(q)[0] is None
    channel.tx_commit()
    assert drain(with_own, q) == [b"1", b"2"]


def test_a_rollback_forgets_publishes_and_acks(broker, channel, q):
    publish(channel, q, b"1")
    channel.tx_select()
    method, _, _ = channel.basic_get(q)
    channel.basic_ack(method.delivery_tag)
    publish(channel, q, b"2")
    channel.tx_rollback()
    assert broker.queue_info(q)["messages_unacknowledged"] == 1
    assert broker.queue_info(q)["messages_ready"] == 0
    channel.basic_ack(method.delivery_tag)  # the delivery is the channel's again
    channel.tx_commit()
    assert broker.queue_info(q)["messages"] == 0


def test_a_transaction_settles_and_publishes_together(broker, channel, q):
    publish(channel, q, b"job")
    channel.tx_select()
    method, _, _ = channel.basic_get(q)
    channel.basic_ack(method.delivery_tag)
    publish(channel, q, b"result", delivery_mode=2)
    assert broker.queue_info(q)["messages_unacknowledged"] == 1
    channel.tx_commit()
    assert drain(channel.connection.channel(), q) == [b"result"]


def test_an_unroutable_mandatory_message_of_a_transaction_is_returned_at_its_commit(channel):
    returned = []
    channel.add_on_return_callback(lambda _, method, properties, body: returned.append(body))
    channel.tx_select()
    channel.basic_publish("", unique("nowhere"), b"back", mandatory=True)
    settle(channel)
    assert not returned
    channel.tx_commit()
    pump(channel.connection, lambda: returned)


def test_a_transaction_that_a_full_queue_refused_ends_the_channel(channel):
    name = unique()
    channel.queue_declare(name, exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    channel.tx_select()
    publish(channel, name, b"1", b"2")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.tx_commit()
    assert (caught.value.reply_code, "partial tx completion" in caught.value.reply_text) == (406, True)


def test_a_closed_channel_takes_its_transaction_with_it(channel, q):
    other = channel.connection.channel()
    other.tx_select()
    publish(other, q, b"never")
    other.close()
    assert channel.basic_get(q)[0] is None


@pytest.mark.parametrize("durability", ["fsync", "os", "memory"])
def test_confirms_and_transactions_end_whatever_they_promise(durability):
    with running_broker(durability=durability) as broker, connected(broker) as connection:
        name = unique()
        confirming, transactional = connection.channel(), connection.channel()
        confirming.queue_declare(name, durable=True)
        confirming.confirm_delivery()
        transactional.tx_select()
        for channel in (confirming, transactional):
            publish(channel, name, b"transient", b"x" * 10_000)
            publish(channel, name, b"persistent", b"y" * 10_000, delivery_mode=2)
        transactional.tx_commit()
        assert drain(confirming, name) == [b"transient", b"x" * 10_000, b"persistent", b"y" * 10_000] * 2
