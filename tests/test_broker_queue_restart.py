"""A queue that fails is restarted alone: nothing that was confirmed is lost, and nobody else notices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial

import pika
import pika.exceptions
import pytest

from tests.broker_clients import SECONDS, eventually, pump, settle
from warren.errors import DiskFullError
from warren.kernel.entry import Entry
from warren.queueing.arguments import QueueArguments
from warren.queueing.guard import QueueCrashed
from warren.queueing.properties import encode_head
from warren.queueing.queue_process import QueueProcess
from warren.storage.backing_queue import BackingQueue
from warren.testing import running_broker

PERSISTENT = pika.BasicProperties(delivery_mode=2)
OPEN: list[pika.BlockingConnection] = []  # closed at the end of a test
pytestmark = [
    pytest.mark.usefixtures("pika_litter"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def one_broker():
    with running_broker(vhost_max_restarts=1000) as running:
        yield running


@pytest.fixture
def broker(one_broker):
    """Without queues, and without a memory of those that failed."""
    vhost = one_broker.broker.vhosts["/"]
    for queue in one_broker.call(lambda: [*vhost.queues, *vhost.down]):
        connect(one_broker).channel().queue_delete(queue)
    one_broker.call(vhost._crashes.clear)
    yield one_broker
    while OPEN:
        with contextlib.suppress(pika.exceptions.AMQPError):
            OPEN.pop().close()


def connect(broker) -> pika.BlockingConnection:
    OPEN.append(pika.BlockingConnection(pika.URLParameters(broker.url)))
    return OPEN[-1]


def break_once(broker, queue: str, operation: str) -> None:
    """The next call of an operation of the queue's backing queue raises."""

    def plant() -> None:
        process = broker.broker.vhosts["/"].queues[queue]
        broken = Broken(process.stored.backing, operation)
        if operation in OF_THE_STORE:
            process.stored.backing = broken
        else:
            process._backing = broken

    broker.call(plant)


OF_THE_STORE = ("accept", "delete_and_terminate", "journal_publish", "journal_ack", "reveal", "ack_committed")


class Broken:
    """A backing queue of which one operation fails; "everything": all of them."""

    def __init__(self, real, operation: str) -> None:
        self._real = real
        self._operation = operation

    def __getattr__(self, name):
        if self._operation not in (name, "everything"):
            return getattr(self._real, name)
        if name == "pending_count":
            self._fail()
        return self._fail

    def __len__(self) -> int:
        return self._fail() if self._operation in ("__len__", "everything") else len(self._real)

    def _fail(self, *arguments, **options):
        raise RuntimeError(f"planted in {self._operation}")


def bodies(channel, queue: str) -> list[bytes]:
    found = []
    while True:
        method, _, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return found
        found.append(body)


# ---- what leads to an operation ----


def publish(channel, **properties) -> None:
    with pytest.raises(pika.exceptions.NackError):
        channel.basic_publish("", "q", b"refused", pika.BasicProperties(delivery_mode=2, **properties))


def publish_that_expires(channel) -> None:
    publish(channel, expiration="0")


def publish_to_a_consumer(channel) -> None:
    """It is cancelled with notice; what it had comes again."""
    cancelled: list[str] = []
    channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
    channel.basic_consume("q", lambda *_: None, consumer_tag="mine")
    publish(channel)
    pump(channel.connection, lambda: cancelled)
    assert cancelled == ["mine"]


def consume(channel) -> None:
    cancelled: list[str] = []
    channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
    channel.basic_consume("q", lambda *_: None, consumer_tag="mine")
    pump(channel.connection, lambda: cancelled)


def fan_out(channel) -> None:
    """Its record is one for both queues: it is confirmed, and found when the queue begins anew."""
    channel.queue_bind("q", "amq.fanout")
    channel.queue_bind("other", "amq.fanout")
    channel.basic_publish("amq.fanout", "", b"both", PERSISTENT)


def get(channel) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_get("q")
    assert caught.value.reply_code == 506


def ack(channel) -> None:
    method, _, _ = channel.basic_get("q")
    channel.basic_ack(method.delivery_tag)
    settle(channel)


def ack_of_several_queues(channel) -> None:
    """Those of the queue that did not fail are done."""
    last, _, _ = channel.basic_get("q")
    method, _, body = channel.basic_get("other")
    assert body == b"0"
    channel.basic_ack(method.delivery_tag, multiple=True)
    settle(channel)
    channel.basic_publish("", "other", body, PERSISTENT)
    assert last.delivery_tag < method.delivery_tag


