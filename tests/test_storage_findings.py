"""Faults that a reading of the engine found, each by the sentence of what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

import warren
import warren.aio
from tests.faulty_disk import FaultyDisk
from tests.small_engine import TINY, StandIn, fetch, make_entries, open_engine, publish
from warren.cli.view import copy_durable
from warren.errors import (
    DiskFullError,
    InvalidArgumentError,
    QueueArgumentError,
    QueueFullError,
    StoreFailedError,
    StoreLockedError,
    StorePathError,
    WarrenError,
)
from warren.library import Store
from warren.storage.disk import Disk, DiskFile
from warren.storage.lock import DirectoryLock
from warren.storage.priority_queue import PriorityQueue
from warren.storage.segment import SegmentFiles
from warren.storage.settings import EngineSettings
from warren.storage.stage_file import StageReader, StageWriter
from warren.storage.store_index import LmdbIndex
from warren.storage.variable_queue import VariableQueue
from warren.storage.vhost_store import StoredQueue, VhostStore

LARGE = b"L" * (TINY.embed_below * 2)


@pytest.fixture
def disk(tmp_path: Path) -> FaultyDisk:
    return FaultyDisk(tmp_path)


@pytest.fixture
def store(disk: FaultyDisk) -> Iterator[VhostStore]:
    store = open_engine(disk.root, disk)
    yield store
    store.abandon()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- transactions of the library ----


class Called(KeyboardInterrupt):
    """Away, by Ctrl-C."""


def call_away(*_: object, **__: object) -> None:
    raise Called


def refuse_to_sync(store: warren.Store, patch: pytest.MonkeyPatch, error: BaseException) -> None:
    """To this thread; that of the upkeep has no part in it."""
    sync = store.engine.committer.sync

    def refuse(lsn: int | None = None) -> None:
        if threading.current_thread() is threading.main_thread():
            raise error
        sync(lsn)

    patch.setattr(store.engine, "committer", StandIn(store.engine.committer, sync=refuse))


def end(transaction: warren.Transaction, error: type[BaseException]) -> None:
    """The end of its `with` block, which raises."""
    with pytest.raises(error):
        transaction.__exit__(None, None, None)


@pytest.mark.parametrize("publishes", [0, 1])
@pytest.mark.parametrize("where", ["has_seq_ids", "begin_transaction", "_check_exists"])
def test_ctrl_c_before_a_transaction_begins_leaves_its_messages_to_be_settled_another_time(
    tmp_path, monkeypatch, where, publishes
):
    with warren.open(tmp_path) as store:
        queue = store.queue("q")
        queue.publish_many([b"a", b"b"])
        first, second = queue.get_many(2)
        transaction = store.transaction()
        for _ in range(publishes):
            transaction.publish("q", b"c")
        transaction.ack(first)
        transaction.ack(second)
        with monkeypatch.context() as patch:
            patch.setattr(store.engine, where, call_away)
            end(transaction, Called)
        assert (first.settled, second.settled) == (False, False)
        first.ack()
        second.nack()
        assert [message.body for message in queue.get_many(5)] == [b"b"]


def test_ctrl_c_while_a_transaction_waits_for_seq_ids_leaves_its_messages_to_be_settled_another_time(
    tmp_path, monkeypatch
):
    with warren.open(tmp_path) as store:
        queue = store.queue("q")
        queue.publish(b"a")
        [message] = queue.get_many(1)
        store.sync()
        transaction = store.transaction()
        transaction.publish("q", b"c")
        transaction.ack(message)
        queue._seqs.take(queue._seqs.reserved - queue._seqs.next)
        with monkeypatch.context() as patch:
            refuse_to_sync(store, patch, Called())
            end(transaction, Called)
        assert not message.settled
        message.ack()
        assert queue.get() is None


def test_ctrl_c_while_a_transaction_is_synced_leaves_it_begun_and_its_messages_settled(tmp_path, monkeypatch):
    with warren.open(tmp_path) as store:
        queue = store.queue("q")
        queue.publish(b"a")
        [message] = queue.get_many(1)
        store.sync()
        transaction = store.transaction()
        transaction.publish("q", b"c")
        transaction.ack(message)
        with monkeypatch.context() as patch:
            refuse_to_sync(store, patch, Called())
            end(transaction, Called)
        assert message.settled
        store.sync()
        assert [message.body for message in queue.get_many(5)] == [b"c"]


def test_who_waits_for_a_message_is_woken_by_a_transaction_that_had_to_wait_for_room(tmp_path, monkeypatch):
    """The transaction was told that it happens with the next sync. It did, and nobody was told of its message."""
    with warren.open(tmp_path) as store:
        queue = store.queue("q")
        store.sync()
        got: list[warren.Message | None] = []
        waiter = threading.Thread(target=lambda: got.append(queue.get(timeout=30)), daemon=True)
        waiter.start()
        while not queue._waiting:
            pass

        transaction = store.transaction()
        transaction.publish("q", b"late")
        with monkeypatch.context() as patch:
            refuse_to_sync(store, patch, DiskFullError("no room"))
            end(transaction, DiskFullError)
        store.sync()
        waiter.join(20)
        assert [message.body for message in got if message is not None] == [b"late"]


def test_who_waits_for_a_message_of_a_store_that_fails_is_told(tmp_path):
    """It waited for ever: nothing can arrive any more."""
    with warren.open(tmp_path) as store:
        queue = store.queue("q")
        told: list[BaseException] = []

        def wait() -> None:
            try:
                queue.get(timeout=None)
            except StoreFailedError as error:
                told.append(error)

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        while not queue._waiting:
            pass
        store.engine.committer.fail(OSError(errno.EIO, "a bad sector"))
        waiter.join(20)
        assert len(told) == 1


def test_a_task_that_waits_for_a_message_of_a_store_that_fails_is_told(tmp_path):
    async def main() -> None:
        async with warren.aio.open(tmp_path) as store:
            queue = await store.queue("q")
            getter = asyncio.create_task(queue.get(timeout=None))
            await asyncio.sleep(0)
            store.blocking.engine.committer.fail(OSError(errno.EIO, "a bad sector"))
            with pytest.raises(StoreFailedError, match="a bad sector"):
                await asyncio.wait_for(getter, 20)

    asyncio.run(main())


def test_a_thread_called_away_behind_the_records_of_a_transaction_does_not_leave_it_hidden_for_ever(
    store: VhostStore, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records were in the journal, and what makes its messages visible was never asked for."""
    queue = store.declare("q")
    [entry] = make_entries(store, queue, [b"c"], persistent=True)
    with monkeypatch.context() as patch:
        patch.setattr(store, "journal", StandIn(store.journal, after=call_away))
        with pytest.raises(Called):
            store.transact([(queue, entry)], [])
    with pytest.raises(StoreFailedError):
        store.sync()


