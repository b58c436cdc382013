"""Which bindings of a headers exchange match the headers of a message.

The arguments of a binding are the pattern; `x-match` in them says how it is meant:

    all (or none given)    every header of the pattern is there and equal       an empty pattern matches everything
    any                    at least one is                                      an empty pattern matches nothing
    all-with-x, any-with-x the same, with headers that begin with `x-`, which are else left out of the pattern

Rules:

1. A pattern's value of void (None) asks only that the header is there.
2. Equal is what RabbitMQ finds equal, which compares values and not the widths they were sent in: 1 and 1.0 are equal,
   a string and bytes of the same content too, a time and its seconds too; True is not 1, and decimals are equal digit by
   digit (1.0 is not 1.00).
3. `x-match` itself is never part of the pattern.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from decimal import Decimal

from warren.routing.binding import Binding
from warren.routing.errors import PRECONDITION_FAILED, RoutingError
from warren.routing.exchange import amqp_type

_MATCH = "x-match"
_KINDS = ("all", "any", "all-with-x", "any-with-x")


class HeadersMatch:
    """The bindings of a headers exchange.

    >>> bindings = HeadersMatch()
    >>> bindings.add(Binding("files", "queue", "pdf", "", {"format": "pdf", "x-match": "all"}))
    >>> [binding.destination for binding in bindings.match({"format": "pdf", "pages": 3})]
    ['pdf']
    """

    def __init__(self) -> None:
        self._patterns: dict[Binding, HeadersPattern] = {}

    def add(self, binding: Binding) -> None:
        self._patterns[binding] = HeadersPattern(binding.arguments)

    def remove(self, binding: Binding) -> None:
        del self._patterns[binding]

    def match(self, headers: Mapping[str, object]) -> Iterator[Binding]:
        """Every binding that matches, in the order of binding."""
        for binding, pattern in self._patterns.items():
            if pattern.matches(headers):
                yield binding


class HeadersPattern:
    """The arguments of one binding, read once.

    >>> HeadersPattern({"x-match": "any", "a": 1, "b": None}).matches({"b": "whatever"})
    True
    """

    __slots__ = ("_any", "_wanted")

    def __init__(self, arguments: Mapping[str, object]) -> None:
        """Raises RoutingError for an `x-match` that there is not."""
        kind = arguments.get(_MATCH, "all")
        if not isinstance(kind, str):
            raise RoutingError(
                PRECONDITION_FAILED,
                f"Invalid x-match field type {amqp_type(kind)} (value {kind}); expected longstr",
            )
        if kind not in _KINDS:
            raise RoutingError(
                PRECONDITION_FAILED,
                f'Invalid x-match field value "{kind}"; expected all, any, all-with-x, or any-with-x',
            )
        with_x = kind.endswith("-with-x")
        self._any = kind.startswith("any")
        self._wanted = tuple(
            (name, value)
            for name, value in arguments.items()
            if name != _MATCH and (with_x or not name.startswith("x-"))
        )

    def matches(self, headers: Mapping[str, object]) -> bool:
        found = (
            name in headers and (value is None or equal_values(value, headers[name])) for name, value in self._wanted
        )
        return any(found) if self._any else all(found)


def equal_values(one: object, other: object) -> bool:
    """Whether RabbitMQ finds two values of headers equal.

    >>> equal_values(1, 1.0), equal_values(1, True), equal_values("a", b"a")
    (True, False, True)
    """
    if type(one) is type(other) and isinstance(one, str | int):
        return one == other
    return _comparable(one) == _comparable(other)


def _comparable(value: object) -> tuple[str, object]:
    match value:
        case bool():
            return "bool", value
        case int() | float():
            return "number", value
        case datetime.datetime():
            # Without a zone it is UTC: AMQP knows no other.
            aware = value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
            return "number", aware.timestamp() // 1
        case str():
            return "bytes", value.encode("utf-8", "surrogateescape")
        case bytes() | bytearray():
            return "bytes", bytes(value)
        case Decimal():
            return "decimal", value.as_tuple()
        case Mapping():
            return "table", {name: _comparable(item) for name, item in value.items()}
        case list() | tuple():
            return "array", [_comparable(item) for item in value]
    return "void", None
