"""Clients that mean harm, or mean well and are too fast: bounded memory, and others are served."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pika
import pytest

from tests.broker_clients import eventually
from tests.broker_process import Served, served
from warren.amqp.methods import METHODS, encode
from warren.kernel.frame_writer import method_frame, publishes
from warren.node.status import resident_bytes
from warren.testing import RunningBroker, running_broker

pytestmark = [
    pytest.mark.usefixtures("pika_litter"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
MIB = 1024 * 1024
Sock = TypeVar("Sock", bound=socket.socket)


def opened(port: int) -> socket.socket:
    """A raw client with an open channel 1."""
    return log_in(socket.create_connection(("127.0.0.1", port), timeout=30))


def log_in(sock: Sock) -> Sock:
    sock.sendall(
        b"AMQP\x00\x00\x09\x01"
        + method_frame(0, encode("connection.start-ok", mechanism="PLAIN", response=b"\0guest\0guest", locale="en_US"))
        + method_frame(0, encode("connection.tune-ok", channel_max=2047, frame_max=131072))
        + method_frame(0, encode("connection.open", virtual_host="/"))
        + method_frame(1, encode("channel.open"))
    )
    received = b""
    while method_frame(1, encode("channel.open-ok")) not in received:
        more = sock.recv(65536)
        if not more:
            raise ConnectionError(f"the broker has closed the connection; it said {received!r}")
        received += more
    return sock


def until_refused(log_in: Callable[[], Sock], most: int = 64) -> list[Sock]:
    """As many clients as get in; fewer than `most`."""
    clients: list[Sock] = []
    with contextlib.suppress(OSError):
        while len(clients) < most:
            clients.append(log_in())
    assert len(clients) < most
    return clients


def is_served(broker: Served | RunningBroker) -> None:
    connection = connected(broker)
    channel = connection.channel()
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.basic_publish("", queue, b"ping")
    assert channel.basic_get(queue, auto_ack=True)[2] == b"ping"
    connection.close()


def connected(broker: Served | RunningBroker) -> pika.BlockingConnection:
    """As a client that tries again: it may come in the one second in which nobody gives way."""
    return broker.connect() if isinstance(broker, Served) else pika.BlockingConnection(pika.URLParameters(broker.url))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for those that leave nothing behind."""
    with served(tmp_path_factory.mktemp("limits") / "data") as broker:
        yield broker


def memory(broker: Served) -> int:
    return resident_bytes(broker.vhost_pid())


