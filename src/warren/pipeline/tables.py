"""What a store is made of, as tables beside the messages: `table` = queues, segments, files or journal.

    queues     one row a queue: how it was declared, what is in it
    segments   one row a segment: how many of its slots are written, acked and alive, and when they were published
    files      one row a file of the message store: its records, and how much of it something still refers to
    journal    one row a record of the journal, members of groups too; `lsn` is that of their commit

They are read from files at rest, as messages are: those of a path, or of a snapshot that a broker took.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from warren.kernel.overlay import row_pairs
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import SLOT_BYTES, clear_bits, live_bytes, scan_slots
from warren.pipeline.batch_source import OptionsReader, Place, find_place
from warren.pipeline.broker_client import BrokerClient
from warren.pipeline.journal_records import journal_numbers, journal_records
from warren.pipeline.options import SourceOptions, plain_options
from warren.pipeline.rows import SUMMARY, read_part
from warren.pipeline.schema import checked_names
from warren.pipeline.store_view import StreamView, VhostView, open_view
from warren.pipeline.stored_bodies import STORES, record_rows
from warren.storage.disk import Disk
from warren.storage.layout import HEADER_BYTES, pairs_of
from warren.storage.segment import SegmentFiles
from warren.storage.store_format import DATA_SUFFIX, HINT_ROW, parse_name
from warren.storage.tagged_json import to_json

_TIME = pa.timestamp("us", tz="UTC")
_BATCH_ROWS = 16_384
_TABLE = "/snapshots/table"  # of the data server

Row = tuple[Any, ...]
# name, type in Arrow, type in Spark's DDL
_Columns = tuple[tuple[str, pa.DataType, str], ...]

_QUEUES: _Columns = (
    ("vhost", pa.string(), "STRING"),
    ("queue", pa.string(), "STRING"),
    ("uid", pa.int64(), "BIGINT"),
    ("durable", pa.bool_(), "BOOLEAN"),
    ("arguments", pa.map_(pa.string(), pa.string()), "MAP<STRING, STRING>"),  # what is not text is JSON
    ("ready", pa.int64(), "BIGINT"),
    ("unacked", pa.int64(), "BIGINT"),
    ("messages", pa.int64(), "BIGINT"),
    ("bytes", pa.int64(), "BIGINT"),  # of heads and bodies
    ("segments", pa.int64(), "BIGINT"),
    ("next_seq_id", pa.int64(), "BIGINT"),  # null after a crash
)

_SEGMENTS: _Columns = (
    ("vhost", pa.string(), "STRING"),
    ("queue", pa.string(), "STRING"),
    ("level", pa.int32(), "INT"),
    ("segment", pa.int64(), "BIGINT"),
    ("written", pa.int32(), "INT"),
    ("acked", pa.int32(), "INT"),  # by .qa or by the journal; transient ones of an earlier start do not count
    ("live", pa.int32(), "INT"),  # those that the journal has as well do not count here
    ("damaged", pa.int32(), "INT"),
    ("live_bytes", pa.int64(), "BIGINT"),  # of bodies
    ("qi_bytes", pa.int64(), "BIGINT"),
    ("qs_bytes", pa.int64(), "BIGINT"),
    ("qa_bytes", pa.int64(), "BIGINT"),
    ("min_published_at", _TIME, "TIMESTAMP"),
    ("max_published_at", _TIME, "TIMESTAMP"),
)

_FILES: _Columns = (
    ("vhost", pa.string(), "STRING"),
    ("store", pa.string(), "STRING"),  # persistent or transient
    ("file", pa.string(), "STRING"),
    ("number", pa.int64(), "BIGINT"),
    ("generation", pa.int64(), "BIGINT"),
    ("bytes", pa.int64(), "BIGINT"),
    ("records", pa.int64(), "BIGINT"),
    ("live_records", pa.int64(), "BIGINT"),  # these three are null for the transient store
    ("live_bytes", pa.int64(), "BIGINT"),
    ("garbage_bytes", pa.int64(), "BIGINT"),
    ("hinted", pa.bool_(), "BOOLEAN"),
)

_JOURNAL: _Columns = (
    ("vhost", pa.string(), "STRING"),
    ("file", pa.int64(), "BIGINT"),
    ("offset", pa.int64(), "BIGINT"),
    ("lsn", pa.int64(), "BIGINT"),
    ("type", pa.string(), "STRING"),
    ("sid", pa.int64(), "BIGINT"),  # the first target of a publish
    ("seq_id", pa.int64(), "BIGINT"),  # the first one
    ("count", pa.int64(), "BIGINT"),  # targets of a publish, messages of an ack, members of a group
    ("bytes", pa.int64(), "BIGINT"),
    ("in_group", pa.bool_(), "BOOLEAN"),
    ("needed", pa.bool_(), "BOOLEAN"),  # the file is not below the floor
)

_TABLES: dict[str, _Columns] = {"queues": _QUEUES, "segments": _SEGMENTS, "files": _FILES, "journal": _JOURNAL}


def table_schema(table: str) -> pa.Schema:
    """The columns of a table."""
    return pa.schema([pa.field(name, kind) for name, kind, _ in _TABLES[table]])


def table_ddl(table: str, columns: tuple[str, ...] | None = None) -> str:
    """The same, or some of them, as Spark's data definition language.

    >>> table_ddl("queues", ("queue", "ready"))
    'queue STRING, ready BIGINT'
    """
    types = {name: kind for name, _, kind in _TABLES[table]}
    names = tuple(types) if columns is None else checked_names(columns, tuple(types))
    return ", ".join(f"{name} {types[name]}" for name in names)


def table_rows(view: VhostView, table: str, options: SourceOptions, file: int | None = None) -> Iterator[Row]:
    """The rows of a table, each with all its columns; of the journal perhaps of one file only.

    >>> import tempfile, warren
    >>> with tempfile.TemporaryDirectory() as data:
    ...     with warren.open(data) as store:
    ...         _ = store.queue("orders").publish(b"hello")
    ...     [row[:2] for row in table_rows(open_view(data), "queues", SourceOptions())]
    [('/', 'orders')]
    """
    if table == "queues":
        return _queue_rows(view, options)
    if table == "segments":
        return _segment_rows(view, options)
    if table == "files":
        return _file_rows(view)
    return _journal_rows(view, file)


class TablePartition(InputPartition):
    """A table is read by one task; that of the journal by one for each file."""

    def __init__(self, place: Place, file: int | None = None, options: dict[str, str] | None = None) -> None:
        super().__init__(None)
        self.place = place
        self.file = file
        self.options = options  # for the data server, which plans and reads in one


class WarrenTableReader(OptionsReader):
    """Reads a table that is not that of messages."""

    def partitions(self) -> list[InputPartition]:
        assert self._options is not None
        place = find_place(self._asked, self._options)
        if not place.by_files:
            return [TablePartition(place, options=plain_options(self._options))]
        _view_at(place).chosen(self._asked)  # a queue that is not there is refused now
        if self._asked.table == "journal":
            return [TablePartition(place, number) for number in journal_numbers(os.path.join(place.root, "journal"))]
        return [TablePartition(place)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TablePartition):  # Spark's own, where there is nothing to read
            return
        place, table = partition.place, self._asked.table
        if place.by_files:
            yield from table_batches(_view_at(place), table, self._asked, self._schema, partition.file)
            return
        assert place.data_url is not None
        assert place.ticket is not None
        asked = {"table": table, "columns": self._schema.names, "options": partition.options}
        with BrokerClient(place.data_url, ca_file=place.ca_file) as client:
            for batch in client.stream(place.data_url, _TABLE, place.ticket, asked):
                yield pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)


def _view_at(place: Place) -> VhostView:
    data_directory = os.path.dirname(os.path.dirname(place.root))
    with open(os.path.join(place.root, ".vhost"), encoding="utf-8") as file:
        return open_view(data_directory, file.read())


def table_batches(
    view: VhostView, table: str, options: SourceOptions, schema: pa.Schema, file: int | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a table as batches of `schema`, which has some of its columns."""
    whole = table_schema(table)
    chosen = [(field, whole.get_field_index(field.name)) for field in schema]
    rows = table_rows(view, table, options, file)
    while some := list(islice(rows, _BATCH_ROWS)):
        columns = list(zip(*some, strict=True))
        yield pa.RecordBatch.from_arrays([pa.array(columns[at], field.type) for field, at in chosen], schema=schema)


