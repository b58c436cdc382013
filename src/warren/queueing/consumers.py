"""Who gets the next message: the consumers of one queue, by priority, then in turns.

Rules, as RabbitMQ has them:

1. The highest priority that can take a message gets it; within a priority consumers take turns, message by message.
2. A consumer that cannot take one (its prefetch is used up, its connection does not read, its channel is stopped) leaves
   the round and comes back at the end of its priority. Lower priorities get messages only while all above are blocked.
3. A single active consumer keeps the queue until it goes; the next is the oldest of the highest priority. A newcomer of
   a higher priority does not push it aside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from warren.kernel.entry import Entry

MOST_AT_ONCE = 256  # messages that one consumer gets before the next one's turn, where it is alone
MOST_BYTES_AT_ONCE = 1024 * 1024  # and bytes of their bodies: they are in RAM twice, as messages and as frames


class Receiver(Protocol):
    """What a queue knows of the channel behind a consumer."""

    def room(self) -> int:
        """How many more messages the channel may be sent now; 0: it calls `QueueProcess.unblock` later."""

    def send(self, consumer: Consumer, entries: list[Entry]) -> None:
        """Deliver. What waits for an ack is the channel's to settle."""

    def cancelled(self, consumer: Consumer) -> None:
        """The queue is gone, or does not want the consumer any more: tell the client."""


