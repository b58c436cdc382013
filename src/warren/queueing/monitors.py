"""Who is told when a queue goes, or who had something of it: two callbacks, in the place of RabbitMQ's monitors.

A channel that consumes from a queue, has messages of it or counts what it got from it monitors that queue. Then

    queue gone    the channel lets go of everything that it keeps by that queue: its number, its counts, its consumers.
                  Else a channel that lives long and uses many short-lived queues would keep them all.
    sender gone   the queue lets go of the channel: its consumers are cancelled, and the last one may take the queue along.

RabbitMQ needs both for two things more, which cannot happen here: credit that a queue which is gone would owe for ever
(`credit_flow.py`), and confirms that it would never send (a confirm waits for the journal, not for a queue).
"""

from __future__ import annotations

from typing import Any, Protocol


class Sender(Protocol):
    def queue_gone(self, queue: Any) -> None:
        """The queue was deleted, or has failed. What it had handed out is not the sender's any more."""


class Monitors:
    """Those who monitor one queue."""

    __slots__ = ("_senders",)

    def __init__(self) -> None:
        self._senders: dict[Sender, None] | None = None  # most queues have none most of the time

    def add(self, sender: Sender) -> None:
        if self._senders is None:
            self._senders = {}
        self._senders[sender] = None

    def discard(self, sender: Sender) -> None:
        if self._senders is not None:
            self._senders.pop(sender, None)

    def __len__(self) -> int:
        return len(self._senders or ())

    def queue_gone(self, queue: Any) -> None:
        """Tell all of them, once."""
        senders, self._senders = self._senders, None
        for sender in senders or ():
            sender.queue_gone(queue)
