"""The tables beside the messages: queues, segments, files and journal say what the store holds."""

from __future__ import annotations

import os
from typing import Any

import pytest

import warren
from tests.small_engine import TINY
from warren.errors import QueueNotFoundError
from warren.pipeline.errors import ColumnError
from warren.pipeline.store_view import open_view
from warren.pipeline.tables import WarrenTableReader, table_ddl, table_schema


def rows(data: str, table: str, **options: str) -> list[dict[str, Any]]:
    reader = WarrenTableReader({"path": data, "table": table, **options}, table_schema(table))
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.fixture
def data(tmp_path) -> str:
    """Two queues, closed: some acked, some large, some that were only ever in the journal."""
    store = warren.open(tmp_path, settings=TINY)
    orders = store.queue("orders")
    orders.publish_many([b"m%d" % n for n in range(20)])
    orders.publish_many([b"large" * 100, b"other" * 100])
    store.engine.checkpoint(seal=True, carry_below=0)
    orders.ack_many(orders.get_many(5))
    many = store.queue("many", arguments={"x-max-priority": 2, "x-max-length": 7})
    many.publish_many([b"p"] * 3, priority=1)
    store.close()
    return str(tmp_path)


def test_queues_have_their_arguments_and_counts(data):
    many, orders = sorted(rows(data, "queues"), key=lambda row: row["queue"])
    assert (orders["ready"], orders["unacked"], orders["messages"]) == (17, 0, 17)
    assert orders["bytes"] == sum(4 + 11 + size for size in [2] * 5 + [3] * 10 + [500] * 2)
    assert orders["next_seq_id"] == 22
    assert orders["segments"] == 3
    assert dict(many["arguments"]) == {"x-max-priority": "2", "x-max-length": "7"}
    assert many["messages"] == 3
    assert rows(data, "queues", queue="many") == [many]


def test_segments_tell_written_acked_and_live_slots_apart(data):
    found = rows(data, "segments", queue="orders")
    assert [(row["segment"], row["written"], row["acked"], row["live"], row["damaged"]) for row in found] == [
        (0, 8, 5, 3, 0),
        (1, 8, 0, 8, 0),
        (2, 6, 0, 6, 0),
    ]
    assert [row["qi_bytes"] for row in found] == [
        64 + 8 * 64 + 64,
        64 + 8 * 64 + 64,
        64 + 6 * 64,
    ]  # full ones: a trailer
    assert found[0]["qa_bytes"] > 64
    assert found[0]["min_published_at"] <= found[0]["max_published_at"] <= found[2]["min_published_at"]
    levels = {row["level"] for row in rows(data, "segments", queue="many")}
    assert levels == {1}


def test_files_tell_what_is_referred_to_from_garbage(data):
    [before] = rows(data, "files")
    assert (before["records"], before["live_records"], before["garbage_bytes"]) == (2, 2, 0)
    assert before["bytes"] == 64 + before["live_bytes"]
    with warren.open(data) as store:
        queue = store.queue("orders")
        queue.ack_many(queue.get_many(16))
    [after] = rows(data, "files")
    assert (after["records"], after["live_records"]) == (2, 1)
    assert after["garbage_bytes"] == after["live_bytes"] == before["live_bytes"] // 2


def test_files_of_a_crashed_store_are_counted_with_what_the_journal_holds(tmp_path):
    store = warren.open(tmp_path, settings=TINY)
    queue = store.queue("orders")
    queue.publish_many([b"large" * 100] * 3)
    queue.ack_many(queue.get_many(1))
    store.sync()
    store.engine.abandon()
    [file] = rows(str(tmp_path), "files")
    assert (file["records"], file["live_records"], file["hinted"]) == (3, 2, False)


def test_the_journal_shows_every_record_with_its_place(tmp_path):
    store = warren.open(tmp_path)
    queue = store.queue("orders")
    queue.publish_many([b"a", b"b"])
    store.sync()
    queue.ack_many(queue.get_many(2))
    store.sync()
    with store.transaction() as transaction:
        transaction.publish("orders", b"c")
        transaction.publish("orders", b"d")
    store.engine.abandon()
    found = rows(str(tmp_path), "journal")
    shape = [(row["type"], row["seq_id"], row["count"], row["in_group"]) for row in found if row["type"] != "reserve"]
    assert shape == [
        ("publish", 0, 1, False),
        ("publish", 1, 1, False),
        ("ack", 0, 2, False),
        ("group", None, 2, False),
        ("publish", 2, 1, True),
        ("publish", 3, 1, True),
    ]
    assert {row["sid"] for row in found if row["type"] == "publish"} == {256}
    lsns = [row["lsn"] for row in found]
    assert lsns == sorted(lsns)
    assert all(row["needed"] for row in found)
    path = os.path.join(open_view(str(tmp_path)).root, "journal", f"{found[0]['file']}.wal")
    assert max(row["offset"] + row["bytes"] for row in found) == os.path.getsize(path)


def test_a_damaged_record_is_shown_as_such_and_the_next_block_is_read(tmp_path):
    store = warren.open(tmp_path)
    queue = store.queue("orders")
    for body in (b"first", b"second", b"third"):
        queue.publish(body)
        store.sync()
    store.engine.abandon()
    before = [row for row in rows(str(tmp_path), "journal") if row["type"] == "publish"]
    path = os.path.join(open_view(str(tmp_path)).root, "journal", f"{before[0]['file']}.wal")
    with open(path, "r+b") as file:
        file.seek(before[1]["offset"] + 12)
        file.write(b"\xff\xff")
    after = [row for row in rows(str(tmp_path), "journal") if row["type"] != "reserve"]
    assert [row["type"] for row in after] == ["publish", "damaged", "publish"]
    assert after[1]["offset"] == before[1]["offset"]


def test_columns_of_a_table_can_be_chosen_and_are_checked():
    assert table_ddl("segments", ("live", "segment")) == "live INT, segment BIGINT"
    with pytest.raises(ColumnError, match="there is no column 'livee'; did you mean 'live'"):
        table_ddl("segments", ("livee",))


def test_a_queue_that_is_not_there_is_refused_when_the_read_is_planned(data):
    reader = WarrenTableReader({"path": data, "table": "queues", "queue": "ordres"}, table_schema("queues"))
    with pytest.raises(QueueNotFoundError, match="did you mean 'orders'"):
        reader.partitions()
