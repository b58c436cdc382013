"""A checkpoint that was cut off leaves slots of messages that the journal still has. Acked, they must not come back."""

from __future__ import annotations

import errno

import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import TINY, fetch, open_engine, publish
from warren.errors import DiskFullError
from warren.storage.checkpoint import Checkpoint
from warren.storage.vhost_store import StoredQueue, VhostStore

SIZE = TINY.segment_entries


class Killed(BaseException):
    pass


def cut_off(store: VhostStore, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Run a checkpoint that ends after its slots were written and synced, before the floor moves."""
    write = Checkpoint._write_acks_and_unlink

    def cut(self: Checkpoint) -> None:
        write(self)
        self._slots.sync()
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
