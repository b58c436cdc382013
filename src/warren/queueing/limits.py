"""Length limits, time to live and the delivery limit of a queue."""

from __future__ import annotations

from warren.errors import QueueFullError
from warren.kernel.entry import Entry
from warren.queueing.arguments import QueueArguments
from warren.storage.backing_queue import BackingQueue

_DEAD_AT_ONCE = 512  # messages
DEAD_BYTES_AT_ONCE = 1024 * 1024  # of their bodies


class DeadAtOnce:
    """How many die in one transaction: so many messages, or so many bytes and the message that reaches them. Others have
    their turn before the rest."""

    __slots__ = ("_bytes", "_count")

    def __init__(self) -> None:
        self._count = self._bytes = 0

    def expired(self, backing: BackingQueue, now_us: int) -> list[Entry]:
        """Of the head those that expired; they wait for an ack."""

        def dies(entry: Entry) -> bool:
            if not 0 < entry.expiry <= now_us or self._is_full():
                return False
            self._add(entry)
            return True

        found: list[Entry] = []
        return backing.fetchwhile(dies, _gather, found)[1]

    def pending(self, backing: BackingQueue, seqs: list[int]) -> tuple[list[Entry], list[int]]:
        """Of `seqs` those that wait for an ack, and the seq_ids that were not looked at."""
        entries: list[Entry] = []
        for position, seq in enumerate(seqs):
            if self._is_full():
                return entries, seqs[position:]
            found: list[Entry] = []
            for entry in backing.ackfold(_gather, found, [seq]):
                self._add(entry)
                entries.append(entry)
        return entries, []

    def _is_full(self) -> bool:
        return self._count >= _DEAD_AT_ONCE or self._bytes >= DEAD_BYTES_AT_ONCE

    def _add(self, entry: Entry) -> None:
        self._count += 1
        self._bytes += entry.body_size


class Limits:
    """What a queue's arguments forbid. Requires: the engine's lock."""

    __slots__ = ("_delivery_limit", "_max_bytes", "_max_length", "_name", "_reject", "_ttl_us", "expired", "overflowed")

    def __init__(self, name: str, arguments: QueueArguments) -> None:
        self._name = name
        self._max_length = arguments.max_length
        self._max_bytes = arguments.max_length_bytes
        self._reject = arguments.overflow != "drop-head"
        self._ttl_us = None if arguments.message_ttl_ms is None else arguments.message_ttl_ms * 1000
        self._delivery_limit = arguments.delivery_limit
        self.expired = 0  # messages that expired, since the start
        self.overflowed = 0  # messages dropped from the head

    def expiry(self, now_us: int, expiration_ms: int | None) -> int:
        """When a message published now expires: the shorter of the queue's and its own time; 0: never."""
        ttl = self._ttl_us
        if expiration_ms is not None:
            own = expiration_ms * 1000
            ttl = own if ttl is None or own < ttl else ttl
        return 0 if ttl is None else now_us + ttl

    @property
    def has_length_limit(self) -> bool:
        return self._max_length is not None or self._max_bytes is not None

    def check_room(self, backing: BackingQueue, count: int, size: int) -> None:
        """Raises QueueFullError where the overflow behaviour is to reject."""
        if not self._reject:
            return
        if self._max_length is not None and len(backing) + count > self._max_length:
            raise QueueFullError(
                f"queue {self._name!r} holds {len(backing)} of at most {self._max_length} messages (x-max-length) and "
                f"rejects {count} more (x-overflow=reject-publish); consume some first"
            )
        if self._max_bytes is not None and backing.ready_bytes() + size > self._max_bytes:
            raise QueueFullError(
                f"queue {self._name!r} holds {backing.ready_bytes()} of at most {self._max_bytes} bytes "
                f"(x-max-length-bytes) and rejects {size} more (x-overflow=reject-publish); consume some first"
            )

    def drop_head(self, backing: BackingQueue) -> None:
        """Bring the queue back to its limit from the head. One that rejects may be longer for a while: messages came back."""
        if self._reject:
            return
        if self._max_length is not None and len(backing) > self._max_length:
            self.overflowed += len(backing.drop(len(backing) - self._max_length))
        if self._max_bytes is not None:
            while backing.ready_bytes() > self._max_bytes and not backing.is_empty():
                self.overflowed += len(backing.drop(1))

    def drop_expired(self, backing: BackingQueue, now_us: int) -> None:
        """Expired messages leave from the head; only the head is looked at."""
        head = backing.peek()
        if head is not None and head.expiry and head.expiry <= now_us:
            before = len(backing)
            backing.dropwhile(lambda entry: 0 < entry.expiry <= now_us)
            self.expired += before - len(backing)

    @staticmethod
    def expired_among(entries: list[Entry], now_us: int) -> list[int]:
        """seq_ids of fetched messages that expired before they reached the head."""
        return [entry.seq for entry in entries if entry.expiry and entry.expiry <= now_us]

    def over_delivery_limit(self, backing: BackingQueue, seqs: list[int]) -> list[int]:
        """Those of `seqs` that may not be requeued once more."""
        limit = self._delivery_limit
        if limit is None:
            return []
        counts = backing.counts
        return [seq for seq in seqs if counts.get(seq, 0) + 1 > limit]


def _gather(entry: Entry, found: list[Entry]) -> list[Entry]:
    found.append(entry)
    return found
