"""The loops over entries do what the same loops in Python do."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from warren.kernel.entry import (
    PERSISTENT,
    Delivery,
    Entry,
    body_total,
    deliveries,
    drop_bodies,
    entry_ranges,
    free_ones,
    persistent_ones,
    persistent_total,
    pop_left,
    ram_total,
    record_pending,
    renumber,
    run_within,
    seq_ranges,
    set_level,
    settle,
    sizes,
    some_expire,
    split_levels,
    summarize,
    take_pending,
    total_size,
)
from warren.kernel.ranges import RangeSet


@st.composite
def entry_lists(draw: st.DrawFn) -> list[Entry]:
    """Entries with rising seq_ids, some without a body, of several levels."""
    entries = []
    for seq in sorted(draw(st.sets(st.integers(0, 40), max_size=12))):
        body = draw(st.none() | st.binary(max_size=5))
        head = None if body is None else b"h"
        entry = Entry(seq, head, body, draw(st.sampled_from([0, PERSISTENT])), size=0 if body is not None else 9)
        entry.level = draw(st.integers(0, 4))
        entries.append(entry)
    return entries


@given(entry_lists())
def test_sums(entries: list[Entry]) -> None:
    held = [e for e in entries if e.body is not None]
    persistent = [e for e in entries if e.flags & PERSISTENT]
    assert total_size(entries) == sum(e.size for e in entries)
    assert ram_total(entries) == (len(held), sum(e.size for e in held))
    assert persistent_total(entries) == (len(persistent), sum(e.body_size for e in persistent))
    assert body_total(entries) == sum(len(e.body) for e in held) == sum(e.body_size for e in entries)
    assert sizes(entries) == (total_size(entries), body_total(entries))
    largest = max((e.size for e in entries), default=0)
    assert summarize(entries) == (*sizes(entries), len(persistent), largest)
    before = sizes(entries)
    assert drop_bodies(entries) == (len(held), sum(e.size for e in held))
    assert all(e.body is None and e.head is None for e in entries)
    assert sizes(entries) == summarize(entries)[:2] == before, "sizes stay"


@given(entry_lists())
def test_ranges(entries: list[Entry]) -> None:
    seqs = [e.seq for e in entries]
    expected = RangeSet([n for seq in seqs for n in (seq, 1)]).pairs()
    assert entry_ranges(entries) == seq_ranges(seqs) == expected
    assert RangeSet(entry_ranges(entries[::-1])).pairs() == expected, "in any order"


@given(entry_lists(), st.integers(0, 4))
def test_levels(entries: list[Entry], highest: int) -> None:
    groups = split_levels(entries, highest)
    assert len({level for level, _ in groups}) == len(groups)
    assert [level for level, _ in groups] == list(dict.fromkeys(min(e.level, highest) for e in entries))
    for level, group in groups:
        assert group == [e for e in entries if min(e.level, highest) == level]
    set_level(entries, 3)
    assert {e.level for e in entries} <= {3}


@given(entry_lists(), st.lists(st.integers(0, 45), unique=True))
def test_pending(entries: list[Entry], seqs: list[int]) -> None:
    pending: dict[int, Entry] = {}
    record_pending(pending, entries)
    by_seq = {e.seq: e for e in entries}
    assert pending == by_seq
    found, missing = take_pending(pending, seqs)
    assert found == [by_seq[seq] for seq in seqs if seq in by_seq]
    assert missing == [seq for seq in seqs if seq not in by_seq]
    assert pending == {seq: e for seq, e in by_seq.items() if seq not in seqs}


@given(
    entry_lists(),
    st.integers(0, 40),
    st.sets(st.integers(0, 40)),
    st.dictionaries(st.integers(0, 40), st.integers(1, 9)),
)
def test_deliveries(entries: list[Entry], below: int, returned: set[int], counts: dict[int, int]) -> None:
    queue = object()
    ranges = RangeSet([n for seq in returned for n in (seq, 1)])
    made = deliveries(Delivery, entries, queue, below, ranges, counts)
    assert [d.entry for d in made] == entries
    assert [d.redelivered for d in made] == [e.seq < below or e.seq in returned for e in entries]
    assert [d.delivery_count for d in made] == [counts.get(e.seq, 0) for e in entries]
    assert settle(made, queue) == ([e.seq for e in entries], None)
    if made:
        assert settle(made, queue)[1] is made[0], "once"


@given(entry_lists(), st.integers(1, 12), st.integers(0, 40))
def test_a_run_from_the_head_within_a_count_and_bytes(entries: list[Entry], most: int, room: int) -> None:
    fits = [n for n in range(1, len(entries) + 1) if n <= most and body_total(entries[:n]) <= room]
    count = run_within(deque(entries), most, room)
    assert count == max([min(1, len(entries)), *fits])
    source = deque(entries)
    assert pop_left(source, count) == entries[:count]
    assert list(source) == entries[count:]


@given(entry_lists(), st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)), st.integers(0, 1000))
def test_choosing_and_numbering(entries: list[Entry], pending: set[int], lent: set[int], first: int) -> None:
    held = dict.fromkeys(pending, Entry(0, b"", b""))
    chosen = free_ones(entries, held, RangeSet([n for seq in sorted(lent) for n in (seq, 1)]))
    assert chosen == [entry for entry in entries if entry.seq not in pending | lent]
    assert persistent_ones(entries) == [entry for entry in entries if entry.flags & PERSISTENT]
    assert not some_expire(entries)
    if entries:
        entries[-1].expiry = 1
        assert some_expire(entries)
    levels = [entry.level for entry in entries]
    renumber(entries, first)
    assert [entry.seq for entry in entries] == list(range(first, first + len(entries)))
    assert [entry.level for entry in entries] == levels


def test_a_message_of_another_queue_settles_nothing() -> None:
    ours, theirs = object(), object()
    entries = [Entry(1, b"", b""), Entry(2, b"", b"")]
    mine, foreign = (
        deliveries(Delivery, [e], q, 0, RangeSet(), {})[0] for e, q in zip(entries, (ours, theirs), strict=True)
    )
    assert settle([mine, foreign], ours) == (None, foreign)
    assert not mine.settled
    assert settle([mine, "no message"], ours)[1] == "no message"
    assert not mine.settled
