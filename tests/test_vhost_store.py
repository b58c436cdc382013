"""What a vhost's store owes those who share it: a mistake in a call costs the caller, never the store; everybody's turn
comes; a format that it cannot read is refused at the door."""

from __future__ import annotations

import errno
import math
import os
import sqlite3
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import crash_and_reopen, fetch, open_engine, publish
from warren.errors import DiskFullError, StoreFailedError, StoreFormatError, StorePathError
from warren.kernel.checksum import crc32c
from warren.library import Store
from warren.storage.disk import Disk, DiskFile
from warren.storage.rates import MemoryMonitor
from warren.storage.vhost_store import VhostStore


@pytest.fixture
def store(tmp_path) -> Iterator[VhostStore]:
    store = open_engine(str(tmp_path))
    yield store
    store.abandon()


def still_well(store: VhostStore) -> None:
    """Everything goes on, on disk, too."""
    queue = store.get("q") if "q" in store.queues else store.declare("q")
    seqs = publish(store, queue, 3)
    store.sync()
    store.checkpoint(seal=True)
    assert set(seqs) <= set(fetch(queue, 1000))


def files_below(path: str) -> list[str]:
    return sorted(str(file) for file in Path(path).rglob("*") if file.is_file())


# ---- snapshots ----


def test_a_snapshot_where_one_is_already_is_refused_and_the_store_is_well(store, tmp_path):
    publish(store, store.declare("q"), 5)
    target = str(tmp_path / "snapshot")
    root = store.snapshot(target)
    before = files_below(target)
    with pytest.raises(StorePathError, match=f"{root} is there already.*Choose another one, or remove it"):
        store.snapshot(target)
    assert files_below(target) == before, "the first one is as it was"
    still_well(store)
    with open_engine_of(target) as copy:
        assert fetch(copy.get("q"), 10) == [0, 1, 2, 3, 4]


@contextmanager
def open_engine_of(snapshot: str) -> Iterator[VhostStore]:
    store = VhostStore(snapshot, background=False)
    try:
        yield store
    finally:
        store.abandon()


def test_a_snapshot_into_a_file_is_refused_and_the_store_is_well(store, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"not a directory")
    with pytest.raises(StorePathError, match=r"no snapshot can be made in .*file/vhosts.*Choose a directory"):
        store.snapshot(str(file))
    assert file.read_bytes() == b"not a directory"
    still_well(store)


class AnotherFilesystem(Disk):
    """Hard links end at its border."""

    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source)


def test_a_snapshot_on_another_filesystem_is_refused_and_leaves_nothing(tmp_path):
    store = open_engine(str(tmp_path), AnotherFilesystem())
    publish(store, store.declare("q"), 5)
    with pytest.raises(StorePathError, match="from one filesystem to another"):
        store.snapshot(str(tmp_path / "snapshot"))
    assert files_below(str(tmp_path / "snapshot")) == []
    still_well(store)
    store.abandon()


class BadSectors(Disk):
    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), source)


def test_an_error_of_the_disk_during_a_snapshot_fails_the_store_as_any_other(tmp_path):
    store = open_engine(str(tmp_path), BadSectors())
    publish(store, store.declare("q"), 5)
    with pytest.raises(StoreFailedError):
        store.snapshot(str(tmp_path / "snapshot"))
    with pytest.raises(StoreFailedError):
        store.sync()
    assert files_below(str(tmp_path / "snapshot")) == []
    store.abandon()


