"""A producer that numbers its messages and sends them again after a crash: each arrives once."""

from __future__ import annotations

import pika
import pytest

from warren.testing import running_broker


def publish(channel, number: int, *, producer: str = "app", exchange: str = "", key: str = "q") -> None:
    headers = {"x-producer-name": producer, "x-publishing-id": number}
    channel.basic_publish(exchange, key, b"%d" % number, pika.BasicProperties(delivery_mode=2, headers=headers))


def drain(channel, queue: str) -> list[int]:
    found = []
    while True:
        method, _, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return found
        found.append(int(body))


def connect(broker):
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel = connection.channel()
    channel.confirm_delivery()
    return connection, channel


def test_what_was_published_before_is_confirmed_and_not_kept_again(tmp_path):
    with running_broker(str(tmp_path)) as broker:
        connection, channel = connect(broker)
        channel.queue_declare("q", durable=True)
        for number in (1, 2, 3, 2, 3, 4):
            publish(channel, number)
        publish(channel, 3, producer="another")
        assert drain(channel, "q") == [1, 2, 3, 4, 3]
        connection.close()
    with running_broker(str(tmp_path)) as broker:
        connection, channel = connect(broker)
        for number in (3, 4, 5):
            publish(channel, number)
        assert drain(channel, "q") == [5]
        assert broker.call(lambda: broker.broker.vhosts["/"].queues["q"].duplicates) == 2
        connection.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_queue_that_was_bound_later_has_not_had_it(again):
    with running_broker() as broker:
        connection, channel = connect(broker)
        channel.exchange_declare("x", "fanout", durable=True)
        for queue in ("one", "two"):
            channel.queue_declare(queue, durable=True)
            channel.queue_bind(queue, "x")
            publish(channel, 7, exchange="x", key="")
        if again:
            publish(channel, 7, exchange="x", key="")
        assert (drain(channel, "one"), drain(channel, "two")) == ([7], [7])
        connection.close()
