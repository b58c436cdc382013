"""A segment whose slots are all written has a trailer: a start takes its word, and readers pass over it by time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import warren
from tests.faulty_disk import FaultyDisk
from tests.small_engine import TINY, crash_and_reopen, fetch, open_engine, publish
from tests.test_pipeline_rows import read
from warren.kernel.segment_codec import SLOT_BYTES
from warren.storage.disk import Disk
from warren.storage.layout import HEADER_BYTES
from warren.storage.segment import SegmentFiles, Trailer
from warren.storage.vhost_store import StoredQueue, VhostStore

SIZE = TINY.segment_entries
SLOTS_END = HEADER_BYTES + SIZE * SLOT_BYTES


class CountingDisk(Disk):
    """Remembers which files were read whole."""

    def __init__(self) -> None:
        self.read_whole: list[str] = []

    def read(self, path: str) -> bytes:
        self.read_whole.append(path)
        return super().read(path)


def checkpointed(disk: FaultyDisk, count: int, **changes: object) -> tuple[VhostStore, StoredQueue]:
    store = open_engine(disk.root, disk, **changes)
    queue = store.declare("q")
    publish(store, queue, count)
    store.checkpoint(seal=True, carry_below=0)
    return store, queue


def trailers(queue: StoredQueue) -> dict[int, Trailer | None]:
    files = queue.indexes[0].files
    return {number: files.read_trailer(number) for number in files.numbers()}


def index_files(disk: FaultyDisk) -> list[str]:
    return sorted(path for path in disk.files() if path.endswith(".qi"))


def test_full_segments_get_a_trailer_and_the_last_one_does_not(tmp_path):
    store, queue = checkpointed(FaultyDisk(tmp_path), 2 * SIZE + 3)
    found = trailers(queue)
    assert [number for number, trailer in found.items() if trailer is not None] == [0, 1]
    first = found[0]
    assert first is not None
    sizes = [len(b"m%d" % seq) for seq in range(SIZE)]
    assert (first.written, first.low, first.high, first.body_bytes, first.flags) == (SIZE, 1, 1, sum(sizes), 0)
    store.close()


def test_a_segment_that_fills_over_several_checkpoints_and_a_restart_gets_its_trailer(tmp_path):
    disk = FaultyDisk(tmp_path)
    store, queue = checkpointed(disk, 3)
    store.close()
    store = open_engine(disk.root, disk)
    queue = store.get("q")
    publish(store, queue, SIZE - 3)
    store.checkpoint(seal=True, carry_below=0)
    assert trailers(queue)[0] is not None
    store.close()


def test_a_start_after_a_crash_reads_no_slot_of_a_full_segment(tmp_path):
    store = open_engine(str(tmp_path))
    queue = store.declare("q")
    publish(store, queue, 3 * SIZE + 2)
    store.checkpoint(seal=True, carry_below=0)
    size = queue.backing.ready_bytes()
    store.abandon()
    after = CountingDisk()
    store = open_engine(str(tmp_path), after)
    assert [os.path.basename(path) for path in after.read_whole if path.endswith(".qi")] == ["3.qi"]
    queue = store.get("q")
    assert len(queue.backing) == 3 * SIZE + 2
    assert queue.backing.ready_bytes() == size
    assert fetch(queue, 100) == list(range(3 * SIZE + 2))
    store.close()


def test_a_segment_with_acks_is_read_slot_by_slot(tmp_path):
    disk = FaultyDisk(tmp_path)
    store, queue = checkpointed(disk, 3 * SIZE)
    queue.backing.ack(fetch(queue, SIZE + 2))
    store.checkpoint(seal=True, carry_below=0)
    queue.backing.ack(fetch(queue, 2 * SIZE - 4)[-1:])  # of the third segment, in the journal only
    store.sync()
    store, _ = crash_and_reopen(store, disk)
    assert fetch(store.get("q"), 100) == [seq for seq in range(SIZE + 2, 3 * SIZE) if seq != 3 * SIZE - 3]
    store.close()


def test_transient_and_stored_messages_are_named_by_the_trailer(tmp_path):
    disk = FaultyDisk(tmp_path)
    store = open_engine(disk.root, disk)
    mixed, large = store.declare("mixed"), store.declare("large")
    publish(store, mixed, SIZE // 2, persistent=False)
    mixed.backing.set_ram_target(0)
    publish(store, mixed, SIZE - SIZE // 2)
    publish(store, large, [b"x" * 300] * SIZE)
    store.checkpoint(seal=True, carry_below=0)
    flags = [trailer.flags for queue in (mixed, large) for trailer in trailers(queue).values() if trailer]
    assert flags in ([2, 1], [1])  # transients that stayed in RAM leave their slots empty
    store, _ = crash_and_reopen(store, disk)
    assert fetch(store.get("mixed"), 100) == list(range(SIZE // 2, SIZE))
    assert [entry.body for entry in store.get("large").backing.fetch(100)] == [b"x" * 300] * SIZE
    store.close()


@pytest.mark.parametrize("bit", [3, 70, 63 * 8 + 7])
def test_a_damaged_trailer_costs_nothing(tmp_path, bit):
    disk = FaultyDisk(tmp_path)
    store, _ = checkpointed(disk, 2 * SIZE)
    store.abandon()
    path = index_files(disk)[0]
    disk.flip_bit(path, SLOTS_END * 8 + bit)
    store = open_engine(disk.root, disk)
    assert fetch(store.get("q"), 100) == list(range(2 * SIZE))
    assert not store.quarantine.reports
    store.close()


def test_a_damaged_slot_under_a_good_trailer_costs_that_message_when_it_is_needed(tmp_path):
    disk = FaultyDisk(tmp_path)
    store, _ = checkpointed(disk, 3 * SIZE)
    store.abandon()
    path = next(path for path in index_files(disk) if path.endswith("/1.qi"))
    disk.flip_bit(path, (HEADER_BYTES + 2 * SLOT_BYTES + 20) * 8)
    store = open_engine(disk.root, disk)
    assert fetch(store.get("q"), 100) == [seq for seq in range(3 * SIZE) if seq != SIZE + 2]
    assert [(report["file"], report["offset"]) for report in map(dict, store.quarantine.reports)] == [
        (os.path.relpath(path, store.root), HEADER_BYTES + 2 * SLOT_BYTES)
    ]
    store.close()


def test_a_reader_passes_over_segments_of_another_time(tmp_path):
    settings = TINY
    with warren.open(tmp_path / "data", settings=settings) as store:
        queue = store.queue("q")
        queue.publish_many([b"old"] * SIZE)
        store.engine.checkpoint(seal=True, carry_below=0)
        queue.publish_many([b"new"] * SIZE)
    [old] = Path(tmp_path).rglob("0.qs")
    old.unlink()  # whoever looks at it finds out
    [newest] = {row["published_at"] for row in read(tmp_path / "data", fail_on_data_loss=False)}
    since = newest.isoformat()
    assert [row["body"] for row in read(tmp_path / "data", since=since)] == [b"new"] * SIZE
    assert read(tmp_path / "data", since=since, until=since) == []


def test_a_trailer_of_another_stream_is_none(tmp_path):
    disk = FaultyDisk(tmp_path)
    store, queue = checkpointed(disk, SIZE)
    files = queue.indexes[0].files
    assert SegmentFiles(disk, files.directory, files.sid + 1, SIZE).read_trailer(0) is None
    store.close()