def requeue(channel) -> None:
    method, _, _ = channel.basic_get("q")
    channel.basic_nack(method.delivery_tag)
    settle(channel)


def recover(channel) -> None:
    channel.basic_get("q")
    channel.basic_recover(requeue=True)


def reject(channel) -> None:
    method, _, _ = channel.basic_get("q")
    channel.basic_reject(method.delivery_tag, requeue=False)
    settle(channel)


def purge(channel) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        channel.queue_purge("q")


def count(channel) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        channel.queue_declare("q", passive=True)


def close(channel) -> None:
    channel.basic_get("q")
    channel.close()


def look(channel) -> None:
    """Done by the test: the status page."""


LETTERS = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
EXPIRES = {"expiration": "3600000"}  # of what is in the queue: then its times are looked at

# operation, what leads to it, arguments of the queue, properties of the messages in it
CASES = [
    ("publish", publish, {}, {}),
    ("publish", publish, {"x-max-priority": 3}, {}),
    ("publish_delivered", publish_to_a_consumer, {}, None),
    ("is_empty", consume, {}, {}),
    ("accept", fan_out, {}, {}),
    ("fetch", get, {}, {}),
    ("fetch", get, {"x-max-priority": 3}, {}),
    ("fetch", consume, {}, {}),
    ("drop", publish, {"x-max-length": 5}, {}),
    ("peek", publish, {}, EXPIRES),
    ("dropwhile", publish_that_expires, {}, None),
    ("fetchwhile", publish_that_expires, LETTERS, None),
    ("depth", get, {}, EXPIRES),
    ("ready_bytes", publish, {"x-max-length-bytes": 1000, "x-overflow": "reject-publish"}, {}),
    ("ack", ack, {}, {}),
    ("ack", ack, {"x-max-priority": 3}, {}),
    ("ack", ack_of_several_queues, {}, {}),
    ("requeue", requeue, {}, {}),
    ("requeue", requeue, {"x-max-priority": 3}, {}),
    ("requeue", close, {}, {}),
    ("requeue", recover, {}, {}),
    ("ackfold", reject, LETTERS, {}),
    ("ack", reject, {}, {}),
    ("purge", purge, {}, {}),
    ("__len__", count, {}, {}),
    ("info", look, {}, {}),
    ("pending_count", look, {}, {}),
]

NOT_A_QUEUES_OWN = {
    "counts": "a value, as the next ones",
    "returned": "",
    "redelivered_below": "",
    "init": "when it begins, anew or not: the vhost's start",
    "terminate": "the vhost's stop",
    "delete_and_terminate": "the queue's end: a test below",
    "journal_publish": "part of a transaction, as the next ones: only recovery of the vhost helps; a test below",
    "reveal": "",
    "journal_ack": "",
    "ack_committed": "",
    "checkout": "a lease's, with no record or half of one: as a transaction; a test below",
    "settle": "",
    "prepare_requeue": "the first half of `requeue`, which calls it",
    "spill": "a reader's of Spark, as the next ones: they change nothing, and it is told",
    "fold": "",
    "pending_pairs": "",
    "discard": "nobody calls it in a broker, nor those that follow",
    "drain_confirmed": "",
    "is_duplicate": "",
    "purge_acks": "",
    "set_ram_duration_target": "",
    "ram_duration": "",
    "needs_timeout": "",
    "timeout": "",
    "resume": "",
    "msg_rates": "",
    "invoke": "",
}


def test_every_operation_of_a_backing_queue_is_made_to_fail_here():
    operations = {name for name in vars(BackingQueue) if not name.startswith("_") or name == "__len__"}
    assert operations == {operation for operation, *_ in CASES} | set(NOT_A_QUEUES_OWN)


