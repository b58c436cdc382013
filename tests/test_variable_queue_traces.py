"""Worked traces of RabbitMQ's variable queue, step by step: where each message is, what is written, what a crash leaves.

The numbers of the sections are those of `rabbitmq-facts.md`. Where it tells generations apart, this is the old one, with
q1, q2, delta, q3 and q4 and with an fsync before a confirm.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Callable, Iterator

import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import crash_and_reopen, deliver, fetch, make_entries, open_engine, publish
from warren.errors import StoreFailedError
from warren.storage.variable_queue import VariableQueue
from warren.storage.vhost_store import StoredQueue, VhostStore

LARGE = b"L" * 5000  # goes to the message store


@pytest.fixture
def disk(tmp_path) -> FaultyDisk:
    return FaultyDisk(tmp_path / "disk")


@pytest.fixture
def store(disk: FaultyDisk) -> Iterator[VhostStore]:
    """Of the usual sizes, so that nothing happens behind the test's back."""
    store = open_engine(
        disk.root, disk, segment_entries=4, journal_file_bytes=1 << 20, embed_below=4096, ram_target=2048
    )
    yield store
    with contextlib.suppress(Exception):
        store.abandon()


def variable(queue: StoredQueue) -> VariableQueue:
    assert isinstance(queue.backing, VariableQueue)
    return queue.backing


# ---- 11.1: paging ----

Containers = tuple[list[int], list[int], tuple[int, int, int] | None, list[int], list[int]]


def containers(backing: VariableQueue) -> Containers:
    """q4, q3, delta (start, count, end), q2, q1: from head to tail."""
    delta = (backing.delta_start, backing.delta_count, backing.delta_end) if backing.delta_count else None
    q4, q3, q2, q1 = ([entry.seq for entry in queue] for queue in (backing.q4, backing.q3, backing.q2, backing.q1))
    return q4, q3, delta, q2, q1


@pytest.mark.parametrize("embed_below", [0, 1, 4096])
@pytest.mark.parametrize("persistent", [False, True])
def test_11_1_paging_moves_messages_from_container_to_container(
    disk: FaultyDisk, embed_below: int, persistent: bool
) -> None:
    """As written for transient messages in the message store (embed_below 0 or 1), and the same wherever a body goes."""
    # The old queue looks at its memory every 1000th call only; the slack stands for that.
    store = open_engine(
        disk.root, disk, segment_entries=4, io_batch=1, embed_below=embed_below, ram_target=2048, ram_slack=1000
    )
    queue = store.declare("q")
    backing = variable(queue)

    publish(store, queue, 10, persistent=persistent)
    assert containers(backing) == ([*range(10)], [], None, [], [])

    backing.set_ram_target(4)
    assert containers(backing) == ([0, 1, 2, 3], [4, 5, 6, 7], (8, 2, 10), [], [])

    publish(store, queue, 2, persistent=persistent)
    assert containers(backing) == ([0, 1, 2, 3], [4, 5, 6, 7], (8, 2, 10), [], [10, 11])

    backing.set_ram_target(3)
    assert containers(backing) == ([0, 1, 2], [3, 4], (5, 5, 10), [10, 11], [])

    for seq in range(4):
        assert fetch(queue, 1, ack_required=False) == [seq]
    assert containers(backing) == ([], [4], (5, 5, 10), [10, 11], [])
    assert fetch(queue, 1, ack_required=False) == [4]
    assert containers(backing) == ([], [5, 6, 7], (8, 2, 10), [10, 11], [])

    for seq in (5, 6):
        assert fetch(queue, 1, ack_required=False) == [seq]
    assert containers(backing) == ([], [7], (8, 2, 10), [10, 11], [])
    assert fetch(queue, 1, ack_required=False) == [7]
    assert containers(backing) == ([], [8, 9, 10, 11], None, [], [])

    publish(store, queue, 1, persistent=persistent)
    assert containers(backing) == ([], [8, 9, 10, 11], None, [], [12])

    for seq in (8, 9, 10):
        assert fetch(queue, 1, ack_required=False) == [seq]
    assert containers(backing) == ([], [11], None, [], [12])
    assert fetch(queue, 1, ack_required=False) == [11]
    assert containers(backing) == ([12], [], None, [], [])

    (last,) = backing.fetch(1, ack_required=False)
    assert (last.seq, last.body) == (12, b"m12")
    assert backing.is_empty()
    store.close()


def test_11_1_a_higher_target_brings_nothing_back_to_ram(store: VhostStore) -> None:
    queue = store.declare("q")
    backing = variable(queue)
    publish(store, queue, 10, persistent=False)
    backing.set_ram_target(4)
    before = containers(backing)
    backing.set_ram_duration_target(math.inf)
    assert containers(backing) == before


