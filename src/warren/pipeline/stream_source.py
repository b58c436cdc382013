"""The streaming source: messages leave their queues exactly once.

Theory of operation. An offset of the stream is the number of a *checkout*: a set of messages that the broker froze for the
stream's *lease*, journaled and synced before anybody hears its number. Spark's calls become the broker's:

    initialOffset()             the lease's durable floor: what was settled last
    latestOffset(start, limit)  `leases/next`: settles all checkouts up to `start`, then freezes what is ready
    partitions(start, end)      `leases/describe`: the frozen messages of checkouts start + 1 to end, split into tasks
    read(partition)             the same rows any number of times, from files or from the data server

Rules:

1. `latestOffset(start)` is the commit. Spark calls it only when everything up to `start` is durable on its side, and it
   does so at once and on an idle stream; `commit(end)` comes one batch later, or never. So `commit` does nothing.
2. A checkout never changes. A crash at any point repeats a batch with the same rows, or settles one that is durable.
3. A runner that begins a query opens its lease only when nobody holds it. One whose offset names the lease, and when that
   was born, goes on with it: it takes the lease over, and the calls of an older runner are refused by the broker.
4. `stop` is not called when a query stops, so a lease is kept by heartbeats, and let go by their absence.
5. Executors get a reader without credentials, and a ticket in every partition.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from warren.pipeline.broker_client import (
    FIRST_SECONDS,
    BrokerClient,
    Credentials,
    forget_secrets,
    plan_checkout,
    sees_files,
)
from warren.pipeline.errors import BrokerError, OptionError, PipelineError
from warren.pipeline.options import ACCESSES, MODES, checked_options, one_of, truth, whole_number
from warren.pipeline.parts import unpack_pairs
from warren.pipeline.schema import ALL_COLUMNS, arrow_schema, arrow_schema_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

OFFSET_VERSION = 1
IDLE_SECONDS = 0.1  # between two questions to the broker while there is nothing; Spark asks a hundred times a second
HELD_SECONDS = 15.0  # that a new query waits for a lease: a holder that was killed is heard of for 10 s more
DEFAULT_TRIGGER_DELAY = "15m"
# Of a batch, where nothing is said. Spark takes about a quarter of a second for a batch besides its rows, and some seconds
# for a million of them; all of a long queue at once would be checked out, and unacked, for as long as it takes to read it.
DEFAULT_BATCH_ROWS = 1_000_000
DEFAULT_BATCH_BYTES = 1 << 30
DEFAULT_PARTITIONS = 4
DEFAULT_MOST_RECORDS = 1_000_000  # in a partition
FEW_RECORDS = 10_000  # not worth a task of their own

_NOTHING_MORE = 1 << 62  # as min_rows: settle, and freeze nothing
_REPLANS = 20  # of a partition whose files moved between plan and open
_REPLAN_SECONDS = 0.05
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


# ---- options ----


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The options of a stream, checked. No secret is among them: this travels to executors."""

    url: str
    vhost: str
    queues: list[str] | None  # either these
    pattern: str | None  # or all that this matches
    lease: str
    starting: str  # earliest or latest
    max_rows: int | None  # one of these two at least
    max_bytes: int | None
    min_rows: int | None
    max_delay_seconds: float
    min_partitions: int | None
    max_records: int
    access: str  # auto, files or http
    fail_on_data_loss: bool
    ca_file: str | None

    @classmethod
    def from_options(cls, options: Mapping[str, str], *, needs_lease: bool = True) -> StreamSettings:
        """Raises OptionError, naming the option, its value and what it can be."""
        given = checked_options(options, "streaming read")
        mode = one_of(given, "mode", MODES, "consume")  # a misspelt tap must not take what it was to look at
        if mode == "consume" and "snapshotTtl" in given:
            raise OptionError(
                "option snapshotTtl is for mode=tap; a stream that consumes has no snapshot: leave it out"
            )
        if truth(given, "asyncProgressTrackingEnabled", False):
            raise OptionError(
                "asyncProgressTrackingEnabled=true: Spark would ask for the next batch before the last one is durable, and "
                "that question acks it; leave it off"
            )
        if not given.get("url"):
            raise OptionError(
                "option url is missing: a stream reads a running broker, for example http://127.0.0.1:15672"
            )
        queue, pattern = given.get("queue"), given.get("queuePattern")
        if (queue is None) == (pattern is None):
            raise OptionError("give one of the options queue and queuePattern: what the stream reads")
        lease = given.get("lease", "")
        if needs_lease and not lease:
            raise OptionError(
                "option lease is missing: the name under which the broker knows this stream, as a consumer group; "
                "mode=tap reads without consuming and needs none"
            )
        most, least = whole_number(given, "maxOffsetsPerTrigger", 1), whole_number(given, "minOffsetsPerTrigger", 1)
        if most is not None and least is not None and least > most:
            raise OptionError(f"minOffsetsPerTrigger is {least} and maxOffsetsPerTrigger {most}: it cannot be more")
        most_bytes = whole_number(given, "maxBytesPerTrigger", 1)
        if most is None and most_bytes is None:
            most, most_bytes = max(DEFAULT_BATCH_ROWS, least or 0), DEFAULT_BATCH_BYTES
        return cls(
            url=given["url"],
            vhost=given.get("vhost", "/"),
            queues=None if queue is None else [queue],
            pattern=pattern,
            lease=lease,
            starting=one_of(given, "startingOffsets", ("earliest", "latest"), "earliest"),
            max_rows=most,
            max_bytes=most_bytes,
            min_rows=least,
            max_delay_seconds=_seconds("maxTriggerDelay", given.get("maxTriggerDelay", DEFAULT_TRIGGER_DELAY)),
            min_partitions=whole_number(given, "minPartitions", 1),
            max_records=whole_number(given, "maxRecordsPerPartition", 1) or DEFAULT_MOST_RECORDS,
            access=one_of(given, "access", ACCESSES, "auto"),
            fail_on_data_loss=truth(given, "failOnDataLoss", True),
            ca_file=given.get("caFile"),
        )

    @property
    def limit(self) -> ReadLimit:
        """What Spark is told of the limits: which it is does not matter, but ReadAllAvailable, as Trigger.Once has it, lifts
        all of them."""
        if self.max_rows is not None:
            return ReadMaxRows(self.max_rows)
        assert self.max_bytes is not None
        return ReadMaxBytes(self.max_bytes)


