"""The metadata of a vhost: uids are never used twice, records come back as they were, foreign files are refused."""

from __future__ import annotations

import contextlib
import datetime
import doctest
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warren.errors import (
    DiskFullError,
    QueueMismatchError,
    StoreClosedError,
    StoreFormatError,
    StoreLockedError,
    StorePathError,
)
from warren.storage import metadata as metadata_module
from warren.storage.metadata import FORMAT_VERSION, Metadata, QueueRecord


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "meta.db")


@pytest.fixture
def metadata(path):
    metadata = Metadata(path)
    yield metadata
    metadata.close()


def queue(name: str, **fields) -> QueueRecord:
    return QueueRecord(name=name, created_at=1.5, **fields)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def crash(path: str, directory) -> str:
    """The files as a process that dies now leaves them, under another name."""
    directory.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(path + suffix, directory / f"meta.db{suffix}")
    return str(directory / "meta.db")


def test_the_examples_of_the_module_run():
    assert doctest.testmod(metadata_module).failed == 0


# ---- boots and settings ----


def test_every_boot_has_the_next_number(path):
    for number in (1, 2, 3):
        metadata = Metadata(path)
        assert metadata.boot() == number
        metadata.close()


def test_a_boot_is_counted_even_if_the_process_dies_right_after(path, metadata, tmp_path):
    assert metadata.boot() == 1
    after = Metadata(crash(path, tmp_path / "after"))
    assert after.boot() == 2
    after.close()


def test_a_setting_is_what_was_set_last(path, metadata):
    assert metadata.get("colour") is None
    assert metadata.get("colour", "red") == "red"
    metadata.set("colour", "green")
    metadata.set("colour", ["blue", {"shade": 3}])
    metadata.close()
    again = Metadata(path)
    assert again.get("colour") == ["blue", {"shade": 3}]
    again.close()


def test_a_setting_of_none_is_not_a_missing_one(metadata):
    metadata.set("colour", None)
    assert metadata.get("colour", "red") is None


# ---- queues ----


def test_a_declared_queue_comes_back_with_its_uid(path, metadata):
    record = queue("orders", durable=True, auto_delete=True, exclusive=True, arguments={"x-max-length": 10})
    uid = metadata.declare_queue(record)
    metadata.close()
    again = Metadata(path)
    assert again.queues() == [replace(record, uid=uid)]
    again.close()


def test_many_queues_get_rising_uids_in_their_order(metadata):
    uids = metadata.declare_queues([queue(f"q{number}") for number in range(1000)])
    assert uids == list(range(1, 1001))
    assert [record.name for record in metadata.queues()] == [f"q{number}" for number in range(1000)]


def test_no_queues_are_declared_with_no_commit(metadata):
    assert metadata.declare_queues([]) == []


def test_a_second_queue_of_the_same_name_is_refused_and_its_batch_with_it(path, metadata):
    metadata.declare_queue(queue("orders"))
    with pytest.raises(QueueMismatchError, match=r"queue 'orders' is in .*meta\.db already"):
        metadata.declare_queues([queue("other"), queue("orders")])
    assert [record.name for record in metadata.queues()] == ["orders"]


def test_a_uid_is_not_used_again_after_its_queue_was_deleted(path, metadata):
    first = metadata.declare_queue(queue("orders"))
    metadata.delete_queue(first)
    assert metadata.queues() == []
    metadata.close()
    again = Metadata(path)
    assert again.declare_queue(queue("orders")) > first
    again.close()


def test_deleting_a_queue_that_is_not_there_does_nothing(metadata):
    metadata.declare_queue(queue("orders"))
    metadata.delete_queue(99)
    assert len(metadata.queues()) == 1


def test_reserved_uids_are_not_given_to_declared_queues(metadata):
    uids = []
    for number in range(250):
        uids.append(metadata.reserve_uid())
        if number % 7 == 0:
            uids.append(metadata.declare_queue(queue(f"q{number}")))
    assert len(set(uids)) == len(uids)
    assert len(metadata.queues()) == 36


def test_a_uid_can_be_reserved_before_any_queue_was_declared(metadata):
    assert metadata.reserve_uid() == 1
    assert metadata.reserve_uid() == 2
    assert metadata.declare_queue(queue("orders")) == 101


@pytest.mark.parametrize("clean", [True, False])
def test_no_uid_is_used_again_after_a_stop(path, metadata, tmp_path, clean):
    used = {metadata.reserve_uid(), *metadata.declare_queues([queue("a"), queue("b")]), metadata.reserve_uid()}
    if clean:
        metadata.close()
    else:
        path = crash(path, tmp_path / "after")
    again = Metadata(path)
    new = {again.reserve_uid(), again.declare_queue(queue("c"))}
    assert not used & new
    again.close()


