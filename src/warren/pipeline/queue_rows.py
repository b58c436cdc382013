"""Messages of a queue in SQLite, read from its file without a change to it.

SQLite writes beside the files that it reads: a `-wal` file needs a `-shm` file. So a database that a crash left with a `-wal`
is copied to a temporary directory with it; any other is opened as immutable.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote

from warren.errors import StoreFailedError, StoreFormatError
from warren.kernel.ranges import RangeSet
from warren.storage.queue_database import FORMAT_VERSION, PENDING, WHOLE_ROW, is_sound_row, marks_of

_SELECT = f"SELECT {WHOLE_ROW}, state, delivery_count, redelivered FROM messages NOT INDEXED"


class QueueRow(NamedTuple):
    """A message; without a body where the row does not fit its checksum."""

    seq: int
    published_at: int
    expiry: int
    head: bytes
    body: bytes | None
    delivery_count: int
    redelivered: bool


class QueueRows:
    """The messages of a `queue.db` whose seq_id is in `wanted`."""

    def __init__(self, path: str, wanted: RangeSet) -> None:
        """Raises FileNotFoundError where there is no such file, StoreFormatError for one of a newer Warren."""
        self._path = path
        self._wanted = wanted
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._db, self._directory = connect_unchanged(path)
        self._db.text_factory = bytes
        try:
            self._check_format()
        except BaseException:
            self.close()
            raise

    def _check_format(self) -> None:
        try:
            row = self._db.execute("SELECT format FROM state").fetchone()
        except sqlite3.DatabaseError:
            return  # a damaged file: reading it says so
        if row is not None and isinstance(row[0], int) and row[0] > FORMAT_VERSION:
            raise StoreFormatError(
                f"{self._path} has format version {row[0]}; this Warren reads version {FORMAT_VERSION}. "
                "Read it with the Warren that wrote it, or a newer one"
            )

    def rows(self, *, transient: bool) -> Iterator[QueueRow]:
        """In the order of seq_ids; transient messages only where they are alive."""
        if not self._wanted:
            return
        first, stop = self._wanted.first(), self._wanted.stop()
        try:
            cursor = self._db.execute(f"{_SELECT} WHERE seq >= ? AND seq <= ? ORDER BY seq", (first, stop - 1))
            for row in cursor:
                seq, _, persistent, published_at, expiry, _, _, head, body = row[:9]
                if not isinstance(seq, int) or seq not in self._wanted or not (persistent or transient):
                    continue
                if not is_sound_row(row):
                    yield QueueRow(seq, 0, 0, b"", None, 0, False)
                    continue
                state, count, redelivered = marks_of(row)
                yield QueueRow(seq, published_at, expiry, head, body, count, bool(redelivered) or state == PENDING)
        except sqlite3.DatabaseError as error:
            raise StoreFailedError(
                f"{self._path} cannot be read: {error}. Opening the store, `warren store recover`, saves what can be read"
            ) from error

    def close(self) -> None:
        self._db.close()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def connect_unchanged(path: str) -> tuple[sqlite3.Connection, tempfile.TemporaryDirectory[str] | None]:
    """A connection for reading that leaves nothing beside the file, and the directory of the copy, if it took one."""
    if not os.path.exists(path):
        raise FileNotFoundError(2, os.strerror(2), path)
    if not _has_log(path):
        uri = f"file:{quote(os.path.abspath(path))}?mode=ro&immutable=1"
        return sqlite3.connect(uri, uri=True, check_same_thread=False), None
    directory = tempfile.TemporaryDirectory(prefix="warren-")
    try:
        copy = os.path.join(directory.name, os.path.basename(path))
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path + suffix, copy + suffix)
        return sqlite3.connect(copy, isolation_level=None, check_same_thread=False), directory
    except BaseException:
        directory.cleanup()
        raise


def _has_log(path: str) -> bool:
    try:
        return os.path.getsize(path + "-wal") > 0
    except FileNotFoundError:
        return False
