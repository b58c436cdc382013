"""What an operator does wrong on his first day is refused with the value and the remedy, and not with an errno."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pika
import pika.exceptions
import pytest
from typer.testing import CliRunner

import warren
from tests.broker_process import Served, served
from warren.cli.main import app
from warren.errors import StoreLockedError, StorePathError
from warren.node.broker import Broker
from warren.node.config import Config
from warren.node.status_page import ListenError
from warren.node.users import Users
from warren.storage.running_node import NODE_FILE, running_node
from warren.testing import running_broker

SQL = ("spark", "sql", "select 1")


def refused(*arguments: object) -> str:
    """The one line of a command that failed."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 1, done.output
    assert re.fullmatch(r"warren: [^\n]*\n", done.stderr), done.stderr
    return done.stderr


def started(data_dir: Path | str, **keys: object) -> None:
    settings = {"data_dir": data_dir, "amqp_port": 0, "http_port": 0, "inline": True, "durability": "os", **keys}
    broker = Broker(Config.load(settings, environ={}))
    asyncio.run(broker.start())


def test_a_port_that_is_taken_is_named_with_its_key(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"for AMQP on 127.0.0.1:{port}: Address already in use.*amqp_port"):
            started(tmp_path / "data", amqp_port=port)


def test_a_data_directory_that_cannot_be_is_named(tmp_path):
    (tmp_path / "afile").write_text("")
    with pytest.raises(StorePathError, match=r"data_dir .*/afile cannot be the data directory: it is a file; give"):
        started(tmp_path / "afile")
    with pytest.raises(StorePathError, match="data_dir /proc/x cannot be the data directory: No such file"):
        started("/proc/x")
    with pytest.raises(StorePathError, match=r"/proc/x cannot be made: No such file or directory\. Give a directory"):
        warren.open("/proc/x")
    assert "afile is a file; give a data directory" in refused("store", "info", tmp_path / "afile")


def test_a_broker_that_is_not_there_is_named_without_the_password():
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    said = refused("bench", "--url", f"amqp://guest:hunter2@127.0.0.1:{port}/")
    assert f"no broker answers at 127.0.0.1:{port}: Connection refused; start one with `warren serve`" in said
    assert "hunter2" not in said


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    with warren.open(tmp_path / "data") as store:
        store.queue("orders")
    target = tmp_path / "nodir" / "report.html"
    assert f"there is no directory {target.parent}" in refused("spark", "report", tmp_path / "data", "--to", target)
    assert "it is a directory" in refused("spark", "report", tmp_path / "data", "--to", tmp_path)
    for command in (("verify",), ("sql", "select 1")):
        said = refused("spark", *command, tmp_path / "data", "--json", tmp_path / "nodir" / "result.json")
        assert "there is no directory" in said


def test_what_is_no_queue_type_is_refused_with_a_text_that_fits_the_frame():
    with running_broker() as running:
        connection = pika.BlockingConnection(pika.URLParameters(running.url))
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refusal:
            connection.channel().queue_declare("s", durable=True, arguments={"x-queue-type": "stream"})
        connection.close()
    assert refusal.value.reply_text.endswith("Spark reads it without consuming")


INTERRUPTED = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "warren.cli.main":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from warren.cli.entry import main
main()
"""


def test_a_ctrl_c_while_the_command_is_still_loading_is_quiet():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_vhost_is_deleted_at_a_terminal_only_after_a_yes(monkeypatch, tmp_path):
    monkeypatch.setattr("warren.cli.vhosts.at_terminal", lambda: True)
    command = ["vhosts", "delete", "orders", "--data-dir", str(tmp_path)]
    done = CliRunner().invoke(app, command, input="n\n")
    assert (done.exit_code, "Delete vhost 'orders' with all its queues and messages?" in done.output) == (1, True)
    assert "no node" not in done.output
    for asked in (CliRunner().invoke(app, command, input="y\n"), CliRunner().invoke(app, [*command, "--yes"])):
        assert f"{tmp_path}" in asked.output  # it went on to ask the node, and there is none


# ---- a directory that a broker has ----


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served") / "data") as running:
        yield running


@pytest.mark.parametrize(
    "command",
    [("store", "info"), ("store", "verify"), SQL, ("spark", "report")],
    ids=" ".join,
)
def test_a_directory_in_use_names_the_broker_and_how_to_ask_it(broker, command, monkeypatch):
    for name in ("WARREN_USER", "WARREN_PASSWORD", "WARREN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    said = refused(*command, broker.data_dir)
    assert f"the broker of process {broker.process.pid} (status page {broker.http_url})" in said
    assert f"--url {broker.http_url} --user NAME" in said
    assert "top" in said
    assert "Store." not in said


def test_a_second_node_is_told_which_one_is_there(broker):
    with pytest.raises(
        StoreLockedError, match=rf"process {broker.process.pid} \(status page {broker.http_url}\); stop"
    ):
        Users(broker.data_dir, lock_seconds=0)


def test_the_file_of_a_node_that_was_killed_names_nobody(tmp_path):
    path = tmp_path / NODE_FILE
    gone = subprocess.Popen(["true"])
    gone.wait()
    for content in (f'{{"http": "http://127.0.0.1:1", "pid": {gone.pid}}}', "[]", "", '{"pid": "x"}'):
        path.write_text(content)
        assert running_node(str(tmp_path)) is None
    path.write_text(f'{{"http": "http://127.0.0.1:1", "pid": {os.getpid()}}}')
    assert running_node(str(tmp_path)) == (os.getpid(), "http://127.0.0.1:1")