def test_no_uid_that_a_killed_process_showed_is_used_again(path, scale, record_property):
    program = (
        "import sys\n"
        "from warren.storage.metadata import Metadata, QueueRecord\n"
        "metadata = Metadata(sys.argv[1])\n"
        "for number in range(10**9):\n"
        "    uid = metadata.declare_queue(QueueRecord(name=f'{sys.argv[2]}-{number}', created_at=0.0))\n"
        "    print(uid, metadata.reserve_uid(), flush=True)\n"
    )
    seen: set[int] = set()
    kills = scale.scale(20)
    for run in range(kills):
        child = subprocess.Popen([sys.executable, "-c", program, path, str(run)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        shown = [child.stdout.readline() for _ in range(5 + run)]
        child.kill()
        shown += child.stdout.read().splitlines(keepends=True)
        child.stdout.close()
        child.wait()
        uids = [int(uid) for line in shown if line.endswith("\n") for uid in line.split()]
        assert len(uids) >= 10
        assert not seen & set(uids)
        assert len(set(uids)) == len(uids)
        seen.update(uids)
    record_property("kills", kills)


# ---- arguments ----

argument_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    # ISO 8601 has no word for the second 02:30 of the night when summer time ends.
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC)).map(lambda moment: moment.replace(fold=0)),
    lambda values: (
        st.lists(values, max_size=4)
        | st.dictionaries(st.text() | st.sampled_from(["$dict", "$bytes", "$datetime"]), values, max_size=4)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), argument_values, max_size=5), st.text(min_size=1, max_size=40))
def test_arguments_and_name_of_any_kind_come_back_as_they_were(arguments, name):
    metadata = Metadata(":memory:")
    try:
        metadata.declare_queue(queue(name, arguments=arguments))
        [record] = metadata.queues()
        assert record.name == name
        assert record.arguments == arguments
        assert repr(record.arguments) == repr(arguments)  # 1 is not True, and 1.0 is not 1
    finally:
        metadata.close()


def test_arguments_stand_in_the_file_as_json_that_a_person_can_read(path, metadata):
    moment = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    metadata.declare_queue(queue("a", arguments={"n": 1, "raw": b"\x00\x01", "at": moment, "price": Decimal("1.50")}))
    with sqlite3.connect(path) as reader:
        [(text,)] = reader.execute("SELECT arguments FROM queues")
    reader.close()
    assert text == (
        '{"n":1,"raw":{"$bytes":"AAE="},"at":{"$datetime":"2026-01-01T00:00:00+00:00"},"price":{"$decimal":"1.50"}}'
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x-odd": object}, r"queue 'orders': <class 'object'> is a type; it can be None, bool"),
        ({"x-odd": {1: 2}}, r"queue 'orders': the key 1 is a int; keys are str"),
    ],
)
def test_an_argument_that_cannot_be_kept_is_named(metadata, arguments, text):
    with pytest.raises(TypeError, match=text):
        metadata.declare_queue(queue("orders", arguments=arguments))
    assert metadata.queues() == []


# ---- transactions ----


def test_a_transaction_is_all_or_nothing(path, metadata, tmp_path):
    with contextlib.suppress(RuntimeError), metadata.transaction():
        metadata.declare_queue(queue("lost"))
        metadata.set("colour", "lost")
        raise RuntimeError
    assert metadata.queues() == []
    assert metadata.get("colour") is None
    with metadata.transaction():
        metadata.declare_queue(queue("kept"))
        metadata.set("colour", "kept")
        before = Metadata(crash(path, tmp_path / "before"))
    assert before.queues() == []
    before.close()
    after = Metadata(crash(path, tmp_path / "after"))
    assert [record.name for record in after.queues()] == ["kept"]
    assert after.get("colour") == "kept"
    after.close()


def test_a_step_that_fails_in_a_transaction_leaves_the_steps_before_it_whole(metadata):
    with metadata.transaction():
        metadata.declare_queue(queue("a"))
        with pytest.raises(QueueMismatchError):
            metadata.declare_queues([queue("b"), queue("a")])
        metadata.declare_queue(queue("c"))
    assert [record.name for record in metadata.queues()] == ["a", "c"]


def test_uids_that_were_reserved_in_a_transaction_that_failed_are_not_handed_out(metadata):
    with contextlib.suppress(RuntimeError), metadata.transaction():
        metadata.reserve_uid()
        raise RuntimeError
    declared = metadata.declare_queue(queue("a"))
    assert declared not in {metadata.reserve_uid() for _ in range(200)}


def test_threads_that_share_a_lock_can_share_the_metadata(metadata):
    lock = threading.Lock()
    uids: list[int] = []

    def work(thread: int) -> None:
        for number in range(30):
            with lock:
                uids.append(metadata.declare_queue(queue(f"{thread}-{number}")))
            with lock:
                uids.append(metadata.reserve_uid())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(uids) == len(set(uids)) == 240
    assert len(metadata.queues()) == 120


# ---- the file ----


