"""The load of `warren bench`: publishers and consumers in processes of their own, and what they counted.

Rules:

1. A worker process has publishers or consumers, never both: they would steal each other's time, and a tool that is busy
   measures itself.
2. Workers count in memory that they share with the parent, which alone looks at the clock: a rate is the difference of two
   looks. So a worker tells nothing while it works.
3. Bodies are random and differ from message to message: a broker that compresses or shares equal ones gains nothing.
4. With a rate, a message is stamped with the time at which it was due, not at which it could be sent: a broker that stops
   the publisher for a second is charged with that second.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvloop

from warren.amqp.bulk_client import (
    PERSISTENT_PROPERTIES,
    PLAIN_PROPERTIES,
    Batch,
    Channel,
    Connection,
    connect,
)
from warren.kernel.client_scanner import bucket, bucket_start

# What a worker counts. `at` is the time of its last message, in microseconds of the monotonic clock.
COUNTERS = ("published", "confirmed", "nacked", "consumed", "consumed_bytes", "redelivered", "at")
_PUBLISHED, _CONFIRMED, _NACKED, _CONSUMED, _BYTES, _REDELIVERED, _AT = range(len(COUNTERS))

STAMP_BYTES = 8
_POLL_SECONDS = 0.005  # how often workers look whether it is over
_BURST_SECONDS = 0.001  # between two bursts of a publisher with a rate
_LONGEST_SLEEP_SECONDS = 0.05
_POOL_BYTES = 4 * 1024 * 1024  # of different bodies, a publisher
_POOL_MESSAGES = 65536
_BATCH_MESSAGES = 256
_BATCH_BYTES = 64 * 1024
_SETTLE_SECONDS = 20.0


@dataclass(frozen=True)
class Load:
    """What is asked of a broker."""

    url: str
    mode: str = "flow"  # flow, fill or drain
    publishers: int = 1
    consumers: int = 1
    queues: int = 1
    queue: str = "warren-bench"  # their names begin with it
    arguments: dict[str, Any] = field(default_factory=dict)  # of the queues
    size: int = 100
    persistent: bool = False
    confirm: int = 0  # publishes that may be unconfirmed; 0: no confirms
    prefetch: int = 1000
    ack_every: int = 100  # 0: no acks
    rate: float = 0.0  # messages a second, over all publishers; 0: as fast as it goes
    messages: int = 0  # in all; 0: until the time is up
    processes: int = 0  # of each kind; 0: half of the processors

    def queue_name(self, number: int) -> str:
        return f"{self.queue}-{number % self.queues}"

    def processes_for(self, count: int) -> int:
        return min(count, self.processes or max(1, (os.cpu_count() or 2) // 2))


class Histogram:
    """Times in microseconds, in the kernel's buckets: about 3 % wide."""

    def __init__(self, counts: list[int] | None = None) -> None:
        self.counts: dict[int, int] = {number: count for number, count in enumerate(counts or []) if count}

    def add(self, microseconds: int, count: int = 1) -> None:
        number = bucket(max(0, microseconds))
        self.counts[number] = self.counts.get(number, 0) + count

    def merge(self, other: Histogram) -> None:
        for number, count in other.counts.items():
            self.counts[number] = self.counts.get(number, 0) + count

    def quantile(self, part: float) -> int:
        """The time that `part` of all (0 to 1) did not pass; 0 where there are none.

        >>> histogram = Histogram()
        >>> for microseconds in range(1, 11):
        ...     histogram.add(microseconds)
        >>> histogram.quantile(0.5)
        5
        """
        total = sum(self.counts.values())
        seen = 0
        for number in sorted(self.counts):
            seen += self.counts[number]
            if seen >= part * total:
                return bucket_start(number)
        return 0

    def summary(self) -> dict[str, float]:
        """Milliseconds."""
        parts = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
        return {name: self.quantile(part) / 1000 for name, part in parts.items()}


# ---- a worker process ----