def _seconds(option: str, text: str) -> float:
    found = re.fullmatch(r"(\d+)\s*([a-z]+)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise OptionError(f"option {option} is {text!r}; it is a time such as 500ms, 30s, 15m or 1h")
    return int(found[1]) * _UNITS[found[2]]


# ---- the lease ----


class _Lease:
    """A lease that this process holds, and the thread that says so."""

    def __init__(
        self,
        settings: StreamSettings,
        credentials: Credentials,
        client: BrokerClient,
        takeover: bool,
        born: int | None,
    ) -> None:
        self._settings = settings
        self._client = client
        answer = self._open(takeover, born)
        self.born: int = answer["born"]
        self.floor: int = answer["floor"]
        self.first_new: int = answer["next"]  # checkouts from this number on were frozen for this runner
        self.ready: int = answer["ready"]
        self._epoch: int = answer["epoch"]
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, args=(credentials, float(answer["heartbeat_seconds"])), name="warren lease", daemon=True
        )
        self._thread.start()

    def _open(self, takeover: bool, born: int | None) -> dict[str, Any]:
        settings = self._settings
        deadline = time.monotonic() + HELD_SECONDS
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        while True:
            try:
                return self._client.call(
                    "leases/open",
                    vhost=settings.vhost,
                    lease=settings.lease,
                    queues=settings.queues,
                    pattern=settings.pattern,
                    owner=owner,
                    takeover=takeover,
                    born=born,
                    starting=settings.starting,
                )
            except BrokerError as error:
                if error.code != "held" or time.monotonic() >= deadline:
                    raise  # the broker names the holder
            time.sleep(0.5)

    def next(self, start: int, **limits: int | None) -> dict[str, Any]:
        return self._call("leases/next", start=start, **limits)

    def describe(self, first: int, last: int) -> dict[str, Any]:
        return self._call("leases/describe", first=first, last=last)

    def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        settings = self._settings
        return self._client.call(name, vhost=settings.vhost, lease=settings.lease, epoch=self._epoch, **arguments)

    def _beat(self, credentials: Credentials, seconds: float) -> None:
        """A batch may take hours. What goes wrong here, the stream's next question finds out and says."""
        settings = self._settings
        with BrokerClient(settings.url, credentials, ca_file=settings.ca_file, retry_seconds=0) as client:
            while not self._ended.wait(seconds):
                with contextlib.suppress(PipelineError):
                    client.call("leases/heartbeat", vhost=settings.vhost, lease=settings.lease, epoch=self._epoch)

    def end(self) -> None:
        self._ended.set()
        self._thread.join(1.0)


# ---- what a task reads ----


@dataclass(frozen=True, slots=True)
class Piece:
    """Messages first <= seq_id < stop of one checkout in one stream."""

    number: int
    sid: int
    first: int
    stop: int
    rows: int


class CheckoutPartition(InputPartition):
    """What one task reads, and all it needs to do so."""

    def __init__(
        self, pieces: tuple[Piece, ...], ticket: str, url: str, root: str, host: str, data_url: str | None
    ) -> None:
        self.pieces = pieces
        self.ticket = ticket
        self.url = url
        self.root = root
        self.host = host
        self.data_url = data_url

    def __repr__(self) -> str:  # Spark shows it in errors; the ticket is nobody's business
        return f"CheckoutPartition({sum(piece.rows for piece in self.pieces)} rows, {self.pieces!r})"


