"""The library face: a store of durable queues in this process."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from warren.errors import (
    DiskFullError,
    InvalidArgumentError,
    MessageStateError,
    QueueArgumentError,
    QueueMismatchError,
    StoreFailedError,
    StorePathError,
    WarrenError,
)
from warren.kernel.entry import Entry
from warren.queueing.arguments import QueueArguments
from warren.queueing.arrival import come_now
from warren.queueing.message import Message
from warren.queueing.queue import Queue
from warren.storage.settings import EngineSettings
from warren.storage.vhost_store import StoredQueue, VhostStore
from warren.storage.vhost_transactions import Arrival


class Store:
    """An open data directory. Close it, or use it in a `with` block: a clean stop makes the next start instant."""

    def __init__(self, engine: VhostStore) -> None:
        self.engine = engine
        self._handles: dict[str, Queue] = {}
        self._closing = threading.Lock()
        for stored in list(engine.queues.values()):
            self._handle(stored)
        _remove_stale_snapshots(engine.root)
        engine.when_failed = self._failed

    def _failed(self) -> None:
        """Nothing will arrive any more: who waits for a message is told."""
        for handle in list(self._handles.values()):
            handle.look()

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
        _check_name("a queue name", name, QueueArgumentError)
        if not isinstance(durable, bool):
            raise QueueArgumentError(f"durable is {durable!r}, a {type(durable).__name__}; it is True or False")
        wanted = QueueArguments.parse(arguments)
        with self.engine.lock:
            handle = self._current(name)
            if handle is None:
                return self._declare(name, durable, dict(arguments or {}))
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

    def _declare(self, name: str, durable: bool, arguments: dict[str, Any]) -> Queue:
        try:
            return self._handle(self.engine.declare(name, durable=durable, arguments=arguments))
        except TypeError as error:  # an argument of the client's own that the metadata cannot keep
            raise QueueArgumentError(str(error)) from None

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
            self.engine.committer.check()
        return Snapshot(self.engine)

    def info(self) -> dict[str, Any]:
        """The store as a whole: message stores, journal, memory, damage."""
        engine = self.engine
        with engine.lock:
            engine.committer.check()
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
        with self._closing:
            if self.engine.closed:
                return
            try:
                self.engine.close()
            finally:
                for handle in list(self._handles.values()):
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
    """Collects publishes and acks; commits them at the end of its block, or drops them when the block raises.

    On a full disk, DiskFullError says which it is: refused, or kept until there is room and `Store.sync` is called.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._publishes: list[tuple[Queue, Entry]] = []
        self._acks: dict[Queue, list[Message]] = {}
        self._acked: set[int] = set()  # the ids of those messages: a list would be looked through for each
        self._done = False
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
        self._check_open()
        with self._store.engine.lock:
            self._store.engine.get(queue)
            handle = self._store._current(queue)
        assert handle is not None
        head = handle.head_for(persistent, headers, priority, expiration_ms, properties)
        self._publishes.append((handle, handle.entry_for(body, head, persistent, priority, expiration_ms)))

    def ack(self, message: Message) -> None:
        """Ack a message when the transaction commits."""
        self._check_open()
        if not isinstance(message, Message):
            raise InvalidArgumentError(f"a Message is needed, not {type(message).__name__}: {message!r:.60}")
        if message.queue._store is not self._store.engine:
            raise MessageStateError(f"{message!r} is of another store; a transaction is of one")
        if message.settled or id(message) in self._acked:
            raise MessageStateError(f"{message!r} was settled before")
        self._acks.setdefault(message.queue, []).append(message)
        self._acked.add(id(message))

    def _check_open(self) -> None:
        if self._done:
            raise MessageStateError("the transaction is over; begin a new one with Store.transaction()")

    def __enter__(self) -> Transaction:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done = True
        if kind is None and (self._publishes or self._acks):
            self._commit()

    def _commit(self) -> None:
        engine = self._store.engine
        arrived: dict[Queue, list[Entry]] = {}
        for queue, entry in self._publishes:
            arrived.setdefault(queue, []).append(entry)

        def announce() -> None:
            """By whoever commits it: perhaps another thread, long after this one gave up waiting for room on the disk."""
            for queue, entries in arrived.items():
                queue.announce(entries)

        # Here it waits, if it has to, and before anything has happened: no message is settled by a transaction that Ctrl-C
        # kept from its beginning.
        arriving = [(queue._stored, entries) for queue, entries in arrived.items()]
        while True:
            with engine.lock:
                if engine.may_begin(arriving):
                    for queue, entries in arrived.items():
                        queue.check_room(entries)
                        come_now(entries)
                    lsn = self._begin(arriving, announce)
                    break
            engine.committer.sync()
        try:
            if lsn is not None:
                engine.committer.sync(lsn)
        except DiskFullError:  # its records wait for room: it happens with the next sync
            raise
        except WarrenError:  # nobody knows, and nothing can be settled before the next start
            for messages in self._acks.values():
                _unsettle(messages)
            raise
        self.seq_ids = [entry.seq for _, entry in self._publishes]
        for queue in arrived:
            queue.trim()

    def _begin(self, arriving: list[Arrival], done: Callable[[], None]) -> int | None:
        """Settle its messages and append its records, or neither. Requires: the lock, reserved seq_ids."""
        for queue in self._acks:
            queue._check()
        unsettled = [message for messages in self._acks.values() for message in messages if not message.settled]
        try:
            acks = [(queue._stored, queue._settle(messages)) for queue, messages in self._acks.items()]
            return self._store.engine.begin_transaction(arriving, acks, done)
        except BaseException:  # then nothing has begun, or the store has failed
            _unsettle(unsettled)
            raise


