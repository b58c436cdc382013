"""The journal of a vhost: one append and one sync for everything that arrived meanwhile, however many queues.

Theory of operation. Records are built straight into the buffer of the next block (`kernel.journal_codec`). The place of
a block is known before it is written, because blocks follow each other without gaps; so an overlay row can point into
the journal while the record is still in RAM. A commit has three steps:

    commit = journal.begin()     with the engine's lock: the buffer becomes a block, a new buffer takes its place
    commit.run()                 without the lock, in any thread: one write, one fdatasync
    commit.done()                with the lock: the LSN is synced, and what waited for it happens

Rules:

1. Commits never overlap. What arrives during one forms the next.
2. Nothing outside the journal happens for a record before its commit is `done`: that is what `after` is for.
3. A file is sealed once it is over its limit and its last block is done. Sealed files never change, and only sealed
   files are checkpointed. A new process never appends to an old file.
4. Files below the floor are dead, whatever they hold; they are unlinked only after the floor was made durable.
5. A commit that failed for want of disk, or whose thread was called away, may be run again: it writes the same bytes at
   the same place.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable

from warren.kernel.checksum import crc32c
from warren.kernel.gates import DiskThread, Gate
from warren.kernel.journal_codec import RecordBuffer
from warren.storage.disk import Disk, DiskFile
from warren.storage.layout import FLOOR_MAGIC, HEADER_BYTES, JOURNAL_MAGIC, journal_path, pack_header, unpack_header
from warren.storage.reading import open_to_read, read_around, read_whole

_FLOOR = struct.Struct("<4sIQI")


class JournalCommit:
    """One block on its way to the disk."""

    __slots__ = ("_after", "_journal", "block", "last_of_file", "lsn")

    def __init__(self, journal: Journal, block: RecordBuffer, lsn: int, after: list[Callable[[], None]], last: bool):
        self._journal = journal
        self._after = after
        self.block = block
        self.lsn = lsn
        self.last_of_file = last

    def run(self) -> None:
        """Write and sync. Without the engine's lock. May be called again (rule 5)."""
        self._journal._write(self.block)

    def give(self, thread: DiskThread, deputy: Gate) -> bool:
        """Have `thread` do what `run` does, where that is nothing but a write and a sync; whether it does. With the engine's
        lock. `run` may be called if it fails."""
        return self._journal._give(self.block, thread, deputy)

    def done(self) -> None:
        """With the engine's lock, after `run` returned."""
        self._journal._done(self)
        for action in self._after:
            action()


