"""The parsers of the kernel, each as a function of bytes, with seeds that the real encoders made.

A target may raise nothing: what a parser is allowed to raise is caught here, and what must hold is asserted. All else (a
crash, an access outside of an object, a hang, an allocation that nothing justifies) is seen from outside.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warren.amqp.methods import encode
from warren.kernel.client_scanner import CONFIRMS, DELIVERIES, ClientScanner
from warren.kernel.columns import ColumnBuilder, in_ranges, numbers_at
from warren.kernel.entry import IN_STORE, PERSISTENT, Entry
from warren.kernel.frames import ACK, PUBLISH, FrameScanner, ack_frame, content, method_frame, publishes
from warren.kernel.head_codec import HeadColumns
from warren.kernel.journal_codec import ACK as ACK_RECORD
from warren.kernel.journal_codec import CHECKOUT, DELAY, LEASE, PURGE, STAGE, RecordBuffer, read_publishes, replay
from warren.kernel.overlay import LIVE, Overlay, unpack_rows
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import (
    SLOT_BYTES,
    convert_rows,
    encode_bodies,
    encode_slots,
    fill_bodies,
    live_bytes,
    measure_rows,
    read_slots,
    scan_slots,
)
from warren.kernel.stage_codec import decode_stage, encode_stage
from warren.kernel.store_table import StoreTable, check_run, hint_rows, pack_records, scan_records, unpack_record
from warren.queueing.properties import build_head

SID, OTHER, FILE, BOOT, BASE = 256, 257, 7, 3, 80
EVERYTHING = struct.pack("<QQ", 0, 2**63)
HEADS = [
    build_head("", "orders", {}),
    build_head("amq.topic", "a.b", {"headers": {"a": 1, "b": "two", "c": True}, "delivery_mode": 2, "priority": 3}),
    build_head(
        "x",
        "k",
        {
            "content_type": "text/plain",
            "correlation_id": "c",
            "expiration": "1000",
            "timestamp": 1_700_000_000,
            "headers": {"list": [1, 2.5, None, {"deep": ["x"]}], "bytes": b"\0\1", "big": 2**40},
            "app_id": "app",
        },
    ),
]


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], None]
    seeds: list[bytes]
    modules: tuple[str, ...]  # whose branches count


# ---- what clients send ----


def frames(data: bytes) -> None:
    """However the bytes are cut, the same comes of them."""
    if len(data) < 2:
        return
    frame_max, most = ((131072, 1 << 20), (4096, 100), (0, 64), (300, 1 << 27))[data[0] & 3]
    step = data[1] % 64 + 1
    received = data[2:]
    whole = FrameScanner(frame_max, most)
    once = _flat_events(whole.feed(received, 5))
    cut = FrameScanner(frame_max, most)
    pieces = []
    for at in range(0, len(received), step):
        pieces += cut.feed(received[at : at + step], 5)
    assert whole.error == cut.error, (whole.error, cut.error)
    assert once == _flat_events(pieces)
    assert whole.buffered <= len(received)
    whole.forget(1)
    whole.feed(received, 6)


def _flat_events(events: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Without batches, which are made of what came together."""
    flat: list[tuple[Any, ...]] = []
    for event in events:
        if event[0] == PUBLISH:
            flat += [(*event[:6], each.head, each.body, each.flags) for each in event[6]]
        elif event[0] == ACK:
            flat += [(*event[:2], each) for each in event[2]]
        else:
            flat.append(event)
    return flat


def _frame_seeds() -> list[bytes]:
    body = b"x" * 90
    streams = [
        publishes(1, b"", b"orders", 0, b"\x10\x00\x02", [b"a", b"", body], 131072),
        publishes(1, b"amq.topic", b"a.b", 3, HEADS[2][HEADS[2].index(b"k") + 1 :], [body], 131072),
        publishes(2, b"", b"q", 0, b"\x00\x00", [bytes(300)], 128),
        ack_frame(1, 7, True) + ack_frame(1, 8, False) + b"\x08\x00\x00\x00\x00\x00\x00\xce",
        method_frame(1, encode("channel.open"))
        + method_frame(1, encode("queue.declare", queue="q", arguments={"x": 1})),
        method_frame(0, encode("connection.close", reply_code=200, reply_text="bye")),
    ]
    streams.append(b"".join(streams))
    return [bytes([kind, 13]) + stream for stream in streams for kind in range(3)]