def _unsettle(messages: list[Message]) -> None:
    for message in messages:
        message.settled = False


class Snapshot:
    """A data directory of hard links: what the store held at one instant, pending messages included."""

    def __init__(self, engine: VhostStore) -> None:
        self.path = os.path.join(engine.root, "snapshots", f"{os.getpid()}-{time.time_ns()}")
        _held.add(self.path)
        try:
            engine.snapshot(self.path)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Remove the links. What a copy of them holds stays."""
        shutil.rmtree(self.path, ignore_errors=True)
        _held.discard(self.path)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


_held: set[str] = set()  # paths of the snapshots of this process


def _remove_stale_snapshots(root: str) -> None:
    """Links that a killed process left: they would hold the disk space of everything that is deleted from now on."""
    directory = os.path.join(root, "snapshots")
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        pid, _, _ = name.partition("-")
        path = os.path.join(directory, name)
        if pid.isdigit() and path not in _held and not _is_another_process(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_another_process(pid: int) -> bool:
    """Who started in a container may well have the pid of its predecessor."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def open(  # the name is the public one
    path: str | os.PathLike[str],
    vhost: str = "/",
    durability: str = "fsync",
    *,
    settings: EngineSettings | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Store:
    """Open a data directory, created if absent, and own it until it is closed.

    `durability` says what `Store.sync` promises: "fsync" survives power loss, "os" a crash of the process, "memory"
    nothing. Raises an error of `warren.errors` that says what to do: the directory is in use, is a file, was written by
    a newer Warren.
    """
    try:
        directory = os.fspath(path)
    except TypeError:
        directory = None
    if not isinstance(directory, str) or not directory or "\0" in directory:
        raise InvalidArgumentError(
            f"path is {path!r}, a {type(path).__name__}; it is the path of a directory, text or a Path"
        )
    _check_name("a vhost name", vhost, InvalidArgumentError)
    if settings is not None and not isinstance(settings, EngineSettings):
        raise InvalidArgumentError(
            f"settings is {settings!r:.80}, a {type(settings).__name__}; it is an EngineSettings of warren.storage.settings"
        )
    directory = os.path.abspath(directory)
    try:
        engine = VhostStore(directory, vhost, durability=durability, settings=settings, progress=progress)
        try:
            return Store(engine)
        except BaseException:
            engine.close()  # else its lock would keep the next one out
            raise
    except OSError as error:
        raise _clear_error(directory, error) from error
    except StoreFailedError as error:  # the engine's word for any OSError of a start
        if isinstance(error.__cause__, OSError):
            raise _clear_error(directory, error.__cause__) from error.__cause__
        raise


def _check_name(what: str, name: object, kind: type[WarrenError]) -> None:
    if isinstance(name, str):
        try:
            if 0 < len(name.encode()) <= 255:
                return
        except UnicodeEncodeError:
            pass
    raise kind(f"{what} is text of 1 to 255 bytes, not {name!r:.80}")


def _clear_error(directory: str, error: OSError) -> WarrenError:
    """What the disk says while a store is opened, as what to do about it."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorePathError(
            f"cannot write to {directory}: {error}. Give a directory that this user may read and write, with all in it"
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP):
        return StorePathError(f"{directory} cannot hold a store: {error}. Give a directory")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"no room to open {directory}: {error}. Free some, then open it again")
    return StoreFailedError(f"cannot open {directory}: {error}. Nothing is lost by that; try again")
