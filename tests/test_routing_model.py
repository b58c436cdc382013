"""The router against a plain model: any sequence of changes, and every route after each of them."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.test_topic_trie import plain_match
from warren.routing.binding import Binding
from warren.routing.errors import RoutingError
from warren.routing.exchange import Exchange
from warren.routing.headers_match import HeadersPattern
from warren.routing.router import Removed, Router
from warren.routing.topic_trie import words

NAMES = ("u", "v", "w", "x")
QUEUES = ("a", "b", "x")  # x is an exchange, too
ROUTING_KEYS = ("", "k", "k.l", "l")
PATTERNS = (*ROUTING_KEYS, "#", "*", "k.#")
HEADERS = ({}, {"h": 1}, {"h": 2, "i": 1})


class RouterMachine(RuleBasedStateMachine):
    """Any sequence of changes; after each one, every route is what a walk through plain lists finds."""

    @initialize()
    def start(self):
        self.router = Router("/")
        self.exchanges: dict[str, Exchange] = {}
        self.queues: set[str] = set()
        self.bindings: list[Binding] = []
        self.policies: dict[str, str] = {}

    @rule(
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(["direct", "fanout", "topic", "headers"]),
        auto_delete=st.booleans(),
        alternate=st.sampled_from([None, None, "", *NAMES]),
    )
    def declare(self, name, kind, auto_delete, alternate):
        if name in self.exchanges:
            return
        arguments = {} if alternate is None else {"alternate-exchange": alternate}
        exchange = Exchange(name=name, type=kind, auto_delete=auto_delete, arguments=arguments)
        self.router.declare(exchange)
        self.exchanges[name] = exchange

    @rule(name=st.sampled_from(QUEUES))
    def add_queue(self, name):
        self.router.add_queue(name)
        self.queues.add(name)

    @rule(name=st.sampled_from(NAMES), alternate=st.sampled_from([None, "", *NAMES]))
    def policy(self, name, alternate):
        if name in self.exchanges:
            self.router.set_policy_alternate(name, alternate)
            self.policies.pop(name, None)
            if alternate is not None:
                self.policies[name] = alternate

    @rule(
        source=st.sampled_from(NAMES),
        destination=st.sampled_from([*(("queue", q) for q in QUEUES), *(("exchange", x) for x in NAMES)]),
        key=st.sampled_from(PATTERNS),
        arguments=st.sampled_from([{}, {"h": 1}, {"x-match": "any", "h": 2}]),
    )
    def bind(self, source, destination, key, arguments):
        binding = Binding(source, *destination, key, arguments)
        ends = {source, destination[1]} if destination[0] == "exchange" else {source}
        if not ends <= self.exchanges.keys() or (destination[0] == "queue" and destination[1] not in self.queues):
            with pytest.raises(RoutingError, match="in vhost '/'"):
                self.router.bind(binding)
            return
        assert self.router.bind(binding) is (binding not in self.bindings)
        if binding not in self.bindings:
            self.bindings.append(binding)

    @rule(data=st.data())
    def unbind(self, data):
        if self.bindings:
            binding = data.draw(st.sampled_from(self.bindings))
            self.gone(self.router.unbind(binding), [binding], [])

    @rule(name=st.sampled_from(QUEUES))
    def remove_queue(self, name):
        self.queues.discard(name)
        bindings = [b for b in self.bindings if (b.destination_kind, b.destination) == ("queue", name)]
        self.gone(self.router.remove_queue(name), bindings, [])

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name):
        if name in self.exchanges:
            self.gone(self.router.delete(name), [], [name])

    def gone(self, removed: Removed, bindings: list[Binding], exchanges: list[str]) -> None:
        """Take out what went, and what goes with it, and compare with what the router says."""
        expected_bindings, expected_exchanges = set(bindings), set(exchanges)
        while True:
            left = [b for b in self.bindings if b not in expected_bindings]
            more_bindings = {
                b
                for b in left
                if b.source in expected_exchanges
                or (b.destination_kind == "exchange" and b.destination in expected_exchanges)
            }
            had = {b.source for b in expected_bindings}
            more_exchanges = {
                name
                for name in had - expected_exchanges
                if self.exchanges[name].auto_delete and not any(b.source == name for b in left)
            }
            if not more_bindings and not more_exchanges:
                break
            expected_bindings |= more_bindings
            expected_exchanges |= more_exchanges
        assert len(removed.bindings) == len(expected_bindings)
        assert set(removed.bindings) == expected_bindings
        assert sorted(x.name for x in removed.exchanges) == sorted(expected_exchanges)
        self.bindings = [b for b in self.bindings if b not in expected_bindings]
        for name in expected_exchanges:
            del self.exchanges[name]
            self.policies.pop(name, None)

    def plain_route(self, name: str, keys: list[str], headers: dict) -> tuple[str, ...]:
        queues, seen = set(), set()

        def visit(name: str) -> None:
            if name in seen:
                return
            seen.add(name)
            if name == "":
                queues.update(self.queues & set(keys))
                return
            if name not in self.exchanges:
                return
            kind = self.exchanges[name].type
            matching = [
                b
                for b in self.bindings
                if b.source == name
                and {
                    "direct": b.routing_key in keys,
                    "fanout": True,
                    "topic": any(plain_match(words(b.routing_key), words(key)) for key in keys),
                    "headers": HeadersPattern(b.arguments).matches(headers),
                }[kind]
            ]
            for b in matching:
                if b.destination_kind == "queue":
                    queues.add(b.destination)
                else:
                    visit(b.destination)
            if not matching:
                alternate = self.exchanges[name].arguments.get("alternate-exchange", self.policies.get(name))
                if alternate is not None:
                    visit(alternate)

        visit(name)
        return tuple(sorted(queues))

    @invariant()
    def every_route_is_the_plain_one(self):
        for name in ("", *self.exchanges):
            for key in ROUTING_KEYS:
                for headers in HEADERS:
                    assert self.router.route(name, key, lambda h=headers: h) == self.plain_route(name, [key], headers)
            assert self.router.route_many(name, ["k.l", "l"]) == self.plain_route(name, ["k.l", "l"], {})

    @invariant()
    def bindings_are_listed_from_every_side(self):
        assert set(self.router.all_bindings()) == set(self.bindings)
        assert len(list(self.router.all_bindings())) == len(self.bindings)
        for name in NAMES:
            assert self.router.bindings_of_source(name) == [b for b in self.bindings if b.source == name]
            to_it = [b for b in self.bindings if (b.destination_kind, b.destination) == ("exchange", name)]
            assert self.router.bindings_to_exchange(name) == to_it
        for name in QUEUES:
            to_it = [b for b in self.bindings if (b.destination_kind, b.destination) == ("queue", name)]
            assert self.router.bindings_to_queue(name) == to_it


TestRouterAgainstAPlainModel = RouterMachine.TestCase
