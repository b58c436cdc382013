"""Messages on their way from a publisher to where they go, and how far they are.

A disk may be full between two of their queues. The publisher is then not read from until there is room, and what it sent is
done again: an arrival knows what is left, so that no queue gets a message twice.
"""

from __future__ import annotations

import time

from warren.kernel.entry import Entry


def come_now(entries: list[Entry]) -> None:
    """Of messages that were held back, by a transaction, a full disk or an alarm: times to live begin when they come to
    their queues."""
    now = time.time_ns() // 1000
    for entry in entries:
        if entry.expiry:
            entry.expiry += max(0, now - entry.published_at)
        entry.published_at = now


class Arrival:
    """A batch with one way: routed when it was published, delivered now or when its transaction is committed."""

    __slots__ = (
        "delay_ms",
        "done",
        "entries",
        "held",
        "journaled",
        "mandatory",
        "names",
        "producer",
        "publishing_id",
        "rejected",
        "together",
        "waits",
    )

    def __init__(self, entries: list[Entry], names: tuple[str, ...], mandatory: bool) -> None:
        self.entries = entries
        self.names = names  # queues
        self.mandatory = mandatory
        self.waits: list[str] = []  # delayed exchanges that hold it, and have not got it yet
        self.held = 0  # entries that the last of these has got
        self.delay_ms = 0
        self.producer: str | None = None  # numbers what it publishes
        self.publishing_id = 0
        self.together: bool | None = None  # one record for all queues; None: not begun
        self.done = 0  # entries, of what goes together; else queues
        self.rejected: list[Entry] = []  # by a queue that is full, or failed
        self.journaled = False  # a confirm has to wait for the next commit
