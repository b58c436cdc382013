"""A vhost's files at rest: which queues there are, what is alive in them, and who reads which part of it.

At rest is a data directory that was closed, one that a crash left, and a snapshot. Nothing is opened for writing, locked
for longer than a look, erased or unlinked: the next start of the store finds everything as it was.

    the queues           meta.db; of a snapshot, its manifest, which also has those that are not durable
    what is alive        segments, and the journal from its floor on, replayed as a dirty start would
    who was handed out   what checkouts hold; of a snapshot, what its manifest calls pending
    what came back       after a clean stop the terms know exactly; after a crash everything counts as redelivered

A directory whose owner lives is not at rest and is refused: its files change while they are read.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from warren.errors import QueueNotFoundError, StoreFormatError, StoreLockedError, StorePathError
from warren.kernel.entry import Entry
from warren.kernel.journal_codec import CHECKOUT, read_publishes, replay
from warren.kernel.overlay import Overlay, row_pairs, split_rows
from warren.kernel.ranges import RangeSet
from warren.pipeline.errors import VhostNotFoundError
from warren.pipeline.options import SourceOptions
from warren.pipeline.parts import TRANSIENTS_FILE, StreamPart, pack_pairs
from warren.pipeline.queue_rows import connect_unchanged
from warren.pipeline.schema import unknown
from warren.storage.disk import Disk
from warren.storage.layout import HEADER_BYTES, hashed, journal_path, pairs_of, stream_id
from warren.storage.ledger import Ledger
from warren.storage.metadata import APPLICATION_ID, FORMAT_VERSION
from warren.storage.recovery import TORN_END, JournalReplay, replay_journal
from warren.storage.recovery_terms import TERMS_NAME, TermsDamaged, unpack_terms
from warren.storage.running_node import NODE_FILE, running_node
from warren.storage.segment import SegmentFiles
from warren.storage.settings import EngineSettings
from warren.storage.snapshot import MANIFEST, TRANSIENTS
from warren.storage.tagged_json import from_json

log = logging.getLogger("warren.pipeline")

_HIGHEST = 1 << 63
_SLOT_BYTES = 64
_SPAN_BYTES = 4 * 1024 * 1024  # one read of the journal


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """A queue as it was declared."""

    name: str
    uid: int
    durable: bool
    arguments: dict[str, Any]
    directory: str  # below the vhost's root
    levels: int = 1
    backing: str = "variable"

    @property
    def divided(self) -> bool:
        """Has each priority level a directory of its own?"""
        return bool(self.arguments.get("x-max-priority"))

    def sids(self) -> list[int]:
        return [stream_id(self.uid, level) for level in range(self.levels)]


@dataclass(slots=True, kw_only=True)
class StreamView:
    """One stream, or all streams of a queue in SQLite, with what the journal says of it."""

    queue: QueueView
    sid: int
    directory: str
    database: str | None
    segments: dict[int, int]  # number -> slots that it may have
    journal: list[Overlay]  # where in the journal its messages are
    transients: list[Overlay]  # the same for the file of those that were only in RAM
    acked: RangeSet
    unacked: RangeSet
    redelivered_below: int
    returned: RangeSet
    counts: dict[int, int]

    def rows(self, first: int = 0, stop: int = _HIGHEST) -> bytes:
        """Packed rows of [first, stop)."""
        return b"".join(overlay.rows_between(first, stop, len(overlay)) for overlay in self.journal + self.transients)

    def has_transients(self, first: int, stop: int) -> bool:
        return any(overlay.count_between(first, stop) for overlay in self.transients)


def owner_of(root: str) -> str | None:
    """The process id, as text, of the process that has a vhost's directory open; None: it is at rest."""
    try:
        handle = os.open(os.path.join(root, ".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(handle)


def broker_url(data_directory: str) -> str | None:
    """The HTTP address of the broker that says it runs on this directory."""
    try:
        with open(os.path.join(data_directory, NODE_FILE), encoding="utf-8") as file:
            url = json.load(file).get("http")
    except (OSError, ValueError, AttributeError):
        return None
    return url if isinstance(url, str) else None


def vhosts_of(data_directory: str) -> dict[str, str]:
    """The root directory of each vhost by its name. Raises StorePathError where there is no store."""
    parent = os.path.join(data_directory, "vhosts")
    found: dict[str, str] = {}
    try:
        names = sorted(os.listdir(parent))
    except FileNotFoundError:
        there = "is not there" if not os.path.exists(data_directory) else "holds no store: it has no directory vhosts/"
        raise StorePathError(
            f"{data_directory} {there}. Give a data directory of Warren, or a snapshot of one"
        ) from None
    except NotADirectoryError:
        raise StorePathError(f"{data_directory} is a file; give a data directory of Warren, or a snapshot") from None
    except PermissionError:
        raise StorePathError(f"{data_directory} cannot be read: permission denied. Read it as a user who may") from None
    for name in names:
        try:
            with open(os.path.join(parent, name, ".vhost"), encoding="utf-8") as file:
                found[file.read()] = os.path.join(parent, name)
        except (OSError, UnicodeDecodeError):
            continue
    if not found:
        raise StorePathError(f"{data_directory} holds no store: there is no vhost in it")
    return found


def open_view(data_directory: str, vhost: str = "/") -> VhostView:
    """A vhost of a data directory at rest. Raises VhostNotFoundError, StoreLockedError while its owner lives,
    StoreFormatError when a newer Warren wrote it, StorePathError where there is no store.

    >>> import tempfile, warren
    >>> with tempfile.TemporaryDirectory() as data:
    ...     with warren.open(data) as store:
    ...         _ = store.queue("orders").publish(b"hello")
    ...     [queue.name for queue in open_view(data).queues.values()]
    ['orders']
    """
    roots = vhosts_of(data_directory)
    root = roots.get(vhost)
    if root is None:
        raise VhostNotFoundError(f"{data_directory}: {unknown('vhost', vhost, sorted(roots))}")
    pid = owner_of(root)
    if pid is not None:
        url = broker_url(data_directory)
        node = running_node(data_directory)
        way = (
            f"read it through its broker: option url={url} with user and password, or token, in the place of path"
            if url is not None
            else "read the path of a Store.snapshot() that is taken there, or close it there"
        )
        raise StoreLockedError(
            f"{data_directory} is in use by {node or f'process {pid}'}, so its files change while they are read; {way}"
        )
    return VhostView(root)


class VhostView:
    """One vhost's directory, read as it is."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._disk = Disk()
        try:
            with open(os.path.join(root, ".vhost"), encoding="utf-8") as file:
                self.vhost = file.read()
        except FileNotFoundError:
            raise StorePathError(f"{root} is no directory of a vhost: it has no file .vhost") from None
        self.manifest = self._read_manifest()
        self.segment_size = EngineSettings().segment_entries
        self.boot = int(self.manifest.get("boot", 0)) if self.manifest is not None else 0
        self.ledger = Ledger()
        self.queues: dict[str, QueueView] = {queue.name: queue for queue in self._read_queues()}

    # -- queues ------------------------------------------------------------------------------------------------------

    def _read_manifest(self) -> dict[str, Any] | None:
        try:
            with open(os.path.join(self.root, MANIFEST), encoding="utf-8") as file:
                manifest: dict[str, Any] = json.load(file)
                return manifest
        except FileNotFoundError:
            return None

    def _read_queues(self) -> list[QueueView]:
        known = {queue.name: queue for queue in self._read_metadata()}
        if self.manifest is None:
            return [queue for queue in known.values() if queue.durable]
        queues = []
        for name, told in self.manifest["queues"].items():
            queue = known.get(name)
            if queue is None or queue.uid != told["uid"]:
                queue = self._queue(name, told["uid"], told.get("durable", False), told.get("arguments", {}))
            queues.append(queue)
        return queues

    def _read_metadata(self) -> list[QueueView]:
        path = os.path.join(self.root, "meta.db")
        try:
            db, copy = connect_unchanged(path)
        except FileNotFoundError:
            raise StorePathError(f"{self.root} is no store: it has no meta.db, which names the queues") from None
        try:
            with closing(db):
                self._check_format(db, path)
                rows = db.execute("SELECT name, uid, durable, arguments FROM queues ORDER BY uid").fetchall()
                size = db.execute("SELECT value FROM settings WHERE key = 'segment_entries'").fetchone()
        except sqlite3.DatabaseError as error:
            raise StoreFormatError(f"{path} cannot be read: {error}. Bring it back from a snapshot") from error
        finally:
            _clean(copy)
        if size is not None:
            self.segment_size = int(from_json(size[0]))
        return [self._queue(name, uid, bool(durable), from_json(text)) for name, uid, durable, text in rows]

    @staticmethod
    def _check_format(db: sqlite3.Connection, path: str) -> None:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION_ID:
            raise StoreFormatError(f"{path} is no file of Warren: its application id is {application:#x}")
        if version > FORMAT_VERSION:
            raise StoreFormatError(
                f"{path} has format version {version}; this Warren reads up to version {FORMAT_VERSION}. "
                "Read it with the Warren that wrote it, or a newer one"
            )

    def _queue(self, name: str, uid: int, durable: bool, arguments: dict[str, Any]) -> QueueView:
        most = arguments.get("x-max-priority")
        return QueueView(
            name=name,
            uid=uid,
            durable=durable,
            arguments=arguments,
            directory=os.path.join("queues", f"{hashed(name)}-{uid}"),
            levels=min(most, 255) + 1 if isinstance(most, int) else 1,
            backing=str(arguments.get("x-backing-queue", "variable")),
        )

    def chosen(self, options: SourceOptions) -> list[QueueView]:
        """The queues that are asked for. Raises QueueNotFoundError where there is none."""
        found = [queue for queue in self.queues.values() if options.takes(queue.name)]
        if not found and options.queue is not None:
            raise QueueNotFoundError(f"in vhost {self.vhost!r} {unknown('queue', options.queue, sorted(self.queues))}")
        if not found and options.queue_pattern is not None:
            names = ", ".join(sorted(self.queues)) or "none"
            raise QueueNotFoundError(
                f"no queue of vhost {self.vhost!r} has a name that {options.queue_pattern!r} matches as a whole; "
                f"there are {names}"
            )
        return found

    # -- what is alive -----------------------------------------------------------------------------------------------

    @cached_property
    def terms(self) -> dict[str, Any] | None:
        """What a clean stop wrote down, if the last one was clean."""
        path = os.path.join(self.root, TERMS_NAME)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        try:
            return unpack_terms(data, path).vhost
        except TermsDamaged:
            log.warning("%s: recovery terms do not check out; everything is read instead", self.root)
            return None

    @cached_property
    def journal(self) -> JournalReplay:
        """What the journal says, from its floor on."""

        def report(path: str, offset: int, length: int, seq: int, why: str) -> None:
            level = logging.DEBUG if why == TORN_END else logging.WARNING
            log.log(level, "%s at %d, %d bytes: %s", os.path.relpath(path, self.root), offset, length, why)

        sids = [sid for queue in self.queues.values() for sid in queue.sids()]
        directory = os.path.join(self.root, "journal")
        return replay_journal(self._disk, directory, sids, self.ledger, report, lambda done, total: None)

    @cached_property
    def transients(self) -> dict[int, Overlay]:
        """By stream, what a snapshot has of messages that were only in RAM."""
        try:
            data = self._disk.read(os.path.join(self.root, TRANSIENTS))
        except FileNotFoundError:
            return {}
        overlays = {sid: Overlay() for queue in self.queues.values() for sid in queue.sids()}
        replay(data, HEADER_BYTES, TRANSIENTS_FILE, overlays, {}, {}, {}, [], [])
        return overlays

    def streams(self, queue: QueueView) -> list[StreamView]:
        """The streams of a queue."""
        if queue.backing == "sqlite":
            return [self._stream(queue, queue.sids(), queue.directory, os.path.join(queue.directory, "queue.db"))]
        return [
            self._stream(queue, [sid], os.path.join(queue.directory, f"p{level}") if queue.divided else queue.directory)
            for level, sid in enumerate(queue.sids())
        ]

    def _stream(self, queue: QueueView, sids: list[int], directory: str, database: str | None = None) -> StreamView:
        journal = self.journal
        acked = RangeSet()
        counts: dict[int, int] = {}
        for sid in sids:
            if sid in journal.acks:
                acked.add_pairs(journal.acks[sid].pairs())
            if self.manifest is not None:  # what the broker knew and no file says
                acked.add_pairs(self.manifest["queues"][queue.name].get("forgotten", {}).get(str(sid), []))
            counts.update(journal.counts.get(sid, {}))
        if database is not None and not os.path.exists(os.path.join(self.root, database)):
            database = None  # nothing was ever committed to it
        below, returned = self._history(queue, sids[0], counts)
        return StreamView(
            queue=queue,
            sid=sids[0],
            directory=directory,
            database=database,
            segments=self._segments(directory) if database is None else {},
            journal=[journal.overlays[sid] for sid in sids],
            transients=[self.transients[sid] for sid in sids if sid in self.transients],
            acked=acked,
            unacked=self._handed_out(queue, sids),
            redelivered_below=below,
            returned=returned,
            counts=counts,
        )

    def _history(self, queue: QueueView, sid: int, counts: dict[int, int]) -> tuple[int, RangeSet]:
        """Below which seq_id all messages were handed out before, and which of the others; adds to the counts."""
        if self.manifest is not None:
            told = self.manifest["queues"][queue.name]
            returned = RangeSet(told.get("returned", []))
            returned.add_pairs(told["pending"])
            return int(told.get("redelivered_below", 0)), returned
        if self.terms is None:
            return _HIGHEST, RangeSet()
        streams = self.terms["queues"].get(str(queue.uid), {}).get("streams", {})
        state = streams.get(str(sid & 0xFF), {})
        for seq, count in state.get("counts", {}).items():
            counts.setdefault(int(seq), count)
        return int(state.get("redelivered_below", 0)), RangeSet(state.get("returned", []))

    def _handed_out(self, queue: QueueView, sids: list[int]) -> RangeSet:
        """What waits for an ack: of a snapshot, everything that did; else what checkouts hold."""
        out = RangeSet()
        if self.manifest is not None:
            out.add_pairs(self.manifest["queues"][queue.name]["pending"])
        for value in self.ledger.table(CHECKOUT).values():
            for sid in sids:
                out.add_pairs(value["ranges"].get(str(sid), []))
        return out

    def next_seq_id(self, queue: QueueView) -> int | None:
        """The seq_id that the next message would get, where something says it."""
        if self.manifest is not None:
            told = self.manifest["queues"][queue.name].get("next_seq_id")
            return None if told is None else int(told)
        if self.terms is not None and str(queue.uid) in self.terms["queues"]:
            return int(self.terms["queues"][str(queue.uid)]["next"])
        return None

    def stored_ids(self) -> set[bytes]:
        """What live messages refer to in the persistent message store."""
        found: set[bytes] = set()
        for queue in self.queues.values():
            for stream in self.streams(queue):
                found.update(self._stored_in_segments(stream))
                for overlay in stream.journal:
                    found.update(self._stored_in_journal(overlay))
        return found

    def _stored_in_segments(self, stream: StreamView) -> Iterator[bytes]:
        files = SegmentFiles(self._disk, os.path.join(self.root, stream.directory), stream.sid, self.segment_size)
        for number in stream.segments:
            first = number * self.segment_size
            segment = files.recover(number, self.boot, stream.acked, lambda *line: None)
            journaled = RangeSet(row_pairs(stream.rows(first, first + self.segment_size)))
            for slot, msg_id in segment.refs:
                if segment.segment.is_live(slot) and first + slot not in journaled:
                    yield msg_id

    def _stored_in_journal(self, overlay: Overlay) -> Iterator[bytes]:
        directory = os.path.join(self.root, "journal")
        for _, number, start, stop, rows in split_rows(overlay.unmeasured_rows(), self.segment_size, _SPAN_BYTES):
            with open(journal_path(directory, number), "rb") as file:
                data = os.pread(file.fileno(), stop - start, start)
            entries: list[Entry] = []
            read_publishes(rows, data, start, entries, [])
            yield from (entry.msg_id for entry in entries if entry.msg_id is not None)

    def _segments(self, directory: str) -> dict[int, int]:
        """The segments of a stream that have an index file, and how many slots that has room for."""
        found: dict[int, int] = {}
        try:
            entries = list(os.scandir(os.path.join(self.root, directory)))
        except FileNotFoundError:
            return found
        for entry in entries:
            stem, _, suffix = entry.name.partition(".")
            if suffix == "qi" and stem.isdigit():
                slots = max(0, entry.stat().st_size - HEADER_BYTES) // _SLOT_BYTES
                found[int(stem)] = min(slots, self.segment_size)
        return found

    # -- parts -------------------------------------------------------------------------------------------------------

    def parts(self, options: SourceOptions | Mapping[str, str]) -> list[StreamPart]:
        """What to read, cut so that a part has up to `max_records` messages, and that there are about `min_partitions`."""
        if not isinstance(options, SourceOptions):
            options = SourceOptions.parse(options, place_given=True)
        streams = [stream for queue in self.chosen(options) for stream in self.streams(queue)]
        units = [self._units(stream, options) for stream in streams]
        total = sum(weight for unit in units for _, weight in unit)
        target = max(1, min(options.max_records, -(-total // options.min_partitions)))
        return [
            self._part(stream, options, first, stop)
            for stream, unit in zip(streams, units, strict=True)
            for cut in _cut(unit, self.segment_size, target, options.max_records)
            for first, stop in self._slices(stream, options, *cut)
        ]

    def _slices(
        self, stream: StreamView, options: SourceOptions, first: int, stop: int, weight: int
    ) -> list[tuple[int, int]]:
        """[first, stop) as it is, or a segment with more messages than a part may have in slices of as many seq_ids."""
        most = options.max_records
        if weight <= most:
            return [(first, stop)]
        end = stop
        if stream.database is None:  # a segment that is not full ends before the next one begins
            rows = pairs_of(row_pairs(stream.rows(first, stop)))
            slots = stream.segments.get(first // self.segment_size, 0)
            end = max([first + slots, *(begin + count for begin, count in rows)])
        first = max(first, options.from_seq)
        stop = stop if options.to_seq is None else min(stop, options.to_seq)
        end = min(end, stop)
        return [(begin, min(begin + most, stop)) for begin in range(first, end, most)]

    def _units(self, stream: StreamView, options: SourceOptions) -> list[tuple[int, int]]:
        """The segments of a stream that may have something that is asked for, also those that are only in the journal or
        in SQLite, with about how many messages they have; sorted."""
        size = self.segment_size
        weights = dict(stream.segments)
        for first, count in pairs_of(row_pairs(stream.rows())):
            for number in range(first // size, (first + count - 1) // size + 1):
                inside = min(first + count, (number + 1) * size) - max(first, number * size)
                weights[number] = weights.get(number, 0) + inside
        if stream.database is not None:
            for number, count in self._database_units(stream.database).items():
                weights[number] = weights.get(number, 0) + count
        stop = options.to_seq if options.to_seq is not None else _HIGHEST
        return sorted(
            (number, weight)
            for number, weight in weights.items()
            if (number + 1) * size > options.from_seq
            and number * size < stop
            and (options.state != "unacked" or stream.unacked.count_in(number * size, (number + 1) * size))
        )

    def _database_units(self, database: str) -> dict[int, int]:
        db, copy = connect_unchanged(os.path.join(self.root, database))
        try:
            with closing(db):
                return dict(db.execute(f"SELECT seq / {self.segment_size}, count(*) FROM messages GROUP BY 1"))
        except sqlite3.DatabaseError as error:
            raise StoreFormatError(
                f"{os.path.join(self.root, database)} cannot be read: {error}. `warren.open` saves what can be read of it"
            ) from error
        finally:
            _clean(copy)

    def _part(self, stream: StreamView, options: SourceOptions, first: int, stop: int) -> StreamPart:
        """The messages of a stream with first <= seq_id < stop."""
        size = self.segment_size
        return StreamPart(
            vhost=self.vhost,
            queue=stream.queue.name,
            sid=stream.sid,
            directory=stream.directory,
            segment_size=size,
            boot=self.boot,
            segments=tuple(
                number for number in sorted(stream.segments) if first < (number + 1) * size and number * size < stop
            ),
            acked=pack_pairs(stream.acked.pairs(first, stop)),
            rows=stream.rows(first, stop),
            unacked=pack_pairs(stream.unacked.pairs(first, stop)),
            redelivered_below=stream.redelivered_below,
            returned=pack_pairs(stream.returned.pairs(first, stop)),
            counts=tuple((seq, count) for seq, count in sorted(stream.counts.items()) if first <= seq < stop),
            from_seq=max(first, options.from_seq),
            to_seq=stop if options.to_seq is None else min(stop, options.to_seq),
            since=options.since,
            until=options.until,
            state=options.state,
            transients=TRANSIENTS if stream.has_transients(first, stop) else None,
            database=stream.database,
        )


def _cut(units: list[tuple[int, int]], size: int, target: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of seq_ids that cover all units, with their weight: as many as it takes for about `target` messages each, as
    even as units allow, and none with more than `most` unless a single unit has."""
    total = sum(weight for _, weight in units)
    count = -(-total // target)
    first: int | None = None
    last = weight = done = cuts = 0
    for number, more in units:
        is_due = (2 * done + more) * count > 2 * (
            cuts + 1
        ) * total  # more than half of this unit is behind the next cut
        if first is not None and (is_due or weight + more > most):
            yield first * size, (last + 1) * size, weight
            first, weight = None, 0
            cuts += 1
        if first is None:
            first = number
        last = number
        weight += more
        done += more
    if first is not None:
        yield first * size, (last + 1) * size, weight


def estimated_rows(part: StreamPart) -> int:
    """How many messages a part may have, by what it says alone."""
    if part.only is not None:
        return sum(count for _, count in pairs_of(list(struct.unpack(f"<{len(part.only) // 8}Q", part.only))))
    if part.database is not None and part.to_seq is not None:
        return max(0, part.to_seq - part.from_seq)
    return len(part.segments) * part.segment_size + len(part.rows) // 24


def _clean(copy: tempfile.TemporaryDirectory[str] | None) -> None:
    if copy is not None:
        copy.cleanup()
