"""The broker with pika: what dies in a queue, where it goes, and the history that it carries."""

from __future__ import annotations

import datetime
import time

import pamqp.commands
import pika.exceptions
import pytest

from tests.broker_clients import (
    Inbox,
    RawClient,
    declare,
    declare_exchange,
    drain,
    eventually,
    get,
    publish,
    pump,
    settle,
    unique,
)


def test_every_death_is_counted_and_the_latest_comes_first(channel):
    """work -rejected-> retry -expired-> work, three times: x-death has one table for each queue and reason."""
    work, retry = unique("work"), unique("retry")
    declare(channel, work, x_dead_letter_exchange="", x_dead_letter_routing_key=retry)
    declare(channel, retry, x_dead_letter_exchange="", x_dead_letter_routing_key=work, x_message_ttl=1)
    publish(channel, work, b"x", headers={"mine": 1})
    for turn in range(4):
        method, properties, _ = get(channel, work)
        if turn:
            newest, older = properties.headers["x-death"]
            assert (newest["queue"], newest["reason"], newest["count"]) == (retry, "expired", turn)
            assert (older["queue"], older["reason"], older["count"]) == (work, "rejected", turn)
            assert (newest["exchange"], newest["routing-keys"]) == ("", [retry])
            assert (older["exchange"], older["routing-keys"]) == ("", [work])
            assert properties.headers["x-first-death-queue"] == work
            assert properties.headers["x-first-death-reason"] == "rejected"
            assert properties.headers["x-first-death-exchange"] == ""
            assert properties.headers["mine"] == 1
        channel.basic_reject(method.delivery_tag, requeue=False)


def test_a_message_that_dies_in_a_circle_by_itself_is_dropped(broker, channel):
    first, second = unique(), unique()
    declare(channel, first, x_dead_letter_exchange="", x_dead_letter_routing_key=second, x_message_ttl=1)
    declare(channel, second, x_dead_letter_exchange="", x_dead_letter_routing_key=first, x_message_ttl=1)
    publish(channel, first, b"round and round")
    eventually(lambda: broker.queue_info(second)["expired"] == 1)
    publish(channel, first, b"after it")  # when this one died too, the first would be back
    eventually(lambda: broker.queue_info(second)["expired"] == 2)
    assert broker.queue_info(first)["messages"] == broker.queue_info(second)["messages"] == 0
    assert broker.queue_info(first)["published"] == 2


