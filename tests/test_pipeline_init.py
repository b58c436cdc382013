"""`init` writes a project that compiles, names what it was told, and that Spark's own dry run accepts."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pika
import pytest

from tests.broker_process import served
from warren.pipeline.errors import PipelineError
from warren.pipeline.jobs.project import identifier, write_project

URL = "http://127.0.0.1:15672"


def test_the_files_are_there_and_the_python_compiles(tmp_path):
    project = write_project(str(tmp_path / "shop"), queue="orders", url=URL)
    assert project.files == [
        ".gitignore",
        "README.md",
        "conf/log4j2.properties",
        "conf/spark-defaults.conf",
        "pipeline",
        "spark-pipeline.yml",
        "transformations/orders.py",
    ]
    text = (tmp_path / "shop" / "transformations" / "orders.py").read_text()
    tree = ast.parse(text)
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == [
        "messages",
        "by_routing_key",
        "by_minute",
        "seen",
    ]
    for word in ('"orders"', '"amq.topic"', f'"{URL}"', '"shop-orders"'):
        assert word in text
    assert os.access(tmp_path / "shop" / "pipeline", os.X_OK)
    assert subprocess.run(["sh", "-n", "pipeline"], cwd=tmp_path / "shop", check=False).returncode == 0


def test_no_secret_is_in_the_files(tmp_path, monkeypatch):
    monkeypatch.setenv("WARREN_PASSWORD", "hunter2")
    monkeypatch.setenv("WARREN_TOKEN", "tokentoken")
    write_project(str(tmp_path / "shop"), queue="orders", url=URL)
    for path in (tmp_path / "shop").rglob("*"):
        if path.is_file():
            assert not {"hunter2", "tokentoken"} & set(path.read_text().split())


@pytest.mark.parametrize(
    "queue", ["dead-letters", "a.b", 'quo"te', "back\\slash", '"""', "ünïcode", "007", "it's {odd}"]
)
def test_an_odd_name_is_a_name_in_the_definitions_too(tmp_path, queue):
    project = write_project(str(tmp_path / "p"), queue=queue, url=URL, exchange="it's", vhost="/é")
    [file] = [file for file in project.files if file.startswith("transformations")]
    tree = ast.parse((tmp_path / "p" / file).read_text())
    values = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert (values["QUEUE"], values["EXCHANGE"]) == (queue, "it's")
    assert Path(file).stem.isidentifier()


@pytest.mark.parametrize(("name", "found"), [("Orders.EU", "orders_eu"), ("007", "q_007"), ("!!", "q"), ("a", "a")])
def test_a_table_is_called_after_its_queue(name, found):
    assert identifier(name) == found


def test_a_directory_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PipelineError, match="new or empty"):
        write_project(str(tmp_path), queue="orders", url=URL)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("queue", ["", "a\nb"])
def test_a_name_that_cannot_be_printed_is_refused(tmp_path, queue):
    with pytest.raises(PipelineError, match="the queue is"):
        write_project(str(tmp_path / "p"), queue=queue, url=URL)
    assert not (tmp_path / "p").exists()


def pipeline(project: Path, *arguments: str, **environment: str) -> str:
    """What `./pipeline` says, which ends well."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    done = subprocess.run(
        ["./pipeline", *arguments],
        cwd=project,
        env={**inherited, "PATH": path, "SPARK_LOCAL_IP": "127.0.0.1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Run is COMPLETED" in done.stderr + done.stdout
    return done.stderr + done.stdout


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="pyspark[pipelines] is not installed")
def test_the_dry_run_of_spark_accepts_it(tmp_path, scale):
    """It resolves every table, view and flow, with the source and the sink found by themselves; nothing is read."""
    if not scale.full:
        pytest.skip("two JVMs start for it: in a full run")
    write_project(str(tmp_path / "shop"), queue="orders", url="http://127.0.0.1:9")
    pipeline(tmp_path / "shop", "dry-run")


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("pika_litter")
@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="pyspark[pipelines] is not installed")
def test_the_project_runs_as_it_is_and_the_next_run_goes_on(tmp_path, scale):
    if not scale.full:
        pytest.skip("four JVMs start for it: in a full run")
    with served(tmp_path / "data") as broker:
        write_project(str(tmp_path / "shop"), queue="orders", url=broker.http_url)
        seen: list[int] = []
        for first, stop in ((0, 30), (30, 35)):
            with contextlib.closing(broker.connect()) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                channel.queue_declare("orders", durable=True)
                channel.queue_declare("words", durable=True)
                channel.queue_bind("words", "amq.topic", "seen.#")
                for number in range(first, stop):
                    channel.basic_publish("", "orders", b"%d" % number, pika.BasicProperties(delivery_mode=2))
            pipeline(tmp_path / "shop", "run", WARREN_USER="guest", WARREN_PASSWORD="guest")
            assert broker.queue_info("orders")["messages"] == 0
            with contextlib.closing(broker.connect()) as connection:
                channel = connection.channel()
                while (got := channel.basic_get("words", auto_ack=True))[0] is not None:
                    seen.append(json.loads(got[2])["seq_id"])
            assert sorted(seen) == list(range(stop)), "a word about each message, once"