def test_a_commit_is_synced(metadata):
    assert metadata._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert metadata._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_backup_opens_as_the_same_store_and_is_one_file(path, metadata, tmp_path):
    metadata.boot()
    metadata.declare_queues([queue("a"), queue("b")])
    reserved = metadata.reserve_uid()
    (tmp_path / "copy").mkdir()
    target = str(tmp_path / "copy" / "meta.db")
    metadata.backup(target)
    assert os.listdir(tmp_path / "copy") == ["meta.db"]
    metadata.declare_queue(queue("later"))
    copy = Metadata(target)
    assert [record.name for record in copy.queues()] == ["a", "b"]
    assert copy.boot() == 2
    assert copy.reserve_uid() > reserved
    copy.close()


def test_a_backup_goes_over_no_file(metadata, tmp_path):
    target = tmp_path / "copy.db"
    target.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="needs a name that is free"):
        metadata.backup(str(target))
    assert target.read_bytes() == b"precious"


def test_a_file_of_a_newer_format_is_refused_and_left_alone(path, metadata):
    metadata._db.execute(f"PRAGMA user_version = {FORMAT_VERSION + 6}")
    metadata.close()
    before = read(path)
    with pytest.raises(StoreFormatError) as caught:
        Metadata(path)
    text = str(caught.value)
    assert path in text
    assert f"version {FORMAT_VERSION + 6}, this Warren supports {FORMAT_VERSION} and older" in text
    assert "open it with the Warren that wrote it" in text
    assert read(path) == before


def test_the_database_of_another_program_is_refused_and_left_alone(path):
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE diary (day TEXT)")
    other.commit()
    other.close()
    before = read(path)
    with pytest.raises(StoreFormatError, match=r"meta\.db is an SQLite database, but not one of Warren"):
        Metadata(path)
    assert read(path) == before


def test_a_file_that_is_no_database_is_refused_and_left_alone(path):
    with open(path, "wb") as file:
        file.write(b"Dear diary, " * 100)
    with pytest.raises(
        StoreFormatError, match=r"meta\.db is not a file of Warren's metadata: .*version 1 is supported"
    ):
        Metadata(path)
    assert read(path) == b"Dear diary, " * 100


def test_an_empty_file_of_a_crash_during_creation_becomes_a_store(path):
    empty = sqlite3.connect(path)
    empty.execute("PRAGMA journal_mode = WAL")
    empty.close()
    metadata = Metadata(path)
    assert metadata.boot() == 1
    metadata.close()


def test_a_file_of_an_older_format_is_brought_to_the_newest(path, metadata, monkeypatch):
    metadata.declare_queue(queue("orders"))
    metadata.close()
    step = ("CREATE TABLE exchanges (name TEXT PRIMARY KEY)", "INSERT INTO exchanges VALUES ('amq.direct')")
    monkeypatch.setattr(metadata_module, "_MIGRATIONS", (*metadata_module._MIGRATIONS, step))
    monkeypatch.setattr(metadata_module, "FORMAT_VERSION", FORMAT_VERSION + 1)
    for _ in range(2):  # and only once
        newer = Metadata(path)
        assert newer._db.execute("SELECT name FROM exchanges").fetchall() == [("amq.direct",)]
        assert [record.name for record in newer.queues()] == ["orders"]
        newer.close()


def test_a_migration_that_fails_leaves_the_old_format_whole(path, metadata, monkeypatch):
    metadata.declare_queue(queue("orders"))
    metadata.close()
    with monkeypatch.context() as patch:
        step = ("DROP TABLE queues", "THIS IS NOT SQL")
        patch.setattr(metadata_module, "_MIGRATIONS", (*metadata_module._MIGRATIONS, step))
        with pytest.raises(Exception, match="syntax error"):
            Metadata(path)
    again = Metadata(path)
    assert [record.name for record in again.queues()] == ["orders"]
    again.close()


def test_a_path_without_a_directory_is_named(tmp_path):
    with pytest.raises(StorePathError, match=r"nowhere/meta\.db to write: .*the directory must exist"):
        Metadata(str(tmp_path / "nowhere" / "meta.db"))


def test_a_full_disk_is_reported_as_one_and_nothing_is_kept_of_the_batch(metadata):
    metadata.declare_queue(queue("orders"))
    metadata._db.execute("PRAGMA max_page_count = 20")
    with pytest.raises(DiskFullError, match=r"no room to write .*meta\.db"):
        metadata.declare_queues([queue(f"{number}" * 500) for number in range(1000)])
    assert [record.name for record in metadata.queues()] == ["orders"]
    metadata._db.execute("PRAGMA max_page_count = 2000")
    assert metadata.declare_queue(queue("more")) == 2


def test_a_file_that_another_process_writes_is_reported_as_locked(path, metadata):
    metadata._db.execute("PRAGMA busy_timeout = 0")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreLockedError, match=r"another process is writing .*meta\.db"):
        metadata.boot()
    other.close()
    assert metadata.boot() == 1


def test_closed_metadata_says_so_and_closing_twice_does_nothing(path, metadata):
    metadata.close()
    metadata.close()
    for use in (
        metadata.boot,
        metadata.queues,
        metadata.reserve_uid,
        lambda: metadata.get("a"),
        lambda: metadata.backup(path + "2"),
    ):
        with pytest.raises(StoreClosedError, match=r"meta\.db was closed"):
            use()
