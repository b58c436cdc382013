"""Snapshots: a consistent copy of a vhost by hard links, which opens as a store.

Taken between two commits, after the journal was rolled and the message stores sealed, so every linked file is one that
never changes again, or one whose owner copies it before it appends (`segment.py`). The manifest adds what no file has:
pending acks, and what is in the journal's place in time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from warren.errors import StorePathError
from warren.kernel.entry import Entry
from warren.kernel.journal_codec import RecordBuffer
from warren.kernel.overlay import LIVE, Overlay
from warren.storage.disk import Disk
from warren.storage.layout import HEADER_BYTES, JOURNAL_MAGIC, pack_header, stream_id
from warren.storage.stored_queue import StoredQueue

MANIFEST = "manifest.json"
TRANSIENTS = "transients.wal"  # messages that are in no other file, as journal records
_LINKED = ("journal", "msg_store_persistent", "queues", "stages")
_TRANSIENT = ("msg_store_transient",)
# Here a file that nothing refers to any more is unlinked without the lock: bodies that are garbage, stages that are done.
_FLEETING = ("msg_store_persistent", "msg_store_transient", "stages")
_COPIED = (".vhost",)
_SKIPPED = ("RESERVE",)
_SLICE_BYTES = 1024 * 1024  # copied at once
# Errors that say something about the place of a snapshot, and nothing about the disk.
_PLACE = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.EMLINK,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
    errno.EXDEV,
)
_PASSING = (".tmp", ".damaged", ".part", ".db", ".db-wal", ".db-shm")


@contextlib.contextmanager
def new_snapshot(disk: Disk, target: str) -> Iterator[None]:
    """Make the directory `target` for a snapshot; if that does not succeed, nothing of it stays. A place that cannot have
    one is the caller's mistake, and no fault of the store: StorePathError."""
    with _place_errors(target):
        if disk.exists(target):
            raise StorePathError(
                f"{target} is there already; a snapshot needs a directory that has none of this vhost. Choose another "
                "one, or remove it"
            )
        disk.make_dirs(target)
    try:
        with _place_errors(target):
            yield
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove_tree(target)
        raise


@contextlib.contextmanager
def _place_errors(target: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _PLACE:
            raise
        hint = "; hard links do not go from one filesystem to another" if error.errno == errno.EXDEV else ""
        raise StorePathError(
            f"no snapshot can be made in {target}: {error}{hint}. Choose a directory on the disk of the store that this "
            "process may write to"
        ) from error


def link_store(disk: Disk, root: str, target: str, *, left_out: Container[str] = (), transients: bool = False) -> int:
    """Link every durable file below `root` into `target`; how many. Directories of queues in `left_out` are not; with
    `transients`, bodies that need not survive are, too. Requires: the engine's lock, everything sealed."""
    count = 0
    for part in _LINKED + _TRANSIENT if transients else _LINKED:
        source = os.path.join(root, part)
        for path in disk.walk(source):
            name = os.path.basename(path)
            relative = os.path.relpath(path, root)
            if part == "queues" and relative.split(os.sep)[1] in left_out:
                continue
            if name in _SKIPPED or name.endswith(_PASSING) or ".lmdb" in relative:
                continue
            copy = os.path.join(target, relative)
            disk.make_dirs(os.path.dirname(copy))
            try:
                disk.link(path, copy)
            except FileNotFoundError:
                if part not in _FLEETING:
                    raise
                continue
            count += 1
    for name in _COPIED:
        path = os.path.join(root, name)
        if disk.exists(path):
            disk.replace(os.path.join(target, name), disk.read(path))
    return count


def dump_transients(disk: Disk, target: str, queues: Iterable[StoredQueue]) -> None:
    """What is only in RAM goes to files. What has none (volatile queues) goes to one of its own, in the journal's format.
    Requires: the engine's lock."""
    buffer = RecordBuffer()
    buffer.reset(0, HEADER_BYTES)
    for queue in queues:
        levels: dict[int, list[Entry]] = {}
        for entry in queue.backing.spill():
            levels.setdefault(entry.level, []).append(entry)
        for level, entries in levels.items():
            buffer.append_publishes(stream_id(queue.uid, level), entries, Overlay(), LIVE)
    if not buffer.empty:
        buffer.finish(1)
        disk.replace(os.path.join(target, TRANSIENTS), pack_header(JOURNAL_MAGIC, 0, 0, 0) + bytes(buffer))


def write_manifest(disk: Disk, target: str, manifest: dict[str, Any]) -> None:
    data = json.dumps({**manifest, "taken_at": time.time()}, indent=1).encode()
    disk.replace(os.path.join(target, MANIFEST), data)


def copy_files(
    disk: Disk, source: str, target: str, files: Iterable[str], progress: Callable[[int], None] = lambda done: None
) -> None:
    """Copy `files`, which lie below `source`, to the same places below `target`, bytes and all: safe when this returns.
    `progress` gets the bytes done. For backups."""
    done = 0
    changed = set(disk.make_dirs(target, sync=False))  # directories that have new names
    for path in files:
        copy = os.path.join(target, os.path.relpath(path, source))
        changed.update(disk.make_dirs(os.path.dirname(copy), sync=False))
        changed.add(os.path.dirname(copy))
        done += _copy(disk, path, copy)
        progress(done)
    for directory in sorted(changed):
        disk.sync_dir(directory)


def _copy(disk: Disk, path: str, copy: str) -> int:
    """How many bytes."""
    source = disk.open_read(path)
    try:
        target = disk.create(copy)
        try:
            while data := source.pread(_SLICE_BYTES, target.size):
                target.append(data)
            target.sync()
            return target.size
        finally:
            target.close()
    finally:
        source.close()
