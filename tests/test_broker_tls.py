"""TLS ends in a process of its own: what it learns reaches the handshake, it stays small, and it may die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pika
import pika.credentials
import pika.exceptions
import psutil
import pytest

from tests.broker_clients import eventually, unique
from tests.broker_process import Served, free_port, served
from tests.test_broker_limits import MIB, is_served, log_in, until_refused
from warren.amqp.methods import encode
from warren.kernel.frame_writer import method_frame, publishes
from warren.node.status import resident_bytes
from warren.node.tls_relay import Relay, RelayedClient, context_for
from warren.node.users import Users
from warren.testing import running_broker

pytestmark = [
    pytest.mark.usefixtures("pika_litter"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="needs openssl for certificates: apt-get install openssl"
    ),
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server and a client named ann."""
    directory = tmp_path_factory.mktemp("certificates")

    def run(*command: object) -> None:
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True, cwd=directory)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run(*new, "-x509", "-days", 2, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    for name, subject in (("server", "/CN=localhost"), ("client", "/CN=ann")):
        run(*new, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        extra = directory / f"{name}.ext"
        extra.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", 2, "-extfile", extra, "-out", f"{name}.pem"),
        )
    return directory


class ServedTls(Served):
    """A broker with TLS: its port, its relays."""

    tls_port: int

    def relays(self) -> list[int]:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        return [child.pid for child in children if "warren.node.tls_relay" in " ".join(child.cmdline())]

    def relay(self) -> int:
        [pid] = eventually(self.relays)
        return pid


@contextlib.contextmanager
def served_tls(data_dir: Path, certificates: Path, *flags: str):
    port = free_port()
    with served(
        data_dir,
        *flags,
        WARREN_TLS__PORT=str(port),
        WARREN_TLS__CERTFILE=str(certificates / "server.pem"),
        WARREN_TLS__KEYFILE=str(certificates / "server.key"),
        WARREN_TLS__CAFILE=str(certificates / "ca.pem"),
    ) as broker:
        broker.__class__ = ServedTls
        broker.tls_port = port
        yield broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Path):
    """One for all tests that leave it as it was, but for its relay."""
    with served_tls(with_ann(tmp_path_factory.mktemp("tls") / "data"), certificates) as broker:
        yield broker


def with_ann(data: Path) -> Path:
    data.mkdir()
    with Users(data) as users:
        users.add_user("ann", "irrelevant")
        users.set_permissions("ann", "/", ".*", ".*", ".*")
    return data


def context(certificates: Path, *, known: bool = False) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    if known:
        made.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    return made


def connect(port: int, certificates: Path, *, known: bool = False) -> pika.BlockingConnection:
    credentials = pika.credentials.ExternalCredentials() if known else pika.PlainCredentials("guest", "guest")
    options = pika.SSLOptions(context(certificates, known=known), "localhost")
    return pika.BlockingConnection(
        pika.ConnectionParameters("127.0.0.1", port, credentials=credentials, ssl_options=options)
    )


