"""The double must be right before it can judge the engine: what a crash may and must leave, what it counts, what fails.

The last word on how a filesystem answers is the real disk: the same random calls go to both.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faulty_disk import UNLIMITED_BYTES, FaultyDisk, Mode, PowerCut
from warren.storage.disk import Disk, DiskFile

OUTCOMES = 200  # crashes with different seeds, enough to meet every outcome of a few coins


@pytest.fixture
def disk(tmp_path: Path) -> FaultyDisk:
    return FaultyDisk(tmp_path / "disk")


@pytest.fixture
def at(disk: FaultyDisk) -> Callable[[str], str]:
    return lambda name: f"{disk.root}/{name}"


def write_file(disk: Disk, path: str, data: bytes, *, sync: bool = False) -> DiskFile:
    """A new file, still open. With `sync` its bytes are safe, its name is not."""
    file = disk.create(path)
    file.append(data)
    if sync:
        file.sync()
    return file


def write_safe(disk: Disk, path: str, data: bytes = b"") -> DiskFile:
    file = write_file(disk, path, data, sync=True)
    disk.sync_dir(os.path.dirname(path))
    return file


def make_dirs(disk: Disk, *paths: str) -> None:
    for path in paths:
        disk.make_dirs(path)


def outcomes(disk: FaultyDisk, *, zero_tails: bool = False) -> Iterator[FaultyDisk]:
    """Many random ends of one crash. Disks without real files may share their root."""
    for seed in range(OUTCOMES):
        yield disk.clone().crash(random.Random(seed), "random", zero_tails=zero_tails)


def random_contents(disk: FaultyDisk, name: str) -> set[bytes | None]:
    return {after.dump().get(name) for after in outcomes(disk)}


def random_names(disk: FaultyDisk) -> set[tuple[str, ...]]:
    return {tuple(sorted(after.dump())) for after in outcomes(disk)}


def execute(database: str, *statements: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        rows: list[tuple[object, ...]] = []
        for statement in statements:
            rows = connection.execute(statement).fetchall()
        return rows


# It is a filesystem.


class Explorer:
    """Does the same random calls on any disk and notes what each answered."""

    CALLS = (
        *("create", "open", "write", "write", "read", "reserve", "sync", "close"),
        *("rename", "link", "unlink", "mkdir", "mkdir", "rmdir", "remove_tree", "replace", "list", "look"),
    )
    NAMES = ("a", "b", "c", "d/a", "d/b", "e/a", "e/f", "e/f/a", "d", "e")

    def __init__(self, disk: Disk, root: str, seed: int) -> None:
        self.disk = disk
        self.root = root
        self.rng = random.Random(seed)
        self.open_files: list[DiskFile] = []
        make_dirs(disk, root + "/d", root + "/e/f")

    def step(self) -> object:
        name = self.rng.choice(self.CALLS)
        try:
            return name, getattr(self, name)()
        except OSError as error:
            return name, error.errno

    def path(self) -> str:
        return f"{self.root}/{self.rng.choice(self.NAMES)}"

    def file(self) -> DiskFile:
        if not self.open_files:
            raise OSError(errno.EBADF, "no file is open")
        return self.rng.choice(self.open_files)

    def create(self) -> object:
        self.open_files.append(self.disk.create(self.path()))
        return None

    def open(self) -> object:
        file = self.rng.choice([self.disk.open, self.disk.open_read])(self.path_of_a_file())
        self.open_files.append(file)
        return file.size

    def path_of_a_file(self) -> str:
        # A real directory can be opened for reading; nobody does.
        path = self.path()
        return path + "/none" if self.disk.is_dir(path) else path

    def write(self) -> object:
        data = self.rng.randbytes(self.rng.randrange(9))
        file = self.file()
        if self.rng.random() < 0.5:
            return file.append(data), file.size
        file.pwrite(data, self.rng.randrange(40))
        return file.size

    def read(self) -> object:
        return self.file().pread(self.rng.randrange(50), self.rng.randrange(50))

    def reserve(self) -> object:
        file = self.file()
        file.reserve(self.rng.randrange(1, 60))
        return file.size, file.links()

    def close(self) -> object:
        self.open_files.remove(file := self.file())
        file.close()
        return None

    def rename(self) -> object:
        return self.disk.rename(self.path(), self.path())

    def link(self) -> object:
        return self.disk.link(self.path(), self.path())

    def unlink(self) -> object:
        return self.disk.unlink(self.path())

    def mkdir(self) -> object:
        return self.disk.mkdir(self.path())

    def rmdir(self) -> object:
        return self.disk.rmdir(self.path())

    def remove_tree(self) -> object:
        return self.disk.remove_tree(self.path())

    def replace(self) -> object:
        return self.disk.replace(self.path_of_a_file(), b"replaced")

    def sync(self) -> object:
        self.file().sync()
        return self.disk.sync_dir(self.path())

    def list(self) -> object:
        return self.disk.listdir(self.path()), [path[len(self.root) :] for path in self.disk.walk(self.root)]

    def look(self) -> object:
        path = self.path()
        known = self.disk.exists(path), self.disk.is_dir(path)
        return known if known[1] else (known, self.disk.size(path), self.disk.read(path))


def test_every_call_answers_as_the_real_disk_does(tmp_path, scale, seed):
    rng = random.Random(seed)
    for number in range(scale.scale(300)):
        run = rng.getrandbits(32)
        real = Explorer(Disk(), str(tmp_path / f"real{number}"), run)
        double = Explorer(FaultyDisk(tmp_path / f"double{number}"), str(tmp_path / f"double{number}"), run)
        for step in range(150):
            expected = real.step()
            assert double.step() == expected, f"run {run}, step {step}"
        for file in real.open_files:
            file.close()


def test_a_path_can_be_spelled_in_more_than_one_way(disk, at):
    disk.mkdir(at("d/"))
    write_file(disk, at("d/../d/./a"), b"x").close()
    assert disk.read(at("d//a")) == b"x"
    assert disk.is_dir(at("d/."))


def test_a_path_outside_of_the_root_is_refused(disk, tmp_path):
    with pytest.raises(ValueError, match="outside of the root"):
        disk.create(str(tmp_path / "elsewhere"))


def test_an_unlinked_file_stays_readable_through_its_open_handle(disk, at):
    file = write_file(disk, at("a"), b"bytes")
    disk.unlink(at("a"))
    assert file.pread(5, 0) == b"bytes"
    assert file.links() == 0


def test_two_names_of_one_file_are_two_links(disk, at):
    file = write_file(disk, at("a"), b"bytes")
    disk.link(at("a"), at("b"))
    assert file.links() == 2
    disk.unlink(at("a"))
    assert disk.read(at("b")) == b"bytes"
    assert file.links() == 1


def test_a_closed_file_refuses_every_call(disk, at):
    file = disk.create(at("a"))
    file.close()
    for call in (file.sync, file.links, lambda: file.append(b"x"), lambda: file.pread(1, 0), lambda: file.reserve(9)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()


def test_a_huge_reservation_costs_no_memory(disk, at):
    file = disk.create(at("a"))
    file.reserve(1 << 38)
    assert disk.size(at("a")) == 1 << 38
    assert file.pread(4, (1 << 38) - 2) == bytes(2)


# Contents after a crash.


@pytest.mark.parametrize("mode", ["none", "all", "random", "process"])
def test_what_was_synced_survives_every_crash(disk, at, mode: Mode):
    write_safe(disk, at("a"), b"safe")
    assert disk.crash(random.Random(1), mode).dump() == {"a": b"safe"}


def test_without_a_sync_mode_none_loses_every_write(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    file.append(b" and lost")
    assert disk.crash(mode="none").dump() == {"a": b"safe"}


def test_without_a_sync_mode_all_keeps_every_write(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    file.append(b" and lucky")
    assert disk.crash(mode="all").dump() == {"a": b"safe and lucky"}


def test_what_survived_a_crash_survives_the_next_one(disk, at):
    write_file(disk, at("a"), b"lucky")
    assert disk.crash(mode="all").crash(mode="none").dump() == {"a": b"lucky"}


def test_a_killed_process_loses_nothing_but_makes_nothing_safe(disk, at):
    write_file(disk, at("a"), b"in the kernel")
    after = disk.crash(mode="process")
    assert after.dump() == {"a": b"in the kernel"}
    assert after.crash(mode="none").dump() == {}


def test_a_killed_process_frees_the_files_that_only_it_held_open(disk, at):
    disk.capacity = 100
    write_file(disk, at("a"), bytes(60))
    disk.unlink(at("a"))
    assert disk.free_bytes(disk.root) == 40
    assert disk.crash(mode="process").free_bytes(disk.root) == 100


def test_unsynced_writes_survive_independently_of_their_order(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"1")
    file.append(b"2")
    file.append(b"3")
    found = random_contents(disk, "a")
    assert found == {b"", b"1", b"12", b"123", b"\0" + b"2", b"\0" + b"23", b"\0\0" + b"3", b"1\0" + b"3"}


def test_the_last_write_can_be_torn_at_every_byte(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    file.append(b"torn")
    assert random_contents(disk, "a") == {b"safe", b"safet", b"safeto", b"safetor", b"safetorn"}


def test_a_write_before_the_last_one_is_not_torn(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"whole")
    file.append(b"x")
    assert random_contents(disk, "a") == {b"", b"whole", b"wholex", bytes(5) + b"x"}


def test_overlapping_unsynced_writes_can_land_in_any_order(disk, at):
    file = write_safe(disk, at("a"))
    file.pwrite(b"11", 0)
    file.pwrite(b"22", 1)
    assert random_contents(disk, "a") == {b"", b"11", b"122", b"112", b"12", b"\0" + b"2", b"\0" + b"22"}


def test_a_file_may_keep_the_length_of_a_lost_write_when_asked_for(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"11")
    found = {after.dump()["a"] for after in outcomes(disk, zero_tails=True)}
    assert found == {b"", b"1", b"11", b"\0\0", b"1\0"}


def test_an_unsynced_reservation_may_be_lost(disk, at):
    file = write_safe(disk, at("a"))
    file.reserve(3)
    assert random_contents(disk, "a") == {b"", bytes(3)}


def test_a_synced_reservation_is_safe(disk, at):
    file = write_safe(disk, at("a"))
    file.reserve(3)
    file.sync()
    assert disk.crash(mode="none").dump() == {"a": bytes(3)}


def test_a_write_after_the_sync_is_not_covered_by_it(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"1")
    file.sync()
    file.append(b"2")
    assert disk.crash(mode="none").dump() == {"a": b"1"}


def test_the_sync_of_one_file_does_not_cover_another(disk, at):
    first, second = write_safe(disk, at("a")), write_safe(disk, at("b"))
    first.append(b"1")
    second.append(b"2")
    first.sync()
    assert disk.crash(mode="none").dump() == {"a": b"1", "b": b""}


def test_the_sync_of_any_handle_covers_the_writes_of_all_of_them(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"1")
    disk.open_read(at("a")).sync()
    assert disk.crash(mode="none").dump() == {"a": b"1"}


def test_sync_all_makes_every_content_and_every_name_safe(disk, at):
    disk.mkdir(at("d"))
    write_file(disk, at("d/a"), b"1")
    write_file(disk, at("b"), b"2")
    disk.rename(at("b"), at("d/c"))
    disk.sync_all(disk.root)
    assert disk.crash(mode="none").dump() == {"d/": b"", "d/a": b"1", "d/c": b"2"}


@pytest.mark.parametrize("mode", ["none", "all", "random"])
def test_tear_keeps_exactly_the_first_bytes_of_the_last_write_and_all_before_it(disk, at, mode: Mode):
    file = write_safe(disk, at("a"), b"safe,")
    file.append(b"unsynced,")
    file.append(b"last")
    assert disk.last_write_size == 4
    for size in range(5):
        after = disk.clone().crash(random.Random(size), mode, tear=size)
        assert after.dump() == {"a": b"safe,unsynced," + b"last"[:size]}


def test_tear_at_zero_leaves_no_hole_where_the_write_would_have_begun(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    file.pwrite(b"last", 100)
    assert disk.crash(mode="none", tear=0).dump() == {"a": b"safe"}


def test_tear_leaves_other_files_to_the_mode(disk, at):
    other, torn = write_safe(disk, at("other")), write_safe(disk, at("torn"))
    other.append(b"lost")
    torn.append(b"last")
    assert disk.crash(mode="none", tear=2).dump() == {"other": b"", "torn": b"la"}


def test_a_write_that_was_synced_cannot_be_torn(disk, at):
    write_safe(disk, at("a"), b"safe")
    assert disk.last_write_size == 0
    with pytest.raises(ValueError, match="cannot tear"):
        disk.crash(mode="none", tear=1)


# Names after a crash.


def test_a_synced_file_is_lost_when_its_directory_was_not_synced(disk, at):
    write_file(disk, at("a"), b"bytes", sync=True)
    assert disk.crash(mode="none").dump() == {}


def test_a_name_is_safe_although_the_bytes_of_its_file_are_not(disk, at):
    write_file(disk, at("a"), b"bytes")
    disk.sync_dir(disk.root)
    assert disk.crash(mode="none").dump() == {"a": b""}


def test_each_unsynced_name_survives_on_its_own(disk, at):
    disk.create(at("a"))
    disk.create(at("b"))
    assert random_names(disk) == {(), ("a",), ("b",), ("a", "b")}


def test_an_unlinked_file_comes_back_with_its_synced_bytes(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    file.append(b" lost")
    disk.unlink(at("a"))
    assert disk.crash(mode="none").dump() == {"a": b"safe"}


def test_an_unlinked_file_is_gone_once_its_directory_is_synced(disk, at):
    write_safe(disk, at("a"), b"safe")
    disk.unlink(at("a"))
    disk.sync_dir(disk.root)
    assert random_names(disk) == {()}


def test_an_unsynced_unlink_can_go_either_way(disk, at):
    write_safe(disk, at("a"), b"safe")
    disk.unlink(at("a"))
    assert random_contents(disk, "a") == {None, b"safe"}


def test_a_name_that_was_used_twice_holds_any_of_its_files_or_none(disk, at):
    write_safe(disk, at("a"), b"first")
    disk.unlink(at("a"))
    write_file(disk, at("a"), b"second", sync=True)
    assert random_contents(disk, "a") == {b"first", None, b"second"}


def test_a_rename_is_never_at_both_names_nor_at_none(disk, at):
    write_safe(disk, at("a"))
    disk.rename(at("a"), at("b"))
    assert random_names(disk) == {("a",), ("b",)}


def test_a_rename_over_a_file_leaves_the_old_or_the_new_one(disk, at):
    write_safe(disk, at("a"), b"old")
    write_safe(disk, at("b"), b"new")
    disk.rename(at("b"), at("a"))
    assert {tuple(sorted(after.dump().items())) for after in outcomes(disk)} == {
        (("a", b"old"), ("b", b"new")),
        (("a", b"new"),),
    }


def test_a_rename_before_the_sync_of_the_file_can_leave_the_new_name_with_no_bytes(disk, at):
    write_safe(disk, at("a"), b"old")
    write_file(disk, at("b"), b"new")
    disk.rename(at("b"), at("a"))
    assert b"" in random_contents(disk, "a")


def test_replace_leaves_the_old_or_the_new_bytes_wherever_the_power_goes(tmp_path):
    disk = FaultyDisk(tmp_path / "disk")
    path = disk.root + "/a"
    disk.replace(path, b"old")
    counting = disk.clone()
    counting.replace(path, b"new")
    for number in range(1, counting.calls + 1):
        cut = disk.clone()
        cut.crash_at(number, tear=1)
        with pytest.raises(PowerCut):
            cut.replace(path, b"new")
        assert random_contents(cut, "a") <= {b"old", b"new"}
    assert counting.crash(mode="none").dump() == {"a": b"new"}


@pytest.mark.parametrize("synced", ["from", "to"])
def test_a_rename_across_directories_is_safe_once_either_of_them_is_synced(disk, at, synced):
    make_dirs(disk, at("from"), at("to"))
    write_safe(disk, at("from/a"))
    disk.rename(at("from/a"), at("to/b"))
    assert random_names(disk) == {("from/", "from/a", "to/"), ("from/", "to/", "to/b")}
    disk.sync_dir(at(synced))
    assert random_names(disk) == {("from/", "to/", "to/b")}


def test_a_rename_into_a_new_directory_is_not_lost_with_that_directory(disk, at):
    write_safe(disk, at("a"))
    disk.mkdir(at("d"))
    disk.rename(at("a"), at("d/a"))
    assert random_names(disk) == {("a",), ("a", "d/"), ("d/", "d/a")}


def test_a_rename_out_of_a_removed_directory_is_not_lost_with_that_directory(disk, at):
    disk.make_dirs(at("d"))
    write_safe(disk, at("d/a"))
    disk.rename(at("d/a"), at("a"))
    disk.rmdir(at("d"))
    assert random_names(disk) == {("d/", "d/a"), ("a", "d/"), ("a",)}


def test_a_rename_out_of_a_replaced_directory_is_not_lost_with_that_directory(disk, at):
    make_dirs(disk, at("d"), at("e"))
    write_safe(disk, at("d/a"))
    disk.rename(at("d/a"), at("a"))
    disk.rename(at("e"), at("d"))
    assert random_names(disk) == {("d/", "d/a", "e/"), ("a", "d/", "e/"), ("a", "d/")}


def test_the_sync_of_a_removal_covers_the_renames_out_of_that_directory(disk, at):
    make_dirs(disk, at("p/d"), at("q"))
    write_safe(disk, at("p/d/a"))
    disk.rename(at("p/d/a"), at("q/a"))
    disk.rmdir(at("p/d"))
    disk.sync_dir(at("p"))
    assert disk.crash(mode="none").dump() == {"p/": b"", "q/": b"", "q/a": b""}


def test_a_chain_of_renames_leaves_the_file_at_exactly_one_of_its_names(disk, at):
    write_safe(disk, at("a"))
    disk.rename(at("a"), at("b"))
    disk.rename(at("b"), at("c"))
    assert random_names(disk) == {("a",), ("b",), ("c",)}


def test_a_new_file_does_not_push_out_the_one_that_was_renamed_away(disk, at):
    write_safe(disk, at("a"), b"first")
    disk.rename(at("a"), at("b"))
    write_file(disk, at("a"), b"second", sync=True)
    for after in outcomes(disk):
        assert b"first" in after.dump().values()


def test_an_unsynced_link_can_be_lost_and_the_file_keeps_its_other_name(disk, at):
    write_safe(disk, at("a"), b"safe")
    disk.link(at("a"), at("b"))
    after = disk.crash(mode="none")
    assert after.dump() == {"a": b"safe"}
    assert after.open(at("a")).links() == 1


def test_two_links_to_one_file_are_still_one_file_after_a_crash(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    disk.link(at("a"), at("b"))
    disk.sync_dir(disk.root)
    file.append(b"1")
    file.append(b"2")
    for after in outcomes(disk):
        assert after.read(at("a")) == after.read(at("b"))
        again = after.open(at("a"))
        assert again.links() == 2
        again.append(b"!")
        assert after.read(at("b")).endswith(b"!")


def test_a_lost_directory_takes_its_synced_contents_along(disk, at):
    disk.mkdir(at("d"))
    write_safe(disk, at("d/a"), b"safe?")
    after = disk.crash(mode="none")
    assert after.dump() == {}
    assert not os.path.exists(at("d"))


def test_a_removed_directory_comes_back_with_what_was_in_it(disk, at):
    disk.make_dirs(at("d"))
    write_safe(disk, at("d/a"), b"safe")
    disk.remove_tree(at("d"))
    after = disk.crash(mode="none")
    assert after.dump() == {"d/": b"", "d/a": b"safe"}
    assert os.path.isdir(at("d"))


def test_a_renamed_directory_moves_with_everything_in_it(disk, at):
    disk.make_dirs(at("d/e"))
    write_safe(disk, at("d/e/a"), b"safe")
    disk.rename(at("d"), at("f"))
    assert disk.read(at("f/e/a")) == b"safe"
    assert {tuple(sorted(after.files())) for after in outcomes(disk)} == {(at("d/e/a"),), (at("f/e/a"),)}


def test_two_directories_never_end_up_in_each_other(disk, at):
    make_dirs(disk, at("p"), at("q"))
    write_safe(disk, at("p/a"))
    write_safe(disk, at("q/b"))
    disk.rename(at("p"), at("q/p"))
    disk.rename(at("q/p"), at("p"))
    disk.rename(at("q"), at("p/q"))
    for after in outcomes(disk):
        assert [os.path.basename(path) for path in sorted(after.files(), key=os.path.basename)] == ["a", "b"]


class Shuffler:
    """Moves a few safe files about among other traffic. It never deletes one of them."""

    def __init__(self, disk: FaultyDisk, rng: random.Random) -> None:
        self.disk = disk
        self.rng = rng
        self.precious = [b"1", b"2", b"3"]
        for name in ("d", "e", "d/f"):
            disk.make_dirs(f"{disk.root}/{name}")
        for content in self.precious:
            write_safe(disk, f"{disk.root}/d/{content.decode()}", content).close()

    def step(self) -> None:
        directories = [self.disk.root, *(f"{self.disk.root}/{name}" for name in self.disk.dump() if name[-1] == "/")]
        source, target = (
            f"{self.rng.choice(directories).rstrip('/')}/{self.rng.choice(['a', 'b', 'd', 'e', 'f', '1', '2'])}"
            for _ in range(2)
        )
        disk = self.disk
        with contextlib.suppress(OSError):
            match self.rng.randrange(8):
                case 0:
                    write_file(disk, target, b"worthless").close()
                case 1:
                    disk.mkdir(target)
                case 2:
                    disk.rmdir(target)
                case 3:
                    disk.sync_dir(self.rng.choice(directories))
                case 4 if not self.is_precious(target):
                    disk.unlink(target)
                case _ if not self.is_precious(target):
                    disk.rename(self.rng.choice([source, *disk.files()]), target)

    def is_precious(self, path: str) -> bool:
        return self.disk.exists(path) and not self.disk.is_dir(path) and self.disk.read(path) in self.precious


def test_whatever_is_moved_about_a_safe_file_is_at_exactly_one_place_after_a_crash(tmp_path, scale, seed):
    rng = random.Random(seed)
    for number in range(scale.scale(1000)):
        disk = FaultyDisk(tmp_path / str(number))
        shuffler = Shuffler(disk, rng)
        for _ in range(rng.randrange(60)):
            shuffler.step()
        for mode in ("none", "all", "random", "random", "random"):
            found = sorted(disk.clone().crash(rng, mode).dump().items())
            assert sorted(content for _, content in found if content in shuffler.precious) == shuffler.precious, found


# Faults.


def test_the_nth_call_from_now_fails_and_the_next_one_does_not(disk, at):
    disk.create(at("a"))
    disk.fail_at(2, errno.EIO)
    disk.create(at("b"))
    with pytest.raises(OSError, match="Input/output error") as failure:
        disk.create(at("c"))
    assert failure.value.errno == errno.EIO
    assert failure.value.filename == at("c")
    disk.create(at("c"))


def all_calls(disk: FaultyDisk) -> list[tuple[str, Callable[[], object]]]:
    """One call of every kind, each of which would succeed."""
    root = disk.root
    disk.make_dirs(root + "/empty")
    file = write_safe(disk, root + "/a", b"bytes")
    return [
        ("create", lambda: disk.create(root + "/new")),
        ("open", lambda: disk.open(root + "/a")),
        ("open_read", lambda: disk.open_read(root + "/a")),
        ("pwrite", lambda: file.append(b"x")),
        ("pwrite", lambda: file.pwrite(b"x", 9)),
        ("pread", lambda: file.pread(1, 0)),
        ("sync", file.sync),
        ("reserve", lambda: file.reserve(99)),
        ("rename", lambda: disk.rename(root + "/a", root + "/b")),
        ("link", lambda: disk.link(root + "/a", root + "/b")),
        ("unlink", lambda: disk.unlink(root + "/a")),
        ("mkdir", lambda: disk.mkdir(root + "/d")),
        ("rmdir", lambda: disk.rmdir(root + "/empty")),
        ("listdir", lambda: disk.listdir(root)),
        ("size", lambda: disk.size(root + "/a")),
        ("sync_dir", lambda: disk.sync_dir(root)),
        ("sync_all", lambda: disk.sync_all(root)),
        ("free_bytes", lambda: disk.free_bytes(root)),
    ]


KINDS = range(18)


@pytest.mark.parametrize("index", KINDS)
def test_every_kind_of_call_is_counted_and_can_fail_without_effect(disk, index):
    kind, call = all_calls(disk)[index]
    before = disk.dump()
    calls = disk.calls
    disk.fail_at(1, errno.EIO, written=0)
    with pytest.raises(OSError, match="Input/output error"):
        call()
    assert disk.dump() == before
    assert disk.calls == calls + 1
    assert disk.trace[-1].kind == kind
    call()
    assert disk.calls == calls + 2


@pytest.mark.parametrize("index", KINDS)
def test_every_kind_of_call_can_lose_its_power_before_its_effect(disk, index):
    _, call = all_calls(disk)[index]
    before = disk.dump()
    disk.crash_at(1)
    with pytest.raises(PowerCut):
        call()
    assert disk.crash(mode="all").dump() == before


def test_without_power_every_later_call_fails_as_well(disk, at):
    calls = all_calls(disk)
    disk.crash_at(1)
    file = None
    with pytest.raises(PowerCut):
        file = disk.create(at("x"))
    assert file is None
    assert disk.is_off
    for _, call in [*calls, ("exists", lambda: disk.exists(at("a"))), ("is_dir", lambda: disk.is_dir(at("a")))]:
        with pytest.raises(PowerCut):
            call()


def test_a_file_can_be_closed_without_power(disk, at):
    file = disk.create(at("a"))
    disk.crash(mode="none")
    file.close()


def test_a_power_cut_is_not_an_exception_that_the_engine_would_catch():
    assert not issubclass(PowerCut, Exception)


def test_a_crash_at_a_write_leaves_as_much_of_it_as_was_asked_for(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    disk.crash_at(1, tear=3)
    with pytest.raises(PowerCut):
        file.append(b"torn")
    assert disk.crash(mode="all").dump() == {"a": b"safetor"}


def test_a_failed_write_leaves_as_much_of_it_as_was_asked_for(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    disk.fail_at(1, errno.ENOSPC, written=2)
    with pytest.raises(OSError, match="No space left"):
        file.append(b"torn")
    assert disk.read(at("a")) == b"safeto"


def test_a_retried_append_goes_over_the_torn_bytes(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    disk.fail_at(1, errno.EIO, written=2)
    with pytest.raises(OSError, match="Input/output error"):
        file.append(b"torn")
    assert file.append(b"!") == 4
    assert disk.read(at("a")) == b"safe!o"


@pytest.mark.parametrize(("error", "found"), [(errno.EIO, {0, 1, 2}), (errno.ENOSPC, {0, 1, 2}), (errno.EROFS, {0})])
def test_a_failed_write_leaves_any_part_of_it_when_the_disk_is_full_or_broken(disk, at, error, found):
    sizes = set()
    for number in range(50):
        file = disk.create(at(str(number)))
        disk.fail_at(1, error)
        with pytest.raises(OSError, match=os.strerror(error)):
            file.append(b"ab")
        sizes.add(disk.size(at(str(number))))
    assert sizes == found


def test_several_calls_can_be_told_to_fail(disk, at):
    disk.fail_at(1, errno.EIO)
    disk.fail_at(2, errno.EROFS)
    for error in (errno.EIO, errno.EROFS):
        with pytest.raises(OSError, match=os.strerror(error)):
            disk.create(at("a"))


def test_faults_can_be_called_off(disk, at):
    disk.fail_at(1, errno.EIO)
    disk.clear_faults()
    disk.create(at("a"))


def test_there_is_no_call_before_the_next_one(disk):
    with pytest.raises(ValueError, match="no call 0"):
        disk.fail_at(0, errno.EIO)


def fail_sync(file: DiskFile, disk: FaultyDisk) -> None:
    disk.fail_at(1, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        file.sync()


def test_a_later_sync_does_not_make_safe_what_a_failed_one_left_in_doubt(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    file.append(b"doubt")
    fail_sync(file, disk)
    file.sync()
    disk.sync_all(disk.root)
    assert disk.read(at("a")) == b"safedoubt"
    assert disk.clone().crash(mode="none").dump() == {"a": b"safe"}
    assert disk.clone().crash(mode="all").dump() == {"a": b"safedoubt"}
    assert random_contents(disk, "a") >= {b"safe", b"safedoubt"}


def test_what_is_written_after_a_failed_sync_is_made_safe_by_the_next_one(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"doubt")
    fail_sync(file, disk)
    file.append(b"safe")
    file.sync()
    found = random_contents(disk, "a")
    assert {content[5:] for content in found if content is not None} == {b"safe"}
    assert {bytes(5) + b"safe", b"doubtsafe"} == found


def test_a_synced_write_over_one_in_doubt_is_never_undone(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"doubt")
    fail_sync(file, disk)
    file.pwrite(b"safe!", 0)
    file.sync()
    assert random_contents(disk, "a") == {b"safe!"}


def test_doubt_is_inherited_by_a_clone_and_by_the_next_process(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"doubt")
    fail_sync(file, disk)
    after = disk.clone().crash(mode="process")
    after.open(at("a")).sync()
    assert after.crash(mode="none").dump() == {"a": b""}


def test_a_failed_sync_all_leaves_every_unsynced_write_in_doubt(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"doubt")
    disk.fail_at(1, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        disk.sync_all(disk.root)
    file.sync()
    assert disk.crash(mode="none").dump() == {"a": b""}


def test_a_power_cut_during_a_sync_leaves_its_writes_open(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"1")
    disk.crash_at(1)
    with pytest.raises(PowerCut):
        file.sync()
    assert random_contents(disk, "a") == {b"", b"1"}


# Room.


def test_a_full_disk_takes_what_fits_and_then_refuses(disk, at):
    disk.capacity = 10
    file = write_file(disk, at("a"), b"12345678")
    with pytest.raises(OSError, match="No space left"):
        file.append(b"abcd")
    assert disk.read(at("a")) == b"12345678ab"
    assert file.size == 8


def test_a_full_disk_refuses_new_files_and_reservations(disk, at):
    disk.capacity = 10
    file = write_file(disk, at("a"), b"12345678")
    with pytest.raises(OSError, match="No space left"):
        file.reserve(11)
    file.reserve(10)
    with pytest.raises(OSError, match="No space left"):
        disk.create(at("b"))


def test_a_full_disk_takes_writes_into_reserved_bytes(disk, at):
    disk.capacity = 10
    file = disk.create(at("a"))
    file.reserve(10)
    file.pwrite(b"1234567890", 0)
    assert disk.read(at("a")) == b"1234567890"


def test_a_full_disk_refuses_a_write_behind_a_hole_that_does_not_fit(disk, at):
    disk.capacity = 10
    file = disk.create(at("a"))
    with pytest.raises(OSError, match="No space left"):
        file.pwrite(b"x", 10)
    assert disk.size(at("a")) == 0


def test_a_write_that_fails_for_another_reason_does_not_overfill_the_disk(disk, at):
    disk.capacity = 10
    file = disk.create(at("a"))
    disk.fail_at(1, errno.EIO, written=12)
    with pytest.raises(OSError, match="Input/output error"):
        file.append(bytes(12))
    assert disk.size(at("a")) == 10


def test_two_links_to_one_file_take_its_room_once(disk, at):
    disk.capacity = 10
    write_file(disk, at("a"), b"12345678").close()
    disk.link(at("a"), at("b"))
    assert disk.free_bytes(disk.root) == 2
    disk.unlink(at("a"))
    assert disk.free_bytes(disk.root) == 2
    disk.unlink(at("b"))
    assert disk.free_bytes(disk.root) == 10


def test_an_unlinked_file_takes_its_room_until_it_is_closed(disk, at):
    disk.capacity = 10
    file = write_file(disk, at("a"), b"12345678")
    disk.unlink(at("a"))
    assert disk.free_bytes(disk.root) == 2
    file.close()
    file.close()
    assert disk.free_bytes(disk.root) == 10


def test_a_file_that_is_renamed_over_frees_its_room(disk, at):
    disk.capacity = 10
    write_file(disk, at("a"), b"123").close()
    write_file(disk, at("b"), b"4567").close()
    disk.rename(at("a"), at("b"))
    assert disk.free_bytes(disk.root) == 7


def test_room_is_counted_anew_after_a_crash(disk, at):
    disk.capacity = 10
    file = write_safe(disk, at("a"), b"123")
    file.append(b"456")
    assert disk.clone().crash(mode="all").free_bytes(disk.root) == 4
    assert disk.clone().crash(mode="none").free_bytes(disk.root) == 7


def test_a_disk_without_a_capacity_has_room(disk):
    assert disk.free_bytes(disk.root) == UNLIMITED_BYTES


# Trace.


def test_the_trace_names_kind_path_and_size_of_each_call(disk, at):
    file = disk.create(at("a"))
    file.append(b"1234")
    file.sync()
    disk.rename(at("a"), at("b"))
    assert [(call.kind, call.path, call.size) for call in disk.trace] == [
        ("create", at("a"), 0),
        ("pwrite", at("a"), 4),
        ("sync", at("a"), 0),
        ("rename", f"{at('a')} -> {at('b')}", 0),
    ]
    assert disk.calls == 4


def test_the_trace_names_the_caller_outside_of_the_disk_when_asked_for(disk, at):
    disk.create(at("a"))
    disk.trace_sites = True
    line = test_the_trace_names_the_caller_outside_of_the_disk_when_asked_for.__code__.co_firstlineno + 4
    disk.replace(at("b"), b"composed of many calls")
    assert disk.trace[0].site == ""
    assert {call.site for call in disk.trace[1:]} == {f"test_faulty_disk.py:{line}"}


def test_an_empty_write_is_no_call(disk, at):
    file = disk.create(at("a"))
    file.append(b"")
    assert disk.calls == 1


# Copies and damage.


def test_a_clone_and_its_original_do_not_see_each_others_changes(disk, at):
    file = write_safe(disk, at("a"), b"both")
    disk.mkdir(at("d"))
    twin = disk.clone()
    file.append(b" first")
    file.sync()
    twin_file = twin.open(at("a"))
    twin_file.append(b" second")
    twin_file.sync()
    twin.rmdir(at("d"))
    assert disk.crash(mode="none").dump() == {"a": b"both first"}
    assert disk.dump() == {"a": b"both first", "d/": b""}
    assert twin.dump() == {"a": b"both second"}


def test_a_clone_remembers_what_is_not_synced(disk, at):
    file = write_safe(disk, at("a"), b"safe")
    file.append(b" lost")
    disk.unlink(at("a"))
    write_file(disk, at("b"), b"lost")
    assert disk.clone().crash(mode="none").dump() == {"a": b"safe"}


def test_a_clone_can_sync_what_its_original_did_not(disk, at):
    write_file(disk, at("a"), b"1")
    disk.mkdir(at("d"))
    disk.rename(at("a"), at("d/b"))
    twin = disk.clone()
    twin.open(at("d/b")).sync()
    twin.sync_dir(at("d"))
    assert twin.crash(mode="none").dump() == {"d/": b"", "d/b": b"1"}


def test_a_clone_starts_its_own_count_without_faults(disk, at):
    disk.create(at("a"))
    disk.fail_at(1, errno.EIO)
    twin = disk.clone()
    twin.create(at("b"))
    assert twin.calls == 1


def test_a_clone_with_its_own_root_has_the_same_files_there(disk, at, tmp_path):
    disk.mkdir(at("d"))
    write_file(disk, at("d/a"), b"1")
    twin = disk.clone(tmp_path / "twin")
    assert twin.files() == [str(tmp_path / "twin/d/a")]
    assert (tmp_path / "twin/d").is_dir()


def test_a_clone_does_not_mix_with_what_is_in_its_root_already(disk, tmp_path):
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin/meta.db").write_bytes(b"stale")
    with pytest.raises(OSError, match="not empty"):
        disk.clone(tmp_path / "twin")


def test_the_same_seed_gives_the_same_crash(disk, at):
    for name in "abcdef":
        file = write_file(disk, at(name), b"12")
        file.append(b"34")
    first, second = (disk.clone().crash(random.Random(7)).dump() for _ in range(2))
    assert first == second


def test_a_flipped_bit_is_wrong_now_and_after_a_crash(disk, at):
    file = write_safe(disk, at("a"), b"\x00\x00")
    disk.flip_bit(at("a"), 9)
    assert file.pread(2, 0) == b"\x00\x02"
    assert disk.crash(mode="none").dump() == {"a": b"\x00\x02"}


def test_a_bit_can_be_flipped_in_unsynced_bytes(disk, at):
    file = write_safe(disk, at("a"), b"\x00")
    file.append(b"\x00\x00")
    disk.flip_bit(at("a"), 16)
    file.sync()
    assert disk.crash(mode="none").dump() == {"a": b"\x00\x00\x01"}


def test_a_bit_can_be_flipped_in_bytes_that_are_in_doubt(disk, at):
    file = write_safe(disk, at("a"))
    file.append(b"\x00")
    fail_sync(file, disk)
    disk.flip_bit(at("a"), 0)
    assert random_contents(disk, "a") == {b"", b"\x01"}


def test_a_flipped_bit_is_not_seen_by_the_clone(disk, at):
    write_safe(disk, at("a"), b"\x00")
    twin = disk.clone()
    twin.flip_bit(at("a"), 0)
    assert disk.read(at("a")) == b"\x00"


def test_there_is_no_bit_behind_the_end(disk, at):
    write_safe(disk, at("a"), b"\x00")
    with pytest.raises(ValueError, match="no bit 8"):
        disk.flip_bit(at("a"), 8)


def test_files_lists_the_files_in_memory_only(disk, at):
    disk.mkdir(at("d"))
    write_file(disk, at("d/b"), b"")
    write_file(disk, at("a"), b"")
    execute(at("meta.db"), "create table t (x)")
    assert disk.files() == [at("a"), at("d/b")]


# Real files.


def test_sqlite_finds_a_real_directory(disk, at):
    disk.make_dirs(at("vhosts/1"))
    execute(at("vhosts/1/meta.db"), "create table t (x)", "insert into t values (1)")
    assert execute(at("vhosts/1/meta.db"), "select x from t") == [(1,)]


def test_a_real_database_is_seen_beside_the_files_in_memory(disk, at):
    write_file(disk, at("a"), b"1")
    execute(at("meta.db"), "create table t (x)")
    assert disk.listdir(disk.root) == ["a", "meta.db"]
    assert list(disk.walk(disk.root)) == [at("a"), at("meta.db")]
    assert disk.exists(at("meta.db"))
    assert not disk.exists(at("other.db"))
    assert not disk.is_dir(at("meta.db"))
    assert disk.size(at("meta.db")) == os.path.getsize(at("meta.db"))
    assert disk.read(at("meta.db")).startswith(b"SQLite format 3")


def test_the_files_beside_a_database_are_real_as_well(disk, at):
    with contextlib.closing(sqlite3.connect(at("meta.db"), isolation_level=None)) as connection:
        connection.execute("pragma journal_mode = wal")
        connection.execute("create table t (x)")
        assert disk.listdir(disk.root) == ["meta.db", "meta.db-shm", "meta.db-wal"]


def test_remove_tree_removes_real_files_for_real(disk, at):
    disk.make_dirs(at("d/e"))
    execute(at("d/e/meta.db"), "create table t (x)")
    write_file(disk, at("d/a"), b"")
    disk.remove_tree(at("d"))
    assert os.listdir(disk.root) == []


def test_a_directory_with_a_real_file_is_not_empty(disk, at):
    disk.make_dirs(at("d"))
    execute(at("d/meta.db"), "create table t (x)")
    with pytest.raises(OSError, match="not empty"):
        disk.rmdir(at("d"))


def test_a_database_survives_a_crash_as_it_is(disk, at):
    disk.make_dirs(at("d"))
    execute(at("d/meta.db"), "create table t (x)")
    disk.mkdir(at("lost"))
    after = disk.crash(mode="none")
    assert after.listdir(at("d")) == ["meta.db"]
    assert execute(at("d/meta.db"), "select * from t") == []


def test_a_database_is_lost_with_its_directory(disk, at):
    disk.mkdir(at("d"))
    execute(at("d/meta.db"), "create table t (x)")
    after = disk.crash(mode="none")
    assert not after.exists(at("d/meta.db"))
    assert os.listdir(disk.root) == []


def test_a_database_moves_with_its_directory_and_back_again_in_a_crash(disk, at):
    disk.make_dirs(at("d"))
    execute(at("d/meta.db"), "create table t (x)")
    disk.rename(at("d"), at("e"))
    assert disk.listdir(at("e")) == ["meta.db"]
    after = disk.crash(mode="none")
    assert after.listdir(at("d")) == ["meta.db"]
    assert execute(at("d/meta.db"), "select * from t") == []
    assert sorted(os.listdir(disk.root)) == ["d"]


def test_two_databases_change_places_back_again_in_a_crash(disk, at):
    for name in ("d", "e"):
        disk.make_dirs(at(name))
        execute(at(f"{name}/meta.db"), "create table t (x)", f"insert into t values ('{name}')")
    disk.rename(at("d"), at("f"))
    disk.rename(at("e"), at("d"))
    disk.rename(at("f"), at("e"))
    disk.crash(mode="none")
    assert [execute(at(f"{name}/meta.db"), "select * from t") for name in ("d", "e")] == [[("d",)], [("e",)]]


def test_a_crash_in_place_does_not_take_a_database_from_an_open_connection(disk, at):
    disk.make_dirs(at("d"))
    with contextlib.closing(sqlite3.connect(at("d/meta.db"), isolation_level=None)) as connection:
        connection.execute("create table t (x)")
        disk.mkdir(at("lost"))
        disk.crash(mode="none")
        connection.execute("insert into t values (1)")
    assert execute(at("d/meta.db"), "select * from t") == [(1,)]


def test_a_crash_in_place_leaves_other_things_in_the_root_alone(disk, at):
    Path(at("notes.txt")).write_text("of the test")
    execute(at("meta.db"), "create table t (x)")
    disk.mkdir(at("lost"))
    disk.crash(mode="none")
    assert sorted(os.listdir(disk.root)) == ["meta.db", "notes.txt"]


def test_several_outcomes_of_one_crash_each_have_their_own_database(disk, at, tmp_path):
    disk.make_dirs(at("d"))
    execute(at("d/meta.db"), "create table t (x)")
    for number in range(3):
        after = disk.crash(random.Random(number), root=tmp_path / str(number))
        database = after.root + "/d/meta.db"
        execute(database, f"insert into t values ({number})")
        assert execute(database, "select * from t") == [(number,)]
    assert execute(at("d/meta.db"), "select * from t") == []


def test_a_clone_with_its_own_root_has_its_own_database(disk, at, tmp_path):
    disk.make_dirs(at("d"))
    execute(at("d/meta.db"), "create table t (x)")
    disk.make_dirs(at("d/index.lmdb"))
    disk.create(at("d/index.lmdb/data.mdb")).append(b"pages")
    twin = disk.clone(tmp_path / "twin")
    execute(twin.root + "/d/meta.db", "insert into t values (1)")
    assert execute(at("d/meta.db"), "select * from t") == []
    assert twin.read(twin.root + "/d/index.lmdb/data.mdb") == b"pages"


def test_everything_in_an_lmdb_directory_is_real(disk, at):
    disk.make_dirs(at("index.lmdb"))
    disk.create(at("index.lmdb/data.mdb")).append(b"pages")
    disk.sync_dir(at("index.lmdb"))
    assert os.path.getsize(at("index.lmdb/data.mdb")) == 5
    assert disk.listdir(disk.root) == ["index.lmdb"]
    assert disk.is_dir(at("index.lmdb"))
    assert disk.crash(mode="none").listdir(at("index.lmdb")) == ["data.mdb"]
    after = FaultyDisk(disk.root)
    after.remove_tree(at("index.lmdb"))
    assert os.listdir(disk.root) == []


def test_calls_on_real_files_are_counted_and_can_fail(disk, at):
    execute(at("meta.db"), "create table t (x)")
    disk.fail_at(1, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        disk.unlink(at("meta.db"))
    disk.unlink(at("meta.db"))
    assert disk.calls == 2


def test_a_real_database_can_be_linked_and_renamed(disk, at):
    execute(at("meta.db"), "create table t (x)")
    disk.link(at("meta.db"), at("copy.db"))
    disk.rename(at("copy.db"), at("snapshot.db"))
    assert disk.listdir(disk.root) == ["meta.db", "snapshot.db"]


def test_a_file_cannot_change_between_memory_and_the_real_directory(disk, at):
    write_file(disk, at("meta.db.tmp"), b"")
    with pytest.raises(OSError, match="cross-device"):
        disk.rename(at("meta.db.tmp"), at("meta.db"))


# Threads.


def test_two_threads_can_write_at_once(disk, at):
    file = disk.create(at("a"))

    def write(first: int) -> None:
        for position in range(first, 2000, 2):
            file.pwrite(b"x", position)

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert disk.read(at("a")) == b"x" * 2000
    assert [call.kind for call in disk.trace].count("pwrite") == 2000


def test_a_crash_stops_the_thread_that_is_still_writing(disk, at):
    file = write_safe(disk, at("a"))
    begun = threading.Event()
    stopped: list[bool] = []

    def write() -> None:
        try:
            while True:
                file.append(b"x")
                begun.set()
        except PowerCut:
            stopped.append(True)

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    after = disk.crash(mode="all")
    size = after.size(at("a"))
    thread.join()
    assert stopped == [True]
    assert after.size(at("a")) == size > 0
