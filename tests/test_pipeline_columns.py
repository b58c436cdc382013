"""The kernel's columns hold what was put in, across full batches, heads that repeat and memory that is handed over."""

from __future__ import annotations

import datetime
import gc
import itertools
import random
import struct

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from warren.kernel.columns import ColumnBuilder, in_ranges, numbers_at
from warren.pipeline.head_columns import HeadTable
from warren.pipeline.parts import pack_pairs
from warren.pipeline.schema import HEAD_COLUMNS, arrow_schema
from warren.queueing.properties import Head, decode_head, encode_head
from warren.storage.tagged_json import to_json


def unpacked(columns: dict[str, object], name: str, code: str) -> list[int]:
    data = bytes(memoryview(columns[name]))
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.binary(max_size=40)), max_size=60),
    st.integers(1, 20),
    st.integers(1, 200),
)
def test_messages_come_back_from_batches_as_they_went_in(messages, most_rows, most_bytes):
    builder = ColumnBuilder(most_rows, most_bytes)
    found = []

    def finish() -> None:
        assert 0 < builder.rows <= most_rows
        count = builder.rows
        assert builder.body_bytes <= most_bytes or count == 1
        columns = builder.finish()
        head_ends, packed = [0, *unpacked(columns, "head_end", "I")], bytes(memoryview(columns["heads"]))
        heads = [packed[start:end] for start, end in itertools.pairwise(head_ends)]
        assert builder.rows == builder.body_bytes == 0
        assert len(set(heads)) == len(heads)
        ends, body = unpacked(columns, "body_end", "I"), bytes(memoryview(columns["body"]))
        bodies = [body[start:end] for start, end in itertools.pairwise(ends)]
        assert unpacked(columns, "size", "I") == [len(body) for body in bodies]
        seqs = unpacked(columns, "seq", "Q")
        assert len(seqs) == count
        found.extend(zip(seqs, [heads[n] for n in unpacked(columns, "head", "I")], bodies, strict=True))

    wanted = []
    for seq, (number, body) in enumerate(messages):
        head = b"head %d" % number * number
        wanted.append((seq, head, body))
        if not builder.add_message(seq, 1, 0, head, body, 0, -1):
            finish()
            assert builder.add_message(seq, 1, 0, head, body, 0, -1)
    if builder.rows:
        finish()
    assert found == wanted


def test_an_empty_batch_has_columns_of_no_rows():
    columns = ColumnBuilder(10, 10).finish()
    assert len(columns["heads"]) == len(columns["head_end"]) == 0
    assert unpacked(columns, "body_end", "I") == [0]
    assert len(columns["seq"]) == 0


def test_memory_that_arrow_holds_outlives_the_builder():
    builder = ColumnBuilder(1000, 1 << 20)
    for seq in range(1000):
        builder.add_message(seq, 1, 0, b"h", b"body %d" % seq, 0, 0)
    columns = builder.finish()
    buffers = [None, pa.py_buffer(columns["body_end"]), pa.py_buffer(columns["body"])]
    array = pa.Array.from_buffers(pa.binary(), 1000, buffers)
    del builder, columns, buffers
    gc.collect()
    assert array.to_pylist() == [b"body %d" % seq for seq in range(1000)]


def test_times_out_of_bounds_are_left_out():
    builder = ColumnBuilder(10, 100, since=5, until=8)
    for time in range(10):
        assert builder.add_message(time, time, 0, b"", b"", 0, 0)
    assert unpacked(builder.finish(), "seq", "Q") == [5, 6, 7]


@given(st.lists(st.integers(0, 60), max_size=80), st.sets(st.integers(0, 60)))
def test_ranges_and_numbers_are_looked_up_by_seq_id(seqs, members):
    packed = struct.pack(f"<{len(seqs)}Q", *seqs)
    bits = in_ranges(packed, pack_pairs(n for seq in sorted(members) for n in (seq, 1)))
    assert [bool(bits[i >> 3] >> (i & 7) & 1) for i in range(len(seqs))] == [seq in members for seq in seqs]
    table = numbers_at(packed, pack_pairs(n for seq in sorted(members) for n in (seq, seq + 100)))
    assert list(struct.unpack(f"<{len(seqs)}i", table)) == [seq + 100 if seq in members else 0 for seq in seqs]