@pytest.mark.parametrize("module", ["queue_database", "metadata"])
def test_a_snapshot_without_room_for_a_database_leaves_the_store_well(tmp_path, monkeypatch, module):
    """A queue in SQLite took the full disk of its copy for an error of its own, and refused everything."""
    store = open_engine(str(tmp_path), reserve_bytes=4096)
    queue = store.declare("q", arguments={"x-backing-queue": "sqlite"})
    publish(store, queue, [b"x" * 5000] * 20)
    connect = sqlite3.connect

    def connect_to_a_full_disk(path: str, **options: Any) -> sqlite3.Connection:
        db = connect(path, **options)
        db.execute("PRAGMA max_page_count = 2")
        return db

    with monkeypatch.context() as patch:
        patch.setattr(f"warren.storage.{module}.sqlite3.connect", connect_to_a_full_disk)
        if module == "metadata":
            patch.setattr(type(queue.backing), "backup", lambda self, path: None)
        with pytest.raises(DiskFullError):
            store.snapshot(str(tmp_path / "snapshot"))
    assert files_below(str(tmp_path / "snapshot")) == []
    store.committer.take_reserve()
    still_well(store)
    store.snapshot(str(tmp_path / "snapshot"))
    store.abandon()


# ---- whose turn it is ----


def test_a_checkpoint_gets_its_turn_however_quick_publishers_are(store, monkeypatch):
    """It waited for a moment in which nothing was under way, and a busy publisher never left one."""
    queue = store.declare("q")
    sync = store.committer.sync
    published: list[int] = []

    def sync_and_be_late(*arguments: Any) -> None:
        sync(*arguments)
        published.extend(publish(store, queue, 1))

    monkeypatch.setattr(store.committer, "sync", sync_and_be_late)
    with store.quiet():
        assert not store.journal.dirty
        assert store.journal.synced_lsn == store.journal.appended_lsn
    assert published, "somebody was quicker"
    monkeypatch.undo()
    assert fetch(queue, 1000) == published


