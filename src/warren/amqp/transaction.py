"""tx: what a channel holds back until its commit.

As RabbitMQ has it: publishes, routed when they came, and acks wait; a commit does them in order and is answered when they
are safe; a rollback forgets them, and deliveries that were acked in it are the channel's again, not redelivered. A queue
that was deleted before the commit gets nothing, one that has its name by then does.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from warren.amqp.errors import AmqpError
from warren.queueing.arrival import Arrival

if TYPE_CHECKING:
    from warren.amqp.channel import Channel

Settlement = tuple[int, bool, str]  # delivery tag, multiple, how


class Transaction:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._publishes: deque[Arrival] = deque()
        self._settlements: list[Settlement] = []
        self.settled: set[int] = set()  # tags: they are not to be settled twice, and wait for the commit
        self.committing = False
        self.journaled = False  # something waits for a commit of the journal
        self.rejected = False  # a queue was full

    def publish(self, arrival: Arrival) -> None:
        self._publishes.append(arrival)

    def settle(self, tag: int, multiple: bool, how: str, ids: tuple[int, int] = (0, 0)) -> None:
        """`ids` are those of the method, where it did not come by its handler."""
        waiting = [known for known in self._channel.unacked.tags() if known not in self.settled]
        if tag not in waiting and (tag or not multiple):
            raise AmqpError(406, f"unknown delivery tag {tag}", *ids)
        if not waiting:
            return
        tag = tag or waiting[-1]  # 0 stands for all that there are now, not at the commit
        self.settled.update([known for known in waiting if known <= tag] if multiple else [tag])
        self._settlements.append((tag, multiple, how))

    def commit(self) -> None:
        """On a full disk it is repeated: what was done is not done again."""
        self.journaled = False
        while self._publishes:
            self._channel.arrive(self._publishes[0])
            self._publishes.popleft()
        settlements, self._settlements = self._settlements, []
        self.settled = set()
        for tag, multiple, how in settlements:
            self._channel.settle_tag(tag, multiple, how)
        rejected, self.rejected = self.rejected, False
        if rejected:
            raise AmqpError(406, "partial tx completion", 90, 20)
        self.committing = True
        self._channel.vhost.commits.wait(self, 0)

    def committed(self, number: int) -> None:
        """Of `Waiter`."""
        self.committing = False
        if not self._channel.closing:
            self._channel.reply("tx.commit-ok")
            self._channel.connection.transaction_done()

    def rollback(self) -> None:
        self._publishes.clear()
        self._settlements.clear()
        self.settled.clear()
