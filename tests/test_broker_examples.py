"""The programs examples/broker_*.py, run as a user would run them: against a broker that `warren serve` started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker_clients import eventually
from warren.testing import running_broker

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SECONDS = 60

# By program: the lines that it prints.
PRINTED = {
    "broker_pika.py": ["20 orders worth 1900"],
    "broker_aio_pika.py": ["created: user.created, order.created; orders: order.created, order.paid, order.paid"],
    "broker_rpc.py": ["0, 1, 1, 2, 3, 5, 8, 13, 21, 34"],
    "broker_retry.py": [
        "attempt 1: easy done",
        "attempt 1: difficult failed",
        "attempt 1: broken failed",
        "attempt 2: difficult failed",
        "attempt 2: broken failed",
        "attempt 3: difficult done",
        "attempt 3: broken failed",
        "attempt 4: broken failed, and that was the last",
        "2 done, 1 given up",
    ],
    "broker_delayed.py": [
        "get up: at once",
        "call back: after 200 ms",
        "water the plants: after 600 ms",
        "pay the invoice: after 1000 ms",
    ],
    "broker_celery.py": ["476 to pay, book is on its way"],
}


@pytest.fixture(scope="module", params=[(), ("--inline",)], ids=["vhosts as processes", "inline"])
def served(request, tmp_path_factory):
    """The URL of a broker in a process of its own, or in several."""
    log = tmp_path_factory.mktemp("served") / "log"
    command = [sys.executable, "-m", "warren.cli.main", "serve", "--amqp-port", "0", "--http-port", "0", *request.param]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WARREN_")}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, "--data-dir", str(log.parent / "data")], stdout=output, stderr=output, env=environment
        ) as process,
    ):
        try:
            found = eventually(lambda: re.search(r"AMQP on [\w.]+:(\d+)", log.read_text()) or process.poll(), SECONDS)
            assert process.poll() is None, log.read_text()
            yield f"amqp://guest:guest@127.0.0.1:{found[1]}/"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)
    assert process.returncode == 0, log.read_text()


def run(example: str, url: str, warnings: str = "error") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", warnings, str(EXAMPLES / example)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
        env=os.environ | {"AMQP_URL": url},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("example", [name for name in PRINTED if name != "broker_celery.py"])
def test_an_example_runs_and_says_what_it_did(served, example):
    assert run(example, served) == PRINTED[example]
    assert run(example, served) == PRINTED[example]  # and leaves nothing behind that would stop it


def test_the_celery_example_runs_with_a_worker(served, tmp_path):
    log = tmp_path / "worker.log"
    command = ["-m", "celery", "--workdir", str(EXAMPLES), "-A", "broker_celery", "worker", "-c", "1", "-l", "INFO"]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, *command], stdout=output, stderr=output, env=os.environ | {"AMQP_URL": served}, cwd=ROOT
        ) as worker,
    ):
        try:
            eventually(lambda: " ready." in log.read_text() or worker.poll() is not None, SECONDS)
            # Celery leaves its pools of connections to the end of the process, and Python would warn of that.
            assert run("broker_celery.py", served, "ignore") == PRINTED["broker_celery.py"], log.read_text()
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(SECONDS)


def test_every_example_of_the_broker_is_tested():
    assert sorted(path.name for path in EXAMPLES.glob("broker_*.py")) == sorted(PRINTED)


def test_the_examples_find_a_broker_of_the_test_kit_too():
    with running_broker() as broker:
        assert run("broker_pika.py", broker.url) == PRINTED["broker_pika.py"]
