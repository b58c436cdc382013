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
"""

from __future__ import annotations

import os
import re
import sqlite3
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from warren.errors import StoreFailedError, StorePathError, WarrenError
from warren.kernel.checksum import crc32c
from warren.kernel.entry import IN_STORE, Entry
from warren.kernel.journal_codec import BLOCK_HEADER_BYTES, read_publishes, replay
from warren.kernel.overlay import Overlay, row_pairs, split_rows
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import BODY_PREFIX_BYTES, SLOT_BYTES, fill_bodies, read_slots, set_bits
from warren.kernel.store_table import HINT_ROW_BYTES, scan_records
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
from warren.storage.queue_database import QueueDatabase
from warren.storage.recovery import _TERMS, _TERMS_MAGIC, TERMS_NAME
from warren.storage.segment import Segment, SegmentFiles
from warren.storage.settings import EngineSettings
from warren.storage.store_format import (
    CRC_BYTES,
    DATA_SUFFIX,
    HINT_SUFFIX,
    PART_SUFFIX,
    TermsError,
    check_data_header,
    decode_hint,
    decode_terms,
    file_name,
    parse_name,
)

_QUEUE_DIRECTORY = re.compile(r"[0-9a-f]{24}-([0-9]+)")
_LEVEL_DIRECTORY = re.compile(r"p([0-9]+)")
_SEGMENT_FILE = re.compile(r"([0-9]+)\.(qi|qs|qa)")
_BLOCK = struct.Struct("<4s12xQ4xI")  # magic, length of the records, CRC of a block header
_NO_BOOT = 0  # boots count from 1: transient slots are those of a process that is gone

Progress = Callable[[str, int, int], None]  # file, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class Finding:
    """Bytes that are not what they should be."""

    file: str  # below the vhost's directory
    offset: int
    length: int
    why: str
    harmless: bool = False
    queue: str | None = None
    seq_id: int | None = None


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


def vhost_roots(data_directory: str) -> list[str]:
    """The directories of all vhosts. Raises StorePathError where there is no store."""
    parent = os.path.join(data_directory, "vhosts")
    disk = Disk()
    roots = [os.path.join(parent, name) for name in disk.listdir(parent) if disk.is_dir(os.path.join(parent, name))]
    if not roots:
        raise StorePathError(f"{data_directory} holds no store: there is no vhosts/ with something in it")
    return roots


def verify_vhost(root: str, progress: Progress | None = None) -> Verification:
    """Check everything below a vhost's directory. Raises StoreFormatError for files that a newer Warren wrote."""
    return _Verifier(root, progress or (lambda file, done, total: None)).run()


@dataclass(slots=True)
class _Stream:
    """One queue, or one priority level of it."""

    sid: int
    directory: str
    queue: str | None
    overlay: Overlay = field(default_factory=Overlay)
    slots: dict[int, Segment] = field(default_factory=dict)  # which slots are alive, by segment
    segment_entries: int = 0


@dataclass(frozen=True, slots=True)
class _Reference:
    """A live message whose body is in the message store."""

    msg_id: bytes
    file: str
    offset: int
    length: int
    queue: str | None
    seq_id: int


