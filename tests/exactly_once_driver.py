"""A Spark driver with traps in it: what `test_pipeline_exactly_once.py` starts, again and again.

It streams queues of a broker with the product's own source and sink, of which subclasses come by the points of
`exactly_once_traps.py`. The point between a sink's commit and Spark's has no place in Python, least of all for Parquet: there
the class that writes Spark's checkpoint files is replaced by one that comes by before it makes `commits/N` visible.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition

from tests.exactly_once_traps import (
    BATCH_COMMITTED,
    CHECKED_OUT,
    HALF_DONE,
    RELEASING,
    SINK_COMMITTED,
    TASK_READ,
    TRAP,
    reached,
    trapped,
)
from warren.pipeline.broker_client import BrokerClient, Credentials
from warren.pipeline.sink import WarrenStreamWriter
from warren.pipeline.source import WarrenSource
from warren.pipeline.stream_source import WarrenStreamReader

SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # a JVM that is killed soon has no use for good code
GUEST = {"user": "guest", "password": "guest"}

# Spark's own writer of checkpoint files, which tells of `commits/N` before that is there, and waits.
_CHECKPOINT_CLASS = "warren.tests.TrappedCheckpoint"
_CHECKPOINT = """
package warren.tests;

import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager;

public class TrappedCheckpoint extends FileContextBasedCheckpointFileManager {
    public TrappedCheckpoint(Path path, Configuration conf) {
        super(path, conf);
    }

    public void renameTempFile(Path from, Path to, boolean overwrite) {
        if (to.getParent().getName().equals("commits") && to.getName().matches("[0-9]+")) {
            try {
                String sink = to.getParent().getParent().getName().replace("checkpoint-", "");
                String[] command = {"PYTHON", "-m", "tests.exactly_once_traps", "POINT", sink};
                new ProcessBuilder(command).inheritIO().start().waitFor();
            } catch (Exception error) {
                throw new RuntimeException(error);
            }
        }
        super.renameTempFile(from, to, overwrite);
    }
}
"""


class TrappedReader(WarrenStreamReader):
    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        reached(BATCH_COMMITTED, self._settings.lease)
        end = super().latestOffset(start, limit)
        if end != start:
            reached(CHECKED_OUT, self._settings.lease)
        return end

    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield from super().read(partition)
        reached(TASK_READ, self._settings.lease)


class TrappedWriter(WarrenStreamWriter):
    def commit(self, messages: list[Any], batchId: int) -> None:
        trap = trapped(RELEASING)
        if trap is not None:
            threading.Thread(target=_wait_for_a_full_queue, args=(trap,), daemon=True).start()
        super().commit(messages, batchId)


def _wait_for_a_full_queue(trap: dict[str, Any]) -> None:
    """The target has less room than a batch has rows: when it is full, some of a stage is released and the rest is not."""
    with BrokerClient(trap["url"], Credentials(**GUEST)) as client:
        while (
            client.call("tap/status", vhost="/", queues=[trap["narrow"]])["queues"][trap["narrow"]]["ready"]
            < trap["room"]
        ):
            time.sleep(0.005)
    reached(RELEASING, "broker")


class TrappedSource(WarrenSource):
    def streamReader(self, schema: Any) -> TrappedReader:
        return TrappedReader(self.options, schema)

    def streamWriter(self, schema: Any, overwrite: bool) -> TrappedWriter:
        return TrappedWriter(self.options, schema)


def _begin_task(sink: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    reached(HALF_DONE, sink)
    yield from batches


def drive(said: dict[str, Any]) -> None:
    """Stream everything that is ready: for each sink, its queue into it."""
    work = said["work"]
    builder = SparkSession.builder.master(said["master"]).appName("exactly once")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "600m",
        "spark.driver.extraJavaOptions": SHORT_LIVED,
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.cores.max": "2",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
        f"spark.executorEnv.{TRAP}": os.environ.get(TRAP, "null"),
        "spark.executor.extraJavaOptions": f"{SHORT_LIVED} -Dwarren.traps={said['traps']}",
        "spark.local.dir": f"{work}/local",
        **said["conf"],
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(TrappedSource)
    if trapped(SINK_COMMITTED) is not None:
        _trap_checkpoints(spark)
    access = {"url": said["url"], **GUEST}
    for sink in said["sinks"]:
        source = spark.readStream.format("warren").options(
            **access,
            queue=f"to-{sink}",
            lease=sink,
            access=said["access"][sink],
            maxOffsetsPerTrigger=said["rows"],
            minPartitions=said["partitions"],
        )
        _start(source.load().select("body"), sink, said, access).awaitTermination()
    spark.stop()
    print("DONE", flush=True)


def _start(rows: DataFrame, sink: str, said: dict[str, Any], access: dict[str, str]) -> Any:
    frame = rows.repartition("body").mapInArrow(functools.partial(_begin_task, sink), "body binary")
    checkpoint = f"{said['work']}/checkpoint-{sink}"
    writer = frame.writeStream.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    if sink == "parquet":
        return writer.format("parquet").start(f"{said['work']}/rows")
    return writer.format("warren").options(**access, routingKey=said["target"]).start()


def _trap_checkpoints(spark: SparkSession) -> None:
    """Spark compiles the class by itself: it has a compiler for the code that it makes of queries."""
    jvm: Any = spark._jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    thread = jvm.java.lang.Thread.currentThread()
    compiler.setParentClassLoader(thread.getContextClassLoader())
    compiler.cook(_CHECKPOINT.replace("PYTHON", sys.executable).replace("POINT", SINK_COMMITTED))
    thread.setContextClassLoader(compiler.getClassLoader())  # the query's thread has it from this one
    spark.conf.set("spark.sql.streaming.checkpointFileManagerClass", _CHECKPOINT_CLASS)
