"""A client that does not read what it is sent: nothing piles up for it, and it does not stay for ever."""

from __future__ import annotations

import contextlib
from typing import Any

import pamqp.body
import pamqp.commands
import pamqp.frame
import pamqp.header
import pika
import pytest

from tests.broker_clients import Inbox, RawClient, connected, declare, eventually, publish, pump, settle, unique
from warren.amqp.connection import Connection
from warren.amqp.errors import AmqpError
from warren.kernel.frame_writer import HEARTBEAT_FRAME
from warren.queueing.credit_flow import TURN_BYTES, Wait
from warren.testing import RunningBroker
from warren.vhost.vhost import clients_of

MIB = 1024 * 1024


def the_connections(broker: RunningBroker) -> set[Any]:
    return broker.call(lambda: set(broker.broker.vhosts["/"].connections))


def test_returned_messages_do_not_pile_up_for_a_publisher_that_does_not_read(broker):
    body = bytes(100_000)
    message = b"".join(
        pamqp.frame.marshal(part, 1)
        for part in (
            pamqp.commands.Basic.Publish(routing_key=unique("nowhere"), mandatory=True),
            pamqp.header.ContentHeader(body_size=len(body)),
            pamqp.body.ContentBody(body),
        )
    )
    with RawClient(broker) as client:
        client.open(1)
        [served] = the_connections(broker)
        rest = b""
        sent = 0

        def stopped() -> bool:
            nonlocal rest, sent
            with contextlib.suppress(BlockingIOError):
                rest = rest or message
                count = client.socket.send(rest)
                rest, sent = rest[count:], sent + count
            assert sent < 200 * MIB, "the broker keeps all that comes back"
            return broker.call(lambda: served.flow.waits) == ["client"]

        client.socket.setblocking(False)
        eventually(stopped)
        unread = broker.call(lambda: served._transport.get_write_buffer_size())
        assert unread < 4 * MIB
        client.socket.setblocking(True)
        client.expect("Basic.Return")  # it reads again, and is read from again
        for _ in range(sent // len(message) * 2):
            client.receive()
        eventually(lambda: broker.call(lambda: served.flow.waits) == [])


@pytest.mark.parametrize("confirming", [True, False], ids=["confirms", "no answers"])
def test_publishes_wait_for_a_client_that_does_not_read_only_where_they_are_answered(broker, confirming):
    queue = unique()
    with RawClient(broker) as client:
        client.open(1)
        client.call(1, pamqp.commands.Queue.Declare(queue=queue, exclusive=True), "Queue.DeclareOk")
        if confirming:
            client.call(1, pamqp.commands.Confirm.Select(), "Confirm.SelectOk")
        [served] = the_connections(broker)
        broker.call(served.pause_writing)
        client.publish(1, queue, b"body")
        if confirming:
            eventually(lambda: broker.call(lambda: served.flow.waits) == ["client"])
            assert broker.queue_info(queue)["messages_ready"] == 0
            broker.call(served.resume_writing)
            client.expect("Basic.Ack")
        eventually(lambda: broker.queue_info(queue)["messages_ready"] == 1)
        broker.call(served.resume_writing)


def test_a_direct_reply_to_a_client_that_does_not_read_is_lost_and_the_next_one_is_not(broker):
    with connected(broker) as asking, connected(broker) as answering:
        asker, answerer = asking.channel(), answering.channel()
        inbox = Inbox()
        asker.basic_consume("amq.rabbitmq.reply-to", inbox, auto_ack=True)
        [served] = [one for one in the_connections(broker) if broker.call(lambda one=one: one.channels[1].consumers)]
        queue = declare(answerer)
        publish(answerer, queue, b"")  # nothing but a first message
        asker.basic_publish("", queue, b"question", pika.BasicProperties(reply_to="amq.rabbitmq.reply-to"))
        settle(asker)
        answerer.basic_get(queue, auto_ack=True)
        _, properties, _ = answerer.basic_get(queue, auto_ack=True)
        broker.call(served.pause_writing)
        publish(answerer, properties.reply_to, b"lost")
        settle(answerer)
        broker.call(served.resume_writing)
        publish(answerer, properties.reply_to, b"heard")
        pump(asking, lambda: len(inbox))
        assert inbox.bodies == [b"heard"]


def test_a_client_that_takes_nothing_is_gone_after_two_heartbeats_though_it_is_not_read_from(broker):
    with RawClient(broker, heartbeat=60) as client:
        [served] = the_connections(broker)
        now = [1000.0]

        def look(at: float) -> None:
            now[0] = at
            served._timer.cancel()
            served._beat()

        def begin() -> None:
            served._clock = lambda: now[0]
            served._last_out = 1e9  # no heartbeats of ours: they would be taken
            served.pause_writing()
            served.flow.wait_for(Wait.CLIENT)

        broker.call(begin)
        for at in (1000.0, 1120.0):
            broker.call(lambda at=at: look(at))
        broker.call(lambda: (served.send_method(0, b"\0\x0a\0\x3c\1x"), served._flush()))  # connection.blocked
        client.expect("Connection.Blocked")
        broker.call(lambda: setattr(served, "_last_out", 1e9))
        for at in (1121.0, 1241.0):  # it took something: it has as long again
            broker.call(lambda at=at: look(at))
        assert the_connections(broker) == {served}
        broker.call(lambda: look(1242.0))
        with pytest.raises((EOFError, ConnectionResetError)):
            client.receive()
        eventually(lambda: not the_connections(broker))


def test_who_is_not_read_from_for_another_reason_may_be_silent_for_as_long_as_that_takes(broker):
    with RawClient(broker, heartbeat=60) as client:
        [served] = the_connections(broker)
        broker.call(lambda: served.flow.wait_for(Wait.RESOURCES))
        assert broker.call(lambda: served._is_alive(served._clock() + 1000))
        broker.call(lambda: served.flow.done(Wait.RESOURCES))
        assert not broker.call(lambda: served._is_alive(served._clock() + 1000))
        client.open(1)


def fill(broker: RunningBroker, served: Any) -> None:
    """Until something is left that the client's socket does not take; not so much that the broker takes it for stuck."""
    while not broker.call(lambda: served._transport.get_write_buffer_size()):
        broker.call(lambda: (served.send(HEARTBEAT_FRAME * 8192), served._flush()))
    assert broker.call(lambda: served.writable)


@pytest.mark.parametrize("who", ["client", "broker"])
def test_a_connection_that_was_closed_is_gone_after_a_while_though_its_client_never_reads(broker, monkeypatch, who):
    """Its descriptor, and what was to be sent, were kept for as long as the client liked, and it was not counted."""
    monkeypatch.setattr("warren.amqp.connection._CLOSE_SECONDS", 1.0)
    vhost = broker.broker.vhosts["/"]
    with RawClient(broker) as client:
        [served] = the_connections(broker)
        fill(broker, served)
        if who == "client":
            client.send(0, pamqp.commands.Connection.Close(200, "", 0, 0))
        else:
            broker.call(lambda: served.fail(AmqpError(320, "enough")))
        eventually(lambda: not the_connections(broker))
        assert broker.call(lambda: clients_of(vhost)) == 1
        eventually(lambda: broker.call(lambda: clients_of(vhost)) == 0)
        with contextlib.suppress(ConnectionResetError):
            while client.socket.recv(1 << 20):
                pass
        assert broker.call(lambda: served._timer is None)


def test_who_closes_and_reads_slowly_gets_all_that_was_on_its_way(broker):
    vhost = broker.broker.vhosts["/"]
    with RawClient(broker) as client:
        [served] = the_connections(broker)
        fill(broker, served)
        client.send(0, pamqp.commands.Connection.Close(200, "", 0, 0))
        eventually(lambda: not the_connections(broker))
        received = b""
        while more := client.socket.recv(1 << 20):
            received += more
        assert received.endswith(pamqp.frame.marshal(pamqp.commands.Connection.CloseOk(), 0))
    eventually(lambda: broker.call(lambda: not vhost.departing and served._timer is None))


def test_a_broken_frame_behind_publishes_that_wait_closes_the_connection_when_these_are_done(broker):
    """It was heard of with the next bytes only, and who waits for an answer sends none."""
    queue = unique()
    vhost = broker.broker.vhosts["/"]
    with RawClient(broker) as client:
        client.open(1)
        client.call(1, pamqp.commands.Queue.Declare(queue=queue, durable=True), "Queue.DeclareOk")
        broker.call(lambda: vhost.set_alarm("memory", True))
        try:
            [served] = the_connections(broker)
            client.publish(1, queue, b"held")
            eventually(lambda: broker.call(lambda: served.flow.waits) == ["resources"])
            broker.call(
                lambda: served.data_received(b"\x01\x00\x01\x00\x00\x00\x04\x00\x0a\x00\x0a\x00")
            )  # no end octet
            assert broker.call(lambda: served.state) == "open"
        finally:
            broker.call(lambda: vhost.set_alarm("memory", False))
        assert client.expect("Connection.Close")[1].reply_code == 501
    assert broker.queue_info(queue)["messages_ready"] == 1
    broker.call(lambda: vhost.remove_queue(vhost.queues[queue]))


def test_a_publisher_who_always_has_more_lets_the_others_go_first(broker, monkeypatch):
    """libuv reads a socket up to 32 times before it looks at another one: a consumer waited for some megabytes of others."""
    queue = unique()
    message = b"".join(
        pamqp.frame.marshal(part, 1)
        for part in (
            pamqp.commands.Basic.Publish(routing_key=queue),
            pamqp.header.ContentHeader(body_size=1000),
            pamqp.body.ContentBody(bytes(1000)),
        )
    )
    pieces: list[tuple[int, int]] = []  # the turn of the loop, and the size
    turn = ended = 0
    received = Connection.data_received

    def data_received(self: Connection, data: bytes) -> None:
        nonlocal turn, ended

        def end() -> None:
            nonlocal ended
            ended = turn

        if turn == ended:
            turn += 1
            self._loop.call_soon(end)
        pieces.append((turn, len(data)))
        received(self, data)

    monkeypatch.setattr(Connection, "data_received", data_received)
    with RawClient(broker) as client:
        client.open(1)
        client.call(1, pamqp.commands.Queue.Declare(queue=queue, exclusive=True), "Queue.DeclareOk")
        client.socket.sendall(message * 20_000)
        client.call(1, pamqp.commands.Queue.Purge(queue=queue), "Queue.PurgeOk")
    large = [turn for turn, size in pieces if size >= TURN_BYTES]
    assert len(large) > 10, "nothing was shown"
    assert len(set(large)) == len(large), "two large pieces in one turn of the loop"
