"""A part of a stream becomes Arrow batches.

Theory of operation. `read_part` opens every file that the part names before it returns: a running broker may unlink them at
any moment, and who planned the part can plan anew as long as no row was handed out. Files are mapped into memory and their
handles closed, so a part of a million messages needs no more than a few. The kernel copies rows from there into the buffers
of a batch; what is in the heads of messages is decoded once for each distinct head.

    segments     .qi says where messages are, .qa which of them are done, .qs has their payloads
    rows         publish records in journal files
    database     rows of a queue in SQLite
    large ones   in the message store, found by `stored_bodies.py`

Every checksum is checked. A message that does not check out ends the reading with DamagedMessageError, or is logged and
passed over where the reader was told so.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from warren.errors import StoreFailedError
from warren.kernel.columns import ColumnBuilder, Memory, in_ranges, numbers_at
from warren.kernel.journal_codec import replay
from warren.kernel.overlay import ROW_BYTES, Overlay, row_pairs
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import SLOT_BYTES, clear_bits, set_bits
from warren.pipeline.errors import DamagedMessageError
from warren.pipeline.head_columns import HeadTable
from warren.pipeline.parts import TRANSIENTS_FILE, StreamPart, pack_pairs, unpack_pairs
from warren.pipeline.queue_rows import QueueRow, QueueRows
from warren.pipeline.schema import HEAD_COLUMNS, PAYLOAD_COLUMNS, arrow_schema
from warren.pipeline.stored_bodies import STORES, stored_bodies
from warren.storage.disk import Disk
from warren.storage.layout import (
    BODIES_MAGIC,
    HEADER_BYTES,
    INDEX_MAGIC,
    JOURNAL_MAGIC,
    journal_path,
    pairs_of,
    unpack_header,
)
from warren.storage.segment import SegmentFiles, Trailer

log = logging.getLogger("warren.pipeline")

MOST_ROWS = 16_384
MOST_BYTES = 8 * 1024 * 1024  # of bodies in a batch; one that is larger is alone in its batch

_HIGHEST = 1 << 63
_STATES = pa.array(["ready", "unacked"])


def read_part(
    root: str,
    part: StreamPart,
    columns: Sequence[str] | pa.Schema | None = None,
    *,
    fail_on_data_loss: bool = True,
    most_rows: int = MOST_ROWS,
    most_bytes: int = MOST_BYTES,
) -> Iterator[pa.RecordBatch]:
    """The messages of a part as batches with these columns; None: all columns. `root` is the vhost's directory.

    Raises FileNotFoundError at once, before the first batch is asked for, when a file of the part is not there (any more),
    and DamagedMessageError, while batches are read, for a message that does not check out."""
    schema = columns if isinstance(columns, pa.Schema) else arrow_schema(columns)
    return _PartReader(root, part, schema, fail_on_data_loss, most_rows, most_bytes).batches()


# For who counts: with these columns alone no payload is read. `payload_size` is that of head and body.
SUMMARY = pa.schema([pa.field("state", pa.string()), pa.field("payload_size", pa.int32())])


def count_part(root: str, part: StreamPart, *, fail_on_data_loss: bool = True) -> int:
    """How many messages a part has; no body is read."""
    batches = read_part(root, part, ["seq_id"], fail_on_data_loss=fail_on_data_loss, most_rows=65_536)
    return sum(batch.num_rows for batch in batches)


class _Segment:
    """The files of a segment, mapped, and which of its slots are wanted."""

    __slots__ = ("bodies", "first", "number", "slots", "wanted")

    def __init__(
        self, number: int, first: int, slots: memoryview, bodies: memoryview | None, wanted: bytearray
    ) -> None:
        self.number = number
        self.first = first
        self.slots = slots
        self.bodies = bodies
        self.wanted = wanted


class _PartReader:
    def __init__(
        self, root: str, part: StreamPart, schema: pa.Schema, fail: bool, most_rows: int, most_bytes: int
    ) -> None:
        self._root = root
        self._part = part
        self._schema = schema
        self._fail = fail
        names = set(schema.names)
        self._payloads = bool(names & PAYLOAD_COLUMNS)
        self._builder = ColumnBuilder(
            most_rows, most_bytes, self._payloads, "body" in names, max(part.since or 0, 0), _at_least_0(part.until)
        )
        self._sources: list[str] = []  # files below the root, by the number that the builder has for them
        self._counts = dict(part.counts)
        self._returned = RangeSet(unpack_pairs(part.returned))
        self._stores = {store: stored_bodies(os.path.join(root, store)) for store in STORES}
        self._found = 0
        self._wanted = part.wanted()
        self._rows, self._journal = self._open_journal()
        slots = self._wanted.copy()
        slots.remove_pairs(row_pairs(self._rows))  # where the journal has a message, its slot does not count
        self._slots = slots
        self._segments = [found for number in part.segments if (found := self._open_segment(number)) is not None]
        self._database = QueueRows(os.path.join(root, part.database), slots) if part.database is not None else None

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open_journal(self) -> tuple[bytes, dict[int, memoryview]]:
        """The rows of the part, and the journal files that they lie in."""
        part, rows = self._part, self._part.rows
        journal = {
            number: _mapped(journal_path(os.path.join(self._root, "journal"), number))
            for number in _files_of(rows)
            if number != TRANSIENTS_FILE
        }
        for number, data in journal.items():
            self._check_header(JOURNAL_MAGIC, data, journal_path("journal", number))
        if part.transients is not None:
            data = _mapped(os.path.join(self._root, part.transients))
            journal[TRANSIENTS_FILE] = data
            if TRANSIENTS_FILE not in _files_of(rows):
                overlay = Overlay()
                replay(bytes(data), HEADER_BYTES, TRANSIENTS_FILE, {part.sid: overlay}, {}, {}, {}, [], [])
                rows += overlay.rows_between(0, _HIGHEST, len(overlay))
        return rows, journal

    def _open_segment(self, number: int) -> _Segment | None:
        part, size = self._part, self._part.segment_size
        first = number * size
        chosen = self._slots.pairs(first, first + size)
        if not chosen:
            return None
        directory = os.path.join(self._root, part.directory)
        data = _mapped(os.path.join(directory, f"{number}.qi"))
        self._check_header(INDEX_MAGIC, data, os.path.join(part.directory, f"{number}.qi"))
        files = SegmentFiles(Disk(), directory, part.sid, size)
        if self._out_of_time(files.parse_trailer(bytes(data[HEADER_BYTES + size * SLOT_BYTES :]))):
            return None
        bodies = None
        if self._payloads:
            try:
                bodies = _mapped(os.path.join(directory, f"{number}.qs"))
                self._check_header(BODIES_MAGIC, bodies, os.path.join(part.directory, f"{number}.qs"))
            except FileNotFoundError:
                # At rest it may be missing: then each message says so. Of a running broker, somebody took the segment.
                if part.only is not None:
                    raise
        wanted = bytearray((size + 7) // 8)
        for start, count in pairs_of(chosen):
            set_bits(wanted, start - first, count)
        if part.only is None:
            self._apply_acks(files, number, first, wanted)
        slots = data[HEADER_BYTES : HEADER_BYTES + size * SLOT_BYTES]
        return _Segment(number, first, slots, bodies, wanted)

    def _out_of_time(self, trailer: Trailer | None) -> bool:
        """Is nothing of a segment of the time that was asked for, as its zone map says?"""
        if trailer is None:
            return False
        since, until = self._part.since, self._part.until
        return (since is not None and trailer.high < since) or (until is not None and trailer.low >= until)

    def _apply_acks(self, files: SegmentFiles, number: int, first: int, wanted: bytearray) -> None:
        """What .qa says: slots that are done, and delivery counts. The journal's counts are newer."""
        size = self._part.segment_size

        def report(path: str, offset: int, length: int, seq: int, why: str) -> None:
            log.warning("%s at %d: %s", os.path.relpath(path, self._root), offset, why)

        acks, counts = files.read_ack_batches(number, report)
        for slot, count in pairs_of(acks):
            clear_bits(wanted, slot, min(count, size - slot), [])
        for slot, times in counts.items():
            self._counts.setdefault(first + slot, times)

    def _check_header(self, magic: bytes, data: memoryview, path: str) -> None:
        """Raises StoreFormatError for a file of a newer Warren. A damaged header is no matter: all else has checksums."""
        unpack_header(magic, bytes(data[:HEADER_BYTES]), path)

    # -- reading -----------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for segment in self._segments:
                yield from self._segment(segment)
            for number, data in sorted(self._journal.items()):
                yield from self._records(number, data)
            if self._database is not None:
                yield from self._messages(self._database)
            if self._builder.rows:
                yield self._batch()
            self._miss_none()
        finally:
            for store in self._stores.values():
                store.rest()
            if self._database is not None:
                self._database.close()

    def _segment(self, segment: _Segment) -> Iterator[pa.RecordBatch]:
        part = self._part
        index = os.path.join(part.directory, f"{segment.number}.qi")
        bodies = os.path.join(part.directory, f"{segment.number}.qs")
        source = self._source(bodies if self._payloads else index)
        slot = 0
        while slot >= 0:
            damaged: list[tuple[int, int]] = []
            slot = self._builder.add_segment(
                segment.slots,
                segment.bodies,
                segment.first,
                slot,
                part.sid,
                part.boot,
                segment.wanted,
                part.only is not None,
                source,
                self._fetch,
                damaged,
            )
            for number, offset in damaged:
                place = HEADER_BYTES + number * SLOT_BYTES
                if offset == -1:
                    self._damage(index, place, segment.first + number, "its slot does not check out, or is not there")
                elif offset == -2:
                    self._damage_in_store(index, place, segment.first + number)
                else:
                    self._damage(bodies, offset, segment.first + number, "its body does not check out")
            if slot >= 0:
                yield self._batch()

    def _records(self, number: int, data: memoryview) -> Iterator[pa.RecordBatch]:
        name = self._part.transients if number == TRANSIENTS_FILE else journal_path("journal", number)
        assert name is not None
        source = self._source(name)
        wanted = pack_pairs(self._wanted.pairs())
        row = 0
        while row >= 0:
            damaged: list[tuple[int, int, bool]] = []
            row = self._builder.add_rows(
                self._rows, row, data, number, self._part.sid, wanted, source, self._fetch, damaged
            )
            for seq, offset, stored in damaged:
                if stored:
                    self._damage_in_store(name, offset, seq)
                else:
                    self._damage(name, offset, seq, "its publish record does not check out")
            if row >= 0:
                yield self._batch()

    def _messages(self, database: QueueRows) -> Iterator[pa.RecordBatch]:
        name = self._part.database
        assert name is not None
        source = self._source(name)
        for row in self._sound(database.rows(transient=self._part.boot != 0)):
            if row.body is None:
                self._damage(name, 0, row.seq, "its row does not check out")
                continue
            if row.delivery_count > self._counts.get(row.seq, 0):
                self._counts[row.seq] = row.delivery_count
            if row.redelivered:
                self._returned.add(row.seq, 1)
            while not self._builder.add_message(row.seq, row.published_at, row.expiry, row.head, row.body, source, -1):
                yield self._batch()

    def _sound(self, rows: Iterator[QueueRow]) -> Iterator[QueueRow]:
        """The rows up to where SQLite finds its file damaged."""
        try:
            yield from rows
        except StoreFailedError as error:
            if self._fail:
                raise
            log.warning("queue %r: the rest is passed over: %s", self._part.queue, error)

    def _fetch(self, msg_id: bytes) -> tuple[bytes, int, int] | None:
        self._trouble: tuple[str, int, str] | None = None
        for store, bodies in self._stores.items():
            found = bodies.find(msg_id)
            if found is not None:
                payload, name, offset = found
                return payload, self._source(os.path.join(store, name)), offset
            if bodies.trouble is not None:
                name, offset, why = bodies.trouble
                self._trouble = (os.path.join(store, name), offset, f"its payload does not check out ({why})")
        return None

    def _source(self, name: str) -> int:
        if not self._sources or self._sources[-1] != name:
            if name in self._sources:
                return self._sources.index(name)
            self._sources.append(name)
        return len(self._sources) - 1

    # -- damage ------------------------------------------------------------------------------------------------------

    def _damage_in_store(self, file: str, offset: int, seq: int) -> None:
        if self._trouble is not None:
            file, offset, why = self._trouble
        else:
            why = "its payload is in no file of the message store"
        self._damage(file, offset, seq, why)

    def _damage(self, file: str, offset: int, seq: int, why: str) -> None:
        error = DamagedMessageError(file, offset, seq, self._part.queue, why)
        if self._fail:
            raise error
        self._found += 1  # it was there
        log.warning("%s", error)

    def _miss_none(self) -> None:
        """With `only`, each message has to be found: a segment that is not among those to read would hide some."""
        part = self._part
        if part.only is None or part.since is not None or part.until is not None:
            return
        missing = len(self._wanted) - self._found
        if missing:
            seq = self._wanted.first()
            self._damage(part.directory, 0, seq, f"{missing} of {len(self._wanted)} messages from it on are in no file")

    # -- columns -----------------------------------------------------------------------------------------------------

    def _batch(self) -> pa.RecordBatch:
        count, has_expiry = self._builder.rows, self._builder.has_expiry
        self._found += count
        return _Batch(self, count, has_expiry, self._builder.finish()).arrow()

    def _column(self, name: str, batch: _Batch) -> pa.Array:
        part, count = self._part, batch.count
        if name == "vhost":
            return pa.repeat(pa.scalar(part.vhost), count)
        if name == "queue":
            return pa.repeat(pa.scalar(part.queue), count)
        if name == "state":
            if not part.unacked:
                return pa.repeat(_STATES[0], count)
            return pc.if_else(batch.within(part.unacked), _STATES[1], _STATES[0])
        if name == "redelivered":
            return batch.within(pack_pairs(self._handed_out().pairs()))
        if name == "delivery_count":
            if not self._counts:
                return pa.repeat(pa.scalar(0, pa.int32()), count)
            table = [number for pair in sorted(self._counts.items()) for number in pair]
            numbers = numbers_at(batch.columns["seq"], pack_pairs(table))
            return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(numbers)])
        if name == "source_file":
            return pa.array(self._sources, pa.string()).take(batch.fixed(pa.int32(), "source"))
        raise AssertionError(name)

    def _handed_out(self) -> RangeSet:
        """What is, or would be, delivered with the flag redelivered."""
        pairs = self._returned.copy()
        if self._part.redelivered_below:
            pairs.add(0, self._part.redelivered_below)
        pairs.add_pairs(number for seq in self._counts for number in (seq, 1))
        return pairs


