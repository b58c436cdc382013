"""The broker with pika, where something is wrong: each mistake with its code, and what lives on; passwords, vhosts,
heartbeats, limits, restarts."""

from __future__ import annotations

import contextlib
import socket
import time

import amqp.exceptions
import kombu
import pamqp.body
import pamqp.commands
import pamqp.header
import pamqp.heartbeat
import pika
import pika.exceptions
import pytest

from tests.broker_clients import Inbox, RawClient, connected, drain, eventually, get, parameters, pump, settle, unique
from warren.testing import running_broker

Properties = pika.BasicProperties
Basic, Channel, Connection = pamqp.commands.Basic, pamqp.commands.Channel, pamqp.commands.Connection
Exchange, Queue, Tx = pamqp.commands.Exchange, pamqp.commands.Queue, pamqp.commands.Tx


# ---- mistakes that close a channel ----


def publish_and_wait(channel, *arguments, **named) -> None:
    channel.basic_publish(*arguments, **named)
    settle(channel)


def declare(channel, **arguments) -> str:
    name = unique()
    channel.queue_declare(name, exclusive=True, arguments=arguments)
    return name


@pytest.mark.parametrize(
    ("code", "words", "mistake"),
    [
        (404, "no queue 'nope' in vhost '/'", lambda c: c.basic_consume("nope", Inbox())),
        (404, "no queue 'nope' in vhost '/'", lambda c: c.queue_purge("nope")),
        (404, "no queue 'nope' in vhost '/'", lambda c: c.queue_bind("nope", "amq.direct", "k")),
        (404, "no exchange 'nope' in vhost '/'", lambda c: publish_and_wait(c, "nope", "k", b"")),
        (404, "no exchange 'nope' in vhost '/'", lambda c: c.queue_bind(declare(c), "nope", "k")),
        (404, "no exchange 'nope' in vhost '/'", lambda c: c.exchange_bind("amq.direct", "nope")),
        (404, "no exchange 'nope' in vhost '/'", lambda c: c.exchange_bind("nope", "amq.direct")),
        (403, "reserved prefix", lambda c: c.exchange_declare("amq.mine", "direct")),
        (403, "amq.direct", lambda c: c.exchange_delete("amq.direct")),
        (403, "default exchange", lambda c: c.queue_bind(declare(c), "", "k")),
        (403, "default exchange", lambda c: c.exchange_delete("")),
        (403, "default exchange", lambda c: c.exchange_declare("", "direct", durable=True)),
        (403, "default exchange", lambda c: c.exchange_bind("amq.fanout", "")),
        (406, "inequivalent arg 'type'", lambda c: c.exchange_declare("amq.direct", "fanout", durable=True)),
        (406, "inequivalent arg 'durable'", lambda c: c.exchange_declare("amq.direct", "direct", durable=False)),
        (406, "inequivalent arg 'x-max-length'", lambda c: redeclare(c, {"x-max-length": 5}, {"x-max-length": 6})),
        (406, "inequivalent arg 'x-message-ttl'", lambda c: redeclare(c, {"x-message-ttl": 5}, {})),
        (406, "x-message-ttl", lambda c: declare(c, **{"x-message-ttl": "soon"})),
        (406, "x-expires", lambda c: declare(c, **{"x-expires": 0})),
        (406, "x-dead-letter-exchange", lambda c: declare(c, **{"x-dead-letter-routing-key": "k"})),
        (406, "unknown delivery tag 1", lambda c: (c.basic_ack(1), settle(c))),
        (406, "unknown delivery tag 1", lambda c: (c.basic_nack(1), settle(c))),
        (406, "unknown delivery tag 1", lambda c: (c.basic_reject(1), settle(c))),
        (406, "unknown delivery tag 1", lambda c: ack_twice(c)),
        (
            406,
            "user_id property set to 'root' but authenticated user was 'guest'",
            lambda c: publish_and_wait(c, "", "k", b"", Properties(user_id="root")),
        ),
        (406, "invalid expiration", lambda c: publish_and_wait(c, "", "k", b"", Properties(expiration="soon"))),
        (406, "invalid expiration", lambda c: publish_and_wait(c, "", "k", b"", Properties(expiration="-1"))),
        (406, "CC", lambda c: publish_and_wait(c, "", "k", b"", Properties(headers={"CC": "no list"}))),
        (406, "cannot switch from confirm to tx mode", lambda c: (c.confirm_delivery(), c.tx_select())),
        (406, "cannot switch from tx to confirm mode", lambda c: (c.tx_select(), c.confirm_delivery())),
        (406, "channel is not transactional", lambda c: c.tx_commit()),
        (406, "channel is not transactional", lambda c: c.tx_rollback()),
        (403, "internal exchange", lambda c: publish_to_internal(c)),
    ],
)
def test_a_mistake_closes_its_channel_and_no_other(connection, code, words, mistake):
    neighbour = connection.channel()
    inbox = Inbox()
    name = declare(neighbour)
    neighbour.basic_consume(name, inbox)
    channel = connection.channel()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        mistake(channel)
    assert caught.value.reply_code == code
    assert words in caught.value.reply_text
    neighbour.basic_publish("", name, b"alive")
    pump(connection, lambda: inbox.bodies == [b"alive"])
    assert connection.channel().channel_number == channel.channel_number  # the number is free again


