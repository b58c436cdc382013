"""The broker with pika: publishing, consuming, settling, bodies of every size, names of every kind."""

from __future__ import annotations

import os
import random

import pamqp.commands
import pika
import pika.exceptions
import pytest

from tests.broker_clients import Inbox, RawClient, connected, drain, get, publish, pump, settle, unique

Properties = pika.BasicProperties


# ---- get, ack, nack, reject, recover ----


def test_get_from_an_empty_queue_finds_nothing(channel, q):
    assert channel.basic_get(q) == (None, None, None)


def test_get_counts_what_is_left(channel, q):
    publish(channel, q, b"1", b"2", b"3")
    assert [channel.basic_get(q)[0].message_count for _ in range(3)] == [2, 1, 0]


def test_all_properties_come_back_as_they_were_sent(channel, q):
    sent = Properties(
        content_type="text/plain",
        content_encoding="utf-8",
        headers={"text": "ä", "number": -5, "list": [1, "two", None], "table": {"deep": True}, "bytes": b"\x00\xff"},
        delivery_mode=2,
        priority=9,
        correlation_id="c",
        reply_to="r",
        expiration="60000",
        message_id="m",
        timestamp=1700000000,
        type="t",
        user_id="guest",
        app_id="a",
        cluster_id="k",
    )
    channel.basic_publish("", q, b"x", sent)
    method, properties, _ = channel.basic_get(q)
    assert (method.exchange, method.routing_key, method.redelivered) == ("", q, False)
    expected = dict(vars(sent))
    got = dict(vars(properties))
    # Whether bytes come back as text is the client's choice: the wire has one type for both.
    assert got["headers"].pop("bytes") in (b"\x00\xff", "\x00\xff")
    expected["headers"] = {name: value for name, value in expected["headers"].items() if name != "bytes"}
    assert got == expected


def test_multiple_ack_settles_everything_up_to_its_tag(broker, channel, q):
    publish(channel, q, b"1", b"2", b"3", b"4")
    tags = [channel.basic_get(q)[0].delivery_tag for _ in range(4)]
    channel.basic_ack(tags[2], multiple=True)
    settle(channel)
    assert broker.queue_info(q)["messages_unacknowledged"] == 1
    channel.basic_ack(0, multiple=True)
    settle(channel)
    assert broker.queue_info(q)["messages"] == 0


def test_nack_with_requeue_puts_messages_back_to_where_they_were(channel, q):
    publish(channel, q, b"1", b"2", b"3", b"4")
    tags = [channel.basic_get(q)[0].delivery_tag for _ in range(3)]
    channel.basic_nack(tags[1], multiple=True, requeue=True)
    again = [channel.basic_get(q) for _ in range(3)]
    assert [(body, method.redelivered) for method, _, body in again] == [(b"1", True), (b"2", True), (b"4", False)]


def test_reject_without_requeue_drops_the_message(broker, channel, q):
    publish(channel, q, b"1", b"2")
    channel.basic_reject(channel.basic_get(q)[0].delivery_tag, requeue=False)
    assert drain(channel, q) == [b"2"]
    assert broker.queue_info(q)["messages"] == 0


def test_recover_requeues_everything_of_the_channel(channel, q):
    publish(channel, q, b"1", b"2")
    for _ in range(2):
        channel.basic_get(q)
    channel.basic_recover(requeue=True)
    again = [channel.basic_get(q) for _ in range(2)]
    assert [(body, method.redelivered) for method, _, body in again] == [(b"1", True), (b"2", True)]


def test_what_a_lost_connection_held_is_redelivered(broker, channel, q):
    publish(channel, q, b"1", b"2")
    other = RawClient(broker)
    other.open(1)
    other.send(1, pamqp.commands.Basic.Get(queue=q))
    other.expect("Basic.GetOk")
    other.socket.close()
    found = {}
    while len(found) < 2:
        method, _, body = get(channel, q)
        found[body] = method.redelivered
    assert found == {b"1": True, b"2": False}