class SlowSync(Disk):
    """The first sync of a journal file waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def create(self, path: str) -> DiskFile:
        file = super().create(path)
        return SlowFile(self, file) if path.endswith(".wal") else file


class SlowFile(DiskFile):
    def __init__(self, disk: SlowSync, file: DiskFile) -> None:
        super().__init__(file.path, file._fd)
        self.disk = disk

    def pwrite_and_sync(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        if self.disk.armed:
            self.disk.armed = False
            self.disk.reached.set()
            assert self.disk.go_on.wait(60)
        super().pwrite_and_sync(data, offset)


def test_who_holds_everything_off_waits_for_the_commit_under_way_and_hands_on_the_lead(tmp_path):
    disk = SlowSync()
    store = open_engine(str(tmp_path), disk)
    queue = store.declare("q")
    publish(store, queue, 1)
    store.sync()
    disk.armed = True
    publish(store, queue, 1)
    leader = threading.Thread(target=store.sync)
    leader.start()
    assert disk.reached.wait(60)
    publish(store, queue, 1)
    held: list[bool] = []

    def hold() -> None:
        with store.committer.sync_and_hold():
            held.append(store.journal.dirty)

    holders = [threading.Thread(target=hold) for _ in range(3)]
    waiter = threading.Thread(target=store.sync)
    for thread in (*holders, waiter):
        thread.start()
    assert held == [], "a commit is under way"
    disk.go_on.set()
    for thread in (leader, *holders, waiter):
        thread.join(60)
        assert not thread.is_alive()
    assert held == [False] * 3
    still_well(store)
    store.abandon()


@pytest.mark.parametrize("by_library", [False, True])
def test_a_declare_never_waits_for_a_commit_under_way_however_much_is_in_the_buffer(tmp_path, by_library):
    """It waited with the lock, which the commit needs to end: neither did."""
    disk = SlowSync()
    store = open_engine(str(tmp_path), disk, commit_bytes=100)
    queue = store.declare("q")
    publish(store, queue, 1)
    store.sync()
    disk.armed = True
    publish(store, queue, 1)
    leader = threading.Thread(target=store.sync, daemon=True)
    leader.start()
    assert disk.reached.wait(60)
    publish(store, queue, 10)
    assert len(store.journal.buffer) > 100
    declare = Store(store).queue if by_library else store.declare
    declaring = threading.Thread(target=declare, args=("new",), daemon=True)
    declaring.start()
    declaring.join(20)
    assert not declaring.is_alive()
    disk.go_on.set()
    leader.join(60)
    assert not leader.is_alive()
    assert "new" in store.queues
    still_well(store)
    store.abandon()


def test_a_declare_makes_nobody_wait_because_checkpoints_are_behind(store, monkeypatch):
    """It slept with the lock."""
    monkeypatch.setattr(store, "overload", lambda: pytest.fail("it was about to sleep"))
    with store.lock:
        store.declare("q")
    assert store._wake.is_set(), "its reservation is committed all the same"


def test_who_holds_everything_off_is_told_that_the_store_has_failed(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = open_engine(disk.root, disk)
    publish(store, store.declare("q"), 1)
    store.committer.fail(OSError(errno.EIO, "a bad sector"))
    with pytest.raises(StoreFailedError, match="a bad sector"), store.committer.sync_and_hold():
        pytest.fail("it has failed")
    store.abandon()


# ---- a full disk ----


@pytest.mark.parametrize("persistent", [True, False])
def test_upkeep_frees_dead_files_for_a_commit_that_does_not_fit(tmp_path, persistent):
    """Segments, and files of the transient message store. Upkeep tried the commit first, each time, and nothing else."""
    disk = FaultyDisk(tmp_path / "disk")
    store = open_engine(disk.root, disk, reserve_bytes=4096)
    queue = store.declare("q")
    publish(store, queue, [b"x" * (100 if persistent else 1000)] * 150, persistent=persistent)
    store.sync()
    store.checkpoint(seal=True, carry_below=0)
    store.transient_store.flush()
    taken = fetch(queue, 150)
    if persistent:
        queue.backing.ack(taken)
        store.sync()
    disk.capacity = disk._used + 1000
    kept = publish(store, queue, [b"y" * 100] * 100)
    for _ in range(2):
        with pytest.raises(DiskFullError, match="nothing is lost"):
            store.sync()
    if not persistent:
        queue.backing.ack(taken)  # no commit is needed for that
    store.tick()
    assert not store.journal.dirty
    disk.capacity = None
    store, disk = crash_and_reopen(store, disk)
    assert fetch(store.get("q"), 1000) == kept
    store.abandon()


def test_upkeep_says_that_the_disk_is_full_when_there_is_nothing_to_free(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = open_engine(disk.root, disk, reserve_bytes=4096)
    queue = store.declare("q")
    store.sync()
    disk.capacity = disk._used + 1000
    kept = publish(store, queue, [b"y" * 100] * 80)
    for _ in range(3):
        with pytest.raises(DiskFullError, match="nothing is lost"):
            store.tick()
    disk.capacity = None
    store.tick()
    store, disk = crash_and_reopen(store, disk)
    assert fetch(store.get("q"), 1000) == kept
    store.abandon()


# ---- formats ----


def make_newer(path: str, magic: bytes) -> None:
    """Another version in the header of a file, and a CRC that fits."""
    with open(path, "r+b") as file:
        header = bytearray(file.read(64))
        assert header[:4] == magic
        header[4:6] = struct.pack("<H", 2)
        header[60:] = struct.pack("<I", crc32c(bytes(header[:60])))
        file.seek(0)
        file.write(header)


@pytest.mark.parametrize("arguments", [{}, {"x-max-priority": 2}])
def test_a_segment_of_a_newer_format_is_noticed_after_a_clean_stop_and_nothing_is_changed(tmp_path, arguments):
    """Segments are not read at such a start: it came to light when the first of its messages was due."""
    store = open_engine(str(tmp_path))
    queue = store.declare("q", arguments=arguments)
    publish(store, queue, 30)
    store.close()
    index = sorted(Path(queue.directory).rglob("*.qi"))[-1]
    make_newer(str(index), b"WRNI")
    terms = Path(store.root, "recovery").read_bytes()
    with pytest.raises(StoreFormatError, match=f"{index} has format version 2; this Warren reads version 1"):
        open_engine(str(tmp_path))
    assert Path(store.root, "recovery").read_bytes() == terms, "for the Warren that can read it"


def test_terms_of_a_newer_format_are_left_to_the_warren_that_wrote_them(tmp_path):
    store = open_engine(str(tmp_path))
    publish(store, store.declare("q"), 3)
    store.close()
    path = Path(store.root, "recovery")
    data = path.read_bytes()[:-4].replace(b'{"format":1', b'{"format":7')
    path.write_bytes(data + struct.pack("<I", crc32c(data)))
    with pytest.raises(StoreFormatError, match="recovery has format version 7; this Warren reads version 1"):
        open_engine(str(tmp_path))
    assert path.read_bytes()[:-4] == data


def test_a_damaged_header_of_a_segment_is_reported_after_a_clean_stop_and_costs_nothing(tmp_path, caplog):
    store = open_engine(str(tmp_path))
    queue = store.declare("q")
    publish(store, queue, 30)
    store.close()
    index = Path(queue.directory, "2.qi")
    data = bytearray(index.read_bytes())
    data[9] ^= 1
    index.write_bytes(data)
    store = open_engine(str(tmp_path))
    assert "2.qi" in caplog.text
    assert fetch(store.get("q"), 100) == list(range(30))
    store.abandon()


# ---- a queue that is built anew ----


def test_a_queue_that_is_built_anew_counts_the_same_bytes(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = open_engine(disk.root, disk)
    queue = store.declare("q")
    publish(store, queue, [b"x" * size for size in (0, 1, 300, 7000)] * 5)
    store.checkpoint(seal=True)
    publish(store, queue, [b"y" * 50])
    expected = queue.backing.ready_bytes()
    assert expected == 5 * 7301 + 50
    assert store.restart_queue("q").backing.ready_bytes() == expected
    store, _ = crash_and_reopen(store, disk)
    assert store.get("q").backing.ready_bytes() == expected
    store.abandon()


# ---- a checkpoint with many queues keeps nobody waiting ----


class _WatchedFile(DiskFile):
    """A journal file, read by whoever has the engine's lock or has it not."""

    __slots__ = ("watch",)
    watch: _LockWatch

    def pread(self, count: int, offset: int) -> bytes:
        self.watch.note("read", self.path)
        return super().pread(count, offset)


