"""What goes wrong on the user's side of the pipeline: one clear message, an exit code that is not 0, nothing acked, nothing
lost. (A broker that is killed in the middle: `test_pipeline_exactly_once.py`. Options: `test_pipeline_options.py`.)"""

# ruff: noqa: F811  (the fixture `spark` is imported and a parameter)

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import warren
from tests.broker_clients import eventually
from tests.broker_process import free_port
from tests.spark_session import spark  # noqa: F401
from tests.test_pipeline_api import Client
from tests.test_pipeline_cli import run, said
from tests.test_pipeline_stream import SCHEMA, Orders, bodies_in, to_parquet
from warren.pipeline.errors import PipelineError
from warren.pipeline.stream_source import WarrenStreamReader
from warren.storage.layout import hashed
from warren.testing import RunningBroker, running_broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE = 240.0


# ---- commands: the message comes before Spark is started ----


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("Spark was started before the command line was looked at")

    monkeypatch.setattr("warren.cli.spark._session", start)


def commands(place: tuple[object, ...], directory: Path) -> list[tuple[object, ...]]:
    """Those that read either a directory or a broker."""
    path = ("--path", *place) if len(place) == 1 else place
    return [
        ("sql", "select 1", *place),
        ("report", *place, "--to", directory / "page.html"),
        ("archive", *path, "--to", directory / "archive"),
    ]


@pytest.mark.usefixtures("no_spark")
def test_a_path_that_is_no_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "nothing", tmp_path / "empty"):
        for command in (*commands((place,), tmp_path), ("verify", place), ("recover", place), ("compact", place)):
            message = said(run(*command))
            assert "holds no store" in message or "is not there. Give a data directory" in message, command
            assert str(place) in message
    assert [file.name for file in tmp_path.iterdir()] == ["empty"], "nothing was made"


@pytest.mark.usefixtures("no_spark")
def test_a_broker_that_is_down_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warren.pipeline.jobs.origin._CHECK_SECONDS", 0.1)
    monkeypatch.setenv("WARREN_USER", "guest")
    monkeypatch.setenv("WARREN_PASSWORD", "hunter2")
    url = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "archived").mkdir()
    replay = ("replay", tmp_path / "archived", "--url", url, "--exchange", "shop")
    for command in (*commands(("--url", url), tmp_path), replay):
        message = said(run(*command))
        assert f"no broker answers at {url}" in message, command
        assert "warren serve" in message
        assert "hunter2" not in message


@pytest.mark.usefixtures("no_spark")
def test_a_user_or_a_vhost_that_the_broker_does_not_know_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WARREN_USER", "guest")
    monkeypatch.setenv("WARREN_PASSWORD", "guest")
    with running_broker(http=True) as broker:
        asked = ("sql", "select 1", "--url", broker.http_url)
        assert "vhost" in said(run(*asked, "--vhost", "nowhere"))
        monkeypatch.setenv("WARREN_PASSWORD", "wrong")
        assert "user or password is wrong" in said(run(*asked))
        monkeypatch.delenv("WARREN_PASSWORD")
        assert "there is no password for user 'guest'" in said(run(*asked))


def test_without_java_no_command_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warren.open(tmp_path / "data") as store:
        store.queue("orders").publish(b"1")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    data = tmp_path / "data"
    for command in (*commands((data,), tmp_path), ("verify", data), ("recover", "--force", data), ("compact", data)):
        assert "there is no Java; Spark needs 17 or newer" in said(run(*command), 2), command
    with warren.open(data) as store:
        assert len(store.queue("orders")) == 1


def test_a_store_of_a_newer_format_is_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with warren.open(data) as store:
        store.queue("orders").publish(b"1")
    file = data / "vhosts" / hashed("/") / "meta.db"
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA user_version = 99")
        db.commit()
    before = file.read_bytes()
    for command in (("sql", "select 1", data), ("recover", "--force", data)):
        assert "format version 99" in said(run(*command)), command
    verified = run("verify", data)
    assert verified.exit_code == 1
    assert "format version 99" in " ".join(verified.stdout.split())
    assert file.read_bytes() == before


def test_a_dataframe_of_a_broker_that_is_not_there_fails_soon(spark: SparkSession) -> None:
    """Also the sink, which asks for a token first. Spark retries nothing of it: it is said when a plan is made."""
    url = f"http://127.0.0.1:{free_port()}"
    options = {"url": url, "user": "guest", "password": "hunter2"}
    for attempt in (
        lambda: spark.read.format("warren").options(**options, queue="orders").load().count(),
        lambda: spark.range(1).selectExpr("'a' as body").write.format("warren").mode("append").options(**options)
        .option("exchange", "").option("routingKey", "orders").save(),
    ):  # fmt: skip
        with pytest.raises(Exception, match=f"no broker answers at {url} for 5 s") as caught:
            attempt()
        assert "hunter2" not in str(caught.value)


# ---- streams ----


@pytest.fixture(scope="module")
def running() -> Iterator[RunningBroker]:
    with running_broker(http=True) as broker:
        yield broker


@pytest.fixture
def orders(running: RunningBroker) -> Iterator[Orders]:
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(running.url))) as connection:
        yield Orders(running, connection)