def test_messages_that_were_delivered_before_say_so_without_acks_too(channel, q):
    publish(channel, q, b"1", b"2", b"3", b"4")
    for _ in range(3):
        channel.basic_get(q)
    channel.basic_nack(0, multiple=True, requeue=True)
    method, _, body = channel.basic_get(q, auto_ack=True)
    assert (method.redelivered, body) == (True, b"1")
    inbox = Inbox()
    channel.basic_consume(q, inbox, auto_ack=True)
    pump(channel.connection, lambda: len(inbox) == 3)
    assert [method.redelivered for method, _, _ in inbox.deliveries] == [True, True, False]
    settle(channel)
    assert channel.queue_declare(q, passive=True).method.message_count == 0


# ---- consuming ----


def test_a_consumer_gets_what_was_there_and_what_comes(channel, q):
    publish(channel, q, b"before")
    inbox = Inbox()
    tag = channel.basic_consume(q, inbox, consumer_tag="mine")
    publish(channel, q, b"after")
    pump(channel.connection, lambda: len(inbox) == 2)
    assert inbox.bodies == [b"before", b"after"]
    assert [(method.consumer_tag, method.delivery_tag) for method, _, _ in inbox.deliveries] == [
        ("mine", 1),
        ("mine", 2),
    ]
    channel.basic_cancel(tag)
    publish(channel, q, b"late")
    settle(channel)
    assert len(inbox) == 2
    assert drain(channel, q) == [b"late"]


@pytest.mark.parametrize("global_qos", [False, True])
def test_a_cancelled_consumer_gets_nothing_more_when_its_messages_are_acked(channel, q, global_qos):
    inbox = Inbox()
    channel.basic_qos(prefetch_count=1, global_qos=global_qos)
    tag = channel.basic_consume(q, inbox)
    publish(channel, q, b"1", b"2", b"3")
    pump(channel.connection, lambda: len(inbox) == 1)
    channel.basic_cancel(tag)
    channel.basic_ack(inbox.tags[0])
    settle(channel)
    assert inbox.bodies == [b"1"]
    assert drain(channel, q) == [b"2", b"3"]


def test_consumers_of_a_queue_take_turns(channel, q):
    inboxes = [Inbox() for _ in range(3)]
    for inbox in inboxes:
        channel.basic_consume(q, inbox)
    publish(channel, q, *(b"%d" % number for number in range(9)))
    pump(channel.connection, lambda: sum(map(len, inboxes)) == 9)
    assert [inbox.bodies for inbox in inboxes] == [[b"0", b"3", b"6"], [b"1", b"4", b"7"], [b"2", b"5", b"8"]]


def test_prefetch_is_counted_for_each_consumer(channel, q):
    publish(channel, q, *(b"%d" % number for number in range(10)))
    first, second = Inbox(), Inbox()
    channel.basic_qos(prefetch_count=2)
    channel.basic_consume(q, first)
    channel.basic_qos(prefetch_count=3)
    channel.basic_consume(q, second)
    settle(channel)
    assert (len(first), len(second)) == (2, 3)
    channel.basic_ack(second.tags[0])
    pump(channel.connection, lambda: len(second) == 4)
    settle(channel)
    assert (len(first), len(second)) == (2, 4)


def test_global_prefetch_is_counted_for_the_channel(channel, q):
    publish(channel, q, *(b"%d" % number for number in range(10)))
    first, second = Inbox(), Inbox()
    channel.basic_qos(prefetch_count=3, global_qos=True)
    channel.basic_consume(q, first)
    channel.basic_consume(q, second)
    settle(channel)
    assert len(first) + len(second) == 3
    channel.basic_ack((first.tags + second.tags)[0])
    pump(channel.connection, lambda: len(first) + len(second) == 4)
    settle(channel)
    assert len(first) + len(second) == 4


def test_global_prefetch_holds_for_a_batch_that_several_consumers_share(broker, channel, q):
    first, second = Inbox(), Inbox()
    channel.basic_qos(prefetch_count=3, global_qos=True)
    channel.basic_consume(q, first)
    channel.basic_consume(q, second)
    with RawClient(broker) as other:
        other.open(1)
        other.publish(1, q, *(b"%d" % number for number in range(10)))  # in one write: dealt as one batch
        other.call(1, pamqp.commands.Exchange.Declare(exchange="amq.direct", passive=True), "Exchange.DeclareOk")
    settle(channel)
    assert len(first) + len(second) == 3


