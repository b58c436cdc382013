"""A small engine for tests: numbers so small that a handful of messages pages, rolls files and fills segments."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tests.faulty_disk import FaultyDisk
from warren.kernel.entry import PERSISTENT, Delivery, Entry, deliveries
from warren.storage.disk import Disk
from warren.storage.settings import EngineSettings
from warren.storage.vhost_store import StoredQueue, VhostStore

TINY = EngineSettings(
    segment_entries=8,
    journal_file_bytes=4096,
    embed_below=256,
    store_file_bytes=16384,
    carry_below=512,
    checkpoint_batch_rows=16,
    io_batch=1,
    load_entries=5,
    ram_target=6,
    ram_slack=0,
    reserve_ahead=16,
    reserve_bytes=0,
)

HEAD = b"head"


class StandIn:
    """An object with some methods replaced: those of compiled classes do not let themselves be patched."""

    def __init__(self, original: object, **methods: Any) -> None:
        self._original = original
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def shm() -> str | None:
    """Where real files cost least; None: wherever temporary files go."""
    return "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None


def temporary_root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="warren-", dir=shm(), ignore_cleanup_errors=True)


def open_engine(
    root: str, disk: Disk | None = None, *, durability: str = "fsync", settings: EngineSettings = TINY, **changes: Any
) -> VhostStore:
    """In `root`/data, without a thread, with invariants checked, and with a clock that stands still, so that no run
    depends on time."""
    return VhostStore(
        os.path.join(root, "data"),
        durability=durability,
        settings=replace(settings, **changes),
        disk=disk,
        background=False,
        debug=True,
        clock=lambda: 0.0,
    )


def make_entries(
    store: VhostStore, queue: StoredQueue, bodies: Iterable[bytes], persistent: bool, level: int = 0
) -> list[Entry]:
    """Entries with their seq_ids, ready for `publish`."""
    bodies = list(bodies)
    flags = PERSISTENT if persistent and queue.durable and store.durability != "memory" else 0
    store.reserve(queue, len(bodies))
    first = queue.seqs.take(len(bodies))
    entries = [Entry(first + n, HEAD, body, flags, 1) for n, body in enumerate(bodies)]
    for entry in entries:
        entry.level = level
    return entries


def publish(
    store: VhostStore,
    queue: StoredQueue,
    bodies: Iterable[bytes] | int,
    *,
    persistent: bool = True,
    confirm: bool = False,
) -> list[int]:
    """Publish bodies, or that many small ones that say their seq_id; the seq_ids."""
    if isinstance(bodies, int):
        bodies = [b"m%d" % (queue.seqs.next + n) for n in range(bodies)]
    entries = make_entries(store, queue, bodies, persistent)
    queue.backing.publish(entries, confirm)
    return [entry.seq for entry in entries]


def fetch(queue: StoredQueue, count: int = 1, ack_required: bool = True) -> list[int]:
    return [entry.seq for entry in queue.backing.fetch(count, ack_required)]


def deliver(queue: StoredQueue, count: int = 1) -> list[tuple[int, bool]]:
    """Fetch with the redelivered flags that a consumer is shown: (seq_id, redelivered)."""
    backing = queue.backing
    made = deliveries(
        Delivery, backing.fetch(count), queue, backing.redelivered_below, backing.returned, backing.counts
    )
    return [(delivery.entry.seq, delivery.redelivered) for delivery in made]


def crash_and_reopen(
    store: VhostStore, disk: FaultyDisk, mode: Any = "none", **changes: Any
) -> tuple[VhostStore, FaultyDisk]:
    """Lose power, or with mode "process" only the process, and start again on what is left."""
    store.abandon()
    after = disk.crash(mode=mode)
    return open_engine(disk.root, after, durability=store.durability, settings=store.settings, **changes), after