def test_11_1_with_a_target_of_nothing_the_head_segment_stays_in_q3(store: VhostStore) -> None:
    queue = store.declare("q")
    backing = variable(queue)
    publish(store, queue, 10, persistent=False)
    backing.set_ram_target(0)
    assert containers(backing) == ([], [0, 1, 2, 3], (4, 6, 10), [], [])
    assert backing.info()["ram_msg_count"] == 0


def test_11_1_pending_acks_are_paged_too_and_come_back_by_their_seq_id(store: VhostStore) -> None:
    queue = store.declare("q")
    backing = variable(queue)
    publish(store, queue, 10, persistent=False)
    assert fetch(queue, 6) == [0, 1, 2, 3, 4, 5]
    backing.set_ram_target(0)
    assert backing.info()["ram_pending_acks"] == 0
    assert backing.pending_pairs() == [0, 6]
    assert backing.ack([4, 1]) == [4, 1]
    assert backing.requeue([5, 0, 3, 2]) == [5, 0, 3, 2]
    assert fetch(queue, 10) == [0, 2, 3, 5, 6, 7, 8, 9]


# ---- 11.3: requeue ----


@pytest.mark.parametrize("target", [2048, 2, 0])
@pytest.mark.parametrize("persistent", [True, False])
def test_11_3_a_requeued_message_takes_its_old_place(store: VhostStore, target: int, persistent: bool) -> None:
    queue = store.declare("q")
    publish(store, queue, 6, persistent=persistent)
    assert deliver(queue, 4) == [(0, False), (1, False), (2, False), (3, False)]
    backing = variable(queue)
    backing.set_ram_target(target)
    assert backing.ack([1]) == [1]
    backing.requeue([3])
    backing.requeue([0])
    assert deliver(queue, 4) == [(0, True), (3, True), (4, False), (5, False)]
    backing.requeue([0, 3])
    assert deliver(queue) == [(0, True)]
    backing.requeue([2])
    assert deliver(queue, 2) == [(2, True), (3, True)]


# ---- 11.4: what is written, and when it is confirmed ----


def journal_bytes(disk: FaultyDisk) -> int:
    return sum(disk.size(path) for path in disk.files() if path.endswith(".wal"))


def names(disk: FaultyDisk, *suffixes: str) -> list[str]:
    return [os.path.basename(path) for path in disk.files() if path.endswith(suffixes)]


def test_11_4_a_small_message_is_one_journal_record_and_confirmed_after_its_sync(
    store: VhostStore, disk: FaultyDisk
) -> None:
    queue = store.declare("q")
    store.reserve(queue, 1)
    store.sync()
    before = journal_bytes(disk)
    (seq,) = publish(store, queue, 1, confirm=True)
    assert store.journal.buffer.count == 1
    assert queue.backing.needs_timeout()
    assert queue.backing.drain_confirmed() == []
    store.sync()
    assert queue.backing.drain_confirmed() == [seq, 1]
    assert queue.backing.drain_confirmed() == [], "once"
    assert not queue.backing.needs_timeout()
    assert journal_bytes(disk) > before
    assert names(disk, ".qi", ".qs", ".rdq") == []


def test_11_4_a_large_message_is_confirmed_after_the_store_and_the_journal_were_synced(
    store: VhostStore, disk: FaultyDisk
) -> None:
    queue = store.declare("q")
    store.sync()
    disk.trace.clear()
    (seq,) = publish(store, queue, [LARGE], confirm=True)
    assert queue.backing.drain_confirmed() == []
    store.sync()
    assert queue.backing.drain_confirmed() == [seq, 1]
    synced = [os.path.splitext(call.path)[1] for call in disk.trace if call.kind == "sync"]
    assert synced == [".rdq", ".wal"]
    assert journal_bytes(disk) < len(LARGE)


@pytest.mark.parametrize("suffix", [".rdq", ".wal"])
def test_11_4_nothing_is_confirmed_when_one_of_the_two_syncs_fails(
    store: VhostStore, disk: FaultyDisk, suffix: str
) -> None:
    queue = store.declare("q")
    store.sync()
    publish(store, queue, [LARGE], confirm=True)
    probe = disk.clone()
    del probe
    calls = _calls_until_sync(store, disk, suffix)
    disk.fail_at(calls, errno.EIO)
    with pytest.raises(StoreFailedError):
        store.sync()
    assert queue.backing.drain_confirmed() == []
    assert queue.backing.needs_timeout()


def _calls_until_sync(store: VhostStore, disk: FaultyDisk, suffix: str) -> int:
    """The number of the call from now on that syncs a file `suffix`: a commit creates, writes, syncs file and name."""
    calls = {".rdq": ["create", "pwrite", "pwrite", "sync"], ".wal": ["pwrite", "sync"]}
    if suffix == ".rdq":
        return len(calls[".rdq"])
    return len(calls[".rdq"]) + len(["sync_dir"]) + len(calls[".wal"])


