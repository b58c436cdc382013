"""What a message says of time: how long it waits before a delayed exchange, and how long it lives in a queue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

MAX_DELAY_MS = 2**32 - 1  # of the plugin for delayed exchanges
_DIGITS = re.compile(r"\+?[0-9]{1,20}")


def delay_ms(headers: Mapping[str, object]) -> int:
    """How long a message with these headers waits before a delayed exchange; 0: not at all. It waits once: when its time has
    come the header is turned around. Numbers lose what is behind the point, and digits are a number: as in the plugin.

    >>> delay_ms({"x-delay": 500}), delay_ms({"x-delay": -500}), delay_ms({"x-delay": "500"}), delay_ms({"x-delay": "soon"})
    (500, 0, 500, 0)
    """
    delay = headers.get("x-delay")
    if isinstance(delay, str):
        delay = int(delay) if _DIGITS.fullmatch(delay) else 0
    if isinstance(delay, bool) or not isinstance(delay, (int, float, Decimal)) or not delay >= 1:
        return 0
    return int(min(delay, 2 * MAX_DELAY_MS))


def expiration_us(properties: Mapping[str, object]) -> int:
    """A message's own time to live in microseconds; below 0: it has none. Whoever took it in has looked at the text."""
    digits = properties.get("expiration")
    digits = digits.removeprefix("+") if isinstance(digits, str) else ""
    return int(digits) * 1000 if digits.isascii() and digits.isdigit() else -1
