"""A queue that fails is restarted alone: nothing that was confirmed is lost, and nobody else notices."""

from __future__ import annotations

import contextlib
import time

import pika
import pika.exceptions
import pytest

from warren.testing import running_broker

PERSISTENT = pika.BasicProperties(delivery_mode=2)
OPEN: list[pika.BlockingConnection] = []  # closed at the end of a test
pytestmark = [
    pytest.mark.usefixtures("pika_litter"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def broker():
    with running_broker() as running:
        yield running
        while OPEN:
            with contextlib.suppress(pika.exceptions.AMQPError):
                OPEN.pop().close()


def connect(broker) -> pika.BlockingConnection:
    OPEN.append(pika.BlockingConnection(pika.URLParameters(broker.url)))
    return OPEN[-1]


def break_once(broker, queue: str, operation: str) -> None:
    """The next call of an operation of the queue's backing queue raises."""

    def plant() -> None:
        process = broker.broker.vhosts["/"].queues[queue]
        real = process._backing

        class Broken:
            def __getattr__(self, name):
                if name == operation:

                    def fail(*arguments, **options):
                        raise RuntimeError(f"planted in {operation}")

                    return fail
                return getattr(real, name)

            def __len__(self):
                return len(real)

        process._backing = Broken()

    broker.call(plant)


def bodies(channel, queue: str) -> list[bytes]:
    found = []
    while True:
        method, _, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return found
        found.append(body)


def publish(channel) -> None:
    with pytest.raises(pika.exceptions.NackError):
        channel.basic_publish("", "q", b"refused", PERSISTENT)


def get(channel) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_get("q")
    assert caught.value.reply_code == 506


def ack(channel) -> None:
    method, _, body = channel.basic_get("q")
    assert body == b"0"
    channel.basic_ack(method.delivery_tag)
    channel.connection.process_data_events(0.05)


def requeue(channel) -> None:
    method, _, _ = channel.basic_get("q")
    channel.basic_nack(method.delivery_tag)
    channel.connection.process_data_events(0.05)


def purge(channel) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        channel.queue_purge("q")


def close(channel) -> None:
    channel.basic_get("q")
    channel.close()


@pytest.mark.parametrize(
    ("operation", "do"),
    [("publish", publish), ("fetch", get), ("ack", ack), ("requeue", requeue), ("purge", purge), ("requeue", close)],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("arguments", [{}, {"x-max-priority": 3}], ids=["variable", "priority"])
def test_an_error_in_a_queue_operation_restarts_that_queue_alone(broker, operation, do, arguments):
    connection = connect(broker)
    channel = connection.channel()
    channel.queue_declare("q", durable=True, arguments=arguments)
    channel.queue_declare("other", durable=True)
    channel.confirm_delivery()
    kept = [b"%d" % number for number in range(5)]
    for queue in ("q", "other"):
        for body in kept:
            channel.basic_publish("", queue, body, PERSISTENT)
    bystander = connect(broker).channel()
    break_once(broker, "q", operation)
    do(channel)
    assert connection.is_open
    channel = connection.channel()
    method, _, body = channel.basic_get("q")
    assert (body, method.redelivered) == (b"0", True)
    channel.basic_nack(method.delivery_tag)
    channel.basic_publish("", "q", b"new", PERSISTENT)
    assert bodies(channel, "q") == [*kept, b"new"]
    assert bodies(bystander, "other") == kept


def test_consumers_of_a_queue_that_failed_are_told(broker):
    connection = connect(broker)
    channel = connection.channel()
    channel.queue_declare("q", durable=True)
    cancelled: list[str] = []
    channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
    channel.basic_consume("q", lambda *_: None, consumer_tag="mine")
    break_once(broker, "q", "publish_delivered")
    other = connect(broker).channel()
    other.basic_publish("", "q", b"lost without a confirm")
    deadline = time.monotonic() + 10
    while not cancelled and time.monotonic() < deadline:
        connection.process_data_events(0.05)
    assert cancelled == ["mine"]


def test_a_queue_that_keeps_failing_stays_down_and_others_go_on(broker):
    connection = connect(broker)
    channel = connection.channel()
    channel.queue_declare("q", durable=True)
    channel.confirm_delivery()
    for _ in range(6):
        break_once(broker, "q", "publish")
        publish(channel)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="failed too often"):
        channel.queue_declare("q", durable=True)
    connection.channel().queue_declare("fine")
