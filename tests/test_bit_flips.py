"""Any single flipped bit in any file is harmless, or reported with its file and offset; every other message is served.

The SQLite files are not among them: `meta.db` has no checksums and is trusted, `queue.db` has tests of its own.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.small_engine import TINY, publish, temporary_root
from warren.storage.vhost_store import VhostStore

_LEFT_OUT = (".lock", "meta.db", "meta.db-wal", "meta.db-shm", "RESERVE", ".vhost")


def open_store(root: str) -> VhostStore:
    return VhostStore(root, settings=TINY, background=False, debug=True)


def prepare(root: str, clean: bool) -> tuple[set[bytes], set[bytes]]:
    """A store with every kind of file; what is alive in it, and what was acked."""
    store = open_store(root)
    queue = store.declare("q")
    small = [b"small %03d" % number for number in range(60)]
    large = [(b"large %03d " % number).ljust(700, b"*") for number in range(12)]
    publish(store, queue, small[:40])
    publish(store, queue, large[:8])
    store.checkpoint(seal=True, carry_below=0)
    first = queue.backing.fetch(12)
    queue.backing.ack([entry.seq for entry in first[3:9]])
    store.sync()
    store.checkpoint(seal=True, carry_below=0)  # the acks are in .qa now
    publish(store, queue, small[40:])
    publish(store, queue, large[8:])
    acked = {bytes(entry.body) for entry in first[3:9]}
    more = queue.backing.fetch(4)
    queue.backing.ack([more[1].seq])  # this one is in the journal only
    acked.add(bytes(more[1].body))
    store.sync()
    with store.lock:
        store.store.seal()
    if clean:
        store.close()
    else:
        store.abandon()
    return (set(small) | set(large)) - acked, acked


def flip(path: str, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def files_of(root: str) -> list[str]:
    found = []
    for place, _, names in os.walk(root):
        found += [os.path.join(place, name) for name in names if name not in _LEFT_OUT]
    return sorted(path for path in found if os.path.getsize(path))


def covered(reports: list[dict[str, Any]], path: str, offset: int) -> bool:
    return any(r["file"] == path and r["offset"] <= offset < r["offset"] + max(1, r["length"]) for r in reports)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("clean", [False, True], ids=["dirty", "clean"])
def test_a_flipped_bit_is_harmless_or_reported_and_all_others_are_served(
    clean: bool, scale: Any, seed: int, record_property: Any
) -> None:
    rng = random.Random(seed)
    logging.getLogger("warren.storage").setLevel(logging.CRITICAL)
    flips = scale.scale(4000)
    kinds: dict[str, int] = {}
    with temporary_root() as base:
        origin = os.path.join(base, "origin")
        expected, acked = prepare(origin, clean)
        files = files_of(origin)
        for number in range(flips):
            path = files[number % len(files)]
            bit = rng.randrange(os.path.getsize(path) * 8)
            kinds[Path(path).suffix or Path(path).name] = kinds.get(Path(path).suffix or Path(path).name, 0) + 1
            copy = os.path.join(base, "copy")
            shutil.copytree(origin, copy)
            flip(path.replace(origin, copy), bit)
            where = f"bit {bit} of {os.path.relpath(path, origin)}, seed {seed}"
            store = open_store(copy)
            try:
                found = [bytes(entry.body) for entry in store.get("q").backing.fetch(1000)]
                reports = store.quarantine.reports
                inside = os.path.relpath(path.replace(origin, copy), store.root)
            finally:
                store.abandon()
            assert len(found) == len(set(found)), f"served twice: {where}"
            assert set(found) <= expected | acked, f"content that nobody published: {where}"
            missing = expected - set(found)
            back = set(found) & acked
            assert len(missing) <= 1, f"more than one message is missing: {where}, {missing}"
            if missing or back:
                assert covered(reports, inside, bit // 8), f"not reported: {where}, {missing or back}, {reports}"
            shutil.rmtree(copy)
    record_property("flips", flips)
    record_property("seed", seed)
    assert {".qi", ".qs", ".rdq"} <= kinds.keys(), kinds
