"""Checks every file of a vhost against its checksums and the files against each other, and changes nothing.

No store is opened: files are read, one after the other, as a dirty start would read them, and bodies too. So this works
on a store that crashed, on a snapshot and on a copy. Requires: no process owns the directory.

What is checked, by kind of file:

    journal/FLOOR       CRC
    journal/<n>.wal     header; every block and record; files below the floor are dead and only counted
    <segment>.qi        header; every slot; the trailer
    <segment>.qs        header; the body of every persistent slot
    <segment>.qa        header; every batch
    <n>.<g>.rdq, .rdh   header; every record; the hint file says the same as the data file
    recovery            CRC, and the message store's terms in it
    queue.db            of a queue in SQLite: SQLite's own check and every row, on a copy
    meta.db             SQLite's own check, on a copy; it has no checksums of its own
    across files        every live message that refers to the message store finds its body there

A finding is `harmless` where a crash leaves it, by design, and nobody was promised the bytes: the torn end of a
journal file, an upload that was cut off. Everything else is damage, also where it costs no message, because a
disk that lost a hint may lose more. What a start makes of each kind of damage stands in docs/format.md.

The work is divided, because a store can be larger than one machine is patient: `plan_verification` reads what must be
read as a whole (names, metadata, terms, journal) and lists a check for every other file; `check_file` does one of them
and needs nothing but that file; `verify_vhost` does all of them, one after the other. `warren spark verify` has them
done by executors. Both name the same places in the same words.
"""

from __future__ import annotations

import os
import re
import sqlite3
import struct
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field

from warren.errors import StorePathError, WarrenError
from warren.kernel.checksum import crc32c
from warren.kernel.entry import IN_STORE, Entry
from warren.kernel.journal_codec import BLOCK_HEADER_BYTES, read_publishes, replay
from warren.kernel.overlay import Overlay, row_pairs, split_rows
from warren.kernel.ranges import RangeSet
from warren.kernel.store_table import HINT_ROW_BYTES
from warren.storage.disk import Disk
from warren.storage.journal import list_files, read_floor
from warren.storage.layout import (
    ACKS_MAGIC,
    BODIES_MAGIC,
    HEADER_BYTES,
    INDEX_MAGIC,
    JOURNAL_MAGIC,
    hashed,
    journal_path,
    stream_id,
    unpack_header,
)
from warren.storage.metadata import Metadata, QueueRecord
from warren.storage.recovery_terms import TERMS_NAME, TermsDamaged, unpack_terms
from warren.storage.settings import EngineSettings
from warren.storage.store_format import (
    DATA_SUFFIX,
    HINT_SUFFIX,
    PART_SUFFIX,
    TermsError,
    decode_terms,
    file_name,
    parse_name,
)
from warren.storage.verify_files import (
    Checked,
    Checker,
    DatabaseCheck,
    DataFileCheck,
    FileCheck,
    Finding,
    Meter,
    Progress,
    Reference,
    SegmentCheck,
    check_file,
)

__all__ = [
    "Finding",
    "Progress",
    "Verification",
    "VerificationPlan",
    "plan_verification",
    "verify_vhost",
    "vhost_roots",
]

_QUEUE_DIRECTORY = re.compile(r"[0-9a-f]{24}-([0-9]+)")
_LEVEL_DIRECTORY = re.compile(r"p([0-9]+)")
_SEGMENT_FILE = re.compile(r"([0-9]+)\.(qi|qs|qa)")
_BLOCK = struct.Struct("<4s12xQ4xI")  # magic, length of the records, CRC of a block header


@dataclass(slots=True)
class Verification:
    """What was found in one vhost."""

    root: str
    vhost: str
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # files, bytes, records, slots, bodies, ...

    @property
    def damage(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.harmless]


@dataclass(slots=True)
class VerificationPlan:
    """A vhost whose journal has been read, and what is left to do."""

    root: str
    vhost: str
    opening: Checked  # of what was read as a whole
    checks: list[FileCheck]
    total_bytes: int


def vhost_roots(data_directory: str) -> list[str]:
    """The directories of all vhosts. Raises StorePathError where there is no store."""
    parent = os.path.join(data_directory, "vhosts")
    disk = Disk()
    if os.path.isfile(data_directory):
        raise StorePathError(f"{data_directory} is a file; give a data directory of Warren, or a snapshot of one")
    roots = [os.path.join(parent, name) for name in disk.listdir(parent) if disk.is_dir(os.path.join(parent, name))]
    if not roots:
        raise StorePathError(f"{data_directory} holds no store: there is no vhosts/ with something in it")
    return roots


