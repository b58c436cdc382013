"""How each type of exchange finds the bindings that match, behind one small interface.

A matcher says of itself what its answer depends on: that is what decides whether the router may remember it. It holds the
bindings of one exchange, in the shape that its type needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from warren.routing.binding import Binding, BindingIndex
from warren.routing.consistent_hash import ConsistentHash
from warren.routing.exchange import CONSISTENT_HASH, Exchange
from warren.routing.headers_match import HeadersMatch
from warren.routing.topic_trie import TopicTrie

Table = Mapping[str, object]


@dataclass(slots=True)
class Routed:
    """A message, as far as routing asks for it. Headers and properties are decoded when something needs them, once."""

    keys: Sequence[str]  # its routing key, then those of CC and BCC
    read_headers: Callable[[], Table] | None = None
    read_properties: Callable[[], Table] | None = None
    _headers: Table | None = field(default=None, init=False)
    _properties: Table | None = field(default=None, init=False)

    @property
    def headers(self) -> Table:
        if self._headers is None:
            self._headers = self.read_headers() if self.read_headers else {}
        return self._headers

    @property
    def properties(self) -> Table:
        if self._properties is None:
            self._properties = self.read_properties() if self.read_properties else {}
        return self._properties


class Matcher(Protocol):
    """The bindings of one exchange."""

    needs_key: bool  # the answer depends on the routing key
    needs_message: bool  # the answer depends on headers or properties

    def add(self, binding: Binding) -> None:
        """Raises RoutingError for a binding that this type cannot have. Requires: it is not there."""

    def remove(self, binding: Binding) -> None:
        """Requires: it is there."""

    def match(self, message: Routed) -> Iterable[Binding]:
        """The bindings that match, perhaps more than once."""


def matcher_for(exchange: Exchange) -> Matcher:
    """An empty matcher of the exchange's type."""
    match exchange.routing_type:
        case "direct":
            return _Direct()
        case "fanout":
            return _Fanout()
        case "topic":
            return Topic()
        case "headers":
            return _Headers()
        case type_:
            assert type_ == CONSISTENT_HASH
            return _Hash(exchange.arguments)


class _Direct:
    needs_key = True
    needs_message = False

    def __init__(self) -> None:
        self._by_key = BindingIndex()

    def add(self, binding: Binding) -> None:
        self._by_key.add(binding.routing_key, binding)

    def remove(self, binding: Binding) -> None:
        self._by_key.remove(binding.routing_key, binding)

    def match(self, message: Routed) -> Iterable[Binding]:
        for key in message.keys:
            yield from self._by_key.of(key)


class _Fanout:
    needs_key = False
    needs_message = False

    def __init__(self) -> None:
        self._bindings: dict[Binding, None] = {}

    def add(self, binding: Binding) -> None:
        self._bindings[binding] = None

    def remove(self, binding: Binding) -> None:
        del self._bindings[binding]

    def match(self, message: Routed) -> Iterable[Binding]:
        return self._bindings


class Topic:
    """Public, with its trie, so that tests can count what a bind costs."""

    needs_key = True
    needs_message = False

    def __init__(self) -> None:
        self.trie = TopicTrie()

    def add(self, binding: Binding) -> None:
        self.trie.add(binding)

    def remove(self, binding: Binding) -> None:
        self.trie.remove(binding)

    def match(self, message: Routed) -> Iterable[Binding]:
        for key in message.keys:
            yield from self.trie.match(key)


class _Headers:
    needs_key = False
    needs_message = True

    def __init__(self) -> None:
        self._bindings = HeadersMatch()

    def add(self, binding: Binding) -> None:
        self._bindings.add(binding)

    def remove(self, binding: Binding) -> None:
        self._bindings.remove(binding)

    def match(self, message: Routed) -> Iterable[Binding]:
        return self._bindings.match(message.headers)


class _Hash:
    def __init__(self, arguments: Table) -> None:
        self._ring = ConsistentHash(arguments)
        self.needs_message = self._ring.needs_headers or self._ring.needs_properties
        self.needs_key = not self.needs_message

    def add(self, binding: Binding) -> None:
        self._ring.add(binding)

    def remove(self, binding: Binding) -> None:
        self._ring.remove(binding)

    def match(self, message: Routed) -> Iterable[Binding]:
        # The message's own key decides; those of CC would send it to several places.
        return self._ring.match(
            message.keys[0] if message.keys else "",
            message.headers if self._ring.needs_headers else None,
            message.properties if self._ring.needs_properties else None,
        )
