"""A RangeSet is a set of numbers: whatever is done to it, a Python set beside it says what it must hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from warren.kernel.ranges import RangeSet

HIGHEST = 2**64 - 1
# Few numbers, so that ranges meet, overlap and split each other all the time.
numbers = st.integers(0, 40)
counts = st.integers(0, 12)
runs = st.lists(st.tuples(numbers, counts), max_size=8)


def flat(pairs: list[tuple[int, int]]) -> list[int]:
    return [number for pair in pairs for number in pair]


def as_set(pairs: list[int]) -> set[int]:
    return {n for first, count in zip(pairs[::2], pairs[1::2], strict=True) for n in range(first, first + count)}


def as_pairs(values: set[int]) -> list[int]:
    """The one flat list of disjoint, separate, rising ranges that holds `values`."""
    pairs: list[int] = []
    for value in sorted(values):
        if pairs and pairs[-2] + pairs[-1] == value:
            pairs[-1] += 1
        else:
            pairs += (value, 1)
    return pairs


class RangeSetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranges = RangeSet()
        self.model: set[int] = set()

    @rule(first=numbers, count=counts)
    def add(self, first: int, count: int) -> None:
        added = set(range(first, first + count))
        assert self.ranges.add(first, count) == len(added - self.model)
        self.model |= added

    @rule(first=numbers, count=counts)
    def remove(self, first: int, count: int) -> None:
        removed = set(range(first, first + count))
        assert self.ranges.remove(first, count) == len(removed & self.model)
        self.model -= removed

    @rule(pairs=runs)
    def add_pairs(self, pairs: list[tuple[int, int]]) -> None:
        added = as_set(flat(pairs))
        assert self.ranges.add_pairs(flat(pairs)) == len(added - self.model)
        self.model |= added

    @rule(pairs=runs)
    def remove_pairs(self, pairs: list[tuple[int, int]]) -> None:
        removed = as_set(flat(pairs))
        assert self.ranges.remove_pairs(flat(pairs)) == len(removed & self.model)
        self.model -= removed

    @rule()
    def clear(self) -> None:
        self.ranges.clear()
        self.model.clear()

    @rule(first=numbers, count=counts)
    def look_at_a_part(self, first: int, count: int) -> None:
        part = self.model & set(range(first, first + count))
        assert self.ranges.pairs(first, first + count) == as_pairs(part)
        assert self.ranges.count_in(first, first + count) == len(part)
        assert self.ranges.gaps(first, first + count) == as_pairs(set(range(first, first + count)) - part)

    @rule()
    def copy(self) -> None:
        copied = self.ranges.copy()
        assert copied == self.ranges
        copied.add(1000, 1)
        assert copied != self.ranges
        assert 1000 not in self.ranges

    @invariant()
    def holds_what_the_set_holds(self) -> None:
        ranges, model = self.ranges, self.model
        assert list(ranges) == sorted(model)
        assert len(ranges) == len(model)
        assert bool(ranges) == bool(model)
        assert ranges.pairs() == as_pairs(model)
        assert ranges.range_count() == len(as_pairs(model)) // 2
        assert [n for n in range(60) if n in ranges] == sorted(model)
        if model:
            assert (ranges.first(), ranges.stop()) == (min(model), max(model) + 1)


TestRangeSet = RangeSetMachine.TestCase


@given(runs)
def test_equal_sets_have_equal_ranges_however_they_were_built(pairs: list[tuple[int, int]]) -> None:
    built = RangeSet(flat(pairs))
    assert built == RangeSet(as_pairs(as_set(flat(pairs))))
    assert built == RangeSet(flat(pairs[::-1]))
    assert eval(repr(built)) == built


def test_an_empty_set_has_no_first_and_no_stop() -> None:
    for ask in (RangeSet().first, RangeSet().stop):
        with pytest.raises(ValueError, match="empty RangeSet"):
            ask()


def test_it_is_no_other_type() -> None:
    assert RangeSet([1, 1]) != {1}


def test_a_million_neighbours_are_one_range() -> None:
    ranges = RangeSet()
    for value in range(1_000_000):
        ranges.add(value, 1)
    assert ranges.range_count() == 1
    assert ranges.pairs() == [0, 1_000_000]


def test_numbers_up_to_the_end_of_64_bits() -> None:
    ranges = RangeSet([HIGHEST - 5, 5])
    assert HIGHEST - 1 in ranges
    assert HIGHEST - 6 not in ranges
    assert ranges.pairs() == [HIGHEST - 5, 5]
    assert ranges.pairs(HIGHEST - 2) == [HIGHEST - 2, 2]
    assert ranges.remove(HIGHEST - 3, 1) == 1
    assert ranges.pairs() == [HIGHEST - 5, 2, HIGHEST - 2, 2]


@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_number_that_does_not_fit_is_refused(value: int) -> None:
    ranges = RangeSet([1, 3])
    with pytest.raises(OverflowError):
        ranges.add(value, 1)
    assert ranges.pairs() == [1, 3]
