"""The SQLite file of one queue, `queue.db`: a table of messages that does not trust its disk.

Theory of operation. All changes since the last `commit` are one open transaction of SQLite, which a crash undoes; the
vhost's journal has them. `commit` is the checkpoint of this file, so it follows the journal's rule:

1. `commit` only when every journal record that the file reflects is synced.

SQLite recognises damage only where it breaks a page. So every row has a checksum, over all that never changes:

2. A message whose row does not fit its checksum is never handed out. The index, which knows the order, is compared with
   the table after a dirty stop, and with its own digest of the stop after a clean one.
3. All damage is met in one way, at a start or later: what can be read is copied, row by row, to `salvage.db`, and what
   cannot is reported. That file is used from then on. With its first commit the damaged one goes to `quarantine/` as a
   whole, and `salvage.db` takes its name. A crash before that leaves the damaged file in its place, to begin anew.
   After a clean stop nobody looks at the free space of a page, so damage there may cost a row that is written to it.
4. An error that is no damage (a full disk, a failed write) leaves the transaction in doubt: everything is refused until
   the store is opened again, and the journal brings back what is missing.

The table can be read with the `sqlite3` command, also while the queue is in use.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from warren.errors import StoreClosedError, StoreFailedError, StoreFormatError, WarrenError
from warren.kernel.checksum import crc32c
from warren.kernel.entry import PERSISTENT, Entry
from warren.storage.disk import Disk
from warren.storage.segment import Report

READY, PENDING, LEASED = 0, 1, 2  # states of a message: in the queue, waiting for an ack, part of a checkout

FORMAT_VERSION = 1
_NAME = "queue.db"
_SALVAGE = "salvage.db"
_BESIDE = ("-wal", "-shm", "-journal")  # what SQLite puts next to a file
_HIGHEST_SEQ = (1 << 63) - 1

_SCHEMA = {
    "messages": """CREATE TABLE messages (
    seq INTEGER PRIMARY KEY,
    level INTEGER NOT NULL,
    state INTEGER NOT NULL,
    persistent INTEGER NOT NULL,
    published_at INTEGER NOT NULL,
    expiry INTEGER NOT NULL,
    delivery_count INTEGER NOT NULL,
    redelivered INTEGER NOT NULL,
    body_size INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    head BLOB NOT NULL,
    body BLOB NOT NULL
)""",
    # The order of the queue; with the rest a start can count everything without a look at the bodies.
    "messages_in_order": """CREATE INDEX messages_in_order
