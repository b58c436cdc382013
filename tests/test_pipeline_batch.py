"""`spark.read.format("warren")` in a real session, on files at rest."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from pyspark.errors import PySparkException

import warren
from tests.broker_clients import connected
from tests.spark_session import spark as spark  # a fixture
from warren.errors import StoreLockedError
from warren.pipeline import batch_source, register
from warren.pipeline.batch_source import Place, WarrenBatchReader, WarrenPartition
from warren.pipeline.broker_client import BrokerClient, Credentials
from warren.pipeline.errors import BrokerError, PipelineError
from warren.pipeline.parts import StreamPart
from warren.pipeline.rows import read_part
from warren.pipeline.schema import arrow_schema, spark_ddl
from warren.pipeline.store_view import open_view
from warren.pipeline.tables import WarrenTableReader, table_ddl, table_schema
from warren.storage.layout import hashed
from warren.testing import RunningBroker, running_broker
from warren.tickets import place_name

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:pyspark")

ORDERS = 3000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Orders with keys that repeat, some large; a second queue; closed."""
    directory = tmp_path_factory.mktemp("batch") / "data"
    with warren.open(directory) as store:
        orders = store.queue("orders")
        for number in range(ORDERS):
            body = b"%d" % number if number % 100 else b"%d " % number * 2000
            orders.publish(body, headers={"kind": "even" if number % 2 == 0 else "odd"}, type=f"t{number % 3}")
        orders.ack_many(orders.get_many(100))
        store.queue("returns").publish_many([b"r"] * 20)
    return str(directory)


def load(spark: Any, path: str | None, **options: str) -> Any:
    return spark.read.format("warren").options(**options).load(path)


def test_a_directory_is_a_table_with_every_column(spark, data):
    orders = load(spark, data, queue="orders")
    assert orders.count() == ORDERS - 100
    assert orders.columns == arrow_schema().names
    row = orders.where("seq_id = 2000").first()
    assert (row.vhost, row.queue, row.state, row.redelivered) == ("/", "orders", "ready", False)
    assert bytes(row.body) == b"2000 " * 2000
    assert row["size"] == 10_000
    assert row.headers == {"kind": "even"}
    assert row.source_file.startswith("msg_store_persistent/")


def test_schemas_are_what_spark_makes_of_their_ddl(spark):
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    assert to_arrow_schema(StructType.fromDDL(spark_ddl()), timezone="UTC").equals(arrow_schema())
    for table in ("queues", "segments", "files", "journal"):
        made = to_arrow_schema(StructType.fromDDL(table_ddl(table)), timezone="UTC")
        assert made.equals(table_schema(table)), table


def test_sql_sees_a_queue_as_a_view(spark, data):
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW orders USING warren OPTIONS (path '{data}', queue 'orders')")
    found = spark.sql(
        "SELECT type, count(*) AS n, sum(size) AS bytes FROM orders GROUP BY type ORDER BY type"
    ).collect()
    assert [(row.type, row.n) for row in found] == [("t0", 966), ("t1", 967), ("t2", 967)]
    assert spark.sql("SELECT headers['kind'] AS kind FROM orders WHERE seq_id = 101").first().kind == "odd"


def test_columns_narrow_the_table_in_the_order_given(spark, data):
    some = load(spark, data, queue="orders", columns="size, seq_id", fromSeqId="101", toSeqId="103")
    assert some.columns == ["size", "seq_id"]
    assert sorted(map(tuple, some.collect())) == [(3, 101), (3, 102)]


def test_a_schema_of_the_users_with_known_names_is_read(spark, data):
    reader = spark.read.format("warren").schema("body binary, queue string").options(queue="returns")
    assert [tuple(row) for row in reader.load(data).distinct().collect()] == [(b"r", "returns")]
    wrong = spark.read.format("warren").schema("seq_id string").options(queue="returns")
    with pytest.raises(PySparkException, match="column 'seq_id' is asked for as string; it is bigint"):
        wrong.load(data).count()


