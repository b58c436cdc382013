"""`warren spark archive`: queues as Parquet, and `replay`: back into an exchange.

    <archive>/run=<id>/vhost=<v>/queue=<q>/day=<YYYY-MM-DD>/part-*.parquet     messages, by seq_id within a file
    <archive>/_ledger/<id>.json                                                what the run holds

A run is written beside the others, under a name that readers of Parquet pass over, and appears by one rename: it is there
whole or not at all. Then its ledger is written, counted from what was written, not from what was meant to be. Nothing in
the queue is touched. A second run is another directory; where it has messages that an earlier one has, `replay` takes
one of them.

Directories are those of Hadoop: a path, or hdfs://, s3a:// and the like where Spark has the jars for them.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import pickle
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from warren.pipeline.amqp_rows import TYPES as PUBLISHED
from warren.pipeline.batch_source import plan_read
from warren.pipeline.errors import PipelineError
from warren.pipeline.jobs.archive_files import ARCHIVED, QueueCount, escaped, write_parts
from warren.pipeline.jobs.division import divide
from warren.pipeline.jobs.origin import Origin
from warren.pipeline.options import SourceOptions
from warren.pipeline.schema import spark_ddl
from warren.pipeline.session import clear_errors
from warren.pipeline.store_view import estimated_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PARTITIONS = ("vhost", "queue", "day")
_LEDGER = "_ledger"
_SHOWN = 10  # queues that an error names
_MOST_NAME_BYTES = 255  # of a name in a directory
_ROW_BYTES = 256  # of a message, to divide the work by


@dataclass(slots=True)
class ArchiveRun:
    """One run of `archive`."""

    run: str
    directory: str
    source: str
    queues: list[QueueCount]
    written_at: str
    seconds: float

    @property
    def messages(self) -> int:
        return sum(queue.messages for queue in self.queues)

    @property
    def messages_per_second(self) -> float:
        return self.messages / self.seconds if self.seconds else 0.0


class _Directory:
    """A directory of any file system that Spark knows."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._jvm = cast(Any, spark.sparkContext._jvm)
        context = cast(Any, spark.sparkContext._jsc)
        self._path = self._jvm.org.apache.hadoop.fs.Path(path)
        self._fs = self._path.getFileSystem(context.hadoopConfiguration())
        self._fs.setWriteChecksum(False)
        self.path = str(self._fs.makeQualified(self._path).toString())

    def _below(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._path, name)

    def below(self, name: str) -> str:
        return f"{self.path}/{name}"

    @property
    def is_local(self) -> bool:
        """Is it a path, and not an address?"""
        return self.path.startswith("file:")

    def local(self, name: str) -> str:
        """The path of something in a directory that is local."""
        return os.path.join(str(self._path.toUri().getPath()), name)

    def names(self) -> list[str]:
        """Of what is in it; nothing where there is no such directory."""
        if not self._fs.exists(self._path):
            return []
        return sorted(str(status.getPath().getName()) for status in self._fs.listStatus(self._path))

    def rename(self, name: str, to: str) -> None:
        if not self._fs.rename(self._below(name), self._below(to)):
            raise PipelineError(f"cannot rename {self.below(name)} to {to}: the file system refuses")

    def delete(self, name: str) -> None:
        self._fs.delete(self._below(name), True)

    def write(self, name: str, text: str) -> None:
        """All of it or nothing: written aside, then renamed."""
        part = self._below(f"{name}.part")
        stream = self._fs.create(part, True)
        stream.write(bytearray(text.encode()))
        stream.close()
        self.rename(f"{name}.part", name)


def archive(
    spark: SparkSession,
    origin: Origin,
    to: str,
    *,
    queue: str | None = None,
    queue_pattern: str | None = None,
    from_seq_id: int | None = None,
    to_seq_id: int | None = None,
    since: str | None = None,
    until: str | None = None,
) -> ArchiveRun:
    """Write messages of `origin` to a new run in the archive `to`."""
    began = time.monotonic()
    run = new_run()
    asked = {
        "queue": queue,
        "queuePattern": queue_pattern or (".*" if queue is None else None),
        "fromSeqId": from_seq_id,
        "toSeqId": to_seq_id,
        "since": since,
        "until": until,
    }
    with clear_errors():
        directory = _Directory(spark, to)
        part = f"_run-{run}.part"
        try:
            if directory.is_local:
                queues = _write_files(spark, origin, asked, directory.local(part))
            else:
                queues = _write_elsewhere(spark, origin, asked, directory.below(part))
        except BaseException:
            directory.delete(part)
            raise
        directory.rename(part, f"run={run}")
        moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        done = ArchiveRun(run, directory.path, origin.place, queues, moment, time.monotonic() - began)
        directory.write(f"{_LEDGER}/{run}.json", json.dumps(asdict(done), indent=1))
    return done


def _write_files(
    spark: SparkSession, origin: Origin, asked: Mapping[str, str | int | None], directory: str
) -> list[QueueCount]:
    """A directory that every executor sees: a task writes what it reads, and no row becomes one of Spark's."""
    given = {**origin.read_options(), **{name: str(value) for name, value in asked.items() if value is not None}}
    place, parts = plan_read(SourceOptions.parse(given), given)
    for part in parts:
        _check_name(part.queue)
    os.makedirs(directory)
    groups = divide(spark, list(enumerate(parts)), lambda each: estimated_rows(each[1]) * _ROW_BYTES)
    if not groups:
        return []
    work = [pickle.dumps((place, directory, group)) for group in groups]
    results = spark.sparkContext.parallelize(work, len(work)).map(write_parts).collect()
    found: dict[tuple[str, str], QueueCount] = {}
    for count in itertools.chain.from_iterable(results):
        key = (count.vhost, count.queue)
        found[key] = count if key not in found else found[key].plus(count)
    return [found[key] for key in sorted(found)]


