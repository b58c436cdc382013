"""The library face: every name that others build on, what it does, and what it says to bad input."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import warren
from warren.errors import (
    DiskFullError,
    DurabilityError,
    InvalidArgumentError,
    MessageStateError,
    MessageTooLargeError,
    QueueArgumentError,
    QueueFullError,
    QueueMismatchError,
    QueueNotFoundError,
    StoreClosedError,
    StoreFormatError,
    StoreLockedError,
    StorePathError,
    WarrenError,
)
from warren.kernel.checksum import crc32c
from warren.storage.journal import JournalCommit
from warren.storage.layout import JOURNAL_MAGIC, hashed, pack_header
from warren.storage.settings import EngineSettings

# Small numbers, so that a few hundred messages reach every container, file and checkpoint.
SMALL = EngineSettings(
    segment_entries=64,
    journal_file_bytes=32 * 1024,
    io_batch=32,
    load_entries=32,
    ram_target=16,
    ram_slack=0,
    carry_below=256,
    store_file_bytes=64 * 1024,
    max_message_bytes=3 * 1024 * 1024,
    reserve_bytes=0,
)
CONTAINERS = ("q1", "q2", "delta", "q3", "q4")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[warren.Store]:
    with warren.open(tmp_path / "data", settings=SMALL) as opened:
        yield opened


@pytest.fixture
def queue(store: warren.Store) -> warren.Queue:
    return store.queue("q")


def reopened(store: warren.Store) -> warren.Store:
    """The same directory after a clean stop."""
    store.close()
    return warren.open(os.path.dirname(os.path.dirname(store.engine.root)), settings=SMALL)


def bodies(messages: list[warren.Message]) -> list[bytes]:
    return [message.body for message in messages]


def seqs(messages: list[warren.Message]) -> list[int]:
    return [message.seq_id for message in messages]


# ---- the names ----


def test_the_public_names_are_these():
    assert set(warren.__all__) == {
        "Message",
        "Queue",
        "Snapshot",
        "Store",
        "Transaction",
        "WarrenError",
        "errors",
        "open",
    }
    assert re.fullmatch(r"\d+\.\d+\.\d+", warren.__version__)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (warren.open, ["path", "vhost", "durability"]),
        (warren.Store.queue, ["self", "name", "durable", "arguments"]),
        (warren.Queue.publish, ["self", "body", "persistent", "headers", "priority", "expiration_ms"]),
        (warren.Queue.publish_many, ["self", "bodies", "persistent", "headers", "priority", "expiration_ms"]),
        (warren.Queue.get, ["self", "timeout"]),
        (warren.Queue.get_many, ["self", "count", "timeout"]),
        (warren.Queue.ack_many, ["self", "messages"]),
        (warren.Queue.browse, ["self", "start_seq", "limit"]),
        (warren.Message.nack, ["self", "requeue"]),
        (warren.Transaction.publish, ["self", "queue", "body", "persistent", "headers", "priority", "expiration_ms"]),
        (warren.Transaction.ack, ["self", "message"]),
    ],
)
def test_the_parameters_that_others_use_have_these_names(function, parameters):
    assert list(inspect.signature(function).parameters)[: len(parameters)] == parameters


def test_every_error_is_a_warren_error():
    classes = [kind for _, kind in inspect.getmembers(warren.errors, inspect.isclass)]
    assert len(classes) > 10
    assert all(issubclass(kind, WarrenError) for kind in classes)


def test_the_example_of_the_documentation_runs(tmp_path):
    with warren.open(tmp_path / "data", vhost="/", durability="fsync") as store:
        q = store.queue("orders", durable=True, arguments={"x-max-priority": 5})
        store.queue("a"), store.queue("b")
        seq = q.publish(b"hello", persistent=True, headers={"k": "v"}, priority=3, expiration_ms=60_000)
        q.publish_many([b"a", b"b"])
        store.sync()
        m = q.get()
        assert (m.body, m.headers, m.seq_id, m.redelivered, m.delivery_count) == (b"hello", {"k": "v"}, seq, False, 0)
        assert m.properties == {"headers": {"k": "v"}, "delivery_mode": 2, "priority": 3, "expiration": "60000"}
        assert abs(m.published_at - time.time()) < 60
        m.ack()
        batch = q.get_many(1000, timeout=0)
        q.ack_many(batch)
        q.publish(b"c")
        assert bodies(list(q.browse(start_seq=0, limit=10))) == [b"c"]
        m = q.get(timeout=5)
        with store.transaction() as tx:
            tx.publish("a", b"1")
            tx.publish("b", b"2")
            tx.ack(m)
        assert (len(q), q.purge(), q.delete(), store.queues()) == (0, 0, 0, ["a", "b"])
        with store.snapshot() as snap, warren.open(snap.path) as copy:
            assert len(copy.queue("a")) == 1


# ---- opening ----


def test_a_missing_directory_is_made(tmp_path):
    with warren.open(tmp_path / "a" / "b") as store:
        store.queue("q").publish(b"1")
    with warren.open(str(tmp_path / "a" / "b")) as store:
        assert len(store.queue("q")) == 1


def test_a_relative_path_stays_the_same_directory_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warren.open("data") as store:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.queue("q").publish(b"1")
        store.sync()
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_path_that_is_a_file_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorePathError, match="is a file"):
        warren.open(tmp_path / path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("path", [None, 7, b"data", "", "a\0b"])
def test_a_path_of_a_wrong_type_is_named(path):
    with pytest.raises(InvalidArgumentError, match="path is"):
        warren.open(path)


@pytest.mark.parametrize("vhost", [None, 7, "", "x" * 256, "\ud800"])
def test_a_vhost_name_of_a_wrong_kind_is_named(tmp_path, vhost):
    with pytest.raises(InvalidArgumentError, match="vhost name"):
        warren.open(tmp_path / "data", vhost=vhost)
    assert not (tmp_path / "data").exists()


def test_an_unknown_durability_is_named_with_those_there_are(tmp_path):
    with pytest.raises(DurabilityError, match=r"'always'.*'fsync', 'os', 'memory'"):
        warren.open(tmp_path / "data", durability="always")
    assert not (tmp_path / "data").exists()


def run_python(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("existing", [False, True])
def test_a_directory_without_permission_is_refused(existing):
    # Not tmp_path: root's test directories cannot even be searched by others. Root becomes somebody else first.
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "data")
        if existing:
            warren.open(path).close()
        os.chmod(directory, 0o555)
        for place, _, files in os.walk(directory):
            os.chmod(place, 0o555)
            for name in files:
                os.chmod(os.path.join(place, name), 0o444)
        try:
            done = run_python(
                """
                import os, sys, warren
                open = warren.open  # what it imports may not be readable for who comes next
                if os.getuid() == 0:
                    os.setgid(65534)
                    os.setuid(65534)
                try:
                    open(sys.argv[1])
                except warren.errors.StorePathError as error:
                    print(error)
                """,
                path,
            )
        finally:
            for place, *_ in os.walk(directory):
                os.chmod(place, stat.S_IRWXU)
    assert done.stderr == ""
    assert path in done.stdout
    assert "may" in done.stdout


def test_a_vhost_directory_with_a_foreign_database_is_refused_and_left_alone(tmp_path):
    root = tmp_path / "vhosts" / hashed("/")
    root.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(root / "meta.db")) as db:
        db.execute("CREATE TABLE mine (x)")
    before = (root / "meta.db").read_bytes()
    with pytest.raises(StoreFormatError, match="not one of Warren"):
        warren.open(tmp_path)
    assert (root / "meta.db").read_bytes() == before


def test_newer_metadata_are_refused(tmp_path):
    warren.open(tmp_path).close()
    [database] = tmp_path.glob("vhosts/*/meta.db")
    with contextlib.closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreFormatError, match="version 99"):
        warren.open(tmp_path)


def test_a_newer_journal_is_refused_and_can_still_be_opened_by_its_owner(tmp_path):
    store = warren.open(tmp_path)
    store.queue("q").publish(b"1")
    store.sync()
    store.engine.abandon()
    [journal] = tmp_path.glob("vhosts/*/journal/*.wal")
    data = journal.read_bytes()
    header = bytearray(pack_header(JOURNAL_MAGIC, 1))
    header[4] = 9
    header[60:] = crc32c(bytes(header[:60])).to_bytes(4, "little")
    journal.write_bytes(bytes(header) + data[64:])
    with pytest.raises(StoreFormatError, match="version 9"):
        warren.open(tmp_path)
    journal.write_bytes(data)
    with warren.open(tmp_path) as store:
        assert len(store.queue("q")) == 1


def test_vhosts_of_one_directory_are_apart(tmp_path):
    with warren.open(tmp_path, vhost="one") as one, warren.open(tmp_path, vhost="two") as two:
        one.queue("q").publish(b"1")
        assert two.queues() == []
    with warren.open(tmp_path, vhost="one") as one:
        assert len(one.queue("q")) == 1


# ---- one owner ----


def test_a_second_process_learns_the_pid_of_the_owner(tmp_path, store):
    done = run_python(
        """
        import sys, warren
        try:
            warren.open(sys.argv[1])
        except warren.errors.StoreLockedError as error:
            print(error)
        """,
        tmp_path / "data",
    )
    assert done.stderr == ""
    assert f"process {os.getpid()}" in done.stdout


def test_a_second_open_in_the_same_process_is_refused(tmp_path, store):
    with pytest.raises(StoreLockedError, match=str(os.getpid())):
        warren.open(tmp_path / "data")
    store.close()
    warren.open(tmp_path / "data").close()


def test_an_open_that_failed_holds_no_lock(tmp_path):
    warren.open(tmp_path).close()
    [database] = tmp_path.glob("vhosts/*/meta.db")
    good = database.read_bytes()
    database.write_bytes(b"nonsense" * 100)
    with pytest.raises(StoreFormatError):
        warren.open(tmp_path)
    database.write_bytes(good)
    warren.open(tmp_path).close()


# ---- queues ----


def test_a_queue_is_made_once_and_kept(store):
    queue = store.queue("q", arguments={"x-max-length": 10})
    assert store.queue("q") is queue
    assert store.queue("q", arguments={"x-max-length": 10}) is queue
    assert store.queues() == ["q"]
    store = reopened(store)
    with store:
        assert store.queues() == ["q"]
        assert store.queue("q").info()["arguments"] == {"x-max-length": 10}


def test_a_queue_of_other_arguments_is_refused_with_both(store):
    store.queue("q", arguments={"x-max-length": 10})
    with pytest.raises(QueueMismatchError, match=r"'q' in vhost '/' is declared with x-max-length=10, not 20"):
        store.queue("q", arguments={"x-max-length": 20})
    with pytest.raises(QueueMismatchError, match="durable=True, not False"):
        store.queue("q", durable=False)


@pytest.mark.parametrize("name", [None, 7, b"q", "", "x" * 256, "\ud800"])
def test_a_queue_name_of_a_wrong_kind_is_named(store, name):
    with pytest.raises(QueueArgumentError, match="queue name"):
        store.queue(name)
    assert store.queues() == []


@pytest.mark.parametrize("name", ["x" * 255, "a/b", "..", "naïve ☃", "a\nb", " "])
def test_a_queue_name_may_be_any_text(store, name):
    store.queue(name).publish(b"1")
    with reopened(store) as store:
        assert store.queues() == [name]
        assert store.queue(name).get().body == b"1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"x-max-lenght": 5}, "x-max-lenght=5; did you mean x-max-length"),
        ({"x-max-length": "5"}, "x-max-length='5'"),
        ({"x-max-priority": 256}, "x-max-priority=256"),
        ({"x-overflow": "explode"}, "x-overflow='explode'"),
        ({5: 5}, "int for a name"),
        ({"mine": object()}, "mine|object"),
    ],
)
def test_queue_arguments_that_cannot_be_are_named_and_no_queue_is_made(store, arguments, said):
    with pytest.raises(QueueArgumentError, match=said):
        store.queue("q", arguments=arguments)
    assert store.queues() == []


def test_durable_of_a_wrong_type_is_named(store):
    with pytest.raises(QueueArgumentError, match="durable is 'yes'"):
        store.queue("q", durable="yes")


def test_a_queue_that_is_not_durable_goes_with_the_store(store):
    queue = store.queue("q", durable=False)
    queue.publish(b"1")
    assert not queue.durable
    with reopened(store) as store:
        assert store.queues() == []


def test_a_deleted_queue_is_gone_and_its_name_begins_anew(store, queue):
    queue.publish_many([b"x"] * 5)
    message = queue.get()
    assert queue.delete() == 4
    assert store.queues() == []
    for call in (
        lambda: queue.publish(b"1"),
        lambda: queue.get(),
        lambda: message.ack(),
        lambda: len(queue),
        lambda: queue.info(),
        lambda: queue.purge(),
        lambda: queue.delete(),
        lambda: list(queue.browse()),
    ):
        with pytest.raises(QueueNotFoundError, match="'q' was deleted"):
            call()
    again = store.queue("q")
    assert again is not queue
    assert (len(again), again.publish(b"new")) == (0, 0)
    with pytest.raises(QueueNotFoundError):
        message.ack()
    with reopened(store) as store:
        assert bodies(store.queue("q").get_many(10)) == [b"new"]


def test_delete_lets_a_waiting_get_go(store, queue):
    failed = in_thread(lambda: queue.get(timeout=None))
    wait_for_waiter(queue)
    queue.delete()
    with pytest.raises(QueueNotFoundError):
        failed()


# ---- publishing ----


def test_seq_ids_rise_by_one_and_are_never_used_again(store, queue):
    assert queue.publish(b"1") == 0
    assert queue.publish_many([b"2", b"3"]) == range(1, 3)
    assert queue.publish_many(iter([b"4"])) == range(3, 4)
    assert queue.publish_many([]) == range(0)
    queue.purge()
    assert queue.publish(b"5") == 4
    with reopened(store) as store:
        assert store.queue("q").publish(b"6") == 5


@pytest.mark.parametrize("body", [b"", bytearray(b"abc"), memoryview(b"abc"), b"\0" * 10])
def test_a_body_is_any_bytes(queue, body):
    queue.publish(body)
    message = queue.get()
    assert message.body == bytes(body)
    assert type(message.body) is bytes


@pytest.mark.parametrize("size", [4000, 4096, 5000, 100_000, 1024 * 1024 + 1, 2 * 1024 * 1024 + 77])
@pytest.mark.parametrize(
    ("kind", "persistent"), [("variable", True), ("variable", False), ("volatile", True), ("sqlite", True)]
)
def test_a_body_of_any_size_comes_back(store, size, kind, persistent):
    body = os.urandom(size)
    queue = store.queue("q", arguments={"x-backing-queue": kind})
    queue.publish(body, persistent=persistent)
    queue.publish_many([body, b"small", body], persistent=persistent)
    store.sync()
    assert bodies(queue.get_many(10)) == [body, body, b"small", body]
    with reopened(store) as store:
        expected = [body, body, b"small", body] if persistent and kind != "volatile" else []
        queue = store.queue("q")
        messages = queue.get_many(10)
        assert bodies(messages) == expected
        queue.ack_many(messages)
        store.sync()
        assert store.info()["persistent_store"]["valid_bytes"] == 0


@pytest.mark.parametrize("body", ["text", None, 5, ["x"], object()])
def test_a_body_that_is_not_bytes_is_refused(store, queue, body):
    with pytest.raises(InvalidArgumentError, match=f"bytes, not {type(body).__name__}"):
        queue.publish(body)
    with pytest.raises(InvalidArgumentError, match="bytes, not"):
        queue.publish_many([b"good", body])
    with pytest.raises(InvalidArgumentError, match="bytes, not"), store.transaction() as tx:
        tx.publish("q", body)
    assert len(queue) == 0


def test_one_body_is_not_taken_for_a_list_of_bodies(queue):
    with pytest.raises(InvalidArgumentError, match="list of bodies"):
        queue.publish_many(b"abc")


def test_a_message_over_the_limit_is_refused_with_both_sizes(store, queue):
    limit = SMALL.max_message_bytes
    for publish in (queue.publish, lambda body: queue.publish_many([b"x", body]), lambda body: transact(store, body)):
        with pytest.raises(MessageTooLargeError, match=rf"of \d+ bytes is over the limit of {limit}"):
            publish(bytes(limit + 1))
    assert len(queue) == 0
    assert store.info()["persistent_store"]["total_bytes"] == 0


def transact(store: warren.Store, *published: bytes) -> None:
    with store.transaction() as tx:
        for body in published:
            tx.publish("q", body)


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"priority": 300}, "priority is 300"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"expiration_ms": -1}, "expiration_ms is -1"),
        ({"expiration_ms": 1.5}, "expiration_ms is 1.5"),
        ({"headers": [1]}, r"headers is \[1\]"),
        ({"headers": {"k": object()}}, "header 'k'"),
        ({"content_typ": "x"}, "did you mean content_type"),
        ({"type": 7}, "type is 7"),
        ({"message_id": "x" * 256}, "message_id is 256 bytes long"),
    ],
)
def test_properties_that_amqp_cannot_carry_are_named(store, queue, properties, said):
    with pytest.raises(InvalidArgumentError, match=said):
        queue.publish(b"1", **properties)
    with pytest.raises(InvalidArgumentError, match=said):
        queue.publish_many([b"1"], **properties)
    with pytest.raises(InvalidArgumentError, match=said), store.transaction() as tx:
        tx.publish("q", b"1", **properties)
    assert len(queue) == 0


def test_properties_and_headers_come_back(store, queue):
    headers = {"text": "ä", "number": 2**40, "float": 1.5, "none": None, "list": [1, {"deep": True}], "bytes": b"\xff"}
    queue.publish(b"1", headers=headers, content_type="text/plain", correlation_id="c", reply_to="r", message_id="m")
    with reopened(store) as store:
        message = store.queue("q").get()
        assert message.headers == headers
        assert message.properties["content_type"] == "text/plain"
        assert (message.exchange, message.routing_key) == ("", "q")


def test_what_is_not_persistent_does_not_survive_a_restart(store, queue):
    queue.publish_many([b"transient"] * 200, persistent=False)
    queue.publish_many([b"persistent"] * 3)
    assert len(queue) == 203
    with reopened(store) as store:
        assert bodies(store.queue("q").get_many(300)) == [b"persistent"] * 3


# ---- getting ----


def test_messages_come_in_the_order_of_publishing_however_many(store, queue):
    expected = []
    for start in range(0, 1000, 50):
        queue.publish_many([b"%d" % n for n in range(start, start + 50)], persistent=start % 100 == 0)
        expected += [b"%d" % n for n in range(start, start + 50)]
    info = queue.info()
    assert info["delta"] > 0
    assert sum(info[part] for part in CONTAINERS) == info["len"] == 1000
    got: list[bytes] = []
    while messages := queue.get_many(37):
        got += bodies(messages)
        queue.ack_many(messages)
    assert got == expected


def test_get_of_an_empty_queue_is_none_at_once_or_after_its_timeout(queue):
    assert queue.get() is None
    assert queue.get_many(5) == []
    before = time.monotonic()
    assert queue.get(timeout=0.05) is None
    assert queue.get_many(5, timeout=0.05) == []
    assert time.monotonic() - before >= 0.1
    assert queue.get(timeout=-1) is None


def in_thread(call):
    """Run `call` in a thread; the function returned waits for it and gives its result, or raises its exception."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(30)
        assert not thread.is_alive()
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return result


