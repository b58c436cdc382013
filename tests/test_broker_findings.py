"""Faults that somebody found by looking, each with the test that would have."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import Any

import pika
import pika.exceptions
import pytest

import warren
from tests.broker_process import served
from tests.test_broker_limits import opened
from warren.amqp.methods import encode
from warren.errors import StoreFailedError
from warren.kernel.frame_writer import method_frame, publishes
from warren.node.status import resident_bytes
from warren.testing import running_broker

pytestmark = [
    pytest.mark.usefixtures("pika_litter"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def broker():
    with running_broker() as running:
        yield running


@pytest.fixture
def channel(broker):
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    yield connection.channel()
    if connection.is_open:
        connection.close()


def wait_for(channel, queue: str, seconds: float = 20) -> tuple[bytes, pika.BasicProperties]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is not None:
            return body, properties
        channel.connection.process_data_events(0.02)
    raise AssertionError(f"nothing came to {queue}")


def test_dead_letters_that_outrun_the_reservations_of_their_target_do_not_hang_the_vhost(broker, channel):
    """The loop held the engine's lock while it waited for a commit, which needs the lock."""
    arguments = {"x-max-length": 10, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    channel.queue_declare("q", durable=True, arguments=arguments)
    channel.queue_declare("dead", durable=True)
    with opened(broker.port) as sock:
        for _ in range(60):
            sock.sendall(publishes(1, b"", b"q", 0, b"\x10\x00\x02", [bytes(100)] * 500, 131072))
        deadline = time.monotonic() + 60
        while channel.queue_declare("dead", passive=True).method.message_count < 30_000 - 10:
            assert time.monotonic() < deadline
            channel.connection.process_data_events(0.05)
    assert channel.queue_declare("q", passive=True).method.message_count == 10


@pytest.mark.parametrize(
    "headers",
    [
        {"x-death": [{"queue": "q", "reason": "rejected", "count": 2**63 - 1}]},
        {"x-death": "no array", "CC": ["q2", 7]},
        {"x-death": [1, {"queue": 5}]},
    ],
)
def test_a_message_with_a_strange_history_is_a_dead_letter_like_any_other(channel, headers):
    channel.queue_declare(
        "q", durable=True, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    )
    channel.queue_declare("dead", durable=True)
    channel.basic_publish("", "q", b"strange", pika.BasicProperties(headers=headers, delivery_mode=2))
    method, _, _ = channel.basic_get("q")
    channel.basic_reject(method.delivery_tag, requeue=False)
    body, properties = wait_for(channel, "dead")
    assert body == b"strange"
    assert properties.headers["x-death"][0]["reason"] == "rejected"


def test_a_header_that_can_be_read_and_not_written_again_does_not_hurt_its_queue(broker, channel):
    arguments = {"x-message-ttl": 20, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    channel.queue_declare("q", durable=True, arguments=arguments)
    channel.queue_declare("dead", durable=True)
    table = b"\x01tT" + (2**64 - 1).to_bytes(8, "big")
    headers = b"\x20\x00" + len(table).to_bytes(4, "big") + table
    with opened(broker.port) as sock:
        sock.sendall(publishes(1, b"", b"q", 0, headers, [b"odd time"], 131072))
        deadline = time.monotonic() + 20
        while channel.queue_declare("dead", passive=True).method.message_count == 0:
            assert time.monotonic() < deadline
            channel.connection.process_data_events(0.02)


def test_a_delayed_message_is_routed_when_it_is_due_and_a_strange_one_stops_no_other(channel):
    channel.exchange_declare("later", "x-delayed-message", arguments={"x-delayed-type": "topic"})
    channel.confirm_delivery()
    for number, extra in enumerate(({"CC": [1]}, {}, {})):
        headers = {"x-delay": 100, **extra}
        channel.basic_publish("later", "k", b"%d" % number, pika.BasicProperties(headers=headers))
    channel.queue_declare("q")
    channel.queue_bind("q", "later", "#")  # after the publishes, and before they are due
    assert [wait_for(channel, "q")[0] for _ in range(3)] == [b"0", b"1", b"2"]
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_publish("later", "k", b"", pika.BasicProperties(headers={"x-delay": 2**62}))
    assert caught.value.reply_code == 406


def test_topic_permissions_hold_for_bindings_and_for_carbon_copies(broker):
    users = broker.broker.users
    broker.call(lambda: users.add_user("ann", "secret"))
    broker.call(lambda: users.set_permissions("ann", "/", ".*", ".*", ".*"))
    broker.call(lambda: users.set_topic_permissions("ann", "/", "amq.topic", "^low[.]", "^low[.]"))
    connection = pika.BlockingConnection(pika.URLParameters(broker.vhost_url("/", "ann", "secret")))
    channel = connection.channel()
    channel.queue_declare("q")
    channel.queue_bind("q", "amq.topic", "low.*")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.queue_bind("q", "amq.topic", "#")
    assert caught.value.reply_code == 403
    channel = connection.channel()
    channel.confirm_delivery()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_publish("amq.topic", "low.a", b"", pika.BasicProperties(headers={"CC": ["secret.a"]}))
    assert caught.value.reply_code == 403
    connection.close()


def test_gets_of_a_client_that_does_not_read_the_answers_fill_no_memory(broker, channel):
    channel.queue_declare("q")
    channel.basic_publish("", "q", bytes(1024 * 1024))
    assert channel.queue_declare("q", passive=True).method.message_count == 1
    before = resident_bytes()
    with opened(broker.port) as sock:
        get = method_frame(1, encode("basic.get", queue="q"))
        back = [method_frame(1, encode("basic.nack", delivery_tag=tag, requeue=True)) for tag in range(1, 400)]
        sock.settimeout(2)
        with contextlib.suppress(TimeoutError):
            sock.sendall(b"".join(get + one for one in back))
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            assert resident_bytes() - before < 100 * 1024 * 1024
            time.sleep(0.05)
        sock.shutdown(socket.SHUT_RDWR)


def test_a_queue_that_is_down_can_be_deleted_and_made_anew(broker, channel):
    channel.queue_declare("q", durable=True)

    def break_down() -> None:
        for _ in range(6):
            vhost = broker.broker.vhosts["/"]
            vhost.queue_crashed(vhost.queues["q"], RuntimeError("planted"))

    broker.call(break_down)
    channel.queue_delete("q")
    channel.queue_declare("q", durable=True)
    channel.basic_publish("", "q", b"again")
    assert wait_for(channel, "q")[0] == b"again"


def test_unacked_messages_that_are_too_many_after_a_crash_are_dead_letters(tmp_path):
    """They were pushed out before the exchanges were there that they had to go to, and so were lost."""
    queue = "a queue before the dead"
    with served(tmp_path / "data") as broker:
        channel = broker.connect().channel()
        channel.exchange_declare("dlx", "fanout", durable=True)
        channel.queue_declare("dead", durable=True)
        channel.queue_bind("dead", "dlx")
        channel.queue_declare(queue, durable=True, arguments={"x-max-length": 2, "x-dead-letter-exchange": "dlx"})
        channel.confirm_delivery()
        for number in range(4):
            channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
            if number < 2:
                assert channel.basic_get(queue)[2] == b"%d" % number
        os.kill(broker.vhost_pid(), signal.SIGKILL)
        broker.vhost_pid()
        channel = broker.connect().channel()
        found = [wait_for(channel, "dead") for _ in range(2)]
        assert [body for body, _ in found] == [b"0", b"1"]
        assert found[0][1].headers["x-first-death-reason"] == "maxlen"
        assert [wait_for(channel, queue)[0] for _ in range(2)] == [b"2", b"3"]


def spread(broker) -> list[int]:
    return sorted(broker.queue_info(f"shard-{number}")["messages_ready"] for number in range(2))


@pytest.mark.parametrize("way", ["bound", "alternate", "dead letter", "delayed"])
def test_messages_are_spread_by_a_property_whatever_way_they_come_to_the_exchange_that_does_it(broker, channel, way):
    """Only the exchange that was published to was asked whether it needs the properties: all went to one queue."""
    hashing = {"hash-property": "message_id"}
    if way == "delayed":
        channel.exchange_declare(
            "hash", "x-delayed-message", arguments={"x-delayed-type": "x-consistent-hash", **hashing}
        )
    else:
        channel.exchange_declare("hash", "x-consistent-hash", arguments=hashing)
    for number in range(2):
        channel.queue_declare(f"shard-{number}")
        channel.queue_bind(f"shard-{number}", "hash", "1")
    exchange, key, headers = "first", "k", None
    if way == "bound":
        channel.exchange_declare("first", "fanout")
        channel.exchange_bind("hash", "first")
    elif way == "alternate":
        channel.exchange_declare("first", "direct", arguments={"alternate-exchange": "hash"})
    elif way == "dead letter":
        exchange, key = "", "dying"
        channel.queue_declare("dying", arguments={"x-message-ttl": 0, "x-dead-letter-exchange": "hash"})
    else:
        exchange, headers = "hash", {"x-delay": 1}
    for number in range(100):
        channel.basic_publish(
            exchange, key, b"m", pika.BasicProperties(message_id=f"message {number}", headers=headers)
        )
    deadline = time.monotonic() + 20
    while sum(spread(broker)) < 100:
        assert time.monotonic() < deadline
        channel.connection.process_data_events(0.02)
    assert spread(broker)[0] > 10


def test_topic_permissions_hold_for_unbinding_too(broker, channel):
    channel.queue_declare("q")
    channel.exchange_declare("to", "fanout")
    channel.queue_bind("q", "amq.topic", "high.a")
    channel.exchange_bind("to", "amq.topic", "high.a")
    users = broker.broker.users
    broker.call(lambda: users.add_user("ann", "secret"))
    broker.call(lambda: users.set_permissions("ann", "/", ".*", ".*", ".*"))
    broker.call(lambda: users.set_topic_permissions("ann", "/", "amq.topic", "^low[.]", "^low[.]"))
    connection = pika.BlockingConnection(pika.URLParameters(broker.vhost_url("/", "ann", "secret")))
    for unbind in (
        lambda ann: ann.queue_unbind("q", "amq.topic", "high.a"),
        lambda ann: ann.exchange_unbind("to", "amq.topic", "high.a"),
    ):
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
            unbind(connection.channel())
        assert caught.value.reply_code == 403
    connection.close()
    router = broker.broker.vhosts["/"].router
    assert len(broker.call(lambda: router.bindings_of_source("amq.topic"))) == 2


@pytest.mark.parametrize("strategy", ["continue", "stop_node"])
def test_an_inline_vhost_that_keeps_failing_stays_down_too(strategy):
    """It was restarted for ever, and the strategy was for processes only."""
    with running_broker(vhost_max_restarts=1, vhost_restart_strategy=strategy) as broker:

        def fail() -> None:
            broker.broker.vhosts["/"]._on_failed(StoreFailedError("planted"))

        def state() -> str:
            return broker.call(lambda: broker.broker.running.state("/"))

        def wait_until(wanted: str) -> None:
            deadline = time.monotonic() + 20
            while state() != wanted:
                assert time.monotonic() < deadline
                time.sleep(0.01)

        broker.call(fail)
        wait_until("running")
        assert not broker.broker.given_up.is_set()
        broker.call(fail)
        wait_until("down")
        assert broker.broker.given_up.is_set() == (strategy == "stop_node")
        with pytest.raises(pika.exceptions.AMQPError, match="down"):
            pika.BlockingConnection(pika.URLParameters(broker.url))
        broker.call(lambda: broker.broker.running.open("/"))  # an operator may try
        broker.call(fail)
        wait_until("running")


def test_a_blind_carbon_key_that_is_too_long_is_the_channels_mistake_and_not_the_brokers(channel):
    channel.confirm_delivery()
    channel.basic_publish("", "q", b"", pika.BasicProperties(headers={"CC": ["k" * 256], "BCC": ["k" * 255]}))
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_publish("", "q", b"", pika.BasicProperties(headers={"BCC": ["k" * 256]}))
    assert caught.value.reply_code == 406
    assert "256 bytes" in caught.value.reply_text


@pytest.mark.parametrize("durable", [True, False])
def test_names_that_are_not_utf_8_are_the_channels_mistake_and_leave_nothing_behind(broker, durable):
    """They cannot be kept. It was noticed when they were written: 541, and an exchange or a binding without a record."""
    vhost = broker.broker.vhosts["/"]

    def said(name: str, **arguments: Any) -> bytes:
        with opened(broker.port) as sock:
            sock.sendall(method_frame(1, encode(name, **arguments)))
            return sock.recv(4096)

    assert b"queue name 'q\\xff' is not UTF-8" in said("queue.declare", queue="q\udcff", durable=durable)
    refused = said("exchange.declare", exchange="x\udcff", type="fanout", durable=durable)
    assert b"PRECONDITION_FAILED - exchange name 'x\\xff' is not UTF-8" in refused
    assert method_frame(1, encode("queue.declare-ok", queue="kept")) == said(
        "queue.declare", queue="kept", durable=durable
    )
    answer = said("queue.bind", queue="kept", exchange="amq.topic", routing_key="k\udcff")
    if durable:
        assert b"PRECONDITION_FAILED - routing key 'k\\xff' is not UTF-8" in answer
    else:
        assert answer == method_frame(1, encode("queue.bind-ok"))  # it is not kept, and works
    assert broker.queue_names() == ["kept"]
    assert "x\udcff" not in broker.call(lambda: list(vhost.router.exchanges))
    assert len(broker.call(lambda: vhost.router.bindings_to_queue("kept"))) == (not durable)


@pytest.mark.parametrize("queues", [1, 2])
@pytest.mark.parametrize("of", ["the message", "the queue"])
def test_times_to_live_of_a_transaction_begin_with_its_commit(tmp_path, of, queues):
    """They began with the publish: what was committed later than that was dropped, or a dead letter, and nobody had it."""
    arguments = {"x-message-ttl": 3_600_000} if of == "the queue" else {}
    names = [f"q{number}" for number in range(queues)]
    with served(tmp_path) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        for name in names:
            channel.queue_declare(name, durable=True, arguments=arguments)
            channel.queue_bind(name, "amq.fanout")
        channel.tx_select()
        properties = pika.BasicProperties(delivery_mode=2, expiration="3600000" if of == "the message" else None)
        channel.basic_publish("amq.fanout", "", b"m", properties)
        connection.sleep(0.3)
        committed_at = time.time()
        channel.tx_commit()
        connection.close()
    with warren.open(tmp_path) as store:
        for name in names:
            [message] = store.queue(name, arguments=arguments).browse()
            assert message.entry.expiry / 1e6 >= committed_at + 3600


@pytest.mark.parametrize("of", ["the message", "the queue"])
def test_times_to_live_begin_when_an_alarm_is_over(broker, channel, of):
    """What a full disk or an alarm held back for longer than its time was confirmed, and there for nobody."""
    channel.queue_declare("q", durable=True, arguments={"x-message-ttl": 3_600_000} if of == "the queue" else {})
    vhost = broker.broker.vhosts["/"]
    alarm = lambda on: vhost._loop.call_soon_threadsafe(vhost.set_alarm, "memory", on)  # noqa: E731
    alarm(True)
    with opened(broker.port) as sock:
        ttl = (b"\x01\x00", b"\x073600000") if of == "the message" else (b"\x00\x00", b"")
        sock.sendall(publishes(1, b"", b"q", 0, b"".join(ttl), [b"m"], 131072))
        time.sleep(0.3)
        cleared_at = time.time()
        alarm(False)
        deadline = time.monotonic() + 60
        while not (head := vhost.queues["q"]._backing.peek()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert head.expiry / 1e6 >= cleared_at + 3600
