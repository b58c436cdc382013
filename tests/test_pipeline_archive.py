"""Queues to Parquet and back: every message once, whole, or not at all."""

# ruff: noqa: F811  (the fixture is imported)

from __future__ import annotations

import contextlib
import datetime
import json
import os
from pathlib import Path

import pika
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import warren
from tests.broker_process import served
from tests.spark_session import spark  # noqa: F401
from warren.errors import WarrenError
from warren.pipeline import register
from warren.pipeline.errors import PipelineError
from warren.pipeline.jobs import archive as job
from warren.pipeline.jobs import archive_files
from warren.pipeline.jobs.archive import archive, read_archive, replay, runs_of
from warren.pipeline.jobs.origin import Origin

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "data"
    with warren.open(path) as store:
        store.queue("orders").publish_many([b"order %d" % n for n in range(300)], headers={"n": 1}, message_id="m")
        store.queue("orders").publish(bytes(10_000), priority=3)
        store.queue("007").publish_many([b"shaken"] * 7)
        store.queue("left out").publish(b"not asked for")
    return path


@pytest.fixture
def origin(data: Path) -> Origin:
    return Origin(path=str(data))


def messages(spark, path: Path) -> list[tuple[object, ...]]:
    return sorted((row.queue, row.seq_id, bytes(row.body)) for row in read_archive(spark, str(path)).collect())


def browse(data: Path, *names: str) -> list[tuple[object, ...]]:
    with warren.open(data) as store:
        return sorted((name, each.seq_id, each.body) for name in names for each in store.queue(name).browse())


def test_an_archive_has_every_message_of_its_queues_and_a_ledger_that_says_so(spark, origin, data, tmp_path):
    run = archive(spark, origin, str(tmp_path), queue_pattern="orders|007")
    assert messages(spark, tmp_path) == browse(data, "orders", "007")
    assert [(each.queue, each.messages) for each in run.queues] == [("007", 7), ("orders", 301)]
    orders = run.queues[1]
    seqs = [seq for _, seq, _ in browse(data, "orders")]
    assert (orders.min_seq_id, orders.max_seq_id) == (min(seqs), max(seqs))
    assert orders.bytes == sum(len(body) for _, _, body in browse(data, "orders"))
    ledger = json.loads((tmp_path / "_ledger" / f"{run.run}.json").read_text())
    assert ledger["queues"][1]["messages"] == 301
    assert sorted(os.listdir(tmp_path)) == ["_ledger", f"run={run.run}"]


def test_the_files_are_by_vhost_queue_and_day_and_by_seq_id_within(spark, origin, tmp_path):
    run = archive(spark, origin, str(tmp_path))
    files = sorted((tmp_path / f"run={run.run}").rglob("*.parquet"))
    assert files
    for file in files:
        run_part, vhost, queue, day = file.relative_to(tmp_path).parts[:4]
        assert (run_part, vhost) == (f"run={run.run}", "vhost=%2F")
        assert queue in ("queue=orders", "queue=007", "queue=left out")
        assert day.startswith("day=20")
        seqs = pq.ParquetFile(file).read(["seq_id"])["seq_id"].to_pylist()
        assert seqs == sorted(seqs)


def test_properties_and_headers_come_through(spark, origin, tmp_path):
    archive(spark, origin, str(tmp_path), queue="orders")
    row = read_archive(spark, str(tmp_path)).where("size < 100").first()
    assert (row.message_id, row.headers, row.routing_key) == ("m", {"n": "1"}, "orders")
    assert row.published_at is not None


def test_a_second_run_is_beside_the_first_and_messages_of_both_count_once(spark, origin, data, tmp_path):
    first = archive(spark, origin, str(tmp_path), queue="orders")
    middle = (first.queues[0].min_seq_id + first.queues[0].max_seq_id) // 2
    second = archive(spark, origin, str(tmp_path), queue="orders", from_seq_id=middle)
    assert runs_of(spark, str(tmp_path)) == sorted([first.run, second.run])
    assert second.queues[0].min_seq_id == middle
    assert 0 < second.messages < first.messages
    assert messages(spark, tmp_path) == browse(data, "orders")
    assert read_archive(spark, str(tmp_path), [second.run]).count() == second.messages


ODD = ("a/b", "it's", 'quo"te', "100%", "x=y", "[1]^{2}", "ünïcode", "back\\slash", " ", "__HIVE_DEFAULT_PARTITION__")


