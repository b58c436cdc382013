"""Bad input: one clear exception of `warren.errors`, with the value and what to do, and nothing half-written."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import warren
from warren.errors import (
    DiskFullError,
    InvalidArgumentError,
    MessageTooLargeError,
    QueueArgumentError,
    QueueNotFoundError,
    StoreFormatError,
    WarrenError,
)
from warren.library import Queue, Store
from warren.storage.disk import Disk
from warren.storage.settings import EngineSettings

SETTINGS = EngineSettings(max_message_bytes=1000)


@pytest.fixture
def store(tmp_path) -> Iterator[Store]:
    with warren.open(tmp_path / "data", settings=SETTINGS) as store:
        yield store


@pytest.fixture
def queue(store: Store) -> Queue:
    queue = store.queue("q")
    queue.publish_many([b"first", b"second"])
    return queue


def everything_below(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


# ---- formats (paths and permissions: test_library.py) ----


def test_a_database_of_somebody_else_is_refused_and_left_alone(tmp_path):
    with warren.open(tmp_path) as store:
        root = Path(store.engine.root)
    (root / "meta.db").unlink()
    with sqlite3.connect(root / "meta.db") as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    before = (root / "meta.db").read_bytes()
    with pytest.raises(StoreFormatError, match=r"meta\.db.*choose another directory"):
        warren.open(tmp_path)
    assert (root / "meta.db").read_bytes() == before


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("method", ["make_dirs", "create", "replace", "sync_dir", "unlink"])
def test_a_full_disk_is_named_when_a_store_is_opened_and_nothing_is_lost(tmp_path, monkeypatch, method, existing):
    if existing:
        with warren.open(tmp_path / "data") as store:
            store.queue("q").publish(b"kept")

    def refuse(self: Disk, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", arguments[0])

    with monkeypatch.context() as patch:
        patch.setattr(Disk, method, refuse)
        # Some calls it can do without, and tells publishers.
        with contextlib.suppress(DiskFullError):
            warren.open(tmp_path / "data").engine.abandon()
    with warren.open(tmp_path / "data") as store:
        assert store.queues() == (["q"] if existing else [])
        if existing:
            assert store.queue("q").get().body == b"kept"
        store.queue("new").publish(b"room again")
        store.sync()


# ---- arguments of open ----


@pytest.mark.parametrize(
    "arguments",
    [
        {"vhost": 3},
        {"vhost": ""},
        {"vhost": "x" * 256},
        {"durability": "fsink"},
        {"durability": None},
        {"settings": {"ram_target": 3}},
    ],
    ids=str,
)
def test_open_refuses_what_it_does_not_know_and_makes_nothing(tmp_path, arguments):
    with pytest.raises(WarrenError) as caught:
        warren.open(tmp_path / "data", **arguments)
    (value,) = arguments.values()
    assert repr(value)[:40] in str(caught.value)
    assert everything_below(tmp_path) == {}


@pytest.mark.parametrize("name", [field.name for field in fields(EngineSettings)])
@pytest.mark.parametrize("value", [-1, "8", None, True, math.nan, math.inf])
def test_settings_that_make_no_sense_are_refused(name, value):
    with pytest.raises(InvalidArgumentError, match=rf"{name} is .*; it is "):
        EngineSettings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("segment_entries", 0, "an integer of 1 to 65536"),
        ("segment_entries", 65537, "an integer of 1 to 65536"),
        ("journal_file_bytes", 1 << 32, "an integer of 1024 to 2147483647"),
        ("load_entries", 2.5, "an integer of 1"),
        ("garbage_fraction", 1.5, "a number of 0 to 1"),
        ("store_index", "btree", "'table' or 'lmdb'"),
    ],
)
def test_settings_say_what_they_can_be(name, value, allowed):
    with pytest.raises(InvalidArgumentError, match=allowed):
        EngineSettings(**{name: value})


# ---- queues ----


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (3, {}),
        ("", {}),
        ("x" * 256, {}),
        ("\ud800", {}),
        ("new", {"durable": "yes"}),
        ("new", {"arguments": ["x-max-length", 3]}),
        ("new", {"arguments": {3: 1}}),
        ("new", {"arguments": {"x-max-prioritty": 5}}),
        ("new", {"arguments": {"x-max-priority": "5"}}),
        ("new", {"arguments": {"x-max-length": True}}),
        ("new", {"arguments": {"x-message-ttl": -1}}),
        ("new", {"arguments": {"x-message-ttl": 1 << 80}}),
    ],
    ids=str,
)
def test_a_queue_with_bad_arguments_is_not_made(store, name, options):
    with pytest.raises(QueueArgumentError):
        store.queue(name, **options)
    assert store.queues() == []


def test_an_unknown_argument_is_answered_with_the_one_that_was_meant(store):
    with pytest.raises(QueueArgumentError, match=r"x-max-prioritty.*x-max-priority"):
        store.queue("q", arguments={"x-max-prioritty": 5})


# ---- messages ----

CIRCLE: dict[str, Any] = {}
CIRCLE["again"] = CIRCLE

BAD_PUBLISHES: dict[str, Callable[[Queue], object]] = {
    "text": lambda q: q.publish("text"),
    "no body": lambda q: q.publish(None),
    "a number": lambda q: q.publish(5),
    "headers in a list": lambda q: q.publish(b"", headers=[1]),
    "a header without a name": lambda q: q.publish(b"", headers={1: 2}),
    "a header of no type": lambda q: q.publish(b"", headers={"a": object()}),
    "a header over 64 bits": lambda q: q.publish(b"", headers={"a": 1 << 70}),
    "a header with a long name": lambda q: q.publish(b"", headers={"a" * 300: 1}),
    "headers in a circle": lambda q: q.publish(b"", headers=CIRCLE),
    "a priority in text": lambda q: q.publish(b"", priority="3"),
    "a priority below 0": lambda q: q.publish(b"", priority=-1),
    "a priority over 255": lambda q: q.publish(b"", priority=256),
    "an expiration in text": lambda q: q.publish(b"", expiration_ms="60"),
    "an expiration below 0": lambda q: q.publish(b"", expiration_ms=-1),
    "half an expiration": lambda q: q.publish(b"", expiration_ms=1.5),
    "an expiration over 64 bits": lambda q: q.publish(b"", expiration_ms=1 << 80),
    "perhaps persistent": lambda q: q.publish(b"", persistent="no"),
    "an unknown property": lambda q: q.publish(b"", colour="red"),
    "one body for many": lambda q: q.publish_many(b"abc"),
    "one text for many": lambda q: q.publish_many("abc"),
    "no list": lambda q: q.publish_many(None),
    "one wrong among many": lambda q: q.publish_many([b"a", 1, b"c"]),
}


@pytest.mark.parametrize("name", BAD_PUBLISHES)
def test_a_message_that_is_none_is_refused_and_leaves_nothing(queue, name):
    before = queue.info()
    with pytest.raises(InvalidArgumentError):
        BAD_PUBLISHES[name](queue)
    assert queue.info()["len"] == before["len"]
    assert queue.info()["next_seq_id"] == before["next_seq_id"]


def test_a_message_over_the_limit_is_refused_and_so_are_those_beside_it(store, queue):
    too_large = b"x" * 1001
    with pytest.raises(MessageTooLargeError, match=r"is over the limit of 1000; split it, or raise max_message_bytes"):
        queue.publish(too_large)
    with pytest.raises(MessageTooLargeError):
        queue.publish_many([b"small", too_large])
    with store.transaction() as tx:
        tx.publish("q", b"small")
        with pytest.raises(MessageTooLargeError):
            tx.publish("q", too_large)
    assert [message.body for message in queue.browse()] == [b"first", b"second", b"small"]


BAD_GETS: dict[str, Callable[[Queue], object]] = {
    "a timeout in text": lambda q: q.get(timeout="5"),
    "a timeout that is none": lambda q: q.get(timeout=math.nan),
    "a timeout of yes": lambda q: q.get(timeout=True),
    "many with a timeout in text": lambda q: q.get_many(3, timeout="5"),
    "many with a timeout that is none": lambda q: q.get_many(3, timeout=math.nan),
    "none of many": lambda q: q.get_many(0),
    "less than none": lambda q: q.get_many(-1),
    "how many in text": lambda q: q.get_many("3"),
    "how many in parts": lambda q: q.get_many(2.5),
    "a place in text": lambda q: q.browse(start_seq="0"),
    "a place below 0": lambda q: q.browse(start_seq=-1),
    "a limit below 0": lambda q: q.browse(limit=-1),
    "a limit in parts": lambda q: q.browse(limit=1.5),
    "acks of nothing": lambda q: q.ack_many(None),
    "acks of a number": lambda q: q.ack_many([1]),
    "nacks of nothing": lambda q: q.nack_many(None),
}


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("name", BAD_GETS)
def test_a_bad_way_to_ask_is_refused_at_once_and_takes_nothing(queue, name, empty):
    """With a timeout of NaN an empty queue was asked again and again, for ever."""
    if empty:
        queue.purge()
    before = queue.info()
    with pytest.raises(InvalidArgumentError, match=r".+"):
        BAD_GETS[name](queue)
    after = queue.info()
    assert [after[key] for key in ("len", "pending_acks")] == [before[key] for key in ("len", "pending_acks")]


def test_a_nack_that_does_not_say_where_to_settles_nothing(queue):
    message = queue.get()
    with pytest.raises(InvalidArgumentError, match="requeue is 'tail'; it is True or False"):
        message.nack(requeue="tail")
    message.nack()
    assert queue.get().redelivered


def test_a_timeout_without_end_is_one_to_wait_for_ever(queue):
    assert queue.get(timeout=math.inf).body == b"first"
    assert queue.get_many(1, timeout=1 << 80)[0].body == b"second"
    assert queue.get(timeout=-1) is None


def test_a_transaction_with_something_bad_in_it_does_nothing(store, queue):
    message = queue.get()

    def with_something_bad(bad: Callable[[Any], None]) -> None:
        with store.transaction() as tx:
            tx.publish("q", b"never seen")
            tx.ack(message)
            bad(tx)

    for bad in (
        lambda tx: tx.publish("q", "text"),
        lambda tx: tx.publish("no such queue", b""),
        lambda tx: tx.publish(3, b""),
        lambda tx: tx.publish("q", b"", priority="high"),
        lambda tx: tx.ack(3),
    ):
        with pytest.raises((InvalidArgumentError, QueueNotFoundError)):
            with_something_bad(bad)
    assert [body.body for body in queue.browse()] == [b"second"]
    message.ack()


def test_the_asynchronous_face_refuses_the_same(tmp_path):
    asyncio.run(refuse_the_same(tmp_path / "data"))


async def refuse_the_same(path: Path) -> None:
    async with warren.aio.open(path, settings=SETTINGS) as store:
        queue = await store.queue("q")
        for bad in (
            lambda: queue.get(timeout="5"),
            lambda: queue.get(timeout=math.nan),
            lambda: queue.get_many("3"),
            lambda: queue.publish("text"),
            lambda: queue.publish(b"", persistent="no"),
            lambda: queue.publish_many(None),
            lambda: queue.ack_many(None),
        ):
            with pytest.raises(InvalidArgumentError):
                await bad()
        with pytest.raises(MessageTooLargeError):
            await queue.publish(b"x" * 1001)
        assert len(queue) == 0
