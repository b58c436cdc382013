"""A run of the engine that touches everything, and a witness of what the engine promised meanwhile.

    witness = Witness()
    driver = Driver(disk, witness)
    for step in SCRIPT:
        driver.do(step)
    check(after_the_crash, witness)        # raises AssertionError where a promise is broken

Rules:

1. The run is the same every time: no clock, no chance, no thread. So the n-th call of the disk is the n-th of every run.
2. The witness knows three answers to "is it there?": must, may, must not. What was asked for and not answered yet is
   `MAYBE`; a call that returns after a sync makes it `SAFE`.
3. The witness is the test's, and knows nothing of journals and segments: only what a user could know.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from warren.errors import DiskFullError, StoreFailedError, WarrenError
from warren.kernel.entry import PERSISTENT, Entry, make_entries
from warren.queueing.arguments import QueueArguments
from warren.queueing.queue import Queue
from warren.storage.disk import Disk
from warren.storage.settings import EngineSettings
from warren.storage.vhost_store import StoredQueue, VhostStore

SETTINGS = EngineSettings(
    segment_entries=8,
    journal_file_bytes=4096,
    store_file_bytes=16 * 1024,
    carry_below=200,
    io_batch=1,
    load_entries=4,
    ram_target=4,
    ram_slack=0,
    embed_below=256,
    large_body_bytes=6000,
    checkpoint_batch_rows=6,
    sync_all_above=5,
    reserve_ahead=8,
    reserve_bytes=4096,
)

NO, MAYBE, SAFE = 0, 1, 2
HEAD = b"head"


@dataclass(eq=False)
class Sent:
    """One message in one queue, as its publisher and its consumers know it."""

    body: bytes
    uid: int
    seq: int
    level: int
    persistent: bool
    head: bytes | None = HEAD  # None: the engine's own
    published: int = MAYBE
    acked: int = NO
    group: int = 0  # the transaction that published it
    acked_by: int = 0  # the transaction that acked it
    count: int = 0  # delivery count that is safe
    count_asked: int = 0
    lease: str = ""  # the checkout that holds it: "lease/number"

    @property
    def label(self) -> bytes:
        return self.body.split(b" ", 1)[0]

    @property
    def must(self) -> bool:
        return self.persistent and self.published == SAFE and self.acked == NO

    @property
    def may(self) -> bool:
        return self.persistent and self.acked != SAFE

    def is_in(self, entry: Entry) -> bool:
        return entry.body == self.body and self.head in (None, entry.head)

    def __repr__(self) -> str:
        return f"<{self.label.decode()} seq {self.seq} published {self.published} acked {self.acked} {self.lease}>"


@dataclass
class Known:
    """A queue that was declared."""

    name: str
    uid: int
    volatile: bool = False  # keeps nothing on disk
    declared: int = MAYBE
    deleted: int = NO
    next_seq: int = 0  # above every seq_id handed out
    sent: dict[int, Sent] = field(default_factory=dict)  # by seq_id
    pending: list[int] = field(default_factory=list)


@dataclass
class Lease:
    """A checkout that was asked for."""

    key: str
    uid: int
    seqs: set[int]
    taken: int = MAYBE
    settled: int = NO


class Witness:
    def __init__(self) -> None:
        self.queues: dict[int, Known] = {}  # by uid
        self.leases: dict[str, Lease] = {}
        self.groups = 0
        self.open_groups: dict[int, tuple[list[Sent], list[Sent]]] = {}  # MAYBE transactions: publishes, acks
        self.unsure: list[Callable[[], None]] = []  # what the next sync makes safe
        self.version = 0  # counts what was promised
        self.snapshots: list[tuple[str, Witness]] = []
        self.snapshot_under_way = ""
        self.labels = 0

    def by_name(self, name: str) -> Known:
        return next(known for known in self.queues.values() if known.name == name and known.deleted == NO)

    def promise(self, what: Callable[[], None]) -> None:
        self.unsure.append(what)

    def synced(self) -> None:
        """A sync that began after everything so far has returned."""
        for what in self.unsure:
            what()
        self.unsure.clear()
        self.open_groups.clear()
        self.version += 1

    def label(self, name: str) -> bytes:
        self.labels += 1
        return f"{name}:{self.labels}".encode()

    def copy(self) -> Witness:
        """What was published, acked and leased up to now; promises under way stay with the original."""
        twin = Witness()
        for uid, known in self.queues.items():
            if known.deleted != SAFE:
                new = twin.queues[uid] = Known(known.name, uid, known.volatile, SAFE, known.deleted, known.next_seq)
                for seq, sent in known.sent.items():
                    new.sent[seq] = Sent(**{**sent.__dict__, "group": 0, "acked_by": 0})
        twin.leases = {
            key: Lease(key, lease.uid, set(lease.seqs), lease.taken, lease.settled)
            for key, lease in self.leases.items()
        }
        twin.labels = self.labels
        return twin


def open_store(disk: Disk, root: str, **options: Any) -> VhostStore:
    options.setdefault("settings", SETTINGS)
    return VhostStore(root, disk=disk, background=False, debug=True, clock=lambda: 0.0, **options)


def in_parts(parts: int, work: Callable[..., tuple[int, ...]], *arguments: Any) -> tuple[int, ...]:
    """`work(part, parts, ...)` for each part, each in a process of its own; the sums of what they return."""
    if parts == 1:
        return work(0, 1, *arguments)
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(parts, mp_context=context) as pool:
        counted = [pool.submit(work, part, parts, *arguments) for part in range(parts)]
        return tuple(map(sum, zip(*(one.result() for one in counted), strict=True)))


class Driver:
    """Does one thing after the other with a store, and tells the witness before and after."""

    def __init__(self, disk: Disk, root: str, witness: Witness, **options: Any) -> None:
        self.disk = disk
        self.root = root
        self.witness = witness
        self.options = options
        self.patient = False  # what fails at the first try is tried again
        self.refused = 0  # calls that a full disk refused
        self.store: VhostStore | None = None

    @property
    def open(self) -> VhostStore:
        assert self.store is not None
        return self.store

    def do(self, step: Callable[[Driver], None]) -> None:
        """A full disk is waited out, as a patient user would."""
        try:
            step(self)
        except DiskFullError:
            self.refused += 1
            self.make_room()
            step(self)

    def make_room(self) -> None:
        store = self.open
        for _ in range(3):
            try:
                store.tick()
            except DiskFullError:
                continue
            if not store.committer.full:
                return
        raise AssertionError("the disk has room, and publishing is still refused")

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.store = None
        try:
            self.store = open_store(self.disk, self.root, **self.options)
        except (StoreFailedError, DiskFullError):
            if not self.patient:
                raise
            self.store = open_store(self.disk, self.root, **self.options)
        for known in self.witness.queues.values():
            known.pending.clear()
            for sent in known.sent.values():
                if not sent.persistent:
                    sent.acked = SAFE

    def stop(self) -> None:
        """A clean stop and start."""
        store = self.open
        try:
            store.close()
        except DiskFullError:
            if not self.patient:
                raise
        else:
            self.witness.synced()
        self.start()
        assert self.open.clean_start or self.patient, "a clean stop was not followed by a clean start"

    def kill(self) -> None:
        """The process dies between two calls, and starts again. Requires: nothing is unsure."""
        assert not self.witness.unsure
        self.open.abandon()
        self.start()
        assert not self.open.clean_start

    def stray(self) -> None:
        """A directory of a queue that the metadata does not know."""
        with contextlib.suppress(OSError):
            self.disk.make_dirs(os.path.join(self.open.root, "queues", "stray-77"))

    def declare(self, name: str, **arguments: Any) -> None:
        if any(known.name == name and known.deleted == NO for known in self.witness.queues.values()):
            return
        queue = self.open.declare(name, arguments=arguments)
        volatile = arguments.get("x-backing-queue") == "volatile"
        self.witness.queues[queue.uid] = Known(name, queue.uid, volatile, declared=SAFE)
        self.witness.version += 1

    def adopt(self, queue: StoredQueue) -> None:
        """A queue that is there, and is empty."""
        self.witness.queues[queue.uid] = Known(queue.name, queue.uid, declared=SAFE)

    def delete(self, name: str) -> None:
        known = self.witness.by_name(name)
        known.deleted = MAYBE
        self.open.delete(name)
        known.deleted = SAFE
        self.witness.version += 1

    # -- messages ----------------------------------------------------------------------------------------------------

    def _body(self, name: str, size: int) -> bytes:
        label = self.witness.label(name)
        return (label + b" ").ljust(max(size, len(label) + 1), label[-1:])

    def _register(self, known: Known, entry: Entry, body: bytes, level: int) -> Sent:
        sent = Sent(body, known.uid, entry.seq, level, bool(entry.flags & PERSISTENT) and not known.volatile)
        assert entry.seq not in known.sent, f"seq_id {entry.seq} of {known.name} was handed out twice"
        assert entry.seq >= known.next_seq, f"seq_id {entry.seq} of {known.name} is below {known.next_seq}"
        known.next_seq = entry.seq + 1
        known.sent[entry.seq] = sent
        self.witness.promise(lambda: setattr(sent, "published", SAFE))
        return sent

    def publish(self, name: str, sizes: list[int], *, persistent: bool = True, level: int = 0) -> None:
        store, known = self.open, self.witness.by_name(name)
        queue = store.get(name)
        store.reserve(queue, len(sizes))
        bodies = [self._body(name, size) for size in sizes]
        flags = PERSISTENT if persistent else 0
        with store.lock:
            first = queue.seqs.take(len(sizes))
            entries, _ = make_entries(bodies, HEAD, first, flags, first, 0)
            for entry, body in zip(entries, bodies, strict=True):
                entry.level = level
                self._register(known, entry, body, level)
            queue.backing.publish(entries)
        store.wake()

    def publish_file(self, name: str, size: int) -> None:
        """A body with a file of its own."""
        store, known = self.open, self.witness.by_name(name)
        queue = store.get(name)
        store.reserve(queue, 1)
        body = self._body(name, size)
        sent = self._register(known, Entry(queue.seqs.next, HEAD, body, PERSISTENT), body, 0)
        sent.head = None
        try:
            seq = Queue(store, queue, QueueArguments.parse({})).publish(body)
        except WarrenError:
            if queue.seqs.next == sent.seq:  # no seq_id was taken
                del known.sent[sent.seq]
                known.next_seq = sent.seq
            raise
        assert seq == sent.seq

    def fan_out(self, names: list[str], size: int, *, producer: str | None = None, number: int = 0) -> None:
        store = self.open
        queues = [store.get(name) for name in names]
        body = self._body("+".join(names), size)
        before = {name: self.witness.by_name(name).next_seq for name in names}
        for queue in queues:
            store.reserve(queue, 1)
        # The seq_ids are known before the call: nobody else takes any.
        sent = []
        for name, queue in zip(names, queues, strict=True):
            known = self.witness.by_name(name)
            assert queue.seqs.next >= before[name]
            sent.append(self._register(known, Entry(queue.seqs.next, HEAD, body, PERSISTENT), body, 0))
        made = store.fan_out(
            queues, HEAD, body, persistent=True, published_at=1, producer=producer, publishing_id=number
        )
        assert [entry.seq for entry in made] == [one.seq for one in sent]

    def transact(self, publishes: list[tuple[str, int]], acks: dict[str, int]) -> None:
        """Publish bodies and ack the first messages of queues, all or nothing."""
        store, witness = self.open, self.witness
        taken = []
        for name, count in acks.items():
            entries = self.fetch(name, count)
            taken.append((store.get(name), [entry.seq for entry in entries]))
        for name, _ in publishes:
            store.reserve(store.get(name), 2)
        self.sync()
        store.committer.check_publish()  # the commit may have found the disk full: then nothing of this happens
        witness.groups += 1
        group = witness.groups
        new: list[Sent] = []
        entries = []
        taken_seqs: dict[str, int] = {}
        for name, size in publishes:
            queue, known = store.get(name), witness.by_name(name)
            body = self._body(name, size)
            entry = Entry(0, HEAD, body, PERSISTENT)
            entries.append((queue, entry))
            ahead = taken_seqs.get(name, 0)
            taken_seqs[name] = ahead + 1
            expected = Entry(queue.seqs.next + ahead, HEAD, body, PERSISTENT)
            sent = self._register(known, expected, body, 0)
            sent.group = group
            new.append(sent)
        old = []
        for queue, seqs in taken:
            known = witness.queues[queue.uid]
            for seq in seqs:
                sent = known.sent[seq]
                sent.acked_by = group
                self._ack(sent)
                old.append(sent)
            known.pending = [seq for seq in known.pending if seq not in seqs]
        witness.open_groups[group] = (new, old)
        assert store.transact(entries, taken) == [sent.seq for sent in new]
        witness.synced()

    def fetch(self, name: str, count: int) -> list[Entry]:
        store, known = self.open, self.witness.by_name(name)
        with store.lock:
            entries = store.get(name).backing.fetch(count)
        for entry in entries:
            sent = known.sent[entry.seq]
            assert sent.is_in(entry), f"{sent} was served with another content"
            assert sent.acked != SAFE, f"{sent} was acked and came back"
            assert entry.seq not in known.pending, f"{sent} was served twice"
            known.pending.append(entry.seq)
        return entries

    def _ack(self, sent: Sent) -> None:
        sent.acked = MAYBE
        self.witness.promise(lambda: setattr(sent, "acked", SAFE))

    def ack(self, name: str, count: int, *, last: bool = False) -> None:
        """Ack pending messages, the oldest or the newest."""
        store, known = self.open, self.witness.by_name(name)
        seqs = known.pending[-count:] if last else known.pending[:count]
        for seq in seqs:
            self._ack(known.sent[seq])
        known.pending = [seq for seq in known.pending if seq not in seqs]
        with store.lock:
            assert store.get(name).backing.ack(seqs) == seqs
        store.wake()

    def requeue(self, name: str, count: int) -> None:
        store, known = self.open, self.witness.by_name(name)
        seqs, known.pending = known.pending[:count], known.pending[count:]
        for seq in seqs:
            sent = known.sent[seq]
            sent.count_asked += 1
            asked = sent.count_asked
            self.witness.promise(lambda sent=sent, asked=asked: setattr(sent, "count", max(sent.count, asked)))
        with store.lock:
            try:
                assert store.get(name).backing.requeue(seqs) == seqs
            except DiskFullError:
                known.pending = seqs + known.pending
                raise
        store.wake()

    def consume(self, name: str, count: int) -> None:
        """Fetch and ack."""
        before = len(self.witness.by_name(name).pending)
        self.fetch(name, count)
        fetched = len(self.witness.by_name(name).pending) - before
        if fetched:
            self.ack(name, fetched, last=True)

    def purge(self, name: str) -> None:
        store, known = self.open, self.witness.by_name(name)
        leased = self._leased(known.uid)
        for seq, sent in known.sent.items():
            if sent.acked == NO and seq not in known.pending and seq not in leased:
                self._ack(sent)
        with store.lock:
            store.get(name).backing.purge()
        store.wake()

    # -- leases ------------------------------------------------------------------------------------------------------

    def _leased(self, uid: int) -> set[int]:
        return {
            seq
            for lease in self.witness.leases.values()
            if lease.uid == uid and lease.taken and lease.settled != SAFE
            for seq in lease.seqs
        }

    def checkout(self, name: str, lease: str, limit: int) -> None:
        store, known = self.open, self.witness.by_name(name)
        with store.lock:
            number = (store.ledger.table(9).get(lease) or {"next": 1})["next"]
            leased = self._leased(known.uid)
            ready = [
                sent
                for sent in known.sent.values()
                if sent.acked == NO and sent.seq not in known.pending and sent.seq not in leased
            ]
        ready.sort(key=lambda sent: (-sent.level, sent.seq))
        key = f"{lease}/{number}"
        held = self.witness.leases[key] = Lease(key, known.uid, {sent.seq for sent in ready[:limit]})
        taken = store.checkout(store.get(name), lease, limit)
        assert taken is not None
        assert taken.number == number
        assert _seqs_of(taken.ranges) == held.seqs, "a checkout took other messages than those at the head"
        held.taken = SAFE
        self.witness.synced()

    def settle(self, lease: str, upto: int, *, requeue: bool = False) -> None:
        store = self.open
        for key, held in self.witness.leases.items():
            name, _, number = key.rpartition("/")
            if name == lease and int(number) <= upto and held.settled == NO:
                held.settled = MAYBE
                self.witness.promise(lambda held=held: setattr(held, "settled", SAFE))
                if not requeue:
                    for seq in held.seqs:
                        self._ack(self.witness.queues[held.uid].sent[seq])
        store.settle(lease, upto, requeue=requeue)
        self.witness.synced()

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        self.open.sync()
        self.witness.synced()

    def tick(self) -> None:
        self.open.tick()

    def checkpoint(self, *, seal: bool = True, carry_below: int | None = None) -> None:
        self.open.checkpoint(seal=seal, carry_below=carry_below)

    def snapshot(self, name: str) -> None:
        target = os.path.join(os.path.dirname(self.root), name)
        number = 0
        while self.disk.exists(target):  # of an attempt that a full disk ended
            number += 1
            target = os.path.join(os.path.dirname(self.root), f"{name}-{number}")
        self.sync()
        assert not self.witness.unsure
        twin = self.witness.copy()
        self.open.snapshot(target)
        self.witness.snapshots.append((os.path.basename(target), twin))
        self.witness.version += 1


def _seqs_of(ranges: dict[int, list[int]]) -> set[int]:
    return {
        seq
        for pairs in ranges.values()
        for i in range(0, len(pairs), 2)
        for seq in range(pairs[i], pairs[i] + pairs[i + 1])
    }


# ---- the run ----


def _each(*steps: Callable[[Driver], None]) -> list[Callable[[Driver], None]]:
    return list(steps)


SCRIPT: list[Callable[[Driver], None]] = _each(
    lambda d: d.start(),
    lambda d: [d.declare(name) for name in ("a", "b", "c", "d", "t")],
    lambda d: d.declare("p", **{"x-max-priority": 2}),
    lambda d: d.declare("v", **{"x-backing-queue": "volatile"}),
    # Segments roll: 8 entries each.
    lambda d: d.publish("a", [20, 40, 60]),
    lambda d: d.sync(),
    lambda d: d.publish("a", [30] * 9),
    lambda d: d.publish("v", [20, 20]),
    lambda d: d.sync(),
    # Transient messages are paged out, among persistent ones; large ones to the transient store.
    lambda d: d.publish("t", [40, 50], persistent=True),
    lambda d: d.publish("t", [30, 300, 30, 320, 30, 30, 30], persistent=False),
    lambda d: d.publish("t", [25] * 3, persistent=True),
    lambda d: d.publish("t", [30] * 5, persistent=False),
    lambda d: d.publish("t", [25] * 4, persistent=True),
    lambda d: d.sync(),
    lambda d: d.tick(),
    # Fan-out to three, small and large; one names its producer.
    lambda d: d.fan_out(["a", "b", "c"], 50),
    lambda d: d.fan_out(["a", "b", "c"], 900, producer="p1", number=7),
    lambda d: d.sync(),
    # Priorities.
    lambda d: [d.publish("p", [30, 30], level=level) for level in (0, 2, 1, 0, 2)],
    lambda d: d.sync(),
    # A transaction over two queues, with an ack in a third.
    lambda d: d.transact([("a", 40), ("b", 400), ("a", 30)], {"c": 1}),
    # The journal rolls (4 KiB); carry-forward: the others have little in the sealed file.
    lambda d: d.publish("b", [200] * 8),
    lambda d: d.sync(),
    lambda d: d.publish("b", [200] * 12),
    lambda d: d.sync(),
    lambda d: d.tick(),
    # Large bodies: store files of 16 KiB roll.
    lambda d: d.publish("c", [3000, 3100, 60, 3200]),
    lambda d: d.sync(),
    lambda d: d.publish("c", [3300, 3400, 3500, 3000]),
    lambda d: d.sync(),
    lambda d: d.publish_file("d", 6500),
    lambda d: d.publish("d", [3000, 3100, 40]),
    lambda d: d.sync(),
    # Consume: ack, requeue, keep.
    lambda d: d.fetch("a", 7),
    lambda d: d.ack("a", 3),
    lambda d: d.requeue("a", 2),
    lambda d: d.sync(),
    lambda d: d.fetch("t", 9),
    lambda d: d.ack("t", 4),
    lambda d: d.requeue("t", 3),
    lambda d: d.sync(),
    # Large bodies become garbage, and two files become one.
    lambda d: d.consume("c", 4),
    lambda d: d.sync(),
    lambda d: d.publish("c", [3600, 3700]),
    lambda d: d.sync(),
    lambda d: d.fetch("c", 4),
    lambda d: d.ack("c", 2, last=True),
    lambda d: d.requeue("c", 2),
    lambda d: d.sync(),
    lambda d: d.tick(),
    # Checkouts, settled as acked and as ready again.
    lambda d: d.checkout("b", "spark", 5),
    lambda d: d.checkout("b", "spark", 3),
    lambda d: d.checkout("p", "other", 4),
    lambda d: d.settle("spark", 1),
    lambda d: d.settle("other", 1, requeue=True),
    lambda d: d.checkout("p", "other", 3),
    lambda d: d.checkpoint(),
    # Purge, with pending messages that stay.
    lambda d: d.publish("c", [30, 3000, 30]),
    lambda d: d.fetch("c", 1),
    lambda d: d.sync(),
    lambda d: d.purge("c"),
    lambda d: d.sync(),
    lambda d: d.publish("c", [35]),
    lambda d: d.sync(),
    # Delete, declare anew under the same name.
    lambda d: d.delete("d"),
    lambda d: d.declare("d"),
    lambda d: d.publish("d", [30, 300, 30]),
    lambda d: d.sync(),
    # The process dies. When it starts again, it finds a directory that belongs to no queue.
    lambda d: d.stray(),
    lambda d: d.kill(),
    lambda d: d.publish("a", [30, 31, 400]),
    lambda d: d.sync(),
    lambda d: d.tick(),
    # A snapshot; what follows appends to files that it shares.
    lambda d: d.consume("a", 2),
    lambda d: d.checkpoint(carry_below=0),
    lambda d: d.snapshot("snapshot"),
    lambda d: d.publish("a", [32] * 6),
    lambda d: d.consume("a", 5),
    lambda d: d.consume("b", 6),
    lambda d: d.sync(),
    lambda d: d.checkpoint(carry_below=0),
    # Segments run empty and go.
    lambda d: d.consume("t", 20),
    lambda d: d.consume("p", 3),
    lambda d: d.sync(),
    lambda d: d.checkpoint(),
    lambda d: d.publish("t", [30, 300, 30, 30, 30, 30], persistent=False),
    lambda d: d.publish("t", [26, 26], persistent=True),
    lambda d: d.sync(),
    # A clean stop and start.
    lambda d: d.fetch("a", 2),
    lambda d: d.requeue("a", 1),
    lambda d: d.stop(),
    lambda d: d.publish("a", [33] * 3),
    lambda d: d.consume("b", 4),
    lambda d: d.settle("spark", 2, requeue=True),
    lambda d: d.sync(),
    lambda d: d.tick(),
    lambda d: d.checkpoint(),
    lambda d: d.stop(),
    lambda d: d.sync(),
)


# ---- what must hold after a crash ----


def found_in(queue: StoredQueue) -> tuple[list[Entry], list[Entry]]:
    """Ready and pending messages, each level by level and in order."""
    ready: list[Entry] = []
    pending: list[Entry] = []

    def visit(entry: Entry, unacked: bool, level: int) -> tuple[bool, int]:
        (pending if unacked else ready).append(entry)
        return True, level

    queue.backing.fold(visit, 0)
    return ready, pending


def check(store: VhostStore, witness: Witness, *, live: bool = False) -> None:
    """Every promise of the witness against what the store holds; nothing is changed. `live`: nothing has crashed, so
    transient messages are there, too."""
    names = {known.name for known in witness.queues.values()}
    assert set(store.queues) <= names, f"queues {set(store.queues) - names} were never declared"
    there: dict[tuple[int, int], Sent] = {}
    for known in witness.queues.values():
        queue = store.queues.get(known.name)
        if queue is None or queue.uid != known.uid:
            assert known.declared != SAFE or known.deleted != NO, f"queue {known.name} is lost"
            continue
        assert known.deleted != SAFE, f"queue {known.name}, uid {known.uid} was deleted and is back"
        assert queue.seqs.next >= known.next_seq, f"seq_ids of {known.name} would be used again"
        check_queue(store, queue, known, there, live)
    for group, (new, old) in witness.open_groups.items():
        new_there = [(sent.uid, sent.seq) in there for sent in new]
        old_gone = [(sent.uid, sent.seq) not in there for sent in old]
        parts = new_there + old_gone
        assert all(parts) or not any(parts), f"transaction {group} came back in part: {new_there}, acks {old_gone}"
    for lease in witness.leases.values():
        known = witness.queues.get(lease.uid)
        if known is not None and known.deleted == NO:
            check_lease(store, lease, known)


def check_queue(
    store: VhostStore, queue: StoredQueue, known: Known, there: dict[tuple[int, int], Sent], live: bool
) -> None:
    ready, pending = found_in(queue)
    for entry in ready + pending:
        sent = known.sent.get(entry.seq)
        assert sent is not None, f"{known.name} serves seq_id {entry.seq}, which nobody published: {entry.body!r:.40}"
        assert sent.is_in(entry), f"{known.name}: {sent} with another content"
        assert sent.may or (live and sent.acked != SAFE), f"{known.name}: {sent} must be gone"
        there[known.uid, entry.seq] = sent
        count = queue.backing.counts.get(entry.seq, 0)
        assert sent.count <= count <= sent.count_asked, f"{sent} has delivery count {count}, not {sent.count}"
    seqs = [entry.seq for entry in ready + pending]
    assert len(seqs) == len(set(seqs)), f"{known.name}: some messages are there twice: {seqs}"
    for sent in known.sent.values():
        if sent.must or (live and sent.acked == NO):
            assert sent.seq in seqs, f"{known.name}: {sent} is lost; there are {seqs}; {store.quarantine.reports}"
    assert len(queue.backing) == len(ready), f"{known.name} counts {len(queue.backing)} ready, has {len(ready)}"
    assert queue.backing.pending_count == len(pending), f"{known.name}: {queue.backing.pending_count} != {len(pending)}"
    order = [(-known.sent[entry.seq].level, entry.seq) for entry in ready]
    assert order == sorted(order), f"{known.name} is out of order: {order}"


def check_lease(store: VhostStore, lease: Lease, known: Known) -> None:
    name, _, number = lease.key.rpartition("/")
    found = [checkout for checkout in store.checkouts(name) if checkout.number == int(number)]
    if lease.taken == SAFE and lease.settled == NO:
        assert found, f"checkout {lease.key} is lost"
    if lease.settled == SAFE:
        assert not found, f"checkout {lease.key} was settled and is back"
    if found:
        assert _seqs_of(found[0].ranges) == lease.seqs, f"checkout {lease.key} has changed"
        held = set(_pairs_to_seqs(store.queues[known.name].backing.pending_pairs()))
        kept = {seq for seq in lease.seqs if known.sent[seq].must}
        assert kept <= held, f"messages {kept - held} of checkout {lease.key} are ready"


def _pairs_to_seqs(pairs: list[int]) -> Iterator[int]:
    for i in range(0, len(pairs), 2):
        yield from range(pairs[i], pairs[i] + pairs[i + 1])


def drain(store: VhostStore) -> dict[tuple[int, int], bytes]:
    """Settle all checkouts as ready, fetch and ack everything in order, and sync: what was served, by uid and seq_id."""
    leases = {key.rpartition("/")[0] for key in store.ledger.table(7)}
    for lease in leases:
        store.settle(lease, 1 << 40, requeue=True)
    served: dict[tuple[int, int], bytes] = {}
    for queue in store.queues.values():
        last: dict[int, int] = {}
        while True:
            with store.lock:
                entries = queue.backing.fetch(3)
                if not entries:
                    break
                queue.backing.ack([entry.seq for entry in entries])
            for entry in entries:
                assert entry.seq > last.get(entry.level, -1), f"{queue.name} serves {entry.seq} after {last}"
                last[entry.level] = entry.seq
                assert (queue.uid, entry.seq) not in served
                served[queue.uid, entry.seq] = entry.body
        assert len(queue.backing) == 0, f"{queue.name} is drained and counts {len(queue.backing)}"
    store.sync()
    return served


def work_on(store: VhostStore, disk: Disk, root: str, witness: Witness, **options: Any) -> VhostStore:
    """A recovered store is one to work with: everything is served once, a clean stop and start keep what is new. The
    witness is used up. Returns the store, reopened."""
    expected = {}
    for queue in store.queues.values():
        ready, pending = found_in(queue)
        expected.update({(queue.uid, entry.seq): entry.body for entry in ready + pending})
    assert drain(store) == expected, "fetch serves something else than fold sees"
    for known in witness.queues.values():
        for sent in known.sent.values():
            sent.acked = SAFE
        queue = store.queues.get(known.name)
        if queue is None or queue.uid != known.uid:
            known.deleted = SAFE
    witness.leases.clear()
    witness.unsure.clear()
    witness.open_groups.clear()
    driver = Driver(disk, root, witness, **options)
    driver.store = store
    for name in list(store.queues):
        driver.publish(name, [40, 300])
        driver.publish(name, [41], persistent=False)
        driver.fetch(name, 1)
    driver.sync()
    driver.tick()
    for name in list(store.queues):
        driver.publish(name, [42])
    store.close()
    witness.synced()
    for known in witness.queues.values():
        for sent in known.sent.values():
            if not sent.persistent:
                sent.acked = SAFE
    after = open_store(disk, root, **options)
    assert after.clean_start, "a clean stop was not followed by a clean start"
    check(after, witness)
    return after
