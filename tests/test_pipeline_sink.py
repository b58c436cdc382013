# ruff: noqa: F811  (the fixture `spark` is imported and a parameter)
"""The sink: rows become messages, are staged, and are published once, all of them or none."""

from __future__ import annotations

import base64
import contextlib
import datetime
import glob
import json
import os
import pickle
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructType

import warren.pipeline
from tests.broker_clients import unique
from tests.fake_pipeline_broker import FakeBroker, fake_broker
from tests.spark_session import spark  # noqa: F401
from warren.kernel.stage_codec import decode_stage, encode_stage
from warren.pipeline import sink
from warren.pipeline.amqp_rows import MOST_BATCH_BYTES, MessageEncoder, check_columns
from warren.pipeline.broker_client import BrokerClient, Credentials
from warren.pipeline.errors import BrokerError, ColumnError, OptionError, PipelineError
from warren.pipeline.sink import (
    SinkSettings,
    Staged,
    WarrenBatchWriter,
    WarrenStreamWriter,
    _Stages,
    _writer_of_checkpoint,
)
from warren.queueing.properties import decode_head, encode_table
from warren.testing import RunningBroker, running_broker

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel
    from pyspark.sql import DataFrame, SparkSession

PATIENCE = 240.0
SECRET = "a-secret-that-stays-on-the-driver"
# mapInArrow looks at pandas, though it does not use it.
pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
BODIES = StructType().add("body", BinaryType())


def encoded(encoder: MessageEncoder, **columns: Any) -> list[tuple[Any, bytes]]:
    """Rows of these columns as decoded heads and bodies."""
    rows = pa.RecordBatch.from_pydict(columns)
    return [(decode_head(row["head"]), row["body"]) for out in encoder.encode(rows) for row in out.to_pylist()]


# ---- rows to messages ----


def test_a_row_with_only_a_body_is_a_persistent_message_to_where_the_options_say() -> None:
    found = encoded(MessageEncoder("x", "k"), body=["a", "b"])
    assert [(head.exchange, head.routing_key, head.properties) for head, _ in found] == [
        ("x", "k", {"delivery_mode": 2})
    ] * 2
    assert [body for _, body in found] == [b"a", b"b"]


def test_every_property_has_a_column_and_a_null_is_not_set() -> None:
    moment = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
    texts = (
        "content_type",
        "content_encoding",
        "correlation_id",
        "reply_to",
        "message_id",
        "type",
        "app_id",
        "cluster_id",
    )
    columns: dict[str, Any] = {name: [name.upper(), None] for name in texts}
    columns |= {
        "priority": [7, None],
        "delivery_mode": [1, None],
        "expiration": ["5000", None],
        "timestamp": pa.array([moment, None], pa.timestamp("us", tz="UTC")),
        "headers": pa.array([[("a", "1"), ("b", "2")], None], pa.map_(pa.string(), pa.string())),
        "routing_key": ["k", None],
    }
    (first, _), (second, _) = encoded(MessageEncoder(), body=[b"a", b"b"], **columns)
    assert first.properties == {
        **{name: name.upper() for name in texts},
        "priority": 7,
        "delivery_mode": 1,
        "expiration": "5000",
        "timestamp": moment,
        "headers": {"a": "1", "b": "2"},
    }
    assert (first.exchange, first.routing_key) == ("", "k")
    assert (second.properties, second.routing_key) == ({"delivery_mode": 2}, "")


def test_headers_keep_numbers_and_an_expiration_may_be_one() -> None:
    headers = pa.array([[("n", 3)]], pa.map_(pa.string(), pa.int64()))
    ((head, _),) = encoded(MessageEncoder("x"), body=[b""], headers=headers, expiration=[5000])
    assert head.properties["headers"] == {"n": 3}
    assert head.properties["expiration"] == "5000"


