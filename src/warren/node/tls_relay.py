"""A process that ends TLS, so that everybody else sees plain sockets.

The node accepts a client, counts it, and hands its socket over; the relay does the TLS handshake, answers with one end of a
socket pair and what it learned of the client, and carries bytes between the two until one side ends. The plain end is
handed on like any other socket. Nothing that encrypts runs in the node or in a vhost.

Rules:

1. A direction is a pump that holds one piece at most, and is always blocked on exactly one thing (`Wait`). It takes
   nothing new before that piece is gone, so a side that does not read stops the other one, and memory stays bounded.
2. Everything that TLS hides from the loop is read before the loop is asked again: a record that OpenSSL has already
   taken from the socket makes no descriptor readable.
3. Every client is answered, "plain" or "refused", before its time is up. The node takes a relay that is silent for dead.
4. The relay lives as long as its control socket: then it carries what is on its way, for a few seconds, and exits.

    node to relay       client      an accepted socket, its id, the seconds it has      (a descriptor)
    relay to node       up          it takes clients
                        failed      why it does not
                        plain       the plain end of the client with this id            (a descriptor)
                        refused     why the client with this id is gone
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import resource
import select
import signal
import socket
import ssl
import sys
from typing import Any

from warren.vhost.client_limit import ClientLimit
from warren.vhost.control import ControlSocket, Message

_PIECE_BYTES = 65536
_TURN_PIECES = 8  # of one client, before the others have their turn
_LINGER_SECONDS = 1.0  # that a client has to hear the goodbye
_STUCK_SECONDS = 5.0  # between two looks at clients that do not read
_LAST_SECONDS = 10.0  # for what is on its way when the node is gone


def context_for(certfile: str, keyfile: str, cafile: str | None = None, verify: bool = False) -> ssl.SSLContext:
    """What the configuration asks for. Raises OSError, which names the file, or ssl.SSLError for files that are none."""
    for path in (certfile, keyfile, cafile):
        if path is not None:
            with open(path, "rb"):  # Python's error for a file that TLS cannot read does not say which
                pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # else a client makes us compute as often as it likes
    context.sslsocket_class = ClientSocket
    context.sni_callback = _note_server_name
    context.load_cert_chain(certfile, keyfile)
    if cafile is not None:
        context.load_verify_locations(cafile)
        context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_OPTIONAL
    return context


def common_name(certificate: dict[str, Any] | None) -> str | None:
    """The user that a client certificate names: the CN of its subject.

    >>> common_name({"subject": ((("organizationName", "o"),), (("commonName", "ann"),))})
    'ann'
    """
    for parts in (certificate or {}).get("subject", ()):
        for key, value in parts:
            if key == "commonName":
                return str(value)
    return None


class ClientSocket(ssl.SSLSocket):
    asked_for: str | None = None  # the name of the server, by SNI


def _note_server_name(sock: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
    assert isinstance(sock, ClientSocket)
    sock.asked_for = name


class Wait(enum.Enum):
    """What a direction is blocked on."""

    TLS_READ = enum.auto()
    TLS_WRITE = enum.auto()
    PLAIN_READ = enum.auto()
    PLAIN_WRITE = enum.auto()
    NOTHING = enum.auto()  # it has ended


_OF_TLS = {Wait.TLS_READ, Wait.TLS_WRITE}
_READS = {Wait.TLS_READ, Wait.PLAIN_READ}


class RelayedClient:
    """One client: its TLS socket, the plain end, and a direction each way."""

    def __init__(self, relay: Relay, sock: socket.socket, number: int, seconds: float) -> None:
        self._relay = relay
        self._loop = asyncio.get_running_loop()
        self._number = number
        sock.setblocking(False)
        self._tls = relay.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        assert isinstance(self._tls, ClientSocket)
        self._plain: socket.socket | None = None  # there is one after the handshake, until its other end was closed
        self._inwards = self._shake  # what is done with what the client sends
        self._in, self._out = Wait.TLS_READ, Wait.NOTHING
        self._in_piece = self._out_piece = memoryview(b"")  # what was taken and could not be passed on
        self._taken = self._taken_before = 0  # pieces that the client took, for whether it reads at all
        self._watched: set[Wait] = set()
        self._timer = self._loop.call_later(seconds, self.close, "no TLS handshake in time")
        self._closed = False

    def start(self) -> None:
        self._happened(Wait.TLS_READ)

    # -- events --------------------------------------------------------------------------------------------------------

    def _happened(self, event: Wait) -> None:
        try:
            if self._in is event:
                self._in = self._inwards()
            if self._out is event and not self._closed:
                self._out = self._outwards()
        except OSError as error:  # also of TLS: what makes no sense, a certificate that nobody signed
            self.close(str(error))
        if not self._closed and self._in is Wait.NOTHING and self._out is Wait.NOTHING:
            self.close()
        if not self._closed:
            self._watch({self._in, self._out} - {Wait.NOTHING})

    def _watch(self, wanted: set[Wait]) -> None:
        for event in self._watched - wanted:
            end = self._tls if event in _OF_TLS else self._plain
            if end is not None:
                (self._loop.remove_reader if event in _READS else self._loop.remove_writer)(end.fileno())
        for event in wanted - self._watched:
            end = self._tls if event in _OF_TLS else self._plain
            assert end is not None
            (self._loop.add_reader if event in _READS else self._loop.add_writer)(end.fileno(), self._happened, event)
        self._watched = wanted

    def close(self, why: str = "the client closed its connection") -> None:
        if self._closed:
            return
        self._watch(set())
        self._closed = True
        self._timer.cancel()
        if self._plain is not None:
            self._plain.close()
        self._tls.close()
        self._relay.ended(self, None if self._inwards != self._shake else self._number, why)

    # -- directions: each returns what it is blocked on ----------------------------------------------------------------

    def _shake(self) -> Wait:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return Wait.TLS_READ
        except ssl.SSLWantWriteError:
            return Wait.TLS_WRITE
        self._timer.cancel()
        self._plain, theirs = socket.socketpair()
        self._plain.setblocking(False)
        cipher = self._tls.cipher()
        self._relay.control.send(
            "plain",
            theirs.detach(),
            id=self._number,
            user=common_name(self._tls.getpeercert()),
            server_name=self._tls.asked_for if isinstance(self._tls, ClientSocket) else None,
            protocol=self._tls.version(),
            cipher=cipher[0] if cipher is not None else None,
        )
        self._inwards = self._carry_in
        self._out = Wait.PLAIN_READ
        return self._carry_in()

    def _carry_in(self) -> Wait:
        assert self._plain is not None
        for _ in range(_TURN_PIECES):
            if not self._in_piece:
                try:
                    data = self._tls.recv(_PIECE_BYTES)
                except ssl.SSLWantReadError:
                    return Wait.TLS_READ
                except ssl.SSLWantWriteError:
                    return Wait.TLS_WRITE
                if not data:
                    self._plain.shutdown(socket.SHUT_WR)  # answers may still come
                    return Wait.NOTHING
                self._in_piece = memoryview(data)
            try:
                self._in_piece = self._in_piece[self._plain.send(self._in_piece) :]
            except BlockingIOError:
                return Wait.PLAIN_WRITE
        return Wait.PLAIN_WRITE  # rule 2: there may be more in OpenSSL's memory, and this comes true at the next turn

    def _outwards(self) -> Wait:
        assert self._plain is not None
        for _ in range(_TURN_PIECES):
            if not self._out_piece:
                try:
                    data = self._plain.recv(_PIECE_BYTES)
                except BlockingIOError:
                    return Wait.PLAIN_READ
                except ConnectionResetError:  # the other end was closed with something unread
                    data = b""
                if not data:
                    return self._say_goodbye()
                self._out_piece = memoryview(data)
            try:
                self._out_piece = self._out_piece[self._tls.send(self._out_piece) :]
            except ssl.SSLWantWriteError:
                return Wait.TLS_WRITE
            except ssl.SSLWantReadError:
                return Wait.TLS_READ
            self._taken += 1
        return Wait.TLS_WRITE if self._out_piece else Wait.PLAIN_READ

    def _say_goodbye(self) -> Wait:
        """The plain side has ended, and all that it said was sent. A socket that is closed with something unread takes back
        what its peer has not read yet, so what the client still sends is read and dropped for a moment."""
        with contextlib.suppress(OSError):
            self._tls.unwrap()  # says so; its answer is not waited for
        self._tls.shutdown(socket.SHUT_WR)
        if self._in is Wait.NOTHING:
            return Wait.NOTHING
        self._watch({event for event in self._watched if event in _OF_TLS})
        assert self._plain is not None
        self._plain.close()
        self._plain = None
        self._inwards, self._in = self._drop_in, Wait.TLS_READ
        self._timer = self._loop.call_later(_LINGER_SECONDS, self.close)
        return Wait.NOTHING

    def _drop_in(self) -> Wait:
        for _ in range(_TURN_PIECES):
            try:
                if not self._tls.recv(_PIECE_BYTES):
                    return Wait.NOTHING
            except BlockingIOError:
                break
        return Wait.TLS_READ

    # -- clients that do not read --------------------------------------------------------------------------------------

    @property
    def shaking(self) -> bool:
        return self._inwards == self._shake

    def look_whether_stuck(self) -> None:
        """While a piece waits for the client nobody notices that the plain end was closed: so look, now and then."""
        taken_before, self._taken_before = self._taken_before, self._taken
        if self._out_piece and self._taken == taken_before and self._plain is not None and _hung_up(self._plain):
            self.close()


def _hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


class Relay:
    """All clients of one process."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, connection_max: int = 0) -> None:
        self.context = context
        self._limit = ClientLimit(connection_max)
        self.clients: set[RelayedClient] = set()
        self._done = asyncio.Event()
        self._node_is_gone = False
        self._loop = asyncio.get_running_loop()
        self.control = ControlSocket(sock, self._received, self._ended)

    async def run(self) -> None:
        self.control.send("up", pid=os.getpid())
        looking = asyncio.ensure_future(self._look_after_the_stuck())
        await self._done.wait()
        looking.cancel()
        for client in list(self.clients):
            client.close()

    async def _look_after_the_stuck(self) -> None:
        while True:
            await asyncio.sleep(_STUCK_SECONDS)
            for client in list(self.clients):
                client.look_whether_stuck()

    def _received(self, message: Message, descriptor: int | None) -> None:
        assert message["what"] == "client"
        if descriptor is None:
            why = "no open file is left for it in its TLS relay; raise ulimit -Hn, or tls.relays"
            self.control.send("refused", id=message["id"], why=why)
            return
        sock = socket.socket(fileno=descriptor)
        refusal = self._limit.refusal(len(self.clients), descriptor)
        if refusal is not None:
            sock.close()
            self.control.send("refused", id=message["id"], why=f"TLS relay: {refusal}")
            return
        try:
            client = RelayedClient(self, sock, message["id"], message["seconds"])
        except OSError as error:
            sock.close()
            self.control.send("refused", id=message["id"], why=str(error))
            return
        self.clients.add(client)
        client.start()

    def ended(self, client: RelayedClient, unanswered: int | None, why: str) -> None:
        self.clients.discard(client)
        if unanswered is not None:
            self.control.send("refused", id=unanswered, why=why)
        if self._node_is_gone and not self.clients:
            self._done.set()

    def _ended(self) -> None:
        self._node_is_gone = True
        for client in list(self.clients):
            if client.shaking:
                client.close()
        if not self.clients:
            self._done.set()
        self._loop.call_later(_LAST_SECONDS, self._done.set)


async def _run(sock: socket.socket, files: dict[str, Any], connection_max: int) -> int:
    try:
        context = context_for(**files)
    except OSError as error:  # of TLS too
        control = ControlSocket(sock, lambda *_: None, lambda: None)
        control.send("failed", why=f"TLS: {error}")
        return 1
    await Relay(sock, context, connection_max).run()
    return 0


def main(arguments: list[str]) -> int:
    """Arguments: the descriptor of the control socket, the files as JSON, and connection_max."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # it goes with the node
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    import uvloop

    number, files, connection_max = arguments
    return uvloop.run(_run(socket.socket(fileno=int(number)), json.loads(files), int(connection_max)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
