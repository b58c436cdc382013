"""A queue as a Python object: publish, get, ack, browse. What AMQP adds (consumers, routing) is built on the same."""

from __future__ import annotations

import contextlib
import errno
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

from warren.errors import (
    DiskFullError,
    InvalidArgumentError,
    MessageStateError,
    QueueNotFoundError,
    StoreClosedError,
    StoreFailedError,
    WarrenError,
)
from warren.kernel.entry import IN_STORE, PERSISTENT, Delivery, Entry, deliveries, make_entries, number_entries, settle
from warren.queueing.arguments import QueueArguments
from warren.queueing.limits import Limits
from warren.queueing.message import Message
from warren.queueing.properties import encode_head
from warren.storage.payload import join_payload
from warren.storage.priority_queue import PriorityQueue
from warren.storage.sqlite_queue import SqliteQueue
from warren.storage.vhost_store import StoredQueue, VhostStore

_SLICE = 1024 * 1024
_BROWSE_BATCH = 256
UNNUMBERED = (1 << 64) - 1  # the seq_id of an entry that has none yet
_by_seq = attrgetter("seq")
T = TypeVar("T")
Body: TypeAlias = bytes | bytearray | memoryview
Checked: TypeAlias = T | Any  # by us: compiled code would refuse another type before we can say what is wrong


def check_timeout(timeout: object) -> None:
    """Raises InvalidArgumentError for what is no time to wait: also NaN, which never ends."""
    if timeout is None:
        return
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        with contextlib.suppress(OverflowError):  # an int with hundreds of digits
            if not math.isnan(timeout):
                return
    raise InvalidArgumentError(f"timeout is {timeout!r:.60}; it is a number of seconds, or None to wait for ever")


def listed(items: Iterable[T], what: str) -> list[T]:
    """Raises InvalidArgumentError for what cannot be one."""
    try:
        return list(items)
    except TypeError:
        raise InvalidArgumentError(f"{what} are needed in a list, not {type(items).__name__}: {items!r:.60}") from None


