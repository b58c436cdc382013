"""tx: what a channel holds back until its commit.

As RabbitMQ has it: publishes and acks wait; a commit does them in order and is answered when they are safe; a rollback
forgets them, and deliveries that were acked in it are the channel's again, not redelivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warren.amqp.errors import AmqpError
from warren.kernel.entry import Entry

if TYPE_CHECKING:
    from warren.amqp.channel import Channel

Settlement = tuple[int, bool, str]  # delivery tag, multiple, how


class Transaction:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._publishes: list[tuple[str, str, bool, int, list[Entry]]] = []
        self._settlements: list[Settlement] = []
        self.committing = False
        self.journaled = False  # something waits for a commit of the journal
        self.rejected = False  # a queue was full

    def publish(
        self, exchange: str, routing_key: str, mandatory: bool, property_flags: int, entries: list[Entry]
    ) -> None:
        self._publishes.append((exchange, routing_key, mandatory, property_flags, entries))

    def settle(self, tag: int, multiple: bool, how: str) -> None:
        if tag >= self._channel.unacked.next_tag or (not tag and not multiple):
            raise AmqpError(406, f"unknown delivery tag {tag}", 60, 80)
        self._settlements.append((tag, multiple, how))

    def commit(self) -> None:
        publishes, settlements = self._publishes, self._settlements
        self._publishes, self._settlements = [], []
        self.journaled = self.rejected = False
        for publish in publishes:
            self._channel.publish_now(*publish)
        for tag, multiple, how in settlements:
            self._channel.settle_tag(tag, multiple, how)
        if self.rejected:
            raise AmqpError(406, "partial tx completion", 90, 20)
        self.committing = True
        self._channel.vhost.commits.wait(self, 0)

    def committed(self, number: int) -> None:
        """Of `Waiter`."""
        self.committing = False
        if not self._channel.closing:
            self._channel.reply("tx.commit-ok")
            self._channel.connection.resume_events()

    def rollback(self) -> None:
        self._publishes.clear()
        self._settlements.clear()
