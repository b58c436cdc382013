"""The rows of the pipeline's table: Spark on this machine, two cores, against the same store.

One session serves all rows, as a job of many queries would have it; what is counted is the second run of a query, when
the JVM has compiled it. A broker, where one is needed, is `warren serve` in processes of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import warren
from bench.harness import Row, median, scratch
from warren.pipeline.jobs.archive import archive
from warren.pipeline.jobs.origin import Origin
from warren.pipeline.jobs.verify import verify_on_spark
from warren.pipeline.session import spark_session
from warren.storage.layout import hashed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BODY = b"x" * 100
_BATCH = 10_000
_READY = re.compile(r"ready: AMQP on [^:]+:(\d+), status page on (http://[^,]+)")
_NARROW = "queue,seq_id,size,body"
_PIKA_MESSAGES = 50_000


def _session(cores: int = 2) -> SparkSession:
    return spark_session(f"local[{cores}]", "warren bench", {"spark.driver.memory": "4g"})


def _fill(path: str, count: int) -> None:
    with warren.open(path, durability="os") as store:
        queue = store.queue("bench")
        for _ in range(count // _BATCH):
            queue.publish_many([BODY] * _BATCH)


@contextlib.contextmanager
def _served(path: str) -> Iterator[tuple[int, str]]:
    """`warren serve` on a directory: its AMQP port and its HTTP address."""
    log = f"{path}.log"
    with open(log, "wb") as file:
        arguments = ["--data-dir", path, "--amqp-port", "0", "--http-port", "0"]
        process = subprocess.Popen(
            [sys.executable, "-m", "warren.cli.main", "serve", *arguments],
            stdout=file,
            stderr=file,
            env={**os.environ, "NO_COLOR": "1"},
        )
    try:
        while True:
            with open(log) as text:
                said = text.read()
            if found := _READY.search(said):
                break
            if process.poll() is not None:
                raise RuntimeError(f"the broker did not start: {said}")
            time.sleep(0.05)
        yield int(found[1]), found[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(600)


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _read(spark: SparkSession, path: str, columns: str | None) -> DataFrame:
    reader = spark.read.format("warren").option("path", path).option("queue", "bench")
    if columns is not None:
        reader = reader.option("columns", columns)
    return reader.load()


def _bytes_read(spark: SparkSession, path: str, columns: str | None, expected: int) -> None:
    """Sum over body length; with all columns, also over every one of them."""
    frame = _read(spark, path, columns)
    sums = ["sum(length(body)) as bytes"]
    if columns is None:
        sums += [f"count({name})" for name in frame.columns]
    assert frame.selectExpr(*sums).first().bytes == expected * len(BODY)  # type: ignore[union-attr]


def read(repeat: int, size: float) -> list[Row]:
    """Batch read, against draining with pika."""
    count = max(_BATCH, int(5_000_000 * size) // _BATCH * _BATCH)
    spark = _session()
    with scratch() as directory:
        path = f"{directory}/data"
        _fill(path, count)
        rates: dict[str, list[float]] = {"Spark, 4 columns": [], "Spark, all columns": [], "pika": []}
        for name, columns in (("Spark, 4 columns", _NARROW), ("Spark, all columns", None)):
            _bytes_read(spark, path, columns, count)  # the first run compiles
            for _ in range(repeat):
                rates[name].append(count / _seconds(partial(_bytes_read, spark, path, columns, count)))
                print(f"    {name}: {rates[name][-1]:,.0f} rows/s", flush=True)
        with _served(path) as (port, _):
            for _ in range(repeat):
                rates["pika"].append(_drain_with_pika(port, min(_PIKA_MESSAGES, count // repeat)))
                print(f"    pika: {rates['pika'][-1]:,.0f} msg/s", flush=True)
    found = {name: median(values) for name, values in rates.items()}
    ratio = found["Spark, 4 columns"] / found["pika"]
    return [
        Row(
            f"batch read of {count:,} x 100 B, {_NARROW}, second run",
            f"{found['Spark, 4 columns']:,.0f} rows/s, {ratio:.0f} x pika; all columns {found['Spark, all columns']:,.0f}",
            "at least 1 M rows/s and 30 x pika",
            found["Spark, 4 columns"] >= 1_000_000 and ratio >= 30,
            found,
        )
    ]


def _drain_with_pika(port: int, count: int) -> float:
    """As pika's documentation has it: consume, ack each."""
    import pika

    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=1000)
    done = 0

    def take(ch: Any, method: Any, properties: Any, body: bytes) -> None:
        nonlocal done
        ch.basic_ack(method.delivery_tag)
        done += 1
        if done >= count:
            ch.stop_consuming()

    channel.basic_consume("bench", take)
    seconds = _seconds(channel.start_consuming)
    connection.close()
    return done / seconds