def redeclare(channel, first: dict, second: dict) -> None:
    name = declare(channel, **first)
    channel.queue_declare(name, exclusive=True, arguments=second)


def ack_twice(channel) -> None:
    name = declare(channel)
    channel.basic_publish("", name, b"x")
    channel.basic_get(name)
    channel.basic_ack(1)
    channel.basic_ack(1)
    settle(channel)


def publish_to_internal(channel) -> None:
    name = unique("x")
    channel.exchange_declare(name, "fanout", internal=True, auto_delete=True)
    publish_and_wait(channel, name, "", b"")


def test_the_error_names_the_method_that_made_it(broker):
    with RawClient(broker) as client:
        client.open(1)
        close = client.call(1, Queue.Declare(queue="nope", passive=True), "Channel.Close")
        assert (close.reply_code, close.class_id, close.method_id) == (404, 50, 10)
        assert close.reply_text == "NOT_FOUND - no queue 'nope' in vhost '/'"
        client.send(1, Channel.CloseOk())
        client.open(1)
        close = client.call(1, Basic.Ack(9), "Channel.Close")
        assert (close.class_id, close.method_id) == (60, 80)


def test_what_comes_behind_a_mistake_is_not_done(broker):
    name = unique()
    with RawClient(broker) as client:
        client.open(1)
        client.send(1, Basic.Ack(9), Queue.Declare(queue=name))
        client.expect("Channel.Close")
        client.send(1, Channel.CloseOk())
        client.open(1)
        close = client.call(1, Queue.Declare(queue=name, passive=True), "Channel.Close")
        assert close.reply_code == 404


def test_a_body_too_large_closes_the_channel(tmp_path):
    with running_broker(str(tmp_path), max_message_size=1000) as small, connected(small) as connection:
        channel = connection.channel()
        name = declare(channel)
        channel.basic_publish("", name, b"x" * 1000)
        settle(channel)
        channel.basic_publish("", name, b"x" * 1001)
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
            settle(channel)
        assert caught.value.reply_code == 406
        assert "message size 1001 is larger than configured max size 1000" in caught.value.reply_text
        assert drain(connection.channel(), name) == [b"x" * 1000]


# ---- mistakes that close the connection ----


def content(size: int) -> pamqp.header.ContentHeader:
    return pamqp.header.ContentHeader(body_size=size)


@pytest.mark.parametrize(
    ("code", "frames"),
    [
        pytest.param(504, [(5, Queue.Declare(queue="q"))], id="a channel that is not open"),
        pytest.param(504, [(5, Basic.Publish()), (5, content(0))], id="a publish on a channel that is not open"),
        pytest.param(504, [(1, Channel.Open())], id="a channel opened twice"),
        pytest.param(540, [(1, Basic.Qos(prefetch_size=1))], id="prefetch by size"),
        pytest.param(540, [(1, Basic.Recover(requeue=False))], id="recover without requeue"),
        pytest.param(540, [(1, Basic.Publish(immediate=True)), (1, content(0))], id="immediate"),
        pytest.param(505, [(1, content(5))], id="a header without its method"),
        pytest.param(505, [(1, pamqp.body.ContentBody(b"x"))], id="a body without its header"),
        pytest.param(505, [(1, Basic.Publish()), (1, Queue.Declare(queue="q"))], id="a method in the midst of content"),
        pytest.param(504, [(0, Connection.Open())], id="a second connection.open"),
        pytest.param(
            503, [(1, Exchange.Declare(exchange="x-1", exchange_type="nonsense"))], id="no such exchange type"
        ),
    ],
)
def test_a_grave_mistake_closes_the_connection(broker, code, frames):
    with RawClient(broker) as client:
        client.open(1)
        for channel, frame in frames:
            client.send(channel, frame)
        _, close = client.expect("Connection.Close")
        assert close.reply_code == code
        client.send(0, Connection.CloseOk())
        with pytest.raises((EOFError, ConnectionResetError)):
            client.receive()


