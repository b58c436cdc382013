"""What a task of `archive` does: it reads parts of queues and writes Parquet, Arrow to Arrow.

Rules:

1. A file has messages of one queue and one day, by seq_id. Where the next batch would break that order (another priority
   level, what the journal still has), another file begins.
2. A file is written aside and renamed. Its name says which part it is of and its number in it, so a task that runs twice
   writes the same files again, and one that was killed leaves nothing that anybody reads.
3. What is told of a file is read from its footer.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from warren.pipeline.batch_source import Place, read_at
from warren.pipeline.errors import PipelineError
from warren.pipeline.parts import StreamPart
from warren.pipeline.schema import COLUMNS, arrow_schema

# Where a message was in a file is of no use once it is in another one. Its headers with their types are, to publish them.
ARCHIVED: tuple[str, ...] = (
    *(name for name in COLUMNS if name not in ("source_file", "source_offset")),
    "headers_table",
)
_IN_PATH = ("vhost", "queue")  # their values are names of directories
_INSIDE = arrow_schema([name for name in ARCHIVED if name not in _IN_PATH])
_DISTINCT = ("body", "seq_id", "published_at", "message_id")  # a dictionary of these is as long as they are
_GROUP_ROWS = 131_072  # of a row group
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = re.compile(r"""[\x00-\x1f"#%'*/:=?\\\x7f{\[\]^]""")  # as Spark escapes values in paths


@dataclass(frozen=True, slots=True)
class QueueCount:
    """What a run holds of one queue."""

    vhost: str
    queue: str
    messages: int
    bytes: int
    min_seq_id: int
    max_seq_id: int

    def plus(self, other: QueueCount) -> QueueCount:
        """Both, of one queue."""
        return QueueCount(
            self.vhost,
            self.queue,
            self.messages + other.messages,
            self.bytes + other.bytes,
            min(self.min_seq_id, other.min_seq_id),
            max(self.max_seq_id, other.max_seq_id),
        )


def write_parts(work: bytes) -> list[QueueCount]:
    """On an executor: `work` is a pickled (place, directory, numbered parts). What was written."""
    place: Place
    directory: str
    group: list[tuple[int, StreamPart]]
    place, directory, group = pickle.loads(work)
    return [count for number, part in group for count in _PartWriter(directory, number, part).write(place)]


class _PartWriter:
    """The files of one part."""

    def __init__(self, directory: str, number: int, part: StreamPart) -> None:
        self._directory = directory
        self._number = number
        self._part = part
        self._token = secrets.token_hex(4)
        self._files = 0
        self._writer: pq.ParquetWriter | None = None
        self._path = ""
        self._day: str | None = None
        self._last = -1  # the seq_id of the last row of the file
        self._rows: list[pa.RecordBatch] = []  # of the row group to be
        self._bytes = 0

    def write(self, place: Place) -> Iterator[QueueCount]:
        for batch in read_at(place, self._part, arrow_schema(ARCHIVED), True):
            for day, rows in _by_day(_in_order(batch)):
                first = rows.column("seq_id")[0].as_py()
                if self._writer is None or day != self._day or first <= self._last:
                    yield from self._finish()
                    self._begin(day)
                self._add(rows)
        yield from self._finish()

    def _begin(self, day: str) -> None:
        values = (("vhost", self._part.vhost), ("queue", self._part.queue), ("day", day))
        place = os.path.join(self._directory, *(f"{name}={escaped(value)}" for name, value in values))
        os.makedirs(place, exist_ok=True)
        self._path = os.path.join(place, f"part-{self._number:05}-{self._files:03}.parquet")
        self._files += 1
        self._day = day
        self._bytes = 0
        self._writer = pq.ParquetWriter(
            self._aside,
            _INSIDE,
            compression="zstd",
            compression_level=1,
            use_dictionary=[name for name in _INSIDE.names if name not in _DISTINCT],
            write_statistics=["seq_id", "published_at"],
        )

    @property
    def _aside(self) -> str:
        """Spark passes over names that begin so; no two attempts share one."""
        place, name = os.path.split(self._path)
        return os.path.join(place, f"_{name}.{self._token}")

    def _add(self, rows: pa.RecordBatch) -> None:
        self._rows.append(rows.select(_INSIDE.names))
        self._last = rows.column("seq_id")[-1].as_py()
        self._bytes += pc.sum(rows.column("size")).as_py() or 0
        if sum(each.num_rows for each in self._rows) >= _GROUP_ROWS:
            self._write_group()

    def _write_group(self) -> None:
        if self._rows:
            assert self._writer is not None
            self._writer.write_table(pa.Table.from_batches(self._rows, _INSIDE), row_group_size=_GROUP_ROWS)
            self._rows = []

    def _finish(self) -> Iterator[QueueCount]:
        if self._writer is None:
            return
        self._write_group()
        self._writer.close()
        self._writer = None
        footer = pq.read_metadata(self._aside)
        seqs = [
            footer.row_group(number).column(_INSIDE.names.index("seq_id")).statistics
            for number in range(footer.num_row_groups)
        ]
        if any(each is None for each in seqs):
            raise PipelineError(f"{self._path} has no seq_ids in its footer")
        os.replace(self._aside, self._path)
        low, high = min(each.min for each in seqs), max(each.max for each in seqs)
        yield QueueCount(self._part.vhost, self._part.queue, footer.num_rows, self._bytes, low, high)


def escaped(value: str) -> str:
    """A value in the name of a directory, as Spark reads it. The one that stands for no value is escaped, too.

    >>> escaped("/a b"), escaped("__HIVE_DEFAULT_PARTITION__")
    ('%2Fa b', '%5F_HIVE_DEFAULT_PARTITION__')
    """
    if value == _NO_VALUE:
        return f"%5F{value[1:]}"
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", value)


def _in_order(batch: pa.RecordBatch) -> pa.RecordBatch:
    seqs = batch.column("seq_id")
    if len(seqs) > 1 and not pc.all(pc.less(seqs[:-1], seqs[1:])).as_py():
        return batch.take(pc.sort_indices(seqs))
    return batch


def _by_day(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Runs of rows of one day."""
    if not batch.num_rows:
        return
    days = pc.cast(batch.column("published_at"), pa.timestamp("us")).cast(pa.date32(), safe=False)
    if pc.all(pc.equal(days, days[0])).as_py():
        yield days[0].as_py().isoformat(), batch
        return
    for day in pc.unique(days):
        yield day.as_py().isoformat(), batch.filter(pc.equal(days, day))