ON messages (state, level DESC, seq, body_size, persistent, redelivered, delivery_count)""",
    "state": "CREATE TABLE state (format INTEGER, applied_lsn INTEGER, next_seq INTEGER, crc INTEGER)",
}

_PLACE = "seq, level, persistent, published_at, expiry, body_size"
_MARKS = "state, delivery_count, redelivered"
WHOLE_ROW = f"{_PLACE}, crc, head, body"
_FIXED = struct.Struct("<QQQIIBB")  # seq, published_at, expiry, bytes of the body and of the head, level, persistent
_STATE = struct.Struct("<QQQ")  # format, applied_lsn, next_seq

_INSERT = f"INTO messages ({WHOLE_ROW}, {_MARKS}) VALUES ({', '.join('?' * 12)})"

_OURS = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # errors that say: the bytes are not what was written
_ENVIRONMENT = (  # errors that say nothing about the bytes
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
)

T = TypeVar("T")
_Row = tuple[Any, ...]


class _Damaged(Exception):
    """The bytes of the file are not what was written."""


class QueueDatabase:
    """Requires: the engine's lock. Without a directory the messages are in a file that goes with the process."""

    def __init__(
        self, disk: Disk, directory: str | None, quarantine: str, report: Report, *, digest: int | None = None
    ) -> None:
        """`digest`: what `digest()` was at a clean stop. Without it, or where it differs, everything is looked at."""
        self._disk = disk
        self._directory = directory
        self._quarantine = quarantine
        self._report = report
        self._broken: WarrenError | None = None
        self._salvaged = False  # the connection is to salvage.db, the damaged file still has its name
        self.salvages = 0  # how often rows may have gone without the owner's doing
        self.is_new = False  # there was no file
        self.path = "" if directory is None else os.path.join(directory, _NAME)  # "": SQLite's own temporary file
        if directory is not None:
            disk.make_dirs(directory)
            self._finish_replacing()
        try:
            self._db = self._connect(self.path)
        except sqlite3.Error as error:
            raise self._fail(error) from error
        try:
            self._open(digest)
        except BaseException:
            self.close()
            raise

    # -- opening and closing -----------------------------------------------------------------------------------------

    def _connect(self, path: str) -> sqlite3.Connection:
        # No isolation level: the module would open transactions by itself. Bytes for text: a damaged text is no error.
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.text_factory = bytes
        return db

    def _open(self, digest: int | None) -> None:
        try:
            self.is_new = not self._db.execute("PRAGMA page_count").fetchone()[0]
            if self.is_new:
                self._create(self._db)
            self._log_ahead()
            self._try_to_write()
            problem = self._problem(digest)
        except (sqlite3.Error, UnicodeError) as error:  # the latter: a message of SQLite quotes what is damaged
            if _kind(error) in _ENVIRONMENT or not self.path or not os.access(self.path, os.W_OK):
                raise self._fail(error) from error
            problem = str(error)
        if problem is not None:
            self._salvage(problem)
            self._commit_salvaged()

    def _create(self, db: sqlite3.Connection) -> None:
        """In one transaction, so that a file is empty or whole."""
        db.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.values():
            db.execute(statement)
        db.execute("INSERT INTO state VALUES (?, ?, ?, ?)", _state_row(0, 0))
        db.execute("COMMIT")
        if self._directory is not None:
            self._disk.sync_dir(self._directory)

    def _try_to_write(self) -> None:
        """A damaged header may say that the file is read-only, and nothing else tells."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.execute("UPDATE state SET format = format")
        finally:
            self._db.execute("ROLLBACK")

    def _log_ahead(self) -> None:
        self._db.execute("PRAGMA synchronous = FULL")
        if self.path:
            self._db.execute("PRAGMA journal_mode = WAL")

    def close(self) -> None:
        """What was not committed is undone."""
        self._db.close()
        if self._broken is None:
            self._broken = StoreClosedError(f"{self.path} was closed")

    def _fail(self, error: Exception) -> WarrenError:
        """From now on everything is refused: SQLite may have undone the transaction, but the journal has it."""
        if self._broken is None:
            self._broken = StoreFailedError(
                f"{self.path or 'a temporary file of SQLite'}: {error}. Close the store and open it again: "
                "the journal has everything that was confirmed"
            )
        return self._broken

    # -- reading and changing ----------------------------------------------------------------------------------------

    def messages(self, clause: str, *values: Any) -> list[Entry]:
        """Messages with their bodies; `clause` is what follows FROM messages. Each fits its checksum."""
        while True:
            rows = self.rows(f"SELECT {WHOLE_ROW} FROM messages {clause}", *values)
            if all(map(is_sound_row, rows)):
                return [_entry(row, row[7], row[8], len(row[7])) for row in rows]
            self._salvage("a row does not fit its checksum")

    def places(self, clause: str, *values: Any) -> list[Entry]:
        """Messages without head and body."""
        while True:
            rows = self.rows(f"SELECT {_PLACE}, length(head) FROM messages {clause}", *values)
            if all(type(value) is int for row in rows for value in row):
                return [_entry(row, None, None, row[6]) for row in rows]
            self._salvage("a row holds no numbers where numbers belong")

    def rows(self, sql: str, *values: Any) -> list[_Row]:
        return self._run(lambda db: db.execute(sql, values).fetchall())

    def change(self, sql: str, *values: Any) -> int:
        """One statement of the open transaction; how many rows it changed."""
        return self._run(lambda db: self._begun(db).execute(sql, values).rowcount)

    def change_each(self, entries: list[Entry], sql: str, *values: Any) -> None:
        """One statement that has to change just the rows of `entries`: its last value is their seq_ids, as JSON."""
        seqs = json.dumps([entry.seq for entry in entries])
        salvages = self.salvages
        if self.change(sql, *values, seqs) != len(entries) and salvages == self.salvages:
            self._salvage("a row that was read is not found again")
            self.change(sql, *values, seqs)

    def insert(self, entries: Iterable[Entry], state: int, *, replace: bool = True) -> None:
        """New messages. `replace=False`: one that is there already stays as it is."""
        rows = [(*_row(entry), state, 0, 0) for entry in entries]
        conflict = "REPLACE" if replace else "IGNORE"
        self._run(lambda db: self._begun(db).executemany(f"INSERT OR {conflict} {_INSERT}", rows))

    @staticmethod
    def _begun(db: sqlite3.Connection) -> sqlite3.Connection:
        if not db.in_transaction:
            db.execute("BEGIN IMMEDIATE")
        return db

    def _run(self, statement: Callable[[sqlite3.Connection], T]) -> T:
        """Run a statement; where it meets damage, once more on what could be saved."""
        if self._broken is not None:
            raise self._broken
        was_open = self._db.in_transaction
        try:
            return statement(self._db)
        except sqlite3.Error as error:
            undone = was_open and not self._db.in_transaction
            if _kind(error) not in _OURS or undone:
                raise self._fail(error) from error
            self._salvage(str(error))
        try:
            return statement(self._db)
        except sqlite3.Error as error:
            raise self._fail(error) from error

    # -- the file ----------------------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Is there anything to commit? A file that failed always has: the journal must keep what it lacks."""
        return bool(self.path) and (self._broken is not None or self._db.in_transaction)

    def commit(self, applied_lsn: int, next_seq: int) -> None:
        """Make everything up to the journal's `applied_lsn` safe in the file. Requires: that LSN is synced.

        An OSError leaves everything as it was: the disk is full."""
        if not self.changed:
            return
        if self._broken is not None:
            raise self._broken
        row = _state_row(applied_lsn, next_seq)
        self.change("UPDATE state SET format = ?, applied_lsn = ?, next_seq = ?, crc = ?", *row)
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if _kind(error) == sqlite3.SQLITE_FULL and self._db.in_transaction:  # nothing happened; another time
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path) from error
            raise self._fail(error) from error
        if self._salvaged:
            self._replace()

    def stop(self) -> int:
        """Above every seq_id that the file knows."""
        highest = self.rows("SELECT max(seq) FROM messages")[0][0]
        return max(-1 if highest is None else int(highest), int(self.rows("SELECT next_seq FROM state")[0][0]) - 1) + 1

    def backup(self, path: str) -> None:
        """Copy what was committed last to a new file, synced. Requires: not `changed`. An OSError says that there is no
        room for the copy; this file is as it was."""
        assert not self._db.in_transaction

        def copy(db: sqlite3.Connection) -> None:
            try:
                db.backup(target)
            except sqlite3.Error as error:
                if _kind(error) == sqlite3.SQLITE_FULL:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path) from error
                raise

        self._disk.make_dirs(os.path.dirname(path))
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as target:
            target.execute("PRAGMA synchronous = FULL")
            self._run(copy)
        self._disk.sync_dir(os.path.dirname(path))

    # -- damage ------------------------------------------------------------------------------------------------------

    def _problem(self, digest: int | None) -> str | None:
        """What is wrong with the file. Raises StoreFormatError when a newer Warren wrote it."""
        db = self._db
        found = dict(db.execute("SELECT name, sql FROM sqlite_schema").fetchall())
        states = []
        if b"state" in found:
            with contextlib.suppress(sqlite3.OperationalError):  # other columns, of damage
                states = db.execute("SELECT format, applied_lsn, next_seq, crc FROM state").fetchall()
        whole = len(states) == 1 and _is_sound_state(states[0])
        if whole and states[0][0] != FORMAT_VERSION:  # before the schema, which is another one then
            raise StoreFormatError(
                f"{self.path} has format version {states[0][0]}; this Warren reads version {FORMAT_VERSION}. "
                "Open it with the Warren that wrote it, or a newer one"
            )
        if found != {name.encode(): sql.encode() for name, sql in _SCHEMA.items()}:
            return "its schema is not the one that was written"
        if not whole:
            return "its state does not fit its checksum"
        if digest is not None and digest == self.digest():
            return None
        # Not quick_check, which does not compare the index with the table.
        complaint = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if complaint != b"ok":
            return str(complaint.decode(errors="replace"))
        for row in db.execute(f"SELECT {WHOLE_ROW}, {_MARKS} FROM messages NOT INDEXED"):
            if not is_sound_row(row) or marks_of(row) != row[-3:]:
                return f"the row of seq_id {row[0]} does not fit its checksum"
        return None

    def digest(self) -> int:
        """A checksum over the index: which messages there are, in which order and state."""
        crc = 0
        rows = self._db.execute(
            "SELECT state, level, seq, body_size, persistent, redelivered, delivery_count FROM messages "
            "INDEXED BY messages_in_order ORDER BY state, level DESC, seq"
        )
        while some := rows.fetchmany(1024):
            crc = crc32c(repr(some).encode(), crc)
        return crc

    def _salvage(self, why: str) -> None:
        """Copy what can be read, uncommitted changes too, to a new file, in a transaction that is left open."""
        if not self.path:
            raise self._fail(sqlite3.DatabaseError(why))
        assert self._directory is not None
        self._report(self.path, 0, self._disk.size(self.path), -1, why)
        damaged = self._db
        target = os.path.join(self._directory, _SALVAGE)
        if self._salvaged:  # damage in the copy before its first commit: begin with the original again
            raise self._fail(sqlite3.DatabaseError(why))
        self._remove(target)
        try:
            copy = self._connect(target)
            try:
                copy.execute("PRAGMA synchronous = FULL")
                self._create(copy)
                copy.execute("BEGIN IMMEDIATE")
                for row in self._readable(damaged):
                    copy.execute(f"INSERT OR REPLACE {_INSERT}", (*row[:-3], *marks_of(row)))
                copy.execute("UPDATE state SET format = ?, applied_lsn = ?, next_seq = ?, crc = ?", _old_state(damaged))
            except BaseException:
                copy.close()
                raise
        except sqlite3.Error as error:
            raise self._fail(error) from error
        damaged.close()
        self._db = copy
        self._salvaged = True
        self.salvages += 1

    def _readable(self, db: sqlite3.Connection) -> Iterator[_Row]:
        """Rows in order of seq_id. What cannot be read, or does not fit its checksum, is reported and left out."""
        seq = -1
        while seq < _HIGHEST_SEQ:
            try:
                row = _next_row(db, seq)
            except _Damaged as damage:
                first, seq = seq + 1, _end_of_damage(db, seq)
                self._report(self.path, 0, 0, first, f"rows of seq_id {first} to {seq} cannot be read: {damage}")
                continue
            if row is None:
                return
            seq = row[0]
            if is_sound_row(row):
                yield row
            else:
                self._report(self.path, 0, 0, seq, "row does not fit its checksum")

    def _commit_salvaged(self) -> None:
        """At a start: the file has only what was committed before."""
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._fail(error) from error
        self._replace()

    def _replace(self) -> None:
        """salvage.db is whole and safe: the damaged file makes room for it."""
        assert self._directory is not None
        self._db.close()
        self._disk.make_dirs(self._quarantine)
        number = len(self._disk.listdir(self._quarantine))
        name = f"{number}-{os.path.basename(self._directory)}.db"
        self._disk.rename(self.path, os.path.join(self._quarantine, name))
        for suffix in _BESIDE:
            if self._disk.exists(self.path + suffix):
                self._disk.rename(self.path + suffix, os.path.join(self._quarantine, name + suffix))
        self._disk.sync_dir(self._quarantine)
        self._finish_replacing()
        self._salvaged = False
        self._db = self._connect(self.path)
        self._log_ahead()

    def _finish_replacing(self) -> None:
        """salvage.db is whole if the damaged file has made room for it, and else an attempt that a crash ended."""
        assert self._directory is not None
        salvage = os.path.join(self._directory, _SALVAGE)
        if self._disk.exists(self.path):
            self._remove(salvage)
        elif self._disk.exists(salvage):
            for suffix in _BESIDE:  # a log of the damaged file must not be applied to the new one
                self._remove(self.path + suffix)
            self._disk.rename(salvage, self.path)
            self._disk.sync_dir(self._directory)

    def _remove(self, path: str) -> None:
        for suffix in ("", *_BESIDE):
            if self._disk.exists(path + suffix):
                self._disk.unlink(path + suffix)


