"""A queue that exists in a vhost, and what its declaration says of how it is kept."""

from __future__ import annotations

from dataclasses import dataclass

from warren.kernel.entry import Entry
from warren.kernel.overlay import Overlay
from warren.storage.backing_queue import BackingQueue
from warren.storage.metadata import QueueRecord
from warren.storage.queue_index import QueueIndex
from warren.storage.seq_ids import SeqIds
from warren.storage.sqlite_queue import SqliteQueue


@dataclass(slots=True)
class StoredQueue:
    """A queue that exists: what it was declared with, and what keeps its messages."""

    record: QueueRecord
    backing: BackingQueue
    seqs: SeqIds
    indexes: list[QueueIndex]
    directory: str

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def uid(self) -> int:
        return self.record.uid

    @property
    def durable(self) -> bool:
        return self.record.durable


def backing_kind(record: QueueRecord) -> str:
    return str(record.arguments.get("x-backing-queue", "variable"))


def has_levels(record: QueueRecord) -> bool:
    return bool(record.arguments.get("x-max-priority"))  # 0 is RabbitMQ's way to ask for none


def level_count(record: QueueRecord) -> int:
    if not has_levels(record):
        return 1
    most = record.arguments["x-max-priority"]
    assert isinstance(most, int)
    return min(most, 255) + 1


def journal_target(queue: StoredQueue, entry: Entry) -> tuple[int, int, Overlay]:
    """What a publish record needs to know of one queue. Requires: the queue keeps its messages on disk."""
    if isinstance(queue.backing, SqliteQueue):
        return queue.backing.sid_of(entry), entry.seq, queue.backing.places()
    index = queue.indexes[min(entry.level, len(queue.indexes) - 1)]
    return index.sid, entry.seq, index.overlay
