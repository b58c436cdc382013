"""The client of the broker's pipeline interface: what it sends, what it forgives, what it never shows."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.fake_pipeline_broker import FakeBroker, Refused, fake_broker
from warren.pipeline.broker_client import BrokerClient, Credentials, sees_files
from warren.pipeline.errors import BrokerDownError, BrokerError, CredentialsError, PipelineError
from warren.tickets import place_name

GUEST = Credentials(user="guest", password="a-secret")


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    with fake_broker() as broker:
        yield broker


def times(count: int, error: Callable[[], Exception]) -> Callable[[str], None]:
    """A fault that strikes `count` times."""
    left = [count]

    def strike(_: str) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise error()

    return strike


class Clock:
    """Time that passes by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def test_a_call_sends_its_arguments_and_returns_the_answer(fake: FakeBroker) -> None:
    with BrokerClient(fake.url, GUEST) as client:
        assert client.call("token")["token"] == "a-token"
        assert client.call("stages/open", vhost="/", writer="w", batch=None)["decided"] is None
    assert fake.calls[-1] == ("stages/open", {"vhost": "/", "writer": "w", "batch": None})
    assert fake.authorizations == {"Basic Z3Vlc3Q6YS1zZWNyZXQ="}


def test_a_refusal_has_the_brokers_code_and_words(fake: FakeBroker) -> None:
    fake.faults.append(times(1, lambda: Refused(403, "forbidden", "user 'guest' may not read queue 'orders'")))
    with BrokerClient(fake.url, GUEST) as client, pytest.raises(BrokerError) as caught:
        client.call("token")
    assert (caught.value.code, caught.value.reason) == ("forbidden", "user 'guest' may not read queue 'orders'")
    assert str(pickle.loads(pickle.dumps(caught.value))) == "user 'guest' may not read queue 'orders' (forbidden)"


def test_a_broker_that_is_not_ready_or_drops_connections_is_asked_again(fake: FakeBroker) -> None:
    fake.faults += [times(2, lambda: Refused(503, "unavailable", "restarting")), times(2, ConnectionAbortedError)]
    clock = Clock()
    with BrokerClient(fake.url, GUEST, sleep=clock.sleep, clock=clock) as client:
        assert client.call("token")["token"] == "a-token"
    assert clock.pauses == [0.05, 0.1, 0.2, 0.4]


def test_a_broker_that_comes_back_is_found_again() -> None:
    with fake_broker() as first, BrokerClient(first.url, GUEST) as client:
        client.call("token")
        port = int(first.url.rpartition(":")[2])
    clock = Clock()
    client = BrokerClient(f"http://127.0.0.1:{port}", GUEST, retry_seconds=3, sleep=clock.sleep, clock=clock)
    with pytest.raises(BrokerDownError, match=rf"no broker answers at http://127.0.0.1:{port} for 3 s .*warren serve"):
        client.call("token")
    assert sum(clock.pauses) == pytest.approx(3)


def test_an_address_at_which_nobody_ever_answered_is_given_up_soon_and_a_broker_that_restarts_is_waited_for() -> None:
    clock = Clock()
    with fake_broker() as fake:
        client = BrokerClient(fake.url, GUEST, first_seconds=5, sleep=clock.sleep, clock=clock)
        client.call("token")
    client.close()
    with pytest.raises(BrokerDownError, match=r"for 60 s"):
        client.call("token")
    assert sum(clock.pauses) == pytest.approx(60), "it was there: it restarts"
    clock = Clock()
    stranger = BrokerClient(client.url, GUEST, first_seconds=5, sleep=clock.sleep, clock=clock)
    with pytest.raises(BrokerDownError, match=r"no broker answers at \S+ for 5 s .*correct the option url"):
        stranger.call("token")
    assert sum(clock.pauses) == pytest.approx(5)


