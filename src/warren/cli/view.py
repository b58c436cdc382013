"""A data directory as it is: opened without a change to it, and copied without a process that writes to it.

A store that opens recovers, and recovery changes files. So a view is opened on hard links to the files of a vhost, in
`snapshots/`: whatever opening them does happens beside the originals, as with a snapshot. Files that SQLite changes in
place are copied. The links go when the view is closed; those of a process that was killed go with the next view.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator

import warren
from warren.errors import StoreLockedError, StorePathError
from warren.storage.disk import Disk
from warren.storage.layout import HEADER_BYTES, INDEX_MAGIC, hashed, unpack_header
from warren.storage.lock import DirectoryLock, in_use
from warren.storage.recovery_terms import TERMS_NAME
from warren.storage.running_node import node_of_vhost
from warren.storage.settings import EngineSettings
from warren.storage.snapshot import copy_files
from warren.storage.store_format import TermsError
from warren.storage.verify import vhost_roots

_DURABLE_PARTS = ("journal", "msg_store_persistent", "queues", "stages")
_DURABLE_FILES = (".vhost", "meta.db", "meta.db-wal")
_VIEW = "view-"

Opening = Callable[[str, int, int], None]  # what, done, total
Copying = Callable[[int, int], None]  # bytes done, bytes in all


def find_root(directory: str, vhost: str) -> str:
    """The directory of one vhost. Raises StorePathError with those there are."""
    root = os.path.join(directory, "vhosts", hashed(vhost))
    if not os.path.isdir(root):
        there = ", ".join(repr(vhost_name(other)) for other in vhost_roots(directory))
        raise StorePathError(f"{directory} has no vhost {vhost!r}; there is {there}")
    return root


def find_roots(directory: str, vhost: str | None) -> list[str]:
    return vhost_roots(directory) if vhost is None else [find_root(directory, vhost)]


def vhost_name(root: str) -> str:
    try:
        with open(os.path.join(root, ".vhost"), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return os.path.basename(root)


@contextlib.contextmanager
def undisturbed(root: str) -> Iterator[None]:
    """Keep other processes out of a vhost's directory meanwhile. Raises StoreLockedError with the owner's pid."""
    path = os.path.join(root, ".lock")
    if not os.path.exists(path):  # a snapshot, or a copy: nobody ever opened it
        yield
        return
    try:
        if os.access(path, os.W_OK):
            lock = DirectoryLock(path)
            try:
                yield
            finally:
                lock.release()
        else:
            with open(path, "rb") as file:
                _lock_shared(file.fileno(), root)
                yield
    except StoreLockedError as error:
        if node_of_vhost(root) is not None:
            raise
        raise StoreLockedError(
            f"{error}. Or look at it from within: Store.info(), Queue.browse(), or the path of a Store.snapshot()"
        ) from None


def _lock_shared(fd: int, root: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        raise StoreLockedError(in_use(root, owner)) from None


@contextlib.contextmanager
def view(directory: str, vhost: str, progress: Opening | None = None) -> Iterator[warren.Store]:
    """The store of one vhost, to be looked at. What is done to it leaves no trace."""
    root = find_root(directory, vhost)
    with undisturbed(root):
        parent = os.path.join(root, "snapshots")
        for name in os.listdir(parent) if os.path.isdir(parent) else ():
            if name.startswith(_VIEW):  # we hold the lock, so nobody looks through it
                shutil.rmtree(os.path.join(parent, name))
        place = os.path.join(parent, f"{_VIEW}{os.getpid()}")
        try:
            store = _open_view(root, place, vhost, progress)
            try:
                yield store
            finally:
                store.engine.abandon()
        finally:
            shutil.rmtree(place, ignore_errors=True)
            with contextlib.suppress(OSError):  # there are snapshots
                os.rmdir(parent)


def _open_view(root: str, place: str, vhost: str, progress: Opening | None) -> warren.Store:
    settings = EngineSettings(segment_entries=_segment_entries(root), reserve_bytes=0)
    target = os.path.join(place, "vhosts", os.path.basename(root))
    _link(root, target, with_terms=True)
    try:
        return warren.open(place, vhost, "os", settings=settings, progress=progress)
    except TermsError:  # its message store has another kind of index: everything is read instead
        shutil.rmtree(place)
        _link(root, target, with_terms=False)
        return warren.open(place, vhost, "os", settings=settings, progress=progress)


def _segment_entries(root: str) -> int:
    """What the segments of this vhost were written with."""
    for path in _files(os.path.join(root, "queues")):
        if path.endswith(".qi"):
            with open(path, "rb") as file:
                header = unpack_header(INDEX_MAGIC, file.read(HEADER_BYTES), path)
            if header is not None:
                return header[2]
    return EngineSettings().segment_entries


def _link(root: str, target: str, *, with_terms: bool) -> None:
    os.makedirs(target)
    for path in durable_files(root, with_terms=with_terms):
        copy = os.path.join(target, os.path.relpath(path, root))
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        if path.endswith((".db", ".db-wal")):
            shutil.copyfile(path, copy)
        else:
            os.link(path, copy)


def durable_files(root: str, *, with_terms: bool = False) -> list[str]:
    """What a vhost is made of; a copy of these files opens as a store."""
    names = (*_DURABLE_FILES, TERMS_NAME) if with_terms else _DURABLE_FILES
    files = [path for name in names if os.path.exists(path := os.path.join(root, name))]
    for part in _DURABLE_PARTS:
        files += [path for path in _files(os.path.join(root, part)) if _is_durable(path)]
    return files


def _is_durable(path: str) -> bool:
    name = os.path.basename(path)
    return name != "RESERVE" and not name.endswith((".tmp", ".part", ".db-shm")) and ".lmdb" not in path


def _files(directory: str) -> list[str]:
    return sorted(os.path.join(place, name) for place, _, names in os.walk(directory) for name in names)


def copy_durable(source: str, target: str, vhost: str | None, progress: Copying, check: Callable[[str], None]) -> int:
    """Copy the durable files of a data directory to a new one, synced; how many. Nothing is at `target` unless `check`
    (which gets the path of the copy) returned."""
    if os.path.exists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise StorePathError(f"{target} exists and is not an empty directory; give one that is new or empty")
    disk = Disk()
    part = os.path.abspath(target) + ".part"
    if os.path.exists(part):
        raise StorePathError(f"{part} is there, from a copy that was cut off; remove it first")
    try:
        with contextlib.ExitStack() as stack:
            roots = find_roots(source, vhost)
            for root in roots:
                stack.enter_context(undisturbed(root))
            files = [path for root in roots for path in durable_files(root)]
            total = sum(os.path.getsize(path) for path in files)
            progress(0, total)
            copy_files(disk, source, part, files, lambda done: progress(done, total))
        check(part)
        if os.path.isdir(target):
            disk.rmdir(target)
        disk.rename(part, target)
        disk.sync_dir(os.path.dirname(part))
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove_tree(part)
        raise
    return len(files)
