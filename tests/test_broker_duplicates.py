"""A producer that numbers its messages and sends them again after a crash: each arrives once."""

from __future__ import annotations

import pika
import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import crash_and_reopen, open_engine
from warren.kernel.journal_codec import DEDUP
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


@pytest.mark.parametrize("clean", [True, False])
def test_a_queue_remembers_so_many_producers_and_forgets_the_one_that_was_silent_for_longest(tmp_path, clean):
    disk = FaultyDisk(tmp_path)
    store = open_engine(str(tmp_path), disk, producers_per_queue=3)
    queues = [store.declare("q"), store.declare("other")]

    def number(name: str, publishing_id: int) -> None:
        store.fan_out(
            [queues[0]], b"head", b"body", persistent=True, published_at=1, producer=name, publishing_id=publishing_id
        )

    store.fan_out([queues[1]], b"head", b"body", persistent=True, published_at=1, producer="a", publishing_id=9)
    for publishing_id, name in enumerate(("a", "b", "c", "a", "d", "e")):
        number(name, publishing_id)
    remembered = [None, None, 3, 4, 5]
    assert [store.last_publishing_id(queues[0], name) for name in "bcade"] == remembered
    assert store.last_publishing_id(queues[1], "a") == 9, "each queue counts its own"
    for publishing_id in range(100):  # names that come once
        number(f"random-{publishing_id}", publishing_id)
        store.sync()
        store.checkpoint(seal=True)
    assert len(store.ledger.table(DEDUP)) == 4
    assert len(store.ledger._files) == 4, "and no more are carried from file to file"
    if clean:
        store.close()
        store = open_engine(str(tmp_path), disk, producers_per_queue=3)
    else:
        store, _ = crash_and_reopen(store, disk)
    queue = store.get("q")
    assert [store.last_publishing_id(queue, f"random-{last}") for last in (96, 97, 98, 99)] == [None, 97, 98, 99]
    assert len(store.ledger.table(DEDUP)) == 4
    store.abandon()


@pytest.mark.parametrize("clean", [True, False])
def test_a_queue_that_is_deleted_takes_the_numbers_of_its_producers_with_it(tmp_path, clean):
    disk = FaultyDisk(tmp_path)
    store = open_engine(str(tmp_path), disk)
    for name in ("stays", "goes", "transient"):
        queue = store.declare(name, durable=name != "transient")
        queues = [queue] if queue.durable else [queue, store.get("stays")]
        store.fan_out(queues, b"head", b"body", persistent=True, published_at=1, producer="p", publishing_id=7)
    store.sync()
    store.checkpoint(seal=True)  # from here on the journal has them as records of their own
    assert len(store.ledger.table(DEDUP)) == 3
    store.delete("goes")
    assert store.last_publishing_id(store.get("stays"), "p") == 7
    assert len(store.ledger.table(DEDUP)) == len(store.ledger._files) == 2
    again = store.declare("goes")
    assert store.last_publishing_id(again, "p") is None
    if clean:
        store.close()
        store = open_engine(str(tmp_path), disk)
    else:
        store, _ = crash_and_reopen(store, disk)
    assert list(store.ledger.table(DEDUP)) == [f"{store.get('stays').uid}:p"], (
        "a queue that is not durable is gone, too"
    )
    assert store.last_publishing_id(store.get("stays"), "p") == 7
    store.abandon()


def test_a_broker_forgets_producers_above_its_setting():
    with running_broker(producers_per_queue=2) as broker:
        connection, channel = connect(broker)
        channel.queue_declare("q", durable=True)
        for producer in ("a", "b", "c", "a", "c"):
            publish(channel, 1, producer=producer)
        assert drain(channel, "q") == [1, 1, 1, 1], "of the last two, a was forgotten and c was not"
        connection.close()