class _LockWatch(Disk):
    """Notes which journal files are read and unlinked, and whether the engine's lock is held meanwhile."""

    def __init__(self) -> None:
        self.lock: Any = None
        self.seen: set[tuple[str, bool]] = set()

    def note(self, what: str, path: str) -> None:
        if self.lock is not None and path.endswith(".wal"):
            self.seen.add((what, self.lock._is_owned()))

    def open_read(self, path: str) -> DiskFile:
        file = _WatchedFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        file.watch = self
        return file

    def unlink(self, path: str) -> None:
        self.note("unlink", path)
        super().unlink(path)


def test_a_checkpoint_over_many_queues_reads_and_unlinks_journal_files_without_the_lock(tmp_path):
    disk = _LockWatch()
    store = open_engine(str(tmp_path), disk, journal_file_bytes=1 << 20, carry_below=1 << 20)
    try:
        queues = [store.declare(f"q{number}") for number in range(12)]
        for queue in queues:
            publish(store, queue, 3)
        store.sync()
        disk.lock = store.lock
        store.checkpoint(seal=True)
        disk.lock = None
        assert disk.seen == {("read", False), ("unlink", False)}
        assert all(fetch(queue, 10) == [0, 1, 2] for queue in queues)
    finally:
        store.abandon()


def test_the_mean_duration_follows_what_queues_report_and_forget():
    monitor = MemoryMonitor(cap=1000)
    monitor.ram_bytes = 1000
    durations: dict[int, float] = {}
    for number in range(500):
        queue, duration = number % 7, (number * 37 % 11) / 3 if number % 5 else math.inf
        monitor.report(queue, duration)
        durations.pop(queue, None)
        if not math.isinf(duration):
            durations[queue] = duration
        mean = sum(durations.values()) / len(durations) if durations else 0.0
        assert monitor.update() == pytest.approx(mean, abs=1e-9)
    for queue in range(7):
        monitor.forget(queue, 0)
    assert monitor.update() == 0.0
    monitor.report(1, 2.0)
    assert monitor.update() == 2.0
