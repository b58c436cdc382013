"""tx: what a transaction may hold, what it costs to settle in it, and that nobody waits for ever for its commit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pamqp.commands
import pamqp.frame
import pytest

from tests.broker_clients import RawClient, unique
from warren.amqp.errors import AmqpError
from warren.amqp.transaction import MOST_BYTES, Transaction
from warren.kernel.entry import Entry
from warren.kernel.frames import METHOD
from warren.kernel.unacked import Unacked
from warren.queueing.arrival import Arrival

MIB = 1024 * 1024


class Walked(Unacked):
    """Counts the tags that it was asked for."""

    count = 0

    def tags(self, *between: int) -> list[int]:
        found = super().tags(*between)
        self.count += len(found)
        return found


class Settled:
    """A transaction of a channel that has `count` deliveries, and what its commit settles."""

    def __init__(self, count: int) -> None:
        self.unacked = Walked()
        self.unacked.add(0, 1, [Entry(seq, b"", b"") for seq in range(count)])
        self.done: list[tuple[int, bool, str]] = []
        channel: Any = SimpleNamespace(
            unacked=self.unacked,
            connection=SimpleNamespace(held_back=0),
            settle_tag=lambda *settlement: self.done.append(settlement),
            vhost=SimpleNamespace(commits=SimpleNamespace(wait=lambda waiter, number: None)),
        )
        self.transaction = Transaction(channel)


@pytest.mark.parametrize("multiple", [False, True])
def test_each_delivery_is_looked_at_once_however_many_are_settled_one_by_one(multiple):
    count = 1000
    made = Settled(count)
    for tag in range(1, count + 1):
        made.transaction.settle(tag, multiple, "ack")
    assert made.unacked.count <= count
    assert made.transaction.settled == set(range(1, count + 1))


def test_settlements_of_a_transaction_are_those_that_were_open_when_they_came():
    made = Settled(10)
    transaction = made.transaction
    transaction.settle(7, False, "reject")
    transaction.settle(3, True, "ack")
    for tag, multiple in ((7, False), (7, True), (2, False), (3, True), (11, False), (11, True), (0, False)):
        with pytest.raises(AmqpError, match=f"unknown delivery tag {tag}"):
            transaction.settle(tag, multiple, "ack")
    transaction.settle(8, True, "requeue")
    assert transaction.settled == set(range(1, 9))
    transaction.settle(0, True, "ack")
    transaction.settle(0, True, "ack")  # there is none left: no error
    made.unacked.add(0, 1, [Entry(10, b"", b"")])
    transaction.commit()
    assert made.done == [(7, False, "reject"), (3, True, "ack"), (8, True, "requeue"), (10, True, "ack")]


def test_what_was_settled_before_a_rollback_can_be_settled_again():
    made = Settled(3)
    made.transaction.settle(2, True, "ack")
    made.transaction.rollback()
    made.transaction.settle(1, True, "ack")
    made.transaction.settle(2, False, "ack")
    assert made.transaction.settled == {1, 2}


def test_a_transaction_that_holds_too_many_bytes_is_refused_and_lets_go_of_them():
    made = Settled(0)
    body = bytes(100 * MIB)

    def publish() -> Arrival:
        arrival = Arrival([Entry(0, b"", body)], ("q",), False)
        made.transaction.publish(arrival)
        return arrival

    publish()
    publish()
    with pytest.raises(AmqpError, match=f"larger than {MOST_BYTES} bytes.*commit more often") as refused:
        publish()
    assert (refused.value.code, refused.value.class_id, refused.value.method_id) == (406, 60, 40)
    assert len(refused.value.text) < 255
    publish()  # nothing of it is there any more
    publish()


def test_the_transactions_of_a_connection_hold_no_more_together_than_one_may():
    first, second = Settled(0), Settled(0)
    second.transaction._channel.connection = connection = first.transaction._channel.connection

    def publish(made: Settled) -> None:
        made.transaction.publish(Arrival([Entry(0, b"", bytes(100 * MIB))], ("q",), False))

    publish(first)
    publish(second)
    with pytest.raises(AmqpError, match=f"on this connection are larger than {MOST_BYTES} bytes"):
        publish(second)
    assert 100 * MIB <= connection.held_back < 101 * MIB  # the first has lost nothing
    publish(first)
    with pytest.raises(AmqpError, match="commit more often"):
        publish(second)
    first.transaction.rollback()
    assert connection.held_back == 0


@pytest.mark.parametrize("error", [True, False], ids=["an error", "a close"])
def test_a_channel_that_is_gone_holds_nothing_back(broker, error):
    """Until its close is answered a channel that failed is still there, and what it had held back with it."""
    with RawClient(broker) as client:
        client.open(1)
        client.call(1, pamqp.commands.Tx.Select(), "Tx.SelectOk")
        client.publish(1, "nowhere", bytes(1000))
        client.call(1, pamqp.commands.Basic.Qos(), "Basic.QosOk")  # the publish is there
        [served] = broker.call(lambda: list(broker.broker.vhosts["/"].connections))
        channel = broker.call(lambda: served.channels[1])
        assert broker.call(lambda: served.held_back) > 1000
        if error:
            client.call(1, pamqp.commands.Queue.Declare(queue=unique(), passive=True), "Channel.Close")
        else:
            client.call(1, pamqp.commands.Channel.Close(0, "", 0, 0), "Channel.CloseOk")
        assert broker.call(lambda: served.held_back) == 0
        assert not channel.transaction._publishes


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_end_of_a_transaction_makes_room_for_the_next(end):
    made = Settled(0)
    made.transaction._channel.arrive = lambda arrival: None
    for _ in range(3):
        made.transaction.publish(Arrival([Entry(0, b"", bytes(200 * MIB))], ("q",), False))
        getattr(made.transaction, end)()


def test_messages_without_a_body_count_in_a_transaction_too():
    made = Settled(0)
    with pytest.raises(AmqpError, match="commit more often"):
        made.transaction.publish(Arrival([Entry(0, b"", b"")] * (MOST_BYTES // 256), ("q",), False))


def test_a_channel_that_is_closed_during_its_commit_does_not_leave_its_connection_waiting(broker):
    """As the consumer timeout does it: the connection holds what came behind the commit, of other channels too."""
    queue = unique()
    with RawClient(broker) as client:
        for channel in (1, 2):
            client.open(channel)
        client.call(1, pamqp.commands.Queue.Declare(queue=queue, durable=True), "Queue.DeclareOk")
        client.call(1, pamqp.commands.Tx.Select(), "Tx.SelectOk")
        client.publish(1, queue, b"body", delivery_mode=2)
        client.call(2, pamqp.commands.Basic.Qos(), "Basic.QosOk")  # the publish is there
        [served] = broker.call(lambda: list(broker.broker.vhosts["/"].connections))

        def commit_and_close() -> list[str]:
            held = [(1, pamqp.commands.Basic.Qos()), (2, pamqp.commands.Queue.Delete(queue=queue))]
            served.channels[1].tx_commit()
            served.data_received(b"".join(pamqp.frame.marshal(method, channel) for channel, method in held))
            waits = served.flow.waits
            served._error(AmqpError(406, "delivery acknowledgement timed out"), (METHOD, 1))
            return waits

        assert broker.call(commit_and_close) == ["transaction"]
        assert client.expect("Channel.Close")[0] == 1
        assert client.expect("Queue.DeleteOk")[1].message_count == 1
