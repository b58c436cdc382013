"""Who gets in, over what, and what happens when the machine is short of something."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time

import pika
import pika.exceptions
import pytest

from warren.amqp.methods import BY_NAME, encode
from warren.kernel.frame_writer import method_frame
from warren.node.handshake import PROTOCOL_HEADER, Gone, Handshake
from warren.testing import running_broker

OPEN: list[pika.BlockingConnection] = []  # closed at the end of a test
pytestmark = [
    pytest.mark.usefixtures("pika_litter"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


def connect(url: str, **changes) -> pika.BlockingConnection:
    parameters = pika.URLParameters(url)
    for name, value in changes.items():
        setattr(parameters, name, value)
    OPEN.append(pika.BlockingConnection(parameters))
    return OPEN[-1]


@pytest.fixture
def broker():
    with running_broker() as running:
        yield running
        while OPEN:
            with contextlib.suppress(pika.exceptions.AMQPError):
                OPEN.pop().close()


def test_a_wrong_password_and_an_unknown_user_are_refused_alike(broker):
    for user, password in (("guest", "wrong"), ("nobody", "guest")):
        with pytest.raises(pika.exceptions.ProbableAuthenticationError, match="ACCESS_REFUSED - Login was refused"):
            connect(broker.vhost_url("/", user, password))


@pytest.mark.parametrize(
    ("user", "password", "why"),
    [("guest", "hunter2", "the password is wrong"), ("nobody", "hunter2", "there is no such user")],
)
def test_the_log_says_once_who_was_refused_and_why_and_not_the_password(broker, caplog, user, password, why):
    with caplog.at_level("INFO", logger="warren"), pytest.raises(pika.exceptions.ProbableAuthenticationError):
        connect(broker.vhost_url("/", user, password))
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("warren")]
    assert line.startswith(f"login of user '{user}' from 127.0.0.1:")
    assert line.endswith(f"is refused: {why}")
    assert password not in caplog.text


def test_a_vhost_that_is_not_there_is_named(broker):
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError, match="NOT_ALLOWED - vhost 'nope' not found"):
        connect(broker.vhost_url("nope"))


def test_a_user_without_permissions_for_the_vhost_is_told_so(broker):
    broker.call(lambda: broker.broker.users.add_user("ann", "secret"))
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError, match="access to vhost '/' refused for user 'ann'"):
        connect(broker.vhost_url("/", "ann", "secret"))


def test_permissions_are_checked_by_name_and_change_at_once(broker):
    users = broker.broker.users
    broker.call(lambda: users.add_user("ann", "secret"))
    broker.call(lambda: users.set_permissions("ann", "/", "^ann-", "^ann-|^amq[.]default$", "^ann-"))
    connection = connect(broker.vhost_url("/", "ann", "secret"))
    channel = connection.channel()
    channel.queue_declare("ann-q")
    channel.basic_publish("", "ann-q", b"mine")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.queue_declare("bob-q")
    assert caught.value.reply_code == 403
    assert "access to queue 'bob-q' in vhost '/' refused for user 'ann'" in caught.value.reply_text
    channel = connection.channel()
    broker.call(lambda: users.set_permissions("ann", "/", "^ann-", "^ann-", ""))
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_get("ann-q")
    assert caught.value.reply_code == 403
    connection.close()


def test_guest_comes_from_this_machine_only(broker):
    assert broker.broker.may_connect_from("guest", "127.0.0.1")
    assert broker.broker.may_connect_from("guest", "::1")
    assert not broker.broker.may_connect_from("guest", "10.1.2.3")
    assert broker.broker.may_connect_from("ann", "10.1.2.3")


@pytest.mark.parametrize(("address", "gets_in"), [("127.0.0.1", True), ("10.1.2.3", False)])
def test_guest_comes_from_this_machine_only_also_by_certificate(broker, caplog, address, gets_in):
    async def log_in() -> bytes:
        """What the client of a certificate for guest hears after it chose EXTERNAL."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        handshake = Handshake(ours, broker.broker, address=address, certificate_user="guest")
        running = asyncio.ensure_future(handshake.run())
        reader, writer = await asyncio.open_connection(sock=theirs)
        with ours:
            capable = {"capabilities": {"authentication_failure_close": True}}
            writer.write(PROTOCOL_HEADER)
            writer.write(
                method_frame(
                    0,
                    encode(
                        "connection.start-ok",
                        client_properties=capable,
                        mechanism="EXTERNAL",
                        response=b"",
                        locale="en_US",
                    ),
                )
            )
            start = await read_method(reader)
            assert start[:4] == struct.pack(">HH", 10, 10)
            heard = await read_method(reader)
            writer.close()
            with pytest.raises(Gone):
                await running
        return heard

    heard = asyncio.run(log_in())
    method = "connection.tune" if gets_in else "connection.close"
    assert heard[:4] == struct.pack(">HH", BY_NAME[method].class_id, BY_NAME[method].method_id)
    if not gets_in:
        assert struct.unpack_from(">H", heard, 4) == (403,)
        assert "user 'guest' can only connect via localhost, not from 10.1.2.3" in caplog.text


async def read_method(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">3xI", await reader.readexactly(7))
    return (await reader.readexactly(size + 1))[:-1]


def test_an_alarm_stops_publishers_and_not_consumers_and_tells_them(broker):
    vhost = broker.broker.vhosts["/"]
    consuming = connect(broker.url).channel()
    consuming.queue_declare("q")
    consuming.basic_publish("", "q", b"before")
    assert consuming.queue_declare("q", passive=True).method.message_count == 1
    publishing = connect(broker.url)
    told: list[str] = []
    publishing.add_on_connection_blocked_callback(lambda _, frame: told.append(frame.method.reason))
    publishing.add_on_connection_unblocked_callback(lambda _, frame: told.append("go on"))
    channel = publishing.channel()
    broker.call(lambda: vhost.set_alarm("memory", True))
    channel.basic_publish("", "q", b"during")
    publishing.process_data_events(0.2)
    assert told == ["low on memory"]
    assert consuming.basic_get("q", auto_ack=True)[2] == b"before"
    assert consuming.basic_get("q")[0] is None
    broker.call(lambda: vhost.set_alarm("memory", False))
    publishing.process_data_events(0.2)
    assert told == ["low on memory", "go on"]
    assert consuming.basic_get("q", auto_ack=True)[2] == b"during"


def test_a_consumer_that_stops_reading_costs_bounded_memory_and_disturbs_nobody(broker):
    """Prefetch 0 and a backlog: what is on its way is bounded by the socket and one buffer."""
    filling = connect(broker.url).channel()
    filling.queue_declare("q", arguments={"x-max-length": 200_000})
    for _ in range(3000):
        filling.basic_publish("", "q", bytes(10_000))
    assert filling.queue_declare("q", passive=True).method.message_count == 3000
    stuck = connect(broker.url)
    stuck_channel = stuck.channel()
    stuck_channel._impl.basic_consume("q", on_message_callback=lambda *_: None)  # sent, and never read again
    stuck._flush_output()
    deadline = time.monotonic() + 20
    while broker.queue_info("q")["messages_unacknowledged"] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    threading.Event().wait(0.5)
    info = broker.queue_info("q")
    assert 0 < info["messages_unacknowledged"] < 2500
    other = connect(broker.url).channel()
    assert other.basic_get("q", auto_ack=True)[2] == bytes(10_000)
