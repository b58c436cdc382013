"""What a vhost does over several queues at once, all or nothing: transactions, checkouts, settlements.

Each is one record group of the journal, under one CRC, never split: replay applies all of it or none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Sized
from typing import Any

from warren.errors import QueueNotFoundError, WarrenError
from warren.kernel.entry import IN_STORE, PERSISTENT, Entry, renumber
from warren.kernel.journal_codec import CHECKOUT, LEASE, MOST_TARGETS
from warren.kernel.overlay import HIDDEN, LIVE
from warren.storage.backing_queue import Checkout
from warren.storage.payload import join_payload
from warren.storage.stored_queue import StoredQueue, backing_kind, journal_target
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

    def may_begin(self, arriving: Sequence[tuple[StoredQueue, Sized]]) -> bool:
        """Is each queue there, with seq_ids for what arrives in it? False: let go of the lock, sync, try again; after a
        `reserve` without the lock, others may have taken them, or deleted it. Requires: the lock."""
        self.committer.check_publish() if arriving else self.committer.check()
        for queue, _ in arriving:
            self._check_exists(queue)
        return self.has_seq_ids(arriving)

    # -- transactions ------------------------------------------------------------------------------------------------

    def transact(
        self, publishes: list[tuple[StoredQueue, Entry]], acks: list[tuple[StoredQueue, list[int]]]
    ) -> list[int]:
        """All of it or nothing, also across a crash: one record group. Visible once it is safe. The seq_ids."""
        grouped: dict[str, Arrival] = {}
        for queue, entry in publishes:
            grouped.setdefault(queue.name, (queue, []))[1].append(entry)
        arriving = list(grouped.values())
        while True:
            with self.lock:
                if self.may_begin(arriving):
                    lsn = self.begin_transaction(arriving, acks, None)
                    break
            self.committer.sync()
        if lsn is not None:
            self.committer.sync(lsn)
        return [entry.seq for _, entry in publishes]

    def transact_later(
        self,
        arriving: list[Arrival],
        acks: list[tuple[StoredQueue, list[int]]],
        done: Callable[[], None],
        state: tuple[int, str, Any] | None = None,
    ) -> int | None:
        """As `transact`, but returns at once. `done` is called when it is safe and visible: by the thread that committed
        it, with the lock. `state` (record type, key, value) is put into the ledger as part of it. Returns the LSN whose sync
        makes it safe; None: it is done. Requires: `has_seq_ids(arriving)`, under the same lock."""
        with self.lock:
            self.committer.check()
            return self.begin_transaction(arriving, acks, done, state)

    def has_seq_ids(self, arriving: Sequence[tuple[StoredQueue, Sized]]) -> bool:
        """May `transact_later` take its seq_ids now? Asks for reservations; False: try again after a commit."""
        answers = [queue.seqs.available(len(entries)) for queue, entries in arriving]  # all of them ask
        return all(answers)

    def begin_transaction(
        self,
        arriving: list[Arrival],
        acks: list[tuple[StoredQueue, list[int]]],
        done: Callable[[], None] | None,
        state: tuple[int, str, Any] | None = None,
    ) -> int | None:
        """As `transact_later`. If this raises, and the store has not failed, nothing has happened. Requires: the lock,
        reserved seq_ids."""
        for queue in (*(queue for queue, _ in arriving), *(queue for queue, _ in acks)):
            self._check_exists(queue)

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

        for queue, entries in arriving:
            renumber(entries, queue.seqs.take(len(entries)))
        if self.durability == "memory":
            apply()
            return None

        def append() -> None:
            for queue, entries in arriving:
                queue.backing.journal_publish(entries, HIDDEN)
            for queue, acked in acks:
                queue.backing.journal_ack(acked)
            if state is not None:
                self.ledger.put(*state)
            self.journal.after(apply)

        self.as_group(append)
        return self.journal.next_lsn

    def as_group(self, append: Callable[[], None]) -> None:
        """Make what `append` appends one record, under one CRC. Where that fails, or its thread is called away, there is
        half a group, which would swallow all that follows, and what it did in memory has no record: only recovery helps.
        Requires: the lock."""
        try:
            self.journal.buffer.begin_group()
            append()
            self.journal.buffer.end_group()
        except BaseException as error:
            self.committer.fail(error)
            raise

    def _check_exists(self, queue: StoredQueue) -> None:
        if self._is_deleted(queue):  # since the caller last had the lock; it has taken what it referred to with it
            raise QueueNotFoundError(f"queue {queue.name!r} in vhost {self.vhost!r} was deleted")

    def _is_deleted(self, queue: StoredQueue) -> bool:
        """By uid: a queue that was restarted is another object, and one of the same name may be another queue."""
        current = self.queues.get(queue.name)
        return current is None or current.uid != queue.uid

    def _drop_hidden(self, entries: list[Entry]) -> None:
        """Their queue was deleted between the record and its sync. It did not see them: what they hold in the message
        store is still counted."""
        both = IN_STORE | PERSISTENT
        self.store.remove_many([entry.msg_id for entry in entries if entry.flags & both == both])

    # -- one message to many queues ----------------------------------------------------------------------------------

    def _may_fan_out(self, queues: list[StoredQueue]) -> bool:
        """As `may_begin`, for one message to each."""
        self.committer.check_publish()
        ready = True
        for queue in queues:
            if self.queues.get(queue.record.name) is not queue:
                self._check_exists(queue)
            ready = queue.seqs.available(1) and ready  # all of them ask
        return ready

    def _copies(
        self,
        queues: list[StoredQueue],
        head: bytes,
        body: bytes,
        persistent: bool,
        published_at: int,
        expiry: int,
        level: int,
        times_to_live: list[int] | None,
    ) -> list[Entry]:
        """An entry of one message for each queue, with its seq_id; those that are to share a stored body do."""
        persistent = persistent and self.durability != "memory"
        large = 4 + len(head) + len(body) >= self.settings.embed_below
        refers = 0
        entries = []
        for number, queue in enumerate(queues):
            kind = backing_kind(queue.record)
            flags = PERSISTENT if persistent and queue.record.durable and kind != "volatile" else 0
            if large and flags and kind == "variable":
                flags |= IN_STORE
                refers += 1
            ttl = times_to_live[number] if times_to_live is not None else -1
            ends = expiry if ttl < 0 or 0 < expiry <= published_at + ttl else published_at + ttl
            entry = Entry(queue.seqs.take(1), head, body, flags, published_at, ends)
            entry.level = level
            entries.append(entry)
        if refers:
            msg_id = self.store.next_id()
            self.store.write(msg_id, join_payload(head, body), refers)
            for entry in entries:
                if entry.flags & IN_STORE:
                    entry.msg_id = msg_id
        return entries

    def _append_fanout(
        self, queues: list[StoredQueue], entries: list[Entry], producer: str | None, publishing_id: int
    ) -> None:
        """One record; more in a group where some queues refer to the message store and others must not, or where they are
        too many."""
        records: dict[int, list[tuple[StoredQueue, Entry]]] = {}
        for queue, entry in zip(queues, entries, strict=True):
            if entry.flags & PERSISTENT:
                records.setdefault(entry.flags & IN_STORE, []).append((queue, entry))
        if not records:
            return
        name = producer.encode(errors="surrogateescape") if producer is not None else None
        parts = [pairs[i : i + MOST_TARGETS] for pairs in records.values() for i in range(0, len(pairs), MOST_TARGETS)]

        def append() -> None:
            for pairs in parts:
                targets = [journal_target(queue, entry) for queue, entry in pairs]
                self.journal.buffer.append_fanout(pairs[0][1], targets, LIVE, publishing_id, name)

        if len(parts) > 1:
            self.as_group(append)
        else:
            append()
        if producer is not None:
            for queue in queues:
                self.producers.published(queue.uid, producer, publishing_id, self.journal.buffer.file)

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
            held = {"ranges": {str(sid): pairs for sid, pairs in ranges.items()}}

            def append() -> None:
                self.ledger.put(LEASE, lease, {**state, "next": number + 1})
                self.ledger.put(CHECKOUT, f"{lease}/{number}", held)

            self.as_group(append)
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
            by_uid = {queue.uid: queue for queue in self.queues.values()} if due else {}
            state = self.lease(lease)

            def append() -> None:
                nonlocal settled
                self.ledger.put(LEASE, lease, {**state, "floor": max(state["floor"], upto)})
                for checkout in due:
                    self.ledger.put(CHECKOUT, f"{lease}/{checkout.number}", None)
                    for uid in {sid >> 8 for sid in checkout.ranges}:
                        if uid in by_uid:
                            settled += by_uid[uid].backing.settle(checkout.ranges, requeue)

            if due:
                self.as_group(append)
        return settled


def accept_each(queues: list[StoredQueue], entries: list[Entry]) -> list[tuple[StoredQueue, Exception]]:
    """One entry to each queue; those that could not take it. One that cannot keeps it from no other."""
    failures: list[tuple[StoredQueue, Exception]] = []
    for queue, entry in zip(queues, entries, strict=True):
        try:
            queue.backing.accept([entry])
        except Exception as error:
            failures.append((queue, error))
    return failures