def wait_for_waiter(queue: warren.Queue) -> None:
    while not queue._waiting:
        time.sleep(0.001)


@pytest.mark.parametrize("arrival", ["publish", "publish_many", "nack", "transaction"])
def test_a_waiting_get_is_woken(store, queue, arrival):
    if arrival == "nack":
        queue.publish(b"1")
        message = queue.get()
    got = in_thread(lambda: queue.get(timeout=30))
    wait_for_waiter(queue)
    if arrival == "publish":
        queue.publish(b"1")
    elif arrival == "publish_many":
        queue.publish_many([b"1"])
    elif arrival == "nack":
        message.nack()
    else:
        transact(store, b"1")
    assert got().body == b"1"


def test_every_waiting_thread_gets_one_of_as_many_messages(queue):
    results = [in_thread(lambda: queue.get(timeout=30)) for _ in range(5)]
    while queue._waiting < 5:
        time.sleep(0.001)
    queue.publish_many([b"x"] * 5)
    assert sorted(result().seq_id for result in results) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [0, -1])
def test_get_many_of_nothing_is_refused(queue, count):
    with pytest.raises(InvalidArgumentError, match=f"count is {count}"):
        queue.get_many(count)


def test_iteration_gives_messages_as_they_come_and_ends_with_the_queue(queue):
    queue.publish_many([b"1", b"2"])
    seen = []

    def consume() -> None:
        for message in queue:
            seen.append(message.body)
            message.ack()

    ended = in_thread(consume)
    while len(seen) < 2:
        time.sleep(0.001)
    queue.publish(b"3")
    while len(seen) < 3:
        time.sleep(0.001)
    queue.delete()
    ended()
    assert seen == [b"1", b"2", b"3"]


