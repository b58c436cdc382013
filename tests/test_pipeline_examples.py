"""The programs of examples/pipeline, the notebook and the demonstration, run against a broker that `warren serve` started.

A Spark session takes seconds to start, so programs run in this process and find the one of the tests. Those that read a queue
without consuming it share the orders of `orders`.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.broker_process import served
from tests.spark_session import spark  # noqa: F401
from warren.cli import spark as spark_command
from warren.cli.main import app
from warren.pipeline.amqp_rows import TYPES
from warren.pipeline.options import OPTIONS, TABLES
from warren.pipeline.schema import COLUMNS
from warren.pipeline.tables import table_schema

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "pipeline"
ORDERS = 1000
SECONDS = 240

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# By program: what runs it.
TESTED = {
    "publish_orders.py": "all of them",
    "read_queue.py": "test_a_queue_is_read_with_sql_and_stays_as_it_is",
    "windowed_aggregate.py": "test_ten_lines_lead_to_a_windowed_aggregate",
    "orders.ipynb": "test_the_cells_of_the_notebook_run_in_order",
    "tap.py": "test_a_tap_sees_what_is_new_and_takes_nothing",
    "stream_to_parquet.py": "test_a_queue_moves_to_parquet_exactly_once",
    "publish_results.py": "test_results_are_published_to_an_exchange_each_once",
    "archive_and_replay.sh": "test_an_archive_is_replayed_message_for_message",
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with served(tmp_path_factory.mktemp("broker") / "data") as running:
        yield running


@pytest.fixture
def example(spark, broker, monkeypatch, capsys):  # noqa: F811
    """Runs a program with arguments; what it printed."""
    monkeypatch.setenv("WARREN_URL", broker.http_url)
    monkeypatch.setenv("AMQP_URL", broker.url)

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    # Every test has the same orders in the queue, and nothing else.
    with broker.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        channel.queue_purge("orders")
    assert run("publish_orders.py") == f"{ORDERS} orders are in the queue\n"
    return run


def ready(broker, queue: str = "orders") -> int:
    info = broker.queue_info(queue)
    assert info["messages_unacknowledged"] == 0
    return info["messages_ready"]


def numbers(table: str) -> list[list[str]]:
    """The cells of a table that Spark showed, without its head."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    return rows[1:]


def test_a_queue_is_read_with_sql_and_stays_as_it_is(example, broker):
    printed = example("read_queue.py")
    by_key, by_country = printed.strip().split("\n\n")
    assert sum(int(row[2]) for row in numbers(by_key)) == ORDERS
    assert {row[1] for row in numbers(by_key)} == {"ready"}
    assert sorted((row[0].removeprefix("order."), row[2]) for row in numbers(by_key)) == sorted(
        (row[0], row[1]) for row in numbers(by_country)
    )
    assert ready(broker) == ORDERS


def test_ten_lines_lead_to_a_windowed_aggregate(example, broker):
    """As a user runs it: in a process of its own, with a Spark of its own."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "windowed_aggregate.py")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYSPARK")},
    )
    assert done.returncode == 0, done.stderr
    rows = numbers(done.stdout)
    assert sum(int(row[2]) for row in rows) == ORDERS
    assert {row[1] for row in rows} == {"at", "de", "fr", "nl", "pl"}
    assert ready(broker) == ORDERS
    lines = (EXAMPLES / "windowed_aggregate.py").read_text().split('"""')[2].splitlines()
    assert len([line for line in lines if line]) <= 11  # ten, and the address of the broker