def test_odd_names_and_priorities_come_back_as_they_were(spark, tmp_path):
    data = tmp_path / "data"
    with warren.open(data) as store:
        for name in ODD:
            store.queue(name).publish_many([name.encode()] * 3)
        ranked = store.queue("ranked", arguments={"x-max-priority": 3})
        for number in range(20):
            ranked.publish(b"ranked %d" % number, priority=number % 4)
    archive(spark, Origin(path=str(data)), str(tmp_path / "archive"))
    assert messages(spark, tmp_path / "archive") == browse(data, *ODD, "ranked")


def test_a_file_system_that_only_spark_knows_gets_the_same_rows(spark, origin, data, tmp_path, monkeypatch):
    monkeypatch.setattr(job._Directory, "is_local", False)
    run = archive(spark, origin, str(tmp_path), queue_pattern="orders|007")
    assert messages(spark, tmp_path) == browse(data, "orders", "007")
    assert [(each.queue, each.messages) for each in run.queues] == [("007", 7), ("orders", 301)]


def test_rows_of_two_days_are_divided_and_stay_in_order():
    times = [datetime.datetime(2026, 1, day, 23, 59, 59, tzinfo=datetime.UTC) for day in (1, 2, 1, 2, 3)]
    batch = pa.RecordBatch.from_pydict(
        {"seq_id": [5, 4, 3, 2, 1], "published_at": pa.array(times, pa.timestamp("us", tz="UTC"))}
    )
    ordered = archive_files._in_order(batch)
    assert ordered.column("seq_id").to_pylist() == [1, 2, 3, 4, 5]
    divided = {day: rows.column("seq_id").to_pylist() for day, rows in archive_files._by_day(ordered)}
    assert divided == {"2026-01-01": [3, 5], "2026-01-02": [2, 4], "2026-01-03": [1]}


def test_a_run_that_fails_leaves_nothing(spark, origin, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise PipelineError("in the middle")

    monkeypatch.setattr(job, "divide", fail)
    with pytest.raises(PipelineError, match="in the middle"):
        archive(spark, origin, str(tmp_path), queue="orders")
    assert os.listdir(tmp_path) == []


def test_a_queue_that_is_not_there_is_named(spark, origin, tmp_path):
    with pytest.raises(WarrenError, match="nobody"):
        archive(spark, origin, str(tmp_path / "archive"), queue="nobody")


def test_a_directory_that_is_no_archive_is_refused_with_the_remedy(spark, tmp_path):
    with pytest.raises(PipelineError, match="warren spark archive --to"):
        read_archive(spark, str(tmp_path))


def test_a_run_that_is_not_there_is_refused_with_those_that_are(spark, origin, tmp_path):
    run = archive(spark, origin, str(tmp_path), queue="007")
    with pytest.raises(PipelineError, match=run.run):
        read_archive(spark, str(tmp_path), ["20200101T000000Z-abcdef"])


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[object], str | None, str | None]]:
    """What reaches the sink."""
    calls: list[tuple[list[str], list[object], str | None, str | None]] = []
    monkeypatch.setattr(
        job,
        "publish",
        lambda rows, target, exchange, key: calls.append((rows.columns, rows.collect(), exchange, key)),
    )
    return calls


def test_replay_publishes_in_order_with_properties_and_the_routing_keys_of_the_messages(
    spark, origin, data, tmp_path, published
):
    archive(spark, origin, str(tmp_path), queue="orders")
    archive(spark, origin, str(tmp_path), queue="orders")
    target = Origin(url="http://127.0.0.1:1")
    assert replay(spark, str(tmp_path), target, exchange="again") == 301
    [(columns, rows, exchange, routing_key)] = published
    assert (exchange, routing_key) == ("again", None)
    assert [bytes(row.body) for row in rows] == [body for _, _, body in browse(data, "orders")]
    assert {row.routing_key for row in rows} == {"orders"}
    assert "exchange" not in columns
    assert {"body", "headers", "message_id", "priority", "routing_key"} <= set(columns)
    assert not {"vhost", "queue", "seq_id", "published_at", "day", "run"} & set(columns)


def test_replay_of_one_queue_under_one_routing_key(spark, origin, tmp_path, published):
    archive(spark, origin, str(tmp_path), queue_pattern="orders|007")
    target = Origin(url="http://127.0.0.1:1")
    assert replay(spark, str(tmp_path), target, routing_key="here", queue="007") == 7
    [(columns, rows, exchange, routing_key)] = published
    assert (exchange, routing_key, len(rows)) == (None, "here", 7)
    assert "routing_key" not in columns
    assert "exchange" in columns


