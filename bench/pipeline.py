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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

import warren
from bench.cpu_shares import CpuShares, jvm_pid, shown
from bench.harness import Row, median, scratch
from warren.pipeline.jobs.archive import archive
from warren.pipeline.jobs.origin import Origin
from warren.pipeline.jobs.verify import verify_on_spark
from warren.pipeline.session import spark_session
from warren.storage.layout import hashed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import DataStreamWriter

BODY = b"x" * 100
_BATCH = 10_000
_READY = re.compile(r"ready: AMQP on [^:]+:(\d+), status page on (http://[^,]+)")
_NARROW = "queue,seq_id,size,body"
_PIKA_MESSAGES = 50_000
_WARREN = [sys.executable, "-m", "warren.cli.main"]
_EXECUTOR_MEGABYTES = 2048


def _session(master: str = "local[2]") -> SparkSession:
    return spark_session(master, "warren bench", {"spark.driver.memory": "4g"})


def _fill(path: str, count: int) -> None:
    with warren.open(path, durability="os") as store:
        queue = store.queue("bench")
        for _ in range(count // _BATCH):
            queue.publish_many([BODY] * _BATCH)


@dataclass(frozen=True)
class _Broker:
    """`warren serve`, with a process for its vhost, as below it."""

    port: int  # AMQP
    url: str  # HTTP
    pid: int

    @property
    def options(self) -> dict[str, str]:
        return {"url": self.url, "user": "guest", "password": "guest"}


@contextlib.contextmanager
def _served(path: str) -> Iterator[_Broker]:
    """`warren serve` on a directory."""
    log = f"{path}.log"
    with open(log, "wb") as file:
        arguments = ["--data-dir", path, "--amqp-port", "0", "--http-port", "0"]
        process = subprocess.Popen(
            [*_WARREN, "serve", *arguments],
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
        yield _Broker(int(found[1]), found[2], process.pid)
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
        with _served(path) as broker:
            for _ in range(repeat):
                rates["pika"].append(_drain_with_pika(broker.port, min(_PIKA_MESSAGES, count // repeat)))
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
    count = max(_BATCH, int(4_000_000 * size) // _BATCH * _BATCH)
    spark = _session()
    rates = []
    shares: dict[str, float] = {}
    for number in range(repeat + 1):  # the first run compiles
        with scratch() as directory:
            _fill(f"{directory}/data", count)
            with _served(f"{directory}/data") as broker:
                writer = _stream_of(spark, broker, "bench", directory).trigger(availableNow=True)
                cpu = CpuShares({"Spark": jvm_pid(), "broker": broker.pid})
                begin = time.perf_counter()
                query = writer.start()
                query.awaitTermination()
                seconds = time.perf_counter() - begin
                shares = cpu.taken()
                rows = sum(progress["numInputRows"] for progress in query.recentProgress)
                assert rows == count, f"{rows} of {count} rows"
        if number:
            rates.append(count / seconds)
        print(f"    {number}/{repeat}: {count / seconds:,.0f} msg/s; CPU: {shown(shares)}", flush=True)
    rate = median(rates)
    return [
        Row(
            f"streaming read of {count:,} x 100 B from a full queue, {_NARROW}",
            f"{rate:,.0f} msg/s; CPU: {shown(shares)}",
            "at least 300k msg/s",
            rate >= 300_000,
            {"stream": rate},
        )
    ]


def _stream_of(spark: SparkSession, broker: _Broker, queue: str, directory: str) -> DataStreamWriter:
    """A stream with default limits from a queue to nowhere."""
    reader = spark.readStream.format("warren").options(**broker.options, queue=queue, lease="bench", columns=_NARROW)
    return reader.load().writeStream.format("noop").option("checkpointLocation", f"{directory}/checkpoint")


def stream_filling(repeat: int, size: float) -> list[Row]:
    """A stream and a publisher with confirms on one queue, until everything has gone through; recorded."""
    count = int(1_000_000 * size)
    spark = _session()
    rates = []
    fills = []
    shares: dict[str, float] = {}
    for number in range(repeat + 1):
        with scratch() as directory, _served(f"{directory}/data") as broker:
            _declare(broker.port, "bench-0")
            query = _stream_of(spark, broker, "bench-0", directory).start()
            load = ["--mode", "fill", "--queue", "bench", "--persistent", "--confirm", "1000", "--messages", str(count)]
            where = ["--url", f"amqp://guest:guest@127.0.0.1:{broker.port}/%2F"]
            publisher = subprocess.Popen([*_WARREN, "bench", "--json", *load, *where], stdout=subprocess.DEVNULL)
            cpu = CpuShares({"Spark": jvm_pid(), "broker": broker.pid, "publisher": publisher.pid})
            begin = time.perf_counter()
            filled = 0.0
            rows = 0
            last = -1
            while rows < count:
                time.sleep(0.1)
                if not filled:
                    shares = cpu.taken()  # as long as all three are at work
                    filled = time.perf_counter() - begin if publisher.poll() is not None else 0.0
                    if filled and publisher.returncode:
                        raise RuntimeError(f"the publisher ended with {publisher.returncode}")
                if (error := query.exception()) is not None:
                    raise error
                for progress in query.recentProgress:
                    if progress["batchId"] > last and progress["numInputRows"]:
                        last = progress["batchId"]
                        rows += progress["numInputRows"]
            seconds = time.perf_counter() - begin
            query.stop()
            assert rows == count, f"{rows} of {count} rows"
        if number:
            rates.append(count / seconds)
            fills.append(count / (filled or seconds))
        print(f"    {number}/{repeat}: {count / seconds:,.0f} msg/s; CPU: {shown(shares)}", flush=True)
    rate = median(rates)
    return [
        Row(
            f"streaming read of {count:,} x 100 B while the queue is filled, with confirms",
            f"{rate:,.0f} msg/s, published at {median(fills):,.0f} msg/s; CPU: {shown(shares)}",
            "recorded",
            True,
            {"stream": rate, "publisher": median(fills)},
        )
    ]


def _declare(port: int, queue: str) -> None:
    import pika

    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    connection.channel().queue_declare(queue, durable=True)
    connection.close()


def sink(repeat: int, size: float) -> list[Row]:
    """Rows to an exchange, until all of them are confirmed and in their queue."""
    count = int(1_000_000 * size)
    spark = _session()
    rates = []
    with scratch() as directory, _served(f"{directory}/data") as broker:
        import pika

        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.port))
        channel = connection.channel()
        channel.queue_declare("bench", durable=True)
        for number in range(repeat + 1):
            frame = spark.range(0, count, 1, 2).selectExpr("repeat('x', 100) as body")
            writer = frame.write.format("warren").mode("append").option("exchange", "").option("routingKey", "bench")
            seconds = _seconds(writer.options(**broker.options).save)
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
    """Batch read of 1, 2, 4, 8 M messages with one and two executors, processes with one core each; recorded."""
    values: dict[str, float] = {}
    if (running := SparkSession.getActiveSession()) is not None:
        running.stop()  # it is on this machine's cores in another way
    with scratch() as directory:
        sizes = {m: max(_BATCH, int(m * 1_000_000 * size) // _BATCH * _BATCH) for m in (1, 2, 4, 8)}
        for millions, count in sizes.items():
            _fill(f"{directory}/{millions}", count)
        for executors in (1, 2):
            spark = _session(f"local-cluster[{executors},1,{_EXECUTOR_MEGABYTES}]")
            for millions, count in reversed(sizes.items()):  # the largest first: it compiles best
                work = partial(_bytes_read, spark, f"{directory}/{millions}", _NARROW, count)
                work()
                rate = median([count / _seconds(work) for _ in range(min(repeat, 3))])
                values[f"{executors} executor{'s' * (executors > 1)}, {millions} M"] = rate
                print(f"    {executors} x {millions} M: {rate:,.0f} rows/s", flush=True)
            spark.stop()
    values = dict(sorted(values.items()))
    figure = ", ".join(f"{name}: {value:,.0f}" for name, value in values.items())
    return [Row("batch read, scaling (rows/s)", figure, "recorded", True, values)]


ROWS: dict[str, Callable[[int, float], list[Row]]] = {
    "spark-read": read,
    "spark-stream": stream,
    "spark-stream-filling": stream_filling,
    "spark-sink": sink,
    "spark-jobs": jobs,
    "spark-scaling": scaling,
}
