# ruff: noqa: F811  (the fixture `spark` is imported and a parameter)
"""The streaming source: what Spark's calls become, with a broker that says what the test wants and with a real one."""

from __future__ import annotations

import base64
import contextlib
import pickle
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import BinaryType, LongType, StringType, StructType

import warren.pipeline
from tests.broker_clients import eventually, unique
from tests.fake_pipeline_broker import FakeBroker, Refused, fake_broker
from tests.spark_session import spark  # noqa: F401
from warren.pipeline import stream_source
from warren.pipeline.broker_client import BrokerClient, Credentials
from warren.pipeline.errors import BrokerError, OptionError, PipelineError
from warren.pipeline.stream_source import CheckoutPartition, StreamSettings, WarrenStreamReader, split
from warren.testing import RunningBroker, running_broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

PATIENCE = 240.0
SECRET = "a-secret-that-stays-on-the-driver"
SCHEMA = StructType().add("queue", StringType()).add("seq_id", LongType()).add("body", BinaryType())
OPTIONS = {"queue": "q", "lease": "l", "user": "guest", "password": SECRET}


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    with fake_broker() as broker:
        broker.queues["q"] = [b"%d" % n for n in range(10)]
        yield broker


@contextlib.contextmanager
def reading(fake: FakeBroker, **options: str) -> Iterator[WarrenStreamReader]:
    """A reader as Spark's process for it has one."""
    reader = WarrenStreamReader({**OPTIONS, "url": fake.url, **options}, SCHEMA)
    try:
        yield reader
    finally:
        reader.stop()


def offset(number: int) -> dict[str, Any]:
    return {"born": 7, "checkout": number, "lease": "l", "v": 1}


def rows_of(reader: WarrenStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
    """As tasks read them: reader and partitions pickled."""
    elsewhere = pickle.loads(pickle.dumps(reader))
    partitions = pickle.loads(pickle.dumps(reader.partitions(start, end)))
    return [body for part in partitions for batch in elsewhere.read(part) for body in batch.column("body").to_pylist()]


# ---- offsets ----


def test_a_batch_is_a_checkout_and_asking_for_the_next_one_acks_it(fake: FakeBroker) -> None:
    with reading(fake, maxOffsetsPerTrigger="4") as reader:
        start = reader.initialOffset()
        assert start == offset(0)
        first = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert first == offset(1)
        assert rows_of(reader, start, first) == [b"0", b"1", b"2", b"3"]
        assert fake.acked["q"] == set()
        second = reader.latestOffset(first, reader.getDefaultReadLimit())
        assert fake.acked["q"] == {0, 1, 2, 3}
        assert rows_of(reader, first, second) == [b"4", b"5", b"6", b"7"]
        reader.commit(second)
        assert fake.acked["q"] == {0, 1, 2, 3}, "commit says nothing that latestOffset does not say"


def test_the_same_question_has_the_same_answer_and_the_same_rows(fake: FakeBroker) -> None:
    with reading(fake, maxOffsetsPerTrigger="4") as reader:
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadMaxRows(4))
        again = reader.latestOffset(start, ReadMaxRows(4))
        assert again == end
        assert rows_of(reader, start, end) == rows_of(reader, start, end)
    with reading(fake) as successor:
        assert rows_of(successor, start, end) == [b"0", b"1", b"2", b"3"], (
            "also for a runner that begins with a repetition"
        )


def test_nothing_new_is_the_same_offset_and_no_partitions(fake: FakeBroker) -> None:
    fake.queues["q"] = []
    with reading(fake) as reader:
        start = reader.initialOffset()
        assert reader.latestOffset(start, ReadAllAvailable()) == start
        assert reader.partitions(start, start) == []