def test_a_consumer_tag_used_twice_closes_the_connection(connection):
    channel = connection.channel()
    name = declare(channel)
    with RawClientOf(connection) as client:
        client.open(1)
        client.call(1, Queue.Declare(queue=(own := unique()), exclusive=True), "Queue.DeclareOk")
        client.call(1, Basic.Consume(queue=own, consumer_tag="t"), "Basic.ConsumeOk")
        client.send(1, Basic.Consume(queue=own, consumer_tag="t"))
        assert client.expect("Connection.Close")[1].reply_code == 530
    channel.queue_declare(name, passive=True)


def RawClientOf(connection) -> RawClient:
    """Another client of the same broker."""

    class Address:
        host = connection._impl.params.host
        port = connection._impl.params.port

    return RawClient(Address())  # type: ignore[arg-type]


def test_rubbish_in_place_of_a_frame_closes_the_connection(broker):
    with RawClient(broker) as client:
        client.socket.sendall(b"\x09\x00\x01\x00\x00\x00\x01x!")
        assert client.expect("Connection.Close")[1].reply_code == 501


def test_a_frame_over_the_negotiated_size_closes_the_connection(broker):
    with RawClient(broker, frame_max=4096) as client:
        client.open(1)
        client.send(1, Basic.Publish(routing_key="k"), content(5000), pamqp.body.ContentBody(b"x" * 5000))
        assert client.expect("Connection.Close")[1].reply_code == 501


def test_another_protocol_is_answered_with_ours(broker):
    with socket.create_connection((broker.host, broker.port), timeout=10) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert client.recv(100) == b"AMQP\x00\x00\x09\x01"
        with contextlib.suppress(ConnectionResetError):  # closed with bytes that nobody read
            assert client.recv(100) == b""


# ---- who may come in ----


def test_a_wrong_password_is_refused_with_a_reason(broker):
    with pytest.raises(pika.exceptions.ProbableAuthenticationError) as caught:
        pika.BlockingConnection(parameters(broker, credentials=pika.PlainCredentials("guest", "wrong")))
    assert "ACCESS_REFUSED" in str(caught.value)
    with connected(broker) as connection:
        assert connection.is_open


def test_an_unknown_vhost_is_refused_with_a_reason(broker):
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError) as caught:
        pika.BlockingConnection(parameters(broker, virtual_host="nowhere"))
    assert "(530) \"NOT_ALLOWED - vhost 'nowhere' not found\"" in str(caught.value)


def test_amqplain_is_a_way_to_log_in_too(broker):
    with kombu.Connection(broker.url, login_method="AMQPLAIN") as connection:
        connection.connect()
        assert connection.connected
    with (
        kombu.Connection(broker.vhost_url("/", password="wrong"), login_method="AMQPLAIN") as connection,
        pytest.raises(amqp.exceptions.AccessRefused),
    ):
        connection.connect()


def test_permissions_are_asked_for_every_action(broker):
    """The clerk may use queues that begin with own- and nothing else."""
    with connected(broker, credentials=pika.PlainCredentials("clerk", "secret")) as connection:
        connection.channel().queue_declare("own-queue", exclusive=True)
        for mistake in (
            lambda c: c.queue_declare("foreign"),
            lambda c: publish_and_wait(c, "amq.fanout", "", b""),
            lambda c: publish_and_wait(c, "", "own-queue", b""),
            lambda c: c.queue_bind("own-queue", "amq.fanout"),
        ):
            with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
                mistake(connection.channel())
            assert caught.value.reply_code == 403
            assert "refused for user 'clerk'" in caught.value.reply_text
        settle_publish = connection.channel()
        settle_publish.basic_get("own-queue")


# ---- limits of a connection ----


