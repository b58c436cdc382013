"""The queue in SQLite: the contract that it shares with the others, its journal and its file, and its damage."""

from __future__ import annotations

import contextlib
import glob
import os
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_disk import FaultyDisk, PowerCut
from tests.small_engine import HEAD, TINY, make_entries, open_engine, temporary_root
from warren.errors import DiskFullError, StoreClosedError, StoreFailedError, StoreFormatError
from warren.kernel.entry import IN_STORE, PERSISTENT, Delivery, Entry, deliveries
from warren.kernel.ranges import RangeSet
from warren.queueing.arguments import QueueArguments
from warren.queueing.queue import Queue
from warren.storage.disk import Disk
from warren.storage.layout import stream_id
from warren.storage.sqlite_queue import SqliteQueue
from warren.storage.vhost_store import StoredQueue, VhostStore

KINDS: dict[str, dict[str, Any]] = {
    "variable": {},
    "priority": {"x-max-priority": 3},
    "volatile": {"x-backing-queue": "volatile"},
    "sqlite": {"x-backing-queue": "sqlite"},
    "sqlite-priority": {"x-backing-queue": "sqlite", "x-max-priority": 3},
}
DURABLE = ["variable", "priority", "sqlite", "sqlite-priority"]
SQLITE = ["sqlite", "sqlite-priority"]
WITH_PRIORITIES = ["priority", "sqlite-priority"]


class Bench:
    """One store with one queue of a kind, and what a test does to them."""

    def __init__(self, root: str, kind: str, disk: Disk | None = None) -> None:
        self.root = root
        self.kind = kind
        self.disk = disk
        self.store = open_engine(root, disk)
        self.store.declare("q", arguments=KINDS[kind])

    @property
    def queue(self) -> StoredQueue:
        return self.store.get("q")

    @property
    def backing(self) -> Any:
        return self.queue.backing

    def publish(self, *bodies: bytes, persistent: bool = True, level: int = 0, confirm: bool = False) -> list[int]:
        entries = make_entries(self.store, self.queue, bodies, persistent, level)
        self.backing.publish(entries, confirm)
        return [entry.seq for entry in entries]

    def bodies(self, count: int = 1000, ack_required: bool = True) -> list[bytes]:
        return [entry.body for entry in self.backing.fetch(count, ack_required)]

    def deliver(self, count: int = 1000) -> list[tuple[bytes, bool, int]]:
        """(body, redelivered, delivery count), as a consumer is shown them."""
        backing = self.backing
        entries = backing.fetch(count)
        made = deliveries(Delivery, entries, self.queue, backing.redelivered_below, backing.returned, backing.counts)
        return [(delivery.entry.body, delivery.redelivered, delivery.delivery_count) for delivery in made]

    def browse(self, start: int = 0) -> list[tuple[bytes, bool]]:
        return self.backing.fold(lambda entry, unacked, seen: (True, [*seen, (entry.body, unacked)]), [], start)

    def crash(self) -> None:
        self.store.abandon()
        self.store = open_engine(self.root, self.disk)

    def restart(self) -> None:
        self.store.close()
        self.store = open_engine(self.root, self.disk)
        assert self.store.clean_start

    def file_rows(self) -> list[int]:
        """The seq_ids that are committed to the file, as another process sees them."""
        with contextlib.closing(sqlite3.connect(self.database_path())) as db:
            return [seq for (seq,) in db.execute("SELECT seq FROM messages ORDER BY seq")]

    def database_path(self) -> str:
        return os.path.join(self.queue.directory, "queue.db")

    def reports(self) -> list[dict[str, object]]:
        return self.store.quarantine.reports


@pytest.fixture
def directory():
    """A temporary directory where a sync costs little."""
    with temporary_root() as path:
        yield Path(path)


@pytest.fixture
def make_bench(directory):
    benches = []

    def make(kind: str, disk: Disk | None = None, root: str | None = None) -> Bench:
        bench = Bench(root or str(directory / f"store{len(benches)}"), kind, disk)
        benches.append(bench)
        return bench

    yield make
    for bench in benches:
        bench.store.abandon()


@pytest.fixture(params=list(KINDS))
def bench(request, make_bench):
    return make_bench(request.param)


@pytest.fixture(params=DURABLE)
def durable(request, make_bench):
    return make_bench(request.param)


@pytest.fixture
def sqlite(make_bench):
    return make_bench("sqlite")


# -- the contract ------------------------------------------------------------------------------------------------------


def test_messages_come_in_the_order_of_publishing_and_go_with_their_acks(bench):
    seqs = bench.publish(b"a", b"b", b"c")
    assert len(bench.backing) == 3
    assert bench.bodies(2) == [b"a", b"b"]
    assert (len(bench.backing), bench.backing.pending_count, bench.backing.depth()) == (1, 2, 3)
    assert bench.backing.ack([seqs[1], 999, seqs[0]]) == [seqs[1], seqs[0]]
    assert bench.backing.ack(seqs) == []
    assert bench.backing.depth() == 1
    assert not bench.backing.is_empty()


def test_an_entry_comes_back_as_it_went_in(bench):
    [entry] = make_entries(bench.store, bench.queue, [b"body"], True)
    entry.published_at, entry.expiry = 1_700_000_000_000_000, 1_800_000_000_000_000
    bench.backing.publish([entry])
    [found] = bench.backing.fetch(1)
    assert (found.seq, found.head, found.body, found.size) == (entry.seq, HEAD, b"body", 4 + len(HEAD) + 4)
    assert (found.published_at, found.expiry) == (1_700_000_000_000_000, 1_800_000_000_000_000)
    assert found.flags & PERSISTENT


