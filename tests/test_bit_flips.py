"""Any single flipped bit in any file is harmless, or reported with file and offset; every other message is served.

Two small stores with every kind of file, one that crashed and one that was stopped cleanly. Each bit of each file is
flipped, alone; the store is opened and emptied. What may come of it:

- no message has another content than the one it was published with,
- of one body, or of one transaction, the messages are missing; nothing else is,
- a message that was acked may come back, where the flip voids the record of its ack,
- if anything is missing, back, or forgotten (a checkout, a delivery count), a report names the file and the place,
- no seq_id is handed out twice, so what is published from then on is safe.

SQLite's file is not part of it: SQLite is trusted.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault_workload import SAFE, SETTINGS, Driver, Witness, found_in, in_parts, open_store
from tests.faulty_disk import FaultyDisk
from warren.kernel.journal_codec import CHECKOUT
from warren.storage.vhost_store import VhostStore

SMALL = dataclasses.replace(
    SETTINGS, journal_file_bytes=1 << 20, embed_below=128, store_file_bytes=700, carry_below=0, large_body_bytes=1 << 20
)
Place = tuple[int, int]  # uid, seq_id


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Path]:
    logging.disable(logging.CRITICAL)
    place = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=place if os.access(place, os.W_OK) else tmp_path, prefix="warren-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
    logging.disable(logging.NOTSET)


def prepare(arena: Path, *, clean: bool) -> tuple[FaultyDisk, Witness]:
    """A store with messages in segments and in the journal, in message store files with hints and without."""
    disk = FaultyDisk(arena / "prepared")
    witness = Witness()
    driver = Driver(disk, f"{disk.root}/data", witness, settings=SMALL)
    driver.start()
    for name in ("a", "b"):
        driver.declare(name)
    driver.publish("a", [20, 200, 25, 30, 210, 20, 20, 20, 220])
    driver.publish("b", [20, 20, 20])
    driver.fan_out(["a", "b"], 230)
    driver.sync()
    driver.consume("a", 1)
    driver.sync()
    driver.checkpoint(carry_below=0)
    driver.fetch("a", 3)
    driver.requeue("a", 1)
    driver.ack("a", 1)
    driver.sync()
    driver.checkpoint(carry_below=0)
    driver.consume("a", 1)
    driver.checkout("b", "lease", 2)
    driver.publish("a", [22, 140, 22], persistent=True)
    driver.publish("b", [21])
    driver.fan_out(["a", "b"], 24, producer="one", number=3)
    driver.sync()
    driver.consume("b", 1)
    driver.transact([("a", 23), ("b", 150)], {"b": 1})
    driver.fetch("a", 2)
    driver.requeue("a", 1)
    driver.publish("a", [26])
    driver.sync()
    if clean:
        driver.open.close()
    else:
        driver.open.abandon()
    return disk.crash(mode="all"), witness


@dataclasses.dataclass
class Seen:
    messages: dict[Place, bytes]
    checkouts: dict[str, Any]
    counts: dict[Place, int]
    reports: list[dict[str, object]]


def look(store: VhostStore) -> Seen:
    """All that a store holds; its queues are emptied by fetching."""
    messages: dict[Place, bytes] = {}
    counts: dict[Place, int] = {}
    for queue in store.queues.values():
        ready, pending = found_in(queue)
        for entry in ready + pending:
            messages[queue.uid, entry.seq] = entry.body
        with store.lock:
            fetched = queue.backing.fetch(1000)
        assert [entry.seq for entry in fetched] == [entry.seq for entry in ready], "fetch and fold disagree"
        assert [entry.body for entry in fetched] == [entry.body for entry in ready], "fetch and fold disagree"
        assert len(queue.backing) == 0
        for seq, count in queue.backing.counts.items():
            counts[queue.uid, seq] = count
    return Seen(messages, dict(store.ledger.table(CHECKOUT)), counts, list(store.quarantine.reports))


class Flips:
    def __init__(self, disk: FaultyDisk, witness: Witness) -> None:
        self.disk = disk
        self.witness = witness
        self.data = f"{disk.root}/data"
        self.known = {(uid, seq): sent for uid, known in witness.queues.items() for seq, sent in known.sent.items()}
        store = open_store(disk.clone(), self.data, settings=SMALL)
        self.root = store.root
        self.before = look(store)
        store.abandon()
        assert self.before.reports == []
        assert set(self.before.messages) == {place for place, sent in self.known.items() if sent.must}
        self.harmless = self.reported = 0

    def bits(self) -> list[tuple[str, int]]:
        """Of the reserve, which is zeros that nobody reads, only the first byte."""
        sizes = {path: 1 if path.endswith("RESERVE") else self.disk.size(path) for path in self.disk.files()}
        return [(path, bit) for path, size in sizes.items() for bit in range(size * 8)]

    def flip(self, path: str, bit: int, *, go_on: bool) -> None:
        disk = self.disk.clone()
        disk.flip_bit(path, bit)
        store = open_store(disk, self.data, settings=SMALL)
        try:
            after = look(store)
            self.compare(after, os.path.relpath(path, self.root), bit // 8)
            for known in self.witness.queues.values():
                assert store.queues[known.name].seqs.next >= known.next_seq, "seq_ids would be used again"
            if go_on:
                self.go_on(store, disk)
        finally:
            store.abandon()

    def compare(self, after: Seen, file: str, byte: int) -> None:
        for place, body in after.messages.items():
            assert place in self.known, f"{place} was never published"
            assert body == self.known[place].body, f"{self.known[place]} has another content"
        missing = self.before.messages.keys() - after.messages.keys()
        back = after.messages.keys() - self.before.messages.keys()
        assert all(self.known[place].acked == SAFE for place in back)
        lost = {self.known[place].group or self.known[place].label for place in missing}
        assert len(lost) <= 1, f"lost {[self.known[place] for place in missing]}"
        forgotten = after.checkouts != self.before.checkouts or any(
            after.counts.get(place) != count for place, count in self.before.counts.items() if place in after.messages
        )
        if not missing and not back and not forgotten:
            self.harmless += 1
            return
        self.reported += 1
        assert any(
            report["file"] == file and report["offset"] <= byte < report["offset"] + report["length"]
            for report in after.reports
        ), f"missing {missing}, back {back}, forgotten {forgotten}; reported is {after.reports}"

    def go_on(self, store: VhostStore, disk: FaultyDisk) -> None:
        """What is published after the damage survives a power loss like everything else."""
        witness = Witness()
        driver = Driver(disk, self.data, witness, settings=SMALL)
        driver.store = store
        with store.lock:
            for queue in store.queues.values():
                queue.backing.purge_acks()
        for name, queue in store.queues.items():
            driver.adopt(queue)
            driver.publish(name, [30, 150])
        driver.sync()
        store.abandon()
        after = open_store(disk.clone().crash(mode="none"), self.data, settings=SMALL)
        try:
            for key in list(after.ledger.table(CHECKOUT)):
                after.settle(key.rpartition("/")[0], 1 << 40)
            there = look(after).messages
            for known in witness.queues.values():
                for seq, sent in known.sent.items():
                    assert there.get((known.uid, seq)) == sent.body, (
                        f"{sent} was published after the damage and is lost"
                    )
        finally:
            after.abandon()


def flip_bits(part: int, parts: int, arena: Path, clean: bool, seed: int, most: int) -> tuple[int, ...]:
    """Flip the bits of this part, `most` of them at most: files, bits, bits flipped, harmless, reported."""
    disk, witness = prepare(arena / f"part{part}", clean=clean)
    flips = Flips(disk, witness)
    endings = {os.path.splitext(path)[1] or os.path.basename(path) for path in disk.files()}
    assert endings >= {".wal", ".qi", ".qs", ".qa", ".rdq", ".rdh", "FLOOR"} | ({"recovery"} if clean else set())
    bits = flips.bits()
    chosen = bits if len(bits) <= most else sorted(random.Random(seed).sample(bits, most))
    mine = chosen[part::parts]
    for number, (path, bit) in enumerate(mine):
        try:
            flips.flip(path, bit, go_on=number % 5 == 0)
        except Exception as error:
            name = os.path.relpath(path, flips.root)
            raise AssertionError(
                f"bit {bit & 7} of byte {bit // 8} of {name}, seed {seed}: {type(error).__name__}: {error}"
            ) from error
    whole = part == 0
    return len(disk.files()) * whole, len(bits) * whole, len(mine), flips.harmless, flips.reported


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("clean", [False, True], ids=["after a crash", "after a clean stop"])
def test_any_flipped_bit_is_harmless_or_reported_and_costs_one_message_at_most(
    arena, scale, seed, record_property, clean
):
    parts = (os.cpu_count() or 1) if scale.full else 1
    counted = in_parts(parts, flip_bits, arena, clean, seed, 1 << 30 if scale.full else 1000)
    names = ("files", "bits in them", "bits flipped", "harmless", "reported")
    for name, count in zip(names, counted, strict=True):
        record_property(name, count)
