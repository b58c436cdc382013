"""The overlay against a dict: rows go from HIDDEN over LIVE and ACKED to DEAD, or to a segment, and are never mixed up."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from warren.kernel.overlay import ACKED, HIDDEN, LIVE, ROW_BYTES, Overlay, row_pairs, split_rows, unpack_rows

MOST = 60  # seq_ids in play

seqs = st.integers(0, MOST)
spans = st.lists(st.tuples(seqs, st.integers(1, 15)), min_size=1, max_size=4)


def as_set(pairs: list[int]) -> set[int]:
    return {n for first, count in zip(pairs[::2], pairs[1::2], strict=True) for n in range(first, first + count)}


def disjoint(spans: list[tuple[int, int]]) -> list[int]:
    """Flat pairs, rising and without overlap, as acks are."""
    taken = sorted({n for first, count in spans for n in range(first, first + count)})
    pairs: list[int] = []
    for value in taken:
        if pairs and pairs[-2] + pairs[-1] == value:
            pairs[-1] += 1
        else:
            pairs += (value, 1)
    return pairs


class OverlayMachine(RuleBasedStateMachine):
    """`rows` holds what is LIVE, ACKED or HIDDEN: seq -> [state, file, offset, size, flags]."""

    def __init__(self) -> None:
        super().__init__()
        self.overlay = Overlay()
        self.rows: dict[int, list[int]] = {}
        self.used: set[int] = set()  # a seq_id is published once
        self.file = 1
        self.place = 64
        self.taken: tuple[bytes, set[int]] | None = None  # rows that a checkpoint is moving
        self.dead: set[int] = set()

    @initialize(count=st.integers(0, 200))
    def many_dead_rows_at_the_front(self, count: int) -> None:
        """So that squeezing, which needs more than 64 rows, is met."""
        for seq in range(1000, 1000 + count):
            self._put(seq, LIVE, 0)
        for seq in range(1000, 1000 + count, 2):
            self.overlay.ack([seq, 1])
            self.overlay.ack_synced([seq, 1])
            del self.rows[seq]

    def _put(self, seq: int, state: int, flags: int) -> None:
        size = 50 + seq % 7
        self.overlay.add(seq, self.file, self.place, size, flags, state)
        self.rows[seq] = [state, self.file, self.place, size, flags]
        self.used.add(seq)
        self.place += size

    @rule(seq=seqs, hidden=st.booleans(), stored=st.booleans())
    def publish(self, seq: int, hidden: bool, stored: bool) -> None:
        if seq not in self.used:
            self._put(seq, HIDDEN if hidden else LIVE, 2 if stored else 0)

    @rule(seq=seqs)
    def carry(self, seq: int) -> None:
        """A live row gets a new place and keeps everything else."""
        if seq in self.rows and self.rows[seq][0] == LIVE:
            self.overlay.add(seq, self.file, self.place, 77, 0, LIVE)
            self.rows[seq][1:4] = [self.file, self.place, 77]
            self.place += 77

    @rule()
    def seal_the_file(self) -> None:
        self.file += 1
        self.place = 64

    def _change(self, pairs: list[int], old: int, new: int | None) -> tuple[set[int], set[int]]:
        asked = as_set(pairs)
        found = {seq for seq in asked if seq in self.rows and self.rows[seq][0] == old}
        for seq in found:
            if new is None:
                del self.rows[seq]
                self.dead.add(seq)
            else:
                self.rows[seq][0] = new
        return found, asked - found

    @rule(spans=spans)
    def ack(self, spans: list[tuple[int, int]]) -> None:
        pairs = disjoint(spans)
        found, missing = self.overlay.ack(pairs)
        assert (as_set(found), as_set(missing)) == self._change(pairs, LIVE, ACKED)
        assert sum(found[1::2]) + sum(missing[1::2]) == sum(pairs[1::2]), "nothing twice"

    @rule(spans=spans)
    def ack_is_synced(self, spans: list[tuple[int, int]]) -> None:
        pairs = disjoint(spans)
        missing = self.overlay.ack_synced(pairs)
        assert as_set(missing) == self._change(pairs, ACKED, None)[1]

    @rule(spans=spans)
    def reveal(self, spans: list[tuple[int, int]]) -> None:
        pairs = disjoint(spans)
        self.overlay.reveal(pairs)
        self._change(pairs, HIDDEN, LIVE)

    @rule(seq=seqs, count=st.integers(1, 10))
    def forget(self, seq: int, count: int) -> None:
        gone = [n for n in range(seq, seq + count) if n in self.rows]
        assert self.overlay.forget(seq, count) == len(gone)
        for n in gone:
            del self.rows[n]
            self.dead.add(n)

    @precondition(lambda self: self.taken is None)
    @rule(files=st.integers(0, 3))
    def checkpoint_begins(self, files: int) -> None:
        upto = self.file - files
        expected = {seq: row for seq, row in self.rows.items() if row[1] <= upto}
        rows = self.overlay.rows_upto(max(0, upto))
        assert unpack_rows(rows) == [(seq, *row[1:]) for seq, row in sorted(expected.items())]
        assert self.overlay.bytes_upto(max(0, upto)) == sum(row[3] for row in expected.values())
        assert as_set(row_pairs(rows)) == set(expected)
        self.taken = rows, set(expected)
        self.dead.clear()

    @precondition(lambda self: self.taken is not None)
    @rule()
    def checkpoint_ends(self) -> None:
        assert self.taken is not None
        rows, taken = self.taken
        acked, dead = self.overlay.moved(rows)
        assert as_set(dead) == {seq for seq in taken if seq not in self.rows}
        assert as_set(acked) == {seq for seq in taken if seq in self.rows and self.rows[seq][0] == ACKED}
        for seq in taken:
            self.rows.pop(seq, None)
        self.taken = None

    @rule()
    def squeeze(self) -> None:
        self.overlay.squeeze()

    @rule(first=seqs, count=st.integers(0, 30), limit=st.integers(1, 10))
    def read(self, first: int, count: int, limit: int) -> None:
        live = sorted(seq for seq in self._live() if first <= seq < first + count)
        rows = unpack_rows(self.overlay.rows_between(first, first + count, limit))
        assert rows == [(seq, *self.rows[seq][1:]) for seq in live[:limit]]
        assert self.overlay.count_between(first, first + count) == len(live)

    @rule(size=st.sampled_from([4, 8, 64]), most=st.integers(60, 400))
    def split(self, size: int, most: int) -> None:
        rows = self.overlay.rows_upto(self.file)
        parts = split_rows(rows, size, most)
        assert b"".join(part for *_, part in parts) == rows
        for segment, file, start, stop, part in parts:
            members = unpack_rows(part)
            assert {(row[0] // size, row[1]) for row in members} == {(segment, file)}
            assert start == members[0][2]
            assert stop == members[-1][2] + members[-1][3]
            assert [row[2] for row in members] == sorted(row[2] for row in members)
            assert len(members) == 1 or stop - start <= most

    def _live(self) -> set[int]:
        return {seq for seq, row in self.rows.items() if row[0] == LIVE}

    @invariant()
    def knows_what_the_dict_knows(self) -> None:
        overlay, rows = self.overlay, self.rows
        assert len(overlay) == len(rows)
        assert overlay.first_seq() == (min(rows) if rows else None)
        assert overlay.last_seq() >= max(rows, default=-1)
        for seq in range(MOST + 20):
            assert overlay.locate(seq) == (tuple(rows[seq][1:]) if seq in rows else None)
        live = self._live()
        in_journal = [rows[seq] for seq in live if not rows[seq][4] & 2]
        assert overlay.live_totals() == (len(live), sum(row[3] for row in in_journal))
        stored = sorted(seq for seq in live if rows[seq][4] & 2)
        assert [row[0] for row in unpack_rows(overlay.unmeasured_rows())] == stored
        assert len(overlay.unmeasured_rows()) == len(stored) * ROW_BYTES


TestOverlay = OverlayMachine.TestCase


def test_a_row_that_died_during_the_checkpoint_is_named_dead_even_when_it_was_squeezed_out() -> None:
    overlay = Overlay()
    for seq in range(200):
        overlay.add(seq, 1, 64 + seq, 1)
    rows = overlay.rows_upto(1)
    overlay.ack([0, 150])
    assert overlay.ack_synced([0, 150]) == []
    overlay.squeeze()
    assert overlay.moved(rows) == ([], [0, 150])
    assert len(overlay) == 0


def test_an_ack_under_way_passes_to_the_segment() -> None:
    overlay = Overlay()
    overlay.add(1, 1, 64, 10)
    overlay.add(2, 1, 74, 10)
    rows = overlay.rows_upto(1)
    assert overlay.ack([1, 2]) == ([1, 2], [])
    assert overlay.moved(rows) == ([1, 2], [])
    assert overlay.ack_synced([1, 2]) == [1, 2]


def test_a_long_life_needs_no_more_room_than_what_is_alive() -> None:
    """Publish and ack a million: the table is squeezed as it goes."""
    overlay = Overlay()
    for first in range(0, 1_000_000, 1000):
        for seq in range(first, first + 1000):
            overlay.add(seq, 1, 64, 10)
        overlay.ack([first, 999])
        overlay.ack_synced([first, 999])
    assert len(overlay) == 1000
    assert overlay.useless <= len(overlay)
