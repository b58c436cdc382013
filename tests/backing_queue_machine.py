"""The state machine that every backing queue is put through, and the plain model that says what it must do.

The model is a dict of messages for each queue: ready, pending or leased, with the flags that a consumer is shown. What
makes it more than a dict are crashes. Every change carries the LSN whose sync makes it safe; so after a crash the model
knows of each message whether it must be there, must not, or may: that is the uncertain set. The engine's answer must lie
in between, and is what the model goes on with.

A run that failed is printed as a program. It can be pasted and run as it is:

    from tests.backing_queue_machine import *

    state = VariableTable()
    state.publish(queue='a', messages=[(20, True, 0)], confirm=False)
    state.crash(mode='none', seed=0)
    state.teardown()
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.faulty_disk import FaultyDisk, PowerCut
from tests.small_engine import HEAD, TINY, make_entries, open_engine, temporary_root
from warren.errors import StoreFailedError
from warren.kernel.entry import PERSISTENT, Delivery, Entry, deliveries
from warren.kernel.journal_codec import CHECKOUT
from warren.storage.priority_queue import PriorityQueue
from warren.storage.variable_queue import VariableQueue
from warren.storage.vhost_store import StoredQueue, VhostStore

LEVELS = 3
QUEUES = ("a", "b", "t")  # t is not durable
UNNUMBERED = 2**63  # the seq_id of an entry that has none yet

READY, PENDING, LEASED = "ready", "pending", "leased"

queues = st.sampled_from(["a", "a", "a", "b", "t"])
sizes = st.sampled_from([0, 20, 20, 20, 200, 300, 1500, 6000])  # from 256 on, with head, in the message store
specs = st.tuples(sizes, st.booleans(), st.integers(0, LEVELS - 1))  # size, persistent, level
messages = st.lists(specs, min_size=1, max_size=10)
picks = st.lists(st.integers(0, 30), min_size=1, max_size=6)  # each chooses one of what there is
counts = st.integers(1, 30)
modes = st.sampled_from(["none", "all", "random", "process"])
seeds = st.integers(0, 255)
# A process that was just started has little to lose.
has_lived = precondition(lambda self: self.steps > 6)


@dataclass(slots=True, eq=False)
class Message:
    seq: int
    body: bytes
    level: int
    persistent: bool  # and so is its queue
    safe: int  # the LSN that makes its publish safe
    state: str = READY
    returned: bool = False
    count: int = 0
    history: list[tuple[int, int]] = field(default_factory=list)  # (LSN, delivery count from then on)
    removed: int = 0  # the LSN that makes its end safe; 0: it is there

    @property
    def size(self) -> int:
        return len(self.body)


@dataclass(slots=True, eq=False)
class QueueModel:
    uid: int
    keeps: bool  # persistent messages survive
    has_levels: bool
    messages: dict[int, Message] = field(default_factory=dict)
    removed: dict[int, Message] = field(default_factory=dict)
    highest: int = -1  # seq_id handed out so far
    redelivered_below: int = 0
    unconfirmed: set[int] = field(default_factory=set)

    def in_state(self, state: str) -> list[Message]:
        """In the order in which they leave."""
        found = [message for message in self.messages.values() if message.state == state]
        return sorted(found, key=lambda message: (-message.level, message.seq))

    def remove(self, messages: list[Message], lsn: int) -> None:
        for message in messages:
            del self.messages[message.seq]
            message.removed = lsn
            self.removed[message.seq] = message

    def requeue(self, messages: list[Message], lsn: int, count_delivery: bool) -> None:
        for message in messages:
            message.state = READY
            message.returned = True
            if count_delivery:
                message.count += 1
                message.history.append((lsn, message.count))

    def redelivered(self, message: Message) -> bool:
        return message.returned or message.seq < self.redelivered_below


@dataclass(slots=True, eq=False)
class Transaction:
    lsn: int
    published: list[tuple[str, int]]  # what is persistent, as (queue, seq_id)
    acked: list[tuple[str, Message]]


@dataclass(slots=True, eq=False)
class CheckoutModel:
    queue: str
    uid: int
    seqs: list[int]
    lsn: int
    settled: int = 0  # the LSN of its end
    requeued: bool = False


class BackingQueueMachine(RuleBasedStateMachine):
    """`kind` and `store_index` are set by the subclasses at the end."""

    kind: ClassVar[str] = "variable"
    store_index: ClassVar[str] = "table"
    lives: ClassVar[int] = 0  # examples that were run

    def __init__(self) -> None:
        super().__init__()
        type(self).lives += 1
        self._temporary = temporary_root()
        self.disk = FaultyDisk(self._temporary.name + "/disk")
        self.store: VhostStore = self._open()
        self.queues: dict[str, QueueModel] = {}
        self.checkouts: dict[tuple[str, int], CheckoutModel] = {}
        self.transactions: list[Transaction] = []
        self.uids: set[int] = set()
        self.steps = 0  # since the process began
        self._declare_missing()

    def _open(self) -> VhostStore:
        # Paging in small batches as well as at once: the two indexes have nothing to do with it, and share the work.
        batch = 1 if self.store_index == "table" else 4
        settings = replace(TINY, store_index=self.store_index, io_batch=batch, ram_slack=batch - 1)
        return open_engine(self.disk.root, self.disk, settings=settings)

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self.kind == "priority":
            arguments["x-max-priority"] = LEVELS - 1
        elif self.kind == "sqlite":
            arguments = {"x-backing-queue": "sqlite", "x-max-priority": LEVELS - 1}
        elif self.kind == "volatile":
            arguments["x-backing-queue"] = "volatile"
        return arguments

    def _declare_missing(self) -> None:
        for name in QUEUES:
            if name not in self.store.queues:
                queue = self.store.declare(name, durable=name != "t", arguments=self._arguments())
                assert queue.uid not in self.uids, "a uid is never reused"
                self.uids.add(queue.uid)
                keeps = name != "t" and self.kind != "volatile"
                self.queues[name] = QueueModel(queue.uid, keeps, self.kind in ("priority", "sqlite"))

    # -- small things ------------------------------------------------------------------------------------------------

    def _both(self, name: str) -> tuple[StoredQueue, QueueModel]:
        return self.store.get(name), self.queues[name]

    @property
    def _lsn(self) -> int:
        """The LSN that makes everything until now safe."""
        return self.store.journal.appended_lsn

    def _pick(self, messages: list[Message], picks: list[int]) -> list[Message]:
        chosen: dict[int, Message] = {}
        for pick in picks:
            if messages:
                message = messages[pick % len(messages)]
                chosen[message.seq] = message
        return list(chosen.values())

    def _entries(self, name: str, specs: list[tuple[int, bool, int]]) -> list[Entry]:
        """Entries as a publisher makes them, with their seq_ids; their bodies tell where they belong."""
        queue, model = self._both(name)
        entries = make_entries(self.store, queue, [b""] * len(specs), persistent=True)
        made = [
            self._entry(name, entry.seq, size, persistent, level)
            for entry, (size, persistent, level) in zip(entries, specs, strict=True)
        ]
        self._number(model, [entry.seq for entry in made])
        return made

    def _entry(self, name: str, seq: int, size: int, persistent: bool, level: int) -> Entry:
        queue, model = self._both(name)
        body = (f"{name}{queue.uid}-{seq}-".encode() * (size // 4 + 1))[:size] if size else b""
        entry = Entry(seq, HEAD, body, PERSISTENT if persistent and queue.durable else 0, 1)
        entry.level = level if model.has_levels else 0
        return entry

    def _number(self, model: QueueModel, seqs: list[int]) -> None:
        for seq in seqs:
            assert seq > model.highest, f"seq_id {seq} was handed out before"
            model.highest = seq

    def _as_messages(self, name: str, entries: list[Entry]) -> list[Message]:
        """Taken before the engine gets the entries: it may page them out at once."""
        keeps = self.queues[name].keeps
        return [Message(e.seq, e.body, e.level, bool(e.flags & PERSISTENT) and keeps, 0) for e in entries]

    def _added(self, name: str, messages: list[Message], lsn: int, state: str = READY) -> None:
        for message in messages:
            message.safe, message.state = lsn, state
            self.queues[name].messages[message.seq] = message

    def _shown(self, name: str, entries: list[Entry], expected: list[Message]) -> None:
        """What was handed out is what the model would hand out, to the last flag."""
        queue, model = self._both(name)
        backing = queue.backing
        made = deliveries(Delivery, list(entries), queue, backing.redelivered_below, backing.returned, backing.counts)
        assert [delivery.entry.seq for delivery in made] == [message.seq for message in expected]
        for delivery, message in zip(made, expected, strict=True):
            entry = delivery.entry
            assert (entry.body, entry.head) == (message.body, HEAD), message.seq
            assert (entry.body_size, entry.level, entry.published_at) == (message.size, message.level, 1), message.seq
            assert bool(entry.flags & PERSISTENT) == message.persistent or self.kind == "volatile", message.seq
            assert delivery.redelivered == model.redelivered(message), message.seq
            assert delivery.delivery_count == message.count, message.seq

    # -- in ----------------------------------------------------------------------------------------------------------

    @initialize(count=st.integers(0, 40), ram_target=st.integers(0, 12))
    def begin(self, count: int, ram_target: int) -> None:
        """With some messages there, so that few steps go deep."""
        self.set_ram_target(queue="a", count=ram_target)
        self.publish_many(queue="a", count=count, size=20, transient_every=5, level_every=4)

    @rule(
        queue=queues,
        count=st.integers(5, 30),
        size=sizes,
        transient_every=st.integers(1, 6),
        level_every=st.integers(1, 6),
    )
    def publish_many(self, queue: str, count: int, size: int, transient_every: int, level_every: int) -> None:
        messages = [(size, n % transient_every > 0, n // level_every % LEVELS) for n in range(count)]
        if messages:
            self.publish(queue=queue, messages=messages, confirm=True)

    @rule(queue=queues, messages=messages, confirm=st.booleans())
    def publish(self, queue: str, messages: list[tuple[int, bool, int]], confirm: bool) -> None:
        entries = self._entries(queue, messages)
        added = self._as_messages(queue, entries)
        self.store.get(queue).backing.publish(entries, confirm)
        self._added(queue, added, self._lsn)
        if confirm:
            self.queues[queue].unconfirmed.update(message.seq for message in added)

    @precondition(lambda self: any(queue.backing.is_empty() for queue in self.store.queues.values()))
    @rule(queue=queues, messages=messages, confirm=st.booleans())
    def publish_delivered(self, queue: str, messages: list[tuple[int, bool, int]], confirm: bool) -> None:
        if self.store.get(queue).backing.is_empty():
            entries = self._entries(queue, messages)
            added = self._as_messages(queue, entries)
            self.store.get(queue).backing.publish_delivered(entries, confirm)
            self._added(queue, added, self._lsn, PENDING)
            if confirm:
                self.queues[queue].unconfirmed.update(message.seq for message in added)

    @rule(size=sizes, persistent=st.booleans(), level=st.integers(0, LEVELS - 1))
    def fan_out(self, size: int, persistent: bool, level: int) -> None:
        body = b"fan-out " * (size // 8)
        targets = [self.store.get(name) for name in QUEUES]
        level = level if self.queues["a"].has_levels else 0
        made = self.store.fan_out(targets, HEAD, body, persistent=persistent, published_at=1, level=level)
        seqs = [entry.seq for entry in made]
        for name, seq in zip(QUEUES, seqs, strict=True):
            self._number(self.queues[name], [seq])
            safe = persistent and self.queues[name].keeps
            self.queues[name].messages[seq] = Message(seq, body, level, safe, self._lsn)

    # -- out ---------------------------------------------------------------------------------------------------------

    @rule(queue=queues, count=counts, ack_required=st.booleans())
    def fetch(self, queue: str, count: int, ack_required: bool) -> None:
        stored, model = self._both(queue)
        expected = model.in_state(READY)[:count]
        entries = stored.backing.fetch(count, ack_required)
        if ack_required:
            self._shown(queue, entries, expected)
        else:  # its marks are gone with it
            assert [(entry.seq, entry.body) for entry in entries] == [(m.seq, m.body) for m in expected]
        self._taken(model, expected, ack_required)

    @rule(queue=queues, count=counts, ack_required=st.booleans())
    def drop(self, queue: str, count: int, ack_required: bool) -> None:
        stored, model = self._both(queue)
        expected = model.in_state(READY)[:count]
        assert stored.backing.drop(count, ack_required) == [message.seq for message in expected]
        self._taken(model, expected, ack_required)

    def _taken(self, model: QueueModel, messages: list[Message], ack_required: bool) -> None:
        if ack_required:
            for message in messages:
                message.state = PENDING
        else:
            model.remove(messages, self._lsn)

    @rule(queue=queues, count=counts)
    def dropwhile(self, queue: str, count: int) -> None:
        stored, model = self._both(queue)
        ready = model.in_state(READY)
        due = {message.seq for message in ready[:count]}
        head = stored.backing.dropwhile(lambda entry: entry.seq in due)
        assert (head.seq if head is not None else None) == (ready[count].seq if len(ready) > count else None)
        model.remove(ready[:count], self._lsn)

    @rule(queue=queues, count=counts)
    def fetchwhile(self, queue: str, count: int) -> None:
        stored, model = self._both(queue)
        ready = model.in_state(READY)
        due = {message.seq for message in ready[:count]}
        entries: list[Entry] = []
        head, got = stored.backing.fetchwhile(
            lambda entry: entry.seq in due, lambda entry, so_far: [*so_far, entry], entries
        )
        assert (head.seq if head is not None else None) == (ready[count].seq if len(ready) > count else None)
        assert [(entry.seq, entry.body) for entry in got] == [(m.seq, m.body) for m in ready[:count]]
        self._taken(model, ready[:count], True)

    @rule(queue=queues, picks=picks)
    def ack(self, queue: str, picks: list[int]) -> None:
        stored, model = self._both(queue)
        chosen = self._pick(model.in_state(PENDING), picks)
        seqs = [message.seq for message in chosen]
        unknown = [message.seq for message in model.in_state(READY)[:1]] + [model.highest + 1]
        assert stored.backing.ack(unknown[:1] + seqs + unknown[1:]) == seqs
        model.remove(chosen, self._lsn)

    @rule(queue=queues, keep_every=st.integers(2, 8))
    def ack_most(self, queue: str, keep_every: int) -> None:
        """Leaves holes, in segments and in store files."""
        stored, model = self._both(queue)
        chosen = [message for n, message in enumerate(model.in_state(PENDING)) if n % keep_every]
        stored.backing.ack([message.seq for message in chosen])
        model.remove(chosen, self._lsn)

    @rule(queue=queues, count=st.integers(8, 14), transient_every=st.integers(1, 6), keep_every=st.integers(3, 6))
    def leave_garbage(self, queue: str, count: int, transient_every: int, keep_every: int) -> None:
        """Store files that are mostly garbage: what compaction is for."""
        self.publish_many(queue=queue, count=count, size=6000, transient_every=transient_every, level_every=1)
        self.fetch(queue=queue, count=1000, ack_required=True)
        self.sync()
        self.ack_most(queue=queue, keep_every=keep_every)
        self.sync()

    @rule(queue=queues, picks=picks, count_delivery=st.booleans())
    def requeue(self, queue: str, picks: list[int], count_delivery: bool) -> None:
        stored, model = self._both(queue)
        chosen = self._pick(model.in_state(PENDING), picks)
        seqs = [message.seq for message in chosen]
        assert stored.backing.requeue([*seqs, model.highest + 1], count_delivery) == seqs
        model.requeue(chosen, self._lsn, count_delivery)

    @rule(queue=queues, picks=picks)
    def ackfold(self, queue: str, picks: list[int]) -> None:
        stored, model = self._both(queue)
        chosen = self._pick(model.in_state(PENDING), picks)
        seen: list[tuple[int, bytes]] = []
        visited = stored.backing.ackfold(
            lambda entry, so_far: [*so_far, (entry.seq, entry.body)], seen, [message.seq for message in chosen]
        )
        assert sorted(visited) == sorted((message.seq, message.body) for message in chosen)

    @rule(queue=queues, start=st.integers(0, 30))
    def fold(self, queue: str, start: int) -> None:
        model = self.queues[queue]
        expected = [m for m in model.messages.values() if m.seq >= start]
        expected.sort(key=lambda message: (-message.level, message.seq))
        seen = self._contents(queue, start)
        if model.has_levels and self.kind == "sqlite":
            seen.sort()
            expected.sort(key=lambda message: message.seq)
        assert seen == [(m.seq, m.state != READY, m.body) for m in expected]
        levels = self.store.get(queue).backing.fold(lambda entry, _, so_far: (True, [*so_far, entry.level]), [], start)
        assert sorted(levels) == sorted(message.level for message in expected)

    def _contents(self, name: str, start: int = 0) -> list[tuple[int, bool, bytes]]:
        seen: list[tuple[int, bool, bytes]] = []

        def visit(entry: Entry, unacked: bool, so_far: int) -> tuple[bool, int]:
            seen.append((entry.seq, unacked, entry.body))
            return True, so_far + 1

        assert self.store.get(name).backing.fold(visit, 0, start) == len(seen)
        return seen

    @has_lived
    @rule(queue=queues)
    def purge(self, queue: str) -> None:
        stored, model = self._both(queue)
        ready = model.in_state(READY)
        assert stored.backing.purge() == len(ready)
        model.remove(ready, self._lsn)

    @has_lived
    @rule(queue=queues)
    def purge_acks(self, queue: str) -> None:
        stored, model = self._both(queue)
        pending = model.in_state(PENDING)
        assert stored.backing.purge_acks() == len(pending)
        model.remove(pending, self._lsn)

    # -- leases ------------------------------------------------------------------------------------------------------

    @rule(queue=queues, limit=counts, most_bytes=st.sampled_from([1, 100, 2000, 1 << 40]))
    def checkout(self, queue: str, limit: int, most_bytes: int) -> None:
        self._checkout(queue, limit, most_bytes)

    def _checkout(self, queue: str, limit: int, most_bytes: int) -> None:
        stored, model = self._both(queue)
        expected: list[Message] = []
        room = most_bytes
        for message in model.in_state(READY)[:limit]:
            if expected and message.size > room:
                break
            room -= message.size
            expected.append(message)
        number = self._next_number
        began = self.store.journal.next_lsn
        try:
            with self._power():
                made = self.store.checkout(stored, "lease", limit, most_bytes)
            assert (made.number if made is not None else None) == (number if expected else None)
            assert (made.count if made is not None else 0) == len(expected)
        except PowerCut:
            if self.store.journal.next_lsn == began:
                raise  # it never left the buffer
            self._leased(queue, number, expected)
            raise
        if made is not None:
            taken = sorted(
                seq
                for pairs in made.ranges.values()
                for i in range(0, len(pairs), 2)
                for seq in range(pairs[i], pairs[i] + pairs[i + 1])
            )
            assert taken == sorted(message.seq for message in expected)
            self._leased(queue, number, expected)

    def _leased(self, queue: str, number: int, messages: list[Message]) -> None:
        if messages:
            lsn = self.store.journal.next_lsn - 1
            seqs = [message.seq for message in messages]
            self.checkouts["lease", number] = CheckoutModel(queue, self.queues[queue].uid, seqs, lsn)
            for message in messages:
                message.state = LEASED

    @property
    def _next_number(self) -> int:
        return max((number for _, number in self.checkouts), default=0) + 1

    @rule(keep=st.integers(0, 3), requeue=st.booleans())
    def settle(self, keep: int, requeue: bool) -> None:
        self._settle(keep, requeue)

    def _settle(self, keep: int, requeue: bool) -> None:
        """End all checkouts but the newest `keep`."""
        upto = self._next_number - 1 - keep
        due = [c for (_, number), c in self.checkouts.items() if number <= upto and not c.settled]
        expected = sum(len(self._held(checkout)) for checkout in due)
        began = self.store.journal.next_lsn
        try:
            with self._power():
                assert self.store.settle("lease", upto, requeue=requeue) == expected
        except PowerCut:
            if self.store.journal.next_lsn == began:
                raise
            self._settled(due, requeue)
            raise
        self._settled(due, requeue)

    def _settled(self, due: list[CheckoutModel], requeue: bool) -> None:
        lsn = self.store.journal.next_lsn - 1
        for checkout in due:
            model, messages = self.queues[checkout.queue], self._held(checkout)
            checkout.settled = lsn
            checkout.requeued = requeue
            if requeue:
                model.requeue(messages, lsn, count_delivery=False)
            else:
                model.remove(messages, lsn)

    def _held(self, checkout: CheckoutModel) -> list[Message]:
        """What a checkout still holds: its queue may be gone, and transient messages end with the process."""
        model = self.queues[checkout.queue]
        if model.uid != checkout.uid or checkout.settled:
            return []
        return [model.messages[seq] for seq in checkout.seqs if seq in model.messages]

    # -- transactions ------------------------------------------------------------------------------------------------

    @rule(
        publishes=st.lists(st.tuples(queues, sizes, st.booleans(), st.integers(0, LEVELS - 1)), max_size=4),
        acks=st.lists(st.tuples(queues, picks), max_size=2, unique_by=lambda ack: ack[0]),
    )
    def transact(self, publishes: list[tuple[str, int, bool, int]], acks: list[tuple[str, list[int]]]) -> None:
        self._transact(publishes, acks)

    def _transact(self, publishes: list[tuple[str, int, bool, int]], acks: list[tuple[str, list[int]]]) -> None:
        entries = [
            (name, self._entry(name, UNNUMBERED, size, persistent, level))
            for name, size, persistent, level in publishes
        ]
        chosen = [(name, self._pick(self.queues[name].in_state(PENDING), picks)) for name, picks in acks]
        added = [(name, entry, self._as_messages(name, [entry])) for name, entry in entries]
        begin = self.store.begin_transaction
        appended: list[object] = []

        def noted(*arguments: Any) -> object:
            appended.append(begin(*arguments))
            return appended[0]

        try:
            with self._power(), mock.patch.object(self.store, "begin_transaction", noted):
                seqs = self.store.transact(
                    [(self.store.get(name), entry) for name, entry in entries],
                    [(self.store.get(name), [message.seq for message in messages]) for name, messages in chosen],
                )
            assert seqs == [entry.seq for _, entry in entries]
        except PowerCut:
            if appended and self.store.journal.buffer.empty:
                self._transacted(added, chosen)
            else:
                for name, entry in entries:
                    if entry.seq != UNNUMBERED:
                        self._number(self.queues[name], [entry.seq])
            raise
        self._transacted(added, chosen)

    def _transacted(
        self, added: list[tuple[str, Entry, list[Message]]], chosen: list[tuple[str, list[Message]]]
    ) -> None:
        lsn = self.store.journal.next_lsn - 1
        for name, entry, messages in added:
            self._number(self.queues[name], [entry.seq])
            messages[0].seq = entry.seq
            self._added(name, messages, lsn)
        published = [(name, message.seq) for name, _, (message,) in added if message.persistent]
        acked = [(name, message) for name, messages in chosen for message in messages if message.persistent]
        for name, messages in chosen:
            self.queues[name].remove(messages, lsn)
        self.transactions.append(Transaction(lsn, published, acked))

    # -- upkeep ------------------------------------------------------------------------------------------------------

    @rule()
    def sync(self) -> None:
        self.store.sync()
        for name, model in self.queues.items():
            self._drain(name)
            assert not model.unconfirmed, "what was to be confirmed is confirmed once it is safe"
            assert not self.store.get(name).backing.needs_timeout()
        self._prune()

    def _prune(self) -> None:
        synced = self.store.journal.synced_lsn
        for model in self.queues.values():
            model.removed = {seq: message for seq, message in model.removed.items() if message.removed > synced}
        self.transactions = [transaction for transaction in self.transactions if transaction.lsn > synced]

    @rule(seal=st.sampled_from([True, True, True, False]), carry_below=st.sampled_from([0, 0, 512, 100_000]))
    def checkpoint(self, seal: bool, carry_below: int) -> None:
        self.store.checkpoint(seal=seal, carry_below=carry_below)

    @rule()
    def compact(self) -> None:
        self.store.compact()

    @rule()
    def tick(self) -> None:
        self.store.tick()

    @rule(queue=queues, count=st.integers(0, 12))
    def set_ram_target(self, queue: str, count: int) -> None:
        for level in self._variable_queues(queue):
            level.set_ram_target(count)

    def _variable_queues(self, name: str) -> list[VariableQueue]:
        backing = self.store.get(name).backing
        levels = backing.levels if isinstance(backing, PriorityQueue) else [backing]
        return [level for level in levels if isinstance(level, VariableQueue)]

    @has_lived
    @rule(queue=queues)
    def delete_and_declare(self, queue: str) -> None:
        assert self.store.delete(queue) == len(self.queues[queue].in_state(READY))
        self._declare_missing()

    # -- the end of the process --------------------------------------------------------------------------------------

    @has_lived
    @rule()
    def restart(self) -> None:
        self.store.close()
        self._clean_stop()
        self.store = self._open()
        assert self.store.clean_start
        self._begin_again()

    def _clean_stop(self) -> None:
        """Nothing is uncertain: what is persistent comes back, with exact flags."""
        for name, model in self.queues.items():
            for message in list(model.messages.values()):
                if not message.persistent:
                    del model.messages[message.seq]
                elif message.state == PENDING:
                    message.state, message.returned = READY, True
            model.removed.clear()
            model.unconfirmed.clear()
            if name == "t":
                model.messages.clear()

    @has_lived
    @rule(mode=modes, seed=seeds)
    def crash(self, mode: str, seed: int) -> None:
        """The power goes between two operations."""
        self._lose_power(mode, seed)

    @has_lived
    @rule()
    def kill(self) -> None:
        """The process goes; what it had handed to the kernel stays."""
        self._lose_power("process", 0)

    @has_lived
    @rule(
        during=st.sampled_from(["sync", "checkpoint", "seal", "carry", "compact", "tick", "close"]),
        at=st.integers(1, 8) | st.integers(1, 70),
        tear=st.sampled_from([0, 0, 7, 100, 1000]),
        mode=modes,
        seed=seeds,
    )
    def crash_during(self, during: str, at: int, tear: int, mode: str, seed: int) -> None:
        """The power goes at the `at`-th call of the disk from now on, if what runs makes that many."""
        run: dict[str, Callable[[], object]] = {
            "sync": self.store.sync,
            "checkpoint": lambda: self.store.checkpoint(carry_below=0),
            "seal": lambda: self.store.checkpoint(seal=True, carry_below=0),
            "carry": lambda: self.store.checkpoint(seal=True),
            "compact": self.store.compact,
            "tick": self.store.tick,
            "close": self.store.close,
        }
        self._crash_in(run[during], at, tear, mode, seed)

    @has_lived
    @rule(
        publishes=st.lists(st.tuples(queues, sizes, st.booleans(), st.integers(0, LEVELS - 1)), max_size=4),
        acks=st.lists(st.tuples(queues, picks), max_size=2, unique_by=lambda ack: ack[0]),
        at=st.integers(1, 12),
        tear=st.sampled_from([0, 20, 100, 300]),
        mode=modes,
        seed=seeds,
    )
    def crash_during_transact(
        self,
        publishes: list[tuple[str, int, bool, int]],
        acks: list[tuple[str, list[int]]],
        at: int,
        tear: int,
        mode: str,
        seed: int,
    ) -> None:
        self._crash_in(lambda: self._transact(publishes, acks), at, tear, mode, seed)

    @has_lived
    @rule(queue=queues, limit=counts, at=st.integers(1, 12), tear=st.sampled_from([0, 20, 100]), mode=modes, seed=seeds)
    def crash_during_checkout(self, queue: str, limit: int, at: int, tear: int, mode: str, seed: int) -> None:
        self._crash_in(lambda: self._checkout(queue, limit, 1 << 40), at, tear, mode, seed)

    @has_lived
    @rule(requeue=st.booleans(), at=st.integers(1, 12), tear=st.sampled_from([0, 20, 100]), mode=modes, seed=seeds)
    def crash_during_settle(self, requeue: bool, at: int, tear: int, mode: str, seed: int) -> None:
        self._crash_in(lambda: self._settle(0, requeue), at, tear, mode, seed)

    @has_lived
    @rule(queue=queues, at=st.integers(1, 20), mode=modes, seed=seeds)
    def crash_during_delete(self, queue: str, at: int, mode: str, seed: int) -> None:
        self._crash_in(lambda: self.store.delete(queue), at, 0, mode, seed)

    @has_lived
    @rule(clean=st.booleans(), at=st.lists(st.integers(1, 40), min_size=1, max_size=3), mode=modes, seed=seeds)
    def crash_during_open(self, clean: bool, at: list[int], mode: str, seed: int) -> None:
        """Once or more, the next power cut comes before the engine is up again."""
        if clean:
            self.store.close()
        self._lose_power(mode, seed, at)

    @contextlib.contextmanager
    def _power(self) -> Iterator[None]:
        """A commit that the power cut short is a failed store to the engine, and a PowerCut to us."""
        try:
            yield
        except StoreFailedError as error:
            if not self.disk.is_off:
                raise
            raise PowerCut from error

    def _crash_in(self, run: Callable[[], object], at: int, tear: int, mode: str, seed: int) -> None:
        self.disk.crash_at(at, tear=tear)
        with contextlib.suppress(PowerCut), self._power():
            run()
        self.disk.clear_faults()
        self._lose_power(mode, seed)

    def _lose_power(self, mode: str, seed: int, again: list[int] = ()) -> None:  # type: ignore[assignment]
        rng = random.Random(seed)
        journal = self.store.journal
        synced, written = journal.synced_lsn, journal.next_lsn - 1
        self.store.abandon()
        self.disk = self.disk.crash(rng, mode)  # type: ignore[arg-type]
        for at in again:
            self.disk.crash_at(at)
            with contextlib.suppress(PowerCut), self._power():
                self._open().abandon()
            self.disk.clear_faults()
            self.disk = self.disk.crash(rng, mode)  # type: ignore[arg-type]
        self.store = self._open()
        if self.store.clean_start:
            self._clean_stop()
        else:
            self._adopt(synced, written)
        self._begin_again()

    def _begin_again(self) -> None:
        self.steps = 0
        assert "t" not in self.store.queues
        self._declare_missing()
        for name, model in self.queues.items():
            seen = sorted(self._contents(name))
            assert seen == sorted((m.seq, m.state != READY, m.body) for m in model.messages.values())
            assert self.store.get(name).backing.drain_confirmed() == []
            for message in model.in_state(LEASED):  # set by what ends the lease, so it need not be kept
                message.returned = message.returned and message.seq in self.store.get(name).backing.returned

    # -- what a crash may leave --------------------------------------------------------------------------------------

    def _adopt(self, synced: int, written: int) -> None:
        """Check what came back against what must and what may be there, and go on with it."""
        self._adopt_checkouts(synced, written)
        here = {
            name: {seq: (unacked, body) for seq, unacked, body in self._contents(name)} for name in self.store.queues
        }
        for transaction in self.transactions:
            self._check_whole(transaction, here, synced)
        self.transactions.clear()
        for name in [name for name in self.queues if name in self.store.queues]:
            self._adopt_queue(name, here[name], synced, written)
        for model in self.queues.values():
            model.unconfirmed.clear()

    def _adopt_queue(self, name: str, here: dict[int, tuple[bool, bytes]], synced: int, written: int) -> None:
        queue, model = self._both(name)
        assert queue.uid == model.uid, "a queue that was deleted stays deleted"
        known = {**model.removed, **model.messages}
        for seq, message in known.items():
            published = message.persistent and message.safe <= synced
            never_published = not message.persistent or message.safe > written
            gone = 0 < message.removed <= synced
            maybe_gone = 0 < message.removed <= written
            if seq in here:
                assert not never_published, f"{seq} was never written, or is transient"
                assert not gone, f"{seq} was acked, and that was synced"
                assert here[seq][1] == message.body, f"{seq} has another body"
            elif published and not maybe_gone:
                raise AssertionError(f"{seq} was safe, and is lost")
        assert here.keys() <= known.keys(), "messages out of nowhere"
        assert queue.seqs.next > model.highest, "seq_ids would be handed out twice"
        leased = {
            seq
            for checkout in self.checkouts.values()
            if not checkout.settled and checkout.uid == model.uid
            for seq in checkout.seqs
        }
        backing = queue.backing
        model.redelivered_below = backing.redelivered_below
        assert all(backing.redelivered_below > seq for seq in here), "everything was perhaps delivered"
        model.messages = {seq: known[seq] for seq in here}
        model.removed = {}
        for seq, message in model.messages.items():
            message.removed = 0
            message.safe = synced
            message.returned = seq in backing.returned  # it makes no difference: all are below the bound
            message.state = LEASED if seq in leased else READY
            assert here[seq][0] == (seq in leased), f"{seq} is leased: {seq in leased}"
            certain = [count for lsn, count in message.history if lsn <= synced]
            maybe = [count for lsn, count in message.history if synced < lsn <= written]
            assert backing.counts.get(seq, 0) in ([0, *certain][-1], *maybe), f"delivery count of {seq}"
            message.count = backing.counts.get(seq, 0)
            message.history = [(0, message.count)]
        assert backing.counts.keys() <= here.keys()

    def _check_whole(self, transaction: Transaction, here: dict[str, dict], synced: int) -> None:
        """Of a transaction all or nothing is there, also when nobody knows which."""
        if transaction.lsn <= synced:
            return
        published = {seq in here[name] for name, seq in transaction.published if name in here}
        kept = {m.seq not in here[name] for name, m in transaction.acked if name in here and m.safe <= synced}
        assert len(published | kept) <= 1, f"half of a transaction: {transaction}"

    def _adopt_checkouts(self, synced: int, written: int) -> None:
        here = {(checkout.lease, checkout.number) for checkout in self.store.checkouts("lease")}
        for key, checkout in list(self.checkouts.items()):
            must_be = checkout.lsn <= synced and not 0 < checkout.settled <= written
            must_not = checkout.lsn > written or 0 < checkout.settled <= synced
            assert key in here or not must_be, f"checkout {key} was safe, and is lost"
            assert key not in here or not must_not, f"checkout {key} was settled, or never made"
            if key in here or checkout.lsn <= synced:
                self._adopt_checkout(key, checkout, key in here, synced)
            else:
                del self.checkouts[key]  # never made; its number is free
        assert here <= self.checkouts.keys()

    def _adopt_checkout(self, key: tuple[str, int], checkout: CheckoutModel, is_here: bool, synced: int) -> None:
        model = self.queues[checkout.queue]
        uncertain = checkout.settled > synced
        if uncertain and not checkout.requeued and model.uid == checkout.uid and checkout.queue in self.store.queues:
            # Acked with the checkout's end, or still there with it.
            seqs = {seq for seq, _, _ in self._contents(checkout.queue)}
            known = {**model.removed, **model.messages}
            expected = {seq for seq in checkout.seqs if seq in known and known[seq].persistent}
            assert seqs & set(checkout.seqs) == (expected if is_here else set()), f"half of the end of {key}"
        checkout.settled = 0 if is_here else max(checkout.settled, 1)
        checkout.lsn = synced

    # -- after every step --------------------------------------------------------------------------------------------

    def _drain(self, name: str) -> None:
        pairs = self.store.get(name).backing.drain_confirmed()
        model = self.queues[name]
        synced = self.store.journal.synced_lsn
        for first, count in zip(pairs[::2], pairs[1::2], strict=True):
            for seq in range(first, first + count):
                assert seq in model.unconfirmed, f"{seq} was confirmed twice, or nobody asked for it"
                model.unconfirmed.remove(seq)
                message = model.messages.get(seq) or model.removed.get(seq)
                if message is not None and message.persistent:
                    assert message.safe <= synced, f"{seq} was confirmed before it was safe"

    @invariant()
    def agrees(self) -> None:
        self.steps += 1
        for name, model in self.queues.items():
            backing = self.store.get(name).backing
            ready = model.in_state(READY)
            waiting = [m for m in model.messages.values() if m.state != READY]
            assert len(backing) == len(ready)
            assert backing.is_empty() == (not ready)
            assert backing.depth() == len(model.messages)
            assert backing.pending_count == len(waiting)
            pairs = backing.pending_pairs()
            pending = [seq for i in range(0, len(pairs), 2) for seq in range(pairs[i], pairs[i] + pairs[i + 1])]
            assert pending == sorted(message.seq for message in waiting)
            assert backing.ready_bytes() == sum(message.size for message in ready)
            head = backing.peek()
            assert (head.seq if head is not None else None) == (ready[0].seq if ready else None)
            assert head is None or head.level == ready[0].level
            assert backing.redelivered_below == model.redelivered_below
            assert set(backing.returned) == {m.seq for m in model.messages.values() if m.returned}
            assert backing.counts == {m.seq: m.count for m in model.messages.values() if m.count}
            info = backing.info()
            assert (info["len"], info["pending_acks"]) == (len(ready), len(waiting))
            assert info["message_bytes_ready"] == backing.ready_bytes()
            self._drain(name)
            for level in self._variable_queues(name):
                parts = level.info()
                whole = parts["q1"] + parts["q4"] + parts["ram_pending_acks"]
                allowed = level.target_ram_count + self.store.settings.ram_slack
                assert whole <= allowed, "more in RAM than allowed"

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # else there is a failure to be seen already
                self._leave_nothing()
        finally:
            with contextlib.suppress(Exception):
                self.store.abandon()
            self._temporary.cleanup()

    def _leave_nothing(self) -> None:
        """When all messages are gone, nothing refers to anything any more."""
        self.settle(keep=0, requeue=True)
        for name in QUEUES:
            self.purge(queue=name)
            self.purge_acks(queue=name)
        self.sync()
        self.agrees()
        assert self.store.store.garbage().valid_bytes == 0
        assert self.store.transient_store.garbage().valid_bytes == 0
        assert self.store.monitor.ram_bytes == 0
        assert self.store.ledger.table(CHECKOUT) == {}
        self.store.checkpoint(seal=True, carry_below=0)
        for index in self.store.indexes():
            assert index.live_count() == 0
            assert len(index.overlay) == 0
            assert not index.segments


class VariableTable(BackingQueueMachine):
    kind, store_index = "variable", "table"


class VariableLmdb(BackingQueueMachine):
    kind, store_index = "variable", "lmdb"


class PriorityTable(BackingQueueMachine):
    kind, store_index = "priority", "table"


class PriorityLmdb(BackingQueueMachine):
    kind, store_index = "priority", "lmdb"


class VolatileTable(BackingQueueMachine):
    kind, store_index = "volatile", "table"


class VolatileLmdb(BackingQueueMachine):
    kind, store_index = "volatile", "lmdb"


class SqliteTable(BackingQueueMachine):
    kind, store_index = "sqlite", "table"


class SqliteLmdb(BackingQueueMachine):
    kind, store_index = "sqlite", "lmdb"
