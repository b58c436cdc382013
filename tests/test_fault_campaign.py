"""The fault campaign: one run that touches everything (`fault_workload.py`), and every way in which a disk can end it.

    power     before each call of the disk the machine loses power: of what was not synced nothing is left, or all of it,
              or any part in any order; or only the process dies
    tears     each write is torn at each byte
    errors    each call fails, with EIO and with ENOSPC
    again     power is lost a second time while the store recovers from the first loss

After each of them the store opens again, a confirmed message is there, an acked one is not, a transaction is whole, and
the store can be worked with.

For power and tears the run happens once: before a call the disk is cloned, and the clone loses power. An error changes
what the engine does next, so for each one the run is done anew.

A failure names the call, the mode and the seed. `WARREN_FAULT_AT=<call>` with `--hypothesis-seed=<seed>` repeats it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import warren.storage
from tests.fault_workload import SCRIPT, SETTINGS, Driver, Witness, check, in_parts, open_store, work_on
from tests.faulty_disk import Call, FaultyDisk, Mode
from warren.errors import DiskFullError, StoreFailedError
from warren.kernel.entry import Entry
from warren.storage.disk import Disk
from warren.storage.snapshot import copy_files
from warren.storage.stage_file import StageReader, StageWriter, stage_path, staged_bytes
from warren.storage.store_format import HEADER_BYTES, data_header

ONLY_AT = int(os.environ.get("WARREN_FAULT_AT", "0"))
ALL = 1 << 30
MUTATIONS = frozenset(
    ("create", "pwrite", "sync", "rename", "link", "unlink", "mkdir", "rmdir", "sync_dir", "sync_all", "reserve")
)
# What a full disk can refuse. (Copy-on-write filesystems need room to unlink.)
NEEDS_ROOM = frozenset(
    ("create", "pwrite", "sync", "rename", "link", "unlink", "mkdir", "sync_dir", "sync_all", "reserve")
)


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Thousands of recoveries have much to say."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Path]:
    """A directory for the real files (SQLite's) of many disks; in memory where there is a place for it."""
    place = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=place if os.access(place, os.W_OK) else tmp_path, prefix="warren-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def the_run(disk: FaultyDisk, witness: Witness, **options: Any) -> Driver:
    """The driver of a run that is not begun yet."""
    return Driver(disk, f"{disk.root}/data", witness, **options)


def do_all(driver: Driver) -> None:
    for step in SCRIPT:
        driver.do(step)


def clean_up(driver: Driver) -> None:
    """Let go of what is outside of the simulated disk: SQLite, and the lock."""
    if driver.store is not None:
        driver.store.abandon()
        driver.store = None


class Crashes(list[Call]):
    """The trace of a disk. Before a call it shows what a crash at this moment would leave to `look`."""

    def __init__(self, disk: FaultyDisk, witness: Witness, look: Callable[[int, Call, Call | None], None]) -> None:
        super().__init__()
        self._disk = disk
        self._witness = witness
        self._look = look
        self._seen: tuple[int, int, int] | None = None
        self._changes = 0
        disk.trace = self

    def append(self, call: Call) -> None:
        before = self[-1] if self else None
        super().append(call)
        state = (self._changes, self._witness.version, len(self._witness.unsure))
        if state != self._seen:  # else it is as it was before the last call
            self._seen = state
            self._look(len(self), call, before)
        if call.kind in MUTATIONS:
            self._changes += 1


class Campaign:
    """What one test looks at, and what it counts."""

    def __init__(self, arena: Path, seed: int) -> None:
        self.arena = arena
        self.seed = seed
        self.crashes = 0
        self.followed = 0
        self.snapshots = 0
        self._roots = 0

    def root(self) -> str:
        self._roots += 1
        return str(self.arena / str(self._roots))

    def chance(self, *what: object) -> random.Random:
        """The same for the same crash, whatever else the run looks at."""
        return random.Random(repr((self.seed, *what)))

    def crash(
        self,
        disk: FaultyDisk,
        witness: Witness,
        mode: Mode,
        where: str,
        *,
        tear: int | None = None,
        zero_tails: bool = False,
        follow: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        """A copy of `disk` crashes; what is left must hold what the witness was promised."""
        root = self.root()
        name = f"{where}, mode {mode}{'' if tear is None else f', torn at byte {tear}'}, seed {self.seed}"
        twin = disk.clone(root)
        twin.trace_sites = False
        after = twin.crash(self.chance(name), mode, tear=tear, zero_tails=zero_tails)
        try:
            self.verify(after, witness, name, follow=follow, options=options or {})
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def verify(
        self, disk: FaultyDisk, witness: Witness, name: str, *, follow: bool = False, options: dict[str, Any]
    ) -> None:
        self.crashes += 1
        data = f"{disk.root}/data"
        try:
            store = open_store(disk, data, **options)
            try:
                check(store, witness)
                if follow:
                    self.followed += 1
                    store = work_on(store, disk, data, witness.copy(), **options)
            finally:
                store.abandon()
            if follow:
                self.check_snapshots(disk, witness)
        except Exception as error:
            raise AssertionError(f"after {name}: {type(error).__name__}: {error}") from error

    def check_snapshots(self, disk: FaultyDisk, witness: Witness) -> None:
        for name, then in witness.snapshots:
            self.snapshots += 1
            store = open_store(disk, f"{disk.root}/{name}")
            try:
                check(store, then)
            finally:
                store.abandon()


def describe(n: int, call: Call) -> str:
    return f"call {n} ({call.kind} {os.path.basename(call.path)} at {call.site})"


# ---- the run itself ----


def test_the_run_reaches_every_corner_without_faults(arena):
    disk = FaultyDisk(arena / "disk")
    witness = Witness()
    driver = the_run(disk, witness)
    for step in SCRIPT:
        driver.do(step)
        check(driver.open, witness, live=True)
    clean_up(driver)
    kinds = {call.kind for call in disk.trace}
    assert kinds >= MUTATIONS
    endings = {os.path.splitext(call.path)[1] for call in disk.trace}
    assert endings >= {".wal", ".qi", ".qs", ".qa", ".rdq", ".rdh", ".part"}
    assert any(call.path.endswith("0.1.rdq") for call in disk.trace), "no two files of the message store were merged"
    assert any("msg_store_transient" in call.path and call.kind == "pwrite" for call in disk.trace)


def test_the_run_is_the_same_every_time(arena):
    traces = []
    for name in ("one", "two"):
        disk = FaultyDisk(arena / name)
        driver = the_run(disk, Witness())
        do_all(driver)
        clean_up(driver)
        traces.append([(call.kind, call.path.replace(disk.root, "")) for call in disk.trace])
    assert traces[0] == traces[1]


# ---- power ----


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("sync_all_above", [SETTINGS.sync_all_above, 64])
def test_power_loss_before_any_call_keeps_every_promise(arena, scale, seed, record_property, sync_all_above):
    """64: each file and directory is synced by itself, never all by one syncfs."""
    campaign = Campaign(arena, seed)
    options = {"settings": dataclasses.replace(SETTINGS, sync_all_above=sync_all_above)}
    disk = FaultyDisk(arena / "disk")
    disk.trace_sites = True
    witness = Witness()
    every = 1 if scale.full else 10
    looked = 0

    def look(n: int, call: Call, before: Call | None) -> None:
        nonlocal looked
        if n < 2 or (n != ONLY_AT if ONLY_AT else (n + seed) % every):
            return
        looked += 1
        where = describe(n, call)
        campaign.crash(disk, witness, "none", where, follow=looked % 3 == 0, options=options)
        campaign.crash(disk, witness, "all", where, follow=looked % 3 == 1, options=options)
        campaign.crash(disk, witness, "random", where, follow=looked % 3 == 2, options=options)
        campaign.crash(disk, witness, "random", f"{where} with holes", zero_tails=True, options=options)

    Crashes(disk, witness, look)
    driver = the_run(disk, witness, **options)
    do_all(driver)
    clean_up(driver)
    record_property("calls", len(disk.trace))
    record_property("power losses", campaign.crashes)
    record_property("stores worked on with afterwards", campaign.followed)
    record_property("snapshots opened", campaign.snapshots)


@pytest.mark.timeout(1500)
def test_a_killed_process_and_then_a_power_loss_keep_every_promise(arena, scale, seed, record_property):
    """What a killed process left in the page cache looks like what is on the platter, and is not."""
    campaign = Campaign(arena, seed)
    disk = FaultyDisk(arena / "disk")
    disk.trace_sites = True
    witness = Witness()
    every = 1 if scale.full else 10

    def look(n: int, call: Call, before: Call | None) -> None:
        if n < 2 or (n != ONLY_AT if ONLY_AT else (n + seed) % every):
            return
        root = campaign.root()
        name = f"{describe(n, call)}, mode process, seed {seed}"
        after = disk.clone(root).crash(mode="process")
        after.trace_sites = False
        try:
            store = open_store(after, f"{root}/data")
            try:
                check(store, witness)
                for mode in ("none", "random"):
                    campaign.crash(after, witness, mode, f"{name}, opened again")
                # What was in doubt moves on, and what it was made of goes.
                store.checkpoint(seal=True, carry_below=(None, 0, ALL)[n % 3])
                for mode in ("none", "random"):
                    campaign.crash(after, witness, mode, f"{name}, opened again, checkpointed")
                store.checkpoint(seal=True)
                store.close()
                for mode in ("none", "random"):
                    campaign.crash(after, witness, mode, f"{name}, opened again, closed", follow=mode == "none")
            finally:
                store.abandon()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        finally:
            shutil.rmtree(root, ignore_errors=True)

    Crashes(disk, witness, look)
    driver = the_run(disk, witness)
    do_all(driver)
    clean_up(driver)
    record_property("crashes", campaign.crashes)


@pytest.mark.timeout(1500)
def test_a_second_power_loss_during_recovery_keeps_every_promise(arena, scale, seed, record_property):
    campaign = Campaign(arena, seed)
    disk = FaultyDisk(arena / "disk")
    disk.trace_sites = True
    witness = Witness()
    every = 37 if scale.full else 370

    def look(n: int, call: Call, before: Call | None) -> None:
        if n < 2 or (n != ONLY_AT if ONLY_AT else (n + seed) % every):
            return
        for first in ("none", "all", "random", "process"):
            root = campaign.root()
            name = f"{describe(n, call)}, mode {first}, seed {seed}"
            after = disk.clone(root).crash(campaign.chance(name), first)

            def look_again(
                m: int, call: Call, before: Call | None, name: str = name, after: FaultyDisk = after
            ) -> None:
                for mode in ("none", "all", "random"):
                    campaign.crash(after, witness, mode, f"{name}, and then {describe(m, call)}")

            Crashes(after, witness, look_again)
            open_store(after, f"{root}/data").abandon()
            shutil.rmtree(root, ignore_errors=True)

    Crashes(disk, witness, look)
    driver = the_run(disk, witness)
    do_all(driver)
    clean_up(driver)
    record_property("crashes during recovery", campaign.crashes)


@pytest.mark.timeout(300)
def test_a_killed_process_loses_nothing_in_os_durability(arena, scale, seed, record_property):
    """And after a power loss, of which it promises nothing, it opens again."""
    campaign = Campaign(arena, seed)
    disk = FaultyDisk(arena / "disk")
    disk.trace_sites = True
    witness = Witness()
    options = {"durability": "os"}
    every = 3 if scale.full else 30

    def look(n: int, call: Call, before: Call | None) -> None:
        if n < 2 or (n + seed) % every:
            return
        campaign.crash(disk, witness, "process", describe(n, call), follow=n % 2 == 0, options=options)
        root = campaign.root()
        after = disk.clone(root).crash(campaign.chance(n), "random")
        store = open_store(after, f"{root}/data", **options)
        store.close()
        shutil.rmtree(root, ignore_errors=True)

    Crashes(disk, witness, look)
    driver = the_run(disk, witness, **options)
    do_all(driver)
    clean_up(driver)
    record_property("crashes", campaign.crashes)


# ---- torn writes ----


def tear_writes(part: int, parts: int, arena: Path, seed: int, most: int) -> tuple[int, int]:
    """Tear each write of the run that is in this part, at `most` bytes at most: writes, tears."""
    campaign = Campaign(arena / f"part{part}", seed)
    disk = FaultyDisk(campaign.root())
    disk.trace_sites = True
    witness = Witness()
    writes = 0

    def look(n: int, call: Call, before: Call | None) -> None:
        nonlocal writes
        if before is None or before.kind != "pwrite" or n % parts != part or (ONLY_AT and n != ONLY_AT):
            return
        size = disk.last_write_size
        if size < 2:
            return
        writes += 1
        places: Any = range(1, size)
        if size > most:
            places = sorted(campaign.chance("tear", n).sample(places, most))
        # The real files are the same for all of them: starts that only look change nothing but the count of starts.
        root = campaign.root()
        frozen = disk.clone(root)
        frozen.trace_sites = False
        for byte in places:
            name = f"{describe(n, call)}, torn at byte {byte} of {size}, seed {seed}"
            after = frozen.clone().crash(campaign.chance(name), "all", tear=byte)
            campaign.verify(after, witness, name, options={})
        shutil.rmtree(root, ignore_errors=True)

    Crashes(disk, witness, look)
    driver = the_run(disk, witness)
    do_all(driver)
    clean_up(driver)
    return writes, campaign.crashes


@pytest.mark.timeout(3000)
def test_a_write_torn_at_any_byte_keeps_every_promise(arena, scale, seed, record_property):
    parts = (os.cpu_count() or 1) if scale.full else 1
    writes, tears = in_parts(parts, tear_writes, arena, seed, ALL if scale.full else 2)
    record_property("writes torn", writes)
    record_property("bytes at which a write was torn", tears)


# ---- errors ----

Fault = tuple[int, int]  # number of the call, errno


@dataclasses.dataclass
class Outcome:
    faults: tuple[Fault, ...]
    kind: str  # of the call that failed last
    how: str  # survived, refused, failed
    sites: dict[str, int]  # call sites that were reached, and the number of one of their calls


def fail(root: str, faults: tuple[Fault, ...], seed: int) -> Outcome:
    """The run, in which some calls fail; then a crash, and a check of all promises."""
    chance = random.Random(repr((seed, faults)))
    disk = FaultyDisk(root)
    disk.trace_sites = True
    disk.rng.seed(repr((seed, faults)))
    witness = Witness()
    driver = the_run(disk, witness)
    driver.patient = True
    for n, error in faults:
        disk.fail_at(n, error)
    mode = chance.choice(["none", "all", "random", "process"])
    last = faults[-1][0]
    try:
        try:
            do_all(driver)
            check(driver.open, witness, live=True)
            how = "refused" if driver.refused else "survived"
        except StoreFailedError:
            how = "failed"
            if driver.store is not None and driver.store.committer.failed is not None:
                confirm_nothing_more(driver)
        clean_up(driver)
        after = disk.crash(chance, mode)
        store = open_store(after, f"{root}/data")
        try:
            check(store, witness)
            store = work_on(store, after, f"{root}/data", witness.copy())
        finally:
            store.abandon()
    except Exception as broken:
        what = " and ".join(
            f"{describe(n, disk.trace[n - 1]) if n <= len(disk.trace) else n} with {errno.errorcode[error]}"
            for n, error in faults
        )
        raise AssertionError(
            f"failed: {what}; then mode {mode}, seed {seed}: {type(broken).__name__}: {broken}"
        ) from broken
    finally:
        clean_up(driver)
        shutil.rmtree(root, ignore_errors=True)
    kind = disk.trace[last - 1].kind if last <= len(disk.trace) else ""
    return Outcome(faults, kind, how, {call.site: n for n, call in enumerate(disk.trace, 1)})


def confirm_nothing_more(driver: Driver) -> None:
    """A store that failed says so to everybody, until it is opened again."""
    store = driver.open
    with pytest.raises(StoreFailedError):
        store.sync()
    with pytest.raises(StoreFailedError):
        store.declare("new")
    for queue in store.queues.values():
        with pytest.raises(StoreFailedError):
            store.reserve(queue, 1)


class Failures:
    """Single failures, at one call of each call site at least, and a sample of the others; at all calls in a full run."""

    def __init__(self, arena: Path, full: bool, seed: int) -> None:
        self._arena = arena
        self._full = full
        self._seed = seed
        disk = FaultyDisk(arena / "plain")
        disk.trace_sites = True
        driver = the_run(disk, Witness())
        do_all(driver)
        clean_up(driver)
        self.calls = list(disk.trace)
        self._done: dict[int, list[Outcome]] = {}

    def single(self, error: int) -> list[Outcome]:
        if error not in self._done:
            self._done[error] = [self.run(((n, error),)) for n in self._numbers(error)]
        return self._done[error]

    def run(self, faults: tuple[Fault, ...]) -> Outcome:
        return fail(str(self._arena / "-".join(str(n) for n, _ in faults)), faults, self._seed)

    def _numbers(self, error: int) -> list[int]:
        if ONLY_AT:
            return [ONLY_AT]
        sites: dict[tuple[str, str], list[int]] = {}
        for n, call in enumerate(self.calls, 1):
            if error != errno.ENOSPC or call.kind in NEEDS_ROOM:
                sites.setdefault((call.site, call.kind), []).append(n)
        chance = random.Random(self._seed)
        chosen = {chance.choice(numbers) for numbers in sites.values()}
        chosen.update(n for numbers in sites.values() for n in numbers if self._full or (n + self._seed) % 40 == 0)
        return sorted(chosen)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, scale) -> Iterator[Failures]:
    logging.disable(logging.CRITICAL)
    place = Path("/dev/shm")
    arena = tempfile.mkdtemp(dir=place if os.access(place, os.W_OK) else tmp_path_factory.mktemp("failures"))
    yield Failures(Path(arena), scale.full, int(request.config.option.hypothesis_seed))
    shutil.rmtree(arena, ignore_errors=True)


@pytest.mark.timeout(3000)
def test_a_full_disk_at_any_call_refuses_and_then_goes_on(failures, seed, record_property):
    outcomes = failures.single(errno.ENOSPC)
    record_property("calls failed with ENOSPC", len(outcomes))
    for how in ("survived", "refused", "failed"):
        record_property(how, sum(outcome.how == how for outcome in outcomes))
    # A sync that says ENOSPC leaves it open what is on the platter; that is not a full disk to wait for.
    assert {outcome.kind for outcome in outcomes if outcome.how == "failed"} <= {"sync", "sync_dir", "sync_all"}


@pytest.mark.timeout(3000)
def test_an_error_at_any_call_fails_the_store_or_harms_nothing(failures, seed, record_property):
    outcomes = failures.single(errno.EIO)
    record_property("calls failed with EIO", len(outcomes))
    for how in ("survived", "failed"):
        record_property(how, sum(outcome.how == how for outcome in outcomes))
    # Of these nothing is left open by an error: they are tried again, or done another time.
    harmless = {outcome.kind for outcome in outcomes if outcome.how == "survived"}
    assert harmless >= {"pread", "open_read"}


@pytest.mark.timeout(3000)
def test_every_call_site_was_failed_at_least_once(failures, scale, seed, record_property):
    """Also those that are reached only after a failure: there, two calls fail."""
    if ONLY_AT:
        pytest.skip("WARREN_FAULT_AT looks at one call")
    failed = {call.site for call in failures.calls}
    behind: dict[str, tuple[Fault, Fault]] = {}
    for outcome in failures.single(errno.ENOSPC) + failures.single(errno.EIO):
        for site, n in outcome.sites.items():
            if site not in failed and site not in behind and not site.startswith("reading.py"):
                behind[site] = (outcome.faults[0], (n, errno.EIO))
    for faults in behind.values():
        failures.run(faults)
    failed.update(behind)
    source = call_sites()
    never = {text for text, lines in source.items() if not any(line in failed for line in lines)}
    record_property("call sites", len(source))
    record_property("call sites failed", len(source) - len(never - set(ELSEWHERE)))
    record_property("call sites reached only behind a failure", len(behind))
    known = set(ELSEWHERE) | (set() if scale.full else BEHIND_SOME_FAILURE)
    assert never - known == set()


# Calls of the disk in `storage/` that the run does not come to, and the test that fails them.
_MEMORY = "test_a_start_in_memory_durability_fails_clearly_or_not_at_all"
_QUARANTINE = "test_a_quarantine_that_cannot_be_written_keeps_nobody_from_the_other_messages"
_COPIES = "test_a_start_after_a_killed_compaction_fails_clearly_or_not_at_all"
_HEADERS = "test_a_damaged_header_is_mended_or_reported_again"
_OS = "test_a_write_that_fails_in_os_durability_fails_the_store"
_READERS = "test_a_snapshot_for_readers_fails_clearly_or_is_whole"
_STAGES = "test_a_stage_is_finished_and_whole_or_leaves_nothing"
_BACKUP = "test_a_copy_of_a_store_fails_clearly_or_survives_a_power_loss"
ELSEWHERE = {
    "snapshot.py: disk.replace(os.path.join(target, TRANSIENTS), pack_header(JOURNAL_MAGIC, 0, 0, 0) + bytes(buffer))": (
        _READERS
    ),
    "snapshot.py: disk.make_dirs(target, sync=False)": _BACKUP,
    "snapshot.py: disk.make_dirs(os.path.dirname(copy), sync=False)": _BACKUP,
    "snapshot.py: disk.sync_dir(directory)": _BACKUP,
    "snapshot.py: disk.open_read(path)": _BACKUP,
    "snapshot.py: disk.create(copy)": _BACKUP,
    "snapshot.py: source.pread(_SLICE_BYTES, target.size)": _BACKUP,
    "snapshot.py: target.append(data)": _BACKUP,
    "snapshot.py: target.sync()": _BACKUP,
    "stage_file.py: disk.listdir(directory)": _STAGES,
    "stage_file.py: disk.listdir(stages)": _STAGES,
    "stage_file.py: disk.size(os.path.join(directory, name))": _STAGES,
    "stage_file.py: disk.open_read(path)": _STAGES,
    "stage_file.py: file.pread(_FOOTER.size, end)": _STAGES,
    "stage_file.py: file.pread(length, end - length)": _STAGES,
    "stage_file.py: self._disk.create(self._path + '.tmp')": _STAGES,
    "stage_file.py: self._disk.make_dirs(directory, sync=False)": _STAGES,
    "stage_file.py: self._disk.rename(self._path + '.tmp', self._path)": _STAGES,
    "stage_file.py: self._disk.sync_dir(directory)": _STAGES,
    "stage_file.py: self._disk.unlink(path)": _STAGES,
    "stage_file.py: self._file.append(data)": _STAGES,
    "stage_file.py: self._file.append(pack_header(STAGE_MAGIC, 0))": _STAGES,
    "stage_file.py: self._file.append(text + _FOOTER.pack(len(text), crc32c(text), _FOOTER_MAGIC))": _STAGES,
    "stage_file.py: self._file.pread(min(size, self._end - start), start)": _STAGES,
    "stage_file.py: self._file.sync()": _STAGES,
    "message_store.py: disk.sync_dir(path)": _COPIES,
    "message_store.py: disk.unlink(os.path.join(path, name))": _COPIES,
    "vhost_opening.py: self.disk.listdir(os.path.join(self.root, 'journal'))": _MEMORY,
    "vhost_opening.py: self.disk.remove_tree(os.path.join(self.root, part))": _MEMORY,
    "vhost_opening.py: self.disk.replace(marker, b'')": _MEMORY,
    "vhost_opening.py: self.disk.sync_dir(self.root)": _MEMORY,
    "vhost_opening.py: self.disk.unlink(marker)": _MEMORY,
    "vhost_opening.py: self.disk.walk(kept)": _MEMORY,
    "quarantine.py: log.append(json.dumps(line).encode() + b'\\n')": _QUARANTINE,
    "quarantine.py: self._disk.create(log_path)": _QUARANTINE,
    "quarantine.py: self._disk.create(os.path.join(self._directory, name))": _QUARANTINE,
    "quarantine.py: self._disk.listdir(self._directory)": _QUARANTINE,
    "quarantine.py: self._disk.make_dirs(self._directory)": _QUARANTINE,
    "quarantine.py: self._disk.open(log_path)": _QUARANTINE,
    "quarantine.py: self._disk.open_read(path)": _QUARANTINE,
    "quarantine.py: source.pread(min(length, _MOST_BYTES), offset)": _QUARANTINE,
    "quarantine.py: target.append(data)": _QUARANTINE,
    "journal.py: file.pwrite(memoryview(block), block.base)": _OS,
    "reading.py: file.pread(size, offset)": "test_reading.py",
    "segment.py: file.pwrite(self._header(number, INDEX_MAGIC), 0)": _HEADERS,
    "segment.py: file.sync()": _HEADERS,
}
# A small run has not all first failures behind which these are reached.
BEHIND_SOME_FAILURE = {
    "segment.py: file.pwrite(self._header(number, magic), 0)",
    "store_format.py: self._disk.unlink(self._part_path)",
    "store_format.py: self._disk.unlink(self.path)",
    "vhost_store.py: self.disk.remove_tree(directory)",
    "committer.py: self._disk.unlink(self._reserve_path)",
    "committer.py: self._disk.free_bytes(self._root)",
}


def fail_each_call(arena: Path, work: Callable[[FaultyDisk], None]) -> set[str]:
    """`work`, once for each call of its disk, which fails with EIO; the call sites."""
    sites: set[str] = set()
    n = 0
    while True:
        n += 1
        disk = FaultyDisk(arena / f"each-{n}")
        disk.trace_sites = True
        disk.fail_at(n, errno.EIO)
        try:
            work(disk)
        except Exception as error:
            raise AssertionError(f"{describe(n, disk.trace[n - 1])} failed: {type(error).__name__}: {error}") from error
        if disk.calls < n:
            return sites
        sites.add(disk.trace[n - 1].site)


def reached(sites: set[str], test: str) -> bool:
    source = call_sites()
    return all(sites & set(source[text]) for text, by in ELSEWHERE.items() if by == test)


def test_a_start_in_memory_durability_fails_clearly_or_not_at_all(arena):
    def work(disk: FaultyDisk) -> None:
        root = f"{disk.root}/data"
        for durability in ("memory", "memory", "fsync", "memory"):
            for attempt in (1, 2):
                try:
                    store = open_store(disk, root, durability=durability)
                    store.declare("m")
                    store.close()
                    break
                except StoreFailedError:
                    assert attempt == 1, "one error failed two starts"
                    # A stop that failed leaves a journal, and nobody knows yet that it is empty.
                    durability = "fsync" if durability == "memory" else durability

    assert reached(fail_each_call(arena, work), _MEMORY)


@pytest.mark.parametrize("hinted", [True, False], ids=["synced", "unsynced"])
def test_a_start_after_a_killed_compaction_fails_clearly_or_not_at_all(arena, hinted):
    """It was killed when its copy was written, perhaps also synced, and the original was still there."""

    def work(disk: FaultyDisk) -> None:
        witness = Witness()
        driver = the_run(disk, witness)
        driver.patient = True
        driver.start()
        driver.declare("a")
        driver.publish("a", [900] * 5)
        driver.sync()
        store = f"{driver.open.root}/msg_store_persistent"
        driver.open.abandon()
        with contextlib.suppress(OSError):  # a compaction that fails instead of being killed leaves less
            original = disk.open_read(f"{store}/0.0.rdq").pread(1 << 20, 0)
            copy = disk.create(f"{store}/0.1.rdq")
            copy.pwrite(data_header(0, 1) + original[HEADER_BYTES:], 0)
            if hinted:
                copy.sync()
                disk.create(f"{store}/0.1.rdh")
            disk.create(f"{store}/7.0.rdq.part")  # and a large body was on its way
        driver.start()
        check(driver.open, witness)
        clean_up(driver)
        Campaign(arena, 0).verify(disk.crash(mode="none"), witness, "a killed compaction", follow=True, options={})

    def patient_work(disk: FaultyDisk) -> None:
        with contextlib.suppress(StoreFailedError):
            work(disk)

    assert reached(fail_each_call(arena, patient_work), _COPIES)


def test_a_snapshot_for_readers_fails_clearly_or_is_whole(arena):
    """One with everything in it, also what is in RAM and what a volatile queue holds."""

    def work(disk: FaultyDisk) -> None:
        try:
            store = open_store(disk, f"{disk.root}/data")
            for name, arguments in (("a", {}), ("v", {"x-backing-queue": "volatile"})):
                queue = store.declare(name, arguments=arguments)
                store.reserve(queue, 3)
                with store.lock:
                    first = queue.seqs.take(3)
                    entries = [Entry(first + n, b"\0\0\0\0", bytes(size)) for n, size in enumerate((5, 900, 7))]
                    queue.backing.publish(entries)
            target = store.snapshot(f"{disk.root}/copy", transients=True)
            with contextlib.suppress(OSError):  # the test's own look at the disk failed
                assert disk.exists(f"{target}/manifest.json")
                assert disk.size(f"{target}/transients.wal") > 900
            assert [len(queue.backing) for queue in store.queues.values()] == [3, 3]
            store.close()
        except StoreFailedError:
            pass

    assert reached(fail_each_call(arena, work), _READERS)


def stage_rows(disk: FaultyDisk) -> str | None:
    """Some rows of a sink as a stage, as the data server writes one; its path. None: the disk refused it."""
    writer: StageWriter | None = None
    try:
        writer = StageWriter(disk.root, "guest:w", "7", 0, 0, disk=disk)
        writer.add([b"head"] * 3, [b"one", b"two", b"three"], ["orders"])
        writer.finish()
    except OSError:
        if writer is not None:
            writer.drop()
        return None
    return stage_path(disk.root, writer.name)


def staged_rows(disk: FaultyDisk, path: str) -> list[bytes]:
    reader = StageReader(path, disk)
    try:
        return reader.read(0, 10, 1 << 20).bodies
    finally:
        reader.close()


def test_a_stage_is_finished_and_whole_or_leaves_nothing(arena):
    def work(disk: FaultyDisk) -> None:
        path = stage_rows(disk)
        if path is None:
            assert [name for name in disk.dump() if not name.endswith("/")] == []
            return
        with contextlib.suppress(OSError):
            assert staged_bytes(disk.root, "guest:w", "7", disk)[1] > 64
            assert staged_rows(disk, path) == [b"one", b"two", b"three"]

    sites = fail_each_call(arena, work)
    # What is behind another failure: that the torn stage cannot be removed either is nobody's trouble.
    disk = FaultyDisk(arena / "two failures")
    disk.trace_sites = True
    plain = FaultyDisk(arena / "plain")
    stage_rows(plain)
    rename = [call.kind for call in plain.trace].index("rename") + 1
    for n in (rename, rename + 1):
        disk.fail_at(n, errno.EIO)
    assert stage_rows(disk) is None
    sites.add(disk.trace[rename].site)
    assert reached(sites, _STAGES)


def test_power_loss_before_any_call_leaves_a_stage_whole_or_not_there(arena, seed):
    disk = FaultyDisk(arena / "disk")
    finished: list[str] = []
    crashes = 0

    def look(n: int, call: Call, before: Call | None) -> None:
        nonlocal crashes
        for mode in ("none", "all", "random"):
            root = str(arena / f"{n}-{mode}")
            after = disk.clone(root).crash(random.Random(repr((seed, n))), mode)
            names = [name for name in after.dump() if name.endswith(".stage")]
            assert len(names) >= len(finished), f"before {describe(n, call)}, mode {mode}"
            for name in names:
                assert staged_rows(after, f"{root}/{name}") == [b"one", b"two", b"three"]
            crashes += 1

    Crashes(disk, Witness(), look)
    for _ in range(2):
        path = stage_rows(disk)
        assert path is not None
        finished.append(path)
    disk.listdir(disk.root)
    assert crashes > 20


def test_a_copy_of_a_store_fails_clearly_or_survives_a_power_loss(arena):
    """Also where the directories above it are new."""

    def work(disk: FaultyDisk) -> None:
        with contextlib.suppress(OSError):  # the test's own writes
            for name in ("1/journal/3.wal", "1/.vhost", "2/empty"):
                path = f"{disk.root}/data/vhosts/{name}"
                disk.make_dirs(os.path.dirname(path))
                disk.create(path).append(b"records" if name.endswith(".wal") else b"")
        files = {name: data for name, data in disk.dump().items() if not name.endswith("/")}
        done: list[int] = []
        try:
            copy_files(disk, f"{disk.root}/data", f"{disk.root}/new/backup", disk.files(), done.append)
        except OSError:
            return
        assert done[-1:] == [sum(map(len, files.values()))][: len(files)]
        after = disk.crash(mode="none").dump()
        assert {name.replace("data/", "new/backup/"): data for name, data in files.items()}.items() <= after.items()

    assert reached(fail_each_call(arena, work), _BACKUP)


def test_a_quarantine_that_cannot_be_written_keeps_nobody_from_the_other_messages(arena):
    def work(disk: FaultyDisk) -> None:
        witness = Witness()
        driver = the_run(disk, witness)
        driver.patient = True
        driver.start()
        driver.declare("a")
        driver.publish("a", [60] * 8)
        driver.sync()
        driver.checkpoint(carry_below=0)
        driver.stop()
        for offset in (100, 200):
            disk.flip_bit(f"{driver.open.queues['a'].directory}/0.qs", offset * 8)
        with driver.open.lock:
            served = driver.open.queues["a"].backing.fetch(20)
        assert len(served) == 6
        damaged = [report["offset"] for report in driver.open.quarantine.reports if str(report["file"]).endswith(".qs")]
        assert len(damaged) == 2
        clean_up(driver)

    def patient_work(disk: FaultyDisk) -> None:
        # The store fails when its own writes do; that is not what this looks at.
        with contextlib.suppress(StoreFailedError):
            work(disk)

    assert reached(fail_each_call(arena, patient_work), _QUARANTINE)


def test_a_write_that_fails_in_os_durability_fails_the_store(arena):
    def work(disk: FaultyDisk) -> None:
        witness = Witness()
        driver = the_run(disk, witness, durability="os")
        driver.patient = True
        with contextlib.suppress(StoreFailedError):
            driver.start()
            driver.declare("a")
            driver.publish("a", [60] * 8)
            driver.sync()
        clean_up(driver)
        Campaign(arena, 0).verify(disk.crash(mode="process"), witness, "os", follow=True, options={"durability": "os"})

    assert reached(fail_each_call(arena, work), _OS)


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "dirty"])
@pytest.mark.parametrize("full", [True, False], ids=["with trailer", "without"])
def test_a_damaged_header_is_mended_or_reported_again(arena, clean, full):
    """The header of an index segment says nothing that is not known: one start reports it, and mends it."""

    def reports(driver: Driver) -> list[object]:
        return [line["offset"] for line in driver.open.quarantine.reports if str(line["file"]).endswith(".qi")]

    def work(disk: FaultyDisk, *, sound: bool = True) -> None:
        witness = Witness()
        driver = the_run(disk, witness)
        driver.patient = True
        driver.start()
        driver.declare("a")
        driver.publish("a", [60] * (SETTINGS.segment_entries - (not full)))
        driver.sync()
        driver.checkpoint(carry_below=0)
        path = f"{driver.open.queues['a'].directory}/0.qi"
        if clean:
            driver.open.close()
        else:
            driver.open.abandon()
        disk.flip_bit(path, 20)
        driver.start()
        assert not sound or reports(driver) == [0]
        check(driver.open, witness)
        driver.open.close()
        driver.start()
        assert not sound or reports(driver) == []
        check(driver.open, witness)
        clean_up(driver)

    def patient_work(disk: FaultyDisk) -> None:
        with contextlib.suppress(StoreFailedError):
            work(disk, sound=False)

    work(FaultyDisk(arena / "sound"))
    assert reached(fail_each_call(arena, patient_work), _HEADERS)


