"""Real `kill -9` of a process that publishes and consumes, against a ledger of what it was promised.

One directory lives through all rounds, and each round begins with the recovery of the last. In `fsync` and in `os`
durability a killed process loses nothing that `sync` had returned for.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import warren
from tests.kill_worker import SETTINGS

WORKER = Path(__file__).with_name("kill_worker.py")


def killed_run(path: str, durability: str, seed: int, seconds: float) -> tuple[dict[int, str], set[int], set[int]]:
    """Let a worker run for a while and kill it; what it had published, tried to ack, and acked safely."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(WORKER.parent.parent), *sys.path])}
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), path, durability, str(seed)], stdout=subprocess.PIPE, env=environment
    )
    assert worker.stdout is not None
    try:
        assert worker.stdout.readline() == b"ready\n"
        time.sleep(seconds)  # the moment of the kill is the experiment
    finally:
        os.kill(worker.pid, signal.SIGKILL)
    rest = worker.stdout.read()
    worker.wait()
    worker.stdout.close()
    published: dict[int, str] = {}
    tried: set[int] = set()
    acked: set[int] = set()
    for line in rest.decode().split("\n")[:-1]:
        kind, seq, *body = line.split(" ")
        if kind == "p":
            published[int(seq)] = body[0]
        else:
            (tried if kind == "t" else acked).add(int(seq))
    return published, tried, acked


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_killed_process_loses_nothing_that_was_confirmed(
    tmp_path: Path, scale: Any, seed: int, durability: str, record_property: Any
) -> None:
    rounds = scale.scale(100)
    rng = random.Random(seed)
    expected: dict[int, str] = {}
    handed_out_before: set[int] = set()
    confirmed = 0
    for number in range(rounds):
        published, tried, acked = killed_run(str(tmp_path), durability, seed + number, rng.uniform(0.02, 0.4))
        confirmed += len(published)
        assert not handed_out_before & published.keys(), "a seq_id was handed out twice"
        handed_out_before |= published.keys()
        expected.update(published)
        for seq in acked:
            expected.pop(seq, None)
        with warren.open(tmp_path, durability=durability, settings=SETTINGS) as store:
            found = {message.seq_id: message for message in store.queue("kill").browse()}
            assert store.info()["damage"] == []
            lost = expected.keys() - found.keys() - tried
            returned = acked & found.keys()
            assert not returned, f"acked and safe, and back: {sorted(returned)[:5]} in round {number}, seed {seed}"
            wrong = [seq for seq in expected.keys() & found.keys() if found[seq].body.decode() != expected[seq]]
            assert not wrong, f"other content: {wrong[:5]} in round {number}, seed {seed}"
            assert not lost, f"lost: {sorted(lost)[:5]} of {len(lost)} in round {number}, seed {seed}"
            assert all(message.redelivered for message in found.values())
            handed_out_before |= found.keys()
            expected = {seq: message.body.decode() for seq, message in found.items()}
    record_property("kills", rounds)
    record_property("confirmed", confirmed)
    record_property("seed", seed)
    assert confirmed > 0