def client_scanner(data: bytes) -> None:
    if len(data) < 2:
        return
    frame_max = (131072, 0, 300)[data[0] % 3]
    step = data[1] % 64 + 1
    received = data[2:]
    found = []
    for pieces in ([received], [received[at : at + step] for at in range(0, len(received), step)]):
        scanner = ClientScanner(frame_max)
        scanner.stamped = bool(data[0] & 4)
        scanner.collect(1, bool(data[0] & 8))
        left, totals, failed = b"", [0, 0, 0], False
        for piece in pieces:
            left += piece
            try:
                events = scanner.scan(left, len(left), 1_000_000)
            except ValueError:
                failed = True
                break
            left = left[scanner.consumed :]
            for event in events:
                if event[0] == DELIVERIES:
                    totals[0] += event[3]
                    totals[1] += event[4]
                elif event[0] == CONFIRMS:
                    totals[2] += event[2]
        found.append(None if failed else (totals, left))
        scanner.forget(1)
    assert found[0] == found[1]


def _client_seeds() -> list[bytes]:
    deliver = encode("basic.deliver", consumer_tag="c", delivery_tag=1, exchange="", routing_key="q")
    returned = encode("basic.return", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="q")
    streams = [
        content(1, deliver, HEADS[0], bytes(8) + b"body", 131072),
        content(1, deliver, HEADS[1], bytes(500), 128) * 2,
        content(2, returned, HEADS[0], b"lost", 131072),
        ack_frame(1, 1, False) + ack_frame(1, 3, False) + ack_frame(1, 4, True),
        method_frame(1, encode("basic.consume-ok", consumer_tag="c")) + b"\x08\x00\x00\x00\x00\x00\x00\xce",
    ]
    streams.append(b"".join(streams))
    return [bytes([kind, 17]) + stream for stream in streams for kind in (0, 1, 5, 9, 13)]