def test_global_prefetch_counts_all_queues_of_the_channel(channel, q):
    other = unique()
    channel.queue_declare(other, exclusive=True)
    publish(channel, q, b"1", b"2")
    publish(channel, other, b"3", b"4")
    inbox = Inbox()
    channel.basic_qos(prefetch_count=3, global_qos=True)
    channel.basic_consume(q, inbox)
    channel.basic_consume(other, inbox)
    settle(channel)
    assert inbox.bodies == [b"1", b"2", b"3"]
    channel.basic_ack(inbox.tags[0])
    pump(channel.connection, lambda: len(inbox) == 4)


@pytest.mark.parametrize("settle_all", ["ack", "nack", "recover"])
def test_global_prefetch_holds_when_messages_of_a_consumer_and_of_get_are_settled_together(channel, q, settle_all):
    publish(channel, q, *(b"%d" % number for number in range(20)))
    inbox = Inbox()
    channel.basic_qos(prefetch_count=3, global_qos=True)
    channel.basic_consume(q, inbox)
    settle(channel)
    tags = [channel.basic_get(q)[0].delivery_tag for _ in range(2)]
    assert (len(inbox), tags) == (3, [4, 5])
    if settle_all == "ack":
        channel.basic_ack(5, multiple=True)
    elif settle_all == "nack":
        channel.basic_nack(5, multiple=True)
    else:
        channel.basic_recover(requeue=True)
    settle(channel)
    assert len(inbox) == 6


def test_a_consumer_without_acks_ignores_prefetch(channel, q):
    publish(channel, q, *(b"%d" % number for number in range(10)))
    inbox = Inbox()
    channel.basic_qos(prefetch_count=1)
    channel.basic_consume(q, inbox, auto_ack=True)
    pump(channel.connection, lambda: len(inbox) == 10)


def test_requeued_messages_come_to_a_waiting_consumer_in_order(channel, q):
    publish(channel, q, b"1", b"2", b"3")
    for _ in range(3):
        channel.basic_get(q)
    inbox = Inbox()
    channel.basic_consume(q, inbox)
    channel.basic_nack(0, multiple=True, requeue=True)
    pump(channel.connection, lambda: len(inbox) == 3)
    assert inbox.bodies == [b"1", b"2", b"3"]
    assert all(method.redelivered for method, _, _ in inbox.deliveries)


def test_a_consumer_is_told_when_its_queue_is_deleted(broker, connection, channel):
    name = unique()
    channel.queue_declare(name)
    cancelled = []
    channel.add_on_cancel_callback(lambda method: cancelled.append(method.method.consumer_tag))
    channel.basic_consume(name, Inbox(), consumer_tag="told")
    with connected(broker) as other:
        other.channel().queue_delete(name)
    pump(connection, lambda: cancelled)
    assert cancelled == ["told"]
    assert channel.is_open


def test_an_exclusive_consumer_is_alone(broker, channel, q):
    channel.basic_consume(q, Inbox(), exclusive=True)
    with connected(broker) as other:
        second = other.channel()
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
            second.basic_consume(q, Inbox())
        assert caught.value.reply_code == 403
        assert "in exclusive use" in caught.value.reply_text


def test_a_consumer_of_higher_priority_gets_messages_until_it_is_full(channel, q):
    low, high = Inbox(), Inbox()
    channel.basic_qos(prefetch_count=2)
    channel.basic_consume(q, low)
    channel.basic_consume(q, high, arguments={"x-priority": 10})
    publish(channel, q, *(b"%d" % number for number in range(6)))
    settle(channel)
    assert (high.bodies, low.bodies) == ([b"0", b"1"], [b"2", b"3"])
    channel.basic_ack(high.tags[0])
    pump(channel.connection, lambda: len(high) == 3)
    assert (high.bodies, low.bodies) == ([b"0", b"1", b"4"], [b"2", b"3"])


