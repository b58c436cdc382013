"""A checkpoint that was cut off leaves slots of messages that the journal still has. Acked, they must not come back."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import TINY, fetch, open_engine, publish
from warren.errors import DiskFullError
from warren.storage.checkpoint import Checkpoint
from warren.storage.queue_index import QueueIndex
from warren.storage.vhost_store import StoredQueue, VhostStore

SIZE = TINY.segment_entries


class Killed(BaseException):
    pass


def cut_off(
    store: VhostStore,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Run a checkpoint that ends after its slots were written and synced, before the floor moves."""
    write = Checkpoint._write_acks_and_unlink

    def cut(self: Checkpoint) -> None:
        write(self)
        self._slots.sync()
        meanwhile()
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "_write_acks_and_unlink", cut)
        with pytest.raises((Killed, DiskFullError)):
            store.checkpoint(seal=True, carry_below=0)


def begun(disk: FaultyDisk, later: int) -> tuple[VhostStore, StoredQueue]:
    store = open_engine(disk.root, disk)
    queue = store.declare("q")
    publish(store, queue, 2)
    store.checkpoint(seal=True, carry_below=0)
    publish(store, queue, later)
    store.sync()
    return store, queue


@pytest.mark.parametrize("later", [4, SIZE - 2], ids=["part of a segment", "a full segment"])
@pytest.mark.parametrize("stop", ["clean", "dirty"])
@pytest.mark.parametrize("cut", ["kill -9", "full disk"])
def test_what_is_acked_after_a_cut_checkpoint_stays_away(tmp_path, monkeypatch, later, stop, cut):
    disk = FaultyDisk(tmp_path)
    store, queue = begun(disk, later)
    if cut == "kill -9":
        cut_off(store, monkeypatch, Killed())
        store.abandon()
        store = open_engine(disk.root, disk)
        queue = store.get("q")
    else:
        cut_off(store, monkeypatch, OSError(errno.ENOSPC, "no space left on device"))
        store.committer.full = False
    queue.backing.ack(fetch(queue, 4)[2:])
    store.sync()
    if stop == "clean":
        store.close()
        store = open_engine(disk.root, disk)
    store.checkpoint(seal=True, carry_below=0)
    store.abandon()
    store = open_engine(disk.root, disk)
    assert fetch(store.get("q"), 100) == [0, 1, *range(4, 2 + later)]
    store.close()


@pytest.mark.parametrize("acked", [[2, 3], [4], [2, 5]], ids=["at the head", "behind others", "both"])
@pytest.mark.parametrize("later", [5, SIZE - 2, 70], ids=["part of a segment", "a full segment", "many segments"])
@pytest.mark.parametrize("synced", [True, False], ids=["synced at once", "synced later"])
def test_what_is_acked_while_a_checkpoint_meets_a_full_disk_stays_away(tmp_path, monkeypatch, acked, later, synced):
    disk = FaultyDisk(tmp_path)
    store, queue = begun(disk, later)
    fetch(queue, 6)

    def ack() -> None:
        queue.backing.ack(acked)
        if synced:
            store.sync()

    cut_off(store, monkeypatch, OSError(errno.ENOSPC, "no space left on device"), ack)
    store.committer.full = False
    store.checkpoint(seal=True, carry_below=0)
    assert store.journal.floor > store.journal.sealed, "no file has the ack any more"
    store.abandon()
    store = open_engine(disk.root, disk)
    assert fetch(store.get("q"), 100) == [seq for seq in range(2 + later) if seq not in acked]
    store.close()


def test_an_ack_while_a_checkpoint_finds_no_room_for_a_first_segment_is_kept(tmp_path, monkeypatch):
    """There is no segment to tell of it, and no slot that could come back."""
    disk = FaultyDisk(tmp_path)
    store = open_engine(disk.root, disk)
    queue = store.declare("q")
    publish(store, queue, 4)
    fetch(queue, 2)

    def cut(self: Checkpoint, *_: object) -> None:
        queue.backing.ack([0])
        store.sync()
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "_write_bodies", cut)
        with pytest.raises(DiskFullError):
            store.checkpoint(seal=True, carry_below=0)
    assert not queue.indexes[0].segments
    store.committer.full = False
    store.checkpoint(seal=True, carry_below=0)
    store.abandon()
    store = open_engine(disk.root, disk)
    assert fetch(store.get("q"), 100) == [1, 2, 3]
    store.close()


def test_what_a_checkpoint_has_moved_when_it_is_interrupted_stays_alive(tmp_path, monkeypatch):
    """The overlay has forgotten it by then, as it has what was acked."""
    disk = FaultyDisk(tmp_path)
    store = open_engine(disk.root, disk)
    for name in ("a", "b"):
        publish(store, store.declare(name), 4)
    take_over = QueueIndex.take_over
    taken: list[QueueIndex] = []

    def interrupted(self: QueueIndex, rows: bytes) -> None:
        if taken:
            raise Killed
        taken.append(self)
        take_over(self, rows)

    with monkeypatch.context() as patched:
        patched.setattr(QueueIndex, "take_over", interrupted)
        with pytest.raises(Killed):
            store.checkpoint(seal=True, carry_below=0)
    assert len(taken) == 1
    store.checkpoint(seal=True, carry_below=0)
    store.abandon()
    store = open_engine(disk.root, disk)
    assert [len(fetch(store.get(name), 100)) for name in ("a", "b")] == [4, 4]
    store.close()


def test_a_purge_after_a_cut_checkpoint_stays_a_purge(tmp_path, monkeypatch):
    disk = FaultyDisk(tmp_path)
    store, _ = begun(disk, 4)
    cut_off(store, monkeypatch, Killed())
    store.abandon()
    store = open_engine(disk.root, disk)
    store.get("q").backing.purge()
    publish(store, store.get("q"), 1)
    store.checkpoint(seal=True, carry_below=0)
    store.abandon()
    store = open_engine(disk.root, disk)
    assert len(fetch(store.get("q"), 100)) == 1
    store.close()
