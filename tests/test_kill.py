"""kill -9, at any moment: a process that publishes and consumes dies, and what it was promised is there.

`kill_worker.py` is the process. The same directory goes through all rounds, so every start is from what the kill before it
left; half of the rounds begin with a clean stop in between.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_workload import found_in
from tests.kill_worker import label_in, open_store

ROOT = Path(__file__).parent.parent
Place = tuple[str, int]  # queue, seq_id


class Promises:
    """What must be there, what may be, and what must not."""

    def __init__(self) -> None:
        self.labels: dict[Place, str] = {}
        self.must: set[Place] = set()
        self.may: set[Place] = set()
        self.gone: set[Place] = set()
        self.transactions: list[tuple[list[str], list[Place]]] = []
        self.confirmed = 0
        self.acked = 0

    def hear(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        words = rest.split()
        if kind == "!":
            raise AssertionError(rest)
        if kind == "T":
            acks = [(queue, int(seq)) for queue, _, seq in (word.rpartition(":") for word in words[2:])]
            self.transactions.append((words[:2], acks))
            for place in acks:
                self.acking.add(place)
                self.must.discard(place)
                self.may.add(place)
            return
        if kind not in "PCaA":
            return
        place = (words[0], int(words[1]))
        if kind == "P":
            assert self.labels.get(place, words[2]) == words[2], f"{place} was handed out twice"
            self.labels[place] = words[2]
            if place not in self.gone:
                self.may.add(place)
        elif kind == "C":
            self.confirmed += 1
            if place in self.may and place in self.labels and place not in self.acking:
                self.may.discard(place)
                self.must.add(place)
        elif kind == "a":
            self.labels.setdefault(place, words[2])
            self.acking.add(place)
            self.must.discard(place)
            if place not in self.gone:
                self.may.add(place)
        elif kind == "A":
            self.acked += 1
            self.acking.add(place)
            for places in (self.must, self.may):
                places.discard(place)
            self.gone.add(place)

    def begin_round(self) -> None:
        self.acking: set[Place] = set()
        self.transactions = []

    def compare(self, found: dict[Place, bytes], by_label: dict[str, Place]) -> None:
        for place, body in found.items():
            label = label_in(body)
            assert label is not None, f"{place} has a wrong content: {body!r:.80}"
            assert place not in self.gone, f"{place} ({label}) was acked, the ack was synced, and it is back"
            known = self.labels.get(place)
            assert known in (None, label), f"{place} is {label}, but was published as {known}"
        lost = sorted(self.must - set(found))
        assert not lost, f"confirmed and lost: {[(place, self.labels.get(place)) for place in lost]}"
        touched = {self.labels.get(place) for place in self.acking}
        for labels, acks in self.transactions:
            if touched.isdisjoint(labels):  # else somebody has consumed a part of it since
                parts = [label in by_label for label in labels]
                assert all(parts) or not any(parts), f"transaction {labels} is there in part"
                assert not any(parts) or not any(place in found for place in acks), (
                    f"{labels} are there, {acks} not gone"
                )
        # Whatever was found is on disk now, as far as a killed process is concerned.
        self.must = set(found)
        self.may = set()


def start(directory: Path, durability: str, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.kill_worker", str(directory), durability, str(seed)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def kill_after(worker: subprocess.Popen[bytes], seconds: float, *, opened: bool) -> Iterator[str]:
    """What the worker said until it was killed, some time after it was told to go, or after its store was `opened`."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stderr is not None
    killer = threading.Timer(seconds, worker.send_signal, [signal.SIGKILL])
    worker.stdin.write(b"go\n")
    worker.stdin.flush()
    if not opened:
        killer.start()
    try:
        for line in worker.stdout:
            assert line.endswith(b"\n"), f"half a line: {line!r}"
            text = line.decode().rstrip("\n")
            if opened and text == "O":
                killer.start()
            yield text
    finally:
        worker.kill()
        worker.wait()
        killer.cancel()
        complaint = worker.stderr.read().decode()
        for pipe in (worker.stdin, worker.stdout, worker.stderr):
            pipe.close()
    assert worker.returncode == -signal.SIGKILL, f"the worker ended by itself, {worker.returncode}: {complaint}"


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("durability", "rounds"), [("fsync", 200), ("os", 100)])
def test_kill_9_at_any_moment_loses_nothing_that_was_confirmed(
    tmp_path, scale, seed, record_property, durability, rounds
):
    chance = random.Random(seed)
    promises = Promises()
    directory = tmp_path / "data"
    before_open = clean = 0
    worker = start(directory, durability, 0)
    for number in range(scale.scale(rounds)):
        promises.begin_round()
        opened = False
        for line in kill_after(worker, chance.random() * 0.3, opened=chance.random() < 0.75):
            opened = opened or line == "O"
            promises.hear(line)
        before_open += not opened
        worker = start(directory, durability, number + 1)  # while this process looks; it waits for its line
        store = open_store(str(directory), durability)
        try:
            found: dict[Place, bytes] = {}
            by_label: dict[str, Place] = {}
            for queue in store.queues.values():
                with store.lock:
                    ready, pending = found_in(queue)
                assert not pending
                assert len(queue.backing) == len(ready)
                for entry in ready:
                    place = (queue.name, entry.seq)
                    assert place not in found, f"{place} is there twice"
                    found[place] = entry.body
                    by_label[label_in(entry.body) or ""] = place
            try:
                promises.compare(found, by_label)
            except AssertionError as error:
                raise AssertionError(f"round {number}, seed {seed}, {durability}: {error}") from error
            assert store.quarantine.reports == [] or all(
                "end of the journal" in str(report["why"]) for report in store.quarantine.reports
            ), store.quarantine.reports
        finally:
            if chance.random() < 0.5:
                clean += 1
                store.close()
            else:
                store.abandon()
    worker.kill()
    worker.communicate()
    record_property("kills", number + 1)
    record_property("killed before the store was open", before_open)
    record_property("clean stops between", clean)
    record_property("publishes confirmed", promises.confirmed)
    record_property("acks synced", promises.acked)
