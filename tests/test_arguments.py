"""The arguments of a queue: the right ones get names and types, the wrong ones an error that says what was meant."""

from __future__ import annotations

import dataclasses
import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warren.errors import QueueArgumentError
from warren.queueing import arguments as arguments_module
from warren.queueing.arguments import ArgumentDifference, QueueArguments

parse = QueueArguments.parse

EVERY_ARGUMENT = {
    "x-max-priority": 10,
    "x-message-ttl": 60_000,
    "x-expires": 1_800_000,
    "x-max-length": 1000,
    "x-max-length-bytes": 1_000_000,
    "x-overflow": "reject-publish-dlx",
    "x-dead-letter-exchange": "dlx",
    "x-dead-letter-routing-key": "dead",
    "x-delivery-limit": 20,
    "x-single-active-consumer": True,
    "x-backing-queue": "sqlite",
}
WITHOUT_EFFECT = {
    "x-queue-type": "quorum",
    "x-queue-version": 2,
    "x-queue-mode": "lazy",
    "x-queue-master-locator": "min-masters",
    "x-queue-leader-locator": "balanced",
}


def test_the_examples_of_the_module_run():
    assert doctest.testmod(arguments_module).failed == 0


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_queue_without_arguments_has_no_limits_and_is_variable(nothing):
    arguments = parse(nothing)
    assert arguments == QueueArguments()
    assert arguments.overflow == "drop-head"
    assert arguments.backing_queue == "variable"
    assert arguments.single_active_consumer is False
    assert arguments.max_length is None


def test_every_argument_becomes_a_field():
    arguments = parse(EVERY_ARGUMENT)
    assert arguments == QueueArguments(
        max_priority=10,
        message_ttl_ms=60_000,
        expires_ms=1_800_000,
        max_length=1000,
        max_length_bytes=1_000_000,
        overflow="reject-publish-dlx",
        dead_letter_exchange="dlx",
        dead_letter_routing_key="dead",
        delivery_limit=20,
        single_active_consumer=True,
        backing_queue="sqlite",
    )
    assert len(EVERY_ARGUMENT) == len(dataclasses.fields(arguments))


def test_arguments_about_how_rabbitmq_keeps_a_queue_have_no_effect():
    assert parse(WITHOUT_EFFECT) == QueueArguments()
    assert parse({"x-queue-type": "classic", "x-queue-version": 1, "x-queue-mode": "default"}) == QueueArguments()


def test_arguments_of_the_client_have_no_effect():
    assert parse({"owner": "team-a", "": 1, "length": 3}) == QueueArguments()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-max-priority", 1),
        ("x-max-priority", 255),
        ("x-message-ttl", 0),
        ("x-message-ttl", 315_360_000_000),
        ("x-expires", 1),
        ("x-expires", 315_360_000_000),
        ("x-max-length", 0),
        ("x-max-length", 2**63 - 1),
        ("x-max-length-bytes", 0),
        ("x-delivery-limit", 0),
        ("x-dead-letter-exchange", ""),
        ("x-dead-letter-exchange", "ä" * 127),
    ],
)
def test_the_outermost_values_are_taken(name, value):
    assert value in dataclasses.astuple(parse({name: value}))