@pytest.mark.parametrize("body", [b"small", LARGE])
def test_11_4_acked_before_the_flush_it_never_reaches_a_segment_and_is_still_confirmed(
    store: VhostStore, disk: FaultyDisk, body: bytes
) -> None:
    queue = store.declare("q")
    entries = make_entries(store, queue, [body], persistent=True)
    queue.backing.publish_delivered(entries, confirm=True)
    assert queue.backing.ack([entries[0].seq]) == [entries[0].seq]
    store.sync()
    assert queue.backing.drain_confirmed() == [entries[0].seq, 1]
    store.checkpoint(seal=True, carry_below=0)
    assert names(disk, ".qi", ".qs") == []
    assert store.store.garbage().valid_bytes == 0


def test_11_4_what_a_consumer_took_without_ack_is_never_stored(store: VhostStore, disk: FaultyDisk) -> None:
    queue = store.declare("q")
    entries = make_entries(store, queue, [b"x"], persistent=True)
    store.sync()
    queue.backing.discard(entries)
    assert store.journal.buffer.empty
    assert queue.backing.depth() == 0


@pytest.mark.parametrize("durable", [True, False])
def test_11_4_a_transient_message_is_confirmed_at_once_and_written_only_by_paging(
    store: VhostStore, disk: FaultyDisk, durable: bool
) -> None:
    queue = store.declare("q", durable=durable)
    store.reserve(queue, 4)
    store.sync()
    seqs = publish(store, queue, 4, persistent=not durable, confirm=True)
    assert queue.backing.drain_confirmed() == [seqs[0], 4]
    assert store.journal.buffer.empty
    assert names(disk, ".qi", ".qs") == []
    variable(queue).set_ram_target(1)
    assert names(disk, ".qi", ".qs") == ["0.qi", "0.qs"]
    assert store.journal.buffer.empty


def test_11_4_a_message_dropped_at_the_head_is_confirmed_too(store: VhostStore) -> None:
    queue = store.declare("q")
    seqs = publish(store, queue, 3, confirm=True)
    assert queue.backing.drop(1) == [seqs[0]]
    store.sync()
    assert queue.backing.drain_confirmed() == [seqs[0], 3]


# ---- 11.5: what comes back ----


@pytest.fixture
def used(store: VhostStore) -> StoredQueue:
    """0 acked, 1 requeued, 2 and 3 handed out, 4 and 5 never; 6 transient. All of it is synced."""
    queue = store.declare("q")
    publish(store, queue, 6)
    assert fetch(queue, 4) == [0, 1, 2, 3]
    queue.backing.ack([0])
    queue.backing.requeue([1])
    publish(store, queue, 1, persistent=False)
    store.sync()
    return queue


def test_11_5_after_a_clean_stop_all_is_ready_in_order_with_exact_flags(
    store: VhostStore, disk: FaultyDisk, used: StoredQueue
) -> None:
    store.close()
    store = open_engine(disk.root, disk, settings=store.settings)
    assert store.clean_start
    queue = store.get("q")
    assert len(queue.backing) == queue.backing.depth() == 5
    assert deliver(queue, 10) == [(1, True), (2, True), (3, True), (4, False), (5, False)]
    assert queue.backing.counts == {1: 1}
    store.close()


@pytest.mark.parametrize("mode", ["process", "none", "all", "random"])
def test_11_5_after_a_crash_all_is_ready_in_order_and_flagged(
    store: VhostStore, disk: FaultyDisk, used: StoredQueue, mode: str
) -> None:
    store, _ = crash_and_reopen(store, disk, mode)
    assert not store.clean_start
    queue = store.get("q")
    assert len(queue.backing) == queue.backing.depth() == 5
    assert deliver(queue, 10) == [(seq, True) for seq in (1, 2, 3, 4, 5)]
    assert queue.backing.counts == {1: 1}
    store.close()


@pytest.mark.parametrize("mode", ["process", "none"])
def test_11_5_what_was_not_synced_may_vanish_and_an_ack_that_was_not_comes_back(
    store: VhostStore, disk: FaultyDisk, used: StoredQueue, mode: str
) -> None:
    used.backing.ack([2, 3])
    publish(store, used, 2)
    store, _ = crash_and_reopen(store, disk, mode)
    assert deliver(store.get("q"), 10) == [(seq, True) for seq in (1, 2, 3, 4, 5)]
    store.close()


