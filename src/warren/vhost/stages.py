"""Stages: how a sink of Spark publishes a batch exactly once.

A task stages its rows in a file (`storage/stage_file.py`): durable, and known to nobody. The driver then decides: one record
in the journal names the stages of the batch, and from there on the batch is published, whatever dies. Rules:

1. A batch is decided once. Who asks again hears yes, and the stages that he brings are dropped: they are of a repetition.
2. Stages that no decision names are dropped when their writer decides a later batch, or after a day.
3. Releasing moves rows into exchanges some thousand at a time. The messages and how far it has come are one record group:
   after a crash it goes on at the row where it was.
4. A row that no queue takes is counted with its batch, in the same record. With `mandatory` such a batch is not decided.
5. A writer's next batch is decided when the one before it is released. So a queue that does not take more holds the stream
   back, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from warren.kernel.entry import PERSISTENT, Entry, make_entries, set_level
from warren.kernel.journal_codec import STAGE
from warren.queueing.delayed import DelayedQueue
from warren.queueing.message_times import MAX_DELAY_MS, delay_ms, expiration_us
from warren.queueing.properties import carbon_keys, decode_head, rewritten
from warren.queueing.queue_process import QueueProcess
from warren.storage.stage_file import (
    STAGES,
    StageError,
    StageReader,
    StageRows,
    batch_of,
    read_info,
    stage_directory,
    stage_path,
)
from warren.vhost.permissions import Permissions
from warren.vhost.refused import Refused, bad_request, forbidden, not_found

if TYPE_CHECKING:
    from warren.vhost.vhost import Vhost

log = logging.getLogger("warren.vhost")

_ROWS = 8192  # in one record group: the loop is kept for some milliseconds
_BYTES = 4 << 20
_WAIT_SECONDS = 30.0  # that a decision waits for its release
_TROUBLE_SECONDS = 1.0
_FULL_SECONDS = 0.2  # between two looks at a queue that does not take more
_HEADS_KEPT = 4096
_MOST_NAME = 120
ONLY_BATCH = "0"  # of a writer that is no stream
_ORPHAN_SECONDS = 86_400.0
_SWEEP_SECONDS = 600.0


class _Address(NamedTuple):
    """What a head says, as far as publishing goes."""

    head: bytes  # as consumers get it
    exchange: str
    keys: list[str]
    headers: dict[str, Any]
    properties: dict[str, Any]
    persistent: bool
    priority: int
    expiration_us: int  # below 0: never


class _Target(NamedTuple):
    """A queue that rows with one head go to, and as what."""

    queue: QueueProcess
    flags: int
    level: int
    expiry: int
    rejects: bool


class _Way(NamedTuple):
    """Where rows with one head go."""

    head: bytes  # as consumers get it
    targets: list[_Target]
    waits: list[tuple[DelayedQueue, int, int]]  # before delayed exchanges: with which flags, until when


class _Group:
    """Rows on their way into queues, as one. Rows with equal heads go the same way, so that is looked for once."""

    def __init__(self, vhost: Vhost, addresses: dict[bytes, _Address]) -> None:
        self._vhost = vhost
        self._addresses = addresses
        self._now = time.time_ns() // 1000
        self._ways: dict[bytes, _Way] = {}
        self.arriving: dict[QueueProcess, list[Entry]] = {}
        self.delayed: dict[DelayedQueue, list[Entry]] = {}
        self.unroutable = 0  # rows that no queue takes
        self.nowhere: list[str] | None = None  # where the first of them was sent: exchange and routing key
        self._under_way: dict[QueueProcess, tuple[int, int]] = {}  # messages and bytes

    def add(self, head: bytes, bodies: list[bytes]) -> int:
        """Rows with one head to where they go. How many: a queue that rejects may have no room for all of them."""
        way = self._ways.get(head)
        if way is None:
            address = self._address(head)
            # An exchange that was deleted since the decision: as any publish to nowhere.
            known = address.exchange in self._vhost.router.exchanges
            way = self._ways[head] = self._way(address) if known else _Way(address.head, [], [])
        taken = len(bodies)
        strict = [target.queue for target in way.targets if target.rejects]
        if strict:
            taken = self._room_for(bodies, strict)
            bodies = bodies[:taken]
        for target in way.targets if taken else ():
            copies, _ = make_entries(bodies, way.head, 0, target.flags, self._now, target.expiry)
            set_level(copies, target.level)
            self.arriving.setdefault(target.queue, []).extend(copies)
        for delayed, flags, due in way.waits if taken else ():
            held, _ = make_entries(bodies, way.head, 0, flags, self._now, due)
            self.delayed.setdefault(delayed, []).extend(held)
        if not way.targets and not way.waits:
            self.unroutable += taken
            if self.nowhere is None:
                address = self._address(head)
                self.nowhere = [address.exchange, address.keys[0]]
        return taken

    def goes_nowhere(self, head: bytes) -> bool:
        """Would no queue take a row with this head, as things are? One that is delayed is looked at when it is due."""
        address = self._address(head)
        if address.exchange not in self._vhost.router.exchanges:
            return True
        way = self._way(address)
        return not way.targets and not way.waits

    def _room_for(self, bodies: list[bytes], queues: list[QueueProcess]) -> int:
        """How many of these rows, from the first on, all of these queues take."""
        for number, body in enumerate(bodies):
            if not all(self._has_room(queue, len(body)) for queue in queues):
                return number
        return len(bodies)

    def _has_room(self, queue: QueueProcess, more: int) -> bool:
        """Does a queue that rejects take one more, besides those on their way? What never fits waits for an empty queue."""
        count, size = self._under_way.get(queue, (0, 0))
        if not queue.has_room(count + 1, size + more) and (count or queue.filled()[0]):
            return False
        self._under_way[queue] = (count + 1, size + more)
        return True

    def _address(self, head: bytes) -> _Address:
        address = self._addresses.get(head)
        if address is None:
            if len(self._addresses) >= _HEADS_KEPT:
                self._addresses.clear()
            address = self._addresses[head] = _address(head)
        return address

    def _way(self, address: _Address) -> _Way:
        names, waiting = self._vhost.ways(address.exchange, address.keys, address.headers, address.properties)
        waits = []
        for name in waiting:
            durable = address.persistent and self._vhost.router.exchanges[name].durable
            due = self._now + min(delay_ms(address.headers), MAX_DELAY_MS) * 1000
            waits.append((self._vhost.delayed[name], PERSISTENT if durable else 0, due))
        return _Way(address.head, self._targets(address, names), waits)

    def _targets(self, address: _Address, names: tuple[str, ...]) -> list[_Target]:
        targets = []
        for name in names:
            queue = self._vhost.queues.get(name)
            if queue is None:
                continue
            expiry = self._now + address.expiration_us if address.expiration_us >= 0 else 0
            if queue.ttl_us >= 0:
                expiry = min(expiry or self._now + queue.ttl_us, self._now + queue.ttl_us)
            flags = PERSISTENT if address.persistent and queue.durable else 0
            targets.append(_Target(queue, flags, min(address.priority, queue.highest), expiry, queue.rejects))
        return targets


class Stages:
    """Decisions and releases of one vhost; everything on its loop."""

    def __init__(self, vhost: Vhost) -> None:
        self._vhost = vhost
        self._store = vhost.store
        self._releasing: dict[str, asyncio.Task[None]] = {}
        self._heads: dict[bytes, _Address] = {}
        self._stopping = False
        self._sweeping: asyncio.Task[None] | None = None

    def resume(self) -> None:
        """After a start: go on with what was decided and not released."""
        for writer, state in self._store.ledger.table(STAGE).items():
            if state["pending"]:
                self._start(writer)
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def stop(self) -> None:
        self._stopping = True
        tasks = [*self._releasing.values(), *([self._sweeping] if self._sweeping is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- requests ------------------------------------------------------------------------------------------------------

    def open(self, permissions: Permissions, *, writer: str, batch: str | None = None) -> dict[str, Any]:
        """What the writer decided last, so that a repetition is known as one."""
        if self._store.durability == "memory":
            raise bad_request("durability is 'memory': a decided batch would not survive; use 'os' or 'fsync'")
        writer = _key(permissions, writer)
        state = self._store.ledger.table(STAGE).get(writer)
        return {"decided": state["batch"] if state else None, "root": self._store.root, "writer": writer}

    def status(self, permissions: Permissions, *, writer: str) -> dict[str, Any]:
        state = self._store.ledger.table(STAGE).get(_key(permissions, writer)) or {"batch": None, "pending": ()}
        return {
            "decided": state["batch"],
            "pending": len(state["pending"]),
            "unroutable": state.get("unroutable", 0),
        }

    def _path(self, writer: str, name: str) -> str:
        path = stage_path(self._store.root, name)
        if os.path.dirname(path) != stage_directory(self._store.root, writer):
            raise bad_request(f"stage {name!r} is not of writer {writer!r}")
        return path

    async def decide(
        self, permissions: Permissions, *, writer: str, batch: str, stages: list[str], mandatory: bool = False
    ) -> dict[str, Any]:
        """Publish these stages, and no others of the batch, ever. With `mandatory` all rows, as things are, or none."""
        writer = _key(permissions, writer)
        if not await self._released(writer, _WAIT_SECONDS):
            raise Refused(503, "unavailable", f"the last batch of {writer!r} is still being published")
        state = self._store.ledger.table(STAGE).get(writer)
        if state is not None and _is_decided(state["batch"], batch):
            self._drop(writer, stages)
            unroutable = state.get("unroutable", 0) if state["batch"] == batch else 0
            return {"decided": True, "duplicate": True, "released": True, "count": 0, "unroutable": unroutable}
        if len(set(stages)) < len(stages):
            raise bad_request("a stage is named twice")
        count = 0
        try:
            for name in stages:
                path = self._path(writer, name)
                info = read_info(path, self._store.disk)
                self._check_exchanges(permissions, info.exchanges)
                await self._check_topics(permissions, path, info.exchanges)
                count += info.count
            if mandatory:
                await self._check_routes([self._path(writer, name) for name in stages])
        except StageError as error:
            raise Refused(409, "data_loss", f"{error}; the batch was not published, run it again") from None
        except Refused as refused:
            if refused.status != 400:
                self._drop(writer, stages)
            raise
        now = self._store.ledger.table(STAGE).get(writer)
        if now is not None and (now["pending"] or now["batch"] == batch):  # somebody was faster
            raise Refused(503, "unavailable", f"another batch of {writer!r} is being published")
        for name in stages:
            # While rows were looked at, the stages may have been dropped: by a driver that has given up, for whom they are of
            # a batch that failed. Decided without them, the batch would be known, and its repetition never be published.
            if not self._store.disk.exists(self._path(writer, name)):
                raise Refused(409, "data_loss", f"stage {name} was dropped; the batch was not published, run it again")
        with self._store.lock:
            self._store.committer.check_publish()
            decided = {"batch": batch, "pending": list(stages), "offset": 0, "unroutable": 0}
            decided["at"] = time.time()
            self._store.ledger.put(STAGE, writer, decided)
            self._forget_old()
        self._start(writer)  # its records follow the decision's in the journal, so they are never safe before it
        await self._vhost.commits.safe()
        released = await self._released(writer, _WAIT_SECONDS)
        state = self._store.ledger.table(STAGE).get(writer) or {}
        unroutable = state.get("unroutable", 0) if state.get("batch") == batch else 0
        return {"decided": True, "duplicate": False, "released": released, "count": count, "unroutable": unroutable}

    def _forget_old(self) -> None:
        """Writers of one batch never come back, at most repeat it; a day later they are forgotten. Requires: the lock."""
        now = time.time()
        table = self._store.ledger.table(STAGE)
        for writer in [name for name, state in table.items() if now - state["at"] > _ORPHAN_SECONDS]:
            if table[writer]["batch"] == ONLY_BATCH and not table[writer]["pending"]:
                self._store.ledger.put(STAGE, writer, None)

    def _check_exchanges(self, permissions: Permissions, names: tuple[str, ...]) -> None:
        for name in names:
            exchange = self._vhost.router.exchanges.get(name)
            if exchange is None:
                raise not_found(
                    f"no exchange {name!r} in vhost {self._vhost.name!r}; declare it, or correct the option exchange"
                )
            if exchange.internal or not permissions.check("write", "exchange", name):
                raise forbidden(
                    f"user {permissions.user!r} may not write to exchange {name!r} in vhost {self._vhost.name!r}"
                )

    async def _check_topics(self, permissions: Permissions, path: str, exchanges: tuple[str, ...]) -> None:
        """Where the user's routing keys are narrowed, every row's are looked at."""
        narrowed = {
            name
            for name in exchanges
            if self._vhost.router.exchanges[name].type == "topic" and permissions.is_narrowed(name)
        }
        if not narrowed:
            return
        async for rows in _rows_of(path):
            for head in set(rows.heads):
                address = _address(head)
                for key in address.keys if address.exchange in narrowed else ():
                    if not permissions.check_topic(address.exchange, "write", key):
                        raise forbidden(
                            f"user {permissions.user!r} may not write to topic {key!r} of exchange {address.exchange!r}"
                        )

    async def _check_routes(self, paths: list[str]) -> None:
        """Refuse a batch of which some rows would go nowhere, and say how many and where they were sent."""
        lost = 0
        first: _Address | None = None
        for path in paths:
            async for rows in _rows_of(path):
                group = _Group(self._vhost, self._heads)
                for head, count in zip(rows.heads, rows.counts, strict=True):
                    if group.goes_nowhere(head):
                        lost += count
                        first = first or _address(head)
        if first is not None:
            raise Refused(
                409,
                "unroutable",
                f"mandatory=true: no queue takes {lost} rows, the first of them sent to exchange {first.exchange!r} with "
                f"routing key {first.keys[0]!r}. Nothing was published: bind a queue for them, or leave them out",
            )

    def drop(self, permissions: Permissions, *, writer: str, stages: list[str]) -> dict[str, Any]:
        """Stages that nobody will decide about any more."""
        return {"dropped": self._drop(_key(permissions, writer), stages)}

    def _drop(self, writer: str, stages: list[str]) -> int:
        state = self._store.ledger.table(STAGE).get(writer)
        kept = set(state["pending"]) if state else set()
        dropped = 0
        for path in [self._path(writer, name) for name in stages if name not in kept]:
            with contextlib.suppress(FileNotFoundError):
                self._store.disk.unlink(path)
                dropped += 1
        return dropped

    # -- release -------------------------------------------------------------------------------------------------------

    async def _released(self, writer: str, seconds: float) -> bool:
        """Wait until nothing of the writer is pending; False: it takes longer than that."""
        state = self._store.ledger.table(STAGE).get(writer)
        if state and state["pending"] and writer not in self._releasing and not self._stopping:
            self._start(writer)
        task = self._releasing.get(writer)
        if task is not None:
            await asyncio.wait({task}, timeout=seconds)
        state = self._store.ledger.table(STAGE).get(writer)
        return not (state and state["pending"])

    def _start(self, writer: str) -> None:
        task = asyncio.get_running_loop().create_task(self._release(writer))
        self._releasing[writer] = task
        task.add_done_callback(lambda _: self._releasing.pop(writer, None))

    async def _release(self, writer: str) -> None:
        while not self._stopping and self._store.ledger.table(STAGE)[writer]["pending"]:
            try:
                await self._release_first(writer)
            except Exception as error:  # no room on the disk, no descriptor, a queue that failed: it is tried again
                log.warning("vhost %r: publishing what %r decided waits: %r", self._vhost.name, writer, error)
                await asyncio.sleep(_TROUBLE_SECONDS)
        if self._stopping:  # the next start goes on
            return
        state = self._store.ledger.table(STAGE)[writer]
        if state.get("unroutable"):
            log.warning(
                "vhost %r: %d rows of batch %s of %r were dropped, because no queue takes them; the first was sent to "
                "exchange %r with routing key %r",
                self._vhost.name,
                state["unroutable"],
                state["batch"],
                writer,
                *state.get("nowhere") or ("", ""),
            )
        self._drop_undecided(writer)

    async def _release_first(self, writer: str) -> None:
        """The first pending stage of a writer. One that cannot be read does not hold up the others."""
        state = self._store.ledger.table(STAGE)[writer]
        path = stage_path(self._store.root, state["pending"][0])
        try:
            reader = StageReader(path, self._store.disk)
            try:
                await self._release_stage(writer, reader, state["offset"])
            finally:
                reader.close()
        except StageError as error:
            log.error("vhost %r: rows that were decided are lost: %s", self._vhost.name, error)
            with contextlib.suppress(FileNotFoundError):
                self._store.disk.rename(path, path + ".damaged")
            await self._advance(writer, None)
        if not self._stopping:
            with contextlib.suppress(FileNotFoundError):
                self._store.disk.unlink(path)

    async def _release_stage(self, writer: str, reader: StageReader, offset: int) -> None:
        while not self._stopping:
            await self._pace()
            rows = reader.read(offset, _ROWS, _BYTES)
            group = _Group(self._vhost, self._heads)
            taken = 0
            for head, count in zip(rows.heads, rows.counts, strict=True):
                added = group.add(head, rows.bodies[taken : taken + count])
                taken += added
                if added < count:
                    break  # a queue is full: wait for it
            offset = rows.ends[taken - 1] if taken else offset
            done = not rows.ends or offset >= reader.end
            if taken or done:
                await self._advance(writer, None if done else offset, group)
            if done:
                return
            if taken < len(rows.ends):
                await asyncio.sleep(_FULL_SECONDS)

    async def _pace(self) -> None:
        """Let others work, and wait where a publisher would have to."""
        await self._vhost.credit.admit()

    async def _advance(self, writer: str, offset: int | None, group: _Group | None = None) -> None:
        """Publish some rows and note how far it has come, as one; None: the stage is done."""
        state = self._store.ledger.table(STAGE)[writer]
        after = {**state, "offset": offset or 0}
        if offset is None:
            after["pending"] = state["pending"][1:]
        if group is not None and group.unroutable:
            after["unroutable"] = state.get("unroutable", 0) + group.unroutable
            after["nowhere"] = state.get("nowhere") or group.nowhere
        done = asyncio.get_running_loop().create_future()

        def told() -> None:
            if not done.done():
                done.set_result(None)

        arriving, delayed = (group.arriving, group.delayed) if group is not None else ({}, {})
        self._vhost.publish_with_state(arriving, delayed, (STAGE, writer, after), told)
        await done

    # -- litter --------------------------------------------------------------------------------------------------------

    def _drop_undecided(self, writer: str) -> None:
        """The writer's batch is out: whatever else it staged for it, or before it, nobody will ask for."""
        state = self._store.ledger.table(STAGE).get(writer)
        directory = stage_directory(self._store.root, writer)
        kept = {os.path.basename(name) for name in (state["pending"] if state else ())}
        self._drop_files(directory, lambda name, age: name not in kept and _is_of(name, state))
        with contextlib.suppress(OSError):  # there is something in it
            self._store.disk.rmdir(directory)

    async def _sweep(self) -> None:
        """Tasks that were killed and drivers that never came back leave stages that nobody decides about."""
        while True:
            try:
                self._drop_orphans()
            except OSError as error:
                log.warning("vhost %r: old stages cannot be dropped: %s", self._vhost.name, error)
            await asyncio.sleep(_SWEEP_SECONDS)

    def _drop_orphans(self) -> None:
        directory = os.path.join(self._store.root, STAGES)
        decided = {name for state in self._store.ledger.table(STAGE).values() for name in state["pending"]}
        for writer in self._store.disk.listdir(directory):

            def is_orphan(name: str, age: float, writer: str = writer) -> bool:
                return age > _ORPHAN_SECONDS and f"{writer}/{name}" not in decided

            self._drop_files(os.path.join(directory, writer), is_orphan)
            with contextlib.suppress(OSError):  # there is something in it
                self._store.disk.rmdir(os.path.join(directory, writer))

    def _drop_files(self, directory: str, is_litter: Callable[[str, float], bool]) -> None:
        now = time.time()
        for name in self._store.disk.listdir(directory):
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):  # the data server has renamed it
                if is_litter(name, now - self._store.disk.changed_at(path)):
                    self._store.disk.unlink(path)


