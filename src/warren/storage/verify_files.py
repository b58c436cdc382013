"""The checks of one file of a vhost: what `verify.py` finds in it, wherever that is done.

A check is a small value that names a file and carries what the journal says of the messages in it, so it can be done by
another process, or on another machine that sees the directory. Nothing is changed.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from warren.errors import StoreFailedError
from warren.kernel.checksum import crc32c
from warren.kernel.entry import IN_STORE, Entry
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import BODY_PREFIX_BYTES, SLOT_BYTES, fill_bodies, read_slots, set_bits
from warren.kernel.store_table import HINT_ROW_BYTES, scan_records
from warren.storage.disk import Disk
from warren.storage.layout import ACKS_MAGIC, BODIES_MAGIC, HEADER_BYTES, INDEX_MAGIC, pairs_of, unpack_header
from warren.storage.queue_database import QueueDatabase
from warren.storage.segment import Segment, SegmentFiles, Trailer
from warren.storage.store_format import CRC_BYTES, DATA_SUFFIX, HINT_SUFFIX, check_data_header, decode_hint

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


@dataclass(frozen=True, slots=True)
class Reference:
    """A live message whose body is in the message store."""

    msg_id: bytes
    file: str
    offset: int
    length: int
    queue: str | None
    seq_id: int

    def missing(self) -> Finding:
        """What is to be said when no file has the body."""
        why = f"its body {self.msg_id.hex()} is in no file of the message store"
        return Finding(self.file, self.offset, self.length, why, queue=self.queue, seq_id=self.seq_id)


@dataclass(frozen=True, slots=True)
class SegmentCheck:
    """One segment, and what the journal says of its messages (flat: first, count, ...)."""

    sid: int
    directory: str  # below the vhost's directory
    queue: str | None
    segment_entries: int
    number: int
    acked: list[int]
    journaled: list[int]


@dataclass(frozen=True, slots=True)
class DatabaseCheck:
    """One queue in SQLite, and what the journal says of its messages (flat: first, count, ...)."""

    file: str  # below the vhost's directory
    queue: str | None
    acked: list[int]
    journaled: list[int]


@dataclass(frozen=True, slots=True)
class DataFileCheck:
    """One file of the message store, with its hint."""

    file: str  # below the vhost's directory
    number: int
    generation: int


FileCheck = SegmentCheck | DatabaseCheck | DataFileCheck


@dataclass(slots=True)
class Checked:
    """What was found in some files."""

    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    references: list[Reference] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)  # hint rows of the good records, a file each


def check_file(root: str, check: FileCheck, meter: Meter | None = None) -> Checked:
    """Do one check. Raises StoreFormatError for a file that a newer Warren wrote."""
    meter = meter or Meter()
    if isinstance(check, SegmentCheck):
        return SegmentChecker(root, meter, check).run()
    if isinstance(check, DatabaseCheck):
        return DatabaseChecker(root, meter).run(check)
    return DataFileChecker(root, meter).run(check)


class Meter:
    """How many bytes are done, of how many."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress or (lambda file, done, total: None)
        self.done = 0
        self.total = 0

    def at(self, file: str) -> None:
        self._progress(file, self.done, self.total)

    def finished(self) -> None:
        self._progress("", self.total, self.total)


class Checker:
    """Reads files and notes what is wrong with them."""

    def __init__(self, root: str, meter: Meter) -> None:
        self._disk = Disk()
        self._root = root
        self._meter = meter
        self.checked = Checked()

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
        self.checked.findings.append(
            Finding(self._relative(path), offset, length, why, harmless=harmless, queue=queue, seq_id=seq_id)
        )

    def _read(self, path: str) -> bytes:
        self._meter.at(self._relative(path))
        data = self._disk.read(path)
        self._meter.done += len(data)
        self.checked.counts["files"] += 1
        self.checked.counts["bytes"] += len(data)
        return data

    def _header(self, magic: bytes, data: bytes, path: str, expected: tuple[int, ...], what: str) -> None:
        numbers = unpack_header(magic, data, path)
        if numbers is None:
            torn = not any(data[:HEADER_BYTES])
            why = f"header of {what}: {'never written' if torn else 'its CRC or magic word is wrong'}"
            self._found(path, 0, min(len(data), HEADER_BYTES), why, harmless=torn)
        elif numbers[: len(expected)] != expected:
            self._found(path, 0, HEADER_BYTES, f"header of {what}: it is of another file, {numbers}, not {expected}")

    def _copy(self, path: str, target: str) -> None:
        """SQLite writes beside the files that it reads, so it gets copies."""
        for suffix in ("", "-wal"):
            if self._disk.exists(path + suffix):
                copy = self._disk.create(target + suffix)
                copy.append(self._read(path + suffix))
                copy.close()


