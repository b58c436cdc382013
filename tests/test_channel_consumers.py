"""What a channel keeps of consumers that were cancelled, and what asking for a queue needs."""

from __future__ import annotations

from typing import Any

import pika.exceptions
import pytest

from tests.broker_clients import Inbox, connected, declare, publish, pump, settle, unique
from warren.testing import RunningBroker


def served_channel(broker: RunningBroker) -> Any:
    [channel] = broker.call(lambda: [one.channels[1] for one in broker.broker.vhosts["/"].connections])
    return channel


def kept(broker: RunningBroker) -> list[bool]:
    """The channel's consumers by number: is one kept there?"""
    channel = served_channel(broker)
    return broker.call(lambda: [one is not None for one in channel._consumers])


def consume_one(channel: Any, queue: str, body: bytes) -> tuple[str, int]:
    """A consumer that has got one message: its tag and that of the delivery."""
    inbox = Inbox()
    tag = channel.basic_consume(queue, inbox)
    publish(channel, queue, body)
    pump(channel.connection, lambda: len(inbox) == 1)
    return tag, inbox.tags[0]


@pytest.mark.parametrize("how", ["ack", "reject", "requeue", "recover"])
def test_a_consumer_that_was_cancelled_is_forgotten_with_the_last_of_its_messages(broker, how):
    with connected(broker) as connection:
        channel = connection.channel()
        queue = declare(channel)
        for number in range(10):
            tag, delivery = consume_one(channel, queue, b"%d" % number)
            channel.basic_cancel(tag)
            assert kept(broker) == [False, True], "what it has is to be settled"
            if how == "ack":
                channel.basic_ack(delivery)
            elif how == "recover":
                channel.basic_recover(True)
            else:
                channel.basic_reject(delivery, requeue=how == "requeue")
            settle(channel)
            assert kept(broker) == [False, False], "and its number is the next one's"
            channel.queue_purge(queue)
        queue_of = broker.broker.vhosts["/"].queues[queue]
        assert broker.call(lambda: served_numbers(broker)[queue_of]) == []


def served_numbers(broker: RunningBroker) -> dict[Any, list[int]]:
    [connection] = broker.broker.vhosts["/"].connections
    return connection.channels[1]._monitored


def test_a_number_is_not_given_away_while_a_delivery_has_it(broker):
    with connected(broker) as connection:
        channel = connection.channel()
        queue, other = declare(channel), declare(channel)
        first, delivery = consume_one(channel, queue, b"first")
        channel.basic_cancel(first)
        second, other_delivery = consume_one(channel, other, b"second")
        assert kept(broker) == [False, True, True]
        channel.basic_ack(delivery)
        third, _ = consume_one(channel, queue, b"third")
        assert kept(broker) == [False, True, True]
        channel.basic_ack(other_delivery)
        settle(channel)
        assert broker.queue_info(other)["messages"] == 0
        assert broker.queue_info(queue)["messages_unacknowledged"] == 1
        channel.basic_cancel(second)
        channel.basic_cancel(third)
        assert kept(broker) == [False, True, False]


def test_a_consumer_that_is_there_is_kept_when_its_messages_are_settled(broker):
    with connected(broker) as connection:
        channel = connection.channel()
        queue = declare(channel)
        tag, delivery = consume_one(channel, queue, b"1")
        channel.basic_ack(delivery)
        settle(channel)
        assert kept(broker) == [False, True]
        channel.basic_cancel(tag)
        assert kept(broker) == [False, False]


def test_numbers_of_consumers_whose_queue_is_gone_are_given_again(broker):
    with connected(broker) as connection:
        channel = connection.channel()
        for number in range(5):
            queue = declare(channel)
            _, delivery = consume_one(channel, queue, b"%d" % number)
            channel.queue_delete(queue)
        assert len(kept(broker)) == 2
        tag, _ = consume_one(channel, declare(channel), b"last")
        channel.basic_ack(delivery)  # of a queue that is gone: it settles nothing
        settle(channel)
        channel.basic_cancel(tag)
        assert kept(broker) == [False, True], "the last one's message is not settled by that"


def test_a_passive_declare_of_a_queue_needs_no_permission(broker):
    users = broker.broker.users
    broker.call(lambda: users.add_user("reader", "secret"))
    broker.call(lambda: users.set_permissions("reader", "/", "^$", "^$", ".*"))
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("asked-for")
        publish(channel, "asked-for", b"1")
        settle(channel)
        reading = pika.BlockingConnection(pika.URLParameters(broker.vhost_url("/", "reader", "secret")))
        asking = reading.channel()
        assert asking.queue_declare("asked-for", passive=True).method.message_count == 1
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="access to queue 'asked-for'"):
            asking.queue_declare("asked-for")
        reading.close()
        channel.queue_delete("asked-for")


def test_a_consumer_without_acks_that_takes_turns_is_not_blocked_by_the_limit_of_its_channel(broker):
    """Its deliveries take none of it, so no ack would have made room for it again."""
    with connected(broker) as first, connected(broker) as second:
        queue = unique()
        first.channel().queue_declare(queue, auto_delete=True)
        inboxes = [Inbox(), Inbox()]
        for connection, inbox, auto_ack in zip((first, second), inboxes, (False, True), strict=True):
            channel = connection.channel()
            channel.basic_qos(prefetch_count=7, global_qos=True)
            channel.basic_consume(queue, inbox, auto_ack=auto_ack)
        publish(first.channel(), queue, *(b"%d" % number for number in range(100)))
        pump(first, lambda: len(inboxes[0]) == 7)
        pump(second, lambda: len(inboxes[1]) == 93)


def test_dead_letters_arrive_in_order_also_where_some_have_to_wait_for_seq_ids(broker, monkeypatch):
    """Those behind them began at once, and came first."""
    with connected(broker) as connection:
        channel = connection.channel()
        dead = declare(channel)
        name = declare(channel, x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
        vhost = broker.broker.vhosts["/"]
        refused = iter([True, False, True, True])
        has_seq_ids = vhost.store.has_seq_ids
        monkeypatch.setattr(vhost.store, "has_seq_ids", lambda some: has_seq_ids(some) and not next(refused, False))
        inbox = Inbox()
        channel.basic_consume(name, inbox)
        for number in range(20):
            publish(channel, name, b"%d" % number)
        pump(connection, lambda: len(inbox) == 20)
        for tag in inbox.tags:
            channel.basic_reject(tag, requeue=False)
            settle(channel)
        letters = Inbox()
        channel.basic_consume(dead, letters, auto_ack=True)
        pump(connection, lambda: len(letters) == 20)
        assert letters.bodies == inbox.bodies