def test_each_combination_of_properties_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import warren.pipeline.amqp_rows as module

    built: list[str] = []
    build_head = module.build_head
    monkeypatch.setattr(module, "build_head", lambda x, k, p: built.append(k) or build_head(x, k, p))
    keys = ["a", "b", "c"] * 1000
    found = encoded(MessageEncoder("x"), body=[b""] * 3000, routing_key=keys, priority=[1] * 3000)
    assert [head.routing_key for head, _ in found] == keys
    assert built == ["a", "b", "c"]


def test_options_count_for_all_rows_over_columns() -> None:
    ((head, _),) = encoded(MessageEncoder("x", "k"), body=[b""], exchange=["other"], routing_key=["other"])
    assert (head.exchange, head.routing_key) == ("x", "k")


def test_large_rows_are_sent_in_small_batches() -> None:
    rows = pa.RecordBatch.from_pydict({"body": [b"x" * 1_000_000] * 20 + [b"y" * 9_000_000]})
    sizes = [out.nbytes for out in MessageEncoder("x").encode(rows)]
    assert sum(out.num_rows for out in MessageEncoder("x").encode(rows)) == 21
    assert max(sizes[:-1]) <= MOST_BATCH_BYTES + 1000
    assert sizes[-1] > 9_000_000, "one that is larger is alone"


def test_a_batch_that_is_divided_has_in_each_part_only_the_heads_of_that_part() -> None:
    ids = [f"{number:0>250}" for number in range(40_000)]
    made = list(MessageEncoder("x").encode(pa.RecordBatch.from_pydict({"body": ids, "message_id": ids})))
    assert len(made) > 4
    assert [len(out.column("head").dictionary) for out in made] == [out.num_rows for out in made]
    rows = [row for out in made for row in out.to_pylist()]
    assert [decode_head(row["head"]).properties["message_id"] for row in rows] == ids
    assert [row["body"].decode() for row in rows] == ids


def test_combinations_of_values_are_told_apart_also_where_single_values_repeat() -> None:
    moment = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
    rows = [
        (exchange, key, priority, time_)
        for exchange in ("a", "b", None)
        for key in ("k", "l")
        for priority in (None, 1, 2)
        for time_ in (moment, None)
    ] * 3
    exchanges, keys, priorities, times = zip(*rows, strict=True)
    columns = {"exchange": exchanges, "routing_key": keys, "priority": priorities}
    times = pa.array(times, pa.timestamp("us", tz="UTC"))
    found = encoded(MessageEncoder(), body=[b""] * len(rows), timestamp=times, **columns)
    assert [
        (head.exchange or None, head.routing_key, head.properties.get("priority"), head.properties.get("timestamp"))
        for head, _ in found
    ] == rows


# ---- the records of a stage ----


def packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def test_rows_of_a_stage_come_back_with_their_heads_once_for_those_in_a_row() -> None:
    data = encode_stage([b"a", b"", b"c"], packed(0, 0, 2, 1, 1, 0), packed(3, 4, 4, 6, 7, 8, 8), b"---1223456")
    heads: list[bytes] = []
    counts: list[int] = []
    bodies: list[bytes] = []
    ends: list[int] = []
    assert decode_stage(data, 100, heads, counts, bodies, ends) == 0
    assert list(zip(heads, counts, strict=True)) == [(b"a", 2), (b"c", 1), (b"", 2), (b"a", 1)]
    assert bodies == [b"1", b"", b"22", b"3", b"4", b""]
    assert ends[-1] == len(data)
    more: list[list[Any]] = [[], [], [], []]
    assert decode_stage(data[:-1], 100, *more) == ends[-1] - ends[-2]
    assert sum(more[1]) == len(more[2]) == 5
    harmed = bytearray(data)
    harmed[-1] ^= 1
    assert decode_stage(bytes(harmed), 100, [], [], [], []) == -1


