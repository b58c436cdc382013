"""A round of deliveries: nobody is sent nothing, its bytes are bounded, and what dies on the way is not lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faulty_disk import FaultyDisk
from tests.small_engine import HEAD, make_entries, open_engine
from warren.kernel.entry import Entry
from warren.queueing import queue_process
from warren.queueing.arguments import QueueArguments
from warren.queueing.consumers import MOST_BYTES_AT_ONCE, Consumer
from warren.queueing.limits import DEAD_BYTES_AT_ONCE
from warren.queueing.queue_process import QueueProcess
from warren.storage.settings import EngineSettings
from warren.storage.variable_queue import VariableQueue
from warren.storage.vhost_store import StoredQueue, VhostStore

SOON, LATER = 1_000, 2_000  # before and after the expiry of those that expire
EXPIRY = 1_500
LARGE = MOST_BYTES_AT_ONCE // 4 + 1  # three of them are a round
KINDS = {
    "variable": {},
    "priorities": {"x-max-priority": 3},
    "volatile": {"x-backing-queue": "volatile"},
    "sqlite": {"x-backing-queue": "sqlite"},
}


class Timer:
    def cancel(self) -> None:
        pass


class Owner:
    """A vhost that does what a queue asks of it, and notes it."""

    decorators = ()

    def __init__(self, store: VhostStore) -> None:
        self.store = store
        self.dead: list[list[bytes]] = []  # bodies, by transaction
        self.still_pending: list[bool] = []  # of each of those: could it come back after a crash?
        self.timers: list[Callable[[], None]] = []

    def dead_letter(self, queue: QueueProcess, entries: list[Entry], reason: str, *, pending: bool) -> bool:
        backing = queue.stored.backing
        self.dead.append([entry.body for entry in entries])
        acked = backing.ack([entry.seq for entry in entries]) if pending else []
        self.still_pending.append(len(acked) == len(entries))
        return True

    def later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(callback)
        return Timer()

    def wake(self) -> None:
        pass

    def queue_crashed(self, queue: QueueProcess, error: Exception) -> None:
        raise AssertionError("the queue crashed") from error

    def is_leased(self, queue: QueueProcess) -> bool:
        return False

    def remove_queue(self, queue: QueueProcess) -> int:
        return 0


class Receiver:
    """A channel: what it was sent, a list for each time."""

    def __init__(self, room: int = 1000) -> None:
        self.free = room
        self.sent: list[list[bytes]] = []

    def room(self) -> int:
        return self.free

    def send(self, consumer: Consumer, entries: list[Entry]) -> None:
        assert entries, "a delivery of nothing"
        self.sent.append([entry.body for entry in entries])

    def cancelled(self, consumer: Consumer) -> None:
        raise AssertionError("a consumer was cancelled")

    @property
    def bodies(self) -> list[bytes]:
        return [body for some in self.sent for body in some]


class Queue:
    """A queue with messages, before its first consumer."""

    def __init__(self, disk: FaultyDisk, kind: str = "variable", **arguments: Any) -> None:
        self.store = open_engine(disk.root, disk, settings=EngineSettings(), reserve_bytes=0)
        self.stored: StoredQueue = self.store.declare("q", arguments={**KINDS[kind], **arguments})
        self.owner = Owner(self.store)
        self.process: QueueProcess

    def publish(self, *messages: tuple[bytes, int], level: int = 0) -> None:
        """Bodies with the time at which they expire; 0: never."""
        entries = make_entries(self.store, self.stored, [body for body, _ in messages], True, level)
        for entry, (_, expiry) in zip(entries, messages, strict=True):
            entry.expiry = expiry
        self.stored.backing.publish(entries)

    def start(self, **arguments: Any) -> QueueProcess:
        self.process = QueueProcess(self.owner, self.stored, QueueArguments(**arguments))
        return self.process

    def consumer(self, receiver: Receiver, **options: Any) -> Consumer:
        made = Consumer(receiver, f"c{len(self.process.consumers)}", **options)
        self.process.consume(made)
        return made


@pytest.fixture
def queue(tmp_path) -> Iterator[Queue]:
    made = Queue(FaultyDisk(tmp_path))
    yield made
    made.store.abandon()


@pytest.fixture
def clock(monkeypatch) -> Callable[..., None]:
    """Sets what the queue reads as the time, one after the other; the last one stays."""

    def tell(*times: int) -> None:
        left = list(times)
        monkeypatch.setattr(queue_process, "_now", lambda: left.pop(0) if len(left) > 1 else left[0])

    return tell


# ---- nobody is sent nothing ----


@pytest.mark.parametrize("consumers", [1, 2])
def test_messages_that_expire_during_a_round_are_delivered_or_dropped_and_never_sent_as_nothing(
    queue, clock, consumers
) -> None:
    queue.publish((b"0", EXPIRY), (b"1", EXPIRY))
    process = queue.start()
    receivers = [Receiver() for _ in range(consumers)]
    for receiver in receivers:
        queue.consumer(receiver)
    clock(SOON, LATER)
    process.run()
    assert sorted(body for receiver in receivers for body in receiver.bodies) == [b"0", b"1"]


@pytest.mark.parametrize("no_ack", [False, True])
def test_a_consumer_whose_messages_all_expired_gets_the_next_one(queue, clock, no_ack) -> None:
    """It has nothing to ack: if it were taken for one that has its prefetch full, it would wait for ever."""
    clock(LATER)
    queue.publish((b"0", 0), (b"1", EXPIRY), (b"2", EXPIRY), (b"3", EXPIRY))
    process = queue.start()
    first, second = Receiver(), Receiver()
    queue.consumer(first, prefetch=1)
    waits = queue.consumer(second, prefetch=1, no_ack=no_ack)
    process.run()
    assert (first.sent, second.sent) == ([[b"0"]], [])
    assert waits.outstanding == 0
    queue.publish((b"4", 0), (b"5", 0))
    process.run()
    assert first.sent == [[b"0"]]
    assert second.bodies == ([b"4", b"5"] if no_ack else [b"4"])


def test_a_channel_whose_messages_expired_has_the_room_again_for_all_its_consumers(queue, clock) -> None:
    clock(LATER)
    queue.publish((b"0", 0), (b"1", EXPIRY), (b"2", EXPIRY))
    process = queue.start()
    receiver = Receiver(room=2)
    consumers = [queue.consumer(receiver) for _ in range(3)]
    process.run()
    assert receiver.sent == [[b"0"]]
    assert not any(consumer.blocked for consumer in consumers)


@pytest.mark.parametrize("consumers", [1, 2])
def test_damaged_messages_are_passed_over_and_never_sent_as_nothing(tmp_path, consumers) -> None:
    disk = FaultyDisk(tmp_path)
    store = open_engine(disk.root, disk, ram_slack=100)
    stored = store.declare("q")
    stored.backing.publish(make_entries(store, stored, [b"%d-" % number for number in range(3)], False))
    assert isinstance(stored.backing, VariableQueue)
    stored.backing.set_ram_target(0)
    process = QueueProcess(Owner(store), stored, QueueArguments())
    receivers = [Receiver() for _ in range(consumers)]
    made = [Consumer(receiver, "c", prefetch=1) for receiver in receivers]
    for consumer in made:
        process.consume(consumer)
    (path,) = [path for path in disk.files() if path.endswith(".qs")]
    for seq in range(3):
        disk.flip_bit(path, 8 * (64 + seq * (16 + 4 + 4 + 2) + 20))
    process.run()
    assert len(process) == 0
    assert not any(consumer.blocked or consumer.outstanding for consumer in made)
    stored.backing.publish(make_entries(store, stored, [b"good"] * consumers, False))
    process.run()
    assert [receiver.bodies for receiver in receivers] == [[b"good"]] * consumers
    store.abandon()


# ---- bounded by bytes ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ack_required", [True, False])
def test_a_fetch_stops_before_the_message_that_passes_its_bytes(tmp_path, kind, ack_required) -> None:
    queue = Queue(FaultyDisk(tmp_path), kind)
    sizes = [10, 10, 10, 50, 1, 1, 0, 30, 40]
    queue.publish(*((bytes([number]) * size, 0) for number, size in enumerate(sizes)))
    backing = queue.stored.backing
    found = []
    while not backing.is_empty():
        found.append([len(entry.body) for entry in backing.fetch(5, ack_required, 30)])
        assert backing.ready_bytes() == sum(sizes[sum(map(len, found)) :])
    assert found == [[10, 10, 10], [50], [1, 1, 0], [30], [40]]
    assert backing.pending_count == (len(sizes) if ack_required else 0)
    queue.store.abandon()


@pytest.mark.parametrize("kind", ["variable", "sqlite"])
def test_a_fetch_stops_at_its_bytes_when_the_bodies_are_on_disk(tmp_path, kind) -> None:
    disk = FaultyDisk(tmp_path)
    store = open_engine(disk.root, disk)
    stored = store.declare("q", arguments=KINDS[kind])
    bodies = [b"%02d" % number * 20 for number in range(30)]
    stored.backing.publish(make_entries(store, stored, bodies, True))
    found = []
    while not stored.backing.is_empty():
        found.append([entry.body for entry in stored.backing.fetch(100, True, 100)])
    assert found == [bodies[number : number + 2] for number in range(0, 30, 2)]
    store.abandon()


def test_a_large_message_that_does_not_fit_is_not_overtaken_by_a_lower_priority(tmp_path) -> None:
    queue = Queue(FaultyDisk(tmp_path), "priorities")
    queue.publish((b"high", 0), (b"h" * 100, 0), level=3)
    queue.publish((b"low", 0), level=1)
    backing = queue.stored.backing
    assert [entry.body for entry in backing.fetch(10, True, 50)] == [b"high"]
    assert [entry.body for entry in backing.fetch(10, True, 50)] == [b"h" * 100]
    assert [entry.body for entry in backing.fetch(10, True, 50)] == [b"low"]
    queue.store.abandon()


def test_a_consumer_without_a_prefetch_gets_large_messages_a_few_at_a_time(queue) -> None:
    bodies = [bytes([number]) * LARGE for number in range(10)]
    queue.publish(*((body, 0) for body in bodies))
    process = queue.start()
    receiver = Receiver()
    queue.consumer(receiver)
    process.run()
    assert receiver.bodies == bodies
    assert [len(some) for some in receiver.sent] == [3, 3, 3, 1]


@pytest.mark.parametrize("no_ack", [False, True])
def test_large_messages_that_go_straight_to_a_waiting_consumer_come_a_few_at_a_time(queue, no_ack) -> None:
    bodies = [bytes([number]) * LARGE for number in range(10)]
    process = queue.start()
    receiver = Receiver()
    queue.consumer(receiver, no_ack=no_ack)
    process.deliver([Entry(0, HEAD, body) for body in bodies])
    assert receiver.bodies == bodies
    assert [len(some) for some in receiver.sent] == [3, 3, 3, 1]
    assert (len(process), process.unacknowledged) == (0, 0 if no_ack else 10)


def test_consumers_that_wait_for_large_messages_take_turns_from_round_to_round(queue) -> None:
    bodies = [bytes([number]) * LARGE for number in range(9)]
    process = queue.start()
    receivers = [Receiver(), Receiver()]
    for receiver in receivers:
        queue.consumer(receiver)
    process.deliver([Entry(0, HEAD, body) for body in bodies])
    assert [receiver.bodies for receiver in receivers] == [bodies[0::2], bodies[1::2]]


def test_a_message_that_is_larger_than_a_round_is_a_round_of_its_own(queue) -> None:
    bodies = [b"small", bytes(MOST_BYTES_AT_ONCE + 1), bytes(MOST_BYTES_AT_ONCE), b"", b"small"]
    process = queue.start()
    receiver = Receiver()
    queue.consumer(receiver)
    process.deliver([Entry(0, HEAD, body) for body in bodies])
    assert receiver.sent == [bodies[:1], bodies[1:2], bodies[2:4], bodies[4:]]


def test_consumers_of_large_messages_take_turns_message_by_message(queue) -> None:
    """A round is cut short by its bytes, and the next one begins with whoever would have been next."""
    bodies = [bytes([number]) * LARGE for number in range(9)]
    queue.publish(*((body, 0) for body in bodies))
    process = queue.start()
    receivers = [Receiver(), Receiver()]
    for receiver in receivers:
        queue.consumer(receiver)
    process.run()
    assert [receiver.bodies for receiver in receivers] == [bodies[0::2], bodies[1::2]]


def test_a_round_that_is_cut_short_blocks_nobody_who_has_room(queue) -> None:
    bodies = [bytes([number]) * LARGE for number in range(9)]
    queue.publish(*((body, 0) for body in bodies))
    process = queue.start()
    receivers = [Receiver(), Receiver()]
    for receiver, prefetch in zip(receivers, (1, 4), strict=True):
        queue.consumer(receiver, prefetch=prefetch)
    process.run()
    assert [receiver.bodies for receiver in receivers] == [bodies[:1], bodies[1:5]]
    assert len(process) == 4


def test_large_dead_letters_leave_a_few_bytes_at_a_time_and_a_waiting_consumer_gets_none_of_them(queue, clock) -> None:
    clock(LATER)
    body = b"x" * (DEAD_BYTES_AT_ONCE // 2)
    queue.publish(*[(body, EXPIRY)] * 7, (b"good", 0))
    process = queue.start(dead_letter_exchange="dead")
    receiver = Receiver()
    queue.consumer(receiver)
    process.run()
    while queue.owner.timers:
        queue.owner.timers.pop(0)()
    assert [len(some) for some in queue.owner.dead] == [2, 2, 2, 1]
    assert receiver.sent == [[b"good"]]


def test_rejected_large_messages_die_a_few_at_a_time(queue) -> None:
    body = b"x" * (DEAD_BYTES_AT_ONCE // 2)
    queue.publish(*[(body, 0)] * 5)
    process = queue.start(dead_letter_exchange="dead")
    process.reject([entry.seq for entry in queue.stored.backing.fetch(5)])
    while queue.owner.timers:
        queue.owner.timers.pop(0)()
    assert [len(some) for some in queue.owner.dead] == [2, 2, 1]
    assert process.unacknowledged == 0


def test_large_messages_that_a_length_limit_pushes_out_die_a_few_at_a_time(queue) -> None:
    body = b"x" * (DEAD_BYTES_AT_ONCE // 2)
    queue.publish(*[(body, 0)] * 6)
    queue.start(dead_letter_exchange="dead", max_length=1).begin()
    assert [len(some) for some in queue.owner.dead] == [2, 2, 1]


@pytest.mark.parametrize("how", ["begin", "apply", "accept"])
def test_what_a_length_limit_pushes_out_leaves_under_the_engines_lock(queue, monkeypatch, how) -> None:
    """A commit and a checkpoint work with the same journal and the same tables, on threads of their own."""
    queue.publish(*[(b"x", 0)] * 3)
    process = queue.start(**({} if how == "apply" else {"max_length": 1}))
    held = []
    drop = queue.stored.backing.drop

    def dropped(*arguments: Any) -> Any:
        held.append(queue.store.holds_lock())
        return drop(*arguments)

    monkeypatch.setattr(type(queue.stored.backing), "drop", lambda self, *arguments: dropped(*arguments))
    {
        "begin": lambda: process.begin(),
        "apply": lambda: process.apply(QueueArguments(max_length=1)),
        "accept": lambda: process.accept([]),
    }[how]()
    assert held == [True]
    assert len(process) == 1


def test_get_gives_no_message_that_expired_however_many_did(queue, clock) -> None:
    clock(LATER)
    queue.publish(*[(b"x", EXPIRY)] * 1200, (b"good", 0))
    process = queue.start(dead_letter_exchange="dead")
    entry, _ = process.get(True)
    assert entry.body == b"good"


# ---- what dies on the way ----


def test_a_message_that_expired_behind_another_waits_for_its_ack_until_it_has_moved(queue, clock) -> None:
    """Its consumer needs no acks; its move is atomic all the same."""
    clock(LATER)
    queue.publish((b"0", 0), (b"1", EXPIRY), (b"2", 0))
    process = queue.start(dead_letter_exchange="dead")
    receiver = Receiver()
    queue.consumer(receiver, no_ack=True)
    process.run()
    assert receiver.bodies == [b"0", b"2"]
    assert queue.owner.dead == [[b"1"]]
    assert queue.owner.still_pending == [True]
    assert (len(process), process.unacknowledged) == (0, 0)
