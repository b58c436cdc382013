"""What a connection, a queue and a binding cost, in the process of a vhost: memory, and work that does not grow with their
number.

Memory is a property: it decides. So is what an operation writes. Seconds are recorded for the report of a full run and
decide nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.broker_process import Served, served
from tests.conftest import Scale
from warren.amqp.methods import encode
from warren.kernel.frame_writer import method_frame, publishes
from warren.storage.queue_state import NOTHING
from warren.storage.variable_queue import VariableQueue
from warren.storage.vhost_store import VhostStore
from warren.vhost.vhost import Vhost

pytestmark = [
    pytest.mark.xdist_group("footprint"),  # they share one broker
    pytest.mark.usefixtures("pika_litter"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

# The page cache of SQLite fills up, buffers reach their size, arenas are taken in whole: once, whatever the number.
ONCE_BYTES = 3 * 1024 * 1024
BATCH = 500
PAGE_BYTES = 4096  # of SQLite

SHAPES: dict[str, tuple[str, Callable[[int], str]]] = {
    "direct": ("direct", lambda number: f"order-{number}"),
    "the last word differs": (
        "topic",
        lambda number: f"region{number % 10}.site{number % 1000}.sensor.{number}",
    ),
    "a wildcard behind a word of its own": ("topic", lambda number: f"device-{number}.#"),
}


def private_bytes(pid: int) -> int:
    """Memory that a process does not have from a file."""
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    raise AssertionError(f"no RssAnon of {pid}")


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def written_bytes(pid: int) -> int:
    """What a process gave to write calls, be it for a file or a socket."""
    with open(f"/proc/{pid}/io") as file:
        return int(dict(line.split(":") for line in file)["wchar"])


class Client:
    """A raw client with an open channel 1."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._in = b""
        self._sock.sendall(
            b"AMQP\x00\x00\x09\x01"
            + method_frame(
                0, encode("connection.start-ok", mechanism="PLAIN", response=b"\0guest\0guest", locale="en_US")
            )
            + method_frame(0, encode("connection.tune-ok", channel_max=2047, frame_max=131072))
            + method_frame(0, encode("connection.open", virtual_host="/"))
            + method_frame(1, encode("channel.open"))
        )
        self._expect(method_frame(1, encode("channel.open-ok")))

    def _expect(self, frame: bytes) -> None:
        while frame not in self._in:
            more = self._sock.recv(65536)
            assert more, f"the broker hung up after {self._in!r}"
            self._in += more
        self._in = b""

    def do(self, methods: list[bytes]) -> None:
        """All of them, that want no answer; returns when they are done, and safe."""
        for first in range(0, len(methods), BATCH):
            self._sock.sendall(b"".join(method_frame(1, method) for method in methods[first : first + BATCH]))
            self._settle()

    def publish(self, exchange: str, keys: list[str]) -> None:
        """A transient message with each of the keys; returns when they are in their queues."""
        for first in range(0, len(keys), BATCH):
            batch = keys[first : first + BATCH]
            self._sock.sendall(
                b"".join(publishes(1, exchange.encode(), key.encode(), 0, b"\x00\x00", [b"m"], 131072) for key in batch)
            )
            self._settle()

    def _settle(self) -> None:
        """The answer leaves behind the commit of everything before it."""
        self._sock.sendall(method_frame(1, encode("exchange.declare", exchange="x", type="direct", durable=True)))
        self._expect(method_frame(1, encode("exchange.declare-ok")))

    def close(self) -> None:
        self._sock.close()


def declares(first: int, stop: int) -> list[bytes]:
    return [encode("queue.declare", queue=f"queue-{n}", durable=True, nowait=True) for n in range(first, stop)]


def binds(exchange: str, key: Callable[[int], str], queues: int, first: int, stop: int) -> list[bytes]:
    return [
        encode("queue.bind", queue=f"queue-{n % queues}", exchange=exchange, routing_key=key(n), nowait=True)
        for n in range(first, stop)
    ]


def deletes(first: int, stop: int) -> list[bytes]:
    return [encode("queue.delete", queue=f"queue-{n}", nowait=True) for n in range(first, stop)]


@dataclass
class Figures:
    """What one operation cost, in the order in which it was repeated, a tenth of them at a time."""

    count: int  # in each tenth
    written: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of CPU time


@dataclass
class Footprint:
    """What a broker came to cost as things were added to it."""

    growth: dict[str, tuple[int, int]] = field(default_factory=dict)  # what -> bytes, of how many
    work: dict[str, Figures] = field(default_factory=dict)  # operation -> figures
    bindings_of_a_queue: int = 0  # with a key of each shape
    idle_seconds: float = 0.0  # of CPU time in a second in which nobody did anything