def verify_vhost(root: str, progress: Progress | None = None) -> Verification:
    """Check everything below a vhost's directory. Raises StoreFormatError for files that a newer Warren wrote."""
    meter = Meter(progress)
    plan = _Planner(root, meter).run()
    whole = plan.opening
    known: set[bytes] = set()
    for check in plan.checks:
        checked = check_file(root, check, meter)
        whole.findings += checked.findings
        whole.counts += checked.counts
        whole.references += checked.references
        for rows in checked.records:
            known.update(rows[at : at + 16] for at in range(0, len(rows), HINT_ROW_BYTES))
    whole.counts["references to stored bodies"] = len(whole.references)
    whole.findings += [each.missing() for each in whole.references if each.msg_id not in known]
    meter.finished()
    return Verification(root, plan.vhost, whole.findings, whole.counts)


def plan_verification(root: str) -> VerificationPlan:
    """Read what has to be read as a whole; the rest is in `checks`. Raises as `verify_vhost`."""
    return _Planner(root, Meter()).run()


@dataclass(slots=True)
class _Stream:
    """One queue, or one priority level of it."""

    sid: int
    directory: str
    queue: str | None
    overlay: Overlay = field(default_factory=Overlay)


class _Planner(Checker):
    def __init__(self, root: str, meter: Meter) -> None:
        super().__init__(root, meter)
        self._acks: dict[int, RangeSet] = {}
        self._streams: dict[int, _Stream] = {}
        self._checks: list[FileCheck] = []
        self._vhost = os.path.basename(root)

    def run(self) -> VerificationPlan:
        parts = ("journal", "queues", "msg_store_persistent")
        files = [path for part in parts for path in self._disk.walk(os.path.join(self._root, part))]
        files += [path for name in ("meta.db", TERMS_NAME) if self._disk.exists(path := os.path.join(self._root, name))]
        self._meter.total = sum(self._disk.size(path) for path in files)
        self._name()
        records = self._metadata()
        self._find_streams(records)
        self._terms()
        self._journal()
        for stream in list(self._streams.values()):
            self._segments(stream)
        self._databases()
        self._message_store()
        self._quarantine()
        return VerificationPlan(self._root, self._vhost, self.checked, self._checks, self._meter.total)

    # -- name and metadata -------------------------------------------------------------------------------------------

    def _name(self) -> None:
        path = os.path.join(self._root, ".vhost")
        try:
            name = self._disk.read(path).decode(errors="replace")
        except FileNotFoundError:
            self._found(path, 0, 0, "the file with the vhost's name is missing")
            return
        if hashed(name) != os.path.basename(self._root):
            self._found(path, 0, len(name), f"the name {name!r} does not belong to this directory")
        self._vhost = name

    def _metadata(self) -> list[QueueRecord]:
        """The queues."""
        path = os.path.join(self._root, "meta.db")
        if not self._disk.exists(path):
            self._found(path, 0, 0, "the metadata are missing; the queues are those that have a directory")
            return []
        with tempfile.TemporaryDirectory() as directory:
            self._copy(path, os.path.join(directory, "meta.db"))
            try:
                with closing(sqlite3.connect(os.path.join(directory, "meta.db"))) as db:
                    [(word,), *_] = db.execute("PRAGMA integrity_check").fetchall()
                if word != "ok":
                    self._found(path, 0, self._disk.size(path), f"SQLite finds: {word}")
                with closing(Metadata(os.path.join(directory, "meta.db"))) as metadata:
                    return metadata.queues()
            except sqlite3.DatabaseError as error:
                self._found(path, 0, self._disk.size(path), f"the metadata cannot be read: {error}")
            except WarrenError as error:
                why = str(error).replace(os.path.join(directory, "meta.db"), "meta.db")
                self._found(path, 0, self._disk.size(path), f"the metadata cannot be read: {why}")
        return []

    def _find_streams(self, records: list[QueueRecord]) -> None:
        names = {record.uid: record.name for record in records if record.durable}
        for record in records:
            levels = record.arguments.get("x-max-priority")
            directory = os.path.join(self._root, "queues", f"{hashed(record.name)}-{record.uid}")
            for level in range(levels + 1 if isinstance(levels, int) else 1):
                self._add_stream(directory, record.uid, level, record.name, divided=bool(levels))
        parent = os.path.join(self._root, "queues")
        for name in self._disk.listdir(parent):
            match = _QUEUE_DIRECTORY.fullmatch(name)
            directory = os.path.join(parent, name)
            if match is None:
                self._found(directory, 0, 0, "this is no directory of a queue", harmless=True)
                continue
            uid = int(match[1])
            if uid not in names:
                why = "no queue of the metadata has this directory; the next start moves it to lost+found/"
                self._found(directory, 0, 0, why, harmless=True)
            levels_there = [int(m[1]) for n in self._disk.listdir(directory) if (m := _LEVEL_DIRECTORY.fullmatch(n))]
            for level in levels_there:
                self._add_stream(directory, uid, level, names.get(uid), divided=True)
            if not levels_there:
                self._add_stream(directory, uid, 0, names.get(uid), divided=False)

    def _add_stream(self, directory: str, uid: int, level: int, queue: str | None, *, divided: bool) -> None:
        sid = stream_id(uid, level)
        if sid not in self._streams:
            place = os.path.join(directory, f"p{level}") if divided else directory
            self._streams[sid] = _Stream(sid, place, queue)

    # -- terms -------------------------------------------------------------------------------------------------------

    def _terms(self) -> None:
        path = os.path.join(self._root, TERMS_NAME)
        if not self._disk.exists(path):
            return
        data = self._read(path)
        rebuilt = "the next start reads everything instead"
        try:
            taken = unpack_terms(data, path)
        except TermsDamaged as damage:
            self._found(path, 0, damage.length, f"recovery terms: {damage}; {rebuilt}")
            return
        try:
            terms = decode_terms(taken.store)
        except TermsError as error:
            self._found(path, taken.store_offset, len(taken.store), f"recovery terms: {error}; {rebuilt}")
            return
        self.checked.counts["clean stop"] = 1
        for file in terms.files:
            name = file_name(file.number, file.generation, DATA_SUFFIX)
            place = os.path.join(self._root, "msg_store_persistent", name)
            size = self._disk.size(place) if self._disk.exists(place) else -1
            if size != file.size:
                had = "is missing" if size < 0 else f"has {size} bytes"
                self._found(place, 0, 0, f"the recovery terms know it with {file.size} bytes; it {had}")

    # -- journal -----------------------------------------------------------------------------------------------------

    def _journal(self) -> None:
        directory = os.path.join(self._root, "journal")
        floor, why = read_floor(self._disk, directory)
        if why is not None:
            size = self._disk.size(os.path.join(directory, "FLOOR"))
            self._found(os.path.join(directory, "FLOOR"), 0, size, f"{why}; headers of journal files repeat it")
        numbers = list_files(self._disk, directory)
        overlays = {sid: stream.overlay for sid, stream in self._streams.items()}
        for number in numbers:
            path = journal_path(directory, number)
            if number < floor:
                self.checked.counts["journal files below the floor"] += 1
                self._meter.done += self._disk.size(path)
                continue
            data = self._read(path)
            self._header(JOURNAL_MAGIC, data, path, (number,), "a journal file")
            damaged: list[tuple[int, int]] = []
            _, blocks, records, unknown = replay(data, HEADER_BYTES, number, overlays, self._acks, {}, {}, [], damaged)
            self.checked.counts["journal blocks"] += blocks
            self.checked.counts["journal records"] += records
            self.checked.counts["journal records of deleted queues"] += unknown
            newest = number == numbers[-1]
            end = len(data.rstrip(b"\0"))
            for offset, length in damaged:
                torn = offset + length >= end and (newest or offset >= _torn_from(data))
                # Zeros at the end count as never written; where a record says that it is so long, they are its own.
                claimed = 8 + int.from_bytes(data[offset : offset + 4], "little")
                if length < claimed <= len(data) - offset:
                    length = claimed
                why = (
                    "end of a journal file, torn by a crash: it was never confirmed"
                    if torn
                    else "journal: no block or record that checks out"
                )
                self._found(path, offset, length, why, harmless=torn)
        for stream in self._streams.values():
            self._journal_references(stream, directory)

    def _journal_references(self, stream: _Stream, directory: str) -> None:
        """Live publish records that refer to the message store."""
        stream.overlay.squeeze()
        for _, number, start, stop, rows in split_rows(stream.overlay.unmeasured_rows(), 1 << 62, 1 << 22):
            path = journal_path(directory, number)
            file = self._disk.open_read(path)
            try:
                data = file.pread(stop - start, start)
            finally:
                file.close()
            entries: list[Entry] = []
            read_publishes(rows, data, start, entries, [])
            for entry in entries:
                place = stream.overlay.locate(entry.seq)
                if entry.flags & IN_STORE and place is not None:
                    _, offset, size, _ = place
                    self._refer(entry, path, offset, size, stream)
        count, _ = stream.overlay.live_totals()
        self.checked.counts["messages"] += count

    def _refer(self, entry: Entry, path: str, offset: int, length: int, stream: _Stream) -> None:
        assert entry.msg_id is not None
        self.checked.references.append(
            Reference(entry.msg_id, self._relative(path), offset, length, stream.queue, entry.seq)
        )

    # -- segments ----------------------------------------------------------------------------------------------------

    def _segments(self, stream: _Stream) -> None:
        numbers: dict[int, set[str]] = {}
        for name in self._disk.listdir(stream.directory):
            path = os.path.join(stream.directory, name)
            match = _SEGMENT_FILE.fullmatch(name)
            if match is not None:
                numbers.setdefault(int(match[1]), set()).add(match[2])
            elif not self._disk.is_dir(path) and name.endswith(".tmp"):
                self._found(path, 0, self._disk.size(path), "a copy that a crash cut off", harmless=True)
        size = self._segment_entries(stream, sorted(numbers))
        for number, suffixes in sorted(numbers.items()):
            if "qi" in suffixes:
                self._checks.append(self._segment_check(stream, number, size))
            else:
                for suffix in sorted(suffixes):
                    path = os.path.join(stream.directory, f"{number}.{suffix}")
                    length = self._disk.size(path)
                    self._meter.done += length
                    self._found(path, 0, length, "its index file is not there: a checkpoint was cut off", harmless=True)

    def _segment_check(self, stream: _Stream, number: int, size: int) -> SegmentCheck:
        first, stop = number * size, (number + 1) * size
        acks = self._acks.get(stream.sid)
        return SegmentCheck(
            stream.sid,
            self._relative(stream.directory),
            stream.queue,
            size,
            number,
            acks.pairs(first, stop) if acks else [],
            row_pairs(stream.overlay.rows_between(first, stop, size)),
        )

    def _segment_entries(self, stream: _Stream, numbers: list[int]) -> int:
        """How many seq_ids a segment has: every header says so."""
        for number in numbers:
            for suffix, magic in (("qi", INDEX_MAGIC), ("qs", BODIES_MAGIC), ("qa", ACKS_MAGIC)):
                path = os.path.join(stream.directory, f"{number}.{suffix}")
                if self._disk.exists(path):
                    file = self._disk.open_read(path)
                    try:
                        header = unpack_header(magic, file.pread(HEADER_BYTES, 0), path)
                    finally:
                        file.close()
                    if header is not None and header[2]:
                        return header[2]
        return EngineSettings().segment_entries

    # -- queues in SQLite --------------------------------------------------------------------------------------------

    def _databases(self) -> None:
        parent = os.path.join(self._root, "queues")
        for name in self._disk.listdir(parent):
            match = _QUEUE_DIRECTORY.fullmatch(name)
            path = os.path.join(parent, name, "queue.db")
            if match is not None and self._disk.exists(path):
                self._checks.append(self._database_check(path, int(match[1])))

    def _database_check(self, path: str, uid: int) -> DatabaseCheck:
        streams = [stream for sid, stream in self._streams.items() if sid >> 8 == uid]
        acked, journaled = RangeSet(), RangeSet()
        for stream in streams:
            journaled.add_pairs(row_pairs(stream.overlay.rows_between(0, 1 << 63, len(stream.overlay))))
            if stream.sid in self._acks:
                acked.add_pairs(self._acks[stream.sid].pairs())
        queue = streams[0].queue if streams else None
        return DatabaseCheck(self._relative(path), queue, acked.pairs(), journaled.pairs())

    # -- message store -----------------------------------------------------------------------------------------------

    def _message_store(self) -> None:
        directory = os.path.join(self._root, "msg_store_persistent")
        names = [(name, parse_name(name)) for name in self._disk.listdir(directory)]
        for name, parsed in names:
            path = os.path.join(directory, name)
            if parsed is None or parsed.suffix == HINT_SUFFIX or self._disk.is_dir(path):
                continue
            if parsed.suffix == PART_SUFFIX:
                self._found(path, 0, self._disk.size(path), "a large body whose upload was cut off", harmless=True)
                self._meter.done += self._disk.size(path)
                continue
            self._checks.append(DataFileCheck(self._relative(path), parsed.number, parsed.generation))
        for name, parsed in names:
            if parsed is not None and parsed.suffix == HINT_SUFFIX:
                data_name = file_name(parsed.number, parsed.generation, DATA_SUFFIX)
                if not self._disk.exists(os.path.join(directory, data_name)):
                    self._found(os.path.join(directory, name), 0, 0, "a hint without its data file", harmless=True)

    def _quarantine(self) -> None:
        path = os.path.join(self._root, "quarantine", "log.jsonl")
        if self._disk.exists(path):
            self.checked.counts["earlier reports in quarantine/"] = self._disk.read(path).count(b"\n")


def _torn_from(data: bytes) -> int:
    """Where the last block of a journal file begins, if the file ends before it does; else the end of the file. Such a
    block was never synced: that the next process began a file of its own says that this one died while it wrote."""
    at = HEADER_BYTES
    while len(data) - at >= BLOCK_HEADER_BYTES:
        magic, length, crc = _BLOCK.unpack_from(data, at)
        if magic != b"WBLK" or crc != crc32c(data[at : at + BLOCK_HEADER_BYTES - 4]):
            return len(data)
        following = at + BLOCK_HEADER_BYTES + length
        if following > len(data):
            return at
        at = following
    return at
