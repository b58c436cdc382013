"""Exchanges, bindings and where messages go, case by case. tests/test_routing_model.py has the rest."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warren.routing import router as router_module
from warren.routing.binding import Binding
from warren.routing.errors import RoutingError
from warren.routing.exchange import Exchange
from warren.routing.headers_match import HeadersPattern, equal_values
from warren.routing.router import Removed, Router


@pytest.fixture
def router() -> Router:
    """One with queues a, b, c and an exchange of each type, named by it."""
    router = Router("/")
    for name in ("a", "b", "c"):
        router.add_queue(name)
    for kind in ("direct", "fanout", "topic", "headers", "x-consistent-hash"):
        router.declare(Exchange(name=kind, type=kind))
    return router


def to_queue(source: str, queue: str, key: str = "", **arguments: object) -> Binding:
    return Binding(source, "queue", queue, key, arguments)


def to_exchange(source: str, exchange: str, key: str = "") -> Binding:
    return Binding(source, "exchange", exchange, key)


def refusal(call, *arguments, **named) -> tuple[int, str]:
    with pytest.raises(RoutingError) as caught:
        call(*arguments, **named)
    return caught.value.reply_code, caught.value.text


# ---- declare ----


def test_a_vhost_begins_with_the_exchanges_of_rabbitmq():
    found = {name: (x.type, x.durable, x.internal) for name, x in Router().exchanges.items()}
    assert found == {
        "": ("direct", True, False),
        "amq.direct": ("direct", True, False),
        "amq.fanout": ("fanout", True, False),
        "amq.topic": ("topic", True, False),
        "amq.headers": ("headers", True, False),
        "amq.match": ("headers", True, False),
        "amq.rabbitmq.trace": ("topic", True, True),
    }


@pytest.mark.parametrize(
    ("exchange", "code", "text"),
    [
        (Exchange(name="x", type="topik"), 503, "unknown exchange type 'topik'"),
        (Exchange(name="amq.mine"), 403, "exchange name 'amq.mine' contains reserved prefix 'amq.*'"),
        (Exchange(name=""), 403, "operation not permitted on the default exchange"),
        (
            Exchange(name="x", arguments={"alternate-exchange": 7}),
            406,
            "invalid type 'signedint' for arg 'alternate-exchange' in exchange 'x' in vhost '/'",
        ),
        (
            Exchange(name="x", type="x-delayed-message"),
            406,
            "Invalid argument, 'x-delayed-type' must be an existing exchange type",
        ),
        (
            Exchange(name="x", type="x-delayed-message", arguments={"x-delayed-type": "x-delayed-message"}),
            406,
            "Invalid argument, 'x-delayed-type' must be an existing exchange type",
        ),
        (
            Exchange(name="x", type="x-delayed-message", arguments={"x-delayed-type": "?"}),
            503,
            "unknown exchange type '?'",
        ),
        (
            Exchange(name="x", type="x-consistent-hash", arguments={"hash-header": "h", "hash-property": "message_id"}),
            406,
            "hash-header and hash-property are mutually exclusive",
        ),
        (
            Exchange(name="x", type="x-consistent-hash", arguments={"hash-property": "user_id"}),
            406,
            "Unsupported property: user_id",
        ),
    ],
)
def test_an_exchange_that_cannot_be_is_refused_in_rabbitmqs_words(router, exchange, code, text):
    before = router.version
    assert refusal(router.declare, exchange) == (code, text)
    assert "x" not in router.exchanges
    assert router.version == before


@pytest.mark.parametrize(
    ("changed", "argument", "received", "current"),
    [
        ({"type": "topic"}, "type", "'topic'", "'direct'"),
        ({"durable": False}, "durable", "'false'", "'true'"),
        ({"auto_delete": True}, "auto_delete", "'true'", "'false'"),
        ({"internal": True}, "internal", "'true'", "'false'"),
        (
            {"arguments": {"alternate-exchange": "ae"}},
            "alternate-exchange",
            "the value 'ae' of type 'longstr'",
            "none",
        ),
    ],
)
def test_a_redeclare_that_differs_names_the_difference(router, changed, argument, received, current):
    asked = {"name": "direct", "type": "direct", "durable": True, "auto_delete": False, "internal": False}
    asked |= {"arguments": {}, **changed}
    text = f"inequivalent arg '{argument}' for exchange 'direct' in vhost '/': received {received} but current is {current}"
    assert refusal(router.check_same, **asked) == (406, text)
    assert refusal(router.declare, Exchange(**asked)) == (406, text)


def test_a_redeclare_of_the_same_changes_nothing(router):
    router.bind(to_queue("direct", "a", "k"))
    before = router.version
    router.declare(Exchange(name="direct", type="direct", arguments={"x-note": "other arguments do not count"}))
    router.check_same("amq.topic", "topic", True, False, False, {})
    assert router.version == before
    assert router.route("direct", "k") == ("a",)
    assert refusal(router.check_same, "none", "topic", True, False, False, {})[0] == 404


# ---- each type ----


def test_the_default_exchange_leads_to_the_queue_of_that_name_and_cannot_be_bound(router):
    assert router.route("", "a") == ("a",)
    assert router.route("", "none") == ()
    router.remove_queue("a")
    assert router.route("", "a") == ()
    refused = (403, "operation not permitted on the default exchange")
    assert refusal(router.bind, to_queue("", "b", "k")) == refused
    assert refusal(router.unbind, to_queue("", "b", "b")) == refused
    assert refusal(router.bind, to_exchange("direct", "", "k")) == refused
    assert refusal(router.delete, "") == refused


def test_a_direct_exchange_asks_for_the_same_key(router):
    for queue, key in (("b", "k"), ("a", "k"), ("c", "other")):
        router.bind(to_queue("direct", queue, key))
    assert router.route("direct", "k") == ("a", "b")
    assert router.route("direct", "none") == ()


def test_a_fanout_exchange_asks_for_nothing(router):
    router.bind(to_queue("fanout", "b", "k"))
    router.bind(to_queue("fanout", "a", "other"))
    assert router.route("fanout", "whatever") == ("a", "b")


def test_a_queue_bound_several_times_gets_a_message_once(router):
    for key in ("#", "a.*", "a.b"):
        router.bind(to_queue("topic", "a", key))
    assert router.route("topic", "a.b") == ("a",)
    router.unbind(to_queue("topic", "a", "#"))
    assert router.route("topic", "a.b") == ("a",)


def test_headers_are_read_only_when_an_exchange_asks_and_once(router):
    reads = Counter()

    def headers():
        reads["headers"] += 1
        return {"format": "pdf"}

    router.bind(to_queue("direct", "a", "k"))
    router.route("direct", "k", headers)
    assert not reads
    router.bind(to_queue("headers", "a", "", format="pdf"))
    router.declare(Exchange(name="more", type="headers"))
    router.bind(to_queue("more", "b", "", format="pdf"))
    router.bind(Binding("headers", "exchange", "more", "", {"format": "pdf"}))
    assert router.route("headers", "", headers) == ("a", "b")
    assert reads["headers"] == 1
    assert router.route("headers", "") == ()


def test_a_delayed_exchange_routes_as_the_type_that_it_wraps(router):
    exchange = Exchange(name="later", type="x-delayed-message", arguments={"x-delayed-type": "topic"})
    router.declare(exchange)
    router.bind(to_queue("later", "a", "a.#"))
    assert router.exchanges["later"].delayed
    assert router.route("later", "a.b") == ("a",)
    assert router.route("later", "b") == ()


# ---- headers ----


@pytest.mark.parametrize(
    ("arguments", "headers", "expected"),
    [
        ({}, {}, True),
        ({"x-match": "any"}, {"a": 1}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, True),
        ({"x-match": "any", "a": 1, "b": 2}, {"b": 2}, True),
        ({"x-match": "any", "a": 1, "b": 2}, {"b": 3}, False),
        ({"x-match": "all", "a": None}, {"a": "there"}, True),
        ({"x-match": "all", "a": None}, {}, False),
        ({"x-match": "all", "x-a": 1, "b": 2}, {"b": 2}, True),
        ({"x-match": "any", "x-a": 1}, {"x-a": 1}, False),
        ({"x-match": "all-with-x", "x-a": 1}, {}, False),
        ({"x-match": "all-with-x", "x-a": 1}, {"x-a": 1}, True),
        ({"x-match": "any-with-x", "x-a": 1, "b": 2}, {"x-a": 1}, True),
        ({"x-match": "any-with-x"}, {"x-match": "any-with-x"}, False),
        ({"a": 1}, {"a": None}, False),
    ],
)
def test_headers_match_as_in_rabbitmq(arguments, headers, expected):
    assert HeadersPattern(arguments).matches(headers) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        (1, "1", False),
        ("a", b"a", True),
        (Decimal("1.0"), Decimal("1.00"), False),
        (Decimal("1.50"), Decimal("1.50"), True),
        (Decimal(1), 1, False),
        (datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), 1767225600, True),
        ([1, "a"], [1, "a"], True),
        ([1], [True], False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, [], False),
    ],
)
def test_values_are_equal_when_rabbitmq_finds_them_equal(one, other, expected):
    assert equal_values(one, other) is expected
    assert equal_values(other, one) is expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("some", 'Invalid x-match field value "some"; expected all, any, all-with-x, or any-with-x'),
        (23, "Invalid x-match field type signedint (value 23); expected longstr"),
    ],
)
def test_an_unknown_x_match_is_refused_and_nothing_is_bound(router, value, text):
    assert refusal(router.bind, Binding("headers", "queue", "a", "", {"x-match": value})) == (406, text)
    assert router.bindings_of_source("headers") == []
    assert router.bindings_to_queue("a") == []


TABLES = st.dictionaries(st.sampled_from(["a", "b", "x-c"]), st.sampled_from([None, 1, 1.0, True, "1", b"1"]))


@given(TABLES, TABLES, st.sampled_from([None, "all", "any", "all-with-x", "any-with-x"]))
def test_headers_match_what_a_plain_matcher_matches(pattern, headers, kind):
    hits = [
        name in headers and (value is None or equal_values(value, headers[name]))
        for name, value in pattern.items()
        if "with-x" in (kind or "") or name != "x-c"
    ]
    expected = True in hits if "any" in (kind or "") else False not in hits
    arguments = pattern if kind is None else {**pattern, "x-match": kind}
    assert HeadersPattern(arguments).matches(headers) is expected


def test_an_exchange_says_whether_it_needs_more_than_the_key(router):
    assert [name for name, exchange in router.exchanges.items() if exchange.needs_message] == [
        "amq.headers",
        "amq.match",
        "headers",
    ]
    by_header = {"x-delayed-type": "x-consistent-hash", "hash-header": "h"}
    assert Exchange(name="x", type="x-delayed-message", arguments=by_header).needs_message
    assert not Exchange(name="x", type="topic", arguments={"hash-header": "h"}).needs_message


# ---- exchange to exchange, alternates, internal ----


def test_cycles_of_exchanges_end(router):
    router.bind(to_exchange("fanout", "topic", "k"))
    router.bind(to_exchange("topic", "direct", "#"))
    router.bind(to_exchange("direct", "fanout", "k"))
    router.bind(to_exchange("fanout", "fanout"))
    router.bind(to_queue("direct", "a", "k"))
    router.bind(to_queue("topic", "b", "*"))
    assert router.route("fanout", "k") == router.route("topic", "k") == router.route("direct", "k") == ("a", "b")


def test_an_alternate_takes_what_matched_nothing_and_each_exchange_has_its_own(router):
    router.declare(Exchange(name="first", arguments={"alternate-exchange": "second"}))
    router.declare(Exchange(name="second", arguments={"alternate-exchange": "fanout"}))
    router.bind(to_queue("first", "a", "one"))
    router.bind(to_queue("second", "b", "two"))
    router.bind(to_queue("fanout", "c"))
    assert router.route("first", "one") == ("a",)
    assert router.route("first", "two") == ("b",)
    assert router.route("first", "three") == ("c",)


def test_a_binding_to_an_exchange_that_leads_nowhere_is_a_match_for_the_alternate(router):
    router.declare(Exchange(name="first", arguments={"alternate-exchange": "fanout"}))
    router.bind(to_queue("fanout", "c"))
    assert router.route("first", "k") == ("c",)
    router.bind(to_exchange("first", "direct", "k"))
    assert router.route("first", "k") == ()


def test_of_several_keys_one_that_matches_keeps_the_alternate_out(router):
    router.declare(Exchange(name="first", arguments={"alternate-exchange": "fanout"}))
    router.bind(to_queue("first", "a", "one"))
    router.bind(to_queue("fanout", "c"))
    assert router.route_many("first", ["one", "two"]) == ("a",)
    assert router.route_many("first", ["three", "two"]) == ("c",)


def test_several_keys_are_a_union_without_repetition(router):
    router.bind(to_queue("direct", "a", "one"))
    router.bind(to_queue("direct", "b", "two"))
    router.bind(to_queue("direct", "a", "two"))
    assert router.route_many("direct", ["one", "two", "two"]) == ("a", "b")
    assert router.route_many("", ["b", "a", "none", "a"]) == ("a", "b")
    assert router.route_many("direct", ["one"]) == ("a",)
    assert refusal(router.route_many, "none", ["one", "two"])[0] == 404


def test_an_alternate_that_is_missing_or_comes_later_or_is_the_exchange_itself_does_no_harm(router):
    router.declare(Exchange(name="first", arguments={"alternate-exchange": "later"}))
    router.declare(Exchange(name="self", arguments={"alternate-exchange": "self"}))
    assert router.route("first", "k") == ()
    assert router.route("self", "k") == ()
    router.declare(Exchange(name="later", type="fanout"))
    router.bind(to_queue("later", "a"))
    assert router.route("first", "k") == ("a",)
    router.delete("later")
    assert router.route("first", "k") == ()


def test_the_default_exchange_as_an_alternate_sees_queues_that_come_and_go(router):
    router.declare(Exchange(name="first", arguments={"alternate-exchange": ""}))
    assert router.route("first", "new") == ()
    router.add_queue("new")
    assert router.route("first", "new") == ("new",)
    router.remove_queue("new")
    assert router.route("first", "new") == ()


def test_a_policys_alternate_counts_where_no_argument_names_one(router):
    router.declare(Exchange(name="argued", arguments={"alternate-exchange": "direct"}))
    router.bind(to_queue("fanout", "c"))
    for name in ("argued", "topic"):
        assert router.route(name, "k") == ()
        router.set_policy_alternate(name, "fanout")
    assert router.route("topic", "k") == ("c",)
    assert router.route("argued", "k") == ()
    router.set_policy_alternate("topic", None)
    assert router.route("topic", "k") == ()
    assert refusal(router.set_policy_alternate, "none", "fanout")[0] == 404


def test_a_policys_alternate_goes_with_its_exchange(router):
    router.set_policy_alternate("topic", "fanout")
    router.delete("topic")
    router.declare(Exchange(name="topic", type="topic"))
    assert router.alternate("topic") is None


def test_an_internal_exchange_takes_messages_of_exchanges_and_of_the_broker_only(router):
    router.declare(Exchange(name="inner", type="fanout", internal=True))
    router.bind(to_queue("inner", "a"))
    router.bind(to_exchange("direct", "inner", "k"))
    assert router.route("direct", "k") == ("a",)
    assert router.route("inner", "k", from_broker=True) == ("a",)
    refused = (403, "cannot publish to internal exchange 'inner' in vhost '/'")
    assert refusal(router.route, "inner", "k") == refused
    assert refusal(router.route_many, "inner", ["k", "l"]) == refused


def test_publishing_to_no_exchange_is_an_error(router):
    with pytest.raises(RoutingError) as caught:
        router.route("none", "k")
    assert (caught.value.reply_code, caught.value.text) == (404, "no exchange 'none' in vhost '/'")
    assert caught.value.reply_text == "NOT_FOUND - no exchange 'none' in vhost '/'"


# ---- bind, unbind, delete ----


def test_binding_twice_is_one_binding_and_arguments_make_another(router):
    assert router.bind(to_queue("direct", "a", "k"))
    version = router.version
    assert not router.bind(to_queue("direct", "a", "k"))
    assert router.version == version
    assert router.bind(to_queue("direct", "a", "k", size=1))
    assert router.bind(to_queue("direct", "a", "k", size=True))
    assert len(router.bindings_of_source("direct")) == len(router.bindings_to_queue("a")) == 3
    router.unbind(to_queue("direct", "a", "k"))
    assert router.route("direct", "k") == ("a",)
    assert [dict(left.arguments) for left in router.bindings_of_source("direct")] == [{"size": 1}, {"size": True}]


def test_a_queue_and_an_exchange_of_one_name_are_two_destinations(router):
    router.add_queue("fanout")
    router.bind(to_queue("fanout", "a"))
    assert router.bind(to_exchange("direct", "fanout", "k"))
    assert router.bind(to_queue("direct", "fanout", "k"))
    assert router.route("direct", "k") == ("a", "fanout")
    router.remove_queue("fanout")
    assert router.route("direct", "k") == ("a",)


def test_binding_what_does_not_exist_is_refused_and_unbinding_it_is_not(router):
    assert refusal(router.bind, to_queue("none", "a")) == (404, "no exchange 'none' in vhost '/'")
    assert refusal(router.bind, to_queue("direct", "none")) == (404, "no queue 'none' in vhost '/'")
    assert refusal(router.bind, to_exchange("direct", "none")) == (404, "no exchange 'none' in vhost '/'")
    for binding in (to_queue("none", "a"), to_queue("direct", "none"), to_queue("direct", "a", "never bound")):
        assert router.unbind(binding) == Removed()


def test_deleting_an_exchange_takes_its_bindings_on_both_sides(router):
    out, into, other = to_queue("direct", "a", "k"), to_exchange("topic", "direct", "#"), to_queue("topic", "b", "#")
    for binding in (out, into, other):
        router.bind(binding)
    declared = router.exchanges["direct"]
    removed = router.delete("direct")
    assert removed.exchanges == [declared]
    assert set(removed.bindings) == {out, into}
    assert list(router.all_bindings()) == [other]
    assert router.route("topic", "k") == ("b",)
    assert router.bindings_to_queue("a") == router.bindings_to_exchange("direct") == []


def test_deleting_is_refused_while_in_use_and_for_those_of_every_vhost(router):
    router.bind(to_queue("direct", "a", "k"))
    router.bind(to_exchange("direct", "topic", "k"))
    assert refusal(router.delete, "direct", if_unused=True) == (406, "exchange 'direct' in vhost '/' in use")
    assert [exchange.name for exchange in router.delete("topic", if_unused=True).exchanges] == ["topic"]
    text = "deletion of system exchange 'amq.topic' in vhost '/' not allowed"
    assert refusal(router.delete, "amq.topic") == (403, text)
    assert router.delete("none") == Removed()


def test_auto_delete_exchanges_go_with_their_last_binding_and_pull_others_along(router):
    for name in ("one", "two", "three"):
        router.declare(Exchange(name=name, type="fanout", auto_delete=True))
    router.bind(to_exchange("one", "two"))
    router.bind(to_exchange("two", "three"))
    router.bind(to_queue("three", "a"))
    router.bind(to_queue("three", "b"))
    assert router.unbind(to_queue("three", "b")).exchanges == []
    removed = router.remove_queue("a")
    assert [exchange.name for exchange in removed.exchanges] == ["three", "two", "one"]
    assert len(removed.bindings) == 3
    assert not {"one", "two", "three"} & router.exchanges.keys()


def test_an_auto_delete_exchange_that_was_never_bound_stays(router):
    router.declare(Exchange(name="fresh", auto_delete=True))
    router.bind(to_exchange("direct", "fresh", "k"))
    router.unbind(to_exchange("direct", "fresh", "k"))
    assert "fresh" in router.exchanges


def test_a_chain_of_a_thousand_auto_delete_exchanges_goes_at_once(router):
    for number in range(1000):
        router.declare(Exchange(name=f"x{number}", type="fanout", auto_delete=True))
        router.bind(to_exchange(f"x{number}", f"x{number - 1}") if number else to_queue("x0", "a"))
    assert router.route("x999", "") == ("a",)
    assert len(router.remove_queue("a").exchanges) == 1000


# ---- what is remembered ----


@dataclass
class CountedMatcher:
    """A matcher that counts how often it is asked."""

    inner: object
    asked: int = field(default=0)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def match(self, message):
        self.asked += 1
        return self.inner.match(message)


def counted(router: Router, name: str) -> CountedMatcher:
    matcher = CountedMatcher(router._sources[name].matcher)
    router._sources[name].matcher = matcher
    return matcher


def test_a_key_is_matched_once_until_a_binding_changes(router):
    matcher = counted(router, "topic")
    router.bind(to_queue("topic", "a", "#"))
    first = router.route("topic", "k")
    assert router.route("topic", "k") is first
    router.add_queue("a new queue does not matter to it")
    assert router.route("topic", "k") is first
    assert matcher.asked == 1
    router.bind(to_queue("topic", "b", "#"))
    assert router.route("topic", "k") == ("a", "b")
    router.unbind(to_queue("topic", "a", "#"))
    assert router.route("topic", "k") == ("b",)
    router.remove_queue("b")
    assert router.route("topic", "k") == ()
    assert matcher.asked == 4


def test_what_matches_nothing_is_remembered_too(router):
    matcher = counted(router, "direct")
    for _ in range(3):
        assert router.route("direct", "k") == ()
    assert matcher.asked == 1


def test_a_fanout_is_walked_once_for_all_keys(router):
    matcher = counted(router, "fanout")
    router.bind(to_queue("fanout", "a"))
    for number in range(100):
        assert router.route("fanout", f"key {number}") == ("a",)
    assert matcher.asked == 1


def test_a_fanout_that_leads_to_a_topic_is_walked_for_each_key(router):
    router.bind(to_exchange("fanout", "topic"))
    router.bind(to_queue("topic", "a", "k"))
    assert router.route("fanout", "k") == ("a",)
    assert router.route("fanout", "l") == ()


def test_the_memory_of_routes_is_bounded(router, monkeypatch):
    monkeypatch.setattr(router_module, "ROUTES_CACHED", 50)
    router.bind(to_queue("topic", "a", "#"))
    for number in range(500):
        assert router.route("topic", str(number)) == ("a",)
        assert len(router._routes) <= 50


def test_every_change_raises_the_version(router):
    changes = [
        lambda: router.declare(Exchange(name="new", auto_delete=True)),
        lambda: router.add_queue("new"),
        lambda: router.bind(to_queue("new", "new", "k")),
        lambda: router.set_policy_alternate("new", "topic"),
        lambda: router.unbind(to_queue("new", "new", "k")),
        lambda: router.remove_queue("new"),
        lambda: router.delete("direct"),
    ]
    for change in changes:
        before = router.version
        change()
        assert router.version > before


def test_the_end_of_a_queue_costs_its_own_bindings_only(router, scale):
    for number in range(scale.scale(20_000)):
        router.bind(to_queue("topic", "a", f"a.{number}"))
    for number in range(3):
        router.bind(to_queue("topic", "b", f"b.{number}"))
    trie = router._sources["topic"].matcher.trie
    before = trie.visited
    assert len(router.remove_queue("b").bindings) == 3
    assert trie.visited - before <= 6  # the words of its own patterns