def test_a_fetch_without_ack_forgets_the_messages(bench):
    bench.publish(b"a", b"b")
    assert bench.bodies(1, ack_required=False) == [b"a"]
    assert bench.backing.depth() == 1
    assert bench.backing.drop(5) == [1]
    assert bench.backing.depth() == 0
    assert bench.bodies() == []
    assert bench.backing.peek() is None


def test_a_drop_with_ack_leaves_pending_messages(bench):
    seqs = bench.publish(b"a", b"b")
    assert bench.backing.drop(1, ack_required=True) == [seqs[0]]
    assert bench.backing.pending_pairs() == [seqs[0], 1]
    assert bench.backing.requeue([seqs[0]]) == [seqs[0]]
    assert bench.bodies() == [b"a", b"b"]


def test_requeue_puts_messages_back_where_they_were(bench):
    seqs = bench.publish(b"a", b"b", b"c", b"d")
    bench.bodies(3)
    assert bench.backing.requeue([seqs[2], seqs[0], 77]) == [seqs[2], seqs[0]]
    assert bench.deliver() == [(b"a", True, 1), (b"c", True, 1), (b"d", False, 0)]
    bench.backing.requeue([seqs[0]], count_delivery=False)
    bench.backing.requeue([seqs[2]])
    assert bench.deliver() == [(b"a", True, 1), (b"c", True, 2)]
    bench.backing.ack(seqs)
    assert (bench.backing.counts, bench.backing.returned.pairs()) == ({}, [])


def test_publish_delivered_records_only_pending_acks(bench):
    entries = make_entries(bench.store, bench.queue, [b"a", b"b"], True)
    bench.backing.publish_delivered(entries, confirm=True)
    assert (len(bench.backing), bench.backing.pending_count) == (0, 2)
    bench.store.sync()
    assert sum(bench.backing.drain_confirmed()[1::2]) == 2
    bench.backing.requeue([entries[0].seq])
    assert bench.bodies() == [b"a"]


def test_dropwhile_and_fetchwhile_stop_at_the_first_that_stays(bench):
    seqs = bench.publish(b"a", b"b", b"c", b"d")
    assert bench.backing.dropwhile(lambda entry: entry.seq < seqs[1]).seq == seqs[1]
    head, seen = bench.backing.fetchwhile(
        lambda entry: entry.seq < seqs[3], lambda entry, seen: [*seen, entry.body], []
    )
    assert (head.seq, seen) == (seqs[3], [b"b", b"c"])
    assert bench.backing.pending_count == 2
    assert bench.backing.dropwhile(lambda entry: True) is None
    assert bench.backing.fetchwhile(lambda entry: True, lambda entry, seen: seen, 0) == (None, 0)


def test_purge_takes_ready_messages_and_never_pending_ones(bench):
    seqs = bench.publish(b"a", b"b", b"c")
    bench.publish(b"t", persistent=False)
    bench.bodies(1)
    assert bench.backing.purge() == 3
    assert (len(bench.backing), bench.backing.pending_pairs()) == (0, [seqs[0], 1])
    assert bench.backing.purge() == 0
    assert bench.backing.purge_acks() == 1
    assert bench.backing.depth() == 0


def test_fold_visits_ready_and_pending_messages_and_touches_nothing(bench):
    seqs = bench.publish(*(b"%d" % n for n in range(200)))
    bench.bodies(2)
    assert bench.browse() == [(b"%d" % n, n < 2) for n in range(200)]
    assert bench.browse(seqs[198]) == [(b"198", False), (b"199", False)]
    seen = bench.backing.fold(lambda entry, unacked, seen: (len(seen) < 2, [*seen, entry.seq]), [])
    assert seen == seqs[:3]
    assert (len(bench.backing), bench.backing.pending_count) == (198, 2)


def test_ackfold_visits_pending_messages_in_the_order_asked_for(bench):
    seqs = bench.publish(b"a", b"b", b"c")
    bench.bodies(2)
    found = bench.backing.ackfold(lambda entry, seen: [*seen, entry.body], [], [seqs[1], seqs[2], seqs[0]])
    assert found == [b"b", b"a"]
    assert bench.backing.pending_count == 2


def test_confirms_follow_the_sync_and_those_of_transient_messages_come_at_once(bench):
    first = bench.publish(b"t", persistent=False, confirm=True)[0]
    assert bench.backing.drain_confirmed() == [first, 1]
    bench.publish(b"a", b"b", confirm=True)
    if bench.kind != "volatile":
        assert bench.backing.drain_confirmed() == []
        assert bench.backing.needs_timeout()
    bench.store.sync()
    assert sum(bench.backing.drain_confirmed()[1::2]) == 2
    assert not bench.backing.needs_timeout()


def test_a_transaction_is_visible_as_a_whole_after_its_commit(bench):
    seqs = bench.publish(b"a", b"b")
    bench.bodies(1)
    entry = Entry(0, HEAD, b"c", PERSISTENT, 1)
    bench.store.transact([(bench.queue, entry)], [(bench.queue, [seqs[0]])])
    assert bench.backing.pending_count == 0
    assert not bench.store.journal.dirty  # its records were all in the group
    assert bench.bodies() == [b"b", b"c"]


