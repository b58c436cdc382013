"""Properties that say where a message goes, or how long it stays: read as RabbitMQ reads them, refused as it refuses them."""

from __future__ import annotations

from typing import Any

from warren.amqp.errors import AmqpError
from warren.queueing.properties import MAX_EXPIRATION_MS, MAX_SHORT_STRING_BYTES, carbon_keys


def expiration_ms(value: object) -> int:
    """In milliseconds. RabbitMQ takes a plus sign too.

    >>> expiration_ms("+60000")
    60000
    """
    digits = value.removeprefix("+") if isinstance(value, str) else ""
    if not digits.isascii() or not digits.isdigit() or int(digits) > MAX_EXPIRATION_MS:
        raise AmqpError(406, f"invalid expiration '{value}': it is a number of milliseconds, as text", 60, 40)
    return int(digits)


def carbon(headers: dict[str, Any], name: str) -> list[str]:
    """The routing keys of CC or BCC.

    >>> carbon({"CC": ["audit", "billing"]}, "CC")
    ['audit', 'billing']
    """
    if name not in headers:
        return []
    value = headers[name]
    if not isinstance(value, list):
        raise AmqpError(406, f"unexpected type of header {name}: it is an array of strings", 60, 40)
    keys = carbon_keys(value)
    for key in keys if name == "BCC" else ():
        size = len(key.encode("utf-8", "surrogateescape"))
        if size > MAX_SHORT_STRING_BYTES:  # a head cannot keep it, out of the headers
            raise AmqpError(
                406, f"invalid key of {size} bytes in header BCC: it has at most {MAX_SHORT_STRING_BYTES}", 60, 40
            )
    return keys
