"""What a queue needs of its vhost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from warren.kernel.entry import Entry
from warren.queueing.decorators import QueueDecorator
from warren.storage.vhost_store import VhostStore

if TYPE_CHECKING:
    from warren.queueing.queue_process import QueueProcess


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Owner(Protocol):
    """What a queue needs of its vhost."""

    store: VhostStore
    decorators: tuple[QueueDecorator, ...]

    def dead_letter(self, queue: QueueProcess, entries: list[Entry], reason: str, *, pending: bool) -> bool:
        """Publish to the queue's dead-letter exchange. With `pending`, ack at the source in the same transaction.
        False: there is no such exchange; nothing was done."""

    def later(self, seconds: float, callback: Callable[[], None]) -> Cancellable: ...
    def wake(self) -> None:
        """There is something to commit."""

    def queue_crashed(self, queue: QueueProcess, error: Exception) -> None:
        """Restart it, alone."""

    def is_leased(self, queue: QueueProcess) -> bool:
        """Has a stream of Spark messages of it?"""

    def remove_queue(self, queue: QueueProcess) -> int:
        """The queue ends by itself: it expired, or its last consumer went."""
