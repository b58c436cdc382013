"""SQL over queues: every queue is a table of its own name, however odd, and the rows are the messages."""

# ruff: noqa: F811  (the fixture is imported)

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
from pathlib import Path

import pyarrow as pa
import pytest

import warren
from tests.spark_session import spark  # noqa: F401
from warren.pipeline.errors import PipelineError
from warren.pipeline.jobs.origin import Origin
from warren.pipeline.jobs.sql import as_json, mentioned, query, quoted, rows_of, write_csv, write_json
from warren.pipeline.session import SparkFailedError

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")

ODD = ("dead-letters", "a.b", "x y", "tick`s", "ünïcode", "select", "amq.gen-1==", "007")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "data"
    with warren.open(path) as store:
        orders = store.queue("orders")
        orders.publish_many([b'{"n": %d}' % n for n in range(20)], headers={"kind": "order"})
        orders.publish(b"\xff\x00 not text")
        for number, name in enumerate(ODD):
            store.queue(name).publish_many([name.encode()] * (number + 1))
        store.queue("Orders").publish(b"the other one")
    return path


@pytest.fixture
def origin(data: Path) -> Origin:
    return Origin(path=str(data))


def ask(spark, origin: Origin, text: str) -> list[list[object]]:
    return list(rows_of(query(spark, origin, text).toArrow()))


@pytest.fixture(autouse=True)
def _case(spark):
    yield
    spark.conf.unset("spark.sql.caseSensitive")


def test_a_queue_is_a_table_of_its_name(spark, origin):
    text = "select routing_key, count(*) as n, sum(size) from `orders` where size < 10 group by 1"
    assert ask(spark, origin, text) == [["orders", 20, sum(len(b'{"n": %d}' % n) for n in range(20))]]


@pytest.mark.parametrize("name", ODD)
def test_an_odd_name_is_quoted(spark, origin, name):
    text = f"select decode(body, 'utf-8'), count(*) from {quoted(name)} group by 1"
    assert ask(spark, origin, text) == [[name, ODD.index(name) + 1]]


def test_queues_whose_names_differ_in_case_are_two_tables(spark, origin):
    assert ask(spark, origin, "select count(*) from orders") == [[21]]
    assert ask(spark, origin, "select count(*) from Orders") == [[1]]


def test_queues_can_be_joined(spark, origin):
    text = "select count(*) from orders o join `x y` x on o.vhost = x.vhost"
    assert ask(spark, origin, text) == [[21 * 3]]


def test_the_store_itself_is_a_table(spark, origin):
    rows = ask(spark, origin, "select queue, messages from warren_queues where queue = 'orders'")
    assert rows == [["orders", 21]]
    assert ask(spark, origin, "select count(*) > 0 from warren_segments") == [[True]]


def test_a_query_sees_what_was_published_since_the_last_one(spark, tmp_path):
    origin = Origin(path=str(tmp_path / "data"))
    for count in (1, 2):
        with warren.open(tmp_path / "data") as store:
            store.queue("growing").publish(b"one more")
        assert ask(spark, origin, "select count(*) from growing") == [[count]]


def test_only_queues_that_the_query_names_are_read():
    names = ["orders", "a.b", "tick`s", "invoices"]
    assert mentioned("select * from ORDERS join `a.b`", names) == ["orders", "a.b"]
    assert mentioned("select * from `tick``s`", names) == ["tick`s"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("select * from nobody", "nobody"), ("selec 1", "PARSE_SYNTAX_ERROR"), ("select nix from orders", "nix")],
)
def test_a_wrong_query_is_one_line_with_what_is_wrong(spark, origin, text, message):
    with pytest.raises(SparkFailedError, match=message) as caught:
        query(spark, origin, text)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_store_is_named(spark, tmp_path):
    with pytest.raises(SparkFailedError, match=str(tmp_path)) as caught:
        query(spark, Origin(path=str(tmp_path / "nothing")), "select 1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{}, {"path": "data", "url": "http://127.0.0.1:1"}])
def test_one_place_has_to_be_given(given):
    with pytest.raises(PipelineError, match="directory"):
        Origin(**given)


def test_values_become_json_without_loss_of_what_they_are():
    assert as_json(b"text") == "text"
    assert as_json(b"\xff") == {"$bytes": "/w=="}
    assert as_json([("key", b"value")]) == {"key": "value"}
    assert as_json([b"a", None, 1]) == ["a", None, 1]
    assert as_json(datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)) == "2026-01-02T00:00:00+00:00"
    assert as_json(decimal.Decimal("1.10")) == "1.10"


def test_numbers_that_json_does_not_have_are_text_and_columns_of_one_name_are_refused():
    """NaN was written as it is, which no parser takes, and of two columns one was left."""
    file = io.StringIO()
    write_json(pa.table({"n": [float("nan"), float("inf"), -float("inf"), 1.5]}), file)
    assert [row["n"] for row in json.loads(file.getvalue())] == ["NaN", "Infinity", "-Infinity", 1.5]
    file = io.StringIO()
    with pytest.raises(PipelineError, match="more than one column 'a', and JSON has room for one: name them with AS"):
        write_json(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), file)
    assert file.getvalue() == ""


def test_a_result_is_written_as_json_and_as_csv(spark, origin):
    text = "select seq_id, headers, body, published_at, expires_at from `orders` where size < 9 order by seq_id limit 2"
    result = query(spark, origin, text).toArrow()
    file = io.StringIO()
    write_json(result, file)
    rows = json.loads(file.getvalue())
    assert [row["body"] for row in rows] == ['{"n": 0}', '{"n": 1}']
    assert rows[0]["headers"] == {"kind": "order"}
    assert rows[0]["expires_at"] is None
    moment = datetime.datetime.fromisoformat(rows[0]["published_at"])
    assert abs((datetime.datetime.now(datetime.UTC) - moment).total_seconds()) < 3600
    file = io.StringIO()
    write_csv(result, file)
    lines = list(csv.reader(io.StringIO(file.getvalue())))
    assert lines[0] == ["seq_id", "headers", "body", "published_at", "expires_at"]
    assert lines[1][2] == '{"n": 0}'
    assert json.loads(lines[1][1]) == {"kind": "order"}
