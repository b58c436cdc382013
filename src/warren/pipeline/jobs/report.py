"""`warren spark report`: what is in the queues of a vhost, counted on Spark, as one HTML file that opens without network.

Everything is counted where the messages are; what comes to the driver is a few hundred rows. The report shows what is in
the store at one moment: the rate over time is that of the messages which are still there.

`report_data` counts, `report_plots.py` draws, `report_page.py` writes the page.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from warren.pipeline.jobs.origin import Origin
from warren.pipeline.session import clear_errors

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TOP = 20  # of queues in a plot, routing keys, files
_COLUMNS = "queue,published_at,size,exchange,routing_key,headers,redelivered"
_DEATHS = "array<struct<reason string, queue string, exchange string, count bigint>>"
_RATE_BUCKETS = 60
_STEPS = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400)  # seconds
_MICROSECONDS = 1_000_000

# Upper ends, and what to call them.
AGES: tuple[tuple[float, str], ...] = (
    (1, "under 1 s"),
    (10, "1 to 10 s"),
    (60, "10 to 60 s"),
    (600, "1 to 10 min"),
    (3600, "10 to 60 min"),
    (6 * 3600, "1 to 6 h"),
    (86400, "6 to 24 h"),
    (7 * 86400, "1 to 7 days"),
    (float("inf"), "over 7 days"),
)
SIZES: tuple[tuple[float, str], ...] = (
    (64, "under 64 B"),
    (256, "64 to 255 B"),
    (1024, "256 B to 1 KiB"),
    (4096, "1 to 4 KiB"),
    (16 * 1024, "4 to 16 KiB"),
    (64 * 1024, "16 to 64 KiB"),
    (1024 * 1024, "64 KiB to 1 MiB"),
    (float("inf"), "1 MiB and more"),
)


class QueueDepth(NamedTuple):
    queue: str
    ready: int
    unacked: int
    bytes: int  # of bodies
    oldest_seconds: float | None  # the age of the oldest message; None: there is none
    mean_size: float | None
    largest: int | None
    redelivered: int


class FileShare(NamedTuple):
    file: str
    bytes: int
    live_bytes: int
    garbage_bytes: int


class HotKey(NamedTuple):
    exchange: str
    routing_key: str
    messages: int
    bytes: int


class Deaths(NamedTuple):
    reason: str
    queue: str  # in which they died
    messages: int
    deaths: int  # a message may die more than once


class Rate(NamedTuple):
    at: int  # seconds since 1970
    messages: int


@dataclass(slots=True)
class ReportData:
    """What the page shows."""

    place: str
    vhost: str
    made_at: float  # seconds since 1970
    queues: list[QueueDepth] = field(default_factory=list)  # deepest first
    ages: list[tuple[str, int]] = field(default_factory=list)
    sizes: list[tuple[str, int]] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    rate_seconds: int = 1  # the width of a bucket of `rates`
    files: list[FileShare] = field(default_factory=list)
    keys: list[HotKey] = field(default_factory=list)
    deaths: list[Deaths] = field(default_factory=list)
    seconds: float = 0.0  # that the counting took

    @property
    def messages(self) -> int:
        return sum(queue.ready + queue.unacked for queue in self.queues)

    @property
    def bytes(self) -> int:
        return sum(queue.bytes for queue in self.queues)

    @property
    def garbage_fraction(self) -> float:
        total = sum(file.live_bytes + file.garbage_bytes for file in self.files)
        return sum(file.garbage_bytes for file in self.files) / total if total else 0.0


def report_data(spark: SparkSession, origin: Origin, now: float | None = None) -> ReportData:
    """Count what is in the queues of `origin`. `now` is the moment from which ages count."""
    began = time.monotonic()
    with clear_errors():
        depths = origin.read(spark, table="queues", columns="queue,ready,unacked").collect()
        files = origin.read(spark, table="files").where("store = 'persistent'").collect()
        messages = _messages(origin.read(spark, queuePattern=".*", columns=_COLUMNS)).persist()
        try:
            data = ReportData(origin.place, origin.vhost, time.time() if now is None else now)
            details = {row.queue: row for row in _by_queue(messages).collect()}
            data.queues = sorted(
                (_depth(row, details.get(row.queue), data.made_at) for row in depths),
                key=lambda queue: (-queue.ready - queue.unacked, queue.queue),
            )
            data.files = sorted(
                (FileShare(row.file, row.bytes, row.live_bytes or 0, row.garbage_bytes or 0) for row in files),
                key=lambda file: -file.garbage_bytes,
            )
            data.ages = _in_buckets(messages, _age(data.made_at), AGES)
            data.sizes = _in_buckets(messages, "size", SIZES)
            data.rates, data.rate_seconds = _rates(messages, list(details.values()))
            data.keys = _hot_keys(messages)
            data.deaths = _deaths(messages)
        finally:
            messages.unpersist()
    data.seconds = time.monotonic() - began
    return data


def _messages(messages: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    # As numbers: the driver's zone is no part of a moment.
    return messages.withColumn("micros", F.unix_micros("published_at")).drop("published_at")


def _by_queue(messages: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return messages.groupBy("queue").agg(
        F.min("micros").alias("oldest"),
        F.max("micros").alias("newest"),
        F.sum("size").alias("bytes"),
        F.avg("size").alias("mean"),
        F.max("size").alias("largest"),
        F.sum(F.col("redelivered").cast("bigint")).alias("redelivered"),
    )


def _depth(row: Any, detail: Any, now: float) -> QueueDepth:
    if detail is None:
        return QueueDepth(row.queue, row.ready, row.unacked, 0, None, None, None, 0)
    oldest = max(0.0, now - detail.oldest / _MICROSECONDS)
    return QueueDepth(
        row.queue,
        row.ready,
        row.unacked,
        detail.bytes or 0,
        oldest,
        detail.mean,
        detail.largest,
        detail.redelivered or 0,
    )


def _age(now: float) -> Column:
    from pyspark.sql import functions as F

    return (F.lit(round(now * _MICROSECONDS)) - F.col("micros")) / _MICROSECONDS


def _in_buckets(messages: DataFrame, value: Column | str, ends: tuple[tuple[float, str], ...]) -> list[tuple[str, int]]:
    from pyspark.sql import functions as F

    column = F.col(value) if isinstance(value, str) else value
    bucket = F.lit(len(ends) - 1)
    for number in reversed(range(len(ends) - 1)):
        bucket = F.when(column < ends[number][0], number).otherwise(bucket)
    rows = messages.groupBy(bucket.alias("bucket")).count().collect()
    counts = {row["bucket"]: row["count"] for row in rows}
    return [(name, counts.get(number, 0)) for number, (_, name) in enumerate(ends)]


def rate_step(seconds: float) -> int:
    """The width of a bucket, so that there are a few dozen of them.

    >>> rate_step(3600)
    60
    """
    wanted = seconds / _RATE_BUCKETS
    return next((step for step in _STEPS if step >= wanted), _STEPS[-1])


def _rates(messages: DataFrame, details: list[Any]) -> tuple[list[Rate], int]:
    from pyspark.sql import functions as F

    if not details:
        return [], 1
    first, last = min(row.oldest for row in details), max(row.newest for row in details)
    step = rate_step((last - first) / _MICROSECONDS)
    at = F.expr(f"micros div {step * _MICROSECONDS}").alias("at")
    rows = messages.groupBy(at).count().orderBy("at").collect()
    counts = {row["at"]: row["count"] for row in rows}
    low, high = min(counts), max(counts)
    if high - low > 20 * _RATE_BUCKETS:  # one stray message of long ago: only what is there
        return [Rate(number * step, counts[number]) for number in sorted(counts)], step
    return [Rate(number * step, counts.get(number, 0)) for number in range(low, high + 1)], step


def _hot_keys(messages: DataFrame) -> list[HotKey]:
    from pyspark.sql import functions as F

    counted = messages.groupBy("exchange", "routing_key").agg(
        F.count("*").alias("messages"), F.sum("size").alias("bytes")
    )
    rows = counted.orderBy(F.desc("messages"), "exchange", "routing_key").limit(TOP).collect()
    return [HotKey(row.exchange or "", row.routing_key or "", row.messages, row.bytes or 0) for row in rows]


def _deaths(messages: DataFrame) -> list[Deaths]:
    from pyspark.sql import functions as F

    died = messages.where(F.col("headers").isNotNull()).select(
        F.explode(F.from_json(F.col("headers")["x-death"], _DEATHS)).alias("death")
    )
    counted = died.groupBy("death.reason", "death.queue").agg(
        F.count("*").alias("messages"), F.sum(F.coalesce("death.count", F.lit(1))).alias("deaths")
    )
    rows = counted.orderBy(F.desc("messages"), "reason", "queue").limit(10 * TOP).collect()
    return [Deaths(row.reason or "", row.queue or "", row.messages, row.deaths) for row in rows]
