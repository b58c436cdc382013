"""A backing queue made of backing queues, one a priority level; the highest level that has a message goes first.

The seq_ids are this queue's: unique over all levels, so an ack needs no level. Each level stores those that are its own,
under a stream id that carries the level. Starvation of low priorities is by design, and a message that expired stays
until its level is the first with messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from warren.errors import WarrenError
from warren.kernel.entry import Entry, body_total, set_level, split_levels
from warren.kernel.ranges import RangeSet
from warren.storage.backing_queue import NO_LIMIT, BackingQueue

T = TypeVar("T")


class PriorityQueue:
    """Implements `BackingQueue`. `levels[n]` keeps priority n."""

    def __init__(self, levels: list[BackingQueue]) -> None:
        self.levels = levels
        self._down = levels[::-1]  # highest first
        self.redelivered_below = 0

    def init(self, recovered: dict[str, Any] | None) -> None:
        """The levels were initialised one by one."""
        self.redelivered_below = max(level.redelivered_below for level in self.levels)

    def terminate(self) -> dict[str, Any]:
        return {}

    def delete_and_terminate(self) -> None:
        for level in self.levels:
            level.delete_and_terminate()

    @property
    def counts(self) -> dict[int, int]:
        merged: dict[int, int] = {}
        for level in self.levels:
            merged.update(level.counts)
        return merged

    @property
    def returned(self) -> RangeSet:
        merged = RangeSet()
        for level in self.levels:
            merged.add_pairs(level.returned.pairs())
        return merged

    # -- in ----------------------------------------------------------------------------------------------------------

    def _by_level(self, entries: list[Entry]) -> list[tuple[BackingQueue, list[Entry]]]:
        levels = self.levels
        return [(levels[number], group) for number, group in split_levels(entries, len(levels) - 1)]

    def publish(self, entries: list[Entry], confirm: bool = False) -> None:
        for level, group in self._by_level(entries):
            level.publish(group, confirm)

    def publish_delivered(self, entries: list[Entry], confirm: bool = False) -> None:
        for level, group in self._by_level(entries):
            level.publish_delivered(group, confirm)

    def discard(self, entries: list[Entry]) -> None:
        for level, group in self._by_level(entries):
            level.discard(group)

    def accept(self, entries: list[Entry]) -> None:
        for level, group in self._by_level(entries):
            level.accept(group)

    def journal_publish(self, entries: list[Entry], state: int) -> None:
        for level, group in self._by_level(entries):
            level.journal_publish(group, state)

    def reveal(self, entries: list[Entry]) -> None:
        for level, group in self._by_level(entries):
            level.reveal(group)

    def drain_confirmed(self) -> list[int]:
        return [number for level in self.levels for number in level.drain_confirmed()]

    def is_duplicate(self, entry: Entry) -> bool:
        return self.levels[min(entry.level, len(self.levels) - 1)].is_duplicate(entry)

    # -- out ---------------------------------------------------------------------------------------------------------

    def fetch(self, count: int, ack_required: bool = True, most_bytes: int = NO_LIMIT) -> list[Entry]:
        entries: list[Entry] = []
        for number in range(len(self.levels) - 1, -1, -1):
            level = self.levels[number]
            head = level.peek() if len(entries) < count else None
            if head is None:
                continue
            if entries and head.body_size > most_bytes:
                break
            try:
                some = level.fetch(count - len(entries), ack_required, most_bytes)
            except OSError:
                if not entries:
                    raise
                break  # those above are handed out; who comes again is told
            set_level(some, number)
            entries += some
            most_bytes -= body_total(some)
            if not level.is_empty():
                break  # what does not fit is not overtaken by a lower level
        return entries

    def drop(self, count: int, ack_required: bool = False) -> list[int]:
        seqs: list[int] = []
        for level in self._down:
            if len(seqs) < count and not level.is_empty():
                seqs += level.drop(count - len(seqs), ack_required)
        return seqs

    def peek(self) -> Entry | None:
        for level in self._down:
            if (head := level.peek()) is not None:
                return head
        return None

    def dropwhile(self, predicate: Callable[[Entry], bool]) -> Entry | None:
        for level in self._down:
            if (head := level.dropwhile(predicate)) is not None:
                return head
        return None

    def fetchwhile(
        self, predicate: Callable[[Entry], bool], function: Callable[[Entry, T], T], accumulator: T
    ) -> tuple[Entry | None, T]:
        for level in self._down:
            head, accumulator = level.fetchwhile(predicate, function, accumulator)
            if head is not None:
                return head, accumulator
        return None, accumulator

    def _spread(self, seqs: list[int], settle: Callable[[BackingQueue, list[int]], list[int]]) -> list[int]:
        """Offer seq_ids to each level in turn; those that one of them knew, in the order given."""
        known: set[int] = set()
        left = seqs
        for level in self._down:
            if not left:
                break
            if level.pending_count:
                taken = settle(level, left)
                if taken:
                    known.update(taken)
                    left = [seq for seq in left if seq not in known]
        return seqs if not left else [seq for seq in seqs if seq in known]

    def ack(self, seqs: list[int]) -> list[int]:
        return self._spread(seqs, lambda level, some: level.ack(some))

    def ack_committed(self, seqs: list[int]) -> list[int]:
        return self._spread(seqs, lambda level, some: level.ack_committed(some))

    def journal_ack(self, seqs: list[int]) -> None:
        for level in self.levels:
            level.journal_ack(seqs)

    def requeue(self, seqs: list[int], count_delivery: bool = True) -> list[int]:
        return self.prepare_requeue(seqs, count_delivery)()

    def prepare_requeue(self, seqs: list[int], count_delivery: bool = True) -> Callable[[], list[int]]:
        # All levels first: one that is refused when others have theirs back would leave half of it done.
        prepared = [level.prepare_requeue(seqs, count_delivery) for level in self._down if level.pending_count]

        def finish() -> list[int]:
            known = {seq for rest in prepared for seq in rest()}
            return [seq for seq in seqs if seq in known]

        return finish

    def ackfold(self, function: Callable[[Entry, T], T], accumulator: T, seqs: list[int]) -> T:
        for level in self._down:
            accumulator = level.ackfold(function, accumulator, seqs)
        return accumulator

    def fold(self, function: Callable[[Entry, bool, T], tuple[bool, T]], accumulator: T, start: int = 0) -> T:
        """Level by level, the highest first, each in order of seq_id."""
        going = True

        def visit(entry: Entry, unacked: bool, value: T) -> tuple[bool, T]:
            nonlocal going
            going, value = function(entry, unacked, value)
            return going, value

        for level in self._down:
            if going:
                accumulator = level.fold(visit, accumulator, start)
        return accumulator

    def purge(self) -> int:
        return sum(level.purge() for level in self.levels)

    def purge_acks(self) -> int:
        return sum(level.purge_acks() for level in self.levels)

    def checkout(self, limit: int, most_bytes: int) -> dict[int, list[int]]:
        ranges: dict[int, list[int]] = {}
        for level in self._down:
            head = level.peek()
            if head is not None and limit > 0:
                if ranges and head.body_size > most_bytes:
                    break
                before = level.ready_bytes()
                try:
                    taken = level.checkout(limit, most_bytes)
                except WarrenError:
                    if not ranges:
                        raise
                    break  # what the levels above gave is leased
                ranges.update(taken)
                limit -= sum(sum(pairs[1::2]) for pairs in taken.values())
                most_bytes -= before - level.ready_bytes()
                if not level.is_empty():
                    break
        return ranges

    def settle(self, ranges: dict[int, list[int]], requeue: bool) -> int:
        return sum(level.settle(ranges, requeue) for level in self.levels)

    def spill(self) -> list[Entry]:
        return [entry for level in self.levels for entry in level.spill()]

    # -- size and memory ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(len(level) for level in self.levels)

    def is_empty(self) -> bool:
        return all(level.is_empty() for level in self.levels)

    def depth(self) -> int:
        return sum(level.depth() for level in self.levels)

    @property
    def pending_count(self) -> int:
        return sum(level.pending_count for level in self.levels)

    def pending_pairs(self) -> list[int]:
        merged = RangeSet()
        for level in self.levels:
            merged.add_pairs(level.pending_pairs())
        return merged.pairs()

    def ready_bytes(self) -> int:
        return sum(level.ready_bytes() for level in self.levels)

    def set_ram_duration_target(self, duration: float) -> None:
        for level in self.levels:
            level.set_ram_duration_target(duration)

    def ram_duration(self) -> float:
        return min(level.ram_duration() for level in self.levels)

    def needs_timeout(self) -> bool:
        return any(level.needs_timeout() for level in self.levels)

    def timeout(self) -> None:
        for level in self.levels:
            level.timeout()

    def resume(self) -> None:
        for level in self.levels:
            level.resume()

    def msg_rates(self) -> tuple[float, float]:
        rates = [level.msg_rates() for level in self.levels]
        return sum(rate[0] for rate in rates), sum(rate[1] for rate in rates)

    def invoke(self, function: Callable[[Any], T]) -> T:
        return function(self)

    def info(self) -> dict[str, Any]:
        """Sums over the levels, and `priority_lengths`."""
        merged: dict[str, Any] = {}
        for level in self.levels:
            for key, value in level.info().items():
                if key in ("next_seq_id", "target_ram_count") or key not in merged:
                    merged[key] = value
                else:
                    merged[key] += value
        merged["priority_lengths"] = {number: len(level) for number, level in enumerate(self.levels)}
        return merged
