"""A queue that meets damage goes on: the message that was hit is skipped, every other one comes, and the counts stay true."""

from __future__ import annotations

import random

import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import HEAD, fetch, open_engine, publish
from warren.kernel.entry import Entry
from warren.storage.variable_queue import VariableQueue
from warren.storage.vhost_store import StoredQueue, VhostStore

SIZES = (10, 300)  # in the journal or .qs; in the message store
SUFFIXES = (".wal", ".qi", ".qs", ".rdq")


def filled(disk: FaultyDisk, rng: random.Random) -> tuple[VhostStore, StoredQueue, dict[int, bytes], set[int]]:
    """A queue whose messages are everywhere: in the journal, in segments, in the stores, handed out and not. Their
    bodies by seq_id, and which of them are persistent."""
    store = open_engine(disk.root, disk)
    queue = store.declare("q")
    bodies: dict[int, bytes] = {}
    persistent: set[int] = set()
    for _ in range(6):
        some = [b"%d-" % rng.randrange(1000) * (rng.choice(SIZES) // 4) for _ in range(rng.randint(3, 8))]
        is_persistent = rng.random() < 0.7
        seqs = publish(store, queue, some, persistent=is_persistent)
        bodies.update(zip(seqs, some, strict=True))
        persistent.update(seqs if is_persistent else ())
        if rng.random() < 0.3:
            store.checkpoint(seal=True, carry_below=0)
    store.sync()
    assert isinstance(queue.backing, VariableQueue)
    queue.backing.set_ram_target(0)
    if rng.random() < 0.5:
        taken = fetch(queue, rng.randint(1, 12))
        queue.backing.requeue(rng.sample(taken, len(taken) // 2))
    return store, queue, bodies, persistent


def damage(store: VhostStore, disk: FaultyDisk, rng: random.Random, suffix: str) -> int:
    """Flip bits in files of a kind; how many."""
    if not store.closed:
        store.transient_store.flush()
        for some in (store.store, store.transient_store):
            some._cache.clear()  # else nothing is read from the disk
            some._cache_bytes = 0
    paths = [path for path in disk.files() if path.endswith(suffix) and disk.size(path) > 64]
    flips = 0
    for path in paths:
        for _ in range(rng.randint(0, 3)):
            disk.flip_bit(path, rng.randrange(64 * 8, disk.size(path) * 8))
            flips += 1
    return flips


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_running_queue_skips_what_is_damaged(tmp_path, suffix: str, scale, seed) -> None:
    met = 0
    for number in range(scale.scale(500)):
        rng = random.Random(f"{seed} {suffix} {number}")
        disk = FaultyDisk(tmp_path / str(number))
        store, queue, bodies, _ = filled(disk, rng)
        backing = queue.backing
        pending = {seq for first, count in _pairs(backing.pending_pairs()) for seq in range(first, first + count)}
        damage(store, disk, rng, suffix)
        steps = rng.choice([1, 3, 100])
        if rng.random() < 0.3:
            backing.fold(lambda entry, unacked, n: (True, n), 0)
        if rng.random() < 0.3:
            backing.requeue(sorted(pending)[: rng.randint(0, len(pending))])
        seen: list[int] = []
        while not backing.is_empty():
            before = len(backing)
            entries = backing.fetch(steps)
            assert all((entry.body, entry.head) == (bodies[entry.seq], HEAD) for entry in entries), f"run {number}"
            assert len(backing) <= before - len(entries)
            seen += [entry.seq for entry in entries]
        met += len(bodies) - len(seen) - len(pending - set(seen))
        assert seen == sorted(set(seen)), f"run {number}: in order, and nothing twice"
        assert backing.ready_bytes() == 0, f"run {number}"
        backing.ack(seen)
        backing.purge_acks()
        store.sync()
        assert backing.depth() == 0
        store.checkpoint(seal=True, carry_below=0)
        store.abandon()
    assert met, "no damage was met: this test tests nothing"


def _pairs(flat: list[int]) -> list[tuple[int, int]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_queue_that_starts_on_damage_has_the_rest(tmp_path, suffix: str, scale, seed) -> None:
    for number in range(scale.scale(300)):
        rng = random.Random(f"{seed} start {suffix} {number}")
        disk = FaultyDisk(tmp_path / str(number))
        store, _, bodies, persistent = filled(disk, rng)
        if rng.random() < 0.5:
            store.close()
        else:
            store.sync()
            store.abandon()
        flips = damage(store, disk, rng, suffix)
        store = open_engine(disk.root, disk)
        backing = store.get("q").backing
        seen = backing.fetch(1000)
        while not backing.is_empty():
            seen += backing.fetch(1000)
        assert all(entry.body == bodies[entry.seq] for entry in seen), f"run {number}"
        assert backing.ready_bytes() == 0, f"run {number}"
        assert {entry.seq for entry in seen} <= persistent
        assert len(seen) >= len(persistent) - flips, f"run {number}: a bit costs one message"
        store.abandon()


def test_damage_that_empties_q3_leaves_the_alphas_of_q1_in_their_place(tmp_path) -> None:
    """q4 and q1 were once swapped a second time, and the queue looked empty."""
    disk = FaultyDisk(tmp_path)
    store = open_engine(disk.root, disk, ram_slack=100)
    queue = store.declare("q")
    publish(store, queue, 3, persistent=False)
    backing = queue.backing
    assert isinstance(backing, VariableQueue)
    backing.set_ram_target(0)
    publish(store, queue, 2, persistent=False)
    assert [entry.seq for entry in backing.q1] == [3, 4]
    (path,) = [path for path in disk.files() if path.endswith(".qs")]
    for seq in range(3):
        disk.flip_bit(path, 8 * (64 + seq * (16 + 4 + 4 + 2) + 20))
    assert fetch(queue, 1) == [3]
    assert fetch(queue, 1) == [4]
    store.abandon()


def test_a_message_that_browsing_found_damaged_is_not_handed_out_without_its_body(tmp_path) -> None:
    disk = FaultyDisk(tmp_path)
    store = open_engine(disk.root, disk)
    queue = store.declare("q")
    publish(store, queue, 4, persistent=False)
    backing = queue.backing
    assert isinstance(backing, VariableQueue)
    backing.set_ram_target(0)
    (path,) = [path for path in disk.files() if path.endswith(".qs")]
    disk.flip_bit(path, 8 * (64 + 1 * (16 + 4 + 4 + 2) + 20))

    def visit(entry: Entry, unacked: bool, seen: list[int]) -> tuple[bool, list[int]]:
        return True, [*seen, entry.seq]

    assert backing.fold(visit, []) == [0, 2, 3]
    assert fetch(queue, 10) == [0, 2, 3]
    assert backing.is_empty()
    store.abandon()