def split(checkouts: Sequence[Mapping[str, Any]], most: int) -> list[tuple[Piece, ...]]:
    """The streams of checkouts, as the broker describes them, in lots of up to `most` rows. Streams stay in their order."""
    from base64 import b64decode

    lots: list[tuple[Piece, ...]] = []
    lot: list[Piece] = []
    room = most
    for checkout in checkouts:
        for stream in checkout["streams"]:
            number, sid = checkout["number"], stream["sid"]
            pairs = unpack_pairs(b64decode(stream["ranges"]))
            begin, rows = -1, 0
            for first, count in zip(pairs[::2], pairs[1::2], strict=True):
                if begin < 0:
                    begin = first
                while count:
                    taken = min(count, room)
                    rows, room, first, count = rows + taken, room - taken, first + taken, count - taken
                    if not room:
                        lots.append((*lot, Piece(number, sid, begin, first, rows)))
                        lot, room, begin, rows = [], most, first, 0
            if rows:
                lot.append(Piece(number, sid, begin, first, rows))
    if lot:
        lots.append(tuple(lot))
    return lots


class WarrenStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark's side of a lease. One lives as long as its query, in a process of its own; copies of it read on executors."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._settings = StreamSettings.from_options(options)
        self._schema = arrow_schema_of(schema, arrow_schema(ALL_COLUMNS))
        self._credentials: Credentials | None = Credentials.from_options(options)
        forget_secrets(options)
        self._client: BrokerClient | None = None
        self._lease: _Lease | None = None
        self._asked_at = -math.inf  # when the broker had nothing
        self._batch_at = -math.inf  # when a batch was begun, for maxTriggerDelay
        self._left: int | None = None  # rows to read before AvailableNow is done
        self._available_now = False
        self._latest: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What an executor needs. Neither the credentials nor what was asked with them."""
        return {"_settings": self._settings, "_schema": self._schema, "_credentials": None}

    # -- on the driver -------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        lease = self._opened(None)
        return self._offset(lease.floor, lease)

    def getDefaultReadLimit(self) -> ReadLimit:
        return self._settings.limit

    def prepareForTriggerAvailableNow(self) -> None:
        self._available_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        number = self._number(start)
        lease = self._opened(start)
        if self._available_now and self._left is None:
            self._left = lease.ready
        self._pause()
        answer = lease.next(number, **self._limits(limit))
        end = int(answer["end"])
        now = time.monotonic()
        self._latest = {**self._offset(end, lease), "ready": answer["ready"]}
        if end == number:
            self._asked_at = now
            return start
        self._batch_at = now
        if self._left is not None and end >= lease.first_new:
            self._left = max(0, self._left - int(answer["rows"]))
        return self._offset(end, lease)

    def _limits(self, limit: ReadLimit) -> dict[str, int | None]:
        settings = self._settings
        everything = isinstance(limit, ReadAllAvailable)
        max_rows = None if everything else settings.max_rows
        max_bytes = None if everything else settings.max_bytes
        min_rows = None if everything else settings.min_rows
        if time.monotonic() - self._batch_at >= settings.max_delay_seconds:
            min_rows = None
        if self._left is not None:
            # Exactly what was ready at the beginning; to wait for more would be to wait for ever.
            max_rows = self._left if max_rows is None else min(max_rows, self._left)
            min_rows = None if max_rows else _NOTHING_MORE
        return {"max_rows": max_rows or None, "max_bytes": max_bytes, "min_rows": min_rows}

    def _pause(self) -> None:
        """An idle stream asks ten times a second, not a hundred."""
        wait = self._asked_at + IDLE_SECONDS - time.monotonic()
        if wait > 0:
            time.sleep(wait)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """How far behind the stream is: in the progress events, `ready` is what waits beyond the batch."""
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, last = self._number(start), self._number(end)
        if first == last:
            return []
        answer = self._opened(end).describe(first + 1, last)
        if answer.get("missing") and self._settings.fail_on_data_loss:
            raise PipelineError(
                f"{answer['missing']} messages of lease {self._settings.lease!r} are gone: their queue was deleted while "
                "they were checked out. failOnDataLoss=false goes on without them"
            )
        total = sum(stream["count"] for checkout in answer["checkouts"] for stream in checkout["streams"])
        place = (answer["ticket"], self._settings.url, answer["root"], answer["host"], answer["data_url"])
        return [CheckoutPartition(pieces, *place) for pieces in split(answer["checkouts"], self._rows_each(total))]

    def _rows_each(self, total: int) -> int:
        settings = self._settings
        if settings.min_partitions is not None:
            wanted = math.ceil(total / settings.min_partitions)
        else:
            wanted = max(FEW_RECORDS, math.ceil(total / DEFAULT_PARTITIONS))
        return max(1, min(settings.max_records, wanted))

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: see rule 1."""

    def stop(self) -> None:
        if self._lease is not None:
            self._lease.end()
        if self._client is not None:
            self._client.close()

    def _opened(self, offset: Mapping[str, Any] | None) -> _Lease:
        """The lease, as a query with this offset has it; None: a query that begins."""
        born = None if offset is None else offset.get("born")
        if self._lease is None:
            settings, credentials = self._settings, self._credentials
            assert credentials is not None, "only the driver's reader opens a lease"
            # Who goes on with an offset has been answered at this url before: the broker restarts as well as the query.
            first_seconds = FIRST_SECONDS if offset is None else None
            self._client = BrokerClient(
                settings.url, credentials, first_seconds=first_seconds, ca_file=settings.ca_file
            )
            self._lease = _Lease(settings, credentials, self._client, offset is not None, born)
        elif born is not None and born != self._lease.born:  # its first batch is repeated, and begins with no offset
            raise PipelineError(
                f"lease {self._settings.lease!r} is not the one that the checkpoint knows: that was released. Begin with a "
                "new checkpoint"
            )
        return self._lease

    def _offset(self, number: int, lease: _Lease) -> dict[str, Any]:
        return {"born": lease.born, "checkout": number, "lease": self._settings.lease, "v": OFFSET_VERSION}

    def _number(self, offset: Mapping[str, Any]) -> int:
        settings = self._settings
        if offset.get("v") != OFFSET_VERSION or not isinstance(offset.get("checkout"), int):
            raise PipelineError(
                f"the checkpoint has the offset {dict(offset)!r}, which is not one of a stream with a lease; with "
                f"mode=consume begin with a new checkpointLocation"
            )
        if offset.get("lease") != settings.lease:
            raise PipelineError(
                f"the checkpoint is of lease {offset.get('lease')!r}, and the option lease is {settings.lease!r}: give the "
                f"same lease, or a new checkpointLocation"
            )
        return int(offset["checkout"])

    # -- on executors --------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, CheckoutPartition)
        settings = self._settings
        if settings.access != "http" and sees_files(partition.root, partition.host):
            return self._read_files(partition)
        if settings.access == "files":
            raise PipelineError(
                f"access=files: this executor does not see the broker's files in {partition.root}; use access=auto or http"
            )
        if partition.data_url is None:
            raise PipelineError(
                f"this executor does not see the broker's files in {partition.root}, and the broker has no data server; its "
                f"log says why"
            )
        return self._read_http(partition, partition.data_url)

    def _read_files(self, partition: CheckoutPartition) -> Iterator[pa.RecordBatch]:
        for piece in partition.pieces:
            # Of a queue that was deleted since there is no part at all, which is no reason not to count.
            yield from self._counted(piece, itertools.chain.from_iterable(self._open_files(partition, piece)))

    def _open_files(self, partition: CheckoutPartition, piece: Piece) -> list[Iterator[pa.RecordBatch]]:
        from warren.pipeline.rows import read_part

        settings = self._settings
        place = {"number": piece.number, "sid": piece.sid, "first": piece.first, "stop": piece.stop}
        for attempt in range(_REPLANS):
            root, parts = plan_checkout(partition.url, partition.ticket, **place, ca_file=settings.ca_file)
            try:
                return [
                    read_part(root, part, self._schema, fail_on_data_loss=settings.fail_on_data_loss) for part in parts
                ]
            except FileNotFoundError:
                # A checkpoint or a collection moved them since; the broker knows where to.
                if attempt == _REPLANS - 1:
                    raise
                time.sleep(_REPLAN_SECONDS)
        raise AssertionError("unreachable")

    def _read_http(self, partition: CheckoutPartition, data_url: str) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        settings = self._settings
        with BrokerClient(partition.url, ca_file=settings.ca_file) as client:
            for piece in partition.pieces:
                asked = {
                    "number": piece.number,
                    "sid": piece.sid,
                    "first": piece.first,
                    "stop": piece.stop,
                    "columns": self._schema.names,
                    "fail_on_data_loss": settings.fail_on_data_loss,
                }
                batches = client.stream(data_url, "/checkouts/read", partition.ticket, asked)
                for batch in self._counted(piece, batches):
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)

    def _counted(self, piece: Piece, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows that are fewer than were checked out are lost rows, and not the end of a short queue."""
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            yield batch
        if rows != piece.rows and self._settings.fail_on_data_loss:
            raise PipelineError(
                f"checkout {piece.number} has {piece.rows} messages in stream {piece.sid}, and {rows} of them are there: "
                "their queue was deleted, or they were transient and the vhost was restarted. failOnDataLoss=false goes on"
            )
