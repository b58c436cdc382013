"""Parts travel whole: pickled and as JSON; and they are cut so that every message is in one of them."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import warren
from tests.small_engine import TINY
from warren.errors import QueueNotFoundError, StoreFormatError, StoreLockedError, StorePathError
from warren.kernel.ranges import RangeSet
from warren.pipeline.batch_source import WarrenBatchReader
from warren.pipeline.errors import DamagedMessageError, OptionError, PipelineError, VhostNotFoundError
from warren.pipeline.parts import StreamPart, pack_pairs, unpack_pairs
from warren.pipeline.rows import read_part
from warren.pipeline.schema import arrow_schema
from warren.pipeline.store_view import estimated_rows, open_view
from warren.storage.layout import hashed
from warren.storage.running_node import NODE_FILE

numbers = st.integers(0, 2**62)
pairs = st.lists(numbers, max_size=6).map(lambda found: pack_pairs(n for seq in sorted(set(found)) for n in (seq, 1)))

part = st.builds(
    StreamPart,
    vhost=st.text(),
    queue=st.text(),
    sid=numbers,
    directory=st.text(),
    segment_size=st.integers(1, 4096),
    boot=st.integers(0, 2**32 - 1),
    segments=st.lists(numbers).map(tuple),
    only=st.none() | pairs,
    acked=pairs,
    rows=st.binary(max_size=48),
    unacked=pairs,
    redelivered_below=numbers,
    returned=pairs,
    counts=st.lists(st.tuples(numbers, numbers)).map(tuple),
    from_seq=numbers,
    to_seq=st.none() | numbers,
    since=st.none() | numbers,
    until=st.none() | numbers,
    state=st.sampled_from(["ready", "unacked", "all"]),
    transients=st.none() | st.text(),
    database=st.none() | st.text(),
)


@given(part)
def test_a_part_is_the_same_after_a_pickle_and_after_json(found):
    assert pickle.loads(pickle.dumps(found)) == found
    assert StreamPart.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_json_that_is_no_part_is_refused():
    good = StreamPart(vhost="/", queue="q", sid=256, directory="queues/q").to_json()
    with pytest.raises(PipelineError, match="no field 'sidd'"):
        StreamPart.from_json({**good, "sidd": 1})
    with pytest.raises(PipelineError, match="this is no part of a stream"):
        StreamPart.from_json({"vhost": "/"})
    with pytest.raises(PipelineError, match="this is no part of a stream"):
        StreamPart.from_json({**good, "acked": "not base64!"})


def test_wanted_messages_follow_from_bounds_acks_and_state():
    plain = StreamPart(
        vhost="/",
        queue="q",
        sid=256,
        directory="queues/q",
        from_seq=2,
        to_seq=20,
        acked=pack_pairs([4, 3]),
        unacked=pack_pairs([5, 5, 15, 10]),
    )
    assert plain.wanted().pairs() == [2, 2, 7, 13]

    def with_values(**values: object) -> RangeSet:
        return StreamPart.from_json({**plain.to_json(), **values}).wanted()

    assert with_values(state="ready").pairs() == [2, 2, 10, 5]
    assert with_values(state="unacked").pairs() == [7, 3, 15, 5]
    assert with_values(from_seq=30).pairs() == []
    some = StreamPart(vhost="/", queue="q", sid=256, directory="d", only=pack_pairs([1, 4, 9, 1]), to_seq=4)
    assert some.wanted().pairs() == [1, 3]
    assert unpack_pairs(pack_pairs([])) == []


def test_a_damaged_message_error_survives_the_way_from_a_task_to_the_driver():
    error = DamagedMessageError("queues/q/0.qs", 64, 7, "orders", "its body does not check out")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.file, again.offset, again.seq_id) == (str(error), "queues/q/0.qs", 64, 7)


# -- planning ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path) -> str:
    store = warren.open(tmp_path / "data", settings=TINY)
    store.queue("orders").publish_many([b"m%d" % n for n in range(100)])
    store.engine.checkpoint(seal=True, carry_below=0)
    store.queue("orders").publish_many([b"n%d" % n for n in range(60)])
    store.queue("orders-old").publish_many([b"o"] * 3)
    store.queue("empty")
    store.sync()
    store.engine.abandon()
    return str(tmp_path / "data")


@pytest.mark.parametrize("parts", [1, 2, 5, 1000])
def test_parts_are_as_many_as_asked_for_and_hold_every_message_once(data, parts):
    view = open_view(data)
    found = view.parts({"queue": "orders", "minPartitions": str(parts)})
    assert len(found) == min(parts, len(found))
    assert len(found) >= min(parts, 160 // TINY.segment_entries)
    seqs = [seq for part in found for batch in read_part(view.root, part, ["seq_id"]) for seq in batch[0].to_pylist()]
    assert sorted(seqs) == list(range(160))


def test_parts_of_a_long_queue_are_even(tmp_path):
    with warren.open(tmp_path, settings=TINY) as store:
        store.queue("orders").publish_many([b"m"] * 1003)
    found = open_view(str(tmp_path)).parts({"queue": "orders", "minPartitions": "4"})
    assert [len(part.segments) for part in found] == [31, 32, 31, 32]


def test_no_part_is_larger_than_the_records_asked_for(data):
    view = open_view(data)
    found = view.parts({"queue": "orders", "minPartitions": "1", "maxRecordsPerPartition": "24"})
    sizes = [sum(batch.num_rows for batch in read_part(view.root, part, ["seq_id"])) for part in found]
    assert sum(sizes) == 160
    assert max(sizes) <= 24
    assert all(estimated_rows(part) >= size for part, size in zip(found, sizes, strict=True))


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_segment_with_more_messages_than_a_part_may_have_is_cut(data, most):
    """It was one part, however few messages were asked for."""
    view = open_view(data)
    found = view.parts({"queue": "orders", "maxRecordsPerPartition": str(most)})
    seqs = [
        [seq for batch in read_part(view.root, part, ["seq_id"]) for seq in batch.column("seq_id").to_pylist()]
        for part in found
    ]
    assert max(map(len, seqs)) <= most
    whole = view.parts({"queue": "orders"})
    assert sorted(seq for some in seqs for seq in some) == sorted(
        seq
        for part in whole
        for batch in read_part(view.root, part, ["seq_id"])
        for seq in batch.column("seq_id").to_pylist()
    )


def test_slices_of_a_segment_are_within_what_is_asked_for(data):
    found = open_view(data).parts(
        {"queue": "orders", "fromSeqId": "17", "toSeqId": "21", "maxRecordsPerPartition": "3"}
    )
    assert [(part.from_seq, part.to_seq) for part in found] == [(17, 20), (20, 21)]


def test_a_queue_in_sqlite_is_read_in_partitions_too(tmp_path):
    """Its parts counted for nothing, and were put together again."""
    with warren.open(tmp_path) as store:
        queue = store.queue("q", arguments={"x-backing-queue": "sqlite"})
        queue.publish_many([b"m"] * 100)
    reader = WarrenBatchReader(
        {"path": str(tmp_path), "queue": "q", "maxRecordsPerPartition": "30"}, arrow_schema(["seq_id"])
    )
    counts = [sum(batch.num_rows for batch in reader.read(part)) for part in reader.partitions()]
    assert sum(counts) == 100
    assert max(counts) <= 30


def test_segments_out_of_bounds_are_not_planned(data):
    found = open_view(data).parts({"queue": "orders", "fromSeqId": "16", "toSeqId": "30", "minPartitions": "100"})
    assert [number for part in found for number in part.segments] == [2, 3]
    assert {(part.from_seq, part.to_seq) for part in found} == {(16, 24), (24, 30)}
    assert open_view(data).parts({"queue": "orders", "state": "unacked"}) == []


def test_a_pattern_takes_the_queues_whose_whole_name_it_matches(data):
    def names(pattern: str) -> set[str]:
        return {part.queue for part in open_view(data).parts({"queuePattern": pattern})}

    assert names("orders") == {"orders"}
    assert names("orders.*") == {"orders", "orders-old"}
    with pytest.raises(QueueNotFoundError, match=r"'o' matches as a whole; there are empty, orders, orders-old"):
        names("o")


def test_what_is_not_there_is_refused_with_what_there_is(data, tmp_path):
    view = open_view(data)
    with pytest.raises(QueueNotFoundError, match="there is no queue 'oders'; did you mean 'orders'"):
        view.parts({"queue": "oders"})
    with pytest.raises(VhostNotFoundError, match="there is no vhost 'other'; there are /"):
        open_view(data, "other")
    with pytest.raises(StorePathError, match="is not there"):
        open_view(str(tmp_path / "nothing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorePathError, match="is a file"):
        open_view(str(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorePathError, match="holds no store"):
        open_view(str(tmp_path / "empty"))
    (tmp_path / "empty" / "vhosts").mkdir()
    with pytest.raises(StorePathError, match="there is no vhost in it"):
        open_view(str(tmp_path / "empty"))
    with pytest.raises(OptionError, match="no queue is given"):
        view.parts({})


def test_a_store_of_a_newer_format_is_refused(data):
    import sqlite3

    with sqlite3.connect(f"{data}/vhosts/{hashed('/')}/meta.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreFormatError, match="format version 99; this Warren reads up to version"):
        open_view(data)


def test_a_store_whose_owner_lives_is_refused_with_the_command_to_use(tmp_path):
    data = tmp_path / "data"
    with warren.open(data) as store:
        store.queue("orders")
        with pytest.raises(StoreLockedError, match=r"in use by process \d+.*the path of a Store\.snapshot\(\)"):
            open_view(str(data))
        (data / NODE_FILE).write_text(json.dumps({"http": "http://127.0.0.1:15672", "pid": 1}))
        with pytest.raises(StoreLockedError, match=r"url=http://127.0.0.1:15672"):
            open_view(str(data))
        with store.snapshot() as snapshot:
            assert list(open_view(snapshot.path).queues) == ["orders"]
    assert list(open_view(str(data)).queues) == ["orders"]


def test_damaged_terms_of_a_clean_stop_cost_only_exact_redelivered_marks(tmp_path):
    with warren.open(tmp_path) as store:
        store.queue("orders").publish_many([b"a", b"b"])
    view = open_view(str(tmp_path))
    assert view.terms is not None
    path = tmp_path / "vhosts" / hashed("/") / "recovery"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    view = open_view(str(tmp_path))
    assert view.terms is None
    [part] = view.parts({"queue": "orders"})
    rows = [row for batch in read_part(view.root, part) for row in batch.to_pylist()]
    assert [(row["body"], row["redelivered"]) for row in rows] == [(b"a", True), (b"b", True)]
