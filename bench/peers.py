"""The others, used as their documentation uses them. Each has `put` and `take` (get and settle) of single messages."""

from __future__ import annotations

import os
import sqlite3
from typing import Any, Protocol


class Peer(Protocol):
    name: str

    def put(self, body: bytes) -> None: ...
    def take(self) -> None: ...
    def close(self) -> None: ...


class PersistQueueFile:
    name = "persist-queue (file)"

    def __init__(self, path: str) -> None:
        import persistqueue

        self._queue: Any = persistqueue.Queue(path)

    def put(self, body: bytes) -> None:
        self._queue.put(body)

    def take(self) -> None:
        self._queue.get()
        self._queue.task_done()

    def close(self) -> None:
        pass


class PersistQueueSqlite:
    name = "persist-queue (SQLite ack)"

    def __init__(self, path: str) -> None:
        import persistqueue

        self._queue: Any = persistqueue.SQLiteAckQueue(path, auto_commit=True)

    def put(self, body: bytes) -> None:
        self._queue.put(body)

    def take(self) -> None:
        self._queue.ack(self._queue.get())

    def close(self) -> None:
        self._queue.close()


class Litequeue:
    name = "litequeue"

    def __init__(self, path: str) -> None:
        from litequeue import LiteQueue

        os.makedirs(path, exist_ok=True)
        self._queue: Any = LiteQueue(os.path.join(path, "queue.sqlite3"))

    def put(self, body: bytes) -> None:
        self._queue.put(body.decode())

    def take(self) -> None:
        self._queue.done(self._queue.pop().message_id)

    def close(self) -> None:
        self._queue.close()


class DiskcacheDeque:
    name = "diskcache"

    def __init__(self, path: str) -> None:
        from diskcache import Deque

        self._queue: Any = Deque(directory=path)

    def put(self, body: bytes) -> None:
        self._queue.append(body)

    def take(self) -> None:
        self._queue.popleft()

    def close(self) -> None:
        self._queue.cache.close()


PEERS: list[type[Any]] = [PersistQueueFile, PersistQueueSqlite, Litequeue, DiskcacheDeque]


class PlainSqlite:
    """SQLite by hand, WAL, synchronous=NORMAL, one transaction a batch: what a careful user would write."""

    def __init__(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)
        self._db = sqlite3.connect(os.path.join(path, "queue.db"), isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("CREATE TABLE queue (id INTEGER PRIMARY KEY, body BLOB)")

    def put_many(self, bodies: list[bytes]) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO queue (body) VALUES (?)", [(body,) for body in bodies])
        self._db.execute("COMMIT")

    def take_many(self, count: int) -> int:
        rows = self._db.execute("SELECT id, body FROM queue ORDER BY id LIMIT ?", (count,)).fetchall()
        if rows:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM queue WHERE id <= ?", (rows[-1][0],))
            self._db.execute("COMMIT")
        return len(rows)

    def close(self) -> None:
        self._db.close()