def test_an_expired_message_loses_its_expiration_and_keeps_it_in_its_history(channel):
    dead = declare(channel)
    name = declare(channel, x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
    publish(channel, name, b"x", expiration="5", message_id="same")
    _, properties, _ = get(channel, dead)
    [death] = properties.headers["x-death"]
    assert (death["reason"], death["original-expiration"], properties.expiration) == ("expired", "5", None)
    assert properties.message_id == "same"
    assert abs(death["time"].replace(tzinfo=datetime.UTC).timestamp() - time.time()) < 60


def test_messages_pushed_out_by_the_length_limit_die_from_the_head(channel):
    dead = declare(channel)
    name = declare(channel, x_dead_letter_exchange="", x_dead_letter_routing_key=dead, x_max_length=2)
    publish(channel, name, b"1", b"2", b"3", b"4")
    letters = [get(channel, dead) for _ in range(2)]
    assert [body for _, _, body in letters] == [b"1", b"2"]
    assert {properties.headers["x-death"][0]["reason"] for _, properties, _ in letters} == {"maxlen"}
    assert drain(channel, name) == [b"3", b"4"]


def test_without_a_routing_key_of_its_own_a_dead_letter_keeps_its_keys(channel):
    exchange = declare_exchange(channel, "direct")
    dead, carbon = declare(channel), declare(channel)
    name = declare(channel, x_dead_letter_exchange=exchange)
    channel.queue_bind(dead, exchange, name)
    channel.queue_bind(carbon, exchange, "copy")
    publish(channel, name, b"x", headers={"CC": ["copy"], "BCC": ["secret"]})
    channel.basic_reject(channel.basic_get(name)[0].delivery_tag, requeue=False)
    for queue in (dead, carbon):
        method, properties, _ = get(channel, queue)
        assert (method.exchange, method.routing_key) == (exchange, name)
        [death] = properties.headers["x-death"]
        assert death["routing-keys"] == [name, "copy"]


def test_a_dead_letter_exchange_that_is_not_there_drops_the_message(broker, channel):
    name = declare(channel, x_dead_letter_exchange=unique("nowhere"))
    publish(channel, name, b"x")
    channel.basic_reject(channel.basic_get(name)[0].delivery_tag, requeue=False)
    settle(channel)
    assert broker.queue_info(name)["messages"] == 0


def test_dead_letters_that_come_together_pass_a_length_limit_while_a_consumer_waits(channel):
    dead = declare(channel, x_max_length=1)
    name = declare(channel, x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
    inbox = Inbox()
    channel.basic_consume(dead, inbox)
    publish(channel, name, *(b"%d" % number for number in range(20)))
    for _ in range(20):
        method, _, _ = channel.basic_get(name)
    channel.basic_nack(method.delivery_tag, multiple=True, requeue=False)
    pump(channel.connection, lambda: len(inbox) == 20)
    assert inbox.bodies == [b"%d" % number for number in range(20)]


def test_a_dead_letter_has_the_priority_that_its_publisher_gave_it(channel):
    dead = declare(channel, x_max_priority=9)
    name = declare(channel, x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
    for priority in (1, 9, 5):
        publish(channel, name, b"%d" % priority, priority=priority)
    for _ in range(3):
        channel.basic_reject(channel.basic_get(name)[0].delivery_tag, requeue=False)
    eventually(lambda: channel.queue_declare(dead, passive=True).method.message_count == 3)
    assert drain(channel, dead) == [b"9", b"5", b"1"]


@pytest.mark.parametrize("size", [10, 10_000])
@pytest.mark.parametrize("mode", [1, 2])
def test_a_backlog_of_dead_letters_arrives_whole(broker, channel, scale, size, mode):
    """Also those whose bodies left memory meanwhile, and also very many at once."""
    count = scale.scale(30_000 if size == 10 else 5_000)
    name, dead = unique(), unique()
    channel.queue_declare(dead, durable=True)
    channel.queue_declare(
        name, durable=True, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    )
    with RawClient(broker) as client:
        client.open(1)
        for first in range(0, count, 100):
            bodies = [b"%d" % number * (size // 5) for number in range(first, first + 100)]
            client.publish(1, name, *bodies, delivery_mode=mode)
        client.call(1, pamqp.commands.Queue.Declare(queue=name, passive=True), "Queue.DeclareOk")
    inbox = Inbox()
    channel.basic_consume(name, inbox)
    pump(channel.connection, lambda: len(inbox) == count)
    channel.basic_nack(0, multiple=True, requeue=False)
    eventually(lambda: channel.queue_declare(dead, passive=True).method.message_count == count)
    assert broker.queue_info(name)["messages"] == 0
    letters = Inbox()
    channel.basic_consume(dead, letters, auto_ack=True)
    pump(channel.connection, lambda: len(letters) == count)
    assert letters.bodies == inbox.bodies
    for queue in (name, dead):
        channel.queue_delete(queue)


def test_the_shorter_time_to_live_holds_in_each_queue_of_a_fanout(broker, channel):
    exchange = declare_exchange(channel, "fanout")
    names = [unique(), unique()]
    for name, milliseconds in zip(names, (20, 600_000), strict=True):
        channel.queue_declare(name, durable=True, arguments={"x-message-ttl": milliseconds})
        channel.queue_bind(name, exchange)
    publish(channel, "", b"long", exchange=exchange, delivery_mode=2, expiration="600000")
    eventually(lambda: broker.queue_info(names[0])["expired"] == 1)
    assert broker.queue_info(names[1])["messages"] == 1
    assert drain(channel, names[1]) == [b"long"]
    publish(channel, "", b"short", exchange=exchange, delivery_mode=2, expiration="20")
    eventually(lambda: broker.queue_info(names[1])["expired"] == 1)
    for name in names:
        channel.queue_delete(name)


def test_reject_publish_dlx_sends_the_refused_message_to_the_dead_letters(channel):
    dead = declare(channel)
    name = declare(
        channel,
        x_dead_letter_exchange="",
        x_dead_letter_routing_key=dead,
        x_max_length=1,
        x_overflow="reject-publish-dlx",
    )
    channel.confirm_delivery()
    publish(channel, name, b"1")
    with pytest.raises(pika.exceptions.NackError):
        publish(channel, name, b"2")
    _, properties, body = get(channel, dead)
    assert (body, properties.headers["x-death"][0]["reason"]) == (b"2", "maxlen")
    assert drain(channel, name) == [b"1"]
