"""The bytes of journal and segments: what was written is read back, and damage costs what it hit and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warren.kernel.checksum import crc32c
from warren.kernel.entry import IN_QS, IN_STORE, PERSISTENT, SLOTTED, Entry
from warren.kernel.journal_codec import (
    ACK,
    BLOCK_HEADER_BYTES,
    CHECKOUT,
    DEDUP,
    LEASE,
    PURGE,
    RECORD_PREFIX_BYTES,
    STAGE,
    RecordBuffer,
    read_publishes,
    replay,
)
from warren.kernel.overlay import LIVE, Overlay, unpack_rows
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import (
    BODY_PREFIX_BYTES,
    SLOT_BYTES,
    bit_runs,
    clear_bits,
    convert_rows,
    encode_bodies,
    encode_slots,
    fill_bodies,
    live_bytes,
    measure_rows,
    read_slots,
    scan_slots,
    set_bits,
)

FILE = 7
FIRST_OFFSET = 64  # behind the file's header
KNOWN, OTHER, DELETED = 256, 257, 999  # stream ids; the queue of the last one is gone
BOOT = 3

sids = st.sampled_from([KNOWN, OTHER, DELETED])
seqs = st.integers(0, 30)
heads = st.sampled_from([b"", b"\x00key", b"h" * 40])
bodies = st.sampled_from([b"", b"x", b"body" * 30, bytes(range(256))])
pair_lists = st.lists(st.tuples(seqs, st.integers(1, 5)), min_size=1, max_size=3)


def make(seq: int, head: bytes, body: bytes, stored: bool = False) -> Entry:
    msg_id = seq.to_bytes(16, "big") if stored else None
    return Entry(seq, head, body, PERSISTENT | (IN_STORE if stored else 0), 1000 + seq, 2000 + seq, msg_id)


def content(entry: Entry) -> tuple[object, ...]:
    body = None if entry.flags & IN_STORE else entry.body
    head = None if entry.flags & IN_STORE else entry.head
    sizes = entry.size, entry.body_size
    return entry.seq, head, body, entry.msg_id, sizes, entry.published_at, entry.expiry, entry.flags & 3


def flat(pairs: list[tuple[int, int]]) -> list[int]:
    return [number for pair in pairs for number in pair]


# ---- the journal ----

publish_ops = st.tuples(st.just("publish"), sids, seqs, heads, bodies, st.booleans())
fan_out_ops = st.tuples(
    st.just("fan_out"),
    st.lists(st.tuples(sids, seqs), min_size=1, max_size=3, unique_by=lambda target: target[0]),
    heads,
    bodies,
    st.booleans(),
    st.none() | st.tuples(st.binary(min_size=0, max_size=255), st.integers(0, 2**64 - 1)),
)
ack_ops = st.tuples(st.just("ack"), sids, st.sampled_from([ACK, PURGE]), pair_lists)
requeue_ops = st.tuples(
    st.just("requeue"), sids, st.lists(st.tuples(seqs, st.integers(1, 2**32 - 1)), min_size=1, max_size=3)
)
reserve_ops = st.tuples(st.just("reserve"), st.integers(1, 4), st.integers(0, 2**63))
other_ops = st.tuples(st.just("other"), st.sampled_from([CHECKOUT, LEASE, STAGE]), st.binary(min_size=1, max_size=40))
single_ops = publish_ops | fan_out_ops | ack_ops | requeue_ops | reserve_ops | other_ops
group_ops = st.tuples(st.just("group"), st.lists(single_ops, max_size=4))
blocks = st.lists(st.lists(single_ops | group_ops, min_size=1, max_size=6), min_size=1, max_size=4)


@dataclass
class State:
    """What the records say, in plain Python: what `replay` must make of them."""

    rows: dict[int, dict[int, tuple[int, int, int]]] = field(default_factory=lambda: {KNOWN: {}, OTHER: {}})
    dead: set[tuple[int, int]] = field(default_factory=set)
    acks: dict[int, set[int]] = field(default_factory=dict)
    counts: dict[int, dict[int, int]] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    others: list[tuple[int, object]] = field(default_factory=list)

    def apply(self, op: tuple, offset: int, size: int) -> None:
        match op:
            case ("publish", sid, seq, _, _, stored):
                self._publish(sid, seq, offset, size, stored)
            case ("fan_out", targets, _, _, stored, producer):
                for sid, seq in targets:
                    if sid in self.rows:
                        self._publish(sid, seq, offset, size, stored)
                        if producer is not None:
                            self.others.append((DEDUP, (sid, *producer)))
            case ("ack", sid, _, pairs):
                if sid in self.rows:
                    acked = {n for first, count in pairs for n in range(first, first + count)}
                    self.acks.setdefault(sid, set()).update(acked)
                    for seq in acked & self.rows[sid].keys():
                        self.dead.add((sid, seq))
            case ("requeue", sid, counts):
                if sid in self.rows:
                    self.counts.setdefault(sid, {}).update(counts)
            case ("reserve", uid, upto):
                if upto:
                    self.reserved[uid] = max(self.reserved.get(uid, 0), upto)
            case ("other", kind, body):
                self.others.append((kind, body))

    def _publish(self, sid: int, seq: int, offset: int, size: int, stored: bool) -> None:
        if sid in self.rows and (sid, seq) not in self.dead:
            flags = self.rows[sid][seq][2] if seq in self.rows[sid] else 2 if stored else 0
            self.rows[sid][seq] = offset, size, flags

    def alive(self, sid: int) -> list[tuple[int, int, int, int, int]]:
        return [
            (seq, FILE, offset, size, flags)
            for seq, (offset, size, flags) in sorted(self.rows[sid].items())
            if (sid, seq) not in self.dead
        ]


@dataclass
class Written:
    """A journal file as it was built: its bytes, and where each record of it lies."""

    data: bytearray
    records: list[tuple[int, int, tuple]]  # offset, size, what; a group is one record
    block_offsets: list[int]


def append(buffer: RecordBuffer, op: tuple, overlay: Overlay) -> None:
    match op:
        case ("publish", sid, seq, head, body, stored):
            buffer.append_publishes(sid, [make(seq, head, body, stored)], overlay, LIVE)
        case ("fan_out", targets, head, body, stored, producer):
            entry = make(targets[0][1], head, body, stored)
            name, publishing_id = producer if producer is not None else (None, 0)
            buffer.append_fanout(entry, [(*target, overlay) for target in targets], LIVE, publishing_id, name)
        case ("ack", sid, kind, pairs):
            buffer.append_ranges(kind, sid, flat(pairs))
        case ("requeue", sid, counts):
            buffer.append_requeue(sid, counts)
        case ("reserve", uid, upto):
            buffer.append_reserve(uid, upto)
        case ("other", kind, body):
            buffer.append_other(kind, body)
        case ("group", members):
            buffer.begin_group()
            for member in members:
                append(buffer, member, overlay)
            buffer.end_group()


def write(plan: list[list[tuple]]) -> Written:
    written = Written(bytearray(FIRST_OFFSET), [], [])
    buffer = RecordBuffer()
    for number, ops in enumerate(plan):
        base = len(written.data)
        buffer.reset(FILE, base)
        assert buffer.empty
        for op in ops:
            offset = base + len(buffer)
            append(buffer, op, Overlay())
            written.records.append((offset, base + len(buffer) - offset, op))
        assert buffer.count == len(ops)
        buffer.finish(number + 1)
        written.block_offsets.append(base)
        written.data += memoryview(buffer)
    return written


def members(offset: int, op: tuple) -> list[tuple[int, int, tuple]]:
    """The records inside of a group: offset, size, what."""
    out = []
    offset += RECORD_PREFIX_BYTES + 4
    for member in op[1]:
        buffer = RecordBuffer()
        append(buffer, member, Overlay())
        size = len(buffer) - BLOCK_HEADER_BYTES
        out.append((offset, size, member))
        offset += size
    return out


def expect(written: Written, lost: set[int] = frozenset()) -> State:
    """The state after all records but those whose number is in `lost`."""
    state = State()
    for number, (offset, size, op) in enumerate(written.records):
        if number in lost:
            continue
        if op[0] == "group":
            for at, length, member in members(offset, op):
                state.apply(member, at, length)
        else:
            state.apply(op, offset, size)
    return state


@dataclass
class Replayed:
    overlays: dict[int, Overlay]
    acks: dict[int, RangeSet]
    counts: dict[int, dict[int, int]]
    reserved: dict[int, int]
    others: list[tuple[int, object]]
    damaged: list[tuple[int, int]]
    lsn: int
    blocks: int
    records: int

    def agrees_with(self, state: State) -> bool:
        return (
            all(unpack_rows(self.overlays[sid].rows_upto(FILE)) == state.alive(sid) for sid in (KNOWN, OTHER))
            and {sid: set(ranges) for sid, ranges in self.acks.items()} == state.acks
            and self.counts == state.counts
            and self.reserved == state.reserved
            and self.others == state.others
        )


def run_replay(data: bytes | bytearray, summed: list[int] | None = None) -> Replayed:
    overlays = {KNOWN: Overlay(), OTHER: Overlay()}
    acks: dict[int, RangeSet] = {}
    counts: dict[int, dict[int, int]] = {}
    reserved: dict[int, int] = {}
    others: list[tuple[int, object]] = []
    damaged: list[tuple[int, int]] = []
    lsn, found_blocks, records, _ = replay(
        bytes(data), FIRST_OFFSET, FILE, overlays, acks, counts, reserved, others, damaged, summed
    )
    return Replayed(overlays, acks, counts, reserved, others, damaged, lsn, found_blocks, records)


@given(blocks)
def test_replay_says_what_was_appended(plan: list[list[tuple]]) -> None:
    written = write(plan)
    replayed = run_replay(written.data)
    assert replayed.agrees_with(expect(written))
    assert replayed.damaged == []
    assert (replayed.lsn, replayed.blocks, replayed.records) == (len(plan), len(plan), len(written.records))


@given(blocks)
def test_replay_of_the_same_file_twice_changes_nothing(plan: list[list[tuple]]) -> None:
    written = write(plan)
    overlays = {KNOWN: Overlay(), OTHER: Overlay()}
    acks: dict[int, RangeSet] = {}
    counts: dict[int, dict[int, int]] = {}
    seen = []
    for _ in range(2):
        replay(bytes(written.data), FIRST_OFFSET, FILE, overlays, acks, counts, {}, [], [])
        seen.append(([unpack_rows(overlay.rows_upto(FILE)) for overlay in overlays.values()], dict(counts)))
    first, second = seen
    assert first[1] == second[1]
    # A seq_id that was acked before it was published does not occur in a journal: the second time it stays dead.
    for once, twice in zip(first[0], second[0], strict=True):
        assert set(twice) <= set(once)


@given(blocks, st.data())
def test_one_flipped_bit_costs_the_record_that_it_hit_and_no_other(
    plan: list[list[tuple]], data: st.DataObject
) -> None:
    written = write(plan)
    position = data.draw(st.integers(FIRST_OFFSET, len(written.data) - 1), label="position")
    bit = data.draw(st.integers(0, 7), label="bit")
    written.data[position] ^= 1 << bit
    hit = {n for n, (offset, size, _) in enumerate(written.records) if offset <= position < offset + size}
    replayed = run_replay(written.data)
    assert replayed.agrees_with(expect(written, hit))
    # Zeros at the end of a file count as never written, also those that the flip has made.
    reported = [start for start, size in replayed.damaged if not any(written.data[start + size : position + 1])]
    assert any(start <= position for start in reported), "the damage was not reported"
    for offset, length in replayed.damaged:
        for start, size, _ in [record for n, record in enumerate(written.records) if n not in hit]:
            assert offset + length <= start or start + size <= offset, "a good record was called damaged"


LARGE = 2 * 1024 * 1024 + 13
LARGE_OPS = {
    "a transaction": ("group", [("publish", KNOWN, n, b"", bytes([n]) * (LARGE // 4), False) for n in range(4)]),
    "a message": ("publish", KNOWN, 1, b"head", b"x" * LARGE, False),
    "an ack": ("ack", KNOWN, ACK, [(2 * n, 1) for n in range(LARGE // 16)]),
    "a checkout": ("other", CHECKOUT, b"7" * LARGE),
}


@pytest.mark.parametrize("large", LARGE_OPS.values(), ids=LARGE_OPS)
def test_a_large_record_behind_a_damaged_one_of_its_block_is_replayed(large: tuple) -> None:
    written = write([[("publish", KNOWN, 9, b"", b"hit", False), large, ("publish", KNOWN, 20001, b"", b"", False)]])
    written.data[written.records[0][0] + RECORD_PREFIX_BYTES + 20] ^= 1
    replayed = run_replay(written.data)
    assert replayed.agrees_with(expect(written, {0}))
    assert replayed.damaged == [written.records[0][:2]]


@given(st.lists(st.integers(0, 9000), min_size=2, max_size=6), st.booleans())
def test_records_of_any_size_behind_a_damaged_one_are_replayed(sizes: list[int], grouped: bool) -> None:
    messages = [("publish", KNOWN, n, b"", bytes([n]) * size, False) for n, size in enumerate(sizes)]
    written = write([[("group", [message]) if grouped else message for message in messages]])
    written.data[written.records[0][0] + RECORD_PREFIX_BYTES + 1] ^= 0x80
    assert run_replay(written.data).agrees_with(expect(written, {0}))


FORGED_BYTES = 1 << 21
FORGED = {  # the first passes a look at a few bytes, so that sums are asked for
    "lengths of a megabyte": b"\x07\x07\x0f\x00" * (FORGED_BYTES // 4),
    "groups": (b"\x06\x00\x0e\x00" + b"\x06\x00\x00\x00") * (FORGED_BYTES // 8),
}


@pytest.mark.parametrize("body", FORGED.values(), ids=FORGED)
def test_a_search_through_bytes_that_look_like_large_records_does_not_sum_over_each(body: bytes) -> None:
    """Each of half a million places took a sum over a megabyte: for a whole file, a start that lasted for an hour."""
    written = write([[("publish", KNOWN, 1, b"", body, False), ("publish", KNOWN, 2, b"", b"whole", False)]])
    written.data[written.records[0][0] + 4] ^= 1
    summed: list[int] = []
    assert run_replay(written.data, summed).agrees_with(expect(written, {0}))
    assert summed[0] < 2048 * len(written.data), "bytes: two strides at most for each place, however long it says it is"


@pytest.mark.parametrize(("count", "lost"), [(20, {0}), (200, {0, 1})])
def test_after_many_forged_groups_behind_damage_no_group_of_the_file_is_looked_through(
    count: int, lost: set[int]
) -> None:
    """Each has a true CRC, and only its last member says that it is none. Who looked through all of them would take the
    square of their number; one that nobody forged is passed over then, too."""
    members = (b"\x02\x00\x00\x00" + bytes(4) + b"\x07\x07") * 2000 + b"\x02"
    body = members
    for _ in range(
        count
    ):  # a group's first member reaches over the groups in it, to the members that all of them share
        first = (2 + len(body) - len(members)).to_bytes(4, "little") + bytes(4) + b"\x07\x00"
        record = b"\x06\x00\x00\x00" + first + body
        body = len(record).to_bytes(4, "little") + crc32c(record).to_bytes(4, "little") + record
    small = [("publish", KNOWN, n, b"", b"whole", False) for n in (2, 3)]
    written = write([[("publish", KNOWN, 1, b"", body, False), ("group", small[:1]), small[1]]])
    written.data[written.records[0][0] + 4] ^= 1
    assert run_replay(written.data).agrees_with(expect(written, lost))


@given(blocks, st.data())
def test_a_torn_end_costs_what_was_not_whole(plan: list[list[tuple]], data: st.DataObject) -> None:
    written = write(plan)
    length = data.draw(st.integers(FIRST_OFFSET, len(written.data)), label="length")
    zeros = data.draw(st.integers(0, 200), label="zeros")
    lost = {n for n, (offset, size, _) in enumerate(written.records) if offset + size > length}
    replayed = run_replay(bytes(written.data[:length]) + bytes(zeros))
    expected = expect(written, lost)
    # Zeros may be the very bytes that were torn off.
    whole = {n for n in lost if not any(written.data[length : written.records[n][0] + written.records[n][1]])}
    assert replayed.agrees_with(expected) or replayed.agrees_with(expect(written, lost - whole))
    assert all(offset + size <= length for offset, size in replayed.damaged), "zeros at the end are no damage"


def test_zeros_are_an_empty_file() -> None:
    replayed = run_replay(bytes(5000))
    assert (replayed.lsn, replayed.records, replayed.damaged) == (0, 0, [])


@given(st.binary(max_size=400))
def test_noise_is_no_journal(noise: bytes) -> None:
    replayed = run_replay(bytes(FIRST_OFFSET) + noise)
    assert replayed.agrees_with(State())


@given(st.lists(st.tuples(heads, bodies, st.booleans()), min_size=1, max_size=8), st.integers(0, 3))
def test_a_published_entry_is_read_back_from_its_place(messages: list[tuple[bytes, bytes, bool]], skipped: int) -> None:
    entries = [make(10 + n, head, body, stored) for n, (head, body, stored) in enumerate(messages)]
    overlay, buffer = Overlay(), RecordBuffer()
    buffer.reset(FILE, FIRST_OFFSET)
    buffer.append_publishes(KNOWN, entries, overlay, LIVE)
    buffer.finish(1)
    data = bytes(memoryview(buffer))
    rows = overlay.rows_between(10 + skipped, 100, 100)
    read: list[Entry] = []
    damaged: list[tuple[int, int, int]] = []
    read_publishes(rows, data, FIRST_OFFSET, read, damaged)
    assert [content(entry) for entry in read] == [content(entry) for entry in entries[skipped:]]
    assert not damaged
    for seq, _, offset, size, _ in unpack_rows(rows):
        broken = bytearray(data)
        broken[offset - FIRST_OFFSET + size - 1] ^= 1
        read_publishes(overlay.rows_between(seq, seq + 1, 1), bytes(broken), FIRST_OFFSET, [], damaged)
        assert damaged.pop() == (seq, offset, size)


def test_a_row_that_points_outside_of_the_bytes_is_damage() -> None:
    overlay = Overlay()
    overlay.add(1, FILE, 10, 50)
    overlay.add(2, FILE, 100, 50)
    damaged: list[tuple[int, int, int]] = []
    read_publishes(overlay.rows_upto(FILE), bytes(70), 20, [], damaged)
    assert damaged == [(1, 10, 50), (2, 100, 50)]


@pytest.mark.parametrize("producer", [None, b"app"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_carried_record_is_the_message_for_one_queue(stored: bool, producer: bytes | None) -> None:
    buffer, overlay, other = RecordBuffer(), Overlay(), Overlay()
    buffer.reset(FILE - 1, FIRST_OFFSET)
    entry = make(5, b"head", b"body", stored)
    buffer.append_fanout(entry, [(KNOWN, 5, overlay), (OTHER, 8, other)], LIVE, 77, producer)
    (row,) = unpack_rows(overlay.rows_upto(FILE))
    record = buffer.peek(row[2], row[3])
    rows = overlay.rows_upto(FILE)
    buffer.finish(1)
    buffer.reset(FILE, FIRST_OFFSET)
    damaged: list[tuple[int, int, int]] = []
    assert buffer.carry(KNOWN, rows, b"..." + record[:-1], row[2] - 3, overlay, damaged) == []
    assert buffer.carry(KNOWN, rows, b"..." + record[:-1] + b"!", row[2] - 3, overlay, damaged) == []
    assert damaged == [(5, row[2], row[3])] * 2
    assert buffer.carry(KNOWN, rows, b"..." + record, row[2] - 3, overlay, damaged) == [5]
    assert buffer.carry(KNOWN, rows, b"..." + record, row[2] - 3, overlay, damaged) == [], "it is somewhere else now"
    buffer.finish(2)
    assert overlay.rows_upto(FILE - 1) == b"", "the row points to the new place"
    replayed = run_replay(bytes(FIRST_OFFSET) + bytes(memoryview(buffer)))
    assert unpack_rows(replayed.overlays[KNOWN].rows_upto(FILE)) == unpack_rows(overlay.rows_upto(FILE))
    assert len(replayed.overlays[OTHER]) == 0
    assert replayed.others == []
    read: list[Entry] = []
    read_publishes(overlay.rows_upto(FILE), bytes(memoryview(buffer)), FIRST_OFFSET, read, [])
    assert content(read[0]) == content(entry)


def test_an_acked_message_stays_dead_when_a_carried_copy_of_it_follows() -> None:
    """A checkpoint carried it, the ack came, and the crash left both files."""
    overlay = Overlay()
    buffer = RecordBuffer()
    buffer.reset(FILE, FIRST_OFFSET)
    buffer.append_publishes(KNOWN, [make(1, b"", b"x")], overlay, LIVE)
    (row,) = unpack_rows(overlay.rows_upto(FILE))
    record = buffer.peek(row[2], row[3])
    buffer.append_ranges(ACK, KNOWN, [1, 1])
    assert buffer.carry(KNOWN, overlay.rows_upto(FILE), record, row[2], overlay, []) == [1]
    buffer.finish(1)
    assert len(run_replay(bytes(FIRST_OFFSET) + bytes(memoryview(buffer))).overlays[KNOWN]) == 0


def test_records_inside_of_a_group_are_not_counted_and_a_group_is_not_opened_twice() -> None:
    buffer = RecordBuffer()
    buffer.reset(FILE, FIRST_OFFSET)
    buffer.begin_group()
    with pytest.raises(RuntimeError, match="group is open"):
        buffer.begin_group()
    buffer.append_reserve(1, 10)
    buffer.append_reserve(2, 10)
    buffer.end_group()
    assert buffer.count == 1


def test_the_buffer_refuses_bytes_that_it_does_not_hold() -> None:
    buffer = RecordBuffer()
    buffer.reset(FILE, 1000)
    buffer.append_reserve(1, 10)
    for offset, size in ((999, 1), (1000, len(buffer) + 1)):
        with pytest.raises(ValueError, match="outside"):
            buffer.peek(offset, size)


# ---- segments ----

SEGMENT_SIZE = 16
BASE = 5 * SEGMENT_SIZE  # first seq_id of the segment
slot_sets = st.sets(st.integers(0, SEGMENT_SIZE - 1), min_size=1)


def journal_of(entries: list[Entry]) -> tuple[bytes, bytes]:
    """(rows, journal bytes from FIRST_OFFSET on) of published entries."""
    overlay, buffer = Overlay(), RecordBuffer()
    buffer.reset(FILE, FIRST_OFFSET)
    buffer.append_publishes(KNOWN, entries, overlay, LIVE)
    buffer.finish(1)
    return overlay.rows_upto(FILE), bytes(memoryview(buffer))


def write_runs(runs: list[tuple[int, bytes]]) -> bytes:
    """The slots of a segment, with zeros where nothing was written."""
    image = bytearray(SEGMENT_SIZE * SLOT_BYTES)
    for slot, data in runs:
        image[slot * SLOT_BYTES : slot * SLOT_BYTES + len(data)] = data
    return bytes(image)


def full_bitmap() -> bytearray:
    return bytearray(b"\xff" * (SEGMENT_SIZE // 8))


def scan(slots: bytes, boot: int = BOOT) -> tuple[bytearray, tuple, list, list]:
    live = bytearray(SEGMENT_SIZE // 8)
    refs: list[tuple[int, bytes]] = []
    damaged: list[int] = []
    totals = scan_slots(slots, BASE, KNOWN, boot, live, refs, damaged)
    return live, totals, refs, damaged


def read_all(slots: bytes, live: bytearray, boot: int = BOOT) -> tuple[list[Entry], list[int], list[int]]:
    entries: list[Entry] = []
    damaged: list[int] = []
    stale: list[int] = []
    read_slots(slots, BASE, 0, KNOWN, boot, live, SEGMENT_SIZE, entries, damaged, stale)
    return entries, damaged, stale


@given(slot_sets, st.data())
def test_journal_records_become_slots_and_bodies(slots: set[int], data: st.DataObject) -> None:
    qs_offset = data.draw(st.integers(64, 500))
    entries = [
        make(BASE + slot, data.draw(heads), data.draw(bodies), data.draw(st.booleans())) for slot in sorted(slots)
    ]
    rows, journal = journal_of(entries)
    damaged: list[tuple[int, int, int]] = []
    assert measure_rows(rows, journal, FIRST_OFFSET) >= 0
    made, runs = convert_rows(rows, journal, FIRST_OFFSET, KNOWN, SEGMENT_SIZE, qs_offset, damaged)
    assert not damaged
    assert len(made) == measure_rows(rows, journal, FIRST_OFFSET)
    image = write_runs(runs)
    live, (kept, total, written, low, high), refs, bad = scan(image)
    assert not bad
    assert kept == written == len(entries)
    assert total == sum(len(entry.body) for entry in entries) == live_bytes(image, live)
    assert (low, high) == (1000 + entries[0].seq, 1000 + entries[-1].seq)
    assert refs == [(entry.seq - BASE, entry.msg_id) for entry in entries if entry.flags & IN_STORE]
    read, bad, stale = read_all(image, live)
    assert (bad, stale) == ([], [])
    embedded = [entry for entry in read if not entry.flags & IN_STORE]
    lost: list[Entry] = []
    fill_bodies(embedded, bytes(qs_offset - 40) + made, 40, KNOWN, lost)
    assert not lost
    assert [content(entry) for entry in read] == [content(entry) for entry in entries]
    assert all(entry.flags & SLOTTED for entry in read)


@given(slot_sets, st.data())
def test_a_damaged_journal_record_is_left_out_of_the_segment(slots: set[int], data: st.DataObject) -> None:
    entries = [make(BASE + slot, b"h", b"body %d" % slot) for slot in sorted(slots)]
    rows, journal = journal_of(entries)
    victim = data.draw(st.sampled_from(unpack_rows(rows)))
    broken = bytearray(journal)
    broken[victim[2] - FIRST_OFFSET + data.draw(st.integers(0, victim[3] - 1))] ^= 0x10
    damaged: list[tuple[int, int, int]] = []
    made, runs = convert_rows(rows, bytes(broken), FIRST_OFFSET, KNOWN, SEGMENT_SIZE, 64, damaged)
    assert damaged == [(victim[0], victim[2], victim[3])]
    assert len(made) <= measure_rows(rows, bytes(broken), FIRST_OFFSET)
    live, *_ = scan(write_runs(runs))
    assert bit_runs(live, 0, SEGMENT_SIZE) == pairs_of(slots - {victim[0] - BASE})
    read, _, _ = read_all(write_runs(runs), live)
    lost: list[Entry] = []
    fill_bodies(read, made, 64, KNOWN, lost)
    assert not lost
    assert [entry.body for entry in read] == [entry.body for entry in entries if entry.seq != victim[0]]


def pairs_of(values: set[int]) -> list[int]:
    return RangeSet([number for value in values for number in (value, 1)]).pairs()


@given(slot_sets, st.data())
def test_transient_messages_are_paged_out_and_read_back(slots: set[int], data: st.DataObject) -> None:
    entries = []
    for slot in sorted(slots):
        entry = Entry(BASE + slot, data.draw(heads), data.draw(bodies), 0, 1000 + slot, 0)
        entries.append(entry)
    before = [(entry.head, entry.body) for entry in entries]
    made = encode_bodies(entries, KNOWN, 64)
    assert [entry.offset for entry in entries] == offsets_of(entries)
    image = write_runs(encode_slots(entries, KNOWN, SEGMENT_SIZE, BOOT))
    assert all(entry.flags == IN_QS | SLOTTED for entry in entries)
    read, damaged, stale = read_all(image, full_and_only(slots))
    assert (damaged, stale) == ([], [])
    fill_bodies(read, made, 64, KNOWN, lost := [])
    assert not lost
    assert [(entry.head, entry.body) for entry in read] == before
    # Of another boot they are nothing.
    read, damaged, stale = read_all(image, full_and_only(slots), boot=BOOT + 1)
    assert (read, damaged, stale) == ([], [], sorted(slots))
    live, (kept, *_), _, damaged = scan(image, boot=BOOT + 1)
    assert (kept, damaged) == (0, [])
    assert not any(live)


def offsets_of(entries: list[Entry]) -> list[int]:
    offsets, at = [], 64
    for entry in entries:
        offsets.append(at)
        at += BODY_PREFIX_BYTES + entry.size
    return offsets


def full_and_only(slots: set[int]) -> bytearray:
    live = bytearray(SEGMENT_SIZE // 8)
    for slot in slots:
        set_bits(live, slot, 1)
    return live


@given(st.data())
def test_a_flipped_bit_of_a_slot_costs_that_slot(data: st.DataObject) -> None:
    entries = [make(BASE + slot, b"", b"x") for slot in range(SEGMENT_SIZE)]
    rows, journal = journal_of(entries)
    _, runs = convert_rows(rows, journal, FIRST_OFFSET, KNOWN, SEGMENT_SIZE, 64, [])
    image = bytearray(write_runs(runs))
    position = data.draw(st.integers(0, len(image) - 1))
    image[position] ^= 1 << data.draw(st.integers(0, 7))
    slot = position // SLOT_BYTES
    live, _, _, damaged = scan(bytes(image))
    assert damaged == [slot]
    assert not live[slot >> 3] & 1 << (slot & 7)
    read, damaged, _ = read_all(bytes(image), full_bitmap())
    assert damaged == [slot]
    assert [entry.seq for entry in read] == [BASE + n for n in range(SEGMENT_SIZE) if n != slot]


def test_a_slot_of_another_queue_or_another_place_is_damage() -> None:
    """A file that a wrong copy put there, or a write that went to the wrong block."""
    (entry,) = entries = [make(BASE + 3, b"", b"x")]
    rows, journal = journal_of(entries)
    bodies, runs = convert_rows(rows, journal, FIRST_OFFSET, OTHER, SEGMENT_SIZE, 64, [])
    assert scan(write_runs(runs))[3] == [3]
    _, runs = convert_rows(rows, journal, FIRST_OFFSET, KNOWN, SEGMENT_SIZE, 64, [])
    assert scan(write_runs([(4, runs[0][1])]))[3] == [4]
    entry.offset, entry.body = 64, None
    fill_bodies([entry], bodies, 64, KNOWN, lost := [])
    assert lost == [entry]


@given(st.data())
def test_a_damaged_body_costs_that_message(data: st.DataObject) -> None:
    entries = [Entry(BASE + n, b"head", b"body %d" % n, 0) for n in range(6)]
    made = bytearray(encode_bodies(entries, KNOWN, 64))
    position = data.draw(st.integers(0, len(made) - 1))
    made[position] ^= 1 << data.draw(st.integers(0, 7))
    for entry in entries:
        entry.head = entry.body = None
    victim = max((entry for entry in entries if entry.offset - 64 <= position), key=lambda entry: entry.seq)
    fill_bodies(entries, bytes(made), 64, KNOWN, lost := [])
    assert lost == [victim]
    assert victim.body is None
    assert all(entry.body == b"body %d" % (entry.seq - BASE) for entry in entries if entry is not victim)


@given(slot_sets, st.integers(1, SEGMENT_SIZE))
def test_reading_stops_at_the_limit_and_says_where(slots: set[int], limit: int) -> None:
    entries = [make(BASE + slot, b"", b"x") for slot in sorted(slots)]
    rows, journal = journal_of(entries)
    _, runs = convert_rows(rows, journal, FIRST_OFFSET, KNOWN, SEGMENT_SIZE, 64, [])
    read: list[Entry] = []
    following = read_slots(write_runs(runs), BASE, 0, KNOWN, BOOT, full_and_only(slots), limit, read, [], [])
    assert [entry.seq - BASE for entry in read] == sorted(slots)[:limit]
    assert following == (sorted(slots)[limit] if limit < len(slots) else SEGMENT_SIZE)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 63), st.integers(0, 20)), max_size=20))
def test_runs_of_bits_are_a_set_of_numbers(steps: list[tuple[bool, int, int]]) -> None:
    bits, model = bytearray(12), set()
    for setting, first, count in steps:
        span = set(range(first, first + count))
        if setting:
            assert set_bits(bits, first, count) == len(span - model)
            model |= span
        else:
            cleared: list[int] = []
            assert clear_bits(bits, first, count, cleared) == len(span & model)
            assert cleared == pairs_of(span & model)
            model -= span
        assert bit_runs(bits, 0, 96) == pairs_of(model)
        assert bit_runs(bits, 10, 40) == pairs_of({n for n in model if 10 <= n < 40})
