"""What was published comes to its queues.

Rules:

1. Nothing is done twice: an arrival that a full disk stopped goes on where it was.
2. A persistent message for several durable queues is one record and one body.
3. A queue that fails costs the publisher a nack and the other queues nothing.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from warren.kernel.entry import PERSISTENT, Entry, copy_entries
from warren.queueing.arrival import Arrival
from warren.queueing.guard import QueueCrashed
from warren.queueing.queue_process import QueueProcess
from warren.storage.stored_queue import StoredQueue

if TYPE_CHECKING:
    from warren.vhost.vhost import Vhost


class Arrivals:
    def __init__(self, vhost: Vhost) -> None:
        self._vhost = vhost

    def deliver(self, name: str, entries: list[Entry]) -> tuple[list[Entry], bool]:
        """To one queue, at once or not at all. The entries that it rejected, and whether a confirm waits for a commit."""
        queue = self._vhost.queues.get(name)
        if queue is None:
            return [], False
        try:
            done = queue.deliver(entries)
        except QueueCrashed:
            return entries, False
        return done.rejected, done.journaled

    def arrive(self, arrival: Arrival) -> None:
        """To wherever it goes. Raises DiskFullError in between; asked again, it goes on with what is left."""
        while arrival.waits:
            self._hold(arrival, arrival.waits[-1])
            arrival.waits.pop()
        if arrival.together is None and arrival.producer is not None:
            arrival.together = True
        elif arrival.together is None:
            durable = sum(queue.durable for queue in self._targets(arrival))
            arrival.together = bool(arrival.entries[0].flags & PERSISTENT) and durable > 1
        if arrival.together:
            while arrival.done < len(arrival.entries):
                self._fan_out(arrival, arrival.entries[arrival.done])
                arrival.done += 1
            self._vhost.wake()
        while not arrival.together and arrival.done < len(arrival.names):
            queue = self._vhost.queues.get(arrival.names[arrival.done])
            if queue is not None:
                self._copy_to(queue, arrival)
            arrival.done += 1

    def _targets(self, arrival: Arrival) -> list[QueueProcess]:
        """A producer's number that a queue has had, or a higher one, it does not take again. The duplicate is confirmed
        with the next commit, so never before its original is safe."""
        queues = [queue for name in arrival.names if (queue := self._vhost.queues.get(name)) is not None]
        if arrival.producer is None:
            return queues
        targets = []
        for queue in queues:
            last = self._vhost.store.last_publishing_id(queue.stored, arrival.producer)
            if last is None or arrival.publishing_id > last:
                targets.append(queue)
            else:
                queue.duplicates += 1
        return targets

    def _hold(self, arrival: Arrival, exchange: str) -> None:
        """It waits before a delayed exchange for its time."""
        delayed = self._vhost.delayed.get(exchange)
        if delayed is None:
            return
        due = time.time_ns() // 1000 + arrival.delay_ms * 1000
        while arrival.held < len(arrival.entries):
            entry = arrival.entries[arrival.held]
            try:
                if delayed.add(copy_entries([entry])[0], due):
                    arrival.journaled = True
                    self._vhost.wake()
            except QueueCrashed:
                arrival.rejected.append(entry)
            arrival.held += 1
        arrival.held = 0

    def _copy_to(self, queue: QueueProcess, arrival: Arrival) -> None:
        copies = copy_entries(arrival.entries) if len(arrival.names) > 1 else arrival.entries
        rejected, journaled = self.deliver(queue.name, copies)
        arrival.journaled = arrival.journaled or journaled
        if rejected:
            gone = set(map(id, rejected))
            pairs = zip(arrival.entries, copies, strict=True)
            arrival.rejected += [entry for entry, copy in pairs if id(copy) in gone]

    def _failed(self, stored: StoredQueue, error: Exception) -> None:
        queue = self._vhost.queues.get(stored.name)
        if queue is not None:
            self._vhost.queue_crashed(queue, error)

    def _fan_out(self, arrival: Arrival, entry: Entry) -> None:
        targets = self._targets(arrival)
        room: list[QueueProcess] = []
        full: list[QueueProcess] = []
        for queue in targets:
            try:
                (room if queue.sift([entry])[0] else full).append(queue)
            except QueueCrashed:
                arrival.rejected.append(entry)
        if room:
            made = self._vhost.store.fan_out(
                [queue.stored for queue in room],
                entry.head,
                entry.body,
                persistent=bool(entry.flags & PERSISTENT),
                published_at=entry.published_at,
                expiry=entry.expiry,
                level=entry.level,
                times_to_live=[queue.ttl_us for queue in room],
                producer=arrival.producer,
                publishing_id=arrival.publishing_id,
                wake=False,
                failed=self._failed,
            )
            for queue, copy in zip(room, made, strict=True):
                if not queue.deleted:  # else it failed, and has found the message when it began anew
                    with contextlib.suppress(QueueCrashed):  # the message is its own by now
                        queue.accept([copy])
        arrival.journaled = True
        if full:
            arrival.rejected.append(entry)
            for queue in full:
                with contextlib.suppress(QueueCrashed):
                    queue.refuse([entry])
