"""One vhost on disk: its directory, lock, metadata, journal, message stores and queues.

This is the engine without a protocol. The library, the broker's vhost process and the tests all own one of these. Every
call takes the engine's lock (`lock`) for as long as it needs it; the slow part of a commit, a checkpoint and a compaction
run without it.

`background=False` leaves out the thread: then the owner calls `tick` when it likes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from warren.errors import (
    DiskFullError,
    DurabilityError,
    MessageTooLargeError,
    QueueNotFoundError,
    StorePathError,
)
from warren.kernel.entry import IN_STORE, PERSISTENT, Entry
from warren.kernel.journal_codec import CHECKOUT, DEDUP, LEASE
from warren.kernel.overlay import HIDDEN, LIVE, Overlay
from warren.storage import compaction
from warren.storage.backing_queue import BackingQueue, Checkout
from warren.storage.checkpoint import Checkpoint
from warren.storage.committer import Committer
from warren.storage.context import DEBUG, QueueContext
from warren.storage.disk import Disk
from warren.storage.file_cache import FileCache
from warren.storage.journal import Journal, read_floor
from warren.storage.layout import hashed, stream_id
from warren.storage.ledger import Ledger
from warren.storage.lock import DirectoryLock
from warren.storage.message_store import MessageStore
from warren.storage.metadata import Metadata, QueueRecord
from warren.storage.payload import join_payload
from warren.storage.priority_queue import PriorityQueue
from warren.storage.quarantine import Quarantine
from warren.storage.queue_database import QueueDatabase
from warren.storage.queue_index import QueueIndex
from warren.storage.rates import MemoryMonitor
from warren.storage.recovery import (
    TERMS_NAME,
    JournalReplay,
    StreamRecovery,
    pack_segments,
    recover_stream,
    replay_journal,
    store_references,
    take_terms,
    unpack_segments,
    write_terms,
)
from warren.storage.seq_ids import SeqIds
from warren.storage.settings import EngineSettings
from warren.storage.snapshot import link_store, write_manifest
from warren.storage.sqlite_queue import SqliteQueue
from warren.storage.store_format import TermsError
from warren.storage.store_index import LmdbIndex, StoreIndex, TableIndex
from warren.storage.variable_queue import VariableQueue
from warren.storage.volatile_queue import VolatileQueue

log = logging.getLogger("warren.storage")

DURABILITIES = ("fsync", "os", "memory")
BACKING_QUEUES = ("variable", "volatile", "sqlite")


@dataclass(slots=True)
class StoredQueue:
    """A queue that exists: what it was declared with, and what keeps its messages."""

    record: QueueRecord
    backing: BackingQueue
    seqs: SeqIds
    indexes: list[QueueIndex]
    directory: str

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def uid(self) -> int:
        return self.record.uid

    @property
    def durable(self) -> bool:
        return self.record.durable


class VhostStore:
    def __init__(
        self,
        data_directory: str,
        vhost: str = "/",
        *,
        durability: str = "fsync",
        settings: EngineSettings | None = None,
        disk: Disk | None = None,
        background: bool = True,
        debug: bool = DEBUG,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        if durability not in DURABILITIES:
            raise DurabilityError(f"durability is {durability!r}; it can be {', '.join(map(repr, DURABILITIES))}")
        self.vhost = vhost
        self.durability = durability
        self.settings = settings or EngineSettings()
        self.disk = disk or Disk()
        self.lock = threading.RLock()
        self.root = os.path.join(data_directory, "vhosts", hashed(vhost))
        self.queues: dict[str, StoredQueue] = {}
        self.clean_start = False
        self.closed = False
        self._debug = debug
        self._clock = clock
        self._progress = progress or (lambda what, done, total: None)
        self._checkpoint_lock = threading.Lock()  # taken before `lock`; held by checkpoint, delete, snapshot, close
        self._wake = threading.Event()
        self._awake = False  # the thread was told that there is something to commit
        self._commit_bytes = self.settings.commit_bytes
        self._closing = False
        self._thread: threading.Thread | None = None
        self._make_root(data_directory)
        self._directory_lock = DirectoryLock(os.path.join(self.root, ".lock"))
        try:
            self._open()
        except BaseException:
            self._directory_lock.release()
            raise
        if background:
            self._thread = threading.Thread(target=self._maintain, name=f"warren {vhost}", daemon=True)
            self._thread.start()

    # -- opening -----------------------------------------------------------------------------------------------------

    def _make_root(self, data_directory: str) -> None:
        try:
            self.disk.make_dirs(self.root)
            for part in ("journal", "queues"):
                self.disk.make_dirs(os.path.join(self.root, part))
            # Who made these names may have been killed before it synced them.
            for path in (self.root, os.path.dirname(self.root), data_directory):
                self.disk.sync_dir(path)
            with contextlib.suppress(PermissionError):
                self.disk.sync_dir(os.path.dirname(os.path.abspath(data_directory)))
        except (NotADirectoryError, FileExistsError) as error:
            raise StorePathError(f"{data_directory} is a file, or lies below one; give a directory") from error
        except PermissionError as error:
            raise StorePathError(
                f"cannot write to {data_directory}: permission denied. Give a directory that this user may write to"
            ) from error
        name = os.path.join(self.root, ".vhost")
        if not self.disk.exists(name):
            self.disk.replace(name, self.vhost.encode())

    def _open(self) -> None:
        settings = self.settings
        self.quarantine = Quarantine(self.disk, self.root, self._log_damage)
        self.metadata = Metadata(os.path.join(self.root, "meta.db"))
        try:
            self._recover(settings)
        except BaseException:
            self._close_databases()
            self.metadata.close()
            raise

    def _recover(self, settings: EngineSettings) -> None:
        boot = self.metadata.boot()
        self._boot = boot
        self._handles = FileCache(self.disk)
        self.ledger = Ledger()
        journal_directory = os.path.join(self.root, "journal")
        records = [record for record in self.metadata.queues() if record.durable]
        if self.durability == "memory":
            self._refuse_memory(records)
        taken = self._take_terms()
        indexes: dict[int, QueueIndex] = {}
        replayed: JournalReplay | None = None
        if taken is None:
            sids = [stream_id(record.uid, level) for record in records for level in range(_levels(record))]
            progress = self._progress
            replayed = replay_journal(
                self.disk, journal_directory, sids, self.ledger, self.report, lambda d, t: progress("journal", d, t)
            )
            first_file, first_lsn = replayed.last_file + 1, replayed.last_lsn + 1
            floor, _ = read_floor(self.disk, journal_directory)
        else:
            terms = taken[0]
            first_file, first_lsn, floor = terms["journal"], terms["lsn"], terms["floor"]
            self.ledger.restore(terms["ledger"])
        self.journal = Journal(
            self.disk,
            journal_directory,
            sync=self.durability == "fsync",
            file_limit=settings.journal_file_bytes,
            record_limit=settings.journal_file_records,
            first_file=first_file,
            first_lsn=first_lsn,
            floor=floor,
        )
        for record in records:
            for level in range(_levels(record)) if _kind(record) != "sqlite" else ():
                indexes[stream_id(record.uid, level)] = self._index(record, level)
        found: dict[int, StreamRecovery] = {}
        if replayed is not None:
            for number, (sid, index) in enumerate(indexes.items()):
                found[sid] = recover_stream(self.disk, journal_directory, index, replayed, boot, self.report)
                self._progress("queues", number + 1, len(indexes))
        self._open_stores(settings, taken[1] if taken is not None else None, list(found.values()))
        self.monitor = MemoryMonitor(settings.ram_bytes)
        self.context = QueueContext(
            self.journal,
            self.store,
            self.transient_store,
            self.monitor,
            settings,
            self.report,
            self._debug,
            self._clock,
        )
        if replayed is not None and self.store.missing:
            self._drop_missing(indexes, found)
        for record in records:
            if _kind(record) == "sqlite":
                self._start_sqlite_queue(record, taken[0] if taken is not None else None, replayed)
                continue
            streams = {level: indexes[stream_id(record.uid, level)] for level in range(_levels(record))}
            if taken is not None:
                self._restore_queue(record, streams, taken[0]["queues"][str(record.uid)])
            else:
                assert replayed is not None
                self._recover_queue(record, streams, found, replayed)
        self.clean_start = taken is not None
        if replayed is not None and replayed.last_file:
            # What was read may be in the page cache only: names above all, of segments made or unlinked. (For contents
            # see `recovery.py`.) From here on a checkpoint relies on it.
            self.disk.sync_all(self.root)
        self.committer = Committer(
            self.lock, self.disk, self.root, self.journal, self.store, settings.reserve_bytes
        )
        self.ledger.attach(self.journal)
        self._lost_and_found()
        self._begin()

    def _refuse_memory(self, records: list[QueueRecord]) -> None:
        kept = os.path.join(self.root, "queues")
        # A clean stop leaves a journal of reservations, without messages.
        stopped = self.disk.exists(os.path.join(self.root, TERMS_NAME))
        files = [name for name in self.disk.listdir(os.path.join(self.root, "journal")) if name.endswith(".wal")]
        if records and ((files and not stopped) or any(True for _ in self.disk.walk(kept))):
            raise DurabilityError(
                f"{self.root} holds persistent messages; durability='memory' would lose them. "
                "Open it with 'fsync' or 'os', or use another directory"
            )

    def _begin(self) -> None:
        """Make the start durable: reservations of seq_ids. On a full disk that is tried again by the next commit; the
        messages can be consumed all the same."""
        self.committer.take_reserve()
        if self.durability == "memory":
            return
        for queue in self.queues.values():
            queue.seqs.available(0)
        with contextlib.suppress(DiskFullError):
            self.committer.commit()

    def _index(self, record: QueueRecord, level: int) -> QueueIndex:
        directory = self._queue_directory(record)
        if _has_levels(record):
            directory = os.path.join(directory, f"p{level}")
        return QueueIndex(
            self.disk,
            directory,
            stream_id(record.uid, level),
            segment_size=self.settings.segment_entries,
            boot=self._boot,
            journal=self.journal,
            journal_directory=self.journal.directory,
            handles=self._handles,
            report=self.report,
        )

    def _queue_directory(self, record: QueueRecord) -> str:
        return os.path.join(self.root, "queues", f"{hashed(record.name)}-{record.uid}")

    def _take_terms(self) -> tuple[dict[str, Any], MessageStore] | None:
        """What a clean stop left, and the message store as it was then; None: the start is a dirty one."""
        taken = take_terms(self.disk, self.root, self.report)
        if taken is None:
            return None
        path = os.path.join(self.root, "msg_store_persistent")
        try:
            store = MessageStore.open_clean(
                self.disk,
                path,
                index=self._store_index(path),
                sync=self.durability == "fsync",
                terms=taken[1],
                file_size_limit=self.settings.store_file_bytes,
                garbage_fraction=self.settings.garbage_fraction,
            )
        except TermsError as error:
            log.warning("the message store does not fit the terms of the last stop; it is read again: %s", error)
            return None
        return taken[0], store

    def _open_stores(
        self, settings: EngineSettings, store: MessageStore | None, found: list[StreamRecovery]
    ) -> None:
        path = os.path.join(self.root, "msg_store_persistent")
        limit, fraction = settings.store_file_bytes, settings.garbage_fraction
        if store is None:
            store = MessageStore.open_dirty(
                self.disk,
                path,
                index=self._store_index(path),
                sync=self.durability == "fsync",
                refs=store_references(found),
                quarantine=lambda p, o, n, why: self.report(p, o, n, -1, why),
                progress=lambda done, total: self._progress("message store", done, total),
                file_size_limit=limit,
                garbage_fraction=fraction,
            )
        self.store = store
        path = os.path.join(self.root, "msg_store_transient")
        self.transient_store = MessageStore.open_empty(
            self.disk,
            path,
            index=self._store_index(path),
            sync=False,
            file_size_limit=limit,
            garbage_fraction=fraction,
        )

    def _store_index(self, path: str) -> StoreIndex:
        if self.settings.store_index == "lmdb":
            return LmdbIndex(os.path.join(path, "index.lmdb"))
        return TableIndex()

    def _drop_missing(self, indexes: dict[int, QueueIndex], found: dict[int, StreamRecovery]) -> None:
        """Messages whose stored body is not there."""
        missing = set(self.store.missing)
        for sid, stream in found.items():
            for seq, msg_id in stream.stored:
                if msg_id in missing:
                    self.report(self.store.path, 0, 0, seq, f"body {msg_id.hex()} is missing", sid)
                    indexes[sid].lose(seq)
                    stream.count -= 1
            stream.stored = [(seq, msg_id) for seq, msg_id in stream.stored if msg_id not in missing]

    def _leased(self, sid: int) -> list[int]:
        """What open checkouts hold of a stream."""
        pairs: list[int] = []
        for value in self.ledger.table(CHECKOUT).values():
            pairs += value["ranges"].get(str(sid), [])
        return pairs

    def _restore_queue(self, record: QueueRecord, streams: dict[int, QueueIndex], terms: dict[str, Any]) -> None:
        seqs = SeqIds(self.journal, record.uid, self.settings.reserve_ahead, terms["next"], terms["next"])
        states = []
        for level, index in streams.items():
            state = terms["streams"][str(level)]
            unpack_segments(index, state["segments"])
            state["counts"] = {int(seq): count for seq, count in state["counts"].items()}
            state["leased"] = self._leased(index.sid)
            states.append(state)
        self._add_queue(record, seqs, list(streams.values()), states)

    def _recover_queue(
        self,
        record: QueueRecord,
        streams: dict[int, QueueIndex],
        found: dict[int, StreamRecovery],
        replayed: JournalReplay,
    ) -> None:
        mine = [found[index.sid] for index in streams.values()]
        seqs = self._fresh_seqs(record, replayed, max(stream.stop for stream in mine))
        states = []
        for index, stream in zip(streams.values(), mine, strict=True):
            leased = self._live_leased(index)
            states.append(
                {
                    "count": stream.count - sum(leased[1::2]),
                    "bytes": stream.payload_bytes,
                    "low": stream.low,
                    "redelivered_below": seqs.next,
                    "returned": [],
                    "counts": stream.counts,
                    "stored": len(stream.stored),
                    "leased": leased,
                }
            )
        self._add_queue(record, seqs, list(streams.values()), states)

    def _live_leased(self, index: QueueIndex) -> list[int]:
        """Checked-out messages that are still there."""
        pairs = self._leased(index.sid)
        entries, _ = index.load(pairs) if pairs else ([], [])
        return [number for entry in entries for number in (entry.seq, 1)]

    def _fresh_seqs(self, record: QueueRecord, replayed: JournalReplay, stop: int) -> SeqIds:
        """After a dirty stop: from the segment after the highest reserved or found (all below `stop`) on."""
        size = self.settings.segment_entries
        used = max(size, replayed.reserved.get(record.uid, 0), stop)
        next_seq = (used + size - 1) // size * size
        return SeqIds(self.journal, record.uid, self.settings.reserve_ahead, next_seq, next_seq)

    def _add_queue(
        self, record: QueueRecord, seqs: SeqIds, indexes: list[QueueIndex], states: list[dict[str, Any]] | None
    ) -> StoredQueue:
        levels: list[BackingQueue] = []
        for number, index in enumerate(indexes):
            level: BackingQueue
            if _kind(record) == "volatile":
                level = VolatileQueue(index.sid, seqs, self.context)
            else:
                level = VariableQueue(index, seqs, self.context, record.durable and self.durability != "memory")
            level.init(states[number] if states is not None else None)
            levels.append(level)
        backing = levels[0]
        if _has_levels(record):
            backing = PriorityQueue(levels)
            backing.init(None)
        queue = StoredQueue(record, backing, seqs, indexes, self._queue_directory(record))
        self.queues[record.name] = queue
        return queue

    def _start_sqlite_queue(
        self, record: QueueRecord, terms: dict[str, Any] | None, replayed: JournalReplay | None
    ) -> None:
        """From the terms of a clean stop, or with what the journal says after a dirty one."""
        mine = terms["queues"][str(record.uid)] if terms is not None else None
        database = self._database(record, mine["streams"]["0"]["digest"] if mine is not None else None)
        sids = [stream_id(record.uid, level) for level in range(_levels(record))]
        state: dict[str, Any] = {"leased": [number for sid in sids for number in self._leased(sid)]}
        if mine is not None:
            seqs = SeqIds(self.journal, record.uid, self.settings.reserve_ahead, mine["next"], mine["next"])
            state.update(mine["streams"]["0"])
            if database.is_new:
                self.report(database.path, 0, 0, -1, "the file is missing; the queue begins empty", sids[0])
        else:
            assert replayed is not None
            last = max(replayed.overlays[sid].last_seq() for sid in sids)
            seqs = self._fresh_seqs(record, replayed, max(database.stop(), last + 1))
            state["redelivered_below"] = seqs.next
        self._add_sqlite_queue(record, database, seqs, state, replayed)

    def _add_sqlite_queue(
        self,
        record: QueueRecord,
        database: QueueDatabase,
        seqs: SeqIds,
        state: dict[str, Any] | None = None,
        replayed: JournalReplay | None = None,
    ) -> StoredQueue:
        safe = record.durable and self.durability != "memory"
        backing = SqliteQueue(database, record.uid, _levels(record), seqs, self.context, safe)
        queue = StoredQueue(record, backing, seqs, [], self._queue_directory(record))
        self.queues[record.name] = queue
        if replayed is not None:
            backing.replay(replayed)
        backing.init(state)
        return queue

    def _database(self, record: QueueRecord, digest: int | None = None) -> QueueDatabase:
        safe = record.durable and self.durability != "memory"
        directory = self._queue_directory(record) if safe else None
        return QueueDatabase(self.disk, directory, os.path.join(self.root, "quarantine"), self.report, digest=digest)

    def _sqlite_queues(self) -> list[tuple[StoredQueue, SqliteQueue]]:
        return [(queue, queue.backing) for queue in self.queues.values() if isinstance(queue.backing, SqliteQueue)]

    def _close_databases(self) -> None:
        for _, backing in self._sqlite_queues():
            backing.close()

    def _lost_and_found(self) -> None:
        """A directory that the metadata does not know is kept aside; nothing is deleted because a table is silent."""
        known = {os.path.basename(queue.directory) for queue in self.queues.values()}
        directory = os.path.join(self.root, "queues")
        for name in self.disk.listdir(directory):
            if name not in known:
                target = os.path.join(self.root, "lost+found")
                self.disk.make_dirs(target)
                number = len(self.disk.listdir(target))
                self.disk.rename(os.path.join(directory, name), os.path.join(target, f"{number}-{name}"))
                log.warning("queue directory %s is not in the metadata: moved to lost+found", name)
        self.disk.remove_tree(os.path.join(self.root, "trash"))

    def _log_damage(self, line: dict[str, object]) -> None:
        log.warning("damage in %s at %s, %s bytes: %s", line["file"], line["offset"], line["length"], line["why"])

    def report(self, path: str, offset: int, length: int, seq: int, why: str, sid: int = -1) -> None:
        """Bytes that cannot be used go to quarantine."""
        self.quarantine.report(path, offset, length, seq, why, sid)

    # -- queues ------------------------------------------------------------------------------------------------------

    def declare(self, name: str, *, durable: bool = True, arguments: dict[str, Any] | None = None) -> StoredQueue:
        """The queue of this name, made if there is none. Durable ones are in the metadata when this returns."""
        with self.lock:
            self.committer.check()
            queue = self.queues.get(name)
            if queue is not None:
                return queue
            record = QueueRecord(name=name, created_at=time.time(), durable=durable, arguments=arguments or {})
            uid = self.metadata.declare_queue(record) if durable else self.metadata.reserve_uid()
            record = QueueRecord(
                name=name, created_at=record.created_at, uid=uid, durable=durable, arguments=record.arguments
            )
            seqs = SeqIds(self.journal, uid, self.settings.reserve_ahead, self.settings.segment_entries)
            if not durable or self.durability == "memory":
                seqs.unlimited()  # no restart brings its uid back
            if _kind(record) == "sqlite":
                return self._add_sqlite_queue(record, self._database(record), seqs)
            return self._add_queue(record, seqs, [self._index(record, n) for n in range(_levels(record))], None)

    def get(self, name: str) -> StoredQueue:
        queue = self.queues.get(name)
        if queue is None:
            raise QueueNotFoundError(f"no queue {name!r} in vhost {self.vhost!r}")
        return queue

    def delete(self, name: str) -> int:
        """Delete a queue and its messages; how many were ready."""
        with self._checkpoint_lock, self.lock:
            self.committer.check()
            queue = self.get(name)
            if queue.durable:
                self.metadata.delete_queue(queue.uid)
            del self.queues[name]
            count = len(queue.backing)
            queue.backing.delete_and_terminate()
            trash = os.path.join(self.root, "trash")
            if self.disk.is_dir(queue.directory):
                self.disk.make_dirs(trash)
                self.disk.rename(queue.directory, os.path.join(trash, os.path.basename(queue.directory)))
        self._empty_trash()
        return count

    def _empty_trash(self) -> None:
        self.disk.remove_tree(os.path.join(self.root, "trash"))

    # -- publishing --------------------------------------------------------------------------------------------------

    def reserve(self, queue: StoredQueue, count: int) -> None:
        """Make sure that `count` seq_ids may be taken under the lock that follows. Called without the lock."""
        while True:
            with self.lock:
                self.committer.check_publish()
                if queue.seqs.available(count):
                    return
            self.committer.sync()

    def check_size(self, size: int) -> None:
        if size > self.settings.max_message_bytes:
            raise MessageTooLargeError(
                f"a message of {size} bytes is over the limit of {self.settings.max_message_bytes}; "
                "split it, or raise max_message_bytes"
            )

    def wake(self) -> None:
        """Something is in the buffer: see that it is committed. Commits at once when there is much."""
        if len(self.journal.buffer) > self._commit_bytes:
            self.committer.sync()
        elif not self._awake:
            self._awake = True
            self._wake.set()

    def fan_out(
        self,
        queues: list[StoredQueue],
        head: bytes,
        body: bytes,
        *,
        persistent: bool,
        published_at: int,
        expiry: int = 0,
        level: int = 0,
        producer: str | None = None,
        publishing_id: int = 0,
    ) -> list[int]:
        """One message to many queues: one body, one journal record. Returns the seq_ids."""
        for queue in queues:
            self.reserve(queue, 1)
        with self.lock:
            self.committer.check_publish()
            seqs = [queue.seqs.take(1) for queue in queues]
            size = 4 + len(head) + len(body)
            self.check_size(size)
            persistent = persistent and self.durability != "memory"
            durable = [persistent and queue.durable and _kind(queue.record) != "volatile" for queue in queues]
            large = size >= self.settings.embed_below
            refers = [
                large and safe and _kind(queue.record) == "variable"
                for queue, safe in zip(queues, durable, strict=True)
            ]
            msg_id = None
            if any(refers):
                msg_id = self.store.next_id()
                self.store.write(msg_id, join_payload(head, body), sum(refers))
            entries = []
            for seq, safe, stored in zip(seqs, durable, refers, strict=True):
                flags = (PERSISTENT if safe else 0) | (IN_STORE if stored else 0)
                entry = Entry(seq, head, body, flags, published_at, expiry, msg_id if stored else None)
                entry.level = level
                entries.append(entry)
            if any(durable):
                self._append_fanout(queues, entries, producer, publishing_id)
                if producer is not None:
                    for queue in queues:
                        key = f"{queue.uid}:{producer}"
                        self.ledger.note(DEDUP, key, publishing_id, self.journal.buffer.file)
            for queue, entry in zip(queues, entries, strict=True):
                queue.backing.accept([entry])
        self.wake()
        return seqs

    def _append_fanout(
        self, queues: list[StoredQueue], entries: list[Entry], producer: str | None, publishing_id: int
    ) -> None:
        """One record; two in a group where some queues refer to the message store and others must not."""
        records: dict[int, list[tuple[StoredQueue, Entry]]] = {}
        for queue, entry in zip(queues, entries, strict=True):
            if entry.flags & PERSISTENT:
                records.setdefault(entry.flags & IN_STORE, []).append((queue, entry))
        buffer = self.journal.buffer
        name = producer.encode() if producer is not None else None
        if len(records) > 1:
            buffer.begin_group()
        for pairs in records.values():
            targets = [_target(queue, entry) for queue, entry in pairs]
            buffer.append_fanout(pairs[0][1], targets, LIVE, publishing_id, name)
        if len(records) > 1:
            buffer.end_group()

    def last_publishing_id(self, queue: StoredQueue, producer: str) -> int | None:
        """The highest publishing id that a producer has published to a queue."""
        value = self.ledger.table(DEDUP).get(f"{queue.uid}:{producer}")
        return None if value is None else int(value)

    # -- transactions ------------------------------------------------------------------------------------------------

    def transact(
        self, publishes: list[tuple[StoredQueue, Entry]], acks: list[tuple[StoredQueue, list[int]]]
    ) -> list[int]:
        """All of it or nothing, also across a crash: one record group. Visible once it is safe. The seq_ids."""
        wanted: dict[str, int] = {}
        for queue, _ in publishes:
            wanted[queue.name] = wanted.get(queue.name, 0) + 1
        for name, count in wanted.items():
            self.reserve(self.get(name), count)
        with self.lock:
            self.committer.check_publish() if publishes else self.committer.check()
            seqs = []
            for queue, entry in publishes:
                entry.seq = queue.seqs.take(1)
                seqs.append(entry.seq)
            buffer = self.journal.buffer
            buffer.begin_group()
            for queue, entry in publishes:
                queue.backing.journal_publish([entry], HIDDEN)
            for queue, acked in acks:
                queue.backing.journal_ack(acked)
            buffer.end_group()

            def apply() -> None:
                for queue, entry in publishes:
                    queue.backing.reveal([entry])
                for queue, acked in acks:
                    queue.backing.ack_committed(acked)

            self.journal.after(apply)
            lsn = self.journal.appended_lsn
        self.committer.sync(lsn)
        return seqs

    # -- leases ------------------------------------------------------------------------------------------------------

    def checkout(self, queue: StoredQueue, lease: str, limit: int, most_bytes: int = 1 << 62) -> Checkout | None:
        """Freeze ready messages from the head as the lease's next checkout; durable when this returns."""
        with self.lock:
            self.committer.check()
            state = self.ledger.table(LEASE).get(lease) or {"epoch": 0, "floor": 0, "next": 1}
            ranges = queue.backing.checkout(limit, most_bytes)
            if not ranges:
                return None
            number = state["next"]
            self.journal.buffer.begin_group()
            self.ledger.put(LEASE, lease, {**state, "next": number + 1})
            self.ledger.put(
                CHECKOUT,
                f"{lease}/{number}",
                {"queue": queue.uid, "ranges": {str(sid): pairs for sid, pairs in ranges.items()}},
            )
            self.journal.buffer.end_group()
            lsn = self.journal.appended_lsn
        self.committer.sync(lsn)
        return Checkout(number, lease, ranges)

    def checkouts(self, lease: str) -> list[Checkout]:
        """Open checkouts of a lease, oldest first."""
        out = []
        for key, value in self.ledger.table(CHECKOUT).items():
            name, _, number = key.rpartition("/")
            if name == lease:
                ranges = {int(sid): pairs for sid, pairs in value["ranges"].items()}
                out.append(Checkout(int(number), lease, ranges))
        return sorted(out, key=lambda checkout: checkout.number)

    def settle(self, lease: str, upto: int, *, requeue: bool = False) -> int:
        """End all checkouts of a lease up to a number, as acked or ready again; one record group, idempotent."""
        settled = 0
        with self.lock:
            self.committer.check()
            due = [checkout for checkout in self.checkouts(lease) if checkout.number <= upto]
            if due:
                by_uid = {queue.uid: queue for queue in self.queues.values()}
                self.journal.buffer.begin_group()
                state = self.ledger.table(LEASE)[lease]
                self.ledger.put(LEASE, lease, {**state, "floor": max(state["floor"], upto)})
                for checkout in due:
                    uid = self.ledger.table(CHECKOUT)[f"{lease}/{checkout.number}"]["queue"]
                    self.ledger.put(CHECKOUT, f"{lease}/{checkout.number}", None)
                    if uid in by_uid:
                        settled += by_uid[uid].backing.settle(checkout.ranges, requeue)
                self.journal.buffer.end_group()
            lsn = self.journal.appended_lsn
        self.committer.sync(lsn)
        return settled

    # -- safety and upkeep -------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Return when everything before this call is safe, as `durability` defines it."""
        if self.durability == "memory":
            self.committer.check()
            return
        self.committer.sync()

    def commit(self) -> None:
        """For the checkpoint: what is in the buffer, with bodies synced in `os` durability, too."""
        self.committer.commit(sync_store=True)

    def indexes(self) -> list[QueueIndex]:
        return [index for queue in self.queues.values() for index in queue.indexes]

    def commit_databases(self) -> None:
        """For the checkpoint: what queues in SQLite changed becomes safe in their files."""
        with self.lock:
            queues = self._sqlite_queues()
        for _, backing in queues:
            if backing.database.changed:
                with self._synced():
                    backing.commit()

    def seq_ids(self) -> list[SeqIds]:
        return [queue.seqs for queue in self.queues.values() if queue.durable]

    def carry_state(self, upto: int) -> None:
        self.ledger.carry(upto)

    def checkpoint(self, *, seal: bool = False, carry_below: int | None = None) -> bool:
        """Move what is in sealed journal files to segments; with `seal`, the current file first."""
        with self._checkpoint_lock, self._upkeep():
            return self._checkpoint(seal, carry_below)

    def _checkpoint(self, seal: bool, carry_below: int | None = None) -> bool:
        if seal:
            self._roll()
        done = False
        upto = self.journal.sealed
        while self.journal.floor <= upto:
            if self.committer.full:
                # What it moves is there twice until the journal file goes, and acks must not starve meanwhile.
                with self.lock:
                    moving = sum(index.overlay.bytes_upto(self.journal.floor) for index in self.indexes())
                if not self.committer.has_room(2 * moving):
                    break
            run = Checkpoint(self, self.disk, self.root, self.journal, self.settings)
            done = run.run(carry_below) or done
        return done

    def _roll(self) -> None:
        """Seal the current journal file, with everything that is appended now in it."""
        with self._synced():
            self.journal.roll()

    @contextlib.contextmanager
    def _synced(self) -> Iterator[None]:
        """Hold the lock, with nothing in the journal that is not safe."""
        while True:
            self.committer.sync()
            with self.lock:
                self.committer.check()
                if not self.journal.dirty:
                    yield
                    return

    @contextlib.contextmanager
    def _upkeep(self) -> Iterator[None]:
        """Errors of the disk outside of a commit. For want of disk publishing stops, and the work is done another time;
        after any other error what the disk holds is unknown, and the store has failed."""
        try:
            yield
        except OSError as error:
            raise self.committer.trouble(error) from error

    def compact(self) -> bool:
        """Merge two store files that are mostly garbage; whether there were any."""
        done = False
        for store in (self.store, self.transient_store):
            with self.lock:
                job = compaction.plan(store)
            if job is None:
                continue
            complete = False
            try:
                if self.committer.has_room(job.copy_bytes):
                    complete = job.run(sync=store is self.store)
            except OSError as error:  # the copy is dropped, and nothing refers to it
                log.warning("compaction in %s failed: %s", store.path, error)
            finally:
                with self.lock, contextlib.suppress(OSError):
                    if complete:
                        job.commit()
                    else:
                        job.abort()
            done = done or complete
        return done

    def tick(self) -> None:
        """What the background thread does between two sleeps."""
        if self.journal.dirty and self.durability != "memory":
            self.committer.sync()
        full = self.committer.full
        if self.journal.sealed >= self.journal.floor or full:
            self.checkpoint(seal=full)
        self.compact()
        with self._upkeep():
            if full:
                self.committer.take_reserve()
            with self.lock:
                self.transient_store.flush()
                self.monitor.update()

    def _maintain(self) -> None:
        interval = self.settings.commit_interval
        while not self._closing:
            self._wake.wait(1.0)
            if self._closing:
                return
            time.sleep(interval)
            self._wake.clear()
            self._awake = False
            try:
                self.tick()
            except Exception as error:
                if self._closing or self.committer.failed is not None:
                    return
                if not self.committer.full:
                    log.exception("upkeep of vhost %s failed", self.vhost)
                    self.committer.fail(error)
                    return

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Hold off checkpoints and hold the lock, with everything committed and the journal rolled."""
        with self._checkpoint_lock, self._synced():
            self.journal.roll()
            yield

    def snapshot(self, directory: str) -> str:
        """A consistent copy by hard links in `directory`, a data directory of its own; the vhost's root in it."""
        target = os.path.join(directory, "vhosts", os.path.basename(self.root))
        with self.quiet(), self._upkeep():
            self.disk.make_dirs(target)
            self.store.seal()
            files = link_store(self.disk, self.root, target)
            for queue, backing in self._sqlite_queues():
                if queue.durable:
                    backing.backup(os.path.join(target, os.path.relpath(backing.database.path, self.root)))
            self.metadata.backup(os.path.join(target, "meta.db"))
            self.disk.sync_all(target)  # a snapshot with a manifest is whole
            write_manifest(
                self.disk,
                target,
                {
                    "vhost": self.vhost,
                    "lsn": self.journal.synced_lsn,
                    "files": files,
                    "queues": {
                        queue.name: {
                            "uid": queue.uid,
                            "ready": len(queue.backing),
                            "unacknowledged": queue.backing.pending_count,
                            "pending": queue.backing.pending_pairs(),
                        }
                        for queue in self.queues.values()
                    },
                },
            )
        return target

    # -- closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """A clean stop: everything to segments, recovery terms written. A store that failed is only let go."""
        self._stop_thread()
        if self.committer.failed is not None:
            self._release()
            return
        try:
            with self._checkpoint_lock:
                if self.durability != "memory":
                    with self._upkeep():
                        self._checkpoint(seal=True, carry_below=0)
                        # What the checkpoint carried (reservations, state) is in a new file; the terms have it, too, but
                        # the file stays: the terms may be damaged, or the next start cut short after it took them.
                        self._roll()
                        with self.lock:
                            self._write_terms()
        finally:
            self.committer.close()
            self._release()

    def _write_terms(self) -> None:
        queues: dict[str, Any] = {}
        for queue in self.queues.values():
            if not queue.durable:
                continue
            streams: dict[str, Any] = {}
            if isinstance(queue.backing, SqliteQueue):
                streams["0"] = queue.backing.terminate()
                queues[str(queue.uid)] = {"next": queue.seqs.next, "streams": streams}
                continue
            levels = queue.backing.levels if isinstance(queue.backing, PriorityQueue) else [queue.backing]
            for number, (level, index) in enumerate(zip(levels, queue.indexes, strict=True)):
                state = level.terminate()
                if state:
                    segments = pack_segments(index)
                    low = min((number * index.segment_size for number in index.segments), default=0)
                    state.update(segments=segments, low=low)
                    streams[str(number)] = state
            queues[str(queue.uid)] = {"next": queue.seqs.next, "streams": streams}
        terms = {
            "journal": self.journal.buffer.file,
            "floor": self.journal.floor,
            "lsn": self.journal.next_lsn,
            "queues": queues,
            "ledger": self.ledger.dump(),
        }
        write_terms(self.disk, self.root, terms, self.store.save_terms())

    def abandon(self) -> None:
        """Let go without a clean stop, as a crash would; for tests."""
        self._stop_thread()
        self.committer.close()
        self._release()

    def _stop_thread(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _release(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self._close_databases()
            self._handles.close()
            self.journal.close()
            self.store.close()
            self.transient_store.close()
            self.metadata.close()
            self._directory_lock.release()


def _kind(record: QueueRecord) -> str:
    return str(record.arguments.get("x-backing-queue", "variable"))


def _has_levels(record: QueueRecord) -> bool:
    return "x-max-priority" in record.arguments


def _levels(record: QueueRecord) -> int:
    if not _has_levels(record):
        return 1
    most = record.arguments["x-max-priority"]
    assert isinstance(most, int)
    return max(1, min(most, 255)) + 1


def _target(queue: StoredQueue, entry: Entry) -> tuple[int, int, Overlay]:
    """What a publish record needs to know of one queue. Requires: the queue keeps its messages on disk."""
    if isinstance(queue.backing, SqliteQueue):
        return queue.backing.sid_of(entry), entry.seq, queue.backing.places()
    index = queue.indexes[min(entry.level, len(queue.indexes) - 1)]
    return index.sid, entry.seq, index.overlay