class Consumer:
    """One basic.consume."""

    __slots__ = (
        "arguments",
        "blocked",
        "exclusive",
        "no_ack",
        "number",
        "outstanding",
        "prefetch",
        "priority",
        "queue",
        "receiver",
        "tag",
        "tag_bytes",
    )

    def __init__(
        self,
        receiver: Receiver,
        tag: str,
        *,
        number: int = 0,
        no_ack: bool = False,
        prefetch: int = 0,
        exclusive: bool = False,
        priority: int = 0,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.receiver = receiver
        self.tag = tag
        self.tag_bytes = tag.encode("utf-8", "surrogateescape")
        self.number = number  # the channel's own name for it
        self.no_ack = no_ack
        self.prefetch = 0 if no_ack else prefetch  # 0: no limit
        self.exclusive = exclusive
        self.priority = priority
        self.arguments = arguments or {}
        self.outstanding = 0  # messages that wait for an ack
        self.blocked = False
        self.queue: Any = None  # the QueueProcess

    def room(self) -> int:
        """How many messages it can take now."""
        room = self.receiver.room()
        if self.prefetch:
            room = min(room, self.prefetch - self.outstanding)
        return min(room, MOST_AT_ONCE)


Shares = list[tuple[Consumer, list[int]]]  # who gets which of the next messages: positions, at least one each


class Consumers:
    """Those of one queue."""

    __slots__ = ("_all", "_priorities", "_rounds", "_single", "_turns", "active", "ever")

    def __init__(self, *, single_active: bool = False) -> None:
        self._single = single_active
        self._all: list[Consumer] = []  # in order of arrival
        self._rounds: dict[int, deque[Consumer]] = {}  # priority -> those that can take messages, next one first
        self._priorities: list[int] = []  # of the rounds that are not empty, highest first
        self._turns: list[tuple[Consumer, bool]] = []  # of the last deal, in order: got a message, or was blocked
        self.active: Consumer | None = None  # the single active one
        self.ever = False  # there was one: auto-delete waits for that

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._all)

    @property
    def exclusive(self) -> bool:
        return len(self._all) == 1 and self._all[0].exclusive  # one that is, is alone

    def add(self, consumer: Consumer) -> None:
        self.ever = True
        self._all.append(consumer)
        consumer.blocked = False
        if self._single and self.active is None:
            self.active = consumer
        self._join(consumer)

    def remove(self, consumer: Consumer) -> bool:
        """Whether it was there."""
        if consumer not in self._all:
            return False
        self._all.remove(consumer)
        self._turns.clear()
        self._leave(consumer)
        consumer.blocked = False  # or an ack after its cancel would bring it back
        if self.active is consumer:
            waiting = sorted(self._all, key=lambda other: -other.priority)  # stable: the oldest of the highest
            self.active = waiting[0] if waiting else None
            if self.active is not None and not self.active.blocked:
                self._join(self.active)
        return True

    def block(self, consumer: Consumer) -> None:
        if not consumer.blocked:
            consumer.blocked = True
            self._leave(consumer)

    def unblock(self, consumer: Consumer) -> bool:
        """It may have room again; whether it had been blocked."""
        if not consumer.blocked:
            return False
        consumer.blocked = False
        self._join(consumer)
        return True

    def waiting(self) -> bool:
        """Is there anyone to try?"""
        return bool(self._priorities)

    def room(self) -> int:
        """How many messages would be taken now."""
        room: dict[Receiver, int] = {}  # consumers of one channel share its room
        for round_ in self._rounds.values():
            for consumer in round_:
                room[consumer.receiver] = room.get(consumer.receiver, 0) + max(0, consumer.room())
        return sum(min(wanted, receiver.room()) for receiver, wanted in room.items())

    def highest(self) -> int | None:
        """The priority of who gets the next message; None: nobody can take one."""
        return self._priorities[0] if self._priorities else None

    def is_active(self, consumer: Consumer) -> bool:
        """Does it get messages at all?"""
        return not self._single or self.active is consumer

    def only(self) -> Consumer | None:
        """The next one, where nobody else of its priority takes turns with it."""
        if self._priorities:
            round_ = self._rounds[self._priorities[0]]
            if len(round_) == 1:
                return round_[0]
        return None

    def deal(self, count: int) -> Shares:
        """Who gets which of the next `count` messages. Fewer are dealt when all are blocked, and never more than
        MOST_AT_ONCE; who has no room left is blocked by this."""
        self._turns.clear()
        alone = self.only()
        if alone is None:
            return self._take_turns(count)
        room = min(alone.room(), count)
        if room <= 0:
            self.block(alone)
            return self.deal(count) if self.waiting() else []
        return [(alone, list(range(room)))]

    def take_back(self, shares: Shares, came: int) -> Shares:
        """Only so many messages came: the shares in those. The turns of the others were not taken, and nobody is blocked
        for them, who would wait for an ack of what was never sent. Requires: nothing was done since `deal`."""
        missed = sum(len(positions) for _, positions in shares) - came
        while missed and self._turns:
            consumer, dealt = self._turns.pop()
            if dealt:
                self._rounds[consumer.priority].rotate(1)
                missed -= 1
            else:
                consumer.blocked = False
                self._join(consumer, first=True)
        kept = [(consumer, [position for position in positions if position < came]) for consumer, positions in shares]
        return [(consumer, positions) for consumer, positions in kept if positions]

    def _take_turns(self, count: int) -> Shares:
        count = min(count, MOST_AT_ONCE)  # so that nobody is blocked for having had so many, who has room for more
        dealt: dict[Consumer, list[int]] = {}
        room: dict[Consumer, int] = {}
        shared: dict[Receiver, int] = {}  # consumers of one channel share its room
        position = 0
        while position < count and self._priorities:
            round_ = self._rounds[self._priorities[0]]
            consumer = round_[0]
            receiver = consumer.receiver
            if consumer not in room:
                room[consumer] = consumer.room()
                shared.setdefault(receiver, receiver.room())
            if room[consumer] <= 0 or shared[receiver] <= 0:
                self.block(consumer)
                self._turns.append((consumer, False))
                continue
            if not consumer.no_ack:  # else it takes no room, and no ack would make any
                room[consumer] -= 1
                shared[receiver] -= 1
            round_.rotate(-1)
            self._turns.append((consumer, True))
            dealt.setdefault(consumer, []).append(position)
            position += 1
        return list(dealt.items())

    def _join(self, consumer: Consumer, first: bool = False) -> None:
        if self._single and self.active is not consumer:
            return
        round_ = self._rounds.get(consumer.priority)
        if round_ is None:
            round_ = self._rounds[consumer.priority] = deque()
        if not round_:
            self._priorities.append(consumer.priority)
            self._priorities.sort(reverse=True)
        if consumer in round_:
            return
        if first:
            round_.appendleft(consumer)
        else:
            round_.append(consumer)

    def _leave(self, consumer: Consumer) -> None:
        round_ = self._rounds.get(consumer.priority)
        if round_ and consumer in round_:
            round_.remove(consumer)
            if not round_:
                self._priorities.remove(consumer.priority)
                del self._rounds[consumer.priority]
