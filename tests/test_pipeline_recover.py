"""`recover` on Spark makes of a crashed store what the engine's own dirty start makes of it, and the next start is clean."""

# ruff: noqa: F811  (the fixture is imported)

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import warren
from tests.spark_session import spark  # noqa: F401
from tests.test_cli import SMALL, fill
from warren.errors import StoreLockedError, StorePathError, WarrenError
from warren.kernel.entry import PERSISTENT, Entry
from warren.pipeline.jobs import recover as job
from warren.pipeline.jobs.recover import recover_on_spark
from warren.storage.recovery import SegmentScan
from warren.storage.verify import vhost_roots
from warren.storage.vhost_store import VhostStore

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")


def look(store: VhostStore) -> dict[str, Any]:
    """All that a user can see of a store, and the seq_ids that it would hand out next."""
    seen: dict[str, Any] = {}
    for name, queue in sorted(store.queues.items()):
        messages: list[tuple[object, ...]] = []

        def visit(
            entry: Entry, unacked: bool, found: list[tuple[object, ...]]
        ) -> tuple[bool, list[tuple[object, ...]]]:
            found.append(
                (entry.seq, entry.level, unacked, entry.flags & PERSISTENT, entry.expiry, entry.head, entry.body)
            )
            return True, found

        with store.lock:
            backing = queue.backing
            backing.fold(visit, messages)
            seen[name] = {
                "messages": messages,
                "counts": dict(backing.counts),
                "redelivered_below": backing.redelivered_below,
                "returned": sorted(backing.returned),
                "ready": len(backing),
                "depth": backing.depth(),
                "next": queue.seqs.next,
            }
    return seen


def root_of(data: Path) -> Path:
    [root] = vhost_roots(str(data))
    return Path(root)


def quarantine(data: Path) -> list[dict[str, object]]:
    log = root_of(data) / "quarantine" / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def without_copy(line: dict[str, object]) -> dict[str, object]:
    """Where the bytes were copied to depends on what was copied before."""
    return {key: value for key, value in line.items() if key != "copy"}


def compare(spark, data: Path) -> job.Recovery:
    """On copies of one store: the engine's dirty start, and `recover` with the clean start that follows."""
    alone, together = data.with_name("alone"), data.with_name("together")
    for copy in (alone, together):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(data, copy)
    store = VhostStore(str(alone), settings=SMALL, background=False)
    assert not store.clean_start
    depths = {name: queue.backing.depth() for name, queue in store.queues.items()}
    lines, reports = quarantine(alone), list(store.quarantine.reports)
    expected = look(store)
    bad_bodies = store.quarantine.reports[len(reports) :]  # which are found when they are read
    store.abandon()
    recovery = recover_on_spark(spark, str(together))
    assert not recovery.was_clean
    assert recovery.damage == reports
    assert recovery.queues == depths
    assert quarantine(together) == lines
    store = VhostStore(str(together), settings=SMALL, background=False)
    try:
        assert store.clean_start
        assert store.quarantine.reports == []
        assert look(store) == expected
        assert [without_copy(line) for line in store.quarantine.reports] == [without_copy(line) for line in bad_bodies]
    finally:
        store.abandon()
    return recovery


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("crashed") / "data"
    fill(path, clean=False)
    return path


@pytest.fixture
def data(crashed: Path, tmp_path: Path) -> Path:
    shutil.copytree(crashed, tmp_path / "data")
    return tmp_path / "data"


def test_a_crashed_store_becomes_what_a_dirty_start_makes_of_it(spark, data):
    recovery = compare(spark, data)
    assert recovery.segments > 3
    assert recovery.messages > 250
    assert recovery.damage == []


