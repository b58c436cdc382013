"""mode=tap: a stream that reads queues and consumes nothing.

An offset is, for every queue, the seq_id up to which it was read: {"q": {"orders": 1200}, "v": 1}. A batch is what a snapshot
has between two of them, ready or handed out, so the queue's consumers are not disturbed. That is also its limit: a message
that was consumed before its batch was read is not in it, and a batch that Spark repeats may have fewer rows than at first.
For rows that must not be lost there is the lease (`stream_source.py`).

Rules:

1. A queue that is not in an offset was read up to 0: queues that appear later are read from their beginning.
2. A queue that was deleted, or declared anew since (its seq_ids start again), is data loss: an error, unless
   failOnDataLoss=false.
3. One snapshot a batch, released when the batch is durable: that is, when Spark asks for what follows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from warren.pipeline.broker_client import FIRST_SECONDS, BrokerClient, Credentials, forget_secrets
from warren.pipeline.errors import BrokerError, OptionError, PipelineError
from warren.pipeline.options import SourceOptions, checked_options, whole_number
from warren.pipeline.schema import ALL_COLUMNS, arrow_schema, arrow_schema_of
from warren.pipeline.stream_source import FEW_RECORDS, IDLE_SECONDS, OFFSET_VERSION, StreamSettings

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from warren.pipeline.batch_source import Place
    from warren.pipeline.parts import StreamPart

_NOT_FOR_TAP = ("lease", "maxBytesPerTrigger")


class TapStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark's side of a tap. The driver's process keeps the snapshot of the batch that runs."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        given = checked_options(options, "streaming read")
        for name in _NOT_FOR_TAP:
            if name in given:
                raise OptionError(f"option {name} is for mode=consume; a stream with mode=tap has none: leave it out")
        self._settings = StreamSettings.from_options(options, needs_lease=False)
        self._ttl = whole_number(given, "snapshotTtl", 1) or SourceOptions().snapshot_ttl
        self._schema = arrow_schema_of(schema, arrow_schema(ALL_COLUMNS))
        self._credentials: Credentials | None = Credentials.from_options(options)
        forget_secrets(options)
        self._client: BrokerClient | None = None
        self._held: tuple[str, dict[str, int]] | None = None  # a snapshot, and the end of the batch that it serves
        self._asked_at = -math.inf
        self._batch_at = -math.inf
        self._target: dict[str, int] | None = None  # of AvailableNow
        self._latest: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_settings": self._settings, "_schema": self._schema, "_credentials": None}

    # -- on the driver -------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        return _offset(self._tails() if self._settings.starting == "latest" else {})

    def getDefaultReadLimit(self) -> ReadLimit:
        return self._settings.limit

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._tails()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = _read_up_to(start)
        self._release(begin)
        wait = self._asked_at + IDLE_SECONDS - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        tails = self._tails() if self._target is None else self._target
        self._check_loss(begin, tails)
        end = self._cut(begin, tails, limit)
        now = time.monotonic()
        self._latest = {**_offset({**begin, **tails}), "behind": _behind(end, tails)}
        if end == begin:
            self._asked_at = now
            return start
        self._batch_at = now
        return _offset(end)

    def _cut(self, begin: dict[str, int], tails: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """How far to read: every queue as much of the limit as it has of the backlog."""
        settings = self._settings
        behind = _behind(begin, tails)
        if not behind:
            return begin
        if not isinstance(limit, ReadAllAvailable):
            late = time.monotonic() - self._batch_at >= settings.max_delay_seconds or self._target is not None
            if settings.min_rows is not None and behind < settings.min_rows and not late:
                return begin
            if settings.max_rows is not None and behind > settings.max_rows:
                share = settings.max_rows / behind
                return {**begin, **{name: _step(begin.get(name, 0), tail, share) for name, tail in tails.items()}}
        return {**begin, **tails}

    def _check_loss(self, begin: dict[str, int], tails: dict[str, int]) -> None:
        if not self._settings.fail_on_data_loss:
            return
        for name, position in begin.items():
            if name not in tails:
                what = "is gone"
            elif tails[name] < position:
                what = f"was declared anew: it is at {tails[name]}"
            else:
                continue
            raise PipelineError(
                f"queue {name!r} in vhost {self._settings.vhost!r} {what}, and the stream has read it up to {position}; with "
                f"failOnDataLoss=false the stream goes on with what is there"
            )

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        from warren.pipeline.batch_source import WarrenPartition

        begin, stop = _read_up_to(start), _read_up_to(end)
        # A queue that was declared anew has an end before its start: all of it is new.
        wanted = {
            name: (at if (at := begin.get(name, 0)) <= tail else 0, tail)
            for name, tail in stop.items()
            if begin.get(name, 0) != tail
        }
        if not wanted:
            return []
        place = self._take(sorted(wanted), stop)
        asked = [self._asked(name, *wanted[name]) for name in sorted(wanted)]
        parts = self._plan_files(place, asked) if place.by_files else self._plan_http(place, asked)
        few = min(FEW_RECORDS, self._settings.max_records)
        return [WarrenPartition(place, lot) for lot in _lots(parts, few)]

    def _asked(self, queue: str, first: int, stop: int) -> SourceOptions:
        settings = self._settings
        asked = SourceOptions(
            url=settings.url,
            vhost=settings.vhost,
            queue=queue,
            from_seq=first,
            to_seq=stop,
            max_records=settings.max_records,
        )
        if settings.min_partitions is None:
            return asked
        return dataclasses.replace(asked, min_partitions=settings.min_partitions)

    def _take(self, queues: list[str], end: dict[str, int]) -> Place:
        from warren.pipeline.batch_source import Place
        from warren.storage.layout import hashed

        self._release(None)
        settings = self._settings
        answer = self._ask("snapshots/take", queues=queues, pattern=None, ttl=self._ttl)
        self._held = answer["id"], end
        root = os.path.join(answer["path"], "vhosts", hashed(settings.vhost))
        return Place(root, answer["host"], answer["data_url"], answer["ticket"], settings.access, settings.ca_file)

    def _plan_files(self, place: Place, asked: list[SourceOptions]) -> list[StreamPart]:
        from warren.pipeline.store_view import open_view

        view = open_view(os.path.dirname(os.path.dirname(place.root)), self._settings.vhost)
        return [part for one in asked for part in view.parts(one)]

    def _plan_http(self, place: Place, asked: list[SourceOptions]) -> list[StreamPart]:
        from warren.pipeline.parts import StreamPart

        assert place.data_url is not None
        assert place.ticket is not None
        parts: list[StreamPart] = []
        for one in asked:
            options = {
                "vhost": one.vhost,
                "queue": one.queue,
                "fromSeqId": str(one.from_seq),
                "toSeqId": str(one.to_seq),
                "minPartitions": str(one.min_partitions),
                "maxRecordsPerPartition": str(one.max_records),
            }
            answer = self._driver().ask(place.data_url, "/snapshots/plan", place.ticket, {"options": options})
            parts += [StreamPart.from_json(part) for part in answer["parts"]]
        return parts

    def _release(self, durable: dict[str, int] | None) -> None:
        """Let the snapshot go, if the batch that it serves is durable; None: in any case."""
        if self._held is None or (durable is not None and self._held[1] != durable):
            return
        name, self._held = self._held[0], None
        with contextlib.suppress(PipelineError):  # its time ends anyway
            self._ask("snapshots/release", id=name)

    def _tails(self) -> dict[str, int]:
        """How far each queue is."""
        settings = self._settings
        try:
            answer = self._ask("tap/status", queues=settings.queues, pattern=settings.pattern)
        except BrokerError as error:
            if error.code == "not_found" and not settings.fail_on_data_loss:
                return {}
            raise
        return {name: int(found["next_seq_id"]) for name, found in answer["queues"].items()}

    def _ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        return self._driver().call(request, vhost=self._settings.vhost, **arguments)

    def _driver(self) -> BrokerClient:
        if self._client is None:
            assert self._credentials is not None, "only the driver's reader asks the broker"
            self._client = BrokerClient(
                self._settings.url, self._credentials, first_seconds=FIRST_SECONDS, ca_file=self._settings.ca_file
            )
        return self._client

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is consumed."""

    def stop(self) -> None:
        self._release(None)
        if self._client is not None:
            self._client.close()

    # -- on executors --------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from warren.pipeline.batch_source import WarrenPartition, read_at

        assert isinstance(partition, WarrenPartition)
        for part in partition.parts:
            yield from read_at(partition.place, part, self._schema, self._settings.fail_on_data_loss)


