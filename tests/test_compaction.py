"""Compaction gives garbage back to the disk, and never a message with it."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

import pytest

from tests.faulty_disk import FaultyDisk, PowerCut
from warren.kernel.store_table import pack_records
from warren.storage import compaction
from warren.storage.disk import Disk
from warren.storage.message_store import Commit, MessageDamaged, MessageMissing, MessageStore, StoreOptions
from warren.storage.store_format import HEADER_BYTES, RECORD_OVERHEAD_BYTES, data_header
from warren.storage.store_index import LmdbIndex, RefCounts, StoreIndex, TableIndex

LIMIT = 4096
RECORD = 1000 + RECORD_OVERHEAD_BYTES
PER_FILE = 4  # records of RECORD bytes until a file reaches its limit
SMALL: StoreOptions = {"file_size_limit": LIMIT, "cache_bytes": 0}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "msg_store_persistent")


@pytest.fixture(params=["table", "lmdb"])
def new_index(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], StoreIndex]:
    return TableIndex if request.param == "table" else lambda: LmdbIndex(str(tmp_path / "index.lmdb"))


@pytest.fixture
def store(path, new_index):
    store = MessageStore(Disk(), path, index=new_index(), sync=True, **SMALL)
    yield store
    store.close()


def body(number: int, size: int = 1000) -> bytes:
    return random.Random(number).randbytes(size)


def commit(store: MessageStore) -> None:
    under_way = store.begin_commit()
    if under_way is not None:
        under_way.run()
        under_way.done()


def fill(store: MessageStore, files: int) -> list[bytes]:
    """Messages `body(0)`, `body(1)`, ... that fill so many files; the next one begins a new file."""
    ids = []
    for number in range(files * PER_FILE):
        ids.append(store.next_id())
        store.write(ids[-1], body(number), 1)
    commit(store)
    return ids


def keep(store: MessageStore, ids: list[bytes], *kept: int) -> None:
    store.remove_many([msg_id for number, msg_id in enumerate(ids) if number not in kept])


def planned(store: MessageStore) -> list[str] | None:
    """The files that would be merged now."""
    job = compaction.plan(store)
    if job is None:
        return None
    names = [f"{file.number}.{file.generation}" for file in store.data_files() if file.pins]
    job.abort()
    return names


def compact(store: MessageStore) -> bool:
    job = compaction.plan(store)
    if job is None:
        return False
    assert job.run()
    job.commit()
    return True


def open_dirty(disk: Disk, path: str, refs: dict[bytes, int], **options: Unpack[StoreOptions]) -> MessageStore:
    given: StoreOptions = {**SMALL, **options}
    return MessageStore.open_dirty(
        disk, path, index=TableIndex(), sync=True, refs=refs, quarantine=lambda *_: None, **given
    )


def data_names(path: str) -> list[str]:
    return [name for name in sorted(os.listdir(path)) if name.endswith((".rdq", ".rdh"))]


def left(store: MessageStore) -> list[str]:
    """The files when all that are doomed are gone."""
    store.sweep()
    return data_names(store.path)


# ---- when ----


def test_two_neighbours_whose_valid_records_fit_in_one_file_are_merged(store):
    ids = fill(store, 3)
    keep(store, ids, 0, 5, 8, 9)
    assert planned(store) == ["0.0", "1.0"]


def test_nothing_is_merged_up_to_the_garbage_fraction(store):
    ids = fill(store, 4)
    keep(store, ids, 0, 1, 4, 5, 8, 9, 12, 13)
    assert store.garbage().garbage_fraction == 0.5
    assert planned(store) is None
    store.remove(ids[0])
    assert planned(store) == ["0.0", "1.0"]


def test_nothing_is_merged_below_three_files(store):
    ids = fill(store, 2)
    keep(store, ids, 0, 4)
    assert planned(store) is None
    store.write(store.next_id(), body(99), 1)
    commit(store)
    assert planned(store) == ["0.0", "1.0"]


def test_files_that_do_not_fit_in_one_are_not_merged(store):
    store.garbage_fraction = 0.2
    ids = fill(store, 3)
    keep(store, ids, 0, 1, 4, 5, 6, 8, 9, 10)
    assert [file.valid // RECORD for file in store.data_files()] == [2, 3, 3]
    assert planned(store) is None
    store.remove_many([ids[5], ids[6]])
    assert planned(store) == ["0.0", "1.0"]


def test_only_neighbours_are_merged(store):
    ids = fill(store, 5)
    # Between two nearly empty files stands one that fits to neither.
    keep(store, ids, 0, 4, 5, 6, 8, 16)
    store.write(store.next_id(), body(99), 1)
    commit(store)
    assert [file.valid // RECORD for file in store.data_files()] == [1, 3, 1, 1, 1]
    assert planned(store) == ["2.0", "4.0"]
    store.remove(ids[16])
    assert planned(store) is None


def test_a_large_body_is_no_neighbour(store):
    ids = fill(store, 1)
    large = store.next_id()
    store.write_large(large, body(50, 1_100_000), 1)
    ids += fill(store, 2)
    keep(store, ids, 0, 4, 8)
    assert planned(store) is None  # the large body is most of the store, and all of it is valid
    store.garbage_fraction = 0.001
    assert planned(store) == ["0.0", "2.0"]


def test_of_several_pairs_the_one_that_frees_most_is_merged(store):
    ids = fill(store, 4)
    keep(store, ids, 0, 1, 4, 8, 12)
    assert planned(store) == ["1.0", "2.0"]


def test_the_current_file_and_pinned_files_are_not_merged(store):
    ids = fill(store, 3)
    ids += [store.next_id() for _ in range(2)]
    for msg_id in ids[-2:]:
        store.write(msg_id, body(0), 1)
    commit(store)
    keep(store, ids, 0, 8, 12)
    assert [(file.number, file.sealed) for file in store.data_files()] == [(0, True), (2, True), (3, False)]
    first = store.data_files()[0]
    store.pin(first)
    assert planned(store) is None
    store.unpin(first)
    assert planned(store) == ["0.0", "2.0"]


def test_there_is_one_compaction_at_a_time(store):
    ids = fill(store, 6)
    keep(store, ids, 0, 4, 8, 12, 16, 20)
    job = compaction.plan(store)
    assert job is not None
    assert compaction.plan(store) is None
    job.abort()
    assert compaction.plan(store) is not None


# ---- what ----


def test_a_merged_file_has_the_lower_number_and_a_new_generation(store):
    ids = fill(store, 4)
    keep(store, ids, 1, 3, 6, 9, 13)
    assert compact(store)
    assert [(file.number, file.generation, file.valid // RECORD) for file in store.data_files()] == [
        (0, 0, 2),
        (1, 1, 2),
        (3, 0, 1),
    ]
    assert left(store) == ["0.0.rdh", "0.0.rdq", "1.1.rdh", "1.1.rdq", "3.0.rdh", "3.0.rdq"]
    assert [store.read(ids[number]) for number in (1, 3, 6, 9, 13)] == [body(n) for n in (1, 3, 6, 9, 13)]
    assert store.garbage() == (3, 10 * RECORD, 5 * RECORD)


def test_compaction_goes_on_until_less_than_the_fraction_is_garbage(store):
    ids = fill(store, 20)
    kept = list(range(0, 80, 8))
    keep(store, ids, *kept)
    rounds = 0
    while compact(store):
        rounds += 1
    assert rounds > 3
    assert store.garbage().garbage_fraction <= 0.5
    assert [store.read(ids[number]) for number in kept] == [body(number) for number in kept]
    store.remove_many([ids[number] for number in kept])
    assert left(store) == []
    assert store.garbage() == (0, 0, 0)


def test_references_stay_with_a_message_that_moves(store):
    ids = fill(store, 3)
    store.add_refs(ids[0], 2)
    store.remove_many(ids[1:4] + ids[5:])
    store.write(store.next_id(), body(99), 1)
    store.write(store.next_id(), body(99), 1)
    commit(store)
    assert compact(store)
    store.remove(ids[0], 2)
    assert store.read(ids[0]) == body(0)
    store.remove(ids[0])
    assert not store.contains(ids[0])
    assert store.read(ids[4]) == body(4)


def test_what_is_removed_while_the_job_runs_is_garbage_of_the_new_file(store):
    ids = fill(store, 3)
    keep(store, ids, 0, 4, 5, 8)
    job = compaction.plan(store)
    assert job.copy_bytes == 3 * RECORD
    store.remove(ids[4])
    assert job.run()
    store.remove(ids[0])
    assert left(store)[:4] == ["0.0.rdh", "0.0.rdq", "0.1.rdh", "0.1.rdq"]
    job.commit()
    assert left(store) == ["0.1.rdh", "0.1.rdq", "2.0.rdh", "2.0.rdq"]
    assert store.garbage() == (2, 7 * RECORD, 2 * RECORD)
    assert store.read(ids[5]) == body(5)
    with pytest.raises(MessageMissing):
        store.read(ids[0])


def test_when_everything_is_removed_while_the_job_runs_no_file_is_left(store):
    ids = fill(store, 3)
    keep(store, ids, 0, 4, 8)
    job = compaction.plan(store)
    job.run()
    store.remove_many(ids)
    job.commit()
    assert left(store) == []
    assert store.garbage() == (0, 0, 0)


def test_old_files_stay_until_their_last_reader_lets_them_go(store, path):
    ids = fill(store, 3)
    keep(store, ids, 0, 4, 8)
    job = compaction.plan(store)
    first, second, _ = store.data_files()
    store.pin(first)
    job.run()
    job.commit()
    assert left(store) == ["0.0.rdh", "0.0.rdq", "0.1.rdh", "0.1.rdq", "2.0.rdh", "2.0.rdq"]
    assert not os.path.exists(second.path)
    assert store.read(ids[0]) == body(0)
    store.unpin(first)
    assert left(store) == ["0.1.rdh", "0.1.rdq", "2.0.rdh", "2.0.rdq"]


def test_an_aborted_job_leaves_everything_as_it_was(store, path):
    ids = fill(store, 3)
    keep(store, ids, 0, 4, 8)
    before = data_names(path), store.garbage()
    job = compaction.plan(store)
    job.run()
    job.abort()
    assert (data_names(path), store.garbage()) == before
    assert compact(store)
    assert store.read(ids[4]) == body(4)


def test_a_job_that_did_not_run_cannot_be_committed(store):
    ids = fill(store, 3)
    keep(store, ids, 0, 4, 8)
    job = compaction.plan(store)
    with pytest.raises(RuntimeError, match="did not run"):
        job.commit()
    job.abort()


def test_a_damaged_record_ends_the_job_and_its_file_is_left_alone(store, path):
    ids = fill(store, 3)
    keep(store, ids, 0, 2, 4, 8, 9)
    file = Path(path) / "0.0.rdq"
    data = bytearray(file.read_bytes())
    data[HEADER_BYTES + 2 * RECORD + 500] ^= 1
    file.write_bytes(data)
    job = compaction.plan(store)
    assert job.run() is False
    assert job.damaged is not None
    assert job.damaged[1:] == (HEADER_BYTES + 2 * RECORD, RECORD)
    job.abort()
    assert planned(store) == ["1.0", "2.0"]
    assert store.read(ids[0]) == body(0)
    with pytest.raises(MessageDamaged):
        store.read(ids[2])


def test_a_file_without_a_hint_file_is_merged_by_the_rows_of_the_index(store, path):
    ids = fill(store, 3)
    keep(store, ids, 0, 5, 7, 8)
    os.unlink(os.path.join(path, "1.0.rdh"))
    assert compact(store)
    assert [store.read(ids[number]) for number in (0, 5, 7)] == [body(0), body(5), body(7)]


def test_a_compacted_store_stops_and_starts_cleanly(path, new_index):
    store = MessageStore(Disk(), path, index=new_index(), sync=True, **SMALL)
    ids = fill(store, 4)
    keep(store, ids, 0, 5, 9, 13)
    assert compact(store)
    terms = store.save_terms()
    totals = store.garbage()
    store.close()
    store = MessageStore.open_clean(Disk(), path, index=new_index(), sync=True, terms=terms, **SMALL)
    assert store.garbage() == totals
    assert [store.read(ids[number]) for number in (0, 5, 9, 13)] == [body(n) for n in (0, 5, 9, 13)]
    store.close()


def test_commits_compactions_and_work_in_three_threads_do_not_disturb_each_other(path, scale):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=False, file_size_limit=50_000, cache_bytes=0)
    lock = threading.RLock()
    finished = threading.Event()
    failures: list[BaseException] = []
    compactions = 0

    def repeat(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                while not finished.is_set():
                    work()
            except BaseException as error:
                failures.append(error)

        return run

    def commits() -> None:
        with lock:
            under_way = store.begin_commit()
        if under_way is not None:
            under_way.run()
            with lock:
                under_way.done()

    def compacts() -> None:
        nonlocal compactions
        with lock:
            job = compaction.plan(store)
        if job is not None:
            assert job.run(sync=False)
            with lock:
                job.commit()
            store.sweep()
            compactions += 1

    threads = [threading.Thread(target=repeat(work)) for work in (commits, compacts)]
    for thread in threads:
        thread.start()
    chance = random.Random(1)
    alive: dict[bytes, int] = {}
    written = 0
    while (written < scale.scale(20_000) or compactions < 10) and not failures:
        with lock:
            msg_id = store.next_id()
            store.write(msg_id, body(written), 1)
            alive[msg_id] = written
            written += 1
            chosen = chance.choice(list(alive)[-200:])
            assert store.read(chosen) == body(alive[chosen])
            if len(alive) > 200:
                # Mostly old ones, but some stay: garbage with valid records between.
                gone = list(alive)[chance.randrange(100)]
                store.remove(gone)
                del alive[gone]
    finished.set()
    for thread in threads:
        thread.join()
    commit(store)
    assert failures == []
    for msg_id, number in alive.items():
        assert store.read(msg_id) == body(number)
    assert store.garbage().valid_bytes == len(alive) * RECORD
    store.close()


# ---- how fast ----


def test_the_copy_keeps_to_its_rate(path):
    store = MessageStore(Disk(), path, index=TableIndex(), sync=False, cache_bytes=0)
    ids = []
    for number in range(120):
        ids.append(store.next_id())
        store.write(ids[-1], body(number, 400_000), 1)
        commit(store)
    store.remove_many([msg_id for number, msg_id in enumerate(ids) if number % 6])
    job = compaction.plan(store)
    now = 0.0
    waits: list[float] = []

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            assert timeout is not None
            waits.append(timeout)
            now += timeout
            return False

    job._stopped = Waits()
    copied = job.copy_bytes
    assert job.run(bytes_per_second=1_000_000, clock=lambda: now)
    assert copied > 4_000_000
    assert now == pytest.approx(copied / 1_000_000)
    assert max(waits) < 2
    job.commit()
    store.close()


def test_a_job_can_be_stopped(store):
    ids = fill(store, 3)
    keep(store, ids, 0, 4, 8)
    job = compaction.plan(store)
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(job.run(bytes_per_second=1)))
    thread.start()
    job.stop()
    thread.join()
    assert outcome == [False]
    job.abort()
    assert store.read(ids[4]) == body(4)


# ---- crashes ----


@pytest.mark.parametrize("mode", ["none", "random", "all", "process"])
def test_a_power_loss_at_any_call_of_a_compaction_loses_nothing(tmp_path, mode, seed):
    chance = random.Random(seed)
    call = 0
    completed = False
    while not completed:
        call += 1
        disk = FaultyDisk(tmp_path / f"disk{call}")
        store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, **SMALL)
        ids = fill(store, 4)
        kept = (0, 5, 9, 10, 13)
        keep(store, ids, *kept)
        disk.crash_at(call, tear=chance.randrange(2000))
        with contextlib.suppress(PowerCut):
            while compact(store):
                store.sweep()
            completed = True
        after_disk = disk.crash(chance, mode)
        wanted = {ids[number]: number for number in kept}
        after = open_dirty(after_disk, store.path, dict.fromkeys(wanted, 1))
        assert after.missing == []
        assert {msg_id: after.read(msg_id) for msg_id in wanted} == {i: body(n) for i, n in wanted.items()}
        assert after.garbage().valid_bytes == len(kept) * RECORD
        # The next life can go on where this one ended.
        while compact(after):
            pass
        assert {msg_id: after.read(msg_id) for msg_id in wanted} == {i: body(n) for i, n in wanted.items()}
    assert call > 10


def test_old_files_go_only_when_the_name_of_the_new_one_is_safe(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    store = MessageStore(disk, f"{disk.root}/store", index=TableIndex(), sync=True, **SMALL)
    ids = fill(store, 3)
    keep(store, ids, 0, 5, 8)
    assert compact(store)
    store.sweep()
    for outcome in range(50):
        after_disk = disk.clone().crash(random.Random(outcome), "random")
        after = open_dirty(after_disk, store.path, {ids[0]: 1, ids[5]: 1, ids[8]: 1})
        assert after.missing == []


def test_a_generation_left_of_a_crash_is_not_written_over(path):
    os.makedirs(path)
    ids = [number.to_bytes(16, "big") for number in range(5)]
    bodies = [body(0), body(1), body(2, 1_100_000), body(3), body(4)]
    for name, number, generation, some in [("0.0", 0, 0, (0, 1)), ("0.1", 0, 1, (2,)), ("1.0", 1, 0, (3, 4))]:
        records = pack_records([ids[n] for n in some], [bodies[n] for n in some])
        (Path(path) / f"{name}.rdq").write_bytes(data_header(number, generation) + records)
    store = open_dirty(Disk(), path, {ids[0]: 1, ids[2]: 1, ids[3]: 1}, garbage_fraction=0.0001)
    commit(store)
    assert compact(store)
    assert [(file.number, file.generation) for file in store.data_files()] == [(0, 1), (0, 2)]
    assert [store.read(ids[n]) for n in (0, 2, 3)] == [bodies[0], bodies[2], bodies[3]]
    store.close()


class Model:
    """What the store must hold, and a life of random work, compactions and crashes that checks it."""

    def __init__(self, chance: random.Random, tmp_path: Path, new_index: Callable[[], StoreIndex]) -> None:
        self.chance = chance
        self.disk = FaultyDisk(tmp_path / "disk")
        self.path = f"{self.disk.root}/store"
        self.new_index = new_index
        self.options: StoreOptions = {"file_size_limit": LIMIT, "cache_bytes": chance.choice((0, 5000))}
        self.bodies: dict[bytes, bytes] = {}
        self.refs: dict[bytes, int] = {}  # of messages that a reader must find
        self.uncertain: set[bytes] = set()  # not committed: a crash may take them
        self.commit: Commit | None = None
        self.job: compaction.Job | None = None
        self.job_is_whole = False
        self.crashes = self.compactions = self.clean_stops = 0
        self.store = MessageStore(self.disk, self.path, index=new_index(), sync=True, **self.options)

    def write(self) -> None:
        payload = self.chance.randbytes(self.chance.choice((0, 100, 1000, 3000)))
        msg_id = self.store.next_id()
        count = self.chance.randrange(1, 4)
        cut = self.chance.randrange(len(payload) + 1)
        self.store.write(msg_id, self.chance.choice((payload, (payload[:cut], payload[cut:]))), count)
        self._written(msg_id, payload, count)

    def write_large(self) -> None:
        payload = self.chance.randbytes(5000)
        large = self.store.begin_large(self.store.next_id(), len(payload))
        large.append(payload[:2000])
        if self.chance.random() < 0.3:
            large.abort()
            return
        large.append(payload[2000:])
        synced = self.chance.random() < 0.5
        large.finish(sync=synced)
        self.store.adopt(large, 2)
        self._written(large.msg_id, payload, 2)

    def _written(self, msg_id: bytes, payload: bytes, count: int) -> None:
        self.bodies[msg_id] = payload
        self.refs[msg_id] = count
        self.uncertain.add(msg_id)

    def remove(self) -> None:
        if self.refs:
            batch = self.chance.choices(list(self.refs), k=self.chance.choice((1, 2, 10)))
            # An id is not removed more often than it has references: the engine keeps count.
            batch = [msg_id for n, msg_id in enumerate(batch) if batch[:n].count(msg_id) < self.refs[msg_id]]
            for msg_id in batch:
                self.refs[msg_id] -= 1
                if self.refs[msg_id] == 0:
                    del self.refs[msg_id]
                    self.uncertain.discard(msg_id)
            # The journal has it already: should power go in this call, nobody asks for these messages again.
            self.store.remove_many(batch)

    def add_refs(self) -> None:
        if self.refs:
            msg_id = self.chance.choice(list(self.refs))
            self.store.add_refs(msg_id, 2)
            self.refs[msg_id] += 2

    def begin_commit(self) -> None:
        if self.commit is None:
            self.commit = self.store.begin_commit()
            self.in_commit = set(self.uncertain)

    def end_commit(self) -> None:
        if self.commit is not None:
            self.commit.run()
            self.commit.done()
            self.commit = None
            self.uncertain -= self.in_commit

    def begin_compaction(self) -> None:
        if self.job is None:
            self.job = compaction.plan(self.store)
            self.job_is_whole = False

    def run_compaction(self) -> None:
        if self.job is not None:
            self.job_is_whole = self.job.run()
            assert self.job_is_whole

    def end_compaction(self) -> None:
        if self.job is not None:
            if self.job_is_whole:
                self.job.commit()
                self.compactions += 1
            else:
                self.job.abort()
            self.job = None

    def sweep(self) -> None:
        self.store.sweep()

    def stop_and_start(self) -> None:
        self.end_commit()
        self.end_compaction()
        terms = self.store.save_terms()
        self.uncertain.clear()
        self.store.close()
        self.store = MessageStore.open_clean(
            self.disk, self.path, index=self.new_index(), sync=True, terms=terms, **self.options
        )
        self.clean_stops += 1

    def crash(self) -> None:
        mode = self.chance.choice(("none", "random", "all", "process"))
        self.store.close()
        self.disk = self.disk.crash(self.chance, mode, zero_tails=mode == "random")
        self.commit = self.job = None
        refs = RefCounts()
        for msg_id, count in self.refs.items():
            refs.add(msg_id, count)
        self.store = MessageStore.open_dirty(
            self.disk,
            self.path,
            index=self.new_index(),
            sync=True,
            refs=refs,
            quarantine=lambda *_: None,
            **self.options,
        )
        assert self.uncertain.issuperset(self.store.missing)
        for msg_id in self.store.missing:
            del self.refs[msg_id]
        # What was found is not safe yet, if only a process was killed: the next commit syncs it.
        self.uncertain.difference_update(self.store.missing)
        self.check()
        self.crashes += 1

    def check(self) -> None:
        assert {msg_id: self.store.read(msg_id) for msg_id in self.refs} == {i: self.bodies[i] for i in self.refs}
        for msg_id in self.bodies.keys() - self.refs.keys():
            assert not self.store.contains(msg_id)
        self.bodies = {msg_id: self.bodies[msg_id] for msg_id in self.refs}
        flying = self.store._flying
        stored = [len(self.bodies[msg_id]) for msg_id in self.refs if msg_id not in flying]
        totals = self.store.garbage()
        assert totals.valid_bytes == sum(stored) + RECORD_OVERHEAD_BYTES * len(stored)
        files = self.store.data_files()
        assert totals.valid_bytes == sum(file.valid for file in files)
        assert totals.total_bytes == sum(file.record_bytes for file in files)
        assert all(file.valid or file.pins or not file.sealed for file in files)

    def live(self, steps: int) -> None:
        works = [
            (20, self.write),
            (1, self.write_large),
            (12, self.remove),
            (2, self.add_refs),
            (5, self.begin_commit),
            (5, self.end_commit),
            (4, self.begin_compaction),
            (4, self.run_compaction),
            (4, self.end_compaction),
            (1, self.check),
            (1, self.sweep),
            (0.3, self.stop_and_start),
            (0.5, self.crash),
        ]
        weights = [weight for weight, _ in works]
        for _ in range(steps):
            self.chance.choices(works, weights)[0][1]()
        self.end_commit()
        self.crash()


def test_a_random_life_keeps_every_message(tmp_path, new_index, seed, scale, record_property):
    totals = [0, 0, 0]
    for life in range(scale.scale(100)):
        model = Model(random.Random(seed + life), tmp_path / str(life), new_index)
        model.live(1000)
        totals = [a + b for a, b in zip(totals, (model.crashes, model.compactions, model.clean_stops), strict=True)]
        model.store.close()
    for name, value in zip(("crashes", "compactions", "clean stops"), totals, strict=True):
        record_property(name, value)
        assert value > 0


def test_power_can_go_at_any_call_of_a_random_life(tmp_path, seed, scale):
    for life in range(scale.scale(1000)):
        chance = random.Random(seed + life)
        model = Model(chance, tmp_path / str(life), TableIndex)
        model.disk.crash_at(chance.randrange(1, 600), tear=chance.randrange(1500))
        try:
            model.live(300)
        except PowerCut:
            model.disk.is_off = False  # `crash` closes what it can, as a machine without power does
            model.crash()
        model.store.close()
