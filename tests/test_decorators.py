"""What decorators are told of queues, and who is told when a queue or a channel goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from tests.broker_clients import Inbox, connected, eventually, publish, pump, settle
from warren.queueing.arguments import QueueArguments
from warren.queueing.decorators import DecoratedQueue, DecoratorError, QueueDecorator, load_decorators
from warren.routing.policies import Policy
from warren.testing import RunningBroker, running_broker


class Told(QueueDecorator):
    """Writes down what it is told; cares for names that begin with "told", unless a policy limits them."""

    log: ClassVar[list[tuple[Any, ...]]] = []

    def active_for(self, queue: DecoratedQueue) -> bool:
        return queue.name.startswith("told") and queue.arguments.max_length != 99

    def startup(self, queue: DecoratedQueue) -> None:
        self.log.append(("startup", queue.name))

    def shutdown(self, queue: DecoratedQueue) -> None:
        self.log.append(("shutdown", queue.name))

    def policy_changed(self, queue: DecoratedQueue, old: QueueArguments, new: QueueArguments) -> None:
        self.log.append(("policy", queue.name, old.max_length, new.max_length))

    def consumer_state_changed(self, queue: DecoratedQueue, max_active_priority: int | None, is_empty: bool) -> None:
        self.log.append(("state", max_active_priority, "empty" if is_empty else "not empty"))

    def info(self, queue: DecoratedQueue) -> dict[str, Any]:
        return {"told": True}


class Broken(QueueDecorator):
    def active_for(self, queue: DecoratedQueue) -> bool:
        return queue.name == "broken"

    def consumer_state_changed(self, queue: DecoratedQueue, max_active_priority: int | None, is_empty: bool) -> None:
        raise RuntimeError("a decorator with a mistake")


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    Told.log = []
    names = ["consumer_capacity", f"{__name__}:Broken", f"{__name__}:Told"]
    with running_broker(queue_decorators=names) as running:
        yield running


@pytest.fixture
def channel(broker) -> Iterator[Any]:
    with connected(broker) as connection:
        yield connection.channel()


def told() -> list[tuple[Any, ...]]:
    found, Told.log = Told.log, []
    return found


def test_a_decorator_is_told_of_consumers_and_emptiness_once_for_a_change(channel, caplog):
    channel.queue_declare("told")
    assert told() == [("startup", "told")]
    publish(channel, "told", b"1", b"2", b"3")
    settle(channel)
    assert told() == [("state", None, "not empty")]
    channel.basic_qos(prefetch_count=2)
    inbox = Inbox()
    tag = channel.basic_consume("told", inbox, arguments={"x-priority": 5})
    pump(channel.connection, lambda: len(inbox) == 2)
    assert told() == [], "it took two and has no room for more: still nobody can take one"
    channel.basic_ack(inbox.tags[0])
    pump(channel.connection, lambda: len(inbox) == 3)
    assert told() == [("state", 5, "empty")], "as in RabbitMQ, who is full is blocked by the first that it cannot take"
    channel.basic_ack(inbox.tags[-1], multiple=True)
    settle(channel)
    publish(channel, "told", b"4")
    settle(channel)
    assert told() == [], "it was handed over: nothing has changed"
    channel.basic_cancel(tag)
    settle(channel)
    assert told() == [("state", None, "empty")]


def test_a_queue_that_becomes_empty_because_its_messages_expire_or_are_purged_is_told(channel):
    channel.queue_declare("told")
    told()
    publish(channel, "told", b"short-lived", expiration="1")
    eventually(lambda: Told.log[-1:] == [("state", None, "empty")])
    assert told() == [("state", None, "not empty"), ("state", None, "empty")]
    publish(channel, "told", b"purged")
    channel.queue_purge("told")
    assert told() == [("state", None, "not empty"), ("state", None, "empty")]


def test_a_policy_that_changes_a_queue_is_told_and_decides_who_cares(broker, channel):
    def limit(length: int) -> None:
        policy = Policy(name="limit", pattern="^told", definition={"max-length": length})
        broker.call(lambda: broker.broker.vhosts["/"].set_policy(policy))

    channel.queue_declare("told")
    channel.queue_declare("silent")
    told()
    limit(10)
    limit(20)
    assert told()[:3] == [("policy", "told", None, 10), ("state", None, "empty"), ("policy", "told", 10, 20)]
    assert broker.queue_info("told")["told"] is True
    limit(99)
    assert told() == [("shutdown", "told")]
    assert "told" not in broker.queue_info("told")
    limit(10)
    assert told()[0] == ("startup", "told")
    channel.queue_delete("told")
    assert told()[-1] == ("shutdown", "told")


def test_a_queue_that_is_restarted_starts_anew_for_decorators_and_a_node_that_stops_shuts_them_down(channel, broker):
    channel.queue_declare("told-1", durable=True)
    told()
    vhost = broker.broker.vhosts["/"]
    broker.call(lambda: vhost.queue_crashed(vhost.queues["told-1"], RuntimeError("as if")))
    assert told() == [("shutdown", "told-1"), ("startup", "told-1")]
    channel.connection.close()
    broker.stop()
    assert told()[-1] == ("shutdown", "told-1")


def test_a_decorator_that_raises_is_taken_off_and_the_queue_goes_on(broker, channel, caplog):
    channel.queue_declare("broken")
    publish(channel, "broken", b"1")
    assert channel.basic_get("broken", auto_ack=True)[2] == b"1"
    assert [record.getMessage() for record in caplog.records if "decorator" in record.getMessage()] == [
        "decorator Broken failed in consumer_state_changed and is taken off queue 'broken'"
    ]


def test_the_capacity_of_consumers_is_shown(broker, channel):
    channel.queue_declare("q")
    assert broker.queue_info("q")["consumer_capacity"] == 0.0
    inbox = Inbox()
    channel.basic_qos(prefetch_count=1)
    channel.basic_consume("q", inbox)
    settle(channel)
    assert broker.queue_info("q")["consumer_capacity"] == 1.0
    publish(channel, "q", b"kept", b"one too many")
    pump(channel.connection, lambda: len(inbox) == 1)
    eventually(lambda: broker.queue_info("q")["consumer_capacity"] < 1.0)


@pytest.mark.parametrize(
    "name", ["capacity", "no.such.module:Class", "warren.errors:Nothing", "warren.errors:WarrenError"]
)
def test_a_decorator_that_cannot_be_had_is_named_and_no_node_starts(name, tmp_path):
    with pytest.raises(DecoratorError, match=f"queue_decorators: .*{name!r}"):
        load_decorators([name])
    with pytest.raises(DecoratorError), running_broker(str(tmp_path), queue_decorators=[name]):
        pass


# -- monitors ----------------------------------------------------------------------------------------------------------


def test_a_channel_lets_go_of_queues_that_are_gone(broker, channel):
    """One that lives long and uses many queues for a moment, as for replies, must not keep them all."""
    vhost = broker.broker.vhosts["/"]
    alive = []
    for number in range(10):
        name = f"short-lived-{number}"
        channel.queue_declare(name, exclusive=True)
        publish(channel, name, b"consumed", b"gotten", b"not acked")
        inbox = Inbox()
        tag = channel.basic_consume(name, inbox, auto_ack=number % 2 == 0)
        pump(channel.connection, lambda inbox=inbox: len(inbox) == 3)
        channel.basic_cancel(tag)
        channel.basic_get(name)
        alive.append(broker.call(lambda name=name: weakref.ref(vhost.queues[name])))
        channel.queue_delete(name)
        if number % 2:
            channel.basic_ack(inbox.tags[-1], multiple=True)  # good tags, of a queue that is gone
    [served] = broker.call(lambda: [one.channels[1] for one in vhost.connections])
    assert broker.call(served.statistics.info)["queues"] == []
    broker.call(gc.collect)
    assert [reference() for reference in alive if reference() is not None] == []
    channel.queue_declare("after", exclusive=True)
    publish(channel, "after", b"served")
    assert channel.basic_get("after", auto_ack=True)[2] == b"served"


def test_a_channel_lets_go_of_consumers_that_were_cancelled(broker, channel):
    channel.queue_declare("q", exclusive=True)
    for number in range(10):
        inbox = Inbox()
        tag = channel.basic_consume("q", inbox)
        publish(channel, "q", b"%d" % number)
        pump(channel.connection, lambda inbox=inbox: len(inbox) == 1)
        if number != 5:
            channel.basic_ack(inbox.tags[0])
        else:
            unacked = inbox.tags[0]
        channel.basic_cancel(tag)
    [served] = broker.call(lambda: [one.channels[1] for one in broker.broker.vhosts["/"].connections])
    assert broker.call(lambda: sum(one is not None for one in served._consumers)) == 1, "what it has is to be settled"
    channel.basic_ack(unacked)
    settle(channel)
    assert broker.queue_info("q")["messages"] == 0


def test_a_queue_lets_go_of_channels_that_are_gone(broker, channel):
    channel.queue_declare("q")
    publish(channel, "q", b"1", b"2")
    with connected(broker) as connection:
        other = connection.channel()
        inbox = Inbox()
        other.basic_consume("q", inbox)
        pump(connection, lambda: len(inbox) == 2)
        queue = broker.broker.vhosts["/"].queues["q"]
        assert broker.call(lambda: len(queue._monitors)) == 1
    assert eventually(lambda: broker.queue_info("q")["messages_ready"] == 2)
    assert broker.call(lambda: (len(queue._monitors), len(queue.consumers))) == (0, 0)
    method, _, body = channel.basic_get("q")
    assert (body, method.redelivered) == (b"1", True)