@pytest.mark.parametrize("kind", ["sqlite", "volatile"])
def test_priorities_go_with_every_backing_queue(kind):
    arguments = parse({"x-max-priority": 3, "x-backing-queue": kind})
    assert (arguments.max_priority, arguments.backing_queue) == (3, kind)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("x-max-priority", -1, "an integer from 0 to 255"),
        ("x-max-priority", 256, "an integer from 0 to 255"),
        ("x-max-priority", 1.5, "an integer from 0 to 255"),
        ("x-message-ttl", -1, "an integer from 0 to 315360000000 milliseconds"),
        ("x-message-ttl", 315_360_000_001, "an integer from 0 to 315360000000 milliseconds"),
        ("x-message-ttl", "60000", "an integer from 0 to 315360000000 milliseconds"),
        ("x-expires", 0, "an integer from 1 to 315360000000 milliseconds"),
        ("x-max-length", -1, "an integer of 0 or more"),
        ("x-max-length", True, "an integer of 0 or more"),
        ("x-max-length", None, "an integer of 0 or more"),
        ("x-max-length-bytes", "1GB", "an integer of 0 or more"),
        ("x-delivery-limit", -1, "an integer of 0 or more"),
        ("x-overflow", "drop-tail", "'drop-head' or 'reject-publish' or 'reject-publish-dlx'"),
        ("x-overflow", ["drop-head"], "'drop-head' or 'reject-publish' or 'reject-publish-dlx'"),
        ("x-dead-letter-exchange", 7, "text"),
        ("x-dead-letter-exchange", b"dlx", "text"),
        ("x-dead-letter-exchange", "\ud800", "text, and this has characters that UTF-8 cannot carry"),
        ("x-dead-letter-exchange", "ä" * 128, "text of at most 255 bytes, and this has 256"),
        ("x-single-active-consumer", "true", "True or False"),
        ("x-single-active-consumer", 1, "True or False"),
        ("x-backing-queue", "lmdb", "'variable' or 'volatile' or 'sqlite'"),
        (
            "x-queue-type",
            "stream",
            "'classic' or 'quorum'. In place of a stream take a durable queue: Spark reads it without consuming",
        ),
        ("x-queue-type", "ring", "'classic' or 'quorum'"),
        ("x-queue-version", 3, "1 or 2"),
        ("x-queue-version", True, "1 or 2"),
        ("x-queue-version", 1.0, "1 or 2"),
        ("x-queue-version", "2", "1 or 2"),
        ("x-queue-mode", "eager", "'default' or 'lazy'"),
        ("x-queue-leader-locator", 1, "text"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(name, value, allowed):
    with pytest.raises(QueueArgumentError) as caught:
        parse({name: value})
    assert str(caught.value) == f"queue argument {name}={value!r} is not possible; {name} is {allowed}"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("x-max-lenght", "x-max-length"),
        ("x-max-size-bytes", "x-max-length-bytes"),
        ("x-expire", "x-expires"),
        ("x-max_length", "x-max-length"),
        ("X-Max-Length", "x-max-length"),
        ("max-length", "x-max-length"),
        ("max_length", "x-max-length"),
        ("x_max_length", "x-max-length"),
        ("message-ttl", "x-message-ttl"),
    ],
)
def test_an_argument_with_a_slip_in_its_name_is_refused_with_the_one_that_was_meant(name, meant):
    with pytest.raises(QueueArgumentError) as caught:
        parse({name: 10})
    assert str(caught.value) == f"unknown queue argument {name}=10; did you mean {meant}?"


def test_an_unknown_argument_like_no_other_is_refused_with_all_that_there_are():
    with pytest.raises(
        QueueArgumentError, match=r"unknown queue argument x-zzz='a'; there are x-max-priority, x-message"
    ):
        parse({"x-zzz": "a"})


def test_the_format_of_the_store_is_not_an_argument():
    with pytest.raises(QueueArgumentError, match="unknown queue argument x-store-index='lmdb'"):
        parse({"x-store-index": "lmdb"})


def test_an_argument_whose_name_is_no_text_is_refused():
    with pytest.raises(QueueArgumentError, match="queue argument 7 has a int for a name; it is text"):
        parse({7: 1})


def test_a_dead_letter_routing_key_needs_a_dead_letter_exchange():
    with pytest.raises(QueueArgumentError, match="x-dead-letter-routing-key='dead' has no effect without"):
        parse({"x-dead-letter-routing-key": "dead"})


def test_an_error_of_an_argument_is_a_value_error_too():
    with pytest.raises(ValueError, match="x-max-length=-5"):
        parse({"x-max-length": -5})


# ---- redeclaring ----


@given(st.sets(st.sampled_from(sorted(EVERY_ARGUMENT))), st.sets(st.sampled_from(sorted(EVERY_ARGUMENT))))
def test_a_queue_is_the_same_exactly_when_its_arguments_are(ours, theirs):
    for names in (ours, theirs):
        if "x-dead-letter-routing-key" in names:
            names.add("x-dead-letter-exchange")
    mine = parse({name: EVERY_ARGUMENT[name] for name in ours})
    yours = parse({name: EVERY_ARGUMENT[name] for name in theirs})
    assert {difference.argument for difference in mine.differences(yours)} == ours ^ theirs
    assert (mine.same_as(yours) is None) == (ours == theirs)


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ({"x-max-length": 10}, {"x-max-length": 20}, "x-max-length=10, not 20"),
        ({"x-max-length": 10}, {}, "x-max-length=10, not unset"),
        ({}, {"x-message-ttl": 0}, "x-message-ttl unset, not 0"),
        ({}, {"x-overflow": "reject-publish"}, "x-overflow='drop-head', not 'reject-publish'"),
        ({"x-dead-letter-exchange": ""}, {}, "x-dead-letter-exchange='', not unset"),
        ({"x-max-priority": 5, "x-expires": 9}, {"x-expires": 8}, "x-max-priority=5, not unset; x-expires=9, not 8"),
    ],
)
def test_the_difference_to_a_redeclaration_is_told_as_ours_not_theirs(ours, theirs, text):
    assert parse(ours).same_as(parse(theirs)) == text


def test_a_default_that_is_spelled_out_makes_no_difference():
    spelled_out = {
        "x-overflow": "drop-head",
        "x-backing-queue": "variable",
        "x-single-active-consumer": False,
        "x-queue-type": "classic",
    }
    assert parse(spelled_out).same_as(parse({})) is None


def test_a_difference_can_be_had_in_parts():
    assert parse({"x-max-length": 10}).differences(parse({"x-max-length": 20})) == [
        ArgumentDifference("x-max-length", ours=10, theirs=20)
    ]