def test_a_damaged_store_becomes_what_a_dirty_start_makes_of_it(spark, data, seed, scale, record_property):
    chance = random.Random(seed)
    root = root_of(data)
    patterns = ("*.qi", "*.qa", "*.wal", "*.rdh", "*.rdq")
    kinds = [[path for path in sorted(root.rglob(pattern)) if "transient" not in str(path)] for pattern in patterns]
    sound = {path: path.read_bytes() for paths in kinds for path in paths}
    rounds, damaged = scale.scale(150), 0
    for _ in range(rounds):
        for path in [chance.choice(paths) for paths in kinds if paths]:
            content = bytearray(sound[path])
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
        damaged += len(compare(spark, data).damage)
        for path, content in sound.items():
            path.write_bytes(content)
    assert damaged
    record_property("rounds", rounds)


def test_stores_that_crashed_anywhere_become_what_a_dirty_start_makes_of_them(
    spark, tmp_path, seed, scale, record_property
):
    chance = random.Random(seed)
    rounds = scale.scale(100)
    settings = dataclasses.replace(SMALL, segment_entries=16, journal_file_bytes=2048)
    for number in range(rounds):
        data = tmp_path / str(number) / "data"
        store = warren.open(data, settings=settings)
        queues = [store.queue("plain"), store.queue("ranked", arguments={"x-max-priority": 3})]
        for _ in range(30):
            queue = chance.choice(queues)
            step = chance.random()
            if step < 0.5:
                bodies = [bytes(chance.choice((10, 5000))) for _ in range(chance.randrange(1, 20))]
                queue.publish_many(bodies, persistent=chance.random() < 0.9)
            elif step < 0.7:
                queue.ack_many(queue.get_many(chance.randrange(1, 25)))
            elif step < 0.8:
                queue.nack_many(queue.get_many(chance.randrange(1, 10)))
            elif step < 0.9:
                store.engine.checkpoint(seal=True, carry_below=chance.choice((0, None)))
            else:
                store.sync()
        store.sync()
        store.engine.abandon()
        compare(spark, data)
    record_property("rounds", rounds)


def test_a_store_that_was_stopped_cleanly_is_left_as_it_is_unless_forced(spark, tmp_path):
    data = tmp_path / "data"
    fill(data)
    terms = (root_of(data) / "recovery").read_bytes()
    recovery = recover_on_spark(spark, str(data))
    assert recovery.was_clean
    assert (root_of(data) / "recovery").read_bytes() == terms
    recovery = recover_on_spark(spark, str(data), force=True)
    assert not recovery.was_clean
    assert recovery.segments > 3
    store = VhostStore(str(data), settings=SMALL, background=False)
    assert store.clean_start
    store.abandon()


def test_terms_that_are_damaged_do_not_count_as_a_clean_stop(spark, tmp_path):
    data = tmp_path / "data"
    fill(data)
    path = root_of(data) / "recovery"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    recovery = recover_on_spark(spark, str(data))
    assert not recovery.was_clean
    assert [line["file"] for line in recovery.damage] == ["recovery"]


def test_a_directory_that_is_in_use_is_refused(spark, data):
    with warren.open(data, settings=SMALL), pytest.raises(StoreLockedError, match="in use by process"):
        recover_on_spark(spark, str(data))


def test_a_vhost_that_is_not_there_is_refused_and_not_made(spark, data):
    with pytest.raises(StorePathError, match="no vhost 'other'"):
        recover_on_spark(spark, str(data), "other")
    assert len(vhost_roots(str(data))) == 1


def test_a_segment_that_executors_cannot_read_ends_the_job_and_the_next_start_is_as_before(spark, data, monkeypatch):
    scan = job._scan_group

    def elsewhere(work: bytes) -> bytes:
        import pickle

        scans: list[SegmentScan] = pickle.loads(work)
        return scan(pickle.dumps([dataclasses.replace(each, directory="/nowhere") for each in scans]))

    monkeypatch.setattr(job, "_scan_group", elsewhere)
    with pytest.raises(WarrenError, match="Every executor has to see that directory"):
        recover_on_spark(spark, str(data))
    monkeypatch.undo()
    compare(spark, data)
