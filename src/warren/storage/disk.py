"""All file access of the engine, behind one small interface.

Rules:

1. Nothing in `storage/` calls `os`, `open` or `shutil` on a data file; it calls a `Disk` or a `DiskFile`. So a test
   can put a double underneath that forgets what was not synced, tears the last write, or fails the n-th call.
2. A call that returns has been handed to the kernel. It is safe from power loss only after `sync` of the file, and,
   for a name (create, rename, link, unlink), after `sync_dir` of its directory.
3. No call overwrites bytes that were synced. `pwrite` fills holes and appends; there is no truncate.

Outside of this interface: SQLite and LMDB, which do their own file access and are trusted to be atomic; and the lock of a
directory (`lock.py`), which is the kernel's, holds against other processes, and of which nothing has to survive.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
from collections.abc import Iterator

from warren.kernel.gates import DiskThread, Gate, write_and_sync

_libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)


def trim_memory() -> None:
    """Give back to the system what was freed: a checkpoint handles large pieces, and glibc keeps them."""
    with contextlib.suppress(AttributeError):  # another libc
        _libc.malloc_trim(0)


class DiskFile:
    """One open file. `size` is where the next `append` goes."""

    __slots__ = ("_fd", "path", "size")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def append(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data` at the end and return the offset where it begins. On an error `size` is unchanged, so
        that a retry goes over the torn bytes, which nobody was promised."""
        offset = self.size
        self.pwrite(data, offset)
        self.size = offset + len(data)
        return offset

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`: into a hole, or at the end."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view = view[written:]
            offset += written
        if offset > self.size:
            self.size = offset

    def pwrite_and_sync(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """`pwrite` and `sync`, for who has many threads waiting."""
        write_and_sync(self._fd, data, offset)
        self.size = max(self.size, offset + len(data))

    def give(self, thread: DiskThread, data: memoryview, offset: int, deputy: Gate) -> bool:
        """Have `thread` do what `pwrite_and_sync` does; whether it does. The file must stay open until that is collected."""
        try:
            thread.submit(self._fd, data, offset, deputy)
        except OSError:  # no more threads
            return False
        self.size = max(self.size, offset + len(data))
        return True

    def pread(self, count: int, offset: int) -> bytes:
        """Up to `count` bytes at `offset`; fewer only at the end of the file."""
        data = os.pread(self._fd, count, offset)
        if len(data) == count or not data:
            return data
        parts = [data]
        got = len(data)
        while got < count:
            data = os.pread(self._fd, count - got, offset + got)
            if not data:
                break
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def sync(self) -> None:
        """`fdatasync`: contents and length are safe when this returns."""
        os.fdatasync(self._fd)

    def reserve(self, size: int) -> None:
        """Take `size` bytes of disk now, so that they cannot run out later."""
        os.posix_fallocate(self._fd, 0, size)
        self.size = max(self.size, size)

    def links(self) -> int:
        """How many names the file has; more than one means that a snapshot shares it."""
        return os.fstat(self._fd).st_nlink

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Disk:
    """The real disk. Paths are strings, absolute or relative to the working directory."""

    def create(self, path: str) -> DiskFile:
        """A new, empty file for reading and writing. Raises FileExistsError."""
        return DiskFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

    def open(self, path: str) -> DiskFile:
        """An existing file for reading and writing. Raises FileNotFoundError."""
        return DiskFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def open_read(self, path: str) -> DiskFile:
        """An existing file for reading only. Raises FileNotFoundError."""
        return DiskFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def read(self, path: str) -> bytes:
        """The whole of a file."""
        file = self.open_read(path)
        try:
            return file.pread(file.size, 0)
        finally:
            file.close()

    def replace(self, path: str, data: bytes) -> None:
        """Make `path` hold `data`, all or nothing, safe when this returns: temporary file, sync, rename, directory."""
        temporary = path + ".tmp"
        with contextlib.suppress(FileNotFoundError):
            self.unlink(temporary)
        file = self.create(temporary)
        try:
            file.append(data)
            file.sync()
        finally:
            file.close()
        self.rename(temporary, path)
        self.sync_dir(os.path.dirname(path))

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """A second name for the same bytes."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Create a directory; its parent must exist. Raises FileExistsError."""
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, sorted; an empty list where there is no such directory."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def changed_at(self, path: str) -> float:
        """When the file was last written to, as `time.time` says it."""
        return os.stat(path).st_mtime

    def sync_dir(self, path: str) -> None:
        """What was created, renamed or unlinked in `path` is safe when this returns."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_all(self, path: str) -> None:
        """Everything on the filesystem of `path` is safe when this returns: one call in place of thousands."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _libc.syncfs(fd) != 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error), path)
        finally:
            os.close(fd)

    def free_bytes(self, path: str) -> int:
        """Bytes that a program without special rights can still write on the filesystem of `path`."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    # The rest is composed of the calls above, so a double needs to know nothing of it.

    def make_dirs(self, path: str, *, sync: bool = True) -> list[str]:
        """`mkdir` with parents. The directories with new names in them, which are synced unless the caller does it."""
        if self.is_dir(path) or not path:
            return []
        parent = os.path.dirname(path)
        changed = self.make_dirs(parent, sync=sync)
        with contextlib.suppress(FileExistsError):
            self.mkdir(path)
            changed.append(parent or ".")
            if sync:
                self.sync_dir(parent or ".")
        return changed

    def walk(self, path: str) -> Iterator[str]:
        """Every file below `path`, in order of its name, depth first."""
        for name in self.listdir(path):
            child = os.path.join(path, name)
            if self.is_dir(child):
                yield from self.walk(child)
            else:
                yield child

    def remove_tree(self, path: str) -> None:
        """Unlink everything below `path` and `path` itself; nothing is synced."""
        for name in self.listdir(path):
            child = os.path.join(path, name)
            if self.is_dir(child):
                self.remove_tree(child)
            else:
                self.unlink(child)
        if self.is_dir(path):
            self.rmdir(path)
