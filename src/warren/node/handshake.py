"""From the first byte of a client to its connection.open, on the bare socket.

Frames are read exactly: seven bytes of header, then the payload, never more. So nothing that a client sent behind
connection.open is in this process's memory, and the socket can be handed to another process as it is.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import warren
from warren.amqp.errors import AmqpError
from warren.amqp.methods import BY_NAME, METHODS, decode, encode
from warren.kernel.frame_writer import method_frame
from warren.queueing.properties import read_table

log = logging.getLogger("warren.node")

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
MECHANISMS = "PLAIN AMQPLAIN"
FRAME_MIN = 4096  # AMQP's own; a client that asks for less gets told
_HANDSHAKE_FRAME_MAX = 131072
_FRAME_HEADER = struct.Struct(">BHI")
_FRAME_END = 0xCE
CAPABILITIES = {
    "publisher_confirms": True,
    "exchange_exchange_bindings": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "consumer_priorities": True,
    "authentication_failure_close": True,
    "per_consumer_qos": True,
    "direct_reply_to": True,
}


class Gone(Exception):
    """The client went away, or sent what is no AMQP."""


class LoginRefused(Gone):
    """It is not who it says. The log has it already, with more than the client is told."""


@dataclass(slots=True)
class Opened:
    """A client that may use its vhost."""

    user: str
    vhost: str
    channel_max: int
    frame_max: int
    heartbeat: int
    client_properties: dict[str, Any] = field(default_factory=dict)
    peer: str = ""
    tls: dict[str, Any] | None = None  # what its TLS handshake said; None: it came in the clear


class Gate(Protocol):
    """What a handshake asks the node."""

    async def authenticate(self, user: str, password: str, address: str) -> bool: ...
    def knows(self, user: str) -> bool: ...
    def may_connect_from(self, user: str, address: str) -> bool: ...
    def refusal(self, user: str, vhost: str) -> str | None:
        """Why this user may not use this vhost now; None: it may."""


class Handshake:
    """One client's. `run` returns what was opened, or raises Gone when there is nothing left to do but to close."""

    def __init__(
        self,
        sock: socket.socket,
        gate: Gate,
        *,
        peer: str = "",
        address: str = "",
        certificate_user: str | None = None,
        channel_max: int = 2047,
        frame_max: int = 131072,
        heartbeat: int = 60,
        cluster_name: str = "",
        working: Callable[[bool], None] = lambda is_working: None,
    ) -> None:
        """`working` is told whether the client waits for us, and not we for the client."""
        self._sock = sock
        self._gate = gate
        self._peer = peer
        self._address = address
        self._certificate_user = certificate_user
        self._channel_max = channel_max
        self._frame_max = frame_max
        self._heartbeat = heartbeat
        self._cluster_name = cluster_name
        self._working = working
        self._loop = asyncio.get_running_loop()
        self._close_on_failure = False

    async def run(self) -> Opened:
        try:
            return await self._run()
        except AmqpError as error:
            await self._refuse(error)
            raise (LoginRefused if error.code == 403 else Gone)(error.text) from None
        except (ConnectionError, OSError) as error:
            raise Gone(str(error)) from None

    async def _run(self) -> Opened:
        header = await self._read(8)
        if header != PROTOCOL_HEADER:
            await self._loop.sock_sendall(self._sock, PROTOCOL_HEADER)
            raise Gone(f"a protocol header {header!r}, not AMQP 0-9-1")
        await self._send(
            "connection.start",
            version_minor=9,
            server_properties=self._server_properties(),
            mechanisms=MECHANISMS if self._certificate_user is None else f"{MECHANISMS} EXTERNAL",
            locales="en_US",
        )
        start = await self._expect("connection.start-ok")
        properties = start["client_properties"]
        capabilities = properties.get("capabilities")
        self._close_on_failure = isinstance(capabilities, dict) and bool(
            capabilities.get("authentication_failure_close")
        )
        user = await self._authenticate(start["mechanism"], start["response"])
        await self._send(
            "connection.tune",
            channel_max=self._channel_max,
            frame_max=self._frame_max,
            heartbeat=self._heartbeat,
        )
        tuned = await self._expect("connection.tune-ok")
        frame_max = _lower(self._frame_max, tuned["frame_max"])
        if frame_max and frame_max < FRAME_MIN:
            raise AmqpError(
                530, f"negotiated frame_max = {frame_max} is lower than the minimum allowed value ({FRAME_MIN})", 10, 31
            )
        if self._frame_max and tuned["frame_max"] > self._frame_max:
            raise AmqpError(
                530,
                f"negotiated frame_max = {tuned['frame_max']} is higher than the maximum allowed value "
                f"({self._frame_max})",
                10,
                31,
            )
        opened = await self._expect("connection.open")
        vhost = opened["virtual_host"]
        why = self._gate.refusal(user, vhost)
        if why is not None:
            raise AmqpError(530, why, 10, 40)
        return Opened(
            user,
            vhost,
            _lower(self._channel_max, tuned["channel_max"]),
            frame_max,
            tuned["heartbeat"],
            properties,
            self._peer,
        )

    def _server_properties(self) -> dict[str, Any]:
        return {
            "capabilities": CAPABILITIES,
            "product": "Warren",
            "version": warren.__version__,
            "platform": "Python",
            "information": "RabbitMQ-compatible broker whose queues are Spark tables",
            "copyright": "The Warren authors",
            "cluster_name": self._cluster_name,
        }

    async def _authenticate(self, mechanism: str, response: bytes) -> str:
        if mechanism == "EXTERNAL":
            if self._certificate_user is None:
                log.warning("login of %s by EXTERNAL is refused: there is no certificate of a known user", self._peer)
                raise self._refused(mechanism)
            self._check_address(self._certificate_user, mechanism)
            return self._certificate_user
        if mechanism == "PLAIN":
            name, password = _plain(response)
        elif mechanism == "AMQPLAIN":
            name, password = _amqplain(response)
        else:
            raise AmqpError(504, f"unknown authentication mechanism '{mechanism}'; there are {MECHANISMS}", 10, 11)
        self._check_address(name, mechanism)
        self._working(True)
        try:
            is_known = await self._gate.authenticate(name, password, self._address)
        finally:
            self._working(False)
        if not is_known:
            why = "the password is wrong" if self._gate.knows(name) else "there is no such user"
            log.warning("login of user %.200r from %s is refused: %s", name, self._peer, why)
            raise self._refused(mechanism)
        return name

    def _check_address(self, name: str, mechanism: str) -> None:
        """However a user says who he is: where he comes from counts."""
        if not self._gate.may_connect_from(name, self._address):
            log.warning("user %.200r can only connect via localhost, not from %s", name, self._address)
            raise self._refused(mechanism)

    @staticmethod
    def _refused(mechanism: str) -> AmqpError:
        return AmqpError(
            403,
            f"Login was refused using authentication mechanism {mechanism}. For details see the broker logfile.",
        )

    async def _refuse(self, error: AmqpError) -> None:
        """Say why, where the client can take it, and give it a moment to hear."""
        if error.code == 403 and not self._close_on_failure:
            await asyncio.sleep(1)  # who has to guess why gets to guess slowly
            return
        try:
            await self._send(
                "connection.close",
                reply_code=error.code,
                reply_text=error.reply_text,
                class_id=error.class_id,
                method_id=error.method_id,
            )
            async with asyncio.timeout(2):
                await self._expect("connection.close-ok")
        except (AmqpError, Gone, OSError, TimeoutError):
            pass

    # -- frames ------------------------------------------------------------------------------------------------------

    async def _read(self, count: int) -> bytes:
        parts = []
        while count:
            data = await self._loop.sock_recv(self._sock, count)
            if not data:
                raise Gone("the client closed its connection")
            parts.append(data)
            count -= len(data)
        return b"".join(parts)

    async def _send(self, name: str, **arguments: Any) -> None:
        await self._loop.sock_sendall(self._sock, method_frame(0, encode(name, **arguments)))

    async def _expect(self, name: str) -> dict[str, Any]:
        """The arguments of the next method, which must be this one."""
        while True:
            kind, channel, size = _FRAME_HEADER.unpack(await self._read(7))
            if size > _HANDSHAKE_FRAME_MAX:
                raise AmqpError(501, f"a frame of {size} bytes before the connection is open")
            payload = await self._read(size + 1)
            if payload[-1] != _FRAME_END:
                raise AmqpError(501, "a frame that does not end with its end octet")
            if kind != 8:
                break
        if kind != 1 or channel or size < 4:
            raise AmqpError(505, f"expected {name}, got a frame of type {kind} on channel {channel}")
        class_id, method_id = struct.unpack_from(">HH", payload)
        wanted = BY_NAME[name]
        if (class_id, method_id) != (wanted.class_id, wanted.method_id):
            got = METHODS.get((class_id, method_id))
            if got is not None and got.name == "connection.close":
                await self._send("connection.close-ok")
                raise Gone("the client closed its connection")
            shown = got.name if got is not None else f"{class_id},{method_id}"
            raise AmqpError(503, f"expected {name}, got {shown}", class_id, method_id)
        try:
            return decode(wanted, payload[4:-1])
        except ValueError as error:
            raise AmqpError(502, str(error), class_id, method_id) from None


def _lower(ours: int, theirs: int) -> int:
    """Of two limits of which 0 is none."""
    return min(ours, theirs) if ours and theirs else ours or theirs


def _plain(response: bytes) -> tuple[str, str]:
    parts = response.split(b"\0")
    if len(parts) != 3:
        raise AmqpError(501, "a PLAIN response is: NUL, user, NUL, password", 10, 11)
    return parts[1].decode("utf-8", "replace"), parts[2].decode("utf-8", "replace")


def _amqplain(response: bytes) -> tuple[str, str]:
    try:
        table, _ = read_table(len(response).to_bytes(4, "big") + response, 0)
    except (ValueError, IndexError, struct.error):
        table = {}
    name, password = table.get("LOGIN"), table.get("PASSWORD")
    if not isinstance(name, str) or not isinstance(password, str):
        raise AmqpError(501, "an AMQPLAIN response is a table of LOGIN and PASSWORD", 10, 11)
    return name, password
