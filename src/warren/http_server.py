"""How the node and its data server listen for HTTP: clients that send nothing, or send slowly, must not keep others out.

uvicorn waits for a request as long as it takes, and for any number of them. Here:

1. A request's head is complete within `head_seconds` of the connection, or of the answer before it. Bytes that drip do not
   prolong that.
2. Its body goes on within `body_seconds`, whenever we are those who wait: while a stage waits for our disk, nobody is slow.
3. There are at most `most` connections. Whoever comes then takes the place of the one that has kept us waiting for longest;
   where all are at work, he is turned away, and clients of ours try again.
4. An answer takes as long as its reader wants: large ones go to tasks that work on every batch.
5. A TLS handshake has `head_seconds`, too, and at most `most` are under way: the oldest makes room for a newcomer.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


class HttpConnection(H11Protocol):
    """One client. Subclasses have other limits."""

    most = 1024
    head_seconds = 10.0
    body_seconds = 60.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._heard = self.loop.time()  # when it last did what we waited for
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()
        if len(self.connections) > self.most:
            others = [each for each in self.connections if isinstance(each, HttpConnection) and each is not self]
            waited_for = [other for other in others if other._is_waited_for and not other.transport.is_closing()]
            min(waited_for, key=_heard, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if not (was_in_head and self._is_in_head):  # rule 1: a head that drips is not heard
            self._expect()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    @property
    def _is_in_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_waited_for(self) -> bool:
        if self._is_in_head:
            return not self.transport.get_write_buffer_size()  # rule 4: the answer is complete, but not yet sent
        return self.cycle.more_body and not self.flow.read_paused

    def _expect(self) -> None:
        """It did something: from now on it has its time again, if there is anything left to send."""
        self._forget()
        self._heard = self.loop.time()
        if not self.transport.is_closing() and (self._is_in_head or self.cycle.more_body):
            seconds = self.head_seconds if self._is_in_head else self.body_seconds
            self._deadline = self.loop.call_later(seconds, self._is_late)

    def _is_late(self) -> None:
        self._deadline = None
        if self._is_waited_for:
            self.transport.abort()
        else:
            self._expect()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _heard(connection: HttpConnection) -> float:
    return connection._heard


class HttpServer(uvicorn.Server):
    """Inside of a running loop. Of https it accepts clients itself (rule 5): the event loop would give a handshake a minute,
    and uvicorn does not hear of a client before the end of it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._accepting: list[asyncio.Task[None]] = []
        self._shaking: dict[asyncio.Task[None], None] = {}  # the oldest first

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = self.config.ssl
        await super().startup(sockets if context is None else [])
        for listener in sockets or () if context is not None else ():
            assert context is not None
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._accepting.append(asyncio.ensure_future(self._accept(listener, context)))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (*self._accepting, *self._shaking):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._shaking, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # too many open files, a client that was gone: the listener lives on
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            if len(self._shaking) >= self._connection.most:
                oldest = next(iter(self._shaking))
                del self._shaking[oldest]
                oldest.cancel()
            task = asyncio.ensure_future(self._shake(sock, context))
            self._shaking[task] = None
            task.add_done_callback(self._shaken)
            await asyncio.sleep(0)  # a client that waits already is accepted without a turn of the loop

    def _shaken(self, task: asyncio.Task[None]) -> None:
        self._shaking.pop(task, None)

    async def _shake(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        made = partial(
            self._connection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                made, sock, ssl=context, ssl_handshake_timeout=self._connection.head_seconds
            )
        except OSError:  # of TLS too: what makes no sense, a client that is gone or late
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise

    @property
    def _connection(self) -> type[HttpConnection]:
        connection = self.config.http_protocol_class
        assert issubclass(connection, HttpConnection)
        return connection


def http_config(
    application: Any,
    certificate: tuple[str, str] | None,
    connection: type[HttpConnection] = HttpConnection,
    **more: Any,
) -> uvicorn.Config:
    """For a server inside of a program: it logs nothing of its own, and says nothing about itself. `certificate`: and its
    key, for https."""
    certificate_file, key_file = certificate or (None, None)
    return uvicorn.Config(
        application,
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=certificate_file,
        ssl_keyfile=key_file,
        # Of requests, which may outlive their connections; uvicorn answers 503 to those above it.
        limit_concurrency=connection.most + 1,
        **more,
    )