@pytest.mark.parametrize(
    ("numbers", "ends"),
    [
        (packed(1), packed(0, 1)),
        (packed(-1), packed(0, 1)),
        (packed(0), packed(0, 5)),
        (packed(0), packed(1, 0)),
        (packed(0), packed(-1, 1)),
        (packed(0), packed(0)),
    ],
)
def test_columns_that_point_to_what_is_not_there_are_refused(numbers: bytes, ends: bytes) -> None:
    with pytest.raises(ValueError, match="not there"):
        encode_stage([b"head"], numbers, ends, b"body")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": [None, b"a"]}, "the body of 1 rows is null"),
        ({"body": [b"a"], "delivery_mode": [3]}, "delivery_mode 3"),
        ({"body": [b"a"], "routing_key": ["k" * 256]}, "routing key"),
        ({"body": [b"a"], "priority": [256]}, "priority"),
    ],
)
def test_a_row_that_is_no_message_is_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        encoded(MessageEncoder("x"), **columns)


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ("body binary, colour string", ("x", None), "column 'colour' is no part of a message"),
        ("body binary, seq_id bigint", ("x", None), r"'seq_id' says where a message was.*\.drop\('seq_id'\)"),
        ("body int", ("x", None), "column 'body' is int; it can be binary or string: cast it"),
        ("body binary, headers map<string,array<int>>", ("x", None), r"column 'headers' is map<string,array<int>>"),
        ("priority int", ("x", None), "there is no column 'body'"),
        ("body binary", (None, None), "nothing says where to publish"),
        ("body binary", ("", None), "nothing says where to publish"),
    ],
)
def test_columns_are_checked_on_the_driver(
    spark: SparkSession, schema: str, options: tuple[str | None, str | None], message: str
) -> None:
    with pytest.raises(ColumnError, match=message):
        check_columns(StructType.fromDDL(schema), *options)


# ---- stages ----


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    with fake_broker() as broker:
        yield broker


def options(url: str, **more: str) -> dict[str, str]:
    return {"user": "guest", "password": SECRET, "routingKey": "done", **more, "url": url}


def on_driver(fake: FakeBroker, **more: str) -> _Stages:
    return _Stages(SinkSettings.from_options(options(fake.url, **more)), "w", Credentials("guest", SECRET))


def rows(*bodies: bytes) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pydict({"body": [body]}) for body in bodies])


def on_executor(stages: _Stages) -> _Stages:
    travelled = pickle.dumps(stages)
    for secret in (SECRET.encode(), base64.b64encode(f"guest:{SECRET}".encode())):
        assert secret not in travelled
    found = pickle.loads(travelled)
    assert isinstance(found, _Stages)
    return found


def test_only_stages_that_commit_names_are_published(fake: FakeBroker) -> None:
    """As after speculation, or a killed executor: two attempts of a partition, one commit message."""
    driver = on_driver(fake)
    executor = on_executor(driver)
    first = executor.stage("b.0", 0, 1, rows(b"a", b"b"))
    copy = executor.stage("b.0", 0, 2, rows(b"a", b"b"))
    other = executor.stage("b.0", 1, 3, rows(b"c"))
    assert fake.published == []
    driver.decide("b.0", [copy, other])
    assert sorted(body for _, body in fake.published) == [b"a", b"b", b"c"]
    assert first.stages[0] in fake.stages, "the other attempt is litter"


def test_a_batch_is_published_once_however_often_it_is_committed(fake: FakeBroker) -> None:
    driver = on_driver(fake)
    for attempt in (1, 2):
        driver.decide("b.0", [on_executor(driver).stage("b.0", 0, attempt, rows(b"a"))])
    driver.decide("b.1", [on_executor(driver).stage("b.1", 0, 3, rows(b"b"))])
    assert [body for _, body in fake.published] == [b"a", b"b"]


def test_a_task_has_as_many_stages_as_its_rows_need(fake: FakeBroker) -> None:
    staged = on_executor(on_driver(fake, maxStageBytes="1")).stage("b.0", 0, 1, rows(*[b"x" * 100] * 5))
    assert (len(staged.stages), staged.count) == (5, 5)
    assert on_executor(on_driver(fake)).stage("b.1", 0, 1, iter(())) == Staged("b.1", (), 0), "none has none"


