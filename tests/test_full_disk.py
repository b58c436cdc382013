"""On a full disk publishing is refused, consuming goes on and makes room, and publishing goes on by itself.

Nothing has to be restarted for that, nothing that was confirmed is lost, and a machine that loses power while its disk is
full finds a store that opens on that same full disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_workload import SETTINGS, Driver, Witness, check, drain, open_store
from tests.faulty_disk import FaultyDisk
from tests.small_engine import make_entries, open_engine
from warren.errors import DiskFullError
from warren.storage.disk import Disk
from warren.storage.settings import EngineSettings
from warren.storage.vhost_store import VhostStore

CAPACITY = 192 * 1024
ROOMY = dataclasses.replace(SETTINGS, reserve_bytes=8192, ram_target=16)

LOADS = {
    "small bodies": lambda driver: driver.publish("a", [60] * 5),
    "bodies in the message store": lambda driver: driver.publish("a", [1500] * 2),
    "bodies with files of their own": lambda driver: driver.publish_file("a", 7000),
    "all sizes, two queues": lambda driver: (driver.publish("a", [40, 300, 2000]), driver.publish("b", [50] * 4)),
    "transient ones between": lambda driver: (
        driver.publish("a", [40, 300] * 3, persistent=False),
        driver.publish("a", [40, 300]),
    ),
    "fan-out": lambda driver: driver.fan_out(["a", "b"], 700),
    "transactions": lambda driver: driver.transact([("a", 50), ("b", 400)], {"a": 1}),
}


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Path]:
    place = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=place if os.access(place, os.W_OK) else tmp_path, prefix="warren-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def fill(driver: Driver, load: str) -> int:
    """Publish until it is refused; how often it was not."""
    times = 0
    while times < 5000:
        try:
            LOADS[load](driver)
            driver.sync()
        except DiskFullError:
            return times
        times += 1
        if times % 7 == 0:
            with contextlib.suppress(DiskFullError):
                driver.tick()
    raise AssertionError("the disk does not fill up")


def consume_until_it_goes_on(driver: Driver) -> int:
    """Fetch, ack, and let upkeep do its work, until publishing is allowed again; how many messages that took."""
    store = driver.open
    consumed = 0
    while store.committer.full:
        before = sum(len(queue.backing) for queue in store.queues.values())
        for name in ("a", "b"):
            with contextlib.suppress(DiskFullError):  # acks need journal space: a batch may have to wait for a tick
                driver.consume(name, 4)
                driver.sync()
        with contextlib.suppress(DiskFullError):
            driver.tick()
        consumed += before - sum(len(queue.backing) for queue in store.queues.values())
        if store.committer.full:
            assert before, "every message is consumed, and publishing is still refused"
    return consumed


@pytest.mark.parametrize("load", LOADS)
def test_publishing_stops_consuming_makes_room_and_publishing_goes_on(arena, scale, seed, record_property, load):
    chance = random.Random(seed)
    disk = FaultyDisk(arena / "disk")
    witness = Witness()
    driver = Driver(disk, f"{disk.root}/data", witness, settings=ROOMY)
    driver.start()
    for name in ("a", "b"):
        driver.declare(name)
    disk.capacity = CAPACITY
    crashes = 0
    for cycle in range(scale.scale(30)):
        published = fill(driver, load)
        assert published or cycle, "nothing could be published at all"
        for mode in ("none", "all", "random"):
            crash_on_the_full_disk(disk, arena / f"{cycle}-{mode}", witness, mode, chance)
            crashes += 1
        consume_until_it_goes_on(driver)
        crash_on_the_full_disk(disk, arena / f"{cycle}-after", witness, "random", chance)
        check(driver.open, witness, live=True)
        driver.publish("a", [30])
        driver.sync()
    record_property("times full", cycle + 1)
    record_property("crashes", crashes)
    driver.open.abandon()


def crash_on_the_full_disk(disk: FaultyDisk, root: Path, witness: Witness, mode, chance: random.Random) -> None:
    """What is left opens without more room, and can be consumed to the end."""
    after = disk.clone(root).crash(chance, mode)
    store = open_store(after, f"{root}/data", settings=ROOMY)
    try:
        check(store, witness)
        served = drain_on_a_full_disk(store)
        assert served >= {
            (known.uid, sent.seq) for known in witness.queues.values() for sent in known.sent.values() if sent.must
        }
        assert not store.committer.full, "everything is consumed, and publishing is still refused"
    finally:
        store.abandon()
        shutil.rmtree(root)


def drain_on_a_full_disk(store: VhostStore) -> set[tuple[int, int]]:
    served: set[tuple[int, int]] = set()
    for _ in range(10_000):
        left = False
        for queue in store.queues.values():
            with store.lock:
                entries = queue.backing.fetch(5)
                queue.backing.ack([entry.seq for entry in entries])
            served.update((queue.uid, entry.seq) for entry in entries)
            left = left or bool(entries)
        with contextlib.suppress(DiskFullError):
            store.sync()
        with contextlib.suppress(DiskFullError):
            store.tick()
        if not left and not store.committer.full:
            return served
    raise AssertionError("the store cannot be drained")


def test_a_backlog_that_nobody_consumes_does_not_eat_the_room_of_acks(arena, seed):
    """Upkeep on a full disk copies messages from the journal to segments; it must leave the reserve alone."""
    disk = FaultyDisk(arena / "disk")
    witness = Witness()
    driver = Driver(disk, f"{disk.root}/data", witness, settings=ROOMY)
    driver.start()
    for name in ("a", "b"):
        driver.declare(name)
    disk.capacity = CAPACITY
    fill(driver, "small bodies")
    for _ in range(50):
        with contextlib.suppress(DiskFullError):
            driver.tick()
    driver.consume("a", 40)
    driver.sync()  # acks still have room
    check(driver.open, witness, live=True)
    crash_on_the_full_disk(disk, arena / "after", witness, "none", random.Random(seed))
    driver.open.abandon()


def test_a_commit_larger_than_the_reserve_waits_for_room_and_is_not_lost(arena):
    disk = FaultyDisk(arena / "disk")
    witness = Witness()
    driver = Driver(disk, f"{disk.root}/data", witness, settings=ROOMY)
    driver.start()
    driver.declare("a")
    driver.publish("a", [30])
    driver.sync()
    disk.capacity = 16 * 1024 + disk._used
    driver.publish("a", [200] * 200)
    with pytest.raises(DiskFullError, match="nothing is lost"):
        driver.open.sync()
    disk.capacity = None
    driver.sync()
    clean = disk.clone(arena / "after").crash(mode="none")
    store = open_store(clean, f"{clean.root}/data", settings=ROOMY)
    check(store, witness)
    store.abandon()
    driver.open.abandon()


@pytest.mark.parametrize("queues", [("a", "b"), ("levels",)])
def test_a_checkout_that_meets_a_full_disk_on_its_way_keeps_what_it_has(arena, queues):
    """Transient messages have to be written before they can be leased. Persistent ones before them are leased already."""
    store = open_engine(str(arena), FaultyDisk(arena))
    stored = [store.declare(name, arguments={"x-max-priority": 1} if name == "levels" else {}) for name in queues]
    stored[0].backing.publish(make_entries(store, stored[0], [b"safe"] * 4, True, level=1 if len(stored) == 1 else 0))
    transient = make_entries(store, stored[-1], [b"fast"] * 4, False)
    stored[-1].backing.publish(transient)
    store.committer.sync()
    store.committer.full = True  # as a commit leaves it that found no room
    made = store.begin_checkout(stored, "lake", 100)
    assert made is not None
    assert [sum(pairs[1::2]) for pairs in made.ranges.values()] == [4]
    assert [checkout.ranges for checkout in store.checkouts("lake")] == [made.ranges]
    with pytest.raises(DiskFullError):
        store.begin_checkout(stored, "lake", 100)
    assert len(store.checkouts("lake")) == 1
    store.committer.full = False
    rest = store.begin_checkout(stored, "lake", 100)
    assert rest is not None
    assert [sum(pairs[1::2]) for pairs in rest.ranges.values()] == [4]
    assert store.settle("lake", rest.number) == 8
    assert [queue.backing.depth() for queue in stored] == [0] * len(stored)
    store.close()


def test_a_clean_stop_on_a_full_disk_loses_nothing(arena):
    disk = FaultyDisk(arena / "disk")
    witness = Witness()
    driver = Driver(disk, f"{disk.root}/data", witness, settings=ROOMY)
    driver.start()
    for name in ("a", "b"):
        driver.declare(name)
    disk.capacity = CAPACITY
    fill(driver, "all sizes, two queues")
    with contextlib.suppress(DiskFullError):
        driver.open.close()
    store = open_store(disk, driver.root, settings=ROOMY)
    check(store, witness)
    store.abandon()


# ---- a real one ----


def test_a_real_disk_of_8_mib_fills_up_and_empties(small_disk, scale, record_property):
    settings = EngineSettings(
        journal_file_bytes=512 * 1024, store_file_bytes=1024 * 1024, reserve_bytes=512 * 1024, segment_entries=512
    )
    root = str(small_disk / "data")
    store = VhostStore(root, settings=settings, background=False)
    witness = Witness()
    driver = Driver(Disk(), root, witness, settings=settings)
    driver.store = store
    for name in ("a", "b"):
        driver.declare(name)
    published = 0
    for _ in range(scale.scale(20)):
        with contextlib.suppress(DiskFullError):
            while published < 1 << 20:
                driver.publish("a", [1000] * 40 + [9000] * 4)
                driver.sync()
                published += 44
                if published % 440 == 0:
                    driver.tick()
        consume_until_it_goes_on(driver)
    record_property("messages published", published)
    store.abandon()
    store = VhostStore(root, settings=settings, background=False)
    check(store, witness)
    drain(store)
    store.close()