def test_a_checkout_takes_from_the_head_and_is_not_acked_by_hand(bench):
    seqs = bench.publish(b"a", b"b", b"c", b"d")
    checkout = bench.store.checkout(bench.queue, "lease", 2)
    [(sid, pairs)] = checkout.ranges.items()
    assert (sid, RangeSet(pairs)) == (stream_id(bench.queue.uid, 0), RangeSet([seqs[0], 2]))
    assert bench.backing.ack(seqs) == bench.backing.requeue(seqs) == []
    assert bench.backing.purge_acks() == 0
    assert (len(bench.backing), bench.backing.pending_count) == (2, 2)
    assert bench.store.settle("lease", checkout.number) == 2
    again = bench.store.checkout(bench.queue, "lease", 5)
    assert bench.store.settle("lease", again.number, requeue=True) == 2
    assert bench.store.settle("lease", again.number, requeue=True) == 0
    assert bench.deliver() == [(b"c", True, 0), (b"d", True, 0)]


def test_a_checkout_keeps_to_its_bytes_but_takes_at_least_one(bench):
    bench.publish(b"x" * 100, b"x" * 100, b"x" * 100)
    assert bench.store.checkout(bench.queue, "lease", 10, 250).count == 2
    assert bench.store.checkout(bench.queue, "lease", 10, 1).count == 1
    assert bench.store.checkout(bench.queue, "lease", 10, 1) is None


def test_info_has_the_same_keys_for_every_kind(bench, make_bench):
    bench.publish(b"abc", b"de")
    bench.bodies(1)
    info = bench.backing.info()
    keys = set(make_bench("variable").backing.info())
    assert set(info) - {"priority_lengths"} == keys
    expected = {"len": 1, "q4": 1, "pending_acks": 1, "message_bytes_ready": 2, "message_bytes_unacknowledged": 3}
    assert expected.items() <= info.items()
    assert bench.backing.ready_bytes() == 2
    assert info["message_bytes"] == 5


@pytest.mark.parametrize("kind", WITH_PRIORITIES)
def test_the_highest_priority_goes_first_and_each_in_its_order(make_bench, kind):
    bench = make_bench(kind)
    for level in (1, 0, 3, 9, 1):
        bench.publish(b"%d" % level, level=level)
    assert bench.backing.info()["priority_lengths"] == {0: 1, 1: 2, 2: 0, 3: 2}
    assert bench.browse() == [(b"3", False), (b"9", False), (b"1", False), (b"1", False), (b"0", False)]
    entries = bench.backing.fetch(3)
    assert [(entry.body, entry.level) for entry in entries] == [(b"3", 3), (b"9", 3), (b"1", 1)]
    bench.backing.requeue([entries[1].seq])
    assert bench.bodies() == [b"9", b"1", b"0"]


@pytest.mark.parametrize("kind", WITH_PRIORITIES)
def test_browsing_goes_by_seq_id_over_all_priorities(make_bench, kind):
    bench = make_bench(kind)
    for number in range(600):
        bench.publish(b"%d" % number, level=number % 4)
    queue = Queue(bench.store, bench.queue, QueueArguments.parse(KINDS[kind]))
    assert [int(message.body) for message in queue.browse()] == list(range(600))
    assert [int(message.body) for message in queue.browse(5, 3)] == [5, 6, 7]
    assert list(queue.browse(1 << 63)) == []


@pytest.mark.parametrize("kind", WITH_PRIORITIES)
def test_a_checkout_over_priorities_names_each_stream(make_bench, kind):
    bench = make_bench(kind)
    for level in (0, 2, 0, 2):
        bench.publish(b"%d" % level, level=level)
    uid = bench.queue.uid
    assert bench.store.checkout(bench.queue, "lease", 3).ranges == {
        stream_id(uid, 2): [1, 1, 3, 1],
        stream_id(uid, 0): [0, 1],
    }
    bench.crash()
    assert (len(bench.backing), bench.backing.pending_count) == (1, 3)
    assert bench.store.settle("lease", 1) == 3
    bench.crash()
    assert bench.bodies() == [b"0"]


@pytest.mark.parametrize("kind", ["variable", "volatile", "sqlite"])
def test_a_queue_without_priorities_ignores_them(make_bench, kind):
    bench = make_bench(kind)
    bench.publish(b"low")
    bench.publish(b"high", level=9)
    bench.store.sync()
    assert bench.bodies() == [b"low", b"high"]


# -- stops and starts --------------------------------------------------------------------------------------------------


def test_a_clean_restart_keeps_everything_exact(durable):
    seqs = durable.publish(*(b"%d" % n for n in range(6)))
    durable.publish(b"transient", persistent=False)
    durable.bodies(4)
    durable.backing.ack([seqs[0]])
    durable.backing.requeue([seqs[1]])
    durable.backing.requeue([seqs[2]], count_delivery=False)
    next_seq = durable.queue.seqs.next
    durable.restart()
    assert durable.queue.seqs.next == next_seq
    assert durable.backing.ready_bytes() == 5
    assert durable.deliver() == [
        (b"1", True, 1),
        (b"2", True, 0),
        (b"3", True, 0),
        (b"4", False, 0),
        (b"5", False, 0),
    ]


@pytest.mark.parametrize("checkpoints", ["none", "before", "after", "both"])
def test_a_crash_loses_nothing_that_was_synced(durable, checkpoints):
    seqs = durable.publish(*(b"%d" % n for n in range(8)))
    durable.publish(b"transient", persistent=False)
    if checkpoints in ("before", "both"):
        durable.store.checkpoint(seal=True)
    durable.bodies(5)
    durable.backing.ack([seqs[0], seqs[2]])
    durable.backing.requeue([seqs[1]])
    durable.store.sync()
    if checkpoints in ("after", "both"):
        durable.store.checkpoint(seal=True)
    used = durable.queue.seqs.next
    durable.crash()
    assert durable.queue.seqs.next >= used
    assert durable.deliver() == [(b"1", True, 1), *((b"%d" % n, True, 0) for n in range(3, 8))]
    durable.publish(b"new")
    assert durable.deliver() == [(b"new", False, 0)]


