"""Clients that mean harm, or mean well and are too fast: bounded memory, and others are served."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from typing import TypeVar

import pika
import pytest

from tests.broker_process import Served, served
from warren.amqp.methods import METHODS, encode
from warren.kernel.frame_writer import method_frame, publishes
from warren.node.status import resident_bytes
from warren.testing import running_broker

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
        received += sock.recv(65536)
    return sock


def is_served(port: int) -> None:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    channel = connection.channel()
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.basic_publish("", queue, b"ping")
    assert channel.basic_get(queue, auto_ack=True)[2] == b"ping"
    connection.close()


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
        is_served(broker.port)
        record_property("messages", messages)
        record_property("growth in MiB", (peak - before) // MIB)
        assert peak - before < 50 * MIB
        sock.close()


def test_clients_that_never_finish_their_handshake_are_cut_off_and_keep_nobody_out(tmp_path, scale, record_property):
    half_open = scale.scale(5000)
    with served(tmp_path / "data", WARREN_HANDSHAKE_TIMEOUT="2", WARREN_MAX_HANDSHAKES="100000") as broker:
        socks = []
        for number in range(half_open):
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", broker.port), timeout=10)
                if number % 2:
                    sock.sendall(b"AMQP\x00\x00\x09\x01\x01\x00")  # and no more
                socks.append(sock)
        is_served(broker.port)
        socks[-1].settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while socks[-1].recv(4096):
                pass  # until the broker closes it
        for sock in socks:
            sock.close()
        is_served(broker.port)
        record_property("half-open connections", half_open)


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
                is_served(broker.port)
        is_served(broker.port)
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


def test_a_client_that_never_reads_does_not_stop_the_others(tmp_path):
    with served(tmp_path / "data") as broker:
        sock = opened(broker.port)
        sock.sendall(method_frame(1, encode("queue.declare", queue="q")))
        sock.sendall(publishes(1, b"", b"q", 0, b"\x00\x00", [bytes(50_000)] * 1000, 131072))
        stuck = opened(broker.port)
        stuck.sendall(method_frame(1, encode("basic.consume", queue="q", no_ack=True)))
        before = memory(broker)
        done = threading.Event()
        threading.Timer(1.0, done.set).start()
        while not done.is_set():
            is_served(broker.port)
            time.sleep(0.05)
        assert memory(broker) - before < 50 * MIB
        stuck.close()
        sock.close()
