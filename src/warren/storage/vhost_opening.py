"""How a vhost's store begins: directory, lock, metadata, then everything that a clean or a dirty start has to find.

`recovery.py` knows how to read files; this module knows what for: it makes the journal, the message stores and the queues
out of what was read, and begins a new journal file.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from warren.errors import (
    DiskFullError,
    DurabilityError,
    StoreFailedError,
    StorePathError,
)
from warren.kernel.journal_codec import CHECKOUT
from warren.kernel.ranges import RangeSet
from warren.storage.backing_queue import BackingQueue
from warren.storage.committer import FULL, Committer
from warren.storage.context import QueueContext
from warren.storage.disk import Disk
from warren.storage.file_cache import FileCache
from warren.storage.journal import Journal, read_floor
from warren.storage.layout import hashed, stream_id
from warren.storage.ledger import Ledger
from warren.storage.lock import DirectoryLock
from warren.storage.message_store import MessageStore
from warren.storage.metadata import Metadata, QueueRecord
from warren.storage.priority_queue import PriorityQueue
from warren.storage.producers import Producers
from warren.storage.quarantine import Quarantine
from warren.storage.queue_database import QueueDatabase
from warren.storage.queue_index import QueueIndex
from warren.storage.rates import MemoryMonitor
from warren.storage.recovery import (
    TORN_END,
    JournalReplay,
    ScannedSegment,
    ScanSegments,
    StreamRecovery,
    recover_stream,
    replay_journal,
    scan_segment,
    store_references,
    stream_scans,
)
from warren.storage.recovery_terms import TERMS_NAME, erase_terms, read_terms, segment_numbers, unpack_segments
from warren.storage.segment import Report, SegmentFiles
from warren.storage.seq_ids import SeqIds
from warren.storage.settings import EngineSettings
from warren.storage.sqlite_queue import SqliteQueue
from warren.storage.store_format import TermsError
from warren.storage.store_index import LmdbIndex, StoreIndex, TableIndex
from warren.storage.stored_queue import StoredQueue, backing_kind, has_levels, level_count
from warren.storage.variable_queue import VariableQueue
from warren.storage.volatile_queue import VolatileQueue

log = logging.getLogger("warren.storage")

DURABILITIES = ("fsync", "os", "memory")
MEMORY_MARKER = ".memory"  # the directory was last used with durability "memory"


class VhostOpening:
    """The part of a vhost's store that finds out what is on disk. `VhostStore` is the rest."""

    def __init__(
        self,
        data_directory: str,
        vhost: str,
        *,
        durability: str,
        settings: EngineSettings | None,
        disk: Disk | None,
        debug: bool,
        clock: Callable[[], float],
        progress: Callable[[str, int, int], None] | None,
        scan: ScanSegments | None = None,
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
        self._report: Report = self.report  # one bound method for all queues
        self._debug = debug
        self._clock = clock
        self._progress = progress or (lambda what, done, total: None)
        self._scan = scan  # who reads all segments of a dirty start; None: this process, one after the other
        with self._open_errors():
            self._make_root(data_directory)
            self._directory_lock = DirectoryLock(os.path.join(self.root, ".lock"))
            try:
                self._open()
            except BaseException:
                self._directory_lock.release()
                raise

    @contextlib.contextmanager
    def _open_errors(self) -> Iterator[None]:
        """A start that failed has promised nothing, and may be repeated."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise DiskFullError(f"no room to open {self.root}: {error}; free some space, then try again") from error
            raise StoreFailedError(f"cannot open {self.root}: {error}. Nothing is lost by that; try again") from error

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
        except FileNotFoundError as error:  # /proc, /sys: they take no new names
            raise StorePathError(
                f"{data_directory} cannot be made: {error.strerror}. Give a directory on a file system that takes new ones"
            ) from error
        except PermissionError as error:
            raise StorePathError(
                f"cannot write to {data_directory}: permission denied. Give a directory that this user may write to"
            ) from error
        name = os.path.join(self.root, ".vhost")
        if not self.disk.exists(name):
            self.disk.replace(name, self.vhost.encode())

    def _open(self) -> None:
        self.quarantine = Quarantine(self.disk, self.root, self._log_damage)
        self.metadata = Metadata(os.path.join(self.root, "meta.db"))
        try:
            self._keep_segment_size()
            self._recover(self.settings)
        except BaseException:
            self._close_files()
            raise

    def _close_files(self) -> None:
        """Let go of all files: whoever tries again, in this process, needs them, and as many descriptors."""
        self._close_databases()
        for name in ("_handles", "journal", "store", "transient_store"):
            opened = getattr(self, name, None)  # a start may fail before it is there
            if opened is not None:
                opened.close()
        self.metadata.close()

    def _keep_segment_size(self) -> None:
        """The number of seq_ids in a segment is fixed when the vhost is made: it says where every slot is."""
        fixed = self.metadata.get("segment_entries")
        if fixed is None:
            self.metadata.set("segment_entries", self.settings.segment_entries)
        elif fixed != self.settings.segment_entries:
            log.warning(
                "segments of %s have %s entries, not %s; that cannot change",
                self.root,
                fixed,
                self.settings.segment_entries,
            )
            self.settings = replace(self.settings, segment_entries=fixed)

    def _recover(self, settings: EngineSettings) -> None:
        boot = self.metadata.boot()
        self.boot = boot  # the number of this start; slots of transient messages have it
        self._handles = FileCache(self.disk)
        self.ledger = Ledger()
        journal_directory = os.path.join(self.root, "journal")
        records = [record for record in self.metadata.queues() if record.durable]
        self._prepare_memory(records)
        taken = self._take_terms(records)
        if taken is not None:
            self.store = taken[1]
        indexes: dict[int, QueueIndex] = {}
        replayed: JournalReplay | None = None
        if taken is None:
            sids = [stream_id(record.uid, level) for record in records for level in range(level_count(record))]
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
            for level in range(level_count(record)) if backing_kind(record) != "sqlite" else ():
                indexes[stream_id(record.uid, level)] = self._index(record, level)
        found: dict[int, StreamRecovery] = {}
        if replayed is not None:
            found = self._recover_streams(indexes, replayed)
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
            lambda: self.committer.full,
            lambda error: self.committer.trouble(error),
        )
        if replayed is not None and self.store.missing:
            self._drop_missing(indexes, found)
        for record in records:
            if backing_kind(record) == "sqlite":
                self._start_sqlite_queue(record, taken[0] if taken is not None else None, replayed)
                continue
            streams = {level: indexes[stream_id(record.uid, level)] for level in range(level_count(record))}
            if taken is not None:
                self._restore_queue(record, streams, taken[0]["queues"][str(record.uid)])
            else:
                assert replayed is not None
                self._recover_queue(record, streams, found, replayed)
        self.clean_start = taken is not None
        if replayed is not None and replayed.last_file >= 0:
            # What was read may be in the page cache only: names above all, of segments made or unlinked. (For contents
            # see `recovery.py`.) From here on a checkpoint relies on it.
            self.disk.sync_all(self.root)
        self.committer = Committer(self.lock, self.disk, self.root, self.journal, self.store, settings.reserve_bytes)
        self.ledger.attach(self.journal)
        self.producers = Producers(self.ledger, settings.producers_per_queue, {record.uid for record in records})
        self._lost_and_found()
        self._begin()

    def _recover_streams(self, indexes: dict[int, QueueIndex], replayed: JournalReplay) -> dict[int, StreamRecovery]:
        """After a dirty stop: what is in the segments."""
        everything: Iterator[ScannedSegment] | None = None
        if self._scan is not None:
            scans = [scan for index in indexes.values() for scan in stream_scans(index, replayed, self.boot)]
            everything = iter(self._scan(scans))
        found: dict[int, StreamRecovery] = {}
        for number, (sid, index) in enumerate(indexes.items()):
            scanned: Iterator[ScannedSegment]
            if everything is None:
                scanned = (scan_segment(self.disk, scan) for scan in stream_scans(index, replayed, self.boot))
            else:
                scanned = itertools.islice(everything, len(index.files.numbers()))
            found[sid] = recover_stream(self.disk, self.journal.directory, index, replayed, scanned, self.report)
            self._progress("queues", number + 1, len(indexes))
        return found

    def _prepare_memory(self, records: list[QueueRecord]) -> None:
        """A directory that was last used with durability 'memory' holds nothing that counts: whatever was paged out goes.
        One that holds persistent messages is not opened in that way."""
        marker = os.path.join(self.root, MEMORY_MARKER)
        if self.disk.exists(marker):
            for part in ("queues", "journal"):
                self.disk.remove_tree(os.path.join(self.root, part))
                self.disk.make_dirs(os.path.join(self.root, part))
            if self.durability != "memory":
                self.disk.unlink(marker)
                self.disk.sync_dir(self.root)
        elif self.durability == "memory":
            self._refuse_memory(records)
            self.disk.replace(marker, b"")

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
        return QueueIndex(
            self.disk,
            self._stream_directory(record, level),
            stream_id(record.uid, level),
            segment_size=self.settings.segment_entries,
            boot=self.boot,
            journal=self.journal,
            journal_directory=self.journal.directory,
            handles=self._handles,
            report=self._report,
        )

    def _stream_directory(self, record: QueueRecord, level: int) -> str:
        directory = self._queue_directory(record)
        return os.path.join(directory, f"p{level}") if has_levels(record) else directory

    def _queue_directory(self, record: QueueRecord) -> str:
        return os.path.join(self.root, "queues", f"{hashed(record.name)}-{record.uid}")

    def _take_terms(self, records: list[QueueRecord]) -> tuple[dict[str, Any], MessageStore] | None:
        """What a clean stop left, and the message store as it was then; None: the start is a dirty one."""
        taken = read_terms(self.disk, self.root, self.report)
        if taken is not None:
            self._check_segments(records, taken.vhost)
        erase_terms(self.disk, self.root)
        if taken is None:
            return None
        path = os.path.join(self.root, "msg_store_persistent")
        try:
            store = MessageStore.open_clean(
                self.disk,
                path,
                index=self._store_index(path),
                sync=self.durability == "fsync",
                terms=taken.store,
                file_size_limit=self.settings.store_file_bytes,
                garbage_fraction=self.settings.garbage_fraction,
            )
        except TermsError as error:
            log.warning("the message store does not fit the terms of the last stop; it is read again: %s", error)
            return None
        return taken.vhost, store

    def _check_segments(self, records: list[QueueRecord], terms: dict[str, Any]) -> None:
        """After a clean stop no segment is read until its messages are due: a format that this Warren does not know must
        not come to light only then. The header of a segment's first file speaks for all three."""
        for record in records:
            for level in range(level_count(record)) if backing_kind(record) != "sqlite" else ():
                numbers = segment_numbers(terms["queues"][str(record.uid)]["streams"][str(level)]["segments"])
                if not numbers:  # as most of thousands: their directory's name is not worth a hash
                    continue
                size = self.settings.segment_entries
                files = SegmentFiles(
                    self.disk, self._stream_directory(record, level), stream_id(record.uid, level), size
                )
                for number in numbers:
                    files.check_header(number, self.report)

    def _open_stores(self, settings: EngineSettings, store: MessageStore | None, found: list[StreamRecovery]) -> None:
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
            return LmdbIndex(os.path.join(path, "index.lmdb"), self._index_failed)
        return TableIndex()

    def _index_failed(self, error: Exception) -> None:
        """What was changed since its last commit is gone: only recovery, which counts anew, helps."""
        committer: Committer | None = getattr(self, "committer", None)
        if committer is not None:  # else the start fails
            committer.fail(error)

    def _drop_missing(self, indexes: dict[int, QueueIndex], found: dict[int, StreamRecovery]) -> None:
        """Messages whose stored body is not there."""
        missing = set(self.store.missing)
        for sid, stream in found.items():
            for seq, msg_id in stream.stored:
                if msg_id in missing:
                    self.report(self.store.path, 0, 0, seq, f"body {msg_id.hex()} is missing", sid)
                    entries, _ = indexes[sid].load([seq, 1])
                    stream.body_bytes -= sum(entry.body_size for entry in entries)
                    stream.count -= 1
                    stream.counts.pop(seq, None)
                    indexes[sid].lose(seq)
            stream.stored = [(seq, msg_id) for seq, msg_id in stream.stored if msg_id not in missing]

    def _leased(self, sid: int) -> list[int]:
        """What open checkouts hold of a stream."""
        # In `os` durability a power loss may take the end of a checkout and leave the next one, of the same messages.
        leased = RangeSet()
        for value in self.ledger.table(CHECKOUT).values():
            leased.add_pairs(value["ranges"].get(str(sid), []))
        return leased.pairs()

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
                    "bytes": stream.body_bytes,
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
            if backing_kind(record) == "volatile":
                level = VolatileQueue(index.sid, seqs, self.context)
            else:
                level = VariableQueue(index, seqs, self.context, record.durable and self.durability != "memory")
            level.init(states[number] if states is not None else None)
            levels.append(level)
        backing = levels[0]
        if has_levels(record):
            backing = PriorityQueue(levels)
            backing.init(None)
        # The path is among the largest things that an idle queue has: there is one of it.
        directory = self._queue_directory(record) if has_levels(record) else indexes[0].files.directory
        queue = StoredQueue(record, backing, seqs, indexes, directory)
        self.queues[record.name] = queue
        return queue

    def _start_sqlite_queue(
        self, record: QueueRecord, terms: dict[str, Any] | None, replayed: JournalReplay | None
    ) -> None:
        """From the terms of a clean stop, or with what the journal says after a dirty one."""
        mine = terms["queues"][str(record.uid)] if terms is not None else None
        database = self._database(record, mine["streams"]["0"]["digest"] if mine is not None else None)
        sids = [stream_id(record.uid, level) for level in range(level_count(record))]
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
        backing = SqliteQueue(database, record.uid, level_count(record), seqs, self.context, safe)
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
        self._empty_trash()

    def _empty_trash(self, name: str = "") -> None:
        """All of it at a start, later only what is called `name`: another delete may be about to put something there, and
        would find the directory gone. Best effort: the next start tries again."""
        with contextlib.suppress(OSError):
            self.disk.remove_tree(os.path.join(self.root, "trash", name))

    def _log_damage(self, line: dict[str, object]) -> None:
        # After a kill the journal ends in the middle of what nobody was promised: nothing to be alarmed about.
        level = logging.INFO if line["why"] == TORN_END else logging.WARNING
        log.log(level, "damage in %s at %s, %s bytes: %s", line["file"], line["offset"], line["length"], line["why"])

    def report(self, path: str, offset: int, length: int, seq: int, why: str, sid: int = -1) -> None:
        """Bytes that cannot be used go to quarantine."""
        self.quarantine.report(path, offset, length, seq, why, sid)
