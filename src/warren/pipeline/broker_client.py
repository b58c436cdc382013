"""Requests to a running broker: JSON to the node, Arrow streams to and from the data server beside it.

Rules:

1. Every request of the API may be repeated: the broker knows a repeated one and answers as before. So a broker that is
   restarted in the middle costs a pause, not a query: connection errors and 503 are tried again, with growing pauses,
   for `retry_seconds`. Who has never been answered has more likely a wrong url than a broker that is about to come back:
   a client that begins something gives up after `first_seconds`.
2. Credentials stay in the driver's process. `Credentials` shows no secret in a repr and refuses to be pickled; executors
   get a ticket, which stands for one snapshot, checkout or stage and expires.
3. A stream of rows is tried again until its first batch came. Behind that the caller has rows already, and Spark runs
   the task again.
4. Only the standard library, and pyarrow where rows travel: executors import this.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlencode, urlsplit

from warren.pipeline.errors import BrokerDownError, BrokerError, CredentialsError, PipelineError
from warren.tickets import place_name

if TYPE_CHECKING:
    import pyarrow as pa

    from warren.pipeline.parts import StreamPart

_T = TypeVar("_T")

RETRY_SECONDS = 60.0
FIRST_SECONDS = 5.0  # for an address at which nobody has answered yet
CONNECT_SECONDS = 10.0
STREAM_ERROR = b"error"  # metadata of a batch: why there are no more
ANSWER_SECONDS = 120.0  # `stages/decide` waits 30 s for a release, a snapshot for a commit

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_SHOWN_CHARACTERS = 200  # of an answer that is not the broker's

# What a broker that is down, restarts or dies in the middle looks like.
_LOST = (OSError, http.client.HTTPException)


class Credentials:
    """A user and a password, or a token: who asks.

    >>> Credentials(user="guest", password="guest")
    Credentials(user='guest')
    """

    __slots__ = ("_header", "user")

    def __init__(self, user: str | None = None, password: str | None = None, token: str | None = None) -> None:
        self.user = user
        if token is not None:
            self._header = f"Bearer {token}"
        else:
            self._header = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> Credentials:
        """From the options user, password, passwordFile, token, tokenFile, in any case of letters; else from
        WARREN_USER, WARREN_PASSWORD, WARREN_TOKEN of the environment.

        Raises CredentialsError, naming what is missing or cannot be read.
        """
        given = {name.lower(): value for name, value in options.items()}
        token = given.get("token") or _from_file("tokenFile", given.get("tokenfile"))
        user = given.get("user")
        password = given.get("password") or _from_file("passwordFile", given.get("passwordfile"))
        if token is None and user is None and password is None:
            token, user = environ.get("WARREN_TOKEN"), environ.get("WARREN_USER")
        if token is not None:
            return cls(user, token=token)
        if password is None:
            password = environ.get("WARREN_PASSWORD")
        if user is None:
            user = environ.get("WARREN_USER")
        if user is None or password is None:
            missing = "user" if user is None else f"password for user {user!r}"
            raise CredentialsError(
                f"there is no {missing}: give the options user and password (or passwordFile), or token (or tokenFile), "
                f"or set WARREN_USER and WARREN_PASSWORD, or WARREN_TOKEN"
            )
        return cls(user, password)

    @property
    def header(self) -> str:
        """For `Authorization`."""
        return self._header

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r})" if self.user is not None else "Credentials(token)"

    def __reduce__(self) -> NoReturn:
        raise CredentialsError("credentials stay in the driver: executors get a ticket")


def forget_secrets(options: Mapping[str, str]) -> None:
    """Take passwords and tokens out of a data source's options. Spark pickles the source, with its options, into what it
    sends to executors, beside the reader that was made of them; so whoever has made the reader calls this."""
    if isinstance(options, MutableMapping):
        for name in [name for name in options if name.lower() in ("password", "token")]:
            del options[name]


def _from_file(option: str, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise CredentialsError(f"option {option}: cannot read {path!r}: {error.strerror}") from error


class BrokerClient:
    """One broker's HTTP interface. Keeps its connection; not for several threads at once.

    >>> client = BrokerClient("http://127.0.0.1:15672", Credentials(user="guest", password="guest"))
    >>> client.call("tap/status", vhost="/", queues=["orders"])          # doctest: +SKIP
    {'queues': {'orders': {'next_seq_id': 7, 'ready': 3, 'unacknowledged': 1}}}

    Without credentials it can ask what a ticket allows, with the ticket among the arguments.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials | None = None,
        *,
        retry_seconds: float = RETRY_SECONDS,
        first_seconds: float | None = None,
        ca_file: str | None = None,
        trust: ssl.SSLContext | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self._credentials = credentials
        self._retry_seconds = retry_seconds
        self._first_seconds = first_seconds  # None: as long as later; of a process that goes on with what others began
        self._ca_file = ca_file
        self._trust = trust  # in the place of ca_file and the system's
        self._sleep = sleep
        self._clock = clock
        self._address = _Address(url, ca_file, trust)
        self._connection: http.client.HTTPConnection | None = None

    def __repr__(self) -> str:
        return f"BrokerClient({self.url!r}, {self._credentials!r})"

    def __enter__(self) -> BrokerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def call(
        self, name: str, *, retry_seconds: float | None = None, busy_seconds: float | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """POST /api/pipeline/<name>. `busy_seconds`: how long to ask again when the broker answers that it cannot now.

        Raises BrokerError for a refusal, BrokerDownError when nobody answers for `retry_seconds`.
        """
        body = json.dumps(arguments).encode()
        headers = {"Content-Type": "application/json"}
        if self._credentials is not None:
            headers["Authorization"] = self._credentials.header
        path = f"{self._address.prefix}/api/pipeline/{name}"

        def attempt() -> dict[str, Any]:
            return self._attempt_call(path, body, headers)

        return self._until_answered(self.url, attempt, retry_seconds, busy_seconds)

    def _attempt_call(self, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        connection = self._connection or self._address.connect()
        self._connection = None  # nobody uses it again unless its answer was read to the end
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except BaseException:
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            self._connection = connection
        return _json_answer(self.url, answer, content)

    def ask(self, data_url: str, path: str, ticket: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """POST to the data server, whose answer is JSON. Raises as `call`."""
        address = _Address(data_url, self._ca_file, self._trust)
        body = json.dumps(arguments).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ticket}"}

        def attempt() -> dict[str, Any]:
            with contextlib.closing(address.connect()) as connection:
                connection.request("POST", address.prefix + path, body, headers)
                answer = connection.getresponse()
                return _json_answer(data_url, answer, answer.read())

        return self._until_answered(data_url, attempt)

    def stream(self, data_url: str, path: str, ticket: str, arguments: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """POST to the data server, whose answer is a stream of record batches.

        Raises as `call`; and BrokerDownError when the stream ends before its end.
        """
        import pyarrow as pa

        address = _Address(data_url, self._ca_file, self._trust)
        body = json.dumps(arguments).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ticket}"}

        def attempt() -> tuple[http.client.HTTPConnection, pa.RecordBatchReader, pa.RecordBatch | None]:
            connection = address.connect()
            try:
                connection.request("POST", address.prefix + path, body, headers)
                answer = connection.getresponse()
                if answer.status != http.client.OK:
                    _json_answer(data_url, answer, answer.read())
                reader = pa.ipc.open_stream(_Whole(answer))
                return connection, reader, _next_batch(data_url, reader)
            except BaseException:
                connection.close()
                raise

        connection, reader, first = self._until_answered(data_url, attempt)
        with contextlib.closing(connection):
            batch = first
            try:
                while batch is not None:
                    yield batch
                    batch = _next_batch(data_url, reader)
            except (*_LOST, pa.ArrowInvalid) as error:
                raise BrokerDownError(
                    f"the data server at {data_url} broke off in the middle of {path}: {error or type(error).__name__}"
                ) from error

    def upload(
        self,
        data_url: str,
        path: str,
        ticket: str,
        batches: Iterable[pa.RecordBatch],
        query: Mapping[str, object] | None = None,
        busy_seconds: float | None = None,
    ) -> dict[str, Any]:
        """POST record batches to the data server. They are gone through once for every attempt: a list can be tried
        again, an iterator only once."""
        address = _Address(data_url, self._ca_file, self._trust)
        target = address.prefix + path + ("?" + urlencode({k: str(v) for k, v in query.items()}) if query else "")
        headers = {
            "Content-Type": "application/vnd.apache.arrow.stream",
            "Transfer-Encoding": "chunked",
            "Authorization": f"Bearer {ticket}",
        }

        def attempt() -> dict[str, Any]:
            with contextlib.closing(address.connect()) as connection:
                try:
                    connection.request("POST", target, ipc_pieces(batches), headers, encode_chunked=True)
                except (BrokenPipeError, ConnectionResetError):
                    # A server that refuses answers before it has read everything; that answer says why.
                    if connection.sock is None:
                        raise
                answer = connection.getresponse()
                return _json_answer(data_url, answer, answer.read())

        retry_seconds = 0.0 if isinstance(batches, Iterator) else None
        return self._until_answered(data_url, attempt, retry_seconds, busy_seconds)

    def _until_answered(
        self,
        url: str,
        attempt: Callable[[], _T],
        retry_seconds: float | None = None,
        busy_seconds: float | None = None,
    ) -> _T:
        patience = self._retry_seconds if retry_seconds is None else retry_seconds
        busy_until = self._clock() + (patience if busy_seconds is None else busy_seconds)
        waits = patience if self._first_seconds is None else min(patience, self._first_seconds)
        down_until = self._clock() + waits
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                found = attempt()
                self._first_seconds = None
                return found
            except BrokerError as error:
                self._first_seconds, waits = None, patience  # it is there
                deadline = busy_until
                if error.code != "unavailable" or self._clock() >= deadline:
                    raise
                down_until = self._clock() + patience
            except ssl.SSLCertVerificationError as error:
                raise PipelineError(
                    f"{url} has a certificate that cannot be trusted ({error.verify_message}): give its authority with the "
                    f"option caFile, or --ca-file of a command"
                ) from error
            except _LOST as error:
                _refuse_other_protocols(url, error)
                deadline = down_until
                if self._clock() >= deadline:
                    raise BrokerDownError(_down(url, error, waits)) from error
            self._sleep(min(pause, max(deadline - self._clock(), 0.001)))
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)


def ipc_pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    """An Arrow IPC stream, in pieces of one batch."""
    import pyarrow as pa

    sink = io.BytesIO()
    writer = None
    for batch in batches:
        if writer is None:
            writer = pa.ipc.new_stream(sink, batch.schema)
        writer.write_batch(batch)
        yield sink.getvalue()
        sink.seek(0)
        sink.truncate()
    if writer is not None:
        writer.close()
        yield sink.getvalue()


class _Address:
    """Where a URL points to, checked."""

    def __init__(self, url: str, ca_file: str | None, trust: ssl.SSLContext | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise PipelineError(f"option url: {error}; it looks like http://127.0.0.1:15672") from error
        if parts.username is not None or parts.password is not None:
            raise PipelineError(
                f"option url: it names a user or a password, and urls are shown in plans and logs: write "
                f"{parts.scheme}://{parts.hostname}{f':{port}' if port else ''} and use the options user and password"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PipelineError(
                f"option url is {url!r}; it looks like http://127.0.0.1:15672 or https://broker.example"
            )
        self._host, self._port = parts.hostname, port
        self._context = trust or self._trust(ca_file) if parts.scheme == "https" else None
        self.prefix = parts.path.rstrip("/")

    @staticmethod
    def _trust(ca_file: str | None) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise PipelineError(f"option caFile: cannot use {ca_file!r}: {error}") from error

    def connect(self) -> http.client.HTTPConnection:
        if self._context is not None:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_SECONDS, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS)
        connection.connect()
        connection.sock.settimeout(ANSWER_SECONDS)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class _Whole(io.RawIOBase):
    """An answer as a file for pyarrow, which stops at the mark that ends a stream. So whoever finds no more bytes was in
    the middle of it: that is an error, and not an end that looks like a queue with fewer rows."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view):
            count = self._answer.readinto(view[filled:])
            if not count:
                raise http.client.IncompleteRead(b"", len(view) - filled)
            filled += count
        return filled


def _next_batch(data_url: str, reader: pa.RecordBatchReader) -> pa.RecordBatch | None:
    """None: it was the last one. Raises PipelineError with what the server said of a reading that failed."""
    try:
        batch, said = reader.read_next_batch_with_custom_metadata()
    except StopIteration:
        return None
    if said is not None and STREAM_ERROR in said:
        raise PipelineError(f"{said[STREAM_ERROR].decode()} (read by the data server at {data_url})")
    return batch


def _json_answer(url: str, answer: http.client.HTTPResponse, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content) if content else {}
    except ValueError:
        found = None
    if answer.status == http.client.OK and isinstance(found, dict):
        return found
    if isinstance(found, dict) and isinstance(found.get("error"), str):
        raise BrokerError(found["error"], str(found.get("reason", "")))
    if answer.status == http.client.SERVICE_UNAVAILABLE:
        raise BrokerError("unavailable", f"the broker at {url} is not ready")
    shown = content[:_SHOWN_CHARACTERS].decode("utf-8", "replace").strip()
    raise PipelineError(
        f"what answers at {url} is not Warren's HTTP interface: {answer.status} {answer.reason} {shown!r}; the option url is "
        f"the address of the status page that `warren serve` prints"
    )


def _refuse_other_protocols(url: str, error: BaseException) -> None:
    """Whoever speaks something else does not learn HTTP by being asked again. Raises PipelineError."""
    said = None
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        said = "AMQP" if str(error.args[0]).startswith("AMQP") else "no HTTP"
    elif isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        said = "no TLS, so it is http:// and not https://"
    if said is not None:
        raise PipelineError(
            f"what answers at {url} is not Warren's HTTP interface: it speaks {said}; the option url is the address of the "
            f"status page that `warren serve` prints"
        ) from error


def _down(url: str, error: BaseException, patience: float) -> str:
    why = str(error) or type(error).__name__
    waited = f" for {patience:.0f} s" if patience >= 1 else ""
    return f"no broker answers at {url}{waited} ({why}): start it (`warren serve`), or correct the option url"


def plan_checkout(
    url: str, ticket: str, *, number: int, sid: int, first: int, stop: int, ca_file: str | None = None
) -> tuple[str, list[StreamPart]]:
    """Where the messages first <= seq_id < stop of a checkout are now: the vhost's directory and parts of its streams.

    For executors and the data server, who have a ticket and no credentials. Files may move before they are opened: then
    FileNotFoundError says so, and this is asked again."""
    from warren.pipeline.parts import StreamPart

    with BrokerClient(url, ca_file=ca_file) as client:
        answer = client.call("leases/plan", ticket=ticket, number=number, sid=sid, first=first, stop=stop)
    return answer["root"], [StreamPart.from_json(part) for part in answer["parts"]]


def sees_files(root: str, host: str) -> bool:
    """Whether this process can read the files of a vhost, given its directory and `host` of the broker's answer: the name of
    the machine, the id of its boot, and which file `.vhost` is. Two containers of one machine, or two directories that are
    called the same, are not taken for one another."""
    try:
        return place_name(root) == host and os.access(os.path.join(root, ".vhost"), os.R_OK)
    except OSError:
        return False
