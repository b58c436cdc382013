"""tx: what a channel holds back until its commit.

As RabbitMQ has it: publishes, routed when they came, and acks wait; a commit does them in order and is answered when they
are safe; a rollback forgets them, and deliveries that were acked in it are the channel's again, not redelivered. A queue
that was deleted before the commit gets nothing, one that has its name by then does.

What is held back is in memory and nowhere else, and an alarm would stop the very publisher that could commit it: so the
transactions of a connection have a size that they may not pass, however many channels they are on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from warren.amqp.errors import AmqpError
from warren.queueing.arrival import Arrival

if TYPE_CHECKING:
    from warren.amqp.channel import Channel

Settlement = tuple[int, bool, str]  # delivery tag, multiple, how

MOST_BYTES = 256 * 1024 * 1024  # of the messages that the transactions of a connection hold back
_ENTRY_BYTES = 256  # that a message costs beside its head and body


class Transaction:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._publishes: deque[Arrival] = deque()
        self._bytes = 0  # of what is in `_publishes`, or was before a full disk stopped a commit
        self._settlements: list[Settlement] = []
        self.settled: set[int] = set()  # tags: they are not to be settled twice, and wait for the commit
        self._settled_to = 0  # there is none up to this tag that is not among them
        self.committing = False
        self.journaled = False  # something waits for a commit of the journal
        self.rejected = False  # a queue was full

    def publish(self, arrival: Arrival) -> None:
        connection = self._channel.connection
        size = sum([entry.size + _ENTRY_BYTES for entry in arrival.entries])
        self._bytes += size
        connection.held_back += size
        if connection.held_back > MOST_BYTES:
            held_back = connection.held_back
            self.rollback()  # the channel is there until its close is answered, which may never be
            raise AmqpError(
                406,
                f"transactions of {held_back} bytes on this connection are larger than {MOST_BYTES} bytes, the most that is "
                "held back until tx.commit: commit more often",
                60,
                40,
            )
        self._publishes.append(arrival)

    def settle(self, tag: int, multiple: bool, how: str, ids: tuple[int, int] = (0, 0)) -> None:
        """`ids` are those of the method, where it did not come by its handler."""
        unacked = self._channel.unacked
        if (tag or not multiple) and (tag in self.settled or tag not in unacked):
            raise AmqpError(406, f"unknown delivery tag {tag}", *ids)
        if multiple:
            # 0 stands for all that there are now, not at the commit.
            tag = tag or unacked.next_tag - 1
            # What earlier ones have settled is not walked over again: most clients settle in the order of the tags.
            waiting = [known for known in unacked.tags(self._settled_to, tag) if known not in self.settled]
            if not waiting:
                return
            tag = waiting[-1]
            self._settled_to = tag
            self.settled.update(waiting)
        else:
            self.settled.add(tag)
        self._settlements.append((tag, multiple, how))

    def commit(self) -> None:
        """On a full disk it is repeated: what was done is not done again."""
        self.journaled = False
        while self._publishes:
            self._channel.arrive(self._publishes[0])
            self._publishes.popleft()
        self._let_go()
        settlements, self._settlements = self._settlements, []
        self.settled = set()
        self._settled_to = 0
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
        # Also of a channel that was closed meanwhile: what its connection holds is not for this channel alone.
        self._channel.connection.transaction_done()

    def _let_go(self) -> None:
        self._channel.connection.held_back -= self._bytes
        self._bytes = 0

    def rollback(self) -> None:
        """Also when the channel is gone."""
        self._publishes.clear()
        self._let_go()
        self._settlements.clear()
        self.settled.clear()
        self._settled_to = 0