@pytest.mark.parametrize(("mode", "survives"), [("process", True), ("all", True), ("none", False)])
def test_11_5_in_os_durability_a_confirm_survives_the_process_but_not_the_power(
    disk: FaultyDisk, mode: str, survives: bool
) -> None:
    store = open_engine(disk.root, disk, durability="os")
    queue = store.declare("q")
    publish(store, queue, 3, confirm=True)
    store.sync()
    assert queue.backing.drain_confirmed() == [0, 3]
    store, _ = crash_and_reopen(store, disk, mode)
    assert fetch(store.get("q"), 10) == ([0, 1, 2] if survives else [])
    store.close()


def test_11_5_new_messages_get_seq_ids_of_a_segment_that_nobody_used(
    store: VhostStore, disk: FaultyDisk, used: StoredQueue
) -> None:
    store, _ = crash_and_reopen(store, disk)
    queue = store.get("q")
    (seq,) = publish(store, queue, 1)
    assert seq >= 8
    assert seq % store.settings.segment_entries == 0
    store.close()


@pytest.mark.parametrize("torn", range(0, 120, 7))
def test_11_5_a_torn_journal_tail_is_ignored(store: VhostStore, disk: FaultyDisk, used: StoredQueue, torn: int) -> None:
    publish(store, used, [b"b" * 100])
    # Written, not synced: the commit is cut short.
    disk.crash_at(1, tear=torn)
    with contextlib.suppress(BaseException):
        store.sync()
    store.abandon()
    after = disk.crash(mode="all")
    store = open_engine(disk.root, after, settings=store.settings)
    assert deliver(store.get("q"), 10) == [(seq, True) for seq in (1, 2, 3, 4, 5)]
    store.close()


def test_11_5_a_torn_slot_costs_that_message(store: VhostStore, disk: FaultyDisk, used: StoredQueue) -> None:
    store.checkpoint(seal=True, carry_below=0)
    (index,) = [path for path in disk.files() if path.endswith("/0.qi")]
    disk.flip_bit(index, 8 * (64 + 64 * 2 + 9))
    store, _ = crash_and_reopen(store, disk)
    assert fetch(store.get("q"), 10) == [1, 3, 4, 5]
    assert len(store.get("q").backing) == 0
    store.close()


def _lose_store(disk: FaultyDisk) -> None:
    for path in disk.files():
        if path.endswith((".rdq", ".rdh")) and "persistent" in path:
            disk.unlink(path)


def test_11_5_an_entry_without_its_body_is_dropped(store: VhostStore, disk: FaultyDisk, used: StoredQueue) -> None:
    publish(store, used, [LARGE, b"after"])
    store.sync()
    store.abandon()
    after = disk.crash(mode="all")
    _lose_store(after)
    store = open_engine(disk.root, after, settings=store.settings)
    assert len(store.get("q").backing) == 6
    assert fetch(store.get("q"), 10) == [1, 2, 3, 4, 5, 8]
    store.close()


def test_11_5_a_body_without_an_entry_is_garbage(store: VhostStore, disk: FaultyDisk, used: StoredQueue) -> None:
    """The store was written and synced, and the power went before the journal was."""
    publish(store, used, [LARGE])
    disk.crash_at(_calls_until_sync(store, disk, ".rdq") + 2)
    with contextlib.suppress(BaseException):
        store.sync()
    store.abandon()
    after = disk.crash(mode="none")
    assert names(after, ".rdq") == ["0.0.rdq"]
    store = open_engine(disk.root, after, settings=store.settings)
    assert names(after, ".rdq") == []
    assert fetch(store.get("q"), 10) == [1, 2, 3, 4, 5]
    store.close()


Stop = Callable[[VhostStore, FaultyDisk], tuple[VhostStore, FaultyDisk]]


def _clean(store: VhostStore, disk: FaultyDisk) -> tuple[VhostStore, FaultyDisk]:
    store.close()
    return open_engine(disk.root, disk, settings=store.settings), disk


@pytest.mark.parametrize("stop", [_clean, crash_and_reopen])
def test_11_5_transient_messages_that_were_paged_out_are_gone_after_any_stop(
    store: VhostStore, disk: FaultyDisk, stop: Stop
) -> None:
    queue = store.declare("q")
    publish(store, queue, 3)
    publish(store, queue, 5, persistent=False)
    publish(store, queue, 3)
    variable(queue).set_ram_target(0)
    assert fetch(queue, 2) == [0, 1]
    store.sync()
    store, disk = stop(store, disk)
    queue = store.get("q")
    assert len(queue.backing) == 6
    assert queue.backing.ready_bytes() == sum(len(b"m%d" % seq) for seq in (0, 1, 2, 8, 9, 10))
    assert fetch(queue, 20) == [0, 1, 2, 8, 9, 10]
    assert queue.backing.ready_bytes() == 0
    store.close()
