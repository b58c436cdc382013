"""A disk that fills in the middle of a publish: the rest is done when there is room, and nothing twice."""

from __future__ import annotations

import threading

import pika
import pytest

from tests.broker_clients import eventually
from warren.errors import DiskFullError
from warren.testing import running_broker

QUEUES = ("a", "b", "c")


@pytest.fixture(scope="module")
def broker():
    with running_broker() as running:
        yield running


@pytest.fixture
def channel(broker):
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel = connection.channel()
    yield channel
    for queue in (*QUEUES, "d", "full"):
        channel.queue_delete(queue)
    connection.close()


def fill_disk(broker, calls: int) -> None:
    """The disk is full from the call of `check_publish` of that number on, until `free_disk`."""

    def plant() -> None:
        committer = broker.broker.vhosts["/"].store.committer
        left = [calls]

        def check_publish() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise DiskFullError("the disk is full, says the test")

        committer.check_publish = check_publish

    broker.call(plant)


def free_disk(broker) -> None:
    def free() -> None:
        vhost = broker.broker.vhosts["/"]
        del vhost.store.committer.check_publish
        vhost.set_alarm("disk", True)
        vhost.set_alarm("disk", False)

    broker.call(free)


def stopped(broker) -> bool:
    return broker.call(lambda: any(connection._held for connection in broker.broker.vhosts["/"].connections))


@pytest.mark.parametrize("calls", range(4))
@pytest.mark.parametrize(
    "properties",
    [
        pika.BasicProperties(),
        pika.BasicProperties(headers={"CC": ["k2"], "BCC": ["k3"]}),
        pika.BasicProperties(delivery_mode=2),
        pika.BasicProperties(delivery_mode=2, headers={"x-producer-name": "p", "x-publishing-id": 7}),
    ],
    ids=["transient", "carbon copies", "persistent", "numbered"],
)
@pytest.mark.parametrize("mode", ["confirm", "tx"])
def test_a_publish_that_a_full_disk_stopped_goes_on_where_it_was(broker, channel, calls, properties, mode):
    for queue in QUEUES:
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, "amq.fanout")
    dead = {
        "x-max-length": 0,
        "x-overflow": "reject-publish-dlx",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "d",
    }
    channel.queue_declare("d", durable=True)
    if mode == "tx":
        channel.tx_select()
    else:
        channel.confirm_delivery()
        channel.queue_declare("full", durable=True, arguments=dead)
        channel.queue_bind("full", "amq.fanout")
    fill_disk(broker, calls)
    done = threading.Event()

    def publish() -> None:
        try:
            channel.basic_publish("amq.fanout", "k", b"m", properties)
        except pika.exceptions.NackError:
            assert mode == "confirm"  # one of the queues was full
        if mode == "tx":
            channel.tx_commit()
        done.set()

    publisher = threading.Thread(target=publish)
    publisher.start()
    eventually(lambda: stopped(broker) or done.is_set())
    free_disk(broker)
    publisher.join(20)
    assert done.is_set()
    for queue in QUEUES:
        assert [body for _, _, body in iter_get(channel, queue)] == [b"m"]
    if mode == "confirm":
        eventually(lambda: channel.queue_declare("d", passive=True).method.message_count)
        assert len(iter_get(channel, "d")) == 1


def iter_get(channel, queue: str) -> list[tuple[object, object, bytes]]:
    found = []
    while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
        found.append(got)
    return found