class _Verifier:
    def __init__(self, root: str, progress: Progress) -> None:
        self._disk = Disk()
        self._root = root
        self._progress = progress
        self._done = 0
        self._total = 0
        self._references: list[_Reference] = []
        self._acks: dict[int, RangeSet] = {}
        self._streams: dict[int, _Stream] = {}
        self._report = Verification(root, os.path.basename(root))

    def run(self) -> Verification:
        parts = ("journal", "queues", "msg_store_persistent")
        files = [path for part in parts for path in self._disk.walk(os.path.join(self._root, part))]
        files += [path for name in ("meta.db", TERMS_NAME) if self._disk.exists(path := os.path.join(self._root, name))]
        self._total = sum(self._disk.size(path) for path in files)
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
        self._progress("", self._total, self._total)
        return self._report

    # -- reading and reporting ---------------------------------------------------------------------------------------

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self._root)

    def _found(
        self,
        path: str,
        offset: int,
        length: int,
        why: str,
        *,
        harmless: bool = False,
        queue: str | None = None,
        seq_id: int | None = None,
    ) -> None:
        self._report.findings.append(
            Finding(self._relative(path), offset, length, why, harmless=harmless, queue=queue, seq_id=seq_id)
        )

    def _read(self, path: str) -> bytes:
        self._progress(self._relative(path), self._done, self._total)
        data = self._disk.read(path)
        self._done += len(data)
        self._report.counts["files"] += 1
        self._report.counts["bytes"] += len(data)
        return data

    def _header(self, magic: bytes, data: bytes, path: str, expected: tuple[int, ...], what: str) -> None:
        numbers = unpack_header(magic, data, path)
        if numbers is None:
            torn = not any(data[:HEADER_BYTES])
            why = f"header of {what}: {'never written' if torn else 'its CRC or magic word is wrong'}"
            self._found(path, 0, min(len(data), HEADER_BYTES), why, harmless=torn)
        elif numbers[: len(expected)] != expected:
            self._found(path, 0, HEADER_BYTES, f"header of {what}: it is of another file, {numbers}, not {expected}")

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
        self._report.vhost = name

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
                self._add_stream(directory, record.uid, level, record.name, divided=levels is not None)
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
        if len(data) < _TERMS.size + 4 or struct.unpack("<I", data[-4:])[0] != crc32c(data[:-4]):
            self._found(path, 0, len(data), f"recovery terms: the CRC is wrong; {rebuilt}")
            return
        magic, text_length, store_length = _TERMS.unpack_from(data)
        start = _TERMS.size + text_length
        if magic != _TERMS_MAGIC or start + store_length + 4 != len(data):
            self._found(path, 0, _TERMS.size, f"recovery terms: the header is wrong; {rebuilt}")
            return
        try:
            terms = decode_terms(data[start:-4])
        except TermsError as error:
            self._found(path, start, store_length, f"recovery terms: {error}; {rebuilt}")
            return
        self._report.counts["clean stop"] = 1
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
                self._report.counts["journal files below the floor"] += 1
                self._done += self._disk.size(path)
                continue
            data = self._read(path)
            self._header(JOURNAL_MAGIC, data, path, (number,), "a journal file")
            damaged: list[tuple[int, int]] = []
            _, blocks, records, unknown = replay(data, HEADER_BYTES, number, overlays, self._acks, {}, {}, [], damaged)
            self._report.counts["journal blocks"] += blocks
            self._report.counts["journal records"] += records
            self._report.counts["journal records of deleted queues"] += unknown
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
        for _, number, start, stop, rows in split_rows(stream.overlay.stored_rows(), 1 << 62, 1 << 22):
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
        self._report.counts["messages"] += count

    def _refer(self, entry: Entry, path: str, offset: int, length: int, stream: _Stream) -> None:
        assert entry.msg_id is not None
        self._references.append(_Reference(entry.msg_id, self._relative(path), offset, length, stream.queue, entry.seq))

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
        stream.segment_entries = self._segment_entries(stream, sorted(numbers))
        for number, suffixes in sorted(numbers.items()):
            if "qi" in suffixes:
                self._segment(stream, number)
            else:
                for suffix in sorted(suffixes):
                    path = os.path.join(stream.directory, f"{number}.{suffix}")
                    size = self._disk.size(path)
                    self._done += size
                    self._found(path, 0, size, "its index file is not there: a checkpoint was cut off", harmless=True)

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

    def _segment(self, stream: _Stream, number: int) -> None:
        size = stream.segment_entries
        files = SegmentFiles(self._disk, stream.directory, stream.sid, size)
        expected = (stream.sid, number * size, size)
        path = files.path(number, "qi")
        data = self._read(path)
        self._header(INDEX_MAGIC, data, path, expected, "an index file")
        self._slots(stream, files, number, data)
        acks_path = files.path(number, "qa")
        if self._disk.exists(acks_path):
            self._header(ACKS_MAGIC, self._read(acks_path), acks_path, expected, "an ack file")
        self._bodies(stream, files, number, data)
        self._report.counts["segments"] += 1

    def _slots(self, stream: _Stream, files: SegmentFiles, number: int, data: bytes) -> None:
        """Slots, ack batches and what both say of who is alive."""
        size = stream.segment_entries
        path = files.path(number, "qi")

        def damaged(path: str, offset: int, length: int, seq: int, why: str) -> None:
            if offset:  # headers were looked at
                self._found(path, offset, length, why, queue=stream.queue, seq_id=seq if seq >= 0 else None)

        found = files.recover(number, _NO_BOOT, self._acks.get(stream.sid), damaged)
        segment, base = found.segment, number * size
        slots_end = HEADER_BYTES + size * SLOT_BYTES
        torn = (min(len(data), slots_end) - HEADER_BYTES) % SLOT_BYTES
        if torn:
            self._found(path, len(data) - torn, torn, "a slot that a crash cut off", harmless=True)
        if len(data) > slots_end and not segment.trailer:
            self._found(path, slots_end, len(data) - slots_end, "trailer: the slots are counted instead")
        # What a checkpoint wrote here before it was cut off counts as the journal's, which still has it.
        journaled = row_pairs(stream.overlay.rows_between(base, base + size, size))
        for i in range(0, len(journaled), 2):
            segment.kill(journaled[i] - base, journaled[i + 1], [])
        stream.slots[number] = segment
        self._report.counts["messages"] += segment.live_count
        for slot, msg_id in found.refs:
            if segment.is_live(slot):
                place = HEADER_BYTES + slot * SLOT_BYTES
                self._references.append(
                    _Reference(msg_id, self._relative(path), place, SLOT_BYTES, stream.queue, base + slot)
                )

    def _bodies(self, stream: _Stream, files: SegmentFiles, number: int, data: bytes) -> None:
        """The body of every persistent slot, alive or not."""
        size = stream.segment_entries
        path = files.path(number, "qs")
        every = bytearray((size + 7) // 8)
        set_bits(every, 0, size)
        entries: list[Entry] = []
        slots = data[HEADER_BYTES : HEADER_BYTES + size * SLOT_BYTES]
        read_slots(slots, number * size, 0, stream.sid, _NO_BOOT, every, size, entries, [], [])
        self._report.counts["slots"] += len(entries)
        here = [entry for entry in entries if not entry.flags & IN_STORE]
        if not self._disk.exists(path):
            if here:
                self._found(path, 0, 0, f"the file with {len(here)} bodies is missing", queue=stream.queue)
            return
        bodies = self._read(path)
        self._header(BODIES_MAGIC, bodies, path, (stream.sid, number * size, size), "a file of bodies")
        bad: list[Entry] = []
        fill_bodies(here, bodies, 0, stream.sid, bad)
        self._report.counts["bodies"] += len(here)
        for entry in bad:
            alive = stream.slots[number].is_live(entry.seq - number * size)
            why = "body" if alive else "body of a message that is not alive here"
            length = BODY_PREFIX_BYTES + entry.size
            self._found(path, entry.offset, length, why, queue=stream.queue, seq_id=entry.seq)

    # -- queues in SQLite --------------------------------------------------------------------------------------------

    def _databases(self) -> None:
        parent = os.path.join(self._root, "queues")
        for name in self._disk.listdir(parent):
            match = _QUEUE_DIRECTORY.fullmatch(name)
            path = os.path.join(parent, name, "queue.db")
            if match is not None and self._disk.exists(path):
                self._database(path, int(match[1]))

    def _database(self, path: str, uid: int) -> None:
        streams = [stream for sid, stream in self._streams.items() if sid >> 8 == uid]
        queue = streams[0].queue if streams else None

        def damaged(_: str, offset: int, length: int, seq: int, why: str) -> None:
            self._found(path, offset, length, why, queue=queue, seq_id=seq if seq >= 0 else None)

        with tempfile.TemporaryDirectory() as directory:
            self._copy(path, os.path.join(directory, "queue.db"))
            quarantine = os.path.join(directory, "quarantine")
            try:
                with closing(QueueDatabase(self._disk, directory, quarantine, damaged)) as database:
                    seqs = [int(row[0]) for row in database.rows("SELECT seq FROM messages WHERE persistent")]
            except StoreFailedError as error:
                damaged(path, 0, self._disk.size(path), -1, f"the file cannot be read: {error}")
                return
        self._report.counts["rows of queues in SQLite"] += len(seqs)
        acked = [self._acks[stream.sid] for stream in streams if stream.sid in self._acks]
        for seq in seqs:
            journaled = any(stream.overlay.locate(seq) is not None for stream in streams)
            if not journaled and not any(seq in acks for acks in acked):
                self._report.counts["messages"] += 1

    def _copy(self, path: str, target: str) -> None:
        """SQLite writes beside the files that it reads, so it gets copies."""
        for suffix in ("", "-wal"):
            if self._disk.exists(path + suffix):
                copy = self._disk.create(target + suffix)
                copy.append(self._read(path + suffix))
                copy.close()

    # -- message store -----------------------------------------------------------------------------------------------

    def _message_store(self) -> None:
        directory = os.path.join(self._root, "msg_store_persistent")
        names = [(name, parse_name(name)) for name in self._disk.listdir(directory)]
        known: set[bytes] = set()
        for name, parsed in names:
            path = os.path.join(directory, name)
            if parsed is None or parsed.suffix == HINT_SUFFIX or self._disk.is_dir(path):
                continue
            if parsed.suffix == PART_SUFFIX:
                self._found(path, 0, self._disk.size(path), "a large body whose upload was cut off", harmless=True)
                self._done += self._disk.size(path)
                continue
            known.update(self._data_file(path, parsed.number, parsed.generation))
        for name, parsed in names:
            if parsed is not None and parsed.suffix == HINT_SUFFIX:
                data_name = file_name(parsed.number, parsed.generation, DATA_SUFFIX)
                if not self._disk.exists(os.path.join(directory, data_name)):
                    self._found(os.path.join(directory, name), 0, 0, "a hint without its data file", harmless=True)
        self._report.counts["references to stored bodies"] = len(self._references)
        for reference in self._references:
            if reference.msg_id not in known:
                self._report.findings.append(
                    Finding(
                        reference.file,
                        reference.offset,
                        reference.length,
                        f"its body {reference.msg_id.hex()} is in no file of the message store",
                        queue=reference.queue,
                        seq_id=reference.seq_id,
                    )
                )

    def _data_file(self, path: str, number: int, generation: int) -> Iterator[bytes]:
        """Check a data file and its hint; the msg_ids of its good records."""
        data = self._read(path)
        trouble = check_data_header(data[:HEADER_BYTES], number, generation)
        if trouble is not None:
            self._found(path, 0, min(len(data), HEADER_BYTES), f"header of a store file: {trouble}", harmless=not data)
        rows, damage = scan_records(data, HEADER_BYTES) if len(data) > HEADER_BYTES else (b"", [])
        hint_path = path.removesuffix(DATA_SUFFIX) + HINT_SUFFIX
        hinted = self._disk.exists(hint_path)
        for offset, length in damage:
            # A file gets its hint when it is complete and synced: without one, its end may be torn.
            torn = offset + length == len(data) and not hinted
            why = "end of a store file, torn by a crash" if torn else "no record of the message store that checks out"
            self._found(path, offset, length, why, harmless=torn)
        if hinted:
            hint = self._read(hint_path)
            found = decode_hint(hint, number, generation, len(data))
            # Hints are not synced, because they can be made again: a crash may leave the beginning of one, or zeros.
            torn = len(hint) < HEADER_BYTES + len(rows) + CRC_BYTES or not any(hint[-CRC_BYTES:])
            if found is None or (found != rows and not damage):
                what = "was cut off by a crash" if torn else "does not fit its data file"
                why = f"hint file: it {what}; the next dirty start scans the data file instead"
                self._found(hint_path, 0, len(hint), why, harmless=torn)
        self._report.counts["store records"] += len(rows) // HINT_ROW_BYTES
        return (rows[at : at + 16] for at in range(0, len(rows), HINT_ROW_BYTES))

    def _quarantine(self) -> None:
        path = os.path.join(self._root, "quarantine", "log.jsonl")
        if self._disk.exists(path):
            self._report.counts["earlier reports in quarantine/"] = self._disk.read(path).count(b"\n")


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