def test_a_message_that_is_twice_in_one_ack_lets_go_of_its_stored_body_once(tmp_path):
    """Of those that are only on disk it was let go twice: as that of another queue, or instead of that of another message."""
    with warren.open(tmp_path, settings=replace(TINY, ram_target=1)) as store:
        queue = store.queue("q")
        queue.publish_many([LARGE] * 4)
        messages = queue.get_many(4)
        queue.ack_many([messages[2], messages[2], messages[3], messages[3]])
        queue.ack_many(messages[:2])
        store.sync()
        assert store.engine.store.garbage().valid_bytes == 0


@pytest.mark.parametrize("kind", ["variable", "volatile", "sqlite"])
def test_who_asks_for_more_messages_than_there_are_numbers_gets_all(tmp_path, kind):
    with warren.open(tmp_path) as store:
        queue = store.queue("q", arguments={"x-backing-queue": kind})
        queue.publish_many([b"a", b"b"])
        assert [message.body for message in queue.get_many(1 << 64)] == [b"a", b"b"]


@pytest.mark.parametrize("limit", [{"x-max-length": 2}, {"x-max-length-bytes": 2}])
def test_a_queue_that_rejects_drops_nothing_when_messages_come_back(tmp_path, limit):
    """What was confirmed was dropped from the head without a word, as if it had been one that drops."""
    with warren.open(tmp_path) as store:
        queue = store.queue("q", arguments={**limit, "x-overflow": "reject-publish"})
        queue.publish_many([b"1", b"2"])
        taken = queue.get_many(2)
        queue.publish_many([b"3", b"4"])
        queue.nack_many(taken)
        assert [message.body for message in queue.browse()] == [b"1", b"2", b"3", b"4"]
        assert queue.info()["overflowed"] == 0
        with pytest.raises(QueueFullError):
            queue.publish(b"5")