def _check_name(queue: str) -> None:
    size = len(f"queue={escaped(queue)}".encode())
    if size > _MOST_NAME_BYTES:
        raise PipelineError(
            f"queue {queue!r} cannot be archived: its name makes a directory's name of {size} bytes, and file systems have "
            f"room for {_MOST_NAME_BYTES}. Leave it out with --queue or --queue-pattern"
        )


def _write_elsewhere(
    spark: SparkSession, origin: Origin, asked: Mapping[str, str | int | None], path: str
) -> list[QueueCount]:
    """A file system that only Spark knows."""
    from pyspark.sql import functions as F

    messages = origin.read(spark, columns=",".join(ARCHIVED), **asked).withColumn("day", F.to_date("published_at"))
    # The writer wants the partitions in order; with seq_id behind them, rows of a file are, too.
    messages.sortWithinPartitions(*_PARTITIONS, "seq_id").write.partitionBy(*_PARTITIONS).parquet(path)
    return _counted(spark.read.schema(_schema()).parquet(path))


def new_run() -> str:
    """A name that sorts by time and that nobody else takes."""
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"{moment}-{secrets.token_hex(3)}"


def _schema(*more: str) -> str:
    return ", ".join([spark_ddl(ARCHIVED), "day DATE", *more])


def _counted(messages: DataFrame) -> list[QueueCount]:
    from pyspark.sql import functions as F

    counts = messages.groupBy("vhost", "queue").agg(
        F.count("*").alias("messages"),
        F.sum("size").alias("bytes"),
        F.min("seq_id").alias("low"),
        F.max("seq_id").alias("high"),
    )
    rows = counts.orderBy("vhost", "queue").collect()
    return [QueueCount(row.vhost, row.queue, row.messages, row.bytes, row.low, row.high) for row in rows]


def runs_of(spark: SparkSession, path: str) -> list[str]:
    """The runs of an archive, oldest first."""
    return [name.removeprefix("run=") for name in _Directory(spark, path).names() if name.startswith("run=")]


def read_archive(spark: SparkSession, path: str, runs: list[str] | None = None) -> DataFrame:
    """The messages of an archive, each once, however many runs have it."""
    there = runs_of(spark, path)
    if not there:
        raise PipelineError(
            f"{path} is no archive: there is no run=... in it. `warren spark archive --to {path}` makes one"
        )
    unknown = [run for run in runs or [] if run not in there]
    if unknown:
        raise PipelineError(f"{path} has no run {unknown[0]!r}; there are {', '.join(there)}")
    chosen = runs or there
    messages = spark.read.schema(_schema("run STRING")).parquet(path)
    messages = messages.where(messages.run.isin(chosen))
    # A queue that was deleted and declared again begins with its seq_ids anew, at another time.
    return messages.dropDuplicates(["vhost", "queue", "seq_id", "published_at"]) if len(chosen) > 1 else messages


def replay(
    spark: SparkSession,
    path: str,
    target: Origin,
    *,
    exchange: str | None = None,
    routing_key: str | None = None,
    runs: list[str] | None = None,
    queue: str | None = None,
    vhost: str | None = None,
) -> int:
    """Publish an archive to `target`, a broker, in the order of its queues; how many messages. Exchange and routing key
    are those that the messages were published with, unless given. Exactly once: a run that fails publishes nothing. So it
    does where no queue takes some of them."""
    from pyspark.sql import functions as F

    with clear_errors():
        messages = read_archive(spark, path, runs)
        if vhost is not None:
            messages = messages.where(messages.vhost == vhost)
        if queue is not None:
            messages = messages.where(messages.queue == queue)
        count = messages.count()
        if not count and (vhost is not None or queue is not None):
            raise PipelineError(_nothing_of(spark, path, runs, vhost, queue))
        dropped = [name for name, given in (("exchange", exchange), ("routing_key", routing_key)) if given is not None]
        columns = [name for name in ARCHIVED if name in PUBLISHED and name not in dropped]
        rows = messages.orderBy("vhost", "queue", "seq_id").select(*columns)
        # Headers as they were sent; an archive of an older Warren has only their text.
        rows = rows.withColumn("headers", F.when(rows.headers_table.isNull(), rows.headers))
        # A broker takes a user_id only from the user himself: with another's nothing of the archive could be published.
        mine = F.lit(target.user or os.environ.get("WARREN_USER") or "")
        rows = rows.withColumn("user_id", F.when(rows.user_id == mine, rows.user_id))
        publish(rows, target, exchange, routing_key)
    return count


def _nothing_of(spark: SparkSession, path: str, runs: list[str] | None, vhost: str | None, queue: str | None) -> str:
    known = read_archive(spark, path, runs).select("vhost", "queue").distinct().orderBy("vhost", "queue").limit(_SHOWN)
    there = ", ".join(f"{row.queue!r} of vhost {row.vhost!r}" for row in known.collect()) or "nothing at all"
    wanted = " of ".join(f"{what} {name!r}" for what, name in (("queue", queue), ("vhost", vhost)) if name is not None)
    return f"{path} has no messages of {wanted}; there is {there}"


def publish(rows: DataFrame, target: Origin, exchange: str | None, routing_key: str | None) -> None:
    """Through the sink, all rows or none: also where no queue takes one of them."""
    writer = rows.write.format("warren").mode("append").options(**target.options(), mandatory="true")
    for name, value in (("exchange", exchange), ("routingKey", routing_key)):
        if value is not None:
            writer = writer.option(name, value)
    writer.save()