@pytest.mark.parametrize(
    ("operation", "do", "arguments", "properties"),
    CASES,
    ids=[
        f"{operation}, {do.__name__}{' by priority' * ('x-max-priority' in more)}" for operation, do, more, _ in CASES
    ],
)
def test_an_error_in_a_queue_operation_restarts_that_queue_alone(broker, operation, do, arguments, properties):
    connection = connect(broker)
    channel = connection.channel()
    channel.queue_declare("q", durable=True, arguments=arguments)
    channel.queue_declare("other", durable=True)
    channel.queue_declare("dead", durable=True)
    channel.confirm_delivery()
    kept = [b"%d" % number for number in range(0 if properties is None else 1 if operation == "depth" else 5)]
    for body in kept:
        channel.basic_publish("", "q", body, pika.BasicProperties(delivery_mode=2, **(properties or {})))
    others = [b"0", b"1"]
    for body in others:
        channel.basic_publish("", "other", body, PERSISTENT)
    bystander = connect(broker).channel()
    consumed: list[bytes] = []
    bystander.basic_consume("dead", lambda _, __, ___, body: consumed.append(body), auto_ack=True)
    before = broker.call(lambda: dict(broker.broker.vhosts["/"].queues))
    break_once(broker, "q", operation)
    do(channel)
    if do is look:
        assert "q" not in {queue["name"] for queue in broker.call(broker.broker.vhosts["/"].info)["queues"]}
    after = broker.call(lambda: dict(broker.broker.vhosts["/"].queues))
    assert after["q"] is not before["q"]
    assert (after["other"], after["dead"]) == (before["other"], before["dead"])
    assert connection.is_open
    channel = connection.channel()
    channel.confirm_delivery()
    if kept:
        method, _, body = channel.basic_get("q")
        assert (body, method.redelivered) == (kept[operation == "drop"], True)  # its length limit holds again
        channel.basic_nack(method.delivery_tag)
    channel.basic_publish("", "q", b"new", PERSISTENT)
    both = [b"both"] if do is fan_out else []
    # What was nacked may be there.
    found = [body for body in bodies(channel, "q") if body != b"refused"]
    assert found == [*kept[2 if operation == "drop" else 0 :], *both, b"new"]
    if do is ack_of_several_queues:
        others = [b"1", b"0"]
    assert bodies(connect(broker).channel(), "other") == [*others, *both]
    channel.basic_publish("", "dead", b"goes on", PERSISTENT)
    pump(bystander.connection, lambda: b"goes on" in consumed)


# ---- the queue's own methods, with nothing in them that works ----

GUARDED = {name for name, value in vars(QueueProcess).items() if hasattr(value, "__wrapped__")} - {"_settle_more"}
ENTRY = Entry(0, encode_head("", "q", persistent=True), b"m")
CALLS = {
    "apply": lambda queue: (QueueArguments(max_length=1),),
    "has_room": lambda queue: (1, 1),
    "admit": lambda queue: ([ENTRY],),
    "refuse": None,  # has no operation of its own: it is the vhost's
    "sift": lambda queue: ([ENTRY],),
    "deliver": lambda queue: ([ENTRY],),
    "accept": lambda queue: ([ENTRY],),
    "run": lambda queue: (),
    "get": lambda queue: (True,),
    "ack": lambda queue: ([1],),
    "reject": lambda queue: ([1],),
    "requeue": lambda queue: ([1],),
    "begin": lambda queue: (),
    "came_back": lambda queue: (),
    "settled": lambda queue: (next(iter(queue.consumers)), 0),
    "unblock": lambda queue: (next(iter(queue.consumers)),),
    "consume": None,
    "cancel": lambda queue: (next(iter(queue.consumers)),),
    "expire": lambda queue: (),
    "purge": lambda queue: (),
    "info": lambda queue: (),
    "__len__": lambda queue: (),
}


def test_every_method_of_a_queue_that_touches_its_messages_is_guarded():
    assert set(CALLS) == GUARDED
    unguarded = {name for name, value in vars(QueueProcess).items() if callable(value) and not name.startswith("_")}
    without_messages = {"monitor", "sender_gone", "shut_down", "used", "stop"}
    assert unguarded - GUARDED == {"expect", "came", "filled", "is_redelivered", "relieve", *without_messages}