@pytest.mark.parametrize("of", ["the message", "the queue"])
def test_times_to_live_of_a_transaction_begin_with_its_commit(tmp_path, of):
    """They began with the publish: what was committed later than that was there for nobody."""
    with warren.open(tmp_path) as store:
        queue = store.queue("q", arguments={"x-message-ttl": 3_600_000} if of == "the queue" else {})
        with store.transaction() as transaction:
            transaction.publish("q", b"m", expiration_ms=3_600_000 if of == "the message" else None)
            time.sleep(0.2)
            committed_at = time.time()
        message = queue.get()
        assert message is not None
        assert message.published_at >= committed_at
        assert message.entry.expiry / 1e6 >= committed_at + 3600


@pytest.mark.parametrize("settle", ["ack_many", "nack_many"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_settlement_with_none_among_its_messages_settles_nothing(tmp_path, settle, place):
    """`get` returns it for an empty queue. Those before it were acked, could be acked again, and nobody was told."""
    with warren.open(tmp_path) as store:
        queue = store.queue("q")
        queue.publish_many([b"1", b"2"])
        messages: list[Any] = queue.get_many(2)
        mixed = [*messages[:place], None, *messages[place:]]
        with pytest.raises(InvalidArgumentError, match="a Message is needed, not NoneType"):
            getattr(queue, settle)(mixed)
        assert [message.settled for message in messages] == [False, False]
        assert queue.info()["pending_acks"] == 2
        queue.ack_many(messages)
        assert queue.info()["pending_acks"] == 0


@pytest.mark.parametrize("timeout", [10**400, -(10**400)], ids=["long", "long ago"])
def test_a_time_to_wait_that_no_float_can_hold_is_refused(tmp_path, timeout):
    with warren.open(tmp_path) as store, pytest.raises(InvalidArgumentError, match=r"timeout is -?1000"):
        store.queue("q").get(timeout=timeout)


def test_arguments_that_are_too_deep_are_refused(tmp_path):
    """The stack ended first."""
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with warren.open(tmp_path) as store:
        with pytest.raises(QueueArgumentError, match="more than 128 deep"):
            store.queue("q", arguments={"mine": deep})
        assert store.queues() == []


# ---- priorities ----


def test_a_requeue_that_the_disk_refuses_for_one_priority_changes_nothing_in_the_others(
    store: VhostStore, disk: FaultyDisk
) -> None:
    """The higher level had its message back, its nack was refused all the same, and nobody who waited was woken."""
    queue = store.declare("q", arguments={"x-max-priority": 1})
    low, high = queue.backing.levels  # type: ignore[attr-defined]
    low.set_ram_target(1000)
    queue.backing.publish(make_entries(store, queue, [b"low"] * 30, persistent=False))
    queue.backing.publish(make_entries(store, queue, [b"high"], persistent=False, level=1))
    seqs = fetch(queue, 31)
    queue.backing.requeue([seq for seq in seqs if seq < 20])
    low.set_ram_target(10)  # what was requeued goes to delta, what still waits for an ack stays in RAM
    assert low.delta_start < 20
    assert (len(queue.backing), queue.backing.pending_count) == (20, 11)
    left = [seq for seq in seqs if seq >= 20]
    disk.capacity = 0
    with pytest.raises(DiskFullError):
        queue.backing.requeue(left)
    assert (len(queue.backing), queue.backing.pending_count) == (20, 11)
    assert len(high) == 0
    disk.capacity = None
    store.tick()
    assert sorted(queue.backing.requeue(left)) == sorted(left)
    assert len(queue.backing) == 31


# ---- the lock of a directory ----


def test_a_full_disk_keeps_nobody_from_the_lock(tmp_path, monkeypatch):
    """The pid could not be written: the open failed, and all that followed in the same process found the lock taken."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = str(tmp_path / ".lock")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        lock = DirectoryLock(path)
    with pytest.raises(StoreLockedError):
        DirectoryLock(path)
    lock.release()
    DirectoryLock(path).release()


def test_a_lock_that_is_not_got_is_not_kept_open(tmp_path, monkeypatch):
    path = str(tmp_path / ".lock")
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", call_away)
        with pytest.raises(Called):
            DirectoryLock(path)
    assert descriptors() == before
    DirectoryLock(path).release()


def test_a_store_that_was_closed_opens_again_while_a_process_forked_meanwhile_lives(tmp_path):
    """The child has the descriptor of the lock, too, and the lock went only with the last of them."""
    with warren.open(tmp_path) as store:
        store.queue("q").publish(b"a")
        ends, goes_on = os.pipe()
        child = os.fork()
        if not child:
            os.close(goes_on)
            os.read(ends, 1)
            os._exit(0)
    try:
        with warren.open(tmp_path) as store:
            assert len(store.queue("q")) == 1
            with pytest.raises(StoreLockedError):
                warren.open(tmp_path)
    finally:
        os.close(goes_on)
        os.close(ends)
        os.waitpid(child, 0)


def test_a_store_that_the_library_cannot_show_is_let_go(tmp_path, monkeypatch):
    """Whoever tried again in the same process was told that it has it open."""

    def fail(arguments: object) -> None:
        raise OSError(errno.EACCES, "not for you")

    with warren.open(tmp_path) as store:
        store.queue("q").publish(b"a")
    with monkeypatch.context() as patch:
        patch.setattr("warren.library._remove_stale_snapshots", fail)
        with pytest.raises(StorePathError, match="not for you"):
            warren.open(tmp_path)
    with warren.open(tmp_path) as store:
        assert len(store.queue("q")) == 1


# ---- files ----


class TwoDeletes(Disk):
    """The first delete empties the trash at the moment at which the second puts something into it."""

    def __init__(self) -> None:
        self.emptying, self.may_empty, self.emptied = threading.Event(), threading.Event(), threading.Event()

    def remove_tree(self, path: str) -> None:
        if self.emptying.is_set() or "trash" not in path:
            super().remove_tree(path)
            return
        self.emptying.set()
        self.may_empty.wait(20)
        super().remove_tree(path)
        self.emptied.set()

    def rename(self, source: str, target: str) -> None:
        if self.emptying.is_set() and "trash" in target:
            self.may_empty.set()
            self.emptied.wait(20)
        super().rename(source, target)


def test_two_deletes_at_once_do_not_take_the_trash_from_each_other(tmp_path):
    """One removed the empty directory between the other's look for it and its rename into it: the store had failed."""
    disk = TwoDeletes()
    disk.emptying.set()  # not at the start
    store = open_engine(str(tmp_path), disk)
    disk.emptying.clear()
    for name in "ab":
        publish(store, store.declare(name), 5)
    store.sync()
    store.checkpoint(seal=True, carry_below=0)
    first = threading.Thread(target=store.delete, args=("a",), daemon=True)
    first.start()
    disk.emptying.wait(20)
    store.delete("b")
    first.join(20)
    store.close()
    assert os.listdir(os.path.join(store.root, "trash")) == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_queue_in_sqlite_whose_file_cannot_be_made_was_not_declared(
    store: VhostStore, disk: FaultyDisk, error: int
) -> None:
    """Its name was taken: neither could it be declared, nor deleted, until the store was opened again."""
    store.sync()
    disk.fail_at(1, error)
    with pytest.raises(WarrenError):
        store.declare("s", arguments={"x-backing-queue": "sqlite"})
    assert "s" not in store.queues
    assert [record.name for record in store.metadata.queues()] == []
    if error == errno.ENOSPC:
        queue = store.declare("s", arguments={"x-backing-queue": "sqlite"})
        store.tick()
        publish(store, queue, 1)
        store.sync()


@pytest.mark.parametrize("index", ["table", "lmdb"])
@pytest.mark.parametrize("clean", [True, False])
def test_a_start_that_fails_leaves_no_file_open(tmp_path, monkeypatch, index, clean):
    """A service that tries again until the disk is back ran out of descriptors."""
    store = open_engine(str(tmp_path), store_index=index)
    queue = store.declare("q")
    publish(store, queue, [LARGE, b"small"] * 20)
    store.sync()
    if clean:
        store.close()
    else:
        store.abandon()
    before = descriptors()
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "a bad sector")

        patch.setattr(VhostStore, "_lost_and_found", fail)
        for _ in range(3):
            with pytest.raises(StoreFailedError, match="a bad sector"):
                open_engine(str(tmp_path), store_index=index)
    assert descriptors() == before
    again = open_engine(str(tmp_path), store_index=index)
    assert len(again.get("q").backing) == 40
    again.close()


def test_a_store_whose_index_lmdb_could_not_write_has_failed(tmp_path):
    """Each sync said so, and everything else went on, with an index that had lost changes."""

    class NoRoom:
        def __init__(self, transaction: lmdb.Transaction) -> None:
            self._transaction = transaction

        def commit(self) -> None:
            self._transaction.abort()
            raise lmdb.DiskError("No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transaction, name)

    store = open_engine(str(tmp_path), store_index="lmdb")
    queue = store.declare("q")
    publish(store, queue, [LARGE] * 3)
    store.sync()
    publish(store, queue, [LARGE])
    index = store.store.index
    assert isinstance(index, LmdbIndex)
    index._txn = NoRoom(index._txn)
    with pytest.raises(StoreFailedError):
        store.sync()
    with pytest.raises(StoreFailedError):
        store.reserve(queue, 1)
    store.abandon()
    again = open_engine(str(tmp_path), store_index="lmdb")
    assert len(again.get("q").backing) == 3
    again.close()


# ---- reading ----


class Exhausted(Disk):
    """A disk on which, while `down`, nothing can be opened for reading."""

    down = False

    def open_read(self, path: str) -> DiskFile:
        if self.down:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return super().open_read(path)

    def fail(self, store: VhostStore) -> None:
        store._handles.close()
        store.store._readers.close()
        for reader in store.journal._readers.values():
            reader.close()
        store.journal._readers.clear()
        self.down = True


def take_all(queue: StoredQueue) -> list[int]:
    return [seq for _ in range(100) for seq in fetch(queue, 7)]


TAKING: dict[str, Callable[[VariableQueue], Any]] = {
    "fetch": lambda backing: backing.fetch(100),
    "fetch one": lambda backing: backing.fetch(1),
    "fetch without ack": lambda backing: backing.fetch(100, False),
    "fetch some bytes": lambda backing: backing.fetch(100, True, 40),
    "drop": lambda backing: backing.drop(100),
    "fetchwhile": lambda backing: backing.fetchwhile(lambda entry: True, lambda entry, n: n, 0),
    "checkout": lambda backing: backing.checkout(100, 1 << 40),
}


@pytest.mark.parametrize("moved", [True, False], ids=["in segments", "in the journal"])
@pytest.mark.parametrize("taken", [0, 3, 11])
@pytest.mark.parametrize("take", TAKING.values(), ids=TAKING)
def test_messages_that_could_not_be_read_for_want_of_a_descriptor_are_still_in_their_queue(
    tmp_path, take, taken, moved
):
    """They had left their place, and were handed out to nobody until the next start."""
    disk = Exhausted()
    store = open_engine(str(tmp_path), disk)
    queue = store.declare("q")
    assert isinstance(queue.backing, VariableQueue)
    seqs = publish(store, queue, [LARGE, b"small"] * 25)
    store.sync()
    if moved:
        store.checkpoint(seal=True, carry_below=0)
    queue.backing.ack(fetch(queue, taken))
    queue.backing.set_ram_target(2)
    disk.fail(store)
    served: list[int] = []
    for _ in range(60):
        before = len(queue.backing)
        try:
            take(queue.backing)
        except OSError:
            assert len(queue.backing) == before
            break
        served.append(before - len(queue.backing))
    else:
        pytest.fail("nothing had to be read")
    disk.down = False
    gone = taken + sum(served)
    assert take_all(queue) == seqs[gone:]
    store.abandon()


@pytest.mark.parametrize("moved", [True, False], ids=["in segments", "in the journal"])
def test_a_requeue_that_cannot_read_for_want_of_a_descriptor_changes_nothing(tmp_path, moved):
    disk = Exhausted()
    store = open_engine(str(tmp_path), disk)
    queue = store.declare("q")
    publish(store, queue, [LARGE, b"small"] * 10)
    store.sync()
    if moved:
        store.checkpoint(seal=True, carry_below=0)
    seqs = fetch(queue, 20)
    assert isinstance(queue.backing, VariableQueue)
    queue.backing.set_ram_target(2)
    disk.fail(store)
    with pytest.raises(OSError, match="Too many open files"):
        queue.backing.requeue(seqs)
    assert (len(queue.backing), queue.backing.pending_count) == (0, 20)
    disk.down = False
    assert queue.backing.requeue(seqs) == seqs
    assert take_all(queue) == seqs
    store.abandon()


@pytest.mark.parametrize("arguments", [{}, {"x-max-priority": 1}], ids=["one level", "priorities"])
@pytest.mark.parametrize("moved", [True, False], ids=["in segments", "in the journal"])
def test_a_requeue_that_is_prepared_reads_nothing_more(tmp_path, moved, arguments):
    """With priorities it read everything twice, and a disk that failed the second time left half of it done."""
    disk = Exhausted()
    store = open_engine(str(tmp_path), disk)
    queue = store.declare("q", arguments=arguments)
    for level in range(len(arguments) + 1):
        queue.backing.publish(make_entries(store, queue, [LARGE, b"small"] * 10, persistent=True, level=level))
    store.sync()
    if moved:
        store.checkpoint(seal=True, carry_below=0)
    seqs = fetch(queue, 40)
    levels = queue.backing.levels if isinstance(queue.backing, PriorityQueue) else [queue.backing]
    for one in levels:
        assert isinstance(one, VariableQueue)
        one.set_ram_target(2)
    finish = queue.backing.prepare_requeue(seqs)
    disk.fail(store)
    assert finish() == seqs
    assert (len(queue.backing), queue.backing.pending_count) == (len(seqs), 0)
    disk.down = False
    assert take_all(queue) == seqs
    store.abandon()


@pytest.mark.parametrize("body", [b"small", LARGE], ids=["in the journal", "in the message store"])
@pytest.mark.parametrize("how", ["ack", "nack"])
def test_messages_that_could_not_be_settled_for_want_of_a_descriptor_can_be_settled_later(tmp_path, how, body):
    """They were settled for their reader, and neither pending nor acked: they came back with the next start."""
    disk = Exhausted()
    engine = open_engine(str(tmp_path), disk)
    queue = Store(engine).queue("q")
    queue.publish_many([body] * 20)
    engine.sync()
    engine.checkpoint(seal=True, carry_below=0)
    messages = queue.get_many(20)
    backing = engine.get("q").backing
    assert isinstance(backing, VariableQueue)
    backing.set_ram_target(2)
    settle = queue.ack_many if how == "ack" else queue.nack_many
    disk.fail(engine)
    try:
        settle(messages)
    except OSError:
        assert backing.pending_count == 20
        assert not any(message.settled for message in messages)
        disk.down = False
        settle(messages)
    else:
        assert (how, body) == ("ack", b"small")  # nothing had to be read
    disk.down = False
    assert (len(queue), backing.pending_count) == (0 if how == "ack" else 20, 0)
    engine.abandon()


def test_a_get_from_several_priorities_that_cannot_read_the_lower_ones_hands_out_the_higher(tmp_path):
    disk = Exhausted()
    engine = open_engine(str(tmp_path), disk)
    queue = Store(engine).queue("q", arguments={"x-max-priority": 2})
    queue.publish_many([b"low"] * 32)
    engine.sync()
    engine.checkpoint(seal=True, carry_below=0)
    backing = engine.get("q").backing
    assert isinstance(backing, PriorityQueue)
    low = backing.levels[0]
    assert isinstance(low, VariableQueue)
    low.set_ram_target(2)
    queue.publish_many([b"high"] * 3, priority=2)
    disk.fail(engine)
    got = queue.get_many(35)
    assert [message.body for message in got[:3]] == [b"high"] * 3
    assert len(got) == backing.pending_count < 35
    disk.down = False
    got += queue.get_many(35)
    assert len({message.seq_id for message in got}) == 35
    engine.abandon()


def test_a_get_of_many_that_cannot_read_the_last_ones_hands_out_those_before(tmp_path):
    """Some had expired, so that it took two looks: what the first had found was handed out to nobody."""
    disk = Exhausted()
    engine = open_engine(str(tmp_path), disk)
    queue = Store(engine).queue("q")
    for expiration_ms in (None, 0, None):  # of those between all expire at once
        queue.publish_many([b"x"] * 12, expiration_ms=expiration_ms)
    engine.sync()
    disk.fail(engine)
    got: list[warren.Message] = []
    with contextlib.suppress(OSError):
        while messages := queue.get_many(7):
            got += messages
    assert len(got) < 24
    assert len(got) == engine.get("q").backing.pending_count
    disk.down = False
    got += queue.get_many(100)
    assert [message.seq_id for message in got] == [*range(12), *range(24, 36)]
    engine.abandon()


@pytest.mark.parametrize("clean", [True, False])
def test_a_segment_that_somebody_took_away_costs_its_own_messages_and_no_others(tmp_path, clean):
    """Nobody could take what was behind it; after a clean stop the store did not even open."""
    store = open_engine(str(tmp_path))
    queue = store.declare("q")
    seqs = publish(store, queue, 40)
    store.sync()
    store.checkpoint(seal=True, carry_below=0)
    if clean:
        store.close()
    assert isinstance(queue.backing, VariableQueue)
    queue.backing.set_ram_target(0) if not clean else None
    store._handles.close()
    os.unlink(os.path.join(queue.directory, "2.qi"))
    if clean:
        store = open_engine(str(tmp_path))
        queue = store.get("q")
    assert take_all(queue) == [seq for seq in seqs if seq // 8 != 2]
    assert any("2.qi" in str(line["file"]) for line in store.quarantine.reports)
    store.abandon()


# ---- copies ----


class JustUnlinked(Disk):
    """A disk that still lists a file which another thread has unlinked since."""

    def __init__(self, directory: str, name: str) -> None:
        self.directory, self.name = directory, name

    def listdir(self, path: str) -> list[str]:
        names = super().listdir(path)
        return [*names, self.name] if os.path.basename(path) == self.directory and names else names


@pytest.mark.parametrize(
    ("directory", "name"),
    [("msg_store_persistent", "99.0.rdq"), ("msg_store_transient", "99.0.rdq"), ("stages", "writer")],
)
def test_a_snapshot_passes_over_what_is_unlinked_while_it_is_taken(tmp_path, directory, name):
    """Garbage of the message store is unlinked without a lock, and a stage that is released, too: the store had failed."""
    store = open_engine(str(tmp_path))
    queue = store.declare("q")
    publish(store, queue, [LARGE, b"small"])
    publish(store, queue, [LARGE] * 20, persistent=False)
    StageWriter(store.root, "other", "0", 0, 0).finish()
    store.sync()
    store.disk = JustUnlinked(directory, name)
    copy = str(tmp_path / "copy")
    store.snapshot(copy, transients=True)
    assert store.committer.failed is None
    store.abandon()
    os.makedirs(tmp_path / "opened")
    os.rename(copy, tmp_path / "opened" / "data")
    again = open_engine(str(tmp_path / "opened"))
    assert len(again.get("q").backing) == 2
    again.close()


def test_a_copy_of_a_stopped_broker_has_the_stages_that_were_decided(tmp_path):
    """Rows that were published, and not yet moved into their queues, were missing from a backup."""
    store = open_engine(str(tmp_path))
    writer = StageWriter(store.root, "guest:w", "0", 0, 0)
    writer.add([b"head"], [b"row"], ["orders"])
    writer.finish()
    store.close()
    target = str(tmp_path / "new" / "backup")
    copy_durable(str(tmp_path / "data"), target, None, lambda done, total: None, lambda copy: None)
    copy = os.path.join(target, "vhosts", os.path.basename(store.root), "stages", writer.name)
    reader = StageReader(copy)
    assert reader.read(0, 10, 1 << 20).bodies == [b"row"]
    reader.close()


@pytest.mark.parametrize(
    "settings", [{"journal_file_records": 64}, {"journal_file_records": 200}, {"journal_file_bytes": 1024}]
)
def test_checkpoints_of_small_journal_files_come_to_an_end(tmp_path, settings):
    """What a checkpoint carries filled the next file by its number of records, which was due for a checkpoint at once."""
    with warren.open(tmp_path, durability="os", settings=EngineSettings(**settings)) as store:
        queue = store.queue("a")
        for number in range(2000):
            queue.publish(b"%4d" % number)
        store.sync()
        store.engine.tick()
        assert store.engine.journal.sealed - store.engine.journal.floor < 20
    with warren.open(tmp_path, durability="os") as store:
        assert [message.body for message in store.queue("a").browse()] == [b"%4d" % number for number in range(2000)]


@pytest.mark.parametrize("settings", [{"journal_file_records": 63}, {"journal_file_bytes": 1023}])
def test_journal_files_that_a_checkpoint_alone_would_fill_are_refused(settings):
    with pytest.raises(InvalidArgumentError, match=next(iter(settings))):
        EngineSettings(**settings)


@pytest.mark.parametrize("arguments", [{}, {"x-max-priority": 3}, {"x-queue-mode": "lazy"}])
def test_a_message_that_came_back_before_it_was_checked_out_is_redelivered_after_a_stop(tmp_path, arguments):
    with warren.open(tmp_path, durability="os") as store:
        queue = store.queue("a", arguments=arguments)
        queue.publish_many([b"came back", b"never out"])
        message = queue.get()
        assert message is not None
        message.nack(requeue=True)
        store.engine.checkout(store.engine.queues["a"], "lease", 2)
    with warren.open(tmp_path, durability="os") as store:
        found = {
            message.body: message.redelivered for message in store.queue("a", arguments=arguments).browse(unacked=True)
        }
        assert found == {b"came back": True, b"never out": False}


def test_acks_of_a_segment_are_unlinked_only_when_it_is_safe_that_the_segment_is_gone(tmp_path):
    """Its process died between the unlink of the .qi and the sync of the directory, so nothing is dead for the next start. If
    that unlinked the .qa at once, a power loss could bring back the .qi alone, and acked messages with it."""
    disk = FaultyDisk(tmp_path / "disk")
    directory = f"{disk.root}/queue"
    disk.make_dirs(directory)
    for suffix in ("qi", "qs", "qa"):
        file = disk.create(f"{directory}/1.{suffix}")
        file.append(b"x")
        file.sync()
    disk.sync_dir(directory)
    files = SegmentFiles(disk, directory, 1, TINY.segment_entries)
    disk.unlink(f"{directory}/1.qi")
    before = len(disk.trace)
    files.clear_away([])
    calls = [(call.kind, os.path.basename(call.path)) for call in disk.trace[before:]]
    assert calls.index(("sync_dir", "queue")) < min(calls.index(("unlink", "1.qs")), calls.index(("unlink", "1.qa")))
    assert disk.listdir(directory) == []