def stream(repeat: int, size: float) -> list[Row]:
    """A stream that takes a full queue, to nowhere: AvailableNow, from the start of the query to its end."""
    count = max(_BATCH, int(3_000_000 * size) // _BATCH * _BATCH)
    spark = _session()
    rates = []
    for number in range(repeat + 1):  # the first run compiles
        with scratch() as directory:
            _fill(f"{directory}/data", count)
            with _served(f"{directory}/data") as (_, url):
                query = (
                    spark.readStream.format("warren")
                    .options(url=url, user="guest", password="guest", queue="bench", lease="bench")
                    .options(columns=_NARROW, maxOffsetsPerTrigger=500_000)
                    .load()
                    .writeStream.format("noop")
                    .option("checkpointLocation", f"{directory}/checkpoint")
                    .trigger(availableNow=True)
                )
                begin = time.perf_counter()
                started = query.start()
                started.awaitTermination()
                seconds = time.perf_counter() - begin
                rows = sum(progress["numInputRows"] for progress in started.recentProgress)
                assert rows == count, f"{rows} of {count} rows"
        if number:
            rates.append(count / seconds)
        print(f"    {number}/{repeat}: {count / seconds:,.0f} msg/s", flush=True)
    rate = median(rates)
    return [
        Row(
            f"streaming read of {count:,} x 100 B from a full queue, {_NARROW}",
            f"{rate:,.0f} msg/s",
            "at least 300k msg/s",
            rate >= 300_000,
            {"stream": rate},
        )
    ]


def sink(repeat: int, size: float) -> list[Row]:
    """Rows to an exchange, until all of them are confirmed and in their queue."""
    count = int(1_000_000 * size)
    spark = _session()
    rates = []
    with scratch() as directory, _served(f"{directory}/data") as (port, url):
        import pika

        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
        channel = connection.channel()
        channel.queue_declare("bench", durable=True)
        for number in range(repeat + 1):
            frame = spark.range(0, count, 1, 2).selectExpr("repeat('x', 100) as body")
            writer = frame.write.format("warren").mode("append").option("exchange", "").option("routingKey", "bench")
            seconds = _seconds(writer.options(url=url, user="guest", password="guest").save)
            found = channel.queue_declare("bench", passive=True).method.message_count
            assert found == count, f"{found} of {count} messages"
            channel.queue_purge("bench")
            if number:
                rates.append(count / seconds)
            print(f"    {number}/{repeat}: {count / seconds:,.0f} msg/s", flush=True)
        connection.close()
    rate = median(rates)
    return [
        Row(
            f"confirmed sink, {count:,} x 100 B, fsync",
            f"{rate:,.0f} msg/s",
            "at least 100k msg/s",
            rate >= 100_000,
            {"sink": rate},
        )
    ]


def jobs(repeat: int, size: float) -> list[Row]:
    """verify and archive of the same store."""
    count = max(_BATCH, int(5_000_000 * size) // _BATCH * _BATCH)
    spark = _session()
    rates: dict[str, list[float]] = {"verify": [], "archive": []}
    with scratch() as directory:
        path = f"{directory}/data"
        _fill(path, count)
        root = os.path.join(path, "vhosts", hashed("/"))
        for number in range(repeat + 1):
            result = verify_on_spark(spark, root)
            assert not result.damage
            run = archive(spark, Origin(path=path), f"{directory}/archive", queue="bench")
            assert sum(queue.messages for queue in run.queues) == count
            shutil.rmtree(f"{directory}/archive")
            if number:
                rates["verify"].append(count / result.seconds)
                rates["archive"].append(count / run.seconds)
            print(f"    {number}/{repeat}: verify {count / result.seconds:,.0f}, archive {count / run.seconds:,.0f}")
    found = {name: median(values) for name, values in rates.items()}
    return [
        Row(
            f"{name} of {count:,} x 100 B",
            f"{found[name]:,.0f} messages/s",
            f"at least {target:,} messages/s",
            found[name] >= target,
            {name: found[name]},
        )
        for name, target in (("verify", 1_000_000), ("archive", 500_000))
    ]


def scaling(repeat: int, size: float) -> list[Row]:
    """Batch read of 1, 2, 4, 8 M messages with one and two cores; recorded, without a target."""
    values: dict[str, float] = {}
    for cores in (1, 2):
        spark = _session(cores)
        for millions in (1, 2, 4, 8):
            count = max(_BATCH, int(millions * 1_000_000 * size) // _BATCH * _BATCH)
            with scratch() as directory:
                _fill(f"{directory}/data", count)
                _bytes_read(spark, f"{directory}/data", _NARROW, count)
                seconds = _seconds(partial(_bytes_read, spark, f"{directory}/data", _NARROW, count))
            values[f"{cores} core{'s' * (cores > 1)}, {millions} M"] = count / seconds
            print(f"    {cores} x {millions} M: {count / seconds:,.0f} rows/s", flush=True)
        spark.stop()
    figure = ", ".join(f"{name}: {value:,.0f}" for name, value in values.items())
    return [Row("batch read, scaling (rows/s)", figure, "recorded", True, values)]


ROWS: dict[str, Callable[[int, float], list[Row]]] = {
    "spark-read": read,
    "spark-stream": stream,
    "spark-sink": sink,
    "spark-jobs": jobs,
    "spark-scaling": scaling,
}