def fails(query: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        query.awaitTermination(PATIENCE)


def test_a_body_that_is_not_what_from_json_expects_stops_a_strict_stream_and_costs_nothing(
    spark: SparkSession, orders: Orders, tmp_path: Path
) -> None:
    from pyspark.sql.functions import col, from_json

    orders.publish(b'{"id": 1}', b"poison", b'{"id": 2}')
    text = col("body").cast("string")
    strict = orders.stream(spark).select("body", from_json(text, "id bigint", {"mode": "FAILFAST"}).alias("order"))
    fails(to_parquet(strict, tmp_path, availableNow=True), r"(?i)malformed")
    assert orders.counts() == (0, 3), "checked out, and not acked"
    lenient = orders.stream(spark).select("body", from_json(text, "id bigint").alias("order"))
    assert to_parquet(lenient, tmp_path, availableNow=True).awaitTermination(PATIENCE)
    assert bodies_in(spark, tmp_path) == sorted(orders.ledger)
    rows = spark.read.parquet(str(tmp_path / "rows"))
    assert [bytes(row.body) for row in rows.where("order.id is null").collect()] == [b"poison"], (
        "nulls, to be put aside"
    )
    assert orders.counts() == (0, 0)


def test_an_offset_whose_messages_were_given_back_is_refused_and_nothing_is_acked(
    spark: SparkSession, orders: Orders, tmp_path: Path
) -> None:
    """The lease was requeued and its queue purged or not: the checkpoint knows messages that are not the stream's."""
    orders.publish(b"1", b"2")
    frame = orders.stream(spark).select("body")
    assert to_parquet(frame, tmp_path, availableNow=True).awaitTermination(PATIENCE)
    orders.publish(b"3", b"4")
    client = Client(orders.broker.http_url)
    epoch = client("leases/open", vhost="/", lease=orders.name, owner="x", queues=[orders.name], takeover=True)["epoch"]
    client("leases/next", vhost="/", lease=orders.name, epoch=epoch, start=1)
    client("leases/requeue", vhost="/", lease=orders.name)
    fails(to_parquet(frame, tmp_path, availableNow=True), r"was settled.* begin with a new checkpoint")
    assert orders.counts() == (2, 0)
    client("leases/release", vhost="/", lease=orders.name)
    fails(to_parquet(frame, tmp_path, availableNow=True), r"not the one that the checkpoint knows.* Begin with a new")
    known = {lease["lease"] for lease in client("leases/list", vhost="/")["leases"]}
    assert orders.name not in known, "and no lease was made for it"
    assert orders.counts() == (2, 0)
    assert to_parquet(frame, tmp_path / "anew", availableNow=True).awaitTermination(PATIENCE)
    assert bodies_in(spark, tmp_path / "anew") == [b"3", b"4"]


def test_progress_that_is_tracked_later_is_refused_by_spark_or_ends_with_an_error_and_not_with_a_loss(
    spark: SparkSession, orders: Orders, tmp_path: Path
) -> None:
    """asyncProgressTrackingEnabled is an option of the query, which a source never sees. Spark refuses it for files and for
    Warren's sink. For the few sinks that may have it (noop, console, memory, Kafka) its checkpoint may be older than what was
    settled: that is said at the next start."""
    orders.publish(b"1")
    frame = orders.stream(spark).select("body")
    later = {"asyncProgressTrackingEnabled": "true", "asyncProgressTrackingCheckpointIntervalMs": "3600000"}
    writer = frame.writeStream.options(**later, checkpointLocation=str(tmp_path / "checkpoint"))
    with pytest.raises(Exception, match=r"(?i)async"):
        writer.format("parquet").start(str(tmp_path / "rows")).awaitTermination(PATIENCE)
    assert orders.counts() == (1, 0)
    query = writer.format("noop").start()
    try:
        for number in (2, 3):
            eventually(lambda: orders.counts() == (0, 0), PATIENCE)
            orders.publish(b"%d" % number)
        eventually(lambda: orders.counts() == (0, 0), PATIENCE)
    finally:
        query.stop()
    orders.publish(b"4")
    fails(writer.format("noop").start(), "everything up to 3 was settled")
    assert orders.counts() == (1, 0), "what no batch has had is there"


def test_a_second_query_on_a_lease_ends_with_the_name_of_the_first(
    spark: SparkSession, orders: Orders, tmp_path: Path, scale
) -> None:
    if not scale.full:
        pytest.skip("a new query waits 15 s for its lease: in a full run")
    first = to_parquet(orders.stream(spark).select("body"), tmp_path / "first")
    try:
        orders.publish(b"1")
        eventually(lambda: orders.counts() == (0, 0), PATIENCE)
        fails(to_parquet(orders.stream(spark).select("body"), tmp_path / "second"), r"is held by another query \(.+\)")
        orders.publish(b"2")
        eventually(lambda: orders.counts() == (0, 0), PATIENCE)
    finally:
        first.stop()
    assert bodies_in(spark, tmp_path / "first") == sorted(orders.ledger), "the first one went on"


@pytest.mark.parametrize("access", ["files", "http"])
def test_a_queue_that_is_deleted_while_its_batch_is_read_is_an_error_and_not_an_empty_queue(
    orders: Orders, access: str
) -> None:
    options = {
        "url": orders.broker.http_url,
        "user": "guest",
        "password": "guest",
        "lease": orders.name,
        "queue": orders.name,
        "access": access,
    }
    orders.publish(b"1", b"2")
    reader = WarrenStreamReader(dict(options), SCHEMA)
    try:
        start = reader.initialOffset()
        [task] = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
        orders.channel.queue_delete(orders.name)
        with pytest.raises(
            PipelineError, match=r"has 2 messages in stream \d+, and 0 of them are there: their queue was"
        ):
            list(reader.read(task))
        lenient = WarrenStreamReader({**options, "failOnDataLoss": "false"}, SCHEMA)
        assert sum(batch.num_rows for batch in lenient.read(task)) == 0
    finally:
        reader.stop()
