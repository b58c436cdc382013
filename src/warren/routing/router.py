"""Exchanges and bindings of one vhost, and where a message goes.

Routing is a walk. It begins at the exchange that a message was published to; the bindings that match lead to queues,
which are the answer, and to exchanges, from which the walk goes on:

    publish -> exchange --binding--> queue
                  |------binding---> exchange ----binding--> queue
                  '- nothing matched: alternate exchange --binding--> queue

Rules:

1. An exchange is visited once in a walk, so cycles end. A queue is in the answer once, whatever led to it; the answer is
   sorted, so it is the same for the same bindings in whatever order they were made.
2. Each exchange of the walk that matched nothing hands the message to its own alternate exchange. A binding to another
   exchange counts as a match, even when that one leads nowhere. A message with several keys (CC, BCC) matched when one
   of them did. An alternate that does not exist is passed over.
3. The default exchange has no bindings to keep: its answer is the queue of that name, if there is one.
4. Bindings exist between things that exist. With a queue or exchange go its bindings; with its last binding as a source
   goes an exchange that is auto_delete, and so on from there. What went is told to the caller, who forgets it on disk.
5. Answers that depend on exchange and routing key alone are remembered until a binding or exchange changes. Those of
   fanouts are remembered once for all keys. To declare a queue forgets nothing: the default exchange is not in there.
6. Every change costs what it touches: a bind or unbind its own words, a queue's end its own bindings.

One thread at a time, as everything of a vhost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from warren.routing.binding import Binding, BindingIndex
from warren.routing.errors import ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, RoutingError
from warren.routing.exchange import (
    DEFAULT_EXCHANGE,
    Exchange,
    check,
    check_equivalent,
    check_not_default,
    exchange_in,
    predeclared_exchanges,
)
from warren.routing.matchers import Matcher, Routed, Table, matcher_for

ROUTES_CACHED: Final = 16_384  # a few megabytes; more distinct keys than that are not worth remembering

_EVERY_KEY: Final = None  # in place of the routing key, for answers that do not depend on it


@dataclass(slots=True)
class Removed:
    """What went, for the caller to delete from the metadata."""

    exchanges: list[Exchange] = field(default_factory=list)
    bindings: list[Binding] = field(default_factory=list)


@dataclass(slots=True)
class _Source:
    """An exchange as the begin of bindings."""

    matcher: Matcher
    bindings: dict[Binding, None] = field(default_factory=dict)  # all of them, in the order of binding


class Router:
    """Exchanges and bindings of one vhost, and where a message goes.

    >>> router = Router("/")
    >>> router.declare(Exchange(name="logs", type="topic"))
    >>> router.add_queue("errors")
    >>> router.bind(Binding("logs", "queue", "errors", "*.error"))
    True
    >>> router.route("logs", "disk.error")
    ('errors',)
    >>> router.route("", "errors")
    ('errors',)
    """

    def __init__(self, vhost: str = "/") -> None:
        self.vhost = vhost
        self.version = 0  # rises with every change of exchanges, queues, bindings and policies
        self.exchanges: dict[str, Exchange] = {}
        self.by_properties = 0  # how many of them match by properties: a binding may lead there from any other
        self._sources: dict[str, _Source] = {}  # by exchange
        self._to_queue = BindingIndex()
        self._to_exchange = BindingIndex()
        self._default_routes: dict[str, tuple[str]] = {}  # every queue, as what the default exchange answers
        self._policy_alternates: dict[str, str] = {}  # by exchange
        self._routes: dict[tuple[str, str | None], tuple[str, ...]] = {}
        for exchange in predeclared_exchanges():
            self._add_exchange(exchange)

    # ---- exchanges ----

    def declare(self, exchange: Exchange) -> None:
        """Add an exchange; one that is there must be the same (`check_same`).

        Raises RoutingError: 503 for an unknown type, 403 for a reserved name, 406 for arguments that cannot be.
        """
        current = self.exchanges.get(exchange.name)
        if current is not None:
            check_not_default(exchange.name)
            check_equivalent(current, exchange, self.vhost)
            return
        check(exchange, self.vhost)
        self._add_exchange(exchange)
        self._forget_routes()

    def check_same(
        self,
        name: str,
        type: str,
        durable: bool,
        auto_delete: bool,
        internal: bool,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """For a redeclare. Raises RoutingError: 404 when there is no such exchange, 406 when it is another."""
        requested = Exchange(
            name=name,
            type=type,
            durable=durable,
            auto_delete=auto_delete,
            internal=internal,
            arguments=arguments or {},
        )
        check_equivalent(self.exchange(name), requested, self.vhost)

    def exchange(self, name: str) -> Exchange:
        """The exchange of that name. Raises RoutingError 404."""
        found = self.exchanges.get(name)
        if found is None:
            raise RoutingError(NOT_FOUND, f"no {exchange_in(name, self.vhost)}")
        return found

    def delete(self, name: str, if_unused: bool = False) -> Removed:
        """Delete an exchange and its bindings; one that is not there is deleted already, as in RabbitMQ.

        Raises RoutingError: 403 for those of every vhost, 406 with `if_unused` when something is bound to it.
        """
        check_not_default(name)
        exchange = self.exchanges.get(name)
        if exchange is None:
            return Removed()
        if exchange.predeclared:
            raise RoutingError(ACCESS_REFUSED, f"deletion of system {exchange_in(name, self.vhost)} not allowed")
        if if_unused and self._sources[name].bindings:
            raise RoutingError(PRECONDITION_FAILED, f"{exchange_in(name, self.vhost)} in use")
        removed = Removed()
        self._delete_exchanges([name], removed)
        self._forget_routes()
        return removed

    def alternate(self, name: str) -> str | None:
        """Where messages go that match nothing at this exchange: its argument, else what a policy says, else None."""
        by_argument = self.exchange(name).alternate
        return self._policy_alternates.get(name) if by_argument is None else by_argument

    def set_policy_alternate(self, name: str, alternate: str | None) -> None:
        """What the policy of an exchange has for `alternate-exchange` now. Raises RoutingError 404."""
        self.exchange(name)
        if alternate is None:
            self._policy_alternates.pop(name, None)
        else:
            self._policy_alternates[name] = alternate
        self._forget_routes()

    # ---- queues ----

    def add_queue(self, name: str) -> None:
        """A queue exists from now on. A second time changes nothing."""
        if name not in self._default_routes:
            self._default_routes[name] = (name,)
            self.version += 1

    def remove_queue(self, name: str) -> Removed:
        """A queue exists no more; its bindings go with it. Costs as many steps as it has bindings."""
        removed = Removed()
        if self._default_routes.pop(name, None) is None:
            return removed
        self.version += 1
        bindings = list(self._to_queue.of(name))
        if bindings:
            self._remove_bindings(bindings, removed)
            self._forget_routes()
        return removed

    def has_queue(self, name: str) -> bool:
        return name in self._default_routes

    # ---- bindings ----

    def bind(self, binding: Binding) -> bool:
        """Add a binding. False: it was there.

        Raises RoutingError: 404 when an end is missing, 403 for the default exchange, 406 for a key or arguments that
        the exchange's type cannot use.
        """
        self._check_ends(binding)
        exchange = self.exchange(binding.source)
        if binding.destination_kind == "exchange":
            destination = self.exchange(binding.destination).name
        else:
            route = self._default_routes.get(binding.destination)
            if route is None:
                raise RoutingError(NOT_FOUND, f"no queue '{binding.destination}' in vhost '{self.vhost}'")
            destination = route[0]
        source = self._sources[exchange.name]
        if binding in source.bindings:
            return False
        binding.share_names(exchange.name, destination)
        source.matcher.add(binding)  # first: it may refuse
        source.bindings[binding] = None
        self._index_of(binding).add(binding.destination, binding)
        self._forget_routes()
        return True

    def check_binding(self, binding: Binding) -> None:
        """Could its source have it? Raises RoutingError as `bind` does, and changes nothing."""
        matcher_for(self.exchange(binding.source)).add(binding)

    def unbind(self, binding: Binding) -> Removed:
        """Remove a binding; one that is not there is removed already. Raises RoutingError 403 for the default exchange."""
        self._check_ends(binding)
        removed = Removed()
        source = self._sources.get(binding.source)
        if source is not None and binding in source.bindings:
            self._remove_bindings([binding], removed)
            self._forget_routes()
        return removed

    def bindings_of_source(self, name: str) -> list[Binding]:
        """Of an exchange, as a source, in the order of binding. The default exchange's are not kept: none."""
        source = self._sources.get(name)
        return [] if source is None else list(source.bindings)

    def bindings_to_queue(self, name: str) -> list[Binding]:
        """To a queue, but for the one of the default exchange that every queue has."""
        return list(self._to_queue.of(name))

    def bindings_to_exchange(self, name: str) -> list[Binding]:
        return list(self._to_exchange.of(name))

    def all_bindings(self) -> Iterator[Binding]:
        """Every binding, by exchange. Requires: nothing changes meanwhile."""
        for source in self._sources.values():
            yield from source.bindings

    # ---- routing ----

    def route(
        self,
        exchange: str,
        routing_key: str,
        headers: Callable[[], Table] | None = None,
        properties: Callable[[], Table] | None = None,
        *,
        from_broker: bool = False,
    ) -> tuple[str, ...]:
        """The queues that a message goes to, sorted; empty when it is unroutable.

        `headers` and `properties` are called at most once, and only if an exchange on the way asks. `from_broker` is
        for what the broker publishes itself (dead letters, traces), which may go to internal exchanges.

        Raises RoutingError: 404 for no such exchange, 403 for an internal one.
        """
        if exchange == DEFAULT_EXCHANGE:
            return self._default_routes.get(routing_key, ())
        routes = self._routes.get((exchange, routing_key))
        if routes is not None:
            return routes
        routes = self._routes.get((exchange, _EVERY_KEY))
        if routes is not None:
            return routes
        declared = self._published_to(exchange, from_broker)
        walk = _Walk(self, Routed((routing_key,), headers, properties))
        routes = walk.queues_from(exchange)
        # Of an internal exchange nothing is remembered: the next who asks may not be allowed to.
        if walk.repeatable and not declared.internal:
            if len(self._routes) >= ROUTES_CACHED:
                self._routes.clear()
            self._routes[exchange, routing_key if walk.needs_key else _EVERY_KEY] = routes
        return routes

    def route_many(
        self,
        exchange: str,
        keys: Sequence[str],
        headers: Callable[[], Table] | None = None,
        properties: Callable[[], Table] | None = None,
        *,
        from_broker: bool = False,
    ) -> tuple[str, ...]:
        """The queues that a message with several routing keys goes to: its own first, then those of CC and BCC.

        Not the union of `route` for each: an alternate exchange takes part when none of the keys matched.
        """
        if len(keys) == 1:
            return self.route(exchange, keys[0], headers, properties, from_broker=from_broker)
        self._published_to(exchange, from_broker)
        return _Walk(self, Routed(keys, headers, properties)).queues_from(exchange)

    def route_waiting(
        self,
        exchange: str,
        keys: Sequence[str],
        headers: Callable[[], Table] | None = None,
        properties: Callable[[], Table] | None = None,
        *,
        from_broker: bool = False,
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """As `route_many`, for a message with a delay: the queues that get it now, and the delayed exchanges before which it
        waits. From those on it is routed when its time has come."""
        self._published_to(exchange, from_broker)
        walk = _Walk(self, Routed(keys, headers, properties), waiting=True)
        return walk.queues_from(exchange), tuple(walk.delayed)

    def _published_to(self, name: str, from_broker: bool) -> Exchange:
        exchange = self.exchange(name)
        if exchange.internal and not from_broker:
            raise RoutingError(ACCESS_REFUSED, f"cannot publish to internal {exchange_in(name, self.vhost)}")
        return exchange

    # ---- changes ----

    def _add_exchange(self, exchange: Exchange) -> None:
        self.exchanges[exchange.name] = exchange
        self.by_properties += exchange.needs_properties
        self._sources[exchange.name] = _Source(matcher_for(exchange))

    def _check_ends(self, binding: Binding) -> None:
        check_not_default(binding.source)
        if binding.destination_kind == "exchange":
            check_not_default(binding.destination)

    def _remove_bindings(self, bindings: Sequence[Binding], removed: Removed) -> None:
        """Remove bindings that are there, and then the auto-delete exchanges that have none left."""
        ended: dict[str, None] = {}
        for binding in bindings:
            source = self._sources[binding.source]
            source.matcher.remove(binding)
            del source.bindings[binding]
            self._index_of(binding).remove(binding.destination, binding)
            removed.bindings.append(binding)
            if not source.bindings and self.exchanges[binding.source].auto_delete:
                ended[binding.source] = None
        self._delete_exchanges(list(ended), removed)

    def _delete_exchanges(self, names: list[str], removed: Removed) -> None:
        """Delete exchanges with their bindings, and those that auto-delete in turn. A loop: chains may be long."""
        while names:
            name = names.pop()
            exchange = self.exchanges.pop(name, None)
            if exchange is None:
                continue
            self.by_properties -= exchange.needs_properties
            self._policy_alternates.pop(name, None)
            for binding in self._sources.pop(name).bindings:
                self._index_of(binding).remove(binding.destination, binding)
                removed.bindings.append(binding)
            removed.exchanges.append(exchange)
            for binding in list(self._to_exchange.of(name)):
                source = self._sources[binding.source]
                source.matcher.remove(binding)
                del source.bindings[binding]
                self._to_exchange.remove(name, binding)
                removed.bindings.append(binding)
                if not source.bindings and self.exchanges[binding.source].auto_delete:
                    names.append(binding.source)

    def _index_of(self, binding: Binding) -> BindingIndex:
        return self._to_queue if binding.destination_kind == "queue" else self._to_exchange

    def _forget_routes(self) -> None:
        self.version += 1
        self._routes.clear()


class _Walk:
    """One walk through the exchanges, and what its answer depended on."""

    __slots__ = ("_message", "_router", "_waiting", "delayed", "needs_key", "repeatable")

    def __init__(self, router: Router, message: Routed, *, waiting: bool = False) -> None:
        self._waiting = waiting  # the message has a delay: the walk ends at delayed exchanges
        self.delayed: list[str] = []
        self._router = router
        self._message = message
        self.needs_key = False
        self.repeatable = True  # the same exchange and key will lead to the same queues, until bindings change

    def queues_from(self, exchange: str) -> tuple[str, ...]:
        queues: set[str] = set()
        visited = {exchange}
        to_visit = [exchange]
        while to_visit:
            name = to_visit.pop()
            if self._waiting and name in self._router.exchanges and self._router.exchanges[name].delayed:
                self.delayed.append(name)
                continue
            for kind, destination in self._destinations(name):
                if kind == "queue":
                    queues.add(destination)
                elif destination not in visited:
                    visited.add(destination)
                    to_visit.append(destination)
        return tuple(sorted(queues))

    def _destinations(self, name: str) -> Iterator[tuple[str, str]]:
        router = self._router
        if name == DEFAULT_EXCHANGE:
            self.repeatable = False  # queues come and go without a word to the cache
            yield from (("queue", key) for key in self._message.keys if router.has_queue(key))
            return
        source = router._sources.get(name)
        if source is None:
            return  # an alternate that does not exist
        matcher = source.matcher
        self.needs_key = self.needs_key or matcher.needs_key
        self.repeatable = self.repeatable and not matcher.needs_message
        matched = False
        for binding in matcher.match(self._message):
            matched = True
            yield binding.destination_kind, binding.destination
        if not matched:
            alternate = router.alternate(name)
            if alternate is not None:
                yield "exchange", alternate
