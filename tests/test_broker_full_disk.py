"""A disk that fills in the middle of a publish: the rest is done when there is room, and nothing twice."""

from __future__ import annotations

import asyncio
import errno
import threading
from types import SimpleNamespace

import pika
import pytest

from tests.broker_clients import eventually
from warren.errors import DiskFullError
from warren.kernel.entry import Entry, make_entries
from warren.queueing.arrival import Arrival
from warren.storage.disk import Disk
from warren.storage.journal import JournalCommit
from warren.testing import running_broker
from warren.vhost.arrivals import Arrivals
from warren.vhost.commits import Commits

QUEUES = ("a", "b", "c")


@pytest.fixture(scope="module")
def broker():
    with running_broker() as running:
        yield running


@pytest.fixture
def channel(broker):
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel = connection.channel()
    yield channel
    for queue in (*QUEUES, "d", "full"):
        channel.queue_delete(queue)
    connection.close()


def fill_disk(broker, calls: int) -> None:
    """The disk is full from the call of `check_publish` of that number on, until `free_disk`."""

    def plant() -> None:
        committer = broker.broker.vhosts["/"].store.committer
        left = [calls]

        def check_publish() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise DiskFullError("the disk is full, says the test")

        committer.check_publish = check_publish

    broker.call(plant)


def free_disk(broker) -> None:
    def free() -> None:
        committer = broker.broker.vhosts["/"].store.committer
        del committer.check_publish
        committer.take_reserve()  # as the store's upkeep does, once a second

    broker.call(free)


def stopped(broker) -> bool:
    return broker.call(lambda: any(connection._held for connection in broker.broker.vhosts["/"].connections))


@pytest.mark.parametrize("calls", range(4))
@pytest.mark.parametrize(
    "properties",
    [
        pika.BasicProperties(),
        pika.BasicProperties(headers={"CC": ["k2"], "BCC": ["k3"]}),
        pika.BasicProperties(delivery_mode=2),
        pika.BasicProperties(delivery_mode=2, headers={"x-producer-name": "p", "x-publishing-id": 7}),
    ],
    ids=["transient", "carbon copies", "persistent", "numbered"],
)
@pytest.mark.parametrize("mode", ["confirm", "tx"])
def test_a_publish_that_a_full_disk_stopped_goes_on_where_it_was(broker, channel, calls, properties, mode):
    for queue in QUEUES:
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, "amq.fanout")
    dead = {
        "x-max-length": 0,
        "x-overflow": "reject-publish-dlx",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "d",
    }
    channel.queue_declare("d", durable=True)
    if mode == "tx":
        channel.tx_select()
    else:
        channel.confirm_delivery()
        channel.queue_declare("full", durable=True, arguments=dead)
        channel.queue_bind("full", "amq.fanout")
    fill_disk(broker, calls)
    done = threading.Event()

    def publish() -> None:
        try:
            channel.basic_publish("amq.fanout", "k", b"m", properties)
        except pika.exceptions.NackError:
            assert mode == "confirm"  # one of the queues was full
        if mode == "tx":
            channel.tx_commit()
        done.set()

    publisher = threading.Thread(target=publish)
    publisher.start()
    eventually(lambda: stopped(broker) or done.is_set())
    free_disk(broker)
    publisher.join(20)
    assert done.is_set()
    for queue in QUEUES:
        assert [body for _, _, body in iter_get(channel, queue)] == [b"m"]
    if mode == "confirm":
        eventually(lambda: channel.queue_declare("d", passive=True).method.message_count)
        assert len(iter_get(channel, "d")) == 1


def iter_get(channel, queue: str) -> list[tuple[object, object, bytes]]:
    found = []
    while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
        found.append(got)
    return found


