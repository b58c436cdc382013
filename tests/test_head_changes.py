"""A head that the broker changes: what it does not change stays as the client sent it, and nobody sees the keys of BCC."""

from __future__ import annotations

import pytest

from warren.kernel.entry import Entry
from warren.kernel.frame_writer import content, deliveries
from warren.kernel.head_codec import EXCHANGE, HeadColumns
from warren.kernel.ranges import RangeSet
from warren.queueing.dead_letter import EXPIRED, Death
from warren.queueing.properties import decode_head, encode_head, headers_of, rewritten


def test_what_a_broker_does_not_change_in_a_head_stays_byte_for_byte():
    """A time in milliseconds, numbers of the small and unsigned types, a float of 32 bits, a type that we cannot write."""
    fields = {
        b"ms": b"T" + (1_700_000_000_123).to_bytes(8, "big"),
        b"far": b"T" + (2**63 + 5).to_bytes(8, "big"),
        b"small": b"b\xff",
        b"unsigned": b"B\xff",
        b"word": b"u\xff\xff",
        b"float": b"f\x3f\x80\x00\x00",
        b"void": b"V",
        b"decimal": b"D\x02\x00\x00\x00\x07",
        b"list": b"A\x00\x00\x00\x03s\x00\x01",
        b"table": b"F\x00\x00\x00\x04\x01kb\x07",
    }
    table = b"".join(bytes((len(name),)) + name + value for name, value in fields.items())
    timestamp = (1_700_000_000_123).to_bytes(8, "big")
    head = b"\x01x\x01k" + b"\x20\x40" + len(table).to_bytes(4, "big") + table + timestamp
    changed = rewritten(head, exchange="y", headers={"new": 1}, without_headers=("void",), blind=["b1", "b2"])
    kept = b"".join(bytes((len(name),)) + name + value for name, value in fields.items() if name != b"void")
    assert kept in changed
    assert timestamp in changed
    said = decode_head(changed)
    assert (said.exchange, said.routing_key, said.blind) == ("y", "k", ("b1", "b2"))
    assert (said.headers["new"], "void" in said.headers) == (1, False)
    back = rewritten(changed, exchange="x", without_headers=("new",), blind=())
    assert kept in back
    assert decode_head(back).blind == ()


def test_the_keys_of_bcc_are_in_a_head_and_in_no_frame():
    plain = encode_head("x", "k", persistent=True, headers={"a": 1})
    head = rewritten(plain, blind=["hidden", "ä"])
    assert decode_head(head).keys == ["k", "hidden", "ä"]
    assert headers_of(head) == {"a": 1}
    assert content(1, b"\0\0\0\0", head, b"body", 4096) == content(1, b"\0\0\0\0", plain, b"body", 4096)
    entries = [Entry(1, head, b"one"), Entry(2, plain, b"two"), Entry(3, head, b"")]
    bare = [Entry(1, plain, b"one"), Entry(2, plain, b"two"), Entry(3, plain, b"")]
    assert deliveries(1, b"c", 1, entries, 0, RangeSet(), 4096) == deliveries(1, b"c", 1, bare, 0, RangeSet(), 4096)
    with pytest.raises(ValueError, match="too early"):
        decode_head(plain[:4] + b"\x00\x02" + b"\x00\x00\x00\x09")
    with pytest.raises(ValueError, match="no message head"):
        content(1, b"\0\0\0\0", plain[:4] + b"\x00\x02" + b"\x00\x00\x00\x09", b"", 4096)


def test_a_death_leaves_a_time_in_milliseconds_and_small_numbers_as_they_were():
    table = b"\x02msT" + (1_700_000_000_123).to_bytes(8, "big") + b"\x05smallb\xff"
    head = b"\x00\x01k" + b"\x20\x00" + len(table).to_bytes(4, "big") + table
    assert table in Death(head, "q", "rejected", "dlx", None).head


def test_a_death_with_a_routing_key_that_is_not_utf_8_keeps_its_history_and_ends_its_circle():
    head = b"\x00\x03k\xff\xfe" + encode_head("", "", persistent=True, expiration_ms=5)[2:]
    first = Death(head, "a", EXPIRED, "dlx", None)
    second = Death(first.head, "b", EXPIRED, "dlx", None)
    assert first.allows("b")
    assert not second.allows("a")
    newest, oldest = headers_of(second.head)["x-death"]
    assert (newest["queue"], oldest["queue"]) == ("b", "a")
    assert newest["routing-keys"] == oldest["routing-keys"] == [b"k\xff\xfe"]
    assert (oldest["original-expiration"], "original-expiration" in newest) == ("5", False)
    key = b"S\x00\x00\x00\x03k\xff\xfe"  # a long string in both, as every client expects it there
    assert second.head.count(key) == 2


def test_a_queue_whose_name_is_not_utf_8_is_known_again_in_a_history():
    head = encode_head("", "k", persistent=True)
    name = b"q\xff".decode("utf-8", "surrogateescape")
    first = Death(head, name, EXPIRED, "dlx", None)
    again = Death(first.head, name, EXPIRED, "dlx", None)
    assert not Death(first.head, "b", EXPIRED, "dlx", None).allows(name)
    assert [death["count"] for death in headers_of(again.head)["x-death"]] == [2]


def test_a_history_that_cannot_be_written_is_left_out_and_a_new_one_begins():
    """A time that no calendar has is read as a number, and the number is too large to be written."""
    death = b"\x05queueS\x00\x00\x00\x01z\x04timeT" + (2**64 - 1).to_bytes(8, "big")
    table = b"\x07x-deathA" + (len(death) + 5).to_bytes(4, "big") + b"F" + len(death).to_bytes(4, "big") + death
    table += b"\x02CCA\x00\x00\x00\x00"
    head = b"\x00\x01k\x21\x00" + len(table).to_bytes(4, "big") + table + b"\x015"
    assert headers_of(head)["x-death"] == [{"queue": "z", "time": 2**64 - 1}]
    first = Death(head, "a", EXPIRED, "dlx", "other")
    said = decode_head(first.head)
    assert [death["queue"] for death in said.headers["x-death"]] == ["a"]
    assert first.headers["x-death"][0]["queue"] == "a"
    assert ("CC" in said.headers, "expiration" in said.properties) == (False, False)
    assert said.routing_key == "other"
    assert not Death(first.head, "b", EXPIRED, "dlx", None).allows("a")


def test_columns_do_not_show_the_keys_of_bcc():
    plain = encode_head("x", "k", persistent=True, headers={"a": 1}, app_id="app")
    hidden = rewritten(plain, blind=["hidden"])
    ends = b"".join(end.to_bytes(4, "little") for end in (len(hidden), len(hidden) + len(plain)))
    columns = HeadColumns(hidden + plain, ends)
    for field in range(EXCHANGE, 16):
        one, other = columns.raw(field)
        assert one == other
    assert columns.raw(EXCHANGE) == [b"x", b"x"]
    cut = plain[:4] + b"\x00\x02" + b"\x00\x00\x00\x09"
    assert HeadColumns(cut, len(cut).to_bytes(4, "little")).raw(EXCHANGE) == [None]