def test_arbitrary_bytes_in_the_place_of_files_are_damage_and_no_crash(seed):
    chance = random.Random(seed)
    for _ in range(300):
        builder = ColumnBuilder(64, 4096)
        slots = chance.randbytes(64 * chance.randrange(9))
        damaged: list[tuple[int, int]] = []
        builder.add_segment(slots, chance.randbytes(200), 0, 0, 256, 0, b"\xff", True, 0, lambda msg_id: None, damaged)
        assert sorted(slot for slot, _ in damaged) == list(range(8))
        rows = b"".join(
            struct.pack("<QIIIBBH", seq, 0, chance.randrange(300), chance.randrange(300), 1, 0, 0) for seq in range(8)
        )
        bad: list[tuple[int, int, bool]] = []
        data = chance.randbytes(chance.randrange(300))
        assert builder.add_rows(rows, 0, data, 0, 256, pack_pairs([0, 8]), 0, lambda msg_id: None, bad) == -1
        assert len(bad) == 8
        assert builder.rows == 0


name = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
header_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
    | st.binary(max_size=10)
    | st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(9000, 1, 1), timezones=st.just(datetime.UTC)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(name, inner, max_size=3),
    max_leaves=5,
)
plain_headers = st.dictionaries(
    name, st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text("abc", max_size=5), max_size=4
)
a_head = st.builds(
    encode_head,
    name,
    name,
    persistent=st.booleans(),
    headers=st.none() | plain_headers | st.dictionaries(name, header_value, max_size=4),
    priority=st.none() | st.integers(0, 255),
    expiration_ms=st.none() | st.integers(0, 10**9),
    content_type=st.none() | name,
    message_id=st.none() | name,
    timestamp=st.none() | st.integers(0, 2**64 - 1),
    type=st.none() | name,
    cluster_id=st.none() | name,
)


@given(st.lists(a_head | st.binary(max_size=20), max_size=8))
def test_heads_become_the_columns_that_decoding_one_by_one_gives(heads):
    schema, table = arrow_schema(), HeadTable.of(heads)
    decoded: list[Head | None] = []
    for head in heads:
        try:
            decoded.append(decode_head(head))
        except (ValueError, IndexError, struct.error):
            decoded.append(None)
    for field in schema:
        if field.name not in HEAD_COLUMNS:
            continue
        found = table.column(field.name, field.type).to_pylist()
        assert len(found) == len(heads)
        for head, value in zip(decoded, found, strict=True):
            if head is None:
                continue  # the kernel may find some of its fields
            assert value == _shown(head, field.name), (field.name, head)


def _shown(head: Head, name: str) -> object:
    if name in ("exchange", "routing_key"):
        return _text(getattr(head, name))
    value = head.properties.get(name)
    if name == "headers" and isinstance(value, dict):
        return [
            (_text(key), _text(item) if isinstance(item, str) else to_json(item, key)) for key, item in value.items()
        ]
    if name == "timestamp":
        return value if isinstance(value, datetime.datetime) else None
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def test_headers_of_a_batch_are_read_by_the_kernel_where_they_are_plain_and_else_by_python():
    plain = [
        encode_head("", "k", persistent=True, headers={"n": -5, "t": "x", "b": True}),
        encode_head("", "", persistent=True),
    ]
    odd = encode_head("", "k", persistent=True, headers={"list": [1, None]})
    kind = arrow_schema().field("headers").type
    expected = [[("n", "-5"), ("t", "x"), ("b", "true")], None]
    assert HeadTable.of(plain).column("headers", kind).to_pylist() == expected
    assert HeadTable.of([*plain, odd]).column("headers", kind).to_pylist() == [*expected, [("list", "[1,null]")]]
