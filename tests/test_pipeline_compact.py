"""The plan of `compact` is what the engine's own collection then does."""

# ruff: noqa: F811  (the fixture is imported)

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import pytest

import warren
from tests.spark_session import spark  # noqa: F401
from tests.test_cli import SMALL
from tests.test_segment_trailers import CountingDisk
from warren.pipeline.jobs.compact import CompactionPlan, FileGarbage, _scans, compaction_plan, plan_merges
from warren.storage.recovery import scan_segment
from warren.storage.settings import EngineSettings
from warren.storage.verify import plan_verification, vhost_roots
from warren.storage.vhost_store import VhostStore

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")

NO_COLLECTION = dataclasses.replace(SMALL, garbage_fraction=0.999)  # while it is filled
SETTINGS = dataclasses.replace(SMALL, garbage_fraction=0.3)


def fill(data: Path, chance: random.Random, *, clean: bool) -> str:
    """A message store with garbage in every file; the vhost's directory."""
    store = warren.open(data, settings=NO_COLLECTION)
    queues = [store.queue("one"), store.queue("two")]
    for _ in range(60):
        chance.choice(queues).publish(bytes(chance.randrange(4096, 6000)))
    store.queue("one").publish_many([b"small"] * 10)
    store.sync()
    store.engine.checkpoint(seal=True, carry_below=0)
    for queue in queues:
        messages = queue.get_many(100)
        chance.shuffle(messages)
        queue.ack_many(messages[: len(messages) * 2 // 3])
    store.sync()
    if clean:
        store.close()
    else:
        store.engine.abandon()
    [root] = vhost_roots(str(data))
    return root


def sizes(root: str) -> dict[str, int]:
    directory = os.path.join(root, "msg_store_persistent")
    return {
        name: os.path.getsize(os.path.join(directory, name)) for name in os.listdir(directory) if name.endswith(".rdq")
    }


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "dirty"])
def test_the_plan_is_what_the_collection_of_the_engine_does(spark, tmp_path, seed, clean):
    root = fill(tmp_path / "data", random.Random(seed), clean=clean)
    before = sizes(root)
    plan = compaction_plan(spark, root, SETTINGS)
    assert sizes(root) == before
    assert {file.file: file.size for file in plan.files} == before
    assert plan.merges
    store = VhostStore(str(tmp_path / "data"), settings=SETTINGS, background=False)
    try:
        alive = {os.path.basename(file.path): (file.valid, file.records) for file in store.store.data_files()}
        assert {each.file: (each.live_bytes, each.records) for each in plan.files if each.live_bytes} == alive
        rounds = 0
        while store.compact():
            rounds += 1
        store.store.sweep()
        assert rounds == len(plan.merges)
        names = {name for name in sizes(root) if name in before}
        assert names == set(before) - set(plan.dead) - {
            name for merge in plan.merges for side in (merge.left, merge.right) for name in side.split(" + ")
        }
        after = sum(size for name, size in sizes(root).items())
        assert sum(before.values()) - after == plan.freed_bytes
    finally:
        store.close()


def test_slots_for_which_a_trailer_speaks_are_not_read(tmp_path):
    store = warren.open(tmp_path / "data", settings=SMALL)
    store.queue("q").publish_many([b"small"] * (2 * SMALL.segment_entries))
    store.sync()
    store.engine.checkpoint(seal=True, carry_below=0)
    store.engine.abandon()
    [root] = vhost_roots(str(tmp_path / "data"))
    scans = _scans(plan_verification(root))
    disk = CountingDisk()
    assert [scan_segment(disk, scan).refs for scan in scans] == [[], []]
    assert disk.read_whole == []


def test_a_store_without_stored_bodies_has_nothing_to_merge(spark, tmp_path):
    with warren.open(tmp_path / "data") as store:
        store.queue("q").publish(b"small")
    [root] = vhost_roots(str(tmp_path / "data"))
    plan = compaction_plan(spark, root)
    assert (plan.files, plan.merges, plan.freed_bytes) == ([], [], 0)
    assert "0 files" in (plan.why_not or "")


def file(number: int, size: int, live: int, records: int = 10) -> FileGarbage:
    return FileGarbage(f"{number}.0.rdq", number, 0, size + 64, records, records // 2, live)


def planned(*files: FileGarbage, limit: int = 1000) -> CompactionPlan:
    plan = CompactionPlan("/", "/nowhere", list(files))
    plan_merges(plan, EngineSettings(store_file_bytes=limit))
    return plan


def test_two_files_are_not_enough():
    plan = planned(file(0, 900, 10), file(1, 900, 10))
    assert plan.merges == []
    assert "2 files" in (plan.why_not or "")


def test_little_garbage_is_left_alone():
    plan = planned(*(file(number, 900, 800) for number in range(5)))
    assert plan.merges == []
    assert "11% of the records are garbage" in (plan.why_not or "")


def test_files_that_do_not_fit_into_one_are_left_alone():
    plan = planned(file(0, 9000, 600), file(1, 9000, 600), file(2, 9000, 600))
    assert plan.merges == []
    assert "no two neighbours" in (plan.why_not or "")


def test_the_pair_that_frees_most_comes_first_and_a_merged_file_is_merged_again():
    plan = planned(file(0, 900, 300), file(1, 900, 100), file(2, 900, 50), file(3, 900, 300))
    assert (plan.merges[0].left, plan.merges[0].right) == ("1.0.rdq", "2.0.rdq")
    assert plan.merges[0].copied_bytes == 150
    assert plan.merges[0].freed_bytes == 2 * 964 - 214
    assert plan.merges[1].right == "1.0.rdq + 2.0.rdq"


def test_files_that_nobody_refers_to_are_dead_and_freed_whole():
    plan = planned(file(0, 900, 0), file(1, 900, 800))
    assert plan.dead == ["0.0.rdq"]
    assert plan.freed_bytes == 964
