"""What a broker that is low on memory says to who publishes: connection.blocked, and connection.unblocked afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from differential.wire import Event, Lost, Wire

_SECONDS = 20.0


def said(port: int, set_alarm: Callable[[bool], None]) -> list[Any]:
    """To a connection that publishes while the alarm is set."""
    with Wire(port) as wire:
        wire.open_channel(1)
        wire.events.clear()
        set_alarm(True)
        try:
            wire.publish(1, b"m", routing_key="nowhere")
            _wait(wire, "connection.blocked")
        finally:
            set_alarm(False)
        _wait(wire, "connection.unblocked")
        return [(event.name, event.arguments) for event in wire.events]


def _wait(wire: Wire, name: str) -> None:
    def is_it(event: Event) -> bool:
        return event.name == name

    with contextlib.suppress(Lost):
        wire.wait(is_it, _SECONDS, 0)
