"""AMQP over TLS: the encryption ends here, and what is behind it is a plain socket like any other.

The plain end is a socket pair, so it can be handed to a vhost's process. Bytes are carried both ways in pieces; a side that
does not read stops the other one after a few of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from warren.node.config import Tls

log = logging.getLogger("warren.node")

_PIECE_BYTES = 65536


def context_for(tls: Tls) -> ssl.SSLContext:
    """What the configuration asks for. Raises OSError or ssl.SSLError for files that are none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert tls.certfile is not None
    context.load_cert_chain(tls.certfile, tls.keyfile)
    if tls.cafile is not None:
        context.load_verify_locations(tls.cafile)
        context.verify_mode = ssl.CERT_REQUIRED if tls.verify else ssl.CERT_OPTIONAL
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


class TlsListener:
    """`serve` gets the plain end of each client, its address and the user that its certificate names."""

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext,
        serve: Callable[[socket.socket, str, int, str | None], Awaitable[None]],
        handshake_timeout: float,
    ) -> None:
        self._host = host
        self._context = context
        self._serve = serve
        self._handshake_timeout = handshake_timeout
        self._server: asyncio.Server | None = None
        self.port = port

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._accepted,
            self._host,
            self.port,
            ssl=self._context,
            ssl_handshake_timeout=self._handshake_timeout,
            limit=_PIECE_BYTES,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain, inner = socket.socketpair()
        for end in (plain, inner):
            end.setblocking(False)
        address = writer.get_extra_info("peername") or ("", 0)
        user = common_name(writer.get_extra_info("peercert"))
        pumps = [
            asyncio.ensure_future(_inwards(reader, inner)),
            asyncio.ensure_future(_outwards(inner, writer)),
        ]
        try:
            await self._serve(plain, str(address[0]), int(address[1]), user)
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            inner.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                writer.close()


async def _inwards(reader: asyncio.StreamReader, inner: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(_PIECE_BYTES):
            await loop.sock_sendall(inner, data)
        inner.shutdown(socket.SHUT_WR)
        await asyncio.sleep(30)  # what is on its way out may end first


async def _outwards(inner: socket.socket, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await loop.sock_recv(inner, _PIECE_BYTES):
            writer.write(data)
            await writer.drain()