def test_a_purge_survives_a_crash(durable):
    durable.publish(b"a", b"b", b"c")
    durable.bodies(1)
    durable.store.checkpoint(seal=True)
    durable.publish(b"d")
    durable.backing.purge()
    durable.store.sync()
    durable.crash()
    assert durable.bodies() == [b"a"]


def test_what_was_not_synced_is_gone_after_a_crash(durable):
    durable.publish(b"a")
    durable.store.sync()
    durable.publish(b"b")
    durable.crash()
    assert durable.bodies() == [b"a"]


def test_an_ack_that_was_not_synced_means_a_redelivery(durable):
    seqs = durable.publish(b"a")
    durable.store.checkpoint(seal=True)
    durable.bodies()
    durable.backing.ack(seqs)
    durable.crash()
    assert durable.deliver() == [(b"a", True, 0)]


def test_a_message_acked_after_the_checkpoint_of_its_publish_stays_gone(durable):
    """Over several checkpoints: no ack may retire before its publish."""
    seqs = durable.publish(*(b"%d" % n for n in range(4)))
    durable.store.sync()
    for seq in seqs:
        durable.bodies(1)
        durable.backing.ack([seq])
        durable.store.checkpoint(seal=True)
        durable.crash()
        assert seq not in [entry.seq for entry in durable.backing.fetch(10)]


def test_a_transaction_survives_a_crash_as_a_whole(durable):
    seqs = durable.publish(b"a")
    durable.store.sync()
    durable.bodies()
    durable.store.transact([(durable.queue, Entry(0, HEAD, b"b", PERSISTENT, 1))], [(durable.queue, seqs)])
    durable.crash()
    assert durable.bodies() == [b"b"]


def test_a_transaction_whose_commit_failed_is_not_in_the_file_either(make_bench, directory):
    disk = FaultyDisk(directory / "disk")
    bench = make_bench("sqlite", disk, disk.root)
    seqs = bench.publish(b"a")
    bench.store.sync()
    bench.bodies()
    disk.crash_at(1)
    with pytest.raises((PowerCut, StoreFailedError)):
        bench.store.transact([(bench.queue, Entry(0, HEAD, b"b", PERSISTENT, 1))], [(bench.queue, seqs)])
    with contextlib.suppress(PowerCut, StoreFailedError):
        bench.store.abandon()
    bench.disk = disk.crash(mode="none")
    bench.store = open_engine(bench.root, bench.disk)
    assert bench.bodies() == [b"a"]


@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize("stop", ["crash", "restart"])
def test_a_checkout_survives_a_stop(durable, stop, requeue):
    durable.publish(b"a", b"b", b"c")
    durable.store.checkout(durable.queue, "lease", 2)
    durable.store.checkpoint(seal=True)
    getattr(durable, stop)()
    assert (len(durable.backing), durable.backing.pending_count) == (1, 2)
    assert durable.store.settle("lease", 1, requeue=requeue) == 2
    getattr(durable, stop)()
    assert durable.bodies() == ([b"a", b"b", b"c"] if requeue else [b"c"])


@pytest.mark.parametrize("stop", ["crash", "restart"])
def test_delivery_counts_rise_over_stops(durable, stop):
    seqs = durable.publish(b"a")
    for count in range(1, 4):
        durable.bodies()
        durable.backing.requeue(seqs)
        durable.store.sync()
        if count == 2:
            durable.store.checkpoint(seal=True)
        getattr(durable, stop)()
        assert durable.backing.counts == {seqs[0]: count}


@pytest.mark.parametrize("kind", SQLITE)
def test_a_second_crash_before_any_checkpoint_replays_the_same_again(make_bench, kind):
    bench = make_bench(kind)
    for level in (2, 0, 1):
        bench.publish(b"%d" % level, level=level)
    bench.store.sync()
    bench.crash()
    bench.crash()
    assert bench.bodies() == ([b"2", b"1", b"0"] if kind == "sqlite-priority" else [b"2", b"0", b"1"])


# -- the file and the journal ------------------------------------------------------------------------------------------


def test_the_file_is_changed_by_the_checkpoint_alone(sqlite):
    seqs = sqlite.publish(b"a", b"b")
    sqlite.store.sync()
    assert sqlite.file_rows() == []
    sqlite.store.checkpoint(seal=True)
    assert sqlite.file_rows() == seqs
    sqlite.bodies(1, ack_required=False)
    sqlite.store.sync()
    assert sqlite.file_rows() == seqs
    sqlite.store.checkpoint(seal=True)
    assert sqlite.file_rows() == seqs[1:]


def test_a_checkpoint_syncs_the_journal_before_it_commits_the_file(sqlite):
    sqlite.publish(b"a")
    sqlite.store._roll()
    [late] = sqlite.publish(b"b")
    assert sqlite.store.journal.dirty
    sqlite.store.checkpoint()
    assert late in sqlite.file_rows()
    with contextlib.closing(sqlite3.connect(sqlite.database_path())) as db:
        [(applied,)] = db.execute("SELECT applied_lsn FROM state")
    assert applied <= sqlite.store.journal.synced_lsn
    sqlite.crash()
    assert sqlite.bodies() == [b"a", b"b"]


def test_what_comes_while_a_checkpoint_runs_is_synced_before_the_file_knows_it(sqlite, monkeypatch):
    store = sqlite.store
    commit_databases = store.commit_databases

    def commit_with_a_late_publish() -> None:
        [late] = sqlite.publish(b"late")
        lsn = store.journal.appended_lsn
        assert store.journal.synced_lsn < lsn
        commit_databases()
        assert late in sqlite.file_rows()
        assert store.journal.synced_lsn >= lsn

    monkeypatch.setattr(store, "commit_databases", commit_with_a_late_publish)
    sqlite.publish(b"a")
    store.checkpoint(seal=True)
    assert len(sqlite.file_rows()) == 2


