"""The broker in its own processes, ended in every way: by the operator, by kill -9 of a vhost, by kill -9 of the node."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time

import pika
import pika.exceptions
import pytest

from tests.broker_process import Served, served
from warren.amqp.methods import encode
from warren.kernel.frame_writer import method_frame, publishes
from warren.storage.layout import hashed

# pika leaves the sockets of lost connections to the collector.
pytestmark = [
    pytest.mark.usefixtures("pika_litter"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
LOST = (pika.exceptions.AMQPError, OSError)
PERSISTENT = pika.BasicProperties(delivery_mode=2)


def test_a_stop_by_the_operator_exits_with_0_and_the_next_start_is_clean(tmp_path):
    with served(tmp_path / "data") as broker:
        connection = broker.connect()
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "q", b"kept", PERSISTENT)
        assert broker.stop() == 0
        with pytest.raises(pika.exceptions.AMQPError):
            connection.process_data_events(1)
        broker.start()
        channel = broker.connect().channel()
        method, _, body = channel.basic_get("q")
        assert (body, method.redelivered) == (b"kept", False)


def test_a_whole_session_in_one_segment_is_served(tmp_path):
    """The node reads exact frames: what is behind connection.open belongs to the vhost's process."""
    with served(tmp_path / "data") as broker, socket.create_connection(("127.0.0.1", broker.port)) as sock:
        start_ok = encode("connection.start-ok", mechanism="PLAIN", response=b"\0guest\0guest", locale="en_US")
        sock.sendall(
            b"AMQP\x00\x00\x09\x01"
            + method_frame(0, start_ok)
            + method_frame(0, encode("connection.tune-ok", channel_max=10, frame_max=131072))
            + method_frame(0, encode("connection.open", virtual_host="/"))
            + method_frame(1, encode("channel.open"))
            + method_frame(1, encode("queue.declare", queue="q", durable=True))
            + method_frame(1, encode("confirm.select"))
            + publishes(1, b"", b"q", 0, b"\x10\x00\x02", [b"%d" % number for number in range(1000)], 131072)
            + method_frame(1, encode("queue.declare", queue="q", passive=True))
        )
        sock.settimeout(20)
        received = b""
        ready = method_frame(1, encode("queue.declare-ok", queue="q", message_count=1000))
        while ready not in received:
            data = sock.recv(65536)
            assert data, received
            received += data


class Client(threading.Thread):
    """Works until it is told to stop; reconnects for ever, and counts how often it had to."""

    def __init__(self, broker: Served, vhost: str) -> None:
        super().__init__(daemon=True)
        self._broker = broker
        self._vhost = vhost
        self.losses = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            with contextlib.suppress(*LOST):
                connection = self._broker.connect(self._vhost)
                channel = connection.channel()
                channel.queue_declare("q", durable=True)
                self.work(channel)
                connection.close()
                return
            self.losses += 1

    def work(self, channel: pika.adapters.blocking_connection.BlockingChannel) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.stopping.set()
        self.join(60)
        assert not self.is_alive()


class Publisher(Client):
    """Publishes with confirms, and writes down what was confirmed."""

    def __init__(self, broker: Served, vhost: str, name: str) -> None:
        super().__init__(broker, vhost)
        self.name = name
        self.confirmed: list[int] = []
        self.attempted = 0

    def work(self, channel: pika.adapters.blocking_connection.BlockingChannel) -> None:
        channel.confirm_delivery()
        while not self.stopping.is_set():
            number = self.attempted
            self.attempted += 1
            channel.basic_publish("", "q", f"{self.name}:{number}".encode(), PERSISTENT)
            self.confirmed.append(number)

    def until(self, count: int) -> None:
        deadline = time.monotonic() + 60
        wanted = len(self.confirmed) + count
        while len(self.confirmed) < wanted:
            assert time.monotonic() < deadline, "publishing does not go on"
            time.sleep(0.002)


class Consumer(Client):
    """Acks what it gets, a few at once, and writes down everything: who published it, its number, whether redelivered."""

    def __init__(self, broker: Served, vhost: str) -> None:
        super().__init__(broker, vhost)
        self.got: list[tuple[str, int, bool]] = []

    def work(self, channel: pika.adapters.blocking_connection.BlockingChannel) -> None:
        channel.basic_qos(prefetch_count=20)
        for method, _, body in channel.consume("q", inactivity_timeout=0.05):
            if method is not None:
                self.note(method, body)
                if method.delivery_tag % 3 == 0:
                    channel.basic_ack(method.delivery_tag, multiple=True)
            if self.stopping.is_set():
                return

    def note(self, method: pika.spec.Basic.Deliver, body: bytes) -> None:
        name, _, number = body.partition(b":")
        self.got.append((name.decode(), int(number), method.redelivered))

    def take_the_rest(self) -> None:
        """What was not acked, and is ready again when the consumer is gone."""
        connection = self._broker.connect(self._vhost)
        channel = connection.channel()
        while True:
            method, _, body = channel.basic_get("q", auto_ack=True)
            if method is None:
                break
            self.note(method, body)
        connection.close()

    def check(self, publisher: Publisher) -> None:
        """Nothing that was confirmed is lost, order is kept, and what came twice was flagged."""
        seen: dict[int, int] = {}
        for name, number, redelivered in self.got:
            if name == publisher.name:
                assert number not in seen or redelivered, f"{name}:{number} came again as if it were new"
                seen.setdefault(number, len(seen))
        assert set(publisher.confirmed) <= set(seen)
        assert list(seen) == sorted(seen), "each came first in the order of its publisher"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["vhost", "node"])
