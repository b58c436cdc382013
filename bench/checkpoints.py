"""Checkpoints of a broker that is being measured: counted, and asked for.

What a journal holds is written a second time, to segments; a measurement that ends before hides that cost. So a durable
line lasts for at least `ENOUGH` checkpoints. Where messages are published, their number sees to that. A drain writes
nothing but acks, one record for many messages, and would need hundreds of millions of them; there, snapshots of an empty
queue are taken meanwhile. Each ends the current journal file, and a checkpoint follows. That costs more than a checkpoint
alone, so a drain is measured a little slower than it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from warren.amqp.bulk_client import connect
from warren.pipeline.broker_client import BrokerClient, Credentials
from warren.storage.disk import Disk
from warren.storage.journal import read_floor

ENOUGH = 10
_ASKED = 14  # some fall outside what is timed
_QUEUE = "bench-checkpoints"
_PAUSE_SECONDS = 0.02
_JOIN_SECONDS = 120


@dataclass(frozen=True)
class Checkpoints:
    """Of one broker. Requires: no `asked_for` within another."""

    data: Path
    amqp_url: str
    http_url: str

    def done(self) -> int:
        """Journal files that checkpoints have done away with, durably, since the broker's first start."""
        disk = Disk()
        return sum(read_floor(disk, str(path))[0] for path in self.data.glob("vhosts/*/journal"))

    @contextlib.contextmanager
    def asked_for(self) -> Iterator[None]:
        """Ask for enough of them while the block runs; what is not asked for at its end never is."""
        asyncio.run(self._declare())
        over = threading.Event()
        failed: list[BaseException] = []

        def ask() -> None:
            try:
                with BrokerClient(self.http_url, Credentials("guest", "guest")) as broker:
                    for _ in range(_ASKED):
                        if over.wait(_PAUSE_SECONDS):
                            return
                        taken = broker.call("snapshots/take", vhost="/", queues=[_QUEUE])
                        broker.call("snapshots/release", vhost="/", id=taken["id"])
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=ask, name="asks for checkpoints")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_JOIN_SECONDS)
        if failed:
            raise failed[0]

    async def _declare(self) -> None:
        async with await connect(self.amqp_url) as connection:
            await (await connection.channel()).declare(_QUEUE, durable=True)