def test_the_cells_of_the_notebook_run_in_order(example, broker, capsys):
    notebook = json.loads((EXAMPLES / "orders.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 4
    namespace: dict[str, object] = {"__name__": "__main__"}
    tables = []
    capsys.readouterr()
    for number, cell in enumerate(cells):
        exec(compile(cell, f"orders.ipynb, cell {number + 1}", "exec"), namespace)
        tables.append([row[:3] for row in numbers(capsys.readouterr().out)])
    assert len(tables[1]) == 5
    # The batch and the stream say the same, but for the last digits of sums.
    assert tables[3] == tables[2]
    assert sum(int(row[2]) for row in tables[-1]) == ORDERS
    assert ready(broker) == ORDERS


def test_a_tap_sees_what_is_new_and_takes_nothing(example, broker, tmp_path):
    assert numbers(example("tap.py", tmp_path)) == [["orders", str(ORDERS)]]
    assert numbers(example("tap.py", tmp_path)) == [["orders", str(ORDERS)]]  # nothing is new
    example("publish_orders.py")
    assert numbers(example("tap.py", tmp_path)) == [["orders", str(2 * ORDERS)]]
    assert ready(broker) == 2 * ORDERS


def test_a_queue_moves_to_parquet_exactly_once(example, broker, spark, tmp_path):  # noqa: F811
    assert example("stream_to_parquet.py", tmp_path) == f"{ORDERS} orders are in the lake\n"
    assert ready(broker) == 0
    assert example("stream_to_parquet.py", tmp_path) == f"{ORDERS} orders are in the lake\n"
    example("publish_orders.py")
    assert example("stream_to_parquet.py", tmp_path) == f"{2 * ORDERS} orders are in the lake\n"
    lake = spark.read.parquet(str(tmp_path / "orders"))
    assert lake.select("seq_id").distinct().count() == 2 * ORDERS
    assert lake.where("order is null").count() == 0


def test_results_are_published_to_an_exchange_each_once(example, broker, tmp_path):
    with broker.connect() as connection:
        channel = connection.channel()
        for queue in ("prices", "revenue"):
            channel.queue_declare(queue, durable=True)
            channel.queue_bind(queue, "shop", f"{queue.removesuffix('s')}.#")
        time.sleep(1)  # the length of a window: the first orders are all in windows that are over
        example("publish_orders.py")
        example("publish_results.py", tmp_path)
        assert ready(broker) == 0
        prices = taken(channel, "prices")
        assert sorted(body["article"] for _, body in prices) == ["book", "lamp"]
        revenue = taken(channel, "revenue")
        windows = [(body["window"]["start"], body["country"]) for _, body in revenue]
        assert len(windows) == len(set(windows))
        assert ORDERS <= sum(body["orders"] for _, body in revenue) < 2 * ORDERS
        assert {key for key, _ in revenue} == {f"revenue.{country}" for country in ("at", "de", "fr", "nl", "pl")}


def taken(channel, queue: str) -> list[tuple[str, dict]]:
    """Routing keys and bodies of all messages of a queue."""
    found = []
    while True:
        method, _, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return found
        found.append((method.routing_key, json.loads(body)))


def test_an_archive_is_replayed_message_for_message(example, broker, tmp_path):
    # The script has them in the environment; the session of the tests was started with another one.
    secret = tmp_path / "secret"
    secret.write_text("guest")
    script = (EXAMPLES / "archive_and_replay.sh").read_text()
    lines = [line for line in script.splitlines() if line.startswith("warren spark ")]
    assert len(lines) == 2
    for line in lines:
        line = line.replace("$archive", str(tmp_path / "archive")).replace("$url", broker.http_url)
        asked_by = ["--user", "guest", "--password-file", str(secret)]
        result = CliRunner().invoke(spark_command.app, [*shlex.split(line)[2:], *asked_by])
        assert result.exit_code == 0, result.output
    assert ready(broker) == 2 * ORDERS
    with broker.connect() as connection:
        bodies = [json.dumps(body) for _, body in taken(connection.channel(), "orders")]
    assert sorted(bodies[:ORDERS]) == sorted(bodies[ORDERS:])


def test_every_example_of_the_pipeline_is_tested():
    assert sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh", ".ipynb")) == sorted(TESTED)
    for name in TESTED:
        if not name.endswith(".ipynb"):
            assert len((EXAMPLES / name).read_text().splitlines()) < 40, name
    assert [test for test in TESTED.values() if test.startswith("test_") and test not in globals()] == []


# ---- the demonstration ----


def test_the_demonstration_ends_with_a_ledger_that_balances(tmp_path):
    command = [sys.executable, "-m", "examples.demo", "--orders", "2000", "--seconds", "4", "--to", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the ledger balances" in done.stdout
    killed = re.search(r"killed: process \d+, which holds the queues", done.stdout)
    assert killed is not None
    assert "2,000" in done.stdout
    report = Path(re.search(r"the report: (.+)", done.stdout)[1])
    page = report.read_text()
    assert "countries" in page
    assert "<svg" in page
    assert sorted(path.name for path in (tmp_path / "lake").glob("kind=*")) == ["kind=order", "kind=poison"]


def test_the_orders_of_the_demonstration_are_of_all_kinds():
    from examples.demo import DELAYED_UNTIL, POISON, make_orders

    orders = make_orders(5000, random.Random(1))
    assert [order.number for order in orders] == list(range(5000))
    assert {order.body for order in orders if order.body in POISON} == set(POISON)
    delayed = [order for order in orders if order.delay_ms]
    assert 50 < len(delayed) < 200
    assert all(order.number < 5000 * DELAYED_UNTIL and order.body not in POISON for order in delayed)
    assert len({json.loads(order.body)["customer"] for order in orders if order.body not in POISON}) > 50


# ---- the page ----

PAGE = (ROOT / "docs" / "pipeline.md").read_text()


def test_the_python_blocks_of_the_page_run(example, broker, tmp_path):
    found = list(re.finditer(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    assert len(found) >= 6
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in found:
        # Paths of Spark are relative to where its session was started.
        code = block[1].replace("http://127.0.0.1:15672", broker.http_url).replace('"lake/', f'"{tmp_path}/lake/')
        line = PAGE.count("\n", 0, block.start(1))
        exec(compile("\n" * line + code, "docs/pipeline.md", "exec"), namespace)
    assert ready(broker) == 0  # the stream on the page took everything
    assert namespace["spark"].read.parquet(f"{tmp_path}/lake/orders").count() == ORDERS


def section(title: str) -> str:
    return re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def first_cells(text: str) -> set[str]:
    """What stands in backquotes in the first cells of the tables."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_page_has_all_options_and_columns_and_no_others():
    batch, stream, sink = (
        first_cells(section("Batch source")),
        first_cells(section("Streaming source")),
        section("Sink"),
    )
    assert batch == {name for name, uses in OPTIONS.items() if "batch read" in uses}
    assert stream == {name for name, uses in OPTIONS.items() if "streaming read" in uses} - batch
    of_sink = {name for name, uses in OPTIONS.items() if "write" in uses} - batch - stream
    assert first_cells(sink) == of_sink | set(TYPES)
    assert first_cells(section("Columns")) == set(COLUMNS)


@pytest.mark.parametrize("table", [table for table in TABLES if table != "messages"])
def test_the_page_has_the_columns_of_a_table(table):
    row = re.search(rf"^\| `{table}` \|.*\| (.+) \|$", section("Tables beside the messages"), re.MULTILINE)
    assert row[1].split(", ") == table_schema(table).names


def commands() -> list[str]:
    """Every command line of Warren's on the page."""
    lines = re.findall(r"^(warren [^#\n]+)", PAGE, re.MULTILINE)
    return lines + re.findall(r"`(warren (?:spark|store|leases|snapshots) [^`]+)`", PAGE)


def options_of(command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name.startswith("-")}


def test_the_commands_of_the_page_exist_with_their_options():
    root = typer.main.get_command(app)
    groups = {**root.commands, "spark": typer.main.get_command(spark_command.app)}
    seen = set()
    for line in commands():
        words = shlex.split(line.removesuffix("&").strip())
        command = groups[words[1]]
        if hasattr(command, "commands") and words[2] != "COMMAND":
            command = command.commands[words[2]]
            seen.add((words[1], words[2]))
        given = {word for word in words if word.startswith("--")}
        assert given <= options_of(command), line
    everything = {(name, each) for name in ("spark", "leases", "snapshots") for each in groups[name].commands}
    assert everything - seen == set()