def test_a_batch_without_rows_is_not_decided(fake: FakeBroker) -> None:
    on_driver(fake).decide("b.0", [Staged("b.0", (), 0), None])
    assert "stages/decide" not in fake.names()


def test_a_failed_batch_drops_its_stages_and_never_hides_the_failure(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = on_driver(fake)
    staged = on_executor(driver).stage("b.0", 0, 1, rows(b"a"))
    driver.drop([None, staged])
    assert (fake.stages, fake.dropped) == ({}, list(staged.stages))
    monkeypatch.setattr(sink, "ABORT_SECONDS", 0.0)
    gone = _Stages(SinkSettings.from_options(options("http://127.0.0.1:1")), "w", Credentials("guest", SECRET))
    gone.drop([staged])


def test_the_writer_is_the_query_of_the_checkpoint(tmp_path: Path) -> None:
    assert _writer_of_checkpoint(str(tmp_path / "new"), None) == _writer_of_checkpoint(f"{tmp_path}/new/", None)
    (tmp_path / "metadata").write_text(json.dumps({"id": "1234"}))
    assert _writer_of_checkpoint(str(tmp_path), None) == "spark-1234"
    assert _writer_of_checkpoint(f"file://{tmp_path}", "name") == "spark-1234"
    assert _writer_of_checkpoint("hdfs://cluster/a", None) != _writer_of_checkpoint("hdfs://cluster/b", None)
    assert _writer_of_checkpoint(None, "name") == _writer_of_checkpoint(None, "name")


def test_a_streaming_sink_that_nothing_names_is_refused_and_a_batch_needs_no_name(fake: FakeBroker) -> None:
    """Spark makes one writer for the tasks and one for the commit. Each took a name of its own, and no batch was decided."""
    with pytest.raises(
        OptionError, match="give the query option checkpointLocation or queryName, or the sink option prod"
    ):
        WarrenStreamWriter(options(fake.url), BODIES)
    for name in ("checkpointLocation", "queryName", "producerName"):
        named = options(fake.url, **{name: "/this"})
        staging, deciding = WarrenStreamWriter(named, BODIES), WarrenStreamWriter(named, BODIES)
        assert staging._stages.writer == deciding._stages.writer
    WarrenBatchWriter(options(fake.url), BODIES)._forget_token()


def test_the_token_of_a_batch_write_waits_on_the_driver_and_is_gone_after_it(
    fake: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writer = WarrenBatchWriter(options(fake.url), BODIES)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text() == "a-token"
    travelled = pickle.dumps(writer)
    assert SECRET.encode() not in travelled
    assert b"a-token" not in travelled
    committer = pickle.loads(travelled)
    committer.commit([committer._stages.stage("0", 0, 1, rows(b"a"))])
    assert [body for _, body in fake.published] == [b"a"]
    assert "Bearer a-token" in fake.authorizations
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PipelineError, match="nothing was published, write again"):
        committer.commit([])


def test_a_table_of_headers_is_published_as_it_is_and_goes_before_headers() -> None:
    table = encode_table({"n": 5, "t": "5"})[4:]
    tables = pa.array([table, None], pa.binary())
    maps = pa.array([[("n", "5")], [("m", "6")]], pa.map_(pa.string(), pa.string()))
    (first, _), (second, _) = encoded(MessageEncoder("x"), body=[b"", b""], headers=maps, headers_table=tables)
    assert first.headers == {"n": 5, "t": "5"}
    assert second.headers == {"m": "6"}
    for broken in (table[:-1], table + b"x", b"\x01n!"):
        with pytest.raises(PipelineError, match="a row has a headers_table"):
            encoded(MessageEncoder("x"), body=[b""], headers_table=pa.array([broken], pa.binary()))


def test_options_of_a_sink_are_checked(fake: FakeBroker) -> None:
    for more, message in (
        ({"exchnage": "x"}, "did you mean 'exchange'"),
        ({"maxStageBytes": "-1"}, "maxStageBytes is '-1'"),
        ({"asyncProgressTrackingEnabled": "true"}, "asyncProgressTrackingEnabled"),
        ({"queue": "q"}, "option 'queue' is for"),
    ):
        with pytest.raises(OptionError, match=message):
            WarrenStreamWriter(options(fake.url, **more), BODIES)
    with pytest.raises(OptionError, match="option url is missing"):
        WarrenStreamWriter(options(""), BODIES)
    WarrenStreamWriter(options(fake.url, queryName="q", checkpointLocation="/c"), BODIES)


# ---- with Spark and a broker ----


@pytest.fixture(scope="module")
def running() -> Iterator[RunningBroker]:
    with running_broker(http=True) as broker:
        yield broker


@pytest.fixture
def channel(running: RunningBroker) -> Iterator[BlockingChannel]:
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(running.url))) as connection:
        yield connection.channel()


