"""The topic trie against a matcher that is slow and plain, and what its operations cost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warren.routing.binding import Binding
from warren.routing.router import Exchange, Router
from warren.routing.topic_trie import TopicTrie, words


def binding(pattern: str, queue: str = "q") -> Binding:
    return Binding("topics", "queue", queue, pattern)


def plain_match(pattern: list[str], key: list[str]) -> bool:
    """What a topic pattern means, and nothing about how to find it fast."""
    if not pattern:
        return not key
    if pattern[0] == "#":
        return any(plain_match(pattern[1:], key[taken:]) for taken in range(len(key) + 1))
    return bool(key) and pattern[0] in ("*", key[0]) and plain_match(pattern[1:], key[1:])


def matched(trie: TopicTrie, key: str) -> list[str]:
    return [found.routing_key for found in trie.match(key)]


PATTERNS = st.lists(st.sampled_from(["a", "b", "", "*", "#"]), max_size=6).map(".".join)
KEYS = st.lists(st.sampled_from(["a", "b", "", "c", "*", "#"]), max_size=6).map(".".join)


# ---- matching ----


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("#", "", True),
        ("*", "", False),
        ("", "", True),
        ("", "a", False),
        ("a.*", "a.", True),
        ("a.#", "a", True),
        ("a.#", "a.b.c", True),
        ("#.a", "a", True),
        ("#.a.#", "b.b.a.b", True),
        ("#.a.#", "b.b", False),
        ("*.*", "a", False),
        ("*.#", "a", True),
        ("a", "A", False),
        ("a.b", "a*b", False),
        ("#.#", "", True),
        ("#.*", "", False),
        ("ab*", "abc", False),
        ("*", "a.b", False),
    ],
)
def test_words_and_wildcards_mean_what_they_mean_in_rabbitmq(pattern, key, expected):
    trie = TopicTrie()
    trie.add(binding(pattern))
    assert (matched(trie, key) == [pattern]) is expected


@given(patterns=st.sets(PATTERNS, max_size=12), keys=st.lists(KEYS, min_size=1, max_size=6))
def test_the_trie_matches_what_a_plain_matcher_matches_each_once(patterns, keys):
    trie = TopicTrie()
    for pattern in patterns:
        trie.add(binding(pattern))
    for key in keys:
        expected = sorted(pattern for pattern in patterns if plain_match(words(pattern), words(key)))
        assert sorted(matched(trie, key)) == expected


@given(data=st.data(), patterns=st.lists(PATTERNS, min_size=1, max_size=15, unique=True))
def test_after_unbinding_the_rest_matches_as_before_and_the_nodes_are_those_of_a_new_trie(data, patterns):
    gone = set(data.draw(st.lists(st.sampled_from(patterns), unique=True)))
    trie, fresh = TopicTrie(), TopicTrie()
    for pattern in patterns:
        trie.add(binding(pattern))
    for pattern in gone:
        trie.remove(binding(pattern))
    for pattern in patterns:
        if pattern not in gone:
            fresh.add(binding(pattern))
    assert trie.node_count() == fresh.node_count()
    key = data.draw(KEYS)
    assert sorted(matched(trie, key)) == sorted(matched(fresh, key))


def test_many_queues_on_one_pattern_come_and_go_one_by_one():
    trie = TopicTrie()
    bindings = [binding("a.*", f"q{number}") for number in range(5)]
    for one in bindings:
        trie.add(one)
    for left in range(5, 0, -1):
        assert [found.destination for found in trie.match("a.b")] == [one.destination for one in bindings[:left]]
        trie.remove(bindings[left - 1])
    assert trie.node_count() == 0


# ---- what it costs ----


def test_binding_and_unbinding_visit_at_most_as_many_nodes_as_the_pattern_has_words_at_any_size(scale):
    trie = TopicTrie()
    patterns = [f"eu.*.sensor{number % 97}.{number}.#" for number in range(scale.scale(100_000))]
    for pattern in patterns:
        before = trie.visited
        trie.add(binding(pattern))
        assert trie.visited - before <= 5
    for pattern in patterns:
        before = trie.visited
        trie.remove(binding(pattern))
        assert trie.visited - before <= 5
    assert trie.node_count() == 0


def test_a_match_does_not_look_at_bindings_that_cannot_match(scale):
    trie = TopicTrie()
    trie.add(binding("#.alarm"))
    trie.add(binding("site.*.alarm"))
    for number in range(scale.scale(100_000)):
        trie.add(binding(f"site.{number}.reading"))
    before = trie.visited
    assert sorted(matched(trie, "site.7.alarm")) == ["#.alarm", "site.*.alarm"]
    assert trie.visited - before < 12


def test_patterns_full_of_hashes_do_not_explode():
    trie = TopicTrie()
    pattern = ".".join(["#", "a"] * 20 + ["#"])
    trie.add(binding(pattern))
    assert matched(trie, ".".join("a" * 60)) == [pattern]
    assert matched(trie, ".".join("a" * 19)) == []
    assert trie.visited < 60 * 41 + 19 * 41 + 100


SHAPES: dict[str, Callable[[int], str]] = {
    "the last word differs": lambda number: f"region{number % 10}.site{number % 1000}.sensor.{number}",
    "the first word differs": lambda number: f"device-{number}.#",
    "words of its own on the way": lambda number: f"*.customer-{number}.order-{number}.changed",
    "in pairs": lambda number: f"customer-{number // 2}.{number % 2}",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("queues", [1, 50, 10_000_000], ids=["one queue", "some queues", "a queue for each"])
def test_a_binding_of_a_topic_exchange_costs_at_most_500_bytes(scale, queues, shape):
    key = SHAPES[shape]
    count = scale.scale(100_000)
    router = Router()
    router.declare(Exchange(name="topics", type="topic"))
    for number in range(min(count, queues)):
        router.add_queue(f"queue-{number}")
    tracemalloc.start()
    try:
        for number in range(count):
            router.bind(binding(key(number), f"queue-{number % queues}"))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert router.route("topics", key(7).replace("#", "on").replace("*", "eu")) == (f"queue-{7 % queues}",)
    assert used / count < 500
