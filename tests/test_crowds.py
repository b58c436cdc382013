"""Where many threads wait, a thread for the disk commits for them: all are told, also where it fails."""

from __future__ import annotations

import os
import threading

import pytest

from tests.small_engine import fetch, open_engine
from warren.errors import StoreFailedError, WarrenError
from warren.kernel.gates import DiskThread, Gate
from warren.library import Store
from warren.storage.disk import Disk, DiskFile
from warren.storage.vhost_store import VhostStore

THREADS = 32
EACH = 15


class GivenFile(DiskFile):
    """Counts what is given to the thread for the disk, and gives each `every`-th to another descriptor."""

    __slots__ = ("disk",)
    disk: GivingDisk

    def give(self, thread: DiskThread, data: memoryview, offset: int, deputy: Gate) -> bool:
        self.disk.given += 1
        if self.disk.instead is None or self.disk.given % self.disk.every:
            return super().give(thread, data, offset, deputy)
        self.disk.failed += 1
        thread.submit(self.disk.instead, data, offset, deputy)
        return True


class GivingDisk(Disk):
    def __init__(self, instead: int | None = None, every: int = 3) -> None:
        self.instead = instead
        self.every = every
        self.given = self.failed = 0

    def create(self, path: str) -> DiskFile:
        file = GivenFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        file.disk = self
        return file


def crowd(store: VhostStore) -> list[WarrenError]:
    """Threads that each wait for their own messages; what they were told in place of "safe"."""
    queue = Store(store).queue("q")
    told: list[WarrenError] = []
    together = threading.Barrier(THREADS)

    def work() -> None:
        together.wait()
        try:
            for _ in range(EACH):
                queue.publish(b"x")
                store.sync()
        except WarrenError as error:
            told.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "somebody was not told"
    return told


def opened(path: str, disk: Disk | None = None) -> VhostStore:
    return open_engine(path, disk, journal_file_bytes=1 << 20)


def everything(path: str) -> int:
    store = opened(path)
    try:
        return len(fetch(store.get("q"), THREADS * EACH + 1))
    finally:
        store.abandon()


def test_a_crowd_is_told_and_what_it_was_told_is_there_after_a_crash(tmp_path):
    disk = GivingDisk()
    store = opened(str(tmp_path), disk)
    assert crowd(store) == []
    assert disk.given > 0, "nothing was given to the thread"
    assert store.committer.commits < THREADS * EACH
    store.abandon()
    assert everything(str(tmp_path)) == THREADS * EACH


def test_what_the_thread_finds_no_room_for_is_written_by_a_leader(tmp_path):
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        disk = GivingDisk(full)
        store = opened(str(tmp_path), disk)
        assert crowd(store) == []
        assert disk.failed > 0
        store.abandon()
    finally:
        os.close(full)
    assert everything(str(tmp_path)) == THREADS * EACH


def test_when_the_thread_fails_everybody_is_told_and_nothing_is_confirmed_after_it(tmp_path):
    reading = os.open(os.devnull, os.O_RDONLY)  # writing to it is an error that is none of room
    try:
        disk = GivingDisk(reading)
        store = opened(str(tmp_path), disk)
        told = crowd(store)
        assert disk.failed == 1
        assert len(told) == THREADS
        assert all(isinstance(error, StoreFailedError) for error in told)
        with pytest.raises(StoreFailedError):
            store.sync()
        store.abandon()
    finally:
        os.close(reading)
    confirmed = everything(str(tmp_path))
    assert 0 < confirmed < THREADS * EACH


def test_a_store_is_closed_while_a_crowd_uses_it(tmp_path):
    store = opened(str(tmp_path), GivingDisk())
    queue = Store(store).queue("q")
    confirmed: list[int] = []
    enough = threading.Event()

    def work() -> None:
        try:
            while True:
                seq = queue.publish(b"x")
                store.sync()
                confirmed.append(seq)
                enough.set()
        except WarrenError:
            return

    threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    assert enough.wait(120)
    store.close()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    store = opened(str(tmp_path))
    assert set(confirmed) <= set(fetch(store.get("q"), 1_000_000))
    store.abandon()