@pytest.mark.parametrize("name", [name for name, arguments in CALLS.items() if arguments is not None])
def test_a_queue_in_which_nothing_works_is_restarted_by_any_call(broker, name):
    connection = connect(broker)
    channel = connection.channel()
    for queue in ("q", "other"):
        channel.queue_declare(queue, durable=True, arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
    channel.confirm_delivery()
    for queue in ("q", "other"):
        channel.basic_publish("", queue, b"m", PERSISTENT)
    channel.basic_qos(prefetch_count=1)
    cancelled: list[str] = []
    channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
    channel.basic_consume("q", lambda *_: None, consumer_tag="mine")
    channel.basic_consume("q", lambda *_: None, consumer_tag="second")
    for body in (b"m2", b"m3"):
        channel.basic_publish("", "q", body, PERSISTENT)
    break_once(broker, "q", "everything")

    def call():
        queues = broker.broker.vhosts["/"].queues
        queue, other = queues["q"], queues["other"]
        for consumer in list(queue.consumers):
            consumer.outstanding = 0
            if name in ("run", "cancel"):
                queue.consumers.unblock(consumer)
        with pytest.raises(QueueCrashed):
            getattr(queue, name)(*CALLS[name](queue)) if name != "__len__" else len(queue)
        return queues["q"] is not queue and queues["other"] is other

    assert broker.call(call)
    pump(connection, lambda: cancelled)
    channel.close()
    channel = connection.channel()
    assert bodies(channel, "q") == [b"m", b"m2", b"m3"]
    assert bodies(channel, "other") == [b"m"]


# ---- a queue that fails inside of another one's operation ----


@contextlib.contextmanager
def commit_under_way(broker) -> Iterator[None]:
    """A commit that has begun, and is done only after this block, as on a slow disk."""
    vhost = broker.broker.vhosts["/"]
    begun, go_on = threading.Event(), threading.Event()
    run = vhost.store.committer._run

    def run_slowly(batch) -> None:
        begun.set()
        go_on.wait(SECONDS)
        run(batch)

    vhost.store.committer._run = run_slowly
    connect(broker).channel().basic_publish("", "other", b"m", PERSISTENT)
    assert begun.wait(SECONDS)
    vhost.store.committer._run = run
    try:
        yield
    finally:
        go_on.set()


def reject_first(channel) -> None:
    channel.basic_reject(1, requeue=False)


def requeue_first(channel) -> None:
    channel.basic_nack(1)


def publish_another(channel) -> None:
    channel.basic_publish("", "q", b"1", PERSISTENT)


def publish_one_that_expires(channel) -> None:
    channel.basic_publish("", "q", b"1", pika.BasicProperties(delivery_mode=2, expiration="0"))


@pytest.mark.parametrize(
    ("do", "arguments", "dead"),
    [
        (reject_first, {}, [b"0"]),
        (requeue_first, {"x-queue-type": "quorum", "x-delivery-limit": 0}, [b"0"]),
        (publish_another, {"x-max-length": 0}, [b"1"]),
        (publish_one_that_expires, {}, [b"1"]),
    ],
    ids=["reject", "delivery limit", "overflow", "expiry"],
)
def test_a_dead_letter_waits_for_a_queue_that_fails_when_it_comes_and_the_vhost_goes_on(broker, do, arguments, dead):
    """The queue that it leaves holds the engine's lock, and the commit under way needs it."""
    vhost = broker.broker.vhosts["/"]
    channel = connect(broker).channel()
    channel.queue_declare("other", durable=True)
    channel.queue_declare("dead", durable=True, arguments={"x-max-length": 10, "x-overflow": "reject-publish"})
    channel.queue_declare("q", durable=True, arguments={**LETTERS, **arguments})
    if dead == [b"0"]:
        channel.basic_publish("", "q", b"0", PERSISTENT)
        channel.basic_get("q")
    old = vhost.queues["dead"]
    break_once(broker, "dead", "ready_bytes")
    with commit_under_way(broker):
        do(channel)
        eventually(lambda: vhost._crashes.get("dead"))
    eventually(lambda: broker.call(lambda: len(vhost.queues["dead"])))
    assert broker.call(lambda: vhost.queues["dead"]) is not old
    channel = connect(broker).channel()
    assert [bodies(channel, queue) for queue in ("dead", "q", "other")] == [dead, [], [b"m"]]
    assert broker.broker.vhosts["/"] is vhost


@pytest.mark.parametrize("is_deleted", [False, True], ids=["left", "deleted"])
def test_a_queue_that_fails_on_a_full_disk_is_restarted_when_there_is_room(broker, is_deleted):
    store = broker.broker.vhosts["/"].store
    channel = connect(broker).channel()
    channel.queue_declare("q", durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", "q", b"m", PERSISTENT)
    tries: list[str] = []

    def without_room(name: str) -> None:
        tries.append(name)
        raise DiskFullError("no room, says the test")

    store.restart_queue = without_room
    try:
        break_once(broker, "q", "fetch")
        get(channel)
        channel = connect(broker).channel()
        cancelled: list[str] = []
        channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
        channel.basic_consume("q", lambda *_: None, consumer_tag="meanwhile")
        eventually(lambda: len(tries) > 2)
        if is_deleted:
            channel.queue_delete("q")
            assert channel.queue_declare("q", durable=True).method.message_count == 0
    finally:
        del store.restart_queue
    pump(channel.connection, lambda: cancelled)
    assert bodies(channel, "q") == ([] if is_deleted else [b"m"])


def test_a_queue_whose_restart_fails_stays_down_and_others_go_on(broker):
    store = broker.broker.vhosts["/"].store
    channel = connect(broker).channel()
    channel.queue_declare("q", durable=True)

    def broken(name: str) -> None:
        raise RuntimeError("planted in the restart")

    store.restart_queue = broken
    try:
        break_once(broker, "q", "fetch")
        get(channel)
    finally:
        del store.restart_queue
    channel = connect(broker).channel()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="failed too often"):
        channel.queue_declare("q", durable=True)
    connect(broker).channel().queue_declare("fine")


# ---- what is not the queue's alone ----


def test_a_queue_that_fails_while_it_is_deleted_is_gone(broker):
    channel = connect(broker).channel()
    channel.queue_declare("q", durable=True)
    channel.basic_publish("", "q", b"m", PERSISTENT)
    break_once(broker, "q", "delete_and_terminate")
    channel.queue_delete("q")
    assert channel.queue_declare("q", durable=True).method.message_count == 0


@pytest.mark.parametrize("operation", ["journal_publish", "journal_ack", "reveal", "ack_committed"])
def test_an_error_in_the_middle_of_a_transaction_restarts_the_vhost_and_recovery_has_everything(broker, operation):
    """A dead letter that is half-way: no queue alone can be trusted, the journal can."""
    victim = "dead" if operation in ("journal_publish", "reveal") else "q"
    vhost = broker.broker.vhosts["/"]
    channel = connect(broker).channel()
    channel.queue_declare("q", durable=True, arguments=LETTERS)
    channel.queue_declare("dead", durable=True)
    channel.confirm_delivery()
    for body in (b"0", b"1"):
        channel.basic_publish("", "q", body, PERSISTENT)
    break_once(broker, victim, operation)
    method, _, _ = channel.basic_get("q")
    channel.basic_reject(method.delivery_tag, requeue=False)
    with pytest.raises(pika.exceptions.AMQPError):
        pump(channel.connection, lambda: False)
    OPEN.clear()

    eventually(lambda: broker.broker.vhosts.get("/") not in (None, vhost))
    channel = connect(broker).channel()
    assert sorted(bodies(channel, "q") + bodies(channel, "dead")) == [b"0", b"1"]


@pytest.mark.parametrize("operation", ["checkout", "settle"])
def test_an_error_in_a_checkout_restarts_the_vhost_and_recovery_has_everything(broker, operation):
    """Messages that went to a reader of Spark, and no record of it, or half a group of records."""
    vhost = broker.broker.vhosts["/"]
    channel = connect(broker).channel()
    channel.confirm_delivery()
    for queue in ("q", "other"):
        channel.queue_declare(queue, durable=True)
        channel.basic_publish("", queue, b"m", PERSISTENT)

    stored = [vhost.queues[queue].stored for queue in ("other", "q")]
    if operation == "settle":
        vhost.store.checkout(stored, "lease", 10)

    def fail() -> None:
        stored[1].backing = Broken(stored[1].backing, operation)
        settle = partial(vhost.store.begin_settle, "lease", 1, requeue=True)
        checkout = partial(vhost.store.begin_checkout, stored, "lease", 10)
        with pytest.raises(RuntimeError, match="planted"):
            (settle if operation == "settle" else checkout)()
        vhost.wake()

    broker.call(fail)
    eventually(lambda: broker.broker.vhosts.get("/") not in (None, vhost))
    OPEN.clear()
    channel = connect(broker).channel()
    if operation == "settle":  # a checkout is the lease's until it is settled
        assert [bodies(channel, queue) for queue in ("q", "other")] == [[], []]
        broker.call(lambda: broker.broker.vhosts["/"].store.begin_settle("lease", 1, requeue=True))
    assert [bodies(channel, queue) for queue in ("q", "other")] == [[b"m"], [b"m"]]


def test_a_queue_that_keeps_failing_stays_down_and_others_go_on(broker):
    connection = connect(broker)
    channel = connection.channel()
    channel.queue_declare("q", durable=True)
    channel.confirm_delivery()
    for _ in range(6):
        break_once(broker, "q", "publish")
        publish(channel)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="failed too often"):
        channel.queue_declare("q", durable=True)
    connection.channel().queue_declare("fine")
