"""Messages that wait for their time before they are routed: the hidden queue of an `x-delayed-message` exchange.

A waiting message is a pending message of the hidden queue: only its seq_id is in RAM, as part of a range. Its due time is
the `expiry` of its slot. The order by due time is an LMDB table of (due, seq_id), which is rebuilt from the queue at every
start; so ten million waiting messages cost no memory, and a crash between the queue and the table costs nothing.

When its time has come a message is published to its targets and acked here in one transaction.

The table needs room on the disk, to take rows out as well. While it has none, nothing is changed: new rows wait in RAM, what
is due waits, and a timer tries again. A table or queue that failed in another way is made anew, by that timer, too, until it
works; so long the exchange refuses messages.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import time
from collections.abc import Callable
from typing import Any, Protocol

import lmdb

from warren.errors import DiskFullError, WarrenError
from warren.kernel.entry import PERSISTENT, Entry
from warren.queueing.guard import QueueCrashed
from warren.storage.vhost_store import StoredQueue, VhostStore

log = logging.getLogger("warren.queueing")

PREFIX = "amq.delayed/"  # of the hidden queues' names
_KEY = struct.Struct(">QQ")
_MAP_BYTES = 1 << 36  # of address space, not of disk
_MOST_AT_ONCE = 256
_RETRY_SECONDS = 1.0
_BROKEN = (
    lmdb.PanicError,
    lmdb.CorruptedError,
)  # of a table: only a new one helps; other errors pass, such as a full disk


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class TimeTable:
    """(due, seq_id) on disk, in order of time."""

    def __init__(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=True)
        self._environment = lmdb.open(path, map_size=_MAP_BYTES, sync=False, metasync=False, lock=False)

    def put_many(self, rows: list[tuple[int, int]]) -> None:
        with self._environment.begin(write=True) as transaction:
            for due, seq in rows:
                transaction.put(_KEY.pack(due, seq), b"")

    def remove_many(self, rows: list[tuple[int, int]]) -> None:
        with self._environment.begin(write=True) as transaction:
            for due, seq in rows:
                transaction.delete(_KEY.pack(due, seq))

    def first(self, count: int, upto: int) -> list[tuple[int, int]]:
        """The first of those that are due at `upto`."""
        rows: list[tuple[int, int]] = []
        with self._environment.begin() as transaction:
            for key in transaction.cursor().iternext(values=False):
                due, seq = _KEY.unpack(key)
                if due > upto or len(rows) >= count:
                    break
                rows.append((due, seq))
        return rows

    def next_due(self) -> int | None:
        with self._environment.begin() as transaction:
            cursor = transaction.cursor()
            return int(_KEY.unpack(cursor.key())[0]) if cursor.first() else None

    def __len__(self) -> int:
        return int(self._environment.stat()["entries"])

    def close(self) -> None:
        self._environment.close()


class DelayedQueue:
    """What waits for one exchange."""

    def __init__(
        self,
        store: VhostStore,
        exchange: str,
        durable: bool,
        *,
        fire: Callable[[str, StoredQueue, list[Entry]], None],
        later: Callable[[float, Callable[[], None]], Cancellable],
    ) -> None:
        self.exchange = exchange
        self._store = store
        self._fire = fire
        self._later = later
        self._timer: Cancellable | None = None
        self._timer_due = 0  # 0: it tries again what failed, and nothing is done before
        self._closed = False
        self.stored = store.declare(PREFIX + exchange, durable=durable)
        self._durable = durable and store.durability != "memory"
        self._failed = False  # the queue has to begin anew
        self._table: TimeTable | None = None  # None: not before it can be made
        self._late: list[tuple[int, int]] = []  # rows that the table had no room for
        self._recover()

    def _recover(self) -> None:
        """Everything waits again, in the order of its time; later, if it cannot be done now."""
        self._timer = None
        if self._closed:
            return
        try:
            if self._failed:
                self.stored = self._store.restart_queue(self.stored.name)
                self._failed = False
            self._fill(self._new_table())
        except Exception as error:
            if isinstance(error, WarrenError) and not isinstance(error, DiskFullError):
                raise  # of a store that failed: the vhost begins anew
            self._drop_table()
            self._try_later(self._recover, error)
            return
        self._set_timer()

    def _new_table(self) -> TimeTable:
        self._table = TimeTable(os.path.join(self._store.root, f"delayed-{self.stored.uid}.lmdb"))
        return self._table

    def _fill(self, table: TimeTable) -> None:
        rows: list[tuple[int, int]] = []

        def note(entry: Entry, unacked: bool, count: int) -> tuple[bool, int]:
            rows.append((entry.expiry, entry.seq))
            if len(rows) >= 4096:
                table.put_many(rows)
                rows.clear()
            return True, count + 1

        with self._store.lock:
            self.stored.backing.fold(note, 0)
            table.put_many(rows)
            while self.stored.backing.drop(4096, ack_required=True):
                pass

    def _drop_table(self) -> None:
        self._late.clear()
        if self._table is not None:
            self._table.close()
            self._table = None

    def _try_later(self, action: Callable[[], None], error: Exception) -> None:
        log.warning("the messages that wait before exchange %r have to wait longer: %r", self.exchange, error)
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = 0
        self._timer = self._later(_RETRY_SECONDS, action)

    def __len__(self) -> int:
        return self.stored.backing.depth() if self._table is None else len(self._table) + len(self._late)

    def _begin_anew(self, error: Exception) -> None:
        """Something in memory went wrong: from what is on disk again, as every queue."""
        log.error("the messages that wait before exchange %r failed and are restarted", self.exchange, exc_info=error)
        if self._timer is not None:
            self._timer.cancel()
        self._drop_table()
        self._failed = True
        self._recover()

    def add(self, entry: Entry, due: int) -> bool:
        """Hold a message until `due` (microseconds); whether a confirm has to wait for a commit."""
        if self._table is None:
            raise QueueCrashed(self.stored.name)
        try:
            return self._add(self._table, entry, due)
        except WarrenError:
            raise
        except Exception as error:
            self._begin_anew(error)
            raise QueueCrashed(self.stored.name) from error

    def _add(self, table: TimeTable, entry: Entry, due: int) -> bool:
        backing = self.stored.backing
        if not self.stored.seqs.available(1):
            self._store.reserve(self.stored, 1)
        with self._store.lock:
            self._store.committer.check_publish()
            entry.seq = self.stored.seqs.take(1)
            entry.expiry = due
            entry.level = 0
            if not self._durable:
                entry.flags &= ~PERSISTENT
            backing.publish([entry])
            backing.drop(1, ack_required=True)
        self._put(table, [(due, entry.seq)])
        return bool(entry.flags & PERSISTENT)

    def arrived(self, entries: list[Entry]) -> None:
        """Messages came by a transaction, ready and with their due time as `expiry`: they wait from now on."""
        if self._table is None:
            return  # they are found when it is made
        try:
            with self._store.lock:
                self.stored.backing.drop(len(entries), ack_required=True)
            self._put(self._table, [(entry.expiry, entry.seq) for entry in entries])
        except WarrenError:
            raise
        except Exception as error:
            self._begin_anew(error)  # with these

    def _put(self, table: TimeTable, rows: list[tuple[int, int]]) -> None:
        if self._late:  # the timer tries it with all of them
            self._late += rows
            return
        try:
            table.put_many(rows)
        except _BROKEN:
            raise
        except lmdb.Error as error:
            self._late += rows
            self._try_later(self._due, error)
        self._set_timer()

    def _set_timer(self) -> None:
        due = None if self._table is None else self._table.next_due()
        if due is None or self._closed:
            return
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._later(max(0.0, due / 1e6 - time.time()), self._due)

    def _due(self) -> None:
        self._timer = None
        if self._closed or self._table is None:
            return
        try:
            found = self._take_due(self._table)
            if found:
                self._fire(self.exchange, self.stored, found)
        except WarrenError:
            raise
        except Exception as error:
            self._begin_anew(error)
        self._set_timer()

    def _take_due(self, table: TimeTable) -> list[Entry]:
        """Of those whose time has come, out of the table; none while it cannot be written."""
        found: list[Entry] = []
        try:
            if self._late:
                table.put_many(self._late)
                self._late.clear()
            rows = table.first(_MOST_AT_ONCE, time.time_ns() // 1000)
            if rows:
                with self._store.lock:
                    self.stored.backing.ackfold(lambda entry, _: found.append(entry), None, [seq for _, seq in rows])
                table.remove_many(rows)
        except _BROKEN:
            raise
        except lmdb.Error as error:
            self._try_later(self._due, error)
            return []
        return found

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._drop_table()

    def info(self) -> dict[str, Any]:
        return {"exchange": self.exchange, "messages_delayed": len(self)}
