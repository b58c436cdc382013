"""Leases: how a stream of Spark takes messages out of queues exactly once.

A lease is a name, as a consumer group's, with a number of *checkouts*: frozen sets of messages, journaled and synced before
anybody hears of them. Rules:

1. A stream's offset is the number of its last checkout. Asking for what follows offset n acks all checkouts up to n, in one
   record, and does so any number of times: `next(start=n)` is the commit.
2. Checkout n + 1, once made, never changes: it is answered again as it is. So a batch that is repeated has the same rows.
3. Messages of an open checkout are pending acks: they do not expire, are not purged, and survive a restart as checked out.
4. Whoever opens a lease raises its epoch. Calls of an older epoch are refused: of two queries on one lease one goes on.
   A lease that was released and made anew has its numbers again, and another `born`: offsets carry it.
5. A lease whose holder has not been heard of for `ACTIVE_SECONDS` is dormant: what is checked out stays so, all other
   messages are free for other consumers.
"""

from __future__ import annotations

import base64
import struct
import time
from typing import TYPE_CHECKING, Any

from warren.kernel.journal_codec import LEASE
from warren.kernel.ranges import RangeSet
from warren.queueing.queue_process import QueueProcess
from warren.storage.backing_queue import Checkout
from warren.storage.priority_queue import PriorityQueue
from warren.storage.stored_queue import StoredQueue, backing_kind
from warren.storage.variable_queue import VariableQueue
from warren.vhost.chosen_queues import choose
from warren.vhost.permissions import Permissions
from warren.vhost.refused import Refused, bad_request, data_loss, forbidden, not_found

if TYPE_CHECKING:
    from warren.vhost.vhost import Vhost

ACTIVE_SECONDS = 10.0
HEARTBEAT_SECONDS = 2.0
MOST_ROWS = 65_536  # of one checkout: the engine is not kept longer than that takes
_ALL = 1 << 62