# -- queues ------------------------------------------------------------------------------------------------------------


def _queue_rows(view: VhostView, options: SourceOptions) -> Iterator[Row]:
    for queue in view.chosen(options):
        counts = {"ready": 0, "unacked": 0}
        size = 0
        for part in view.parts(SourceOptions(vhost=view.vhost, queue=queue.name, min_partitions=1)):
            for batch in read_part(view.root, part, SUMMARY, fail_on_data_loss=options.fail_on_data_loss):
                for count in batch.column("state").value_counts().to_pylist():
                    counts[count["values"]] += count["counts"]
                size += pc.sum(batch.column("payload_size").cast(pa.int64())).as_py()
        yield (
            view.vhost,
            queue.name,
            queue.uid,
            queue.durable,
            [
                (name, value if isinstance(value, str) else to_json(value, name))
                for name, value in queue.arguments.items()
            ],
            counts["ready"],
            counts["unacked"],
            sum(counts.values()),
            size,
            sum(len(stream.segments) for stream in view.streams(queue)),
            view.next_seq_id(queue),
        )


# -- segments ----------------------------------------------------------------------------------------------------------


def _segment_rows(view: VhostView, options: SourceOptions) -> Iterator[Row]:
    for queue in view.chosen(options):
        for stream in view.streams(queue):
            for number in sorted(stream.segments):
                yield _segment_row(view, stream, number)