@pytest.fixture
def done(channel: BlockingChannel) -> str:
    name = unique("done")
    channel.queue_declare(name, durable=True)
    return name


def access(running: RunningBroker, **more: Any) -> dict[str, Any]:
    return {"url": running.http_url, "user": "guest", "password": "guest", **more}


def bodies_of(channel: BlockingChannel, queue: str) -> list[bytes]:
    """All that a queue has; they are consumed."""
    found = []
    while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
        found.append(got[2])
    return found


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(count).repartition(partitions).selectExpr("cast(id as string) as body")


def token_files() -> set[str]:
    return set(glob.glob(os.path.join(tempfile.gettempdir(), "warren-token-*")))


def test_a_dataframe_is_published_with_its_properties(
    spark: SparkSession, running: RunningBroker, channel: BlockingChannel, done: str
) -> None:
    warren.pipeline.register(spark)
    tokens = token_files()
    frame = spark.sql(
        f"""select 'hello' as body, '{done}' as routing_key, 'text/plain' as content_type, map('n', 7) as headers,
            9 as priority, timestamp'2026-01-31 12:00:00' as timestamp"""
    )
    frame.write.format("warren").options(**access(running)).mode("append").save()
    _, properties, body = channel.basic_get(done, auto_ack=True)
    assert body == b"hello"
    assert (properties.content_type, properties.headers, properties.priority) == ("text/plain", {"n": 7}, 9)
    assert (properties.delivery_mode, properties.timestamp) == (2, 1769860800)
    # Tests that run beside this one have tokens of their own for a while; one that was forgotten stays.
    left = token_files() - tokens
    deadline = time.monotonic() + 120
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= token_files()
    assert not left