def test_the_channel_limit_is_told_and_kept(tmp_path):
    with running_broker(str(tmp_path), channel_max=3) as small:
        with connected(small) as connection:
            for _ in range(3):
                connection.channel()
            with pytest.raises(pika.exceptions.NoFreeChannels):
                connection.channel()
        with RawClient(small) as client:
            client.send(4, Channel.Open())
            assert client.expect("Connection.Close")[1].reply_code == 530


def test_a_connection_that_only_sends_heartbeats_stays_open(broker):
    with connected(broker, heartbeat=1) as connection:
        channel = connection.channel()
        name = declare(channel)
        inbox = Inbox()
        channel.basic_consume(name, inbox)
        deadline = time.monotonic() + 3.5  # three intervals: without heartbeats either side would have cut it
        while time.monotonic() < deadline:
            connection.process_data_events(0.1)
        channel.basic_publish("", name, b"alive")
        pump(connection, lambda: inbox.bodies == [b"alive"])


def test_a_client_that_went_silent_is_cut_off_and_its_messages_come_back(broker, connection):
    channel = connection.channel()
    name = unique()
    channel.queue_declare(name)
    channel.basic_publish("", name, b"x")
    settle(channel)
    with RawClient(broker, heartbeat=1) as client:
        client.open(1)
        client.call(1, Basic.Get(queue=name), "Basic.GetOk")
        client.receive(), client.receive()
        started = time.monotonic()
        beats = 0
        with contextlib.suppress(EOFError, ConnectionResetError):
            while isinstance(client.receive_any()[1], pamqp.heartbeat.Heartbeat):
                beats += 1
        assert time.monotonic() - started > 1.5
        assert beats >= 1
    method, _, body = get(channel, name)
    assert (body, method.redelivered) == (b"x", True)
    channel.queue_delete(name)


def test_a_client_may_switch_heartbeats_off(broker):
    with connected(broker, heartbeat=0) as connection:
        assert connection._impl.params.heartbeat == 0
        assert list(broker.peers().values()).count(0) == 1


# ---- restarts ----


def test_durable_messages_are_there_after_a_restart_on_the_same_port(tmp_path):
    with running_broker(str(tmp_path)) as broker:
        port = broker.port
        connection = pika.BlockingConnection(parameters(broker))
        channel = connection.channel()
        channel.queue_declare("kept", durable=True, arguments={"x-max-priority": 3})
        channel.queue_declare("gone")
        channel.confirm_delivery()
        for number in range(10):
            for name in ("kept", "gone"):
                channel.basic_publish("", name, b"%d" % number, Properties(delivery_mode=2, priority=number % 2))
        channel.basic_publish("", "kept", b"transient", Properties(delivery_mode=1))
        held = channel.basic_get("kept")[2]
    with pytest.raises(pika.exceptions.AMQPConnectionError) as caught:
        channel.queue_declare("kept", passive=True)
    assert "CONNECTION_FORCED" in repr(caught.value)
    with running_broker(str(tmp_path), amqp_port=port) as broker, connected(broker) as connection:
        assert broker.port == port
        channel = connection.channel()
        method, _, body = channel.basic_get("kept", auto_ack=True)
        assert (body, method.redelivered) == (held, True)
        assert [held, *drain(channel, "kept")] == [b"%d" % number for number in (1, 3, 5, 7, 9, 0, 2, 4, 6, 8)]
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
            channel.queue_declare("gone", passive=True)
        assert refused.value.reply_code == 404


def test_dead_letters_and_their_history_survive_a_restart(tmp_path):
    with running_broker(str(tmp_path)) as broker, connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("dead", durable=True)
        channel.queue_declare(
            "work",
            durable=True,
            arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead", "x-message-ttl": 60000},
        )
        channel.basic_publish("", "work", b"x", Properties(delivery_mode=2))
        channel.basic_reject(channel.basic_get("work")[0].delivery_tag, requeue=False)
        eventually(lambda: channel.queue_declare("dead", passive=True).method.message_count == 1)
    with running_broker(str(tmp_path)) as broker, connected(broker) as connection:
        channel = connection.channel()
        _, properties, body = channel.basic_get("dead")
        assert (body, properties.headers["x-death"][0]["queue"]) == (b"x", "work")
        # And the arguments are what they were.
        channel.queue_declare(
            "work",
            durable=True,
            arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead", "x-message-ttl": 60000},
        )