class Crowd:
    """Fills a broker and takes its figures."""

    def __init__(self, broker: Served, scale: Scale) -> None:
        self._broker = broker
        self._node, self._vhost = broker.process.pid, broker.vhost_pid()
        self._client = Client(broker.port)
        self._queues, self._bindings = scale.scale(10_000), scale.scale(100_000)
        self._connections = scale.scale(1000)
        self.found = Footprint(bindings_of_a_queue=self._bindings // self._queues)
        # Everything once before, on a small scale: what is taken once is nobody's cost.
        self._client.do(declares(0, BATCH))
        self._client.do([*self._exchange("warm", "topic"), *binds("warm", str, BATCH, 0, BATCH)])
        self._client.do([encode("exchange.delete", exchange="warm", nowait=True), *deletes(0, BATCH)])

    @staticmethod
    def _exchange(name: str, type_: str) -> list[bytes]:
        return [encode("exchange.declare", exchange=name, type=type_, durable=True, nowait=True)]

    def gather(self) -> Footprint:
        with self._growth("connection", self._connections):
            clients = [Client(self._broker.port) for _ in range(self._connections)]
        for client in clients:
            client.close()
        with self._growth("queue", self._queues):
            self._work("declare", self._queues, declares)
        for shape, (type_, key) in SHAPES.items():
            self._client.do(self._exchange(shape, type_))
            with self._growth(f"binding: {shape}", self._bindings):
                self._work(f"bind: {shape}", self._bindings, partial(binds, shape, key, self._queues))
        self.found.idle_seconds = self._idle()
        self._work("delete", self._queues, deletes)
        with self._growth("queue, after as many were deleted", self._queues):
            self._client.do(declares(0, self._queues))
        self._client.close()
        return self.found

    @contextlib.contextmanager
    def _growth(self, what: str, count: int) -> Iterator[None]:
        before = private_bytes(self._vhost) + private_bytes(self._node)
        yield
        self.found.growth[what] = private_bytes(self._vhost) + private_bytes(self._node) - before, count

    def _work(self, what: str, count: int, make: Callable[[int, int], list[bytes]]) -> None:
        figures = self.found.work[what] = Figures(count // 10)
        for first in range(0, count, figures.count):
            written, seconds = written_bytes(self._vhost), cpu_seconds(self._vhost)
            self._client.do(make(first, first + figures.count))
            figures.written.append(written_bytes(self._vhost) - written)
            figures.seconds.append(cpu_seconds(self._vhost) - seconds)

    def _idle(self) -> float:
        time.sleep(0.5)  # what was just done is committed and tidied up
        before, began = cpu_seconds(self._vhost), time.monotonic()
        time.sleep(1.5)
        return (cpu_seconds(self._vhost) - before) / (time.monotonic() - began)


class Untouchable(dict[str, Any]):
    """Queues that must not be looked at, each one or all of them."""

    def values(self) -> Any:
        raise AssertionError("all queues were looked at")

    __iter__ = items = keys = values


@pytest.fixture(scope="module")
def footprint(tmp_path_factory, scale) -> Footprint:
    with served(tmp_path_factory.mktemp("footprint") / "data") as broker:
        return Crowd(broker, scale).gather()


def assert_at_most(footprint: Footprint, what: str, most: int, record_property) -> None:
    growth, count = footprint.growth[what]
    record_property(what, f"{growth // count:,} bytes each, of {count:,}")
    assert growth <= count * most + ONCE_BYTES


def test_a_connection_with_a_channel_costs_at_most_70_kb(footprint, record_property):
    assert_at_most(footprint, "connection", 70_000, record_property)


def test_a_durable_queue_costs_at_most_5_kb(footprint, record_property):
    assert_at_most(footprint, "queue", 5_000, record_property)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_binding_costs_at_most_500_bytes(footprint, record_property, shape):
    assert_at_most(footprint, f"binding: {shape}", 500, record_property)


def test_what_deleted_queues_and_bindings_took_is_there_for_the_next(footprint, record_property):
    assert_at_most(footprint, "queue, after as many were deleted", 500, record_property)


@pytest.mark.parametrize("what", ["declare", *(f"bind: {shape}" for shape in SHAPES), "delete"])
def test_an_operation_writes_the_pages_of_its_own_rows_however_many_others_there_are(footprint, record_property, what):
    figures = footprint.work[what]
    for name, values, unit in (("bytes written", figures.written, 1), ("CPU time in us", figures.seconds, 1e6)):
        tenths = ", ".join(f"{value * unit / figures.count:,.0f}" for value in values)
        record_property(f"{name} to {what} one, by tenths", tenths)
    # A row is in a table and in its index; each page goes to SQLite's log first and to the file later.
    rows = 1 + len(SHAPES) * footprint.bindings_of_a_queue if what == "delete" else 1
    assert max(figures.written) <= rows * 2 * 2 * (PAGE_BYTES + 24) * figures.count


def test_the_upkeep_of_a_store_looks_at_no_queue_that_nobody_uses(
    tmp_path, scale, monkeypatch, footprint, record_property
):
    record_property("CPU seconds a second while nobody does anything", round(footprint.idle_seconds, 4))
    store = VhostStore(str(tmp_path), background=False)
    try:
        store.metadata.begin_group()
        for number in range(scale.scale(1000)):
            store.declare(f"queue-{number}")
        store.metadata.end_group()
        store.tick()
        monkeypatch.setattr(store, "queues", Untouchable())
        for _ in range(3):
            store._next_sweep = 0.0  # as if its time had come
            store.tick()
    finally:
        monkeypatch.undo()
        store.close()


def test_empty_queues_share_containers_that_nothing_can_be_put_into(tmp_path):
    store = VhostStore(str(tmp_path), background=False)
    try:
        empty, other = (store.declare(name).backing for name in ("empty", "other"))
        store.fan_out([store.get("other")], b"", b"body", persistent=False, published_at=0)
        assert isinstance(empty, VariableQueue)
        assert isinstance(other, VariableQueue)
        assert [entry.body for entry in other.q4] == [b"body"]
        assert all(container is NOTHING for container in (empty.q1, empty.q2, empty.q3, empty.q4, other.q1))
        for put in (NOTHING.append, NOTHING.appendleft, NOTHING.extend, NOTHING.extendleft):
            with pytest.raises(AssertionError):
                put([other.q4[0]])
        assert not NOTHING
    finally:
        store.close()


def test_the_end_of_a_connection_looks_at_its_own_exclusive_queues_only(tmp_path):
    async def run() -> None:
        vhost = Vhost(str(tmp_path), "/")
        try:
            first, second = object(), object()
            for number, owner in enumerate([first, second, None, first]):
                vhost.declare_queue(f"q{number}", durable=False, exclusive_to=owner, auto_delete=False, arguments={})
            vhost.remove_queue(vhost.queues["q3"])
            vhost.queues = Untouchable(vhost.queues)
            vhost.release_exclusive(first)
            assert [name for name in ("q0", "q1", "q2", "q3") if name in vhost.queues] == ["q1", "q2"]
        finally:
            vhost.queues = {}
            await vhost.stop()

    asyncio.run(run())


def test_deletes_of_queues_that_hold_nothing_are_one_commit_and_others_are_safe_before_their_bodies_go(tmp_path):
    store = VhostStore(str(tmp_path), background=False)
    try:
        for name in ("a", "b", "full"):
            store.declare(name)
        store.fan_out([store.get("full")], b"", b"body", persistent=True, published_at=0)

        def kept() -> list[str]:
            with contextlib.closing(sqlite3.connect(store.metadata.path)) as other:
                return [name for (name,) in other.execute("SELECT name FROM queues ORDER BY name")]

        store.metadata.begin_group()
        store.delete("a")
        store.delete("b")
        assert kept() == ["a", "b", "full"]  # a crash now brings them back: nobody was told that they are gone
        assert store.delete("full") == 1
        assert kept() == []
    finally:
        store.close()


def kill_all(broker: Served) -> None:
    """The vhost cannot finish anything: it is stopped before the node is gone."""
    vhost = broker.vhost_pid()
    os.kill(vhost, signal.SIGSTOP)
    broker.kill_node()
    os.kill(vhost, signal.SIGKILL)


def test_many_queues_and_bindings_are_all_there_after_a_clean_and_after_a_dirty_stop(tmp_path, scale, record_property):
    queues, bindings = scale.scale(10_000), scale.scale(100_000)
    type_, key = SHAPES["the last word differs"]
    with served(tmp_path / "data") as broker:
        client = Client(broker.port)
        client.do([encode("exchange.declare", exchange="many", type=type_, durable=True, nowait=True)])
        client.do([*declares(0, queues), *binds("many", key, queues, 0, bindings)])
        client.close()
        for how in ("clean", "dirty"):
            if how == "clean":
                began = time.monotonic()
                assert broker.stop() == 0
                record_property("seconds to stop", round(time.monotonic() - began, 2))
            else:
                kill_all(broker)
            began = time.monotonic()
            broker.start()
            record_property(f"seconds to start after a {how} stop", round(time.monotonic() - began, 2))
            record_property(f"of them CPU of the vhost, {how}", round(cpu_seconds(broker.vhost_pid()), 2))
            with contextlib.closing(Client(broker.port)) as client:
                client.publish("many", [key(number) for number in range(bindings)])
            found = broker.ask("queues/list", vhost="/")["queues"]
            assert [info["messages_ready"] for info in found] == [bindings // queues] * queues