_DISK_METHODS = {name for name in vars(Disk) if not name.startswith("_") and name not in ("exists", "is_dir")}
_FILE_METHODS = {"append", "pwrite", "pwrite_and_sync", "pread", "sync", "reserve"}
_FILES = {"file", "handle", "reader", "source", "target", "log"}
_NOT_FILES = {"message_store.py: file.sync()", "compaction.py: target.sync()"}  # a DataFile, whose handle is a file


def call_sites() -> dict[str, list[str]]:
    """Where `storage/` calls a disk or a file: "file.py: source of the call" -> its lines, as "file.py:120"."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(warren.storage.__path__[0]).glob("*.py")):
        if path.name in ("disk.py", "verify.py", "verify_files.py", "queue_database.py", "sqlite_queue.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_disk_call(node.func):
                text = f"{path.name}: {ast.unparse(node)}"
                lines = [f"{path.name}:{line}" for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)]
                if text not in _NOT_FILES:
                    found.setdefault(text, []).extend(lines)
    return found


def is_disk_call(function: ast.Attribute) -> bool:
    owner = ast.unparse(function.value)
    if owner.endswith("disk"):
        return function.attr in _DISK_METHODS
    return function.attr in _FILE_METHODS and owner.split(".")[-1].lstrip("_") in _FILES


def test_a_checkpoint_between_a_transaction_and_its_commit_does_not_undo_the_ack(arena, monkeypatch):
    """Found by kill -9: the message was live for the checkpoint, which repeated it in the journal behind its ack."""
    disk = FaultyDisk(arena / "disk")
    witness = Witness()
    driver = the_run(disk, witness)
    driver.start()
    for name in ("a", "b"):
        driver.declare(name)
    for carry_below in (ALL, 0):
        driver.publish("a", [40, 400])
        driver.sync()
        with driver.open.quiet():
            pass  # seals the journal file; no checkpoint has looked at it yet
        committer = driver.open.committer
        commit = committer.sync

        def checkpoint_first(lsn: int | None = None, commit=commit, carry_below=carry_below) -> None:
            if lsn is not None:
                driver.open.checkpoint(carry_below=carry_below)
            commit(lsn)

        with monkeypatch.context() as patch:
            patch.setattr(committer, "sync", checkpoint_first)
            driver.transact([("b", 30)], {"a": 2})
        Campaign(arena, 0).crash(disk, witness, "none", f"a transaction, carry_below {carry_below}", follow=True)
    clean_up(driver)


def test_a_disk_that_stays_full_refuses_and_says_so(arena):
    """Not one call, but every one from some moment on."""
    disk = FaultyDisk(arena / "disk")
    witness = Witness()
    driver = the_run(disk, witness)
    driver.start()
    driver.declare("a")
    driver.publish("a", [30] * 5)
    driver.sync()
    disk.capacity = 0
    driver.publish("a", [30] * 3)
    with pytest.raises(DiskFullError, match="nothing is lost"):
        driver.open.sync()
    with pytest.raises(DiskFullError, match="consume messages"):
        driver.publish("a", [30])
    disk.capacity = None
    driver.sync()
    driver.make_room()
    driver.publish("a", [30])
    driver.sync()
    clean_up(driver)
    Campaign(arena, 0).verify(disk.crash(mode="none"), witness, "a full disk", follow=True, options={})