def test_nothing_of_the_queue_is_carried_or_moved_to_segments(sqlite):
    sqlite.publish(*(b"%d" % n for n in range(20)))
    for _ in range(3):
        sqlite.store.checkpoint(seal=True)
    assert sqlite.store.journal.bytes_written < 20 * 200
    assert sorted(os.listdir(sqlite.queue.directory))[0] == "queue.db"
    assert glob.glob(os.path.join(sqlite.queue.directory, "**", "*.q*"), recursive=True) == []


def test_large_bodies_are_in_the_file_and_none_in_the_message_store(sqlite):
    big = os.urandom(3_000_000)
    sqlite.publish(big, b"small")
    sqlite.store.sync()
    assert sqlite.store.store.garbage().total_bytes == 0
    sqlite.crash()
    assert sqlite.bodies() == [big, b"small"]
    sqlite.store.checkpoint(seal=True)
    sqlite.crash()
    assert sqlite.bodies() == [big, b"small"]


def test_a_body_that_its_publisher_put_into_the_message_store_does_not_stay_there(sqlite):
    store = sqlite.store.store
    [entry] = make_entries(sqlite.store, sqlite.queue, [b"x" * 1000], True)
    entry.msg_id, entry.flags = store.next_id(), entry.flags | IN_STORE
    store.write(entry.msg_id, b"payload", 1)
    sqlite.backing.publish([entry])
    sqlite.store.sync()
    assert store.garbage().valid_bytes == 0
    sqlite.crash()
    assert sqlite.bodies() == [b"x" * 1000]


@pytest.mark.parametrize("size", [10, 1000])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_fan_out_reaches_every_kind_and_survives_in_the_durable_ones(directory, size, checkpoint):
    root = str(directory)
    store = open_engine(root)
    for kind, arguments in KINDS.items():
        store.declare(kind, arguments=arguments)
    body = os.urandom(size)
    everywhere = [store.get(kind) for kind in KINDS]
    store.fan_out(everywhere, HEAD, body, persistent=True, published_at=1, level=2, producer="p", publishing_id=7)
    store.sync()
    if checkpoint:
        store.checkpoint(seal=True)
    for kind in KINDS:
        assert [entry.body for entry in store.get(kind).backing.fetch(2)] == [body]
    store.abandon()
    store = open_engine(root)
    for kind in DURABLE:
        queue = store.get(kind)
        entries = queue.backing.fetch(2)
        assert [entry.body for entry in entries] == [body]
        assert store.last_publishing_id(queue, "p") == 7
        queue.backing.ack([entry.seq for entry in entries])
    store.sync()
    assert len(store.get("volatile").backing) == 0
    assert store.store.garbage().valid_bytes == 0
    store.close()


def test_a_transient_message_needs_no_record_and_is_gone_at_any_start(sqlite):
    sqlite.publish(b"s", persistent=False)
    sqlite.store.sync()  # the seq_ids are reserved now
    sqlite.publish(b"t", persistent=False)
    sqlite.backing.requeue([entry.seq for entry in sqlite.backing.fetch(1)])
    assert not sqlite.store.journal.dirty
    sqlite.publish(b"a")
    sqlite.store.checkpoint(seal=True)
    assert len(sqlite.file_rows()) == 3
    sqlite.crash()
    assert sqlite.bodies() == [b"a"]


@pytest.mark.parametrize(("durability", "durable_queue"), [("fsync", False), ("memory", True)])
def test_a_queue_that_no_restart_brings_back_leaves_no_file(directory, durability, durable_queue):
    store = open_engine(str(directory), durability=durability)
    queue = store.declare("q", durable=durable_queue, arguments=KINDS["sqlite"])
    queue.backing.publish(make_entries(store, queue, [b"a", b"b"], True))
    store.checkpoint(seal=True)
    assert [entry.body for entry in queue.backing.fetch(5)] == [b"a", b"b"]
    assert not os.path.exists(queue.directory)
    store.close()


def test_a_deleted_queue_takes_its_file_along_and_its_records_reach_no_successor(sqlite):
    sqlite.publish(b"old")
    sqlite.store.sync()
    old = sqlite.queue
    assert sqlite.store.delete("q") == 1
    assert not os.path.exists(old.directory)
    with pytest.raises(StoreClosedError):
        old.backing.fetch(1)
    sqlite.store.declare("q", arguments=KINDS["sqlite"])
    sqlite.crash()
    assert sqlite.bodies() == []


@pytest.mark.parametrize("kind", SQLITE)
def test_a_snapshot_opens_as_a_store(make_bench, directory, kind):
    bench = make_bench(kind)
    bench.publish(b"a", b"b", b"c")
    bench.store.checkpoint(seal=True)
    bench.publish(b"d")
    bench.bodies(1)
    bench.store.snapshot(str(directory / "copy" / "data"))
    bench.bodies(ack_required=False)
    bench.store.checkpoint(seal=True)
    copy = make_bench(kind, root=str(directory / "copy"))
    assert copy.bodies() == [b"a", b"b", b"c", b"d"]
    bench.crash()
    assert bench.bodies() == [b"a"]


