"""`warren spark`: what the commands say, write and answer, on directories and on a running broker."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from typer.testing import CliRunner, Result

import warren
from tests.broker_process import Served
from tests.spark_session import spark  # noqa: F401
from tests.test_cli import SMALL, contents, fill
from warren.cli.spark import app
from warren.cli.store import app as store_app
from warren.storage.verify import vhost_roots
from warren.storage.vhost_store import VhostStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
    pytest.mark.usefixtures("spark"),
]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result: Result, code: int = 1) -> str:
    """The error of a command that failed: one line."""
    assert result.exit_code == code, result.output
    assert re.fullmatch(r"warren: [^\n]*\n", result.stderr), result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "data"
    fill(path, clean=False)
    return path


@pytest.fixture
def data(filled: Path, tmp_path: Path) -> Path:
    shutil.copytree(filled, tmp_path / "data")
    return tmp_path / "data"


def damage(data: Path) -> None:
    [root] = vhost_roots(str(data))
    path = next(path for path in sorted(Path(root).rglob("*.qi")))
    content = bytearray(path.read_bytes())
    content[64 + 5] ^= 1
    path.write_bytes(content)


# ---- verify, recover, compact ----


def test_verify_of_a_sound_store_is_exit_code_0_and_changes_nothing(data):
    before = contents(data)
    result = run("verify", data)
    assert result.exit_code == 0, result.output
    assert "no damage" in result.stdout
    assert "messages/s" in result.stdout
    assert contents(data) == before


def test_verify_of_a_damaged_store_is_exit_code_1_and_says_what_the_store_command_says(data, tmp_path):
    damage(data)
    result = run("verify", data, "--json", tmp_path / "result.json")
    assert result.exit_code == 1
    assert "1 damaged places" in result.stdout
    [found] = json.loads((tmp_path / "result.json").read_text())
    [alone] = json.loads(CliRunner().invoke(store_app, ["verify", str(data), "--json"]).stdout)
    assert found["findings"] == alone["findings"]
    assert (found["counts"], found["damaged"], found["vhost"]) == (alone["counts"], True, "/")
    assert found["messages_per_second"] > 0


def test_the_result_goes_to_stdout_for_a_minus(data):
    result = run("verify", data, "--json", "-")
    [found] = json.loads(result.stdout)
    assert found["findings"] == []


@pytest.mark.parametrize("command", [("verify",), ("compact",), ("recover",)])
def test_a_directory_that_is_in_use_is_refused_with_the_remedy(data, command):
    with warren.open(data, settings=SMALL):
        message = said(run(*command, data))
    assert "is in use by process" in message
    if command != ("recover",):
        assert "--url" in message


@pytest.mark.parametrize("command", ["verify", "recover", "compact"])
def test_a_directory_without_a_store_is_refused_before_spark_is_asked(tmp_path, command):
    assert "holds no store" in said(run(command, tmp_path / "nothing"))
    assert os.listdir(tmp_path) == []


def test_a_vhost_that_is_not_there_is_named_with_those_that_are(data):
    assert "no vhost 'other'; there is '/'" in said(run("verify", data, "--vhost", "other"))


def test_recover_makes_the_next_start_a_clean_one(data, tmp_path):
    result = run("recover", data, "--json", tmp_path / "result.json")
    assert result.exit_code == 0, result.output
    assert "the next start is a clean one" in result.stdout
    [found] = json.loads((tmp_path / "result.json").read_text())
    assert (found["was_clean"], found["damage"]) == (False, [])
    assert found["queues"]["orders"] > 200
    assert "it was stopped cleanly" in run("recover", data).stdout
    store = VhostStore(str(data), settings=SMALL, background=False)
    assert store.clean_start
    store.abandon()


def test_recover_of_a_damaged_store_is_exit_code_1_and_lists_what_was_lost(data):
    damage(data)
    result = run("recover", data)
    assert result.exit_code == 1
    assert "quarantined: queues/" in result.stdout
    assert run("recover", data).exit_code == 0


def test_compact_shows_garbage_and_changes_nothing(data, tmp_path):
    before = contents(data)
    result = run("compact", data, "--json", tmp_path / "result.json")
    assert result.exit_code == 0, result.output
    assert ".rdq" in result.stdout
    [plan] = json.loads((tmp_path / "result.json").read_text())
    assert plan["files"]
    assert 0 <= plan["garbage_fraction"] <= 1
    assert contents(data) == before


# ---- sql, report, archive ----


def test_sql_shows_a_table_or_writes_a_file(data, tmp_path):
    query = "select queue, count(*) as n from orders group by 1"
    result = run("sql", query, data)
    assert result.exit_code == 0, result.output
    assert "orders" in result.stdout
    assert "1 row\n" in result.stdout
    assert run("sql", query, data, "--csv", "-").stdout.splitlines()[0] == "queue,n"
    assert run("sql", query, data, "--json", tmp_path / "rows.json").exit_code == 0
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert (row["queue"], row["n"] > 200) == ("orders", True)


def test_sql_shows_no_more_rows_than_asked_for_and_leaves_the_terminal_as_it_is(tmp_path):
    with warren.open(tmp_path / "data") as store:
        store.queue("q").publish_many([b"\x1b[31m[red]" + b"x" * 200] * 5)
    result = run("sql", "select body from q", tmp_path / "data", "--limit", "2")
    assert "the first 2 rows" in result.stdout
    assert result.stdout.count("·[31m[red]") == 2
    assert "\x1b" not in result.stdout


def test_sql_shows_what_is_wider_than_the_terminal_one_record_under_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("warren.cli.tables._PLAIN_WIDTH", 0)  # as on a terminal
    with warren.open(tmp_path / "data") as store:
        store.queue("q").publish_many([b"x" * 700 + b"end\x1b", b"second"], content_type="text/plain")
    lines = run("sql", "select * from q order by seq_id", tmp_path / "data").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    fields = dict(line.split(" | ", 1) for line in lines if " | " in line and not line.startswith(" "))
    fields = {name.strip(): value for name, value in fields.items()}
    assert lines[0].startswith("-[ record 1 ]---")
    assert (fields["content_type"], fields["body"], fields["size"]) == ("text/plain", "second", "6")
    assert "".join(line.partition("|")[2].strip() for line in lines).count("x" * 700 + "end·") == 1, "in several lines"
    assert "correlation_id" not in fields
    assert "correlation_id" in " ".join(lines).partition("null in all of them: ")[2]
    assert lines[-1] == "2 rows"
    narrow = run("sql", "select seq_id, size from q", tmp_path / "data").stdout
    assert "record" not in narrow


def test_a_wrong_query_is_one_line(data):
    assert "nobody" in said(run("sql", "select * from nobody", data))


def test_no_place_and_two_of_them_are_a_wrong_command_line():
    assert "neither a directory nor a url" in said(run("sql", "select 1"), 2)
    assert "both a directory and a url" in said(run("sql", "select 1", "data", "--url", "http://127.0.0.1:1"), 2)


def test_report_writes_one_page(data, tmp_path):
    result = run("report", data, "--to", tmp_path / "page.html", "--json", tmp_path / "result.json")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "page.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "ranked" in text
    found = json.loads((tmp_path / "result.json").read_text())
    assert {queue["queue"] for queue in found["queues"]} == {"orders", "ranked", "table"}


def test_archive_writes_a_run_and_says_what_is_in_it(data, tmp_path):
    result = run(
        "archive", "--path", data, "--queue", "orders", "--to", tmp_path / "archive", "--json", tmp_path / "r.json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["messages"] == found["queues"][0]["messages"] > 200
    assert (tmp_path / "archive" / f"run={found['run']}").is_dir()


def test_init_writes_a_project(tmp_path):
    assert run("init", tmp_path / "shop", "--queue", "orders").exit_code == 0
    assert (tmp_path / "shop" / "spark-pipeline.yml").exists()
    assert "new or empty" in said(run("init", tmp_path / "shop"))


# ---- a running broker ----


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("broker") / "data")
    served.start()
    try:
        yield served
    finally:
        assert served.process is not None
        served.process.terminate()
        served.process.wait(60)


def test_a_running_broker_is_asked_reported_archived_and_fed_again(broker, tmp_path):
    """What was archived is published again to another queue, with its properties, once."""
    (tmp_path / "password").write_text("guest\n")
    who = ("--url", broker.http_url, "--user", "guest", "--password-file", tmp_path / "password")
    with broker.connect() as connection:
        channel = connection.channel()
        for name in ("live", "again"):
            channel.queue_declare(name, durable=True)
        channel.confirm_delivery()
        for number in range(25):
            properties = pika.BasicProperties(delivery_mode=2, message_id=f"m{number}", headers={"kind": "test"})
            channel.basic_publish("", "live", b"body %d" % number, properties)
    rows = run("sql", "select count(*) as n, max(message_id) as m from live", *who, "--csv", "-")
    assert rows.stdout.splitlines() == ["n,m", "25,m9"], rows.output
    report = run("report", *who, "--to", tmp_path / "page.html")
    assert report.exit_code == 0, report.output
    assert "25 messages in 2 queues" in report.stdout
    archived = run("archive", *who, "--queue", "live", "--to", tmp_path / "archive", "--json", "-")
    assert json.loads(archived.stdout)["messages"] == 25
    assert broker.ask("snapshots/list", vhost="/")["snapshots"] == [], "jobs let go of what they read"
    replayed = run("replay", tmp_path / "archive", *who, "--exchange", "", "--routing-key", "again", "--json", "-")
    assert replayed.exit_code == 0, replayed.output
    assert json.loads(replayed.stdout)["messages"] == 25
    with broker.connect() as connection:
        channel = connection.channel()
        assert channel.queue_declare("live", passive=True).method.message_count == 25
        got = [channel.basic_get("again", auto_ack=True) for _ in range(26)]
        assert [body for _, _, body in got[:25]] == [b"body %d" % number for number in range(25)]
        assert [properties.message_id for _, properties, _ in got[:25]] == [f"m{number}" for number in range(25)]
        assert got[0][1].headers == {"kind": "test"}
        assert got[25] == (None, None, None)


def test_a_directory_of_a_running_broker_is_refused_or_read_through_it(broker):
    assert "--url" in said(run("verify", broker.data_dir))


def test_a_broker_that_refuses_the_password_is_one_line_without_the_password(broker, tmp_path):
    (tmp_path / "password").write_text("hunter2")
    who = ("--url", broker.http_url, "--user", "guest", "--password-file", tmp_path / "password")
    message = said(run("sql", "select 1 from live", *who))
    assert "hunter2" not in message


# ---- where Spark is not ----


def test_without_java_it_is_one_sentence_and_exit_code_2(data, monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no Java" in said(run("verify", data), 2)


def test_a_setting_without_a_value_is_a_wrong_command_line(data):
    assert run("verify", data, "--conf", "nonsense").exit_code == 2


def test_a_session_of_its_own_is_quiet(data):
    """The command as a user starts it: Spark's own words do not reach the terminal."""
    command = [
        sys.executable,
        "-c",
        "from warren.cli.spark import app; app()",
        "verify",
        str(data),
        "--master",
        "local[1]",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "no damage" in done.stdout