def test_an_idle_stream_asks_the_broker_less_often_than_spark_asks_the_stream(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.queues["q"] = []
    slept: list[float] = []
    me, sleep = threading.get_ident(), time.sleep

    def pause(seconds: float) -> None:
        if threading.get_ident() == me:
            slept.append(seconds)
        else:  # threads that others left sleep by the same module
            sleep(seconds)

    monkeypatch.setattr(stream_source.time, "sleep", pause)
    with reading(fake) as reader:
        start = reader.initialOffset()
        for _ in range(3):
            reader.latestOffset(start, ReadAllAvailable())
    assert len(slept) == 2
    assert all(0 < pause <= 0.1 for pause in slept)


def test_a_new_query_takes_a_lease_that_nobody_holds_and_a_restarted_one_takes_it_over(fake: FakeBroker) -> None:
    with reading(fake) as reader:
        reader.initialOffset()
        assert fake.calls[-1][1]["takeover"] is False
    with reading(fake) as reader:
        reader.latestOffset(offset(0), ReadAllAvailable())
        assert [arguments["takeover"] for name, arguments in fake.calls if name == "leases/open"][-1] is True


def test_a_lease_that_is_held_is_waited_for_and_then_its_holder_is_named(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.held, fake.holder = 2, "a killed query"
    monkeypatch.setattr(stream_source.time, "sleep", lambda _: None)
    with reading(fake) as reader:
        assert reader.initialOffset() == offset(0), "it was let go"
    monkeypatch.setattr(stream_source, "HELD_SECONDS", 0.0)
    fake.held, fake.holder = 99, "another query"
    with reading(fake) as reader, pytest.raises(BrokerError, match=r"lease 'l' is held by 'another query'"):
        reader.initialOffset()


def test_a_query_whose_lease_was_taken_over_is_refused(fake: FakeBroker) -> None:
    with reading(fake) as reader, reading(fake) as other:
        start = reader.initialOffset()
        other.latestOffset(start, ReadAllAvailable())
        with pytest.raises(BrokerError, match=r"epoch 1 is old.*fenced"):
            reader.latestOffset(start, ReadAllAvailable())


def test_an_offset_that_was_settled_elsewhere_is_data_loss(fake: FakeBroker) -> None:
    fake.floor = 7
    with reading(fake) as reader, pytest.raises(BrokerError, match="checkouts up to 7 are settled"):
        reader.latestOffset(offset(3), ReadAllAvailable())


@pytest.mark.parametrize("start", [{"q": {"q": 1}, "v": 1}, {"checkout": 1, "lease": "l", "v": 2}, {}])
def test_an_offset_of_something_else_is_refused(fake: FakeBroker, start: dict[str, Any]) -> None:
    with reading(fake) as reader, pytest.raises(PipelineError, match="new checkpointLocation"):
        reader.latestOffset(start, ReadAllAvailable())


def test_a_checkpoint_of_another_lease_is_refused(fake: FakeBroker) -> None:
    with (
        reading(fake) as reader,
        pytest.raises(PipelineError, match=r"is of lease 'other', and the option lease is 'l'"),
    ):
        reader.latestOffset({**offset(1), "lease": "other"}, ReadAllAvailable())
    assert fake.calls == [], "and nothing was opened"


def test_an_offset_says_which_lease_of_its_name_it_is_of(fake: FakeBroker) -> None:
    with reading(fake) as reader:
        reader.latestOffset(offset(0), ReadAllAvailable())
        assert [arguments["born"] for name, arguments in fake.calls if name == "leases/open"] == [7]
    with reading(fake) as reader:
        start = reader.initialOffset()
        with pytest.raises(PipelineError, match="not the one that the checkpoint knows"):
            reader.partitions(start, {**offset(1), "born": 6})
    with reading(fake) as reader:  # of a checkpoint that is older than that
        older = {"checkout": 0, "lease": "l", "v": 1}
        assert reader.latestOffset(older, ReadAllAvailable()) == offset(1)


def test_heartbeats_say_that_the_lease_is_held(fake: FakeBroker) -> None:
    with reading(fake) as reader:
        reader.initialOffset()
        eventually(lambda: fake.names().count("leases/heartbeat") >= 2)


def test_lag_is_what_waits_beyond_the_batch(fake: FakeBroker) -> None:
    with reading(fake, maxOffsetsPerTrigger="4") as reader:
        assert reader.reportLatestOffset() is None
        reader.latestOffset(reader.initialOffset(), ReadMaxRows(4))
        assert reader.reportLatestOffset() == {**offset(1), "ready": 6}


# ---- limits ----


def test_limits_of_rows_and_bytes_hold_together(fake: FakeBroker) -> None:
    fake.queues["q"] = [b"x" * 100] * 10
    with reading(fake, maxOffsetsPerTrigger="5", maxBytesPerTrigger="300") as reader:
        assert reader.getDefaultReadLimit() == ReadMaxRows(5)
        end = reader.latestOffset(offset(0), ReadMaxRows(5))
        assert len(rows_of(reader, offset(0), end)) == 3
    assert StreamSettings.from_options({**OPTIONS, "url": "u", "maxBytesPerTrigger": "9"}).limit == ReadMaxBytes(9)


def test_a_batch_is_limited_also_where_nothing_is_said() -> None:
    def limits(**options: str) -> tuple[int | None, int | None]:
        settings = StreamSettings.from_options({**OPTIONS, "url": "u", **options})
        assert settings.limit == (ReadMaxRows(settings.max_rows) if settings.max_rows else ReadMaxBytes(9))
        return settings.max_rows, settings.max_bytes

    assert limits() == (1_000_000, 1 << 30)
    assert limits(minOffsetsPerTrigger="9") == (1_000_000, 1 << 30)
    assert limits(minOffsetsPerTrigger="3000000") == (3_000_000, 1 << 30)
    assert limits(maxOffsetsPerTrigger="7") == (7, None)
    assert limits(maxBytesPerTrigger="9") == (None, 9)


def test_trigger_once_reads_everything(fake: FakeBroker) -> None:
    with reading(fake, maxOffsetsPerTrigger="5", minOffsetsPerTrigger="5") as reader:
        end = reader.latestOffset(offset(0), ReadAllAvailable())
        assert len(rows_of(reader, offset(0), end)) == 10


def test_few_rows_wait_for_more_until_the_delay_is_over(fake: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(stream_source.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stream_source.time, "sleep", lambda _: None)
    with reading(fake, minOffsetsPerTrigger="20", maxTriggerDelay="30s") as reader:
        limit = reader.getDefaultReadLimit()
        assert reader.latestOffset(offset(0), limit) == offset(1), "the first batch does not wait, as Kafka's does not"
        fake.queues["q"] += [b"more"] * 5
        assert reader.latestOffset(offset(1), limit) == offset(1)
        now[0] += 29
        assert reader.latestOffset(offset(1), limit) == offset(1)
        now[0] += 1
        assert reader.latestOffset(offset(1), limit) == offset(2)
        fake.queues["q"] += [b"many"] * 20
        assert reader.latestOffset(offset(2), limit) == offset(3), "enough is enough at once"


def test_available_now_ends_with_what_was_ready_at_its_beginning(fake: FakeBroker) -> None:
    with reading(fake, maxOffsetsPerTrigger="6", minOffsetsPerTrigger="6") as reader:
        reader.prepareForTriggerAvailableNow()
        at = reader.initialOffset()
        rows: list[bytes] = []
        while True:
            end = reader.latestOffset(at, reader.getDefaultReadLimit())
            fake.queues["q"].append(b"later")
            if end == at:
                break
            rows += rows_of(reader, at, end)
            at = end
    assert rows == [b"%d" % n for n in range(10)]
    assert fake.acked["q"] == set(range(10)), "the closing question acked the last batch"


def test_available_now_also_reads_what_an_earlier_run_had_checked_out(fake: FakeBroker) -> None:
    with reading(fake, maxOffsetsPerTrigger="4") as reader:
        reader.latestOffset(reader.initialOffset(), ReadMaxRows(4))
    with reading(fake) as reader:
        reader.prepareForTriggerAvailableNow()
        at, rows = reader.initialOffset(), 0
        while (end := reader.latestOffset(at, ReadAllAvailable())) != at:
            rows += len(rows_of(reader, at, end))
            at = end
    assert rows == 10


# ---- partitions ----


def described(streams: dict[int, list[tuple[int, int]]], number: int = 1) -> dict[str, Any]:
    found = []
    for sid, pairs in streams.items():
        ranges = base64.b64encode(b"".join(struct.pack("<QQ", *pair) for pair in pairs)).decode()
        found.append({"queue": "q", "sid": sid, "count": sum(count for _, count in pairs), "ranges": ranges})
    return {"number": number, "streams": found}


_PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=6)


@given(streams=st.dictionaries(st.integers(1, 9), _PAIRS, max_size=5), most=st.integers(1, 60))
def test_partitions_have_every_message_once_and_no_more_rows_than_asked(
    streams: dict[int, list[tuple[int, int]]], most: int
) -> None:
    ranges: dict[int, list[tuple[int, int]]] = {}
    for sid, gaps in streams.items():
        at, ranges[sid] = 0, []
        for gap, count in gaps:
            ranges[sid].append((at + gap, count))
            at += gap + count
    everything = {(sid, first + n) for sid, pairs in ranges.items() for first, count in pairs for n in range(count)}
    lots = split([described(ranges)], most)
    found = [
        [one for one in everything if one[0] == piece.sid and piece.first <= one[1] < piece.stop]
        for lot in lots
        for piece in lot
    ]
    assert [len(rows) for rows in found] == [piece.rows for lot in lots for piece in lot]
    assert sorted(one for rows in found for one in rows) == sorted(everything)
    assert all(sum(piece.rows for piece in lot) == most for lot in lots[:-1])
    assert all(0 < sum(piece.rows for piece in lot) <= most for lot in lots[-1:])


def test_rows_are_split_as_the_options_say(fake: FakeBroker) -> None:
    for options, sizes in (
        ({}, [10]),
        ({"minPartitions": "3"}, [4, 4, 2]),
        ({"maxRecordsPerPartition": "6"}, [6, 4]),
        ({"minPartitions": "2", "maxRecordsPerPartition": "4"}, [4, 4, 2]),
    ):
        with reading(fake, **options) as reader:
            end = reader.latestOffset(offset(0), ReadAllAvailable())
            parts = reader.partitions(offset(0), end)
            assert [sum(p.rows for p in part.pieces) for part in parts] == sizes


def test_many_queues_are_one_lease_and_few_tasks(fake: FakeBroker) -> None:
    fake.queues = {f"q{n}": [b"a", b"b"] for n in range(100)}
    with reading(fake) as reader:
        end = reader.latestOffset(offset(0), ReadAllAvailable())
        assert len(reader.partitions(offset(0), end)) == 1
        assert len(rows_of(reader, offset(0), end)) == 200


def test_no_secret_travels_to_executors(fake: FakeBroker) -> None:
    with reading(fake) as reader:
        end = reader.latestOffset(offset(0), ReadAllAvailable())
        parts = reader.partitions(offset(0), end)
        hidden = base64.b64encode(f"guest:{SECRET}".encode())
        for travelling in (reader, *parts):
            assert SECRET.encode() not in pickle.dumps(travelling)
            assert hidden not in pickle.dumps(travelling)
        assert "a-ticket" not in repr(parts)
        fake.authorizations.clear()
        rows_of(pickle.loads(pickle.dumps(reader)) if not parts else reader, offset(0), end)
    assert "Bearer a-ticket" in fake.authorizations


def test_what_spark_sends_to_executors_has_no_secret(fake: FakeBroker) -> None:
    """Spark pickles the data source, with its options, beside the reader: the source has to forget them in time."""
    import io

    from pyspark.sql.datasource import CaseInsensitiveDict
    from pyspark.sql.worker.plan_data_source_read import write_read_func_and_partitions

    from warren.pipeline.source import WarrenSource

    for options in ({}, {"mode": "tap"}):
        given = {**OPTIONS, "url": fake.url, **options}
        if options:
            del given["lease"]
        source = WarrenSource(options=CaseInsensitiveDict(given))
        reader = source.streamReader(SCHEMA)
        sent = io.BytesIO()
        write_read_func_and_partitions(
            sent, reader=reader, data_source=source, schema=SCHEMA, max_arrow_batch_size=100, binary_as_bytes=True
        )
        assert SECRET.encode() not in sent.getvalue()


def test_a_file_that_moves_between_plan_and_open_is_planned_anew(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import warren.pipeline.rows

    columns = [pa.array(["q"] * 10), pa.array(range(10)), pa.array([b"x"] * 10)]  # as many as the fake checks out
    batch = pa.RecordBatch.from_arrays(columns, names=SCHEMA.names)
    plans: list[int] = []

    def planned(url: str, ticket: str, **place: Any) -> tuple[str, list[str]]:
        plans.append(place["first"])
        return "/root", ["part"]

    def opened(root: str, part: Any, schema: pa.Schema, *, fail_on_data_loss: bool) -> Iterator[pa.RecordBatch]:
        if len(plans) < 3:
            raise FileNotFoundError(f"{root}/1.qi")
        return iter([batch])

    monkeypatch.setattr(stream_source, "plan_checkout", planned)
    monkeypatch.setattr(stream_source, "sees_files", lambda *_: True)
    monkeypatch.setattr(stream_source.time, "sleep", lambda _: None)
    monkeypatch.setattr(warren.pipeline.rows, "read_part", opened)
    with reading(fake) as reader:
        end = reader.latestOffset(offset(0), ReadAllAvailable())
        (part,) = reader.partitions(offset(0), end)
        assert list(reader.read(part)) == [batch]
    assert plans == [0, 0, 0]


def test_an_executor_that_must_read_files_and_cannot_says_so(fake: FakeBroker) -> None:
    with reading(fake, access="files") as reader:
        end = reader.latestOffset(offset(0), ReadAllAvailable())
        (part,) = reader.partitions(offset(0), end)
        with pytest.raises(PipelineError, match=r"does not see the broker's files in /nowhere"):
            reader.read(part)
    with reading(fake) as reader:
        lonely = CheckoutPartition(part.pieces, part.ticket, part.url, part.root, part.host, None)
        with pytest.raises(PipelineError, match="the broker has no data server"):
            reader.read(lonely)


def test_a_broker_that_restarts_in_the_middle_costs_a_pause(fake: FakeBroker) -> None:
    down = [3]

    def fault(_: str) -> None:
        if down[0]:
            down[0] -= 1
            raise Refused(503, "unavailable", "restarting")

    with reading(fake) as reader:
        start = reader.initialOffset()
        fake.faults.append(fault)
        end = reader.latestOffset(start, ReadAllAvailable())
        assert end == offset(1)


def test_a_query_that_begins_gives_a_wrong_url_up_soon_and_one_that_goes_on_waits(monkeypatch) -> None:
    asked: list[float | None] = []

    def client(url: str, credentials: Any, *, first_seconds: float | None, ca_file: str | None) -> None:
        asked.append(first_seconds)
        raise PipelineError(f"nobody at {url}")

    monkeypatch.setattr(stream_source, "BrokerClient", client)
    reader = WarrenStreamReader({**OPTIONS, "url": "http://127.0.0.1:1"}, SCHEMA)
    for ask in (reader.initialOffset, lambda: reader.latestOffset(offset(1), ReadAllAvailable())):
        with pytest.raises(PipelineError):
            ask()
    assert asked == [stream_source.FIRST_SECONDS, None]


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, "option url is missing"),
        ({"lease": ""}, "option lease is missing"),
        ({"queuePattern": ".*"}, "give one of the options queue and queuePattern"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger is '0'"),
        ({"maxBytesPerTrigger": "1k"}, "maxBytesPerTrigger is '1k'"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "it cannot be more"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay is 'soon'; it is a time such as"),
        ({"startingOffsets": "middle"}, "startingOffsets is 'middle'"),
        ({"asyncProgressTrackingEnabled": "true"}, "leave it off"),
        ({"leese": "x"}, "did you mean 'lease'"),
        ({"mode": "tab"}, "option mode is 'tab'; it can be consume, tap"),
        ({"snapshotTtl": "60"}, "snapshotTtl is for mode=tap"),
    ],
)
def test_an_option_that_cannot_be_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        WarrenStreamReader({**OPTIONS, "url": "http://127.0.0.1:1", **options}, SCHEMA)


# ---- with Spark and a broker ----


@pytest.fixture(scope="module")
def running() -> Iterator[RunningBroker]:
    with running_broker(http=True) as broker:
        yield broker


@pytest.fixture
def orders(running: RunningBroker) -> Iterator[Orders]:
    connection = pika.BlockingConnection(pika.URLParameters(running.url))
    yield Orders(running, connection)
    connection.close()


class Orders:
    """A queue of a broker, and the ledger of what went into it."""

    def __init__(self, broker: RunningBroker, connection: pika.BlockingConnection) -> None:
        self.broker = broker
        self.channel = connection.channel()
        self.channel.confirm_delivery()
        self.name = unique("orders")
        self.channel.queue_declare(self.name, durable=True)
        self.ledger: list[bytes] = []

    def publish(self, *bodies: bytes, **properties: Any) -> None:
        for body in bodies:
            self.channel.basic_publish("", self.name, body, pika.BasicProperties(delivery_mode=2, **properties))
        self.ledger += bodies

    def counts(self) -> tuple[int, int]:
        info = self.broker.queue_info(self.name)
        return info["messages_ready"], info["messages_unacknowledged"]

    def stream(self, spark: SparkSession, **options: Any) -> DataFrame:
        warren.pipeline.register(spark)
        given = {"url": self.broker.http_url, "user": "guest", "password": "guest", "lease": self.name, **options}
        if "queuePattern" not in given:
            given["queue"] = self.name
        return spark.readStream.format("warren").options(**given).load()


def to_parquet(frame: DataFrame, directory: Path, **trigger: Any) -> StreamingQuery:
    checkpoint = str(directory / "checkpoint")
    writer = frame.writeStream.format("parquet").option("checkpointLocation", checkpoint)
    return (writer.trigger(**trigger) if trigger else writer).start(str(directory / "rows"))


def bodies_in(spark: SparkSession, directory: Path) -> list[bytes]:
    return sorted(bytes(row.body) for row in spark.read.parquet(str(directory / "rows")).select("body").collect())


@pytest.mark.parametrize("access", ["files", "http"])
def test_a_queue_streams_into_parquet_and_is_empty_when_idle(
    spark: SparkSession, orders: Orders, tmp_path: Path, access: str
) -> None:
    orders.publish(*(b"%d" % n for n in range(300)), b"large" * 4000, correlation_id="c")
    frame = orders.stream(spark, maxOffsetsPerTrigger=200, access=access, minPartitions=2)
    query = to_parquet(frame.select("queue", "seq_id", "correlation_id", "body"), tmp_path, availableNow=True)
    assert query.awaitTermination(PATIENCE)
    assert bodies_in(spark, tmp_path) == sorted(orders.ledger)
    assert orders.counts() == (0, 0)
    assert [progress["numInputRows"] for progress in query.recentProgress] == [200, 101]
    orders.publish(b"one more")
    query = to_parquet(frame.select("queue", "seq_id", "correlation_id", "body"), tmp_path)
    try:
        eventually(lambda: orders.counts() == (0, 0) and query.lastProgress, PATIENCE)
    finally:
        query.stop()
    assert bodies_in(spark, tmp_path) == sorted(orders.ledger)


def test_priorities_other_queues_and_messages_that_come_back_are_all_read_once(
    spark: SparkSession, orders: Orders, tmp_path: Path
) -> None:
    ranked = f"{orders.name}-ranked"
    orders.channel.queue_declare(ranked, durable=True, arguments={"x-max-priority": 3})
    for n in range(40):
        orders.channel.basic_publish("", ranked, b"r%d" % n, pika.BasicProperties(delivery_mode=2, priority=n % 4))
    orders.ledger += [b"r%d" % n for n in range(40)]
    orders.publish(*(b"%d" % n for n in range(60)))
    # A consumer has the head of the queue in its hands and gives it back while the stream is already past it.
    tags = [orders.channel.basic_get(orders.name)[0].delivery_tag for _ in range(10)]
    frame = orders.stream(spark, queuePattern=f"{orders.name}.*", maxOffsetsPerTrigger=50).select("queue", "body")
    assert to_parquet(frame, tmp_path, availableNow=True).awaitTermination(PATIENCE)
    assert len(bodies_in(spark, tmp_path)) == 90
    orders.channel.basic_nack(tags[-1], multiple=True, requeue=True)
    eventually(lambda: orders.counts() == (10, 0))
    assert to_parquet(frame, tmp_path, availableNow=True).awaitTermination(PATIENCE)
    assert bodies_in(spark, tmp_path) == sorted(orders.ledger)
    assert orders.counts() == (0, 0)


def test_a_second_query_on_a_lease_stops_with_the_name_of_the_holder(
    spark: SparkSession, orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.publish(b"a")
    first = to_parquet(orders.stream(spark).select("body"), tmp_path / "first")
    try:
        eventually(lambda: orders.counts() == (0, 0), PATIENCE)
        with reading_real(orders) as second:
            monkeypatch.setattr(stream_source, "HELD_SECONDS", 0.0)
            with pytest.raises(BrokerError, match=r"is held by another query \(.+\)"):
                second.initialOffset()
    finally:
        first.stop()


@contextlib.contextmanager
def reading_real(orders: Orders) -> Iterator[WarrenStreamReader]:
    options = {
        "url": orders.broker.http_url,
        "user": "guest",
        "password": "guest",
        "lease": orders.name,
        "queue": orders.name,
    }
    reader = WarrenStreamReader(options, SCHEMA)
    try:
        yield reader
    finally:
        reader.stop()


def test_a_query_that_is_fenced_in_the_middle_stops_with_one_clear_error(
    spark: SparkSession, orders: Orders, tmp_path: Path
) -> None:
    query = to_parquet(orders.stream(spark).select("body"), tmp_path)
    orders.publish(b"a")
    eventually(lambda: orders.counts() == (0, 0) and query.lastProgress, PATIENCE)
    with reading_real(orders) as thief:
        thief.latestOffset({"checkout": 1, "lease": orders.name, "v": 1}, ReadAllAvailable())
        with pytest.raises(Exception, match=r"was taken over by another query"):
            query.awaitTermination(PATIENCE)


def test_open_checkouts_survive_a_restart_of_the_broker(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        running_broker(str(data), http=True, durability="fsync") as broker,
        contextlib.closing(pika.BlockingConnection(pika.URLParameters(broker.url))) as connection,
    ):
        orders = Orders(broker, connection)
        name = orders.name
        orders.publish(*(b"%d" % n for n in range(50)))
        with reading_real(orders) as reader:
            at = reader.initialOffset()
            end = reader.latestOffset(at, ReadAllAvailable())
            before = rows_of(reader, at, end)
    with (
        running_broker(str(data), http=True, durability="fsync") as broker,
        contextlib.closing(pika.BlockingConnection(pika.URLParameters(broker.url))) as connection,
    ):
        orders = Orders(broker, connection)
        orders.name = name
        assert orders.counts() == (0, 50)
        orders.channel.queue_purge(name)
        with reading_real(orders) as reader:
            assert rows_of(reader, at, end) == before == orders_in_order(50)
            assert reader.latestOffset(end, ReadAllAvailable()) == end
        assert orders.counts() == (0, 0)


def orders_in_order(count: int) -> list[bytes]:
    return [b"%d" % n for n in range(count)]


def test_a_wrong_password_and_a_missing_queue_are_one_clear_error(orders: Orders) -> None:
    base = {"url": orders.broker.http_url, "user": "guest", "password": "guest", "lease": "x", "queue": orders.name}
    for options, message in (
        ({"password": SECRET}, "user or password is wrong"),
        ({"queue": "no-such-queue"}, "no queue 'no-such-queue'"),
    ):
        reader = WarrenStreamReader({**base, **options}, SCHEMA)
        with pytest.raises(BrokerError, match=message) as caught:
            reader.initialOffset()
        reader.stop()
        assert SECRET not in str(caught.value)


# ---- tap ----


@pytest.mark.parametrize("access", ["files", "http"])
def test_a_tap_reads_a_queue_and_consumes_nothing(
    spark: SparkSession, orders: Orders, tmp_path: Path, access: str
) -> None:
    orders.publish(*(b"%d" % n for n in range(30)))
    held = orders.channel.basic_get(orders.name)[0].delivery_tag
    warren.pipeline.register(spark)
    options = {"url": orders.broker.http_url, "user": "guest", "password": "guest", "mode": "tap", "access": access}
    frame = spark.readStream.format("warren").options(**options, queue=orders.name, maxOffsetsPerTrigger=20).load()
    query = to_parquet(frame.select("body"), tmp_path, availableNow=True)
    assert query.awaitTermination(PATIENCE)
    assert [progress["numInputRows"] for progress in query.recentProgress] == [20, 10]
    assert orders.counts() == (29, 1), "nobody noticed"
    orders.channel.basic_ack(held)
    orders.publish(b"later")
    assert to_parquet(frame.select("body"), tmp_path, availableNow=True).awaitTermination(PATIENCE)
    assert bodies_in(spark, tmp_path) == sorted(orders.ledger)
    with BrokerClient(orders.broker.http_url, Credentials("guest", "guest")) as client:
        snapshots = client.call("snapshots/list", vhost="/")
    assert snapshots["snapshots"] == [], "and no snapshot is left"


def test_a_tap_says_when_its_queue_is_gone_or_was_declared_anew(orders: Orders) -> None:
    from warren.pipeline.tap_source import TapStreamReader

    base = {"url": orders.broker.http_url, "user": "guest", "password": "guest", "queuePattern": f"{orders.name}.*"}
    orders.publish(b"a", b"b", b"c")
    reader = TapStreamReader({**base, "startingOffsets": "latest"}, SCHEMA)
    careless = TapStreamReader({**base, "failOnDataLoss": "false"}, SCHEMA)
    at = reader.initialOffset()
    assert at == {"q": {orders.name: 3}, "v": 1}
    assert careless.initialOffset() == {"q": {}, "v": 1}
    orders.channel.queue_delete(orders.name)
    with pytest.raises(PipelineError, match=r"is gone, and the stream has read it up to 3"):
        reader.latestOffset(at, ReadAllAvailable())
    assert careless.latestOffset(at, ReadAllAvailable()) == at
    orders.channel.queue_declare(orders.name, durable=True)
    orders.publish(b"new")
    with pytest.raises(PipelineError, match=r"was declared anew: it is at 1"):
        reader.latestOffset(at, ReadAllAvailable())
    end = careless.latestOffset(at, ReadAllAvailable())
    assert end == {"q": {orders.name: 1}, "v": 1}
    parts = careless.partitions(at, end)
    rows = [body for part in parts for batch in careless.read(part) for body in batch.column("body").to_pylist()]
    assert rows == [b"new"]
    careless.stop()
    reader.stop()
