"""The bytes of a queue are those of its bodies, as RabbitMQ counts them, wherever the messages are and after any stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import crash_and_reopen, make_entries, open_engine
from warren.storage.vhost_store import StoredQueue, VhostStore

KINDS: dict[str, dict[str, Any]] = {
    "variable": {},
    "priority": {"x-max-priority": 3},
    "sqlite": {"x-backing-queue": "sqlite"},
    "volatile": {"x-backing-queue": "volatile"},
}
HEADS = [b"", b"short", b"properties" * 30, b"long" * 20_000]  # the last is longer than 16 bits can say
BODIES = [b"", b"b", b"in the message store" * 20, b"x" * 70_000]


@pytest.fixture
def disk(tmp_path) -> FaultyDisk:
    return FaultyDisk(tmp_path / "disk")


@pytest.fixture(params=KINDS)
def arguments(request) -> dict[str, Any]:
    return KINDS[request.param]


@pytest.fixture
def store(disk: FaultyDisk) -> Iterator[VhostStore]:
    store = open_engine(disk.root, disk)
    yield store
    store.abandon()


def fill(store: VhostStore, queue: StoredQueue, persistent: bool = True) -> int:
    """A message of every head with every body; their body bytes."""
    for level, head in enumerate(HEADS):
        entries = make_entries(store, queue, BODIES, persistent, level)
        for entry in entries:
            entry.head = head
            entry.size = 4 + len(head) + len(entry.body)
        queue.backing.publish(entries)
    return len(HEADS) * sum(map(len, BODIES))


def ready_bytes(queue: StoredQueue) -> int:
    """What the queue says, in both places where it does."""
    backing = queue.backing
    info = backing.info()
    assert info["message_bytes_ready"] == backing.ready_bytes()
    assert info["message_bytes"] == backing.ready_bytes() + info["message_bytes_unacknowledged"]
    return backing.ready_bytes()


def waiting(queue: StoredQueue) -> int:
    """The body bytes of what is really there."""
    return queue.backing.fold(lambda entry, unacked, total: (True, total + len(entry.body) * (not unacked)), 0)


@pytest.mark.parametrize("persistent", [True, False])
def test_only_bodies_count_in_every_backing_queue(store, arguments, persistent):
    queue = store.declare("q", arguments=arguments)
    published = fill(store, queue, persistent)
    assert ready_bytes(queue) == waiting(queue) == published
    taken = queue.backing.fetch(5)
    held = sum(len(entry.body) for entry in taken)
    assert ready_bytes(queue) == waiting(queue) == published - held
    assert queue.backing.info()["message_bytes_unacknowledged"] == held
    queue.backing.requeue([entry.seq for entry in taken[:2]])
    queue.backing.ack([entry.seq for entry in taken[2:]])
    assert ready_bytes(queue) == waiting(queue) == published - sum(len(entry.body) for entry in taken[2:])
    queue.backing.purge()
    assert queue.backing.info()["message_bytes"] == 0


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("stop", ["clean", "dirty"])
def test_only_bodies_count_after_a_stop(store, disk, arguments, stop, checkpoint):
    """From the journal and from slots, with bodies beside them and in the message store."""
    queue = store.declare("q", arguments=arguments)
    fill(store, queue)
    store.sync()
    if checkpoint:
        store.checkpoint()
    fill(store, queue, persistent=False)
    taken = queue.backing.fetch(7)
    queue.backing.ack([entry.seq for entry in taken[:4]])
    store.sync()
    if stop == "clean":
        store.close()
        store = open_engine(disk.root, disk)
    else:
        store, _ = crash_and_reopen(store, disk)
    queue = store.get("q")
    kept = arguments != KINDS["volatile"]
    assert ready_bytes(queue) == waiting(queue)
    assert (waiting(queue) > 0) == kept
    for entry in queue.backing.fetch(100, ack_required=False):
        assert entry.body_size == len(entry.body)
    assert ready_bytes(queue) == 0
    store.abandon()


def test_a_fan_out_counts_the_body_once_in_each_queue(store, disk):
    queues = [store.declare(f"q{number}", arguments=arguments) for number, arguments in enumerate(KINDS.values())]
    for head in HEADS:
        for body in BODIES:
            store.fan_out(queues, head, body, persistent=True, published_at=1)
    assert [ready_bytes(queue) for queue in queues] == [4 * sum(map(len, BODIES))] * len(queues)
    store.sync()
    store, _ = crash_and_reopen(store, disk)
    for queue in store.queues.values():
        assert ready_bytes(queue) == waiting(queue)
    store.abandon()


def test_a_lease_of_so_many_bytes_takes_bodies_of_so_many(store, arguments):
    queue = store.declare("q", arguments=arguments)
    entries = make_entries(store, queue, [b"x" * 100] * 4, persistent=True)
    for entry in entries:
        entry.head, entry.size = b"h" * 1000, 1104
    queue.backing.publish(entries)
    assert store.checkout(queue, "lease", 10, 250).count == 2
    assert ready_bytes(queue) == 200
