"""The message store keeps each payload once, for as long as it has references, and says so when it cannot."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faulty_disk import FaultyDisk, PowerCut
from warren.errors import MessageTooLargeError, StoreFormatError
from warren.kernel.store_table import pack_records
from warren.storage import store_format
from warren.storage.disk import Disk
from warren.storage.message_store import (
    MAX_READERS,
    WRITE_BUFFER_BYTES,
    Commit,
    MessageDamaged,
    MessageMissing,
    MessageStore,
    StoreOptions,
)
from warren.storage.store_format import HEADER_BYTES, RECORD_OVERHEAD_BYTES, TermsError, data_header
from warren.storage.store_index import LmdbIndex, RefCounts, StoreIndex, TableIndex

LIMIT = 4096  # of a file, so that a few messages fill it
SMALL: StoreOptions = {"file_size_limit": LIMIT}
UNCACHED: StoreOptions = {"file_size_limit": LIMIT, "cache_bytes": 0}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "msg_store_persistent")


@pytest.fixture(params=["table", "lmdb"])
def new_index(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], StoreIndex]:
    return TableIndex if request.param == "table" else lambda: LmdbIndex(str(tmp_path / "index.lmdb"))


@pytest.fixture
def store(path: str) -> Iterator[MessageStore]:
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, **UNCACHED)
    yield store
    store.close()


def commit(store: MessageStore) -> None:
    under_way = store.begin_commit()
    if under_way is not None:
        under_way.run()
        under_way.done()


def body(number: int, size: int = 1000) -> bytes:
    return random.Random(number).randbytes(size)


def write(store: MessageStore, number: int, size: int = 1000, refs: int = 1) -> bytes:
    msg_id = store.next_id()
    store.write(msg_id, body(number, size), refs)
    return msg_id


def fill(store: MessageStore, count: int, size: int = 1000) -> list[bytes]:
    """Committed messages, `body(0)` to `body(count - 1)`."""
    ids = [write(store, number, size) for number in range(count)]
    commit(store)
    return ids


def names(path: str) -> list[str]:
    return [name for name in sorted(os.listdir(path)) if name.endswith((".rdq", ".rdh", ".part"))]


def left(store: MessageStore) -> list[str]:
    """The files when all that are doomed are gone."""
    store.sweep()
    return names(store.path)


class Quarantined(list[tuple[str, int, int, str]]):
    """A quarantine that only writes down what it is told."""

    def __call__(self, path: str, offset: int, length: int, why: str) -> None:
        self.append((os.path.basename(path), offset, length, why))


def open_dirty(disk: Disk, path: str, refs: dict[bytes, int] | RefCounts, **given: object) -> MessageStore:
    arguments: dict[str, object] = {"index": TableIndex(), "sync": True, "quarantine": Quarantined(), **UNCACHED}
    return MessageStore.open_dirty(disk, path, refs=refs, **(arguments | given))  # type: ignore[arg-type]


# ---- writing and reading ----


def test_a_payload_can_be_read_before_its_commit_while_it_runs_and_after(store):
    msg_id = write(store, 1)
    assert store.read(msg_id) == body(1)
    under_way = store.begin_commit()
    assert store.read(msg_id) == body(1)
    under_way.run()
    assert store.read(msg_id) == body(1)
    under_way.done()
    assert store.read(msg_id) == body(1)
    assert store.contains(msg_id)


def test_a_payload_in_parts_is_one_payload(store):
    msg_id = store.next_id()
    store.write(msg_id, (b"ab", b"", b"cde"), 1)
    assert store.read(msg_id) == b"abcde"
    commit(store)
    assert store.read(msg_id) == b"abcde"


def test_an_empty_payload_is_a_payload(store):
    msg_ids = [store.next_id(), store.next_id()]
    store.write(msg_ids[0], b"", 1)
    store.write(msg_ids[1], (), 1)
    under_way = store.begin_commit()
    assert [store.read(msg_id) for msg_id in msg_ids] == [b"", b""]
    under_way.run()
    under_way.done()
    assert [store.read(msg_id) for msg_id in msg_ids] == [b"", b""]


def test_nothing_to_write_is_no_commit(store):
    assert store.begin_commit() is None
    fill(store, 1)
    assert store.begin_commit() is None


def test_a_second_commit_has_to_wait_for_the_first(store):
    write(store, 1)
    under_way = store.begin_commit()
    write(store, 2)
    with pytest.raises(RuntimeError, match="not done"):
        store.begin_commit()
    under_way.run()
    under_way.done()
    assert store.begin_commit() is not None


def test_ids_are_new_at_every_start_and_rise(store, tmp_path):
    ids = [store.next_id() for _ in range(300)]
    assert ids == sorted(set(ids))
    assert {len(msg_id) for msg_id in ids} == {16}
    other = MessageStore(Disk(), str(tmp_path / "other"), index=TableIndex(), sync=True)
    assert other.next_id()[:8] != ids[0][:8]


def test_a_message_needs_a_reference_and_an_id_of_its_own(store):
    msg_id = write(store, 1)
    with pytest.raises(ValueError, match="before"):
        store.write(msg_id, b"", 1)
    with pytest.raises(ValueError, match="0 references"):
        store.write(store.next_id(), b"", 0)


def test_a_message_over_two_gibibytes_is_refused(store):
    with pytest.raises(MessageTooLargeError, match="2147483648"):
        store.begin_large(store.next_id(), 2**31)


def test_a_file_is_rolled_after_the_record_that_reaches_its_limit(store, path):
    fill(store, 10)
    sizes = {name: os.path.getsize(os.path.join(path, name)) for name in names(path) if name.endswith(".rdq")}
    record = 1000 + RECORD_OVERHEAD_BYTES
    assert sizes == {"0.0.rdq": 64 + 4 * record, "1.0.rdq": 64 + 4 * record, "2.0.rdq": 64 + 2 * record}
    assert names(path) == ["0.0.rdh", "0.0.rdq", "1.0.rdh", "1.0.rdq", "2.0.rdq"]


def test_more_than_a_buffer_of_flying_writes_is_written_without_a_commit(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, cache_bytes=0)
    size = WRITE_BUFFER_BYTES // 4
    ids = [write(store, number, size) for number in range(3)]
    assert names(path) == []
    ids += [write(store, number, size) for number in range(3, 6)]
    assert os.path.getsize(os.path.join(path, "0.0.rdq")) == 64 + 4 * (size + RECORD_OVERHEAD_BYTES)
    assert [store.read(msg_id) for msg_id in ids] == [body(number, size) for number in range(6)]
    commit(store)
    assert [store.read(msg_id) for msg_id in ids] == [body(number, size) for number in range(6)]
    store.close()


def test_what_a_full_buffer_wrote_is_synced_by_the_next_commit(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True)
    ids = [write(store, number, WRITE_BUFFER_BYTES) for number in range(3)]
    commit(store)
    after = open_dirty(disk.crash(mode="none"), store.path, dict.fromkeys(ids, 1))
    assert after.missing == []
    assert [after.read(msg_id) for msg_id in ids] == [body(number, WRITE_BUFFER_BYTES) for number in range(3)]


def test_the_cache_of_written_payloads_is_bounded_and_keeps_the_newest(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, cache_bytes=3000)
    ids = fill(store, 5)
    calls = disk.calls
    assert [store.read(msg_id) for msg_id in ids[2:]] == [body(2), body(3), body(4)]
    assert disk.calls == calls
    assert store.read(ids[1]) == body(1)
    assert disk.calls > calls


def test_a_removed_message_makes_room_in_the_cache(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, cache_bytes=3000)
    ids = fill(store, 3)
    store.remove(ids[1])
    ids += fill(store, 1)
    calls = disk.calls
    assert [store.read(ids[n]) for n in (0, 2, 3)] == [body(0), body(2), body(0)]
    assert disk.calls == calls


def test_any_number_of_files_can_be_read_with_a_bounded_number_open(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=False, file_size_limit=100, cache_bytes=0)
    count = 3 * MAX_READERS
    ids = fill(store, count, 100)
    before = len(os.listdir("/proc/self/fd"))
    assert [store.read(msg_id) for msg_id in ids] == [body(n, 100) for n in range(count)]
    assert len(os.listdir("/proc/self/fd")) <= before + MAX_READERS
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= before


# ---- references ----


def test_a_message_lives_until_its_last_reference_goes(store):
    msg_id = write(store, 1, refs=2)
    store.add_refs(msg_id, 1)
    commit(store)
    store.add_refs(msg_id, 1)
    store.remove(msg_id, 3)
    assert store.read(msg_id) == body(1)
    store.remove(msg_id)
    assert not store.contains(msg_id)
    with pytest.raises(MessageMissing, match=msg_id.hex()):
        store.read(msg_id)
    with pytest.raises(MessageMissing):
        store.add_refs(msg_id, 1)


def test_a_flying_write_whose_last_reference_goes_is_never_written(store, path):
    ids = [write(store, number, refs=2) for number in range(3)]
    store.remove_many([ids[0], ids[1], ids[0]])
    assert not store.contains(ids[0])
    commit(store)
    assert os.path.getsize(os.path.join(path, "0.0.rdq")) == 64 + 2 * (1000 + RECORD_OVERHEAD_BYTES)
    with pytest.raises(MessageMissing):
        store.read(ids[0])
    assert store.read(ids[1]) == body(1)
    store.remove(ids[1])
    assert not store.contains(ids[1])
    assert store.contains(ids[2])


def test_when_all_flying_writes_are_cancelled_there_is_nothing_to_commit(store, path):
    ids = [write(store, number) for number in range(3)]
    store.remove_many(ids)
    assert store.begin_commit() is None
    assert names(path) == []


def test_a_message_removed_while_its_commit_runs_is_gone(store):
    ids = [write(store, number) for number in range(2)]
    under_way = store.begin_commit()
    store.remove(ids[0])
    with pytest.raises(MessageMissing):
        store.read(ids[0])
    under_way.run()
    under_way.done()
    with pytest.raises(MessageMissing):
        store.read(ids[0])
    assert store.read(ids[1]) == body(1)


def test_removing_an_id_that_is_not_there_changes_nothing(store):
    ids = fill(store, 1)
    store.remove_many([bytes(16), ids[0], ids[0]])
    assert store.garbage().valid_bytes == 0


def test_a_sealed_file_without_valid_bytes_is_unlinked_and_the_current_one_is_not(store):
    ids = fill(store, 6)
    store.remove_many(ids[4:])
    assert "1.0.rdq" in left(store)
    store.remove_many(ids[:3])
    assert left(store) == ["0.0.rdh", "0.0.rdq", "1.0.rdq"]
    store.remove(ids[3])
    assert left(store) == ["1.0.rdq"]
    assert store.garbage() == (1, 2 * (1000 + RECORD_OVERHEAD_BYTES), 0)


def test_a_file_that_nobody_swept_is_unlinked_by_the_next_commit(store, path):
    store.remove_many(fill(store, 4))
    assert names(path) == ["0.0.rdh", "0.0.rdq"]
    assert store.garbage() == (0, 0, 0)
    commit(store)
    assert names(path) == []
    assert store.begin_commit() is None


@pytest.mark.parametrize("clean", [True, False])
def test_a_file_that_cannot_be_unlinked_disturbs_nobody_and_goes_at_the_next_start(tmp_path, clean):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, **UNCACHED)
    ids = fill(store, 5)
    store.remove_many(ids[:4])
    disk.fail_at(1, errno.EIO)
    store.sweep()
    assert disk.listdir(store.path) == ["0.0.rdh", "0.0.rdq", "1.0.rdq"]
    terms = store.save_terms()
    if clean:
        after = MessageStore.open_clean(disk, store.path, index=TableIndex(), sync=True, terms=terms)
    else:
        after = open_dirty(disk, store.path, {ids[4]: 1})
    assert disk.listdir(store.path) == ["1.0.rdh", "1.0.rdq"]
    assert after.read(ids[4]) == body(4)


def test_a_pinned_file_is_unlinked_when_it_is_let_go(store):
    ids = fill(store, 4)
    (file,) = store.data_files()
    store.pin(file)
    store.remove_many(ids)
    assert left(store) == ["0.0.rdh", "0.0.rdq"]
    store.unpin(file)
    assert left(store) == []
    assert store.garbage() == (0, 0, 0)


def test_a_file_whose_messages_all_go_while_its_commit_runs_is_unlinked_after_it(store):
    ids = [write(store, number) for number in range(4)]
    under_way = store.begin_commit()
    store.remove_many(ids)
    under_way.run()
    assert left(store) == ["0.0.rdh", "0.0.rdq"]
    under_way.done()
    assert left(store) == []


def test_a_hard_link_keeps_what_the_store_unlinks(store, path, tmp_path):
    ids = fill(store, 4)
    os.link(os.path.join(path, "0.0.rdq"), tmp_path / "0.0.rdq")
    store.remove_many(ids)
    assert (tmp_path / "0.0.rdq").read_bytes()[HEADER_BYTES:] == pack_records(ids, [body(n) for n in range(4)])


def test_totals_count_records_valid_and_not(store):
    ids = fill(store, 6)
    record = 1000 + RECORD_OVERHEAD_BYTES
    assert store.garbage() == (2, 6 * record, 6 * record)
    store.remove_many(ids[:3])
    assert store.garbage() == (2, 6 * record, 3 * record)
    assert store.garbage().garbage_fraction == 0.5


# ---- large bodies ----


def test_a_large_body_is_written_in_slices_to_a_file_of_its_own(store, path):
    small = write(store, 1)
    large_body = body(2, 3_000_000)
    large = store.begin_large(store.next_id(), len(large_body))
    for start in range(0, len(large_body), 1 << 20):
        large.append(large_body[start : start + (1 << 20)])
        assert not store.contains(large.msg_id)
    commit(store)
    large.finish(sync=True)
    store.adopt(large, 2)
    assert store.read(large.msg_id) == large_body
    assert store.read(small) == body(1)
    commit(store)
    assert left(store) == ["0.0.rdh", "0.0.rdq", "1.0.rdq"]
    assert (Path(path) / "0.0.rdq").read_bytes() == data_header(0, 0) + pack_records([large.msg_id], [large_body])
    store.remove(large.msg_id, 2)
    assert left(store) == ["1.0.rdq"]


def test_a_large_body_with_a_wrong_length_is_refused(store, path):
    large = store.begin_large(store.next_id(), 10)
    large.append(b"12345")
    with pytest.raises(ValueError, match="5 bytes, not the 10"):
        large.finish(sync=True)
    with pytest.raises(ValueError, match="more than the 10"):
        large.append(b"123456")
    with pytest.raises(ValueError, match="not finished"):
        store.adopt(large, 1)
    large.abort()
    assert names(path) == []


def test_a_finished_large_body_that_nobody_wants_can_be_given_up(store, path):
    large = store.begin_large(store.next_id(), 5)
    large.append(b"12345")
    large.finish(sync=False)
    large.abort()
    assert names(path) == []


def test_a_finished_and_synced_large_body_survives_a_power_loss_and_an_unfinished_one_leaves_nothing(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True)
    kept, lost = store.begin_large(store.next_id(), 5000), store.begin_large(store.next_id(), 5000)
    kept.append(body(1, 5000))
    lost.append(body(2, 4999))
    kept.finish(sync=True)
    disk.sync_all(disk.root)
    quarantined = Quarantined()
    after_disk = disk.crash(mode="none")
    after = open_dirty(after_disk, store.path, {kept.msg_id: 1}, quarantine=quarantined)
    assert after.read(kept.msg_id) == body(1, 5000)
    assert quarantined == []
    assert [name for name in after_disk.listdir(store.path) if "rdq" in name] == ["0.0.rdq"]


def test_a_large_body_written_in_one_call_is_synced_by_the_next_commit(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True)
    msg_id = store.next_id()
    store.write_large(msg_id, (b"head", body(1, 5000)), 1)
    assert store.read(msg_id) == b"head" + body(1, 5000)
    commit(store)
    after = open_dirty(disk.crash(mode="none"), store.path, {msg_id: 1})
    assert after.read(msg_id) == b"head" + body(1, 5000)


# ---- damage ----


@pytest.mark.parametrize(
    ("offset", "why"),
    [
        (HEADER_BYTES, "length field says"),
        (HEADER_BYTES + 8, "msg_id is"),
        (HEADER_BYTES + 24, "CRC is wrong"),
        (HEADER_BYTES + 500, "CRC is wrong"),
        (HEADER_BYTES + 1028, "end marker is 0xfe"),
    ],
)
def test_a_damaged_record_is_named_with_its_place_and_what_is_wrong(store, path, offset, why):
    ids = fill(store, 2)
    file = os.path.join(path, "0.0.rdq")
    data = bytearray(Path(file).read_bytes())
    data[offset] ^= 1
    Path(file).write_bytes(data)
    with pytest.raises(MessageDamaged, match=why) as caught:
        store.read(ids[0])
    assert (caught.value.path, caught.value.offset, caught.value.length) == (file, HEADER_BYTES, 1029)
    assert store.read(ids[1]) == body(1)
    store.remove_many(ids)
    assert store.garbage().valid_bytes == 0


def test_a_file_that_is_cut_or_gone_is_damage(store, path):
    ids = fill(store, 6)
    os.truncate(os.path.join(path, "0.0.rdq"), 2000)
    os.unlink(os.path.join(path, "1.0.rdq"))
    assert store.read(ids[0]) == body(0)
    with pytest.raises(MessageDamaged, match="ends after 907 of 1029 bytes"):
        store.read(ids[1])
    with pytest.raises(MessageDamaged, match="No such file"):
        store.read(ids[4])


def test_a_sector_that_stays_unreadable_is_damage_and_one_that_does_not_is_none(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, cache_bytes=0)
    ids = fill(store, 1)
    disk.fail_at(2, errno.EIO)
    assert store.read(ids[0]) == body(0)
    for call in (1, 2, 3):
        disk.fail_at(call, errno.EIO)
    with pytest.raises(MessageDamaged):
        store.read(ids[0])


def test_too_many_open_files_are_no_damage(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, cache_bytes=0)
    ids = fill(store, 1)
    for call in (1, 2):
        disk.fail_at(call, errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        store.read(ids[0])
    assert store.read(ids[0]) == body(0)


# ---- a disk that fails ----


def test_a_commit_that_met_a_full_disk_can_be_run_again(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, **UNCACHED)
    ids = [write(store, number) for number in range(10)]
    under_way = store.begin_commit()
    disk.capacity = 6000
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            under_way.run()
    assert [store.read(msg_id) for msg_id in ids] == [body(number) for number in range(10)]
    late = write(store, 10)
    store.remove(ids[5])
    disk.capacity = None
    under_way.run()
    under_way.done()
    commit(store)
    wanted = dict.fromkeys([*ids[:5], *ids[6:], late], 1)
    after = open_dirty(disk.crash(mode="none"), store.path, wanted)
    assert after.missing == []
    assert [after.read(msg_id) for msg_id in ids[6:]] == [body(number) for number in range(6, 10)]


@pytest.mark.parametrize("call", range(1, 12))
def test_wherever_a_commit_fails_with_a_full_disk_the_next_run_completes_it(tmp_path, call):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, **UNCACHED)
    ids = [write(store, number) for number in range(6)]
    under_way = store.begin_commit()
    disk.fail_at(call, errno.ENOSPC)
    kinds = len(disk.trace)
    try:
        under_way.run()
    except OSError:
        if disk.trace[kinds + call - 1].kind.startswith("sync"):
            with pytest.raises(OSError, match="No space left"):
                under_way.run()
            return
        under_way.run()
    under_way.done()
    after = open_dirty(disk.crash(mode="none"), store.path, dict.fromkeys(ids, 1))
    assert after.missing == []
    assert [after.read(msg_id) for msg_id in ids] == [body(number) for number in range(6)]


def test_a_full_disk_stops_no_write_and_no_read_until_the_commit(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, cache_bytes=0)
    disk.capacity = 3 * WRITE_BUFFER_BYTES
    ids = [write(store, number, WRITE_BUFFER_BYTES // 2) for number in range(20)]
    assert [store.read(msg_id) for msg_id in ids] == [body(n, WRITE_BUFFER_BYTES // 2) for n in range(20)]
    under_way = store.begin_commit()
    with pytest.raises(OSError, match="No space left"):
        under_way.run()
    disk.capacity = None
    under_way.run()
    under_way.done()
    assert [store.read(msg_id) for msg_id in ids] == [body(n, WRITE_BUFFER_BYTES // 2) for n in range(20)]


@pytest.mark.parametrize("kind", ["sync", "sync_dir"])
def test_a_failed_sync_is_final(tmp_path, kind):
    def one_commit(disk: FaultyDisk) -> Commit:
        store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True)
        write(store, 1)
        under_way = store.begin_commit()
        assert under_way is not None
        return under_way

    trial = FaultyDisk(tmp_path / "trial")
    good = one_commit(trial)
    before = trial.calls
    good.run()
    call = next(n for n, done in enumerate(trial.trace[before:], 1) if done.kind == kind)

    disk = FaultyDisk(tmp_path / "disk")
    under_way = one_commit(disk)
    disk.fail_at(call, errno.EIO)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            under_way.run()
    assert disk.trace[-1].kind == kind


def test_a_hint_file_that_cannot_be_written_fails_no_commit_and_is_written_by_the_next(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, **UNCACHED)
    for number in range(4):
        write(store, number)
    under_way = store.begin_commit()
    record = 1000 + RECORD_OVERHEAD_BYTES
    disk.capacity = HEADER_BYTES + 4 * record + 10
    under_way.run()
    under_way.done()
    assert store.files() == ["0.0.rdq"]
    disk.capacity = None
    commit(store)
    assert store.files() == ["0.0.rdq", "0.0.rdh"]
    assert store.begin_commit() is None


# ---- clean stop and start ----


def test_a_clean_stop_and_start_keeps_messages_references_and_totals(path, new_index):
    store = MessageStore(Disk(), path, index=new_index(), sync=True, **UNCACHED)
    ids = fill(store, 10)
    store.add_refs(ids[7], 2)
    store.remove_many([*ids[:5], ids[8]])
    flying = write(store, 10)
    terms = store.save_terms()
    totals = store.garbage()
    store.close()
    before = left(store)
    store = MessageStore.open_clean(Disk(), path, index=new_index(), sync=True, terms=terms, **UNCACHED)
    assert left(store) == before
    assert store.garbage() == totals
    for number in (5, 6, 7, 9):
        assert store.read(ids[number]) == body(number)
    assert store.read(flying) == body(10)
    assert not store.contains(ids[8])
    store.remove(ids[7], 2)
    assert store.contains(ids[7])
    store.remove_many([ids[5], ids[6], ids[7], ids[9], flying])
    assert store.garbage() == (0, 0, 0)
    assert left(store) == []
    store.close()


def test_a_store_that_was_opened_never_appends_to_a_file_that_was_there(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, **UNCACHED)
    fill(store, 1)
    terms = store.save_terms()
    store.close()
    before = (Path(path) / "0.0.rdq").read_bytes()
    store = MessageStore.open_clean(Disk(), path, index=TableIndex(), sync=True, terms=terms)
    fill(store, 1)
    store.close()
    assert (Path(path) / "0.0.rdq").read_bytes() == before
    assert names(path) == ["0.0.rdh", "0.0.rdq", "1.0.rdq"]


def test_terms_that_are_damaged_or_do_not_fit_the_directory_are_refused(path, tmp_path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, **UNCACHED)
    fill(store, 10)
    terms = store.save_terms()
    store.close()

    def refused(terms: bytes, index: StoreIndex, why: str) -> None:
        with pytest.raises(TermsError, match=why):
            MessageStore.open_clean(Disk(), path, index=index, sync=True, terms=terms)

    for position in range(0, len(terms), 7):
        broken = bytearray(terms)
        broken[position] ^= 0x10
        refused(bytes(broken), TableIndex(), "CRC")
    refused(terms[:50], TableIndex(), "fewer than a header")
    refused(terms, LmdbIndex(str(tmp_path / "index.lmdb")), "kind 1, not 2")
    with open(os.path.join(path, "0.0.rdq"), "ab") as file:
        file.write(b"x")
    refused(terms, TableIndex(), "has 4181 bytes, not 4180")
    os.unlink(os.path.join(path, "0.0.rdq"))
    refused(terms, TableIndex(), "has not the files")


def test_a_file_of_a_newer_warren_is_refused(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True)
    ids = fill(store, 1)
    store.close()
    header = bytearray(data_header(0, 0)[:60])
    header[8] = 2
    header += store_format.crc32c(header).to_bytes(4, "little")
    file = Path(path) / "0.0.rdq"
    file.write_bytes(header + file.read_bytes()[64:])
    with pytest.raises(StoreFormatError, match="version 2; this Warren reads version 1"):
        open_dirty(Disk(), path, dict.fromkeys(ids, 1))


def test_a_transient_store_forgets_everything_at_its_start(path, new_index):
    store = MessageStore.open_empty(Disk(), path, index=new_index(), sync=False, **UNCACHED)
    ids = fill(store, 10)
    store.close()
    store = MessageStore.open_empty(Disk(), path, index=new_index(), sync=False, **UNCACHED)
    assert names(path) == []
    assert not store.contains(ids[0])
    assert fill(store, 10)
    store.close()


def test_a_store_that_does_not_sync_calls_no_sync(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=False, **UNCACHED)
    start = len(disk.trace)
    ids = fill(store, 10)
    write(store, 10)
    store.flush()
    assert store.read(ids[3]) == body(3)
    assert {call.kind for call in disk.trace[start:]}.isdisjoint({"sync", "sync_dir", "sync_all"})


def test_a_checkpoint_syncs_what_commits_without_sync_wrote(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=False, **UNCACHED)
    ids = fill(store, 10)
    checkpoint = store.begin_commit(sync=True)
    checkpoint.run()
    checkpoint.done()
    after = open_dirty(disk.crash(mode="none"), store.path, dict.fromkeys(ids, 1))
    assert after.missing == []


def test_what_a_killed_process_left_unsynced_is_synced_by_the_first_commit_of_the_next(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=False, **UNCACHED)
    wanted = dict.fromkeys(fill(store, 6), 1)
    disk = disk.crash(mode="process")
    store = open_dirty(disk, store.path, wanted)
    commit(store)
    assert open_dirty(disk.crash(mode="none"), store.path, wanted).missing == []


def test_after_seal_all_messages_are_in_files_that_do_not_change(store, path, tmp_path):
    ids = fill(store, 5)
    ids.append(write(store, 5))
    store.seal()
    assert store.files() == ["0.0.rdq", "0.0.rdh", "1.0.rdq", "1.0.rdh"]
    copy = tmp_path / "snapshot"
    copy.mkdir()
    for name in store.files():
        os.link(os.path.join(path, name), copy / name)
    fill(store, 10)
    store.remove_many(ids)
    snapshot = open_dirty(Disk(), str(copy), dict.fromkeys(ids, 1))
    assert [snapshot.read(msg_id) for msg_id in ids] == [body(0), body(1), body(2), body(3), body(4), body(5)]
    snapshot.close()


# ---- dirty start ----


def test_a_dirty_start_finds_everything_that_has_references(path, new_index):
    store = MessageStore(Disk(), path, index=new_index(), sync=True, **UNCACHED)
    ids = fill(store, 10)
    store.close()
    refs = RefCounts()
    refs.add_many([ids[0], ids[0], ids[9]])
    seen: list[tuple[int, int]] = []
    store = open_dirty(Disk(), path, refs, index=new_index(), progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert store.missing == []
    assert names(path) == ["0.0.rdh", "0.0.rdq", "2.0.rdq"]
    assert (store.read(ids[0]), store.read(ids[9])) == (body(0), body(9))
    assert not store.contains(ids[1])
    assert store.garbage() == (2, 6 * 1029, 2 * 1029)
    store.remove(ids[0])
    assert store.contains(ids[0])
    commit(store)
    assert names(path) == ["0.0.rdh", "0.0.rdq", "2.0.rdh", "2.0.rdq"]
    fill(store, 1)
    assert "3.0.rdq" in names(path)
    store.close()


def test_a_dirty_start_reads_no_body_of_a_file_with_a_good_hint_file(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, **UNCACHED)
    ids = fill(store, 4)
    store.close()
    (Path(path) / "0.0.rdq").write_bytes(data_header(0, 0) + bytes(4 * 1029))
    store = open_dirty(Disk(), path, dict.fromkeys(ids, 1))
    assert store.missing == []
    with pytest.raises(MessageDamaged, match="length field says 0"):
        store.read(ids[0])
    store.close()


@pytest.mark.parametrize("what", ["bit", "cut", "gone", "empty", "other size"])
def test_a_bad_hint_file_is_replaced_by_a_scan(path, what):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, **UNCACHED)
    ids = fill(store, 4)
    store.close()
    hint = Path(path) / "0.0.rdh"
    good = hint.read_bytes()
    wanted = good
    if what == "bit":
        hint.write_bytes(good[:70] + bytes([good[70] ^ 1]) + good[71:])
    elif what == "cut":
        hint.write_bytes(good[:-33])
    elif what == "empty":
        hint.write_bytes(b"")
    elif what == "gone":
        hint.unlink()
    else:
        with open(os.path.join(path, "0.0.rdq"), "ab") as file:
            file.write(b"torn")
        wanted = store_format.encode_hint(0, 0, 64 + 4 * 1029 + 4, good[64:-4])
    store = open_dirty(Disk(), path, dict.fromkeys(ids, 1))
    assert store.missing == []
    assert [store.read(msg_id) for msg_id in ids] == [body(n) for n in range(4)]
    commit(store)
    assert hint.read_bytes() == wanted
    store.close()


def test_ids_with_references_and_no_body_are_missing(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, **UNCACHED)
    ids = fill(store, 2)
    lost = store.next_id()
    store.close()
    store = open_dirty(Disk(), path, dict.fromkeys([*ids, lost], 1))
    assert store.missing == [lost]
    assert not store.contains(lost)
    store.close()


def test_a_scan_goes_on_behind_damage_and_reports_its_bytes(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, cache_bytes=0)
    ids = fill(store, 10)
    store.close()
    file = Path(path) / "0.0.rdq"
    data = bytearray(file.read_bytes())
    data[64 + 2 * 1029 + 300] ^= 1  # the payload of message 2
    data[64 + 5 * 1029 + 3] ^= 1  # the length of message 5
    data[64 + 6 * 1029 + 10] ^= 1  # the id of message 6
    file.write_bytes(data)
    quarantined = Quarantined()
    store = open_dirty(Disk(), path, dict.fromkeys(ids, 1), quarantine=quarantined)
    assert sorted(store.missing) == [ids[2], ids[5], ids[6]]
    assert [region[:3] for region in quarantined] == [
        ("0.0.rdq", 64 + 2 * 1029, 1029),
        ("0.0.rdq", 64 + 5 * 1029, 2 * 1029),
    ]
    for number in (0, 1, 3, 4, 7, 8, 9):
        assert store.read(ids[number]) == body(number)
    commit(store)
    store.close()
    again = Quarantined()
    store = open_dirty(Disk(), path, dict.fromkeys(ids[7:], 1), quarantine=again)
    assert again == []
    store.close()


def test_a_payload_that_looks_like_a_record_is_not_taken_for_one(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, cache_bytes=0)
    inner = store.next_id()
    outer, last = store.next_id(), store.next_id()
    store.write(outer, b"abc" + pack_records([inner], [b"inside"]), 1)
    store.write(last, b"last", 1)
    commit(store)
    store.close()
    store = open_dirty(Disk(), path, dict.fromkeys([inner, outer, last], 1))
    assert store.missing == [inner]
    assert store.read(last) == b"last"
    store.close()


def test_a_torn_end_is_quarantined_only_if_something_is_missing(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, cache_bytes=0)
    ids = fill(store, 3)
    store.close()
    os.truncate(os.path.join(path, "0.0.rdq"), 64 + 2 * 1029 + 500)
    quarantined = Quarantined()
    open_dirty(Disk(), path, dict.fromkeys(ids[:2], 1), quarantine=quarantined).close()
    assert quarantined == []
    open_dirty(Disk(), path, dict.fromkeys(ids, 1), quarantine=quarantined).close()
    assert [region[:3] for region in quarantined] == [("0.0.rdq", 64 + 2 * 1029, 500)]


def test_damage_is_reported_before_its_file_is_unlinked(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, cache_bytes=0)
    fill(store, 3)
    store.close()
    file = Path(path) / "0.0.rdq"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    sizes = []
    store = open_dirty(Disk(), path, {}, quarantine=lambda path, *_: sizes.append(os.path.getsize(path)))
    assert sizes == [64 + 3 * 1029]
    assert names(path) == []
    store.close()


def test_a_bad_file_header_is_reported_and_costs_no_message(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, cache_bytes=0)
    ids = fill(store, 3)
    store.close()
    file = Path(path) / "0.0.rdq"
    file.write_bytes(bytes(64) + file.read_bytes()[64:])
    quarantined = Quarantined()
    store = open_dirty(Disk(), path, dict.fromkeys(ids, 1), quarantine=quarantined)
    assert quarantined == [("0.0.rdq", 0, 64, "the CRC of the file header is wrong")]
    assert [store.read(msg_id) for msg_id in ids] == [body(0), body(1), body(2)]
    store.close()


def test_what_is_no_data_file_of_the_store_is_left_alone_and_half_files_go(path):
    os.makedirs(path)
    for name in ("5.0.rdh", "6.1.rdq.part", "7.0.rdq", "notes.txt", "01.0.rdq", "index.lmdb"):
        (Path(path) / name).write_bytes(b"")
    store = open_dirty(Disk(), path, {})
    assert sorted(os.listdir(path)) == ["01.0.rdq", "index.lmdb", "notes.txt"]
    fill(store, 1)
    assert "8.0.rdq" in names(path)
    store.close()


def test_of_two_copies_the_newest_generation_counts(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, **UNCACHED)
    ids = fill(store, 4)
    store.close()
    records = pack_records(ids[1:3], [body(1), body(2)])
    (Path(path) / "0.1.rdq").write_bytes(data_header(0, 1) + records[:-1])  # torn: message 2 is not whole
    (Path(path) / "0.1.rdh").write_bytes(b"written after the copy was synced")
    store = open_dirty(Disk(), path, dict.fromkeys(ids, 1))
    assert [(file.number, file.generation, file.valid) for file in store.data_files()] == [(0, 0, 3087), (0, 1, 1029)]
    assert [store.read(msg_id) for msg_id in ids] == [body(n) for n in range(4)]
    store.close()
    (Path(path) / "0.2.rdq").write_bytes(data_header(0, 2) + pack_records(ids, [body(n) for n in range(4)]))
    (Path(path) / "0.2.rdh").write_bytes(b"written after the copy was synced")
    store = open_dirty(Disk(), path, dict.fromkeys(ids, 1))
    assert names(path) == ["0.2.rdh", "0.2.rdq"]
    assert [store.read(msg_id) for msg_id in ids] == [body(n) for n in range(4)]
    store.close()


def test_a_copy_that_was_never_synced_counts_only_where_the_original_is_gone(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=True, **UNCACHED)
    ids = fill(store, 3)
    store.close()
    (Path(path) / "0.1.rdq").write_bytes(data_header(0, 1) + pack_records(ids, [body(n) for n in range(3)]))
    store = open_dirty(Disk(), path, dict.fromkeys(ids, 1))
    assert names(path) == ["0.0.rdq"]
    store.close()
    (Path(path) / "0.0.rdq").rename(Path(path) / "aside")
    (Path(path) / "0.1.rdq").write_bytes(data_header(0, 1) + pack_records(ids, [body(n) for n in range(3)]))
    store = open_dirty(Disk(), path, dict.fromkeys(ids, 1))
    assert [store.read(msg_id) for msg_id in ids] == [body(n) for n in range(3)]
    store.close()


@pytest.mark.parametrize("mode", ["none", "random", "all", "process"])
def test_what_was_committed_survives_a_power_loss_at_any_call(tmp_path, mode, seed):
    """One run per call: power goes at that call; all that was committed before must be there after."""
    chance = random.Random(seed)
    call = 0
    while True:
        call += 1
        disk = FaultyDisk(tmp_path / f"disk{call}")
        promised: dict[bytes, bytes] = {}
        disk.crash_at(call, tear=chance.randrange(200))
        try:
            _write_and_remove(disk, promised)
        except PowerCut:
            after = disk.crash(chance, mode)
        else:
            break
        quarantined = Quarantined()
        store = open_dirty(after, f"{disk.root}/store", dict.fromkeys(promised, 1), quarantine=quarantined)
        assert store.missing == []
        assert {msg_id: store.read(msg_id) for msg_id in promised} == promised
        assert store.garbage().valid_bytes == sum(map(len, promised.values())) + 29 * len(promised)
    assert call > 20


def _write_and_remove(disk: FaultyDisk, promised: dict[bytes, bytes]) -> None:
    """Commits of several messages with removes between them; `promised` is always what must survive."""
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, **SMALL)
    for turn in range(6):
        fresh = {store.next_id(): body(turn * 10 + n, 400 + 300 * n) for n in range(3)}
        for msg_id, payload in fresh.items():
            store.write(msg_id, payload, 1)
        if turn % 3 == 2:
            large = store.begin_large(store.next_id(), 2000)
            large.append(body(turn, 1500))
            large.append(body(turn + 1, 500))
            large.finish(sync=True)
            store.adopt(large, 1)
            promised[large.msg_id] = body(turn, 1500) + body(turn + 1, 500)
        commit(store)
        promised.update(fresh)
        # The journal has synced these removes: they are promised as well.
        for msg_id in list(promised)[: 2 * (turn % 2)]:
            del promised[msg_id]
            store.remove(msg_id)
    store.seal()


def test_commits_in_one_thread_and_work_in_another_do_not_disturb_each_other(path, scale):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=False, file_size_limit=100_000, cache_bytes=10_000)
    lock = threading.RLock()
    finished = threading.Event()
    failures: list[BaseException] = []

    def commits() -> None:
        try:
            while not finished.is_set():
                with lock:
                    under_way = store.begin_commit()
                if under_way is not None:
                    under_way.run()
                    with lock:
                        under_way.done()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=commits)
    thread.start()
    chance = random.Random(1)
    alive: dict[bytes, int] = {}
    for number in range(scale.scale(20_000)):
        with lock:
            size = 200_000 if number % 100 == 99 else chance.randrange(5000)
            alive[write(store, number, size)] = number
            msg_id = chance.choice(list(alive)[-50:])
            expected = alive[msg_id]
            data = store.read(msg_id)
            assert data == body(expected, len(data))
            if len(alive) > 50:
                oldest = next(iter(alive))
                store.remove(oldest)
                del alive[oldest]
    finished.set()
    thread.join()
    commit(store)
    assert failures == []
    for msg_id, number in alive.items():
        data = store.read(msg_id)
        assert data == body(number, len(data))
    store.close()


# ---- the format ----


def test_the_worked_example_of_the_format_is_true():
    # From the source: a compiled module has no docstring.
    text = (Path(__file__).parent.parent / "src/warren/storage/store_format.py").read_text()
    lines = [line for line in text.splitlines() if line.startswith("      00")]
    example = bytes.fromhex("".join(line[12:61] for line in lines))
    assert example == data_header(7, 0) + pack_records([bytes(range(16))], [b"hello"])