@pytest.mark.parametrize(
    ("more", "why"),
    [({"vhost": "absent"}, "vhost 'absent' not found"), ({"producerName": "p" * 500}, "producer|writer")],
)
def test_a_write_that_the_broker_refuses_leaves_no_token_behind(
    running: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, str], why: str
) -> None:
    """It was refused while it was pickled: the error was one of pickle's, and nobody took the token away."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(PipelineError, match=why):
        WarrenBatchWriter(access(running, routingKey="q", **more), BODIES)
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_fails_and_runs_again_publishes_its_rows_once(
    spark: SparkSession, running: RunningBroker, channel: BlockingChannel, done: str, tmp_path: Path
) -> None:
    warren.pipeline.register(spark)
    marks = str(tmp_path)

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0:
            (Path(marks) / str(context.partitionId())).touch()
            raise ValueError("after its rows were sent")

    frame = numbers(spark, 500).mapInArrow(fail_once, "body string")
    options = access(running, routingKey=done, maxStageBytes=100)
    frame.write.format("warren").options(**options).mode("append").save()
    assert len(list(tmp_path.iterdir())) == 2, "every task failed once"
    assert Counter(bodies_of(channel, done)) == Counter(b"%d" % n for n in range(500))


def test_a_write_that_fails_publishes_nothing(
    spark: SparkSession, running: RunningBroker, channel: BlockingChannel, done: str
) -> None:
    warren.pipeline.register(spark)
    frame = spark.sql(f"select '1' as body, '{done}' as routing_key union all select null, '{done}'")
    with pytest.raises(Exception, match="the body of 1 rows is null"):
        frame.write.format("warren").options(**access(running)).mode("append").save()
    with pytest.raises(Exception, match="no exchange 'no-such'"):
        numbers(spark, 5).write.format("warren").options(**access(running, exchange="no-such")).mode("append").save()
    with pytest.raises(Exception, match="cannot be overwritten"):
        numbers(spark, 5).write.format("warren").options(**access(running, routingKey=done)).mode("overwrite").save()
    assert bodies_of(channel, done) == []


def test_a_batch_of_a_stream_that_is_repeated_is_not_published_again(
    spark: SparkSession, running: RunningBroker, channel: BlockingChannel, done: str, tmp_path: Path
) -> None:
    """The crash between the sink's commit and Spark's: its file in commits/ is missing. The repetition has other
    partitions, which is what another number of cores or adaptive execution would do."""
    warren.pipeline.register(spark)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "numbers").write_text("".join(f"{n}\n" for n in range(100)))

    def run(partitions: int) -> None:
        options = access(running, routingKey=done, checkpointLocation=str(tmp_path / "checkpoint"))
        frame = spark.readStream.text(str(tmp_path / "in")).withColumnRenamed("value", "body")
        writer = frame.repartition(partitions).writeStream.format("warren").queryName(done).options(**options)
        assert writer.trigger(availableNow=True).start().awaitTermination(PATIENCE)

    run(1)
    for file in (tmp_path / "checkpoint" / "commits").iterdir():
        file.unlink()
    run(3)
    assert Counter(bodies_of(channel, done)) == Counter(b"%d" % n for n in range(100))
    (tmp_path / "in" / "more").write_text("more\n")
    run(2)
    assert bodies_of(channel, done) == [b"more"], "and the next batch is published"
    identity = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    with BrokerClient(running.http_url, Credentials("guest", "guest")) as client:
        status = client.call("stages/status", vhost="/", writer=f"spark-{identity}")
    assert status == {"decided": f"{identity.replace('-', '')}.1", "pending": 0, "unroutable": 0}


def test_a_replayed_batch_is_told_from_a_new_checkpoint_in_the_same_place(
    running: RunningBroker, channel: BlockingChannel, done: str
) -> None:
    settings = SinkSettings.from_options(access(running, routingKey=done))
    driver = _Stages(settings, unique("w"), Credentials("guest", "guest"))
    for batch in ("aa.0", "aa.0", "aa.1", "aa.1", "bb.0"):
        driver.decide(batch, [driver.stage(batch, 0, 1, rows(batch.encode()))])
    assert bodies_of(channel, done) == [b"aa.0", b"aa.1", b"bb.0"]


def test_the_user_must_be_allowed_to_write_to_the_exchange(running: RunningBroker, done: str) -> None:
    """He was added after the data server was started, which has to know him."""
    operations = running.broker.operations
    allowed = {"user": "reader", "vhost": "/", "configure": "", "write": "", "read": ".*"}
    for name, arguments in (("users/add", {"user": "reader", "password": "pw"}), ("permissions/set", allowed)):
        assert "result" in running.call(partial(operations.answer, name, arguments))
    options = {"url": running.http_url, "user": "reader", "password": "pw", "routingKey": done}
    driver = _Stages(SinkSettings.from_options(options), "w", Credentials("reader", "pw"))
    with pytest.raises(BrokerError, match="may not write"):
        driver.decide("c.0", [driver.stage("c.0", 0, 1, rows(b"a"))])
