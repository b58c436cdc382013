"""How a connection begins, and how it fails to: a list of openings, each said to both brokers.

They are written by hand, because almost every mistake in a handshake ends it. What is compared is what came back, in order:
names of methods, reply codes with the ids of the method they are about, and whether the broker ended the connection.
"""

from __future__ import annotations

import contextlib
from typing import Any

from differential.wire import CLIENT, METHOD, PROTOCOL, Event, Lost, Wire, frame

Say = tuple[Any, ...]  # bytes as they are; or channel, method, arguments

_GUEST = {"mechanism": "PLAIN", "response": "\0guest\0guest", "locale": "en_US"}
_MUTE = {"product": "a client without capabilities"}
_SECONDS = 4.0  # RabbitMQ lets those who failed to log in wait

_START_OK: Say = (0, "connection.start-ok", {"client_properties": CLIENT, **_GUEST})
_TUNE_OK: Say = (0, "connection.tune-ok", {"channel_max": 100, "frame_max": 131072})
_OPEN: Say = (0, "connection.open", {"virtual_host": "/"})


def _start_ok(**arguments: Any) -> Say:
    return (0, "connection.start-ok", {"client_properties": CLIENT, **_GUEST, **arguments})


def _tune_ok(**arguments: Any) -> Say:
    return (0, "connection.tune-ok", {"channel_max": 100, "frame_max": 131072, **arguments})


HANDSHAKES: dict[str, list[Say]] = {
    "as it should be": [(PROTOCOL,), _START_OK, _TUNE_OK, _OPEN, (1, "channel.open", {})],
    "AMQP 1.0": [(b"AMQP\0\1\0\0",)],
    "AMQP 0-8": [(b"AMQP\1\1\x08\0",)],
    "HTTP": [(b"GET / HTTP/1.1\r\n\r\n",)],
    "no header": [(frame(METHOD, 0, b"\0\x0a\0\x0b"),)],
    "wrong password": [(PROTOCOL,), _start_ok(response="\0guest\0wrong")],
    "wrong password, and no capabilities": [(PROTOCOL,), _start_ok(response="\0guest\0wrong", client_properties=_MUTE)],
    "unknown user": [(PROTOCOL,), _start_ok(response="\0nobody\0guest")],
    "malformed response": [(PROTOCOL,), _start_ok(response="guest")],
    "unknown mechanism": [(PROTOCOL,), _start_ok(mechanism="NONSENSE")],
    "AMQPLAIN with nonsense": [(PROTOCOL,), _start_ok(mechanism="AMQPLAIN", response="nonsense")],
    "another locale": [(PROTOCOL,), _start_ok(locale="de_DE"), _TUNE_OK, _OPEN],
    "tune-ok before start-ok": [(PROTOCOL,), _TUNE_OK],
    "open before tune-ok": [(PROTOCOL,), _START_OK, _OPEN],
    "a channel before open": [(PROTOCOL,), _START_OK, _TUNE_OK, (1, "channel.open", {})],
    "a frame size below the least": [(PROTOCOL,), _START_OK, _tune_ok(frame_max=100), _OPEN],
    "a frame size above the broker's": [(PROTOCOL,), _START_OK, _tune_ok(frame_max=1 << 20), _OPEN],
    "a frame size of 0": [(PROTOCOL,), _START_OK, _tune_ok(frame_max=0), _OPEN],
    "channel_max above the broker's": [(PROTOCOL,), _START_OK, _tune_ok(channel_max=65535), _OPEN],
    "channel_max of 0": [(PROTOCOL,), _START_OK, _tune_ok(channel_max=0), _OPEN],
    "a channel above channel_max": [(PROTOCOL,), _START_OK, _tune_ok(channel_max=5), _OPEN, (6, "channel.open", {})],
    "an unknown vhost": [(PROTOCOL,), _START_OK, _TUNE_OK, (0, "connection.open", {"virtual_host": "nowhere"})],
    "close in the middle": [(PROTOCOL,), _START_OK, (0, "connection.close", {"reply_code": 200})],
    "close after open": [(PROTOCOL,), _START_OK, _TUNE_OK, _OPEN, (0, "connection.close", {"reply_code": 200})],
    "an unknown method": [(PROTOCOL,), (frame(METHOD, 0, b"\x03\xe7\0\1"),)],
    "a frame without its end": [(PROTOCOL,), _START_OK, _TUNE_OK, _OPEN, (b"\1\0\1\0\0\0\5\0\x14\0\x0a\0\0",)],
    "a frame larger than agreed": [(PROTOCOL,), _START_OK, _tune_ok(frame_max=4096), _OPEN, (b"\1\0\0\0\1\0\0",)],
    "start-ok on a channel": [(PROTOCOL,), (1, "connection.start-ok", {"client_properties": CLIENT, **_GUEST})],
}


ACCEPTED_HANDSHAKES = {
    "AMQP 0-8": "Warren speaks 0-9-1 alone, and says so",
    "a frame size of 0": "no limit of the client's own: the broker's holds. RabbitMQ ends the connection",
    "channel_max of 0": "as with the frame size",
    "channel_max above the broker's": "the broker's holds. RabbitMQ ends the connection",
    "a channel above channel_max": "RabbitMQ counts channels and does not look at their numbers, AMQP wants the numbers",
}


def said(port: int, opening: list[Say]) -> list[Any]:
    """What a broker answered."""
    with Wire(port, handshake=False) as wire:
        for number, say in enumerate(opening, 1):
            before = len(wire.events)
            if len(say) == 1:
                wire.write(say[0])
            else:
                wire.send(say[0], say[1], **say[2])
            expects = len(say) == 1 or say[1] != "connection.tune-ok" or number == len(opening)
            with contextlib.suppress(Lost):
                wire.wait(lambda event: True, _SECONDS if expects else 0.2, before)
            if wire.closed:
                break
        ended = wire.closed
        return [*map(_shown, wire.events), "ended" if ended else "goes on"]


def _shown(event: Event) -> Any:
    if event.name in ("connection.close", "channel.close"):
        arguments = event.arguments
        return event.name, arguments["reply_code"], arguments["class_id"], arguments["method_id"]
    if event.name == "protocol header":
        return event.name, event.arguments["header"]
    return event.name


def compare_handshakes(warren: int, rabbit: int) -> dict[str, tuple[list[Any], list[Any]]]:
    """Those that the two answer differently, by name."""
    differences = {}
    for name, opening in HANDSHAKES.items():
        ours, theirs = said(warren, opening), said(rabbit, opening)
        if not _same(ours, theirs) and name not in ACCEPTED_HANDSHAKES:
            differences[name] = ours, theirs
    return differences


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    """RabbitMQ ends most handshakes that fail without a word; that Warren says why is no difference."""
    if theirs[-2:] == ["lost", "ended"] and ours[-1] == "ended":
        return ours[: len(theirs) - 2] == theirs[:-2]
    return ours == theirs
