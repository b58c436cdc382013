"""The programs of examples/, and the demonstration, run as a user would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, command)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("example", "last_line"),
    [
        ("work_queue.py", "100 jobs done, 10 of them at the second attempt, 0 left"),
        ("outbox.py", "3 parcels, 3 invoices, 1 rejected, 0 orders left"),
        ("asyncio_worker.py", "30 messages by 3 workers, sum of squares 8555"),
    ],
)
def test_an_example_runs_and_says_what_it_did(tmp_path, example, last_line):
    assert run(EXAMPLES / example, tmp_path / "data").splitlines()[-1] == last_line


def test_every_example_is_tested():
    own = sorted(path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("broker_"))
    # The others: test_broker_examples.py, test_pipeline_examples.py.
    assert own == ["asyncio_worker.py", "demo.py", "outbox.py", "work_queue.py"]


def test_the_demonstration_runs_without_a_terminal_and_loses_nothing():
    shown = run("-m", "warren.demo", "--seconds", 1)
    for container in ("q1", "q2", "delta", "q3", "q4"):
        assert container in shown
    assert re.findall(r"lost (\d+)", shown) == ["0", "0", "0"]
    assert "publish_many" in shown
    assert "\x1b" not in shown