def test_a_publisher_without_confirms_that_is_faster_than_the_disk_costs_no_memory(tmp_path, scale, record_property):
    messages = scale.scale(2_000_000)
    with served(tmp_path / "data") as broker:
        sock = opened(broker.port)
        sock.sendall(method_frame(1, encode("queue.declare", queue="q", durable=True)))
        bodies = [random.Random(number).randbytes(500) for number in range(200)]
        batch = publishes(1, b"", b"q", 0, b"\x10\x00\x02", bodies, 131072)
        for _ in range(50):
            sock.sendall(batch)
        before = memory(broker)
        peak = before
        for number in range(messages // len(bodies)):
            sock.sendall(batch)
            if number % 100 == 0:
                peak = max(peak, memory(broker))
        is_served(broker)
        record_property("messages", messages)
        record_property("growth in MiB", (peak - before) // MIB)
        assert peak - before < 50 * MIB
        sock.close()


def memory_of_node(broker: Served) -> int:
    assert broker.process is not None
    return resident_bytes(broker.process.pid)


def test_half_open_connections_of_many_addresses_cost_little_and_keep_nobody_out(tmp_path, scale, record_property):
    """At the limits as they are: more than may log in at one time, in all and from one address."""
    half_open = scale.scale(10_000)
    limits = {} if scale.full else {"WARREN_MAX_HANDSHAKES": "400", "WARREN_MAX_HANDSHAKES_PER_ADDRESS": "100"}
    raise_limit_of_files(half_open + 1000)
    with served(tmp_path / "data", WARREN_HANDSHAKE_TIMEOUT="20", **limits) as broker, contextlib.ExitStack() as socks:
        before = memory_of_node(broker)
        sock = None
        for number in range(half_open):
            source = (f"127.0.1.{number % 7 + 1}", 0)
            with contextlib.suppress(ConnectionError):
                sock = socks.enter_context(socket.create_connection(("127.0.0.1", broker.port), 30, source))
                if number % 2:
                    sock.sendall(b"AMQP\x00\x00\x09\x01\x01\x00")  # and no more
            if number % (half_open // 10) == 0:
                is_served(broker)
        is_served(broker)
        growth = memory_of_node(broker) - before
        record_property("half-open connections", half_open)
        record_property("growth of the node in MiB", round(growth / MIB, 1))
        assert growth < 50 * MIB
        until_closed(sock)
        is_served(broker)


def raise_limit_of_files(wanted: int) -> None:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        if most < wanted:
            pytest.skip(f"needs {wanted} open files, and may have {most}: raise `ulimit -Hn`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def until_closed(sock: socket.socket) -> None:
    """Read until the broker closes it."""
    sock.settimeout(60)
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass


def test_who_sends_a_byte_now_and_then_has_no_more_time_to_log_in_than_others(tmp_path, scale, record_property):
    clients = scale.scale(2000)
    raise_limit_of_files(clients + 1000)
    whole = b"AMQP\x00\x00\x09\x01" + method_frame(
        0, encode("connection.start-ok", mechanism="PLAIN", response=b"\0guest\0guest", locale="en_US")
    )
    with served(tmp_path / "data", WARREN_HANDSHAKE_TIMEOUT="3") as broker:
        before = memory_of_node(broker)
        lorises = dict.fromkeys((socket.create_connection(("127.0.0.1", broker.port), 30) for _ in range(clients)), 0)
        rounds = 0
        while lorises:
            assert rounds < 40, f"{len(lorises)} clients are still there"  # half of what it takes to finish
            for sock, sent in list(lorises.items()):
                try:
                    sock.send(whole[sent : sent + 1])
                    lorises[sock] += 1
                except ConnectionError:
                    sock.close()
                    del lorises[sock]
            is_served(broker)
            rounds += 1
            time.sleep(0.2)
        assert len(whole) > 2 * rounds
        growth = memory_of_node(broker) - before
        record_property("clients", clients)
        record_property("growth of the node in MiB", round(growth / MIB, 1))
        assert growth < 50 * MIB


def test_frames_that_come_a_byte_at_a_time_cost_what_was_sent_and_nobody_waits_for_them(broker, scale, record_property):
    """Each announces a frame of 128 KiB; nothing is set aside for what has not come."""
    clients = scale.scale(1000)
    raise_limit_of_files(clients + 1000)
    before = memory(broker)
    socks = [opened(broker.port) for _ in range(clients)]
    for sock in socks:
        sock.sendall(b"\x01\x00\x01\x00\x01\xf0\x00\x00\x32\x00\x0a")
    for _ in range(10):
        for sock in socks:
            sock.sendall(b"q")
        is_served(broker)
    growth = memory(broker) - before
    record_property("clients", clients)
    record_property("growth in KiB for each", growth // 1024 // clients)
    assert growth < clients * 70 * 1024 + 10 * MIB
    for sock in socks:
        sock.close()


def mutated(chance: random.Random) -> bytes:
    """Frames of a client, some of them not quite."""
    parts = []
    for _ in range(chance.randrange(1, 8)):
        method = chance.choice(list(METHODS.values()))
        payload = bytearray(method.class_id.to_bytes(2, "big") + method.method_id.to_bytes(2, "big"))
        payload += chance.randbytes(chance.choice([0, 1, 4, 9, 40]))
        frame = bytearray(method_frame(chance.choice([0, 1, 1, 1, 2, 65535]), bytes(payload)))
        if chance.random() < 0.3:
            frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
        parts.append(bytes(frame))
        if chance.random() < 0.4:
            parts.append(publishes(1, b"", b"fuzz", chance.randrange(4), b"\x10\x00\x02", [b"x" * 50], 131072))
    data = b"".join(parts)
    return data[: chance.randrange(len(data) + 1)] if chance.random() < 0.3 else data


def test_frames_that_make_no_sense_harm_only_their_sender(scale, seed, record_property):
    rounds = scale.scale(1000)
    chance = random.Random(seed)
    with running_broker() as broker:
        for number in range(rounds):
            with opened(broker.port) as sock:
                sock.settimeout(10)
                with contextlib.suppress(OSError):
                    sock.sendall(mutated(chance))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
            if number % 20 == 0:
                is_served(broker)
        is_served(broker)
        assert broker.call(lambda: len(broker.broker.vhosts["/"].connections)) == 0
        record_property("rounds", rounds)


def test_a_body_over_the_limit_closes_its_channel_and_is_not_kept():
    with running_broker(max_message_size=1000) as broker:
        sock = opened(broker.port)
        sock.sendall(publishes(1, b"", b"q", 0, b"\x00\x00", [bytes(5000)], 131072))
        expected = encode(
            "channel.close",
            reply_code=406,
            reply_text="PRECONDITION_FAILED - message size 5000 is larger than configured max size 1000",
            class_id=60,
            method_id=40,
        )
        received = b""
        while method_frame(1, expected) not in received:
            data = sock.recv(65536)
            assert data, received
            received += data
        sock.close()


def test_a_body_that_is_128_mib_over_the_limit_is_read_and_dropped(tmp_path, scale, record_property):
    limit = scale.scale(128 * MIB)
    size = 2 * limit
    with served(tmp_path / "data", WARREN_MAX_MESSAGE_SIZE=str(limit)) as broker:
        sock = opened(broker.port)
        before = peak = memory(broker)
        sock.sendall(method_frame(1, encode("basic.publish", routing_key="q")))
        sock.sendall(b"\x02\x00\x01\x00\x00\x00\x0e\x00\x3c\x00\x00" + size.to_bytes(8, "big") + b"\x00\x00\xce")
        assert b"PRECONDITION_FAILED - message size" in sock.recv(65536)
        piece = b"\x03\x00\x01" + (130_000).to_bytes(4, "big") + bytes(130_000) + b"\xce"
        for number in range(size // 130_000):
            sock.sendall(piece)
            if number % 100 == 0:
                peak = max(peak, memory(broker))
        sock.sendall(method_frame(1, encode("channel.close-ok")) + method_frame(2, encode("channel.open")))
        assert method_frame(2, encode("channel.open-ok")) in sock.recv(65536)  # everything before was read
        is_served(broker)
        peak = max(peak, memory(broker))
        record_property("body in MiB", size // MIB)
        record_property("growth in MiB", round((peak - before) / MIB, 1))
        assert peak - before < 10 * MIB
        sock.close()


def test_a_client_that_never_reads_does_not_stop_the_others(broker, scale, record_property):
    messages = scale.scale(10_000)
    sock = opened(broker.port)
    sock.sendall(method_frame(1, encode("queue.declare", queue="never", durable=True)))
    for _ in range(messages // 100):
        sock.sendall(publishes(1, b"", b"never", 0, b"\x10\x00\x02", [bytes(50_000)] * 100, 131072))
    eventually(lambda: broker.queue_info("never")["messages_ready"] == messages, 120)
    stuck = opened(broker.port)
    before = peak = memory(broker)
    stuck.sendall(method_frame(1, encode("basic.consume", queue="never", no_ack=True)))
    eventually(lambda: broker.queue_info("never")["messages_ready"] < messages)
    for _ in range(20):
        is_served(broker)
        peak = max(peak, memory(broker))
    assert broker.queue_info("never")["messages_ready"] > messages - 20 * MIB // 50_000
    record_property("backlog in MiB", messages * 50_000 // MIB)
    record_property("growth in MiB", round((peak - before) / MIB, 1))
    assert peak - before < 50 * MIB
    stuck.close()
    sock.sendall(method_frame(1, encode("queue.delete", queue="never")))
    eventually(lambda: "never" not in broker.queue_names())
    sock.close()


def delivery_bytes(tag: bytes, queue: bytes, body_bytes: int) -> int:
    """Of a persistent message: three frames."""
    deliver = 4 + 1 + len(tag) + 8 + 1 + 1 + 1 + len(queue)
    header = 14 + 1
    return 3 * 8 + deliver + header + body_bytes


def test_a_consumer_without_prefetch_that_stops_on_a_long_backlog_costs_no_memory_and_may_go_on(
    broker, scale, record_property
):
    messages = scale.scale(1_000_000)
    sock = opened(broker.port)
    sock.sendall(method_frame(1, encode("queue.declare", queue="long", durable=True)))
    batch = publishes(1, b"", b"long", 0, b"\x10\x00\x02", [bytes(100)] * 1000, 131072)
    for _ in range(messages // 1000):
        sock.sendall(batch)
    eventually(lambda: broker.queue_info("long")["messages_ready"] == messages, 120)
    stuck = opened(broker.port)
    before = peak = memory(broker)
    stuck.sendall(method_frame(1, encode("basic.consume", queue="long", consumer_tag="c")))
    eventually(lambda: broker.queue_info("long")["messages_unacknowledged"])
    for _ in range(20):
        is_served(broker)
        peak = max(peak, memory(broker))
    taken = broker.queue_info("long")["messages_unacknowledged"]
    record_property("backlog", messages)
    record_property("on their way to a consumer that does not read", taken)
    record_property("growth in MiB", round((peak - before) / MIB, 1))
    assert peak - before < 50 * MIB
    assert taken * 100 < 20 * MIB
    left = len(method_frame(1, encode("basic.consume-ok", consumer_tag="c"))) + messages * delivery_bytes(
        b"c", b"long", 100
    )
    while left:  # it reads again, and gets every one
        data = stuck.recv(min(left, MIB))
        assert data, f"{left} bytes are missing"
        left -= len(data)
    stuck.close()
    sock.close()


def test_a_publisher_that_is_ten_times_as_fast_as_the_disk_costs_no_memory(tmp_path, scale, record_property):
    """The disk is made slow, so that it is the disk that is measured and not the machine that the test runs on."""
    disk_bytes_per_second = 10 * MIB
    volume = scale.scale(600 * MIB)
    library = tmp_path / "slow_disk.so"
    source = Path(__file__).with_name("slow_disk.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    with served(
        tmp_path / "data", LD_PRELOAD=str(library), SLOW_DISK_BYTES_PER_SECOND=str(disk_bytes_per_second)
    ) as broker:
        sock = opened(broker.port)
        bodies = [random.Random(number).randbytes(1000) for number in range(200)]
        sock.sendall(method_frame(1, encode("queue.declare", queue="volatile", arguments={"x-max-length": 1000})))
        sock.sendall(method_frame(1, encode("queue.declare", queue="q", durable=True)))
        rates, growth = {}, 0
        for queue, properties in ((b"volatile", b"\x00\x00"), (b"q", b"\x10\x00\x02")):
            batch = publishes(1, b"", queue, 0, properties, bodies, 131072)
            before = peak = memory(broker)
            started = time.monotonic()
            for number in range(volume // len(batch)):
                sock.sendall(batch)
                if number % 10 == 0:
                    peak = max(peak, memory(broker))
            is_served(broker)
            rates[queue] = volume / (time.monotonic() - started)
            growth = peak - before
        record_property("disk in MiB/s", disk_bytes_per_second // MIB)
        record_property("times the disk", round(rates[b"volatile"] / disk_bytes_per_second, 1))
        record_property("the publisher without a disk in MiB/s", round(rates[b"volatile"] / MIB, 1))
        record_property("the publisher on this disk in MiB/s", round(rates[b"q"] / MIB, 1))
        record_property("growth in MiB", round(growth / MIB, 1))
        assert growth < 50 * MIB
        sock.close()
