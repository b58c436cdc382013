"""What a clean stop writes down of the queues, and whether it may.

The terms of a queue name its segments and nothing of the journal, which a clean start does not read. So they are the truth
only when the last checkpoint took everything, and nobody appended since.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from warren.storage.priority_queue import PriorityQueue
from warren.storage.recovery_terms import pack_segments
from warren.storage.sqlite_queue import SqliteQueue
from warren.storage.stored_queue import StoredQueue


def is_in_segments(queues: Iterable[StoredQueue]) -> bool:
    """Do segments have every message, and every ack of what they have? Requires: the lock."""
    indexes = [index for queue in queues if queue.durable for index in queue.indexes]
    return not any(
        len(index.overlay) or any(segment.unsaved for segment in index.segments.values()) for index in indexes
    )


def stop_queues(queues: Iterable[StoredQueue]) -> dict[str, Any]:
    """Stop them; the terms of those that a restart brings back, by uid. Requires: the lock, `is_in_segments`."""
    return {
        str(queue.uid): {"next": queue.seqs.next, "streams": _stop_streams(queue)} for queue in queues if queue.durable
    }


def _stop_streams(queue: StoredQueue) -> dict[str, Any]:
    if isinstance(queue.backing, SqliteQueue):
        return {"0": queue.backing.terminate()}
    streams: dict[str, Any] = {}
    levels = queue.backing.levels if isinstance(queue.backing, PriorityQueue) else [queue.backing]
    for number, (level, index) in enumerate(zip(levels, queue.indexes, strict=True)):
        state = level.terminate()
        if state:
            low = min((number * index.segment_size for number in index.segments), default=0)
            streams[str(number)] = {**state, "segments": pack_segments(index), "low": low}
    return streams