@pytest.mark.parametrize("reserve_helps", [True, False], ids=["the reserve helps", "the reserve is used up, too"])
@pytest.mark.parametrize("node_is_short", [False, True], ids=["", "the node is short of disk, too"])
def test_publishers_wait_while_commits_have_no_room_and_go_on_by_themselves(
    broker, channel, monkeypatch, reserve_helps, node_is_short
):
    vhost = broker.broker.vhosts["/"]
    has_room = threading.Event()
    run, free_bytes = JournalCommit.run, Disk.free_bytes
    refused: list[JournalCommit] = []

    def run_if_there_is_room(commit: JournalCommit) -> None:
        if not has_room.is_set() and not (refused and reserve_helps):
            refused.append(commit)
            raise OSError(errno.ENOSPC, "no room, says the test")
        run(commit)

    told: list[str] = []
    channel.connection.add_on_connection_blocked_callback(lambda _, frame: told.append(frame.method.reason))
    channel.connection.add_on_connection_unblocked_callback(lambda _, frame: told.append("unblocked"))
    channel.queue_declare("a", durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", "a", b"0", pika.BasicProperties(delivery_mode=2))
    monkeypatch.setattr(Disk, "free_bytes", lambda disk, path: free_bytes(disk, path) if has_room.is_set() else 0)
    monkeypatch.setattr(JournalCommit, "run", run_if_there_is_room)
    done = threading.Event()

    def publish() -> None:
        for body in (b"1", b"2"):
            channel.basic_publish("", "a", body, pika.BasicProperties(delivery_mode=2))
        done.set()

    publisher = threading.Thread(target=publish)
    publisher.start()
    eventually(lambda: broker.call(lambda: set(vhost.alarms)) == {"disk reserve"})
    if reserve_helps:  # the first is confirmed, the second waits
        eventually(lambda: stopped(broker))
    assert not done.is_set()
    if node_is_short:
        broker.call(lambda: vhost.set_alarm("disk", True))
    has_room.set()
    if node_is_short:
        eventually(lambda: broker.call(lambda: set(vhost.alarms)) == {"disk"})
        eventually(lambda: stopped(broker))
        assert not done.is_set()
        broker.call(lambda: vhost.set_alarm("disk", False))
    publisher.join(20)
    assert done.is_set()
    assert not broker.call(lambda: vhost.alarms)
    channel.connection.process_data_events(0)
    if reserve_helps:
        assert told == ["low on disk reserve", "unblocked"]
    assert [body for _, _, body in iter_get(channel, "a")] == [b"0", b"1", b"2"]


def test_a_vhost_that_is_opened_on_a_full_disk_says_so(tmp_path, monkeypatch):
    free_bytes = Disk.free_bytes
    with monkeypatch.context() as full:
        full.setattr(Disk, "free_bytes", lambda disk, path: 0)
        with running_broker(str(tmp_path)) as running:
            vhost = running.broker.vhosts["/"]
            assert running.call(lambda: vhost.alarms) == {"disk reserve"}
            full.setattr(Disk, "free_bytes", free_bytes)
            eventually(lambda: running.call(lambda: not vhost.alarms))


def test_a_batch_that_a_full_disk_stopped_before_a_delayed_exchange_goes_on_where_it_was():
    class Delayed:
        """Takes one message before its disk is full, once."""

        def __init__(self) -> None:
            self.bodies: list[bytes] = []
            self.was_full = False

        def add(self, entry: Entry, due: int) -> bool:
            if self.bodies and not self.was_full:
                self.was_full = True
                raise DiskFullError("the disk is full, says the test")
            self.bodies.append(entry.body)
            return True

    delayed = Delayed()
    vhost = SimpleNamespace(delayed={"later": delayed}, queues={}, wake=lambda: None)
    arrivals = Arrivals(vhost)  # type: ignore[arg-type]
    entries, _ = make_entries([b"1", b"2", b"3"], b"\0\0\0\0", 0, 0, 0, 0)
    arrival = Arrival(entries, (), False)
    arrival.waits.append("later")
    with pytest.raises(DiskFullError):
        arrivals.arrive(arrival)
    arrivals.arrive(arrival)
    assert delayed.bodies == [b"1", b"2", b"3"]
    assert not arrival.rejected
    assert arrival.journaled


def test_commits_that_have_no_room_are_tried_again_now_and_then_however_often_they_are_woken():
    class Committer:
        full = False
        full_changed = None
        tries = 0

        def sync(self) -> None:
            self.tries += 1
            raise DiskFullError("the disk is full, says the test")

    committer = Committer()
    store = SimpleNamespace(
        lock=threading.RLock(), committer=committer, durability="fsync", vhost="/", checkpoint_due=lambda: False
    )
    loop = asyncio.new_event_loop()
    try:
        commits = Commits(store, loop, failed=lambda error: None)  # type: ignore[arg-type]
        commits.wake()
        eventually(lambda: committer.tries > 0)
        commits._event.set()  # as by somebody who came while it waits for room
        tried = committer.tries
        eventually(lambda: committer.tries > tried + 1)
        assert committer.tries < tried + 1000, "it spins"
        commits.stop()
    finally:
        loop.close()
