"""What a vhost does over several queues at once, all or nothing: transactions, checkouts, settlements.

Each is one record group of the journal, under one CRC, never split: replay applies all of it or none.
"""

from __future__ import annotations

from collections.abc import Callable

from warren.errors import QueueNotFoundError
from warren.kernel.entry import Entry
from warren.kernel.journal_codec import CHECKOUT, LEASE
from warren.kernel.overlay import HIDDEN
from warren.storage.backing_queue import Checkout
from warren.storage.stored_queue import StoredQueue
from warren.storage.vhost_opening import VhostOpening


class VhostTransactions(VhostOpening):
    """The part of a vhost's store that works on several queues."""

    def get(self, name: str) -> StoredQueue:
        queue = self.queues.get(name)
        if queue is None:
            raise QueueNotFoundError(f"no queue {name!r} in vhost {self.vhost!r}")
        return queue

    def reserve(self, queue: StoredQueue, count: int) -> None:
        """Make sure that `count` seq_ids may be taken under the lock that follows. Called without the lock."""
        if self.lock._is_owned():  # type: ignore[attr-defined]  # the commit that is waited for needs it
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
        self._reserve_for(publishes)
        with self.lock:
            self.committer.check_publish() if publishes else self.committer.check()
            lsn = self._begin_transaction(publishes, acks, None)
        if lsn is not None:
            self.committer.sync(lsn)
        return [entry.seq for _, entry in publishes]

    def transact_later(
        self,
        publishes: list[tuple[StoredQueue, Entry]],
        acks: list[tuple[StoredQueue, list[int]]],
        done: Callable[[], None],
    ) -> None:
        """As `transact`, but returns at once. `done` is called when it is safe and visible: by the thread that committed
        it, with the lock. Requires: `has_seq_ids(publishes)`, under the same lock."""
        with self.lock:
            self.committer.check()
            self._begin_transaction(publishes, acks, done)

    def has_seq_ids(self, publishes: list[tuple[StoredQueue, Entry]]) -> bool:
        """May `transact_later` take its seq_ids now? Asks for reservations; False: try again after a commit."""
        wanted: dict[str, int] = {}
        for queue, _ in publishes:
            wanted[queue.name] = wanted.get(queue.name, 0) + 1
        answers = [self.get(name).seqs.available(count) for name, count in wanted.items()]  # all of them ask
        return all(answers)

    def _reserve_for(self, publishes: list[tuple[StoredQueue, Entry]]) -> None:
        wanted: dict[str, int] = {}
        for queue, _ in publishes:
            wanted[queue.name] = wanted.get(queue.name, 0) + 1
        for name, count in wanted.items():
            self.reserve(self.get(name), count)

    def _begin_transaction(
        self,
        publishes: list[tuple[StoredQueue, Entry]],
        acks: list[tuple[StoredQueue, list[int]]],
        done: Callable[[], None] | None,
    ) -> int | None:
        """The LSN whose sync makes it safe; None: there is nothing to wait for. Requires: the lock, reserved seq_ids."""
        for queue, entry in publishes:
            entry.seq = queue.seqs.take(1)
        if self.durability != "memory":
            self.journal.buffer.begin_group()
            try:
                for queue, entry in publishes:
                    queue.backing.journal_publish([entry], HIDDEN)
                for queue, acked in acks:
                    queue.backing.journal_ack(acked)
            except BaseException as error:  # half a group, and its acks are done in memory: only recovery helps
                self.committer.fail(error)
                raise
            self.journal.buffer.end_group()

        def apply() -> None:
            for queue, entry in publishes:
                queue.backing.reveal([entry])
            for queue, acked in acks:
                queue.backing.ack_committed(acked)
            if done is not None:
                done()

        if self.durability == "memory":
            apply()
            return None
        self.journal.after(apply)
        return self.journal.appended_lsn

    # -- leases ------------------------------------------------------------------------------------------------------

    def checkout(self, queue: StoredQueue, lease: str, limit: int, most_bytes: int = 1 << 62) -> Checkout | None:
        """Freeze ready messages from the head as the lease's next checkout; durable when this returns."""
        with self.lock:
            self.committer.check()
            state = self._lease(lease)
            ranges = queue.backing.checkout(limit, most_bytes)
            if not ranges:
                return None
            number = state["next"]
            self.journal.buffer.begin_group()
            self.ledger.put(LEASE, lease, {**state, "next": number + 1})
            self.ledger.put(
                CHECKOUT,
                f"{lease}/{number}",
                {"queue": queue.uid, "ranges": {str(sid): pairs for sid, pairs in ranges.items()}},
            )
            self.journal.buffer.end_group()
            lsn = self.journal.appended_lsn
        self.committer.sync(lsn)
        return Checkout(number, lease, ranges)

    def _lease(self, lease: str) -> dict[str, int]:
        """Its record; a new one where there is none, which is above the checkouts that damage has left of it."""
        state: dict[str, int] | None = self.ledger.table(LEASE).get(lease)
        if state is not None:
            return state
        last = max((checkout.number for checkout in self.checkouts(lease)), default=0)
        return {"epoch": 0, "floor": 0, "next": last + 1}

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
        settled = 0
        with self.lock:
            self.committer.check()
            due = [checkout for checkout in self.checkouts(lease) if checkout.number <= upto]
            if due:
                by_uid = {queue.uid: queue for queue in self.queues.values()}
                self.journal.buffer.begin_group()
                state = self._lease(lease)
                self.ledger.put(LEASE, lease, {**state, "floor": max(state["floor"], upto)})
                for checkout in due:
                    uid = self.ledger.table(CHECKOUT)[f"{lease}/{checkout.number}"]["queue"]
                    self.ledger.put(CHECKOUT, f"{lease}/{checkout.number}", None)
                    if uid in by_uid:
                        settled += by_uid[uid].backing.settle(checkout.ranges, requeue)
                self.journal.buffer.end_group()
            lsn = self.journal.appended_lsn
        self.committer.sync(lsn)
        return settled