def test_queues_by_pattern_share_tasks(spark, data):
    both = load(spark, data, queuePattern=".*", columns="queue", minPartitions="1")
    assert both.rdd.getNumPartitions() == 1
    counts = {row.queue: row["count"] for row in both.groupBy("queue").count().collect()}
    assert counts == {"orders": ORDERS - 100, "returns": 20}


def test_the_tables_beside_messages_are_tables(spark, data):
    queues = load(spark, data, table="queues", columns="queue,messages")
    assert {tuple(row) for row in queues.collect()} == {("orders", ORDERS - 100), ("returns", 20)}
    segments = load(spark, data, table="segments")
    assert segments.selectExpr("sum(live)").first()[0] == ORDERS - 80
    files = load(spark, data, table="files")
    assert files.selectExpr("sum(live_records)").first()[0] == 29
    assert load(spark, data, table="journal").count() >= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "orders", "colums": "body"}, "there is no option 'colums'; did you mean 'columns'"),
        ({"queue": "oders"}, "there is no queue 'oders'; did you mean 'orders'"),
        ({"queue": "orders", "vhost": "x"}, "there is no vhost 'x'; there are /"),
        ({"queue": "orders", "columns": "boody"}, "there is no column 'boody'; did you mean 'body'"),
        ({"queue": "orders", "lease": "x"}, "option 'lease' is for a streaming read"),
    ],
)
def test_a_wrong_option_is_one_clear_message(spark, data, options, message):
    with pytest.raises(PySparkException) as caught:
        load(spark, data, **options).count()
    assert message in str(caught.value)


def test_a_path_that_is_no_store_is_one_clear_message(spark, tmp_path):
    with pytest.raises(PySparkException, match="holds no store"):
        load(spark, str(tmp_path), queue="orders").count()


def test_a_damaged_message_fails_the_query_or_is_passed_over(spark, tmp_path):
    with warren.open(tmp_path) as store:
        store.queue("orders").publish_many([b"first", b"second", b"third"])
    [path] = tmp_path.rglob("0.qs")
    path.write_bytes(path.read_bytes().replace(b"second", b"secund"))
    with pytest.raises(
        PySparkException, match=r"message 1 of queue 'orders' cannot be read: its body does not check out"
    ):
        load(spark, str(tmp_path), queue="orders").collect()
    left = load(spark, str(tmp_path), queue="orders", failOnDataLoss="false").collect()
    assert [row.seq_id for row in left] == [0, 2]


def test_a_registered_source_is_found_by_its_name(spark, data):
    register(spark)
    assert load(spark, data, queue="returns").count() == 20


def test_overwriting_is_refused(spark, data):
    frame = spark.createDataFrame([(b"x",)], "body binary")
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        frame.write.format("warren").mode("overwrite").option("url", "http://127.0.0.1:9").save()


# -- without a session -------------------------------------------------------------------------------------------------


def test_readers_and_partitions_can_be_pickled_and_hold_no_secret(data):
    options = {"path": data, "queue": "orders", "user": "guest", "password": "hush-hush"}
    reader = WarrenBatchReader(options, arrow_schema(["seq_id"]))
    partitions = reader.partitions()
    assert len(partitions) >= 1
    packed = pickle.dumps((reader, partitions))
    assert b"hush-hush" not in packed
    again, shares = pickle.loads(packed)
    rows = sum(batch.num_rows for share in shares for batch in again.read(share))
    assert rows == ORDERS - 100
    assert "hush-hush" not in repr(partitions)