def test_a_broker_that_starts_is_waited_for_also_by_who_comes_first(fake: FakeBroker) -> None:
    fake.faults.append(times(9, lambda: Refused(503, "unavailable", "the broker is starting")))
    clock = Clock()
    with BrokerClient(fake.url, GUEST, first_seconds=1, sleep=clock.sleep, clock=clock) as client:
        assert client.call("token")["token"] == "a-token"
    assert sum(clock.pauses) > 5


@pytest.mark.parametrize(
    ("words", "scheme", "message"),
    [
        (b"AMQP\x00\x00\x09\x01", "http", "it speaks AMQP"),
        (b"220 mail.example ESMTP\r\n", "http", "it speaks no HTTP"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "https", "http:// and not https://"),
    ],
)
def test_an_address_that_speaks_another_protocol_is_named_at_once(words: bytes, scheme: str, message: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):  # whoever hears it hangs up
            connection.recv(65536)
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(65536)

    thread = threading.Thread(target=answer)
    thread.start()
    clock = Clock()
    url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    with (
        listener,
        BrokerClient(url, GUEST, sleep=clock.sleep, clock=clock) as client,
        pytest.raises(PipelineError, match=message),
    ):
        client.call("token")
    thread.join()
    assert clock.pauses == []


def test_nothing_is_tried_again_after_another_refusal(fake: FakeBroker) -> None:
    fake.faults.append(times(1, lambda: Refused(409, "fenced", "epoch 1 is old")))
    clock = Clock()
    with BrokerClient(fake.url, GUEST, sleep=clock.sleep, clock=clock) as client, pytest.raises(BrokerError):
        client.call("token")
    assert clock.pauses == []


def test_an_address_that_is_no_broker_is_named(fake: FakeBroker) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nnginx")

    thread = threading.Thread(target=answer)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with (
        listener,
        BrokerClient(url, GUEST) as client,
        pytest.raises(PipelineError, match=r"not Warren's HTTP interface: 404 Not Found 'nginx'"),
    ):
        client.call("token")
    thread.join()


@pytest.mark.parametrize("url", ["127.0.0.1:15672", "amqp://127.0.0.1", "http://", "http://h:port", ""])
def test_an_url_that_cannot_be_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(PipelineError, match=r"http://127\.0\.0\.1:15672"):
        BrokerClient(url, GUEST)


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(PipelineError) as caught:
        BrokerClient("http://guest:a-secret@127.0.0.1:15672", None)
    assert "http://127.0.0.1:15672" in str(caught.value)
    assert "a-secret" not in str(caught.value)


# ---- credentials ----


def test_credentials_come_from_options_then_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from-file\n")
    both = {"WARREN_USER": "env", "WARREN_PASSWORD": "env-password", "WARREN_TOKEN": "env-token"}
    basic = Credentials(user="u", password="from-file").header
    assert Credentials.from_options({"USER": "u", "passwordFile": str(tmp_path / "password")}, both).header == basic
    assert Credentials.from_options({"token": "t"}, both).header == "Bearer t"
    assert Credentials.from_options({}, both).header == "Bearer env-token"
    del both["WARREN_TOKEN"]
    assert Credentials.from_options({}, both).header == Credentials(user="env", password="env-password").header
    assert Credentials.from_options({"user": "u"}, both).header == Credentials(user="u", password="env-password").header


def test_missing_credentials_name_what_is_missing() -> None:
    with pytest.raises(CredentialsError, match=r"there is no user: .*WARREN_USER"):
        Credentials.from_options({}, {})
    with pytest.raises(CredentialsError, match=r"there is no password for user 'u'"):
        Credentials.from_options({"user": "u"}, {})
    with pytest.raises(CredentialsError, match=r"passwordFile: cannot read '/no/such/file'"):
        Credentials.from_options({"user": "u", "passwordFile": "/no/such/file"}, {})


def test_credentials_show_no_secret_and_do_not_travel() -> None:
    client = BrokerClient("http://127.0.0.1:1", GUEST)
    assert repr(client) == "BrokerClient('http://127.0.0.1:1', Credentials(user='guest'))"
    assert "t0" not in repr(Credentials(token="t0"))
    with pytest.raises(CredentialsError, match="executors get a ticket"):
        pickle.dumps(GUEST)


