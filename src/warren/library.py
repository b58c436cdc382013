"""The library face: a store of durable queues in this process."""

from __future__ import annotations

import os
import shutil
from types import TracebackType
from typing import Any

from warren.errors import MessageStateError, QueueArgumentError, QueueMismatchError
from warren.queueing.arguments import QueueArguments
from warren.queueing.message import Message
from warren.queueing.properties import encode_head
from warren.queueing.queue import Queue
from warren.storage.settings import EngineSettings
from warren.storage.vhost_store import StoredQueue, VhostStore


class Store:
    """An open data directory. Close it, or use it in a `with` block: a clean stop makes the next start instant."""

    def __init__(self, engine: VhostStore) -> None:
        self.engine = engine
        self._handles: dict[str, Queue] = {}
        self._snapshots = 0
        for stored in list(engine.queues.values()):
            self._handle(stored)

    @property
    def vhost(self) -> str:
        return self.engine.vhost

    @property
    def durability(self) -> str:
        return self.engine.durability

    def _handle(self, stored: StoredQueue) -> Queue:
        handle = Queue(self.engine, stored, QueueArguments.parse(stored.record.arguments))
        self._handles[stored.name] = handle
        return handle

    # -- queues ------------------------------------------------------------------------------------------------------

    def queue(self, name: str, durable: bool = True, arguments: dict[str, Any] | None = None) -> Queue:
        """The queue of this name; created if absent. Raises QueueMismatchError where it exists with other arguments."""
        if not isinstance(name, str) or not 0 < len(name.encode()) <= 255:
            raise QueueArgumentError(f"a queue name is text of 1 to 255 bytes, not {name!r:.80}")
        wanted = QueueArguments.parse(arguments)
        with self.engine.lock:
            handle = self._current(name)
            if handle is None:
                return self._handle(self.engine.declare(name, durable=durable, arguments=dict(arguments or {})))
            if handle.durable != durable:
                raise QueueMismatchError(
                    f"queue {name!r} in vhost {self.vhost!r} is declared with durable={handle.durable}, not {durable}"
                )
            if arguments is not None:
                difference = handle.arguments.same_as(wanted)
                if difference is not None:
                    raise QueueMismatchError(
                        f"queue {name!r} in vhost {self.vhost!r} is declared with {difference}; "
                        "use the arguments that it has, or delete it first"
                    )
            return handle

    def _current(self, name: str) -> Queue | None:
        """The handle of a queue that exists."""
        self.engine.committer.check()
        handle = self._handles.get(name)
        if handle is not None and self.engine.queues.get(name) is not handle._stored:
            del self._handles[name]
            return None
        return handle

    def queues(self) -> list[str]:
        """Names of all queues, sorted."""
        with self.engine.lock:
            self.engine.committer.check()
            return sorted(self.engine.queues)

    # -- safety ------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Return when everything before this call is safe. Raises StoreFailedError when it cannot be made so."""
        self.engine.sync()

    def transaction(self) -> Transaction:
        """A `with` block: its publishes and acks happen all or not at all, across queues and crashes."""
        return Transaction(self)

    def snapshot(self) -> Snapshot:
        """A consistent copy by hard links, removed at the end of its `with` block. Copy its path to keep it."""
        with self.engine.lock:
            self._snapshots += 1
            number = self._snapshots
        return Snapshot(self.engine, number)

    def info(self) -> dict[str, Any]:
        """The store as a whole: message stores, journal, memory, damage."""
        engine = self.engine
        with engine.lock:
            persistent, transient = engine.store.garbage(), engine.transient_store.garbage()
            return {
                "vhost": engine.vhost,
                "durability": engine.durability,
                "queues": len(engine.queues),
                "ram_bytes": engine.monitor.ram_bytes,
                "journal_floor": engine.journal.floor,
                "journal_file": engine.journal.buffer.file,
                "journal_bytes_written": engine.journal.bytes_written,
                "commits": engine.committer.commits,
                "disk_full": engine.committer.full,
                "clean_start": engine.clean_start,
                "persistent_store": persistent._asdict(),
                "transient_store": transient._asdict(),
                "damage": list(engine.quarantine.reports),
            }

    # -- closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """A clean stop. Calling it twice does nothing."""
        if self.engine.closed:
            return
        try:
            self.engine.close()
        finally:
            for handle in self._handles.values():
                handle.gone()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.engine.root!r}, vhost {self.vhost!r}>"


class Transaction:
    """Collects publishes and acks; commits them at the end of its block, or drops them when the block raises."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._publishes: list[tuple[Queue, bytes, bytes, bool, int | None, int | None]] = []
        self._acks: dict[str, tuple[Queue, list[Message]]] = {}
        self.seq_ids: list[int] = []  # of the publishes, after the commit

    def publish(
        self,
        queue: str,
        body: bytes,
        *,
        persistent: bool = True,
        headers: dict[str, Any] | None = None,
        priority: int | None = None,
        expiration_ms: int | None = None,
        **properties: Any,
    ) -> None:
        """Publish to a queue, by name, when the transaction commits."""
        with self._store.engine.lock:
            self._store.engine.get(queue)
            handle = self._store._current(queue)
        assert handle is not None
        head = encode_head(
            "",
            queue,
            persistent=persistent,
            headers=headers,
            priority=priority,
            expiration_ms=expiration_ms,
            **properties,
        )
        self._store.engine.check_size(len(body))
        self._publishes.append((handle, head, bytes(body), persistent, priority, expiration_ms))

    def ack(self, message: Message) -> None:
        """Ack a message when the transaction commits."""
        if message.settled:
            raise MessageStateError(f"{message!r} was settled before")
        self._acks.setdefault(message.queue.name, (message.queue, []))[1].append(message)

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._commit()

    def _commit(self) -> None:
        engine = self._store.engine
        publishes = []
        for handle, head, body, persistent, priority, expiration_ms in self._publishes:
            publishes.append((handle._stored, handle.entry_for(body, head, persistent, priority, expiration_ms)))
        acks = [(handle._stored, handle._settle(messages)) for handle, messages in self._acks.values()]
        if publishes or acks:
            self.seq_ids = engine.transact(publishes, acks)
            for handle in {id(item[0]): item[0] for item in self._publishes}.values():
                handle.announce()


class Snapshot:
    """A data directory of hard links: what the store held at one instant, pending messages included."""

    def __init__(self, engine: VhostStore, number: int) -> None:
        self._engine = engine
        self.path = os.path.join(engine.root, "snapshots", f"{os.getpid()}-{number}")
        engine.snapshot(self.path)

    def release(self) -> None:
        """Remove the links. What a copy of them holds stays."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def open(  # the name is the public one
    path: str | os.PathLike[str],
    vhost: str = "/",
    durability: str = "fsync",
    *,
    settings: EngineSettings | None = None,
    progress: Any = None,
) -> Store:
    """Open a data directory, created if absent, and own it until it is closed.

    `durability` says what `Store.sync` promises: "fsync" survives power loss, "os" a crash of the process, "memory"
    nothing. Raises an error of `warren.errors` that says what to do: the directory is in use, is a file, was written by
    a newer Warren.
    """
    directory = os.fspath(path)
    if not isinstance(directory, str):
        raise TypeError(f"path is a string or a Path, not {path!r}")
    return Store(VhostStore(os.path.abspath(directory), vhost, durability=durability, settings=settings, progress=progress))