def _segment_row(view: VhostView, stream: StreamView, number: int) -> Row:
    size, first = view.segment_size, number * view.segment_size
    files = SegmentFiles(Disk(), os.path.join(view.root, stream.directory), stream.sid, size)
    with open(files.path(number, "qi"), "rb") as file:
        data = file.read()
    slots = data[HEADER_BYTES : HEADER_BYTES + size * SLOT_BYTES]
    slots = slots[: len(slots) // SLOT_BYTES * SLOT_BYTES]
    live = bytearray((size + 7) // 8)
    damaged: list[int] = []
    _, _, written, low, high = scan_slots(slots, first, stream.sid, view.boot, live, [], damaged)
    done = RangeSet(files.read_ack_batches(number, lambda *line: None)[0])
    done.add_pairs(
        n for start, count in pairs_of(stream.acked.pairs(first, first + size)) for n in (start - first, count)
    )
    acked = sum(clear_bits(live, start, count, []) for start, count in pairs_of(done.pairs(0, size)))
    for start, count in pairs_of(row_pairs(stream.rows(first, first + size))):
        clear_bits(live, start - first, count, [])
    known = written > len(damaged)
    return (
        view.vhost,
        stream.queue.name,
        stream.sid & 0xFF,
        number,
        written,
        acked,
        int.from_bytes(live, "little").bit_count(),
        len(damaged),
        live_bytes(slots, live),
        len(data),
        _size(files.path(number, "qs")),
        _size(files.path(number, "qa")),
        low if known else None,
        high if known else None,
    )


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0


# -- files of the message store ----------------------------------------------------------------------------------------


def _file_rows(view: VhostView) -> Iterator[Row]:
    alive = view.stored_ids()
    for store in STORES:
        directory = os.path.join(view.root, store)
        names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
        for name in names:
            parsed = parse_name(name)
            if parsed is None or parsed.suffix != DATA_SUFFIX:
                continue
            rows, hinted = record_rows(directory, name)
            records = live_records = live_size = total = 0
            for msg_id, _, size in HINT_ROW.iter_unpack(rows):
                records += 1
                total += size
                if msg_id in alive:
                    live_records += 1
                    live_size += size
            yield (
                view.vhost,
                store.removeprefix("msg_store_"),
                os.path.join(store, name),
                parsed.number,
                parsed.generation,
                _size(os.path.join(directory, name)),
                records,
                *((live_records, live_size, total - live_size) if store == STORES[0] else (None, None, None)),
                hinted,
            )


# -- journal -----------------------------------------------------------------------------------------------------------


def _journal_rows(view: VhostView, file: int | None) -> Iterator[Row]:
    directory = os.path.join(view.root, "journal")
    for number in journal_numbers(directory) if file is None else [file]:
        for record in journal_records(directory, number):
            yield (view.vhost, *record)
