"""The backing queue that keeps nothing: messages in RAM only, gone with the process.

Durable as a name, not as a content; there is no journal record, no paging, no memory bound but the queue's limits.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from warren.kernel.entry import Entry, body_total, entry_ranges, record_pending, run_within, take_pending, total_size
from warren.kernel.ranges import RangeSet
from warren.storage.backing_queue import NO_LIMIT, everything
from warren.storage.context import QueueContext
from warren.storage.rates import Rates
from warren.storage.seq_ids import SeqIds

T = TypeVar("T")
_by_seq = attrgetter("seq")


class VolatileQueue:
    """Implements `BackingQueue`."""

    def __init__(self, sid: int, seqs: SeqIds, context: QueueContext) -> None:
        self.sid = sid
        self.seqs = seqs
        self._context = context
        self._ready: deque[Entry] = deque()
        self._pending: dict[int, Entry] = {}
        self._leased: dict[int, Entry] = {}
        self._bytes = 0  # body bytes of ready messages
        self._pending_bytes = 0  # and of pending ones
        self._ram_bytes = 0  # payload of all
        self._confirmed: list[int] = []
        self._rates = Rates(context.clock())
        self.counts: dict[int, int] = {}
        self.returned = RangeSet()
        self.redelivered_below = 0

    def init(self, recovered: dict[str, Any] | None) -> None:
        pass

    def terminate(self) -> dict[str, Any]:
        """The terms of a queue that begins empty."""
        return {"redelivered_below": 0, "returned": [], "counts": {}, "stored": 0, "bytes": 0}

    def delete_and_terminate(self) -> None:
        self._add_ram(-self._ram_bytes)
        self._ready.clear()
        self._pending.clear()
        self._leased.clear()

    # -- in ----------------------------------------------------------------------------------------------------------

    def publish(self, entries: list[Entry], confirm: bool = False) -> None:
        if confirm:
            self._confirm(entries)
        self.accept(entries)

    def publish_delivered(self, entries: list[Entry], confirm: bool = False) -> None:
        assert not self._context.debug or not self._ready, "publish_delivered requires an empty queue"
        if confirm:
            self._confirm(entries)
        self._pend(entries, self._pending)
        self._add_ram(total_size(entries))
        self._rates.entered += len(entries)

    def journal_publish(self, entries: list[Entry], state: int) -> None:
        pass

    def reveal(self, entries: list[Entry]) -> None:
        self.accept(entries)

    def journal_ack(self, seqs: list[int]) -> None:
        pass

    def ack_committed(self, seqs: list[int]) -> list[int]:
        return self.ack(seqs)

    def discard(self, entries: list[Entry]) -> None:
        pass

    def accept(self, entries: list[Entry]) -> None:
        self._bytes += body_total(entries)
        self._add_ram(total_size(entries))
        self._rates.entered += len(entries)
        self._merge(entries)
        self._rates.update(self._context.clock())

    def _add_ram(self, size: int) -> None:
        self._ram_bytes += size
        self._context.monitor.ram_bytes += size

    def _confirm(self, entries: list[Entry]) -> None:
        self._confirmed += entry_ranges(entries)

    def _merge(self, entries: list[Entry]) -> None:
        ready = self._ready
        if not ready or not entries or entries[0].seq > ready[-1].seq:
            ready.extend(entries)
        else:
            self._ready = deque(heapq.merge(ready, entries, key=_by_seq))

    def drain_confirmed(self) -> list[int]:
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def is_duplicate(self, entry: Entry) -> bool:
        return False

    # -- out ---------------------------------------------------------------------------------------------------------

    def fetch(self, count: int, ack_required: bool = True, most_bytes: int = NO_LIMIT) -> list[Entry]:
        if self._bytes > most_bytes:
            count = run_within(self._ready, count, most_bytes)
        popleft = self._ready.popleft
        entries = [popleft() for _ in range(min(count, len(self._ready)))]
        self._bytes -= body_total(entries)
        self._rates.left += len(entries)
        if ack_required:
            self._pend(entries, self._pending)
        else:
            self._forget(entries)
        self._rates.update(self._context.clock())
        return entries

    def drop(self, count: int, ack_required: bool = False) -> list[int]:
        return [entry.seq for entry in self.fetch(count, ack_required)]

    def _pend(self, entries: list[Entry], pending: dict[int, Entry]) -> None:
        record_pending(pending, entries)
        self._pending_bytes += body_total(entries)
        self._rates.taken += len(entries)

    def _forget(self, entries: list[Entry]) -> None:
        self._add_ram(-total_size(entries))
        if self.counts:
            for entry in entries:
                self.counts.pop(entry.seq, None)
        if self.returned:
            self.returned.remove_pairs(entry_ranges(entries))

    def peek(self) -> Entry | None:
        return self._ready[0] if self._ready else None

    def dropwhile(self, predicate: Callable[[Entry], bool]) -> Entry | None:
        while (head := self.peek()) is not None and predicate(head):
            self.drop(1)
        return head

    def fetchwhile(
        self, predicate: Callable[[Entry], bool], function: Callable[[Entry, T], T], accumulator: T
    ) -> tuple[Entry | None, T]:
        while (head := self.peek()) is not None and predicate(head):
            for entry in self.fetch(1):
                accumulator = function(entry, accumulator)
        return head, accumulator

    def ack(self, seqs: list[int]) -> list[int]:
        found, missing = take_pending(self._pending, seqs)
        self._pending_bytes -= body_total(found)
        self._rates.acked += len(found)
        self._forget(found)
        gone = set(missing)
        return [seq for seq in seqs if seq not in gone] if gone else seqs

    def requeue(self, seqs: list[int], count_delivery: bool = True) -> list[int]:
        found, missing = take_pending(self._pending, seqs)
        self._back(found, count_delivery)
        gone = set(missing)
        return [seq for seq in seqs if seq not in gone]

    def _back(self, found: list[Entry], count_delivery: bool) -> None:
        size = body_total(found)
        self._pending_bytes -= size
        self._bytes += size
        self._rates.entered += len(found)
        for entry in found:
            self.returned.add(entry.seq, 1)
            if count_delivery:
                self.counts[entry.seq] = self.counts.get(entry.seq, 0) + 1
        self._merge(sorted(found, key=_by_seq))

    def prepare_requeue(self, seqs: list[int], count_delivery: bool = True) -> Callable[[], list[int]]:
        return lambda: self.requeue(seqs, count_delivery)

    def ackfold(self, function: Callable[[Entry, T], T], accumulator: T, seqs: list[int]) -> T:
        for seq in seqs:
            entry = self._pending.get(seq) or self._leased.get(seq)
            if entry is not None:
                accumulator = function(entry, accumulator)
        return accumulator

    def fold(self, function: Callable[[Entry, bool, T], tuple[bool, T]], accumulator: T, start: int = 0) -> T:
        unacked = {**self._pending, **self._leased}
        everything = sorted([*self._ready, *unacked.values()], key=_by_seq)
        for entry in everything:
            if entry.seq >= start:
                on, accumulator = function(entry, entry.seq in unacked, accumulator)
                if not on:
                    break
        return accumulator

    def purge(self) -> int:
        entries = list(self._ready)
        self._ready.clear()
        self._bytes = 0
        self._forget(entries)
        return len(entries)

    def purge_acks(self) -> int:
        return len(self.ack(list(self._pending)))

    def spill(self) -> list[Entry]:
        return everything(self)

    def checkout(self, limit: int, most_bytes: int) -> dict[int, list[int]]:
        taken: list[Entry] = []
        while self._ready and len(taken) < limit and (not taken or self._ready[0].body_size <= most_bytes):
            most_bytes -= self._ready[0].body_size
            taken.append(self._ready.popleft())
        if not taken:
            return {}
        self._bytes -= body_total(taken)
        self._pend(taken, self._leased)
        return {self.sid: entry_ranges(taken)}

    def settle(self, ranges: dict[int, list[int]], requeue: bool) -> int:
        pairs = ranges.get(self.sid, [])
        seqs = [seq for i in range(0, len(pairs), 2) for seq in range(pairs[i], pairs[i] + pairs[i + 1])]
        found, _ = take_pending(self._leased, seqs)
        if requeue:
            self._back(found, count_delivery=False)
        else:
            self._pending_bytes -= body_total(found)
            self._forget(found)
        return len(found)

    # -- size and memory ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._ready)

    def is_empty(self) -> bool:
        return not self._ready

    def depth(self) -> int:
        return len(self._ready) + self.pending_count

    @property
    def pending_count(self) -> int:
        return len(self._pending) + len(self._leased)

    def pending_pairs(self) -> list[int]:
        return RangeSet([n for seq in (*self._pending, *self._leased) for n in (seq, 1)]).pairs()

    def ready_bytes(self) -> int:
        return self._bytes

    def set_ram_duration_target(self, duration: float) -> None:
        pass

    def ram_duration(self) -> float:
        return math.inf

    def needs_timeout(self) -> bool:
        return False

    def timeout(self) -> None:
        self._rates.update(self._context.clock(), force=True)

    def resume(self) -> None:
        pass

    def msg_rates(self) -> tuple[float, float]:
        return self._rates.in_rate, self._rates.out_rate

    def invoke(self, function: Callable[[Any], T]) -> T:
        return function(self)

    def info(self) -> dict[str, Any]:
        ready = len(self._ready)
        return {
            "q1": 0,
            "q2": 0,
            "delta": 0,
            "q3": 0,
            "q4": ready,
            "len": ready,
            "pending_acks": self.pending_count,
            "ram_pending_acks": self.pending_count,
            "ram_msg_count": ready,
            "ram_bytes": self._ram_bytes,
            "message_bytes": self._bytes + self._pending_bytes,
            "message_bytes_ready": self._bytes,
            "message_bytes_unacknowledged": self._pending_bytes,
            "next_seq_id": self.seqs.next,
            "target_ram_count": None,
            "avg_ingress_rate": self._rates.in_rate,
            "avg_egress_rate": self._rates.out_rate,
            "avg_ack_ingress_rate": self._rates.ack_in,
            "avg_ack_egress_rate": self._rates.ack_out,
            "disk_reads": 0,
            "disk_writes": 0,
        }
