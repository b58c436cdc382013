"""A blocking AMQP client that sends any method with any arguments, and keeps everything that comes back.

Rules:

1. It has no opinion: what a well-behaved client would never send is sent, and nothing is retried.
2. It answers only what has to be answered so that a broker goes on: a close is answered by close-ok.
3. Every frame that arrives becomes an `Event`, in order. Whoever waits reads the socket; there is no thread.

    >>> with Wire(port) as wire:                                        # doctest: +SKIP
    ...     wire.open_channel(1)
    ...     wire.send(1, "queue.declare", queue="orders")
    ...     wire.wait(lambda event: event.name == "queue.declare-ok").arguments["message_count"]
    0
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from warren.amqp.methods import METHODS, decode, encode
from warren.queueing.properties import build_head, decode_head

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
_FRAME = struct.Struct(">BHI")
_IDS = struct.Struct(">HH")
_SIZE = struct.Struct(">Q")
_END = b"\xce"
PROTOCOL = b"AMQP\0\0\x09\x01"
_CONTENT = {"basic.deliver", "basic.get-ok", "basic.return"}
CLIENT = {
    "product": "differential",
    "capabilities": {
        "publisher_confirms": True,
        "exchange_exchange_bindings": True,
        "basic.nack": True,
        "consumer_cancel_notify": True,
        "connection.blocked": True,
        "authentication_failure_close": True,
    },
}


class Lost(Exception):
    """The broker ended the connection, or did not answer in time."""


@dataclass(eq=False)  # two that say the same are still two
class Event:
    """One method that arrived, with its content."""

    channel: int
    name: str
    arguments: dict[str, Any]
    properties: dict[str, Any] | None = None
    body: bytes | None = None
    size: int = field(default=-1, repr=False)  # of the body, once its header is here

    @property
    def complete(self) -> bool:
        return self.name not in _CONTENT or (self.body is not None and len(self.body) == self.size)


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """
    >>> frame(8, 0, b"").hex()
    '08000000000000ce'
    """
    return _FRAME.pack(kind, channel, len(payload)) + payload + _END


def content_header(size: int, properties: dict[str, Any], class_id: int = 60) -> bytes:
    """The payload of a content header frame."""
    return _IDS.pack(class_id, 0) + _SIZE.pack(size) + build_head("", "", properties)[2:]


class Wire:
    """One connection."""

    def __init__(self, port: int, *, handshake: bool = True) -> None:
        """Connected and open at "/" as guest; without `handshake` nothing was said yet."""
        self.events: list[Event] = []
        self.closed = False
        self.open_channels: set[int] = set()
        self.sent: list[str] = []  # names of methods, for the table of what was covered
        self._in = bytearray()
        self._socket = socket.create_connection(("127.0.0.1", port), 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frame_max = 0
        if handshake:
            self._shake_hands()

    def _shake_hands(self) -> None:
        self.write(PROTOCOL)
        self.wait(lambda event: event.name == "connection.start")
        self.send(
            0,
            "connection.start-ok",
            client_properties=CLIENT,
            mechanism="PLAIN",
            response="\0guest\0guest",
            locale="en_US",
        )
        tune = self.wait(lambda event: event.name == "connection.tune").arguments
        self.frame_max = tune["frame_max"]
        self.send(0, "connection.tune-ok", channel_max=tune["channel_max"], frame_max=self.frame_max, heartbeat=0)
        self.send(0, "connection.open", virtual_host="/")
        self.wait(lambda event: event.name == "connection.open-ok")
        self.events.clear()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()

    # -- out ---------------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            self._lost()

    def send(self, channel: int, name: str, **arguments: Any) -> None:
        """Any method, with what is left out as 0, empty or false."""
        self.sent.append(name)
        self.write(frame(METHOD, channel, encode(name, **arguments)))

    def publish(
        self, channel: int, body: bytes, properties: dict[str, Any] | None = None, times: int = 1, **arguments: Any
    ) -> None:
        """basic.publish with its content, in one write."""
        self.sent.append("basic.publish")
        data = frame(METHOD, channel, encode("basic.publish", **arguments))
        data += frame(HEADER, channel, content_header(len(body), properties or {}))
        room = (self.frame_max or 131072) - 8
        for at in range(0, len(body), room):
            data += frame(BODY, channel, body[at : at + room])
        self.write(data * times)

    def open_channel(self, channel: int) -> None:
        self.send(channel, "channel.open")
        self.wait(lambda event: event.name == "channel.open-ok" and event.channel == channel)

    def drop(self) -> None:
        """End it without a word."""
        self.closed = True
        self.open_channels.clear()
        self._socket.close()

    # -- in ----------------------------------------------------------------------------------------------------------

    def wait(self, wanted: Callable[[Event], bool], seconds: float = 10.0, start: int | None = None) -> Event:
        """The first complete event from position `start` on (now, unless told) for which `wanted` is true."""
        at = len(self.events) if start is None else start
        until = time.monotonic() + seconds
        while True:
            while at < len(self.events) and self.events[at].complete:
                if wanted(self.events[at]):
                    return self.events[at]
                at += 1
            if self.closed:
                raise Lost(f"the connection ended; before that came {[event.name for event in self.events[-5:]]}")
            if not self.read(until - time.monotonic()) and time.monotonic() >= until:
                raise Lost(f"no answer in {seconds} s; {[event.name for event in self.events[-5:]]}")

    def read(self, seconds: float = 0.0) -> bool:
        """Take what arrives within that time; whether anything did."""
        if self.closed:
            return False
        self._socket.settimeout(max(seconds, 0.0001))
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return False
        except OSError:
            data = b""
        if not data:
            self._lost()
            return True
        self._in += data
        if self._in.startswith(PROTOCOL[:4]):  # no frame: what a broker says to a protocol that it does not speak
            self.events.append(Event(0, "protocol header", {"header": bytes(self._in)}))
            self._in.clear()
        while len(self._in) >= _FRAME.size and not self.closed:
            kind, channel, size = _FRAME.unpack_from(self._in)
            if len(self._in) < _FRAME.size + size + 1:
                break
            payload = bytes(self._in[_FRAME.size : _FRAME.size + size])
            del self._in[: _FRAME.size + size + 1]
            self._frame(kind, channel, payload)
        return True

    def _frame(self, kind: int, channel: int, payload: bytes) -> None:
        if kind == METHOD:
            method = METHODS[_IDS.unpack_from(payload)]
            self._event(Event(channel, method.name, decode(method, payload[_IDS.size :])))
        elif kind == HEADER:
            event = self._unfinished(channel)
            (event.size,) = _SIZE.unpack_from(payload, 4)
            event.properties = dict(decode_head(b"\0\0" + payload[12:]).properties)
            event.body = b""
        elif kind == BODY:
            event = self._unfinished(channel)
            assert event.body is not None
            event.body += payload

    def _unfinished(self, channel: int) -> Event:
        return next(event for event in reversed(self.events) if event.channel == channel and not event.complete)

    def _event(self, event: Event) -> None:
        self.events.append(event)
        if event.name == "channel.open-ok":
            self.open_channels.add(event.channel)
        elif event.name == "channel.close-ok":
            self.open_channels.discard(event.channel)
        elif event.name == "channel.close":
            self.open_channels.discard(event.channel)
            self.send(event.channel, "channel.close-ok")
        elif event.name == "connection.close":
            self.send(0, "connection.close-ok")
            self.drop()
        elif event.name == "connection.close-ok":
            self.drop()

    def _lost(self) -> None:
        if not self.closed:
            self.closed = True
            self.open_channels.clear()
            self.events.append(Event(0, "lost", {}))
            with contextlib.suppress(OSError):
                self._socket.close()