@pytest.mark.parametrize("auto_ack", [True, False])
def test_a_waiting_consumer_gets_all_of_a_large_batch(broker, channel, q, auto_ack):
    inbox = Inbox()
    channel.basic_consume(q, inbox, auto_ack=auto_ack)
    with RawClient(broker) as other:
        other.open(1)
        other.publish(1, q, *(b"%d" % number for number in range(1000)))  # in one write
        pump(channel.connection, lambda: len(inbox) == 1000)
    assert inbox.bodies == [b"%d" % number for number in range(1000)]


@pytest.mark.parametrize("auto_ack", [True, False])
def test_several_consumers_share_all_of_a_large_batch(broker, channel, q, auto_ack):
    inboxes = [Inbox(), Inbox()]
    for inbox in inboxes:
        channel.basic_consume(q, inbox, auto_ack=auto_ack)
    with RawClient(broker) as other:
        other.open(1)
        other.publish(1, q, *(b"%d" % number for number in range(2000)))
        pump(channel.connection, lambda: sum(map(len, inboxes)) == 2000)
    assert [len(inbox) for inbox in inboxes] == [1000, 1000]


def test_the_rest_of_a_batch_goes_to_consumers_of_lower_priority_at_once(broker, channel, q):
    low, high = Inbox(), Inbox()
    channel.basic_qos(prefetch_count=2)
    channel.basic_consume(q, low)
    channel.basic_consume(q, high, arguments={"x-priority": 10})
    with RawClient(broker) as other:
        other.open(1)
        other.publish(1, q, *(b"%d" % number for number in range(6)))
        pump(channel.connection, lambda: len(high) + len(low) == 4)
    assert (high.bodies, low.bodies) == ([b"0", b"1"], [b"2", b"3"])


def test_a_generator_consumer_gets_everything_and_leaves_nothing_behind(broker, channel, q):
    publish(channel, q, *(b"%d" % number for number in range(5)))
    found = []
    for method, _, body in channel.consume(q):
        found.append(body)
        channel.basic_ack(method.delivery_tag)
        if len(found) == 5:
            break
    assert channel.cancel() == 0
    assert found == [b"0", b"1", b"2", b"3", b"4"]
    assert broker.queue_info(q)["messages"] == 0


# ---- bodies, frames, names ----