# -- rows --------------------------------------------------------------------------------------------------------------


def _row(entry: Entry) -> _Row:
    place = (entry.seq, entry.level, entry.flags & PERSISTENT, entry.published_at, entry.expiry, entry.body_size)
    return (*place, _checksum(place, entry.head, entry.body), entry.head, entry.body)


def _entry(row: _Row, head: bytes | None, body: bytes | None, head_size: int) -> Entry:
    seq, level, persistent, published_at, expiry, body_size = row[:6]
    flags, size = PERSISTENT if persistent else 0, 4 + head_size + body_size
    entry = Entry(seq, head, body, flags, published_at, expiry, None, size, body_size=body_size)
    entry.level = level
    return entry


def _checksum(place: _Row, head: bytes, body: bytes) -> int:
    seq, level, persistent, published_at, expiry, body_size = place
    fixed = _FIXED.pack(seq, published_at, expiry, body_size, len(head), level, persistent)
    return crc32c(body, crc32c(head, crc32c(fixed)))


def is_sound_row(row: _Row) -> bool:
    """Is a row of WHOLE_ROW what was written?"""
    crc, head, body = row[6:9]
    try:
        return bool(_checksum(row[:6], head, body) == crc)
    except (struct.error, TypeError):  # a number out of range, or another type
        return False