class SegmentChecker(Checker):
    def __init__(self, root: str, meter: Meter, check: SegmentCheck) -> None:
        super().__init__(root, meter)
        self._check = check
        self._files = SegmentFiles(self._disk, os.path.join(root, check.directory), check.sid, check.segment_entries)

    def run(self) -> Checked:
        check, files, size = self._check, self._files, self._check.segment_entries
        number = check.number
        expected = (check.sid, number * size, size)
        path = files.path(number, "qi")
        data = self._read(path)
        self._header(INDEX_MAGIC, data, path, expected, "an index file")
        segment = self._slots(data)
        acks_path = files.path(number, "qa")
        if self._disk.exists(acks_path):
            self._header(ACKS_MAGIC, self._read(acks_path), acks_path, expected, "an ack file")
        self._bodies(segment, data)
        self.checked.counts["segments"] += 1
        return self.checked

    def _slots(self, data: bytes) -> Segment:
        """Slots, ack batches and what both say of who is alive."""
        check, files, size = self._check, self._files, self._check.segment_entries
        number = check.number
        path = files.path(number, "qi")

        damage: list[int] = []

        def damaged(path: str, offset: int, length: int, seq: int, why: str) -> None:
            if path.endswith(".qi"):
                damage.append(offset)
            if offset:  # headers were looked at
                self._found(path, offset, length, why, queue=check.queue, seq_id=seq if seq >= 0 else None)

        found = files.recover(number, _NO_BOOT, RangeSet(check.acked), damaged)
        segment, base = found.segment, number * size
        slots_end = HEADER_BYTES + size * SLOT_BYTES
        torn = (min(len(data), slots_end) - HEADER_BYTES) % SLOT_BYTES
        if torn:
            self._found(path, len(data) - torn, torn, "a slot that a crash cut off", harmless=True)
        if len(data) > slots_end and not _fits(segment.trailer, found.slots, damage):
            # A checkpoint that was cut off writes slots and trailer again: the journal still has its messages.
            why, unfinished = "trailer: the slots are counted instead", bool(check.journaled)
            self._found(path, slots_end, len(data) - slots_end, why, harmless=unfinished)
        # What a checkpoint wrote here before it was cut off counts as the journal's, which still has it.
        for first, count in pairs_of(check.journaled):
            segment.kill(first - base, count, [])
        self.checked.counts["messages"] += segment.live_count
        for slot, msg_id in found.refs:
            if segment.is_live(slot):
                place = HEADER_BYTES + slot * SLOT_BYTES
                self.checked.references.append(
                    Reference(msg_id, self._relative(path), place, SLOT_BYTES, check.queue, base + slot)
                )
        return segment

    def _bodies(self, segment: Segment, data: bytes) -> None:
        """The body of every persistent slot, alive or not."""
        check, files, size = self._check, self._files, self._check.segment_entries
        number = check.number
        path = files.path(number, "qs")
        every = bytearray((size + 7) // 8)
        set_bits(every, 0, size)
        entries: list[Entry] = []
        slots = data[HEADER_BYTES : HEADER_BYTES + size * SLOT_BYTES]
        read_slots(slots, number * size, 0, check.sid, _NO_BOOT, every, size, entries, [], [])
        self.checked.counts["slots"] += len(entries)
        here = [entry for entry in entries if not entry.flags & IN_STORE]
        if not self._disk.exists(path):
            if here:
                self._found(path, 0, 0, f"the file with {len(here)} bodies is missing", queue=check.queue)
            return
        bodies = self._read(path)
        self._header(BODIES_MAGIC, bodies, path, (check.sid, number * size, size), "a file of bodies")
        bad: list[Entry] = []
        fill_bodies(here, bodies, 0, check.sid, bad)
        self.checked.counts["bodies"] += len(here)
        for entry in bad:
            alive = segment.is_live(entry.seq - number * size)
            why = "body" if alive else "body of a message that is not alive here"
            length = BODY_PREFIX_BYTES + entry.size
            self._found(path, entry.offset, length, why, queue=check.queue, seq_id=entry.seq)


class DatabaseChecker(Checker):
    def run(self, check: DatabaseCheck) -> Checked:
        path = os.path.join(self._root, check.file)

        def damaged(_: str, offset: int, length: int, seq: int, why: str) -> None:
            self._found(path, offset, length, why, queue=check.queue, seq_id=seq if seq >= 0 else None)

        with tempfile.TemporaryDirectory() as directory:
            self._copy(path, os.path.join(directory, "queue.db"))
            quarantine = os.path.join(directory, "quarantine")
            try:
                with closing(QueueDatabase(self._disk, directory, quarantine, damaged)) as database:
                    seqs = [int(row[0]) for row in database.rows("SELECT seq FROM messages WHERE persistent")]
            except StoreFailedError as error:
                damaged(path, 0, self._disk.size(path), -1, f"the file cannot be read: {error}")
                return self.checked
        self.checked.counts["rows of queues in SQLite"] += len(seqs)
        settled, journaled = RangeSet(check.acked), RangeSet(check.journaled)
        self.checked.counts["messages"] += sum(1 for seq in seqs if seq not in journaled and seq not in settled)
        return self.checked


class DataFileChecker(Checker):
    def run(self, check: DataFileCheck) -> Checked:
        """Check a data file and its hint."""
        path, number, generation = os.path.join(self._root, check.file), check.number, check.generation
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
        self.checked.counts["store records"] += len(rows) // HINT_ROW_BYTES
        self.checked.records.append(rows)
        return self.checked


def _fits(trailer: Trailer | None, slots: bytes | None, damage: list[int]) -> bool:
    """Does a trailer say what the slots say? A slot that is damaged speaks for itself."""
    return trailer is not None and (bool(damage) or trailer.slots_crc == crc32c(slots or b""))