class Journal:
    """Requires: the engine's lock for everything except `JournalCommit.run`, `open_sealed`, `move_floor` and
    `unlink_below_floor`."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        sync: bool,
        file_limit: int,
        record_limit: int = 1 << 62,
        first_file: int,
        first_lsn: int,
        floor: int,
    ) -> None:
        self._disk = disk
        self.directory = self._directory = directory
        self._sync = sync
        self._file_limit = file_limit
        self._record_limit = record_limit
        self._file_records = 0
        self._file: DiskFile | None = None  # open for appending
        self._file_number = -1
        self._readers: dict[int, DiskFile] = {}
        self._spare = RecordBuffer()
        self._in_flight: RecordBuffer | None = None
        self._after: list[Callable[[], None]] = []
        self.buffer = RecordBuffer()
        self.buffer.reset(first_file, HEADER_BYTES)
        self.next_lsn = first_lsn
        self.synced_lsn = first_lsn - 1
        self.floor = floor
        self.sealed = first_file - 1  # files up to here never change
        self.bytes_written = 0

    # -- appending ---------------------------------------------------------------------------------------------------

    @property
    def appended_lsn(self) -> int:
        """The LSN whose sync makes everything appended so far safe."""
        return self.next_lsn - 1 if self.buffer.empty else self.next_lsn

    @property
    def dirty(self) -> bool:
        return not self.buffer.empty or self._in_flight is not None

    def after(self, action: Callable[[], None]) -> None:
        """Run `action` once what is in the buffer now is synced."""
        self._after.append(action)

    # -- committing --------------------------------------------------------------------------------------------------

    def begin(self) -> JournalCommit | None:
        """Requires: no commit is under way."""
        assert self._in_flight is None
        block = self.buffer
        if block.empty:
            return None
        lsn = self.next_lsn
        block.finish(lsn)
        end = block.base + len(block)
        self._file_records += block.count
        last = end >= self._file_limit or self._file_records >= self._record_limit
        self.next_lsn = lsn + 1
        self._in_flight = block
        self.buffer = self._spare
        if last:
            self._file_records = 0
            self.buffer.reset(block.file + 1, HEADER_BYTES)
        else:
            self.buffer.reset(block.file, end)
        after, self._after = self._after, []
        return JournalCommit(self, block, lsn, after, last)

    def roll(self) -> None:
        """Seal the current file now. Requires: nothing is buffered or under way."""
        assert not self.dirty
        if self.buffer.base > HEADER_BYTES:
            self.sealed = self.buffer.file
            self._file_records = 0
            self.buffer.reset(self.buffer.file + 1, HEADER_BYTES)

    def _write(self, block: RecordBuffer) -> None:
        fresh = self._file is None or block.file != self._file_number
        if fresh:
            self._open_next(block.file)
        file = self._file
        assert file is not None
        if not self._sync:
            file.pwrite(memoryview(block), block.base)
            return
        file.pwrite_and_sync(memoryview(block), block.base)
        if fresh or block.base == HEADER_BYTES:
            self._disk.sync_dir(self._directory)

    def _give(self, block: RecordBuffer, thread: DiskThread, deputy: Gate) -> bool:
        file = self._file
        if file is None or block.file != self._file_number or block.base == HEADER_BYTES or not self._sync:
            return False
        return file.give(thread, memoryview(block), block.base, deputy)

    def _open_next(self, number: int) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        path = journal_path(self._directory, number)
        with contextlib.suppress(
            FileNotFoundError
        ):  # left by a commit that ran out of disk before the header was whole
            self._disk.unlink(path)
        file = self._disk.create(path)
        try:
            file.append(pack_header(JOURNAL_MAGIC, number, self.floor))
        except OSError:
            file.close()
            raise
        self._file = file
        self._file_number = number

    def _done(self, commit: JournalCommit) -> None:
        block = commit.block
        self.synced_lsn = commit.lsn
        self.bytes_written += len(block)
        if commit.last_of_file:
            self.sealed = block.file
        self._in_flight = None
        self._spare = block

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, number: int, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, be they on disk, under way, or still in the buffer."""
        parts = []
        flying = self._in_flight
        for block in (self.buffer, flying):
            if block is not None and block.file == number and stop > block.base and stop > start:
                begin = max(start, block.base)
                parts.append(block.peek(begin, stop - begin))
                stop = begin
        if stop > start:
            parts.append(read_around(self._reader(number), stop - start, start))
        if len(parts) == 1:
            return parts[0]
        return b"".join(reversed(parts))

    def _reader(self, number: int) -> DiskFile:
        reader = self._readers.get(number)
        if reader is None:
            reader = self._readers[number] = open_to_read(self._disk, journal_path(self._directory, number))
        return reader

    def open_sealed(self, number: int) -> DiskFile:
        """A handle of the caller's own on a sealed file; needs no lock."""
        return open_to_read(self._disk, journal_path(self._directory, number))

    def files(self) -> list[str]:
        """Paths of the sealed files that are needed, oldest first."""
        paths = (journal_path(self._directory, number) for number in range(self.floor, self.sealed + 1))
        return [path for path in paths if self._disk.exists(path)]

    # -- the floor ---------------------------------------------------------------------------------------------------

    def move_floor(self, floor: int) -> None:
        """Make it durable that files below `floor` are not needed. By the checkpoint only."""
        write_floor(self._disk, self._directory, floor)
        self.floor = floor

    def close_below_floor(self) -> None:
        """Let go of files that are not needed any more."""
        for number in [number for number in self._readers if number < self.floor]:
            self._readers.pop(number).close()

    def unlink_below_floor(self) -> None:
        """By the checkpoint only. Best effort: a file that stays, or comes back, is below the floor and so is ignored."""
        for number in list_files(self._disk, self._directory):
            if number < self.floor:
                self._disk.unlink(journal_path(self._directory, number))

    def close(self) -> None:
        for file in (*self._readers.values(), self._file):
            if file is not None:
                file.close()
        self._readers.clear()
        self._file = None


def list_files(disk: Disk, directory: str) -> list[int]:
    """Numbers of the journal files in a directory, in order."""
    stems = (name.removesuffix(".wal") for name in disk.listdir(directory) if name.endswith(".wal"))
    return sorted(int(stem) for stem in stems if stem.isdigit())


def write_floor(disk: Disk, directory: str, floor: int) -> None:
    head = _FLOOR.pack(FLOOR_MAGIC, 1, floor, 0)[:-4]
    disk.replace(os.path.join(directory, "FLOOR"), head + struct.pack("<I", crc32c(head)))


def read_floor(disk: Disk, directory: str) -> tuple[int, str | None]:
    """The floor, and what was wrong with its file. A bad or missing FLOOR falls back to the newest header that repeats
    it: at worst an older floor, whose files are still replayed without harm."""
    path = os.path.join(directory, "FLOOR")
    why: str | None = None
    try:
        data = read_whole(disk, path)
        magic, version, floor, crc = _FLOOR.unpack(data)
        if magic == FLOOR_MAGIC and version == 1 and crc == crc32c(data[:-4]):
            return int(floor), None
        why = "FLOOR does not check out"
    except struct.error:
        why = "FLOOR has a wrong length"
    except FileNotFoundError:
        pass
    floor = 0
    for number in list_files(disk, directory):
        path = journal_path(directory, number)
        file = open_to_read(disk, path)
        try:
            header = unpack_header(JOURNAL_MAGIC, read_around(file, HEADER_BYTES, 0), path)
        finally:
            file.close()
        if header is not None:
            floor = max(floor, header[1])
    return floor, why
