"""A binding: the arrow from an exchange to a queue or to another exchange; and a compact set of them.

Rules:

1. All of it is its identity, the arguments too: the same two ends may be bound twice with other arguments, and to undo
   one of them its arguments must be given. Values of other types are other arguments: True is not 1.
2. There may be 100,000 of them, so a binding is small: it shares its names with what it binds (`share_names`), and
   bindings without arguments share one empty mapping. A `BindingIndex` holds most names' only binding as it is and makes
   a dict for the second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from warren.routing.errors import PRECONDITION_FAILED, RoutingError

DestinationKind = Literal["queue", "exchange"]

_NO_ARGUMENTS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """From an exchange to a queue or exchange.

    >>> Binding("logs", "queue", "errors", "*.error") == Binding("logs", "queue", "errors", "*.error", {})
    True
    >>> Binding("logs", "queue", "errors", "", {"size": 1}) == Binding("logs", "queue", "errors", "", {"size": True})
    False
    """

    source: str
    destination_kind: DestinationKind
    destination: str
    routing_key: str = ""
    arguments: Mapping[str, object] = field(default_factory=lambda: _NO_ARGUMENTS)

    def __post_init__(self) -> None:
        if self.destination_kind not in ("queue", "exchange"):
            raise RoutingError(
                PRECONDITION_FAILED,
                f"destination kind {self.destination_kind!r} is not possible; it is queue or exchange",
            )
        if not self.arguments:
            object.__setattr__(self, "arguments", _NO_ARGUMENTS)

    def share_names(self, source: str, destination: str) -> None:
        """Let go of its own copies: names come anew from network and disk with every bind, and the same few are meant.
        Requires: they are equal to what it has."""
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "destination", destination)

    def __hash__(self) -> int:
        # Without the arguments, which need not be hashable.
        return hash((self.source, self.destination, self.routing_key))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Binding):
            return NotImplemented
        return (
            self.routing_key == other.routing_key
            and self.destination == other.destination
            and self.source == other.source
            and self.destination_kind == other.destination_kind
            and (self.arguments is other.arguments or _identical(self.arguments, other.arguments))
        )


def _identical(one: object, other: object) -> bool:
    """Equal, and of the same types all the way down."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_identical(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_identical, one, other))
    return type(one) is type(other) and one == other


class BindingIndex:
    """Bindings by one of their names or keys. Adding and removing cost the same however many there are.

    >>> index = BindingIndex()
    >>> index.add("errors", Binding("logs", "queue", "errors"))
    >>> [binding.source for binding in index.of("errors")]
    ['logs']
    """

    __slots__ = ("_bindings",)

    def __init__(self) -> None:
        # An only binding by itself: a dict for each would double what a binding costs.
        self._bindings: dict[str, Binding | dict[Binding, None]] = {}

    def add(self, name: str, binding: Binding) -> None:
        here = self._bindings.get(name)
        if here is None:
            self._bindings[name] = binding
        elif isinstance(here, dict):
            here[binding] = None
        elif here != binding:
            self._bindings[name] = {here: None, binding: None}

    def remove(self, name: str, binding: Binding) -> None:
        """Requires: it was added under that name."""
        here = self._bindings[name]
        if isinstance(here, dict):
            del here[binding]
            if not here:
                del self._bindings[name]
        else:
            assert here == binding
            del self._bindings[name]

    def of(self, name: str) -> Collection[Binding]:
        """Those under a name, in the order of adding. Not a copy."""
        here = self._bindings.get(name)
        if here is None:
            return ()
        return here.keys() if isinstance(here, dict) else (here,)

    def __iter__(self) -> Iterator[Binding]:
        for name in self._bindings:
            yield from self.of(name)
