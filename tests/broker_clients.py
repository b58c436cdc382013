"""What the tests with real clients share: connections that end with their block, waiting without sleeping, and a client
that speaks single frames, for what no client library lets one do or see.

Rules:

1. Nothing here waits for a time to pass. What must happen is waited for with a deadline; what must not happen is shown
   by a later answer on the same channel, because the broker does things in order.
2. Names of queues and exchanges are made unique by `unique`, so that the tests of a file can share one broker.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pamqp.base
import pamqp.body
import pamqp.commands
import pamqp.frame
import pamqp.header
import pamqp.heartbeat
import pika

from warren.testing import RunningBroker

SECONDS = 20.0  # the longest that anything here waits: only a failure takes that long
_numbers = itertools.count(1)


def unique(stem: str = "q") -> str:
    """A name that no other test has."""
    return f"{stem}-{next(_numbers)}"


def eventually(check: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What `check` returns, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < deadline, f"{check} did not become true in {seconds} s"
        time.sleep(0.005)


# ---- pika ----


def parameters(broker: RunningBroker, **changes: Any) -> pika.URLParameters:
    """pika's, for a broker; `changes` are attributes: heartbeat=1, frame_max=4096."""
    made = pika.URLParameters(broker.url)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@contextlib.contextmanager
def connected(broker: RunningBroker, **changes: Any) -> Iterator[pika.BlockingConnection]:
    connection = pika.BlockingConnection(parameters(broker, **changes))
    try:
        yield connection
    finally:
        if connection.is_open:
            connection.close()


def pump(connection: pika.BlockingConnection, done: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Let a blocking connection work until `done`."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{done} did not become true in {seconds} s"
        connection.process_data_events(0.01)


def settle(channel: Any) -> None:
    """Everything that the broker had to tell this channel was told, and its callbacks have run."""
    channel.exchange_declare("amq.direct", passive=True)  # its answer comes behind everything that was sent before
    channel.connection.process_data_events(0)


def declare(channel: Any, name: str | None = None, **arguments: Any) -> str:
    """An exclusive queue: x_max_length=5 is the argument x-max-length."""
    name = unique() if name is None else name
    channel.queue_declare(name, exclusive=True, arguments=_named(arguments))
    return name


def declare_exchange(channel: Any, kind: str, **arguments: Any) -> str:
    """One that goes with its last binding."""
    name = unique("x")
    channel.exchange_declare(name, kind, auto_delete=True, arguments=_named(arguments))
    return name


def _named(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in arguments.items()}


def publish(channel: Any, routing_key: str, *bodies: bytes, exchange: str = "", **properties: Any) -> None:
    for body in bodies:
        channel.basic_publish(exchange, routing_key, body, pika.BasicProperties(**properties))


def drain(channel: Any, queue: str) -> list[bytes]:
    """All that is ready, taken."""
    found = []
    while True:
        method, _, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return found
        found.append(body)


def get(channel: Any, queue: str) -> tuple[Any, Any, bytes]:
    """One message, which comes for sure, and perhaps not at once."""
    return eventually(lambda: found if (found := channel.basic_get(queue))[0] is not None else None)


class Inbox:
    """A consumer's callback that keeps what it gets."""

    def __init__(self) -> None:
        self.deliveries: list[tuple[Any, Any, bytes]] = []

    def __call__(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.deliveries.append((method, properties, body))

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.deliveries]

    @property
    def tags(self) -> list[int]:
        return [method.delivery_tag for method, _, _ in self.deliveries]

    def __len__(self) -> int:
        return len(self.deliveries)


# ---- single frames ----


class RawClient:
    """A connection of which every frame is seen.

    with RawClient(broker) as client:
        client.call(1, pamqp.commands.Channel.Open(), "Channel.OpenOk")
    """

    def __init__(
        self, broker: RunningBroker, *, heartbeat: int = 0, frame_max: int = 131072, capabilities: Any = None
    ) -> None:
        self.socket = socket.create_connection((broker.host, broker.port), timeout=SECONDS)
        self._buffer = b""
        self.socket.sendall(b"AMQP\x00\x00\x09\x01")
        self.expect("Connection.Start")
        properties = {"capabilities": {"authentication_failure_close": True} if capabilities is None else capabilities}
        self.send(0, pamqp.commands.Connection.StartOk(properties, "PLAIN", "\0guest\0guest", "en_US"))
        self.expect("Connection.Tune")
        self.send(0, pamqp.commands.Connection.TuneOk(0, frame_max, heartbeat))
        self.call(0, pamqp.commands.Connection.Open("/"), "Connection.OpenOk")

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()

    def send(self, channel: int, *frames: Any) -> None:
        """All in one write."""
        self.socket.sendall(b"".join(pamqp.frame.marshal(frame, channel) for frame in frames))

    def call(self, channel: int, method: Any, answer: str) -> Any:
        self.send(channel, method)
        return self.expect(answer)[1]

    def open(self, channel: int) -> None:
        self.call(channel, pamqp.commands.Channel.Open(), "Channel.OpenOk")

    def publish(self, channel: int, routing_key: str, *bodies: bytes, exchange: str = "", **properties: Any) -> None:
        frames: list[Any] = []
        for body in bodies:
            frames.append(pamqp.commands.Basic.Publish(exchange=exchange, routing_key=routing_key))
            frames.append(
                pamqp.header.ContentHeader(
                    body_size=len(body), properties=pamqp.commands.Basic.Properties(**properties)
                )
            )
            if body:
                frames.append(pamqp.body.ContentBody(body))
        self.send(channel, *frames)

    def receive(self) -> tuple[int, Any]:
        """The next frame that is no heartbeat: its channel and what it says. Raises EOFError at the end."""
        while True:
            channel, frame = self.receive_any()
            if not isinstance(frame, pamqp.heartbeat.Heartbeat):
                return channel, frame

    def receive_any(self) -> tuple[int, Any]:
        while len(self._buffer) < 7 or len(self._buffer) < struct.unpack_from(">I", self._buffer, 3)[0] + 8:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._buffer += data
        size, channel, frame = pamqp.frame.unmarshal(self._buffer)
        self._buffer = self._buffer[size:]
        return channel, frame

    def expect(self, name: str) -> tuple[int, Any]:
        channel, frame = self.receive()
        assert frame.name == name, f"expected {name}, got {frame.name}: {dict(frame)}"
        return channel, frame
