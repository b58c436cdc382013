"""The broker as a client sees it: the first things that anybody tries, with pika."""

from __future__ import annotations

import time

import pika
import pika.exceptions
import pytest

from warren.testing import running_broker


def connect(broker) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.URLParameters(broker.url))


def drain(channel, queue: str, *, ack: bool = True) -> list[bytes]:
    found = []
    while True:
        method, _, body = channel.basic_get(queue)
        if method is None:
            return found
        if ack:
            channel.basic_ack(method.delivery_tag)
        found.append(body)


@pytest.fixture
def broker():
    with running_broker() as running:
        yield running


@pytest.fixture
def channel(broker):
    connection = connect(broker)
    yield connection.channel()
    if connection.is_open:
        connection.close()


def test_what_is_published_with_confirms_comes_back_in_order(channel):
    channel.queue_declare("q", durable=True)
    channel.confirm_delivery()
    for number in range(100):
        channel.basic_publish("", "q", b"%d" % number, pika.BasicProperties(delivery_mode=2))
    assert drain(channel, "q") == [b"%d" % number for number in range(100)]


def test_confirmed_messages_survive_a_restart_and_their_bindings_too(tmp_path):
    with running_broker(str(tmp_path)) as broker:
        connection = connect(broker)
        channel = connection.channel()
        channel.exchange_declare("x", "topic", durable=True)
        channel.queue_declare("q", durable=True)
        channel.queue_bind("q", "x", "a.*")
        channel.confirm_delivery()
        channel.basic_publish("x", "a.b", b"kept", pika.BasicProperties(delivery_mode=2, headers={"k": [1, "two"]}))
        channel.basic_publish("x", "a.b", b"transient")
        connection.close()
    with running_broker(str(tmp_path)) as broker:
        connection = connect(broker)
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("x", "a.c", b"new", mandatory=True)
        method, properties, body = channel.basic_get("q", auto_ack=True)
        assert (body, properties.headers, method.redelivered) == (b"kept", {"k": [1, "two"]}, False)
        assert drain(channel, "q") == [b"new"]
        connection.close()


def test_an_unroutable_mandatory_message_is_returned(channel):
    channel.confirm_delivery()
    with pytest.raises(pika.exceptions.UnroutableError) as caught:
        channel.basic_publish("", "nobody", b"x", mandatory=True)
    [returned] = caught.value.messages
    assert (returned.method.reply_code, returned.method.reply_text) == (312, "NO_ROUTE")


def test_rejected_messages_go_to_the_dead_letter_exchange_with_their_history(channel):
    channel.exchange_declare("dlx", "fanout")
    channel.queue_declare("dead")
    channel.queue_bind("dead", "dlx")
    channel.queue_declare("q", arguments={"x-dead-letter-exchange": "dlx"})
    channel.basic_publish("", "q", b"poison", pika.BasicProperties(headers={"a": 1}))
    method, _, _ = channel.basic_get("q")
    channel.basic_nack(method.delivery_tag, requeue=False)
    channel.connection.process_data_events(0.05)
    method, properties, body = channel.basic_get("dead")
    assert body == b"poison"
    [death] = properties.headers["x-death"]
    assert (death["queue"], death["reason"], death["count"], death["routing-keys"]) == ("q", "rejected", 1, ["q"])
    assert properties.headers["x-first-death-queue"] == "q"
    assert properties.headers["a"] == 1


def test_what_a_closed_channel_had_not_acked_is_delivered_again_and_says_so(channel):
    channel.queue_declare("q")
    for body in (b"1", b"2", b"3"):
        channel.basic_publish("", "q", body)
    other = channel.connection.channel()
    assert drain(other, "q", ack=False) == [b"1", b"2", b"3"]
    other.close()
    again = [channel.basic_get("q") for _ in range(3)]
    assert [(body, method.redelivered) for method, _, body in again] == [(b"1", True), (b"2", True), (b"3", True)]


def test_prefetch_bounds_what_a_consumer_holds(channel):
    channel.queue_declare("q")
    for number in range(10):
        channel.basic_publish("", "q", b"%d" % number)
    channel.basic_qos(prefetch_count=3)
    got = []
    channel.basic_consume("q", lambda ch, method, properties, body: got.append((method.delivery_tag, body)))
    channel.connection.process_data_events(0.1)
    assert [body for _, body in got] == [b"0", b"1", b"2"]
    channel.basic_ack(got[1][0], multiple=True)
    channel.connection.process_data_events(0.1)
    assert [body for _, body in got] == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize(
    ("action", "code"),
    [
        (lambda c: c.queue_declare("nope", passive=True), 404),
        (lambda c: c.basic_get("nope"), 404),
        (lambda c: c.exchange_declare("x", passive=True), 404),
        (lambda c: (c.queue_declare("q"), c.queue_declare("q", durable=True)), 406),
        (lambda c: c.queue_declare("amq.mine"), 403),
        (lambda c: (c.basic_ack(7), c.queue_declare("later")), 406),
        (lambda c: c.queue_declare("q", arguments={"x-max-length": -1}), 406),
        (lambda c: c.exchange_delete("amq.direct"), 403),
        (lambda c: c.queue_bind("q2", "amq.direct"), 404),
    ],
)
def test_a_mistake_closes_the_channel_with_rabbitmqs_code_and_nothing_else(channel, action, code):
    connection = channel.connection
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        action(channel)
    assert caught.value.reply_code == code
    assert connection.is_open
    connection.channel().queue_declare("still-works")


@pytest.mark.parametrize("consumers", [1, 2, 4])
def test_many_messages_in_one_write_reach_all_consumers_to_the_last(broker, consumers):
    """A consumer that was dealt as much as one turn allows has room for more."""
    connection = connect(broker)
    channel = connection.channel()
    channel.queue_declare("q")
    got: list[bytes] = []
    for _ in range(consumers):
        channel.basic_consume("q", lambda ch, method, properties, body: got.append(body), auto_ack=True)
    publisher = connect(broker)
    sender = publisher.channel()
    for number in range(3000):
        sender.basic_publish("", "q", b"%d" % number)
    deadline = time.monotonic() + 20
    while len(got) < 3000 and time.monotonic() < deadline:
        connection.process_data_events(0.05)
        publisher.process_data_events(0)
    assert sorted(map(int, got)) == list(range(3000))
    connection.close()
    publisher.close()
