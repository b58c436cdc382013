"""Mistakes that were once made in the variable queue and its relatives, one test each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import HEAD, crash_and_reopen, fetch, make_entries, open_engine, publish
from warren.kernel.entry import Entry
from warren.kernel.journal_codec import MOST_TARGETS, RecordBuffer
from warren.kernel.overlay import HIDDEN, Overlay
from warren.storage import vhost_transactions
from warren.storage.variable_queue import VariableQueue
from warren.storage.vhost_store import VhostStore

LARGE = b"L" * 1000


@pytest.fixture
def disk(tmp_path) -> FaultyDisk:
    return FaultyDisk(tmp_path / "disk")


@pytest.fixture
def store(disk: FaultyDisk) -> Iterator[VhostStore]:
    store = open_engine(disk.root, disk)
    yield store
    store.abandon()


def test_purge_spares_what_a_transaction_published_and_has_not_committed(store: VhostStore, disk: FaultyDisk) -> None:
    """Its record came after the publish, so a replay took it for the end of the message."""
    queue = store.declare("q")
    publish(store, queue, 2)
    (hidden,) = make_entries(store, queue, [b"from a transaction"], persistent=True)
    publish(store, queue, 2)
    store.journal.buffer.begin_group()
    queue.backing.journal_publish([hidden], HIDDEN)
    store.journal.buffer.end_group()
    store.journal.after(lambda: queue.backing.reveal([hidden]))
    assert queue.backing.purge() == 4
    store.sync()
    assert len(queue.backing) == 1
    store, _ = crash_and_reopen(store, disk)
    assert fetch(store.get("q"), 10) == [hidden.seq]
    store.abandon()


def test_what_a_transaction_acked_cannot_be_requeued_before_its_commit(store: VhostStore) -> None:
    """It came back as ready, although its ack was on the way to the disk, and its body was let go of twice."""
    queue = store.declare("q")
    publish(store, queue, [LARGE, b"small"])
    seqs = fetch(queue, 2)
    store.journal.buffer.begin_group()
    queue.backing.journal_ack(seqs)
    store.journal.buffer.end_group()
    assert queue.backing.requeue(seqs) == []
    store.sync()
    queue.backing.ack_committed(seqs)
    assert queue.backing.depth() == 0
    assert store.store.garbage().valid_bytes == 0


@pytest.mark.parametrize("taken", [0, 12])
def test_a_deleted_queue_gives_back_the_bodies_of_transient_messages_on_disk(store: VhostStore, taken: int) -> None:
    queue = store.declare("q")
    publish(store, queue, [LARGE] * 30, persistent=False)
    fetch(queue, taken)
    assert isinstance(queue.backing, VariableQueue)
    queue.backing.set_ram_target(0)
    assert queue.backing.info()["delta"]
    store.transient_store.flush()
    store.delete("q")
    assert store.transient_store.garbage().valid_bytes == 0
    assert store.monitor.ram_bytes == 0


def test_a_clean_stop_forgets_the_marks_of_transient_messages(store: VhostStore, disk: FaultyDisk) -> None:
    queue = store.declare("q")
    publish(store, queue, 1)
    publish(store, queue, 2, persistent=False)
    queue.backing.requeue(fetch(queue, 3))
    assert queue.backing.counts == {0: 1, 1: 1, 2: 1}
    store.close()
    store = open_engine(disk.root, disk)
    backing = store.get("q").backing
    assert backing.counts == {0: 1}
    assert backing.returned.pairs() == [0, 1]
    store.abandon()


def test_a_checkout_of_a_priority_queue_stays_below_its_bytes(store: VhostStore) -> None:
    """Each level took at least one message, however large."""
    queue = store.declare("q", arguments={"x-max-priority": 2})
    for level in range(3):
        queue.backing.publish(make_entries(store, queue, [b"x" * 100], persistent=True, level=level))
    size = 4 + len(HEAD) + 100
    checkout = store.checkout(queue, "lease", 10, size + 1)
    assert checkout is not None
    assert checkout.count == 1
    checkout = store.checkout(queue, "lease", 10, 2 * size)
    assert checkout is not None
    assert checkout.count == 2


def test_entries_of_a_priority_queue_know_their_level_also_from_disk(store: VhostStore) -> None:
    queue = store.declare("q", arguments={"x-max-priority": 2})
    for level in range(3):
        queue.backing.publish(make_entries(store, queue, [b"x"] * 9, persistent=True, level=level))
    for level in queue.backing.levels:
        level.set_ram_target(0)

    def visit(entry: Entry, unacked: bool, seen: list[int]) -> tuple[bool, list[int]]:
        return True, [*seen, entry.level]

    assert queue.backing.fold(visit, []) == [2] * 9 + [1] * 9 + [0] * 9
    assert [entry.level for entry in queue.backing.fetch(27)] == [2] * 9 + [1] * 9 + [0] * 9


def test_fetchwhile_takes_nothing_in_place_of_a_damaged_message(store: VhostStore, disk: FaultyDisk) -> None:
    queue = store.declare("q")
    publish(store, queue, 4, persistent=False)
    assert isinstance(queue.backing, VariableQueue)
    queue.backing.set_ram_target(0)
    (path,) = [path for path in disk.files() if path.endswith(".qs")]
    disk.flip_bit(path, 8 * (64 + 20))
    head, taken = queue.backing.fetchwhile(lambda entry: entry.seq == 0, lambda entry, so_far: [*so_far, entry.seq], [])
    assert taken == []
    assert head is not None
    assert head.seq == 1
    assert fetch(queue, 10) == [1, 2, 3]


def test_dropping_many_writes_one_record(store: VhostStore) -> None:
    queue = store.declare("q")
    publish(store, queue, 5)
    store.sync()
    assert queue.backing.dropwhile(lambda entry: True) is None
    assert store.journal.buffer.count == 1


def test_a_volatile_queue_survives_a_clean_stop_as_a_name(store: VhostStore, disk: FaultyDisk) -> None:
    queue = store.declare("q", arguments={"x-backing-queue": "volatile"})
    publish(store, queue, 3)
    store.close()
    store = open_engine(disk.root, disk)
    assert store.clean_start
    assert store.get("q").backing.depth() == 0
    assert publish(store, store.get("q"), 1) == [3]
    store.abandon()


def test_a_fan_out_to_very_many_queues_is_some_records_and_all_or_nothing(
    store: VhostStore, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vhost_transactions, "MOST_TARGETS", 3)
    queues = [store.declare(f"q{n}") for n in range(8)]
    store.fan_out(queues, HEAD, b"to all", persistent=True, published_at=1, producer="p" * 255, publishing_id=1)
    store.sync()
    store, _ = crash_and_reopen(store, disk)
    for queue in store.queues.values():
        assert queue.backing.ready_bytes() == len(b"to all")
        assert [entry.body for entry in queue.backing.fetch(2)] == [b"to all"]
    store.abandon()


def test_a_record_refuses_more_targets_than_it_can_count() -> None:
    overlay = Overlay()
    targets = [(256, seq, overlay) for seq in range(MOST_TARGETS + 1)]
    with pytest.raises(ValueError, match="4001 targets"):
        RecordBuffer().append_fanout(Entry(0, HEAD, b"", 1), targets, 1)
