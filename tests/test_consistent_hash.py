"""The ring of a consistent hash exchange: who gets a key, and what moves when queues come and go."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.test_routing import refusal, to_queue
from warren.routing import consistent_hash
from warren.routing.consistent_hash import ConsistentHash, weight_of
from warren.routing.exchange import Exchange
from warren.routing.router import Router


@pytest.fixture
def router() -> Router:
    """One with queues a, b, c and an exchange that is named by its type."""
    router = Router("/")
    for name in ("a", "b", "c"):
        router.add_queue(name)
    router.declare(Exchange(name="x-consistent-hash", type="x-consistent-hash"))
    return router


def ring_of(weights: dict[str, str], **arguments: object) -> ConsistentHash:
    ring = ConsistentHash({name.replace("_", "-", 1): value for name, value in arguments.items()})
    for queue, weight in weights.items():
        ring.add(to_queue("x", queue, weight))
    return ring


def owner(ring: ConsistentHash, *message: object) -> str:
    [found] = ring.match(*message)
    return found.destination


KEYS_TO_SPREAD = [f"key {number}" for number in range(4000)]


def test_keys_spread_by_weight():
    ring = ring_of({"a": "10", "b": "10", "c": "20"})
    shares = Counter(owner(ring, key) for key in KEYS_TO_SPREAD)
    assert 0.19 < shares["a"] / 4000 < 0.31
    assert 0.19 < shares["b"] / 4000 < 0.31
    assert 0.42 < shares["c"] / 4000 < 0.58


def test_a_queue_that_comes_only_takes_and_one_that_goes_only_gives():
    ring = ring_of({"a": "1", "b": "1"})
    before = {key: owner(ring, key) for key in KEYS_TO_SPREAD}
    ring.add(to_queue("x", "c", "1"))
    during = {key: owner(ring, key) for key in KEYS_TO_SPREAD}
    moved = {key for key in KEYS_TO_SPREAD if before[key] != during[key]}
    assert {during[key] for key in moved} == {"c"}
    ring.remove(to_queue("x", "c", "1"))
    assert {key: owner(ring, key) for key in KEYS_TO_SPREAD} == before


def test_where_a_key_goes_does_not_depend_on_the_order_of_binding_nor_on_the_process():
    one = ring_of({"a": "1", "b": "2", "c": "3"})
    other = ring_of({"c": "3", "a": "1", "b": "2"})
    assert [owner(one, key) for key in KEYS_TO_SPREAD] == [owner(other, key) for key in KEYS_TO_SPREAD]
    # A change of these is a change of where everybody's messages go.
    assert [owner(one, f"customer {number}") for number in range(8)] == PINNED_OWNERS


PINNED_OWNERS = ["c", "b", "b", "c", "c", "c", "b", "c"]


def test_a_queue_bound_twice_has_the_sum_of_its_weights():
    twice = ring_of({"a": "1", "b": "2"})
    twice.add(to_queue("x", "a", "3"))
    once = ring_of({"a": "4", "b": "2"})
    assert [owner(twice, key) for key in KEYS_TO_SPREAD] == [owner(once, key) for key in KEYS_TO_SPREAD]
    twice.remove(to_queue("x", "a", "1"))
    three = ring_of({"a": "3", "b": "2"})
    assert [owner(twice, key) for key in KEYS_TO_SPREAD] == [owner(three, key) for key in KEYS_TO_SPREAD]


def test_a_key_belongs_to_the_next_point_and_beyond_the_last_one_to_the_first():
    ring = ring_of({"a": "1", "b": "1", "c": "1"})
    points = {point: name for name in ("a", "b", "c") for point in consistent_hash._points(f"queue\0{name}", 64)}
    for key in KEYS_TO_SPREAD:
        behind = [point for point in points if point >= consistent_hash._hash(key)]
        assert owner(ring, key) == points[min(behind or points)]


def test_a_ring_whose_queues_all_went_is_empty():
    ring = ring_of({"a": "1", "b": "2"})
    owner(ring, "k")
    ring.remove(to_queue("x", "a", "1"))
    ring.remove(to_queue("x", "b", "2"))
    assert list(ring.match("k")) == []
    assert not ring._weights


def test_a_header_or_a_property_may_be_hashed_in_place_of_the_key():
    plain = ring_of({"a": "1", "b": "1"})
    by_header = ring_of({"a": "1", "b": "1"}, hash_header="customer")
    by_property = ring_of({"a": "1", "b": "1"}, hash_property="message_id")
    for key in KEYS_TO_SPREAD[:50]:
        assert owner(by_header, "any", {"customer": key}) == owner(plain, key)
        assert owner(by_property, "any", None, {"message_id": key}) == owner(plain, key)
        assert owner(by_header, key, {}) == owner(plain, "")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("", 'The binding key must be an integer: ""'),
        ("1.5", 'The binding key must be an integer: "1.5"'),
        ("²", 'The binding key must be an integer: "²"'),
        ("0", "The binding key must be greater than 0"),
        ("-3", "The binding key must be greater than 0"),
    ],
)
def test_a_binding_key_that_is_no_weight_is_refused(router, key, text):
    assert refusal(router.bind, to_queue("x-consistent-hash", "a", key)) == (406, text)
    assert list(router.all_bindings()) == []


def test_a_weight_beyond_reason_is_refused_with_the_remedy():
    assert weight_of("10000") == 10_000
    code, text = refusal(weight_of, "1" + "0" * 5000)
    assert code == 406
    assert "only the ratio of weights counts" in text
    assert len(text) < 200


def test_a_consistent_hash_exchange_routes_to_one_queue_and_by_the_messages_own_key(router):
    for queue in ("a", "b", "c"):
        router.bind(to_queue("x-consistent-hash", queue, "1"))
    for number in range(50):
        [queue] = router.route("x-consistent-hash", f"key {number}")
        assert router.route_many("x-consistent-hash", [f"key {number}", "key of CC"]) == (queue,)


def test_a_hash_of_a_header_is_not_remembered_by_routing_key(router):
    router.declare(Exchange(name="by-header", type="x-consistent-hash", arguments={"hash-header": "h"}))
    router.bind(to_queue("by-header", "a", "1"))
    router.bind(to_queue("by-header", "b", "1"))
    found = {router.route("by-header", "k", lambda number=number: {"h": str(number)}) for number in range(50)}
    assert found == {("a",), ("b",)}


def test_a_hash_of_a_property_reads_the_properties(router):
    router.declare(Exchange(name="by-property", type="x-consistent-hash", arguments={"hash-property": "message_id"}))
    router.bind(to_queue("by-property", "a", "1"))
    router.bind(to_queue("by-property", "b", "1"))
    found = {
        router.route("by-property", "k", None, lambda number=number: {"message_id": str(number)})
        for number in range(50)
    }
    assert found == {("a",), ("b",)}