def test_kill_9_loses_nothing_that_was_confirmed_and_others_do_not_notice(
    tmp_path, victim, scale, seed, record_property
):
    kills = scale.scale(20)
    chance = random.Random(seed)
    with served(tmp_path / "data", vhosts=("other",), WARREN_VHOST_MAX_RESTARTS="1000") as broker:
        publishers = [Publisher(broker, "/", "one"), Publisher(broker, "/", "two")]
        consumer = Consumer(broker, "/")
        bystanders = [Publisher(broker, "other", "bystander"), Consumer(broker, "other")]
        clients: list[Client] = [*publishers, consumer, *bystanders]
        for client in clients:
            client.start()
        for _ in range(kills):
            publishers[0].until(chance.randrange(5, 60))
            if victim == "vhost":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(broker.vhost_pid(), signal.SIGKILL)
            else:
                broker.kill_node()
                broker.start()
        for publisher in (*publishers, bystanders[0]):
            assert isinstance(publisher, Publisher)
            publisher.until(20)
        for client in clients:
            client.stop()
        if victim == "vhost":
            assert [client.losses for client in bystanders] == [0, 0]
        for one, many in ((consumer, publishers), (bystanders[1], bystanders[:1])):
            assert isinstance(one, Consumer)
            one.take_the_rest()
            for publisher in many:
                assert isinstance(publisher, Publisher)
                one.check(publisher)
        record_property("kills", kills)
        record_property("confirmed", sum(len(publisher.confirmed) for publisher in publishers))
        record_property("consumed", len(consumer.got))
        record_property("redelivered", sum(redelivered for _, _, redelivered in consumer.got))


def test_a_vhost_that_keeps_failing_stays_down_and_says_so(tmp_path):
    def other() -> dict[str, object]:
        return next(vhost for vhost in broker.status()["vhosts"] if vhost["name"] == "other")

    with served(tmp_path / "data", vhosts=("other",)) as broker:
        deadline = time.monotonic() + 60
        while other()["state"] != "down":
            assert time.monotonic() < deadline
            pid = other()["pid"]
            if isinstance(pid, int) and pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        with pytest.raises(pika.exceptions.AMQPError, match="down"):
            pika.BlockingConnection(pika.URLParameters(broker.vhost_url("other")))
        broker.connect().channel().queue_declare("the others go on")


def test_a_vhost_that_keeps_failing_stops_the_node_where_that_is_wanted(tmp_path):
    wanted = {"WARREN_VHOST_RESTART_STRATEGY": "stop_node", "WARREN_VHOST_MAX_RESTARTS": "0"}
    with served(tmp_path / "data", **wanted) as broker:
        os.kill(broker.vhost_pid(), signal.SIGKILL)
        assert broker.process.wait(60) == 1
        assert "vhost_restart_strategy is stop_node" in broker.log.read_text()


@pytest.mark.parametrize(
    "bytes_",
    [b"GET / HTTP/1.1\r\n\r\n", b"AMQP\x00\x01\x00\x00", b"\0" * 8],
    ids=["http", "amqp-1.0", "zeros"],
)
def test_what_is_no_amqp_is_told_the_version_and_closed(tmp_path, bytes_):
    with served(tmp_path / "data", "--inline") as broker, socket.create_connection(("127.0.0.1", broker.port)) as sock:
        sock.settimeout(10)
        sock.sendall(bytes_)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(100):
                received += data
        assert received in (b"AMQP\x00\x00\x09\x01", b"")
        broker.connect().close()


def test_inline_a_vhost_that_cannot_be_opened_stays_down_and_the_others_run(tmp_path):
    """It kept the node from starting."""
    data = tmp_path / "data"
    with served(data, "--inline", vhosts=("good", "bad")) as broker:
        for vhost in ("good", "bad"):
            connection = broker.connect(vhost)
            connection.channel().queue_declare("q", durable=True)
            connection.close()
    (data / "vhosts" / hashed("bad") / "meta.db").write_bytes(b"no database" * 1000)
    with served(data, "--inline") as broker:
        connection = broker.connect("good")
        assert connection.channel().queue_declare("q", passive=True).method.message_count == 0
        connection.close()
        assert "vhost 'bad' cannot be opened and stays down" in broker.log.read_text()
        with pytest.raises(pika.exceptions.AMQPError):
            pika.BlockingConnection(pika.URLParameters(broker.vhost_url("bad")))