class Queue:
    """One queue of an open store. Threads may share it. Made by `Store.queue`, not by hand."""

    def __init__(self, store: VhostStore, stored: StoredQueue, arguments: QueueArguments) -> None:
        self.name = stored.name
        self.arguments = arguments
        self._store = store
        self._stored = stored
        self._backing = stored.backing
        self._limits = Limits(stored.name, arguments)
        self._lock = store.lock
        self._committer = store.committer
        self._seqs = stored.seqs
        self._small = min(store.settings.embed_below, store.settings.max_message_bytes)  # no need to look closer
        self._has_ttl = arguments.message_ttl_ms is not None
        self._limited = self._limits.has_length_limit
        self._max_priority = arguments.max_priority or 0
        self._persistent_flag = PERSISTENT if stored.durable and store.durability != "memory" else 0
        self._expiring = len(stored.backing) > 0  # a message with an expiry may be here
        self._arrived = threading.Condition(store.lock)
        self._waiting = 0
        self._listeners: list[Callable[[], None]] = []  # called, under the lock, when messages arrive or the queue goes
        self._deleted = False
        self._plain_head: bytes | None = (
            None  # of a persistent message with nothing else; a cache for all would be too small
        )

    @property
    def durable(self) -> bool:
        return self._stored.durable

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(
        self,
        body: Body,
        *,
        persistent: Checked[bool] = True,
        headers: Checked[dict[str, Any] | None] = None,
        priority: Checked[int | None] = None,
        expiration_ms: Checked[int | None] = None,
        **properties: Any,
    ) -> int:
        """Put a message at the tail and return its seq_id. It is safe once `Store.sync` has returned.

        Other AMQP properties by name: content_type, correlation_id, reply_to, message_id, type, app_id, ...
        """
        head = self.head_for(persistent, headers, priority, expiration_ms, properties)
        return self._publish((body,), head, persistent, priority, expiration_ms)

    def publish_many(
        self,
        bodies: Iterable[Body],
        *,
        persistent: Checked[bool] = True,
        headers: Checked[dict[str, Any] | None] = None,
        priority: Checked[int | None] = None,
        expiration_ms: Checked[int | None] = None,
        **properties: Any,
    ) -> range:
        """Put many messages with the same properties; the fast way. Returns their seq_ids, which are consecutive."""
        if isinstance(bodies, (bytes, bytearray, memoryview, str)):
            raise InvalidArgumentError(f"publish_many takes a list of bodies, not one body: {bodies!r:.60}")
        batch = bodies if isinstance(bodies, (list, tuple)) else listed(bodies, "bodies")
        head = self.head_for(persistent, headers, priority, expiration_ms, properties)
        if not batch:
            return range(0)
        first = self._publish(batch, head, persistent, priority, expiration_ms)
        return range(first, first + len(batch))

    def head_for(
        self,
        persistent: Checked[bool],
        headers: Checked[dict[str, Any] | None],
        priority: Checked[int | None],
        expiration_ms: Checked[int | None],
        properties: dict[str, Any],
    ) -> bytes:
        """The stored head of a message to this queue. Raises InvalidArgumentError for what AMQP cannot carry."""
        if persistent is True and not headers and priority is None and expiration_ms is None and not properties:
            if self._plain_head is None:
                self._plain_head = encode_head("", self.name, persistent=True)
            return self._plain_head
        if persistent is not True and persistent is not False:
            raise InvalidArgumentError(f"persistent is {persistent!r}; it is True or False")
        try:
            return encode_head(
                "",
                self.name,
                persistent=persistent,
                headers=headers,
                priority=priority,
                expiration_ms=expiration_ms,
                **properties,
            )
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(str(error)) from None

    def _publish(
        self, bodies: Sequence[Body], head: bytes, persistent: bool, priority: int | None, expiration_ms: int | None
    ) -> int:
        now = time.time_ns() // 1000
        expiry = self._limits.expiry(now, expiration_ms) if self._has_ttl or expiration_ms is not None else 0
        try:
            entries, largest = make_entries(bodies, head, 0, self._persistent_flag if persistent else 0, now, expiry)
        except TypeError as error:
            raise InvalidArgumentError(str(error)) from None
        if largest > self._small:
            first = self._publish_large(entries, largest, expiry, priority)
        else:
            first = self._enqueue(entries, expiry, priority)
        self._store.wake()
        return first

    def _enqueue(self, entries: list[Entry], expiry: int, priority: int | None) -> int:
        count = len(entries)
        level = min(priority, self._max_priority) if priority else 0
        seqs = self._seqs
        with self._lock:
            while self._committer.failed is not None or self._committer.full or not seqs.available(count):
                self._wait_for_seq_ids(count)
            if self._deleted:
                self._check()
            if self._limited:
                self._make_room(count, entries)
            first = seqs.take(count)
            number_entries(entries, first, level)
            self._backing.publish(entries)
            if expiry:
                self._expiring = True
            if self._limited:
                self._limits.drop_head(self._backing)
            if self._waiting or self._listeners:
                self._announce(count)
        return first

    def _make_room(self, count: int, entries: list[Entry]) -> None:
        """Raises QueueFullError. What expired at the head takes no room."""
        if self._expiring:
            self._limits.drop_expired(self._backing, time.time_ns() // 1000)
        self._limits.check_room(self._backing, count, sum(entry.body_size for entry in entries))

    def entry_for(
        self, body: Body, head: bytes, persistent: bool, priority: int | None, expiration_ms: int | None
    ) -> Entry:
        """An entry without a seq_id yet, for a transaction."""
        now = time.time_ns() // 1000
        expiry = self._limits.expiry(now, expiration_ms)
        try:
            flags = self._persistent_flag if persistent else 0
            [entry], size = make_entries((body,), head, UNNUMBERED, flags, now, expiry)
        except TypeError as error:
            raise InvalidArgumentError(str(error)) from None
        self._store.check_size(size)
        entry.level = min(priority or 0, self._max_priority)
        return entry

    def check_room(self, entries: list[Entry]) -> None:
        """Raises QueueFullError where `entries` are too many for the queue's limits. Requires: the lock."""
        self._check()
        if self._limited:
            self._make_room(len(entries), entries)

    def announce(self, entries: list[Entry]) -> None:
        """Messages arrived by another way than `publish`: a transaction. Nothing in here can fail. Requires: the lock."""
        self._expiring = self._expiring or any(entry.expiry for entry in entries)
        self._announce(len(entries))

    def trim(self) -> None:
        """Back to its limits, after messages arrived by another way than `publish`."""
        with self._store.lock:
            if self._limited and not self._deleted:
                self._limits.drop_head(self._backing)

    def _announce(self, count: int) -> None:
        """Wake those who wait for messages. Requires: the lock."""
        if self._waiting:
            self._arrived.notify(count)
        for listener in self._listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, under the engine's lock and by any thread, when messages may have arrived and when
        the queue is gone. It must be quick, and must not call the queue."""
        with self._store.lock:
            self._listeners = [*self._listeners, listener]

    def unlisten(self, listener: Callable[[], None]) -> None:
        with self._store.lock:
            self._listeners = [other for other in self._listeners if other != listener]

    def may_wait(self, size: int, count: int = 1) -> bool:
        """Would a publish or ack of so many bytes perhaps wait for the disk? For callers that must not."""
        store = self._store
        return (
            len(store.journal.buffer) + size > store.settings.commit_bytes
            or self._stored.seqs.next + count > self._stored.seqs.reserved
        )

    def _wait_for_seq_ids(self, count: int) -> None:
        """The reservation is not synced yet: have it synced. Requires: the lock, once; it is let go meanwhile."""
        store = self._store
        store.committer.check_publish()
        store.lock.release()
        try:
            store.reserve(self._stored, count)
        finally:
            store.lock.acquire()

    def _publish_large(self, entries: list[Entry], largest: int, expiry: int, priority: int | None) -> int:
        """Bodies over 1 MiB go to files of their own, in slices, without the lock: nobody's commit waits for them."""
        limit = self._store.settings.large_body_bytes
        self._store.check_size(largest)
        if largest <= limit or self.arguments.backing_queue != "variable":  # the others keep their bodies themselves
            return self._enqueue(entries, expiry, priority)
        written: list[bytes] = []
        try:
            for entry in entries:
                if entry.size > limit and entry.flags & PERSISTENT:
                    written.append(self._write_large(entry))
        except BaseException:
            self._forget_large(written)
            raise
        try:
            return self._enqueue(entries, expiry, priority)
        except WarrenError:  # the queue is full, or was deleted meanwhile
            self._forget_large(written)
            raise

    def _write_large(self, entry: Entry) -> bytes:
        store = self._store
        with store.lock:
            self._check()
            store.committer.check_publish()
            msg_id: bytes = store.store.next_id()
            large = store.store.begin_large(msg_id, entry.size)
        try:
            for part in join_payload(entry.head, entry.body):
                view = memoryview(part)
                for at in range(0, len(view), _SLICE):
                    large.append(view[at : at + _SLICE])
            large.finish(sync=store.durability == "fsync")
        except BaseException as error:
            large.abort()
            if isinstance(error, OSError):
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                kind = DiskFullError if full else StoreFailedError
                raise kind(
                    f"a body of {entry.size} bytes could not be written, it is not published: {error}"
                ) from error
            raise
        with store.lock:
            store.store.adopt(large, 1)
        entry.msg_id = msg_id
        entry.flags |= IN_STORE
        return msg_id

    def _forget_large(self, msg_ids: list[bytes]) -> None:
        """Nothing came to refer to them."""
        with self._store.lock:
            if msg_ids and self._store.committer.failed is None:
                self._store.store.remove_many(msg_ids)

    # -- consuming ---------------------------------------------------------------------------------------------------

    def get(self, timeout: Checked[float | None] = 0) -> Message | None:
        """The message at the head, or None when there is none after `timeout` seconds; None waits for ever."""
        if timeout != 0:
            check_timeout(timeout)
        with self._lock:
            self._check()
            messages = self._fetch(1)
        if not messages and timeout != 0:
            messages = self.get_many(1, timeout)
        return messages[0] if messages else None

    def get_many(self, count: Checked[int], timeout: Checked[float | None] = 0) -> list[Message]:
        """Up to `count` messages from the head. Waits for the first one as `get` does, never for the rest."""
        if not isinstance(count, int) or count < 1:
            raise InvalidArgumentError(f"count is {count!r}; ask for at least 1 message")
        if timeout != 0:
            check_timeout(timeout)
        with self._store.lock:
            self._check()
            messages = self._fetch(count)
            if messages or timeout == 0:
                return messages
            deadline = None if timeout is None else time.monotonic() + timeout
            self._waiting += 1
            try:
                while not messages:
                    left: float | None = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        break
                    self._arrived.wait(left if left is None else min(left, threading.TIMEOUT_MAX))
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
            try:
                self._limits.drop_expired(backing, now)
                entries = backing.fetch(count - len(messages))
            except OSError:
                if not messages:
                    raise
                break  # those before are handed out; who comes again is told
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
        with self._lock:
            self._check()
            messages = messages if isinstance(messages, list) else listed(messages, "messages")
            seqs = self._settle(messages)
            try:
                self._backing.ack(seqs)
            except BaseException:
                self._unsettle(messages)
                raise
        self._store.wake()

    def nack_many(self, messages: Sequence[Message], *, requeue: Checked[bool] = True) -> None:
        """Settle messages of this queue, all or none: back to their places, or dropped."""
        if requeue is not True and requeue is not False:
            raise InvalidArgumentError(f"requeue is {requeue!r}; it is True or False")
        with self._store.lock:
            self._check()
            messages = messages if isinstance(messages, list) else listed(messages, "messages")
            seqs = self._settle(messages)
            try:
                if requeue:
                    self._requeue(messages, seqs)
                else:
                    self._backing.ack(seqs)
            except BaseException:
                self._unsettle(messages)
                raise
        self._store.wake()

    def _requeue(self, messages: Sequence[Message], seqs: list[int]) -> None:
        """Back to their places; those that were delivered too often are dropped instead. Requires: the lock."""
        spent = self._limits.over_delivery_limit(self._backing, seqs)
        if spent:
            gone = set(spent)
            seqs = [seq for seq in seqs if seq not in gone]
        self._detach(messages)
        self._backing.requeue(seqs)  # first: the disk may refuse it, and then nothing has happened
        if spent:
            self._backing.ack(spent)
        if self._limited:
            self._limits.drop_head(self._backing)
        self._announce(len(seqs))

    def _unsettle(self, messages: Sequence[Message]) -> None:
        """Settling failed: what still waits for an ack can be settled another time. Requires: the lock."""
        seqs = [message.entry.seq for message in messages]
        waiting: set[int] = set()
        with contextlib.suppress(WarrenError):  # then the store has failed; what happened first is raised
            for seq in seqs:
                try:
                    self._backing.ackfold(lambda entry, _: waiting.add(entry.seq), None, [seq])
                except OSError:  # only what is pending is read
                    waiting.add(seq)
        for message in messages:
            if message.entry.seq in waiting:
                message.settled = False

    @staticmethod
    def _detach(messages: Sequence[Message]) -> None:
        """The entries are to be the queue's again, which may page them out at once: who holds a message keeps what it
        showed."""
        for message in messages:
            message.entry = message.entry.copy()

    def _settle(self, messages: Sequence[Message]) -> list[int]:
        seqs, stranger = settle(messages if isinstance(messages, list) else listed(messages, "messages"), self)
        if seqs is None:
            if not isinstance(stranger, Delivery):
                raise InvalidArgumentError(f"a Message is needed, not {type(stranger).__name__}: {stranger!r:.60}")
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

    def browse(
        self, start_seq: Checked[int] = 0, limit: Checked[int | None] = None, *, unacked: bool = False
    ) -> Iterator[Message]:
        """Ready messages from a seq_id on, in the order of seq_ids; nothing is touched, and they cannot be acked. With
        `unacked` also those that were handed out."""
        return chain.from_iterable(self.browse_batches(start_seq, limit, unacked=unacked))

    def browse_batches(
        self, start_seq: Checked[int] = 0, limit: Checked[int | None] = None, *, unacked: bool = False
    ) -> Iterator[list[Message]]:
        """As `browse`, in the pieces that are read at once."""
        for name, value in (("start_seq", start_seq), ("limit", 0 if limit is None else limit)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
                raise InvalidArgumentError(f"{name} is {value!r}; it is a number of 0 or more")
        return self._batches(start_seq, limit, unacked)

    def _batches(self, start_seq: int, limit: int | None, unacked: bool) -> Iterator[list[Message]]:
        left = limit if limit is not None else 1 << 62
        cursor = start_seq
        while left > 0:
            wanted = min(left, _BROWSE_BATCH)
            batch = self._browse_batch(cursor, wanted, unacked)
            if batch:
                yield batch
            if len(batch) < wanted:
                return
            left -= wanted
            cursor = batch[-1].entry.seq + 1

    def _browse_batch(self, start: int, limit: int, unacked: bool) -> list[Message]:
        now = time.time_ns() // 1000
        found: list[Entry] = []

        def visit(entry: Entry, pending: bool, count: int) -> tuple[bool, int]:
            if (unacked or not pending) and not 0 < entry.expiry <= now:
                found.append(entry.copy())  # the queue may page the original out
                count += 1
            return count < limit, count

        with self._store.lock:
            self._check()
            backing = self._backing
            if isinstance(backing, SqliteQueue):
                backing.fold_by_seq(visit, 0, start)
            else:
                # A priority queue visits level by level: the first `limit` of each hold the first `limit` of all.
                for level in backing.levels if isinstance(backing, PriorityQueue) else (backing,):
                    level.fold(visit, 0, start)
            found.sort(key=_by_seq)
            del found[limit:]
            messages = deliveries(Message, found, self, backing.redelivered_below, backing.returned, backing.counts)
        for message in messages:
            message.settled = True
        return messages

    def __len__(self) -> int:
        """Ready messages."""
        with self._store.lock:
            self._check()
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
        with self._store.lock:
            self._check()
            self._deleted = True  # from now on nobody publishes to what is being taken apart
        try:
            count = self._store.delete(self.name)
        except BaseException:
            self._deleted = False
            raise
        self.gone()
        return count

    def gone(self) -> None:
        """The queue was deleted, or the store closed: let those who wait go."""
        with self._store.lock:
            self._deleted = True
            self.look()

    def look(self) -> None:
        """Have all who wait look what became of the queue."""
        with self._store.lock:
            self._arrived.notify_all()
            for listener in self._listeners:
                listener()

    def _check(self) -> None:
        if self._committer.failed is not None:
            self._committer.check()
        if self._deleted:
            raise QueueNotFoundError(f"queue {self.name!r} was deleted; Store.queue makes it anew")

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"