class Worker:
    """Some of the publishers, or some of the consumers."""

    def __init__(self, load: Load, kind: str, numbers: list[int], counters: Any, stopping: Any, pipe: Pipe) -> None:
        self._load = load
        self._kind = kind
        self._numbers = numbers
        self._counters = counters
        self._stopping = stopping
        self._pipe = pipe
        self._histogram = Histogram()
        self._connections: list[Connection] = []

    async def run(self) -> None:
        load = self._load
        channels = []
        for number in self._numbers:
            connection = await connect(load.url, name=f"warren bench, {self._kind} {number}")
            self._connections.append(connection)
            channels.append(await connection.channel())
        work = self._publish if self._kind == "publisher" else self._consume
        prepare = self._prepare_publisher if self._kind == "publisher" else self._prepare_consumer
        prepared = [await prepare(channel, number) for channel, number in zip(channels, self._numbers, strict=True)]
        self._pipe.send(("ready", None))
        loop = asyncio.get_running_loop()
        while not await loop.run_in_executor(None, self._pipe.poll, 1.0):
            pass
        self._pipe.recv()
        await asyncio.gather(
            *(
                work(channel, number, ready)
                for channel, number, ready in zip(channels, self._numbers, prepared, strict=True)
            )
        )
        for connection in self._connections:
            if load.rate and self._kind == "consumer":
                self._histogram.merge(Histogram(connection.ages))
            await connection.close()
        self._pipe.send(("done", self._histogram.counts))

    def _count(self, counter: int, by: int) -> None:
        self._counters[counter] += by
        self._counters[_AT] = time.monotonic_ns() // 1000

    # -- publishers --------------------------------------------------------------------------------------------------

    async def _prepare_publisher(self, channel: Channel, number: int) -> list[tuple[Any, int]]:
        """Batches to be sent in turn: frames, or with a rate the bodies without their stamp."""
        load = self._load
        if load.confirm:
            await channel.confirm_select()
        chance = random.Random(number)
        each = max(1, min(_BATCH_MESSAGES, _BATCH_BYTES // (load.size + 60)))
        if load.confirm:
            each = max(1, min(each, load.confirm // 4))
        pool = max(1, min(_POOL_MESSAGES, _POOL_BYTES // max(1, load.size)) // each)
        stamp = STAMP_BYTES if load.rate else 0
        batches: list[tuple[Any, int]] = []
        for _ in range(pool):
            bodies = [chance.randbytes(load.size - stamp) for _ in range(each)]
            batches.append((bodies if load.rate else self._frames(channel, number, bodies), each))
        return batches

    def _frames(self, channel: Channel, number: int, bodies: list[bytes]) -> bytes:
        properties = PERSISTENT_PROPERTIES if self._load.persistent else PLAIN_PROPERTIES
        return channel.encode(bodies, routing_key=self._load.queue_name(number), properties=properties)

    async def _publish(self, channel: Channel, number: int, batches: list[tuple[Any, int]]) -> None:
        load = self._load
        waiting: deque[tuple[int, int]] = deque()  # the number of the last publish of a batch, and when it was sent
        told = 0

        def confirmed() -> None:
            nonlocal told
            self._count(_CONFIRMED, channel.confirmed - told)
            told = channel.confirmed
            now = time.monotonic_ns() // 1000
            while waiting and waiting[0][0] <= channel.confirmed_up_to:
                self._histogram.add(now - waiting.popleft()[1])

        if load.confirm:
            channel.on_confirm = confirmed
        if load.rate:
            await self._publish_at_rate(channel, number, batches, waiting)
        else:
            await self._publish_fast(channel, number, batches, waiting)
        if load.confirm:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(channel.settled(), _SETTLE_SECONDS)
            self._counters[_NACKED] += sum(last - first + 1 for first, last in channel.nacked)
        else:
            await channel.synchronise()

    def _share(self, number: int) -> int:
        """Of the messages, what this publisher sends."""
        load = self._load
        return load.messages // load.publishers + (number < load.messages % load.publishers)

    async def _publish_fast(
        self, channel: Channel, number: int, batches: list[tuple[Any, int]], waiting: deque[tuple[int, int]]
    ) -> None:
        load, counters, stopping = self._load, self._counters, self._stopping
        each = batches[0][1]
        left = self._share(number) if load.messages else 1 << 62
        turn = 0
        while left >= each and not stopping.value:
            frames, _ = batches[turn]
            turn = (turn + 1) % len(batches)
            channel.send(frames, each)
            left -= each
            counters[_PUBLISHED] += each
            if load.confirm:
                waiting.append((channel.published, time.monotonic_ns() // 1000))
                await channel.window(max(0, load.confirm - each))
            else:
                await channel.connection.writable()
        if load.messages and left and not stopping.value:
            channel.send(self._frames(channel, number, [os.urandom(load.size) for _ in range(left)]), left)
            counters[_PUBLISHED] += left
        self._count(_PUBLISHED, 0)

    async def _publish_at_rate(
        self, channel: Channel, number: int, batches: list[tuple[Any, int]], waiting: deque[tuple[int, int]]
    ) -> None:
        """In bursts, a millisecond apart where the rate is high. All of a burst is due when it is."""
        load = self._load
        rate = load.rate / load.publishers
        interval = max(_BURST_SECONDS, 1 / rate)
        bodies = [body for batch, _ in batches for body in batch]
        end = self._share(number) if load.messages else 1 << 62
        begin = time.monotonic() + interval * number / load.publishers  # publishers take turns
        sent = burst = 0
        while sent < end and not self._stopping.value:
            at = begin + burst * interval
            burst += 1
            due = min(int(burst * interval * rate + 0.5), end)
            if due > sent:
                await self._sleep_until(at)
            stamp = int(at * 1e6).to_bytes(STAMP_BYTES, "big")
            while sent < due and not self._stopping.value:
                most = load.confirm - channel.unconfirmed if load.confirm else due - sent
                part = [stamp + bodies[each % len(bodies)] for each in range(sent, min(due, sent + most))]
                channel.send(self._frames(channel, number, part), len(part))
                self._count(_PUBLISHED, len(part))
                sent += len(part)
                if load.confirm:
                    waiting.append((channel.published, time.monotonic_ns() // 1000))
                    await channel.window(load.confirm - 1)
                else:
                    await channel.connection.writable()

    async def _sleep_until(self, at: float) -> None:
        """By a thread: the timers of the loop are up to a millisecond late, and that would be taken for the broker's."""
        loop = asyncio.get_running_loop()
        while (left := at - time.monotonic()) > 0 and not self._stopping.value:
            await loop.run_in_executor(None, time.sleep, min(left, _LONGEST_SLEEP_SECONDS))

    # -- consumers ---------------------------------------------------------------------------------------------------

    async def _prepare_consumer(self, channel: Channel, number: int) -> list[tuple[Any, int]]:
        load = self._load
        if load.ack_every:
            await channel.qos(load.prefetch)
        if load.rate:
            channel.connection.count_ages()
        return []

    async def _consume(self, channel: Channel, number: int, ready: list[tuple[Any, int]]) -> None:
        load = self._load

        def came(batch: Batch) -> None:
            self._counters[_BYTES] += batch.body_bytes
            self._counters[_REDELIVERED] += batch.redelivered
            self._count(_CONSUMED, batch.messages)

        await channel.consume(
            load.queue_name(number), came, no_ack=not load.ack_every, ack_every=load.ack_every, collect=False
        )
        while not self._stopping.value:
            await asyncio.sleep(_POLL_SECONDS)
            channel.check()
        if load.ack_every:
            channel.ack_all()
            await channel.synchronise()
            if load.mode == "drain":
                self._count(_CONSUMED, 0)  # the last ack is part of it


def _work(load: Load, kind: str, numbers: list[int], counters: Any, stopping: Any, pipe: Pipe) -> None:
    """The main function of a worker process."""
    try:
        uvloop.run(Worker(load, kind, numbers, counters, stopping, pipe).run())
    except KeyboardInterrupt:
        pass
    except Exception as error:
        pipe.send(("failed", f"{kind} {numbers[0]}: {error or type(error).__name__}"))


# ---- the parent ----


class LoadFailedError(Exception):
    """A publisher or consumer could not go on."""


class Crew:
    """The worker processes of a load. `start` returns when all are connected; `go` lets them work."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.confirm_times = Histogram()
        self.ages = Histogram()
        context = multiprocessing.get_context("spawn")
        self._stopping = context.RawValue("b", 0)
        self._workers: list[tuple[str, Any, Any, Pipe]] = []  # kind, process, counters, pipe
        self._done: set[int] = set()
        kinds = []
        if load.mode != "drain":
            kinds.append(("publisher", load.publishers))
        if load.mode != "fill":
            kinds.append(("consumer", load.consumers))
        for kind, count in kinds:
            processes = load.processes_for(count)
            for first in range(processes):
                ours, theirs = context.Pipe()
                counters = context.RawArray("Q", len(COUNTERS))
                numbers = list(range(first, count, processes))
                arguments = (load, kind, numbers, counters, self._stopping, theirs)
                process = context.Process(target=_work, args=arguments, daemon=True, name=f"warren bench {kind}s")
                self._workers.append((kind, process, counters, ours))

    def start(self) -> None:
        for _, process, _, _ in self._workers:
            process.start()
        for number in range(len(self._workers)):
            self._hear(number, "ready")

    def go(self) -> float:
        """The time at which the work began, in seconds of the monotonic clock."""
        for _, _, _, pipe in self._workers:
            pipe.send("go")
        return time.monotonic()

    def counts(self) -> dict[str, int]:
        """The sums over all workers; `at` is the last of them."""
        found = dict.fromkeys(COUNTERS, 0)
        for _, _, counters, _ in self._workers:
            for name, value in zip(COUNTERS, counters, strict=True):
                found[name] = max(found[name], value) if name == "at" else found[name] + value
        return found

    def publishers_done(self) -> bool:
        """All that were to be published are, and confirmed where that was asked for. Raises LoadFailedError."""
        for number, (kind, _, _, pipe) in enumerate(self._workers):
            if number not in self._done and pipe.poll():
                self._hear(number, "done")
            elif kind == "publisher" and number not in self._done:
                return False
        return True

    def stop(self) -> None:
        """Let them finish what is under way."""
        self._stopping.value = 1
        for number in range(len(self._workers)):
            if number not in self._done:
                self._hear(number, "done")

    def end(self) -> None:
        for _, process, _, pipe in self._workers:
            if process.is_alive():
                process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()

    def _hear(self, number: int, expected: str) -> None:
        kind, process, _, pipe = self._workers[number]
        while not pipe.poll(0.1):
            if not process.is_alive() and not pipe.poll():
                raise LoadFailedError(f"a {kind} process ended with {process.exitcode}")
        try:
            what, value = pipe.recv()
        except EOFError:
            raise LoadFailedError(f"a {kind} process ended with {process.exitcode}") from None
        if what != expected:
            raise LoadFailedError(str(value))
        if what == "done":
            self._done.add(number)
            histogram = Histogram()
            histogram.counts = value
            (self.confirm_times if kind == "publisher" else self.ages).merge(histogram)


@contextlib.contextmanager
def crew(load: Load) -> Iterator[Crew]:
    """Workers that are connected, for the block."""
    workers = Crew(load)
    try:
        workers.start()
        yield workers
    finally:
        workers.end()


async def prepare_queues(load: Load) -> int:
    """Empty queues for the load; for a drain, how many messages wait in those there are."""
    ready = 0
    async with await connect(load.url, name="warren bench") as connection:
        channel = await connection.channel()
        for number in range(load.queues):
            name = load.queue_name(number)
            if load.mode == "drain":
                ready += await channel.declare(name, passive=True)
            else:
                await channel.declare(name, arguments=load.arguments)
                await channel.purge(name)
    return ready


async def remove_queues(load: Load) -> None:
    async with await connect(load.url, name="warren bench") as connection:
        channel = await connection.channel()
        for number in range(load.queues):
            await channel.delete(load.queue_name(number))