@pytest.mark.parametrize("size", [0, 1, 131072 - 8, 131072 - 7, 131072, 5 * 1024 * 1024])
@pytest.mark.parametrize("frame_max", [4096, 131072])
@pytest.mark.parametrize("mode", [1, 2])
def test_a_body_of_any_size_comes_back_whole(broker, size, frame_max, mode):
    body = os.urandom(size)
    with connected(broker, frame_max=frame_max) as connection:
        channel = connection.channel()
        name = unique()
        channel.queue_declare(name, durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", name, body, Properties(delivery_mode=mode))
        inbox = Inbox()
        channel.basic_consume(name, inbox)
        pump(connection, lambda: len(inbox) == 1)
        assert inbox.bodies == [body]
        channel.basic_nack(1)
        pump(connection, lambda: len(inbox) == 2)
        assert inbox.bodies[1] == body
        channel.queue_delete(name)


def test_a_large_body_and_small_ones_of_other_channels_are_not_mixed_up(broker, connection):
    names = [unique() for _ in range(4)]
    bodies = [os.urandom(size) for size in (700_000, 10, 300_000, 0)]
    channels = [connection.channel() for _ in names]
    for channel, name in zip(channels, names, strict=True):
        channel.queue_declare(name, exclusive=True)
    for _ in range(3):
        for channel, name, body in zip(channels, names, bodies, strict=True):
            channel.basic_publish("", name, body)
    for channel, name, body in zip(channels, names, bodies, strict=True):
        assert drain(channel, name) == [body] * 3


def test_many_channels_live_side_by_side(connection, scale):
    channels = [connection.channel() for _ in range(scale.scale(1000))]
    name = unique()
    channels[0].queue_declare(name, exclusive=True)
    for channel in channels:
        publish(channel, name, b"%d" % channel.channel_number)
    for channel in channels:
        settle(channel)
    found = drain(channels[0], name)
    assert sorted(map(int, found)) == [channel.channel_number for channel in channels]
    for channel in channels[1:]:
        channel.close()
    again = connection.channel()
    assert again.channel_number == 2


@pytest.mark.parametrize("name", ["Grüße", "очередь", "キュー", "🐇" * 63, "with space", "a.b#*/%", "x" * 255])
def test_any_text_is_a_name_for_a_queue_an_exchange_and_a_key(channel, name):
    channel.queue_declare(name)
    channel.exchange_declare(name, "direct")
    channel.queue_bind(name, name, name)
    channel.basic_publish(name, name, b"x")
    method, _, body = channel.basic_get(name)
    assert (method.exchange, method.routing_key, body) == (name, name, b"x")
    channel.queue_delete(name)
    channel.exchange_delete(name)


def test_random_settling_loses_and_doubles_nothing(channel, q, seed, scale):
    """Get, ack, nack and recover by chance; in the end every message was acked once."""
    chance = random.Random(seed)
    count = scale.scale(1000)
    publish(channel, q, *(b"%d" % number for number in range(count)))
    held: dict[int, bytes] = {}
    acked: list[bytes] = []
    while len(acked) < count:
        method, _, body = channel.basic_get(q)
        if method is not None:
            held[method.delivery_tag] = body
        action = chance.random()
        if held and (action < 0.5 or method is None):
            tag = chance.choice(list(held))
            multiple = chance.random() < 0.3
            tags = [other for other in held if other <= tag] if multiple else [tag]
            if action < 0.35:
                acked += [held[other] for other in tags]
                channel.basic_ack(tag, multiple=multiple)
            else:
                channel.basic_nack(tag, multiple=multiple, requeue=True)
            for other in tags:
                del held[other]
        elif action > 0.97:
            channel.basic_recover(requeue=True)
            held.clear()
    assert sorted(map(int, acked)) == list(range(count))


def test_a_consumer_that_does_not_read_stops_nobody_and_misses_nothing(broker, channel, q):
    """What is on its way to it is bounded: the rest waits in the queue, and comes when it reads again."""
    bodies = [b"%d" % number * 20_000 for number in range(1, 400)]
    with RawClient(broker) as sleepy:
        sleepy.open(1)
        sleepy.call(1, pamqp.commands.Basic.Consume(queue=q, no_ack=True), "Basic.ConsumeOk")
        for body in bodies:
            channel.basic_publish("", q, body)
        settle(channel)
        assert channel.queue_declare(q, passive=True).method.message_count > 0
        found = [b""]
        while len(found) <= len(bodies):
            frame = sleepy.receive()[1]
            if frame.name == "ContentBody":
                found[-1] += frame.value
                if len(found[-1]) == len(bodies[len(found) - 1]):
                    found.append(b"")
        assert found[:-1] == bodies


def test_with_nowait_things_are_done_and_nothing_is_answered(broker):
    commands = pamqp.commands
    name, exchange = unique(), unique("x")
    with RawClient(broker) as client:
        client.open(1)
        client.send(
            1,
            commands.Queue.Declare(queue=name, nowait=True),
            commands.Exchange.Declare(exchange=exchange, exchange_type="fanout", nowait=True),
            commands.Queue.Bind(queue=name, exchange=exchange, nowait=True),
            commands.Confirm.Select(nowait=True),
            commands.Basic.Consume(queue=name, consumer_tag="t", nowait=True),
            commands.Basic.Cancel(consumer_tag="t", nowait=True),
        )
        client.publish(1, "", b"x", exchange=exchange)
        assert client.expect("Basic.Ack")[1].delivery_tag == 1
        assert client.call(1, commands.Queue.Declare(queue=name, passive=True), "Queue.DeclareOk").message_count == 1
        client.send(
            1,
            commands.Queue.Purge(queue=name, nowait=True),
            commands.Queue.Delete(queue=name, nowait=True),
            commands.Exchange.Delete(exchange=exchange, nowait=True),
        )
        assert client.call(1, commands.Queue.Delete(queue=name), "Queue.DeleteOk").message_count == 0