def opened(port: int, certificates: Path) -> ssl.SSLSocket:
    """A raw client with an open channel 1."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    return log_in(context(certificates).wrap_socket(sock, server_hostname="localhost"))


def is_served_over_tls(port: int, certificates: Path) -> None:
    connection = connect(port, certificates)
    channel = connection.channel()
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.basic_publish("", queue, b"ping")
    assert channel.basic_get(queue, auto_ack=True)[2] == b"ping"
    connection.close()


def test_a_certificate_logs_in_and_the_broker_knows_what_tls_said(broker, certificates):
    is_known_by_its_certificate(broker, certificates)
    with connect_plainly(broker):
        assert [one["tls"] for one in broker.ask("connections/list", vhost="/")["connections"]] == [None]


def test_inline_a_certificate_logs_in_and_the_goodbye_is_heard(tmp_path, certificates):
    with served_tls(with_ann(tmp_path / "data"), certificates, "--inline") as broker:
        is_known_by_its_certificate(broker, certificates)
        hears_the_goodbye(broker, certificates)


def is_known_by_its_certificate(broker: ServedTls, certificates: Path) -> None:
    for known in (False, True):
        connection = connect(broker.tls_port, certificates, known=known)
        channel = connection.channel()
        queue = unique()
        channel.queue_declare(queue)
        body = bytes(range(256)) * 4096
        channel.basic_publish("", queue, body)
        assert channel.basic_get(queue, auto_ack=True)[2] == body
        if not known:
            [one] = broker.ask("connections/list", vhost="/")["connections"]
            assert one["tls"]["server_name"] == "localhost"
            assert one["tls"]["protocol"] == "TLSv1.3"
            assert one["tls"]["user"] is None
        connection.close()


def hears_the_goodbye(broker: ServedTls, certificates: Path) -> None:
    connection = connect(broker.tls_port, certificates)
    relay = broker.relay()
    stopping = threading.Thread(target=broker.stop)
    stopping.start()
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as caught:
        connection.process_data_events(30)
    assert caught.value.reply_code == 320
    stopping.join()
    assert not psutil.pid_exists(relay)


@contextlib.contextmanager
def connect_plainly(broker: Served):
    connection = broker.connect()
    yield connection
    connection.close()


def test_a_fixture_may_have_tls_too(certificates):
    tls = {"port": 0, "certfile": certificates / "server.pem", "keyfile": certificates / "server.key"}
    with running_broker(tls={**tls, "relays": 2}) as broker:
        for _ in range(3):
            is_served_over_tls(broker.broker.tls_port, certificates)


def test_a_tls_client_that_stops_reading_costs_bounded_memory_and_disturbs_nobody(
    broker, certificates, scale, record_property
):
    messages = scale.scale(20_000)
    filling = opened(broker.tls_port, certificates)
    filling.sendall(method_frame(1, encode("queue.declare", queue="q", durable=True)))
    batch = publishes(1, b"", b"q", 0, b"\x10\x00\x02", [bytes(50_000)] * 100, 131072)
    for _ in range(messages // 100):
        filling.sendall(batch)
    eventually(lambda: broker.queue_info("q")["messages_ready"] == messages)
    pids = (broker.relay(), broker.vhost_pid())
    before = [resident_bytes(pid) for pid in pids]
    stuck = opened(broker.tls_port, certificates)
    stuck.sendall(method_frame(1, encode("basic.consume", queue="q")))
    eventually(lambda: broker.queue_info("q")["messages_unacknowledged"])
    for _ in range(5):
        is_served_over_tls(broker.tls_port, certificates)
        is_served(broker)
    taken = broker.queue_info("q")["messages_unacknowledged"]
    growth = [resident_bytes(pid) - was for pid, was in zip(pids, before, strict=True)]
    record_property("backlog in MiB", messages * 50_000 // MIB)
    record_property("growth of relay and vhost in MiB", [round(one / MIB, 1) for one in growth])
    assert 0 < taken * 50_000 < 20 * MIB
    assert all(one < 50 * MIB for one in growth)
    stuck.close()
    filling.sendall(method_frame(1, encode("queue.delete", queue="q")))
    filling.close()


def test_what_a_vhost_does_not_read_stops_its_publisher_over_tls_and_comes_through_later(broker, certificates):
    sock = opened(broker.tls_port, certificates)
    sock.sendall(method_frame(1, encode("queue.declare", queue="p")))
    eventually(lambda: "p" in broker.queue_names())
    relay, vhost = broker.relay(), broker.vhost_pid()
    message = publishes(1, b"", b"p", 0, b"\x00\x00", [bytes(100_000)], 131072)
    before = resident_bytes(relay)
    sent = 0
    os.kill(vhost, signal.SIGSTOP)
    try:
        left = memoryview(b"")
        sock.settimeout(1)
        with contextlib.suppress(TimeoutError):
            while sent < 300 * len(message):
                left = left or memoryview(message)
                taken = sock.send(left)
                left = left[taken:]
                sent += taken
        assert resident_bytes(relay) - before < 10 * MIB
        assert sent < 20 * MIB  # what sockets hold
    finally:
        os.kill(vhost, signal.SIGCONT)
    sock.settimeout(30)
    sock.sendall(left)
    count = (sent + len(left)) // len(message)
    eventually(lambda: broker.queue_info("p")["messages_ready"] == count)
    sock.close()


def test_kill_9_of_the_relay_ends_tls_connections_only_and_a_new_relay_serves_the_next_ones(broker, certificates):
    plain = broker.connect()
    secure = opened(broker.tls_port, certificates)
    first, vhost = broker.relay(), broker.vhost_pid()
    os.kill(first, signal.SIGKILL)
    with contextlib.suppress(ConnectionResetError):
        assert secure.recv(1) == b""
    is_served_over_tls(broker.tls_port, certificates)  # waits for the new one
    assert broker.relay() != first
    assert plain.channel().queue_declare("", exclusive=True)
    assert broker.vhost_pid() == vhost
    assert len(eventually(lambda: broker.peers())) == 1
    plain.close()
    secure.close()


def test_a_relay_that_stands_still_does_not_hold_up_the_node(broker, certificates):
    relay = broker.relay()
    os.kill(relay, signal.SIGSTOP)
    try:
        waiting = [socket.create_connection(("127.0.0.1", broker.tls_port), timeout=30) for _ in range(50)]
        for _ in range(5):
            is_served(broker)
    finally:
        os.kill(relay, signal.SIGCONT)
    for sock in waiting:
        sock.close()
    is_served_over_tls(broker.tls_port, certificates)


def test_clients_that_take_all_descriptors_of_a_relay_keep_only_others_out(broker, certificates):
    pid = broker.relay()
    relay = psutil.Process(pid)
    before = relay.rlimit(psutil.RLIMIT_NOFILE)
    clients = [opened(broker.tls_port, certificates)]
    for allowed in (64, 3):  # it refuses; it cannot even take the socket
        relay.rlimit(psutil.RLIMIT_NOFILE, (allowed, before[1]))
        clients += until_refused(lambda: opened(broker.tls_port, certificates))
    assert len(clients) > 5
    relay.rlimit(psutil.RLIMIT_NOFILE, before)
    is_served_over_tls(broker.tls_port, certificates)
    clients[0].sendall(method_frame(2, encode("channel.open")))
    received = b""
    while method_frame(2, encode("channel.open-ok")) not in received:
        received += clients[0].recv(65536)
    assert broker.relay() == pid
    for client in clients:
        client.close()


def test_what_is_no_tls_harms_nobody(broker, certificates):
    relay = broker.relay()
    silent = socket.create_connection(("127.0.0.1", broker.tls_port), timeout=30)
    for nonsense in (
        b"AMQP\x00\x00\x09\x01",
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ):
        with (
            socket.create_connection(("127.0.0.1", broker.tls_port), timeout=30) as sock,
            contextlib.suppress(ConnectionError),
        ):
            sock.sendall(nonsense)
            with contextlib.suppress(OSError):  # it may be closed already
                sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
    is_served_over_tls(broker.tls_port, certificates)
    silent.close()
    unknown = ssl.create_default_context()  # does not trust our CA, and says so in the middle of the handshake
    with (
        socket.create_connection(("127.0.0.1", broker.tls_port), timeout=30) as sock,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        unknown.wrap_socket(sock, server_hostname="localhost")
    is_served_over_tls(broker.tls_port, certificates)
    assert broker.relay() == relay


def test_the_relay_goes_with_the_node_however_that_ends(tmp_path, certificates):
    with served_tls(tmp_path / "data", certificates) as broker:
        sock = opened(broker.tls_port, certificates)
        relay = broker.relay()
        broker.kill_node()
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(65536):
                pass
        sock.close()
        eventually(lambda: not psutil.pid_exists(relay) or psutil.Process(relay).status() == psutil.STATUS_ZOMBIE)
        broker.start()
        hears_the_goodbye(broker, certificates)


def test_a_client_that_does_not_read_is_let_go_when_the_broker_has_closed_its_end(certificates):
    """Nothing else would notice: while a piece waits for the client, the plain end is not looked at."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        relay = Relay(theirs, context_for(str(certificates / "server.pem"), str(certificates / "server.key")))
        server, client = socket.socketpair()
        one = RelayedClient(relay, server, 1, 30)
        relay.clients.add(one)
        one.start()
        shaking = asyncio.to_thread(context(certificates).wrap_socket, client, server_hostname="localhost")
        secure = await shaking
        _, [descriptor], _, _ = await asyncio.to_thread(socket.recv_fds, ours, 65536, 1)
        with socket.socket(fileno=descriptor) as plain:
            plain.setblocking(False)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):  # until nobody takes any more
                    await asyncio.get_running_loop().sock_sendall(plain, bytes(50 * MIB))
            for _ in range(3):
                one.look_whether_stuck()
            assert one in relay.clients  # it may read again
        one.look_whether_stuck()
        assert one not in relay.clients
        secure.close()
        ours.close()
        await asyncio.sleep(0)

    asyncio.run(run())
