"""Which policy counts, how operators' policies are laid over it, and what is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warren.queueing.arguments import QueueArguments
from warren.routing.errors import PolicyError
from warren.routing.policies import LIMITS, Policy, effective, matching, queue_arguments


def policy(
    name: str = "p", pattern: str = "", priority: int = 0, apply_to: str = "all", **definition: object
) -> Policy:
    keys = {key.replace("_", "-"): value for key, value in definition.items()} or {"max-length": 1}
    return Policy(name=name, pattern=pattern, priority=priority, apply_to=apply_to, definition=keys)


def test_the_highest_priority_counts_whole_and_the_others_do_nothing():
    low = policy("low", priority=1, max_length=1, expires=1)
    high = policy("high", priority=2, max_length=2)
    for policies in ([low, high], [high, low]):
        assert matching(policies, "queue", "q") is high
        assert effective(policies, [], "queue", "q") == {"max-length": 2}


def test_equal_priorities_are_decided_by_name_in_whatever_order_they_come():
    one, two = policy("a"), policy("b")
    assert matching([one, two], "queue", "q") is matching([two, one], "queue", "q") is one


def test_a_pattern_is_found_anywhere_unless_it_is_anchored():
    assert policy(pattern="der").covers("queue", "orders")
    assert not policy(pattern="^der").covers("queue", "orders")
    assert not policy(pattern="^order$").covers("queue", "orders")
    assert policy(pattern="").covers("queue", "orders")


@pytest.mark.parametrize(
    ("apply_to", "queue", "exchange"),
    [
        ("queues", True, False),
        ("classic_queues", True, False),
        ("exchanges", False, True),
        ("all", True, True),
    ],
)
def test_a_policy_applies_to_what_it_says(apply_to, queue, exchange):
    one = policy(apply_to=apply_to)
    assert (one.covers("queue", "n"), one.covers("exchange", "n")) == (queue, exchange)
    assert not one.covers("exchange", "")


def test_of_limits_the_lower_one_counts_and_else_the_operators():
    users = policy(max_length=10, message_ttl=5, overflow="drop-head", dead_letter_exchange="users")
    operators = policy(max_length=3, message_ttl=50, overflow="reject-publish", delivery_limit=7)
    assert effective([users], [operators], "queue", "q") == {
        "max-length": 3,
        "message-ttl": 5,
        "overflow": "reject-publish",
        "dead-letter-exchange": "users",
        "delivery-limit": 7,
    }
    assert effective([], [operators], "queue", "q") == dict(operators.definition)
    assert effective([], [], "queue", "q") == {}


DEFINITIONS = st.dictionaries(st.sampled_from(sorted(LIMITS)), st.integers(1, 100), min_size=1)


@given(DEFINITIONS, DEFINITIONS, st.dictionaries(st.sampled_from(sorted(LIMITS)), st.integers(1, 100)))
def test_no_limit_is_ever_above_one_that_somebody_set(users, operators, arguments):
    asked = {f"x-{key}": value for key, value in arguments.items()}
    said = effective([policy(**users)], [policy(**operators)], "queue", "q")
    result = queue_arguments(said, asked)
    for key in LIMITS:
        values = [table[key] for table in (users, operators, arguments) if key in table]
        assert result.get(f"x-{key}") == min(values, default=None)
    QueueArguments.parse(result)


def test_an_argument_wins_over_a_policy_where_there_is_no_lower_one():
    said = {
        "overflow": "reject-publish",
        "dead-letter-exchange": "policy",
        "queue-mode": "lazy",
        "alternate-exchange": "x",
    }
    assert queue_arguments(said, {"x-overflow": "drop-head", "x-max-priority": 5}) == {
        "x-overflow": "drop-head",
        "x-max-priority": 5,
        "x-dead-letter-exchange": "policy",
    }


def test_a_dead_letter_key_of_a_policy_needs_an_exchange_from_somewhere():
    said = {"dead-letter-routing-key": "k"}
    assert queue_arguments(said, {}) == {}
    with_exchange = queue_arguments(said, {"x-dead-letter-exchange": "dlx"})
    assert QueueArguments.parse(with_exchange).dead_letter_routing_key == "k"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"pattern": "("}, r"policy 'p': pattern '\(' is no regular expression: missing \)"),
        ({"pattern": None}, "pattern None is a NoneType; it is a str"),
        ({"name": ""}, "a policy needs a name, not ''"),
        (
            {"apply_to": "streams"},
            "apply_to 'streams' is not possible; it is one of queues, exchanges, all, classic_queues",
        ),
        ({"priority": "1"}, "priority '1' is not possible; it is an integer"),
        ({"priority": True}, "priority True is not possible"),
        ({"definition": {}}, "definition {} is not possible; it is a table of at least one key"),
        ({"definition": {"max-lenght": 1}}, "unknown key max-lenght=1; did you mean max-length?"),
        ({"definition": {"zzz": 1}}, "unknown key zzz=1; the keys are alternate-exchange, backing-queue"),
        ({"definition": {"max-length": -1}}, "max-length=-1 is not possible; max-length is an integer of 0 or more"),
        ({"definition": {"max-length": True}}, "max-length=True is not possible"),
        ({"definition": {"max-length": 2**63}}, "is not possible"),
        ({"definition": {"expires": 0}}, "expires=0 is not possible; expires is an integer from 1 to 315360000000"),
        ({"definition": {"overflow": "drop"}}, "overflow is one of drop-head, reject-publish, reject-publish-dlx"),
        ({"definition": {"alternate-exchange": 5}}, "alternate-exchange is text of at most 255 bytes of UTF-8"),
        ({"definition": {"alternate-exchange": "\ud800"}}, "alternate-exchange is text of at most 255 bytes of UTF-8"),
    ],
)
def test_what_cannot_be_is_refused_with_the_value_and_what_is_allowed(given, text):
    arguments = {"name": "p", "pattern": "", "definition": {"max-length": 1}, **given}
    with pytest.raises(PolicyError) as caught:
        Policy(**arguments)
    assert text in str(caught.value) or re.search(text, str(caught.value))


def test_keys_of_rabbitmqs_housekeeping_are_taken_and_reach_no_queue():
    housekeeping = {"ha-mode": "all", "queue-mode": "lazy", "queue-version": 2, "ha-params": ["anything"]}
    one = Policy(name="p", pattern="", definition=housekeeping)
    assert queue_arguments(effective([one], [], "queue", "q"), {}) == {}
