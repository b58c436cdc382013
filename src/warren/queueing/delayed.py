"""Messages that wait for their time before they are routed: the hidden queue of an `x-delayed-message` exchange.

A waiting message is a pending message of the hidden queue: only its seq_id is in RAM, as part of a range. Its due time is
the `expiry` of its slot. The order by due time is an LMDB table of (due, seq_id), which is rebuilt from the queue at every
start; so ten million waiting messages cost no memory, and a crash between the queue and the table costs nothing.

When its time has come a message is published to its targets and acked here in one transaction.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import lmdb

from warren.errors import WarrenError
from warren.kernel.entry import PERSISTENT, Entry
from warren.queueing.queue_process import QueueCrashed
from warren.storage.vhost_store import StoredQueue, VhostStore

log = logging.getLogger("warren.queueing")

PREFIX = "amq.delayed/"  # of the hidden queues' names
_KEY = struct.Struct(">QQ")
_MAP_BYTES = 1 << 36  # of address space, not of disk
_MOST_AT_ONCE = 256
MAX_DELAY_MS = 2**32 - 1  # of the plugin


def delay_ms(headers: Mapping[str, object]) -> int:
    """How long a message with these headers waits before a delayed exchange; 0: not at all. It waits once: when its time has
    come the header is turned around.

    >>> delay_ms({"x-delay": 500}), delay_ms({"x-delay": -500}), delay_ms({"x-delay": "500"})
    (500, 0, 0)
    """
    delay = headers.get("x-delay")
    if isinstance(delay, bool) or not isinstance(delay, (int, float)) or not delay >= 1:
        return 0
    return int(min(delay, 2 * MAX_DELAY_MS))


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class TimeTable:
    """(due, seq_id) on disk, in order of time."""

    def __init__(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=True)
        self._environment = lmdb.open(path, map_size=_MAP_BYTES, sync=False, metasync=False, lock=False)
        self._rows = self._environment.open_db()

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

    def clear(self) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.drop(self._rows, delete=False)

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
        self._timer_due = 0
        self._closed = False
        self.stored = store.declare(PREFIX + exchange, durable=durable)
        self._durable = durable and store.durability != "memory"
        self._table = TimeTable(os.path.join(store.root, f"delayed-{self.stored.uid}.lmdb"))
        self._recover()

    def _recover(self) -> None:
        """Everything waits again, in the order of its time."""
        rows: list[tuple[int, int]] = []

        def note(entry: Entry, unacked: bool, count: int) -> tuple[bool, int]:
            rows.append((entry.expiry, entry.seq))
            if len(rows) >= 4096:
                self._table.put_many(rows)
                rows.clear()
            return True, count + 1

        with self._store.lock:
            self.stored.backing.fold(note, 0)
            self._table.put_many(rows)
            while self.stored.backing.drop(4096, ack_required=True):
                pass
        self._set_timer()

    def __len__(self) -> int:
        return len(self._table)

    def _begin_anew(self, error: Exception) -> None:
        """Something in memory went wrong: from what is on disk again, as every queue."""
        log.error("the messages that wait before exchange %r failed and are restarted", self.exchange, exc_info=error)
        self.stored = self._store.restart_queue(self.stored.name)
        self._table.clear()
        self._recover()

    def add(self, entry: Entry, due: int) -> bool:
        """Hold a message until `due` (microseconds); whether a confirm has to wait for a commit."""
        try:
            return self._add(entry, due)
        except WarrenError:
            raise
        except Exception as error:
            self._begin_anew(error)
            raise QueueCrashed(self.stored.name) from error

    def _add(self, entry: Entry, due: int) -> bool:
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
        self._table.put_many([(due, entry.seq)])
        self._set_timer()
        return bool(entry.flags & PERSISTENT)

    def arrived(self, entries: list[Entry]) -> None:
        """Messages came by a transaction, ready and with their due time as `expiry`: they wait from now on."""
        try:
            with self._store.lock:
                self.stored.backing.drop(len(entries), ack_required=True)
        except WarrenError:
            raise
        except Exception as error:
            self._begin_anew(error)  # with these
            return
        self._table.put_many([(entry.expiry, entry.seq) for entry in entries])
        self._set_timer()

    def _set_timer(self) -> None:
        due = self._table.next_due()
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
        if self._closed:
            return
        rows = self._table.first(_MOST_AT_ONCE, time.time_ns() // 1000)
        if rows:
            found: list[Entry] = []
            try:
                with self._store.lock:
                    self.stored.backing.ackfold(lambda entry, _: found.append(entry), None, [seq for _, seq in rows])
                self._table.remove_many(rows)
                self._fire(self.exchange, self.stored, found)
            except WarrenError:
                raise
            except Exception as error:
                self._begin_anew(error)
        self._set_timer()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._table.close()

    def info(self) -> dict[str, Any]:
        return {"exchange": self.exchange, "messages_delayed": len(self._table)}
