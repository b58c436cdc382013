"""A store that is closed while other threads use it: what was confirmed is there at the next start, and who comes too late is
told so."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import crash_and_reopen, fetch, open_engine, publish
from warren.errors import StoreClosedError, StoreFailedError
from warren.library import Store
from warren.storage.disk import Disk
from warren.storage.vhost_store import VhostStore


class Interrupted(Disk):
    """Calls `action` once, just before a file of the name `name` is replaced."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.action: Callable[[], None] | None = None

    def replace(self, path: str, data: bytes) -> None:
        action = self.action
        if action is not None and os.path.basename(path) == self._name:
            self.action = None
            action()
        super().replace(path, data)


class Publisher:
    """Publishes and waits for safety in a thread of its own; knows what was confirmed."""

    def __init__(self, store: Store, **properties: Any) -> None:
        self._store = store
        self._properties = properties
        self._queue = store.queue("q")
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self.confirmed: list[bytes] = []
        self.refused: list[StoreClosedError] = []

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def run(self) -> None:
        """From begin to end. Where the closing thread has the lock there is no end before it lets go."""
        self.start()
        if not self._store.engine.holds_lock():
            self.join()

    def _publish(self) -> None:
        try:
            self._queue.publish(b"late", **self._properties)
            self._store.sync()
            self.confirmed.append(b"late")
        except StoreClosedError as error:
            self.refused.append(error)


def bodies(store: Store) -> list[bytes]:
    return [message.body for message in store.queue("q").get_many(1000)]


def check_next_start(path: str, confirmed: list[bytes]) -> None:
    """Everything is there, once more after a start and a stop."""
    for _ in range(2):
        store = Store(open_engine(path))
        assert store.engine.clean_start
        assert bodies(store) == [b"early"] * 20 + confirmed
        store.close()


@pytest.mark.parametrize("arguments", [{}, {"x-max-priority": 2}, {"x-backing-queue": "sqlite"}])
def test_what_is_confirmed_while_the_store_is_checkpointed_for_its_close_is_there_at_the_next_start(
    tmp_path, arguments
):
    disk = Interrupted("FLOOR")
    store = Store(open_engine(str(tmp_path), disk))
    store.queue("q", arguments=arguments).publish_many([b"early"] * 20)
    publisher = Publisher(store)
    disk.action = publisher.run
    store.close()
    publisher.join()
    assert disk.action is None, "it was in time"
    assert len(publisher.confirmed) + len(publisher.refused) == 1
    check_next_start(str(tmp_path), publisher.confirmed)


@pytest.mark.parametrize("name", ["recovery", "close"])
def test_what_is_confirmed_at_the_end_of_a_close_is_there_at_the_next_start(tmp_path, monkeypatch, name):
    """Its commit went to a journal file whose number the next start used again."""
    disk = Interrupted(name)
    store = Store(open_engine(str(tmp_path), disk))
    store.queue("q").publish_many([b"early"] * 20)
    publisher = Publisher(store)
    close = store.engine.committer.close

    def publish_and_close() -> None:
        monkeypatch.undo()
        publisher.run()
        close()

    if name == "close":
        monkeypatch.setattr(store.engine.committer, "close", publish_and_close)
    else:
        disk.action = publisher.run
    store.close()
    publisher.join()
    assert len(publisher.confirmed) + len(publisher.refused) == 1
    check_next_start(str(tmp_path), publisher.confirmed)


def test_who_publishes_to_a_store_that_is_being_closed_is_refused_and_nobody_waits_for_its_end(tmp_path):
    disk = Interrupted("FLOOR")
    store = Store(open_engine(str(tmp_path), disk))
    store.queue("q").publish_many([b"early"] * 20)
    told: list[str] = []

    def use() -> None:
        calls: dict[str, Callable[[], object]] = {
            "publish": lambda: queue.publish(b"late"),
            "publish a large body": lambda: queue.publish(b"x" * 2_000_000),
            "get": queue.get,
            "declare": lambda: store.queue("new"),
            "sync": store.sync,
        }
        for name, call in calls.items():
            with pytest.raises(StoreClosedError, match="was closed"):
                call()
            told.append(name)

    queue = store.queue("q")
    disk.action = use
    store.close()
    assert told == ["publish", "publish a large body", "get", "declare", "sync"]
    check_next_start(str(tmp_path), [])


def test_a_second_close_waits_for_the_first(tmp_path):
    disk = Interrupted("FLOOR")
    store = open_engine(str(tmp_path), disk)
    publish(store, store.declare("q"), 20)
    began = threading.Event()
    seen: list[bool] = []

    def close_too() -> None:
        began.set()
        store.close()
        seen.append(os.path.exists(os.path.join(store.root, "recovery")))

    second = threading.Thread(target=close_too, daemon=True)

    def overtake() -> None:
        second.start()
        assert began.wait(60)

    disk.action = overtake
    store.close()
    second.join(60)
    assert seen == [True], "it came back when the store was closed"
    store = open_engine(str(tmp_path))
    assert store.clean_start
    assert len(fetch(store.get("q"), 100)) == 20
    store.abandon()


def test_who_comes_after_a_close_that_failed_is_told_so(tmp_path):
    disk = Interrupted("recovery")
    store = open_engine(str(tmp_path), disk)
    publish(store, store.declare("q"), 20)

    def fail() -> None:
        raise OSError(errno.EIO, "a bad sector")

    disk.action = fail
    for call in (store.close, store.sync):
        with pytest.raises(StoreFailedError, match="a bad sector"):
            call()
    store = open_engine(str(tmp_path))
    assert not store.clean_start
    assert len(fetch(store.get("q"), 100)) == 20
    store.abandon()


def test_an_ack_that_slips_in_behind_the_last_checkpoint_makes_the_next_start_a_dirty_one_and_is_kept(
    tmp_path, monkeypatch
):
    """The broker's queues ack without a look at the store's state. Terms would say so, but no file of the segment."""
    disk = FaultyDisk(tmp_path / "disk")
    store = open_engine(disk.root, disk)
    queue = store.declare("q")
    seqs = publish(store, queue, 20)
    store.checkpoint(seal=True, carry_below=0)
    taken = fetch(queue, 3)
    publish(store, queue, 1)
    checkpoint = VhostStore._checkpoint

    def ack_behind(self: VhostStore, *arguments: Any, **options: Any) -> bool:
        done = checkpoint(self, *arguments, **options)
        with self.lock:
            queue.backing.ack(taken)
        return done

    monkeypatch.setattr(VhostStore, "_checkpoint", ack_behind)
    store.close()
    monkeypatch.undo()
    store = open_engine(disk.root, disk)
    assert not store.clean_start
    store.checkpoint(seal=True, carry_below=0)
    store, disk = crash_and_reopen(store, disk)
    assert fetch(store.get("q"), 100) == [*seqs[3:], 20]
    store.abandon()
