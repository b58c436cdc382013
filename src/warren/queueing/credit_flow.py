"""Credit flow: how much may be on its way between a client's socket and the disk, in bytes. The only place that pauses a
reader.

Theory of operation

    socket -> reader -> channel -> queue -> journal's buffer -> commit -> journal's files -> checkpoint -> segments
              |<------- held ------>|       |<- uncommitted ->|           |<- behind ->|

A broker has to hold back whoever is faster than its disk, or memory fills up. RabbitMQ hands out credit from process to
process, a count of messages for each pair of them, and a process that has used up its credit stops taking from the one
before it. In Warren reader, channel and queues of a vhost share one loop, so a message that was read is in the journal's
buffer, or in its queue, when the turn ends: nothing can pile up between them. Credit is therefore the vhost's, counted in
bytes where they do pile up, and granted to readers:

1. Uncommitted bytes. Publishers may have UNCOMMITTED_BYTES in the journal's buffer, all together. A reader that has
   published in a turn and finds them used up waits for the commit that takes them. Who only settles and asks is not stopped
   by others' messages; but settling writes to the journal too, so it has a limit of its own, at several times as much.
2. Bytes behind. What the checkpoints have not caught up with lives in overlays, in memory. Where they are far behind, a
   publisher pauses for some milliseconds in so many bytes (`VhostStore.overload` says how long).
3. Held events. What a reader has read and cannot do yet (an alarm, a full disk, a transaction that is committing, answers
   that the client does not read) it keeps, and reads nothing behind it. So there is one receive buffer of them at most.
4. Turns. A socket that always has more would be read up to 32 times by libuv, some megabytes, before anybody else has a
   turn: whoever sent a large piece waits until the others had theirs.
5. Contents under way. The body of a message that has not all come is in memory. No pause would make the rest come, so
   their sum over the channels of a connection has a limit (kernel/frames.pyx); an alarm stops a reader in the middle of one.

A reader may wait for several things at once. It is paused by the first and goes on with the last. Each `Wait` is ended by
whoever began it, so none can end another's: an alarm that is cleared does not make a reader go on that waits for a commit.

A queue that goes away, or fails, takes no credit with it: there is none in its name. So nobody waits for a queue that is
gone, which is what RabbitMQ's channels monitor queues for.

Alarms stop who publishes, at its next publish, and nobody else; then it is told (connection.blocked). The node sets them for
memory and disk, the store for its reserve of disk (storage/committer.py): each ends its own, and publishers go on with the
last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from warren.storage.vhost_store import VhostStore

TURN_BYTES = 64 * 1024  # that are read at once; whoever sent as many lets the others go first
UNCOMMITTED_BYTES = 8 * 1024 * 1024  # that publishers of a vhost may have in the journal's buffer
SETTLING_BYTES = 4 * UNCOMMITTED_BYTES  # at which also those wait who publish nothing
_ALARM_SECONDS = 0.5  # between two looks of who has no reader


class Wait(Enum):
    """What a reader waits for."""

    COMMIT = "commit"  # the journal's buffer is full
    CHECKPOINT = "checkpoint"  # checkpoints are behind
    RESOURCES = "resources"  # memory or disk is short
    TRANSACTION = "transaction"  # tx.commit is not done
    CLIENT = "client"  # it does not read its answers
    TURN = "turn"  # the others have theirs


class Reader(Protocol):
    """Who reads from a client's socket."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def catch_up(self) -> None:
        """Do what was held; this may find that it has to wait again."""


class Commits(Protocol):
    def wait(self, waiter: _Waiter, number: int) -> None:
        """Tell `waiter.committed(number)` when what is in the journal now is safe."""


class _Waiter(Protocol):
    def committed(self, number: int) -> None: ...


class ReaderFlow:
    """The pauses of one reader.

    >>> class Shown:
    ...     def pause_reading(self): print("pause")
    ...     def resume_reading(self): print("resume")
    ...     def catch_up(self): print("catch up")
    >>> flow = ReaderFlow(Shown())
    >>> flow.wait_for(Wait.COMMIT)
    pause
    >>> flow.wait_for(Wait.RESOURCES)
    >>> flow.done(Wait.COMMIT)
    >>> flow.done(Wait.RESOURCES)
    catch up
    resume
    """

    __slots__ = ("_ended", "_paused", "_reader", "_waits")

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._waits: set[Wait] = set()
        self._paused = False
        self._ended = False

    @property
    def waits(self) -> list[str]:
        """What it waits for, for people: a turn is nothing that they could do something about, and over when they look."""
        return sorted(wait.value for wait in self._waits if wait is not Wait.TURN)

    @property
    def waiting(self) -> bool:
        return bool(self._waits)

    def waits_for(self, wait: Wait) -> bool:
        return wait in self._waits

    def wait_for(self, wait: Wait) -> None:
        """Read no more until `done`."""
        if self._ended:
            return
        self._waits.add(wait)
        if not self._paused:
            self._paused = True
            self._reader.pause_reading()

    def done(self, wait: Wait) -> None:
        """It is there. Was it not waited for, nothing happens."""
        if wait not in self._waits:
            return
        self._waits.discard(wait)
        if not self._waits:
            self._reader.catch_up()
            self._go_on()

    def end(self) -> None:
        """Wait for nothing any more: the client is being sent away, and its answer must be heard."""
        self._ended = True
        self._waits.clear()
        self._go_on()

    def _go_on(self) -> None:
        if self._paused and not self._waits:
            self._paused = False
            self._reader.resume_reading()

    def committed(self, number: int) -> None:
        """Of `_Waiter`: the journal's buffer has room again."""
        self.done(Wait.COMMIT)


class CreditFlow:
    """The credit of a vhost: what its readers may have on the way to its store."""

    def __init__(
        self,
        store: VhostStore,
        commits: Commits,
        later: Callable[[float, Callable[[], None]], object],
        *,
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_short`: is there an alarm?"""
        self._store = store
        self._journal = store.journal
        self._commits = commits
        self._later = later
        self._is_short = is_short

    def spent(self, flow: ReaderFlow, published: bool) -> None:
        """A reader has done a turn: have it wait where there is no credit left."""
        size = len(self._journal.buffer)
        if size > UNCOMMITTED_BYTES and (published or size > SETTLING_BYTES):
            flow.wait_for(Wait.COMMIT)
            self._commits.wait(flow, 0)
        elif published and (seconds := self._store.overload()):
            flow.wait_for(Wait.CHECKPOINT)
            self._later(seconds, lambda: flow.done(Wait.CHECKPOINT))

    async def admit(self) -> None:
        """For who publishes without a reader, as the release of a stage does: return when a publisher might go on."""
        await asyncio.sleep(self._store.overload())
        while self._is_short():
            await asyncio.sleep(_ALARM_SECONDS)
