"""Messages that leave one queue for others: dead letters, what was delayed, rows of a sink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from warren.kernel.entry import Entry
from warren.queueing.delayed import DelayedQueue
from warren.queueing.queue_process import QueueProcess
from warren.storage.stored_queue import StoredQueue


@dataclass(slots=True)
class Move:
    """One record group: all of it happens, or nothing."""

    acks: list[tuple[StoredQueue, list[int]]] = field(default_factory=list)
    arriving: dict[QueueProcess, list[Entry]] = field(default_factory=dict)
    delayed: dict[DelayedQueue, list[Entry]] = field(default_factory=dict)
    state: tuple[int, str, Any] | None = None  # of the ledger, as part of it
    done: Callable[[], None] | None = None  # told on the loop

    def targets(self) -> set[int]:
        """The uids of the queues that it puts messages into."""
        return {queue.stored.uid for queue in self.arriving} | {queue.stored.uid for queue in self.delayed}