def test_iteration_ends_and_a_waiting_get_fails_when_the_store_is_closed(store, queue):
    ended = in_thread(lambda: list(queue))
    failed = in_thread(lambda: queue.get(timeout=None))
    while queue._waiting < 2:
        time.sleep(0.001)
    store.close()
    assert ended() == []
    with pytest.raises(StoreClosedError):
        failed()


# ---- settling ----


def test_an_acked_message_is_gone_for_good(store, queue):
    queue.publish_many([b"1", b"2", b"3"])
    queue.get().ack()
    with reopened(store) as store:
        assert bodies(store.queue("q").get_many(5)) == [b"2", b"3"]


def test_a_nacked_message_returns_to_its_place_or_is_dropped(queue):
    queue.publish_many([b"%d" % n for n in range(5)])
    batch = queue.get_many(4)
    batch[2].nack()
    batch[0].nack(requeue=True)
    batch[1].nack(requeue=False)
    queue.nack_many([batch[3]])
    messages = queue.get_many(10)
    assert seqs(messages) == [0, 2, 3, 4]
    assert [m.redelivered for m in messages] == [True, True, True, False]
    assert [m.delivery_count for m in messages] == [1, 1, 1, 0]


@pytest.mark.parametrize("how", ["ack", "nack", "drop"])
def test_a_message_is_settled_once(queue, how):
    queue.publish(b"1")
    message = queue.get()
    {"ack": message.ack, "nack": message.nack, "drop": lambda: message.nack(requeue=False)}[how]()
    for again in (message.ack, message.nack, lambda: queue.ack_many([message])):
        with pytest.raises(MessageStateError, match="was settled before; nothing was settled by this call"):
            again()