async def _rows_of(path: str) -> AsyncIterator[StageRows]:
    """The rows of a stage, some at a time; others have their turn in between."""
    reader = StageReader(path)
    try:
        offset = 0
        while offset < reader.end:
            rows = reader.read(offset, _ROWS, _BYTES)
            if not rows.ends:
                break
            yield rows
            offset = rows.ends[-1]
            await asyncio.sleep(0)
    finally:
        reader.close()


def _key(permissions: Permissions, writer: str) -> str:
    """A writer is its user's: two users may have writers of one name."""
    if not isinstance(writer, str) or not 0 < len(writer) <= _MOST_NAME:
        raise bad_request(f"producerName is {writer!r}; it is a name of 1 to {_MOST_NAME} characters")
    return f"{permissions.user}:{writer}"


def _is_of(name: str, state: dict[str, Any] | None) -> bool:
    """Is a file of the batch that was decided last, or of one before it?"""
    return state is not None and _is_decided(state["batch"], batch_of(name))


def _is_decided(last: str, batch: str) -> bool:
    """Batch ids of a stream are numbers that rise, behind the id of its checkpoint; others are equal or not."""
    stream, _, number = batch.rpartition(".")
    same, _, decided = last.rpartition(".")
    if stream == same and number.isdigit() and decided.isdigit():
        return int(number) <= int(decided)
    return batch == last


def _address(head: bytes) -> _Address:
    said = decode_head(head)
    headers = said.headers
    blind = carbon_keys(headers.pop("BCC", None))
    if "BCC" in said.headers:
        head = rewritten(head, without_headers=("BCC",), blind=blind)
    priority = said.properties.get("priority")
    return _Address(
        head=head,
        exchange=said.exchange,
        keys=[*said.keys, *blind],
        headers=headers,
        properties=said.properties,
        persistent=said.properties.get("delivery_mode") == 2,
        priority=priority if isinstance(priority, int) else 0,
        expiration_us=expiration_us(said.properties),
    )
