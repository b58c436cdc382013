"""The library face for asyncio: the same names as `warren`, awaited.

>>> import asyncio, tempfile, warren.aio
>>> async def main(data):
...     async with warren.aio.open(data) as store:
...         queue = await store.queue("orders")
...         await queue.publish(b"hello")
...         await store.sync()
...         message = await queue.get()
...         await message.ack()
...         return message.body
>>> with tempfile.TemporaryDirectory() as data:
...     asyncio.run(main(data))
b'hello'

Rules:

1. What is quick is done at once, on the loop: a publish that finds room in the journal's buffer, a get, an ack. What
   may wait for the disk is done in a thread: open, sync, transactions, snapshots, delete, close, a publish that fills
   the buffer.
2. A waiting get holds no thread. It takes its message in the step in which it returns, with no await between the two:
   a cancelled get has taken none. One that was woken and then cancelled wakes the next in its place.
3. What was begun in a thread is finished there, also when the task that waits for it is cancelled: a commit happened or
   did not, and the store is not closed half way.
4. A store belongs to the loop that opened it. Threads may use the plain `Store` behind it (`store.blocking`) meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from warren import library
from warren.errors import InvalidArgumentError, QueueNotFoundError, StoreClosedError, WarrenError
from warren.queueing import message as blocking_message
from warren.queueing import queue as blocking_queue
from warren.storage.settings import EngineSettings

__all__ = ["Message", "Queue", "Snapshot", "Store", "Transaction", "open"]

T = TypeVar("T")
_ACK_BYTES = 64  # of a journal record for one ack, more than it needs
_HEAD_BYTES = 1024  # of a message's head and record, in a guess of what a publish adds to the buffer


class Message:
    """A message that was handed out; waits for `ack` or `nack`."""

    __slots__ = ("blocking", "queue")

    def __init__(self, blocking: blocking_message.Message, queue: Queue) -> None:
        self.blocking = blocking  # the same message, as the plain library has it
        self.queue = queue

    @property
    def body(self) -> bytes:
        return self.blocking.body

    @property
    def seq_id(self) -> int:
        """The place in its queue: given once, never reused, kept by a requeue."""
        return self.blocking.seq_id

    @property
    def headers(self) -> dict[str, Any]:
        return self.blocking.headers

    @property
    def properties(self) -> dict[str, Any]:
        """All AMQP properties that were set, by their AMQP names."""
        return self.blocking.properties

    @property
    def exchange(self) -> str:
        return self.blocking.exchange

    @property
    def routing_key(self) -> str:
        return self.blocking.routing_key

    @property
    def redelivered(self) -> bool:
        return self.blocking.redelivered

    @property
    def delivery_count(self) -> int:
        return self.blocking.delivery_count

    @property
    def settled(self) -> bool:
        return self.blocking.settled

    @property
    def published_at(self) -> float:
        """Seconds since the epoch."""
        return self.blocking.published_at

    @property
    def expires_at(self) -> float | None:
        """Seconds since the epoch, or None."""
        return self.blocking.expires_at

    async def ack(self) -> None:
        """Done with it. Raises MessageStateError when it was settled before."""
        await self.queue.ack_many([self])

    async def nack(self, requeue: bool = True) -> None:
        """Not done: back to its place in the queue, or dropped."""
        await self.queue.nack_many([self], requeue=requeue)

    def __repr__(self) -> str:
        return repr(self.blocking)


class Queue:
    """One queue of an open store. Made by `Store.queue`, not by hand."""

    def __init__(self, blocking: blocking_queue.Queue, loop: asyncio.AbstractEventLoop) -> None:
        self.blocking = blocking  # the same queue, as the plain library has it
        self._loop = loop
        self._getters: deque[asyncio.Future[bool]] = deque()  # in the order in which they came
        self._woken = False  # a wake-up is on its way to the loop: one is enough for many publishes

    @property
    def name(self) -> str:
        return self.blocking.name

    @property
    def durable(self) -> bool:
        return self.blocking.durable

    # -- publishing --------------------------------------------------------------------------------------------------

    async def publish(
        self,
        body: bytes,
        *,
        persistent: bool = True,
        headers: dict[str, Any] | None = None,
        priority: int | None = None,
        expiration_ms: int | None = None,
        **properties: Any,
    ) -> int:
        """Put a message at the tail and return its seq_id. It is safe once `Store.sync` has returned."""

        def publish() -> int:
            return self.blocking.publish(
                body,
                persistent=persistent,
                headers=headers,
                priority=priority,
                expiration_ms=expiration_ms,
                **properties,
            )

        return await self._quickly(publish, _size_of(body))

    async def publish_many(
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
        kinds = (list, tuple, bytes, bytearray, memoryview, str)
        batch = bodies if isinstance(bodies, kinds) else blocking_queue.listed(bodies, "bodies")

        def publish() -> range:
            return self.blocking.publish_many(
                batch,
                persistent=persistent,
                headers=headers,
                priority=priority,
                expiration_ms=expiration_ms,
                **properties,
            )

        return await self._quickly(publish, sum(map(_size_of, batch)), len(batch))

    async def _quickly(self, call: Callable[[], T], size: int, count: int = 1) -> T:
        """At once where it cannot have to wait for the disk, else in a thread."""
        if self.blocking.may_wait(size, count):
            return await _in_thread(call)
        return call()

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def get(self, timeout: float | None = 0) -> Message | None:
        """The message at the head, or None when there is none after `timeout` seconds; None waits for ever."""
        messages = await self.get_many(1, timeout)
        return messages[0] if messages else None

    async def get_many(self, count: int, timeout: float | None = 0) -> list[Message]:
        """Up to `count` messages from the head. Waits for the first one as `get` does, never for the rest."""
        if timeout != 0:
            blocking_queue.check_timeout(timeout)
        messages = self.blocking.get_many(count)
        if not messages and timeout != 0:
            deadline = None if timeout is None else self._loop.time() + timeout
            while not messages and await self._arrival(deadline):
                messages = self.blocking.get_many(count)
        return [Message(message, self) for message in messages]

    async def _arrival(self, deadline: float | None) -> bool:
        """Wait until messages may have arrived; False: the time is over."""
        getter: asyncio.Future[bool] = self._loop.create_future()
        timer = None if deadline is None else self._loop.call_at(deadline, _give_up, getter)
        self._getters.append(getter)
        try:
            if len(self._getters) == 1:
                self.blocking.listen(self._notice)
            if len(self.blocking):  # one came between the last look and `listen`
                self._wake(1)
            return await getter
        except asyncio.CancelledError:
            if getter.done() and not getter.cancelled() and getter.result():
                self._wake(1)  # woken, and cancelled before the step that would have taken the message
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if getter in self._getters:
                self._getters.remove(getter)
            if not self._getters:
                self.blocking.unlisten(self._notice)

    def _notice(self) -> None:
        """The queue's word that messages arrived, or that it is gone: from any thread, with the engine's lock."""
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._arrived)
            except RuntimeError:  # the loop was closed, and nobody waits there any more
                self._woken = False

    def _arrived(self) -> None:
        self._woken = False
        try:
            self._wake(len(self.blocking))
        except WarrenError:  # closed, deleted, failed: they are told what it is
            self._wake(len(self._getters))

    def _wake(self, count: int) -> None:
        while count > 0 and self._getters:
            getter = self._getters.popleft()
            if not getter.done():
                getter.set_result(True)
                count -= 1

    async def ack_many(self, messages: Sequence[Message]) -> None:
        """Settle messages of this queue, all or none: done with them."""
        mine = _blocking(messages)
        await self._quickly(lambda: self.blocking.ack_many(mine), _ACK_BYTES * len(mine), 0)

    async def nack_many(self, messages: Sequence[Message], *, requeue: bool = True) -> None:
        """Settle messages of this queue, all or none: back to their places, or dropped."""
        mine = _blocking(messages)
        await self._quickly(lambda: self.blocking.nack_many(mine, requeue=requeue), _ACK_BYTES * len(mine), 0)

    def __aiter__(self) -> Queue:
        """Messages as they come; waits. Ends when the store is closed or the queue deleted."""
        return self

    async def __anext__(self) -> Message:
        while True:
            try:
                message = await self.get(timeout=None)
            except (StoreClosedError, QueueNotFoundError):
                raise StopAsyncIteration from None
            if message is not None:
                return message

    # -- looking -----------------------------------------------------------------------------------------------------

    async def browse(
        self, start_seq: int = 0, limit: int | None = None, *, unacked: bool = False
    ) -> AsyncIterator[Message]:
        """Ready messages from a seq_id on, in the order of seq_ids; nothing is touched, and they cannot be acked."""
        batches = self.blocking.browse_batches(start_seq, limit, unacked=unacked)
        while batch := await _in_thread(lambda: next(batches, None)):
            for message in batch:
                yield Message(message, self)

    def __len__(self) -> int:
        """Ready messages."""
        return len(self.blocking)

    def __bool__(self) -> bool:
        return True

    async def info(self) -> dict[str, Any]:
        """Lengths of the containers that hold the messages, counts and bytes in RAM, rates."""
        return self.blocking.info()

    # -- emptying ----------------------------------------------------------------------------------------------------

    async def purge(self) -> int:
        """Remove all ready messages; those that were handed out stay. How many."""
        return await _in_thread(self.blocking.purge)

    async def delete(self) -> int:
        """Delete the queue with everything in it; how many messages were ready."""
        return await _in_thread(self.blocking.delete)

    def __repr__(self) -> str:
        return repr(self.blocking)


class Store:
    """An open data directory. Close it, or use it in an `async with` block."""

    def __init__(self, blocking: library.Store, loop: asyncio.AbstractEventLoop) -> None:
        self.blocking = blocking  # the same store, as the plain library has it
        self._loop = loop
        self._queues: dict[str, Queue] = {}
        self._syncing: asyncio.Task[None] | None = None  # under way
        self._next_sync: asyncio.Task[None] | None = None  # for those who came since it began

    @property
    def vhost(self) -> str:
        return self.blocking.vhost

    @property
    def durability(self) -> str:
        return self.blocking.durability

    async def queue(self, name: str, durable: bool = True, arguments: dict[str, Any] | None = None) -> Queue:
        """The queue of this name; created if absent. Raises QueueMismatchError where it exists with other arguments."""
        found = await _in_thread(lambda: self.blocking.queue(name, durable, arguments))
        queue = self._queues.get(name)
        if queue is None or queue.blocking is not found:
            queue = self._queues[name] = Queue(found, self._loop)
        return queue

    async def queues(self) -> list[str]:
        """Names of all queues, sorted."""
        return self.blocking.queues()

    async def sync(self) -> None:
        """Return when everything before this call is safe. Many tasks that wait at once share one sync of the disk."""
        engine = self.blocking.engine
        if not engine.journal.dirty:
            engine.committer.check()
            return
        if self._next_sync is None:
            self._next_sync = asyncio.create_task(self._sync(self._syncing))
            self._next_sync.add_done_callback(_take_exception)
        await asyncio.shield(self._next_sync)

    async def _sync(self, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])
        self._syncing, self._next_sync = self._next_sync, None
        await asyncio.to_thread(self.blocking.sync)

    def transaction(self) -> Transaction:
        """An `async with` block: its publishes and acks happen all or not at all, across queues and crashes."""
        return Transaction(self.blocking.transaction())

    def snapshot(self) -> Snapshot:
        """An `async with` block that holds a consistent copy by hard links. Copy its path to keep it."""
        return Snapshot(self.blocking)

    async def info(self) -> dict[str, Any]:
        """The store as a whole: message stores, journal, memory, damage."""
        return self.blocking.info()

    async def close(self) -> None:
        """A clean stop. Calling it twice does nothing."""
        await _in_thread(self.blocking.close)

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return repr(self.blocking)


class Transaction:
    """Collects publishes and acks; commits them at the end of its block, or drops them when the block raises."""

    def __init__(self, blocking: library.Transaction) -> None:
        self._blocking = blocking

    @property
    def seq_ids(self) -> list[int]:
        """Of the publishes, after the commit."""
        return self._blocking.seq_ids

    async def publish(
        self,
        queue: str,
        body: bytes,
        *,
        persistent: bool = True,
        headers: dict[str, Any] | None = None,
        priority: int | None = None,
        expiration_ms: int | None = None,
        **properties: Any,
    ) -> None:
        """Publish to a queue, by name, when the transaction commits."""
        self._blocking.publish(
            queue,
            body,
            persistent=persistent,
            headers=headers,
            priority=priority,
            expiration_ms=expiration_ms,
            **properties,
        )

    async def ack(self, message: Message) -> None:
        """Ack a message when the transaction commits."""
        [mine] = _blocking([message])
        self._blocking.ack(mine)

    async def __aenter__(self) -> Transaction:
        self._blocking.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await _in_thread(lambda: self._blocking.__exit__(kind, value, traceback))


class Snapshot:
    """A data directory of hard links: what the store held at one instant. It exists inside its `async with` block."""

    def __init__(self, store: library.Store) -> None:
        self._store = store
        self._blocking: library.Snapshot | None = None

    @property
    def path(self) -> str:
        if self._blocking is None:
            raise InvalidArgumentError("a snapshot has a path inside its `async with` block")
        return self._blocking.path

    async def release(self) -> None:
        """Remove the links. What a copy of them holds stays."""
        blocking, self._blocking = self._blocking, None
        if blocking is not None:
            await _in_thread(blocking.release)

    async def __aenter__(self) -> Snapshot:
        def take() -> None:
            self._blocking = self._store.snapshot()

        try:
            await _in_thread(take)
        except asyncio.CancelledError:
            await self.release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release()


class _Opening:
    """What `open` returns: to be awaited, or entered at once."""

    def __init__(self, call: Callable[[], library.Store]) -> None:
        self._call = call
        self._store: Store | None = None

    async def _open(self) -> Store:
        opened: list[library.Store] = []
        try:
            await _in_thread(lambda: opened.append(self._call()))
        except asyncio.CancelledError:
            for store in opened:
                await _in_thread(store.close)
            raise
        return Store(opened[0], asyncio.get_running_loop())

    def __await__(self) -> Generator[Any, None, Store]:
        return self._open().__await__()

    async def __aenter__(self) -> Store:
        self._store = await self._open()
        return self._store

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._store is not None
        await self._store.close()


def open(  # the name is the public one
    path: str | os.PathLike[str],
    vhost: str = "/",
    durability: str = "fsync",
    *,
    settings: EngineSettings | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> _Opening:
    """Open a data directory as `warren.open` does: `async with warren.aio.open("data") as store`, or
    `store = await warren.aio.open("data")`. `progress` is called in a thread.
    """
    return _Opening(lambda: library.open(path, vhost, durability, settings=settings, progress=progress))


async def _in_thread(call: Callable[[], T]) -> T:
    """Run `call` in a thread. A task that is cancelled meanwhile is cancelled when `call` has ended."""
    work = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        _take_exception(work)
        raise


def _take_exception(work: asyncio.Future[T]) -> None:
    """Those who waited have seen it, or were cancelled and do not care."""
    if not work.cancelled():
        work.exception()


def _give_up(getter: asyncio.Future[bool]) -> None:
    """Its time is over."""
    if not getter.done():
        getter.set_result(False)


def _size_of(body: object) -> int:
    return _HEAD_BYTES + (len(body) if isinstance(body, (bytes, bytearray, memoryview)) else 0)


def _blocking(messages: Sequence[Message]) -> list[blocking_message.Message]:
    if not isinstance(messages, Sequence):
        raise InvalidArgumentError(f"messages are needed in a list, not {type(messages).__name__}: {messages!r:.60}")
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidArgumentError(f"a warren.aio.Message is needed, not {type(message).__name__}: {message!r:.60}")
    return [message.blocking for message in messages]