def test_a_batch_is_settled_all_or_none(store, queue):
    other = store.queue("other")
    other.publish(b"x")
    stranger = other.get()
    queue.publish_many([b"1", b"2"])
    first, second = queue.get_many(2)
    with pytest.raises(MessageStateError, match="is of another queue"):
        queue.ack_many([first, stranger, second])
    with pytest.raises(InvalidArgumentError, match="a Message is needed, not int"):
        queue.ack_many([first, 5])
    queue.ack_many([])
    queue.ack_many(m for m in (first, second))
    stranger.ack()
    assert queue.info()["pending_acks"] == other.info()["pending_acks"] == 0


def test_a_message_that_is_settled_twice_in_one_batch_does_no_harm(queue):
    queue.publish_many([b"1", b"2"])
    first, second = queue.get_many(2)
    queue.ack_many([first, first])
    queue.nack_many([second, second])
    assert (len(queue), queue.info()["pending_acks"]) == (1, 0)


def test_a_message_that_was_browsed_cannot_be_acked(queue):
    queue.publish(b"1")
    [message] = queue.browse()
    with pytest.raises(MessageStateError):
        message.ack()
    assert len(queue) == 1


def test_a_message_keeps_its_body_after_it_went_back_and_was_paged_out(queue):
    queue.publish_many([b"%d" % n for n in range(50)])
    held = queue.get_many(40)
    looked = list(queue.browse(unacked=True))
    queue.nack_many(held)
    queue.publish_many([b"x"] * 500)
    assert bodies(held) == [b"%d" % n for n in range(40)]
    assert bodies(looked) == [b"%d" % n for n in range(50)]
    assert repr(held[3]) == "<Message 3 of 'q', 1 bytes>"