# ---- rows ----


def batch(*bodies: bytes) -> pa.RecordBatch:
    values = [pa.array([b"head"] * len(bodies)), pa.array(list(bodies)), pa.array([""] * len(bodies))]
    return pa.RecordBatch.from_arrays(values, names=["head", "body", "exchange"])


READ = {"number": 1, "sid": 256, "first": 0, "stop": 9, "columns": ["body"]}


def test_rows_are_streamed_and_uploaded(fake: FakeBroker) -> None:
    fake.queues["q"] = [b"a", b"b"]
    fake.checkouts[1] = {"q": [0, 1]}
    with BrokerClient(fake.url) as client:
        rows = [
            row["body"] for found in client.stream(fake.url, "/checkouts/read", "t", READ) for row in found.to_pylist()
        ]
        assert rows == [b"a", b"b"]
        where = {"vhost": "/", "writer": "w/1", "batch": 0, "partition": 0, "attempt": "0"}
        answer = client.upload(fake.url, "/stages", "t", [batch(b"x"), batch(b"y", b"z")], where)
    assert answer == {"name": "w/1:0:0:0:1", "count": 3, "bytes": 3}
    assert [row[1] for row in fake.stages["w/1:0:0:0:1"]] == [b"x", b"y", b"z"]
    assert fake.authorizations == {"Bearer t"}


def test_an_upload_of_a_list_is_tried_again(fake: FakeBroker) -> None:
    fake.faults.append(times(1, ConnectionAbortedError))
    where = {"vhost": "/", "writer": "w", "batch": 0, "partition": 0, "attempt": "0"}
    with BrokerClient(fake.url) as client:
        assert client.upload(fake.url, "/stages", "t", [batch(b"x")], where)["count"] == 1


def test_a_stream_that_breaks_off_is_an_error_and_not_a_short_result() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch(b"x").schema) as writer:
        for _ in range(3):
            writer.write_batch(batch(b"x" * 10_000))
    content = sink.getvalue().to_pybytes()
    # Cut between two batches, where a file would look whole but for the mark at its end; and inside of one.
    for cut in (len(content) - 8, len(content) - 5_000):
        listener = socket.create_server(("127.0.0.1", 0))

        def answer(listener: socket.socket = listener, cut: int = cut) -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + content[:cut])

        thread = threading.Thread(target=answer)
        thread.start()
        with listener, BrokerClient("http://127.0.0.1:1") as client:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            stream = client.stream(url, "/checkouts/read", "t", READ)
            assert next(stream).num_rows == 1
            with pytest.raises(BrokerDownError, match="broke off in the middle"):
                list(stream)
        thread.join()


def test_files_are_visible_only_on_the_machine_of_the_broker(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".vhost").write_text("/")
    here = place_name(str(tmp_path / "one"))
    assert sees_files(str(tmp_path / "one"), here)
    assert not sees_files(str(tmp_path / "other"), here)
    assert not sees_files(str(tmp_path / "none"), here)
    assert not sees_files(str(tmp_path / "one"), "another machine")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for certificates: apt-get install openssl")
def test_https_is_trusted_only_with_its_authority(tmp_path: Path) -> None:
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", "key.pem", "-out", "cert.pem", *subject]
    subprocess.run(made, check=True, capture_output=True, cwd=tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with fake_broker(context) as fake:
        assert fake.url.startswith("https://")
        with (
            BrokerClient(fake.url, GUEST) as client,
            pytest.raises(PipelineError, match=r"cannot be trusted .*option caFile"),
        ):
            client.call("token")
        with BrokerClient(fake.url, GUEST, ca_file=str(tmp_path / "cert.pem")) as client:
            assert client.call("token")["token"] == "a-token"
    with pytest.raises(PipelineError, match=r"option caFile: cannot use '/no/such/file'"):
        BrokerClient("https://127.0.0.1:1", GUEST, ca_file="/no/such/file")
