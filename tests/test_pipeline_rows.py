"""Messages read from files at rest are those that the library finds when it opens a copy of the files."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warren
from tests.small_engine import TINY, temporary_root
from warren.errors import StoreFailedError, StoreFormatError
from warren.kernel.checksum import crc32c
from warren.pipeline import stored_bodies
from warren.pipeline.errors import DamagedMessageError
from warren.pipeline.parts import StreamPart, pack_pairs
from warren.pipeline.rows import count_part, read_part
from warren.pipeline.schema import COLUMNS
from warren.pipeline.store_view import open_view
from warren.storage.store_format import file_name
from warren.storage.verify import vhost_roots

KINDS: dict[str, dict[str, Any]] = {
    "variable": {},
    "priority": {"x-max-priority": 3},
    "sqlite": {"x-backing-queue": "sqlite"},
    "sqlite priority": {"x-backing-queue": "sqlite", "x-max-priority": 2},
}

Row = dict[str, Any]


def read(
    directory: str | Path, fail_on_data_loss: bool = True, columns: list[str] | None = None, **options: str
) -> list[Row]:
    """The rows of a data directory at rest, by queue and seq_id."""
    options.setdefault("queuePattern", ".*")
    view = open_view(str(directory))
    rows: list[Row] = []
    for part in view.parts(options):
        for batch in read_part(view.root, part, columns, fail_on_data_loss=fail_on_data_loss, most_rows=7):
            assert 0 < batch.num_rows <= 7
            rows += batch.to_pylist()
    return sorted(rows, key=lambda row: (row.get("queue", ""), row.get("seq_id", 0)))


def seen_by_the_library(directory: str | Path) -> list[Row]:
    """What `warren.open` shows of a copy of the directory."""
    with tempfile.TemporaryDirectory() as place:
        copy = os.path.join(place, "copy")
        shutil.copytree(directory, copy)
        with warren.open(copy, settings=TINY) as store:
            return browsed(store)


def browsed(store: warren.Store) -> list[Row]:
    rows: list[Row] = []
    for name in store.queues():
        queue = store.queue(name, durable=store.engine.queues[name].durable)
        ready = {message.seq_id for message in queue.browse()}
        for message in queue.browse(unacked=True):
            rows.append(
                {
                    "queue": name,
                    "seq_id": message.seq_id,
                    "state": "ready" if message.seq_id in ready else "unacked",
                    "redelivered": message.redelivered,
                    "delivery_count": message.delivery_count,
                    "routing_key": message.routing_key,
                    "priority": message.properties.get("priority"),
                    "published_at": message.entry.published_at,
                    "size": len(message.body),
                    "body": message.body,
                }
            )
    return sorted(rows, key=lambda row: (row["queue"], row["seq_id"]))


def compared(rows: list[Row]) -> list[Row]:
    """The columns that the library shows, too."""
    names = ["queue", "seq_id", "state", "redelivered", "delivery_count", "routing_key", "priority", "size", "body"]
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    micro = datetime.timedelta(microseconds=1)
    return [
        {**{name: row[name] for name in names}, "published_at": (row["published_at"] - epoch) // micro} for row in rows
    ]


def in_order(rows: list[Row]) -> list[Row]:
    return [dict(sorted(row.items())) for row in rows]


@pytest.fixture
def data() -> Iterator[str]:
    with temporary_root() as root:
        yield os.path.join(root, "data")


def open_tiny(data: str) -> warren.Store:
    return warren.open(data, settings=TINY)


def crash(store: warren.Store) -> None:
    store.sync()
    store.engine.abandon()


def fill(store: warren.Store, kind: str, name: str = "orders") -> warren.Queue:
    """Small and large messages, acked holes, some that came back."""
    queue = store.queue(name, arguments=KINDS[kind])
    for number in range(40):
        queue.publish(b"small %d" % number, priority=number % 5 if number % 2 else None)
    queue.publish_many([b"large %d" % number * 100 for number in range(7)])
    taken = queue.get_many(20)
    queue.ack_many(taken[::3])
    queue.nack_many(taken[1::3])
    store.engine.checkpoint(seal=True)
    queue.ack_many(queue.get_many(3))
    queue.publish_many([b"later %d" % number * (number % 3 * 60 + 1) for number in range(30)])
    return queue


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["close", "crash"])
def test_the_rows_are_those_that_the_library_shows(data, kind, end):
    store = open_tiny(data)
    fill(store, kind)
    if end == "crash":
        crash(store)
    else:
        store.close()
    before = _listing(data)
    rows = read(data)
    assert _listing(data) == before, "reading left something behind"
    assert len(rows) > 40
    assert in_order(compared(rows)) == in_order(seen_by_the_library(data))
    assert any(row["delivery_count"] for row in rows)


def _listing(data: str) -> dict[str, tuple[int, int]]:
    found = {}
    for directory, _, names in os.walk(data):
        for name in names:
            path = os.path.join(directory, name)
            found[path] = (os.path.getsize(path), os.stat(path).st_mtime_ns)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transients", [False, True])
def test_a_snapshot_of_an_open_store_has_what_is_ready_and_what_is_unacked(data, kind, transients):
    snap = data + "-snap"
    with open_tiny(data) as store:
        queue = fill(store, kind)
        out = queue.get_many(9)
        temporary = queue.publish_many([b"transient %d" % number * 30 for number in range(20)], persistent=False)
        queue.get_many(1)
        held = store.engine.checkout(store.engine.queues["orders"], "lease", 4)
        store.engine.snapshot(snap, transients=transients)
        expected = [row for row in browsed(store) if transients or row["seq_id"] not in temporary]
        backing = store.engine.queues["orders"].backing
        ready, unacked = len(backing), backing.pending_count
    assert out
    assert held is not None
    rows = read(snap)
    shown = compared(rows)
    _compare_with_snapshot(shown, expected)
    assert [row["delivery_count"] for row in shown] == [row["delivery_count"] for row in expected]
    if transients:
        assert sum(row["state"] == "ready" for row in rows) == ready
        assert sum(row["state"] == "unacked" for row in rows) == unacked
    assert read(snap, state="ready") == [row for row in rows if row["state"] == "ready"]
    assert read(snap, state="unacked") == [row for row in rows if row["state"] == "unacked"]


def test_queues_that_are_not_durable_are_in_a_snapshot_with_transients(data):
    snap = data + "-snap"
    with open_tiny(data) as store:
        short = store.queue("short", durable=False)
        short.publish_many([b"a", b"b" * 400, b"c"])
        quick = store.queue("quick", arguments={"x-backing-queue": "volatile"})
        quick.publish_many([b"d", b"e" * 400])
        store.engine.snapshot(snap, transients=True)
    rows = read(snap)
    assert [(row["queue"], row["body"]) for row in rows] == [
        ("quick", b"d"),
        ("quick", b"e" * 400),
        ("short", b"a"),
        ("short", b"b" * 400),
        ("short", b"c"),
    ]


def test_checked_out_messages_of_a_store_at_rest_are_unacked(data):
    store = open_tiny(data)
    fill(store, "variable")
    held = store.engine.checkout(store.engine.queues["orders"], "lease", 5)
    store.close()
    assert held is not None
    [pairs] = held.ranges.values()
    wanted = [seq for first, count in zip(pairs[::2], pairs[1::2], strict=True) for seq in range(first, first + count)]
    assert [row["seq_id"] for row in read(data, state="unacked")] == wanted


def test_transient_messages_end_with_their_process(data):
    store = open_tiny(data)
    queue = store.queue("orders")
    queue.publish_many([b"t%d" % number for number in range(30)], persistent=False)
    queue.publish(b"stays")
    crash(store)
    assert [row["body"] for row in read(data)] == [b"stays"]


operation = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 1), st.integers(1, 20), st.sampled_from([3, 40, 300]), st.booleans()),
    st.tuples(st.just("get"), st.integers(0, 1), st.integers(1, 15)),
    st.tuples(st.just("ack"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("requeue"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("purge"), st.integers(0, 1)),
    st.tuples(st.just("checkout"), st.integers(0, 1), st.integers(1, 10)),
    st.tuples(st.just("settle"), st.booleans()),
    st.tuples(st.just("checkpoint"), st.booleans()),
    st.tuples(st.just("compact")),
    st.tuples(st.just("restart"), st.booleans()),
)


@given(
    st.sampled_from(list(KINDS)),
    st.lists(operation, min_size=3, max_size=25),
    st.sampled_from(["close", "crash", "cut", "snapshot"]),
)
def test_any_history_reads_as_the_library_reopens_it(kind, history, end):
    with temporary_root() as root:
        data = os.path.join(root, "data")
        store = open_tiny(data)
        out: dict[int, list[warren.Message]] = {0: [], 1: []}
        for number in out:
            store.queue(f"q{number}", arguments=KINDS[kind])
        for what, *values in history:
            if what == "restart":
                if values[0]:
                    store.close()
                else:
                    crash(store)
                store = open_tiny(data)
                out = {0: [], 1: []}
            else:
                _do(store, out, what, values)
        if end == "snapshot":
            snap = os.path.join(root, "snap")
            store.engine.snapshot(snap, transients=True)
            expected = browsed(store)
            store.close()
            _compare_with_snapshot(compared(read(snap, minPartitions="3")), expected)
            return
        if end == "close":
            store.close()
        elif end == "crash":
            crash(store)
        else:
            store.engine.abandon()
        assert in_order(compared(read(data, minPartitions="3"))) == in_order(seen_by_the_library(data))


def _compare_with_snapshot(rows: list[Row], expected: list[Row]) -> None:
    assert [(row["queue"], row["seq_id"]) for row in rows] == [(row["queue"], row["seq_id"]) for row in expected]
    for row, want in zip(rows, expected, strict=True):
        # What is handed out would come back redelivered; the library says what it was when it was handed out.
        assert row["redelivered"] == (want["redelivered"] or want["state"] == "unacked")
        # Delivery counts of transient messages are only in RAM.
        ours = {"redelivered": 0, "delivery_count": 0}
        assert row["delivery_count"] in (want["delivery_count"], 0)
        assert {**row, **ours} == {**want, **ours}


def _do(store: warren.Store, out: dict[int, list[warren.Message]], what: str, values: list[Any]) -> None:
    engine = store.engine
    if what == "checkpoint":
        engine.checkpoint(seal=values[0])
        return
    if what == "compact":
        engine.compact()
        return
    if what == "settle":
        engine.settle("lease", 1 << 30, requeue=values[0])
        return
    number = values[0]
    queue = store.queue(f"q{number}")
    if what == "publish":
        _, count, size, persistent = values
        for n in range(count):
            queue.publish(b"%d " % n * (size // 3), persistent=persistent, priority=n % 4 or None)
    elif what == "get":
        out[number] += queue.get_many(values[1])
    elif what == "purge":
        queue.purge()
    elif what == "checkout":
        engine.checkout(engine.queues[queue.name], "lease", values[1])
    else:
        chosen, out[number] = out[number][:: values[1]], [m for i, m in enumerate(out[number]) if i % values[1]]
        if what == "ack":
            queue.ack_many(chosen)
        else:
            queue.nack_many(chosen)


def test_every_property_and_every_type_of_header_has_its_column(data):
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    headers = {
        "text": "ü",
        "true": True,
        "number": -7,
        "long": 1 << 40,
        "float": 0.5,
        "none": None,
        "list": [1, "a"],
        "table": {"a": {"b": 1}},
        "bytes": b"\xff\x00",
        "time": moment,
        "decimal": Decimal("1.50"),
    }
    with warren.open(data) as store:
        store.queue("orders").publish(
            b"body",
            headers=headers,
            priority=4,
            expiration_ms=3_600_000,
            content_type="text/plain",
            content_encoding="utf-8",
            correlation_id="c",
            reply_to="r",
            message_id="m",
            timestamp=moment,
            type="t",
            user_id="u",
            app_id="a",
            cluster_id="k",
        )
    [row] = read(data)
    assert list(row) == list(COLUMNS)
    told = dict(row["headers"])
    assert told["text"] == "ü"
    assert {name: json.loads(text) for name, text in told.items() if name != "text"} == {
        "true": True,
        "number": -7,
        "long": 1 << 40,
        "float": 0.5,
        "none": None,
        "list": [1, "a"],
        "table": {"a": {"b": 1}},
        "bytes": {"$bytes": "/wA="},
        "time": {"$datetime": "2026-01-02T03:04:05+00:00"},
        "decimal": {"$decimal": "1.50"},
    }
    plain = COLUMNS[COLUMNS.index("content_type") : COLUMNS.index("cluster_id") + 1]
    assert [row[name] for name in plain] == [
        *("text/plain", "utf-8", 2, 4, "c", "r", "3600000", "m", moment, "t", "u", "a", "k"),
    ]
    assert (row["vhost"], row["exchange"], row["size"], row["body"]) == ("/", "", 4, b"body")
    assert row["expires_at"] - row["published_at"] == datetime.timedelta(hours=1)


def test_text_that_is_no_utf8_and_a_head_that_is_none_do_not_stop_the_reading(data):
    from tests.small_engine import HEAD, make_entries

    with open_tiny(data) as store:
        stored = store.engine.declare("odd", durable=True)
        entries = make_entries(store.engine, stored, [b"1", b"2"], persistent=True)
        entries[0].head = b"\x00\x03a\xffb\x80\x00\x02\xfe\xfd"  # routing key a?b, content type of two odd bytes
        assert entries[1].head == HEAD
        for entry in entries:
            entry.size = 4 + len(entry.head) + len(entry.body)
        stored.backing.publish(entries)
    first, second = read(data)
    assert (first["routing_key"], first["content_type"], first["body"]) == ("a\ufffdb", "\ufffd\ufffd", b"1")
    assert (second["routing_key"], second["headers"], second["body"]) == (None, None, b"2")


def test_bounds_of_seq_ids_and_times_are_kept(data):
    store = open_tiny(data)
    queue = store.queue("orders")
    queue.publish_many([b"x" * (n % 2 * 500 + 1) for n in range(30)])
    crash(store)
    rows = read(data)
    assert [row["seq_id"] for row in read(data, fromSeqId="5", toSeqId="19")] == list(range(5, 19))
    assert read(data, toSeqId="0") == []
    middle = rows[15]["published_at"]
    assert read(data, since=middle.isoformat()) == [row for row in rows if row["published_at"] >= middle]
    assert read(data, until=middle.isoformat()) == [row for row in rows if row["published_at"] < middle]
    assert read(data, since="2100-01-01") == []


def test_columns_come_in_the_order_asked_for_and_cost_no_bodies(data):
    store = open_tiny(data)
    fill(store, "variable")
    store.close()
    rows = read(data)
    assert read(data, columns=["size", "seq_id"]) == [{"size": row["size"], "seq_id": row["seq_id"]} for row in rows]
    for directory, _, names in os.walk(data):
        for name in names:
            if name.endswith((".qs", ".rdq")):
                os.unlink(os.path.join(directory, name))
    assert [row["seq_id"] for row in read(data, columns=["seq_id"])] == [row["seq_id"] for row in rows]
    view = open_view(data)
    assert sum(count_part(view.root, part) for part in view.parts({"queue": "orders"})) == len(rows)


def _flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("suffix", [".qs", ".qi", ".wal", ".rdq"])
def test_a_flipped_bit_is_named_with_file_and_offset_or_passed_over(data, suffix):
    store = open_tiny(data)
    queue = store.queue("orders")
    queue.publish_many([b"m%d" % n for n in range(20)] + [b"large" * 100])
    if suffix == ".wal":
        crash(store)
    else:
        store.close()
    rows = read(data)
    view = open_view(data)
    # The parts are planned before: of the journal they say where each record is.
    parts = view.parts({"queue": "orders"})
    victim = next(row for row in rows[3:] if row["source_file"].endswith(suffix if suffix != ".qi" else ".qs"))
    file, offset = victim["source_file"], victim["source_offset"]
    if suffix == ".qi":
        file, offset = file.replace(".qs", ".qi"), 64 + 64 * (victim["seq_id"] % 8)
    _flip(os.path.join(view.root, file), offset + 30)
    with pytest.raises(DamagedMessageError) as caught:
        sum(batch.num_rows for part in parts for batch in read_part(view.root, part))
    assert (caught.value.file, caught.value.offset, caught.value.seq_id) == (file, offset, victim["seq_id"])
    assert file in str(caught.value)
    assert "failOnDataLoss" in str(caught.value)
    left = [row for part in parts for b in read_part(view.root, part, fail_on_data_loss=False) for row in b.to_pylist()]
    assert {row["seq_id"] for row in left} == {row["seq_id"] for row in rows} - {victim["seq_id"]}


def test_a_missing_payload_is_named_by_the_message_that_wants_it(data):
    store = open_tiny(data)
    store.queue("orders").publish_many([b"small", b"large" * 100])
    store.close()
    view = open_view(data)
    shutil.rmtree(os.path.join(view.root, "msg_store_persistent"))
    with pytest.raises(
        DamagedMessageError, match=r"message 1 of queue 'orders' cannot be read: its payload is in no file"
    ):
        read(data)
    assert [row["body"] for row in read(data, fail_on_data_loss=False)] == [b"small"]


def test_a_part_opens_its_files_before_its_first_row(data):
    store = open_tiny(data)
    fill(store, "variable")
    crash(store)
    view = open_view(data)
    parts = view.parts({"queue": "orders", "minPartitions": "1"})
    batches = [read_part(view.root, part, most_rows=2) for part in parts]
    expected = sum(count_part(view.root, part) for part in parts)
    for part in ("queues", "journal"):
        shutil.rmtree(os.path.join(view.root, part))
    assert sum(batch.num_rows for part in batches for batch in part) == expected
    with pytest.raises(FileNotFoundError) as caught:
        read_part(view.root, parts[0])
    assert caught.value.filename


def test_exactly_the_messages_of_a_checkout_are_read_also_where_qa_acks_them(data):
    store = open_tiny(data)
    queue = store.queue("orders")
    queue.publish_many([b"m%d" % n for n in range(8)] + [b"last"])
    store.engine.checkpoint(seal=True, carry_below=0)
    queue.ack_many(queue.get_many(3))
    store.engine.checkpoint(seal=True, carry_below=0)
    store.engine.abandon()
    view = open_view(data)
    [queue_view] = view.queues.values()
    part = StreamPart(
        vhost="/",
        queue="orders",
        sid=queue_view.sids()[0],
        directory=queue_view.directory,
        segment_size=8,
        segments=(0,),
        only=pack_pairs([1, 2, 4, 1]),
    )
    assert [row["seq_id"] for batch in read_part(view.root, part) for row in batch.to_pylist()] == [1, 2, 4]
    beyond = StreamPart.from_json({**part.to_json(), "only": StreamPart.to_json(part)["only"], "segments": []})
    with pytest.raises(DamagedMessageError, match="3 of 3 messages"):
        list(read_part(view.root, beyond))


def test_payloads_are_found_again_after_compaction_moved_them(data):
    store = open_tiny(data)
    queue = store.queue("orders")
    queue.publish_many([b"%03d" % n * 200 for n in range(120)])
    store.sync()
    store.engine.checkpoint(seal=True, carry_below=0)
    store.engine.store.seal()
    root = store.engine.root
    part = StreamPart(
        vhost="/",
        queue="orders",
        sid=store.engine.queues["orders"].indexes[0].sid,
        directory=os.path.relpath(store.engine.queues["orders"].directory, root),
        segment_size=8,
        segments=tuple(range(15)),
        only=pack_pairs([n for seq in range(3, 120, 4) for n in (seq, 1)]),
    )
    before = [row for batch in read_part(root, part) for row in batch.to_pylist()]
    taken = queue.get_many(120)
    queue.ack_many([message for message in taken if message.seq_id % 4 != 3])
    store.sync()
    moved = 0
    while store.engine.compact():
        moved += 1
    for file_store in (store.engine.store,):
        file_store.sweep()
    after = [row for batch in read_part(root, part) for row in batch.to_pylist()]
    store.close()
    assert moved
    assert (
        [row["body"] for row in after]
        == [row["body"] for row in before]
        == [b"%03d" % n * 200 for n in range(3, 120, 4)]
    )


def test_a_payload_is_found_also_when_compaction_is_faster_than_the_listing(data, monkeypatch):
    """With failOnDataLoss=false a payload that is not found is passed over, and its checkout acked: so it has to be looked
    for as long as files vanish while they are listed."""
    store = open_tiny(data)
    bodies = [b"%03d" % n * 200 for n in range(40)]
    store.queue("orders").publish_many(bodies)
    store.sync()
    store.engine.checkpoint(seal=True, carry_below=0)
    store.engine.store.seal()
    store.close()
    [root] = vhost_roots(str(data))
    directory = os.path.join(root, "msg_store_persistent")
    real, others = os.listdir, iter(range(900, 905))

    def listed(path: str) -> list[str]:
        """And then everything that it says is moved."""
        names = real(path)
        if path == directory and (generation := next(others, None)) is not None:
            for name in names:
                number, _, suffix = name.split(".")
                moved = file_name(int(number), generation, f".{suffix}")
                if suffix == "rdq":
                    shutil.copy(os.path.join(path, name), os.path.join(path, moved))
                os.unlink(os.path.join(path, name))
        return names

    monkeypatch.setattr(stored_bodies.os, "listdir", listed)
    assert [row["body"] for row in read(data)] == bodies
    assert next(others, None) is None, "all of them were moved, five times"


def test_no_file_stays_open_when_a_part_is_read(data):
    store = open_tiny(data)
    fill(store, "variable")
    fill(store, "sqlite", "table")
    crash(store)
    assert read(data)
    still = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_link(name)]
    assert [path for path in still if path.startswith(data)] == []


def _is_link(name: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{name}")  # the one of the listing itself is gone


def test_a_damaged_queue_in_sqlite_fails_the_reading_or_ends_it_early(data):
    with open_tiny(data) as store:
        store.queue("orders", arguments=KINDS["sqlite"]).publish_many([b"m%d" % n * 200 for n in range(200)])
    rows = read(data)
    [path] = Path(data).rglob("queue.db")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096 * 4] = b"\xaa" * 4096 * 4
    path.write_bytes(content)
    with pytest.raises((DamagedMessageError, StoreFailedError)):
        read(data)
    left = read(data, fail_on_data_loss=False)
    assert 0 < len(left) < len(rows)
    assert all(row in rows for row in left)


def test_files_of_a_newer_format_are_refused(data):
    with open_tiny(data) as store:
        store.queue("table", arguments=KINDS["sqlite"]).publish(b"a")
        store.queue("orders").publish(b"b")
    [database] = Path(data).rglob("queue.db")
    with contextlib.closing(sqlite3.connect(database)) as db, db:
        db.execute("UPDATE state SET format = 9")
    with pytest.raises(StoreFormatError, match=r"queue\.db has format version 9; this Warren reads version 1"):
        read(data, queuePattern="table")
    assert len(read(data, queuePattern="orders")) == 1
    [index] = Path(data).rglob("0.qi")
    head = bytearray(index.read_bytes()[:60])
    head[4] = 2
    index.write_bytes(bytes(head) + crc32c(bytes(head)).to_bytes(4, "little") + index.read_bytes()[64:])
    with pytest.raises(StoreFormatError, match=r"0\.qi has format version 2"):
        read(data, queuePattern="orders")


def test_a_batch_is_full_at_its_bytes_and_a_large_body_is_alone_in_one(data):
    with warren.open(data) as store:
        store.queue("orders").publish_many([b"a" * 600, b"b" * 600, b"c" * 5000, b"d", b"e"])
    view = open_view(data)
    [part] = view.parts({"queue": "orders"})
    sizes = [batch.column("size").to_pylist() for batch in read_part(view.root, part, most_bytes=1000)]
    assert sizes == [[600], [600], [5000], [1, 1]]
    assert all(isinstance(batch, pa.RecordBatch) for batch in read_part(view.root, part, ["seq_id"]))
