"""x-delayed-message: messages wait on disk, in order of their time, and survive restarts."""

from __future__ import annotations

import time

import pika
import pika.exceptions
import pytest

from tests.test_broker_queue_restart import Broken
from warren.testing import running_broker


def declare(channel) -> None:
    channel.exchange_declare("later", "x-delayed-message", durable=True, arguments={"x-delayed-type": "direct"})
    channel.queue_declare("q", durable=True)
    channel.queue_bind("q", "later", "k")
    channel.confirm_delivery()


def publish(channel, body: bytes, delay: int) -> None:
    channel.basic_publish("later", "k", body, pika.BasicProperties(delivery_mode=2, headers={"x-delay": delay}))


def wait_for(channel, count: int) -> list[tuple[bytes, int, float]]:
    found = []
    for method, properties, body in channel.consume("q", auto_ack=True, inactivity_timeout=20):
        assert method is not None, found
        found.append((body, properties.headers["x-delay"], time.time()))
        if len(found) == count:
            channel.cancel()
            return found
    raise AssertionError(found)


@pytest.fixture
def channel():
    with running_broker() as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        yield connection.channel()
        connection.close()


def test_messages_come_when_they_are_due_and_not_in_the_order_they_were_sent(channel):
    declare(channel)
    began = time.time()
    for body, delay in ((b"third", 600), (b"first", 200), (b"second", 400)):
        publish(channel, body, delay)
    assert channel.queue_declare("q", passive=True).method.message_count == 0
    found = wait_for(channel, 3)
    assert [(body, delay) for body, delay, _ in found] == [(b"first", -200), (b"second", -400), (b"third", -600)]
    assert found[0][2] - began >= 0.2
    assert found[2][2] - began >= 0.6


def test_a_message_without_a_delay_goes_at_once(channel):
    declare(channel)
    channel.basic_publish("later", "k", b"now", mandatory=True)
    assert channel.basic_get("q")[2] == b"now"


def test_what_waits_survives_a_restart(tmp_path):
    with running_broker(str(tmp_path)) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        declare(channel)
        publish(channel, b"late", 1500)
        publish(channel, b"soon", 100)
        assert wait_for(channel, 1)[0][0] == b"soon"
        connection.close()
    with running_broker(str(tmp_path)) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        assert wait_for(channel, 1)[0][:2] == (b"late", -1500)
        assert broker.call(lambda: len(broker.broker.vhosts["/"].delayed["later"])) == 0
        connection.close()


def test_an_exchange_takes_what_waits_for_it_with_it(channel):
    declare(channel)
    publish(channel, b"never", 300)
    channel.exchange_delete("later")
    declare(channel)
    publish(channel, b"other", 500)
    assert [body for body, _, _ in wait_for(channel, 1)] == [b"other"]


def test_a_message_waits_before_a_delayed_exchange_that_it_comes_to_by_a_binding(channel):
    declare(channel)
    channel.exchange_declare("front", "fanout")
    channel.queue_declare("at-once")
    channel.queue_bind("at-once", "front")
    channel.exchange_bind("later", "front")
    began = time.time()
    channel.basic_publish("front", "k", b"m", pika.BasicProperties(delivery_mode=2, headers={"x-delay": 300}))
    assert channel.basic_get("at-once", auto_ack=True)[2] == b"m"
    assert channel.queue_declare("q", passive=True).method.message_count == 0
    [(body, delay, came)] = wait_for(channel, 1)
    assert (body, delay) == (b"m", -300)
    assert came - began >= 0.3


def test_a_dead_letter_waits_before_a_delayed_exchange_and_goes_to_the_keys_of_cc_and_bcc(channel):
    declare(channel)
    channel.queue_declare("carbon", durable=True)
    channel.queue_bind("carbon", "later", "c")
    channel.queue_declare("blind", durable=True)
    channel.queue_bind("blind", "later", "b")
    channel.queue_declare("dies", arguments={"x-dead-letter-exchange": "later", "x-message-ttl": 0})
    began = time.time()
    headers = {"x-delay": 300, "CC": ["c"], "BCC": ["b"]}
    channel.queue_bind("dies", "amq.direct", "k")
    channel.basic_publish("amq.direct", "k", b"m", pika.BasicProperties(delivery_mode=2, headers=headers))
    [(body, delay, came)] = wait_for(channel, 1)
    assert (body, delay) == (b"m", -300)
    assert came - began >= 0.3
    for queue in ("carbon", "blind"):
        assert channel.basic_get(queue, auto_ack=True)[2] == b"m"


@pytest.mark.parametrize("operation", ["publish", "drop", "ackfold"])
def test_a_failure_among_the_messages_that_wait_costs_none_of_them(operation):
    """They begin anew from what is on disk, as every queue does."""
    with running_broker() as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        declare(channel)
        publish(channel, b"before", 300)

        def plant() -> None:
            delayed = broker.broker.vhosts["/"].delayed["later"]
            delayed.stored.backing = Broken(delayed.stored.backing, operation)

        broker.call(plant)
        if operation == "ackfold":
            publish(channel, b"then", 600)
        else:
            with pytest.raises(pika.exceptions.NackError):
                publish(channel, b"refused", 3_600_000)
            publish(channel, b"then", 600)
        assert [body for body, _, _ in wait_for(channel, 2)] == [b"before", b"then"]
        connection.close()
