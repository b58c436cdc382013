"""The harness of differential/ against Warren alone: what it sends, what it sees, and that it tells two brokers apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from differential import alarms, programs
from differential.accepted import ACCEPTED, IGNORED_HEADERS, explain
from differential.compare import Difference, Side, run, run_patiently, shrink, source
from differential.handshakes import ACCEPTED_HANDSHAKES
from differential.programs import CLIENT_METHODS, Step, make
from differential.tour import ELSEWHERE, NEVER_SENT, TOUR
from differential.wire import METHOD, Lost, Wire, frame
from warren.amqp.methods import BY_NAME
from warren.testing import RunningBroker, running_broker


@pytest.fixture(scope="module")
def broker():
    with running_broker() as running:
        yield running


@pytest.fixture
def two_sides(broker: RunningBroker):
    """The same program on two brokers that are both Warren."""
    with running_broker() as other:
        sides = Side("one", broker.port, 0.001), Side("other", other.port, 0.001)
        yield sides
        for side in sides:
            side.close()


# ---- the wire ----


def test_a_message_comes_back_with_its_body_and_properties(broker):
    properties = {"content_type": "text/plain", "headers": {"a": [1, {"b": True}]}, "delivery_mode": 2}
    body = bytes(range(256)) * 1200  # more than one frame
    with Wire(broker.port) as wire:
        wire.open_channel(1)
        wire.send(1, "queue.declare", queue="wire", exclusive=True)
        wire.publish(1, body, properties, routing_key="wire")
        wire.send(1, "basic.get", queue="wire", no_ack=True)
        got = wire.wait(lambda event: event.name == "basic.get-ok")
    assert (got.body, got.properties) == (body, properties)
    assert got.arguments["routing_key"] == "wire"


def test_a_channel_that_was_closed_by_an_error_can_be_opened_again(broker):
    with Wire(broker.port) as wire:
        wire.open_channel(1)
        wire.send(1, "queue.purge", queue="there is none")
        closed = wire.wait(lambda event: event.name == "channel.close")
        assert closed.arguments["reply_code"] == 404
        assert wire.open_channels == set()
        wire.open_channel(1)
        assert wire.open_channels == {1}


def test_any_bytes_can_be_sent_as_a_method_and_the_answer_is_seen(broker):
    with Wire(broker.port) as wire:
        wire.open_channel(1)
        wire.write(frame(METHOD, 1, bytes.fromhex("03e70001")))
        closed = wire.wait(lambda event: event.name == "connection.close")
        assert closed.arguments["reply_code"] == 503
        assert wire.closed
        with pytest.raises(Lost):
            wire.wait(lambda event: True)


def test_a_wait_ends_when_there_is_no_answer(broker):
    with Wire(broker.port) as wire, pytest.raises(Lost, match="no answer"):
        wire.wait(lambda event: True, seconds=0.05)


# ---- programs ----


def test_the_same_seed_makes_the_same_program():
    assert make("1 2") == make("1 2")
    assert make("1 2") != make("1 3")


def test_a_program_as_python_is_that_program():
    for number in range(50):
        program = make(number)
        text = "[" + ", ".join(step.source() for step in program) + "]"
        assert eval(text, {"Step": Step}) == program  # our own text


def test_every_run_sends_every_method_that_a_client_may_send():
    """By the programs that are written by hand: what is covered does not depend on a seed."""
    assert set(CLIENT_METHODS) == {step.method for program in TOUR.values() for step in program}


def test_a_broker_does_not_differ_from_itself_on_the_tour(two_sides):
    assert [name for name, program in TOUR.items() if run(program, *two_sides) is not None] == []


def test_the_tour_makes_a_broker_send_every_method_of_its_own(broker):
    side = Side("Warren", broker.port, 0.001)
    for program in TOUR.values():
        side.reset()
        for step in program:
            side.do(step)
    side.close()
    answers = set(BY_NAME) - set(CLIENT_METHODS) - set(NEVER_SENT) - set(ELSEWHERE)
    assert answers - set(side.seen) == set()


def test_an_alarm_is_told_and_its_end(broker):
    def set_alarm(is_set: bool) -> None:
        broker.call(lambda: broker.broker.vhosts["/"].set_alarm("memory", is_set))

    assert alarms.said(broker.port, set_alarm) == [
        ("connection.blocked", {"reason": "low on memory"}),
        ("connection.unblocked", {}),
    ]


def test_methods_of_clients_are_told_from_those_of_brokers():
    assert {"queue.declare", "basic.ack", "channel.close-ok", "tx.commit"} <= set(CLIENT_METHODS)
    assert not {"queue.declare-ok", "basic.deliver", "connection.start"} & set(CLIENT_METHODS)


# ---- comparing ----


@pytest.mark.parametrize("number", range(6))
def test_a_broker_does_not_differ_from_itself(two_sides, number):
    program = make(f"self {number}")
    difference = run(program, *two_sides) and run_patiently(program, *two_sides)
    assert difference is None or difference.accepted, "\n".join(difference.lines())


def test_a_step_sees_answers_deliveries_confirms_and_counts(broker):
    side = Side("Warren", broker.port, 0.001)
    try:
        side.do(Step("queue.declare", {"queue": "q1"}))
        side.do(Step("confirm.select"))
        seen = side.do(Step("basic.publish", {"routing_key": "q1"}, body=b"m", times=2))
        assert seen["connection 0 channel 1: confirmed"] == {1, 2}
        assert (seen["queue q1"], seen["queue q2"]) == ((2, 0), None)
        seen = side.do(Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}))
        assert seen["connection 0 channel 1: answers"] == [("basic.consume-ok", {"consumer_tag": "c1"})]
        assert seen["connection 0 channel 1: deliveries to c1"] == [(b"m", False, ("", "q1"), {})] * 2
        assert seen["queue q1"] == (0, 1)
        side.do(Step("basic.ack", {"delivery_tag": "oldest"}))
        seen = side.do(Step("basic.nack", {"delivery_tag": "newest", "requeue": True}))
        assert seen["connection 0 channel 1: deliveries to c1"] == [(b"m", True, ("", "q1"), {})]
        seen = side.do(Step("queue.delete", {"queue": "q1"}))
        assert seen["connection 0 channel 1: cancelled"] == {"c1"}
    finally:
        side.close()


def test_exclusive_queues_are_counted_through_their_own_connection(broker):
    side = Side("Warren", broker.port, 0.001)
    try:
        side.do(Step("queue.declare", {"queue": "q1", "exclusive": True}))
        assert side.do(Step("basic.publish", {"routing_key": "q1"}, body=b"m"))["queue q1"] == (1, 0)
        assert side.do(Step("drop"))["queue q1"] is None
    finally:
        side.close()


def test_a_settlement_without_a_delivery_is_no_step(broker):
    side = Side("Warren", broker.port, 0.001)
    try:
        assert side.do(Step("basic.ack", {"delivery_tag": "oldest"})) == {}
    finally:
        side.close()


def test_a_difference_is_found_and_shrunk_to_the_steps_that_matter(two_sides):
    ours, theirs = two_sides
    theirs.reset = lambda: None  # keeps the queue that only this one has
    theirs.do(Step("queue.declare", {"queue": "q3"}))
    difference = run(
        [
            Step("basic.qos", {"prefetch_count": 1}),
            Step("queue.declare", {"queue": "q1"}),
            Step("queue.purge", {"queue": "q3"}),
        ],
        ours,
        theirs,
    )
    assert isinstance(difference, Difference)
    smallest = shrink(difference, ours, theirs)
    assert len(smallest.program) == 1
    assert "replay(" in source(smallest)
    del theirs.reset


def test_every_accepted_difference_has_a_reason_and_explains_nothing_by_itself():
    for rule in ACCEPTED:
        assert rule.reason
        assert len({other.name for other in ACCEPTED}) == len(ACCEPTED)
    nothing = [Step("queue.declare", {"queue": "q1"})]
    seen = {"connection 0 channel 1: answers": [("channel.close", {"reply_code": 404})]}
    assert explain(nothing, {}, seen) is None
    assert programs.QUEUES


def test_the_page_has_every_accepted_difference_with_its_reason():
    page = (Path(__file__).resolve().parent.parent / "docs" / "differential.md").read_text()
    for rule in ACCEPTED:
        assert f"| {rule.name} | {rule.reason} |" in page
    for header, reason in IGNORED_HEADERS.items():
        assert f"| header {header} | {reason} |" in page
    for name, reason in ACCEPTED_HANDSHAKES.items():
        assert f"| handshake: {name} | {reason} |" in page
    total = len(BY_NAME) - len(NEVER_SENT)
    assert f"`methods covered: {total} of {total}`" in page