def _lots(parts: Sequence[StreamPart], few: int) -> Iterator[tuple[StreamPart, ...]]:
    """Small parts share a task."""
    from warren.pipeline.store_view import estimated_rows

    lot: list[StreamPart] = []
    rows = 0
    for part in parts:
        lot.append(part)
        rows += estimated_rows(part)
        if rows >= few:
            yield tuple(lot)
            lot, rows = [], 0
    if lot:
        yield tuple(lot)


def _offset(queues: Mapping[str, int]) -> dict[str, Any]:
    return {"q": dict(sorted(queues.items())), "v": OFFSET_VERSION}


def _read_up_to(offset: Mapping[str, Any]) -> dict[str, int]:
    if offset.get("v") != OFFSET_VERSION or not isinstance(offset.get("q"), dict):
        raise PipelineError(
            f"the checkpoint has the offset {dict(offset)!r}, which is not one of mode=tap; begin with a new "
            f"checkpointLocation"
        )
    return dict(offset["q"])


def _behind(begin: Mapping[str, int], tails: Mapping[str, int]) -> int:
    return sum(tail - at if (at := begin.get(name, 0)) <= tail else tail for name, tail in tails.items())


def _step(position: int, tail: int, share: float) -> int:
    start = position if position <= tail else 0
    return min(tail, start + math.ceil((tail - start) * share))