def test_what_was_handed_out_and_not_settled_comes_back_flagged_after_a_clean_restart(store, queue):
    queue.publish_many([b"%d" % n for n in range(6)])
    batch = queue.get_many(3)
    batch[0].ack()
    batch[1].nack()
    with reopened(store) as store:
        messages = store.queue("q").get_many(10)
        assert [(m.seq_id, m.redelivered, m.delivery_count) for m in messages] == [
            (1, True, 1),
            (2, True, 0),
            (3, False, 0),
            (4, False, 0),
            (5, False, 0),
        ]


# ---- limits ----


def test_a_message_expires_after_the_shorter_of_its_own_and_the_queues_time(store):
    queue = store.queue("q", arguments={"x-message-ttl": 60_000})
    queue.publish(b"short", expiration_ms=1)
    queue.publish(b"long", expiration_ms=600_000)
    queue.publish(b"own", expiration_ms=1)
    looked = {m.body: m.expires_at - m.published_at for m in queue.browse()}
    time.sleep(0.005)
    assert looked[b"long"] == pytest.approx(60)
    assert bodies(list(queue.browse())) == [b"long"]
    assert bodies(queue.get_many(10)) == [b"long"]
    assert queue.get() is None
    assert queue.info()["expired"] == 2


def test_an_expired_message_is_expired_after_a_restart_too(store, queue):
    queue.publish(b"1", expiration_ms=1)
    queue.publish(b"2")
    time.sleep(0.005)
    with reopened(store) as store:
        assert bodies(store.queue("q").get_many(10)) == [b"2"]


def test_a_time_to_live_of_zero_keeps_nothing(store):
    queue = store.queue("q", arguments={"x-message-ttl": 0})
    queue.publish(b"1")
    assert queue.get() is None


def test_a_length_limit_drops_from_the_head(store):
    queue = store.queue("q", arguments={"x-max-length": 3})
    queue.publish_many([b"%d" % n for n in range(5)])
    queue.publish(b"5")
    assert (len(queue), queue.info()["overflowed"]) == (3, 3)
    assert bodies(queue.get_many(10)) == [b"3", b"4", b"5"]


def test_a_length_limit_in_bytes_drops_from_the_head(store):
    queue = store.queue("q", arguments={"x-max-length-bytes": 3000})
    queue.publish_many([b"%d" % n + bytes(1000) for n in range(5)])
    assert [body[:1] for body in bodies(queue.get_many(10))] == [b"3", b"4"]


