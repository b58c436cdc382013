"""A Spark driver that dies at a named point: what `test_pipeline_exactly_once.py` starts, again and again.

It streams queues of a broker with the product's own source and sink. Two subclasses add the traps: `WARREN_PIPELINE_KILL_AT`
names one, and the second time that it is reached, every process of the driver (its session: Python, JVM, workers) is killed
with signal 9, as when its machine goes. The traps `vhost` and `node` kill the broker's processes instead, and the driver
goes on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import InputPartition

from warren.pipeline.sink import Staged, WarrenStreamWriter
from warren.pipeline.source import WarrenSource
from warren.pipeline.stream_source import WarrenStreamReader

KILL_AT = "WARREN_PIPELINE_KILL_AT"
KILL_DIRECTORY = "WARREN_PIPELINE_KILL_DIRECTORY"  # has a file for every trap, one byte for every time it was reached
KILL_URL = "WARREN_PIPELINE_KILL_URL"
NODE_PID = "WARREN_PIPELINE_NODE_PID"
_NTH = 2  # so that a driver that dies has done something first


def reached(point: str) -> None:
    """Die here, if this is the point, and the time."""
    if os.environ.get(KILL_AT) != point:
        return
    with open(Path(os.environ[KILL_DIRECTORY]) / point, "ab") as file:
        file.write(b".")
        file.flush()
        if file.tell() != _NTH:
            return
    if point == "vhost":
        with urllib.request.urlopen(os.environ[KILL_URL] + "/api/status", timeout=10) as answer:
            os.kill(json.load(answer)["vhosts"][0]["pid"], signal.SIGKILL)
    elif point == "node":
        os.kill(int(os.environ[NODE_PID]), signal.SIGKILL)
    else:
        kill_session(os.getsid(0))
        os.kill(os.getpid(), signal.SIGKILL)


def kill_session(session: int) -> None:
    """Every process of a session but this one."""
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            if pid != os.getpid() and os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class TrappedReader(WarrenStreamReader):
    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        reached("between commits_N and the next latestOffset")
        end = super().latestOffset(start, limit)
        if end != start:
            reached("after a checkout is synced and before offsets_N")
        return end

    def read(self, partition: InputPartition) -> Iterator[Any]:
        reached("vhost")
        reached("node")
        yield from super().read(partition)
        reached("between task read and sink commit")


class TrappedWriter(WarrenStreamWriter):
    def write(self, iterator: Iterator[Any]) -> Staged:
        staged = super().write(iterator)
        reached("after half of the tasks")
        return staged

    def commit(self, messages: list[Any], batchId: int) -> None:
        super().commit(messages, batchId)
        reached("between sink commit and commits_N")


class TrappedSource(WarrenSource):
    def streamReader(self, schema: Any) -> TrappedReader:
        return TrappedReader(self.options, schema)

    def streamWriter(self, schema: Any, overwrite: bool) -> TrappedWriter:
        return TrappedWriter(self.options, schema)


def drive(said: dict[str, Any]) -> None:
    """Stream everything that is ready: for each sink, its queue into it."""
    from pyspark.sql import SparkSession

    work = said["work"]
    builder = SparkSession.builder.master(f"local[{said['cores']}, 4]").appName("exactly once")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "600m",
        "spark.local.dir": f"{work}/local",
        "spark.sql.shuffle.partitions": said["shuffle_partitions"],
        "spark.sql.adaptive.enabled": said["adaptive"],
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(TrappedSource)
    access = {"url": said["url"], "user": "guest", "password": "guest"}
    for sink in said["sinks"]:
        source = spark.readStream.format("warren").options(
            **access, queue=f"to-{sink}", lease=sink, maxOffsetsPerTrigger=150, minPartitions=said["partitions"]
        )
        frame = source.load().select("body").repartition("body")
        writer = frame.writeStream.option("checkpointLocation", f"{work}/checkpoint-{sink}").trigger(availableNow=True)
        if sink == "parquet":
            query = writer.format("parquet").start(f"{work}/rows")
        else:
            query = writer.format("warren").options(**access, routingKey="done").start()
        query.awaitTermination()
    spark.stop()
    print("DONE", flush=True)


if __name__ == "__main__":
    drive(json.loads(sys.argv[1]))