def test_a_failed_write_closes_the_queue_until_the_store_is_opened_again(sqlite):
    sqlite.publish(b"a")
    sqlite.store.sync()
    database = sqlite.backing.database
    database._db.execute("PRAGMA max_page_count = 10")
    with pytest.raises(StoreFailedError, match="open it again"):
        sqlite.publish(os.urandom(100_000))
    with pytest.raises(StoreFailedError):
        sqlite.backing.fetch(1)
    database._db.execute("ROLLBACK")  # as SQLite may do by itself
    floor = sqlite.store.journal.floor
    with pytest.raises(StoreFailedError):
        sqlite.store.checkpoint(seal=True)
    assert sqlite.store.journal.floor == floor
    assert sqlite.store.committer.failed is not None
    sqlite.crash()
    assert len(sqlite.bodies()) == 2


class FullDisk:
    """A connection that has no room for a commit."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self.db.execute(sql, *values)


def test_a_checkpoint_that_finds_the_disk_full_is_done_another_time(sqlite):
    sqlite.publish(b"a")
    database = sqlite.backing.database
    database._db = FullDisk(database._db)
    floor = sqlite.store.journal.floor
    with pytest.raises(DiskFullError):
        sqlite.store.checkpoint(seal=True)
    assert (sqlite.store.journal.floor, sqlite.file_rows()) == (floor, [])
    assert sqlite.bodies() == [b"a"]
    database._db = database._db.db
    sqlite.store.checkpoint(seal=True)
    assert sqlite.store.journal.floor > floor
    assert len(sqlite.file_rows()) == 1


# -- crashes at every call ---------------------------------------------------------------------------------------------


def _work(store: VhostStore, safe: dict[str, set[bytes]]) -> None:
    """Publishes, acks and checkpoints over two queues; `safe` has what is promised: there, gone."""
    queues = [store.declare(name, arguments=KINDS[name]) for name in ("sqlite", "sqlite-priority")]
    for turn in range(6):
        for queue in queues:
            name = queue.name.encode()
            bodies = [b"%s %d %d" % (name, turn, n) for n in range(3)]
            queue.backing.publish(make_entries(store, queue, bodies, True, level=turn % 3))
            taken = queue.backing.fetch(1)
            safe["undecided"].update(entry.body for entry in taken)
            queue.backing.ack([entry.seq for entry in taken])
            store.sync()
            safe["there"].update(bodies)
            safe["gone"].update(entry.body for entry in taken)
        if turn % 2:
            store.checkpoint(seal=True)


@pytest.mark.parametrize("mode", ["none", "all", "random"])
def test_a_power_cut_at_any_call_breaks_no_promise(directory, mode, scale, seed, record_property):
    rng = random.Random(seed)
    disk = FaultyDisk(directory / "whole")
    store = open_engine(disk.root, disk)
    before = disk.calls
    _work(store, {"there": set(), "gone": set(), "undecided": set()})
    calls = disk.calls - before
    store.abandon()
    chosen = sorted(rng.sample(range(1, calls), min(calls - 1, scale.scale(400))))
    for number in chosen:
        disk = FaultyDisk(directory / f"{number}")
        store = open_engine(disk.root, disk)
        safe: dict[str, set[bytes]] = {"there": set(), "gone": set(), "undecided": set()}
        disk.crash_at(number, tear=rng.randrange(40))
        with contextlib.suppress(PowerCut, StoreFailedError):
            _work(store, safe)
        with contextlib.suppress(PowerCut, StoreFailedError):
            store.abandon()
        disk = disk.crash(rng, mode)
        store = open_engine(disk.root, disk)
        found: list[bytes] = []
        for queue in store.queues.values():
            found += [entry.body for entry in queue.backing.fetch(1000)]
        assert len(found) == len(set(found)), number
        assert safe["there"] - safe["undecided"] <= set(found), number
        assert not safe["gone"] & set(found), number
        store.close()
    record_property("power_cuts", len(chosen))


# -- the oracle --------------------------------------------------------------------------------------------------------


class Pair:
    """Two stores, each with its own directory, one queue each, that are told the same."""

    def __init__(self, make_bench: Any, kinds: tuple[str, str]) -> None:
        self.benches = [make_bench(kind) for kind in kinds]

    def same(self, ask: Any) -> Any:
        answers = [ask(bench) for bench in self.benches]
        assert answers[0] == answers[1]
        return answers[0]


def _run(pair: Pair, rng: random.Random, steps: int) -> None:
    pending: set[int] = set()
    number = lease = 0
    for _ in range(steps):
        match rng.choice(_STEPS):
            case "publish":
                bodies = [b"%d" % (number + n) * rng.choice((1, 1, 1, 90)) for n in range(rng.randint(1, 4))]
                number += len(bodies)
                persistent, level, confirm = rng.random() < 0.8, rng.randrange(5), rng.random() < 0.5
                pair.same(lambda b: b.publish(*bodies, persistent=persistent, level=level, confirm=confirm))  # noqa: B023
            case "fetch":
                count = rng.randint(1, 5)
                pending.update(pair.same(lambda b: [e.seq for e in b.backing.fetch(count)]))  # noqa: B023
            case "drop":
                pair.same(lambda b: b.backing.drop(1))
            case "deliver":
                pair.same(lambda b: b.deliver(2))
                pending.update(pair.benches[0].backing.pending_pairs()[::2])
            case "ack" | "requeue" as step if pending:
                seqs = rng.sample(sorted(pending), rng.randint(1, min(3, len(pending))))
                counted = rng.random() < 0.7
                pair.same(lambda b: b.backing.ack(seqs) if step == "ack" else b.backing.requeue(seqs, counted))  # noqa: B023
                pending.difference_update(seqs)
            case "purge":
                if rng.random() < 0.2:
                    pair.same(lambda b: b.backing.purge())
            case "checkout":
                taken = pair.same(
                    lambda b: None if (c := b.store.checkout(b.queue, "lease", 3, 500)) is None else c.count
                )
                lease += taken is not None
            case "settle":
                again = rng.random() < 0.5
                pair.same(lambda b: b.store.settle("lease", lease, requeue=again))  # noqa: B023
            case "checkpoint":
                pair.same(lambda b: b.store.checkpoint(seal=True) is None)
            case "crash" | "restart" as step:
                pair.same(lambda b: b.store.sync())
                pair.same(lambda b: getattr(b, step)())
                pending.clear()
                number_there = {bench.queue.seqs.next for bench in pair.benches}
                assert len(number_there) == 1
        pair.same(_look)


_STEPS = [
    *["publish"] * 6,
    *["fetch"] * 4,
    "drop",
    "deliver",
    *["ack"] * 3,
    *["requeue"] * 2,
    "purge",
    "checkout",
    "settle",
    "checkpoint",
    "crash",
    "restart",
]


def _look(bench: Bench) -> tuple[Any, ...]:
    backing = bench.backing
    head = backing.peek()
    there = backing.fold(lambda entry, unacked, seen: (True, [*seen, (entry, unacked)]), [])
    shown = deliveries(
        Delivery,
        [entry for entry, _ in there],
        bench.queue,
        backing.redelivered_below,
        backing.returned,
        backing.counts,
    )
    return (
        len(backing),
        backing.pending_pairs(),
        None if head is None else head.seq,
        [(entry.seq, entry.head, entry.body, unacked) for entry, unacked in there],
        [
            (delivery.redelivered, delivery.delivery_count)
            for delivery, (_, unacked) in zip(shown, there, strict=True)
            if not unacked
        ],
    )


@pytest.mark.parametrize("kinds", [("sqlite", "variable"), ("sqlite-priority", "priority")], ids="-".join)
def test_random_runs_are_the_same_as_those_of_the_real_queue(make_bench, kinds, scale, seed, record_property):
    rng = random.Random(seed)
    runs = scale.scale(60)
    for _ in range(runs):
        pair = Pair(make_bench, kinds)
        _run(pair, rng, 120)
        for bench in pair.benches:
            bench.store.close()
    record_property("runs", runs)


# -- damage ------------------------------------------------------------------------------------------------------------


def _flip(path: str, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit >> 3)
        byte = file.read(1)[0]
        file.seek(bit >> 3)
        file.write(bytes([byte ^ 1 << (bit & 7)]))


def _filled(make_bench: Any, count: int = 60, size: int = 300) -> Bench:
    bench = make_bench("sqlite")
    bench.publish(*(b"%04d" % n * (size // 4) for n in range(count)))
    bench.store.checkpoint(seal=True)
    return bench


def _moved_away(bench: Bench) -> list[str]:
    return glob.glob(os.path.join(bench.store.root, "quarantine", "*.db"))


@pytest.mark.parametrize("stop", ["clean", "dirty"])
def test_a_flipped_bit_costs_at_most_what_is_reported(make_bench, directory, stop, scale, seed, record_property):
    rng = random.Random(seed)
    bench = _filled(make_bench)
    path = bench.database_path()
    whole = {b"%04d" % n * 75 for n in range(60)}
    if stop == "clean":
        bench.store.close()
    else:
        bench.store.abandon()
    files = {name: Path(name).read_bytes() for name in Disk().walk(bench.root)}
    size = len(files[path])
    header = range(110 * 8)
    bits = rng.sample(header, scale.scale(400)) + rng.sample(range(size * 8), scale.scale(2000))
    if stop == "clean":  # where a page says what of it is free, nobody looks before it is written to
        bits = [bit for bit in bits if bit // 8 % 4096 not in range(1, 8)]
    lost = salvaged = 0
    for bit in bits:
        for name in set(Disk().walk(bench.root)) - set(files):
            os.unlink(name)
        for name, data in files.items():
            Path(name).write_bytes(data)
        _flip(path, bit)
        bench.store = open_engine(bench.root)
        assert bench.store.clean_start == (stop == "clean")
        found = bench.bodies()
        assert set(found) <= whole, bit
        assert len(set(found)) == len(found), bit
        assert len(bench.backing) == 0
        if len(found) < len(whole):
            assert bench.reports(), bit
            lost += 1
        if bench.reports():
            salvaged += 1
            bench.store.checkpoint(seal=True)
            assert _moved_away(bench), bit
        left = bench.backing.pending_count  # a row that was read may have been lost when it was changed
        assert left == len(found) or bench.reports(), bit
        bench.publish(b"goes on")
        assert bench.bodies() == [b"goes on"]
        bench.store.close()
        bench.store = open_engine(bench.root)
        assert len(bench.backing) == left + 1, bit
        assert not bench.reports()
        bench.store.abandon()
    assert salvaged > lost > 0
    record_property("bits", len(bits))
    record_property("salvaged", salvaged)


def test_a_damaged_page_costs_the_messages_on_it_and_each_end_is_served(make_bench):
    bench = _filled(make_bench, count=200)
    path = bench.database_path()
    bench.store.abandon()
    page = _page_of(path, b"0100" * 75)
    with open(path, "r+b") as file:
        file.seek(page * 4096)
        file.write(bytes(4096))
    bench.store = open_engine(bench.root)
    found = bench.bodies()
    assert (found[0], found[-1]) == (b"0000" * 75, b"0199" * 75)
    assert 180 < len(found) < 200
    assert b"0100" * 75 not in found
    assert any("cannot be read" in str(report["why"]) for report in bench.reports())
    [away] = _moved_away(bench)
    assert os.path.getsize(away) >= 200 * 300


def _page_of(path: str, content: bytes) -> int:
    with open(path, "rb") as file:
        return file.read().index(content) // 4096


def test_damage_met_while_the_queue_is_used_keeps_what_was_not_committed(make_bench):
    bench = _filled(make_bench, count=200)
    path = bench.database_path()
    bench.store.close()
    with open(path, "r+b") as file:
        file.seek(_page_of(path, b"0100" * 75) * 4096)
        file.write(bytes(4096))
    bench.store = open_engine(bench.root)
    assert bench.reports() == []
    bench.backing.ack([entry.seq for entry in bench.backing.fetch(10)])
    bench.publish(b"new")
    found = bench.bodies()
    assert (found[0], found[-1]) == (b"0010" * 75, b"new")
    assert bench.reports()
    assert not _moved_away(bench)
    count = bench.backing.pending_count
    assert count == len(found) > 170
    bench.store.sync()
    bench.crash()
    assert bench.bodies() == found
    bench.store.checkpoint(seal=True)
    assert _moved_away(bench)
    bench.crash()
    assert bench.reports() == []
    assert bench.bodies() == found


def test_an_index_that_forgot_a_message_is_found_at_a_clean_start(sqlite):
    sqlite.publish(*(b"%d" % n for n in range(9)))
    path = sqlite.database_path()
    sqlite.store.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        [(page,)] = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'messages_in_order'")
    _flip(path, ((page - 1) * 4096 + 4) * 8)  # 9 entries become 8
    sqlite.store = open_engine(sqlite.root)
    assert sqlite.store.clean_start
    assert sqlite.reports()
    assert sqlite.bodies() == [b"%d" % n for n in range(9)]


def test_what_the_journal_still_has_heals_a_lost_file(sqlite):
    sqlite.publish(b"a", b"b")
    sqlite.store.sync()
    path = sqlite.database_path()
    sqlite.store.abandon()
    with open(path, "r+b") as file:
        file.write(b"no database")
    sqlite.store = open_engine(sqlite.root)
    assert sqlite.reports()
    assert sqlite.bodies() == [b"a", b"b"]


def test_a_crash_between_the_two_renames_of_a_salvage_is_finished_at_the_next_start(make_bench, directory):
    disk = FaultyDisk(directory / "disk")
    bench = make_bench("sqlite", disk, disk.root)
    bench.publish(b"a" * 100, b"b" * 100)
    path = bench.database_path()
    bench.store.close()
    with open(path, "rb") as file:
        at = file.read().index(b"a" * 100)
    _flip(path, at * 8)
    whole, outcomes = disk, set()
    for number in range(1, 200):
        disk = whole.clone(directory / f"crash{number}")
        bench.root, bench.disk = disk.root, disk
        disk.crash_at(number)
        survived = False
        with contextlib.suppress(PowerCut, StoreFailedError):
            bench.store = open_engine(disk.root, disk)
            assert bench.bodies() == [b"b" * 100]
            bench.publish(b"c")
            bench.store.checkpoint(seal=True)
            survived = True
        with contextlib.suppress(PowerCut, StoreFailedError):
            bench.store.abandon()
        disk = bench.disk = disk.crash(mode="none")
        bench.store = open_engine(disk.root, disk)
        found = bench.bodies()
        assert found in ([b"b" * 100], [b"b" * 100, b"c"]), number
        bench.store.close()
        outcomes.add(len(_moved_away(bench)))
        if survived:
            break
    assert survived
    assert outcomes == {1}


def test_a_missing_file_is_reported_after_a_clean_stop(sqlite):
    sqlite.publish(b"a")
    path = sqlite.database_path()
    sqlite.store.close()
    os.unlink(path)
    sqlite.store = open_engine(sqlite.root)
    assert "missing" in str(sqlite.reports()[0]["why"])
    assert sqlite.bodies() == []


def test_a_file_of_a_newer_warren_is_refused_and_left_as_it_is(sqlite):
    from warren.storage import queue_database

    sqlite.publish(b"a")
    path = sqlite.database_path()
    sqlite.store.close()
    values = (2, 0, 0)
    with contextlib.closing(sqlite3.connect(path)) as db:
        crc = queue_database.crc32c(queue_database._STATE.pack(*values))
        db.execute("UPDATE state SET format = ?, applied_lsn = ?, next_seq = ?, crc = ?", (*values, crc))
        db.commit()
    with pytest.raises(StoreFormatError, match="version 2"):
        open_engine(sqlite.root)
    assert sqlite3.connect(path).execute("SELECT count(*) FROM messages").fetchone() == (1,)


def test_sqlite_finds_pending_messages_by_seq_id_and_the_head_by_the_index(sqlite):
    """A plan that walks through all pending or all ready messages would be quadratic."""
    from warren.storage.sqlite_queue import _IN_ORDER, _IN_STATE

    db = sqlite.backing.database
    for clause, values, wanted in (
        (_IN_STATE, ("[1]", 1), "SEARCH messages USING INTEGER PRIMARY KEY"),
        (f"WHERE state = ? {_IN_ORDER}", (0, 1), "SEARCH messages USING INDEX messages_in_order (state=?)"),
    ):
        plan = [row[3].decode() for row in db.rows(f"EXPLAIN QUERY PLAN SELECT * FROM messages {clause}", *values)]
        assert any(step.startswith(wanted) for step in plan), plan
        assert not any("TEMP B-TREE" in step for step in plan), plan


def test_the_kind_of_a_queue_is_its_argument(sqlite):
    assert isinstance(sqlite.backing, SqliteQueue)
    assert TINY.embed_below < 1000  # what the tests of large bodies rely on