class _Batch:
    """The buffers of one batch on their way to columns."""

    def __init__(self, reader: _PartReader, count: int, has_expiry: bool, columns: dict[str, Memory]) -> None:
        self.count = count
        self.columns = columns
        self._reader = reader
        self._has_expiry = has_expiry
        self._heads = HeadTable(columns["heads"], columns["head_end"])

    def arrow(self) -> pa.RecordBatch:
        schema = self._reader._schema
        return pa.RecordBatch.from_arrays([self._column(field) for field in schema], schema=schema)

    def fixed(self, kind: pa.DataType, name: str) -> pa.Array:
        return pa.Array.from_buffers(kind, self.count, [None, pa.py_buffer(self.columns[name])])

    def within(self, pairs: bytes) -> pa.Array:
        """For each message: is it in these ranges?"""
        bits = in_ranges(self.columns["seq"], pairs)
        return pa.Array.from_buffers(pa.bool_(), self.count, [None, pa.py_buffer(bits)])

    def _column(self, field: pa.Field) -> pa.Array:
        name, kind = field.name, field.type
        if name in HEAD_COLUMNS:
            values = self._heads.column(name, kind)
            # Heads are numbered as they come: where each message has its own, they are in order.
            return values if len(values) == self.count else values.take(self.fixed(pa.int32(), "head"))
        match name:
            case "seq_id":
                return self.fixed(kind, "seq")
            case "published_at":
                return self.fixed(kind, "published")
            case "expires_at":
                if not self._has_expiry:
                    return pa.nulls(self.count, kind)
                expiry = self.fixed(pa.int64(), "expiry")
                never = pc.equal(expiry, 0)
                return pc.if_else(never, pa.scalar(None, pa.int64()), expiry).view(kind)
            case "size" | "payload_size":
                return self.fixed(kind, "size")
            case "body":
                buffers = [None, pa.py_buffer(self.columns["body_end"]), pa.py_buffer(self.columns["body"])]
                return pa.Array.from_buffers(kind, self.count, buffers)
            case "source_offset":
                offset = self.fixed(kind, "offset")
                if self._reader._part.database is None:
                    return offset
                return pc.if_else(pc.less(offset, 0), pa.scalar(None, kind), offset)  # SQLite has no offsets
        return self._reader._column(name, self)


def _at_least_0(value: int | None) -> int | None:
    return None if value is None else max(value, 0)


def _files_of(rows: bytes) -> set[int]:
    """The numbers of the files that packed rows lie in."""
    assert len(rows) % ROW_BYTES == 0
    return {file for _, file, _, _, _ in struct.iter_unpack("<QIIII", rows)}


def _mapped(path: str) -> memoryview:
    """The bytes of a file as they are now."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