def test_a_length_limit_that_rejects_takes_all_of_a_batch_or_nothing(store):
    queue = store.queue("q", arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
    queue.publish_many([b"1", b"2"])
    for publish in (lambda: queue.publish_many([b"3", b"4"]), lambda: transact(store, b"3", b"4")):
        with pytest.raises(QueueFullError, match=r"holds 2 of at most 3 messages .* rejects 2 more"):
            publish()
    queue.publish(b"3")
    with pytest.raises(QueueFullError):
        queue.publish(b"4")
    queue.get().ack()
    transact(store, b"4")
    assert bodies(queue.get_many(10)) == [b"2", b"3", b"4"]


def test_a_limit_in_bytes_that_rejects_leaves_nothing_of_a_large_body(store):
    arguments = {"x-max-length-bytes": 1024 * 1024, "x-overflow": "reject-publish"}
    queue = store.queue("q", arguments=arguments)
    with pytest.raises(QueueFullError, match="bytes"):
        queue.publish(bytes(2 * 1024 * 1024))
    assert store.info()["persistent_store"]["valid_bytes"] == 0


def test_expired_messages_take_no_room(store):
    queue = store.queue("q", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    queue.publish(b"1", expiration_ms=1)
    time.sleep(0.005)
    queue.publish(b"2")
    assert queue.get().body == b"2"


def test_a_requeue_over_the_limit_drops_the_oldest(store):
    queue = store.queue("q", arguments={"x-max-length": 2})
    queue.publish_many([b"1", b"2"])
    batch = queue.get_many(2)
    queue.publish_many([b"3", b"4"])
    queue.nack_many(batch)
    assert bodies(queue.get_many(10)) == [b"3", b"4"]


def test_a_higher_priority_goes_first_and_each_keeps_its_order(store):
    queue = store.queue("q", arguments={"x-max-priority": 5})
    for number, priority in enumerate([None, 3, 0, 5, 9, 3]):
        queue.publish(b"%d" % number, priority=priority)
    with reopened(store) as store:
        queue = store.queue("q")
        assert bodies(list(queue.browse())) == [b"%d" % n for n in range(6)]
        assert bodies(queue.get_many(3)) == [b"3", b"4", b"1"]
        queue.publish(b"late", priority=4)
        assert bodies(queue.get_many(10)) == [b"late", b"5", b"0", b"2"]


def test_browsing_a_priority_queue_sees_every_message_once_in_the_order_of_publishing(store):
    queue = store.queue("q", arguments={"x-max-priority": 2})
    for start in range(0, 900, 100):
        queue.publish_many([b"x"] * 100, priority=start % 3)
    assert seqs(list(queue.browse())) == list(range(900))
    assert seqs(list(queue.browse(start_seq=450, limit=300))) == list(range(450, 750))


def test_a_message_over_its_delivery_limit_is_dropped(store):
    queue = store.queue("q", arguments={"x-delivery-limit": 2})
    queue.publish(b"1")
    counts = []
    while message := queue.get():
        counts.append(message.delivery_count)
        message.nack()
    assert counts == [0, 1, 2]
    assert (len(queue), queue.info()["pending_acks"]) == (0, 0)


# ---- looking ----


def test_browsing_touches_nothing_and_sees_what_is_ready(store, queue):
    queue.publish_many([b"%d" % n for n in range(600)])
    held = queue.get_many(2)
    before = {key: value for key, value in queue.info().items() if "rate" not in key and key != "disk_reads"}
    assert seqs(list(queue.browse())) == list(range(2, 600))
    assert seqs(list(queue.browse(unacked=True, limit=3))) == [0, 1, 2]
    assert seqs(list(queue.browse(start_seq=595))) == [595, 596, 597, 598, 599]
    assert seqs(list(queue.browse(start_seq=300, limit=2))) == [300, 301]
    assert list(queue.browse(limit=0)) == []
    assert list(queue.browse(start_seq=10_000)) == []
    after = {key: value for key, value in queue.info().items() if "rate" not in key and key != "disk_reads"}
    assert after == before
    assert not any(m.redelivered for m in queue.get_many(600))
    queue.ack_many(held)


def test_browsing_goes_on_while_others_consume(queue):
    queue.publish_many([b"x"] * 1000)
    seen = []
    for message in queue.browse():
        seen.append(message.seq_id)
        if (taken := queue.get()) is not None:
            taken.ack()
    assert seen == sorted(set(seen))
    assert len(queue) == 1000 - len(seen)


def test_info_counts_what_the_containers_hold(store, queue):
    queue.publish_many([b"x" * 100] * 500)
    queue.get_many(10)
    info = queue.info()
    assert {
        *CONTAINERS,
        "len",
        "pending_acks",
        "ram_msg_count",
        "ram_bytes",
        "next_seq_id",
        "target_ram_count",
        "avg_ingress_rate",
        "avg_egress_rate",
    } <= info.keys()
    assert sum(info[part] for part in CONTAINERS) == info["len"] == 490
    assert (info["pending_acks"], info["next_seq_id"], info["name"], info["durable"]) == (10, 500, "q", True)
    assert info["q1"] + info["q4"] + info["ram_pending_acks"] <= info["target_ram_count"] == 16
    whole = store.info()
    assert (whole["queues"], whole["vhost"], whole["durability"], whole["damage"]) == (1, "/", "fsync", [])


def test_an_empty_queue_is_true(queue):
    assert len(queue) == 0
    assert queue


def test_purge_takes_what_is_ready_and_leaves_what_was_handed_out(store, queue):
    queue.publish_many([b"x"] * 300)
    held = queue.get_many(3)
    assert queue.purge() == 297
    assert queue.purge() == 0
    held[0].nack()
    assert len(queue) == 1
    with reopened(store) as store:
        assert seqs(store.queue("q").get_many(10)) == [0, 1, 2]


# ---- durability ----


@pytest.mark.parametrize("durability", ["fsync", "os", "memory"])
def test_each_durability_keeps_what_it_promises_over_a_clean_restart(tmp_path, durability):
    with warren.open(tmp_path, durability=durability, settings=SMALL) as store:
        assert store.durability == durability
        queue = store.queue("q")
        queue.publish_many([b"x"] * 500)
        store.sync()
        queue.get_many(5)
        transact(store, b"t")
        assert len(queue) == 496
    with warren.open(tmp_path, durability=durability, settings=SMALL) as store:
        assert len(store.queue("q")) == (0 if durability == "memory" else 501)


def test_a_store_in_memory_can_be_opened_again_and_is_empty(tmp_path):
    for _ in range(2):
        with warren.open(tmp_path, durability="memory") as store:
            queue = store.queue("q")
            assert len(queue) == 0
            queue.publish_many([b"x"] * 100)
            store.sync()
            queue.ack_many(queue.get_many(50))
            assert len(queue) == 50


@pytest.mark.parametrize("stop", ["clean", "dirty"])
def test_memory_is_refused_where_persistent_messages_are(tmp_path, stop):
    store = warren.open(tmp_path)
    store.queue("q").publish(b"1")
    store.sync()
    if stop == "clean":
        store.close()
    else:
        store.engine.abandon()
    with pytest.raises(DurabilityError, match="holds persistent messages"):
        warren.open(tmp_path, durability="memory")
    with warren.open(tmp_path) as store:
        assert len(store.queue("q")) == 1


PUBLISHER = """
import sys, warren
store = warren.open(sys.argv[1])
q = store.queue("q")
other = store.queue("other")
n = 0
while True:
    first = n
    q.publish_many([b"%d" % i for i in range(n, n + 50)])
    q.publish(b"%d" % (n + 50) + b"." * 5000)
    n += 51
    with store.transaction() as tx:
        tx.publish("other", b"%d" % first)
        tx.publish("q", b"marker")
    store.sync()
    print(n, flush=True)
"""


@pytest.mark.parametrize("confirmed", [1, 20])
def test_what_was_synced_survives_a_kill(tmp_path, confirmed):
    process = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        lines = [process.stdout.readline() for _ in range(confirmed)]
    finally:
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        process.wait()
        process.stdout.close()
    safe = int([line for line in lines if line.endswith("\n")][-1])
    with warren.open(tmp_path) as store:
        assert not store.engine.clean_start
        assert store.info()["damage"] == []
        messages = store.queue("q").get_many(1_000_000)
        numbers = [int(m.body.rstrip(b".")) for m in messages if m.body != b"marker"]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= safe
        assert all(m.redelivered for m in messages)
        markers = sum(m.body == b"marker" for m in messages)
        assert markers == len(store.queue("other")) >= confirmed
        assert store.queue("q").publish(b"next") > messages[-1].seq_id


def test_what_was_acked_and_synced_does_not_come_back_after_a_kill(tmp_path):
    code = """
    import os, signal, sys, warren
    store = warren.open(sys.argv[1])
    q = store.queue("q")
    q.publish_many([b"%d" % n for n in range(1000)])
    q.ack_many(q.get_many(400))
    q.get_many(100)
    q.nack_many(q.get_many(1))
    store.sync()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_python(code, tmp_path).returncode == -signal.SIGKILL
    with warren.open(tmp_path) as store:
        messages = store.queue("q").get_many(1000)
        assert seqs(messages) == list(range(400, 1000))
        assert {m.seq_id: m.delivery_count for m in messages if m.delivery_count} == {500: 1}


# ---- transactions ----


def test_a_transaction_moves_a_message_all_or_nothing(store):
    a, b = store.queue("a"), store.queue("b")
    a.publish(b"order")
    message = a.get()
    with store.transaction() as tx:
        tx.publish("b", message.body, headers={"from": "a"})
        tx.publish("a", b"done", persistent=False)
        tx.ack(message)
        assert (len(a), len(b)) == (0, 0)
    assert tx.seq_ids == [0, 1]
    assert (len(a), len(b), a.info()["pending_acks"]) == (1, 1, 0)
    assert b.get().headers == {"from": "a"}
    with reopened(store) as store:
        assert (len(store.queue("a")), len(store.queue("b"))) == (0, 1)


def test_a_transaction_that_raises_does_nothing(store, queue):
    queue.publish(b"1")
    message = queue.get()

    def fail_half_way() -> None:
        with store.transaction() as tx:
            tx.publish("q", b"2")
            tx.ack(message)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert (len(queue), message.settled) == (0, False)
    message.ack()


def test_a_transaction_that_is_refused_settles_nothing(store, queue):
    full = store.queue("full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    full.publish(b"1")
    queue.publish_many([b"1", b"2"])
    first, second = queue.get_many(2)

    def publish_to_full() -> None:
        with store.transaction() as tx:
            tx.ack(first)
            tx.publish("q", b"3")
            tx.publish("full", b"2")

    with pytest.raises(QueueFullError):
        publish_to_full()

    def ack_what_was_settled_meanwhile() -> None:
        with store.transaction() as tx:
            tx.ack(first)
            tx.ack(second)
            second.ack()

    with pytest.raises(MessageStateError):
        ack_what_was_settled_meanwhile()
    assert (len(queue), len(full), first.settled) == (0, 1, False)
    first.ack()
    assert queue.info()["pending_acks"] == 0


def test_a_transaction_says_at_once_what_it_cannot_do(store, queue, tmp_path):
    queue.publish_many([b"1", b"2"])
    first, second = queue.get_many(2)
    second.ack()
    with warren.open(tmp_path / "other") as other, store.transaction() as tx:
        other.queue("q").publish(b"x")
        with pytest.raises(QueueNotFoundError, match="no queue 'nowhere' in vhost '/'"):
            tx.publish("nowhere", b"1")
        with pytest.raises(MessageStateError, match="settled before"):
            tx.ack(second)
        with pytest.raises(MessageStateError, match="another store"):
            tx.ack(other.queue("q").get())
        with pytest.raises(InvalidArgumentError, match="a Message is needed"):
            tx.ack(5)
        tx.ack(first)
        with pytest.raises(MessageStateError, match="settled before"):
            tx.ack(first)
    assert first.settled
    for use in (lambda: tx.publish("q", b"1"), lambda: tx.ack(first), tx.__enter__):
        with pytest.raises(MessageStateError, match="transaction is over"):
            use()


def test_an_empty_transaction_does_nothing(store):
    with store.transaction() as tx:
        pass
    assert tx.seq_ids == []


# ---- snapshots ----


def test_a_snapshot_opens_as_a_store_and_neither_changes_the_other(tmp_path, store, queue):
    queue.publish_many([b"%d" % n for n in range(300)])
    queue.publish(b"large" * 2000)
    held = queue.get_many(5)
    queue.ack_many(queue.get_many(5))
    store.engine.checkpoint(seal=True, carry_below=0)
    expected = [b"%d" % n for n in (*range(5), *range(10, 300))] + [b"large" * 2000]
    with store.snapshot() as snap:
        assert snap.path.startswith(str(tmp_path))
        queue.publish_many([b"after"] * 200)
        queue.ack_many(held)
        queue.ack_many(queue.get_many(100))
        store.engine.checkpoint(seal=True, carry_below=0)
        with warren.open(snap.path, settings=SMALL) as copy:
            copied = copy.queue("q")
            assert bodies(copied.get_many(1000)) == expected
            copied.publish_many([b"in the copy"] * 100)
            copied.purge()
            copy.queue("new").publish(b"1")
        with warren.open(snap.path, settings=SMALL) as copy:
            assert bodies(copy.queue("q").get_many(1000)) == expected
            copy.queue("q").delete()
        assert store.queues() == ["q"]
        assert len(queue) == 300 - 10 - 100 + 1 + 200
        messages = queue.get_many(1000)
        assert bodies(messages) == [b"%d" % n for n in range(110, 300)] + [b"large" * 2000] + [b"after"] * 200
        queue.ack_many(messages)
        assert store.info()["damage"] == []
    assert not os.path.exists(snap.path)


def test_a_copy_of_a_snapshot_outlives_its_store(tmp_path, store, queue):
    queue.publish_many([b"x"] * 200)
    queue.publish(bytes(10_000))
    with store.snapshot() as first, store.snapshot() as second:
        assert first.path != second.path
        shutil.copytree(first.path, tmp_path / "backup")
    queue.delete()
    store.close()
    shutil.rmtree(tmp_path / "data")
    with warren.open(tmp_path / "backup", settings=SMALL) as copy:
        assert len(copy.queue("q")) == 201
        assert copy.info()["damage"] == []


def test_snapshots_that_a_killed_process_left_are_removed_and_those_in_use_are_not(tmp_path, store, queue):
    queue.publish(b"1")
    left = [os.path.join(store.engine.root, "snapshots", name) for name in ("4194305-1", f"{os.getpid()}-1")]
    other = os.path.join(store.engine.root, "snapshots", f"{os.getppid()}-1")
    for path in (*left, other):
        os.makedirs(path)
    with store.snapshot() as snapshot:
        store.close()
        with warren.open(tmp_path / "data", settings=SMALL):
            assert [os.path.exists(path) for path in (*left, other, snapshot.path)] == [False, False, True, True]


def test_a_snapshot_that_failed_leaves_nothing(store, monkeypatch):
    def fail(path: str) -> None:
        os.makedirs(path)
        raise DiskFullError("no room")

    monkeypatch.setattr(store.engine, "snapshot", fail)
    with pytest.raises(DiskFullError):
        store.snapshot()
    assert os.listdir(os.path.join(store.engine.root, "snapshots")) == []


# ---- threads ----


def test_threads_share_a_store(store, queue):
    other = store.queue("other")
    seen: list[int] = []
    guard = threading.Lock()

    def produce(number: int) -> None:
        for start in range(0, 200, 10):
            queue.publish_many([b"%d" % (number * 1000 + start + n) for n in range(5)])
            for n in range(5, 10):
                queue.publish(b"%d" % (number * 1000 + start + n), persistent=n % 2 == 0)
            store.sync()

    def consume() -> None:
        while len(seen) < 800:
            messages = queue.get_many(7, timeout=0.05)
            for message in messages[:1]:
                with store.transaction() as tx:
                    tx.publish("other", message.body)
                    tx.ack(message)
            queue.ack_many(messages[1:])
            with guard:
                seen.extend(int(m.body) for m in messages)

    def look() -> None:
        while len(seen) < 800:
            list(queue.browse(limit=20))
            queue.info(), store.info(), len(other)
            time.sleep(0.001)

    threads = [in_thread(lambda n=n: produce(n)) for n in range(4)]
    threads += [in_thread(consume) for _ in range(3)] + [in_thread(look)]
    for result in threads:
        result()
    assert sorted(seen) == sorted(number * 1000 + n for number in range(4) for n in range(200))
    assert (len(queue), queue.info()["pending_acks"]) == (0, 0)
    assert {int(m.body) for m in other.get_many(1000)} <= set(seen)


def test_what_was_paged_out_is_read_while_a_commit_is_under_way(store, queue, monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    write = JournalCommit.run

    def slow(commit: JournalCommit) -> None:
        started.set()
        go_on.wait(30)
        write(commit)

    queue.publish_many([b"%d" % n for n in range(10)])
    store.sync()  # from here on seq_ids are reserved, and nobody has to wait for more
    monkeypatch.setattr(JournalCommit, "run", slow)
    queue.publish_many([b"%d" % n for n in range(10, 20)])
    committed = in_thread(store.sync)
    assert started.wait(30)
    queue.publish_many([b"%d" % n for n in range(20, 100)])  # more than RAM takes: bodies are in the buffer only
    try:
        assert seqs(list(queue.browse(start_seq=50))) == list(range(50, 100))
        assert seqs(queue.get_many(100)) == list(range(100))
    finally:
        go_on.set()
        committed()


def test_threads_that_make_the_same_queue_get_the_same_queue(store):
    results = [in_thread(lambda: store.queue("new")) for _ in range(8)]
    assert len({id(result()) for result in results}) == 1


def test_close_by_two_threads_at_once_is_one_close(store, queue):
    queue.publish_many([b"x"] * 100)
    for result in [in_thread(store.close) for _ in range(4)]:
        result()


# ---- after the end ----


def test_a_closed_store_says_so(store, queue):
    queue.publish_many([b"1", b"2"])
    message = queue.get()
    store.close()
    store.close()
    for call in (
        lambda: queue.publish(b"1"),
        lambda: queue.publish_many([b"1"]),
        lambda: queue.publish(bytes(2 * 1024 * 1024)),
        lambda: queue.get(),
        lambda: message.ack(),
        lambda: message.nack(),
        lambda: len(queue),
        lambda: queue.info(),
        lambda: queue.purge(),
        lambda: queue.delete(),
        lambda: list(queue.browse()),
        lambda: store.sync(),
        lambda: store.queues(),
        lambda: store.queue("q"),
        lambda: store.queue("new"),
        lambda: store.info(),
        lambda: store.snapshot(),
        lambda: transact(store, b"1"),
    ):
        with pytest.raises(StoreClosedError, match="was closed"):
            call()
    assert [message for message in queue] == []  # noqa: C416  (list() would ask for the length first)


def test_a_with_block_closes_after_an_exception_too(tmp_path):
    def fail() -> None:
        with warren.open(tmp_path) as store:
            store.queue("q").publish(b"1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with warren.open(tmp_path) as store:
        assert store.engine.clean_start
        assert len(store.queue("q")) == 1


def test_progress_is_told_what_recovery_does(tmp_path):
    store = warren.open(tmp_path)
    store.queue("q").publish(b"1")
    store.sync()
    store.engine.abandon()
    steps = []
    warren.open(tmp_path, progress=lambda what, done, total: steps.append((what, done, total))).close()
    assert {"journal", "queues"} <= {what for what, _, _ in steps}
    assert all(0 <= done <= total for _, done, total in steps)


def test_a_full_disk_refuses_publishing_and_says_so(store, queue):
    queue.publish(b"1")
    store.engine.committer.full = True
    for publish in (queue.publish, lambda body: queue.publish_many([body]), lambda body: transact(store, body)):
        with pytest.raises(DiskFullError, match="is full"):
            publish(b"2")
    queue.get().ack()
    store.engine.committer.full = False
    queue.publish(b"3")


def test_a_transaction_that_waits_for_room_on_a_full_disk_happens_when_there_is_some(store, queue, monkeypatch):
    queue.publish(b"1")
    store.sync()
    message = queue.get()
    commit = store.engine.committer.sync

    def no_room(*arguments: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return commit(*arguments)  # the upkeep thread, which has no part in this
        raise DiskFullError("full, and the reserve is used up; nothing is lost")

    def move() -> None:
        with store.transaction() as tx:
            tx.publish("q", b"2")
            tx.ack(message)

    with monkeypatch.context() as patch:
        patch.setattr(store.engine.committer, "sync", no_room)
        with pytest.raises(DiskFullError, match="nothing is lost"):
            move()
        assert message.settled
        patch.setattr(store.engine.committer, "sync", commit)
    store.sync()
    assert bodies(list(queue.browse(unacked=True))) == [b"2"]


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (lambda store: store.queue("q"), "<Queue 'q'>"),
        (lambda store: store, "<Store '.*', vhost '/'>"),
        (lambda store: next(store.queue("q").browse()), "<Message 0 of 'q', 5 bytes>"),
    ],
)
def test_things_say_what_they_are(store, queue, thing, text):
    queue.publish(b"hello")
    assert re.fullmatch(text, repr(thing(store)))


def test_a_segment_keeps_its_size_whatever_a_later_start_asks_for(tmp_path):
    with warren.open(tmp_path, settings=EngineSettings(segment_entries=8)) as store:
        store.queue("q").publish_many([b"x"] * 100)
    with warren.open(tmp_path, settings=EngineSettings(segment_entries=64)) as store:
        assert len(store.queue("q").get_many(200)) == 100


def test_messages_do_not_make_the_collector_look_through_the_program(tmp_path):
    with warren.open(str(tmp_path)) as store:
        queue = store.queue("q")
        queue.publish_many([b"x"] * 5)
        messages = [queue.get(), *queue.get_many(3), *queue.browse()]
        assert len(messages) == 5
        assert not any(gc.is_tracked(message) for message in messages)
        del messages
        gc.collect()
        assert len(queue) == 1
