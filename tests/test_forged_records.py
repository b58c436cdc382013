"""Records whose checksum is true and whose counts are not: damage like any other. `tests/fuzz/` looks for more of them."""

from __future__ import annotations

import struct

import pytest

from warren.kernel.checksum import crc32c
from warren.kernel.client_scanner import CONFIRMS, ClientScanner
from warren.kernel.entry import IN_QS, PERSISTENT, Entry
from warren.kernel.frame_writer import ack_frame, nack_frame
from warren.kernel.journal_codec import ACK, GROUP, PUBLISH, REQUEUE, RESERVE, RecordBuffer, read_publishes, replay
from warren.kernel.overlay import LIVE, Overlay, unpack_rows
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import convert_rows, encode_bodies, fill_bodies

SID, FILE = 256, 7


def sealed(body: bytes, *, member: bool = False) -> bytes:
    """A record; the CRC of a member of a group is inverted."""
    return struct.pack("<II", len(body), crc32c(body) ^ (0xFFFFFFFF if member else 0)) + body


def replayed(data: bytes) -> tuple[dict[int, Overlay], dict[int, RangeSet], list[tuple[int, int]]]:
    overlays, acks, damaged = {SID: Overlay()}, {}, []
    replay(data, 0, FILE, overlays, acks, {}, {}, [], damaged)
    return overlays, acks, damaged


FORGED = {
    "acks that are not there": struct.pack("<BxHIQ", ACK, 0, 1_000_000, SID),
    "requeues that are not there": struct.pack("<BxHIQ", REQUEUE, 0, 1_000_000, SID) + bytes(12),
    "an ack without a queue": struct.pack("<BxHI", ACK, 0, 0),
    "a reservation that is cut": struct.pack("<BxHIQ", RESERVE, 0, 0, 5),
    "a publish that is cut": struct.pack("<BBHI", PUBLISH, 0, 1, 4),
    "targets that are not there": struct.pack("<BBHIQQ", PUBLISH, 0, 4000, 4, 1, 0) + bytes(20),
    "a payload that is not there": struct.pack("<BBHIQQQQ", PUBLISH, 0, 1, 2**31, 1, 0, SID, 1) + bytes(20),
    "a payload without a head": struct.pack("<BBHIQQQQ", PUBLISH, 0, 1, 2, 1, 0, SID, 1) + bytes(2),
    "a head larger than its payload": struct.pack("<BBHIQQQQI", PUBLISH, 0, 1, 8, 1, 0, SID, 1, 2**31) + bytes(4),
    "a producer that is not there": struct.pack("<BBHIQQQQ", PUBLISH, 1, 1, 0, 1, 0, SID, 1),
    "a place in the store that is cut": struct.pack("<BBHIQQQQ", PUBLISH, 2, 1, 8, 1, 0, SID, 1) + bytes(8),
    "a group whose member is longer": struct.pack("<BxH", GROUP, 0) + struct.pack("<II", 2**31, 0) + bytes(8),
    "a group in a group": struct.pack("<BxH", GROUP, 0) + sealed(struct.pack("<BxH", GROUP, 0), member=True),
    "a group that ends in a prefix": struct.pack("<BxH", GROUP, 0) + bytes(5),
}


@pytest.mark.parametrize("body", FORGED.values(), ids=FORGED.keys())
def test_a_record_that_counts_more_than_it_has_is_damage_and_the_next_one_is_read(body):
    buffer = RecordBuffer()
    buffer.reset(FILE, 0)
    buffer.append_publishes(SID, [Entry(5, b"head", b"body", PERSISTENT)], Overlay(), LIVE)
    sound = bytes(memoryview(buffer))[32:]
    overlays, acks, damaged = replayed(sealed(body) + sound)
    assert damaged == [(0, len(sealed(body)))]
    assert [seq for seq, *_ in unpack_rows(overlays[SID].rows_upto(FILE))] == [5]
    assert not acks


def test_a_publish_that_was_forged_since_is_damage_for_all_who_read_it():
    buffer, overlay = RecordBuffer(), Overlay()
    buffer.reset(FILE, 0)
    buffer.append_publishes(SID, [Entry(5, b"head", b"body", PERSISTENT)], overlay, LIVE)
    data = bytearray(memoryview(buffer))
    rows = overlay.rows_upto(FILE)
    [(_, _, offset, size, _)] = unpack_rows(rows)
    struct.pack_into("<I", data, offset + 8 + 24 + 16, 1000)  # the size of its head
    struct.pack_into("<I", data, offset + 4, crc32c(bytes(data[offset + 8 : offset + size])))
    for read in (
        lambda damaged: read_publishes(rows, bytes(data), 0, [], damaged),
        lambda damaged: convert_rows(rows, bytes(data), 0, SID, 1024, 0, damaged),
        lambda damaged: RecordBuffer().carry(SID, rows, bytes(data), 0, overlay, damaged),
    ):
        damaged: list[tuple[int, int, int]] = []
        read(damaged)
        assert damaged == [(5, offset, size)]


def test_a_body_in_a_segment_whose_head_is_larger_than_it_is_damage():
    entry = Entry(5, b"head", b"body", PERSISTENT)
    data = bytearray(encode_bodies([entry], SID, 0))
    struct.pack_into("<I", data, 16, 1000)
    struct.pack_into("<I", data, 4, crc32c(bytes(data[16:]), crc32c(struct.pack("<QQ", SID, 5))))
    damaged: list[Entry] = []
    fill_bodies([entry], bytes(data), 0, SID, damaged)
    assert damaged == [entry]


def test_a_slot_that_points_almost_around_the_world_is_damage():
    entry = Entry(5, None, None, PERSISTENT | IN_QS, size=8, offset=2**64 - 8)
    damaged: list[Entry] = []
    fill_bodies([entry], bytes(100), 0, SID, damaged)
    assert damaged == [entry]


@pytest.mark.parametrize("frame", [ack_frame, nack_frame])
def test_a_confirm_of_very_many_behind_one_out_of_order_takes_no_time(frame):
    scanner = ClientScanner()
    data = ack_frame(1, 3, False) + frame(1, 2**63, True)
    [(kind, channel, settled, floor, nacked)] = scanner.scan(data, len(data), 0)
    assert (kind, channel, settled, floor) == (CONFIRMS, 1, 2**63, 2**63)
    assert nacked == ([] if frame is ack_frame else [(1, 2), (4, 2**63)])
