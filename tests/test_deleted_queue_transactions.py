"""A queue that is deleted while a transaction with it is under way: nothing of it stays, and nothing goes twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import TINY, StandIn, fetch, open_engine, publish
from warren.errors import QueueNotFoundError
from warren.kernel.entry import PERSISTENT, Entry
from warren.kernel.journal_codec import DEDUP
from warren.storage.stored_queue import StoredQueue
from warren.storage.vhost_store import VhostStore

LARGE = b"L" * (TINY.embed_below * 2)
KINDS: dict[str, dict[str, Any]] = {
    "variable": {},
    "priorities": {"x-max-priority": 3},
    "sqlite": {"x-backing-queue": "sqlite"},
    "volatile": {"x-backing-queue": "volatile"},
}


@pytest.fixture
def store(tmp_path) -> Iterator[VhostStore]:
    disk = FaultyDisk(tmp_path)
    store = open_engine(disk.root, disk)
    yield store
    store.abandon()


def arrivals() -> list[Entry]:
    flags = (PERSISTENT, PERSISTENT, 0)
    return [Entry(0, b"head", body, flag, 1) for body, flag in zip((LARGE, b"small", LARGE), flags, strict=True)]


def has_nothing(store: VhostStore) -> bool:
    bodies = store.store.garbage().valid_bytes + store.transient_store.garbage().valid_bytes
    return bodies == 0 and store.monitor.ram_bytes == 0


@pytest.mark.parametrize("redeclared", [False, True])
@pytest.mark.parametrize("arguments", KINDS.values(), ids=KINDS)
def test_messages_of_a_transaction_go_with_the_queue_that_was_deleted_before_its_commit(
    store: VhostStore, arguments: dict[str, Any], redeclared: bool
) -> None:
    queue = store.declare("q", arguments=arguments)
    store.reserve(queue, 3)
    done: list[bool] = []
    store.transact_later([(queue, arrivals())], [], lambda: done.append(True))
    store.delete("q")
    if redeclared:
        store.declare("q", arguments=arguments)
    store.sync()
    assert done, "who waits for the transaction is told"
    assert has_nothing(store)
    assert not redeclared or store.get("q").backing.depth() == 0


@pytest.mark.parametrize("arguments", KINDS.values(), ids=KINDS)
def test_acks_of_a_transaction_end_with_the_queue_that_was_deleted_before_its_commit(
    store: VhostStore, arguments: dict[str, Any]
) -> None:
    queue = store.declare("q", arguments=arguments)
    publish(store, queue, [LARGE, b"small"])
    store.sync()
    done: list[bool] = []
    store.transact_later([], [(queue, fetch(queue, 2))], lambda: done.append(True))
    store.delete("q")
    store.ledger.put(9, "so that there is a commit", {})
    store.sync()
    assert done
    assert has_nothing(store)


@pytest.mark.parametrize("redeclared", [False, True])
def test_acks_into_a_queue_that_is_deleted_are_refused_and_leave_the_body_to_other_queues(
    store: VhostStore, redeclared: bool
) -> None:
    """Its delete has dropped the reference already: a second one was that of the other queue."""
    queue, other = store.declare("q"), store.declare("other")
    store.fan_out([queue, other], b"head", LARGE, persistent=True, published_at=1)
    store.sync()
    seqs = fetch(queue)
    store.delete("q")
    if redeclared:
        store.declare("q")
    with pytest.raises(QueueNotFoundError, match="'q' in vhost '/' was deleted"):
        store.transact([(other, arrivals()[1])], [(queue, seqs)])
    store.sync()
    assert len(other.backing) == 1, "all or nothing"
    assert store.store.garbage().valid_bytes > 0
    assert [entry.body for entry in other.backing.fetch(1)] == [LARGE]


def delete_while_it_waits(store: VhostStore, monkeypatch: pytest.MonkeyPatch, redeclared: bool) -> None:
    """The next call that waits for seq_ids finds queue q gone."""
    sync = store.committer.sync

    def deleted_meanwhile(lsn: int | None = None) -> None:
        sync(lsn)
        monkeypatch.undo()
        store.delete("q")
        if redeclared:
            store.declare("q")

    monkeypatch.setattr(store, "committer", StandIn(store.committer, sync=deleted_meanwhile))


def use_up_seq_ids(queue: StoredQueue) -> None:
    queue.seqs.take(queue.seqs.reserved - queue.seqs.next)


@pytest.mark.parametrize("redeclared", [False, True])
def test_a_transaction_into_a_queue_that_is_deleted_while_it_waits_for_seq_ids_is_refused(
    store: VhostStore, monkeypatch: pytest.MonkeyPatch, redeclared: bool
) -> None:
    queue, other = store.declare("q"), store.declare("other")
    use_up_seq_ids(queue)
    delete_while_it_waits(store, monkeypatch, redeclared)
    with pytest.raises(QueueNotFoundError, match="'q' in vhost '/' was deleted"):
        store.transact([(other, arrivals()[0]), (queue, arrivals()[0])], [])
    store.sync()
    assert other.backing.depth() == 0, "all or nothing"
    assert has_nothing(store)


@pytest.mark.parametrize("redeclared", [False, True])
def test_a_fan_out_to_a_queue_that_is_deleted_while_it_waits_for_seq_ids_leaves_no_body_and_no_producer(
    store: VhostStore, monkeypatch: pytest.MonkeyPatch, redeclared: bool
) -> None:
    """The reference of the deleted queue kept the body for ever, also across clean stops."""
    queue, other = store.declare("q"), store.declare("other")
    use_up_seq_ids(queue)
    delete_while_it_waits(store, monkeypatch, redeclared)
    with pytest.raises(QueueNotFoundError, match="'q' in vhost '/' was deleted"):
        store.fan_out([other, queue], b"head", LARGE, persistent=True, published_at=1, producer="p", publishing_id=1)
    store.sync()
    assert other.backing.depth() == 0, "all or nothing"
    assert has_nothing(store)
    assert store.ledger.table(DEDUP) == {}


@pytest.mark.parametrize("call", ["transact", "fan_out"])
def test_seq_ids_that_another_thread_took_after_they_were_reserved_are_reserved_anew(
    store: VhostStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """They were taken beyond what the journal has reserved: after a crash they would be given out twice."""
    queue = store.declare("q")
    taken: list[int] = []
    reserve = store.reserve

    def then_taken(target: StoredQueue, count: int) -> None:
        reserve(target, count)
        if not taken:
            taken.append(target.seqs.take(target.seqs.reserved - target.seqs.next))

    monkeypatch.setattr(store, "reserve", then_taken)
    use_up_seq_ids(queue)
    if call == "transact":
        [seq] = store.transact([(queue, arrivals()[1])], [])
    else:
        [entry] = store.fan_out([queue], b"head", b"body", persistent=True, published_at=1)
        seq = entry.seq
    assert seq < queue.seqs.reserved


def test_a_name_of_a_producer_that_is_too_long_leaves_no_half_of_a_group(store: VhostStore) -> None:
    """All that followed became part of a group that never ended: it was confirmed, and never written."""
    queues = [store.declare("q"), store.declare("s", arguments={"x-backing-queue": "sqlite"})]
    with pytest.raises(ValueError, match="at most 255"):
        store.fan_out(queues, b"head", LARGE, persistent=True, published_at=1, producer="p" * 256, publishing_id=1)
    publish(store, queues[0], 1)
    store.sync()
    assert store.journal.synced_lsn == store.journal.next_lsn - 1
    store.abandon()
    again = open_engine(os.path.dirname(os.path.dirname(os.path.dirname(store.root))), store.disk)
    assert again.get("q").backing.depth() == 1
    assert again.store.garbage().valid_bytes == 0
    again.abandon()