def test_a_live_directory_with_credentials_is_read_through_its_broker(tmp_path, monkeypatch):
    calls: list[tuple[str, dict[str, Any]]] = []

    class Client:
        def __init__(self, url: str, credentials: object = None, **_: object) -> None:
            self.url = url

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None: ...

        def call(self, name: str, **arguments: Any) -> dict[str, Any]:
            if name == "snapshots/heartbeat":
                return {}
            calls.append((self.url, {"name": name, **arguments}))
            store.engine.snapshot(str(tmp_path / "snap"), transients=True)
            path = str(tmp_path / "snap")
            host = place_name(os.path.join(path, "vhosts", hashed("/")))
            return {"id": "1", "path": path, "host": host, "ticket": "t1", "data_url": "http://127.0.0.1:9"}

    monkeypatch.setattr(batch_source, "BrokerClient", Client)
    directory = tmp_path / "data"
    options = {"path": str(directory), "queue": "orders", "columns": "body,state", "snapshotTtl": "60"}
    for name in ("WARREN_USER", "WARREN_PASSWORD", "WARREN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with warren.open(directory) as store:
        store.queue("orders").publish_many([b"a", b"b"], persistent=False)
        store.queue("orders").get()
        with pytest.raises(StoreLockedError, match=r"the path of a Store\.snapshot\(\)"):
            WarrenBatchReader(options, arrow_schema(["body", "state"])).partitions()
        (directory / "node.json").write_text('{"http": "http://127.0.0.1:15672", "pid": 1}')
        with pytest.raises(StoreLockedError, match=r"url=http://127\.0\.0\.1:15672"):
            WarrenBatchReader(options, arrow_schema(["body", "state"])).partitions()
        assert calls == []
        secret = {"user": "guest", "password": "hush-hush"}
        reader = WarrenBatchReader({**options, **secret}, arrow_schema(["body", "state"]))
        partitions = reader.partitions()
        asked = {
            "name": "snapshots/take",
            "vhost": "/",
            "queues": ["orders"],
            "pattern": None,
            "ttl": 60,
            "group": None,
        }
        assert calls == [("http://127.0.0.1:15672", asked)]
        assert b"hush-hush" not in pickle.dumps((reader, partitions))
        rows = [row for share in partitions for batch in reader.read(share) for row in batch.to_pylist()]
    assert rows == [{"body": b"a", "state": "unacked"}, {"body": b"b", "state": "ready"}]


@pytest.fixture(scope="module")
def served() -> Iterator[RunningBroker]:
    """A broker with a durable queue, one with priorities and one that is not durable; small, large and transient messages."""
    with running_broker(http=True) as broker, connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        channel.queue_declare("urgent", durable=True, arguments={"x-max-priority": 5})
        channel.queue_declare("passing")
        for number in range(60):
            properties = pika.BasicProperties(delivery_mode=2 if number % 3 else 1, priority=number % 6)
            for queue in ("orders", "urgent", "passing"):
                channel.basic_publish("", queue, b"m%d" % number * (1 if number % 7 else 2000), properties)
        for _ in range(5):
            channel.basic_get("orders")
        yield broker


@pytest.mark.parametrize("access", ["files", "http", "auto"])
def test_a_running_broker_is_read_through_a_snapshot_with_all_that_is_in_it(served, access):
    options = {"url": served.http_url, "user": "guest", "password": "guest", "queuePattern": ".*", "access": access}
    reader = WarrenBatchReader({**options, "snapshotTtl": "60", "minPartitions": "7"}, arrow_schema())
    partitions = pickle.loads(pickle.dumps(reader.partitions()))
    task = pickle.loads(pickle.dumps(reader))
    rows = [row for share in partitions for batch in task.read(share) for row in batch.to_pylist()]
    assert Counter((row["queue"], row["state"]) for row in rows) == {
        ("orders", "ready"): 55,
        ("orders", "unacked"): 5,
        ("urgent", "ready"): 60,
        ("passing", "ready"): 60,
    }
    bodies = Counter(b"m%d" % number * (1 if number % 7 else 2000) for number in range(60) for _ in range(3))
    assert Counter(row["body"] for row in rows) == bodies
    assert {row["redelivered"] for row in rows if row["state"] == "unacked"} == {True}
    for name in ("orders", "urgent", "passing"):
        assert served.queue_info(name)["messages"] == 60, "the reading took something away"


def test_a_snapshot_under_load_has_exactly_what_was_ready_and_unacked_at_its_instant(scale):
    with running_broker(http=True) as broker:
        stopping = threading.Event()
        with connected(broker) as connection:
            connection.channel().queue_declare("busy", durable=True)
        busy = threading.Thread(target=_publish_and_consume, args=(broker, stopping))
        busy.start()
        try:
            credentials = Credentials(user="guest", password="guest")
            with BrokerClient(broker.http_url, credentials) as client:
                for _ in range(scale.scale(40)):
                    _compare_with_its_counts(
                        client.call("snapshots/take", vhost="/", queues=["busy"], pattern=None, ttl=60)
                    )
        finally:
            stopping.set()
            busy.join()


def _publish_and_consume(broker: RunningBroker, stopping: threading.Event) -> None:
    """Messages of all kinds come, some wait for an ack, some are acked, some come back."""
    with connected(broker) as connection:
        channel = connection.channel()
        number = 0
        while not stopping.is_set():
            for _ in range(20):
                number += 1
                properties = pika.BasicProperties(delivery_mode=2 if number % 3 else 1)
                channel.basic_publish("", "busy", b"%d" % number * (1 if number % 11 else 3000), properties)
            for turn in range(12):
                method, _, _ = channel.basic_get("busy")
                if method is not None and turn % 3 == 1:
                    channel.basic_ack(method.delivery_tag)
                elif method is not None and turn % 3 == 2:
                    channel.basic_nack(method.delivery_tag)


def _compare_with_its_counts(snapshot: dict[str, Any]) -> None:
    counts = snapshot["queues"].get("busy")
    assert counts is not None
    view = open_view(snapshot["path"])
    rows = [
        row
        for part in view.parts({"queue": "busy"})
        for batch in read_part(view.root, part, ["seq_id", "state", "body"])
        for row in batch.to_pylist()
    ]
    states = Counter(row["state"] for row in rows)
    assert (states["ready"], states["unacked"]) == (counts["ready"], counts["unacknowledged"])
    assert len({row["seq_id"] for row in rows}) == len(rows)


def test_spark_reads_a_running_broker_with_tickets_alone(spark, served):
    options = {"url": served.http_url, "user": "guest", "password": "guest", "queuePattern": "orders|passing"}
    found = load(spark, None, access="http", **options).groupBy("queue", "state").count().collect()
    assert {(row.queue, row.state): row["count"] for row in found} == {
        ("orders", "ready"): 55,
        ("orders", "unacked"): 5,
        ("passing", "ready"): 60,
    }


def test_a_refusal_of_the_broker_is_one_clear_message(served):
    good = {"url": served.http_url, "user": "guest", "password": "guest", "queue": "orders"}

    def plan(**changes: str) -> list[Any]:
        return WarrenBatchReader({**good, **changes}, arrow_schema()).partitions()

    with pytest.raises(BrokerError, match="user or password is wrong"):
        plan(password="hush-hush")
    with pytest.raises(BrokerError, match="no queue 'oders'"):
        plan(queue="oders")
    with pytest.raises(BrokerError, match="vhost"):
        plan(vhost="nowhere")


@pytest.mark.parametrize("access", ["files", "http"])
def test_the_tables_of_a_running_broker_are_those_of_its_snapshot(served, access):
    options = {"url": served.http_url, "user": "guest", "password": "guest", "table": "queues", "queuePattern": ".*"}
    options["access"] = access
    reader = WarrenTableReader(options, table_schema("queues"))
    rows = [row for share in reader.partitions() for batch in reader.read(share) for row in batch.to_pylist()]
    assert {row["queue"]: (row["ready"], row["unacked"], row["durable"]) for row in rows} == {
        "orders": (55, 5, True),
        "urgent": (60, 0, True),
        "passing": (60, 0, False),
    }


@pytest.mark.parametrize("access", ["files", "http"])
def test_a_damaged_message_of_a_running_broker_is_named_also_by_the_data_server(access):
    with running_broker(http=True) as broker:
        with contextlib.closing(pika.BlockingConnection(pika.URLParameters(broker.url))) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("orders", durable=True)
            for body in (b"first", b"the second one", b"third"):
                channel.basic_publish("", "orders", body, pika.BasicProperties(delivery_mode=2))
        options = {"url": broker.http_url, "user": "guest", "password": "guest", "queue": "orders", "access": access}
        reader = WarrenBatchReader(options, arrow_schema(["seq_id", "body"]))
        [share] = reader.partitions()
        files = [path for path in Path(share.place.root).rglob("*") if path.is_file()]
        for path in files:
            content = path.read_bytes()
            if b"the second one" in content:
                path.write_bytes(content.replace(b"the second one", b"the secund one"))
        with pytest.raises(PipelineError, match=r"message 1 of queue 'orders' cannot be read"):
            list(reader.read(share))
        lenient = WarrenBatchReader({**options, "failOnDataLoss": "false"}, arrow_schema(["seq_id", "body"]))
        assert [row["body"] for batch in lenient.read(share) for row in batch.to_pylist()] == [b"first", b"third"]


def test_a_place_elsewhere_is_read_by_http_unless_files_are_asked_for():
    def place(access: str) -> Place:
        return Place("/nowhere", "another machine", "http://127.0.0.1:9", "ticket", access)

    assert place("auto").by_files is False
    assert place("http").by_files is False
    with pytest.raises(PipelineError, match="access=files is asked for"):
        _ = place("files").by_files
    assert "ticket" not in repr(place("auto"))
    share = WarrenPartition(place("auto"), (StreamPart(vhost="/", queue="q", sid=256, directory="d"),))
    assert "ticket" not in repr(share)


def test_a_store_that_was_opened_after_the_read_was_planned_is_not_read(tmp_path):
    with warren.open(tmp_path) as store:
        store.queue("orders").publish(b"a")
    reader = WarrenBatchReader({"path": str(tmp_path), "queue": "orders"}, arrow_schema())
    [share] = reader.partitions()
    with warren.open(tmp_path), pytest.raises(StoreLockedError, match="after the read of it was planned; load it anew"):
        list(reader.read(share))


def test_a_snapshot_that_ended_while_it_was_read_is_named(data):
    place = Place("/nowhere/vhosts/x")
    part = StreamPart(vhost="/", queue="orders", sid=256, directory="queues/x", segments=(0,))
    with pytest.raises(PipelineError, match=r"0\.qi of queue 'orders' is not there any more: the snapshot has ended"):
        list(batch_source.read_at(place, part, arrow_schema(["seq_id"]), True))


def test_importing_the_module_that_spark_looks_for_is_cheap_and_never_fails(tmp_path):
    light = (
        "import sys, pyspark_warren; assert pyspark_warren.DefaultSource.name() == 'warren'; "
        "heavy = {'pandas', 'numpy', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", light], check=True)
    (tmp_path / "pyspark.py").write_text("raise ImportError('no Spark here')")
    without = "import pyspark_warren; assert not hasattr(pyspark_warren, 'DefaultSource')"
    subprocess.run([sys.executable, "-c", without], check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})


def test_no_secret_is_in_what_spark_sends_to_executors(served):
    from pyspark.sql.datasource import CaseInsensitiveDict
    from pyspark.sql.types import StringType, StructField, StructType

    from warren.pipeline.source import WarrenSource

    schema = StructType([StructField("queue", StringType())])
    for more in ({}, {"table": "queues"}):
        options = {"url": served.http_url, "user": "guest", "password": "guest", "queue": "orders", **more}
        source = WarrenSource(CaseInsensitiveDict(options))
        reader = source.reader(schema)
        partitions = reader.partitions()
        assert partitions
        assert "password" not in source.options
        source.options["url"] = ""  # of the test's own broker: it may have any port
        sent = pickle.dumps((source.options, reader, partitions))
        assert b"password" not in sent
