"""The behaviour of a backing queue: the contract between an AMQP queue and whatever keeps its messages.

A backing queue keeps ready messages in order of seq_id and pending acks by seq_id. Everything is in batches: a single
message is a batch of one. All calls are made with the engine's lock. `Requires:` lines are the caller's duty; they are
asserted when WARREN_DEBUG is set.

Durability: `publish`, `ack`, `requeue` and `purge` of persistent messages append to the vhost's journal and return at
once; they are safe when the journal has synced `appended_lsn`. There is no timer in a backing queue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from warren.kernel.entry import Entry
from warren.kernel.ranges import RangeSet

T = TypeVar("T")
NO_LIMIT = 2**62  # bytes


@dataclass(slots=True)
class Checkout:
    """A frozen set of messages: for each stream id a flat list first, count, ...; pending acks of a lease."""

    number: int
    lease: str
    ranges: dict[int, list[int]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(sum(pairs[1::2]) for pairs in self.ranges.values())


class BackingQueue(Protocol):
    @property
    def counts(self) -> dict[int, int]:
        """seq_id -> delivery count, where it is not 0."""

    @property
    def returned(self) -> RangeSet:
        """seq_ids that were handed out and came back."""

    @property
    def redelivered_below(self) -> int:
        """Everything below was perhaps handed out before a crash."""

    # -- life --------------------------------------------------------------------------------------------------------

    def init(self, recovered: dict[str, Any] | None) -> None:
        """Begin: new (None), or with what recovery found: terms of a clean stop, or counts of a dirty one."""

    def terminate(self) -> dict[str, Any]:
        """The queue stops but is not deleted. Returns its recovery terms. Requires: a checkpoint has run and nothing
        is in the journal."""

    def delete_and_terminate(self) -> None:
        """Forget everything, pending acks too; drop references to stored bodies. The files are the caller's."""

    # -- in ----------------------------------------------------------------------------------------------------------

    def publish(self, entries: list[Entry], confirm: bool = False) -> None:
        """Enqueue at the tail. Requires: seq_ids rise and come from this queue's `seqs`."""

    def publish_delivered(self, entries: list[Entry], confirm: bool = False) -> None:
        """The messages went straight to a consumer; only pending acks are recorded. Requires: is_empty()."""

    def discard(self, entries: list[Entry]) -> None:
        """The messages reached the queue but are not kept. Nothing to do but for a mirror."""

    def accept(self, entries: list[Entry]) -> None:
        """Enqueue messages whose journal record exists: fan-out, a committed transaction. Any place by seq_id."""

    def journal_publish(self, entries: list[Entry], state: int) -> None:
        """The records of `entries` only, as part of a transaction; `reveal` follows once they are synced."""

    def reveal(self, entries: list[Entry]) -> None:
        """The transaction is committed: enqueue its messages."""

    def journal_ack(self, seqs: list[int]) -> None:
        """The record of an ack, and what it does on disk; `ack_committed` follows once it is synced."""

    def ack_committed(self, seqs: list[int]) -> list[int]:
        """As `ack`, for acks whose record is synced."""

    def drain_confirmed(self) -> list[int]:
        """seq_ids (flat pairs) of `confirm` publishes that became safe since the last call."""

    def is_duplicate(self, entry: Entry) -> bool:
        """Was this message published before? Asked before `publish`; a mirror's business."""

    # -- out ---------------------------------------------------------------------------------------------------------

    def fetch(self, count: int, ack_required: bool = True, most_bytes: int = NO_LIMIT) -> list[Entry]:
        """Up to `count` messages from the head, with bodies; pending acks unless not required. The bodies have at most
        `most_bytes` together, but for a first message that has more by itself."""

    def drop(self, count: int, ack_required: bool = False) -> list[int]:
        """As fetch, but nobody needs the bodies: seq_ids."""

    def peek(self) -> Entry | None:
        """The head, perhaps without its body."""

    def dropwhile(self, predicate: Callable[[Entry], bool]) -> Entry | None:
        """Remove from the head while the predicate holds (it sees no body); the first that stays."""

    def fetchwhile(
        self, predicate: Callable[[Entry], bool], function: Callable[[Entry, T], T], accumulator: T
    ) -> tuple[Entry | None, T]:
        """As dropwhile, but messages are fetched and wait for an ack."""

    def ack(self, seqs: list[int]) -> list[int]:
        """Forget pending messages; the seq_ids that were pending, in the order given."""

    def requeue(self, seqs: list[int], count_delivery: bool = True) -> list[int]:
        """Put pending messages back where they were; those that were pending. The disk may refuse what that has to write:
        then nothing has happened."""

    def prepare_requeue(self, seqs: list[int], count_delivery: bool = True) -> Callable[[], list[int]]:
        """Write and read what a `requeue` of these needs first; the rest of it, to be called at once. This may fail, and
        nothing has happened then; the disk cannot refuse the rest."""

    def ackfold(self, function: Callable[[Entry, T], T], accumulator: T, seqs: list[int]) -> T:
        """Visit pending messages with their bodies; they stay pending."""

    def fold(self, function: Callable[[Entry, bool, T], tuple[bool, T]], accumulator: T, start: int = 0) -> T:
        """Visit ready and pending messages from seq_id `start` on, in order: function(entry, unacked, acc) ->
        (go on, acc). Nothing is touched."""

    def purge(self) -> int:
        """Remove ready messages, never pending ones; how many."""

    def purge_acks(self) -> int:
        """Forget all pending acks as if acked; how many."""

    # -- leases ------------------------------------------------------------------------------------------------------

    def checkout(self, limit: int, most_bytes: int) -> dict[int, list[int]]:
        """Take up to `limit` messages from the head into a lease without reading bodies: stream id -> flat pairs."""

    def settle(self, ranges: dict[int, list[int]], requeue: bool) -> int:
        """End checked-out messages: as acked, or ready again; how many."""

    def spill(self) -> list[Entry]:
        """For a snapshot that readers see everything in: put messages that are only in RAM into files, where they stay
        transient. Those that have no files to go to are returned."""

    # -- size and memory ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Ready messages."""

    def is_empty(self) -> bool: ...

    def depth(self) -> int:
        """Ready and pending."""

    @property
    def pending_count(self) -> int:
        """Messages that wait for an ack, leased ones too."""

    def pending_pairs(self) -> list[int]:
        """Their seq_ids as a flat list first, count, ..."""

    def ready_bytes(self) -> int:
        """Body bytes of ready messages: what x-max-length-bytes limits. Heads do not count."""

    def set_ram_duration_target(self, duration: float) -> None:
        """The memory monitor's word: keep at most this many seconds of traffic in RAM."""

    def ram_duration(self) -> float:
        """How many seconds of traffic are in RAM."""

    def needs_timeout(self) -> bool:
        """Is a confirm waiting for the journal?"""

    def timeout(self) -> None:
        """Catch up with what can be done when idle: rates and paging."""

    def resume(self) -> None:
        """The store has room again: go on paging."""

    def msg_rates(self) -> tuple[float, float]:
        """Messages per second in and out."""

    def info(self) -> dict[str, Any]:
        """Lengths of the containers, counts and bytes in RAM, rates."""

    def invoke(self, function: Callable[[Any], T]) -> T:
        """Run `function` on the implementation itself; a proxy forwards it."""


def everything(queue: BackingQueue) -> list[Entry]:
    """All messages of a queue, ready and pending."""
    found: list[Entry] = []

    def collect(entry: Entry, unacked: bool, count: int) -> tuple[bool, int]:
        found.append(entry)
        return True, count + 1

    queue.fold(collect, 0)
    return found
