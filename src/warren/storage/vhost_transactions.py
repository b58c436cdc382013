"""What a vhost does over several queues at once, all or nothing: transactions, checkouts, settlements.

Each is one record group of the journal, under one CRC, never split: replay applies all of it or none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from warren.errors import QueueNotFoundError, WarrenError
from warren.kernel.entry import IN_STORE, PERSISTENT, Entry, renumber
from warren.kernel.journal_codec import CHECKOUT, LEASE
from warren.kernel.overlay import HIDDEN
from warren.storage.backing_queue import Checkout
from warren.storage.stored_queue import StoredQueue
from warren.storage.vhost_opening import VhostOpening

Arrival = tuple[StoredQueue, list[Entry]]  # messages for one queue; no queue is there twice


class VhostTransactions(VhostOpening):
    """The part of a vhost's store that works on several queues."""

    def get(self, name: str) -> StoredQueue:
        queue = self.queues.get(name)
        if queue is None:
            raise QueueNotFoundError(f"no queue {name!r} in vhost {self.vhost!r}")
        return queue

    def holds_lock(self) -> bool:
        """Does this thread have the engine's lock? Then it may not wait for a commit, which needs it."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    def reserve(self, queue: StoredQueue, count: int) -> None:
        """Make sure that `count` seq_ids may be taken under the lock that follows. Called without the lock."""
        if self.holds_lock():
            raise RuntimeError("reserve() is called without the lock: it waits for a commit")
        while True:
            with self.lock:
                self.committer.check_publish()
                if queue.seqs.available(count):
                    return
            self.committer.sync()

    # -- transactions ------------------------------------------------------------------------------------------------

    def transact(
        self, publishes: list[tuple[StoredQueue, Entry]], acks: list[tuple[StoredQueue, list[int]]]
    ) -> list[int]:
        """All of it or nothing, also across a crash: one record group. Visible once it is safe. The seq_ids."""
        grouped: dict[str, Arrival] = {}
        for queue, entry in publishes:
            grouped.setdefault(queue.name, (queue, []))[1].append(entry)
        arriving = list(grouped.values())
        for queue, entries in arriving:
            self.reserve(self.get(queue.name), len(entries))
        with self.lock:
            self.committer.check_publish() if publishes else self.committer.check()
            lsn = self._begin_transaction(arriving, acks, None)
        if lsn is not None:
            self.committer.sync(lsn)
        return [entry.seq for _, entry in publishes]

    def transact_later(
        self,
        arriving: list[Arrival],
        acks: list[tuple[StoredQueue, list[int]]],
        done: Callable[[], None],
        state: tuple[int, str, Any] | None = None,
    ) -> None:
        """As `transact`, but returns at once. `done` is called when it is safe and visible: by the thread that committed
        it, with the lock. `state` (record type, key, value) is put into the ledger as part of it. Requires:
        `has_seq_ids(arriving)`, under the same lock."""
        with self.lock:
            self.committer.check()
            self._begin_transaction(arriving, acks, done, state)

    def has_seq_ids(self, arriving: list[Arrival]) -> bool:
        """May `transact_later` take its seq_ids now? Asks for reservations; False: try again after a commit."""
        answers = [queue.seqs.available(len(entries)) for queue, entries in arriving]  # all of them ask
        return all(answers)

    def _begin_transaction(
        self,
        arriving: list[Arrival],
        acks: list[tuple[StoredQueue, list[int]]],
        done: Callable[[], None] | None,
        state: tuple[int, str, Any] | None = None,
    ) -> int | None:
        """The LSN whose sync makes it safe; None: there is nothing to wait for. Requires: the lock, reserved seq_ids."""
        for queue in (*(queue for queue, _ in arriving), *(queue for queue, _ in acks)):
            if self._is_deleted(queue):  # since the caller last had the lock; it has taken what it referred to with it
                raise QueueNotFoundError(f"queue {queue.name!r} in vhost {self.vhost!r} was deleted")
        for queue, entries in arriving:
            renumber(entries, queue.seqs.take(len(entries)))
        if self.durability != "memory":
            self.journal.buffer.begin_group()
            try:
                for queue, entries in arriving:
                    queue.backing.journal_publish(entries, HIDDEN)
                for queue, acked in acks:
                    queue.backing.journal_ack(acked)
                if state is not None:
                    self.ledger.put(*state)
            except BaseException as error:  # half a group, and its acks are done in memory: only recovery helps
                self.committer.fail(error)
                raise
            self.journal.buffer.end_group()

        def apply() -> None:
            for queue, entries in arriving:
                if self._is_deleted(queue):
                    self._drop_hidden(entries)
                else:
                    queue.backing.reveal(entries)
            for queue, acked in acks:
                if not self._is_deleted(queue):
                    queue.backing.ack_committed(acked)
            if done is not None:
                done()

        if self.durability == "memory":
            apply()
            return None
        self.journal.after(apply)
        return self.journal.appended_lsn

    def _is_deleted(self, queue: StoredQueue) -> bool:
        """By uid: a queue that was restarted is another object, and one of the same name may be another queue."""
        current = self.queues.get(queue.name)
        return current is None or current.uid != queue.uid

    def _drop_hidden(self, entries: list[Entry]) -> None:
        """Their queue was deleted between the record and its sync. It did not see them: what they hold in the message
        store is still counted."""
        both = IN_STORE | PERSISTENT
        self.store.remove_many([entry.msg_id for entry in entries if entry.flags & both == both])

    # -- leases ------------------------------------------------------------------------------------------------------

    def checkout(
        self, queues: StoredQueue | list[StoredQueue], lease: str, limit: int, most_bytes: int = 1 << 62
    ) -> Checkout | None:
        """Freeze ready messages from the heads as the lease's next checkout; durable when this returns."""
        with self.lock:
            made = self.begin_checkout(queues if isinstance(queues, list) else [queues], lease, limit, most_bytes)
            lsn = self.journal.appended_lsn
        if made is not None:
            self.committer.sync(lsn)
        return made

    def begin_checkout(
        self, queues: list[StoredQueue], lease: str, limit: int, most_bytes: int = 1 << 62
    ) -> Checkout | None:
        """As `checkout`, durable with the next commit. None: nothing is ready. Several queues share the limits by their
        lengths, so that none starves behind a long one."""
        with self.lock:
            self.committer.check()
            ready = [queue for queue in queues if not queue.backing.is_empty()]
            total = sum(len(queue.backing) for queue in ready)
            ranges: dict[int, list[int]] = {}
            for queue in ready:
                share = limit if total <= limit else min(limit, max(1, limit * len(queue.backing) // total))
                total -= len(queue.backing)
                head = queue.backing.peek()
                if ranges and head is not None and head.body_size > most_bytes:
                    continue
                before = queue.backing.ready_bytes()
                try:
                    taken = queue.backing.checkout(share, most_bytes)
                except WarrenError:
                    if not ranges:
                        raise
                    break  # what others gave is leased and needs its record; who comes again is told
                except Exception as error:  # what others gave already has no record: only recovery helps
                    self.committer.fail(error)
                    raise
                ranges.update(taken)
                limit -= sum(sum(pairs[1::2]) for pairs in taken.values())
                most_bytes -= before - queue.backing.ready_bytes()
                if limit <= 0 or most_bytes <= 0:
                    break
            if not ranges:
                return None
            state = self.lease(lease)
            number = state["next"]
            self.journal.buffer.begin_group()
            self.ledger.put(LEASE, lease, {**state, "next": number + 1})
            self.ledger.put(
                CHECKOUT, f"{lease}/{number}", {"ranges": {str(sid): pairs for sid, pairs in ranges.items()}}
            )
            self.journal.buffer.end_group()
        return Checkout(number, lease, ranges)

    def lease(self, lease: str) -> dict[str, Any]:
        """Its record; a new one where there is none, which is above the checkouts that damage has left of it."""
        state: dict[str, Any] | None = self.ledger.table(LEASE).get(lease)
        if state is not None:
            return state
        last = max((checkout.number for checkout in self.checkouts(lease)), default=0)
        # Born and epochs are never used twice by leases of one name: calls and tickets of a released one fit no other.
        born = time.time_ns()
        return {"born": born, "epoch": born, "floor": 0, "next": last + 1}

    def checkouts(self, lease: str) -> list[Checkout]:
        """Open checkouts of a lease, oldest first."""
        out = []
        for key, value in self.ledger.table(CHECKOUT).items():
            name, _, number = key.rpartition("/")
            if name == lease:
                ranges = {int(sid): pairs for sid, pairs in value["ranges"].items()}
                out.append(Checkout(int(number), lease, ranges))
        return sorted(out, key=lambda checkout: checkout.number)

    def settle(self, lease: str, upto: int, *, requeue: bool = False) -> int:
        """End all checkouts of a lease up to a number, as acked or ready again; one record group, idempotent."""
        with self.lock:
            settled = self.begin_settle(lease, upto, requeue=requeue)
            lsn = self.journal.appended_lsn
        self.committer.sync(lsn)
        return settled

    def begin_settle(self, lease: str, upto: int, *, requeue: bool = False) -> int:
        """As `settle`, durable with the next commit."""
        settled = 0
        with self.lock:
            self.committer.check()
            due = [checkout for checkout in self.checkouts(lease) if checkout.number <= upto]
            if due:
                by_uid = {queue.uid: queue for queue in self.queues.values()}
                self.journal.buffer.begin_group()
                state = self.lease(lease)
                self.ledger.put(LEASE, lease, {**state, "floor": max(state["floor"], upto)})
                try:
                    for checkout in due:
                        self.ledger.put(CHECKOUT, f"{lease}/{checkout.number}", None)
                        for uid in {sid >> 8 for sid in checkout.ranges}:
                            if uid in by_uid:
                                settled += by_uid[uid].backing.settle(checkout.ranges, requeue)
                except BaseException as error:  # half a group: only recovery helps
                    self.committer.fail(error)
                    raise
                self.journal.buffer.end_group()
        return settled