def test_messages_of_other_users_can_be_replayed_without_their_user_id(spark, tmp_path, published):
    """The broker refuses a user_id that is not the publisher's: one such message kept the whole archive back."""
    with warren.open(tmp_path / "data") as store:
        for user in ("shop", "guest", None):
            store.queue("orders").publish(b"1", user_id=user)
    archive(spark, Origin(path=str(tmp_path / "data")), str(tmp_path / "archive"))
    assert replay(spark, str(tmp_path / "archive"), Origin(url="http://127.0.0.1:1", user="guest")) == 3
    [(_, rows, _, _)] = published
    assert [row.user_id for row in rows] == [None, "guest", None]


def test_replay_of_a_queue_that_the_archive_does_not_have_names_those_that_it_has(spark, origin, tmp_path, published):
    """It published nothing, and said that it was done."""
    archive(spark, origin, str(tmp_path), queue_pattern="orders|007")
    target = Origin(url="http://127.0.0.1:1")
    with pytest.raises(
        PipelineError, match=r"no messages of queue 'typo'; there is '007' of vhost '/', 'orders' of vhost '/'"
    ):
        replay(spark, str(tmp_path), target, queue="typo")
    with pytest.raises(PipelineError, match=r"no messages of queue 'orders' of vhost 'other'; there is"):
        replay(spark, str(tmp_path), target, queue="orders", vhost="other")
    assert published == []


@pytest.fixture
def password(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text("guest")
    return str(path)


def test_headers_have_their_types_again_after_a_replay(spark, tmp_path, password):
    """A number came back as text: a binding to it took the message no more."""
    register(spark)
    headers = {
        "n": 5,
        "b": True,
        "t": "5",
        "none": None,
        "x-death": [{"count": 2, "queue": "q"}],
        "": b"\xff",
    }
    with (
        served(tmp_path / "broker") as broker,
        contextlib.closing(pika.BlockingConnection(pika.URLParameters(broker.url))) as connection,
    ):
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        channel.basic_publish("", "q", b"1", pika.BasicProperties(headers=headers))
        channel.basic_publish("", "q", b"2", pika.BasicProperties(headers={}))
        # As they come from a delayed exchange, and as a channel takes them.
        channel.basic_publish("", "q", b"3", pika.BasicProperties(headers={"x-delay": -50}, expiration="+5000000000"))
        target = Origin(url=broker.http_url, user="guest", password_file=password)
        with target:
            archive(spark, target, str(tmp_path / "archive"), queue="q")
        before = [channel.basic_get("q", auto_ack=True)[1].headers for _ in range(3)]
        assert replay(spark, str(tmp_path / "archive"), target) == 3
        assert [channel.basic_get("q", auto_ack=True)[1].headers for _ in range(3)] == before
        assert {name: type(value) for name, value in before[0].items()}["n"] is int


def test_messages_that_no_queue_takes_are_not_replayed_and_neither_are_the_others(spark, tmp_path, password):
    """They were dropped, and counted as published."""
    register(spark)
    with warren.open(tmp_path / "data") as store:
        store.queue("orders").publish(b"1")
        store.queue("lost").publish(b"2")
    archive(spark, Origin(path=str(tmp_path / "data")), str(tmp_path / "archive"))
    with served(tmp_path / "broker") as broker, contextlib.closing(broker.connect()) as connection:
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        target = Origin(url=broker.http_url, user="guest", password_file=password)
        with pytest.raises(PipelineError, match="no queue takes 1 rows, the first of them sent to exchange '' with"):
            replay(spark, str(tmp_path / "archive"), target)
        assert channel.queue_declare("orders", passive=True).method.message_count == 0
        channel.queue_declare("lost", durable=True)
        assert replay(spark, str(tmp_path / "archive"), target) == 2
        assert channel.basic_get("lost", auto_ack=True)[2] == b"2"


def test_a_name_that_is_too_long_for_a_directory_is_refused_with_the_remedy(spark, tmp_path):
    with warren.open(tmp_path / "data") as store:
        store.queue("q" * 255).publish(b"1")
    with pytest.raises(
        PipelineError, match=r"cannot be archived: its name makes a directory's name of 261 bytes.*--queue"
    ):
        archive(spark, Origin(path=str(tmp_path / "data")), str(tmp_path / "archive"))
    assert not (tmp_path / "archive").exists() or os.listdir(tmp_path / "archive") == []
