"""Unacked is an ordered dict of delivery tags: whatever is done to it, a plain one beside it says what it must hold."""

from __future__ import annotations

import doctest
import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from warren.kernel.entry import Entry
from warren.kernel.unacked import Unacked

U32 = 2**32 - 1
U64 = 2**64 - 1


def entries(*seqs: int) -> list[Entry]:
    return [Entry(seq, b"", b"") for seq in seqs]


def grouped(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, list[int]]]:
    """(queue, consumer, seq) with neighbours of one queue and consumer together."""
    return [
        (queue, consumer, [seq for _, _, seq in members])
        for (queue, consumer), members in itertools.groupby(rows, key=lambda row: row[:2])
    ]


class Model:
    """What Unacked does, in a dict that keeps the order of the tags."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, int, int]] = {}
        self.next_tag = 1

    def add(self, queue: int, consumer: int, seqs: list[int]) -> int:
        first = self.next_tag
        for seq in seqs:
            self.rows[self.next_tag] = (queue, consumer, seq)
            self.next_tag += 1
        return first

    def take(self, tag: int, multiple: bool) -> list[tuple[int, int, int]] | None:
        if tag == 0 and multiple:
            tags = list(self.rows)
        elif tag not in self.rows:
            return None
        else:
            tags = [other for other in self.rows if other <= tag] if multiple else [tag]
        return [self.rows.pop(tag) for tag in tags]


small = st.integers(0, 2)
seqs = st.lists(st.integers(0, 100) | st.just(U64), max_size=100)


class UnackedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real = Unacked()
        self.model = Model()

    def some_tag(self, place: float) -> int:
        """Mostly one that is outstanding, sometimes one that never was or is no more."""
        tags = list(self.model.rows)
        at = int(place * (len(tags) + 2)) - 1
        return tags[at] if 0 <= at < len(tags) else int(place * (self.model.next_tag + 2))

    @rule(queue=small | st.just(U32), consumer=small | st.just(U32), seqs=seqs)
    def add(self, queue: int, consumer: int, seqs: list[int]) -> None:
        assert self.real.add(queue, consumer, entries(*seqs)) == self.model.add(queue, consumer, seqs)

    @rule(count=st.integers(0, 5) | st.just(2**40))
    def skip(self, count: int) -> None:
        assert self.real.skip(count) == self.model.next_tag
        self.model.next_tag += count

    @rule(place=st.floats(0, 1), multiple=st.booleans())
    def ack(self, place: float, multiple: bool) -> None:
        tag = self.some_tag(place)
        rows = self.model.take(tag, multiple)
        assert self.real.ack(tag, multiple) == (None if rows is None else grouped(rows))

    @rule(acks=st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=20))
    def ack_all(self, acks: list[tuple[float, bool]]) -> None:
        coded, rows, unknown = [], [], None
        for place, multiple in acks:
            tag = self.some_tag(place)
            coded.append(2 * tag + multiple)
            taken = self.model.take(tag, multiple)
            if taken is None:
                unknown = tag
                break
            rows += taken
        if unknown is not None:
            coded.append(2 * U64)  # never looked at
        assert self.real.ack_all(coded) == (grouped(rows), unknown)

    @rule(share=st.floats(0, 1), seed=st.integers(0, 99))
    def ack_many_here_and_there(self, share: float, seed: int) -> None:
        tags = [tag for tag in self.model.rows if random.Random(f"{seed} {tag}").random() < share]
        for tag in tags:
            assert self.real.ack(tag, False) == grouped(self.model.take(tag, False) or [])

    @rule()
    def drain(self) -> None:
        assert self.real.drain() == grouped(self.model.take(0, True) or [])

    @invariant()
    def they_hold_the_same(self) -> None:
        assert self.real.tags() == list(self.model.rows)
        assert len(self.real) == len(self.model.rows)
        assert self.real.next_tag == self.model.next_tag


TestUnackedMachine = UnackedMachine.TestCase
TestUnackedMachine.settings = settings(stateful_step_count=40)


def test_tags_begin_at_1_and_follow_each_other():
    unacked = Unacked()
    assert unacked.next_tag == 1
    assert unacked.add(1, 1, entries(10, 11)) == 1
    assert unacked.skip(3) == 3
    assert unacked.add(1, 1, entries(12)) == 6
    assert unacked.next_tag == 7
    assert unacked.tags() == [1, 2, 6]


def test_neighbours_of_one_queue_and_consumer_are_one_group():
    unacked = Unacked()
    unacked.add(1, 1, entries(10, 11))
    unacked.add(1, 1, entries(12))
    unacked.add(1, 2, entries(13))
    unacked.add(2, 2, entries(14))
    unacked.add(1, 1, entries(15, 16))
    assert unacked.ack(6, True) == [(1, 1, [10, 11, 12]), (1, 2, [13]), (2, 2, [14]), (1, 1, [15])]
    assert unacked.tags() == [7]


@pytest.mark.parametrize("multiple", [False, True])
@pytest.mark.parametrize("tag", [2, 4, 5, 6, 99, U64])
def test_a_tag_that_is_not_outstanding_settles_nothing(tag, multiple):
    unacked = Unacked()
    unacked.add(1, 1, entries(10, 11, 12))
    unacked.skip(2)
    assert unacked.ack(2, False) == [(1, 1, [11])]
    assert unacked.ack(tag, multiple) is None
    assert unacked.tags() == [1, 3]


def test_tag_0_means_all_with_multiple_and_none_without():
    unacked = Unacked()
    assert unacked.ack(0, True) == []
    unacked.add(1, 1, entries(10, 11))
    assert unacked.ack(0, False) is None
    assert unacked.ack(0, True) == [(1, 1, [10, 11])]
    assert unacked.ack(0, True) == []


def test_many_acks_at_once_stop_at_the_first_unknown_tag():
    unacked = Unacked()
    unacked.add(1, 1, entries(10, 11, 12, 13))
    assert unacked.ack_all([2 * 1, 2 * 3 + 1, 2 * 2, 2 * 4]) == ([(1, 1, [10, 11, 12])], 2)
    assert unacked.ack_all([2 * U64 + 1, 2 * 4]) == ([], U64)
    assert unacked.ack_all([]) == ([], None)
    assert unacked.tags() == [4]


def test_groups_of_one_call_do_not_grow_with_the_next():
    unacked = Unacked()
    unacked.add(1, 1, entries(10, 11))
    first = unacked.ack(1, False)
    assert unacked.ack(2, False) == [(1, 1, [11])]
    assert first == [(1, 1, [10])]


def test_one_message_that_is_never_settled_costs_no_room_for_those_after_it(scale):
    unacked = Unacked()
    unacked.add(1, 1, entries(10))
    batch = entries(*range(64))
    for _ in range(scale.scale(20_000)):
        first = unacked.add(2, 1, batch)
        for tag in range(first, first + 64, 16):
            assert unacked.ack(tag, False) is not None
        _, unknown = unacked.ack_all([2 * tag for tag in range(first, first + 64) if (tag - first) % 16])
        assert unknown is None
    assert unacked.tags() == [1]
    assert unacked.room() < 1024
    assert unacked.ack(1, False) == [(1, 1, [10])]


def test_a_large_array_is_given_back_when_it_is_empty():
    unacked = Unacked()
    unacked.add(1, 1, entries(*range(100_000)))
    assert unacked.room() >= 100_000
    assert [len(seqs) for _, _, seqs in unacked.drain()] == [100_000]
    assert unacked.room() == 0
    assert unacked.add(1, 1, entries(5)) == 100_001
    assert unacked.ack(100_001, True) == [(1, 1, [5])]


def test_settling_from_the_newest_to_the_oldest_is_not_quadratic(scale):
    count = scale.scale(1_000_000)
    unacked = Unacked()
    unacked.add(1, 1, entries(*range(count)))
    for tag in range(count, 0, -1):  # would take hours
        unacked.ack(tag, False)
    assert len(unacked) == 0


def test_what_does_not_fit_is_refused():
    unacked = Unacked()
    with pytest.raises(OverflowError):
        unacked.add(2**32, 0, [])
    with pytest.raises(TypeError):
        unacked.add(1, 1, [object()])  # type: ignore[list-item]
    assert len(unacked) == 0


def test_the_examples_of_the_module_are_right():
    runner = doctest.DocTestRunner()
    for example in (Unacked, Unacked.ack_all):
        for test in doctest.DocTestFinder().find(example, "Unacked", module=False, globs={"Unacked": Unacked}):
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert runner.tries > 5
