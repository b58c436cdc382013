"""The pipeline on a real cluster: executors are processes elsewhere, which die, and which may not see the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import Served, served
from tests.spark_cluster import Cluster, cluster, driver, may_hide

ROWS = 6_000
pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("cluster")]

SESSION = """
import json, sys, time
from pyspark.sql import SparkSession, functions as F
master, url, marker = sys.argv[1:4]
spark = (
    SparkSession.builder.master(master).appName("warren cluster test")
    .config("spark.ui.enabled", "false").config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.memory", "512m").config("spark.executor.memory", "512m")
    .config("spark.executor.cores", "1").config("spark.cores.max", "2")
    .config("spark.sql.shuffle.partitions", "2").config("spark.sql.session.timeZone", "UTC")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")
broker = dict(url=url, user="guest", password="guest")
def slow(batches):
    # Long enough to be killed in the middle; the first batch says that the work has begun.
    for batch in batches:
        open(marker, "a").write("x")
        time.sleep(0.2)
        yield batch
"""

READ = (
    SESSION
    + """
orders = spark.read.format("warren").options(**broker, queue="orders", minPartitions="6", columns="seq_id,body").load()
orders = orders.mapInArrow(slow, orders.schema)
row = orders.select(F.count("*").alias("n"), F.countDistinct("seq_id").alias("d"), F.sum(F.length("body")).alias("b")).first()
print("RESULT", json.dumps(row.asDict()))
"""
)

WRITE = (
    SESSION
    + """
frame = spark.range(0, int(sys.argv[4]), 1, 6).selectExpr("cast(id as string) as body").mapInArrow(slow, "body string")
frame.write.format("warren").mode("append").options(**broker, exchange="", routingKey="copies").save()
print("RESULT", json.dumps({}))
"""
)

STREAM = (
    SESSION
    + """
lake, checkpoint = sys.argv[4:6]
stream = spark.readStream.format("warren").options(**broker, queue="orders", lease="lake", maxOffsetsPerTrigger="2500").load()
query = stream.writeStream.format("parquet").option("checkpointLocation", checkpoint).trigger(availableNow=True).start(lake)
query.awaitTermination()
row = spark.read.parquet(lake).select(F.count("*").alias("n"), F.countDistinct("body").alias("d")).first()
print("RESULT", json.dumps(row.asDict()))
"""
)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "data", "--durability", "os") as running:
        connection = running.connect()
        channel = connection.channel()
        channel.queue_declare("copies", durable=True)
        channel.queue_declare("orders", durable=True)
        for number in range(ROWS):
            channel.basic_publish("", "orders", b"%08d" % number)
        channel.queue_declare("orders", durable=True)  # its answer comes behind all of them
        connection.close()
        yield running


def result(log: Path) -> dict[str, int]:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("RESULT ")]
    assert lines, log.read_text(errors="replace")[-4000:]
    found: dict[str, int] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def wait_for(marker: Path, log: Path) -> None:
    import time

    deadline = time.monotonic() + 180
    while not marker.exists():
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        time.sleep(0.02)


def test_a_read_whose_executor_is_killed_has_every_row_once(machines, broker, tmp_path):
    marker, log = tmp_path / "marker", tmp_path / "driver.log"
    with driver(READ, machines.url, broker.http_url, str(marker), log=log) as process:
        wait_for(marker, log)
        machines.kill_an_executor()
        process.wait(300)
    assert result(log) == {"n": ROWS, "d": ROWS, "b": 8 * ROWS}
    assert broker.queue_info("orders")["messages_ready"] == ROWS


def test_a_write_whose_executor_is_killed_publishes_every_row_once(machines, broker, tmp_path):
    marker, log = tmp_path / "marker", tmp_path / "driver.log"
    with driver(WRITE, machines.url, broker.http_url, str(marker), str(ROWS), log=log) as process:
        wait_for(marker, log)
        machines.kill_an_executor()
        process.wait(300)
    result(log)
    assert broker.queue_info("copies")["messages_ready"] == ROWS
    connection = broker.connect()
    channel = connection.channel()
    bodies = set()
    for method, _, body in channel.consume("copies", auto_ack=True, inactivity_timeout=10):
        if method is None:
            break
        bodies.add(body)
        if len(bodies) == ROWS:
            break
    connection.close()
    assert bodies == {b"%d" % number for number in range(ROWS)}


def test_executors_that_cannot_see_the_files_read_and_write_through_the_data_server(scale, broker, tmp_path):
    if not scale.full:
        pytest.skip("a second cluster starts for it: in a full run")
    if not may_hide():
        pytest.skip("hiding a directory from executors needs a mount namespace, so root")
    with cluster(tmp_path / "cluster", hidden=broker.data_dir) as machines:
        marker, log = tmp_path / "marker", tmp_path / "read.log"
        with driver(READ, machines.url, broker.http_url, str(marker), log=log) as process:
            process.wait(300)
        assert result(log) == {"n": ROWS, "d": ROWS, "b": 8 * ROWS}
        log, lake = tmp_path / "stream.log", tmp_path / "lake"
        arguments = [machines.url, broker.http_url, str(marker), str(lake), str(tmp_path / "checkpoint")]
        with driver(STREAM, *arguments, log=log) as process:
            process.wait(300)
        assert result(log) == {"n": ROWS, "d": ROWS}
    info = broker.queue_info("orders")
    assert (info["messages_ready"], info["messages_unacknowledged"]) == (0, 0)