class Leases:
    """The leases of one vhost; everything on its loop."""

    def __init__(self, vhost: Vhost) -> None:
        self._vhost = vhost
        self._store = vhost.store
        # When the holder of a lease was heard of. After a restart all holders have their time again.
        self._heard: dict[str, float] = dict.fromkeys(self._store.ledger.table(LEASE), time.monotonic())

    # -- the holder ----------------------------------------------------------------------------------------------------

    async def open(
        self,
        permissions: Permissions,
        *,
        lease: str,
        owner: str,
        queues: list[str] | None = None,
        pattern: str | None = None,
        takeover: bool = False,
        born: int | None = None,
        starting: str = "earliest",
    ) -> dict[str, Any]:
        """Take a lease, or take it over. `born`: only if it is still the lease that the caller knows, and not another one of
        its name. Its checkouts have the same numbers: whoever went on with it would ack what he has never seen."""
        if not lease or "/" in lease or len(lease) > 255:
            raise bad_request(f"lease is {lease!r}; it is a name of 1 to 255 characters without '/'")
        if len(owner) > 255 or len(pattern or "") > 1000 or len(queues or ()) > 1000:
            raise bad_request("owner has at most 255 characters, a pattern 1000, and a lease is on 1000 queues at most")
        if self._store.durability == "memory":
            raise bad_request("durability is 'memory': nothing that is checked out would survive; use 'os' or 'fsync'")
        chosen = self._sources(permissions, queues, pattern)
        self._own(permissions, lease)
        state = self._store.lease(lease)
        is_new = lease not in self._store.ledger.table(LEASE)
        if born is not None and is_new and self._store.checkouts(lease):
            state = {**state, "born": born}  # it was not released, which settles them: damage took its record
        elif born is not None and (is_new or state.get("born", 0) != born):
            raise data_loss(
                f"lease {lease!r} in vhost {self._vhost.name!r} is not the one that the checkpoint knows: that was released. "
                "Begin with a new checkpoint"
            )
        if not takeover and not is_new and state.get("owner") != owner and self._is_active(lease):
            raise Refused(
                409,
                "held",
                f"lease {lease!r} in vhost {self._vhost.name!r} is held by another query ({state.get('owner')}). Stop it, or "
                "give this one another lease",
            )
        if starting == "latest" and is_new and any(len(queue) for queue in chosen):
            raise bad_request(
                "startingOffsets=latest: the queue is not empty, and a stream that consumes takes what is ready from the "
                "head. Purge the queue, say earliest, or read it with mode=tap"
            )
        state = {
            **state,
            "epoch": state["epoch"] + 1,
            "owner": owner,
            "user": permissions.user,
            "queues": queues,
            "pattern": pattern,
        }
        with self._store.lock:
            self._store.ledger.put(LEASE, lease, state)
        self._hear(lease, chosen)
        await self._vhost.commits.safe()
        return {
            "epoch": state["epoch"],
            "born": state.get("born", 0),
            "floor": state["floor"],
            "next": state["next"],
            "queues": [queue.name for queue in chosen],
            "ready": sum(len(queue) for queue in chosen),
            "heartbeat_seconds": HEARTBEAT_SECONDS,
        }

    def _sources(self, permissions: Permissions, queues: list[str] | None, pattern: str | None) -> list[QueueProcess]:
        """The queues of a lease. Named ones must be fit for it; a pattern leaves out those that are not."""
        if not queues and pattern is None:
            raise bad_request("a lease is on queue or queuePattern; give one of them")
        fit: list[QueueProcess] = []
        for name, queue in choose(self._vhost, permissions, queues, pattern).items():
            kind = backing_kind(queue.stored.record)
            if queue.durable and kind == "variable":
                fit.append(queue)
            elif queues:
                why = "not durable" if not queue.durable else f"kept as x-backing-queue={kind}"
                raise bad_request(f"queue {name!r} is {why}; a stream that consumes needs a durable, variable one")
        return fit

    def _is_active(self, lease: str) -> bool:
        return time.monotonic() - self._heard.get(lease, -1e9) < ACTIVE_SECONDS

    def _hear(self, lease: str, queues: list[QueueProcess]) -> None:
        self._heard[lease] = time.monotonic()
        for queue in queues:
            queue.used()  # one that expires when nobody uses it

    def _own(self, permissions: Permissions, lease: str) -> dict[str, Any] | None:
        """The lease's record, if there is one. A lease is its user's: whoever goes on with it acks what it holds."""
        state: dict[str, Any] | None = self._store.ledger.table(LEASE).get(lease)
        if state is not None and state.get("user", permissions.user) != permissions.user:
            raise forbidden(f"lease {lease!r} in vhost {self._vhost.name!r} is another user's; use another lease")
        return state

    def _current(self, permissions: Permissions, lease: str, epoch: int) -> dict[str, Any]:
        """The lease's record, if its caller still holds it."""
        self._own(permissions, lease)
        state: dict[str, Any] | None = self._store.ledger.table(LEASE).get(lease)
        if state is None:
            raise not_found(f"no lease {lease!r} in vhost {self._vhost.name!r}; it was released")
        if state["epoch"] != epoch:
            raise Refused(
                409,
                "fenced",
                f"lease {lease!r} was taken over by another query ({state.get('owner')}); this one must stop",
            )
        self._hear(lease, self._sources(permissions, state["queues"], state["pattern"]))
        return state

    def heartbeat(self, permissions: Permissions, *, lease: str, epoch: int) -> dict[str, Any]:
        self._current(permissions, lease, epoch)
        return {"active": True}

    async def next(
        self,
        permissions: Permissions,
        *,
        lease: str,
        epoch: int,
        start: int,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        min_rows: int | None = None,
    ) -> dict[str, Any]:
        """Ack everything up to `start`; what follows it."""
        state = self._current(permissions, lease, epoch)
        where = f"lease {lease!r} in vhost {self._vhost.name!r}"
        if state["floor"] > start:
            raise data_loss(
                f"{where}: the stream is at {start}, but everything up to {state['floor']} was settled. Its checkpoint is "
                "too old, or the lease was requeued: begin with a new checkpoint"
            )
        if start >= state["next"]:
            raise data_loss(
                f"{where} knows no checkout {start}: it was released and made anew. Begin with a new checkpoint"
            )
        queues = self._sources(permissions, state["queues"], state["pattern"])
        self._store.begin_settle(lease, start)
        made = self._store.checkouts(lease)
        ready = sum(len(queue) for queue in queues)
        if not made and ready >= max(1, min_rows or 0):
            stored = [queue.stored for queue in queues]
            made = await self._freeze(lease, epoch, stored, max_rows or _ALL, max_bytes or _ALL)
        await self._vhost.commits.safe()
        return {
            "end": made[-1].number if made else start,
            "rows": sum(checkout.count for checkout in made),
            "ready": sum(len(queue) for queue in queues),
        }

    async def _freeze(self, lease: str, epoch: int, queues: list[StoredQueue], rows: int, size: int) -> list[Checkout]:
        """Checkouts of what is ready now, up to so many rows and bytes. Several, if they are many."""
        made: list[Checkout] = []
        left = min(rows, sum(len(queue.backing) for queue in queues))
        while left > 0:
            wanted = min(left, MOST_ROWS)
            with self._store.lock:
                before = sum(queue.backing.ready_bytes() for queue in queues)
                checkout = self._store.begin_checkout(queues, lease, wanted, size)
                size -= before - sum(queue.backing.ready_bytes() for queue in queues)
            if checkout is None:
                break
            made.append(checkout)
            left -= checkout.count
            if not left or (size < _ALL // 2 and checkout.count < wanted):  # the bytes are used up
                break
            await self._vhost.commits.safe()  # others have their turn
            state = self._store.ledger.table(LEASE).get(lease)
            if state is None or state["epoch"] != epoch:
                raise Refused(409, "fenced", f"lease {lease!r} was taken over, or released")
        return made

    # -- reading -------------------------------------------------------------------------------------------------------

    def describe(self, permissions: Permissions, *, lease: str, epoch: int, first: int, last: int) -> dict[str, Any]:
        """What is in checkouts `first` to `last`."""
        state = self._current(permissions, lease, epoch)
        if first <= state["floor"] and first <= last:
            raise data_loss(f"checkout {first} of lease {lease!r} was settled before; begin with a new checkpoint")
        names = {queue.stored.uid: queue.name for queue in self._vhost.queues.values()}
        missing = 0
        found = {checkout.number: checkout for checkout in self._store.checkouts(lease)}
        checkouts = []
        for number in range(first, last + 1):
            if number not in found:
                raise data_loss(f"checkout {number} of lease {lease!r} is not there; begin with a new checkpoint")
            streams = []
            for sid, pairs in found[number].ranges.items():
                name = names.get(sid >> 8)
                if name is None:
                    self._refuse_down(sid >> 8)
                    missing += sum(pairs[1::2])  # deleted, with everything in it
                    continue
                if not permissions.check("read", "queue", name):
                    raise forbidden(f"user {permissions.user!r} may not read queue {name!r}")
                streams.append({"queue": name, "sid": sid, "count": sum(pairs[1::2]), "ranges": _packed(pairs)})
            checkouts.append({"number": number, "streams": streams})
        return {"checkouts": checkouts, "root": self._store.root, "born": state.get("born", 0), "missing": missing}

    def _refuse_down(self, uid: int) -> None:
        """A queue that failed too often is not a queue that was deleted."""
        for stored in self._store.queues.values():
            if stored.uid == uid:
                raise Refused(503, "unavailable", f"queue {stored.name!r} in vhost {self._vhost.name!r} is down")

    def plan(self, *, lease: str, born: int, number: int, sid: int, first: int, stop: int) -> dict[str, Any]:
        """Where messages of a checkout are now. Files may move before they are read: then it is asked for again."""
        found = [checkout for checkout in self._store.checkouts(lease) if checkout.number == number]
        if self._store.lease(lease).get("born", 0) != born:
            found = []  # of another lease of that name
        if not found or sid not in found[0].ranges:
            raise data_loss(f"checkout {number} of lease {lease!r} is settled; its messages are gone")
        parts: list[dict[str, Any]] = []
        queue = next((queue for queue in self._vhost.queues.values() if queue.stored.uid == sid >> 8), None)
        if queue is None:
            self._refuse_down(sid >> 8)
        else:
            with self._store.lock:
                level = _level(queue.stored, sid)
                wanted = RangeSet(found[0].ranges[sid]).pairs(first, stop)
                parts.append(self._part(queue, level, wanted))
        return {"vhost": self._vhost.name, "root": self._store.root, "parts": parts}

    def _part(self, queue: QueueProcess, level: VariableQueue, wanted: list[int]) -> dict[str, Any]:
        """As `StreamPart` of the pipeline is written in JSON. Requires: the engine's lock."""
        index = level.index
        size = index.segment_size
        only: list[int] = []
        for i in range(0, len(wanted), 2):
            only += level.leased.pairs(wanted[i], wanted[i] + wanted[i + 1])
        rows = []
        segments: set[int] = set()
        for i in range(0, len(only), 2):
            first, count = only[i], only[i + 1]
            rows.append(index.overlay.rows_between(first, first + count, count))
            segments.update(range(first // size, (first + count - 1) // size + 1))
        self._store.transient_store.flush()
        counts = level.counts
        return {
            "vhost": self._vhost.name,
            "queue": queue.name,
            "sid": index.sid,
            "directory": index.files.directory.removeprefix(self._store.root).strip("/"),
            "segment_size": size,
            "boot": self._store.boot,
            "segments": sorted(segments & index.segments.keys()),
            "only": _packed(only),
            "rows": base64.b64encode(b"".join(rows)).decode(),
            "unacked": _packed(only),
            "redelivered_below": level.redelivered_below,
            "returned": _packed(level.returned.pairs()),
            "counts": [[seq, counts[seq]] for seq in counts.keys() & set(RangeSet(only))] if counts else [],
        }

    # -- the operator --------------------------------------------------------------------------------------------------

    def list(self, permissions: Permissions) -> dict[str, Any]:
        """All leases, also dormant ones."""
        now = time.monotonic()
        leases = []
        for name, state in sorted(self._store.ledger.table(LEASE).items()):
            if state.get("user", permissions.user) != permissions.user and not permissions.check(
                "configure", "queue", (state.get("queues") or [state.get("pattern") or ""])[0]
            ):
                continue
            made = self._store.checkouts(name)
            heard = self._heard.get(name)
            leases.append(
                {
                    "vhost": self._vhost.name,
                    "lease": name,
                    "state": "active" if self._is_active(name) else "dormant",
                    "owner": state.get("owner"),
                    "epoch": state["epoch"],
                    "floor": state["floor"],
                    "queues": state.get("queues"),
                    "pattern": state.get("pattern"),
                    "checkouts": [checkout.number for checkout in made],
                    "messages": sum(checkout.count for checkout in made),
                    "heard_seconds_ago": None if heard is None else round(now - heard, 1),
                }
            )
        return {"leases": leases}

    async def requeue(self, permissions: Permissions, *, lease: str) -> dict[str, Any]:
        """Put everything that is checked out back into its queues. A stream that was at work must begin anew."""
        state = self._held(permissions, lease)
        with self._store.lock:
            self._store.ledger.put(LEASE, lease, {**state, "epoch": state["epoch"] + 1})
        touched = {sid >> 8 for checkout in self._store.checkouts(lease) for sid in checkout.ranges}
        count = self._store.begin_settle(lease, state["next"] - 1, requeue=True)
        await self._vhost.commits.safe()
        for queue in list(self._vhost.queues.values()):
            if queue.stored.uid in touched:
                queue.came_back()
        return {"requeued": count}

    async def release(self, permissions: Permissions, *, lease: str, requeue: bool = False) -> dict[str, Any]:
        """Forget a lease. One with open checkouts only with `requeue`."""
        epoch = self._held(permissions, lease)["epoch"]
        made = self._store.checkouts(lease)
        if made and not requeue:
            count = sum(checkout.count for checkout in made)
            raise Refused(
                409,
                "held",
                f"lease {lease!r} has {count} messages checked out; requeue them first: warren leases requeue {lease}",
            )
        done: dict[str, Any] = {"requeued": 0}
        if made:
            done = await self.requeue(permissions, lease=lease)
            epoch += 1
        with self._store.lock:
            state = self._store.ledger.table(LEASE).get(lease)
            # While the requeue was committed a query may have opened the lease: its checkouts must not lose their record.
            if state is not None and (state["epoch"] != epoch or self._store.checkouts(lease)):
                raise Refused(
                    409,
                    "held",
                    f"lease {lease!r} was opened by another query ({state.get('owner')}) while it was released, and is kept; "
                    f"{done['requeued']} messages were requeued. Stop that query, then release the lease again",
                )
            self._store.ledger.put(LEASE, lease, None)
        self._heard.pop(lease, None)
        await self._vhost.commits.safe()
        return {**done, "released": True}

    def _held(self, permissions: Permissions, lease: str) -> dict[str, Any]:
        """For its user, and for those who may configure all queues that it has messages of, or is on. A pattern is taken for
        a name, as in the list: a lease on no queue must be released by somebody, too, when its user is gone."""
        state: dict[str, Any] | None = self._store.ledger.table(LEASE).get(lease)
        if state is None:
            raise not_found(f"no lease {lease!r} in vhost {self._vhost.name!r}")
        if state.get("user") == permissions.user:
            return state
        held = {sid >> 8 for checkout in self._store.checkouts(lease) for sid in checkout.ranges}
        names = {queue.name for queue in self._vhost.queues.values() if queue.stored.uid in held}
        names.update(state.get("queues") or [state.get("pattern") or ""])
        if not all(permissions.check("configure", "queue", name) for name in names):
            raise forbidden(f"lease {lease!r} is another user's, and {permissions.user!r} may not configure its queues")
        return state


def _level(stored: StoredQueue, sid: int) -> VariableQueue:
    backing = stored.backing
    level = backing.levels[sid & 255] if isinstance(backing, PriorityQueue) else backing
    assert isinstance(level, VariableQueue)
    return level


def _packed(pairs: list[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(pairs)}Q", *pairs)).decode()