def marks_of(row: _Row) -> _Row:
    """What changes in the life of a message, with sense where there is none: (state, delivery_count, redelivered)."""
    state, delivery_count, redelivered = row[-3:]
    return (
        state if state in (READY, PENDING, LEASED) else READY,
        delivery_count if type(delivery_count) is int and 0 <= delivery_count < 1 << 32 else 0,
        redelivered if redelivered in (0, 1) else 1,
    )


def _state_row(applied_lsn: int, next_seq: int) -> _Row:
    values = (FORMAT_VERSION, applied_lsn, next_seq)
    return (*values, crc32c(_STATE.pack(*values)))


def _is_sound_state(row: _Row) -> bool:
    try:
        return bool(crc32c(_STATE.pack(*row[:3])) == row[3])
    except struct.error:
        return False


def _old_state(db: sqlite3.Connection) -> _Row:
    """The state of a damaged file, or that of a new one."""
    with contextlib.suppress(sqlite3.Error, UnicodeError):
        for row in db.execute("SELECT format, applied_lsn, next_seq, crc FROM state LIMIT 1"):
            if _is_sound_state(row):
                return tuple(row)
    return _state_row(0, 0)


# -- reading a damaged file --------------------------------------------------------------------------------------------


def _kind(error: Exception) -> int:
    """The low byte is the kind; the others say more of where it happened."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def _next_row(db: sqlite3.Connection, seq: int) -> _Row | None:
    """The first row above `seq`, by the table alone."""
    try:
        row: _Row | None = db.execute(
            f"SELECT {WHOLE_ROW}, {_MARKS} FROM messages NOT INDEXED WHERE seq > ? ORDER BY seq LIMIT 1", (seq,)
        ).fetchone()
    except (sqlite3.Error, UnicodeError) as error:
        raise _Damaged(str(error)) from error
    if row is not None and row[0] <= seq:
        raise _Damaged("the rows are out of order")
    return row


def _end_of_damage(db: sqlite3.Connection, seq: int) -> int:
    """The lowest number from which on rows can be read, where they cannot from `seq` on."""
    bad, step = seq, 1
    while bad + step < _HIGHEST_SEQ and not _can_read(db, bad + step):
        bad, step = bad + step, step * 2
    good = min(bad + step, _HIGHEST_SEQ)
    while good - bad > 1:
        middle = (bad + good) // 2
        if _can_read(db, middle):
            good = middle
        else:
            bad = middle
    return good


def _can_read(db: sqlite3.Connection, seq: int) -> bool:
    try:
        _next_row(db, seq)
    except _Damaged:
        return False
    return True
