"""A queue as a Python object: publish, get, ack, browse. What AMQP adds (consumers, routing) builds on the same parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from warren.errors import MessageStateError, QueueNotFoundError, StoreClosedError
from warren.kernel.entry import IN_STORE, PERSISTENT, Delivery, Entry, deliveries, make_entries, settle
from warren.queueing.arguments import QueueArguments
from warren.queueing.limits import Limits
from warren.queueing.message import Message
from warren.queueing.properties import encode_head
from warren.storage.payload import join_payload
from warren.storage.vhost_store import StoredQueue, VhostStore

_SLICE = 1024 * 1024
_BROWSE_BATCH = 256


class Queue:
    """One queue of an open store. Threads may share it. Made by `Store.queue`, not by hand."""

    def __init__(self, store: VhostStore, stored: StoredQueue, arguments: QueueArguments) -> None:
        self.name = stored.name
        self.arguments = arguments
        self._store = store
        self._stored = stored
        self._backing = stored.backing
        self._limits = Limits(stored.name, arguments)
        self._limited = self._limits.has_length_limit
        self._max_priority = arguments.max_priority or 0
        self._persistent_flag = PERSISTENT if stored.durable and store.durability != "memory" else 0
        self._expiring = len(stored.backing) > 0  # a message with an expiry may be here
        self._arrived = threading.Condition(store.lock)
        self._waiting = 0
        self._listeners: list[Any] = []  # called, under the lock, when messages arrive
        self._deleted = False

    @property
    def durable(self) -> bool:
        return self._stored.durable

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(
        self,
        body: bytes,
        *,
        persistent: bool = True,
        headers: dict[str, Any] | None = None,
        priority: int | None = None,
        expiration_ms: int | None = None,
        **properties: Any,
    ) -> int:
        """Put a message at the tail and return its seq_id. It is safe once `Store.sync` has returned.

        Other AMQP properties by name: content_type, correlation_id, reply_to, message_id, type, app_id, ...
        """
        head = encode_head(
            "",
            self.name,
            persistent=persistent,
            headers=headers,
            priority=priority,
            expiration_ms=expiration_ms,
            **properties,
        )
        return self._publish((body,), head, persistent, priority, expiration_ms)

    def publish_many(
        self,
        bodies: Iterable[bytes],
        *,
        persistent: bool = True,
        headers: dict[str, Any] | None = None,
        priority: int | None = None,
        expiration_ms: int | None = None,
        **properties: Any,
    ) -> range:
        """Put many messages with the same properties; the fast way. Returns their seq_ids, which are consecutive."""
        batch = bodies if isinstance(bodies, (list, tuple)) else list(bodies)
        head = encode_head(
            "",
            self.name,
            persistent=persistent,
            headers=headers,
            priority=priority,
            expiration_ms=expiration_ms,
            **properties,
        )
        if not batch:
            return range(0)
        first = self._publish(batch, head, persistent, priority, expiration_ms)
        return range(first, first + len(batch))

    def _publish(
        self, bodies: Sequence[bytes], head: bytes, persistent: bool, priority: int | None, expiration_ms: int | None
    ) -> int:
        store = self._store
        count = len(bodies)
        now = time.time_ns() // 1000
        expiry = self._limits.expiry(now, expiration_ms)
        flags = self._persistent_flag if persistent else 0
        entries, largest = make_entries(bodies, head, 0, flags, now, expiry)
        if largest > store.settings.embed_below:
            self._store_large(entries, largest)
        with store.lock:
            while not (store.committer.failed is None and not store.committer.full and self._stored.seqs.available(count)):
                self._wait_for_seq_ids(count)
            self._check()
            if self._limited:
                self._limits.check_room(self._backing, count, sum(entry.size for entry in entries))
            first = self._stored.seqs.take(count)
            self.number(entries, first, priority)
            self._backing.publish(entries)
            if expiry:
                self._expiring = True
            if self._limited:
                self._limits.drop_head(self._backing)
            if self._waiting:
                self._arrived.notify(count)
            for listener in self._listeners:
                listener()
        store.wake()
        return first

    def number(self, entries: list[Entry], first: int, priority: int | None) -> None:
        """Give entries their seq_ids and their priority level."""
        if first or len(entries) > 1:
            for seq, entry in enumerate(entries, first):
                entry.seq = seq
        if priority and self._max_priority:
            level = min(priority, self._max_priority)
            for entry in entries:
                entry.level = level

    def entry_for(
        self, body: bytes, head: bytes, persistent: bool, priority: int | None, expiration_ms: int | None
    ) -> Entry:
        """An entry without a seq_id yet, for a transaction."""
        now = time.time_ns() // 1000
        expiry = self._limits.expiry(now, expiration_ms)
        entry = Entry(0, head, body, self._persistent_flag if persistent else 0, now, expiry)
        entry.level = min(priority or 0, self._max_priority)
        self._expiring = self._expiring or expiry > 0
        return entry

    def announce(self) -> None:
        """Messages arrived by another way than `publish`: a transaction."""
        with self._store.lock:
            if self._limited:
                self._limits.drop_head(self._backing)
            self._arrived.notify_all()
            for listener in self._listeners:
                listener()

    def _wait_for_seq_ids(self, count: int) -> None:
        """The reservation is not synced yet: let the journal sync it. Requires: the lock, once; it is let go meanwhile."""
        store = self._store
        store.committer.check_publish()
        store.lock.release()
        try:
            store.reserve(self._stored, count)
        finally:
            store.lock.acquire()

    def _store_large(self, entries: list[Entry], largest: int) -> None:
        """Check sizes; bodies over 1 MiB go to files of their own, in slices, without the lock."""
        store = self._store
        store.check_size(largest)
        limit = store.settings.large_body_bytes
        for entry in entries:
            if entry.size <= limit or not entry.flags & PERSISTENT:
                continue
            with store.lock:
                store.committer.check_publish()
                msg_id = store.store.next_id()
                large = store.store.begin_large(msg_id, entry.size)
            try:
                for part in join_payload(entry.head, entry.body):
                    view = memoryview(part)
                    for at in range(0, len(view), _SLICE):
                        large.append(bytes(view[at : at + _SLICE]))
                large.finish(sync=store.durability == "fsync")
            except BaseException:
                large.abort()
                raise
            with store.lock:
                store.store.adopt(large, 1)
            entry.msg_id = msg_id
            entry.flags |= IN_STORE

    # -- consuming ---------------------------------------------------------------------------------------------------

    def get(self, timeout: float | None = 0) -> Message | None:
        """The message at the head, or None when there is none after `timeout` seconds; None waits for ever."""
        messages = self.get_many(1, timeout)
        return messages[0] if messages else None

    def get_many(self, count: int, timeout: float | None = 0) -> list[Message]:
        """Up to `count` messages from the head. Waits for the first one as `get` does, never for the rest."""
        if count < 1:
            raise ValueError(f"count is {count}; ask for at least 1 message")
        with self._store.lock:
            self._check()
            messages = self._fetch(count)
            if messages or timeout == 0:
                return messages
            deadline = None if timeout is None else time.monotonic() + timeout
            self._waiting += 1
            try:
                while not messages:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        break
                    self._arrived.wait(left)
                    self._check()
                    messages = self._fetch(count)
            finally:
                self._waiting -= 1
            return messages

    def _fetch(self, count: int) -> list[Message]:
        backing = self._backing
        if self._expiring:
            return self._fetch_unexpired(count)
        entries = backing.fetch(count)
        if not entries:
            return []
        return deliveries(Message, entries, self, backing.redelivered_below, backing.returned, backing.counts)

    def _fetch_unexpired(self, count: int) -> list[Message]:
        backing, now = self._backing, time.time_ns() // 1000
        messages: list[Message] = []
        while len(messages) < count:
            self._limits.drop_expired(backing, now)
            entries = backing.fetch(count - len(messages))
            if not entries:
                break
            gone = self._limits.expired_among(entries, now)
            if gone:
                backing.ack(gone)
                self._limits.expired += len(gone)
                entries = [entry for entry in entries if not (entry.expiry and entry.expiry <= now)]
            messages += deliveries(Message, entries, self, backing.redelivered_below, backing.returned, backing.counts)
        if not backing.depth():
            self._expiring = False
        return messages

    def ack_many(self, messages: Sequence[Message]) -> None:
        """Settle messages of this queue, all or none: done with them."""
        with self._store.lock:
            self._check()
            self._backing.ack(self._settle(messages))
        self._store.wake()

    def nack_many(self, messages: Sequence[Message], *, requeue: bool = True) -> None:
        """Settle messages of this queue, all or none: back to their places, or dropped."""
        with self._store.lock:
            self._check()
            seqs = self._settle(messages)
            if requeue:
                spent = self._limits.over_delivery_limit(self._backing, seqs)
                if spent:
                    self._backing.ack(spent)
                    gone = set(spent)
                    seqs = [seq for seq in seqs if seq not in gone]
                self._backing.requeue(seqs)
                if self._limited:
                    self._limits.drop_head(self._backing)
                if self._waiting:
                    self._arrived.notify(len(seqs))
            else:
                self._backing.ack(seqs)
        self._store.wake()

    def _settle(self, messages: Sequence[Message]) -> list[int]:
        seqs, stranger = settle(messages if isinstance(messages, list) else list(messages), self)
        if stranger is not None:
            if not isinstance(stranger, Delivery):
                raise TypeError(f"a Message is needed, not {type(stranger).__name__}: {stranger!r:.60}")
            why = "was settled before" if stranger.queue is self else "is of another queue"
            raise MessageStateError(f"{stranger!r} {why}; nothing was settled by this call")
        return seqs

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come; waits. Ends when the store is closed or the queue deleted."""
        while True:
            try:
                message = self.get(timeout=None)
            except (StoreClosedError, QueueNotFoundError):
                return
            if message is not None:
                yield message

    # -- looking -----------------------------------------------------------------------------------------------------

    def browse(self, start_seq: int = 0, limit: int | None = None, *, unacked: bool = False) -> Iterator[Message]:
        """Ready messages from a seq_id on, in order; nothing is touched, and they cannot be acked. With `unacked` also
        those that were handed out."""
        left = limit if limit is not None else 1 << 62
        cursor = start_seq
        while left > 0:
            batch = self._browse_batch(cursor, min(left, _BROWSE_BATCH), unacked)
            for message in batch:
                yield message
            if len(batch) < min(left, _BROWSE_BATCH):
                return
            left -= len(batch)
            cursor = batch[-1].entry.seq + 1

    def _browse_batch(self, start: int, limit: int, unacked: bool) -> list[Message]:
        found: list[Entry] = []

        def visit(entry: Entry, pending: bool, count: int) -> tuple[bool, int]:
            if unacked or not pending:
                found.append(entry)
            return len(found) < limit, count

        with self._store.lock:
            self._check()
            backing = self._backing
            backing.fold(visit, 0, start)
            messages = deliveries(Message, found, self, backing.redelivered_below, backing.returned, backing.counts)
        for message in messages:
            message.settled = True
        return messages

    def __len__(self) -> int:
        """Ready messages."""
        with self._store.lock:
            return len(self._backing)

    def __bool__(self) -> bool:
        return True

    def info(self) -> dict[str, Any]:
        """Lengths of the containers that hold the messages, counts and bytes in RAM, rates."""
        with self._store.lock:
            self._check()
            return {
                "name": self.name,
                "durable": self.durable,
                "arguments": dict(self._stored.record.arguments),
                **self._backing.info(),
                "expired": self._limits.expired,
                "overflowed": self._limits.overflowed,
            }

    # -- emptying ----------------------------------------------------------------------------------------------------

    def purge(self) -> int:
        """Remove all ready messages; those that were handed out stay. How many."""
        with self._store.lock:
            self._check()
            count = self._backing.purge()
        self._store.wake()
        return count

    def delete(self) -> int:
        """Delete the queue with everything in it; how many messages were ready."""
        self._check()
        count = self._store.delete(self.name)
        self.gone()
        return count

    def gone(self) -> None:
        """The queue was deleted, or the store closed: let those who wait go."""
        with self._store.lock:
            self._deleted = True
            self._arrived.notify_all()
            for listener in self._listeners:
                listener()

    def _check(self) -> None:
        if self._store.committer.failed is not None:
            self._store.committer.check()
        if self._deleted:
            raise QueueNotFoundError(f"queue {self.name!r} was deleted")

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"