def head_codec(data: bytes) -> None:
    """Heads of the sizes that the first bytes say."""
    count = data[0] % 8 if data else 0
    sizes, rest = data[1 : 1 + 2 * count], data[1 + 2 * count :]
    ends, at = [], 0
    for size in struct.unpack(f"<{len(sizes) // 2}H", sizes[: len(sizes) // 2 * 2]):
        at = min(at + size, len(rest))
        ends.append(at)
    columns = HeadColumns(rest, struct.pack(f"<{len(ends)}I", *ends))
    for field in range(16):
        raw = columns.raw(field)
        assert len(raw) == columns.count == len(ends)
        if field in (5, 6):
            columns.octets(field)
        elif field == 11:
            columns.moments(field)
        elif field == 4:
            columns.maps(field)
        else:
            text = columns.text(field)
            if text is not None:
                assert text[2] == b"".join(each for each in raw if each is not None)


def _head_seeds() -> list[bytes]:
    several = [HEADS, HEADS[:1], HEADS[1:] * 2]
    return [bytes([len(some)]) + struct.pack(f"<{len(some)}H", *map(len, some)) + b"".join(some) for some in several]


# ---- what is on disk ----


def _made(seq: int, head: bytes, body: bytes, stored: bool = False) -> Entry:
    return Entry(
        seq,
        head,
        body,
        PERSISTENT | (IN_STORE if stored else 0),
        1000 + seq,
        2000 + seq,
        seq.to_bytes(16, "big") if stored else None,
    )


def journal(data: bytes) -> None:
    """Replay a file; then read, carry and convert what it names, from its bytes and from bytes that were damaged since."""
    overlays = {SID: Overlay(), OTHER: Overlay()}
    damaged: list[Any] = []
    others: list[Any] = []
    acks: dict[int, RangeSet] = {}
    replay(data, 0, FILE, overlays, acks, {}, {}, others, damaged)
    for offset, length in damaged:
        assert 0 <= offset < offset + length <= len(data)
    rows = overlays[SID].rows_upto(FILE)
    places = unpack_rows(rows)
    assert all(offset + size <= len(data) for _, _, offset, size, _ in places)
    later = bytearray(data)
    for _, _, offset, size, _ in places[:3]:
        later[offset + (offset * 7 + len(data)) % size] ^= 1 + len(data) % 255
    for bytes_ in (data, bytes(later)):
        entries: list[Entry] = []
        read_publishes(rows, bytes_, 0, entries, [])
        measure_rows(rows, bytes_, 0)
        convert_rows(rows, bytes_, 0, SID, 1024, 0, [])
        builder = ColumnBuilder(1000, 1 << 20)
        builder.add_rows(rows, 0, bytes_, FILE, SID, EVERYTHING, 1, _fetch, [])
        builder.finish()
    overlay = overlays[SID]
    buffer = RecordBuffer()
    buffer.reset(FILE + 1, 0)
    buffer.carry(SID, rows, data, 0, overlay, [])
    buffer.finish(9)
    again: list[Any] = []
    replay(bytes(memoryview(buffer)), 0, FILE + 1, {SID: Overlay()}, {}, {}, {}, [], again)
    assert not again, "what was carried can be read"


def _fetch(msg_id: bytes) -> tuple[bytes, int, int] | None:
    head = HEADS[msg_id[0] % 3]
    return (len(head).to_bytes(4, "little") + head + msg_id, 2, 5) if msg_id[15] % 4 else None


def _journal_seeds() -> list[bytes]:
    seeds = []
    for number in range(4):
        buffer = RecordBuffer()
        buffer.reset(FILE, 0)
        if number in (0, 3):
            entries = [_made(seq, HEADS[seq % 3], b"body" * seq, seq == 2) for seq in range(5)]
            buffer.append_publishes(SID, entries, Overlay(), LIVE)
        if number in (1, 3):
            buffer.begin_group()
            targets = [(SID, 9, Overlay()), (OTHER, 4, Overlay())]
            buffer.append_fanout(_made(9, HEADS[0], b"fan"), targets, LIVE, 77, b"app")
            buffer.append_ranges(ACK_RECORD, SID, [1, 2])
            buffer.end_group()
        if number in (2, 3):
            buffer.append_ranges(PURGE, OTHER, [0, 3, 5, 1])
            buffer.append_requeue(SID, [(1, 2), (3, 1)])
            buffer.append_reserve(5, 1000)
            for kind in (CHECKOUT, LEASE, STAGE, DELAY):
                buffer.append_other(kind, b"something else")
        buffer.finish(number + 1)
        seeds.append(bytes(memoryview(buffer)))
    return [*seeds, b"".join(seeds)]


def segment(data: bytes) -> None:
    """As many slots as the first byte says, then bodies."""
    if not data:
        return
    cut = 1 + (data[0] % 32) * SLOT_BYTES
    slots, bodies = data[1:cut], data[cut:]
    slots = slots[: len(slots) // SLOT_BYTES * SLOT_BYTES]
    live, refs, damaged = bytearray(4), [], []
    kept, _, written, _, _ = scan_slots(slots, BASE, SID, BOOT, live, refs, damaged)
    assert kept + len(damaged) <= written <= len(slots) // SLOT_BYTES
    live_bytes(slots, live)
    entries: list[Entry] = []
    read_slots(slots, BASE, 0, SID, BOOT, bytearray(b"\xff" * 4), 1000, entries, [], [])
    assert len(entries) == kept
    lost: list[Entry] = []
    fill_bodies([entry for entry in entries if not entry.flags & IN_STORE], bodies, 0, SID, lost)
    for payloads in (True, False):
        for expected in (True, False):
            builder = ColumnBuilder(5, 2000, payloads=payloads)
            place = 0
            while place >= 0:
                place = builder.add_segment(slots, bodies, BASE, place, SID, BOOT, b"\xff" * 4, expected, 1, _fetch, [])
                columns = builder.finish()
                in_ranges(columns["seq"], EVERYTHING)
                numbers_at(columns["seq"], EVERYTHING[:8] + EVERYTHING)


def _segment_seeds() -> list[bytes]:
    seeds = []
    for count in (1, 4, 12):
        entries = [_made(BASE + n, HEADS[n % 3], b"body" * n, n % 5 == 4) for n in range(count)]
        bodies = encode_bodies([entry for entry in entries if not entry.flags & IN_STORE], SID, 0)
        slots = b"".join(run for _, run in encode_slots(entries, SID, 1024, BOOT))
        seeds.append(bytes([count]) + slots + bodies)
    return seeds


def stage(data: bytes) -> None:
    heads: list[bytes] = []
    counts: list[int] = []
    bodies: list[bytes] = []
    ends: list[int] = []
    decode_stage(data, 100, heads, counts, bodies, ends)
    assert len(heads) == len(counts)
    assert sum(counts) == len(bodies) == len(ends)
    if ends:
        assert ends[-1] <= len(data)
        rows = [number for number, count in enumerate(counts) for _ in range(count)]
        assert _staged(heads, rows, bodies) == data[: ends[-1]]
    third = len(data) // 3  # columns come from afar, too
    try:
        encode_stage(HEADS, data[:third], data[third : 2 * third], data[2 * third :])
    except ValueError:
        return


def _staged(heads: list[bytes], rows: list[int], bodies: list[bytes]) -> bytes:
    ends = [0]
    for body in bodies:
        ends.append(ends[-1] + len(body))
    return encode_stage(
        heads, struct.pack(f"<{len(rows)}i", *rows), struct.pack(f"<{len(ends)}i", *ends), b"".join(bodies)
    )


def store(data: bytes) -> None:
    rows, damage = scan_records(data, 0)
    covered = sum(length for _, length in damage)
    found = 0
    for at in range(0, len(rows), 32):
        offset, size = struct.unpack_from("<QQ", rows, at + 16)
        found += size
        unpack_record(data[offset : offset + size], data[offset + 8 : offset + 24], size)
    assert covered + found == len(data)
    check_run(data, rows)
    check_run(data, data[len(data) // 2 :])
    table = StoreTable()
    try:
        table.load(data[: len(data) // 40 * 40])
    except ValueError:
        return
    table.items()
    table.live(rows, 1)


def _store_seeds() -> list[bytes]:
    ids = [bytes([n]) * 16 for n in range(1, 5)]
    records = pack_records(ids, [b"payload" * n for n in range(4)])
    sizes = [len(pack_records(ids[n : n + 1], [b"payload" * n])) for n in range(4)]
    table = StoreTable()
    table.put_run(ids, 1, 0, sizes, [1, 2, 3, 4])
    return [records, records + hint_rows(ids, 0, sizes), table.dump(), b"\0" * 7 + records]


def _stage_seeds() -> list[bytes]:
    columns = struct.pack("<2i", 0, 2) + struct.pack("<3i", 0, 2, 5) + b"\0" * 8 + b"hello"
    return [_staged(HEADS[:1], [0, 0, 0], [b"a", b"", b"c" * 100]), _staged(HEADS, [0, 1, 2], [b"x"] * 3), columns]


def noise(seed: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(size) for size in (0, 1, 7, 64, 300)]


TARGETS = {
    "frames": Target(frames, _frame_seeds(), ("frames",)),
    "client_scanner": Target(client_scanner, _client_seeds(), ("client_scanner",)),
    "head_codec": Target(head_codec, _head_seeds(), ("head_codec",)),
    "journal": Target(journal, _journal_seeds(), ("journal_codec", "overlay", "ranges", "segment_codec", "columns")),
    "segment": Target(segment, _segment_seeds(), ("segment_codec", "columns")),
    "stage": Target(stage, _stage_seeds(), ("stage_codec",)),
    "store": Target(store, _store_seeds(), ("store_table",)),
}
