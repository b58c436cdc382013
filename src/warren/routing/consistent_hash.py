"""Spreads messages over queues by a hash, so that equal keys stay together: the type `x-consistent-hash`.

A binding's routing key is its weight. Every unit of weight puts some points on a ring of 64-bit numbers; a message goes
to the destination whose point is the next one after the message's own hash.

Rules:

1. Where a point lies depends on its destination's kind and name and its number, and on nothing else: not on the order
   of binding, not on the process, not on the machine. So the same keys go to the same queues after a restart.
2. A destination that comes takes keys from all others in proportion and moves none between them; one that goes gives its
   keys to the others likewise.
3. A destination that is bound twice has the sum of the weights.
4. A message without the header or property that is asked for hashes like the empty string: all of them stay together.

The ring is put in order when it is asked for the first time after a change, so many bindings in a row cost one sort.
"""

from __future__ import annotations

import bisect
import datetime
import hashlib
from collections.abc import Iterator, Mapping, Sequence

from warren.routing.binding import Binding, BindingIndex, DestinationKind
from warren.routing.errors import PRECONDITION_FAILED, RoutingError
from warren.routing.exchange import HASH_HEADER, HASH_PROPERTY

_POINTS_PER_WEIGHT = 64  # a destination of weight 1 among equals is off its share by an eighth or so; 10: by a 25th
_MAX_WEIGHT = 10_000  # 640,000 points, about a second to place

_Destination = tuple[DestinationKind, str]


class ConsistentHash:
    """The bindings of a consistent hash exchange.

    >>> ring = ConsistentHash({})
    >>> ring.add(Binding("work", "queue", "one", "1"))
    >>> ring.add(Binding("work", "queue", "two", "1"))
    >>> {binding.destination for number in range(100) for binding in ring.match(f"customer {number}")} == {"one", "two"}
    True
    >>> list(ring.match("customer 7")) == list(ring.match("customer 7"))
    True
    """

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self._hash_header = arguments.get(HASH_HEADER)
        self._hash_property = arguments.get(HASH_PROPERTY)
        self._weights: dict[_Destination, int] = {}
        self._bindings = BindingIndex()  # by _label of the destination
        self._points: list[int] = []
        self._owners: list[_Destination] = []  # of the point at the same place
        self._in_order = True

    @property
    def needs_headers(self) -> bool:
        return self._hash_header is not None

    @property
    def needs_properties(self) -> bool:
        return self._hash_property is not None

    def add(self, binding: Binding) -> None:
        """Raises RoutingError when the routing key is no weight."""
        weight = weight_of(binding.routing_key)
        destination = (binding.destination_kind, binding.destination)
        self._weights[destination] = self._weights.get(destination, 0) + weight
        self._bindings.add(_label(destination), binding)
        self._in_order = False

    def remove(self, binding: Binding) -> None:
        destination = (binding.destination_kind, binding.destination)
        self._bindings.remove(_label(destination), binding)
        self._weights[destination] -= weight_of(binding.routing_key)
        if not self._weights[destination]:
            del self._weights[destination]
        self._in_order = False

    def match(
        self,
        routing_key: str,
        headers: Mapping[str, object] | None = None,
        properties: Mapping[str, object] | None = None,
    ) -> Iterator[Binding]:
        """A binding to the one destination that takes this message; nothing where nothing is bound."""
        if not self._in_order:
            self._put_in_order()
        if not self._points:
            return
        value: object = routing_key
        if self._hash_header is not None:
            value = (headers or {}).get(str(self._hash_header))
        elif self._hash_property is not None:
            value = (properties or {}).get(str(self._hash_property))
        place = bisect.bisect_left(self._points, _hash(_text(value)))
        owner = self._owners[place % len(self._owners)]
        yield next(iter(self._bindings.of(_label(owner))))

    def _put_in_order(self) -> None:
        ring = sorted(
            (point, destination)
            for destination, weight in self._weights.items()
            for point in _points(_label(destination), weight * _POINTS_PER_WEIGHT)
        )
        self._points = [point for point, _ in ring]
        self._owners = [destination for _, destination in ring]
        self._in_order = True


def weight_of(routing_key: str) -> int:
    """The weight that a binding asks for.

    >>> weight_of("10")
    10
    >>> weight_of("ten")
    Traceback (most recent call last):
    warren.routing.errors.RoutingError: The binding key must be an integer: "ten"
    """
    digits = routing_key[1:] if routing_key[:1] in ("+", "-") else routing_key
    if not (digits.isascii() and digits.isdigit()):
        raise RoutingError(PRECONDITION_FAILED, f'The binding key must be an integer: "{routing_key}"')
    if routing_key.startswith("-") or not digits.strip("0"):
        raise RoutingError(PRECONDITION_FAILED, "The binding key must be greater than 0")
    if len(digits) > 9 or int(digits) > _MAX_WEIGHT:
        raise RoutingError(
            PRECONDITION_FAILED,
            f"The binding key {digits[:20]} is a weight over {_MAX_WEIGHT}; only the ratio of weights counts, so divide "
            f"all of them",
        )
    return int(digits)


def _label(destination: _Destination) -> str:
    return "\0".join(destination)


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _points(label: str, count: int) -> Iterator[int]:
    # Eight points from one digest: a weight of thousands is bound without a pause.
    seed = hashlib.blake2b(label.encode("utf-8", "surrogatepass"))
    for number in range(0, count, 8):
        block = seed.copy()
        block.update(b"\0%d" % number)
        digest = block.digest()
        for start in range(0, 8 * min(8, count - number), 8):
            yield int.from_bytes(digest[start : start + 8], "big")


def _text(value: object) -> str:
    """What is hashed of a header or property: the same text for values that mean the same."""
    match value:
        case None:
            return ""
        case str():
            return value
        case bytes() | bytearray():
            return value.decode("utf-8", "surrogateescape")
        case datetime.datetime():
            aware = value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
            return str(int(aware.timestamp()))
        case Mapping():
            return repr(sorted((str(name), _text(item)) for name, item in value.items()))
        case Sequence():
            return repr([_text(item) for item in value])
    return str(value)
